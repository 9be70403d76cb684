//! Assets, by id and by natural key. The two forms of a route share one body.

use axum::Json;
use axum::extract::State;
use tidemark_store::reads::{self, TransferScope};
use uuid::Uuid;

use crate::answer::{Meta, One, Page};
use crate::dto::{Asset, AssetBatch, Owner, Transfer};
use crate::params::{J, P, PageParams, Q, ReadParams, TransferParams};
use crate::problem::Problem;
use crate::reader::{AssetRef, Reader, count_stubs};
use crate::state::ApiState;

/// Most assets of one batch.
const BATCH_MAX: usize = 100;

/// Several assets at once
///
/// By id, by natural key, or both; at most a hundred together. Unknown assets are left out. `min_height` waits when
/// all are named by key on one network.
#[utoipa::path(post, path = "/v1/assets/batch", operation_id = "assets_batch", tag = "assets", params(ReadParams), request_body = AssetBatch,
    responses((status = 200, body = Page<Asset>)))]
pub(crate) async fn batch(
    State(state): State<ApiState>,
    Q(params): Q<ReadParams>,
    J(wanted): J<AssetBatch>,
) -> Result<Json<Page<Asset>>, Problem> {
    params.refuse_as_of()?;
    if wanted.ids.len() + wanted.keys.len() > BATCH_MAX {
        return Err(Problem::bad("invalid_body", "more than 100 assets", "Ask in several batches."));
    }
    let mut reader = Reader::open(&state).await?;
    if let Some(height) = params.min_height {
        // Ids are of any network: only keys say which one to wait for.
        let networks: std::collections::BTreeSet<&str> =
            wanted.keys.iter().map(|key| key.network.as_str()).collect();
        let Some(network) = networks.first().filter(|_| networks.len() == 1 && wanted.ids.is_empty()) else {
            return params.refuse_min_height().map(|()| unreachable!("it is there"));
        };
        let id = reader.network(network)?.network_id;
        reader = reader.wait(&state, id, height).await?;
    }
    let mut ids = wanted.ids;
    for key in &wanted.keys {
        let network = reader.network(&key.network)?.clone();
        match reader.asset_id(&network, &key.contract, &key.token_id).await {
            Ok(id) => ids.push(id),
            Err(problem) if problem.status == axum::http::StatusCode::NOT_FOUND => {} // Left out.
            Err(problem) => return Err(problem),
        }
    }
    let mut rows = reads::assets(&reader.conn, &ids).await?;
    if params.require_metadata() {
        rows.retain(|row| !row.is_stub);
    }
    count_stubs("assets_batch", rows.iter().filter(|row| row.is_stub).count());
    let mut items = Vec::with_capacity(rows.len());
    for row in rows {
        let slug = reader.by_id(row.network_id)?.slug.clone();
        items.push(Asset::new(row, &slug));
    }
    Ok(Json(Page { items, next: None, meta: Meta::across(&reader.networks) }))
}

/// An asset (by id)
#[utoipa::path(get, path = "/v1/assets/{id}", operation_id = "assets_one_by_id", tag = "assets",
    params(("id" = Uuid, Path, description = "Asset id"), ReadParams), responses((status = 200, body = One<Asset>)))]
pub(crate) async fn one_by_id(
    State(state): State<ApiState>,
    P(id): P<Uuid>,
    Q(params): Q<ReadParams>,
) -> Result<Json<One<Asset>>, Problem> {
    one_of(&state, AssetRef::Id(id), &params).await
}

/// An asset
#[utoipa::path(get, path = "/v1/assets/{network}/{contract}/{token_id}", operation_id = "assets_one", tag = "assets",
    params(("network" = String, Path, description = "Network id or short name"), ("contract" = String, Path, description = "Contract address"), ("token_id" = String, Path, description = "Token id"), ReadParams), responses((status = 200, body = One<Asset>)))]
pub(crate) async fn one(
    State(state): State<ApiState>,
    P((network, contract, token_id)): P<(String, String, String)>,
    Q(params): Q<ReadParams>,
) -> Result<Json<One<Asset>>, Problem> {
    one_of(&state, AssetRef::Natural(network, contract, token_id), &params).await
}

async fn one_of(state: &ApiState, which: AssetRef, params: &ReadParams) -> Result<Json<One<Asset>>, Problem> {
    params.refuse_as_of()?;
    let (_, network, item) = Reader::asset(state, which, params).await?;
    Ok(Json(One { item, meta: Meta::of(&network) }))
}

/// Owners of an asset (by id)
///
/// With `as_of`, the owners when that block was final.
#[utoipa::path(get, path = "/v1/assets/{id}/owners", operation_id = "assets_owners_by_id", tag = "assets",
    params(("id" = Uuid, Path, description = "Asset id"), ReadParams, PageParams), responses((status = 200, body = Page<Owner>)))]
pub(crate) async fn owners_by_id(
    State(state): State<ApiState>,
    P(id): P<Uuid>,
    Q(params): Q<ReadParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<Owner>>, Problem> {
    owners_of(&state, AssetRef::Id(id), &params, &page).await
}

/// Owners of an asset
///
/// With `as_of`, the owners when that block was final.
#[utoipa::path(get, path = "/v1/assets/{network}/{contract}/{token_id}/owners", operation_id = "assets_owners", tag = "assets",
    params(("network" = String, Path, description = "Network id or short name"), ("contract" = String, Path, description = "Contract address"), ("token_id" = String, Path, description = "Token id"), ReadParams, PageParams), responses((status = 200, body = Page<Owner>)))]
pub(crate) async fn owners(
    State(state): State<ApiState>,
    P((network, contract, token_id)): P<(String, String, String)>,
    Q(params): Q<ReadParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<Owner>>, Problem> {
    owners_of(&state, AssetRef::Natural(network, contract, token_id), &params, &page).await
}

async fn owners_of(
    state: &ApiState,
    which: AssetRef,
    params: &ReadParams,
    page: &PageParams,
) -> Result<Json<Page<Owner>>, Problem> {
    let (reader, network, asset) = Reader::asset(state, which, params).await?;
    Ok(Json(reader.owners_of(&network, asset.id, params, page).await?))
}

/// Transfers of an asset (by id)
///
/// Newest first.
#[utoipa::path(get, path = "/v1/assets/{id}/transfers", operation_id = "assets_transfers_by_id", tag = "assets",
    params(("id" = Uuid, Path, description = "Asset id"), ReadParams, TransferParams, PageParams), responses((status = 200, body = Page<Transfer>)))]
pub(crate) async fn transfers_by_id(
    State(state): State<ApiState>,
    P(id): P<Uuid>,
    Q(params): Q<ReadParams>,
    Q(filter): Q<TransferParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<Transfer>>, Problem> {
    transfers_of(&state, AssetRef::Id(id), &params, &filter, &page).await
}

/// Transfers of an asset
///
/// Newest first.
#[utoipa::path(get, path = "/v1/assets/{network}/{contract}/{token_id}/transfers", operation_id = "assets_transfers", tag = "assets",
    params(("network" = String, Path, description = "Network id or short name"), ("contract" = String, Path, description = "Contract address"), ("token_id" = String, Path, description = "Token id"), ReadParams, TransferParams, PageParams), responses((status = 200, body = Page<Transfer>)))]
pub(crate) async fn transfers(
    State(state): State<ApiState>,
    P((network, contract, token_id)): P<(String, String, String)>,
    Q(params): Q<ReadParams>,
    Q(filter): Q<TransferParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<Transfer>>, Problem> {
    transfers_of(&state, AssetRef::Natural(network, contract, token_id), &params, &filter, &page).await
}

async fn transfers_of(
    state: &ApiState,
    which: AssetRef,
    params: &ReadParams,
    filter: &TransferParams,
    page: &PageParams,
) -> Result<Json<Page<Transfer>>, Problem> {
    let (reader, network, asset) = Reader::asset(state, which, params).await?;
    Ok(Json(reader.transfers_of(&network, TransferScope::Asset(asset.id), params, filter, page).await?))
}

/// Owners of an asset in history (by id)
///
/// Time travel: the owners at `as_of` (a height or a time); without it, at the finalized height.
#[utoipa::path(get, path = "/v1/assets/{id}/history", operation_id = "assets_history_by_id", tag = "assets",
    params(("id" = Uuid, Path, description = "Asset id"), ReadParams, PageParams), responses((status = 200, body = Page<Owner>)))]
pub(crate) async fn history_by_id(
    State(state): State<ApiState>,
    P(id): P<Uuid>,
    Q(params): Q<ReadParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<Owner>>, Problem> {
    history_of(&state, AssetRef::Id(id), &params, &page).await
}

/// Owners of an asset in history
///
/// Time travel: the owners at `as_of` (a height or a time); without it, at the finalized height.
#[utoipa::path(get, path = "/v1/assets/{network}/{contract}/{token_id}/history", operation_id = "assets_history", tag = "assets",
    params(("network" = String, Path, description = "Network id or short name"), ("contract" = String, Path, description = "Contract address"), ("token_id" = String, Path, description = "Token id"), ReadParams, PageParams), responses((status = 200, body = Page<Owner>)))]
pub(crate) async fn history(
    State(state): State<ApiState>,
    P((network, contract, token_id)): P<(String, String, String)>,
    Q(params): Q<ReadParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<Owner>>, Problem> {
    history_of(&state, AssetRef::Natural(network, contract, token_id), &params, &page).await
}

async fn history_of(
    state: &ApiState,
    which: AssetRef,
    params: &ReadParams,
    page: &PageParams,
) -> Result<Json<Page<Owner>>, Problem> {
    let (reader, network, asset) = Reader::asset(state, which, params).await?;
    let at_line = network.finalized_height.unwrap_or(0).to_string();
    let params = ReadParams { as_of: Some(params.as_of.clone().unwrap_or(at_line)), ..params.clone() };
    Ok(Json(reader.owners_of(&network, asset.id, &params, page).await?))
}
