//! How fast it goes: append → relay → engine → handler with an effect, beside the engine alone.

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
use crate::relay::{Relay, RelayOptions};
use crate::tail::Tails;
use crate::{Bus, BusError, Numbered};

/// What was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct BusBench {
    /// The engine.
    pub engine: &'static str,
    /// Events that went all the way.
    pub events: u64,
    /// How long that took.
    pub elapsed: Duration,
    /// Append to effect.
    pub events_per_second: f64,
    /// The engine alone: publishing for a broker, appending for Postgres.
    pub bare_events_per_second: f64,
}

const HANDLER: &str = "bench";
/// Events of one appending transaction.
const APPEND: u64 = 500;
/// Appenders at once.
const APPENDERS: u64 = 2;

const MAKE_TABLE: &str =
    "create table if not exists system.bench_effects (key text primary key, events bigint not null)";
const EFFECT: &str = "
    insert into system.bench_effects as b (key, events)
    select key, count(*) from unnest($1::text[]) as key group by key order by key
    on conflict (key) do update set events = b.events + excluded.events";
const EFFECTS: &str = "select coalesce(sum(events), 0)::bigint from system.bench_effects";

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

/// Sends `events` events through a fresh, migrated database and the engine.
pub async fn bench_bus(
    db: Db,
    bus: Arc<dyn Bus>,
    tails: Arc<Tails>,
    registry: Arc<Registry>,
    events: u64,
) -> Result<BusBench, BusError> {
    let conn = db.conn().await?;
    conn.batch("make a table for effects", MAKE_TABLE).await?;
    buslog::ensure_partitions(&conn).await?;
    let options = EmitterOptions { partitions: Partitions::default(), ..EmitterOptions::default() };
    let emitter = Emitter::new(options, registry.clone());
    let bare_count = (events / 10).clamp(APPEND * APPENDERS, 200_000);
    let bare = if bus.is_log() {
        let started = Instant::now();
        append(&db, &emitter, 0, bare_count).await?;
        rate(bare_count, started.elapsed())
    } else {
        publish_bare(bus.as_ref(), &emitter, bare_count).await?
    };
    let before = if bus.is_log() { bare_count } else { 0 };

    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let relay = Relay::new(db.clone(), bus.clone(), tails, RelayOptions::default());
    let wake = relay.handle();
    let token = stop.clone();
    tasks.spawn(async move { relay.run(token).await });
    let dispatcher = Dispatcher::new(db.clone(), bus.clone(), registry, DispatcherOptions::default())
        .with(Arc::new(Counter));
    let token = stop.clone();
    tasks.spawn(async move { dispatcher.run(token).await });
    wait_for(&db, before).await?;

    let started = Instant::now();
    let mut appenders = JoinSet::new();
    for appender in 0..APPENDERS {
        let (db, emitter, wake) = (db.clone(), emitter.clone(), wake.clone());
        appenders.spawn(async move {
            let share = events / APPENDERS;
            let appended = append(&db, &emitter, 1_000_000_000 * (appender + 1), share).await;
            wake.wake();
            appended
        });
    }
    while let Some(ended) = appenders.join_next().await {
        ended.map_err(|error| BusError::engine(bus.engine(), "append", error))??;
    }
    let sent = events / APPENDERS * APPENDERS;
    wait_for(&db, before + sent).await?;
    let elapsed = started.elapsed();
    stop.cancel();
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(|error| BusError::engine(bus.engine(), "stop", error))??;
    }
    Ok(BusBench {
        engine: bus.engine(),
        events: sent,
        elapsed,
        events_per_second: rate(sent, elapsed),
        bare_events_per_second: bare,
    })
}

fn rate(events: u64, elapsed: Duration) -> f64 {
    f64::from(u32::try_from(events).unwrap_or(u32::MAX)) / elapsed.as_secs_f64().max(0.001)
}

async fn wait_for(db: &Db, events: u64) -> Result<(), BusError> {
    let wanted = i64::try_from(events).unwrap_or(i64::MAX);
    let conn = db.conn().await?;
    while conn.query_one("count effects", EFFECTS, &[]).await?.get::<_, i64>(0) < wanted {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

async fn append(db: &Db, emitter: &Emitter, first: u64, count: u64) -> Result<(), BusError> {
    let mut conn = db.conn().await?;
    let mut next = first;
    while next < first + count {
        let end = (next + APPEND).min(first + count);
        let drafts: Vec<Draft> = (next..end).map(draft).collect();
        let tx = conn.tx().await?;
        emitter.append(&tx, &drafts).await.map_err(|error| BusError::Misuse {
            what: error.to_string(),
            hint: "the benchmark cannot run",
        })?;
        tx.commit().await?;
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

async fn publish_bare(bus: &dyn Bus, emitter: &Emitter, count: u64) -> Result<f64, BusError> {
    let mut events = Vec::new();
    for number in 1..=count {
        let draft = draft(number);
        let envelope = emitter.envelope(&draft).map_err(|error| BusError::Misuse {
            what: error.to_string(),
            hint: "the benchmark cannot run",
        })?;
        events.push(Numbered {
            pseq: i64::try_from(number).unwrap_or(i64::MAX),
            stream: "analytics".to_owned(), // Nobody else's.
            part: 0,
            event_id: Uuid::from_u128(u128::from(draft.event_id)),
            body: Bytes::from(serde_json::to_vec(&envelope).expect("an envelope has only text keys")),
        });
    }
    let started = Instant::now();
    for chunk in events.chunks(4_000) {
        bus.publish(chunk).await?;
    }
    Ok(rate(count, started.elapsed()))
}
