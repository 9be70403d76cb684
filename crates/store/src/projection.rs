//! projection.*: what the projectors write.
//!
//! - this file: the projector's lock, block cards, network status, activity
//! - [`built_last`]: a long history shown at once
//! - [`live`]: recomputation by key and the differences it makes to the aggregates
//! - [`truth`]: what each table must hold, as SQL used by every path
//! - [`shadow`]: building a table beside the live one, comparing, swapping, undoing
//! - [`check`]: reconciliation of a sample

pub mod built_last;
pub mod check;
pub mod live;
pub mod shadow;
pub(crate) mod truth;

use tidemark_model::ids::{BlockHash, Height, NetworkId};
use time::OffsetDateTime;

use crate::db::{StoreError, Tx};

/// Advisory lock classes (`pg_advisory_xact_lock(class, key)`), in the order in which they are taken. Owners have a pair
/// of their own, because they are written on a connection of their own; nobody asks for it without having the first.
const LOCK_ALL: i32 = 0x7470; // key 0: shared by every projector, alone for a swap
const LOCK_NETWORK: i32 = 0x7471; // key network_id
const LOCK_ALL_OWNERS: i32 = 0x7472; // key 0: as LOCK_ALL
const LOCK_OWNERS: i32 = 0x7473; // key network_id

const LOCK_SHARED: &str = "select pg_advisory_xact_lock_shared($1, 0)";
const LOCK_ONE: &str = "select pg_advisory_xact_lock($1, $2)";

/// Makes this transaction the only one that writes the projections of `network` until it ends. Every
/// writer of projection.{ownership_view, asset_cards, transfers, collection_*, account_summaries} takes it
/// first, the bulk path too: the aggregates are kept by differences, and a difference needs a fixed start.
/// Several networks in one transaction: in ascending order.
pub async fn lock_network(tx: &Tx<'_>, network: NetworkId) -> Result<(), StoreError> {
    lock_all_but_owners(tx, network).await?;
    lock_owners(tx, network).await
}

/// The same but for ownership_view and collection_holders: [`lock_owners`].
pub async fn lock_all_but_owners(tx: &Tx<'_>, network: NetworkId) -> Result<(), StoreError> {
    tx.query("share the projections", LOCK_SHARED, &[&LOCK_ALL]).await?;
    tx.query("lock a network's projections", LOCK_ONE, &[&LOCK_NETWORK, &network.0]).await?;
    Ok(())
}

/// Makes this transaction the only one that writes the owners of `network` (ownership_view, collection_holders) until it
/// ends. On behalf of a transaction that has [`lock_all_but_owners`], which may be this one; if that one dies, this one
/// still keeps others away from what it writes.
pub async fn lock_owners(tx: &Tx<'_>, network: NetworkId) -> Result<(), StoreError> {
    tx.query("share the owners", LOCK_SHARED, &[&LOCK_ALL_OWNERS]).await?;
    tx.query("lock a network's owners", LOCK_ONE, &[&LOCK_OWNERS, &network.0]).await?;
    Ok(())
}

/// Waits for every projector's transaction to end and keeps new ones waiting until this one ends.
pub async fn lock_all(tx: &Tx<'_>) -> Result<(), StoreError> {
    tx.query("lock all projections", LOCK_ONE, &[&LOCK_ALL, &0_i32]).await?;
    tx.query("lock all owners", LOCK_ONE, &[&LOCK_ALL_OWNERS, &0_i32]).await?;
    Ok(())
}

/// What the explorer shows of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockCard {
    /// Whose block.
    pub network_id: NetworkId,
    /// Its position.
    pub height: Height,
    /// Its hash.
    pub hash: BlockHash,
    /// Its parent's hash.
    pub parent_hash: BlockHash,
    /// When the chain made it.
    pub block_time: OffsetDateTime,
    /// Transactions in it, where known.
    pub tx_count: Option<i32>,
    /// Canonical events in it.
    pub event_count: i32,
}

const UPSERT_BLOCK_CARDS: &str = "
    insert into projection.block_cards as b
           (network_id, height, hash, parent_hash, block_time, tx_count, event_count)
    select n, h, hash, parent, at, txs, events
      from unnest($1::int[], $2::bigint[], $3::bytea[], $4::bytea[], $5::timestamptz[], $6::int[], $7::int[])
           as i(n, h, hash, parent, at, txs, events)
     order by n, h
    on conflict (network_id, height) do update
       set hash = excluded.hash, parent_hash = excluded.parent_hash, block_time = excluded.block_time,
           tx_count = excluded.tx_count, event_count = excluded.event_count
     where (b.hash, b.parent_hash, b.block_time, b.tx_count, b.event_count)
           is distinct from (excluded.hash, excluded.parent_hash, excluded.block_time, excluded.tx_count,
                             excluded.event_count)";

/// Writes the cards of canonical blocks; the block that replaces another at its height replaces its card.
/// At most one card per (network, height); of several the last one counts.
pub async fn upsert_block_cards(tx: &Tx<'_>, cards: &[BlockCard]) -> Result<u64, StoreError> {
    let newest: std::collections::BTreeMap<_, _> =
        cards.iter().map(|card| ((card.network_id, card.height), card)).collect();
    if newest.is_empty() {
        return Ok(0);
    }
    let cards: Vec<&BlockCard> = newest.into_values().collect();
    let networks: Vec<i32> = cards.iter().map(|card| card.network_id.0).collect();
    let heights: Vec<i64> = cards.iter().map(|card| card.height.as_i64()).collect();
    let hashes: Vec<&[u8]> = cards.iter().map(|card| card.hash.0.as_slice()).collect();
    let parents: Vec<&[u8]> = cards.iter().map(|card| card.parent_hash.0.as_slice()).collect();
    let times: Vec<OffsetDateTime> = cards.iter().map(|card| card.block_time).collect();
    let txs: Vec<Option<i32>> = cards.iter().map(|card| card.tx_count).collect();
    let events: Vec<i32> = cards.iter().map(|card| card.event_count).collect();
    tx.execute(
        "write block cards",
        UPSERT_BLOCK_CARDS,
        &[&networks, &heights, &hashes, &parents, &times, &txs, &events],
    )
    .await
}

const REMOVE_BLOCK_CARDS: &str = "delete from projection.block_cards b using unnest($2::bytea[]) as i(hash)
      where b.network_id = $1 and b.hash = i.hash";

/// Removes the cards of blocks that left the chain, by hash (a card that was replaced already stays).
pub async fn remove_block_cards(
    tx: &Tx<'_>,
    network: NetworkId,
    orphaned: &[BlockHash],
) -> Result<u64, StoreError> {
    let hashes: Vec<&[u8]> = orphaned.iter().map(|hash| hash.0.as_slice()).collect();
    tx.execute("remove block cards", REMOVE_BLOCK_CARDS, &[&network.0, &hashes]).await
}

/// What is known of a network now. `None` leaves what is stored; heights except the head only grow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkStatusInput {
    /// Which network.
    pub network_id: NetworkId,
    /// Its name in URLs.
    pub slug: String,
    /// Its chain family.
    pub family: String,
    /// First block we read.
    pub start_block: i64,
    /// Blocks until an event counts as confirmed.
    pub confirmations: i64,
    /// Newest block of the chain; may go back in a reorg.
    pub head_height: Option<i64>,
    /// Its time.
    pub head_time: Option<OffsetDateTime>,
    /// Newest block in the raw store; may go back in a reorg.
    pub ingested_height: Option<i64>,
    /// Newest block in the ledger; may go back in a reorg.
    pub normalized_height: Option<i64>,
    /// Finality line of the ledger; never goes back.
    pub finalized_height: Option<i64>,
    /// Newest block in the projections; may go back in a reorg.
    pub projected_height: Option<i64>,
    /// Why the network stands still, if it does (not kept: `None` means it runs).
    pub halted_reason: Option<String>,
    /// Canonical events so far.
    pub events_total: Option<i64>,
    /// Reorgs so far.
    pub reorgs_total: Option<i64>,
}

const REFRESH_NETWORK_STATUS: &str = "
    insert into projection.network_status as s
           (network_id, slug, family, start_block, confirmations, head_height, head_time, ingested_height,
            normalized_height, finalized_height, projected_height, finalized_at, halted_reason, events_total,
            reorgs_total, updated_at)
    select id, slug, family, start_block, confirmations, head, head_time, ingested, normalized, finalized, projected,
           case when finalized is not null then now() end, halted, coalesce(events, 0), coalesce(reorgs, 0), now()
      from unnest($1::int[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::timestamptz[],
                  $8::bigint[], $9::bigint[], $10::bigint[], $11::bigint[], $12::text[], $13::bigint[], $14::bigint[])
           as i(id, slug, family, start_block, confirmations, head, head_time, ingested, normalized, finalized,
                projected, halted, events, reorgs)
     order by id
    on conflict (network_id) do update
       set slug = excluded.slug, family = excluded.family, start_block = excluded.start_block,
           confirmations = excluded.confirmations,
           head_height = coalesce(excluded.head_height, s.head_height),
           head_time = coalesce(excluded.head_time, s.head_time),
           ingested_height = coalesce(excluded.ingested_height, s.ingested_height),
           normalized_height = coalesce(excluded.normalized_height, s.normalized_height),
           finalized_height = greatest(excluded.finalized_height, s.finalized_height),
           projected_height = coalesce(excluded.projected_height, s.projected_height),
           finalized_at = case when excluded.finalized_height > coalesce(s.finalized_height, -1) then now()
                               else s.finalized_at end,
           halted_reason = excluded.halted_reason,
           events_total = greatest(excluded.events_total, s.events_total),
           reorgs_total = greatest(excluded.reorgs_total, s.reorgs_total),
           updated_at = now()";

/// Writes the status lines of networks. At most one input per network.
pub async fn refresh_network_status(tx: &Tx<'_>, inputs: &[NetworkStatusInput]) -> Result<u64, StoreError> {
    if inputs.is_empty() {
        return Ok(0);
    }
    fn column<'a, T>(inputs: &'a [NetworkStatusInput], of: impl Fn(&'a NetworkStatusInput) -> T) -> Vec<T> {
        inputs.iter().map(of).collect()
    }
    tx.execute(
        "write network status",
        REFRESH_NETWORK_STATUS,
        &[
            &column(inputs, |input| input.network_id.0),
            &column(inputs, |input| input.slug.as_str()),
            &column(inputs, |input| input.family.as_str()),
            &column(inputs, |input| input.start_block),
            &column(inputs, |input| input.confirmations),
            &column(inputs, |input| input.head_height),
            &column(inputs, |input| input.head_time),
            &column(inputs, |input| input.ingested_height),
            &column(inputs, |input| input.normalized_height),
            &column(inputs, |input| input.finalized_height),
            &column(inputs, |input| input.projected_height),
            &column(inputs, |input| input.halted_reason.as_deref()),
            &column(inputs, |input| input.events_total),
            &column(inputs, |input| input.reorgs_total),
        ],
    )
    .await
}

const MOVE_WATERMARK: &str = "
    update projection.network_status
       set projected_height = $2, projected_hash = decode(substr($3::text, 3), 'hex'), updated_at = now()
     where network_id = $1";

/// Notes the newest block whose events are projected, in the transaction that projected them, with its hash
/// (`0x…`) unless it is history, which is final. The row is made by [`refresh_network_status`].
pub async fn move_watermark(
    tx: &Tx<'_>,
    network: NetworkId,
    height: i64,
    hash: Option<&str>,
) -> Result<(), StoreError> {
    tx.execute("move the projection watermark", MOVE_WATERMARK, &[&network.0, &height, &hash]).await?;
    Ok(())
}

// Never above what the ledger calls final now: an operator may have rewound it.
const MOVE_LINE: &str = "
    insert into projection.finality_lines as l (network_id, height)
    select $1, coalesce(least($2::bigint, (select p.finalized_height from ledger.network_progress p
                                            where p.network_id = $1)), -1)
     where $2 is not null or exists (select 1 from projection.finality_lines f where f.network_id = $1)
    on conflict (network_id) do update
       set height = least(greatest(l.height, $2),
                          (select p.finalized_height from ledger.network_progress p where p.network_id = $1))
     where l.height <> least(greatest(l.height, $2),
                             (select p.finalized_height from ledger.network_progress p where p.network_id = $1))";

/// Moves the line below which the read models of a network are final, up to `finalized` if given, and never above
/// the ledger's. The last statement of a batch: what the batch wrote before was read from a ledger at most as
/// far back as the one that the line is held against.
pub async fn move_finality_line(
    tx: &Tx<'_>,
    network: NetworkId,
    finalized: Option<i64>,
) -> Result<(), StoreError> {
    tx.execute("move the finality line", MOVE_LINE, &[&network.0, &finalized]).await?;
    Ok(())
}

const COUNT_ACTIVITY: &str = "
    insert into projection.network_activity as a (network_id, bucket, events)
    values ($1, date_bin('10 seconds', now(), 'epoch'), $2)
    on conflict (network_id, bucket) do update set events = a.events + excluded.events";

/// Adds to the running ten seconds of a network's activity.
pub async fn count_activity(tx: &Tx<'_>, network: NetworkId, events: i64) -> Result<(), StoreError> {
    if events > 0 {
        tx.execute("count activity", COUNT_ACTIVITY, &[&network.0, &events]).await?;
    }
    Ok(())
}

const FORGET_ACTIVITY: &str =
    "delete from projection.network_activity where bucket < now() - make_interval(secs => $1)";

/// Removes activity older than `keep`; call it now and then.
pub async fn forget_activity(tx: &Tx<'_>, keep: std::time::Duration) -> Result<u64, StoreError> {
    tx.execute("forget old activity", FORGET_ACTIVITY, &[&keep.as_secs_f64()]).await
}
