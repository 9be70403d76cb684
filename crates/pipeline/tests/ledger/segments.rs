//! History in bulk equals history block by block.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use rand::Rng as _;
use tidemark_model::U256;
use tidemark_model::chain::{
    BalanceAsk, BlockLink, ChainAdapter, ChainError, FetchMode, Head, Network, ParsedBlock, RawBatch,
    RawBlock, RawEvent,
};
use tidemark_model::ids::{BlockHash, Height, HeightRange};
use tidemark_pipeline::history::{HistoryError, apply_blocks};
use tidemark_store::bulk;

use crate::random::owned;
use crate::truth::Truth;
use crate::world::{NETWORK, World, block, class, owners, single};

/// A chain that knows no old balances.
struct Silent(Network);

#[async_trait]
impl ChainAdapter for Silent {
    fn network(&self) -> &Network {
        &self.0
    }
    async fn head(&self) -> Result<Head, ChainError> {
        unreachable!("history does not ask for the head")
    }
    async fn next_head(&self, _: &Head, _: Duration) -> Result<Head, ChainError> {
        unreachable!("history does not ask for the head")
    }
    async fn fetch(&self, _: HeightRange, _: FetchMode) -> Result<RawBatch, ChainError> {
        unreachable!("history reads raw.*")
    }
    async fn link_at(&self, _: Height) -> Result<Option<BlockLink>, ChainError> {
        unreachable!("history is final")
    }
    fn parse(&self, _: &RawBlock) -> ParsedBlock {
        unreachable!("blocks are given parsed")
    }
    async fn balances(&self, asks: &[BalanceAsk]) -> Result<Vec<Option<U256>>, ChainError> {
        Ok(vec![None; asks.len()])
    }
    fn requests(&self) -> u64 {
        0
    }
}

impl World {
    /// Applies `first..=last` in bulk and gives the number of events.
    pub(crate) async fn segment(
        &self,
        first: u64,
        last: u64,
        events: &[RawEvent],
    ) -> Result<u64, HistoryError> {
        let range = HeightRange::inclusive(Height(first), Height(last)).expect("not empty");
        let mut blocks: BTreeMap<Height, (RawBlock, ParsedBlock)> = BTreeMap::new();
        for event in events {
            let entry = blocks.entry(event.block_number).or_insert_with(|| {
                let block = RawBlock {
                    height: event.block_number,
                    hash: event.block_hash,
                    parent: BlockHash::default(),
                    time: event.event_time,
                    tx_count: None,
                    transactions: vec![],
                    records: vec![],
                    payload: None,
                };
                (block, ParsedBlock::default())
            });
            entry.1.events.push(event.clone());
        }
        let blocks: Vec<_> = blocks.into_values().collect();
        let mut conn = self.db.conn().await.expect("connects");
        let partition = format!(
            "do $$ begin
                 create table projection.transfers_t partition of projection.transfers for values in ({NETWORK});
             exception when duplicate_table or unique_violation then null; end $$"
        );
        conn.batch("partition", &partition).await.expect("partitions");
        bulk::ensure_progress(&conn, NETWORK, self.network.start_block).await.expect("progress");
        apply_blocks(&mut conn, &Silent(self.network.clone()), range, &blocks).await
    }
}

fn fenced(outcome: Result<u64, HistoryError>) -> bool {
    outcome.is_err_and(|error| error.to_string().contains("moved by another worker"))
}

fn events_of(truth: &Truth, first: usize, last: usize) -> Vec<RawEvent> {
    let blocks = &truth.chain[first..=last];
    blocks.iter().flat_map(|block| block.acts.iter().map(|act| act.at(block.at))).collect()
}

#[tokio::test]
async fn a_segment_equals_its_blocks_one_by_one() {
    for seed in 200..206 {
        let mut truth = Truth::new(seed);
        let mut again = Vec::new();
        for _ in 0..50 {
            truth.extend(&mut again);
        }
        let live = World::new().await;
        let bulk = World::new().await;
        for block in &truth.chain {
            live.done(block.at, &block.acts.iter().collect::<Vec<_>>()).await;
        }
        live.finalize(50).await;
        let mut next = 0;
        while next < 40 {
            let last = (next + truth.random.random_range(0..15)).min(39);
            let events = events_of(&truth, next, last);
            let (first, last_height) =
                (u64::try_from(next).expect("small"), u64::try_from(last).expect("small"));
            bulk.segment(first, last_height, &events).await.expect("applies");
            assert!(fenced(bulk.segment(first, last_height, &events).await), "a second time is refused");
            next = last + 1;
        }
        // The rest live, on top of the bulk.
        for block in &truth.chain[40..] {
            bulk.done(block.at, &block.acts.iter().collect::<Vec<_>>()).await;
        }
        bulk.finalize(50).await;
        assert_eq!(&owned(&bulk).await, truth.state_at(50), "seed {seed}");
        assert_eq!(bulk.digest().await, live.digest().await, "seed {seed}");
        let rows = "select count(*) from ledger.ownership_history";
        assert_eq!(bulk.count(rows).await, live.count(rows).await, "seed {seed}");
        bulk.holds().await;
        live.holds().await;
    }
}

#[tokio::test]
async fn two_segments_at_once_are_one() {
    let world = World::new().await;
    let mint = class(1, 5, None, Some("a"), 10);
    let events = [mint.at(block(3, 0))];
    let (one, other) = tokio::join!(world.segment(0, 5, &events), world.segment(0, 5, &events));
    assert_eq!([one, other].into_iter().filter(Result::is_ok).count(), 1);
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 10)]));
    world.holds().await;
}

#[tokio::test]
async fn after_an_outage_history_takes_over_from_live_and_gives_back() {
    let world = World::new().await;
    let (mint, moved) = (single(1, 5, None, Some("a")), single(2, 5, Some("a"), Some("b")));
    let (lost, back) = (single(3, 5, Some("b"), Some("c")), single(4, 6, None, Some("d")));
    world.done(block(0, 0), &[&mint]).await;
    world.done(block(1, 0), &[&moved]).await;
    world.done(block(2, 0), &[&lost]).await;
    world.reorg(&[block(2, 0)], &[block(2, 1)]).await;
    // A long silence; blocks 2 to 20 are final meanwhile, and what was reverted is in one of them.
    assert!(fenced(world.segment(4, 20, &[]).await), "a gap below is refused");
    let events = [lost.at(block(7, 1)), back.at(block(9, 1))];
    assert!(fenced(world.segment(2, 20, &events).await), "what live left open is finished first");
    world.finalize(1).await;
    assert_eq!(world.segment(2, 20, &events).await.expect("applies"), 2);
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("c", 1)]));
    world.done(block(21, 1), &[&single(5, 6, Some("d"), None)]).await;
    world.finalize(21).await;
    assert_eq!(world.finalized(back.asset()).await, owners(&[]));
    world.holds().await;
}

#[tokio::test]
async fn openings_and_refusals_are_the_same_in_bulk() {
    let world = World::starting_at(100).await;
    let moved = single(1, 5, Some("a"), Some("b"));
    let spent = class(2, 7, Some("x"), Some("y"), 4).index(1);
    let thief = single(3, 5, Some("z"), Some("y")).index(2);
    let events = [moved.at(block(110, 0)), spent.at(block(110, 0)), thief.at(block(120, 0))];
    world.segment(100, 150, &events).await.expect("applies");
    let quarantined = "select count(*) from ledger.quarantine where resolved_at is null";
    assert_eq!(world.count(quarantined).await, 1);
    assert_eq!(world.finalized(moved.asset()).await, owners(&[("b", 1)]));
    assert_eq!(world.finalized(spent.asset()).await, owners(&[("y", 4)]));
    world.holds().await;
}
