//! The API against its own document: OpenAPI 3.1 as the standard's schema says, and requests made up from it by
//! schemathesis against the running product. Every answer must be one that the document declares, with the
//! declared content type and shape, and none may be a 5xx.

mod live;

use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;
use tidemark_sim::{FaultProfile, Sim, SimConfig};
use tidemark_testkit::tools;
use time::OffsetDateTime;

use live::Live;

const CHAIN_ID: u64 = 31_337;
const BLOCKS: u64 = 90;
/// The same requests in every run.
const SEED: &str = "6";

/// Phases, and requests made up per route. `make test` takes about a minute; `make e2e` also walks every boundary
/// of every parameter (TIDEMARK_SCHEMATHESIS=full).
fn extent() -> (&'static str, &'static str) {
    match std::env::var("TIDEMARK_SCHEMATHESIS").is_ok_and(|text| text == "full") {
        true => ("examples,coverage,fuzzing", "30"),
        false => ("examples,fuzzing", "15"),
    }
}

/// A program of the project's Python tools. They may be missing where no package registry can be reached:
/// setup says so, and so does this.
fn python_tool(name: &str) -> Option<PathBuf> {
    let program = tools::folder().join("py/bin").join(name);
    if program.is_file() {
        return Some(program);
    }
    let text = format!("NOT TESTED: {} is not installed; `make setup-test` installs it", program.display());
    eprintln!("{text}");
    None
}

#[test]
fn the_document_is_openapi_3_1() {
    let Some(python) = python_tool("python") else { return };
    let folder = tidemark_testkit::scratch_dir().with_file_name("e2e");
    std::fs::create_dir_all(&folder).expect("a folder");
    let path = folder.join("openapi.json");
    let document = tidemark_api::openapi_document("0.0.0");
    assert!(document["openapi"].as_str().is_some_and(|version| version.starts_with("3.1")), "{document}");
    std::fs::write(&path, document.to_string()).expect("writes the document");
    let ran =
        Command::new(python).args(["-m", "openapi_spec_validator"]).arg(&path).output().expect("python runs");
    let said = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
    if said.contains("No module named") {
        eprintln!("NOT TESTED: {said}");
        return;
    }
    assert!(ran.status.success(), "{said}");
}

fn chain() -> Sim {
    let span = i64::try_from(BLOCKS * 2).expect("small");
    let sim = Sim::new(SimConfig {
        chain_id: CHAIN_ID,
        genesis_time: OffsetDateTime::now_utc().unix_timestamp() - span,
        block_time_secs: 2,
        events_per_block: 6,
        steady: true,
        ..SimConfig::small(23)
    });
    sim.mine(BLOCKS);
    sim
}

/// Keys that exist, so that most requests get past the first lookup; the rest stays made up.
async fn known_keys(live: &Live) -> String {
    let page = live.get("/v1/transfers?limit=100&kind=transfer").await.expect("transfers");
    let text = |item: &Value, field: &str| item[field].as_str().expect("a text").to_owned();
    let all = |field: &str| -> Vec<String> {
        let items = page["items"].as_array().expect("items");
        let mut values: Vec<String> = items.iter().map(|item| text(item, field)).collect();
        values.sort();
        values.dedup();
        values.truncate(5);
        values
    };
    let ids: Vec<String> = all("asset_id").into_iter().chain(all("collection_id")).collect();
    let heights: Vec<String> = ["0", "1", "57", "90", "99999999"].map(str::to_owned).to_vec();
    let block = live.get(&format!("/v1/blocks/{}/57", live.slug)).await.expect("a block");
    let blocks = vec!["57".to_owned(), text(&block["item"], "hash")];
    let addresses: Vec<String> = all("contract").into_iter().chain(all("to")).collect();
    let as_of = vec!["20".to_owned(), text(&block["item"], "block_time"), "2999-01-01T00:00:00Z".to_owned()];
    let mut toml = String::new();
    let mut bind = String::from("[parameters]\n");
    for (name, values, at) in [
        ("network", vec![live.slug.to_owned(), CHAIN_ID.to_string()], &["path.network", "query.network"][..]),
        ("id", ids, &["path.id"]),
        ("address", addresses, &["path.address", "path.contract", "query.q"]),
        ("token", all("token_id"), &["path.token_id"]),
        ("block", blocks, &["path.block"]),
        ("hash", all("tx_hash"), &["path.hash"]),
        ("event", all("event_id"), &["path.event_id"]),
        ("as_of", as_of, &["query.as_of"]),
        ("height", heights, &["query.min_height"]),
    ] {
        toml.push_str(&format!("[dictionaries.{name}]\nvalues = {values:?}\n"));
        for parameter in at {
            bind.push_str(&format!("\"{parameter}\" = {{ dictionary = \"{name}\", probability = 0.8 }}\n"));
        }
    }
    toml + &bind
}

#[tokio::test(flavor = "multi_thread")]
async fn made_up_requests_get_declared_answers_and_no_5xx() {
    let Some(schemathesis) = python_tool("schemathesis") else { return };
    let sim = chain();
    let node = sim.serve("127.0.0.1:0".parse().expect("an address"), FaultProfile::default()).await;
    let node = node.expect("listens");
    let mut live = Live::start("simnet", CHAIN_ID, &node.url).await;
    let head = sim.block(sim.head()).expect("mined");
    live.reads_up_to(sim.head(), &head.hash.to_string()).await;
    let config = live.folder.join("schemathesis.toml");
    std::fs::write(&config, known_keys(&live).await).expect("writes the configuration");
    let (phases, examples) = extent();
    let report = tidemark_testkit::scratch_dir().with_file_name("e2e").join("schemathesis.txt");
    std::fs::create_dir_all(report.parent().expect("a folder")).expect("a folder");
    let child = tokio::process::Command::new(schemathesis)
        .arg("--config-file")
        .arg(&config)
        .arg("run")
        .arg(format!("{}/openapi.json", live.url))
        .args(["--phases", phases, "--workers", "1", "--seed", SEED])
        .args(["--max-examples", examples, "--request-timeout", "30", "--continue-on-failure", "--no-shrink"])
        // A random cursor fits its schema and is refused: acceptance is not promised.
        .args(["--exclude-checks", "positive_data_acceptance", "--warnings", "off", "--no-color"])
        .args(["--exclude-path", "/v1/stream"]) // It does not end; stream tests look at it.
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(&live.folder)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .expect("schemathesis runs");
    let said = String::from_utf8_lossy(&child.stdout).into_owned() + &String::from_utf8_lossy(&child.stderr);
    std::fs::write(&report, &said).expect("keeps the report");
    let tail: String = said.chars().skip(said.chars().count().saturating_sub(20_000)).collect();
    assert!(child.status.success(), "{tail}");
    let (code, log) = live.stop();
    assert_eq!(code, Some(0), "{log}");
}
