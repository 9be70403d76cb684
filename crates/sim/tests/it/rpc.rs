//! Every method of a perfect node.

use alloy_primitives::{Address, U256, keccak256};
use serde_json::{Value, json};
use tidemark_sim::{FaultProfile, ReorgKind, Sim, SimConfig, SimEvent};

use crate::client::{Client, hex, number, served};

#[tokio::test]
async fn simple_methods_answer() {
    let (sim, server, client) = served(20, FaultProfile::default()).await;
    assert_eq!(client.call("eth_chainId", json!([])).await, "0x7a69");
    assert_eq!(client.call("net_version", json!([])).await, "31337");
    assert_eq!(client.call("eth_syncing", json!([])).await, false);
    assert_eq!(number(&client.call("eth_blockNumber", json!([])).await), sim.head());
    assert!(client.call("web3_clientVersion", json!([])).await.as_str().unwrap().contains("TidemarkSim"));
    assert_eq!(client.error("eth_nonsense", json!([])).await.0, -32601);
    assert_eq!(client.error("eth_getLogs", json!([])).await.0, -32602);
    assert_eq!(server.requests()["eth_blockNumber"], 1);
    let contract = &sim.nft_contracts()[0];
    assert!(client.call("eth_getCode", json!([contract, "latest"])).await.as_str().unwrap().len() > 2);
    let nobody = "0x00000000000000000000000000000000000000aa";
    assert_eq!(client.call("eth_getCode", json!([nobody, "latest"])).await, "0x");
}

#[tokio::test]
async fn parse_errors_are_told() {
    let (_sim, _server, client) = served(1, FaultProfile::default()).await;
    for body in ["{", "nonsense", "[{]"] {
        assert!(client.post("/", body.to_owned()).await.body.contains("-32700"), "{body}");
    }
    assert!(client.post("/", "[]".to_owned()).await.body.contains("-32600"));
}

#[tokio::test]
async fn blocks_have_the_shape_of_a_node() {
    let (sim, _server, client) = served(20, FaultProfile::default()).await;
    let height = (1..=20).find(|height| sim.log_count(*height, *height) > 3).unwrap();
    let known = sim.block(height).unwrap();
    let block = client.call("eth_getBlockByNumber", json!([hex(height), false])).await;
    assert_eq!(number(&block["number"]), height);
    assert_eq!(block["hash"], known.hash.to_string());
    assert_eq!(block["parentHash"], known.parent_hash.to_string());
    assert_eq!(number(&block["timestamp"]), known.timestamp);
    assert_eq!(block["logsBloom"].as_str().unwrap().len(), 2 + 512);
    assert_eq!(block["transactions"][0], known.transactions[0].to_string());
    for field in ["stateRoot", "receiptsRoot", "transactionsRoot", "miner", "gasUsed", "extraData", "nonce"] {
        assert!(block[field].as_str().unwrap().starts_with("0x"), "{field}");
    }
    assert_eq!(client.call("eth_getBlockByHash", json!([block["hash"], false])).await, block);
    let full = client.call("eth_getBlockByNumber", json!([hex(height), true])).await;
    let first = &full["transactions"][0];
    assert_eq!(first["hash"], block["transactions"][0]);
    assert_eq!(first["blockHash"], block["hash"]);
    assert_eq!(number(&first["chainId"]), 31_337);
    assert_eq!(&client.call("eth_getTransactionByHash", json!([first["hash"]])).await, first);
    assert_eq!(client.call("eth_getBlockByNumber", json!([hex(21), false])).await, Value::Null);
}

#[tokio::test]
async fn tags_mean_heights() {
    let (sim, _server, client) = served(30, FaultProfile::default()).await;
    for (tag, height) in [
        ("latest", 30),
        ("pending", 30),
        ("safe", sim.safe()),
        ("finalized", sim.finalized()),
        ("earliest", 0),
    ] {
        let block = client.call("eth_getBlockByNumber", json!([tag, false])).await;
        assert_eq!(number(&block["number"]), height, "{tag}");
    }
    assert_eq!(client.error("eth_getBlockByNumber", json!(["newest", false])).await.0, -32602);
}

#[tokio::test]
async fn served_logs_are_the_true_logs() {
    let (sim, _server, client) = served(40, FaultProfile::default()).await;
    let logs = client.logs(0, 40).await;
    let known = sim.logs(0, 40);
    assert_eq!(logs.len(), known.len());
    for (log, known) in logs.iter().zip(&known) {
        assert_eq!(log["address"], format!("{:#x}", known.address));
        let topics: Vec<String> = known.topics.iter().map(ToString::to_string).collect();
        assert_eq!(log["topics"], json!(topics));
        assert_eq!(log["data"], alloy_primitives::hex::encode_prefixed(&known.data));
        assert_eq!(log["blockHash"], known.block_hash.to_string());
        assert_eq!(number(&log["blockNumber"]), known.block_number);
        assert_eq!(log["transactionHash"], known.tx_hash.to_string());
        assert_eq!(number(&log["transactionIndex"]), u64::from(known.tx_index));
        assert_eq!(number(&log["logIndex"]), u64::from(known.log_index));
        assert_eq!(log["removed"], false);
    }
}

#[tokio::test]
async fn filters_choose_by_address_topics_and_block_hash() {
    let (sim, _server, client) = served(60, FaultProfile::default()).await;
    let known = sim.logs(0, 60);
    let range = |more: Value| {
        let mut filter = json!({"fromBlock": "0x0", "toBlock": "latest"});
        filter.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!([filter])
    };
    let count = async |more: Value| client.call("eth_getLogs", range(more)).await.as_array().unwrap().len();
    let contracts = sim.nft_contracts();
    let of = |address: &str| known.iter().filter(|log| format!("{:#x}", log.address) == address).count();
    assert_eq!(count(json!({"address": contracts[0]})).await, of(&contracts[0]));
    let two = [&contracts[0], &contracts[5]];
    assert_eq!(count(json!({"address": two})).await, of(two[0]) + of(two[1]));
    assert_eq!(count(json!({"address": []})).await, known.len());
    assert_eq!(count(json!({"address": "0x00000000000000000000000000000000000000aa"})).await, 0);

    let transfer = keccak256("Transfer(address,address,uint256)").to_string();
    let batch = keccak256("TransferBatch(address,address,address,uint256[],uint256[])").to_string();
    let with = |topic: &str| known.iter().filter(|log| log.topics[0].to_string() == topic).count();
    assert!(with(&transfer) > 0 && with(&batch) > 0);
    assert_eq!(count(json!({"topics": [transfer]})).await, with(&transfer));
    assert_eq!(count(json!({"topics": [[transfer, batch]]})).await, with(&transfer) + with(&batch));
    assert_eq!(count(json!({"topics": [[]]})).await, known.len());
    assert_eq!(count(json!({"topics": [null]})).await, known.len());

    let zero = format!("{:#066x}", 0);
    let mints = known.iter().filter(|log| {
        log.topics.len() > 1 && log.topics[0].to_string() == transfer && log.topics[1].is_zero()
    });
    assert_eq!(count(json!({"topics": [transfer, zero]})).await, mints.count());
    let four = known.iter().filter(|log| log.topics.len() == 4).count();
    assert_eq!(count(json!({"topics": [null, null, null, null]})).await, four, "positions must exist");
    let burns = known.iter().filter(|log| log.topics.len() > 2 && log.topics[2].is_zero()).count();
    assert_eq!(count(json!({"topics": [null, null, [zero]]})).await, burns);

    let height = (1..=60).find(|height| sim.log_count(*height, *height) > 3).unwrap();
    let hash = sim.block(height).unwrap().hash.to_string();
    let logs = client.call("eth_getLogs", json!([{"blockHash": hash}])).await;
    assert_eq!(logs, json!(client.logs(height, height).await));
    let both = json!([{"blockHash": hash, "fromBlock": "0x1"}]);
    assert_eq!(client.error("eth_getLogs", both).await.0, -32602);
    let unknown = json!([{"blockHash": zero}]);
    assert_eq!(client.error("eth_getLogs", unknown).await, (-32000, "unknown block".to_owned()));
    let backwards = json!([{"fromBlock": "0x5", "toBlock": "0x4"}]);
    assert_eq!(client.error("eth_getLogs", backwards).await.0, -32602);
    assert_eq!(client.error("eth_getLogs", json!([{"topics": ["0x12"]}])).await.0, -32602);
}

#[tokio::test]
async fn receipts_hold_the_same_logs() {
    let (sim, _server, client) = served(20, FaultProfile::default()).await;
    let height = (1..=20).find(|height| sim.log_count(*height, *height) > 3).unwrap();
    let block = sim.block(height).unwrap();
    let receipts = client.call("eth_getBlockReceipts", json!([hex(height)])).await;
    let receipts = receipts.as_array().unwrap();
    let logs: Vec<Value> = receipts.iter().flat_map(|one| one["logs"].as_array().unwrap().clone()).collect();
    assert_eq!(logs, client.logs(height, height).await);
    assert_eq!(receipts.len(), block.transactions.len());
    let first = client.call("eth_getTransactionReceipt", json!([block.transactions[0].to_string()])).await;
    assert_eq!(first, receipts[0]);
    assert_eq!(first["status"], "0x1");
    let by_hash = client.call("eth_getBlockReceipts", json!([block.hash.to_string()])).await;
    assert_eq!(by_hash, json!(receipts));
    let nothing = format!("{:#066x}", 1);
    assert_eq!(client.call("eth_getTransactionReceipt", json!([nothing])).await, Value::Null);
}

#[tokio::test]
async fn batches_answer_each_call_in_order() {
    let (_sim, _server, client) = served(5, FaultProfile::default()).await;
    let calls: Vec<Value> = (0..5)
        .map(|height| json!({"jsonrpc": "2.0", "id": format!("b{height}"), "method": "eth_getBlockByNumber", "params": [hex(height), false]}))
        .collect();
    let raw = client.post("/", json!(calls).to_string()).await;
    let answers: Vec<Value> = serde_json::from_str(&raw.body).unwrap();
    for (height, answer) in (0_u64..).zip(&answers) {
        assert_eq!(answer["id"], format!("b{height}"));
        assert_eq!(number(&answer["result"]["number"]), height);
    }
    assert_eq!(answers.len(), 5);
}

fn data(signature: &str, words: &[U256]) -> String {
    let mut bytes = keccak256(signature)[..4].to_vec();
    words.iter().for_each(|word| bytes.extend_from_slice(&word.to_be_bytes::<32>()));
    alloy_primitives::hex::encode_prefixed(bytes)
}

fn as_word(address: Address) -> U256 {
    U256::from_be_bytes(address.into_word().0)
}

#[tokio::test]
async fn views_answer_at_any_height() {
    let (sim, _server, client) = served(60, FaultProfile::default()).await;
    let ask = async |to: &str, input: String, height: u64| {
        client.call("eth_call", json!([{"to": to, "data": input}, hex(height)])).await
    };
    for height in [20, 60, 35] {
        let truth = sim.owners_at(height);
        let (mut unique, mut multi) = (0, 0);
        for ((contract, id, account), qty) in truth.balances.iter().step_by(7) {
            let id = U256::from_str_radix(id, 10).unwrap();
            let account: Address = account.parse().unwrap();
            let is_721 = sim.nft_contracts()[..4].contains(contract);
            if is_721 {
                unique += 1;
                let owner = ask(contract, data("ownerOf(uint256)", &[id]), height).await;
                assert_eq!(owner, account.into_word().to_string());
            } else {
                multi += 1;
                let held =
                    ask(contract, data("balanceOf(address,uint256)", &[as_word(account), id]), height).await;
                assert_eq!(held, format!("{qty:#066x}"));
            }
        }
        assert!(unique > 0 && multi > 0, "{unique} {multi}");
    }
    let multi = &sim.nft_contracts()[4];
    let held: Vec<_> = sim
        .owners_at(60)
        .balances
        .into_iter()
        .filter(|((contract, ..), _)| contract == multi)
        .take(2)
        .collect();
    let account = |at: usize| as_word(held[at].0.2.parse::<Address>().unwrap());
    let id = |at: usize| U256::from_str_radix(&held[at].0.1, 10).unwrap();
    let n = |value: u64| U256::from(value);
    let words = [n(64), n(160), n(2), account(0), account(1), n(2), id(0), id(1)];
    let answer = ask(multi, data("balanceOfBatch(address[],uint256[])", &words), 60).await;
    let expected: String =
        [n(32), n(2), held[0].1, held[1].1].iter().map(|word| format!("{word:064x}")).collect();
    assert_eq!(answer, format!("0x{expected}"));

    let one = &sim.nft_contracts()[0];
    let missing = json!([{"to": one, "data": data("ownerOf(uint256)", &[U256::from(999_999)])}, "latest"]);
    let (code, message) = client.error("eth_call", missing).await;
    assert_eq!((code, message.as_str()), (3, "execution reverted: ERC721: invalid token ID"));
    let interface = U256::from(0x80ac_58cd_u64) << 224;
    let yes = ask(one, data("supportsInterface(bytes4)", &[interface]), 60).await;
    assert_eq!(yes, format!("{:#066x}", 1));
    let no = ask(multi, data("supportsInterface(bytes4)", &[interface]), 60).await;
    assert_eq!(no, format!("{:#066x}", 0));
    assert!(ask(one, data("name()", &[]), 60).await.as_str().unwrap().len() > 2 + 128);
    assert!(ask(one, data("symbol()", &[]), 60).await.as_str().unwrap().len() > 2 + 128);
    let beyond = json!([{"to": one, "data": data("name()", &[])}, hex(61)]);
    assert_eq!(client.error("eth_call", beyond).await.1, "header not found");
}

#[tokio::test]
async fn balances_of_owners_count_tokens() {
    let (sim, _server, client) = served(40, FaultProfile::default()).await;
    let one = &sim.nft_contracts()[0];
    let truth = sim.owners_at(40);
    let ((_, _, account), _) = truth.balances.iter().find(|((contract, ..), _)| contract == one).unwrap();
    let held = truth.balances.keys().filter(|(contract, _, who)| contract == one && who == account).count();
    let word = as_word(account.parse::<Address>().unwrap());
    let answer = client
        .call("eth_call", json!([{"to": one, "input": data("balanceOf(address)", &[word])}, "latest"]))
        .await;
    assert_eq!(number(&answer), u64::try_from(held).unwrap());
}

#[tokio::test]
async fn left_branches_are_served_by_hash_only() {
    let (sim, _server, client) = served(20, FaultProfile::default()).await;
    let height = (16..=20).find(|height| sim.log_count(*height, *height) > 0).unwrap();
    let old = sim.block(height).unwrap();
    sim.reorg(5, ReorgKind::Empty);
    let block = client.call("eth_getBlockByHash", json!([old.hash.to_string(), false])).await;
    assert_eq!(number(&block["number"]), height);
    let now = client.call("eth_getBlockByNumber", json!([hex(height), false])).await;
    assert_ne!(now["hash"], block["hash"]);
    let gone = client.call("eth_getTransactionReceipt", json!([old.transactions[0].to_string()])).await;
    assert_eq!(gone, Value::Null);
    assert!(client.logs(16, 20).await.is_empty());
}

#[tokio::test]
async fn admin_paths_exist_only_when_wanted() {
    let (_sim, _server, client) = served(3, FaultProfile::default()).await;
    assert_eq!(client.post("/sim/mine", String::new()).await.status, 404);

    let sim = Sim::new(SimConfig { admin: true, ..SimConfig::small(1) });
    let server = sim.serve(([127, 0, 0, 1], 0).into(), FaultProfile::default()).await.unwrap();
    let client = Client::new(&server.url);
    let mined = client.post("/sim/mine", json!({"blocks": 12}).to_string()).await;
    assert_eq!((mined.status, sim.head()), (200, 12));
    let reorg = client.post("/sim/reorg", json!({"depth": 2, "kind": "replace"}).to_string()).await;
    assert_eq!((reorg.status, sim.head()), (200, 13));
    let truth: Value = serde_json::from_str(&client.get("/sim/truth?height=10").await.body).unwrap();
    assert_eq!(truth["balances"].as_array().unwrap().len(), sim.owners_at(10).balances.len());
    assert_eq!(client.post("/sim/faults", json!({"down": true}).to_string()).await.status, 200);
    assert_eq!(client.raw("eth_chainId", json!([])).await.status, 503);
    assert_eq!(client.post("/sim/faults", json!({"dwon": true}).to_string()).await.status, 400);
    let status: Value = serde_json::from_str(&client.get("/sim/status").await.body).unwrap();
    assert_eq!(status["head"], 13);
    server.stop().await;
}

#[tokio::test]
async fn twenty_thousand_logs_are_made_and_served() {
    let sim = Sim::new(SimConfig { accounts: 2_000, ..SimConfig::bench(20_000, 1_000) });
    sim.mine(1_000);
    assert_eq!(sim.log_count(0, 1_000), 20_000);
    let server = sim.serve(([127, 0, 0, 1], 0).into(), FaultProfile::default()).await.unwrap();
    let client = Client::new(&server.url);
    let mut served = 0;
    for from in (0..1_000).step_by(500) {
        served += client.logs(from + 1, from + 500).await.len();
    }
    assert_eq!(served, 20_000);
    let batches = sim
        .logs(0, 1_000)
        .iter()
        .filter(|log| matches!(log.event, SimEvent::Erc1155 { batch: true, .. }))
        .count();
    assert!((850..1_150).contains(&batches), "{batches} batches");
}

#[tokio::test]
async fn a_stopped_server_can_come_back_at_its_address() {
    let (sim, server, client) = served(3, FaultProfile::default()).await;
    assert_eq!(client.raw("eth_chainId", json!([])).await.status, 200);
    let address = server.address;
    server.stop().await;
    let again = sim.serve(address, FaultProfile::default()).await.unwrap();
    let client = Client::new(&again.url);
    assert_eq!(client.raw("eth_chainId", json!([])).await.status, 200);
}

#[tokio::test]
async fn answers_are_compressed_for_those_who_accept_it() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let (_sim, server, _client) = served(5, FaultProfile::default()).await;
    let body = r#"{"jsonrpc":"2.0","id":1,"method":"eth_getBlockByNumber","params":["latest",false]}"#;
    for (accept, compressed) in [("gzip", true), ("identity", false)] {
        let mut stream = tokio::net::TcpStream::connect(server.address).await.unwrap();
        let request = format!(
            "POST / HTTP/1.1\r\nhost: sim\r\nconnection: close\r\naccept-encoding: {accept}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        let head = String::from_utf8_lossy(&answer).to_lowercase();
        assert_eq!(head.contains("content-encoding: gzip"), compressed, "{accept}");
    }
}

#[tokio::test]
async fn absurd_heights_are_refused_or_empty_but_never_a_crash() {
    let profile = FaultProfile { max_block_range: Some(100), ..FaultProfile::default() };
    let (_sim, server, client) = served(5, profile).await;
    let all = json!([{"fromBlock": "0x0", "toBlock": "0xffffffffffffffff"}]);
    client.error("eth_getLogs", all.clone()).await;
    server.set_profile(FaultProfile { max_response_bytes: Some(100), ..FaultProfile::default() });
    client.error("eth_getLogs", all).await;
    let one = json!([{"fromBlock": "0xffffffffffffffff", "toBlock": "0xffffffffffffffff"}]);
    assert_eq!(client.call("eth_getLogs", one).await, json!([]));
    client.error("eth_getLogs", json!([{"fromBlock": "0x1ffffffffffffffff"}])).await;
}
