//! raw.orphaned_blocks: what a reorg took out, kept aside until finality passes its height (pitfall F72), so
//! that a reader that comes late still finds the block its event named.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;
use tidemark_model::chain::{BlockRef, RawBlock, RawRecord};
use tidemark_model::ids::{BlockHash, Height, HeightRange, NetworkId, TxId};

use super::RawError;
use super::read::record_body;
use super::write::{cut_evidence, drop_lookups};
use crate::blob::{BlobRef, BlobStore};
use crate::cursor::Shard;
use crate::db::{Conn, StoreError, Tx};

const KEEP: &str = "
    insert into raw.orphaned_blocks (network_id, height, hash, parent_hash, block_time, events)
    select b.network_id, b.height, b.hash, b.parent_hash, b.block_time,
           coalesce((select jsonb_agg(jsonb_build_object(
                                'tx', encode(e.tx_id, 'hex'), 'tx_index', e.tx_index, 'index', e.event_index,
                                'emitter', encode(e.emitter, 'hex'), 'topics', encode(e.topics, 'hex'),
                                'data', encode(e.data, 'hex'), 'payload', e.payload, 'ref', e.payload_ref)
                            order by e.event_index)
                       from raw.events e where e.network_id = $1 and e.block_height = b.height),
                    '[]'::jsonb)
      from raw.blocks b
     where b.network_id = $1 and b.height >= $2 and b.height < $3
     order by b.height
    on conflict (network_id, hash) do update set orphaned_at = now()
    returning height, hash";
const DROP_EVENTS: &str =
    "delete from raw.events where network_id = $1 and block_height >= $2 and block_height < $3";
const DROP_TRANSACTIONS: &str =
    "delete from raw.transactions where network_id = $1 and block_height >= $2 and block_height < $3";
const DROP_BLOCKS: &str = "delete from raw.blocks where network_id = $1 and height >= $2 and height < $3";

/// Takes every block of `range` out of raw.* with its lookups and the evidence of all `shards`, keeps it
/// aside, and names it in order of height.
pub async fn take_out(
    tx: &Tx<'_>,
    network: NetworkId,
    shards: &[Shard],
    range: HeightRange,
) -> Result<Vec<BlockRef>, StoreError> {
    let (from, to) = (range.from().as_i64(), range.to().as_i64());
    let rows = tx.query("keep orphans aside", KEEP, &[&network.0, &from, &to]).await?;
    drop_lookups(tx, network, range, &[]).await?;
    tx.execute("take events out", DROP_EVENTS, &[&network.0, &from, &to]).await?;
    tx.execute("take transactions out", DROP_TRANSACTIONS, &[&network.0, &from, &to]).await?;
    tx.execute("take blocks out", DROP_BLOCKS, &[&network.0, &from, &to]).await?;
    for shard in shards {
        cut_evidence(tx, network, *shard, range).await?;
    }
    let mut orphans: Vec<BlockRef> = rows
        .iter()
        .filter_map(|row| {
            Some(BlockRef {
                height: Height::from_i64(row.get(0)),
                hash: BlockHash::from_slice(row.get::<_, &[u8]>(1))?,
            })
        })
        .collect();
    orphans.sort_by_key(|block| block.height);
    Ok(orphans)
}

const FORGET: &str = "delete from raw.orphaned_blocks where network_id = $1 and hash = any($2)";

/// Blocks that came back are orphans no more.
pub async fn came_back(tx: &Tx<'_>, network: NetworkId, hashes: &[BlockHash]) -> Result<u64, StoreError> {
    let hashes: Vec<&[u8]> = hashes.iter().map(|hash| hash.0.as_slice()).collect();
    tx.execute("forget orphans that came back", FORGET, &[&network.0, &hashes]).await
}

const REORGS: &str = "select count(distinct reorg_id) from system.reorg_checkpoints where network_id = $1";

/// How many reorgs this network has seen: makes the id of the next one unlike all before.
pub async fn reorgs_so_far(tx: &Tx<'_>, network: NetworkId) -> Result<i64, StoreError> {
    Ok(tx.query_one("count reorgs", REORGS, &[&network.0]).await?.get(0))
}

const NOTE: &str = "
    insert into system.reorg_checkpoints (network_id, block_number, block_hash, is_canonical, reorg_id)
    select $1, b.height, b.hash, $4, $5 from unnest($2::bigint[], $3::bytea[]) as b (height, hash)
     order by b.height";

/// Writes down which blocks left the chain and which came in their place.
pub async fn note_reorg(
    tx: &Tx<'_>,
    network: NetworkId,
    reorg_id: &str,
    orphaned: &[BlockRef],
    canonical: &[BlockRef],
) -> Result<(), StoreError> {
    for (blocks, is_canonical) in [(orphaned, false), (canonical, true)] {
        let heights: Vec<i64> = blocks.iter().map(|block| block.height.as_i64()).collect();
        let hashes: Vec<&[u8]> = blocks.iter().map(|block| block.hash.0.as_slice()).collect();
        tx.execute("note a reorg", NOTE, &[&network.0, &heights, &hashes, &is_canonical, &reorg_id]).await?;
    }
    Ok(())
}

const DROP_FINAL: &str = "delete from raw.orphaned_blocks where network_id = $1 and height <= $2";

/// Finality has passed these heights: nothing of them can come back.
pub async fn drop_final(tx: &Tx<'_>, network: NetworkId, finalized: Height) -> Result<u64, StoreError> {
    tx.execute("drop orphans below finality", DROP_FINAL, &[&network.0, &finalized.as_i64()]).await
}

const READ: &str = "
    select height, hash, parent_hash, block_time, events from raw.orphaned_blocks
     where network_id = $1 and hash = $2";

/// An orphaned block with its records, for a reader that comes late.
pub async fn read(
    conn: &Conn,
    blobs: &Arc<dyn BlobStore>,
    network: NetworkId,
    hash: &BlockHash,
) -> Result<Option<RawBlock>, RawError> {
    let Some(row) = conn.query_opt("read an orphan", READ, &[&network.0, &hash.0.as_slice()]).await? else {
        return Ok(None);
    };
    let bad = || StoreError::Corrupt {
        what: format!("raw.orphaned_blocks {hash}"),
        found: "rows that cannot be read".to_owned(),
        hint: "a foreign hand wrote it: remove the row",
    };
    let mut block = RawBlock {
        height: Height::from_i64(row.get(0)),
        hash: BlockHash::from_slice(row.get(1)).ok_or_else(bad)?,
        parent: BlockHash::from_slice(row.get(2)).ok_or_else(bad)?,
        time: row.get(3),
        tx_count: None,
        transactions: Vec::new(),
        records: Vec::new(),
        payload: None,
    };
    let Value::Array(events) = row.get::<_, Value>(4) else { return Err(bad().into()) };
    for event in &events {
        let (mut record, blob) = record_of(event).ok_or_else(bad)?;
        if let Some(blob) = blob {
            (record.data, record.payload) = record_body(&blobs.get(&blob).await?).ok_or_else(bad)?;
        }
        block.records.push(record);
    }
    Ok(Some(block))
}

fn record_of(event: &Value) -> Option<(RawRecord, Option<BlobRef>)> {
    let bytes = |name: &str| hex::decode(event.get(name)?.as_str()?).ok();
    let number = |name: &str| u32::try_from(event.get(name)?.as_u64()?).ok();
    let payload = event.get("payload").filter(|payload| !payload.is_null()).cloned();
    let record = RawRecord {
        tx: TxId::from_slice(&bytes("tx")?)?,
        tx_index: number("tx_index")?,
        index: number("index")?,
        emitter: Bytes::from(bytes("emitter")?),
        topics: Bytes::from(bytes("topics")?),
        data: Bytes::from(bytes("data").unwrap_or_default()),
        payload,
    };
    let blob = match event.get("ref").and_then(Value::as_str) {
        Some(text) => Some(BlobRef::parse(text)?),
        None => None,
    };
    Some((record, blob))
}
