//! From the adapter to raw.*: history by leased ranges, the tip by one loop, reorgs by one swap.
//!
//! - [`step`]: the pure decisions
//! - `lane`: shards, each with its own cursor in history, together at the tip
//! - `history`: ranges below the finalized height, several in flight, no events
//! - `tip`: one block after the other, rows, cursor and outbox in one transaction
//! - `reorg`: common ancestor, new branch fetched first, then one swap
//! - [`verify`]: proves that nothing is missing, or names it
//!
//! Nothing here waits for anything downstream. Progress is what Postgres says: after a crash anywhere the
//! cursor, the leases and the evidence tell where to go on.

mod events;
mod history;
mod lane;
mod metrics;
mod reorg;
pub mod step;
mod tip;
pub mod verify;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tidemark_model::chain::{ChainAdapter, ChainError, FetchMode, Head, RawBatch, Verdict as ChainVerdict};
use tidemark_model::clock::{Clock, SystemClock};
use tidemark_model::envelope::Draft;
use tidemark_model::ids::{BlockHash, Height, HeightRange, NetworkId};
use tidemark_store::blob::{BlobError, BlobStore};
use tidemark_store::cursor::{self, Shard};
use tidemark_store::errors::{self, IndexingError, Severity};
use tidemark_store::partitions::{PartitionSizes, Partitions};
use tidemark_store::raw::{PAYLOAD_INLINE_MAX_BYTES, Prepared, RawError, RawWriter};
use tidemark_store::{Conn, Db, StoreError, Tx, Verdict as StoreVerdict};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::stage_time;
use lane::Lane;
use metrics::IngestMetrics;
use step::Phase;

/// The name under which errors and the checkpoint are written (S1 §6.1).
pub const WORKER: &str = "raw_ingester";

/// The door to the outbox.
#[async_trait]
pub trait Emit: Send + Sync {
    /// Appends in order, inside the transaction of the fact. Called after the cursor row is locked.
    async fn append(&self, tx: &Tx<'_>, drafts: &[Draft]) -> Result<(), StoreError>;
    /// What was appended is committed now: whoever carries it on may look.
    fn committed(&self) {}
}

/// Asked at named places; `true` ends the run there as a crash would. For tests.
pub type CrashHook = Arc<dyn Fn(&'static str) -> bool + Send + Sync>;

/// How a network is ingested.
#[derive(Clone)]
pub struct IngestOptions {
    /// Who we are; two processes at once have two names.
    pub instance: String,
    /// Shortest pause between two looks at the head (POLL_INTERVAL_MS).
    pub poll_interval_min: Duration,
    /// Longest pause; the pause is drawn between the two.
    pub poll_interval_max: Duration,
    /// Leased ranges read at once.
    pub ranges_in_flight: usize,
    /// Heights per lease.
    pub lease_range: u64,
    /// How long a lease outlives its holder.
    pub lease_ttl: Duration,
    /// Most heights asked of the adapter at once.
    pub fetch_blocks_max: u64,
    /// Records one history transaction aims at; bounds memory.
    pub fetch_records: u64,
    /// Most blocks of one tip transaction.
    pub tip_blocks_max: u64,
    /// A gap below finality wider than this is read as history.
    pub history_gap_min: u64,
    /// Larger bodies go to object storage (PAYLOAD_INLINE_MAX_BYTES).
    pub payload_inline_max_bytes: usize,
    /// First pause after an error; doubles up to `backoff_max`, with full jitter.
    pub backoff_min: Duration,
    /// Longest pause after an error.
    pub backoff_max: Duration,
    /// How often history asks for the head.
    pub head_refresh: Duration,
    /// How often a halted network looks whether it may go on.
    pub halt_poll: Duration,
    /// Heights per partition.
    pub partitions: PartitionSizes,
    /// Time for lag and finality events.
    pub clock: Arc<dyn Clock>,
    /// Where tests make it crash.
    pub crash: Option<CrashHook>,
}

impl Default for IngestOptions {
    fn default() -> Self {
        Self {
            instance: "ingester".to_owned(),
            poll_interval_min: Duration::from_millis(250),
            poll_interval_max: Duration::from_millis(350),
            ranges_in_flight: 3,
            lease_range: 50_000,
            lease_ttl: Duration::from_secs(30),
            fetch_blocks_max: 20_000,
            fetch_records: 3_500,
            tip_blocks_max: 64,
            history_gap_min: 64,
            payload_inline_max_bytes: PAYLOAD_INLINE_MAX_BYTES,
            backoff_min: Duration::from_millis(200),
            backoff_max: Duration::from_secs(10),
            head_refresh: Duration::from_secs(5),
            halt_poll: Duration::from_secs(2),
            partitions: PartitionSizes::default(),
            clock: Arc::new(SystemClock),
            crash: None,
        }
    }
}

/// Why the ingester cannot go on with what it is doing.
#[derive(Debug, thiserror::Error)]
pub enum IngestError {
    /// The chain did not answer, or not usably.
    #[error(transparent)]
    Chain(#[from] ChainError),
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The object storage.
    #[error(transparent)]
    Blob(#[from] BlobError),
    /// The network must not go on without an operator.
    #[error("{reason}")]
    Halt {
        /// What happened and what to do.
        reason: String,
    },
    /// The network was halted before we started, and nobody has let it go on.
    #[error("{reason}")]
    StillHalted {
        /// As stored.
        reason: String,
    },
    /// The endpoints serve another chain than the one in the database.
    #[error(
        "the endpoints serve {found}, and this database holds {kept}: check rpc, or use another database"
    )]
    OtherChain {
        /// What they serve.
        found: String,
        /// What was read before.
        kept: String,
    },
    /// The contracts were divided otherwise when this network was read before.
    #[error(
        "this network was read in shards {before} and is to be read in {now}: their cursors do not fit; set \
         ADDR_SHARDS and the contracts back, or read it into an empty database"
    )]
    Divided {
        /// Cursors that are there.
        before: String,
        /// Cursors of the configuration.
        now: String,
    },
    /// A test asked for a crash.
    #[error("crashed at {at}")]
    Crashed {
        /// Where.
        at: &'static str,
    },
}

impl From<RawError> for IngestError {
    fn from(error: RawError) -> Self {
        match error {
            RawError::Store(error) => Self::Store(error),
            RawError::Blob(error) => Self::Blob(error),
        }
    }
}

/// What to do about an [`IngestError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Response {
    /// Later, from what the database says.
    Retry,
    /// At once, from what the database says: somebody else moved.
    Reread,
    /// Stop the network.
    Halt,
    /// Give the error to the supervisor.
    Fail,
}

impl IngestError {
    fn response(&self) -> Response {
        match self {
            Self::Chain(error) => match error.verdict() {
                ChainVerdict::Retry | ChainVerdict::Narrow => Response::Retry,
                ChainVerdict::Halt => Response::Halt,
            },
            Self::Store(error) => match error.verdict() {
                StoreVerdict::Retry => Response::Retry,
                StoreVerdict::Fenced => Response::Reread,
                StoreVerdict::Fatal => Response::Fail,
            },
            Self::Blob(_) => Response::Retry,
            Self::Halt { .. } | Self::StillHalted { .. } => Response::Halt,
            Self::OtherChain { .. } | Self::Divided { .. } | Self::Crashed { .. } => Response::Fail,
        }
    }
}

/// What a network's ingester is doing, for `status` and for tests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IngestStatus {
    /// `starting`, `history`, `tip`, `waiting`, `halted` or `stopped`.
    pub state: &'static str,
    /// The first height that is not processed.
    pub next: Option<Height>,
    /// The newest height the nodes report.
    pub head: Option<Height>,
    /// The newest height we confirmed as final.
    pub finalized: Option<Height>,
    /// The last error that was handled.
    pub last_error: Option<String>,
}

/// Reads one network into raw.*.
#[derive(Clone)]
pub struct Ingester {
    core: Arc<Core>,
}

/// What all phases share.
struct Core {
    /// The first lane's: for questions about the chain itself.
    adapter: Arc<dyn ChainAdapter>,
    db: Db,
    writer: RawWriter,
    emit: Arc<dyn Emit>,
    partitions: Partitions,
    /// At least one.
    lanes: Vec<Arc<Lane>>,
    options: IngestOptions,
    status: watch::Sender<IngestStatus>,
    metrics: IngestMetrics,
}

/// Ends the function as a crash would, when a test asks for it.
macro_rules! crash_point {
    ($core:expr, $at:literal) => {
        if $core.options.crash.as_ref().is_some_and(|hook| hook($at)) {
            return Err($crate::ingest::IngestError::Crashed { at: $at });
        }
    };
}
use crash_point;

impl Ingester {
    /// An ingester of the adapter's network into `raw_db`.
    pub fn new(
        adapter: Arc<dyn ChainAdapter>,
        raw_db: Db,
        blobs: Arc<dyn BlobStore>,
        emit: Arc<dyn Emit>,
        options: IngestOptions,
    ) -> Self {
        Self::sharded(vec![(Shard::ONLY, adapter)], raw_db, blobs, emit, options)
    }

    /// The same for a network whose contracts are divided: one adapter per shard, in order, each with a filter
    /// that lets no contract of another through.
    ///
    /// # Panics
    /// Without any shard.
    pub fn sharded(
        shards: Vec<(Shard, Arc<dyn ChainAdapter>)>,
        raw_db: Db,
        blobs: Arc<dyn BlobStore>,
        emit: Arc<dyn Emit>,
        options: IngestOptions,
    ) -> Self {
        let adapter = Arc::clone(&shards.first().expect("a network has a shard").1);
        let network = adapter.network().clone();
        let lanes = shards
            .into_iter()
            .map(|(shard, adapter)| Arc::new(Lane::new(shard, adapter, &options)))
            .collect();
        let (status, _) = watch::channel(IngestStatus {
            state: "starting",
            next: None,
            head: None,
            finalized: None,
            last_error: None,
        });
        let core = Core {
            writer: RawWriter::new(blobs, options.payload_inline_max_bytes),
            partitions: Partitions::new(options.partitions, Default::default()),
            metrics: IngestMetrics::new(&network),
            adapter,
            db: raw_db,
            emit,
            lanes,
            options,
            status,
        };
        Self { core: Arc::new(core) }
    }

    /// What it is doing now, and every change of it.
    pub fn status(&self) -> watch::Receiver<IngestStatus> {
        self.core.status.subscribe()
    }

    /// Runs until `stop`. Bad nodes and an absent database are waited out; a halted network waits for its
    /// operator. An error comes back only for what neither heals by itself: a supervisor may start it again.
    /// Cancel safe: dropping it anywhere loses nothing.
    pub async fn run(&self, stop: CancellationToken) -> Result<(), IngestError> {
        let core = &self.core;
        let mut backoff = Backoff::new(&core.options);
        loop {
            let before = core.status.borrow().next;
            let ended = tokio::select! {
                biased;
                () = stop.cancelled() => None,
                ended = core.session() => Some(ended),
            };
            let Some(Err(error)) = ended else {
                core.set_state("stopped");
                return core.leave().await;
            };
            if core.status.borrow().next != before {
                backoff.reset();
            }
            match error.response() {
                Response::Reread => {
                    tracing::info!(network = %core.network(), error = %error, action = "reread", "Another worker moved; reading the cursor anew.");
                    core.set_state("waiting");
                    core.pause(&stop, backoff.next()).await;
                }
                Response::Retry => {
                    core.report(&error, Severity::Warn).await;
                    core.set_state("waiting");
                    core.pause(&stop, backoff.next()).await;
                }
                Response::Halt => {
                    // Written once: writing it again could undo an operator's word that came in between.
                    let is_known = matches!(error, IngestError::StillHalted { .. });
                    if !is_known {
                        core.report(&error, Severity::Fatal).await;
                    }
                    core.halt(&error.to_string(), is_known, &stop, &mut backoff).await;
                }
                Response::Fail => {
                    core.report(&error, Severity::Fatal).await;
                    return Err(error);
                }
            }
        }
    }
}

impl Core {
    fn network(&self) -> NetworkId {
        self.adapter.network().id
    }

    fn slug(&self) -> &str {
        &self.adapter.network().slug
    }

    /// From what the database says until an error: history while there is some, then the tip, and so on.
    async fn session(self: &Arc<Self>) -> Result<(), IngestError> {
        let identity = self.adapter.identity().await?;
        let conn = self.db.conn().await?;
        cursor::ensure_network(&conn, self.adapter.network()).await?;
        cursor::ensure_head(&conn, self.network()).await?;
        if let Some(identity) = identity {
            self.check_identity(&conn, identity).await?;
        }
        self.ensure_cursors(&conn).await?;
        for lane in &self.lanes {
            lane.leases.release_own(&conn).await?;
        }
        let stored = cursor::head(&conn, self.network()).await?;
        drop(conn);
        if let Some(reason) = stored.and_then(|head| head.halted) {
            return Err(IngestError::StillHalted { reason });
        }
        self.metrics.halted(false);
        self.note_position(self.position().await?.0.next, None);
        // Index builds outlive a change of phase.
        let mut indexing = JoinSet::new();
        loop {
            let head = self.adapter.head().await?;
            let (cursor, finalized) = self.settle(&head).await?;
            match step::phase(cursor.next, finalized, self.options.history_gap_min) {
                Phase::History => self.history_of_all(&head, &mut indexing).await?,
                Phase::Tip if !self.position().await?.1 => self.align().await?,
                Phase::Tip => self.tip(head, &mut indexing).await?,
            }
        }
    }

    /// The database holds one chain, for ever: another one behind the same name or configuration is refused,
    /// at every start and whenever we come back from an error. The adapter checks each endpoint for itself.
    async fn check_identity(&self, conn: &Conn, found: String) -> Result<(), IngestError> {
        match cursor::keep_identity(conn, self.network(), &found).await? {
            // What nobody knows is no contradiction.
            Some(kept) if kept != found && !found.contains("unknown") => {
                Err(IngestError::OtherChain { found, kept })
            }
            _ => Ok(()),
        }
    }

    /// Gives leases back on the way out, so that nobody waits for them to expire.
    async fn leave(&self) -> Result<(), IngestError> {
        let conn = self.db.conn().await?;
        for lane in &self.lanes {
            lane.leases.release_own(&conn).await?;
        }
        Ok(())
    }

    /// Stops the network until an operator takes the reason away. The reason survives a restart.
    async fn halt(&self, reason: &str, is_known: bool, stop: &CancellationToken, backoff: &mut Backoff) {
        self.set_state("halted");
        self.metrics.halted(true);
        tracing::error!(network = %self.network(), reason, action = "halt", "The network is halted; the others go on.");
        let mut written = is_known;
        while !stop.is_cancelled() {
            match self.halt_step(reason, &mut written).await {
                Ok(true) => return,
                Ok(false) => self.pause(stop, self.options.halt_poll).await,
                Err(error) => {
                    tracing::warn!(network = %self.network(), error = %error, action = "halt", "Cannot look whether the network may go on.");
                    self.pause(stop, backoff.next()).await;
                }
            }
        }
    }

    /// May the network go on?
    async fn halt_step(&self, reason: &str, written: &mut bool) -> Result<bool, StoreError> {
        let conn = self.db.conn().await?;
        if !*written {
            cursor::halt(&conn, self.network(), reason).await?;
            *written = true;
            return Ok(false);
        }
        Ok(cursor::head(&conn, self.network()).await?.is_none_or(|head| head.halted.is_none()))
    }

    /// One fetch, checked. `parent` is the hash below the range, where it is known.
    async fn fetch(
        &self,
        lane: &Lane,
        range: HeightRange,
        mode: FetchMode,
        parent: Option<BlockHash>,
    ) -> Result<RawBatch, ChainError> {
        let started = std::time::Instant::now();
        let batch = lane.adapter.fetch(range, mode).await?;
        stage_time::count("fetch", started);
        match step::batch_fault(range, &batch, parent) {
            None => Ok(batch),
            Some(reason) => Err(ChainError::Inconsistent {
                network: self.slug().to_owned(),
                what: format!("blocks {range}"),
                reason,
            }),
        }
    }

    /// Uploads, then makes sure that the partitions exist: everything that must not happen inside the
    /// transaction.
    async fn prepare(&self, batch: RawBatch) -> Result<Prepared, IngestError> {
        let covered = batch.covered;
        let mut conn = self.db.conn().await?;
        self.partitions.ensure_raw(&mut conn, self.network(), covered).await?;
        drop(conn);
        let started = std::time::Instant::now();
        let prepared = self.writer.prepare(batch).await?;
        stage_time::count("encode raw rows", started);
        Ok(prepared)
    }

    fn note_position(&self, next: Height, head: Option<&Head>) {
        let latest = head.map(|head| head.latest.height);
        self.metrics.position(next, latest);
        self.status.send_modify(|status| {
            status.next = Some(next);
            status.head = latest.or(status.head);
        });
    }

    fn set_state(&self, state: &'static str) {
        self.status.send_if_modified(|status| std::mem::replace(&mut status.state, state) != state);
    }

    /// Writes a handled error where an operator finds it. A database that is away must not hide the error.
    async fn report(&self, error: &IngestError, severity: Severity) {
        let height = self.status.borrow().next.unwrap_or_default();
        self.report_at(height, &error.to_string(), severity).await;
    }

    async fn report_at(&self, height: Height, message: &str, severity: Severity) {
        self.metrics.error();
        self.status.send_modify(|status| status.last_error = Some(message.to_owned()));
        tracing::warn!(network = %self.network(), height = height.0, error = message, action = "ingest", "Ingestion met an error.");
        let error = IndexingError {
            worker: WORKER,
            network: self.network(),
            height,
            tx: None,
            severity,
            message,
            raw_data: None,
            raw_ref: None,
        };
        let written = match self.db.conn().await {
            Ok(conn) => errors::record(&conn, &error).await,
            Err(error) => Err(error),
        };
        if let Err(unwritten) = written {
            tracing::warn!(network = %self.network(), error = %unwritten, action = "record_error", "Cannot record the error.");
        }
    }

    async fn pause(&self, stop: &CancellationToken, wait: Duration) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(wait) => {}
        }
    }

    /// A pause between the two poll intervals.
    fn poll_interval(&self) -> Duration {
        let (min, max) = (self.options.poll_interval_min, self.options.poll_interval_max);
        min + max.saturating_sub(min).mul_f64(rand::random_range(0.0..=1.0))
    }
}

/// Exponential, with full jitter: workers that failed together do not come back together.
struct Backoff {
    min: Duration,
    max: Duration,
    failures: u32,
}

impl Backoff {
    fn new(options: &IngestOptions) -> Self {
        Self { min: options.backoff_min, max: options.backoff_max, failures: 0 }
    }
    fn next(&mut self) -> Duration {
        let ceiling = self.min.saturating_mul(2_u32.saturating_pow(self.failures.min(16))).min(self.max);
        self.failures = self.failures.saturating_add(1);
        ceiling.mul_f64(rand::random_range(0.1..=1.0))
    }
    fn reset(&mut self) {
        self.failures = 0;
    }
}
