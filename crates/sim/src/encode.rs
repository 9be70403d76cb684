//! JSON written by hand into response buffers: headers, logs, transactions and receipts. Values of
//! `serde_json` would cost more than the reader under test.

use crate::block::{Block, SimTx, put_data_of, topics_of, tx_gas};
use crate::book::{Book, Kind, at, topic_of};
use crate::economy::Entry;
use crate::faults::LogNumbering;
use crate::hexed::{put_bytes, put_data, put_number, word};

const EMPTY_UNCLES: &str = "0x1dcc4de8dec75d7aab85b567b6ccd41ad312451b948a7413f0a142fd40d49347";

/// What a faulty node writes instead of the right values of a log.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct LogTwist {
    pub(crate) index: Option<u32>,
    pub(crate) removed: bool,
    pub(crate) block_hash: Option<[u8; 32]>,
}

/// What a faulty node writes instead of the right values of a header.
#[derive(Debug, Clone, Default)]
pub(crate) struct HeaderTwist {
    pub(crate) hash: Option<[u8; 32]>,
    pub(crate) bloom: Option<[u8; 256]>,
}

fn key(out: &mut Vec<u8>, name: &str) {
    out.push(b'"');
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\":");
}

fn number(out: &mut Vec<u8>, name: &str, value: u64) {
    key(out, name);
    put_number(out, value);
    out.push(b',');
}

fn data(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    key(out, name);
    put_data(out, value);
    out.push(b',');
}

/// Appends one log of `block`.
pub(crate) fn put_log(
    out: &mut Vec<u8>,
    book: &Book,
    block: &Block,
    (log_index, entry): (u32, &Entry),
    twist: LogTwist,
) {
    out.extend_from_slice(b"{\"address\":\"0x");
    put_bytes(out, &book.contract(entry.contract).address);
    out.extend_from_slice(b"\",\"topics\":[");
    let (topics, length) = topics_of(book, entry);
    for (position, topic) in topics[..length].iter().enumerate() {
        if position > 0 {
            out.push(b',');
        }
        put_data(out, topic);
    }
    out.extend_from_slice(b"],\"data\":\"0x");
    match entry.kind {
        Kind::Erc721 => {}
        Kind::Erc20 => put_bytes(out, &word(entry.qty)),
        Kind::Single => {
            put_bytes(out, &word(entry.id));
            put_bytes(out, &word(entry.qty));
        }
        Kind::Batch | Kind::Uri => {
            let mut bytes = Vec::new();
            put_data_of(&mut bytes, book, entry);
            put_bytes(out, &bytes);
        }
    }
    out.extend_from_slice(b"\",\"blockNumber\":");
    put_number(out, block.number);
    out.extend_from_slice(b",\"blockHash\":");
    put_data(out, twist.block_hash.as_ref().unwrap_or(&block.hash));
    out.extend_from_slice(b",\"blockTimestamp\":");
    put_number(out, block.timestamp);
    out.extend_from_slice(b",\"transactionHash\":");
    put_data(out, &block.txs[at(entry.tx)].hash);
    out.extend_from_slice(b",\"transactionIndex\":");
    put_number(out, u64::from(entry.tx));
    out.extend_from_slice(b",\"logIndex\":");
    put_number(out, u64::from(twist.index.unwrap_or(log_index)));
    out.extend_from_slice(if twist.removed { b",\"removed\":true}" } else { b",\"removed\":false}" });
}

/// How transactions stand in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transactions {
    /// Not at all: a head notification.
    Absent,
    /// As hashes.
    Hashes,
    /// As objects.
    Full,
}

/// Appends a block.
pub(crate) fn put_block(
    out: &mut Vec<u8>,
    book: &Book,
    block: &Block,
    transactions: Transactions,
    twist: &HeaderTwist,
) {
    let hash = twist.hash.unwrap_or(block.hash);
    out.push(b'{');
    number(out, "number", block.number);
    data(out, "hash", &hash);
    data(out, "parentHash", &block.parent);
    out.extend_from_slice(b"\"sha3Uncles\":\"");
    out.extend_from_slice(EMPTY_UNCLES.as_bytes());
    out.extend_from_slice(b"\",");
    match &twist.bloom {
        Some(bloom) => data(out, "logsBloom", bloom),
        None => data(out, "logsBloom", block.bloom.as_bytes()),
    }
    data(out, "transactionsRoot", &block.tx_root);
    // State is not hashed; the root only has to be different where the history is.
    data(out, "stateRoot", &alloy_primitives::keccak256(block.hash).0);
    data(out, "receiptsRoot", &block.receipts_root);
    data(out, "miner", book.account(block.miner));
    number(out, "difficulty", 0);
    number(out, "gasLimit", 36_000_000);
    number(out, "gasUsed", block.gas_used());
    number(out, "timestamp", block.timestamp);
    data(out, "extraData", format!("tidemark-sim/{}", block.branch).as_bytes());
    data(out, "mixHash", &block.tx_root);
    data(out, "nonce", &[0; 8]);
    number(out, "baseFeePerGas", 1_000_000_000 + block.number % 97);
    if transactions == Transactions::Absent {
        out.pop();
        out.push(b'}');
        return;
    }
    number(out, "totalDifficulty", 0);
    number(out, "size", 620 + 180 * u64::from(crate::block::count(block.txs.len())));
    out.extend_from_slice(b"\"uncles\":[],\"withdrawals\":[],\"transactions\":[");
    for (position, tx) in (0_u32..).zip(&block.txs) {
        if position > 0 {
            out.push(b',');
        }
        match transactions {
            Transactions::Full => put_tx(out, book, block, position, hash),
            _ => put_data(out, &tx.hash),
        }
    }
    out.extend_from_slice(b"]}");
}

/// Appends one transaction object.
pub(crate) fn put_tx(out: &mut Vec<u8>, book: &Book, block: &Block, position: u32, block_hash: [u8; 32]) {
    let tx = &block.txs[at(position)];
    out.push(b'{');
    data(out, "blockHash", &block_hash);
    number(out, "blockNumber", block.number);
    data(out, "from", book.account(tx.sender));
    data(out, "to", &book.contract(tx.to).address);
    number(out, "gas", tx_gas(tx) + 10_000);
    number(out, "gasPrice", 1_500_000_000);
    number(out, "maxFeePerGas", 3_000_000_000);
    number(out, "maxPriorityFeePerGas", 500_000_000);
    data(out, "hash", &tx.hash);
    data(out, "input", &call_data(book, block, tx));
    number(out, "nonce", tx.nonce);
    number(out, "transactionIndex", u64::from(position));
    number(out, "value", 0);
    number(out, "type", 2);
    number(out, "chainId", book.chain_id);
    out.extend_from_slice(b"\"accessList\":[],\"v\":\"0x1\",\"yParity\":\"0x1\",");
    data(out, "r", &tx.hash);
    data(out, "s", &tx.hash);
    out.pop();
    out.push(b'}');
}

fn call_data(book: &Book, block: &Block, tx: &SimTx) -> Vec<u8> {
    let mut input = tx.hash[..4].to_vec();
    if let Some(entry) = block.entries_of(tx).first() {
        input.extend_from_slice(&topic_of(book.account(entry.to)));
        input.extend_from_slice(&word(entry.id));
    }
    input
}

/// Appends one receipt with its logs.
pub(crate) fn put_receipt(
    out: &mut Vec<u8>,
    book: &Book,
    block: &Block,
    position: u32,
    numbering: LogNumbering,
) {
    let tx = &block.txs[at(position)];
    let mut bloom = crate::bloom::Bloom::default();
    let spent: u64 = block.txs[..=at(position)].iter().map(tx_gas).sum();
    out.push(b'{');
    data(out, "blockHash", &block.hash);
    number(out, "blockNumber", block.number);
    out.extend_from_slice(b"\"contractAddress\":null,");
    number(out, "cumulativeGasUsed", spent);
    number(out, "effectiveGasPrice", 1_500_000_000);
    data(out, "from", book.account(tx.sender));
    number(out, "gasUsed", tx_gas(tx));
    out.extend_from_slice(b"\"logs\":[");
    for (offset, entry) in (0_u32..).zip(block.entries_of(tx)) {
        if offset > 0 {
            out.push(b',');
        }
        crate::block::add_to_bloom(&mut bloom, book, entry);
        let first = if numbering == LogNumbering::PerTransaction { 0 } else { tx.first };
        put_log(out, book, block, (first + offset, entry), LogTwist::default());
    }
    out.extend_from_slice(b"],");
    data(out, "logsBloom", bloom.as_bytes());
    number(out, "status", 1);
    data(out, "to", &book.contract(tx.to).address);
    data(out, "transactionHash", &tx.hash);
    number(out, "transactionIndex", u64::from(position));
    out.extend_from_slice(b"\"type\":\"0x2\"}");
}

/// A JSON string with quotes.
pub(crate) fn put_string(out: &mut Vec<u8>, value: &str) {
    serde_json::to_writer(&mut *out, value).expect("writing text to memory cannot fail");
}
