//! Which keys a batch of ledger events touches. Pure.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use tidemark_model::envelope::Envelope;
use tidemark_model::ids::{AssetId, EventId, NetworkId};
use time::OffsetDateTime;

use super::WorkError;

/// What to recompute of one network.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Touched {
    /// Events that were normalized, reverted or included again.
    pub events: BTreeSet<EventId>,
    /// The assets those events name.
    pub event_assets: BTreeSet<AssetId>,
    /// Assets that a reorg or an opening changed: their rows that depend on something above finality.
    pub assets: BTreeSet<AssetId>,
    /// Assets some of whose events became final, if the line that says so is in the batch too.
    pub final_assets: BTreeSet<AssetId>,
    /// Assets of which everything is recomputed: rewinds, repair.
    pub whole_assets: BTreeSet<AssetId>,
    /// The ledger's new finality line, and when the chain reported it.
    pub finalized: Option<(i64, OffsetDateTime)>,
    /// Newest block of which all events have arrived: the projector's watermark, and that block's hash.
    pub normalized: Option<(i64, Option<String>)>,
}

#[derive(Deserialize)]
struct EventsNormalized {
    network_id: NetworkId,
    events: Vec<EventNamed>,
}
#[derive(Deserialize)]
struct EventNamed {
    event_id: EventId,
    asset_id: Option<AssetId>,
}
#[derive(Deserialize)]
struct EventReverted {
    network_id: NetworkId,
    event_id: EventId,
    asset_id: Option<AssetId>,
}
#[derive(Deserialize)]
struct OwnershipChanged {
    network_id: NetworkId,
    reason: String,
    height: i64,
    assets: Vec<AssetId>,
}
#[derive(Deserialize)]
struct BlockNormalized {
    network_id: NetworkId,
    height: i64,
    hash: Option<String>,
}
#[derive(Deserialize)]
struct FinalityAdvanced {
    network_id: NetworkId,
    finalized_height: i64,
}

/// The keys of a batch, by network. Events that are not the ledger's touch nothing.
pub fn touched(batch: &[&Envelope]) -> Result<BTreeMap<NetworkId, Touched>, WorkError> {
    let mut all: BTreeMap<NetworkId, Touched> = BTreeMap::new();
    let mut final_through: BTreeMap<NetworkId, i64> = BTreeMap::new();
    for envelope in batch {
        match envelope.event_type.as_str() {
            "ledger.event.normalized" => {
                let block: EventsNormalized = payload(envelope)?;
                let one = all.entry(block.network_id).or_default();
                one.events.extend(block.events.iter().map(|event| event.event_id));
                one.event_assets.extend(block.events.iter().filter_map(|event| event.asset_id));
            }
            "ledger.event.reverted" => {
                let event: EventReverted = payload(envelope)?;
                let one = all.entry(event.network_id).or_default();
                one.events.insert(event.event_id);
                one.event_assets.extend(event.asset_id);
            }
            "ledger.ownership.changed" => {
                let change: OwnershipChanged = payload(envelope)?;
                let one = all.entry(change.network_id).or_default();
                match change.reason.as_str() {
                    // What these change has a row that depends on something above finality, or is a side of an
                    // event in the stream. An opening belongs to a side of the event that needs it.
                    "reorg" | "opening" => one.assets.extend(change.assets),
                    "finalized" => {
                        one.final_assets.extend(change.assets);
                        let through = final_through.entry(change.network_id).or_insert(change.height);
                        *through = change.height.max(*through);
                    }
                    // No longer said: readers see from heights what is confirmed.
                    "confirmed" => {}
                    // Anything else may change any row.
                    _ => one.whole_assets.extend(change.assets),
                }
            }
            "ledger.block.normalized" => {
                let block: BlockNormalized = payload(envelope)?;
                // The last one counts: after a reorg the watermark goes back.
                all.entry(block.network_id).or_default().normalized = Some((block.height, block.hash));
            }
            "ledger.finality.advanced" => {
                let line: FinalityAdvanced = payload(envelope)?;
                let one = all.entry(line.network_id).or_default();
                if one.finalized.is_none_or(|(height, _)| height < line.finalized_height) {
                    one.finalized = Some((line.finalized_height, envelope.occurred_at));
                }
            }
            _ => {}
        }
    }
    // The line comes after its assets, perhaps in the next batch. Then their rows are written once more, so that
    // all holders of an asset become final at the same moment.
    for (network, through) in final_through {
        let one = all.entry(network).or_default();
        if one.finalized.is_none_or(|(height, _)| height < through) {
            one.assets.append(&mut one.final_assets);
        }
    }
    Ok(all)
}

fn payload<'a, T: Deserialize<'a>>(envelope: &'a Envelope) -> Result<T, WorkError> {
    T::deserialize(&envelope.payload).map_err(|source| WorkError::Payload {
        subject: envelope.event_type.clone(),
        event_id: envelope.event_id.to_string(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use uuid::Uuid;

    use super::*;

    fn envelope(subject: &str, payload: Value) -> Envelope {
        crate::sample::envelope(subject, "1", payload)
    }

    fn id(number: u128) -> Uuid {
        Uuid::from_u128(number)
    }

    #[test]
    fn keys_are_collected_by_network() {
        let batch = [
            envelope(
                "ledger.event.normalized",
                json!({"network_id": 1, "events": [{"event_id": id(1), "asset_id": id(2)}]}),
            ),
            envelope("ledger.event.reverted", json!({"network_id": 2, "event_id": id(3), "asset_id": null})),
            envelope(
                "ledger.ownership.changed",
                json!({"network_id": 1, "reason": "finalized", "height": 5, "assets": [id(4)]}),
            ),
            envelope(
                "ledger.ownership.changed",
                json!({"network_id": 1, "reason": "reorg", "height": 5, "assets": [id(6)]}),
            ),
            envelope(
                "ledger.ownership.changed",
                json!({"network_id": 1, "reason": "rewind", "height": 5, "assets": [id(5)]}),
            ),
            envelope(
                "ledger.block.normalized",
                json!({"network_id": 1, "height": 9, "hash": "0x", "events": 1}),
            ),
            envelope(
                "ledger.block.normalized",
                json!({"network_id": 1, "height": 8, "hash": "0x", "events": 1}),
            ),
            envelope("ledger.finality.advanced", json!({"network_id": 1, "finalized_height": 7})),
            envelope("ledger.finality.advanced", json!({"network_id": 1, "finalized_height": 6})),
            envelope("catalog.asset.created", json!({"network_id": 9})),
        ];
        let all = touched(&batch.iter().collect::<Vec<_>>()).expect("readable");
        assert_eq!(all.keys().map(|network| network.0).collect::<Vec<_>>(), [1, 2]);
        let one = &all[&NetworkId(1)];
        assert_eq!(one.events, BTreeSet::from([EventId(id(1))]));
        assert_eq!(one.event_assets, BTreeSet::from([AssetId(id(2))]));
        assert_eq!(one.final_assets, BTreeSet::from([AssetId(id(4))]));
        assert_eq!(one.assets, BTreeSet::from([AssetId(id(6))]));
        assert_eq!(one.whole_assets, BTreeSet::from([AssetId(id(5))]));
        assert_eq!(one.normalized, Some((8, Some("0x".to_owned()))), "the last block counts");
        assert_eq!(one.finalized.map(|(height, _)| height), Some(7), "finality never goes back");
        assert_eq!(all[&NetworkId(2)].events.len(), 1);
    }

    #[test]
    fn assets_that_are_final_before_their_line_are_written() {
        let change = |height| {
            let assets = [id(1)];
            envelope(
                "ledger.ownership.changed",
                json!({"network_id": 1, "reason": "finalized", "height": height, "assets": assets}),
            )
        };
        let line = envelope("ledger.finality.advanced", json!({"network_id": 1, "finalized_height": 7}));
        for (batch, waits) in
            [(vec![change(7)], true), (vec![change(7), line.clone()], false), (vec![line, change(8)], true)]
        {
            let all = touched(&batch.iter().collect::<Vec<_>>()).expect("readable");
            let one = &all[&NetworkId(1)];
            assert_eq!((one.assets.len(), one.final_assets.len()), if waits { (1, 0) } else { (0, 1) });
        }
    }

    #[test]
    fn a_payload_that_breaks_its_schema_is_named() {
        let broken = envelope("ledger.event.normalized", json!({"network_id": 1}));
        let error = touched(&[&broken]).expect_err("unreadable").to_string();
        assert!(
            error.contains("ledger.event.normalized") && error.contains(&broken.event_id.to_string()),
            "{error}"
        );
    }
}
