//! `bench api`: every route at a fixed rate over real HTTP, beside a bare `select` of the same row through the
//! same kind of pool. Open loop: requests are sent when they are due, not when the last one was answered, and
//! latency counts from the moment a request was due, so that a stall is paid for by everybody behind it.

mod data;
mod endpoints;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde::Serialize;
use serde_json::json;
use tidemark_model::redact::RedactedUrl;
use tidemark_store::Db;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::Instant;

use self::data::Size;
use self::endpoints::{Bare, Endpoint};
use super::{Processor, STOLEN_MAX_PERCENT, WINDOWS_MAX, float, print, write};
use crate::embedded_pg::{EmbeddedPg, Options};
use crate::parent;

/// `bench api`
#[derive(Debug, Clone, clap::Args)]
pub struct ApiArgs {
    /// Assets in the read models
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    pub assets: u64,
    /// Transfers in the read models; a multiple of the assets
    #[arg(long, value_name = "N", default_value_t = 5_000_000)]
    pub transfers: u64,
    /// Requests per second
    #[arg(long, value_name = "N", default_value_t = 500)]
    pub rps: u32,
    /// Seconds per route, and again for its bare select
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub seconds: u32,
    /// Keep the database in this folder and use it again
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
    /// Build the database and measure nothing
    #[arg(long, requires = "keep")]
    pub build_only: bool,
}

/// S0 §17.3.
const FLOOR_MS: f64 = 200.0;
/// What we want.
const GOAL_MS: f64 = 10.0;
/// A request that takes longer than this failed.
const GIVE_UP: Duration = Duration::from_secs(20);

/// Runs it and writes `out/api.json`.
pub async fn run(args: &ApiArgs, out: &Path) -> anyhow::Result<()> {
    ensure!(args.rps > 0 && args.seconds > 0, "at least one request");
    let dir = match &args.keep {
        Some(dir) => dir.clone(),
        None => std::env::temp_dir().join(format!("tidemark-bench-{}", std::process::id())),
    };
    std::fs::create_dir_all(&dir)?;
    let server = EmbeddedPg::start(&Options { data_dir: dir.clone(), port: None }).await?;
    let result = measure(args, &dir, &server).await;
    server.stop().await?;
    if args.keep.is_none() {
        std::fs::remove_dir_all(&dir).with_context(|| format!("{} cannot be removed", dir.display()))?;
    }
    match result? {
        Some(result) => write(out, "api", &result),
        None => Ok(()),
    }
}

async fn measure(
    args: &ApiArgs,
    dir: &Path,
    server: &EmbeddedPg,
) -> anyhow::Result<Option<serde_json::Value>> {
    let size = Size { assets: args.assets, transfers: args.transfers };
    prepare(dir, server.url(), size).await?;
    if args.build_only {
        return Ok(None);
    }
    let (mut child, url) = serve(dir, server.url()).await?;
    let measured = measure_all(args, size, server.url(), &url).await;
    child.kill().await?;
    let rows = measured?;
    report(&rows);
    let worst = rows.iter().map(|row| row.api.p99_ms).fold(0.0, f64::max);
    let errors: u64 = rows.iter().map(|row| row.api.errors).sum();
    let result = json!({
        "assets": size.assets, "transfers": size.transfers, "rps": args.rps, "seconds": args.seconds,
        "worst_p99_ms": worst, "floor_ms": FLOOR_MS, "floor_held": worst < FLOOR_MS && errors == 0,
        "goal_ms": GOAL_MS, "goal_reached": rows.iter().filter(|row| row.api.p99_ms < GOAL_MS).count(),
        "errors": errors, "routes": rows,
    });
    ensure!(errors == 0, "{errors} requests failed");
    Ok(Some(result))
}

/// Builds the data, or finds it in a folder that was kept.
async fn prepare(dir: &Path, url: &RedactedUrl, size: Size) -> anyhow::Result<()> {
    let note = dir.join("bench-api.json");
    let wanted = json!({ "assets": size.assets, "transfers": size.transfers }).to_string();
    if std::fs::read_to_string(&note).is_ok_and(|found| found == wanted) {
        return Ok(());
    }
    ensure!(!note.exists(), "{} holds data of another size: remove the folder", dir.display());
    eprintln!("building {} assets and {} transfers …", size.assets, size.transfers);
    data::build(url, size).await?;
    std::fs::write(note, wanted)?;
    Ok(())
}

/// The product itself, as a process of its own, with nothing but the API.
async fn serve(dir: &Path, database: &RedactedUrl) -> anyhow::Result<(Child, String)> {
    let port = std::net::TcpListener::bind(("127.0.0.1", 0))?;
    let listen = port.local_addr()?;
    drop(port);
    let config = dir.join("api.toml");
    let text = format!(
        "[api]\nlisten = \"{listen}\"\nrate_limit_rps = 0\n[telemetry]\nlisten = \"off\"\nlog_filter = \"warn\"\n\
         [[network]]\nid = {}\nslug = \"{}\"\nfamily = \"evm\"\nrpc = [\"http://127.0.0.1:9\"]\n",
        data::NETWORK,
        data::SLUG,
    );
    std::fs::write(&config, text)?;
    let child = Command::from(parent::child()?)
        .args(["run", "--roles", "api", "--config"])
        .arg(&config)
        .env("TIDEMARK__DATABASE__URL", database.expose().as_str())
        .env("TIDEMARK__OBJECTS__URL", format!("file:{}", dir.join("objects").display()))
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let url = format!("http://{listen}");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !reqwest::get(format!("{url}/v1/networks")).await.is_ok_and(|answer| answer.status().is_success()) {
        ensure!(Instant::now() < deadline, "the API does not answer");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok((child, url))
}

/// One route's figures.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    api: Latency,
    bare: Latency,
}

/// What a run of requests took.
#[derive(Debug, Clone, Serialize)]
struct Latency {
    p50_ms: f64,
    p95_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    requests: usize,
    errors: u64,
    /// How late the machine woke the sender of requests at worst. What a request waits for that is nobody's fault.
    sent_late_max_ms: f64,
    /// Share of the cores that others on the same host took, as the kernel counts it.
    stolen_percent: f64,
    /// How often it was measured until they took little.
    windows: usize,
}

impl Latency {
    fn of(mut times: Vec<Duration>, errors: u64, late_max: Duration, stolen_percent: f64) -> Self {
        times.sort_unstable();
        let at = |per_mille: usize| {
            let index = (times.len() * per_mille / 1000).min(times.len().saturating_sub(1));
            times.get(index).map_or(0.0, |time| time.as_secs_f64() * 1000.0)
        };
        Self {
            p50_ms: at(500),
            p95_ms: at(950),
            p99_ms: at(990),
            max_ms: at(1000),
            requests: times.len(),
            errors,
            sent_late_max_ms: late_max.as_secs_f64() * 1000.0,
            stolen_percent,
            windows: 1,
        }
    }
}

async fn measure_all(
    args: &ApiArgs,
    size: Size,
    database: &RedactedUrl,
    url: &str,
) -> anyhow::Result<Vec<Row>> {
    let pool = Db::open(database, &tidemark_api::db_options(16))?;
    let endpoints = endpoints::all(size, data::moved(&pool, size).await?)?;
    let http = reqwest::Client::builder().timeout(GIVE_UP).build()?;
    let mut rows = Vec::new();
    let mut mixed = Vec::new();
    for endpoint in endpoints {
        eprintln!("{} …", endpoint.name);
        let requests = Arc::new(endpoint.requests.clone());
        let asking = {
            let (http, url) = (http.clone(), url.to_owned());
            move |n: usize| ask(http.clone(), url.clone(), Arc::clone(&requests), n)
        };
        // Every key once before anything counts: caches, and the statements of every connection.
        open_loop(args.rps, endpoint.requests.len(), asking.clone()).await;
        let api = undisturbed(args.rps, args.requests(), asking).await;
        let bare = bare(args, &pool, &endpoint).await;
        mixed.extend(endpoint.requests.iter().take(200).cloned());
        rows.push(Row { name: endpoint.name, api, bare });
    }
    // Neighbours are of different routes.
    let step = (1..).find(|step| step * step > mixed.len()).unwrap_or(1);
    let mixed: Vec<_> = (0..step).flat_map(|from| mixed.iter().skip(from).step_by(step).cloned()).collect();
    let mixed = Arc::new(mixed);
    let url = url.to_owned();
    let asking = move |n: usize| ask(http.clone(), url.clone(), Arc::clone(&mixed), n);
    let api = undisturbed(args.rps, args.requests() * 2, asking).await;
    let bare = rows.first().context("there are routes")?.bare.clone();
    rows.push(Row { name: "all routes mixed".into(), api, bare });
    Ok(rows)
}

impl ApiArgs {
    fn requests(&self) -> usize {
        usize::try_from(u64::from(self.rps) * u64::from(self.seconds)).unwrap_or(usize::MAX)
    }
}

async fn ask(http: reqwest::Client, url: String, requests: Arc<Vec<endpoints::Request>>, n: usize) -> bool {
    let request = &requests[n % requests.len()];
    let at = format!("{url}{}", request.path);
    let asked = match &request.body {
        None => http.get(at),
        Some(body) => http.post(at).header("content-type", "application/json").body(body.clone()),
    };
    match asked.send().await {
        Ok(answer) if answer.status().is_success() => answer.bytes().await.is_ok(),
        _ => false,
    }
}

async fn bare(args: &ApiArgs, pool: &Db, endpoint: &Endpoint) -> Latency {
    let bare: Arc<Bare> = Arc::new(endpoint.bare.clone());
    let pool = pool.clone();
    let asking = move |n: usize| {
        let (pool, bare) = (pool.clone(), Arc::clone(&bare));
        async move {
            let Ok(conn) = pool.conn().await else { return false };
            let key = &bare.keys[n % bare.keys.len()];
            conn.query_opt("read one row", bare.sql, &[key.as_param()]).await.is_ok_and(|row| row.is_some())
        }
    };
    open_loop(args.rps, endpoint.bare.keys.len(), asking.clone()).await;
    undisturbed(args.rps, args.requests(), asking).await
}

/// [`open_loop`], once more while others on the host took the processor away, which is all that is looked at; the last
/// window counts, disturbed or not.
async fn undisturbed<F, A>(rps: u32, count: usize, ask: F) -> Latency
where
    F: Fn(usize) -> A,
    A: Future<Output = bool> + Send + 'static,
{
    let mut windows = 1;
    loop {
        let measured = open_loop(rps, count, &ask).await;
        if measured.stolen_percent <= STOLEN_MAX_PERCENT || windows == WINDOWS_MAX {
            return Latency { windows, ..measured };
        }
        windows += 1;
    }
}

/// Sends `count` requests at `rps`, whatever happens to those before.
async fn open_loop<F, A>(rps: u32, count: usize, ask: F) -> Latency
where
    F: Fn(usize) -> A,
    A: Future<Output = bool> + Send + 'static,
{
    let begin = Instant::now() + Duration::from_millis(20);
    let gap = Duration::from_secs(1) / rps;
    let mut flying = JoinSet::new();
    let mut late_max = Duration::ZERO;
    let processor = Processor::now();
    for n in 0..count {
        let due = begin + gap * u32::try_from(n).unwrap_or(u32::MAX);
        tokio::time::sleep_until(due).await;
        late_max = late_max.max(due.elapsed());
        let asked = ask(n);
        flying.spawn(async move { (asked.await, due.elapsed()) });
    }
    let mut times = Vec::with_capacity(count);
    let mut errors = 0;
    while let Some(ended) = flying.join_next().await {
        match ended {
            Ok((true, time)) => times.push(time),
            Ok((false, _)) | Err(_) => errors += 1,
        }
    }
    Latency::of(times, errors, late_max, processor.stolen_percent())
}

fn report(rows: &[Row]) {
    let lines: Vec<(String, String)> = rows
        .iter()
        .map(|row| {
            let times = format!(
                "p50 {:>6.2}  p95 {:>6.2}  p99 {:>7.2} ms   bare p50 {:>5.2}  p99 {:>6.2} ms   late {:>4.0} ms  stolen {:>2.0} %{}{}",
                row.api.p50_ms,
                row.api.p95_ms,
                row.api.p99_ms,
                row.bare.p50_ms,
                row.bare.p99_ms,
                row.api.sent_late_max_ms,
                row.api.stolen_percent,
                if row.api.windows > 1 { format!("  ({} windows)", row.api.windows) } else { String::new() },
                if row.api.errors > 0 { format!("  {} FAILED", row.api.errors) } else { String::new() },
            );
            (row.name.clone(), times)
        })
        .collect();
    let lines: Vec<(&str, String)> = lines.iter().map(|(name, line)| (name.as_str(), line.clone())).collect();
    print(&lines);
    let goal = rows.iter().filter(|row| row.api.p99_ms < GOAL_MS).count();
    let floor = rows.iter().filter(|row| row.api.p99_ms < FLOOR_MS).count();
    print(&[
        ("p99 below 200 ms", format!("{floor} of {}", rows.len())),
        ("p99 below 10 ms", format!("{goal} of {}", rows.len())),
        (
            "mean p99",
            format!(
                "{:.2} ms",
                rows.iter().map(|row| row.api.p99_ms).sum::<f64>()
                    / float(rows.len().try_into().unwrap_or(1))
            ),
        ),
    ]);
}
