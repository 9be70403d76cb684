//! The tip: one loop, block after block. Each transaction holds the rows, the cursor and the events of its
//! blocks. Finality is recorded only after our own chain was confirmed against it.

use std::sync::Arc;
use std::time::Duration;

use tidemark_model::chain::{BlockRef, ChainError, Head};
use tidemark_model::ids::{Height, HeightRange};
use tidemark_store::cursor::{self, Cursor};
use tidemark_store::lease;
use tidemark_store::partitions::RAW_TABLES;
use tidemark_store::raw::{self, orphans};

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::events::{self, Around};
use super::history::stay_out_of_leases;
use super::lane::Whole;
use super::step::{self, Phase, Step};
use super::{Core, IngestError, WORKER, crash_point};

/// Even when nothing moves, the database is asked this often where things stand.
const QUIET_LOOK: Duration = Duration::from_secs(60);

impl Core {
    /// Follows the tip until a wide gap below finality opens (an outage), or an error.
    pub(super) async fn tip(
        self: &Arc<Self>,
        head: Head,
        indexing: &mut JoinSet<()>,
    ) -> Result<(), IngestError> {
        self.set_state("tip");
        let mut looked_at: Option<Instant> = None;
        let mut known = head;
        let mut is_fresh = true;
        let mut changed_at = Instant::now();
        loop {
            let head = if std::mem::take(&mut is_fresh) {
                known.clone()
            } else {
                let wait = step::patience(self.poll_interval(), changed_at.elapsed());
                let head = self.adapter.next_head(&known, wait).await?;
                // A thousand quiet networks must cost next to nothing.
                if head == known && looked_at.is_some_and(|at| at.elapsed() < QUIET_LOOK) {
                    continue;
                }
                head
            };
            if head != known {
                changed_at = Instant::now();
            }
            let (mut cursor, finalized) = self.settle(&head).await?;
            if step::phase(cursor.next, finalized, self.options.history_gap_min) == Phase::History {
                return Ok(());
            }
            if self.is_sharded() && !self.position().await?.1 {
                return Ok(()); // Another process reads history.
            }
            while cursor.next <= head.latest.height {
                let last = head.latest.height.min(cursor.next.plus(self.options.tip_blocks_max.max(1) - 1));
                let range = HeightRange::inclusive(cursor.next, last).expect("next is not above the head");
                // The parent is judged by `next_step`, not refused as a fault of the node.
                let whole = self.fetch_whole(range, None).await?;
                cursor = self.take(cursor, &head, finalized, whole).await?;
            }
            self.settle(&head).await?;
            if looked_at.is_none_or(|at| at.elapsed() >= self.options.head_refresh) {
                // Partitions that history filled and the tip has left behind.
                self.index_done(indexing, cursor.next).await?;
                looked_at = Some(Instant::now());
            }
            known = head;
        }
    }

    /// Takes the next blocks as what they are: an extension, a reorg, or the end of our trust.
    async fn take(
        self: &Arc<Self>,
        cursor: Cursor,
        head: &Head,
        finalized: Option<Height>,
        whole: Whole,
    ) -> Result<Cursor, IngestError> {
        let batch = &whole.batch;
        let first = batch.blocks.first().filter(|block| block.height == batch.covered.from());
        let Some(first) = first else {
            // Above finality every block must be there, else the next one cannot be judged.
            return Err(self.inconsistent(batch.covered, "the tip came without its first block"));
        };
        let stored = self.newest_stored(&cursor).await?;
        match step::next_step(stored, finalized, first) {
            Step::Extend => self.extend(cursor, head, finalized, whole).await,
            Step::FindAncestorBelow(_) => {
                let found = self.reorg(&cursor).await?;
                match found == cursor {
                    // The stored chain stands after all: two nodes of one balancer, or a reorg and back.
                    true => Err(self.inconsistent(batch.covered, "its parent is not on the chain")),
                    false => Ok(found),
                }
            }
            Step::Halt => self.judge_final(&cursor, first.parent).await,
        }
    }

    /// A block says that our final block is not its parent. One node may err: the network halts only if the
    /// chain itself names another block at that height.
    async fn judge_final(
        &self,
        cursor: &Cursor,
        parent: tidemark_model::ids::BlockHash,
    ) -> Result<Cursor, IngestError> {
        let stored = cursor.last_block();
        let chain = match stored {
            Some(block) => self.adapter.link_at(block.height).await?,
            None => None,
        };
        match (stored, chain) {
            (Some(stored), Some(chain)) if chain.block.hash != stored.hash => Err(IngestError::Halt {
                reason: format!(
                    "final block {stored} was replaced by {}: the chain or its nodes are broken; check the nodes, \
                     then rewind or remove the halt",
                    chain.block
                ),
            }),
            _ => Err(self.inconsistent(
                HeightRange::one(cursor.next),
                &format!("its parent {parent} is not our final block"),
            )),
        }
    }

    pub(super) fn inconsistent(&self, range: HeightRange, reason: &str) -> IngestError {
        IngestError::Chain(ChainError::Inconsistent {
            network: self.slug().to_owned(),
            what: format!("blocks {range}"),
            reason: reason.to_owned(),
        })
    }

    /// The newest stored block. Where history stored no header, the chain is asked: that height is final.
    async fn newest_stored(&self, cursor: &Cursor) -> Result<Option<BlockRef>, IngestError> {
        let Some(last) = cursor.last() else { return Ok(None) };
        if let Some(block) = cursor.last_block() {
            return Ok(Some(block));
        }
        let conn = self.db.conn().await?;
        if let Some(link) = raw::block_at(&conn, self.network(), last).await? {
            return Ok(Some(link.block));
        }
        drop(conn);
        match self.adapter.link_at(last).await? {
            Some(link) => Ok(Some(link.block)),
            None => {
                Err(self.inconsistent(HeightRange::one(last), "the chain is shorter than our final height"))
            }
        }
    }

    async fn extend(
        &self,
        cursor: Cursor,
        head: &Head,
        finalized: Option<Height>,
        whole: Whole,
    ) -> Result<Cursor, IngestError> {
        let covered = whole.batch.covered;
        let Some(last) = whole.batch.blocks.last().filter(|block| block.height == covered.last()).cloned()
        else {
            return Err(self.inconsistent(covered, "the tip came without its last block"));
        };
        let whole = self.prepare_whole(whole).await?;
        let mut conn = self.db.conn().await?;
        self.partitions.ensure_indexed(&mut conn, &RAW_TABLES, self.network(), covered.last()).await?;
        let around = Around { head: head.latest.height, finalized };
        let tx = conn.tx().await?;
        let cursor = self.advance_all(&tx, &cursor, covered.to(), Some(last.hash)).await?;
        for lane in &self.lanes {
            stay_out_of_leases(lane, &tx, covered).await?;
        }
        let stored = self.copy_whole(&tx, &whole).await?;
        lease::set_checkpoint(&tx, WORKER, self.network(), covered.to()).await?;
        // The head without its finality: that waits until our chain was confirmed against it.
        let reported = Head { finalized: None, ..head.clone() };
        cursor::report_head(&tx, self.network(), &reported).await?;
        let drafts: Vec<_> = whole
            .prepared
            .batch()
            .blocks
            .iter()
            .map(|block| events::block_ingested(self.network(), block, around, None))
            .collect();
        self.emit.append(&tx, &drafts).await?;
        crash_point!(self, "tip.before_commit");
        tx.commit().await?;
        self.emit.committed();
        crash_point!(self, "tip.after_commit");
        self.metrics.stored(stored);
        self.metrics.lag((self.options.clock.now() - last.time).as_seconds_f64());
        self.note_position(cursor.next, Some(head));
        tracing::debug!(
            network = %self.network(), from = covered.from().0, to = covered.to().0, events = stored,
            action = "store_tip", "Stored new blocks."
        );
        Ok(cursor)
    }

    /// Brings us in line with a reported head: repairs a reorg that finality or the head reveals, then records
    /// the head, and its finality once our own chain is known to be part of it. Gives the cursor and the
    /// newest height we hold for final.
    pub(super) async fn settle(
        self: &Arc<Self>,
        head: &Head,
    ) -> Result<(Cursor, Option<Height>), IngestError> {
        let conn = self.db.conn().await?;
        let stored = cursor::head(&conn, self.network()).await?;
        drop(conn);
        let (mut cursor, is_aligned) = self.position().await?;
        let recorded = stored.as_ref().and_then(|stored| stored.finalized).map(|block| block.height);
        let advanced = head.finalized.filter(|block| recorded.is_none_or(|line| line < block.height));
        if let Some(last) = cursor.last_block() {
            // The head at our own height has another name: no need to wait for its child.
            let replaced = head.latest.height == last.height && head.latest.hash != last.hash;
            let contradicted = match advanced {
                Some(finalized) => !self.agrees_with(&cursor, finalized).await?,
                None => false,
            };
            if contradicted && !is_aligned {
                // Shards that differ are in history, where nothing can be repaired.
                return Err(self.inconsistent(
                    HeightRange::one(last.height),
                    "finality contradicts what was read as final",
                ));
            }
            if (replaced || contradicted) && is_aligned {
                let repaired = self.reorg(&cursor).await?;
                if contradicted && repaired == cursor {
                    return Err(self.inconsistent(
                        HeightRange::one(last.height),
                        "finality contradicts the chain the nodes report",
                    ));
                }
                cursor = repaired;
            }
        }
        // At the tip, blocks come before the word that they are final.
        let far =
            step::phase(cursor.next, head.finalized.map(|block| block.height), self.options.history_gap_min);
        // Blocks that are about to be written report the head themselves, and owners wait for them: what
        // their head says about finality has its turn after them.
        let is_told_later = far == Phase::Tip && cursor.next <= head.latest.height;
        let due = advanced
            .filter(|block| block.height < cursor.next || far == Phase::History)
            .filter(|_| !is_told_later);
        let is_new = stored.is_none_or(|stored| stored.latest != Some(head.latest.height));
        if due.is_some() || (is_new && !is_told_later) {
            self.record_head(head, due).await?;
        }
        let finalized = due.map(|block| block.height).or(recorded);
        self.status
            .send_if_modified(|status| std::mem::replace(&mut status.finalized, finalized) != finalized);
        self.note_position(cursor.next, Some(head));
        Ok((cursor, finalized))
    }

    /// Is what we stored part of the chain that ends in this final block?
    async fn agrees_with(&self, cursor: &Cursor, finalized: BlockRef) -> Result<bool, IngestError> {
        let Some(last) = cursor.last_block() else { return Ok(true) };
        let at = last.height.min(finalized.height);
        let ours = if at == last.height {
            last.hash
        } else {
            let conn = self.db.conn().await?;
            match raw::block_at(&conn, self.network(), at).await? {
                Some(link) => link.block.hash,
                None => return Ok(true), // History without headers: it was final when it came.
            }
        };
        if at == finalized.height {
            return Ok(ours == finalized.hash);
        }
        match self.adapter.link_at(at).await? {
            Some(link) => Ok(link.block.hash == ours),
            None => {
                Err(self.inconsistent(HeightRange::one(at), "a node has no block below its final height"))
            }
        }
    }

    async fn record_head(&self, head: &Head, finalized: Option<BlockRef>) -> Result<(), IngestError> {
        let mut conn = self.db.conn().await?;
        let tx = conn.tx().await?;
        let moved = cursor::report_head(&tx, self.network(), &Head { finalized, ..head.clone() }).await?;
        if let Some(finalized) = finalized.filter(|_| moved) {
            orphans::drop_final(&tx, self.network(), finalized.height).await?;
            for lane in &self.lanes {
                raw::compact_evidence(&tx, self.network(), lane.shard.number, finalized.height.next())
                    .await?;
            }
            let now = self.options.clock.now();
            let draft = events::finality_advanced(self.network(), head, finalized, now);
            self.emit.append(&tx, &[draft]).await?;
            crash_point!(self, "finality.before_commit");
        }
        tx.commit().await?;
        self.emit.committed();
        Ok(())
    }
}
