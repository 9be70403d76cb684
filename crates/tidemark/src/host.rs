//! The life of a serving process: database, schema, roles, a signal, and everything down again in order.

use std::sync::Arc;

use tidemark_store::{migrate, warm};
use tokio::signal::unix::{SignalKind, signal};

use crate::config::Config;
use crate::dev_chain::DevChain;
use crate::embedded_pg::{EmbeddedPg, Options};
use crate::supervise::{Halt, Limits, Stage, Supervisor};
use crate::wire::{self, Context, Role};
use crate::{exit, telemetry};

/// A process that serves.
pub struct Host {
    /// What roles are made from.
    pub ctx: Context,
    /// The roles.
    pub group: Supervisor,
    embedded: Option<Arc<EmbeddedPg>>,
}

/// May this command start its own Postgres?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Embedded {
    /// When no database is configured.
    Allowed,
    /// Never.
    Refused,
}

impl Host {
    /// Brings up the database and its schema; starts no role yet.
    pub async fn open(config: Config, embedded: Embedded) -> anyhow::Result<Self> {
        check_ports(&config).await?;
        let metrics = telemetry::init_metrics()?;
        let server = match embedded {
            Embedded::Allowed if config.database.app_url.is_none() => {
                let options = Options {
                    data_dir: config.database.data_dir.clone(),
                    port: config.database.embedded_port,
                };
                tracing::info!(action = "start_postgres", data_dir = %options.data_dir.display(), "Starting a private Postgres.");
                Some(Arc::new(EmbeddedPg::start(&options).await?))
            }
            _ => None,
        };
        let ctx = Context::open(config, server.as_deref(), metrics)?;
        migrate_both(&ctx).await?;
        Ok(Self { ctx, group: Supervisor::new(Limits::default()), embedded: server })
    }

    /// Starts the base and `roles`.
    pub async fn start(&self, roles: &[Role]) -> anyhow::Result<wire::Started> {
        wire::start_base(&self.ctx, self.embedded.as_ref(), &self.group);
        wire::start_roles(&self.ctx, roles, &self.group).await
    }

    /// Keeps the simulated chain of `dev` going as a part of this process.
    pub fn start_chain(&self, chain: DevChain) {
        let chain = Arc::new(tokio::sync::Mutex::new(Some(chain)));
        self.group.start("simnet", Stage::Source, move |running| {
            let chain = Arc::clone(&chain);
            async move {
                let chain = chain.lock().await.take();
                let chain = chain
                    .ok_or_else(|| Halt("the simulated chain ended; start again to go on".to_owned()))?;
                running.up();
                chain.run(running.stop.clone()).await
            }
        });
    }

    /// Drains the roles, then stops the private Postgres.
    pub async fn close(self) -> anyhow::Result<()> {
        let drained = self.group.shut_down().await;
        for role in &drained.ended_by_force {
            tracing::warn!(role, action = "ended_by_force", "A role did not drain in time and was ended.");
        }
        let Self { ctx, group, embedded } = self;
        ctx.raw.close();
        ctx.app.close();
        drop((ctx, group));
        if let Some(server) = embedded.and_then(Arc::into_inner) {
            server.stop().await?;
        }
        Ok(())
    }
}

/// A port in use is an answer at once, not a role that restarts for ever.
pub async fn check_ports(config: &Config) -> anyhow::Result<()> {
    drop(telemetry::bind(config.api.listen, "api.listen (or --listen)").await?);
    if let Some(admin) = config.api.admin_listen {
        drop(telemetry::bind(admin, "api.admin_listen").await?);
    }
    if let Some(listen) = config.telemetry.listen {
        drop(telemetry::bind(listen, "telemetry.listen (TIDEMARK__TELEMETRY__LISTEN, or \"off\")").await?);
    }
    Ok(())
}

/// The same migrations on both sides; once where both are one.
pub async fn migrate_both(ctx: &Context) -> anyhow::Result<migrate::Applied> {
    let mut applied = migrate::run(&ctx.app).await?;
    warm::prepare(&ctx.app.conn().await?).await?;
    if ctx.raw.url() != ctx.app.url() {
        let raw = migrate::run(&ctx.raw).await?;
        applied.before += raw.before;
        applied.now.extend(raw.now);
    }
    Ok(applied)
}

/// Returns at the first Ctrl-C or SIGTERM. From then on a second one ends the process at once.
pub async fn asked_to_stop() -> anyhow::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    std::thread::Builder::new().name("second-signal".into()).spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let Ok(runtime) = runtime else { return };
        runtime.block_on(async {
            let Ok(mut interrupt) = signal(SignalKind::interrupt()) else { return };
            interrupt.recv().await;
            std::process::exit(exit::INTERRUPTED.into());
        });
    })?;
    Ok(())
}
