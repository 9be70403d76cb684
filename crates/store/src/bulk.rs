//! Bulk application of finalized history: append-only rows by COPY, state by one merge per table. The caller holds the
//! lock on the network's row of ledger.network_progress, so nothing else writes this network's ledger meanwhile and plain
//! inserts cannot conflict.
//!
//! The merge tables are temporary and empty themselves at commit.

use tidemark_model::digest::{BUCKETS, Digest};
use tidemark_model::ids::{AccountId, AssetId, Height, NetworkId};
use tidemark_model::{OffsetDateTime, U256};
use tokio_postgres::error::SqlState;
use uuid::Uuid;

use crate::copy::CopyBuffer;
use crate::db::{Conn, StoreError, Tx};

/// Where a network's ledger stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Newest contiguous height whose events are normalized; -1 for none.
    pub head: i64,
    /// Applied to ownership_current up to here; -1 for none.
    pub finalized: i64,
    /// Applied in bulk up to here; -1 for none.
    pub history: i64,
    /// The read models are built when history is done, and until then nothing keeps them
    /// ([`crate::projection::built_last`]).
    pub read_models_due: bool,
    /// Where they stand meanwhile; none if they hold nothing of the network.
    pub read_models_height: Option<i64>,
}

const ENSURE_PROGRESS: &str = "
    with log as (insert into ledger.log_heights (network_id) values ($1) on conflict (network_id) do nothing)
    insert into ledger.network_progress (network_id, head_height, finalized_height, history_height)
    values ($1, $2, $2, $2) on conflict (network_id) do nothing";
const LOCK_PROGRESS: &str = "
    select head_height, finalized_height, history_height, read_models_due, read_models_height
      from ledger.network_progress where network_id = $1 for update";
const READ_PROGRESS: &str = "
    select head_height, finalized_height, history_height, read_models_due, read_models_height
      from ledger.network_progress where network_id = $1";

/// Makes the network's row if it is missing: everything below `start` counts as done.
pub async fn ensure_progress(conn: &Conn, network: NetworkId, start: Height) -> Result<(), StoreError> {
    let before_start = start.as_i64() - 1;
    conn.execute("make the ledger's progress row", ENSURE_PROGRESS, &[&network.0, &before_start]).await?;
    Ok(())
}

/// Locks the network's ledger for this transaction and says where it stands.
pub async fn lock_progress(tx: &Tx<'_>, network: NetworkId) -> Result<Progress, StoreError> {
    let row = tx.query_one("lock the ledger's progress", LOCK_PROGRESS, &[&network.0]).await?;
    Ok(progress(&row))
}

/// Where the network's ledger stands, without a lock.
pub async fn read_progress(conn: &Conn, network: NetworkId) -> Result<Option<Progress>, StoreError> {
    let row = conn.query_opt("read the ledger's progress", READ_PROGRESS, &[&network.0]).await?;
    Ok(row.as_ref().map(progress))
}

fn progress(row: &tokio_postgres::Row) -> Progress {
    Progress {
        head: row.get(0),
        finalized: row.get(1),
        history: row.get(2),
        read_models_due: row.get(3),
        read_models_height: row.get(4),
    }
}

// Looks only at what the projector has not taken yet: numbered events above its position, and events that the
// relay has not numbered. A long backlog counts as this network's without a look; so does a window of the
// relay that is only partly numbered, and everything where no relay has ever run.
const PROJECTOR_LAGS: &str = "
    with backlog as (
        select l.outbox_day, l.outbox_seq
          from system.bus_partitions b
          left join system.consumer_positions p
                 on p.handler_kind = 'projector' and p.stream = 'ledger' and p.part = b.part
         cross join lateral (select l.outbox_day, l.outbox_seq from system.bus_log l
                              where l.stream = 'ledger' and l.part = b.part and l.pseq > coalesce(p.pseq, 0)
                              order by l.pseq limit 1001) l
         where b.stream = 'ledger')
    select case
        when r.id is null then
            exists (select from system.outbox_events o where o.stream = 'ledger' and o.partition_key = $1)
        else r.window_end is not null
            or (select count(*) from backlog) > 1000
            or exists (select from backlog l
                        cross join lateral (select o.partition_key from system.outbox_events o
                                             where o.day = l.outbox_day and o.seq = l.outbox_seq limit 1) o
                        where o.partition_key = $1)
            or exists (select from system.outbox_events o
                        where o.xid >= pg_snapshot_xmin(r.snapshot::pg_snapshot)
                          and not pg_visible_in_snapshot(o.xid, r.snapshot::pg_snapshot)
                          and o.stream = 'ledger' and o.partition_key = $1)
        end
      from (select 1) one left join system.relay_cursor r on r.id = 1";

/// Does the ledger have live events that the projections do not hold yet? A segment adds its differences to
/// what the projections hold, so that must be what the ledger holds.
pub async fn projector_lags(conn: &Conn, network: NetworkId) -> Result<bool, StoreError> {
    let key = network.0.to_string();
    Ok(conn.query_one("look for events to project", PROJECTOR_LAGS, &[&key]).await?.get(0))
}

const CATCHING_UP: &str = "
    select coalesce(head_height - normalized_height > $2 and halted_reason is null, true)
        or exists (select from ledger.network_progress p where p.network_id = $1 and p.read_models_due)
      from projection.network_status where network_id = $1";

/// Is the network's ledger more than `blocks` behind its chain, as far as the status tells?
pub async fn is_catching_up(conn: &Conn, network: NetworkId, blocks: i64) -> Result<bool, StoreError> {
    let row =
        conn.query_opt("look how far the ledger is behind", CATCHING_UP, &[&network.0, &blocks]).await?;
    Ok(row.is_none_or(|row| row.get(0)))
}

const CREATE_TEMP_TABLES: &str = "
    create temp table if not exists seg_balances (
        asset_id uuid not null, account_id uuid not null, collection_id uuid not null,
        net numeric not null, low numeric not null) on commit delete rows;
    create temp table if not exists seg_merge (
        asset_id uuid not null, account_id uuid not null, collection_id uuid not null,
        net numeric not null, low numeric not null, old numeric, at tid) on commit delete rows;
    create temp table if not exists seg_assets (
        asset_id uuid not null, collection_id uuid not null, token_id text not null, standard text not null,
        supply numeric not null, first_seen timestamptz not null, first_height bigint not null,
        last_height bigint not null, partial boolean not null, burnt boolean not null,
        high numeric not null) on commit delete rows;
    create temp table if not exists seg_assets_merge (
        asset_id uuid not null, collection_id uuid not null, token_id text not null, standard text not null,
        supply numeric not null, first_seen timestamptz not null, first_height bigint not null,
        last_height bigint not null, partial boolean not null, old_supply numeric, is_burned boolean not null,
        high numeric not null, at tid) on commit delete rows;
    create temp table if not exists seg_accounts (
        account_id uuid not null, address text not null, first_seen timestamptz not null,
        last_seen timestamptz not null, transfers bigint not null) on commit delete rows;
    create temp table if not exists seg_accounts_merge (
        account_id uuid not null, address text not null, first_seen timestamptz not null,
        last_seen timestamptz not null, transfers bigint not null, at tid) on commit delete rows;
    create temp table if not exists seg_collections (
        collection_id uuid not null, contract_id uuid not null, address text not null, standard text not null,
        first_seen timestamptz not null, first_height bigint not null, last_height bigint not null,
        transfers bigint not null) on commit delete rows;
    create temp table if not exists seg_holders (
        collection_id uuid not null, account_id uuid not null, assets bigint not null, qty numeric not null,
        old bigint, at tid) on commit delete rows";
const CREATE_TEMP_EVENT_IDS: &str =
    "create temp table if not exists seg_events (id uuid not null) on commit delete rows";

/// Rows for the merge tables, encoded by the caller in the order of the columns above; those with a uuid in
/// front in its order ([`CopyBuffer::sorted_by_leading_uuid`]).
pub struct Merge {
    /// seg_balances: asset, account, collection, net, low
    pub balances: CopyBuffer,
    /// seg_assets: asset, collection, token id, standard, supply, first seen, first height, last height, partial,
    /// something was burnt, largest supply on the way
    pub assets: CopyBuffer,
    /// seg_accounts: account, address, first seen, last seen, transfers
    pub accounts: CopyBuffer,
    /// seg_collections: collection, contract, address, standard, first seen, first height, last height, transfers
    pub collections: CopyBuffer,
}

const COPY_BALANCES: &str = "copy seg_balances from stdin (format binary)";
const COPY_ASSETS: &str = "copy seg_assets from stdin (format binary)";
const COPY_ACCOUNTS: &str = "copy seg_accounts from stdin (format binary)";
const COPY_COLLECTIONS: &str = "copy seg_collections from stdin (format binary)";
const JOIN_BALANCES: &str = "
    insert into seg_merge (asset_id, account_id, collection_id, net, low, old, at)
    select s.asset_id, s.account_id, s.collection_id, s.net, s.low, c.qty, c.ctid
      from seg_balances s
      left join ledger.ownership_current c on c.asset_id = s.asset_id and c.account_id = s.account_id";
const BELOW_ZERO: &str = "
    select m.asset_id, m.account_id, coalesce(m.old, 0), -(coalesce(m.old, 0) + m.low),
           exists (select 1 from catalog.assets a
                    where a.id = m.asset_id and (a.supply > 0 or a.is_burned))
      from seg_merge m
     where m.low < 0 and coalesce(m.old, 0) + m.low < 0
     order by m.asset_id, m.account_id
     limit $1";

/// A pair whose balance would have gone below zero.
#[derive(Debug, Clone, Copy)]
pub struct BelowZero {
    /// The asset.
    pub asset: AssetId,
    /// The account.
    pub account: AccountId,
    /// What it held before the segment.
    pub held: U256,
    /// How much was missing at the worst moment.
    pub missing: U256,
    /// Had units of the asset moved before this segment?
    pub moved_before: bool,
}

/// Pairs looked at in one try; more are found in the next.
const BELOW_ZERO_MAX: i64 = 20_000;

/// Loads the merge tables.
pub async fn stage(tx: &Tx<'_>, merge: Merge) -> Result<(), StoreError> {
    create_merge_tables(tx).await?;
    tx.copy_in("stage balances", COPY_BALANCES, merge.balances).await?;
    tx.copy_in("stage assets", COPY_ASSETS, merge.assets).await?;
    tx.copy_in("stage accounts", COPY_ACCOUNTS, merge.accounts).await?;
    tx.copy_in("stage collections", COPY_COLLECTIONS, merge.collections).await?;
    Ok(())
}

/// Looks for balances that would go below zero. If there are any, the caller rolls back, learns more about them and
/// builds the segment again.
pub async fn join_balances(tx: &Tx<'_>) -> Result<Vec<BelowZero>, StoreError> {
    tx.look_up_one_by_one().await?;
    tx.execute("join balances", JOIN_BALANCES, &[]).await?;
    tx.look_up_as_usual().await?;
    let rows = tx.query("look for balances below zero", BELOW_ZERO, &[&BELOW_ZERO_MAX]).await?;
    Ok(rows
        .iter()
        .map(|row| BelowZero {
            asset: AssetId(row.get(0)),
            account: AccountId(row.get(1)),
            held: row.get(2),
            missing: row.get(3),
            moved_before: row.get(4),
        })
        .collect())
}

/// The merge tables, empty.
pub(crate) async fn create_merge_tables(tx: &Tx<'_>) -> Result<(), StoreError> {
    tx.batch("create the merge tables", CREATE_TEMP_TABLES).await
}

/// Append-only rows, encoded by the caller in the order of the columns of the statements below. Those whose key is
/// a hash come in its order.
pub struct Log {
    /// Ids of all events, for the rare case that some were reverted before.
    pub ids: CopyBuffer,
    /// ledger.normalized_events
    pub events: CopyBuffer,
    /// ledger.ownership_history
    pub history: CopyBuffer,
    /// projection.transfers
    pub transfers: CopyBuffer,
    /// projection.block_cards
    pub blocks: CopyBuffer,
}

const COPY_EVENTS: &str = "
    copy ledger.normalized_events (id, source_event_id, sub_index, network_id, event_kind, asset_id, collection_id,
        from_account_id, to_account_id, qty_delta, block_number, block_hash, tx_hash, event_index, event_time,
        finality_status, is_reverted, blob_ref) from stdin (format binary)";
const COPY_HISTORY: &str = "
    copy ledger.ownership_history (asset_id, account_id, network_id, block_number, event_index, qty_delta, event_time,
        normalized_event_id, leg) from stdin (format binary)";
const COPY_TRANSFERS: &str = "
    copy projection.transfers (network_id, height, event_index, sub_index, event_id, kind, asset_id, collection_id,
        from_account, to_account, qty, tx_hash, block_hash, event_time, is_reverted) from stdin (format binary)";
const COPY_BLOCKS: &str = "
    copy projection.block_cards (network_id, height, hash, parent_hash, block_time, tx_count, event_count)
        from stdin (format binary)";

/// Appends the segment's log rows.
pub async fn append(tx: &Tx<'_>, network: NetworkId, log: Log) -> Result<(), StoreError> {
    if has_reverted_events(tx, network).await? {
        forget_reverted(tx, network, log.ids).await?;
    }
    tx.copy_in("append events", COPY_EVENTS, log.events).await?;
    tx.copy_in("append ownership history", COPY_HISTORY, log.history).await?;
    tx.copy_in("append transfers", COPY_TRANSFERS, log.transfers).await?;
    tx.copy_in("append block cards", COPY_BLOCKS, log.blocks).await?;
    Ok(())
}

const HAS_REVERTED: &str = "
    select exists (select 1 from ledger.normalized_events where network_id = $1 and is_reverted)";
const COPY_EVENT_IDS: &str = "copy seg_events from stdin (format binary)";
const FORGET_EVENTS: &str = "
    delete from ledger.normalized_events e using seg_events s where e.id = s.id and e.is_reverted";
const FORGET_TRANSFERS: &str = "
    delete from projection.transfers t using seg_events s
     where t.network_id = $1 and t.event_id = s.id and t.is_reverted";

/// Does the network have events that left the chain?
async fn has_reverted_events(tx: &Tx<'_>, network: NetworkId) -> Result<bool, StoreError> {
    Ok(tx.query_one("look for reverted events", HAS_REVERTED, &[&network.0]).await?.get(0))
}

/// A reverted event that history brings back (its transaction was included again while we were away) gives
/// way to its final form.
async fn forget_reverted(tx: &Tx<'_>, network: NetworkId, ids: CopyBuffer) -> Result<(), StoreError> {
    tx.batch("create the table of event ids", CREATE_TEMP_EVENT_IDS).await?;
    tx.copy_in("stage event ids", COPY_EVENT_IDS, ids).await?;
    tx.execute("forget reverted events", FORGET_EVENTS, &[]).await?;
    tx.execute("forget reverted transfers", FORGET_TRANSFERS, &[&network.0]).await?;
    Ok(())
}

const DELETE_EMPTY: &str = "
    delete from ledger.ownership_current c using seg_merge m where c.ctid = m.at and m.old + m.net = 0";
const UPDATE_HELD: &str = "
    update ledger.ownership_current c set qty = m.old + m.net, updated_at = $1
      from seg_merge m where c.ctid = m.at and m.old + m.net <> 0 and m.net <> 0";
const INSERT_HELD: &str = "
    insert into ledger.ownership_current (asset_id, account_id, network_id, qty, finality_status, updated_at)
    select asset_id, account_id, $1, net, 'finalized', $2 from seg_merge
     where at is null and net <> 0 order by asset_id, account_id";
const DELETE_VIEW: &str = "
    delete from projection.ownership_view v using seg_merge m
     where m.old + m.net = 0 and v.asset_id = m.asset_id and v.account_id = m.account_id";
const UPDATE_VIEW: &str = "
    update projection.ownership_view v
       set qty = m.old + m.net, qty_finalized = m.old + m.net, finality_status = 'finalized', open_height = null,
           updated_at = $1
      from seg_merge m
     where m.old + m.net <> 0 and m.net <> 0 and v.asset_id = m.asset_id and v.account_id = m.account_id";
const INSERT_VIEW: &str = "
    insert into projection.ownership_view
        (asset_id, account_id, network_id, collection_id, qty, qty_finalized, finality_status, updated_at)
    select asset_id, account_id, $1, collection_id, net, net, 'finalized', $2 from seg_merge
     where at is null and net <> 0 order by asset_id, account_id
    on conflict (asset_id, account_id) do update
       set qty = excluded.qty, qty_finalized = excluded.qty_finalized, finality_status = 'finalized',
           open_height = null, updated_at = excluded.updated_at";

/// Merges the staged balances into ledger.ownership_current. Call after [`join_balances`].
pub async fn merge_balances(tx: &Tx<'_>, network: NetworkId, now: OffsetDateTime) -> Result<(), StoreError> {
    // By their addresses one by one: up to some size of the table the planner would rather read all of it.
    tx.look_up_one_by_one().await?;
    tx.execute("remove emptied balances", DELETE_EMPTY, &[]).await?;
    tx.execute("update balances", UPDATE_HELD, &[&now]).await?;
    tx.look_up_as_usual().await?;
    tx.execute("insert balances", INSERT_HELD, &[&network.0, &now]).await?;
    Ok(())
}

const INSERT_CONTRACTS: &str = "
    insert into catalog.contracts (id, network_id, address_normalized, standard_id)
    select contract_id, $1, address, standard from seg_collections order by contract_id
    on conflict (id) do nothing";
const INSERT_COLLECTIONS: &str = "
    insert into catalog.collections (id, network_id, contract_id, is_stub, created_at)
    select collection_id, $1, contract_id, true, first_seen from seg_collections order by collection_id
    on conflict (id) do nothing";
// An asset is burned when nothing is left of it and a burn took the last of it.
const JOIN_ASSETS: &str = "
    insert into seg_assets_merge (asset_id, collection_id, token_id, standard, supply, first_seen, first_height,
        last_height, partial, old_supply, is_burned, high, at)
    select s.asset_id, s.collection_id, s.token_id, s.standard, s.supply, s.first_seen, s.first_height,
           s.last_height, s.partial, a.supply,
           coalesce(a.supply, 0) + s.supply = 0 and (s.burnt or coalesce(a.is_burned, false)), s.high, a.ctid
      from seg_assets s left join catalog.assets a on a.id = s.asset_id";
/// 2^256 - 1, or one where a token is single.
macro_rules! most {
    ($is_fungible_class:expr) => {
        concat!(
            "case when ",
            $is_fungible_class,
            " then 115792089237316195423570985008687907853269984665640564039457584007913129639935 else 1 end"
        )
    };
}
/// The token id as a number, where it is one. (A regular expression would cost as much as the rest of the row.)
macro_rules! token_number {
    () => {
        "case when length(s.token_id) between 1 and 78 and ltrim(s.token_id, '0123456789') = ''
              then s.token_id::numeric end"
    };
}
const OVERFULL: &str = concat!(
    "select m.asset_id, m.old_supply
       from seg_assets_merge m join ref.standards r on r.id = m.standard
      where m.old_supply > 0 and m.high > 0 and m.old_supply + m.high > ",
    most!("r.is_fungible_class"),
    " order by m.asset_id"
);
const UPDATE_ASSETS: &str = "
    update catalog.assets a set supply = a.supply + s.supply, is_burned = s.is_burned
      from seg_assets_merge s where a.ctid = s.at and (s.supply <> 0 or a.is_burned <> s.is_burned)";
const INSERT_ASSETS: &str = concat!(
    "insert into catalog.assets (id, network_id, collection_id, token_id_raw, token_id_num, standard_id,
         is_fungible_class, is_burned, supply, history, is_stub, first_seen_block, created_at)
     select s.asset_id, $1, s.collection_id, s.token_id, ",
    token_number!(),
    ", s.standard, r.is_fungible_class, s.is_burned, s.supply,
            case when s.partial then 'partial' else 'complete' end, true, s.first_height, s.first_seen
       from seg_assets_merge s join ref.standards r on r.id = s.standard
      where s.at is null order by s.asset_id"
);
const UPDATE_CARDS: &str = "
    update projection.asset_cards c
       set supply = c.supply + s.supply, is_burned = s.is_burned,
           last_height = greatest(c.last_height, s.last_height), updated_at = $1
      from seg_assets_merge s where s.at is not null and c.asset_id = s.asset_id";
const INSERT_CARDS: &str = "
    insert into projection.asset_cards (asset_id, network_id, collection_id, token_id, standard, is_stub, is_burned,
        supply, history, finality_status, last_height, updated_at)
    select s.asset_id, $1, s.collection_id, s.token_id, s.standard, true, s.is_burned, s.supply,
           case when s.partial then 'partial' else 'complete' end, 'finalized', s.last_height, $2
      from seg_assets_merge s where s.at is null order by s.asset_id
    on conflict (asset_id) do nothing";
const JOIN_ACCOUNTS: &str = "
    insert into seg_accounts_merge (account_id, address, first_seen, last_seen, transfers, at)
    select s.account_id, s.address, s.first_seen, s.last_seen, s.transfers, a.ctid
      from seg_accounts s left join ledger.accounts a on a.id = s.account_id";
const INSERT_ACCOUNTS: &str = "
    insert into ledger.accounts (id, network_id, address_normalized, first_seen_at)
    select account_id, $1, address, first_seen from seg_accounts_merge where at is null order by account_id";

/// Writes stubs of contracts, collections, assets and accounts, and supplies. Gives assets of which more was made
/// than there can be, with their supply before: then the caller rolls back, and builds the segment again
/// knowing that.
pub async fn merge_catalog(tx: &Tx<'_>, network: NetworkId) -> Result<Vec<(AssetId, U256)>, StoreError> {
    tx.look_up_one_by_one().await?;
    tx.execute("join assets", JOIN_ASSETS, &[]).await?;
    tx.execute("join accounts", JOIN_ACCOUNTS, &[]).await?;
    let overfull = tx.query("look for impossible supplies", OVERFULL, &[]).await?;
    if !overfull.is_empty() {
        return Ok(overfull.iter().map(|row| (AssetId(row.get(0)), row.get(1))).collect());
    }
    tx.execute("update supplies", UPDATE_ASSETS, &[]).await?;
    tx.look_up_as_usual().await?;
    tx.execute("insert assets", INSERT_ASSETS, &[&network.0]).await?;
    insert_stubs(tx, network).await?;
    Ok(Vec::new())
}

/// Contracts, collections and accounts that are new. Accounts are joined by then.
async fn insert_stubs(tx: &Tx<'_>, network: NetworkId) -> Result<(), StoreError> {
    tx.execute("insert contracts", INSERT_CONTRACTS, &[&network.0]).await?;
    tx.execute("insert collections", INSERT_COLLECTIONS, &[&network.0]).await?;
    tx.execute("insert accounts", INSERT_ACCOUNTS, &[&network.0]).await?;
    Ok(())
}

// Each row is found and changed at once, while its pages are in the processor's cache; apart, a large ledger has pushed
// them out in between. What cannot be divides by zero, which ends the statement: nothing else here divides.
const MERGE_BALANCES: &str = "
    merge into ledger.ownership_current c
    using seg_balances s on c.asset_id = s.asset_id and c.account_id = s.account_id
     when matched and s.low < 0 and c.qty + s.low < 0 then update set qty = c.qty / 0
     when matched and c.qty + s.net = 0 then delete
     when matched and s.net <> 0 then update set qty = c.qty + s.net, updated_at = $2
     when not matched and s.low < 0 then
          insert (asset_id, account_id, network_id, qty, updated_at)
          values (s.asset_id, s.account_id, $1, s.net / 0, $2)
     when not matched and s.net <> 0 then
          insert (asset_id, account_id, network_id, qty, finality_status, updated_at)
          values (s.asset_id, s.account_id, $1, s.net, 'finalized', $2)";
const MERGE_ASSETS: &str = concat!(
    "merge into catalog.assets a
     using (select s.*, r.is_fungible_class from seg_assets s join ref.standards r on r.id = s.standard) s
        on a.id = s.asset_id
     when matched and a.supply > 0 and s.high > 0 and a.supply + s.high > ",
    most!("s.is_fungible_class"),
    "     then update set supply = a.supply / 0
     when matched and (s.supply <> 0
              or a.is_burned <> (a.supply + s.supply = 0 and (s.burnt or a.is_burned)))
          then update set supply = a.supply + s.supply,
                          is_burned = a.supply + s.supply = 0 and (s.burnt or a.is_burned)
     when not matched then
          insert (id, network_id, collection_id, token_id_raw, token_id_num, standard_id, is_fungible_class, is_burned,
                  supply, history, is_stub, first_seen_block, created_at)
          values (s.asset_id, $1, s.collection_id, s.token_id, ",
    token_number!(),
    ", s.standard, s.is_fungible_class, s.supply = 0 and s.burnt,
                  s.supply, case when s.partial then 'partial' else 'complete' end, true, s.first_height, s.first_seen)"
);

/// What [`join_balances`], [`merge_balances`] and [`merge_catalog`] do, in one go and without knowing what was there
/// before: for segments whose read models come later. `false`: a balance would go below zero, or more would be made of an
/// asset than there can be. Then the caller rolls back, and goes the way that tells where.
pub async fn merge_at_once(tx: &Tx<'_>, network: NetworkId, now: OffsetDateTime) -> Result<bool, StoreError> {
    tx.look_up_one_by_one().await?;
    let merged = async {
        tx.execute("merge balances", MERGE_BALANCES, &[&network.0, &now]).await?;
        tx.execute("merge assets", MERGE_ASSETS, &[&network.0]).await?;
        tx.execute("join accounts", JOIN_ACCOUNTS, &[]).await
    };
    match merged.await {
        Err(error) if error.code() == Some(&SqlState::DIVISION_BY_ZERO) => return Ok(false),
        merged => merged?,
    };
    tx.look_up_as_usual().await?;
    insert_stubs(tx, network).await?;
    Ok(true)
}

const MARK_PARTIAL: &str = "
    update catalog.assets set history = 'partial' where id = any($1) and history <> 'partial'";
const MARK_CARDS_PARTIAL: &str = "
    update projection.asset_cards set history = 'partial' where asset_id = any($1) and history <> 'partial'";

/// Says of assets that they are older than our first block, also of those that live had seen before. Call
/// after [`merge_read_models`].
pub async fn mark_partial(tx: &Tx<'_>, assets: &[Uuid]) -> Result<(), StoreError> {
    if !assets.is_empty() {
        tx.execute("mark assets as partial", MARK_PARTIAL, &[&assets]).await?;
        tx.execute("mark cards as partial", MARK_CARDS_PARTIAL, &[&assets]).await?;
    }
    Ok(())
}

const JOIN_HOLDERS: &str = "
    insert into seg_holders (collection_id, account_id, assets, qty, old, at)
    select d.collection_id, d.account_id, d.assets, d.qty, h.asset_count, h.ctid
      from (select collection_id, account_id,
                   sum((coalesce(old, 0) + net > 0)::int - (coalesce(old, 0) > 0)::int) as assets, sum(net) as qty
              from seg_merge group by collection_id, account_id order by collection_id, account_id) d
      left join projection.collection_holders h
        on h.collection_id = d.collection_id and h.account_id = d.account_id
     where d.assets <> 0 or d.qty <> 0";
const DELETE_HOLDERS: &str = "
    delete from projection.collection_holders h using seg_holders s where h.ctid = s.at and s.old + s.assets = 0";
const UPDATE_HOLDERS: &str = "
    update projection.collection_holders h set asset_count = h.asset_count + s.assets, qty = h.qty + s.qty
      from seg_holders s where h.ctid = s.at and s.old + s.assets <> 0";
const INSERT_HOLDERS: &str = "
    insert into projection.collection_holders (collection_id, account_id, asset_count, qty)
    select collection_id, account_id, assets, qty from seg_holders
     where at is null and assets <> 0 order by collection_id, account_id";
/// `holders`: what holders change in their collections, as (collection_id, owners). `cards`: what cards do, as
/// (collection_id, stubs, supply, born).
macro_rules! upsert_stats {
    ($holders:expr, $cards:expr) => {
        concat!(
            "
    insert into projection.collection_stats as t (collection_id, network_id, address, standard, is_stub, owners_count,
        asset_count, total_supply, stub_count, transfer_count, last_height, updated_at)
    select c.collection_id, $1, c.address, c.standard, true, coalesce(h.owners, 0), coalesce(a.born, 0),
           coalesce(a.supply, 0), coalesce(a.stubs, 0), c.transfers, c.last_height, $2
      from seg_collections c
      left join (",
            $holders,
            ") h on h.collection_id = c.collection_id
      left join (",
            $cards,
            ") a on a.collection_id = c.collection_id
     order by c.collection_id
    on conflict (collection_id) do update
       set owners_count = t.owners_count + excluded.owners_count, asset_count = t.asset_count + excluded.asset_count,
           total_supply = t.total_supply + excluded.total_supply, stub_count = t.stub_count + excluded.stub_count,
           transfer_count = t.transfer_count + excluded.transfer_count,
           last_height = greatest(t.last_height, excluded.last_height), updated_at = excluded.updated_at"
        )
    };
}
const UPSERT_STATS: &str = upsert_stats!(
    "select collection_id, sum((coalesce(old, 0) + assets > 0)::int - (coalesce(old, 0) > 0)::int) as owners
       from seg_holders group by collection_id",
    "select s.collection_id, count(*) filter (where s.at is null) as stubs, sum(s.supply) as supply,
            sum((coalesce(s.old_supply, 0) + s.supply > 0)::int - (coalesce(s.old_supply, 0) > 0)::int) as born
       from seg_assets_merge s group by s.collection_id"
);
const UPSERT_NOTED_STATS: &str = upsert_stats!(
    "select collection_id, sum(owners) as owners from projection.stats_to_come
      where network_id = $1 group by collection_id",
    "select collection_id, sum(stubs) as stubs, sum(supply) as supply, sum(assets) as born
       from projection.stats_to_come where network_id = $1 group by collection_id"
);
/// `holdings`: what holdings change in their accounts, as (account_id, assets).
macro_rules! upsert_summaries {
    ($holdings:expr) => {
        concat!(
            "
    insert into projection.account_summaries as t
        (account_id, network_id, address, asset_count, transfer_count, first_seen_at, last_seen_at, updated_at)
    select s.account_id, $1, s.address, coalesce(d.assets, 0), s.transfers, s.first_seen, s.last_seen, $2
      from seg_accounts_merge s
      left join (",
            $holdings,
            ") d on d.account_id = s.account_id
     order by s.account_id
    on conflict (account_id) do update
       set asset_count = t.asset_count + excluded.asset_count,
           transfer_count = t.transfer_count + excluded.transfer_count,
           last_seen_at = greatest(t.last_seen_at, excluded.last_seen_at), updated_at = excluded.updated_at"
        )
    };
}
const UPSERT_SUMMARIES: &str = upsert_summaries!(
    "select account_id, sum((coalesce(old, 0) + net > 0)::int - (coalesce(old, 0) > 0)::int) as assets
       from seg_merge group by account_id"
);
const UPSERT_NOTED_SUMMARIES: &str = upsert_summaries!(
    "select account_id, sum(assets) as assets from projection.accounts_to_come
      where network_id = $1 group by account_id"
);

/// Merges what the segment did into the read models, unless they are due later. Call after [`merge_catalog`].
pub async fn merge_read_models(
    tx: &Tx<'_>,
    network: NetworkId,
    now: OffsetDateTime,
) -> Result<(), StoreError> {
    tx.look_up_one_by_one().await?;
    tx.execute("remove emptied holdings", DELETE_VIEW, &[]).await?;
    tx.execute("update holdings", UPDATE_VIEW, &[&now]).await?;
    tx.execute("update asset cards", UPDATE_CARDS, &[&now]).await?;
    merge_holders(tx).await?;
    tx.look_up_as_usual().await?;
    tx.execute("insert holdings", INSERT_VIEW, &[&network.0, &now]).await?;
    tx.execute("insert asset cards", INSERT_CARDS, &[&network.0, &now]).await?;
    tx.execute("merge collection statistics", UPSERT_STATS, &[&network.0, &now]).await?;
    tx.execute("merge account summaries", UPSERT_SUMMARIES, &[&network.0, &now]).await?;
    Ok(())
}

/// Moves holders by what seg_merge says of holdings.
pub(crate) async fn merge_holders(tx: &Tx<'_>) -> Result<(), StoreError> {
    tx.execute("join holders", JOIN_HOLDERS, &[]).await?;
    tx.execute("remove former holders", DELETE_HOLDERS, &[]).await?;
    tx.execute("update holders", UPDATE_HOLDERS, &[]).await?;
    tx.execute("insert holders", INSERT_HOLDERS, &[]).await?;
    Ok(())
}

// Sets of sizes that nobody counted, joined as a whole.
const JOIN_WHOLE: &str = "set local enable_nestloop = off";
const JOIN_AS_USUAL: &str = "set local enable_nestloop to default";

/// Moves accounts and statistics by what seg_accounts_merge and seg_collections say of transfers, and by what was noted of
/// holdings, holders and cards.
pub(crate) async fn merge_noted(
    tx: &Tx<'_>,
    network: NetworkId,
    now: OffsetDateTime,
) -> Result<(), StoreError> {
    tx.batch("join sets as a whole", JOIN_WHOLE).await?;
    tx.execute("merge account summaries", UPSERT_NOTED_SUMMARIES, &[&network.0, &now]).await?;
    tx.execute("merge collection statistics", UPSERT_NOTED_STATS, &[&network.0, &now]).await?;
    tx.batch("join as usual", JOIN_AS_USUAL).await
}

const READ_DIGESTS: &str = "select bucket, digest from ledger.digests where network_id = $1 for update";
const WRITE_DIGESTS: &str = "
    insert into ledger.digests (network_id, bucket, digest, height)
    select $1, bucket, digest, $4 from unnest($2::smallint[], $3::numeric[]) as d (bucket, digest) order by bucket
    on conflict (network_id, bucket) do update set digest = excluded.digest, height = excluded.height";
const WRITE_DIGEST_TOTAL: &str = "
    insert into ledger.digest_history (network_id, height, digest) values ($1, $2, $3)
    on conflict (network_id, height) do update set digest = excluded.digest";

/// Adds per-bucket changes to the network's digest and records the total at `height`.
pub async fn add_digests(
    tx: &Tx<'_>,
    network: NetworkId,
    changes: &[Digest],
    height: i64,
) -> Result<(), StoreError> {
    assert_eq!(changes.len(), BUCKETS, "one digest change per bucket");
    let mut all = changes.to_vec();
    for row in tx.query("read digests", READ_DIGESTS, &[&network.0]).await? {
        let bucket = usize::try_from(row.get::<_, i16>(0)).expect("buckets are stored as 0..256");
        all[bucket].merge(Digest(row.get(1)));
    }
    let mut total = Digest::default();
    for digest in &all {
        total.merge(*digest);
    }
    let buckets: Vec<i16> = (0..256).collect();
    let digests: Vec<U256> = all.iter().map(|digest| digest.0).collect();
    tx.execute("write digests", WRITE_DIGESTS, &[&network.0, &buckets, &digests, &height]).await?;
    tx.execute("record the digest", WRITE_DIGEST_TOTAL, &[&network.0, &height, &total.0]).await?;
    Ok(())
}

const FINISH: &str = "
    update ledger.network_progress
       set head_height = $2, finalized_height = $2, history_height = $2,
           reported_finalized = greatest(reported_finalized, $2), updated_at = now()
     where network_id = $1 and head_height = $3";
const CHECKPOINTS: &str = "
    insert into app.indexing_checkpoints (worker_name, network_id, height)
    select worker, $1, $2 from unnest($3::text[]) as worker order by worker
    on conflict (worker_name, network_id) do update set height = excluded.height, updated_at = now()";

/// Moves the network's ledger from `old_head` to `height`, everything below it final, and the checkpoints of these
/// workers with it.
pub async fn finish(
    tx: &Tx<'_>,
    network: NetworkId,
    old_head: i64,
    height: i64,
    workers: &[&str],
) -> Result<(), StoreError> {
    if tx.execute("move the ledger's progress", FINISH, &[&network.0, &height, &old_head]).await? == 0 {
        return Err(StoreError::Fenced { what: format!("the ledger of network {network}") });
    }
    tx.execute("move checkpoints", CHECKPOINTS, &[&network.0, &height, &workers]).await?;
    Ok(())
}

const QUARANTINE: &str = "
    insert into ledger.quarantine
        (normalized_event_id, consumer, network_id, source_event_id, block_number, asset_id, reason, evidence)
    select id, $1, $2, source, height, asset, reason, evidence
      from unnest($3::uuid[], $4::text[], $5::bigint[], $6::uuid[], $7::text[], $8::jsonb[])
           as q (id, source, height, asset, reason, evidence)
     order by id
    on conflict (consumer, normalized_event_id) do nothing";
const DISTRUST: &str = "
    update catalog.contracts c set reliability = 'unreliable', unreliable_reason = d.reason
      from unnest($1::uuid[], $2::text[]) as d (id, reason)
     where c.id = d.id and c.reliability = 'ok'";
const DISTRUST_STATS: &str = "
    update projection.collection_stats s set reliability = c.reliability, unreliable_reason = c.unreliable_reason
      from catalog.collections l join catalog.contracts c on c.id = l.contract_id
     where l.contract_id = any($1) and s.collection_id = l.id";

/// One event that is kept but has no effect.
#[derive(Debug, Clone)]
pub struct QuarantineRow {
    /// The event.
    pub event: Uuid,
    /// Its chain-native identity.
    pub source: String,
    /// Its height.
    pub height: i64,
    /// Its asset, when it has one.
    pub asset: Option<Uuid>,
    /// Why.
    pub reason: String,
    /// What was seen.
    pub evidence: serde_json::Value,
}

/// Records quarantined events for `consumer`.
pub async fn quarantine(
    tx: &Tx<'_>,
    consumer: &str,
    network: NetworkId,
    rows: &[QuarantineRow],
) -> Result<(), StoreError> {
    if rows.is_empty() {
        return Ok(());
    }
    let ids: Vec<Uuid> = rows.iter().map(|row| row.event).collect();
    let sources: Vec<&str> = rows.iter().map(|row| row.source.as_str()).collect();
    let heights: Vec<i64> = rows.iter().map(|row| row.height).collect();
    let assets: Vec<Option<Uuid>> = rows.iter().map(|row| row.asset).collect();
    let reasons: Vec<&str> = rows.iter().map(|row| row.reason.as_str()).collect();
    let evidence: Vec<&serde_json::Value> = rows.iter().map(|row| &row.evidence).collect();
    tx.execute(
        "quarantine events",
        QUARANTINE,
        &[&consumer, &network.0, &ids, &sources, &heights, &assets, &reasons, &evidence],
    )
    .await?;
    Ok(())
}

/// Flags contracts that break their own standard.
pub async fn distrust(tx: &Tx<'_>, contracts: &[(Uuid, String)]) -> Result<(), StoreError> {
    if contracts.is_empty() {
        return Ok(());
    }
    let ids: Vec<Uuid> = contracts.iter().map(|(id, _)| *id).collect();
    let reasons: Vec<&str> = contracts.iter().map(|(_, reason)| reason.as_str()).collect();
    tx.execute("flag unreliable contracts", DISTRUST, &[&ids, &reasons]).await?;
    tx.execute("show unreliable contracts", DISTRUST_STATS, &[&ids]).await?;
    Ok(())
}

const COUNT_EVENTS: &str = "
    update projection.network_status set events_total = events_total + $2 where network_id = $1";
const COUNT_REORG: &str = "
    update projection.network_status set reorgs_total = reorgs_total + 1 where network_id = $1";

/// Adds to the number of canonical events shown for a network.
pub async fn count_events(tx: &Tx<'_>, network: NetworkId, events: usize) -> Result<(), StoreError> {
    let events = i64::try_from(events).unwrap_or(i64::MAX);
    tx.execute("count events", COUNT_EVENTS, &[&network.0, &events]).await?;
    Ok(())
}

/// Adds one to the number of reorgs shown for a network.
pub async fn count_reorg(tx: &Tx<'_>, network: NetworkId) -> Result<(), StoreError> {
    tx.execute("count a reorg", COUNT_REORG, &[&network.0]).await?;
    Ok(())
}

const LEDGER_IS_EMPTY: &str = "select not exists (select 1 from ledger.normalized_events limit 1)";
// What Postgres says of a partitioned table's index would build it for the parent `ONLY`, and for no partition.
// Those of what is open or reverted are looked into by every segment, and history writes nothing to them.
const DEFERRABLE: &str = "
    select format('%I.%I', n.nspname, i.relname), replace(pg_get_indexdef(i.oid), ' ON ONLY ', ' ON ')
      from pg_class i
      join pg_namespace n on n.oid = i.relnamespace
      join pg_index x on x.indexrelid = i.oid
      join pg_class t on t.oid = x.indrelid
     where n.nspname in ('ledger', 'catalog', 'projection') and not x.indisunique and i.relkind in ('i', 'I')
       and not i.relispartition and i.relname not in ('normalized_events_open', 'normalized_events_reverted')
       and (format('%I.%I', n.nspname, t.relname) in (
           'ledger.normalized_events', 'ledger.ownership_current',
           'ledger.accounts', 'catalog.assets', 'projection.ownership_view', 'projection.collection_holders',
           'projection.asset_cards', 'projection.account_summaries', 'projection.block_cards')
           or t.oid in (select inhrelid from pg_inherits where inhparent = 'ledger.ownership_history'::regclass))
     order by 1";
const DEFER: &str = "
    insert into system.deferred_indexes (name, definition) values ($1, $2) on conflict (name) do nothing";
// Who builds one holds its row: nobody builds it twice, and who finds all of them held waits for one.
const NEXT_DEFERRED: &str = "
    select name, definition from system.deferred_indexes order by name limit 1 for update skip locked";
const ANY_DEFERRED: &str =
    "select name, definition from system.deferred_indexes order by name limit 1 for update";
const RESTORED: &str = "delete from system.deferred_indexes where name = $1";

/// Sorting a whole table takes as long as it takes. Two connections that sort in runs of this size build indexes in
/// three quarters of the time that one of them takes with 256 MB and two workers (ADR 0025).
pub(crate) const PREPARE_TO_INDEX: &str =
    "set local statement_timeout = 0; set local lock_timeout = 0; set local maintenance_work_mem = '64MB'";

const COUNT_DEFERRED: &str = "select count(*) from system.deferred_indexes";

/// How many indexes are away.
pub async fn deferred_indexes(conn: &Conn) -> Result<i64, StoreError> {
    Ok(conn.query_one("count deferred indexes", COUNT_DEFERRED, &[]).await?.get(0))
}

/// Takes secondary indexes away for a first large history, if the ledger is still empty. Each is written
/// down before it goes, in the same transaction.
pub async fn defer_indexes(conn: &mut Conn) -> Result<usize, StoreError> {
    let tx = conn.tx().await?;
    if !tx.query_one("look for events", LEDGER_IS_EMPTY, &[]).await?.get::<_, bool>(0) {
        return Ok(0);
    }
    let indexes = tx.query("list deferrable indexes", DEFERRABLE, &[]).await?;
    put_indexes_off(&tx, &indexes).await?;
    tx.commit().await?;
    Ok(indexes.len())
}

/// Drops indexes, given as (name, definition), and writes them down for [`restore_indexes`].
pub(crate) async fn put_indexes_off(tx: &Tx<'_>, indexes: &[tokio_postgres::Row]) -> Result<(), StoreError> {
    for index in indexes {
        let (name, definition): (String, String) = (index.get(0), index.get(1));
        tx.execute("write down an index", DEFER, &[&name, &definition]).await?;
        tx.batch("drop an index", &format!("drop index {name}")).await?;
    }
    Ok(())
}

/// Builds back what was taken away ([`defer_indexes`]), one transaction each; a crash in between resumes. Several may
/// do so at once, each on its connection: they share the work, and each comes back when nothing is left to build. Gives
/// how many this one built.
pub async fn restore_indexes(conn: &mut Conn) -> Result<usize, StoreError> {
    let mut built = 0;
    while deferred_indexes(conn).await? > 0 {
        let tx = conn.tx().await?;
        tx.batch("prepare to build an index", PREPARE_TO_INDEX).await?;
        let next = match tx.query_opt("take a deferred index", NEXT_DEFERRED, &[]).await? {
            Some(next) => Some(next),
            None => tx.query_opt("wait for a deferred index", ANY_DEFERRED, &[]).await?,
        };
        let Some(next) = next else { continue }; // Somebody built it meanwhile.
        let (name, definition): (&str, &str) = (next.get(0), next.get(1));
        tx.batch("build an index", definition).await?;
        tx.execute("cross out an index", RESTORED, &[&name]).await?;
        tx.commit().await?;
        built += 1;
    }
    Ok(built)
}
