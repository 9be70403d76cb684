//! Replay: hands events that were handled before to their handler again, marked as replayed. Handlers that
//! act on the outside world refuse. Inbox and positions do not move; batches exclude live ones by the
//! position's lock; nothing beyond the position and nothing that lies in the DLQ is touched.

use std::collections::HashSet;
use std::time::Duration;

use serde_json::{Value, json};
use tidemark_store::buslog;
use tidemark_store::dlq::{self as letters, Filter};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

use crate::dispatch::{Delivered, HandleError, prepare_handler, run_handler, stream_of};
use crate::dlq::Desk;
use crate::postgres::read_log;
use crate::{BusError, chain_of};

/// Which events.
#[derive(Debug, Clone, PartialEq)]
pub enum Selector {
    /// By number, `from` and `to` included, of one partition or of all.
    Numbers {
        /// Which partition; none is all of them.
        part: Option<u16>,
        /// First number.
        from: i64,
        /// Last number.
        to: i64,
    },
    /// By the time they got their number, `to` excluded.
    Time {
        /// From this time.
        from: OffsetDateTime,
        /// Before this time.
        to: OffsetDateTime,
    },
    /// By the height in their payload, both included.
    Heights {
        /// Of this network; none is all of them.
        network_id: Option<i64>,
        /// First height.
        from: i64,
        /// Last height.
        to: i64,
    },
}

impl Selector {
    fn to_json(&self) -> Value {
        let text = |at: &OffsetDateTime| at.format(&Rfc3339).unwrap_or_default();
        match self {
            Self::Numbers { part, from, to } => json!({"by": "number", "part": part, "from": from, "to": to}),
            Self::Time { from, to } => json!({"by": "time", "from": text(from), "to": text(to)}),
            Self::Heights { network_id, from, to } => {
                json!({"by": "height", "network_id": network_id, "from": from, "to": to})
            }
        }
    }

    fn takes(&self, event: &Delivered) -> bool {
        let Self::Heights { network_id, from, to } = self else {
            return true; // Numbers and times already bound what is read.
        };
        let payload = &event.envelope.payload;
        let height = ["height", "block_number", "finalized_height"]
            .iter()
            .find_map(|name| payload.get(*name)?.as_i64());
        let network = payload.get("network_id").and_then(Value::as_i64);
        height.is_some_and(|height| (*from..=*to).contains(&height))
            && network_id.is_none_or(|wanted| network == Some(wanted))
    }
}

/// A replay.
#[derive(Debug, Clone)]
pub struct ReplayRequest {
    /// For which handler.
    pub handler: String,
    /// Which events.
    pub selector: Selector,
    /// Who asks.
    pub by: String,
    /// Why.
    pub reason: Option<String>,
    /// Only count.
    pub dry_run: bool,
    /// Most events per second.
    pub per_second: Option<u32>,
}

/// What a replay did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replayed {
    /// Its id in system.replays.
    pub id: String,
    /// Events handed to the handler.
    pub events: u64,
}

/// Events of one transaction.
const BATCH: usize = 200;

/// Runs a replay to its end.
pub async fn replay(desk: &Desk, request: &ReplayRequest) -> Result<Replayed, BusError> {
    let id = begin(desk, request).await?;
    run(desk, request, id).await
}

/// Refuses what cannot be replayed, and records that the rest begins, with an audit row. Gives its id.
pub async fn begin(desk: &Desk, request: &ReplayRequest) -> Result<String, BusError> {
    if desk.handler(&request.handler)?.side_effects() {
        return Err(BusError::Misuse {
            what: format!("{} acts on the outside world and refuses replayed events", request.handler),
            hint: "replay the handlers that only write here",
        });
    }
    let id = Uuid::now_v7().to_string();
    if !request.dry_run {
        let mut conn = desk.db.conn().await?;
        let tx = conn.tx().await?;
        let selector = request.selector.to_json();
        let (by, reason) = (request.by.as_str(), request.reason.as_deref());
        letters::begin_replay(&tx, &id, &request.handler, by, reason, &selector).await?;
        letters::audit(&tx, by, "events.replay", &request.handler, reason, &selector).await?;
        tx.commit().await?;
    }
    Ok(id)
}

/// Hands the events of a replay that has begun to its handler, and records how it ended.
pub async fn run(desk: &Desk, request: &ReplayRequest, id: String) -> Result<Replayed, BusError> {
    let mut events = 0;
    let outcome = replay_parts(desk, request, &mut events).await;
    if !request.dry_run {
        let status = if outcome.is_ok() { "done" } else { "failed" };
        letters::end_replay(&desk.db.conn().await?, &id, status, events).await?;
    }
    outcome.map(|()| Replayed { id, events })
}

async fn replay_parts(desk: &Desk, request: &ReplayRequest, events: &mut u64) -> Result<(), BusError> {
    let handler = desk.handler(&request.handler)?;
    let stream = stream_of(handler.as_ref())?;
    let conn = desk.db.conn().await?;
    let parts = buslog::stream_parts(&conn, stream).await?.unwrap_or(0);
    for part in 0..parts {
        let (after, last) = match &request.selector {
            Selector::Numbers { part: Some(only), .. } if *only != part => continue,
            Selector::Numbers { from, to, .. } => (from - 1, *to),
            Selector::Time { from, to } => (
                buslog::pseq_before(&conn, stream, part, *from).await?,
                buslog::pseq_before(&conn, stream, part, *to).await?,
            ),
            Selector::Heights { .. } => (0, i64::MAX),
        };
        replay_part(desk, request, Span { stream, part, after, last }, events).await?;
    }
    Ok(())
}

struct Span<'a> {
    stream: &'a str,
    part: u16,
    after: i64,
    last: i64,
}

async fn replay_part(
    desk: &Desk,
    request: &ReplayRequest,
    span: Span<'_>,
    events: &mut u64,
) -> Result<(), BusError> {
    let handler = desk.handler(&request.handler)?;
    let Span { stream, part, mut after, last } = span;
    loop {
        let read = read_log(&desk.db, stream, part, after, BATCH).await?;
        let Some(end) = read.last().map(|event| event.pseq) else {
            return Ok(());
        };
        after = end;
        let mut conn = desk.db.conn().await?;
        let dead = dead_events(&conn, &request.handler).await?;
        let position = buslog::position(&conn, &request.handler, stream, part).await?.unwrap_or(0);
        let mut batch: Vec<Delivered> = read
            .into_iter()
            .filter(|event| event.pseq <= last.min(position))
            .map(|event| Delivered {
                envelope: event.envelope,
                stream: stream.to_owned(),
                part,
                pseq: event.pseq,
                replay: true,
            })
            .filter(|event| {
                handler.accepts().iter().any(|accepts| {
                    accepts.subject == event.envelope.event_type
                        && accepts.versions.contains(&event.envelope.event_version)
                })
            })
            .filter(|event| request.selector.takes(event) && !dead.contains(&event.event_id()))
            .collect();
        if !batch.is_empty() && !request.dry_run {
            prepare_handler(handler.as_ref(), &batch, &[]).await.map_err(refused)?;
            let tx = conn.tx().await?;
            let now = buslog::lock_position_any(&tx, &request.handler, stream, part).await?.unwrap_or(0);
            batch.retain(|event| event.pseq <= now); // Somebody may have set it back meanwhile.
            if !batch.is_empty() {
                run_handler(handler.as_ref(), &tx, &batch).await.map_err(refused)?;
                tx.commit().await?;
            }
            if let Some(rate) = request.per_second {
                let share = u32::try_from(batch.len()).unwrap_or(u32::MAX);
                tokio::time::sleep(Duration::from_secs(1) * share / rate.max(1)).await;
            }
        }
        *events += u64::try_from(batch.len()).unwrap_or(u64::MAX);
        if after >= last.min(position) {
            return Ok(());
        }
    }
}

/// Most open letters looked at; a handler with more has other worries than a replay.
const DEAD_MAX: u32 = 100_000;

async fn dead_events(conn: &tidemark_store::Conn, handler: &str) -> Result<HashSet<Uuid>, BusError> {
    let filter = Filter { handler: Some(handler.to_owned()), ..Filter::default() };
    Ok(letters::list(conn, &filter, DEAD_MAX).await?.into_iter().map(|letter| letter.event_id).collect())
}

fn refused(error: HandleError) -> BusError {
    match error {
        HandleError::Store(error) => BusError::Store(error),
        other => BusError::Misuse {
            what: format!("a replayed event failed: {}", chain_of(&other).join(": ")),
            hint: "its transaction was rolled back; earlier ones stand; replay again after the fix",
        },
    }
}
