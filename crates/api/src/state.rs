//! What all requests share, and the background work of the API.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tidemark_bus::news::News;
use tidemark_store::reads::NetworkRow;
use tidemark_store::{Db, DbOptions, Plans, StoreError, reads};
use tokio_util::sync::CancellationToken;

use crate::guard::RateLimit;
use crate::stream::Hub;

/// How the API behaves. Every field has a default.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ApiConfig {
    /// Requests per minute one client may send. 0 switches the limit off.
    pub requests_per_minute: u32,
    /// Requests one client may send at once; 0: as many as in a minute.
    pub burst: u32,
    /// Origins whose pages may call the API from a browser; `*` for all, none: no page of another origin.
    pub cors_origins: Vec<String>,
    /// Read the client's address from the last entry of X-Forwarded-For. Only behind a proxy of your own.
    pub trust_forwarded_for: bool,
    /// Live connections at once.
    pub stream_clients_max: usize,
    /// Pause between two looks at the live stream, in milliseconds.
    pub stream_poll_ms: u64,
    /// Longest answer, in seconds; then 504. Covers the five seconds of min_height.
    pub request_timeout_seconds: u64,
    /// Serve the explorer pages.
    pub explorer: bool,
    /// Serve the operator page (read-only).
    pub operator_page: bool,
    /// Shown in the docs and on the pages.
    pub version: String,
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self {
            requests_per_minute: 1200,
            burst: 0,
            cors_origins: Vec::new(),
            trust_forwarded_for: false,
            stream_clients_max: 512,
            stream_poll_ms: 100,
            request_timeout_seconds: 15,
            explorer: true,
            operator_page: true,
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// How the API connects: with its own role, which reads projection.* and nothing else, and a statement timeout
/// that bounds every read.
pub fn db_options(connections_max: usize) -> DbOptions {
    DbOptions {
        application_name: "tidemark-api".to_owned(),
        connections_max,
        role: Some("tidemark_api".to_owned()),
        statement_timeout: Some(Duration::from_secs(5)),
        plans: Plans::Once,
    }
}

/// What workers of this process tell the API, so that it looks at once. Those of other processes tell nothing: it also
/// looks by itself.
#[derive(Debug, Clone, Default)]
pub struct Woken {
    /// The projector committed a batch.
    pub projected: News,
    /// Messages were numbered.
    pub numbered: News,
}

/// What all requests share. Cloning is cheap.
#[derive(Clone)]
pub struct ApiState {
    inner: Arc<Inner>,
}

struct Inner {
    app: Db,
    raw: Db,
    config: ApiConfig,
    woken: Woken,
    limit: RateLimit,
    hub: Hub,
    /// The networks as they were last read, and when that read began.
    networks: tokio::sync::Mutex<Option<(Instant, Arc<Vec<NetworkRow>>)>>,
    closing: CancellationToken,
}

/// Database statistics move slowly.
const GAUGES_EVERY: Duration = Duration::from_secs(60);
/// Forgotten clients leave the rate limiter's memory this often.
const LIMITER_SWEEP: Duration = Duration::from_secs(30);

impl ApiState {
    /// `app` reads projection.* (role `tidemark_api`), `raw` the raw database through the same functions; they
    /// may be one database. Give `app` a statement timeout: it is the bound of every read.
    pub fn new(app: Db, raw: Db, config: ApiConfig, woken: Woken) -> Self {
        let limit = RateLimit::new(&config);
        let hub = Hub::new(config.stream_clients_max);
        let (networks, closing) = (tokio::sync::Mutex::default(), CancellationToken::new());
        Self { inner: Arc::new(Inner { app, raw, config, woken, limit, hub, networks, closing }) }
    }

    /// The networks, read after this was called. Requests that wait at the same time share one read, so that many
    /// of them cost no more than one after another; none gets what was read before it came.
    pub(crate) async fn networks(&self) -> Result<Arc<Vec<NetworkRow>>, StoreError> {
        let asked = Instant::now();
        let mut last = self.inner.networks.lock().await;
        if let Some((began, rows)) = &*last
            && *began >= asked
        {
            return Ok(Arc::clone(rows));
        }
        let conn = self.inner.app.conn().await?;
        let began = Instant::now();
        let rows = Arc::new(reads::networks(&conn).await?);
        *last = Some((began, Arc::clone(&rows)));
        Ok(rows)
    }

    pub(crate) fn app(&self) -> &Db {
        &self.inner.app
    }
    pub(crate) fn raw(&self) -> &Db {
        &self.inner.raw
    }
    pub(crate) fn config(&self) -> &ApiConfig {
        &self.inner.config
    }
    pub(crate) fn woken(&self) -> &Woken {
        &self.inner.woken
    }
    pub(crate) fn limit(&self) -> &RateLimit {
        &self.inner.limit
    }
    pub(crate) fn hub(&self) -> &Hub {
        &self.inner.hub
    }
    pub(crate) fn closing(&self) -> &CancellationToken {
        &self.inner.closing
    }

    /// The background work: reads the live stream once for all clients and forgets idle clients of the rate
    /// limiter. Ends when `token` is cancelled, and ends every live connection with it.
    pub async fn run(&self, token: CancellationToken) {
        let poll = Duration::from_millis(self.inner.config.stream_poll_ms.max(10));
        let mut sweep = tokio::time::interval(LIMITER_SWEEP);
        let mut gauges = tokio::time::interval(GAUGES_EVERY);
        loop {
            tokio::select! {
                biased;
                () = token.cancelled() => break,
                _ = sweep.tick() => self.inner.limit.sweep(),
                _ = gauges.tick() => self.measure().await,
                () = self.inner.woken.numbered.heard() => self.inner.hub.poll(&self.inner.app).await,
                () = tokio::time::sleep(poll) => self.inner.hub.poll(&self.inner.app).await,
            }
        }
        self.inner.hub.stop();
        self.inner.closing.cancel();
    }

    /// S0 §15.3: the gauges that come from the database.
    async fn measure(&self) {
        let read = async {
            let conn = self.inner.app.conn().await?;
            Ok::<_, StoreError>((reads::cache_hits(&conn).await?, reads::finality_shares(&conn).await?))
        };
        match read.await {
            Ok((hits, shares)) => {
                for (table, ratio) in hits {
                    let gauge = metrics::gauge!("projection_cache_hit_ratio", "projection_table" => table);
                    gauge.set(ratio.unwrap_or(1.0));
                }
                for (status, share) in shares {
                    let gauge =
                        metrics::gauge!("ownership_view_finality_breakdown", "finality_status" => status);
                    gauge.set(f64::from(share) * 100.0);
                }
            }
            Err(error) => {
                tracing::warn!(action = "measure", error = %error, "Database statistics could not be read.");
            }
        }
    }
}
