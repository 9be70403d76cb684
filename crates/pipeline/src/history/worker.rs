//! The worker that keeps a network's ledger at the end of its finalized raw history: reads raw.* in
//! segments, parses them while the segment before is being applied, and applies them in order.

use std::sync::Arc;
use std::time::Duration;

use tidemark_model::chain::{ChainAdapter, ParsedBlock, RawBlock};
use tidemark_model::ids::{Height, HeightRange, NetworkId};
use tidemark_store::partitions::Partitions;
use tidemark_store::raw::RawReader;
use tidemark_store::{Db, Verdict, bulk, cursor};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{HistoryError, apply_blocks};

/// Settings of one network's history worker.
#[derive(Debug, Clone)]
pub struct HistoryOptions {
    /// Records in one segment: enough to fold many movements of one pair into one row, few enough to stay
    /// well below the memory limit (about 700 bytes each while a segment is built).
    pub segment_records: usize,
    /// A first history longer than this many blocks is built without secondary indexes, which are built
    /// when it is done.
    pub defer_indexes_above_blocks: u64,
    /// Pause when there is nothing to do.
    pub idle_wait: Duration,
}

impl Default for HistoryOptions {
    fn default() -> Self {
        Self {
            segment_records: 60_000,
            defer_indexes_above_blocks: 20_000,
            idle_wait: Duration::from_millis(200),
        }
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

/// One network's bulk worker.
pub struct HistoryWorker {
    adapter: Arc<dyn ChainAdapter>,
    raw: Db,
    app: Db,
    reader: RawReader,
    partitions: Arc<Partitions>,
    options: HistoryOptions,
    progress: watch::Sender<HistoryProgress>,
}

type Parsed = (HeightRange, Vec<(RawBlock, ParsedBlock)>);

impl HistoryWorker {
    /// A worker for the adapter's network.
    pub fn new(
        adapter: Arc<dyn ChainAdapter>,
        raw: Db,
        app: Db,
        reader: RawReader,
        partitions: Arc<Partitions>,
        options: HistoryOptions,
    ) -> Self {
        let progress =
            watch::Sender::new(HistoryProgress { applied: -1, available: -1, ..HistoryProgress::default() });
        Self { adapter, raw, app, reader, partitions, options, progress }
    }

    /// Where progress can be watched.
    pub fn progress(&self) -> watch::Receiver<HistoryProgress> {
        self.progress.subscribe()
    }

    /// Runs until told to stop. Errors that another try can cure are tried again by the supervisor.
    pub async fn run(&self, stop: CancellationToken) -> Result<(), HistoryError> {
        let network = self.adapter.network().clone();
        bulk::ensure_progress(&self.app.conn().await?, network.id, network.start_block).await?;
        loop {
            if stop.is_cancelled() {
                return Ok(());
            }
            match self.catch_up(&stop).await {
                Ok(true) => {}
                Ok(false) => {
                    self.progress.send_modify(|progress| progress.idle = true);
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
    async fn catch_up(&self, stop: &CancellationToken) -> Result<bool, HistoryError> {
        let network = self.adapter.network();
        let Some(progress) = bulk::read_progress(&self.app.conn().await?, network.id).await? else {
            return Ok(false);
        };
        let available = self.available(network.id, progress.head).await?;
        self.progress.send_modify(|now| {
            now.applied = progress.head;
            now.available = available;
        });
        // Events of the live path that are not final yet are the live handler's to finish.
        if progress.finalized != progress.head {
            return Ok(false);
        }
        let next = Height::from_i64(progress.head + 1);
        let Some(range) =
            u64::try_from(available).ok().and_then(|last| HeightRange::inclusive(next, Height(last)))
        else {
            self.finish_backlog().await?;
            return Ok(false);
        };
        self.progress.send_modify(|now| now.idle = false);
        if range.blocks() >= self.options.defer_indexes_above_blocks {
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
        self.apply_range(range, stop).await?;
        Ok(true)
    }

    /// The last height (inclusive) up to which raw history is final and without a hole above `head`.
    async fn available(&self, network: NetworkId, head: i64) -> Result<i64, HistoryError> {
        let conn = self.raw.conn().await?;
        let finalized =
            cursor::head(&conn, network).await?.and_then(|head| head.finalized).map(|block| block.height);
        let Some(finalized) = finalized else { return Ok(head) };
        let covered = tidemark_store::raw::covered_through(&conn, network, head).await?;
        Ok(covered.min(finalized.as_i64()))
    }

    /// Reads and parses ahead of the writer by one segment.
    async fn apply_range(&self, range: HeightRange, stop: &CancellationToken) -> Result<(), HistoryError> {
        let (sender, mut receiver) = mpsc::channel::<Parsed>(1);
        let mut tasks = JoinSet::new();
        let mut chunks = self.reader.chunks(self.adapter.network().id, range, self.options.segment_records);
        let (raw, adapter) = (self.raw.clone(), Arc::clone(&self.adapter));
        tasks.spawn(async move {
            let conn = raw.conn().await?;
            while let Some((covered, blocks)) = chunks.next(&conn).await? {
                let adapter = Arc::clone(&adapter);
                let parsed = tokio::task::spawn_blocking(move || parse(&*adapter, blocks))
                    .await
                    .map_err(|error| HistoryError::Parser { reason: error.to_string() })?;
                if sender.send((covered, parsed)).await.is_err() {
                    break; // The writer stopped; its reason counts.
                }
            }
            Ok::<_, HistoryError>(())
        });
        let mut conn = self.app.conn().await?;
        while let Some((covered, blocks)) = receiver.recv().await {
            self.partitions.ensure_transfers(&mut conn, self.adapter.network().id, covered).await?;
            let events = apply_blocks(&mut conn, &*self.adapter, covered, &blocks).await?;
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
            done.map_err(|error| HistoryError::Parser { reason: error.to_string() })??;
        }
        Ok(())
    }

    /// History is done for now: build what was deferred, so that readers find their indexes.
    async fn finish_backlog(&self) -> Result<(), HistoryError> {
        let mut conn = self.app.conn().await?;
        let restored = bulk::restore_indexes(&mut conn).await?;
        if restored > 0 {
            tracing::info!(
                network_id = self.adapter.network().id.0,
                indexes = restored,
                action = "restore_indexes",
                "Secondary indexes are built."
            );
        }
        Ok(())
    }
}

fn parse(adapter: &dyn ChainAdapter, blocks: Vec<RawBlock>) -> Vec<(RawBlock, ParsedBlock)> {
    blocks
        .into_iter()
        .map(|mut block| {
            let parsed = adapter.parse(&block);
            block.records = Vec::new(); // Not needed any more; a segment waits in memory.
            (block, parsed)
        })
        .collect()
}
