//! How fast it goes: append → relay → engine → handler with an effect, beside the engine alone, all in one
//! run. Then each stage alone, which says where the time goes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use serde_json::json;
use tidemark_model::envelope::Draft;
use tidemark_store::outbox::{Emitter, EmitterOptions, Partitions};
use tidemark_store::{Db, Tx, buslog};
use time::OffsetDateTime;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::dispatch::{Accepts, Delivered, Dispatcher, DispatcherOptions, HandleError, Handler};
use crate::registry::Registry;
use crate::relay::{Relay, RelayHandle, RelayOptions};
use crate::tail::Tails;
use crate::{Bus, BusError, Numbered};

/// What was measured, in events per second.
#[derive(Debug, Clone, PartialEq)]
pub struct BusBench {
    /// The engine.
    pub engine: &'static str,
    /// Events that went all the way while all stages ran.
    pub events: u64,
    /// How long that took.
    pub elapsed: Duration,
    /// Append to effect, all stages at once.
    pub events_per_second: f64,
    /// The engine alone with the same texts: publishing for a broker, inserting into a bare table for
    /// Postgres.
    pub bare_events_per_second: f64,
    /// Appending alone.
    pub append_events_per_second: f64,
    /// The relay alone: numbering and publishing what was appended.
    pub relay_events_per_second: f64,
    /// The handler alone: reading the engine, inbox, effect, position.
    pub consume_events_per_second: f64,
}

const HANDLER: &str = "bench";
/// Events of one appending transaction.
const APPEND: u64 = 500;
/// Appenders at once.
const APPENDERS: u64 = 2;
/// Most events of a stage alone.
const STAGE_EVENTS_MAX: u64 = 100_000;
/// Events of one publish of the engine alone; as large as the relay's.
const BARE_CHUNK: usize = 4_000;

const MAKE_TABLES: &str = "
    create table if not exists system.bench_effects (key text primary key, events bigint not null);
    create table if not exists system.bench_bare (seq bigint generated always as identity primary key, body text)";
const EFFECT: &str = "
    insert into system.bench_effects as b (key, events)
    select key, count(*) from unnest($1::text[]) as key group by key order by key
    on conflict (key) do update set events = b.events + excluded.events";
const EFFECTS: &str = "select coalesce(sum(events), 0)::bigint from system.bench_effects";
const BARE: &str = "insert into system.bench_bare (body) select body from unnest($1::text[]) as body";
const UNPUBLISHED: &str = "
    select coalesce(sum(next_pseq - 1), 0)::bigint,
           coalesce(sum(next_pseq - 1 - published_pseq), 0)::bigint from system.bus_partitions";

struct Counter;

#[async_trait]
impl Handler for Counter {
    fn kind(&self) -> &'static str {
        HANDLER
    }
    fn accepts(&self) -> &'static [Accepts] {
        &[Accepts { subject: "ledger.block.normalized", versions: &[1] }]
    }
    async fn apply(&self, tx: &Tx<'_>, batch: &[Delivered]) -> Result<(), HandleError> {
        let keys: Vec<&str> = batch.iter().map(|event| event.envelope.partition_key.as_str()).collect();
        tx.execute("count events", EFFECT, &[&keys]).await?;
        Ok(())
    }
}

/// What the stages share.
struct Stand {
    db: Db,
    bus: Arc<dyn Bus>,
    tails: Arc<Tails>,
    registry: Arc<Registry>,
    emitter: Emitter,
    /// Events appended so far.
    appended: u64,
}

/// Sends `events` events through a fresh, migrated database and the engine.
pub async fn bench_bus(
    db: Db,
    bus: Arc<dyn Bus>,
    tails: Arc<Tails>,
    registry: Arc<Registry>,
    events: u64,
) -> Result<BusBench, BusError> {
    let conn = db.conn().await?;
    conn.batch("make tables for the benchmark", MAKE_TABLES).await?;
    buslog::ensure_partitions(&conn).await?;
    drop(conn);
    let options = EmitterOptions { partitions: Partitions::default(), ..EmitterOptions::default() };
    let emitter = Emitter::new(options, registry.clone());
    let mut stand = Stand { db, bus, tails, registry, emitter, appended: 0 };
    let few = (events / 10).clamp(APPEND * APPENDERS, STAGE_EVENTS_MAX) / APPENDERS * APPENDERS;
    let bare = stand.bare(few).await?;

    let started = Instant::now();
    stand.append(few, None).await?;
    let append = rate(few, started.elapsed());
    let started = Instant::now();
    let relay = stand.run_relay();
    stand.published().await?;
    let relayed = rate(few, started.elapsed());
    let started = Instant::now();
    let dispatcher = stand.run_dispatcher(&relay);
    stand.handled().await?;
    let consume = rate(few, started.elapsed());

    let started = Instant::now();
    let events = events / APPENDERS * APPENDERS;
    stand.append(events, relay.wake.clone()).await?;
    stand.handled().await?;
    let elapsed = started.elapsed();
    dispatcher.stop(&stand).await?;
    relay.stop(&stand).await?;
    Ok(BusBench {
        engine: stand.bus.engine(),
        events,
        elapsed,
        events_per_second: rate(events, elapsed),
        bare_events_per_second: bare,
        append_events_per_second: append,
        relay_events_per_second: relayed,
        consume_events_per_second: consume,
    })
}

/// A stage at work.
struct Working {
    tasks: JoinSet<Result<(), BusError>>,
    stop: CancellationToken,
    wake: Option<RelayHandle>,
}

impl Working {
    async fn stop(mut self, stand: &Stand) -> Result<(), BusError> {
        self.stop.cancel();
        while let Some(ended) = self.tasks.join_next().await {
            ended.map_err(|error| BusError::engine(stand.bus.engine(), "stop", error))??;
        }
        Ok(())
    }
}

impl Stand {
    fn run_relay(&self) -> Working {
        let relay =
            Relay::new(self.db.clone(), self.bus.clone(), self.tails.clone(), RelayOptions::default());
        let (stop, wake) = (CancellationToken::new(), relay.handle());
        let mut tasks = JoinSet::new();
        let token = stop.clone();
        tasks.spawn(async move { relay.run(token).await });
        Working { tasks, stop, wake: Some(wake) }
    }

    fn run_dispatcher(&self, relay: &Working) -> Working {
        let options = DispatcherOptions { relay: relay.wake.clone(), ..DispatcherOptions::default() };
        let dispatcher = Dispatcher::new(self.db.clone(), self.bus.clone(), self.registry.clone(), options)
            .with(Arc::new(Counter));
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        let token = stop.clone();
        tasks.spawn(async move { dispatcher.run(token).await });
        Working { tasks, stop, wake: None }
    }

    /// Waits until everything appended has its effect.
    async fn handled(&self) -> Result<(), BusError> {
        let wanted = i64::try_from(self.appended).unwrap_or(i64::MAX);
        let conn = self.db.conn().await?;
        while conn.query_one("count effects", EFFECTS, &[]).await?.get::<_, i64>(0) < wanted {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Waits until everything appended has its number and the engine's acknowledgement.
    async fn published(&self) -> Result<(), BusError> {
        let wanted = i64::try_from(self.appended).unwrap_or(i64::MAX);
        let conn = self.db.conn().await?;
        loop {
            let row = conn.query_one("count published events", UNPUBLISHED, &[]).await?;
            let (numbered, left): (i64, i64) = (row.get(0), row.get(1));
            if numbered >= wanted && (left == 0 || self.bus.is_log()) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Appends `events` events by several appenders.
    async fn append(&mut self, events: u64, wake: Option<RelayHandle>) -> Result<(), BusError> {
        let mut appenders = JoinSet::new();
        let share = events / APPENDERS;
        for appender in 0..APPENDERS {
            let (db, emitter, wake) = (self.db.clone(), self.emitter.clone(), wake.clone());
            let first = self.appended + appender * share;
            appenders.spawn(async move { append(&db, &emitter, first..first + share, wake).await });
        }
        while let Some(ended) = appenders.join_next().await {
            ended.map_err(|error| BusError::engine(self.bus.engine(), "append", error))??;
        }
        self.appended += share * APPENDERS;
        Ok(())
    }

    /// The engine alone.
    async fn bare(&self, count: u64) -> Result<f64, BusError> {
        let mut events = Vec::new();
        for number in 1..=count {
            let draft = draft(number);
            let envelope = self.emitter.envelope(&draft).map_err(misuse)?;
            events.push(Numbered {
                pseq: i64::try_from(number).unwrap_or(i64::MAX),
                stream: "analytics".to_owned(), // Nobody else's.
                part: 0,
                event_id: Uuid::from_u128(u128::from(draft.event_id)),
                body: Bytes::from(serde_json::to_vec(&envelope).expect("an envelope has only text keys")),
            });
        }
        let started = Instant::now();
        for chunk in events.chunks(BARE_CHUNK) {
            if self.bus.is_log() {
                self.insert_bare(chunk).await?;
            } else {
                self.bus.publish(chunk).await?;
            }
        }
        Ok(rate(count, started.elapsed()))
    }

    async fn insert_bare(&self, events: &[Numbered]) -> Result<(), BusError> {
        let texts: Vec<&str> =
            events.iter().map(|event| std::str::from_utf8(&event.body).expect("JSON is text")).collect();
        self.db.conn().await?.execute("insert bare texts", BARE, &[&texts]).await?;
        Ok(())
    }
}

fn rate(events: u64, elapsed: Duration) -> f64 {
    f64::from(u32::try_from(events).unwrap_or(u32::MAX)) / elapsed.as_secs_f64().max(0.001)
}

fn misuse(error: impl std::fmt::Display) -> BusError {
    BusError::Misuse { what: error.to_string(), hint: "the benchmark cannot run" }
}

async fn append(
    db: &Db,
    emitter: &Emitter,
    numbers: std::ops::Range<u64>,
    wake: Option<RelayHandle>,
) -> Result<(), BusError> {
    let mut conn = db.conn().await?;
    let mut next = numbers.start;
    while next < numbers.end {
        let end = (next + APPEND).min(numbers.end);
        let drafts: Vec<Draft> = (next..end).map(draft).collect();
        let tx = conn.tx().await?;
        emitter.append(&tx, &drafts).await.map_err(misuse)?;
        tx.commit().await?;
        if let Some(relay) = &wake {
            relay.wake();
        }
        next = end;
    }
    Ok(())
}

fn draft(number: u64) -> Draft {
    let subject = "ledger.block.normalized.v1".parse().expect("a subject of ours");
    let payload = json!({
        "network_id": 1,
        "height": number,
        "hash": format!("0x{number:064x}"),
        "events": 1,
    });
    let key = format!("key-{}", number % 96);
    Draft::derived(subject, &number.to_string(), key, payload, OffsetDateTime::now_utc())
}
