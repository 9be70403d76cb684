//! The normalizer: canonical events of a batch become rows of the log, with their movements and the stubs
//! they name. Writing the same batch again changes nothing and emits nothing.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;
use tidemark_model::chain::{AssetRef, BlockRef, EventKind, Network, Quarantined, RawEvent, Standard};
use tidemark_model::envelope::Draft;
use tidemark_model::finality::{FinalityStatus, status_at};
use tidemark_model::ids::{AccountId, AssetId, BlockHash, CollectionId, ContractId, EventId, Height};
use tidemark_model::text::storable;
use tidemark_store::catalog::{self, AssetStub, Stubs};
use tidemark_store::ledger::{self, DeltaRow, NormalizedRow, QuarantineRow, TouchedEvent};
use tidemark_store::together::both;
use tidemark_store::{StoreError, Tx};

use super::openings::{self, OpeningPlan, Openings};
use super::{Cause, WorkError, drafts};

/// The name under which the normalizer quarantines.
pub const CONSUMER: &str = "normalizer";

/// What normalizing a batch did.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Normalized {
    /// Events to emit, in order.
    pub drafts: Vec<Draft>,
    /// Events that are new, moved to another block, or came back.
    pub changed: usize,
    /// Assets never seen before.
    pub new_assets: BTreeSet<AssetId>,
    /// Assets whose latest balances may have changed.
    pub touched_assets: BTreeSet<AssetId>,
    /// Events that say something else now although their block is the same; quarantined, not believed.
    pub contradicted: BTreeSet<EventId>,
}

/// Collection and asset of a reference.
pub(crate) fn asset_ids(asset: &AssetRef) -> (CollectionId, AssetId) {
    let collection = CollectionId::of(asset.network_id, &asset.collection_addr_normalized);
    let id = AssetId::of(asset.network_id, collection, &asset.token_id_raw, asset.standard.as_str());
    (collection, id)
}

/// Writes the events of one or several blocks. `head` is the chain's newest height, for the confirmation
/// status; finality is the state-updater's. `openings` come from [`openings::prepare`].
pub async fn normalize(
    tx: &Tx<'_>,
    network: &Network,
    events: &[RawEvent],
    head: Height,
    openings: &Openings,
    cause: &Cause,
) -> Result<Normalized, WorkError> {
    if events.is_empty() {
        return Ok(Normalized::default());
    }
    let blocks: BTreeSet<BlockHash> = events.iter().map(|event| event.block_hash).collect();
    let orphaned = ledger::orphaned_among(tx, network.id, &blocks).await?;
    let events = once_each(events, &orphaned);
    let rows: Vec<NormalizedRow> =
        events.iter().map(|event| normalized_row(network, event, head, &orphaned)).collect();

    let stubs = stubs(network, &events, &rows);
    // What is told of events is written while the database writes them. It holds for those that turn out to be new or
    // changed, nearly always all of them.
    let told_of = |rows: &[&NormalizedRow]| drafts::events_normalized(network, rows, &stubs.assets, cause);
    let expected: Vec<&NormalizedRow> = rows.iter().filter(|row| is_standing(row)).collect();
    let tell = async { Ok::<_, StoreError>(told_of(&expected)) };
    let (new_assets, upserted, told, plan) = if openings::may_be_needed(network) {
        let new_assets = catalog::ensure_stubs(tx, network.id, &stubs).await?;
        let by_standard: Vec<(Standard, &NormalizedRow)> = events
            .iter()
            .zip(&rows)
            .filter_map(|(event, row)| Some((event.asset_refs.first()?.standard, row)))
            .collect();
        let plan = openings::plan(tx, network, &by_standard, openings).await?;
        let partial: Vec<AssetId> = plan.partial.iter().copied().collect();
        catalog::mark_partial(tx, &partial).await?;
        let written: Vec<&NormalizedRow> = rows.iter().chain(&plan.rows).collect();
        let (upserted, told) = both(ledger::upsert_events(tx, network.id, &written), tell).await?;
        (new_assets, upserted, told, plan)
    } else {
        let written: Vec<&NormalizedRow> = rows.iter().collect();
        let write = both(ledger::upsert_events(tx, network.id, &written), tell);
        let (new_assets, (upserted, told)) =
            both(catalog::ensure_stubs(tx, network.id, &stubs), write).await?;
        (new_assets, upserted, told, OpeningPlan::default())
    };
    let opened: BTreeSet<AssetId> = plan.rows.iter().filter_map(|row| row.asset).collect();
    let written: Vec<&NormalizedRow> = rows.iter().chain(&plan.rows).collect();
    quarantine_contradictions(tx, network, &written, &upserted.contradicted).await?;

    let created: Vec<_> = stubs
        .assets
        .iter()
        .filter(|(asset, _)| new_assets.contains(asset))
        .map(|(asset, stub)| (*asset, stub))
        .collect();
    let mut emitted = drafts::assets_created(network, &created);
    let mut named = BTreeSet::new();
    let mut standing = Vec::new();
    let mut late = Vec::new();
    for row in rows.iter().filter(|row| upserted.changed.contains(&row.id)) {
        // A late event of an orphaned block is in the log, and so it is in what others make of the log.
        match is_standing(row) {
            true => standing.push(row),
            false => late.push(TouchedEvent::of(row)),
        }
        named.extend(row.asset);
    }
    emitted.extend(drafts::events_reverted(network, &late, cause));
    emitted.extend(if standing.len() == expected.len() { told } else { told_of(&standing) });
    let height = written.iter().map(|row| row.block.height).max().unwrap_or_default().as_i64();
    // Executed again in another block, an event may name another asset: the old one changed as well. And a late
    // event that gives way to the one that stands may have made an asset that no event names.
    let left: BTreeSet<AssetId> = upserted
        .touched
        .iter()
        .chain(&new_assets)
        .filter(|id| !named.contains(id) && !opened.contains(id))
        .copied()
        .collect();
    emitted.extend(drafts::ownership_changed(network, "opening", height, &opened, cause));
    emitted.extend(drafts::ownership_changed(network, "reorg", height, &left, cause));
    Ok(Normalized {
        drafts: emitted,
        changed: upserted.changed.len(),
        new_assets,
        touched_assets: upserted.touched,
        contradicted: upserted.contradicted,
    })
}

fn is_standing(row: &NormalizedRow) -> bool {
    row.status != FinalityStatus::Reverted
}

/// Each event once, in the chain's order. The same event in two blocks counts where it stands; in two
/// standing blocks, in the later one of the batch.
pub(crate) fn once_each<'a>(
    events: impl IntoIterator<Item = &'a RawEvent>,
    orphaned: &BTreeSet<BlockHash>,
) -> Vec<&'a RawEvent> {
    let mut once: BTreeMap<EventId, &RawEvent> = BTreeMap::new();
    for event in events {
        let id = EventId::of(&event.source_event_id, event.sub_index);
        match once.get(&id) {
            Some(kept) if orphaned.contains(&event.block_hash) || kept.block_hash == event.block_hash => {}
            _ => {
                once.insert(id, event);
            }
        }
    }
    let mut events: Vec<&RawEvent> = once.into_values().collect();
    events.sort_by_key(|event| (event.block_number, event.event_index, event.sub_index));
    events
}

pub(crate) fn normalized_row(
    network: &Network,
    event: &RawEvent,
    head: Height,
    orphaned: &BTreeSet<BlockHash>,
) -> NormalizedRow {
    let asset = event.asset_refs.first().map(asset_ids);
    let account = |address: Option<&str>| address.map(|address| AccountId::of(network.id, address));
    let delta = asset.zip(event.movement()).map(|((_, asset), movement)| DeltaRow {
        asset,
        from: account(movement.from),
        to: account(movement.to),
        qty: movement.qty,
    });
    let status = if orphaned.contains(&event.block_hash) {
        FinalityStatus::Reverted
    } else {
        status_at(event.block_number, head, None, network.confirmations)
    };
    NormalizedRow {
        id: EventId::of(&event.source_event_id, event.sub_index),
        source_event_id: event.source_event_id.clone(),
        sub_index: event.sub_index,
        kind: event.event_kind,
        asset: asset.map(|(_, asset)| asset),
        collection: asset.map(|(collection, _)| collection),
        block: BlockRef { height: event.block_number, hash: event.block_hash },
        tx_hash: event.tx_hash,
        event_index: i32::try_from(event.event_index).expect("a block has fewer than 2^31 records"),
        event_time: event.event_time,
        status,
        blob_ref: event.blob_ref.clone(),
        delta,
    }
}

/// What the events name.
pub(crate) fn stubs(network: &Network, events: &[&RawEvent], rows: &[NormalizedRow]) -> Stubs {
    let mut stubs = Stubs::default();
    for (event, row) in events.iter().zip(rows) {
        let seen = event.event_time;
        for delta in &event.ownership_deltas {
            let address = &delta.account_addr_normalized;
            let id = AccountId::of(network.id, address);
            stubs.accounts.entry(id).or_insert_with(|| (address.clone(), seen));
        }
        let Some(asset) = event.asset_refs.first() else { continue };
        let address = &asset.collection_addr_normalized;
        let (collection, asset_id) = asset_ids(asset);
        let contract = ContractId::of(network.id, address);
        stubs.contracts.entry(contract).or_insert_with(|| (address.clone(), asset.standard));
        stubs.collections.entry(collection).or_insert((contract, seen));
        // A block that lost says nothing of when a token began.
        let begins = event.event_kind == EventKind::Mint || row.status == FinalityStatus::Reverted;
        stubs.assets.entry(asset_id).or_insert_with(|| AssetStub {
            collection,
            token_id_raw: asset.token_id_raw.clone(),
            standard: asset.standard,
            first_seen_block: event.block_number,
            first_seen_at: seen,
            partial: openings::is_partial(network, asset.standard, begins),
        });
    }
    stubs
}

async fn quarantine_contradictions(
    tx: &Tx<'_>,
    network: &Network,
    rows: &[&NormalizedRow],
    contradicted: &BTreeSet<EventId>,
) -> Result<(), WorkError> {
    let set_aside: Vec<QuarantineRow> = rows
        .iter()
        .filter(|row| contradicted.contains(&row.id))
        .map(|row| QuarantineRow {
            event: row.id,
            source_event_id: row.source_event_id.clone(),
            block_number: row.block.height,
            asset: row.asset,
            reason: "the same record of the same block says something else now".to_owned(),
            evidence: json!({
                "given": {
                    "kind": row.kind,
                    "asset_id": row.asset,
                    "from": row.delta.as_ref().and_then(|delta| delta.from),
                    "to": row.delta.as_ref().and_then(|delta| delta.to),
                    "qty": row.delta.as_ref().map(|delta| delta.qty.to_string()),
                },
                "block_hash": row.block.hash,
            }),
        })
        .collect();
    if !set_aside.is_empty() {
        tracing::error!(network = %network.slug, events = set_aside.len(), "events contradict the stored log");
        metrics::counter!("ledger_contradicted_events_total", "network" => network.slug.clone())
            .increment(u64::try_from(set_aside.len()).unwrap_or(u64::MAX));
    }
    ledger::quarantine(tx, CONSUMER, network.id, &set_aside).await?;
    Ok(())
}

/// Sets records aside that break their standard, with the adapter's reason.
pub async fn quarantine_records(
    tx: &Tx<'_>,
    network: &Network,
    block: &BlockRef,
    records: &[Quarantined],
) -> Result<u64, WorkError> {
    let rows: BTreeMap<EventId, QuarantineRow> = records
        .iter()
        .map(|record| {
            let event = EventId::of(&record.source_event_id, 0);
            let row = QuarantineRow {
                event,
                source_event_id: record.source_event_id.clone(),
                block_number: block.height,
                asset: None,
                reason: storable(record.reason.as_bytes()).text,
                evidence: json!({
                    "tx_hash": record.tx_hash,
                    "event_index": record.event_index,
                    "block_hash": block.hash,
                }),
            };
            (event, row)
        })
        .collect();
    let rows: Vec<QuarantineRow> = rows.into_values().collect();
    Ok(ledger::quarantine(tx, CONSUMER, network.id, &rows).await?)
}
