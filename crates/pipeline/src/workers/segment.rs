//! A segment of final history in bulk: the same rules and the same tables as live, without the detour over
//! open legs and claims. A key that becomes final here is the claim; `history_height` says so for all. A
//! segment applied in bulk equals its blocks applied one by one.

use std::collections::BTreeSet;

use tidemark_model::chain::{BlockRef, Network, Quarantined, RawEvent, Standard};
use tidemark_model::envelope::Draft;
use tidemark_model::finality::FinalityStatus;
use tidemark_model::ids::{AssetId, EventId, Height, HeightRange};
use tidemark_store::ledger::{self, MovementRow, NormalizedRow};
use tidemark_store::{Tx, catalog};

use super::openings::{self, Openings};
use super::{Cause, WorkError, drafts, normalizer, state_updater};

/// Events of a range of final blocks.
#[derive(Debug, Clone, Copy)]
pub struct SegmentInput<'a> {
    /// The heights it covers, without hole; all of them final.
    pub range: HeightRange,
    /// Their events.
    pub events: &'a [RawEvent],
    /// Their records that break their standard.
    pub quarantined: &'a [(BlockRef, Quarantined)],
    /// Answers from [`openings::prepare`].
    pub openings: &'a Openings,
}

/// What applying a segment did.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Segment {
    /// Events to emit: of what was live until now, and the new finalized height. History has no event per
    /// row; `touched_assets` is for whoever rebuilds read models.
    pub drafts: Vec<Draft>,
    /// Events written.
    pub events: usize,
    /// Movements applied.
    pub applied: usize,
    /// Events set aside.
    pub quarantined: Vec<EventId>,
    /// Assets never seen before.
    pub new_assets: BTreeSet<AssetId>,
    /// Assets whose owners changed.
    pub touched_assets: BTreeSet<AssetId>,
}

/// What became of a segment.
#[derive(Debug, Clone, PartialEq)]
pub enum SegmentOutcome {
    /// Applied; emit its drafts in this transaction.
    Applied(Segment),
    /// All of it was applied before.
    Skipped,
    /// Blocks below it are missing or not final yet: defer.
    Gap {
        /// Everything at or below is applied.
        head: i64,
    },
}

/// Normalizes and applies a segment. Segments of a network are applied in order of height, under its lock.
pub async fn apply_segment(
    tx: &Tx<'_>,
    network: &Network,
    input: &SegmentInput<'_>,
    cause: &Cause,
) -> Result<SegmentOutcome, WorkError> {
    let mut progress = ledger::lock_progress(tx, network.id, network.start_block).await?;
    let last = input.range.last();
    if last.as_i64() <= progress.finalized {
        return Ok(SegmentOutcome::Skipped);
    }
    if input.range.from().as_i64() > progress.head + 1 {
        return Ok(SegmentOutcome::Gap { head: progress.head });
    }
    let mut segment = Segment::default();
    // What came live below the segment's end is final as well, and comes first.
    if progress.head > progress.finalized {
        let done = state_updater::advance_finality(tx, network, last, None, cause).await?;
        segment.drafts = done.drafts;
        segment.quarantined = done.quarantined;
        progress = ledger::lock_progress(tx, network.id, network.start_block).await?;
        if progress.finalized < progress.head.min(last.as_i64()) {
            return Ok(SegmentOutcome::Gap { head: progress.finalized });
        }
    }
    let new = input
        .events
        .iter()
        .filter(|event| event.block_number.as_i64() > progress.finalized)
        .filter(|event| input.range.contains(event.block_number));
    let events = normalizer::once_each(new, &BTreeSet::new());
    write(tx, network, &events, last, input.openings, &mut segment).await?;
    for (block, record) in input.quarantined {
        normalizer::quarantine_records(tx, network, block, std::slice::from_ref(record)).await?;
    }
    progress.head = progress.head.max(last.as_i64());
    progress.finalized = progress.finalized.max(last.as_i64());
    progress.reported = progress.reported.max(last.as_i64());
    progress.history = last.as_i64();
    ledger::set_progress(tx, network.id, &progress).await?;
    state_updater::forget_old_blocks(tx, network, last.as_i64()).await?;
    segment.drafts.push(drafts::finality_advanced(network, last.as_i64(), cause));
    Ok(SegmentOutcome::Applied(segment))
}

async fn write(
    tx: &Tx<'_>,
    network: &Network,
    events: &[&RawEvent],
    last: Height,
    openings: &Openings,
    segment: &mut Segment,
) -> Result<(), WorkError> {
    let nothing_orphaned = BTreeSet::new();
    let rows: Vec<NormalizedRow> = events
        .iter()
        .map(|event| NormalizedRow {
            status: FinalityStatus::Finalized,
            ..normalizer::normalized_row(network, event, last, &nothing_orphaned)
        })
        .collect();
    let stubs = normalizer::stubs(network, events, &rows);
    segment.new_assets = catalog::ensure_stubs(tx, network.id, &stubs).await?;
    let standard = |asset: AssetId| stubs.assets.get(&asset).map(|stub| stub.standard);
    let by_standard: Vec<(Standard, &NormalizedRow)> =
        rows.iter().filter_map(|row| Some((standard(row.asset?)?, row))).collect();
    let plan = openings::plan(tx, network, &by_standard, openings).await?;
    catalog::mark_partial(tx, &plan.partial.iter().copied().collect::<Vec<_>>()).await?;

    let mut written = rows;
    written.extend(plan.rows);
    written.sort_by_key(|row| (row.block.height, row.event_index, row.sub_index, row.id));
    let changed = ledger::write_segment(tx, network.id, &written).await?;
    segment.events = changed.len();
    let movements: Vec<MovementRow> = written
        .iter()
        .filter(|row| changed.contains(&row.id))
        .filter_map(|row| {
            let delta = row.delta?;
            Some(MovementRow {
                event: row.id,
                source_event_id: row.source_event_id.clone(),
                kind: row.kind,
                delta,
                collection: row.collection?,
                standard: standard(delta.asset)?,
                block: row.block,
                event_index: row.event_index,
                event_time: row.event_time,
            })
        })
        .collect();
    let outcome = state_updater::apply(tx, network, movements, last.as_i64()).await?;
    segment.applied = outcome.applied;
    segment.quarantined.extend(outcome.quarantined);
    segment.touched_assets = outcome.touched;
    Ok(())
}
