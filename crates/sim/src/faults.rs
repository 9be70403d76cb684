//! Everything a provider can do wrong, as settings of one server. Several servers of one chain with
//! different profiles are several providers of different quality.
//!
//! Chances are per mille of calls (or of HTTP requests, for transport faults) and are drawn from a seeded
//! generator, so that a run with the same requests in the same order fails in the same way.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Deserialize;

use crate::filter::EmptyAddresses;
use crate::limits::LimitStyle;
use crate::rng::mix;

/// The faults of one server. The default is a perfect node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct FaultProfile {
    /// Seed of the draws below.
    pub seed: u64,

    /// Every request is answered with HTTP 503.
    pub down: bool,
    /// HTTP requests answered per second; more get a 429.
    pub requests_per_sec: Option<u32>,
    /// Per mille of requests answered with HTTP 429.
    pub http_429: u16,
    /// `Retry-After` sent with a 429.
    pub retry_after_secs: Option<u64>,
    /// Per mille of calls answered with HTTP 200 and a JSON-RPC error about the rate.
    pub rpc_throttled: u16,
    /// Per mille of requests answered with HTTP 500, 502, 503 or 504.
    pub http_5xx: u16,
    /// Per mille of requests that get no answer for `hang_ms`, then a closed connection's 504.
    pub hang: u16,
    /// How long a hanging request hangs.
    pub hang_ms: u64,
    /// Per mille of requests answered after `slow_ms`.
    pub slow: u16,
    /// Delay of slow answers; also applied to every answer when `slow` is 1000.
    pub slow_ms: u64,
    /// Per mille of answers cut in the middle, with a matching content length.
    pub truncated_json: u16,
    /// Per mille of answers followed by something that is not JSON.
    pub trailing_garbage: u16,
    /// Per mille of answers that are an HTML page with HTTP 200.
    pub html_200: u16,
    /// Per mille of answers with HTTP 200 and no body.
    pub empty_body: u16,

    /// Per mille of answers whose connection ends in the middle of the body.
    pub cut_connection: u16,
    /// Per mille of answers sent in small pieces with `trickle_ms` between them.
    pub trickle: u16,
    /// Pause between the pieces; the body is sent in at most 50.
    pub trickle_ms: u64,
    /// Per mille of answers that are `huge_body_bytes` of blanks before the JSON. With a client that accepts
    /// gzip this is a small answer that grows enormously.
    pub huge_body: u16,
    /// Size of a huge answer.
    pub huge_body_bytes: u64,

    /// Per mille of batch answers in which one item carries another id.
    pub wrong_id_in_batch: u16,
    /// Per mille of batch answers in another order.
    pub batch_reordered: u16,
    /// Per mille of batch answers without one of the items.
    pub batch_missing_item: u16,
    /// Largest batch that is answered at all.
    pub batch_max: Option<usize>,

    /// The node is this many blocks behind; logs above its head are silently absent.
    pub lagging_blocks: u64,
    /// Per mille of calls that a balancer gives to a replica `balancer_lag_blocks` behind.
    pub balancer_lag: u16,
    /// How far behind that replica is.
    pub balancer_lag_blocks: u64,
    /// The node stays on the branch that was left by the last reorg.
    pub on_left_branch: bool,
    /// Per mille of `eth_blockNumber` answers that are `balancer_lag_blocks` (at least one) too low.
    pub head_backwards: u16,
    /// What the node says about the `finalized` tag.
    pub finalized_tag: FinalizedTag,
    /// Per mille of `finalized` answers that lie five blocks lower than they should.
    pub finalized_backwards: u16,
    /// How heights above the head are refused.
    pub beyond_head: BeyondHead,

    /// Per mille of `eth_getLogs` calls answered with `[]` although there are logs.
    pub empty_logs: u16,
    /// Per mille of `eth_getLogs` calls that find no logs in the node's newest block yet.
    pub late_tip_logs: u16,
    /// Per mille of `eth_getLogs` calls that leave out all logs of one block.
    pub hidden_block_logs: u16,
    /// Per mille of `eth_getLogs` calls that leave out one log.
    pub hidden_single_log: u16,
    /// How log indexes are counted.
    pub log_numbering: LogNumbering,
    /// Per mille of `eth_getLogs` calls in which two logs of a block share an index.
    pub duplicate_log_index: u16,
    /// Per mille of `eth_getLogs` calls in which two indexes of a block are swapped.
    pub decreasing_log_index: u16,
    /// Per mille of `eth_getLogs` calls with an additional log marked `removed`.
    pub removed_logs: u16,
    /// Per mille of `eth_getLogs` calls with a log whose block hash is of another block.
    pub other_block_log: u16,
    /// Per mille of receipt calls answered with null.
    pub missing_receipts: u16,
    /// Per mille of `eth_getBlockReceipts` calls answered with `[]` for a block with transactions.
    pub empty_receipts: u16,
    /// Per mille of block calls answered with null.
    pub null_block: u16,
    /// Per mille of header answers above finality that come from another branch.
    pub unlinked_header: u16,
    /// What stands in `logsBloom`.
    pub bloom: BloomFault,
    /// What an empty list of addresses means here.
    pub empty_addresses: EmptyAddresses,

    /// The chain id the node reports instead of the right one.
    pub wrong_chain_id: Option<u64>,
    /// Calls served before `wrong_chain_id` begins to hold.
    pub wrong_chain_after: u64,

    /// Logs, receipts and state below this height are gone; headers stay.
    pub pruned_below: u64,
    /// How that is said.
    pub pruned_style: PrunedStyle,

    /// Most blocks in one `eth_getLogs`.
    pub max_block_range: Option<u64>,
    /// Most logs in one answer.
    pub max_results: Option<u64>,
    /// Most bytes in one `eth_getLogs` answer.
    pub max_response_bytes: Option<u64>,
    /// In whose words limits are refused.
    pub limit_style: LimitStyle,
    /// Methods this provider does not offer.
    pub unsupported_methods: Vec<String>,

    /// WebSocket subscribers hear nothing.
    pub ws_silent: bool,
    /// WebSocket connections are closed after this many heads.
    pub ws_close_after: Option<u64>,
}

impl FaultProfile {
    /// Everything at once, and still a reader that checks and retries gets through with this one server.
    ///
    /// Left out is what one provider alone can do without anybody noticing, or for ever: a single hidden
    /// log, a wrong chain, pruned history, being down, a wrong branch. Give those to one of several servers.
    pub fn chaos(seed: u64) -> Self {
        Self {
            seed,
            http_429: 30,
            retry_after_secs: Some(0),
            rpc_throttled: 20,
            http_5xx: 30,
            hang: 4,
            hang_ms: 1_500,
            slow: 30,
            slow_ms: 60,
            truncated_json: 15,
            trailing_garbage: 8,
            html_200: 10,
            empty_body: 10,
            wrong_id_in_batch: 20,
            batch_reordered: 400,
            batch_missing_item: 30,
            balancer_lag: 60,
            balancer_lag_blocks: 3,
            head_backwards: 40,
            finalized_backwards: 30,
            cut_connection: 8,
            trickle: 5,
            trickle_ms: 2,
            late_tip_logs: 40,
            empty_logs: 25,
            hidden_block_logs: 25,
            duplicate_log_index: 10,
            decreasing_log_index: 10,
            removed_logs: 20,
            other_block_log: 15,
            missing_receipts: 25,
            empty_receipts: 10,
            null_block: 20,
            unlinked_header: 10,
            max_block_range: Some(500),
            max_results: Some(2_000),
            max_response_bytes: Some(2_000_000),
            limit_style: LimitStyle::Rotating,
            ..Self::default()
        }
    }
}

/// What a node says about the `finalized` tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FinalizedTag {
    /// The chain's finalized block.
    #[default]
    Right,
    /// An error, as on chains and clients without the tag.
    Unsupported,
    /// The newest block, which is wrong.
    Latest,
    /// This many blocks above the right one, as far as the head allows.
    Ahead(u64),
    /// This many blocks below the right one.
    Behind(u64),
}

/// How heights above the head are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BeyondHead {
    /// Logs are cut at the head and blocks are null, without a word.
    #[default]
    Silent,
    /// `block range extends beyond current head block`.
    RangeError,
    /// `One of the blocks specified in filter … cannot be found`, as some clients say.
    CannotBeFound,
    /// `invalid block range`.
    InvalidRange,
}

impl BeyondHead {
    pub(crate) fn error(self) -> Option<RpcError> {
        match self {
            Self::Silent => None,
            Self::RangeError => Some(RpcError::new(-32000, "block range extends beyond current head block")),
            Self::CannotBeFound => Some(RpcError::new(
                -32000,
                "One of the blocks specified in filter (fromBlock, toBlock or blockHash) cannot be found.",
            )),
            Self::InvalidRange => Some(RpcError::new(-32602, "invalid block range")),
        }
    }
}

/// How log indexes are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogNumbering {
    /// Through the block, as it should be.
    #[default]
    PerBlock,
    /// From zero in every transaction, as some clients did.
    PerTransaction,
}

/// What stands in `logsBloom`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BloomFault {
    /// The right bloom.
    #[default]
    Right,
    /// Zeros, although there are logs.
    Zero,
    /// All bits, also in blocks without logs.
    Full,
}

/// How pruned history is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PrunedStyle {
    /// `missing trie node …`.
    #[default]
    MissingTrieNode,
    /// `history has been pruned for this block`.
    HistoryPruned,
    /// `[]` and null, without a word.
    Empty,
}

/// A JSON-RPC error, with the HTTP status it comes with when it is the only answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RpcError {
    pub(crate) status: u16,
    pub(crate) code: i64,
    pub(crate) message: String,
    pub(crate) data: Option<Vec<u8>>,
}

impl RpcError {
    pub(crate) fn new(code: i64, message: impl Into<String>) -> Self {
        Self { status: 200, code, message: message.into(), data: None }
    }

    pub(crate) fn with_status(mut self, status: u16) -> Self {
        self.status = status;
        self
    }
}

/// Seeded draws that many requests share.
#[derive(Debug)]
pub(crate) struct Dice {
    seed: AtomicU64,
    drawn: AtomicU64,
}

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed: AtomicU64::new(mix(seed)), drawn: AtomicU64::new(0) }
    }

    pub(crate) fn reseed(&self, seed: u64) {
        self.seed.store(mix(seed), Ordering::Relaxed);
        self.drawn.store(0, Ordering::Relaxed);
    }

    pub(crate) fn draw(&self) -> u64 {
        let drawn = self.drawn.fetch_add(1, Ordering::Relaxed);
        mix(self.seed.load(Ordering::Relaxed) ^ mix(drawn))
    }

    /// Whether something with this chance happens now. A chance of zero draws nothing.
    pub(crate) fn hits(&self, per_mille: u16) -> bool {
        per_mille > 0 && self.draw() % 1000 < u64::from(per_mille)
    }

    pub(crate) fn below(&self, bound: usize) -> usize {
        let bound = u64::try_from(bound.max(1)).expect("lengths fit u64");
        usize::try_from(self.draw() % bound).expect("below a usize bound")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_draws_the_same() {
        let (one, two) = (Dice::new(9), Dice::new(9));
        assert!((0..100).all(|_| one.draw() == two.draw()));
        assert!((0..100).all(|_| !one.hits(0) && one.hits(1000)));
    }
}
