//! `bench bus`: append → relay → engine → handler with an effect, per engine, beside the engine alone.

use std::path::Path;
use std::sync::Arc;

use anyhow::ensure;
use clap::ValueEnum;
use serde_json::{Value, json};
use tidemark_bus::Bus;
use tidemark_bus::bench::{BusBench, bench_bus};
use tidemark_bus::nats::{NatsBus, NatsOptions};
use tidemark_bus::postgres::PostgresBus;
use tidemark_bus::redis::RedisBus;
use tidemark_bus::registry::Registry;
use tidemark_bus::tail::Tails;
use tidemark_model::redact::RedactedUrl;
use tidemark_store::{Db, DbOptions, migrate};

use super::broker::{Broker, Kind};
use super::{Bench, execute, forget_peak_rss, peak_rss_bytes, print, write};

/// `bench bus`
#[derive(Debug, Clone, clap::Args)]
pub struct BusArgs {
    /// Events per engine
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    pub events: u64,
    /// Only this engine; may be repeated [default: all of them]
    #[arg(long, value_name = "ENGINE")]
    pub engine: Vec<Engine>,
}

/// The engines of the backbone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// The outbox itself
    Postgres,
    /// NATS JetStream
    Nats,
    /// Redis Streams
    Redis,
}

impl Engine {
    const ALL: [Self; 3] = [Self::Postgres, Self::Nats, Self::Redis];

    fn name(self) -> &'static str {
        match self {
            Self::Postgres => "postgres",
            Self::Nats => "nats",
            Self::Redis => "redis",
        }
    }
}

/// Runs it and writes `out/bus.json`.
pub async fn run(args: &BusArgs, out: &Path) -> anyhow::Result<()> {
    ensure!(args.events >= 10_000, "at least ten thousand events, or the figures say nothing");
    let wanted = if args.engine.is_empty() { Engine::ALL.to_vec() } else { args.engine.clone() };
    let mut engines = serde_json::Map::new();
    for engine in wanted {
        let bench = Bench::start().await?;
        let result = measure(engine, args.events, &bench).await;
        bench.end().await?;
        engines.insert(engine.name().to_owned(), result?);
    }
    write(out, "bus", &json!({ "events": args.events, "engines": engines }))
}

async fn measure(engine: Engine, events: u64, bench: &Bench) -> anyhow::Result<Value> {
    eprintln!("{} …", engine.name());
    let kind = match engine {
        Engine::Postgres => None,
        Engine::Nats => Some(Kind::Nats),
        Engine::Redis => Some(Kind::Redis),
    };
    let broker = match kind {
        None => None,
        Some(kind) => match Broker::start(kind, &bench.dir).await? {
            Some(broker) => Some(broker),
            None => return Ok(json!({ "skipped": "its server is not installed" })),
        },
    };
    forget_peak_rss();
    let options = DbOptions { connections_max: 16, ..DbOptions::default() };
    let db = Db::open(bench.server.url(), &options)?;
    migrate::run(&db).await?;
    execute(bench.server.url(), "checkpoint").await?;
    let tails = Arc::new(Tails::new(db.clone()));
    let bus: Arc<dyn Bus> = match (engine, &broker) {
        (Engine::Nats, Some(broker)) => {
            let url = RedactedUrl::parse(&broker.url)?;
            Arc::new(NatsBus::connect(&url, NatsOptions::default(), db.clone(), Arc::clone(&tails)).await?)
        }
        (Engine::Redis, Some(broker)) => {
            let url = RedactedUrl::parse(&broker.url)?;
            Arc::new(RedisBus::connect(&url, "bench", db.clone(), Arc::clone(&tails)).await?)
        }
        _ => Arc::new(PostgresBus::new(db.clone(), Arc::clone(&tails))),
    };
    let result = bench_bus(db, bus, tails, Arc::new(Registry::builtin()), events).await?;
    Ok(report(&result))
}

fn report(result: &BusBench) -> Value {
    let ratio = result.events_per_second / result.bare_events_per_second;
    let peak = peak_rss_bytes();
    let seconds = result.elapsed.as_secs_f64();
    let rate = |rate: f64| format!("{rate:.0} events/s");
    print(&[
        ("engine", result.engine.to_owned()),
        ("append to effect", format!("{} ({seconds:.1} s)", rate(result.events_per_second))),
        ("the engine alone", rate(result.bare_events_per_second)),
        ("ratio", format!("{ratio:.2}")),
        ("appending alone", rate(result.append_events_per_second)),
        ("relay alone", rate(result.relay_events_per_second)),
        ("handler alone", rate(result.consume_events_per_second)),
        ("peak memory", format!("{} MiB", peak / (1024 * 1024))),
    ]);
    json!({
        "events": result.events, "seconds": seconds,
        "events_per_second": result.events_per_second,
        "bare_events_per_second": result.bare_events_per_second,
        "ratio": ratio,
        "append_events_per_second": result.append_events_per_second,
        "relay_events_per_second": result.relay_events_per_second,
        "consume_events_per_second": result.consume_events_per_second,
        "peak_rss_bytes": peak,
    })
}
