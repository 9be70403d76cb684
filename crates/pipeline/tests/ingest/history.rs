//! History by leases, committer, reaper, poison pills.

use std::time::Duration;

use tidemark_model::chain::{BlockCoverage, ChainError};
use tidemark_model::ids::{Height, HeightRange};
use tidemark_store::cursor;
use tidemark_store::lease::{ATTEMPTS_MAX, Leases};

use super::fake::FakeChain;
use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn history_then_tip_equals_the_chain() {
    let world = World::new(FakeChain::new(0, 215, Some(197))).await;
    world.catch_up().await;
    world.assert_equals_chain().await;
    world.assert_events_from(198).await;
    assert!(world.scalar("select count(*) from raw.partitions where indexed_at is not null").await > 0);
    assert_eq!(world.scalar("select count(*) from app.worker_leases where status = 'COMPLETED'").await, 9);
    assert!(world.scalar("select count(*) from raw.events where payload_ref is not null").await > 0);
    let height = world.scalar("select height from app.indexing_checkpoints").await;
    assert_eq!(height, 214);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_inside_a_range_and_full_headers_are_the_same() {
    let mut chain = FakeChain::new(33, 180, Some(203));
    chain.history_coverage = BlockCoverage::All;
    let world = World::new(chain).await;
    world.catch_up().await;
    world.assert_equals_chain().await;
    assert_eq!(world.scalar("select count(*) from raw.blocks").await, 180);
    world.assert_events_from(204).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_answers_are_waited_out() {
    let world = World::new(FakeChain::new(0, 130, Some(110))).await;
    for _ in 0..10 {
        world.chain.fail(world.chain.unavailable());
        world.chain.fail(ChainError::TooLarge { network: "fake".into(), what: "blocks".into() });
    }
    world.catch_up().await;
    world.assert_equals_chain().await;
    let errors =
        "select coalesce(sum(occurrences), 0)::bigint from app.indexing_errors where severity = 'WARN'";
    assert!(world.scalar(errors).await >= 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn twice_is_once() {
    let world = World::new(FakeChain::new(0, 120, Some(100))).await;
    world.catch_up().await;
    let before = world.drafts().await;
    world.catch_up().await;
    world.assert_equals_chain().await;
    assert_eq!(world.drafts().await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_at_once_is_once() {
    let world = World::new(FakeChain::new(0, 300, Some(250))).await;
    let first = world.start(options("a"));
    let second = world.start(options("b"));
    first.reach(300).await;
    for _ in 0..20 {
        world.chain.change(|chain| {
            chain.grow(3);
            chain.finalized = Some(chain.next() - 40);
        });
        first.reach(world.height()).await;
    }
    first.end().await;
    second.end().await;
    world.assert_equals_chain().await;
    world.assert_events_from(251).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_is_read_as_history_and_leaves_no_hole() {
    let world = World::new(FakeChain::new(0, 60, Some(45))).await;
    world.catch_up().await;
    world.chain.change(|chain| {
        chain.grow(200);
        chain.finalized = Some(240);
    });
    world.catch_up().await;
    world.assert_equals_chain().await;
    let seen = world.replayed().await;
    assert!(seen.contains_key(&59) && !seen.contains_key(&60) && seen.contains_key(&241));
}

fn leases(holder: &str, ttl: Duration) -> Leases {
    Leases {
        worker_type: "raw_ingester:shard-0".into(),
        network: NETWORK,
        holder: holder.into(),
        ttl,
        range_size: 20,
    }
}

async fn claim(world: &World, leases: &Leases, end: u64) -> Option<tidemark_store::lease::Lease> {
    let mut conn = world.conn().await;
    let tx = conn.tx().await.unwrap();
    let lease = leases.claim(&tx, Height(5), Height(end)).await.unwrap();
    tx.commit().await.unwrap();
    lease
}

fn range(from: u64, to: u64) -> HeightRange {
    HeightRange::new(Height(from), Height(to)).unwrap()
}

#[tokio::test]
async fn a_lease_lives_expires_and_is_fenced() {
    let world = World::new(FakeChain::new(0, 1, None)).await;
    let dying = leases("dying", Duration::ZERO);
    let living = leases("living", Duration::from_secs(60));
    let lost = claim(&world, &dying, 60).await.unwrap();
    assert_eq!(lost.range, range(0, 20));
    assert_eq!(claim(&world, &living, 60).await.unwrap().range, range(20, 40));
    let reaped = dying.reap(&world.conn().await).await.unwrap();
    assert_eq!((reaped.failed, reaped.poisoned.len()), (1, 0));
    // FAILED comes before new, and the old holder is fenced.
    let again = claim(&world, &living, 60).await.unwrap();
    assert_eq!((again.range, again.attempt, again.epoch), (range(0, 20), 1, lost.epoch + 1));
    let mut conn = world.conn().await;
    let tx = conn.tx().await.unwrap();
    assert!(matches!(dying.hold(&tx, &lost).await, Err(StoreError::Fenced { .. })));
    living.hold(&tx, &again).await.unwrap();
    living.complete(&tx, &again).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(claim(&world, &living, 60).await.unwrap().range, range(40, 60));
    assert_eq!(claim(&world, &living, 60).await, None, "the next range would end above the limit");
}

#[tokio::test]
async fn only_the_reaper_counts_and_five_make_a_poison_pill() {
    let world = World::new(FakeChain::new(0, 1, None)).await;
    let dying = leases("dying", Duration::ZERO);
    let conn = world.conn().await;
    for attempt in 1..=ATTEMPTS_MAX {
        let lease = claim(&world, &dying, 20).await.unwrap();
        assert_eq!(lease.attempt, attempt - 1);
        // Released in order: not counted, claimed again at once.
        dying.release(&conn, &lease).await.unwrap();
        let lease = claim(&world, &dying, 20).await.unwrap();
        assert_eq!(lease.attempt, attempt - 1);
        dying.give_up(&conn, &lease, "it broke").await.unwrap();
        let reaped = dying.reap(&conn).await.unwrap();
        assert_eq!(reaped.poisoned.len(), usize::from(attempt == ATTEMPTS_MAX));
    }
    assert_eq!(claim(&world, &dying, 20).await, None, "a poison pill is not claimed");
    assert_eq!(dying.poisoned(&conn).await.unwrap()[0].last_error.as_deref(), Some("it broke"));
    assert_eq!(dying.reset_poisoned(&conn).await.unwrap(), 1);
    assert!(claim(&world, &dying, 20).await.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_committer_does_not_jump_over_a_poison_pill() {
    let world = World::new(FakeChain::new(0, 120, Some(110))).await;
    world
        .execute(
            "insert into app.worker_leases (worker_type, network_id, from_height, to_height, status, leased_by,
                                            lease_expires_at, attempt)
             values ('raw_ingester:shard-0', 7, 0, 20, 'COMPLETED', 'x', now(), 0),
                    ('raw_ingester:shard-0', 7, 20, 40, 'FAILED', 'x', now(), 5)",
        )
        .await;
    let running = world.start(options("a"));
    eventually("the other ranges", async || {
        world.scalar("select count(*) from app.worker_leases where status = 'COMPLETED'").await == 4
    })
    .await;
    let conn = world.conn().await;
    assert_eq!(cursor::read(&conn, "evm:7:shard-0").await.unwrap().next, Height(20));
    let poisoned = leases("a", Duration::ZERO);
    poisoned.reset_poisoned(&conn).await.unwrap();
    running.reach(120).await;
    running.end().await;
    // The first range was only claimed to be done: the proof names it.
    let report = verify_completeness(&conn, NETWORK, range(0, 120)).await.unwrap();
    assert_eq!(report.gaps(), [range(0, 20)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_holder_is_replaced_after_its_lease() {
    let world = World::new(FakeChain::new(0, 120, Some(110))).await;
    let dead = leases("dead", Duration::from_millis(300));
    claim(&world, &dead, 20).await.unwrap();
    world.catch_up().await;
    world.assert_equals_chain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_without_finality_is_all_tip() {
    let world = World::new(FakeChain::new(0, 90, None)).await;
    // No finality at all: everything is tip.
    world.catch_up().await;
    world.assert_equals_chain().await;
    world.assert_events_from(0).await;
}
