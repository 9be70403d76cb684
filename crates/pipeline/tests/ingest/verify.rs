//! The proof of completeness finds what was made to be missing.

use tidemark_pipeline::ingest::verify::{Problem, repair_lookups};

use super::fake::FakeChain;
use super::*;

async fn full() -> World {
    let world = World::new(FakeChain::new(0, 130, Some(110))).await;
    world.catch_up().await;
    world
}

async fn problems(world: &World) -> Vec<Problem> {
    let conn = world.conn().await;
    verify_completeness(&conn, NETWORK, world.all()).await.expect("verifies").problems
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_range_is_named() {
    let world = full().await;
    assert_eq!(problems(&world).await, []);
    let row = world
        .conn()
        .await
        .query_one("cut", "delete from raw.range_evidence where from_height <= 45 and to_height > 45 returning from_height, to_height", &[])
        .await
        .expect("cuts");
    let gap = HeightRange::new(Height::from_i64(row.get(0)), Height::from_i64(row.get(1)));
    assert_eq!(problems(&world).await, [Problem::Gap(gap.expect("a range"))]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_event_is_named() {
    let world = full().await;
    world.execute("delete from raw.events where block_height = 64 and event_index = 3").await;
    let found = problems(&world).await;
    assert!(
        found.iter().any(
            |problem| matches!(problem, Problem::RecordCount { range, .. } if range.contains(Height(64)))
        )
    );
    assert!(
        found.iter().any(|problem| matches!(problem, Problem::Events(count) if count.height == Height(64)))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_block_a_stranger_and_a_broken_link_are_named() {
    let world = full().await;
    world.execute("delete from raw.blocks where height = 121").await;
    world.execute("update raw.blocks set parent_hash = hash where height = 125").await;
    world.execute("update raw.events set block_hash = tx_id where block_height = 124").await;
    let found = problems(&world).await;
    assert!(found.iter().any(|problem| matches!(problem, Problem::MissingBlocks { .. })));
    assert!(
        found
            .iter()
            .any(|problem| matches!(problem, Problem::BrokenLink(block) if block.height == Height(125)))
    );
    assert!(found.iter().any(|problem| matches!(problem, Problem::Events(count) if count.strangers > 0)));
    assert!(
        found.iter().any(|problem| matches!(problem, Problem::Events(count) if count.promised.is_none()))
    );
    for problem in found {
        assert!(!problem.to_string().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lookups_are_repaired_both_ways() {
    let world = full().await;
    world.execute("delete from raw.tx_lookup where block_height between 10 and 20").await;
    world.execute("update raw.block_lookup set id = '\\x00' where height = 31").await;
    world.execute("insert into raw.tx_lookup select * from raw.tx_lookup where block_height = 44").await;
    let mut conn = world.conn().await;
    let repaired = repair_lookups(&mut conn, NETWORK, world.all()).await.expect("repairs");
    assert!(repaired.tx_added > 0 && repaired.tx_removed > 0);
    assert_eq!((repaired.block_removed, repaired.block_added), (1, 1));
    world.assert_equals_chain().await;
    let again = repair_lookups(&mut conn, NETWORK, world.all()).await.expect("repairs");
    assert_eq!(again, Default::default());
}
