//! Records to canonical events. Pure: the same bytes give the same events and ids, anywhere, always. A record
//! is an event, quarantined with its reason, or not ours; nothing is dropped and nothing panics.
//!
//! Decisions:
//! - Only the zero address mints and burns. `0x…dead` is an account like any other.
//! - ERC-1155 from zero to zero with amount 0 announces a class without a first owner (EIP-1155 recommends it):
//!   an event of kind `metadata` that moves nothing. From zero to zero otherwise moves something between
//!   nobody and nobody: quarantined.
//! - `Transfer` with three topics is ERC-20. With one topic and three words it cannot be told from ERC-20 by
//!   itself, so it counts only for contracts we know or that are configured by name.
//! - A batch of nothing gives no event.

use std::collections::HashSet;

use alloy_primitives::U256;
use tidemark_model::address;
use tidemark_model::chain::{
    AssetRef, EventKind, OwnershipDelta, ParsedBlock, Quarantined, RawBlock, RawEvent, RawRecord, Standard,
};
use tidemark_model::finality::FinalityStatus;
use tidemark_model::ids::{NetworkId, SourceEventId};
use tidemark_model::quantity::SignedQty;

use super::topics::{LEGACY, TRANSFER, TRANSFER_BATCH, TRANSFER_SINGLE, URI};

/// What a log is to us, by its first topic, topic count and emitter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// It claims to be one of our events.
    Ours,
    /// It shares a topic with ours and is not: ERC-20, or too ambiguous to tell.
    Foreign,
    /// Another event.
    Other,
}

/// Contracts whose `Transfer` without indexed arguments is an NFT's.
#[derive(Debug, Clone, Default)]
pub struct Known {
    unindexed: HashSet<[u8; 20]>,
}

impl Known {
    /// The table's contracts of this chain and those configured by name.
    pub fn new(chain_id: u64, configured: &[[u8; 20]]) -> Self {
        let table = LEGACY.iter().filter(|legacy| legacy.chain_id == chain_id).map(|legacy| legacy.address);
        Self { unindexed: table.chain(configured.iter().copied()).collect() }
    }
    /// What a log is to us.
    pub fn claim(&self, emitter: &[u8], topic0: Option<&[u8]>, topics: usize) -> Claim {
        let Some(topic0) = topic0 else { return Claim::Other };
        if topic0 == TRANSFER {
            let known =
                || <[u8; 20]>::try_from(emitter).is_ok_and(|emitter| self.unindexed.contains(&emitter));
            return match topics {
                4 => Claim::Ours,
                1 | 2 if known() => Claim::Ours,
                _ => Claim::Foreign,
            };
        }
        if topic0 == TRANSFER_SINGLE || topic0 == TRANSFER_BATCH || topic0 == URI {
            return Claim::Ours;
        }
        Claim::Other
    }
}

/// Parses a block.
pub fn parse(network: NetworkId, known: &Known, block: &RawBlock) -> ParsedBlock {
    let mut parsed = ParsedBlock::default();
    for record in &block.records {
        let topics = record.topics.len() / 32;
        if known.claim(&record.emitter, record.topics.get(..32), topics) != Claim::Ours {
            continue;
        }
        let tx_hash = <[u8; 32]>::try_from(record.tx.as_bytes()).unwrap_or_default();
        let source = SourceEventId::evm(network, &tx_hash, record.index);
        match read(record) {
            Ok(reading) => emit(network, block, record, &source, reading, &mut parsed.events),
            Err(reason) => parsed.quarantined.push(Quarantined {
                source_event_id: source,
                tx_hash: record.tx,
                event_index: record.index,
                reason: reason.to_owned(),
            }),
        }
    }
    parsed
}

/// What a record says, before it becomes events.
struct Reading {
    standard: Standard,
    contract: [u8; 20],
    kind: EventKind,
    from: [u8; 20],
    to: [u8; 20],
    /// Token id and amount, in the log's order; ids may repeat.
    items: Vec<(U256, U256)>,
}

const ZERO: [u8; 20] = [0; 20];
type Word = [u8; 32];

fn read(record: &RawRecord) -> Result<Reading, &'static str> {
    let contract =
        <[u8; 20]>::try_from(&record.emitter[..]).map_err(|_| "the emitter is not an address of 20 bytes")?;
    if !record.topics.len().is_multiple_of(32) {
        return Err("topics are not whole words of 32 bytes");
    }
    let topics: Vec<&Word> = record.topics.chunks_exact(32).filter_map(|word| word.try_into().ok()).collect();
    let data = Words(&record.data);
    match topics.split_first() {
        Some((topic0, rest)) if *topic0 == &TRANSFER => transfer(contract, rest, data),
        Some((topic0, rest)) if *topic0 == &TRANSFER_SINGLE => single(contract, rest, data),
        Some((topic0, rest)) if *topic0 == &TRANSFER_BATCH => batch(contract, rest, data),
        Some((_, rest)) => uri(contract, rest, data),
        None => Err("a log without topics"),
    }
}

fn transfer(contract: [u8; 20], indexed: &[&Word], data: Words<'_>) -> Result<Reading, &'static str> {
    let (from, to, id) = match indexed {
        [from, to, id] if data.0.is_empty() => (account(from)?, account(to)?, number(id)),
        [_, _, _] => return Err("an ERC-721 Transfer with indexed arguments carries no data"),
        [] if data.0.len() == 96 => (account(data.word(0)?)?, account(data.word(1)?)?, number(data.word(2)?)),
        [] => return Err("a Transfer without indexed arguments has three words of data"),
        _ => return Err("a Transfer that indexes other arguments than any known standard"),
    };
    let kind = moved(from, to).ok_or("a Transfer from nobody to nobody")?;
    let items = vec![(id, U256::from(1))];
    Ok(Reading { standard: Standard::Erc721, contract, kind, from, to, items })
}

fn single(contract: [u8; 20], indexed: &[&Word], data: Words<'_>) -> Result<Reading, &'static str> {
    let (from, to, rest) = parties(indexed, data)?;
    let items = vec![(number(rest.word(0)?), number(rest.word(1)?))];
    movement(contract, from, to, items)
}

fn batch(contract: [u8; 20], indexed: &[&Word], data: Words<'_>) -> Result<Reading, &'static str> {
    let (from, to, rest) = parties(indexed, data)?;
    // Offsets count from the start of the data, also when the parties are in front of them.
    let (ids, amounts) = (data.array(rest.word(0)?)?, data.array(rest.word(1)?)?);
    if ids.len() != amounts.len() {
        return Err("ids and amounts of a TransferBatch differ in length");
    }
    let items = ids.iter().zip(amounts).map(|(id, amount)| (number(id), number(amount))).collect();
    movement(contract, from, to, items)
}

/// From, to, and the data behind them. The operator is checked to be an address and not used.
fn parties<'a>(indexed: &[&Word], data: Words<'a>) -> Result<([u8; 20], [u8; 20], Words<'a>), &'static str> {
    match indexed {
        [operator, from, to] => {
            account(operator)?;
            Ok((account(from)?, account(to)?, data))
        }
        [] => {
            account(data.word(0)?)?;
            Ok((account(data.word(1)?)?, account(data.word(2)?)?, data.skip(3)?))
        }
        _ => Err("an ERC-1155 transfer that indexes other arguments than the standard"),
    }
}

fn movement(
    contract: [u8; 20],
    from: [u8; 20],
    to: [u8; 20],
    items: Vec<(U256, U256)>,
) -> Result<Reading, &'static str> {
    let kind = match moved(from, to) {
        Some(kind) => kind,
        None if items.iter().all(|(_, amount)| amount.is_zero()) => EventKind::Metadata,
        None => return Err("an ERC-1155 transfer of some amount from nobody to nobody"),
    };
    Ok(Reading { standard: Standard::Erc1155, contract, kind, from, to, items })
}

fn uri(contract: [u8; 20], indexed: &[&Word], data: Words<'_>) -> Result<Reading, &'static str> {
    let [id] = indexed else { return Err("a URI event that does not index just its id") };
    data.text(data.word(0)?)?;
    Ok(Reading {
        standard: Standard::Erc1155,
        contract,
        kind: EventKind::Metadata,
        from: ZERO,
        to: ZERO,
        items: vec![(number(id), U256::ZERO)],
    })
}

fn moved(from: [u8; 20], to: [u8; 20]) -> Option<EventKind> {
    match (from == ZERO, to == ZERO) {
        (false, false) => Some(EventKind::Transfer),
        (true, false) => Some(EventKind::Mint),
        (false, true) => Some(EventKind::Burn),
        (true, true) => None,
    }
}

fn account(word: &Word) -> Result<[u8; 20], &'static str> {
    match word {
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, address @ ..] => Ok(*address),
        _ => Err("an address with bytes beyond its 20"),
    }
}

fn number(word: &Word) -> U256 {
    U256::from_be_bytes(*word)
}

/// ABI data, read by words of 32 bytes; every access is checked.
#[derive(Clone, Copy)]
struct Words<'a>(&'a [u8]);

impl<'a> Words<'a> {
    fn word(self, at: usize) -> Result<&'a Word, &'static str> {
        let start = at.checked_mul(32).ok_or("an offset beyond the data")?;
        self.0.get(start..).and_then(|rest| rest.first_chunk()).ok_or("the data is too short")
    }
    fn skip(self, words: usize) -> Result<Self, &'static str> {
        self.0.get(words * 32..).map(Self).ok_or("the data is too short")
    }
    /// The part that starts at `offset`, with its length word.
    fn tail(self, offset: &Word) -> Result<(usize, &'a [u8]), &'static str> {
        let start = usize::try_from(number(offset)).map_err(|_| "an offset beyond the data")?;
        let rest = self.0.get(start..).ok_or("an offset beyond the data")?;
        let (length, body) = rest.split_first_chunk::<32>().ok_or("an offset beyond the data")?;
        let length = usize::try_from(number(length)).map_err(|_| "a length beyond the data")?;
        Ok((length, body))
    }
    fn array(self, offset: &Word) -> Result<&'a [Word], &'static str> {
        let (length, body) = self.tail(offset)?;
        let (words, _) = body.as_chunks::<32>();
        words.get(..length).ok_or("an array longer than the data")
    }
    fn text(self, offset: &Word) -> Result<&'a [u8], &'static str> {
        let (length, body) = self.tail(offset)?;
        body.get(..length).ok_or("a text longer than the data")
    }
}

fn emit(
    network: NetworkId,
    block: &RawBlock,
    record: &RawRecord,
    source: &SourceEventId,
    reading: Reading,
    events: &mut Vec<RawEvent>,
) {
    let contract = address::evm_bytes(&reading.contract);
    let moves = reading.kind != EventKind::Metadata;
    let from = (moves && reading.from != ZERO).then(|| address::evm_bytes(&reading.from));
    let to = (moves && reading.to != ZERO).then(|| address::evm_bytes(&reading.to));
    events.reserve(reading.items.len());
    for (sub_index, (id, amount)) in (0..).zip(reading.items) {
        let leg = |account: &Option<String>, qty_delta| {
            account
                .clone()
                .map(|account_addr_normalized| OwnershipDelta { account_addr_normalized, qty_delta })
        };
        let mut ownership_deltas = Vec::with_capacity(2);
        ownership_deltas.extend(leg(&from, SignedQty::loss(amount)));
        ownership_deltas.extend(leg(&to, SignedQty::gain(amount)));
        events.push(RawEvent {
            source_event_id: source.clone(),
            sub_index,
            event_kind: reading.kind,
            asset_refs: vec![AssetRef {
                network_id: network,
                collection_addr_normalized: contract.clone(),
                token_id_raw: id.to_string(),
                standard: reading.standard,
            }],
            ownership_deltas,
            block_number: block.height,
            block_hash: block.hash,
            tx_hash: record.tx,
            event_index: record.index,
            event_time: block.time,
            finality_status: FinalityStatus::Pending,
            blob_ref: None,
        });
    }
}
