//! `sync`: history until everything is final, in the ledger and in the projections; then a summary.

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use tidemark_model::chain::ChainAdapter;
use tidemark_model::ids::Height;
use tidemark_pipeline::history::{HistoryProgress, HistoryWorker};
use tidemark_pipeline::ingest::Ingester;
use tidemark_pipeline::status::StatusProjector;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::cli::{SyncArgs, Until};
use crate::config::{Config, Override};
use crate::exit;
use crate::host::{self, Embedded, Host};
use crate::parts::{Parts, TipOutbox};

/// Flags as the last layer of the configuration.
pub fn overrides(args: &SyncArgs) -> Vec<Override> {
    let dir = args.data_dir.as_ref().map(|dir| dir.display().to_string());
    dir.map(|value| Override { path: &["database", "data_dir"], value, flag: "--data-dir" })
        .into_iter()
        .collect()
}

struct Goal {
    adapter: Arc<dyn ChainAdapter>,
    target: Height,
    progress: watch::Receiver<HistoryProgress>,
}

/// Runs it to the end, or until Ctrl-C.
pub async fn run(args: SyncArgs, mut config: Config) -> anyhow::Result<u8> {
    anyhow::ensure!(
        !config.networks.is_empty(),
        "there is no [[network]] to sync: add one to the configuration; `tidemark config example` shows it"
    );
    config.telemetry.listen = None; // Short-lived: the summary is its telemetry.
    let host = Host::open_quiet(config, Embedded::Allowed).await?;
    let started = Instant::now();
    let done = tokio::select! {
        done = sync(&host, &args) => done,
        stop = host::asked_to_stop() => stop.and(Err(anyhow::anyhow!("stopped; the next `tidemark sync` goes on from here"))),
    };
    let closed = host.close().await;
    let summary = done?;
    closed?;
    report(&args, &summary, started.elapsed());
    Ok(exit::OK)
}

struct Summary {
    events: u64,
    rpc_calls: u64,
    heights: Vec<(String, Height)>,
}

async fn sync(host: &Host, args: &SyncArgs) -> anyhow::Result<Summary> {
    let ctx = &host.ctx;
    let parts = Parts::new(&ctx.config, &ctx.instance)?;
    let networks = parts.adapters.iter().map(|adapter| adapter.network().clone()).collect();
    StatusProjector::new(networks, ctx.raw.clone(), ctx.app.clone()).once().await?;
    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let mut goals = Vec::new();
    for adapter in &parts.adapters {
        let target = target(adapter, args.until).await?;
        let ingester = Ingester::new(
            Arc::clone(adapter),
            ctx.raw.clone(),
            Arc::clone(&parts.blobs),
            Arc::new(TipOutbox::new(Arc::clone(&parts.emitter), None)),
            Parts::ingest_options(&ctx.config, &ctx.instance),
        );
        let worker = HistoryWorker::new(
            Arc::clone(adapter),
            ctx.raw.clone(),
            ctx.app.clone(),
            parts.reader.clone(),
            Arc::clone(&parts.partitions),
            crate::roles::history_options(),
        );
        goals.push(Goal { adapter: Arc::clone(adapter), target, progress: worker.progress() });
        let token = stop.clone();
        tasks.spawn(async move { ingester.run(token).await.map_err(anyhow::Error::from) });
        let token = stop.clone();
        tasks.spawn(async move { worker.run(token).await.map_err(anyhow::Error::from) });
    }
    let reached = tokio::select! {
        reached = watch_goals(&goals, args.json) => reached,
        Some(ended) = tasks.join_next() => Err(match ended {
            Ok(Err(error)) => error,
            Ok(Ok(())) => anyhow::anyhow!("a worker ended before the goal"),
            Err(panic) => anyhow::anyhow!("a worker ended: {panic}"),
        }),
    };
    stop.cancel();
    while let Some(ended) = tasks.join_next().await {
        if let Ok(Err(error)) = ended {
            tracing::warn!(error = %format!("{error:#}"), action = "sync_end", "A worker ended with an error.");
        }
    }
    reached?;
    let networks = parts.adapters.iter().map(|adapter| adapter.network().clone()).collect();
    StatusProjector::new(networks, ctx.raw.clone(), ctx.app.clone()).once().await?;
    Ok(Summary {
        events: goals.iter().map(|goal| goal.progress.borrow().events).sum(),
        rpc_calls: goals.iter().map(|goal| goal.adapter.requests()).sum(),
        heights: goals.iter().map(|goal| (goal.adapter.network().slug.clone(), goal.target)).collect(),
    })
}

async fn target(adapter: &Arc<dyn ChainAdapter>, until: Until) -> anyhow::Result<Height> {
    let slug = adapter.network().slug.clone();
    let head = adapter.head().await.with_context(|| format!("{slug}: the node does not answer"))?;
    let finalized = head.finalized.map(|block| block.height);
    match until {
        Until::Finalized => {
            finalized.with_context(|| format!("{slug}: nothing is final yet; use finality = {{ depth = N }}"))
        }
        Until::Height(height) if height <= head.latest.height.0 => Ok(Height(height)),
        Until::Height(height) => {
            anyhow::bail!("{slug}: block {height} does not exist yet, the head is {}", head.latest.height)
        }
    }
}

/// Waits until every network is applied up to its goal and its indexes are there.
async fn watch_goals(goals: &[Goal], quiet: bool) -> anyhow::Result<()> {
    let total: u64 = goals.iter().map(|goal| span(goal, goal.target.as_i64())).sum();
    let bar = if quiet || !std::io::stderr().is_terminal() {
        ProgressBar::hidden()
    } else {
        ProgressBar::new(total)
    };
    bar.set_style(
        ProgressStyle::with_template("{bar:40.cyan} {percent}%  {pos}/{len} blocks  {msg}  {eta} left")
            .expect("a valid template"),
    );
    let started = Instant::now();
    let mut spoken = Instant::now();
    loop {
        let (mut blocks, mut events, mut done) = (0, 0, true);
        for goal in goals {
            let progress = *goal.progress.borrow();
            blocks += span(goal, progress.applied.min(goal.target.as_i64()));
            events += progress.events;
            done &= progress.applied >= goal.target.as_i64() && progress.idle;
        }
        let rate =
            f64::from(u32::try_from(events).unwrap_or(u32::MAX)) / started.elapsed().as_secs_f64().max(0.001);
        bar.set_position(blocks);
        bar.set_message(format!("{events} events, {rate:.0}/s"));
        if bar.is_hidden() && spoken.elapsed() > Duration::from_secs(5) {
            spoken = Instant::now();
            tracing::info!(blocks, of = total, events, action = "sync_progress", "Syncing.");
        }
        if done {
            bar.finish_and_clear();
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn span(goal: &Goal, height: i64) -> u64 {
    u64::try_from(height + 1 - goal.adapter.network().start_block.as_i64()).unwrap_or(0)
}

fn report(args: &SyncArgs, summary: &Summary, took: Duration) {
    let seconds = took.as_secs_f64();
    let rate = f64::from(u32::try_from(summary.events).unwrap_or(u32::MAX)) / seconds.max(0.001);
    if args.json {
        let line = serde_json::json!({
            "events": summary.events,
            "seconds": seconds,
            "events_per_second": rate,
            "rpc_calls": summary.rpc_calls,
            "peak_rss_bytes": peak_rss_bytes(),
            "cpu_seconds": cpu_seconds(),
        });
        println!("{line}");
        return;
    }
    for (slug, height) in &summary.heights {
        println!("{slug}: final, applied and projected up to {height}");
    }
    println!(
        "{} events in {seconds:.1} s ({rate:.0} per second), {} RPC calls, {} MiB at most",
        summary.events,
        summary.rpc_calls,
        peak_rss_bytes().unwrap_or(0) / (1024 * 1024)
    );
}

/// The largest resident size of this process so far.
fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// User and system time of this process so far. `/proc` counts in hundredths of a second on Linux.
fn cpu_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
    let ticks: u32 = fields.get(11)?.parse::<u32>().ok()? + fields.get(12)?.parse::<u32>().ok()?;
    Some(f64::from(ticks) / 100.0)
}
