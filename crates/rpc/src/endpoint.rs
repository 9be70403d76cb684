//! One endpoint: where it is, how fast we may ask it, how it behaved. Its label is the only name that leaves
//! this crate.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use tidemark_model::redact::RedactedUrl;

use crate::breaker::{Breaker, BreakerConfig, Permit};
use crate::limits::Limits;

/// Where an endpoint is and how fast it may be asked.
#[derive(Debug, Clone)]
pub struct EndpointConfig {
    /// Its name in logs and evidence; `None` gives `rpc-N@host`.
    pub label: Option<String>,
    /// Where it is.
    pub url: RedactedUrl,
    /// Calls per second, batch items counted one by one; `None` is no limit.
    pub rps: Option<NonZeroU32>,
    /// Calls per second of single methods.
    pub method_rps: Vec<(String, NonZeroU32)>,
    /// Most calls in one batch; 1 for servers that know no batches.
    pub batch_max: usize,
}

impl EndpointConfig {
    /// An endpoint without limits and with batches of 100.
    pub fn new(url: RedactedUrl) -> Self {
        Self { label: None, url, rps: None, method_rps: Vec::new(), batch_max: 100 }
    }
}

/// How long an answer may take, by method.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeouts {
    /// `eth_blockNumber` (S3: at most 200 ms; it is asked again on a miss).
    pub block_number: Duration,
    /// `eth_getLogs`.
    pub get_logs: Duration,
    /// `eth_getBlockReceipts`, full blocks and batches.
    pub heavy: Duration,
    /// Everything else.
    pub other: Duration,
    /// Methods by name, before all of the above.
    pub by_method: HashMap<String, Duration>,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            block_number: Duration::from_millis(200),
            get_logs: Duration::from_secs(30),
            heavy: Duration::from_secs(30),
            other: Duration::from_secs(10),
            by_method: HashMap::new(),
        }
    }
}

impl Timeouts {
    /// The limit for one call of `method`.
    pub fn of(&self, method: &str) -> Duration {
        if let Some(limit) = self.by_method.get(method) {
            return *limit;
        }
        match method {
            "eth_blockNumber" => self.block_number,
            "eth_getLogs" => self.get_logs,
            "eth_getBlockReceipts" => self.heavy,
            _ => self.other,
        }
    }
}

/// One endpoint with its memory.
#[derive(Debug)]
pub struct Endpoint {
    pub(crate) label: String,
    pub(crate) url: RedactedUrl,
    pub(crate) batch_max: usize,
    bucket: Option<Bucket>,
    method_buckets: HashMap<String, Bucket>,
    breaker: Mutex<Breaker>,
    health: Mutex<Health>,
    /// The highest head it ever reported.
    head: AtomicU64,
    /// When its chain was last checked; `None` before the first use and after the breaker opened.
    pub(crate) verified: Mutex<Option<Instant>>,
    /// What it serves instead of our chain, and what we wanted.
    pub(crate) wrong: Mutex<Option<(String, String)>>,
    /// One identity check at a time.
    pub(crate) verifying: tokio::sync::Mutex<()>,
    /// What it refuses, by query shape.
    pub limits: Limits,
}

#[derive(Debug)]
struct Bucket {
    limiter: DefaultDirectRateLimiter,
    burst: NonZeroU32,
}

impl Bucket {
    fn new(rps: NonZeroU32, batch_max: usize) -> Self {
        // The burst must hold one whole batch, or a batch could never pass.
        let batch = u32::try_from(batch_max).unwrap_or(u32::MAX);
        let burst = NonZeroU32::new(batch).map_or(rps, |batch| batch.max(rps));
        Self { limiter: RateLimiter::direct(Quota::per_second(rps).allow_burst(burst)), burst }
    }
    async fn take(&self, calls: NonZeroU32) {
        // Cannot fail: never more than the burst is asked for.
        let _ = self.limiter.until_n_ready(calls.min(self.burst)).await;
    }
}

#[derive(Debug, Clone, Copy)]
struct Health {
    /// Share of good answers, newest weigh most.
    success: f64,
    /// Typical time of an answer.
    latency_ms: f64,
    /// Not to be asked before: throttled.
    cool_until: Option<Instant>,
}

/// Weight of the newest answer in the averages.
const NEWEST: f64 = 0.1;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The guarded values are plain numbers; a panic elsewhere leaves them usable.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Endpoint {
    pub(crate) fn new(config: &EndpointConfig, number: usize, breaker: BreakerConfig) -> Self {
        let host = config.url.expose().host_str().unwrap_or("local").to_owned();
        let batch_max = config.batch_max.max(1);
        let method_buckets = config
            .method_rps
            .iter()
            .map(|(method, rps)| (method.clone(), Bucket::new(*rps, batch_max)))
            .collect();
        Self {
            label: config.label.clone().unwrap_or_else(|| format!("rpc-{number}@{host}")),
            url: config.url.clone(),
            batch_max,
            bucket: config.rps.map(|rps| Bucket::new(rps, batch_max)),
            method_buckets,
            breaker: Mutex::new(Breaker::new(breaker)),
            health: Mutex::new(Health { success: 1.0, latency_ms: 0.0, cool_until: None }),
            head: AtomicU64::new(0),
            verified: Mutex::new(None),
            wrong: Mutex::new(None),
            verifying: tokio::sync::Mutex::new(()),
            limits: Limits::default(),
        }
    }
    /// Its name, without secrets.
    pub fn label(&self) -> &str {
        &self.label
    }
    /// Most calls in one batch.
    pub fn batch_max(&self) -> usize {
        self.batch_max
    }
    /// The highest head it reported so far.
    pub fn head(&self) -> u64 {
        self.head.load(Ordering::Relaxed)
    }
    /// It reported this head.
    pub fn saw_head(&self, height: u64) {
        self.head.fetch_max(height, Ordering::Relaxed);
    }
    /// Tells operators how it does, seen from the highest head any endpoint reported.
    pub(crate) fn report(&self, best_head: u64) {
        metrics::gauge!("rpc_endpoint_score", "endpoint" => self.label.clone()).set(self.score());
        // Zero is an endpoint that was never asked.
        if let Some(behind) = best_head.checked_sub(self.head()).filter(|_| self.head() > 0) {
            let behind = u32::try_from(behind).map_or(f64::from(u32::MAX), f64::from);
            metrics::gauge!("rpc_endpoint_head_lag", "endpoint" => self.label.clone()).set(behind);
        }
    }
    /// Was it found to serve another chain?
    pub fn is_other_chain(&self) -> bool {
        lock(&self.wrong).is_some()
    }
    /// Between 0 (useless) and 1: share of good answers, with a little less for slow ones.
    pub fn score(&self) -> f64 {
        let health = *lock(&self.health);
        health.success - (health.latency_ms / 20_000.0).min(0.2)
    }
    /// Its answer was wrong: it counts as ten failures in the score.
    pub fn penalise(&self) {
        lock(&self.health).success *= 0.35;
        metrics::counter!("rpc_endpoint_penalties_total", "endpoint" => self.label.clone()).increment(1);
    }
    /// A caller with less patience than the method's limit gave up on it: counts as a failure.
    pub fn gave_up(&self) {
        self.failed(Instant::now());
    }
    /// Can it be asked at `now` without waiting?
    pub(crate) fn is_ready(&self, now: Instant) -> bool {
        let cool = lock(&self.health).cool_until.is_some_and(|until| now < until);
        !cool && lock(&self.breaker).would_pass(now)
    }
    /// How long its throttle lasts from `now` on.
    pub(crate) fn cooling(&self, now: Instant) -> Option<Duration> {
        lock(&self.health).cool_until.and_then(|until| until.checked_duration_since(now))
    }
    pub(crate) fn permit(&self, now: Instant) -> Permit {
        let permit = lock(&self.breaker).permit(now);
        self.gauge();
        permit
    }
    /// Waits for the buckets of `calls` calls of `method`.
    pub(crate) async fn admit(&self, method: &str, calls: usize) {
        let calls = u32::try_from(calls).ok().and_then(NonZeroU32::new).unwrap_or(NonZeroU32::MIN);
        if let Some(bucket) = self.method_buckets.get(method) {
            bucket.take(calls).await;
        }
        if let Some(bucket) = &self.bucket {
            bucket.take(calls).await;
        }
    }
    pub(crate) fn succeeded(&self, took: Duration) {
        {
            let mut health = lock(&self.health);
            health.success += NEWEST * (1.0 - health.success);
            health.latency_ms += NEWEST * (took.as_secs_f64() * 1000.0 - health.latency_ms);
        }
        lock(&self.breaker).succeeded();
        self.gauge();
    }
    /// It answered with a refusal by rule: it lives, and its score does not change.
    pub(crate) fn answered(&self) {
        lock(&self.breaker).succeeded();
        self.gauge();
    }
    pub(crate) fn failed(&self, now: Instant) {
        lock(&self.health).success *= 1.0 - NEWEST;
        if lock(&self.breaker).failed(now) {
            // After an outage another machine may answer behind the same name.
            *lock(&self.verified) = None;
            tracing::warn!(endpoint = %self.label, action = "breaker_open", "An endpoint rests after failures.");
        }
        self.gauge();
    }
    pub(crate) fn throttled(&self, now: Instant, wait: Duration) {
        let mut health = lock(&self.health);
        health.success *= 1.0 - NEWEST / 4.0;
        health.cool_until = Some(now + wait);
    }
    /// Serves another chain: not asked again for a while.
    pub(crate) fn banish(&self, now: Instant) {
        lock(&self.breaker).trip(now, Duration::from_secs(60));
        *lock(&self.verified) = None;
        self.gauge();
    }
    fn gauge(&self) {
        let value = lock(&self.breaker).gauge();
        metrics::gauge!("rpc_circuit_state", "endpoint" => self.label.clone()).set(value);
    }
}
