//! Sockets around a [`Node`]: HTTP, WebSocket with `newHeads`, transport faults, and admin paths for play.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::sync::broadcast::error::RecvError;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower_http::CompressionLevel;
use tower_http::compression::CompressionLayer;

use crate::block::Block;
use crate::chain::{ReorgKind, Sim};
use crate::encode::{HeaderTwist, Transactions, put_block};
use crate::faults::FaultProfile;
use crate::node::{Call, Node};

/// Largest request body: a batch of thousands of calls fits, nonsense does not.
const REQUEST_BYTES_MAX: usize = 4 << 20;
/// How long `stop` waits for open connections.
const STOP_WAIT: Duration = Duration::from_secs(5);
/// Pieces of a trickling body.
const TRICKLE_PIECES: usize = 49;
const HTML: &str =
    "<html><head><title>Just a moment...</title></head><body>checking your browser</body></html>";

/// One running server. Dropping it stops it, without waiting.
#[derive(Debug)]
pub struct SimServer {
    /// Base address for HTTP, without a slash at the end.
    pub url: String,
    /// Address for WebSocket clients.
    pub ws_url: String,
    /// Where it listens.
    pub address: SocketAddr,
    node: Arc<Node>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl SimServer {
    /// Changes the faults while running.
    pub fn set_profile(&self, profile: FaultProfile) {
        self.node.set_profile(profile);
    }

    /// The faults in force.
    pub fn profile(&self) -> FaultProfile {
        (*self.node.profile()).clone()
    }

    /// Calls answered so far, by method. Requests that a transport fault swallowed are not among them.
    pub fn requests(&self) -> BTreeMap<String, u64> {
        self.node.calls()
    }

    /// HTTP requests that arrived, whatever became of them.
    pub fn http_requests(&self) -> u64 {
        self.node.http_requests()
    }

    /// Stops listening, ends open connections and waits for them.
    pub async fn stop(self) {
        self.stop.cancel();
        // A connection that does not end is the client's business, not ours.
        let _ = tokio::time::timeout(STOP_WAIT, self.tasks.wait()).await;
    }
}

impl Drop for SimServer {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[derive(Clone)]
struct Shared {
    node: Arc<Node>,
    stop: CancellationToken,
}

impl Sim {
    /// Serves the chain at `listen` (port 0 takes a free one) through `profile`.
    pub async fn serve(&self, listen: SocketAddr, profile: FaultProfile) -> io::Result<SimServer> {
        let listener = TcpListener::bind(listen).await?;
        let address = listener.local_addr()?;
        let node = Arc::new(Node::new(self.clone(), profile));
        let stop = CancellationToken::new();
        let shared = Shared { node: Arc::clone(&node), stop: stop.clone() };
        let mut router = Router::new()
            .route("/", post(http).get(websocket))
            .route("/ws", get(websocket))
            .route("/as/{chain_id}", post(http_as))
            .route("/health", get(|| async { "ok" }));
        if self.config().admin {
            router = router
                .route("/sim/mine", post(admin_mine))
                .route("/sim/reorg", post(admin_reorg))
                .route("/sim/truth", get(admin_truth))
                .route("/sim/status", get(admin_status))
                .route("/sim/faults", post(admin_faults));
        }
        let mut router = router.layer(DefaultBodyLimit::max(REQUEST_BYTES_MAX)).with_state(shared);
        if self.config().gzip {
            router = router.layer(CompressionLayer::new().gzip(true).quality(CompressionLevel::Fastest));
        }
        let tasks = TaskTracker::new();
        let stopped = stop.clone().cancelled_owned();
        tasks.spawn(async move {
            if let Err(error) = axum::serve(listener, router).with_graceful_shutdown(stopped).await {
                tracing::error!(%error, action = "sim_serve", "The simulated node stopped listening.");
            }
        });
        tasks.close();
        tracing::info!(%address, action = "sim_serve", "A simulated node listens.");
        Ok(SimServer {
            url: format!("http://{address}"),
            ws_url: format!("ws://{address}/ws"),
            address,
            node,
            stop,
            tasks,
        })
    }
}

async fn http(State(shared): State<Shared>, body: Bytes) -> Response {
    respond(shared, None, body).await
}

/// The same chain under any id: one node stands for as many networks as a test wants.
async fn http_as(State(shared): State<Shared>, Path(chain_id): Path<u64>, body: Bytes) -> Response {
    respond(shared, Some(chain_id), body).await
}

async fn respond(shared: Shared, chain_id: Option<u64>, body: Bytes) -> Response {
    let node = &shared.node;
    let profile = node.profile();
    let dice = &node.dice;
    let admitted = node.admit(&profile);
    if profile.down {
        return plain(StatusCode::SERVICE_UNAVAILABLE, "node is down");
    }
    if !admitted || dice.hits(profile.http_429) {
        let mut response = plain(StatusCode::TOO_MANY_REQUESTS, "Too Many Requests");
        if let Some(seconds) = profile.retry_after_secs {
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        return response;
    }
    if dice.hits(profile.http_5xx) {
        let status = [
            StatusCode::INTERNAL_SERVER_ERROR,
            StatusCode::BAD_GATEWAY,
            StatusCode::SERVICE_UNAVAILABLE,
            StatusCode::GATEWAY_TIMEOUT,
        ][dice.below(4)];
        return plain(status, HTML);
    }
    if dice.hits(profile.hang) {
        pause(&shared.stop, profile.hang_ms).await;
        return plain(StatusCode::GATEWAY_TIMEOUT, "upstream request timeout");
    }
    if dice.hits(profile.slow) {
        pause(&shared.stop, profile.slow_ms).await;
    }
    if dice.hits(profile.html_200) {
        return ([(header::CONTENT_TYPE, "text/html")], HTML).into_response();
    }
    if dice.hits(profile.empty_body) {
        return StatusCode::OK.into_response();
    }
    let mut answer = match chain_id {
        Some(chain_id) => node.answer_as(chain_id, &body),
        None => node.answer(&body),
    };
    if dice.hits(profile.truncated_json) {
        let cut = answer.body.len() / 2;
        answer.body.truncate(cut);
    }
    if dice.hits(profile.trailing_garbage) {
        answer.body.extend_from_slice(b"\n<!-- served by edge-7 -->");
    }
    let status = StatusCode::from_u16(answer.status).unwrap_or(StatusCode::OK);
    let body = if dice.hits(profile.cut_connection) {
        cut(answer.body)
    } else if dice.hits(profile.trickle) {
        trickle(answer.body, Duration::from_millis(profile.trickle_ms))
    } else if dice.hits(profile.huge_body) {
        huge(answer.body, profile.huge_body_bytes)
    } else {
        Body::from(answer.body)
    };
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// Half the body, then an error: the connection ends without its last chunk.
fn cut(mut body: Vec<u8>) -> Body {
    body.truncate(body.len() / 2);
    let parts = [Ok(Bytes::from(body)), Err(io::Error::other("cut by the fault profile"))];
    Body::from_stream(stream::iter(parts))
}

fn trickle(body: Vec<u8>, pause: Duration) -> Body {
    let piece = (body.len() / TRICKLE_PIECES).max(1);
    let pieces = stream::unfold(Bytes::from(body), move |mut left| async move {
        if left.is_empty() {
            return None;
        }
        tokio::time::sleep(pause).await;
        let piece = left.split_to(piece.min(left.len()));
        Some((Ok::<_, io::Error>(piece), left))
    });
    // Compression asks once more after the end.
    Body::from_stream(pieces.fuse())
}

/// Blanks before the JSON, made on the way out: the server itself stays small.
fn huge(body: Vec<u8>, bytes: u64) -> Body {
    const BLANKS: &[u8] = &[b' '; 64 << 10];
    let pieces = usize::try_from(bytes).unwrap_or(usize::MAX) / BLANKS.len();
    let blanks = stream::repeat(Bytes::from_static(BLANKS)).take(pieces);
    Body::from_stream(blanks.chain(stream::iter([Bytes::from(body)])).map(Ok::<_, io::Error>))
}

fn plain(status: StatusCode, text: &'static str) -> Response {
    (status, text).into_response()
}

async fn pause(stop: &CancellationToken, millis: u64) {
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = tokio::time::sleep(Duration::from_millis(millis)) => {}
    }
}

async fn websocket(State(shared): State<Shared>, upgrade: WebSocketUpgrade) -> Response {
    upgrade.on_upgrade(move |socket| converse(shared, socket))
}

/// One WebSocket conversation: calls are answered, subscribers hear of new heads.
async fn converse(shared: Shared, mut socket: WebSocket) {
    let mut heads = shared.node.sim.watch_heads();
    let mut subscriptions: HashSet<String> = HashSet::new();
    let mut subscribed = 0_u64;
    let mut told = 0_u64;
    loop {
        tokio::select! {
            biased;
            () = shared.stop.cancelled() => return,
            message = socket.recv() => {
                let text = match message {
                    Some(Ok(Message::Text(text))) => text.as_str().as_bytes().to_vec(),
                    Some(Ok(Message::Binary(bytes))) => bytes.to_vec(),
                    Some(Ok(Message::Ping(_) | Message::Pong(_))) => continue,
                    Some(Ok(Message::Close(_)) | Err(_)) | None => return,
                };
                if shared.node.profile().down {
                    return;
                }
                let answer = subscribe(&text, &mut subscriptions, &mut subscribed)
                    .unwrap_or_else(|| shared.node.answer(&text).body);
                if send(&mut socket, answer).await.is_err() {
                    return;
                }
            }
            head = heads.recv() => match head {
                Ok(block) => {
                    let profile = shared.node.profile();
                    if profile.ws_silent {
                        continue;
                    }
                    told += u64::from(!subscriptions.is_empty());
                    if profile.ws_close_after.is_some_and(|most| told > most) {
                        return;
                    }
                    for subscription in &subscriptions {
                        let notice = notice(&shared.node, subscription, &block);
                        if send(&mut socket, notice).await.is_err() {
                            return;
                        }
                    }
                }
                // Too slow: some heads are lost, as with a real node.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return,
            },
        }
    }
}

/// Answers the calls that only exist on a connection; `None` for all others.
fn subscribe(text: &[u8], subscriptions: &mut HashSet<String>, subscribed: &mut u64) -> Option<Vec<u8>> {
    let call: Call<'_> = serde_json::from_slice(text).ok()?;
    let params: Vec<serde_json::Value> =
        call.params.and_then(|raw| serde_json::from_str(raw.get()).ok()).unwrap_or_default();
    let first = params.first().and_then(|value| value.as_str()).unwrap_or_default();
    let result = match call.method.as_ref() {
        "eth_subscribe" if first == "newHeads" => {
            *subscribed += 1;
            let name = format!("{:#x}", 0x51d_0000 + *subscribed);
            let result = serde_json::json!(name);
            subscriptions.insert(name);
            result
        }
        "eth_unsubscribe" => serde_json::json!(subscriptions.remove(first)),
        _ => return None,
    };
    let id: serde_json::Value =
        call.id.and_then(|raw| serde_json::from_str(raw.get()).ok()).unwrap_or_default();
    Some(serde_json::json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string().into_bytes())
}

fn notice(node: &Node, subscription: &str, block: &Block) -> Vec<u8> {
    let mut text = format!(
        "{{\"jsonrpc\":\"2.0\",\"method\":\"eth_subscription\",\"params\":{{\"subscription\":\"{subscription}\",\"result\":"
    )
    .into_bytes();
    put_block(&mut text, node.sim.book(), block, Transactions::Absent, &HeaderTwist::default());
    text.extend_from_slice(b"}}");
    text
}

async fn send(socket: &mut WebSocket, text: Vec<u8>) -> Result<(), axum::Error> {
    let text = String::from_utf8(text).expect("answers are ASCII or escaped JSON text");
    socket.send(Message::Text(text.into())).await
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MineOrder {
    #[serde(default = "one")]
    blocks: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReorgOrder {
    #[serde(default = "one")]
    depth: u64,
    #[serde(default = "shifted")]
    kind: ReorgKind,
}

#[derive(Debug, Deserialize)]
struct TruthQuery {
    height: Option<u64>,
}

/// Blocks mined by one admin call.
const ADMIN_BLOCKS_MAX: u64 = 100_000;

fn one() -> u64 {
    1
}

fn shifted() -> ReorgKind {
    ReorgKind::ReincludeShifted
}

fn order<T: for<'de> Deserialize<'de>>(body: &[u8]) -> Result<T, (StatusCode, String)> {
    let body = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(body).map_err(|error| (StatusCode::BAD_REQUEST, error.to_string()))
}

fn status(sim: &Sim) -> axum::Json<serde_json::Value> {
    axum::Json(serde_json::json!({
        "chainId": sim.config().chain_id, "head": sim.head(), "safe": sim.safe(), "finalized": sim.finalized(),
    }))
}

async fn admin_status(State(shared): State<Shared>) -> axum::Json<serde_json::Value> {
    status(&shared.node.sim)
}

async fn admin_mine(
    State(shared): State<Shared>,
    body: Bytes,
) -> Result<axum::Json<serde_json::Value>, (StatusCode, String)> {
    let order: MineOrder = order(&body)?;
    shared.node.sim.mine(order.blocks.min(ADMIN_BLOCKS_MAX));
    Ok(status(&shared.node.sim))
}

async fn admin_reorg(
    State(shared): State<Shared>,
    body: Bytes,
) -> Result<axum::Json<serde_json::Value>, (StatusCode, String)> {
    let order: ReorgOrder = order(&body)?;
    shared.node.sim.reorg(order.depth, order.kind);
    Ok(status(&shared.node.sim))
}

async fn admin_faults(
    State(shared): State<Shared>,
    body: Bytes,
) -> Result<&'static str, (StatusCode, String)> {
    shared.node.set_profile(order(&body)?);
    Ok("ok")
}

async fn admin_truth(
    State(shared): State<Shared>,
    Query(query): Query<TruthQuery>,
) -> axum::Json<serde_json::Value> {
    let sim = &shared.node.sim;
    let truth = sim.owners_at(query.height.unwrap_or_else(|| sim.head()));
    let balances: Vec<_> = truth
        .balances
        .iter()
        .map(|((contract, token_id, account), qty)| {
            serde_json::json!({
                "contract": contract, "tokenId": token_id, "account": account, "quantity": qty.to_string(),
            })
        })
        .collect();
    axum::Json(serde_json::json!({
        "height": truth.height, "blockHash": truth.block_hash, "balances": balances,
    }))
}
