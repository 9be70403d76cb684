//! The ledger's workers: functions from an ordered batch of facts to one transaction. They give the events to
//! emit back as drafts; the caller appends them to the outbox in the same transaction.
//!
//! - [`block`]: one live block, start to end, under the network's lock
//! - [`normalizer`]: events, movements, stubs
//! - [`state_updater`]: finality, owners, history, supply, digest
//! - [`reorg_handler`]: branches that lost, and the operator's rewind
//! - [`openings`]: what accounts held before our first block
//! - [`verify`]: the invariants

pub mod block;
pub(crate) mod book;
pub(crate) mod drafts;
pub mod normalizer;
pub mod openings;
pub mod reorg_handler;
pub mod state_updater;
pub mod verify;

pub use block::{BlockInput, BlockOutcome, process_block};
pub use normalizer::{Normalized, normalize};
pub use openings::{Openings, prepare};
pub use reorg_handler::{Reorged, handle_reorg, repair, rewind, take_back_above_head};
pub use state_updater::{Finalized, advance_finality};
pub use verify::{Violation, check_one, keep_verifying, verify_ledger};

use tidemark_model::chain::{BlockRef, ChainError};
use tidemark_store::StoreError;
use time::OffsetDateTime;

/// What made a worker act: the name and time of the event it handles. Ids of emitted events derive from it,
/// so handling the same event again emits the same events, and handling another never does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause {
    /// The handled event's id, or whatever names the work uniquely.
    pub id: String,
    /// When that happened; emitted events without a block time of their own carry it.
    pub at: OffsetDateTime,
}

/// Why a worker could not do its work. The transaction must be rolled back.
#[derive(Debug, thiserror::Error)]
pub enum WorkError {
    /// The database; its verdict says what next.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The chain could not be asked; its verdict says what next.
    #[error(transparent)]
    Chain(#[from] ChainError),
    /// The chain took back what it had called final: halt this network, call an operator.
    #[error("{network} took back block {block}, final up to {finalized}: halted until `tidemark rewind`")]
    FinalizedReverted {
        /// Network slug.
        network: String,
        /// The block that is gone.
        block: BlockRef,
        /// The ledger's finalized height.
        finalized: i64,
    },
    /// Finality names a block that the ledger has another version of: the reorg's message is on its way. Defer.
    #[error("{network} calls {block} final, the ledger has another block there: waiting for the reorg")]
    ReorgExpected {
        /// Network slug.
        network: String,
        /// The final block.
        block: BlockRef,
    },
}
