//! WebSocket: new heads after mining and after a reorg, and usual calls on the same connection.

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tidemark_sim::{FaultProfile, ReorgKind};
use tokio_tungstenite::tungstenite::Message;

use crate::client::{number, served};

type Socket = tokio_tungstenite::WebSocketStream<tokio_tungstenite::MaybeTlsStream<tokio::net::TcpStream>>;

async fn say(socket: &mut Socket, method: &str, params: Value) {
    let call = json!({"jsonrpc": "2.0", "id": 7, "method": method, "params": params});
    socket.send(Message::text(call.to_string())).await.unwrap();
}

async fn hear(socket: &mut Socket) -> Value {
    let message =
        tokio::time::timeout(Duration::from_secs(10), socket.next()).await.unwrap().unwrap().unwrap();
    serde_json::from_str(message.to_text().unwrap()).unwrap()
}

#[tokio::test]
async fn new_heads_come_after_mining_and_after_a_reorg() {
    let (sim, server, _client) = served(10, FaultProfile::default()).await;
    for url in [server.ws_url.clone(), server.ws_url.trim_end_matches("ws").to_owned()] {
        let (mut socket, _) = tokio_tungstenite::connect_async(url).await.unwrap();
        say(&mut socket, "eth_subscribe", json!(["newHeads"])).await;
        let subscription = hear(&mut socket).await["result"].clone();
        let head = sim.head();
        sim.mine(2);
        for height in [head + 1, head + 2] {
            let notice = hear(&mut socket).await;
            assert_eq!(notice["params"]["subscription"], subscription);
            let result = &notice["params"]["result"];
            assert_eq!(number(&result["number"]), height);
            assert_eq!(result["hash"], sim.block(height).unwrap().hash.to_string());
            assert!(result.get("transactions").is_none());
        }
        sim.reorg(2, ReorgKind::Replace);
        for height in [head + 1, head + 2, head + 3] {
            let result = hear(&mut socket).await["params"]["result"].clone();
            assert_eq!(number(&result["number"]), height);
            assert_eq!(result["hash"], sim.block(height).unwrap().hash.to_string());
        }
        say(&mut socket, "eth_blockNumber", json!([])).await;
        assert_eq!(number(&hear(&mut socket).await["result"]), head + 3);
        say(&mut socket, "eth_unsubscribe", json!([subscription])).await;
        assert_eq!(hear(&mut socket).await["result"], true);
        sim.mine(1);
        say(&mut socket, "eth_chainId", json!([])).await;
        assert_eq!(hear(&mut socket).await["result"], "0x7a69", "no head comes after unsubscribing");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_bad_provider_is_silent_or_hangs_up() {
    let (sim, server, _client) =
        served(10, FaultProfile { ws_silent: true, ..FaultProfile::default() }).await;
    let (mut socket, _) = tokio_tungstenite::connect_async(&server.ws_url).await.unwrap();
    say(&mut socket, "eth_subscribe", json!(["newHeads"])).await;
    hear(&mut socket).await;
    sim.mine(2);
    say(&mut socket, "eth_blockNumber", json!([])).await;
    assert_eq!(number(&hear(&mut socket).await["result"]), 12, "no head came before this answer");

    server.set_profile(FaultProfile { ws_close_after: Some(1), ..FaultProfile::default() });
    let (mut socket, _) = tokio_tungstenite::connect_async(&server.ws_url).await.unwrap();
    say(&mut socket, "eth_subscribe", json!(["newHeads"])).await;
    hear(&mut socket).await;
    sim.mine(2);
    assert_eq!(number(&hear(&mut socket).await["params"]["result"]["number"]), 13);
    let end = tokio::time::timeout(Duration::from_secs(10), socket.next()).await.unwrap();
    assert!(!matches!(end, Some(Ok(Message::Text(_)))), "the connection ends after one head");
}
