//! What stands before every route: metrics, rate limit, security headers, time limit, strict parameters.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{ConnectInfo, MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use governor::clock::{Clock, DefaultClock};
use governor::middleware::StateInformationMiddleware;
use governor::state::keyed::DefaultKeyedStateStore;
use governor::{Quota, RateLimiter};
use subtle::ConstantTimeEq;

use crate::problem::Problem;
use crate::state::{ApiConfig, ApiState};

type Limiter = RateLimiter<IpAddr, DefaultKeyedStateStore<IpAddr>, DefaultClock, StateInformationMiddleware>;

/// Requests per client and minute.
pub(crate) struct RateLimit {
    limiter: Limiter,
    clock: DefaultClock,
    per_minute: u32,
    burst: u32,
    policy: HeaderValue,
}

impl RateLimit {
    pub(crate) fn new(config: &ApiConfig) -> Self {
        let per_minute = NonZeroU32::new(config.requests_per_minute).unwrap_or(NonZeroU32::MIN);
        let burst = NonZeroU32::new(config.burst).unwrap_or(per_minute);
        // As many as at once, in the time it takes to have them all back.
        let window = (u64::from(burst.get()) * 60).div_ceil(u64::from(per_minute.get()));
        let policy = format!("\"client\";q={burst};w={window}");
        let quota = Quota::per_minute(per_minute).allow_burst(burst);
        Self {
            limiter: RateLimiter::keyed(quota).with_middleware(),
            clock: DefaultClock::default(),
            per_minute: per_minute.get(),
            burst: burst.get(),
            policy: HeaderValue::from_str(&policy).expect("digits and quotes are a header value"),
        }
    }
    /// Forgets clients that have been quiet long enough to be new again.
    pub(crate) fn sweep(&self) {
        self.limiter.retain_recent();
        self.limiter.shrink_to_fit();
    }
}

/// One client: an IPv4 address, or the /64 an IPv6 host may choose from.
fn client_of(request: &Request, trust_forwarded_for: bool) -> IpAddr {
    let forwarded = || {
        let value = request.headers().get_all("x-forwarded-for").iter().next_back()?.to_str().ok()?;
        value.rsplit(',').next()?.trim().parse::<IpAddr>().ok()
    };
    let peer = || request.extensions().get::<ConnectInfo<SocketAddr>>().map(|info| info.0.ip());
    let address = trust_forwarded_for.then(forwarded).flatten().or_else(peer);
    match address.unwrap_or(IpAddr::from([0, 0, 0, 0])).to_canonical() {
        IpAddr::V6(v6) => {
            let [a, b, c, d, ..] = v6.segments();
            IpAddr::from([a, b, c, d, 0, 0, 0, 0])
        }
        v4 => v4,
    }
}

/// Refuses clients that ask too often, and tells all how much is left.
pub(crate) async fn rate_limit(State(state): State<ApiState>, request: Request, next: Next) -> Response {
    if state.config().requests_per_minute == 0 {
        return next.run(request).await; // Switched off: something in front of us counts.
    }
    let limit = state.limit();
    let client = client_of(&request, state.config().trust_forwarded_for);
    let (mut response, remaining, reset) = match limit.limiter.check_key(&client) {
        Ok(snapshot) => {
            let remaining = snapshot.remaining_burst_capacity();
            let missing = limit.burst.saturating_sub(remaining);
            let reset = (u64::from(missing) * 60).div_ceil(u64::from(limit.per_minute));
            (next.run(request).await, remaining, reset)
        }
        Err(not_until) => {
            let wait = not_until.wait_time_from(limit.clock.now());
            let seconds = wait.as_secs() + 1;
            let mut problem = Problem::new(
                StatusCode::TOO_MANY_REQUESTS,
                "rate_limited",
                format!("more than {} requests at once, or {} per minute", limit.burst, limit.per_minute),
                "Wait for Retry-After seconds. For live data use /v1/stream: one connection instead of polling.",
            );
            problem.retry_after = Some(seconds);
            (problem.into_response(), 0, seconds)
        }
    };
    let headers = response.headers_mut();
    headers.insert("ratelimit-policy", limit.policy.clone());
    if let Ok(value) = HeaderValue::from_str(&format!("\"client\";r={remaining};t={reset}")) {
        headers.insert("ratelimit", value);
    }
    response
}

const SECURITY: &[(&str, &str)] = &[
    (
        "content-security-policy",
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("permissions-policy", "camera=(), geolocation=(), microphone=(), payment=()"),
];

/// Security headers on every answer, errors included.
pub(crate) async fn security_headers(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    for (name, value) in SECURITY {
        response.headers_mut().insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    response
}

/// S0 §15.3. The route is the pattern, never the path: labels stay few.
pub(crate) async fn measure(request: Request, next: Next) -> Response {
    let method = match request.method().as_str() {
        known @ ("GET" | "POST" | "HEAD" | "OPTIONS" | "PUT" | "PATCH" | "DELETE") => known.to_owned(),
        _ => "other".to_owned(),
    };
    let route = request
        .extensions()
        .get::<MatchedPath>()
        .map_or_else(|| "unmatched".to_owned(), |path| path.as_str().to_owned());
    let begun = Instant::now();
    let response = next.run(request).await;
    let labels =
        [("method", method), ("route", route), ("status_code", response.status().as_u16().to_string())];
    metrics::counter!("http_requests_total", &labels).increment(1);
    metrics::histogram!("http_request_duration_seconds", &labels).record(begun.elapsed().as_secs_f64());
    response
}

/// Ends an answer that takes too long. A live stream answers at once and then goes on.
pub(crate) async fn time_limit(State(state): State<ApiState>, request: Request, next: Next) -> Response {
    let limit = Duration::from_secs(state.config().request_timeout_seconds.max(1));
    match tokio::time::timeout(limit, next.run(request)).await {
        Ok(response) => response,
        Err(_) => Problem::new(
            StatusCode::GATEWAY_TIMEOUT,
            "timeout",
            format!("no answer within {} seconds", limit.as_secs()),
            "Ask for less: a smaller limit, one network, or a narrower filter.",
        )
        .into_response(),
    }
}

/// The query parameters each documented route knows.
pub(crate) type KnownParameters = Arc<BTreeMap<String, BTreeSet<String>>>;

/// Refuses parameters a route does not know: a mistyped `min_finalty` must not be a weaker answer.
pub(crate) async fn strict_parameters(
    State(known): State<KnownParameters>,
    request: Request,
    next: Next,
) -> Response {
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    if let (Some(query), Some(names)) = (request.uri().query(), route.and_then(|route| known.get(&route))) {
        for (name, _) in url::form_urlencoded::parse(query.as_bytes()) {
            if !names.contains(name.as_ref()) {
                let shown: String = name.chars().take(60).collect();
                let list: Vec<&str> = names.iter().map(String::as_str).collect();
                return Problem::bad(
                    "unknown_parameter",
                    format!("this route has no parameter {shown:?}"),
                    format!("It takes: {}.", if list.is_empty() { "none".into() } else { list.join(", ") }),
                )
                .into_response();
            }
        }
    }
    next.run(request).await
}

/// A panic becomes a problem; the process goes on.
pub(crate) fn panicked(_: Box<dyn std::any::Any + Send + 'static>) -> Response {
    tracing::error!(action = "answer", "A handler panicked.");
    Problem::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        "internal",
        "this answer could not be made",
        "It is our fault and it is in our log. Trying again may help.",
    )
    .into_response()
}

/// Lets only the holder of the admin token through. An empty token lets nobody through.
pub(crate) async fn require_token(
    State(token): State<Arc<str>>,
    headers: HeaderMap,
    request: Request,
    next: Next,
) -> Response {
    let given = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.strip_prefix("Bearer "))
        .unwrap_or("");
    let equal: bool = given.as_bytes().ct_eq(token.as_bytes()).into();
    if equal && !token.is_empty() {
        return next.run(request).await;
    }
    let mut response = Problem::new(
        StatusCode::UNAUTHORIZED,
        "unauthorized",
        "this listener takes a bearer token",
        "Send `Authorization: Bearer …` with the token of the configuration.",
    )
    .into_response();
    response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}
