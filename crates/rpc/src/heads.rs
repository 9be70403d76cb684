//! `newHeads` over WebSocket, as a wake-up only: heads may be skipped, repeated or reverted there, so what
//! arrives is never read as data. A missed message costs one polling interval, nothing else.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use tidemark_model::redact::RedactedUrl;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_tungstenite::tungstenite::{Bytes, Message};

use crate::backoff::Backoff;

/// Silence after which the other side is asked for a sign of life; after as much again without one, the connection
/// counts as dead. A chain may well stand still for longer.
const SILENCE_MAX: Duration = Duration::from_secs(30);

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
        match subscribe(&url, &woken, SILENCE_MAX).await {
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

async fn subscribe(url: &RedactedUrl, woken: &Notify, silence_max: Duration) -> Result<(), String> {
    let connect = tokio_tungstenite::connect_async(url.expose().as_str());
    let connected = tokio::time::timeout(Duration::from_secs(10), connect).await;
    // The error of a handshake may repeat the URL: only its kind is kept.
    let (mut socket, _) = connected.map_err(|_| "no connection in time")?.map_err(|_| "no connection")?;
    let ask = r#"{"jsonrpc":"2.0","id":1,"method":"eth_subscribe","params":["newHeads"]}"#;
    socket.send(Message::text(ask)).await.map_err(|_| "cannot subscribe")?;
    let mut heads = 0_u64;
    let mut is_asked = false;
    loop {
        let message = match tokio::time::timeout(silence_max, socket.next()).await {
            Ok(Some(Ok(message))) => message,
            Ok(_) if heads > 0 => return Ok(()),
            Ok(_) => return Err("closed before the first head".to_owned()),
            Err(_) if is_asked => return Err("silent for too long".to_owned()),
            Err(_) => {
                is_asked = true;
                socket
                    .send(Message::Ping(Bytes::new()))
                    .await
                    .map_err(|_| "cannot ask for a sign of life")?;
                continue;
            }
        };
        is_asked = false;
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

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    const SHORT: Duration = Duration::from_millis(500);

    async fn listener() -> (TcpListener, RedactedUrl) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let url = format!("ws://{}", listener.local_addr().expect("has an address"));
        (listener, RedactedUrl::parse(&url).expect("a URL"))
    }

    #[tokio::test]
    async fn a_chain_that_stands_still_is_listened_to() {
        let (listener, url) = listener().await;
        let woken = Notify::new();
        // Answers pings, as reading does by itself, and says its first head after five times the silence.
        let node = async {
            let (stream, _) = listener.accept().await.expect("accepts");
            let mut socket = tokio_tungstenite::accept_async(stream).await.expect("shakes hands");
            let mut pings = 0;
            let _ = tokio::time::timeout(SHORT * 5, async {
                while let Some(Ok(message)) = socket.next().await {
                    pings += u32::from(message.is_ping());
                }
            })
            .await;
            let head = Message::text(r#"{"method":"eth_subscription"}"#);
            socket.send(head).await.expect("the listener is there");
            woken.notified().await;
            pings
        };
        tokio::select! {
            ended = subscribe(&url, &woken, SHORT) => panic!("it gave up: {ended:?}"),
            pings = node => assert!(pings >= 2, "{pings}"),
        }
    }

    #[tokio::test]
    async fn a_node_that_gives_no_sign_of_life_is_left() {
        let (listener, url) = listener().await;
        let woken = Notify::new();
        let node = async {
            let (stream, _) = listener.accept().await.expect("accepts");
            let _socket = tokio_tungstenite::accept_async(stream).await.expect("shakes hands");
            std::future::pending::<()>().await;
        };
        tokio::select! {
            ended = subscribe(&url, &woken, SHORT) => {
                assert_eq!(ended, Err("silent for too long".to_owned()));
            }
            () = node => unreachable!("it waits for ever"),
        }
    }
}
