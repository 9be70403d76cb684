//! A crash at every named place, and at random ones: no gap, no duplicate, no manual step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::fake::FakeChain;
use super::*;

const PLACES: [&str; 12] = [
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
    "reorg.fetched",
];

/// Runs with a crash at the `nth` visit of `place` until the chain is stored; says whether it crashed.
async fn run_with_crash(world: &World, instance: &str, place: &'static str, nth: u32) -> bool {
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
            run_with_crash(&world, "a", place, nth).await;
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
