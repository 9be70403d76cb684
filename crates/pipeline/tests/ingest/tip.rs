//! The tip loop.

use serde_json::json;

use super::fake::FakeChain;
use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn new_blocks_and_finality_are_told_in_order() {
    let world = World::new(FakeChain::new(0, 30, Some(20))).await;
    let running = world.start(options("a"));
    running.reach(30).await;
    world.chain.change(|chain| {
        chain.grow(3);
        chain.finalized = Some(24);
    });
    running.wait_for("finality 24", |status| status.finalized == Some(Height(24))).await;
    running.reach(33).await;
    running.end().await;
    world.assert_equals_chain().await;
    world.assert_events_from(21).await;
    let drafts = world.drafts().await;
    let finality: Vec<_> =
        drafts.iter().filter(|(subject, _)| subject == "chain.finality.advanced.v1").collect();
    assert_eq!(finality.len(), 2);
    assert_eq!(finality[1].1["finalized_height"], 24);
    let block = &drafts.iter().find(|(_, payload)| payload["height"] == 30).expect("block 30").1;
    assert_eq!(block["network_id"], 7);
    assert_eq!(block["head_height"], 32);
    assert_eq!(block["block_time"], json!("2023-11-14T22:13:50Z"));
    assert_eq!(world.scalar("select latest_height from system.network_heads").await, 32);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_that_goes_back_is_not_a_reorg() {
    let world = World::new(FakeChain::new(0, 30, Some(10))).await;
    let running = world.start(options("a"));
    running.reach(30).await;
    let mut kept = Vec::new();
    world.chain.change(|chain| kept = chain.drop_last(4));
    running.wait_for("the lagging head", |status| status.head == Some(Height(25))).await;
    world.chain.change(|chain| {
        chain.blocks.extend(kept);
        chain.grow(1);
    });
    running.reach(31).await;
    running.end().await;
    world.assert_equals_chain().await;
    assert_eq!(world.scalar("select count(*) from system.reorg_checkpoints").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_at_the_tip_are_recorded_and_waited_out() {
    let world = World::new(FakeChain::new(0, 30, None)).await;
    for _ in 0..5 {
        world.chain.fail(world.chain.unavailable());
    }
    world.catch_up().await;
    world.assert_equals_chain().await;
    let counted = "select sum(occurrences)::bigint from app.indexing_errors";
    assert_eq!(world.scalar(counted).await, 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn tip_and_history_need_no_consumer() {
    // Nothing reads the outbox here, and nothing ever waits for it: raw-only mode.
    let world = World::new(FakeChain::new(0, 400, Some(350))).await;
    world.catch_up().await;
    world.assert_equals_chain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_holds_one_chain_for_ever() {
    let world = World::new(FakeChain::new(0, 20, None)).await;
    let say = |name: &str| name.clone_into(&mut world.chain.identity.lock().unwrap());
    let kept = async || {
        let row = world.conn().await.query_one("ask", "select chain_identity from ref.networks", &[]).await;
        row.expect("a network").get::<_, String>(0)
    };
    world.catch_up().await;
    assert_eq!(kept().await, "chain 7, genesis unknown");
    // What was not known is filled in, once.
    say("chain 7, genesis 0xaa");
    world.catch_up().await;
    say("chain 7, genesis unknown");
    world.catch_up().await;
    assert_eq!(kept().await, "chain 7, genesis 0xaa");
    say("chain 7, genesis 0xbb");
    let running = world.start(options("a"));
    let ended = tokio::time::timeout(DEADLINE, running.task).await.expect("ends").expect("no panic");
    let error = ended.expect_err("another chain").to_string();
    assert!(error.contains("0xbb") && error.contains("0xaa"), "{error}");
    assert_eq!(kept().await, "chain 7, genesis 0xaa");
    say("chain 7, genesis 0xaa");
    world.catch_up().await;
}
