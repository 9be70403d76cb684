//! The benchmark itself works on every engine. TIDEMARK_BENCH_EVENTS makes it a measurement.

mod support;

use support::bench::{Bench, Engine};
use tidemark_bus::bench::bench_bus;

#[expect(clippy::print_stderr, reason = "a measurement is to be read")]
async fn counts_what_it_sends(engine: Engine) -> anyhow::Result<()> {
    let events = std::env::var("TIDEMARK_BENCH_EVENTS").ok().map_or(Ok(1_000), |text| text.parse::<u64>())?;
    let bench = Bench::new(engine).await?;
    let rig = &bench.rig;
    let result =
        bench_bus(rig.db.clone(), rig.bus.clone(), rig.tails.clone(), rig.registry.clone(), events).await?;
    eprintln!("{result:?}");
    anyhow::ensure!(result.events == events && result.bare_events_per_second > 0.0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres() -> anyhow::Result<()> {
    counts_what_it_sends(Engine::Postgres).await
}
#[tokio::test(flavor = "multi_thread")]
async fn nats() -> anyhow::Result<()> {
    counts_what_it_sends(Engine::Nats).await
}
#[tokio::test(flavor = "multi_thread")]
async fn redis() -> anyhow::Result<()> {
    counts_what_it_sends(Engine::Redis).await
}
