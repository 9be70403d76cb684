//! Recomputation by key. Each statement computes the truth of its keys and the rows that stand there in one
//! snapshot, writes what differs and returns the difference; the aggregates are moved by that difference, so
//! the cost of a batch does not grow with a collection, an account or an asset's history.
//!
//! All functions expect [`super::lock_network`] to have been called in the transaction; or its two halves, where owners are
//! written in a transaction of their own.

use std::collections::{BTreeMap, HashMap, HashSet};

use tidemark_model::ids::{AccountId, AssetId, CollectionId, EventId, NetworkId};
use time::OffsetDateTime;
use tokio_postgres::Row;
use uuid::Uuid;

use super::truth::{card_truth, last_height_truth, ownership_truth, transfer_truth};
use crate::db::{StoreError, Tx};
use crate::ledger::{final_line, status_now};

/// A row of projection.transfers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransferRow {
    /// The canonical event.
    pub event_id: EventId,
    /// Its block.
    pub height: i64,
    /// Its position in the block.
    pub event_index: i32,
    /// Its position in its source event.
    pub sub_index: i32,
    /// `transfer`, `mint` or `burn`.
    pub kind: String,
    /// What moved.
    pub asset_id: AssetId,
    /// Its collection.
    pub collection_id: CollectionId,
    /// Who lost it; none for a mint.
    pub from_account: Option<AccountId>,
    /// Who got it; none for a burn.
    pub to_account: Option<AccountId>,
    /// How much, never negative.
    pub qty: String,
    /// Its transaction.
    pub tx_hash: Vec<u8>,
    /// Its block's hash.
    pub block_hash: Vec<u8>,
    /// Its block's time.
    pub event_time: OffsetDateTime,
    /// Did its block leave the chain?
    pub is_reverted: bool,
}

impl TransferRow {
    /// What the primary key says besides the event.
    pub fn place(&self) -> (i64, i32, i32) {
        (self.height, self.event_index, self.sub_index)
    }
}

/// A row with what a live delivery says of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransferDetail {
    /// The row.
    pub row: TransferRow,
    /// The event's status; `reverted` for a row whose event is gone.
    pub finality_status: String,
    /// The token id as the chain has it.
    pub token_id: String,
    /// Live deliveries of this event so far.
    pub turn: i64,
    /// Is it remembered where its row stands?
    pub has_position: bool,
}

impl TransferDetail {
    /// Was it never projected? Sure only of an event that is open.
    pub fn is_new(&self) -> bool {
        !self.has_position && !self.row.is_reverted && self.finality_status != "finalized"
    }
}

fn detail(row: &Row) -> TransferDetail {
    TransferDetail {
        row: TransferRow {
            event_id: EventId(row.get(0)),
            height: row.get(1),
            event_index: row.get(2),
            sub_index: row.get(3),
            kind: row.get(4),
            asset_id: AssetId(row.get(5)),
            collection_id: CollectionId(row.get(6)),
            from_account: row.get::<_, Option<Uuid>>(7).map(AccountId),
            to_account: row.get::<_, Option<Uuid>>(8).map(AccountId),
            qty: row.get(9),
            tx_hash: row.get(10),
            block_hash: row.get(11),
            event_time: row.get(12),
            is_reverted: row.get(13),
        },
        finality_status: row.get(14),
        token_id: row.get(15),
        turn: row.get(16),
        has_position: row.get(17),
    }
}

macro_rules! with_detail {
    ($status:expr, $rows:expr) => {
        concat!(
            "select x.event_id, x.height, x.event_index, x.sub_index, x.kind::text, x.asset_id, x.collection_id,
                    x.from_account, x.to_account, x.qty::text, x.tx_hash, x.block_hash, x.event_time, x.is_reverted,
                    ", $status, "::text, x.token_id_raw, coalesce(p.turn, 0), p.event_id is not null
               from (", $rows, ") x
               left join projection.transfer_positions p on p.event_id = x.event_id
              order by x.height, x.event_index, x.sub_index, x.event_id"
        )
    };
}

const TRUE_TRANSFERS: &str = with_detail!(
    status_now!("x.is_reverted", "x.height", "$1"),
    transfer_truth!("select $1::int as network_id, e as event_id from unnest($2::uuid[]) e")
);

/// What the ledger says of these events now; events that move nothing are left out.
pub async fn true_transfers(
    tx: &Tx<'_>,
    network: NetworkId,
    events: &[Uuid],
) -> Result<Vec<TransferDetail>, StoreError> {
    let rows = tx.query("read transfers of the ledger", TRUE_TRANSFERS, &[&network.0, &events]).await?;
    Ok(rows.iter().map(detail).collect())
}

// By block, not by event: what live wrote of a block lies together in the index of what is open and in the table. Each
// block is looked up by itself (`offset 0`): after a long history the planner thinks that hardly anything is open, and
// would go through all of it. The position is looked up as a value, because of `exists` a planner with statistics makes
// a hash of all positions.
const STANDING_KEYS: &str = concat!(
    "
    select k.id, k.block_hash,
           k.block_number <= (select np.confirmed_height from ledger.network_progress np where np.network_id = $1),
           coalesce((select true from projection.transfer_positions p where p.event_id = k.id), false)
      from unnest($2::bigint[]) h (height)
     cross join lateral (
        select o.id, o.block_hash, o.block_number
          from ledger.normalized_events o
         where o.network_id = $1 and o.block_number = h.height and o.finality_status <> 'finalized'
           and not o.is_reverted
        offset 0) k
     where k.block_number > ",
    final_line!("$1")
);

/// An open event that stands, as its key says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StandingKey {
    /// Its block's hash.
    pub block_hash: Vec<u8>,
    /// Are there enough blocks above it?
    pub is_confirmed: bool,
    /// Was it projected before?
    pub has_position: bool,
}

/// The canonical events above finality in the blocks at these heights.
pub async fn standing_keys(
    tx: &Tx<'_>,
    network: NetworkId,
    heights: &[i64],
) -> Result<HashMap<EventId, StandingKey>, StoreError> {
    let rows = tx.query("look which events stand", STANDING_KEYS, &[&network.0, &heights]).await?;
    let key = |row: &Row| {
        let key = StandingKey { block_hash: row.get(1), is_confirmed: row.get(2), has_position: row.get(3) };
        (EventId(row.get(0)), key)
    };
    Ok(rows.iter().map(key).collect())
}

const STANDING_TRANSFERS: &str = with_detail!(
    "'reverted'",
    "select s.network_id, s.height, s.event_index, s.sub_index, s.event_id, s.kind, s.asset_id, s.collection_id,
            s.from_account, s.to_account, s.qty, s.tx_hash, s.block_hash, s.event_time, s.is_reverted,
            a.token_id_raw
       from (select event_id, height, event_index, sub_index from projection.transfer_positions
              where event_id = any($2::uuid[]) and network_id = $1
             union
             select event_id, height, event_index, sub_index
               from unnest($3::uuid[], $4::bigint[], $5::int[], $6::int[])
                    as i(event_id, height, event_index, sub_index)) w
       join projection.transfers s
            on s.network_id = $1 and s.height = w.height and s.event_index = w.event_index
           and s.sub_index = w.sub_index and s.event_id = w.event_id
       join catalog.assets a on a.id = s.asset_id"
);

const CONTRACTS: &str = "
    select c.id, n.address_normalized from catalog.collections c join catalog.contracts n on n.id = c.contract_id
     where c.id = any($1::uuid[])";
const ACCOUNTS: &str = "select id, address_normalized from ledger.accounts where id = any($1::uuid[])";

/// Addresses of the contracts of these collections.
pub async fn contracts(tx: &Tx<'_>, collections: &[Uuid]) -> Result<Vec<(Uuid, String)>, StoreError> {
    addresses(tx, "read addresses of contracts", CONTRACTS, collections).await
}
/// Addresses of these accounts.
pub async fn accounts(tx: &Tx<'_>, accounts: &[Uuid]) -> Result<Vec<(Uuid, String)>, StoreError> {
    addresses(tx, "read addresses of accounts", ACCOUNTS, accounts).await
}
async fn addresses(
    tx: &Tx<'_>,
    label: &'static str,
    sql: &str,
    ids: &[Uuid],
) -> Result<Vec<(Uuid, String)>, StoreError> {
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    Ok(tx.query(label, sql, &[&ids]).await?.iter().map(|row| (row.get(0), row.get(1))).collect())
}

const HAS_POSITION: &str = "
    select exists (select from projection.transfer_positions where event_id = any($1::uuid[]))";

/// The rows that stand for these events now: where their position says, and where the truth puts them. An event that is
/// open has a position from the moment its row stands until it is final: without one there is nothing to look for.
pub async fn standing_transfers(
    tx: &Tx<'_>,
    network: NetworkId,
    events: &[Uuid],
    truth: &[TransferDetail],
) -> Result<Vec<TransferDetail>, StoreError> {
    let new: HashSet<Uuid> = truth.iter().filter(|one| one.is_new()).map(|one| one.row.event_id.0).collect();
    let events: Vec<Uuid> = events.iter().copied().filter(|event| !new.contains(event)).collect();
    let may_stand = new.len() < truth.len();
    if events.is_empty()
        || (!may_stand
            && !tx.query_one("look for positions", HAS_POSITION, &[&events]).await?.get::<_, bool>(0))
    {
        return Ok(Vec::new());
    }
    let truth: Vec<&TransferRow> = truth.iter().filter(|one| !one.is_new()).map(|one| &one.row).collect();
    let ids: Vec<Uuid> = truth.iter().map(|row| row.event_id.0).collect();
    let heights: Vec<i64> = truth.iter().map(|row| row.height).collect();
    let indexes: Vec<i32> = truth.iter().map(|row| row.event_index).collect();
    let subs: Vec<i32> = truth.iter().map(|row| row.sub_index).collect();
    tx.plan_for_each_call().await?;
    let rows = tx
        .query(
            "read projected transfers",
            STANDING_TRANSFERS,
            &[&network.0, &events, &ids, &heights, &indexes, &subs],
        )
        .await?;
    tx.plan_once().await?;
    Ok(rows.iter().map(detail).collect())
}

const REMOVE_TRANSFERS: &str = "
    delete from projection.transfers t
     using unnest($2::bigint[], $3::int[], $4::int[], $5::uuid[]) as i(height, event_index, sub_index, event_id)
     where t.network_id = $1 and t.height = i.height and t.event_index = i.event_index
       and t.sub_index = i.sub_index and t.event_id = i.event_id";

/// Removes rows from where they no longer belong.
pub async fn remove_transfers(
    tx: &Tx<'_>,
    network: NetworkId,
    rows: &[&TransferRow],
) -> Result<u64, StoreError> {
    if rows.is_empty() {
        return Ok(0);
    }
    let heights: Vec<i64> = rows.iter().map(|row| row.height).collect();
    let indexes: Vec<i32> = rows.iter().map(|row| row.event_index).collect();
    let subs: Vec<i32> = rows.iter().map(|row| row.sub_index).collect();
    let ids: Vec<Uuid> = rows.iter().map(|row| row.event_id.0).collect();
    tx.plan_for_each_call().await?;
    let removed = tx
        .execute("remove transfers", REMOVE_TRANSFERS, &[&network.0, &heights, &indexes, &subs, &ids])
        .await?;
    tx.plan_once().await?;
    Ok(removed)
}

macro_rules! put_transfers {
    ($conflict:expr) => {
        concat!(
            "
    insert into projection.transfers
           (network_id, height, event_index, sub_index, event_id, kind, asset_id, collection_id, from_account,
            to_account, qty, tx_hash, block_hash, event_time, is_reverted)
    select $1, height, event_index, sub_index, event_id, kind::ledger.event_kind, asset_id, collection_id,
           from_account, to_account, qty::numeric, tx_hash, block_hash, event_time, is_reverted
      from unnest($2::bigint[], $3::int[], $4::int[], $5::uuid[], $6::text[], $7::uuid[], $8::uuid[], $9::uuid[],
                  $10::uuid[], $11::text[], $12::bytea[], $13::bytea[], $14::timestamptz[], $15::boolean[])
           as i(height, event_index, sub_index, event_id, kind, asset_id, collection_id, from_account, to_account,
                qty, tx_hash, block_hash, event_time, is_reverted)
     order by height, event_index, sub_index, event_id",
            $conflict
        )
    };
}
const NEW_TRANSFERS: &str = put_transfers!("");
const PUT_TRANSFERS: &str = put_transfers!(
    "
    on conflict (network_id, height, event_index, sub_index, event_id) do update
       set kind = excluded.kind, asset_id = excluded.asset_id, collection_id = excluded.collection_id,
           from_account = excluded.from_account, to_account = excluded.to_account, qty = excluded.qty,
           tx_hash = excluded.tx_hash, block_hash = excluded.block_hash, event_time = excluded.event_time,
           is_reverted = excluded.is_reverted"
);

/// Writes rows to where they belong. Their partitions must exist (store::partitions). `all_new`: none of the events was
/// projected before, so there is nothing to conflict with.
pub async fn put_transfers(
    tx: &Tx<'_>,
    network: NetworkId,
    rows: &[&TransferRow],
    all_new: bool,
) -> Result<u64, StoreError> {
    if rows.is_empty() {
        return Ok(0);
    }
    fn column<'a, T>(rows: &[&'a TransferRow], of: impl Fn(&'a TransferRow) -> T) -> Vec<T> {
        rows.iter().map(|row| of(row)).collect()
    }
    tx.execute(
        "write transfers",
        if all_new { NEW_TRANSFERS } else { PUT_TRANSFERS },
        &[
            &network.0,
            &column(rows, |row| row.height),
            &column(rows, |row| row.event_index),
            &column(rows, |row| row.sub_index),
            &column(rows, |row| row.event_id.0),
            &column(rows, |row| row.kind.as_str()),
            &column(rows, |row| row.asset_id.0),
            &column(rows, |row| row.collection_id.0),
            &column(rows, |row| row.from_account.map(|account| account.0)),
            &column(rows, |row| row.to_account.map(|account| account.0)),
            &column(rows, |row| row.qty.as_str()),
            &column(rows, |row| row.tx_hash.as_slice()),
            &column(rows, |row| row.block_hash.as_slice()),
            &column(rows, |row| row.event_time),
            &column(rows, |row| row.is_reverted),
        ],
    )
    .await
}

macro_rules! put_positions {
    ($conflict:expr) => {
        concat!(
            "
    insert into projection.transfer_positions as p
           (event_id, network_id, height, event_index, sub_index, turn, asset_id, from_account, to_account)
    select event_id, $1, height, event_index, sub_index, turn, asset_id, from_account, to_account
      from unnest($2::uuid[], $3::bigint[], $4::int[], $5::int[], $6::bigint[], $7::uuid[], $8::uuid[], $9::uuid[])
           as i(event_id, height, event_index, sub_index, turn, asset_id, from_account, to_account)
     order by event_id",
            $conflict
        )
    };
}
const NEW_POSITIONS: &str = put_positions!("");
const PUT_POSITIONS: &str = put_positions!(
    "
    on conflict (event_id) do update
       set height = excluded.height, event_index = excluded.event_index, sub_index = excluded.sub_index,
           turn = excluded.turn, asset_id = excluded.asset_id, from_account = excluded.from_account,
           to_account = excluded.to_account
     where (p.height, p.event_index, p.sub_index, p.turn, p.asset_id, p.from_account, p.to_account)
           is distinct from (excluded.height, excluded.event_index, excluded.sub_index, excluded.turn,
                             excluded.asset_id, excluded.from_account, excluded.to_account)"
);

/// Remembers where events that may still move stand, how often each was delivered, and whose rows become final with
/// it. `all_new`: as of [`put_transfers`].
pub async fn put_positions(
    tx: &Tx<'_>,
    network: NetworkId,
    positions: &[(&TransferRow, i64)],
    all_new: bool,
) -> Result<u64, StoreError> {
    if positions.is_empty() {
        return Ok(0);
    }
    fn column<'a, T>(positions: &[(&'a TransferRow, i64)], of: impl Fn(&'a TransferRow) -> T) -> Vec<T> {
        positions.iter().map(|(row, _)| of(row)).collect()
    }
    tx.execute(
        "remember positions",
        if all_new { NEW_POSITIONS } else { PUT_POSITIONS },
        &[
            &network.0,
            &column(positions, |row| row.event_id.0),
            &column(positions, |row| row.height),
            &column(positions, |row| row.event_index),
            &column(positions, |row| row.sub_index),
            &positions.iter().map(|(_, turn)| *turn).collect::<Vec<_>>(),
            &column(positions, |row| row.asset_id.0),
            &column(positions, |row| row.from_account.map(|account| account.0)),
            &column(positions, |row| row.to_account.map(|account| account.0)),
        ],
    )
    .await
}

// What just became final lies together in the log, block by block, and is read once (a hashed set, as long as the planner thinks
// that it is small: hence the limit). Only of other events, older ones, each is looked up.
const FORGET_POSITIONS: &str = concat!(
    "
    delete from projection.transfer_positions p
     where p.network_id = $1 and p.height <= least($2, ",
    final_line!("$1"),
    ")
       and ((p.event_id, p.height) in (
                select e.id, e.block_number from ledger.normalized_events e
                 where e.network_id = $1 and e.block_number <= $2 and e.finality_status <> 'finalized'
                   and e.block_number > coalesce((select l.height from projection.finality_lines l
                                                   where l.network_id = $1), -1)
                   and not e.is_reverted
                 limit 50000)
            or (select not e.is_reverted and e.block_number = p.height
                  from ledger.normalized_events e where e.id = p.event_id))"
);

/// Forgets the positions of events that cannot move any more.
pub async fn forget_positions(
    tx: &Tx<'_>,
    network: NetworkId,
    finalized_height: i64,
) -> Result<u64, StoreError> {
    tx.execute("forget positions", FORGET_POSITIONS, &[&network.0, &finalized_height]).await
}

/// The deliveries of an event that was final are no longer counted: count on from where none was.
const REOPEN_POSITIONS: &str = concat!(
    "
    insert into projection.transfer_positions
           (event_id, network_id, height, event_index, sub_index, turn, asset_id, from_account, to_account)
    select e.id, e.network_id, e.block_number, e.event_index, e.sub_index::int, 1000000,
           case when e.qty_delta is not null then e.asset_id end, e.from_account_id, e.to_account_id
      from ledger.normalized_events e
     where e.network_id = $1 and e.finality_status <> 'finalized' and e.event_kind in ('transfer', 'mint', 'burn')
       and (e.is_reverted or e.block_number > ",
    final_line!("$1"),
    ")
     order by e.id
    on conflict (event_id) do nothing"
);

/// Remembers the positions of events that were final and are not any more (a rewind).
pub async fn reopen_positions(tx: &Tx<'_>, network: NetworkId) -> Result<u64, StoreError> {
    tx.execute("reopen positions", REOPEN_POSITIONS, &[&network.0]).await
}

/// Which rows of ownership_view to recompute.
#[derive(Debug, Default)]
pub struct OwnershipKeys {
    /// Rows of both sides of these events.
    pub events: Vec<Uuid>,
    /// These rows: (asset, account), and the asset's collection.
    pub pairs: BTreeMap<(Uuid, Uuid), Uuid>,
    /// Rows of these assets that depend on something above finality, or did: those that positions name.
    pub open_assets: Vec<Uuid>,
    /// The line below which the ledger is final now, where it moves. Rows of what is between the read models' line and
    /// this one: those that are empty go, and those that still have something open say how much of them is final.
    /// All others are final as they stand (projection.finality_lines).
    pub final_height: Option<i64>,
    /// All rows of these assets.
    pub whole_assets: Vec<Uuid>,
}

/// What a change of ownership_view means for one holder of one collection.
struct HoldingChange {
    collection_id: Uuid,
    account_id: Uuid,
    /// Assets with a positive quantity, more or fewer.
    assets: i64,
    /// Sum of positive quantities, more or less.
    qty: String,
}

// One set with what is and what must be side by side: plans that look up by key cannot join two sets of their own.
// Rows that stay as they are are not touched; those that do not are found by their place, which nobody else can
// change: the network's projections are locked. Rows of nothing that become final as they stand (`empty_at`) go without a look
// at the ledger, unless something else names them too.
const REBUILD_OWNERSHIP: &str = concat!(
    "with keys as materialized (
        select distinct on (i.asset_id, i.account_id) i.asset_id, i.account_id, i.collection_id, i.empty_at
          from (select asset_id, account_id, collection_id, null::tid as empty_at
                  from unnest($2::uuid[], $3::uuid[], $8::uuid[]) as p(asset_id, account_id, collection_id)
                union all
                select e.asset_id, s.account_id, null, null
                  from ledger.normalized_events e
                 cross join lateral (values (e.from_account_id), (e.to_account_id)) s(account_id)
                 where e.id = any($1::uuid[]) and e.qty_delta is not null and s.account_id is not null
                union all
                select p.asset_id, s.account_id, null, null
                  from projection.transfer_positions p
                 cross join lateral (values (p.from_account), (p.to_account)) s(account_id)
                 where cardinality($4::uuid[]) > 0 and p.network_id = $6 and s.account_id is not null
                   and (p.asset_id in (select x from unnest($4) x)) is true -- Hashed; `any` is read through.
                   and p.height > coalesce((select l.height from projection.finality_lines l
                                             where l.network_id = $6), -1)
                union all
                select asset_id, account_id, null, null from ledger.unfinalized_deltas where asset_id = any($4)
                union all
                select p.asset_id, s.account_id, v.collection_id,
                       case when v.open_height <= least($7, ",
    final_line!("$6"),
    ") then v.ctid end
                  from projection.transfer_positions p
                 cross join lateral (values (p.from_account), (p.to_account)) s(account_id)
                  left join projection.ownership_view v
                         on v.asset_id = p.asset_id and v.account_id = s.account_id
                 where p.network_id = $6 and p.height <= $7::bigint and s.account_id is not null
                   and p.height > coalesce((select l.height from projection.finality_lines l
                                             where l.network_id = $6), -1)
                   and (v.asset_id is null or v.open_height > $7 or v.qty = 0)
                union all
                select asset_id, account_id, null, null from projection.ownership_view where asset_id = any($5::uuid[])
                union all
                select asset_id, account_id, null, null from ledger.ownership_current where asset_id = any($5)
                union all
                select asset_id, account_id, null, null from ledger.unfinalized_deltas where asset_id = any($5)) i
         order by i.asset_id, i.account_id, i.empty_at nulls first, i.collection_id),
     compared as materialized (
        select k.asset_id, k.account_id, t.network_id, t.collection_id, t.qty, t.qty_finalized, t.finality_status,
               t.open_height, v.ctid as at, v.collection_id as old_collection_id, v.qty as old_qty,
               (v.network_id, v.collection_id, v.qty, v.qty_finalized, v.finality_status, v.open_height)
               is distinct from
               (t.network_id, t.collection_id, t.qty, t.qty_finalized, t.finality_status, t.open_height) as differs
          from keys k
          left join lateral (",
    ownership_truth!(
        "select k.asset_id, k.account_id, k.collection_id",
        "$6::int",
        "coalesce(k.collection_id, (select a.collection_id from catalog.assets a where a.id = k.asset_id))",
        ""
    ),
    ") t on true
          left join projection.ownership_view v on v.asset_id = k.asset_id and v.account_id = k.account_id
         where k.empty_at is null),
     emptied as (delete from projection.ownership_view v using keys k where v.ctid = k.empty_at returning 1),
     gone as (
        delete from projection.ownership_view v using compared c
         where c.at is not null and c.qty is null and v.ctid = c.at
        returning 1),
     moved as (
        update projection.ownership_view v
           set network_id = c.network_id, collection_id = c.collection_id, qty = c.qty,
               qty_finalized = c.qty_finalized, finality_status = c.finality_status,
               open_height = c.open_height, updated_at = now()
          from compared c
         where c.at is not null and c.qty is not null and c.differs and v.ctid = c.at
        returning 1),
     made as (
        insert into projection.ownership_view
               (asset_id, account_id, network_id, collection_id, qty, qty_finalized, finality_status, open_height,
                updated_at)
        select asset_id, account_id, network_id, collection_id, qty, qty_finalized, finality_status, open_height,
               now()
          from compared where at is null and qty is not null
         order by asset_id, account_id
        returning 1),
     change as (
        select collection_id, account_id, sum(assets)::bigint as assets, sum(qty) as qty
          from (select collection_id, account_id, 1 as assets, qty from compared where qty > 0
                union all
                select old_collection_id, account_id, -1, -old_qty from compared where old_qty > 0) s
         group by collection_id, account_id)
     select null::uuid, null::uuid,
            (select count(*) from emptied) + (select count(*) from gone) + (select count(*) from moved)
            + (select count(*) from made), null::text
     union all
     select collection_id, account_id, assets, qty::text from change where assets <> 0 or qty <> 0"
);

/// Recomputes rows of ownership_view; gives how many were written or removed, and what that changes.
async fn rebuild_ownership(
    tx: &Tx<'_>,
    network: NetworkId,
    keys: &OwnershipKeys,
) -> Result<(u64, Vec<HoldingChange>), StoreError> {
    let (assets, accounts): (Vec<Uuid>, Vec<Uuid>) = keys.pairs.keys().copied().unzip();
    let collections: Vec<Uuid> = keys.pairs.values().copied().collect();
    let rows = tx
        .query(
            "recompute ownership",
            REBUILD_OWNERSHIP,
            &[
                &keys.events,
                &assets,
                &accounts,
                &keys.open_assets,
                &keys.whole_assets,
                &network.0,
                &keys.final_height,
                &collections,
            ],
        )
        .await?;
    let mut written = 0;
    let mut changes = Vec::with_capacity(rows.len());
    for row in &rows {
        match (row.get::<_, Option<Uuid>>(0), row.get::<_, Option<Uuid>>(1)) {
            (Some(collection_id), Some(account_id)) => {
                changes.push(HoldingChange { collection_id, account_id, assets: row.get(2), qty: row.get(3) })
            }
            _ => written = count(row.get(2)),
        }
    }
    changes.sort_by_key(|change| (change.collection_id, change.account_id));
    Ok((written, changes))
}

const MOVE_HOLDERS: &str = "
    with change as materialized (
        select d.collection_id, d.account_id, coalesce(h.asset_count, 0) as old_count,
               coalesce(h.asset_count, 0) + d.assets as new_count, coalesce(h.qty, 0) + d.qty::numeric as new_qty,
               h.ctid as at
          from unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::text[]) as d(collection_id, account_id, assets, qty)
          left join projection.collection_holders h
                 on h.collection_id = d.collection_id and h.account_id = d.account_id),
     gone as (
        delete from projection.collection_holders h using change c where c.new_count = 0 and h.ctid = c.at),
     moved as (
        update projection.collection_holders h set asset_count = c.new_count, qty = c.new_qty
          from change c where c.new_count <> 0 and h.ctid = c.at),
     made as (
        insert into projection.collection_holders (collection_id, account_id, asset_count, qty)
        select collection_id, account_id, new_count, new_qty from change where at is null and new_count <> 0
         order by collection_id, account_id)
     select collection_id, sum((new_count > 0)::int - (old_count > 0)::int)::bigint
       from change group by collection_id order by collection_id";

/// Moves collection_holders by these changes; gives the change of owners per collection.
async fn move_holders(tx: &Tx<'_>, changes: &[HoldingChange]) -> Result<Vec<(Uuid, i64)>, StoreError> {
    if changes.is_empty() {
        return Ok(Vec::new());
    }
    let collections: Vec<Uuid> = changes.iter().map(|change| change.collection_id).collect();
    let accounts: Vec<Uuid> = changes.iter().map(|change| change.account_id).collect();
    let assets: Vec<i64> = changes.iter().map(|change| change.assets).collect();
    let qty: Vec<&str> = changes.iter().map(|change| change.qty.as_str()).collect();
    let rows = tx.query("move holders", MOVE_HOLDERS, &[&collections, &accounts, &assets, &qty]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// What owners of some rows mean for accounts and statistics.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OwnersMoved {
    /// Rows written or removed.
    pub rows: u64,
    /// Assets held, more or fewer, by account.
    pub assets: BTreeMap<Uuid, i64>,
    /// Owners, more or fewer, by collection.
    pub owners: BTreeMap<Uuid, i64>,
}

impl OwnersMoved {
    /// Adds what others moved.
    pub fn add(&mut self, other: &Self) {
        self.rows += other.rows;
        for (to, from) in [(&mut self.assets, &other.assets), (&mut self.owners, &other.owners)] {
            for (id, by) in from {
                *to.entry(*id).or_default() += by;
            }
        }
    }
}

/// Recomputes rows of ownership_view and moves their holders.
pub async fn rebuild_owners(
    tx: &Tx<'_>,
    network: NetworkId,
    keys: &OwnershipKeys,
) -> Result<OwnersMoved, StoreError> {
    let (rows, holdings) = rebuild_ownership(tx, network, keys).await?;
    let mut assets = BTreeMap::new();
    for change in &holdings {
        *assets.entry(change.account_id).or_default() += change.assets;
    }
    let owners = move_holders(tx, &holdings).await?.into_iter().collect();
    Ok(OwnersMoved { rows, assets, owners })
}

const NOTE_OWNERS: &str = "
    insert into projection.owners_ahead (network_id, accounts, assets, collections, owners)
    values ($1, $2, $3, $4, $5) returning id";
const TAKE_NOTED: &str = "
    delete from projection.owners_ahead where network_id = $1 returning accounts, assets, collections, owners";
const FORGET_NOTE: &str = "delete from projection.owners_ahead where id = $1";
const ANY_NOTED: &str = "select network_id from projection.owners_ahead order by 1 limit 1";

/// Writes down what owners moved, in the transaction that moved them, for whoever adds it to accounts and statistics:
/// the caller ([`forget_note`] then), or, should he not come to it, the next one ([`take_noted`]).
pub async fn note_owners(tx: &Tx<'_>, network: NetworkId, moved: &OwnersMoved) -> Result<i64, StoreError> {
    let split = |of: &BTreeMap<Uuid, i64>| -> (Vec<Uuid>, Vec<i64>) { of.iter().unzip() };
    let ((accounts, assets), (collections, owners)) = (split(&moved.assets), split(&moved.owners));
    let params: [crate::db::Param<'_>; 5] = [&network.0, &accounts, &assets, &collections, &owners];
    Ok(tx.query_one("note what owners moved", NOTE_OWNERS, &params).await?.get(0))
}

/// What owners moved that were committed ahead of a block that then was not: to be added now. Call it with the lock of
/// the owners, so that nobody is about to write more.
pub async fn take_noted(tx: &Tx<'_>, network: NetworkId) -> Result<OwnersMoved, StoreError> {
    let mut all = OwnersMoved::default();
    for row in tx.query("take what owners moved", TAKE_NOTED, &[&network.0]).await? {
        let zip = |ids: usize, by: usize| -> BTreeMap<Uuid, i64> {
            row.get::<_, Vec<Uuid>>(ids).into_iter().zip(row.get::<_, Vec<i64>>(by)).collect()
        };
        all.add(&OwnersMoved { rows: 0, assets: zip(0, 1), owners: zip(2, 3) });
    }
    Ok(all)
}

/// It was added.
pub async fn forget_note(tx: &Tx<'_>, note: i64) -> Result<(), StoreError> {
    tx.execute("forget what owners moved", FORGET_NOTE, &[&note]).await?;
    Ok(())
}

/// A network whose owners are ahead of its last block, if there is one: accounts and statistics lack what they moved.
pub(super) async fn owners_ahead(tx: &Tx<'_>) -> Result<Option<i32>, StoreError> {
    Ok(tx.query_opt("look for owners that are ahead", ANY_NOTED, &[]).await?.map(|row| row.get(0)))
}

/// What changes of asset_cards mean for a collection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CardChange {
    /// The collection.
    pub collection_id: Uuid,
    /// Cards written.
    pub written: u64,
    /// Assets that exist, more or fewer.
    pub assets: i64,
    /// Units, more or fewer.
    pub supply: String,
    /// Stubs, more or fewer.
    pub stubs: i64,
    /// Newest event among the cards looked at.
    pub height: i64,
    /// Did the newest event of a card go back? Then the collection's must be looked up.
    pub lowered: bool,
}

// `newest`: where the newest height must be looked up, and nothing where it need not: the statement is planned once
// then, and knows nothing of partitions.
macro_rules! rebuild_cards {
    ($newest:expr) => {
        concat!(
    "with truth as materialized (",
    card_truth!(
        "select asset_id, seen, exact from unnest($1::uuid[], $2::bigint[], $3::boolean[]) i(asset_id, seen, exact)",
        ", k.seen, k.exact"
    ),
    "),
     new as materialized (
        select t.*, o.supply as old_supply, o.is_stub as old_stub,
               o.last_height as old_height,
               case when t.exact then ",
    $newest,
    "           else greatest(o.last_height, t.seen, 0) end as last_height,
               o.ctid as at,
               (o.network_id, o.collection_id, o.token_id, o.standard, o.is_stub, o.is_burned, o.supply, o.history,
                o.finality_status, o.open_height)
               is distinct from
               (t.network_id, t.collection_id, t.token_id, t.standard, t.is_stub, t.is_burned, t.supply, t.history,
                t.finality_status, t.open_height) as differs
          from truth t
          left join projection.asset_cards o on o.asset_id = t.asset_id),
     moved as (
        update projection.asset_cards c
           set network_id = n.network_id, collection_id = n.collection_id, token_id = n.token_id,
               standard = n.standard, is_stub = n.is_stub, is_burned = n.is_burned, supply = n.supply,
               history = n.history, finality_status = n.finality_status, open_height = n.open_height,
               last_height = n.last_height, updated_at = now()
          from new n
         where c.ctid = n.at and (n.differs or n.last_height <> n.old_height)),
     made as (
        insert into projection.asset_cards
               (asset_id, network_id, collection_id, token_id, standard, is_stub, is_burned, supply, history,
                finality_status, open_height, last_height, updated_at)
        select asset_id, network_id, collection_id, token_id, standard, is_stub, is_burned, supply, history,
               finality_status, open_height, last_height, now()
          from new where at is null order by asset_id)
     select n.collection_id,
            count(*) filter (where n.at is null or n.differs or n.last_height <> n.old_height),
            sum((n.supply > 0)::int - coalesce((n.old_supply > 0)::int, 0))::bigint,
            sum(n.supply - coalesce(n.old_supply, 0))::text,
            sum(n.is_stub::int - coalesce(n.old_stub::int, 0))::bigint,
            max(n.last_height), bool_or(n.last_height < coalesce(n.old_height, 0))
       from new n
      group by n.collection_id order by n.collection_id"
)
    };
}
const REBUILD_CARDS: &str = rebuild_cards!("null::bigint");
const REBUILD_CARDS_EXACTLY: &str = rebuild_cards!(last_height_truth!("$4::int", "t.asset_id"));

/// A card to recompute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CardKey {
    /// Of this asset.
    pub asset: Uuid,
    /// Its newest height moves up to this.
    pub seen: Option<i64>,
    /// Its newest height must be looked up: one of its transfers was taken back or moved.
    pub exact: bool,
}

/// Recomputes the cards of `assets`, each named once.
pub async fn rebuild_cards(
    tx: &Tx<'_>,
    network: NetworkId,
    assets: &[CardKey],
) -> Result<Vec<CardChange>, StoreError> {
    if assets.is_empty() {
        return Ok(Vec::new());
    }
    let ids: Vec<Uuid> = assets.iter().map(|key| key.asset).collect();
    let seen: Vec<Option<i64>> = assets.iter().map(|key| key.seen).collect();
    let exact: Vec<bool> = assets.iter().map(|key| key.exact).collect();
    let rows = if exact.contains(&true) {
        tx.plan_for_each_call().await?;
        let params: [crate::db::Param<'_>; 4] = [&ids, &seen, &exact, &network.0];
        let rows = tx.query("recompute asset cards exactly", REBUILD_CARDS_EXACTLY, &params).await?;
        tx.plan_once().await?;
        rows
    } else {
        tx.query("recompute asset cards", REBUILD_CARDS, &[&ids, &seen, &exact]).await?
    };
    let change = |row: &Row| CardChange {
        collection_id: row.get(0),
        written: count(row.get(1)),
        assets: row.get(2),
        supply: row.get(3),
        stubs: row.get(4),
        height: row.get(5),
        lowered: row.get(6),
    };
    Ok(rows.iter().map(change).collect())
}

/// How the stats of a collection move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatsChange {
    /// From its cards.
    pub cards: CardChange,
    /// Owners, more or fewer.
    pub owners: i64,
    /// Canonical transfers, more or fewer.
    pub transfers: i64,
}

macro_rules! move_stats {
    ($newest:expr) => {
        concat!(
            "
    with new as materialized (
        select n.*, o.ctid as at,
               (o.address, o.standard, o.slug, o.name, o.verified, o.is_stub, o.reliability, o.unreliable_reason,
                o.owners_count, o.asset_count, o.total_supply, o.stub_count, o.transfer_count, o.last_height)
               is distinct from
               (n.address, n.standard, n.slug, n.name, n.verified, n.is_stub, n.reliability, n.unreliable_reason,
                n.owners_count, n.asset_count, n.total_supply, n.stub_count, n.transfer_count, n.last_height) as differs
          from unnest($1::uuid[], $2::bigint[], $3::bigint[], $4::text[], $5::bigint[], $6::bigint[], $7::bigint[],
                      $8::boolean[]) as d(collection_id, owners, assets, supply, stubs, transfers, height, lowered)
          left join projection.collection_stats o on o.collection_id = d.collection_id
         cross join lateral (
            select c.id as collection_id, c.network_id, t.address_normalized as address, t.standard_id as standard,
                   c.slug, c.name, c.verified, c.is_stub, t.reliability, t.unreliable_reason,
                   coalesce(o.owners_count, 0) + d.owners as owners_count,
                   coalesce(o.asset_count, 0) + d.assets as asset_count,
                   coalesce(o.total_supply, 0) + d.supply::numeric as total_supply,
                   coalesce(o.stub_count, 0) + d.stubs as stub_count,
                   coalesce(o.transfer_count, 0) + d.transfers as transfer_count,
                   case when d.lowered
                        then ",
            $newest,
            "
                        else greatest(o.last_height, d.height) end as last_height
              from catalog.collections c join catalog.contracts t on t.id = c.contract_id
             where c.id = d.collection_id) n),
     moved as (
        update projection.collection_stats s
           set address = n.address, standard = n.standard, slug = n.slug, name = n.name, verified = n.verified,
               is_stub = n.is_stub, reliability = n.reliability, unreliable_reason = n.unreliable_reason,
               owners_count = n.owners_count, asset_count = n.asset_count, total_supply = n.total_supply,
               stub_count = n.stub_count, transfer_count = n.transfer_count, last_height = n.last_height,
               updated_at = now()
          from new n where s.ctid = n.at and n.differs
        returning 1),
     made as (
        insert into projection.collection_stats
               (collection_id, network_id, address, standard, slug, name, verified, is_stub, reliability,
                unreliable_reason, owners_count, asset_count, total_supply, stub_count, transfer_count, last_height,
                updated_at)
        select collection_id, network_id, address, standard, slug, name, verified, is_stub, reliability,
               unreliable_reason, owners_count, asset_count, total_supply, stub_count, transfer_count, last_height,
               now()
          from new where at is null order by collection_id
        returning 1)
     select (select count(*) from moved) + (select count(*) from made)"
        )
    };
}
const MOVE_STATS: &str = move_stats!("null::bigint");
// `any(array[…])`: see last_height_truth.
const MOVE_STATS_EXACTLY: &str = move_stats!(
    "coalesce((select max(m.height) from projection.transfers m
                where m.network_id = any(array[$9::int]) and m.collection_id = c.id and not m.is_reverted), 0)"
);

/// Moves collection_stats by these changes and refreshes what the catalog says of the collections.
pub async fn move_stats(tx: &Tx<'_>, network: NetworkId, changes: &[StatsChange]) -> Result<u64, StoreError> {
    if changes.is_empty() {
        return Ok(0);
    }
    fn column<'a, T>(changes: &'a [StatsChange], of: impl Fn(&'a StatsChange) -> T) -> Vec<T> {
        changes.iter().map(of).collect()
    }
    let lowered = column(changes, |change| change.cards.lowered);
    let params: [crate::db::Param<'_>; 9] = [
        &column(changes, |change| change.cards.collection_id),
        &column(changes, |change| change.owners),
        &column(changes, |change| change.cards.assets),
        &column(changes, |change| change.cards.supply.as_str()),
        &column(changes, |change| change.cards.stubs),
        &column(changes, |change| change.transfers),
        &column(changes, |change| change.cards.height),
        &lowered,
        &network.0,
    ];
    if !lowered.contains(&true) {
        let row = tx.query_one("move collection stats", MOVE_STATS, &params[..8]).await?;
        return Ok(count(row.get(0)));
    }
    tx.plan_for_each_call().await?;
    let row = tx.query_one("move collection stats exactly", MOVE_STATS_EXACTLY, &params).await?;
    tx.plan_once().await?;
    Ok(count(row.get(0)))
}

/// How the summary of an account moves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccountChange {
    /// The account.
    pub account_id: Uuid,
    /// Assets held, more or fewer.
    pub assets: i64,
    /// Canonical transfers, more or fewer.
    pub transfers: i64,
    /// Newest time among its new transfers.
    pub seen_at: Option<OffsetDateTime>,
    /// Was one of its transfers taken back or moved? Then the newest time must be looked up.
    pub exact: bool,
}

// Address and first sight of an account never change: they are read for new rows alone.
macro_rules! move_accounts {
    ($newest:expr) => {
        concat!(
            "
    with new as materialized (
        select d.account_id, a.network_id, a.address_normalized, coalesce(s.first_seen_at, a.first_seen_at)
                    as first_seen_at, s.ctid as at,
               coalesce(s.asset_count, 0) + d.assets as asset_count,
               coalesce(s.transfer_count, 0) + d.transfers as transfer_count,
               greatest(s.first_seen_at, a.first_seen_at,
                        case when d.exact
                             then ",
            $newest,
            "
                             else greatest(s.last_seen_at, d.seen_at) end) as last_seen_at
          from unnest($1::uuid[], $2::bigint[], $3::bigint[], $4::timestamptz[], $5::boolean[])
               as d(account_id, assets, transfers, seen_at, exact)
          left join projection.account_summaries s on s.account_id = d.account_id
          left join lateral (select x.network_id, x.address_normalized, x.first_seen_at from ledger.accounts x
                              where x.id = d.account_id and s.account_id is null offset 0) a on true),
     gone as (
        delete from projection.account_summaries s using new n
         where n.asset_count = 0 and n.transfer_count = 0 and s.ctid = n.at
        returning 1),
     moved as (
        update projection.account_summaries s
           set asset_count = n.asset_count, transfer_count = n.transfer_count, last_seen_at = n.last_seen_at,
               updated_at = now()
          from new n
         where (n.asset_count <> 0 or n.transfer_count <> 0) and s.ctid = n.at
           and (s.asset_count, s.transfer_count, s.last_seen_at)
               is distinct from (n.asset_count, n.transfer_count, n.last_seen_at)
        returning 1),
     made as (
        insert into projection.account_summaries
               (account_id, network_id, address, asset_count, transfer_count, first_seen_at, last_seen_at, updated_at)
        select account_id, network_id, address_normalized, asset_count, transfer_count, first_seen_at, last_seen_at,
               now()
          from new where at is null and network_id is not null and (asset_count <> 0 or transfer_count <> 0)
         order by account_id
        returning 1)
     select (select count(*) from gone) + (select count(*) from moved) + (select count(*) from made)"
        )
    };
}
const MOVE_ACCOUNTS: &str = move_accounts!("null::timestamptz");
// `any(array[…])`: see last_height_truth.
const MOVE_ACCOUNTS_EXACTLY: &str = move_accounts!(
    "greatest((select f.event_time from projection.transfers f
                where f.network_id = any(array[$6::int]) and f.from_account = d.account_id and not f.is_reverted
                order by f.height desc limit 1),
              (select t.event_time from projection.transfers t
                where t.network_id = any(array[$6::int]) and t.to_account = d.account_id and not t.is_reverted
                order by t.height desc limit 1))"
);

/// Moves account_summaries by these changes. An account without assets and transfers has no row.
pub async fn move_accounts(
    tx: &Tx<'_>,
    network: NetworkId,
    changes: &[AccountChange],
) -> Result<u64, StoreError> {
    if changes.is_empty() {
        return Ok(0);
    }
    let ids: Vec<Uuid> = changes.iter().map(|change| change.account_id).collect();
    let assets: Vec<i64> = changes.iter().map(|change| change.assets).collect();
    let transfers: Vec<i64> = changes.iter().map(|change| change.transfers).collect();
    let seen: Vec<Option<OffsetDateTime>> = changes.iter().map(|change| change.seen_at).collect();
    let exact: Vec<bool> = changes.iter().map(|change| change.exact).collect();
    let params: [crate::db::Param<'_>; 6] = [&ids, &assets, &transfers, &seen, &exact, &network.0];
    if !exact.contains(&true) {
        let row = tx.query_one("move account summaries", MOVE_ACCOUNTS, &params[..5]).await?;
        return Ok(count(row.get(0)));
    }
    tx.plan_for_each_call().await?;
    let row = tx.query_one("move account summaries exactly", MOVE_ACCOUNTS_EXACTLY, &params).await?;
    tx.plan_once().await?;
    Ok(count(row.get(0)))
}

/// Statements that look a newest transfer up, for the test that looks at their plans.
#[doc(hidden)]
pub const EXACT_STATEMENTS: [(&str, &str); 3] = [
    ("recompute asset cards exactly", REBUILD_CARDS_EXACTLY),
    ("move collection stats exactly", MOVE_STATS_EXACTLY),
    ("move account summaries exactly", MOVE_ACCOUNTS_EXACTLY),
];

fn count(value: i64) -> u64 {
    u64::try_from(value).expect("count(*) is not negative")
}
