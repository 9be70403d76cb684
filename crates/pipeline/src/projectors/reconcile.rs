//! The safety net of S0 §16.4: samples compared with the ledger, results written down. What is found is
//! rebuilt from the source ([`super::rebuild_projection`]), never patched.

use serde_json::json;
use tidemark_store::Conn;
use tidemark_store::projection::check::{self, Mismatch};
use uuid::Uuid;

use super::WorkError;

/// Alert above this rate (S0 §16.4).
pub const MISMATCH_RATE_MAX: f64 = 0.001;
/// Stats are counted over whole collections: only some of them.
const COLLECTIONS_MAX: i64 = 20;
/// Most mismatches kept as evidence per run.
const EVIDENCE_MAX: usize = 20;

/// One projection's result.
#[derive(Debug, Clone, PartialEq)]
pub struct Reconciled {
    /// Which projection.
    pub projection: &'static str,
    /// Keys looked at: assets, or collections.
    pub sample_size: i64,
    /// Keys at which it is not what the ledger says.
    pub mismatches_found: i64,
    /// Their share.
    pub mismatch_rate: f64,
    /// Some of them.
    pub evidence: Vec<Mismatch>,
}

/// What a reconciliation found.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ReconciliationReport {
    /// One entry per projection.
    pub runs: Vec<Reconciled>,
}

impl ReconciliationReport {
    /// Is any projection further off than the alert allows?
    pub fn is_alarming(&self) -> bool {
        self.runs.iter().any(|run| run.mismatch_rate > MISMATCH_RATE_MAX)
    }
}

/// Compares about `sample` random assets with the ledger in one snapshot and writes
/// system.reconciliation_runs. Rows that the projector has yet to write count as mismatches: run it again
/// before you believe a small number on a busy system.
pub async fn reconcile(conn: &mut Conn, sample: i64) -> Result<ReconciliationReport, WorkError> {
    let tx = conn.snapshot_tx().await?;
    let assets = check::sample(&tx, Uuid::from_u128(rand::random()), sample).await?;
    let looked_at = i64::try_from(assets.len()).expect("a sample fits");
    let cards = check::check_cards(&tx, &assets).await?;
    let ownership = check::check_ownership(&tx, &assets).await?;
    let (collections, stats) = check::check_stats(&tx, &assets, COLLECTIONS_MAX).await?;
    let collections = i64::try_from(collections).expect("at most twenty");
    let mut report = ReconciliationReport::default();
    for (projection, sample_size, found) in [
        ("asset_cards", looked_at, cards),
        ("ownership_view", looked_at, ownership),
        ("collection_stats", collections, stats),
    ] {
        let run = reconciled(projection, sample_size, found);
        let evidence: Vec<_> =
            run.evidence.iter().map(|one| json!({ "id": one.id, "detail": one.detail })).collect();
        check::record(
            &tx,
            projection,
            sample_size,
            run.mismatches_found,
            run.mismatch_rate,
            &json!({ "evidence": evidence }),
        )
        .await?;
        report.runs.push(run);
    }
    tx.commit().await?;
    Ok(report)
}

/// Several wrong rows of one asset are one mismatch: the sample is of assets.
fn reconciled(projection: &'static str, sample_size: i64, mut found: Vec<Mismatch>) -> Reconciled {
    let keys: std::collections::BTreeSet<Uuid> = found.iter().map(|one| one.id).collect();
    let mismatches = i32::try_from(keys.len()).unwrap_or(i32::MAX);
    let looked_at = f64::from(i32::try_from(sample_size.max(1)).unwrap_or(i32::MAX));
    found.truncate(EVIDENCE_MAX);
    Reconciled {
        projection,
        sample_size,
        mismatches_found: i64::from(mismatches),
        mismatch_rate: f64::from(mismatches) / looked_at,
        evidence: found,
    }
}
