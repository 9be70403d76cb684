//! What is asked: every documented route with keys that exist, the explorer's pages, and for each the bare
//! `select` of the row it is about.

use anyhow::Context;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;
use tidemark_store::db::Param;
use uuid::Uuid;

use super::data::{NETWORK, SLUG, Size, account, account_id, asset_id, collection_id, contract};

/// Different requests per route; they are asked in turn.
const VARIETY: usize = 2000;

/// One request.
#[derive(Debug, Clone)]
pub(super) struct Request {
    /// Path and query.
    pub(super) path: String,
    /// JSON, for POST.
    pub(super) body: Option<String>,
}

/// A key of the bare select.
#[derive(Debug, Clone)]
pub(super) enum Key {
    /// By id.
    Uuid(Uuid),
    /// By height.
    Height(i64),
    /// By network.
    Network(i32),
}

impl Key {
    /// As a parameter.
    pub(super) fn as_param(&self) -> Param<'_> {
        match self {
            Self::Uuid(id) => id,
            Self::Height(height) => height,
            Self::Network(id) => id,
        }
    }
}

/// The cheapest question there is about the same row.
#[derive(Debug, Clone)]
pub(super) struct Bare {
    /// One row by its key.
    pub(super) sql: &'static str,
    /// The keys of the requests, in the same order.
    pub(super) keys: Vec<Key>,
}

/// A route, a page.
pub(super) struct Endpoint {
    /// Operation id or path.
    pub(super) name: String,
    /// What is asked.
    pub(super) requests: Vec<Request>,
    /// What it is compared with.
    pub(super) bare: Bare,
}

/// Every documented route but the live stream, which does not end, and the explorer's pages.
pub(super) fn all(size: Size, moved: Vec<Moved>) -> anyhow::Result<Vec<Endpoint>> {
    anyhow::ensure!(!moved.is_empty(), "there are no raw rows");
    let document = tidemark_api::openapi_document("bench");
    let mut dice = Dice { size, moved, rng: StdRng::seed_from_u64(7) };
    let mut endpoints = Vec::new();
    for (path, item) in document["paths"].as_object().context("the document has paths")? {
        for (method, operation) in item.as_object().context("a path has methods")? {
            if path == "/v1/stream" {
                continue;
            }
            let name = operation["operationId"].as_str().unwrap_or(path).to_owned();
            endpoints.push(dice.route(&name, method, path)?);
        }
    }
    for page in [
        "/",
        "/collections/{network}/{address}",
        "/assets/{network}/{contract}/{token_id}",
        "/accounts/{network}/{address}",
        "/transfers",
    ] {
        endpoints.push(dice.route(&format!("page {page}"), "get", page)?);
    }
    Ok(endpoints)
}

/// A transfer whose raw rows exist.
#[derive(Debug, Clone)]
pub(super) struct Moved {
    /// Height of its block.
    pub(super) height: i64,
    /// Its transaction, as the API writes it.
    pub(super) tx_hash: String,
    /// Its event.
    pub(super) event_id: Uuid,
}

struct Dice {
    size: Size,
    moved: Vec<Moved>,
    rng: StdRng,
}

/// What a request is about.
enum Subject {
    Asset(u64),
    Collection(u64),
    Account(u64),
    Block(i64),
    Network,
}

impl Dice {
    fn route(&mut self, name: &str, method: &str, path: &str) -> anyhow::Result<Endpoint> {
        let mut requests = Vec::with_capacity(VARIETY);
        let mut keys = Vec::with_capacity(VARIETY);
        let mut sql = "";
        for _ in 0..VARIETY {
            let (request, subject) = self.request(method, path)?;
            requests.push(request);
            let key;
            (sql, key) = match subject {
                Subject::Asset(n) => (
                    "select * from projection.asset_cards where asset_id = $1",
                    Key::Uuid(asset_id(self.size, n)),
                ),
                Subject::Collection(n) => (
                    "select * from projection.collection_stats where collection_id = $1",
                    Key::Uuid(collection_id(n)),
                ),
                Subject::Account(n) => (
                    "select * from projection.account_summaries where account_id = $1",
                    Key::Uuid(account_id(n)),
                ),
                Subject::Block(height) => (
                    "select * from projection.block_cards where network_id = 31337 and height = $1",
                    Key::Height(height),
                ),
                Subject::Network => {
                    ("select * from projection.network_status where network_id = $1", Key::Network(NETWORK.0))
                }
            };
            keys.push(key);
        }
        Ok(Endpoint { name: name.to_owned(), requests, bare: Bare { sql, keys } })
    }

    fn request(&mut self, method: &str, path: &str) -> anyhow::Result<(Request, Subject)> {
        let (size, last) = (self.size, self.size.blocks() - 1);
        // One account in eight is the one that holds a twentieth of everything.
        let holder = if self.rng.random_ratio(1, 8) { 0 } else { self.rng.random_range(0..size.accounts()) };
        let asset = self.rng.random_range(0..size.assets);
        let historic = asset / 10 * 10;
        let collection = self.rng.random_range(0..size.collections());
        let moved = &self.moved[self.rng.random_range(0..self.moved.len())];
        let mut query = String::new();
        let mut body = None;
        let subject = match path {
            "/v1/assets/batch" => {
                let ids: Vec<Uuid> =
                    (0..20).map(|step| asset_id(size, (asset + step * 37) % size.assets)).collect();
                body = Some(json!({ "ids": ids, "keys": [] }).to_string());
                Subject::Asset(asset)
            }
            _ if path.contains("/history") => {
                query = format!("?as_of={}", self.rng.random_range(last / 2..=last - 100));
                Subject::Asset(historic)
            }
            _ if path.contains("assets/{") => Subject::Asset(asset),
            _ if path.contains("collections/{") => Subject::Collection(collection),
            _ if path.contains("accounts/{") => Subject::Account(holder),
            _ if path.contains("{block}") || path.contains("{hash}") || path.contains("{event_id}") => {
                Subject::Block(moved.height)
            }
            "/v1/search" => {
                query = match self.rng.random_range(0..5) {
                    0 => format!("?q={}", account(holder)),
                    1 => format!("?q={}", &contract(collection)[..10]),
                    2 => format!("?q=Shell%20{asset}"),
                    3 => format!("?q={}", moved.height),
                    _ => format!("?q=Harbour%20{}", collection % 100),
                };
                Subject::Network
            }
            _ => Subject::Network,
        };
        let (id, address, token) = match &subject {
            Subject::Asset(n) => (asset_id(size, *n), contract(size.collection_of(*n)), n.to_string()),
            Subject::Collection(n) => (collection_id(*n), contract(*n), String::new()),
            Subject::Account(n) => (account_id(*n), account(*n), String::new()),
            _ => (Uuid::nil(), String::new(), String::new()),
        };
        let filled = path
            .replace("{network}", SLUG)
            .replace("{id}", &id.to_string())
            .replace("{contract}", &address)
            .replace("{address}", &address)
            .replace("{token_id}", &token)
            .replace("{block}", &moved.height.to_string())
            .replace("{hash}", &moved.tx_hash)
            .replace("{event_id}", &moved.event_id.to_string());
        anyhow::ensure!(!filled.contains('{'), "the benchmark knows no value for {path}");
        anyhow::ensure!(method == "get" || body.is_some(), "the benchmark knows no body for {method} {path}");
        Ok((Request { path: filled + &query, body }, subject))
    }
}
