//! Writing a batch. [`RawWriter::prepare`] uploads what is too large for a row, outside any transaction;
//! [`RawWriter::copy`] is the fast path behind a fence, [`RawWriter::heal`] the one over existing rows.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use serde_json::Value;
use tidemark_model::chain::{BlockCoverage, RawBatch, RawBlock, RawRecord, RawTransaction};
use tidemark_model::ids::{HeightRange, NetworkId, TxId};

use super::RawError;
use crate::blob::{BlobRef, BlobStore};
use crate::copy::CopyBuffer;
use crate::db::{StoreError, Tx};

/// Larger bodies leave their row (S1 §6.3).
pub const PAYLOAD_INLINE_MAX_BYTES: usize = 8192;

/// Uploads at once; hides the round trips of a bucket.
const UPLOADS_IN_FLIGHT: usize = 8;

/// Which row a body belongs to: height, kind, index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Place {
    Block(u64),
    Transaction(u64, u32),
    Record(u64, u32),
}

/// A batch whose large bodies are durable in object storage. Writing it touches only the database, and may
/// be done again.
#[derive(Debug, Clone)]
pub struct Prepared {
    batch: Arc<RawBatch>,
    offloaded: Arc<HashMap<Place, BlobRef>>,
}

impl Prepared {
    /// The batch itself.
    pub fn batch(&self) -> &RawBatch {
        &self.batch
    }
    /// How many bodies went to object storage.
    pub fn offloaded(&self) -> usize {
        self.offloaded.len()
    }
}

/// Writes batches of one deployment.
#[derive(Clone)]
pub struct RawWriter {
    blobs: Arc<dyn BlobStore>,
    inline_max_bytes: usize,
}

impl RawWriter {
    /// Bodies above `inline_max_bytes` go to `blobs`.
    pub fn new(blobs: Arc<dyn BlobStore>, inline_max_bytes: usize) -> Self {
        Self { blobs, inline_max_bytes }
    }

    /// Uploads large bodies, and bodies that JSON in Postgres cannot hold as they are. Content-addressed: for
    /// a batch that is never written it costs only space.
    pub async fn prepare(&self, batch: RawBatch) -> Result<Prepared, RawError> {
        let mut bodies: Vec<(Place, Bytes)> = Vec::new();
        for block in &batch.blocks {
            self.collect(block, &mut bodies);
        }
        let offloaded = futures_util::stream::iter(bodies)
            .map(|(place, body)| async move { Ok::<_, RawError>((place, self.blobs.put(body).await?)) })
            .buffer_unordered(UPLOADS_IN_FLIGHT)
            .try_collect()
            .await?;
        Ok(Prepared { batch: Arc::new(batch), offloaded: Arc::new(offloaded) })
    }

    fn collect(&self, block: &RawBlock, bodies: &mut Vec<(Place, Bytes)>) {
        let height = block.height.0;
        if let Some(body) = block.payload.as_ref().and_then(|payload| self.large_json(payload)) {
            bodies.push((Place::Block(height), body));
        }
        for transaction in &block.transactions {
            if let Some(body) = self.large_json(&transaction.payload) {
                bodies.push((Place::Transaction(height, transaction.index), body));
            }
        }
        for record in &block.records {
            let json = record.payload.as_ref().map(Value::to_string);
            let size = record.data.len() + json.as_ref().map_or(0, String::len);
            if size > self.inline_max_bytes || record.payload.as_ref().is_some_and(has_nul) {
                bodies.push((Place::Record(height, record.index), record_body(record)));
            }
        }
    }

    fn large_json(&self, payload: &Value) -> Option<Bytes> {
        let text = payload.to_string();
        (text.len() > self.inline_max_bytes || has_nul(payload)).then(|| Bytes::from(text))
    }

    /// The fast path: COPY straight into the partitions. Only behind a fence that proves that no row of the
    /// range exists (a cursor that was moved or a lease that is held in this transaction).
    pub async fn copy(
        &self,
        tx: &Tx<'_>,
        network: NetworkId,
        shard: i32,
        prepared: &Prepared,
    ) -> Result<u64, StoreError> {
        let rows = Rows::encode(network, prepared);
        tx.copy_in("copy blocks", COPY_BLOCKS, rows.blocks).await?;
        tx.copy_in("copy transactions", COPY_TRANSACTIONS, rows.transactions).await?;
        let events = tx.copy_in("copy events", COPY_EVENTS, rows.events).await?;
        tx.copy_in("copy transaction lookups", COPY_TX_LOOKUP, rows.tx_lookup).await?;
        tx.copy_in("copy block lookups", COPY_BLOCK_LOOKUP, rows.block_lookup).await?;
        insert_evidence(tx, network, shard, prepared.batch()).await?;
        Ok(events)
    }

    /// The healing path: over rows that may exist. Afterwards the covered range holds exactly this batch.
    pub async fn heal(
        &self,
        tx: &Tx<'_>,
        network: NetworkId,
        shard: i32,
        prepared: &Prepared,
    ) -> Result<u64, StoreError> {
        let rows = Rows::encode(network, prepared);
        let batch = prepared.batch();
        let (from, to) = (batch.covered.from().as_i64(), batch.covered.to().as_i64());
        drop_lookups(tx, network, batch.covered, &batch.blocks).await?;
        tx.batch("prepare to heal", HEAL_TABLES).await?;
        tx.copy_in("stage blocks", STAGE_BLOCKS, rows.blocks).await?;
        tx.copy_in("stage transactions", STAGE_TRANSACTIONS, rows.transactions).await?;
        tx.copy_in("stage events", STAGE_EVENTS, rows.events).await?;
        tx.execute("drop foreign blocks", HEAL_DROP_BLOCKS, &[&network.0, &from, &to]).await?;
        tx.execute("drop foreign transactions", HEAL_DROP_TRANSACTIONS, &[&network.0, &from, &to]).await?;
        tx.execute("drop foreign events", HEAL_DROP_EVENTS, &[&network.0, &from, &to]).await?;
        tx.execute("heal blocks", HEAL_BLOCKS, &[]).await?;
        tx.execute("heal transactions", HEAL_TRANSACTIONS, &[]).await?;
        let events = tx.execute("heal events", HEAL_EVENTS, &[]).await?;
        tx.copy_in("copy transaction lookups", COPY_TX_LOOKUP, rows.tx_lookup).await?;
        tx.copy_in("copy block lookups", COPY_BLOCK_LOOKUP, rows.block_lookup).await?;
        cut_evidence(tx, network, shard, batch.covered).await?;
        insert_evidence(tx, network, shard, batch).await?;
        Ok(events)
    }
}

/// An offloaded record: data and payload together, so that one reference holds the whole body.
fn record_body(record: &RawRecord) -> Bytes {
    let body = serde_json::json!({ "data": hex::encode(&record.data), "payload": record.payload });
    Bytes::from(body.to_string())
}

/// jsonb refuses U+0000. Such a body is kept whole in object storage instead of being altered.
fn has_nul(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains('\0'),
        Value::Array(items) => items.iter().any(has_nul),
        Value::Object(fields) => fields.iter().any(|(name, value)| name.contains('\0') || has_nul(value)),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

const COPY_BLOCKS: &str = "
    copy raw.blocks (network_id, height, hash, parent_hash, block_time, tx_count, event_count, payload,
                     payload_hash, payload_ref) from stdin (format binary)";
const COPY_TRANSACTIONS: &str = "
    copy raw.transactions (network_id, block_height, id, tx_index, sender, receiver, value, succeeded, payload,
                           payload_hash, payload_ref) from stdin (format binary)";
const COPY_EVENTS: &str = "
    copy raw.events (network_id, block_height, tx_id, event_index, tx_index, block_hash, emitter, topics, data,
                     payload, payload_hash, payload_ref) from stdin (format binary)";
const COPY_TX_LOOKUP: &str = "
    copy raw.tx_lookup (network_id, block_height, id, tx_index, block_time) from stdin (format binary)";
const COPY_BLOCK_LOOKUP: &str = "
    copy raw.block_lookup (network_id, height, id, block_time) from stdin (format binary)";

const HEAL_TABLES: &str = "
    create temp table if not exists heal_blocks (like raw.blocks) on commit delete rows;
    create temp table if not exists heal_transactions (like raw.transactions) on commit delete rows;
    create temp table if not exists heal_events (like raw.events) on commit delete rows;
    truncate heal_blocks, heal_transactions, heal_events";
const STAGE_BLOCKS: &str = "
    copy heal_blocks (network_id, height, hash, parent_hash, block_time, tx_count, event_count, payload,
                      payload_hash, payload_ref) from stdin (format binary)";
const STAGE_TRANSACTIONS: &str = "
    copy heal_transactions (network_id, block_height, id, tx_index, sender, receiver, value, succeeded, payload,
                            payload_hash, payload_ref) from stdin (format binary)";
const STAGE_EVENTS: &str = "
    copy heal_events (network_id, block_height, tx_id, event_index, tx_index, block_hash, emitter, topics, data,
                      payload, payload_hash, payload_ref) from stdin (format binary)";
const HEAL_DROP_BLOCKS: &str = "
    delete from raw.blocks b
     where b.network_id = $1 and b.height >= $2 and b.height < $3
       and not exists (select from heal_blocks h where h.height = b.height)";
const HEAL_DROP_TRANSACTIONS: &str = "
    delete from raw.transactions t
     where t.network_id = $1 and t.block_height >= $2 and t.block_height < $3
       and not exists (select from heal_transactions h where h.block_height = t.block_height and h.id = t.id)";
const HEAL_DROP_EVENTS: &str = "
    delete from raw.events e
     where e.network_id = $1 and e.block_height >= $2 and e.block_height < $3
       and not exists (select from heal_events h where h.block_height = e.block_height
                          and h.event_index = e.event_index and h.tx_id = e.tx_id)";
const HEAL_BLOCKS: &str = "
    insert into raw.blocks (network_id, height, hash, parent_hash, block_time, tx_count, event_count, payload,
                            payload_hash, payload_ref)
    select network_id, height, hash, parent_hash, block_time, tx_count, event_count, payload, payload_hash,
           payload_ref from heal_blocks order by height
    on conflict (network_id, height) do update
       set hash = excluded.hash, parent_hash = excluded.parent_hash, block_time = excluded.block_time,
           tx_count = excluded.tx_count, event_count = excluded.event_count, payload = excluded.payload,
           payload_hash = excluded.payload_hash, payload_ref = excluded.payload_ref";
const HEAL_TRANSACTIONS: &str = "
    insert into raw.transactions (network_id, block_height, id, tx_index, sender, receiver, value, succeeded,
                                  payload, payload_hash, payload_ref)
    select network_id, block_height, id, tx_index, sender, receiver, value, succeeded, payload, payload_hash,
           payload_ref from heal_transactions order by block_height, id
    on conflict (network_id, block_height, id) do update
       set tx_index = excluded.tx_index, sender = excluded.sender, receiver = excluded.receiver,
           value = excluded.value, succeeded = excluded.succeeded, payload = excluded.payload,
           payload_hash = excluded.payload_hash, payload_ref = excluded.payload_ref";
const HEAL_EVENTS: &str = "
    insert into raw.events (network_id, block_height, tx_id, event_index, tx_index, block_hash, emitter, topics,
                            data, payload, payload_hash, payload_ref)
    select network_id, block_height, tx_id, event_index, tx_index, block_hash, emitter, topics, data, payload,
           payload_hash, payload_ref from heal_events order by block_height, event_index, tx_id
    on conflict (network_id, block_height, event_index, tx_id) do update
       set tx_index = excluded.tx_index, block_hash = excluded.block_hash, emitter = excluded.emitter,
           topics = excluded.topics, data = excluded.data, payload = excluded.payload,
           payload_hash = excluded.payload_hash, payload_ref = excluded.payload_ref";

/// All rows of a batch, encoded.
struct Rows {
    blocks: CopyBuffer,
    transactions: CopyBuffer,
    events: CopyBuffer,
    tx_lookup: CopyBuffer,
    block_lookup: CopyBuffer,
}

impl Rows {
    fn encode(network: NetworkId, prepared: &Prepared) -> Self {
        let mut rows = Self {
            blocks: CopyBuffer::new(10),
            transactions: CopyBuffer::new(11),
            events: CopyBuffer::new(12),
            tx_lookup: CopyBuffer::new(5),
            block_lookup: CopyBuffer::new(4),
        };
        let mut seen = HashSet::new();
        for block in &prepared.batch.blocks {
            rows.block(network, block, prepared);
            seen.clear();
            for transaction in &block.transactions {
                rows.transaction(network, block, transaction, prepared);
                if seen.insert(transaction.id) {
                    rows.tx_lookup(network, block, &transaction.id, transaction.index);
                }
            }
            let mut previous: Option<&TxId> = None;
            for record in &block.records {
                rows.event(network, block, record, prepared);
                // Records of one transaction follow each other: mostly one comparison, no hashing.
                if previous != Some(&record.tx) && seen.insert(record.tx) {
                    rows.tx_lookup(network, block, &record.tx, record.tx_index);
                }
                previous = Some(&record.tx);
            }
        }
        rows
    }

    fn block(&mut self, network: NetworkId, block: &RawBlock, prepared: &Prepared) {
        let blob = prepared.offloaded.get(&Place::Block(block.height.0));
        let events = i32::try_from(block.records.len()).expect("a block has fewer than 2^31 records");
        self.blocks
            .row()
            .i32(network.0)
            .i64(block.height.as_i64())
            .bytea(&block.hash.0)
            .bytea(&block.parent.0)
            .timestamp(block.time)
            .opt(block.tx_count, |row, count| row.i32(clamp(count)))
            .i32(events);
        body(&mut self.blocks, block.payload.as_ref(), blob);
        self.block_lookup
            .row()
            .i32(network.0)
            .i64(block.height.as_i64())
            .bytea(&block.hash.0)
            .timestamp(block.time);
    }

    fn transaction(
        &mut self,
        network: NetworkId,
        block: &RawBlock,
        transaction: &RawTransaction,
        prepared: &Prepared,
    ) {
        let blob = prepared.offloaded.get(&Place::Transaction(block.height.0, transaction.index));
        self.transactions
            .row()
            .i32(network.0)
            .i64(block.height.as_i64())
            .bytea(transaction.id.as_bytes())
            .i32(clamp(transaction.index))
            .bytea(&transaction.sender)
            .opt(transaction.receiver.as_ref(), |row, receiver| row.bytea(receiver))
            .u256(transaction.value)
            .opt(transaction.succeeded, CopyBuffer::bool);
        body(&mut self.transactions, Some(&transaction.payload), blob);
    }

    fn event(&mut self, network: NetworkId, block: &RawBlock, record: &RawRecord, prepared: &Prepared) {
        let blob = match prepared.offloaded.is_empty() {
            true => None,
            false => prepared.offloaded.get(&Place::Record(block.height.0, record.index)),
        };
        self.events
            .row()
            .i32(network.0)
            .i64(block.height.as_i64())
            .bytea(record.tx.as_bytes())
            .i32(clamp(record.index))
            .i32(clamp(record.tx_index))
            .bytea(&block.hash.0)
            .bytea(&record.emitter)
            .bytea(&record.topics);
        match blob {
            Some(_) => self.events.null(),
            None => self.events.bytea(&record.data),
        };
        body(&mut self.events, record.payload.as_ref(), blob);
    }

    fn tx_lookup(&mut self, network: NetworkId, block: &RawBlock, tx: &TxId, index: u32) {
        self.tx_lookup
            .row()
            .i32(network.0)
            .i64(block.height.as_i64())
            .bytea(tx.as_bytes())
            .i32(clamp(index))
            .timestamp(block.time);
    }
}

/// payload, payload_hash, payload_ref: either the payload is inline or both others say where it is.
fn body(rows: &mut CopyBuffer, payload: Option<&Value>, blob: Option<&BlobRef>) {
    match blob {
        Some(blob) => rows.null().bytea(blob.hash()).text(&blob.to_string()),
        None => rows.opt(payload, CopyBuffer::jsonb).null().null(),
    };
}

/// Indexes within a block; the adapter has refused more than 2^31.
fn clamp(index: u32) -> i32 {
    i32::try_from(index).expect("an index within a block is below 2^31")
}

/// Distinct transaction ids, in order.
fn tx_ids(blocks: &[RawBlock]) -> Vec<Vec<u8>> {
    let mut ids = BTreeSet::new();
    for block in blocks {
        ids.extend(block.transactions.iter().map(|transaction| transaction.id));
        ids.extend(block.records.iter().map(|record| record.tx));
    }
    ids.into_iter().map(|id| id.as_bytes().to_vec()).collect()
}

const INSERT_EVIDENCE: &str = "
    insert into raw.range_evidence (network_id, shard, from_height, to_height, provider, head_seen, records,
                                    foreign_records, requests, checks, coverage)
    values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)";

async fn insert_evidence(
    tx: &Tx<'_>,
    network: NetworkId,
    shard: i32,
    batch: &RawBatch,
) -> Result<(), StoreError> {
    let evidence = &batch.evidence;
    let signed = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    let coverage = match evidence.coverage {
        BlockCoverage::All => "all",
        BlockCoverage::WithRecords => "with_records",
    };
    tx.execute(
        "insert evidence",
        INSERT_EVIDENCE,
        &[
            &network.0,
            &shard,
            &batch.covered.from().as_i64(),
            &batch.covered.to().as_i64(),
            &evidence.provider,
            &evidence.head_seen.as_i64(),
            &signed(evidence.records),
            &signed(evidence.foreign),
            &signed(evidence.requests),
            &evidence.checks,
            &coverage,
        ],
    )
    .await?;
    Ok(())
}

// A row that begins below the range and reaches into it is split: the part before keeps its row, the part
// behind gets its own. Record counts of the parts come from raw.blocks.
const EVIDENCE_TAILS: &str = "
    insert into raw.range_evidence (network_id, shard, from_height, to_height, provider, head_seen, records,
                                    foreign_records, requests, checks, coverage, accepted_at)
    select e.network_id, e.shard, $4, e.to_height, e.provider, e.head_seen,
           coalesce((select sum(b.event_count)::bigint from raw.blocks b where b.network_id = $1
                        and b.height >= $4 and b.height < e.to_height), 0),
           0, 0, e.checks, e.coverage, e.accepted_at
      from raw.range_evidence e
     where e.network_id = $1 and e.shard = $2 and e.from_height < $4 and e.to_height > $4
       and e.to_height > $3";
const EVIDENCE_HEADS: &str = "
    update raw.range_evidence e
       set to_height = $3,
           records = coalesce((select sum(b.event_count)::bigint from raw.blocks b where b.network_id = $1
                                  and b.height >= e.from_height and b.height < $3), 0)
     where e.network_id = $1 and e.shard = $2 and e.from_height < $3 and e.to_height > $3";
const EVIDENCE_INSIDE: &str = "
    delete from raw.range_evidence
     where network_id = $1 and shard = $2 and from_height >= $3 and from_height < $4";

/// Takes `range` out of the tiling.
pub(super) async fn cut_evidence(
    tx: &Tx<'_>,
    network: NetworkId,
    shard: i32,
    range: HeightRange,
) -> Result<(), StoreError> {
    let (from, to) = (range.from().as_i64(), range.to().as_i64());
    // The tail's own start lies outside the range, so the delete below does not meet it.
    tx.execute("split evidence behind", EVIDENCE_TAILS, &[&network.0, &shard, &from, &to]).await?;
    tx.execute("split evidence before", EVIDENCE_HEADS, &[&network.0, &shard, &from]).await?;
    tx.execute("drop evidence", EVIDENCE_INSIDE, &[&network.0, &shard, &from, &to]).await?;
    Ok(())
}

// By id where the partition has its index; `old` finds the ids of rows that are there now.
const DROP_TX_LOOKUP: &str = "
    with old as (
        select tx_id as id from raw.events where network_id = $1 and block_height >= $2 and block_height < $3
        union select id from raw.transactions where network_id = $1 and block_height >= $2 and block_height < $3
        union select unnest($4::bytea[])
    )
    delete from raw.tx_lookup l using old
     where l.network_id = $1 and l.block_height >= $2 and l.block_height < $3 and l.id = old.id";
const DROP_BLOCK_LOOKUP: &str = "
    with old as (
        select hash as id from raw.blocks where network_id = $1 and height >= $2 and height < $3
        union select unnest($4::bytea[])
    )
    delete from raw.block_lookup l using old
     where l.network_id = $1 and l.height >= $2 and l.height < $3 and l.id = old.id";

/// Removes the lookups of a range, and of what is about to be written. Before its rows go: they name the ids.
pub(super) async fn drop_lookups(
    tx: &Tx<'_>,
    network: NetworkId,
    range: HeightRange,
    also: &[RawBlock],
) -> Result<(), StoreError> {
    let (from, to) = (range.from().as_i64(), range.to().as_i64());
    let (txs, hashes) = (tx_ids(also), also.iter().map(|block| block.hash.0.to_vec()).collect::<Vec<_>>());
    tx.execute("drop transaction lookups", DROP_TX_LOOKUP, &[&network.0, &from, &to, &txs]).await?;
    tx.execute("drop block lookups", DROP_BLOCK_LOOKUP, &[&network.0, &from, &to, &hashes]).await?;
    Ok(())
}
