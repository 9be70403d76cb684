//! The event log, one row for each event with what it moved (ADR 0026), and what is still open above finality. Every
//! statement takes a whole set; ids are sorted before they are written. A finalized row is never touched here except
//! by a rewind.
//!
//! A canonical event is final when its block is at or below its network's line (`network_progress.finalized_height`),
//! confirmed likewise: no row is written for it (ADR 0021). The stored status is `finalized` only where history wrote
//! the row; `finality_status <> 'finalized'` in a statement leads it to the index of what live wrote.

use std::collections::{BTreeMap, BTreeSet};

use alloy_primitives::U256;
use tidemark_model::chain::{BlockRef, EventKind, Standard};
use tidemark_model::finality::FinalityStatus;
use tidemark_model::ids::{
    AccountId, AssetId, BlockHash, CollectionId, EventId, Height, NetworkId, SourceEventId, TxId,
};
use tidemark_model::quantity::{SignedQty, parse_decimal};
use time::OffsetDateTime;
use tokio_postgres::Row;
use uuid::Uuid;

use crate::db::{Param, StoreError, Tx};
use crate::log_height;

/// Below this height the canonical events of a network are final.
macro_rules! final_line {
    ($network:expr) => {
        concat!(
            "coalesce((select np.finalized_height from ledger.network_progress np where np.network_id = ",
            $network,
            "), -1)"
        )
    };
}
pub(crate) use final_line;

/// What an event's status is now, of columns `is_reverted` and the block's height.
macro_rules! status_now {
    ($reverted:expr, $height:expr, $network:expr) => {
        concat!(
            "ledger.status_now(",
            $reverted,
            ", ",
            $height,
            ", (select np.finalized_height from ledger.network_progress np where np.network_id = ",
            $network,
            "), (select np.confirmed_height from ledger.network_progress np where np.network_id = ",
            $network,
            "))"
        )
    };
}
pub(crate) use status_now;

/// One movement of an event, as stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaRow {
    /// What moved.
    pub asset: AssetId,
    /// Who lost it; none for mints and openings.
    pub from: Option<AccountId>,
    /// Who gained it; none for burns.
    pub to: Option<AccountId>,
    /// How much, without sign.
    pub qty: U256,
}

impl DeltaRow {
    /// The signed form of the table: negative for burns (design.md §5).
    pub fn signed(&self) -> SignedQty {
        if self.to.is_none() { SignedQty::loss(self.qty) } else { SignedQty::gain(self.qty) }
    }
}

/// A canonical event, ready to be written.
#[derive(Debug, Clone, PartialEq)]
pub struct NormalizedRow {
    /// uuidv5 of the next two.
    pub id: EventId,
    /// Chain-native identity.
    pub source_event_id: SourceEventId,
    /// Position within a batch event.
    pub sub_index: u32,
    /// Kind.
    pub kind: EventKind,
    /// Asset, for asset events.
    pub asset: Option<AssetId>,
    /// Its collection.
    pub collection: Option<CollectionId>,
    /// Block.
    pub block: BlockRef,
    /// Transaction.
    pub tx_hash: TxId,
    /// Index in the block; -1 for openings, which come before everything in their block.
    pub event_index: i32,
    /// Block time.
    pub event_time: OffsetDateTime,
    /// `Reverted` for late events of orphaned blocks.
    pub status: FinalityStatus,
    /// Where the payload lies, if it was offloaded.
    pub blob_ref: Option<String>,
    /// The movement, if it moves anything.
    pub delta: Option<DeltaRow>,
}

/// What [`upsert_events`] did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Upserted {
    /// Events that were inserted, or moved to another block, or came back.
    pub changed: BTreeSet<EventId>,
    /// Assets whose open legs changed, also those that an event no longer names.
    pub touched: BTreeSet<AssetId>,
    /// Events that say something else now although their block is the same: kept as first written.
    pub contradicted: BTreeSet<EventId>,
}

/// The columns of [`EventColumns`] as `u`, from parameter 2 on; parameter 1 is the network.
macro_rules! given_events {
    () => {
        "unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::uuid[], $7::uuid[], $8::uuid[], $9::uuid[],
                  $10::text[], $11::bigint[], $12::bytea[], $13::bytea[], $14::int[], $15::timestamptz[], $16::text[],
                  $17::text[])
           u (id, source, sub, kind, asset, collection, sender, receiver, qty, block_number, block_hash, tx_hash,
              event_index, event_time, status, blob_ref)"
    };
}
/// The status that is written; confirmed is what the line says (ADR 0021).
macro_rules! written_status {
    () => {
        "(case u.status when 'confirmed' then 'pending' else u.status end)::ledger.event_finality_status"
    };
}

const INSERT_EVENTS: &str = concat!(
    "
    insert into ledger.normalized_events
        (id, source_event_id, sub_index, network_id, event_kind, asset_id, collection_id, from_account_id,
         to_account_id, qty_delta, block_number, block_hash, tx_hash, event_index, event_time, finality_status,
         is_reverted, blob_ref)
    select u.id, u.source, u.sub, $1, u.kind::ledger.event_kind, u.asset, u.collection, u.sender, u.receiver,
           u.qty::numeric, u.block_number, u.block_hash, u.tx_hash, u.event_index, u.event_time, ",
    written_status!(),
    ", u.status = 'reverted', u.blob_ref
      from ",
    given_events!(),
    "
     order by u.id
    on conflict (id) do nothing
    returning id"
);

// The same event in another block overwrites where it is. A late event of an orphaned block never overwrites
// one that lives elsewhere, a finalized row is never touched.
const MOVING: &str = concat!(
    "
    select e.id
      from unnest($2::uuid[], $3::bytea[], $4::bool[]) u (id, block_hash, is_reverted)
      join ledger.normalized_events e on e.id = u.id
     where (e.is_reverted or e.block_number > ",
    final_line!("$1"),
    ")
       and case when u.is_reverted
                then not e.is_reverted and e.block_hash = u.block_hash
                else e.is_reverted or e.block_hash <> u.block_hash
           end"
);

// Executed again in another block a transaction may log something else under the same name: what the event
// says follows its block.
const REWRITE_EVENTS: &str = concat!(
    "
    update ledger.normalized_events e
       set event_kind = u.kind::ledger.event_kind, asset_id = u.asset, collection_id = u.collection,
           from_account_id = u.sender, to_account_id = u.receiver, qty_delta = u.qty::numeric,
           block_number = u.block_number, block_hash = u.block_hash, tx_hash = u.tx_hash,
           event_index = u.event_index, event_time = u.event_time, finality_status = ",
    written_status!(),
    ",
           is_reverted = u.status = 'reverted', blob_ref = u.blob_ref
      from ",
    given_events!(),
    "
     where e.id = u.id and e.network_id = $1"
);

const CONTRADICTED: &str = "
    select u.id
      from unnest($1::uuid[], $2::bytea[], $3::uuid[], $4::uuid[], $5::uuid[], $6::text[])
           u (id, block_hash, asset, sender, receiver, qty)
      join ledger.normalized_events e on e.id = u.id and e.block_hash = u.block_hash
     where (case when e.qty_delta is not null then e.asset_id end, e.from_account_id, e.to_account_id, e.qty_delta)
           is distinct from (u.asset, u.sender, u.receiver, u.qty::numeric)";

/// Writes events with their movements. `rows` hold each id once. Gives what really changed.
pub async fn upsert_events(
    tx: &Tx<'_>,
    network: NetworkId,
    rows: &[&NormalizedRow],
) -> Result<Upserted, StoreError> {
    if rows.is_empty() {
        return Ok(Upserted::default());
    }
    let mut rows = rows.to_vec();
    rows.sort_by_key(|row| row.id);
    let mut changed = insert_events(tx, network, &rows).await?;
    let known: Vec<&NormalizedRow> = rows.iter().copied().filter(|row| !changed.contains(&row.id)).collect();
    let mut upserted = Upserted::default();
    if !known.is_empty() {
        // What they moved leads to their open legs: those go before it changes.
        let moving = moving_among(tx, network, &known).await?;
        let (moved, same): (Vec<_>, Vec<_>) = known.iter().copied().partition(|row| moving.contains(&row.id));
        upserted.contradicted = contradicted(tx, &same).await?;
        let ids: Vec<EventId> = moving.iter().copied().collect();
        upserted.touched.extend(drop_open_legs(tx, &ids).await?);
        rewrite_events(tx, network, &moved).await?;
        changed.extend(moving);
    }
    let written: Vec<&NormalizedRow> = rows.into_iter().filter(|row| changed.contains(&row.id)).collect();
    // Where every event is new there is nothing to conflict with.
    write_open_legs(tx, network, &written, known.is_empty()).await?;
    let standing = written.iter().filter(|row| row.status != FinalityStatus::Reverted);
    upserted.touched.extend(standing.filter_map(|row| row.asset));
    upserted.changed = changed;
    Ok(upserted)
}

/// Inserts events that are not there; gives those.
async fn insert_events(
    tx: &Tx<'_>,
    network: NetworkId,
    rows: &[&NormalizedRow],
) -> Result<BTreeSet<EventId>, StoreError> {
    let columns = EventColumns::of(rows);
    let new = tx.query("write events", INSERT_EVENTS, &columns.params(&network.0)).await?;
    Ok(new.iter().map(|row| EventId(row.get(0))).collect())
}

/// Which of these events, all of them known, stand elsewhere now, or came back, or went.
async fn moving_among(
    tx: &Tx<'_>,
    network: NetworkId,
    rows: &[&NormalizedRow],
) -> Result<BTreeSet<EventId>, StoreError> {
    let ids: Vec<Uuid> = rows.iter().map(|row| row.id.0).collect();
    let hashes: Vec<&[u8]> = rows.iter().map(|row| row.block.hash.0.as_slice()).collect();
    let reverted: Vec<bool> = rows.iter().map(|row| row.status == FinalityStatus::Reverted).collect();
    let found = tx.query("look which events move", MOVING, &[&network.0, &ids, &hashes, &reverted]).await?;
    Ok(found.iter().map(|row| EventId(row.get(0))).collect())
}

async fn rewrite_events(tx: &Tx<'_>, network: NetworkId, rows: &[&NormalizedRow]) -> Result<(), StoreError> {
    if !rows.is_empty() {
        let columns = EventColumns::of(rows);
        tx.execute("rewrite events", REWRITE_EVENTS, &columns.params(&network.0)).await?;
    }
    Ok(())
}

/// Columns of events, in step with their rows.
struct EventColumns<'a> {
    sources: Vec<&'a str>,
    subs: Vec<String>,
    kinds: Vec<&'a str>,
    assets: Vec<Option<Uuid>>,
    collections: Vec<Option<Uuid>>,
    numbers: Vec<i64>,
    hashes: Vec<&'a [u8]>,
    transactions: Vec<&'a [u8]>,
    indexes: Vec<i32>,
    times: Vec<OffsetDateTime>,
    statuses: Vec<&'a str>,
    blobs: Vec<Option<&'a str>>,
    moved: DeltaColumns,
}

impl<'a> EventColumns<'a> {
    fn of(rows: &[&'a NormalizedRow]) -> Self {
        fn column<'a, T>(rows: &[&'a NormalizedRow], of: impl Fn(&'a NormalizedRow) -> T) -> Vec<T> {
            rows.iter().map(|row| of(row)).collect()
        }
        Self {
            sources: column(rows, |row| row.source_event_id.as_str()),
            subs: column(rows, |row| row.sub_index.to_string()),
            kinds: column(rows, |row| row.kind.as_str()),
            assets: column(rows, |row| row.asset.map(|id| id.0)),
            collections: column(rows, |row| row.collection.map(|id| id.0)),
            numbers: column(rows, |row| row.block.height.as_i64()),
            hashes: column(rows, |row| row.block.hash.0.as_slice()),
            transactions: column(rows, |row| row.tx_hash.as_bytes()),
            indexes: column(rows, |row| row.event_index),
            times: column(rows, |row| row.event_time),
            statuses: column(rows, |row| row.status.as_str()),
            blobs: column(rows, |row| row.blob_ref.as_deref()),
            moved: delta_columns(rows.iter().copied()),
        }
    }

    fn params<'p>(&'p self, network: &'p i32) -> [Param<'p>; 17] {
        [
            network,
            &self.moved.ids,
            &self.sources,
            &self.subs,
            &self.kinds,
            &self.assets,
            &self.collections,
            &self.moved.senders,
            &self.moved.receivers,
            &self.moved.quantities,
            &self.numbers,
            &self.hashes,
            &self.transactions,
            &self.indexes,
            &self.times,
            &self.statuses,
            &self.blobs,
        ]
    }
}

/// Columns of movements, in step with their rows.
struct DeltaColumns {
    ids: Vec<Uuid>,
    assets: Vec<Option<Uuid>>,
    senders: Vec<Option<Uuid>>,
    receivers: Vec<Option<Uuid>>,
    quantities: Vec<Option<String>>,
}

fn delta_columns<'a>(rows: impl Iterator<Item = &'a NormalizedRow> + Clone) -> DeltaColumns {
    let delta = |row: &'a NormalizedRow| row.delta.as_ref();
    DeltaColumns {
        ids: rows.clone().map(|row| row.id.0).collect(),
        assets: rows.clone().map(|row| delta(row).map(|delta| delta.asset.0)).collect(),
        senders: rows.clone().map(|row| delta(row).and_then(|delta| delta.from).map(|id| id.0)).collect(),
        receivers: rows.clone().map(|row| delta(row).and_then(|delta| delta.to).map(|id| id.0)).collect(),
        quantities: rows.map(|row| delta(row).map(|delta| delta.signed().to_string())).collect(),
    }
}

async fn contradicted(tx: &Tx<'_>, rows: &[&NormalizedRow]) -> Result<BTreeSet<EventId>, StoreError> {
    if rows.is_empty() {
        return Ok(BTreeSet::new());
    }
    let hashes: Vec<&[u8]> = rows.iter().map(|row| row.block.hash.0.as_slice()).collect();
    let DeltaColumns { ids, assets, senders, receivers, quantities } = delta_columns(rows.iter().copied());
    let found = tx
        .query(
            "compare movements",
            CONTRADICTED,
            &[&ids, &hashes, &assets, &senders, &receivers, &quantities],
        )
        .await?;
    Ok(found.iter().map(|row| EventId(row.get(0))).collect())
}

// A leg's key follows from its movement.
const DROP_OPEN_LEGS: &str = "
    delete from ledger.unfinalized_deltas l
     using (select e.id, e.asset_id, s.account_id
              from ledger.normalized_events e
             cross join lateral (values (e.from_account_id), (e.to_account_id)) s (account_id)
             where e.id = any($1) and e.qty_delta is not null) m
     where l.asset_id = m.asset_id and l.account_id = m.account_id
       and l.normalized_event_id = m.id
    returning l.asset_id";

/// Takes the legs of events out of what is open, before their movements change; gives the assets they were about.
pub async fn drop_open_legs(tx: &Tx<'_>, events: &[EventId]) -> Result<BTreeSet<AssetId>, StoreError> {
    if events.is_empty() {
        return Ok(BTreeSet::new());
    }
    let rows = tx.query("drop open legs", DROP_OPEN_LEGS, &[&uuids(events)]).await?;
    Ok(rows.iter().map(|row| AssetId(row.get(0))).collect())
}

const CLOSE_LEGS: &str = "
    delete from ledger.unfinalized_deltas l
     using unnest($1::uuid[], $2::uuid[], $3::uuid[]) m (asset, account, event)
     where l.asset_id = m.asset and l.account_id = m.account and l.normalized_event_id = m.event";

/// Takes the legs of movements that stand as they were read out of what is open: they became final.
pub async fn close_legs(tx: &Tx<'_>, movements: &[MovementRow]) -> Result<u64, StoreError> {
    let sides = movements.iter().flat_map(|MovementRow { event, delta, .. }| {
        let accounts = delta.from.into_iter().chain(delta.to);
        accounts.map(|account| (delta.asset.0, account.0, event.0))
    });
    // In the order of the key.
    let keys: BTreeSet<(Uuid, Uuid, Uuid)> = sides.collect();
    if keys.is_empty() {
        return Ok(0);
    }
    let assets: Vec<Uuid> = keys.iter().map(|key| key.0).collect();
    let accounts: Vec<Uuid> = keys.iter().map(|key| key.1).collect();
    let events: Vec<Uuid> = keys.iter().map(|key| key.2).collect();
    tx.execute("close legs", CLOSE_LEGS, &[&assets, &accounts, &events]).await
}

macro_rules! insert_legs {
    ($conflict:expr) => {
        concat!(
            "
    insert into ledger.unfinalized_deltas
        (asset_id, account_id, normalized_event_id, leg, network_id, block_number, qty_delta)
    select u.asset, u.account, u.id, u.leg, $1, u.block_number, u.qty::numeric
      from unnest($2::uuid[], $3::uuid[], $4::uuid[], $5::smallint[], $6::bigint[], $7::text[])
           u (asset, account, id, leg, block_number, qty)",
            $conflict
        )
    };
}
const NEW_OPEN_LEGS: &str = insert_legs!("");
const WRITE_OPEN_LEGS: &str = insert_legs!(
    "
    on conflict (asset_id, account_id, normalized_event_id, leg) do update
       set block_number = excluded.block_number, qty_delta = excluded.qty_delta"
);

/// Puts the legs of rows whose keys and movements were just written among what is open: as
/// [`insert_open_legs`], without reading them back.
async fn write_open_legs(
    tx: &Tx<'_>,
    network: NetworkId,
    rows: &[&NormalizedRow],
    all_new: bool,
) -> Result<(), StoreError> {
    let open =
        rows.iter().filter(|row| !matches!(row.status, FinalityStatus::Reverted | FinalityStatus::Finalized));
    let mut legs: Vec<(Uuid, Uuid, Uuid, i16, i64, String)> = Vec::with_capacity(rows.len() * 2);
    for row in open {
        let Some(delta) = row.delta.as_ref().filter(|delta| !delta.qty.is_zero()) else { continue };
        let lost = delta.from.map(|account| (0, account, SignedQty::loss(delta.qty)));
        let gained = delta.to.map(|account| (1, account, SignedQty::gain(delta.qty)));
        for (leg, account, qty) in lost.into_iter().chain(gained) {
            let height = row.block.height.as_i64();
            legs.push((delta.asset.0, account.0, row.id.0, leg, height, qty.to_string()));
        }
    }
    if legs.is_empty() {
        return Ok(());
    }
    legs.sort_unstable();
    tx.execute(
        "write open legs",
        if all_new { NEW_OPEN_LEGS } else { WRITE_OPEN_LEGS },
        &[
            &network.0,
            &legs.iter().map(|leg| leg.0).collect::<Vec<_>>(),
            &legs.iter().map(|leg| leg.1).collect::<Vec<_>>(),
            &legs.iter().map(|leg| leg.2).collect::<Vec<_>>(),
            &legs.iter().map(|leg| leg.3).collect::<Vec<_>>(),
            &legs.iter().map(|leg| leg.4).collect::<Vec<_>>(),
            &legs.iter().map(|leg| leg.5.as_str()).collect::<Vec<_>>(),
        ],
    )
    .await?;
    Ok(())
}

const INSERT_OPEN_LEGS: &str = concat!(
    "
    insert into ledger.unfinalized_deltas
        (asset_id, account_id, normalized_event_id, leg, network_id, block_number, qty_delta)
    select e.asset_id, l.account_id, e.id, l.leg, e.network_id, e.block_number, l.qty
      from unnest($1::uuid[]) u (id)
      join ledger.normalized_events e on e.id = u.id and not e.is_reverted and e.block_number > ",
    final_line!("e.network_id"),
    "
     cross join lateral (values (0::smallint, e.from_account_id, -abs(e.qty_delta)),
                                (1::smallint, e.to_account_id, abs(e.qty_delta))) l (leg, account_id, qty)
     where l.account_id is not null and l.qty <> 0
     order by 1, 2, 3, 4
    on conflict (asset_id, account_id, normalized_event_id, leg) do update
       set block_number = excluded.block_number, qty_delta = excluded.qty_delta"
);

/// Puts the legs of those events that are neither final nor reverted among what is open. A movement of
/// nothing has no legs.
pub async fn insert_open_legs(tx: &Tx<'_>, events: &[EventId]) -> Result<u64, StoreError> {
    if events.is_empty() {
        return Ok(0);
    }
    tx.execute("insert open legs", INSERT_OPEN_LEGS, &[&uuids(events)]).await
}

/// What the ledger believes of a network. Heights are -1 before the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Newest block such that it and all below it are normalized.
    pub head: i64,
    /// Applied to ownership_current up to here: canonical events at or below are final.
    pub finalized: i64,
    /// Canonical events at or below have enough blocks above them.
    pub confirmed: i64,
    /// As the chain reported it; may be ahead of what is normalized.
    pub reported: i64,
    /// Applied in bulk, without claims, up to here.
    pub history: i64,
    /// A long history is not shown yet: live waits ([`crate::projection::built_last`]).
    pub read_models_due: bool,
}

const CREATE_PROGRESS: &str = "
    with log as (insert into ledger.log_heights (network_id) values ($1) on conflict (network_id) do nothing)
    insert into ledger.network_progress (network_id, head_height) values ($1, $2)
    on conflict (network_id) do nothing";
const LOCK_PROGRESS: &str = "
    select head_height, finalized_height, reported_finalized, history_height, read_models_due, confirmed_height
      from ledger.network_progress where network_id = $1 for update";

/// Locks a network's row first of all, so that workers of one network take turns. A network that starts at
/// block N begins with N - 1 as its head.
pub async fn lock_progress(
    tx: &Tx<'_>,
    network: NetworkId,
    start_block: Height,
) -> Result<Progress, StoreError> {
    let row = match tx.query_opt("lock the network's progress", LOCK_PROGRESS, &[&network.0]).await? {
        Some(row) => row,
        None => {
            let head = start_block.as_i64() - 1;
            tx.execute("create the network's progress", CREATE_PROGRESS, &[&network.0, &head]).await?;
            tx.query_one("lock the network's progress", LOCK_PROGRESS, &[&network.0]).await?
        }
    };
    let progress = Progress {
        head: row.get(0),
        finalized: row.get(1),
        reported: row.get(2),
        history: row.get(3),
        read_models_due: row.get(4),
        confirmed: row.get(5),
    };
    log_height::settle(tx, network, progress.head).await?;
    Ok(progress)
}

const SET_PROGRESS: &str = "
    update ledger.network_progress
       set head_height = $2, finalized_height = $3, reported_finalized = $4, history_height = $5,
           confirmed_height = $6, updated_at = now()
     where network_id = $1";

/// Writes progress back; the caller holds the lock.
pub async fn set_progress(tx: &Tx<'_>, network: NetworkId, progress: &Progress) -> Result<(), StoreError> {
    let Progress { head, finalized, confirmed, reported, history, read_models_due: _ } = progress;
    tx.execute(
        "set the network's progress",
        SET_PROGRESS,
        &[&network.0, head, finalized, reported, history, confirmed],
    )
    .await?;
    Ok(())
}

const RECORD_BLOCK: &str = "
    insert into ledger.recent_blocks (network_id, block_hash, block_number) values ($1, $2, $3)
    on conflict (network_id, block_hash) do nothing";

/// Remembers that a block's events are normalized; false if it was known.
pub async fn record_block(tx: &Tx<'_>, network: NetworkId, block: &BlockRef) -> Result<bool, StoreError> {
    let height = block.height.as_i64();
    let new =
        tx.execute("record a block", RECORD_BLOCK, &[&network.0, &block.hash.0.as_slice(), &height]).await?;
    Ok(new > 0)
}

const RECENT_ABOVE: &str = "
    select block_number, block_hash from ledger.recent_blocks
     where network_id = $1 and block_number > $2
     order by block_number, block_hash";

/// Normalized blocks above a height, lowest first.
pub async fn recent_above(tx: &Tx<'_>, network: NetworkId, above: i64) -> Result<Vec<BlockRef>, StoreError> {
    let rows = tx.query("read recent blocks", RECENT_ABOVE, &[&network.0, &above]).await?;
    rows.iter()
        .map(|row| Ok(BlockRef { height: Height::from_i64(row.get(0)), hash: hash(row, 1)? }))
        .collect()
}

const OPEN_ABOVE: &str = concat!(
    "
    select block_number, block_hash from ledger.recent_blocks where network_id = $1 and block_number > $2
    union
    select block_number, block_hash from ledger.normalized_events
     where network_id = $1 and block_number > greatest($2, ",
    final_line!("$1"),
    ") and finality_status <> 'finalized' and not is_reverted
     order by block_number, block_hash"
);

/// Blocks above the head whose events stand, lowest first: a reorg brought the head below them.
pub async fn open_above(tx: &Tx<'_>, network: NetworkId, head: i64) -> Result<Vec<BlockRef>, StoreError> {
    let rows = tx.query("look for blocks above the head", OPEN_ABOVE, &[&network.0, &head]).await?;
    rows.iter()
        .map(|row| Ok(BlockRef { height: Height::from_i64(row.get(0)), hash: hash(row, 1)? }))
        .collect()
}

const FORGET_BLOCKS: &str = "delete from ledger.recent_blocks where network_id = $1 and block_number < $2";

/// Forgets recent blocks below a height.
pub async fn forget_blocks_below(tx: &Tx<'_>, network: NetworkId, below: i64) -> Result<u64, StoreError> {
    tx.execute("forget old blocks", FORGET_BLOCKS, &[&network.0, &below]).await
}

const RECENT_AMONG: &str = "
    select block_number, block_hash from ledger.recent_blocks
     where network_id = $1 and block_hash = any($2) order by block_number";

/// Which of these hashes belong to blocks we have normalized.
pub async fn recent_among(
    tx: &Tx<'_>,
    network: NetworkId,
    hashes: &[BlockHash],
) -> Result<Vec<BlockRef>, StoreError> {
    let hashes: Vec<&[u8]> = hashes.iter().map(|hash| hash.0.as_slice()).collect();
    let rows = tx.query("look for recent blocks", RECENT_AMONG, &[&network.0, &hashes]).await?;
    rows.iter()
        .map(|row| Ok(BlockRef { height: Height::from_i64(row.get(0)), hash: hash(row, 1)? }))
        .collect()
}

const ORPHANED_AMONG: &str =
    "select block_hash from ledger.orphaned_blocks where network_id = $1 and block_hash = any($2)";

/// Which of these blocks have left the canonical chain.
pub async fn orphaned_among(
    tx: &Tx<'_>,
    network: NetworkId,
    hashes: &BTreeSet<BlockHash>,
) -> Result<BTreeSet<BlockHash>, StoreError> {
    let hashes: Vec<&[u8]> = hashes.iter().map(|hash| hash.0.as_slice()).collect();
    let rows = tx.query("look for orphaned blocks", ORPHANED_AMONG, &[&network.0, &hashes]).await?;
    rows.iter().map(|row| hash(row, 0)).collect()
}

const RECORD_ORPHANS: &str = "
    insert into ledger.orphaned_blocks (network_id, block_hash, block_number)
    select $1, u.hash, u.number from unnest($2::bytea[], $3::bigint[]) u (hash, number)
     order by u.hash
    on conflict (network_id, block_hash) do nothing";
const FORGET_RECENT: &str = "delete from ledger.recent_blocks where network_id = $1 and block_hash = any($2)";
const FORGET_ORPHANS: &str =
    "delete from ledger.orphaned_blocks where network_id = $1 and block_hash = any($2)";

/// Forgets that these blocks were normalized.
pub async fn forget_blocks(tx: &Tx<'_>, network: NetworkId, blocks: &[BlockRef]) -> Result<(), StoreError> {
    let (hashes, _) = hashes_and_heights(blocks);
    tx.execute("forget orphaned blocks", FORGET_RECENT, &[&network.0, &hashes]).await?;
    Ok(())
}

/// Records which blocks left the chain and which are on it.
pub async fn swap_branches(
    tx: &Tx<'_>,
    network: NetworkId,
    orphaned: &[BlockRef],
    canonical: &[BlockRef],
) -> Result<(), StoreError> {
    let (hashes, numbers) = hashes_and_heights(orphaned);
    tx.execute("record orphaned blocks", RECORD_ORPHANS, &[&network.0, &hashes, &numbers]).await?;
    forget_blocks(tx, network, orphaned).await?;
    let (hashes, _) = hashes_and_heights(canonical);
    tx.execute("restore canonical blocks", FORGET_ORPHANS, &[&network.0, &hashes]).await?;
    Ok(())
}

// Each block is looked up by itself (`offset 0`), not by going through everything that is open. Nobody moves the rows
// meanwhile: the network's progress is locked.
const REVERT: &str = concat!(
    "
    with standing as materialized (
        select k.at
          from unnest($2::bytea[], $3::bigint[]) b (hash, height)
         cross join lateral (
            select o.ctid as at
              from ledger.normalized_events o
             where o.network_id = $1 and o.block_number = b.height and o.block_hash = b.hash
               and o.finality_status <> 'finalized' and not o.is_reverted
            offset 0) k
         where b.height > ",
    final_line!("$1"),
    "
    )
    update ledger.normalized_events e
       set finality_status = 'reverted', is_reverted = true
      from standing s where e.ctid = s.at
    returning e.id, e.event_kind::text, e.asset_id, e.collection_id, e.block_number, e.block_hash,
              e.event_time"
);

/// An event that a reorg touched.
#[derive(Debug, Clone, PartialEq)]
pub struct TouchedEvent {
    /// The event.
    pub id: EventId,
    /// Its kind.
    pub kind: EventKind,
    /// Its asset.
    pub asset: Option<AssetId>,
    /// Its collection.
    pub collection: Option<CollectionId>,
    /// Its block.
    pub block: BlockRef,
    /// Its time.
    pub event_time: OffsetDateTime,
}

impl TouchedEvent {
    /// An event as it is about to be written.
    pub fn of(row: &NormalizedRow) -> Self {
        let NormalizedRow { id, kind, asset, collection, block, event_time, .. } = row;
        Self {
            id: *id,
            kind: *kind,
            asset: *asset,
            collection: *collection,
            block: *block,
            event_time: *event_time,
        }
    }
}

/// Marks the open events of these blocks reverted, matched by hash; gives them sorted by id.
pub async fn revert_blocks(
    tx: &Tx<'_>,
    network: NetworkId,
    blocks: &[BlockRef],
) -> Result<Vec<TouchedEvent>, StoreError> {
    let (hashes, numbers) = hashes_and_heights(blocks);
    let rows = tx.query("revert the events of blocks", REVERT, &[&network.0, &hashes, &numbers]).await?;
    touched_events(&rows)
}

const RESTORE: &str = concat!(
    "
    update ledger.normalized_events e
       set finality_status = 'pending', is_reverted = false
     where e.network_id = $1 and e.block_number = any($3) and e.block_hash = any($2)
       and e.is_reverted and e.block_number > ",
    final_line!("$1"),
    "
    returning e.id, e.event_kind::text, e.asset_id, e.collection_id, e.block_number, e.block_hash,
              e.event_time"
);

/// Takes the revert of these blocks' events back: the blocks are canonical again.
pub async fn restore_blocks(
    tx: &Tx<'_>,
    network: NetworkId,
    blocks: &[BlockRef],
) -> Result<Vec<TouchedEvent>, StoreError> {
    let (hashes, numbers) = hashes_and_heights(blocks);
    let rows = tx.query("restore the events of blocks", RESTORE, &[&network.0, &hashes, &numbers]).await?;
    touched_events(&rows)
}

const REHOME_OPENINGS: &str = "
    with homes as (
        select distinct on (o.id) o.id, e.block_number, e.block_hash, e.finality_status, e.event_time
          from unnest($2::uuid[]) u (id)
          join ledger.normalized_events o on o.id = u.id
          join ledger.unfinalized_deltas l on l.asset_id = o.asset_id and l.account_id = o.to_account_id
          join ledger.normalized_events e on e.network_id = $1 and e.id = l.normalized_event_id
         order by o.id, e.block_number
    )
    update ledger.normalized_events e
       set block_number = h.block_number, block_hash = h.block_hash, is_reverted = false,
           finality_status = h.finality_status, event_time = h.event_time
      from homes h
     where e.network_id = $1 and e.id = h.id
    returning e.id";

/// Moves reverted openings to the block of the first open event that still needs them. Gives those moved.
pub async fn rehome_openings(
    tx: &Tx<'_>,
    network: NetworkId,
    openings: &[EventId],
) -> Result<Vec<EventId>, StoreError> {
    if openings.is_empty() {
        return Ok(Vec::new());
    }
    let rows = tx.query("rehome openings", REHOME_OPENINGS, &[&network.0, &uuids(openings)]).await?;
    let moved: Vec<EventId> = rows.iter().map(|row| EventId(row.get(0))).collect();
    insert_open_legs(tx, &moved).await?;
    Ok(moved)
}

/// A movement with all that applying it needs.
#[derive(Debug, Clone, PartialEq)]
pub struct MovementRow {
    /// The event.
    pub event: EventId,
    /// Chain-native identity.
    pub source_event_id: SourceEventId,
    /// Kind.
    pub kind: EventKind,
    /// The movement.
    pub delta: DeltaRow,
    /// The asset's collection.
    pub collection: CollectionId,
    /// The asset's standard.
    pub standard: Standard,
    /// The asset's finalized supply.
    pub supply: U256,
    /// Block.
    pub block: BlockRef,
    /// Index in the block.
    pub event_index: i32,
    /// Block time.
    pub event_time: OffsetDateTime,
}

// By block, not by event: what live wrote of a block lies together in the index of what is open, and in the table.
const CANONICAL_BETWEEN: &str = "
    select e.id, e.source_event_id, e.event_kind::text, a.id, e.from_account_id, e.to_account_id,
           abs(e.qty_delta)::text, a.collection_id, a.standard_id, a.supply::text, e.block_number, e.block_hash,
           e.event_index, e.event_time
      from ledger.normalized_events e
      left join catalog.assets a on e.qty_delta is not null and a.id = e.asset_id
     where e.network_id = $1 and e.block_number > $2 and e.block_number <= $3
       and e.finality_status <> 'finalized' and not e.is_reverted
     order by e.block_number, e.event_index, e.sub_index::bigint, e.id";

/// What becomes final when the line moves.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Canonical {
    /// All events.
    pub events: Vec<EventId>,
    /// Those among them that move something, in the chain's order.
    pub movements: Vec<MovementRow>,
}

/// The canonical events in `above..=through`, which become final when the line moves there.
pub async fn canonical_between(
    tx: &Tx<'_>,
    network: NetworkId,
    above: i64,
    through: i64,
) -> Result<Canonical, StoreError> {
    let rows =
        tx.query("read what becomes final", CANONICAL_BETWEEN, &[&network.0, &above, &through]).await?;
    let moving = rows.iter().filter(|row| row.get::<_, Option<Uuid>>(3).is_some());
    Ok(Canonical {
        events: rows.iter().map(|row| EventId(row.get(0))).collect(),
        movements: moving.map(movement).collect::<Result<_, _>>()?,
    })
}

fn movement(row: &Row) -> Result<MovementRow, StoreError> {
    Ok(MovementRow {
        event: EventId(row.get(0)),
        source_event_id: SourceEventId::from_stored(row.get(1)),
        kind: parsed(row, 2)?,
        delta: DeltaRow {
            asset: AssetId(row.get(3)),
            from: row.get::<_, Option<Uuid>>(4).map(AccountId),
            to: row.get::<_, Option<Uuid>>(5).map(AccountId),
            qty: quantity(row, 6)?,
        },
        collection: CollectionId(row.get(7)),
        standard: parsed(row, 8)?,
        supply: quantity(row, 9)?,
        block: BlockRef { height: Height::from_i64(row.get(10)), hash: hash(row, 11)? },
        event_index: row.get(12),
        event_time: row.get(13),
    })
}

const READ_EVENTS: &str = concat!(
    "
    select e.id, e.source_event_id, e.sub_index, e.event_kind::text, e.asset_id, e.collection_id,
           e.block_number, e.block_hash, e.tx_hash, e.event_index, e.event_time, ",
    status_now!("e.is_reverted", "e.block_number", "$1"),
    "::text, e.blob_ref, case when e.qty_delta is not null then e.asset_id end, e.from_account_id, e.to_account_id,
           abs(e.qty_delta)::text
      from unnest($2::uuid[]) u (id)
      join ledger.normalized_events e on e.network_id = $1 and e.id = u.id
     order by e.block_number, e.event_index, e.sub_index::bigint, e.id"
);

/// Events as they are stored, in the chain's order.
pub async fn read_events(
    tx: &Tx<'_>,
    network: NetworkId,
    events: &[EventId],
) -> Result<Vec<NormalizedRow>, StoreError> {
    if events.is_empty() {
        return Ok(Vec::new());
    }
    let rows = tx.query("read events", READ_EVENTS, &[&network.0, &uuids(events)]).await?;
    rows.iter()
        .map(|row| {
            let delta = match row.get::<_, Option<Uuid>>(13) {
                None => None,
                Some(asset) => Some(DeltaRow {
                    asset: AssetId(asset),
                    from: row.get::<_, Option<Uuid>>(14).map(AccountId),
                    to: row.get::<_, Option<Uuid>>(15).map(AccountId),
                    qty: quantity(row, 16)?,
                }),
            };
            Ok(NormalizedRow {
                id: EventId(row.get(0)),
                source_event_id: SourceEventId::from_stored(row.get(1)),
                sub_index: parsed(row, 2)?,
                kind: parsed(row, 3)?,
                asset: row.get::<_, Option<Uuid>>(4).map(AssetId),
                collection: row.get::<_, Option<Uuid>>(5).map(CollectionId),
                block: BlockRef { height: Height::from_i64(row.get(6)), hash: hash(row, 7)? },
                tx_hash: TxId::from_slice(row.get(8)).ok_or_else(|| corrupt(row, 8))?,
                event_index: row.get(9),
                event_time: row.get(10),
                status: parsed(row, 11)?,
                blob_ref: row.get(12),
                delta,
            })
        })
        .collect()
}

const FIRST_SEEN: &str = "
    select u.asset from unnest($1::uuid[]) u (asset)
     where not exists (
        select 1 from ledger.normalized_events e
         where e.asset_id = u.asset and e.qty_delta is not null and not e.is_reverted and e.id <> all($2))";

/// Which of these assets have no canonical movement except those of the given events.
pub async fn first_seen(
    tx: &Tx<'_>,
    assets: &[AssetId],
    except: &[EventId],
) -> Result<BTreeSet<AssetId>, StoreError> {
    if assets.is_empty() {
        return Ok(BTreeSet::new());
    }
    let ids: Vec<Uuid> = assets.iter().map(|id| id.0).collect();
    let rows = tx.query("look for assets seen first", FIRST_SEEN, &[&ids, &uuids(except)]).await?;
    Ok(rows.iter().map(|row| AssetId(row.get(0))).collect())
}

/// How an opening came to be known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpeningState {
    /// The chain said so, or its standard leaves no other way.
    Known,
    /// At least this much, because it was spent; the chain could not say.
    Implied,
    /// The chain could not say, and nothing was spent yet.
    Unknown,
}

impl OpeningState {
    /// The label used in Postgres.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Known => "known",
            Self::Implied => "implied",
            Self::Unknown => "unknown",
        }
    }
}
impl std::str::FromStr for OpeningState {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        [Self::Known, Self::Implied, Self::Unknown]
            .into_iter()
            .find(|state| state.as_str() == text)
            .ok_or_else(|| format!("{text:?} is not the state of an opening"))
    }
}

/// What an account held of an asset before our first block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpeningRow {
    /// How it is known.
    pub state: OpeningState,
    /// How much.
    pub qty: U256,
    /// Opening events made so far.
    pub parts: u32,
}

/// An asset and an account.
pub type Pair = (AssetId, AccountId);

const RECORD_OPENINGS: &str = "
    insert into ledger.openings as o (asset_id, account_id, network_id, qty, state, parts)
    select u.asset, u.account, $1, u.qty::numeric, u.state, u.parts
      from unnest($2::uuid[], $3::uuid[], $4::text[], $5::text[], $6::int[]) u (asset, account, qty, state, parts)
     order by u.asset, u.account
    on conflict (asset_id, account_id) do update
       set qty = excluded.qty, state = excluded.state, parts = excluded.parts
     where $7";

/// Writes what is known of openings. Without `overwrite` the first answer stays.
pub async fn record_openings(
    tx: &Tx<'_>,
    network: NetworkId,
    openings: &BTreeMap<Pair, OpeningRow>,
    overwrite: bool,
) -> Result<u64, StoreError> {
    if openings.is_empty() {
        return Ok(0);
    }
    let (assets, accounts) = pair_columns(openings.keys());
    let quantities: Vec<String> = openings.values().map(|row| row.qty.to_string()).collect();
    let states: Vec<&str> = openings.values().map(|row| row.state.as_str()).collect();
    let parts: Vec<i32> = openings.values().map(|row| i32::try_from(row.parts).unwrap_or(i32::MAX)).collect();
    tx.execute(
        "record openings",
        RECORD_OPENINGS,
        &[&network.0, &assets, &accounts, &quantities, &states, &parts, &overwrite],
    )
    .await
}

const READ_OPENINGS: &str = "
    select o.asset_id, o.account_id, o.qty::text, o.state, o.parts
      from unnest($1::uuid[], $2::uuid[]) u (asset, account)
      join ledger.openings o on o.asset_id = u.asset and o.account_id = u.account";

/// What is known of the openings of these pairs.
pub async fn read_openings(
    tx: &Tx<'_>,
    pairs: &BTreeSet<Pair>,
) -> Result<BTreeMap<Pair, OpeningRow>, StoreError> {
    if pairs.is_empty() {
        return Ok(BTreeMap::new());
    }
    let (assets, accounts) = pair_columns(pairs.iter());
    let rows = tx.query("read openings", READ_OPENINGS, &[&assets, &accounts]).await?;
    rows.iter()
        .map(|row| {
            let parts = u32::try_from(row.get::<_, i32>(4)).map_err(|_| corrupt(row, 4))?;
            let opening = OpeningRow { state: parsed(row, 3)?, qty: quantity(row, 2)?, parts };
            Ok(((AssetId(row.get(0)), AccountId(row.get(1))), opening))
        })
        .collect()
}

/// A pair whose opening was never asked for, with what asking needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnaskedRow {
    /// Asset and account.
    pub pair: Pair,
    /// Canonical address of the contract.
    pub contract: String,
    /// Token id as the chain has it.
    pub token_id_raw: String,
    /// Standard of the asset.
    pub standard: Standard,
    /// Canonical address of the account.
    pub account: String,
}

const UNASKED: &str = "
    select l.asset_id, l.account_id, c.address_normalized, a.token_id_raw, a.standard_id, w.address_normalized
      from (select asset_id, account_id, min(block_number) as block_number
              from ledger.unfinalized_deltas where network_id = $1 group by 1, 2) l
      join catalog.assets a on a.id = l.asset_id and a.is_fungible_class
      join catalog.collections n on n.id = a.collection_id
      join catalog.contracts c on c.id = n.contract_id
      join ledger.accounts w on w.id = l.account_id
     where not exists (select 1 from ledger.openings o
                        where o.asset_id = l.asset_id and o.account_id = l.account_id)
     order by l.block_number, l.asset_id, l.account_id
     limit $2";

/// Pairs of classes in open events whose opening was never asked for; those that become final first come first.
pub async fn unasked_openings(
    tx: &Tx<'_>,
    network: NetworkId,
    at_most: i64,
) -> Result<Vec<UnaskedRow>, StoreError> {
    let rows = tx.query("look for openings to ask for", UNASKED, &[&network.0, &at_most]).await?;
    rows.iter()
        .map(|row| {
            Ok(UnaskedRow {
                pair: (AssetId(row.get(0)), AccountId(row.get(1))),
                contract: row.get(2),
                token_id_raw: row.get(3),
                standard: parsed(row, 4)?,
                account: row.get(5),
            })
        })
        .collect()
}

/// The first open event that touches a pair.
#[derive(Debug, Clone, PartialEq)]
pub struct FirstOpen {
    /// Asset and account.
    pub pair: Pair,
    /// The asset's collection.
    pub collection: CollectionId,
    /// Its block.
    pub block: BlockRef,
    /// Its time.
    pub event_time: OffsetDateTime,
    /// Its status.
    pub status: FinalityStatus,
}

const FIRST_OPEN: &str = concat!(
    "
    select distinct on (l.asset_id, l.account_id)
           l.asset_id, l.account_id, a.collection_id, e.block_number, e.block_hash, e.event_time,
           ",
    status_now!("e.is_reverted", "e.block_number", "$1"),
    "::text
      from unnest($2::uuid[], $3::uuid[]) u (asset, account)
      join ledger.unfinalized_deltas l on l.asset_id = u.asset and l.account_id = u.account
      join ledger.normalized_events e on e.network_id = $1 and e.id = l.normalized_event_id
      join catalog.assets a on a.id = l.asset_id
     order by l.asset_id, l.account_id, e.block_number, e.event_index"
);

/// For each pair the first open event that touches it; pairs without one are left out.
pub async fn first_open(
    tx: &Tx<'_>,
    network: NetworkId,
    pairs: &BTreeSet<Pair>,
) -> Result<Vec<FirstOpen>, StoreError> {
    let (assets, accounts) = pair_columns(pairs.iter());
    let rows = tx.query("read first open events", FIRST_OPEN, &[&network.0, &assets, &accounts]).await?;
    rows.iter()
        .map(|row| {
            Ok(FirstOpen {
                pair: (AssetId(row.get(0)), AccountId(row.get(1))),
                collection: CollectionId(row.get(2)),
                block: BlockRef { height: Height::from_i64(row.get(3)), hash: hash(row, 4)? },
                event_time: row.get(5),
                status: parsed(row, 6)?,
            })
        })
        .collect()
}

const LIVE_AMONG: &str = "
    select id from ledger.normalized_events where id = any($1) and not is_reverted";

/// Which of these events exist and are not reverted.
pub async fn live_among(tx: &Tx<'_>, events: &[EventId]) -> Result<BTreeSet<EventId>, StoreError> {
    if events.is_empty() {
        return Ok(BTreeSet::new());
    }
    let rows = tx.query("look for live events", LIVE_AMONG, &[&uuids(events)]).await?;
    Ok(rows.iter().map(|row| EventId(row.get(0))).collect())
}

/// An event set aside, with its evidence.
#[derive(Debug, Clone, PartialEq)]
pub struct QuarantineRow {
    /// The event.
    pub event: EventId,
    /// Chain-native identity.
    pub source_event_id: SourceEventId,
    /// Block position.
    pub block_number: Height,
    /// Its asset, if it has one.
    pub asset: Option<AssetId>,
    /// Why, in words.
    pub reason: String,
    /// What was found.
    pub evidence: serde_json::Value,
}

const QUARANTINE: &str = "
    insert into ledger.quarantine
        (normalized_event_id, consumer, network_id, source_event_id, block_number, asset_id, reason, evidence)
    select u.id, $1, $2, u.source, u.block, u.asset, u.reason, u.evidence
      from unnest($3::uuid[], $4::text[], $5::bigint[], $6::uuid[], $7::text[], $8::jsonb[])
           u (id, source, block, asset, reason, evidence)
     order by u.id
    on conflict (consumer, normalized_event_id) do nothing";

/// Sets events aside; one that is there already stays as it is.
pub async fn quarantine(
    tx: &Tx<'_>,
    consumer: &str,
    network: NetworkId,
    rows: &[QuarantineRow],
) -> Result<u64, StoreError> {
    if rows.is_empty() {
        return Ok(0);
    }
    let ids: Vec<Uuid> = rows.iter().map(|row| row.event.0).collect();
    let sources: Vec<&str> = rows.iter().map(|row| row.source_event_id.as_str()).collect();
    let blocks: Vec<i64> = rows.iter().map(|row| row.block_number.as_i64()).collect();
    let assets: Vec<Option<Uuid>> = rows.iter().map(|row| row.asset.map(|id| id.0)).collect();
    let reasons: Vec<&str> = rows.iter().map(|row| row.reason.as_str()).collect();
    let evidence: Vec<&serde_json::Value> = rows.iter().map(|row| &row.evidence).collect();
    tx.execute(
        "quarantine events",
        QUARANTINE,
        &[&consumer, &network.0, &ids, &sources, &blocks, &assets, &reasons, &evidence],
    )
    .await
}

const UNQUARANTINE: &str =
    "delete from ledger.quarantine where consumer = $1 and normalized_event_id = any($2)";

/// Forgets a consumer's quarantine of events that will be judged anew.
pub async fn unquarantine(tx: &Tx<'_>, consumer: &str, events: &[EventId]) -> Result<u64, StoreError> {
    tx.execute("release from quarantine", UNQUARANTINE, &[&consumer, &uuids(events)]).await
}

const UNFINALIZE: &str = "
    update ledger.normalized_events e
       set finality_status = 'pending'
     where e.network_id = $1 and e.block_number > $2 and e.block_number <= $3 and not e.is_reverted
    returning e.id, e.asset_id";

/// The operator's rewind: what is final in `above..=finalized` is written as pending, so that it is found among what
/// is open. The caller moves the line back. Gives these events and their assets.
pub async fn unfinalize(
    tx: &Tx<'_>,
    network: NetworkId,
    above: i64,
    finalized: i64,
) -> Result<(Vec<EventId>, BTreeSet<AssetId>), StoreError> {
    let rows = tx.query("take finality back", UNFINALIZE, &[&network.0, &above, &finalized]).await?;
    let mut ids: Vec<EventId> = rows.iter().map(|row| EventId(row.get(0))).collect();
    ids.sort_unstable();
    Ok((ids, rows.iter().filter_map(|row| row.get::<_, Option<Uuid>>(1)).map(AssetId).collect()))
}

pub(crate) fn pair_columns<'a>(pairs: impl Iterator<Item = &'a Pair>) -> (Vec<Uuid>, Vec<Uuid>) {
    pairs.map(|(asset, account)| (asset.0, account.0)).unzip()
}

/// A numeric column selected as text, as a uint256.
pub(crate) fn quantity(row: &Row, column: usize) -> Result<U256, StoreError> {
    parse_decimal(row.get(column)).ok_or_else(|| corrupt(row, column))
}

fn parsed<T: std::str::FromStr>(row: &Row, column: usize) -> Result<T, StoreError> {
    row.get::<_, &str>(column).parse().map_err(|_| corrupt(row, column))
}

fn hash(row: &Row, column: usize) -> Result<BlockHash, StoreError> {
    BlockHash::from_slice(row.get(column)).ok_or_else(|| corrupt(row, column))
}

fn corrupt(row: &Row, column: usize) -> StoreError {
    let name = row.columns().get(column).map_or("?", |column| column.name());
    StoreError::Corrupt {
        what: format!("column {name} of the ledger"),
        found: "a value of the wrong form".to_owned(),
        hint: "run `tidemark verify ledger`, then rewind the network",
    }
}

fn uuids(events: &[EventId]) -> Vec<Uuid> {
    let mut ids: Vec<Uuid> = events.iter().map(|id| id.0).collect();
    ids.sort_unstable();
    ids
}

fn hashes_and_heights(blocks: &[BlockRef]) -> (Vec<&[u8]>, Vec<i64>) {
    blocks.iter().map(|block| (block.hash.0.as_slice(), block.height.as_i64())).unzip()
}

fn touched_events(rows: &[Row]) -> Result<Vec<TouchedEvent>, StoreError> {
    let mut events = rows
        .iter()
        .map(|row| {
            Ok(TouchedEvent {
                id: EventId(row.get(0)),
                kind: parsed(row, 1)?,
                asset: row.get::<_, Option<Uuid>>(2).map(AssetId),
                collection: row.get::<_, Option<Uuid>>(3).map(CollectionId),
                block: BlockRef { height: Height::from_i64(row.get(4)), hash: hash(row, 5)? },
                event_time: row.get(6),
            })
        })
        .collect::<Result<Vec<_>, StoreError>>()?;
    events.sort_by_key(|event| event.id);
    Ok(events)
}
