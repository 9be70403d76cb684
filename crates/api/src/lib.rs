//! REST /v1, live stream and explorer pages over projection.*.
//!
//! - [`ApiState`]: pools, limits, the one reader of the live stream
//! - [`router`]: everything public: `/v1`, `/openapi.json`, `/docs`, the explorer
//! - [`admin_router`]: routes for the operator ([`admin_routes`]), behind a token, for a listener of their own
//!
//! The API reads projection.* and the bounded functions of migration 0007, and writes nothing.

pub mod answer;
mod cursor;
pub mod dto;
mod guard;
mod openapi;
mod pages;
pub mod params;
pub mod problem;
mod reader;
mod routes;
mod state;
mod stream;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::IntoResponse;
use axum::routing::get;
use tower_http::CompressionLevel;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::cors::{AllowOrigin, CorsLayer};

use tidemark_store::reads;

use crate::problem::Problem;
pub use crate::reader::Sort;
pub use crate::state::{ApiConfig, ApiState, Woken, db_options};

/// Largest body: a hundred natural keys fit.
const BODY_BYTES_MAX: usize = 64 * 1024;

/// The public routes. Serve it with `into_make_service_with_connect_info::<SocketAddr>()`, or every client
/// shares one rate limit.
pub fn router(state: ApiState) -> Router {
    let (v1, doc) = routes::documented(openapi::base(&state)).split_for_parts();
    let doc = openapi::finish(doc);
    let known: guard::KnownParameters = Arc::new(openapi::known_parameters(&doc));
    let v1 = v1.layer(from_fn_with_state(known, guard::strict_parameters));
    let document = Arc::new(doc);
    let json = Arc::clone(&document);
    let mut router = v1
        .route("/openapi.json", get(move || async move { axum::Json(json.as_ref().clone()) }))
        .route("/healthz", get(|| async { "ok\n" }));
    if state.config().explorer {
        router = router.merge(pages::routes(&state, document));
    }
    let router = router
        .fallback(pages::not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(CatchPanicLayer::custom(guard::panicked))
        .layer(from_fn_with_state(state.clone(), guard::time_limit))
        .layer(from_fn_with_state(state.clone(), guard::rate_limit))
        // The best ratio took half of the time of a long answer.
        .layer(CompressionLayer::new().quality(CompressionLevel::Fastest))
        .layer(cors(&state.config().cors_origins))
        .layer(from_fn(guard::security_headers))
        .layer(from_fn(guard::measure));
    router.with_state(state)
}

/// What the operator's listener answers with: the facts of the operator page as JSON, of both databases. It reads;
/// what changes something is a command.
pub fn admin_routes(state: ApiState) -> Router {
    Router::new().route("/v1/admin/facts", get(admin_facts)).with_state(state)
}

async fn admin_facts(State(state): State<ApiState>) -> Result<axum::Json<serde_json::Value>, Problem> {
    let app = reads::operator_facts(&state.app().conn().await?).await?;
    let raw = match reads::is_same_database(state.app(), state.raw()) {
        true => serde_json::Value::Null,
        false => reads::operator_facts(&state.raw().conn().await?).await?,
    };
    Ok(axum::Json(serde_json::json!({ "app": app, "raw": raw })))
}

/// Routes for the operator: `extra` behind `Authorization: Bearer {token}`. An empty token lets nobody in.
/// Never merge it into the public router: it belongs on a listener of its own.
pub fn admin_router(token: &str, extra: Router) -> Router {
    extra
        .fallback(|| async { unknown_route() })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(CatchPanicLayer::custom(guard::panicked))
        .layer(from_fn_with_state(Arc::<str>::from(token), guard::require_token))
        .layer(from_fn(guard::security_headers))
        .layer(from_fn(guard::measure))
}

/// The OpenAPI document, without a database: for docs and lints.
pub fn openapi_document(version: &str) -> serde_json::Value {
    let (_, doc) = routes::documented(openapi::described(version)).split_for_parts();
    openapi::finish(doc)
}

/// Pages of these origins may read, nobody may send credentials.
fn cors(origins: &[String]) -> CorsLayer {
    let allowed = match origins.iter().any(|origin| origin == "*") {
        true => AllowOrigin::any(),
        false => AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok())),
    };
    CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::HEAD, Method::POST])
        .allow_headers([header::ACCEPT, header::CONTENT_TYPE, HeaderName::from_static("last-event-id")])
        .expose_headers(EXPOSED.map(HeaderName::from_static))
        .max_age(Duration::from_secs(3600))
}

/// Answer headers that a page of another origin may read.
const EXPOSED: [&str; 4] = ["ratelimit", "ratelimit-policy", "retry-after", "x-data-status"];

fn unknown_route() -> Problem {
    Problem::new(
        StatusCode::NOT_FOUND,
        "unknown_route",
        "there is no such route",
        "See /docs for all routes.",
    )
}

async fn method_not_allowed() -> impl IntoResponse {
    Problem::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "method_not_allowed",
        "this route does not take this method",
        "See /docs for what it takes.",
    )
}
