//! Reading pages ahead: all that live looks up, within its limits, and where the server has no means to, nothing.

use std::time::Duration;

use tidemark_model::redact::RedactedUrl;
use tidemark_store::{Db, DbOptions, warm};
use tidemark_testkit::pg::TestDb;

const LONG: Duration = Duration::from_secs(60);

async fn database() -> (TestDb, Db, Db) {
    let test = TestDb::new().await.expect("a database");
    let url = RedactedUrl::parse(&test.url).expect("a URL");
    let owner = Db::open(&url, &DbOptions::default()).expect("a pool");
    let db = Db::open(&url, &DbOptions { role: Some("tidemark_worker".to_owned()), ..DbOptions::default() })
        .expect("a pool");
    (test, owner, db)
}

#[tokio::test]
async fn everything_that_live_looks_up_is_read_by_a_worker() {
    let (_test, owner, worker) = database().await;
    let conn = owner.conn().await.expect("connects");
    let fill = "
        insert into ledger.accounts (id, network_id, address_normalized, first_seen_at)
        select md5(n::text)::uuid, 1, n::text, now() from generate_series(1, 5000) n";
    conn.batch("fill", fill).await.expect("fills");
    let pages = "select sum(pg_relation_size(r) / current_setting('block_size')::bigint)::bigint
                   from unnest(array['ledger.accounts', 'ledger.accounts_pkey', 'ledger.accounts_by_address']) r";
    let pages: i64 = conn.query_one("count pages", pages, &[]).await.expect("counts").get(0);
    let worker = worker.conn().await.expect("connects");
    assert_eq!(warm::up(&worker, LONG).await.expect("does nothing"), None, "nobody took the extension yet");
    for _ in 0..2 {
        warm::prepare(&conn).await.expect("takes the extension");
    }
    let warmed = warm::up(&worker, LONG).await.expect("reads").expect("the server has the extension");
    assert!(warmed.is_all && warmed.pages >= pages, "{warmed:?} of {pages}");
    let stopped = warm::up(&worker, Duration::ZERO).await.expect("reads").expect("has the extension");
    assert!(!stopped.is_all && stopped.pages == 0, "{stopped:?}: its time was over");
}

/// A login without the right to: nothing is read ahead, and nothing fails.
#[tokio::test]
async fn who_may_not_take_the_extension_goes_on_without() {
    let (_test, _owner, worker) = database().await;
    let worker = worker.conn().await.expect("connects");
    warm::prepare(&worker).await.expect("does nothing");
    assert_eq!(warm::up(&worker, LONG).await.expect("does nothing"), None);
}
