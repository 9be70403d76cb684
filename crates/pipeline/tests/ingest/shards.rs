//! Several shards see what one sees: the same raw store, the same events, through kills and reorgs.

use tidemark_model::chain::BlockCoverage;
use tidemark_pipeline::ingest::verify::Problem;

use super::crash::{PLACES, run_with_crash, storm};
use super::fake::FakeChain;
use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn three_shards_store_and_tell_what_one_does() {
    let coverages = [BlockCoverage::WithRecords, BlockCoverage::All];
    for coverage in coverages {
        let chain = || {
            let mut chain = FakeChain::new(0, 215, Some(197));
            chain.history_coverage = coverage;
            chain
        };
        let (one, three) = (World::new(chain()).await, World::sharded(chain(), 3).await);
        for world in [&one, &three] {
            world.catch_up().await;
            world.assert_equals_chain().await;
            world.assert_events_from(198).await;
        }
        // Shards may stop at another final height, so that the first events differ; the rest is the same.
        let events = |drafts: Vec<(String, Value)>| -> Vec<(String, Value)> {
            drafts.into_iter().filter(|(_, payload)| payload["height"].as_u64() >= Some(198)).collect()
        };
        assert_eq!(events(three.drafts().await), events(one.drafts().await));
        assert_eq!(three.scalar("select count(*) from system.sync_cursors").await, 3);
        let checkpoint = "select height from app.indexing_checkpoints";
        assert_eq!(three.scalar(checkpoint).await, one.scalar(checkpoint).await);
        for table in ["raw.events", "raw.tx_lookup", "raw.blocks", "raw.block_lookup"] {
            let count = format!("select count(*) from {table}");
            // With records only, shards may store a height as history that one stores as tip.
            if coverage == BlockCoverage::All || table == "raw.events" {
                assert_eq!(three.scalar(&count).await, one.scalar(&count).await, "{table}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shards_survive_a_crash_anywhere() {
    for place in PLACES {
        let world = World::sharded(FakeChain::new(0, 130, Some(112)), 3).await;
        for nth in [1, 3] {
            let crashed = run_with_crash(&world, "a", place, nth).await;
            assert!(crashed || nth > 1, "{place} was not visited");
            world.chain.change(|chain| {
                chain.grow(2);
                chain.finalized = chain.finalized.map(|height| height + 2);
            });
        }
        world.catch_up().await;
        world.assert_equals_chain().await;
        world.replayed().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shards_killed_in_history_need_no_hand() {
    let world = World::sharded(FakeChain::new(0, 600, Some(580)), 3).await;
    for kill in 0..20_u64 {
        let running = world.start(options(if kill % 2 == 0 { "a" } else { "b" }));
        let soon = Duration::from_millis(kill * 13 % 90);
        let mut status = running.ingester.status();
        let _ = tokio::time::timeout(soon, status.wait_for(|status| status.next == Some(Height(600)))).await;
        running.task.abort();
        let _ = running.task.await;
    }
    world.catch_up().await;
    world.assert_equals_chain().await;
    world.assert_events_from(581).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reorg_swaps_the_shares_of_all_shards_at_once() {
    for depth in [1, 5, 8] {
        let world = World::sharded(FakeChain::new(0, 40, Some(20)), 3).await;
        let running = world.start(options("a"));
        running.reach(40).await;
        world.chain.change(|chain| chain.reorg(depth, 2));
        running.reach(42).await;
        world.assert_equals_chain().await;
        world.assert_events_from(21).await;
        let reorgs = "select count(*) from test_outbox where subject = 'chain.reorg.detected.v1'";
        assert_eq!(world.scalar(reorgs).await, 1);
        running.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_sharded_ingesters_at_once_are_one() {
    let world = World::sharded(FakeChain::new(0, 200, Some(150)), 2).await;
    let (first, second) = (world.start(options("a")), world.start(options("b")));
    first.reach(200).await;
    for _ in 0..5 {
        world.chain.change(|chain| {
            chain.reorg(5, 3);
            chain.finalized = Some(chain.next() - 30);
        });
        eventually("the end of the chain", async || world.is_at_the_end().await).await;
    }
    first.end().await;
    second.end().await;
    world.assert_equals_chain().await;
    world.assert_events_from(151).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn any_order_of_events_ends_in_the_chain_with_shards() {
    let seeds = std::env::var("TIDEMARK_STORM_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(3);
    for seed in 0..seeds {
        storm(100 + seed, 3).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_shard_lost_is_named() {
    let world = World::sharded(FakeChain::new(0, 130, Some(110)), 3).await;
    world.catch_up().await;
    let problems = async || {
        verify_completeness(&world.conn().await, NETWORK, world.all()).await.expect("verifies").problems
    };
    assert_eq!(problems().await, []);
    world
        .execute("delete from raw.range_evidence where shard = 1 and from_height <= 45 and to_height > 45")
        .await;
    let found = problems().await;
    assert!(
        matches!(&found[..], [Problem::InShard(1, gap)] if matches!(**gap, Problem::Gap(_))),
        "{found:?}"
    );
    assert!(found[0].to_string().starts_with("shard 1: heights"), "{}", found[0]);
    world.execute("delete from raw.shard_blocks where shard = 2 and height = 64").await;
    let found = problems().await;
    assert!(
        found.iter().any(|problem| matches!(problem, Problem::Shards(count) if count.height == Height(64)))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn another_division_of_the_contracts_is_refused() {
    let mut world = World::sharded(FakeChain::new(0, 60, Some(40)), 3).await;
    world.catch_up().await;
    for shards in [1, 2, 4] {
        world.shards = shards;
        let running = world.start(options("a"));
        let ended = tokio::time::timeout(DEADLINE, running.task).await.expect("ends").expect("no panic");
        assert!(matches!(ended, Err(IngestError::Divided { .. })), "{ended:?}");
    }
    world.shards = 3;
    world.catch_up().await;
    world.assert_equals_chain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn evidence_of_single_blocks_is_merged_once_it_is_final() {
    for shards in [1, 3] {
        let world = World::sharded(FakeChain::new(0, 10, None), shards).await;
        let running = world.start(options("a"));
        running.reach(10).await;
        for _ in 0..90 {
            world.chain.change(|chain| chain.grow(1));
            running.reach(world.height()).await;
        }
        let tiles = "select count(*) from raw.range_evidence";
        assert!(world.scalar(tiles).await >= 90 * i64::from(shards));
        world.chain.change(|chain| chain.finalized = Some(95));
        running.wait_for("finality", |status| status.finalized == Some(Height(95))).await;
        world.assert_equals_chain().await;
        assert!(world.scalar(tiles).await <= 6 * i64::from(shards));
        let same = "select count(*) from raw.range_evidence where 'links' = any(checks)";
        assert_eq!(world.scalar(same).await, world.scalar(tiles).await, "what all have passed is kept");
        running.end().await;
    }
}
