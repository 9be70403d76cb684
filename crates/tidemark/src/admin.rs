//! What operators do over HTTP, on a listener of its own and behind its token.
//!
//! - `POST /admin/events/replay` (S2 §14): begins a replay and answers 202 with its id; a dry run answers 200 with
//!   the number of events
//! - `GET /admin/events/replays/{id}`: how far it is

use std::sync::Arc;

use axum::extract::rejection::JsonRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use tidemark_api::problem::Problem;
use tidemark_bus::replay::{ReplayRequest, Selector};
use tidemark_store::{cursor, dlq};
use time::format_description::well_known::Rfc3339;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use crate::cli::ReplayUnit;
use crate::replays::{self, Replays};

/// Replays that may wait for the one that runs.
const WAITING_MAX: usize = 16;

/// What the routes share.
#[derive(Clone)]
pub struct Admin {
    replays: Replays,
    /// Accepted and not ended.
    places: Arc<Semaphore>,
    /// One at a time: a handler keeps what it prepared.
    turn: Arc<tokio::sync::Mutex<()>>,
    tasks: TaskTracker,
}

impl Admin {
    /// With the handlers of `replays`.
    pub fn new(replays: Replays) -> Self {
        let places = Arc::new(Semaphore::new(WAITING_MAX));
        Self { replays, places, turn: Arc::default(), tasks: TaskTracker::new() }
    }

    /// The routes, for [`tidemark_api::admin_router`].
    pub fn routes(&self) -> Router {
        Router::new()
            .route("/admin/events/replay", post(begin))
            .route("/admin/events/replays/{id}", get(show))
            .with_state(self.clone())
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    /// ledger or projector.
    handler: String,
    /// What `from` and `to` count.
    #[serde(default)]
    unit: Unit,
    from: Bound,
    to: Bound,
    part: Option<u16>,
    /// Id or short name, with heights.
    network: Option<String>,
    /// Why; it is kept.
    reason: String,
    /// Who asks; it is kept.
    #[serde(default = "nobody_in_particular")]
    by: String,
    #[serde(default)]
    dry_run: bool,
    per_second: Option<u32>,
}

fn nobody_in_particular() -> String {
    "admin".to_owned()
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Unit {
    #[default]
    Number,
    Height,
    Time,
}

/// A number, or a text.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Bound {
    Number(i64),
    Text(String),
}

impl Bound {
    fn text(&self) -> String {
        match self {
            Self::Number(number) => number.to_string(),
            Self::Text(text) => text.clone(),
        }
    }
}

const HINT: &str = "Send {\"handler\": \"projector\", \"unit\": \"number|height|time\", \"from\": …, \"to\": …, \
                    \"reason\": \"…\"}; dry_run, part, network, by and per_second are optional.";

fn refuse(why: impl Into<String>) -> Problem {
    Problem::bad("invalid_parameter", why, HINT)
}

async fn begin(
    State(admin): State<Admin>,
    body: Result<Json<Body>, JsonRejection>,
) -> Result<Response, Problem> {
    let Json(body) = body?;
    let request = admin.request(body).await?;
    let replays = &admin.replays;
    let Ok(place) = Arc::clone(&admin.places).try_acquire_owned() else {
        return Err(Problem::new(
            StatusCode::TOO_MANY_REQUESTS,
            "rate_limited",
            format!("{WAITING_MAX} replays wait already"),
            "Wait until one of them has ended.",
        ));
    };
    let id = replays.begin(&request).await.map_err(problem)?;
    if request.dry_run {
        let counted = replays.run(&request, id).await.map_err(problem)?;
        let answer = json!({ "handler": request.handler, "dry_run": true, "events": counted.events });
        return Ok((StatusCode::OK, Json(answer)).into_response());
    }
    let answer = json!({ "id": id, "handler": request.handler, "status": "running" });
    let (admin, begun) = (admin.clone(), id.clone());
    admin.tasks.clone().spawn(async move {
        let _place = place;
        let _turn = admin.turn.lock().await;
        match admin.replays.run(&request, begun).await {
            Ok(done) => {
                tracing::info!(
                    replay = done.id,
                    handler = request.handler,
                    events = done.events,
                    action = "replay",
                    "A replay ended."
                );
            }
            Err(error) => {
                let error = format!("{error:#}");
                tracing::error!(handler = request.handler, error, action = "replay", "A replay failed.");
            }
        }
    });
    let location = [("location", format!("/admin/events/replays/{id}"))];
    Ok((StatusCode::ACCEPTED, location, Json(answer)).into_response())
}

impl Admin {
    async fn request(&self, body: Body) -> Result<ReplayRequest, Problem> {
        if body.reason.trim().is_empty() {
            return Err(refuse("reason is empty: say why, it is kept"));
        }
        if body.part.is_some() && body.unit != Unit::Number {
            return Err(refuse("part goes with unit number"));
        }
        if body.network.is_some() && body.unit != Unit::Height {
            return Err(refuse("network goes with unit height"));
        }
        let unit = match body.unit {
            Unit::Number => ReplayUnit::Number,
            Unit::Height => ReplayUnit::Height,
            Unit::Time => ReplayUnit::Time,
        };
        let (from, to) = (body.from.text(), body.to.text());
        let mut selector =
            replays::selector(unit, body.part, (&from, &to), ("from", "to")).map_err(refuse)?;
        if let (Selector::Heights { network_id, .. }, Some(named)) = (&mut selector, &body.network) {
            let conn = self.replays.db().conn().await.map_err(Problem::from)?;
            let known = cursor::networks(&conn).await.map_err(Problem::from)?;
            let found = known.iter().find(|one| one.slug == *named || one.id.0.to_string() == *named);
            let found = found.ok_or_else(|| {
                Problem::bad(
                    "unknown_network",
                    format!("there is no network {named}"),
                    "See `tidemark status`.",
                )
            })?;
            *network_id = Some(found.id.0.into());
        }
        Ok(ReplayRequest {
            handler: body.handler,
            selector,
            by: body.by,
            reason: Some(body.reason),
            dry_run: body.dry_run,
            per_second: body.per_second,
        })
    }
}

fn problem(error: anyhow::Error) -> Problem {
    if replays::is_refusal(&error) {
        return refuse(format!("{error:#}"));
    }
    tracing::error!(error = format!("{error:#}"), action = "replay", "A replay did not begin.");
    Problem::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        "internal",
        "the replay did not begin",
        "It is in our log. Trying again may help.",
    )
}

async fn show(State(admin): State<Admin>, Path(id): Path<String>) -> Result<Json<Value>, Problem> {
    let conn = admin.replays.db().conn().await?;
    let row = dlq::replay(&conn, &id).await?;
    let row = row.ok_or_else(|| Problem::not_found(format!("there is no replay {id}")))?;
    Ok(Json(json!({
        "id": id,
        "handler": row.handler,
        "by": row.requested_by,
        "reason": row.reason,
        "selector": row.selector,
        "status": row.status,
        "events": row.events,
        "created_at": row.created_at.format(&Rfc3339).unwrap_or_default(),
        "finished_at": row.finished_at.and_then(|at| at.format(&Rfc3339).ok()),
    })))
}
