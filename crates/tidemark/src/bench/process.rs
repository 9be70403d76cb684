//! `tidemark run` as a process of its own, for benchmarks that measure it from outside.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::process::{Child, Command};

use super::Bench;
use crate::parent;

/// What the process reads and serves.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The lines of all `[[network]]` blocks.
    pub networks: String,
    /// Further lines of the configuration, before the networks.
    pub lines: String,
}

impl Setup {
    /// One network at one node.
    pub fn one(slug: &str, id: u64, rpc: &str, ws: &[String]) -> Self {
        let ws: Vec<String> = ws.iter().map(|url| format!("\"{url}\"")).collect();
        let networks = format!(
            "[[network]]\nid = {id}\nslug = \"{slug}\"\nrpc = [\"{rpc}\"]\nws = [{}]\n",
            ws.join(", ")
        );
        Self { networks, lines: String::new() }
    }
}

/// A serving process.
pub struct Serving {
    child: Child,
    pid: u32,
    log: PathBuf,
    /// Base of the API.
    pub api: String,
    /// Base of probes and metrics.
    pub telemetry: String,
}

/// What a process has used so far.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    /// Highest resident memory.
    pub peak_rss_bytes: u64,
    /// Resident memory now.
    pub rss_bytes: u64,
    /// User and system time.
    pub cpu_seconds: f64,
}

/// Processor time of a process, in seconds.
#[derive(Debug, Clone, Copy)]
struct Times {
    parent: u32,
    /// Its own.
    own: f64,
    /// Its children's that have ended.
    ended: f64,
}

impl Times {
    /// `None` where there is no such process, or the system does not tell.
    fn of(pid: u32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // After the name in parentheses, which may hold anything: state, parent, …, and four times as fields 14 to 17.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok()).unwrap_or(0.0);
        // USER_HZ is 100 on every Linux of the last decades.
        let seconds = |from: usize| (ticks(from) + ticks(from + 1)) / 100.0;
        Some(Self { parent: fields.get(1)?.parse().ok()?, own: seconds(11), ended: seconds(13) })
    }
}

/// Processor time of a database server with all its processes, those that have ended too; 0 where nobody tells.
pub fn server_cpu_seconds(data: &Path) -> f64 {
    let lock = std::fs::read_to_string(data.join("postmaster.pid")).unwrap_or_default();
    let Some(server) = lock.lines().next().and_then(|line| line.trim().parse::<u32>().ok()) else {
        return 0.0;
    };
    let Some(first) = Times::of(server) else { return 0.0 };
    let running = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let workers: f64 = running
        .filter_map(|entry| Times::of(entry.file_name().to_str()?.parse().ok()?))
        .filter(|times| times.parent == server)
        .map(|times| times.own)
        .sum();
    first.own + first.ended + workers
}

/// How long an ordered end may take.
const STOP_WAIT: Duration = Duration::from_secs(40);

impl Serving {
    /// Starts all roles on the benchmark's database. It may not listen yet.
    pub async fn start(bench: &Bench, setup: &Setup) -> anyhow::Result<Self> {
        let (api, telemetry) = (free_address()?, free_address()?);
        let config = bench.dir.join("serving.toml");
        let text = format!(
            "[api]\nlisten = \"{api}\"\nrate_limit_rps = 0\n[telemetry]\nlisten = \"{telemetry}\"\nlog_format = \"json\"\n{}\n{}",
            setup.lines, setup.networks
        );
        std::fs::write(&config, text)?;
        let log = bench.dir.join("serving.log");
        let child = Command::from(parent::child()?)
            .args(["run", "--config"])
            .arg(&config)
            .env("TIDEMARK__DATABASE__URL", bench.server.url().expose().as_str())
            .env("TIDEMARK__OBJECTS__URL", format!("file:{}", bench.dir.join("objects").display()))
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log)?)
            .kill_on_drop(true)
            .spawn()?;
        let pid = child.id().context("the process runs")?;
        Ok(Self { child, pid, log, api: format!("http://{api}"), telemetry: format!("http://{telemetry}") })
    }

    /// An error if it has ended by itself, with the end of its log.
    pub fn check(&mut self) -> anyhow::Result<()> {
        let Some(status) = self.child.try_wait()? else { return Ok(()) };
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        anyhow::bail!(
            "the process ended with {status}:\n{}",
            lines[lines.len().saturating_sub(10)..].join("\n")
        )
    }

    /// What it has used; zeros where the system does not tell.
    pub fn usage(&self) -> Usage {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        let kib = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            line.trim_matches(|letter: char| !letter.is_ascii_digit()).parse::<u64>().unwrap_or(0)
        };
        Usage {
            peak_rss_bytes: kib("VmHWM:") * 1024,
            rss_bytes: kib("VmRSS:") * 1024,
            cpu_seconds: Times::of(self.pid).map_or(0.0, |times| times.own),
        }
    }

    /// As Ctrl-C would; an end that is not in order is an error.
    pub async fn stop(&mut self) -> anyhow::Result<()> {
        let sent = Command::new("kill").args(["-TERM", &self.pid.to_string()]).status().await?;
        ensure!(sent.success(), "the process cannot be asked to end");
        let status = tokio::time::timeout(STOP_WAIT, self.child.wait())
            .await
            .context("the process does not end")??;
        ensure!(status.success(), "the process ended with {status}");
        Ok(())
    }
}

/// Free a moment ago; good enough for a benchmark.
fn free_address() -> anyhow::Result<std::net::SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}
