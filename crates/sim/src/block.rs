//! Sealed blocks: compact entries under a header whose hash covers everything in the block.

use alloy_primitives::{Address, B256, U256, keccak256};

use crate::bloom::{Bits, Bloom};
use crate::book::{Book, Kind, at, topic_of};
use crate::economy::{Entry, Plan};
use crate::hexed::word;
use crate::rng::mix;

/// One transaction of a block.
#[derive(Debug, Clone)]
pub(crate) struct SimTx {
    pub(crate) hash: [u8; 32],
    pub(crate) sender: u32,
    /// Contract the transaction calls.
    pub(crate) to: u32,
    pub(crate) nonce: u64,
    /// Its logs are `entries[first..first + count]` of the block.
    pub(crate) first: u32,
    pub(crate) count: u32,
}

/// One sealed block.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) number: u64,
    pub(crate) hash: [u8; 32],
    pub(crate) parent: [u8; 32],
    pub(crate) timestamp: u64,
    pub(crate) miner: u32,
    /// Which branch it was built on: makes equal content on two branches two blocks.
    pub(crate) branch: u64,
    pub(crate) bloom: Bloom,
    pub(crate) tx_root: [u8; 32],
    pub(crate) receipts_root: [u8; 32],
    pub(crate) txs: Vec<SimTx>,
    pub(crate) entries: Vec<Entry>,
}

/// A transaction on its way into a block.
pub(crate) struct Placed {
    pub(crate) hash: [u8; 32],
    pub(crate) nonce: u64,
    pub(crate) plan: Plan,
}

/// The parts of a header that are decided before sealing.
pub(crate) struct Site {
    pub(crate) number: u64,
    pub(crate) parent: [u8; 32],
    pub(crate) timestamp: u64,
    pub(crate) miner: u32,
    pub(crate) branch: u64,
}

impl Block {
    pub(crate) fn seal(book: &Book, site: Site, placed: Vec<Placed>) -> Self {
        let mut bloom = Bloom::default();
        let mut tx_fold = site.branch;
        let mut folded = site.number;
        let mut txs = Vec::with_capacity(placed.len());
        let mut entries = Vec::with_capacity(placed.iter().map(|one| one.plan.entries.len()).sum());
        for (position, one) in (0_u32..).zip(placed) {
            tx_fold = fold_hash(tx_fold, &one.hash);
            let first = count(entries.len());
            let to = one.plan.entries.first().map_or(0, |entry| entry.contract);
            for mut entry in one.plan.entries {
                entry.tx = position;
                add_to_bloom(&mut bloom, book, &entry);
                folded = fold_entry(folded, &entry);
                entries.push(entry);
            }
            let logs = count(entries.len()) - first;
            txs.push(SimTx {
                hash: one.hash,
                sender: one.plan.sender,
                to,
                nonce: one.nonce,
                first,
                count: logs,
            });
        }
        let tx_root = keccak256(tx_fold.to_be_bytes()).0;
        let receipts_root = keccak256(folded.to_be_bytes()).0;
        let mut header = Vec::with_capacity(512);
        header.extend_from_slice(&site.parent);
        header.extend_from_slice(&tx_root);
        header.extend_from_slice(&receipts_root);
        header.extend_from_slice(bloom.as_bytes());
        header.extend_from_slice(book.account(site.miner));
        for part in [site.number, site.timestamp, site.branch] {
            header.extend_from_slice(&part.to_be_bytes());
        }
        let Site { number, parent, timestamp, miner, branch } = site;
        let hash = keccak256(&header).0;
        Self { number, hash, parent, timestamp, miner, branch, bloom, tx_root, receipts_root, txs, entries }
    }

    /// The transactions as they can be placed again elsewhere.
    pub(crate) fn unpack(&self) -> Vec<Placed> {
        self.txs
            .iter()
            .map(|tx| Placed {
                hash: tx.hash,
                nonce: tx.nonce,
                plan: Plan { sender: tx.sender, entries: self.entries_of(tx).to_vec() },
            })
            .collect()
    }

    pub(crate) fn entries_of(&self, tx: &SimTx) -> &[Entry] {
        &self.entries[at(tx.first)..at(tx.first + tx.count)]
    }

    pub(crate) fn gas_used(&self) -> u64 {
        self.txs.iter().map(tx_gas).sum()
    }
}

pub(crate) fn tx_gas(tx: &SimTx) -> u64 {
    21_000 + 38_000 * u64::from(tx.count)
}

pub(crate) fn count(len: usize) -> u32 {
    u32::try_from(len).expect("a block holds fewer than 2^32 things")
}

pub(crate) fn add_to_bloom(bloom: &mut Bloom, book: &Book, entry: &Entry) {
    bloom.add(book.contract(entry.contract).bits);
    bloom.add(book.topic0_bits(entry.kind));
    match entry.kind {
        Kind::Erc721 | Kind::Erc20 => {
            bloom.add(book.account_bits(entry.from));
            bloom.add(book.account_bits(entry.to));
            if entry.kind == Kind::Erc721 {
                bloom.add(Bits::of(&word(entry.id)));
            }
        }
        Kind::Single | Kind::Batch => {
            for account in [entry.operator, entry.from, entry.to] {
                bloom.add(book.account_bits(account));
            }
        }
        Kind::Uri => bloom.add(Bits::of(&word(entry.id))),
    }
}

fn fold_hash(state: u64, hash: &[u8; 32]) -> u64 {
    hash.as_chunks::<8>().0.iter().fold(state, |state, part| mix(state ^ u64::from_be_bytes(*part)))
}

/// Folds everything a log says into one word. One keccak per block then covers all of them: the chain only
/// has to notice a difference, not to resist a forger.
fn fold_entry(state: u64, entry: &Entry) -> u64 {
    let mut state = mix(state ^ u64::try_from(entry.kind.at()).expect("five kinds"));
    for index in [entry.contract, entry.operator, entry.from, entry.to, entry.tx] {
        state = mix(state ^ u64::from(index));
    }
    let single = [(entry.id, entry.qty)];
    for (id, qty) in entry.items.as_deref().unwrap_or(&single) {
        for limb in id.as_limbs().iter().chain(qty.as_limbs()) {
            state = mix(state ^ limb);
        }
    }
    state
}

/// Topics of a log: how many, and which.
pub(crate) fn topics_of(book: &Book, entry: &Entry) -> ([[u8; 32]; 4], usize) {
    let account = |index: u32| topic_of(book.account(index));
    let first = book.topic0[entry.kind.at()];
    let none = [0; 32];
    match entry.kind {
        Kind::Erc721 => ([first, account(entry.from), account(entry.to), word(entry.id)], 4),
        Kind::Erc20 => ([first, account(entry.from), account(entry.to), none], 3),
        Kind::Single | Kind::Batch => {
            ([first, account(entry.operator), account(entry.from), account(entry.to)], 4)
        }
        Kind::Uri => ([first, word(entry.id), none, none], 2),
    }
}

/// Appends the ABI-encoded data of a log.
pub(crate) fn put_data_of(out: &mut Vec<u8>, book: &Book, entry: &Entry) {
    let length = |len: usize| word(U256::from(len));
    match entry.kind {
        Kind::Erc721 => {}
        Kind::Erc20 => out.extend_from_slice(&word(entry.qty)),
        Kind::Single => {
            out.extend_from_slice(&word(entry.id));
            out.extend_from_slice(&word(entry.qty));
        }
        Kind::Batch => {
            let items = entry.items.as_deref().unwrap_or_default();
            out.extend_from_slice(&length(64));
            out.extend_from_slice(&length(64 + 32 + 32 * items.len()));
            out.extend_from_slice(&length(items.len()));
            items.iter().for_each(|(id, _)| out.extend_from_slice(&word(*id)));
            out.extend_from_slice(&length(items.len()));
            items.iter().for_each(|(_, qty)| out.extend_from_slice(&word(*qty)));
        }
        Kind::Uri => put_text(out, &token_uri(book, entry.contract, entry.id)),
    }
}

/// Appends a string as the only ABI value.
pub(crate) fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&word(U256::from(32)));
    out.extend_from_slice(&word(U256::from(text.len())));
    out.extend_from_slice(text.as_bytes());
    out.resize(out.len().next_multiple_of(32), 0);
}

/// Where the metadata of a token is said to be. The spam collection points where nobody should go.
pub(crate) fn token_uri(book: &Book, contract: u32, id: U256) -> String {
    let contract = book.contract(contract);
    if contract.spam {
        return format!("http://169.254.169.254/latest/meta-data/{id}");
    }
    let name = &contract.name;
    format!(
        "data:application/json,{{\"name\":\"{name} #{id}\",\"description\":\"A simulated token.\",\"attributes\":[{{\"trait_type\":\"luck\",\"value\":{}}}]}}",
        id.byte(0)
    )
}

/// One canonical log as the chain knows it: the truth to compare with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimLog {
    /// Height of its block.
    pub block_number: u64,
    /// Hash of its block.
    pub block_hash: B256,
    /// Unix time of its block.
    pub block_time: u64,
    /// Hash of its transaction.
    pub tx_hash: B256,
    /// Position of its transaction in the block.
    pub tx_index: u32,
    /// Position of the log in the block.
    pub log_index: u32,
    /// Position of the log in its transaction.
    pub index_in_tx: u32,
    /// The contract.
    pub address: Address,
    /// Topics, first the event's signature.
    pub topics: Vec<B256>,
    /// ABI-encoded data.
    pub data: Vec<u8>,
    /// What it means.
    pub event: SimEvent,
}

/// The meaning of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SimEvent {
    /// ERC-721 `Transfer`.
    Erc721 {
        /// Sender; zero for a mint.
        from: Address,
        /// Receiver; zero for a burn.
        to: Address,
        /// The token.
        token_id: U256,
    },
    /// ERC-1155 `TransferSingle` (one item) or `TransferBatch`.
    Erc1155 {
        /// Who acted.
        operator: Address,
        /// Sender; zero for a mint.
        from: Address,
        /// Receiver; zero for a burn.
        to: Address,
        /// Ids and amounts, ids may repeat.
        items: Vec<(U256, U256)>,
        /// Whether the log is a `TransferBatch`.
        batch: bool,
    },
    /// ERC-1155 `URI`.
    Uri {
        /// The token class.
        token_id: U256,
        /// The new address of its metadata.
        uri: String,
    },
    /// ERC-20 `Transfer`: noise for an NFT indexer.
    Erc20,
}

/// One canonical block without its logs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimBlock {
    /// Height.
    pub number: u64,
    /// Hash.
    pub hash: B256,
    /// Hash of the block below.
    pub parent_hash: B256,
    /// Unix time.
    pub timestamp: u64,
    /// Bloom over addresses and topics of all its logs.
    pub logs_bloom: Bloom,
    /// Transaction hashes in order.
    pub transactions: Vec<B256>,
    /// Number of logs.
    pub log_count: u32,
}

impl SimBlock {
    pub(crate) fn of(block: &Block) -> Self {
        Self {
            number: block.number,
            hash: block.hash.into(),
            parent_hash: block.parent.into(),
            timestamp: block.timestamp,
            logs_bloom: block.bloom.clone(),
            transactions: block.txs.iter().map(|tx| tx.hash.into()).collect(),
            log_count: count(block.entries.len()),
        }
    }
}

/// The logs of a block in their public form.
pub(crate) fn logs_of(book: &Book, block: &Block) -> Vec<SimLog> {
    let address = |index: u32| Address::from(*book.account(index));
    (0_u32..)
        .zip(&block.entries)
        .map(|(log_index, entry)| {
            let (topics, length) = topics_of(book, entry);
            let mut data = Vec::new();
            put_data_of(&mut data, book, entry);
            let tx = &block.txs[at(entry.tx)];
            let (operator, from, to) = (address(entry.operator), address(entry.from), address(entry.to));
            let event = match entry.kind {
                Kind::Erc721 => SimEvent::Erc721 { from, to, token_id: entry.id },
                Kind::Single => {
                    SimEvent::Erc1155 { operator, from, to, items: vec![(entry.id, entry.qty)], batch: false }
                }
                Kind::Batch => SimEvent::Erc1155 {
                    operator,
                    from,
                    to,
                    items: entry.items.as_deref().unwrap_or_default().to_vec(),
                    batch: true,
                },
                Kind::Uri => {
                    SimEvent::Uri { token_id: entry.id, uri: token_uri(book, entry.contract, entry.id) }
                }
                Kind::Erc20 => SimEvent::Erc20,
            };
            SimLog {
                block_number: block.number,
                block_hash: block.hash.into(),
                block_time: block.timestamp,
                tx_hash: tx.hash.into(),
                tx_index: entry.tx,
                log_index,
                index_in_tx: log_index - tx.first,
                address: book.contract(entry.contract).address.into(),
                topics: topics[..length].iter().map(|topic| B256::from(*topic)).collect(),
                data,
                event,
            }
        })
        .collect()
}
