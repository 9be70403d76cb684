//! The only place where rooms meet. [`start_roles`] turns roles into supervised tasks; nothing else knows
//! which parts a role is made of.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use metrics_exporter_prometheus::PrometheusHandle;
use tidemark_model::chain::ChainAdapter;
use tidemark_store::status::{self, Process};
use tidemark_store::{Db, DbOptions, Plans, StoreError, Verdict, partitions};
use time::OffsetDateTime;

use crate::config::Config;
use crate::embedded_pg::EmbeddedPg;
use crate::roles::Shop;
use crate::supervise::{Running, Stage, Supervisor};
use crate::telemetry::{self, Probe};

/// What a process may be asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum)]
pub enum Role {
    /// Read chains into raw.*.
    Ingest,
    /// Carry events from the outbox to the bus.
    Relay,
    /// Ledger, projections and everything else that consumes events.
    Workers,
    /// REST, live stream and explorer.
    Api,
    /// Send transactions.
    Executor,
}

impl Role {
    /// All but the executor, which must be asked for.
    pub const DEV: &'static [Self] = &[Self::Ingest, Self::Relay, Self::Workers, Self::Api];
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ingest => "ingest",
            Self::Relay => "relay",
            Self::Workers => "workers",
            Self::Api => "api",
            Self::Executor => "executor",
        })
    }
}

/// What every role is made from.
#[derive(Clone)]
pub struct Context {
    /// The configuration.
    pub config: Arc<Config>,
    /// raw.*, sync cursors, heads, and the outbox of that side.
    pub raw: Db,
    /// ledger.*, catalog.*, projection.*, system.*.
    pub app: Db,
    /// This process, in leases and in `status`.
    pub instance: String,
    /// The metrics registry.
    pub metrics: PrometheusHandle,
}

impl Context {
    /// Pools for both sides; connects lazily.
    pub fn open(
        config: Config,
        embedded: Option<&EmbeddedPg>,
        metrics: PrometheusHandle,
    ) -> anyhow::Result<Self> {
        let (raw_url, app_url) = match (&config.database.raw_url, &config.database.app_url, embedded) {
            (Some(raw), Some(app), _) => (raw.clone(), app.clone()),
            (_, _, Some(server)) => (server.url().clone(), server.url().clone()),
            _ => anyhow::bail!(
                "no database is configured: set database.url (or TIDEMARK__DATABASE__URL), or use `tidemark dev`"
            ),
        };
        let options = DbOptions {
            application_name: "tidemark".into(),
            connections_max: config.database.connections_max,
            ..DbOptions::default()
        };
        let app = Db::open(&app_url, &options)?;
        let raw = Db::open(&raw_url, &DbOptions { plans: Plans::ForEachCall, ..options })?;
        Ok(Self { config: Arc::new(config), raw, app, instance: instance(), metrics })
    }
}

/// Database roles of `0006_roles.sql`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DbRole {
    /// Reads projection.*, ref.*, raw.*; writes nothing.
    Api,
    /// Writes raw.* and its cursors. Makes no partitions: those belong to the login.
    Ingest,
    /// Writes everything past raw.*. Makes no partitions either.
    Worker,
}

/// Partitions up to which a read is planned once: such a plan locks all of them at every call. With more of them
/// (hundreds of networks) every call is planned for its own network.
const PLANNED_ONCE_MAX: i64 = 500;

impl DbRole {
    fn name(self) -> &'static str {
        match self {
            Self::Api => "tidemark_api",
            Self::Ingest => "tidemark_ingest",
            Self::Worker => "tidemark_worker",
        }
    }
    /// What users wait for is bounded more tightly than what workers do.
    fn statement_timeout(self) -> Option<Duration> {
        match self {
            Self::Api => tidemark_api::db_options(1).statement_timeout,
            Self::Ingest | Self::Worker => DbOptions::default().statement_timeout,
        }
    }
}

impl Context {
    /// A pool of `db`'s database that acts with less rights. A login that cannot take the role, because it
    /// could not create it, keeps its own rights, and the log says so.
    pub async fn acting_as(&self, db: &Db, role: DbRole, connections_max: usize) -> anyhow::Result<Db> {
        let may = patiently("ask for its rights", || async {
            status::may_act_as(&db.conn().await?, role.name()).await
        })
        .await?;
        if !may {
            tracing::warn!(
                role = role.name(),
                action = "role_missing_in_database",
                "This login cannot take the database role and keeps its own rights."
            );
        }
        let partitions =
            patiently("count partitions", || async { partitions::count(&db.conn().await?).await }).await?;
        let options = DbOptions {
            application_name: role.name().into(),
            connections_max,
            role: may.then(|| role.name().to_owned()),
            statement_timeout: role.statement_timeout(),
            plans: match role {
                DbRole::Api if partitions <= PLANNED_ONCE_MAX => Plans::Once,
                DbRole::Api | DbRole::Ingest => Plans::ForEachCall,
                DbRole::Worker => Plans::AsTheServerDecides,
            },
        };
        Ok(Db::open(db.url(), &options)?)
    }
}

/// Repeats a question to a database that is away for a moment: one that restarts while our roles start is no
/// reason to end the process. The first connection, before any role, is not made through this.
async fn patiently<T, F>(what: &'static str, mut ask: impl FnMut() -> F) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    let mut pause = Duration::from_millis(100);
    loop {
        match ask().await {
            Err(error) if error.verdict() == Verdict::Retry => {
                tracing::warn!(action = "start_roles", %error, what, "The database is away; a starting role waits for it.");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(2));
            }
            answer => return answer,
        }
    }
}

/// Host and process: who holds a lease, and whose heartbeat it is.
fn instance() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "localhost".into());
    format!("{}-{}", host.trim(), std::process::id())
}

/// Starts what every process has: the telemetry listener and the heartbeat.
pub fn start_base(ctx: &Context, embedded: Option<&Arc<EmbeddedPg>>, group: &Supervisor) {
    if let Some(server) = embedded {
        let server = Arc::clone(server);
        group.start("postgres", Stage::Base, move |running| {
            let server = Arc::clone(&server);
            async move {
                running.up();
                Ok(server.keep_running(&running.stop).await?)
            }
        });
    }
    if let Some(listen) = ctx.config.telemetry.listen {
        let probe = Probe { metrics: ctx.metrics.clone(), group: group.clone() };
        group
            .start("telemetry", Stage::Base, move |running| telemetry::serve(listen, probe.clone(), running));
    }
    let (ctx, roles) = (ctx.clone(), group.clone());
    group.start("heartbeat", Stage::Base, move |running| heartbeat(ctx.clone(), roles.clone(), running));
}

/// `status` calls a process lost after three missed ones.
pub const HEARTBEAT_EVERY: Duration = Duration::from_secs(2);

/// Has it said something lately?
pub fn is_alive(process: &Process) -> bool {
    process.silent_seconds <= 3.0 * HEARTBEAT_EVERY.as_secs_f64()
}

async fn heartbeat(ctx: Context, group: Supervisor, running: Running) -> anyhow::Result<()> {
    loop {
        let conn = ctx.app.conn().await?;
        status::heartbeat(&conn, &ctx.instance, &processes(&ctx.instance, &group)).await?;
        drop(conn);
        running.up();
        tokio::select! {
            () = running.stop.cancelled() => break,
            () = tokio::time::sleep(HEARTBEAT_EVERY) => {}
        }
    }
    let conn = ctx.app.conn().await?;
    Ok(status::forget(&conn, &ctx.instance).await?)
}

fn processes(instance: &str, group: &Supervisor) -> Vec<Process> {
    group
        .states()
        .into_iter()
        .map(|role| Process {
            instance: instance.to_owned(),
            role: role.role,
            state: role.state.as_str().to_owned(),
            restarts: i64::try_from(role.restarts).unwrap_or(i64::MAX),
            last_error: role.last_error.map(|error| telemetry::scrub(&error).into_owned()),
            started_at: role.started_at,
            heartbeat_at: OffsetDateTime::UNIX_EPOCH, // The database's clock decides.
            silent_seconds: 0.0,
        })
        .collect()
}

/// What [`start_roles`] started, for those who count.
#[derive(Default)]
pub struct Started {
    /// One per network that is being read.
    pub adapters: Vec<Arc<dyn ChainAdapter>>,
}

/// Starts the parts of `roles` as supervised tasks of `group`.
pub async fn start_roles(ctx: &Context, roles: &[Role], group: &Supervisor) -> anyhow::Result<Started> {
    anyhow::ensure!(
        !roles.contains(&Role::Executor),
        "the executor role is not in this version: leave it out of --roles"
    );
    let shop = Shop::open(ctx).await?;
    for role in roles {
        match role {
            Role::Ingest => shop.ingest(group),
            Role::Relay => shop.relay(group),
            Role::Workers => shop.workers(group),
            Role::Api => shop.api(group).await?,
            Role::Executor => unreachable!("refused above"),
        }
    }
    group.complete();
    Ok(Started { adapters: shop.adapters().to_vec() })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_database_that_is_away_for_a_moment_does_not_end_a_starting_process() {
        let asked = Cell::new(0);
        let answer = patiently("ask", || async {
            asked.set(asked.get() + 1);
            match asked.get() {
                1..=3 => Err(StoreError::Connect { reason: "away".into() }),
                _ => Ok(7),
            }
        });
        assert_eq!(answer.await.expect("it came back"), 7);
        assert_eq!(asked.get(), 4);
        let broken = patiently("ask", || async { Err::<(), _>(StoreError::Fenced { what: "it".into() }) });
        broken.await.expect_err("what waiting does not mend is an error at once");
    }
}
