//! Reorgs: depth 1, k, the limit, past it; during history, during another; there and back.

use std::sync::atomic::{AtomicBool, Ordering};

use tidemark_store::cursor;
use tidemark_store::raw::orphans;

use super::fake::FakeChain;
use super::*;

/// A chain with 40 blocks, finality at 20, followed to its end; then a reorg of `depth`.
async fn check(depth: u64) {
    let world = World::new(FakeChain::new(0, 40, Some(20))).await;
    let running = world.start(options("a"));
    running.reach(40).await;
    let old = world.chain.chain.lock().unwrap().head().clone();
    world.chain.change(|chain| chain.reorg(depth, 2));
    running.reach(42).await;
    // The orphan is kept for late readers until finality passes it.
    let conn = world.conn().await;
    let orphan = orphans::read(&conn, &world.blobs, NETWORK, &old.hash).await.unwrap().expect("kept aside");
    assert_eq!(orphan.records, old.records);
    world.assert_equals_chain().await;
    world.assert_events_from(21).await;
    assert_eq!(
        world.scalar("select count(*) from system.reorg_checkpoints where is_canonical").await,
        i64::try_from(depth).unwrap()
    );
    world.chain.change(|chain| chain.finalized = Some(41));
    running.wait_for("finality", |status| status.finalized == Some(Height(41))).await;
    running.end().await;
    assert_eq!(world.scalar("select count(*) from raw.orphaned_blocks").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reorg_of_one_block_is_repaired() {
    check(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reorg_of_some_blocks_is_repaired() {
    check(5).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reorg_at_the_limit_is_repaired() {
    check(8).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reorg_past_the_limit_halts_until_told() {
    let world = World::new(FakeChain::new(0, 40, Some(20))).await;
    let running = world.start(options("a"));
    running.reach(40).await;
    world.chain.change(|chain| chain.reorg(9, 2));
    running.wait_for("the halt", |status| status.state == "halted").await;
    let conn = world.conn().await;
    eventually("the reason", async || {
        let head = cursor::head(&conn, NETWORK).await.unwrap().unwrap();
        head.halted.is_some_and(|reason| reason.contains("MAX_REORG_DEPTH"))
    })
    .await;
    running.end().await;
    // A restart stays halted; nothing was taken out.
    let running = world.start(options("a"));
    running.wait_for("still halted", |status| status.state == "halted").await;
    assert_eq!(world.scalar("select last_processed_block from system.sync_cursors").await, 39);
    assert_eq!(world.scalar("select count(*) from raw.orphaned_blocks").await, 0);
    // The nodes come to their senses; the operator lets it go on.
    let truth = FakeChain::new(0, 45, Some(20));
    world.chain.change(|chain| *chain = truth.chain.into_inner().unwrap());
    eventually("the end of the halt", async || cursor::unhalt(&conn, NETWORK).await.unwrap()).await;
    running.reach(45).await;
    running.end().await;
    world.assert_equals_chain().await;
    assert!(world.scalar("select count(*) from app.indexing_errors where severity = 'FATAL'").await > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_final_block_halts() {
    let world = World::new(FakeChain::new(0, 40, Some(36))).await;
    let running = world.start(options("a"));
    running.reach(40).await;
    world.chain.change(|chain| chain.reorg(5, 2));
    let status = running.wait_for("the halt", |status| status.state == "halted").await;
    assert!(status.last_error.unwrap().contains("final"));
    running.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reorg_while_we_were_away_is_repaired_before_history() {
    let world = World::new(FakeChain::new(0, 40, Some(20))).await;
    world.catch_up().await;
    // Finality has passed the heights we hold on the dead branch.
    world.chain.change(|chain| {
        chain.reorg(6, 150);
        chain.finalized = Some(170);
    });
    world.catch_up().await;
    world.assert_equals_chain().await;
    let seen = world.replayed().await;
    let chain = world.chain.chain.lock().unwrap();
    for height in 34..40 {
        assert_eq!(seen[&height], chain.at(height).unwrap().hash.to_string());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reorg_during_history_touches_only_the_tip() {
    let world = World::new(FakeChain::new(0, 300, Some(280))).await;
    let did = AtomicBool::new(false);
    *world.chain.on_fetch.lock().unwrap() = Some(Box::new(move |chain, range| {
        if range.from().0 > 100 && !did.swap(true, Ordering::Relaxed) {
            chain.reorg(7, 3);
        }
    }));
    world.catch_up().await;
    let running = world.start(options("a"));
    running.reach(world.height()).await;
    running.end().await;
    world.assert_equals_chain().await;
    world.assert_events_from(281).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reorg_during_a_reorg_starts_over() {
    let world = World::new(FakeChain::new(0, 40, Some(20))).await;
    let running = world.start(options("a"));
    running.reach(40).await;
    let left = std::sync::atomic::AtomicU32::new(3);
    *world.chain.on_fetch.lock().unwrap() = Some(Box::new(move |chain, _| {
        // Three fetches in a row see the chain change under them.
        if left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
            chain.reorg(4, 1);
        }
    }));
    world.chain.change(|chain| chain.reorg(6, 1));
    eventually("the whole chain", async || {
        let next = world.height();
        let truth = world.chain.chain.lock().unwrap().head().hash;
        let conn = world.conn().await;
        let cursor = cursor::read(&conn, "evm:7:shard-0").await.unwrap();
        cursor.next.0 == next && cursor.last_hash == Some(truth)
    })
    .await;
    running.end().await;
    world.assert_equals_chain().await;
    world.assert_events_from(21).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn there_and_back_gives_new_facts_each_time() {
    let world = World::new(FakeChain::new(0, 40, Some(20))).await;
    let running = world.start(options("a"));
    running.reach(40).await;
    let old = world.chain.chain.lock().unwrap().blocks.clone();
    for round in 0..4_u64 {
        let mut branch = Vec::new();
        world.chain.change(|chain| {
            branch = chain.blocks.clone();
            if round % 2 == 0 {
                chain.reorg(4, 0);
            } else {
                chain.blocks = old.clone();
            }
        });
        let truth = world.chain.chain.lock().unwrap().head().hash;
        eventually("the swap", async || {
            let conn = world.conn().await;
            cursor::read(&conn, "evm:7:shard-0").await.unwrap().last_hash == Some(truth)
        })
        .await;
    }
    running.end().await;
    world.assert_equals_chain().await;
    world.assert_events_from(21).await;
    let reorgs = "select count(*) from test_outbox where subject = 'chain.reorg.detected.v1'";
    assert_eq!(world.scalar(reorgs).await, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_ingesters_make_one_reorg() {
    let world = World::new(FakeChain::new(0, 40, Some(20))).await;
    let first = world.start(options("a"));
    let second = world.start(options("b"));
    first.reach(40).await;
    for _ in 0..5 {
        world.chain.change(|chain| chain.reorg(5, 1));
        let truth = world.chain.chain.lock().unwrap().head().hash;
        eventually("the swap", async || {
            let conn = world.conn().await;
            cursor::read(&conn, "evm:7:shard-0").await.unwrap().last_hash == Some(truth)
        })
        .await;
    }
    first.end().await;
    second.end().await;
    world.assert_equals_chain().await;
    world.assert_events_from(21).await;
}
