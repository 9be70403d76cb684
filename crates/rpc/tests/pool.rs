//! The pools against a server that misbehaves.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::extract::ws::{Message, WebSocketUpgrade};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};
use tidemark_model::redact::RedactedUrl;
use tidemark_rpc::backoff::Backoff;
use tidemark_rpc::breaker::BreakerConfig;
use tidemark_rpc::heads::HeadWatch;
use tidemark_rpc::{Call, Class, EndpointConfig, Identity, PoolConfig, ReadPool, RpcError, WritePool};
use tokio::task::JoinSet;

type Answer = Arc<dyn Fn(u64, &Value) -> Response + Send + Sync>;

#[derive(Clone)]
struct Shared {
    answer: Arc<Mutex<Answer>>,
    served: Arc<AtomicU64>,
}

struct Server {
    url: RedactedUrl,
    shared: Shared,
    _task: JoinSet<()>,
}

impl Server {
    async fn start(answer: impl Fn(u64, &Value) -> Response + Send + Sync + 'static) -> Self {
        let shared = Shared { answer: Arc::new(Mutex::new(Arc::new(answer))), served: Arc::default() };
        let router =
            Router::new().route("/{key}", post(handle)).route("/ws", get(heads)).with_state(shared.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let mut task = JoinSet::new();
        task.spawn(async move { axum::serve(listener, router).await.expect("serves") });
        let url =
            RedactedUrl::parse(&format!("http://user:CANARY@{address}/CANARY?key=CANARY")).expect("a URL");
        Self { url, shared, _task: task }
    }
    fn now_answers(&self, answer: impl Fn(u64, &Value) -> Response + Send + Sync + 'static) {
        *self.shared.answer.lock().expect("no panic") = Arc::new(answer);
    }
    fn served(&self) -> u64 {
        self.shared.served.load(Ordering::Relaxed)
    }
}

async fn handle(State(shared): State<Shared>, body: String) -> Response {
    let number = shared.served.fetch_add(1, Ordering::Relaxed);
    let answer = Arc::clone(&shared.answer.lock().expect("no panic"));
    answer(number, &serde_json::from_str(&body).expect("JSON"))
}

async fn heads(upgrade: WebSocketUpgrade) -> Response {
    upgrade.on_upgrade(|mut socket| async move {
        // The subscription, its id, one head; then the connection ends.
        let _ask = socket.recv().await;
        let _ = socket.send(Message::Text(r#"{"id":1,"result":"0x1"}"#.into())).await;
        let head = r#"{"method":"eth_subscription","params":{"result":{"number":"0x1"}}}"#;
        let _ = socket.send(Message::Text(head.into())).await;
    })
}

fn result(request: &Value, value: Value) -> Value {
    json!({ "jsonrpc": "2.0", "id": request["id"], "result": value })
}
fn body(value: Value) -> Response {
    value.to_string().into_response()
}
fn seven(_: u64, request: &Value) -> Response {
    match request {
        Value::Array(items) => body(items.iter().map(|item| result(item, json!(7))).collect()),
        one => body(result(one, json!(7))),
    }
}
fn failing(_: u64, _: &Value) -> Response {
    (StatusCode::BAD_GATEWAY, "CANARY page").into_response()
}

fn config(servers: &[&Server]) -> PoolConfig {
    let endpoints = servers.iter().map(|server| EndpointConfig::new(server.url.clone())).collect();
    let mut config = PoolConfig::new("test", endpoints);
    config.backoff = Backoff { first: Duration::from_millis(1), max: Duration::from_millis(5) };
    config.breaker = BreakerConfig {
        failures_max: 2,
        rest_first: Duration::from_millis(40),
        rest_max: Duration::from_millis(200),
    };
    config
}
fn pool(servers: &[&Server]) -> ReadPool {
    ReadPool::new(config(servers)).expect("a pool")
}
fn call() -> Call {
    Call::new("eth_call", json!([]))
}

#[tokio::test]
async fn the_breaker_opens_rests_and_probes() {
    let server = Server::start(failing).await;
    let pool = pool(&[&server]);
    let endpoint = Arc::clone(&pool.endpoints()[0]);
    for _ in 0..5 {
        pool.call::<u64>(&endpoint, &call()).await.expect_err("it fails");
    }
    assert_eq!(server.served(), 2, "after two failures nothing is sent");
    assert!(matches!(pool.call::<u64>(&endpoint, &call()).await, Err(RpcError::Resting { .. })));
    server.now_answers(seven);
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match pool.call::<u64>(&endpoint, &call()).await {
            Ok(answer) => break assert_eq!(answer, 7),
            Err(RpcError::Resting { .. }) => assert!(Instant::now() < deadline, "the probe never came"),
            Err(error) => panic!("{error}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(server.served(), 3, "one probe");
}

#[tokio::test]
async fn a_refused_probe_closes_the_breaker_too() {
    let server = Server::start(failing).await;
    let pool = pool(&[&server]);
    let endpoint = Arc::clone(&pool.endpoints()[0]);
    for _ in 0..2 {
        pool.call::<u64>(&endpoint, &call()).await.expect_err("it fails");
    }
    server.now_answers(|_, _| (StatusCode::TOO_MANY_REQUESTS, "slow down").into_response());
    let deadline = Instant::now() + Duration::from_secs(5);
    while server.served() < 3 {
        assert!(Instant::now() < deadline, "the probe never came");
        let _ = pool.call::<u64>(&endpoint, &call()).await;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    server.now_answers(seven);
    assert_eq!(pool.call::<u64>(&endpoint, &call()).await.expect("alive"), 7);
}

#[tokio::test]
async fn asking_goes_on_until_somebody_answers() {
    let (bad, good) = (Server::start(failing).await, Server::start(seven).await);
    let pool = pool(&[&bad, &good]);
    for _ in 0..10 {
        let (answer, endpoint) = pool.ask::<u64>(&call()).await.expect("an answer");
        assert_eq!((answer, endpoint.label().starts_with("rpc-2@")), (7, true));
    }
    assert!(bad.served() <= 3, "{}", bad.served());
    assert!(pool.endpoints()[0].score() < pool.endpoints()[1].score());
    assert_eq!(pool.requests(), bad.served() + good.served());
}

#[tokio::test]
async fn batches_survive_reordering_and_miss_what_is_missing() {
    let server = Server::start(|_, request| {
        let items = request.as_array().expect("a batch").iter().rev().skip(1);
        body(items.map(|item| result(item, item["params"][0].clone())).collect())
    })
    .await;
    let pool = pool(&[&server]);
    let calls: Vec<Call> = (0..4).map(|number| Call::new("eth_call", json!([number]))).collect();
    let answers = pool.batch::<u64>(&pool.endpoints()[0], &calls).await.expect("a batch");
    let found: Vec<_> = answers.iter().map(|answer| answer.as_ref().ok().copied()).collect();
    assert_eq!(found, [Some(0), Some(1), Some(2), None]);
    assert!(matches!(answers[3], Err(RpcError::MissingReply { .. })));
}

#[tokio::test]
async fn batches_are_cut_to_what_the_endpoint_takes() {
    let server = Server::start(seven).await;
    let mut config = config(&[&server]);
    config.endpoints[0].batch_max = 3;
    let pool = ReadPool::new(config).expect("a pool");
    let calls = vec![call(); 7];
    let answers = pool.batch::<u64>(&pool.endpoints()[0], &calls).await.expect("a batch");
    assert_eq!((answers.len(), server.served()), (7, 3));
}

#[tokio::test]
async fn bodies_are_bounded_and_secrets_stay() {
    let server = Server::start(|_, _| "x".repeat(100_000).into_response()).await;
    let mut small = config(&[&server]);
    small.body_bytes_max = 10_000;
    let pool = ReadPool::new(small).expect("a pool");
    let error = pool.call::<u64>(&pool.endpoints()[0], &call()).await.expect_err("too large");
    assert_eq!(error.class(), Class::ResponseTooLarge);
    let gone = {
        let server = Server::start(seven).await;
        config(&[&server])
    };
    let pool = ReadPool::new(gone).expect("a pool");
    let error = pool.call::<u64>(&pool.endpoints()[0], &call()).await.expect_err("nobody listens");
    for text in
        [error.to_string(), format!("{error:?}"), format!("{pool:?}"), format!("{:?}", pool.endpoints()[0])]
    {
        assert!(!text.contains("CANARY"), "{text}");
    }
}

#[tokio::test]
async fn slow_answers_time_out_by_method() {
    let server = Server::start(|_, request| {
        std::thread::sleep(Duration::from_millis(150));
        seven(0, request)
    })
    .await;
    let mut config = config(&[&server]);
    config.timeouts.block_number = Duration::from_millis(20);
    config.breaker.failures_max = 10;
    config.timeouts.by_method.insert("eth_gasPrice".to_owned(), Duration::from_millis(20));
    let pool = ReadPool::new(config).expect("a pool");
    let endpoint = Arc::clone(&pool.endpoints()[0]);
    for method in ["eth_blockNumber", "eth_gasPrice"] {
        let error = pool.call::<u64>(&endpoint, &Call::new(method, json!([]))).await.expect_err("slow");
        assert!(matches!(error, RpcError::Timeout { .. }), "{error}");
    }
    assert_eq!(pool.call::<u64>(&endpoint, &call()).await.expect("it has longer"), 7);
}

#[tokio::test]
async fn token_buckets_hold_calls_back() {
    let server = Server::start(seven).await;
    let mut config = config(&[&server]);
    config.endpoints[0].method_rps = vec![("eth_call".to_owned(), NonZeroU32::new(20).expect("not zero"))];
    config.endpoints[0].batch_max = 1;
    let pool = ReadPool::new(config).expect("a pool");
    let endpoint = Arc::clone(&pool.endpoints()[0]);
    let started = Instant::now();
    for _ in 0..26 {
        pool.call::<u64>(&endpoint, &call()).await.expect("an answer");
    }
    assert!(started.elapsed() >= Duration::from_millis(200), "20 at once, then one per 50 ms");
    let started = Instant::now();
    for _ in 0..5 {
        pool.call::<u64>(&endpoint, &Call::new("eth_other", json!([]))).await.expect("an answer");
    }
    assert!(started.elapsed() < Duration::from_secs(2), "other methods are free");
}

#[tokio::test]
async fn the_chain_is_checked_at_first_use_and_after_an_outage() {
    let chain = |chain: &'static str, genesis: &'static str| {
        move |_: u64, request: &Value| match request["method"].as_str() {
            Some("eth_chainId") => body(result(request, json!(chain))),
            Some("eth_getBlockByNumber") => body(result(request, json!({ "hash": genesis }))),
            _ => body(result(request, json!(7))),
        }
    };
    let server = Server::start(chain("0x1", "0xaa")).await;
    let mut config = config(&[&server]);
    config.identity = Identity::Evm { chain_id: 1, genesis: None };
    let pool = ReadPool::new(config).expect("a pool");
    let endpoint = Arc::clone(&pool.endpoints()[0]);
    assert_eq!(pool.verify().await.expect("right"), "chain 1, genesis 0xaa");
    assert_eq!(pool.call::<u64>(&endpoint, &call()).await.expect("an answer"), 7);
    assert_eq!(server.served(), 3, "checked once");
    server.now_answers(failing);
    for _ in 0..2 {
        pool.call::<u64>(&endpoint, &call()).await.expect_err("it fails");
    }
    // Another machine took over the name while it was down.
    server.now_answers(chain("0x1", "0xbb"));
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match pool.call::<u64>(&endpoint, &call()).await {
            Err(RpcError::WrongChain { found, .. }) => break assert!(found.contains("0xbb"), "{found}"),
            Err(RpcError::Resting { .. }) => assert!(Instant::now() < deadline, "the probe never came"),
            other => panic!("{other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(endpoint.is_other_chain());
}

#[tokio::test]
async fn writes_go_to_the_next_endpoint() {
    let (bad, good) = (Server::start(failing).await, Server::start(seven).await);
    let pool = WritePool::new(config(&[&bad, &good])).expect("a pool");
    assert_eq!(pool.call::<u64>(&Call::new("eth_sendRawTransaction", json!(["0x"]))).await.expect("sent"), 7);
    assert!(pool.requests() >= 1);
}

#[tokio::test]
async fn new_heads_wake_and_the_listener_reconnects() {
    let server = Server::start(seven).await;
    let mut url = server.url.expose().clone();
    url.set_scheme("ws").expect("a scheme");
    url.set_path("/ws");
    let watch = HeadWatch::start(&[RedactedUrl::parse(url.as_str()).expect("a URL")]);
    for _ in 0..4 {
        assert!(watch.next(Duration::from_secs(10)).await, "a head, or the end of a connection");
    }
    let idle = HeadWatch::start(&[]);
    assert!(!idle.next(Duration::from_millis(10)).await);
}

#[tokio::test]
async fn wss_is_spoken_with_tls() {
    use tokio::io::AsyncReadExt;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("wss://{}/key", listener.local_addr().expect("bound"));
    let _watch = HeadWatch::start(&[RedactedUrl::parse(&url).expect("a URL")]);
    let accepted = tokio::time::timeout(Duration::from_secs(60), listener.accept()).await;
    let (mut stream, _) = accepted.expect("it connects").expect("accepts");
    let mut hello = [0; 2];
    stream.read_exact(&mut hello).await.expect("it speaks");
    // A TLS handshake record, and nothing of the URL before the peer has proven its name.
    assert_eq!(hello, [0x16, 0x03]);
}
