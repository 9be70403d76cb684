//! `/v1`: parse, ask, answer.

pub(crate) mod accounts;
pub(crate) mod assets;
pub(crate) mod chain;
pub(crate) mod collections;
pub(crate) mod networks;
pub(crate) mod search;
pub(crate) mod transfers;

use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::state::ApiState;

/// All documented routes.
pub(crate) fn documented(doc: utoipa::openapi::OpenApi) -> OpenApiRouter<ApiState> {
    OpenApiRouter::with_openapi(doc)
        .routes(routes!(networks::list))
        .routes(routes!(networks::one))
        .routes(routes!(networks::status))
        .routes(routes!(collections::list))
        .routes(routes!(collections::one_by_id))
        .routes(routes!(collections::assets_by_id))
        .routes(routes!(collections::holders_by_id))
        .routes(routes!(collections::transfers_by_id))
        .routes(routes!(collections::stats_by_id))
        .routes(routes!(collections::one))
        .routes(routes!(collections::assets))
        .routes(routes!(collections::holders))
        .routes(routes!(collections::transfers))
        .routes(routes!(collections::stats))
        .routes(routes!(assets::batch))
        .routes(routes!(assets::one_by_id))
        .routes(routes!(assets::owners_by_id))
        .routes(routes!(assets::transfers_by_id))
        .routes(routes!(assets::history_by_id))
        .routes(routes!(assets::one))
        .routes(routes!(assets::owners))
        .routes(routes!(assets::transfers))
        .routes(routes!(assets::history))
        .routes(routes!(accounts::one))
        .routes(routes!(accounts::assets))
        .routes(routes!(accounts::collections))
        .routes(routes!(accounts::transfers))
        .routes(routes!(transfers::list))
        .routes(routes!(chain::block))
        .routes(routes!(chain::block_events))
        .routes(routes!(chain::transaction))
        .routes(routes!(chain::transaction_events))
        .routes(routes!(chain::transaction_status))
        .routes(routes!(chain::event))
        .routes(routes!(search::search))
        .routes(routes!(crate::stream::stream))
}
