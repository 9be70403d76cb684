//! raw.*: blocks, transactions, events, lookups, evidence, orphans.
//!
//! - [`RawWriter`]: large bodies go to object storage first; then rows by COPY, straight or healing
//! - [`RawReader`]: blocks as they were received, whole, in windows of bounded size
//! - [`orphans`]: what a reorg takes out is kept aside until finality passes it
//! - [`audit`]: the set-based questions behind `verify completeness` and the repair of lookups

pub mod audit;
pub mod orphans;
mod read;
mod write;

pub use read::{
    BlockFound, RawChunks, RawReader, TxFound, block_at, block_lookup, blocks_between, covered_through,
    hash_at, newest_block, tx_lookup,
};
pub use write::{PAYLOAD_INLINE_MAX_BYTES, Prepared, RawWriter, Share, compact_evidence, counts};

use crate::blob::BlobError;
use crate::db::StoreError;

/// What can go wrong with raw rows: the database or the object storage.
#[derive(Debug, thiserror::Error)]
pub enum RawError {
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The object storage.
    #[error(transparent)]
    Blob(#[from] BlobError),
}
