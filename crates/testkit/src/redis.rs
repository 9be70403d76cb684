//! A private Redis with an append-only file.

use crate::process::{Folder, PORT_TRIES, Port, Process, wait_until_it_answers};
use crate::tools;

/// A Redis of one test's own.
#[derive(Debug)]
pub struct Redis {
    /// `redis://127.0.0.1:PORT`
    pub url: String,
    port: Port,
    process: Option<Process>,
    folder: Folder,
}

impl Redis {
    /// Starts one on an empty disk; every write is on disk before it is answered.
    pub async fn start() -> anyhow::Result<Self> {
        for attempt in 1.. {
            let folder = Folder::new("redis")?;
            let port = Port::free()?;
            let mut server =
                Self { url: format!("redis://127.0.0.1:{}", port.number), port, process: None, folder };
            match server.launch().await {
                Err(error) if attempt < PORT_TRIES => drop(error), // Somebody took the port first.
                launched => return launched.map(|()| server),
            }
        }
        unreachable!("the loop returns on its last attempt")
    }

    async fn launch(&mut self) -> anyhow::Result<()> {
        let program = tools::find("redis-server", &["bin/redis-server"])?;
        let log = self.folder.0.join("server.log");
        let disk = self.folder.0.join("data");
        std::fs::create_dir_all(&disk)?;
        let (port, disk) = (self.port.number.to_string(), disk.display().to_string());
        let args = ["--port", &port, "--bind", "127.0.0.1", "--dir", &disk, "--save", ""].map(str::to_owned);
        let durable = ["--appendonly", "yes", "--appendfsync", "always"].map(str::to_owned);
        self.process = Some(Process::start(&program, &[args.as_slice(), &durable].concat(), &log)?);
        wait_until_it_answers("redis-server", self.port.number, b"PING\r\n", "+PONG", &log).await
    }

    /// Kills it, as a crash would; a restart listens on the same port.
    pub fn stop(&mut self) {
        self.process = None;
    }

    /// Starts again on the same port with everything it had stored.
    pub async fn restart_with_disk(&mut self) -> anyhow::Result<()> {
        self.stop();
        self.launch().await
    }

    /// Starts again on the same port with an empty disk.
    pub async fn restart_without_disk(&mut self) -> anyhow::Result<()> {
        self.stop();
        std::fs::remove_dir_all(self.folder.0.join("data"))?;
        self.launch().await
    }
}
