//! What operators do with dead letters: look, retry, release a parked key in order, discard with a reason.
//! Everything is audited, and everything that touches a key holds its partition's position, so that it never
//! interleaves with live batches.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tidemark_model::envelope::Envelope;
use tidemark_store::dlq::{self, DeadLetter, Filter, ParkedKey};
use tidemark_store::{Db, StoreError, buslog, inbox};

use crate::dispatch::{Delivered, HandleError, Handler, prepare_handler, run_handler};
use crate::registry::Registry;
use crate::{BusError, chain_of};

/// Where operators sit: the database and the handlers of this build.
#[derive(Clone)]
pub struct Desk {
    /// The database.
    pub db: Db,
    /// The schemas.
    pub registry: Arc<Registry>,
    /// The handlers.
    pub handlers: Vec<Arc<dyn Handler>>,
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.handlers.iter().map(|handler| handler.kind())).finish()
    }
}

impl Desk {
    /// The handler of that name.
    pub fn handler(&self, kind: &str) -> Result<&Arc<dyn Handler>, BusError> {
        self.handlers.iter().find(|handler| handler.kind() == kind).ok_or_else(|| BusError::Misuse {
            what: format!("there is no handler {kind}"),
            hint: "take one of those that `dlq list` shows",
        })
    }
}

/// Open dead letters by key and number.
pub async fn list(db: &Db, filter: &Filter, limit: u32) -> Result<Vec<DeadLetter>, BusError> {
    Ok(dlq::list(&db.conn().await?, filter, limit).await?)
}

/// One dead letter, whole.
pub async fn show(db: &Db, id: i64) -> Result<Option<DeadLetter>, BusError> {
    Ok(dlq::show(&db.conn().await?, id).await?)
}

/// Parked keys.
pub async fn parked(db: &Db, handler: Option<&str>) -> Result<Vec<ParkedKey>, BusError> {
    Ok(dlq::parked_keys(&db.conn().await?, handler, None).await?)
}

/// How a retry works.
#[derive(Debug, Clone)]
pub struct RetryOptions {
    /// Who asks.
    pub by: String,
    /// Why.
    pub reason: Option<String>,
    /// Most letters.
    pub limit: u32,
    /// Most letters per second.
    pub per_second: Option<u32>,
    /// Only say what would be done.
    pub dry_run: bool,
}

/// What a retry did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RetryReport {
    /// Letters whose effect happened (or would be tried, in a dry run).
    pub done: Vec<i64>,
    /// Letters behind an earlier one of their key.
    pub waiting: Vec<i64>,
    /// Letters that failed again, and how.
    pub failed: Vec<(i64, String)>,
}

/// Tries the chosen letters again, each in a transaction of its own. A letter behind an earlier one of its
/// key waits for it: order is kept.
pub async fn retry(desk: &Desk, filter: &Filter, options: &RetryOptions) -> Result<RetryReport, BusError> {
    let open = Filter { resolved: false, ..filter.clone() };
    let letters = list(&desk.db, &open, options.limit).await?;
    let mut report = RetryReport::default();
    if options.dry_run {
        report.done = letters.iter().map(|letter| letter.id).collect();
        return Ok(report);
    }
    let gap = options.per_second.map(|rate| Duration::from_secs(1) / rate.max(1));
    for letter in letters {
        let step = Step { by: &options.by, reason: options.reason.as_deref(), resolution: "retried" };
        match settle_head(desk, &letter, &step).await? {
            Settled::Applied(_) | Settled::Empty => report.done.push(letter.id),
            Settled::NotFirst => report.waiting.push(letter.id),
            Settled::Failed(error) => report.failed.push((letter.id, error)),
        }
        if let Some(gap) = gap {
            tokio::time::sleep(gap).await;
        }
    }
    Ok(report)
}

/// What a release did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Released {
    /// Letters whose effect happened.
    pub applied: u64,
    /// The key is free again.
    pub unparked: bool,
    /// The letter that failed again, and how; the key stays parked at it.
    pub failed: Option<(i64, String)>,
}

/// Replays the parked events of a key in order, each in a transaction of its own, and frees the key with the
/// last one. New followers that come in meanwhile are replayed too.
pub async fn release(
    desk: &Desk,
    handler: &str,
    key: &str,
    by: &str,
    reason: Option<&str>,
) -> Result<Released, BusError> {
    let found = dlq::parked_keys(&desk.db.conn().await?, Some(handler), Some(key)).await?;
    let Some(parked) = found.into_iter().next() else {
        return Err(BusError::Misuse {
            what: format!("key {key} of {handler} is not parked"),
            hint: "`dlq list` shows what is",
        });
    };
    let filter = Filter { handler: Some(handler.to_owned()), key: Some(key.to_owned()), ..Filter::default() };
    let mut released = Released::default();
    loop {
        let Some(first) = list(&desk.db, &filter, 1).await?.into_iter().next() else {
            // Nothing lies here: only the key itself is left to be freed.
            let mut conn = desk.db.conn().await?;
            let tx = conn.tx().await?;
            buslog::lock_position_any(&tx, handler, &parked.stream, parked.part).await?;
            released.unparked =
                dlq::unpark_if_empty(&tx, handler, &parked.stream, key).await? || released.applied > 0;
            tx.commit().await?;
            return Ok(released);
        };
        match settle_head(desk, &first, &Step { by, reason, resolution: "released" }).await? {
            Settled::Applied(unparked) => {
                released.applied += 1;
                if unparked {
                    released.unparked = true;
                    return Ok(released);
                }
            }
            Settled::Empty | Settled::NotFirst => {}
            Settled::Failed(error) => {
                released.failed = Some((first.id, error));
                return Ok(released);
            }
        }
    }
}

/// Settles a letter without its effect. The reason is kept with who gave it.
pub async fn discard(db: &Db, id: i64, by: &str, reason: &str) -> Result<(), BusError> {
    let missing = |hint| BusError::Misuse { what: format!("dead letter {id} cannot be discarded"), hint };
    if reason.trim().is_empty() {
        return Err(missing("say why: a discarded event never has its effect"));
    }
    let mut conn = db.conn().await?;
    let letter = dlq::show(&conn, id).await?.ok_or_else(|| missing("there is none with that id"))?;
    let tx = conn.tx().await?;
    buslog::lock_position_any(&tx, &letter.handler, &letter.stream, letter.part).await?;
    if !dlq::resolve(&tx, id, "discarded", by, Some(reason)).await? {
        return Err(missing("it is settled already"));
    }
    dlq::unpark_if_empty(&tx, &letter.handler, &letter.stream, &letter.partition_key).await?;
    let detail = json!({"event_id": letter.event_id, "pseq": letter.pseq, "key": letter.partition_key});
    dlq::audit(&tx, by, "dlq.discard", &target(&letter), Some(reason), &detail).await?;
    tx.commit().await?;
    Ok(())
}

fn target(letter: &DeadLetter) -> String {
    format!("{}/{}", letter.handler, letter.id)
}

struct Step<'a> {
    by: &'a str,
    reason: Option<&'a str>,
    resolution: &'static str,
}

enum Settled {
    /// Its effect happened; true if that freed the key.
    Applied(bool),
    /// Nothing of the key is left.
    Empty,
    /// Another letter of the key comes first.
    NotFirst,
    /// The handler failed again.
    Failed(String),
}

/// Applies `letter` if it is the first open one of its key: effect, inbox, letter, key and audit in one
/// transaction, after what the handler prepares before one.
async fn settle_head(desk: &Desk, of: &DeadLetter, step: &Step<'_>) -> Result<Settled, BusError> {
    let handler = desk.handler(&of.handler)?;
    let (kind, stream, part, key) =
        (of.handler.as_str(), of.stream.as_str(), of.part, of.partition_key.as_str());
    let mut conn = desk.db.conn().await?;
    let event = match prepared(desk, handler.as_ref(), of).await {
        Ok(event) => event,
        Err(error) => return failed_again(&mut conn, of.id, error).await,
    };
    let tx = conn.tx().await?;
    buslog::lock_position_any(&tx, kind, stream, part).await?;
    let Some(letter) = dlq::lock_head(&tx, kind, stream, key).await? else {
        dlq::unpark_if_empty(&tx, kind, stream, key).await?;
        tx.commit().await?;
        return Ok(Settled::Empty);
    };
    if letter.id != of.id {
        return Ok(Settled::NotFirst);
    }
    if let Err(error) = apply_letter(handler.as_ref(), &tx, event).await {
        tx.rollback().await?;
        return failed_again(&mut conn, letter.id, error).await;
    }
    dlq::resolve(&tx, letter.id, step.resolution, step.by, step.reason).await?;
    let unparked = dlq::unpark_if_empty(&tx, kind, stream, key).await?;
    let detail = json!({"event_id": letter.event_id, "pseq": letter.pseq, "key": key});
    let action = format!("dlq.{}", step.resolution);
    dlq::audit(&tx, step.by, &action, &target(&letter), step.reason, &detail).await?;
    tx.commit().await?;
    Ok(Settled::Applied(unparked))
}

/// Counts one more failure, unless it was the database's.
async fn failed_again(
    conn: &mut tidemark_store::Conn,
    letter: i64,
    error: HandleError,
) -> Result<Settled, BusError> {
    match error {
        HandleError::Store(error) if error.verdict() != tidemark_store::Verdict::Fatal => Err(error.into()),
        error => {
            let chain = chain_of(&error);
            let text = chain.join(": ");
            let tx = conn.tx().await?;
            dlq::failed_again(&tx, letter, &text, &chain).await?;
            tx.commit().await?;
            Ok(Settled::Failed(text))
        }
    }
}

/// The event of a letter, checked, and what its handler does outside a transaction done.
async fn prepared(desk: &Desk, handler: &dyn Handler, letter: &DeadLetter) -> Result<Delivered, HandleError> {
    let envelope: Envelope =
        serde_json::from_value(letter.envelope.clone()).map_err(|error| HandleError::Poison {
            reason: "the letter holds no envelope".to_owned(),
            source: Some(Box::new(error)),
        })?;
    desk.registry.validate(&envelope).map_err(|error| HandleError::Poison {
        reason: "it does not fit its schema".to_owned(),
        source: Some(Box::new(error)),
    })?;
    let event = Delivered {
        envelope,
        stream: letter.stream.clone(),
        part: letter.part,
        pseq: letter.pseq,
        replay: false, // It never had its effect.
    };
    prepare_handler(handler, std::slice::from_ref(&event), &[]).await?;
    Ok(event)
}

async fn apply_letter(
    handler: &dyn Handler,
    tx: &tidemark_store::Tx<'_>,
    event: Delivered,
) -> Result<(), HandleError> {
    let row = event.inbox_row();
    let due = inbox::resurrect(tx, handler.kind(), row.event_id, row.event_day).await?
        // Retention may have dropped the inbox row; then the claim decides.
        || !inbox::claim(tx, handler.kind(), &event.stream, event.part, &[row]).await?.is_empty();
    if due { run_handler(handler, tx, &[event]).await } else { Ok(()) }
}

impl From<tidemark_store::outbox::SchemaError> for BusError {
    fn from(error: tidemark_store::outbox::SchemaError) -> Self {
        Self::Misuse { what: error.to_string(), hint: "compare the payload with its schema" }
    }
}

/// Depth of the DLQ per handler.
pub async fn depths(db: &Db) -> Result<Vec<(String, u64)>, StoreError> {
    dlq::depths(&db.conn().await?).await
}
