//! Every fault is visible to a client, and a perfect node shows none of them.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tidemark_sim::{
    BeyondHead, BloomFault, EmptyAddresses, FaultProfile, FinalizedTag, LimitStyle, LogNumbering,
    PrunedStyle, ReorgKind,
};

use crate::client::{Client, Raw, hex, number, served};

/// A fault that happens always.
const ALWAYS: u16 = 1000;

fn faults(change: impl FnOnce(&mut FaultProfile)) -> FaultProfile {
    let mut profile = FaultProfile { seed: 3, ..FaultProfile::default() };
    change(&mut profile);
    profile
}

async fn ask(change: impl FnOnce(&mut FaultProfile)) -> Raw {
    let (_sim, _server, client) = served(10, faults(change)).await;
    client.raw("eth_getBlockByNumber", json!(["latest", false])).await
}

#[tokio::test]
async fn transport_faults_are_seen() {
    let raw = ask(|faults| {
        faults.http_429 = ALWAYS;
        faults.retry_after_secs = Some(7);
    })
    .await;
    assert_eq!((raw.status, raw.retry_after.as_deref()), (429, Some("7")));
    assert_eq!(ask(|faults| faults.http_429 = ALWAYS).await.retry_after, None);
    assert!(ask(|faults| faults.http_5xx = ALWAYS).await.status >= 500);
    assert_eq!(ask(|faults| faults.down = true).await.status, 503);
    let raw = ask(|faults| faults.html_200 = ALWAYS).await;
    assert!(raw.status == 200 && raw.body.starts_with("<html>"));
    let raw = ask(|faults| faults.empty_body = ALWAYS).await;
    assert!(raw.status == 200 && raw.body.is_empty());
    let raw = ask(|faults| faults.truncated_json = ALWAYS).await;
    assert!(raw.body.starts_with("{\"jsonrpc\"") && serde_json::from_str::<Value>(&raw.body).is_err());
    let raw = ask(|faults| faults.trailing_garbage = ALWAYS).await;
    assert!(serde_json::from_str::<Value>(&raw.body).is_err());
    let raw = ask(|faults| faults.rpc_throttled = ALWAYS).await;
    assert!(raw.status == 200 && raw.body.contains("-32005"));
    let raw = ask(|faults| faults.trickle = ALWAYS).await;
    assert!(serde_json::from_str::<Value>(&raw.body).is_ok());
    let raw = ask(|faults| {
        faults.huge_body = ALWAYS;
        faults.huge_body_bytes = 1 << 20;
    })
    .await;
    assert!(raw.body.len() > 1 << 20 && serde_json::from_str::<Value>(&raw.body).is_ok());
}

#[tokio::test]
async fn hanging_and_slow_answers_take_their_time() {
    let started = Instant::now();
    let raw = ask(|faults| {
        faults.hang = ALWAYS;
        faults.hang_ms = 80;
    })
    .await;
    assert_eq!(raw.status, 504);
    assert!(started.elapsed() >= Duration::from_millis(80));
    let started = Instant::now();
    let raw = ask(|faults| {
        faults.slow = ALWAYS;
        faults.slow_ms = 80;
    })
    .await;
    assert_eq!(raw.status, 200);
    assert!(started.elapsed() >= Duration::from_millis(80));
}

#[tokio::test]
async fn a_cut_connection_is_an_error_of_the_transport() {
    let (_sim, _server, client) = served(3, faults(|faults| faults.cut_connection = ALWAYS)).await;
    let answer = reqwest::Client::new().post(&client.url).body("{}").send().await;
    let failed = match answer {
        Ok(answer) => answer.bytes().await.is_err(),
        Err(_) => true,
    };
    assert!(failed);
}

async fn batch(client: &Client) -> Vec<Value> {
    let calls: Vec<Value> = (0..10)
        .map(|id| json!({"jsonrpc": "2.0", "id": id, "method": "eth_getBlockByNumber", "params": [hex(id), false]}))
        .collect();
    serde_json::from_str(&client.post("/", json!(calls).to_string()).await.body).unwrap()
}

#[tokio::test]
async fn batch_faults_are_seen() {
    let (_sim, server, client) = served(10, FaultProfile::default()).await;
    let ids = |answers: &[Value]| answers.iter().map(|one| one["id"].as_i64().unwrap()).collect::<Vec<_>>();
    let right: Vec<i64> = (0..10).collect();
    assert_eq!(ids(&batch(&client).await), right);
    server.set_profile(faults(|faults| faults.batch_reordered = ALWAYS));
    let answers = batch(&client).await;
    assert_ne!(ids(&answers), right);
    assert_eq!(ids(&answers).into_iter().collect::<BTreeSet<_>>().len(), 10);
    for answer in &answers {
        assert_eq!(number(&answer["result"]["number"]), answer["id"].as_u64().unwrap());
    }
    server.set_profile(faults(|faults| faults.batch_missing_item = ALWAYS));
    assert_eq!(batch(&client).await.len(), 9);
    server.set_profile(faults(|faults| faults.wrong_id_in_batch = ALWAYS));
    assert!(ids(&batch(&client).await).contains(&987_654_321));
    server.set_profile(faults(|faults| faults.batch_max = Some(9)));
    let calls = json!(vec![json!({"id": 1, "method": "eth_chainId"}); 10]);
    assert!(client.post("/", calls.to_string()).await.body.contains("batch too large"));
}

#[tokio::test]
async fn a_lagging_node_is_silent_about_what_it_lacks() {
    let (sim, _server, client) = served(40, faults(|faults| faults.lagging_blocks = 20)).await;
    assert_eq!(number(&client.call("eth_blockNumber", json!([])).await), 20);
    assert!(sim.log_count(21, 40) > 0);
    assert!(client.logs(21, 40).await.is_empty());
    assert_eq!(u64::try_from(client.logs(0, 40).await.len()).unwrap(), sim.log_count(0, 20));
    assert_eq!(client.call("eth_getBlockByNumber", json!([hex(21), false])).await, Value::Null);
    let hash = sim.block(21).unwrap().hash.to_string();
    assert_eq!(client.error("eth_getLogs", json!([{"blockHash": hash}])).await.1, "unknown block");
}

#[tokio::test]
async fn a_balancer_gives_two_heads() {
    let profile = faults(|faults| {
        faults.balancer_lag = 500;
        faults.balancer_lag_blocks = 6;
    });
    let (_sim, _server, client) = served(40, profile).await;
    let mut heads = BTreeSet::new();
    for _ in 0..40 {
        heads.insert(number(&client.call("eth_blockNumber", json!([])).await));
    }
    assert_eq!(heads, BTreeSet::from([34, 40]));
}

#[tokio::test]
async fn heads_and_finality_can_be_wrong() {
    let (sim, server, client) = served(40, faults(|faults| faults.head_backwards = ALWAYS)).await;
    assert_eq!(number(&client.call("eth_blockNumber", json!([])).await), 39);
    let finalized =
        async || number(&client.call("eth_getBlockByNumber", json!(["finalized", false])).await["number"]);
    assert_eq!(finalized().await, sim.finalized());
    for (tag, height) in
        [(FinalizedTag::Latest, 40), (FinalizedTag::Ahead(3), 35), (FinalizedTag::Behind(3), 29)]
    {
        server.set_profile(faults(|faults| faults.finalized_tag = tag));
        assert_eq!(finalized().await, height, "{tag:?}");
    }
    server.set_profile(faults(|faults| faults.finalized_backwards = ALWAYS));
    assert_eq!(finalized().await, 27);
    server.set_profile(faults(|faults| faults.finalized_tag = FinalizedTag::Unsupported));
    assert_eq!(client.error("eth_getBlockByNumber", json!(["finalized", false])).await.0, -39001);
    for style in [BeyondHead::RangeError, BeyondHead::CannotBeFound, BeyondHead::InvalidRange] {
        server.set_profile(faults(|faults| faults.beyond_head = style));
        client.error("eth_getLogs", json!([{"fromBlock": hex(39), "toBlock": hex(41)}])).await;
        client.error("eth_getBlockByNumber", json!([hex(41), false])).await;
    }
}

#[tokio::test]
async fn a_node_can_stay_on_the_left_branch() {
    let (sim, _server, client) = served(20, faults(|faults| faults.on_left_branch = true)).await;
    let old = sim.block(19).unwrap();
    let logs = client.logs(17, 20).await;
    sim.reorg(4, ReorgKind::Replace);
    sim.mine(3);
    assert_eq!(number(&client.call("eth_blockNumber", json!([])).await), 20);
    let block = client.call("eth_getBlockByNumber", json!([hex(19), false])).await;
    assert_eq!(block["hash"], old.hash.to_string());
    assert_eq!(client.logs(17, 30).await, logs);
}

#[tokio::test]
async fn logs_can_be_hidden_bent_and_added() {
    let (sim, server, client) = served(40, FaultProfile::default()).await;
    let right = client.logs(1, 40).await;
    server.set_profile(faults(|faults| faults.empty_logs = ALWAYS));
    assert!(client.logs(1, 40).await.is_empty());
    server.set_profile(faults(|faults| faults.hidden_single_log = ALWAYS));
    assert_eq!(client.logs(1, 40).await.len(), right.len() - 1);

    server.set_profile(faults(|faults| faults.hidden_block_logs = ALWAYS));
    let heights =
        |logs: &[Value]| logs.iter().map(|log| number(&log["blockNumber"])).collect::<BTreeSet<_>>();
    let shown = client.logs(1, 40).await;
    let hidden: Vec<u64> = heights(&right).difference(&heights(&shown)).copied().collect();
    assert_eq!(hidden.len(), 1);
    assert_eq!(u64::try_from(right.len() - shown.len()).unwrap(), sim.log_count(hidden[0], hidden[0]));

    server.set_profile(faults(|faults| faults.removed_logs = ALWAYS));
    let shown = client.logs(1, 40).await;
    assert_eq!(shown.iter().filter(|log| log["removed"] == true).count(), 1);
    assert_eq!(shown.len(), right.len() + 1);

    server.set_profile(faults(|faults| faults.other_block_log = ALWAYS));
    let shown = client.logs(1, 40).await;
    let strange = shown.iter().zip(&right).filter(|(log, right)| log["blockHash"] != right["blockHash"]);
    assert_eq!(strange.count(), 1);

    let order = |logs: &[Value]| {
        let places = logs.iter().map(|log| (number(&log["blockNumber"]), number(&log["logIndex"])));
        places.collect::<Vec<_>>()
    };
    server.set_profile(faults(|faults| faults.duplicate_log_index = ALWAYS));
    let places = order(&client.logs(1, 40).await);
    assert_eq!(places.iter().collect::<BTreeSet<_>>().len(), places.len() - 1);
    server.set_profile(faults(|faults| faults.decreasing_log_index = ALWAYS));
    let places = order(&client.logs(1, 40).await);
    assert_eq!(places.iter().collect::<BTreeSet<_>>().len(), places.len());
    assert!(!places.is_sorted());
    server.set_profile(faults(|faults| faults.log_numbering = LogNumbering::PerTransaction));
    let places = order(&client.logs(1, 40).await);
    assert!(places.iter().collect::<BTreeSet<_>>().len() < places.len());

    sim.mine_full(5);
    server.set_profile(faults(|faults| faults.late_tip_logs = ALWAYS));
    assert!(client.logs(41, 41).await.is_empty());
    assert_eq!(client.logs(1, 40).await.len(), right.len());
}

#[tokio::test]
async fn blocks_and_receipts_can_be_missing() {
    let (sim, server, client) = served(20, faults(|faults| faults.null_block = ALWAYS)).await;
    assert_eq!(client.call("eth_getBlockByNumber", json!(["latest", false])).await, Value::Null);
    let height = (1..=20).find(|height| sim.log_count(*height, *height) > 0).unwrap();
    let hash = sim.block(height).unwrap().transactions[0].to_string();
    server.set_profile(faults(|faults| faults.missing_receipts = ALWAYS));
    assert_eq!(client.call("eth_getTransactionReceipt", json!([hash])).await, Value::Null);
    assert_eq!(client.call("eth_getBlockReceipts", json!([hex(height)])).await, Value::Null);
    server.set_profile(faults(|faults| faults.empty_receipts = ALWAYS));
    assert_eq!(client.call("eth_getBlockReceipts", json!([hex(height)])).await, json!([]));
    server.set_profile(faults(|faults| faults.unsupported_methods = vec!["eth_getBlockReceipts".to_owned()]));
    assert_eq!(client.error("eth_getBlockReceipts", json!([hex(height)])).await.0, -32601);
}

#[tokio::test]
async fn headers_may_come_from_two_branches_above_finality() {
    let (sim, _server, client) = served(20, faults(|faults| faults.unlinked_header = ALWAYS)).await;
    for height in [20, 5] {
        let block = client.call("eth_getBlockByNumber", json!([hex(height), false])).await;
        assert_eq!(block["hash"] == sim.block(height).unwrap().hash.to_string(), height <= sim.finalized());
    }
    let old = sim.block(20).unwrap().hash.to_string();
    sim.reorg(2, ReorgKind::Replace);
    let block = client.call("eth_getBlockByNumber", json!([hex(20), false])).await;
    assert_eq!(block["hash"], old, "a real block of the other branch, once there is one");
}

#[tokio::test]
async fn blooms_can_be_useless() {
    for (bloom, digits) in [(BloomFault::Zero, "0"), (BloomFault::Full, "f")] {
        let (_sim, _server, client) = served(3, faults(|faults| faults.bloom = bloom)).await;
        let block = client.call("eth_getBlockByNumber", json!(["latest", false])).await;
        assert_eq!(block["logsBloom"], format!("0x{}", digits.repeat(512)));
    }
}

#[tokio::test]
async fn the_chain_can_change_in_the_middle() {
    let profile = faults(|faults| {
        faults.wrong_chain_id = Some(1);
        faults.wrong_chain_after = 2;
    });
    let (_sim, _server, client) = served(3, profile).await;
    let mut answers = Vec::new();
    for _ in 0..3 {
        answers.push(number(&client.call("eth_chainId", json!([])).await));
    }
    assert_eq!(answers, [31_337, 31_337, 1]);
}

#[tokio::test]
async fn pruned_history_is_refused_or_silently_empty() {
    let profile = faults(|faults| faults.pruned_below = 10);
    let (sim, server, client) = served(20, profile.clone()).await;
    let old = json!([{"fromBlock": hex(5), "toBlock": hex(15)}]);
    assert!(client.error("eth_getLogs", old.clone()).await.1.starts_with("missing trie node"));
    server.set_profile(FaultProfile { pruned_style: PrunedStyle::HistoryPruned, ..profile.clone() });
    assert!(client.error("eth_getLogs", old.clone()).await.1.contains("pruned"));
    server.set_profile(FaultProfile { pruned_style: PrunedStyle::Empty, ..profile });
    assert_eq!(client.call("eth_getLogs", old).await, json!([]));
    assert_eq!(client.call("eth_getBlockReceipts", json!([hex(5)])).await, Value::Null);
    assert_eq!(u64::try_from(client.logs(10, 20).await.len()).unwrap(), sim.log_count(10, 20));
    assert_ne!(client.call("eth_getBlockByNumber", json!([hex(5), false])).await, Value::Null);
}

#[tokio::test]
async fn limits_are_refused_in_every_providers_words() {
    let (_sim, server, client) = served(40, FaultProfile::default()).await;
    for style in LimitStyle::ALL {
        server.set_profile(faults(|faults| {
            faults.max_block_range = Some(10);
            faults.limit_style = style;
        }));
        let (_, message) =
            client.error("eth_getLogs", json!([{"fromBlock": hex(1), "toBlock": hex(11)}])).await;
        assert!(!message.is_empty(), "{style:?}");
        client.logs(1, 10).await;
    }
    let refused = client.raw("eth_getLogs", json!([{"fromBlock": hex(1), "toBlock": hex(11)}])).await;
    assert_eq!(refused.status, 413, "the last style comes with a status of its own");
}

#[tokio::test]
async fn the_range_suggested_after_too_many_results_works() {
    let profile = faults(|faults| {
        faults.max_results = Some(100);
        faults.limit_style = LimitStyle::Infura;
    });
    let (sim, server, client) = served(40, profile).await;
    let (code, message) =
        client.error("eth_getLogs", json!([{"fromBlock": hex(1), "toBlock": hex(40)}])).await;
    assert_eq!(code, -32005);
    let to = message.split(", ").nth(1).unwrap().split(']').next().unwrap();
    let to = number(&json!(to));
    assert_eq!(u64::try_from(client.logs(1, to).await.len()).unwrap(), sim.log_count(1, to));
    assert!(sim.log_count(1, to + 1) > 100, "and no larger one does");
    server.set_profile(faults(|faults| faults.max_response_bytes = Some(20_000)));
    client.error("eth_getLogs", json!([{"fromBlock": hex(1), "toBlock": hex(40)}])).await;
}

#[tokio::test]
async fn an_empty_list_of_addresses_may_mean_nothing() {
    let (_sim, _server, client) =
        served(10, faults(|faults| faults.empty_addresses = EmptyAddresses::Nothing)).await;
    let filter = json!([{"fromBlock": "0x0", "toBlock": "latest", "address": []}]);
    assert_eq!(client.call("eth_getLogs", filter).await, json!([]));
}

#[tokio::test]
async fn a_patient_reader_gets_through_chaos() {
    let (sim, _server, client) = served(60, FaultProfile::chaos(5)).await;
    let mut tries = 0;
    for height in 1..=60 {
        let hash = sim.block(height).unwrap().hash.to_string();
        let right = serde_json::to_value(
            sim.logs(height, height).iter().map(|log| log.log_index).collect::<Vec<_>>(),
        );
        loop {
            tries += 1;
            assert!(tries < 2_000, "chaos must be passable");
            let call =
                json!({"jsonrpc": "2.0", "id": 1, "method": "eth_getLogs", "params": [{"blockHash": hash}]});
            let Ok(answer) = reqwest::Client::new().post(&client.url).body(call.to_string()).send().await
            else {
                continue;
            };
            let Ok(text) = answer.text().await else { continue };
            let Ok(answer) = serde_json::from_str::<Value>(&text) else { continue };
            let Some(logs) = answer["result"].as_array() else { continue };
            let good = logs.iter().all(|log| log["blockHash"] == hash && log["removed"] == false);
            let indexes: Vec<u64> = logs.iter().map(|log| number(&log["logIndex"])).collect();
            if good && json!(indexes) == *right.as_ref().unwrap() {
                break;
            }
        }
    }
    assert!(tries > 60, "chaos must be felt");
}

#[tokio::test]
async fn too_many_requests_in_a_second_are_refused() {
    let (_sim, server, client) = served(3, faults(|faults| faults.requests_per_sec = Some(5))).await;
    let mut statuses = Vec::new();
    for _ in 0..40 {
        statuses.push(client.raw("eth_chainId", json!([])).await.status);
    }
    assert_eq!(statuses[..5], [200; 5]);
    assert!(statuses.contains(&429));
    assert_eq!(server.http_requests(), 40);
}
