//! Collections, by id and by natural key. The two forms of a route share one body.

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use tidemark_store::reads::TransferScope;
use utoipa::IntoParams;
use uuid::Uuid;

use crate::answer::{Meta, One, Page};
use crate::dto::{Asset, Collection, CollectionStats, Holder, Transfer};
use crate::params::{P, PageParams, Q, ReadParams, TransferParams};
use crate::problem::Problem;
use crate::reader::{CollectionRef, Reader, Sort};
use crate::state::ApiState;

/// Which collections, in which order.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct CollectionParams {
    /// Network id or short name; all networks without it.
    network: Option<String>,
    /// id (the default: no row missed or met twice while data changes) or rank (most transfers first).
    #[param(inline)]
    sort: Option<Sort>,
}

/// In which order.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct SortParams {
    /// id (the default: no row missed or met twice while data changes) or rank (largest first).
    #[param(inline)]
    sort: Option<Sort>,
}

/// Collections
#[utoipa::path(get, path = "/v1/collections", operation_id = "collections_list", tag = "collections",
    params(CollectionParams, ReadParams, PageParams), responses((status = 200, body = Page<Collection>)))]
pub(crate) async fn list(
    State(state): State<ApiState>,
    Q(filter): Q<CollectionParams>,
    Q(params): Q<ReadParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<Collection>>, Problem> {
    let sort = filter.sort.unwrap_or_default();
    let answer = match &filter.network {
        Some(network) => {
            let (reader, network) = Reader::at(&state, network, &params).await?;
            let answer = reader.collections(Some(&network), sort, &params, &page).await?;
            reader.not_silently_empty(Some(&network), answer, &page)?
        }
        None => {
            params.refuse_min_height()?;
            let reader = Reader::open(&state).await?;
            let answer = reader.collections(None, sort, &params, &page).await?;
            reader.not_silently_empty(None, answer, &page)?
        }
    };
    Ok(Json(answer))
}

/// A collection (by id)
#[utoipa::path(get, path = "/v1/collections/{id}", operation_id = "collections_one_by_id", tag = "collections",
    params(("id" = Uuid, Path, description = "Collection id"), ReadParams), responses((status = 200, body = One<Collection>)))]
pub(crate) async fn one_by_id(
    State(state): State<ApiState>,
    P(id): P<Uuid>,
    Q(params): Q<ReadParams>,
) -> Result<Json<One<Collection>>, Problem> {
    one_of(&state, CollectionRef::Id(id), &params).await
}

/// A collection
#[utoipa::path(get, path = "/v1/collections/{network}/{address}", operation_id = "collections_one", tag = "collections",
    params(("network" = String, Path, description = "Network id or short name"), ("address" = String, Path, description = "Contract address"), ReadParams), responses((status = 200, body = One<Collection>)))]
pub(crate) async fn one(
    State(state): State<ApiState>,
    P((network, address)): P<(String, String)>,
    Q(params): Q<ReadParams>,
) -> Result<Json<One<Collection>>, Problem> {
    one_of(&state, CollectionRef::Natural(network, address), &params).await
}

async fn one_of(
    state: &ApiState,
    which: CollectionRef,
    params: &ReadParams,
) -> Result<Json<One<Collection>>, Problem> {
    params.refuse_as_of()?;
    let (_, network, row) = Reader::collection(state, which, params).await?;
    Ok(Json(One { item: Collection::new(&row, &network.slug), meta: Meta::of(&network) }))
}

/// Assets of a collection (by id)
///
/// By token id (numbers by value), an order no write changes.
#[utoipa::path(get, path = "/v1/collections/{id}/assets", operation_id = "collections_assets_by_id", tag = "collections",
    params(("id" = Uuid, Path, description = "Collection id"), ReadParams, PageParams), responses((status = 200, body = Page<Asset>)))]
pub(crate) async fn assets_by_id(
    State(state): State<ApiState>,
    P(id): P<Uuid>,
    Q(params): Q<ReadParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<Asset>>, Problem> {
    assets_of(&state, CollectionRef::Id(id), &params, &page).await
}

/// Assets of a collection
///
/// By token id (numbers by value), an order no write changes.
#[utoipa::path(get, path = "/v1/collections/{network}/{address}/assets", operation_id = "collections_assets", tag = "collections",
    params(("network" = String, Path, description = "Network id or short name"), ("address" = String, Path, description = "Contract address"), ReadParams, PageParams), responses((status = 200, body = Page<Asset>)))]
pub(crate) async fn assets(
    State(state): State<ApiState>,
    P((network, address)): P<(String, String)>,
    Q(params): Q<ReadParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<Asset>>, Problem> {
    assets_of(&state, CollectionRef::Natural(network, address), &params, &page).await
}

async fn assets_of(
    state: &ApiState,
    which: CollectionRef,
    params: &ReadParams,
    page: &PageParams,
) -> Result<Json<Page<Asset>>, Problem> {
    let every = ReadParams { require_metadata: None, ..params.clone() };
    let (reader, network, row) = Reader::collection(state, which, &every).await?;
    Ok(Json(reader.assets_of(&network, row.collection_id, params, page).await?))
}

/// Holders of a collection (by id)
#[utoipa::path(get, path = "/v1/collections/{id}/holders", operation_id = "collections_holders_by_id", tag = "collections",
    params(("id" = Uuid, Path, description = "Collection id"), ReadParams, SortParams, PageParams), responses((status = 200, body = Page<Holder>)))]
pub(crate) async fn holders_by_id(
    State(state): State<ApiState>,
    P(id): P<Uuid>,
    Q(params): Q<ReadParams>,
    Q(order): Q<SortParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<Holder>>, Problem> {
    holders_of(&state, CollectionRef::Id(id), &params, &order, &page).await
}

/// Holders of a collection
#[utoipa::path(get, path = "/v1/collections/{network}/{address}/holders", operation_id = "collections_holders", tag = "collections",
    params(("network" = String, Path, description = "Network id or short name"), ("address" = String, Path, description = "Contract address"), ReadParams, SortParams, PageParams), responses((status = 200, body = Page<Holder>)))]
pub(crate) async fn holders(
    State(state): State<ApiState>,
    P((network, address)): P<(String, String)>,
    Q(params): Q<ReadParams>,
    Q(order): Q<SortParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<Holder>>, Problem> {
    holders_of(&state, CollectionRef::Natural(network, address), &params, &order, &page).await
}

async fn holders_of(
    state: &ApiState,
    which: CollectionRef,
    params: &ReadParams,
    order: &SortParams,
    page: &PageParams,
) -> Result<Json<Page<Holder>>, Problem> {
    let (reader, network, row) = Reader::collection(state, which, params).await?;
    let sort = order.sort.unwrap_or_default();
    Ok(Json(reader.holders_of(&network, row.collection_id, sort, params, page).await?))
}

/// Transfers of a collection (by id)
///
/// Newest first.
#[utoipa::path(get, path = "/v1/collections/{id}/transfers", operation_id = "collections_transfers_by_id", tag = "collections",
    params(("id" = Uuid, Path, description = "Collection id"), ReadParams, TransferParams, PageParams), responses((status = 200, body = Page<Transfer>)))]
pub(crate) async fn transfers_by_id(
    State(state): State<ApiState>,
    P(id): P<Uuid>,
    Q(params): Q<ReadParams>,
    Q(filter): Q<TransferParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<Transfer>>, Problem> {
    transfers_of(&state, CollectionRef::Id(id), &params, &filter, &page).await
}

/// Transfers of a collection
///
/// Newest first.
#[utoipa::path(get, path = "/v1/collections/{network}/{address}/transfers", operation_id = "collections_transfers", tag = "collections",
    params(("network" = String, Path, description = "Network id or short name"), ("address" = String, Path, description = "Contract address"), ReadParams, TransferParams, PageParams), responses((status = 200, body = Page<Transfer>)))]
pub(crate) async fn transfers(
    State(state): State<ApiState>,
    P((network, address)): P<(String, String)>,
    Q(params): Q<ReadParams>,
    Q(filter): Q<TransferParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<Transfer>>, Problem> {
    transfers_of(&state, CollectionRef::Natural(network, address), &params, &filter, &page).await
}

async fn transfers_of(
    state: &ApiState,
    which: CollectionRef,
    params: &ReadParams,
    filter: &TransferParams,
    page: &PageParams,
) -> Result<Json<Page<Transfer>>, Problem> {
    let (reader, network, row) = Reader::collection(state, which, params).await?;
    let scope = TransferScope::Collection(row.collection_id);
    Ok(Json(reader.transfers_of(&network, scope, params, filter, page).await?))
}

/// Numbers of a collection (by id)
///
/// Market columns are null until a marketplace is read.
#[utoipa::path(get, path = "/v1/collections/{id}/stats", operation_id = "collections_stats_by_id", tag = "collections",
    params(("id" = Uuid, Path, description = "Collection id"), ReadParams), responses((status = 200, body = One<CollectionStats>)))]
pub(crate) async fn stats_by_id(
    State(state): State<ApiState>,
    P(id): P<Uuid>,
    Q(params): Q<ReadParams>,
) -> Result<Json<One<CollectionStats>>, Problem> {
    stats_of(&state, CollectionRef::Id(id), &params).await
}

/// Numbers of a collection
///
/// Market columns are null until a marketplace is read.
#[utoipa::path(get, path = "/v1/collections/{network}/{address}/stats", operation_id = "collections_stats", tag = "collections",
    params(("network" = String, Path, description = "Network id or short name"), ("address" = String, Path, description = "Contract address"), ReadParams), responses((status = 200, body = One<CollectionStats>)))]
pub(crate) async fn stats(
    State(state): State<ApiState>,
    P((network, address)): P<(String, String)>,
    Q(params): Q<ReadParams>,
) -> Result<Json<One<CollectionStats>>, Problem> {
    stats_of(&state, CollectionRef::Natural(network, address), &params).await
}

async fn stats_of(
    state: &ApiState,
    which: CollectionRef,
    params: &ReadParams,
) -> Result<Json<One<CollectionStats>>, Problem> {
    params.refuse_as_of()?;
    let (_, network, row) = Reader::collection(state, which, params).await?;
    Ok(Json(One { item: CollectionStats::from(&row), meta: Meta::of(&network) }))
}
