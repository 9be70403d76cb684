//! A projection from nothing, beside the live one, swapped in when it is ready.

use std::time::Duration;

use tidemark_store::projection::shadow::{self, Differences, ProjectionName};
use tidemark_store::{Db, StoreError, Verdict};

use super::WorkError;

/// Tries for the short lock of the swap; readers hold it for as long as their query takes.
const SWAP_TRIES: u32 = 20;
/// Between two tries.
const SWAP_WAIT: Duration = Duration::from_millis(500);

/// How far a rebuild is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// What it does now: `build`, `compare` or `swap`.
    pub phase: &'static str,
    /// Pieces done.
    pub done: u64,
    /// Pieces in all.
    pub total: u64,
    /// Rows built so far.
    pub rows: u64,
}

/// What a rebuild did.
#[derive(Debug, Clone, PartialEq)]
pub struct RebuildReport {
    /// Which projection.
    pub name: ProjectionName,
    /// Rows built.
    pub rows: u64,
    /// Rows that were different in the live table.
    pub differing: Differences,
}

/// Rebuilds `name` from the ledger while live goes on, reports what differs and swaps. On a system that
/// lags, rows that live was about to write count as differing. The replaced table stays for
/// [`undo_rebuild`] until the next rebuild, [`forget_rebuild`], or a day later [`forget_outdated_rebuilds`].
pub async fn rebuild_projection(
    db: &Db,
    name: ProjectionName,
    progress: &(dyn Fn(Progress) + Send + Sync),
) -> Result<RebuildReport, WorkError> {
    let mut conn = db.conn().await?;
    let tx = conn.tx().await?;
    shadow::begin(&tx, name).await?;
    tx.commit().await?;

    let slices = shadow::slices(name);
    let total = u64::from(slices) + 2;
    let tx = conn.snapshot_tx().await?;
    let mut rows = 0;
    for slice in 0..slices {
        progress(Progress { phase: "build", done: u64::from(slice), total, rows });
        rows += shadow::fill(&tx, name, slice).await?;
    }
    progress(Progress { phase: "compare", done: total - 2, total, rows });
    shadow::compare(&tx, name).await?;
    tx.commit().await?;

    progress(Progress { phase: "swap", done: total - 1, total, rows });
    for attempt in 1.. {
        let tx = conn.tx().await?;
        let swapped = match shadow::swap(&tx, name).await {
            Ok(differing) => tx.commit().await.map(|()| differing),
            Err(error) => Err(error),
        };
        match swapped {
            Ok(differing) => {
                progress(Progress { phase: "swap", done: total, total, rows });
                return Ok(RebuildReport { name, rows, differing });
            }
            Err(error) if attempt < SWAP_TRIES && may_repeat(&error) => tokio::time::sleep(SWAP_WAIT).await,
            Err(error) => return Err(error.into()),
        }
    }
    unreachable!("the loop returns on its last attempt")
}

/// A commit whose answer was lost may have swapped already, and a second swap would take that for live: only
/// what the server refused is repeated.
fn may_repeat(error: &StoreError) -> bool {
    error.code().is_some() && error.verdict() == Verdict::Retry
}

/// Puts back what the last rebuild of `name` replaced. False: there is nothing to undo.
pub async fn undo_rebuild(db: &Db, name: ProjectionName) -> Result<bool, WorkError> {
    let mut conn = db.conn().await?;
    let tx = conn.tx().await?;
    let undone = shadow::undo(&tx, name).await?;
    tx.commit().await?;
    Ok(undone)
}

/// Drops what rebuilds of long ago kept for undo; gives their names. Call it now and then.
pub async fn forget_outdated_rebuilds(db: &Db) -> Result<Vec<ProjectionName>, WorkError> {
    let names = shadow::outdated(&db.conn().await?).await?;
    for name in &names {
        forget_rebuild(db, *name).await?;
    }
    Ok(names)
}

/// Drops what the last rebuild of `name` kept for undo.
pub async fn forget_rebuild(db: &Db, name: ProjectionName) -> Result<(), WorkError> {
    let mut conn = db.conn().await?;
    let tx = conn.tx().await?;
    shadow::forget(&tx, name).await?;
    tx.commit().await?;
    Ok(())
}
