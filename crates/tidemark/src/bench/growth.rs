//! `bench growth`: what a thousand quiet networks cost one process, and how fast an outage of the node is
//! made up for.

use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use tidemark_sim::{FaultProfile, Sim, SimConfig};

use super::live::{Marker, Reader};
use super::process::{Serving, Setup};
use super::{Bench, float, print, query, write};

/// `bench growth`
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct GrowthArgs {
    /// Networks that are configured and quiet
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub networks: u32,
    /// Seconds over which their cost is measured
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub idle_seconds: u64,
    /// Seconds of an outage of the node, with a block of 200 logs in each
    #[arg(long, value_name = "N", default_value_t = 300)]
    pub outage_seconds: u32,
    /// Logs that are history before the outage
    #[arg(long, value_name = "N", default_value_t = 60_000)]
    pub prefill: u64,
}

/// Logs of a block.
const LOGS: u32 = 200;
/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long a network must be quiet until its pauses are long.
const SETTLE: Duration = Duration::from_secs(90);

/// Runs it and writes `out/growth.json`.
pub async fn run(args: &GrowthArgs, out: &Path) -> anyhow::Result<()> {
    let mut result = json!({});
    if args.networks > 0 {
        let bench = Bench::start().await?;
        let measured = idle(args, &bench).await;
        bench.end().await?;
        result["idle"] = measured?;
    }
    if args.outage_seconds > 0 {
        let bench = Bench::start().await?;
        let measured = outage(args, &bench).await;
        bench.end().await?;
        result["outage"] = measured?;
    }
    write(out, "growth", &result)
}

/// Networks whose chain is in the read models to its end.
const CAUGHT_UP: &str = "select count(*) from projection.network_status where projected_height >= 3";
const TRANSACTIONS: &str = "
    select xact_commit + xact_rollback from pg_stat_database where datname = current_database()";
const CONNECTIONS: &str = "
    select count(*) from pg_stat_activity where datname = current_database() and application_name like 'tidemark%'";

async fn idle(args: &GrowthArgs, bench: &Bench) -> anyhow::Result<Value> {
    let sim = Sim::new(SimConfig { admin: false, ..SimConfig::live() });
    sim.mine_empty(2);
    sim.mine_full(5);
    let node = sim.serve("127.0.0.1:0".parse()?, FaultProfile::default()).await?;
    let mut networks = String::new();
    for id in 1..=args.networks {
        writeln!(networks, "[[network]]\nid = {id}\nslug = \"net-{id}\"\nrpc = [\"{}/as/{id}\"]", node.url)?;
    }
    let setup = Setup { networks, lines: String::new() };
    eprintln!("{} networks …", args.networks);
    let began = Instant::now();
    let mut tidemark = Serving::start(bench, &setup).await?;
    let url = bench.server.url();
    loop {
        let ready = match query(url, CAUGHT_UP).await {
            Ok(row) => row.get::<_, i64>(0),
            Err(_) => 0, // The schema is on its way.
        };
        if ready >= i64::from(args.networks) {
            break;
        }
        ensure!(began.elapsed() < PATIENCE, "only {ready} networks were read after {PATIENCE:?}");
        tidemark.check()?;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let ready = began.elapsed().as_secs_f64();
    eprintln!("all read after {ready:.1} s; waiting until they are quiet …");
    tokio::time::sleep(SETTLE).await;
    let measure = async || -> anyhow::Result<(f64, i64, u64)> {
        let transactions: i64 = query(url, TRANSACTIONS).await?.get(0);
        Ok((tidemark.usage().cpu_seconds, transactions, node.http_requests()))
    };
    let (from, at) = (measure().await?, Instant::now());
    tokio::time::sleep(Duration::from_secs(args.idle_seconds)).await;
    let (to, seconds) = (measure().await?, at.elapsed().as_secs_f64());
    let connections: i64 = query(url, CONNECTIONS).await?.get(0);
    let usage = tidemark.usage();
    let cpu_percent = (to.0 - from.0) / seconds * 100.0;
    let transactions = float((to.1 - from.1).unsigned_abs()) / seconds;
    let requests = float(to.2 - from.2) / seconds;
    tidemark.stop().await?;
    node.stop().await;
    let mib = |bytes: u64| bytes / (1024 * 1024);
    print(&[
        ("quiet networks", args.networks.to_string()),
        ("all read after", format!("{ready:.1} s")),
        ("CPU while quiet", format!("{cpu_percent:.1} % of one core")),
        (
            "memory, now and at its peak",
            format!("{} / {} MiB", mib(usage.rss_bytes), mib(usage.peak_rss_bytes)),
        ),
        ("database connections", connections.to_string()),
        ("database transactions", format!("{transactions:.0}/s")),
        ("requests to the nodes", format!("{requests:.0}/s")),
    ]);
    Ok(json!({
        "networks": args.networks, "ready_seconds": ready, "cpu_percent": cpu_percent,
        "rss_bytes": usage.rss_bytes, "peak_rss_bytes": usage.peak_rss_bytes, "connections": connections,
        "transactions_per_second": transactions, "requests_per_second": requests,
    }))
}

async fn outage(args: &GrowthArgs, bench: &Bench) -> anyhow::Result<Value> {
    let sim = Sim::new(SimConfig::live());
    let history = u32::try_from(args.prefill.div_ceil(u64::from(LOGS)))?.max(100);
    mine(&sim, history).await?;
    let node = sim.serve("127.0.0.1:0".parse()?, FaultProfile::default()).await?;
    let setup = Setup::one("bench", sim.config().chain_id, &node.url, std::slice::from_ref(&node.ws_url));
    eprintln!("history of {history} blocks …");
    let began = Instant::now();
    let mut tidemark = Serving::start(bench, &setup).await?;
    let reader = Reader::new(&tidemark.api, sim.config().chain_id)?;
    let newest = || Marker::of(&sim, sim.head()).context("a full block has a token");
    reader.wait_for(&newest()?, PATIENCE).await?;
    let history_rate = float(u64::from(history) * u64::from(LOGS)) / began.elapsed().as_secs_f64();
    eprintln!("an outage of {} s …", args.outage_seconds);
    node.set_profile(FaultProfile { down: true, ..FaultProfile::default() });
    mine(&sim, args.outage_seconds).await?;
    // Long enough that the pauses between tries are as long as they become: what follows is the same after hours.
    tokio::time::sleep(Duration::from_secs(20)).await;
    let marker = newest()?;
    node.set_profile(FaultProfile::default());
    let back = Instant::now();
    reader.wait_for(&marker, PATIENCE).await?;
    let seconds = back.elapsed().as_secs_f64();
    let rate = float(u64::from(args.outage_seconds) * u64::from(LOGS)) / seconds;
    let usage = tidemark.usage();
    tidemark.stop().await?;
    node.stop().await;
    print(&[
        ("history, logs", format!("{history_rate:.0}/s, start of the process included")),
        ("outage", format!("{} s, {} logs", args.outage_seconds, args.outage_seconds * LOGS)),
        (
            "made up for after",
            format!("{seconds:.1} s ({rate:.0} logs/s), the wait for the next try included"),
        ),
        ("peak memory", format!("{} MiB", usage.peak_rss_bytes / (1024 * 1024))),
    ]);
    Ok(json!({
        "history_logs_per_second": history_rate, "outage_seconds": args.outage_seconds,
        "logs": args.outage_seconds * LOGS, "catch_up_seconds": seconds, "catch_up_logs_per_second": rate,
        "peak_rss_bytes": usage.peak_rss_bytes,
    }))
}

async fn mine(sim: &Sim, blocks: u32) -> anyhow::Result<()> {
    let sim = sim.clone();
    Ok(tokio::task::spawn_blocking(move || (0..blocks).for_each(|_| sim.mine_full(LOGS))).await?)
}
