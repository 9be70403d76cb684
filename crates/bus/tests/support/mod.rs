//! What the tests of the backbone share: a database, an emitter, a handler that writes down what it did.
#![allow(dead_code, unreachable_pub, reason = "every test file uses its own part")]

pub mod bench;
pub mod server;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use async_trait::async_trait;
use tidemark_bus::dispatch::{Accepts, Delivered, Dispatcher, DispatcherOptions, HandleError, Handler};
use tidemark_bus::postgres::PostgresBus;
use tidemark_bus::registry::Registry;
use tidemark_bus::relay::{Relay, RelayHandle, RelayOptions};
use tidemark_bus::tail::Tails;
use tidemark_bus::{Bus, BusError};
use tidemark_model::envelope::Draft;
use tidemark_model::redact::RedactedUrl;
use tidemark_model::subject::Subject;
use tidemark_store::outbox::{Emitter, EmitterOptions, OutboxError, Partitions};
use tidemark_store::{Db, DbOptions, StoreError, Tx, Verdict};
use tidemark_testkit::pg::TestDb;
use time::OffsetDateTime;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// The stream all tests use; four partitions keep them quick.
pub const STREAM: &str = "ledger";
pub const PARTS: u16 = 4;
/// How long a condition may take.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub struct Rig {
    pub url: String,
    pub db: Db,
    pub registry: Arc<Registry>,
    pub emitter: Emitter,
    pub tails: Arc<Tails>,
    pub bus: Arc<dyn Bus>,
}

pub fn partitions() -> Partitions {
    Partitions::with_default(PARTS)
}

pub fn open(url: &str) -> anyhow::Result<Db> {
    let options = DbOptions { connections_max: 16, ..DbOptions::default() };
    Ok(Db::open(&RedactedUrl::parse(url)?, &options)?)
}

impl Rig {
    /// On the engine without a server.
    pub async fn postgres() -> anyhow::Result<Self> {
        Self::with(|db, tails| Arc::new(PostgresBus::new(db, tails))).await
    }
    /// On any engine.
    pub async fn with(engine: impl FnOnce(Db, Arc<Tails>) -> Arc<dyn Bus>) -> anyhow::Result<Self> {
        let test = TestDb::new().await?;
        let mut rig = Self::on(&test.url)?;
        rig.bus = engine(rig.db.clone(), rig.tails.clone());
        rig.make_tables().await?;
        Ok(rig)
    }
    /// On a database that is there, without a server of its own.
    pub fn on(url: &str) -> anyhow::Result<Self> {
        let db = open(url)?;
        let tails = Arc::new(Tails::new(db.clone()));
        let registry = Arc::new(Registry::builtin());
        let options = EmitterOptions { partitions: partitions(), ..EmitterOptions::default() };
        let emitter = Emitter::new(options, registry.clone());
        let bus = Arc::new(PostgresBus::new(db.clone(), tails.clone()));
        Ok(Self { url: url.to_owned(), db, registry, emitter, tails, bus })
    }
    pub async fn make_tables(&self) -> anyhow::Result<()> {
        let sql = "create table effects (place bigserial, handler text, key text, value bigint, pseq bigint,
                                         part int, replay boolean)";
        self.sql(sql).await
    }
    /// Emits `(key, value)` pairs in one transaction.
    pub async fn emit(&self, pairs: &[(&str, i64)]) -> anyhow::Result<()> {
        let drafts: Vec<Draft> = pairs.iter().map(|(key, value)| draft(key, *value)).collect();
        self.emit_drafts(&drafts).await
    }
    /// Repeats the transaction when the database was away, as a producer does: the ids stay the same.
    pub async fn emit_drafts(&self, drafts: &[Draft]) -> anyhow::Result<()> {
        let started = Instant::now();
        loop {
            match self.try_emit(drafts).await {
                Err(error) if is_transient(&error) && started.elapsed() < PATIENCE => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                other => return other,
            }
        }
    }
    async fn try_emit(&self, drafts: &[Draft]) -> anyhow::Result<()> {
        let mut conn = self.db.conn().await?;
        let tx = conn.tx().await?;
        self.emitter.append(&tx, drafts).await?;
        tx.commit().await?;
        Ok(())
    }
    pub fn relay(&self) -> Relay {
        Relay::new(self.db.clone(), self.bus.clone(), self.tails.clone(), relay_options())
    }
    pub fn dispatcher(&self, handler: Arc<dyn Handler>) -> Dispatcher {
        self.dispatcher_with(handler, dispatcher_options())
    }
    pub fn dispatcher_with(&self, handler: Arc<dyn Handler>, options: DispatcherOptions) -> Dispatcher {
        Dispatcher::new(self.db.clone(), self.bus.clone(), self.registry.clone(), options).with(handler)
    }
    pub fn run_relay(&self) -> Running {
        let relay = self.relay();
        let handle = relay.handle();
        let mut running = Running::start(move |stop| async move { relay.run(stop).await });
        running.relay = Some(handle);
        running
    }
    pub fn run_handler(&self, handler: Arc<dyn Handler>) -> Running {
        self.run_dispatcher(self.dispatcher(handler))
    }
    pub fn run_dispatcher(&self, dispatcher: Dispatcher) -> Running {
        Running::start(move |stop| async move { dispatcher.run(stop).await })
    }
    /// Waits until every position of `handler` is at its head and there are at least `events` events.
    pub async fn caught_up(&self, handler: &str, events: i64) -> anyhow::Result<()> {
        wait_for(&format!("{handler} to handle {events} events"), async || {
            let sql = "select coalesce(sum(c.pseq), 0)::bigint, coalesce(sum(b.next_pseq - 1), 0)::bigint
                       from system.consumer_positions c
                       left join system.bus_partitions b using (stream, part) where c.handler_kind = $1";
            let row = self.db.conn().await?.query_one("look", sql, &[&handler]).await?;
            let (done, head): (i64, i64) = (row.get(0), row.get(1));
            Ok(done == head && head >= events)
        })
        .await
    }
    /// Values per key in the order of effects.
    pub async fn effects(&self, handler: &str) -> anyhow::Result<BTreeMap<String, Vec<i64>>> {
        let conn = self.db.conn().await?;
        let rows = conn
            .query(
                "read effects",
                "select key, value from effects where handler = $1 order by place",
                &[&handler],
            )
            .await?;
        let mut effects: BTreeMap<String, Vec<i64>> = BTreeMap::new();
        for row in rows {
            effects.entry(row.get(0)).or_default().push(row.get(1));
        }
        Ok(effects)
    }
    /// Each key has exactly the values 1..=n, in order.
    pub async fn assert_once_in_order(&self, handler: &str, keys: &[String], n: i64) -> anyhow::Result<()> {
        let effects = self.effects(handler).await?;
        ensure!(effects.len() == keys.len(), "{} keys have effects, not {}", effects.len(), keys.len());
        let expected: Vec<i64> = (1..=n).collect();
        for key in keys {
            let found = &effects[key];
            ensure!(*found == expected, "key {key} saw {found:?}");
        }
        Ok(())
    }
    pub async fn count(&self, sql: &str) -> anyhow::Result<i64> {
        Ok(self.db.conn().await?.query_one("count", sql, &[]).await?.get(0))
    }
    pub async fn sql(&self, sql: &str) -> anyhow::Result<()> {
        // The chaos ends connections, this pool's among them: a statement that met one is sent again.
        for _ in 0..20 {
            match self.db.conn().await?.batch("run", sql).await {
                Err(error) if error.verdict() == tidemark_store::Verdict::Retry => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                done => return Ok(done?),
            }
        }
        anyhow::bail!("no connection lived long enough for {sql}")
    }
}

pub fn relay_options() -> RelayOptions {
    RelayOptions { lease_ttl: Duration::from_secs(2), ..RelayOptions::default() }
}

pub fn dispatcher_options() -> DispatcherOptions {
    DispatcherOptions {
        batch_max: 50,
        backoff_first: Duration::from_millis(1),
        backoff_max: Duration::from_millis(5),
        lease_ttl: Duration::from_secs(2),
        idle_wait: Duration::from_millis(200),
        partitions: partitions(),
        ..DispatcherOptions::default()
    }
}

pub fn keys(n: usize) -> Vec<String> {
    (0..n).map(|i| format!("key-{i}")).collect()
}

/// A small event whose height is `value`.
pub fn draft(key: &str, value: i64) -> Draft {
    Draft::derived(
        subject(),
        &format!("{key}:{value}"),
        key.to_owned(),
        serde_json::json!({"network_id": 1, "finalized_height": value}),
        OffsetDateTime::now_utc(),
    )
}

pub fn subject() -> Subject {
    "ledger.finality.advanced.v1".parse().expect("a subject")
}

/// Waits on a condition; fails with what it waited for.
pub async fn wait_for(
    what: &str,
    mut condition: impl AsyncFnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let started = Instant::now();
    loop {
        match condition().await {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) if is_transient(&error) => {}
            Err(error) => return Err(error),
        }
        ensure!(started.elapsed() < PATIENCE, "waited too long for {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The database was away for a moment.
fn is_transient(error: &anyhow::Error) -> bool {
    let store = error.downcast_ref::<StoreError>();
    let store = store.or_else(|| error.downcast_ref::<OutboxError>().and_then(OutboxError::store));
    store.is_some_and(|error| error.verdict() == Verdict::Retry)
}

/// A task and the way to end it: in order, or like `kill -9`.
pub struct Running {
    tasks: JoinSet<Result<(), BusError>>,
    stop: CancellationToken,
    pub relay: Option<RelayHandle>,
}

impl Running {
    pub fn start<F: Future<Output = Result<(), BusError>> + Send + 'static>(
        run: impl FnOnce(CancellationToken) -> F,
    ) -> Self {
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        tasks.spawn(run(stop.clone()));
        Self { tasks, stop, relay: None }
    }
    pub async fn stop(mut self) -> anyhow::Result<()> {
        self.stop.cancel();
        self.tasks.join_next().await.context("one task")??.context("it ended with an error")
    }
    /// Waits until it ends by itself.
    pub async fn ended(mut self) -> anyhow::Result<()> {
        self.tasks.join_next().await.context("one task")??.context("it ended with an error")
    }
    /// Ends it wherever it is.
    pub async fn kill(mut self) {
        self.tasks.abort_all();
        while self.tasks.join_next().await.is_some() {}
    }
}

/// Writes every event into `effects`; can be told to fail.
#[derive(Default)]
pub struct Recorder {
    /// Fails on this (key, value) while set.
    pub poison: std::sync::Mutex<Option<(String, i64)>>,
    /// Fails after writing, so that only the rollback saves us.
    pub calls: AtomicU64,
    pub slow: Option<Duration>,
    pub panics: AtomicBool,
    pub defer: AtomicBool,
    pub never: AtomicBool,
    pub acts_outside: bool,
}

pub const RECORDER: &str = "recorder";

#[async_trait]
impl Handler for Recorder {
    fn kind(&self) -> &'static str {
        RECORDER
    }
    fn accepts(&self) -> &'static [Accepts] {
        &[Accepts { subject: "ledger.finality.advanced", versions: &[1] }]
    }
    fn side_effects(&self) -> bool {
        self.acts_outside
    }
    async fn apply(&self, tx: &Tx<'_>, batch: &[Delivered]) -> Result<(), HandleError> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        for event in batch {
            let value = event.envelope.payload["finalized_height"].as_i64().expect("an integer");
            let key = &event.envelope.partition_key;
            let sql = "insert into effects (handler, key, value, pseq, part, replay) values ($1, $2, $3, $4, $5, $6)";
            tx.execute(
                "write an effect",
                sql,
                &[&RECORDER, key, &value, &event.pseq, &i32::from(event.part), &event.replay],
            )
            .await?;
            if let Some(slow) = self.slow {
                tokio::time::sleep(slow).await;
            }
            let hit = self.poison.lock().expect("held shortly").as_ref() == Some(&(key.clone(), value));
            if hit && self.defer.load(Ordering::SeqCst) {
                return Err(HandleError::Defer(Duration::from_millis(5)));
            }
            assert!(!(hit && self.panics.load(Ordering::SeqCst)), "told to panic");
            if hit && self.never.load(Ordering::SeqCst) {
                return Err(HandleError::poison("told to refuse for ever"));
            }
            if hit {
                return Err(HandleError::retry("told to fail"));
            }
        }
        Ok(())
    }
}
