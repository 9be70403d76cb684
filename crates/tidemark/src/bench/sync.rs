//! `bench sync`: history from the first RPC call to finalized owners in the projections, beside the minimal
//! program and the bare COPY of the same rows, all in one run against one simulated node.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, ensure};
use serde::Deserialize;
use serde_json::json;
use tidemark_model::redact::RedactedUrl;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use super::{bare_copy, minimal};
use crate::embedded_pg::{EmbeddedPg, Options};

/// Size of the run.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Logs of the simulated history.
    pub logs: u64,
    /// Blocks they are in.
    pub blocks: u64,
}

/// Blocks the minimal program asks for at once: about as many logs as a provider answers.
const MINIMAL_STEP: u64 = 500;

#[derive(Debug, Deserialize)]
struct Synced {
    events: u64,
    seconds: f64,
    events_per_second: f64,
    rpc_calls: u64,
    peak_rss_bytes: u64,
    cpu_seconds: f64,
}

/// Runs it and gives the JSON that is also written to `out/sync.json`.
pub async fn run(size: Size, out: &Path) -> anyhow::Result<serde_json::Value> {
    let dir = std::env::temp_dir().join(format!("tidemark-bench-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let server = EmbeddedPg::start(&Options { data_dir: dir.clone(), port: None }).await?;
    let result = measure(size, &dir, &server).await;
    server.stop().await?;
    std::fs::remove_dir_all(&dir).with_context(|| format!("{} cannot be removed", dir.display()))?;
    let result = result?;
    std::fs::create_dir_all(out)?;
    std::fs::write(out.join("sync.json"), serde_json::to_string_pretty(&result)?)?;
    Ok(result)
}

async fn measure(size: Size, dir: &Path, server: &EmbeddedPg) -> anyhow::Result<serde_json::Value> {
    let program = std::env::current_exe()?;
    let (mut node, rpc) = start_node(&program, size).await?;
    let last = size.blocks - 1;
    eprintln!("minimal program …");
    let minimal = minimal::run(&rpc, server.url(), last, MINIMAL_STEP).await?;
    forget(server.url(), "bench_minimal").await?;
    eprintln!("tidemark sync …");
    let wal_before = wal_bytes(server.url()).await?;
    let synced = sync(&program, dir, server, &rpc, last).await?;
    let wal = wal_bytes(server.url()).await? - wal_before;
    node.kill().await?;
    eprintln!("bare COPY …");
    let copies = bare_copy::run(server.url().expose().as_str()).await?;
    let copy_seconds: f64 = copies.iter().map(|copy| copy.seconds).sum();
    let rows: u64 = copies.iter().map(|copy| copy.rows).sum();
    let bytes: i64 = copies.iter().map(|copy| copy.bytes).sum();
    let events = float(synced.events);
    let minimal_rate = float(minimal.events) / minimal.seconds;
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
        ("CPU seconds per million events (process)", format!("{:.1}", synced.cpu_seconds * 1e6 / events)),
    ]);
    Ok(json!({
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
    }))
}

fn float(count: u64) -> f64 {
    // Exact below 2^53, far above any benchmark.
    u32::try_from(count).map_or_else(|_| count.to_string().parse().unwrap_or(f64::MAX), f64::from)
}

#[expect(clippy::print_stdout, reason = "a benchmark speaks on stdout")]
fn print(rows: &[(&str, String)]) {
    for (name, value) in rows {
        println!("{name:<42} {value}");
    }
}

async fn start_node(program: &Path, size: Size) -> anyhow::Result<(Child, String)> {
    let mut node = Command::new(program)
        .args([
            "sim",
            "--listen",
            "127.0.0.1:0",
            "--bench-logs",
            &size.logs.to_string(),
            "--blocks",
            &size.blocks.to_string(),
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let stdout = node.stdout.take().context("the node has a standard output")?;
    let url =
        BufReader::new(stdout).lines().next_line().await?.context("the simulated node ended at once")?;
    Ok((node, url))
}

async fn sync(
    program: &Path,
    dir: &Path,
    server: &EmbeddedPg,
    rpc: &str,
    last: u64,
) -> anyhow::Result<Synced> {
    let config = dir.join("bench.toml");
    let text = format!(
        "[[network]]\nid = 31337\nslug = \"bench\"\nfamily = \"evm\"\nrpc = [\"{rpc}\"]\nstart_block = 0\nfinality = {{ depth = 1 }}\n"
    );
    std::fs::write(&config, text)?;
    let output = Command::new(program)
        .args(["sync", "--json", "--until", &(last - 1).to_string(), "--config"])
        .arg(&config)
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

async fn wal_bytes(url: &RedactedUrl) -> anyhow::Result<i64> {
    let row = query(url, "select pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint").await?;
    Ok(row.get(0))
}

async fn forget(url: &RedactedUrl, schema: &str) -> anyhow::Result<()> {
    let (client, connection) = tokio_postgres::connect(url.expose().as_str(), tokio_postgres::NoTls).await?;
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(connection);
    client.batch_execute(&format!("drop schema {schema} cascade; checkpoint")).await?;
    Ok(())
}

async fn query(url: &RedactedUrl, sql: &str) -> anyhow::Result<tokio_postgres::Row> {
    let (client, connection) = tokio_postgres::connect(url.expose().as_str(), tokio_postgres::NoTls).await?;
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(connection);
    Ok(client.query_one(sql, &[]).await?)
}
