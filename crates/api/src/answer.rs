//! The shape of every answer: `{items, next, meta}` for lists, `{item, meta}` for single things, and what
//! `meta` says about how far we have read.

use serde::Serialize;
use tidemark_store::reads::NetworkRow;
use time::OffsetDateTime;
use utoipa::ToSchema;

/// How far the data behind an answer goes.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Meta {
    /// Everything at or below this height is in the answer; null when it spans several networks.
    pub data_watermark: Option<i64>,
    /// Nothing at or below this height will change; null when it spans several networks.
    pub finalized_height: Option<i64>,
    /// How far the watermark is behind the chain's head, in seconds of chain time.
    pub lag_seconds: Option<i64>,
    /// The workers whose progress the watermark is the least of.
    pub required_workers: Vec<&'static str>,
    /// When the answer was made.
    #[serde(with = "time::serde::rfc3339")]
    pub generated_at: OffsetDateTime,
    /// The height the answer is of, when `as_of` was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub as_of_height: Option<i64>,
    /// The same facts per network, for answers that span several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<NetworkMark>,
}

/// How far one network is read.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct NetworkMark {
    /// Network id.
    pub network_id: i32,
    /// Short name.
    pub network: String,
    /// Everything at or below is in the answer.
    pub data_watermark: Option<i64>,
    /// Nothing at or below will change.
    pub finalized_height: Option<i64>,
    /// Seconds behind the chain's head.
    pub lag_seconds: Option<i64>,
}

/// What answers from projection.* rest on.
pub(crate) const PROJECTION: &[&str] = &["ingester", "ledger", "projector"];
/// What answers from raw rows rest on.
pub(crate) const RAW: &[&str] = &["ingester"];

impl Meta {
    pub(crate) fn of(network: &NetworkRow) -> Self {
        Self {
            data_watermark: network.projected_height,
            finalized_height: network.finalized_height,
            lag_seconds: lag_seconds(network),
            required_workers: PROJECTION.to_vec(),
            generated_at: OffsetDateTime::now_utc(),
            as_of_height: None,
            networks: Vec::new(),
        }
    }
    pub(crate) fn across(networks: &[NetworkRow]) -> Self {
        if let [only] = networks {
            return Self::of(only);
        }
        Self {
            data_watermark: None,
            finalized_height: None,
            lag_seconds: networks.iter().filter_map(lag_seconds).max(),
            required_workers: PROJECTION.to_vec(),
            generated_at: OffsetDateTime::now_utc(),
            as_of_height: None,
            networks: networks
                .iter()
                .map(|network| NetworkMark {
                    network_id: network.network_id,
                    network: network.slug.clone(),
                    data_watermark: network.projected_height,
                    finalized_height: network.finalized_height,
                    lag_seconds: lag_seconds(network),
                })
                .collect(),
        }
    }
    pub(crate) fn raw(network: &NetworkRow) -> Self {
        Self {
            data_watermark: network.ingested_height.or(network.projected_height),
            required_workers: RAW.to_vec(),
            ..Self::of(network)
        }
    }
}

/// Chain time between the newest block we answer from and the head; zero when we are there.
pub(crate) fn lag_seconds(network: &NetworkRow) -> Option<i64> {
    if !is_behind(network) {
        return network.head_height.map(|_| 0);
    }
    let (head, projected) = (network.head_time?, network.projected_time?);
    Some((head - projected).whole_seconds().max(0))
}

/// Is there something on chain that we may not have read yet?
pub(crate) fn is_behind(network: &NetworkRow) -> bool {
    match (network.head_height, network.projected_height) {
        (Some(head), Some(projected)) => projected < head,
        (_, None) => true,
        (None, Some(_)) => false,
    }
}

/// A list.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Page<T> {
    /// The rows.
    pub items: Vec<T>,
    /// The cursor of the next page; null at the end.
    pub next: Option<String>,
    /// How far the data goes.
    pub meta: Meta,
}

/// A single thing.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct One<T> {
    /// The thing.
    pub item: T,
    /// How far the data goes.
    pub meta: Meta,
}

/// Cuts the row that was read beyond the page and says whether there was one.
pub(crate) fn cut<T>(rows: &mut Vec<T>, limit: i64) -> bool {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let more = rows.len() > limit;
    rows.truncate(limit);
    more
}
