//! One server process: on a free port, in a folder of its own, ended with its owner.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// A running child. Dropping it kills it and waits; if this process dies, the kernel kills it.
#[derive(Debug)]
pub(crate) struct Process {
    /// Closing it is the order to kill.
    kill: Option<mpsc::Sender<()>>,
    /// The kernel's "parent died" signal belongs to the thread that started the child, so that this
    /// thread lives exactly as long as the child may.
    keeper: Option<JoinHandle<()>>,
}

impl Process {
    pub(crate) fn start(program: &Path, args: &[String], log: &Path) -> anyhow::Result<Self> {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(program).args(args).stdin(Stdio::null());
        let file = File::options().create(true).append(true).open(log)?;
        command.stdout(file.try_clone()?).stderr(file);
        let (kill, order) = mpsc::channel();
        let (started, start) = mpsc::channel();
        let keeper =
            std::thread::Builder::new().name("server".into()).spawn(move || match command.spawn() {
                Ok(mut child) => {
                    let _ = started.send(Ok(()));
                    let _ = order.recv(); // Always an error: the owner dropped its end.
                    let _ = child.kill(); // It may have ended by itself.
                    let _ = child.wait();
                }
                Err(error) => {
                    let _ = started.send(Err(error));
                }
            })?;
        start.recv()?.context("setpriv does not start: run `make setup-test`")?;
        Ok(Self { kill: Some(kill), keeper: Some(keeper) })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.kill.take());
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
    }
}

/// A folder that goes away with its owner; one that a killed test left is in the ignored build folder.
#[derive(Debug)]
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> anyhow::Result<Self> {
        let dir = crate::scratch_dir().join(format!("{name}-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir_all(&dir)?;
        Ok(Self(dir))
    }
}
impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A port nobody uses right now, and no other test of this checkout will be given: two servers of one kind
/// on one port would answer for each other.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) number: u16,
    /// Held as long as the port is ours.
    _lock: File,
}

impl Port {
    pub(crate) fn free() -> anyhow::Result<Self> {
        let folder = crate::scratch_dir().join("ports");
        std::fs::create_dir_all(&folder)?;
        loop {
            let number = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
            let lock = File::create(folder.join(number.to_string()))?;
            if lock.try_lock().is_ok() {
                return Ok(Self { number, _lock: lock });
            }
        }
    }
}

/// Free ports tried before giving up.
pub(crate) const PORT_TRIES: u32 = 3;

/// Long enough for a machine with other work to do.
const START_WAIT: Duration = Duration::from_secs(20);

/// Asks `question` until the answer begins with `expected`.
pub(crate) async fn wait_until_it_answers(
    name: &str,
    port: u16,
    question: &[u8],
    expected: &str,
    log: &Path,
) -> anyhow::Result<()> {
    let deadline = Instant::now() + START_WAIT;
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    loop {
        match ask(address, question) {
            Ok(answer) if answer.starts_with(expected) => return Ok(()),
            _ if Instant::now() > deadline => {
                let said = std::fs::read_to_string(log).unwrap_or_default();
                bail!("{name} does not answer on port {port}; its log: {said}");
            }
            _ => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

fn ask(address: SocketAddr, question: &[u8]) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_millis(500))?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    stream.write_all(question)?;
    let mut answer = [0; 64];
    let length = stream.read(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
}
