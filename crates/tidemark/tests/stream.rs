//! Listeners and readers of the running product while its chain mines and reorgs. Listeners are cut off at random
//! and come back with the last id they saw; readers walk pages to the end. Afterwards both are held against
//! the node's own truth.

mod live;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::Value;
use tidemark_sim::{FaultProfile, ReorgKind, Sim, SimConfig, SimEvent};
use time::OffsetDateTime;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use live::Live;

const CHAIN_ID: u64 = 31_337;
const PATIENCE: Duration = Duration::from_secs(120);
/// Mined or reorganised while everybody listens; more with TIDEMARK_STREAM_STEPS.
const STEPS: u64 = 60;
const KINDS: [ReorgKind; 4] =
    [ReorgKind::ReincludeSame, ReorgKind::ReincludeShifted, ReorgKind::Replace, ReorgKind::Drop];

/// Where an event is: a row of a list, a delivery of the stream.
type Row = (String, u64, String);

/// A log of the chain: block, transaction, position in the block.
type Log = (String, String, u64);

fn chain() -> Sim {
    let sim = Sim::new(SimConfig {
        chain_id: CHAIN_ID,
        genesis_time: OffsetDateTime::now_utc().unix_timestamp() - 600,
        block_time_secs: 2,
        finality_lag: 12,
        safe_lag: 6,
        events_per_block: 9,
        steady: true,
        ..SimConfig::small(41)
    });
    sim.mine(6); // Nothing is final yet: everything will be told.
    sim
}

/// Every log that moves an asset.
fn truth(sim: &Sim, to: u64) -> BTreeSet<Log> {
    sim.logs(0, to)
        .into_iter()
        .filter(|log| match &log.event {
            SimEvent::Erc721 { .. } => true,
            SimEvent::Erc1155 { items, .. } => !items.is_empty(),
            SimEvent::Uri { .. } | SimEvent::Erc20 => false,
        })
        .map(|log| (log.block_hash.to_string(), log.tx_hash.to_string(), u64::from(log.log_index)))
        .collect()
}

fn text(value: &Value, field: &str) -> String {
    value[field].as_str().unwrap_or_else(|| panic!("{field} in {value}")).to_owned()
}

fn row(item: &Value) -> Row {
    (text(item, "event_id"), item["height"].as_u64().expect("a height"), text(item, "block_hash"))
}

fn log(item: &Value) -> Log {
    (text(item, "block_hash"), text(item, "tx_hash"), item["event_index"].as_u64().expect("an index"))
}

/// What one listener knows after everything it was told.
#[derive(Default)]
struct Heard {
    last: Option<String>,
    /// What stands, by event.
    standing: BTreeMap<String, Value>,
    transfers: usize,
    retractions: usize,
    cuts: usize,
}

impl Heard {
    fn take(&mut self, name: &str, id: Option<String>, data: Value) {
        if let Some(id) = id {
            // The last message told in full, and how many transfers of the next.
            let number = |text: &str| {
                let position = text.split('.').next()?;
                let (message, told) = position.split_once('+').unwrap_or((position, "0"));
                Some((message.parse::<u64>().ok()?, told.parse::<u64>().ok()?))
            };
            let (before, now) = (self.last.as_deref().and_then(number), number(&id));
            assert!(name == "hello" || before < now, "{now:?} is told after {before:?}");
            self.last = Some(id);
        }
        match name {
            "transfer" => {
                self.transfers += 1;
                let known = self.standing.insert(text(&data, "event_id"), data);
                assert_eq!(known, None, "told twice without a retraction between");
            }
            "retracted" => {
                self.retractions += 1;
                let known = self.standing.remove(&text(&data, "event_id"));
                assert!(
                    known.is_some_and(|known| row(&known) == row(&data)),
                    "takes back what was not told: {data}"
                );
            }
            _ => {}
        }
    }
    fn logs(&self) -> BTreeSet<Log> {
        self.standing.values().map(log).collect()
    }
}

/// Listens until told to stop and nothing is missing, with a connection that is cut at random.
async fn listen(url: String, seed: u64, sim: Arc<Sim>, finish: CancellationToken) -> Heard {
    let http = reqwest::Client::new();
    let mut dice = StdRng::seed_from_u64(seed);
    let mut heard = Heard { last: Some("0".to_owned()), ..Heard::default() };
    let mut deadline = None;
    loop {
        if finish.is_cancelled() {
            let deadline = *deadline.get_or_insert(Instant::now() + PATIENCE);
            if heard.logs() == truth(&sim, sim.head()) {
                return heard;
            }
            assert!(
                Instant::now() < deadline,
                "not all was told: {} stand, {} should",
                heard.logs().len(),
                truth(&sim, sim.head()).len()
            );
        }
        let last = heard.last.clone().expect("at least zero");
        let asked = http.get(format!("{url}/v1/stream?network=simnet")).header("last-event-id", &last);
        let Ok(answer) = asked.send().await else { continue };
        assert_eq!(answer.status(), 200);
        let mut body = answer.bytes_stream();
        let mut buffer = String::new();
        // Some lives are one message long, some many; none ends in order.
        let life = dice.random_range(1..120);
        let mut taken = 0;
        while taken < life {
            let next = tokio::time::timeout(Duration::from_millis(1500), body.next()).await;
            let Ok(Some(Ok(chunk))) = next else { break };
            buffer.push_str(std::str::from_utf8(&chunk).expect("text"));
            while taken < life
                && let Some(end) = buffer.find("\n\n")
            {
                let block: String = buffer.drain(..end + 2).collect();
                let field = |name: &str| {
                    block.lines().find_map(|line| line.strip_prefix(name)).map(|text| text.trim().to_owned())
                };
                let Some(data) = field("data:") else { continue };
                let data = serde_json::from_str(&data).expect("JSON");
                heard.take(&field("event:").unwrap_or_default(), field("id:"), data);
                taken += 1;
            }
        }
        heard.cuts += 1;
    }
}

/// One walk from the newest row to the oldest.
async fn walk(http: &reqwest::Client, url: &str, list: &str, limit: u32) -> (u64, Vec<Value>) {
    let (mut items, mut cursor, mut line) = (Vec::new(), String::new(), None);
    loop {
        let path = format!("{url}{list}limit={limit}{cursor}");
        let page = loop {
            let answer = http.get(&path).send().await.expect("the API answers");
            let status = answer.status();
            let page: Value = answer.json().await.expect("JSON");
            if status == 404 && page["code"] == "pending" {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
            assert_eq!(status, 200, "{path}: {page}");
            break page;
        };
        // Complete up to the watermark, unchanging up to the tidemark.
        let mark = |name: &str| page["meta"][name].as_u64().unwrap_or(0);
        line.get_or_insert(mark("finalized_height").min(mark("data_watermark")));
        items.extend(page["items"].as_array().expect("items").iter().cloned());
        match page["next"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return (line.unwrap_or(0), items),
        }
    }
}

/// Walks again and again: no row twice, and everything that was final when the walk began is in it.
async fn read(url: String, limit: u32, sim: Arc<Sim>, finish: CancellationToken) -> usize {
    let http = reqwest::Client::new();
    let mut walks = 0;
    while !finish.is_cancelled() {
        let (line, items) = walk(&http, &url, "/v1/transfers?network=simnet&", limit).await;
        let rows: BTreeSet<Row> = items.iter().map(row).collect();
        assert_eq!(rows.len(), items.len(), "a row twice in a walk with pages of {limit}");
        let seen: BTreeSet<Log> = items.iter().map(log).collect();
        let missing: Vec<_> = truth(&sim, line).difference(&seen).cloned().collect();
        assert_eq!(missing, [], "final at {line} when the walk began, and not met with pages of {limit}");
        walks += 1;
    }
    walks
}

#[tokio::test(flavor = "multi_thread")]
async fn listeners_cut_off_at_random_and_walkers_of_pages_know_the_truth_through_reorgs() {
    let sim = Arc::new(chain());
    let node = sim.serve("127.0.0.1:0".parse().expect("an address"), FaultProfile::default()).await;
    let node = node.expect("listens");
    let mut live = Live::start("simnet", CHAIN_ID, &node.url).await;
    let head = sim.block(sim.head()).expect("mined");
    live.reads_up_to(sim.head(), &head.hash.to_string()).await;

    let finish = CancellationToken::new();
    let mut listeners = JoinSet::new();
    for seed in 1..=3 {
        listeners.spawn(listen(live.url.clone(), seed, Arc::clone(&sim), finish.clone()));
    }
    let mut readers = JoinSet::new();
    for limit in [3, 17] {
        readers.spawn(read(live.url.clone(), limit, Arc::clone(&sim), finish.clone()));
    }
    let steps =
        std::env::var("TIDEMARK_STREAM_STEPS").ok().and_then(|text| text.parse().ok()).unwrap_or(STEPS);
    let mut dice = StdRng::seed_from_u64(77);
    let mut reorgs = 0_usize;
    for step in 0..steps {
        if step % 6 == 5 {
            // Some surely take back what was told; some come before anybody has read what they replace.
            if reorgs.is_multiple_of(2) {
                let head = sim.block(sim.head()).expect("mined");
                live.reads_up_to(sim.head(), &head.hash.to_string()).await;
            }
            sim.reorg(dice.random_range(1..=5), KINDS[reorgs % KINDS.len()]);
            reorgs += 1;
        } else {
            sim.mine(1);
        }
        tokio::time::sleep(Duration::from_millis(dice.random_range(20..300))).await;
    }
    // Reorgs may have left the chain shorter than what was read.
    sim.mine(7);
    let head = sim.block(sim.head()).expect("mined");
    live.reads_up_to(sim.head(), &head.hash.to_string()).await;
    finish.cancel();
    let mut retractions = 0;
    while let Some(heard) = listeners.join_next().await {
        let heard = heard.expect("a listener holds");
        assert_eq!(heard.logs(), truth(&sim, sim.head()));
        assert!(heard.cuts > 3, "cut off {} times only", heard.cuts);
        retractions += heard.retractions;
        eprintln!(
            "told {} transfers and {} retractions over {} connections",
            heard.transfers, heard.retractions, heard.cuts
        );
    }
    assert!(retractions > 0, "{reorgs} reorgs took nothing back");
    while let Some(walks) = readers.join_next().await {
        assert!(walks.expect("a reader holds") > 0, "no walk was ended");
    }
    // And what lists say at rest is what listeners know.
    let (_, items) = walk(&reqwest::Client::new(), &live.url, "/v1/transfers?network=simnet&", 50).await;
    assert_eq!(items.iter().map(log).collect::<BTreeSet<_>>(), truth(&sim, sim.head()));
    let (code, log) = live.stop();
    assert_eq!(code, Some(0), "{log}");
}
