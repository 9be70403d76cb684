//! Migration 0028 on a database that holds something: what was three rows is one, and says what the three said.

use tidemark_model::redact::RedactedUrl;
use tidemark_store::{Conn, Db, DbOptions, migrate};
use tidemark_testkit::pg::TestDb;

const THE_ONE: &str = "0028_one_row_per_event";

/// A database as it was before that migration.
async fn database() -> (TestDb, Db) {
    let test = TestDb::empty().await.expect("a database");
    let db = Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &DbOptions::default()).expect("a pool");
    let conn = db.conn().await.expect("connects");
    for migration in migrate::MIGRATIONS.iter().take_while(|migration| migration.name < THE_ONE) {
        conn.batch("migrate", migration.sql).await.expect("migrates");
    }
    (test, db)
}

async fn apply(conn: &Conn) -> Result<(), tidemark_store::StoreError> {
    let the_one =
        migrate::MIGRATIONS.iter().find(|migration| migration.name == THE_ONE).expect("is embedded");
    conn.batch("migrate", the_one.sql).await
}

/// A transfer, a burn, a mint that was reverted, and an event that moves nothing.
const THREE_ROWS: &str = "
    insert into ledger.normalized_event_keys (normalized_event_id, event_uid, source_event_id, sub_index, network_id,
        block_number, block_hash, finality_status, is_reverted)
    select md5(n::text)::uuid, sha256(convert_to('1:' || n || ':0', 'UTF8')), '1:' || n, '0', 1, n, '\\x0a',
           (array['finalized', 'pending', 'reverted', 'finalized'])[n]::ledger.event_finality_status, n = 3
      from generate_series(1, 4) n;
    insert into ledger.normalized_events (id, source_event_id, sub_index, network_id, event_kind, asset_id, collection_id,
        block_number, block_hash, tx_hash, event_index, event_time, finality_status, is_reverted, blob_ref)
    select k.normalized_event_id, k.source_event_id, k.sub_index, k.network_id,
           (array['transfer', 'burn', 'mint', 'metadata'])[k.block_number]::ledger.event_kind, md5('a')::uuid,
           md5('c')::uuid, k.block_number, k.block_hash, '\\x0b', 7, to_timestamp(k.block_number), k.finality_status,
           k.is_reverted, case when k.block_number = 4 then 'somewhere' end
      from ledger.normalized_event_keys k;
    insert into ledger.normalized_event_deltas (normalized_event_id, delta_index, asset_id, from_account_id,
        to_account_id, qty_delta)
    select md5(n::text)::uuid, 0, md5('a')::uuid, case when n < 3 then md5('f')::uuid end,
           case when n <> 2 then md5('t')::uuid end, case when n = 2 then -5 else 5 end
      from generate_series(1, 3) n";

/// Everything under the three names, as text.
async fn everything(conn: &Conn) -> Vec<String> {
    let mut all = Vec::new();
    for sql in [
        "select format('%s', (k.normalized_event_id, k.event_uid, k.source_event_id, k.sub_index, k.network_id,
                k.block_number, k.block_hash, k.finality_status, k.is_reverted)) from ledger.normalized_event_keys k",
        "select format('%s', (e.id, e.source_event_id, e.sub_index, e.network_id, e.event_kind, e.asset_id,
                e.collection_id, e.block_number, e.block_hash, e.tx_hash, e.event_index, e.event_time,
                e.finality_status, e.is_reverted, e.blob_ref)) from ledger.normalized_events e",
        "select format('%s', (d.normalized_event_id, d.delta_index, d.asset_id, d.from_account_id, d.to_account_id,
                d.qty_delta)) from ledger.normalized_event_deltas d",
        "select format('%s', (n.id, n.finality_status)) from ledger.events_now n",
        "select format('%s', projection.event_origin(md5('1')::uuid))",
    ] {
        let rows = conn.query("read everything", &format!("{sql} order by 1"), &[]).await.expect("reads");
        all.extend(rows.iter().map(|row| row.get::<_, String>(0)));
    }
    all
}

#[tokio::test]
async fn what_was_three_rows_is_one_and_says_the_same() {
    let (_test, db) = database().await;
    let conn = db.conn().await.expect("connects");
    conn.batch("fill", THREE_ROWS).await.expect("fills");
    let before = everything(&conn).await;
    assert_eq!(before.len(), 4 + 4 + 3 + 4 + 1);
    apply(&conn).await.expect("migrates");
    assert_eq!(everything(&conn).await, before);
    let again = "insert into ledger.normalized_events select * from ledger.normalized_events limit 1";
    let error = conn.batch("insert twice", again).await.expect_err("an id is unique");
    assert!(error.to_string().contains("normalized_events_pkey"), "{error}");
}

/// In the middle of a long history indexes are away: they come back under their new names.
#[tokio::test]
async fn indexes_that_are_away_come_back() {
    let (_test, db) = database().await;
    let mut conn = db.conn().await.expect("connects");
    let away = tidemark_store::bulk::defer_indexes(&mut conn).await.expect("puts off");
    assert!(away > 0);
    apply(&conn).await.expect("migrates");
    tidemark_store::bulk::restore_indexes(&mut conn).await.expect("builds");
    let sql = "select count(*) from pg_indexes where schemaname = 'ledger'
                  and indexname in ('normalized_events_by_asset', 'normalized_events_by_time')";
    let there: i64 = conn.query_one("look for indexes", sql, &[]).await.expect("reads").get(0);
    assert_eq!(there, 2);
}

#[tokio::test]
async fn an_event_with_several_movements_is_refused_with_the_next_step() {
    let (_test, db) = database().await;
    let conn = db.conn().await.expect("connects");
    conn.batch("fill", THREE_ROWS).await.expect("fills");
    let second =
        "insert into ledger.normalized_event_deltas select normalized_event_id, 1, asset_id, from_account_id,
                      to_account_id, qty_delta from ledger.normalized_event_deltas limit 1";
    conn.batch("a second movement", second).await.expect("inserts");
    let error = apply(&conn).await.expect_err("refuses");
    assert!(error.to_string().contains("several movements"), "{error}");
    assert_eq!(everything(&conn).await.len(), 4 + 4 + 4 + 4 + 1, "nothing was touched");
}
