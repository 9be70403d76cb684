//! The state-updater: finality advances by network, in one set-based step, and what became final is applied
//! to owners, history, supply and digest exactly once. Nothing here reads an asset's past, so the cost of a
//! step is that of its own events.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;
use tidemark_model::chain::{BlockRef, EventKind, Network, Standard};
use tidemark_model::digest::bucket_of;
use tidemark_model::envelope::Draft;
use tidemark_model::finality::FinalityStatus;
use tidemark_model::ids::{AssetId, BlockHash, CollectionId, EventId, Height, NetworkId};
use tidemark_model::quantity::SignedQty;
use tidemark_store::ledger::{
    self, Canonical, MovementRow, NormalizedRow, OpeningRow, OpeningState, Pair, Progress, QuarantineRow,
};
use tidemark_store::ownership::{self, HistoryLeg};
use tidemark_store::together::both;
use tidemark_store::{StoreError, Tx, applied, catalog, digest};
use time::OffsetDateTime;

use super::book::{Book, Refusal};
use super::openings::{self, Need, opening_event};
use super::{Cause, WorkError, drafts};

/// The name under which claims and quarantines are kept.
pub const CONSUMER: &str = "state-updater";

/// What a step of finality did.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Finalized {
    /// Events to emit, in order.
    pub drafts: Vec<Draft>,
    /// Events that became final.
    pub events: usize,
    /// Movements applied to owners.
    pub applied: usize,
    /// Events that could not be and were set aside.
    pub quarantined: Vec<EventId>,
    /// The ledger's finalized height now; -1 for none.
    pub height: i64,
}

/// Makes everything at or below `finalized` final and applies it. What the chain calls final before it is
/// normalized is remembered and applied by the block that fills the gap. Finality never goes back.
pub async fn advance_finality(
    tx: &Tx<'_>,
    network: &Network,
    finalized: Height,
    finalized_hash: Option<BlockHash>,
    cause: &Cause,
) -> Result<Finalized, WorkError> {
    // Whoever calls: a planner that may choose reads the whole log for the few events that become final.
    tx.look_up_by_key().await?;
    let mut progress = ledger::lock_progress(tx, network.id, network.start_block).await?;
    let recent = ledger::recent_above(tx, network.id, progress.finalized).await?;
    if let Some(hash) = finalized_hash {
        let mut there = recent.iter().filter(|block| block.height == finalized).peekable();
        if there.peek().is_some() && !there.any(|block| block.hash == hash) {
            let block = BlockRef { height: finalized, hash };
            return Err(WorkError::ReorgExpected { network: network.slug.clone(), block });
        }
    }
    progress.reported = progress.reported.max(finalized.as_i64());
    let target = progress.reported.min(progress.head).min(below_first_fork(&recent));
    if target <= progress.finalized {
        ledger::set_progress(tx, network.id, &progress).await?;
        return Ok(Finalized { height: progress.finalized, ..Finalized::default() });
    }
    let Canonical { events, mut movements } =
        ledger::canonical_between(tx, network.id, progress.finalized, target).await?;
    let (claimed, _) =
        both(applied::claim(tx, CONSUMER, &events), ledger::close_legs(tx, &movements)).await?;
    movements.retain(|row| claimed.contains(&row.event));
    let outcome = apply(tx, network, movements, target).await?;

    progress.finalized = target;
    progress.confirmed = progress.confirmed.max(target);
    ledger::set_progress(tx, network.id, &progress).await?;
    forget_old_blocks(tx, network, target).await?;

    let renamed = ledger::read_events(tx, network.id, &outcome.renamed).await?;
    let renamed: Vec<&NormalizedRow> = renamed.iter().collect();
    let mut emitted = drafts::events_normalized(network, &renamed, &BTreeMap::new(), cause);
    emitted.extend(drafts::ownership_changed(network, "finalized", target, &outcome.touched, cause));
    emitted.push(drafts::finality_advanced(network, target, cause));
    Ok(Finalized {
        drafts: emitted,
        events: events.len(),
        applied: outcome.applied,
        quarantined: outcome.quarantined,
        height: target,
    })
}

/// Blocks deeper below finality than any reorg we repair need not be recognised any more.
pub(crate) async fn forget_old_blocks(
    tx: &Tx<'_>,
    network: &Network,
    finalized: i64,
) -> Result<(), WorkError> {
    let kept_blocks = i64::try_from(network.reorg_depth_max).unwrap_or(i64::MAX);
    ledger::forget_blocks_below(tx, network.id, finalized.saturating_sub(kept_blocks)).await?;
    Ok(())
}

/// Two blocks at one height: one of them is about to be orphaned, so nothing from there on is final for us.
fn below_first_fork(recent: &[BlockRef]) -> i64 {
    let fork = recent.windows(2).find(|pair| pair[0].height == pair[1].height);
    fork.map_or(i64::MAX, |pair| pair[0].height.as_i64() - 1)
}

/// What applying movements did.
pub(crate) struct Outcome {
    pub(crate) touched: BTreeSet<AssetId>,
    pub(crate) applied: usize,
    pub(crate) quarantined: Vec<EventId>,
    /// Events that did something else than their legs said: refused, or with an opening. Their sides are told
    /// again, because nothing above finality leads to them any more.
    pub(crate) renamed: Vec<EventId>,
}

/// Applies movements that nobody has applied, in the chain's order, up to `height`.
pub(crate) async fn apply(
    tx: &Tx<'_>,
    network: &Network,
    movements: Vec<MovementRow>,
    height: i64,
) -> Result<Outcome, WorkError> {
    let touched: BTreeSet<AssetId> = movements.iter().map(|row| row.delta.asset).collect();
    let pairs: BTreeSet<Pair> = movements.iter().flat_map(pairs_of).collect();
    let supplies = movements.iter().map(|row| (row.delta.asset, row.supply)).collect();
    let balances = ownership::balances(tx, &pairs).await?;
    let starts_in_the_middle = openings::may_be_needed(network);
    let mut openings =
        if starts_in_the_middle { ledger::read_openings(tx, &pairs).await? } else { BTreeMap::new() };
    let mut book = Book::new(balances, supplies);
    let mut legs = Vec::with_capacity(movements.len() * 2);
    let mut topped_up: BTreeMap<Pair, OpeningRow> = BTreeMap::new();
    let mut opening_rows: Vec<NormalizedRow> = Vec::new();
    let mut refused: Vec<(MovementRow, Refusal)> = Vec::new();
    let mut renamed = Vec::new();
    let mut applied_count = 0;
    for row in movements {
        let mut result = book.apply(&row.delta, row.standard);
        if let (Err(Refusal::Negative { held }), true) = (result, starts_in_the_middle)
            && let Some(opening) = implied_opening(network, &row, held, &mut openings, &mut topped_up)
            && let Some(delta) = &opening.delta
            && book.apply(delta, row.standard).is_ok()
        {
            legs.push(opening_leg(network, &opening));
            opening_rows.push(opening);
            renamed.push(row.event);
            result = book.apply(&row.delta, row.standard);
        }
        match result {
            Ok(()) => {
                push_legs(network, &row, &mut legs);
                applied_count += 1;
            }
            Err(refusal) => refused.push((row, refusal)),
        }
    }
    write_openings(tx, network, &opening_rows, &topped_up).await?;
    let (changes, rows) = (book.changes(), book.rows());
    let resupplied = book.resupplied();
    both(
        ownership::write(tx, network.id, &rows),
        both(catalog::set_supply(tx, &resupplied), update_digests(tx, network.id, height, &changes)),
    )
    .await?;
    ownership::append_history(tx, network.id, &legs).await?;
    let quarantined = set_aside(tx, network, &refused).await?;
    renamed.extend(&quarantined);
    Ok(Outcome { touched, applied: applied_count, quarantined, renamed })
}

/// The missing amount, if this asset is a class whose past the chain could not tell us.
fn implied_opening(
    network: &Network,
    row: &MovementRow,
    held: alloy_primitives::U256,
    openings: &mut BTreeMap<Pair, OpeningRow>,
    topped_up: &mut BTreeMap<Pair, OpeningRow>,
) -> Option<NormalizedRow> {
    if row.standard != Standard::Erc1155 || row.kind == EventKind::Opening {
        return None;
    }
    let pair = (row.delta.asset, row.delta.from?);
    let known = openings.get(&pair).copied();
    if known.is_some_and(|opening| opening.state == OpeningState::Known) {
        return None;
    }
    let missing = row.delta.qty.checked_sub(held)?;
    let (before, parts) = known.map_or((alloy_primitives::U256::ZERO, 0), |row| (row.qty, row.parts));
    let opening =
        OpeningRow { state: OpeningState::Implied, qty: before.checked_add(missing)?, parts: parts + 1 };
    openings.insert(pair, opening);
    topped_up.insert(pair, opening);
    let need = Need {
        collection: row.collection,
        block: row.block,
        event_time: row.event_time,
        status: FinalityStatus::Finalized,
    };
    Some(opening_event(network, pair, parts, missing, &need))
}

async fn write_openings(
    tx: &Tx<'_>,
    network: &Network,
    rows: &[NormalizedRow],
    openings: &BTreeMap<Pair, OpeningRow>,
) -> Result<(), WorkError> {
    if rows.is_empty() {
        return Ok(());
    }
    ledger::record_openings(tx, network.id, openings, true).await?;
    ledger::upsert_events(tx, network.id, &rows.iter().collect::<Vec<_>>()).await?;
    let ids: Vec<EventId> = rows.iter().map(|row| row.id).collect();
    applied::claim(tx, CONSUMER, &ids).await?;
    let assets: BTreeSet<AssetId> = rows.iter().filter_map(|row| row.asset).collect();
    catalog::mark_partial(tx, &assets.into_iter().collect::<Vec<_>>()).await?;
    Ok(())
}

fn pairs_of(row: &MovementRow) -> impl Iterator<Item = Pair> + use<> {
    let asset = row.delta.asset;
    row.delta.from.into_iter().chain(row.delta.to).map(move |account| (asset, account))
}

/// An opening stands in the history before our first block, at the beginning of time: it was true all along.
fn opening_leg(network: &Network, row: &NormalizedRow) -> HistoryLeg {
    let delta = row.delta.as_ref().expect("an opening moves something");
    HistoryLeg {
        asset: delta.asset,
        account: delta.to.expect("an opening has a receiver"),
        block_number: network.start_block.as_i64() - 1,
        event_index: -1,
        qty: SignedQty::gain(delta.qty),
        event_time: OffsetDateTime::UNIX_EPOCH,
        event: row.id,
    }
}

fn push_legs(network: &Network, row: &MovementRow, legs: &mut Vec<HistoryLeg>) {
    if row.delta.qty.is_zero() {
        return;
    }
    let opening = row.kind == EventKind::Opening;
    let lost = row.delta.from.map(|account| (account, SignedQty::loss(row.delta.qty)));
    let gained = row.delta.to.map(|account| (account, SignedQty::gain(row.delta.qty)));
    for (account, qty) in lost.into_iter().chain(gained) {
        legs.push(HistoryLeg {
            asset: row.delta.asset,
            account,
            block_number: if opening { network.start_block.as_i64() - 1 } else { row.block.height.as_i64() },
            event_index: row.event_index,
            qty,
            event_time: if opening { OffsetDateTime::UNIX_EPOCH } else { row.event_time },
            event: row.event,
        });
    }
}

/// Moves the digests by these changes and notes the total at `height`.
pub(crate) async fn update_digests(
    tx: &Tx<'_>,
    network: NetworkId,
    height: i64,
    changes: &BTreeMap<Pair, SignedQty>,
) -> Result<(), StoreError> {
    let mut buckets = digest::read(tx, network).await?;
    let mut changed: BTreeSet<u8> = BTreeSet::new();
    for ((asset, account), qty) in changes {
        let bucket = bucket_of(*asset);
        buckets.entry(bucket).or_default().add(*asset, *account, *qty);
        changed.insert(bucket);
    }
    let total = digest::total(&buckets);
    buckets.retain(|bucket, _| changed.contains(bucket));
    digest::write(tx, network, height, &buckets, total).await?;
    Ok(())
}

/// Never clamped, never tried for ever: the event is kept with its evidence, its claim is given back, its
/// contract is marked, and the rest goes on.
async fn set_aside(
    tx: &Tx<'_>,
    network: &Network,
    refused: &[(MovementRow, Refusal)],
) -> Result<Vec<EventId>, WorkError> {
    if refused.is_empty() {
        return Ok(Vec::new());
    }
    let rows: Vec<QuarantineRow> = refused
        .iter()
        .map(|(row, refusal)| QuarantineRow {
            event: row.event,
            source_event_id: row.source_event_id.clone(),
            block_number: row.block.height,
            asset: Some(row.delta.asset),
            reason: refusal.reason().to_owned(),
            evidence: json!({
                "kind": row.kind,
                "from": row.delta.from,
                "to": row.delta.to,
                "qty": row.delta.qty.to_string(),
                "held": match refusal {
                    Refusal::Negative { held } => Some(held.to_string()),
                    _ => None,
                },
                "block_hash": row.block.hash,
                "event_index": row.event_index,
            }),
        })
        .collect();
    let events: Vec<EventId> = rows.iter().map(|row| row.event).collect();
    ledger::quarantine(tx, CONSUMER, network.id, &rows).await?;
    applied::release_one(tx, CONSUMER, &events).await?;
    let mut reasons: BTreeMap<CollectionId, String> = BTreeMap::new();
    for (row, refusal) in refused {
        reasons.entry(row.collection).or_insert_with(|| refusal.reason().to_owned());
    }
    catalog::mark_unreliable(tx, &reasons).await?;
    tracing::error!(network = %network.slug, events = events.len(), first = %events[0], "movements quarantined");
    metrics::counter!("ledger_quarantined_events_total", "network" => network.slug.clone())
        .increment(u64::try_from(events.len()).unwrap_or(u64::MAX));
    Ok(events)
}

/// Canonical events with enough blocks above them are confirmed, and stay so.
pub(crate) fn confirm(network: &Network, head: Height, progress: &mut Progress) {
    let confirmations = i64::try_from(network.confirmations).unwrap_or(i64::MAX);
    let through = head.as_i64().saturating_sub(confirmations).min(progress.head);
    progress.confirmed = progress.confirmed.max(through);
}
