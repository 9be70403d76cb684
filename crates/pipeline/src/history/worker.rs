//! The worker that keeps a network's ledger at the end of its finalized raw history: reads raw.* in
//! segments, parses them while the segment before is being applied, and applies them in order.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tidemark_model::OffsetDateTime;
use tidemark_model::chain::{ChainAdapter, ParsedBlock, RawBlock};
use tidemark_model::ids::{Height, HeightRange, NetworkId};
use tidemark_store::bulk::Progress;
use tidemark_store::outbox::Emitter;
use tidemark_store::partitions::{
    FULL_BYTES, Next, Partitions, Table, begin_history_anew, history_without_indexes, index_partition,
};
use tidemark_store::projection::built_last;
use tidemark_store::raw::{self, RawChunks, RawReader};
use tidemark_store::{Conn, Db, StoreError, Verdict, bulk, cursor, ledger, warm};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::apply::{Built, Caution, Source, Writers, apply_built};
use super::segment::{Before, Builder};
use super::{HistoryError, build, parse, show};
use crate::stage_time;
use crate::workers::{Cause, advance_finality, take_back_above_head};

/// Settings of one network's history worker.
#[derive(Debug, Clone)]
pub struct HistoryOptions {
    /// Records in one segment: enough to fold many movements of one pair into one row, few enough to stay
    /// well below the memory limit (about 700 bytes each while a segment is built).
    pub segment_records: usize,
    /// A history longer than this many blocks goes into the ledger without read models, which are built when it is
    /// done; a first one also without secondary indexes.
    pub defer_above_blocks: u64,
    /// Or when the ledger has waited this long, all in all, for blocks to be read: then the node is what
    /// everything waits for, and owners can be shown as they come.
    pub defer_while_waiting: Duration,
    /// Pause when there is nothing to do.
    pub idle_wait: Duration,
    /// Keeps what live looks up in memory; all networks of a process share it.
    pub warmth: Arc<Warmth>,
    /// Segments in memory at once, of all networks that share this: a network takes two (one is made while one is
    /// applied), and however many there are, they do not need more memory together.
    pub segments: Arc<Semaphore>,
}

/// Segments of all networks of a process in memory at once.
pub const SEGMENTS_MAX: usize = 3;

impl Default for HistoryOptions {
    fn default() -> Self {
        Self {
            segment_records: 28_000,
            defer_above_blocks: 5_000,
            defer_while_waiting: Duration::from_secs(10),
            idle_wait: Duration::from_millis(200),
            warmth: Arc::default(),
            segments: Arc::new(Semaphore::new(SEGMENTS_MAX)),
        }
    }
}

/// Reads what live looks up into memory ([`warm`]): when a process starts, beside its work, and before a long history is
/// shown, because live comes right after, and catching up needs the same pages. Once in a while for all networks together.
#[derive(Debug, Default)]
pub struct Warmth {
    last: tokio::sync::Mutex<Option<Instant>>,
}

/// How long it lasts, at least: a thousand networks that are shown one after another need it once.
const WARM_FOR: Duration = Duration::from_secs(60);
/// How long it may take beside the work of a process that starts, and how long readers of a long history may wait for it.
const WARM_BESIDE: Duration = Duration::from_secs(120);
const WARM_BEFORE: Duration = Duration::from_secs(60);

impl Warmth {
    /// It is for speed alone: what goes wrong with it is told, and nothing else.
    async fn keep(&self, db: &Db, within: Duration) {
        let mut last = self.last.lock().await;
        if last.is_some_and(|last| last.elapsed() < WARM_FOR) {
            return;
        }
        let started = Instant::now();
        let warmed = async { warm::up(&db.conn().await?, within).await };
        match warmed.await {
            Ok(Some(warmed)) => tracing::info!(
                pages = warmed.pages,
                is_all = warmed.is_all,
                duration_ms = started.elapsed().as_millis(),
                action = "warm_up",
                "What live looks up is in memory."
            ),
            Ok(None) => {}
            Err(error) => tracing::debug!(%error, action = "warm_up", "Pages come as they are asked for."),
        }
        *last = Some(Instant::now());
    }
}

/// How far history is, for progress bars and metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HistoryProgress {
    /// Applied up to here (inclusive); -1 for nothing.
    pub applied: i64,
    /// Events applied by this worker.
    pub events: u64,
    /// Finalized raw history is complete up to here (inclusive); -1 for nothing.
    pub available: i64,
    /// Is the worker waiting for more?
    pub idle: bool,
}

/// Records read, parsed and folded at a time: a segment's blocks are never in memory all at once.
const READ_RECORDS: usize = 5_000;

/// One network's bulk worker.
pub struct HistoryWorker {
    adapter: Arc<dyn ChainAdapter>,
    raw: Db,
    app: Db,
    reader: RawReader,
    partitions: Arc<Partitions>,
    emitter: Arc<Emitter>,
    options: HistoryOptions,
    progress: watch::Sender<HistoryProgress>,
}

/// What a worker remembers from look to look.
#[derive(Default)]
struct Pace {
    /// How long there was nothing to apply while more was to come.
    waited: Duration,
    /// Indexes that a first history did without are there.
    has_indexes: bool,
    /// Since when blocks above the ledger's head are in the way.
    blocked_since: Option<Instant>,
    /// The node was what everything waited for: what is left of this backlog is shown as it comes.
    is_shown_early: bool,
    /// When large partitions were looked for.
    partitions_at: Option<Instant>,
    /// Are segments looked at before they are merged?
    caution: Caution,
}

/// How often the partitions that are written to are looked at: a busy chain fills one in half an hour.
const PARTITIONS_EVERY: Duration = Duration::from_secs(600);

/// How long messages may take that lead up to blocks above the ledger's head.
const MESSAGES_WAIT: Duration = Duration::from_secs(5);

/// A segment made ahead. Its blocks come along where it is likely to be built again: starting in the middle of
/// history, what the chain says of older balances goes into it.
type Ahead = (HeightRange, Built, Option<Vec<(RawBlock, ParsedBlock)>>);

/// A segment that is being made, and its blocks, if they will be needed again.
struct Making {
    builder: Builder,
    kept: Vec<(RawBlock, ParsedBlock)>,
}

/// Makes segments of raw history.
struct Maker {
    raw: Db,
    adapter: Arc<dyn ChainAdapter>,
    chunks: RawChunks,
    records: usize,
}

impl Maker {
    /// The next segment; `None` at the end of the range.
    async fn next(&mut self) -> Result<Option<Ahead>, HistoryError> {
        let conn = self.raw.conn().await?;
        let keep = self.adapter.network().start_block.0 > 0;
        let mut making: Option<Making> = None;
        while making.as_ref().is_none_or(|making| making.builder.weight() < self.records) {
            let Some((range, blocks)) = self.chunks.next(&conn).await? else { break };
            let adapter = Arc::clone(&self.adapter);
            let folded = tokio::task::spawn_blocking(move || {
                let mut making = making.unwrap_or_else(|| Making {
                    builder: Builder::new(adapter.network(), range.from(), Before::default()),
                    kept: Vec::new(),
                });
                let blocks = parse(&*adapter, blocks);
                let started = Instant::now();
                making.builder.add(range, &blocks);
                stage_time::count("build segment", started);
                if keep {
                    making.kept.extend(blocks);
                }
                making
            });
            making = Some(folded.await.map_err(parser_ended)?);
        }
        let Some(Making { builder, kept }) = making else { return Ok(None) };
        let covered = builder.range();
        let adapter = Arc::clone(&self.adapter);
        let built = tokio::task::spawn_blocking(move || {
            let started = Instant::now();
            let built = Built::of(adapter.network(), builder);
            stage_time::count("build segment", started);
            built
        });
        Ok(Some((covered, built.await.map_err(parser_ended)?, keep.then_some(kept))))
    }
}

fn parser_ended(error: tokio::task::JoinError) -> HistoryError {
    HistoryError::Parser { reason: error.to_string() }
}

impl HistoryWorker {
    /// A worker for the adapter's network.
    pub fn new(
        adapter: Arc<dyn ChainAdapter>,
        raw: Db,
        app: Db,
        reader: RawReader,
        partitions: Arc<Partitions>,
        emitter: Arc<Emitter>,
        options: HistoryOptions,
    ) -> Self {
        let progress =
            watch::Sender::new(HistoryProgress { applied: -1, available: -1, ..HistoryProgress::default() });
        Self { adapter, raw, app, reader, partitions, emitter, options, progress }
    }

    /// Where progress can be watched.
    pub fn progress(&self) -> watch::Receiver<HistoryProgress> {
        self.progress.subscribe()
    }

    /// Runs until told to stop. Errors that another try can cure are tried again by the supervisor.
    pub async fn run(&self, stop: CancellationToken) -> Result<(), HistoryError> {
        let network = self.adapter.network().clone();
        bulk::ensure_progress(&self.app.conn().await?, network.id, network.start_block).await?;
        let mut work = std::pin::pin!(self.keep_up(&stop));
        tokio::select! {
            biased;
            ended = &mut work => return ended,
            () = self.options.warmth.keep(&self.app, WARM_BESIDE) => {}
        }
        work.await
    }

    async fn keep_up(&self, stop: &CancellationToken) -> Result<(), HistoryError> {
        let mut pace = Pace::default();
        loop {
            if stop.is_cancelled() {
                return Ok(());
            }
            match self.catch_up(stop, &mut pace).await {
                Ok(true) => {}
                Ok(false) => {
                    tokio::select! {
                        biased;
                        () = stop.cancelled() => return Ok(()),
                        () = tokio::time::sleep(self.options.idle_wait) => {}
                    }
                }
                // The live handler moved the ledger meanwhile: look again.
                Err(HistoryError::Store(error)) if error.verdict() == Verdict::Fenced => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Applies what is available now; `false` when there was nothing.
    async fn catch_up(&self, stop: &CancellationToken, pace: &mut Pace) -> Result<bool, HistoryError> {
        let network = self.adapter.network();
        let Some(progress) = bulk::read_progress(&self.app.conn().await?, network.id).await? else {
            return Ok(false);
        };
        let (available, finalized) = self.available(network.id, progress.head).await?;
        self.progress.send_modify(|now| {
            now.applied = progress.head;
            now.available = available;
        });
        if progress.finalized != progress.head {
            self.begin_partitions(pace, PARTITIONS_EVERY, Next::Live, progress.head).await?;
            let is_moved = self.finish_live(progress.head, available).await?;
            // Indexes that a migration found missing are built also where live is ahead of everything final.
            if !is_moved && !pace.has_indexes && progress.head >= finalized {
                self.restore_indexes(progress.head).await?;
                pace.has_indexes = true;
            }
            return Ok(is_moved);
        }
        let next = Height::from_i64(progress.head + 1);
        let Some(range) =
            u64::try_from(available).ok().and_then(|last| HeightRange::inclusive(next, Height(last)))
        else {
            // Nothing to apply: either all of finalized history is there, or raw history is still coming.
            let is_done = progress.head >= finalized;
            let is_slow = progress.read_models_due && pace.waited >= self.options.defer_while_waiting;
            if is_done || is_slow {
                self.finish_backlog(&progress, pace).await?;
            }
            pace.is_shown_early |= is_slow;
            if is_done {
                pace.is_shown_early = false;
                self.progress.send_modify(|now| now.idle = true);
            } else {
                pace.waited += self.options.idle_wait;
            }
            return Ok(false);
        };
        if let Some(is_moved) = self.clear_the_way(progress.head, pace).await? {
            return Ok(is_moved);
        }
        // Whatever live adds from here on moves the head, and that fences the segment off.
        if bulk::projector_lags(&self.app.conn().await?, network.id).await? {
            return Ok(false);
        }
        self.progress.send_modify(|now| now.idle = false);
        let backlog = u64::try_from(finalized - progress.head).unwrap_or(0);
        if backlog >= self.options.defer_above_blocks && !pace.is_shown_early {
            let before_start = network.start_block.as_i64() - 1;
            let mut conn = self.app.conn().await?;
            if built_last::put_off(&mut conn, network.id, progress.head, before_start).await? {
                pace.waited = Duration::ZERO;
                tracing::info!(
                    network_id = network.id.0,
                    blocks = backlog,
                    action = "put_off_read_models",
                    "Owners, assets and collections are shown when this history is read."
                );
            }
            drop(conn);
            self.begin_partitions(pace, Duration::ZERO, Next::Backlog, progress.head).await?;
            pace.has_indexes = false;
            let deferred = bulk::defer_indexes(&mut self.app.conn().await?).await?;
            if deferred > 0 {
                tracing::info!(
                    network_id = network.id.0,
                    indexes = deferred,
                    action = "defer_indexes",
                    "Secondary indexes wait until this first history is built."
                );
            }
        }
        self.apply_range(range, stop, &mut pace.caution).await?;
        Ok(true)
    }

    /// The last height (inclusive) up to which raw history is final and without a hole above `head`, and the
    /// chain's finalized height.
    async fn available(&self, network: NetworkId, head: i64) -> Result<(i64, i64), HistoryError> {
        let conn = self.raw.conn().await?;
        let stored = cursor::head(&conn, network).await?;
        let finalized = stored.and_then(|head| head.finalized).map_or(-1, |block| block.height.as_i64());
        if finalized <= head {
            return Ok((head.min(finalized), finalized));
        }
        let covered = raw::covered_through(&conn, network, head).await?;
        Ok((covered.min(finalized), finalized))
    }

    /// After an outage the chain is final beyond what live had left open, but that message comes only behind
    /// the history that waits for us: finality up to the ledger's head is applied here. Not while the raw
    /// chain differs from the ledger's: then the message of that reorg comes first.
    async fn finish_live(&self, head: i64, available: i64) -> Result<bool, HistoryError> {
        if available < head {
            return Ok(false);
        }
        let network = self.adapter.network();
        let mut conn = self.app.conn().await?;
        let tx = conn.tx().await?;
        let progress = bulk::lock_progress(&tx, network.id).await?;
        if progress.head != head || progress.finalized == head {
            return Ok(true); // Somebody moved it: look again.
        }
        let open = ledger::recent_above(&tx, network.id, progress.finalized).await?;
        let raw = self.raw.conn().await?;
        for block in &open {
            let stored = raw::block_at(&raw, network.id, block.height).await?;
            if stored.is_none_or(|link| link.block.hash != block.hash) {
                return Ok(false);
            }
        }
        drop(raw);
        let cause = Cause { id: format!("history:{}:{head}", network.id), at: OffsetDateTime::now_utc() };
        let done = advance_finality(&tx, network, Height::from_i64(head), None, &cause).await?;
        self.emitter.append(&tx, &done.drafts).await?;
        tx.commit().await?;
        Ok(true)
    }

    /// After a reorg that went there and back, blocks above the ledger's head may stand. Messages that lead up to them
    /// are mostly on their way; when none has come for a while, they are taken back and come with history.
    /// Gives nothing if nothing is in the way.
    async fn clear_the_way(&self, head: i64, pace: &mut Pace) -> Result<Option<bool>, HistoryError> {
        let network = self.adapter.network();
        let mut conn = self.app.conn().await?;
        let tx = conn.tx().await?;
        if ledger::open_above(&tx, network.id, head).await?.is_empty() {
            pace.blocked_since = None;
            return Ok(None);
        }
        if pace.blocked_since.get_or_insert_with(Instant::now).elapsed() < MESSAGES_WAIT {
            return Ok(Some(false));
        }
        let cause = Cause { id: format!("history:{}:{head}:way", network.id), at: OffsetDateTime::now_utc() };
        let done = take_back_above_head(&tx, network, &cause).await?;
        self.emitter.append(&tx, &done.drafts).await?;
        tx.commit().await?;
        pace.blocked_since = None;
        tracing::warn!(
            network_id = network.id.0,
            head,
            events = done.reverted,
            action = "take_back",
            "Events above the ledger's head stood in the way of history and were taken back."
        );
        Ok(Some(true))
    }

    /// Reads, parses and builds ahead of the writer by one segment.
    async fn apply_range(
        &self,
        range: HeightRange,
        stop: &CancellationToken,
        caution: &mut Caution,
    ) -> Result<(), HistoryError> {
        let (sender, mut receiver) = mpsc::channel::<(OwnedSemaphorePermit, Ahead)>(1);
        let segments = Arc::clone(&self.options.segments);
        let mut tasks = JoinSet::new();
        let mut maker = Maker {
            raw: self.raw.clone(),
            adapter: Arc::clone(&self.adapter),
            chunks: self.reader.chunks(self.adapter.network().id, range, READ_RECORDS),
            records: self.options.segment_records,
        };
        tasks.spawn(async move {
            // The place is taken first: one segment is being applied, one is being made, no third waits.
            while let Ok(place) = sender.reserve().await {
                let room = Arc::clone(&segments).acquire_owned().await.expect("nobody closes it");
                let Some(made) = maker.next().await? else { break };
                place.send((room, made));
            }
            Ok::<_, HistoryError>(())
        });
        while let Some((room, (covered, built, blocks))) = receiver.recv().await {
            // Taken anew for each: who holds a connection and waits for room keeps those from going on who have room.
            let mut writers = Writers { state: self.app.conn().await?, log: self.app.spare_conn().await };
            self.partitions.ensure_transfers(&mut writers.state, self.adapter.network().id, covered).await?;
            let source = match &blocks {
                Some(blocks) => Source::Held(blocks),
                None => Source::Raw(&self.reader, &self.raw),
            };
            let events = apply_built(&mut writers, &*self.adapter, built, &source, caution).await?;
            drop((room, blocks));
            metrics::counter!("worker_events_processed_total", "worker" => "history",
                "network_id" => self.adapter.network().id.to_string(), "event_kind" => "all")
            .increment(events);
            self.progress.send_modify(|progress| {
                progress.applied = covered.last().as_i64();
                progress.events += events;
            });
            if stop.is_cancelled() {
                return Ok(());
            }
        }
        while let Some(done) = tasks.join_next().await {
            done.map_err(parser_ended)??;
        }
        Ok(())
    }

    /// History is done for now: build what was deferred, so that readers find their rows and indexes. What comes next
    /// begins partitions of its own, if those of this history are large.
    async fn finish_backlog(&self, progress: &Progress, pace: &mut Pace) -> Result<(), HistoryError> {
        let network = self.adapter.network().id;
        let is_due = progress.read_models_due;
        // No call holds a connection for another: a thousand networks that do so never end.
        if is_due && !build(&mut self.app.conn().await?, self.app.spare_conn().await, network).await? {
            return Ok(()); // Not yet: look again.
        }
        let every = if is_due { Duration::ZERO } else { PARTITIONS_EVERY };
        self.begin_partitions(pace, every, Next::Live, progress.head).await?;
        // Before anything is shown: readers would go through whole tables, and live wait for each index. What is to be warm
        // are indexes first of all: after a first history those that are built now, on top of one those that are there.
        let warm = async {
            if is_due {
                self.options.warmth.keep(&self.app, WARM_BEFORE).await;
            }
        };
        if progress.read_models_height.is_some() {
            let (restored, ()) = tokio::join!(self.restore_indexes(progress.head), warm);
            restored?;
        } else {
            self.restore_indexes(progress.head).await?;
            warm.await;
        }
        if is_due {
            show(&mut self.app.conn().await?, self.app.spare_conn().await, network).await?;
        }
        Ok(())
    }

    /// Begins new partitions of transfers and of the history of balances where the newest are large, if that was not
    /// looked at for so long. A backlog goes into partitions without indexes. It is for speed alone: who cannot have the
    /// locks goes on and looks again later.
    async fn begin_partitions(
        &self,
        pace: &mut Pace,
        every: Duration,
        next: Next,
        head: i64,
    ) -> Result<(), HistoryError> {
        if pace.partitions_at.is_some_and(|at| at.elapsed() < every) {
            return Ok(());
        }
        pace.partitions_at = Some(Instant::now());
        let (network, above) = (self.adapter.network().id, Height::from_i64(head + 1));
        let mut conn = self.app.conn().await?;
        let begun = async {
            let transfers = self.partitions.begin_anew(&mut conn, network, FULL_BYTES, next).await?;
            let history = begin_history_anew(&mut conn, FULL_BYTES, next).await?;
            if let Next::Backlog = next {
                self.partitions.do_without_indexes(&mut conn, network, above).await?;
                history_without_indexes(&mut conn, network).await?;
            }
            Ok::<_, StoreError>((transfers, history))
        };
        match begun.await {
            Ok((false, false)) => Ok(()),
            Ok((transfers, history)) => {
                tracing::info!(
                    network_id = network.0,
                    transfers,
                    history,
                    action = "begin_partitions",
                    "What comes next is written to new partitions."
                );
                Ok(())
            }
            Err(error) if error.is_lock_timeout() => {
                tracing::debug!(network_id = network.0, "Partitions are busy: looked at again later.");
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Builds the indexes that a history did without: those of the newest transfers, and those that were written down;
    /// with a second connection if there is one.
    async fn restore_indexes(&self, head: i64) -> Result<(), HistoryError> {
        let network = self.adapter.network().id;
        let mut conn = self.app.conn().await?;
        let second =
            if bulk::deferred_indexes(&conn).await? > 0 { self.app.spare_conn().await } else { None };
        let beside = async {
            match second {
                Some(mut second) => bulk::restore_indexes(&mut second).await,
                None => Ok(0),
            }
        };
        let transfers_first = async {
            if let Ok(height) = u64::try_from(head) {
                self.index_transfers(&mut conn, Height(height)).await?;
            }
            bulk::restore_indexes(&mut conn).await
        };
        let (here, beside) = tokio::join!(transfers_first, beside);
        let restored = here? + beside?;
        if restored > 0 {
            tracing::info!(
                network_id = network.0,
                indexes = restored,
                action = "restore_indexes",
                "Secondary indexes are built."
            );
        }
        Ok(())
    }

    /// Builds the indexes of transfers up to `head` that are missing.
    async fn index_transfers(&self, conn: &mut Conn, head: Height) -> Result<(), StoreError> {
        let (network, tables) = (self.adapter.network().id, [Table::Transfers]);
        for partition in self.partitions.indexes_due(conn, &tables, network, head).await? {
            index_partition(conn, &partition).await?;
        }
        self.partitions.ensure_indexed(conn, &tables, network, head).await
    }
}
