//! All that the system knows of a chain. Adapters implement [`ChainAdapter`]; everything past the adapter
//! sees only these types. `if family == evm` outside an adapter is a bug.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use alloy_primitives::U256;
use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::finality::FinalityStatus;
use crate::ids::{BlockHash, Height, HeightRange, NetworkId, SourceEventId, TxId};
use crate::quantity::SignedQty;

/// A family of chains that share address forms and record shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Ethereum and everything that speaks its JSON-RPC.
    Evm,
    /// Solana.
    Solana,
    /// TON.
    Ton,
    /// Flow.
    Flow,
    /// Lisk (SDK 6).
    Lisk,
    /// Marketplaces.
    Offchain,
}

impl Family {
    /// The label used in configuration and in Postgres.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Evm => "evm",
            Self::Solana => "solana",
            Self::Ton => "ton",
            Self::Flow => "flow",
            Self::Lisk => "lisk",
            Self::Offchain => "offchain",
        }
    }
}

/// A configured network, as every worker sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Its id.
    pub id: NetworkId,
    /// Its short name, unique.
    pub slug: String,
    /// Its family.
    pub family: Family,
    /// The first height we read.
    pub start_block: Height,
    /// Blocks above an event before it counts as confirmed.
    pub confirmations: u64,
    /// Deepest reorg we repair by ourselves; past it the network halts.
    pub reorg_depth_max: u64,
}

/// A block by position and name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockRef {
    /// Position.
    pub height: Height,
    /// Name.
    pub hash: BlockHash,
}

impl fmt::Display for BlockRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.height, self.hash)
    }
}

/// A block with its parent: enough to walk a chain backwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockLink {
    /// The block.
    pub block: BlockRef,
    /// Its parent's hash.
    pub parent: BlockHash,
}

/// Tip and finality as the network defines them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// The newest block.
    pub latest: BlockRef,
    /// The newest safe height, where the chain knows one.
    pub safe: Option<Height>,
    /// Everything at or below is final; `None` while nothing is. Never goes back within one adapter.
    pub finalized: Option<BlockRef>,
}

/// Blocks as read, with what proves that they are complete.
#[derive(Debug, Clone)]
pub struct RawBatch {
    /// What was read: the asked range or a shorter one from its start. No holes inside.
    pub covered: HeightRange,
    /// Blocks of the covered range in order of height. A height without a block in this list is proven
    /// to hold no record of ours; `BlockCoverage` in the evidence says whether such heights exist.
    pub blocks: Vec<RawBlock>,
    /// Why this may be believed.
    pub evidence: RangeEvidence,
}

/// The proof an accepted range rests on; stored in `raw.range_evidence`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RangeEvidence {
    /// Label of the endpoint that answered (never its URL).
    pub provider: String,
    /// The height that endpoint had reached when it answered.
    pub head_seen: Height,
    /// Records received and kept.
    pub records: u64,
    /// Records received that are not ours (ERC-20 transfers share a topic with ERC-721).
    pub foreign: u64,
    /// Requests this range took.
    pub requests: u64,
    /// Names of the checks that were done and passed.
    pub checks: Vec<String>,
    /// Are all headers of the range in the batch, or only those of blocks with records?
    pub coverage: BlockCoverage,
}

/// Which blocks of a range are in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockCoverage {
    /// Every block.
    All,
    /// Only blocks with records.
    WithRecords,
}

/// One block with everything we keep of it.
#[derive(Debug, Clone, PartialEq)]
pub struct RawBlock {
    /// Position.
    pub height: Height,
    /// Name.
    pub hash: BlockHash,
    /// Name of its parent.
    pub parent: BlockHash,
    /// The chain's time of the block.
    pub time: OffsetDateTime,
    /// Transactions in the block, where known.
    pub tx_count: Option<u32>,
    /// Transactions in full; empty unless the network's mode is `full`.
    pub transactions: Vec<RawTransaction>,
    /// Records (logs) in order of their index.
    pub records: Vec<RawRecord>,
    /// What no column holds.
    pub payload: Option<serde_json::Value>,
}

impl RawBlock {
    /// Position and name.
    pub fn block_ref(&self) -> BlockRef {
        BlockRef { height: self.height, hash: self.hash }
    }
    /// Position, name and parent.
    pub fn link(&self) -> BlockLink {
        BlockLink { block: self.block_ref(), parent: self.parent }
    }
}

/// A transaction in full (`mode = "full"`).
#[derive(Debug, Clone, PartialEq)]
pub struct RawTransaction {
    /// The chain's id.
    pub id: TxId,
    /// Position in the block.
    pub index: u32,
    /// Sender, in the chain's bytes.
    pub sender: Bytes,
    /// Receiver; `None` for contract creation.
    pub receiver: Option<Bytes>,
    /// Native value moved.
    pub value: U256,
    /// Did it succeed? `None` where the receipt is not known.
    pub succeeded: Option<bool>,
    /// Everything else, as received.
    pub payload: serde_json::Value,
}

/// One record of a block: a log, an instruction, a message, a Cadence event. One row of `raw.events`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawRecord {
    /// The transaction it belongs to.
    pub tx: TxId,
    /// That transaction's position in the block.
    pub tx_index: u32,
    /// The record's own index: within the block on EVM.
    pub index: u32,
    /// Who emitted it, in the chain's bytes.
    pub emitter: Bytes,
    /// EVM topics, 32 bytes each, one after another; empty on other families.
    pub topics: Bytes,
    /// EVM data, or the family's encoded body.
    pub data: Bytes,
    /// What no column holds.
    pub payload: Option<serde_json::Value>,
}

/// What kind of canonical event it is (S0 §5.2, and `opening` for balances older than our start, and
/// `metadata` for events such as ERC-1155 `URI` that move nothing).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// Moved between two accounts.
    Transfer,
    /// Created.
    Mint,
    /// Destroyed.
    Burn,
    /// Offered for sale.
    Listing,
    /// Sold.
    Sale,
    /// Bid for.
    Offer,
    /// An order withdrawn.
    Cancel,
    /// Held since before our start block.
    Opening,
    /// Metadata changed.
    Metadata,
}

impl EventKind {
    /// The label used in Postgres and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Transfer => "transfer",
            Self::Mint => "mint",
            Self::Burn => "burn",
            Self::Listing => "listing",
            Self::Sale => "sale",
            Self::Offer => "offer",
            Self::Cancel => "cancel",
            Self::Opening => "opening",
            Self::Metadata => "metadata",
        }
    }
}
impl FromStr for EventKind {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        [
            Self::Transfer,
            Self::Mint,
            Self::Burn,
            Self::Listing,
            Self::Sale,
            Self::Offer,
            Self::Cancel,
            Self::Opening,
            Self::Metadata,
        ]
        .into_iter()
        .find(|kind| kind.as_str() == text)
        .ok_or_else(|| format!("{text:?} is not an event kind"))
    }
}

/// Token standards; the label is S0's standard_id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Standard {
    /// One token, one owner.
    Erc721,
    /// A class with many units.
    Erc1155,
}

impl Standard {
    /// The label used in ids, Postgres and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Erc721 => "erc721",
            Self::Erc1155 => "erc1155",
        }
    }
    /// S0 §11: is an asset of this standard a class of units?
    pub fn is_fungible_class(self) -> bool {
        self == Self::Erc1155
    }
}
impl FromStr for Standard {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "erc721" => Ok(Self::Erc721),
            "erc1155" => Ok(Self::Erc1155),
            other => Err(format!("{other:?} is not a token standard")),
        }
    }
}

/// Which asset an event is about (S0 §7.2).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AssetRef {
    /// Network.
    pub network_id: NetworkId,
    /// Canonical contract address.
    pub collection_addr_normalized: String,
    /// Token id exactly as the chain has it (decimal string for uint256).
    pub token_id_raw: String,
    /// Standard, part of the asset's id.
    pub standard: Standard,
}

/// One signed leg of a movement (S0 §7.2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnershipDelta {
    /// Canonical address.
    pub account_addr_normalized: String,
    /// Positive: received. Negative: sent.
    pub qty_delta: SignedQty,
}

/// A canonical event as an adapter hands it over (S0 §7.2), with names and meanings exactly as there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RawEvent {
    /// Chain-native identity.
    pub source_event_id: SourceEventId,
    /// Position within a batch; a decimal string in JSON.
    #[serde(with = "sub_index_text")]
    pub sub_index: u32,
    /// Classified by the adapter; not part of identity.
    pub event_kind: EventKind,
    /// Exactly one entry for asset events.
    pub asset_refs: Vec<AssetRef>,
    /// Signed legs; empty for events that move nothing.
    pub ownership_deltas: Vec<OwnershipDelta>,
    /// Block position.
    pub block_number: Height,
    /// Block name.
    pub block_hash: BlockHash,
    /// Transaction.
    pub tx_hash: TxId,
    /// The record's index in its block.
    pub event_index: u32,
    /// Block time.
    #[serde(with = "time::serde::rfc3339")]
    pub event_time: OffsetDateTime,
    /// As far as the adapter knows.
    pub finality_status: FinalityStatus,
    /// Where the whole payload lies, if it was offloaded.
    pub blob_ref: Option<String>,
}

mod sub_index_text {
    use serde::{Deserialize, Deserializer, Serializer};
    pub(super) fn serialize<S: Serializer>(value: &u32, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }
    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// One movement: who lost, who gained, how much. Mint has no `from`, burn has no `to`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Movement<'a> {
    /// Loses `qty`.
    pub from: Option<&'a str>,
    /// Gains `qty`.
    pub to: Option<&'a str>,
    /// How much; never negative.
    pub qty: U256,
}

impl RawEvent {
    /// The signed legs as one movement; `None` for events that move nothing.
    pub fn movement(&self) -> Option<Movement<'_>> {
        let leg = |negative: bool| {
            self.ownership_deltas.iter().find(|delta| delta.qty_delta.is_negative() == negative)
        };
        let (lost, gained) = match self.ownership_deltas.as_slice() {
            [] => return None,
            // Two legs of zero: the order of the legs is from, to.
            [first, second] if first.qty_delta.is_zero() && second.qty_delta.is_zero() => {
                (Some(first), Some(second))
            }
            // One leg of zero: a mint or burn of nothing; the kind tells which.
            [only] if only.qty_delta.is_zero() && self.event_kind == EventKind::Burn => (Some(only), None),
            _ => (leg(true), leg(false)),
        };
        let qty = lost.or(gained).map_or(U256::ZERO, |delta| delta.qty_delta.magnitude());
        fn address(delta: &OwnershipDelta) -> &str {
            &delta.account_addr_normalized
        }
        Some(Movement { from: lost.map(address), to: gained.map(address), qty })
    }
}

/// A record that claims to be one of ours but breaks its standard. Kept in raw.*, named with its reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantined {
    /// Chain-native identity.
    pub source_event_id: SourceEventId,
    /// Transaction.
    pub tx_hash: TxId,
    /// The record's index in its block.
    pub event_index: u32,
    /// Why, in words.
    pub reason: String,
}

/// What parsing a block gives. Nothing is dropped: a record is an event, quarantined, or not ours.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParsedBlock {
    /// Canonical events, ordered by (event_index, sub_index).
    pub events: Vec<RawEvent>,
    /// Records that break their standard.
    pub quarantined: Vec<Quarantined>,
}

/// A question for a balance older than our start block.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BalanceAsk {
    /// The asset.
    pub asset: AssetRef,
    /// Canonical address.
    pub account: String,
    /// The height after whose block the balance is asked.
    pub at: Height,
}

/// What a caller does about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Ask again, later or elsewhere; the adapter has already tried what it could.
    Retry,
    /// Ask for less.
    Narrow,
    /// Stop this network and call an operator; the others go on.
    Halt,
}

/// Why an adapter could not answer. Providers are named by label, never by URL.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    /// No endpoint gave a usable answer in time.
    #[error("no endpoint of {network} answered {what}: {reason}")]
    Unavailable {
        /// Network slug.
        network: String,
        /// What was asked.
        what: String,
        /// The last reason, redacted.
        reason: String,
    },
    /// One block or record is too large for every endpoint.
    #[error("{what} is larger than every endpoint of {network} allows")]
    TooLarge {
        /// Network slug.
        network: String,
        /// What was asked.
        what: String,
    },
    /// The endpoints' answers contradict each other or themselves; nothing was believed.
    #[error("answers of {network} for {what} do not hold together: {reason}")]
    Inconsistent {
        /// Network slug.
        network: String,
        /// What was asked.
        what: String,
        /// Which check failed.
        reason: String,
    },
    /// The block is no longer (or not yet) on the chain the endpoints agree on.
    #[error("block {block} of {network} is not on the chain any more")]
    Gone {
        /// Network slug.
        network: String,
        /// The block asked for.
        block: BlockRef,
    },
    /// An endpoint serves another chain.
    #[error("{provider} serves chain {found}, {network} is chain {expected}")]
    WrongChain {
        /// Network slug.
        network: String,
        /// Endpoint label.
        provider: String,
        /// What the endpoint says.
        found: String,
        /// What the configuration says.
        expected: String,
    },
    /// The nodes do not keep this history.
    #[error("no endpoint of {network} keeps {what}; use an archive node or a later start_block")]
    Pruned {
        /// Network slug.
        network: String,
        /// What was asked.
        what: String,
    },
}

impl ChainError {
    /// What to do about it.
    pub fn verdict(&self) -> Verdict {
        match self {
            // No `_` arm: a new variant must choose.
            Self::Unavailable { .. }
            | Self::Inconsistent { .. }
            | Self::Gone { .. }
            | Self::Pruned { .. } => Verdict::Retry,
            Self::TooLarge { .. } => Verdict::Narrow,
            Self::WrongChain { .. } => Verdict::Halt,
        }
    }
}

/// How much care a fetch takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FetchMode {
    /// Below the finalized height: by number, wide ranges.
    History,
    /// Above it: by block hash, every header, linked.
    Tip,
}

/// All that the system knows of a chain. Adapters never see a database.
#[async_trait]
pub trait ChainAdapter: Send + Sync + 'static {
    /// The network it reads.
    fn network(&self) -> &Network;
    /// Tip and finalized block as this network defines them. Finality never goes back.
    async fn head(&self) -> Result<Head, ChainError>;
    /// Waits until there may be a head newer than `known`, at most `wait`; then asks for the head.
    /// Adapters with a push channel return early; a plain one sleeps.
    async fn next_head(&self, known: &Head, wait: Duration) -> Result<Head, ChainError>;
    /// Reads `range`, or a shorter range from its start: `covered` says which. No holes inside. Every
    /// answer was checked; `evidence` says how.
    async fn fetch(&self, range: HeightRange, mode: FetchMode) -> Result<RawBatch, ChainError>;
    /// The canonical block at `height` with its parent, for the search of a common ancestor. `None` when
    /// the chain is not that long.
    async fn link_at(&self, height: Height) -> Result<Option<BlockLink>, ChainError>;
    /// Pure. The same bytes give the same events and ids, anywhere, always. Never panics, drops nothing.
    fn parse(&self, block: &RawBlock) -> ParsedBlock;
    /// Balances at past heights, in the order asked; `None` where the chain cannot say.
    async fn balances(&self, asks: &[BalanceAsk]) -> Result<Vec<Option<U256>>, ChainError>;
    /// Requests sent so far, for the summary of a sync.
    fn requests(&self) -> u64;
    /// Which chain the endpoints serve, checked now where that is due: the same text for the same chain,
    /// always. `None` where a family has no such thing.
    async fn identity(&self) -> Result<Option<String>, ChainError> {
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: EventKind, legs: &[(&str, SignedQty)]) -> RawEvent {
        RawEvent {
            source_event_id: SourceEventId::evm(NetworkId(1), &[0; 32], 0),
            sub_index: 0,
            event_kind: kind,
            asset_refs: vec![],
            ownership_deltas: legs
                .iter()
                .map(|(account, qty)| OwnershipDelta {
                    account_addr_normalized: (*account).to_owned(),
                    qty_delta: *qty,
                })
                .collect(),
            block_number: Height(1),
            block_hash: BlockHash([1; 32]),
            tx_hash: TxId::from([0; 32]),
            event_index: 0,
            event_time: OffsetDateTime::UNIX_EPOCH,
            finality_status: FinalityStatus::Pending,
            blob_ref: None,
        }
    }

    #[track_caller]
    fn check(kind: EventKind, legs: &[(&str, SignedQty)], from: Option<&str>, to: Option<&str>, qty: u64) {
        let event = event(kind, legs);
        assert_eq!(event.movement(), Some(Movement { from, to, qty: U256::from(qty) }));
    }

    #[test]
    fn legs_become_one_movement() {
        let (gain, loss) = (SignedQty::gain(U256::from(3)), SignedQty::loss(U256::from(3)));
        check(EventKind::Transfer, &[("a", loss), ("b", gain)], Some("a"), Some("b"), 3);
        check(EventKind::Transfer, &[("a", loss), ("a", gain)], Some("a"), Some("a"), 3);
        check(EventKind::Mint, &[("b", gain)], None, Some("b"), 3);
        check(EventKind::Burn, &[("a", loss)], Some("a"), None, 3);
        let zero = SignedQty::ZERO;
        check(EventKind::Transfer, &[("a", zero), ("b", zero)], Some("a"), Some("b"), 0);
        check(EventKind::Mint, &[("b", zero)], None, Some("b"), 0);
        check(EventKind::Burn, &[("a", zero)], Some("a"), None, 0);
        assert_eq!(event(EventKind::Listing, &[]).movement(), None);
    }

    #[test]
    fn sub_index_is_text_in_json() {
        let mut event = event(EventKind::Listing, &[]);
        event.sub_index = 12;
        let value = serde_json::to_value(&event).expect("serializes");
        assert_eq!(value["sub_index"], "12");
        assert_eq!(value["ownership_deltas"], serde_json::json!([]));
        assert_eq!(serde_json::from_value::<RawEvent>(value).expect("reads back"), event);
    }
}
