//! Real brokers for benchmarks: a program of the tools folder or of the path, on a free port, in a folder of
//! its own. The kernel ends it if this process dies.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::Instant;

/// Which broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// NATS with JetStream on disk.
    Nats,
    /// Redis with its append-only file on (synced every second, its default).
    Redis,
}

/// A running broker; ends with its owner.
pub struct Broker {
    /// Where it listens.
    pub url: String,
    _process: Child,
}

/// Long enough for a machine with other work to do.
const START_WAIT: Duration = Duration::from_secs(20);

impl Broker {
    /// Starts one below `dir`; none, with the reason on standard error, if its program is not installed.
    pub async fn start(kind: Kind, dir: &Path) -> anyhow::Result<Option<Self>> {
        let (name, below) = match kind {
            Kind::Nats => ("nats-server", "py/bin/nats-server"),
            Kind::Redis => ("redis-server", "bin/redis-server"),
        };
        let Some(program) = find(name, below) else {
            eprintln!("{name} is not installed: run `make setup-test`, or name its folder in TIDEMARK_TOOLS");
            return Ok(None);
        };
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        let disk = dir.join(name);
        std::fs::create_dir_all(&disk)?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(program).stdin(Stdio::null());
        let port_text = port.to_string();
        let url = match kind {
            Kind::Nats => {
                command.args(["-a", "127.0.0.1", "-p", &port_text, "-js", "-sd"]).arg(&disk);
                format!("nats://127.0.0.1:{port}")
            }
            Kind::Redis => {
                command.args(["--port", &port_text, "--bind", "127.0.0.1", "--save", ""]);
                command.args(["--appendonly", "yes", "--dir"]).arg(&disk);
                format!("redis://127.0.0.1:{port}")
            }
        };
        let log = std::fs::File::create(dir.join(format!("{name}.log")))?;
        command.stdout(log.try_clone()?).stderr(log).kill_on_drop(true);
        let process = command.spawn().context("setpriv does not start: run `make setup-test`")?;
        let started = Instant::now();
        while TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).await.is_err() {
            ensure!(started.elapsed() < START_WAIT, "{name} does not answer on port {port}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(Some(Self { url, _process: process }))
    }
}

/// In TIDEMARK_TOOLS, or `.tools` here, or on the path.
fn find(name: &str, below: &str) -> Option<PathBuf> {
    let tools = std::env::var_os("TIDEMARK_TOOLS").map_or_else(|| PathBuf::from(".tools"), PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::iter::once(tools.join(below))
        .chain(std::env::split_paths(&path).map(|dir| dir.join(name)))
        .find(|program| program.is_file())
}
