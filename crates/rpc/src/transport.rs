//! HTTP under JSON-RPC: one POST, a deadline over all of it, and a body counted while it streams (after
//! decompression, so a small gzip bomb is stopped too).

use std::sync::{Once, OnceLock};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tidemark_model::redact::RedactedUrl;

static PROVIDER: Once = Once::new();

/// Installs the TLS provider once, unless the process has one.
pub(crate) fn install_tls() {
    PROVIDER.call_once(|| {
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            // Losing a race against another installer is as good as winning it.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
    });
}

/// The client of all pools: each of its own would keep the system's certificates once more, half a MiB per network.
pub(crate) fn client() -> Result<reqwest::Client, String> {
    static CLIENT: OnceLock<Result<reqwest::Client, String>> = OnceLock::new();
    CLIENT.get_or_init(build_client).clone()
}

fn build_client() -> Result<reqwest::Client, String> {
    install_tls();
    reqwest::Client::builder()
        .connect_timeout(Duration::from_secs(5))
        .pool_idle_timeout(Duration::from_secs(60))
        .tcp_nodelay(true)
        // A redirect could lead the key in our URL to another host.
        .redirect(reqwest::redirect::Policy::none())
        .build()
        .map_err(|error| error.without_url().to_string())
}

/// What came back.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) retry_after: Option<Duration>,
    pub(crate) body: Bytes,
}

/// Why nothing came back.
pub(crate) enum Fault {
    Timeout,
    TooLarge,
    Broken(String),
}

/// Longest pause a `Retry-After` may ask of us.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// Posts `body` and reads at most `body_max` bytes.
pub(crate) async fn post(
    http: &reqwest::Client,
    url: &RedactedUrl,
    body: Vec<u8>,
    body_max: usize,
    timeout: Duration,
) -> Result<Answer, Fault> {
    match tokio::time::timeout(timeout, exchange(http, url, body, body_max)).await {
        Ok(answer) => answer,
        Err(_) => Err(Fault::Timeout),
    }
}

async fn exchange(
    http: &reqwest::Client,
    url: &RedactedUrl,
    body: Vec<u8>,
    body_max: usize,
) -> Result<Answer, Fault> {
    let broken = |error: reqwest::Error| Fault::Broken(explain(error));
    let request = http.post(url.expose().clone()).header("content-type", "application/json").body(body);
    let mut response = request.send().await.map_err(broken)?;
    let status = response.status().as_u16();
    let retry_after = response
        .headers()
        .get("retry-after")
        .and_then(|value| value.to_str().ok())
        .and_then(|text| text.trim().parse().ok())
        .map(|seconds| Duration::from_secs(seconds).min(RETRY_AFTER_MAX));
    let mut read = BytesMut::new();
    while let Some(chunk) = response.chunk().await.map_err(broken)? {
        if read.len() + chunk.len() > body_max {
            return Err(Fault::TooLarge);
        }
        read.extend_from_slice(&chunk);
    }
    Ok(Answer { status, retry_after, body: read.freeze() })
}

/// The whole chain of reasons, without the URL.
fn explain(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
