//! Read models, rebuilt by key from the ledger. Live, replay, reorg and repair are one path
//! ([`rebuild_keys`]); a full rebuild ([`rebuild_projection`]) runs the same SQL over all keys.
//!
//! # What each table holds
//!
//! Any other path that writes these tables (bulk history) must agree with this, row for row (`updated_at`
//! aside), and must take [`tidemark_store::projection::lock_network`] first.
//!
//! - **transfers**: one row per canonical event of kind transfer, mint or burn (not opening, not metadata).
//!   Place and block from normalized_events, `qty` without sign. A reverted event keeps its row with
//!   `is_reverted`; an event that was included again in another block moves there.
//! - **ownership_view** (asset, account): `qty` = ownership_current + legs in unfinalized_deltas;
//!   `qty_finalized` = ownership_current, or 0; `open_height` = height of the newest unfinalized leg, none without
//!   one; `finality_status` = `pending` with one, else `finalized`. When the network's finality line reaches
//!   `open_height` the row stands for itself with `qty_finalized` = `qty` and is not written again (ADR 0017):
//!   read it through `projection.ownership_now`. No row when both quantities are 0. A negative quantity (a
//!   contract that breaks its standard) is shown as it is.
//! - **asset_cards**: one per catalog asset that any event named. `supply` = catalog supply (finalized) + sum
//!   of the asset's unfinalized legs; `is_burned` = supply 0, and the catalog says burned, or its finalized
//!   supply is not 0, or an unfinalized mint or burn exists; `open_height` and `finality_status` as above over all
//!   unfinalized events of the asset (`projection.cards_now`); `last_height` = height of its newest transfer that is not reverted, 0 without one.
//! - **collection_holders** (collection, account): over rows of ownership_view with qty > 0: `asset_count` =
//!   how many, `qty` = their sum. No row at 0.
//! - **collection_stats**: one per collection with a card. `owners_count` = rows in collection_holders;
//!   `asset_count` = cards with supply > 0 (not burned, and not only ever minted in a block that was
//!   reverted); `total_supply`, `stub_count` = sums over cards; `transfer_count` = transfers that are not
//!   reverted; `last_height` = newest of its cards. The rest is the catalog's.
//! - **account_summaries**: one per account with `asset_count` (ownership_view rows with qty > 0) or
//!   `transfer_count` (transfers not reverted with the account on either side, a transfer to oneself counts
//!   once) above 0. `last_seen_at` = the later of first_seen_at and the newest such transfer.
//!
//! The last three are kept by differences of the first three, computed in the same transaction. That is why
//! every writer takes the network's lock: a difference needs a fixed start.
//!
//! # Cost
//!
//! A batch costs what it touches. A class with a million holders is not read: events name their two sides,
//! and `ledger.ownership.changed` (finalized, confirmed, reorg, opening) concerns only those and rows that
//! depend on something above finality, which are found by their own index. Only a rewind recomputes whole
//! assets. What a reorg takes back costs one step into the transfers' indexes per asset, collection and
//! account, for the newest one that is left (block times do not go back along a chain).
//!
//! # What the ledger must do
//!
//! Every change of an event is followed by `ledger.event.normalized` or `ledger.event.reverted` with its id,
//! every change of finality by `ledger.ownership.changed` with the assets. An event that is stored reverted
//! from the start (it came late from an orphaned block) is named by `ledger.event.reverted` alone, and shown
//! struck through. An event that at finality did something else than its legs said (refused, or with an opening
//! that nobody could tell before) is named again by `ledger.event.normalized`.

mod addresses;
mod keyed;
mod rebuild;
mod reconcile;
mod touched;

pub use addresses::Addresses;
pub use keyed::{Beside, Projected, rebuild_and_emit, rebuild_keys};
pub use rebuild::{
    Progress, RebuildReport, forget_outdated_rebuilds, forget_rebuild, rebuild_projection, undo_rebuild,
};
pub use reconcile::{MISMATCH_RATE_MAX, Reconciled, ReconciliationReport, reconcile};
pub use tidemark_store::projection::check::Mismatch;
pub use tidemark_store::projection::shadow::{Difference, Differences, ProjectionName};
pub use tidemark_store::projection::{
    BlockCard, NetworkStatusInput, count_activity, forget_activity, lock_network, refresh_network_status,
    remove_block_cards, upsert_block_cards,
};
pub use touched::{Touched, touched};

use tidemark_store::StoreError;
use tidemark_store::outbox::OutboxError;
use tidemark_store::together::Echo;

impl Echo for WorkError {
    fn is_echo(&self) -> bool {
        match self {
            Self::Store(error) => error.is_echo(),
            Self::Emit(error) => error.is_echo(),
            Self::Payload { .. } => false,
        }
    }
}

/// Why a batch could not be projected.
#[derive(Debug, thiserror::Error)]
pub enum WorkError {
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What the batch means for others could not be emitted.
    #[error(transparent)]
    Emit(#[from] OutboxError),
    /// An event of ours does not say what its schema promises: park it, do not repeat.
    #[error("{subject} {event_id} cannot be read: release it from the DLQ after the producer is mended")]
    Payload {
        /// What kind of event.
        subject: String,
        /// Which one.
        event_id: String,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
}
