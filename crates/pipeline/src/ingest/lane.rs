//! Shards (ADDR_SHARDS): a network's contracts in parts, each read with a filter of its own. In history every
//! shard has its own cursor, leases and evidence, and adds its events to blocks that another may have stored.
//! At the tip all shards' shares of a block are fetched and put together first, so that one transaction stores
//! whole blocks, moves all cursors and tells of it once. Cursors that differ are therefore always in history.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use futures_util::future::try_join_all;
use tidemark_model::chain::{ChainAdapter, ChainError, FetchMode, RawBatch};
use tidemark_model::ids::{BlockHash, Height, HeightRange};
use tidemark_store::cursor::{self, Cursor, Shard};
use tidemark_store::lease::Leases;
use tidemark_store::raw::{self, Prepared, Share};
use tidemark_store::{Conn, Tx};

use super::{Core, IngestError, IngestOptions, WORKER};

/// One shard of the network.
pub(super) struct Lane {
    pub(super) shard: Shard,
    pub(super) adapter: Arc<dyn ChainAdapter>,
    pub(super) leases: Leases,
    pub(super) cursor_id: String,
    /// Heights that fit into one question, as the last range learned; 0 while none has.
    pub(super) ask_blocks: AtomicU64,
}

impl Lane {
    pub(super) fn new(shard: Shard, adapter: Arc<dyn ChainAdapter>, options: &IngestOptions) -> Self {
        let network = adapter.network();
        Self {
            shard,
            leases: Leases {
                worker_type: format!("{WORKER}:{shard}"),
                network: network.id,
                holder: options.instance.clone(),
                ttl: options.lease_ttl,
                range_size: options.lease_range.max(1),
            },
            cursor_id: cursor::cursor_id(network, shard),
            ask_blocks: AtomicU64::new(0),
            adapter,
        }
    }
}

/// Whole blocks, and what each shard gave of them; without shares where there is one shard.
pub(super) struct Whole {
    pub(super) batch: RawBatch,
    pub(super) shares: Vec<Share>,
}

/// The same, with large bodies uploaded.
pub(super) struct WholePrepared {
    pub(super) prepared: Prepared,
    pub(super) shares: Vec<Share>,
}

impl Core {
    pub(super) fn is_sharded(&self) -> bool {
        self.lanes.len() > 1
    }

    /// Makes sure that every shard has its cursor, and that the network was never divided otherwise: a cursor
    /// of another division says nothing about ours.
    pub(super) async fn ensure_cursors(&self, conn: &Conn) -> Result<(), IngestError> {
        let there = cursor::of_network(conn, self.network()).await?;
        let ours = |cursor: &Cursor| self.lanes.iter().any(|lane| lane.cursor_id == cursor.id);
        let is_begun = there.iter().any(|cursor| cursor.next > cursor.start);
        let is_missing = there.len() < self.lanes.len();
        if !there.iter().all(ours) || (is_begun && is_missing) {
            let before: Vec<&str> = there.iter().map(|cursor| cursor.id.as_str()).collect();
            let now: Vec<&str> = self.lanes.iter().map(|lane| lane.cursor_id.as_str()).collect();
            return Err(IngestError::Divided { before: before.join(", "), now: now.join(", ") });
        }
        for lane in &self.lanes {
            cursor::ensure(conn, self.adapter.network(), lane.shard).await?;
        }
        Ok(())
    }

    /// The cursors in the order of the lanes.
    async fn cursors(&self) -> Result<Vec<Cursor>, IngestError> {
        let conn = self.db.conn().await?;
        let mut cursors = Vec::with_capacity(self.lanes.len());
        for lane in &self.lanes {
            cursors.push(cursor::read(&conn, &lane.cursor_id).await?);
        }
        Ok(cursors)
    }

    /// Where the slowest shard stands, and whether all stand there.
    pub(super) async fn position(&self) -> Result<(Cursor, bool), IngestError> {
        let cursors = self.cursors().await?;
        let first = cursors.first().expect("a network has a shard").clone();
        let same = |cursor: &Cursor| (cursor.next, cursor.last_hash) == (first.next, first.last_hash);
        let is_aligned = cursors.iter().all(same);
        Ok((cursors.into_iter().min_by_key(|cursor| cursor.next).unwrap_or(first), is_aligned))
    }

    /// Moves the cursors of all shards, which stand at the same block.
    pub(super) async fn advance_all(
        &self,
        tx: &Tx<'_>,
        from: &Cursor,
        to: Height,
        hash: Option<BlockHash>,
    ) -> Result<Cursor, IngestError> {
        for lane in &self.lanes {
            let of_lane = Cursor { id: lane.cursor_id.clone(), ..from.clone() };
            cursor::advance(tx, &of_lane, to, hash).await?;
        }
        Ok(Cursor { next: to, last_hash: hash, ..from.clone() })
    }

    /// Brings the shards that are behind to where the first one is. What one has read as history is final.
    pub(super) async fn align(&self) -> Result<(), IngestError> {
        let cursors = self.cursors().await?;
        let target = cursors.iter().map(|cursor| cursor.next).max().expect("a network has a shard");
        for (lane, cursor) in self.lanes.iter().zip(cursors) {
            self.read_in_order(lane, cursor, target).await?;
        }
        let cursors = self.cursors().await?;
        let hashes: HashSet<BlockHash> = cursors.iter().filter_map(|cursor| cursor.last_hash).collect();
        if hashes.len() > 1 {
            return Err(self.inconsistent(HeightRange::one(target.minus(1)), "two shards stored two blocks"));
        }
        let mut conn = self.db.conn().await?;
        let tx = conn.tx().await?;
        for cursor in &cursors {
            cursor::advance(&tx, cursor, cursor.next, hashes.iter().next().copied()).await?;
        }
        tx.commit().await?;
        tracing::info!(network = %self.network(), next = target.0, shards = self.lanes.len(), action = "align_shards", "All shards are at one height.");
        Ok(())
    }

    /// Whole blocks at the tip: one fetch per shard, put together.
    pub(super) async fn fetch_whole(
        &self,
        range: HeightRange,
        parent: Option<BlockHash>,
    ) -> Result<Whole, ChainError> {
        let fetches = self.lanes.iter().map(|lane| self.fetch(lane, range, FetchMode::Tip, parent));
        let mut parts = try_join_all(fetches).await?;
        if !self.is_sharded() {
            let batch = parts.pop().expect("a network has a shard");
            return Ok(Whole { batch, shares: Vec::new() });
        }
        let shards = self.lanes.iter().map(|lane| lane.shard.number);
        join(shards.zip(parts).collect()).map_err(|reason| ChainError::Inconsistent {
            network: self.slug().to_owned(),
            what: format!("blocks {range}"),
            reason,
        })
    }

    pub(super) async fn prepare_whole(&self, whole: Whole) -> Result<WholePrepared, IngestError> {
        Ok(WholePrepared { prepared: self.prepare(whole.batch).await?, shares: whole.shares })
    }

    /// Writes whole blocks behind cursors that were moved in this transaction.
    pub(super) async fn copy_whole(&self, tx: &Tx<'_>, whole: &WholePrepared) -> Result<u64, IngestError> {
        let network = self.network();
        Ok(match whole.shares.as_slice() {
            [] => self.writer.copy(tx, network, self.lanes[0].shard.number, &whole.prepared).await?,
            shares => self.writer.copy_shares(tx, network, &whole.prepared, shares).await?,
        })
    }
}

/// Puts the shares of the same blocks together. What does not fit together was read at two moments.
fn join(mut parts: Vec<(i32, RawBatch)>) -> Result<Whole, String> {
    let end = parts.iter().map(|(_, part)| part.covered.to()).min().ok_or("no shard answered")?;
    let from = parts[0].1.covered.from();
    let covered = HeightRange::new(from, end).ok_or("a shard covered nothing")?;
    let mut shares = Vec::with_capacity(parts.len());
    for (shard, part) in &mut parts {
        part.blocks.retain(|block| block.height < end);
        part.covered = covered;
        let counts = raw::counts(&part.blocks);
        part.evidence.records = counts.iter().map(|(_, count)| u64::from(*count)).sum();
        shares.push(Share { shard: *shard, evidence: part.evidence.clone(), counts });
    }
    let mut parts = parts.into_iter().map(|(_, part)| part);
    let mut whole = parts.next().ok_or("no shard answered")?;
    for part in parts {
        if part.blocks.len() != whole.blocks.len() {
            return Err("two shards got different blocks".to_owned());
        }
        for (block, share) in whole.blocks.iter_mut().zip(part.blocks) {
            if (block.height, block.hash, block.parent) != (share.height, share.hash, share.parent) {
                return Err(format!("{} and {} came for one block", block.block_ref(), share.block_ref()));
            }
            block.records.extend(share.records);
            block.payload = block.payload.take().or(share.payload);
            let known: HashSet<_> = block.transactions.iter().map(|transaction| transaction.id).collect();
            let new = share.transactions.into_iter().filter(|transaction| !known.contains(&transaction.id));
            block.transactions.extend(new);
        }
        whole.evidence.records += part.evidence.records;
        whole.evidence.foreign += part.evidence.foreign;
        whole.evidence.requests += part.evidence.requests;
    }
    for block in &mut whole.blocks {
        block.records.sort_by_key(|record| record.index);
        block.transactions.sort_by_key(|transaction| transaction.index);
        if let Some(pair) = block.records.windows(2).find(|pair| pair[0].index == pair[1].index) {
            return Err(format!("two shards have record {} of block {}", pair[0].index, block.block_ref()));
        }
    }
    Ok(Whole { batch: whole, shares })
}
