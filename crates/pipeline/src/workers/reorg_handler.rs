//! The reorg-handler: branches that lost, by block hash and never by number, because the new branch's events
//! may be here already. Only what the orphaned blocks touched is touched. And the operator's rewind, which
//! rebuilds from the event log alone.

use std::collections::{BTreeMap, BTreeSet};

use alloy_primitives::U256;
use tidemark_model::chain::{BlockRef, EventKind, Network};
use tidemark_model::envelope::Draft;
use tidemark_model::ids::{AssetId, BlockHash, EventId, Height};
use tidemark_store::catalog::Supply;
use tidemark_store::checks::Slice;
use tidemark_store::ledger::{self, Pair};
use tidemark_store::{Tx, applied, catalog, digest, ownership, projection};

use super::book::rows;
use super::{Cause, WorkError, drafts, state_updater};

/// What handling a reorg or a rewind did.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reorged {
    /// Events to emit, in order.
    pub drafts: Vec<Draft>,
    /// Events that were undone.
    pub reverted: usize,
    /// Events that came back with their block.
    pub restored: usize,
    /// Assets touched either way.
    pub touched_assets: BTreeSet<AssetId>,
    /// Everything at or below is normalized; the new branch follows from here.
    pub head: i64,
}

/// Takes the events of orphaned blocks back and restores those of canonical ones that return. A block that
/// is final for us never goes: then the network halts.
pub async fn handle_reorg(
    tx: &Tx<'_>,
    network: &Network,
    orphaned: &[BlockRef],
    canonical: &[BlockRef],
    cause: &Cause,
) -> Result<Reorged, WorkError> {
    let mut progress = ledger::lock_progress(tx, network.id, network.start_block).await?;
    let canonical_hashes: BTreeSet<BlockHash> = canonical.iter().map(|block| block.hash).collect();
    let mut orphaned: Vec<BlockRef> =
        orphaned.iter().filter(|block| !canonical_hashes.contains(&block.hash)).copied().collect();
    orphaned.sort_by_key(|block| (block.height, block.hash));
    let hashes: Vec<BlockHash> = orphaned.iter().map(|block| block.hash).collect();
    // A new reorg takes at least one block that stood until now. One that takes only what is gone is an old
    // message again, and its winners may have lost since.
    let gone = ledger::orphaned_among(tx, network.id, &hashes.iter().copied().collect()).await?;
    if !hashes.is_empty() && hashes.iter().all(|hash| gone.contains(hash)) {
        return Ok(Reorged { head: progress.head, ..Reorged::default() });
    }
    let known = ledger::recent_among(tx, network.id, &hashes).await?;
    if let Some(block) = known.iter().find(|block| block.height.as_i64() <= progress.finalized) {
        return Err(WorkError::FinalizedReverted {
            network: network.slug.clone(),
            block: *block,
            finalized: progress.finalized,
        });
    }
    ledger::swap_branches(tx, network.id, &orphaned, canonical).await?;
    let swapped = swap(tx, network, &orphaned, canonical).await?;

    // Only blocks that were normalized move the head; a message that comes again finds none.
    if let Some(lowest) = known.iter().map(|block| block.height.as_i64()).min() {
        progress.head = progress.head.min(lowest - 1);
        for block in ledger::recent_above(tx, network.id, progress.head).await? {
            if block.height.as_i64() == progress.head + 1 {
                progress.head += 1;
            }
        }
        progress.confirmed = progress.confirmed.min(progress.head);
        ledger::set_progress(tx, network.id, &progress).await?;
    }
    swapped.told(tx, network, progress.head, cause).await
}

/// History is about to pass blocks above the ledger's head whose events stand: a reorg went there and back, and
/// what would have led up to them was never said again. They are taken back; what of them is on the final chain
/// comes with history. Nothing to do while there are none.
pub async fn take_back_above_head(
    tx: &Tx<'_>,
    network: &Network,
    cause: &Cause,
) -> Result<Reorged, WorkError> {
    tx.look_up_by_key().await?; // As of everything that reverts: not the whole log for a few of its events.
    let progress = ledger::lock_progress(tx, network.id, network.start_block).await?;
    let open = ledger::open_above(tx, network.id, progress.head).await?;
    ledger::forget_blocks(tx, network.id, &open).await?;
    let hashes: Vec<BlockHash> = open.iter().map(|block| block.hash).collect();
    projection::remove_block_cards(tx, network.id, &hashes).await?;
    swap(tx, network, &open, &[]).await?.told(tx, network, progress.head, cause).await
}

/// What became of the events of two branches.
struct Swapped {
    reverted: Vec<ledger::TouchedEvent>,
    restored: Vec<ledger::TouchedEvent>,
    touched: BTreeSet<AssetId>,
}

/// Reverts the events of `orphaned` blocks and restores those of `canonical` ones that were reverted.
async fn swap(
    tx: &Tx<'_>,
    network: &Network,
    orphaned: &[BlockRef],
    canonical: &[BlockRef],
) -> Result<Swapped, WorkError> {
    let reverted = ledger::revert_blocks(tx, network.id, orphaned).await?;
    let restored = ledger::restore_blocks(tx, network.id, canonical).await?;

    let reverted_ids: Vec<EventId> = reverted.iter().map(|event| event.id).collect();
    applied::release(tx, &reverted_ids).await?;
    let mut touched = ledger::drop_open_legs(tx, &reverted_ids).await?;
    let restored_ids: Vec<EventId> = restored.iter().map(|event| event.id).collect();
    ledger::insert_open_legs(tx, &restored_ids).await?;
    // An opening whose block went is still true where a later event needs it.
    let openings: Vec<EventId> =
        reverted.iter().filter(|event| event.kind == EventKind::Opening).map(|event| event.id).collect();
    let moved: BTreeSet<EventId> =
        ledger::rehome_openings(tx, network.id, &openings).await?.into_iter().collect();
    let unopened: Vec<AssetId> = reverted
        .iter()
        .filter(|event| event.kind == EventKind::Opening && !moved.contains(&event.id))
        .filter_map(|event| event.asset)
        .collect();
    catalog::unmark_partial(tx, &unopened).await?;
    touched.extend(reverted.iter().chain(&restored).filter_map(|event| event.asset));

    Ok(Swapped { reverted, restored, touched })
}

impl Swapped {
    /// What others are told of it.
    async fn told(
        self,
        tx: &Tx<'_>,
        network: &Network,
        head: i64,
        cause: &Cause,
    ) -> Result<Reorged, WorkError> {
        let Self { reverted, restored, touched } = self;
        let gone: Vec<ledger::TouchedEvent> =
            reverted.iter().filter(|event| event.kind != EventKind::Opening).cloned().collect();
        let mut emitted = drafts::events_reverted(network, &gone, cause);
        let restored_ids: Vec<EventId> = restored.iter().map(|event| event.id).collect();
        let restored_rows = ledger::read_events(tx, network.id, &restored_ids).await?;
        let standing: Vec<_> = restored_rows.iter().filter(|row| row.kind != EventKind::Opening).collect();
        emitted.extend(drafts::events_normalized(network, &standing, &BTreeMap::new(), cause));
        emitted.extend(drafts::ownership_changed(network, "reorg", head, &touched, cause));
        Ok(Reorged {
            drafts: emitted,
            reverted: reverted.len(),
            restored: restored.len(),
            touched_assets: touched,
            head,
        })
    }
}

/// The operator's way back: everything above `to` is open again, claims are released, and owners, history,
/// supply and digests of the touched assets are rebuilt from the event log alone. The next report of finality
/// applies it again. Call it with the network's workers stopped or not: the lock keeps them apart.
pub async fn rewind(tx: &Tx<'_>, network: &Network, to: Height, cause: &Cause) -> Result<Reorged, WorkError> {
    let mut progress = ledger::lock_progress(tx, network.id, network.start_block).await?;
    let to = to.as_i64();
    if to >= progress.finalized {
        return Ok(Reorged { head: progress.head, ..Reorged::default() });
    }
    let (events, touched) = ledger::unfinalize(tx, network.id, to, progress.finalized).await?;
    progress.finalized = to;
    progress.confirmed = progress.confirmed.min(to);
    progress.reported = progress.reported.min(to);
    progress.history = progress.history.min(to);
    // First of all that follows: what is final is what the line says.
    ledger::set_progress(tx, network.id, &progress).await?;
    applied::release(tx, &events).await?;
    ledger::unquarantine(tx, state_updater::CONSUMER, &events).await?;
    ownership::drop_history(tx, &touched, &events).await?;
    rebuild(tx, network, &touched, to).await?;
    ledger::insert_open_legs(tx, &events).await?;
    digest::drop_above(tx, network.id, to).await?;
    Ok(Reorged {
        drafts: drafts::ownership_changed(network, "rewind", to, &touched, cause),
        reverted: events.len(),
        restored: 0,
        touched_assets: touched,
        head: progress.head,
    })
}

/// Repairs drift: sets owners and supply of these assets, and the network's digests, to what the event log
/// says. For what `verify_ledger` names; the log itself and finality stay as they are.
pub async fn repair(
    tx: &Tx<'_>,
    network: &Network,
    assets: &BTreeSet<AssetId>,
    cause: &Cause,
) -> Result<Vec<Draft>, WorkError> {
    let progress = ledger::lock_progress(tx, network.id, network.start_block).await?;
    rebuild(tx, network, assets, progress.finalized).await?;
    Ok(drafts::ownership_changed(network, "rewind", progress.finalized, assets, cause))
}

/// Sets owners and supply of assets to what the event log says, and all digests to what the rows say. It
/// does not trust what was kept, so it also heals what somebody else's hand has changed.
async fn rebuild(
    tx: &Tx<'_>,
    network: &Network,
    assets: &BTreeSet<AssetId>,
    height: i64,
) -> Result<(), WorkError> {
    let before = ownership::of_assets(tx, assets).await?;
    let after: BTreeMap<Pair, U256> = ownership::recompute(tx, assets).await?;
    ownership::write(tx, network.id, &rows(&before, &after)).await?;
    let burnt = ownership::burnt_among(tx, assets).await?;
    let supply = |asset: &AssetId| Supply { units: U256::ZERO, burnt: burnt.contains(asset) };
    let mut supplies: BTreeMap<AssetId, Supply> =
        assets.iter().map(|asset| (*asset, supply(asset))).collect();
    for ((asset, _), qty) in &after {
        let supply = supplies.get_mut(asset).expect("only these assets were recomputed");
        // The book refused what would leave 256 bits, so the log of what it applied cannot.
        supply.units = supply.units.saturating_add(*qty);
    }
    catalog::set_supply(tx, &supplies).await?;
    let found = digest::recompute(tx, network.id, Slice::All).await?;
    let total = digest::total(&found);
    let mut buckets = digest::read(tx, network.id).await?;
    buckets.values_mut().for_each(|kept| *kept = tidemark_model::digest::Digest::default());
    buckets.extend(found);
    digest::write(tx, network.id, height, &buckets, total).await?;
    Ok(())
}
