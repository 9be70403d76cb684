//! A crash at every named place, and at random ones: no gap, no duplicate, no manual step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::fake::FakeChain;
use super::*;

pub(crate) const PLACES: [&str; 11] = [
    "lease.before_commit",
    "lease.after_commit",
    "lease.before_complete",
    "lease.after_complete",
    "commit.before",
    "commit.after",
    "tail.before_commit",
    "tail.after_commit",
    "tip.before_commit",
    "tip.after_commit",
    "finality.before_commit",
];

/// Runs with a crash at the `nth` visit of `place` until the chain is stored; says whether it crashed.
pub(crate) async fn run_with_crash(world: &World, instance: &str, place: &'static str, nth: u32) -> bool {
    let visits = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&visits);
    let mut options = options(instance);
    options.crash =
        Some(Arc::new(move |at| at == place && counter.fetch_add(1, Ordering::Relaxed) + 1 == nth));
    let running = world.start(options);
    let height = Height(world.height());
    let mut status = running.ingester.status();
    let mut task = running.task;
    tokio::select! {
        ended = &mut task => {
            assert!(matches!(ended.unwrap(), Err(IngestError::Crashed { at }) if at == place));
            true
        }
        reached = tokio::time::timeout(DEADLINE, status.wait_for(|status| status.next == Some(height))) => {
            reached.expect("in time").expect("lives");
            running.stop.cancel();
            // The stop may meet the crash on its way.
            matches!(task.await.unwrap(), Err(IngestError::Crashed { .. }))
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn crash_between_is_once() {
    for place in PLACES {
        let world = World::new(FakeChain::new(0, 130, Some(112))).await;
        for nth in [1, 2] {
            let crashed = run_with_crash(&world, "a", place, nth).await;
            assert!(crashed || nth > 1, "{place} was not visited");
            world.chain.change(|chain| {
                chain.grow(2);
                chain.finalized = chain.finalized.map(|height| height + 2);
            });
        }
        world.catch_up().await;
        world.assert_equals_chain().await;
        let seen = world.replayed().await;
        let chain = world.chain.chain.lock().unwrap();
        for (height, hash) in &seen {
            assert_eq!(*hash, chain.at(*height).unwrap().hash.to_string(), "{place}");
        }
        assert_eq!(seen.keys().next_back(), Some(&(chain.next() - 1)), "{place}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_inside_a_reorg_leaves_the_old_or_the_new_chain() {
    for place in ["reorg.fetched", "reorg.before_commit", "reorg.after_commit"] {
        let world = World::new(FakeChain::new(0, 40, Some(20))).await;
        world.catch_up().await;
        world.chain.change(|chain| chain.reorg(5, 2));
        assert!(run_with_crash(&world, "a", place, 1).await, "{place} was not visited");
        world.catch_up().await;
        world.assert_equals_chain().await;
        world.assert_events_from(21).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_kills_during_one_history_need_no_hand() {
    let world = World::new(FakeChain::new(0, 900, Some(880))).await;
    let mut seed = 0x9e37_79b9_u32;
    for kill in 0..50 {
        let running = world.start(options(if kill % 2 == 0 { "a" } else { "b" }));
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Killed as by kill -9: the task is dropped wherever it is.
        let _ = tokio::time::timeout(
            Duration::from_millis(u64::from(seed >> 25)),
            running.ingester.status().wait_for(|status| status.next == Some(Height(900))),
        )
        .await;
        running.task.abort();
        let _ = running.task.await;
    }
    world.catch_up().await;
    world.assert_equals_chain().await;
    world.assert_events_from(881).await;
}

/// Numbers that a failing seed gives again.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// Growth, reorgs above finality, finality, bad answers and kills in any order end in the chain itself.
pub(crate) async fn storm(seed: u64, shards: u32) {
    let mut dice = Dice(seed);
    let chain = FakeChain::new(dice.below(30), 60 + dice.below(60), None);
    let world = World::sharded(chain, shards).await;
    world.chain.answer_blocks.store(1 + dice.below(15), Ordering::Relaxed);
    let mut running = vec![world.start(options("a"))];
    for _ in 0..40 {
        match dice.below(6) {
            0 => world.chain.change(|chain| chain.grow(1 + dice.below(40))),
            1 => world.chain.change(|chain| {
                let free = chain.next() - 1 - chain.finalized.unwrap_or(chain.next() - 9);
                let depth = 1 + dice.below(8);
                if depth <= free {
                    chain.reorg(depth, dice.below(3));
                }
            }),
            2 => world.chain.change(|chain| {
                // Nodes never finalize what may still be replaced by more than the limit.
                let line = chain.next() - 1 - dice.below(9);
                chain.finalized = chain.finalized.max(Some(line));
            }),
            3 => {
                for _ in 0..dice.below(4) {
                    world.chain.fail(world.chain.unavailable());
                }
            }
            4 => {
                for killed in running.drain(..) {
                    killed.task.abort();
                    let _ = killed.task.await;
                }
                running.push(world.start(options("a")));
                if dice.below(2) == 0 {
                    running.push(world.start(options("b")));
                }
            }
            _ => tokio::time::sleep(Duration::from_millis(dice.below(30))).await,
        }
    }
    let (height, truth) = (Height(world.height()), world.chain.chain.lock().unwrap().head().hash);
    let deadline = tokio::time::Instant::now() + DEADLINE / 2;
    eventually(&format!("the end of seed {seed}"), async || {
        if tokio::time::Instant::now() > deadline {
            let now: Vec<_> = running.iter().map(|run| run.ingester.status().borrow().clone()).collect();
            panic!("seed {seed} does not reach {height} of {truth}: {now:?}");
        }
        world.is_at_the_end().await
    })
    .await;
    for last in running {
        last.end().await;
    }
    world.assert_equals_chain().await;
    let seen = world.replayed().await;
    let chain = world.chain.chain.lock().unwrap();
    for (height, hash) in &seen {
        assert_eq!(*hash, chain.at(*height).unwrap().hash.to_string(), "seed {seed}, height {height}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn any_order_of_events_ends_in_the_chain() {
    let seeds = std::env::var("TIDEMARK_STORM_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(4);
    for seed in 0..seeds {
        storm(seed, 1).await;
    }
}
