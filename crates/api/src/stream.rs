//! `GET /v1/stream`: server-sent events. The backbone numbers every message of stream `projection` without
//! holes, and a message carries up to fifty transfers. The event id is the position: the last message told in
//! full, and how many transfers of the next one were told (`1041+3`; `1042` after its last), so a client that
//! comes back with Last-Event-ID misses nothing.
//!
//! One task reads the table and keeps the newest messages in memory; clients follow it, and one that fell
//! behind reads the table by its own position. Nothing is pushed, so nothing is dropped for a slow client.
//!
//! With `min_finality` confirmed or finalized a client follows lines instead: when a network's line moves, the
//! transfers between the old and the new line are told. Its position is the message number and the lines
//! (`1042.1-88.137-90`). A transfer may be told twice after a reconnect; `event_id` names it.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use tidemark_model::address;
use tidemark_model::ids::{AccountId, NetworkId};
use tidemark_store::reads::{self, NetworkRow, StreamRow, TransferPlace};
use tidemark_store::{Db, StoreError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use utoipa::IntoParams;
use uuid::Uuid;

use crate::dto::{finality, hex0x};
use crate::params::{MinFinality, Q, TransferParams};
use crate::problem::Problem;
use crate::reader::Reader;
use crate::state::ApiState;

/// Transfers (and other news) kept in memory for clients that keep up.
const RING_MAX: usize = 4096;
/// Messages of one read of the table for all.
const READ_MAX: i32 = 50;
/// Messages a client takes in at once.
const TAKE_MAX: i32 = 10;
/// Transfers of one page of a line.
const WALK_MAX: i64 = 500;
/// How long a client waits for news before it looks again by itself.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Comment lines keep proxies from closing a quiet connection.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// Event ids a client remembers, so that a transfer is not told by its line and again by its message.
const RECENT_MAX: usize = 4096;
/// Networks are read this often.
const NETWORKS_EVERY: u32 = 5;

/// What the one reader knows.
#[derive(Clone)]
struct News {
    /// Newest number in the ring; -1 while nobody reads.
    head: i64,
    networks: Arc<Vec<NetworkRow>>,
}

/// Messages in memory, without a hole.
#[derive(Default)]
struct Ring {
    rows: VecDeque<Arc<StreamRow>>,
    weight: usize,
}

impl Ring {
    fn extend(&mut self, rows: Vec<StreamRow>) {
        for row in rows {
            self.weight += weight(&row);
            self.rows.push_back(Arc::new(row));
        }
        while self.weight > RING_MAX
            && let Some(oldest) = self.rows.pop_front()
        {
            self.weight -= weight(&oldest);
        }
    }
}

/// The transfers of a message of transfers.
fn transfers(row: &StreamRow) -> &[Value] {
    row.payload.get("transfers").and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn weight(row: &StreamRow) -> usize {
    transfers(row).len().max(1)
}

/// The newest messages, shared by all clients.
pub(crate) struct Hub {
    news: watch::Sender<News>,
    ring: RwLock<Ring>,
    clients: Arc<Semaphore>,
    turn: std::sync::atomic::AtomicU32,
    /// The last look failed: it is said once, not at every look.
    failing: std::sync::atomic::AtomicBool,
}

impl Hub {
    pub(crate) fn new(clients_max: usize) -> Self {
        let (news, _) = watch::channel(News { head: -1, networks: Arc::default() });
        Self {
            news,
            ring: RwLock::default(),
            clients: Arc::new(Semaphore::new(clients_max)),
            turn: std::sync::atomic::AtomicU32::new(0),
            failing: std::sync::atomic::AtomicBool::new(false),
        }
    }

    /// One look at the table, if anybody listens. What fails is tried again at the next look.
    pub(crate) async fn poll(&self, db: &Db) {
        if self.news.receiver_count() == 0 {
            self.stop();
            return;
        }
        let read = self.read(db).await;
        let failed_before = self.failing.swap(read.is_err(), std::sync::atomic::Ordering::Relaxed);
        match read {
            Err(error) if !failed_before => {
                tracing::warn!(action = "read_stream", error = %error, "The live stream cannot be read; it is tried again.");
            }
            Ok(()) if failed_before => {
                tracing::info!(action = "read_stream", "The live stream is read again.");
            }
            _ => {}
        }
    }

    async fn read(&self, db: &Db) -> Result<(), StoreError> {
        let now = self.news.borrow().clone();
        let conn = db.conn().await?;
        let turn = self.turn.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let networks = match now.networks.is_empty() || turn.is_multiple_of(NETWORKS_EVERY) {
            true => Arc::new(reads::networks(&conn).await?),
            false => Arc::clone(&now.networks),
        };
        let mut head = match now.head {
            -1 => {
                // A hole between old and new messages in memory would be a hole for a client.
                *self.ring.write().expect("no holder of this lock can panic") = Ring::default();
                reads::stream_bounds(&conn).await?.1
            }
            head => head,
        };
        loop {
            let rows = reads::stream_read(&conn, head, READ_MAX).await?;
            let full = rows.len() >= usize::try_from(READ_MAX).unwrap_or(usize::MAX);
            if let Some(last) = rows.last() {
                head = last.pseq;
                self.ring.write().expect("no holder of this lock can panic").extend(rows);
            }
            if !full {
                break;
            }
        }
        self.news.send_if_modified(|news| {
            let changed = news.head != head || !Arc::ptr_eq(&news.networks, &networks);
            *news = News { head, networks };
            changed
        });
        Ok(())
    }

    /// Nobody reads any more: what is known grows old.
    pub(crate) fn stop(&self) {
        self.news.send_if_modified(|news| {
            let known = news.head != -1;
            *news = News { head: -1, networks: Arc::default() };
            known
        });
    }

    /// Messages after `position` from memory; `None` when memory does not reach back that far.
    fn after(&self, position: i64) -> Option<Vec<Arc<StreamRow>>> {
        let ring = self.ring.read().expect("no holder of this lock can panic");
        let first = ring.rows.front()?.pseq;
        if position + 1 < first {
            return None;
        }
        let begin = ring.rows.partition_point(|row| row.pseq <= position);
        Some(ring.rows.iter().skip(begin).take(usize::try_from(TAKE_MAX).unwrap_or(1)).cloned().collect())
    }
}

/// What to tell.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct StreamParams {
    /// Network id or short name.
    network: Option<String>,
    /// Collection id or contract address.
    collection: Option<String>,
    /// Account id or address: transfers to or from it.
    account: Option<String>,
    /// Only these kinds, separated by commas: transfer, mint, burn.
    kind: Option<String>,
    /// pending (default): at once, with retractions. confirmed or finalized: when it is that sure.
    #[param(inline)]
    min_finality: Option<MinFinality>,
    /// Instead of the Last-Event-ID header, where headers cannot be set. `0` tells everything still kept.
    last_event_id: Option<String>,
}

/// Live events
///
/// Server-sent events: `transfer`, `retracted` (names the event_id a reorg took back) and `finality` (a tidemark
/// moved). `id` is the position; reconnect with it as Last-Event-ID and nothing is missed.
#[utoipa::path(get, path = "/v1/stream", tag = "stream",
    params(StreamParams, ("last-event-id" = Option<String>, Header, description = "Resume after this event")),
    responses((status = 200, description = "An endless stream of events", content_type = "text/event-stream", body = String)))]
pub(crate) async fn stream(
    State(state): State<ApiState>,
    headers: HeaderMap,
    Q(params): Q<StreamParams>,
) -> Result<Response, Problem> {
    let Ok(permit) = Arc::clone(&state.hub().clients).try_acquire_owned() else {
        let mut problem = Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "too_many_streams",
            "all live connections are taken",
            "Try again in a minute, and close connections you do not need.",
        );
        problem.retry_after = Some(30);
        return Err(problem);
    };
    let client = Client::begin(&state, &headers, &params, permit).await?;
    let events = futures_util::stream::unfold(client, |mut client| async move {
        client.next().await.map(|event| (Ok::<_, Infallible>(event), client))
    });
    let mut response =
        Sse::new(events).keep_alive(KeepAlive::new().interval(HEARTBEAT).text("tide")).into_response();
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

struct Filter {
    network: Option<i32>,
    collection: Option<String>,
    account: Option<String>,
    kinds: Option<Vec<String>>,
}

impl Filter {
    fn takes(&self, payload: &Value) -> bool {
        let text = |name: &str| payload.get(name).and_then(Value::as_str);
        let network = payload.get("network_id").and_then(Value::as_i64);
        if self.network.is_some_and(|wanted| network != Some(i64::from(wanted))) {
            return false;
        }
        if let Some(wanted) = &self.collection
            && text("collection_id") != Some(wanted)
            && text("contract") != Some(wanted)
        {
            return false;
        }
        if let Some(kinds) = &self.kinds
            && !kinds.iter().any(|kind| text("kind") == Some(kind))
        {
            return false;
        }
        let Some(wanted) = &self.account else { return true };
        let network = network.and_then(|id| i32::try_from(id).ok()).unwrap_or(0);
        ["from", "to"].into_iter().filter_map(text).any(|address| {
            address == wanted
                || Uuid::parse_str(wanted).is_ok_and(|id| AccountId::of(NetworkId(network), address).0 == id)
        })
    }
}

/// A line that is being told, page by page.
struct Walk {
    network: i32,
    after: TransferPlace,
    target: i64,
}

/// Where a client is in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Position {
    /// Told in full up to this message.
    message: i64,
    /// So many transfers of the next one were told.
    told: usize,
}

impl Position {
    fn after(message: i64) -> Self {
        Self { message, told: 0 }
    }
    fn parse(text: &str) -> Option<Self> {
        let (message, told) = match text.split_once('+') {
            Some((message, told)) => (message, told.parse().ok()?),
            None => (text, 0),
        };
        Some(Self { message: message.parse().ok().filter(|at| *at >= 0)?, told })
    }
    /// The newest message that must be there.
    fn needs(self) -> i64 {
        self.message + i64::from(self.told > 0)
    }
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.told {
            0 => write!(f, "{}", self.message),
            told => write!(f, "{}+{told}", self.message),
        }
    }
}

struct Client {
    state: ApiState,
    news: watch::Receiver<News>,
    filter: Filter,
    level: MinFinality,
    position: Position,
    /// Per network, what has been told; only with a level above pending.
    lines: BTreeMap<i32, i64>,
    walk: Option<Walk>,
    ready: VecDeque<Event>,
    recent: VecDeque<Uuid>,
    recent_set: HashSet<Uuid>,
    greeted: bool,
    _permit: OwnedSemaphorePermit,
}

impl Client {
    async fn begin(
        state: &ApiState,
        headers: &HeaderMap,
        params: &StreamParams,
        permit: OwnedSemaphorePermit,
    ) -> Result<Self, Problem> {
        let reader = Reader::open(state).await?;
        let network = params.network.as_deref().map(|text| reader.network(text)).transpose()?;
        let kinds = TransferParams { kind: params.kind.clone(), include_reverted: None }.kinds()?;
        let canonical = |text: &String| address::evm(text).unwrap_or_else(|_| text.clone());
        let filter = Filter {
            network: network.map(|network| network.network_id),
            collection: params.collection.as_ref().map(canonical),
            account: params.account.as_ref().map(canonical),
            kinds,
        };
        let level = params.min_finality.unwrap_or_default();
        let last = headers.get("last-event-id").and_then(|value| value.to_str().ok());
        let last = last.or(params.last_event_id.as_deref()).map(str::trim).filter(|text| !text.is_empty());
        let (oldest, newest) = reads::stream_bounds(&reader.conn).await?;
        let (position, lines) = match last {
            None => (Position::after(newest), current_lines(&reader.networks, level)),
            Some(text) => parse_position(text, level, &reader.networks)?,
        };
        // Zero asks for everything that is still kept; any other number must still be there.
        let kept_from = oldest.unwrap_or(newest + 1);
        let at = position.message;
        if position.needs() > newest || (position != Position::after(0) && at + 1 < kept_from) {
            return Err(Problem::new(
                StatusCode::GONE,
                "position_expired",
                format!("the stream holds {kept_from} to {newest}, you were at {at}"),
                "Read the lists again, then connect without Last-Event-ID.",
            ));
        }
        Ok(Self {
            state: state.clone(),
            news: state.hub().news.subscribe(),
            filter,
            level,
            position,
            lines,
            walk: None,
            ready: VecDeque::new(),
            recent: VecDeque::new(),
            recent_set: HashSet::new(),
            greeted: false,
            _permit: permit,
        })
    }

    /// The next event; `None` ends the connection, and the client comes back with its position.
    async fn next(&mut self) -> Option<Event> {
        if !self.greeted {
            // The position to resume from is known before anything happens.
            self.greeted = true;
            return Some(
                Event::default()
                    .event("hello")
                    .id(self.id())
                    .data(json!({"position": self.id()}).to_string()),
            );
        }
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.state.closing().is_cancelled() {
                return None;
            }
            match self.look().await {
                Ok(true) => {}
                Ok(false) => {
                    let closing = self.state.closing().clone();
                    tokio::select! {
                        () = closing.cancelled() => return None,
                        _ = tokio::time::timeout(LOOK_AGAIN, self.news.changed()) => {}
                    }
                }
                Err(error) => {
                    tracing::warn!(action = "stream", error = %error, "A live connection ends: the database does not answer.");
                    return None;
                }
            }
        }
    }

    /// Takes in what is new; false when there was nothing.
    async fn look(&mut self) -> Result<bool, StoreError> {
        let news = self.news.borrow_and_update().clone();
        if self.walk.is_some() {
            return self.walk_on(&news).await;
        }
        let position = self.position.message;
        let from_memory = if news.head >= position { self.state.hub().after(position) } else { None };
        let rows = match from_memory {
            Some(rows) => rows,
            None if news.head == position => Vec::new(),
            None => {
                let conn = self.state.app().conn().await?;
                let rows = reads::stream_read(&conn, position, TAKE_MAX).await?;
                rows.into_iter().map(Arc::new).collect()
            }
        };
        let any = !rows.is_empty();
        for row in rows {
            self.take(&row);
            self.position = Position::after(row.pseq);
        }
        if !any && self.level != MinFinality::Pending {
            return self.begin_walk(&news).await;
        }
        Ok(any)
    }

    fn take(&mut self, row: &StreamRow) {
        let name = match row.topic.rsplit_once('.').map_or(row.topic.as_str(), |(base, _)| base) {
            "projection.transfer.projected" => "transfer",
            "projection.transfer.retracted" => "retracted",
            "projection.finality.advanced" => "finality",
            _ => return,
        };
        if name == "finality" {
            let network = row.payload.get("network_id").and_then(Value::as_i64);
            self.position = Position::after(row.pseq);
            if self.filter.network.is_none_or(|wanted| network == Some(i64::from(wanted))) {
                self.tell(name, &row.payload);
            }
            return;
        }
        let all = transfers(row);
        let before = self.position.told;
        for (at, transfer) in all.iter().enumerate().skip(before) {
            let told = at + 1;
            self.position = match told == all.len() {
                true => Position::after(row.pseq),
                false => Position { message: row.pseq - 1, told },
            };
            self.take_transfer(name, transfer);
        }
    }

    fn take_transfer(&mut self, name: &str, transfer: &Value) {
        if !self.filter.takes(transfer) {
            return;
        }
        if self.level != MinFinality::Pending {
            // Below the line it is sure enough at once (a re-inclusion after a deep reorg); above it, the
            // line will bring it.
            let number = |field: &str| transfer.get(field).and_then(Value::as_i64);
            let line = number("network_id").and_then(|id| self.lines.get(&i32::try_from(id).ok()?)).copied();
            if number("height").is_none_or(|height| height > line.unwrap_or(-1)) {
                return;
            }
            let id = transfer.get("event_id").and_then(Value::as_str).and_then(|id| Uuid::parse_str(id).ok());
            match (name, id) {
                ("transfer", Some(id)) if !self.remember(id) => return,
                ("retracted", Some(id)) => {
                    self.recent_set.remove(&id);
                }
                _ => {}
            }
        }
        self.tell(name, transfer);
    }

    fn tell(&mut self, name: &str, payload: &Value) {
        let event = Event::default().event(name).id(self.id()).data(payload.to_string());
        self.ready.push_back(event);
    }

    /// Finds a network whose line moved.
    async fn begin_walk(&mut self, news: &News) -> Result<bool, StoreError> {
        let networks = match news.networks.is_empty() {
            false => Arc::clone(&news.networks),
            true => self.state.networks().await?,
        };
        for (network, target) in current_lines(&networks, self.level) {
            if self.filter.network.is_some_and(|wanted| wanted != network) {
                continue;
            }
            let line = *self.lines.entry(network).or_insert(target);
            if line < target {
                let after = TransferPlace { height: line, ..TransferPlace::TOP };
                self.walk = Some(Walk { network, after, target });
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Tells one page of what is between the lines. Only the last event of a walk carries the new position:
    /// a client cut off in the middle is told the whole walk again.
    async fn walk_on(&mut self, news: &News) -> Result<bool, StoreError> {
        let Some(walk) = &self.walk else { return Ok(false) };
        let (network_id, target, after) = (walk.network, walk.target, walk.after);
        let conn = self.state.app().conn().await?;
        let rows = reads::transfers_forward(&conn, network_id, after, target, WALK_MAX).await?;
        let more = rows.len() >= usize::try_from(WALK_MAX).unwrap_or(usize::MAX);
        let networks = match news.networks.is_empty() {
            false => Arc::clone(&news.networks),
            true => Arc::new(reads::networks(&conn).await?),
        };
        drop(conn);
        let network = networks.iter().find(|network| network.network_id == network_id);
        if let Some(last) = rows.last() {
            self.walk = Some(Walk { network: network_id, after: last.place, target });
        }
        for row in rows {
            let status = network
                .map_or("confirmed", |network| finality(network, row.place.height, row.is_reverted).as_str());
            let payload = json!({
                "event_id": row.place.event_id, "network_id": row.network_id, "kind": row.kind,
                "asset_id": row.asset_id, "collection_id": row.collection_id, "contract": row.contract,
                "token_id": row.token_id, "from": row.from_address, "to": row.to_address, "qty": row.qty,
                "height": row.place.height, "block_hash": hex0x(&row.block_hash), "tx_hash": hex0x(&row.tx_hash),
                "event_index": row.place.event_index, "sub_index": row.place.sub_index,
                "event_time": row.event_time.format(&time::format_description::well_known::Rfc3339).ok(),
                "finality_status": status,
            });
            if self.filter.takes(&payload) && self.remember(row.place.event_id) {
                self.ready.push_back(Event::default().event("transfer").data(payload.to_string()));
            }
        }
        if !more {
            self.walk = None;
            self.lines.insert(network_id, target);
            let line =
                json!({"network_id": network_id, "min_finality": self.level.as_str(), "height": target});
            self.ready.push_back(Event::default().event("line").id(self.id()).data(line.to_string()));
        }
        Ok(true)
    }

    /// True when this event was not told lately.
    fn remember(&mut self, id: Uuid) -> bool {
        if !self.recent_set.insert(id) {
            return false;
        }
        self.recent.push_back(id);
        if self.recent.len() > RECENT_MAX
            && let Some(oldest) = self.recent.pop_front()
        {
            self.recent_set.remove(&oldest);
        }
        true
    }

    fn id(&self) -> String {
        let mut text = self.position.to_string();
        for (network, line) in &self.lines {
            text.push_str(&format!(".{network}-{line}"));
        }
        text
    }
}

/// Where each network's line is now; empty at level pending.
fn current_lines(networks: &[NetworkRow], level: MinFinality) -> BTreeMap<i32, i64> {
    if level == MinFinality::Pending {
        return BTreeMap::new();
    }
    networks
        .iter()
        .map(|network| {
            let projected = network.projected_height.unwrap_or(-1);
            (network.network_id, level.height_max(network).min(projected))
        })
        .collect()
}

fn parse_position(
    text: &str,
    level: MinFinality,
    networks: &[NetworkRow],
) -> Result<(Position, BTreeMap<i32, i64>), Problem> {
    let refuse = || {
        Problem::bad(
            "invalid_cursor",
            "Last-Event-ID is not a position of this stream",
            "Send the id of the last event as it is, with the same min_finality; or connect without it.",
        )
    };
    let mut parts = text.split('.');
    let position = parts.next().and_then(Position::parse).ok_or_else(refuse)?;
    let mut lines = BTreeMap::new();
    for part in parts {
        let (network, line) = part.split_once('-').ok_or_else(refuse)?;
        let line: i64 = line.parse().map_err(|_| refuse())?;
        lines.insert(network.parse::<i32>().map_err(|_| refuse())?, line);
    }
    match (level, lines.is_empty()) {
        (MinFinality::Pending, true) => Ok((position, lines)),
        // "Everything still kept": from the bottom of every network.
        (_, true) if position == Position::after(0) => {
            Ok((position, networks.iter().map(|network| (network.network_id, -1)).collect()))
        }
        (MinFinality::Pending, false) | (_, true) => Err(refuse()),
        (_, false) => Ok((position, lines)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_read_as_they_were_written() {
        let (position, lines) =
            parse_position("1042.1-88.137--1", MinFinality::Finalized, &[]).expect("ours");
        assert_eq!((position, lines), (Position::after(1042), BTreeMap::from([(1, 88), (137, -1)])));
        for text in ["7", "7+3"] {
            let (position, _) = parse_position(text, MinFinality::Pending, &[]).expect("ours");
            assert_eq!((position.message, position.to_string().as_str()), (7, text));
        }
        for (text, level) in [
            ("", MinFinality::Pending),
            ("-1", MinFinality::Pending),
            ("x", MinFinality::Pending),
            ("7+", MinFinality::Pending),
            ("7+-1", MinFinality::Pending),
            ("7+1+2", MinFinality::Pending),
            ("7.1-2", MinFinality::Pending),
            ("7", MinFinality::Finalized),
            ("7.1", MinFinality::Finalized),
            ("7.a-1", MinFinality::Confirmed),
        ] {
            assert!(parse_position(text, level, &[]).is_err(), "{text}");
        }
    }
}
