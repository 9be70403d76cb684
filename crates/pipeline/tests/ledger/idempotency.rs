//! S0 §16.3 for each worker: twice is once, two at once is once, a crash between is once.

use tidemark_model::chain::ParsedBlock;
use tidemark_model::ids::Height;
use tidemark_pipeline::workers::{
    BlockInput, BlockOutcome, Openings, advance_finality, handle_reorg, process_block,
};

use crate::world::{World, block, cause, class, owners, single, time_of};

const CLAIMS: &str = "select count(*) from ledger.applied_events where consumer = 'state-updater'";

#[tokio::test]
async fn normalizer_twice_is_once() {
    let world = World::new().await;
    let mint = class(1, 5, None, Some("a"), 10);
    world.done(block(0, 0), &[&mint]).await;
    assert_eq!(world.block(block(0, 0), &[&mint]).await, BlockOutcome::Skipped);
    // Also when the events come again by another way than their block: nothing changes, nothing is told.
    let mut conn = world.db.conn().await.expect("connects");
    let tx = conn.tx().await.expect("begins");
    let again = tidemark_pipeline::workers::normalize(
        &tx,
        &world.network,
        &[mint.at(block(0, 0))],
        Height(0),
        &Openings::default(),
        &cause("again"),
    )
    .await
    .expect("normalizes");
    tx.commit().await.expect("commits");
    assert_eq!((again.changed, again.drafts.len()), (0, 0));
    world.finalize(0).await;
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 10)]));
    world.holds().await;
}

#[tokio::test]
async fn the_same_event_twice_in_one_batch_is_one_event() {
    let world = World::new().await;
    let mint = class(1, 5, None, Some("a"), 10);
    world.done(block(0, 0), &[&mint, &mint, &mint]).await;
    world.finalize(0).await;
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 10)]));
    assert_eq!(world.count(CLAIMS).await, 1);
    world.holds().await;
}

#[tokio::test]
async fn normalizer_two_at_once_is_once() {
    let world = World::new().await;
    let acts: Vec<_> = (0..50).map(|token| class(token, token, None, Some("a"), 10)).collect();
    let acts: Vec<_> = acts.iter().collect();
    let (one, other) = tokio::join!(world.block(block(0, 0), &acts), world.block(block(0, 0), &acts));
    let done = [&one, &other].iter().filter(|outcome| matches!(outcome, BlockOutcome::Done(_))).count();
    assert_eq!(done, 1, "one wins, one finds it done");
    world.finalize(0).await;
    assert_eq!(world.finalized(acts[7].asset()).await, owners(&[("a", 10)]));
    assert_eq!(world.count(CLAIMS).await, 50);
    world.holds().await;
}

#[tokio::test]
async fn normalizer_crash_between_is_once() {
    let world = World::new().await;
    let mint = single(1, 5, None, Some("a"));
    {
        let mut conn = world.db.conn().await.expect("connects");
        let tx = conn.tx().await.expect("begins");
        let parsed = ParsedBlock { events: vec![mint.at(block(0, 0))], quarantined: Vec::new() };
        let input = BlockInput {
            block: block(0, 0),
            time: time_of(0),
            parsed: &parsed,
            chain_head: Height(0),
            openings: &Openings::default(),
        };
        process_block(&tx, &world.network, &input, &cause("lost")).await.expect("processes");
        // Dropped without commit: the process died here.
    }
    assert_eq!(world.count("select count(*) from ledger.normalized_events").await, 0);
    world.done(block(0, 0), &[&mint]).await;
    world.finalize(0).await;
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 1)]));
    world.holds().await;
}

#[tokio::test]
async fn state_updater_twice_is_once() {
    let world = World::new().await;
    let mint = class(1, 5, None, Some("a"), 10);
    world.done(block(0, 0), &[&mint]).await;
    let first = world.finalize(0).await;
    assert_eq!((first.events, first.applied, first.height), (1, 1, 0));
    let second = world.finalize(0).await;
    assert_eq!((second.events, second.drafts.len(), second.height), (0, 0, 0));
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 10)]));
    assert_eq!(world.count(CLAIMS).await, 1);
    assert_eq!(world.count("select count(*) from ledger.ownership_history").await, 1);
    world.holds().await;
}

#[tokio::test]
async fn state_updater_two_at_once_is_once() {
    let world = World::new().await;
    let mint = class(1, 5, None, Some("a"), 10);
    world.done(block(0, 0), &[&mint]).await;
    let (one, other) = tokio::join!(world.finalize(0), world.finalize(0));
    assert_eq!(one.applied + other.applied, 1);
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 10)]));
    assert_eq!(world.count(CLAIMS).await, 1);
    world.holds().await;
}

#[tokio::test]
async fn state_updater_crash_between_is_once() {
    let world = World::new().await;
    let mint = class(1, 5, None, Some("a"), 10);
    world.done(block(0, 0), &[&mint]).await;
    {
        let mut conn = world.db.conn().await.expect("connects");
        let tx = conn.tx().await.expect("begins");
        advance_finality(&tx, &world.network, Height(0), None, &cause("lost")).await.expect("advances");
    }
    assert_eq!(world.count(CLAIMS).await, 0);
    world.finalize(0).await;
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 10)]));
    assert_eq!(world.count(CLAIMS).await, 1);
    world.holds().await;
}

#[tokio::test]
async fn a_claimed_event_is_not_applied_again() {
    let world = World::new().await;
    let mint = class(1, 5, None, Some("a"), 10);
    world.done(block(0, 0), &[&mint]).await;
    world.execute("insert into ledger.applied_events (consumer, normalized_event_id) select 'state-updater', id from ledger.normalized_events").await;
    assert_eq!(world.finalize(0).await.applied, 0);
    assert_eq!(world.finalized(mint.asset()).await, owners(&[]));
}

#[tokio::test]
async fn reorg_handler_twice_is_once() {
    let world = World::new().await;
    let (mint, moved) = (class(1, 5, None, Some("a"), 10), class(2, 5, Some("a"), Some("b"), 4));
    world.done(block(0, 0), &[&mint]).await;
    world.done(block(1, 0), &[&moved]).await;
    let first = world.reorg(&[block(1, 0)], &[block(1, 1)]).await;
    let second = world.reorg(&[block(1, 0)], &[block(1, 1)]).await;
    assert_eq!((first.reverted, second.reverted, second.drafts.len()), (1, 0, 0));
    assert_eq!((first.head, second.head), (0, 0));
    world.done(block(1, 1), &[&moved]).await;
    world.reorg(&[block(1, 0)], &[block(1, 1)]).await;
    world.finalize(1).await;
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 6), ("b", 4)]));
    world.holds().await;
}

#[tokio::test]
async fn reorg_handler_two_at_once_is_once() {
    let world = World::new().await;
    let (mint, moved) = (class(1, 5, None, Some("a"), 10), class(2, 5, Some("a"), Some("b"), 4));
    world.done(block(0, 0), &[&mint]).await;
    world.done(block(1, 0), &[&moved]).await;
    let (orphaned, canonical) = ([block(1, 0)], [block(1, 1)]);
    let (one, other) = tokio::join!(world.reorg(&orphaned, &canonical), world.reorg(&orphaned, &canonical));
    assert_eq!(one.reverted + other.reverted, 1);
    assert_eq!(world.latest(mint.asset()).await, owners(&[("a", 10)]));
    world.holds().await;
}

#[tokio::test]
async fn reorg_handler_crash_between_is_once() {
    let world = World::new().await;
    let (mint, moved) = (class(1, 5, None, Some("a"), 10), class(2, 5, Some("a"), Some("b"), 4));
    world.done(block(0, 0), &[&mint]).await;
    world.done(block(1, 0), &[&moved]).await;
    {
        let mut conn = world.db.conn().await.expect("connects");
        let tx = conn.tx().await.expect("begins");
        handle_reorg(&tx, &world.network, &[block(1, 0)], &[block(1, 1)], &cause("lost"))
            .await
            .expect("handles");
    }
    assert_eq!(world.latest(mint.asset()).await, owners(&[("a", 6), ("b", 4)]));
    assert_eq!(world.reorg(&[block(1, 0)], &[block(1, 1)]).await.reverted, 1);
    assert_eq!(world.latest(mint.asset()).await, owners(&[("a", 10)]));
    world.holds().await;
}

#[tokio::test]
async fn finality_before_the_block_is_normalized_waits_for_it() {
    let world = World::new().await;
    let (mint, moved) = (class(1, 5, None, Some("a"), 10), class(2, 5, Some("a"), Some("b"), 4));
    world.done(block(0, 0), &[&mint]).await;
    assert_eq!(world.finalize(2).await.height, 0);
    assert_eq!(world.block(block(2, 0), &[]).await, BlockOutcome::Gap { head: 0 });
    world.done(block(1, 0), &[&moved]).await;
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 6), ("b", 4)]));
    // An older report never takes finality back.
    assert_eq!(world.finalize(0).await.height, 1);
    world.done(block(2, 0), &[]).await;
    assert_eq!(world.count("select finalized_height from ledger.network_progress").await, 2);
    world.holds().await;
}

#[tokio::test]
async fn pending_becomes_confirmed_and_stays_so() {
    let world = World::new().await;
    let mint = single(1, 5, None, Some("a"));
    world.done(block(0, 0), &[&mint]).await;
    assert_eq!(world.key(mint.id()).await.2, "pending");
    world.done(block(1, 0), &[]).await;
    let BlockOutcome::Done(drafts) = world.block(block(2, 0), &[]).await else { panic!("a gap") };
    let subjects: Vec<String> = drafts.iter().map(|draft| draft.subject.to_string()).collect();
    assert_eq!(subjects, ["ledger.block.normalized.v1"], "readers see it from heights");
    assert_eq!(world.key(mint.id()).await.2, "confirmed");
    world.holds().await;
    world.reorg(&[block(0, 0), block(1, 0), block(2, 0)], &[block(0, 1)]).await;
    assert_eq!(world.key(mint.id()).await.2, "reverted");
    world.done(block(0, 1), &[&mint]).await;
    assert_eq!(world.key(mint.id()).await.2, "pending", "its new block has nothing above it");
    world.holds().await;
}
