//! system.dlq and parked keys. A row is self-contained: envelope, error chain, attempts, versions. A key
//! with a dead letter is parked: its later events lie behind it in order until it is released (pitfall B27).

use serde_json::Value;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::db::{Conn, StoreError, Tx};

/// Longest error text kept.
const ERROR_CHARS_MAX: usize = 4_000;

/// Why a row is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The handler failed too often, or said it never will succeed.
    Poison,
    /// An earlier event of the same key lies here.
    Follower,
    /// Its payload does not fit its schema, or nobody knows its version.
    Schema,
}

impl Kind {
    /// The label in the table.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Poison => "poison",
            Self::Follower => "follower",
            Self::Schema => "schema",
        }
    }
}

/// A new row.
#[derive(Debug, Clone)]
pub struct NewDeadLetter {
    /// The event.
    pub event_id: Uuid,
    /// Its subject.
    pub topic: String,
    /// Its number.
    pub pseq: i64,
    /// Its key.
    pub partition_key: String,
    /// The whole envelope.
    pub envelope: Value,
    /// Why it is here.
    pub kind: Kind,
    /// The error in one line.
    pub error: String,
    /// The error and its causes.
    pub chain: Vec<String>,
    /// Deliveries so far.
    pub attempts: u32,
    /// Versions of what handled it.
    pub versions: Value,
}

/// A row as it is stored.
#[derive(Debug, Clone, PartialEq)]
pub struct DeadLetter {
    /// Row id.
    pub id: i64,
    /// The handler.
    pub handler: String,
    /// The subject.
    pub topic: String,
    /// The stream.
    pub stream: String,
    /// The partition.
    pub part: u16,
    /// The number.
    pub pseq: i64,
    /// The key.
    pub partition_key: String,
    /// The event.
    pub event_id: Uuid,
    /// The whole envelope.
    pub envelope: Value,
    /// `poison`, `follower` or `schema`.
    pub kind: String,
    /// The error in one line.
    pub error: String,
    /// The error and its causes.
    pub chain: Vec<String>,
    /// Deliveries so far.
    pub attempts: u32,
    /// Versions of what handled it.
    pub versions: Value,
    /// When it came here.
    pub failed_at: OffsetDateTime,
    /// When it was settled.
    pub resolved_at: Option<OffsetDateTime>,
    /// `retried`, `released` or `discarded`.
    pub resolution: Option<String>,
}

const INSERT: &str = "
    insert into system.dlq
        (handler_kind, source_topic, stream, part, pseq, partition_key, event_id, envelope, kind, error,
         error_chain, attempts, versions)
    values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
    on conflict (handler_kind, event_id) do nothing";

/// Writes dead letters, in order.
pub async fn insert(
    tx: &Tx<'_>,
    handler: &str,
    stream: &str,
    part: u16,
    letters: &[NewDeadLetter],
) -> Result<(), StoreError> {
    let part = i16::try_from(part).unwrap_or(i16::MAX);
    for letter in letters {
        let attempts = i32::try_from(letter.attempts).unwrap_or(i32::MAX);
        let chain: Vec<String> = letter.chain.iter().map(|line| cut(line)).collect();
        tx.execute(
            "write a dead letter",
            INSERT,
            &[
                &handler,
                &letter.topic,
                &stream,
                &part,
                &letter.pseq,
                &letter.partition_key,
                &letter.event_id,
                &letter.envelope,
                &letter.kind.as_str(),
                &cut(&letter.error),
                &chain,
                &attempts,
                &letter.versions,
            ],
        )
        .await?;
    }
    Ok(())
}

/// Bounded, and without NUL, which Postgres refuses.
fn cut(text: &str) -> String {
    text.chars().filter(|char| *char != '\0').take(ERROR_CHARS_MAX).collect()
}

const PARK: &str = "
    insert into system.parked_keys (handler_kind, stream, part, partition_key, pseq)
    values ($1, $2, $3, $4, $5) on conflict do nothing";

/// Parks a key.
pub async fn park(
    tx: &Tx<'_>,
    handler: &str,
    stream: &str,
    part: u16,
    key: &str,
    pseq: i64,
) -> Result<(), StoreError> {
    let part = i16::try_from(part).unwrap_or(i16::MAX);
    tx.execute("park a key", PARK, &[&handler, &stream, &part, &key, &pseq]).await?;
    Ok(())
}

const PARKED: &str = "
    select partition_key from system.parked_keys where handler_kind = $1 and stream = $2 and part = $3";

/// Parked keys of one partition. Read it after the position is locked: keys change under that lock only.
pub async fn parked(tx: &Tx<'_>, handler: &str, stream: &str, part: u16) -> Result<Vec<String>, StoreError> {
    let part = i16::try_from(part).unwrap_or(i16::MAX);
    let rows = tx.query("read parked keys", PARKED, &[&handler, &stream, &part]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// A parked key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParkedKey {
    /// The handler.
    pub handler: String,
    /// The stream.
    pub stream: String,
    /// The partition.
    pub part: u16,
    /// The key.
    pub partition_key: String,
    /// Open dead letters of the key.
    pub open: u64,
}

const PARKED_KEYS: &str = "
    select k.handler_kind, k.stream, k.part, k.partition_key,
           (select count(*) from system.dlq d
            where d.handler_kind = k.handler_kind and d.partition_key = k.partition_key
              and d.stream = k.stream and d.resolved_at is null)
    from system.parked_keys k
    where ($1::text is null or k.handler_kind = $1) and ($2::text is null or k.partition_key = $2)
    order by k.handler_kind, k.stream, k.part, k.partition_key";

/// All parked keys, of one handler and of one key if given.
pub async fn parked_keys(
    conn: &Conn,
    handler: Option<&str>,
    key: Option<&str>,
) -> Result<Vec<ParkedKey>, StoreError> {
    let rows = conn.query("list parked keys", PARKED_KEYS, &[&handler, &key]).await?;
    Ok(rows
        .iter()
        .map(|row| ParkedKey {
            handler: row.get(0),
            stream: row.get(1),
            part: u16::try_from(row.get::<_, i16>(2)).unwrap_or(0),
            partition_key: row.get(3),
            open: u64::try_from(row.get::<_, i64>(4)).unwrap_or(0),
        })
        .collect())
}

const UNPARK_IF_EMPTY: &str = "
    delete from system.parked_keys k
    where k.handler_kind = $1 and k.stream = $2 and k.partition_key = $3
      and not exists (select from system.dlq d
                      where d.handler_kind = $1 and d.stream = $2 and d.partition_key = $3
                        and d.resolved_at is null)";

/// Takes a key out of the park when nothing of it lies here any more. The position must be locked.
pub async fn unpark_if_empty(
    tx: &Tx<'_>,
    handler: &str,
    stream: &str,
    key: &str,
) -> Result<bool, StoreError> {
    Ok(tx.execute("unpark a key", UNPARK_IF_EMPTY, &[&handler, &stream, &key]).await? > 0)
}

/// Which rows to look at. Empty fields do not restrict.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Of this handler.
    pub handler: Option<String>,
    /// Of this key.
    pub key: Option<String>,
    /// With this subject.
    pub topic: Option<String>,
    /// `poison`, `follower` or `schema`.
    pub kind: Option<String>,
    /// Not older than this.
    pub since: Option<OffsetDateTime>,
    /// With these row ids.
    pub ids: Option<Vec<i64>>,
    /// Settled ones too.
    pub resolved: bool,
}

macro_rules! columns {
    () => {
        "id, handler_kind, source_topic, stream, part, pseq, partition_key, event_id, envelope, kind, error, \
         error_chain, attempts, versions, failed_at, resolved_at, resolution"
    };
}
const LIST: &str = concat!(
    "select ",
    columns!(),
    " from system.dlq
    where ($1::text is null or handler_kind = $1)
      and ($2::text is null or partition_key = $2)
      and ($3::text is null or source_topic = $3)
      and ($4::text is null or kind = $4)
      and ($5::timestamptz is null or failed_at >= $5)
      and ($6::bigint[] is null or id = any($6))
      and ($7 or resolved_at is null)
    order by handler_kind, stream, partition_key, pseq, id
    limit $8"
);
const SHOW: &str = concat!("select ", columns!(), " from system.dlq where id = $1");
const LOCK_HEAD: &str = concat!(
    "select ",
    columns!(),
    " from system.dlq
    where handler_kind = $1 and stream = $2 and partition_key = $3 and resolved_at is null
    order by pseq, id limit 1 for update"
);
const LOCK_ONE: &str = concat!("select ", columns!(), " from system.dlq where id = $1 for update");

fn letter(row: &tokio_postgres::Row) -> DeadLetter {
    DeadLetter {
        id: row.get(0),
        handler: row.get(1),
        topic: row.get(2),
        stream: row.get(3),
        part: u16::try_from(row.get::<_, i16>(4)).unwrap_or(0),
        pseq: row.get(5),
        partition_key: row.get(6),
        event_id: row.get(7),
        envelope: row.get(8),
        kind: row.get(9),
        error: row.get(10),
        chain: row.get(11),
        attempts: u32::try_from(row.get::<_, i32>(12)).unwrap_or(0),
        versions: row.get(13),
        failed_at: row.get(14),
        resolved_at: row.get(15),
        resolution: row.get(16),
    }
}

/// Rows by key and number.
pub async fn list(conn: &Conn, filter: &Filter, limit: u32) -> Result<Vec<DeadLetter>, StoreError> {
    let rows = conn
        .query(
            "list dead letters",
            LIST,
            &[
                &filter.handler,
                &filter.key,
                &filter.topic,
                &filter.kind,
                &filter.since,
                &filter.ids,
                &filter.resolved,
                &i64::from(limit),
            ],
        )
        .await?;
    Ok(rows.iter().map(letter).collect())
}

/// One row.
pub async fn show(conn: &Conn, id: i64) -> Result<Option<DeadLetter>, StoreError> {
    Ok(conn.query_opt("read a dead letter", SHOW, &[&id]).await?.as_ref().map(letter))
}

/// Locks one row.
pub async fn lock(tx: &Tx<'_>, id: i64) -> Result<Option<DeadLetter>, StoreError> {
    Ok(tx.query_opt("lock a dead letter", LOCK_ONE, &[&id]).await?.as_ref().map(letter))
}

/// Locks the first open row of a key.
pub async fn lock_head(
    tx: &Tx<'_>,
    handler: &str,
    stream: &str,
    key: &str,
) -> Result<Option<DeadLetter>, StoreError> {
    let row =
        tx.query_opt("lock the first dead letter of a key", LOCK_HEAD, &[&handler, &stream, &key]).await?;
    Ok(row.as_ref().map(letter))
}

const RESOLVE: &str = "
    update system.dlq set resolved_at = now(), resolution = $2, resolved_by = $3, resolve_reason = $4
    where id = $1 and resolved_at is null";

/// Settles a row: `retried`, `released` or `discarded`.
pub async fn resolve(
    tx: &Tx<'_>,
    id: i64,
    resolution: &str,
    by: &str,
    reason: Option<&str>,
) -> Result<bool, StoreError> {
    Ok(tx.execute("settle a dead letter", RESOLVE, &[&id, &resolution, &by, &reason]).await? == 1)
}

const FAILED_AGAIN: &str =
    "update system.dlq set attempts = attempts + 1, error = $2, error_chain = $3 where id = $1";

/// Counts one more failed try of an operator.
pub async fn failed_again(tx: &Tx<'_>, id: i64, error: &str, chain: &[String]) -> Result<(), StoreError> {
    let chain: Vec<String> = chain.iter().map(|line| cut(line)).collect();
    tx.execute("count a failed retry", FAILED_AGAIN, &[&id, &cut(error), &chain]).await?;
    Ok(())
}

const DEPTHS: &str = "
    select handler_kind, count(*) from system.dlq where resolved_at is null group by handler_kind";

/// Open rows per handler.
pub async fn depths(conn: &Conn) -> Result<Vec<(String, u64)>, StoreError> {
    let rows = conn.query("count dead letters", DEPTHS, &[]).await?;
    Ok(rows.iter().map(|row| (row.get(0), u64::try_from(row.get::<_, i64>(1)).unwrap_or(0))).collect())
}

const AUDIT: &str =
    "insert into system.audit_log (actor, action, target, reason, detail) values ($1, $2, $3, $4, $5)";

/// Writes who did what to which target, in the transaction in which it happens.
pub async fn audit(
    tx: &Tx<'_>,
    actor: &str,
    action: &str,
    target: &str,
    reason: Option<&str>,
    detail: &Value,
) -> Result<(), StoreError> {
    tx.execute("write an audit row", AUDIT, &[&actor, &action, &target, &reason, detail]).await?;
    Ok(())
}

const BEGIN_REPLAY: &str = "
    insert into system.replays (id, handler_kind, requested_by, reason, selector, status)
    values ($1, $2, $3, $4, $5, 'running')";
const END_REPLAY: &str =
    "update system.replays set status = $2, events = $3, finished_at = now() where id = $1";

/// Records that a replay begins.
pub async fn begin_replay(
    tx: &Tx<'_>,
    id: &str,
    handler: &str,
    by: &str,
    reason: Option<&str>,
    selector: &Value,
) -> Result<(), StoreError> {
    tx.execute("record a replay", BEGIN_REPLAY, &[&id, &handler, &by, &reason, selector]).await?;
    Ok(())
}

/// Records how a replay ended: `done` or `failed`.
pub async fn end_replay(conn: &Conn, id: &str, status: &str, events: u64) -> Result<(), StoreError> {
    let events = i64::try_from(events).unwrap_or(i64::MAX);
    conn.execute("record the end of a replay", END_REPLAY, &[&id, &status, &events]).await?;
    Ok(())
}

/// A replay as it is recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplayRow {
    /// For which handler.
    pub handler: String,
    /// Who asked.
    pub requested_by: String,
    /// Why.
    pub reason: Option<String>,
    /// Which events.
    pub selector: Value,
    /// `running`, `done` or `failed`.
    pub status: String,
    /// Events handed to the handler.
    pub events: i64,
    /// When it began.
    pub created_at: OffsetDateTime,
    /// When it ended.
    pub finished_at: Option<OffsetDateTime>,
}

const REPLAY: &str = "
    select handler_kind, requested_by, reason, selector, status, events, created_at, finished_at
    from system.replays where id = $1";

/// One replay.
pub async fn replay(conn: &Conn, id: &str) -> Result<Option<ReplayRow>, StoreError> {
    let row = conn.query_opt("read a replay", REPLAY, &[&id]).await?;
    Ok(row.map(|row| ReplayRow {
        handler: row.get(0),
        requested_by: row.get(1),
        reason: row.get(2),
        selector: row.get(3),
        status: row.get(4),
        events: row.get(5),
        created_at: row.get(6),
        finished_at: row.get(7),
    }))
}
