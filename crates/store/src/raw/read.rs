//! Reading back. A [`RawBlock`] that comes out is the one that went in, so `adapter.parse` gives the same
//! events as at ingestion, whether a body is in its row or in object storage.

use std::sync::Arc;

use alloy_primitives::U256;
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use serde_json::Value;
use tidemark_model::chain::{BlockLink, BlockRef, RawBlock, RawRecord, RawTransaction};
use tidemark_model::ids::{BlockHash, Height, HeightRange, NetworkId, TxId};
use time::OffsetDateTime;
use tokio_postgres::Row;

use super::RawError;
use crate::blob::{BlobRef, BlobStore};
use crate::db::{Conn, StoreError};

/// Downloads at once.
const DOWNLOADS_IN_FLIGHT: usize = 8;
/// Blocks looked at to find the end of a chunk: at first, at least, and at most (bounds memory where blocks are many
/// and empty).
const CHUNK_BLOCKS_FIRST: i64 = 1_000;
const CHUNK_BLOCKS_MIN: i64 = 50;
const CHUNK_BLOCKS_MAX: i64 = 10_000;

/// Reads whole blocks.
#[derive(Clone)]
pub struct RawReader {
    blobs: Arc<dyn BlobStore>,
}

const READ_BLOCKS: &str = "
    select height, hash, parent_hash, block_time, tx_count, event_count, payload, payload_ref
      from raw.blocks where network_id = $1 and height >= $2 and height < $3
     order by height limit $4";
const READ_TRANSACTIONS: &str = "
    select block_height, id, tx_index, sender, receiver, value, succeeded, payload, payload_ref
      from raw.transactions where network_id = $1 and block_height >= $2 and block_height < $3
     order by block_height, tx_index";
const READ_EVENTS: &str = "
    select block_height, block_hash, tx_id, event_index, tx_index, emitter, topics, data, payload, payload_ref
      from raw.events where network_id = $1 and block_height >= $2 and block_height < $3
     order by block_height, event_index";

impl RawReader {
    /// Large bodies come from `blobs`.
    pub fn new(blobs: Arc<dyn BlobStore>) -> Self {
        Self { blobs }
    }

    /// All stored blocks of `range`, with everything in them. The caller bounds the range; for long ones use
    /// [`RawReader::chunks`].
    pub async fn read_range(
        &self,
        conn: &Conn,
        network: NetworkId,
        range: HeightRange,
    ) -> Result<Vec<RawBlock>, RawError> {
        let (from, to) = (range.from().as_i64(), range.to().as_i64());
        let rows = conn.query("read blocks", READ_BLOCKS, &[&network.0, &from, &to, &i64::MAX]).await?;
        self.fill(conn, network, range, &rows).await
    }

    /// One block with everything in it.
    pub async fn read_block(
        &self,
        conn: &Conn,
        network: NetworkId,
        height: Height,
    ) -> Result<Option<RawBlock>, RawError> {
        Ok(self.read_range(conn, network, HeightRange::one(height)).await?.pop())
    }

    /// `range` in order, in chunks of about `records` records each.
    pub fn chunks(&self, network: NetworkId, range: HeightRange, records: usize) -> RawChunks {
        RawChunks { reader: self.clone(), network, rest: Some(range), records, look_at: CHUNK_BLOCKS_FIRST }
    }

    /// Transactions and events for blocks already read; both ride behind each other on the connection.
    async fn fill(
        &self,
        conn: &Conn,
        network: NetworkId,
        range: HeightRange,
        block_rows: &[Row],
    ) -> Result<Vec<RawBlock>, RawError> {
        let (from, to) = (range.from().as_i64(), range.to().as_i64());
        let mut blocks = Vec::with_capacity(block_rows.len());
        let mut bodies = Vec::new();
        for (at, row) in block_rows.iter().enumerate() {
            let (block, blob) = block_of(row)?;
            bodies.extend(blob.map(|blob| (Slot::Block(at), blob)));
            blocks.push(block);
        }
        if blocks.is_empty() {
            return Ok(blocks);
        }
        let params: [crate::db::Param<'_>; 3] = [&network.0, &from, &to];
        let (transactions, events) = tokio::try_join!(
            conn.query("read transactions", READ_TRANSACTIONS, &params),
            conn.query("read events", READ_EVENTS, &params),
        )?;
        let mut at = 0;
        for row in &transactions {
            at = seek(&blocks, at, row.get(0))?;
            let (transaction, blob) = transaction_of(row)?;
            bodies.extend(blob.map(|blob| (Slot::Transaction(at, blocks[at].transactions.len()), blob)));
            blocks[at].transactions.push(transaction);
        }
        let mut at = 0;
        for row in &events {
            at = seek(&blocks, at, row.get(0))?;
            if row.get::<_, &[u8]>(1) != blocks[at].hash.0 {
                return Err(corrupt(&blocks[at], "an event of another block hash").into());
            }
            let (record, blob) = record_of(row)?;
            bodies.extend(blob.map(|blob| (Slot::Record(at, blocks[at].records.len()), blob)));
            blocks[at].records.push(record);
        }
        for (slot, body) in self.download(bodies).await? {
            put_body(&mut blocks, slot, &body)?;
        }
        Ok(blocks)
    }

    async fn download(&self, bodies: Vec<(Slot, BlobRef)>) -> Result<Vec<(Slot, Bytes)>, RawError> {
        futures_util::stream::iter(bodies)
            .map(|(slot, blob)| async move { Ok((slot, self.blobs.get(&blob).await?)) })
            .buffer_unordered(DOWNLOADS_IN_FLIGHT)
            .try_collect()
            .await
    }
}

/// A long range, read in order; see [`RawReader::chunks`].
pub struct RawChunks {
    reader: RawReader,
    network: NetworkId,
    rest: Option<HeightRange>,
    records: usize,
    /// Blocks to look at for the next chunk, after how many the last one took.
    look_at: i64,
}

impl RawChunks {
    /// The next chunk: the heights it covers (no stored block of them is left out) and their blocks. `None`
    /// at the end of the range.
    pub async fn next(&mut self, conn: &Conn) -> Result<Option<(HeightRange, Vec<RawBlock>)>, RawError> {
        let Some(rest) = self.rest else { return Ok(None) };
        let (from, to) = (rest.from().as_i64(), rest.to().as_i64());
        let mut rows =
            conn.query("read blocks", READ_BLOCKS, &[&self.network.0, &from, &to, &self.look_at]).await?;
        let more = i64::try_from(rows.len()).expect("bounded") == self.look_at;
        let mut records = 0;
        let enough = rows.iter().position(|row| {
            records += usize::try_from(row.get::<_, i32>(5)).unwrap_or(0);
            records >= self.records.max(1)
        });
        let full = match enough {
            Some(last) => {
                let cut = last + 1 < rows.len();
                rows.truncate(last + 1);
                cut || more
            }
            None => more,
        };
        let taken = i64::try_from(rows.len()).expect("bounded");
        self.look_at = (taken * 2).clamp(CHUNK_BLOCKS_MIN, CHUNK_BLOCKS_MAX);
        let end = match rows.last() {
            Some(last) if full => Height::from_i64(last.get(0)).next(),
            _ => rest.to(),
        };
        let chunk = HeightRange::new(rest.from(), end).expect("at least one block is taken");
        self.rest = HeightRange::new(end, rest.to());
        Ok(Some((chunk, self.reader.fill(conn, self.network, chunk, &rows).await?)))
    }
}

/// Where a downloaded body goes.
#[derive(Debug, Clone, Copy)]
enum Slot {
    Block(usize),
    Transaction(usize, usize),
    Record(usize, usize),
}

fn put_body(blocks: &mut [RawBlock], slot: Slot, body: &[u8]) -> Result<(), StoreError> {
    let bad = |block: &RawBlock| corrupt(block, "an offloaded body that is not ours");
    match slot {
        Slot::Block(at) => {
            blocks[at].payload = Some(serde_json::from_slice(body).map_err(|_| bad(&blocks[at]))?);
        }
        Slot::Transaction(at, index) => {
            let payload = serde_json::from_slice(body).map_err(|_| bad(&blocks[at]))?;
            blocks[at].transactions[index].payload = payload;
        }
        Slot::Record(at, index) => {
            let (data, payload) = record_body(body).ok_or_else(|| bad(&blocks[at]))?;
            let record = &mut blocks[at].records[index];
            (record.data, record.payload) = (data, payload);
        }
    }
    Ok(())
}

/// Data and payload of an offloaded record.
pub(super) fn record_body(body: &[u8]) -> Option<(Bytes, Option<Value>)> {
    let mut body: Value = serde_json::from_slice(body).ok()?;
    let data = hex::decode(body.get("data")?.as_str()?).ok()?;
    let payload = body.get_mut("payload")?.take();
    Some((Bytes::from(data), (!payload.is_null()).then_some(payload)))
}

fn corrupt(block: &RawBlock, found: &str) -> StoreError {
    StoreError::Corrupt {
        what: format!("block {} in raw.*", block.block_ref()),
        found: found.to_owned(),
        hint: "run `verify completeness` and ingest the range again",
    }
}

/// The block at `height`; rows come in order, so it is at `from` or after it.
fn seek(blocks: &[RawBlock], from: usize, height: i64) -> Result<usize, StoreError> {
    let mut at = from;
    while at < blocks.len() && blocks[at].height.as_i64() < height {
        at += 1;
    }
    match blocks.get(at) {
        Some(block) if block.height.as_i64() == height => Ok(at),
        _ => Err(StoreError::Corrupt {
            what: format!("raw.* at height {height}"),
            found: "rows without a block".to_owned(),
            hint: "run `verify completeness` and ingest the range again",
        }),
    }
}

fn hash_of(bytes: &[u8], what: &str) -> Result<BlockHash, StoreError> {
    BlockHash::from_slice(bytes).ok_or_else(|| StoreError::Corrupt {
        what: what.to_owned(),
        found: format!("a hash of {} bytes", bytes.len()),
        hint: "run `verify completeness` and ingest the range again",
    })
}

fn tx_of(bytes: &[u8]) -> Result<TxId, StoreError> {
    TxId::from_slice(bytes).ok_or_else(|| StoreError::Corrupt {
        what: "raw.*".to_owned(),
        found: format!("a transaction id of {} bytes", bytes.len()),
        hint: "run `verify completeness` and ingest the range again",
    })
}

fn blob_of(text: Option<&str>) -> Result<Option<BlobRef>, StoreError> {
    text.map(|text| {
        BlobRef::parse(text).ok_or_else(|| StoreError::Corrupt {
            what: "a payload_ref in raw.*".to_owned(),
            found: text.chars().take(100).collect(),
            hint: "ingest the range again",
        })
    })
    .transpose()
}

/// Indexes are stored from u32 values below 2^31.
fn index_of(value: i32) -> u32 {
    u32::try_from(value).expect("a stored index is not negative")
}

fn block_of(row: &Row) -> Result<(RawBlock, Option<BlobRef>), StoreError> {
    let block = RawBlock {
        height: Height::from_i64(row.get(0)),
        hash: hash_of(row.get(1), "raw.blocks")?,
        parent: hash_of(row.get(2), "raw.blocks")?,
        time: row.get(3),
        tx_count: row.get::<_, Option<i32>>(4).map(index_of),
        transactions: Vec::new(),
        records: Vec::with_capacity(usize::try_from(row.get::<_, i32>(5)).unwrap_or(0)),
        payload: row.get(6),
    };
    Ok((block, blob_of(row.get(7))?))
}

fn transaction_of(row: &Row) -> Result<(RawTransaction, Option<BlobRef>), StoreError> {
    let transaction = RawTransaction {
        id: tx_of(row.get(1))?,
        index: index_of(row.get(2)),
        sender: Bytes::copy_from_slice(row.get(3)),
        receiver: row.get::<_, Option<&[u8]>>(4).map(Bytes::copy_from_slice),
        value: row.get::<_, U256>(5),
        succeeded: row.get(6),
        payload: row.get::<_, Option<Value>>(7).unwrap_or(Value::Null),
    };
    Ok((transaction, blob_of(row.get(8))?))
}

fn record_of(row: &Row) -> Result<(RawRecord, Option<BlobRef>), StoreError> {
    let (emitter, topics, data): (&[u8], &[u8], Option<&[u8]>) = (row.get(5), row.get(6), row.get(7));
    // One allocation for the three: this runs a million times per chunked read.
    let all = Bytes::from([emitter, topics, data.unwrap_or_default()].concat());
    let topics_end = emitter.len() + topics.len();
    let record = RawRecord {
        tx: tx_of(row.get(2))?,
        index: index_of(row.get(3)),
        tx_index: index_of(row.get(4)),
        emitter: all.slice(..emitter.len()),
        topics: all.slice(emitter.len()..topics_end),
        data: all.slice(topics_end..),
        payload: row.get(8),
    };
    Ok((record, blob_of(row.get(9))?))
}

const BLOCKS_BETWEEN: &str = "
    select height, hash, parent_hash from raw.blocks
     where network_id = $1 and height >= $2 and height < $3 order by height";

/// Stored blocks of `range` with their parents, in order.
pub async fn blocks_between(
    conn: &Conn,
    network: NetworkId,
    range: HeightRange,
) -> Result<Vec<BlockLink>, StoreError> {
    let (from, to) = (range.from().as_i64(), range.to().as_i64());
    let rows = conn.query("read block links", BLOCKS_BETWEEN, &[&network.0, &from, &to]).await?;
    rows.iter()
        .map(|row| {
            let block =
                BlockRef { height: Height::from_i64(row.get(0)), hash: hash_of(row.get(1), "raw.blocks")? };
            Ok(BlockLink { block, parent: hash_of(row.get(2), "raw.blocks")? })
        })
        .collect()
}

/// The stored block at `height` with its parent.
pub async fn block_at(
    conn: &Conn,
    network: NetworkId,
    height: Height,
) -> Result<Option<BlockLink>, StoreError> {
    Ok(blocks_between(conn, network, HeightRange::one(height)).await?.pop())
}

const HASH_AT: &str = "select hash from raw.blocks where network_id = $1 and height = $2";

/// The hash of the stored block at `height`, inside a transaction.
pub async fn hash_at(
    tx: &crate::db::Tx<'_>,
    network: NetworkId,
    height: Height,
) -> Result<Option<BlockHash>, StoreError> {
    let row = tx.query_opt("read a block's hash", HASH_AT, &[&network.0, &height.as_i64()]).await?;
    row.map(|row| hash_of(row.get(0), "raw.blocks")).transpose()
}

/// Where a transaction is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TxFound {
    /// The network.
    pub network: NetworkId,
    /// Its block.
    pub height: Height,
    /// Its position in the block.
    pub index: u32,
    /// Its block's time.
    pub time: OffsetDateTime,
}

const TX_LOOKUP: &str = "
    select network_id, block_height, tx_index, block_time from raw.tx_lookup
     where id = $1 and ($2::int is null or network_id = $2) order by network_id, block_height limit 16";

/// Finds a transaction by its id, on one network or on all.
pub async fn tx_lookup(
    conn: &Conn,
    network: Option<NetworkId>,
    id: &TxId,
) -> Result<Vec<TxFound>, StoreError> {
    let network = network.map(|network| network.0);
    let rows = conn.query("look a transaction up", TX_LOOKUP, &[&id.as_bytes(), &network]).await?;
    Ok(rows
        .iter()
        .map(|row| TxFound {
            network: NetworkId(row.get(0)),
            height: Height::from_i64(row.get(1)),
            index: index_of(row.get(2)),
            time: row.get(3),
        })
        .collect())
}

/// Where a block is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockFound {
    /// The network.
    pub network: NetworkId,
    /// Its height.
    pub height: Height,
    /// Its time.
    pub time: OffsetDateTime,
}

const BLOCK_LOOKUP: &str = "
    select network_id, height, block_time from raw.block_lookup
     where id = $1 and ($2::int is null or network_id = $2) order by network_id, height limit 16";

/// Finds a block by its hash, on one network or on all.
pub async fn block_lookup(
    conn: &Conn,
    network: Option<NetworkId>,
    hash: &BlockHash,
) -> Result<Vec<BlockFound>, StoreError> {
    let network = network.map(|network| network.0);
    let rows = conn.query("look a block up", BLOCK_LOOKUP, &[&hash.0.as_slice(), &network]).await?;
    Ok(rows
        .iter()
        .map(|row| BlockFound {
            network: NetworkId(row.get(0)),
            height: Height::from_i64(row.get(1)),
            time: row.get(2),
        })
        .collect())
}

const SHARDS: &str = "select count(*) from system.sync_cursors where network_id = $1";
const EVIDENCE_ABOVE: &str = "
    select shard, from_height, to_height from raw.range_evidence
     where network_id = $1 and to_height > $2::bigint + 1
     order by from_height, shard limit $3";
/// Evidence rows looked at in one go: the next look goes on from there.
const EVIDENCE_ROWS_MAX: i64 = 20_000;

/// The last height (inclusive) up to which accepted ranges of every shard follow `after` without a hole;
/// `after` itself when the next height is not there yet.
pub async fn covered_through(conn: &Conn, network: NetworkId, after: i64) -> Result<i64, StoreError> {
    let shards: i64 = conn.query_one("count shards", SHARDS, &[&network.0]).await?.get(0);
    let rows = conn
        .query("read evidence above a height", EVIDENCE_ABOVE, &[&network.0, &after, &EVIDENCE_ROWS_MAX])
        .await?;
    let mut ends = std::collections::BTreeMap::<i32, i64>::new();
    for row in &rows {
        let (shard, from, to): (i32, i64, i64) = (row.get(0), row.get(1), row.get(2));
        let end = ends.entry(shard).or_insert(after + 1);
        if from <= *end {
            *end = (*end).max(to);
        }
    }
    let all = i64::try_from(ends.len()).expect("few shards") >= shards.max(1);
    Ok(if all { ends.values().min().map_or(after, |end| end - 1) } else { after })
}

const NEWEST_BLOCK: &str = "
    select height, block_time from raw.blocks where network_id = $1 order by height desc limit 1";

/// Height and time of the newest stored block.
pub async fn newest_block(
    conn: &Conn,
    network: NetworkId,
) -> Result<Option<(i64, OffsetDateTime)>, StoreError> {
    let row = conn.query_opt("read the newest block", NEWEST_BLOCK, &[&network.0]).await?;
    Ok(row.map(|row| (row.get(0), row.get(1))))
}
