//! The whole product as a process of its own: `tidemark run` on a database of one test's own, against a node
//! that the test controls.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tidemark_testkit::pg::TestDb;

/// Longest wait for anything: the machine may have other work.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// A running `tidemark run` with all roles.
pub(crate) struct Live {
    /// `http://127.0.0.1:PORT`
    pub(crate) url: String,
    /// Short name of its network.
    pub(crate) slug: &'static str,
    /// Its folder: configuration and log.
    pub(crate) folder: PathBuf,
    child: Child,
    http: reqwest::Client,
}

impl Live {
    /// Reads the node at `rpc`, whose chain has this id, from its first block on.
    pub(crate) async fn start(slug: &'static str, chain_id: u64, rpc: &str) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        // The product applies its own migrations.
        let db = TestDb::empty().await.expect("a database");
        let folder = tidemark_testkit::scratch_dir().join(&db.name);
        std::fs::create_dir_all(&folder).expect("a folder");
        let port = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let listen = port.local_addr().expect("its address");
        drop(port);
        let config = folder.join("tidemark.toml");
        let text = format!(
            "[database]\nurl = {url:?}\ndata_dir = {folder:?}\n[api]\nlisten = \"{listen}\"\nrate_limit_rps = 0\n\
             [telemetry]\nlisten = \"off\"\nlog_format = \"json\"\n[ingest]\npoll_interval_ms = 100\n\
             [[network]]\nid = {chain_id}\nslug = {slug:?}\nrpc = [{rpc:?}]\nconfirmations = 2\nheaders = \"all\"\n",
            url = db.url,
        );
        std::fs::write(&config, text).expect("writes the configuration");
        let log = File::create(folder.join("log")).expect("a log");
        // If this test is killed, the kernel ends the server too.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", env!("CARGO_BIN_EXE_tidemark"), "run", "--config"])
            .arg(&config)
            .env_remove("RUST_LOG")
            .current_dir(&folder)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("one file twice"))
            .stderr(log)
            .spawn()
            .expect("setpriv does not start: run `make setup-test`");
        let http = reqwest::Client::builder().timeout(Duration::from_secs(10)).build().expect("a client");
        Self { url: format!("http://{listen}"), slug, folder, child, http }
    }

    /// The answer of the API; `None` while there is none, and for what it does not know.
    pub(crate) async fn get(&self, path: &str) -> Option<Value> {
        let answer = self.http.get(format!("{}{path}", self.url)).send().await.ok()?;
        if !answer.status().is_success() {
            return None;
        }
        answer.json().await.ok()
    }

    /// Waits until projections show this block as the newest one read.
    pub(crate) async fn reads_up_to(&mut self, height: u64, hash: &str) {
        let what = format!("block {height} ({hash}) is projected");
        let status = format!("/v1/networks/{}/status", self.slug);
        let block = format!("/v1/blocks/{}/{height}", self.slug);
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.get(&status).await.unwrap_or_default();
            let projected = status["item"]["projected_height"].as_u64();
            if projected.is_some_and(|at| at >= height)
                && self.get(&block).await.is_some_and(|found| found["item"]["hash"] == hash)
            {
                return;
            }
            self.not_yet(deadline, &what, &status).await;
        }
    }

    /// A pause, or the end with everything there is to know.
    pub(crate) async fn not_yet(&mut self, deadline: Instant, what: &str, seen: &Value) {
        let ended = self.child.try_wait().expect("a child of ours");
        assert!(ended.is_none(), "tidemark ended with {ended:?} before {what}: {}", self.last_words());
        assert!(Instant::now() < deadline, "not in time: {what}; last seen: {seen}; {}", self.last_words());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    fn last_words(&self) -> String {
        let log = std::fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        format!("its log ends with:\n{}", lines[lines.len().saturating_sub(15)..].join("\n"))
    }

    /// Stops it as an operator would and returns its exit code and its log.
    pub(crate) fn stop(mut self) -> (Option<i32>, String) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-TERM", &pid]).status().expect("kill runs");
        assert!(sent.success(), "tidemark was gone before it was stopped: {}", self.last_words());
        let code = self.child.wait().expect("it ends").code();
        (code, std::fs::read_to_string(self.folder.join("log")).unwrap_or_default())
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        let _ = self.child.kill(); // It may have been stopped.
        let _ = self.child.wait();
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}
