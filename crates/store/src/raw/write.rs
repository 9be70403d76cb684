//! Writing a batch. [`RawWriter::prepare`] uploads what is too large for a row, outside any transaction;
//! [`RawWriter::copy`] is the fast path behind a fence, [`RawWriter::heal`] the one over existing rows.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use serde_json::Value;
use tidemark_model::chain::{BlockCoverage, RangeEvidence, RawBatch, RawBlock, RawRecord, RawTransaction};
use tidemark_model::ids::{Height, HeightRange, NetworkId, TxId};

use super::RawError;
use crate::blob::{BlobRef, BlobStore};
use crate::copy::CopyBuffer;
use crate::cursor::Shard;
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
        let events = Rows::encode(network, prepared, &Known::default()).copy_all(tx).await?;
        insert_evidence(tx, network, shard, prepared.batch().covered, &prepared.batch().evidence).await?;
        Ok(events)
    }

    /// The fast path for whole blocks that several shards read together: every share leaves its evidence.
    pub async fn copy_shares(
        &self,
        tx: &Tx<'_>,
        network: NetworkId,
        prepared: &Prepared,
        shares: &[Share],
    ) -> Result<u64, StoreError> {
        let events = Rows::encode(network, prepared, &Known::default()).copy_all(tx).await?;
        for share in shares {
            insert_counts(tx, network, share.shard, &share.counts).await?;
            insert_evidence(tx, network, share.shard, prepared.batch().covered, &share.evidence).await?;
        }
        Ok(events)
    }

    /// One shard's share of blocks that other shards may have stored already: events straight, behind the
    /// shard's own fence; blocks and lookups once, whoever comes first.
    pub async fn merge(
        &self,
        tx: &Tx<'_>,
        network: NetworkId,
        shard: i32,
        prepared: &Prepared,
    ) -> Result<u64, StoreError> {
        let batch = prepared.batch();
        let known = merge_blocks(tx, network, prepared).await?;
        let mut rows = Rows::encode(network, prepared, &known);
        rows.blocks = CopyBuffer::new(10); // They are there by now.
        let events = rows.copy_all(tx).await?;
        insert_counts(tx, network, shard, &counts(&batch.blocks)).await?;
        insert_evidence(tx, network, shard, batch.covered, &batch.evidence).await?;
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
        let rows = Rows::encode(network, prepared, &Known::default());
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
        cut_evidence(tx, network, Shard { number: shard, of: 1 }, batch.covered).await?;
        insert_evidence(tx, network, shard, batch.covered, &batch.evidence).await?;
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

/// What other shards have stored of the blocks of a batch: their heights, and the transactions there.
#[derive(Default)]
struct Known {
    blocks: HashMap<i64, Vec<TxId>>,
}

impl Rows {
    async fn copy_all(self, tx: &Tx<'_>) -> Result<u64, StoreError> {
        tx.copy_in("copy blocks", COPY_BLOCKS, self.blocks).await?;
        tx.copy_in("copy transactions", COPY_TRANSACTIONS, self.transactions).await?;
        let events = tx.copy_in("copy events", COPY_EVENTS, self.events).await?;
        tx.copy_in("copy transaction lookups", COPY_TX_LOOKUP, self.tx_lookup).await?;
        tx.copy_in("copy block lookups", COPY_BLOCK_LOOKUP, self.block_lookup).await?;
        Ok(events)
    }

    fn encode(network: NetworkId, prepared: &Prepared, known: &Known) -> Self {
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
            let height = block.height.as_i64();
            match known.blocks.get(&height) {
                None => rows.block_lookup(network, block),
                Some(transactions) => seen.extend(transactions.iter().copied()),
            }
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
    }

    fn block_lookup(&mut self, network: NetworkId, block: &RawBlock) {
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

/// What one shard gave to blocks that all of them read together.
#[derive(Debug, Clone)]
pub struct Share {
    /// Its number.
    pub shard: i32,
    /// Why its part may be believed.
    pub evidence: RangeEvidence,
    /// Heights where it has records, and how many.
    pub counts: Vec<(Height, u32)>,
}

/// Heights with records, and how many.
pub fn counts(blocks: &[RawBlock]) -> Vec<(Height, u32)> {
    let count = |block: &RawBlock| u32::try_from(block.records.len()).expect("a block has fewer than 2^31");
    blocks
        .iter()
        .filter(|block| !block.records.is_empty())
        .map(|block| (block.height, count(block)))
        .collect()
}

const INSERT_COUNTS: &str = "
    insert into raw.shard_blocks (network_id, shard, height, event_count)
    select $1, $2, c.height, c.events from unnest($3::bigint[], $4::int[]) as c (height, events)";

async fn insert_counts(
    tx: &Tx<'_>,
    network: NetworkId,
    shard: i32,
    counts: &[(Height, u32)],
) -> Result<(), StoreError> {
    let (heights, events): (Vec<i64>, Vec<i32>) =
        counts.iter().map(|(height, events)| (height.as_i64(), clamp(*events))).unzip();
    tx.execute("count a shard's events", INSERT_COUNTS, &[&network.0, &shard, &heights, &events]).await?;
    Ok(())
}

// In order of height, so that two shards never wait for each other in a circle. Whoever finds a row there adds
// to it, once the one who wrote it has committed.
const MERGE_NEW: &str = "
    insert into raw.blocks (network_id, height, hash, parent_hash, block_time, tx_count, event_count, payload,
                            payload_hash, payload_ref)
    select network_id, height, hash, parent_hash, block_time, tx_count, event_count, payload, payload_hash,
           payload_ref from heal_blocks order by height
    on conflict (network_id, height) do nothing
    returning height";
const MERGE_LOCK: &str = "
    select height from raw.blocks where network_id = $1 and height = any($2) order by height for update";
const MERGE_OLD: &str = "
    update raw.blocks b set event_count = b.event_count + h.event_count
      from heal_blocks h
     where b.network_id = $1 and b.height = any($2) and h.height = b.height and h.hash = b.hash";
const MERGE_TXS: &str = "
    select distinct block_height, tx_id from raw.events where network_id = $1 and block_height = any($2)";

/// Makes sure that the blocks of a batch are there; names those that others had stored before.
async fn merge_blocks(tx: &Tx<'_>, network: NetworkId, prepared: &Prepared) -> Result<Known, StoreError> {
    let batch = prepared.batch();
    let mut known = Known::default();
    if batch.blocks.is_empty() {
        return Ok(known);
    }
    let rows = Rows::encode(network, prepared, &Known::default());
    tx.batch("prepare to merge", HEAL_TABLES).await?;
    tx.copy_in("stage blocks", STAGE_BLOCKS, rows.blocks).await?;
    let new: HashSet<i64> =
        tx.query("merge new blocks", MERGE_NEW, &[]).await?.iter().map(|row| row.get(0)).collect();
    let heights = batch.blocks.iter().map(|block| block.height.as_i64());
    let old: Vec<i64> = heights.filter(|height| !new.contains(height)).collect();
    if old.is_empty() {
        return Ok(known);
    }
    tx.query("lock blocks of other shards", MERGE_LOCK, &[&network.0, &old]).await?;
    let merged = tx.execute("merge blocks of other shards", MERGE_OLD, &[&network.0, &old]).await?;
    if usize::try_from(merged) != Ok(old.len()) {
        return Err(StoreError::Corrupt {
            what: format!("raw.blocks of network {network} within {}", batch.covered),
            found: "another block than this shard read at the same final height".to_owned(),
            hint: "a node is on another chain: compare the block hashes of the endpoints",
        });
    }
    known.blocks.extend(old.iter().map(|height| (*height, Vec::new())));
    for row in tx.query("read transactions of other shards", MERGE_TXS, &[&network.0, &old]).await? {
        if let (Some(ids), Some(id)) =
            (known.blocks.get_mut(&row.get::<_, i64>(0)), TxId::from_slice(row.get::<_, &[u8]>(1)))
        {
            ids.push(id);
        }
    }
    Ok(known)
}

const INSERT_EVIDENCE: &str = "
    insert into raw.range_evidence (network_id, shard, from_height, to_height, provider, head_seen, records,
                                    foreign_records, requests, checks, coverage)
    values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)";

async fn insert_evidence(
    tx: &Tx<'_>,
    network: NetworkId,
    shard: i32,
    covered: HeightRange,
    evidence: &RangeEvidence,
) -> Result<(), StoreError> {
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
            &covered.from().as_i64(),
            &covered.to().as_i64(),
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
// behind gets its own. Record counts of the parts come from raw.blocks, or from the shard's own counts.
const EVIDENCE_TAILS: &str = "
    insert into raw.range_evidence (network_id, shard, from_height, to_height, provider, head_seen, records,
                                    foreign_records, requests, checks, coverage, accepted_at)
    select e.network_id, e.shard, $4, e.to_height, e.provider, e.head_seen,
           case when $5 then coalesce((select sum(b.event_count)::bigint from raw.blocks b
                                        where b.network_id = $1 and b.height >= $4 and b.height < e.to_height), 0)
                else coalesce((select sum(b.event_count)::bigint from raw.shard_blocks b
                                where b.network_id = $1 and b.shard = $2 and b.height >= $4
                                  and b.height < e.to_height), 0) end,
           0, 0, e.checks, e.coverage, e.accepted_at
      from raw.range_evidence e
     where e.network_id = $1 and e.shard = $2 and e.from_height < $4 and e.to_height > $4
       and e.to_height > $3";
const EVIDENCE_HEADS: &str = "
    update raw.range_evidence e
       set to_height = $3,
           records = case when $4
               then coalesce((select sum(b.event_count)::bigint from raw.blocks b where b.network_id = $1
                                 and b.height >= e.from_height and b.height < $3), 0)
               else coalesce((select sum(b.event_count)::bigint from raw.shard_blocks b where b.network_id = $1
                                 and b.shard = $2 and b.height >= e.from_height and b.height < $3), 0) end
     where e.network_id = $1 and e.shard = $2 and e.from_height < $3 and e.to_height > $3";
const EVIDENCE_INSIDE: &str = "
    delete from raw.range_evidence
     where network_id = $1 and shard = $2 and from_height >= $3 and from_height < $4";

const DROP_COUNTS: &str = "
    delete from raw.shard_blocks where network_id = $1 and shard = $2 and height >= $3 and height < $4";

/// Takes `range` out of a shard's tiling.
pub(super) async fn cut_evidence(
    tx: &Tx<'_>,
    network: NetworkId,
    shard: Shard,
    range: HeightRange,
) -> Result<(), StoreError> {
    let (from, to) = (range.from().as_i64(), range.to().as_i64());
    let (is_only, shard) = (shard.is_only(), shard.number);
    if !is_only {
        tx.execute("drop a shard's counts", DROP_COUNTS, &[&network.0, &shard, &from, &to]).await?;
    }
    // The tail's own start lies outside the range, so the delete below does not meet it.
    tx.execute("split evidence behind", EVIDENCE_TAILS, &[&network.0, &shard, &from, &to, &is_only]).await?;
    tx.execute("split evidence before", EVIDENCE_HEADS, &[&network.0, &shard, &from, &is_only]).await?;
    tx.execute("drop evidence", EVIDENCE_INSIDE, &[&network.0, &shard, &from, &to]).await?;
    Ok(())
}

/// Heights that one merged row covers at most.
const TILE_BLOCKS: i64 = 10_000;
/// Rows worth merging: fewer would rewrite the same row again and again.
const TILES_MIN: i64 = 64;

// Rows of one aligned stretch that touch each other and are alike become one: it says what all of them say.
const COMPACT: &str = "
    with small as (
        select from_height, to_height, from_height / $4 as stretch, coverage, provider, head_seen, records,
               foreign_records, requests, checks, accepted_at
          from raw.range_evidence
         where network_id = $1 and shard = $2 and to_height <= $3 and from_height >= $3 - 2 * $4
           and (to_height - 1) / $4 = from_height / $4
    ), merged as (
        select stretch, coverage, min(from_height) as from_height, max(to_height) as to_height,
               case when count(distinct provider) = 1 then min(provider) else 'several' end as provider,
               max(head_seen) as head_seen, sum(records)::bigint as records,
               sum(foreign_records)::bigint as foreign_records, sum(requests)::bigint as requests,
               max(accepted_at) as accepted_at, count(*) as tiles
          from small group by stretch, coverage
        having count(*) >= $5 and sum(to_height - from_height) = max(to_height) - min(from_height)
    ), gone as (
        delete from raw.range_evidence e using merged m
         where e.network_id = $1 and e.shard = $2 and e.from_height >= m.from_height
           and e.from_height < m.to_height
    )
    select m.from_height, m.to_height, m.provider, m.head_seen, m.records, m.foreign_records, m.requests,
           m.coverage, m.accepted_at,
           array(select c.name from (select unnest(s.checks) as name from small s
                                      where s.stretch = m.stretch and s.coverage = m.coverage) c
                  group by c.name having count(*) = m.tiles order by c.name)
      from merged m";
const INSERT_COMPACT: &str = "
    insert into raw.range_evidence (network_id, shard, from_height, to_height, provider, head_seen, records,
                                    foreign_records, requests, coverage, accepted_at, checks)
    values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)";

/// Merges a shard's evidence of single blocks below `end`, where many rows of it have come together: the tip
/// writes a row per transaction, and nobody needs them one by one once they are final. The merged row names
/// the checks that all of them passed. Gives the number of merged rows.
pub async fn compact_evidence(
    tx: &Tx<'_>,
    network: NetworkId,
    shard: i32,
    end: Height,
) -> Result<u64, StoreError> {
    let rows = tx
        .query("merge evidence", COMPACT, &[&network.0, &shard, &end.as_i64(), &TILE_BLOCKS, &TILES_MIN])
        .await?;
    for row in &rows {
        let (from, to, head): (i64, i64, i64) = (row.get(0), row.get(1), row.get(3));
        let (provider, coverage): (&str, &str) = (row.get(2), row.get(7));
        let (records, foreign, requests): (i64, i64, i64) = (row.get(4), row.get(5), row.get(6));
        let (accepted_at, checks): (time::OffsetDateTime, Vec<String>) = (row.get(8), row.get(9));
        tx.execute(
            "insert merged evidence",
            INSERT_COMPACT,
            &[
                &network.0,
                &shard,
                &from,
                &to,
                &provider,
                &head,
                &records,
                &foreign,
                &requests,
                &coverage,
                &accepted_at,
                &checks,
            ],
        )
        .await?;
    }
    Ok(u64::try_from(rows.len()).expect("a length fits in 64 bits"))
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
