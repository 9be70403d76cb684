//! The dispatcher: hands events to handlers, one batch in flight per (handler, stream, part). Effect, inbox
//! and position commit together; a duplicate changes nothing, a crash anywhere repeats the whole batch. A
//! failing event is tried alone, up to ten deliveries; then its key is parked in the DLQ and the rest of the
//! partition goes on (pitfalls B24, B27, B28). Processes that run the same handler share its partitions.

use std::collections::{BTreeMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use serde_json::{Value, json};
use tidemark_model::envelope::Envelope;
use tidemark_store::buslog::{self, Claimant, ConsumerLag, HeldPosition, PositionLease};
use tidemark_store::dlq::{self, Kind, NewDeadLetter};
use tidemark_store::inbox::{self, InboxRow};
use tidemark_store::outbox::{self, OutboxError, Partitions};
use tidemark_store::presence::Presence;
use tidemark_store::{Db, StoreError, Tx, Verdict};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::news::News;
use crate::registry::Registry;
use crate::relay::RelayHandle;
use crate::share::{Look, share};
use crate::{Bus, BusError, chain_of, crash, metric};

/// A subject a handler takes, without version, and the versions it understands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accepts {
    /// `service.aggregate.event`
    pub subject: &'static str,
    /// Versions.
    pub versions: &'static [u32],
}

/// Does something with events, inside the transaction in which the dispatcher records it.
#[async_trait]
pub trait Handler: Send + Sync + 'static {
    /// Its name in inbox and positions. Changing it is a new consumer.
    fn kind(&self) -> &'static str;
    /// What it takes; all of one stream.
    fn accepts(&self) -> &'static [Accepts];
    /// True if it acts on the outside world: it refuses replayed events.
    fn side_effects(&self) -> bool {
        false
    }
    /// How many of the first events of `waiting` (never empty) go into one transaction, at least one. Fewer than all
    /// where somebody waits for the first ones, and the others would keep them waiting.
    fn first_of(&self, waiting: &[Delivered]) -> usize {
        waiting.len()
    }
    /// Slow or outside work for `batch`, before the transaction. It may run twice, or for nothing; its
    /// result stays in the handler. `later`: what has come behind the batch, and is handed over after it.
    async fn prepare(&self, _batch: &[Delivered], _later: &[Delivered]) -> Result<(), HandleError> {
        Ok(())
    }
    /// Applies `batch`: in order, of one partition, none seen before. No network calls. An error rolls
    /// everything back; retries are the dispatcher's.
    async fn apply(&self, tx: &Tx<'_>, batch: &[Delivered]) -> Result<(), HandleError>;
}

/// An event handed to a handler.
#[derive(Debug, Clone, PartialEq)]
pub struct Delivered {
    /// The event.
    pub envelope: Envelope,
    /// Its stream.
    pub stream: String,
    /// Its partition.
    pub part: u16,
    /// Its number.
    pub pseq: i64,
    /// Handed out again on request.
    pub replay: bool,
}

impl Delivered {
    /// The envelope's id as a UUID.
    pub fn event_id(&self) -> Uuid {
        Uuid::from_u128(u128::from(self.envelope.event_id))
    }
    pub(crate) fn inbox_row(&self) -> InboxRow {
        let payload = &self.envelope.payload;
        let block = payload.get("block_number").or_else(|| payload.get("height"));
        InboxRow {
            event_id: self.event_id(),
            event_day: inbox::event_day(self.envelope.event_id.timestamp_ms()),
            pseq: self.pseq,
            partition_key: self.envelope.partition_key.clone(),
            block_number: block.and_then(Value::as_i64),
        }
    }
    fn subject(&self) -> String {
        format!("{}.v{}", self.envelope.event_type, self.envelope.event_version)
    }
}

/// The cause of a handler's failure.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Why a handler did not apply a batch.
#[derive(Debug, thiserror::Error)]
pub enum HandleError {
    /// It may work later; counts as a failed delivery.
    #[error("{reason}")]
    Retry {
        /// What went wrong.
        reason: String,
        /// Why.
        source: Option<Cause>,
    },
    /// It never will; the key is parked at once.
    #[error("{reason}")]
    Poison {
        /// What is wrong with the event.
        reason: String,
        /// Why.
        source: Option<Cause>,
    },
    /// Not yet: something else must happen first. Tried again after this time; no delivery is counted.
    #[error("not yet: to be tried again in {0:?}")]
    Defer(Duration),
    /// The database. A verdict of Retry or Fenced is not the event's fault and counts nothing.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl HandleError {
    /// It may work later.
    pub fn retry(reason: impl Into<String>) -> Self {
        Self::Retry { reason: reason.into(), source: None }
    }
    /// It never will.
    pub fn poison(reason: impl Into<String>) -> Self {
        Self::Poison { reason: reason.into(), source: None }
    }
}

impl From<OutboxError> for HandleError {
    fn from(error: OutboxError) -> Self {
        match error {
            OutboxError::Store(error) => Self::Store(error),
            other => Self::Retry { reason: "cannot emit".to_owned(), source: Some(Box::new(other)) },
        }
    }
}

/// How the dispatcher works.
#[derive(Debug, Clone)]
pub struct DispatcherOptions {
    /// This process, as leases show it.
    pub owner: String,
    /// Most events of one transaction.
    pub batch_max: usize,
    /// Deliveries before an event goes to the DLQ (S2 §14).
    pub deliveries_max: u32,
    /// Pause after the first failed delivery; doubles.
    pub backoff_first: Duration,
    /// Longest pause between two deliveries.
    pub backoff_max: Duration,
    /// How long a lease lives without a sign of its owner.
    pub lease_ttl: Duration,
    /// How long a consumer waits for events before it looks around.
    pub idle_wait: Duration,
    /// Partition counts, as the emitter has them.
    pub partitions: Partitions,
    /// The relay of this process: woken after every batch, as handlers usually emit.
    pub relay: Option<RelayHandle>,
    /// Told after every batch, too: its effect can be read.
    pub news: News,
    /// Shows that this process lives; none is one of its own.
    pub presence: Option<Arc<Presence>>,
}

impl Default for DispatcherOptions {
    fn default() -> Self {
        Self {
            owner: format!("dispatcher-{}-{}", std::process::id(), Uuid::new_v4().simple()),
            batch_max: 500,
            deliveries_max: 10,
            backoff_first: Duration::from_millis(200),
            backoff_max: Duration::from_secs(30),
            lease_ttl: Duration::from_secs(15),
            idle_wait: Duration::from_secs(1),
            partitions: Partitions::default(),
            relay: None,
            news: News::default(),
            presence: None,
        }
    }
}

/// Longest pause between two looks at who works on what.
const LOOK_EVERY_MAX: Duration = Duration::from_secs(1);
/// Lag is measured this often.
const LAG_EVERY: Duration = Duration::from_secs(5);
/// S2 §15.
const LAG_THRESHOLDS_SECONDS: [f64; 3] = [60.0, 300.0, 1_800.0];

/// Runs handlers.
pub struct Dispatcher {
    shared: Arc<Shared>,
    handlers: Vec<Arc<dyn Handler>>,
}

struct Shared {
    db: Db,
    bus: Arc<dyn Bus>,
    registry: Arc<Registry>,
    options: DispatcherOptions,
    presence: Arc<Presence>,
    /// Leases this process holds; one statement renews them all.
    held: Mutex<BTreeMap<(&'static str, String, u16), i64>>,
}

impl std::fmt::Debug for Dispatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dispatcher").field("options", &self.shared.options).finish_non_exhaustive()
    }
}

/// The stream of a handler: the first token of its subjects.
pub fn stream_of(handler: &dyn Handler) -> Result<&'static str, BusError> {
    let mut streams = handler.accepts().iter().filter_map(|accepts| accepts.subject.split('.').next());
    let refuse = |hint| BusError::Misuse { what: format!("handler {} cannot be run", handler.kind()), hint };
    let first = streams.next().ok_or_else(|| refuse("it accepts no subject"))?;
    if streams.any(|stream| stream != first) {
        return Err(refuse("its subjects are of several streams: make one handler of each"));
    }
    Ok(first)
}

impl Dispatcher {
    /// A dispatcher without handlers.
    pub fn new(db: Db, bus: Arc<dyn Bus>, registry: Arc<Registry>, options: DispatcherOptions) -> Self {
        let presence = match &options.presence {
            Some(shared) => Arc::clone(shared),
            None => Arc::new(Presence::new(db.clone(), &options.owner)),
        };
        let shared = Shared { db, bus, registry, options, presence, held: Mutex::default() };
        Self { shared: Arc::new(shared), handlers: Vec::new() }
    }

    /// The same with one more handler.
    #[must_use]
    pub fn with(mut self, handler: Arc<dyn Handler>) -> Self {
        self.handlers.push(handler);
        self
    }

    /// Records handlers and their positions, so that retention keeps what they need. `run` does it too.
    pub async fn declare(&self) -> Result<(), BusError> {
        for handler in &self.handlers {
            self.shared.declare(handler.as_ref()).await?;
        }
        Ok(())
    }

    /// Works until `stop`; then finishes the batches in flight and gives the leases back.
    pub async fn run(self, stop: CancellationToken) -> Result<(), BusError> {
        self.declare_patiently(&stop).await?;
        let mut lanes = JoinSet::new();
        let inner = stop.child_token();
        for handler in &self.handlers {
            let crew = Crew {
                shared: Arc::clone(&self.shared),
                stream: stream_of(handler.as_ref())?,
                handler: Arc::clone(handler),
                stop: inner.clone(),
                lanes: JoinSet::new(),
                running: BTreeMap::new(),
                joined: None,
            };
            lanes.spawn(crew.run());
        }
        let keeper = Arc::clone(&self.shared);
        let token = inner.clone();
        lanes.spawn(async move {
            keeper.keep(&token).await;
            Ok(())
        });
        let observer = Arc::clone(&self.shared);
        let token = inner.clone();
        lanes.spawn(async move {
            observer.observe(&token).await;
            Ok(())
        });
        let mut outcome = Ok(());
        while let Some(ended) = lanes.join_next().await {
            let ended = ended.unwrap_or_else(|panic| {
                Err(BusError::Misuse {
                    what: format!("a dispatcher task ended: {panic}"),
                    hint: "this is a bug",
                })
            });
            if ended.is_err() && outcome.is_ok() {
                outcome = ended;
                inner.cancel();
            }
        }
        outcome
    }

    async fn declare_patiently(&self, stop: &CancellationToken) -> Result<(), BusError> {
        let mut wait = Duration::from_millis(100);
        loop {
            match self.declare().await {
                Err(BusError::Store(error)) if error.verdict() == Verdict::Retry && !stop.is_cancelled() => {
                    tracing::warn!(%error, action = "declare_consumers", "The database is away.");
                    pause(wait, stop).await;
                    wait = (wait * 2).min(Duration::from_secs(5));
                }
                other => return other,
            }
        }
    }
}

/// Sleeps, or ends early when told to stop.
async fn pause(wait: Duration, stop: &CancellationToken) {
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = tokio::time::sleep(wait) => {}
    }
}

impl Shared {
    async fn declare(&self, handler: &dyn Handler) -> Result<(), BusError> {
        let stream = stream_of(handler)?;
        let parts = self.options.partitions.of(stream);
        let subjects: Vec<String> = handler
            .accepts()
            .iter()
            .flat_map(|accepts| {
                accepts.versions.iter().map(|version| format!("{}.v{version}", accepts.subject))
            })
            .collect();
        self.registry.warn_missing(subjects.iter().map(String::as_str));
        let mut conn = self.db.conn().await?;
        buslog::ensure_partitions(&conn).await?;
        let tx = conn.tx().await?;
        outbox::declare_stream(&tx, stream, parts).await.map_err(|error| match error {
            OutboxError::Store(error) => BusError::Store(error),
            other => BusError::Misuse {
                what: other.to_string(),
                hint: "a stream's partition count is part of its identity",
            },
        })?;
        buslog::declare_consumer(&tx, handler.kind(), stream, parts, &subjects, handler.side_effects())
            .await?;
        tx.commit().await?;
        Ok(())
    }

    fn leases(&self) -> Vec<HeldPosition> {
        let held = self.held.lock().expect("no panic while held");
        held.iter()
            .map(|((handler, stream, part), epoch)| HeldPosition {
                handler: (*handler).to_owned(),
                stream: stream.clone(),
                part: *part,
                epoch: *epoch,
            })
            .collect()
    }

    /// Renews all leases of this process.
    async fn keep(&self, stop: &CancellationToken) {
        while !stop.is_cancelled() {
            pause(self.options.lease_ttl / 3, stop).await;
            self.presence.key().await; // Taken again if its connection was lost.
            let leases = self.leases();
            let renewed = async {
                buslog::renew_positions(&self.db.conn().await?, &leases, self.options.lease_ttl).await
            };
            if let Err(error) = renewed.await {
                tracing::warn!(%error, action = "renew_leases", "Leases were not renewed.");
            }
        }
    }

    /// Measures lag and DLQ depth; says each crossing of a threshold once.
    async fn observe(&self, stop: &CancellationToken) {
        let mut crossed: BTreeMap<(String, String, u16), usize> = BTreeMap::new();
        while !stop.is_cancelled() {
            let measured = async {
                let conn = self.db.conn().await?;
                Ok::<_, StoreError>((buslog::consumer_lags(&conn).await?, dlq::depths(&conn).await?))
            };
            match measured.await {
                Ok((lags, depths)) => {
                    report_lags(&lags, &mut crossed);
                    // An emptied DLQ must be seen to be empty.
                    let mut all: BTreeMap<String, u64> =
                        lags.into_iter().map(|lag| (lag.handler, 0)).collect();
                    all.extend(depths);
                    for (handler, depth) in all {
                        metrics::gauge!(metric::DLQ_DEPTH, "handler" => handler)
                            .set(f64::from(u32::try_from(depth).unwrap_or(u32::MAX)));
                    }
                }
                Err(error) => tracing::warn!(%error, action = "measure_lag", "Lag was not measured."),
            }
            pause(LAG_EVERY, stop).await;
        }
    }
}

fn report_lags(lags: &[ConsumerLag], crossed: &mut BTreeMap<(String, String, u16), usize>) {
    let mut behind: BTreeMap<(&str, &str), (i64, f64)> = BTreeMap::new();
    for lag in lags {
        let (messages, seconds) = behind.entry((&lag.handler, &lag.stream)).or_default();
        *messages += (lag.head - lag.pseq).max(0);
        *seconds = seconds.max(lag.lag_seconds);
        let now = thresholds_crossed(lag.lag_seconds);
        let before = crossed.insert((lag.handler.clone(), lag.stream.clone(), lag.part), now).unwrap_or(0);
        if now > before {
            tracing::warn!(
                handler = lag.handler,
                stream = lag.stream,
                part = lag.part,
                lag_seconds = lag.lag_seconds,
                lag_messages = lag.head - lag.pseq,
                threshold_seconds = LAG_THRESHOLDS_SECONDS[now - 1],
                action = "consumer_lag",
                "A consumer lags behind."
            );
        }
    }
    for ((handler, stream), (messages, seconds)) in behind {
        metrics::gauge!(metric::CONSUMER_LAG_MESSAGES, "handler" => handler.to_owned(), "stream" => stream.to_owned())
            .set(f64::from(i32::try_from(messages).unwrap_or(i32::MAX)));
        metrics::gauge!(metric::CONSUMER_LAG_SECONDS, "handler" => handler.to_owned(), "stream" => stream.to_owned())
            .set(seconds);
    }
}

/// How many of the thresholds a lag has crossed.
fn thresholds_crossed(lag_seconds: f64) -> usize {
    LAG_THRESHOLDS_SECONDS.iter().filter(|seconds| lag_seconds >= **seconds).count()
}

/// One handler's lanes in this process.
struct Crew {
    shared: Arc<Shared>,
    handler: Arc<dyn Handler>,
    stream: &'static str,
    stop: CancellationToken,
    lanes: JoinSet<(PositionLease, Ended)>,
    running: BTreeMap<u16, (i64, CancellationToken)>,
    /// When this process last said that it wants partitions.
    joined: Option<tokio::time::Instant>,
}

impl Crew {
    async fn run(mut self) -> Result<(), BusError> {
        let tick = (self.shared.options.lease_ttl / 3).min(LOOK_EVERY_MAX);
        while !self.stop.is_cancelled() {
            if let Err(error) = self.look().await {
                tracing::warn!(handler = self.handler.kind(), %error, action = "share_partitions", "Partitions were not shared out.");
            }
            let until = tokio::time::Instant::now() + tick;
            loop {
                tokio::select! {
                    biased;
                    () = self.stop.cancelled() => break,
                    Some(ended) = self.lanes.join_next() => self.ended(ended).await?,
                    () = tokio::time::sleep_until(until) => break,
                }
            }
        }
        while let Some(ended) = self.lanes.join_next().await {
            self.ended(ended).await?;
        }
        let left = async {
            let conn = self.shared.db.conn().await?;
            buslog::leave_members(&conn, self.handler.kind(), &self.shared.options.owner).await
        };
        if let Err(error) = left.await {
            tracing::debug!(%error, action = "leave_members", "The others will see it by themselves.");
        }
        Ok(())
    }

    /// Looks at who works on what and takes or gives partitions.
    async fn look(&mut self) -> Result<(), StoreError> {
        let (kind, options) = (self.handler.kind(), &self.shared.options);
        // The server is there before the sign of life is asked for: without one a lease runs out by time only.
        let conn = self.shared.db.conn().await?;
        let present = self.shared.presence.key().await;
        let by = Claimant { owner: &options.owner, ttl: options.lease_ttl, present };
        if self.joined.is_none_or(|at| at.elapsed() >= options.lease_ttl / 3) {
            buslog::join_members(&conn, kind, by).await?;
            self.joined = Some(tokio::time::Instant::now());
        }
        let members = buslog::members(&conn, kind).await?;
        let held = buslog::held_parts(&conn, kind, self.stream).await?;
        let running: BTreeMap<u16, i64> =
            self.running.iter().map(|(part, (epoch, _))| (*part, *epoch)).collect();
        let shares = share(&Look {
            handler: kind,
            me: &options.owner,
            parts: options.partitions.of(self.stream),
            members: &members,
            held: &held,
            running: &running,
        });
        for part in shares.lost.iter().chain(&shares.give) {
            if let Some((_, stop)) = self.running.get(part) {
                stop.cancel();
            }
        }
        for lease in buslog::claim_positions(&conn, kind, self.stream, &shares.claim, by).await? {
            self.start(lease);
        }
        Ok(())
    }

    fn start(&mut self, lease: PositionLease) {
        crash::point("dispatch.claimed");
        let lane = Lane {
            shared: Arc::clone(&self.shared),
            handler: Arc::clone(&self.handler),
            stream: self.stream,
            part: lease.part,
            stop: self.stop.child_token(),
        };
        self.shared.held.lock().expect("no panic while held").insert(lane.key(), lease.epoch);
        self.running.insert(lease.part, (lease.epoch, lane.stop.clone()));
        self.lanes.spawn(async move { (lease, lane.consume(lease).await) });
    }

    /// A lane has finished what it was at: its partition is given back.
    async fn ended(
        &mut self,
        ended: Result<(PositionLease, Ended), tokio::task::JoinError>,
    ) -> Result<(), BusError> {
        let (lease, ended) = ended.map_err(|panic| BusError::Misuse {
            what: format!("a lane ended: {panic}"),
            hint: "this is a bug",
        })?;
        let (kind, stream, part) = (self.handler.kind(), self.stream, lease.part);
        self.running.remove(&part);
        self.shared.held.lock().expect("no panic while held").remove(&(kind, stream.to_owned(), part));
        if matches!(ended, Ended::Fenced) {
            tracing::info!(
                handler = kind,
                stream,
                part,
                action = "lose_lease",
                "Another process took this partition over."
            );
            return Ok(());
        }
        crash::point("dispatch.give.before_release");
        let lease =
            HeldPosition { handler: kind.to_owned(), stream: stream.to_owned(), part, epoch: lease.epoch };
        let released = async { buslog::release_positions(&self.shared.db.conn().await?, &[lease]).await };
        if let Err(error) = released.await {
            tracing::debug!(%error, action = "release_leases", "The lease will run out by itself.");
        }
        Ok(())
    }
}

/// One handler on one partition.
struct Lane {
    shared: Arc<Shared>,
    handler: Arc<dyn Handler>,
    stream: &'static str,
    part: u16,
    stop: CancellationToken,
}

/// Why a batch was not applied.
enum Failure {
    /// Our own statements, or the database below the handler: not the event's fault.
    Store(StoreError),
    /// The position is behind what was read: somebody set it back.
    Rewound(i64),
    /// The handler.
    Handler(HandleError),
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// How a lease ended.
enum Ended {
    Stopped,
    Fenced,
}

impl Lane {
    fn key(&self) -> (&'static str, String, u16) {
        (self.handler.kind(), self.stream.to_owned(), self.part)
    }

    async fn consume(&self, lease: PositionLease) -> Ended {
        let mut position = lease.pseq;
        let mut wait = Duration::ZERO;
        loop {
            pause(wait, &self.stop).await;
            if self.stop.is_cancelled() {
                return Ended::Stopped;
            }
            match self.read(lease.epoch, &mut position).await {
                Ok(ended) => return ended,
                Err(error) => {
                    wait = (wait * 2).clamp(Duration::from_millis(100), Duration::from_secs(5));
                    tracing::warn!(handler = self.handler.kind(), stream = self.stream, part = self.part, %error, action = "consume", "Reading failed; it is tried again from the position.");
                }
            }
        }
    }

    /// Subscribes at `position` and handles what comes, until stopped, fenced or the engine fails.
    async fn read(&self, epoch: i64, position: &mut i64) -> Result<Ended, BusError> {
        let options = &self.shared.options;
        let mut consumer = self.shared.bus.subscribe(self.stream, self.part, *position).await?;
        loop {
            let received = tokio::select! {
                biased;
                () = self.stop.cancelled() => return Ok(Ended::Stopped),
                received = consumer.next(options.batch_max, options.idle_wait) => received?,
            };
            if received.is_empty() {
                continue;
            }
            let batch: Vec<Delivered> = received
                .into_iter()
                .map(|event| Delivered {
                    envelope: event.envelope,
                    stream: self.stream.to_owned(),
                    part: self.part,
                    pseq: event.pseq,
                    replay: false,
                })
                .collect();
            match self.handle(epoch, position, &batch).await {
                Handled::Done => {}
                Handled::Ended(ended) => return Ok(ended),
                Handled::Rewound => {
                    consumer = self.shared.bus.subscribe(self.stream, self.part, *position).await?;
                }
            }
        }
    }

    /// Handles all of `batch`: together if it goes, one by one where it fails.
    async fn handle(&self, epoch: i64, position: &mut i64, batch: &[Delivered]) -> Handled {
        let mut rest = batch;
        // Halves where it fails, which finds the event it is about, and doubles where it goes.
        let mut most = rest.len();
        let mut wait = Duration::ZERO;
        while let Some(first) = rest.first() {
            if self.stop.is_cancelled() {
                return Handled::Ended(Ended::Stopped);
            }
            let within = &rest[..most.clamp(1, rest.len())];
            let take = self.handler.first_of(within).clamp(1, within.len());
            let (now, later) = rest.split_at(take);
            let last = now.last().map_or(*position, |event| event.pseq);
            match self.apply(epoch, *position, now, later).await {
                Ok(()) => {
                    *position = last;
                    rest = later;
                    most = within.len() * 2;
                    wait = Duration::ZERO;
                }
                Err(Failure::Rewound(to)) => {
                    *position = to;
                    return Handled::Rewound;
                }
                Err(Failure::Store(error)) if error.verdict() == Verdict::Fenced => {
                    return Handled::Ended(Ended::Fenced);
                }
                Err(Failure::Store(error)) => {
                    wait = (wait * 2).clamp(Duration::from_millis(50), Duration::from_secs(5));
                    tracing::warn!(handler = self.handler.kind(), stream = self.stream, part = self.part, %error, wait_ms = wait.as_millis(), action = "apply", "The database did not take a batch.");
                    pause(wait, &self.stop).await;
                }
                Err(Failure::Handler(HandleError::Store(error))) if error.verdict() != Verdict::Fatal => {
                    wait = (wait * 2).clamp(Duration::from_millis(50), Duration::from_secs(5));
                    tracing::warn!(handler = self.handler.kind(), pseq = first.pseq, %error, action = "apply", "The database did not take an effect.");
                    pause(wait, &self.stop).await;
                }
                Err(Failure::Handler(_)) if take > 1 => most = take / 2,
                Err(Failure::Handler(HandleError::Defer(pause_for))) => pause(pause_for, &self.stop).await,
                Err(Failure::Handler(error)) => match self.failed(epoch, first, &error).await {
                    Ok(Next::Again(pause_for)) => pause(pause_for, &self.stop).await,
                    Ok(Next::Parked) => {
                        *position = last;
                        rest = later;
                        most = rest.len();
                    }
                    Err(error) if error.verdict() == Verdict::Fenced => return Handled::Ended(Ended::Fenced),
                    Err(error) => {
                        tracing::warn!(handler = self.handler.kind(), %error, action = "record_failure", "A failure was not recorded.");
                        pause(Duration::from_millis(250), &self.stop).await;
                    }
                },
            }
        }
        Handled::Done
    }

    /// One transaction: position, inbox, effect.
    async fn apply(
        &self,
        epoch: i64,
        expected: i64,
        batch: &[Delivered],
        later: &[Delivered],
    ) -> Result<(), Failure> {
        let (kind, stream, part) = (self.handler.kind(), self.stream, self.part);
        crash::point("dispatch.received");
        prepare_handler(self.handler.as_ref(), batch, later).await?;
        let mut conn = self.shared.db.conn().await?;
        let tx = conn.tx().await?;
        let position = buslog::lock_position(&tx, kind, stream, part, epoch).await?;
        if position < expected {
            return Err(Failure::Rewound(position));
        }
        // An unknown outcome of an earlier commit may have moved it.
        let fresh = batch.partition_point(|event| event.pseq <= position);
        let batch = &batch[fresh..];
        let Some(last) = batch.last() else {
            return Ok(());
        };
        let parked = dlq::parked(&tx, kind, stream, part).await?;
        let plan = plan(self.handler.accepts(), &self.shared.registry, &parked, batch);
        for (event, kind_of_letter, error) in &plan.letters {
            let chain = vec![error.clone()];
            bury(&tx, kind, event, *kind_of_letter, error, chain, 0).await?;
        }
        let rows: Vec<InboxRow> = plan.deliver.iter().map(|event| event.inbox_row()).collect();
        let due: HashSet<Uuid> = inbox::claim(&tx, kind, stream, part, &rows).await?.into_iter().collect();
        crash::point("dispatch.inbox.after");
        let count = due.len();
        if count == batch.len() {
            run_handler(self.handler.as_ref(), &tx, batch).await?;
        } else if count > 0 {
            let due: Vec<Delivered> = plan
                .deliver
                .iter()
                .filter(|event| due.contains(&event.event_id()))
                .map(|event| (*event).clone())
                .collect();
            run_handler(self.handler.as_ref(), &tx, &due).await?;
        }
        crash::point("dispatch.effect.after");
        buslog::move_position(&tx, kind, stream, part, epoch, last.pseq, self.shared.options.lease_ttl)
            .await?;
        crash::point("dispatch.position.after");
        tx.commit().await?;
        crash::point("dispatch.commit.after");
        if let Some(relay) = &self.shared.options.relay {
            relay.wake();
        }
        self.shared.options.news.tell();
        metrics::counter!(metric::EVENT_CONSUME_RATE, "handler" => kind)
            .increment(u64::try_from(count).unwrap_or(u64::MAX));
        Ok(())
    }

    /// Counts a failed delivery; parks the key when it was the last one.
    async fn failed(&self, epoch: i64, event: &Delivered, error: &HandleError) -> Result<Next, StoreError> {
        let options = &self.shared.options;
        let (kind, stream, part) = (self.handler.kind(), self.stream, self.part);
        let chain = chain_of(error);
        let mut conn = self.shared.db.conn().await?;
        let tx = conn.tx().await?;
        buslog::lock_position(&tx, kind, stream, part, epoch).await?;
        let text = chain.join(": ").replace('\0', "");
        let attempts = inbox::fail(&tx, kind, stream, part, &event.inbox_row(), &text).await?;
        let attempts = attempts.unwrap_or(options.deliveries_max);
        let poison = matches!(error, HandleError::Poison { .. });
        if !poison && attempts < options.deliveries_max {
            crash::point("dispatch.failure.before_commit");
            tx.commit().await?;
            crash::point("dispatch.failure.after_commit");
            let wait = backoff(options, attempts);
            tracing::warn!(handler = kind, stream, part, pseq = event.pseq, event_id = %event.envelope.event_id, attempts, error = text, wait_ms = wait.as_millis(), action = "deliver", "A delivery failed.");
            return Ok(Next::Again(wait));
        }
        bury(&tx, kind, event, Kind::Poison, &text, chain, attempts).await?;
        buslog::move_position(&tx, kind, stream, part, epoch, event.pseq, options.lease_ttl).await?;
        crash::point("dispatch.park.before_commit");
        tx.commit().await?;
        crash::point("dispatch.park.after_commit");
        tracing::error!(handler = kind, stream, part, pseq = event.pseq, event_id = %event.envelope.event_id, key = event.envelope.partition_key, attempts, error = text, action = "park_key", "An event went to the DLQ and its key is parked.");
        Ok(Next::Parked)
    }
}

enum Handled {
    Done,
    Rewound,
    Ended(Ended),
}

enum Next {
    Again(Duration),
    Parked,
}

/// Exponential with jitter, so that lanes do not come back together.
fn backoff(options: &DispatcherOptions, attempts: u32) -> Duration {
    let doubled = options.backoff_first.saturating_mul(1_u32 << attempts.saturating_sub(1).min(20));
    doubled.min(options.backoff_max).mul_f64(rand::random_range(0.75..=1.0))
}

/// Writes a dead letter unless the event was handled before, and parks its key.
async fn bury(
    tx: &Tx<'_>,
    handler: &str,
    event: &Delivered,
    kind: Kind,
    error: &str,
    chain: Vec<String>,
    attempts: u32,
) -> Result<(), StoreError> {
    let (stream, part) = (event.stream.as_str(), event.part);
    let row = event.inbox_row();
    if inbox::to_dlq(tx, handler, stream, part, std::slice::from_ref(&row), error).await?.is_empty() {
        return Ok(());
    }
    let letter = NewDeadLetter {
        event_id: row.event_id,
        topic: event.subject(),
        pseq: event.pseq,
        partition_key: row.partition_key.clone(),
        envelope: serde_json::to_value(&event.envelope).expect("an envelope has only text keys"),
        kind,
        error: error.to_owned(),
        chain,
        attempts,
        versions: json!({
            "tidemark": env!("CARGO_PKG_VERSION"),
            "eventVersion": event.envelope.event_version,
            "schemaUri": event.envelope.schema_uri,
            "producerCommit": event.envelope.source.commit,
        }),
    };
    dlq::insert(tx, handler, stream, part, &[letter]).await?;
    dlq::park(tx, handler, stream, part, &row.partition_key, event.pseq).await
}

/// What the handler does before the transaction.
pub(crate) async fn prepare_handler(
    handler: &dyn Handler,
    batch: &[Delivered],
    later: &[Delivered],
) -> Result<(), HandleError> {
    caught(handler.prepare(batch, later)).await
}

/// Runs the handler; a panic is a failed delivery and not the end of the process.
pub(crate) async fn run_handler(
    handler: &dyn Handler,
    tx: &Tx<'_>,
    batch: &[Delivered],
) -> Result<(), HandleError> {
    caught(handler.apply(tx, batch)).await
}

async fn caught(work: impl Future<Output = Result<(), HandleError>>) -> Result<(), HandleError> {
    match AssertUnwindSafe(work).catch_unwind().await {
        Ok(done) => done,
        Err(panic) => {
            let text = panic
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "no message".to_owned());
            Err(HandleError::retry(format!("the handler panicked: {text}")))
        }
    }
}

impl From<HandleError> for Failure {
    fn from(error: HandleError) -> Self {
        Self::Handler(error)
    }
}

/// What to do with each event of a batch.
struct Plan<'a> {
    deliver: Vec<&'a Delivered>,
    letters: Vec<(&'a Delivered, Kind, String)>,
}

/// Decides; touches nothing. Events nobody asked for only move the position.
fn plan<'a>(accepts: &[Accepts], registry: &Registry, parked: &[String], batch: &'a [Delivered]) -> Plan<'a> {
    let mut parked: HashSet<&str> = parked.iter().map(String::as_str).collect();
    let mut seen = HashSet::with_capacity(batch.len());
    let mut plan = Plan { deliver: Vec::with_capacity(batch.len()), letters: Vec::new() };
    for event in batch {
        let envelope = &event.envelope;
        let Some(accepted) = accepts.iter().find(|accepts| accepts.subject == envelope.event_type) else {
            continue;
        };
        // While two versions are published side by side each handler takes its own.
        let other_version = !accepted.versions.contains(&envelope.event_version);
        if other_version && registry.knows(&event.subject()) {
            continue;
        }
        if !seen.insert(envelope.event_id) {
            continue;
        }
        if parked.contains(envelope.partition_key.as_str()) {
            let error = "an earlier event of its key is in the DLQ".to_owned();
            plan.letters.push((event, Kind::Follower, error));
            continue;
        }
        match registry.validate(envelope) {
            Ok(()) => plan.deliver.push(event),
            Err(error) => {
                parked.insert(envelope.partition_key.as_str());
                plan.letters.push((event, Kind::Schema, error.to_string()));
            }
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lag_is_told_at_one_five_and_thirty_minutes() {
        for (seconds, crossed) in [(59.9, 0), (60.0, 1), (299.9, 1), (300.0, 2), (1_799.9, 2), (1_800.0, 3)] {
            assert_eq!(thresholds_crossed(seconds), crossed, "{seconds} s");
        }
    }
}
