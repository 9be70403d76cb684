//! Relays and consumers as processes of their own, ended like `kill -9` at every named place, while Postgres
//! and the broker are killed and come back; afterwards every event took effect once, in the order of its key.
//! The seed is printed; TIDEMARK_SEED repeats the order of deaths.

mod support;

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use support::server::{Kind, Server};
use support::{RECORDER, Rig, Running, dispatcher_options, keys, relay_options, wait_for};
use tidemark_bus::dispatch::{Accepts, Delivered, DispatcherOptions, HandleError, Handler};
use tidemark_bus::dlq::{self, Desk};
use tidemark_bus::nats::{NatsBus, NatsOptions};
use tidemark_bus::redis::RedisBus;
use tidemark_bus::relay::{Relay, RelayOptions};
use tidemark_bus::{Bus, crash};
use tidemark_model::redact::RedactedUrl;
use tidemark_store::Tx;
use tidemark_testkit::pg::PrivatePg;

/// Leases live for an hour: whoever takes over knows that the holder is dead, or this test never ends.
const LEASE: Duration = Duration::from_secs(3_600);
/// Partitions of the stream the rig consumes.
const PARTS: i64 = 4;
/// How long a process may take to come to its place.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Engine {
    Postgres,
    Nats,
    Redis,
}

impl Engine {
    async fn bus(self, url: &str, rig: &Rig) -> anyhow::Result<Arc<dyn Bus>> {
        let (db, tails) = (rig.db.clone(), rig.tails.clone());
        Ok(match self {
            Self::Postgres => rig.bus.clone(),
            Self::Nats => {
                let options = NatsOptions::default();
                Arc::new(NatsBus::connect(&RedactedUrl::parse(url)?, options, db, tails).await?)
            }
            Self::Redis => Arc::new(RedisBus::connect(&RedactedUrl::parse(url)?, "tm", db, tails).await?),
        })
    }
}

/// Writes down what it got; refuses every fifth value if told to.
struct Chaotic {
    refuses: bool,
}

#[async_trait::async_trait]
impl Handler for Chaotic {
    fn kind(&self) -> &'static str {
        RECORDER
    }
    fn accepts(&self) -> &'static [Accepts] {
        &[Accepts { subject: "ledger.finality.advanced", versions: &[1] }]
    }
    async fn apply(&self, tx: &Tx<'_>, batch: &[Delivered]) -> Result<(), HandleError> {
        let values: Vec<i64> =
            batch.iter().filter_map(|event| event.envelope.payload["finalized_height"].as_i64()).collect();
        let keys: Vec<&str> = batch.iter().map(|event| event.envelope.partition_key.as_str()).collect();
        let sql = "insert into effects (handler, key, value)
                   select $1, key, value from unnest($2::text[], $3::bigint[]) with ordinality as e (key, value, place)
                   order by place";
        tx.execute("write effects", sql, &[&RECORDER, &keys, &values]).await?;
        match values.iter().find(|value| self.refuses && *value % 5 == 0) {
            Some(value) => Err(HandleError::retry(format!("told to refuse {value}"))),
            None => Ok(()),
        }
    }
}

/// What a child process does: `TIDEMARK_CHILD=role,engine,refuses?`.
#[tokio::test(flavor = "multi_thread")]
async fn child() -> anyhow::Result<()> {
    let Ok(text) = std::env::var("TIDEMARK_CHILD") else {
        return Ok(()); // An ordinary test run.
    };
    let words: Vec<&str> = text.split(',').collect();
    let engine = match words[1] {
        "nats" => Engine::Nats,
        "redis" => Engine::Redis,
        _ => Engine::Postgres,
    };
    let mut rig = Rig::on(&std::env::var("TIDEMARK_CHILD_DB")?)?;
    rig.bus = engine.bus(&std::env::var("TIDEMARK_CHILD_BROKER")?, &rig).await?;
    let running = match words[0] {
        "relay" => {
            let options = RelayOptions { lease_ttl: LEASE, publish_rows_max: 50, ..relay_options() };
            let relay = Relay::new(rig.db.clone(), rig.bus.clone(), rig.tails.clone(), options);
            Running::start(move |stop| async move { relay.run(stop).await })
        }
        _ => {
            let handler = Arc::new(Chaotic { refuses: words[2] == "refuses" });
            let options = DispatcherOptions { lease_ttl: LEASE, ..dispatcher_options() };
            rig.run_dispatcher(rig.dispatcher_with(handler, options))
        }
    };
    running.ended().await
}

/// A process of ours; killed with its owner.
struct Process(Child);

impl Process {
    /// `kill -9`, if it is not dead already.
    fn kill(mut self) -> anyhow::Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
    /// Waits until it ended itself at its place.
    async fn dies(mut self, rig: &Rig, place: &str) -> anyhow::Result<()> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait()? {
                ensure!(status.signal() == Some(6), "{place}: it ended with {status}");
                return Ok(());
            }
            if started.elapsed() > PATIENCE {
                bail!("nobody came by {place}\n{}", who_holds_what(rig).await?);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct World {
    engine: Engine,
    server: Option<Server>,
    postgres: PrivatePg,
}

impl World {
    fn start(&self, role: &str, crash_at: Option<(&str, u64)>, refuses: bool) -> anyhow::Result<Process> {
        let engine = format!("{:?}", self.engine).to_lowercase();
        let refuses = if refuses { "refuses" } else { "" };
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--exact", "child", "--nocapture"]);
        command.env("TIDEMARK_CHILD", format!("{role},{engine},{refuses}"));
        command.env("TIDEMARK_CHILD_DB", &self.postgres.url);
        command.env("TIDEMARK_CHILD_BROKER", self.server.as_ref().map(Server::url).unwrap_or_default());
        if let Some((place, pass)) = crash_at {
            command.env("TIDEMARK_CRASH_AT", format!("{place}@{pass}"));
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Process(command.spawn().context("a child does not start")?))
    }
}

/// One thing that happens.
#[derive(Debug, Clone, Copy)]
enum Event {
    Crash(&'static str),
    KillRelay,
    KillConsumer,
    KillPostgres,
    KillBroker,
    KillBrokerAndItsDisk,
}

fn script(engine: Engine, random: &mut StdRng) -> Vec<Event> {
    let without_server =
        |place: &str| place.starts_with("relay.publish") || place.starts_with("relay.record");
    let mut events: Vec<Event> = crash::POINTS
        .iter()
        .filter(|place| engine != Engine::Postgres || !without_server(place))
        .map(|place| Event::Crash(place))
        .chain([Event::KillRelay, Event::KillConsumer, Event::KillPostgres, Event::KillPostgres])
        .collect();
    if engine != Engine::Postgres {
        events.extend([Event::KillBroker, Event::KillBrokerAndItsDisk]);
    }
    events.shuffle(random);
    events
}

async fn everything_dies_everywhere(engine: Engine) -> anyhow::Result<()> {
    let seed = match std::env::var("TIDEMARK_SEED") {
        Ok(text) => text.parse()?,
        Err(_) => rand::random::<u64>(),
    };
    say_seed(seed);
    let mut random = StdRng::seed_from_u64(seed);
    let server = match engine {
        Engine::Postgres => None,
        Engine::Nats => Some(Server::start(Kind::Nats)?),
        Engine::Redis => Some(Server::start(Kind::Redis)?),
    };
    let mut world = World { engine, server, postgres: PrivatePg::start()? };
    let rig = Arc::new(Rig::on(&world.postgres.url)?);
    rig.make_tables().await?;
    let keys = keys(8);
    let produced = Arc::new(AtomicI64::new(0));
    let enough = Arc::new(AtomicBool::new(false));
    let producer = {
        let (rig, keys, produced, enough) = (rig.clone(), keys.clone(), produced.clone(), enough.clone());
        Running::start(move |_| async move {
            let mut value = 0;
            while !enough.load(Ordering::SeqCst) {
                value += 1;
                let pairs: Vec<(&str, i64)> = keys.iter().map(|key| (key.as_str(), value)).collect();
                rig.emit(&pairs).await.expect("a producer repeats its transaction until it goes");
                produced.store(value, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Ok(())
        })
    };
    let mut relay = world.start("relay", None, false)?;
    let mut consumer = world.start("consumer", None, false)?;
    for event in script(engine, &mut random) {
        say(&format!("{event:?} after {} rounds", produced.load(Ordering::SeqCst)));
        let pass = random.random_range(1..=3);
        match event {
            Event::Crash(place) if place.starts_with("relay") => {
                // Only the first claim of a process is sure to happen.
                let pass = if place == "relay.claimed" { 1 } else { pass };
                relay.kill()?;
                world.start("relay", Some((place, pass)), false)?.dies(&rig, place).await?;
                relay = world.start("relay", None, false)?;
            }
            Event::Crash(place @ "dispatch.give.before_release") => {
                consumer.kill()?;
                // Until the database sees that the old one is gone, its partitions look held; whoever joins
                // then gets a share of what becomes free, and nobody ever has to give.
                wait_for("the dead to be seen", async || Ok(held(&rig).await? == 0)).await?;
                let armed = world.start("consumer", Some((place, 1)), false)?;
                wait_for("it to hold all partitions", async || Ok(held(&rig).await? == PARTS)).await?;
                consumer = world.start("consumer", None, false)?; // It wants its share.
                armed.dies(&rig, place).await?;
            }
            Event::Crash(place)
                if place.starts_with("dispatch.failure") || place.starts_with("dispatch.park") =>
            {
                // Alone, so that it has every key: those of a share may all be parked from before, and what is
                // parked is not tried.
                consumer.kill()?;
                world.start("consumer", Some((place, 1)), true)?.dies(&rig, place).await?;
                consumer = world.start("consumer", None, false)?;
            }
            Event::Crash(place) => {
                let pass = if place == "dispatch.claimed" { 1 } else { pass };
                world.start("consumer", Some((place, pass)), false)?.dies(&rig, place).await?;
            }
            Event::KillRelay => {
                relay.kill()?;
                relay = world.start("relay", None, false)?;
            }
            Event::KillConsumer => {
                consumer.kill()?;
                consumer = world.start("consumer", None, false)?;
            }
            Event::KillPostgres => {
                world.postgres.kill();
                world.postgres.launch()?;
            }
            Event::KillBroker | Event::KillBrokerAndItsDisk => {
                let server = world.server.as_mut().expect("only with a broker");
                server.kill()?;
                if matches!(event, Event::KillBrokerAndItsDisk) {
                    server.wipe()?;
                }
                server.launch()?;
            }
        }
        // Life goes on after every death.
        let before = effects(&rig).await?;
        wait_for("new effects", async || Ok(effects(&rig).await? > before)).await?;
    }
    enough.store(true, Ordering::SeqCst);
    producer.ended().await?;
    let rounds = produced.load(Ordering::SeqCst);
    rig.caught_up(RECORDER, i64::try_from(keys.len())? * rounds).await?;
    let handler = Arc::new(Chaotic { refuses: false });
    let desk = Desk { db: rig.db.clone(), registry: rig.registry.clone(), handlers: vec![handler] };
    for parked in dlq::parked(&rig.db, None).await? {
        let released = dlq::release(&desk, RECORDER, &parked.partition_key, "tester", None).await?;
        ensure!(released.unparked, "{released:?}");
    }
    rig.assert_once_in_order(RECORDER, &keys, rounds).await?;
    relay.kill()?;
    consumer.kill()
}

async fn effects(rig: &Rig) -> anyhow::Result<i64> {
    let started = Instant::now();
    loop {
        match rig.count("select count(*) from effects").await {
            Ok(count) => return Ok(count),
            Err(error) if started.elapsed() > PATIENCE => bail!(error),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await, // Postgres was killed.
        }
    }
}

async fn held(rig: &Rig) -> anyhow::Result<i64> {
    let sql = "select count(*) from system.consumer_positions p
               where owner is not null and system.is_present(session_key)";
    rig.count(sql).await
}

/// Leases, whether their owners are there, and what the server is doing: why somebody waits.
async fn who_holds_what(rig: &Rig) -> anyhow::Result<String> {
    let conn = rig.db.conn().await?;
    let sql = "select 'relay ' || to_jsonb(r)::text || ' present ' || coalesce(system.is_present(r.session_key)::text, 'unknown')
                 from system.relay_cursor r
               union all
               select 'position ' || (to_jsonb(p) - 'cursor')::text || ' present '
                      || coalesce(system.is_present(p.session_key)::text, 'unknown')
                 from system.consumer_positions p
               union all
               select 'partition ' || to_jsonb(b)::text from system.bus_partitions b
               union all
               select concat_ws(' ', 'session', a.pid, a.state, a.wait_event_type, a.wait_event, a.query_start,
                                left(regexp_replace(a.query, '\\s+', ' ', 'g'), 100))
                 from pg_stat_activity a where a.backend_type = 'client backend'";
    let rows = conn.query("say who holds what", sql, &[]).await?;
    Ok(rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>().join("\n"))
}

#[expect(clippy::print_stderr, reason = "a failing run must say its seed")]
fn say_seed(seed: u64) {
    eprintln!("TIDEMARK_SEED={seed}");
}

#[expect(clippy::print_stderr, reason = "a failing run must say what happened")]
fn say(what: &str) {
    eprintln!("{what}");
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_survives_every_death() -> anyhow::Result<()> {
    everything_dies_everywhere(Engine::Postgres).await
}
#[tokio::test(flavor = "multi_thread")]
async fn nats_survives_every_death() -> anyhow::Result<()> {
    everything_dies_everywhere(Engine::Nats).await
}
#[tokio::test(flavor = "multi_thread")]
async fn redis_survives_every_death() -> anyhow::Result<()> {
    everything_dies_everywhere(Engine::Redis).await
}

/// Two processes take half of the partitions each; when one dies the other has them all at once, and comes
/// back to half when a new one joins. Events keep flowing, in order.
#[tokio::test(flavor = "multi_thread")]
async fn processes_share_the_partitions_and_take_over_from_the_dead() -> anyhow::Result<()> {
    let world = World { engine: Engine::Postgres, server: None, postgres: PrivatePg::start()? };
    let rig = Rig::on(&world.postgres.url)?;
    rig.make_tables().await?;
    let keys = keys(12);
    let _relay = world.start("relay", None, false)?;
    let shares = async |expected: &[i64]| {
        wait_for(&format!("shares of {expected:?}"), async || {
            let sql = "select coalesce(array_agg(parts order by parts), '{}') from (
                           select count(*) as parts from system.consumer_positions
                           where system.is_present(session_key) group by owner) as shares";
            let row = rig.db.conn().await?.query_one("look", sql, &[]).await?;
            Ok(row.get::<_, Vec<i64>>(0) == expected)
        })
        .await
    };
    let mut value = 0;
    let mut emit = async |rounds: i64| {
        for _ in 0..rounds {
            value += 1;
            let pairs: Vec<(&str, i64)> = keys.iter().map(|key| (key.as_str(), value)).collect();
            rig.emit(&pairs).await?;
        }
        anyhow::Ok(value)
    };
    let first = world.start("consumer", None, false)?;
    shares(&[4]).await?;
    emit(20).await?;
    let second = world.start("consumer", None, false)?;
    emit(20).await?;
    shares(&[2, 2]).await?;
    emit(20).await?;
    let third = world.start("consumer", None, false)?;
    shares(&[1, 1, 2]).await?;
    emit(20).await?;
    first.kill()?;
    shares(&[2, 2]).await?;
    second.kill()?;
    emit(20).await?;
    shares(&[4]).await?;
    let rounds = emit(20).await?;
    rig.caught_up(RECORDER, 12 * rounds).await?;
    rig.assert_once_in_order(RECORDER, &keys, rounds).await?;
    third.kill()
}
