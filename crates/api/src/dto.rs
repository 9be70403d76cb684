//! What answers hold. Amounts and token ids are strings (they exceed 2^53), heights are numbers, names went
//! through `model::text::shown`, nullable fields are always there.

use serde::{Deserialize, Serialize};
use tidemark_model::finality::{FinalityStatus, status_at};
use tidemark_model::ids::Height;
use tidemark_model::text::shown;
use tidemark_store::reads;
use tidemark_store::reads::NetworkRow;
use time::OffsetDateTime;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::answer::lag_seconds;

/// `0x` and hex digits.
pub(crate) fn hex0x(bytes: &[u8]) -> String {
    format!("0x{}", hex::encode(bytes))
}

fn name(text: Option<&str>) -> Option<String> {
    text.map(shown).filter(|text| !text.is_empty())
}

/// How sure a row at `height` is.
pub(crate) fn finality(network: &NetworkRow, height: i64, is_reverted: bool) -> FinalityStatus {
    if is_reverted {
        return FinalityStatus::Reverted;
    }
    let as_height = |value: i64| u64::try_from(value).ok().map(Height);
    let head = network.head_height.or(network.projected_height).and_then(as_height).unwrap_or_default();
    status_at(
        as_height(height).unwrap_or_default(),
        head,
        network.finalized_height.and_then(as_height),
        u64::try_from(network.confirmations).unwrap_or(0),
    )
}

/// A network and how far we have read it.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Network {
    /// Network id.
    pub id: i32,
    /// Short name, usable wherever `{network}` is asked.
    pub slug: String,
    /// Chain family.
    pub family: String,
    /// First height we read.
    pub start_block: i64,
    /// Blocks above an event before it counts as confirmed.
    pub confirmations: i64,
    /// Newest block the nodes report.
    pub head_height: Option<i64>,
    /// Its time.
    #[serde(with = "time::serde::rfc3339::option")]
    pub head_time: Option<OffsetDateTime>,
    /// Raw rows are stored up to here.
    pub ingested_height: Option<i64>,
    /// The ledger is complete up to here.
    pub normalized_height: Option<i64>,
    /// Answers are complete up to here.
    pub projected_height: Option<i64>,
    /// The tidemark: nothing at or below changes.
    pub finalized_height: Option<i64>,
    /// When the tidemark last moved.
    #[serde(with = "time::serde::rfc3339::option")]
    pub finalized_at: Option<OffsetDateTime>,
    /// Seconds of chain time between our newest block and the head.
    pub lag_seconds: Option<i64>,
    /// `live`, `catching_up` or `halted`.
    pub state: &'static str,
    /// Why the network is halted.
    pub halted_reason: Option<String>,
    /// Events projected so far.
    pub events_total: i64,
    /// Reorgs handled so far.
    pub reorgs_total: i64,
    /// When these facts were written.
    #[serde(with = "time::serde::rfc3339")]
    pub updated_at: OffsetDateTime,
}

impl From<&NetworkRow> for Network {
    fn from(row: &NetworkRow) -> Self {
        let lag = lag_seconds(row);
        Self {
            id: row.network_id,
            slug: row.slug.clone(),
            family: row.family.clone(),
            start_block: row.start_block,
            confirmations: row.confirmations,
            head_height: row.head_height,
            head_time: row.head_time,
            ingested_height: row.ingested_height,
            normalized_height: row.normalized_height,
            projected_height: row.projected_height,
            finalized_height: row.finalized_height,
            finalized_at: row.finalized_at,
            lag_seconds: lag,
            state: match (&row.halted_reason, lag) {
                (Some(_), _) => "halted",
                (None, Some(lag)) if lag <= 30 => "live",
                (None, _) => "catching_up",
            },
            halted_reason: row.halted_reason.clone(),
            events_total: row.events_total,
            reorgs_total: row.reorgs_total,
            updated_at: row.updated_at,
        }
    }
}

/// A collection.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Collection {
    /// Collection id.
    pub id: Uuid,
    /// Network id.
    pub network_id: i32,
    /// Network's short name.
    pub network: String,
    /// Contract address.
    pub address: String,
    /// Token standard.
    pub standard: String,
    /// Slug.
    pub slug: Option<String>,
    /// Name as it may be shown.
    pub name: Option<String>,
    /// Verified by address.
    pub verified: bool,
    /// Metadata has not come yet.
    pub is_stub: bool,
    /// `ok` or `unreliable`.
    pub reliability: String,
    /// Why its events cannot be trusted.
    pub unreliable_reason: Option<String>,
    /// Distinct owners.
    pub owners_count: i64,
    /// Distinct assets.
    pub asset_count: i64,
    /// Units over all assets.
    #[schema(example = "10000")]
    pub total_supply: String,
    /// Transfers so far.
    pub transfer_count: i64,
    /// Height of its newest event.
    pub last_height: i64,
    /// When these numbers were written.
    #[serde(with = "time::serde::rfc3339")]
    pub updated_at: OffsetDateTime,
}

/// The numbers of a collection. Market columns are null until a marketplace is read.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct CollectionStats {
    /// Collection id.
    pub collection_id: Uuid,
    /// Distinct owners.
    pub owners_count: i64,
    /// Distinct assets.
    pub asset_count: i64,
    /// Units over all assets.
    pub total_supply: String,
    /// Assets without metadata.
    pub stub_count: i64,
    /// Transfers so far.
    pub transfer_count: i64,
    /// Lowest listing.
    pub floor_price_usd: Option<String>,
    /// Volume of a day.
    pub volume_24h_usd: Option<String>,
    /// Volume of a week.
    pub volume_7d_usd: Option<String>,
    /// Volume of thirty days.
    pub volume_30d_usd: Option<String>,
    /// Assets listed.
    pub listed_count: Option<i64>,
    /// When these numbers were written.
    #[serde(with = "time::serde::rfc3339")]
    pub updated_at: OffsetDateTime,
}

impl Collection {
    pub(crate) fn new(row: &reads::CollectionRow, slug: &str) -> Self {
        Self {
            id: row.collection_id,
            network_id: row.network_id,
            network: slug.to_owned(),
            address: row.address.clone(),
            standard: row.standard.clone(),
            slug: row.slug.clone(),
            name: name(row.name.as_deref()),
            verified: row.verified,
            is_stub: row.is_stub,
            reliability: row.reliability.clone(),
            unreliable_reason: row.unreliable_reason.clone(),
            owners_count: row.owners_count,
            asset_count: row.asset_count,
            total_supply: row.total_supply.clone(),
            transfer_count: row.transfer_count,
            last_height: row.last_height,
            updated_at: row.updated_at,
        }
    }
}

impl From<&reads::CollectionRow> for CollectionStats {
    fn from(row: &reads::CollectionRow) -> Self {
        Self {
            collection_id: row.collection_id,
            owners_count: row.owners_count,
            asset_count: row.asset_count,
            total_supply: row.total_supply.clone(),
            stub_count: row.stub_count,
            transfer_count: row.transfer_count,
            floor_price_usd: None,
            volume_24h_usd: None,
            volume_7d_usd: None,
            volume_30d_usd: None,
            listed_count: None,
            updated_at: row.updated_at,
        }
    }
}

/// A holder of a collection.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Holder {
    /// Account id.
    pub account_id: Uuid,
    /// Address.
    pub address: Option<String>,
    /// Distinct assets held.
    pub asset_count: i64,
    /// Units held.
    pub qty: String,
}

impl From<reads::HolderRow> for Holder {
    fn from(row: reads::HolderRow) -> Self {
        Self { account_id: row.account_id, address: row.address, asset_count: row.asset_count, qty: row.qty }
    }
}

/// An asset: one token, or one class of equal tokens.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Asset {
    /// Asset id.
    pub id: Uuid,
    /// Network id.
    pub network_id: i32,
    /// Network's short name.
    pub network: String,
    /// Contract address.
    pub contract: Option<String>,
    /// Collection id.
    pub collection_id: Uuid,
    /// Collection name as it may be shown.
    pub collection_name: Option<String>,
    /// Token id as the chain writes it.
    #[schema(example = "1204")]
    pub token_id: String,
    /// Token standard.
    pub standard: String,
    /// Name as it may be shown.
    pub name: Option<String>,
    /// Picture as the metadata names it. Untrusted: never load it with credentials.
    pub image_url: Option<String>,
    /// Metadata has not come yet.
    pub is_stub: bool,
    /// Nothing of it is left.
    pub is_burned: bool,
    /// Units in existence.
    #[schema(example = "1")]
    pub supply: String,
    /// `complete`, or `partial` when it existed before the first block we read.
    pub history: String,
    /// How sure the newest thing about it is.
    pub finality_status: String,
    /// Height of its newest event.
    pub last_height: i64,
    /// When this was written.
    #[serde(with = "time::serde::rfc3339")]
    pub updated_at: OffsetDateTime,
}

impl Asset {
    pub(crate) fn new(row: reads::AssetRow, slug: &str) -> Self {
        Self {
            id: row.asset_id,
            network_id: row.network_id,
            network: slug.to_owned(),
            contract: row.contract,
            collection_id: row.collection_id,
            collection_name: name(row.collection_name.as_deref()),
            name: name(row.name.as_deref()),
            token_id: row.token_id,
            standard: row.standard,
            image_url: row.image_url,
            is_stub: row.is_stub,
            is_burned: row.is_burned,
            supply: row.supply,
            history: row.history,
            finality_status: row.finality_status,
            last_height: row.last_height,
            updated_at: row.updated_at,
        }
    }
}

/// An owner of an asset.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Owner {
    /// Account id.
    pub account_id: Uuid,
    /// Address.
    pub address: Option<String>,
    /// Units at the asked finality.
    #[schema(example = "1")]
    pub qty: String,
    /// Units that are final.
    #[schema(example = "1")]
    pub qty_finalized: String,
    /// How sure `qty` is.
    pub finality_status: String,
    /// When this was written; with `as_of`, when it last changed before that.
    #[serde(with = "time::serde::rfc3339")]
    pub updated_at: OffsetDateTime,
}

impl From<reads::OwnerRow> for Owner {
    fn from(row: reads::OwnerRow) -> Self {
        Self {
            account_id: row.account_id,
            address: row.address,
            qty: row.qty,
            qty_finalized: row.qty_finalized,
            finality_status: row.finality_status,
            updated_at: row.updated_at,
        }
    }
}

/// An account.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Account {
    /// Account id.
    pub id: Uuid,
    /// Network id.
    pub network_id: i32,
    /// Network's short name.
    pub network: String,
    /// Address.
    pub address: String,
    /// Distinct assets held.
    pub asset_count: i64,
    /// Transfers it took part in.
    pub transfer_count: i64,
    /// First event.
    #[serde(with = "time::serde::rfc3339")]
    pub first_seen_at: OffsetDateTime,
    /// Newest event.
    #[serde(with = "time::serde::rfc3339")]
    pub last_seen_at: OffsetDateTime,
    /// The collection at this address, when the account is a contract with assets.
    pub collection_id: Option<Uuid>,
}

impl Account {
    pub(crate) fn new(row: reads::AccountRow, slug: &str, collection_id: Option<Uuid>) -> Self {
        Self {
            id: row.account_id,
            network_id: row.network_id,
            network: slug.to_owned(),
            address: row.address,
            asset_count: row.asset_count,
            transfer_count: row.transfer_count,
            first_seen_at: row.first_seen_at,
            last_seen_at: row.last_seen_at,
            collection_id,
        }
    }
}

/// An asset in an account.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Holding {
    /// The asset.
    pub asset: Asset,
    /// Units at the asked finality.
    #[schema(example = "1")]
    pub qty: String,
    /// Units that are final.
    pub qty_finalized: String,
    /// How sure `qty` is.
    pub finality_status: String,
}

impl Holding {
    pub(crate) fn new(row: reads::HoldingRow, slug: &str) -> Self {
        Self {
            asset: Asset::new(row.asset, slug),
            qty: row.qty,
            qty_finalized: row.qty_finalized,
            finality_status: row.finality_status,
        }
    }
}

/// A collection an account holds something of.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct CollectionHolding {
    /// The collection.
    pub collection: Collection,
    /// Distinct assets held.
    pub asset_count: i64,
    /// Units held.
    pub qty: String,
}

/// A transfer, mint or burn.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Transfer {
    /// Event id: the same for the same chain event, always.
    pub event_id: Uuid,
    /// Network id.
    pub network_id: i32,
    /// Network's short name.
    pub network: String,
    /// transfer, mint, burn or opening.
    pub kind: String,
    /// Asset id.
    pub asset_id: Uuid,
    /// Collection id.
    pub collection_id: Uuid,
    /// Contract address.
    pub contract: Option<String>,
    /// Token id.
    pub token_id: Option<String>,
    /// Token standard.
    pub standard: Option<String>,
    /// Asset name as it may be shown.
    pub asset_name: Option<String>,
    /// Collection name as it may be shown.
    pub collection_name: Option<String>,
    /// Who lost it; null for a mint.
    pub from: Option<String>,
    /// Who got it; null for a burn.
    pub to: Option<String>,
    /// Units moved.
    #[schema(example = "1")]
    pub qty: String,
    /// Height.
    pub height: i64,
    /// Block hash.
    pub block_hash: String,
    /// Transaction hash.
    pub tx_hash: String,
    /// Index of the event in its block.
    pub event_index: i32,
    /// Index within the event.
    pub sub_index: i32,
    /// Block time.
    #[serde(with = "time::serde::rfc3339")]
    pub event_time: OffsetDateTime,
    /// pending, confirmed, finalized or reverted.
    pub finality_status: String,
    /// Blocks above it, up to what the network asks for.
    pub confirmations: i64,
}

impl Transfer {
    pub(crate) fn new(row: reads::TransferRow, network: &NetworkRow) -> Self {
        let head = network.head_height.or(network.projected_height).unwrap_or(0);
        Self {
            event_id: row.place.event_id,
            network_id: row.network_id,
            network: network.slug.clone(),
            kind: row.kind,
            asset_id: row.asset_id,
            collection_id: row.collection_id,
            contract: row.contract,
            token_id: row.token_id,
            standard: row.standard,
            asset_name: name(row.asset_name.as_deref()),
            collection_name: name(row.collection_name.as_deref()),
            from: row.from_address,
            to: row.to_address,
            qty: row.qty,
            height: row.place.height,
            block_hash: hex0x(&row.block_hash),
            tx_hash: hex0x(&row.tx_hash),
            event_index: row.place.event_index,
            sub_index: row.place.sub_index,
            event_time: row.event_time,
            finality_status: finality(network, row.place.height, row.is_reverted).to_string(),
            confirmations: head.saturating_sub(row.place.height).max(0),
        }
    }
}

/// A block.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Block {
    /// Network id.
    pub network_id: i32,
    /// Network's short name.
    pub network: String,
    /// Height.
    pub height: i64,
    /// Hash.
    pub hash: String,
    /// Parent's hash.
    pub parent_hash: String,
    /// Time.
    #[serde(with = "time::serde::rfc3339")]
    pub block_time: OffsetDateTime,
    /// Transactions, where the network is read in full.
    pub tx_count: Option<i32>,
    /// Events of ours.
    pub event_count: i32,
    /// pending, confirmed or finalized.
    pub finality_status: String,
}

impl Block {
    pub(crate) fn new(row: &reads::BlockRow, network: &NetworkRow) -> Self {
        Self {
            network_id: row.network_id,
            network: network.slug.clone(),
            height: row.height,
            hash: hex0x(&row.hash),
            parent_hash: hex0x(&row.parent_hash),
            block_time: row.block_time,
            tx_count: row.tx_count,
            event_count: row.event_count,
            finality_status: finality(network, row.height, false).to_string(),
        }
    }
}

/// A transaction, as far as it touched assets.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Transaction {
    /// Network id.
    pub network_id: i32,
    /// Network's short name.
    pub network: String,
    /// Hash.
    pub hash: String,
    /// Height of its block.
    pub height: i64,
    /// Index in its block.
    pub tx_index: i32,
    /// Time of its block.
    #[serde(with = "time::serde::rfc3339")]
    pub block_time: OffsetDateTime,
    /// pending, confirmed or finalized.
    pub finality_status: String,
    /// Sender, where the network is read in full.
    pub sender: Option<String>,
    /// Receiver, where the network is read in full.
    pub receiver: Option<String>,
    /// Value in the smallest unit, where the network is read in full.
    pub value: Option<String>,
    /// Did it succeed? Where the network is read in full.
    pub succeeded: Option<bool>,
    /// Its first hundred transfers, newest first.
    pub transfers: Vec<Transfer>,
}

/// How a transaction stands with us.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct TransactionStatus {
    /// Hash.
    pub hash: String,
    /// not_seen, pending, confirmed or finalized.
    pub status: String,
    /// Are its effects in our answers?
    pub is_projected: bool,
    /// Height of its block.
    pub height: Option<i64>,
    /// Blocks above it.
    pub confirmations: Option<i64>,
    /// Blocks the network asks for.
    pub confirmations_required: i64,
}

/// An event as it was read from the chain.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct RawEvent {
    /// Network id.
    pub network_id: i32,
    /// Height.
    pub height: i64,
    /// Block hash.
    pub block_hash: String,
    /// Transaction hash.
    pub tx_hash: String,
    /// Index of the transaction in its block.
    pub tx_index: i32,
    /// Index of the event in its block.
    pub event_index: i32,
    /// Who emitted it.
    pub emitter: String,
    /// Topics.
    pub topics: Vec<String>,
    /// Data; null when it lies in object storage.
    pub data: Option<String>,
    /// What no field holds.
    #[schema(value_type = Option<Object>)]
    pub payload: Option<serde_json::Value>,
    /// Where large data lies.
    pub payload_ref: Option<String>,
}

impl RawEvent {
    pub(crate) fn new(row: reads::RawEventRow, network: i32, height: i64) -> Self {
        Self {
            network_id: network,
            height,
            block_hash: hex0x(&row.block_hash),
            tx_hash: hex0x(&row.tx_id),
            tx_index: row.tx_index,
            event_index: row.event_index,
            emitter: hex0x(&row.emitter),
            topics: row.topics.chunks(32).map(hex0x).collect(),
            data: row.data.as_deref().map(hex0x),
            payload: row.payload,
            payload_ref: row.payload_ref,
        }
    }
}

/// A canonical event with the raw event it came from.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct EventEvidence {
    /// Event id.
    pub event_id: Uuid,
    /// The chain's own name for it.
    pub source_event_id: String,
    /// pending, confirmed, finalized or reverted.
    pub finality_status: String,
    /// The raw event; null when its block left the chain.
    pub raw: Option<RawEvent>,
}

/// Something that was found.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Found {
    /// collection, asset, account, block, transaction or network.
    pub kind: &'static str,
    /// What to call it.
    pub title: String,
    /// What tells it from others.
    pub subtitle: String,
    /// Network's short name.
    pub network: String,
    /// Its page.
    pub page: String,
    /// Its answer.
    pub api: String,
}

/// Assets asked for together: by id, by natural key, or both.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AssetBatch {
    /// Asset ids.
    #[serde(default)]
    #[schema(max_items = 100)]
    pub ids: Vec<Uuid>,
    /// Natural keys.
    #[serde(default)]
    #[schema(max_items = 100)]
    pub keys: Vec<AssetKey>,
}

/// The natural key of an asset.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AssetKey {
    /// Network id or short name.
    pub network: String,
    /// Contract address.
    pub contract: String,
    /// Token id.
    pub token_id: String,
}
