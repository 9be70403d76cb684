//! What the ingester stores of a chain and says about it, in the order in which it commits. Blocks below
//! finality after a pause are history: stored, and not spoken of.

use std::collections::BTreeMap;
use std::sync::Arc;

use rand::Rng as _;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use tidemark_model::chain::{BlockRef, RawBlock};
use tidemark_model::ids::Height;

use crate::chain::Chain;

/// One event of stream `chain`.
#[derive(Debug, Clone)]
pub(crate) enum Message {
    Block { block: Arc<RawBlock>, head: Height },
    Reorg { number: usize, orphaned: Vec<BlockRef>, canonical: Vec<BlockRef> },
    Final { block: BlockRef },
}

impl Message {
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Block { block, .. } => format!("block {}", short(&block.block_ref())),
            Self::Reorg { number, orphaned, canonical } => {
                let names = |blocks: &[BlockRef]| blocks.iter().map(short).collect::<Vec<_>>().join(" ");
                format!("reorg #{number} [{}] by [{}]", names(orphaned), names(canonical))
            }
            Self::Final { block } => format!("final {}", short(block)),
        }
    }
}

fn short(block: &BlockRef) -> String {
    let hash = block.hash.to_string();
    format!("{}:{}", block.height, hash.get(2..6).unwrap_or(&hash))
}

/// A gap below finality of this many blocks is history.
const HISTORY_GAP_MIN: u64 = 3;

/// The ingester's raw store and outbox of one network.
#[derive(Default)]
pub(crate) struct Feed {
    pub(crate) stored: BTreeMap<u64, Arc<RawBlock>>,
    pub(crate) finalized: Option<u64>,
    pub(crate) messages: Vec<Message>,
    announced: Option<u64>,
    reorgs: usize,
}

impl Feed {
    pub(crate) fn tip(&self) -> Option<u64> {
        self.stored.last_key_value().map(|(height, _)| *height)
    }

    /// Looks at the chain once: repairs a reorg, or takes at most `most` blocks; then finality.
    pub(crate) fn pull(&mut self, chain: &Chain, most: u64, random: &mut StdRng) {
        if let Some(tip) = self.tip() {
            match chain.link(tip) {
                // Shorter than ours for a moment: not a reorg.
                None => return,
                Some(there) if there.hash != self.stored[&tip].hash => {
                    self.swap(chain, tip, random);
                    return;
                }
                Some(_) => {}
            }
        }
        let finalized = chain.sim.finalized();
        let mut next = self.tip().map_or(chain.network.start_block.0, |tip| tip + 1);
        if finalized >= next && finalized - next >= HISTORY_GAP_MIN {
            for height in next..=finalized {
                self.store(chain, height);
            }
            next = finalized + 1;
        }
        let head = chain.sim.head();
        for height in next..=head.min(next + most - 1) {
            let block = self.store(chain, height);
            self.messages.push(Message::Block { block, head: Height(head) });
        }
        self.finalize(chain, finalized);
    }

    /// Records finality and says so, once our own chain reaches it.
    pub(crate) fn finalize(&mut self, chain: &Chain, height: u64) {
        let Some(block) = self.stored.get(&height) else { return };
        if self.announced.is_some_and(|announced| announced >= height) {
            return;
        }
        assert_eq!(Some(block.block_ref()), chain.link(height), "the feed follows the chain");
        self.messages.push(Message::Final { block: block.block_ref() });
        self.announced = Some(height);
        self.finalized = Some(height);
    }

    fn store(&mut self, chain: &Chain, height: u64) -> Arc<RawBlock> {
        let block = Arc::new(chain.raw_block(height).expect("a canonical block"));
        self.stored.insert(height, Arc::clone(&block));
        block
    }

    /// Old branch out, new branch in. Sometimes the message comes behind some of the blocks it speaks of,
    /// and sometimes a block of the old branch comes after all.
    fn swap(&mut self, chain: &Chain, tip: u64, random: &mut StdRng) {
        let lowest = (0..=tip)
            .rev()
            .take_while(|height| {
                let ours = self.stored.get(height).map(|block| block.block_ref());
                ours.is_some() && ours != chain.link(*height)
            })
            .last()
            .expect("the tip is gone");
        let gone: Vec<Arc<RawBlock>> = self.stored.split_off(&lowest).into_values().collect();
        let new: Vec<Arc<RawBlock>> = (lowest..=tip).map(|height| self.store(chain, height)).collect();
        let refs = |blocks: &[Arc<RawBlock>]| blocks.iter().map(|block| block.block_ref()).collect();
        self.reorgs += 1;
        let reorg = Message::Reorg { number: self.reorgs, orphaned: refs(&gone), canonical: refs(&new) };
        let head = Height(chain.sim.head().max(tip));
        let said = |block: &Arc<RawBlock>| Message::Block { block: Arc::clone(block), head };
        let mut branch: Vec<Message> = new.iter().map(said).collect();
        let at = if random.random_bool(0.3) { random.random_range(0..=branch.len()) } else { 0 };
        branch.insert(at, reorg);
        if random.random_bool(0.4) {
            let late = said(gone.choose(random).expect("one is gone"));
            branch.insert(random.random_range(at + 1..=branch.len()), late);
        }
        self.messages.extend(branch);
    }
}
