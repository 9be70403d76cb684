//! raw.* against a real server: what goes in comes out, on every path; partitions, leases' neighbours, errors.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

use std::collections::HashMap;
use std::sync::Arc;

use alloy_primitives::U256;
use bytes::Bytes;
use serde_json::json;
use tidemark_model::chain::*;
use tidemark_model::ids::*;
use tidemark_model::redact::RedactedUrl;
use tidemark_store::blob::{BlobStore, ObjectBlobs};
use tidemark_store::errors::{IndexingError, RAW_DATA_BYTES_MAX, Severity};
use tidemark_store::partitions::{PartitionSizes, Partitions, RAW_TABLES, Table, index_partition};
use tidemark_store::raw::{RawReader, RawWriter, audit, block_lookup, orphans, tx_lookup};
use tidemark_store::{Conn, Db, DbOptions, StoreError, cursor, errors};
use tidemark_testkit::pg::TestDb;
use time::OffsetDateTime;

const NETWORK: NetworkId = NetworkId(11);
const SIZES: PartitionSizes =
    PartitionSizes { blocks: 10, transactions: 10, events: 20, lookups: 10, transfers: 20 };

async fn db() -> Db {
    let test = TestDb::new().await.expect("a database");
    let options = DbOptions { connections_max: 16, ..DbOptions::default() };
    Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &options).expect("a pool")
}

fn range(from: u64, to: u64) -> HeightRange {
    HeightRange::new(Height(from), Height(to)).expect("not empty")
}

fn record(height: u64, index: u32, data: usize, payload: Option<serde_json::Value>) -> RawRecord {
    let mut tx = [u8::try_from(index / 2).expect("small"); 32];
    tx[..8].copy_from_slice(&height.to_be_bytes());
    RawRecord {
        tx: TxId::from(tx),
        tx_index: index / 2,
        index,
        emitter: Bytes::from(vec![1; 20]),
        topics: Bytes::from(vec![2; 64]),
        data: Bytes::from(vec![3; data]),
        payload,
    }
}

fn block(height: u64, salt: u8, records: Vec<RawRecord>) -> RawBlock {
    let named = |height: u64, salt: u8| {
        let mut name = [salt; 32];
        name[..8].copy_from_slice(&height.to_be_bytes());
        BlockHash(name)
    };
    RawBlock {
        height: Height(height),
        hash: named(height, salt),
        parent: named(height.wrapping_sub(1), salt),
        time: OffsetDateTime::from_unix_timestamp(1_700_000_000).expect("a time"),
        tx_count: None,
        transactions: vec![],
        records,
        payload: None,
    }
}

fn batch(covered: HeightRange, blocks: Vec<RawBlock>) -> RawBatch {
    let records = blocks.iter().map(|block| u64::try_from(block.records.len()).expect("small")).sum();
    let evidence = RangeEvidence {
        provider: "p".into(),
        head_seen: covered.last(),
        records,
        foreign: 1,
        requests: 2,
        checks: vec!["bloom".into(), "links".into()],
        coverage: BlockCoverage::WithRecords,
    };
    RawBatch { covered, blocks, evidence }
}

struct Raw {
    db: Db,
    writer: RawWriter,
    reader: RawReader,
    blobs: Arc<dyn BlobStore>,
}

impl Raw {
    async fn new() -> Self {
        Self::on(Arc::new(ObjectBlobs::memory())).await
    }
    async fn on(blobs: Arc<dyn BlobStore>) -> Self {
        let db = db().await;
        let partitions = Partitions::new(SIZES, HashMap::new());
        partitions
            .ensure_raw(&mut db.conn().await.unwrap(), NETWORK, range(0, 40))
            .await
            .expect("partitions");
        Self {
            db,
            writer: RawWriter::new(Arc::clone(&blobs), 8192),
            reader: RawReader::new(Arc::clone(&blobs)),
            blobs,
        }
    }
    async fn conn(&self) -> Conn {
        self.db.conn().await.expect("connects")
    }
    async fn copy(&self, batch: RawBatch) -> usize {
        let prepared = self.writer.prepare(batch).await.expect("prepares");
        let mut conn = self.conn().await;
        let tx = conn.tx().await.unwrap();
        self.writer.copy(&tx, NETWORK, 0, &prepared).await.expect("copies");
        tx.commit().await.unwrap();
        prepared.offloaded()
    }
    async fn heal(&self, batch: RawBatch) {
        let prepared = self.writer.prepare(batch).await.expect("prepares");
        let mut conn = self.conn().await;
        let tx = conn.tx().await.unwrap();
        self.writer.heal(&tx, NETWORK, 0, &prepared).await.expect("heals");
        tx.commit().await.unwrap();
    }
    async fn read(&self, range: HeightRange) -> Vec<RawBlock> {
        self.reader.read_range(&self.conn().await, NETWORK, range).await.expect("reads")
    }
    async fn count(&self, sql: &str) -> i64 {
        self.conn().await.query_one("count", sql, &[]).await.expect("counts").get(0)
    }
}

#[tokio::test]
async fn every_body_comes_back_as_it_went_in() {
    let raw = Raw::new().await;
    let mut first = block(
        3,
        1,
        vec![
            record(3, 0, 10, None),
            record(3, 1, 0, Some(json!({"a": [1, "zwei", null]}))),
            record(3, 4, 8193, None),
            record(3, 5, 5, Some(json!({"big": "x".repeat(9000)}))),
            record(3, 6, 5, Some(json!({"nul\u{0}": "in\u{0}side"}))),
            record(3, 7, 8192, None),
        ],
    );
    first.tx_count = Some(9);
    first.payload = Some(json!({"blob": "y".repeat(9000)}));
    first.transactions = vec![RawTransaction {
        id: first.records[0].tx,
        index: 0,
        sender: Bytes::from(vec![9; 20]),
        receiver: Some(Bytes::from(vec![8; 20])),
        value: U256::MAX,
        succeeded: None,
        payload: json!({"input": "z".repeat(10_000)}),
    }];
    let second = block(9, 1, vec![record(9, 0, 1, None)]);
    let blocks = vec![first, second];
    assert_eq!(raw.copy(batch(range(0, 10), blocks.clone())).await, 5);
    assert_eq!(raw.read(range(0, 10)).await, blocks);
    assert_eq!(raw.count("select count(*) from raw.events where data is null and payload_ref is not null and length(payload_hash) = 32").await, 3);
    let found = tx_lookup(&raw.conn().await, None, &blocks[0].records[2].tx).await.unwrap();
    assert_eq!((found.len(), found[0].height, found[0].index), (1, Height(3), 2));
    let found = block_lookup(&raw.conn().await, Some(NETWORK), &blocks[1].hash).await.unwrap();
    assert_eq!(found[0].height, Height(9));
}

#[tokio::test]
async fn healing_makes_the_range_exactly_the_batch() {
    let raw = Raw::new().await;
    let old = vec![
        block(3, 1, vec![record(3, 0, 10, None), record(3, 1, 10, None)]),
        block(5, 1, vec![record(5, 0, 1, None)]),
        block(12, 1, vec![record(12, 0, 1, None)]),
    ];
    raw.copy(batch(range(0, 20), old.clone())).await;
    // Over the middle: one block changed, one gone, one new.
    let new = vec![
        block(3, 1, vec![record(3, 0, 11, None), record(3, 2, 9000, None)]),
        block(6, 1, vec![record(6, 0, 2, Some(json!(1)))]),
    ];
    for _ in 0..2 {
        raw.heal(batch(range(2, 10), new.clone())).await;
        let expected = [new.clone(), vec![old[2].clone()]].concat();
        assert_eq!(raw.read(range(0, 20)).await, expected);
        assert_eq!(raw.count("select count(*) from raw.tx_lookup").await, 4);
        assert_eq!(raw.count("select count(*) from raw.block_lookup").await, 3);
        let tiles = audit::tiles(&raw.conn().await, NETWORK, 0, range(0, 20), 10).await.unwrap();
        let tiles: Vec<_> = tiles.iter().map(|tile| (tile.range, tile.records)).collect();
        assert_eq!(tiles, [(range(0, 2), 0), (range(2, 10), 3), (range(10, 20), 1)]);
    }
}

#[tokio::test]
async fn chunks_are_bounded_and_leave_nothing_out() {
    let raw = Raw::new().await;
    let blocks: Vec<_> = (0..38)
        .filter(|height| height % 4 != 0)
        .map(|height| {
            let records = (0..u32::try_from(height % 7).unwrap()).map(|at| record(height, at, 4, None));
            block(height, 1, records.collect())
        })
        .collect();
    raw.copy(batch(range(0, 40), blocks.clone())).await;
    let conn = raw.conn().await;
    for records in [1, 10, 1000] {
        let mut chunks = raw.reader.chunks(NETWORK, range(0, 40), records);
        let (mut all, mut at) = (Vec::new(), Height(0));
        while let Some((chunk, part)) = chunks.next(&conn).await.expect("reads") {
            assert_eq!(chunk.from(), at);
            at = chunk.to();
            let held: usize = part.iter().map(|block| block.records.len()).sum();
            assert!(held < records + 7, "{held} records in a chunk of {records}");
            all.extend(part);
        }
        assert_eq!((at, &all), (Height(40), &blocks));
    }
}

#[tokio::test]
async fn a_row_without_its_block_is_not_read_over() {
    let raw = Raw::new().await;
    raw.copy(batch(range(0, 10), vec![block(3, 1, vec![record(3, 0, 1, None)]), block(4, 1, vec![])])).await;
    raw.conn().await.batch("break", "delete from raw.blocks where height = 3").await.unwrap();
    let read = raw.reader.read_range(&raw.conn().await, NETWORK, range(0, 10)).await;
    assert!(read.expect_err("refused").to_string().contains("verify completeness"));
}

#[tokio::test]
async fn orphans_are_readable_until_finality() {
    let raw = Raw::new().await;
    let blocks = vec![
        block(3, 1, vec![record(3, 0, 9000, Some(json!({"k": 1}))), record(3, 1, 2, None)]),
        block(4, 1, vec![]),
    ];
    raw.copy(batch(range(0, 10), blocks.clone())).await;
    let mut conn = raw.conn().await;
    let tx = conn.tx().await.unwrap();
    let out = orphans::take_out(&tx, NETWORK, &[cursor::Shard::ONLY], range(3, 10)).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(out, [blocks[0].block_ref(), blocks[1].block_ref()]);
    assert_eq!(raw.read(range(0, 10)).await, []);
    let tiles = audit::tiles(&conn, NETWORK, 0, range(0, 10), 10).await.unwrap();
    assert_eq!((tiles.len(), tiles[0].range, tiles[0].records), (1, range(0, 3), 0));
    let kept = orphans::read(&conn, &raw.blobs, NETWORK, &blocks[0].hash).await.unwrap().unwrap();
    assert_eq!(kept, blocks[0]);
    let tx = conn.tx().await.unwrap();
    assert_eq!(orphans::drop_final(&tx, NETWORK, Height(3)).await.unwrap(), 1);
    assert_eq!(orphans::came_back(&tx, NETWORK, &[blocks[1].hash]).await.unwrap(), 1);
    tx.commit().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_made_by_many_at_once_are_made_once() {
    let db = db().await;
    let mut tasks = tokio::task::JoinSet::new();
    for worker in 0..8_u64 {
        let db = db.clone();
        tasks.spawn(async move {
            let partitions = Partitions::new(SIZES, HashMap::new());
            let mut conn = db.conn().await.unwrap();
            for step in 0..4_u64 {
                let from = (worker % 4) * 7 + step * 13;
                partitions.ensure_raw(&mut conn, NETWORK, range(from, from + 15)).await.expect("makes");
            }
            partitions.ensure_transfers(&mut conn, NETWORK, range(5, 6)).await.expect("makes");
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.expect("no panic");
    }
    let conn = db.conn().await.unwrap();
    let overlaps = "
        select count(*) from raw.partitions a join raw.partitions b
            on a.parent = b.parent and a.network_id = b.network_id and a.from_height < b.from_height
           and a.to_height > b.from_height";
    assert_eq!(conn.query_one("count", overlaps, &[]).await.unwrap().get::<_, i64>(0), 0);
    let two_ahead = "select max(to_height) from raw.partitions where parent = 'raw.blocks'";
    let last: i64 = conn.query_one("count", two_ahead, &[]).await.unwrap().get(0);
    assert_eq!(last, 90); // 14 + 39 + 15 = 68 ends in the second half of 60..70, and two more.
}

#[tokio::test]
async fn indexes_come_late_and_once() {
    let db = db().await;
    let partitions = Partitions::new(SIZES, HashMap::new());
    let mut conn = db.conn().await.unwrap();
    partitions.ensure_raw(&mut conn, NETWORK, range(0, 15)).await.unwrap();
    partitions.ensure_transfers(&mut conn, NETWORK, range(0, 15)).await.unwrap();
    let due = partitions.indexes_due(&conn, &RAW_TABLES, NETWORK, Height(10)).await.unwrap();
    let due: Vec<_> = due.into_iter().map(|partition| (partition.table, partition)).collect();
    let tables: Vec<Table> = due.iter().map(|(table, _)| *table).collect();
    assert_eq!(tables, [Table::BlockLookup, Table::Blocks, Table::Transactions, Table::TxLookup]);
    for (_, partition) in &due {
        index_partition(&mut conn, partition).await.unwrap();
        index_partition(&mut conn, partition).await.unwrap();
    }
    assert_eq!(partitions.indexes_due(&conn, &RAW_TABLES, NETWORK, Height(10)).await.unwrap(), []);
    for _ in 0..2 {
        partitions
            .ensure_indexed(&mut conn, &[Table::Transfers, Table::Events], NETWORK, Height(14))
            .await
            .unwrap();
    }
    let indexes =
        "select count(*) from pg_indexes where tablename like '%\\_11\\_%' and indexname like '%\\_by\\_%'";
    // tx_lookup 2, block_lookup 1, transactions 1, events 1, transfers 4.
    assert_eq!(conn.query_one("count", indexes, &[]).await.unwrap().get::<_, i64>(0), 9);
}

/// Id and name are both unique: two that register the same network at the same moment must not trip over the other
/// of the two (seen once, as a start that failed).
#[tokio::test(flavor = "multi_thread")]
async fn a_network_registered_by_many_at_once_is_there_once() {
    let db = db().await;
    for round in 0..25 {
        let network = Network {
            id: NetworkId(1_000 + round),
            slug: format!("n{round}"),
            family: Family::Evm,
            start_block: Height(0),
            confirmations: 1,
            reorg_depth_max: 1,
        };
        let mut tasks = tokio::task::JoinSet::new();
        let gate = std::sync::Arc::new(tokio::sync::Barrier::new(8));
        for _ in 0..8 {
            let (db, network, gate) = (db.clone(), network.clone(), std::sync::Arc::clone(&gate));
            tasks.spawn(async move {
                let conn = db.conn().await.unwrap();
                gate.wait().await;
                cursor::ensure_network(&conn, &network).await.expect("registers");
            });
        }
        while let Some(ended) = tasks.join_next().await {
            ended.expect("no panic");
        }
    }
}

#[tokio::test]
async fn a_cursor_moves_only_from_where_it_is() {
    let db = db().await;
    let mut conn = db.conn().await.unwrap();
    let network = Network {
        id: NETWORK,
        slug: "n".into(),
        family: Family::Evm,
        start_block: Height(0),
        confirmations: 1,
        reorg_depth_max: 1,
    };
    let cursor = cursor::ensure(&conn, &network, cursor::Shard::ONLY).await.unwrap();
    assert_eq!((cursor.next, cursor.last()), (Height(0), None));
    let tx = conn.tx().await.unwrap();
    let moved = cursor::advance(&tx, &cursor, Height(5), Some(BlockHash([5; 32]))).await.unwrap();
    assert!(matches!(cursor::advance(&tx, &cursor, Height(6), None).await, Err(StoreError::Fenced { .. })));
    // The same height under another hash is another position.
    let other = cursor::Cursor { last_hash: Some(BlockHash([6; 32])), ..moved.clone() };
    assert!(matches!(cursor::advance(&tx, &other, Height(6), None).await, Err(StoreError::Fenced { .. })));
    tx.commit().await.unwrap();
    assert_eq!(cursor::ensure(&conn, &network, cursor::Shard::ONLY).await.unwrap(), moved);
}

#[tokio::test]
async fn finality_is_monotone_and_a_halt_is_kept() {
    let db = db().await;
    let mut conn = db.conn().await.unwrap();
    cursor::ensure_head(&conn, NETWORK).await.unwrap();
    let at = |height: u64| BlockRef {
        height: Height(height),
        hash: BlockHash([u8::try_from(height).unwrap(); 32]),
    };
    for (latest, finalized, moved, expected) in [
        (9, None, false, None),
        (10, Some(5), true, Some(5)),
        (8, Some(4), false, Some(5)),
        (8, None, false, Some(5)),
    ] {
        let tx = conn.tx().await.unwrap();
        let head = Head { latest: at(latest), safe: None, finalized: finalized.map(at) };
        assert_eq!(cursor::report_head(&tx, NETWORK, &head).await.unwrap(), moved);
        tx.commit().await.unwrap();
        let stored = cursor::head(&conn, NETWORK).await.unwrap().unwrap();
        assert_eq!((stored.latest, stored.finalized), (Some(Height(latest)), expected.map(at)));
    }
    cursor::halt(&conn, NETWORK, "why").await.unwrap();
    assert_eq!(cursor::head(&conn, NETWORK).await.unwrap().unwrap().halted.as_deref(), Some("why"));
    assert!(cursor::unhalt(&conn, NETWORK).await.unwrap());
    assert!(!cursor::unhalt(&conn, NETWORK).await.unwrap());
}

#[tokio::test]
async fn the_same_error_is_one_row_and_its_data_is_cut() {
    let db = db().await;
    let conn = db.conn().await.unwrap();
    let data = vec![0_u8; 10_000];
    let error = IndexingError {
        worker: "w",
        network: NETWORK,
        height: Height(3),
        tx: None,
        severity: Severity::Warn,
        message: "bad\u{0}thing",
        raw_data: Some(&data),
        raw_ref: None,
    };
    for _ in 0..3 {
        errors::record(&conn, &error).await.unwrap();
    }
    errors::record(&conn, &IndexingError { message: "another", ..error.clone() }).await.unwrap();
    let sql = "select occurrences, octet_length(raw_data) from app.indexing_errors order by occurrences desc";
    let rows = conn.query("read", sql, &[]).await.unwrap();
    assert_eq!((rows.len(), rows[0].get::<_, i64>(0)), (2, 3));
    assert!(usize::try_from(rows[0].get::<_, i32>(1)).unwrap() <= RAW_DATA_BYTES_MAX);
    assert_eq!(errors::resolve(&conn, "w", NETWORK, range(0, 9)).await.unwrap(), 2);
}

/// Bodies above the limit leave their rows and come back, damage is seen, and what is gone is said.
async fn offloads_to(url: &str, variables: Vec<(String, String)>) {
    let url = RedactedUrl::parse(url).expect("a URL");
    let blobs = Arc::new(ObjectBlobs::open_with(&url, variables).expect("opens"));
    let raw = Raw::on(Arc::<ObjectBlobs>::clone(&blobs)).await;
    let large = json!({ "text": "x".repeat(20_000), "nul": "a\u{0}b" });
    let records = vec![record(1, 0, 30_000, None), record(1, 1, 10, None), record(1, 2, 10, Some(large))];
    let blocks = vec![block(1, 1, records)];
    assert_eq!(raw.copy(batch(range(0, 3), blocks.clone())).await, 2);
    assert_eq!(raw.read(range(0, 3)).await, blocks);
    assert_eq!(
        raw.count("select count(*) from raw.events where payload_ref is not null and data is null").await,
        2
    );
    let missing = tidemark_store::blob::BlobRef::of(b"never put");
    blobs.get(&missing).await.expect_err("it is not there");
}

#[tokio::test]
async fn large_bodies_go_to_memory_and_to_a_folder() {
    offloads_to("memory:", vec![]).await;
    let folder = std::env::temp_dir().join(format!("tidemark-offload-{}", uuid::Uuid::new_v4()));
    offloads_to(&format!("file://{}", folder.display()), vec![]).await;
    std::fs::remove_dir_all(folder).expect("removes");
}

#[tokio::test]
async fn large_bodies_go_to_s3() {
    let Some(server) = tidemark_testkit::S3::start().await.expect("starts") else { return };
    offloads_to("s3://bodies/under/a/prefix", server.variables().into()).await;
    // Another key is refused, and the words say what could not be done.
    let mut variables: Vec<_> = server.variables().into();
    variables.iter_mut().filter(|(name, _)| name.contains("SECRET")).for_each(|(_, value)| value.push('x'));
    let url = RedactedUrl::parse("s3://bodies/under/a/prefix").expect("a URL");
    let blobs = ObjectBlobs::open_with(&url, variables).expect("opens");
    let error = blobs.put(Bytes::from_static(b"body")).await.expect_err("refused").to_string();
    assert!(error.starts_with("cannot put blob sha256:"), "{error}");
}
