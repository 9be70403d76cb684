//! The explorer: server-rendered pages, complete without script, live with it. Pages ask the same reader as
//! /v1, so they never say something the API does not.

mod art;
mod docs;
mod files;
mod operator;
mod view;

use std::collections::BTreeSet;
use std::sync::Arc;

use askama::Template;
use axum::Router;
use axum::extract::{FromRequestParts, Path, Query, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use serde::Deserialize;
use tidemark_model::ids::{CollectionId, NetworkId};
use tidemark_store::reads::{self, TransferScope};
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use crate::dto::{Block, Collection, Found, Holder, Owner, Transaction};
use crate::params::{PageParams, ReadParams, TransferParams};
use crate::problem::Problem;
use crate::reader::{AssetRef, CollectionRef, Reader, Sort};
use crate::routes::chain::{find_block, find_transaction};
use crate::routes::search::{Taste, find};
use crate::state::ApiState;
use view::{AssetView, Feed, NetworkView, Shell, ago, group, short};

/// Rows of a page's list: a screen or two, and well under the page's weight.
const ROWS: u32 = 25;

/// All pages.
pub(crate) fn routes(state: &ApiState, document: Arc<serde_json::Value>) -> Router<ApiState> {
    let router = Router::new()
        .route("/", get(home))
        .route("/collections", get(collections))
        .route("/collections/{network}/{address}", get(collection))
        .route("/assets/{network}/{contract}/{token_id}", get(asset))
        .route("/accounts/{network}/{address}", get(account))
        .route("/transfers", get(transfers))
        .route("/blocks/{network}/{block}", get(block))
        .route("/tx/{network}/{hash}", get(transaction))
        .route("/search", get(search))
        .route("/docs", get(move |State(state): State<ApiState>| docs::page(state, document)))
        .route("/static/{name}", get(files::file));
    if state.config().operator_page { router.route("/operator", get(operator::page)) } else { router }
}

/// Unknown paths: a problem under /v1, a page elsewhere.
pub(crate) async fn not_found(request: Request) -> Response {
    let path = request.uri().path();
    if path.starts_with("/v1") || path.ends_with(".json") {
        return crate::unknown_route().into_response();
    }
    not_found_page().await
}

pub(crate) async fn not_found_page() -> Response {
    Oops(Problem::new(
        StatusCode::NOT_FOUND,
        "unknown_route",
        "There is no page at this address.",
        "Search for an address, a hash, a height, a token id or a name.",
    ))
    .into_response()
}

/// A problem shown as a page.
pub(crate) struct Oops(Problem);
impl<E: Into<Problem>> From<E> for Oops {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

#[derive(Template)]
#[template(path = "problem.html", whitespace = "minimize")]
struct ProblemPage {
    shell: Shell,
    problem: Problem,
    said: String,
    pending: bool,
}

/// What programs read as a clause, people read as a sentence.
fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    let first: String = letters.next().into_iter().flat_map(char::to_uppercase).collect();
    let rest = letters.as_str();
    let end = if text.ends_with(['.', '!', '?']) { "" } else { "." };
    format!("{first}{rest}{end}")
}

impl IntoResponse for Oops {
    fn into_response(self) -> Response {
        let problem = self.0;
        let (status, pending, retry_after) = (problem.status, problem.pending, problem.retry_after);
        let title = if pending { "Not here yet".to_owned() } else { problem.title.to_owned() };
        let said = sentence(&problem.detail);
        let page = ProblemPage { shell: Shell::bare(&title), problem, said, pending };
        let mut response = (status, html(&page)).into_response();
        if pending {
            response.headers_mut().insert("x-data-status", HeaderValue::from_static("pending"));
        }
        if let Some(seconds) = retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// Renders; a template that cannot be rendered is our mistake, not a panic.
pub(crate) fn html(page: &impl Template) -> Response {
    match page.render() {
        Ok(text) => {
            ([(header::CONTENT_TYPE, "text/html; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")], text)
                .into_response()
        }
        Err(error) => {
            tracing::error!(action = "render", error = %error, "A page could not be rendered.");
            Problem::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "internal",
                "this page could not be made",
                "It is our fault and it is in our log.",
            )
            .into_response()
        }
    }
}

/// `?cursor=` and `?network=`; anything else in a page's address is ignored.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct PageQuery {
    cursor: Option<String>,
    network: Option<String>,
    q: Option<String>,
}

/// Query of a page: what cannot be read is as if it were not there.
pub(crate) struct Asked(PageQuery);
impl<S: Send + Sync> FromRequestParts<S> for Asked {
    type Rejection = std::convert::Infallible;
    async fn from_request_parts(
        parts: &mut axum::http::request::Parts,
        state: &S,
    ) -> Result<Self, Self::Rejection> {
        let query = Query::<PageQuery>::from_request_parts(parts, state).await;
        Ok(Self(query.map(|query| query.0).unwrap_or_default()))
    }
}

impl PageQuery {
    fn page(&self) -> PageParams {
        PageParams { limit: Some(ROWS), cursor: self.cursor.clone() }
    }
    fn network(&self) -> Option<&str> {
        self.network.as_deref().filter(|text| !text.is_empty())
    }
}

/// Pages show what a reorg took back, struck through.
fn with_reverted() -> TransferParams {
    TransferParams { kind: None, include_reverted: Some(true) }
}

#[derive(Template)]
#[template(path = "home.html", whitespace = "minimize")]
struct HomePage {
    shell: Shell,
    networks: Vec<NetworkView>,
    feed: Feed,
}

async fn home(State(state): State<ApiState>) -> Result<Response, Oops> {
    let reader = Reader::open(&state).await?;
    let since = OffsetDateTime::now_utc() - Duration::minutes(15);
    let mut networks = Vec::new();
    for network in reader.networks.iter() {
        let activity = reads::activity(&reader.conn, network.network_id, since).await?;
        networks.push(NetworkView::new(network, &activity));
    }
    let page = PageParams { limit: Some(20), cursor: None };
    let newest = reader.transfers_everywhere(&ReadParams::default(), &with_reverted(), &page).await?;
    let mut feed = Feed::new(newest, &reader.networks, "/transfers");
    feed.live = Some(String::new());
    feed.older = feed.older.map(|_| "/transfers".to_owned());
    Ok(html(&HomePage { shell: Shell::new(&reader, "Tidemark", ""), networks, feed }))
}

#[derive(Template)]
#[template(path = "transfers.html", whitespace = "minimize")]
struct TransfersPage {
    shell: Shell,
    feed: Feed,
    network: Option<String>,
    networks: Vec<String>,
}

async fn transfers(State(state): State<ApiState>, Asked(query): Asked) -> Result<Response, Oops> {
    let reader = Reader::open(&state).await?;
    let page = query.page();
    let network = query.network().map(|text| reader.network(text)).transpose()?.cloned();
    let (answer, base, live) = match &network {
        Some(network) => {
            let scope = TransferScope::Network;
            let answer =
                reader.transfers_of(network, scope, &ReadParams::default(), &with_reverted(), &page).await?;
            let slug = &network.slug;
            (answer, format!("/transfers?network={slug}"), format!("network={slug}"))
        }
        None => {
            let answer = reader.transfers_everywhere(&ReadParams::default(), &with_reverted(), &page).await?;
            (answer, "/transfers".to_owned(), String::new())
        }
    };
    let mut feed = Feed::new(answer, &reader.networks, &base);
    feed.live = query.cursor.is_none().then_some(live);
    let networks = reader.networks.iter().map(|network| network.slug.clone()).collect();
    let network = network.map(|network| network.slug);
    Ok(html(&TransfersPage { shell: Shell::new(&reader, "Transfers", ""), feed, network, networks }))
}

#[derive(Template)]
#[template(path = "collections.html", whitespace = "minimize")]
struct CollectionsPage {
    shell: Shell,
    items: Vec<Collection>,
    older: Option<String>,
    network: Option<String>,
    networks: Vec<String>,
}

async fn collections(State(state): State<ApiState>, Asked(query): Asked) -> Result<Response, Oops> {
    let reader = Reader::open(&state).await?;
    let network = query.network().map(|text| reader.network(text)).transpose()?.cloned();
    let answer =
        reader.collections(network.as_ref(), Sort::Rank, &ReadParams::default(), &query.page()).await?;
    let network = network.map(|network| network.slug);
    let base =
        network.as_ref().map_or("/collections?".to_owned(), |slug| format!("/collections?network={slug}&"));
    let older = answer.next.map(|cursor| format!("{base}cursor={cursor}"));
    let networks = reader.networks.iter().map(|network| network.slug.clone()).collect();
    let shell = Shell::new(&reader, "Collections", "");
    Ok(html(&CollectionsPage { shell, items: answer.items, older, network, networks }))
}

#[derive(Template)]
#[template(path = "collection.html", whitespace = "minimize")]
struct CollectionPage {
    shell: Shell,
    item: Collection,
    picture: String,
    stub_count: i64,
    assets: Vec<AssetView>,
    more_assets: Option<String>,
    holders: Vec<Holder>,
    more_holders: bool,
    feed: Feed,
}

async fn collection(
    State(state): State<ApiState>,
    Path((network, address)): Path<(String, String)>,
    Asked(query): Asked,
) -> Result<Response, Oops> {
    let params = ReadParams::default();
    let (reader, network, row) =
        Reader::collection(&state, CollectionRef::Natural(network, address), &params).await?;
    let id = row.collection_id;
    // One cursor per page: a cursor of assets is refused as a cursor of transfers, and then begins anew.
    let some = PageParams { limit: Some(24), cursor: query.cursor.clone() };
    let first = PageParams { limit: Some(24), cursor: None };
    let assets = match reader.assets_of(&network, id, &params, &some).await {
        Ok(assets) => assets,
        Err(problem) if problem.code == "invalid_cursor" => {
            reader.assets_of(&network, id, &params, &first).await?
        }
        Err(problem) => return Err(problem.into()),
    };
    let ten = PageParams { limit: Some(10), cursor: None };
    let holders = reader.holders_of(&network, id, Sort::Rank, &params, &ten).await?;
    let scope = || TransferScope::Collection(id);
    let transfers =
        match reader.transfers_of(&network, scope(), &params, &with_reverted(), &query.page()).await {
            Ok(transfers) => transfers,
            Err(problem) if problem.code == "invalid_cursor" => {
                let page = PageParams { limit: Some(ROWS), cursor: None };
                reader.transfers_of(&network, scope(), &params, &with_reverted(), &page).await?
            }
            Err(problem) => return Err(problem.into()),
        };
    let item = Collection::new(&row, &network.slug);
    let base = format!("/collections/{}/{}", network.slug, item.address);
    let mut feed = Feed::new(transfers, std::slice::from_ref(&network), &base);
    feed.live =
        query.cursor.is_none().then(|| format!("network={}&collection={}", network.slug, item.address));
    let name = item.name.clone().unwrap_or_else(|| short(&item.address));
    let api = format!("/v1/collections/{}/{}", network.slug, item.address);
    Ok(html(&CollectionPage {
        shell: Shell::new(&reader, &name, &api),
        picture: art::shore(&item.address, false),
        stub_count: row.stub_count,
        assets: assets.items.into_iter().map(|asset| AssetView::new(asset, None)).collect(),
        more_assets: assets.next.map(|cursor| format!("{base}?cursor={cursor}#assets")),
        more_holders: holders.next.is_some(),
        holders: holders.items,
        item,
        feed,
    }))
}

#[derive(Template)]
#[template(path = "asset.html", whitespace = "minimize")]
struct AssetPage {
    shell: Shell,
    asset: AssetView,
    title: String,
    owners: Vec<Owner>,
    more_owners: bool,
    since: Option<String>,
    single: bool,
    badge: view::Badge,
    line: Option<view::Rule>,
    feed: Feed,
}

async fn asset(
    State(state): State<ApiState>,
    Path((network, contract, token_id)): Path<(String, String, String)>,
    Asked(query): Asked,
) -> Result<Response, Oops> {
    let params = ReadParams::default();
    let (reader, network, item) =
        Reader::asset(&state, AssetRef::Natural(network, contract, token_id), &params).await?;
    let page = PageParams { limit: Some(20), cursor: None };
    let (scope, reverted, rows) = (TransferScope::Asset(item.id), with_reverted(), query.page());
    let (owners, transfers) = tokio::try_join!(
        reader.owners_of(&network, item.id, &params, &page),
        reader.transfers_of(&network, scope, &params, &reverted, &rows),
    )?;
    let single = item.standard == "erc721";
    let since = transfers
        .items
        .iter()
        .find(|transfer| transfer.finality_status != "reverted")
        .filter(|_| single && query.cursor.is_none())
        .map(|transfer| ago(transfer.event_time));
    let badge = view::Badge::of_height(&network, item.last_height);
    let contract = item.contract.clone().unwrap_or_default();
    let base = format!("/assets/{}/{contract}/{}", network.slug, item.token_id);
    let mut feed = Feed::new(transfers, std::slice::from_ref(&network), &base);
    feed.live = query.cursor.is_none().then(|| format!("network={}&collection={contract}", network.slug));
    feed.same_asset = true;
    let of = item.collection_name.clone().unwrap_or_else(|| short(&contract));
    let title = item.name.clone().unwrap_or_else(|| format!("{of} #{}", view::short_token(&item.token_id)));
    Ok(html(&AssetPage {
        shell: Shell::new(&reader, &title, &format!("/v1{base}")),
        asset: AssetView::new(item, None),
        title,
        more_owners: owners.next.is_some(),
        owners: owners.items,
        since,
        single,
        badge,
        line: view::Rule::of(&network),
        feed,
    }))
}

#[derive(Template)]
#[template(path = "account.html", whitespace = "minimize")]
struct AccountPage {
    shell: Shell,
    network: String,
    address: String,
    picture: String,
    summary: Option<reads::AccountRow>,
    collection: Option<String>,
    groups: Vec<(Collection, i64, String, Vec<AssetView>)>,
    shown: usize,
    more_assets: Option<String>,
    feed: Feed,
}

impl AccountPage {
    fn seen(&self, at: &OffsetDateTime) -> String {
        ago(*at)
    }
}

async fn account(
    State(state): State<ApiState>,
    Path((network, address)): Path<(String, String)>,
    Asked(query): Asked,
) -> Result<Response, Oops> {
    let params = ReadParams::default();
    let (reader, network) = Reader::at(&state, &network, &params).await?;
    let (id, address) = reader.account_id(&network, &address)?;
    let page = |cursor: Option<String>| PageParams { limit: Some(24), cursor };
    let holdings = async {
        match reader.holdings_of(&network, id, None, &params, &page(query.cursor.clone())).await {
            Ok(holdings) => Ok((holdings, query.cursor.is_some())),
            Err(problem) if problem.code == "invalid_cursor" => {
                Ok((reader.holdings_of(&network, id, None, &params, &page(None)).await?, false))
            }
            Err(problem) => Err(problem),
        }
    };
    // A cursor is of the one list or of the other; without one both begin at the top.
    let (reverted, top) = (with_reverted(), PageParams { limit: Some(ROWS), cursor: None });
    let newest = reader.transfers_of(&network, TransferScope::Account(id), &params, &reverted, &top);
    let as_contract = [CollectionId::of(NetworkId(network.network_id), &address).0];
    // Sent together: the connection answers them one after another, without a round trip between.
    let (summary, (holdings, in_assets), newest, collection) = tokio::try_join!(
        async { Ok(reads::accounts(&reader.conn, &[id]).await?.pop()) },
        holdings,
        newest,
        async { Ok(reads::collections(&reader.conn, &as_contract).await?.pop()) },
    )?;
    if summary.is_none() {
        reader.account_is_known(&network, id).await?;
    }
    let transfers = match query.cursor.clone().filter(|_| !in_assets) {
        None => newest,
        Some(cursor) => {
            let rows = PageParams { limit: Some(ROWS), cursor: Some(cursor) };
            reader.transfers_of(&network, TransferScope::Account(id), &params, &reverted, &rows).await?
        }
    };
    let held: BTreeSet<Uuid> = holdings.items.iter().map(|holding| holding.asset.collection_id).collect();
    let held: Vec<Uuid> = held.into_iter().collect();
    let shown = holdings.items.len();
    let mut groups: Vec<(Collection, i64, String, Vec<AssetView>)> =
        reads::held_of_collections(&reader.conn, id, &held)
            .await?
            .into_iter()
            .map(|(row, assets, qty)| (Collection::new(&row, &network.slug), assets, qty, Vec::new()))
            .collect();
    for holding in holdings.items {
        if let Some(group) = groups.iter_mut().find(|group| group.0.id == holding.asset.collection_id) {
            let (qty, status) = (holding.qty, holding.finality_status);
            group.3.push(AssetView::new(holding.asset, Some((qty, status))));
        }
    }
    groups.sort_by_key(|group| std::cmp::Reverse(group.1));
    let base = format!("/accounts/{}/{address}", network.slug);
    let mut feed = Feed::new(transfers, std::slice::from_ref(&network), &base);
    feed.live = query.cursor.is_none().then(|| format!("network={}&account={address}", network.slug));
    Ok(html(&AccountPage {
        shell: Shell::new(&reader, &short(&address), &format!("/v1{base}")),
        picture: art::shore(&address, true),
        collection: collection.map(|_| format!("/collections/{}/{address}", network.slug)),
        more_assets: holdings.next.map(|cursor| format!("{base}?cursor={cursor}")),
        network: network.slug,
        address,
        summary,
        groups,
        shown,
        feed,
    }))
}

#[derive(Template)]
#[template(path = "block.html", whitespace = "minimize")]
struct BlockPage {
    shell: Shell,
    block: Block,
    age: String,
    badge: view::Badge,
    newest: i64,
    feed: Feed,
}

async fn block(
    State(state): State<ApiState>,
    Path((network, block)): Path<(String, String)>,
    Asked(query): Asked,
) -> Result<Response, Oops> {
    let params = ReadParams::default();
    let (reader, network) = Reader::at(&state, &network, &params).await?;
    let row = find_block(&reader, &network, &block).await?;
    let scope = TransferScope::Block(row.height);
    let transfers = reader.transfers_of(&network, scope, &params, &with_reverted(), &query.page()).await?;
    let base = format!("/blocks/{}/{}", network.slug, row.height);
    let feed = Feed::new(transfers, std::slice::from_ref(&network), &base).without_rules();
    Ok(html(&BlockPage {
        shell: Shell::new(&reader, &format!("Block {}", group(row.height)), &format!("/v1{base}")),
        age: ago(row.block_time),
        badge: view::Badge::of_height(&network, row.height),
        newest: network.projected_height.unwrap_or(0),
        block: Block::new(&row, &network),
        feed,
    }))
}

#[derive(Template)]
#[template(path = "transaction.html", whitespace = "minimize")]
struct TransactionPage {
    shell: Shell,
    item: Transaction,
    age: String,
    badge: view::Badge,
    feed: Feed,
}

async fn transaction(
    State(state): State<ApiState>,
    Path((network, hash)): Path<(String, String)>,
) -> Result<Response, Oops> {
    let params = ReadParams::default();
    let (reader, network) = Reader::at(&state, &network, &params).await?;
    let networks = Arc::clone(&reader.networks);
    let mut item = find_transaction(&state, reader, &network, &hash).await?;
    let transfers = crate::answer::Page {
        items: std::mem::take(&mut item.transfers),
        next: None,
        meta: crate::answer::Meta::of(&network),
    };
    let api = format!("/v1/transactions/{}/{}", network.slug, item.hash);
    let feed = Feed::new(transfers, std::slice::from_ref(&network), "").without_rules();
    Ok(html(&TransactionPage {
        shell: Shell::of(
            &networks,
            state.config().operator_page,
            &format!("Transaction {}", short(&item.hash)),
            &api,
        ),
        age: ago(item.block_time),
        badge: view::Badge::of_height(&network, item.height),
        item,
        feed,
    }))
}

#[derive(Template)]
#[template(path = "search.html", whitespace = "minimize")]
struct SearchPage {
    shell: Shell,
    query: String,
    found: Vec<(Found, String)>,
}

async fn search(State(state): State<ApiState>, Asked(query): Asked) -> Result<Response, Oops> {
    let reader = Reader::open(&state).await?;
    let text = query.q.unwrap_or_default();
    let (reader, mut found) = find(&state, reader, &text, &Taste::default()).await?;
    // Whole addresses, hashes and ids mean one thing: go there.
    let exact = text.trim().len() >= 36 && found.len() == 1;
    if exact && let Some(only) = found.pop() {
        return Ok(Redirect::to(&only.page).into_response());
    }
    found.truncate(50);
    let found = found
        .into_iter()
        .map(|item| {
            let picture = art::shore(&item.page, item.kind == "account");
            (item, picture)
        })
        .collect();
    let query: String = text.chars().take(200).collect();
    let mut shell = Shell::new(&reader, "Search", "");
    shell.query = query.clone();
    Ok(html(&SearchPage { shell, query, found }))
}
