//! One simulated chain as the pipeline meets it: blocks in raw form, the real parser, balances of the past,
//! and the truth under the ledger's names.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

use alloy_primitives::U256;
use async_trait::async_trait;
use bytes::Bytes;
use tidemark_adapters::evm::parse::{self, Known};
use tidemark_model::chain::*;
use tidemark_model::digest::Digest;
use tidemark_model::ids::*;
use tidemark_model::quantity::SignedQty;
use tidemark_sim::{ReorgKind, Sim, SimConfig};
use time::OffsetDateTime;

/// Balances by asset and account.
pub(crate) type State = BTreeMap<(AssetId, AccountId), U256>;

/// What a node says when it is asked for balances older than the start block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Archive {
    /// The truth.
    Answers,
    /// It keeps nothing that old.
    Pruned,
}

pub(crate) struct Chain {
    pub(crate) sim: Sim,
    pub(crate) network: Network,
    pub(crate) archive: Archive,
    known: Known,
    standards: BTreeMap<String, Standard>,
    before_start: State,
    /// The next questions that fail.
    pub(crate) failures: Mutex<u32>,
    /// Lowest height of the branch left last, as `ReorgKind::Back` would bring it back.
    left_from: Option<u64>,
}

/// Few accounts and tokens, so that everything meets everything.
fn config(seed: u64, place: u64) -> SimConfig {
    SimConfig {
        chain_id: 40_000 + place,
        finality_lag: 6,
        safe_lag: 3,
        collections_721: 2,
        collections_1155: 2,
        contracts_20: 1,
        accounts: 12,
        events_per_block: 5,
        batch_percent: 12,
        mint_percent: 30,
        burn_percent: 10,
        class_tokens_per_1155: 4,
        ..SimConfig::small(seed)
    }
}

impl Chain {
    /// A chain with some blocks, read from `start`.
    pub(crate) fn new(seed: u64, place: u64, blocks: u64, start: u64, archive: Archive) -> Self {
        let config = config(seed, place);
        let nft = usize::try_from(config.collections_721).expect("few");
        let known = Known::new(config.chain_id, &[]);
        let sim = Sim::new(config);
        sim.mine(blocks);
        assert!(start == 0 || start <= sim.finalized(), "we start at a final height");
        let contracts = sim.nft_contracts();
        let (singles, classes) = contracts.split_at(nft);
        let standards = singles
            .iter()
            .map(|contract| (contract.clone(), Standard::Erc721))
            .chain(classes.iter().map(|contract| (contract.clone(), Standard::Erc1155)))
            .collect();
        let network = Network {
            id: NetworkId(i32::try_from(1_000 + seed * 2 + place).expect("seeds are small")),
            slug: format!("sim-{seed}-{place}"),
            family: Family::Evm,
            start_block: Height(start),
            confirmations: 2,
            reorg_depth_max: 64,
        };
        let mut chain = Self {
            sim,
            network,
            archive,
            known,
            standards,
            before_start: State::new(),
            failures: Mutex::new(0),
            left_from: None,
        };
        if start > 0 {
            chain.before_start = chain.truth_at(start - 1);
        }
        chain
    }

    /// Replaces open blocks, if there are any; says what it did.
    pub(crate) fn reorg(&mut self, kind: ReorgKind, depth: u64, new_blocks: u64) -> String {
        let (head, finalized) = (self.sim.head(), self.sim.finalized());
        let lowest = match kind {
            ReorgKind::Back => match self.left_from {
                Some(lowest) if lowest > finalized && lowest <= head + 1 => lowest,
                _ => return "nothing to go back to".to_owned(),
            },
            _ if head == finalized => return "nothing is open".to_owned(),
            _ => head + 1 - depth.clamp(1, head - finalized),
        };
        let depth = head + 1 - lowest;
        self.sim.reorg_to(depth, kind, new_blocks);
        self.left_from = Some(lowest);
        format!("{kind:?} from {lowest}, head {head} -> {}", self.sim.head())
    }

    pub(crate) fn link(&self, height: u64) -> Option<BlockRef> {
        let block = self.sim.block(height)?;
        Some(BlockRef { height: Height(height), hash: BlockHash(block.hash.0) })
    }

    /// The canonical block at a height, as an ingester stores it.
    pub(crate) fn raw_block(&self, height: u64) -> Option<RawBlock> {
        let block = self.sim.block(height)?;
        let records = self
            .sim
            .logs(height, height)
            .into_iter()
            .map(|log| RawRecord {
                tx: TxId::from(log.tx_hash.0),
                tx_index: log.tx_index,
                index: log.log_index,
                emitter: Bytes::copy_from_slice(log.address.as_slice()),
                topics: log.topics.iter().flat_map(|topic| topic.0).collect(),
                data: log.data.into(),
                payload: None,
            })
            .collect();
        let seconds = i64::try_from(block.timestamp).expect("a time");
        Some(RawBlock {
            height: Height(height),
            hash: BlockHash(block.hash.0),
            parent: BlockHash(block.parent_hash.0),
            time: OffsetDateTime::from_unix_timestamp(seconds).expect("a time"),
            tx_count: u32::try_from(block.transactions.len()).ok(),
            transactions: Vec::new(),
            records,
            payload: None,
        })
    }

    /// Who owns what after a height, as the chain itself folds it.
    pub(crate) fn truth_at(&self, height: u64) -> State {
        let truth = self.sim.owners_at(height);
        let name = |(contract, token, account): &(String, String, String)| {
            (self.asset(contract, token), AccountId::of(self.network.id, account))
        };
        truth.balances.iter().map(|(key, qty)| (name(key), *qty)).collect()
    }

    fn asset(&self, contract: &str, token: &str) -> AssetId {
        let collection = CollectionId::of(self.network.id, contract);
        AssetId::of(self.network.id, collection, token, self.standards[contract].as_str())
    }

    /// Pairs that took part in a movement of something on the canonical chain since the start block.
    pub(crate) fn moved_since_start(&self, through: u64) -> BTreeSet<(AssetId, AccountId)> {
        let mut moved = BTreeSet::new();
        for height in self.network.start_block.0..=through {
            let block = self.raw_block(height).expect("a canonical block");
            for event in self.parse(&block).events {
                let (Some(asset), Some(movement)) = (event.asset_refs.first(), event.movement()) else {
                    continue;
                };
                if movement.qty.is_zero() {
                    continue;
                }
                let id = self.asset(&asset.collection_addr_normalized, &asset.token_id_raw);
                let accounts = movement.from.into_iter().chain(movement.to);
                moved.extend(accounts.map(|address| (id, AccountId::of(self.network.id, address))));
            }
        }
        moved
    }
}

/// The digest of a state.
pub(crate) fn digest_of(state: &State) -> U256 {
    let mut digest = Digest::default();
    for ((asset, account), qty) in state {
        digest.add(*asset, *account, SignedQty::gain(*qty));
    }
    digest.0
}

#[async_trait]
impl ChainAdapter for Chain {
    fn network(&self) -> &Network {
        &self.network
    }
    async fn head(&self) -> Result<Head, ChainError> {
        unreachable!("the feed reads the chain")
    }
    async fn next_head(&self, _known: &Head, _wait: Duration) -> Result<Head, ChainError> {
        unreachable!("the feed reads the chain")
    }
    async fn fetch(&self, _range: HeightRange, _mode: FetchMode) -> Result<RawBatch, ChainError> {
        unreachable!("the feed reads the chain")
    }
    async fn link_at(&self, _height: Height) -> Result<Option<BlockLink>, ChainError> {
        unreachable!("the feed reads the chain")
    }
    fn parse(&self, block: &RawBlock) -> ParsedBlock {
        parse::parse(self.network.id, &self.known, block)
    }
    async fn balances(&self, asks: &[BalanceAsk]) -> Result<Vec<Option<U256>>, ChainError> {
        let network = self.network.slug.clone();
        let mut failures = self.failures.lock().expect("nobody panics");
        if *failures > 0 {
            *failures -= 1;
            let (what, reason) = ("balances".to_owned(), "the node is away".to_owned());
            return Err(ChainError::Unavailable { network, what, reason });
        }
        if self.archive == Archive::Pruned {
            return Err(ChainError::Pruned { network, what: "balances".to_owned() });
        }
        let held = |ask: &BalanceAsk| {
            assert_eq!(ask.at, self.network.start_block.minus(1));
            let asset = self.asset(&ask.asset.collection_addr_normalized, &ask.asset.token_id_raw);
            let account = AccountId::of(self.network.id, &ask.account);
            Some(self.before_start.get(&(asset, account)).copied().unwrap_or_default())
        };
        Ok(asks.iter().map(held).collect())
    }
    fn requests(&self) -> u64 {
        0
    }
}
