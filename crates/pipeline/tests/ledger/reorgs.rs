//! S0 §16.2 and what it leaves out. Every scenario ends with all invariants holding.

use crate::world::{Act, World, block, class, owners, single};
use tidemark_pipeline::workers::{BlockOutcome, WorkError};

/// Blocks 1 to `last` of branch 0, the first with these acts.
async fn start(world: &World, first: &[&Act], last: u64) {
    world.done(block(0, 0), &[]).await;
    world.done(block(1, 0), first).await;
    for height in 2..=last {
        world.done(block(height, 0), &[]).await;
    }
}

#[tokio::test]
async fn simple_reorg_removes_the_event() {
    let world = World::new().await;
    let (mint, moved) = (single(1, 5, None, Some("a")), single(2, 5, Some("a"), Some("b")));
    start(&world, &[&mint], 1).await;
    world.finalize(1).await;
    world.done(block(2, 0), &[&moved]).await;
    assert_eq!(world.latest(mint.asset()).await, owners(&[("b", 1)]));
    let done = world.reorg(&[block(2, 0)], &[block(2, 1)]).await;
    assert_eq!((done.reverted, done.head), (1, 1));
    assert_eq!(world.latest(mint.asset()).await, owners(&[("a", 1)]));
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 1)]));
    let (_, _, status, reverted) = world.key(moved.id()).await;
    assert_eq!((status.as_str(), reverted), ("reverted", true));
    world.done(block(2, 1), &[]).await;
    world.finalize(2).await;
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 1)]));
    world.holds().await;
}

#[tokio::test]
async fn re_inclusion_moves_the_same_event_to_the_new_block() {
    let world = World::new().await;
    let (mint, moved) = (single(1, 5, None, Some("a")), single(2, 5, Some("a"), Some("b")));
    start(&world, &[&mint], 1).await;
    world.done(block(2, 0), &[&moved]).await;
    world.reorg(&[block(2, 0)], &[block(2, 1), block(3, 1)]).await;
    world.done(block(2, 1), &[]).await;
    world.done(block(3, 1), &[&moved]).await;
    let (height, hash, _, reverted) = world.key(moved.id()).await;
    assert_eq!((height, hash, reverted), (3, block(3, 1).hash.0.to_vec(), false));
    world.finalize(3).await;
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("b", 1)]));
    world.holds().await;
}

#[tokio::test]
async fn re_inclusion_with_a_shifted_log_index_applies_once() {
    let world = World::new().await;
    let mint = class(1, 5, None, Some("a"), 10);
    let moved = class(2, 5, Some("a"), Some("b"), 3);
    let shifted = moved.clone().index(4);
    start(&world, &[&mint], 1).await;
    world.done(block(2, 0), &[&moved]).await;
    world.reorg(&[block(2, 0)], &[block(2, 1)]).await;
    world.done(block(2, 1), &[&shifted]).await;
    assert_eq!(world.latest(mint.asset()).await, owners(&[("a", 7), ("b", 3)]));
    world.finalize(2).await;
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 7), ("b", 3)]));
    world.holds().await;
}

#[tokio::test]
async fn replacement_leaves_no_phantom() {
    let world = World::new().await;
    let mint = single(1, 5, None, Some("a"));
    let (lost, won) = (single(2, 5, Some("a"), Some("b")), single(3, 5, Some("a"), Some("c")));
    start(&world, &[&mint], 1).await;
    world.done(block(2, 0), &[&lost]).await;
    world.reorg(&[block(2, 0)], &[block(2, 1)]).await;
    world.done(block(2, 1), &[&won]).await;
    assert_eq!(world.latest(mint.asset()).await, owners(&[("c", 1)]));
    world.finalize(2).await;
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("c", 1)]));
    world.holds().await;
}

#[tokio::test]
async fn deep_reorg_rebuilds_everything_it_touched() {
    let world = World::new().await;
    let mints: Vec<Act> = (1..=5).map(|token| class(token, token, None, Some("a"), 10)).collect();
    world.done(block(0, 0), &[]).await;
    world.done(block(1, 0), &mints.iter().collect::<Vec<_>>()).await;
    world.done(block(2, 0), &[]).await;
    world.finalize(2).await;
    let old: Vec<Act> = (3..=5).map(|token| class(10 + token, token, Some("a"), Some("b"), token)).collect();
    for (height, act) in (3..).zip(&old) {
        world.done(block(height, 0), &[act]).await;
    }
    let orphaned = [block(3, 0), block(4, 0), block(5, 0)];
    let canonical = [block(3, 1), block(4, 1), block(5, 1)];
    let done = world.reorg(&orphaned, &canonical).await;
    assert_eq!((done.reverted, done.head, done.touched_assets.len()), (3, 2, 3));
    // Two of the three come back, in another order, and something new.
    let new = class(30, 1, Some("a"), Some("c"), 2);
    world.done(block(3, 1), &[&old[1]]).await;
    world.done(block(4, 1), &[&old[0], &new]).await;
    world.done(block(5, 1), &[]).await;
    world.finalize(5).await;
    world.finalize(5).await;
    assert_eq!(world.finalized(mints[0].asset()).await, owners(&[("a", 8), ("c", 2)]));
    assert_eq!(world.finalized(mints[2].asset()).await, owners(&[("a", 7), ("b", 3)]));
    assert_eq!(world.finalized(mints[3].asset()).await, owners(&[("a", 6), ("b", 4)]));
    assert_eq!(world.finalized(mints[4].asset()).await, owners(&[("a", 10)]));
    world.holds().await;
}

#[tokio::test]
async fn a_batch_of_classes_is_rolled_back_whole() {
    let world = World::new().await;
    let mints: Vec<Act> = (0..5).map(|sub| class(1, sub.into(), None, Some("a"), 10).sub(sub)).collect();
    let moves: Vec<Act> =
        (0..5).map(|sub| class(2, sub.into(), Some("a"), Some("b"), 1 + u64::from(sub)).sub(sub)).collect();
    world.done(block(0, 0), &mints.iter().collect::<Vec<_>>()).await;
    world.finalize(0).await;
    world.done(block(1, 0), &moves.iter().collect::<Vec<_>>()).await;
    let done = world.reorg(&[block(1, 0)], &[block(1, 1)]).await;
    assert_eq!(done.reverted, 5);
    for mint in &mints {
        assert_eq!(world.latest(mint.asset()).await, owners(&[("a", 10)]));
        assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 10)]));
    }
    world.holds().await;
}

#[tokio::test]
async fn the_message_of_a_reorg_may_come_after_the_new_branch() {
    let world = World::new().await;
    let mint = single(1, 5, None, Some("a"));
    let (kept, lost) = (single(2, 5, Some("a"), Some("b")), single(3, 5, Some("b"), Some("c")));
    start(&world, &[&mint], 1).await;
    world.done(block(2, 0), &[&kept]).await;
    world.done(block(3, 0), &[&lost]).await;
    world.done(block(2, 1), &[&kept]).await;
    world.done(block(3, 1), &[]).await;
    // Nothing from the fork on may become final while both branches are here.
    assert_eq!(world.finalize(3).await.height, 1);
    // A block of the old branch comes again: nothing moves back.
    assert_eq!(world.block(block(2, 0), &[&kept]).await, BlockOutcome::Skipped);
    let done = world.reorg(&[block(2, 0), block(3, 0)], &[block(2, 1), block(3, 1)]).await;
    assert_eq!((done.reverted, done.head), (1, 3));
    world.done(block(4, 1), &[]).await;
    assert_eq!(world.count("select finalized_height from ledger.network_progress").await, 3);
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("b", 1)]));
    world.holds().await;
}

#[tokio::test]
async fn an_event_of_an_orphaned_block_that_comes_late_is_stored_reverted() {
    let world = World::new().await;
    let mint = single(1, 5, None, Some("a"));
    let (late, kept) = (single(2, 5, Some("a"), Some("b")), single(3, 5, Some("a"), Some("c")));
    start(&world, &[&mint], 1).await;
    world.reorg(&[block(2, 0)], &[block(2, 1)]).await;
    world.done(block(2, 1), &[&kept]).await;
    let BlockOutcome::Done(drafts) = world.block(block(2, 0), &[&late, &kept]).await else { panic!("done") };
    // It is in the log, so it is told: as reverted, once, and the one that stands elsewhere is not.
    let told: Vec<_> =
        drafts.iter().map(|draft| (draft.subject.to_string(), draft.payload["events"].clone())).collect();
    let named = told[0].1.as_array().expect("events of a block");
    assert_eq!((told.len(), told[0].0.as_str(), named.len()), (1, "ledger.event.reverted.v2", 1));
    assert_eq!(named[0]["event_id"], late.id().to_string());
    assert_eq!(world.block(block(2, 0), &[&late, &kept]).await, BlockOutcome::Done(Vec::new()));
    assert_eq!(world.key(late.id()).await.2, "reverted");
    let (_, hash, status, _) = world.key(kept.id()).await;
    assert_eq!((hash, status.as_str()), (block(2, 1).hash.0.to_vec(), "pending"));
    world.finalize(2).await;
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("c", 1)]));
    world.holds().await;
}

#[tokio::test]
async fn a_block_that_comes_back_brings_its_events_back() {
    let world = World::new().await;
    let (mint, moved) = (single(1, 5, None, Some("a")), single(2, 5, Some("a"), Some("b")));
    start(&world, &[&mint], 1).await;
    world.done(block(2, 0), &[&moved]).await;
    world.reorg(&[block(2, 0)], &[block(2, 1)]).await;
    world.done(block(2, 1), &[]).await;
    let back = world.reorg(&[block(2, 1)], &[block(2, 0)]).await;
    assert_eq!((back.restored, back.head), (1, 1));
    let names: Vec<String> = back.drafts.iter().map(|draft| draft.subject.to_string()).collect();
    assert_eq!(names, ["ledger.event.normalized.v1", "ledger.ownership.changed.v1"]);
    assert_eq!(world.latest(mint.asset()).await, owners(&[("b", 1)]));
    world.done(block(2, 0), &[&moved]).await;
    world.finalize(2).await;
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("b", 1)]));
    world.holds().await;
}

#[tokio::test]
async fn executed_again_a_transaction_may_say_something_else() {
    let world = World::new().await;
    // The counter stood elsewhere: the same log makes token 6 instead of 5.
    let (five, six) = (single(1, 5, None, Some("a")), single(1, 6, None, Some("a")));
    world.done(block(0, 0), &[]).await;
    world.done(block(1, 0), &[&five]).await;
    world.done(block(1, 1), &[&six]).await;
    world.reorg(&[block(1, 0)], &[block(1, 1)]).await;
    assert_eq!(world.latest(five.asset()).await, owners(&[]));
    assert_eq!(world.latest(six.asset()).await, owners(&[("a", 1)]));
    world.finalize(1).await;
    assert_eq!(world.finalized(five.asset()).await, owners(&[]));
    assert_eq!(world.finalized(six.asset()).await, owners(&[("a", 1)]));
    world.holds().await;
}

#[tokio::test]
async fn a_reorg_below_finality_is_refused_and_changes_nothing() {
    let world = World::new().await;
    let mint = single(1, 5, None, Some("a"));
    start(&world, &[&mint], 3).await;
    world.finalize(2).await;
    let error = world.try_reorg(&[block(2, 0), block(3, 0)], &[block(2, 1)]).await;
    assert!(matches!(error, Err(WorkError::FinalizedReverted { finalized: 2, .. })), "{error:?}");
    assert_eq!(world.count("select count(*) from ledger.orphaned_blocks").await, 0);
    // One above is the last that may go.
    world.reorg(&[block(3, 0)], &[block(3, 1)]).await;
    world.holds().await;
}

#[tokio::test]
async fn an_old_reorg_message_after_finality_changes_nothing() {
    let world = World::new().await;
    let mint = single(1, 5, None, Some("a"));
    start(&world, &[&mint], 2).await;
    world.reorg(&[block(2, 0)], &[block(2, 1)]).await;
    for height in 2..=5 {
        world.done(block(height, 1), &[]).await;
    }
    world.finalize(4).await;
    let again = world.reorg(&[block(2, 0)], &[block(2, 1)]).await;
    assert_eq!((again.reverted, again.restored, again.head), (0, 0, 5));
    assert!(again.drafts.is_empty());
    world.holds().await;
}

#[tokio::test]
async fn a_rewind_rebuilds_from_the_log_and_finality_applies_it_again() {
    let world = World::new().await;
    let mint = class(1, 5, None, Some("a"), 10);
    let (moved, burnt) = (class(2, 5, Some("a"), Some("b"), 4), class(3, 5, Some("b"), None, 1));
    start(&world, &[&mint], 1).await;
    world.finalize(1).await;
    let early = world.digest().await;
    world.done(block(2, 0), &[&moved]).await;
    world.done(block(3, 0), &[&burnt]).await;
    world.finalize(3).await;
    let late = world.digest().await;
    // Drift, made by hand, goes with the rewind.
    world.execute("update ledger.ownership_current set qty = qty + 1 where qty = 6").await;
    assert!(!world.violations().await.is_empty());
    assert_eq!(world.rewind(1).await.reverted, 2);
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 10)]));
    assert_eq!(world.latest(mint.asset()).await, owners(&[("a", 6), ("b", 3)]));
    assert_eq!(world.digest().await, early);
    world.holds().await;
    world.finalize(3).await;
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 6), ("b", 3)]));
    assert_eq!(world.digest().await, late);
    world.holds().await;
}

#[tokio::test]
async fn finality_of_a_block_we_have_another_version_of_waits_for_the_reorg() {
    let world = World::new().await;
    let mint = single(1, 5, None, Some("a"));
    start(&world, &[&mint], 2).await;
    let mut conn = world.db.conn().await.expect("connects");
    let tx = conn.tx().await.expect("begins");
    let named = block(2, 1);
    let error = tidemark_pipeline::workers::advance_finality(
        &tx,
        &world.network,
        named.height,
        Some(named.hash),
        &crate::world::cause("final"),
    )
    .await;
    assert!(matches!(error, Err(WorkError::ReorgExpected { block, .. }) if block == named), "{error:?}");
    tx.rollback().await.expect("ends");
    world.reorg(&[block(2, 0)], &[named]).await;
    world.done(named, &[]).await;
    assert_eq!(world.finalize(2).await.height, 2);
    world.holds().await;
}

#[tokio::test]
async fn an_old_reorg_message_does_not_bring_back_what_has_lost_since() {
    let world = World::new().await;
    let (mint, moved) = (single(1, 5, None, Some("a")), single(2, 5, Some("a"), Some("b")));
    start(&world, &[&mint], 2).await;
    world.reorg(&[block(2, 0)], &[block(2, 1)]).await;
    world.done(block(2, 1), &[&moved]).await;
    world.reorg(&[block(2, 1)], &[block(2, 2)]).await;
    world.done(block(2, 2), &[]).await;
    let again = world.reorg(&[block(2, 0)], &[block(2, 1)]).await;
    assert_eq!((again.restored, again.head), (0, 2));
    assert_eq!(world.latest(mint.asset()).await, owners(&[("a", 1)]));
    world.holds().await;
}

#[tokio::test]
async fn a_repair_heals_what_a_foreign_hand_changed() {
    let world = World::new().await;
    let mint = class(1, 5, None, Some("a"), 10);
    start(&world, &[&mint], 1).await;
    world.finalize(1).await;
    let digest = world.digest().await;
    world.execute("update ledger.ownership_current set qty = 99").await;
    world.execute("update ledger.digests set digest = 5").await;
    world.execute("update catalog.assets set supply = 7").await;
    let mut conn = world.db.conn().await.expect("connects");
    let tx = conn.tx().await.expect("begins");
    let assets = [mint.asset()].into();
    tidemark_pipeline::workers::repair(&tx, &world.network, &assets, &crate::world::cause("repair"))
        .await
        .expect("repairs");
    tx.commit().await.expect("commits");
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 10)]));
    assert_eq!(world.digest().await, digest);
    world.holds().await;
}
