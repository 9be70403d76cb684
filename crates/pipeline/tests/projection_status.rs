//! Block cards, network status, activity, and what a rewind recomputes.

mod projection_support;

use std::time::Duration;

use projection_support::*;
use serde_json::json;
use tidemark_model::ids::{BlockHash, Height, NetworkId};
use tidemark_pipeline::projectors::{
    BlockCard, NetworkStatusInput, forget_activity, refresh_network_status, remove_block_cards,
    upsert_block_cards,
};

fn card(height: u64, hash: u8) -> BlockCard {
    BlockCard {
        network_id: NETWORK,
        height: Height(height),
        hash: BlockHash([hash; 32]),
        parent_hash: BlockHash([hash - 1; 32]),
        block_time: time_of(1, 0),
        tx_count: None,
        event_count: 3,
    }
}

fn status(finalized: Option<i64>) -> NetworkStatusInput {
    NetworkStatusInput {
        network_id: NetworkId(7),
        slug: "seven".into(),
        family: "evm".into(),
        start_block: 5,
        confirmations: 12,
        head_height: Some(100),
        head_time: Some(time_of(100, 0)),
        ingested_height: None,
        normalized_height: Some(99),
        finalized_height: finalized,
        projected_height: None,
        halted_reason: None,
        events_total: Some(10),
        reorgs_total: None,
    }
}

#[tokio::test]
async fn the_block_that_replaces_another_replaces_its_card() {
    let world = world().await;
    let mut conn = world.db.conn().await.expect("connects");
    let tx = conn.tx().await.expect("begins");
    assert_eq!(upsert_block_cards(&tx, &[card(1, 1), card(2, 2), card(2, 3)]).await.expect("writes"), 2);
    assert_eq!(upsert_block_cards(&tx, &[card(1, 1)]).await.expect("writes"), 0, "nothing new");
    assert_eq!(upsert_block_cards(&tx, &[card(2, 9)]).await.expect("writes"), 1);
    let gone = [BlockHash([3; 32]), BlockHash([1; 32])];
    assert_eq!(remove_block_cards(&tx, NETWORK, &gone).await.expect("removes"), 1, "by hash, not by height");
    tx.commit().await.expect("commits");
    assert_eq!(world.number("select height from projection.block_cards").await, 2);
}

#[tokio::test]
async fn status_keeps_what_it_is_not_told_and_finality_never_goes_back() {
    let world = world().await;
    let mut conn = world.db.conn().await.expect("connects");
    for (finalized, expected) in [(None, None), (Some(80), Some(80)), (Some(70), Some(80)), (None, Some(80))]
    {
        let tx = conn.tx().await.expect("begins");
        refresh_network_status(&tx, &[status(finalized)]).await.expect("writes");
        tx.commit().await.expect("commits");
        let sql = "select finalized_height, head_height, events_total from projection.network_status where network_id = 7";
        let row = conn.query_one("read", sql, &[]).await.expect("one row");
        let row: (Option<i64>, Option<i64>, i64) = (row.get(0), row.get(1), row.get(2));
        assert_eq!(row, (expected, Some(100), 10));
    }
}

#[tokio::test]
async fn the_watermark_and_the_activity_move_with_the_batch() {
    let mut world = world().await;
    let batch = world.block(&[Move::mint(0, 1, 1, 1), Move::mint(0, 2, 1, 1)]).await;
    world.project(&batch).await;
    let watermark = "select projected_height from projection.network_status where network_id = 1";
    assert_eq!(world.number(watermark).await, 1);
    let activity = "select coalesce(sum(events), 0)::bigint from projection.network_activity";
    assert_eq!(world.number(activity).await, 2);
    world.run("update projection.network_activity set bucket = bucket - interval '1 hour'", &[]).await;
    let mut conn = world.db.conn().await.expect("connects");
    let tx = conn.tx().await.expect("begins");
    assert_eq!(forget_activity(&tx, Duration::from_secs(60)).await.expect("forgets"), 1);
    tx.commit().await.expect("commits");
}

#[tokio::test]
async fn a_rewind_recomputes_whole_assets() {
    let mut world = world().await;
    let mut batch = world.block(&[Move::mint(1, 7, 1, 10), Move::transfer(1, 7, 1, 2, 4)]).await;
    batch.extend(world.finalize(1).await);
    world.project(&batch).await;
    // The operator's hand: a final balance moves without any event.
    world.run("update ledger.ownership_current set qty = 5", &[]).await;
    let changed = |reason: &str| {
        let payload = json!({"network_id": 1, "reason": reason, "height": 0, "assets": [asset(1, 7)]});
        vec![envelope("ledger.ownership.changed", payload)]
    };
    world.project(&changed("finalized")).await;
    let held = "select string_agg(qty::text, ',' order by qty) = '4,6' from projection.ownership_view";
    let held = format!("select ({held})::int::bigint");
    assert_eq!(world.number(&held).await, 1, "rows that depend on nothing open are not read");
    world.project(&changed("rewind")).await;
    assert_eq!(world.number(&held).await, 0);
    assert_eq!(world.number("select sum(qty)::bigint from projection.collection_holders").await, 10);
}

#[tokio::test]
async fn an_event_that_a_rewind_opened_again_can_still_move() {
    let mut world = world().await;
    let mut batch = world.block(&[Move::mint(0, 1, 1, 1)]).await;
    batch.extend(world.finalize(1).await);
    world.project(&batch).await;
    assert_eq!(world.number("select count(*) from projection.transfer_positions").await, 0);
    world.run("update ledger.network_progress set finalized_height = 0", &[]).await;
    world.run("delete from ledger.ownership_current", &[]).await;
    world.run("update catalog.assets set supply = 0", &[]).await;
    world.finalized = 0;
    let payload = json!({"network_id": 1, "reason": "rewind", "height": 0, "assets": [asset(0, 1)]});
    world.project(&[envelope("ledger.ownership.changed", payload)]).await;
    assert_eq!(world.number("select height from projection.finality_lines").await, 0, "the line goes back");
    let (mut batch, held) = world.reorg(0).await;
    batch.extend(world.block(&[]).await);
    batch.extend(world.include(&held).await);
    let words: Vec<String> = said(&world.project(&batch).await).into_iter().map(|(what, _)| what).collect();
    assert_eq!(words, ["retracted", "projected"]);
    assert_eq!(world.number("select count(*) from projection.transfers").await, 1);
    assert_eq!(world.number("select height from projection.transfers").await, 2);
}
