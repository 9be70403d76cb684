//! Everything dies at random moments, under load; afterwards every event took effect once, in order.
//! The seed is printed; TIDEMARK_SEED repeats a run (as far as timing allows).

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use support::bench::{Bench, Disk, Engine};
use support::{RECORDER, Recorder, Running, dispatcher_options, keys, relay_options};
use tidemark_bus::relay::Relay;

/// How long things die.
const CHAOS: Duration = Duration::from_secs(5);
/// Leases run out quickly, so that the dead are replaced.
const LEASE: Duration = Duration::from_millis(400);

fn relay(bench: &Bench) -> Running {
    let options = tidemark_bus::relay::RelayOptions { lease_ttl: LEASE, ..relay_options() };
    let rig = &bench.rig;
    let relay = Relay::new(rig.db.clone(), rig.bus.clone(), rig.tails.clone(), options);
    Running::start(move |stop| async move { relay.run(stop).await })
}

fn handler(bench: &Bench) -> Running {
    let options = tidemark_bus::dispatch::DispatcherOptions { lease_ttl: LEASE, ..dispatcher_options() };
    let slow = Recorder { slow: Some(Duration::from_micros(200)), ..Recorder::default() };
    bench.rig.run_dispatcher(bench.rig.dispatcher_with(Arc::new(slow), options))
}

async fn everything_dies(engine: Engine) -> anyhow::Result<()> {
    let seed = match std::env::var("TIDEMARK_SEED") {
        Ok(text) => text.parse()?,
        Err(_) => rand::random::<u64>(),
    };
    say_seed(seed);
    let mut random = StdRng::seed_from_u64(seed);
    let mut bench = Bench::new(engine).await?;
    let keys = keys(10);
    let (mut relays, mut handlers) =
        (vec![relay(&bench), relay(&bench)], vec![handler(&bench), handler(&bench)]);
    let started = Instant::now();
    let mut value = 0;
    while started.elapsed() < CHAOS {
        value += 1;
        bench.emit(&keys, value..=value).await?;
        match random.random_range(0..60) {
            0..4 => {
                relays.swap_remove(random.random_range(0..2)).kill().await;
                relays.push(relay(&bench));
            }
            4..8 => {
                handlers.swap_remove(random.random_range(0..2)).kill().await;
                handlers.push(handler(&bench));
            }
            8 => bench.restart(Disk::Kept).await?,
            9 => bench.restart(Disk::Lost).await?,
            10 => {
                // The database ends every connection, as at a restart.
                let ended = "select pg_terminate_backend(pid) from pg_stat_activity
                             where datname = current_database() and pid <> pg_backend_pid()";
                let _ = bench.rig.sql(ended).await;
            }
            _ => {}
        }
    }
    let events = i64::try_from(keys.len())? * value;
    bench.rig.caught_up(RECORDER, events).await?;
    bench.rig.assert_once_in_order(RECORDER, &keys, value).await?;
    for running in relays.into_iter().chain(handlers) {
        running.stop().await?;
    }
    Ok(())
}

#[expect(clippy::print_stderr, reason = "a failing run must say its seed")]
fn say_seed(seed: u64) {
    eprintln!("TIDEMARK_SEED={seed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_survives() -> anyhow::Result<()> {
    everything_dies(Engine::Postgres).await
}
#[tokio::test(flavor = "multi_thread")]
async fn nats_survives() -> anyhow::Result<()> {
    everything_dies(Engine::Nats).await
}
#[tokio::test(flavor = "multi_thread")]
async fn redis_survives() -> anyhow::Result<()> {
    everything_dies(Engine::Redis).await
}
