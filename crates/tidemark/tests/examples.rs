//! Every example of the documentation, as written, against `tidemark dev` as a reader starts it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const TOKEN: &str = "a token of this test";
const ORIGIN: &str = "https://app.example";
const PATIENCE: Duration = Duration::from_secs(120);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn document(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).expect("a document of ours")
}

/// Fenced blocks of this kind.
fn blocks(text: &str, kind: &str) -> Vec<String> {
    let fence = format!("```{kind}\n");
    text.split(&fence).skip(1).filter_map(|rest| Some(rest.split_once("```")?.0.to_owned())).collect()
}

/// A command with the answer that stands below it.
#[derive(Debug)]
struct Example {
    command: String,
    answer: String,
}

fn examples(text: &str) -> Vec<Example> {
    let mut found: Vec<Example> = Vec::new();
    for block in blocks(text, "console") {
        for line in block.lines() {
            match (line.strip_prefix("$ "), found.last_mut()) {
                (Some(command), _) => {
                    found.push(Example { command: command.to_owned(), answer: String::new() });
                }
                (None, Some(example)) => {
                    example.answer.push_str(line);
                    example.answer.push('\n');
                }
                (None, None) => panic!("an answer without a question: {line}"),
            }
        }
    }
    found
}

/// Everything documented is there, with the same kind of value. A list answers for all by its first item.
fn has_shape(documented: &Value, found: &Value, at: &str) {
    match (documented, found) {
        (Value::Object(wanted), Value::Object(there)) => {
            for (name, value) in wanted {
                let Some(found) = there.get(name) else { panic!("{at}.{name} is documented and not there") };
                has_shape(value, found, &format!("{at}.{name}"));
            }
        }
        (Value::Array(wanted), Value::Array(there)) => {
            if let Some(wanted) = wanted.first() {
                let found =
                    there.first().unwrap_or_else(|| panic!("{at} is documented with items and empty"));
                has_shape(wanted, found, &format!("{at}[0]"));
            }
        }
        (Value::Null, _) | (_, Value::Null) => {} // Either may be unknown at the moment.
        (Value::String(_), Value::String(_))
        | (Value::Number(_), Value::Number(_))
        | (Value::Bool(_), Value::Bool(_)) => {}
        (wanted, found) => panic!("{at} is documented as {wanted} and is {found}"),
    }
}

struct Dev {
    child: Child,
    folder: PathBuf,
    url: String,
    metrics: String,
    admin: String,
}

impl Dev {
    fn start() -> Self {
        let folder = tidemark_testkit::scratch_dir().join(format!("examples-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let ports = [(); 3].map(|()| std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port"));
        let [listen, telemetry, admin] =
            ports.each_ref().map(|port| port.local_addr().expect("its address").to_string());
        drop(ports);
        let log = File::create(folder.join("log")).expect("a log");
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", env!("CARGO_BIN_EXE_tidemark"), "dev", "--listen", &listen])
            .arg("--data-dir")
            .arg(folder.join("data"))
            .env("TIDEMARK__TELEMETRY__LISTEN", &telemetry)
            .env("TIDEMARK__API__ADMIN_LISTEN", &admin)
            .env("TIDEMARK__API__ADMIN_TOKEN", TOKEN)
            .env("TIDEMARK__API__CORS_ORIGINS", ORIGIN)
            .env("TIDEMARK__API__RATE_LIMIT_BURST", "777")
            .env("TIDEMARK__API__OPERATOR_PAGE", "false")
            .current_dir(&folder)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("one file twice"))
            .stderr(log)
            .spawn()
            .expect("setpriv does not start: run `make setup-test`");
        let metrics = format!("http://{telemetry}/metrics");
        let admin = format!("http://{admin}");
        Self { child, folder, url: format!("http://{listen}"), metrics, admin }
    }

    async fn is_ready(&mut self) {
        let http = reqwest::Client::builder().timeout(Duration::from_secs(10)).build().expect("a client");
        let deadline = Instant::now() + PATIENCE;
        loop {
            let get = async |path: &str| {
                let answer = http.get(format!("{}/v1/{path}", self.url)).send().await.ok()?;
                answer.json::<Value>().await.ok()
            };
            let page = get("transfers?limit=60&min_finality=finalized").await.unwrap_or_default();
            let status = get("networks/simnet/status").await.unwrap_or_default();
            let is_past = status["item"]["projected_height"].as_u64() >= Some(PAST);
            if is_past && page["items"].as_array().is_some_and(|items| items.len() >= 60) {
                return;
            }
            let log = || std::fs::read_to_string(self.folder.join("log")).unwrap_or_default();
            assert!(self.child.try_wait().expect("a child of ours").is_none(), "dev ended: {}", log());
            assert!(Instant::now() < deadline, "dev shows no final transfers: {}", log());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        // In order, so that the private Postgres ends too.
        let _ = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status();
        let _ = self.child.wait();
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}

/// The height of the past that the guide asks for.
const PAST: u64 = 300;

#[tokio::test(flavor = "multi_thread")]
async fn every_example_of_the_api_guide_works_as_written() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let guide = examples(&document("docs/guides/api.md"));
    assert!(guide.len() >= 10, "the guide has few examples: {guide:?}");
    let mut dev = Dev::start();
    dev.is_ready().await;
    // One shell for all, as a reader has: later examples use what earlier ones set.
    let mut script = String::new();
    for (at, example) in guide.iter().enumerate() {
        let command = example.command.replace("http://127.0.0.1:8080", &dev.url);
        script.push_str(&format!("{{ {command}\n}} > {at}.out 2> {at}.err; echo $? > {at}.code\n"));
    }
    let ran =
        Command::new("bash").args(["-c", &script]).current_dir(&dev.folder).status().expect("bash runs");
    assert!(ran.success());
    for (at, example) in guide.iter().enumerate() {
        let read = |ending: &str| {
            std::fs::read_to_string(dev.folder.join(format!("{at}.{ending}"))).unwrap_or_default()
        };
        let (out, err, code) = (read("out"), read("err"), read("code"));
        let command = &example.command;
        // curl says 28 when --max-time ended an endless answer.
        let is_endless = command.contains("--max-time");
        assert!(code.trim() == "0" || (is_endless && code.trim() == "28"), "{command}: {code}{err}{out}");
        let wanted = example.answer.trim();
        if wanted.starts_with('{') {
            let documented: Value = serde_json::from_str(wanted)
                .unwrap_or_else(|error| panic!("below `{command}`: {error}: {wanted}"));
            let found: Value =
                serde_json::from_str(&out).unwrap_or_else(|error| panic!("{command}: {error}: {out}"));
            has_shape(&documented, &found, &format!("`{command}`"));
        } else {
            // Lines of text: what stands before the first space of each is there.
            for line in wanted.lines().filter(|line| !line.is_empty()) {
                let start = line.split_whitespace().next().expect("not empty");
                let there = out.lines().any(|line| line.to_lowercase().starts_with(&start.to_lowercase()));
                assert!(there, "{command} does not say {start}: {out}");
            }
            assert!(wanted.is_empty() || !out.is_empty(), "{command} says nothing");
        }
    }
    metrics_are_there(&dev).await;
    configuration_is_obeyed(&dev).await;
}

/// What `[api]` of the configuration says is what the listeners do.
async fn configuration_is_obeyed(dev: &Dev) {
    let http = reqwest::Client::new();
    let facts = || http.get(format!("{}/v1/admin/facts", dev.admin));
    assert_eq!(facts().send().await.expect("answers").status(), 401, "no token");
    assert_eq!(facts().bearer_auth("wrong").send().await.expect("answers").status(), 401, "a wrong token");
    let answer = facts().bearer_auth(TOKEN).send().await.expect("answers");
    assert_eq!(answer.status(), 200);
    let facts: Value = answer.json().await.expect("JSON");
    assert!(facts["app"]["processes"].as_array().is_some_and(|rows| !rows.is_empty()), "{facts}");
    let public = http.get(format!("{}/v1/admin/facts", dev.url)).bearer_auth(TOKEN).send().await;
    assert_eq!(public.expect("answers").status(), 404, "the public listener has no admin routes");
    let asked = http.get(format!("{}/v1/networks", dev.url)).header("origin", ORIGIN);
    let answer = asked.send().await.expect("answers");
    assert_eq!(answer.headers()["access-control-allow-origin"], ORIGIN);
    assert!(answer.headers()["ratelimit-policy"].to_str().is_ok_and(|text| text.contains("q=777;")));
    let home = http.get(&dev.url).send().await.expect("answers").text().await.expect("text");
    assert!(!home.contains("href=\"/operator\""), "the operator page is off");
}

/// S0 §15.3 and the lags of §17.2, after the API was used for a while.
async fn metrics_are_there(dev: &Dev) {
    let deadline = Instant::now() + PATIENCE;
    let wanted = [
        "http_request_duration_seconds_bucket{method=\"GET\",route=\"/v1/networks\",status_code=\"200\",le=",
        "http_requests_total{method=\"GET\",route=\"/v1/blocks/{network}/{block}\",status_code=\"404\"} ",
        "projection_cache_hit_ratio{projection_table=\"asset_cards\"} ",
        "ownership_view_finality_breakdown{finality_status=\"finalized\"} ",
        "stub_served_total{endpoint=\"assets\"} ",
        "ingest_lag_seconds{",
        "state_updater_lag_seconds{network=\"simnet\"} ",
        "projection_lag_seconds{network=\"simnet\"} ",
        "finality_lag_seconds{network=\"simnet\"} ",
    ];
    loop {
        let text = reqwest::get(&dev.metrics).await.expect("metrics").text().await.expect("text");
        let missing: Vec<&str> = wanted.into_iter().filter(|name| !text.contains(name)).collect();
        if missing.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "missing {missing:?} in\n{text}");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

#[test]
fn the_configuration_of_the_readme_is_one() {
    let readme = document("README.md");
    let folder = tidemark_testkit::scratch_dir().join(format!("readme-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let run = |args: &[&str]| {
        let ran = Command::new(env!("CARGO_BIN_EXE_tidemark")).args(args).current_dir(&folder).output();
        let ran = ran.expect("tidemark runs");
        assert!(ran.status.success(), "{args:?}: {}", String::from_utf8_lossy(&ran.stderr));
        ran.stdout
    };
    let [short] = blocks(&readme, "toml").try_into().expect("the README shows one configuration");
    std::fs::write(folder.join("tidemark.toml"), short).expect("writes");
    run(&["config", "check"]);
    // The commands a reader types, in their order; `run` itself and make are whole tests of their own.
    let typed: Vec<String> = examples(&readme).into_iter().map(|example| example.command).collect();
    assert!(typed.iter().any(|line| line.contains("tidemark config example > tidemark.toml")), "{typed:?}");
    assert!(typed.iter().any(|line| line.contains("tidemark config check")), "{typed:?}");
    let written = run(&["config", "example"]);
    std::fs::write(folder.join("example.toml"), &written).expect("writes");
    assert_eq!(String::from_utf8(written).expect("text"), document("tidemark.example.toml"));
    std::fs::remove_dir_all(folder).expect("removes");
}
