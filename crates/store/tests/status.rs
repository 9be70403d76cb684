//! What `status` reads is what processes wrote.

use tidemark_model::redact::RedactedUrl;
use tidemark_store::status::{self, Process};
use tidemark_store::{Db, DbOptions};
use tidemark_testkit::pg::TestDb;
use time::OffsetDateTime;

fn process(instance: &str, role: &str, state: &str, restarts: i64) -> Process {
    Process {
        instance: instance.into(),
        role: role.into(),
        state: state.into(),
        restarts,
        last_error: (restarts > 0).then(|| "broken".into()),
        started_at: OffsetDateTime::from_unix_timestamp(1_700_000_000).expect("a time"),
        heartbeat_at: OffsetDateTime::UNIX_EPOCH,
        silent_seconds: 0.0,
    }
}

#[tokio::test]
async fn a_heartbeat_is_seen_replaced_and_forgotten() {
    let test = TestDb::new().await.expect("a database");
    let db = Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &DbOptions::default()).expect("a pool");
    let conn = db.conn().await.expect("connects");
    let first = [process("a", "ingest", "starting", 0), process("a", "api", "running", 0)];
    status::heartbeat(&conn, "a", &first).await.expect("writes");
    status::heartbeat(&conn, "b", &[process("b", "ingest", "running", 0)]).await.expect("writes");
    status::heartbeat(&conn, "a", &[process("a", "ingest", "restarting", 2)]).await.expect("writes");
    let seen = status::processes(&conn).await.expect("reads");
    let short: Vec<_> =
        seen.iter().map(|one| (&*one.instance, &*one.role, &*one.state, one.restarts)).collect();
    assert_eq!(
        short,
        [("a", "api", "running", 0), ("a", "ingest", "restarting", 2), ("b", "ingest", "running", 0)]
    );
    assert_eq!(seen[1].last_error.as_deref(), Some("broken"));
    assert!(seen.iter().all(|one| (0.0..60.0).contains(&one.silent_seconds)));
    status::forget(&conn, "a").await.expect("forgets");
    let left: Vec<_> =
        status::processes(&conn).await.expect("reads").into_iter().map(|one| one.instance).collect();
    assert_eq!(left, ["b"]);
}

#[tokio::test]
async fn heights_of_both_sides_are_read() {
    let test = TestDb::new().await.expect("a database");
    let db = Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &DbOptions::default()).expect("a pool");
    let conn = db.conn().await.expect("connects");
    conn.batch(
        "fill",
        "insert into ref.networks (id, slug, family, start_block, confirmations)
         values (1, 'one', 'evm', 0, 12), (2, 'two', 'evm', 5, 12);
         insert into system.network_heads (network_id, latest_height, latest_hash, finalized_height) values (1, 100, '', 64);
         insert into system.sync_cursors (id, network_id, cursor_type, start_height, last_processed_block)
         values ('a', 1, 'height', 0, 90), ('b', 1, 'height', 0, 80);
         insert into ledger.network_progress (network_id, head_height, finalized_height) values (1, 79, 60);
         insert into projection.network_status (network_id, slug, family, start_block, confirmations, projected_height, events_total)
         values (1, 'one', 'evm', 0, 12, 78, 7)",
    )
    .await
    .expect("writes");
    let raw = status::raw_progress(&conn).await.expect("reads");
    assert_eq!((raw[0].latest, raw[0].finalized, raw[0].ingested), (Some(100), Some(64), Some(80)));
    assert_eq!((raw[1].latest, raw[1].ingested), (None, None));
    let app = status::app_progress(&conn).await.expect("reads");
    assert_eq!(
        (app[0].normalized, app[0].finalized, app[0].projected, app[0].events),
        (Some(79), Some(60), Some(78), 7)
    );
}
