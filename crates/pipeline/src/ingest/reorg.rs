//! A reorg: find the common ancestor, fetch and check the whole new branch, then swap in one transaction.
//! Nothing is taken out before its replacement is in hand. By hash, never by number; a chain that is merely
//! shorter than ours for a moment is not a reorg.

use std::collections::HashMap;
use std::sync::Arc;

use tidemark_model::chain::{BlockRef, ChainError};
use tidemark_model::ids::{BlockHash, Height, HeightRange};
use tidemark_store::cursor::{self, Cursor, NetworkHead, Shard};
use tidemark_store::raw::{self, orphans};

use super::events::{self, Around};
use super::lane::WholePrepared;
use super::{Core, IngestError, crash_point};

/// Times a branch may change while it is being fetched before we come back later.
const BRANCH_TRIES: u32 = 5;

/// The chain around a search: what we hold, by height.
struct Stored {
    hashes: HashMap<Height, BlockHash>,
    /// The lowest height that may be the ancestor.
    lowest: Height,
    /// Is it the lowest because it is final (or the first)? Else because of the depth limit.
    is_bedrock: bool,
}

impl Core {
    /// Brings our chain onto the one the nodes agree on. Gives `cursor` back unchanged when there is nothing
    /// to repair, or nothing to repair with yet.
    pub(super) async fn reorg(self: &Arc<Self>, cursor: &Cursor) -> Result<Cursor, IngestError> {
        let Some(last) = cursor.last_block() else { return Ok(cursor.clone()) };
        let conn = self.db.conn().await?;
        let head = cursor::head(&conn, self.network()).await?;
        let stored = self.stored_chain(&conn, cursor, last, head.as_ref()).await?;
        drop(conn);
        for _ in 0..BRANCH_TRIES {
            let Some(ancestor) = self.common_ancestor(&stored, last).await? else {
                return Ok(cursor.clone());
            };
            match self.branch(ancestor, last.height, &stored).await? {
                Some(branch) => return self.swap(cursor, ancestor, branch, head.as_ref()).await,
                None => tracing::info!(
                    network = %self.network(), ancestor = %ancestor, action = "fetch_branch",
                    "The branch changed while it was fetched; starting over."
                ),
            }
        }
        Err(IngestError::Chain(ChainError::Inconsistent {
            network: self.slug().to_owned(),
            what: format!("the branch at {}", last.height),
            reason: "it keeps changing while it is fetched".to_owned(),
        }))
    }

    async fn stored_chain(
        &self,
        conn: &tidemark_store::Conn,
        cursor: &Cursor,
        last: BlockRef,
        head: Option<&NetworkHead>,
    ) -> Result<Stored, IngestError> {
        let finalized = head.and_then(|head| head.finalized).filter(|block| block.height <= last.height);
        let bedrock = finalized.map_or(cursor.start, |block| block.height.max(cursor.start));
        let limit = last.height.minus(self.adapter.network().reorg_depth_max);
        let lowest = bedrock.max(limit);
        let range = HeightRange::inclusive(lowest, last.height).expect("lowest is at most last");
        let links = raw::blocks_between(conn, self.network(), range).await?;
        let mut hashes: HashMap<Height, BlockHash> =
            links.iter().map(|link| (link.block.height, link.block.hash)).collect();
        hashes.extend(finalized.map(|block| (block.height, block.hash)));
        hashes.insert(last.height, last.hash);
        Ok(Stored { hashes, lowest, is_bedrock: bedrock >= limit })
    }

    /// The newest stored block that is on the chain: by doubling steps back, then by halving, so the deepest
    /// reorg we repair costs some twenty questions. `None`: our newest block is on the chain, or the chain
    /// does not reach it at the moment.
    async fn common_ancestor(
        &self,
        stored: &Stored,
        last: BlockRef,
    ) -> Result<Option<BlockRef>, IngestError> {
        match self.adapter.link_at(last.height).await? {
            None => return Ok(None),
            Some(link) if link.block.hash == last.hash => return Ok(None),
            Some(_) => {}
        }
        let mut gone = last.height;
        let mut step = 1;
        let mut kept = loop {
            if gone == stored.lowest {
                return Err(self.too_deep(stored, last));
            }
            let candidate = gone.minus(step).max(stored.lowest);
            if self.is_on_chain(stored, candidate).await? {
                break candidate;
            }
            gone = candidate;
            step *= 2;
        };
        while kept.next() < gone {
            let middle = Height(kept.0 + (gone.0 - kept.0) / 2);
            if self.is_on_chain(stored, middle).await? {
                kept = middle;
            } else {
                gone = middle;
            }
        }
        Ok(stored.hashes.get(&kept).map(|hash| BlockRef { height: kept, hash: *hash }))
    }

    async fn is_on_chain(&self, stored: &Stored, height: Height) -> Result<bool, IngestError> {
        let Some(ours) = stored.hashes.get(&height) else { return Ok(false) };
        match self.adapter.link_at(height).await? {
            Some(link) => Ok(link.block.hash == *ours),
            None => Err(IngestError::Chain(ChainError::Unavailable {
                network: self.slug().to_owned(),
                what: format!("block {height}"),
                reason: "a node that has newer blocks does not have it".to_owned(),
            })),
        }
    }

    fn too_deep(&self, stored: &Stored, last: BlockRef) -> IngestError {
        let max = self.adapter.network().reorg_depth_max;
        let reason = match stored.is_bedrock {
            true => format!(
                "no common ancestor with {last} down to {}, which is final or our first block: the chain or its nodes are broken; check \
                 the nodes, then rewind or remove the halt",
                stored.lowest
            ),
            false => format!(
                "the chain left ours more than {max} blocks below {last} (MAX_REORG_DEPTH): check the nodes, then raise \
                 the limit or rewind"
            ),
        };
        IngestError::Halt { reason }
    }

    /// The new branch above `ancestor` through `last`, fetched and checked as a whole, large bodies uploaded.
    /// `None` when it changed meanwhile.
    async fn branch(
        &self,
        ancestor: BlockRef,
        last: Height,
        stored: &Stored,
    ) -> Result<Option<Vec<WholePrepared>>, IngestError> {
        let mut branch = Vec::new();
        let mut tip = ancestor;
        while let Some(range) = HeightRange::inclusive(tip.height.next(), last) {
            let (ask, _) = range.split_first(self.options.tip_blocks_max);
            let whole = match self.fetch_whole(ask, Some(tip.hash)).await {
                Ok(whole) => whole,
                Err(ChainError::Inconsistent { .. } | ChainError::Gone { .. }) => return Ok(None),
                Err(error) => return Err(error.into()),
            };
            let batch = &whole.batch;
            let Some(block) = batch.blocks.last().filter(|block| block.height == batch.covered.last()) else {
                return Ok(None);
            };
            let first = batch.blocks.first().map(|block| block.block_ref());
            if first.is_some_and(|first| stored.hashes.get(&first.height) == Some(&first.hash)) {
                return Ok(None); // That block is ours: the chain swung back.
            }
            tip = block.block_ref();
            branch.push(self.prepare_whole(whole).await?);
        }
        crash_point!(self, "reorg.fetched");
        let still = self.adapter.link_at(last).await?;
        Ok(still.is_some_and(|link| link.block.hash == tip.hash).then_some(branch))
    }

    /// Old branch out, new branch in, one transaction.
    async fn swap(
        &self,
        cursor: &Cursor,
        ancestor: BlockRef,
        branch: Vec<WholePrepared>,
        head: Option<&NetworkHead>,
    ) -> Result<Cursor, IngestError> {
        let network = self.network();
        let blocks: Vec<_> =
            branch.iter().flat_map(|part| part.prepared.batch().blocks.iter().cloned()).collect();
        let Some(tip) = blocks.last().map(|block| block.block_ref()) else { return Ok(cursor.clone()) };
        let around = Around {
            head: head.and_then(|head| head.latest).unwrap_or(tip.height).max(tip.height),
            finalized: head.and_then(|head| head.finalized).map(|block| block.height),
        };
        let replaced = HeightRange::new(ancestor.height.next(), cursor.next)
            .expect("the ancestor lies below the newest stored block");
        let mut conn = self.db.conn().await?;
        let tx = conn.tx().await?;
        let moved = self.advance_all(&tx, cursor, tip.height.next(), Some(tip.hash)).await?;
        let shards: Vec<Shard> = self.lanes.iter().map(|lane| lane.shard).collect();
        let orphaned = orphans::take_out(&tx, network, &shards, replaced).await?;
        for part in &branch {
            self.copy_whole(&tx, part).await?;
        }
        let hashes: Vec<BlockHash> = blocks.iter().map(|block| block.hash).collect();
        orphans::came_back(&tx, network, &hashes).await?;
        let number = orphans::reorgs_so_far(&tx, network).await?;
        let reorg = events::reorg_detected(network, number, ancestor, &orphaned, &blocks);
        let reorg_id = reorg.event_id.to_string();
        let canonical: Vec<BlockRef> = blocks.iter().map(|block| block.block_ref()).collect();
        orphans::note_reorg(&tx, network, &reorg_id, &orphaned, &canonical).await?;
        let mut drafts = vec![reorg];
        drafts.extend(
            blocks.iter().map(|block| events::block_ingested(network, block, around, Some(&reorg_id))),
        );
        self.emit.append(&tx, &drafts).await?;
        crash_point!(self, "reorg.before_commit");
        tx.commit().await?;
        self.emit.committed();
        crash_point!(self, "reorg.after_commit");
        self.metrics.reorg();
        self.note_position(moved.next, None);
        tracing::warn!(
            network = %network, ancestor = %ancestor, orphaned = orphaned.len(), canonical = canonical.len(),
            reorg_id, action = "reorg", "Replaced a branch."
        );
        Ok(moved)
    }
}
