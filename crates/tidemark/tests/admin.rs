//! The operator's listener over HTTP: who may enter, what is refused, and a replay from request to effect.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use reqwest::StatusCode;
use serde_json::{Value, json};
use tidemark_model::redact::RedactedUrl;
use tidemark_store::{Db, DbOptions};
use tidemark_testkit::pg::TestDb;

const TOKEN: &str = "open-sesame";

/// A process with the API and the operator's listener.
struct Served {
    url: String,
    db: Db,
    child: Child,
    http: reqwest::Client,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Served {
    async fn new() -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let test = TestDb::empty().await.expect("a database"); // The product applies its own migrations.
        let url = RedactedUrl::parse(&test.url).expect("a URL");
        let db = Db::open(&url, &DbOptions::default()).expect("a pool");
        let admin = free_address();
        let folder = tidemark_testkit::scratch_dir().join(&test.name);
        std::fs::create_dir_all(&folder).expect("a folder");
        let config = folder.join("tidemark.toml");
        let text = format!(
            "[database]\nurl = {:?}\n[api]\nlisten = \"{}\"\nadmin_listen = \"{admin}\"\nadmin_token = \"{TOKEN}\"\n\
             [telemetry]\nlisten = \"off\"\n[[network]]\nid = 7\nslug = \"seven\"\nrpc = [\"http://127.0.0.1:1\"]\n",
            test.url,
            free_address(),
        );
        std::fs::write(&config, text).expect("writes");
        // If this test is killed, the kernel ends the server too.
        let child = Command::new("setpriv")
            .args([
                "--pdeathsig",
                "KILL",
                "--",
                env!("CARGO_BIN_EXE_tidemark"),
                "run",
                "--roles",
                "relay,workers,api",
                "--config",
            ])
            .arg(&config)
            .current_dir(&folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(folder.join("log")).expect("a log"))
            .spawn()
            .expect("starts");
        let served = Self { url: format!("http://{admin}"), db, child, http: reqwest::Client::new() };
        let started = Instant::now();
        while served.get("/admin/nothing").await.is_err() {
            assert!(started.elapsed() < Duration::from_secs(120), "{}", read(&folder.join("log")));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        served
    }
    async fn get(&self, path: &str) -> reqwest::Result<reqwest::Response> {
        self.http.get(format!("{}{path}", self.url)).bearer_auth(TOKEN).send().await
    }
    async fn replay(&self, body: &Value) -> (StatusCode, Value) {
        let answer = self.http.post(format!("{}/admin/events/replay", self.url)).bearer_auth(TOKEN);
        let answer = answer.json(body).send().await.expect("answers");
        let status = answer.status();
        if status.is_client_error() {
            assert_eq!(answer.headers()["content-type"], "application/problem+json");
        }
        (status, answer.json().await.expect("JSON"))
    }
    async fn sql(&self, sql: &str) {
        self.db.conn().await.expect("connects").batch("prepare a test", sql).await.expect("changes");
    }
    async fn number(&self, sql: &str) -> i64 {
        let conn = self.db.conn().await.expect("connects");
        conn.query_one("count", sql, &[]).await.expect("counts").get(0)
    }
}

fn read(path: &std::path::Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn free_address() -> std::net::SocketAddr {
    let port = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    port.local_addr().expect("its address")
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_enters_without_the_token() {
    let served = Served::new().await;
    let post = || served.http.post(format!("{}/admin/events/replay", served.url)).body("{}");
    for request in [post(), post().bearer_auth("wrong"), post().header("authorization", TOKEN)] {
        let answer = request.send().await.expect("answers");
        assert_eq!(answer.status(), StatusCode::UNAUTHORIZED);
        assert_eq!(answer.headers()["content-type"], "application/problem+json");
        let problem: Value = answer.json().await.expect("JSON");
        assert_eq!(problem["code"], "unauthorized");
    }
    assert_eq!(served.number("select count(*) from system.audit_log").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_request_is_a_problem_that_says_what_to_send() {
    let served = Served::new().await;
    let good = json!({ "handler": "projector", "from": 1, "to": 5, "reason": "a test" });
    let with = |name: &str, value: Value| {
        let mut body = good.clone();
        body[name] = value;
        body
    };
    let mut unreasoned = good.clone();
    unreasoned.as_object_mut().expect("an object").remove("reason");
    for (body, said) in [
        (json!({}), "handler"),
        (unreasoned, "reason"),
        (with("reason", " ".into()), "reason is empty"),
        (with("handler", "nobody".into()), "no handler nobody"),
        (with("from", 9.into()), "not before"),
        (with("from", (-1).into()), "not a number"),
        (with("unit", "time".into()), "not a time"),
        (with("unit", "fortnight".into()), "fortnight"),
        (with("network", "seven".into()), "goes with unit height"),
        (with("surprise", true.into()), "surprise"),
    ] {
        let (status, problem) = served.replay(&body).await;
        assert!(status.is_client_error(), "{body}: {status}");
        assert!(problem["detail"].as_str().expect("a detail").contains(said), "{body}: {problem}");
    }
    let missing = json!({ "handler": "ledger", "unit": "height", "network": "nine", "from": 1, "to": 2, "reason": "x" });
    assert_eq!(served.replay(&missing).await.1["code"], "unknown_network");
    let unknown = served.get("/admin/events/replays/none").await.expect("answers");
    assert_eq!(unknown.status(), StatusCode::NOT_FOUND);
    assert_eq!(served.number("select count(*) from system.audit_log").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_of_the_projector_rebuilds_its_tables_and_is_audited() {
    let served = Served::new().await;
    let started = Instant::now();
    while served
        .number("select count(*) from system.consumer_positions where handler_kind = 'projector'")
        .await
        == 0
    {
        assert!(started.elapsed() < Duration::from_secs(120), "the projector never declared itself");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // A row nobody can have written: the ledger knows nothing of it.
    let strangers = "select count(*) from projection.collection_holders";
    served
        .sql(
            "insert into projection.collection_holders (collection_id, account_id, qty, asset_count)
              values (gen_random_uuid(), gen_random_uuid(), 1, 1)",
        )
        .await;
    assert_eq!(served.number(strangers).await, 1);
    let body =
        json!({ "handler": "projector", "from": 1, "to": 1_000_000, "reason": "a test", "by": "olga" });
    let mut dry = body.clone();
    dry["dry_run"] = true.into();
    let (status, answer) = served.replay(&dry).await;
    assert_eq!((status, &answer["events"]), (StatusCode::OK, &json!(0)));
    let (status, answer) = served.replay(&body).await;
    assert_eq!(status, StatusCode::ACCEPTED);
    let id = answer["id"].as_str().expect("an id").to_owned();
    loop {
        let row: Value = served
            .get(&format!("/admin/events/replays/{id}"))
            .await
            .expect("answers")
            .json()
            .await
            .expect("JSON");
        match row["status"].as_str().expect("a status") {
            "running" => assert!(started.elapsed() < Duration::from_secs(120), "{row}"),
            "done" => break,
            other => panic!("{other}: {row}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(served.number(strangers).await, 0, "the table was not built anew");
    let audited = "select count(*) from system.audit_log
                   where actor = 'olga' and action = 'events.replay' and target = 'projector' and reason = 'a test'";
    assert_eq!(served.number(audited).await, 1);
}
