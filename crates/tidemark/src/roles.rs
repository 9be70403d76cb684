//! What each role is made of.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tidemark_api::{ApiConfig, ApiState, Woken};
use tidemark_bus::Bus;
use tidemark_bus::dispatch::{Dispatcher, DispatcherOptions, Handler};
use tidemark_bus::dlq::Desk;
use tidemark_bus::nats::{NatsBus, NatsOptions};
use tidemark_bus::news::News;
use tidemark_bus::postgres::PostgresBus;
use tidemark_bus::redis::RedisBus;
use tidemark_bus::relay::{Relay, RelayHandle, RelayOptions};
use tidemark_bus::retention::{self, RetentionOptions};
use tidemark_bus::tail::Tails;
use tidemark_model::chain::{ChainAdapter, Network};
use tidemark_pipeline::handlers::{LedgerHandler, ProjectorHandler};
use tidemark_pipeline::history::{HistoryOptions, HistoryWorker, SEGMENTS_MAX, Warmth};
use tidemark_pipeline::ingest::Ingester;
use tidemark_pipeline::projectors::forget_outdated_rebuilds;
use tidemark_pipeline::status::StatusProjector;
use tidemark_pipeline::workers::keep_verifying;
use tidemark_store::presence::Presence;
use tidemark_store::{Db, applied};
use tokio::sync::Semaphore;
use tracing::Instrument;

use crate::admin::Admin;
use crate::config::{BusEngine, Secret};
use crate::parts::{Parts, TipOutbox};
use crate::replays::Replays;
use crate::supervise::{Running, Stage, Supervisor};
use crate::wire::{Context, DbRole};

/// One database's log: its relay and its bus.
#[derive(Clone)]
struct Side {
    db: Db,
    presence: Arc<Presence>,
    relay: Arc<Relay>,
    bus: Arc<dyn Bus>,
    tails: Arc<Tails>,
}

/// Everything roles are started from.
pub struct Shop {
    ctx: Context,
    parts: Parts,
    raw: Side,
    app: Side,
    one_database: bool,
    /// Room for segments of history, of all networks together.
    segments: Arc<Semaphore>,
    /// What keeps pages in memory, for all networks together.
    warmth: Arc<Warmth>,
    /// Told after every batch of the projector.
    projected: News,
}

impl Shop {
    /// Builds parts and buses; connects lazily.
    pub async fn open(ctx: &Context) -> anyhow::Result<Self> {
        let parts = Parts::new(&ctx.config, &ctx.instance)?;
        let one_database = ctx.raw.url() == ctx.app.url();
        let app = side(ctx, &ctx.app).await?;
        let raw = if one_database { app.clone() } else { side(ctx, &ctx.raw).await? };
        let segments = Arc::new(Semaphore::new(SEGMENTS_MAX));
        Ok(Self {
            ctx: ctx.clone(),
            parts,
            raw,
            app,
            one_database,
            segments,
            warmth: Arc::default(),
            projected: News::default(),
        })
    }

    /// The adapters of all networks.
    pub fn adapters(&self) -> &[Arc<dyn ChainAdapter>] {
        &self.parts.adapters
    }

    /// The wake-up of the raw side's relay.
    fn wake_raw(&self) -> RelayHandle {
        self.raw.relay.handle()
    }

    /// Reads chains.
    pub fn ingest(&self, group: &Supervisor) {
        for (adapter, shards) in self.parts.adapters.iter().zip(&self.parts.shards) {
            let ingester = Ingester::sharded(
                shards.clone(),
                self.ctx.raw.clone(),
                Arc::clone(&self.parts.blobs),
                Arc::new(TipOutbox::new(Arc::clone(&self.parts.emitter), Some(self.wake_raw()))),
                Parts::ingest_options(&self.ctx.config, &self.ctx.instance),
            );
            let name = format!("ingest:{}", adapter.network().slug);
            let network_id = adapter.network().id.0;
            group.start(name, Stage::Source, move |running| {
                let ingester = ingester.clone();
                async move {
                    running.up();
                    let span = tracing::info_span!("network", network_id);
                    Ok(ingester.run(running.stop.clone()).instrument(span).await?)
                }
            });
        }
    }

    /// Numbers and carries events.
    pub fn relay(&self, group: &Supervisor) {
        let mut sides = vec![("relay", self.app.relay.clone())];
        if !self.one_database {
            sides.push(("relay:raw", self.raw.relay.clone()));
        }
        for (name, relay) in sides {
            group.start(name, Stage::Relay, move |running| {
                let relay = Arc::clone(&relay);
                async move {
                    running.up();
                    Ok(relay.run(running.stop.clone()).await?)
                }
            });
        }
    }

    /// Ledger and read models.
    pub fn workers(&self, group: &Supervisor) {
        for adapter in &self.parts.adapters {
            let worker = Arc::new(self.history_worker(Arc::clone(adapter)));
            let name = format!("history:{}", adapter.network().slug);
            let network_id = adapter.network().id.0;
            group.start(name, Stage::Worker, move |running| {
                let worker = Arc::clone(&worker);
                async move {
                    running.up();
                    let span = tracing::info_span!("network", network_id);
                    Ok(worker.run(running.stop.clone()).instrument(span).await?)
                }
            });
        }
        self.dispatch(group, "ledger", &self.raw);
        self.dispatch(group, "projector", &self.app);
        let status =
            Arc::new(StatusProjector::new(self.networks(), self.ctx.raw.clone(), self.ctx.app.clone()));
        group.start("status", Stage::Worker, move |running| {
            let status = Arc::clone(&status);
            async move {
                running.up();
                Ok(status.run(running.stop.clone()).await?)
            }
        });
        let mut sides = vec![self.app.clone()];
        if !self.one_database {
            sides.push(self.raw.clone());
        }
        let app = self.ctx.app.clone();
        let days = self.ctx.config.bus.hot_days;
        let of = |days: u64| Duration::from_secs(days.saturating_mul(86_400));
        let hot = RetentionOptions {
            operational: of(days.operational),
            regulated: of(days.regulated),
            audit: of(days.audit),
        };
        group.start("maintenance", Stage::Worker, move |running| {
            maintain(app.clone(), sides.clone(), hot.clone(), running)
        });
        let (app, networks) = (self.ctx.app.clone(), self.networks());
        group.start("verifier", Stage::Worker, move |running| {
            let (app, networks) = (app.clone(), networks.clone());
            async move {
                running.up();
                Ok(keep_verifying(app, networks, running.stop.clone()).await?)
            }
        });
    }

    fn networks(&self) -> Vec<Network> {
        self.parts.adapters.iter().map(|adapter| adapter.network().clone()).collect()
    }

    /// The bulk worker of one network.
    pub fn history_worker(&self, adapter: Arc<dyn ChainAdapter>) -> HistoryWorker {
        HistoryWorker::new(
            adapter,
            self.ctx.raw.clone(),
            self.ctx.app.clone(),
            self.parts.reader.clone(),
            Arc::clone(&self.parts.partitions),
            Arc::clone(&self.parts.emitter),
            HistoryOptions {
                idle_wait: idle_wait(self.parts.adapters.len()),
                segments: Arc::clone(&self.segments),
                warmth: Arc::clone(&self.warmth),
                ..HistoryOptions::default()
            },
        )
    }

    fn dispatch(&self, group: &Supervisor, kind: &'static str, from: &Side) {
        let (ctx, parts, bus) = (self.ctx.clone(), self.parts.clone(), Arc::clone(&from.bus));
        let (wake, presence) = (self.app.relay.handle(), Arc::clone(&self.app.presence));
        let news = if kind == "projector" { self.projected.clone() } else { News::default() };
        group.start(kind, Stage::Worker, move |running| {
            let options = DispatcherOptions {
                owner: format!("{}:{kind}", ctx.instance),
                batch_max: batch_max(kind),
                partitions: parts.streams.clone(),
                relay: Some(wake.clone()),
                news: news.clone(),
                presence: Some(Arc::clone(&presence)),
                ..DispatcherOptions::default()
            };
            let dispatcher =
                Dispatcher::new(ctx.app.clone(), Arc::clone(&bus), Arc::clone(&parts.registry), options);
            let dispatcher = dispatcher.with(handler(kind, &ctx, &parts));
            async move {
                running.up();
                Ok(dispatcher.run(running.stop.clone()).await?)
            }
        });
    }

    /// The handlers of this build, as operators use them: one by one, beside the dispatchers.
    pub fn desk(&self) -> Desk {
        let handlers = HANDLERS.iter().map(|kind| handler(kind, &self.ctx, &self.parts));
        Desk {
            db: self.ctx.app.clone(),
            registry: Arc::clone(&self.parts.registry),
            handlers: handlers.collect(),
        }
    }

    /// Are raw.* and the rest in one database?
    pub fn one_database(&self) -> bool {
        self.one_database
    }

    /// REST, live stream and explorer.
    pub async fn api(&self, group: &Supervisor) -> anyhow::Result<()> {
        let config = &self.ctx.config.api;
        // The API acts with the rights of its database role: it reads projection.* and nothing of the ledger.
        let most = self.ctx.config.database.connections_max;
        let app = self.ctx.acting_as(&self.ctx.app, DbRole::Api, most).await?;
        let raw = match self.one_database {
            true => app.clone(),
            false => self.ctx.acting_as(&self.ctx.raw, DbRole::Api, most).await?,
        };
        let api = ApiConfig {
            requests_per_minute: config.rate_limit_rps.saturating_mul(60),
            burst: config.rate_limit_burst,
            cors_origins: config.cors_origins.clone(),
            operator_page: config.operator_page,
            ..ApiConfig::default()
        };
        let woken = Woken { projected: self.projected.clone(), numbered: self.app.tails.news() };
        let state = ApiState::new(app, raw, api, woken);
        let listen = config.listen;
        let operators = tidemark_api::admin_routes(state.clone());
        group.start("api", Stage::Serve, move |running| serve(listen, state.clone(), running));
        if let Some(listen) = config.admin_listen {
            let token = config.admin_token.as_ref().map(Secret::expose).unwrap_or_default().to_owned();
            if token.is_empty() {
                tracing::warn!(
                    action = "admin_token_missing",
                    "api.admin_listen has no api.admin_token: it lets nobody in."
                );
            }
            let admin = Admin::new(Replays::new(self, self.ctx.app.clone()));
            let router = tidemark_api::admin_router(&token, operators.merge(admin.routes()));
            group.start("admin", Stage::Serve, move |running| serve_admin(listen, router.clone(), running));
        }
        Ok(())
    }
}

/// Every handler there is.
const HANDLERS: &[&str] = &["ledger", "projector"];

/// The pause of a history worker that has nothing to do: all of them together look about fifty times a
/// second, so that a thousand quiet networks stay quiet.
fn idle_wait(networks: usize) -> Duration {
    let wait = Duration::from_millis(20).saturating_mul(u32::try_from(networks).unwrap_or(u32::MAX));
    wait.clamp(Duration::from_millis(200), Duration::from_secs(10))
}

/// Most events of one transaction. An event of the ledger's is a whole block; of the projector's, up to 150 transfers
/// or 500 assets of one, and a large block should not take several transactions to appear.
fn batch_max(kind: &str) -> usize {
    match kind {
        "ledger" => 8,
        _ => 40,
    }
}

fn handler(kind: &str, ctx: &Context, parts: &Parts) -> Arc<dyn Handler> {
    match kind {
        "ledger" => Arc::new(LedgerHandler::new(
            parts.adapters.iter().cloned(),
            ctx.raw.clone(),
            ctx.app.clone(),
            parts.reader.clone(),
            Arc::clone(&parts.emitter),
        )),
        _ => Arc::new(ProjectorHandler::new(
            ctx.app.clone(),
            Arc::clone(&parts.partitions),
            Arc::clone(&parts.emitter),
        )),
    }
}

async fn side(ctx: &Context, db: &Db) -> anyhow::Result<Side> {
    let tails = Arc::new(Tails::new(db.clone()));
    let config = &ctx.config.bus;
    let bus: Arc<dyn Bus> = match config.engine {
        BusEngine::Postgres => Arc::new(PostgresBus::new(db.clone(), Arc::clone(&tails))),
        BusEngine::Nats => {
            let url = config.nats_url.as_ref().context("bus.engine = \"nats\" needs bus.nats_url")?;
            let options = NatsOptions {
                replicas: usize::from(config.replicas),
                max_age: Duration::from_secs(config.retention_hours.saturating_mul(3600)),
                ..NatsOptions::default()
            };
            Arc::new(NatsBus::connect(url, options, db.clone(), Arc::clone(&tails)).await?)
        }
        BusEngine::Redis => {
            let url = config.redis_url.as_ref().context("bus.engine = \"redis\" needs bus.redis_url")?;
            Arc::new(RedisBus::connect(url, "tidemark", db.clone(), Arc::clone(&tails)).await?)
        }
    };
    let presence = Arc::new(Presence::new(db.clone(), &ctx.instance));
    let options = RelayOptions {
        owner: format!("{}:relay", ctx.instance),
        presence: Some(Arc::clone(&presence)),
        ..RelayOptions::default()
    };
    let relay = Arc::new(Relay::new(db.clone(), Arc::clone(&bus), Arc::clone(&tails), options));
    Ok(Side { db: db.clone(), presence, relay, bus, tails })
}

async fn serve(listen: SocketAddr, state: ApiState, running: Running) -> anyhow::Result<()> {
    let listener = crate::telemetry::bind(listen, "api.listen (or --listen)").await?;
    let router = tidemark_api::router(state.clone()).into_make_service_with_connect_info::<SocketAddr>();
    running.up();
    let stop = running.stop.clone();
    let server = axum::serve(listener, router).with_graceful_shutdown(async move { stop.cancelled().await });
    let ((), served) = tokio::join!(state.run(running.stop.clone()), server);
    Ok(served?)
}

/// The operator's listener; it ends when asked to, whoever is connected.
async fn serve_admin(listen: SocketAddr, router: axum::Router, running: Running) -> anyhow::Result<()> {
    let listener = crate::telemetry::bind(listen, "api.admin_listen").await?;
    running.up();
    let stop = running.stop.clone();
    let server = axum::serve(listener, router).with_graceful_shutdown(async move { stop.cancelled().await });
    Ok(server.await?)
}

/// Claims moved in one transaction.
const CLAIMS_PER_MOVE: i64 = 10_000;
/// How long activity is kept for sparklines.
const ACTIVITY_KEPT: Duration = Duration::from_secs(24 * 3600);
const MAINTENANCE_EVERY: Duration = Duration::from_secs(600);

/// Housekeeping that nobody waits for.
async fn maintain(app: Db, sides: Vec<Side>, hot: RetentionOptions, running: Running) -> anyhow::Result<()> {
    running.up();
    loop {
        let mut conn = app.conn().await?;
        let tx = conn.tx().await?;
        tidemark_store::projection::forget_activity(&tx, ACTIVITY_KEPT).await?;
        tx.commit().await?;
        while !running.stop.is_cancelled() {
            let tx = conn.tx().await?;
            let moved = applied::archive(&tx, applied::ARCHIVE_AFTER_DAYS, CLAIMS_PER_MOVE).await?;
            tx.commit().await?;
            if moved == 0 {
                break;
            }
            tracing::info!(rows = moved, action = "archive_claims", "Moved old claims to the cold table.");
        }
        drop(conn);
        match forget_outdated_rebuilds(&app).await {
            Ok(names) => {
                for name in names {
                    tracing::info!(projection = %name, action = "rebuild_forgotten", "Dropped what a rebuild kept for undo.");
                }
            }
            // A reader held the table for longer than this waits: next time.
            Err(error) => {
                tracing::warn!(error = %error, action = "rebuild_forget", "A rebuild could not be forgotten yet.")
            }
        }
        for side in &sides {
            let report = retention::run(&side.db, side.bus.as_ref(), &hot).await?;
            for (day, reason) in &report.kept {
                tracing::info!(%day, reason, action = "retention_kept", "A day of events is still needed.");
            }
        }
        tokio::select! {
            biased;
            () = running.stop.cancelled() => return Ok(()),
            () = tokio::time::sleep(MAINTENANCE_EVERY) => {}
        }
    }
}
