//! What an EVM network needs to be read.

use tidemark_model::chain::Network;
use tidemark_model::redact::RedactedUrl;
use tidemark_rpc::backoff::Backoff;
use tidemark_rpc::breaker::BreakerConfig;
use tidemark_rpc::limits::StepBounds;
use tidemark_rpc::{EndpointConfig, Timeouts};

/// How much of a block is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// Headers and our logs.
    #[default]
    Logs,
    /// Also all transactions, receipts and logs.
    Full,
}

/// What makes a block final.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FinalityRule {
    /// The node's `finalized` tag; [`EvmConfig::fallback_depth`] where the node does not know the tag.
    #[default]
    Tag,
    /// This many blocks below the newest.
    Depth(u64),
}

/// Which headers of history are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HeaderPolicy {
    /// All: links and blooms of every block are checked.
    #[default]
    All,
    /// Only of blocks with records, wherever a second endpoint gives exactly the same logs for the range; of
    /// all blocks elsewhere. Fewer requests, and two endpoints that leave out the same block are believed.
    WithRecords,
}

/// Is the header's bloom checked? Some chains leave it empty or fill it wrongly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BloomPolicy {
    /// Yes; a header without one is looked at like one that promises more than came.
    #[default]
    Check,
    /// No. Then a second endpoint must confirm every range: nothing else would find hidden logs.
    Ignore,
}

/// Is an accepted answer compared with an independent one? The bloom cannot see one log missing among several
/// of the same kind in one block; this can.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Audit {
    /// Never.
    Off,
    /// A second endpoint, if there is one that has the blocks, is asked for the same logs: one more request
    /// per sub-range. Whatever it has and the first has not is settled by receipts. At the tip it must
    /// answer quickly or it is not heard. In history without a second endpoint, the receipts of one block per
    /// sub-range are read instead: a sample.
    #[default]
    SecondEndpoint,
    /// As above; where there is no second endpoint, the receipts of every block with records are read: one
    /// more request per such block.
    Receipts,
}

/// What an EVM network needs to be read.
#[derive(Debug, Clone)]
pub struct EvmConfig {
    /// The network.
    pub network: Network,
    /// `eth_chainId`.
    pub chain_id: u64,
    /// Hash of block 0, if it is to be checked against a known one.
    pub genesis: Option<String>,
    /// Where to ask.
    pub endpoints: Vec<EndpointConfig>,
    /// Where to listen for new heads; may be empty.
    pub ws: Vec<RedactedUrl>,
    /// Read only these contracts; empty reads all.
    pub contracts: Vec<String>,
    /// How much is kept.
    pub mode: Mode,
    /// What makes a block final.
    pub finality: FinalityRule,
    /// Depth used under [`FinalityRule::Tag`] where a node does not know the tag.
    pub fallback_depth: u64,
    /// Blocks of the first `eth_getLogs`.
    pub step_init: u64,
    /// Soft floor of the step; range errors go below it.
    pub step_min: u64,
    /// Most blocks of one `eth_getLogs`.
    pub step_max: u64,
    /// Most blocks of one read in mode `full`.
    pub full_step_max: u64,
    /// Records one read should bring at most: dense ranges are asked for in smaller steps.
    pub records_target: u64,
    /// Which headers are read in history.
    pub headers: HeaderPolicy,
    /// Headers per batch.
    pub headers_batch: usize,
    /// Header batches in flight at once.
    pub headers_in_flight: usize,
    /// Is the bloom checked?
    pub bloom: BloomPolicy,
    /// Are answers compared with independent ones?
    pub audit: Audit,
    /// Time limits of calls.
    pub timeouts: Timeouts,
    /// Pauses between tries.
    pub backoff: Backoff,
    /// When an endpoint rests.
    pub breaker: BreakerConfig,
    /// Tries of one read before it is given up.
    pub tries_max: u32,
}

impl EvmConfig {
    /// Defaults around what has none.
    pub fn new(network: Network, chain_id: u64, endpoints: Vec<EndpointConfig>) -> Self {
        let steps = StepBounds::default();
        Self {
            network,
            chain_id,
            genesis: None,
            endpoints,
            ws: Vec::new(),
            contracts: Vec::new(),
            mode: Mode::default(),
            finality: FinalityRule::default(),
            fallback_depth: 64,
            step_init: steps.init,
            step_min: steps.min,
            step_max: steps.max,
            full_step_max: 50,
            records_target: 20_000,
            headers: HeaderPolicy::default(),
            headers_batch: 100,
            headers_in_flight: 4,
            bloom: BloomPolicy::default(),
            audit: Audit::default(),
            timeouts: Timeouts::default(),
            backoff: Backoff::default(),
            breaker: BreakerConfig::default(),
            tries_max: 8,
        }
    }
}
