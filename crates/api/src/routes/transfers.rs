//! Transfers of a network, or of all.

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use tidemark_store::reads::TransferScope;
use utoipa::IntoParams;

use crate::answer::Page;
use crate::dto::Transfer;
use crate::params::{PageParams, Q, ReadParams, TransferParams};
use crate::problem::Problem;
use crate::reader::Reader;
use crate::state::ApiState;

/// Of which network.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct NetworkParam {
    /// Network id or short name; all networks without it.
    network: Option<String>,
}

/// Transfers, newest first
///
/// Without `network`, networks are merged by block time; there is no order between chains beyond that.
#[utoipa::path(get, path = "/v1/transfers", operation_id = "transfers_list", tag = "transfers",
    params(NetworkParam, TransferParams, ReadParams, PageParams), responses((status = 200, body = Page<Transfer>)))]
pub(crate) async fn list(
    State(state): State<ApiState>,
    Q(of): Q<NetworkParam>,
    Q(filter): Q<TransferParams>,
    Q(params): Q<ReadParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<Transfer>>, Problem> {
    let answer = match &of.network {
        Some(network) => {
            let (reader, network) = Reader::at(&state, network, &params).await?;
            let answer =
                reader.transfers_of(&network, TransferScope::Network, &params, &filter, &page).await?;
            reader.not_silently_empty(Some(&network), answer, &page)?
        }
        None => {
            params.refuse_min_height()?;
            let reader = Reader::open(&state).await?;
            let answer = reader.transfers_everywhere(&params, &filter, &page).await?;
            reader.not_silently_empty(None, answer, &page)?
        }
    };
    Ok(Json(answer))
}
