//! Which keys a batch of ledger events touches. Pure.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use tidemark_model::envelope::Envelope;
use tidemark_model::ids::{AccountId, AssetId, BlockHash, CollectionId, EventId, NetworkId, TxId};
use tidemark_store::projection::live::TransferRow;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::WorkError;

/// What to recompute of one network.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Touched {
    /// Events that were normalized, reverted or included again.
    pub events: BTreeSet<EventId>,
    /// Those of them of which a message says all that matters here, as the ledger told them when it wrote them: true for as
    /// long as the event stands in that block, because what an event says follows its block.
    pub told: BTreeMap<EventId, ToldEvent>,
    /// The assets those events name.
    pub event_assets: BTreeSet<AssetId>,
    /// Assets that a reorg or an opening changed: their rows that depend on something above finality.
    pub assets: BTreeSet<AssetId>,
    /// Assets of which everything is recomputed: rewinds, repair.
    pub whole_assets: BTreeSet<AssetId>,
    /// The ledger's new finality line, and when the chain reported it.
    pub finalized: Option<(i64, OffsetDateTime)>,
    /// Newest block of which all events have arrived: the projector's watermark, and that block's hash.
    pub normalized: Option<(i64, Option<String>)>,
}

/// An event as a message has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToldEvent {
    /// Its block.
    pub height: i64,
    /// That block's hash.
    pub block_hash: BlockHash,
    /// The transfer it is, if it moves something.
    pub transfer: Option<ToldTransfer>,
}

/// A transfer as a message has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToldTransfer {
    /// The row it makes.
    pub row: TransferRow,
    /// The token id as the chain has it.
    pub token_id: String,
}

#[derive(Deserialize)]
struct EventsNormalized<'a> {
    network_id: NetworkId,
    block_number: i64,
    block_hash: BlockHash,
    event_time: &'a str,
    #[serde(borrow)]
    events: Vec<EventNormalized<'a>>,
}
#[derive(Deserialize)]
struct EventNormalized<'a> {
    event_id: EventId,
    kind: &'a str,
    asset_id: Option<AssetId>,
    collection_id: Option<CollectionId>,
    /// Not where an event is named again long after it was written.
    token_id: Option<&'a str>,
    from_account_id: Option<AccountId>,
    to_account_id: Option<AccountId>,
    qty: &'a str,
    tx_hash: TxId,
    event_index: i32,
    sub_index: &'a str,
}

impl EventNormalized<'_> {
    /// What it says, if that is all there is to say.
    fn told(&self, block: &EventsNormalized<'_>, event_time: OffsetDateTime) -> Option<ToldEvent> {
        let moves = self.from_account_id.is_some() || self.to_account_id.is_some();
        let transfer = match self.kind {
            "transfer" | "mint" | "burn" if moves => Some(self.transfer(block, event_time)?),
            _ => None,
        };
        Some(ToldEvent { height: block.block_number, block_hash: block.block_hash, transfer })
    }

    fn transfer(&self, block: &EventsNormalized<'_>, event_time: OffsetDateTime) -> Option<ToldTransfer> {
        let row = TransferRow {
            event_id: self.event_id,
            height: block.block_number,
            event_index: self.event_index,
            sub_index: self.sub_index.parse().ok()?,
            kind: self.kind.to_owned(),
            asset_id: self.asset_id?,
            collection_id: self.collection_id?,
            from_account: self.from_account_id,
            to_account: self.to_account_id,
            qty: self.qty.to_owned(),
            tx_hash: self.tx_hash.as_bytes().to_vec(),
            block_hash: block.block_hash.0.to_vec(),
            event_time,
            is_reverted: false,
        };
        Some(ToldTransfer { row, token_id: self.token_id?.to_owned() })
    }
}

#[derive(Deserialize)]
struct EventReverted {
    network_id: NetworkId,
    event_id: EventId,
    asset_id: Option<AssetId>,
}
#[derive(Deserialize)]
struct EventsReverted {
    network_id: NetworkId,
    events: Vec<EventNamed>,
}
#[derive(Deserialize)]
struct EventNamed {
    event_id: EventId,
    asset_id: Option<AssetId>,
}
#[derive(Deserialize)]
struct OwnershipChanged {
    network_id: NetworkId,
    reason: String,
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
    for envelope in batch {
        match (envelope.event_type.as_str(), envelope.event_version) {
            ("ledger.event.normalized", _) => {
                let block: EventsNormalized<'_> = payload(envelope)?;
                all.entry(block.network_id).or_default().normalized(&block);
            }
            ("ledger.event.reverted", 1) => {
                let event: EventReverted = payload(envelope)?;
                let named = EventNamed { event_id: event.event_id, asset_id: event.asset_id };
                all.entry(event.network_id).or_default().reverted(&named);
            }
            ("ledger.event.reverted", _) => {
                let block: EventsReverted = payload(envelope)?;
                let one = all.entry(block.network_id).or_default();
                block.events.iter().for_each(|event| one.reverted(event));
            }
            ("ledger.ownership.changed", _) => {
                let change: OwnershipChanged = payload(envelope)?;
                let one = all.entry(change.network_id).or_default();
                match change.reason.as_str() {
                    // What these change has a row that depends on something above finality, or is a side of an
                    // event in the stream. An opening belongs to a side of the event that needs it.
                    "reorg" | "opening" => one.assets.extend(change.assets),
                    // The line that follows says it, and the positions of events say of which rows. What is
                    // confirmed readers see from heights; it is no longer said.
                    "finalized" | "confirmed" => {}
                    // Anything else may change any row.
                    _ => one.whole_assets.extend(change.assets),
                }
            }
            ("ledger.block.normalized", _) => {
                let block: BlockNormalized = payload(envelope)?;
                // The last one counts: after a reorg the watermark goes back.
                all.entry(block.network_id).or_default().normalized = Some((block.height, block.hash));
            }
            ("ledger.finality.advanced", _) => {
                let line: FinalityAdvanced = payload(envelope)?;
                let one = all.entry(line.network_id).or_default();
                if one.finalized.is_none_or(|(height, _)| height < line.finalized_height) {
                    one.finalized = Some((line.finalized_height, envelope.occurred_at));
                }
            }
            _ => {}
        }
    }
    Ok(all)
}

impl Touched {
    /// The last message about an event counts.
    fn normalized(&mut self, block: &EventsNormalized<'_>) {
        let event_time = OffsetDateTime::parse(block.event_time, &Rfc3339).ok();
        for event in &block.events {
            self.events.insert(event.event_id);
            self.event_assets.extend(event.asset_id);
            match event_time.and_then(|at| event.told(block, at)) {
                Some(told) => self.told.insert(event.event_id, told),
                None => self.told.remove(&event.event_id),
            };
        }
    }

    fn reverted(&mut self, event: &EventNamed) {
        self.events.insert(event.event_id);
        self.event_assets.extend(event.asset_id);
        self.told.remove(&event.event_id);
    }
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

    fn normalized(network: i32, token: Option<&str>) -> Envelope {
        let hash = format!("0x{}", "11".repeat(32));
        let mut event = json!({
            "event_id": id(1), "source_event_id": "s", "sub_index": "3", "kind": "transfer", "asset_id": id(2),
            "collection_id": id(12), "from_account_id": id(13), "to_account_id": null, "qty": "5",
            "tx_hash": hash, "event_index": 4, "finality_status": "pending",
        });
        if let Some(token) = token {
            event["token_id"] = token.into();
        }
        envelope(
            "ledger.event.normalized",
            json!({
                "network_id": network, "block_number": 9, "block_hash": hash,
                "event_time": "2026-01-02T03:04:05Z", "events": [event],
            }),
        )
    }

    fn reverted(version: u32, payload: Value) -> Envelope {
        Envelope { event_version: version, ..envelope("ledger.event.reverted", payload) }
    }

    #[test]
    fn keys_are_collected_by_network() {
        let batch = [
            normalized(1, Some("7")),
            reverted(1, json!({"network_id": 2, "event_id": id(3), "asset_id": null})),
            reverted(2, json!({"network_id": 2, "events": [{"event_id": id(7), "asset_id": id(8)}]})),
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
        assert_eq!(one.assets, BTreeSet::from([AssetId(id(6))]), "a final asset is found by its events");
        assert_eq!(one.whole_assets, BTreeSet::from([AssetId(id(5))]));
        assert_eq!(one.normalized, Some((8, Some("0x".to_owned()))), "the last block counts");
        assert_eq!(one.finalized.map(|(height, _)| height), Some(7), "finality never goes back");
        let two = &all[&NetworkId(2)];
        assert_eq!(two.events, BTreeSet::from([EventId(id(3)), EventId(id(7))]));
        assert_eq!(two.event_assets, BTreeSet::from([AssetId(id(8))]));
    }

    #[test]
    fn a_transfer_is_told_until_another_message_says_less_of_it() {
        let told = |batch: &[Envelope]| {
            touched(&batch.iter().collect::<Vec<_>>()).expect("readable")[&NetworkId(1)].told.clone()
        };
        let whole = told(&[normalized(1, None), normalized(1, Some("7"))]);
        let transfer = whole[&EventId(id(1))].transfer.as_ref().expect("it moves something");
        assert_eq!((transfer.token_id.as_str(), transfer.row.place()), ("7", (9, 4, 3)));
        assert_eq!((transfer.row.from_account, transfer.row.to_account), (Some(AccountId(id(13))), None));
        assert_eq!((transfer.row.qty.as_str(), transfer.row.event_time.year()), ("5", 2026));
        assert!(told(&[normalized(1, Some("7")), normalized(1, None)]).is_empty());
        let gone = json!({"network_id": 1, "events": [{"event_id": id(1), "asset_id": id(2)}]});
        assert!(told(&[normalized(1, Some("7")), reverted(2, gone)]).is_empty());
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
