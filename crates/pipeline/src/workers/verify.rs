//! `tidemark verify ledger`: the invariants, each a question to the whole database; no answer is good.

use tidemark_model::ids::NetworkId;
use tidemark_store::{Tx, checks, digest};

use super::WorkError;

/// A row that breaks an invariant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The invariant's name.
    pub check: &'static str,
    /// The row, and what is wrong with it.
    pub detail: String,
}

/// Rows named per invariant.
const ROWS_PER_CHECK: i64 = 100;

/// All rows that break an invariant of the ledger, some of each. Call it in a snapshot transaction
/// (`Conn::snapshot_tx`), so that all invariants see one state.
pub async fn verify_ledger(tx: &Tx<'_>, network: NetworkId) -> Result<Vec<Violation>, WorkError> {
    let mut violations = Vec::new();
    for check in checks::CHECKS {
        let rows = checks::run(tx, check, network, ROWS_PER_CHECK).await?;
        violations.extend(rows.into_iter().map(|detail| Violation { check: check.name, detail }));
    }
    let (kept, found) = (digest::read(tx, network).await?, digest::recompute(tx, network).await?);
    for bucket in 0..=u8::MAX {
        let kept = kept.get(&bucket).copied().unwrap_or_default();
        let found = found.get(&bucket).copied().unwrap_or_default();
        if kept != found {
            let detail = format!("bucket {bucket}: kept {}, the rows give {}", kept.0, found.0);
            violations.push(Violation { check: "digest_equals_the_rows", detail });
        }
    }
    for violation in &violations {
        tracing::error!(network = %network, check = violation.check, detail = %violation.detail, "invariant broken");
    }
    metrics::gauge!("ledger_invariant_violations", "network" => network.to_string())
        .set(u32::try_from(violations.len()).map_or(f64::MAX, f64::from));
    Ok(violations)
}
