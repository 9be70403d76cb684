//! `bench ingest`: history into raw.* and nothing else, beside the bare COPY of the same rows.

use std::path::Path;

use anyhow::ensure;
use serde_json::json;

use super::sync::sync;
use super::{Bench, bare_copy, float, print, start_node, wal_bytes, write};

/// `bench ingest`
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct IngestArgs {
    /// Logs of the simulated history
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    pub logs: u64,
    /// Blocks they are in
    #[arg(long, value_name = "N", default_value_t = 50_000)]
    pub blocks: u64,
}

/// What one request may carry: as many logs as are held in memory at once, and a usual batch of headers.
const LOGS_PER_REQUEST: u64 = 20_000;
const HEADERS_PER_REQUEST: u64 = 100;

/// Runs it and writes `out/ingest.json`.
pub async fn run(args: &IngestArgs, out: &Path) -> anyhow::Result<()> {
    ensure!(args.blocks >= 10 && args.logs >= args.blocks, "at least ten blocks, and a log in each");
    let bench = Bench::start().await?;
    let result = measure(args, &bench).await;
    bench.end().await?;
    write(out, "ingest", &result?)
}

async fn measure(size: &IngestArgs, bench: &Bench) -> anyhow::Result<serde_json::Value> {
    let url = bench.server.url();
    let (mut node, rpc) = start_node(size.logs, size.blocks).await?;
    eprintln!("tidemark sync --raw-only …");
    let wal_before = wal_bytes(url).await?;
    let raw = sync(bench, &rpc, size.blocks - 1, &["--raw-only"]).await?;
    let wal = wal_bytes(url).await? - wal_before;
    node.kill().await?;
    eprintln!("bare COPY …");
    let copies = bare_copy::run(url.expose().as_str(), bare_copy::RAW_TABLES).await?;
    let copy_seconds: f64 = copies.iter().map(|copy| copy.seconds).sum();
    let rows: u64 = copies.iter().map(|copy| copy.rows).sum();
    let bytes: i64 = copies.iter().map(|copy| copy.bytes).sum();
    let events = float(raw.events);
    let least = size.logs.div_ceil(LOGS_PER_REQUEST) + size.blocks.div_ceil(HEADERS_PER_REQUEST);
    let ratio = copy_seconds / raw.seconds;
    print(&[
        ("events", format!("{}", raw.events)),
        ("history into raw.*", format!("{:.0} events/s ({:.1} s)", raw.events_per_second, raw.seconds)),
        (
            "bare COPY of the same rows",
            format!("{:.0} events/s ({copy_seconds:.1} s)", events / copy_seconds),
        ),
        ("ratio to bare COPY (floor 0.5)", format!("{ratio:.2}")),
        ("RPC requests", format!("{}", raw.rpc_calls)),
        ("least possible", format!("{least} (ratio {:.2})", float(raw.rpc_calls) / float(least))),
        ("peak memory (limit 300 MiB)", format!("{} MiB", raw.peak_rss_bytes / (1024 * 1024))),
        ("rows per event", format!("{:.1}", float(rows) / events)),
        ("bytes on disk per event", format!("{:.0}", float(bytes.unsigned_abs()) / events)),
        ("WAL bytes per event", format!("{:.0}", float(wal.unsigned_abs()) / events)),
        ("CPU seconds per million events (process)", format!("{:.1}", raw.cpu_seconds * 1e6 / events)),
    ]);
    Ok(json!({
        "logs": size.logs, "blocks": size.blocks, "events": raw.events,
        "events_per_second": raw.events_per_second, "seconds": raw.seconds,
        "bare_copy": { "seconds": copy_seconds, "events_per_second": events / copy_seconds, "tables": copies },
        "ratio_to_bare_copy": ratio,
        "rpc_calls": raw.rpc_calls, "rpc_calls_least": least,
        "rpc_ratio": float(raw.rpc_calls) / float(least),
        "peak_rss_bytes": raw.peak_rss_bytes,
        "rows_per_event": float(rows) / events,
        "bytes_per_event": float(bytes.unsigned_abs()) / events,
        "wal_bytes_per_event": float(wal.unsigned_abs()) / events,
        "cpu_seconds_per_million_events": raw.cpu_seconds * 1e6 / events,
    }))
}
