//! `sim`: the simulated node alone.

use std::time::Duration;

use tidemark_sim::{FaultProfile, ReorgSchedule, Sim, SimConfig};
use tokio_util::sync::CancellationToken;

use crate::cli::SimArgs;
use crate::{exit, host};

/// Serves until Ctrl-C or SIGTERM.
pub async fn run(args: SimArgs) -> anyhow::Result<u8> {
    let config = match args.bench_logs {
        Some(logs) => SimConfig::bench(logs, args.blocks),
        None => SimConfig { seed: args.seed, admin: true, ..SimConfig::default() },
    };
    let sim = Sim::new(config);
    let grown = sim.clone();
    let missing = args.blocks.saturating_sub(sim.head());
    tokio::task::spawn_blocking(move || grown.mine(missing)).await?;
    if args.bench_logs.is_some() {
        sim.rest(); // It shares the machine with what is measured.
    }
    let faults = if args.chaos { FaultProfile::chaos(args.seed) } else { FaultProfile::default() };
    let server = sim.serve(args.listen, faults).await?;
    println!("{}", server.url);
    eprintln!(
        "A simulated node listens at {} (WebSocket {}), head {}.",
        server.url,
        server.ws_url,
        sim.head()
    );
    let stop = CancellationToken::new();
    let mut tasks = tokio::task::JoinSet::new();
    if args.bench_logs.is_none() {
        let schedule = (args.reorg_every > 0)
            .then(|| ReorgSchedule { every_blocks: args.reorg_every, ..ReorgSchedule::default() });
        tasks.spawn(sim.run_clock(Duration::from_millis(args.block_time_ms), schedule, stop.clone()));
    }
    host::asked_to_stop().await?;
    stop.cancel();
    while tasks.join_next().await.is_some() {}
    server.stop().await;
    Ok(exit::OK)
}
