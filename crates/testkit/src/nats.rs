//! A private NATS server with JetStream.

use crate::process::{Folder, PORT_TRIES, Port, Process, wait_until_it_answers};
use crate::tools;

/// A NATS server of one test's own.
#[derive(Debug)]
pub struct Nats {
    /// `nats://127.0.0.1:PORT`
    pub url: String,
    port: Port,
    process: Option<Process>,
    folder: Folder,
}

impl Nats {
    /// Starts one with JetStream on an empty disk.
    pub async fn start() -> anyhow::Result<Self> {
        for attempt in 1.. {
            let folder = Folder::new("nats")?;
            let port = Port::free()?;
            let mut server =
                Self { url: format!("nats://127.0.0.1:{}", port.number), port, process: None, folder };
            match server.launch().await {
                Err(error) if attempt < PORT_TRIES => drop(error), // Somebody took the port first.
                launched => return launched.map(|()| server),
            }
        }
        unreachable!("the loop returns on its last attempt")
    }

    async fn launch(&mut self) -> anyhow::Result<()> {
        let program = tools::find("nats-server", &["py/bin/nats-server", "bin/nats-server"])?;
        let log = self.folder.0.join("server.log");
        let disk = self.folder.0.join("js").display().to_string();
        let port = self.port.number.to_string();
        let args = ["-a", "127.0.0.1", "-p", &port, "-js", "-sd", &disk].map(str::to_owned);
        self.process = Some(Process::start(&program, &args, &log)?);
        wait_until_it_answers("nats-server", self.port.number, b"", "INFO ", &log).await
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
        let disk = self.folder.0.join("js");
        if disk.exists() {
            std::fs::remove_dir_all(disk)?;
        }
        self.launch().await
    }
}
