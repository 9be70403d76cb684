//! The configuration: layers, problems, masking, and the committed example.

use std::path::PathBuf;

use tidemark::config::{
    Bloom, BusEngine, Config, EXAMPLE, Finality, Headers, Origin, Override, Problems, Sources, known_keys,
};

fn sources(file: &str, env: &[(&str, &str)]) -> (tempfile::File, Sources) {
    let file = tempfile::File::new(file);
    let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let sources = Sources { file: Some(file.path.clone()), env, flags: vec![] };
    (file, sources)
}

/// A file that goes away with its test.
mod tempfile {
    use std::path::PathBuf;

    pub(super) struct File {
        pub(super) path: PathBuf,
    }
    impl File {
        pub(super) fn new(text: &str) -> Self {
            let path = std::env::temp_dir().join(format!("tidemark-{}.toml", uuid::Uuid::new_v4()));
            std::fs::write(&path, text).expect("writes");
            Self { path }
        }
    }
    impl Drop for File {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn load(file: &str, env: &[(&str, &str)]) -> Result<Config, Problems> {
    let (_file, sources) = sources(file, env);
    Config::load(&sources)
}

/// `line: key` of every problem.
#[track_caller]
fn problems(file: &str, env: &[(&str, &str)]) -> Vec<String> {
    let error = load(file, env).expect_err("has problems");
    for problem in &error.0 {
        assert!(!problem.fix.is_empty(), "{problem}");
    }
    error
        .0
        .iter()
        .map(|problem| match &problem.origin {
            Origin::File { line, .. } => format!("{line}: {}", problem.key),
            other => format!("{other}: {}", problem.key),
        })
        .collect()
}

#[test]
fn what_one_endpoint_alone_could_hide_needs_a_second_one() {
    assert_eq!(load(NETWORK, &[]).expect("loads").networks[0].headers, Headers::All);
    let doubtful = "headers = \"with_records\"\nbloom = \"ignore\"\n";
    assert_eq!(
        problems(&format!("{NETWORK}{doubtful}"), &[]),
        ["5: network[0].headers", "6: network[0].bloom"]
    );
    let two = NETWORK.replace("[\"http", "[\"http://127.0.0.1:8544\", \"http");
    let config = load(&format!("{two}{doubtful}"), &[]).expect("loads");
    assert_eq!((config.networks[0].headers, config.networks[0].bloom), (Headers::WithRecords, Bloom::Ignore));
}

const NETWORK: &str = "[[network]]\nid = 1\nslug = \"ethereum\"\nrpc = [\"http://127.0.0.1:8545\"]\n";

#[test]
fn the_shape_of_the_issue_is_accepted() {
    let config = load(
        r#"
        [database]
        url = "postgres://me:secret@db/tidemark"
        [bus]
        engine = "postgres"
        [objects]
        url = "file:./data/objects"
        [api]
        listen = "127.0.0.1:8080"
        [[network]]
        id = 1
        slug = "ethereum"
        family = "evm"
        rpc = ["http://127.0.0.1:8545"]
        start_block = 0
        finality = { depth = 64 }
        mode = "logs"
        contracts = []
        "#,
        &[],
    )
    .expect("no problem");
    assert_eq!(config.database.raw_url, config.database.app_url);
    assert_eq!(config.networks[0].finality, Finality::Depth(64));
    assert_eq!(config.objects.url.expose(), "file:./data/objects");
    assert_eq!(config.ingest.poll_interval_ms, 300);
    assert_eq!(config.network("ethereum").map(|network| network.id.0), Some(1));
}

#[test]
fn unknown_keys_name_their_line_and_the_key_that_was_meant() {
    let file = "[api]\nlisen = \"127.0.0.1:1\"\n[ingst]\nx = 1\n";
    assert_eq!(problems(file, &[]), ["2: api.lisen", "3: ingst"]);
    let text = load(file, &[]).expect_err("has problems").to_string();
    assert!(text.contains("did you mean listen?"), "{text}");
    assert!(text.contains("did you mean ingest?"), "{text}");
}

#[test]
fn all_problems_are_listed_at_once() {
    let file = "\
[database]
url = \"mysql://x\"
raw_url = \"postgres://a/b\"
[bus]
engine = \"nats\"
replicas = 9
[api]
listen = \"8080\"
admin_listen = \"0.0.0.0:9\"
[ingest]
getlogs_step_min = 30000
poll_interval_ms = \"fast\"
[[network]]
slug = \"Ether eum\"
[[network]]
id = 1
slug = \"a\"
rpc = [\"http://x\", \"ftp://x\"]
finality = \"soon\"
[[network]]
id = 1
slug = \"b\"
rpc = [\"http://x\"]
";
    assert_eq!(
        problems(file, &[]),
        [
            "2: database.url",
            "3: database.raw_url",
            "5: bus.engine",
            "6: bus.replicas",
            "8: api.listen",
            "9: api.admin_listen",
            "12: ingest.poll_interval_ms",
            "11: ingest.getlogs_step_min",
            "13: network[0].id",
            "14: network[0].slug",
            "13: network[0].rpc",
            "18: network[1].rpc",
            "19: network[1].finality",
            "20: network[2]",
        ]
    );
}

#[test]
fn broken_toml_names_its_line() {
    assert_eq!(problems("[api]\nlisten = \n", &[]), ["2: "]);
}

#[test]
fn a_missing_file_is_a_problem_only_when_it_was_named() {
    let sources = Sources { file: Some(PathBuf::from("/nowhere/tidemark.toml")), ..Sources::default() };
    let error = Config::load(&sources).expect_err("not there").to_string();
    assert!(error.contains("config example"), "{error}");
}

#[test]
fn environment_wins_over_the_file_and_flags_over_both() {
    let file = format!(
        "[ingest]\npoll_interval_ms = 1000\nmax_reorg_depth = 5\n[api]\nlisten = \"127.0.0.1:1\"\n{NETWORK}"
    );
    let env = [
        ("POLL_INTERVAL_MS", "250"),
        ("TIDEMARK__API__LISTEN", "127.0.0.1:2"),
        ("TIDEMARK__NETWORK__0__RPC", "http://a:1,http://b:2"),
        ("TIDEMARK__NETWORK__0__FINALITY", "{ depth = 7 }"),
        ("RPC_TIMEOUTS", "eth_getLogs=20000,eth_call=5000"),
        ("RPC_RPS_MAX", "25"),
        ("EXECUTOR_ENABLED", "true"),
        ("ADDR_SHARDS", "4"),
        ("PAYLOAD_INLINE_MAX_BYTES", "1024"),
        ("GETLOGS_STEP_INIT", "100"),
        ("GETLOGS_STEP_MIN", "10"),
        ("GETLOGS_STEP_MAX", "1000"),
        ("DB_RAW_URL", "postgres://raw/x"),
        ("DB_APP_URL", "postgres://app/x"),
        ("UNRELATED", "x"),
    ];
    let (_file, mut sources) = sources(&file, &env);
    sources.flags.push(Override { path: &["api", "listen"], value: "127.0.0.1:3".into(), flag: "--listen" });
    let config = Config::load(&sources).expect("no problem");
    assert_eq!(config.ingest.poll_interval_ms, 250);
    assert_eq!(config.ingest.max_reorg_depth, 5);
    assert_eq!(config.api.listen.port(), 3);
    assert_eq!(config.networks[0].rpc.len(), 2);
    assert_eq!(config.networks[0].finality, Finality::Depth(7));
    assert_eq!(config.ingest.rpc_timeout("eth_call").as_millis(), 5000);
    assert_eq!(config.ingest.rpc_timeout("eth_blockNumber").as_millis(), 10_000);
    assert_eq!(config.ingest.rpc_rps_max, Some(25));
    assert!(config.executor.enabled);
    assert_eq!(config.ingest.addr_shards, 4);
    assert_eq!(config.ingest.getlogs_step_init, 100);
    assert_ne!(config.database.raw_url, config.database.app_url);
}

/// Every variable that the documentation names, under its own name.
#[test]
fn every_documented_variable_works() {
    type Read = fn(&Config) -> String;
    let table: &[(&str, &str, Read)] = &[
        ("PAYLOAD_INLINE_MAX_BYTES", "1024", |config| config.ingest.payload_inline_max_bytes.to_string()),
        ("MAX_REORG_DEPTH", "77", |config| config.ingest.max_reorg_depth.to_string()),
        ("POLL_INTERVAL_MS", "250", |config| config.ingest.poll_interval_ms.to_string()),
        ("GETLOGS_STEP_INIT", "1999", |config| config.ingest.getlogs_step_init.to_string()),
        ("GETLOGS_STEP_MIN", "499", |config| config.ingest.getlogs_step_min.to_string()),
        ("GETLOGS_STEP_MAX", "19999", |config| config.ingest.getlogs_step_max.to_string()),
        ("RPC_TIMEOUTS", "eth_call=5000", |config| {
            format!("eth_call={}", config.ingest.rpc_timeout("eth_call").as_millis())
        }),
        ("RPC_RPS_MAX", "25", |config| config.ingest.rpc_rps_max.unwrap_or(0).to_string()),
        ("EXECUTOR_ENABLED", "true", |config| config.executor.enabled.to_string()),
        ("ADDR_SHARDS", "4", |config| config.ingest.addr_shards.to_string()),
        ("TIDEMARK__DATABASE__URL", "postgres://one/x", |config| {
            config.database.app_url.as_ref().map(|url| url.expose().to_string()).unwrap_or_default()
        }),
    ];
    for (name, value, read) in table {
        let config = load(NETWORK, &[(name, value)]).unwrap_or_else(|problem| panic!("{name}: {problem}"));
        assert_eq!(read(&config), *value, "{name}");
        let wrong = load(NETWORK, &[(name, "not at all")]).err().map(|problem| problem.to_string());
        assert!(wrong.is_some_and(|said| said.contains(name)), "{name} takes anything");
    }
    let both = [("DB_RAW_URL", "postgres://raw/x"), ("DB_APP_URL", "postgres://app/x")];
    let config = load(NETWORK, &both).expect("no problem");
    let host = |url: &Option<tidemark_model::redact::RedactedUrl>| url.as_ref().map(ToString::to_string);
    assert_eq!(host(&config.database.raw_url).as_deref(), Some("postgres://raw/…"));
    assert_eq!(host(&config.database.app_url).as_deref(), Some("postgres://app/…"));
}

#[test]
fn a_database_of_a_later_layer_is_no_contradiction() {
    let config = load("[database]\nurl = \"postgres://file/x\"\n", &[("DB_RAW_URL", "postgres://raw/x")])
        .expect("fine");
    let host = |url: &Option<tidemark_model::redact::RedactedUrl>| url.as_ref().map(ToString::to_string);
    assert_eq!(host(&config.database.raw_url).as_deref(), Some("postgres://raw/…"));
    assert_eq!(host(&config.database.app_url).as_deref(), Some("postgres://file/…"));
    let file = "[database]\nraw_url = \"postgres://r/x\"\napp_url = \"postgres://a/x\"\n";
    let config = load(file, &[("TIDEMARK__DATABASE__URL", "postgres://env/x")]).expect("fine");
    assert_eq!(host(&config.database.raw_url).as_deref(), Some("postgres://env/…"));
    assert_eq!(problems("[database]\nraw_url = \"postgres://r/x\"\n", &[]), ["2: database.raw_url"]);
}

#[test]
fn an_unknown_variable_of_ours_is_a_problem() {
    assert_eq!(
        problems("", &[("TIDEMARK__API__LISEN", "x")]),
        ["environment TIDEMARK__API__LISEN: api.lisen"]
    );
    assert_eq!(problems("", &[("TIDEMARK__NETWORK__3__RPC", "x")]).len(), 1);
}

#[test]
fn no_secret_is_shown() {
    let file = "\
[database]
url = \"postgres://me:CANARY@db:5432/x?password=CANARY\"
[bus]
engine = \"nats\"
nats_url = \"nats://u:CANARY@n:4222\"
redis_url = \"redis://:CANARY@r:6379\"
[objects]
url = \"s3://key:CANARY@bucket/prefix?secret=CANARY\"
[api]
admin_listen = \"0.0.0.0:9\"
admin_token = \"CANARY\"
[[network]]
id = 1
slug = \"ethereum\"
rpc = [\"https://eth.example.com/v2/CANARY\", \"https://x.example/?key=CANARY\"]
ws = [\"wss://eth.example.com/ws/CANARY\"]
";
    let config = load(file, &[]).expect("no problem");
    assert_eq!(config.bus.engine, BusEngine::Nats);
    for shown in [config.show(), format!("{config:?}"), format!("{config:#?}")] {
        assert!(!shown.contains("CANARY"), "{shown}");
    }
    assert!(config.show().contains("https://eth.example.com/…"));
    // Problems do not repeat values either: what is wrong may be a secret in the wrong place.
    let bad = file
        .replace("postgres://", "CANARY://")
        .replace("wss://", "CANARY-x:")
        .replace("0.0.0.0:9", "CANARY");
    let error = load(&bad, &[]).expect_err("has problems").to_string();
    assert!(!error.contains("CANARY"), "{error}");
}

#[test]
fn what_is_shown_names_every_section() {
    let shown = load(NETWORK, &[]).expect("fine").show();
    for section in ["database", "bus", "objects", "api", "telemetry", "ingest", "executor"] {
        assert!(shown.contains(&format!("[{section}]")), "{section} is missing:\n{shown}");
    }
    assert!(shown.contains("[[network]]"), "{shown}");
}

/// The example with every commented key switched on.
fn example_in_full() -> String {
    let is_key = |line: &str| {
        let name: String = line.chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect();
        !name.is_empty() && line[name.len()..].starts_with(" = ")
    };
    EXAMPLE
        .lines()
        .map(|line| match line.strip_prefix("# ") {
            Some(key) if is_key(key) => format!("{key}\n"),
            _ => format!("{line}\n"),
        })
        .collect()
}

#[test]
fn the_example_works_as_it_is_and_shows_the_defaults() {
    let example = load(EXAMPLE, &[]).expect("the example has no problem");
    let written_out: String = example_in_full()
        .lines()
        // These have no default to show.
        .filter(|line| {
            let free =
                ["url", "raw_url", "app_url", "embedded_port", "nats_url", "redis_url", "admin_listen"];
            let more = ["admin_token", "rpc_rps_max", "rpc_rps_by_method", "ws"];
            let is = |key: &&str| line.starts_with(&format!("{key} ="));
            !(free.iter().any(is) || more.iter().any(is)) || line.contains("objects")
        })
        .map(|line| format!("{line}\n"))
        .collect();
    let written_out = load(&written_out, &[]).expect("its defaults have no problem");
    assert_eq!(written_out.show(), example.show());
}

#[test]
fn the_example_shows_every_key() {
    let text = example_in_full();
    for key in known_keys() {
        let name = key.rsplit('.').next().expect("has a part");
        assert!(
            text.lines().any(|line| line.starts_with(&format!("{name} = "))),
            "{key} is not in tidemark.example.toml"
        );
    }
}
