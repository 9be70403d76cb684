//! The filter object of `eth_getLogs`, made cheap to ask: addresses become contract flags, the first topic
//! becomes allowed kinds, and only filters on later topics look at topic bytes.

use serde::Deserialize;

use crate::block::topics_of;
use crate::book::{Book, Kind, at};
use crate::economy::Entry;
use crate::hexed;

/// `null`, one value or any of several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Choice {
    One(String),
    Any(Vec<String>),
}

/// The filter as it came.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RawFilter {
    pub(crate) from_block: Option<String>,
    pub(crate) to_block: Option<String>,
    pub(crate) block_hash: Option<String>,
    address: Option<Choice>,
    topics: Option<Vec<Option<Choice>>>,
}

/// The filter as it is asked.
#[derive(Debug)]
pub(crate) struct Filter {
    /// Allowed contracts; `None` allows all.
    contracts: Option<Vec<bool>>,
    kinds: [bool; 5],
    /// Allowed values of the topics after the first.
    later: [Option<Vec<[u8; 32]>>; 3],
    /// A filter with n positions matches only logs with at least n topics.
    topics_min: usize,
}

/// What an empty list of addresses means, which differs between clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EmptyAddresses {
    /// No filter.
    #[default]
    All,
    /// Nothing matches.
    Nothing,
}

impl Filter {
    pub(crate) fn parse(raw: &RawFilter, book: &Book, empty: EmptyAddresses) -> Result<Self, String> {
        let contracts = match &raw.address {
            None => None,
            Some(Choice::Any(list)) if list.is_empty() && empty == EmptyAddresses::All => None,
            Some(choice) => {
                let mut allowed = vec![false; book.contracts.len()];
                for address in choice.values() {
                    let bytes = hexed::parse_fixed::<20>(address)
                        .ok_or_else(|| format!("invalid argument 0: invalid address {address:.64}"))?;
                    if let Some(contract) = book.find_contract(&bytes) {
                        allowed[at(contract)] = true;
                    }
                }
                Some(allowed)
            }
        };
        let positions = raw.topics.as_deref().unwrap_or_default();
        if positions.len() > 4 {
            return Err("exceed max topics".to_owned());
        }
        let mut kinds = [true; 5];
        let mut later = [None, None, None];
        for (position, choice) in positions.iter().enumerate() {
            let Some(choice) = choice else { continue };
            let values = choice
                .values()
                .iter()
                .map(|topic| {
                    hexed::parse_fixed::<32>(topic)
                        .ok_or_else(|| format!("invalid argument 0: invalid topic {topic:.80}"))
                })
                .collect::<Result<Vec<_>, _>>()?;
            if values.is_empty() {
                continue; // An empty list at a position is a wildcard.
            }
            if position == 0 {
                kinds = Kind::ALL.map(|kind| values.contains(&book.topic0[kind.at()]));
            } else {
                later[position - 1] = Some(values);
            }
        }
        Ok(Self { contracts, kinds, later, topics_min: positions.len() })
    }

    pub(crate) fn matches(&self, book: &Book, entry: &Entry) -> bool {
        if !self.kinds[entry.kind.at()] {
            return false;
        }
        if self.contracts.as_ref().is_some_and(|allowed| !allowed[at(entry.contract)]) {
            return false;
        }
        if self.topics_min <= 1 {
            return true;
        }
        let (topics, length) = topics_of(book, entry);
        length >= self.topics_min
            && self
                .later
                .iter()
                .zip(&topics[1..])
                .all(|(allowed, topic)| allowed.as_ref().is_none_or(|values| values.contains(topic)))
    }
}

impl Choice {
    fn values(&self) -> &[String] {
        match self {
            Self::One(value) => std::slice::from_ref(value),
            Self::Any(values) => values,
        }
    }
}
