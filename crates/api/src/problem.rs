//! Errors as RFC 9457 problem documents: a stable `code` for programs, a `hint` for people.

use axum::Json;
use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tidemark_store::{StoreError, Verdict};
use utoipa::ToSchema;

/// An error. It answers as a [`ProblemDocument`].
#[derive(Debug, Clone)]
pub struct Problem {
    /// What kind of problem this is.
    pub title: &'static str,
    /// The HTTP status.
    pub status: StatusCode,
    /// What happened here.
    pub detail: String,
    /// Stable, for programs.
    pub code: &'static str,
    /// What to try next.
    pub hint: String,
    /// True: the thing may still be ahead of our watermark.
    pub(crate) pending: bool,
    /// Seconds, for `Retry-After`.
    pub(crate) retry_after: Option<u64>,
}

/// An error answer. `code` never changes its meaning; `title` and `detail` may be reworded.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ProblemDocument {
    /// Where the code is explained.
    #[serde(rename = "type")]
    #[schema(example = "/docs#problem-not_found")]
    pub kind: String,
    /// What kind of problem this is.
    pub title: &'static str,
    /// The HTTP status.
    pub status: u16,
    /// What happened here.
    pub detail: String,
    /// Stable, for programs.
    #[schema(example = "not_found")]
    pub code: &'static str,
    /// What to try next.
    pub hint: String,
}

/// Every code with its title, for the docs page and for clients.
pub const CODES: &[(&str, &str)] = &[
    ("not_found", "The thing does not exist"),
    ("pending", "Not here yet: it may be ahead of our watermark"),
    ("unknown_network", "No such network"),
    ("unknown_route", "No such route"),
    ("method_not_allowed", "This route does not take this method"),
    ("invalid_parameter", "A parameter cannot be read"),
    ("unknown_parameter", "This route has no such parameter"),
    ("invalid_address", "Not an address of this network"),
    ("invalid_token_id", "Not a token id of this network"),
    ("invalid_hash", "Not a hash"),
    ("invalid_cursor", "The cursor does not belong to this list"),
    ("invalid_body", "The body cannot be read"),
    ("body_too_large", "The body is too large"),
    ("as_of_unsupported", "This list has no history"),
    ("as_of_not_final", "That height is not final yet"),
    ("as_of_before_start", "That time is before the first block we read"),
    ("stub", "Metadata has not come yet"),
    ("not_reached", "The asked height was not reached in time"),
    ("position_expired", "The stream no longer holds that position"),
    ("rate_limited", "Too many requests"),
    ("too_many_streams", "Too many live connections"),
    ("timeout", "The answer took too long"),
    ("database_away", "The database does not answer"),
    ("unauthorized", "A token is needed"),
    ("internal", "We made a mistake"),
];

impl Problem {
    /// A problem with a code of [`CODES`].
    pub fn new(
        status: StatusCode,
        code: &'static str,
        detail: impl Into<String>,
        hint: impl Into<String>,
    ) -> Self {
        let title = CODES.iter().find(|(known, _)| *known == code).map_or("Problem", |(_, title)| title);
        Self {
            title,
            status,
            detail: detail.into(),
            code,
            hint: hint.into(),
            pending: false,
            retry_after: None,
        }
    }
    /// 400.
    pub fn bad(code: &'static str, detail: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code, detail, hint)
    }
    /// 404, final as far as we have read.
    pub fn not_found(detail: impl Into<String>) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            "not_found",
            detail,
            "Check the network and the spelling, or look for it with /v1/search?q=.",
        )
    }
    /// 404 with `X-Data-Status: pending`.
    pub fn pending(detail: impl Into<String>, hint: impl Into<String>) -> Self {
        let mut problem = Self::new(StatusCode::NOT_FOUND, "pending", detail, hint);
        problem.pending = true;
        problem.retry_after = Some(2);
        problem
    }
    /// Was it refused for being ahead of us?
    pub fn is_pending(&self) -> bool {
        self.pending
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let (status, pending, retry_after) = (self.status, self.pending, self.retry_after);
        let document = ProblemDocument {
            kind: format!("/docs#problem-{}", self.code),
            title: self.title,
            status: status.as_u16(),
            detail: self.detail,
            code: self.code,
            hint: self.hint,
        };
        let mut response = (status, Json(document)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if pending {
            headers.insert("x-data-status", HeaderValue::from_static("pending"));
        }
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        let canceled = error.code().is_some_and(|code| code.code() == "57014");
        tracing::error!(action = "read", error = %error, "A read failed.");
        if canceled {
            return Self::new(
                StatusCode::GATEWAY_TIMEOUT,
                "timeout",
                "the database took too long over this answer",
                "Ask for less: a smaller limit, one network, or a narrower filter.",
            );
        }
        match error.verdict() {
            Verdict::Retry => {
                let mut problem = Self::new(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "database_away",
                    "the database does not answer at the moment",
                    "Try again in a few seconds.",
                );
                problem.retry_after = Some(2);
                problem
            }
            Verdict::Fenced | Verdict::Fatal => Self::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "internal",
                "this answer could not be made",
                "It is our fault and it is in our log. Trying again may help.",
            ),
        }
    }
}

impl From<QueryRejection> for Problem {
    fn from(rejection: QueryRejection) -> Self {
        Self::bad("invalid_parameter", rejection.body_text(), "See /docs for the parameters of this route.")
    }
}
impl From<PathRejection> for Problem {
    fn from(rejection: PathRejection) -> Self {
        Self::bad("invalid_parameter", rejection.body_text(), "See /docs for the shape of this path.")
    }
}
impl From<JsonRejection> for Problem {
    fn from(rejection: JsonRejection) -> Self {
        if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
            return Self::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                "body_too_large",
                "the body is larger than this route takes",
                "Send at most 100 ids.",
            );
        }
        Self::bad(
            "invalid_body",
            rejection.body_text(),
            "Send JSON as /docs shows, with content-type application/json.",
        )
    }
}
