//! `sync`: history until a height is final and projected, then the end. The database is the judge: the loop
//! below only reads how far ledger and projections are.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tidemark_pipeline::stage_time::STAGE_TIME;
use tidemark_store::db::STATEMENT_TIME;
use tidemark_store::status::{self, AppProgress, RawProgress};

use crate::cli::{SyncArgs, Until};
use crate::config::{Config, Override};
use crate::exit;
use crate::host::{self, Embedded, Host};
use crate::supervise::State;
use crate::wire::{Context, Role, Started};

/// Flags as the last layer of the configuration.
pub fn overrides(args: &SyncArgs) -> Vec<Override> {
    let dir = args.data_dir.as_ref().map(|dir| dir.display().to_string());
    let dir = dir.map(|value| Override { path: &["database", "data_dir"], value, flag: "--data-dir" });
    dir.into_iter().collect()
}

/// Everything but answering questions.
const ROLES: &[Role] = &[Role::Ingest, Role::Relay, Role::Workers];
/// `--raw-only`: ingestion never waits for anything downstream, so it can also be alone.
const RAW_ROLES: &[Role] = &[Role::Ingest];

/// The last line of `--json`.
#[derive(Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Canonical events that came into the projections; records in raw.* with `--raw-only`.
    pub events: i64,
    /// From the first role's start to the end.
    pub seconds: f64,
    /// Their quotient.
    pub events_per_second: f64,
    /// JSON-RPC requests sent.
    pub rpc_calls: u64,
    /// Most memory this process held, without the database server.
    pub peak_rss_bytes: u64,
    /// Processor time of this process, without the database server.
    pub cpu_seconds: f64,
    /// Seconds per stage and per database statement, summed over all tasks: several run at once.
    pub stages: BTreeMap<String, f64>,
}

/// Runs it.
pub async fn run(args: SyncArgs, mut config: Config) -> anyhow::Result<u8> {
    anyhow::ensure!(
        !config.networks.is_empty(),
        "there is no [[network]] to read: add one to the configuration; `tidemark config example` shows it"
    );
    // A batch job beside a running service must not fight for its ports.
    config.telemetry.listen = None;
    config.api.admin_listen = None;
    config.api.listen.set_port(0);
    let mut stop = std::pin::pin!(host::asked_to_stop());
    let starting = async {
        let host = Host::open(config, Embedded::Allowed).await?;
        let started = host.start(if args.raw_only { RAW_ROLES } else { ROLES }).await?;
        anyhow::Ok((host, started))
    };
    let (host, started) = tokio::select! {
        both = starting => both?,
        stopped = &mut stop => return stopped.map(|()| exit::FAILURE),
    };
    let outcome = tokio::select! {
        summary = until_done(&host, &started, &args) => summary.map(Some),
        stopped = &mut stop => stopped.map(|()| None),
    };
    host.close().await?;
    match outcome? {
        None => {
            eprintln!("Stopped before the end; the next run goes on from here.");
            Ok(exit::FAILURE)
        }
        Some(summary) => {
            match args.json {
                true => println!("{}", serde_json::to_string(&summary)?),
                false => println!(
                    "Done: {} events in {:.1} s ({:.0} per second), {} RPC calls, at most {} MiB of memory.",
                    summary.events,
                    summary.seconds,
                    summary.events_per_second,
                    summary.rpc_calls,
                    summary.peak_rss_bytes / 1_048_576
                ),
            }
            Ok(exit::OK)
        }
    }
}

/// How often the database is asked how far it is.
const LOOK_EVERY: Duration = Duration::from_millis(250);

async fn until_done(host: &Host, started: &Started, args: &SyncArgs) -> anyhow::Result<Summary> {
    anyhow::ensure!(!started.adapters.is_empty(), "this build has no ingester: nothing would ever arrive");
    let began = Instant::now();
    let before = events(&host.ctx, args.raw_only).await?;
    let mut goals = Goals::new(&host.ctx.config, args.until);
    let bar = progress_bar();
    loop {
        for role in host.group.states() {
            if role.state == State::Halted {
                anyhow::bail!("{} halted: {}", role.role, role.last_error.unwrap_or_default());
            }
        }
        // A database that is away for a moment is the supervisor's business; we look again.
        if let Ok((raw, app)) = look(&host.ctx).await {
            if let Some(halted) = raw.iter().find_map(|line| Some((&line.slug, line.halted.as_ref()?))) {
                anyhow::bail!("{} halted: {}", halted.0, halted.1);
            }
            goals.learn(&raw);
            let app = if args.raw_only { as_if_projected(&raw) } else { app };
            let (done, wanted) = goals.blocks(&app);
            bar.set_length(wanted);
            bar.set_position(done);
            if done == wanted && wanted > 0 {
                bar.set_message("building owners and indexes");
            }
            if goals.reached(&app) && deferred_indexes(&host.ctx).await? == 0 {
                bar.finish_and_clear();
                let took = began.elapsed();
                return Ok(summary(
                    events(&host.ctx, args.raw_only).await? - before,
                    took,
                    started,
                    &host.ctx,
                ));
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// With `--raw-only` the goal is reached by what is ingested.
fn as_if_projected(raw: &[RawProgress]) -> Vec<AppProgress> {
    let line = |line: &RawProgress| AppProgress {
        network_id: line.network_id,
        normalized: line.ingested,
        finalized: line.ingested,
        projected: line.ingested,
        events: 0,
    };
    raw.iter().map(line).collect()
}

async fn events(ctx: &Context, raw_only: bool) -> anyhow::Result<i64> {
    if raw_only {
        return Ok(status::raw_records(&ctx.raw.conn().await?).await?);
    }
    Ok(look(ctx).await?.1.iter().map(|line| line.events).sum())
}

/// Indexes that a large first history still has to build.
async fn deferred_indexes(ctx: &Context) -> anyhow::Result<i64> {
    Ok(tidemark_store::bulk::deferred_indexes(&ctx.app.conn().await?).await?)
}

async fn look(ctx: &Context) -> anyhow::Result<(Vec<RawProgress>, Vec<AppProgress>)> {
    let raw = status::raw_progress(&ctx.raw.conn().await?).await?;
    let app = status::app_progress(&ctx.app.conn().await?).await?;
    Ok((raw, app))
}

fn summary(events: i64, took: Duration, started: &Started, ctx: &Context) -> Summary {
    let seconds = took.as_secs_f64();
    let events_exact = u32::try_from(events).map_or(f64::from(u32::MAX), f64::from);
    Summary {
        events,
        seconds,
        events_per_second: if seconds > 0.0 { events_exact / seconds } else { 0.0 },
        rpc_calls: started.adapters.iter().map(|adapter| adapter.requests()).sum(),
        peak_rss_bytes: crate::bench::peak_rss_bytes(),
        cpu_seconds: cpu_seconds(),
        stages: stages(&ctx.metrics.render()),
    }
}

/// The time counters of a metrics page, in seconds.
fn stages(page: &str) -> BTreeMap<String, f64> {
    let counters = [(STAGE_TIME, "stage=\""), (STATEMENT_TIME, "statement=\"")];
    let mut stages = BTreeMap::new();
    for line in page.lines() {
        for (counter, label) in counters {
            let Some(rest) = line.strip_prefix(counter).and_then(|rest| rest.split_once(label)) else {
                continue;
            };
            let Some((name, value)) = rest.1.split_once("\"}") else { continue };
            let micros: f64 = value.trim().parse().unwrap_or(0.0);
            let name = if counter == STATEMENT_TIME { format!("sql: {name}") } else { name.to_owned() };
            stages.insert(name, micros / 1e6);
        }
    }
    stages
}

/// User and system time so far. `/proc` counts in hundredths of a second; 0 where there is none.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<u32>().ok()).unwrap_or(0);
    f64::from(ticks(11) + ticks(12)) / 100.0
}

/// Blocks, rate and time left; nothing where nobody looks.
fn progress_bar() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style =
        ProgressStyle::with_template("{bar:40} {human_pos}/{human_len} blocks  {per_sec}  {eta} left  {msg}")
            .expect("a fixed template");
    ProgressBar::new(0).with_style(style)
}

/// What must be reached, per network. A goal that is not known yet is not reached.
struct Goals(Vec<Goal>);

struct Goal {
    network_id: i32,
    start: i64,
    height: Option<i64>,
}

impl Goals {
    fn new(config: &Config, until: Until) -> Self {
        let goals = config.networks.iter().map(|network| Goal {
            network_id: network.id.0,
            start: i64::try_from(network.start_block).unwrap_or(i64::MAX),
            height: match until {
                Until::Finalized => None,
                Until::Height(height) => Some(i64::try_from(height).unwrap_or(i64::MAX)),
            },
        });
        Self(goals.collect())
    }

    /// The finalized height at the first look is the goal; later ones would move it for ever.
    fn learn(&mut self, raw: &[RawProgress]) {
        for goal in self.0.iter_mut().filter(|goal| goal.height.is_none()) {
            goal.height =
                raw.iter().find(|line| line.network_id == goal.network_id).and_then(|line| line.finalized);
        }
    }

    fn reached(&self, app: &[AppProgress]) -> bool {
        self.0.iter().all(|goal| {
            let line = app.iter().find(|line| line.network_id == goal.network_id);
            let done = line.and_then(|line| Some(line.finalized?.min(line.projected?)));
            // A start block above the finalized height leaves nothing to do.
            goal.height.is_some_and(|height| height < goal.start || done.is_some_and(|done| done >= height))
        })
    }

    /// Blocks done and wanted over all networks. What the ledger has counts: a long history is projected at its end.
    fn blocks(&self, app: &[AppProgress]) -> (u64, u64) {
        let mut all = (0, 0);
        for goal in &self.0 {
            let Some(height) = goal.height else { continue };
            let line = app.iter().find(|line| line.network_id == goal.network_id);
            let done = line.and_then(|line| line.normalized.max(line.projected)).unwrap_or(-1).min(height);
            let count = |to: i64| u64::try_from(to - goal.start + 1).unwrap_or(0);
            all = (all.0 + count(done), all.1 + count(height));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn app(finalized: i64, projected: i64) -> Vec<AppProgress> {
        vec![AppProgress {
            network_id: 1,
            normalized: Some(projected),
            finalized: Some(finalized),
            projected: Some(projected),
            events: 0,
        }]
    }

    fn goals(height: Option<i64>) -> Goals {
        Goals(vec![Goal { network_id: 1, start: 10, height }])
    }

    #[test]
    fn the_goal_is_final_and_projected() {
        assert!(!goals(None).reached(&app(99, 99)), "an unknown goal is not reached");
        assert!(!goals(Some(50)).reached(&app(49, 80)));
        assert!(!goals(Some(50)).reached(&app(80, 49)));
        assert!(goals(Some(50)).reached(&app(50, 50)));
        assert!(goals(Some(5)).reached(&[]), "nothing below the start block is read");
        assert!(!goals(Some(50)).reached(&[]));
    }

    #[test]
    fn stages_are_read_off_the_metrics_page() {
        let page = "# TYPE x counter\npipeline_stage_microseconds_total{stage=\"parse\"} 1500000\n\
                    db_statement_microseconds_total{statement=\"append events\"} 250000\nother 1\n";
        let stages = stages(page);
        assert_eq!(stages.len(), 2);
        assert_eq!((stages["parse"], stages["sql: append events"]), (1.5, 0.25));
    }

    #[test]
    fn the_goal_is_learned_once() {
        let seen = |finalized| {
            vec![RawProgress {
                network_id: 1,
                slug: "x".into(),
                latest: Some(100),
                finalized: Some(finalized),
                ingested: None,
                halted: None,
            }]
        };
        let mut goals = goals(None);
        goals.learn(&seen(40));
        goals.learn(&seen(60));
        assert_eq!(goals.blocks(&app(0, 19)), (10, 31));
        let unshown = AppProgress { normalized: Some(29), projected: None, ..app(0, 0)[0].clone() };
        assert_eq!(goals.blocks(&[unshown]), (20, 31), "read, and shown at the end");
        let on_top = AppProgress { normalized: Some(29), projected: Some(15), ..app(0, 0)[0].clone() };
        assert_eq!(goals.blocks(&[on_top]), (20, 31), "likewise on top of what is shown");
        assert!(goals.reached(&app(40, 40)));
    }
}
