//! What a block, a batch or a gap means. Pure: no database, no node, no clock.

use std::time::Duration;

use tidemark_model::chain::{BlockCoverage, BlockRef, RawBatch, RawBlock};
use tidemark_model::ids::{BlockHash, Height, HeightRange};
use tidemark_store::raw::audit::Tile;

/// What the next block means for the chain we stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// It is the child of the newest stored block.
    Extend,
    /// It is not: some stored block at or below this height left the chain.
    FindAncestorBelow(Height),
    /// A block we know to be final is not its parent: the chain or the node is broken.
    Halt,
}

/// Decides what `next` means. `stored` is the newest stored block, `finalized` the newest height we have
/// ourselves confirmed as final; `None` while there is none.
pub fn next_step(stored: Option<BlockRef>, finalized: Option<Height>, next: &RawBlock) -> Step {
    let Some(stored) = stored else { return Step::Extend };
    if next.parent == stored.hash {
        Step::Extend
    } else if finalized.is_some_and(|line| stored.height <= line) {
        Step::Halt
    } else {
        Step::FindAncestorBelow(stored.height)
    }
}

/// How the next heights are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// By ranges below the finalized height, without events.
    History,
    /// One by one, with events.
    Tip,
}

/// Far below finality is history; at or near the tip every block has its event.
pub fn phase(next: Height, finalized: Option<Height>, gap_min: u64) -> Phase {
    match finalized {
        Some(line) if line.next().0.saturating_sub(next.0) > gap_min => Phase::History,
        _ => Phase::Tip,
    }
}

/// Longest pause between two looks at the head of a chain that does not move.
const PATIENCE_MAX: Duration = Duration::from_secs(15);

/// How long to wait for the next head when the last one came `quiet` ago: a twentieth of that, so that a
/// block of a slow chain is late by little of its own pace, and a chain that stands still costs little.
pub fn patience(poll_interval: Duration, quiet: Duration) -> Duration {
    poll_interval.max((quiet / 20).min(PATIENCE_MAX))
}

/// Why a batch cannot be believed, if it cannot. The adapter has checked what came from the node; this checks
/// the adapter, because what is written here is never asked again.
pub fn batch_fault(asked: HeightRange, batch: &RawBatch, parent: Option<BlockHash>) -> Option<String> {
    let covered = batch.covered;
    if covered.from() != asked.from() || covered.to() > asked.to() {
        return Some(format!("covered {covered} when asked for {asked}"));
    }
    let mut before: Option<&RawBlock> = None;
    let mut records = 0_u64;
    for block in &batch.blocks {
        if !covered.contains(block.height) {
            return Some(format!("block {} lies outside {covered}", block.block_ref()));
        }
        let expected_parent = match before {
            Some(before) if block.height <= before.height => {
                return Some(format!("block {} does not follow {}", block.block_ref(), before.block_ref()));
            }
            Some(before) => (before.height.next() == block.height).then_some(before.hash),
            None => (block.height == covered.from()).then_some(parent).flatten(),
        };
        if expected_parent.is_some_and(|parent| parent != block.parent) {
            return Some(format!("block {} is not the child of the block below it", block.block_ref()));
        }
        if let Some(index) = repeated_index(block) {
            return Some(format!("block {} has record {index} twice or out of order", block.block_ref()));
        }
        records += u64::try_from(block.records.len()).expect("a length fits in 64 bits");
        before = Some(block);
    }
    let blocks = u64::try_from(batch.blocks.len()).expect("a length fits in 64 bits");
    if batch.evidence.coverage == BlockCoverage::All && blocks != covered.blocks() {
        return Some(format!("{blocks} of {} blocks came for {covered}", covered.blocks()));
    }
    if records != batch.evidence.records {
        return Some(format!("{records} records came, the evidence says {}", batch.evidence.records));
    }
    None
}

fn repeated_index(block: &RawBlock) -> Option<u32> {
    let next =
        |pair: &[tidemark_model::chain::RawRecord]| (pair[0].index >= pair[1].index).then_some(pair[1].index);
    block.records.windows(2).find_map(next)
}

/// How many heights to ask for at once, so that an answer holds about as many records as one transaction
/// should. The adapter sizes its own requests to what its nodes allow; this bounds our memory.
#[derive(Debug, Clone, Copy)]
pub struct AskSize {
    blocks: u64,
    blocks_max: u64,
    records: u64,
}

/// Heights asked for while nothing is known of a chain: blocks of a busy one hold hundreds of records each.
const FIRST_BLOCKS: u64 = 32;

impl AskSize {
    /// Begins with `learned` heights, or small, and grows to at most `blocks_max`, aiming at `records` records.
    pub fn new(blocks_max: u64, records: u64, learned: Option<u64>) -> Self {
        let blocks_max = blocks_max.max(1);
        let blocks = learned.unwrap_or(FIRST_BLOCKS).clamp(1, blocks_max);
        Self { blocks, blocks_max, records: records.max(1) }
    }
    /// Heights to ask for now.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }
    /// Learns from an answer of `records` records over `blocks` heights.
    pub fn learn(&mut self, blocks: u64, records: u64) {
        let fitting = blocks.saturating_mul(self.records) / records.max(1);
        // Twice as much at most: the next blocks may be denser.
        self.blocks = fitting.min(self.blocks.saturating_mul(2)).clamp(1, self.blocks_max);
    }
    /// The answer was too large for every node.
    pub fn halve(&mut self) {
        self.blocks = (self.blocks / 2).max(1);
    }
}

/// The parts of `range` that no tile covers. `tiles` are in order.
pub fn uncovered(range: HeightRange, tiles: &[Tile]) -> Vec<HeightRange> {
    let mut open = Vec::new();
    let mut at = range.from();
    for tile in tiles {
        open.extend(HeightRange::new(at, tile.range.from().min(range.to())));
        at = at.max(tile.range.to());
    }
    open.extend(HeightRange::new(at, range.to()));
    open
}

#[cfg(test)]
mod tests {
    use tidemark_model::OffsetDateTime;
    use tidemark_model::chain::{RangeEvidence, RawRecord};
    use tidemark_model::ids::TxId;

    use super::*;

    fn hash(name: u8) -> BlockHash {
        BlockHash([name; 32])
    }

    fn block(height: u64, name: u8, parent: u8) -> RawBlock {
        RawBlock {
            height: Height(height),
            hash: hash(name),
            parent: hash(parent),
            time: OffsetDateTime::UNIX_EPOCH,
            tx_count: None,
            transactions: vec![],
            records: vec![],
            payload: None,
        }
    }

    fn record(index: u32) -> RawRecord {
        RawRecord {
            tx: TxId::from([1; 32]),
            tx_index: 0,
            index,
            emitter: vec![].into(),
            topics: vec![].into(),
            data: vec![].into(),
            payload: None,
        }
    }

    fn range(from: u64, to: u64) -> HeightRange {
        HeightRange::new(Height(from), Height(to)).expect("not empty")
    }

    #[track_caller]
    fn check(parent: u8, finalized: Option<u64>, expected: Step) {
        let stored = BlockRef { height: Height(5), hash: hash(b'a') };
        assert_eq!(next_step(Some(stored), finalized.map(Height), &block(6, b'x', parent)), expected);
    }

    #[test]
    fn a_child_extends() {
        check(b'a', Some(3), Step::Extend);
        check(b'a', Some(5), Step::Extend);
        check(b'a', None, Step::Extend);
    }

    #[test]
    fn a_stranger_above_finality_starts_the_search() {
        check(b'b', Some(4), Step::FindAncestorBelow(Height(5)));
        check(b'b', None, Step::FindAncestorBelow(Height(5)));
    }

    #[test]
    fn a_stranger_at_finality_halts() {
        check(b'b', Some(5), Step::Halt);
    }

    #[test]
    fn the_first_block_extends_nothing() {
        assert_eq!(next_step(None, None, &block(0, b'a', 0)), Step::Extend);
    }

    #[test]
    fn history_begins_when_the_gap_is_wide() {
        assert_eq!(phase(Height(10), None, 0), Phase::Tip);
        assert_eq!(phase(Height(10), Some(Height(9)), 0), Phase::Tip);
        assert_eq!(phase(Height(10), Some(Height(10)), 0), Phase::History);
        assert_eq!(phase(Height(10), Some(Height(14)), 5), Phase::Tip);
        assert_eq!(phase(Height(10), Some(Height(15)), 5), Phase::History);
    }

    fn batch(from: u64, to: u64, blocks: Vec<RawBlock>) -> RawBatch {
        let records = blocks.iter().map(|block| u64::try_from(block.records.len()).expect("small")).sum();
        let evidence = RangeEvidence {
            provider: "p".into(),
            head_seen: Height(to),
            records,
            foreign: 0,
            requests: 1,
            checks: vec![],
            coverage: BlockCoverage::All,
        };
        RawBatch { covered: range(from, to), blocks, evidence }
    }

    #[test]
    fn a_linked_batch_is_believed() {
        let batch = batch(1, 3, vec![block(1, 1, 0), block(2, 2, 1)]);
        assert_eq!(batch_fault(range(1, 9), &batch, Some(hash(0))), None);
        assert!(batch_fault(range(1, 9), &batch, Some(hash(7))).is_some(), "another parent");
        assert!(batch_fault(range(1, 2), &batch, None).is_some(), "more than asked");
        assert!(batch_fault(range(0, 9), &batch, None).is_some(), "not from the start");
    }

    #[test]
    fn holes_breaks_and_repeats_are_refused() {
        assert!(batch_fault(range(1, 3), &batch(1, 3, vec![block(1, 1, 0)]), None).is_some(), "a hole");
        let broken = batch(1, 3, vec![block(1, 1, 0), block(2, 2, 9)]);
        assert!(batch_fault(range(1, 3), &broken, None).is_some(), "a broken link");
        let mut twice = batch(1, 2, vec![block(1, 1, 0)]);
        twice.blocks[0].records = vec![record(3), record(3)];
        twice.evidence.records = 2;
        assert!(batch_fault(range(1, 2), &twice, None).is_some(), "a record twice");
        let mut fewer = batch(1, 2, vec![block(1, 1, 0)]);
        fewer.evidence.records = 1;
        assert!(batch_fault(range(1, 2), &fewer, None).is_some(), "a record less");
    }

    #[test]
    fn the_ask_follows_the_density_of_records() {
        let mut ask = AskSize::new(20_000, 10_000, None);
        assert_eq!(ask.blocks(), 32, "a busy chain must not fill the memory with its first answer");
        ask.learn(32, 0);
        assert_eq!(ask.blocks(), 64);
        for _ in 0..10 {
            ask.learn(ask.blocks(), 10);
        }
        assert_eq!(ask.blocks(), 20_000);
        ask.learn(20_000, 2_000_000);
        assert_eq!(ask.blocks(), 100);
        ask.learn(1, 1_000_000);
        assert_eq!(ask.blocks(), 1);
        ask.halve();
        assert_eq!(ask.blocks(), 1);
        assert_eq!(AskSize::new(20_000, 10_000, Some(700)).blocks(), 700);
        assert_eq!(AskSize::new(500, 10_000, Some(700)).blocks(), 500);
    }

    #[test]
    fn a_quiet_chain_is_asked_less_often() {
        let (poll, second) = (Duration::from_millis(300), Duration::from_secs(1));
        assert_eq!(patience(poll, second), poll);
        assert_eq!(patience(poll, 12 * second), second * 12 / 20);
        assert_eq!(patience(poll, 86_400 * second), 15 * second);
        assert_eq!(patience(20 * second, 86_400 * second), 20 * second, "a longer pause was asked for");
    }

    #[test]
    fn uncovered_parts_are_what_tiles_leave() {
        let tile = |from, to| Tile {
            range: range(from, to),
            records: 0,
            coverage: BlockCoverage::All,
            provider: String::new(),
        };
        assert_eq!(uncovered(range(0, 10), &[]), [range(0, 10)]);
        assert_eq!(uncovered(range(5, 10), &[tile(0, 6), tile(6, 8)]), [range(8, 10)]);
        assert_eq!(uncovered(range(0, 10), &[tile(2, 4), tile(8, 20)]), [range(0, 2), range(4, 8)]);
        assert_eq!(uncovered(range(0, 10), &[tile(0, 10)]), []);
    }
}
