//! Values at the edge, tokens that break their standard, the past, the digest, the invariants.

use alloy_primitives::U256;
use tidemark_model::chain::{BlockRef, ParsedBlock, Quarantined};
use tidemark_model::ids::{Height, TxId};
use tidemark_pipeline::workers::{BlockInput, Openings, check_one, process_block};
use tidemark_store::checks::Slice;
use tidemark_store::ownership::{AsOf, holdings_at, owners_at};
use tidemark_store::{applied, digest};

use crate::world::{Act, NETWORK, World, account_id, block, cause, class, owners, single, time_of};

#[tokio::test]
async fn the_largest_numbers_of_256_bits_are_exact() {
    let world = World::new().await;
    let mut mint = class(1, 0, None, Some("a"), 0).qty(U256::MAX);
    mint.token = U256::MAX.to_string();
    let mut moved = class(2, 0, Some("a"), Some("b"), 0).qty(U256::MAX).index(1);
    moved.token = U256::MAX.to_string();
    world.done(block(0, 0), &[&mint, &moved]).await;
    world.finalize(0).await;
    let expected = [("b".to_owned(), U256::MAX.to_string())].into();
    assert_eq!(world.finalized(mint.asset()).await, expected);
    assert_eq!(world.text("select token_id_num::text from catalog.assets").await, U256::MAX.to_string());
    assert_eq!(world.text("select supply::text from catalog.assets").await, U256::MAX.to_string());
    // One more unit is more than a class can have.
    let mut more = class(3, 0, None, Some("a"), 1);
    more.token = U256::MAX.to_string();
    world.done(block(1, 0), &[&more]).await;
    assert_eq!(world.finalize(1).await.quarantined, [more.id()]);
    assert_eq!(world.finalized(mint.asset()).await, expected);
    world.holds().await;
}

#[tokio::test]
async fn zero_self_and_short_lived_movements_leave_what_they_should() {
    let world = World::new().await;
    let mint = class(1, 5, None, Some("a"), 10);
    let nothing = class(2, 5, Some("z"), Some("y"), 0).index(1);
    let own = class(3, 5, Some("a"), Some("a"), 10).index(2);
    let (born, died) = (single(4, 9, None, Some("b")).index(3), single(4, 9, Some("b"), None).index(4));
    world.done(block(0, 0), &[&mint, &nothing, &own, &born, &died]).await;
    assert_eq!(world.latest(mint.asset()).await, owners(&[("a", 10)]));
    assert_eq!(world.finalize(0).await.applied, 5);
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 10)]));
    assert_eq!(world.finalized(born.asset()).await, owners(&[]));
    let burned = "select count(*) from catalog.assets where is_burned and token_id_raw = '9' and supply = 0";
    assert_eq!(world.count(burned).await, 1);
    // Made again, it is there again.
    world.done(block(1, 0), &[&single(5, 9, None, Some("c"))]).await;
    world.finalize(1).await;
    assert_eq!(world.count("select count(*) from catalog.assets where is_burned").await, 0);
    world.holds().await;
}

#[tokio::test]
async fn a_negative_balance_is_quarantined_and_the_rest_goes_on() {
    let world = World::new().await;
    let mint = class(1, 5, None, Some("a"), 3);
    let (bad, good) = (class(2, 5, Some("a"), Some("b"), 4), class(3, 5, Some("a"), Some("b"), 2).index(1));
    let (born, twice) = (single(4, 9, None, Some("a")).index(2), single(5, 9, None, Some("b")).index(3));
    let thief = single(6, 9, Some("x"), Some("y")).index(4);
    world.done(block(0, 0), &[&mint]).await;
    world.done(block(1, 0), &[&bad, &good, &born, &twice, &thief]).await;
    let done = world.finalize(1).await;
    assert_eq!((done.applied, done.quarantined.len()), (3, 3));
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 1), ("b", 2)]));
    assert_eq!(world.finalized(born.asset()).await, owners(&[("a", 1)]));
    let evidence = "select evidence->>'held' || ' of ' || (evidence->>'qty') from ledger.quarantine where reason like '%more than%' and evidence->>'qty' = '4'";
    assert_eq!(world.text(evidence).await, "3 of 4");
    let unreliable = "select count(*) from catalog.contracts where reliability = 'unreliable' and unreliable_reason is not null";
    assert_eq!(world.count(unreliable).await, 2);
    // No crash loop: the next step has nothing to do with it.
    world.done(block(2, 0), &[]).await;
    assert_eq!(world.finalize(2).await.quarantined, []);
    world.holds().await;
}

#[tokio::test]
async fn records_that_break_their_standard_are_kept_with_the_reason() {
    let world = World::new().await;
    let at = block(0, 0);
    let record = Quarantined {
        source_event_id: single(9, 9, None, Some("a")).source(),
        tx_hash: TxId::from([9; 32]),
        event_index: 3,
        reason: "too\0short".to_owned(),
    };
    let parsed = ParsedBlock { events: Vec::new(), quarantined: vec![record.clone(), record] };
    let openings = Openings::default();
    let input = BlockInput {
        block: at,
        time: time_of(0),
        parsed: &parsed,
        chain_head: Height(0),
        openings: &openings,
    };
    let mut conn = world.db.conn().await.expect("connects");
    let tx = conn.tx().await.expect("begins");
    process_block(&tx, &world.network, &input, &cause("one")).await.expect("processes");
    tx.commit().await.expect("commits");
    let found = "select consumer || ':' || reason from ledger.quarantine";
    assert_eq!(world.text(found).await, "normalizer:too\u{fffd}short");
}

#[tokio::test]
async fn the_same_block_saying_something_else_is_flagged_not_believed() {
    let world = World::new().await;
    let (mint, other) = (class(1, 5, None, Some("a"), 3), class(1, 5, None, Some("a"), 4));
    world.done(block(0, 0), &[&mint]).await;
    let mut conn = world.db.conn().await.expect("connects");
    let tx = conn.tx().await.expect("begins");
    let done = tidemark_pipeline::workers::normalize(
        &tx,
        &world.network,
        &[other.at(block(0, 0))],
        Height(0),
        &Openings::default(),
        &cause("again"),
    )
    .await
    .expect("normalizes");
    tx.commit().await.expect("commits");
    assert_eq!(done.contradicted.len(), 1);
    world.finalize(0).await;
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 3)]));
    assert_eq!(world.count("select count(*) from ledger.quarantine where consumer = 'normalizer'").await, 1);
    world.holds().await;
}

async fn three_owners(world: &World) -> Act {
    let mint = single(1, 5, None, Some("a"));
    world.done(block(0, 0), &[]).await;
    world.done(block(1, 0), &[&mint]).await;
    world.done(block(2, 0), &[&single(2, 5, Some("a"), Some("b"))]).await;
    world.done(block(3, 0), &[&single(3, 5, Some("b"), Some("c"))]).await;
    world.finalize(3).await;
    mint
}

#[tokio::test]
async fn the_past_is_read_by_height_and_by_time() {
    let world = World::new().await;
    let mint = three_owners(&world).await;
    let conn = world.db.conn().await.expect("connects");
    for (height, owner) in [(1, "a"), (2, "b"), (3, "c"), (99, "c")] {
        for at in [AsOf::Height(Height(height)), AsOf::Time(time_of(height))] {
            let found = owners_at(&conn, mint.asset(), at).await.expect("reads");
            assert_eq!(found.into_iter().collect::<Vec<_>>(), [(account_id(owner), U256::from(1))], "{at:?}");
        }
    }
    assert!(owners_at(&conn, mint.asset(), AsOf::Height(Height(0))).await.expect("reads").is_empty());
    let held = holdings_at(&conn, account_id("b"), AsOf::Height(Height(2))).await.expect("reads");
    assert_eq!(held.into_keys().collect::<Vec<_>>(), [mint.asset()]);
    let held = holdings_at(&conn, account_id("b"), AsOf::Time(time_of(3))).await.expect("reads");
    assert!(held.is_empty());
}

#[tokio::test]
async fn a_tampered_row_is_found_and_named() {
    let world = World::new().await;
    let mint = three_owners(&world).await;
    world.holds().await;
    world.execute("update ledger.ownership_current set qty = 2").await;
    let found = world.violations().await.join("\n");
    for check in
        ["owners_equal_the_log", "history_sums_to_owners", "single_tokens", "supply_is", "digest_equals"]
    {
        assert!(found.contains(check), "{check} in {found}");
    }
    assert!(found.contains(&mint.asset().to_string()));
    world.execute("update ledger.ownership_current set qty = 1").await;
    world.execute("update ledger.normalized_events set is_reverted = true where block_number = 2").await;
    let found = world.violations().await.join("\n");
    for check in ["applied_events_exist_and_stand", "reverted_events_say_so"] {
        assert!(found.contains(check), "{check} in {found}");
    }
}

#[tokio::test]
async fn the_first_difference_between_two_databases_is_found_in_few_steps() {
    let (one, other) = (World::new().await, World::new().await);
    let mints: Vec<Act> = (0..600).map(|token| class(token, token, None, Some("a"), 10)).collect();
    for world in [&one, &other] {
        world.done(block(0, 0), &mints.iter().collect::<Vec<_>>()).await;
        world.finalize(0).await;
    }
    assert_eq!(one.digest().await, other.digest().await);
    assert_eq!(digest::diff(&one.db, &other.db, NETWORK).await.expect("compares"), None);
    // Behind the ledger's back: the kept digests are equal, the rows are not.
    let victim = mints[321].asset();
    other.execute(&format!("update ledger.ownership_current set qty = 11 where asset_id = '{victim}'")).await;
    let found = digest::diff(&one.db, &other.db, NETWORK).await.expect("compares").expect("differs");
    assert_eq!(found.asset, victim);
    assert!(found.steps <= 24, "{found:?}");
    other.execute(&format!("update ledger.ownership_current set qty = 10 where asset_id = '{victim}'")).await;
    // Through the ledger: the kept digests lead to the bucket.
    other.done(block(1, 0), &[&class(9_999, 77, Some("a"), Some("b"), 1)]).await;
    other.finalize(1).await;
    let found = digest::diff(&one.db, &other.db, NETWORK).await.expect("compares").expect("differs");
    assert_eq!(found.asset, mints[77].asset());
    assert!(found.steps <= 8, "{found:?}");
}

#[tokio::test]
async fn archived_claims_still_answer() {
    let world = World::new().await;
    let mint = three_owners(&world).await;
    world.execute("update ledger.applied_events set applied_at = now() - interval '91 days' where normalized_event_id in (select id from ledger.normalized_events where block_number = 1)").await;
    let mut conn = world.db.conn().await.expect("connects");
    let tx = conn.tx().await.expect("begins");
    assert_eq!(applied::archive(&tx, applied::ARCHIVE_AFTER_DAYS, 100).await.expect("archives"), 1);
    assert_eq!(applied::archive(&tx, applied::ARCHIVE_AFTER_DAYS, 100).await.expect("archives"), 0);
    tx.commit().await.expect("commits");
    let unknown = single(77, 77, None, Some("a")).id();
    let asked = [mint.id(), unknown];
    let found = applied::was_applied(&conn, "state-updater", NETWORK, &asked).await.expect("reads");
    assert_eq!(found.into_iter().collect::<Vec<_>>(), [mint.id()]);
    world.holds().await;
    // Another consumer has applied nothing, except what history applied for all.
    assert!(applied::was_applied(&conn, "scoring", NETWORK, &asked).await.expect("reads").is_empty());
    world.execute("update ledger.network_progress set history_height = 1").await;
    assert_eq!(applied::was_applied(&conn, "scoring", NETWORK, &asked).await.expect("reads").len(), 1);
}

#[tokio::test]
async fn changed_owners_are_told_in_bounded_events() {
    let world = World::new().await;
    let mints: Vec<Act> = (0..1_200).map(|token| class(token, token, None, Some("a"), 1)).collect();
    let at: BlockRef = block(0, 0);
    world.done(at, &mints.iter().collect::<Vec<_>>()).await;
    let done = world.finalize(0).await;
    let sizes: Vec<usize> =
        done.drafts.iter().filter_map(|draft| Some(draft.payload.get("assets")?.as_array()?.len())).collect();
    assert_eq!(sizes, [500, 500, 200]);
    let ids: std::collections::BTreeSet<_> = done.drafts.iter().map(|draft| draft.event_id).collect();
    assert_eq!(ids.len(), done.drafts.len());
    world.holds().await;
}

/// Rows read by moving one unit of a class and making it final, after so many transfers of it.
async fn rows_read_after(transfers: u64) -> i64 {
    let world = World::new().await;
    let mut events = vec![class(0, 5, None, Some("a"), 1_000_000).at(block(0, 0))];
    for number in 1..=transfers {
        let receiver = format!("r{}", number % 50);
        events.push(class(number, 5, Some("a"), Some(&receiver), 1).at(block(1 + number / 100, 0)));
    }
    let last = 1 + transfers / 100;
    world.segment(0, last, &events).await.expect("applies");
    world.execute("analyze").await;
    let at = block(last + 1, 0);
    let parsed = ParsedBlock {
        events: vec![class(999_999, 5, Some("a"), Some("r1"), 1).at(at)],
        quarantined: Vec::new(),
    };
    let openings = Openings::default();
    let input = BlockInput {
        block: at,
        time: time_of(at.height.0),
        parsed: &parsed,
        chain_head: at.height,
        openings: &openings,
    };
    let mut conn = world.db.conn().await.expect("connects");
    let tx = conn.tx().await.expect("begins");
    process_block(&tx, &world.network, &input, &cause("block")).await.expect("processes");
    tidemark_pipeline::workers::advance_finality(&tx, &world.network, at.height, None, &cause("final"))
        .await
        .expect("advances");
    let row = tx
        .query_one(
            "count rows read",
            "select sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint
               from pg_stat_xact_user_tables where schemaname in ('ledger', 'catalog')",
            &[],
        )
        .await
        .expect("reads");
    row.get(0)
}

#[tokio::test]
async fn the_cost_of_a_movement_does_not_grow_with_the_history_of_its_asset() {
    let (young, old) = (rows_read_after(100).await, rows_read_after(10_000).await);
    assert!(young > 0);
    assert!(old <= young + 100, "{young} rows read after 100 transfers, {old} after 10 000");
}

#[tokio::test]
async fn slices_find_what_the_whole_finds_and_keep_it_once() {
    let world = World::new().await;
    let mints: Vec<Act> = (0..40).map(|token| class(token, token, None, Some("a"), 10)).collect();
    world.done(block(0, 0), &mints.iter().collect::<Vec<_>>()).await;
    world.finalize(0).await;
    let victim = mints[7].asset();
    let broken = format!("update ledger.ownership_current set qty = 11 where asset_id = '{victim}'");
    world.execute(&broken).await;
    let slice = victim.0.as_bytes()[0];
    for _twice in 0..2 {
        let found = check_one(&world.db, &world.network, Slice::One(slice)).await.expect("checks");
        let found: Vec<String> =
            found.into_iter().map(|one| format!("{}: {}", one.check, one.detail)).collect();
        assert_eq!(found, world.violations().await);
        assert_eq!(found.len(), 4, "{found:?}");
    }
    let other = Slice::One(slice.wrapping_add(1));
    assert_eq!(check_one(&world.db, &world.network, other).await.expect("checks"), []);
    let kept = "select count(*) from ledger.quarantine where consumer = 'verify'";
    assert_eq!(world.count(kept).await, 4);
    let named = format!("{kept} and asset_id = '{victim}'");
    assert_eq!(world.count(&named).await, 3, "all but the digest name their asset");
}

/// The view of keys computes what is not stored; it is the model's formula.
#[tokio::test]
async fn the_keys_name_events_by_the_hash_of_their_source() {
    let world = World::new().await;
    let mint = class(1, 5, None, Some("a"), 10).sub(3);
    world.done(block(0, 0), &[&mint]).await;
    let uid = world.text("select encode(event_uid, 'hex') from ledger.normalized_event_keys").await;
    let formula = tidemark_model::ids::event_uid(&mint.source(), 3);
    assert_eq!(uid, formula.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
}
