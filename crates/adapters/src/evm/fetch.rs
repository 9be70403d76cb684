//! Reading ranges. One call of `read` covers one sub-range from the start of what was asked; the caller comes
//! back for the rest and may have several ranges in flight. Every sub-range is answered by one endpoint and
//! checked before it is handed over; an answer that fails a check is asked for elsewhere.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use serde_json::{Map, Value, json};
use tidemark_model::OffsetDateTime;
use tidemark_model::chain::{
    BlockCoverage, BlockRef, ChainError, FetchMode, RangeEvidence, RawBatch, RawBlock, RawRecord,
};
use tidemark_model::ids::{BlockHash, Height, HeightRange, TxId};
use tidemark_rpc::{Call, Class, Endpoint, RpcError};

use super::config::{BloomPolicy, HeaderPolicy, Mode};
use super::hex::Quantity;
use super::parse::Claim;
use super::topics::OURS;
use super::wire::{Header, Log};
use super::{EvmAdapter, block_ref, check, header_call, hex_number};

/// Why one endpoint's answer was not taken.
#[derive(Debug)]
pub(super) enum Miss {
    /// It refuses the size: ask for less.
    Size(Class),
    /// It did not answer.
    Rpc(RpcError),
    /// It is not there yet, or its machines are not at one height: no lie.
    Behind(String),
    /// Its answer contradicts itself or others.
    Bad(String),
    /// The block was reorganized away while we asked.
    Gone(BlockRef),
}

impl From<RpcError> for Miss {
    fn from(error: RpcError) -> Self {
        let class = error.class();
        match class {
            Class::Lagging => Self::Behind(error.to_string()),
            class if class.is_size() => Self::Size(class),
            _ => Self::Rpc(error),
        }
    }
}

/// Tries of one part of a range at one endpoint.
const PART_TRIES: u32 = 5;

/// One endpoint while it answers for one sub-range: counts requests and collects the names of checks.
pub(super) struct Reader<'a> {
    pub(super) adapter: &'a EvmAdapter,
    pub(super) endpoint: &'a Arc<Endpoint>,
    requests: AtomicU64,
    checks: Mutex<BTreeSet<&'static str>>,
}

impl<'a> Reader<'a> {
    fn new(adapter: &'a EvmAdapter, endpoint: &'a Arc<Endpoint>) -> Self {
        Self { adapter, endpoint, requests: AtomicU64::new(0), checks: Mutex::default() }
    }
    pub(super) fn sent(&self, endpoint: &Endpoint, calls: usize) {
        let requests = calls.div_ceil(endpoint.batch_max());
        self.requests.fetch_add(u64::try_from(requests).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
    pub(super) fn passed(&self, check: &'static str) {
        self.checks.lock().unwrap_or_else(PoisonError::into_inner).insert(check);
    }
    /// A batch whose items must all succeed.
    pub(super) async fn all<T: serde::de::DeserializeOwned>(&self, calls: &[Call]) -> Result<Vec<T>, Miss> {
        self.sent(self.endpoint, calls.len());
        let answers = self.adapter.pool.batch(self.endpoint, calls).await?;
        answers.into_iter().map(|answer| answer.map_err(Miss::from)).collect()
    }
    pub(super) fn evidence(
        &self,
        head: u64,
        records: u64,
        foreign: u64,
        coverage: BlockCoverage,
    ) -> RangeEvidence {
        let checks = self.checks.lock().unwrap_or_else(PoisonError::into_inner);
        RangeEvidence {
            provider: self.endpoint.label().to_owned(),
            head_seen: Height(head),
            records,
            foreign,
            requests: self.requests.load(Ordering::Relaxed),
            checks: checks.iter().map(|check| (*check).to_owned()).collect(),
            coverage,
        }
    }
}

impl EvmAdapter {
    pub(super) async fn read(&self, range: HeightRange, mode: FetchMode) -> Result<RawBatch, ChainError> {
        let endpoints = self.pool.endpoints().len();
        let tries = usize::try_from(self.config.tries_max).unwrap_or(usize::MAX).max(endpoints * 2);
        let mut tried: Vec<Arc<Endpoint>> = Vec::new();
        let mut worst: Option<Miss> = None;
        let mut rounds = 0;
        for _ in 0..tries {
            let Some(endpoint) = self.choose(range, &tried) else { break };
            match self.read_at(&endpoint, range, mode).await {
                Ok(batch) => return Ok(batch),
                Err(miss) => {
                    tracing::debug!(network = %self.config.network.slug, endpoint = endpoint.label(), %range, ?miss, action = "read_again", "A range is asked for elsewhere.");
                    if let Miss::Bad(reason) = &miss {
                        endpoint.penalise();
                        metrics::counter!("evm_rejected_answers_total", "network" => self.slug())
                            .increment(1);
                        tracing::warn!(network = %self.config.network.slug, endpoint = endpoint.label(), %range, reason, action = "reject_answer", "An answer failed its checks.");
                    }
                    worst = Some(graver(worst, miss));
                }
            }
            tried.push(endpoint);
            if tried.len() == endpoints {
                tried.clear();
                rounds += 1;
                let pause = self.pool.backoff().pause(rounds);
                tokio::time::sleep(self.pool.cooling().unwrap_or_default().max(pause)).await;
            }
        }
        let what = format!("blocks {range}");
        Err(match worst {
            None => self.unavailable(what, "no endpoint is configured"),
            Some(Miss::Bad(reason)) => self.inconsistent(what, reason),
            Some(Miss::Behind(reason)) => self.unavailable(what, reason),
            Some(Miss::Size(_)) => {
                ChainError::TooLarge { network: self.slug(), what: format!("block {}", range.from()) }
            }
            Some(Miss::Gone(block)) => ChainError::Gone { network: self.slug(), block },
            Some(Miss::Rpc(error)) => self.explain(&what, &error),
        })
    }

    /// The best endpoint that was not tried yet, one known to have the range before others.
    fn choose(&self, range: HeightRange, tried: &[Arc<Endpoint>]) -> Option<Arc<Endpoint>> {
        let open = |endpoint: &&Arc<Endpoint>| !tried.iter().any(|known| Arc::ptr_eq(known, endpoint));
        let ranked = self.pool.ranked();
        // Heads are refreshed by every read and whenever finality moves; zero is an endpoint never asked.
        let needed = range.last().0.min(self.pool.best_head());
        let has_range = |endpoint: &&Arc<Endpoint>| endpoint.head() == 0 || endpoint.head() >= needed;
        let first = ranked.iter().filter(open).find(has_range);
        first.or_else(|| ranked.iter().find(open)).cloned()
    }

    async fn read_at(
        &self,
        endpoint: &Arc<Endpoint>,
        range: HeightRange,
        mode: FetchMode,
    ) -> Result<RawBatch, Miss> {
        let shape = match (self.config.mode, mode) {
            (Mode::Full, _) => 1 << 32,
            (Mode::Logs, FetchMode::History) => u64::try_from(self.filter.width()).unwrap_or(u64::MAX),
            (Mode::Logs, FetchMode::Tip) => 2 << 32,
        };
        let steps = match (self.config.mode, mode) {
            (Mode::Logs, FetchMode::History) => self.steps,
            (Mode::Full, _) => capped(self.steps, self.config.full_step_max),
            (Mode::Logs, FetchMode::Tip) => {
                capped(self.steps, u64::try_from(self.config.headers_batch).unwrap_or(u64::MAX))
            }
        };
        loop {
            let (part, _) = range.split_first(endpoint.limits.step(shape, steps));
            let reader = Reader::new(self, endpoint);
            let outcome = match (self.config.mode, mode) {
                (Mode::Full, _) => reader.full(part).await,
                (Mode::Logs, FetchMode::History) => reader.history(part).await,
                (Mode::Logs, FetchMode::Tip) => reader.tip(part).await,
            };
            match outcome {
                Ok(batch) => {
                    let found = batch.evidence.records + batch.evidence.foreign;
                    endpoint.limits.grew(shape, steps, part.blocks(), found, self.config.records_target);
                    return Ok(batch);
                }
                Err(Miss::Size(class)) => {
                    let from = part.from().0;
                    if endpoint.limits.refused(shape, steps, from, part.blocks(), &class).is_some() {
                        continue;
                    }
                    if self.config.mode == Mode::Logs {
                        return Reader::new(self, endpoint).one_large_block(part.from()).await;
                    }
                    return Err(Miss::Size(class));
                }
                Err(Miss::Rpc(error)) => {
                    if matches!(error, RpcError::Timeout { method: "eth_getLogs", .. }) {
                        endpoint.limits.slow(shape, steps, part.blocks());
                    }
                    return Err(Miss::Rpc(error));
                }
                Err(miss) => return Err(miss),
            }
        }
    }
}

fn capped(steps: tidemark_rpc::limits::StepBounds, max: u64) -> tidemark_rpc::limits::StepBounds {
    tidemark_rpc::limits::StepBounds { init: max, min: 1, max: steps.max.min(max).max(1) }
}

/// Of two reasons, the one the caller must hear about: a contradiction above all, an outage last.
fn graver(before: Option<Miss>, now: Miss) -> Miss {
    let rank = |miss: &Miss| match miss {
        Miss::Bad(_) => 5,
        Miss::Gone(_) => 4,
        Miss::Size(_) => 3,
        Miss::Behind(_) => 2,
        Miss::Rpc(_) => 1,
    };
    match before {
        Some(before) if rank(&before) > rank(&now) => before,
        _ => now,
    }
}

impl Reader<'_> {
    /// A range of history, by number.
    async fn history(&self, range: HeightRange) -> Result<RawBatch, Miss> {
        let (mut logs, head) = self.logs_of_range(range).await?;
        let sorted =
            check::logs(range, &mut logs, &self.adapter.filter, &self.adapter.known).map_err(Miss::Bad)?;
        self.passed("log_order");
        self.count_removed(sorted.removed);
        // A block whose header is never read cannot be missed by its bloom: somebody else must have seen the
        // same logs. Who cannot be asked, or answers otherwise, confirms nothing.
        let is_confirmed = self.adapter.config.headers == HeaderPolicy::WithRecords
            && self.another_has_the_same(range, &logs).await;
        let (numbers, coverage): (Vec<u64>, _) = if is_confirmed {
            let heights: BTreeSet<u64> = logs.iter().map(|log| log.block_number.0).collect();
            (heights.into_iter().collect(), BlockCoverage::WithRecords)
        } else {
            ((range.from().0..range.to().0).collect(), BlockCoverage::All)
        };
        let headers = self.headers(&numbers).await?;
        self.finish(range, FetchMode::History, headers, logs, sorted.foreign, head, coverage).await
    }

    /// Logs and the head of the machine that gave them, in one request.
    async fn logs_of_range(&self, range: HeightRange) -> Result<(Vec<Log>, u64), Miss> {
        let logs = Call::new("eth_getLogs", json!([self.adapter.by_range(range)]));
        let head = Call::new("eth_blockNumber", json!([]));
        self.sent(self.endpoint, 2);
        let (logs, head) = self.adapter.pool.pair::<Vec<Log>, Quantity>(self.endpoint, logs, head).await?;
        let (logs, head) = (logs?, head?.0);
        self.endpoint.saw_head(head);
        if head < range.last().0 {
            return Err(Miss::Behind(format!(
                "{} is at {head}, below the range's last block {}",
                self.endpoint.label(),
                range.last()
            )));
        }
        self.passed("head_reached");
        Ok((logs, head))
    }

    /// Headers by number, in batches, in order.
    async fn headers(&self, numbers: &[u64]) -> Result<Vec<Header>, Miss> {
        let config = &self.adapter.config;
        let parts: Vec<Vec<u64>> = numbers.chunks(config.headers_batch.max(1)).map(<[u64]>::to_vec).collect();
        let batches = parts.into_iter().map(|part| self.header_batch(part));
        let batches: Vec<Vec<Header>> =
            stream::iter(batches).buffered(config.headers_in_flight.max(1)).try_collect().await?;
        let headers: Vec<Header> = batches.into_iter().flatten().collect();
        check::links(&headers).map_err(Miss::Behind)?;
        self.passed("parent_links");
        Ok(headers)
    }

    /// One batch of headers. A range needs many of them, so one that fails is asked for again here: giving
    /// up the whole range for it would never end with a node that fails now and then.
    async fn header_batch(&self, numbers: Vec<u64>) -> Result<Vec<Header>, Miss> {
        let mut found: Vec<Option<Header>> = vec![None; numbers.len()];
        let mut last = None;
        for failures in 0..PART_TRIES {
            let open: Vec<usize> = (0..numbers.len()).filter(|index| found[*index].is_none()).collect();
            let calls: Vec<Call> = open.iter().map(|index| header_call(numbers[*index])).collect();
            self.sent(self.endpoint, calls.len());
            match self.adapter.pool.batch::<Option<Header>>(self.endpoint, &calls).await {
                Ok(answers) => {
                    for (index, answer) in open.into_iter().zip(answers) {
                        let header = answer.map_err(Miss::from);
                        match header.and_then(|header| self.the_header(numbers[index], header)) {
                            Ok(header) => found[index] = Some(header),
                            Err(miss) => last = Some(miss),
                        }
                    }
                }
                Err(error) => last = Some(Miss::from(error)),
            }
            if found.iter().all(Option::is_some) {
                return Ok(found.into_iter().flatten().collect());
            }
            if !matches!(last, Some(Miss::Rpc(_) | Miss::Behind(_))) {
                break;
            }
            let pause = self.adapter.pool.backoff().pause(failures);
            tokio::time::sleep(self.adapter.pool.cooling().unwrap_or_default().max(pause)).await;
        }
        Err(last.unwrap_or_else(|| Miss::Behind("headers are missing".to_owned())))
    }

    fn the_header(&self, number: u64, header: Option<Header>) -> Result<Header, Miss> {
        match header {
            Some(header) if header.number.0 == number => Ok(header),
            Some(header) => Err(Miss::Bad(format!("block {} came for {number}", header.number.0))),
            None => Err(Miss::Behind(format!("{} has no block {number} now", self.endpoint.label()))),
        }
    }

    /// Blocks at the tip: headers first, then logs by the hash of each, so that a reorg between the two
    /// requests cannot mix branches. Stops before the first block the endpoint does not have.
    async fn tip(&self, range: HeightRange) -> Result<RawBatch, Miss> {
        let calls: Vec<Call> = (range.from().0..range.to().0).map(header_call).collect();
        let mut headers = Vec::with_capacity(calls.len());
        for (number, header) in (range.from().0..).zip(self.all::<Option<Header>>(&calls).await?) {
            match self.the_header(number, header) {
                Ok(header) => headers.push(header),
                Err(Miss::Behind(_)) if !headers.is_empty() => break,
                Err(miss) => return Err(miss),
            }
        }
        let Some(last) = headers.last() else { return Err(Miss::Behind("no block came".to_owned())) };
        let head = last.number.0;
        self.endpoint.saw_head(head);
        let covered = HeightRange::inclusive(range.from(), Height(head)).unwrap_or(range);
        check::links(&headers).map_err(Miss::Behind)?;
        self.passed("head_reached");
        self.passed("parent_links");
        let calls: Vec<Call> = headers
            .iter()
            .map(|header| Call::new("eth_getLogs", json!([self.adapter.by_hash(&header.hash.0)])))
            .collect();
        let answers = match self.all::<Vec<Log>>(&calls).await {
            // The node knew these blocks a moment ago.
            Err(Miss::Behind(_)) => return Err(Miss::Gone(block_ref(last))),
            answers => answers?,
        };
        let (mut logs, mut foreign) = (Vec::new(), 0);
        for (header, mut of_block) in headers.iter().zip(answers) {
            let one = HeightRange::one(Height(header.number.0));
            let sorted = check::logs(one, &mut of_block, &self.adapter.filter, &self.adapter.known)
                .map_err(Miss::Bad)?;
            self.count_removed(sorted.removed);
            foreign += sorted.foreign;
            logs.append(&mut of_block);
        }
        self.passed("log_order");
        self.passed("logs_by_hash");
        self.finish(covered, FetchMode::Tip, headers, logs, foreign, head, BlockCoverage::All).await
    }

    /// One block whose logs are too many for one answer: topic by topic, then from its receipts.
    async fn one_large_block(&self, height: Height) -> Result<RawBatch, Miss> {
        let range = HeightRange::one(height);
        let header = self.headers(&[height.0]).await?;
        let hash = header.first().map(|header| header.hash.0).unwrap_or_default();
        let mut logs = match self.logs_by_topic(&hash).await {
            Err(Miss::Size(_)) => {
                let receipts = self.receipts_of(self.endpoint, height.0).await?;
                let logs = receipts.into_iter().flat_map(|receipt| receipt.logs);
                self.passed("logs_from_receipts");
                logs.filter(|log| self.adapter.filter.matches(log)).collect()
            }
            logs => logs?,
        };
        let sorted =
            check::logs(range, &mut logs, &self.adapter.filter, &self.adapter.known).map_err(Miss::Bad)?;
        self.passed("log_order");
        self.count_removed(sorted.removed);
        let head = self.endpoint.head();
        self.finish(range, FetchMode::Tip, header, logs, sorted.foreign, head, BlockCoverage::All).await
    }

    async fn logs_by_topic(&self, hash: &[u8; 32]) -> Result<Vec<Log>, Miss> {
        let mut logs: Vec<Log> = Vec::new();
        for topic in OURS {
            let mut filter = self.adapter.by_hash(hash);
            filter.insert("topics".to_owned(), json!([prefixed(&topic)]));
            self.sent(self.endpoint, 1);
            let call = Call::new("eth_getLogs", json!([filter]));
            logs.extend(self.adapter.pool.call::<Vec<Log>>(self.endpoint, &call).await?);
        }
        logs.sort_by_key(|log| log.log_index.0);
        self.passed("logs_by_topic");
        Ok(logs)
    }

    /// Headers and logs against each other, second opinions where the bloom promises more, and the result.
    #[expect(clippy::too_many_arguments, reason = "the parts of one answer, used in one place")]
    async fn finish(
        &self,
        covered: HeightRange,
        mode: FetchMode,
        headers: Vec<Header>,
        logs: Vec<Log>,
        foreign: u64,
        head: u64,
        coverage: BlockCoverage,
    ) -> Result<RawBatch, Miss> {
        let adapter = self.adapter;
        let check_bloom = adapter.config.bloom == BloomPolicy::Check;
        let suspects = check::blooms(&headers, &logs, &adapter.filter, check_bloom).map_err(Miss::Bad)?;
        self.passed("block_hashes");
        if check_bloom {
            self.passed("bloom");
        }
        self.confirm(&suspects, &logs).await?;
        // Where only headers with records were read, another endpoint has given the same answer already.
        if coverage == BlockCoverage::All {
            self.audit(covered, mode, &headers, &logs).await?;
        }
        let blocks = self.blocks(headers, &logs, coverage).map_err(Miss::Bad)?;
        let records = blocks.iter().map(|block| u64::try_from(block.records.len()).unwrap_or(u64::MAX)).sum();
        Ok(RawBatch { covered, blocks, evidence: self.evidence(head, records, foreign, coverage) })
    }

    /// Blocks with their records. All bytes of a range lie in one buffer, so a record costs no allocation.
    fn blocks(
        &self,
        headers: Vec<Header>,
        logs: &[Log],
        coverage: BlockCoverage,
    ) -> Result<Vec<RawBlock>, String> {
        let ours = |log: &&Log| {
            let topics = log.topics.as_slice();
            let topic0 = topics.first().map(|topic| &topic[..]);
            self.adapter.known.claim(&log.address.0, topic0, topics.len()) == Claim::Ours
        };
        // What the evidence promises, not what history is configured to keep: the tip needs every block.
        let with_records = coverage == BlockCoverage::WithRecords;
        let arena = arena(logs.iter().filter(ours));
        let mut at = 0;
        let mut rest = logs;
        let mut blocks = Vec::with_capacity(headers.len());
        for header in headers {
            let count = rest.iter().take_while(|log| log.block_number.0 == header.number.0).count();
            let (of_block, others) = rest.split_at(count);
            rest = others;
            let records: Vec<RawRecord> =
                of_block.iter().filter(ours).map(|log| record(log, &arena, &mut at)).collect();
            if with_records && records.is_empty() {
                continue;
            }
            blocks.push(block(&header, records)?);
        }
        Ok(blocks)
    }

    fn count_removed(&self, removed: u64) {
        if removed > 0 {
            metrics::counter!("evm_removed_logs_total", "network" => self.adapter.slug()).increment(removed);
            self.passed("removed_dropped");
        }
    }
}

impl EvmAdapter {
    fn filter_json(&self) -> Map<String, Value> {
        let topics: Vec<String> = OURS.iter().map(|topic| prefixed(topic)).collect();
        let mut filter = Map::new();
        filter.insert("topics".to_owned(), json!([topics]));
        // An empty address list means all or nothing depending on the node: it is left out.
        if self.filter.width() > 0 {
            let contracts: Vec<String> = self.filter.contracts().map(|address| prefixed(address)).collect();
            filter.insert("address".to_owned(), json!(contracts));
        }
        filter
    }
    pub(super) fn by_range(&self, range: HeightRange) -> Map<String, Value> {
        let mut filter = self.filter_json();
        filter.insert("fromBlock".to_owned(), hex_number(range.from().0));
        filter.insert("toBlock".to_owned(), hex_number(range.last().0));
        filter
    }
    pub(super) fn by_hash(&self, hash: &[u8; 32]) -> Map<String, Value> {
        let mut filter = self.filter_json();
        filter.insert("blockHash".to_owned(), json!(prefixed(hash)));
        filter
    }
}

fn prefixed(bytes: &[u8]) -> String {
    format!("0x{}", ::hex::encode(bytes))
}

/// The bytes of these logs, one after another: emitter, topics, data.
pub(super) fn arena<'a>(logs: impl Iterator<Item = &'a Log>) -> Bytes {
    let mut bytes = Vec::new();
    for log in logs {
        bytes.extend_from_slice(&log.address.0);
        for topic in log.topics.as_slice() {
            bytes.extend_from_slice(topic);
        }
        bytes.extend_from_slice(&log.data.0);
    }
    bytes.into()
}

/// The record of `log`, whose bytes start at `at` in the arena; moves `at` behind them.
pub(super) fn record(log: &Log, arena: &Bytes, at: &mut usize) -> RawRecord {
    let mut take = |length: usize| {
        let part = arena.slice(*at..*at + length);
        *at += length;
        part
    };
    RawRecord {
        tx: TxId::from(log.transaction_hash.0),
        tx_index: u32::try_from(log.transaction_index.0).expect("checked with the logs"),
        index: u32::try_from(log.log_index.0).expect("checked with the logs"),
        emitter: take(20),
        topics: take(log.topics.as_slice().len() * 32),
        data: take(log.data.0.len()),
        payload: None,
    }
}

pub(super) fn block(header: &Header, records: Vec<RawRecord>) -> Result<RawBlock, String> {
    let seconds = i64::try_from(header.timestamp.0).ok();
    let time = seconds.and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
    Ok(RawBlock {
        height: Height(header.number.0),
        hash: BlockHash(header.hash.0),
        parent: BlockHash(header.parent_hash.0),
        time: time.ok_or_else(|| format!("block {} has no possible time", header.number.0))?,
        tx_count: header.transactions.and_then(|count| u32::try_from(count.0).ok()),
        transactions: Vec::new(),
        records,
        payload: None,
    })
}
