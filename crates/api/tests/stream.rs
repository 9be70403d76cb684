//! The live stream over a real connection: resume without a miss, retractions by name, filters, finality.

mod seed;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::StreamExt as _;
use seed::{ETH, FINALIZED, HEAD, Seed};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

struct Server {
    seed: Seed,
    base: String,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Server {
    async fn start(config: tidemark_api::ApiConfig) -> anyhow::Result<Self> {
        // Plain HTTP, but the client asks for a provider at birth; another test may have been first.
        rustls::crypto::ring::default_provider().install_default().ok();
        let seed = seed::seed_with(config).await?;
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let base = format!("http://{}", listener.local_addr()?);
        let app = seed.router.clone().into_make_service_with_connect_info::<SocketAddr>();
        let serving = axum::serve(listener, app).with_graceful_shutdown(stop.clone().cancelled_owned());
        tasks.spawn(async move { serving.await.expect("the server serves") });
        let (state, token) = (seed.state.clone(), stop.clone());
        tasks.spawn(async move { state.run(token).await });
        Ok(Self { seed, base, stop, tasks })
    }
    async fn finish(self) {
        self.stop.cancel();
        self.tasks.close();
        tokio::time::timeout(Duration::from_secs(10), self.tasks.wait())
            .await
            .expect("live connections end with us");
    }
}

struct Message {
    id: Option<String>,
    name: String,
    data: Value,
}

struct Listener {
    body: futures_util::stream::BoxStream<'static, reqwest::Result<bytes::Bytes>>,
    buffer: String,
}

impl Listener {
    async fn open(server: &Server, query: &str, last: Option<&str>) -> anyhow::Result<Self> {
        let mut request = reqwest::Client::new().get(format!("{}/v1/stream?{query}", server.base));
        if let Some(last) = last {
            request = request.header("last-event-id", last);
        }
        let response = request.send().await?;
        anyhow::ensure!(response.status() == 200, "{}: {}", response.status(), response.text().await?);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Ok(Self { body: response.bytes_stream().boxed(), buffer: String::new() })
    }
    async fn next(&mut self) -> anyhow::Result<Message> {
        tokio::time::timeout(Duration::from_secs(20), self.wait()).await?
    }
    async fn wait(&mut self) -> anyhow::Result<Message> {
        loop {
            if let Some(end) = self.buffer.find("\n\n") {
                let block: String = self.buffer.drain(..end + 2).collect();
                let field = |name: &str| {
                    block.lines().find_map(|line| line.strip_prefix(name)).map(|text| text.trim().to_owned())
                };
                let Some(data) = field("data:") else { continue }; // A heartbeat.
                return Ok(Message {
                    id: field("id:"),
                    name: field("event:").unwrap_or_default(),
                    data: serde_json::from_str(&data)?,
                });
            }
            let Some(chunk) = self.body.next().await else { anyhow::bail!("the stream ended") };
            self.buffer.push_str(std::str::from_utf8(&chunk?)?);
        }
    }
    /// Messages until one with this event id.
    async fn until(&mut self, event_id: &str) -> anyhow::Result<Vec<Message>> {
        let mut found = Vec::new();
        loop {
            let message = self.next().await?;
            let last = message.data["event_id"] == event_id;
            found.push(message);
            if last {
                return Ok(found);
            }
        }
    }
}

const PROJECTED: &str = "projection.transfer.projected.v1";
const RETRACTED: &str = "projection.transfer.retracted.v1";

fn config() -> tidemark_api::ApiConfig {
    tidemark_api::ApiConfig { requests_per_minute: 100_000, stream_poll_ms: 20, ..Default::default() }
}

#[tokio::test]
async fn a_client_that_is_cut_off_again_and_again_misses_nothing() -> anyhow::Result<()> {
    let server = Server::start(config()).await?;
    let moves: Vec<_> = server.seed.transfers.iter().take(120).cloned().collect();
    let mut truth = Vec::new();
    let mut received = Vec::new();
    let mut last: Option<String> = None;
    // Rounds of writing and listening; the connection is dropped in the middle of each.
    for (round, chunk) in moves.chunks(20).enumerate() {
        let mut listener = Listener::open(&server, "", last.as_deref()).await?;
        if last.is_none() {
            last = listener.next().await?.id; // hello
        }
        // Messages of one to four transfers, so that a cut falls into the middle of some.
        for (at, moved) in chunk.chunks(1 + round % 4).enumerate() {
            let moved: Vec<_> = moved.iter().collect();
            let told =
                |name: &str| moved.iter().map(|one| (name.to_owned(), one.event_id.to_string())).collect();
            server.seed.say(PROJECTED, &server.seed.payload(&moved)).await?;
            truth.extend::<Vec<_>>(told("transfer"));
            if at % 5 == 0 {
                server.seed.say(RETRACTED, &server.seed.payload(&moved)).await?;
                truth.extend::<Vec<_>>(told("retracted"));
            }
        }
        for _ in 0..(7 + round * 3) {
            let message = listener.next().await?;
            if message.name == "hello" {
                continue;
            }
            last = message.id;
            received.push((message.name, message.data["event_id"].as_str().expect("an id").to_owned()));
        }
    }
    let mut listener = Listener::open(&server, "", last.as_deref()).await?;
    while received.len() < truth.len() {
        let message = listener.next().await?;
        if message.name != "hello" {
            received.push((message.name, message.data["event_id"].as_str().expect("an id").to_owned()));
        }
    }
    assert_eq!(received, truth, "in order, none missing, none twice");
    drop(listener);
    server.finish().await;
    Ok(())
}

#[tokio::test]
async fn what_a_relay_of_the_process_numbers_is_told_without_waiting_for_the_next_look() -> anyhow::Result<()>
{
    let never = tidemark_api::ApiConfig { stream_poll_ms: 3_600_000, ..config() };
    let server = Server::start(never).await?;
    let (news, stop) = (server.seed.woken.numbered.clone(), server.stop.clone());
    server.tasks.spawn(async move {
        while !stop.is_cancelled() {
            news.tell();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let mut listener = Listener::open(&server, "", None).await?;
    assert_eq!(listener.next().await?.name, "hello");
    let moved = server.seed.transfers.first().expect("one");
    server.seed.say(PROJECTED, &server.seed.payload(&[moved])).await?;
    assert_eq!(listener.until(&moved.event_id.to_string()).await?.len(), 1);
    drop(listener);
    server.finish().await;
    Ok(())
}

#[tokio::test]
async fn filters_choose_and_a_retraction_names_what_it_takes_back() -> anyhow::Result<()> {
    let server = Server::start(config()).await?;
    let seed = &server.seed;
    let of = |collection: usize| {
        seed.transfers.iter().find(|moved| moved.collection == collection && moved.from.is_some())
    };
    let (ours, other) = (of(0).expect("one"), of(2).expect("one"));
    let polygon = of(4).expect("one");
    let account = &seed.accounts[ours.to.expect("to")];
    let mut by_collection =
        Listener::open(&server, &format!("collection={}", seed.collections[0].1), None).await?;
    let mut by_account =
        Listener::open(&server, &format!("network=1&account={account}&kind=transfer"), None).await?;
    let mut by_network = Listener::open(&server, "network=polygon", None).await?;
    for listener in [&mut by_collection, &mut by_account, &mut by_network] {
        assert_eq!(listener.next().await?.name, "hello");
    }
    for moved in [other, polygon, ours] {
        seed.say(PROJECTED, &seed.payload(&[moved])).await?;
    }
    seed.say(RETRACTED, &seed.payload(&[ours])).await?;
    seed.say("projection.finality.advanced.v1", &json!({"network_id": 137, "finalized_height": HEAD}))
        .await?;
    let id = ours.event_id.to_string();
    for listener in [&mut by_collection, &mut by_account] {
        let (first, second) = (listener.next().await?, listener.next().await?);
        assert_eq!((first.name.as_str(), &first.data["event_id"]), ("transfer", &json!(id)));
        assert_eq!((second.name.as_str(), &second.data["event_id"]), ("retracted", &json!(id)));
    }
    assert_eq!(by_network.next().await?.data["event_id"], json!(polygon.event_id));
    let line = by_network.next().await?;
    assert_eq!((line.name.as_str(), &line.data["finalized_height"]), ("finality", &json!(HEAD)));
    drop((by_collection, by_account, by_network));
    server.finish().await;
    Ok(())
}

#[tokio::test]
async fn a_finalized_stream_tells_what_the_line_has_passed_and_resumes() -> anyhow::Result<()> {
    let server = Server::start(config()).await?;
    let seed = &server.seed;
    let above = |low: i64, high: i64| -> BTreeSet<String> {
        let rows = seed.transfers.iter().filter(|moved| moved.network == ETH && !moved.reverted);
        rows.filter(|moved| moved.height > low && moved.height <= high)
            .map(|moved| moved.event_id.to_string())
            .collect()
    };
    let advance = |height: i64| {
        let sql =
            format!("update projection.network_status set finalized_height = {height} where network_id = 1");
        async move { seed.run(&sql).await }
    };
    let mut listener = Listener::open(&server, "network=1&min_finality=finalized", None).await?;
    assert_eq!(listener.next().await?.name, "hello");
    advance(FINALIZED + 20).await?;
    let mut told = BTreeSet::new();
    let mut last = None;
    while last.is_none() {
        let message = listener.next().await?;
        match message.name.as_str() {
            "transfer" => {
                assert_eq!(message.data["finality_status"], "finalized");
                told.insert(message.data["event_id"].as_str().expect("an id").to_owned());
            }
            "line" => last = message.id,
            other => panic!("{other}"),
        }
    }
    assert_eq!(told, above(FINALIZED, FINALIZED + 20));
    drop(listener);
    // The line moves while nobody listens; the position carries the line.
    advance(HEAD).await?;
    let mut listener = Listener::open(&server, "network=1&min_finality=finalized", last.as_deref()).await?;
    let mut told = BTreeSet::new();
    loop {
        let message = listener.next().await?;
        match message.name.as_str() {
            "transfer" => {
                told.insert(message.data["event_id"].as_str().expect("an id").to_owned());
            }
            "line" if message.data["height"] == HEAD => break,
            _ => {}
        }
    }
    assert_eq!(told, above(FINALIZED + 20, HEAD));
    drop(listener);
    server.finish().await;
    Ok(())
}

#[tokio::test]
async fn connections_are_bounded() -> anyhow::Result<()> {
    let server = Server::start(tidemark_api::ApiConfig { stream_clients_max: 1, ..config() }).await?;
    let mut first = Listener::open(&server, "", None).await?;
    assert_eq!(first.next().await?.name, "hello");
    let refused = reqwest::get(format!("{}/v1/stream", server.base)).await?;
    assert_eq!(refused.status(), 503);
    assert!(refused.headers().contains_key("retry-after"));
    let problem: Value = serde_json::from_str(&refused.text().await?)?;
    assert_eq!(problem["code"], "too_many_streams");
    // Everything still kept can be asked for from the beginning.
    let moved = server.seed.transfers[5].clone();
    server.seed.say(PROJECTED, &server.seed.payload(&[&moved])).await?;
    let found = first.until(&moved.event_id.to_string()).await?;
    assert_eq!(found.last().expect("one").name, "transfer");
    drop(first);
    server.finish().await;
    Ok(())
}
