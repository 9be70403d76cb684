//! Configuration: defaults < `tidemark.toml` < environment < flags. Refuses what it does not know, lists
//! every problem at once with key, place and fix, and prints itself without secrets.

mod read;
mod tree;
mod typed;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Serialize, Serializer};
use tidemark_model::chain::{Family, Network};
use tidemark_model::ids::{Height, NetworkId};
use tidemark_model::redact::RedactedUrl;

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
    /// Whose events this installation emits.
    pub tenant: String,
    /// Tenants with a partition of their own in every stream.
    pub large_tenants: Vec<String>,
    /// Days the outbox keeps events of each class.
    pub hot_days: HotDays,
}

/// How long the outbox keeps events, by class (S2 §2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct HotDays {
    /// Operational events.
    pub operational: u64,
    /// Regulated events.
    pub regulated: u64,
    /// Audit events.
    pub audit: u64,
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
    /// Is the operator page part of the explorer?
    pub operator_page: bool,
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

/// Are the blooms of headers checked?
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bloom {
    /// Yes: what they promise must come.
    Check,
    /// No: the chain does not fill them; a second endpoint confirms every range instead.
    Ignore,
}

/// Which headers of history are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Headers {
    /// Every block's.
    All,
    /// Only of blocks that hold records of ours, where two endpoints agree about a range.
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
    /// Blooms of headers.
    pub bloom: Bloom,
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

impl Config {
    /// Reads all layers. On failure: every problem found, not the first.
    pub fn load(sources: &Sources) -> Result<Self, Problems> {
        let mut problems = vec![];
        let root = layers(sources, &mut problems);
        let (config, _) = typed::config(root, &mut problems);
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
    let (_, keys) = typed::config(one_network, &mut problems);
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
