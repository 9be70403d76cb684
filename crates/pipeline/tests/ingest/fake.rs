//! A chain in memory that does what a test says: grows, reorganizes, answers short, fails.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use sha2::{Digest, Sha256};
use tidemark_model::chain::*;
use tidemark_model::ids::*;
use tidemark_model::{OffsetDateTime, U256};
use tokio::sync::Notify;

type Hook = Box<dyn FnMut(&mut Chain, HeightRange) + Send>;

pub(crate) struct Chain {
    pub(crate) blocks: Vec<RawBlock>,
    pub(crate) finalized: Option<u64>,
    fork: u8,
    /// Heights before `first` do not exist for us.
    first: u64,
}

fn hash(parts: &[&[u8]]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update(part);
    }
    hasher.finalize().into()
}

impl Chain {
    fn new(first: u64) -> Self {
        Self { blocks: Vec::new(), finalized: None, fork: 0, first }
    }
    pub(crate) fn next(&self) -> u64 {
        self.first + u64::try_from(self.blocks.len()).unwrap()
    }
    pub(crate) fn head(&self) -> &RawBlock {
        self.blocks.last().unwrap()
    }
    pub(crate) fn at(&self, height: u64) -> Option<&RawBlock> {
        self.blocks.get(usize::try_from(height.checked_sub(self.first)?).ok()?)
    }
    pub(crate) fn grow(&mut self, blocks: u64) {
        for _ in 0..blocks {
            let height = self.next();
            let parent = self.blocks.last().map_or(BlockHash([0xee; 32]), |block| block.hash);
            self.blocks.push(block(height, parent, self.fork));
        }
    }
    /// Replaces the last `depth` blocks and adds `more`.
    pub(crate) fn reorg(&mut self, depth: u64, more: u64) {
        self.fork += 1;
        self.drop_last(depth);
        self.grow(depth + more);
    }
    pub(crate) fn drop_last(&mut self, depth: u64) -> Vec<RawBlock> {
        let keep = self.blocks.len() - usize::try_from(depth).unwrap();
        self.blocks.split_off(keep)
    }
}

/// Some blocks empty, some with records of several transactions, some records with a payload or a big body.
fn block(height: u64, parent: BlockHash, fork: u8) -> RawBlock {
    let name = hash(&[b"block", &height.to_be_bytes(), &[fork], &parent.0]);
    let count =
        if height.is_multiple_of(3) { 0 } else { u32::try_from(height % 5).unwrap() + u32::from(fork % 2) };
    let mut records = Vec::new();
    for index in 0..count {
        let tx = hash(&[b"tx", &name, &(index / 2).to_be_bytes()]);
        let payload = match (height + u64::from(index)) % 11 {
            0 => Some(serde_json::json!({ "note": "with payload", "index": index })),
            1 => Some(serde_json::json!({ "note": "nul\u{0}inside" })),
            _ => None,
        };
        let length = if height % 37 == 1 && index == 0 { 9000 } else { 64 };
        records.push(RawRecord {
            tx: TxId::from(tx),
            tx_index: index / 2,
            index: index * 3,
            emitter: Bytes::copy_from_slice(&name[..20]),
            topics: Bytes::copy_from_slice(&[name, tx].concat()),
            data: Bytes::from(vec![u8::try_from(height % 251).unwrap(); length]),
            payload,
        });
    }
    RawBlock {
        height: Height(height),
        hash: BlockHash(name),
        parent,
        time: OffsetDateTime::from_unix_timestamp(1_700_000_000 + i64::try_from(height).unwrap()).unwrap(),
        tx_count: Some(count),
        transactions: if height % 7 == 1 && count > 0 { vec![transaction(&records[0])] } else { vec![] },
        records,
        payload: height.is_multiple_of(10).then(|| serde_json::json!({ "extra": height })),
    }
}

fn transaction(record: &RawRecord) -> RawTransaction {
    RawTransaction {
        id: record.tx,
        index: record.tx_index,
        sender: record.emitter.clone(),
        receiver: None,
        value: U256::MAX,
        succeeded: Some(true),
        payload: serde_json::json!({ "gas": "0x1" }),
    }
}

pub(crate) struct FakeChain {
    network: Network,
    pub(crate) chain: Mutex<Chain>,
    /// The next fetches fail with these.
    pub(crate) failures: Mutex<VecDeque<ChainError>>,
    /// Heights per answer.
    pub(crate) answer_blocks: AtomicU64,
    /// Does history bring empty blocks?
    pub(crate) history_coverage: BlockCoverage,
    /// Which chain it is.
    pub(crate) identity: Mutex<String>,
    /// Called before each fetch.
    pub(crate) on_fetch: Mutex<Option<Hook>>,
    grown: Notify,
    requests: AtomicU64,
}

impl FakeChain {
    pub(crate) fn new(first: u64, blocks: u64, finalized: Option<u64>) -> Self {
        let mut chain = Chain::new(first);
        chain.grow(blocks);
        chain.finalized = finalized;
        Self {
            network: Network {
                id: NetworkId(7),
                slug: "fake".into(),
                family: Family::Evm,
                start_block: Height(first),
                confirmations: 3,
                reorg_depth_max: 8,
            },
            chain: Mutex::new(chain),
            failures: Mutex::default(),
            answer_blocks: AtomicU64::new(9),
            history_coverage: BlockCoverage::WithRecords,
            identity: Mutex::new("chain 7, genesis unknown".to_owned()),
            on_fetch: Mutex::default(),
            grown: Notify::new(),
            requests: AtomicU64::new(0),
        }
    }
    pub(crate) fn change(&self, change: impl FnOnce(&mut Chain)) {
        change(&mut self.chain.lock().unwrap());
        self.grown.notify_waiters();
    }
    pub(crate) fn fail(&self, error: ChainError) {
        self.failures.lock().unwrap().push_back(error);
    }
    pub(crate) fn unavailable(&self) -> ChainError {
        ChainError::Unavailable { network: "fake".into(), what: "blocks".into(), reason: "injected".into() }
    }
    fn head_now(&self) -> Head {
        let chain = self.chain.lock().unwrap();
        Head {
            latest: chain.head().block_ref(),
            safe: None,
            finalized: chain.finalized.and_then(|height| chain.at(height)).map(RawBlock::block_ref),
        }
    }
}

#[async_trait]
impl ChainAdapter for FakeChain {
    fn network(&self) -> &Network {
        &self.network
    }
    async fn head(&self) -> Result<Head, ChainError> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        Ok(self.head_now())
    }
    async fn next_head(&self, known: &Head, wait: Duration) -> Result<Head, ChainError> {
        let grown = self.grown.notified();
        if self.head_now() == *known {
            let _ = tokio::time::timeout(wait, grown).await;
        }
        Ok(self.head_now())
    }
    async fn fetch(&self, range: HeightRange, mode: FetchMode) -> Result<RawBatch, ChainError> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        tokio::task::yield_now().await;
        if let Some(error) = self.failures.lock().unwrap().pop_front() {
            return Err(error);
        }
        let mut chain = self.chain.lock().unwrap();
        if let Some(hook) = self.on_fetch.lock().unwrap().as_mut() {
            hook(&mut chain, range);
        }
        if mode == FetchMode::History {
            assert!(
                Some(range.last().0) <= chain.finalized,
                "history asks for {range} above finality {:?}",
                chain.finalized
            );
        }
        let (covered, _) = range.split_first(self.answer_blocks.load(Ordering::Relaxed));
        let covered = match HeightRange::new(covered.from(), covered.to().min(Height(chain.next()))) {
            Some(covered) => covered,
            None => return Err(self.unavailable()),
        };
        let coverage = if mode == FetchMode::Tip { BlockCoverage::All } else { self.history_coverage };
        let blocks: Vec<RawBlock> = (covered.from().0..covered.to().0)
            .filter_map(|height| chain.at(height).cloned())
            .filter(|block| coverage == BlockCoverage::All || !block.records.is_empty())
            .collect();
        let records = blocks.iter().map(|block| u64::try_from(block.records.len()).unwrap()).sum();
        let evidence = RangeEvidence {
            provider: "fake-1".into(),
            head_seen: chain.head().height,
            records,
            foreign: 0,
            requests: 1,
            checks: vec!["links".into()],
            coverage,
        };
        Ok(RawBatch { covered, blocks, evidence })
    }
    async fn link_at(&self, height: Height) -> Result<Option<BlockLink>, ChainError> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        Ok(self.chain.lock().unwrap().at(height.0).map(RawBlock::link))
    }
    fn parse(&self, _block: &RawBlock) -> ParsedBlock {
        ParsedBlock::default()
    }
    async fn balances(&self, asks: &[BalanceAsk]) -> Result<Vec<Option<U256>>, ChainError> {
        Ok(vec![None; asks.len()])
    }
    fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }
    async fn identity(&self) -> Result<Option<String>, ChainError> {
        Ok(Some(self.identity.lock().unwrap().clone()))
    }
}

/// A part of the chain's records, as a filter by contract gives it; transactions of one block may lie in
/// several parts.
pub(crate) struct FakeShard {
    pub(crate) chain: Arc<FakeChain>,
    pub(crate) number: u32,
    pub(crate) of: u32,
}

#[async_trait]
impl ChainAdapter for FakeShard {
    fn network(&self) -> &Network {
        self.chain.network()
    }
    async fn head(&self) -> Result<Head, ChainError> {
        self.chain.head().await
    }
    async fn next_head(&self, known: &Head, wait: Duration) -> Result<Head, ChainError> {
        self.chain.next_head(known, wait).await
    }
    async fn fetch(&self, range: HeightRange, mode: FetchMode) -> Result<RawBatch, ChainError> {
        let mut batch = self.chain.fetch(range, mode).await?;
        for block in &mut batch.blocks {
            block.records.retain(|record| record.index / 3 % self.of == self.number);
            block.transactions.clear();
        }
        if batch.evidence.coverage == BlockCoverage::WithRecords {
            batch.blocks.retain(|block| !block.records.is_empty());
        }
        batch.evidence.records =
            batch.blocks.iter().map(|block| u64::try_from(block.records.len()).unwrap()).sum();
        Ok(batch)
    }
    async fn link_at(&self, height: Height) -> Result<Option<BlockLink>, ChainError> {
        self.chain.link_at(height).await
    }
    fn parse(&self, block: &RawBlock) -> ParsedBlock {
        self.chain.parse(block)
    }
    async fn balances(&self, asks: &[BalanceAsk]) -> Result<Vec<Option<U256>>, ChainError> {
        self.chain.balances(asks).await
    }
    fn requests(&self) -> u64 {
        self.chain.requests()
    }
    async fn identity(&self) -> Result<Option<String>, ChainError> {
        self.chain.identity().await
    }
}
