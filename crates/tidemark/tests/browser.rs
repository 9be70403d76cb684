//! A visitor in a real browser: `browser/walk.mjs` looks and types, this side owns the chain.
//!
//! The two speak in lines: the script asks `{"ask": …}` on its standard output, we answer with one line.

mod live;

use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::{Value, json};
use tidemark_sim::{FaultProfile, ReorgKind, Sim, SimConfig, SimEvent};
use tidemark_testkit::tools;
use time::OffsetDateTime;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};

use live::Live;

const CHAIN_ID: u64 = 31_337;
const FIRST_BLOCKS: u64 = 120;
const BLOCK_SECONDS: u64 = 2;

fn on_path(names: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    names.iter().find_map(|name| folders.iter().map(|folder| folder.join(name)).find(|file| file.is_file()))
}

fn needed(what: &str, found: Option<PathBuf>) -> PathBuf {
    found.unwrap_or_else(|| panic!("{what} is not installed: run `make setup-test`"))
}

/// A chain whose newest block is a moment old, every block with as many logs.
fn chain() -> Sim {
    let span = i64::try_from(FIRST_BLOCKS * BLOCK_SECONDS).expect("small");
    let sim = Sim::new(SimConfig {
        chain_id: CHAIN_ID,
        genesis_time: OffsetDateTime::now_utc().unix_timestamp() - span,
        block_time_secs: BLOCK_SECONDS,
        events_per_block: 8,
        steady: true,
        ..SimConfig::small(11)
    });
    sim.mine(FIRST_BLOCKS);
    sim
}

/// Somebody who surely owns an asset.
fn holder(sim: &Sim) -> String {
    let truth = sim.owners_at(sim.finalized());
    let mut count = std::collections::BTreeMap::<&str, u32>::new();
    for (_, _, account) in truth.balances.keys() {
        *count.entry(account).or_default() += 1;
    }
    let most = count.into_iter().max_by_key(|(_, assets)| *assets);
    most.expect("somebody owns something").0.to_owned()
}

/// Transactions with NFT transfers of the newest block.
fn newest(sim: &Sim) -> Value {
    let head = sim.head();
    let transactions: std::collections::BTreeSet<String> = sim
        .logs(head, head)
        .into_iter()
        .filter(|log| matches!(log.event, SimEvent::Erc721 { .. } | SimEvent::Erc1155 { .. }))
        .map(|log| log.tx_hash.to_string())
        .collect();
    json!({ "height": head, "transactions": transactions })
}

struct Walk {
    child: Child,
}

impl Walk {
    fn start(told: &Value) -> Self {
        let node = needed("Node.js", on_path(&["node"]));
        let playwright = tools::folder().join("node_modules/playwright-core");
        let playwright = needed("playwright-core", playwright.is_dir().then_some(playwright));
        let chromium = needed("Chromium", on_path(&["chromium", "chromium-browser", "google-chrome"]));
        let child = Command::new(node)
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/browser/walk.mjs"))
            .arg(told.to_string())
            .env("PLAYWRIGHT", playwright.canonicalize().expect("it exists"))
            .env("CHROMIUM", chromium)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("node starts");
        Self { child }
    }

    /// Answers until the script ends; returns what it saw, in order.
    async fn answer(mut self, sim: &Sim) -> Vec<String> {
        let mut stdin = self.child.stdin.take().expect("piped");
        let mut lines = BufReader::new(self.child.stdout.take().expect("piped")).lines();
        let mut seen = vec![];
        while let Some(line) = lines.next_line().await.expect("reads") {
            let line: Value =
                serde_json::from_str(&line).unwrap_or_else(|_| panic!("not a line of ours: {line}"));
            if let Some(step) = line["seen"].as_str() {
                seen.push(step.to_owned());
                continue;
            }
            let answer = match line["ask"].as_str() {
                Some("mine") => {
                    sim.mine(1);
                    newest(sim)
                }
                Some("drop") => {
                    sim.reorg(1, ReorgKind::Drop);
                    newest(sim)
                }
                other => panic!("the script asks for {other:?}"),
            };
            stdin.write_all(format!("{answer}\n").as_bytes()).await.expect("the script listens");
        }
        let output = self.child.wait_with_output().await.expect("the script ends");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "after {seen:#?}:\n{said}");
        seen
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_visitor_finds_an_owner_sees_a_transfer_arrive_and_a_reorg_take_it_back() {
    let sim = chain();
    let node = sim.serve("127.0.0.1:0".parse().expect("an address"), FaultProfile::default()).await;
    let node = node.expect("listens");
    let mut live = Live::start("simnet", CHAIN_ID, &node.url).await;
    let head = sim.block(sim.head()).expect("mined");
    live.reads_up_to(sim.head(), &head.hash.to_string()).await;
    let pictures = tidemark_testkit::scratch_dir().with_file_name("e2e");
    std::fs::create_dir_all(&pictures).expect("a folder");
    let told = json!({
        "url": live.url, "network": live.slug, "address": holder(&sim), "pictures": pictures,
    });
    let seen = Walk::start(&told).answer(&sim).await;
    let (code, log) = live.stop();
    assert_eq!(code, Some(0), "{log}");
    let steps = ["home", "search", "asset", "live", "reorg", "theme", "states", "phone", "plain"];
    assert_eq!(seen, steps, "the walk left something out");
}
