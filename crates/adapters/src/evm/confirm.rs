//! Second opinions. A header's bloom that promises one of our events while none came is either a false alarm
//! of the bloom or a node that hides logs. So the block is asked for again by its hash, at the same endpoint
//! and at another one, and its receipts are read where a node serves them: receipts whose own bloom equals
//! the header's are complete, and settle the matter.

use std::sync::Arc;

use serde_json::json;
use tidemark_model::ids::HeightRange;
use tidemark_rpc::{Call, Class, Endpoint, RpcError};

use super::bloom;
use super::config::Audit;
use super::fetch::{Miss, Reader};
use super::hex_number;
use super::wire::{Header, Log, Receipt};

/// Receipts of a busy block are megabytes: with a second endpoint to ask, only so many suspects per range are
/// settled by receipts.
const RECEIPTS_MAX: usize = 32;

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
        let mut settled = true;
        for header in to_prove {
            match self.receipts_say(header, of_block(logs, header)).await? {
                Proof::Proven => {}
                // Two endpoints gave the same logs: the bloom is wrong, or receipts cannot be had.
                Proof::OtherBloom | Proof::NotServed | Proof::NotNow if enough => {}
                Proof::NotServed => settled = false,
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
        self.passed(if settled {
            "bloom_false_positive_confirmed"
        } else {
            "bloom_false_positive_asked_twice"
        });
        Ok(())
    }

    /// Compares accepted logs with an independent answer, as often as configured.
    pub(super) async fn audit(
        &self,
        range: HeightRange,
        headers: &[Header],
        logs: &[Log],
    ) -> Result<(), Miss> {
        let Audit::OneIn(every) = self.adapter.config.audit else { return Ok(()) };
        if range.from().0 % every.max(1) != 0 && every > 1 {
            return Ok(());
        }
        for other in self.others() {
            let call = Call::new("eth_getLogs", json!([self.adapter.by_range(range)]));
            self.sent(&other, 1);
            let Ok(theirs) = self.adapter.pool.call::<Vec<Log>>(&other, &call).await else { continue };
            let theirs: Vec<&Log> = theirs.iter().filter(|log| log.removed != Some(true)).collect();
            if let Some(number) = first_difference(logs, &theirs) {
                return self.arbitrate(number, headers, logs, &other).await;
            }
            self.passed("second_endpoint_agrees");
            return Ok(());
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

    /// Two endpoints disagree about a block: its receipts decide. Without them nobody is believed.
    async fn arbitrate(
        &self,
        number: u64,
        headers: &[Header],
        logs: &[Log],
        other: &Endpoint,
    ) -> Result<(), Miss> {
        let clash = format!(
            "{} and {} disagree about the logs of block {number}",
            self.endpoint.label(),
            other.label()
        );
        let Some(header) = headers.iter().find(|header| header.number.0 == number) else {
            return Err(Miss::Bad(clash));
        };
        if self.receipts_say(header, of_block(logs, header)).await? == Proof::Proven {
            other.penalise();
            self.passed("receipts_agree");
            return Ok(());
        }
        Err(Miss::Bad(clash))
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
        let Some(expected) = header.logs_bloom.as_deref() else { return Ok(Proof::NotServed) };
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
            if bloom::of_logs(all()) == *expected && shown == logs.len() {
                return Ok(Proof::Proven);
            }
            best = best.max(Proof::OtherBloom);
        }
        Ok(best)
    }

    /// The receipts of a block; a miss when the endpoint does not serve them.
    pub(super) async fn receipts_of(&self, endpoint: &Endpoint, number: u64) -> Result<Vec<Receipt>, Miss> {
        let call = Call::new("eth_getBlockReceipts", json!([hex_number(number)]));
        self.sent(endpoint, 1);
        let receipts = self.adapter.pool.call::<Option<Vec<Receipt>>>(endpoint, &call).await;
        match receipts {
            Ok(Some(receipts)) => Ok(receipts),
            Ok(None) => {
                Err(Miss::Behind(format!("{} has no receipts of block {number} now", endpoint.label())))
            }
            Err(error) if error.class() == Class::UnknownMethod => Err(Miss::Rpc(error)),
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

/// The first block about which two answers differ.
fn first_difference(ours: &[Log], theirs: &[&Log]) -> Option<u64> {
    let same = |a: &Log, b: &Log| {
        a.block_hash == b.block_hash
            && a.log_index == b.log_index
            && a.transaction_hash == b.transaction_hash
            && a.address == b.address
            && a.topics == b.topics
            && a.data == b.data
    };
    let differs = ours.iter().zip(theirs).find(|(a, b)| !same(a, b));
    if let Some((a, b)) = differs {
        return Some(a.block_number.0.min(b.block_number.0));
    }
    let longer = ours.get(theirs.len()).or_else(|| theirs.get(ours.len()).copied());
    longer.map(|log| log.block_number.0)
}
