//! Benchmarks: ratios measured in one run on one machine. Each prints a table for people and writes JSON.

pub mod api;
pub mod bare_copy;
pub mod broker;
pub mod bus;
pub mod growth;
pub mod ingest;
pub mod ledger;
pub mod live;
pub mod minimal;
pub mod process;
pub mod rows;
pub mod sync;

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::Context;
use tidemark_model::redact::RedactedUrl;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::embedded_pg::{EmbeddedPg, Options};
use crate::parent;

/// The file that says that a kept database is whole.
const KEPT: &str = "kept";

/// Copies a folder as it is to where nothing is yet, or only what a copy that broke off left.
async fn copy_folder(from: &Path, to: &Path) -> anyhow::Result<()> {
    if to.exists() {
        std::fs::remove_dir_all(to).with_context(|| format!("{} cannot be removed", to.display()))?;
    }
    if let Some(above) = to.parent() {
        std::fs::create_dir_all(above)?;
    }
    let done = Command::new("cp").arg("-a").arg(from).arg(to).status().await?;
    anyhow::ensure!(done.success(), "{} cannot be copied to {}", from.display(), to.display());
    Ok(())
}

/// What every benchmark stands on: a private Postgres with our settings, in a folder that goes with it.
pub struct Bench {
    /// Scratch folder.
    pub dir: PathBuf,
    /// The server; its database is empty, without our schema.
    pub server: EmbeddedPg,
}

impl Bench {
    /// Starts it.
    pub async fn start() -> anyhow::Result<Self> {
        let dir = std::env::temp_dir().join(format!("tidemark-bench-{}", std::process::id()));
        std::fs::create_dir_all(&dir)?;
        Self::start_in(dir).await
    }

    async fn start_in(dir: PathBuf) -> anyhow::Result<Self> {
        let server = EmbeddedPg::start(&Options { data_dir: dir.clone(), port: None }).await?;
        Ok(Self { dir, server })
    }

    /// Starts it on a copy of what [`Bench::keep`] left in `kept`; `None` if there is nothing.
    pub async fn start_on(kept: &Path) -> anyhow::Result<Option<Self>> {
        if !kept.join(KEPT).exists() {
            return Ok(None);
        }
        let dir = std::env::temp_dir().join(format!("tidemark-bench-{}", std::process::id()));
        copy_folder(kept, &dir).await?;
        Self::start_in(dir).await.map(Some)
    }

    /// Leaves a copy of the database in `kept`, and goes on with its own.
    pub async fn keep(self, kept: &Path) -> anyhow::Result<Self> {
        self.server.stop().await?;
        copy_folder(&self.dir, kept).await?;
        std::fs::write(kept.join(KEPT), "")?;
        Self::start_in(self.dir).await
    }

    /// Processor time of the server so far, all its processes together.
    pub fn server_cpu_seconds(&self) -> f64 {
        process::server_cpu_seconds(&self.dir.join("postgres"))
    }

    /// Stops the server and removes the folder.
    pub async fn end(self) -> anyhow::Result<()> {
        self.server.stop().await?;
        std::fs::remove_dir_all(&self.dir)
            .with_context(|| format!("{} cannot be removed", self.dir.display()))
    }
}

/// Starts the simulated node as its own process, with a still history; gives it and its URL.
pub async fn start_node(logs: u64, blocks: u64) -> anyhow::Result<(Child, String)> {
    let mut node = Command::from(parent::child()?)
        .args(["sim", "--listen", "127.0.0.1:0"])
        .args(["--bench-logs", &logs.to_string(), "--blocks", &blocks.to_string()])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let stdout = node.stdout.take().context("the node has a standard output")?;
    let url =
        BufReader::new(stdout).lines().next_line().await?.context("the simulated node ended at once")?;
    Ok((node, url))
}

/// One row of one statement.
pub async fn query(url: &RedactedUrl, sql: &str) -> anyhow::Result<tokio_postgres::Row> {
    let (client, connection) = tokio_postgres::connect(url.expose().as_str(), tokio_postgres::NoTls).await?;
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(connection);
    Ok(client.query_one(sql, &[]).await?)
}

/// Statements without an answer.
pub async fn execute(url: &RedactedUrl, sql: &str) -> anyhow::Result<()> {
    let (client, connection) = tokio_postgres::connect(url.expose().as_str(), tokio_postgres::NoTls).await?;
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(connection);
    Ok(client.batch_execute(sql).await?)
}

/// WAL written so far.
pub async fn wal_bytes(url: &RedactedUrl) -> anyhow::Result<i64> {
    let row = query(url, "select pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint").await?;
    Ok(row.get(0))
}

/// Exact below 2^53, far above any benchmark.
pub fn float(count: u64) -> f64 {
    u32::try_from(count).map_or_else(|_| count.to_string().parse().unwrap_or(f64::MAX), f64::from)
}

/// Share of the cores taken by others above which a window says more about them than about us.
pub const STOLEN_MAX_PERCENT: f64 = 3.0;
/// Most tries to find a window without them.
pub const WINDOWS_MAX: usize = 4;

/// The kernel's count of time since it began: all of it, and what others on the host took. Zero where it does not say.
pub struct Processor {
    time: u64,
    stolen: u64,
}

impl Processor {
    /// As it stands.
    pub fn now() -> Self {
        let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let first = text.lines().next().unwrap_or_default();
        let counts: Vec<u64> = first.split_whitespace().skip(1).take(8).flat_map(str::parse).collect();
        Self { time: counts.iter().sum(), stolen: counts.get(7).copied().unwrap_or(0) }
    }
    /// What others took since then.
    pub fn stolen_percent(&self) -> f64 {
        let now = Self::now();
        float(now.stolen - self.stolen) / float((now.time - self.time).max(1)) * 100.0
    }
}

/// The kernel's own high-water mark of this process; 0 where there is none.
pub fn peak_rss_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// Sets that mark back to what is resident now, where the kernel allows it.
pub fn forget_peak_rss() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// The table for people.
#[expect(clippy::print_stdout, reason = "a benchmark speaks on stdout")]
pub fn print(rows: &[(&str, String)]) {
    for (name, value) in rows {
        println!("{name:<42} {value}");
    }
}

/// Writes `out/NAME.json` and says so.
#[expect(clippy::print_stdout, reason = "a benchmark speaks on stdout")]
pub fn write(out: &Path, name: &str, result: &serde_json::Value) -> anyhow::Result<()> {
    std::fs::create_dir_all(out)?;
    let path = out.join(format!("{name}.json"));
    std::fs::write(&path, serde_json::to_string_pretty(result)?)
        .with_context(|| format!("{} cannot be written", path.display()))?;
    println!("written to {}", path.display());
    Ok(())
}
