//! What may be asked: common parameters, extractors that answer with problems, and the parsing of addresses,
//! token ids and hashes.

use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tidemark_model::address;
use tidemark_model::quantity::parse_decimal;
use tidemark_store::reads::NetworkRow;
use time::OffsetDateTime;
use utoipa::{IntoParams, ToSchema};

use crate::problem::Problem;

/// Most rows of a page.
pub const PAGE_ROWS_MAX: u32 = 100;
/// Rows of a page unless asked otherwise.
pub const PAGE_ROWS: u32 = 50;

/// How sure an answer must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum MinFinality {
    /// Everything on the canonical chain.
    #[default]
    Pending,
    /// Only what has the network's number of confirmations.
    Confirmed,
    /// Only what cannot change any more.
    Finalized,
}

impl MinFinality {
    /// The word used in queries.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Confirmed => "confirmed",
            Self::Finalized => "finalized",
        }
    }
    /// Rows at or below this height are sure enough.
    pub(crate) fn height_max(self, network: &NetworkRow) -> i64 {
        let finalized = network.finalized_height.unwrap_or(-1);
        match self {
            Self::Pending => i64::MAX,
            Self::Confirmed => {
                let head = network.head_height.or(network.projected_height).unwrap_or(-1);
                finalized.max(head.saturating_sub(network.confirmations))
            }
            Self::Finalized => finalized,
        }
    }
}

/// Parameters of every read.
#[derive(Debug, Clone, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ReadParams {
    /// How sure the answer must be: pending (default), confirmed or finalized. Owners, holdings, transfers, blocks,
    /// transactions and events are chosen by it; other answers say how sure they are in finality_status.
    #[param(inline)]
    pub min_finality: Option<MinFinality>,
    /// A height or an RFC 3339 time at or below finality: the answer as it was then, where history allows.
    #[param(example = "21403117")]
    pub as_of: Option<String>,
    /// Wait (at most five seconds) until we have read this height: read your own writes.
    #[param(minimum = 0)]
    pub min_height: Option<u64>,
    /// Leave out what has no metadata yet; a single thing without metadata is then a 404.
    pub require_metadata: Option<bool>,
}

impl ReadParams {
    pub(crate) fn finality(&self) -> MinFinality {
        self.min_finality.unwrap_or_default()
    }
    pub(crate) fn require_metadata(&self) -> bool {
        self.require_metadata.unwrap_or(false)
    }
    /// Refuses `min_height` where no network is named: heights belong to a network.
    pub(crate) fn refuse_min_height(&self) -> Result<(), Problem> {
        match self.min_height {
            None => Ok(()),
            Some(_) => Err(Problem::bad(
                "invalid_parameter",
                "min_height needs a network",
                "Heights belong to a network: name one, or leave min_height out.",
            )),
        }
    }
    /// Refuses `as_of` on a list that has no history.
    pub(crate) fn refuse_as_of(&self) -> Result<(), Problem> {
        match &self.as_of {
            None => Ok(()),
            Some(_) => Err(Problem::bad(
                "as_of_unsupported",
                "as_of is not kept for this answer",
                "History is kept for owners of an asset, assets of an account, and transfers.",
            )),
        }
    }
}

/// Parameters of every list.
#[derive(Debug, Clone, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct PageParams {
    /// Rows of a page.
    #[param(minimum = 1, maximum = 100, default = 50)]
    pub limit: Option<u32>,
    /// `next` of the previous page.
    pub cursor: Option<String>,
}

impl PageParams {
    pub(crate) fn limit(&self) -> Result<i64, Problem> {
        match self.limit.unwrap_or(PAGE_ROWS) {
            limit @ 1..=PAGE_ROWS_MAX => Ok(i64::from(limit)),
            limit => Err(Problem::bad(
                "invalid_parameter",
                format!("limit is {limit}"),
                format!("limit goes from 1 to {PAGE_ROWS_MAX}; follow `next` for more."),
            )),
        }
    }
}

/// Which transfers.
#[derive(Debug, Clone, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct TransferParams {
    /// Only these kinds, separated by commas: transfer, mint, burn, opening. A page may then be short, or empty, and
    /// have a `next`: ten thousand rows are looked at per page.
    #[param(example = "mint,burn")]
    pub kind: Option<String>,
    /// Also rows a reorg took back (finality_status `reverted`).
    pub include_reverted: Option<bool>,
}

const KINDS: &[&str] =
    &["transfer", "mint", "burn", "listing", "sale", "offer", "cancel", "opening", "metadata"];

impl TransferParams {
    pub(crate) fn kinds(&self) -> Result<Option<Vec<String>>, Problem> {
        let Some(text) = self.kind.as_deref() else { return Ok(None) };
        let mut kinds: Vec<String> = text.split(',').map(|kind| kind.trim().to_lowercase()).collect();
        kinds.sort();
        kinds.dedup();
        match kinds.iter().find(|kind| !KINDS.contains(&kind.as_str())) {
            None => Ok(Some(kinds)),
            Some(unknown) => Err(Problem::bad(
                "invalid_parameter",
                format!("{unknown:?} is not a kind of event"),
                format!("kind takes {}.", KINDS.join(", ")),
            )),
        }
    }
}

/// A query string that answers with a problem when it cannot be read.
pub struct Q<T>(pub T);
impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Q<T> {
    type Rejection = Problem;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        Ok(Self(Query::<T>::from_request_parts(parts, state).await?.0))
    }
}

/// A path that answers with a problem when it cannot be read.
pub struct P<T>(pub T);
impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for P<T> {
    type Rejection = Problem;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        Ok(Self(Path::<T>::from_request_parts(parts, state).await?.0))
    }
}

/// A JSON body that answers with a problem when it cannot be read.
pub struct J<T>(pub T);
impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for J<T> {
    type Rejection = Problem;
    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        Ok(Self(axum::Json::<T>::from_request(request, state).await?.0))
    }
}

/// The canonical form of an address of this network's family.
pub(crate) fn canonical_address(network: &NetworkRow, text: &str) -> Result<String, Problem> {
    let canonical = match network.family.as_str() {
        "evm" => address::evm(text),
        "solana" => address::solana(text),
        "ton" => address::ton(text),
        _ if !text.is_empty() && text.len() <= 128 && !text.chars().any(char::is_control) => {
            return Ok(text.to_owned());
        }
        _ => {
            return Err(Problem::bad(
                "invalid_address",
                "not an address",
                "See the network's documentation.",
            ));
        }
    };
    canonical.map_err(|error| {
        Problem::bad("invalid_address", error.to_string(), "Copy the address as your wallet shows it.")
    })
}

/// The canonical form of a token id: decimal without leading zeros on EVM, as it is elsewhere.
pub(crate) fn canonical_token_id(network: &NetworkRow, text: &str) -> Result<String, Problem> {
    let refuse = |hint: &str| Problem::bad("invalid_token_id", "not a token id", hint);
    if network.family == "evm" {
        return match parse_decimal(text) {
            Some(number) => Ok(number.to_string()),
            None => Err(refuse("Token ids are decimal numbers of at most 256 bits.")),
        };
    }
    if text.is_empty() || text.len() > 256 || text.chars().any(char::is_control) {
        return Err(refuse("Token ids are short texts without control characters."));
    }
    Ok(text.to_owned())
}

/// The bytes of a hash: `0x` and hex digits, with or without the prefix.
pub(crate) fn hash_bytes(text: &str) -> Result<Vec<u8>, Problem> {
    let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")).unwrap_or(text);
    hex::decode(digits)
        .ok()
        .filter(|bytes| (16..=64).contains(&bytes.len()))
        .ok_or_else(|| Problem::bad("invalid_hash", "not a hash", "A hash is 0x and 64 hex digits."))
}

/// `as_of`: a height or a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AsOf {
    Height(i64),
    Time(OffsetDateTime),
}

pub(crate) fn parse_as_of(text: &str) -> Result<AsOf, Problem> {
    if let Ok(height) = text.parse::<i64>()
        && height >= 0
    {
        return Ok(AsOf::Height(height));
    }
    // A plus sign in a query string arrives as a space.
    let text = text.replace(' ', "+");
    OffsetDateTime::parse(&text, &time::format_description::well_known::Rfc3339).map(AsOf::Time).map_err(
        |_| {
            Problem::bad(
                "invalid_parameter",
                "as_of is neither a height nor an RFC 3339 time",
                "as_of=21403117 or as_of=2026-05-01T00:00:00Z.",
            )
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_of_takes_heights_and_times() {
        assert_eq!(parse_as_of("17").expect("a height"), AsOf::Height(17));
        assert!(matches!(parse_as_of("2026-05-01T00:00:00Z"), Ok(AsOf::Time(_))));
        assert!(matches!(parse_as_of("2026-05-01T00:00:00 02:00"), Ok(AsOf::Time(_))));
        for text in ["", "-1", "yesterday", "2026-05-01"] {
            assert_eq!(parse_as_of(text).expect_err("neither").code, "invalid_parameter", "{text}");
        }
    }

    #[test]
    fn hashes_are_bounded() {
        assert_eq!(hash_bytes(&format!("0x{}", "ab".repeat(32))).expect("a hash").len(), 32);
        for text in ["", "0x", "0xzz", "0x12", &"ab".repeat(65)] {
            assert!(hash_bytes(text).is_err(), "{text}");
        }
    }
}
