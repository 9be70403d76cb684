//! What logs mean: every shape of the standards and every way to break them, without a node.

mod common;

use std::sync::OnceLock;

use alloy_primitives::U256;
use proptest::prelude::*;
use tidemark_adapters::contract::{BatchCase, RAW_EVENT_SCHEMA, adapter_contract};
use tidemark_adapters::evm::topics::{OURS, TRANSFER, TRANSFER_BATCH, TRANSFER_SINGLE, URI};
use tidemark_adapters::evm::{EvmAdapter, EvmConfig};
use tidemark_model::OffsetDateTime;
use tidemark_model::chain::{ChainAdapter, EventKind, ParsedBlock, RawBlock, RawRecord};
use tidemark_model::ids::{BlockHash, Height, TxId};
use tidemark_model::redact::RedactedUrl;
use tidemark_rpc::EndpointConfig;

type Word = [u8; 32];
const CONTRACT: [u8; 20] = [0xc0; 20];
const CONFIGURED: [u8; 20] = [0xcf; 20];

fn adapter() -> EvmAdapter {
    let url = RedactedUrl::parse("http://127.0.0.1:1").expect("a URL");
    let mut config = EvmConfig::new(common::network(), 1, vec![EndpointConfig::new(url)]);
    config.contracts = vec![format!("0x{}", hex::encode(CONFIGURED))];
    EvmAdapter::new(config).expect("a good configuration")
}

fn word(value: u64) -> Word {
    U256::from(value).to_be_bytes()
}
fn account(tag: u8) -> Word {
    let mut word = [0; 32];
    word[12..].copy_from_slice(&[tag; 20]);
    word
}
fn address(tag: u8) -> String {
    format!("0x{}", hex::encode([tag; 20]))
}

fn record(index: u32, emitter: &[u8], topics: &[Word], data: &[Word]) -> RawRecord {
    raw_record(index, emitter, topics.concat(), data.concat())
}
fn raw_record(index: u32, emitter: &[u8], topics: Vec<u8>, data: Vec<u8>) -> RawRecord {
    RawRecord {
        tx: TxId::from([7; 32]),
        tx_index: 0,
        index,
        emitter: emitter.to_vec().into(),
        topics: topics.into(),
        data: data.into(),
        payload: None,
    }
}
fn block(records: Vec<RawRecord>) -> RawBlock {
    RawBlock {
        height: Height(5),
        hash: BlockHash([5; 32]),
        parent: BlockHash([4; 32]),
        time: OffsetDateTime::UNIX_EPOCH,
        tx_count: Some(1),
        transactions: vec![],
        records,
        payload: None,
    }
}
fn batch_data(ids: &[u64], amounts: &[u64]) -> Vec<Word> {
    let amounts_at = 64 + 32 * (1 + u64::try_from(ids.len()).expect("small"));
    let mut data = vec![word(64), word(amounts_at), word(u64::try_from(ids.len()).expect("small"))];
    data.extend(ids.iter().map(|id| word(*id)));
    data.push(word(u64::try_from(amounts.len()).expect("small")));
    data.extend(amounts.iter().map(|amount| word(*amount)));
    data
}
fn batch(ids: &[u64], amounts: &[u64]) -> RawRecord {
    let topics = [TRANSFER_BATCH, account(9), account(1), account(2)];
    record(0, &CONTRACT, &topics, &batch_data(ids, amounts))
}

fn parse(record: RawRecord) -> ParsedBlock {
    static ADAPTER: OnceLock<EvmAdapter> = OnceLock::new();
    ADAPTER.get_or_init(adapter).parse(&block(vec![record]))
}

/// One line per event: kind, standard, token, legs.
fn shown(parsed: &ParsedBlock) -> Vec<String> {
    let mut lines: Vec<String> = parsed
        .events
        .iter()
        .map(|event| {
            let legs: Vec<String> = event
                .ownership_deltas
                .iter()
                .map(|delta| format!("{}{}", delta.qty_delta, &delta.account_addr_normalized[..4]))
                .collect();
            let asset = &event.asset_refs[0];
            let kind = event.event_kind.as_str();
            format!(
                "{kind} {} {}#{} [{}]",
                asset.standard.as_str(),
                asset.token_id_raw,
                event.sub_index,
                legs.join(" ")
            )
        })
        .collect();
    lines.extend(parsed.quarantined.iter().map(|bad| format!("quarantined: {}", bad.reason)));
    lines
}

#[track_caller]
fn check(record: RawRecord, expected: &[&str]) {
    assert_eq!(shown(&parse(record)), expected);
}

#[test]
fn erc721_transfers_mints_burns_and_self_transfers() {
    let transfer = |from: Word, to: Word| record(0, &CONTRACT, &[TRANSFER, from, to, word(42)], &[]);
    check(transfer(account(1), account(2)), &["transfer erc721 42#0 [-10x01 10x02]"]);
    check(transfer(word(0), account(2)), &["mint erc721 42#0 [10x02]"]);
    check(transfer(account(1), word(0)), &["burn erc721 42#0 [-10x01]"]);
    check(transfer(account(1), account(1)), &["transfer erc721 42#0 [-10x01 10x01]"]);
    check(transfer(word(0), word(0)), &["quarantined: a Transfer from nobody to nobody"]);
    let mut dead = [0; 32];
    dead[30..].copy_from_slice(&[0xde, 0xad]);
    check(transfer(account(1), dead), &["transfer erc721 42#0 [-10x01 10x00]"]);
}

#[test]
fn erc20_is_never_an_nft() {
    check(record(0, &CONTRACT, &[TRANSFER, account(1), account(2)], &[word(42)]), &[]);
    check(record(0, &CONFIGURED, &[TRANSFER, account(1), account(2)], &[word(42)]), &[]);
}

#[test]
fn transfers_without_indexed_arguments_count_for_known_contracts_only() {
    let data = [account(1), account(2), word(42)];
    let kitties = hex::decode("06012c8cf97bead5deae237070f9587f8e7a266d").expect("hex");
    check(record(0, &kitties, &[TRANSFER], &data), &["transfer erc721 42#0 [-10x01 10x02]"]);
    check(record(0, &CONFIGURED, &[TRANSFER], &data), &["transfer erc721 42#0 [-10x01 10x02]"]);
    check(record(0, &CONTRACT, &[TRANSFER], &data), &[]);
    check(
        record(0, &CONFIGURED, &[TRANSFER], &data[..2]),
        &["quarantined: a Transfer without indexed arguments has three words of data"],
    );
    check(
        record(0, &CONFIGURED, &[TRANSFER, account(1)], &data[1..]),
        &["quarantined: a Transfer that indexes other arguments than any known standard"],
    );
}

#[test]
fn erc1155_single() {
    let single = |from: Word, to: Word, amount: u64| {
        record(0, &CONTRACT, &[TRANSFER_SINGLE, account(9), from, to], &[word(7), word(amount)])
    };
    check(single(account(1), account(2), 3), &["transfer erc1155 7#0 [-30x01 30x02]"]);
    check(single(word(0), account(2), 3), &["mint erc1155 7#0 [30x02]"]);
    check(single(account(1), word(0), 3), &["burn erc1155 7#0 [-30x01]"]);
    check(single(account(1), account(2), 0), &["transfer erc1155 7#0 [00x01 00x02]"]);
    check(single(word(0), word(0), 0), &["metadata erc1155 7#0 []"]);
    check(
        single(word(0), word(0), 1),
        &["quarantined: an ERC-1155 transfer of some amount from nobody to nobody"],
    );
    let bare = [account(9), account(1), account(2), word(7), word(3)];
    check(record(0, &CONTRACT, &[TRANSFER_SINGLE], &bare), &["transfer erc1155 7#0 [-30x01 30x02]"]);
    check(
        record(0, &CONTRACT, &[TRANSFER_SINGLE, account(9)], &bare[1..]),
        &["quarantined: an ERC-1155 transfer that indexes other arguments than the standard"],
    );
}

#[test]
fn erc1155_batches_expand_in_order() {
    check(
        batch(&[5, 6, 5], &[1, 2, 3]),
        &[
            "transfer erc1155 5#0 [-10x01 10x02]",
            "transfer erc1155 6#1 [-20x01 20x02]",
            "transfer erc1155 5#2 [-30x01 30x02]",
        ],
    );
    check(batch(&[], &[]), &[]);
}

#[test]
fn uri_is_an_event_that_moves_nothing() {
    let mut text = [0; 32];
    text[..4].copy_from_slice(b"ipfs");
    let uri = |data: &[Word]| record(0, &CONTRACT, &[URI, word(7)], data);
    check(uri(&[word(32), word(4), text]), &["metadata erc1155 7#0 []"]);
    check(uri(&[word(32), word(40), text]), &["quarantined: a text longer than the data"]);
    check(uri(&[]), &["quarantined: the data is too short"]);
}

#[test]
fn broken_records_are_named_not_dropped() {
    check(batch(&[1, 2], &[1]), &["quarantined: ids and amounts of a TransferBatch differ in length"]);
    let topics = [TRANSFER_BATCH, account(9), account(1), account(2)];
    let broken = |data: &[Word]| record(0, &CONTRACT, &topics, data);
    check(broken(&[word(64), word(u64::MAX), word(0)]), &["quarantined: an offset beyond the data"]);
    check(broken(&[[0xff; 32], word(64), word(0)]), &["quarantined: an offset beyond the data"]);
    check(broken(&[word(64), word(64), word(9)]), &["quarantined: an array longer than the data"]);
    check(broken(&[word(64), word(64), [0xff; 32]]), &["quarantined: a length beyond the data"]);
    check(broken(&[word(64)]), &["quarantined: an offset beyond the data"]);
    check(broken(&[]), &["quarantined: the data is too short"]);
    check(
        record(0, &CONTRACT, &[TRANSFER_SINGLE, account(9), account(1), account(2)], &[word(1)]),
        &["quarantined: the data is too short"],
    );
    let mut dirty = account(1);
    dirty[0] = 1;
    check(
        record(0, &CONTRACT, &[TRANSFER, dirty, account(2), word(1)], &[]),
        &["quarantined: an address with bytes beyond its 20"],
    );
    check(
        record(0, &CONTRACT, &[TRANSFER, account(1), account(2), word(1)], &[word(1)]),
        &["quarantined: an ERC-721 Transfer with indexed arguments carries no data"],
    );
    check(
        record(0, &CONTRACT[..19], &[TRANSFER, account(1), account(2), word(1)], &[]),
        &["quarantined: the emitter is not an address of 20 bytes"],
    );
}

#[test]
fn ids_name_network_transaction_and_index() {
    let parsed = parse(record(3, &CONTRACT, &[TRANSFER, account(1), account(2), [0xff; 32]], &[]));
    let event = &parsed.events[0];
    assert_eq!(event.source_event_id.as_str(), format!("1:0x{}:3", "07".repeat(32)));
    assert_eq!(event.asset_refs[0].token_id_raw, U256::MAX.to_string());
    assert_eq!(event.asset_refs[0].collection_addr_normalized, address(0xc0));
}

#[test]
fn the_contract_of_adapters_holds() {
    let schema: serde_json::Value = serde_json::from_str(RAW_EVENT_SCHEMA).expect("JSON");
    let validator = jsonschema::validator_for(&schema).expect("a schema");
    let valid = |value: &serde_json::Value| validator.validate(value).map_err(|error| error.to_string());
    let batches: Vec<BatchCase> = [1, 10, 100]
        .into_iter()
        .map(|classes| {
            let ids: Vec<u64> = (0..classes).map(|id| id % 7).collect();
            let amounts: Vec<u64> = (1..=classes).collect();
            BatchCase { classes: ids.len(), block: block(vec![batch(&ids, &amounts)]) }
        })
        .collect();
    let uri = [word(32), word(0)];
    let mixed = block(vec![
        record(0, &CONTRACT, &[TRANSFER, word(0), account(2), word(1)], &[]),
        record(1, &CONTRACT, &[TRANSFER, account(2), word(0), word(1)], &[]),
        record(2, &CONTRACT, &[URI, word(1)], &uri),
        record(3, &CONTRACT, &[URI], &uri),
        record(4, &CONTRACT, &[TRANSFER, account(2), account(1)], &[word(1)]),
    ]);
    let seen = adapter_contract(&adapter(), &[mixed], &batches, &valid).expect("the contract holds");
    let kinds: Vec<_> = seen.kinds.into_iter().collect();
    assert_eq!(kinds, [("burn", 1), ("metadata", 1), ("mint", 1), ("transfer", 111)]);
    assert_eq!(seen.quarantined, 1);
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(
        topic0 in 0_usize..5,
        topics in proptest::collection::vec(any::<u8>(), 0..130),
        data in proptest::collection::vec(any::<u8>(), 0..400),
        emitter in prop_oneof![Just(CONTRACT.to_vec()), Just(CONFIGURED.to_vec()), proptest::collection::vec(any::<u8>(), 0..25)],
    ) {
        let mut all = OURS.get(topic0).map(|topic| topic.to_vec()).unwrap_or_default();
        all.extend(topics);
        let _ = parse(raw_record(0, &emitter, all, data));
    }

    #[test]
    fn a_batch_is_its_items_or_quarantined(
        kind in 0_usize..4,
        small in proptest::collection::vec(0_u64..400, 0..24),
    ) {
        // Small words make plausible offsets and lengths.
        let data: Vec<Word> = small.iter().map(|value| word(*value)).collect();
        let topics = [OURS[kind], account(9), account(1), account(2)];
        let parsed = parse(record(0, &CONTRACT, &topics, &data));
        prop_assert!(parsed.quarantined.len() <= 1);
        prop_assert!(parsed.quarantined.is_empty() || parsed.events.is_empty());
        for (sub_index, event) in (0..).zip(&parsed.events) {
            prop_assert_eq!(event.sub_index, sub_index);
            prop_assert!(event.event_kind != EventKind::Mint);
        }
    }

    #[test]
    fn well_formed_batches_come_back(items in proptest::collection::vec((any::<u64>(), any::<u64>()), 0..40)) {
        let (ids, amounts): (Vec<u64>, Vec<u64>) = items.into_iter().unzip();
        let parsed = parse(batch(&ids, &amounts));
        prop_assert!(parsed.quarantined.is_empty());
        let found: Vec<String> = parsed.events.iter().map(|event| event.asset_refs[0].token_id_raw.clone()).collect();
        let expected: Vec<String> = ids.iter().map(u64::to_string).collect();
        prop_assert_eq!(found, expected);
    }
}
