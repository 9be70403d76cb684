//! History: ranges below the finalized height. Whole aligned ranges are leased, several at once; each is read
//! in sub-ranges whose rows and evidence commit together, fenced by the lease's epoch, so a restart goes on
//! where the evidence ends and the straight COPY never meets a row. The committer moves the cursor over
//! contiguous COMPLETED ranges only. What is left between the last whole range and the finalized height is
//! read in order behind the cursor itself.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use futures_util::future::try_join_all;
use tidemark_model::chain::{FetchMode, Head, RawBatch, Verdict};
use tidemark_model::ids::{BlockHash, Height, HeightRange};
use tidemark_store::cursor::{self, Cursor};
use tidemark_store::errors::Severity;
use tidemark_store::lease::{self, Lease};
use tidemark_store::partitions::{self, RAW_TABLES};
use tidemark_store::raw::{self, Prepared, audit};
use tidemark_store::{StoreError, Tx};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::lane::Lane;
use super::step::{self, AskSize, Phase};
use super::{Backoff, Core, IngestError, Response, WORKER, crash_point};

/// Fetched batches that wait for the writer; with the one being fetched and the one being written this hides
/// a round trip on both sides. More only holds memory.
const FETCHED_BATCHES_MAX: usize = 1;
/// Tiles read at once.
const TILES_PAGE: i64 = 5000;

/// Leases in hand, for the keeper.
type Held = Arc<Mutex<HashMap<i64, Lease>>>;

/// What proves that a range is ours to write.
enum Fence<'a> {
    Lease(&'a Lease),
    Cursor(Cursor),
}

impl Core {
    /// Reads, in all shards at once, until none has a wide gap below the finalized height.
    pub(super) async fn history_of_all(
        self: &Arc<Self>,
        head: &Head,
        indexing: &mut JoinSet<()>,
    ) -> Result<(), IngestError> {
        self.set_state("history");
        // One of them looks after the indexes.
        let indexers = std::iter::once(Some(indexing)).chain(std::iter::repeat_with(|| None));
        let runs = self.lanes.iter().zip(indexers).map(|(lane, indexing)| self.history(lane, head, indexing));
        try_join_all(runs).await?;
        Ok(())
    }

    async fn history(
        self: &Arc<Self>,
        lane: &Arc<Lane>,
        head: &Head,
        mut indexing: Option<&mut JoinSet<()>>,
    ) -> Result<(), IngestError> {
        let in_flight = (self.options.ranges_in_flight / self.lanes.len()).max(1);
        let held = Held::default();
        let mut keeper = JoinSet::new();
        keeper.spawn(Arc::clone(self).keep_leases(Arc::clone(lane), Arc::clone(&held)));
        let mut tasks: JoinSet<Result<(), IngestError>> = JoinSet::new();
        let mut ranges: HashMap<tokio::task::Id, Lease> = HashMap::new();
        let mut head = head.clone();
        let mut head_at = Instant::now();
        let mut idle = Backoff::new(&self.options);
        loop {
            if head_at.elapsed() >= self.options.head_refresh {
                head = self.refresh_head(head).await?;
                head_at = Instant::now();
            }
            let Some(finalized) = head.finalized.map(|block| block.height) else { return Ok(()) };
            self.reap(lane).await?;
            let (cursor, done) = self.commit_done(lane, &head).await?;
            if let Some(indexing) = &mut indexing {
                self.index_done(indexing, done).await?;
            }
            while tasks.len() < in_flight {
                let Some(lease) = self.claim(lane, finalized).await? else { break };
                held.lock().expect("no panic while held").insert(lease.id, lease.clone());
                let task = tasks.spawn(Arc::clone(self).work(Arc::clone(lane), lease.clone(), cursor.start));
                ranges.insert(task.id(), lease);
            }
            if tasks.is_empty() {
                if self.others_at_work(lane, &cursor).await? {
                    // Ranges of another process, or poison pills: nothing of ours until they move.
                    tokio::time::sleep(idle.next()).await;
                    continue;
                }
                return self.tail(lane, cursor, finalized).await;
            }
            idle.reset();
            let wake = tokio::time::sleep(self.options.head_refresh);
            tokio::select! {
                Some(ended) = tasks.join_next_with_id() => {
                    let (id, result) = match ended {
                        Ok((id, result)) => (id, result),
                        Err(panic) => {
                            self.report_at(cursor.next, &format!("a range worker panicked: {panic}"), Severity::Fatal).await;
                            (panic.id(), Ok(()))
                        }
                    };
                    // A panicked worker's lease is no longer kept: it expires and the reaper counts it.
                    if let Some(lease) = ranges.remove(&id) {
                        held.lock().expect("no panic while held").remove(&lease.id);
                    }
                    result?;
                }
                () = wake => {}
            }
        }
    }

    /// Asks for the head again; history goes on with the old one when nobody answers.
    async fn refresh_head(self: &Arc<Self>, old: Head) -> Result<Head, IngestError> {
        match self.adapter.head().await {
            Ok(head) => {
                self.settle(&head).await?;
                Ok(head)
            }
            Err(error) if error.verdict() == Verdict::Halt => Err(error.into()),
            Err(error) => {
                self.report(&error.into(), Severity::Warn).await;
                Ok(old)
            }
        }
    }

    /// Prolongs what is in hand, three times within its life. Ends with the task group.
    async fn keep_leases(self: Arc<Self>, lane: Arc<Lane>, held: Held) {
        loop {
            tokio::time::sleep(self.options.lease_ttl / 3).await;
            let ids: Vec<i64> = held.lock().expect("no panic while held").keys().copied().collect();
            if ids.is_empty() {
                continue;
            }
            let renewed = match self.db.conn().await {
                Ok(conn) => lane.leases.renew(&conn, &ids).await.map(|_| ()),
                Err(error) => Err(error),
            };
            if let Err(error) = renewed {
                // The epoch protects us if they expire meanwhile.
                tracing::warn!(network = %self.network(), error = %error, action = "renew_leases", "Cannot renew leases.");
            }
        }
    }

    async fn reap(&self, lane: &Lane) -> Result<(), IngestError> {
        let conn = self.db.conn().await?;
        let reaped = lane.leases.reap(&conn).await?;
        drop(conn);
        for pill in reaped.poisoned {
            let message = format!(
                "POISON PILL: range {} failed {} times without progress ({}); look at it, then reset its attempts",
                pill.range,
                pill.attempt,
                pill.last_error.as_deref().unwrap_or("its worker died"),
            );
            self.report_at(pill.range.from(), &message, Severity::Fatal).await;
        }
        Ok(())
    }

    /// Moves the cursor over the contiguous COMPLETED prefix, and nothing more. Gives it, and the height below
    /// which all shards are done.
    async fn commit_done(&self, lane: &Lane, head: &Head) -> Result<(Cursor, Height), IngestError> {
        let mut conn = self.db.conn().await?;
        let tx = conn.tx().await?;
        let mut cursor = cursor::lock(&tx, &lane.cursor_id).await?;
        let end = lane.leases.contiguous_end(&tx, cursor.next).await?;
        let is_moved = end != cursor.next;
        if is_moved {
            let hash = raw::hash_at(&tx, self.network(), end.minus(1)).await?;
            cursor = cursor::advance(&tx, &cursor, end, hash).await?;
        }
        let done = self.done_by_all(&tx, &cursor).await?;
        if is_moved {
            lease::set_checkpoint(&tx, WORKER, self.network(), done).await?;
            crash_point!(self, "commit.before");
            tx.commit().await?;
            crash_point!(self, "commit.after");
            tracing::info!(network = %self.network(), shard = %lane.shard, next = end.0, action = "commit_ranges", "History moved.");
        }
        self.note_position(done, Some(head));
        Ok((cursor, done))
    }

    /// The first height that some shard has not read.
    async fn done_by_all(&self, tx: &Tx<'_>, of_one: &Cursor) -> Result<Height, IngestError> {
        Ok(match self.is_sharded() {
            true => cursor::slowest(tx, self.network()).await?,
            false => of_one.next,
        })
    }

    /// Builds the indexes of partitions whose history is done, one at a time, beside the reading.
    pub(super) async fn index_done(
        self: &Arc<Self>,
        indexing: &mut JoinSet<()>,
        done: Height,
    ) -> Result<(), IngestError> {
        while indexing.try_join_next().is_some() {}
        if !indexing.is_empty() {
            return Ok(());
        }
        let conn = self.db.conn().await?;
        let due = self.partitions.indexes_due(&conn, &RAW_TABLES, self.network(), done).await?;
        drop(conn);
        if let Some(partition) = due.into_iter().next() {
            let core = Arc::clone(self);
            indexing.spawn(async move {
                let built = match core.db.conn().await {
                    Ok(mut conn) => partitions::index_partition(&mut conn, &partition).await,
                    Err(error) => Err(error),
                };
                if let Err(error) = built {
                    let message = format!("cannot index {}: {error}", partition.name);
                    core.report_at(partition.range.from(), &message, Severity::Warn).await;
                }
            });
        }
        Ok(())
    }

    /// A range of its own, whole and final. The cursor's lock keeps the tip out meanwhile.
    async fn claim(&self, lane: &Lane, finalized: Height) -> Result<Option<Lease>, IngestError> {
        let mut conn = self.db.conn().await?;
        let tx = conn.tx().await?;
        let cursor = cursor::lock(&tx, &lane.cursor_id).await?;
        let lease = lane.leases.claim(&tx, cursor.next, finalized.next()).await?;
        tx.commit().await?;
        Ok(lease)
    }

    async fn others_at_work(&self, lane: &Lane, cursor: &Cursor) -> Result<bool, IngestError> {
        let all = HeightRange::new(cursor.next, Height(u64::MAX >> 1)).expect("no chain is that long");
        let mut conn = self.db.conn().await?;
        let tx = conn.tx().await?;
        Ok(lane.leases.any_over(&tx, all).await?)
    }

    /// One lease to its end: an error that passes is waited out with the lease in hand; one that does not
    /// pass leaves the range to the reaper.
    async fn work(self: Arc<Self>, lane: Arc<Lane>, lease: Lease, start: Height) -> Result<(), IngestError> {
        let mut backoff = Backoff::new(&self.options);
        loop {
            let error = match self.work_once(&lane, &lease, start).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            match error.response() {
                Response::Reread => {
                    tracing::info!(network = %self.network(), range = %lease.range, error = %error, action = "lose_lease", "The range has another owner.");
                    return Ok(());
                }
                Response::Retry => {
                    self.report_at(lease.range.from(), &error.to_string(), Severity::Warn).await;
                    tokio::time::sleep(backoff.next()).await;
                }
                Response::Fail if !matches!(error, IngestError::Crashed { .. }) => {
                    self.report_at(lease.range.from(), &error.to_string(), Severity::Fatal).await;
                    tokio::time::sleep(backoff.next()).await;
                    let conn = self.db.conn().await?;
                    lane.leases.give_up(&conn, &lease, &error.to_string()).await?;
                    return Ok(());
                }
                Response::Halt | Response::Fail => return Err(error),
            }
        }
    }

    async fn work_once(&self, lane: &Lane, lease: &Lease, start: Height) -> Result<(), IngestError> {
        if let Some(range) = HeightRange::new(lease.range.from().max(start), lease.range.to()) {
            for part in self.open_parts(lane, range).await? {
                let parent = self.stored_parent(part).await?;
                self.pump(lane, part, parent, Fence::Lease(lease)).await?;
            }
        }
        let mut conn = self.db.conn().await?;
        let tx = conn.tx().await?;
        lane.leases.complete(&tx, lease).await?;
        crash_point!(self, "lease.before_complete");
        tx.commit().await?;
        crash_point!(self, "lease.after_complete");
        Ok(())
    }

    /// What the evidence leaves open of a range: a restart goes on inside it.
    async fn open_parts(&self, lane: &Lane, range: HeightRange) -> Result<Vec<HeightRange>, IngestError> {
        let conn = self.db.conn().await?;
        let mut tiles = Vec::new();
        let mut rest = Some(range);
        while let Some(page) = rest {
            let found = audit::tiles(&conn, self.network(), lane.shard.number, page, TILES_PAGE).await?;
            let full = i64::try_from(found.len()).expect("bounded") == TILES_PAGE;
            rest =
                found.last().filter(|_| full).and_then(|last| HeightRange::new(last.range.to(), range.to()));
            tiles.extend(found);
        }
        Ok(step::uncovered(range, &tiles))
    }

    /// The hash of the stored block right below a range.
    async fn stored_parent(&self, range: HeightRange) -> Result<Option<BlockHash>, IngestError> {
        if range.from() == Height(0) {
            return Ok(None);
        }
        let conn = self.db.conn().await?;
        let below = raw::block_at(&conn, self.network(), range.from().minus(1)).await?;
        Ok(below.map(|link| link.block.hash))
    }

    /// Fetches `range` in sub-ranges and writes each behind `fence`, reading ahead while it writes.
    async fn pump(
        &self,
        lane: &Lane,
        range: HeightRange,
        parent: Option<BlockHash>,
        mut fence: Fence<'_>,
    ) -> Result<(), IngestError> {
        let (sender, mut receiver) = mpsc::channel(FETCHED_BATCHES_MAX);
        let fetch = async move {
            let (mut rest, mut parent) = (Some(range), parent);
            let learned = Some(lane.ask_blocks.load(Ordering::Relaxed)).filter(|blocks| *blocks > 0);
            let mut size = AskSize::new(self.options.fetch_blocks_max, self.options.fetch_records, learned);
            while let Some(open) = rest {
                let batch = self.fetch_patiently(lane, open, parent, &mut size).await?;
                size.learn(batch.covered.blocks(), batch.evidence.records);
                lane.ask_blocks.store(size.blocks(), Ordering::Relaxed);
                rest = HeightRange::new(batch.covered.to(), open.to());
                let last = batch.blocks.last().filter(|block| block.height == batch.covered.last());
                parent = last.map(|block| block.hash);
                if sender.send(self.prepare(batch).await?).await.is_err() {
                    break;
                }
            }
            Ok::<(), IngestError>(())
        };
        let store = async {
            while let Some(prepared) = receiver.recv().await {
                match &mut fence {
                    Fence::Lease(lease) => self.write_leased(lane, lease, &prepared).await?,
                    Fence::Cursor(cursor) => *cursor = self.write_tail(lane, cursor, &prepared).await?,
                }
            }
            Ok(())
        };
        tokio::try_join!(fetch, store)?;
        Ok(())
    }

    /// Asks until there is an answer that holds together; for less when the answer is too large.
    async fn fetch_patiently(
        &self,
        lane: &Lane,
        range: HeightRange,
        parent: Option<BlockHash>,
        size: &mut AskSize,
    ) -> Result<RawBatch, IngestError> {
        let mut backoff = Backoff::new(&self.options);
        loop {
            let (ask, _) = range.split_first(size.blocks());
            let error = match self.fetch(lane, ask, FetchMode::History, parent).await {
                Ok(batch) => return Ok(batch),
                Err(error) => error,
            };
            let severity = match error.verdict() {
                Verdict::Halt => return Err(error.into()),
                Verdict::Narrow if ask.blocks() > 1 => {
                    size.halve();
                    continue;
                }
                Verdict::Narrow => Severity::Fatal,
                Verdict::Retry => Severity::Warn,
            };
            self.report_at(ask.from(), &error.to_string(), severity).await;
            tokio::time::sleep(backoff.next()).await;
        }
    }

    async fn write_leased(&self, lane: &Lane, lease: &Lease, prepared: &Prepared) -> Result<(), IngestError> {
        let mut conn = self.db.conn().await?;
        let tx = conn.tx().await?;
        lane.leases.hold(&tx, lease).await?;
        let events = self.write_share(&tx, lane, prepared).await?;
        crash_point!(self, "lease.before_commit");
        tx.commit().await?;
        crash_point!(self, "lease.after_commit");
        self.note_stored(prepared, events, "store_range");
        Ok(())
    }

    /// The share of one shard: straight where there is no other, else beside what others have stored.
    async fn write_share(&self, tx: &Tx<'_>, lane: &Lane, prepared: &Prepared) -> Result<u64, StoreError> {
        let (network, shard) = (self.network(), lane.shard.number);
        match self.is_sharded() {
            true => self.writer.merge(tx, network, shard, prepared).await,
            false => self.writer.copy(tx, network, shard, prepared).await,
        }
    }

    /// The part below finality that no whole range covers, in order, behind the cursor itself.
    async fn tail(&self, lane: &Lane, cursor: Cursor, finalized: Height) -> Result<(), IngestError> {
        let gap = self.options.history_gap_min;
        match step::phase(cursor.next, Some(finalized), gap) {
            Phase::Tip => Ok(()),
            Phase::History => self.read_in_order(lane, cursor, finalized.next()).await,
        }
    }

    /// Reads what is left below `end`, which is final.
    pub(super) async fn read_in_order(
        &self,
        lane: &Lane,
        cursor: Cursor,
        end: Height,
    ) -> Result<(), IngestError> {
        let Some(range) = HeightRange::new(cursor.next, end) else { return Ok(()) };
        let parent = match cursor.last_hash {
            Some(hash) => Some(hash),
            None => self.stored_parent(range).await?,
        };
        self.pump(lane, range, parent, Fence::Cursor(cursor)).await
    }

    async fn write_tail(
        &self,
        lane: &Lane,
        cursor: &Cursor,
        prepared: &Prepared,
    ) -> Result<Cursor, IngestError> {
        let covered = prepared.batch().covered;
        let last = prepared.batch().blocks.last().filter(|block| block.height == covered.last());
        let mut conn = self.db.conn().await?;
        let tx = conn.tx().await?;
        let cursor = cursor::advance(&tx, cursor, covered.to(), last.map(|block| block.hash)).await?;
        stay_out_of_leases(lane, &tx, covered).await?;
        let events = self.write_share(&tx, lane, prepared).await?;
        let done = self.done_by_all(&tx, &cursor).await?;
        lease::set_checkpoint(&tx, WORKER, self.network(), done).await?;
        crash_point!(self, "tail.before_commit");
        tx.commit().await?;
        crash_point!(self, "tail.after_commit");
        self.note_stored(prepared, events, "store_tail");
        self.note_position(done, None);
        Ok(cursor)
    }

    fn note_stored(&self, prepared: &Prepared, events: u64, action: &'static str) {
        let covered = prepared.batch().covered;
        self.metrics.stored(events);
        tracing::debug!(
            network = %self.network(), from = covered.from().0, to = covered.to().0, events, action,
            "Stored a range."
        );
    }
}

/// A range that is leased belongs to its holder, also when it is done and waits for the committer.
pub(super) async fn stay_out_of_leases(
    lane: &Lane,
    tx: &Tx<'_>,
    range: HeightRange,
) -> Result<(), StoreError> {
    match lane.leases.any_over(tx, range).await? {
        true => Err(StoreError::Fenced { what: format!("range {range}") }),
        false => Ok(()),
    }
}
