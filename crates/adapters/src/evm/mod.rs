//! The EVM adapter: one resilient reader for Ethereum and everything that speaks its JSON-RPC.
//!
//! - [`config`]: what a network needs
//! - `head`: tip and finality
//! - `fetch`: ranges of history and blocks at the tip, checked
//! - [`check`], [`bloom`]: the checks, as pure functions
//! - `confirm`: second opinions about blocks whose bloom promises more than came
//! - `full`: transactions and receipts
//! - [`parse`]: records to canonical events, pure
//! - `balances`: questions about past heights
//! - [`hex`], [`wire`], [`topics`]: what nodes send, and what we ask for

mod balances;
pub mod bloom;
pub mod check;
pub mod config;
mod confirm;
mod fetch;
mod full;
mod head;
pub mod hex;
pub mod parse;
pub mod topics;
pub mod wire;

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use alloy_primitives::U256;
use async_trait::async_trait;
use serde_json::{Value, json};
use tidemark_model::address;
use tidemark_model::chain::{
    BalanceAsk, BlockLink, BlockRef, ChainAdapter, ChainError, FetchMode, Head, Network, ParsedBlock,
    RawBatch, RawBlock,
};
use tidemark_model::ids::{BlockHash, Height, HeightRange};
use tidemark_model::partition::fnv1a;
use tidemark_rpc::heads::HeadWatch;
use tidemark_rpc::limits::StepBounds;
use tidemark_rpc::{Call, Class, Identity, PoolConfig, ReadPool, RpcError};

use check::Filter;
pub use config::{Audit, BloomPolicy, EvmConfig, FinalityRule, HeaderPolicy, Mode};
use parse::Known;
use wire::Header;

/// Reads one EVM network.
#[derive(Debug)]
pub struct EvmAdapter {
    config: EvmConfig,
    pool: ReadPool,
    filter: Filter,
    known: Known,
    steps: StepBounds,
    /// The newest final block we reported: finality never goes back.
    finalized: Mutex<Option<BlockRef>>,
    watch: OnceLock<Arc<HeadWatch>>,
}

impl EvmAdapter {
    /// Builds the adapter; asks nobody yet.
    pub fn new(config: EvmConfig) -> Result<Self, ChainError> {
        let mut pool = PoolConfig::new(config.network.slug.clone(), config.endpoints.clone());
        pool.timeouts = config.timeouts.clone();
        pool.backoff = config.backoff;
        pool.breaker = config.breaker;
        pool.identity = Identity::Evm { chain_id: config.chain_id, genesis: config.genesis.clone() };
        let pool = ReadPool::new(pool).map_err(|error| refuse(&config, error.to_string()))?;
        Self::with_pool(config, pool)
    }

    /// The contracts of this adapter in at most `of` parts by their hash (ADDR_SHARDS): an adapter for each part
    /// that has a contract, with its number. They share the endpoints, with limits, buckets and health.
    pub fn shards(&self, of: u16) -> Result<Vec<(u16, Self)>, ChainError> {
        let mut parts = vec![Vec::new(); usize::from(of.max(1))];
        for contract in self.filter.contracts() {
            parts[usize::from(shard_of(self.config.chain_id, contract, of))]
                .push(format!("0x{}", ::hex::encode(contract)));
        }
        let full = (0..).zip(parts).filter(|(_, contracts)| !contracts.is_empty());
        full.map(|(number, contracts)| {
            let config = EvmConfig { contracts, ..self.config.clone() };
            Ok((number, Self::with_pool(config, self.pool.clone())?))
        })
        .collect()
    }

    fn with_pool(config: EvmConfig, pool: ReadPool) -> Result<Self, ChainError> {
        let refuse = |reason: String| refuse(&config, reason);
        let mut contracts = Vec::with_capacity(config.contracts.len());
        for text in &config.contracts {
            let canonical = address::evm(text).map_err(|error| refuse(error.to_string()))?;
            contracts.extend(hex::fixed::<20>(&canonical));
        }
        contracts.sort_unstable();
        contracts.dedup();
        let steps = StepBounds { init: config.step_init, min: config.step_min, max: config.step_max };
        Ok(Self {
            pool,
            filter: Filter::new(&contracts),
            known: Known::new(config.chain_id, &contracts),
            steps,
            finalized: Mutex::new(None),
            watch: OnceLock::new(),
            config,
        })
    }
    /// Checks that the endpoints serve the configured chain; gives its identity in words.
    pub async fn check(&self) -> Result<String, ChainError> {
        self.pool.verify().await.map_err(|error| self.explain("its chain", &error))
    }
    /// The endpoints, for status pages.
    pub fn pool(&self) -> &ReadPool {
        &self.pool
    }

    fn slug(&self) -> String {
        self.config.network.slug.clone()
    }
    fn inconsistent(&self, what: impl Into<String>, reason: impl Into<String>) -> ChainError {
        ChainError::Inconsistent { network: self.slug(), what: what.into(), reason: reason.into() }
    }
    fn unavailable(&self, what: impl Into<String>, reason: impl Into<String>) -> ChainError {
        ChainError::Unavailable { network: self.slug(), what: what.into(), reason: reason.into() }
    }
    fn explain(&self, what: &str, error: &RpcError) -> ChainError {
        let all_wrong = || self.pool.endpoints().iter().all(|endpoint| endpoint.is_other_chain());
        // One wrong endpoint is left out; only when all are wrong the network itself is.
        if let RpcError::WrongChain { endpoint, found, expected } = error
            && all_wrong()
        {
            return ChainError::WrongChain {
                network: self.slug(),
                provider: endpoint.clone(),
                found: found.clone(),
                expected: expected.clone(),
            };
        }
        match error.class() {
            Class::Pruned => ChainError::Pruned { network: self.slug(), what: what.to_owned() },
            class if class.is_size() => ChainError::TooLarge { network: self.slug(), what: what.to_owned() },
            _ => self.unavailable(what, error.to_string()),
        }
    }
}

#[async_trait]
impl ChainAdapter for EvmAdapter {
    fn network(&self) -> &Network {
        &self.config.network
    }
    async fn head(&self) -> Result<Head, ChainError> {
        self.read_head().await
    }
    async fn next_head(&self, known: &Head, wait: Duration) -> Result<Head, ChainError> {
        if self.config.ws.is_empty() {
            tokio::time::sleep(wait).await;
        } else {
            let watch = self.watch.get_or_init(|| Arc::new(HeadWatch::start(&self.config.ws)));
            watch.next(wait).await;
        }
        let head = self.read_head().await?;
        if head.latest == known.latest {
            tracing::trace!(network = %self.config.network.slug, height = known.latest.height.0, "No newer head.");
        }
        Ok(head)
    }
    async fn fetch(&self, range: HeightRange, mode: FetchMode) -> Result<RawBatch, ChainError> {
        self.read(range, mode).await
    }
    async fn link_at(&self, height: Height) -> Result<Option<BlockLink>, ChainError> {
        let call = header_call(height.0);
        let what = format!("block {height}");
        let mut last = None;
        for endpoint in self.pool.ranked() {
            match self.pool.call::<Option<Header>>(&endpoint, &call).await {
                Ok(Some(header)) if header.number.0 == height.0 => {
                    endpoint.saw_head(height.0);
                    return Ok(Some(link(&header)));
                }
                Ok(Some(header)) => {
                    endpoint.penalise();
                    let reason = format!("{} gave block {}", endpoint.label(), header.number.0);
                    last = Some(self.inconsistent(what.clone(), reason));
                }
                Ok(None) => {}
                Err(error) => last = Some(self.explain(&what, &error)),
            }
        }
        match last {
            Some(error) => Err(error),
            // All said null. That is an answer only if nobody ever saw the chain reach that height.
            None if self.pool.best_head() >= height.0 => {
                Err(self.unavailable(what, "no endpoint has it now"))
            }
            None => Ok(None),
        }
    }
    fn parse(&self, block: &RawBlock) -> ParsedBlock {
        parse::parse(self.config.network.id, &self.known, block)
    }
    async fn balances(&self, asks: &[BalanceAsk]) -> Result<Vec<Option<U256>>, ChainError> {
        self.read_balances(asks).await
    }
    fn requests(&self) -> u64 {
        self.pool.requests()
    }
    async fn identity(&self) -> Result<Option<String>, ChainError> {
        self.pool.verify_any().await.map_err(|error| self.explain("its chain", &error))?;
        // A chain whose nodes have forgotten their first block is known by its id alone.
        let genesis = self.pool.genesis().unwrap_or_else(|| "unknown".to_owned());
        Ok(Some(format!("chain {}, genesis {genesis}", self.config.chain_id)))
    }
}

fn refuse(config: &EvmConfig, reason: String) -> ChainError {
    ChainError::Unavailable {
        network: config.network.slug.clone(),
        what: "its configuration".to_owned(),
        reason,
    }
}

/// Which of `of` parts a contract belongs to: the same on every machine (S3: hash of chainId:address).
fn shard_of(chain_id: u64, contract: &[u8; 20], of: u16) -> u16 {
    let hash = fnv1a(format!("{chain_id}:0x{}", ::hex::encode(contract)).as_bytes());
    u16::try_from(hash % u32::from(of.max(1))).expect("below a u16")
}

fn link(header: &Header) -> BlockLink {
    BlockLink { block: block_ref(header), parent: BlockHash(header.parent_hash.0) }
}

fn block_ref(header: &Header) -> BlockRef {
    BlockRef { height: Height(header.number.0), hash: BlockHash(header.hash.0) }
}

fn hex_number(number: u64) -> Value {
    Value::String(format!("{number:#x}"))
}

fn header_call(number: u64) -> Call {
    Call::new("eth_getBlockByNumber", json!([hex_number(number), false]))
}
