//! A hundred chains with every fault of bad nodes at once, read into raw.* by the ingester alone: no worker, no
//! bus, no relay. The raw store equals the truth, the proof of completeness agrees, hidden logs are found out
//! every time, and honest nodes are never complained about.
//!
//! `TIDEMARK_CHAOS_SEEDS=n` for another number of seeds, `TIDEMARK_CHAOS_SEED=s` for one of them.

use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::{FutureExt, StreamExt, stream};
use tidemark_adapters::evm::{EvmAdapter, EvmConfig};
use tidemark_model::chain::{ChainAdapter, Family, Network};
use tidemark_model::envelope::Draft;
use tidemark_model::ids::{Height, HeightRange, NetworkId};
use tidemark_model::redact::RedactedUrl;
use tidemark_pipeline::ingest::verify::verify_completeness;
use tidemark_pipeline::ingest::{Emit, IngestError, IngestOptions, Ingester};
use tidemark_rpc::EndpointConfig;
use tidemark_rpc::backoff::Backoff;
use tidemark_sim::{FaultProfile, ReorgKind, Sim, SimConfig, SimEvent, SimServer};
use tidemark_store::blob::ObjectBlobs;
use tidemark_store::cursor;
use tidemark_store::partitions::PartitionSizes;
use tidemark_store::{Db, DbOptions, StoreError, Tx};
use tidemark_testkit::pg::TestDb;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

const SEEDS: u64 = 100;
/// Most of a seed is waiting for slow nodes.
const AT_ONCE: usize = 8;
const PATIENCE: Duration = Duration::from_secs(120);

/// Runs `one` for every seed; a panic names the seed and the way to see it again.
async fn every_seed(test: &str, seeds: u64, one: impl AsyncFn(u64)) {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seeds: Vec<u64> = match number("TIDEMARK_CHAOS_SEED") {
        Some(seed) => vec![seed],
        None => (0..number("TIDEMARK_CHAOS_SEEDS").unwrap_or(seeds)).collect(),
    };
    stream::iter(seeds)
        .for_each_concurrent(AT_ONCE, async |seed| {
            if let Err(panic) = AssertUnwindSafe(one(seed)).catch_unwind().await {
                eprintln!(
                    "seed {seed} failed; to see it again: TIDEMARK_CHAOS_SEED={seed} cargo nextest run -p tidemark --test raw_chaos {test}"
                );
                resume_unwind(panic);
            }
        })
        .await;
}

/// Nobody listens: raw-only mode.
struct Silence;

#[async_trait]
impl Emit for Silence {
    async fn append(&self, _: &Tx<'_>, _: &[Draft]) -> Result<(), StoreError> {
        Ok(())
    }
}

struct World {
    seed: u64,
    sim: Sim,
    servers: Vec<SimServer>,
    db: Db,
    adapter: Arc<dyn ChainAdapter>,
}

struct Running {
    stop: CancellationToken,
    task: JoinSet<Result<(), IngestError>>,
}

impl World {
    async fn new(seed: u64, sim: Sim, providers: Vec<FaultProfile>, patient: bool) -> Self {
        let test = TestDb::new().await.expect("a database");
        let options = DbOptions { connections_max: 4, ..DbOptions::default() };
        let db = Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &options).expect("a pool");
        let mut servers = Vec::new();
        for profile in providers {
            servers
                .push(sim.serve("127.0.0.1:0".parse().expect("an address"), profile).await.expect("serves"));
        }
        let chain_id = sim.config().chain_id;
        let network = Network {
            id: NetworkId(i32::try_from(chain_id).expect("small")),
            slug: "simnet".to_owned(),
            family: Family::Evm,
            start_block: Height(0),
            confirmations: 3,
            reorg_depth_max: 100,
        };
        let endpoint =
            |server: &SimServer| EndpointConfig::new(RedactedUrl::parse(&server.url).expect("a URL"));
        let mut config = EvmConfig::new(network, chain_id, servers.iter().map(endpoint).collect());
        // Nodes that hang must not cost seconds; honest ones must not be hurried on a busy machine.
        let limit = if patient { Duration::from_secs(60) } else { Duration::from_millis(400) };
        config.timeouts.block_number = limit;
        config.timeouts.get_logs = limit;
        config.timeouts.heavy = limit;
        config.timeouts.other = limit;
        config.backoff = Backoff { first: Duration::from_millis(1), max: Duration::from_millis(20) };
        config.breaker.rest_first = Duration::from_millis(5);
        config.breaker.rest_max = Duration::from_millis(100);
        config.headers_batch = 20;
        (config.step_init, config.step_min) = (10 + seed % 40, 1 + seed % 9);
        let adapter = Arc::new(EvmAdapter::new(config).expect("good"));
        Self { seed, sim, servers, db, adapter }
    }

    fn start(&self) -> Running {
        let options = IngestOptions {
            poll_interval_min: Duration::from_millis(5),
            poll_interval_max: Duration::from_millis(15),
            ranges_in_flight: 3,
            lease_range: 20,
            lease_ttl: Duration::from_secs(2),
            tip_blocks_max: 4,
            history_gap_min: 5,
            backoff_min: Duration::from_millis(2),
            backoff_max: Duration::from_millis(40),
            head_refresh: Duration::from_millis(30),
            halt_poll: Duration::from_millis(20),
            partitions: PartitionSizes {
                blocks: 50,
                transactions: 500,
                events: 70,
                lookups: 60,
                transfers: 500,
            },
            ..IngestOptions::default()
        };
        let adapter = Arc::clone(&self.adapter);
        let blobs = Arc::new(ObjectBlobs::memory());
        let ingester = Ingester::new(adapter, self.db.clone(), blobs, Arc::new(Silence), options);
        let stop = CancellationToken::new();
        let token = stop.clone();
        let mut task = JoinSet::new();
        task.spawn(async move { ingester.run(token).await });
        Running { stop, task }
    }

    async fn cursor(&self) -> Option<cursor::Cursor> {
        let conn = self.db.conn().await.expect("connects");
        cursor::of_network(&conn, self.adapter.network().id).await.expect("reads").pop()
    }

    /// Waits for a condition of the cursor.
    async fn wait(&self, what: &str, mut done: impl FnMut(&cursor::Cursor) -> bool) {
        let begun = Instant::now();
        loop {
            let now = self.cursor().await;
            if now.as_ref().is_some_and(&mut done) {
                return;
            }
            if begun.elapsed() > PATIENCE {
                panic!("seed {}: no {what}: {now:?}; errors: {}", self.seed, self.errors().await);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until the whole chain, which stands still, is stored.
    async fn reach_the_head(&self) {
        let head = self.sim.block(self.sim.head()).expect("a head");
        self.wait("end of the chain", |cursor| {
            cursor.next.0 == head.number + 1 && cursor.last_hash.is_some_and(|hash| hash.0 == head.hash.0)
        })
        .await;
    }

    async fn errors(&self) -> String {
        let conn = self.db.conn().await.expect("connects");
        let rows = conn
            .query(
                "read errors",
                "select block_height || ' x' || occurrences || ': ' || message from app.indexing_errors order by last_seen_at",
                &[],
            )
            .await
            .expect("reads");
        rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>().join("\n")
    }

    /// raw.* below `end` is the chain: every block, every log of ours, and nothing else.
    async fn equals_the_truth(&self, end: u64) {
        let conn = self.db.conn().await.expect("connects");
        let end = i64::try_from(end).expect("small");
        let rows = conn
            .query(
                "read events",
                "select block_height, event_index, block_hash, tx_id, emitter, topics, data from raw.events
                  where block_height < $1 order by block_height, event_index",
                &[&end],
            )
            .await
            .expect("reads");
        let stored: Vec<_> = rows
            .iter()
            .map(|row| {
                let bytes = |at: usize| row.get::<_, &[u8]>(at).to_vec();
                (row.get::<_, i64>(0), row.get::<_, i32>(1), bytes(2), bytes(3), bytes(4), bytes(5), bytes(6))
            })
            .collect();
        let last = u64::try_from(end - 1).unwrap_or(0);
        let logs = self.sim.logs(0, last);
        let truth: Vec<_> = logs
            .iter()
            .filter(|log| log.event != SimEvent::Erc20)
            .map(|log| {
                (
                    i64::try_from(log.block_number).expect("small"),
                    i32::try_from(log.log_index).expect("small"),
                    log.block_hash.to_vec(),
                    log.tx_hash.to_vec(),
                    log.address.to_vec(),
                    log.topics.iter().flat_map(|topic| topic.to_vec()).collect::<Vec<u8>>(),
                    log.data.clone(),
                )
            })
            .collect();
        let differs = stored.iter().zip(&truth).find(|(stored, truth)| stored != truth);
        assert!(
            stored.len() == truth.len() && differs.is_none(),
            "seed {}: {} of {} logs below {end}, first difference {differs:?}",
            self.seed,
            stored.len(),
            truth.len()
        );
        let blocks = "select height, hash from raw.blocks where height < $1 order by height";
        for (height, row) in (0..).zip(conn.query("read blocks", blocks, &[&end]).await.expect("reads")) {
            let block = self.sim.block(height).expect("a block");
            assert_eq!(u64::try_from(row.get::<_, i64>(0)), Ok(height), "seed {}: a hole", self.seed);
            assert_eq!(row.get::<_, &[u8]>(1), block.hash.as_slice(), "seed {}: block {height}", self.seed);
        }
    }

    async fn is_complete(&self) {
        let conn = self.db.conn().await.expect("connects");
        let range = HeightRange::new(Height(0), Height(self.sim.head() + 1)).expect("a chain");
        let report = verify_completeness(&conn, self.adapter.network().id, range).await.expect("verifies");
        assert!(report.is_complete(), "seed {}: {:#?}", self.seed, report.problems);
    }
}

impl Running {
    async fn end(mut self, seed: u64) {
        self.stop.cancel();
        let ended =
            tokio::time::timeout(PATIENCE, self.task.join_next()).await.expect("ends").expect("one task");
        ended.expect("no panic").unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

fn chain(seed: u64, blocks: u64) -> Sim {
    let sim = Sim::new(SimConfig { events_per_block: 5, ..SimConfig::small(seed) });
    sim.mine(blocks);
    sim
}

/// History, then a life with every kind of reorg, against the truth.
async fn live(world: &World) {
    let running = world.start();
    let finalized = world.sim.finalized();
    world.wait("history", |cursor| cursor.next.0 > finalized).await;
    for (at, kind) in (0..).zip(ReorgKind::ALL) {
        world.sim.mine(1 + (world.seed + at) % 3);
        let room = world.sim.head().saturating_sub(world.sim.finalized()).saturating_sub(1);
        let depth = (1 + (world.seed + at) % 5).min(room);
        if depth > 0 {
            if kind == ReorgKind::Back {
                world.sim.reorg(depth, ReorgKind::Replace);
            }
            world.sim.reorg(depth, kind);
        }
        tokio::time::sleep(Duration::from_millis((world.seed * 7 + at * 13) % 60)).await;
    }
    world.sim.mine(2);
    world.reach_the_head().await;
    running.end(world.seed).await;
    world.equals_the_truth(world.sim.head() + 1).await;
    world.is_complete().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_fault_at_once_ends_in_the_truth() {
    every_seed("every_fault_at_once_ends_in_the_truth", SEEDS, async |seed| {
        let other = seed.wrapping_add(1_000);
        let providers = match seed % 3 {
            // One bad node alone.
            0 => vec![FaultProfile::chaos(seed)],
            1 => vec![FaultProfile::chaos(seed), FaultProfile::chaos(other)],
            // What one alone could do unnoticed or for ever, beside one that is only slow.
            _ => vec![
                FaultProfile {
                    hidden_single_log: 60,
                    pruned_below: seed % 30,
                    on_left_branch: seed % 2 == 0,
                    ..FaultProfile::chaos(seed)
                },
                FaultProfile { slow: 300, slow_ms: 5, seed: other, ..FaultProfile::default() },
                FaultProfile { wrong_chain_id: Some(5), ..FaultProfile::chaos(other) },
            ],
        };
        let world = World::new(seed, chain(seed, 40 + seed % 30), providers, false).await;
        live(&world).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn honest_nodes_are_never_complained_about() {
    every_seed("honest_nodes_are_never_complained_about", SEEDS / 4, async |seed| {
        let honest = FaultProfile { seed, ..FaultProfile::default() };
        let providers = vec![honest; usize::try_from(1 + seed % 2).expect("small")];
        let world = World::new(seed, chain(seed, 40 + seed % 30), providers, true).await;
        // Without reorgs there is nothing at all to say.
        let running = world.start();
        world.reach_the_head().await;
        world.sim.mine(5);
        world.reach_the_head().await;
        running.end(seed).await;
        world.equals_the_truth(world.sim.head() + 1).await;
        world.is_complete().await;
        assert_eq!(world.errors().await, "", "seed {seed}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hidden_logs_are_flagged_every_time() {
    every_seed("hidden_logs_are_flagged_every_time", SEEDS, async |seed| {
        let hiding = FaultProfile { seed, hidden_block_logs: 1_000, ..FaultProfile::default() };
        let providers = match seed % 4 {
            0 => vec![hiding],
            1 => vec![FaultProfile { seed, empty_logs: 1_000, ..FaultProfile::default() }],
            2 => {
                vec![FaultProfile { unsupported_methods: vec!["eth_getBlockReceipts".to_owned()], ..hiding }]
            }
            _ => vec![hiding.clone(), FaultProfile { seed: seed + 1_000, ..hiding }],
        };
        let world = World::new(seed, chain(seed, 30), providers, true).await;
        let running = world.start();
        // It never gets through to the head in silence: somebody hears of it.
        let begun = Instant::now();
        while world.errors().await.is_empty() {
            assert!(begun.elapsed() < PATIENCE, "seed {seed}: not a word: {:?}", world.cursor().await);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // What was accepted meanwhile is true, and once the nodes tell everything it goes on by itself.
        let accepted = world.cursor().await.map_or(0, |cursor| cursor.next.0);
        world.equals_the_truth(accepted).await;
        for server in &world.servers {
            server.set_profile(FaultProfile::default());
        }
        world.reach_the_head().await;
        running.end(seed).await;
        world.equals_the_truth(world.sim.head() + 1).await;
        world.is_complete().await;
    })
    .await;
}
