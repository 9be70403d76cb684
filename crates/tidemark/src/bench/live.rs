//! `bench live`: from a block that is visible at the node to its owners in the API, with the whole of
//! Tidemark as its own process. The node and the reader are this process: the clock of one is the other's.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use tidemark_model::redact::RedactedUrl;
use tidemark_sim::{FaultProfile, ReorgKind, Sim, SimConfig, SimEvent};
use time::OffsetDateTime;

use super::process::{Serving, Setup};
use super::{Bench, Processor, STOLEN_MAX_PERCENT, WINDOWS_MAX, float, print, write};

/// `bench live`
#[derive(Debug, Clone, clap::Args)]
pub struct LiveArgs {
    /// Loads to measure: blocks per second x logs in a block
    #[arg(long, value_name = "BLOCKSxLOGS", value_delimiter = ',', default_value = "1x200,4x500")]
    pub load: Vec<Load>,
    /// Seconds of each load
    #[arg(long, value_name = "N", default_value_t = 60)]
    pub seconds: u64,
    /// Logs that are history before the first load
    #[arg(long, value_name = "N", default_value_t = 50_000)]
    pub prefill: u64,
    /// Reorgs of one block over more than a thousand assets
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub reorgs: u32,
    /// Let new heads be found by polling instead of over WebSocket
    #[arg(long)]
    pub poll: bool,
    /// Folder for the database of that history: made there once, and copied for every run after that
    #[arg(long, value_name = "FOLDER")]
    pub keep: Option<PathBuf>,
}

/// A steady load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Blocks in a second.
    pub blocks_per_second: u32,
    /// Logs in each.
    pub logs: u32,
}

impl std::str::FromStr for Load {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || "write blocks per second, x, logs: 4x500".to_owned();
        let (blocks, logs) = text.split_once('x').ok_or_else(refuse)?;
        let number = |text: &str| text.parse::<u32>().ok().filter(|number| *number > 0).ok_or_else(refuse);
        Ok(Self { blocks_per_second: number(blocks)?, logs: number(logs)? })
    }
}

impl std::fmt::Display for Load {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}", self.blocks_per_second, self.logs)
    }
}

/// Between two questions, where the API does not wait by itself.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// A block that is not visible after this long never will be.
const PATIENCE: Duration = Duration::from_secs(120);
/// Logs of a block that touches more than a thousand assets.
const REORG_LOGS: u32 = 1_400;
/// Logs of a block of the prefilled history.
const PREFILL_LOGS: u32 = 200;

/// Runs it and writes `out/live.json`.
pub async fn run(args: &LiveArgs, out: &Path) -> anyhow::Result<()> {
    let sim = Sim::new(SimConfig::live());
    let history = u32::try_from(args.prefill.div_ceil(u64::from(PREFILL_LOGS)))?;
    eprintln!("history of {history} blocks …");
    let grown = sim.clone();
    tokio::task::spawn_blocking(move || (0..history.max(100)).for_each(|_| grown.mine_full(PREFILL_LOGS)))
        .await?;
    let bench = match &args.keep {
        Some(kept) => match Bench::start_on(kept).await? {
            Some(bench) => bench,
            None => filled(args, Bench::start().await?, &sim).await?.keep(kept).await?,
        },
        None => Bench::start().await?,
    };
    let result = measure(args, &bench, &sim).await;
    bench.end().await?;
    write(out, "live", &result?)
}

/// Reads the history of `sim`, and stops.
async fn filled(args: &LiveArgs, bench: Bench, sim: &Sim) -> anyhow::Result<Bench> {
    let node = sim.serve("127.0.0.1:0".parse()?, FaultProfile::default()).await?;
    let setup = Setup::one("bench", sim.config().chain_id, &node.url, &[]);
    let mut tidemark = Serving::start(&bench, &setup).await?;
    wait_for_history(args, &Reader::new(&tidemark.api, sim.config().chain_id)?, sim).await?;
    tidemark.stop().await?;
    node.stop().await;
    Ok(bench)
}

async fn wait_for_history(args: &LiveArgs, reader: &Reader, sim: &Sim) -> anyhow::Result<()> {
    let began = Instant::now();
    let marker = Marker::of(sim, sim.head()).context("the last block of history has a token")?;
    reader.wait_for(&marker, PATIENCE.max(Duration::from_millis(args.prefill / 2))).await?;
    eprintln!("caught up after {:.1} s", began.elapsed().as_secs_f64());
    Ok(())
}

async fn measure(args: &LiveArgs, bench: &Bench, sim: &Sim) -> anyhow::Result<Value> {
    let node = sim.serve("127.0.0.1:0".parse()?, FaultProfile::default()).await?;
    let ws = if args.poll { vec![] } else { vec![node.ws_url.clone()] };
    let setup = Setup::one("bench", sim.config().chain_id, &node.url, &ws);
    let mut tidemark = Serving::start(bench, &setup).await?;
    let reader = Reader::new(&tidemark.api, sim.config().chain_id)?;
    wait_for_history(args, &reader, sim).await?;
    let mut rows = Vec::new();
    let mut loads = Vec::new();
    for load in &args.load {
        eprintln!("{} blocks/s x {} logs for {} s …", load.blocks_per_second, load.logs, args.seconds);
        let run = undisturbed(sim, &reader, *load, Duration::from_secs(args.seconds)).await?;
        let stages = stages(bench.server.url(), &run).await?;
        rows.extend(run.rows(*load));
        rows.push((
            format!("{load}: of those, nobody works on"),
            format!("{} at most, {:.2} on average", stages.idle_max, stages.idle_mean),
        ));
        rows.push((format!("{load}: median by stage"), stages.to_string()));
        loads.push(run.json(*load, &stages));
    }
    let mut repairs = Vec::new();
    for _ in 0..args.reorgs {
        repairs.push(reorg(sim, &reader).await?);
    }
    if !repairs.is_empty() {
        let times: Vec<f64> = repairs.iter().map(|repair| repair.millis).collect();
        let assets = repairs.iter().map(|repair| repair.assets).min().unwrap_or(0);
        rows.push((
            format!("reorg of {assets} assets, to the API"),
            format!("median {:.0} ms, worst {:.0} ms", percentile(&times, 50), percentile(&times, 100)),
        ));
    }
    let usage = tidemark.usage();
    tidemark.stop().await?;
    node.stop().await;
    rows.push(("peak memory".to_owned(), format!("{} MiB", usage.peak_rss_bytes / (1024 * 1024))));
    rows.push(("CPU seconds (process)".to_owned(), format!("{:.1}", usage.cpu_seconds)));
    let table: Vec<(&str, String)> =
        rows.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    print(&table);
    Ok(json!({
        "prefill_logs": args.prefill, "seconds": args.seconds, "new_heads": if args.poll { "poll" } else { "ws" },
        "loads": loads,
        "reorgs": repairs.iter().map(|one| json!({ "assets": one.assets, "ms": one.millis })).collect::<Vec<_>>(),
        "peak_rss_bytes": usage.peak_rss_bytes, "cpu_seconds": usage.cpu_seconds,
    }))
}

/// Something of a block that the API shows once the whole block is projected: the owner its last moved
/// token has.
#[derive(Debug, Clone)]
pub(super) struct Marker {
    height: u64,
    contract: String,
    token_id: String,
    owner: String,
}

impl Marker {
    /// The last ERC-721 token that moves in the block at `height` and is not burned there.
    pub(super) fn of(sim: &Sim, height: u64) -> Option<Self> {
        let mut seen = BTreeSet::new();
        sim.logs(height, height).iter().rev().find_map(|log| match &log.event {
            SimEvent::Erc721 { to, token_id, .. } => {
                let is_last = seen.insert((log.address, *token_id));
                (is_last && !to.is_zero()).then(|| Self {
                    height,
                    contract: format!("{:#x}", log.address),
                    token_id: token_id.to_string(),
                    owner: format!("{to:#x}"),
                })
            }
            _ => None,
        })
    }
}

/// Asks the API as its users do.
pub(super) struct Reader {
    client: reqwest::Client,
    base: String,
}

impl Reader {
    pub(super) fn new(api: &str, network: u64) -> anyhow::Result<Self> {
        let client = reqwest::Client::builder().timeout(Duration::from_secs(10)).build()?;
        Ok(Self { client, base: format!("{api}/v1/assets/{network}") })
    }

    /// Addresses that own the token as soon as the API has read to `at`, which it waits for by itself, and the height it
    /// has read to; none if it has not come there yet.
    async fn owners(
        &self,
        contract: &str,
        token_id: &str,
        at: u64,
    ) -> anyhow::Result<Option<(Vec<String>, u64)>> {
        let url = format!("{}/{contract}/{token_id}/owners?min_height={at}", self.base);
        let Ok(answer) = self.client.get(&url).send().await else { return Ok(None) }; // Not up yet.
        if answer.status() == reqwest::StatusCode::NOT_FOUND {
            return Ok(None);
        }
        let answer: Value = answer.error_for_status()?.json().await?;
        let items = answer["items"].as_array().context("a page has items")?;
        let read_to =
            answer["meta"]["data_watermark"].as_u64().context("an answer says how far it has read")?;
        Ok(Some((
            items.iter().filter_map(|item| Some(item["address"].as_str()?.to_owned())).collect(),
            read_to,
        )))
    }

    /// How far the API has read, if that is the marker's block or beyond. It must say the block's owner then, unless a
    /// later block may have moved the token on.
    async fn has_read(&self, marker: &Marker) -> anyhow::Result<Option<u64>> {
        let answer = self.owners(&marker.contract, &marker.token_id, marker.height).await?;
        let Some((owners, read_to)) = answer.filter(|(_, read_to)| *read_to >= marker.height) else {
            return Ok(None);
        };
        ensure!(
            read_to > marker.height || owners.contains(&marker.owner),
            "block {} gives token {} of {} to {}, and the API says {owners:?}",
            marker.height,
            marker.token_id,
            marker.contract,
            marker.owner
        );
        Ok(Some(read_to))
    }

    pub(super) async fn wait_for(&self, marker: &Marker, patience: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + patience;
        while self.has_read(marker).await?.is_none() {
            ensure!(Instant::now() < deadline, "block {} never came to the API", marker.height);
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(())
    }
}

/// One block of a load.
struct Seen {
    height: u64,
    at: OffsetDateTime,
    millis: f64,
}

/// What a load gave.
struct Run {
    seen: Vec<Seen>,
    transfers: u64,
    /// Blocks that were not visible when the next one appeared, this one not counted.
    backlog: Vec<u64>,
    /// What others on the host took of the processors meanwhile.
    stolen_percent: f64,
    /// The same of windows before it, which were left for that reason: with the most blocks that waited.
    disturbed: Vec<(f64, u64)>,
}

impl Run {
    fn millis(&self) -> Vec<f64> {
        self.seen.iter().map(|seen| seen.millis).collect()
    }
    fn windows_before(&self) -> String {
        let each = self.disturbed.iter();
        let all: Vec<String> =
            each.map(|(stolen, waiting)| format!("{stolen:.1} % with {waiting} waiting")).collect();
        if all.is_empty() { String::new() } else { format!(" (before, left: {})", all.join(", ")) }
    }
    fn backlog_max(&self) -> u64 {
        self.backlog.iter().copied().max().unwrap_or(0)
    }
    fn rows(&self, load: Load) -> Vec<(String, String)> {
        let millis = self.millis();
        let at = |percent| format!("{:.0}", percentile(&millis, percent));
        vec![
            (
                format!("{load}: node to API, p50 / p95 / p99 / worst"),
                format!("{} / {} / {} / {} ms", at(50), at(95), at(99), at(100)),
            ),
            (
                format!("{load}: blocks waiting when the next one appears"),
                format!(
                    "{} at most, {:.2} on average",
                    self.backlog_max(),
                    float(self.backlog.iter().sum())
                        / float(self.backlog.len().max(1).try_into().unwrap_or(1))
                ),
            ),
            (
                format!("{load}: taken by others on the host"),
                format!("{:.1} %{}", self.stolen_percent, self.windows_before()),
            ),
            (
                format!("{load}: transfers in a block"),
                format!(
                    "{:.0}",
                    float(self.transfers) / float(self.seen.len().max(1).try_into().unwrap_or(1))
                ),
            ),
        ]
    }
    fn json(&self, load: Load, stages: &Stages) -> Value {
        let millis = self.millis();
        json!({
            "blocks_per_second": load.blocks_per_second, "logs_per_block": load.logs,
            "blocks": self.seen.len(), "transfers": self.transfers,
            "p50_ms": percentile(&millis, 50), "p95_ms": percentile(&millis, 95),
            "p99_ms": percentile(&millis, 99), "worst_ms": percentile(&millis, 100),
            "backlog_blocks_max": self.backlog_max(), "stages_p50_ms": stages.millis,
            "backlog_blocks_idle_max": stages.idle_max,
            "stolen_percent": self.stolen_percent,
            "windows_left": self.disturbed.iter().map(|(stolen, waiting)| json!({
                "stolen_percent": stolen, "backlog_blocks_max": waiting,
            })).collect::<Vec<_>>(),
            "each_block_ms": millis.iter().map(|one| one.round()).collect::<Vec<_>>(),
        })
    }
}

/// Nearest rank.
pub(super) fn percentile(values: &[f64], percent: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(f64::NAN)
}

/// [`follow`], once more while others on the host took the processor away, which is all that is looked at; the last window
/// counts, disturbed or not.
async fn undisturbed(sim: &Sim, reader: &Reader, load: Load, length: Duration) -> anyhow::Result<Run> {
    let mut disturbed = Vec::new();
    loop {
        let run = follow(sim, reader, load, length).await?;
        if run.stolen_percent <= STOLEN_MAX_PERCENT || disturbed.len() + 1 == WINDOWS_MAX {
            return Ok(Run { disturbed, ..run });
        }
        eprintln!("others took {:.1} % of the processors: once more …", run.stolen_percent);
        disturbed.push((run.stolen_percent, run.backlog_max()));
    }
}

/// Mines at the pace of `load` and notes when the API shows each block.
async fn follow(sim: &Sim, reader: &Reader, load: Load, length: Duration) -> anyhow::Result<Run> {
    let blocks = length.as_secs() * u64::from(load.blocks_per_second);
    let (give, mut take) = tokio::sync::mpsc::channel::<(Marker, Instant, OffsetDateTime)>(4096);
    let visible = std::sync::atomic::AtomicU64::new(sim.head());
    let first = sim.head() + 1;
    let mining = async {
        let mut ticks = tokio::time::interval(Duration::from_secs(1) / load.blocks_per_second);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut backlog = Vec::new();
        for _ in 0..blocks {
            ticks.tick().await;
            backlog.push(sim.head().saturating_sub(visible.load(std::sync::atomic::Ordering::Relaxed)));
            let miner = sim.clone();
            tokio::task::spawn_blocking(move || miner.mine_full(load.logs)).await?;
            let (at, wall) = (Instant::now(), OffsetDateTime::now_utc());
            let marker = Marker::of(sim, sim.head()).context("a full block has a token")?;
            give.send((marker, at, wall)).await?;
        }
        drop(give);
        anyhow::Ok(backlog)
    };
    let watching = async {
        let mut seen = Vec::new();
        let mut waiting: VecDeque<(Marker, Instant, OffsetDateTime)> = VecDeque::new();
        loop {
            if waiting.is_empty() {
                match take.recv().await {
                    Some(block) => waiting.push_back(block),
                    None => return anyhow::Ok(seen),
                }
            }
            let (oldest, since, _) = waiting.front().context("something waits")?;
            let Some(read_to) = reader.has_read(oldest).await? else {
                ensure!(since.elapsed() < PATIENCE, "block {} never came to the API", oldest.height);
                tokio::time::sleep(LOOK_EVERY).await;
                continue;
            };
            visible.store(read_to, std::sync::atomic::Ordering::Relaxed);
            while let Ok(block) = take.try_recv() {
                waiting.push_back(block);
            }
            while let Some((marker, at, wall)) =
                waiting.pop_front_if(|(marker, _, _)| marker.height <= read_to)
            {
                seen.push(Seen { height: marker.height, at: wall, millis: at.elapsed().as_secs_f64() * 1e3 });
            }
        }
    };
    let processor = Processor::now();
    let (backlog, seen) = tokio::try_join!(mining, watching)?;
    let stolen_percent = processor.stolen_percent();
    let transfers = sim.logs(first, sim.head()).iter().map(|log| moved(&log.event)).sum();
    Ok(Run { seen, transfers, backlog, stolen_percent, disturbed: Vec::new() })
}

fn moved(event: &SimEvent) -> u64 {
    match event {
        SimEvent::Erc721 { .. } => 1,
        SimEvent::Erc1155 { items, .. } => u64::try_from(items.len()).unwrap_or(0),
        _ => 0,
    }
}

/// What the database's own times tell.
#[derive(Default)]
struct Stages {
    /// Median milliseconds from one stage to the next.
    millis: BTreeMap<&'static str, f64>,
    /// Of the blocks that are not visible when the next one appears: how many wait for a stage to begin with them, at most.
    idle_max: usize,
    /// And on average.
    idle_mean: f64,
}

impl std::fmt::Display for Stages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (place, (name, millis)) in self.millis.iter().enumerate() {
            let comma = if place > 0 { ", " } else { "" };
            write!(f, "{comma}{} {millis:.0}", &name[2..])?;
        }
        f.write_str(" ms")
    }
}

/// When a block's event was written (the begin of its transaction) and when it got its number, by height and
/// stream; of several, the last.
const MOMENTS: &str = "
    select (o.envelope #>> '{payload,height}')::bigint, o.stream, max(o.created_at), max(l.numbered_at)
      from system.outbox_events o join system.bus_log l on l.outbox_day = o.day and l.outbox_seq = o.seq
     where o.topic in ('chain.block.ingested.v1', 'ledger.block.normalized.v1', 'projection.transfer.projected.v1')
       and (o.envelope #>> '{payload,height}')::bigint between $1 and $2
     group by 1, 2";

async fn stages(url: &RedactedUrl, run: &Run) -> anyhow::Result<Stages> {
    let (client, connection) = tokio_postgres::connect(url.expose().as_str(), tokio_postgres::NoTls).await?;
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(connection);
    let (Some(first), Some(last)) = (run.seen.first(), run.seen.last()) else {
        return Ok(Stages::default());
    };
    let (from, to) = (i64::try_from(first.height)?, i64::try_from(last.height)?);
    let mut moments: BTreeMap<(u64, String), (OffsetDateTime, OffsetDateTime)> = BTreeMap::new();
    for row in client.query(MOMENTS, &[&from, &to]).await? {
        let height = u64::try_from(row.get::<_, i64>(0))?;
        moments.insert((height, row.get(1)), (row.get(2), row.get(3)));
    }
    let mut stages: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
    let mut lives: Vec<Life> = Vec::new();
    for seen in &run.seen {
        let of = |stream: &str| moments.get(&(seen.height, stream.to_owned())).copied();
        let (Some(chain), Some(ledger), Some(projection)) = (of("chain"), of("ledger"), of("projection"))
        else {
            continue;
        };
        let shown = seen.at + Duration::from_secs_f64(seen.millis / 1e3);
        lives.push(Life { appeared: seen.at, shown, worked_on: [chain, ledger, (projection.0, shown)] });
        for (name, from, to) in [
            ("1 seen and fetched", seen.at, chain.0),
            ("2 raw rows", chain.0, chain.1),
            ("3 to the ledger", chain.1, ledger.0),
            ("4 ledger", ledger.0, ledger.1),
            ("5 to the projector", ledger.1, projection.0),
            ("6 projections and API", projection.0, shown),
        ] {
            stages.entry(name).or_default().push((to - from).as_seconds_f64() * 1e3);
        }
    }
    let idle = idle(&lives);
    Ok(Stages {
        millis: stages.into_iter().map(|(name, values)| (name, percentile(&values, 50))).collect(),
        idle_max: idle.iter().copied().max().unwrap_or(0),
        idle_mean: float(idle.iter().sum::<usize>().try_into()?) / float(idle.len().max(1).try_into()?),
    })
}

/// When a block appeared and was shown, and when each stage had it.
struct Life {
    appeared: OffsetDateTime,
    shown: OffsetDateTime,
    worked_on: [(OffsetDateTime, OffsetDateTime); 3],
}

/// For each block, in their order: how many before it wait for a stage when it appears.
fn idle(lives: &[Life]) -> Vec<usize> {
    let waits = |life: &Life, at: OffsetDateTime| {
        life.shown > at && !life.worked_on.iter().any(|(from, to)| *from <= at && at < *to)
    };
    let before =
        |place: usize| lives[..place].iter().filter(|life| waits(life, lives[place].appeared)).count();
    (0..lives.len()).map(before).collect()
}

struct Repair {
    assets: usize,
    millis: f64,
}

/// One block over more than a thousand assets is replaced by others; timed until the API shows the new
/// branch and nothing of the old one.
async fn reorg(sim: &Sim, reader: &Reader) -> anyhow::Result<Repair> {
    sim.mine_full(REORG_LOGS);
    let height = sim.head();
    reader.wait_for(&Marker::of(sim, height).context("a full block has a token")?, PATIENCE).await?;
    let old = sim.logs(height, height);
    let began = Instant::now();
    sim.reorg(1, ReorgKind::Replace);
    let marker = Marker::of(sim, sim.head()).context("a full block has a token")?;
    reader.wait_for(&marker, PATIENCE).await?;
    let millis = began.elapsed().as_secs_f64() * 1e3;
    let mut assets = BTreeSet::new();
    let mut minted = BTreeSet::new();
    for log in &old {
        match &log.event {
            SimEvent::Erc721 { from, token_id, .. } => {
                assets.insert((log.address, *token_id));
                if from.is_zero() {
                    minted.insert((log.address, *token_id));
                }
            }
            SimEvent::Erc1155 { items, .. } => {
                assets.extend(items.iter().map(|(token_id, _)| (log.address, *token_id)));
            }
            _ => {}
        }
    }
    for log in sim.logs(height, sim.head()) {
        if let SimEvent::Erc721 { token_id, .. } = log.event {
            minted.remove(&(log.address, token_id));
        }
    }
    ensure!(assets.len() >= 1000, "the block touches {} assets only", assets.len());
    for (contract, token_id) in minted.iter().take(20) {
        let answer = reader.owners(&format!("{contract:#x}"), &token_id.to_string(), 0).await?;
        let owners = answer.map(|(owners, _)| owners).unwrap_or_default();
        ensure!(
            owners.is_empty(),
            "token {token_id} of {contract:#x} was never minted, and {owners:?} own it"
        );
    }
    Ok(Repair { assets: assets.len(), millis })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_read_as_they_are_written() {
        let load: Load = "4x500".parse().expect("a load");
        assert_eq!((load.blocks_per_second, load.logs), (4, 500));
        assert_eq!(load.to_string(), "4x500");
        assert!("4".parse::<Load>().is_err() && "0x5".parse::<Load>().is_err());
    }

    #[test]
    fn a_block_that_a_stage_has_does_not_wait() {
        let at = |millis: i64| OffsetDateTime::UNIX_EPOCH + Duration::from_millis(millis.unsigned_abs());
        let life = |appeared: i64, [from, to, shown]: [i64; 3]| Life {
            appeared: at(appeared),
            shown: at(shown),
            worked_on: [(at(appeared), at(from)), (at(from), at(to)), (at(to + 100), at(shown))],
        };
        // The second one appears while the first is worked on; the third while the first waits between two stages.
        let lives = [life(0, [50, 500, 700]), life(250, [300, 900, 1_200]), life(550, [600, 650, 800])];
        assert_eq!(idle(&lives), [0, 0, 1]);
        assert_eq!(
            idle(&[life(0, [50, 60, 200]), life(250, [300, 310, 500])]),
            [0, 0],
            "what is shown does not"
        );
    }

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(percentile(&values, 50), 50.0);
        assert_eq!(percentile(&values, 95), 95.0);
        assert_eq!(percentile(&values, 100), 100.0);
        assert_eq!(percentile(&[7.0], 1), 7.0);
        assert!(percentile(&[], 50).is_nan());
    }
}
