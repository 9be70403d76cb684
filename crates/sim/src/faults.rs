//! Everything a provider can do wrong, as settings of one server. Several servers of one chain with
//! different profiles are several providers of different quality.
//!
//! Chances are per mille of calls (or of HTTP requests, for transport faults) and are drawn from a seeded
//! generator, so that a run with the same requests in the same order fails in the same way.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Deserialize;

use crate::filter::EmptyAddresses;
use crate::hexed::number_text;
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

/// In whose words a provider refuses a range or an answer that is too big.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LimitStyle {
    /// With a range that works.
    #[default]
    Alchemy,
    /// The free tier, with a range that works.
    AlchemyFree,
    /// Says timeout, means size.
    AlchemyTimeout,
    /// With a range to try.
    Infura,
    /// zkSync and thirdweb.
    ZkSync,
    /// With a comma in the number.
    QuickNode,
    /// 1RPC.
    OneRpc,
    /// Blast.
    Blast,
    /// Ankr.
    Ankr,
    /// LlamaRPC.
    Llama,
    /// Cloudflare.
    Cloudflare,
    /// Avalanche.
    Avalanche,
    /// Optimism and Base.
    Optimism,
    /// Optimism's overload words, which also mean size.
    OptimismUnhealthy,
    /// Arbitrum.
    Arbitrum,
    /// BlockPI.
    BlockPi,
    /// PublicNode.
    PublicNode,
    /// Coinbase.
    Coinbase,
    /// Chainstack, without a number.
    Chainstack,
    /// Hyperliquid.
    Hyperliquid,
    /// Aurora.
    Aurora,
    /// Somnia.
    Somnia,
    /// Merkle, with a k.
    Merkle,
    /// Harmony.
    Harmony,
    /// Moonriver.
    Moonriver,
    /// HTTP 413 without a JSON-RPC body of its own.
    PayloadTooLarge,
    /// Another of the above each time.
    Rotating,
}

impl LimitStyle {
    /// Every fixed style.
    pub const ALL: [Self; 26] = [
        Self::Alchemy,
        Self::AlchemyFree,
        Self::AlchemyTimeout,
        Self::Infura,
        Self::ZkSync,
        Self::QuickNode,
        Self::OneRpc,
        Self::Blast,
        Self::Ankr,
        Self::Llama,
        Self::Cloudflare,
        Self::Avalanche,
        Self::Optimism,
        Self::OptimismUnhealthy,
        Self::Arbitrum,
        Self::BlockPi,
        Self::PublicNode,
        Self::Coinbase,
        Self::Chainstack,
        Self::Hyperliquid,
        Self::Aurora,
        Self::Somnia,
        Self::Merkle,
        Self::Harmony,
        Self::Moonriver,
        Self::PayloadTooLarge,
    ];
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

    fn with_status(mut self, status: u16) -> Self {
        self.status = status;
        self
    }
}

/// Which limit was exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Limit {
    Blocks,
    Results,
    Bytes,
}

/// A refused range.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Refusal {
    pub(crate) limit: Limit,
    pub(crate) allowed: u64,
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// Last height of a range from `from` that would be answered.
    pub(crate) works_to: u64,
}

impl Refusal {
    /// The refusal in the words of `style`. Where a provider knows no words for a kind of limit, it uses
    /// those it has: readers must cope with that too.
    pub(crate) fn in_words(&self, style: LimitStyle, dice: &Dice) -> RpcError {
        let Self { limit, allowed, from, to, works_to } = *self;
        let works = format!("[{}, {}]", number_text(from), number_text(works_to));
        let blocks = (to - from).saturating_add(1);
        let fitting = works_to - from + 1;
        let (code, message) = match style {
            LimitStyle::Rotating => {
                let at = usize::try_from(dice.draw() % 26).unwrap_or_default();
                return self.in_words(LimitStyle::ALL[at], dice);
            }
            LimitStyle::Alchemy => (
                -32602,
                format!(
                    "Log response size exceeded. Based on your parameters and the response size limit, this block range should work: {works}"
                ),
            ),
            LimitStyle::AlchemyFree => (
                -32600,
                format!(
                    "Under the Free tier plan, you can make eth_getLogs requests with up to a {} block range. Based on your parameters, this block range should work: {works}. Upgrade to PAYG for expanded block range.",
                    fitting
                ),
            ),
            LimitStyle::AlchemyTimeout => {
                (-32000, "Query timeout exceeded. Consider reducing your block range.".to_owned())
            }
            LimitStyle::Infura => (
                -32005,
                format!("query returned more than {allowed} results. Try with this block range {works}."),
            ),
            LimitStyle::ZkSync => {
                (-32602, format!("Maximum allowed number of requested blocks is {}", fitting))
            }
            LimitStyle::QuickNode => {
                (-32614, format!("eth_getLogs is limited to a {} range", with_commas(fitting)))
            }
            LimitStyle::OneRpc => (
                -32000,
                format!("block range exceeds the range allowed for your plan ({blocks} > {})", fitting),
            ),
            LimitStyle::Blast => (-32000, format!("response size should not greater than {allowed} bytes")),
            LimitStyle::Ankr => (-32600, "block range is too wide".to_owned()),
            LimitStyle::Llama => match limit {
                Limit::Blocks => (-32000, format!("maximum [from, to] blocks distance: {}", works_to - from)),
                _ => (
                    -32602,
                    format!("query exceeds max results {allowed}, retry with the range {from}-{works_to}"),
                ),
            },
            LimitStyle::Cloudflare => (
                -32047,
                format!(
                    "Invalid eth_getLogs request. 'fromBlock'-'toBlock' range too large. Max range: {}",
                    fitting
                ),
            ),
            LimitStyle::Avalanche => (
                -32000,
                format!("requested too many blocks from {from} to {to}, maximum is set to {}", fitting),
            ),
            LimitStyle::Optimism => match limit {
                Limit::Blocks => (-32000, "Block range is too large".to_owned()),
                _ => (-32020, "backend response too large".to_owned()),
            },
            LimitStyle::OptimismUnhealthy => {
                let message = "no backend is currently healthy to serve traffic";
                return RpcError::new(-32011, message).with_status(503);
            }
            LimitStyle::Arbitrum => (-32000, format!("logs matched by query exceeds limit of {allowed}")),
            LimitStyle::BlockPi => {
                (-32000, format!("eth_getLogs is limited to {} block range", with_commas(fitting)))
            }
            LimitStyle::PublicNode => (-32701, format!("exceed maximum block range: {}", fitting)),
            LimitStyle::Coinbase => (-32602, format!("please limit the query to at most {} blocks", fitting)),
            LimitStyle::Chainstack => (-32602, "Block range limit exceeded.".to_owned()),
            LimitStyle::Hyperliquid => (-32602, format!("query exceeds max block range {}", fitting)),
            LimitStyle::Aurora => {
                (-32600, format!("you can make requests with up to a {} block range", fitting))
            }
            LimitStyle::Somnia => (-32000, format!("block range exceeds {}", fitting)),
            LimitStyle::Merkle => {
                let text = if fitting.is_multiple_of(1_000) {
                    format!("{}k", fitting / 1_000)
                } else {
                    fitting.to_string()
                };
                (-32600, format!("block range too large, max is {text} blocks"))
            }
            LimitStyle::Harmony => (-32000, format!("query must be smaller than size {}", fitting)),
            LimitStyle::Moonriver => (-32603, format!("block range is too wide (maximum {})", fitting)),
            LimitStyle::PayloadTooLarge => {
                return RpcError::new(-32000, "Request Entity Too Large").with_status(413);
            }
        };
        let status = match style {
            LimitStyle::Alchemy | LimitStyle::AlchemyFree | LimitStyle::Cloudflare => 400,
            LimitStyle::QuickNode => 413,
            _ => 200,
        };
        RpcError::new(code, message).with_status(status)
    }
}

fn with_commas(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
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
    fn every_style_has_its_own_words() {
        let dice = Dice::new(1);
        let refusal =
            Refusal { limit: Limit::Blocks, allowed: 10_000, from: 1, to: 20_000, works_to: 10_000 };
        let texts: std::collections::BTreeSet<String> =
            LimitStyle::ALL.iter().map(|style| refusal.in_words(*style, &dice).message).collect();
        assert_eq!(texts.len(), LimitStyle::ALL.len());
        assert!(texts.contains("eth_getLogs is limited to a 10,000 range"));
        assert!(texts.iter().any(|text| text.contains("this block range should work: [0x1, 0x2710]")));
    }

    #[test]
    fn the_same_seed_draws_the_same() {
        let (one, two) = (Dice::new(9), Dice::new(9));
        assert!((0..100).all(|_| one.draw() == two.draw()));
        assert!((0..100).all(|_| !one.hits(0) && one.hits(1000)));
    }
}
