//! Configuration: defaults < `tidemark.toml` < environment < flags. Refuses what it does not know, lists
//! every problem at once with key, place and fix, and prints itself without secrets.

mod read;
mod tree;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Serialize, Serializer};
use tidemark_model::chain::{Family, Network};
use tidemark_model::ids::{Height, NetworkId};
use tidemark_model::redact::RedactedUrl;

use read::Section;
pub use tree::{Node, Origin, Problem};

/// The commented example, as `config example` prints it and as it is committed.
pub const EXAMPLE: &str = include_str!("../../../tidemark.example.toml");

/// The file read when no `--config` is given and it exists.
pub const DEFAULT_FILE: &str = "tidemark.toml";

/// A text that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps it.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
    /// The text itself, for the comparison or connection and nothing else.
    pub fn expose(&self) -> &str {
        &self.0
    }
}
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(hidden)")
    }
}
impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str("(hidden)")
    }
}

/// Everything a process needs to know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Config {
    /// Where facts are kept.
    pub database: Database,
    /// How events travel.
    pub bus: Bus,
    /// Where large payloads are kept.
    pub objects: Objects,
    /// What the public sees.
    pub api: Api,
    /// What operators see.
    pub telemetry: Telemetry,
    /// How chains are read.
    pub ingest: Ingest,
    /// Writes to chains.
    pub executor: Executor,
    /// The chains.
    #[serde(rename = "network")]
    pub networks: Vec<NetworkConfig>,
}

/// `[database]`
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Database {
    /// Raw side; `None` means the embedded server.
    pub raw_url: Option<RedactedUrl>,
    /// Ledger and projection side; `None` means the embedded server.
    pub app_url: Option<RedactedUrl>,
    /// The embedded server's files, objects and locks.
    pub data_dir: PathBuf,
    /// A loopback port for the embedded server beside its socket.
    pub embedded_port: Option<u16>,
    /// Connections per pool.
    pub connections_max: usize,
}

/// Which engine carries events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BusEngine {
    /// The outbox's own database.
    Postgres,
    /// NATS JetStream.
    Nats,
    /// Redis Streams.
    Redis,
}

/// `[bus]`
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Bus {
    /// The engine.
    pub engine: BusEngine,
    /// Where NATS is.
    pub nats_url: Option<RedactedUrl>,
    /// Where Redis is.
    pub redis_url: Option<RedactedUrl>,
    /// Partitions of a new stream.
    pub partitions: u16,
    /// Copies a NATS cluster keeps.
    pub replicas: u16,
    /// How long engines keep events; the outbox keeps what a declared consumer still needs.
    pub retention_hours: u64,
}

/// Where payloads go: `file:DIR`, `s3://bucket/prefix` or `memory:`.
#[derive(Clone, PartialEq, Eq)]
pub struct ObjectsUrl(String);

impl ObjectsUrl {
    /// The text as written, for opening the store.
    pub fn expose(&self) -> &str {
        &self.0
    }
}
impl fmt::Display for ObjectsUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match RedactedUrl::parse(&self.0) {
            Ok(url) if self.0.starts_with("s3:") => url.fmt(f),
            _ => f.write_str(&self.0),
        }
    }
}
impl fmt::Debug for ObjectsUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
impl Serialize for ObjectsUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// `[objects]`
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Objects {
    /// Where.
    pub url: ObjectsUrl,
}

/// `[api]`
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Api {
    /// Public listener.
    pub listen: SocketAddr,
    /// Operator listener; off when absent.
    pub admin_listen: Option<SocketAddr>,
    /// Bearer token of the operator listener.
    pub admin_token: Option<Secret>,
    /// Origins that browsers may call from; `*` for all.
    pub cors_origins: Vec<String>,
    /// Requests per second and client; 0 switches the limit off.
    pub rate_limit_rps: u32,
    /// Requests a client may make at once.
    pub rate_limit_burst: u32,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Human on a terminal, JSON elsewhere.
    Auto,
    /// One JSON object per line (S0 §15.4).
    Json,
    /// For people.
    Human,
}

/// `[telemetry]`
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Telemetry {
    /// `/healthz`, `/readyz`, `/metrics`; off when absent.
    pub listen: Option<SocketAddr>,
    /// Form of log lines.
    pub log_format: LogFormat,
    /// Which lines, in the syntax of `RUST_LOG`.
    pub log_filter: String,
}

/// `[ingest]`
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ingest {
    /// Pause between looks at the head, jittered by a sixth.
    pub poll_interval_ms: u64,
    /// First width of a log query, in blocks.
    pub getlogs_step_init: u64,
    /// Soft floor of that width; only range errors go below it.
    pub getlogs_step_min: u64,
    /// Widest log query.
    pub getlogs_step_max: u64,
    /// Timeout per JSON-RPC method; `default` for the others.
    pub rpc_timeouts_ms: BTreeMap<String, u64>,
    /// Calls per second and endpoint; absent: no limit of ours.
    pub rpc_rps_max: Option<u64>,
    /// Calls per second and endpoint, by method.
    pub rpc_rps_by_method: BTreeMap<String, u64>,
    /// Shards of the contract list of one network.
    pub addr_shards: u16,
    /// Larger payloads go to object storage.
    pub payload_inline_max_bytes: usize,
    /// Deepest reorg repaired without an operator.
    pub max_reorg_depth: u64,
    /// History ranges read at once per network.
    pub history_ranges_in_flight: usize,
    /// Blocks of one leased history range.
    pub lease_range: u64,
}

impl Ingest {
    /// The timeout of one method.
    pub fn rpc_timeout(&self, method: &str) -> Duration {
        let named = self.rpc_timeouts_ms.get(method).or_else(|| self.rpc_timeouts_ms.get("default"));
        Duration::from_millis(named.copied().unwrap_or(10_000))
    }
}

/// `[executor]`
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Executor {
    /// May it send transactions?
    pub enabled: bool,
}

/// How a network says what is final.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finality {
    /// The node's own `finalized` tag.
    Tag,
    /// So many blocks below the head.
    Depth(u64),
}

/// How much of a network is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Logs and the headers they need.
    Logs,
    /// Transactions and receipts too.
    Full,
}

/// Which headers of history are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Headers {
    /// Every block's.
    All,
    /// Only of blocks that hold records of ours.
    WithRecords,
}

/// `[[network]]`
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NetworkConfig {
    /// Its id; the chain id on EVM.
    pub id: NetworkId,
    /// Its short name.
    pub slug: String,
    /// Its family.
    pub family: Family,
    /// HTTP endpoints.
    pub rpc: Vec<RedactedUrl>,
    /// WebSocket endpoints, for new heads.
    pub ws: Vec<RedactedUrl>,
    /// First height read.
    pub start_block: u64,
    /// How finality is known.
    pub finality: Finality,
    /// How much is kept.
    pub mode: Mode,
    /// Contracts; empty: all.
    pub contracts: Vec<String>,
    /// Blocks above an event before it is confirmed.
    pub confirmations: u64,
    /// Headers of history.
    pub headers: Headers,
}

impl NetworkConfig {
    /// As the workers see it.
    pub fn network(&self, ingest: &Ingest) -> Network {
        Network {
            id: self.id,
            slug: self.slug.clone(),
            family: self.family,
            start_block: Height(self.start_block),
            confirmations: self.confirmations,
            reorg_depth_max: ingest.max_reorg_depth,
        }
    }
}

/// A value given on the command line.
#[derive(Debug, Clone)]
pub struct Override {
    /// `["api", "listen"]`
    pub path: &'static [&'static str],
    /// As typed.
    pub value: String,
    /// `--listen`
    pub flag: &'static str,
}

/// What a configuration is made of.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    /// The file; `None` reads [`DEFAULT_FILE`] where it exists.
    pub file: Option<PathBuf>,
    /// Environment variables, all of them: others are passed over.
    pub env: Vec<(String, String)>,
    /// Flags.
    pub flags: Vec<Override>,
}

impl Sources {
    /// The process's environment and this file.
    pub fn here(file: Option<&Path>) -> Self {
        let env = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect();
        Self { file: file.map(Path::to_path_buf), env, flags: vec![] }
    }
}

/// All problems of a configuration, at once.
#[derive(Debug, thiserror::Error)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.0.len();
        let noun = if count == 1 { "problem" } else { "problems" };
        write!(f, "the configuration has {count} {noun}:")?;
        for problem in &self.0 {
            write!(f, "\n  {problem}")?;
        }
        Ok(())
    }
}

/// The seeds' own variable names (S1, S3) and where they go.
const SEED_NAMES: &[(&str, &[&str])] = &[
    ("DB_RAW_URL", &["database", "raw_url"]),
    ("DB_APP_URL", &["database", "app_url"]),
    ("PAYLOAD_INLINE_MAX_BYTES", &["ingest", "payload_inline_max_bytes"]),
    ("MAX_REORG_DEPTH", &["ingest", "max_reorg_depth"]),
    ("POLL_INTERVAL_MS", &["ingest", "poll_interval_ms"]),
    ("GETLOGS_STEP_INIT", &["ingest", "getlogs_step_init"]),
    ("GETLOGS_STEP_MIN", &["ingest", "getlogs_step_min"]),
    ("GETLOGS_STEP_MAX", &["ingest", "getlogs_step_max"]),
    ("RPC_TIMEOUTS", &["ingest", "rpc_timeouts_ms"]),
    ("RPC_RPS_MAX", &["ingest", "rpc_rps_max"]),
    ("EXECUTOR_ENABLED", &["executor", "enabled"]),
    ("ADDR_SHARDS", &["ingest", "addr_shards"]),
];

/// `TIDEMARK__SECTION__KEY`
const ENV_PREFIX: &str = "TIDEMARK__";

/// Families this build can read. An adapter that lands adds its family here.
const FAMILIES: &[(&str, Family)] = &[("evm", Family::Evm)];

impl Config {
    /// Reads all layers. On failure: every problem found, not the first.
    pub fn load(sources: &Sources) -> Result<Self, Problems> {
        let mut problems = vec![];
        let root = layers(sources, &mut problems);
        let (config, _) = typed(root, &mut problems);
        if problems.is_empty() { Ok(config) } else { Err(Problems(problems)) }
    }

    /// Nothing but defaults: the embedded server, no network.
    pub fn defaults() -> Self {
        Self::load(&Sources { file: Some(PathBuf::new()), ..Sources::default() })
            .expect("the defaults agree with each other")
    }

    /// The effective configuration as TOML, secrets masked.
    pub fn show(&self) -> String {
        toml::to_string_pretty(self).expect("every field has a TOML form")
    }

    /// The network with this slug or id.
    pub fn network(&self, name: &str) -> Option<&NetworkConfig> {
        self.networks.iter().find(|network| network.slug == name || network.id.0.to_string() == name)
    }
}

/// Every dotted key there is, for the test that the example shows all of them.
pub fn known_keys() -> Vec<String> {
    let mut problems = vec![];
    let one_network = tree::parse("keys", "[[network]]").unwrap_or_else(|_| Node::empty());
    let (_, keys) = typed(one_network, &mut problems);
    keys
}

/// File, environment and flags as one tree.
fn layers(sources: &Sources, problems: &mut Vec<Problem>) -> Node {
    let mut root = file_layer(sources.file.as_deref(), problems);
    let mut env = sources.env.clone();
    env.sort();
    // The general names first, so that the seeds' own, more specific names win over them.
    for (name, value) in &env {
        if let Some(path) = name.strip_prefix(ENV_PREFIX) {
            let path: Vec<String> = path.split("__").map(str::to_lowercase).collect();
            put(&mut root, &path, value, &Origin::Env(name.clone()), problems);
        }
    }
    for (name, value) in &env {
        if let Some((_, path)) = SEED_NAMES.iter().find(|(seed, _)| seed == name) {
            let mut path: Vec<String> = path.iter().map(|part| (*part).to_owned()).collect();
            if name == "RPC_RPS_MAX" && value.contains('=') {
                path[1] = "rpc_rps_by_method".into();
            }
            put(&mut root, &path, value, &Origin::Env(name.clone()), problems);
        }
    }
    for flag in &sources.flags {
        let path: Vec<String> = flag.path.iter().map(|part| (*part).to_owned()).collect();
        put(&mut root, &path, &flag.value, &Origin::Flag(flag.flag), problems);
    }
    root
}

fn file_layer(file: Option<&Path>, problems: &mut Vec<Problem>) -> Node {
    let (path, asked_for) = match file {
        Some(path) if path.as_os_str().is_empty() => return Node::empty(),
        Some(path) => (path, true),
        None => (Path::new(DEFAULT_FILE), false),
    };
    let name = path.display().to_string();
    let unreadable = |error: std::io::Error| Problem {
        origin: Origin::File { name: name.clone(), line: 1 },
        key: String::new(),
        what: format!("cannot be read: {error}"),
        fix: "name an existing file with --config; `tidemark config example > tidemark.toml` makes one"
            .into(),
    };
    let parsed = match std::fs::read_to_string(path) {
        Ok(text) => tree::parse(&name, &text),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !asked_for => return Node::empty(),
        Err(error) => Err(unreadable(error)),
    };
    parsed.unwrap_or_else(|problem| {
        problems.push(problem);
        Node::empty()
    })
}

fn put(root: &mut Node, path: &[String], value: &str, origin: &Origin, problems: &mut Vec<Problem>) {
    if let Err(what) = tree::set(root, path, tree::parse_loose(value, origin)) {
        problems.push(Problem {
            origin: origin.clone(),
            key: path.join("."),
            what,
            fix: "name a key of `tidemark config example`".into(),
        });
    }
}

/// The tree with types, and all keys that were asked for.
fn typed(root: Node, problems: &mut Vec<Problem>) -> (Config, Vec<String>) {
    let mut keys = vec![];
    let mut top = Section::new("", root, problems);
    let database = database(top.table("database"), &mut keys);
    let objects = objects(top.table("objects"), &database, &mut keys);
    let bus = bus(top.table("bus"), &mut keys);
    let api = api(top.table("api"), &mut keys);
    let telemetry = telemetry(top.table("telemetry"), &api, &mut keys);
    let ingest = ingest(top.table("ingest"), &mut keys);
    let executor = executor(top.table("executor"), &mut keys);
    let networks = networks(&mut top, &mut keys);
    top.finish();
    (Config { database, bus, objects, api, telemetry, ingest, executor, networks }, keys)
}

/// A later layer wins.
fn rank(origin: &Origin) -> u8 {
    match origin {
        Origin::Default => 0,
        Origin::File { .. } => 1,
        Origin::Env(_) => 2,
        Origin::Flag(_) => 3,
    }
}

const POSTGRES: &[&str] = &["postgres", "postgresql"];

fn database(mut section: Section<'_>, keys: &mut Vec<String>) -> Database {
    let written = |section: &Section<'_>, key| section.has(key).then(|| section.origin_of(key));
    let (at_url, at_raw, at_app) =
        (written(&section, "url"), written(&section, "raw_url"), written(&section, "app_url"));
    let url = section.url("url", POSTGRES);
    let mut side = |key: &'static str, at: Option<&Origin>| {
        let own = section.url(key, POSTGRES);
        match (&at_url, at) {
            (Some(general), Some(own_at)) if rank(general) == rank(own_at) => {
                let what = format!("contradicts database.url ({general})");
                let fix = "keep url for one database, or raw_url and app_url for two";
                section.problem(own_at.clone(), key, what, fix);
                own
            }
            (Some(general), Some(own_at)) if rank(general) > rank(own_at) => url.clone(),
            (_, Some(_)) => own,
            (_, None) => url.clone(),
        }
    };
    let raw_url = side("raw_url", at_raw.as_ref());
    let app_url = side("app_url", at_app.as_ref());
    if at_url.is_none() {
        match (&at_raw, &at_app) {
            (Some(at), None) => section.problem(
                at.clone(),
                "raw_url",
                "there is no app_url",
                "set database.app_url too, or use database.url for one database",
            ),
            (None, Some(at)) => section.problem(
                at.clone(),
                "app_url",
                "there is no raw_url",
                "set database.raw_url too, or use database.url for one database",
            ),
            _ => {}
        }
    }
    let data_dir =
        section.text("data_dir").map_or_else(|| PathBuf::from("./.tidemark"), |(text, _)| text.into());
    let embedded_port =
        section.number_opt("embedded_port", 1..=65_535).and_then(|port| u16::try_from(port).ok());
    let connections_max = small(section.number("connections_max", 16, 2..=1000));
    keys.extend(section.finish());
    Database { raw_url, app_url, data_dir, embedded_port, connections_max }
}

/// A number whose range was checked to fit.
fn small<T: TryFrom<u64>>(number: u64) -> T {
    T::try_from(number).ok().expect("the range of this key fits its type")
}

fn objects(mut section: Section<'_>, database: &Database, keys: &mut Vec<String>) -> Objects {
    let beside_the_database = || format!("file:{}", database.data_dir.join("objects").display());
    let url = match section.text("url") {
        None => beside_the_database(),
        Some((text, origin)) => {
            let known = ["file:", "s3://", "memory:"].iter().any(|scheme| text.starts_with(scheme));
            if !known || text == "file:" {
                section.problem(
                    origin,
                    "url",
                    "not a place for objects",
                    "use file:DIR, s3://bucket/prefix or memory:",
                );
            }
            text
        }
    };
    keys.extend(section.finish());
    Objects { url: ObjectsUrl(url) }
}

fn bus(mut section: Section<'_>, keys: &mut Vec<String>) -> Bus {
    let words = [("postgres", BusEngine::Postgres), ("nats", BusEngine::Nats), ("redis", BusEngine::Redis)];
    let at = section.origin_of("engine");
    let engine = section.word("engine", BusEngine::Postgres, &words);
    let (has_nats, has_redis) = (section.has("nats_url"), section.has("redis_url"));
    let nats_url = section.url("nats_url", &["nats", "tls", "ws", "wss"]);
    let redis_url = section.url("redis_url", &["redis", "rediss", "unix"]);
    if engine == BusEngine::Nats && !has_nats {
        section.problem(
            at.clone(),
            "engine",
            "nats needs to know where NATS is",
            "set bus.nats_url, for example nats://127.0.0.1:4222",
        );
    }
    if engine == BusEngine::Redis && !has_redis {
        section.problem(
            at,
            "engine",
            "redis needs to know where Redis is",
            "set bus.redis_url, for example redis://127.0.0.1:6379",
        );
    }
    let at_replicas = section.origin_of("replicas");
    let replicas = small(section.number("replicas", 1, 1..=5));
    if replicas > 1 && engine != BusEngine::Nats {
        section.problem(
            at_replicas,
            "replicas",
            "only NATS keeps several copies",
            "set bus.engine = \"nats\", or replicas = 1",
        );
    }
    let partitions = small(section.number("partitions", 12, 1..=1024));
    let retention_hours = section.number("retention_hours", 168, 1..=87_600);
    keys.extend(section.finish());
    Bus { engine, nats_url, redis_url, partitions, replicas, retention_hours }
}

fn api(mut section: Section<'_>, keys: &mut Vec<String>) -> Api {
    let listen = section.address("listen").unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 8080)));
    let at_admin = section.origin_of("admin_listen");
    let admin_listen = section.address("admin_listen");
    let admin_token = section.secret("admin_token");
    if let Some(admin) = admin_listen {
        if admin == listen && admin.port() != 0 {
            section.problem(
                at_admin.clone(),
                "admin_listen",
                "the same address as api.listen",
                "choose another port",
            );
        }
        if !admin.ip().is_loopback() && admin_token.is_none() {
            section.problem(
                at_admin,
                "admin_listen",
                "open to the network without a token",
                "set api.admin_token, or listen on 127.0.0.1",
            );
        }
    }
    let cors_origins = section.texts("cors_origins").into_iter().map(|(origin, _)| origin).collect();
    let rate_limit_rps = small(section.number("rate_limit_rps", 100, 0..=1_000_000));
    let rate_limit_burst = small(section.number("rate_limit_burst", 200, 1..=1_000_000));
    keys.extend(section.finish());
    Api { listen, admin_listen, admin_token, cors_origins, rate_limit_rps, rate_limit_burst }
}

fn telemetry(mut section: Section<'_>, api: &Api, keys: &mut Vec<String>) -> Telemetry {
    let at = section.origin_of("listen");
    let listen = match section.take("listen") {
        None => Some(SocketAddr::from(([127, 0, 0, 1], 9464))),
        Some(node) => match listen_or_off(&node) {
            Ok(listen) => listen,
            Err(()) => {
                section.problem(
                    at.clone(),
                    "listen",
                    "not an address to listen on",
                    "write an IP address and a port such as 127.0.0.1:9464, or \"off\"",
                );
                None
            }
        },
    };
    if listen.is_some_and(|listen| listen == api.listen && listen.port() != 0) {
        section.problem(at, "listen", "the same address as api.listen", "choose another port");
    }
    let words = [("auto", LogFormat::Auto), ("json", LogFormat::Json), ("human", LogFormat::Human)];
    let log_format = section.word("log_format", LogFormat::Auto, &words);
    let log_filter = match section.text("log_filter") {
        // The driver logs every notice of the server.
        None => "info,tokio_postgres=warn".to_owned(),
        Some((text, origin)) => {
            if tracing_subscriber::EnvFilter::try_new(&text).is_err() {
                section.problem(
                    origin,
                    "log_filter",
                    "not a log filter",
                    "write for example info or info,tidemark_rpc=debug",
                );
            }
            text
        }
    };
    keys.extend(section.finish());
    Telemetry { listen, log_format, log_filter }
}

fn listen_or_off(node: &Node) -> Result<Option<SocketAddr>, ()> {
    match &node.value {
        tree::Value::Text(text) if text == "off" => Ok(None),
        tree::Value::Text(text) => text.parse().map(Some).map_err(|_| ()),
        _ => Err(()),
    }
}

fn ingest(mut section: Section<'_>, keys: &mut Vec<String>) -> Ingest {
    let poll_interval_ms = section.number("poll_interval_ms", 300, 10..=600_000);
    let at_init = section.origin_of("getlogs_step_init");
    let at_min = section.origin_of("getlogs_step_min");
    let getlogs_step_min = section.number("getlogs_step_min", 500, 1..=1_000_000);
    let getlogs_step_max = section.number("getlogs_step_max", 20_000, 1..=10_000_000);
    // A default that contradicts what was written gives way to it.
    let default_init = 2_000.clamp(getlogs_step_min.min(getlogs_step_max), getlogs_step_max);
    let getlogs_step_init = section.number("getlogs_step_init", default_init, 1..=10_000_000);
    if getlogs_step_min > getlogs_step_max {
        section.problem(
            at_min,
            "getlogs_step_min",
            format!("{getlogs_step_min} is above getlogs_step_max {getlogs_step_max}"),
            "make getlogs_step_min <= getlogs_step_init <= getlogs_step_max",
        );
    } else if !(getlogs_step_min..=getlogs_step_max).contains(&getlogs_step_init) {
        section.problem(at_init, "getlogs_step_init", format!("{getlogs_step_init} is not between getlogs_step_min {getlogs_step_min} and getlogs_step_max {getlogs_step_max}"), "make getlogs_step_min <= getlogs_step_init <= getlogs_step_max");
    }
    let mut rpc_timeouts_ms =
        BTreeMap::from([("default".to_owned(), 10_000), ("eth_getLogs".to_owned(), 30_000)]);
    rpc_timeouts_ms.extend(section.numbers("rpc_timeouts_ms"));
    let found = Ingest {
        poll_interval_ms,
        getlogs_step_init,
        getlogs_step_min,
        getlogs_step_max,
        rpc_timeouts_ms,
        rpc_rps_max: section.number_opt("rpc_rps_max", 1..=1_000_000),
        rpc_rps_by_method: section.numbers("rpc_rps_by_method"),
        addr_shards: small(section.number("addr_shards", 1, 1..=1024)),
        payload_inline_max_bytes: small(section.number("payload_inline_max_bytes", 8192, 0..=1_048_576)),
        max_reorg_depth: section.number("max_reorg_depth", 1000, 1..=1_000_000),
        history_ranges_in_flight: small(section.number("history_ranges_in_flight", 4, 1..=64)),
        lease_range: section.number("lease_range", 50_000, 1..=10_000_000),
    };
    keys.extend(section.finish());
    found
}

fn executor(mut section: Section<'_>, keys: &mut Vec<String>) -> Executor {
    let enabled = section.flag("enabled", false);
    keys.extend(section.finish());
    Executor { enabled }
}

fn networks(top: &mut Section<'_>, keys: &mut Vec<String>) -> Vec<NetworkConfig> {
    let Some(node) = top.take("network") else { return vec![] };
    let items = match node.value {
        tree::Value::List(items) => items,
        other => {
            let what = format!("this is {}, not a list of networks", other.kind());
            top.problem(node.origin, "network", what, "write [[network]] with two brackets");
            return vec![];
        }
    };
    let mut found: Vec<(NetworkConfig, Origin)> = vec![];
    for (index, item) in items.into_iter().enumerate() {
        let mut section = Section::new(&format!("network[{index}]"), item, top.problems());
        let origin = section.origin();
        let network = network(&mut section);
        let known = section.finish();
        if index == 0 {
            keys.extend(known.iter().map(|key| key.replace("network[0]", "network")));
        }
        if let Some(network) = network {
            for (other, at) in &found {
                if other.id == network.id || other.slug == network.slug {
                    let what = format!("id or slug is taken by the network at {at}");
                    top.problem(
                        origin.clone(),
                        &format!("network[{index}]"),
                        what,
                        "give every network its own id and slug",
                    );
                }
            }
            found.push((network, origin));
        }
    }
    found.into_iter().map(|(network, _)| network).collect()
}

const HTTP: &[&str] = &["http", "https"];
const WEBSOCKET: &[&str] = &["ws", "wss"];

fn network(section: &mut Section<'_>) -> Option<NetworkConfig> {
    let origin = section.origin();
    let has_id = section.has("id");
    let id = section.number_opt("id", 1..=2_147_483_647);
    if !has_id {
        section.problem(origin.clone(), "id", "missing", "set id; on EVM it is the chain id, such as 1");
    }
    let slug = section.text("slug");
    match &slug {
        None => section.problem(origin.clone(), "slug", "missing", "set a short name such as \"ethereum\""),
        Some((text, at)) if !is_slug(text) => {
            section.problem(at.clone(), "slug", "not a short name", "use a-z, 0-9 and -, at most 32")
        }
        Some(_) => {}
    }
    let family = section.word("family", Family::Evm, FAMILIES);
    let at_rpc = section.origin_of("rpc");
    let rpc = section.urls("rpc", HTTP);
    if rpc.is_empty() {
        section.problem(at_rpc, "rpc", "no endpoint", "set rpc = [\"http://127.0.0.1:8545\"]");
    }
    let ws = section.urls("ws", WEBSOCKET);
    let start_block = section.number("start_block", 0, 0..=u64::from(u32::MAX) * 1000);
    let finality = finality(section);
    let mode = section.word("mode", Mode::Logs, &[("logs", Mode::Logs), ("full", Mode::Full)]);
    let contracts = section.texts("contracts").into_iter().map(|(text, _)| text).collect();
    let confirmations = section.number("confirmations", 12, 1..=100_000);
    let words = [("all", Headers::All), ("with_records", Headers::WithRecords)];
    let headers = section.word("headers", Headers::WithRecords, &words);
    let id = NetworkId(i32::try_from(id?).ok()?);
    let (slug, _) = slug?;
    Some(NetworkConfig {
        id,
        slug,
        family,
        rpc,
        ws,
        start_block,
        finality,
        mode,
        contracts,
        confirmations,
        headers,
    })
}

fn is_slug(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 32
        && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}

/// `"tag"` or `{ depth = 64 }`
fn finality(section: &mut Section<'_>) -> Finality {
    let Some(node) = section.take("finality") else { return Finality::Tag };
    let depth = match &node.value {
        tree::Value::Text(text) if text == "tag" => return Finality::Tag,
        tree::Value::Table(entries) if entries.len() == 1 => entries.get("depth").map(|depth| &depth.value),
        _ => None,
    };
    match depth {
        Some(tree::Value::Int(depth)) if (1..=1_000_000).contains(depth) => {
            Finality::Depth(depth.unsigned_abs())
        }
        _ => {
            section.problem(
                node.origin,
                "finality",
                "not a rule of finality",
                "use \"tag\" or { depth = 64 }",
            );
            Finality::Tag
        }
    }
}
