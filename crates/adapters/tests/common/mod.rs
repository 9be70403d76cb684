//! A node in the test that speaks JSON-RPC over a list of blocks, and misbehaves when told to.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test binary uses a part of it")]

use std::collections::HashMap;
use std::io::Read;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use alloy_primitives::keccak256;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde_json::{Value, json};
use tidemark_adapters::evm::{EvmAdapter, EvmConfig};
use tidemark_model::chain::{Family, Network};
use tidemark_model::ids::{Height, NetworkId};
use tidemark_model::redact::RedactedUrl;
use tidemark_rpc::EndpointConfig;
use tidemark_rpc::backoff::Backoff;
use tokio::task::JoinSet;

/// A block as a node stores it.
#[derive(Clone)]
pub struct Block {
    /// With full transactions.
    pub body: Value,
    pub receipts: Vec<Value>,
}

impl Block {
    pub fn hash(&self) -> &str {
        self.body["hash"].as_str().expect("a hash")
    }
    fn logs(&self) -> impl Iterator<Item = &Value> {
        self.receipts.iter().flat_map(|receipt| receipt["logs"].as_array().expect("logs"))
    }
}

/// How the node misbehaves.
#[derive(Clone, Default)]
pub struct Faults {
    /// Answer so many requests with 429.
    pub throttle: u32,
    /// Answer so many requests with 500.
    pub broken: u32,
    /// Answer one request in so many with 500; 0 never.
    pub every: u64,
    /// A seed: requests fail, answers are cut or miss an item, and logs come back empty, at random. 0 never.
    pub chaos: u64,
    /// Under chaos, leave single logs out, too.
    pub chaos_partial: bool,
    /// Cut so many answers in the middle.
    pub truncate: u32,
    /// Batch answers come in reverse order.
    pub reorder: bool,
    /// The last item of so many batch answers is left out.
    pub omit: u32,
    /// Say and know this many blocks less.
    pub lag: u64,
    /// Leave the logs of these blocks out of `eth_getLogs`, by range and by hash.
    pub hide: Vec<u64>,
    /// Leave the first log of these blocks out of `eth_getLogs`.
    pub hide_first: Vec<u64>,
    /// Leave logs out of receipts as well.
    pub hide_in_receipts: bool,
    /// Refuse wider ranges, with these words.
    pub range_max: Option<(u64, String)>,
    /// Refuse more results, naming a range of so many blocks that works.
    pub results_max: Option<(usize, u64)>,
    /// No `eth_getBlockReceipts`.
    pub no_receipts: bool,
    /// No tags.
    pub no_tags: bool,
    /// Another chain.
    pub chain_id: Option<u64>,
    /// Every log twice.
    pub doubled: bool,
    /// An extra log marked as removed.
    pub removed: bool,
    /// Null for these blocks.
    pub null_blocks: Vec<u64>,
    /// A block hash of the logs that no header has.
    pub foreign_hash: bool,
}

pub struct Node {
    pub url: RedactedUrl,
    pub faults: Arc<Mutex<Faults>>,
    pub chain: Arc<Mutex<Vec<Block>>>,
    pub finality_lag: u64,
    pub asked: Arc<Mutex<HashMap<String, u64>>>,
    _server: JoinSet<()>,
}

#[derive(Clone)]
struct Shared {
    faults: Arc<Mutex<Faults>>,
    chain: Arc<Mutex<Vec<Block>>>,
    asked: Arc<Mutex<HashMap<String, u64>>>,
}

/// Distance of `finalized` from the head.
pub const FINALITY_LAG: u64 = 3;

impl Node {
    pub async fn start(blocks: Vec<Block>) -> Self {
        let shared =
            Shared { faults: Arc::default(), chain: Arc::new(Mutex::new(blocks)), asked: Arc::default() };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let router = Router::new().route("/", post(handle)).with_state(shared.clone());
        let mut server = JoinSet::new();
        server.spawn(async move { axum::serve(listener, router).await.expect("serves") });
        Self {
            url: RedactedUrl::parse(&format!("http://{address}/")).expect("a URL"),
            faults: shared.faults,
            chain: shared.chain,
            finality_lag: FINALITY_LAG,
            asked: shared.asked,
            _server: server,
        }
    }
    pub fn fault(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.faults.lock().expect("no panic"));
    }
    pub fn asked(&self, method: &str) -> u64 {
        self.asked.lock().expect("no panic").get(method).copied().unwrap_or(0)
    }
    pub fn endpoint(&self, name: &str) -> EndpointConfig {
        EndpointConfig { label: Some(name.to_owned()), ..EndpointConfig::new(self.url.clone()) }
    }
}

async fn handle(State(shared): State<Shared>, body: String) -> Response {
    let request: Value = serde_json::from_str(&body).expect("JSON");
    let (throttle, broken, truncate, omit, reorder) = {
        let mut faults = shared.faults.lock().expect("no panic");
        let mut take = |count: fn(&mut Faults) -> &mut u32| {
            let count = count(&mut faults);
            let had = *count > 0;
            *count = count.saturating_sub(1);
            had
        };
        let throttle = take(|faults| &mut faults.throttle);
        let broken = !throttle && take(|faults| &mut faults.broken);
        let truncate = !throttle && !broken && take(|faults| &mut faults.truncate);
        let omit = request.is_array() && take(|faults| &mut faults.omit);
        (throttle, broken, truncate, omit, faults.reorder)
    };
    if throttle {
        return (StatusCode::TOO_MANY_REQUESTS, "slow down").into_response();
    }
    let (every, chaos) = {
        let faults = shared.faults.lock().expect("no panic");
        (faults.every, faults.chaos)
    };
    let served = {
        let mut asked = shared.asked.lock().expect("no panic");
        let served = asked.entry("requests".to_owned()).or_default();
        *served += 1;
        *served
    };
    let dice = if chaos == 0 { 100 } else { random(chaos, served) % 100 };
    if dice < 4 {
        return (StatusCode::TOO_MANY_REQUESTS, "slow down").into_response();
    }
    let (broken, truncate, omit) = (broken || dice < 8, truncate || dice == 8, omit || dice == 9);
    if broken || (every > 0 && served % every == 0) {
        return (StatusCode::INTERNAL_SERVER_ERROR, "<html>oops</html>").into_response();
    }
    let answer = match &request {
        Value::Array(items) => {
            let mut answers: Vec<Value> = items.iter().map(|item| answer(&shared, item)).collect();
            if omit {
                answers.pop();
            }
            if reorder {
                answers.reverse();
            }
            Value::Array(answers)
        }
        item => answer(&shared, item),
    };
    let mut text = answer.to_string();
    if truncate {
        text.truncate(text.len() / 2);
    }
    ([("content-type", "application/json")], text).into_response()
}

fn answer(shared: &Shared, request: &Value) -> Value {
    let method = request["method"].as_str().expect("a method");
    *shared.asked.lock().expect("no panic").entry(method.to_owned()).or_default() += 1;
    let faults = shared.faults.lock().expect("no panic").clone();
    let chain = shared.chain.lock().expect("no panic");
    let mut faults = faults;
    if faults.chaos > 0 && method == "eth_getLogs" {
        let count = shared.asked.lock().expect("no panic")[method];
        match random(faults.chaos ^ 0xabcd, count) % 20 {
            0 => faults.hide = (0..1000).collect(),
            1 if faults.chaos_partial => faults.hide_first = (0..1000).collect(),
            2 => faults.doubled = true,
            3 => faults.lag = 15,
            _ => {}
        }
    }
    match reply(method, &request["params"], &chain, &faults) {
        Ok(result) => json!({ "jsonrpc": "2.0", "id": request["id"], "result": result }),
        Err((code, message)) => {
            json!({ "jsonrpc": "2.0", "id": request["id"], "error": { "code": code, "message": message } })
        }
    }
}

/// SplitMix64: the same seed and number give the same value.
fn random(seed: u64, number: u64) -> u64 {
    let mut value =
        seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(number.wrapping_mul(0xd134_2543_de82_ef95));
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

fn number(value: &Value) -> u64 {
    let text = value.as_str().expect("a hex string");
    u64::from_str_radix(text.strip_prefix("0x").expect("a prefix"), 16).expect("hex")
}

fn reply(method: &str, params: &Value, chain: &[Block], faults: &Faults) -> Result<Value, (i64, String)> {
    let lag = usize::try_from(faults.lag).expect("small");
    let chain = &chain[..chain.len().saturating_sub(lag).max(1)];
    let head = number(&chain.last().expect("a block").body["number"]);
    let first = number(&chain[0].body["number"]);
    let at = |height: u64| {
        let block = usize::try_from(height.checked_sub(first)?).ok().and_then(|index| chain.get(index))?;
        (!faults.null_blocks.contains(&height)).then_some(block)
    };
    match method {
        "eth_chainId" => Ok(json!(format!("{:#x}", faults.chain_id.unwrap_or(1)))),
        "eth_blockNumber" => Ok(json!(format!("{head:#x}"))),
        "eth_getBlockByNumber" => {
            let height = match params[0].as_str().expect("a tag or number") {
                "latest" => head,
                "safe" | "finalized" if faults.no_tags => {
                    return Err((-32602, "invalid argument 0: hex string without 0x prefix".to_owned()));
                }
                "safe" => head.saturating_sub(1).max(first),
                "finalized" => head.saturating_sub(FINALITY_LAG).max(first),
                _ => number(&params[0]),
            };
            if height == 0 {
                return Ok(json!({ "hash": format!("0x{}", "11".repeat(32)) }));
            }
            let Some(block) = at(height) else { return Ok(Value::Null) };
            let mut body = block.body.clone();
            if params[1] == json!(false) {
                let hashes =
                    body["transactions"].as_array().expect("txs").iter().map(|tx| tx["hash"].clone());
                body["transactions"] = hashes.collect();
            }
            Ok(body)
        }
        "eth_getBlockReceipts" if faults.no_receipts => Err((-32601, "the method does not exist".to_owned())),
        "eth_getBlockReceipts" => {
            let height = number(&params[0]);
            Ok(at(height).map_or(Value::Null, |block| {
                let mut receipts = block.receipts.clone();
                if faults.hide_in_receipts && faults.hide.contains(&height) {
                    receipts.iter_mut().for_each(|receipt| receipt["logs"] = json!([]));
                }
                json!(receipts)
            }))
        }
        "eth_getTransactionReceipt" => Ok(chain
            .iter()
            .flat_map(|block| &block.receipts)
            .find(|receipt| receipt["transactionHash"] == params[0])
            .cloned()
            .unwrap_or(Value::Null)),
        "eth_getLogs" => logs(&params[0], chain, faults, first),
        "eth_call" => Ok(match params[0]["data"].as_str().expect("data") {
            data if data.starts_with("0x6352211e") => {
                json!(format!("0x{}{}", "00".repeat(12), "aa".repeat(20)))
            }
            data if data.starts_with("0x00fdd58e") => json!(format!("0x{:064x}", 7)),
            _ => return Err((3, "execution reverted".to_owned())),
        }),
        other => Err((-32601, format!("the method {other} does not exist"))),
    }
}

fn logs(filter: &Value, chain: &[Block], faults: &Faults, first: u64) -> Result<Value, (i64, String)> {
    assert!(filter["address"].is_null() || !filter["address"].as_array().expect("a list").is_empty());
    let blocks: Vec<&Block> = if let Some(hash) = filter["blockHash"].as_str() {
        let block = chain.iter().find(|block| block.hash() == hash);
        vec![block.ok_or((-32000, "unknown block".to_owned()))?]
    } else {
        let (from, to) = (number(&filter["fromBlock"]), number(&filter["toBlock"]));
        if let Some((max, words)) = &faults.range_max
            && to - from + 1 > *max
        {
            return Err((-32600, words.clone()));
        }
        // A lagging node answers with what it has.
        chain.iter().filter(|block| (from..=to).contains(&number(&block.body["number"]))).collect()
    };
    let any_of = |wanted: &Value, value: &Value| match wanted {
        Value::Null => true,
        Value::Array(options) => options.contains(value),
        one => one == value,
    };
    let mut found = Vec::new();
    for block in &blocks {
        let height = number(&block.body["number"]);
        if faults.hide.contains(&height) {
            continue;
        }
        let mut of_block: Vec<Value> = block
            .logs()
            .filter(|log| {
                !log["topics"][0].is_null()
                    && any_of(&filter["topics"][0], &log["topics"][0])
                    && any_of(&filter["address"], &log["address"])
            })
            .cloned()
            .collect();
        if faults.hide_first.contains(&height) && !of_block.is_empty() {
            of_block.remove(0);
        }
        if faults.foreign_hash {
            of_block.iter_mut().for_each(|log| log["blockHash"] = json!(format!("0x{}", "ee".repeat(32))));
        }
        if faults.removed
            && let Some(mut log) = of_block.first().cloned()
        {
            log["removed"] = json!(true);
            of_block.push(log);
        }
        if faults.doubled {
            of_block = of_block.iter().flat_map(|log| [log.clone(), log.clone()]).collect();
        }
        found.extend(of_block);
    }
    if let Some((max, blocks)) = faults.results_max
        && found.len() > max
        && !filter["fromBlock"].is_null()
    {
        let from = number(&filter["fromBlock"]);
        let to = from + blocks - 1;
        let words = format!(
            "query returned more than {max} results. Try with this block range [{from:#x}, {to:#x}]."
        );
        return Err((-32005, words));
    }
    let _ = first;
    Ok(json!(found))
}

pub const TRANSFER: &str = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef";

pub fn word(value: u64) -> String {
    format!("0x{value:064x}")
}

/// A chain of blocks `1..=count`. Block `n` holds `transfers(n)` ERC-721 transfers and one ERC-20 transfer
/// where `n` is even, with right blooms, hashes that link, and indexes within the block.
pub fn chain(count: u64, transfers: impl Fn(u64) -> u64) -> Vec<Block> {
    branch(1, &format!("0x{}", "11".repeat(32)), count, 0, transfers)
}

/// Blocks `first..=last` on top of `parent`; `salt` makes another branch.
pub fn branch(first: u64, parent: &str, last: u64, salt: u64, transfers: impl Fn(u64) -> u64) -> Vec<Block> {
    let mut parent = parent.to_owned();
    (first..=last)
        .map(|height| {
            let hash = keccak256(format!("block {height} {salt}")).to_string();
            let tx = keccak256(format!("tx {height} {salt}")).to_string();
            let log = |index: u64, address: &str, topics: Value, data: String| {
                json!({ "address": address, "topics": topics, "data": data, "blockNumber": format!("{height:#x}"),
                    "blockHash": hash, "transactionHash": tx, "transactionIndex": "0x0",
                    "logIndex": format!("{index:#x}"), "removed": false })
            };
            let count = transfers(height);
            let mut logs: Vec<Value> = (0..count)
                .map(|index| {
                    let id = height * 1000 + index;
                    log(index, &contract(), json!([TRANSFER, word(0), word(0xb0b), word(id)]), "0x".to_owned())
                })
                .collect();
            if height % 2 == 0 {
                logs.push(log(count, &coin(), json!([TRANSFER, word(1), word(2)]), word(5)));
            }
            let bloom = bloom(&logs);
            let receipt = json!({ "transactionHash": tx, "transactionIndex": "0x0", "blockHash": hash,
                "blockNumber": format!("{height:#x}"), "status": "0x1", "gasUsed": "0x5208", "logs": logs });
            let body = json!({ "number": format!("{height:#x}"), "hash": hash, "parentHash": parent,
                "timestamp": format!("{:#x}", 1_700_000_000 + height), "logsBloom": bloom, "gasUsed": "0x5208",
                "transactions": [{ "hash": tx, "from": coin(), "to": contract(), "value": "0x0", "nonce": "0x1" }] });
            parent.clone_from(&hash);
            Block { body, receipts: vec![receipt] }
        })
        .collect()
}

pub fn contract() -> String {
    format!("0x{}", "c0".repeat(20))
}
pub fn coin() -> String {
    format!("0x{}", "20".repeat(20))
}

/// Written apart from the adapter's: a shared mistake would hide itself.
pub fn bloom(logs: &[Value]) -> String {
    let mut bits = [0_u8; 256];
    for log in logs {
        let topics = log["topics"].as_array().expect("topics").iter();
        for value in std::iter::once(&log["address"]).chain(topics) {
            let bytes = hex::decode(&value.as_str().expect("hex")[2..]).expect("hex");
            let hash = keccak256(bytes);
            for pair in hash[..6].chunks(2) {
                let bit = u16::from_be_bytes([pair[0], pair[1]]) % 2048;
                bits[usize::from(255 - bit / 8)] |= 1 << (bit % 8);
            }
        }
    }
    format!("0x{}", hex::encode(bits))
}

pub fn network() -> Network {
    Network {
        id: NetworkId(1),
        slug: "test".to_owned(),
        family: Family::Evm,
        start_block: Height(1),
        confirmations: 2,
        reorg_depth_max: 100,
    }
}

/// Small steps and short pauses.
pub fn config(nodes: &[&Node]) -> EvmConfig {
    let names = ["one", "two", "three"];
    let endpoints = nodes.iter().zip(names).map(|(node, name)| node.endpoint(name)).collect();
    let mut config = EvmConfig::new(network(), 1, endpoints);
    config.timeouts.block_number = Duration::from_secs(5);
    config.backoff = Backoff { first: Duration::from_millis(1), max: Duration::from_millis(20) };
    config.breaker.rest_first = Duration::from_millis(5);
    config.headers_batch = 10;
    config
}

pub fn adapter(nodes: &[&Node]) -> EvmAdapter {
    EvmAdapter::new(config(nodes)).expect("a good configuration")
}

pub fn rps(calls: u32) -> Option<NonZeroU32> {
    NonZeroU32::new(calls)
}

/// The recorded data, if this checkout has it beside it.
pub fn fixtures() -> Option<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/fixtures/evm");
    if folder.is_dir() {
        return Some(folder);
    }
    eprintln!("skipped: no recorded data");
    None
}

pub fn load<T: serde::de::DeserializeOwned>(path: &std::path::Path) -> T {
    let bytes = std::fs::read(path).expect("readable");
    if path.extension().is_some_and(|extension| extension == "gz") {
        let mut plain = Vec::new();
        flate2::read::GzDecoder::new(&bytes[..]).read_to_end(&mut plain).expect("gzip");
        return serde_json::from_slice(&plain).expect("JSON");
    }
    serde_json::from_slice(&bytes).expect("JSON")
}
