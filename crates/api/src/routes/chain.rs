//! Blocks, transactions and raw events: first the lookup, then the partition (S1 §6.5).

use axum::Json;
use axum::extract::State;
use tidemark_store::reads::{self, NetworkRow, TransferPlace, TransferQuery, TransferScope};
use uuid::Uuid;

use crate::answer::{Meta, One, Page, cut};
use crate::cursor;
use crate::dto::{Block, EventEvidence, RawEvent, Transaction, TransactionStatus, Transfer, finality, hex0x};
use crate::params::{P, PageParams, Q, ReadParams, hash_bytes};
use crate::problem::Problem;
use crate::reader::{Reader, is_sure_enough};
use crate::state::ApiState;

/// A block, by height or hash
#[utoipa::path(get, path = "/v1/blocks/{network}/{block}", tag = "chain",
    params(("network" = String, Path, description = "Network id or short name"),
           ("block" = String, Path, description = "Height or hash"), ReadParams),
    responses((status = 200, body = One<Block>)))]
pub(crate) async fn block(
    State(state): State<ApiState>,
    P((network, block)): P<(String, String)>,
    Q(params): Q<ReadParams>,
) -> Result<Json<One<Block>>, Problem> {
    params.refuse_as_of()?;
    let (reader, network) = Reader::at(&state, &network, &params).await?;
    let row = find_block(&reader, &network, &block).await?;
    if !is_sure_enough(&network, params.finality(), row.height) {
        return Err(not_sure(&params, "this block"));
    }
    Ok(Json(One { item: Block::new(&row, &network), meta: Meta::of(&network) }))
}

/// Raw events of a block
#[utoipa::path(get, path = "/v1/blocks/{network}/{block}/events", operation_id = "block_events", tag = "chain",
    params(("network" = String, Path, description = "Network id or short name"),
           ("block" = String, Path, description = "Height or hash"), ReadParams, PageParams),
    responses((status = 200, body = Page<RawEvent>)))]
pub(crate) async fn block_events(
    State(state): State<ApiState>,
    P((network, block)): P<(String, String)>,
    Q(params): Q<ReadParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<RawEvent>>, Problem> {
    params.refuse_as_of()?;
    let (reader, network) = Reader::at(&state, &network, &params).await?;
    let row = find_block(&reader, &network, &block).await?;
    drop(reader);
    raw_events(&state, &network, row.height, None, &page).await
}

/// A transaction, as far as it touched assets
#[utoipa::path(get, path = "/v1/transactions/{network}/{hash}", tag = "chain",
    params(("network" = String, Path, description = "Network id or short name"),
           ("hash" = String, Path, description = "Transaction hash"), ReadParams),
    responses((status = 200, body = One<Transaction>)))]
pub(crate) async fn transaction(
    State(state): State<ApiState>,
    P((network, hash)): P<(String, String)>,
    Q(params): Q<ReadParams>,
) -> Result<Json<One<Transaction>>, Problem> {
    params.refuse_as_of()?;
    let (reader, network) = Reader::at(&state, &network, &params).await?;
    let item = find_transaction(&state, reader, &network, &hash).await?;
    if !is_sure_enough(&network, params.finality(), item.height) {
        return Err(not_sure(&params, "this transaction"));
    }
    Ok(Json(One { item, meta: Meta::of(&network) }))
}

/// Raw events of a transaction
#[utoipa::path(get, path = "/v1/transactions/{network}/{hash}/events", operation_id = "transaction_events",
    tag = "chain",
    params(("network" = String, Path, description = "Network id or short name"),
           ("hash" = String, Path, description = "Transaction hash"), ReadParams, PageParams),
    responses((status = 200, body = Page<RawEvent>)))]
pub(crate) async fn transaction_events(
    State(state): State<ApiState>,
    P((network, hash)): P<(String, String)>,
    Q(params): Q<ReadParams>,
    Q(page): Q<PageParams>,
) -> Result<Json<Page<RawEvent>>, Problem> {
    params.refuse_as_of()?;
    let (reader, network) = Reader::at(&state, &network, &params).await?;
    let bytes = hash_bytes(&hash)?;
    let place = reads::tx_lookup(&*reader.raw(&state).await?, network.network_id, &bytes).await?;
    let Some(place) = place else { return Err(reader.missing(Some(&network), "this transaction")) };
    drop(reader);
    raw_events(&state, &network, place.height, Some(&bytes), &page).await
}

/// How a transaction stands
///
/// Always 200 for a well-formed hash: `not_seen` may still be on its way. Poll it after sending, or use
/// `min_height` on the read you care about.
#[utoipa::path(get, path = "/v1/tx/{network}/{hash}/status", tag = "chain",
    params(("network" = String, Path, description = "Network id or short name"),
           ("hash" = String, Path, description = "Transaction hash"), ReadParams),
    responses((status = 200, body = One<TransactionStatus>)))]
pub(crate) async fn transaction_status(
    State(state): State<ApiState>,
    P((network, hash)): P<(String, String)>,
    Q(params): Q<ReadParams>,
) -> Result<Json<One<TransactionStatus>>, Problem> {
    params.refuse_as_of()?;
    let (reader, network) = Reader::at(&state, &network, &params).await?;
    let bytes = hash_bytes(&hash)?;
    let place = reads::tx_lookup(&*reader.raw(&state).await?, network.network_id, &bytes).await?;
    let head = network.head_height.or(network.projected_height).unwrap_or(0);
    let height = place.map(|place| place.height);
    let item = TransactionStatus {
        hash: hex0x(&bytes),
        status: height
            .map_or("not_seen".to_owned(), |height| finality(&network, height, false).as_str().to_owned()),
        is_projected: height.is_some_and(|height| height <= network.projected_height.unwrap_or(-1)),
        height,
        confirmations: height.map(|height| head.saturating_sub(height).max(0)),
        confirmations_required: network.confirmations,
    };
    Ok(Json(One { item, meta: Meta::of(&network) }))
}

/// An event and the raw event it came from
///
/// Show raw: the event's place is looked up by its id, then its row is read from its partition.
#[utoipa::path(get, path = "/v1/events/{event_id}", tag = "chain",
    params(("event_id" = Uuid, Path, description = "Event id"), ReadParams),
    responses((status = 200, body = One<EventEvidence>)))]
pub(crate) async fn event(
    State(state): State<ApiState>,
    P(event_id): P<Uuid>,
    Q(params): Q<ReadParams>,
) -> Result<Json<One<EventEvidence>>, Problem> {
    params.refuse_as_of()?;
    let mut reader = Reader::open(&state).await?;
    let mut found = reads::event_origin(&reader.conn, event_id).await?;
    if let (Some(origin), Some(height)) = (&found, params.min_height) {
        reader = reader.wait(&state, origin.network_id, height).await?;
        found = reads::event_origin(&reader.conn, event_id).await?;
    }
    let Some(origin) = found else { return Err(reader.missing(None, "this event")) };
    let network = reader.by_id(origin.network_id)?.clone();
    if !is_sure_enough(&network, params.finality(), origin.height) {
        return Err(not_sure(&params, "this event"));
    }
    drop(reader);
    let raw = state.raw().conn().await?;
    let found = reads::raw_events(
        &raw,
        origin.network_id,
        origin.height,
        Some(&origin.tx_hash),
        origin.event_index - 1,
        1,
    )
    .await?
    .pop()
    .filter(|row| row.event_index == origin.event_index);
    let status = finality(&network, origin.height, origin.is_reverted);
    let item = EventEvidence {
        event_id,
        source_event_id: origin.source_event_id,
        finality_status: status.as_str().to_owned(),
        raw: found.map(|row| RawEvent::new(row, origin.network_id, origin.height)),
    };
    Ok(Json(One { item, meta: Meta::raw(&network) }))
}

fn not_sure(params: &ReadParams, what: &str) -> Problem {
    Problem::pending(
        format!("{what} is known but not {} yet", params.finality().as_str()),
        "Ask again later, or with a weaker min_finality.",
    )
}

/// The block named by height or hash.
pub(crate) async fn find_block(
    reader: &Reader,
    network: &NetworkRow,
    block: &str,
) -> Result<reads::BlockRow, Problem> {
    if !block.is_empty() && block.len() < 19 && block.bytes().all(|byte| byte.is_ascii_digit()) {
        let height: i64 = block
            .parse()
            .map_err(|_| Problem::bad("invalid_parameter", "not a height", "Heights fit in 63 bits."))?;
        if let Some(row) = reads::blocks_at(&reader.conn, &[network.network_id], height).await?.pop() {
            return Ok(row);
        }
        let projected = network.projected_height.unwrap_or(-1);
        return Err(if height > projected {
            Problem::pending(
                format!("on {} we have read to {projected}, you asked for {height}", network.slug),
                "Ask again with min_height= to wait for it.",
            )
        } else if height < network.start_block {
            Problem::not_found(format!("{} is read from block {} on", network.slug, network.start_block))
        } else {
            Problem::not_found(format!("block {height} holds nothing of ours, so it was not kept"))
        });
    }
    let hash = hash_bytes(block)?;
    let found = reads::blocks_by_hash(&reader.conn, &hash).await?;
    found
        .into_iter()
        .find(|row| row.network_id == network.network_id)
        .ok_or_else(|| reader.missing(Some(network), "this block"))
}

/// The transaction with its transfers.
pub(crate) async fn find_transaction(
    state: &ApiState,
    reader: Reader,
    network: &NetworkRow,
    hash: &str,
) -> Result<Transaction, Problem> {
    let bytes = hash_bytes(hash)?;
    let raw = reader.raw(state).await?;
    let Some(place) = reads::tx_lookup(&raw, network.network_id, &bytes).await? else {
        return Err(reader.missing(Some(network), "this transaction"));
    };
    let own = reads::raw_transaction(&raw, network.network_id, place.height, &bytes).await?;
    drop(raw);
    let query = TransferQuery {
        network: network.network_id,
        scope: TransferScope::Transaction(place.height, bytes.clone()),
        before: TransferPlace::TOP,
        height_max: i64::MAX,
        include_reverted: false,
        kinds: None,
        limit: 100,
    };
    let transfers = reads::transfers(&reader.conn, &query).await?;
    Ok(Transaction {
        network_id: network.network_id,
        network: network.slug.clone(),
        hash: hex0x(&bytes),
        height: place.height,
        tx_index: place.tx_index,
        block_time: place.block_time,
        finality_status: finality(network, place.height, false).as_str().to_owned(),
        sender: own.as_ref().map(|own| hex0x(&own.sender)),
        receiver: own.as_ref().and_then(|own| own.receiver.as_deref().map(hex0x)),
        value: own.as_ref().map(|own| own.value.clone()),
        succeeded: own.as_ref().and_then(|own| own.succeeded),
        transfers: transfers.into_iter().map(|row| Transfer::new(row, network)).collect(),
    })
}

async fn raw_events(
    state: &ApiState,
    network: &NetworkRow,
    height: i64,
    hash: Option<&[u8]>,
    page: &PageParams,
) -> Result<Json<Page<RawEvent>>, Problem> {
    let limit = page.limit()?;
    let binding =
        format!("raw_events|{}|{height}|{}", network.network_id, hash.map_or_else(String::new, hex0x));
    let after: (i32,) = match &page.cursor {
        None => (-1,),
        Some(text) => cursor::decode(&binding, text)?,
    };
    let raw = state.raw().conn().await?;
    let rows_max = i32::try_from(limit + 1).unwrap_or(i32::MAX);
    let mut rows = reads::raw_events(&raw, network.network_id, height, hash, after.0, rows_max).await?;
    let more = cut(&mut rows, limit);
    let next = rows.last().filter(|_| more).map(|row| cursor::encode(&binding, &(row.event_index,)));
    let items = rows.into_iter().map(|row| RawEvent::new(row, network.network_id, height)).collect();
    Ok(Json(Page { items, next, meta: Meta::raw(network) }))
}
