//! Bulk application of finalized history, segment by segment (cost.md: history is not live run faster).
//!
//! A segment is read from raw.*, parsed, folded and applied at once: normalizer, state-updater and projector
//! move together. An event at or below `history_height` counts as applied without
//! claim rows. The same events applied one by one give the same state; the digest test proves it.

mod apply;
pub mod segment;
mod worker;

pub use apply::{Writers, apply_blocks};
pub use worker::{HistoryOptions, HistoryProgress, HistoryWorker, SEGMENTS_MAX};

use tidemark_model::chain::{ChainAdapter, ParsedBlock, RawBlock};
use tidemark_model::ids::HeightRange;
use tidemark_store::StoreError;
use tidemark_store::raw::RawError;

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
