//! Identities. Each id is a type with one door: its canonical form is made in the constructor and
//! nowhere else, so the same bytes give the same id on any machine, in any order.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use uuid::Uuid;

/// The one namespace of all uuidv5 ids (S0 §6). Changing it changes every id ever handed out: never do.
/// It is itself `uuidv5(NAMESPACE_DNS, "ledger.tidemark")`; a test recomputes it.
pub const NAMESPACE: Uuid = Uuid::from_u128(0x6ae4_3500_5283_5140_a0be_1a58_4ea3_6edc);

/// A configured network. Positive; for EVM networks it is by habit the chain id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NetworkId(pub i32);

impl fmt::Display for NetworkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The position of a block in its chain (block number, slot, masterchain seqno).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Height(pub u64);

impl Height {
    /// Postgres has no unsigned type; heights above `i64::MAX` do not exist on any chain.
    pub fn as_i64(self) -> i64 {
        i64::try_from(self.0).expect("a block height fits in 63 bits")
    }
    /// Reads a height back from the database; a negative value is a broken promise of our own.
    pub fn from_i64(value: i64) -> Self {
        Self(u64::try_from(value).expect("a stored height is not negative"))
    }
    /// The next height.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
    /// `self + blocks`, stopping at the largest height.
    pub fn plus(self, blocks: u64) -> Self {
        Self(self.0.saturating_add(blocks))
    }
    /// `self - blocks`, stopping at zero.
    pub fn minus(self, blocks: u64) -> Self {
        Self(self.0.saturating_sub(blocks))
    }
}

impl fmt::Display for Height {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Heights `from..to`: `from` is in, `to` is out. Never empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HeightRange {
    from: Height,
    to: Height,
}

impl HeightRange {
    /// `None` when the range would be empty.
    pub fn new(from: Height, to: Height) -> Option<Self> {
        (from < to).then_some(Self { from, to })
    }
    /// The range that holds just `height`.
    pub fn one(height: Height) -> Self {
        Self { from: height, to: height.next() }
    }
    /// `first..=last`; `None` when empty.
    pub fn inclusive(first: Height, last: Height) -> Option<Self> {
        Self::new(first, last.next())
    }
    /// First height inside.
    pub fn from(self) -> Height {
        self.from
    }
    /// First height after the end.
    pub fn to(self) -> Height {
        self.to
    }
    /// Last height inside.
    pub fn last(self) -> Height {
        self.to.minus(1)
    }
    /// How many heights; never zero.
    pub fn blocks(self) -> u64 {
        self.to.0 - self.from.0
    }
    /// Is `height` inside?
    pub fn contains(self, height: Height) -> bool {
        self.from <= height && height < self.to
    }
    /// The first `blocks` heights and the rest, if any. `blocks` of zero counts as one.
    pub fn split_first(self, blocks: u64) -> (Self, Option<Self>) {
        let middle = self.from.plus(blocks.max(1));
        if middle >= self.to {
            return (self, None);
        }
        (Self { from: self.from, to: middle }, Self::new(middle, self.to))
    }
}

impl fmt::Display for HeightRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.from, self.to)
    }
}

/// The chain's own hash of a block: 32 bytes on every family we read.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct BlockHash(pub [u8; 32]);

impl BlockHash {
    /// From stored or received bytes; `None` unless there are exactly 32.
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{}", hex::encode(self.0))
    }
}
impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
impl Serialize for BlockHash {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
impl<'de> Deserialize<'de> for BlockHash {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digits = text.strip_prefix("0x").unwrap_or(&text);
        let bytes = hex::decode(digits).map_err(serde::de::Error::custom)?;
        Self::from_slice(&bytes).ok_or_else(|| serde::de::Error::custom("a block hash has 32 bytes"))
    }
}

/// The chain's own id of a transaction: 32 bytes (EVM, TON, Flow, Lisk) or 64 (Solana signatures).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TxId {
    len: u8,
    bytes: [u8; 64],
}

impl TxId {
    /// `None` when there are more than 64 bytes.
    pub fn from_slice(source: &[u8]) -> Option<Self> {
        let mut bytes = [0; 64];
        bytes.get_mut(..source.len())?.copy_from_slice(source);
        Some(Self { len: u8::try_from(source.len()).ok()?, bytes })
    }
    /// The chain's bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}
impl From<[u8; 32]> for TxId {
    fn from(source: [u8; 32]) -> Self {
        Self::from_slice(&source).expect("32 bytes fit in 64")
    }
}
impl PartialOrd for TxId {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for TxId {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.as_bytes().cmp(other.as_bytes())
    }
}
impl fmt::Display for TxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{}", hex::encode(self.as_bytes()))
    }
}
impl fmt::Debug for TxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
impl Serialize for TxId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
impl<'de> Deserialize<'de> for TxId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes =
            hex::decode(text.strip_prefix("0x").unwrap_or(&text)).map_err(serde::de::Error::custom)?;
        Self::from_slice(&bytes)
            .ok_or_else(|| serde::de::Error::custom("a transaction id has at most 64 bytes"))
    }
}

/// The chain's own name for an event (S0 §2.1). Built in one place, compared as is, never parsed back.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SourceEventId(String);

impl SourceEventId {
    /// `network_id:tx_hash:log_index`. The log index counts within the block (design.md §10).
    pub fn evm(network: NetworkId, tx_hash: &[u8; 32], log_index: u32) -> Self {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = String::with_capacity(90);
        let mut number = itoa_buffer();
        text.push_str(number.format(i64::from(network.0)));
        text.push_str(":0x");
        for byte in tx_hash {
            text.push(char::from(DIGITS[usize::from(byte >> 4)]));
            text.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
        text.push(':');
        text.push_str(number.format(i64::from(log_index)));
        Self(text)
    }
    /// `network_id:signature:instruction_index:inner_index`; a top-level instruction has inner index `-`.
    pub fn solana(network: NetworkId, signature: &str, instruction: u32, inner: Option<u32>) -> Self {
        let inner = inner.map_or_else(|| "-".to_owned(), |index| index.to_string());
        Self(format!("{network}:{signature}:{instruction}:{inner}"))
    }
    /// `network_id:lt:hash` of the transaction that ran on the item and its inbound message.
    pub fn ton(network: NetworkId, lt: u64, message_hash: &[u8; 32]) -> Self {
        Self(format!("{network}:{lt}:{}", hex::encode(message_hash)))
    }
    /// `network_id:marketplace_id:external_order_id`.
    pub fn offchain(network: NetworkId, marketplace: &str, order: &str) -> Self {
        Self(format!("{network}:{marketplace}:{order}"))
    }
    /// The synthetic event that carries a balance older than our start block (ADR 0008).
    pub fn opening(network: NetworkId, asset: AssetId, account: AccountId) -> Self {
        Self(format!("{network}:opening:{}:{}", asset.0, account.0))
    }
    /// Reads one back from the database, where it was written through one of the doors above.
    pub fn from_stored(text: String) -> Self {
        Self(text)
    }
    /// The text itself.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A decimal formatter without allocation; enough for i64.
struct Decimal([u8; 20]);
fn itoa_buffer() -> Decimal {
    Decimal([0; 20])
}
impl Decimal {
    fn format(&mut self, value: i64) -> &str {
        let mut at = self.0.len();
        let mut rest = value.unsigned_abs();
        loop {
            at -= 1;
            self.0[at] = b'0' + u8::try_from(rest % 10).expect("a digit");
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        if value < 0 {
            at -= 1;
            self.0[at] = b'-';
        }
        std::str::from_utf8(&self.0[at..]).expect("digits are ASCII")
    }
}

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub Uuid);
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

uuid_id!(
    /// `uuidv5(NAMESPACE, network_id:address_normalized)`.
    AccountId
);
uuid_id!(
    /// `uuidv5(NAMESPACE, contract:network_id:address_normalized)`.
    ContractId
);
uuid_id!(
    /// `uuidv5(NAMESPACE, network_id:contract_address_normalized)`.
    CollectionId
);
uuid_id!(
    /// `uuidv5(NAMESPACE, network_id:collection_id:token_id_raw:standard_id)`.
    AssetId
);
uuid_id!(
    /// `uuidv5(NAMESPACE, source_event_id:sub_index)`.
    EventId
);

impl AccountId {
    /// The account with this canonical address.
    pub fn of(network: NetworkId, address: &str) -> Self {
        Self(v5(&[&network.to_string(), ":", address]))
    }
}
impl ContractId {
    /// The contract with this canonical address.
    pub fn of(network: NetworkId, address: &str) -> Self {
        Self(v5(&["contract:", &network.to_string(), ":", address]))
    }
}
impl CollectionId {
    /// The collection of the contract with this canonical address: S0 §6's formula as it stands. An
    /// account and a collection at one address therefore share their uuid; they live in different tables.
    pub fn of(network: NetworkId, contract_address: &str) -> Self {
        Self(v5(&[&network.to_string(), ":", contract_address]))
    }
}
impl AssetId {
    /// The asset (an ERC-721 token, or an ERC-1155 class).
    pub fn of(network: NetworkId, collection: CollectionId, token_id_raw: &str, standard: &str) -> Self {
        let mut buffer = Uuid::encode_buffer();
        let collection = &*collection.0.hyphenated().encode_lower(&mut buffer);
        Self(v5(&[&network.to_string(), ":", collection, ":", token_id_raw, ":", standard]))
    }
}
impl EventId {
    /// The canonical event at `sub_index` of a source event.
    pub fn of(source: &SourceEventId, sub_index: u32) -> Self {
        let mut number = itoa_buffer();
        Self(v5(&[source.as_str(), ":", number.format(i64::from(sub_index))]))
    }
}

fn v5(parts: &[&str]) -> Uuid {
    let mut name = [0_u8; 512];
    let mut len = 0;
    for part in parts {
        let end = len + part.len();
        match name.get_mut(len..end) {
            Some(slot) => slot.copy_from_slice(part.as_bytes()),
            // Off-chain order ids may be long: take the slow road.
            None => return Uuid::new_v5(&NAMESPACE, parts.concat().as_bytes()),
        }
        len = end;
    }
    Uuid::new_v5(&NAMESPACE, &name[..len])
}

/// `sha256(source_event_id ":" sub_index)`, S0 §2.2's normalized_event_uid.
pub fn event_uid(source: &SourceEventId, sub_index: u32) -> [u8; 32] {
    let mut number = itoa_buffer();
    let mut hasher = Sha256::new();
    hasher.update(source.as_str().as_bytes());
    hasher.update(b":");
    hasher.update(number.format(i64::from(sub_index)).as_bytes());
    hasher.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_namespace_is_what_its_comment_says() {
        assert_eq!(NAMESPACE, Uuid::new_v5(&Uuid::NAMESPACE_DNS, b"ledger.tidemark"));
    }

    #[test]
    fn evm_source_ids_have_the_seeds_form() {
        let id = SourceEventId::evm(NetworkId(1), &[0xab; 32], 7);
        assert_eq!(id.as_str(), format!("1:0x{}:7", "ab".repeat(32)));
    }

    #[test]
    fn ids_follow_the_formulas_of_the_specification() {
        let network = NetworkId(1);
        let collection = CollectionId::of(network, "0xabc");
        let asset = AssetId::of(network, collection, "42", "erc721");
        let name = format!("1:{}:42:erc721", collection.0);
        assert_eq!(asset.0, Uuid::new_v5(&NAMESPACE, name.as_bytes()));
        let source = SourceEventId::evm(network, &[1; 32], 0);
        let event = EventId::of(&source, 12);
        assert_eq!(event.0, Uuid::new_v5(&NAMESPACE, format!("{}:12", source.as_str()).as_bytes()));
        let uid: [u8; 32] = Sha256::digest(format!("{}:12", source.as_str())).into();
        assert_eq!(event_uid(&source, 12), uid);
    }

    #[test]
    fn long_names_take_the_slow_road_to_the_same_formula() {
        let order = "x".repeat(2000);
        let source = SourceEventId::offchain(NetworkId(9), "opensea", &order);
        let expected = Uuid::new_v5(&NAMESPACE, format!("9:opensea:{order}:0").as_bytes());
        assert_eq!(EventId::of(&source, 0).0, expected);
    }

    #[test]
    fn ranges_split_without_hole_or_overlap() {
        let range = HeightRange::new(Height(10), Height(25)).expect("not empty");
        let (first, rest) = range.split_first(10);
        assert_eq!((first.from(), first.to()), (Height(10), Height(20)));
        assert_eq!(rest.map(|r| (r.from(), r.to())), Some((Height(20), Height(25))));
        assert_eq!(range.split_first(0).0.blocks(), 1);
        assert_eq!(range.split_first(99).1, None);
    }
}
