//! `bench sync`: history from the first RPC call to finalized owners in the projections, beside the minimal
//! program and the bare COPY of the same rows, all in one run against one simulated node.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::process::Command;

use super::minimal::{self, MinimalRun};
use super::{Bench, bare_copy, execute, float, print, start_node, wal_bytes, write};
use crate::parent;

/// `bench sync`
#[derive(Debug, Clone, clap::Args)]
pub struct SyncArgs {
    /// Logs of the simulated history
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    pub logs: u64,
    /// Blocks they are in
    #[arg(long, value_name = "N", default_value_t = 50_000)]
    pub blocks: u64,
    /// Leave the minimal program and the bare COPY out: to compare sizes
    #[arg(long)]
    pub alone: bool,
    /// Logs stored before those that are measured. The same logs are also read into an empty database and on top of a
    /// hundredth of what is stored, before and after, in the same run; and the minimal program does all of it, too,
    /// unless it is left out
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub stored: u64,
    /// Folder for the database of what is stored: made there once, and copied for every run after that, which measures
    /// nothing but what comes on top of it
    #[arg(long, value_name = "FOLDER", requires = "stored")]
    pub keep: Option<PathBuf>,
}

impl SyncArgs {
    /// Blocks of what is stored before, as full as those that are measured.
    fn stored_blocks(&self) -> u64 {
        self.blocks_of(self.stored)
    }
    fn blocks_of(&self, logs: u64) -> u64 {
        logs.div_ceil(self.logs_per_block())
    }
    fn logs_per_block(&self) -> u64 {
        self.logs.div_ceil(self.blocks)
    }
}

/// What much is held against: this part of it.
const STORED_LITTLE: u64 = 100;
/// Stages worth a line in the table; the JSON has all.
const STAGES_SHOWN: usize = 20;

/// What `sync --json` ends with.
#[derive(Debug, Deserialize, Serialize)]
pub struct Synced {
    /// Events that came.
    pub events: u64,
    /// From start to end.
    pub seconds: f64,
    /// Their quotient.
    pub events_per_second: f64,
    /// HTTP requests to the node.
    pub rpc_calls: u64,
    /// Most memory of the process.
    pub peak_rss_bytes: u64,
    /// Its processor time.
    pub cpu_seconds: f64,
    /// Seconds per stage and statement.
    pub stages: BTreeMap<String, f64>,
}

/// Runs it and gives the JSON that is also written to `out/sync.json`.
pub async fn run(args: &SyncArgs, out: &Path) -> anyhow::Result<()> {
    ensure!(args.blocks >= 10 && args.logs >= args.blocks, "at least ten blocks, and a log in each");
    if args.stored > 0 {
        let measured = match &args.keep {
            Some(kept) => measure_on_kept(args, kept).await?,
            None => measure_on_top(args).await?,
        };
        return write(out, "sync-stored", &measured);
    }
    let bench = Bench::start().await?;
    let result = measure(args, &bench).await;
    bench.end().await?;
    write(out, "sync", &result?)
}

/// The same logs as a first history, and as what comes after a long one and after one of a hundredth of it, when everything is
/// in place. All but the long one is measured before and after: in the half hour between them the machine may have
/// become another.
async fn measure_on_top(size: &SyncArgs) -> anyhow::Result<serde_json::Value> {
    let stored_blocks = size.stored_blocks();
    let all = (size.stored + size.logs, stored_blocks + size.blocks);
    let empty = async || {
        eprintln!("{} logs into an empty database …", size.logs);
        on_its_own(&[(size.logs, size.blocks)]).await?.pop().context("one chain was read")
    };
    // Blocks as full as the others, or what comes on top of them would be another chain.
    let little_blocks = size.blocks_of(size.stored / STORED_LITTLE).max(10);
    let little = little_blocks * size.logs_per_block();
    let on_little = async || {
        eprintln!("{little} logs to store, then {} on top of them …", size.logs);
        let chains = [(little, little_blocks), (little + size.logs, little_blocks + size.blocks)];
        on_its_own(&chains).await?.pop().context("two chains were read")
    };
    let (before, little_before) = (empty().await?, on_little().await?);
    eprintln!("{} logs to store, then {} on top of them …", size.stored, size.logs);
    let both = on_its_own(&[(size.stored, stored_blocks), all]).await?;
    let (stored, on_top) = (&both[0], &both[1]);
    let (little_after, after) = (on_little().await?, empty().await?);
    let minimal = match size.alone {
        true => None,
        false => Some(MinimalGrowth::measure(size).await?),
    };
    let rate_of =
        |one: &Synced, other: &Synced| float(one.events + other.events) / (one.seconds + other.seconds);
    let empty_rate = rate_of(&before, &after);
    let little_rate = rate_of(&little_before, &little_after);
    let rate =
        |synced: &Synced| format!("{:.0} events/s ({:.1} s)", synced.events_per_second, synced.seconds);
    let memory = |synced: &Synced| format!("{} MiB", synced.peak_rss_bytes / (1024 * 1024));
    let ratio = |to: &Synced| to.events_per_second / empty_rate;
    print(&[
        ("into an empty database, before", rate(&before)),
        ("the whole of what is stored", rate(stored)),
        ("on top of it", rate(on_top)),
        ("into an empty database, after", rate(&after)),
        ("on top of a hundredth of it, before", rate(&little_before)),
        ("on top of a hundredth of it, after", rate(&little_after)),
        ("ratio of the whole to the empty database", format!("{:.2}", ratio(stored))),
        (
            "ratio of on top of it to on top of a hundredth",
            format!("{:.2}", on_top.events_per_second / little_rate),
        ),
        ("ratio of on top of it to the empty database", format!("{:.2}", ratio(on_top))),
        ("peak memory: empty", memory(&before)),
        ("peak memory: whole", memory(stored)),
        ("peak memory: on top", memory(on_top)),
    ]);
    if let Some(minimal) = &minimal {
        minimal.print(empty_rate, stored, on_top);
    }
    print_stages(on_top);
    Ok(json!({
        "logs": size.logs, "blocks": size.blocks, "stored_logs": size.stored, "minimal": minimal,
        "empty_before": before, "empty_after": after, "empty_events_per_second": empty_rate,
        "stored": stored, "on_top": on_top,
        "on_top_of_little_before": little_before, "on_top_of_little_after": little_after,
        "on_top_of_little_events_per_second": little_rate,
        "ratio_stored": ratio(stored), "ratio_on_top": ratio(on_top),
        "ratio_on_top_to_on_top_of_little": on_top.events_per_second / little_rate,
    }))
}

/// How the minimal program fares with the same chains. It keeps its indexes row by row, so it also slows down as they
/// grow: what is left of our ratio to it when much is stored is what storing much costs us beyond that.
#[derive(Debug, Serialize)]
struct MinimalGrowth {
    empty: MinimalRun,
    stored: MinimalRun,
    on_top: MinimalRun,
}

impl MinimalGrowth {
    async fn measure(size: &SyncArgs) -> anyhow::Result<Self> {
        eprintln!("minimal program, the same …");
        let (all, first) = (size.stored_blocks() + size.blocks, size.stored_blocks());
        let bench = Bench::start().await?;
        let each = async || {
            let (mut node, rpc) = start_node(size.stored + size.logs, all).await?;
            let url = bench.server.url();
            let empty = minimal::run(&rpc, url, 0..=size.blocks - 1).await?;
            let stored = minimal::run(&rpc, url, 0..=first - 1).await?;
            let on_top = minimal::run(&rpc, url, first..=all - 1).await?;
            node.kill().await?;
            anyhow::Ok(Self { empty, stored, on_top })
        };
        let all = each().await;
        bench.end().await?;
        all
    }

    fn print(&self, empty_rate: f64, stored: &Synced, on_top: &Synced) {
        let line = |minimal: &MinimalRun, ours: f64| {
            let rate = minimal.events_per_second();
            format!("{rate:.0} events/s ({:.1} s): ratio {:.2}", minimal.seconds, ours / rate)
        };
        print(&[
            ("minimal program: empty database", line(&self.empty, empty_rate)),
            ("minimal program: the whole", line(&self.stored, stored.events_per_second)),
            ("minimal program: on top of it", line(&self.on_top, on_top.events_per_second)),
        ]);
    }
}

/// Only what comes on top of a database that is made once.
async fn measure_on_kept(size: &SyncArgs, kept: &Path) -> anyhow::Result<serde_json::Value> {
    let stored_blocks = size.stored_blocks();
    let bench = match Bench::start_on(kept).await? {
        Some(bench) => bench,
        None => {
            let bench = Bench::start().await?;
            let (mut node, rpc) = start_node(size.stored, stored_blocks).await?;
            sync(&bench, &rpc, stored_blocks - 1, &[]).await?;
            node.kill().await?;
            bench.keep(kept).await?
        }
    };
    let blocks = stored_blocks + size.blocks;
    let on_top = async {
        let (mut node, rpc) = start_node(size.stored + size.logs, blocks).await?;
        let wal_before = wal_bytes(bench.server.url()).await?;
        let on_top = sync(&bench, &rpc, blocks - 1, &[]).await?;
        node.kill().await?;
        anyhow::Ok((on_top, wal_bytes(bench.server.url()).await? - wal_before))
    };
    let measured = on_top.await;
    bench.end().await?;
    let (on_top, wal) = measured?;
    print(&[
        ("on top of it", format!("{:.0} events/s ({:.1} s)", on_top.events_per_second, on_top.seconds)),
        ("peak memory: on top", format!("{} MiB", on_top.peak_rss_bytes / (1024 * 1024))),
        ("WAL", format!("{} MiB", wal / (1024 * 1024))),
    ]);
    print_stages(&on_top);
    Ok(json!({ "logs": size.logs, "blocks": size.blocks, "stored_logs": size.stored, "on_top": on_top }))
}

/// Reads a chain of each of these sizes (logs, blocks) in turn into one database. The simulated chain grows by its end,
/// so each is what comes after the one before.
async fn on_its_own(sizes: &[(u64, u64)]) -> anyhow::Result<Vec<Synced>> {
    let bench = Bench::start().await?;
    let each = async || {
        let mut all = Vec::new();
        for (logs, blocks) in sizes {
            let (mut node, rpc) = start_node(*logs, *blocks).await?;
            all.push(sync(&bench, &rpc, blocks - 1, &[]).await?);
            node.kill().await?;
        }
        anyhow::Ok(all)
    };
    let all = each().await;
    bench.end().await?;
    all
}

async fn measure(size: &SyncArgs, bench: &Bench) -> anyhow::Result<serde_json::Value> {
    let server = &bench.server;
    let (mut node, rpc) = start_node(size.logs, size.blocks).await?;
    let last = size.blocks - 1;
    if size.alone {
        eprintln!("tidemark sync …");
        let synced = sync(bench, &rpc, last, &[]).await?;
        node.kill().await?;
        print(&[
            ("events", format!("{}", synced.events)),
            ("tidemark sync", format!("{:.0} events/s ({:.1} s)", synced.events_per_second, synced.seconds)),
            ("peak memory", format!("{} MiB", synced.peak_rss_bytes / (1024 * 1024))),
        ]);
        return Ok(json!({
            "stages_seconds": synced.stages, "logs": size.logs, "blocks": size.blocks, "events": synced.events,
            "events_per_second": synced.events_per_second, "seconds": synced.seconds,
            "rpc_calls": synced.rpc_calls, "peak_rss_bytes": synced.peak_rss_bytes,
        }));
    }
    eprintln!("minimal program …");
    let minimal = minimal::run(&rpc, server.url(), 0..=last).await?;
    execute(server.url(), "drop schema bench_minimal cascade; checkpoint").await?;
    eprintln!("tidemark sync …");
    let (wal_before, cpu_before) = (wal_bytes(server.url()).await?, bench.server_cpu_seconds());
    let synced = sync(bench, &rpc, last, &[]).await?;
    let wal = wal_bytes(server.url()).await? - wal_before;
    let server_cpu = bench.server_cpu_seconds() - cpu_before;
    node.kill().await?;
    eprintln!("bare COPY …");
    let copies = bare_copy::run(server.url().expose().as_str(), bare_copy::TABLES).await?;
    let copy_seconds: f64 = copies.iter().map(|copy| copy.seconds).sum();
    let rows: u64 = copies.iter().map(|copy| copy.rows).sum();
    let bytes: i64 = copies.iter().map(|copy| copy.bytes).sum();
    let events = float(synced.events);
    let minimal_rate = minimal.events_per_second();
    print(&[
        ("events", format!("{}", synced.events)),
        ("tidemark sync", format!("{:.0} events/s ({:.1} s)", synced.events_per_second, synced.seconds)),
        ("minimal program", format!("{minimal_rate:.0} events/s ({:.1} s)", minimal.seconds)),
        ("ratio to the minimal program", format!("{:.2}", synced.events_per_second / minimal_rate)),
        (
            "bare COPY of the same rows",
            format!("{:.0} events/s ({copy_seconds:.1} s)", events / copy_seconds),
        ),
        ("ratio to bare COPY", format!("{:.2}", copy_seconds / synced.seconds)),
        ("rows per event", format!("{:.1}", float(rows) / events)),
        ("bytes on disk per event", format!("{:.0}", float(bytes.unsigned_abs()) / events)),
        ("WAL bytes per event", format!("{:.0}", float(wal.unsigned_abs()) / events)),
        ("RPC calls", format!("{}", synced.rpc_calls)),
        ("peak memory", format!("{} MiB", synced.peak_rss_bytes / (1024 * 1024))),
        ("CPU seconds per million events, process", format!("{:.1}", synced.cpu_seconds * 1e6 / events)),
        ("CPU seconds per million events, database", format!("{:.1}", server_cpu * 1e6 / events)),
    ]);
    print_stages(&synced);
    Ok(json!({
        "stages_seconds": synced.stages,
        "logs": size.logs, "blocks": size.blocks, "events": synced.events,
        "events_per_second": synced.events_per_second, "seconds": synced.seconds,
        "minimal": { "events_per_second": minimal_rate, "seconds": minimal.seconds },
        "ratio_to_minimal": synced.events_per_second / minimal_rate,
        "bare_copy": { "seconds": copy_seconds, "events_per_second": events / copy_seconds, "tables": copies },
        "ratio_to_bare_copy": copy_seconds / synced.seconds,
        "rows_per_event": float(rows) / events,
        "bytes_per_event": float(bytes.unsigned_abs()) / events,
        "wal_bytes_per_event": float(wal.unsigned_abs()) / events,
        "rpc_calls": synced.rpc_calls, "peak_rss_bytes": synced.peak_rss_bytes,
        "cpu_seconds_per_million_events": synced.cpu_seconds * 1e6 / events,
        "database_cpu_seconds_per_million_events": server_cpu * 1e6 / events,
    }))
}

fn print_stages(synced: &Synced) {
    let mut stages: Vec<(&String, f64)> = synced.stages.iter().map(|(name, spent)| (name, *spent)).collect();
    stages.sort_by(|one, other| other.1.total_cmp(&one.1));
    let all: f64 = stages.iter().map(|stage| stage.1).sum();
    let shares: Vec<(String, String)> = stages
        .iter()
        .take(STAGES_SHOWN)
        .map(|(name, spent)| (format!("  {name}"), format!("{:>5.1} %  {spent:.1} s", 100.0 * spent / all)))
        .collect();
    print(&[("share of time per stage (tasks overlap)", String::new())]);
    print(&shares.iter().map(|(name, share)| (name.as_str(), share.clone())).collect::<Vec<_>>());
}

/// Runs `tidemark sync` as a process of its own up to the block below `last`, which is final.
pub async fn sync(bench: &Bench, rpc: &str, last: u64, flags: &[&str]) -> anyhow::Result<Synced> {
    let (dir, server) = (&bench.dir, &bench.server);
    let config = dir.join("bench.toml");
    let text = format!(
        "[[network]]\nid = 31337\nslug = \"bench\"\nfamily = \"evm\"\nrpc = [\"{rpc}\"]\nstart_block = 0\nfinality = {{ depth = 1 }}\n"
    );
    std::fs::write(&config, text)?;
    let output = Command::from(parent::child()?)
        .args(["sync", "--json", "--until", &(last - 1).to_string(), "--config"])
        .arg(&config)
        .args(flags)
        .env("TIDEMARK__DATABASE__URL", server.url().expose().as_str())
        .env("TIDEMARK__OBJECTS__URL", format!("file:{}", dir.join("objects").display()))
        .stderr(Stdio::inherit())
        .output()
        .await?;
    ensure!(output.status.success(), "tidemark sync failed");
    let text = String::from_utf8(output.stdout)?;
    serde_json::from_str(text.lines().last().unwrap_or(""))
        .context("tidemark sync --json ends with one JSON line")
}
