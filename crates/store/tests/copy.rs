//! The COPY encoder against a real server: what goes in comes out.

use alloy_primitives::U256;
use tidemark_model::quantity::SignedQty;
use tidemark_model::redact::RedactedUrl;
use tidemark_store::copy::CopyBuffer;
use tidemark_store::{Db, DbOptions};
use tidemark_testkit::pg::TestDb;
use time::OffsetDateTime;
use uuid::Uuid;

async fn db() -> Db {
    let test = TestDb::new().await.expect("a database");
    Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &DbOptions::default()).expect("a pool")
}

#[tokio::test]
async fn every_type_round_trips() {
    let db = db().await;
    let mut conn = db.conn().await.expect("connects");
    let tx = conn.tx().await.expect("begins");
    tx.batch(
        "create",
        "create temp table c (a bool, b smallint, c int, d bigint, e bytea, f text, g uuid, h jsonb, i timestamptz, j numeric, k int)",
    )
    .await
    .expect("creates");
    let at = OffsetDateTime::from_unix_timestamp(1_700_000_000).expect("a time");
    let id = Uuid::from_u128(7);
    let json = serde_json::json!({"a": [1, "zwei"]});
    let mut rows = CopyBuffer::new(11);
    rows.row()
        .bool(true)
        .i16(-2)
        .i32(3)
        .i64(-4)
        .bytea(&[0, 255])
        .text("ünï")
        .uuid(id)
        .jsonb(&json)
        .timestamp(at);
    rows.u256(U256::from(42)).null();
    tx.copy_in("copy", "copy c from stdin (format binary)", rows).await.expect("copies");
    let row = tx.query_one("read", "select * from c", &[]).await.expect("reads");
    assert!(row.get::<_, bool>(0));
    assert_eq!((row.get::<_, i16>(1), row.get::<_, i32>(2), row.get::<_, i64>(3)), (-2, 3, -4));
    assert_eq!((row.get::<_, Vec<u8>>(4), row.get::<_, String>(5)), (vec![0, 255], "ünï".to_owned()));
    assert_eq!((row.get::<_, Uuid>(6), row.get::<_, serde_json::Value>(7)), (id, json));
    assert_eq!(row.get::<_, OffsetDateTime>(8), at);
    assert_eq!((row.get::<_, U256>(9), row.get::<_, Option<i32>>(10)), (U256::from(42), None));
}

#[tokio::test]
async fn numbers_of_every_length_round_trip() {
    let db = db().await;
    let mut conn = db.conn().await.expect("connects");
    let tx = conn.tx().await.expect("begins");
    tx.batch("create", "create temp table n (at int, v numeric(78, 0))").await.expect("creates");
    let mut values = vec![SignedQty::ZERO];
    let mut power = U256::from(1);
    for _ in 0..77 {
        for value in [power - U256::from(1), power, power + U256::from(1), power * U256::from(9)] {
            values.push(SignedQty::gain(value));
            values.push(SignedQty::loss(value));
        }
        power *= U256::from(10);
    }
    values.push(SignedQty::gain(U256::MAX));
    values.push(SignedQty::loss(U256::MAX));
    let mut rows = CopyBuffer::new(2);
    for (at, value) in (0..).zip(&values) {
        rows.row().i32(at).qty(*value);
    }
    tx.copy_in("copy", "copy n from stdin (format binary)", rows).await.expect("copies");
    let back = tx.query("read", "select v::text from n order by at", &[]).await.expect("reads");
    let back: Vec<String> = back.iter().map(|row| row.get(0)).collect();
    let expected: Vec<String> = values.iter().map(ToString::to_string).collect();
    assert_eq!(back, expected);
}

#[tokio::test]
async fn sorted_rows_are_the_same_rows_in_the_order_of_their_uuid() {
    let db = db().await;
    let mut conn = db.conn().await.expect("connects");
    let tx = conn.tx().await.expect("begins");
    tx.batch("create", "create temp table s (id uuid, n int, t text, at serial)").await.expect("creates");
    let mut rows = CopyBuffer::new(3);
    // Enough for several chunks, with NULLs and empty texts among the columns.
    for n in 0..20_000_i32 {
        let id = Uuid::new_v5(&Uuid::NAMESPACE_OID, &n.to_be_bytes());
        let text = ["", "short", "a longer text that fills the chunks sooner"];
        let text = text.get(usize::try_from(n % 4).expect("small")).copied();
        rows.row().uuid(id).i32(n).opt(text, CopyBuffer::text);
    }
    let copied = tx
        .copy_in("copy", "copy s (id, n, t) from stdin (format binary)", rows.sorted_by_leading_uuid())
        .await
        .expect("copies");
    assert_eq!(copied, 20_000);
    let row = tx
        .query_one(
            "look",
            "select count(distinct n), count(t), bool_and(ordered), sum(n)
               from (select n, t, lag(id) over (order by at) is null or lag(id) over (order by at) < id as ordered from s) x",
            &[],
        )
        .await
        .expect("answers");
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (20_000, 15_000));
    assert!(row.get::<_, bool>(2), "the order of arrival is the order of ids");
    assert_eq!(row.get::<_, i64>(3), 199_990_000);
    let empty = CopyBuffer::new(3).sorted_by_leading_uuid();
    assert_eq!(empty.rows(), 0);
}
