//! The sections, key by key: types, ranges, defaults, and what contradicts what.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use tidemark_model::chain::Family;
use tidemark_model::ids::NetworkId;

use super::read::Section;
use super::tree::{self, Node, Origin, Problem};
use super::{
    Api, Bloom, Bus, BusEngine, Config, Database, Executor, Finality, Headers, HotDays, Ingest, LogFormat,
    Mode, NetworkConfig, Objects, ObjectsUrl, Telemetry,
};

/// Families this build can read. An adapter that lands adds its family here.
const FAMILIES: &[(&str, Family)] = &[("evm", Family::Evm)];

/// The tree with types, and all keys that were asked for.
pub(super) fn config(root: Node, problems: &mut Vec<Problem>) -> (Config, Vec<String>) {
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
    let tenant = section.text("tenant").map_or_else(|| "default".to_owned(), |(text, _)| text);
    let large_tenants: Vec<String> =
        section.texts("large_tenants").into_iter().map(|(tenant, _)| tenant).collect();
    let hot_days = HotDays {
        operational: section.number("hot_days_operational", 30, 1..=3_650),
        regulated: section.number("hot_days_regulated", 180, 1..=3_650),
        audit: section.number("hot_days_audit", 180, 1..=3_650),
    };
    keys.extend(section.finish());
    Bus {
        engine,
        nats_url,
        redis_url,
        partitions,
        replicas,
        retention_hours,
        tenant,
        large_tenants,
        hot_days,
    }
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
        if admin_token.is_none() {
            section.problem(at_admin, "admin_listen", "open without a token", "set api.admin_token");
        }
    }
    let operator_page = section.flag("operator_page", true);
    let mut cors_origins = Vec::new();
    for (origin, at) in section.texts("cors_origins") {
        if !is_origin(&origin) {
            section.problem(
                at,
                "cors_origins",
                "not an origin",
                "write scheme, host and port as a browser sends them, for example \"https://app.example\", or \"*\"",
            );
        }
        cors_origins.push(origin);
    }
    let rate_limit_rps = small(section.number("rate_limit_rps", 100, 0..=1_000_000));
    let rate_limit_burst = small(section.number("rate_limit_burst", 200, 1..=1_000_000));
    keys.extend(section.finish());
    Api { listen, admin_listen, admin_token, operator_page, cors_origins, rate_limit_rps, rate_limit_burst }
}

/// `*`, or what a browser sends as Origin: no path, no slash at the end.
fn is_origin(text: &str) -> bool {
    text == "*"
        || url::Url::parse(text).is_ok_and(|url| {
            matches!(url.scheme(), "http" | "https") && url.origin().ascii_serialization() == text
        })
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
    let at_headers = section.origin_of("headers");
    let headers = section.word("headers", Headers::All, &words);
    if headers == Headers::WithRecords && rpc.len() == 1 {
        let fix = "add a second endpoint to rpc, or use \"all\"";
        section.problem(at_headers, "headers", "one endpoint alone could hide whole blocks", fix);
    }
    let at_bloom = section.origin_of("bloom");
    let bloom = section.word("bloom", Bloom::Check, &[("check", Bloom::Check), ("ignore", Bloom::Ignore)]);
    if bloom == Bloom::Ignore && rpc.len() == 1 {
        let fix = "add a second endpoint to rpc, or use \"check\"";
        section.problem(at_bloom, "bloom", "without blooms one endpoint alone could hide logs", fix);
    }
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
        bloom,
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
