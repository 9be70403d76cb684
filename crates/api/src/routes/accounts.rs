//! Accounts: what an address holds and did on one network.

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use tidemark_model::ids::{CollectionId, NetworkId};
use tidemark_store::reads::{self, TransferScope};
use utoipa::IntoParams;
use uuid::Uuid;

use crate::answer::{Meta, One, Page};
use crate::dto::{Account, CollectionHolding, Holding, Transfer};
use crate::params::{P, PageParams, Q, ReadParams, TransferParams};
use crate::problem::Problem;
use crate::reader::Reader;
use crate::state::ApiState;

/// Which assets.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct HoldingParams {
    /// Only assets of this collection (id).
    collection: Option<Uuid>,
}

/// An account
#[utoipa::path(get, path = "/v1/accounts/{network}/{address}", operation_id = "accounts_one", tag = "accounts",
    params(("network" = String, Path, description = "Network id or short name"),
           ("address" = String, Path, description = "Address"), ReadParams),
    responses((status = 200, body = One<Account>)))]
pub(crate) async fn one(
    State(state): State<ApiState>,
    P((network, address)): P<(String, String)>,
    Q(params): Q<ReadParams>,
) -> Result<Json<One<Account>>, Problem> {
    params.refuse_as_of()?;
    let (reader, network) = Reader::at(&state, &network, &params).await?;
    let (id, address) = reader.account_id(&network, &address)?;
    let Some(row) = reads::accounts(&reader.conn, &[id]).await?.pop() else {
        return Err(reader.missing(Some(&network), "this account"));
    };
    let collection = CollectionId::of(NetworkId(network.network_id), &address).0;
    let collection = reads::collections(&reader.conn, &[collection]).await?.pop();
    let item = Account::new(row, &network.slug, collection.map(|row| row.collection_id));
    Ok(Json(One { item, meta: Meta::of(&network) }))
}

/// Assets of an account
///
/// By asset id. With `as_of`, what it held when that block was final.
#[utoipa::path(get, path = "/v1/accounts/{network}/{address}/assets", operation_id = "accounts_assets", tag = "accounts",
    params(("network" = String, Path, description = "Network id or short name"),
           ("address" = String, Path, description = "Address"), HoldingParams, ReadParams, PageParams),
    responses((status = 200, body = Page<Holding>)))]
pub(crate) async fn assets(
    State(state): State<ApiState>,
    P((network, address)): P<(String, String)>,
    Q(filter): Q<HoldingParams>,
    Q(params): Q<ReadParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<Holding>>, Problem> {
    let (reader, network) = Reader::at(&state, &network, &params).await?;
    let (id, _) = reader.account_id(&network, &address)?;
    Ok(Json(reader.holdings_of(&network, id, filter.collection, &params, &page).await?))
}

/// Collections of an account
#[utoipa::path(get, path = "/v1/accounts/{network}/{address}/collections", operation_id = "accounts_collections",
    tag = "accounts",
    params(("network" = String, Path, description = "Network id or short name"),
           ("address" = String, Path, description = "Address"), ReadParams, PageParams),
    responses((status = 200, body = Page<CollectionHolding>)))]
pub(crate) async fn collections(
    State(state): State<ApiState>,
    P((network, address)): P<(String, String)>,
    Q(params): Q<ReadParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<CollectionHolding>>, Problem> {
    let (reader, network) = Reader::at(&state, &network, &params).await?;
    let (id, _) = reader.account_id(&network, &address)?;
    Ok(Json(reader.collections_of(&network, id, &params, &page).await?))
}

/// Transfers of an account
///
/// To or from it, newest first.
#[utoipa::path(get, path = "/v1/accounts/{network}/{address}/transfers", operation_id = "accounts_transfers",
    tag = "accounts",
    params(("network" = String, Path, description = "Network id or short name"),
           ("address" = String, Path, description = "Address"), TransferParams, ReadParams, PageParams),
    responses((status = 200, body = Page<Transfer>)))]
pub(crate) async fn transfers(
    State(state): State<ApiState>,
    P((network, address)): P<(String, String)>,
    Q(filter): Q<TransferParams>,
    Q(params): Q<ReadParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<Transfer>>, Problem> {
    let (reader, network) = Reader::at(&state, &network, &params).await?;
    let (id, _) = reader.account_id(&network, &address)?;
    Ok(Json(reader.transfers_of(&network, TransferScope::Account(id), &params, &filter, &page).await?))
}
