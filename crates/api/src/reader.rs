//! One request's view of the data: a connection, the networks as they are now, and the reads that routes and
//! pages share. Networks are read before the rows, so a watermark never promises more than the rows hold.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tidemark_model::ids::{AccountId, AssetId, CollectionId, NetworkId};
use tidemark_store::Conn;
use tidemark_store::reads::{self, NetworkRow, TransferPlace, TransferQuery, TransferScope};
use uuid::Uuid;

use crate::answer::{Meta, Page, cut, is_behind, lag_seconds};
use crate::cursor;
use crate::dto::{Asset, Collection, CollectionHolding, Holder, Holding, Owner, Transfer};
use crate::params::{
    AsOf, MinFinality, PageParams, ReadParams, TransferParams, canonical_address, canonical_token_id,
    parse_as_of,
};
use crate::problem::Problem;
use crate::state::ApiState;

/// Longest wait for `min_height`.
const MIN_HEIGHT_WAIT: Duration = Duration::from_secs(5);
/// Blocks above the head that are not worth waiting for.
const MIN_HEIGHT_FAR: i64 = 64;
/// Between two looks where no projector of this process says that it is time.
const MIN_HEIGHT_POLL: Duration = Duration::from_millis(10);
/// An unknown account on a network behind by more than this may simply not be read yet (S0 §17.2).
const EMPTY_IS_PENDING_LAG: i64 = 30;

pub(crate) struct Reader {
    pub(crate) conn: Conn,
    pub(crate) networks: Arc<Vec<NetworkRow>>,
    /// Is the operator page served?
    pub(crate) operator_page: bool,
}

/// A collection named by id or by address.
pub(crate) enum CollectionRef {
    Id(Uuid),
    Natural(String, String),
}

/// An asset named by id or by natural key.
pub(crate) enum AssetRef {
    Id(Uuid),
    Natural(String, String, String),
}

/// How a ranked list is walked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Sort {
    /// Largest first. A row whose rank changes while you walk may be met twice or not at all.
    Rank,
    /// By id: every row that exists during the walk is met exactly once.
    #[default]
    Id,
}

/// A place in a list of transfers, as it travels in a cursor.
#[derive(Serialize, Deserialize)]
struct Place(i64, i32, i32, Uuid);
impl From<TransferPlace> for Place {
    fn from(place: TransferPlace) -> Self {
        Self(place.height, place.event_index, place.sub_index, place.event_id)
    }
}
impl From<Place> for TransferPlace {
    fn from(place: Place) -> Self {
        Self { height: place.0, event_index: place.1, sub_index: place.2, event_id: place.3 }
    }
}

/// A connection for raw reads.
pub(crate) enum RawConn<'a> {
    Shared(&'a Conn),
    Own(Box<Conn>),
}

impl std::ops::Deref for RawConn<'_> {
    type Target = Conn;
    fn deref(&self) -> &Conn {
        match self {
            Self::Shared(conn) => conn,
            Self::Own(conn) => conn,
        }
    }
}

impl Reader {
    /// A request never waits for a second connection of the pool it holds one of: enough of them together would
    /// wait for ever. Where both sides are one database, one connection does for both.
    pub(crate) async fn raw(&self, state: &ApiState) -> Result<RawConn<'_>, Problem> {
        match reads::is_same_database(state.app(), state.raw()) {
            true => Ok(RawConn::Shared(&self.conn)),
            false => Ok(RawConn::Own(Box::new(state.raw().conn().await?))),
        }
    }

    pub(crate) async fn open(state: &ApiState) -> Result<Self, Problem> {
        let networks = state.networks().await?;
        let conn = state.app().conn().await?;
        Ok(Self { conn, networks, operator_page: state.config().operator_page })
    }

    /// A reader for one network, which has read at least `min_height`.
    pub(crate) async fn at(
        state: &ApiState,
        network: &str,
        params: &ReadParams,
    ) -> Result<(Self, NetworkRow), Problem> {
        let mut reader = Self::open(state).await?;
        let id = reader.network(network)?.network_id;
        if let Some(height) = params.min_height {
            reader = reader.wait(state, id, height).await?;
        }
        let row = reader.by_id(id)?.clone();
        Ok((reader, row))
    }

    /// Waits until the network has read `min_height`. No connection is held while waiting.
    pub(crate) async fn wait(self, state: &ApiState, network: i32, min_height: u64) -> Result<Self, Problem> {
        let wanted = i64::try_from(min_height).map_err(|_| {
            Problem::bad("invalid_parameter", "min_height is too large", "Heights fit in 63 bits.")
        })?;
        let deadline = tokio::time::Instant::now() + MIN_HEIGHT_WAIT;
        let mut reader = self;
        loop {
            let row = reader.by_id(network)?;
            let reached = row.projected_height.unwrap_or(-1);
            if reached >= wanted && reader.stands(state, row).await? {
                return Ok(reader);
            }
            // What is far above the head does not come in five seconds.
            let head = row.head_height.unwrap_or(-1).max(reached);
            let is_far = wanted.saturating_sub(head) > MIN_HEIGHT_FAR;
            if is_far || tokio::time::Instant::now() >= deadline {
                let mut problem = Problem::new(
                    axum::http::StatusCode::NOT_FOUND,
                    "not_reached",
                    format!("we have read to {reached}, you asked for {wanted}"),
                    "Ask again a little later, or ask without min_height.",
                );
                problem.pending = true;
                problem.retry_after = Some(1);
                return Err(problem);
            }
            drop(reader);
            tokio::select! {
                () = state.woken().projected.heard() => {}
                () = tokio::time::sleep(MIN_HEIGHT_POLL) => {}
            }
            reader = Self::open(state).await?;
        }
    }

    /// Is the newest projected block still the one that the ingester holds? After a reorg of the same height the
    /// watermark is that of the old branch until the projector has followed.
    async fn stands(&self, state: &ApiState, network: &NetworkRow) -> Result<bool, Problem> {
        let (Some(height), Some(hash)) = (network.projected_height, &network.projected_hash) else {
            return Ok(true); // History: final when it was read.
        };
        if height <= network.finalized_height.unwrap_or(-1) {
            return Ok(true);
        }
        let raw = self.raw(state).await?;
        Ok(reads::raw_block_hash(&raw, network.network_id, height).await?.as_ref() == Some(hash))
    }

    /// A network by id or short name.
    pub(crate) fn network(&self, text: &str) -> Result<&NetworkRow, Problem> {
        let id = text.parse::<i32>().ok();
        self.networks.iter().find(|row| Some(row.network_id) == id || row.slug == text).ok_or_else(|| {
            let known: Vec<&str> = self.networks.iter().map(|row| row.slug.as_str()).collect();
            let shown: String = text.chars().take(60).collect();
            Problem::new(
                axum::http::StatusCode::NOT_FOUND,
                "unknown_network",
                format!("there is no network {shown:?} here"),
                if known.is_empty() {
                    "No network has been read yet; see /v1/networks.".to_owned()
                } else {
                    format!("Known networks: {}.", known.join(", "))
                },
            )
        })
    }

    pub(crate) fn by_id(&self, id: i32) -> Result<&NetworkRow, Problem> {
        self.network(&id.to_string())
    }

    fn slug(&self, id: i32) -> &str {
        self.networks.iter().find(|row| row.network_id == id).map_or("unknown", |row| row.slug.as_str())
    }

    /// 404, pending when the thing may still be ahead of us.
    pub(crate) fn missing(&self, network: Option<&NetworkRow>, what: &str) -> Problem {
        let behind = match network {
            Some(network) => is_behind(network).then_some(network),
            None => self.networks.iter().find(|network| is_behind(network)),
        };
        match behind {
            None => Problem::not_found(format!("{what} is not known")),
            Some(network) if network.projected_height.is_none() && network.normalized_height.is_some() => {
                Problem::pending(
                    format!(
                        "{what} is not known so far; the first history of {} is being read, now at {} of {}",
                        network.slug,
                        network.normalized_height.unwrap_or(-1),
                        network.head_height.map_or("an unknown height".to_owned(), |head| head.to_string()),
                    ),
                    "Owners, assets, accounts and collections are shown when it is done; transfers are there already.",
                )
            }
            Some(network) => Problem::pending(
                format!(
                    "{what} is not known so far; on {} we have read to {}, the chain is at {}",
                    network.slug,
                    network.projected_height.map_or("nothing".to_owned(), |height| height.to_string()),
                    network.head_height.map_or("an unknown height".to_owned(), |height| height.to_string()),
                ),
                "Ask again a little later, or with min_height= to wait for a block.",
            ),
        }
    }

    /// The final height that `as_of` means.
    pub(crate) async fn as_of(
        &self,
        network: &NetworkRow,
        params: &ReadParams,
    ) -> Result<Option<i64>, Problem> {
        let Some(text) = &params.as_of else { return Ok(None) };
        let finalized = network.finalized_height.unwrap_or(-1);
        let not_final = |height: String| {
            Problem::bad(
                "as_of_not_final",
                format!("{height} is above the finalized height {finalized}"),
                "History is told of final blocks only; leave as_of out for the newest answer.",
            )
        };
        let height = match parse_as_of(text)? {
            AsOf::Height(height) => height,
            AsOf::Time(at) => {
                let (height, newest) = reads::height_at(&self.conn, network.network_id, at).await?;
                if newest.is_none_or(|newest| at > newest) {
                    return Err(not_final(text.clone()));
                }
                height.ok_or_else(|| {
                    Problem::bad(
                        "as_of_before_start",
                        "as_of is before the first block we read",
                        format!("The first block read on {} is {}.", network.slug, network.start_block),
                    )
                })?
            }
        };
        if height > finalized {
            return Err(not_final(height.to_string()));
        }
        Ok(Some(height))
    }

    // ---- collections

    pub(crate) async fn collections(
        &self,
        network: Option<&NetworkRow>,
        sort: Sort,
        params: &ReadParams,
        page: &PageParams,
    ) -> Result<Page<Collection>, Problem> {
        params.refuse_as_of()?;
        let limit = page.limit()?;
        let metadata = params.require_metadata();
        let id = network.map(|network| network.network_id);
        let binding = format!("collections|{id:?}|{sort:?}|{metadata}");
        let mut rows = match sort {
            Sort::Rank => {
                let after = decode_or(&binding, page, (i64::MAX, Uuid::nil()))?;
                reads::collections_ranked(&self.conn, id, after, metadata, limit + 1).await?
            }
            Sort::Id => {
                let after = decode_or(&binding, page, (0_i64, Uuid::nil()))?;
                reads::collections_by_id_order(&self.conn, id, after.1, metadata, limit + 1).await?
            }
        };
        let more = cut(&mut rows, limit);
        let next = rows
            .last()
            .filter(|_| more)
            .map(|row| cursor::encode(&binding, &(row.transfer_count, row.collection_id)));
        let items = rows.iter().map(|row| Collection::new(row, self.slug(row.network_id))).collect();
        let meta = network.map_or_else(|| Meta::across(&self.networks), Meta::of);
        Ok(Page { items, next, meta })
    }

    /// The collection and its network, after waiting for `min_height`.
    pub(crate) async fn collection(
        state: &ApiState,
        which: CollectionRef,
        params: &ReadParams,
    ) -> Result<(Self, NetworkRow, reads::CollectionRow), Problem> {
        let (reader, network, id) = match which {
            CollectionRef::Natural(network, address) => {
                let (reader, network) = Self::at(state, &network, params).await?;
                let address = canonical_address(&network, &address)?;
                let id = CollectionId::of(NetworkId(network.network_id), &address).0;
                (reader, Some(network), id)
            }
            CollectionRef::Id(id) => (Self::open(state).await?, None, id),
        };
        let found = reads::collections(&reader.conn, &[id]).await?.pop();
        let Some(row) = found else { return Err(reader.missing(network.as_ref(), "this collection")) };
        if params.require_metadata() && row.is_stub {
            return Err(stub("this collection"));
        }
        match (network, params.min_height) {
            (Some(network), _) => Ok((reader, network, row)),
            (None, None) => {
                let network = reader.by_id(row.network_id)?.clone();
                Ok((reader, network, row))
            }
            (None, Some(height)) => {
                let reader = reader.wait(state, row.network_id, height).await?;
                let row = reads::collections(&reader.conn, &[id]).await?.pop().unwrap_or(row);
                let network = reader.by_id(row.network_id)?.clone();
                Ok((reader, network, row))
            }
        }
    }

    pub(crate) async fn assets_of(
        &self,
        network: &NetworkRow,
        collection: Uuid,
        params: &ReadParams,
        page: &PageParams,
    ) -> Result<Page<Asset>, Problem> {
        params.refuse_as_of()?;
        let limit = page.limit()?;
        let metadata = params.require_metadata();
        let binding = format!("assets|{collection}|{metadata}");
        let after: (String, Uuid) = decode_or(&binding, page, (String::new(), Uuid::nil()))?;
        let place = (after.0.as_str(), after.1);
        let mut rows =
            reads::assets_of_collection(&self.conn, collection, place, metadata, limit + 1).await?;
        let more = cut(&mut rows, limit);
        let next =
            rows.last().filter(|_| more).map(|row| cursor::encode(&binding, &(&row.token_id, row.asset_id)));
        count_stubs("assets", rows.iter().filter(|row| row.is_stub).count());
        let items = rows.into_iter().map(|row| Asset::new(row, &network.slug)).collect();
        Ok(Page { items, next, meta: Meta::of(network) })
    }

    pub(crate) async fn holders_of(
        &self,
        network: &NetworkRow,
        collection: Uuid,
        sort: Sort,
        params: &ReadParams,
        page: &PageParams,
    ) -> Result<Page<Holder>, Problem> {
        params.refuse_as_of()?;
        let limit = page.limit()?;
        let binding = format!("holders|{collection}|{sort:?}");
        let mut rows = match sort {
            Sort::Rank => {
                let after = decode_or(&binding, page, (i64::MAX, Uuid::nil()))?;
                reads::holders_ranked(&self.conn, collection, after, limit + 1).await?
            }
            Sort::Id => {
                let after = decode_or(&binding, page, (0_i64, Uuid::nil()))?;
                reads::holders_by_account(&self.conn, collection, after.1, limit + 1).await?
            }
        };
        let more = cut(&mut rows, limit);
        let next = rows
            .last()
            .filter(|_| more)
            .map(|row| cursor::encode(&binding, &(row.asset_count, row.account_id)));
        Ok(Page { items: rows.into_iter().map(Holder::from).collect(), next, meta: Meta::of(network) })
    }

    // ---- assets

    /// The id of an asset named by natural key; its collection tells the standard.
    pub(crate) async fn asset_id(
        &self,
        network: &NetworkRow,
        contract: &str,
        token_id: &str,
    ) -> Result<Uuid, Problem> {
        let contract = canonical_address(network, contract)?;
        let token_id = canonical_token_id(network, token_id)?;
        let collection = CollectionId::of(NetworkId(network.network_id), &contract);
        let found = reads::collections(&self.conn, &[collection.0]).await?.pop();
        let Some(row) = found else { return Err(self.missing(Some(network), "this contract")) };
        Ok(AssetId::of(NetworkId(network.network_id), collection, &token_id, &row.standard).0)
    }

    /// The asset and its network, after waiting for `min_height`.
    pub(crate) async fn asset(
        state: &ApiState,
        which: AssetRef,
        params: &ReadParams,
    ) -> Result<(Self, NetworkRow, Asset), Problem> {
        let (mut reader, network, id) = match which {
            AssetRef::Natural(network, contract, token_id) => {
                let (reader, network) = Self::at(state, &network, params).await?;
                let id = reader.asset_id(&network, &contract, &token_id).await?;
                (reader, Some(network), id)
            }
            AssetRef::Id(id) => (Self::open(state).await?, None, id),
        };
        let mut found = reads::assets(&reader.conn, &[id]).await?.pop();
        if let (None, Some(height), Some(row)) = (&network, params.min_height, &found) {
            reader = reader.wait(state, row.network_id, height).await?;
            found = reads::assets(&reader.conn, &[id]).await?.pop();
        }
        let Some(row) = found else { return Err(reader.missing(network.as_ref(), "this asset")) };
        if row.is_stub {
            if params.require_metadata() {
                return Err(stub("this asset"));
            }
            count_stubs("asset", 1);
        }
        let network = reader.by_id(row.network_id)?.clone();
        let asset = Asset::new(row, &network.slug);
        Ok((reader, network, asset))
    }

    pub(crate) async fn owners_of(
        &self,
        network: &NetworkRow,
        asset: Uuid,
        params: &ReadParams,
        page: &PageParams,
    ) -> Result<Page<Owner>, Problem> {
        let limit = page.limit()?;
        let as_of = self.as_of(network, params).await?;
        let finality = params.finality();
        let binding = format!("owners|{asset}|{finality:?}|{as_of:?}");
        let after: (Uuid,) = decode_or(&binding, page, (Uuid::nil(),))?;
        let mut rows = match as_of {
            None => reads::owners(&self.conn, asset, after.0, finality.as_str(), limit + 1).await?,
            Some(height) => {
                let limit = i32::try_from(limit + 1).unwrap_or(i32::MAX);
                reads::owners_at(&self.conn, asset, height, after.0, limit).await?
            }
        };
        let more = cut(&mut rows, limit);
        let next = rows.last().filter(|_| more).map(|row| cursor::encode(&binding, &(row.account_id,)));
        let meta = Meta { as_of_height: as_of, ..Meta::of(network) };
        Ok(Page { items: rows.into_iter().map(Owner::from).collect(), next, meta })
    }

    // ---- accounts

    /// The id and canonical address of an account.
    pub(crate) fn account_id(&self, network: &NetworkRow, address: &str) -> Result<(Uuid, String), Problem> {
        let address = canonical_address(network, address)?;
        Ok((AccountId::of(NetworkId(network.network_id), &address).0, address))
    }

    /// An empty list of an account nobody has seen is only true when we are close to the head.
    pub(crate) async fn account_is_known(&self, network: &NetworkRow, account: Uuid) -> Result<(), Problem> {
        let lag = lag_seconds(network);
        if is_behind(network)
            && lag.is_none_or(|lag| lag > EMPTY_IS_PENDING_LAG)
            && reads::accounts(&self.conn, &[account]).await?.is_empty()
        {
            return Err(self.missing(Some(network), "this account"));
        }
        Ok(())
    }

    /// S0 §17.3: a list of a whole network (or of all) that is empty while the network lags is not the truth yet.
    pub(crate) fn not_silently_empty<T>(
        &self,
        network: Option<&NetworkRow>,
        answer: Page<T>,
        page: &PageParams,
    ) -> Result<Page<T>, Problem> {
        let lags = |network: &&NetworkRow| {
            is_behind(network) && lag_seconds(network).is_none_or(|lag| lag > EMPTY_IS_PENDING_LAG)
        };
        if !answer.items.is_empty() || page.cursor.is_some() {
            return Ok(answer);
        }
        let lagging = match network {
            Some(network) => Some(network).filter(lags),
            None => self.networks.iter().find(lags),
        };
        match lagging {
            Some(network) => Err(self.missing(Some(network), "this list")),
            None => Ok(answer),
        }
    }

    pub(crate) async fn holdings_of(
        &self,
        network: &NetworkRow,
        account: Uuid,
        collection: Option<Uuid>,
        params: &ReadParams,
        page: &PageParams,
    ) -> Result<Page<Holding>, Problem> {
        let limit = page.limit()?;
        let as_of = self.as_of(network, params).await?;
        let finality = params.finality();
        let metadata = params.require_metadata();
        if as_of.is_some() && (collection.is_some() || metadata) {
            return Err(Problem::bad(
                "as_of_unsupported",
                "as_of does not go together with collection or require_metadata",
                "Ask for all assets at that height.",
            ));
        }
        let binding = format!("holdings|{account}|{collection:?}|{finality:?}|{metadata}|{as_of:?}");
        let after: (Uuid,) = decode_or(&binding, page, (Uuid::nil(),))?;
        let mut rows = match as_of {
            None => {
                let query = reads::HoldingQuery {
                    account,
                    after: after.0,
                    finality: finality.as_str(),
                    collection,
                    require_metadata: metadata,
                    limit: limit + 1,
                };
                reads::holdings(&self.conn, &query).await?
            }
            Some(height) => {
                let limit = i32::try_from(limit + 1).unwrap_or(i32::MAX);
                reads::holdings_at(&self.conn, account, height, after.0, limit).await?
            }
        };
        if rows.is_empty() && page.cursor.is_none() {
            self.account_is_known(network, account).await?;
        }
        let more = cut(&mut rows, limit);
        let next = rows.last().filter(|_| more).map(|row| cursor::encode(&binding, &(row.asset.asset_id,)));
        count_stubs("account_assets", rows.iter().filter(|row| row.asset.is_stub).count());
        let meta = Meta { as_of_height: as_of, ..Meta::of(network) };
        let items = rows.into_iter().map(|row| Holding::new(row, &network.slug)).collect();
        Ok(Page { items, next, meta })
    }

    pub(crate) async fn collections_of(
        &self,
        network: &NetworkRow,
        account: Uuid,
        params: &ReadParams,
        page: &PageParams,
    ) -> Result<Page<CollectionHolding>, Problem> {
        params.refuse_as_of()?;
        let limit = page.limit()?;
        let metadata = params.require_metadata();
        let binding = format!("account_collections|{account}|{metadata}");
        let after: (Uuid,) = decode_or(&binding, page, (Uuid::nil(),))?;
        let mut rows = reads::account_collections(&self.conn, account, after.0, metadata, limit + 1).await?;
        if rows.is_empty() && page.cursor.is_none() {
            self.account_is_known(network, account).await?;
        }
        let more = cut(&mut rows, limit);
        let next =
            rows.last().filter(|_| more).map(|(row, _, _)| cursor::encode(&binding, &(row.collection_id,)));
        let items = rows
            .into_iter()
            .map(|(row, asset_count, qty)| CollectionHolding {
                collection: Collection::new(&row, &network.slug),
                asset_count,
                qty,
            })
            .collect();
        Ok(Page { items, next, meta: Meta::of(network) })
    }

    // ---- transfers

    pub(crate) async fn transfers_of(
        &self,
        network: &NetworkRow,
        scope: TransferScope,
        params: &ReadParams,
        filter: &TransferParams,
        page: &PageParams,
    ) -> Result<Page<Transfer>, Problem> {
        let limit = page.limit()?;
        let as_of = self.as_of(network, params).await?;
        let kinds = filter.kinds()?;
        let reverted = filter.include_reverted.unwrap_or(false);
        let finality = params.finality();
        let binding =
            format!("transfers|{}|{scope:?}|{kinds:?}|{reverted}|{finality:?}|{as_of:?}", network.network_id);
        let before = match &page.cursor {
            None => TransferPlace::TOP,
            Some(text) => cursor::decode::<Place>(&binding, text)?.into(),
        };
        let account = match &scope {
            TransferScope::Account(id) => Some(*id),
            _ => None,
        };
        let query = TransferQuery {
            network: network.network_id,
            scope,
            before,
            height_max: finality.height_max(network).min(as_of.unwrap_or(i64::MAX)),
            include_reverted: reverted,
            kinds,
            limit: limit + 1,
        };
        let mut rows = reads::transfers(&self.conn, &query).await?;
        if let (true, None, Some(account)) = (rows.is_empty(), &page.cursor, account) {
            self.account_is_known(network, account).await?;
        }
        let more = cut(&mut rows, limit);
        let end = match more {
            true => rows.last().map(|row| row.place),
            // Looking for kinds ends after a stretch; the list may go on.
            false if query.kinds.is_some() => reads::transfers_stretch_end(&self.conn, &query).await?,
            false => None,
        };
        let next = end.map(|place| cursor::encode(&binding, &Place::from(place)));
        let meta = Meta { as_of_height: as_of, ..Meta::of(network) };
        Ok(Page { items: rows.into_iter().map(|row| Transfer::new(row, network)).collect(), next, meta })
    }

    /// Newest transfers of all networks, by block time. There is no order across chains (S0 §17.4), so the
    /// cursor holds one place per network: what is new later stays above every one of them.
    pub(crate) async fn transfers_everywhere(
        &self,
        params: &ReadParams,
        filter: &TransferParams,
        page: &PageParams,
    ) -> Result<Page<Transfer>, Problem> {
        if let [only] = self.networks.as_slice() {
            return self.transfers_of(only, TransferScope::Network, params, filter, page).await;
        }
        params.refuse_as_of()?;
        let limit = page.limit()?;
        let kinds = filter.kinds()?;
        let reverted = filter.include_reverted.unwrap_or(false);
        let finality = params.finality();
        let binding = format!("transfers|*|{kinds:?}|{reverted}|{finality:?}");
        let mut places: Vec<(i32, Place)> = match &page.cursor {
            None => Vec::new(),
            Some(text) => cursor::decode(&binding, text)?,
        };
        let (mut queues, mut ends) = (Vec::new(), Vec::new());
        for network in self.networks.iter() {
            let before = match places.iter().find(|(id, _)| *id == network.network_id) {
                Some((_, place)) => place.as_place(),
                None if page.cursor.is_none() => TransferPlace::TOP,
                None => TransferPlace::BOTTOM, // A network that came after the walk began.
            };
            let query = TransferQuery {
                network: network.network_id,
                scope: TransferScope::Network,
                before,
                height_max: finality.height_max(network),
                include_reverted: reverted,
                kinds: kinds.clone(),
                limit: limit + 1,
            };
            let found = reads::transfers(&self.conn, &query).await?;
            let is_short = found.len() <= usize::try_from(limit).unwrap_or(usize::MAX);
            let end = match is_short && query.kinds.is_some() {
                true => reads::transfers_stretch_end(&self.conn, &query).await?,
                false => None,
            };
            if page.cursor.is_none() {
                let top = match (found.first(), end) {
                    (Some(row), _) => just_above(row.place),
                    (None, Some(end)) => end,
                    (None, None) => TransferPlace::BOTTOM,
                };
                places.push((network.network_id, top.into()));
            }
            ends.push((network.network_id, end));
            queues.push((network, std::collections::VecDeque::from(found)));
        }
        // A merge, not a sort: rows of one network keep their order whatever their block times say.
        let wanted = usize::try_from(limit).unwrap_or(usize::MAX);
        let mut items = Vec::with_capacity(wanted);
        while items.len() < wanted
            && let Some((network, queue)) = queues
                .iter_mut()
                .filter(|(_, queue)| !queue.is_empty())
                .max_by_key(|(_, queue)| queue.front().map(|row| row.event_time))
            && let Some(row) = queue.pop_front()
        {
            if let Some(entry) = places.iter_mut().find(|(id, _)| *id == row.network_id) {
                entry.1 = row.place.into();
            }
            items.push(Transfer::new(row, network));
        }
        let mut more = queues.iter().any(|(_, queue)| !queue.is_empty());
        // Where all that was found of a network is told, its walk goes on below the stretch that was looked at.
        for (network, _) in queues.iter().filter(|(_, queue)| queue.is_empty()) {
            let end = ends.iter().find(|(id, _)| *id == network.network_id).and_then(|(_, end)| *end);
            if let (Some(end), Some(entry)) =
                (end, places.iter_mut().find(|(id, _)| *id == network.network_id))
            {
                entry.1 = end.into();
                more = true;
            }
        }
        let next = more.then(|| cursor::encode(&binding, &places));
        Ok(Page { items, next, meta: Meta::across(&self.networks) })
    }
}

impl Place {
    fn as_place(&self) -> TransferPlace {
        TransferPlace { height: self.0, event_index: self.1, sub_index: self.2, event_id: self.3 }
    }
}

/// The place directly above `place`: everything newer stays out of the walk, `place` itself is in it.
fn just_above(place: TransferPlace) -> TransferPlace {
    TransferPlace { event_id: Uuid::max(), ..place }
}

fn decode_or<T: serde::de::DeserializeOwned>(
    binding: &str,
    page: &PageParams,
    first: T,
) -> Result<T, Problem> {
    match &page.cursor {
        None => Ok(first),
        Some(text) => cursor::decode(binding, text),
    }
}

/// 404 because of `require_metadata`.
pub(crate) fn stub(what: &str) -> Problem {
    let mut problem = Problem::new(
        axum::http::StatusCode::NOT_FOUND,
        "stub",
        format!("{what} has no metadata yet"),
        "Ask without require_metadata for what is known, or again later.",
    );
    problem.pending = true;
    problem
}

/// S0 §15.3: how often answers hold stubs.
pub(crate) fn count_stubs(endpoint: &'static str, stubs: usize) {
    if stubs > 0 {
        metrics::counter!("stub_served_total", "endpoint" => endpoint)
            .increment(u64::try_from(stubs).unwrap_or(u64::MAX));
    }
}

/// Is this row sure enough?
pub(crate) fn is_sure_enough(network: &NetworkRow, finality: MinFinality, height: i64) -> bool {
    height <= finality.height_max(network)
}
