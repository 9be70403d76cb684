use crate::state::ApiState;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
pub(crate) fn routes(_: &ApiState, _: Arc<serde_json::Value>) -> axum::Router<ApiState> {
    axum::Router::new()
}
pub(crate) async fn not_found() -> Response {
    crate::unknown_route().into_response()
}
