//! The checks an answer must pass, as pure functions. Each returns what is wrong in words; the caller decides
//! whom to ask next.

use std::collections::HashSet;

use tidemark_model::ids::HeightRange;

use super::bloom::{Key, Keys};
use super::parse::{Claim, Known};
use super::topics::OURS;
use super::wire::{Header, Log};

/// What the logs of an answer amount to after the checks.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Sorted {
    /// Logs taken back by a reorg, dropped.
    pub removed: u64,
    /// Logs that share a topic with ours.
    pub foreign: u64,
}

/// Order, range, doubles, `removed` and the filter itself; drops what was taken back.
pub fn logs(
    range: HeightRange,
    logs: &mut Vec<Log>,
    filter: &Filter,
    known: &Known,
) -> Result<Sorted, String> {
    let before = logs.len();
    logs.retain(|log| log.removed != Some(true));
    let mut sorted =
        Sorted { removed: u64::try_from(before - logs.len()).unwrap_or(u64::MAX), ..Sorted::default() };
    let mut previous: Option<&Log> = None;
    for log in logs.iter() {
        let number = log.block_number.0;
        if number < range.from().0 || number > range.last().0 {
            return Err(format!("a log of block {number} came for {range}"));
        }
        if u32::try_from(log.log_index.0).is_err() || u32::try_from(log.transaction_index.0).is_err() {
            return Err(format!("a log of block {number} has an index beyond 32 bits"));
        }
        if let Some(previous) = previous {
            if previous.block_number.0 > number {
                return Err(format!("logs of block {number} came after those of a later block"));
            }
            if previous.block_number.0 == number {
                if previous.log_index.0 >= log.log_index.0 {
                    return Err(format!(
                        "log index {} of block {number} came after {}",
                        log.log_index.0, previous.log_index.0
                    ));
                }
                if previous.transaction_index.0 > log.transaction_index.0 {
                    return Err(format!("transaction indexes of block {number} decrease"));
                }
                if previous.block_hash != log.block_hash {
                    return Err(format!("logs of block {number} name two block hashes"));
                }
            }
        }
        if !filter.matches(log) {
            return Err(format!("log {} of block {number} was not asked for", log.log_index.0));
        }
        let topics = log.topics.as_slice();
        if known.claim(&log.address.0, topics.first().map(|topic| &topic[..]), topics.len()) == Claim::Foreign
        {
            sorted.foreign += 1;
        }
        previous = Some(log);
    }
    Ok(sorted)
}

/// Every header is the child of the one before, where their heights touch.
pub fn links(headers: &[Header]) -> Result<(), String> {
    for pair in headers.windows(2) {
        let [parent, child] = pair else { continue };
        if child.number.0 == parent.number.0 + 1 && child.parent_hash != parent.hash {
            return Err(format!("block {} is not the child of block {}", child.number.0, parent.number.0));
        }
    }
    Ok(())
}

/// What we ask nodes for.
#[derive(Debug, Clone)]
pub struct Filter {
    topics: Vec<([u8; 32], Key)>,
    contracts: Vec<([u8; 20], Key)>,
    addresses: HashSet<[u8; 20]>,
}

impl Filter {
    /// Our topics, of these contracts or of all.
    pub fn new(contracts: &[[u8; 20]]) -> Self {
        Self {
            topics: OURS.iter().map(|topic| (*topic, Key::of(topic))).collect(),
            contracts: contracts.iter().map(|address| (*address, Key::of(address))).collect(),
            addresses: contracts.iter().copied().collect(),
        }
    }
    /// The contracts; empty means all.
    pub fn contracts(&self) -> impl Iterator<Item = &[u8; 20]> {
        self.contracts.iter().map(|(address, _)| address)
    }
    /// How many contracts.
    pub fn width(&self) -> usize {
        self.contracts.len()
    }
    /// Does it let this log through?
    pub fn matches(&self, log: &Log) -> bool {
        let topic = log.topics.as_slice().first();
        topic.is_some_and(|topic| self.topics.iter().any(|(ours, _)| ours == topic))
            && (self.contracts.is_empty() || self.addresses.contains(&log.address.0))
    }
    /// Does the bloom promise a log that is not in `logs` (all of one block)? Promises may be false alarms.
    pub fn promised(&self, bloom: &[u8; 256], logs: &[Log]) -> bool {
        let came = |topic: &[u8; 32]| logs.iter().any(|log| log.topics.as_slice().first() == Some(topic));
        let topic_missing = || self.topics.iter().any(|(topic, key)| key.is_in(bloom) && !came(topic));
        if self.contracts.is_empty() {
            return topic_missing();
        }
        // With a filter by contract, a topic in the bloom may belong to anybody: it takes one of ours, too.
        let spoke = |address: &[u8; 20]| logs.iter().any(|log| log.address.0 == *address);
        let mut present = self.contracts.iter().filter(|(_, key)| key.is_in(bloom)).peekable();
        if present.peek().is_none() || !self.topics.iter().any(|(_, key)| key.is_in(bloom)) {
            return false;
        }
        present.any(|(address, _)| !spoke(address)) || topic_missing()
    }
}

/// Logs against their headers. Both are ordered by height. Gives the headers whose bloom promises more than
/// came; an error when a log contradicts its header.
pub fn blooms<'a>(
    headers: &'a [Header],
    logs: &[Log],
    filter: &Filter,
    check_bloom: bool,
) -> Result<Vec<&'a Header>, String> {
    let mut keys = Keys::default();
    let mut suspects = Vec::new();
    let mut rest = logs;
    for header in headers {
        let number = header.number.0;
        let count = rest.iter().take_while(|log| log.block_number.0 == number).count();
        let (of_block, others) = rest.split_at(count);
        rest = others;
        if of_block.iter().any(|log| log.block_hash != header.hash) {
            return Err(format!("logs of block {number} name another block hash than its header"));
        }
        if !check_bloom {
            continue;
        }
        // A header that promises nothing at all is no reason to believe that there is nothing.
        let Some(bloom) = header.logs_bloom.as_deref() else {
            suspects.push(header);
            continue;
        };
        if let Some(log) = of_block.iter().find(|log| !keys.admits(bloom, log)) {
            return Err(format!("log {} of block {number} is not in the header's bloom", log.log_index.0));
        }
        if filter.promised(bloom, of_block) {
            suspects.push(header);
        }
    }
    match rest.first() {
        Some(log) => Err(format!("no header came for block {} with logs", log.block_number.0)),
        None => Ok(suspects),
    }
}
