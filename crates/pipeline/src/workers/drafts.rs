//! The events the ledger emits, in their catalogue's form.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;
use tidemark_model::chain::{BlockRef, Network};
use tidemark_model::envelope::Draft;
use tidemark_model::ids::{AccountId, AssetId, BlockHash, Height};
use tidemark_model::subject::Subject;
use tidemark_store::catalog::AssetStub;
use tidemark_store::ledger::{NormalizedRow, TouchedEvent};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::Cause;

/// Assets named by one `ledger.ownership.changed` event.
const ASSETS_PER_EVENT: usize = 500;
/// Events of the chain in one `ledger.event.normalized` or `ledger.event.reverted` event.
const EVENTS_PER_EVENT: usize = 150;
/// Assets in one `catalog.asset.created` event.
const CREATED_PER_EVENT: usize = 150;

fn subject(service: &str, aggregate: &str, event: &str) -> Subject {
    Subject::new(service, aggregate, event, 1).expect("a constant subject is valid")
}

fn rfc3339(at: OffsetDateTime) -> String {
    at.format(&Rfc3339).expect("block times have a year of four digits")
}

/// What was normalized, a block's events together: one event of ours per 150 of the chain's. `tokens` are the token ids
/// of their assets, where they are at hand: with them a message says all there is to say of a transfer.
pub(crate) fn events_normalized(
    network: &Network,
    rows: &[&NormalizedRow],
    tokens: &BTreeMap<AssetId, AssetStub>,
    cause: &Cause,
) -> Vec<Draft> {
    rows.chunk_by(|one, next| one.block == next.block)
        .flat_map(|block| block.chunks(EVENTS_PER_EVENT))
        .map(|rows| {
            let first = rows[0];
            let payload = json!({
                "network_id": network.id,
                "block_number": first.block.height,
                "block_hash": first.block.hash,
                "event_time": rfc3339(first.event_time),
                "events": rows.iter().map(|row| normalized(row, tokens)).collect::<Vec<_>>(),
            });
            let name = format!("{}:{}:{}:{}", first.id, rows.len(), first.block.hash, cause.id);
            let subject = subject("ledger", "event", "normalized");
            Draft::derived(subject, &name, network.id.to_string(), payload, first.event_time)
        })
        .collect()
}

fn normalized(row: &NormalizedRow, tokens: &BTreeMap<AssetId, AssetStub>) -> serde_json::Value {
    let account = |account: Option<AccountId>| account.map(|id| id.0);
    let mut event = json!({
        "event_id": row.id,
        "source_event_id": row.source_event_id,
        "sub_index": row.sub_index.to_string(),
        "kind": row.kind,
        "asset_id": row.asset,
        "collection_id": row.collection,
        "from_account_id": account(row.delta.as_ref().and_then(|delta| delta.from)),
        "to_account_id": account(row.delta.as_ref().and_then(|delta| delta.to)),
        "qty": row.delta.as_ref().map_or_else(|| "0".to_owned(), |delta| delta.qty.to_string()),
        "tx_hash": row.tx_hash,
        "event_index": row.event_index,
        "finality_status": row.status,
    });
    if let Some(stub) = row.asset.and_then(|asset| tokens.get(&asset)) {
        event["token_id"] = stub.token_id_raw.as_str().into();
    }
    event
}

/// What was taken back, a block's events together: one event of ours per 150 of the chain's.
pub(crate) fn events_reverted(network: &Network, events: &[TouchedEvent], cause: &Cause) -> Vec<Draft> {
    let mut by_block: BTreeMap<(Height, BlockHash), Vec<&TouchedEvent>> = BTreeMap::new();
    for event in events {
        by_block.entry((event.block.height, event.block.hash)).or_default().push(event);
    }
    let named = |event: &&TouchedEvent| json!({"event_id": event.id, "asset_id": event.asset, "collection_id": event.collection});
    by_block
        .values()
        .flat_map(|block| block.chunks(EVENTS_PER_EVENT))
        .map(|events| {
            let first = events[0];
            let payload = json!({
                "network_id": network.id,
                "block_number": first.block.height,
                "block_hash": first.block.hash,
                "events": events.iter().map(named).collect::<Vec<_>>(),
            });
            let name = format!("{}:{}:{}:{}", first.id, events.len(), first.block.hash, cause.id);
            let subject =
                Subject::new("ledger", "event", "reverted", 2).expect("a constant subject is valid");
            Draft::derived(subject, &name, network.id.to_string(), payload, first.event_time)
        })
        .collect()
}

/// Assets seen for the first time, in order of their ids: one event per 150.
pub(crate) fn assets_created(network: &Network, assets: &[(AssetId, &AssetStub)]) -> Vec<Draft> {
    assets
        .chunks(CREATED_PER_EVENT)
        .map(|assets| {
            let (first, stub) = assets[0];
            let created = |(asset, stub): &(AssetId, &AssetStub)| {
                json!({
                    "asset_id": asset,
                    "collection_id": stub.collection,
                    "token_id": stub.token_id_raw,
                    "standard": stub.standard,
                    "block_number": stub.first_seen_block,
                })
            };
            let payload = json!({
                "network_id": network.id,
                "assets": assets.iter().map(created).collect::<Vec<_>>(),
            });
            // An asset is created once, so the first one names the event.
            let subject = subject("catalog", "asset", "created");
            Draft::derived(subject, &first.to_string(), network.id.to_string(), payload, stub.first_seen_at)
        })
        .collect()
}

pub(crate) fn block_normalized(
    network: &Network,
    block: &BlockRef,
    time: OffsetDateTime,
    events: usize,
    cause: &Cause,
) -> Draft {
    let payload =
        json!({"network_id": network.id, "height": block.height, "hash": block.hash, "events": events});
    let name = format!("{}:{}", block.hash, cause.id);
    let subject = subject("ledger", "block", "normalized");
    Draft::derived(subject, &name, network.id.to_string(), payload, time)
}

pub(crate) fn finality_advanced(network: &Network, height: i64, cause: &Cause) -> Draft {
    let payload = json!({"network_id": network.id, "finalized_height": height});
    let name = format!("{}:{height}:{}", network.id, cause.id);
    let subject = subject("ledger", "finality", "advanced");
    Draft::derived(subject, &name, network.id.to_string(), payload, cause.at)
}

/// One event per 500 assets, in order of their ids.
pub(crate) fn ownership_changed(
    network: &Network,
    reason: &'static str,
    height: i64,
    assets: &BTreeSet<AssetId>,
    cause: &Cause,
) -> Vec<Draft> {
    let assets: Vec<AssetId> = assets.iter().copied().collect();
    assets
        .chunks(ASSETS_PER_EVENT)
        .enumerate()
        .map(|(at, assets)| {
            let payload =
                json!({"network_id": network.id, "reason": reason, "height": height, "assets": assets});
            let name = format!("{}:{reason}:{height}:{at}:{}", network.id, cause.id);
            let subject = subject("ledger", "ownership", "changed");
            Draft::derived(subject, &name, network.id.to_string(), payload, cause.at)
        })
        .collect()
}
