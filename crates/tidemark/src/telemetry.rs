//! What operators see: log lines with the contract of S0 §15.4, metrics, liveness and readiness.

mod json;
mod scrub;

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::{LogFormat, Telemetry};
use crate::supervise::{Running, Supervisor};

pub use json::JsonLines;
pub use scrub::{Scrubbed, scrub};

/// Seconds, from a fast statement to a slow repair.
const SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

/// Log lines go to stderr from here on; stdout belongs to the commands. `RUST_LOG` wins over the
/// configuration.
pub fn init_logs(config: &Telemetry) -> anyhow::Result<()> {
    let filter = match std::env::var("RUST_LOG") {
        Ok(text) if !text.is_empty() => EnvFilter::try_new(text)?,
        _ => EnvFilter::try_new(&config.log_filter)?,
    };
    let json = match config.log_format {
        LogFormat::Json => true,
        LogFormat::Human => false,
        LogFormat::Auto => !std::io::stderr().is_terminal(),
    };
    let writer = Scrubbed::new(std::io::stderr);
    if json {
        let layer = JsonLines::new("tidemark", writer);
        tracing_subscriber::registry().with(filter).with(layer).try_init()?;
    } else {
        let layer = tracing_subscriber::fmt::layer()
            .with_target(false)
            .compact()
            .with_writer(writer)
            .with_ansi(std::io::stderr().is_terminal());
        tracing_subscriber::registry().with(filter).with(layer).try_init()?;
    }
    log_panics();
    Ok(())
}

/// A panic is a log line like any other failure.
fn log_panics() {
    std::panic::set_hook(Box::new(|info| {
        let place = info.location().map(|at| format!("{}:{}", at.file(), at.line())).unwrap_or_default();
        let message = info
            .payload()
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| info.payload().downcast_ref::<String>().cloned())
            .unwrap_or_default();
        tracing::error!(action = "panic", place, error = message, "A task panicked.");
    }));
}

/// The process's metrics registry.
pub fn init_metrics() -> anyhow::Result<PrometheusHandle> {
    let builder = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), SECONDS)?
        .set_buckets_for_metric(
            Matcher::Suffix("_ms".into()),
            &SECONDS.iter().map(|seconds| seconds * 1000.0).collect::<Vec<_>>(),
        )?;
    Ok(builder.install_recorder()?)
}

/// What the telemetry listener answers from.
#[derive(Clone)]
pub struct Probe {
    /// The registry.
    pub metrics: PrometheusHandle,
    /// The roles.
    pub group: Supervisor,
}

/// `/healthz`, `/readyz`, `/metrics`
pub fn router(probe: Probe) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(Arc::new(probe))
}

async fn metrics(State(probe): State<Arc<Probe>>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    (kind, probe.metrics.render()).into_response()
}

/// 200 when every role is at work, 503 otherwise, always with the reasons.
async fn ready(State(probe): State<Arc<Probe>>) -> Response {
    let roles: Vec<_> = probe
        .group
        .states()
        .iter()
        .map(|role| {
            serde_json::json!({
                "role": role.role,
                "state": role.state.as_str(),
                "restarts": role.restarts,
                "last_error": role.last_error.as_deref().map(scrub),
            })
        })
        .collect();
    let is_ready = probe.group.is_ready();
    let status = if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, axum::Json(serde_json::json!({ "ready": is_ready, "roles": roles }))).into_response()
}

/// Histograms keep raw samples until somebody folds them.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);

/// Serves the telemetry listener until stopped: the future of its role.
pub async fn serve(listen: SocketAddr, probe: Probe, running: Running) -> anyhow::Result<()> {
    let listener = bind(listen, "telemetry.listen").await?;
    running.up();
    let upkeep = async {
        loop {
            tokio::time::sleep(UPKEEP_EVERY).await;
            probe.metrics.run_upkeep();
        }
    };
    let app = router(probe.clone());
    let stop = running.stop.clone();
    let served = axum::serve(listener, app).with_graceful_shutdown(async move { stop.cancelled().await });
    tokio::select! {
        served = served => Ok(served?),
        () = upkeep => Ok(()),
    }
}

/// Binds, or says which setting to change.
pub async fn bind(listen: SocketAddr, key: &str) -> anyhow::Result<tokio::net::TcpListener> {
    tokio::net::TcpListener::bind(listen).await.map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            anyhow::anyhow!("{listen} is in use: stop what listens there, or set {key} to another address")
        }
        _ => anyhow::anyhow!("cannot listen on {listen} ({key}): {error}"),
    })
}
