//! A whole Tidemark for one test: the binary as operators run it, on a database of its own, reading a
//! simulated chain of which the test knows the truth.

#![allow(dead_code, reason = "every test file uses its own part")]

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tidemark_model::redact::RedactedUrl;
use tidemark_sim::{BalanceKey, FaultProfile, ReorgKind, Sim, SimServer};
use tidemark_store::{Db, DbOptions};
use tidemark_testkit::pg::TestDb;
use tokio::process::{Child, Command};

/// Everything that counts, waits at most this long; a machine with other work to do is slow.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Balances by contract, token and account; no zero rows.
pub(crate) type Balances = BTreeMap<BalanceKey, String>;

/// What a test may set in its configuration.
#[derive(Default)]
pub(crate) struct Setup {
    pub(crate) start_block: u64,
    /// Heights per lease; 0: the default, wider than any test chain.
    pub(crate) lease_range: u64,
    /// Most log records the provider is asked for at once; 0: the default.
    pub(crate) getlogs_step: u64,
    /// Further lines of `[ingest]`.
    pub(crate) ingest: String,
    /// Lines of `[bus]`.
    pub(crate) bus: String,
    /// Further lines of `[[network]]`.
    pub(crate) network: String,
}

pub(crate) struct World {
    pub(crate) sim: Sim,
    pub(crate) servers: Vec<SimServer>,
    pub(crate) db: Db,
    dir: PathBuf,
    url: String,
    /// What the commands find in their environment besides.
    pub(crate) env: Vec<(&'static str, String)>,
    /// Logs are numbered by start.
    starts: u32,
}

/// How a command ended.
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ended {
    #[track_caller]
    pub(crate) fn succeeded(self, what: &str) -> String {
        assert_eq!(self.code, Some(0), "{what}\nout: {}\nerr: {}", self.out, tail_of(&self.err));
        self.out
    }
}

/// A process of the binary.
pub(crate) struct Running {
    child: Child,
    out: PathBuf,
    err: PathBuf,
}

impl Running {
    /// `kill -9`, and gone.
    pub(crate) async fn kill(mut self) {
        self.child.kill().await.expect("can be killed");
    }
    /// As Ctrl-C would; ends in order.
    pub(crate) async fn stop(mut self) -> Ended {
        let pid = self.child.id().expect("still runs").to_string();
        let sent = Command::new("kill").args(["-TERM", &pid]).status().await.expect("kill runs");
        assert!(sent.success());
        let status = tokio::time::timeout(PATIENCE, self.child.wait()).await.expect("ends").expect("waits");
        self.ended(status)
    }
    pub(crate) async fn end(mut self, patience: Duration) -> Ended {
        match tokio::time::timeout(patience, self.child.wait()).await {
            Ok(status) => self.ended(status.expect("waits")),
            Err(_) => panic!("it does not end; its log: {}", self.log()),
        }
    }
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("can be asked").is_some()
    }
    pub(crate) fn log(&self) -> String {
        tail_of(&std::fs::read_to_string(&self.err).unwrap_or_default())
    }
    pub(crate) fn said(&self) -> String {
        std::fs::read_to_string(&self.out).unwrap_or_default()
    }
    fn ended(&self, status: ExitStatus) -> Ended {
        let read = |path: &PathBuf| std::fs::read_to_string(path).unwrap_or_default();
        Ended { code: status.code(), out: read(&self.out), err: read(&self.err) }
    }
}

fn tail_of(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

impl World {
    /// A world whose chain is offered by one provider per profile.
    pub(crate) async fn new(sim: Sim, providers: Vec<FaultProfile>, setup: Setup) -> Self {
        let test = TestDb::empty().await.expect("a database");
        Self::on(test.url, sim, providers, setup).await
    }

    /// The same on a database that the test looks after.
    pub(crate) async fn on(url: String, sim: Sim, providers: Vec<FaultProfile>, setup: Setup) -> Self {
        let dir = tidemark_testkit::scratch_dir().join(format!("world-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir_all(&dir).expect("a folder");
        let mut servers = Vec::new();
        for profile in providers {
            let listen = "127.0.0.1:0".parse().expect("an address");
            servers.push(sim.serve(listen, profile).await.expect("serves"));
        }
        let rpc: Vec<String> = servers.iter().map(|server| format!("\"{}\"", server.url)).collect();
        let lease = match setup.lease_range {
            0 => String::new(),
            blocks => format!("lease_range = {blocks}\n"),
        };
        let step = match setup.getlogs_step {
            0 => String::new(),
            step => format!(
                "getlogs_step_init = {step}\ngetlogs_step_min = {}\ngetlogs_step_max = {step}\n",
                (step / 4).max(1)
            ),
        };
        let config = format!(
            "[database]\ndata_dir = \"{}\"\n[telemetry]\nlisten = \"off\"\n[api]\nlisten = \"127.0.0.1:0\"\n\
             [bus]\npartitions = 3\n{}\n[ingest]\npoll_interval_ms = 50\nrpc_timeouts_ms = {{ default = 1000, eth_getLogs = 2000 }}\n\
             {lease}{step}{}\n[[network]]\nid = {}\nslug = \"simnet\"\nstart_block = {}\nrpc = [{}]\nconfirmations = 3\n{}\n",
            dir.join("data").display(),
            setup.bus,
            setup.ingest,
            sim.config().chain_id,
            setup.start_block,
            rpc.join(", "),
            setup.network,
        );
        std::fs::write(dir.join("tidemark.toml"), config).expect("writes");
        let db = Db::open(&RedactedUrl::parse(&url).expect("a URL"), &DbOptions::default()).expect("a pool");
        Self { sim, servers, db, dir, url, env: vec![], starts: 0 }
    }

    /// One honest provider and nothing special.
    pub(crate) async fn plain(sim: Sim) -> Self {
        Self::new(sim, vec![FaultProfile::default()], Setup::default()).await
    }

    pub(crate) fn start(&mut self, args: &[&str]) -> Running {
        self.starts += 1;
        let (out, err) = (
            self.dir.join(format!("{:03}.out", self.starts)),
            self.dir.join(format!("{:03}.err", self.starts)),
        );
        let child = Command::new(env!("CARGO_BIN_EXE_tidemark"))
            .args(args)
            .env("TIDEMARK_CONFIG", self.dir.join("tidemark.toml"))
            .env("TIDEMARK__DATABASE__URL", &self.url)
            .env("USER", "olga")
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .env_remove("RUST_LOG")
            .current_dir(&self.dir)
            .stdin(Stdio::null())
            .stdout(File::create(&out).expect("a file"))
            .stderr(File::create(&err).expect("a file"))
            .kill_on_drop(true)
            .spawn()
            .expect("starts");
        Running { child, out, err }
    }

    pub(crate) async fn run(&mut self, args: &[&str]) -> Ended {
        self.start(args).end(PATIENCE).await
    }

    /// All roles but the executor.
    pub(crate) fn live(&mut self) -> Running {
        self.start(&["run", "--roles", "ingest,relay,workers,api"])
    }

    pub(crate) async fn number(&self, sql: &str) -> Option<i64> {
        let conn = self.db.conn().await.expect("connects");
        // Before the first migration there is no table: that is no number either.
        conn.query_opt("ask", sql, &[]).await.ok().flatten().and_then(|row| row.get(0))
    }

    pub(crate) async fn text(&self, sql: &str) -> String {
        let conn = self.db.conn().await.expect("connects");
        let rows = conn.query("ask", sql, &[]).await.expect("answers");
        let lines: Vec<String> =
            rows.iter().map(|row| row.get::<_, Option<String>>(0).unwrap_or_default()).collect();
        lines.join("\n")
    }

    /// What `table` says in its column `qty`, by contract, token and account.
    async fn balances(&self, table: &str, qty: &str) -> Balances {
        let sql = format!(
            "select c.address_normalized, a.token_id_raw, w.address_normalized, o.{qty}::text
               from {table} o
               join catalog.assets a on a.id = o.asset_id
               join catalog.collections l on l.id = a.collection_id
               join catalog.contracts c on c.id = l.contract_id
               join ledger.accounts w on w.id = o.account_id
              where o.{qty} <> 0"
        );
        let conn = self.db.conn().await.expect("connects");
        let rows = conn.query("read balances", &sql, &[]).await.expect("reads");
        let mut all = Balances::new();
        for row in &rows {
            let key = (row.get(0), row.get(1), row.get(2));
            let again = all.insert(key, row.get(3));
            assert!(again.is_none(), "two rows of one balance: {row:?}");
        }
        all
    }

    /// What the ledger holds for final.
    pub(crate) async fn ledger(&self) -> Balances {
        self.balances("ledger.ownership_current", "qty").await
    }

    /// What readers see, at the head.
    pub(crate) async fn view(&self) -> Balances {
        self.balances("projection.ownership_view", "qty").await
    }

    /// What readers see of the finalized state.
    pub(crate) async fn view_final(&self) -> Balances {
        self.balances("projection.ownership_now", "qty_finalized").await
    }

    pub(crate) fn truth(&self, height: u64) -> Balances {
        let truth = self.sim.owners_at(height).balances;
        truth.into_iter().map(|(key, qty)| (key, qty.to_string())).collect()
    }

    /// Waits until the read models have the head and the finalized height of a chain that stands still.
    /// The head must be higher than any earlier one, so that no left branch can pass for it.
    pub(crate) async fn settle(&self, running: &mut Running, seed: u64) {
        let (head, finalized) = (self.sim.head(), self.sim.finalized());
        let (truth, truth_final) = (self.truth(head), self.truth(finalized));
        let begun = Instant::now();
        loop {
            let projected = self.number("select projected_height from projection.network_status").await;
            let done = self.number("select finalized_height from ledger.network_progress").await;
            let reached = projected == Some(i64::try_from(head).expect("fits"))
                && done == Some(i64::try_from(finalized).expect("fits"));
            // The projector hears of finality after the ledger has it.
            if reached && (self.view_final().await, self.view().await) == (truth_final.clone(), truth.clone())
            {
                return;
            }
            let late = begun.elapsed() > PATIENCE;
            if late && reached {
                same(&self.view().await, &truth, &format!("seed {seed}: the view at head {head}"));
                same(
                    &self.view_final().await,
                    &truth_final,
                    &format!("seed {seed}: the view at finalized {finalized}"),
                );
            }
            if late || running.has_ended() {
                panic!(
                    "seed {seed}: projected {projected:?} of {head}, finalized {done:?} of {finalized}; errors:\n{}\nlog:\n{}",
                    self.complaints().await,
                    running.log()
                );
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Waits until `sql` gives at least `least`.
    pub(crate) async fn reach(&self, running: &mut Running, sql: &str, least: i64) {
        let begun = Instant::now();
        loop {
            let now = self.number(sql).await;
            if now.is_some_and(|now| now >= least) {
                return;
            }
            if begun.elapsed() > PATIENCE || running.has_ended() {
                panic!("{sql}: {now:?}, not {least}\n{}\n{}", self.complaints().await, running.log());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// How many errors were written down for operators.
    pub(crate) async fn complained(&self) -> Option<i64> {
        self.number("select count(*) from app.indexing_errors").await
    }

    /// Everything that the system itself complained about.
    pub(crate) async fn complaints(&self) -> String {
        self.text(
            "select severity || ' ' || worker_name || ' ' || block_height || ' x' || occurrences || ': ' || left(message, 300)
               from app.indexing_errors
              union all select 'dead letter ' || handler_kind || ' ' || kind || ': ' || error from system.dlq
              union all select 'quarantine ' || block_number || ': ' || reason from ledger.quarantine
              union all select 'halted: ' || halted_reason from system.network_heads where halted_reason is not null
              union all select role || ' ' || state || ': ' || last_error from system.processes where last_error is not null",
        )
        .await
    }

    /// Nothing was put aside.
    pub(crate) async fn nothing_was_put_aside(&self, seed: u64) {
        let aside = self
            .text(
                "select 'dead letter ' || handler_kind || ' ' || kind || ': ' || error from system.dlq
                  union all select 'quarantine ' || block_number || ': ' || reason from ledger.quarantine
                  union all select 'parked ' || partition_key from system.parked_keys",
            )
            .await;
        assert!(aside.is_empty(), "seed {seed}: {aside}");
    }

    /// Both proofs that an operator can ask for.
    pub(crate) async fn verify(&mut self, seed: u64) {
        let seed = format!("seed {seed}");
        self.run(&["verify", "completeness"]).await.succeeded(&seed);
        self.run(&["verify", "ledger"]).await.succeeded(&seed);
    }

    /// `sync` ends when its goal is final: events above it may wait for the projector, and a rebuild would
    /// show them. A short life brings everything to the head.
    pub(crate) async fn read_on_to_the_head(&mut self, seed: u64) {
        let mut running = self.live();
        self.settle(&mut running, seed).await;
        assert_eq!(running.stop().await.code, Some(0), "seed {seed}");
    }

    /// Read models built anew are the ones there are.
    pub(crate) async fn rebuild_changes_nothing(&mut self, seed: u64) {
        let out = self.run(&["rebuild", "projection", "all", "--json"]).await.succeeded("rebuild");
        let reports: Value = serde_json::from_str(&out).expect("JSON");
        let reports = reports.as_array().expect("a list");
        assert!(!reports.is_empty());
        let differing: Vec<&Value> = reports.iter().filter(|report| report["differing"] != 0).collect();
        assert!(differing.is_empty(), "seed {seed}: {}", serde_json::to_string(&differing).expect("JSON"));
        let out = self.run(&["reconcile", "--json"]).await.succeeded("reconcile");
        let report: Value = serde_json::from_str(&out).expect("JSON");
        assert_eq!(report["alarming"], false, "seed {seed}: {report:#}");
        for run in report["runs"].as_array().expect("a list") {
            assert_eq!(run["mismatches"], 0, "seed {seed}: {report:#}");
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // The logs of a test that failed are worth keeping.
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }
}

/// Fails with the first differences.
#[track_caller]
pub(crate) fn same(found: &Balances, truth: &Balances, what: &str) {
    let missing: Vec<_> = truth.iter().filter(|(key, qty)| found.get(*key) != Some(*qty)).collect();
    let extra: Vec<_> = found.iter().filter(|(key, _)| !truth.contains_key(*key)).collect();
    if missing.is_empty() && extra.is_empty() {
        return;
    }
    let found_there: Vec<_> = missing.iter().take(5).map(|(key, qty)| (key, qty, found.get(*key))).collect();
    panic!(
        "{what}: {} of {} balances are wrong or missing, {} are too many\nwrong (truth, found): {found_there:#?}\ntoo many: {:#?}",
        missing.len(),
        truth.len(),
        extra.len(),
        extra.iter().take(5).collect::<Vec<_>>(),
    );
}

/// A generator for delays and choices: the same seed, the same run.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed ^ 0x9e37_79b9_7f4a_7c15)
    }
    /// Below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}

/// The chain lives for a moment: some blocks, then a reorg of this kind above the finalized height.
pub(crate) fn live_through(sim: &Sim, dice: &mut Dice, kind: ReorgKind) {
    sim.mine(1 + dice.below(3));
    let room = sim.head().saturating_sub(sim.finalized());
    let depth = (1 + dice.below(5)).min(room.saturating_sub(1));
    if depth == 0 {
        return;
    }
    if kind == ReorgKind::Back {
        // Only a branch that was left a moment ago is sure to be above finality.
        sim.reorg(depth, ReorgKind::Replace);
    }
    sim.reorg(depth, kind);
}
