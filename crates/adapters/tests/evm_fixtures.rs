//! Recorded logs of real chains decode to what an independent decoder says (S0 §16.1).

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io::BufRead;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};
use tidemark_adapters::evm::bloom;
use tidemark_adapters::evm::parse::{Claim, Known, parse};
use tidemark_adapters::evm::wire::{Header, Log};
use tidemark_model::chain::{EventKind, RawBlock, RawEvent, RawRecord, Standard};
use tidemark_model::ids::{BlockHash, Height, NetworkId, TxId};
use tidemark_model::{OffsetDateTime, U256};

/// One expected or found movement, in words.
type Fact = (String, u64, u32, String, String, String, Option<String>, Option<String>, String, String);

#[derive(Deserialize)]
struct Recorded {
    transactions: Vec<RecordedTx>,
}
#[derive(Deserialize)]
struct RecordedTx {
    receipt: RecordedReceipt,
}
#[derive(Deserialize)]
struct RecordedReceipt {
    logs: Vec<Value>,
}

fn is_log(value: &Value) -> bool {
    value.get("topics").is_some_and(Value::is_array) && value.get("logIndex").is_some()
}

/// All logs of a recorded file: in receipts, in answers, wherever an array of logs is.
fn logs_of(value: &Value, found: &mut Vec<Value>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| {
            if is_log(item) {
                found.push(item.clone());
            } else {
                logs_of(item, found);
            }
        }),
        Value::Object(fields) => {
            // The recorder's own decodings repeat the logs in other forms.
            for (name, field) in fields {
                if !["decode", "decoded", "traces", "request"].contains(&name.as_str()) {
                    logs_of(field, found);
                }
            }
        }
        _ => {}
    }
}

fn log(mut value: Value, file: &str) -> Log {
    for (field, default) in [
        ("blockHash", json!(format!("0x{}", "00".repeat(32)))),
        ("transactionIndex", json!(0)),
        ("blockNumber", json!(0)),
    ] {
        if value.get(field).is_none_or(Value::is_null) {
            value[field] = default;
        }
    }
    Log::deserialize(&value).unwrap_or_else(|error| panic!("{file}: {error}: {value}"))
}

fn block_of(log: &Log) -> RawBlock {
    let topics: Vec<u8> = log.topics.as_slice().concat();
    let record = RawRecord {
        tx: TxId::from(log.transaction_hash.0),
        tx_index: 0,
        index: u32::try_from(log.log_index.0).expect("small"),
        emitter: log.address.0.to_vec().into(),
        topics: topics.into(),
        data: log.data.0.clone(),
        payload: None,
    };
    RawBlock {
        height: Height(log.block_number.0),
        hash: BlockHash(log.block_hash.0),
        parent: BlockHash::default(),
        time: OffsetDateTime::UNIX_EPOCH,
        tx_count: None,
        transactions: vec![],
        records: vec![record],
        payload: None,
    }
}

fn fact(file: &str, event: &RawEvent) -> Fact {
    let asset = &event.asset_refs[0];
    let (from, to, qty) = match event.movement() {
        Some(moved) => (moved.from.map(str::to_owned), moved.to.map(str::to_owned), moved.qty),
        None => (None, None, U256::ZERO),
    };
    (
        file.to_owned(),
        event.block_number.0,
        event.event_index,
        event.tx_hash.to_string(),
        format!("{} {} {}", asset.standard.as_str(), event.event_kind.as_str(), event.sub_index),
        asset.collection_addr_normalized.clone(),
        from,
        to,
        asset.token_id_raw.clone(),
        qty.to_string(),
    )
}

fn expected_facts(line: &Value) -> Vec<Fact> {
    let text = |field: &str| line[field].as_str().map(str::to_owned);
    let standard = match line["standard"].as_str() {
        Some("erc721" | "erc721_unindexed") => Standard::Erc721,
        Some("erc1155") => Standard::Erc1155,
        _ => return vec![],
    };
    let kind = match line["kind"].as_str().expect("a kind") {
        "mint" | "batch_mint" => EventKind::Mint,
        "burn" | "batch_burn" => EventKind::Burn,
        "transfer" | "batch_transfer" | "self_transfer" => EventKind::Transfer,
        "uri" => EventKind::Metadata,
        _ => return vec![],
    };
    let zero = format!("0x{}", "00".repeat(20));
    let party = |field: &str| text(field).filter(|address| *address != zero);
    let list = |one: &str, many: &str| match &line[many] {
        Value::Array(items) => items.iter().map(|item| item.as_str().expect("text").to_owned()).collect(),
        _ => vec![text(one).unwrap_or_else(|| "0".to_owned())],
    };
    list("token_id", "token_ids")
        .into_iter()
        .zip(list("quantity", "quantities"))
        .enumerate()
        .map(|(sub_index, (id, qty))| {
            (
                text("file").expect("a file"),
                line["block"].as_u64().expect("a block"),
                u32::try_from(line["log_index"].as_u64().expect("an index")).expect("small"),
                text("tx").expect("a transaction"),
                format!("{} {} {sub_index}", standard.as_str(), kind.as_str()),
                text("contract").expect("a contract"),
                party("from"),
                party("to"),
                id,
                qty,
            )
        })
        .collect()
}

fn is_ethereum(file: &str) -> bool {
    file.contains("/ethereum/") || file.contains("/mainnet/") || file.starts_with("tx/")
}

#[test]
fn recorded_logs_decode_as_expected() {
    let Some(folder) = common::fixtures() else { return };
    let counts: Value = common::load(&folder.join("expected_counts.json"));
    let mut expected = BTreeSet::new();
    let lines = std::fs::File::open(folder.join("expected_events.jsonl.gz")).expect("there");
    for line in std::io::BufReader::new(flate2::read::GzDecoder::new(lines)).lines() {
        let line: Value = serde_json::from_str(&line.expect("a line")).expect("JSON");
        expected.extend(expected_facts(&line));
    }
    let cases: Value = common::load(&folder.join("expected.json"));
    let mut key_cases = BTreeSet::new();
    for case in cases["cases"].as_array().expect("cases") {
        key_cases.extend(expected_facts(case));
    }
    assert!(key_cases.is_subset(&expected) && key_cases.len() > 50, "{}", key_cases.len());
    let mut never: BTreeSet<(String, String, u64)> = BTreeSet::new();
    for case in cases["must_not_be_nft"].as_array().expect("cases") {
        let text = |field: &str| case[field].as_str().expect("text").to_owned();
        never.insert((text("file"), text("tx"), case["log_index"].as_u64().expect("an index")));
    }
    let mut found = BTreeSet::new();
    let mut quarantined = Vec::new();
    for (file, count) in counts.as_object().expect("files") {
        let known = Known::new(if is_ethereum(file) { 1 } else { 0 }, &[]);
        let mut values = Vec::new();
        if file.starts_with("blocks/") {
            // Typed, because the traces in these files are large and nobody needs them.
            let block: Recorded = common::load(&folder.join(Path::new(file)));
            values.extend(block.transactions.into_iter().flat_map(|tx| tx.receipt.logs));
        } else {
            logs_of(&common::load::<Value>(&folder.join(Path::new(file))), &mut values);
        }
        assert_eq!(json!(values.len()), count["logs"], "logs of {file}");
        let mut erc20 = 0_u64;
        for value in values {
            let log = log(value, file);
            let topics = log.topics.as_slice();
            let topic0 = topics.first().map(|topic| &topic[..]);
            let claim = known.claim(&log.address.0, topic0, topics.len());
            erc20 += u64::from(claim == Claim::Foreign && topics.len() == 3);
            let block = block_of(&log);
            let parsed = parse(NetworkId(1), &known, &block);
            assert_eq!(parsed, parse(NetworkId(1), &known, &block), "parsing twice gives the same");
            let name = (file.clone(), block.records[0].tx.to_string(), log.log_index.0);
            assert!(!never.contains(&name) || parsed.events.is_empty(), "{name:?} is no NFT");
            quarantined.extend(parsed.quarantined.iter().map(|bad| format!("{name:?}: {}", bad.reason)));
            found.extend(parsed.events.iter().map(|event| fact(file, event)));
        }
        assert_eq!(
            json!(erc20),
            count.get("erc20.erc20_transfer").cloned().unwrap_or(json!(0)),
            "ERC-20 of {file}"
        );
    }
    let missing: Vec<_> = expected.difference(&found).take(5).collect();
    let extra: Vec<_> = found.difference(&expected).take(5).collect();
    assert!(missing.is_empty() && extra.is_empty(), "missing {missing:#?}\nextra {extra:#?}");
    assert_eq!(quarantined, Vec::<String>::new());
    assert!(found.len() > 4_000, "{}", found.len());
}

#[test]
fn recorded_blooms_are_those_of_their_logs() {
    let Some(folder) = common::fixtures() else { return };
    let mut checked = BTreeMap::new();
    for entry in std::fs::read_dir(folder.join("rpc-range/ethereum")).expect("there") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        let Some(height) = name.strip_suffix(".block.json.gz") else { continue };
        let header: Header = common::load(&path);
        let mut values = Vec::new();
        logs_of(
            &common::load::<Value>(&path.with_file_name(format!("{height}.receipts.json.gz"))),
            &mut values,
        );
        let logs: Vec<Log> = values.into_iter().map(|value| log(value, &name)).collect();
        assert_eq!(header.logs_bloom.as_deref(), Some(&bloom::of_logs(&logs)), "{name}");
        checked.insert(height.to_owned(), logs.len());
    }
    assert_eq!(checked.len(), 13);
}
