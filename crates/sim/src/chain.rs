//! The chain itself: mining, reorgs, tags and the truth. Deterministic: the same seed and the same sequence
//! of calls give the same hashes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use alloy_primitives::{U256, keccak256};
use serde::Deserialize;
use tokio::sync::broadcast;

use crate::block::{Block, Placed, SimBlock, SimLog, Site, count, logs_of};
use crate::book::{Book, at};
use crate::config::SimConfig;
use crate::economy::{Economy, Plan};
use crate::hexed;
use crate::rng::Rng;
use crate::truth::{Balances, Truth};

/// Heads a slow WebSocket client may fall behind before it misses some, as it would at a real node.
const HEADS_KEPT: usize = 1024;
/// Folded balances kept for `eth_call`: the reader asks about few heights, many times each.
const FOLDS_KEPT: usize = 4;

/// What the new branch of a reorg holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReorgKind {
    /// The dropped transactions never come back; the new blocks hold ERC-20 noise only.
    Drop,
    /// The same transactions in the same blocks at the same log indexes; only block hashes change.
    ReincludeSame,
    /// The same transactions behind others: same transaction hashes, other log indexes.
    ReincludeShifted,
    /// The same transactions, each one block later.
    ReincludeLater,
    /// The same transaction hashes at the same log indexes with other logs.
    ReincludeChanged,
    /// Other transactions; tokens minted on the old branch may be minted again to others.
    Replace,
    /// Blocks without transactions.
    Empty,
    /// The branch that was left last becomes canonical again, with its old hashes. The depth is ignored.
    Back,
}

impl ReorgKind {
    /// Every kind, for schedules and tests that want them all.
    pub const ALL: [Self; 8] = [
        Self::Drop,
        Self::ReincludeSame,
        Self::ReincludeShifted,
        Self::ReincludeLater,
        Self::ReincludeChanged,
        Self::Replace,
        Self::Empty,
        Self::Back,
    ];
}

/// One simulated chain. Cheap to clone; all clones are the same chain.
#[derive(Debug, Clone)]
pub struct Sim {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: SimConfig,
    book: Arc<Book>,
    state: RwLock<State>,
    folds: Mutex<Vec<Fold>>,
    heads: broadcast::Sender<Arc<Block>>,
}

/// Balances at one block.
#[derive(Debug, Clone)]
struct Fold {
    height: u64,
    hash: [u8; 32],
    balances: Arc<Balances>,
}

#[derive(Debug)]
pub(crate) struct State {
    economy: Economy,
    pub(crate) chain: Vec<Arc<Block>>,
    /// All blocks ever sealed, also those of left branches: nodes keep serving them by hash.
    pub(crate) by_hash: HashMap<[u8; 32], Arc<Block>>,
    /// Canonical place of every transaction.
    pub(crate) tx_places: HashMap<[u8; 32], (u64, u32)>,
    /// The branch left by the last reorg, lowest block first.
    pub(crate) left_branch: Vec<Arc<Block>>,
    branch: u64,
    next_nonce: u64,
    finality_frozen: Option<u64>,
    finalized_floor: u64,
}

impl Sim {
    /// A chain with only its genesis block.
    pub fn new(config: SimConfig) -> Self {
        let book = Arc::new(Book::new(&config));
        let timestamp = u64::try_from(config.genesis_time).unwrap_or_default();
        let site = Site { number: 0, parent: [0; 32], timestamp, miner: 1, branch: config.seed };
        let genesis = Arc::new(Block::seal(&book, site, Vec::new()));
        let state = State {
            economy: Economy::new(&config, Arc::clone(&book)),
            by_hash: HashMap::from([(genesis.hash, Arc::clone(&genesis))]),
            chain: vec![genesis],
            tx_places: HashMap::new(),
            left_branch: Vec::new(),
            branch: 0,
            next_nonce: 0,
            finality_frozen: None,
            finalized_floor: 0,
        };
        let (heads, _) = broadcast::channel(HEADS_KEPT);
        let inner = Inner { config, book, state: RwLock::new(state), folds: Mutex::new(Vec::new()), heads };
        Self { inner: Arc::new(inner) }
    }

    /// The settings the chain was made with.
    pub fn config(&self) -> &SimConfig {
        &self.inner.config
    }

    /// Nothing happens any more: forgets who owns what, which is a good part of the memory of a long chain. Blocks that are
    /// mined all the same are empty, and none may be taken back.
    pub fn rest(&self) {
        let nobody = SimConfig {
            collections_721: 0,
            collections_1155: 0,
            contracts_20: 0,
            ..self.inner.config.clone()
        };
        self.write().economy = Economy::new(&nobody, Arc::clone(&self.inner.book));
    }

    /// Appends `blocks` blocks of usual business.
    pub fn mine(&self, blocks: u64) {
        for _ in 0..blocks {
            // The lock is taken per block: readers are served while a long history is made.
            let mut state = self.write();
            let sealed = state.extend(&self.inner, Content::Busy);
            state.settle_finality(&self.inner.config);
            drop(state);
            self.announce(&sealed);
        }
    }

    /// Appends `blocks` blocks without transactions.
    pub fn mine_empty(&self, blocks: u64) {
        for _ in 0..blocks {
            let mut state = self.write();
            let sealed = state.extend(&self.inner, Content::Placed(Vec::new()));
            state.settle_finality(&self.inner.config);
            drop(state);
            self.announce(&sealed);
        }
    }

    /// Appends one block with exactly `logs` logs: for blocks above a provider's limits.
    pub fn mine_full(&self, logs: u32) {
        let mut state = self.write();
        let sealed = state.extend(&self.inner, Content::Full(logs));
        state.settle_finality(&self.inner.config);
        drop(state);
        self.announce(&sealed);
    }

    /// The newest height.
    pub fn head(&self) -> u64 {
        self.read().head()
    }

    /// The finalized height. It never goes back.
    pub fn finalized(&self) -> u64 {
        self.read().finalized(&self.inner.config)
    }

    /// The height of the `safe` tag.
    pub fn safe(&self) -> u64 {
        let state = self.read();
        state.head().saturating_sub(self.inner.config.safe_lag).max(state.finalized(&self.inner.config))
    }

    /// Stops or resumes finality; while stopped, blocks go on and the tag stands still.
    pub fn freeze_finality(&self, frozen: bool) {
        let mut state = self.write();
        let now = state.finalized(&self.inner.config);
        state.finalized_floor = now;
        state.finality_frozen = frozen.then_some(now);
    }

    /// Replaces the last `depth` blocks by a branch that is one block longer.
    ///
    /// A depth that reaches below the finalized height is obeyed: that is a fault readers must notice.
    pub fn reorg(&self, depth: u64, kind: ReorgKind) {
        self.reorg_to(depth, kind, depth + 1);
    }

    /// Replaces the last `depth` blocks by a branch of `new_blocks` blocks (at least one). A shorter branch
    /// makes the head go back.
    pub fn reorg_to(&self, depth: u64, kind: ReorgKind, new_blocks: u64) {
        let mut state = self.write();
        let sealed = state.reorg(&self.inner, depth, kind, new_blocks);
        state.settle_finality(&self.inner.config);
        drop(state);
        for block in &sealed {
            self.announce(block);
        }
    }

    /// The canonical logs of `from..=to`, in order.
    pub fn logs(&self, from: u64, to: u64) -> Vec<SimLog> {
        let blocks = self.read().blocks(from, to);
        blocks.iter().flat_map(|block| logs_of(&self.inner.book, block)).collect()
    }

    /// Number of canonical logs in `from..=to`.
    pub fn log_count(&self, from: u64, to: u64) -> u64 {
        self.read().blocks(from, to).iter().map(|block| u64::from(count(block.entries.len()))).sum()
    }

    /// Who owns what after block `height` (the head, if `height` is above it).
    pub fn owners_at(&self, height: u64) -> Truth {
        let (blocks, top) = {
            let state = self.read();
            let top = Arc::clone(&state.chain[at(count(state.chain.len())) - 1]);
            let top = state.canonical(height).unwrap_or(top);
            (state.blocks(0, top.number), top)
        };
        let mut balances = Balances::default();
        balances.extend(&blocks);
        Truth {
            height: top.number,
            block_hash: hexed::text(&top.hash),
            balances: balances.name(&self.inner.book),
        }
    }

    /// The canonical block at `height`.
    pub fn block(&self, height: u64) -> Option<SimBlock> {
        self.read().canonical(height).map(|block| SimBlock::of(&block))
    }

    /// A digest of all balances at `height`: equal digests, equal owners.
    pub fn state_digest(&self, height: u64) -> String {
        let mut bytes = Vec::new();
        for ((contract, token_id, account), qty) in self.owners_at(height).balances {
            bytes.extend_from_slice(format!("{contract}:{token_id}:{account}={qty}\n").as_bytes());
        }
        hexed::text(keccak256(&bytes).as_slice())
    }

    /// Addresses of the NFT contracts (both standards), lower-case.
    pub fn nft_contracts(&self) -> Vec<String> {
        let nft = self.inner.config.collections_721 + self.inner.config.collections_1155;
        self.inner.book.contracts[..at(nft)].iter().map(|one| hexed::text(&one.address)).collect()
    }

    /// Lowest height that a reorg of kind [`ReorgKind::Back`] would replace.
    pub(crate) fn left_from(&self) -> Option<u64> {
        self.read().left_branch.first().map(|block| block.number)
    }

    pub(crate) fn book(&self) -> &Arc<Book> {
        &self.inner.book
    }

    pub(crate) fn watch_heads(&self) -> broadcast::Receiver<Arc<Block>> {
        self.inner.heads.subscribe()
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, State> {
        self.inner.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.inner.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn announce(&self, block: &Arc<Block>) {
        // Nobody listening is fine.
        let _ = self.inner.heads.send(Arc::clone(block));
    }

    /// Balances after `block`, which must be canonical; extends an earlier fold when there is one.
    pub(crate) fn balances_at(&self, block: &Block) -> Arc<Balances> {
        let mut folds = self.inner.folds.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(fold) = folds.iter().find(|fold| fold.hash == block.hash) {
            return Arc::clone(&fold.balances);
        }
        let state = self.read();
        let base = folds
            .iter()
            .filter(|fold| fold.height < block.number)
            .filter(|fold| state.canonical(fold.height).is_some_and(|known| known.hash == fold.hash))
            .max_by_key(|fold| fold.height);
        let (mut balances, from) = match base {
            Some(fold) => ((*fold.balances).clone(), fold.height + 1),
            None => (Balances::default(), 0),
        };
        let blocks = state.blocks(from, block.number);
        drop(state);
        balances.extend(&blocks);
        let balances = Arc::new(balances);
        // A reorg since the caller looked must not leave a fold under the wrong name.
        if blocks.last().is_none_or(|last| last.hash != block.hash) {
            return balances;
        }
        if folds.len() == FOLDS_KEPT {
            folds.remove(0);
        }
        folds.push(Fold { height: block.number, hash: block.hash, balances: Arc::clone(&balances) });
        balances
    }
}

/// What goes into the next block.
enum Content {
    Busy,
    Full(u32),
    Harmless,
    Noise,
    Placed(Vec<Placed>),
    /// Harmless transactions first, then these.
    Behind(Vec<Placed>),
    /// Other logs under these transaction hashes.
    Rewritten(Vec<Placed>),
}

impl State {
    pub(crate) fn head(&self) -> u64 {
        u64::from(count(self.chain.len()) - 1)
    }

    pub(crate) fn canonical(&self, height: u64) -> Option<Arc<Block>> {
        self.chain.get(usize::try_from(height).ok()?).cloned()
    }

    /// Canonical blocks `from..=to`, cut at the head.
    pub(crate) fn blocks(&self, from: u64, to: u64) -> Vec<Arc<Block>> {
        let to = to.min(self.head());
        if from > to {
            return Vec::new();
        }
        let position = |height: u64| usize::try_from(height).expect("heights below the head fit usize");
        self.chain[position(from)..=position(to)].to_vec()
    }

    pub(crate) fn finalized(&self, config: &SimConfig) -> u64 {
        match self.finality_frozen {
            Some(height) => height,
            None => self.head().saturating_sub(config.finality_lag).max(self.finalized_floor),
        }
    }

    fn settle_finality(&mut self, config: &SimConfig) {
        self.finalized_floor = self.finalized(config);
    }

    /// Seals the next block, with its state already applied by the content's making.
    fn extend(&mut self, inner: &Inner, content: Content) -> Arc<Block> {
        let parent = Arc::clone(self.chain.last().expect("there is always a genesis block"));
        let number = parent.number + 1;
        let mut rng = Rng::keyed(&[inner.config.seed, inner.config.chain_id, self.branch, number]);
        let placed = self.fill(inner, &mut rng, content);
        let site = Site {
            number,
            parent: parent.hash,
            timestamp: self.chain[0].timestamp + number * inner.config.block_time_secs,
            miner: 1 + rng.below32(8).min(inner.config.accounts),
            branch: self.branch,
        };
        let block = Arc::new(Block::seal(&inner.book, site, placed));
        self.push(Arc::clone(&block));
        block
    }

    fn push(&mut self, block: Arc<Block>) {
        for (position, tx) in (0_u32..).zip(&block.txs) {
            self.tx_places.insert(tx.hash, (block.number, position));
        }
        self.by_hash.insert(block.hash, Arc::clone(&block));
        self.chain.push(block);
    }

    fn fill(&mut self, inner: &Inner, rng: &mut Rng, content: Content) -> Vec<Placed> {
        let mean = inner.config.events_per_block;
        match content {
            Content::Busy => {
                let logs = match rng.below(50) {
                    _ if inner.config.steady => mean,
                    0..=3 => 0,
                    4 => mean * 5,
                    _ => mean / 2 + rng.below32(mean + 1),
                };
                let plans = self.economy.busy(rng, logs);
                self.place(inner, plans)
            }
            Content::Full(logs) => {
                let plans = self.economy.busy(rng, logs);
                self.place(inner, plans)
            }
            Content::Harmless => {
                let plans = self.economy.harmless(rng, 3);
                self.place(inner, plans)
            }
            Content::Noise => {
                let plans = self.economy.noise_only(rng, 1 + mean / 4);
                self.place(inner, plans)
            }
            Content::Placed(placed) => {
                self.apply(&placed);
                placed
            }
            Content::Behind(placed) => {
                let transactions = 1 + rng.below32(3);
                let plans = self.economy.harmless(rng, transactions);
                let mut all = self.place(inner, plans);
                self.apply(&placed);
                all.extend(placed);
                all
            }
            Content::Rewritten(placed) => placed
                .into_iter()
                .filter_map(|one| {
                    let logs = count(one.plan.entries.len());
                    let plan = self.economy.transaction(rng, logs)?;
                    Some(Placed { plan, ..one })
                })
                .collect(),
        }
    }

    /// Gives planned transactions their hashes.
    fn place(&mut self, inner: &Inner, plans: Vec<Plan>) -> Vec<Placed> {
        plans
            .into_iter()
            .map(|plan| {
                let nonce = self.next_nonce;
                self.next_nonce += 1;
                // Unique per nonce, because the generator's key is a bijection of its last part.
                let hash = Rng::keyed(&[inner.config.chain_id, inner.config.seed, 0x7a_da5a, nonce]).bytes();
                Placed { hash, nonce, plan }
            })
            .collect()
    }

    fn apply(&mut self, placed: &[Placed]) {
        for entry in placed.iter().flat_map(|one| &one.plan.entries) {
            self.economy.apply(entry);
        }
    }

    /// Takes the newest block off the chain.
    fn pop(&mut self) -> Arc<Block> {
        let block = self.chain.pop().expect("reorgs stop above genesis");
        for entry in block.entries.iter().rev() {
            self.economy.undo(entry);
        }
        for tx in &block.txs {
            self.tx_places.remove(&tx.hash);
        }
        block
    }

    fn reorg(&mut self, inner: &Inner, depth: u64, kind: ReorgKind, new_blocks: u64) -> Vec<Arc<Block>> {
        let (depth, new_blocks) = match (kind, self.left_branch.first()) {
            (ReorgKind::Back, Some(lowest)) => {
                let depth = (self.head() + 1).saturating_sub(lowest.number);
                (depth, depth + 1)
            }
            _ => (depth.min(self.head()), new_blocks.max(1)),
        };
        self.branch += 1;
        let mut old: Vec<Arc<Block>> = (0..depth).map(|_| self.pop()).collect();
        old.reverse();
        let mut sealed = Vec::new();
        if kind == ReorgKind::Back {
            for block in std::mem::take(&mut self.left_branch) {
                for entry in &block.entries {
                    self.economy.apply(entry);
                }
                self.push(Arc::clone(&block));
                sealed.push(block);
            }
        }
        let mut again: Vec<Vec<Placed>> = old.iter().map(|block| block.unpack()).collect();
        if kind == ReorgKind::ReincludeLater {
            again.insert(0, Vec::new());
        }
        let same = matches!(
            kind,
            ReorgKind::ReincludeSame | ReorgKind::ReincludeShifted | ReorgKind::ReincludeLater
        );
        if same {
            self.economy.reserve(again.iter().flatten().flat_map(|one| &one.plan.entries));
        }
        let mut again = again.into_iter();
        while u64::from(count(sealed.len())) < new_blocks {
            let content = match (kind, again.next()) {
                (ReorgKind::Drop, _) => Content::Noise,
                (ReorgKind::Empty, _) => Content::Placed(Vec::new()),
                (ReorgKind::Replace | ReorgKind::Back, _) => Content::Busy,
                (ReorgKind::ReincludeSame, Some(placed)) => Content::Placed(placed),
                (ReorgKind::ReincludeShifted, Some(placed)) => Content::Behind(placed),
                (ReorgKind::ReincludeLater, Some(placed)) if placed.is_empty() && sealed.is_empty() => {
                    Content::Harmless
                }
                (ReorgKind::ReincludeLater, Some(placed)) => Content::Placed(placed),
                (ReorgKind::ReincludeChanged, Some(placed)) => Content::Rewritten(placed),
                (_, None) => Content::Busy,
            };
            sealed.push(self.extend(inner, content));
        }
        self.economy.reserve(std::iter::empty());
        self.left_branch = old;
        sealed
    }
}

/// Sum of all balances per contract and token: what was minted and not burned.
pub fn supply(truth: &Truth) -> std::collections::BTreeMap<(String, String), U256> {
    let mut supply = std::collections::BTreeMap::new();
    for ((contract, token_id, _), qty) in &truth.balances {
        let sum: &mut U256 = supply.entry((contract.clone(), token_id.clone())).or_default();
        *sum += *qty;
    }
    supply
}
