//! `bench ledger`: from raw.* to finalized owners, in bulk and live, beside the bare COPY of the same rows; what
//! a batch costs when its one asset has a long history; and what a reorg over many assets costs.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use async_trait::async_trait;
use bytes::Bytes;
use serde_json::json;
use tidemark_adapters::evm::parse::{self, Known};
use tidemark_bus::dispatch::{Delivered, Handler};
use tidemark_bus::registry::Registry;
use tidemark_model::chain::*;
use tidemark_model::envelope::Draft;
use tidemark_model::finality::FinalityStatus;
use tidemark_model::ids::*;
use tidemark_model::quantity::SignedQty;
use tidemark_model::subject::Subject;
use tidemark_model::{OffsetDateTime, U256};
use tidemark_pipeline::handlers::LedgerHandler;
use tidemark_pipeline::history::{HistoryOptions, HistoryWorker, Writers, apply_blocks};
use tidemark_pipeline::projectors::{Beside, rebuild_keys, touched};
use tidemark_pipeline::workers::{
    BlockInput, BlockOutcome, Cause, Openings, advance_finality, handle_reorg, process_block,
};
use tidemark_sim::{Sim, SimConfig};
use tidemark_store::blob::ObjectBlobs;
use tidemark_store::outbox::{Emitter, EmitterOptions};
use tidemark_store::partitions::{PartitionSizes, Partitions, RAW_TABLES, Table};
use tidemark_store::raw::{RawReader, RawWriter};
use tidemark_store::{Conn, Db, DbOptions, bulk, buslog, cursor, migrate};
use tokio_util::sync::CancellationToken;

use super::{Bench, bare_copy, float, print, write};

/// `bench ledger`
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct LedgerArgs {
    /// Logs of the simulated history that goes through the history worker
    #[arg(long, value_name = "N", default_value_t = 300_000)]
    pub logs: u64,
    /// Blocks they are in
    #[arg(long, value_name = "N", default_value_t = 15_000)]
    pub blocks: u64,
    /// Blocks after them that go through the live handler, one transaction each
    #[arg(long, value_name = "N", default_value_t = 500)]
    pub live_blocks: u64,
    /// Transfers of one ERC-1155 class before its batches are measured
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    pub class_transfers: u64,
    /// Assets of the block that is taken back
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    pub reorg_assets: u64,
}

/// Finality comes this often while blocks go through the live handler.
const FINALITY_EVERY: u64 = 32;
/// Measured batches per kind; the median counts.
const ROUNDS: u64 = 15;
/// Movements in a measured live block and in a measured segment.
const LIVE_BATCH: u64 = 100;
const BULK_BATCH: u64 = 2_000;
/// Accounts that hold the measured class.
const HOLDERS: u64 = 1_000;
/// Blocks written to raw.* at once.
const RAW_STEP: u64 = 1_000;

/// Runs it and writes `out/ledger.json`.
pub async fn run(args: &LedgerArgs, out: &Path) -> anyhow::Result<()> {
    ensure!(args.blocks >= 10 && args.logs >= args.blocks, "at least ten blocks, and a log in each");
    ensure!(args.live_blocks > 0 && args.reorg_assets > 0, "at least one live block and one asset");
    let bench = Bench::start().await?;
    let result = measure(args, &bench).await;
    bench.end().await?;
    write(out, "ledger", &result?)
}

async fn measure(args: &LedgerArgs, bench: &Bench) -> anyhow::Result<serde_json::Value> {
    let ground = Ground::new(bench).await?;
    eprintln!("filling raw.* …");
    let (chain, sim) = Still::of_sim(args);
    ground.fill_raw(&chain, &sim, args).await?;
    eprintln!("history worker …");
    let history = ground.history(&chain, args.blocks - 1).await?;
    eprintln!("bare COPY …");
    let copies = bare_copy::run(bench.server.url().expose().as_str(), bare_copy::TABLES).await?;
    let copies: Vec<_> = copies.into_iter().filter(|copy| !copy.table.starts_with("raw.")).collect();
    let copy_seconds: f64 = copies.iter().map(|copy| copy.seconds).sum();
    eprintln!("live handler …");
    let live = ground.live(&chain, args).await?;
    eprintln!("one class with {} transfers …", args.class_transfers);
    let growth = ground.growth(args.class_transfers).await?;
    eprintln!("a reorg over {} assets …", args.reorg_assets);
    let reorg = ground.reorg(args.reorg_assets).await?;
    let events = float(history.events);
    let millis = |seconds: f64| format!("{:.1} ms", seconds * 1e3);
    print(&[
        ("events", format!("{}", history.events)),
        ("history worker", format!("{:.0} events/s ({:.1} s)", events / history.seconds, history.seconds)),
        ("  with its indexes built", format!("{:.0} events/s", events / history.seconds_indexed)),
        (
            "bare COPY of the same rows",
            format!("{:.0} events/s ({copy_seconds:.1} s)", events / copy_seconds),
        ),
        ("ratio to bare COPY", format!("{:.2}", copy_seconds / history.seconds_indexed)),
        ("live handler", format!("{:.0} events/s", float(live.events) / live.seconds)),
        ("  a block", millis(live.seconds / float(args.live_blocks))),
        ("live batch, new class", millis(growth.live_new)),
        ("live batch, old class", millis(growth.live_old)),
        ("  ratio", format!("{:.2}", growth.live_old / growth.live_new)),
        ("segment, new class", millis(growth.bulk_new)),
        ("segment, old class", millis(growth.bulk_old)),
        ("  ratio", format!("{:.2}", growth.bulk_old / growth.bulk_new)),
        ("reorg, ledger", millis(reorg.taken_back)),
        ("  the new block", millis(reorg.replaced)),
        ("  read models", millis(reorg.projected)),
        ("  in all", millis(reorg.taken_back + reorg.replaced + reorg.projected)),
    ]);
    Ok(json!({
        "logs": args.logs, "blocks": args.blocks, "events": history.events,
        "history": {
            "seconds": history.seconds, "seconds_indexed": history.seconds_indexed,
            "events_per_second": events / history.seconds_indexed,
        },
        "bare_copy": { "seconds": copy_seconds, "events_per_second": events / copy_seconds, "tables": copies },
        "ratio_to_bare_copy": copy_seconds / history.seconds_indexed,
        "live": {
            "blocks": args.live_blocks, "events": live.events, "seconds": live.seconds,
            "events_per_second": float(live.events) / live.seconds,
        },
        "class": {
            "transfers": args.class_transfers,
            "live_seconds": { "new": growth.live_new, "old": growth.live_old },
            "live_ratio": growth.live_old / growth.live_new,
            "bulk_seconds": { "new": growth.bulk_new, "old": growth.bulk_old },
            "bulk_ratio": growth.bulk_old / growth.bulk_new,
        },
        "reorg": {
            "assets": args.reorg_assets, "ledger_seconds": reorg.taken_back,
            "new_block_seconds": reorg.replaced, "read_models_seconds": reorg.projected,
        },
    }))
}

/// A chain that stands still: blocks come from us, and no balance is older than its start.
#[derive(Debug)]
struct Still {
    network: Network,
    known: Known,
}

impl Still {
    fn new(id: i32, slug: &str) -> Self {
        let network = Network {
            id: NetworkId(id),
            slug: slug.to_owned(),
            family: Family::Evm,
            start_block: Height(0),
            confirmations: 2,
            reorg_depth_max: 1_000,
        };
        Self { network, known: Known::default() }
    }

    fn of_sim(args: &LedgerArgs) -> (Arc<Self>, Sim) {
        let sim = Sim::new(SimConfig::bench(args.logs, args.blocks));
        sim.mine(args.blocks + args.live_blocks);
        (Arc::new(Self::new(31_337, "bench")), sim)
    }
}

#[async_trait]
impl ChainAdapter for Still {
    fn network(&self) -> &Network {
        &self.network
    }
    async fn head(&self) -> Result<Head, ChainError> {
        Err(self.silent())
    }
    async fn next_head(&self, _known: &Head, _wait: Duration) -> Result<Head, ChainError> {
        Err(self.silent())
    }
    async fn fetch(&self, _range: HeightRange, _mode: FetchMode) -> Result<RawBatch, ChainError> {
        Err(self.silent())
    }
    async fn link_at(&self, _height: Height) -> Result<Option<BlockLink>, ChainError> {
        Err(self.silent())
    }
    fn parse(&self, block: &RawBlock) -> ParsedBlock {
        parse::parse(self.network.id, &self.known, block)
    }
    async fn balances(&self, asks: &[BalanceAsk]) -> Result<Vec<Option<U256>>, ChainError> {
        Ok(vec![None; asks.len()])
    }
    fn requests(&self) -> u64 {
        0
    }
}

impl Still {
    fn silent(&self) -> ChainError {
        ChainError::Unavailable {
            network: self.network.slug.clone(),
            what: "anything".to_owned(),
            reason: "it stands still".to_owned(),
        }
    }
}

struct Rate {
    events: u64,
    seconds: f64,
    seconds_indexed: f64,
}

struct Growth {
    live_new: f64,
    live_old: f64,
    bulk_new: f64,
    bulk_old: f64,
}

struct Reorg {
    taken_back: f64,
    replaced: f64,
    projected: f64,
}

/// The database and what workers stand on.
struct Ground {
    db: Db,
    reader: RawReader,
    writer: RawWriter,
    partitions: Arc<Partitions>,
    emitter: Arc<Emitter>,
}

impl Ground {
    async fn new(bench: &Bench) -> anyhow::Result<Self> {
        let options = DbOptions { statement_timeout: None, ..DbOptions::default() };
        let db = Db::open(bench.server.url(), &options)?;
        migrate::run(&db).await?;
        let blobs = Arc::new(ObjectBlobs::memory());
        let registry = Arc::new(Registry::builtin());
        let emitter = Arc::new(Emitter::new(EmitterOptions::default(), registry));
        let mut conn = db.conn().await?;
        buslog::ensure_partitions(&conn).await?;
        let tx = conn.tx().await?;
        emitter.declare(&tx, &["chain", "ledger", "catalog", "projection"]).await?;
        tx.commit().await?;
        drop(conn);
        Ok(Self {
            db,
            reader: RawReader::new(Arc::<ObjectBlobs>::clone(&blobs)),
            writer: RawWriter::new(blobs, 8 * 1024),
            partitions: Arc::new(Partitions::new(PartitionSizes::default(), Default::default())),
            emitter,
        })
    }

    /// A network with its rows and partitions.
    async fn settle(&self, network: &Network, last: u64) -> anyhow::Result<()> {
        let mut conn = self.db.conn().await?;
        cursor::ensure_network(&conn, network).await?;
        bulk::ensure_progress(&conn, network.id, network.start_block).await?;
        let all = HeightRange::inclusive(Height(0), Height(last)).context("a range")?;
        self.partitions.ensure_raw(&mut conn, network.id, all).await?;
        self.partitions.ensure_transfers(&mut conn, network.id, all).await?;
        self.partitions.ensure_indexed(&mut conn, &RAW_TABLES, network.id, Height(last)).await?;
        conn.execute(
            "show a network",
            "insert into projection.network_status (network_id, slug, family, start_block, confirmations)
             values ($1, $2, 'evm', 0, 2) on conflict do nothing",
            &[&network.id.0, &network.slug],
        )
        .await?;
        Ok(())
    }

    async fn fill_raw(&self, chain: &Still, sim: &Sim, args: &LedgerArgs) -> anyhow::Result<()> {
        let network = &chain.network;
        let last = args.blocks + args.live_blocks - 1;
        self.settle(network, last).await?;
        let mut conn = self.db.conn().await?;
        let mut from = 0;
        while from <= last {
            let to = (from + RAW_STEP - 1).min(last);
            let batch = raw_batch(sim, from, to)?;
            let prepared = self.writer.prepare(batch).await?;
            let tx = conn.tx().await?;
            self.writer.copy(&tx, network.id, 0, &prepared).await?;
            tx.commit().await?;
            from = to + 1;
        }
        let at = |height: u64| -> anyhow::Result<BlockRef> {
            let block = sim.block(height).context("a mined block")?;
            Ok(BlockRef { height: Height(height), hash: BlockHash(block.hash.0) })
        };
        let head = Head { latest: at(last)?, safe: None, finalized: Some(at(args.blocks - 1)?) };
        let tx = conn.tx().await?;
        cursor::report_head(&tx, network.id, &head).await?;
        tx.commit().await?;
        Ok(conn.batch("settle", "analyze; checkpoint").await?)
    }

    /// The history worker over all that is final; until the last height, and until its indexes are there.
    async fn history(&self, chain: &Arc<Still>, last: u64) -> anyhow::Result<Rate> {
        let adapter: Arc<dyn ChainAdapter> = Arc::<Still>::clone(chain);
        let worker = HistoryWorker::new(
            adapter,
            self.db.clone(),
            self.db.clone(),
            self.reader.clone(),
            Arc::clone(&self.partitions),
            Arc::clone(&self.emitter),
            HistoryOptions::default(),
        );
        let mut progress = worker.progress();
        let stop = CancellationToken::new();
        let started = Instant::now();
        let watch = async {
            let last = Height(last).as_i64();
            let seconds = |started: Instant| started.elapsed().as_secs_f64();
            let events = progress.wait_for(|now| now.applied >= last).await?.events;
            let applied = seconds(started);
            progress.wait_for(|now| now.idle).await?;
            stop.cancel();
            anyhow::Ok(Rate { events, seconds: applied, seconds_indexed: seconds(started) })
        };
        let (ran, rate) = tokio::join!(worker.run(stop.clone()), watch);
        ran?;
        rate
    }

    /// The live handler, block after block, as the dispatcher calls it.
    async fn live(&self, chain: &Arc<Still>, args: &LedgerArgs) -> anyhow::Result<Rate> {
        let adapter: Arc<dyn ChainAdapter> = Arc::<Still>::clone(chain);
        let handler = LedgerHandler::new(
            [adapter],
            self.db.clone(),
            self.db.clone(),
            self.reader.clone(),
            Arc::clone(&self.emitter),
        );
        let network = chain.network.id;
        let mut conn = self.db.conn().await?;
        conn.batch("settle", "analyze; checkpoint").await?;
        let head = args.blocks + args.live_blocks - 1;
        let mut events = 0;
        let started = Instant::now();
        for height in args.blocks..=head {
            let block = self.reader.read_block(&conn, network, Height(height)).await?;
            let block = block.with_context(|| format!("block {height} is in raw.*"))?;
            events += count_events(chain, &block);
            self.deliver(&mut conn, &handler, block_ingested(network, &block, head)?).await?;
            if (height - args.blocks) % FINALITY_EVERY == FINALITY_EVERY - 1 || height == head {
                self.deliver(&mut conn, &handler, finality_advanced(network, &block)?).await?;
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        Ok(Rate { events, seconds, seconds_indexed: seconds })
    }

    async fn deliver(&self, conn: &mut Conn, handler: &LedgerHandler, draft: Draft) -> anyhow::Result<()> {
        let envelope = self.emitter.envelope(&draft)?;
        let batch = [Delivered { envelope, stream: "chain".to_owned(), part: 0, pseq: 1, replay: false }];
        handler.prepare(&batch, &[]).await?;
        let tx = conn.tx().await?;
        handler.apply(&tx, &batch).await?;
        Ok(tx.commit().await?)
    }

    /// Batches of a class with a long history and of one without, turn about, live and in bulk.
    async fn growth(&self, transfers: u64) -> anyhow::Result<Growth> {
        let (old, new) = (Still::new(31_338, "old"), Still::new(31_339, "new"));
        let mut lanes = [Moves::new(&old), Moves::new(&new)];
        for lane in &mut lanes {
            self.settle(&lane.chain.network, 10_000).await?;
            let funded = lane.fund();
            self.segment(lane.chain, funded).await?;
        }
        let mut left = transfers;
        while left > 0 {
            let count = left.min(50_000);
            let block = lanes[0].block(count);
            self.segment(lanes[0].chain, block).await?;
            left -= count;
        }
        self.db.conn().await?.batch("settle", "analyze; checkpoint").await?;
        let mut live: [Vec<f64>; 2] = Default::default();
        let mut in_bulk: [Vec<f64>; 2] = Default::default();
        // The first round warms caches and prepared statements.
        for round in 0..=ROUNDS {
            for (lane, (live, in_bulk)) in lanes.iter_mut().zip(live.iter_mut().zip(&mut in_bulk)) {
                let segment = lane.block(BULK_BATCH);
                let started = Instant::now();
                self.segment(lane.chain, segment).await?;
                let bulk_seconds = started.elapsed().as_secs_f64();
                let block = lane.block(LIVE_BATCH);
                let started = Instant::now();
                self.live_block(&lane.chain.network, &block).await?;
                if round > 0 {
                    in_bulk.push(bulk_seconds);
                    live.push(started.elapsed().as_secs_f64());
                }
            }
        }
        let [live_old, live_new] = live.map(median);
        let [bulk_old, bulk_new] = in_bulk.map(median);
        Ok(Growth { live_new, live_old, bulk_new, bulk_old })
    }

    async fn segment(&self, chain: &Still, block: (RawBlock, ParsedBlock)) -> anyhow::Result<()> {
        let range = HeightRange::one(block.0.height);
        let mut writers = Writers { state: self.db.conn().await?, log: self.db.spare_conn().await };
        apply_blocks(&mut writers, chain, range, &[block]).await?;
        Ok(())
    }

    /// One block and its finality, in two transactions.
    async fn live_block(&self, network: &Network, block: &(RawBlock, ParsedBlock)) -> anyhow::Result<()> {
        self.normalize(network, block).await?;
        let mut conn = self.db.conn().await?;
        let tx = conn.tx().await?;
        let cause = cause(format!("final {}", block.0.height));
        let done = advance_finality(&tx, network, block.0.height, Some(block.0.hash), &cause).await?;
        ensure!(done.quarantined.is_empty(), "the benchmark's movements are all possible");
        self.emitter.append(&tx, &done.drafts).await?;
        Ok(tx.commit().await?)
    }

    async fn normalize(
        &self,
        network: &Network,
        (block, parsed): &(RawBlock, ParsedBlock),
    ) -> anyhow::Result<Vec<Draft>> {
        let input = BlockInput {
            block: block.block_ref(),
            time: block.time,
            parsed,
            chain_head: block.height,
            openings: &Openings::default(),
        };
        let mut conn = self.db.conn().await?;
        let tx = conn.tx().await?;
        let outcome = process_block(&tx, network, &input, &cause(format!("block {}", block.hash))).await?;
        let BlockOutcome::Done(drafts) = outcome else { anyhow::bail!("block {} is not next", block.height) };
        self.emitter.append(&tx, &drafts).await?;
        tx.commit().await?;
        Ok(drafts)
    }

    /// A block that moves many assets is replaced by one that moves them elsewhere.
    async fn reorg(&self, assets: u64) -> anyhow::Result<Reorg> {
        let chain = Still::new(31_340, "reorg");
        let network = &chain.network;
        self.settle(network, 10).await?;
        let mut lane = Moves::new(&chain);
        let minted = lane.mint_many(assets);
        self.segment(&chain, minted).await?;
        let old = lane.move_many(assets, 0);
        let sibling = lane.sibling(&old.0);
        let moved = lane.moved_events(assets, 1, &sibling);
        let new = (sibling, moved);
        let drafts = self.normalize(network, &old).await?;
        self.project(&drafts).await?;
        let started = Instant::now();
        let mut conn = self.db.conn().await?;
        let tx = conn.tx().await?;
        let (orphaned, canonical) = ([old.0.block_ref()], [new.0.block_ref()]);
        let done = handle_reorg(&tx, network, &orphaned, &canonical, &cause("reorg".to_owned())).await?;
        self.emitter.append(&tx, &done.drafts).await?;
        tx.commit().await?;
        let taken_back = started.elapsed().as_secs_f64();
        ensure!(u64::try_from(done.reverted)? == assets, "every asset is touched");
        let started = Instant::now();
        let drafts = self.normalize(network, &new).await?;
        let replaced = started.elapsed().as_secs_f64();
        let started = Instant::now();
        self.project(&done.drafts).await?;
        self.project(&drafts).await?;
        Ok(Reorg { taken_back, replaced, projected: started.elapsed().as_secs_f64() })
    }

    async fn project(&self, drafts: &[Draft]) -> anyhow::Result<()> {
        let ledger = drafts.iter().filter(|draft| draft.subject.service() == "ledger");
        let envelopes = ledger.map(|draft| self.emitter.envelope(draft)).collect::<Result<Vec<_>, _>>()?;
        let keys = touched(&envelopes.iter().collect::<Vec<_>>())?;
        let mut conn = self.db.conn().await?;
        self.partitions.ensure_indexed(&mut conn, &[Table::Transfers], NetworkId(31_340), Height(0)).await?;
        let beside = Beside::live(self.db.clone());
        let tx = conn.tx().await?;
        for (network, keys) in keys {
            rebuild_keys(&tx, network, &keys, Some(&beside)).await?;
        }
        Ok(tx.commit().await?)
    }
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().unwrap_or_default()
}

fn count_events(chain: &Still, block: &RawBlock) -> u64 {
    u64::try_from(chain.parse(block).events.len()).unwrap_or(u64::MAX)
}

fn cause(id: String) -> Cause {
    Cause { id, at: OffsetDateTime::UNIX_EPOCH }
}

fn time_of(height: u64) -> OffsetDateTime {
    let seconds = i64::try_from(height.saturating_mul(12)).unwrap_or(i64::MAX);
    OffsetDateTime::from_unix_timestamp(1_700_000_000_i64.saturating_add(seconds))
        .unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

/// Canonical blocks of the simulated chain, as an ingester hands them over.
fn raw_batch(sim: &Sim, from: u64, to: u64) -> anyhow::Result<RawBatch> {
    let covered = HeightRange::inclusive(Height(from), Height(to)).context("a range")?;
    let mut blocks = Vec::new();
    for height in from..=to {
        let block = sim.block(height).context("a mined block")?;
        let records = sim.logs(height, height).into_iter().map(|log| RawRecord {
            tx: TxId::from(log.tx_hash.0),
            tx_index: log.tx_index,
            index: log.log_index,
            emitter: Bytes::copy_from_slice(log.address.as_slice()),
            topics: log.topics.iter().flat_map(|topic| topic.0).collect(),
            data: log.data.into(),
            payload: None,
        });
        blocks.push(RawBlock {
            height: Height(height),
            hash: BlockHash(block.hash.0),
            parent: BlockHash(block.parent_hash.0),
            time: OffsetDateTime::from_unix_timestamp(i64::try_from(block.timestamp)?)?,
            tx_count: u32::try_from(block.transactions.len()).ok(),
            transactions: Vec::new(),
            records: records.collect(),
            payload: None,
        });
    }
    let records = blocks.iter().map(|block| block.records.len()).sum::<usize>();
    let evidence = RangeEvidence {
        provider: "bench".to_owned(),
        head_seen: Height(to),
        records: u64::try_from(records)?,
        foreign: 0,
        requests: 0,
        checks: Vec::new(),
        coverage: BlockCoverage::All,
    };
    Ok(RawBatch { covered, blocks, evidence })
}

fn block_ingested(network: NetworkId, block: &RawBlock, head: u64) -> anyhow::Result<Draft> {
    let time = block.time.format(&time::format_description::well_known::Rfc3339)?;
    let payload = json!({
        "network_id": network, "height": block.height, "hash": block.hash, "parent_hash": block.parent,
        "block_time": time, "event_count": block.records.len(), "head_height": head,
        "finalized_height": null,
    });
    let subject = Subject::new("chain", "block", "ingested", 1)?;
    Ok(Draft::derived(subject, &block.hash.to_string(), network.to_string(), payload, block.time))
}

fn finality_advanced(network: NetworkId, block: &RawBlock) -> anyhow::Result<Draft> {
    let payload = json!({
        "network_id": network, "finalized_height": block.height, "finalized_hash": block.hash,
        "head_height": block.height,
    });
    let subject = Subject::new("chain", "finality", "advanced", 1)?;
    Ok(Draft::derived(subject, &block.hash.to_string(), network.to_string(), payload, block.time))
}

/// Makes blocks of movements, one after another.
struct Moves<'a> {
    chain: &'a Still,
    next_height: u64,
    next_tx: u64,
}

const SINGLES: &str = "0x00000000000000000000000000000000000000aa";
const CLASSES: &str = "0x00000000000000000000000000000000000000bb";

impl<'a> Moves<'a> {
    fn new(chain: &'a Still) -> Self {
        Self { chain, next_height: 0, next_tx: 0 }
    }

    fn raw_block(&mut self) -> RawBlock {
        let height = self.next_height;
        self.next_height += 1;
        RawBlock {
            height: Height(height),
            hash: BlockHash(U256::from(height + 1).to_be_bytes()),
            parent: BlockHash(U256::from(height).to_be_bytes()),
            time: time_of(height),
            tx_count: Some(1),
            transactions: Vec::new(),
            records: Vec::new(),
            payload: None,
        }
    }

    /// Another block at the same height.
    fn sibling(&self, block: &RawBlock) -> RawBlock {
        RawBlock { hash: BlockHash(U256::MAX.to_be_bytes()), ..block.clone() }
    }

    fn event(
        &mut self,
        block: &RawBlock,
        index: u64,
        (standard, token): (Standard, u64),
        (from, to): (Option<u64>, Option<u64>),
        qty: u64,
    ) -> RawEvent {
        self.next_tx += 1;
        let network = self.chain.network.id;
        let tx: [u8; 32] = U256::from(self.next_tx).to_be_bytes();
        let qty = U256::from(qty);
        let leg = |account: u64, qty_delta| OwnershipDelta {
            account_addr_normalized: format!("0x{account:040x}"),
            qty_delta,
        };
        let contract = if standard == Standard::Erc721 { SINGLES } else { CLASSES };
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        RawEvent {
            source_event_id: SourceEventId::evm(network, &tx, index),
            sub_index: 0,
            event_kind: if from.is_none() { EventKind::Mint } else { EventKind::Transfer },
            asset_refs: vec![AssetRef {
                network_id: network,
                collection_addr_normalized: contract.to_owned(),
                token_id_raw: token.to_string(),
                standard,
            }],
            ownership_deltas: from
                .map(|account| leg(account, SignedQty::loss(qty)))
                .into_iter()
                .chain(to.map(|account| leg(account, SignedQty::gain(qty))))
                .collect(),
            block_number: block.height,
            block_hash: block.hash,
            tx_hash: TxId::from(tx),
            event_index: index,
            event_time: block.time,
            finality_status: FinalityStatus::Pending,
            blob_ref: None,
        }
    }

    /// Units for every holder of the measured class.
    fn fund(&mut self) -> (RawBlock, ParsedBlock) {
        let block = self.raw_block();
        let mint = |at: u64| self.event(&block, at, (Standard::Erc1155, 1), (None, Some(at)), 1_000_000_000);
        let events = (1..=HOLDERS).map(mint).collect();
        (block, ParsedBlock { events, quarantined: Vec::new() })
    }

    /// Transfers of one unit between holders.
    fn block(&mut self, transfers: u64) -> (RawBlock, ParsedBlock) {
        let block = self.raw_block();
        let holder = |number: u64| 1 + number % HOLDERS;
        let transfer = |at: u64| {
            let sides = (Some(holder(at * 7)), Some(holder(at * 7 + 1 + at % 31)));
            self.event(&block, at, (Standard::Erc1155, 1), sides, 1)
        };
        let events = (0..transfers).map(transfer).collect();
        (block, ParsedBlock { events, quarantined: Vec::new() })
    }

    /// Many single tokens.
    fn mint_many(&mut self, assets: u64) -> (RawBlock, ParsedBlock) {
        let block = self.raw_block();
        let mint = |at: u64| self.event(&block, at, (Standard::Erc721, at), (None, Some(1 + at % 97)), 1);
        let events = (0..assets).map(mint).collect();
        (block, ParsedBlock { events, quarantined: Vec::new() })
    }

    /// All of them move on.
    fn move_many(&mut self, assets: u64, branch: u64) -> (RawBlock, ParsedBlock) {
        let block = self.raw_block();
        let parsed = self.moved_events(assets, branch, &block);
        (block, parsed)
    }

    fn moved_events(&mut self, assets: u64, branch: u64, block: &RawBlock) -> ParsedBlock {
        let moved = |at: u64| {
            let sides = (Some(1 + at % 97), Some(1_000 + branch * 1_000 + at % 89));
            self.event(block, at, (Standard::Erc721, at), sides, 1)
        };
        ParsedBlock { events: (0..assets).map(moved).collect(), quarantined: Vec::new() }
    }
}
