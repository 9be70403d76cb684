//! The invariants, each a question to the database; no answer is good. `tidemark verify ledger` asks about
//! everything at once, [`keep_verifying`] about one slice after another, for ever.

use std::time::Duration;

use tidemark_model::chain::Network;
use tidemark_model::ids::{AssetId, NetworkId};
use tidemark_store::checks::{Broken, Slice};
use tidemark_store::{Db, StoreError, Tx, bulk, checks, digest};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::WorkError;

/// A row that breaks an invariant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The invariant's name.
    pub check: &'static str,
    /// The asset it is about, if it is about one.
    pub asset: Option<AssetId>,
    /// The row, and what is wrong with it.
    pub detail: String,
}

/// Rows named per invariant.
const ROWS_PER_CHECK: i64 = 100;

/// All rows that break an invariant of the ledger, some of each. Call it in a snapshot transaction
/// (`Conn::snapshot_tx`), so that all invariants see one state.
pub async fn verify_ledger(tx: &Tx<'_>, network: NetworkId) -> Result<Vec<Violation>, WorkError> {
    let violations = verify_slice(tx, network, Slice::All).await?;
    metrics::gauge!("ledger_invariant_violations", "network" => network.to_string())
        .set(u32::try_from(violations.len()).map_or(f64::MAX, f64::from));
    Ok(violations)
}

/// The same for one slice of all assets and events. It costs what the slice holds.
pub async fn verify_slice(
    tx: &Tx<'_>,
    network: NetworkId,
    slice: Slice,
) -> Result<Vec<Violation>, WorkError> {
    let mut violations = Vec::new();
    for check in checks::CHECKS {
        let rows = checks::run(tx, check, network, slice, ROWS_PER_CHECK).await?;
        violations.extend(rows.into_iter().map(|(asset, detail)| Violation {
            check: check.name,
            asset,
            detail,
        }));
    }
    if let Some(buckets) = slice.buckets() {
        let whole = if slice == Slice::All { slice } else { Slice::One(*buckets.start()) };
        let kept = digest::read(tx, network).await?;
        let found = digest::recompute(tx, network, whole).await?;
        for bucket in buckets {
            let kept = kept.get(&bucket).copied().unwrap_or_default();
            let found = found.get(&bucket).copied().unwrap_or_default();
            if kept != found {
                let detail = format!("bucket {bucket}: kept {}, the rows give {}", kept.0, found.0);
                violations.push(Violation { check: "digest_equals_the_rows", asset: None, detail });
            }
        }
    }
    for violation in &violations {
        tracing::error!(network_id = network.0, check = violation.check, detail = %violation.detail, action = "verify_ledger", "An invariant of the ledger is broken.");
    }
    Ok(violations)
}

/// Pause between two slices of 256; and how many times longer than the check itself it is at least, so that the
/// check never takes more than a few percent of the database.
const SLICE_EVERY: Duration = Duration::from_secs(10);
const PAUSE_FACTOR: u32 = 20;
/// A slice that takes longer than this is too wide: it has a core of its own, and live blocks need it.
const SLICE_LONG: Duration = Duration::from_millis(100);
/// A network that is further behind its chain than this is checked when it has caught up.
const CATCHING_UP_BLOCKS: i64 = 1000;

/// Which slice is next, and how wide: narrower where the ledger is large.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Turn {
    /// First two bytes of its first id.
    at: u16,
    /// How many such pairs of bytes it takes; a power of two, so that none reaches into two buckets of the digest.
    width: u16,
}

impl Turn {
    fn slice(self) -> Slice {
        Slice::Part(self.at, self.at | (self.width - 1))
    }
    /// The next one, after a slice that took this long.
    fn after(self, took: Duration) -> Self {
        let at = (self.at | (self.width - 1)).wrapping_add(1);
        let width = match took {
            long if long > SLICE_LONG => (self.width / 2).max(1),
            // Twice as wide only where it may begin.
            short if short < SLICE_LONG / 4 && at.is_multiple_of(self.width * 2) => (self.width * 2).min(256),
            _ => self.width,
        };
        Self { at, width }
    }
}

/// Checks the ledger of these networks slice by slice until told to stop. What is broken is logged, counted
/// (`ledger_invariant_violations`, `ledger_invariant_violations_total`) and kept in quarantine for an
/// operator, each row once. It repairs nothing.
pub async fn keep_verifying(
    db: Db,
    networks: Vec<Network>,
    stop: CancellationToken,
) -> Result<(), WorkError> {
    // Processes that start together do not look at the same slice. The first is the narrowest: nobody knows yet how long
    // one takes here, and a 256th of ten million events, none of them in memory, is half a minute of reading.
    let mut turn = Turn { at: u16::from(Uuid::new_v4().as_bytes()[0]) << 8, width: 1 };
    // After a start the status may be as old as the last end: it tells how far the chain has gone soon enough.
    let mut pause = SLICE_EVERY;
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(()),
            () = tokio::time::sleep(pause) => {}
        }
        let started = std::time::Instant::now();
        // While a first long history is built without its indexes, a slice would cost as much as everything.
        let ready = bulk::deferred_indexes(&db.conn().await?).await? == 0;
        for network in networks.iter().filter(|_| ready) {
            // Nor does it race a network that is catching up for pages: what it looks at is still there afterwards.
            if bulk::is_catching_up(&db.conn().await?, network.id, CATCHING_UP_BLOCKS).await? {
                continue;
            }
            let found = check_one(&db, network, turn.slice()).await?;
            metrics::gauge!("ledger_invariant_violations", "network" => network.id.to_string())
                .set(u32::try_from(found.len()).map_or(f64::MAX, f64::from));
        }
        let took = started.elapsed();
        if ready {
            turn = turn.after(took);
        }
        // Narrow slices come more often: a round takes as long as before, unless that is too much.
        pause = (SLICE_EVERY * u32::from(turn.width) / 256).max(took * PAUSE_FACTOR);
    }
}

/// Checks one slice in one snapshot, and keeps what is broken.
pub async fn check_one(db: &Db, network: &Network, slice: Slice) -> Result<Vec<Violation>, WorkError> {
    let mut conn = db.conn().await?;
    let tx = conn.snapshot_tx().await?;
    let violations = verify_slice(&tx, network.id, slice).await?;
    tx.rollback().await?;
    if !violations.is_empty() {
        let tx = conn.tx().await?;
        let new = keep(&tx, network.id, &violations).await?;
        tx.commit().await?;
        metrics::counter!("ledger_invariant_violations_total", "network" => network.id.to_string())
            .increment(u64::try_from(new).unwrap_or(u64::MAX));
    }
    Ok(violations)
}

async fn keep(tx: &Tx<'_>, network: NetworkId, violations: &[Violation]) -> Result<usize, StoreError> {
    let broken: Vec<(&'static str, Broken)> =
        violations.iter().map(|one| (one.check, (one.asset, one.detail.clone()))).collect();
    // The same row broken in the same way is one finding, however often it is found.
    let ids: Vec<Uuid> = violations
        .iter()
        .map(|one| {
            let name = format!("violation:{network}:{}:{}", one.check, one.detail);
            Uuid::new_v5(&tidemark_model::ids::NAMESPACE, name.as_bytes())
        })
        .collect();
    checks::set_aside(tx, network, &ids, &broken).await
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the database takes for them: together the slices are everything, each once, and no digest is left out.
    #[test]
    fn turns_cover_everything_without_overlap() {
        let long = SLICE_LONG * 2;
        for pattern in
            [&[Duration::ZERO][..], &[long], &[long, long, long, Duration::ZERO], &[SLICE_LONG / 2]]
        {
            let mut turn = Turn { at: 0, width: 256 };
            let (mut next, mut buckets) = (0_u32, Vec::new());
            for took in pattern.iter().cycle() {
                let Slice::Part(first, last) = turn.slice() else { panic!("a part") };
                assert_eq!(u32::from(first), next, "{turn:?}");
                assert_eq!(first >> 8, last >> 8, "it stays in one bucket");
                buckets.extend(turn.slice().buckets().into_iter().flatten());
                next = u32::from(last) + 1;
                if next > u32::from(u16::MAX) {
                    break;
                }
                turn = turn.after(*took);
            }
            assert_eq!(buckets, (0..=u8::MAX).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_slow_ledger_is_checked_in_narrow_slices_and_a_quick_one_in_wide_ones() {
        let mut turn = Turn { at: 0, width: 256 };
        for _ in 0..20 {
            turn = turn.after(SLICE_LONG * 2);
        }
        assert_eq!(turn.width, 1);
        for _ in 0..2_000 {
            turn = turn.after(Duration::ZERO);
        }
        assert_eq!(turn.width, 256);
    }
}
