//! Real brokers for tests: started on a free port with a directory of their own, killed like `kill -9`,
//! started again with or without that directory.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Nats,
    Redis,
}

pub struct Server {
    kind: Kind,
    port: u16,
    dir: PathBuf,
    child: Option<Child>,
}

impl Server {
    pub fn start(kind: Kind) -> anyhow::Result<Self> {
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        let name = format!("tidemark-bus-{}", uuid::Uuid::new_v4().simple());
        let mut server = Self { kind, port, dir: std::env::temp_dir().join(name), child: None };
        server.launch()?;
        Ok(server)
    }

    pub fn url(&self) -> String {
        match self.kind {
            Kind::Nats => format!("nats://127.0.0.1:{}", self.port),
            Kind::Redis => format!("redis://127.0.0.1:{}", self.port),
        }
    }

    /// `kill -9`.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Takes its disk away; it must be dead.
    pub fn wipe(&self) -> anyhow::Result<()> {
        ensure!(self.child.is_none(), "kill it first");
        Ok(std::fs::remove_dir_all(&self.dir)?)
    }

    pub fn launch(&mut self) -> anyhow::Result<()> {
        std::fs::create_dir_all(&self.dir)?;
        let (port, dir) = (self.port.to_string(), &self.dir);
        let mut command = match self.kind {
            Kind::Redis => {
                let mut command = Command::new("redis-server");
                command.args([
                    "--port",
                    &port,
                    "--bind",
                    "127.0.0.1",
                    "--appendonly",
                    "yes",
                    "--save",
                    "",
                    "--dir",
                ]);
                command.arg(dir);
                command
            }
            Kind::Nats => {
                let mut command = Command::new(nats_binary()?);
                command.args(["-a", "127.0.0.1", "-p", &port, "-js", "-sd"]).arg(dir);
                command
            }
        };
        let log = std::fs::File::create(dir.join("server.log"))?;
        let child = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn();
        self.child = Some(child.with_context(|| format!("{:?} does not start", self.kind))?);
        let started = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            ensure!(started.elapsed() < Duration::from_secs(20), "{:?} does not answer", self.kind);
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.kill();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// TIDEMARK_TOOLS, the checkout's `.tools` (also of the main checkout, from a worktree), then PATH.
fn nats_binary() -> anyhow::Result<PathBuf> {
    let mut roots: Vec<PathBuf> = std::env::var_os("TIDEMARK_TOOLS").map(PathBuf::from).into_iter().collect();
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    roots.push(here.join(".tools"));
    let common = Command::new("git").args(["rev-parse", "--git-common-dir"]).current_dir(&here).output();
    if let Ok(output) = common {
        let dir = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        roots.extend(dir.parent().map(|main| main.join(".tools")));
    }
    if let Some(found) = roots.iter().find_map(|root| find(root, 6)) {
        return Ok(found);
    }
    match Command::new("nats-server").arg("--version").output() {
        Ok(_) => Ok(PathBuf::from("nats-server")),
        Err(_) => bail!("no nats-server found: run `make setup-test`, or set TIDEMARK_TOOLS"),
    }
}

fn find(dir: &Path, depth: u8) -> Option<PathBuf> {
    let entries: Vec<PathBuf> = std::fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path()).collect();
    let found = entries
        .iter()
        .find(|path| path.file_name().is_some_and(|name| name == "nats-server") && path.is_file());
    found.cloned().or_else(|| {
        let folders = entries.iter().filter(|path| path.is_dir() && !path.is_symlink());
        (depth > 0).then(|| folders.into_iter().find_map(|folder| find(folder, depth - 1))).flatten()
    })
}
