//! The ingester against a scripted chain and a real Postgres.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

mod crash;
mod fake;
mod history;
mod lanes;
mod reorg;
mod shards;
mod tip;
mod verify;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value;
use tidemark_model::chain::ChainAdapter;
use tidemark_model::envelope::Draft;
use tidemark_model::ids::{Height, HeightRange, NetworkId};
use tidemark_model::redact::RedactedUrl;
use tidemark_pipeline::ingest::verify::verify_completeness;
use tidemark_pipeline::ingest::{Emit, IngestError, IngestOptions, IngestStatus, Ingester};
use tidemark_store::blob::{BlobStore, ObjectBlobs};
use tidemark_store::cursor::{self, Shard};
use tidemark_store::partitions::PartitionSizes;
use tidemark_store::raw::RawReader;
use tidemark_store::{Conn, Db, DbOptions, StoreError, Tx};
use tidemark_testkit::pg::TestDb;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use fake::{FakeChain, FakeShard};

const NETWORK: NetworkId = NetworkId(7);
const DEADLINE: Duration = Duration::from_secs(20);

/// Writes drafts into a table of the test; the key refuses an id that comes twice.
struct Recorder;

#[async_trait]
impl Emit for Recorder {
    async fn append(&self, tx: &Tx<'_>, drafts: &[Draft]) -> Result<(), StoreError> {
        for draft in drafts {
            tx.execute(
                "record a draft",
                "insert into test_outbox (event_id, subject, payload) values ($1, $2, $3)",
                &[&draft.event_id.to_string(), &draft.subject.to_string(), &draft.payload],
            )
            .await?;
        }
        Ok(())
    }
}

struct World {
    db: Db,
    blobs: Arc<dyn BlobStore>,
    chain: Arc<FakeChain>,
    shards: u32,
}

/// A running ingester.
struct Running {
    ingester: Ingester,
    stop: CancellationToken,
    task: JoinHandle<Result<(), IngestError>>,
}

fn options(instance: &str) -> IngestOptions {
    IngestOptions {
        instance: instance.to_owned(),
        poll_interval_min: Duration::from_millis(5),
        poll_interval_max: Duration::from_millis(10),
        ranges_in_flight: 3,
        lease_range: 20,
        lease_ttl: Duration::from_millis(900),
        tip_blocks_max: 4,
        history_gap_min: 5,
        backoff_min: Duration::from_millis(5),
        backoff_max: Duration::from_millis(40),
        head_refresh: Duration::from_millis(20),
        halt_poll: Duration::from_millis(20),
        partitions: PartitionSizes { blocks: 50, transactions: 60, events: 70, lookups: 50, transfers: 100 },
        ..IngestOptions::default()
    }
}

impl World {
    async fn new(chain: FakeChain) -> Self {
        let test = TestDb::new().await.expect("a database");
        let db_options = DbOptions { connections_max: 20, ..DbOptions::default() };
        let db = Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &db_options).expect("a pool");
        let world = Self { db, blobs: Arc::new(ObjectBlobs::memory()), chain: Arc::new(chain), shards: 1 };
        world
            .conn()
            .await
            .batch(
                "create",
                "create table test_outbox (seq bigint generated always as identity, event_id text primary key,
                                           subject text not null, payload jsonb not null)",
            )
            .await
            .expect("creates");
        world
    }
    async fn conn(&self) -> Conn {
        self.db.conn().await.expect("connects")
    }
    /// The same, read in several shards.
    async fn sharded(chain: FakeChain, shards: u32) -> Self {
        Self { shards, ..Self::new(chain).await }
    }
    fn ingester(&self, options: IngestOptions) -> Ingester {
        if self.shards > 1 {
            let of = i32::try_from(self.shards).unwrap();
            let parts = (0..self.shards).map(|number| {
                let shard = Shard { number: i32::try_from(number).unwrap(), of };
                let chain = Arc::clone(&self.chain);
                let adapter: Arc<dyn ChainAdapter> = Arc::new(FakeShard { chain, number, of: self.shards });
                (shard, adapter)
            });
            let (db, blobs) = (self.db.clone(), Arc::clone(&self.blobs));
            return Ingester::sharded(parts.collect(), db, blobs, Arc::new(Recorder), options);
        }
        let adapter: Arc<FakeChain> = Arc::clone(&self.chain);
        Ingester::new(adapter, self.db.clone(), Arc::clone(&self.blobs), Arc::new(Recorder), options)
    }
    #[expect(clippy::disallowed_methods, reason = "a test joins its task itself")]
    fn start(&self, options: IngestOptions) -> Running {
        let ingester = self.ingester(options);
        let stop = CancellationToken::new();
        let (runner, token) = (ingester.clone(), stop.clone());
        let task = tokio::spawn(async move { runner.run(token).await });
        Running { ingester, stop, task }
    }
    /// Runs until the whole chain is stored.
    async fn catch_up(&self) {
        let running = self.start(options("a"));
        running.reach(self.height()).await;
        running.end().await;
    }
    fn height(&self) -> u64 {
        self.chain.chain.lock().unwrap().next()
    }
    fn all(&self) -> HeightRange {
        let start = self.chain.chain.lock().unwrap().blocks[0].height;
        HeightRange::new(start, Height(self.height())).expect("a chain has blocks")
    }
    /// raw.* equals the chain: every block that must be there, all records, evidence, lookups, no orphan row
    /// among them.
    async fn assert_equals_chain(&self) {
        let range = self.all();
        let conn = self.conn().await;
        let reader = RawReader::new(Arc::clone(&self.blobs));
        let stored = reader.read_range(&conn, NETWORK, range).await.expect("reads");
        let mut truth: Vec<_> = self.chain.chain.lock().unwrap().blocks.clone();
        if self.shards > 1 {
            truth.iter_mut().for_each(|block| block.transactions.clear());
        }
        let mut rows = stored.iter().peekable();
        for block in &truth {
            match rows.next_if(|row| row.height == block.height) {
                Some(row) => assert_eq!(row, block),
                None => assert!(block.records.is_empty(), "block {} is missing", block.height),
            }
        }
        assert!(rows.next().is_none(), "there are more blocks than the chain has");
        let report = verify_completeness(&conn, NETWORK, range).await.expect("verifies");
        assert!(report.is_complete(), "{:#?}", report.problems);
        let wrong = "
            select (select count(*) from raw.blocks) - (select count(distinct id) from raw.block_lookup),
                   (select count(*) from raw.blocks) - (select count(*) from raw.block_lookup),
                   (select count(*) from raw.tx_lookup) - (select count(distinct (block_height, tx_id)) from raw.events)";
        let row = conn.query_one("compare lookups", wrong, &[]).await.expect("compares");
        let wrong: (i64, i64, i64) = (row.get(0), row.get(1), row.get(2));
        assert_eq!(wrong, (0, 0, 0), "lookups differ from rows");
    }
    /// Do all cursors stand at the chain's end, on its branch?
    async fn is_at_the_end(&self) -> bool {
        let (next, truth) = (Height(self.height()), self.chain.chain.lock().unwrap().head().hash);
        let cursors = cursor::of_network(&self.conn().await, NETWORK).await.expect("reads");
        let all = cursors.len() == usize::try_from(self.shards).unwrap();
        // History that ends in an empty block knows no hash.
        let there = |cursor: &cursor::Cursor| {
            cursor.next == next && cursor.last_hash.is_none_or(|hash| hash == truth)
        };
        all && cursors.iter().all(there)
    }
    async fn drafts(&self) -> Vec<(String, Value)> {
        let rows = self
            .conn()
            .await
            .query("read drafts", "select subject, payload from test_outbox order by seq", &[])
            .await
            .expect("reads");
        rows.iter().map(|row| (row.get(0), row.get(1))).collect()
    }
    /// The chain a consumer sees who follows the drafts: height to hash.
    async fn replayed(&self) -> std::collections::BTreeMap<u64, String> {
        let mut seen = std::collections::BTreeMap::new();
        for (subject, payload) in self.drafts().await {
            let text = |value: &Value| value.as_str().expect("text").to_owned();
            match subject.as_str() {
                "chain.block.ingested.v1" => {
                    let height = payload["height"].as_u64().expect("a height");
                    if let Some(parent) = height.checked_sub(1).and_then(|below| seen.get(&below)) {
                        assert_eq!(*parent, text(&payload["parent_hash"]), "block {height} has no parent");
                    }
                    assert_eq!(
                        seen.insert(height, text(&payload["hash"])),
                        None,
                        "block {height} came twice"
                    );
                }
                "chain.reorg.detected.v1" => {
                    for block in payload["orphaned"].as_array().expect("a list") {
                        let height = block["height"].as_u64().expect("a height");
                        assert_eq!(seen.remove(&height), Some(text(&block["hash"])), "orphan {height}");
                    }
                }
                "chain.finality.advanced.v1" => {}
                other => panic!("{other} was not expected"),
            }
        }
        seen
    }
    /// Consumers of events see exactly the chain, without a hole, at least from `first` on. A few blocks below
    /// it may have their event too: a gap that is not worth a history.
    async fn assert_events_from(&self, first: u64) {
        let seen = self.replayed().await;
        let begins = *seen.keys().next().expect("there are events");
        assert!(begins <= first, "events begin at {begins}, not at {first}");
        assert!(begins + options("").history_gap_min >= first, "history has events from {begins} on");
        let truth: std::collections::BTreeMap<u64, String> = {
            let chain = self.chain.chain.lock().unwrap();
            let blocks = chain.blocks.iter().filter(|block| block.height.0 >= begins);
            blocks.map(|block| (block.height.0, block.hash.to_string())).collect()
        };
        assert_eq!(seen, truth);
    }
    async fn scalar(&self, sql: &str) -> i64 {
        self.conn().await.query_one("count", sql, &[]).await.expect("counts").get(0)
    }
    async fn execute(&self, sql: &str) {
        self.conn().await.batch("change", sql).await.expect("changes");
    }
}

impl Running {
    async fn wait_for(&self, what: &str, mut condition: impl FnMut(&IngestStatus) -> bool) -> IngestStatus {
        let mut status = self.ingester.status();
        let deadline = tokio::time::Instant::now() + DEADLINE;
        loop {
            let now = status.borrow_and_update().clone();
            if condition(&now) {
                return now;
            }
            assert!(!self.task.is_finished(), "the ingester ended before {what}: {now:?}");
            assert!(tokio::time::Instant::now() < deadline, "waited too long for {what}: {now:?}");
            let _ = tokio::time::timeout(Duration::from_millis(100), status.changed()).await;
        }
    }
    /// Waits until everything below `height` is stored.
    async fn reach(&self, height: u64) {
        self.wait_for(&format!("height {height}"), |status| status.next == Some(Height(height))).await;
    }
    async fn end(self) {
        self.stop.cancel();
        let ended = tokio::time::timeout(DEADLINE, self.task).await.expect("ends in time");
        ended.expect("no panic").expect("ends without an error");
    }
}

/// Waits on a condition of the database.
async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + DEADLINE;
    while !condition().await {
        assert!(tokio::time::Instant::now() < deadline, "waited too long for {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
