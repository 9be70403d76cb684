//! Second opinions. A header's bloom that promises one of our events while none came is either a false alarm
//! of the bloom or a node that hides logs. So the block is asked for again by its hash, at the same endpoint
//! and at another one, and its receipts are read where a node serves them: receipts whose own bloom equals
//! the header's are complete, and settle the matter.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tidemark_model::chain::FetchMode;
use tidemark_model::ids::HeightRange;
use tidemark_rpc::{Call, Class, Endpoint, RpcError};

use super::bloom;
use super::config::{Audit, BloomPolicy};
use super::fetch::{Miss, Reader};
use super::hex::Quantity;
use super::wire::{Header, Log, Receipt, TxHashes};
use super::{header_call, hex_number};

/// Receipts of a busy block are megabytes: with a second endpoint to ask, only so many suspects per range are
/// settled by receipts.
const RECEIPTS_MAX: usize = 32;
/// At the tip a second opinion must not cost more than this.
const TIP_AUDIT_MAX: Duration = Duration::from_millis(500);

/// What receipts can tell, the weaker first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Proof {
    /// No endpoint serves receipts.
    NotServed,
    /// They could not be had, and may be later.
    NotNow,
    /// They hold the same logs, and their bloom is not the header's.
    OtherBloom,
    /// They are complete and hold exactly these logs.
    Proven,
}

impl Reader<'_> {
    /// Settles the blocks whose bloom promises more than came; an error when something was hidden.
    pub(super) async fn confirm(&self, suspects: &[&Header], logs: &[Log]) -> Result<(), Miss> {
        if suspects.is_empty() {
            return Ok(());
        }
        metrics::counter!("evm_bloom_suspects_total", "network" => self.adapter.slug())
            .increment(u64::try_from(suspects.len()).unwrap_or(u64::MAX));
        self.same_by_hash(self.endpoint, suspects, logs).await?;
        let mut seconds = Vec::new();
        for other in self.others() {
            match self.same_by_hash(&other, suspects, logs).await {
                Ok(()) => {
                    seconds.push(other);
                    break;
                }
                Err(Miss::Bad(reason)) => return Err(Miss::Bad(reason)),
                Err(_) => {} // It cannot say; somebody else may.
            }
        }
        let enough = !seconds.is_empty();
        let to_prove = if enough { &suspects[..suspects.len().min(RECEIPTS_MAX)] } else { suspects };
        for header in to_prove {
            match self.receipts_say(header, of_block(logs, header)).await? {
                Proof::Proven => {}
                // Two endpoints gave the same logs: the bloom is wrong, or receipts cannot be had.
                Proof::OtherBloom | Proof::NotServed | Proof::NotNow if enough => {}
                Proof::NotServed => {
                    return Err(Miss::Bad(format!(
                        "the bloom of block {} promises logs that did not come, and nobody serves receipts that \
                         could settle it: add a second endpoint",
                        header.number.0
                    )));
                }
                Proof::NotNow => {
                    return Err(Miss::Behind(format!("block {} cannot be confirmed now", header.number.0)));
                }
                Proof::OtherBloom => {
                    return Err(Miss::Bad(format!(
                        "logs and receipts of block {} do not give its bloom",
                        header.number.0
                    )));
                }
            }
        }
        self.passed("bloom_false_positive_confirmed");
        Ok(())
    }

    /// Has another endpoint exactly these logs for the range?
    pub(super) async fn another_has_the_same(&self, range: HeightRange, logs: &[Log]) -> bool {
        for other in self.others() {
            if let Some(theirs) = self.range_of_other(&other, range).await {
                let same = theirs.len() == logs.len() && only_theirs(logs, &theirs).is_none();
                if same {
                    self.passed("second_endpoint_agrees");
                }
                return same;
            }
        }
        false
    }

    /// Compares accepted logs with an independent answer, as configured.
    pub(super) async fn audit(
        &self,
        range: HeightRange,
        mode: FetchMode,
        headers: &[Header],
        logs: &[Log],
    ) -> Result<(), Miss> {
        // Without blooms the other endpoint's word is all there is.
        let is_needed = self.adapter.config.bloom == BloomPolicy::Ignore;
        if self.adapter.config.audit == Audit::Off && !is_needed {
            return Ok(());
        }
        for other in self.others() {
            let theirs = match mode {
                FetchMode::History => self.range_of_other(&other, range).await,
                FetchMode::Tip if is_needed => self.blocks_of_other(&other, headers).await,
                FetchMode::Tip => {
                    let asked = self.blocks_of_other(&other, headers);
                    tokio::time::timeout(TIP_AUDIT_MAX, asked).await.unwrap_or_else(|_| {
                        other.gave_up();
                        None
                    })
                }
            };
            let Some(theirs) = theirs else { continue };
            return match only_theirs(logs, &theirs) {
                None if theirs.len() < logs.len() => {
                    // What we have was found in the headers' blooms: the other one left something out.
                    other.penalise();
                    self.passed("second_endpoint_has_less");
                    Ok(())
                }
                None => {
                    self.passed("second_endpoint_agrees");
                    Ok(())
                }
                Some(number) => self.arbitrate(number, headers, logs, &other).await,
            };
        }
        if is_needed {
            return Err(Miss::Behind(format!(
                "no second endpoint confirms {range} now, and blooms are ignored on this network"
            )));
        }
        if self.adapter.config.audit != Audit::Receipts {
            return match mode {
                FetchMode::History => self.sample(headers, logs).await,
                FetchMode::Tip => Ok(()),
            };
        }
        for header in headers.iter().filter(|header| !of_block(logs, header).is_empty()) {
            match self.receipts_say(header, of_block(logs, header)).await? {
                Proof::Proven => self.passed("receipts_agree"),
                Proof::NotNow => {
                    return Err(Miss::Behind(format!("block {} cannot be audited now", header.number.0)));
                }
                Proof::OtherBloom | Proof::NotServed => {}
            }
        }
        Ok(())
    }

    /// Nobody else can be asked: the receipts of one block of the range, so that a node that leaves single logs
    /// out is found out sooner or later. The block is drawn by the hash of the first one.
    async fn sample(&self, headers: &[Header], logs: &[Log]) -> Result<(), Miss> {
        let with_logs: Vec<&Header> =
            headers.iter().filter(|header| !of_block(logs, header).is_empty()).collect();
        let Some(first) = headers.first().filter(|_| !with_logs.is_empty()) else { return Ok(()) };
        let draw = first.hash.0[24..].iter().fold(0_usize, |draw, byte| draw << 8 | usize::from(*byte));
        let header = with_logs[draw % with_logs.len()];
        // What cannot be had now is no reason to stand still: the next range draws again.
        if self.receipts_say(header, of_block(logs, header)).await? == Proof::Proven {
            self.passed("receipts_sample");
        }
        Ok(())
    }

    /// The logs another endpoint has for the range; `None` when it cannot say or is not that far.
    async fn range_of_other(&self, other: &Endpoint, range: HeightRange) -> Option<Vec<Log>> {
        let logs = Call::new("eth_getLogs", json!([self.adapter.by_range(range)]));
        let head = Call::new("eth_blockNumber", json!([]));
        self.sent(other, 2);
        let (logs, head) = self.adapter.pool.pair::<Vec<Log>, Quantity>(other, logs, head).await.ok()?;
        let (logs, head) = (logs.ok()?, head.ok()?);
        other.saw_head(head.0);
        (head.0 >= range.last().0).then(|| kept(logs))
    }

    /// The logs another endpoint has for these blocks, by hash.
    async fn blocks_of_other(&self, other: &Endpoint, headers: &[Header]) -> Option<Vec<Log>> {
        let calls: Vec<Call> = headers
            .iter()
            .map(|header| Call::new("eth_getLogs", json!([self.adapter.by_hash(&header.hash.0)])))
            .collect();
        self.sent(other, calls.len());
        let answers = self.adapter.pool.batch::<Vec<Log>>(other, &calls).await.ok()?;
        let answers: Option<Vec<Vec<Log>>> = answers.into_iter().map(Result::ok).collect();
        Some(kept(answers?.into_iter().flatten().collect()))
    }

    /// Another endpoint has a log of this block that we have not, or has it otherwise: receipts decide.
    async fn arbitrate(
        &self,
        number: u64,
        headers: &[Header],
        logs: &[Log],
        other: &Endpoint,
    ) -> Result<(), Miss> {
        if let Some(header) = headers.iter().find(|header| header.number.0 == number)
            && self.receipts_say(header, of_block(logs, header)).await? == Proof::Proven
        {
            other.penalise();
            self.passed("receipts_agree");
            return Ok(());
        }
        Err(Miss::Bad(format!(
            "{} and {} disagree about the logs of block {number}",
            self.endpoint.label(),
            other.label()
        )))
    }

    fn others(&self) -> Vec<Arc<Endpoint>> {
        let mut ranked = self.adapter.pool.ranked();
        ranked.retain(|endpoint| !Arc::ptr_eq(endpoint, self.endpoint));
        ranked
    }

    /// Asks `endpoint` for the logs of these blocks by hash: they must be those we have.
    async fn same_by_hash(
        &self,
        endpoint: &Endpoint,
        suspects: &[&Header],
        logs: &[Log],
    ) -> Result<(), Miss> {
        let calls: Vec<Call> = suspects
            .iter()
            .map(|header| Call::new("eth_getLogs", json!([self.adapter.by_hash(&header.hash.0)])))
            .collect();
        self.sent(endpoint, calls.len());
        let answers = self.adapter.pool.batch::<Vec<Log>>(endpoint, &calls).await?;
        for (header, answer) in suspects.iter().zip(answers) {
            let theirs = answer?;
            let more = theirs.iter().filter(|log| log.removed != Some(true)).count();
            if more > of_block(logs, header).len() {
                return Err(Miss::Bad(format!(
                    "{} hid logs of block {}: {} has more",
                    self.endpoint.label(),
                    header.number.0,
                    endpoint.label()
                )));
            }
        }
        Ok(())
    }

    /// What the block's receipts say about `logs`, its logs of ours; an error when they show more.
    async fn receipts_say(&self, header: &Header, logs: &[Log]) -> Result<Proof, Miss> {
        let expected = header.logs_bloom.as_deref();
        let mut best = Proof::NotServed;
        for endpoint in std::iter::once(Arc::clone(self.endpoint)).chain(self.others()) {
            let receipts = match self.receipts_of(&endpoint, header.number.0).await {
                Ok(receipts) => receipts,
                // A plain refusal will not change by asking again; anything else may.
                Err(Miss::Rpc(RpcError::Refused { class: Class::UnknownMethod | Class::Other, .. })) => {
                    continue;
                }
                Err(_) => {
                    best = best.max(Proof::NotNow);
                    continue;
                }
            };
            let count_fits = header.transactions.is_none_or(|count| count.0 == receipts.len());
            if !count_fits || receipts.iter().any(|receipt| receipt.block_hash != header.hash) {
                best = best.max(Proof::NotNow);
                continue;
            }
            let all = || receipts.iter().flat_map(|receipt| &receipt.logs);
            let shown = all().filter(|log| self.adapter.filter.matches(log)).count();
            if shown > logs.len() {
                return Err(Miss::Bad(format!(
                    "{} hid logs of block {}: its receipts have {shown}, {} came",
                    self.endpoint.label(),
                    header.number.0,
                    logs.len()
                )));
            }
            // Without a bloom the number of receipts must do: they are as many as the block has transactions.
            let is_whole = match expected {
                Some(expected) => bloom::of_logs(all()) == *expected,
                None => header.transactions.is_some(),
            };
            if is_whole && shown == logs.len() {
                return Ok(Proof::Proven);
            }
            best = best.max(Proof::OtherBloom);
        }
        Ok(best)
    }

    /// The receipts of a block: in one call, or one by one where the endpoint knows no better.
    pub(super) async fn receipts_of(&self, endpoint: &Endpoint, number: u64) -> Result<Vec<Receipt>, Miss> {
        let call = Call::new("eth_getBlockReceipts", json!([hex_number(number)]));
        self.sent(endpoint, 1);
        let missing = || Miss::Behind(format!("{} has no receipts of block {number} now", endpoint.label()));
        match self.adapter.pool.call::<Option<Vec<Receipt>>>(endpoint, &call).await {
            Ok(receipts) => receipts.ok_or_else(missing),
            Err(error) if error.class() == Class::UnknownMethod => {
                self.sent(endpoint, 1);
                let block =
                    self.adapter.pool.call::<Option<TxHashes>>(endpoint, &header_call(number)).await?;
                let hashes = block.ok_or_else(missing)?.transactions;
                let calls: Vec<Call> =
                    hashes.iter().map(|hash| Call::new("eth_getTransactionReceipt", json!([hash]))).collect();
                self.sent(endpoint, calls.len());
                let answers = self.adapter.pool.batch::<Option<Receipt>>(endpoint, &calls).await?;
                answers.into_iter().map(|answer| answer?.ok_or_else(missing)).collect()
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// The logs of one block in a list ordered by height.
fn of_block<'a>(logs: &'a [Log], header: &Header) -> &'a [Log] {
    let start = logs.partition_point(|log| log.block_number.0 < header.number.0);
    let end = logs.partition_point(|log| log.block_number.0 <= header.number.0);
    &logs[start..end]
}

fn kept(mut logs: Vec<Log>) -> Vec<Log> {
    logs.retain(|log| log.removed != Some(true));
    logs
}

/// The first block of which `theirs` has a log that `ours` has not, or has otherwise.
fn only_theirs(ours: &[Log], theirs: &[Log]) -> Option<u64> {
    let place = |log: &Log| (log.block_number.0, log.log_index.0);
    let same = |a: &Log, b: &Log| {
        a.block_hash == b.block_hash
            && a.transaction_hash == b.transaction_hash
            && a.address == b.address
            && a.topics == b.topics
            && a.data == b.data
    };
    let extra = theirs.iter().find(|log| {
        let at = ours.binary_search_by_key(&place(log), place);
        !at.is_ok_and(|at| same(&ours[at], log))
    });
    extra.map(|log| log.block_number.0)
}
