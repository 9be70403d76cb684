//! Full rebuilds beside the live tables, undo and reconciliation.

mod projection_support;

use std::sync::Mutex;

use projection_support::*;
use tidemark_pipeline::projectors::{
    Progress, ProjectionName, RebuildReport, forget_outdated_rebuilds, forget_rebuild, rebuild_projection,
    reconcile, undo_rebuild,
};

/// Some of everything: final, confirmed, pending, burned, reverted, moved.
async fn lived_world() -> World {
    let mut world = world().await;
    let mut batch =
        world.block(&[Move::mint(0, 1, 1, 1), Move::mint(0, 2, 1, 1), Move::mint(1, 7, 2, 50)]).await;
    batch.extend(world.block(&[Move::transfer(1, 7, 2, 3, 20), Move::transfer(0, 1, 1, 2, 1)]).await);
    batch.extend(world.finalize(2).await);
    batch.extend(world.block(&[Move::burn(0, 2, 1, 1), Move::transfer(1, 7, 2, 1, 30)]).await);
    batch.extend(world.confirm(3).await);
    batch.extend(world.block(&[Move::mint(0, 3, 4, 1), Move::transfer(0, 1, 2, 2, 1)]).await);
    world.project(&batch).await;
    let (mut batch, held) = world.reorg(3).await;
    batch.extend(world.block(&[Move::mint(0, 4, 5, 1)]).await);
    batch.extend(world.include(&held[1..]).await);
    world.project(&batch).await;
    world
}

async fn rebuild(world: &World, name: ProjectionName) -> RebuildReport {
    rebuild_projection(&world.db, name, &|_| {}).await.expect("rebuilds")
}

#[tokio::test]
async fn a_rebuild_of_a_sound_projection_changes_nothing() {
    let world = lived_world().await;
    let before = world.dump().await;
    for name in ProjectionName::ALL {
        let report = rebuild(&world, name).await;
        assert_eq!(report.differing.count, 0, "{name}: {:?}", report.differing.samples);
        assert!(report.rows > 0, "{name}");
        let after = world.dump().await;
        assert_eq!(before[name.as_str()], after[name.as_str()], "{name}");
    }
    assert_eq!(world.dump().await, before);
}

#[tokio::test]
async fn tampering_is_reported_mended_and_can_be_undone() {
    let world = lived_world().await;
    let sound = world.dump().await;
    for (name, tamper) in [
        (ProjectionName::OwnershipView, "update projection.ownership_view set qty = qty + 5 where qty = 20"),
        (
            ProjectionName::AssetCards,
            "update projection.asset_cards set last_height = 99 where token_id = '7'",
        ),
        (
            ProjectionName::CollectionHolders,
            "delete from projection.collection_holders where asset_count = 1",
        ),
        (ProjectionName::CollectionStats, "update projection.collection_stats set owners_count = 77"),
        (ProjectionName::AccountSummaries, "update projection.account_summaries set transfer_count = -1"),
        (ProjectionName::Transfers, "delete from projection.transfers where height = 1 and event_index = 0"),
    ] {
        let rows = world.conn.execute("tamper", tamper, &[]).await.expect("tampers");
        assert!(rows > 0, "{name}");
        let wrong = world.dump().await;
        let report = rebuild(&world, name).await;
        assert_eq!(report.differing.count, rows, "{name}: {:?}", report.differing.samples);
        assert_eq!(report.differing.samples.len(), usize::try_from(rows).expect("few"));
        assert_eq!(world.dump().await, sound, "{name} is mended");
        assert!(undo_rebuild(&world.db, name).await.expect("undoes"));
        assert_eq!(world.dump().await, wrong, "{name} is as it was");
        assert!(!undo_rebuild(&world.db, name).await.expect("looks"), "nothing is left to undo");
        assert_eq!(rebuild(&world, name).await.differing.count, rows);
        forget_rebuild(&world.db, name).await.expect("forgets");
        assert_eq!(world.dump().await, sound, "{name}");
    }
    let left = "select count(*) from pg_class c join pg_namespace n on n.oid = c.relnamespace
                 where n.nspname = 'projection' and c.relname like any (array['%\\_\\_shadow%', '%\\_\\_old%',
                       '%\\_\\_undone%', '%\\_\\_changes%', '%\\_\\_line%'])";
    assert_eq!(world.number(left).await, 0);
}

#[tokio::test]
async fn what_is_kept_for_undo_is_dropped_after_a_day() {
    let world = lived_world().await;
    let (kept, old) = (ProjectionName::AssetCards, ProjectionName::CollectionStats);
    rebuild(&world, kept).await;
    rebuild(&world, old).await;
    assert_eq!(forget_outdated_rebuilds(&world.db).await.expect("looks"), []);
    let aged = "do $$ begin execute format('comment on table projection.collection_stats__changes is %L',
                    now() - interval '25 hours'); end $$";
    world.conn.batch("age", aged).await.expect("ages");
    assert_eq!(forget_outdated_rebuilds(&world.db).await.expect("forgets"), [old]);
    assert_eq!(forget_outdated_rebuilds(&world.db).await.expect("forgets once"), []);
    assert!(!undo_rebuild(&world.db, old).await.expect("looks"), "it is gone");
    assert!(undo_rebuild(&world.db, kept).await.expect("undoes"), "it was kept");
    let noted = "select count(*) from pg_trigger where tgname like '%\\_\\_note'";
    assert_eq!(world.number(noted).await, 0, "nobody notes keys any more");
}

#[tokio::test]
async fn names_views_indexes_and_grants_follow_the_swap() {
    let world = lived_world().await;
    // Roles belong to the whole cluster: the name is this test's own.
    let role = format!("reader_{}", uuid::Uuid::new_v4().simple());
    let grant = format!("create role {role}; grant select on projection.asset_cards to {role}");
    world.conn.batch("grant", &grant).await.expect("grants");
    let indexes = "select string_agg(tablename || ' ' || indexname || ' ' || indexdef, e'\n' order by tablename, indexname)
                     from pg_indexes where schemaname = 'projection'";
    let before: String = world.conn.query_one("list", indexes, &[]).await.expect("lists").get(0);
    for name in ProjectionName::ALL {
        rebuild(&world, name).await;
        forget_rebuild(&world.db, name).await.expect("forgets");
    }
    let after: String = world.conn.query_one("list", indexes, &[]).await.expect("lists").get(0);
    assert_eq!(before, after);
    let portfolio = world.number("select count(*) from projection.portfolio_assets").await;
    assert_eq!(portfolio, world.number("select count(*) from projection.ownership_view").await);
    let may =
        format!("select has_table_privilege('{role}', 'projection.asset_cards', 'select')::int::bigint");
    assert_eq!(world.number(&may).await, 1);
    let revoke = format!("drop owned by {role}; drop role {role}");
    world.conn.batch("revoke", &revoke).await.expect("revokes");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_live_writes_during_a_rebuild_and_before_an_undo_is_kept() {
    for name in ProjectionName::ALL {
        let mut world = lived_world().await;
        let expected_later = world.block(&[Move::transfer(1, 7, 3, 4, 5), Move::mint(0, 9, 3, 1)]).await;
        // The ledger is ahead of live while the shadow is filled; live catches up before the swap.
        let runtime = tokio::runtime::Handle::current();
        let (db, batch) = (world.db.clone(), Mutex::new(Some(expected_later)));
        let during = |progress: Progress| {
            if progress.phase == "swap"
                && let Some(batch) = batch.lock().expect("no panic").take()
            {
                std::thread::scope(|scope| {
                    scope.spawn(|| runtime.block_on(project(&db, &batch)));
                });
            }
        };
        let report = tokio::task::block_in_place(|| {
            runtime.block_on(rebuild_projection(&world.db, name, &during)).expect("rebuilds")
        });
        assert_eq!(report.differing.count, 0, "{name}: {:?}", report.differing.samples);
        let batch = world.block(&[Move::transfer(0, 9, 3, 1, 1), Move::burn(1, 7, 4, 5)]).await;
        world.project(&batch).await;
        let swapped = world.dump().await;
        assert!(undo_rebuild(&world.db, name).await.expect("undoes"));
        assert_eq!(world.dump().await, swapped, "{name}");
        for other in ProjectionName::ALL {
            assert_eq!(rebuild(&world, other).await.differing.count, 0, "{name}, then {other}");
        }
    }
}

#[tokio::test]
async fn a_rebuild_does_not_swallow_a_delivery_that_live_has_yet_to_make() {
    let mut world = lived_world().await;
    let mut batch = world.block(&[Move::mint(0, 9, 3, 1)]).await;
    batch.extend(world.finalize(world.head).await);
    rebuild(&world, ProjectionName::Transfers).await;
    assert_eq!(said(&world.project(&batch).await).len(), 1);
}

#[tokio::test]
async fn reconciliation_finds_tampering_and_writes_it_down() {
    let world = lived_world().await;
    let mut conn = world.db.conn().await.expect("connects");
    let report = reconcile(&mut conn, 1000).await.expect("reconciles");
    assert!(!report.is_alarming(), "{report:?}");
    assert_eq!(report.runs[0].sample_size, 5);
    world.run("update projection.ownership_view set qty = 21 where qty = 20", &[]).await;
    world.run("update projection.asset_cards set supply = 3 where token_id = '1'", &[]).await;
    world
        .run("update projection.collection_stats set owners_count = 77 where standard = 'erc1155'", &[])
        .await;
    let report = reconcile(&mut conn, 1000).await.expect("reconciles");
    let found: Vec<i64> = report.runs.iter().map(|run| run.mismatches_found).collect();
    // The card's supply also shows in the sums of its collection.
    assert_eq!(found, [1, 1, 2]);
    assert!(report.is_alarming());
    assert_eq!(world.number("select count(*) from system.reconciliation_runs").await, 6);
    let rate = "select count(*) from system.reconciliation_runs where mismatch_rate > 0.001";
    assert_eq!(world.number(rate).await, 3);
}
