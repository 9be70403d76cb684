//! Indexes that a first long history does without come back as they were, those of partitions too.

use tidemark_model::redact::RedactedUrl;
use tidemark_store::{Conn, Db, DbOptions, bulk, migrate};
use tidemark_testkit::pg::TestDb;

async fn database() -> (TestDb, Db) {
    let test = TestDb::empty().await.expect("a database");
    let db = Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &DbOptions::default()).expect("a pool");
    migrate::run(&db).await.expect("migrates");
    (test, db)
}

/// Every index of our schemas, and whether it serves.
async fn indexes(conn: &Conn) -> Vec<String> {
    let sql = "select format('%s valid: %s', pg_get_indexdef(x.indexrelid), x.indisvalid)
                 from pg_index x join pg_class i on i.oid = x.indexrelid
                where i.relnamespace in ('ledger'::regnamespace, 'catalog'::regnamespace, 'projection'::regnamespace)
                order by 1";
    conn.query("list indexes", sql, &[]).await.expect("reads").iter().map(|row| row.get(0)).collect()
}

/// A connection to the database whose indexes were just put off, all of them as they were, and how many are away.
async fn without_indexes(db: &Db) -> (Conn, Vec<String>, usize) {
    let mut conn = db.conn().await.expect("connects");
    let before = indexes(&conn).await;
    let put_off = bulk::defer_indexes(&mut conn).await.expect("puts off");
    (conn, before, put_off)
}

#[tokio::test]
async fn what_was_put_off_comes_back_whole() {
    let (_test, db) = database().await;
    let (mut conn, before, put_off) = without_indexes(&db).await;
    assert!(put_off > 10);
    assert_eq!(indexes(&conn).await.len(), before.len() - put_off);
    assert_eq!(bulk::restore_indexes(&mut conn).await.expect("builds"), put_off);
    assert_eq!(indexes(&conn).await, before);
    assert_eq!(bulk::restore_indexes(&mut conn).await.expect("nothing left"), 0);
}

#[tokio::test]
async fn two_build_them_together_each_once() {
    let (_test, db) = database().await;
    let (mut one, before, put_off) = without_indexes(&db).await;
    let mut other = db.conn().await.expect("connects");
    let (here, there) = tokio::join!(bulk::restore_indexes(&mut one), bulk::restore_indexes(&mut other));
    assert_eq!(here.expect("builds") + there.expect("builds"), put_off);
    assert_eq!(indexes(&one).await, before);
}

/// Who comes back says that all of them serve: also the one that somebody else was at, and died.
#[tokio::test]
async fn what_somebody_died_over_is_built_by_who_waited_for_it() {
    let (_test, db) = database().await;
    let (mut one, before, put_off) = without_indexes(&db).await;
    let mut other = db.conn().await.expect("connects");
    let dying = one.tx().await.expect("begins");
    let first = "select name from system.deferred_indexes order by name limit 1 for update";
    dying.query_one("take an index", first, &[]).await.expect("takes it");
    let mut building = tokio::task::JoinSet::new();
    building.spawn(async move {
        let built = bulk::restore_indexes(&mut other).await;
        (other, built)
    });
    let left =
        || async { bulk::deferred_indexes(&db.conn().await.expect("connects")).await.expect("counts") };
    while left().await > 1 {
        tokio::task::yield_now().await;
    }
    assert!(building.try_join_next().is_none(), "one is not built yet");
    dying.rollback().await.expect("dies");
    let (other, built) = building.join_next().await.expect("is there").expect("ends");
    assert_eq!(built.expect("builds"), put_off);
    assert_eq!(indexes(&other).await, before);
}

/// Databases that went through a first long history before have indexes of partitioned tables that serve nobody.
#[tokio::test]
async fn a_shell_without_partitions_is_found_and_built() {
    let (_test, db) = database().await;
    let mut conn = db.conn().await.expect("connects");
    let parts = "
        create table ledger.parts (network_id int, height bigint) partition by hash (network_id);
        create table ledger.parts_0 partition of ledger.parts for values with (modulus 1, remainder 0);
        create index parts_by_height on ledger.parts (network_id, height)";
    conn.batch("a table in partitions", parts).await.expect("makes");
    let before = indexes(&conn).await;
    let damage = "
        drop index ledger.parts_by_height;
        create index parts_by_height on only ledger.parts (network_id, height)";
    conn.batch("damage", damage).await.expect("damages");
    let mend = migrate::MIGRATIONS.iter().find(|one| one.name == "0021_whole_indexes").expect("is embedded");
    for _ in 0..2 {
        conn.batch("mend", mend.sql).await.expect("mends");
        assert_eq!(bulk::deferred_indexes(&conn).await.expect("counts"), 1);
    }
    assert_eq!(bulk::restore_indexes(&mut conn).await.expect("builds"), 1);
    assert_eq!(indexes(&conn).await, before);
}

/// Migration 0031 gives indexes room, and those that are away just then come back with it.
#[tokio::test]
async fn indexes_that_are_away_get_their_room_too() {
    const THE_ONE: &str = "0031_room_in_indexes";
    let (_with, all) = database().await;
    let wanted = indexes(&all.conn().await.expect("connects")).await;

    let test = TestDb::empty().await.expect("a database");
    let db = Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &DbOptions::default()).expect("a pool");
    let mut conn = db.conn().await.expect("connects");
    let at = migrate::MIGRATIONS.iter().position(|migration| migration.name == THE_ONE).expect("is embedded");
    let (before, rest) = migrate::MIGRATIONS.split_at(at);
    for migration in before {
        conn.batch("migrate", migration.sql).await.expect("migrates");
    }
    assert_ne!(indexes(&conn).await, wanted);
    let put_off = bulk::defer_indexes(&mut conn).await.expect("puts off");
    for migration in rest {
        conn.batch("migrate", migration.sql).await.expect("migrates");
    }
    assert_eq!(bulk::restore_indexes(&mut conn).await.expect("builds"), put_off);
    assert_eq!(indexes(&conn).await, wanted);
    assert_eq!(wanted.iter().filter(|index| index.contains("fillfactor='75'")).count(), 12);
}
