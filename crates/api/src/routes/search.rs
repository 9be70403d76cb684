//! One field for everything: addresses, hashes, heights, token ids, names, ids. Every step is an index probe;
//! what the text cannot be is not looked for.

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use tidemark_model::ids::{AccountId, AssetId, CollectionId, NetworkId};
use tidemark_store::reads;
use utoipa::IntoParams;
use uuid::Uuid;

use crate::answer::{Meta, Page, cut};
use crate::cursor;
use crate::dto::{Asset, Block, Collection, Found, hex0x};
use crate::params::{MinFinality, PageParams, Q, ReadParams, canonical_address, canonical_token_id};
use crate::problem::Problem;
use crate::reader::{Reader, is_sure_enough};
use crate::state::ApiState;

/// What to look for.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct SearchParams {
    /// An address, a hash, a height, a token id, an id, or the beginning of a name or an address.
    #[param(max_length = 200)]
    q: Option<String>,
    /// Network id or short name; all networks without it.
    network: Option<String>,
}

/// What may be in the answer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Taste {
    /// Only of this network.
    network: Option<i32>,
    finality: MinFinality,
    require_metadata: bool,
}

const QUERY_CHARS_MAX: usize = 200;
/// A bare number is tried as a token id of this many most active collections.
const TOKEN_COLLECTIONS: i64 = 40;

/// Search
///
/// Best first: exact matches, then beginnings of names and addresses; at most a hundred or so in all.
#[utoipa::path(get, path = "/v1/search", tag = "search", params(SearchParams, ReadParams, PageParams),
    responses((status = 200, body = Page<Found>)))]
pub(crate) async fn search(
    State(state): State<ApiState>,
    Q(wanted): Q<SearchParams>,
    Q(params): Q<ReadParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<Found>>, Problem> {
    params.refuse_as_of()?;
    let limit = page.limit()?;
    let (reader, network) = match &wanted.network {
        Some(network) => {
            let (reader, network) = Reader::at(&state, network, &params).await?;
            (reader, Some(network))
        }
        None => {
            params.refuse_min_height()?;
            (Reader::open(&state).await?, None)
        }
    };
    let taste = Taste {
        network: network.as_ref().map(|network| network.network_id),
        finality: params.finality(),
        require_metadata: params.require_metadata(),
    };
    let text = wanted.q.as_deref().unwrap_or("").trim();
    let binding = format!("search|{text}|{taste:?}");
    // The place is the last thing shown: what is found before it later does not shift the page.
    let after: Option<(String,)> =
        page.cursor.as_deref().map(|cursor| cursor::decode(&binding, cursor)).transpose()?;
    let (reader, mut items) = find(&state, reader, text, &taste).await?;
    if let Some((after,)) = after {
        let seen = items.iter().position(|item| item.page == after).map_or(items.len(), |at| at + 1);
        items.drain(..seen);
    }
    let more = cut(&mut items, limit);
    let next = items.last().filter(|_| more).map(|item| cursor::encode(&binding, &(&item.page,)));
    let meta = network.as_ref().map_or_else(|| Meta::across(&reader.networks), Meta::of);
    Ok(Json(Page { items, next, meta }))
}

/// Everything `text` may mean, best first.
pub(crate) async fn find(
    state: &ApiState,
    reader: Reader,
    text: &str,
    taste: &Taste,
) -> Result<(Reader, Vec<Found>), Problem> {
    let text = text.trim();
    if text.chars().count() > QUERY_CHARS_MAX {
        return Err(Problem::bad("invalid_parameter", "q is too long", "Two hundred characters are enough."));
    }
    let mut found = Vec::new();
    if text.is_empty() || text.contains('\0') {
        return Ok((reader, found));
    }
    for network in reader.networks.iter().filter(|network| network.slug.eq_ignore_ascii_case(text)) {
        found.push(Found {
            kind: "network",
            title: network.slug.clone(),
            subtitle: format!("{} network {}", network.family, network.network_id),
            network: network.slug.clone(),
            page: format!("/transfers?network={}", network.slug),
            api: format!("/v1/networks/{}", network.slug),
        });
    }
    by_address(&reader, taste, text, &mut found).await?;
    by_id(&reader, taste, text, &mut found).await?;
    by_number(&reader, taste, text, &mut found).await?;
    by_prefix(&reader, taste, text, &mut found).await?;
    by_hash(state, &reader, taste, text, &mut found).await?;
    if let Some(only) = taste.network.and_then(|id| reader.by_id(id).ok()) {
        found.retain(|item| item.network == only.slug);
    }
    let mut seen = std::collections::HashSet::new();
    found.retain(|item| seen.insert(item.page.clone()));
    Ok((reader, found))
}

/// A whole address, or `address/token` and `address #token`.
async fn by_address(
    reader: &Reader,
    taste: &Taste,
    text: &str,
    found: &mut Vec<Found>,
) -> Result<(), Problem> {
    let (address, token) = match text.split_once(['/', '#']) {
        Some((address, token)) => (address.trim(), Some(token.trim().trim_start_matches('#'))),
        None => (text, None),
    };
    let mut ids = Vec::new();
    let mut assets = Vec::new();
    for network in reader.networks.iter() {
        // Only families with a strict form: elsewhere any short text would be an address.
        if !matches!(network.family.as_str(), "evm" | "solana" | "ton") {
            continue;
        }
        let Ok(address) = canonical_address(network, address) else { continue };
        let id = NetworkId(network.network_id);
        // S0 §6: an account and a collection at one address share their uuid.
        ids.push(AccountId::of(id, &address).0);
        if let Some(token) = token
            && let Ok(token) = canonical_token_id(network, token)
        {
            for standard in ["erc721", "erc1155"] {
                assets.push(AssetId::of(id, CollectionId::of(id, &address), &token, standard).0);
            }
        }
    }
    if !assets.is_empty() {
        push_assets(reader, taste, reads::assets(&reader.conn, &assets).await?, found);
    }
    if !ids.is_empty() {
        push_collections(reader, taste, reads::collections(&reader.conn, &ids).await?, found);
        push_accounts(reader, reads::accounts(&reader.conn, &ids).await?, found);
    }
    Ok(())
}

/// A uuid of ours.
async fn by_id(reader: &Reader, taste: &Taste, text: &str, found: &mut Vec<Found>) -> Result<(), Problem> {
    let Ok(id) = Uuid::parse_str(text) else { return Ok(()) };
    push_assets(reader, taste, reads::assets(&reader.conn, &[id]).await?, found);
    push_collections(reader, taste, reads::collections(&reader.conn, &[id]).await?, found);
    push_accounts(reader, reads::accounts(&reader.conn, &[id]).await?, found);
    Ok(())
}

/// A height, or a token id of one of the most active collections.
async fn by_number(
    reader: &Reader,
    taste: &Taste,
    text: &str,
    found: &mut Vec<Found>,
) -> Result<(), Problem> {
    let digits = text.strip_prefix('#').unwrap_or(text);
    if digits.is_empty() || digits.len() > 78 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Ok(());
    }
    if let Ok(height) = digits.parse::<i64>() {
        let networks: Vec<i32> = reader.networks.iter().map(|network| network.network_id).collect();
        push_blocks(reader, taste, &reads::blocks_at(&reader.conn, &networks, height).await?, found);
    }
    let top = (i64::MAX, Uuid::nil());
    let collections = reads::collections_ranked(&reader.conn, None, top, false, TOKEN_COLLECTIONS).await?;
    let ids: Vec<Uuid> = collections
        .iter()
        .map(|row| {
            AssetId::of(NetworkId(row.network_id), CollectionId(row.collection_id), digits, &row.standard).0
        })
        .collect();
    push_assets(reader, taste, reads::assets(&reader.conn, &ids).await?, found);
    Ok(())
}

/// The beginning of a name or an address.
async fn by_prefix(
    reader: &Reader,
    taste: &Taste,
    text: &str,
    found: &mut Vec<Found>,
) -> Result<(), Problem> {
    if text.chars().count() < 2 {
        return Ok(());
    }
    push_collections(reader, taste, reads::collections_by_name(&reader.conn, text, 10).await?, found);
    push_assets(reader, taste, reads::assets_by_name(&reader.conn, text, 10).await?, found);
    let lower = text.to_lowercase();
    if lower.starts_with("0x") && (5..42).contains(&lower.len()) {
        push_collections(
            reader,
            taste,
            reads::collections_by_address_prefix(&reader.conn, &lower, 10).await?,
            found,
        );
        push_accounts(reader, reads::accounts_by_prefix(&reader.conn, &lower, 10).await?, found);
    }
    Ok(())
}

/// A block or transaction hash.
async fn by_hash(
    state: &ApiState,
    reader: &Reader,
    taste: &Taste,
    text: &str,
    found: &mut Vec<Found>,
) -> Result<(), Problem> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    let Some(hash) = hex::decode(digits).ok().filter(|bytes| bytes.len() == 32) else { return Ok(()) };
    push_blocks(reader, taste, &reads::blocks_by_hash(&reader.conn, &hash).await?, found);
    let raw = reader.raw(state).await?;
    for network in reader.networks.iter() {
        if let Some(place) = reads::tx_lookup(&raw, network.network_id, &hash).await?
            && is_sure_enough(network, taste.finality, place.height)
        {
            let hash = hex0x(&hash);
            found.push(Found {
                kind: "transaction",
                subtitle: format!("in block {}", place.height),
                network: network.slug.clone(),
                page: format!("/tx/{}/{hash}", network.slug),
                api: format!("/v1/transactions/{}/{hash}", network.slug),
                title: hash,
            });
        }
    }
    Ok(())
}

fn slug(reader: &Reader, id: i32) -> Option<&str> {
    reader.networks.iter().find(|network| network.network_id == id).map(|network| network.slug.as_str())
}

fn push_collections(reader: &Reader, taste: &Taste, rows: Vec<reads::CollectionRow>, found: &mut Vec<Found>) {
    for row in rows.into_iter().filter(|row| !(taste.require_metadata && row.is_stub)) {
        let Some(slug) = slug(reader, row.network_id) else { continue };
        let item = Collection::new(&row, slug);
        found.push(Found {
            kind: "collection",
            title: item.name.unwrap_or_else(|| item.address.clone()),
            subtitle: format!("{} · {} assets · {}", item.standard, item.asset_count, item.address),
            network: slug.to_owned(),
            page: format!("/collections/{slug}/{}", item.address),
            api: format!("/v1/collections/{slug}/{}", item.address),
        });
    }
}

fn push_accounts(reader: &Reader, rows: Vec<reads::AccountRow>, found: &mut Vec<Found>) {
    for row in rows {
        let Some(slug) = slug(reader, row.network_id) else { continue };
        found.push(Found {
            kind: "account",
            subtitle: format!("{} assets · {} transfers", row.asset_count, row.transfer_count),
            network: slug.to_owned(),
            page: format!("/accounts/{slug}/{}", row.address),
            api: format!("/v1/accounts/{slug}/{}", row.address),
            title: row.address,
        });
    }
}

fn push_assets(reader: &Reader, taste: &Taste, rows: Vec<reads::AssetRow>, found: &mut Vec<Found>) {
    for row in rows.into_iter().filter(|row| !(taste.require_metadata && row.is_stub)) {
        let Some(slug) = slug(reader, row.network_id) else { continue };
        let item = Asset::new(row, slug);
        let Some(contract) = item.contract else { continue };
        let of = item.collection_name.unwrap_or_else(|| contract.clone());
        found.push(Found {
            kind: "asset",
            title: item.name.unwrap_or_else(|| format!("{of} #{}", item.token_id)),
            subtitle: format!("#{} of {of}", item.token_id),
            network: slug.to_owned(),
            page: format!("/assets/{slug}/{contract}/{}", item.token_id),
            api: format!("/v1/assets/{slug}/{contract}/{}", item.token_id),
        });
    }
}

fn push_blocks(reader: &Reader, taste: &Taste, rows: &[reads::BlockRow], found: &mut Vec<Found>) {
    for row in rows {
        let Ok(network) = reader.by_id(row.network_id) else { continue };
        if !is_sure_enough(network, taste.finality, row.height) {
            continue;
        }
        let block = Block::new(row, network);
        found.push(Found {
            kind: "block",
            title: format!("Block {}", block.height),
            subtitle: format!("{} events · {}", block.event_count, block.finality_status),
            network: network.slug.clone(),
            page: format!("/blocks/{}/{}", network.slug, block.height),
            api: format!("/v1/blocks/{}/{}", network.slug, block.height),
        });
    }
}
