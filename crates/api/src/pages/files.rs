//! The style sheet and the script, embedded, under names that change with their content: cached for a year.

use std::sync::LazyLock;

use axum::extract::Path;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};

const CSS: &str = include_str!("../../static/tidemark.css");
const JS: &str = include_str!("../../static/tidemark.js");
const ICON: &str = include_str!("../../static/icon.svg");

/// Paths of the embedded files.
pub(crate) struct Files {
    pub(crate) css: String,
    pub(crate) js: String,
    pub(crate) icon: String,
}

pub(crate) static FILES: LazyLock<Files> = LazyLock::new(|| {
    let name = |text: &str, ending: &str| {
        format!("/static/{}.{ending}", hex::encode(&Sha256::digest(text.as_bytes())[..6]))
    };
    Files { css: name(CSS, "css"), js: name(JS, "js"), icon: name(ICON, "svg") }
});

/// `GET /static/{name}`.
pub(crate) async fn file(Path(name): Path<String>) -> Response {
    let path = format!("/static/{name}");
    let (kind, text) = match path {
        path if path == FILES.css => ("text/css; charset=utf-8", CSS),
        path if path == FILES.js => ("text/javascript; charset=utf-8", JS),
        path if path == FILES.icon => ("image/svg+xml", ICON),
        _ => return super::not_found_page().await,
    };
    ([(header::CONTENT_TYPE, kind), (header::CACHE_CONTROL, "public, max-age=31536000, immutable")], text)
        .into_response()
}
