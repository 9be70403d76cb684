//! One live block, start to end, under the network's lock.

use tidemark_model::chain::{BlockRef, Network, ParsedBlock};
use tidemark_model::envelope::Draft;
use tidemark_model::ids::Height;
use tidemark_store::Tx;
use tidemark_store::ledger;
use time::OffsetDateTime;

use super::openings::Openings;
use super::{Cause, WorkError, drafts, normalizer, state_updater};

/// A parsed block with what is known around it.
#[derive(Debug, Clone, Copy)]
pub struct BlockInput<'a> {
    /// The block.
    pub block: BlockRef,
    /// Its time.
    pub time: OffsetDateTime,
    /// Its events and the records that break their standard.
    pub parsed: &'a ParsedBlock,
    /// The chain's newest height.
    pub chain_head: Height,
    /// Answers from [`super::openings::prepare`].
    pub openings: &'a Openings,
}

/// What became of a block.
#[derive(Debug, Clone, PartialEq)]
pub enum BlockOutcome {
    /// Normalized; emit these in this transaction.
    Done(Vec<Draft>),
    /// It was here before, or lies in what is final already.
    Skipped,
    /// Blocks below it are missing, or not shown yet: defer. The newest contiguous height is given.
    Gap {
        /// Everything at or below is normalized.
        head: i64,
    },
}

/// Normalizes a block and moves the head and what is confirmed; then applies finality that was waiting for it.
pub async fn process_block(
    tx: &Tx<'_>,
    network: &Network,
    input: &BlockInput<'_>,
    cause: &Cause,
) -> Result<BlockOutcome, WorkError> {
    let mut progress = ledger::lock_progress(tx, network.id, network.start_block).await?;
    let height = input.block.height.as_i64();
    let BlockInput { block, parsed, chain_head, .. } = input;
    let hashes = std::collections::BTreeSet::from([block.hash]);
    if !ledger::orphaned_among(tx, network.id, &hashes).await?.is_empty() {
        // Late, from a branch that lost: kept in the log as reverted, and nothing else.
        let done =
            normalizer::normalize(tx, network, &parsed.events, *chain_head, input.openings, cause).await?;
        return Ok(BlockOutcome::Done(done.drafts));
    }
    if height <= progress.finalized {
        return Ok(BlockOutcome::Skipped);
    }
    if height > progress.head + 1 || progress.read_models_due {
        return Ok(BlockOutcome::Gap { head: progress.head });
    }
    if !ledger::record_block(tx, network.id, block).await? {
        return Ok(BlockOutcome::Skipped);
    }
    let done = normalizer::normalize(tx, network, &parsed.events, *chain_head, input.openings, cause).await?;
    normalizer::quarantine_records(tx, network, block, &parsed.quarantined).await?;
    let mut emitted = done.drafts;
    emitted.push(drafts::block_normalized(network, block, input.time, parsed.events.len(), cause));
    progress.head = progress.head.max(height);
    state_updater::confirm(network, *chain_head, &mut progress);
    ledger::set_progress(tx, network.id, &progress).await?;
    if progress.reported > progress.finalized {
        let reported = Height::from_i64(progress.reported);
        emitted.extend(state_updater::advance_finality(tx, network, reported, None, cause).await?.drafts);
    }
    Ok(BlockOutcome::Done(emitted))
}
