//! The pools: all requests to a network leave through one of them. Reads and writes have separate pools, so
//! that a flood of reads never delays a transaction, and separate types, so that nobody mixes them up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::backoff::Backoff;
use crate::breaker::{BreakerConfig, Permit};
use crate::endpoint::{Endpoint, EndpointConfig, Timeouts, lock};
use crate::errors::{Class, bounded, classify};
use crate::failure::RpcError;
use crate::transport::{self, Fault};
use crate::wire::{self, Batch, Call, Reply};

/// Which chain the endpoints must serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// Anything: the pool does not check.
    Any,
    /// An EVM chain: its id must match, and all endpoints must agree on the hash of block 0.
    Evm {
        /// `eth_chainId`.
        chain_id: u64,
        /// Hash of block 0, where the configuration knows it; otherwise the first endpoint's word counts.
        genesis: Option<String>,
    },
}

/// What a pool is made of.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// Network slug, for logs.
    pub network: String,
    /// Where to ask.
    pub endpoints: Vec<EndpointConfig>,
    /// How long to wait.
    pub timeouts: Timeouts,
    /// Longest body taken, after decompression.
    pub body_bytes_max: usize,
    /// Tries of [`ReadPool::ask`] before it gives up.
    pub tries_max: u32,
    /// Pauses between tries.
    pub backoff: Backoff,
    /// When an endpoint rests.
    pub breaker: BreakerConfig,
    /// Which chain it must be.
    pub identity: Identity,
}

impl PoolConfig {
    /// Sensible defaults around `endpoints`.
    pub fn new(network: impl Into<String>, endpoints: Vec<EndpointConfig>) -> Self {
        Self {
            network: network.into(),
            endpoints,
            timeouts: Timeouts::default(),
            body_bytes_max: 64 << 20,
            tries_max: 6,
            backoff: Backoff::default(),
            breaker: BreakerConfig::default(),
            identity: Identity::Any,
        }
    }
}

/// A chain is checked again after this long (pitfall D59).
const VERIFIED_FOR: Duration = Duration::from_secs(3600);
/// Rest of a throttled endpoint that does not say how long.
const COOL_DEFAULT: Duration = Duration::from_millis(250);

struct Pool {
    config: PoolConfig,
    http: reqwest::Client,
    endpoints: Vec<Arc<Endpoint>>,
    requests: AtomicU64,
    turn: AtomicUsize,
    genesis: std::sync::Mutex<Option<String>>,
}

/// The pool for questions.
#[derive(Clone)]
pub struct ReadPool(Arc<Pool>);

/// The pool for transactions. It never retries by itself on the same endpoint.
#[derive(Clone)]
pub struct WritePool(Arc<Pool>);

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let labels: Vec<_> = self.endpoints.iter().map(|endpoint| endpoint.label()).collect();
        f.debug_struct("Pool").field("network", &self.config.network).field("endpoints", &labels).finish()
    }
}
impl std::fmt::Debug for ReadPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}
impl std::fmt::Debug for WritePool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl WritePool {
    /// A pool over the configured endpoints.
    pub fn new(config: PoolConfig) -> Result<Self, RpcError> {
        Pool::new(config).map(|pool| Self(Arc::new(pool)))
    }
    /// Sends one call to the endpoints in order of health until one answers. Only for calls that are safe to
    /// repeat: a signed transaction is, because its hash is its identity.
    pub async fn call<T: DeserializeOwned>(&self, call: &Call) -> Result<T, RpcError> {
        let mut last = RpcError::NoEndpoint;
        for endpoint in self.0.ranked() {
            match self.0.call(&endpoint, call).await {
                Ok(answer) => return Ok(answer),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
    /// HTTP requests sent so far.
    pub fn requests(&self) -> u64 {
        self.0.requests.load(Ordering::Relaxed)
    }
}

impl ReadPool {
    /// A pool over the configured endpoints.
    pub fn new(config: PoolConfig) -> Result<Self, RpcError> {
        Pool::new(config).map(|pool| Self(Arc::new(pool)))
    }
    /// All endpoints, as configured.
    pub fn endpoints(&self) -> &[Arc<Endpoint>] {
        &self.0.endpoints
    }
    /// All endpoints, the best first: ready before resting, high score before low, equals take turns.
    pub fn ranked(&self) -> Vec<Arc<Endpoint>> {
        self.0.ranked()
    }
    /// HTTP requests sent so far.
    pub fn requests(&self) -> u64 {
        self.0.requests.load(Ordering::Relaxed)
    }
    /// The pauses between tries.
    pub fn backoff(&self) -> Backoff {
        self.0.config.backoff
    }
    /// The highest head any endpoint reported.
    pub fn best_head(&self) -> u64 {
        self.0.endpoints.iter().map(|endpoint| endpoint.head()).max().unwrap_or(0)
    }
    /// Is nobody ready? Then how long until the first throttled endpoint may be asked again.
    pub fn cooling(&self) -> Option<Duration> {
        let now = Instant::now();
        if self.0.endpoints.iter().any(|endpoint| endpoint.is_ready(now)) {
            return None;
        }
        self.0.endpoints.iter().filter_map(|endpoint| endpoint.cooling(now)).min()
    }
    /// One call to one endpoint, one try.
    pub async fn call<T: DeserializeOwned>(&self, endpoint: &Endpoint, call: &Call) -> Result<T, RpcError> {
        self.0.call(endpoint, call).await
    }
    /// One batch to one endpoint in one request (several when the endpoint's batches are smaller), one try.
    /// The answers are in the order of the calls; each may fail alone.
    pub async fn batch<T: DeserializeOwned>(
        &self,
        endpoint: &Endpoint,
        calls: &[Call],
    ) -> Result<Vec<Result<T, RpcError>>, RpcError> {
        let mut answers = Vec::with_capacity(calls.len());
        for part in calls.chunks(endpoint.batch_max()) {
            if let [only] = part {
                answers.push(self.0.call(endpoint, only).await);
                continue;
            }
            let decode = |method, raw: &RawValue| self.0.decode(endpoint, method, raw);
            self.0
                .batch(endpoint, part, |_, method, raw| answers.push(raw.and_then(|raw| decode(method, raw))))
                .await?;
        }
        Ok(answers)
    }
    /// Two calls of different kinds in one request to one endpoint, so that one machine answers both.
    pub async fn pair<A: DeserializeOwned, B: DeserializeOwned>(
        &self,
        endpoint: &Endpoint,
        first: Call,
        second: Call,
    ) -> Result<(Result<A, RpcError>, Result<B, RpcError>), RpcError> {
        if endpoint.batch_max() < 2 {
            let second = self.0.call(endpoint, &second).await;
            return Ok((self.0.call(endpoint, &first).await, second));
        }
        let missing =
            |call: &Call| RpcError::MissingReply { endpoint: endpoint.label.clone(), method: call.method };
        let mut answers = (Err(missing(&first)), Err(missing(&second)));
        let calls = [first, second];
        let pool = &self.0;
        pool.batch(endpoint, &calls, |index, method, raw| {
            if index == 0 {
                answers.0 = raw.and_then(|raw| pool.decode(endpoint, method, raw));
            } else {
                answers.1 = raw.and_then(|raw| pool.decode(endpoint, method, raw));
            }
        })
        .await?;
        Ok(answers)
    }
    /// Asks whoever can answer: the best endpoint first, the others after failures, with pauses between
    /// rounds. A refusal that every endpoint would repeat (revert) ends it at once.
    pub async fn ask<T: DeserializeOwned>(&self, call: &Call) -> Result<(T, Arc<Endpoint>), RpcError> {
        let mut last = RpcError::NoEndpoint;
        let mut tries = 0;
        while tries < self.0.config.tries_max {
            for endpoint in self.ranked() {
                match self.0.call(&endpoint, call).await {
                    Ok(answer) => return Ok((answer, endpoint)),
                    Err(error) if error.class() == Class::Reverted => return Err(error),
                    Err(error) => last = error,
                }
                tries += 1;
            }
            if self.0.endpoints.is_empty() {
                break;
            }
            let pause = self.0.config.backoff.pause(tries);
            tokio::time::sleep(self.cooling().unwrap_or_default().max(pause)).await;
        }
        Err(last)
    }
    /// The hash of block 0 that the endpoints agree on; `None` before the first one was asked, and where no
    /// node has that block.
    pub fn genesis(&self) -> Option<String> {
        lock(&self.0.genesis).clone()
    }
    /// Makes sure that one endpoint serves the right chain; asks nobody where that is known. The others are
    /// checked before their first answer.
    pub async fn verify_any(&self) -> Result<(), RpcError> {
        let mut last = RpcError::NoEndpoint;
        for endpoint in self.ranked() {
            match self.0.ensure_verified(&endpoint).await {
                Ok(()) => return Ok(()),
                Err(error) if matches!(last, RpcError::WrongChain { .. }) => drop(error),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
    /// Checks the chain of every endpoint now. The text names chain id and genesis; an error only when no
    /// endpoint serves the right chain.
    pub async fn verify(&self) -> Result<String, RpcError> {
        let mut last = RpcError::NoEndpoint;
        let mut good = false;
        for endpoint in &self.0.endpoints {
            match self.0.ensure_verified(endpoint).await {
                Ok(()) => good = true,
                // A wrong chain says more than an outage.
                Err(error) if matches!(last, RpcError::WrongChain { .. }) => drop(error),
                Err(error) => last = error,
            }
        }
        if !good {
            return Err(last);
        }
        let genesis = lock(&self.0.genesis).clone().unwrap_or_else(|| "unknown".to_owned());
        Ok(match &self.0.config.identity {
            Identity::Any => "any".to_owned(),
            Identity::Evm { chain_id, .. } => format!("chain {chain_id}, genesis {genesis}"),
        })
    }
}

impl Pool {
    fn new(config: PoolConfig) -> Result<Self, RpcError> {
        if config.endpoints.is_empty() {
            return Err(RpcError::NoEndpoint);
        }
        let http = transport::client().map_err(RpcError::Setup)?;
        let endpoints = (1..)
            .zip(&config.endpoints)
            .map(|(number, endpoint)| Arc::new(Endpoint::new(endpoint, number, config.breaker)))
            .collect();
        let genesis = match &config.identity {
            Identity::Evm { genesis, .. } => genesis.as_ref().map(|hash| hash.to_ascii_lowercase()),
            Identity::Any => None,
        };
        Ok(Self {
            config,
            http,
            endpoints,
            requests: AtomicU64::new(0),
            turn: AtomicUsize::new(0),
            genesis: std::sync::Mutex::new(genesis),
        })
    }

    fn ranked(&self) -> Vec<Arc<Endpoint>> {
        let now = Instant::now();
        let best_head = self.endpoints.iter().map(|endpoint| endpoint.head()).max().unwrap_or(0);
        self.endpoints.iter().for_each(|endpoint| endpoint.report(best_head));
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let mut ranked: Vec<_> = self.endpoints.to_vec();
        let shift = turn % ranked.len().max(1);
        ranked.rotate_left(shift);
        // Stable: endpoints of about the same score keep the order of their turn.
        let rank = |endpoint: &Endpoint| {
            let coarse = (endpoint.score() * 5.0).round();
            (!endpoint.is_ready(now), -coarse)
        };
        ranked.sort_by(|a, b| {
            let (a, b) = (rank(a), rank(b));
            a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
        });
        ranked
    }

    async fn call<T: DeserializeOwned>(&self, endpoint: &Endpoint, call: &Call) -> Result<T, RpcError> {
        let guarded = self.guarded(endpoint).await;
        let outcome = match guarded {
            Ok(()) => self.call_unchecked(endpoint, call).await,
            Err(error) => Err(error),
        };
        self.note(call.method, outcome.as_ref().err());
        outcome
    }

    async fn call_unchecked<T: DeserializeOwned>(
        &self,
        endpoint: &Endpoint,
        call: &Call,
    ) -> Result<T, RpcError> {
        let timeout = self.config.timeouts.of(call.method);
        let answer = self.send(endpoint, call.method, 1, wire::encode_one(call), timeout).await?;
        match wire::decode_one(&answer.body) {
            Ok(Reply::Result(result)) => Ok(result),
            Ok(Reply::Refused(refused)) => Err(self.refused(
                endpoint,
                call.method,
                answer.status,
                answer.retry_after,
                refused.code,
                &refused.text,
            )),
            Ok(Reply::Empty) => self.fault(
                endpoint,
                RpcError::MissingReply { endpoint: endpoint.label.clone(), method: call.method },
            ),
            Err(error) => self.fault(endpoint, bad_answer(endpoint, call.method, &error)),
        }
    }

    /// Sends `calls` in one request and hands every item to `each`, in order.
    async fn batch(
        &self,
        endpoint: &Endpoint,
        calls: &[Call],
        mut each: impl FnMut(usize, &'static str, Result<&RawValue, RpcError>),
    ) -> Result<(), RpcError> {
        let method = calls.first().map_or("batch", |call| call.method);
        let sent = match self.guarded(endpoint).await {
            Ok(()) => {
                let slowest = calls.iter().map(|call| self.config.timeouts.of(call.method)).max();
                let timeout = slowest.unwrap_or_default().max(if calls.len() > 3 {
                    self.config.timeouts.heavy
                } else {
                    Duration::ZERO
                });
                self.send(endpoint, method, calls.len(), wire::encode_batch(calls), timeout).await
            }
            Err(error) => Err(error),
        };
        let answer = match sent {
            Ok(answer) => answer,
            Err(error) => {
                self.note(method, Some(&error));
                return Err(error);
            }
        };
        let missing = |method| RpcError::MissingReply { endpoint: endpoint.label.clone(), method };
        match wire::decode_batch(&answer.body, calls.len()) {
            Ok(Batch::Items(items)) => {
                let mut holes = false;
                for (index, (call, item)) in calls.iter().zip(items).enumerate() {
                    let item = match item {
                        Reply::Result(raw) => Ok(raw),
                        Reply::Refused(refused) => {
                            Err(self.refused(endpoint, call.method, 200, None, refused.code, &refused.text))
                        }
                        Reply::Empty => {
                            holes = true;
                            Err(missing(call.method))
                        }
                    };
                    self.note(call.method, item.as_ref().err());
                    each(index, call.method, item);
                }
                if holes {
                    endpoint.failed(Instant::now());
                }
                Ok(())
            }
            Ok(Batch::Refused(refused)) => {
                let error = self.refused(
                    endpoint,
                    method,
                    answer.status,
                    answer.retry_after,
                    refused.code,
                    &refused.text,
                );
                self.note(method, Some(&error));
                Err(error)
            }
            Err(error) => {
                let error = bad_answer(endpoint, method, &error);
                self.note(method, Some(&error));
                self.fault(endpoint, error)
            }
        }
    }

    fn decode<T: DeserializeOwned>(
        &self,
        endpoint: &Endpoint,
        method: &'static str,
        raw: &RawValue,
    ) -> Result<T, RpcError> {
        serde_json::from_str(raw.get()).map_err(|error| {
            let error = bad_answer(endpoint, method, &error);
            endpoint.failed(Instant::now());
            self.note_error(method, &error);
            error
        })
    }

    /// Breaker and identity before a request leaves.
    async fn guarded(&self, endpoint: &Endpoint) -> Result<(), RpcError> {
        match endpoint.permit(Instant::now()) {
            Permit::Rest => {
                let endpoint_label = endpoint.label.clone();
                return Err(match lock(&endpoint.wrong).clone() {
                    Some((found, expected)) => {
                        RpcError::WrongChain { endpoint: endpoint_label, found, expected }
                    }
                    None => RpcError::Resting { endpoint: endpoint_label },
                });
            }
            Permit::Pass | Permit::Probe => {}
        }
        self.ensure_verified(endpoint).await
    }

    async fn ensure_verified(&self, endpoint: &Endpoint) -> Result<(), RpcError> {
        let Identity::Evm { chain_id, .. } = &self.config.identity else { return Ok(()) };
        let fresh = || lock(&endpoint.verified).is_some_and(|at| at.elapsed() < VERIFIED_FOR);
        if fresh() {
            return Ok(());
        }
        let _one_at_a_time = endpoint.verifying.lock().await;
        if fresh() {
            return Ok(());
        }
        let ask = Call::new("eth_chainId", json!([]));
        let mut found: String = self.call_unchecked(endpoint, &ask).await?;
        if hex_number(&found) != Some(*chain_id) {
            // A verdict that stops a network deserves a second look: one of many machines may be ill.
            found = self.call_unchecked(endpoint, &ask).await?;
        }
        let number = hex_number(&found);
        if number != Some(*chain_id) {
            let shown = number.map_or_else(|| bounded(&found).to_owned(), |number| number.to_string());
            return Err(self.wrong_chain(endpoint, shown, chain_id.to_string()));
        }
        let block = Call::new("eth_getBlockByNumber", json!(["0x0", false]));
        // A node without its first block (history expiry, snapshot start) still has its chain id checked.
        let genesis: Option<Value> = match self.call_unchecked(endpoint, &block).await {
            Ok(genesis) => genesis,
            Err(RpcError::Refused { class: Class::Pruned | Class::Lagging | Class::Other, .. }) => None,
            Err(error) => return Err(error),
        };
        let hash =
            genesis.as_ref().and_then(|block| block.get("hash")?.as_str()).map(str::to_ascii_lowercase);
        if let Some(hash) = hash {
            let expected = lock(&self.genesis).get_or_insert_with(|| hash.clone()).clone();
            if expected != hash {
                return Err(self.wrong_chain(
                    endpoint,
                    format!("{chain_id} with genesis {}", bounded(&hash)),
                    format!("{chain_id} with genesis {expected}"),
                ));
            }
        }
        *lock(&endpoint.verified) = Some(Instant::now());
        *lock(&endpoint.wrong) = None;
        Ok(())
    }

    fn wrong_chain(&self, endpoint: &Endpoint, found: String, expected: String) -> RpcError {
        endpoint.banish(Instant::now());
        *lock(&endpoint.wrong) = Some((found.clone(), expected.clone()));
        tracing::error!(network = %self.config.network, endpoint = %endpoint.label, %found, %expected, action = "wrong_chain", "An endpoint serves another chain.");
        RpcError::WrongChain { endpoint: endpoint.label.clone(), found, expected }
    }

    async fn send(
        &self,
        endpoint: &Endpoint,
        method: &'static str,
        calls: usize,
        body: Vec<u8>,
        timeout: Duration,
    ) -> Result<transport::Answer, RpcError> {
        endpoint.admit(method, calls).await;
        let started = Instant::now();
        self.requests.fetch_add(1, Ordering::Relaxed);
        let answer =
            transport::post(&self.http, &endpoint.url, body, self.config.body_bytes_max, timeout).await;
        let took = started.elapsed();
        if method == "eth_getLogs" {
            metrics::histogram!("getLogs_duration_ms").record(took.as_secs_f64() * 1000.0);
        }
        let label = || endpoint.label.clone();
        match answer {
            Ok(answer) if answer.status == 200 => {
                endpoint.succeeded(took);
                Ok(answer)
            }
            Ok(answer) => {
                // Many providers send their JSON-RPC error with status 400, 403, 413 or 500.
                let text = String::from_utf8_lossy(&answer.body[..answer.body.len().min(4096)]).into_owned();
                let (code, text) = match serde_json::from_slice::<Value>(&answer.body) {
                    Ok(value) => {
                        let error = value.get("error").unwrap_or(&value);
                        let words = error.get("message").and_then(Value::as_str).unwrap_or(&text);
                        (error.get("code").and_then(Value::as_i64), words.to_owned())
                    }
                    Err(_) => (None, text),
                };
                let error = self.refused(endpoint, method, answer.status, answer.retry_after, code, &text);
                if error.is_fault() {
                    endpoint.failed(Instant::now());
                } else {
                    endpoint.answered();
                }
                Err(error)
            }
            Err(Fault::Timeout) => {
                self.fault(endpoint, RpcError::Timeout { endpoint: label(), method, after: timeout })
            }
            Err(Fault::Broken(reason)) => {
                self.fault(endpoint, RpcError::Transport { endpoint: label(), method, reason })
            }
            Err(Fault::TooLarge) => {
                endpoint.answered();
                Err(RpcError::BodyTooLarge { endpoint: label(), method, limit: self.config.body_bytes_max })
            }
        }
    }

    fn refused(
        &self,
        endpoint: &Endpoint,
        method: &'static str,
        status: u16,
        retry_after: Option<Duration>,
        code: Option<i64>,
        text: &str,
    ) -> RpcError {
        let class = classify(status, code, text, retry_after);
        if let Class::Throttled { retry_after } = &class {
            endpoint.throttled(Instant::now(), retry_after.unwrap_or(COOL_DEFAULT));
        }
        RpcError::Refused {
            endpoint: endpoint.label.clone(),
            method,
            code: if status == 200 { code.unwrap_or(0) } else { i64::from(status) },
            message: bounded(text).to_owned(),
            class,
        }
    }

    fn fault<T>(&self, endpoint: &Endpoint, error: RpcError) -> Result<T, RpcError> {
        endpoint.failed(Instant::now());
        Err(error)
    }

    fn note(&self, method: &'static str, error: Option<&RpcError>) {
        metrics::counter!("rpc_requests_total", "method" => method).increment(1);
        if let Some(error) = error {
            self.note_error(method, error);
        }
    }

    fn note_error(&self, method: &'static str, error: &RpcError) {
        metrics::counter!("rpc_errors_total", "method" => method, "class" => error.label()).increment(1);
        tracing::debug!(network = %self.config.network, method, %error, action = "rpc_error", "A call failed.");
    }
}

fn hex_number(text: &str) -> Option<u64> {
    let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"))?;
    u64::from_str_radix(digits, 16).ok()
}

fn bad_answer(endpoint: &Endpoint, method: &'static str, error: &serde_json::Error) -> RpcError {
    RpcError::BadAnswer {
        endpoint: endpoint.label.clone(),
        method,
        reason: bounded(&error.to_string()).to_owned(),
    }
}
