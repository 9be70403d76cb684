//! Pools, connections, transactions. Every statement has a label, so that an error says what was being
//! done; every error has a verdict, so that callers match on what to do and not on SQLSTATEs.

use std::time::{Duration, Instant};

use bytes::Bytes;
use deadpool_postgres::{Manager, ManagerConfig, Object, Pool, RecyclingMethod};
use futures_util::SinkExt;
use tidemark_model::redact::RedactedUrl;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{NoTls, Row};

use crate::copy::CopyBuffer;

/// A statement parameter.
pub type Param<'a> = &'a (dyn ToSql + Sync);

/// What went wrong in the database, and while doing what.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A statement failed.
    #[error("cannot {label}: {}", describe(source))]
    Statement {
        /// What was being done.
        label: &'static str,
        /// The driver's error.
        #[source]
        source: tokio_postgres::Error,
    },
    /// No connection could be had.
    #[error("cannot connect to the database: {reason}")]
    Connect {
        /// Why, without secrets.
        reason: String,
    },
    /// Somebody else moved the cursor, holds the lease or owns a newer epoch. The transaction must end.
    #[error("{what} was moved by another worker")]
    Fenced {
        /// What was fenced.
        what: String,
    },
    /// The server lacks what our statements need.
    #[error("the server is Postgres {major}: use 15 or newer, or name another server in database.url")]
    ServerTooOld {
        /// Its major version.
        major: i32,
    },
    /// Something else is under way that this would disturb.
    #[error("{what}: {hint}")]
    NotNow {
        /// What is under way.
        what: String,
        /// What to do next.
        hint: &'static str,
    },
    /// A row does not say what it must: a broken promise of our own, or a foreign hand.
    #[error("{what} holds {found}, which cannot be: {hint}")]
    Corrupt {
        /// Which row.
        what: String,
        /// What it holds.
        found: String,
        /// What to do next.
        hint: &'static str,
    },
}

/// What a caller does about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Run the whole transaction again: deadlock, serialization failure, connection lost. Transactions
    /// are repeatable, so an unknown outcome of COMMIT is also this.
    Retry,
    /// Somebody else has taken over: stop this piece of work, read the cursor anew.
    Fenced,
    /// Our own mistake or a broken database: do not repeat, report.
    Fatal,
}

impl StoreError {
    /// What to do about it.
    pub fn verdict(&self) -> Verdict {
        match self {
            Self::Connect { .. } => Verdict::Retry,
            Self::Fenced { .. } => Verdict::Fenced,
            Self::Corrupt { .. } | Self::ServerTooOld { .. } | Self::NotNow { .. } => Verdict::Fatal,
            Self::Statement { source, .. } => match source.code() {
                None => Verdict::Retry, // The connection went away, or never came.
                Some(code) if is_transient(code) => Verdict::Retry,
                Some(_) => Verdict::Fatal,
            },
        }
    }
    /// Did somebody hold a lock for longer than we would wait?
    pub fn is_lock_timeout(&self) -> bool {
        self.code() == Some(&SqlState::LOCK_NOT_AVAILABLE)
    }
    /// The SQLSTATE, if the server gave one.
    pub fn code(&self) -> Option<&SqlState> {
        match self {
            Self::Statement { source, .. } => source.code(),
            _ => None,
        }
    }
}

fn is_transient(code: &SqlState) -> bool {
    [
        SqlState::T_R_DEADLOCK_DETECTED,
        SqlState::T_R_SERIALIZATION_FAILURE,
        SqlState::LOCK_NOT_AVAILABLE,
        SqlState::QUERY_CANCELED,
        SqlState::ADMIN_SHUTDOWN,
        SqlState::CRASH_SHUTDOWN,
        SqlState::CANNOT_CONNECT_NOW,
        SqlState::TOO_MANY_CONNECTIONS,
        SqlState::READ_ONLY_SQL_TRANSACTION,
        SqlState::DISK_FULL,
        SqlState::OUT_OF_MEMORY,
        SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT,
    ]
    .contains(code)
        || code.code().starts_with("08")
}

/// The server's message and detail in one line; driver errors as they are. Never a parameter value.
fn describe(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(db) => format!("{} (SQLSTATE {})", db.message(), db.code().code()),
        None => error.to_string(),
    }
}

/// How a pool connects.
#[derive(Debug, Clone)]
pub struct DbOptions {
    /// Shown in pg_stat_activity.
    pub application_name: String,
    /// Most connections at once.
    pub connections_max: usize,
    /// `set role` after connecting, so that one login can act with less rights.
    pub role: Option<String>,
    /// Longest statement; none for long jobs.
    pub statement_timeout: Option<Duration>,
    /// When statements are planned.
    pub plans: Plans,
}

/// When the statements of a session are planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Plans {
    /// As the server decides: a few times for their parameters, then once for all.
    #[default]
    AsTheServerDecides,
    /// Once per connection, whatever their parameters. For sessions whose every statement was proven to be right so.
    Once,
    /// For each call. For sessions that read tables partitioned by network: a plan that is kept names the partitions
    /// of all networks, and locks them at every call.
    ForEachCall,
}

impl Default for DbOptions {
    fn default() -> Self {
        Self {
            application_name: "tidemark".to_owned(),
            connections_max: 8,
            role: None,
            statement_timeout: Some(Duration::from_secs(60)),
            plans: Plans::default(),
        }
    }
}

/// A pool. Cloning is cheap.
#[derive(Clone)]
pub struct Db {
    pool: Pool,
    url: RedactedUrl,
}

impl std::fmt::Debug for Db {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Db").field("url", &self.url).finish_non_exhaustive()
    }
}

/// How long to wait for a free connection before saying so.
const POOL_WAIT: Duration = Duration::from_secs(30);

impl Db {
    /// A pool for `url` (`postgres://…`; a socket directory goes into `?host=`). Connects lazily, so that
    /// a database that is away for a moment is not a reason to end.
    pub fn open(url: &RedactedUrl, options: &DbOptions) -> Result<Self, StoreError> {
        let mut config: tokio_postgres::Config = url
            .expose()
            .as_str()
            .parse()
            .map_err(|error: tokio_postgres::Error| StoreError::Connect { reason: describe(&error) })?;
        config.application_name(&options.application_name);
        config.connect_timeout(Duration::from_secs(10));
        config.options(session_options(options));
        let manager_config = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let manager = match config.get_ssl_mode() {
            tokio_postgres::config::SslMode::Disable => Manager::from_config(config, NoTls, manager_config),
            _ if is_local(&config) => Manager::from_config(config, NoTls, manager_config),
            _ => Manager::from_config(config, tls(), manager_config),
        };
        let pool = Pool::builder(manager)
            .max_size(options.connections_max.max(1))
            .runtime(deadpool_postgres::Runtime::Tokio1)
            // The connection used last knows its plans and tables, and so does the processor.
            .queue_mode(deadpool_postgres::QueueMode::Lifo)
            .wait_timeout(Some(POOL_WAIT))
            .create_timeout(Some(Duration::from_secs(10)))
            .build()
            .map_err(|error| StoreError::Connect { reason: error.to_string() })?;
        Ok(Self { pool, url: url.clone() })
    }

    /// Where it connects to, without secrets.
    pub fn url(&self) -> &RedactedUrl {
        &self.url
    }

    /// A connection of the pool.
    pub async fn conn(&self) -> Result<Conn, StoreError> {
        match self.pool.get().await {
            Ok(object) => Ok(Conn { object }),
            Err(deadpool_postgres::PoolError::Backend(source)) => {
                Err(StoreError::Statement { label: "connect", source })
            }
            Err(error) => Err(StoreError::Connect { reason: error.to_string() }),
        }
    }

    /// One more connection for who holds one, and does without unless half of the pool is free. Never waits: who holds
    /// one and waits for another stands still when all do.
    pub async fn spare_conn(&self) -> Option<Conn> {
        let pool = self.pool.status();
        let free = pool.max_size.saturating_sub(pool.size) + pool.available;
        if pool.waiting > 0 || free * 2 < pool.max_size {
            return None;
        }
        let now = deadpool_postgres::Timeouts {
            wait: Some(Duration::ZERO),
            create: Some(Duration::from_secs(10)),
            recycle: None,
        };
        self.pool.timeout_get(&now).await.ok().map(|object| Conn { object })
    }

    /// Closes all connections; later calls fail.
    pub fn close(&self) {
        self.pool.close();
    }
}

/// Session settings go into the connection itself, so that no query can run without them.
fn session_options(options: &DbOptions) -> String {
    let timeout_ms = options.statement_timeout.map_or(0, |timeout| timeout.as_millis());
    let mut text = format!(
        "-c statement_timeout={timeout_ms} -c idle_in_transaction_session_timeout=120000 -c timezone=UTC -c jit=off"
    );
    match options.plans {
        Plans::AsTheServerDecides => {}
        Plans::Once => text.push_str(" -c plan_cache_mode=force_generic_plan"),
        Plans::ForEachCall => text.push_str(" -c plan_cache_mode=force_custom_plan"),
    }
    if let Some(role) = &options.role {
        text.push_str(" -c role=");
        text.push_str(role);
    }
    text
}

fn is_local(config: &tokio_postgres::Config) -> bool {
    use tokio_postgres::config::Host;
    config.get_hosts().iter().all(|host| match host {
        Host::Unix(_) => true,
        Host::Tcp(name) => {
            name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
        }
    })
}

fn tls() -> tokio_postgres_rustls::MakeRustlsConnect {
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = rustls::RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(found.certs);
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("ring supports the default protocol versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    tokio_postgres_rustls::MakeRustlsConnect::new(config)
}

/// The counter of time spent per statement, in microseconds; its label `statement` is the statement's name.
pub const STATEMENT_TIME: &str = "db_statement_microseconds_total";

/// Runs one statement, names it in its error and counts its time.
async fn timed<T>(
    label: &'static str,
    run: impl Future<Output = Result<T, tokio_postgres::Error>>,
) -> Result<T, StoreError> {
    let started = Instant::now();
    let result = run.await;
    let micros = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
    metrics::counter!(STATEMENT_TIME, "statement" => label).increment(micros);
    result.map_err(|source| StoreError::Statement { label, source })
}

/// One connection. Reads outside a transaction, and the door to transactions.
pub struct Conn {
    object: Object,
}

impl Conn {
    /// Takes the connection out of its pool for good.
    pub fn detach(self) -> Session {
        Session { client: Object::take(self.object) }
    }
    /// Begins a transaction (read committed). Dropping it without commit rolls back.
    pub async fn tx(&mut self) -> Result<Tx<'_>, StoreError> {
        let inner = self
            .object
            .transaction()
            .await
            .map_err(|source| StoreError::Statement { label: "begin", source })?;
        Ok(Tx { inner })
    }
    /// Begins a repeatable-read transaction: one snapshot for several statements.
    pub async fn snapshot_tx(&mut self) -> Result<Tx<'_>, StoreError> {
        let inner = self
            .object
            .build_transaction()
            .isolation_level(tokio_postgres::IsolationLevel::RepeatableRead)
            .start()
            .await
            .map_err(|source| StoreError::Statement { label: "begin", source })?;
        Ok(Tx { inner })
    }
    /// All rows.
    pub async fn query(
        &self,
        label: &'static str,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>, StoreError> {
        timed(label, async {
            let statement = self.object.prepare_cached(sql).await?;
            self.object.query(&statement, params).await
        })
        .await
    }
    /// At most one row.
    pub async fn query_opt(
        &self,
        label: &'static str,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Option<Row>, StoreError> {
        timed(label, async {
            let statement = self.object.prepare_cached(sql).await?;
            self.object.query_opt(&statement, params).await
        })
        .await
    }
    /// Exactly one row.
    pub async fn query_one(
        &self,
        label: &'static str,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Row, StoreError> {
        timed(label, async {
            let statement = self.object.prepare_cached(sql).await?;
            self.object.query_one(&statement, params).await
        })
        .await
    }
    /// How many rows were touched.
    pub async fn execute(
        &self,
        label: &'static str,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<u64, StoreError> {
        timed(label, async {
            let statement = self.object.prepare_cached(sql).await?;
            self.object.execute(&statement, params).await
        })
        .await
    }
    /// Several statements without parameters, as one script. Outside a transaction unless it begins one.
    pub async fn batch(&self, label: &'static str, sql: &str) -> Result<(), StoreError> {
        timed(label, self.object.batch_execute(sql)).await
    }
}

/// A connection of its own. It closes when dropped, and what belongs to its session goes with it.
pub struct Session {
    client: deadpool_postgres::ClientWrapper,
}

impl Session {
    /// Exactly one row.
    pub async fn query_one(
        &self,
        label: &'static str,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Row, StoreError> {
        self.client.query_one(sql, params).await.map_err(|source| StoreError::Statement { label, source })
    }
}

/// One transaction. Progress and effect commit together, here.
pub struct Tx<'a> {
    inner: deadpool_postgres::Transaction<'a>,
}

/// The planner's default costs are a spinning disk's: until a table has several hundred thousand rows it
/// would rather read all of it than look a thousand keys up. A plan made once, without a look at how many
/// keys there are, looks each of them up, and is not made anew for every batch.
const BY_KEY: &str = "set local enable_seqscan = off; set local enable_bitmapscan = off; \
                      set local random_page_cost = 1.1; set local plan_cache_mode = force_generic_plan";
const ONE_BY_ONE: &str = "set local enable_hashjoin = off; set local enable_mergejoin = off";
const AS_USUAL: &str = "set local enable_seqscan to default; set local enable_bitmapscan to default; \
                        set local random_page_cost to default; set local plan_cache_mode to default; \
                        set local enable_hashjoin to default; set local enable_mergejoin to default";

impl Tx<'_> {
    /// Makes the statements that follow look rows up by key, however small their tables are. Such a
    /// statement must not join two sets of its own: nothing tells the planner that they are large.
    pub async fn look_up_by_key(&self) -> Result<(), StoreError> {
        self.batch("prefer keys", BY_KEY).await
    }
    /// The same for statements that join one large set to one table: each of its rows is a look-up, also where
    /// reading the whole table once looks cheaper. What it costs then does not grow with the table.
    pub async fn look_up_one_by_one(&self) -> Result<(), StoreError> {
        self.look_up_by_key().await?;
        self.batch("prefer keys one by one", ONE_BY_ONE).await
    }
    /// After [`Self::look_up_by_key`]: what follows reads a table partitioned by network, and is planned for the one
    /// network its parameters name. A plan made once would lock the partitions of all. [`Self::plan_once`] ends it.
    pub async fn plan_for_each_call(&self) -> Result<(), StoreError> {
        self.batch("plan for each call", "set local plan_cache_mode = force_custom_plan").await
    }
    /// Ends [`Self::plan_for_each_call`].
    pub async fn plan_once(&self) -> Result<(), StoreError> {
        self.batch("plan once", "set local plan_cache_mode = force_generic_plan").await
    }
    /// Ends [`Self::look_up_by_key`] or [`Self::look_up_one_by_one`] for what else happens in the transaction.
    pub async fn look_up_as_usual(&self) -> Result<(), StoreError> {
        self.batch("stop preferring keys", AS_USUAL).await
    }
    /// All rows.
    pub async fn query(
        &self,
        label: &'static str,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>, StoreError> {
        timed(label, async {
            let statement = self.inner.prepare_cached(sql).await?;
            self.inner.query(&statement, params).await
        })
        .await
    }
    /// At most one row.
    pub async fn query_opt(
        &self,
        label: &'static str,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Option<Row>, StoreError> {
        timed(label, async {
            let statement = self.inner.prepare_cached(sql).await?;
            self.inner.query_opt(&statement, params).await
        })
        .await
    }
    /// Exactly one row.
    pub async fn query_one(
        &self,
        label: &'static str,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Row, StoreError> {
        timed(label, async {
            let statement = self.inner.prepare_cached(sql).await?;
            self.inner.query_one(&statement, params).await
        })
        .await
    }
    /// How many rows were touched.
    pub async fn execute(
        &self,
        label: &'static str,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<u64, StoreError> {
        timed(label, async {
            let statement = self.inner.prepare_cached(sql).await?;
            self.inner.execute(&statement, params).await
        })
        .await
    }
    /// Several statements without parameters, as one script.
    pub async fn batch(&self, label: &'static str, sql: &str) -> Result<(), StoreError> {
        timed(label, self.inner.batch_execute(sql)).await
    }
    /// `copy … from stdin (format binary)`; gives the number of rows. An empty buffer is no round trip.
    pub async fn copy_in(&self, label: &'static str, sql: &str, rows: CopyBuffer) -> Result<u64, StoreError> {
        if rows.rows() == 0 {
            return Ok(0);
        }
        timed(label, async {
            let sink = self.inner.copy_in::<_, Bytes>(sql).await?;
            let mut sink = std::pin::pin!(sink);
            for chunk in rows.into_chunks() {
                sink.send(chunk).await?;
            }
            sink.finish().await
        })
        .await
    }
    /// Makes it so. An error here may mean that it is so: transactions are repeatable for this reason.
    pub async fn commit(self) -> Result<(), StoreError> {
        timed("commit", self.inner.commit()).await
    }
    /// Undoes it at once instead of at drop.
    pub async fn rollback(self) -> Result<(), StoreError> {
        self.inner.rollback().await.map_err(|source| StoreError::Statement { label: "roll back", source })
    }
}
