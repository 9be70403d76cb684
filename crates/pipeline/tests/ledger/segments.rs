//! History in bulk equals history block by block.

use rand::Rng as _;
use tidemark_model::chain::RawEvent;
use tidemark_model::ids::{Height, HeightRange};
use tidemark_pipeline::workers::{Openings, SegmentInput, SegmentOutcome, apply_segment};

use crate::random::owned;
use crate::truth::Truth;
use crate::world::{World, block, cause, class, owners, single};

impl World {
    /// Applies `first..=last` in bulk.
    pub(crate) async fn segment(&self, first: u64, last: u64, events: &[RawEvent]) -> SegmentOutcome {
        let range = HeightRange::inclusive(Height(first), Height(last)).expect("not empty");
        let openings = Openings::default();
        let input = SegmentInput { range, events, quarantined: &[], openings: &openings };
        let mut conn = self.db.conn().await.expect("connects");
        let tx = conn.tx().await.expect("begins");
        let outcome =
            apply_segment(&tx, &self.network, &input, &cause(range)).await.expect("applies the segment");
        tx.commit().await.expect("commits");
        outcome
    }
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
            let outcome = bulk.segment(first, last_height, &events).await;
            assert!(matches!(outcome, SegmentOutcome::Applied(_)), "{outcome:?}");
            assert_eq!(bulk.segment(first, last_height, &events).await, SegmentOutcome::Skipped);
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
    assert!(one == SegmentOutcome::Skipped || other == SegmentOutcome::Skipped);
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 10)]));
    world.holds().await;
}

#[tokio::test]
async fn a_segment_lost_in_a_crash_is_applied_once() {
    let world = World::new().await;
    let mint = class(1, 5, None, Some("a"), 10);
    let events = [mint.at(block(3, 0))];
    {
        let range = HeightRange::inclusive(Height(0), Height(5)).expect("not empty");
        let openings = Openings::default();
        let input = SegmentInput { range, events: &events, quarantined: &[], openings: &openings };
        let mut conn = world.db.conn().await.expect("connects");
        let tx = conn.tx().await.expect("begins");
        apply_segment(&tx, &world.network, &input, &cause("lost")).await.expect("applies");
    }
    world.segment(0, 5, &events).await;
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
    assert_eq!(world.segment(4, 20, &[]).await, SegmentOutcome::Gap { head: 1 });
    let events = [lost.at(block(7, 1)), back.at(block(9, 1))];
    let outcome = world.segment(2, 20, &events).await;
    assert!(matches!(outcome, SegmentOutcome::Applied(ref segment) if segment.applied == 2), "{outcome:?}");
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
    let outcome = world.segment(100, 150, &events).await;
    let SegmentOutcome::Applied(segment) = outcome else { panic!("{outcome:?}") };
    assert_eq!(segment.quarantined, [thief.id()]);
    assert_eq!(world.finalized(moved.asset()).await, owners(&[("b", 1)]));
    assert_eq!(world.finalized(spent.asset()).await, owners(&[("y", 4)]));
    world.holds().await;
}
