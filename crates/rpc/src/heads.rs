//! `newHeads` over WebSocket, as a wake-up only: heads may be skipped, repeated or reverted there, so what
//! arrives is never read as data. A missed message costs one polling interval, nothing else.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use tidemark_model::redact::RedactedUrl;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_tungstenite::tungstenite::Message;

use crate::backoff::Backoff;

/// Silence after which a connection counts as dead.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Listens to `newHeads` on several endpoints and wakes whoever waits. Stops when dropped.
#[derive(Debug)]
pub struct HeadWatch {
    woken: Arc<Notify>,
    _tasks: JoinSet<()>,
}

impl HeadWatch {
    /// Starts listening. Must be called inside a runtime. `ws://` and `wss://` are spoken; another scheme is
    /// named in the log once and left out, and polling goes on without it.
    pub fn start(urls: &[RedactedUrl]) -> Self {
        crate::transport::install_tls();
        let woken = Arc::new(Notify::new());
        let mut tasks = JoinSet::new();
        for url in urls {
            if !matches!(url.expose().scheme(), "ws" | "wss") {
                tracing::warn!(endpoint = %url, action = "heads_skipped", "Only ws:// and wss:// are spoken for new heads.");
                continue;
            }
            tasks.spawn(listen(url.clone(), Arc::clone(&woken)));
        }
        Self { woken, _tasks: tasks }
    }
    /// Waits for the next head, at most `wait`. True when one came. A head that came while nobody waited
    /// counts once.
    pub async fn next(&self, wait: Duration) -> bool {
        tokio::time::timeout(wait, self.woken.notified()).await.is_ok()
    }
}

async fn listen(url: RedactedUrl, woken: Arc<Notify>) {
    let backoff = Backoff { first: Duration::from_millis(200), max: Duration::from_secs(10) };
    let mut failures = 0;
    loop {
        match subscribe(&url, &woken).await {
            // It worked for a while: start over gently.
            Ok(()) => failures = 0,
            Err(reason) => {
                failures += 1;
                tracing::debug!(endpoint = %url, reason, failures, action = "heads_lost", "No new heads from here.");
            }
        }
        // Whatever happened meanwhile is found by asking.
        woken.notify_one();
        tokio::time::sleep(backoff.pause(failures)).await;
    }
}

async fn subscribe(url: &RedactedUrl, woken: &Notify) -> Result<(), String> {
    let connect = tokio_tungstenite::connect_async(url.expose().as_str());
    let connected = tokio::time::timeout(Duration::from_secs(10), connect).await;
    // The error of a handshake may repeat the URL: only its kind is kept.
    let (mut socket, _) = connected.map_err(|_| "no connection in time")?.map_err(|_| "no connection")?;
    let ask = r#"{"jsonrpc":"2.0","id":1,"method":"eth_subscribe","params":["newHeads"]}"#;
    socket.send(Message::text(ask)).await.map_err(|_| "cannot subscribe")?;
    let mut heads = 0_u64;
    loop {
        let message = match tokio::time::timeout(SILENCE_MAX, socket.next()).await {
            Ok(Some(Ok(message))) => message,
            Ok(_) if heads > 0 => return Ok(()),
            Ok(_) => return Err("closed before the first head".to_owned()),
            Err(_) => return Err("silent for too long".to_owned()),
        };
        match message {
            Message::Text(text) if text.as_str().contains("eth_subscription") => {
                heads += 1;
                woken.notify_one();
            }
            Message::Text(text) if text.as_str().contains("\"error\"") => {
                return Err("the subscription was refused".to_owned());
            }
            Message::Ping(payload) => {
                socket.send(Message::Pong(payload)).await.map_err(|_| "cannot answer a ping")?;
            }
            _ => {}
        }
    }
}
