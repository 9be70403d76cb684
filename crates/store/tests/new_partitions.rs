//! Where the newest partition is large, what comes next gets a new one; nobody who reads or writes can tell.

use std::collections::HashMap;

use tidemark_model::ids::{AssetId, Height, HeightRange, NetworkId};
use tidemark_model::redact::RedactedUrl;
use tidemark_store::ownership::{AsOf, owners_at};
use tidemark_store::partitions::{
    FULL_BYTES, Next, PartitionSizes, Partitions, Table, begin_history_anew, history_without_indexes,
};
use tidemark_store::{Conn, Db, DbOptions, bulk, migrate};
use tidemark_testkit::pg::TestDb;
use uuid::Uuid;

const NETWORK: NetworkId = NetworkId(11);
/// One byte is enough to be full.
const FULL: i64 = 1;

async fn database() -> (TestDb, Db) {
    let test = TestDb::new().await.expect("a database");
    let db = Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &DbOptions::default()).expect("a pool");
    (test, db)
}

fn partitions() -> Partitions {
    Partitions::new(PartitionSizes { transfers: 1_000, ..PartitionSizes::default() }, HashMap::new())
}

fn heights(from: u64, to: u64) -> HeightRange {
    HeightRange::new(Height(from), Height(to)).expect("not empty")
}

async fn add_transfers(conn: &Conn, from: i64, to: i64) {
    let sql = "
        insert into projection.transfers (network_id, height, event_index, sub_index, event_id, kind, asset_id,
            collection_id, to_account, qty, tx_hash, block_hash, event_time, is_reverted)
        select 11, h, 0, 0, gen_random_uuid(), 'mint', gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 1,
               '\\x01', '\\x02', now(), false
          from generate_series($1::bigint, $2::bigint - 1) h";
    conn.execute("add transfers", sql, &[&from, &to]).await.expect("the partition takes them");
}

/// Registered partitions of transfers: from, to, whether indexed, rows, indexes.
async fn there(conn: &Conn) -> Vec<(i64, i64, bool, i64, i64)> {
    let rows = conn
        .query(
            "list",
            "select p.from_height, p.to_height, p.indexed_at is not null,
                    (select count(*) from projection.transfers t where t.tableoid = p.name::regclass),
                    (select count(*) from pg_index x where x.indrelid = p.name::regclass)
               from raw.partitions p where p.parent = 'projection.transfers' order by 1",
            &[],
        )
        .await
        .expect("lists");
    rows.iter().map(|row| (row.get(0), row.get(1), row.get(2), row.get(3), row.get(4))).collect()
}

#[tokio::test]
async fn a_full_partition_of_transfers_ends_above_its_newest_row() {
    let (_test, db) = database().await;
    let mut conn = db.conn().await.expect("connects");
    // Another process that knows the partitions as they were.
    let (ours, others) = (partitions(), partitions());
    for one in [&ours, &others] {
        one.ensure_transfers(&mut conn, NETWORK, heights(0, 100)).await.expect("makes");
        one.ensure_indexed(&mut conn, &[Table::Transfers], NETWORK, Height(0)).await.expect("indexes");
    }
    assert!(!ours.begin_anew(&mut conn, NETWORK, FULL, Next::Live).await.expect("looks"), "nothing is there");
    add_transfers(&conn, 0, 120).await;
    assert!(
        !ours.begin_anew(&mut conn, NETWORK, 1 << 30, Next::Live).await.expect("looks"),
        "it is not full"
    );
    assert!(ours.begin_anew(&mut conn, NETWORK, FULL, Next::Live).await.expect("begins"));
    assert_eq!(there(&conn).await, [(0, 120, true, 120, 5), (120, 1_000, true, 0, 5)]);
    assert!(
        !ours.begin_anew(&mut conn, NETWORK, FULL, Next::Live).await.expect("looks"),
        "there is no room to give away"
    );
    for one in [&ours, &others] {
        one.ensure_transfers(&mut conn, NETWORK, heights(110, 140)).await.expect("is there");
        one.ensure_indexed(&mut conn, &[Table::Transfers], NETWORK, Height(130)).await.expect("is indexed");
    }
    add_transfers(&conn, 120, 300).await;
    assert!(others.begin_anew(&mut conn, NETWORK, FULL, Next::Backlog).await.expect("begins"));
    assert_eq!(
        there(&conn).await,
        [(0, 120, true, 120, 5), (120, 300, true, 180, 5), (300, 1_000, false, 0, 1)]
    );
    others.ensure_indexed(&mut conn, &[Table::Transfers], NETWORK, Height(310)).await.expect("indexes");
    assert_eq!(there(&conn).await[2], (300, 1_000, true, 0, 5));
    // And on into the next of the usual size.
    ours.ensure_transfers(&mut conn, NETWORK, heights(990, 1_010)).await.expect("makes");
    add_transfers(&conn, 990, 1_010).await;
    assert_eq!(there(&conn).await.iter().map(|one| one.3).sum::<i64>(), 320);
}

/// 80 MB for 500 heights: rows of nearly a quarter of a page, which stay in it.
async fn add_wide_transfers(conn: &Conn, from: i64, to: i64) {
    let sql = "
        insert into projection.transfers (network_id, height, event_index, sub_index, event_id, kind, asset_id,
            collection_id, to_account, qty, tx_hash, block_hash, event_time, is_reverted)
        select 11, h, 0, 0, gen_random_uuid(), 'mint', gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 1,
               decode(repeat(md5(h::text), 110), 'hex'), '\\x02', now(), false
          from generate_series($1::bigint, $2::bigint - 1) h, generate_series(1, 80)";
    conn.execute("add wide transfers", sql, &[&from, &to]).await.expect("the partition takes them");
}

/// What is neither small nor full would be written to with its indexes, at a sixth of the speed: five million transfers, the
/// last 160 MB of them in a partition of their own, were like that.
#[tokio::test]
async fn a_backlog_gets_a_partition_without_indexes_whatever_the_size_of_the_newest() {
    let (_test, db) = database().await;
    let mut conn = db.conn().await.expect("connects");
    let ours = partitions();
    ours.ensure_transfers(&mut conn, NETWORK, heights(0, 100)).await.expect("makes");
    ours.ensure_indexed(&mut conn, &[Table::Transfers], NETWORK, Height(0)).await.expect("indexes");
    add_wide_transfers(&conn, 0, 501).await;
    let bytes = "select pg_relation_size('projection.transfers_11_0000000000')";
    let bytes: i64 = conn.query_one("measure", bytes, &[]).await.expect("measures").get(0);
    assert!(bytes < FULL_BYTES, "{bytes} bytes are not full");
    assert!(
        !ours.do_without_indexes(&mut conn, NETWORK, Height(501)).await.expect("looks"),
        "it is not small"
    );
    for next in [Next::Live, Next::Backlog] {
        let is_begun = ours.begin_anew(&mut conn, NETWORK, FULL_BYTES, next).await.expect("looks");
        assert_eq!(is_begun, next == Next::Backlog);
    }
    let heights: Vec<_> = there(&conn).await.iter().map(|one| (one.0, one.1, one.4)).collect();
    assert_eq!(heights, [(0, 501, 5), (501, 1_000, 1)]);
    // One that has no indexes goes on as it is: the next stretch of the same backlog, or a first history.
    add_wide_transfers(&conn, 501, 951).await;
    assert!(!ours.begin_anew(&mut conn, NETWORK, FULL_BYTES, Next::Backlog).await.expect("looks"));
    ours.ensure_indexed(&mut conn, &[Table::Transfers], NETWORK, Height(510)).await.expect("indexes");
    assert!(ours.begin_anew(&mut conn, NETWORK, FULL_BYTES, Next::Backlog).await.expect("begins"));
    assert_eq!(there(&conn).await.len(), 3);
}

/// A long backlog takes the indexes of a small partition away, and they are back when it is done.
#[tokio::test]
async fn a_small_partition_does_without_indexes_for_a_backlog() {
    let (_test, db) = database().await;
    let mut conn = db.conn().await.expect("connects");
    let (ours, others) = (partitions(), partitions());
    let next = Height(20);
    assert!(!ours.do_without_indexes(&mut conn, NETWORK, next).await.expect("looks"), "there is none yet");
    for one in [&ours, &others] {
        one.ensure_transfers(&mut conn, NETWORK, heights(0, 100)).await.expect("makes");
        one.ensure_indexed(&mut conn, &[Table::Transfers], NETWORK, Height(0)).await.expect("indexes");
    }
    add_transfers(&conn, 0, 20).await;
    conn.batch("rebuild", "create table projection.transfers__shadow ()").await.expect("leaves");
    assert!(!ours.do_without_indexes(&mut conn, NETWORK, next).await.expect("looks"), "a rebuild knows it");
    conn.batch("rebuild", "drop table projection.transfers__shadow").await.expect("forgets");
    assert!(ours.do_without_indexes(&mut conn, NETWORK, next).await.expect("drops"));
    assert_eq!(there(&conn).await, [(0, 1_000, false, 20, 1)]);
    assert!(!others.do_without_indexes(&mut conn, NETWORK, next).await.expect("looks"), "they are gone");
    add_transfers(&conn, 20, 60).await;
    ours.ensure_indexed(&mut conn, &[Table::Transfers], NETWORK, Height(60)).await.expect("indexes");
    assert_eq!(there(&conn).await, [(0, 1_000, true, 60, 5)]);
}

#[tokio::test]
async fn the_newest_history_does_without_indexes_unless_another_network_is_live() {
    let (_test, db) = database().await;
    let mut conn = db.conn().await.expect("connects");
    add_history(&conn, 0, 100).await;
    assert!(begin_history_anew(&mut conn, FULL, Next::Live).await.expect("begins"));
    bulk::ensure_progress(&conn, NETWORK, Height(0)).await.expect("registers");
    bulk::ensure_progress(&conn, NetworkId(12), Height(0)).await.expect("registers");
    assert!(!history_without_indexes(&mut conn, NETWORK).await.expect("looks"), "another is live");
    assert_eq!(pieces(&conn).await, [(100, 2), (0, 2)]);
    let due = "update ledger.network_progress set read_models_due = true";
    conn.batch("put off", due).await.expect("puts off");
    assert!(history_without_indexes(&mut conn, NETWORK).await.expect("drops"));
    assert!(!history_without_indexes(&mut conn, NETWORK).await.expect("looks"), "they are gone");
    assert_eq!(pieces(&conn).await, [(100, 2), (0, 0)]);
    add_history(&conn, 100, 130).await;
    assert_eq!(bulk::restore_indexes(&mut conn).await.expect("builds"), 2);
    assert_eq!(pieces(&conn).await, [(100, 2), (30, 2)]);
}

/// Databases of before have indexes of the whole history; those of its partitions stay.
#[tokio::test]
async fn indexes_of_the_whole_history_become_those_of_its_partitions() {
    let (_test, db) = database().await;
    let mut conn = db.conn().await.expect("connects");
    add_history(&conn, 0, 100).await;
    assert!(begin_history_anew(&mut conn, FULL, Next::Live).await.expect("begins"));
    add_history(&conn, 100, 120).await;
    let before = "
        drop table projection.stats_to_come;
        create index ownership_history_by_account on ledger.ownership_history (account_id, block_number);
        create index ownership_history_by_asset on ledger.ownership_history (asset_id, block_number)";
    conn.batch("as it was", before).await.expect("makes");
    let anew =
        migrate::MIGRATIONS.iter().find(|one| one.name == "0027_shown_with_indexes").expect("is embedded");
    conn.batch("migrate", anew.sql).await.expect("migrates");
    assert_eq!(pieces(&conn).await, [(100, 2), (20, 2)]);
    assert_eq!(bulk::deferred_indexes(&conn).await.expect("counts"), 0);
    // And those that a first long history did without are built for each of them.
    let without = "
        drop table projection.stats_to_come;
        drop index ledger.ownership_history_0000_asset_id_block_number_idx;
        drop index ledger.ownership_history_0001_asset_id_block_number_idx;
        insert into system.deferred_indexes (name, definition) values ('ledger.ownership_history_by_asset',
            'CREATE INDEX ownership_history_by_asset ON ledger.ownership_history USING btree (asset_id, block_number)')";
    conn.batch("as it was", without).await.expect("makes");
    conn.batch("migrate", anew.sql).await.expect("migrates");
    assert_eq!(pieces(&conn).await, [(100, 1), (20, 1)]);
    assert_eq!(bulk::restore_indexes(&mut conn).await.expect("builds"), 2);
    assert_eq!(pieces(&conn).await, [(100, 2), (20, 2)]);
}

#[tokio::test]
async fn a_partition_does_not_end_while_a_rebuild_knows_it() {
    let (_test, db) = database().await;
    let mut conn = db.conn().await.expect("connects");
    let partitions = partitions();
    partitions.ensure_transfers(&mut conn, NETWORK, heights(0, 100)).await.expect("makes");
    add_transfers(&conn, 0, 50).await;
    for left in ["transfers__shadow", "transfers__old"] {
        conn.batch("leave", &format!("create table projection.{left} ()")).await.expect("leaves");
        assert!(!partitions.begin_anew(&mut conn, NETWORK, FULL, Next::Live).await.expect("looks"));
        conn.batch("forget", &format!("drop table projection.{left}")).await.expect("forgets");
    }
    assert!(partitions.begin_anew(&mut conn, NETWORK, FULL, Next::Live).await.expect("begins"));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_at_once_begin_one() {
    let (_test, db) = database().await;
    let mut conn = db.conn().await.expect("connects");
    partitions().ensure_transfers(&mut conn, NETWORK, heights(0, 100)).await.expect("makes");
    add_transfers(&conn, 0, 50).await;
    add_history(&conn, 0, 50).await;
    drop(conn);
    let begin = async || {
        let mut conn = db.conn().await.expect("connects");
        let transfers = partitions().begin_anew(&mut conn, NETWORK, FULL, Next::Live).await.expect("looks");
        let history = begin_history_anew(&mut conn, FULL, Next::Live).await.expect("looks");
        (transfers, history)
    };
    let (one, other) = tokio::join!(begin(), begin());
    assert!(one.0 ^ other.0, "{one:?} {other:?}");
    assert!(one.1 ^ other.1, "{one:?} {other:?}");
}

const ASSET: AssetId = AssetId(Uuid::from_u128(5));

/// One unit of an asset for a new account at each height.
async fn add_history(conn: &Conn, from: i64, to: i64) {
    let sql = "
        insert into ledger.ownership_history (asset_id, account_id, network_id, block_number, event_index, qty_delta,
            event_time, normalized_event_id, leg)
        select $3, gen_random_uuid(), 11, h, 0, 1, '2026-01-01'::timestamptz + h * interval '1 second',
               gen_random_uuid(), 1
          from generate_series($1::bigint, $2::bigint - 1) h";
    conn.execute("add history", sql, &[&from, &to, &ASSET.0]).await.expect("a partition takes them");
}

/// Rows and valid indexes of each partition of the history of balances, by name.
async fn pieces(conn: &Conn) -> Vec<(i64, i64)> {
    let rows = conn
        .query(
            "list",
            "select (select count(*) from ledger.ownership_history h where h.tableoid = i.inhrelid),
                    (select count(*) from pg_index x where x.indrelid = i.inhrelid and x.indisvalid)
               from pg_inherits i where i.inhparent = 'ledger.ownership_history'::regclass
              order by i.inhrelid::regclass::text",
            &[],
        )
        .await
        .expect("lists");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

#[tokio::test]
async fn a_full_partition_of_the_history_ends_after_its_newest_row() {
    let (_test, db) = database().await;
    let mut conn = db.conn().await.expect("connects");
    assert!(!begin_history_anew(&mut conn, FULL, Next::Live).await.expect("looks"), "nothing is there");
    add_history(&conn, 0, 100).await;
    assert!(!begin_history_anew(&mut conn, 1 << 30, Next::Live).await.expect("looks"), "it is not full");
    assert!(begin_history_anew(&mut conn, FULL, Next::Live).await.expect("begins"));
    assert_eq!(pieces(&conn).await, [(100, 2), (0, 2)]);
    assert!(!begin_history_anew(&mut conn, FULL, Next::Live).await.expect("looks"), "the newest is empty");
    // What another network says of an earlier time goes to where its time is.
    add_history(&conn, 90, 110).await;
    assert_eq!(pieces(&conn).await, [(110, 2), (10, 2)]);
    assert!(begin_history_anew(&mut conn, FULL, Next::Live).await.expect("begins"));
    add_history(&conn, 110, 130).await;
    assert_eq!(pieces(&conn).await, [(110, 2), (10, 2), (20, 2)]);
    let owners = owners_at(&conn, ASSET, AsOf::Height(Height(125))).await.expect("reads");
    assert_eq!(owners.len(), 100 + 20 + 16);
}
