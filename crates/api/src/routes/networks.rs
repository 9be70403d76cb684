//! Networks and how far they are read.

use axum::Json;
use axum::extract::State;

use crate::answer::{Meta, One, Page, cut};
use crate::cursor;
use crate::dto::Network;
use crate::params::{P, PageParams, Q, ReadParams};
use crate::problem::Problem;
use crate::reader::Reader;
use crate::state::ApiState;

/// All networks
///
/// Every network read here, by id, with its head, its watermark and its tidemark.
#[utoipa::path(get, path = "/v1/networks", operation_id = "networks_list", tag = "networks", params(ReadParams, PageParams),
    responses((status = 200, body = Page<Network>)))]
pub(crate) async fn list(
    State(state): State<ApiState>,
    Q(params): Q<ReadParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<Network>>, Problem> {
    params.refuse_as_of()?;
    params.refuse_min_height()?;
    let limit = page.limit()?;
    let after: (i32,) = match &page.cursor {
        None => (i32::MIN,),
        Some(text) => cursor::decode("networks", text)?,
    };
    let reader = Reader::open(&state).await?;
    // There are a handful: all are read for the watermarks anyway.
    let mut rows: Vec<_> = reader.networks.iter().filter(|row| row.network_id > after.0).collect();
    let more = cut(&mut rows, limit);
    let next = rows.last().filter(|_| more).map(|row| cursor::encode("networks", &(row.network_id,)));
    let items = rows.into_iter().map(Network::from).collect();
    Ok(Json(Page { items, next, meta: Meta::across(&reader.networks) }))
}

/// One network
#[utoipa::path(get, path = "/v1/networks/{network}", operation_id = "networks_one", tag = "networks",
    params(("network" = String, Path, description = "Network id or short name"), ReadParams),
    responses((status = 200, body = One<Network>)))]
pub(crate) async fn one(
    State(state): State<ApiState>,
    P(network): P<String>,
    Q(params): Q<ReadParams>,
) -> Result<Json<One<Network>>, Problem> {
    answer(&state, &network, &params).await
}

/// How far a network is read
///
/// With `min_height` it waits until that height is read: a cheap way to read your own writes.
#[utoipa::path(get, path = "/v1/networks/{network}/status", operation_id = "networks_status", tag = "networks",
    params(("network" = String, Path, description = "Network id or short name"), ReadParams),
    responses((status = 200, body = One<Network>)))]
pub(crate) async fn status(
    State(state): State<ApiState>,
    P(network): P<String>,
    Q(params): Q<ReadParams>,
) -> Result<Json<One<Network>>, Problem> {
    answer(&state, &network, &params).await
}

async fn answer(state: &ApiState, network: &str, params: &ReadParams) -> Result<Json<One<Network>>, Problem> {
    params.refuse_as_of()?;
    let (_, row) = Reader::at(state, network, params).await?;
    Ok(Json(One { item: Network::from(&row), meta: Meta::of(&row) }))
}
