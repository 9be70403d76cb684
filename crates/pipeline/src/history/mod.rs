//! Bulk application of finalized history, segment by segment (cost.md: history is not live run faster).
//!
//! A segment is read from raw.*, parsed, folded and applied at once: normalizer, state-updater and projector
//! move together. An event at or below `history_height` counts as applied without
//! claim rows. The same events applied one by one give the same state; the digest test proves it.

mod apply;
pub mod segment;
mod worker;

pub use apply::{Writers, apply_blocks};
pub use worker::{HistoryOptions, HistoryProgress, HistoryWorker, SEGMENTS_MAX, Warmth};

use tidemark_model::OffsetDateTime;
use tidemark_model::chain::{ChainAdapter, ParsedBlock, RawBlock};
use tidemark_model::ids::{HeightRange, NetworkId};
use tidemark_store::bulk::Progress;
use tidemark_store::projection::built_last;
use tidemark_store::raw::RawError;
use tidemark_store::{Conn, StoreError, Tx, bulk, log_height, projection};

use crate::stage_time;

/// Why history cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The database failed, or somebody else moved the ledger.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The chain could not be asked for balances older than the start block.
    #[error(transparent)]
    Chain(#[from] tidemark_model::chain::ChainError),
    /// Finality could not be applied to what live had left open.
    #[error(transparent)]
    Work(#[from] crate::workers::WorkError),
    /// An event could not be emitted.
    #[error(transparent)]
    Outbox(#[from] tidemark_store::outbox::OutboxError),
    /// Raw rows could not be read back.
    #[error(transparent)]
    Raw(#[from] RawError),
    /// The task that reads and parses ahead ended unexpectedly.
    #[error("the parser of a segment ended: {reason}")]
    Parser {
        /// How.
        reason: String,
    },
    /// A segment's balances went below zero in ever new places.
    #[error("blocks {range} of {network} cannot be applied: balances go below zero in ever new places")]
    NeverWhole {
        /// Network slug.
        network: String,
        /// The segment.
        range: HeightRange,
    },
}

/// Builds the read models of a first history that were put off ([`built_last`]), unless they are built already. They
/// are not shown before [`show`]: their indexes come first. With a second connection if there is one. `false`: not now,
/// because something of the network is open or on its way to the projector.
pub async fn build(
    conn: &mut Conn,
    mut second: Option<Conn>,
    network: NetworkId,
) -> Result<bool, StoreError> {
    let Some((tx, progress)) = hold_still(conn, network).await? else { return Ok(false) };
    if progress.read_models_due && progress.read_models_height.is_none() {
        built_last::build(&tx, network, second.as_mut()).await?;
    }
    tx.commit().await?;
    Ok(true)
}

/// Shows the read models that were put off: built, and caught up with what came since. `second` and `false` as of
/// [`build`].
pub async fn show(conn: &mut Conn, mut second: Option<Conn>, network: NetworkId) -> Result<bool, StoreError> {
    let started = std::time::Instant::now();
    let Some((tx, progress)) = hold_still(conn, network).await? else { return Ok(false) };
    if !progress.read_models_due {
        return Ok(true); // Somebody else was faster.
    }
    let from = match progress.read_models_height {
        Some(from) => from,
        None => {
            built_last::build(&tx, network, second.as_mut()).await?;
            progress.head
        }
    };
    built_last::catch_up(&tx, second.as_mut(), network, from, OffsetDateTime::now_utc()).await?;
    tx.commit().await?;
    tracing::info!(
        network_id = network.0,
        height = progress.head,
        seconds = started.elapsed().as_secs(),
        action = "show_read_models",
        "Owners, assets and collections are shown."
    );
    Ok(true)
}

/// A transaction that holds the network's ledger and, if its read models are due, projections where they are; none if
/// something of it is open or on its way.
async fn hold_still(conn: &mut Conn, network: NetworkId) -> Result<Option<(Tx<'_>, Progress)>, StoreError> {
    if bulk::projector_lags(conn, network).await? {
        return Ok(None);
    }
    let tx = conn.tx().await?;
    let progress = bulk::lock_progress(&tx, network).await?;
    if !progress.read_models_due {
        return Ok(Some((tx, progress)));
    }
    if progress.finalized != progress.head {
        return Ok(None);
    }
    // Transfers of a segment that was never applied would be counted by the second connection.
    if log_height::settle(&tx, network, progress.head).await? {
        tx.commit().await?;
        return Ok(None);
    }
    projection::lock_network(&tx, network).await?;
    Ok(Some((tx, progress)))
}

/// Parses blocks and lets their records go.
pub(crate) fn parse(adapter: &dyn ChainAdapter, blocks: Vec<RawBlock>) -> Vec<(RawBlock, ParsedBlock)> {
    let started = std::time::Instant::now();
    let parsed = blocks
        .into_iter()
        .map(|mut block| {
            let parsed = adapter.parse(&block);
            block.records = Vec::new(); // Not needed any more; a segment waits in memory.
            (block, parsed)
        })
        .collect();
    stage_time::count("parse", started);
    parsed
}
