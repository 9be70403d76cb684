//! A private anvil: a real EVM node for one test.

use crate::process::{Folder, Port, Process, wait_until_it_answers};
use crate::tools;

/// An anvil of one test's own.
#[derive(Debug)]
pub struct Anvil {
    /// `http://127.0.0.1:PORT`
    pub url: String,
    /// `ws://127.0.0.1:PORT`
    pub ws_url: String,
    // The process goes before the folder it writes to.
    _process: Process,
    _folder: Folder,
    _port: Port,
}

const QUESTION: &[u8] =
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 59\r\n\
    Connection: close\r\n\r\n{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"eth_chainId\",\"params\":[]}";

impl Anvil {
    /// Starts one with these further arguments, such as `["--slots-in-an-epoch", "8"]`.
    pub async fn start(args: &[&str]) -> anyhow::Result<Self> {
        let program = tools::find(
            "anvil",
            &[
                "node_modules/@foundry-rs/anvil-linux-amd64/bin/anvil",
                "node_modules/@foundry-rs/anvil-linux-arm64/bin/anvil",
                "bin/anvil",
            ],
        )?;
        let folder = Folder::new("anvil")?;
        let log = folder.0.join("server.log");
        let port = Port::free()?;
        let port_text = port.number.to_string();
        let own = ["--host", "127.0.0.1", "--port", &port_text];
        let all: Vec<String> = own.iter().chain(args).map(|arg| (*arg).to_owned()).collect();
        let process = Process::start(&program, &all, &log)?;
        wait_until_it_answers("anvil", port.number, QUESTION, "HTTP/1.1 200", &log).await?;
        let at = format!("127.0.0.1:{port_text}");
        Ok(Self {
            url: format!("http://{at}"),
            ws_url: format!("ws://{at}"),
            _process: process,
            _folder: folder,
            _port: port,
        })
    }
}
