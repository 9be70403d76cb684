//! `tidemark run` as a process of its own, for benchmarks that measure it from outside.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::process::{Child, Command};

use super::Bench;

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
        let child = Command::new(std::env::current_exe()?)
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
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        // After the name in parentheses, which may hold anything: utime and stime are fields 14 and 15.
        let fields: Vec<&str> =
            stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect()).unwrap_or_default();
        let ticks: f64 = fields.iter().skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
        Usage {
            peak_rss_bytes: kib("VmHWM:") * 1024,
            rss_bytes: kib("VmRSS:") * 1024,
            cpu_seconds: ticks / 100.0, // USER_HZ is 100 on every Linux of the last decades.
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
