//! Numbering, positions and leases of the backbone. The outbox is the log; system.bus_log gives each of its
//! rows a gapless number per (stream, part); consumers keep their position in the transaction of their
//! effect. Every owner is fenced by an epoch that grows with each claim (pitfall C36).

use std::time::Duration;

use time::{Date, OffsetDateTime};
use uuid::Uuid;

use crate::db::{Conn, StoreError, Tx};

fn small(part: u16) -> i16 {
    i16::try_from(part).unwrap_or(i16::MAX)
}

fn wide(part: i16) -> u16 {
    u16::try_from(part).unwrap_or(0)
}

fn seconds(ttl: Duration) -> f64 {
    ttl.as_secs_f64()
}

// ---------------------------------------------------------------------------------------------------------
// Day partitions

/// Tables partitioned by day, with the days made ahead. The inbox is partitioned by the event's own day;
/// days of long ago go to its default partition.
const DAILY: [&str; 3] = ["outbox_events", "bus_log", "inbox"];

/// Days made ahead: a night without this process must not fill a default partition.
const DAYS_AHEAD: i64 = 2;

const TODAY: &str = "select (now() at time zone 'utc')::date";
const RELATION_EXISTS: &str = "select to_regclass($1) is not null";

/// Makes the day partitions from today to two days ahead. Safe to call often and from several processes.
pub async fn ensure_partitions(conn: &Conn) -> Result<(), StoreError> {
    let today: Date = conn.query_one("read the day", TODAY, &[]).await?.get(0);
    for ahead in 0..=DAYS_AHEAD {
        let day = today + time::Duration::days(ahead);
        for table in DAILY {
            ensure_day(conn, table, day).await?;
        }
    }
    Ok(())
}

/// The name of a day's partition.
pub fn day_partition(table: &str, day: Date) -> String {
    format!("{table}_{:04}{:02}{:02}", day.year(), u8::from(day.month()), day.day())
}

async fn ensure_day(conn: &Conn, table: &str, day: Date) -> Result<(), StoreError> {
    let name = format!("system.{}", day_partition(table, day));
    if conn.query_one("look for a partition", RELATION_EXISTS, &[&name]).await?.get::<_, bool>(0) {
        return Ok(());
    }
    let next = day + time::Duration::days(1);
    // Only identifiers and dates of our own making. A short wait for the lock: events go to the default
    // partition meanwhile, and nobody queues behind us (pitfall A19). One message, so it is one transaction
    // that the server itself ends: a caller that goes away leaves no open transaction in the pool.
    // A day only grows and goes as a whole: it need not be vacuumed or sampled at every tenth of its growth,
    // and nobody asks for statistics of whole envelopes.
    let unsampled = match table {
        "outbox_events" => format!("; alter table {name} alter column envelope set statistics 0"),
        _ => String::new(),
    };
    let sql = format!(
        "set local lock_timeout = '1s'; \
         create table if not exists {name} partition of system.{table} for values from ('{day}') to ('{next}') \
         with (autovacuum_analyze_scale_factor = 1, autovacuum_vacuum_insert_scale_factor = 1){unsampled}"
    );
    match conn.batch("make a day partition", &sql).await {
        Ok(()) => Ok(()),
        Err(error) => {
            use tokio_postgres::error::SqlState;
            let harmless = [
                SqlState::DUPLICATE_TABLE,
                SqlState::UNIQUE_VIOLATION, // Another process made it at the same moment.
                SqlState::LOCK_NOT_AVAILABLE,
                SqlState::CHECK_VIOLATION, // The default partition already holds rows of that day.
                SqlState::T_R_DEADLOCK_DETECTED,
            ];
            if error.code().is_some_and(|code| harmless.contains(code)) {
                tracing::debug!(table, %day, %error, action = "ensure_partition", "The default partition serves this day.");
                return Ok(());
            }
            Err(error)
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// The relay

/// The highest number of one partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadOf {
    /// Which stream.
    pub stream: String,
    /// Which partition.
    pub part: u16,
    /// The highest number given.
    pub head: i64,
    /// The highest number the engine has acknowledged.
    pub published: i64,
}

/// What one numbering transaction did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NumberedRows {
    /// How many events got their number.
    pub rows: u64,
    /// New heads of the partitions that grew.
    pub heads: Vec<HeadOf>,
    /// When the oldest of them was written.
    pub oldest: Option<OffsetDateTime>,
    /// The window has more rows than fit in one transaction.
    pub more: bool,
}

const SYSTEM_IDENTIFIER: &str = "select system_identifier::text from pg_control_system()";
// Snapshot 3:3: sees nothing: xids below 3 are reserved. So the first window is everything there is.
const FIRST_CURSOR: &str = "
    insert into system.relay_cursor (id, snapshot, system_identifier) values (1, '3:3:', $1)
    on conflict (id) do nothing";
const CLAIM_RELAY: &str = "
    update system.relay_cursor
    set epoch = epoch + 1, owner = $1, lease_expires_at = now() + make_interval(secs => $2), updated_at = now(),
        session_key = $3
    where id = 1 and (lease_expires_at is null or lease_expires_at < now() or owner = $1
                      or (session_key is not null and not system.is_present(session_key)))
    returning epoch, system_identifier";
const RELEASE_RELAY: &str =
    "update system.relay_cursor set lease_expires_at = null, owner = null, session_key = null
     where id = 1 and epoch = $1";
const RENEW_RELAY: &str = "
    update system.relay_cursor
    set lease_expires_at = now() + make_interval(secs => $2), updated_at = now(),
        session_key = coalesce($3, session_key)
    where id = 1 and epoch = $1";
const LOCK_CURSOR: &str = "
    select snapshot, window_end, window_seq, floor_seq from system.relay_cursor
    where id = 1 and epoch = $1 for update";
const SNAPSHOT: &str = "select pg_current_snapshot()::text";
// `order by … limit 1` keeps this on the index also when the planner knows nothing of the table yet.
const HAS_ROWS: &str = "
    select (select xid from system.outbox_events
            where xid >= $1::text::xid8 and seq > $3 order by xid, seq limit 1) is not null
        or (select xid from system.outbox_events
            where xid = any($2::text[]::xid8[]) and seq > $3 order by xid, seq limit 1) is not null
        or exists (select from system.relay_cursor where window_end is not null)";
const PEEK_CURSOR: &str = "select snapshot, floor_seq from system.relay_cursor where id = 1 and epoch = $1";

// Two index lookups: everything at or above A's end, and what was in progress in A. Constants, not
// subselects, so that the plan keeps the index range (pitfall A12).
const NUMBER: &str = "
    with picked as materialized (
        select w.day, w.seq, w.stream, w.part, w.created_at from (
            select day, seq, stream, part, created_at from system.outbox_events
            where xid >= $1::text::xid8 and xid < $2::text::xid8
              and pg_visible_in_snapshot(xid, $3::text::pg_snapshot) and seq > $5
            union all
            select day, seq, stream, part, created_at from system.outbox_events
            where xid = any($4::text[]::xid8[])
              and pg_visible_in_snapshot(xid, $3::text::pg_snapshot) and seq > $5
        ) as w order by w.seq limit $6
    ), counted as (
        select stream, part, count(*) as rows from picked group by stream, part
    ), bumped as (
        insert into system.bus_partitions as p (stream, part, next_pseq, engine)
        select stream, part, rows + 1, $7 from counted order by stream, part
        on conflict (stream, part) do update set next_pseq = p.next_pseq + excluded.next_pseq - 1
        returning p.stream, p.part, p.next_pseq, p.published_pseq
    ), logged as (
        insert into system.bus_log (stream, part, pseq, outbox_day, outbox_seq)
        select k.stream, k.part,
               b.next_pseq - c.rows - 1 + row_number() over (partition by k.stream, k.part order by k.seq),
               k.day, k.seq
        from picked k
        join counted c on c.stream = k.stream and c.part = k.part
        join bumped b on b.stream = k.stream and b.part = k.part
    )
    select stream, part, next_pseq - 1, published_pseq,
           (select count(*) from picked), (select max(seq) from picked), (select min(created_at) from picked)
    from bumped";
// The clock and not `now()`: a large window may take longer than the lease.
const MOVE_CURSOR: &str = "
    update system.relay_cursor
    set snapshot = $2, window_end = $3, window_seq = $4, updated_at = now(),
        lease_expires_at = clock_timestamp() + make_interval(secs => $5)
    where id = 1 and epoch = $1";

/// This cluster's own name; a dump restored elsewhere has another one.
pub async fn system_identifier(conn: &Conn) -> Result<String, StoreError> {
    Ok(conn.query_one("read the cluster's identity", SYSTEM_IDENTIFIER, &[]).await?.get(0))
}

const LINEAGE: &str = "
    select s.system_identifier::text || '.' || c.timeline_id::text || '.' || d.oid::text
    from pg_control_system() s, pg_control_checkpoint() c, pg_database d where d.datname = current_database()";

/// Names this history of this database, in a few letters. A dump restored elsewhere, a point-in-time
/// recovery and a promoted replica are other histories: the numbers an engine holds of the old one may
/// belong to other events, so they must never be read as ours.
pub async fn lineage(conn: &Conn) -> Result<String, StoreError> {
    let name: String = conn.query_one("read the database's lineage", LINEAGE, &[]).await?.get(0);
    Ok(format!("{:08x}", tidemark_model::partition::fnv1a(name.as_bytes())))
}

/// The relay's right to number events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RelayLease {
    /// The fence.
    pub epoch: i64,
    /// The stored snapshot belongs to another cluster: call [`drain_restored`] first.
    pub restored: bool,
}

/// Claims the relay's lease; none if somebody else holds it. `present` is the key of the owner's session lock.
pub async fn claim_relay(
    conn: &Conn,
    owner: &str,
    ttl: Duration,
    present: Option<i64>,
) -> Result<Option<RelayLease>, StoreError> {
    let here = system_identifier(conn).await?;
    conn.execute("make the relay's cursor", FIRST_CURSOR, &[&here]).await?;
    let row = conn.query_opt("claim the relay", CLAIM_RELAY, &[&owner, &seconds(ttl), &present]).await?;
    Ok(row.map(|row| RelayLease { epoch: row.get(0), restored: row.get::<_, String>(1) != here }))
}

/// Gives the lease back, so that the next owner need not wait for it to run out.
pub async fn release_relay(conn: &Conn, epoch: i64) -> Result<(), StoreError> {
    conn.execute("release the relay", RELEASE_RELAY, &[&epoch]).await?;
    Ok(())
}

/// Keeps the lease; fails if somebody else has it. `present` as for [`claim_relay`]; none leaves what is stored.
pub async fn renew_relay(
    conn: &Conn,
    epoch: i64,
    ttl: Duration,
    present: Option<i64>,
) -> Result<(), StoreError> {
    match conn.execute("renew the relay's lease", RENEW_RELAY, &[&epoch, &seconds(ttl), &present]).await? {
        0 => Err(relay_fenced()),
        _ => Ok(()),
    }
}

fn relay_fenced() -> StoreError {
    StoreError::Fenced { what: "the relay's cursor".into() }
}

/// `xmin:xmax:xip,xip`
fn snapshot_parts(text: &str) -> Result<(&str, Vec<&str>), StoreError> {
    let mut fields = text.split(':');
    let (Some(_), Some(xmax), Some(open)) = (fields.next(), fields.next(), fields.next()) else {
        return Err(StoreError::Corrupt {
            what: "system.relay_cursor".into(),
            found: format!("snapshot {text:?}"),
            hint: "it is written by the relay only: restore the row from a backup",
        });
    };
    Ok((xmax, open.split(',').filter(|xid| !xid.is_empty()).collect()))
}

/// Whether there is anything to number, without a lock or a transaction id.
pub async fn has_unnumbered(conn: &Conn, epoch: i64) -> Result<bool, StoreError> {
    let cursor = conn.query_opt("read the relay's cursor", PEEK_CURSOR, &[&epoch]).await?;
    let cursor = cursor.ok_or_else(relay_fenced)?;
    let (snapshot, floor): (String, i64) = (cursor.get(0), cursor.get(1));
    let (xmax, open) = snapshot_parts(&snapshot)?;
    Ok(conn.query_one("look for new events", HAS_ROWS, &[&xmax, &open, &floor]).await?.get(0))
}

/// Numbers the next window (at most `limit` rows of it) and moves the cursor, all in `tx`.
pub async fn number(
    tx: &Tx<'_>,
    epoch: i64,
    engine: &str,
    limit: u32,
    ttl: Duration,
) -> Result<NumberedRows, StoreError> {
    let cursor = tx.query_opt("lock the relay's cursor", LOCK_CURSOR, &[&epoch]).await?;
    let cursor = cursor.ok_or_else(relay_fenced)?;
    let (start, end): (String, Option<String>) = (cursor.get(0), cursor.get(1));
    let (done, floor): (Option<i64>, i64) = (cursor.get(2), cursor.get(3));
    let end = match end {
        Some(end) => end,
        // After the lock, so that it can only be newer than the stored one.
        None => tx.query_one("take a snapshot", SNAPSHOT, &[]).await?.get(0),
    };
    let (start_max, start_open) = snapshot_parts(&start)?;
    let (end_max, _) = snapshot_parts(&end)?;
    let after = done.unwrap_or(0).max(floor);
    let rows = tx
        .query(
            "number events",
            NUMBER,
            &[&start_max, &end_max, &end, &start_open, &after, &i64::from(limit), &engine],
        )
        .await?;
    let mut numbered = NumberedRows::default();
    let mut last_seq = None;
    for row in &rows {
        let count: i64 = row.get(4);
        numbered.rows = u64::try_from(count).unwrap_or(0);
        last_seq = row.get::<_, Option<i64>>(5);
        numbered.oldest = row.get(6);
        numbered.heads.push(HeadOf {
            stream: row.get(0),
            part: wide(row.get(1)),
            head: row.get(2),
            published: row.get(3),
        });
    }
    numbered.more = numbered.rows >= u64::from(limit);
    let (snapshot, window_end, window_seq) =
        if numbered.more { (&start, Some(&end), last_seq) } else { (&end, None, None) };
    let moved = tx
        .execute(
            "move the relay's cursor",
            MOVE_CURSOR,
            &[&epoch, snapshot, &window_end, &window_seq, &seconds(ttl)],
        )
        .await?;
    if moved == 0 { Err(relay_fenced()) } else { Ok(numbered) }
}

// `share` waits for open writers and keeps new ones out until commit.
const STOP_WRITERS: &str = "lock table system.outbox_events in share mode";
const NUMBER_RESTORED: &str = "
    with picked as materialized (
        select o.day, o.seq, o.stream, o.part from system.outbox_events o
        where not exists (select from system.bus_log l where l.outbox_day = o.day and l.outbox_seq = o.seq)
    ), counted as (
        select stream, part, count(*) as rows from picked group by stream, part
    ), bumped as (
        insert into system.bus_partitions as p (stream, part, next_pseq, engine)
        select stream, part, rows + 1, $1 from counted order by stream, part
        on conflict (stream, part) do update set next_pseq = p.next_pseq + excluded.next_pseq - 1
        returning p.stream, p.part, p.next_pseq
    )
    insert into system.bus_log (stream, part, pseq, outbox_day, outbox_seq)
    select k.stream, k.part,
           b.next_pseq - c.rows - 1 + row_number() over (partition by k.stream, k.part order by k.seq),
           k.day, k.seq
    from picked k
    join counted c on c.stream = k.stream and c.part = k.part
    join bumped b on b.stream = k.stream and b.part = k.part";
const ADOPT_CLUSTER: &str = "
    update system.relay_cursor
    set snapshot = pg_current_snapshot()::text, window_end = null, window_seq = null,
        floor_seq = coalesce((select max(seq) from system.outbox_events), 0),
        system_identifier = $2, updated_at = now()
    where id = 1 and epoch = $1";

/// After a dump was restored into another cluster its xids mean nothing here: numbers what is left by `seq`
/// with writers stopped, and starts windows anew above it (pitfall A17). Gives the number of events.
pub async fn drain_restored(tx: &Tx<'_>, epoch: i64, engine: &str) -> Result<u64, StoreError> {
    tx.query_opt("lock the relay's cursor", LOCK_CURSOR, &[&epoch]).await?.ok_or_else(relay_fenced)?;
    tx.batch("stop writers of the outbox", STOP_WRITERS).await?;
    let rows = tx.execute("number a restored outbox", NUMBER_RESTORED, &[&engine]).await?;
    let here: String = tx.query_one("read the cluster's identity", SYSTEM_IDENTIFIER, &[]).await?.get(0);
    match tx.execute("adopt a restored outbox", ADOPT_CLUSTER, &[&epoch, &here]).await? {
        0 => Err(relay_fenced()),
        _ => Ok(rows),
    }
}

const HEADS: &str = "select stream, part, next_pseq - 1, published_pseq from system.bus_partitions";

/// Heads of all partitions.
pub async fn heads(conn: &Conn) -> Result<Vec<HeadOf>, StoreError> {
    let rows = conn.query("read the heads of the log", HEADS, &[]).await?;
    Ok(rows
        .iter()
        .map(|row| HeadOf {
            stream: row.get(0),
            part: wide(row.get(1)),
            head: row.get(2),
            published: row.get(3),
        })
        .collect())
}

const SET_PUBLISHED: &str = "
    update system.bus_partitions p
    set published_pseq = v.pseq, engine = $5
    from unnest($2::text[], $3::smallint[], $4::bigint[]) as v (stream, part, pseq)
    where p.stream = v.stream and p.part = v.part
      and exists (select from system.relay_cursor where id = 1 and epoch = $1)";

/// Records what the engine has acknowledged. Fenced by the relay's epoch.
pub async fn set_published(
    conn: &Conn,
    epoch: i64,
    engine: &str,
    acknowledged: &[HeadOf],
) -> Result<(), StoreError> {
    if acknowledged.is_empty() {
        return Ok(());
    }
    let streams: Vec<&str> = acknowledged.iter().map(|at| at.stream.as_str()).collect();
    let parts: Vec<i16> = acknowledged.iter().map(|at| small(at.part)).collect();
    let pseqs: Vec<i64> = acknowledged.iter().map(|at| at.published).collect();
    match conn
        .execute("record published events", SET_PUBLISHED, &[&epoch, &streams, &parts, &pseqs, &engine])
        .await?
    {
        0 => Err(relay_fenced()),
        _ => Ok(()),
    }
}

const RESET_PUBLISHED: &str = "
    update system.bus_partitions set published_pseq = 0, engine = $2
    where engine <> $2 and exists (select from system.relay_cursor where id = 1 and epoch = $1)";

/// Another engine than the one that acknowledged: it has seen nothing yet. Gives the partitions changed.
pub async fn adopt_engine(conn: &Conn, epoch: i64, engine: &str) -> Result<u64, StoreError> {
    conn.execute("adopt another engine", RESET_PUBLISHED, &[&epoch, &engine]).await
}

// ---------------------------------------------------------------------------------------------------------
// Reading the log

/// One numbered event as it lies in the outbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogRow {
    /// Its number.
    pub pseq: i64,
    /// Its id.
    pub event_id: Uuid,
    /// When it got its number.
    pub numbered_at: OffsetDateTime,
    /// The envelope's JSON text.
    pub envelope: String,
}

// `offset 0` keeps the planner from turning the point lookups into a join over the whole outbox.
const READ: &str = "
    select l.pseq, o.id, l.numbered_at, o.envelope
    from (select pseq, outbox_day, outbox_seq, numbered_at from system.bus_log
          where stream = $1 and part = $2 and pseq > $3 order by pseq limit $4) as l
    cross join lateral (
        select e.id, e.envelope::text as envelope from system.outbox_events e
        where e.day = l.outbox_day and e.seq = l.outbox_seq offset 0) as o
    order by l.pseq";

/// At most `limit` events of one partition after `after`, in order.
pub async fn read(
    conn: &Conn,
    stream: &str,
    part: u16,
    after: i64,
    limit: u32,
) -> Result<Vec<LogRow>, StoreError> {
    let rows = conn.query("read the log", READ, &[&stream, &small(part), &after, &i64::from(limit)]).await?;
    Ok(rows
        .iter()
        .map(|row| LogRow {
            pseq: row.get(0),
            event_id: row.get(1),
            numbered_at: row.get(2),
            envelope: row.get(3),
        })
        .collect())
}

const NUMBERED_AT: &str = "
    select numbered_at from system.bus_log where stream = $1 and part = $2 and pseq > $3 order by pseq limit 1";

/// When the first event after `after` got its number, if there is one.
pub async fn numbered_at(
    conn: &Conn,
    stream: &str,
    part: u16,
    after: i64,
) -> Result<Option<OffsetDateTime>, StoreError> {
    let row = conn.query_opt("look up a number", NUMBERED_AT, &[&stream, &small(part), &after]).await?;
    Ok(row.map(|row| row.get(0)))
}

const AFTER_TIME: &str = "
    select coalesce(max(pseq), 0) from system.bus_log where stream = $1 and part = $2 and numbered_at < $3";

/// The last number given before `at`: reading after it starts with that time.
pub async fn pseq_before(
    conn: &Conn,
    stream: &str,
    part: u16,
    at: OffsetDateTime,
) -> Result<i64, StoreError> {
    Ok(conn.query_one("look up a time", AFTER_TIME, &[&stream, &small(part), &at]).await?.get(0))
}

const STREAM_PARTS: &str = "select parts from system.bus_streams where stream = $1";

/// Recorded partitions of a stream; none before its first event.
pub async fn stream_parts(conn: &Conn, stream: &str) -> Result<Option<u16>, StoreError> {
    let row = conn.query_opt("read a stream's partitions", STREAM_PARTS, &[&stream]).await?;
    Ok(row.map(|row| wide(row.get(0))))
}

// ---------------------------------------------------------------------------------------------------------
// Consumers

const DECLARE_CONSUMER: &str = "
    insert into system.consumers (handler_kind, subjects, side_effects) values ($1, $2, $3)
    on conflict (handler_kind) do update set subjects = excluded.subjects, side_effects = excluded.side_effects";
const DECLARE_POSITIONS: &str = "
    insert into system.consumer_positions (handler_kind, stream, part)
    select $1, $2, part from generate_series(0, $3::int - 1) as part
    on conflict do nothing";

/// Declares a handler: retention keeps what it has not read. Its positions start at the oldest event.
pub async fn declare_consumer(
    tx: &Tx<'_>,
    handler: &str,
    stream: &str,
    parts: u16,
    subjects: &[String],
    side_effects: bool,
) -> Result<(), StoreError> {
    tx.execute("declare a consumer", DECLARE_CONSUMER, &[&handler, &subjects, &side_effects]).await?;
    tx.execute("declare positions", DECLARE_POSITIONS, &[&handler, &stream, &i32::from(parts)]).await?;
    Ok(())
}

const CLAIM_POSITIONS: &str = "
    update system.consumer_positions p
    set epoch = epoch + 1, owner = $4, lease_expires_at = now() + make_interval(secs => $5), updated_at = now(),
        session_key = $6
    where handler_kind = $1 and stream = $2 and part = any($3)
      and (owner is null or lease_expires_at is null or lease_expires_at < now() or owner = $4
           or (session_key is not null and not system.is_present(session_key)))
    returning part, pseq, epoch";

/// The right to move one position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PositionLease {
    /// Of which partition.
    pub part: u16,
    /// Everything at or below has its effect.
    pub pseq: i64,
    /// The fence.
    pub epoch: i64,
}

/// Who claims.
#[derive(Debug, Clone, Copy)]
pub struct Claimant<'a> {
    /// Its name.
    pub owner: &'a str,
    /// How long a lease lives without a sign of its owner.
    pub ttl: Duration,
    /// The key of its session lock, if it shows its life so.
    pub present: Option<i64>,
}

/// Claims those of `parts` that nobody alive holds.
pub async fn claim_positions(
    conn: &Conn,
    handler: &str,
    stream: &str,
    parts: &[u16],
    by: Claimant<'_>,
) -> Result<Vec<PositionLease>, StoreError> {
    if parts.is_empty() {
        return Ok(Vec::new());
    }
    let parts: Vec<i16> = parts.iter().map(|part| small(*part)).collect();
    let rows = conn
        .query(
            "claim positions",
            CLAIM_POSITIONS,
            &[&handler, &stream, &parts, &by.owner, &seconds(by.ttl), &by.present],
        )
        .await?;
    Ok(rows
        .iter()
        .map(|row| PositionLease { part: wide(row.get(0)), pseq: row.get(1), epoch: row.get(2) })
        .collect())
}

const JOIN_MEMBERS: &str = "
    insert into system.consumer_members (handler_kind, owner, session_key, expires_at)
    values ($1, $2, $3, now() + make_interval(secs => $4))
    on conflict (handler_kind, owner) do update
        set session_key = excluded.session_key, expires_at = excluded.expires_at";
const FORGET_MEMBERS: &str = "
    delete from system.consumer_members where handler_kind = $1 and expires_at < now() - interval '1 day'";
const MEMBERS: &str = "
    select owner from system.consumer_members
    where handler_kind = $1 and expires_at > now() and (session_key is null or system.is_present(session_key))
    order by owner";
const LEAVE_MEMBERS: &str = "delete from system.consumer_members where handler_kind = $1 and owner = $2";
// Each session is looked for once, however many partitions it holds: that reads the list of all locks.
const HELD: &str = "
    with sessions as materialized (
        select distinct session_key from system.consumer_positions
        where handler_kind = $1 and stream = $2 and session_key is not null)
    select part, owner, epoch from system.consumer_positions
    where handler_kind = $1 and stream = $2 and owner is not null and lease_expires_at > now()
      and (session_key is null
           or session_key in (select s.session_key from sessions s where system.is_present(s.session_key)))";

/// Says that `by` wants partitions of `handler`.
pub async fn join_members(conn: &Conn, handler: &str, by: Claimant<'_>) -> Result<(), StoreError> {
    conn.execute(
        "join a handler's members",
        JOIN_MEMBERS,
        &[&handler, &by.owner, &by.present, &seconds(by.ttl)],
    )
    .await?;
    conn.execute("forget members of long ago", FORGET_MEMBERS, &[&handler]).await?;
    Ok(())
}

/// Everybody alive who wants partitions of `handler`, by name.
pub async fn members(conn: &Conn, handler: &str) -> Result<Vec<String>, StoreError> {
    let rows = conn.query("read a handler's members", MEMBERS, &[&handler]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// Takes `owner` out of the members of `handler`.
pub async fn leave_members(conn: &Conn, handler: &str, owner: &str) -> Result<(), StoreError> {
    conn.execute("leave a handler's members", LEAVE_MEMBERS, &[&handler, &owner]).await?;
    Ok(())
}

/// A partition that somebody alive holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldPart {
    /// Which.
    pub part: u16,
    /// Who.
    pub owner: String,
    /// Under which fence.
    pub epoch: i64,
}

/// Partitions of a handler's stream that are held.
pub async fn held_parts(conn: &Conn, handler: &str, stream: &str) -> Result<Vec<HeldPart>, StoreError> {
    let rows = conn.query("read held partitions", HELD, &[&handler, &stream]).await?;
    Ok(rows
        .iter()
        .map(|row| HeldPart { part: wide(row.get(0)), owner: row.get(1), epoch: row.get(2) })
        .collect())
}

/// Names one held lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldPosition {
    /// The handler.
    pub handler: String,
    /// The stream.
    pub stream: String,
    /// The partition.
    pub part: u16,
    /// The fence.
    pub epoch: i64,
}

// A locked row belongs to a batch that is being applied, and moving the position renews the lease. Waiting for it
// here, with other rows locked already, would make all partitions wait for the slowest.
const RENEW_POSITIONS: &str = "
    with free as (
        select p.handler_kind, p.stream, p.part
          from system.consumer_positions p
          join unnest($1::text[], $2::text[], $3::smallint[], $4::bigint[]) as v (handler_kind, stream, part, epoch)
            on p.handler_kind = v.handler_kind and p.stream = v.stream and p.part = v.part and p.epoch = v.epoch
           for update of p skip locked)
    update system.consumer_positions p
    set lease_expires_at = now() + make_interval(secs => $5)
    from free f
    where p.handler_kind = f.handler_kind and p.stream = f.stream and p.part = f.part";
const RELEASE_POSITIONS: &str = "
    update system.consumer_positions p
    set lease_expires_at = null, owner = null, session_key = null
    from unnest($1::text[], $2::text[], $3::smallint[], $4::bigint[]) as v (handler_kind, stream, part, epoch)
    where p.handler_kind = v.handler_kind and p.stream = v.stream and p.part = v.part and p.epoch = v.epoch";

type HeldColumns<'a> = (Vec<&'a str>, Vec<&'a str>, Vec<i16>, Vec<i64>);

fn held_columns(held: &[HeldPosition]) -> HeldColumns<'_> {
    (
        held.iter().map(|lease| lease.handler.as_str()).collect(),
        held.iter().map(|lease| lease.stream.as_str()).collect(),
        held.iter().map(|lease| small(lease.part)).collect(),
        held.iter().map(|lease| lease.epoch).collect(),
    )
}

/// Keeps many leases with one statement. Those lost meanwhile are not touched.
pub async fn renew_positions(conn: &Conn, held: &[HeldPosition], ttl: Duration) -> Result<u64, StoreError> {
    if held.is_empty() {
        return Ok(0);
    }
    let (handlers, streams, parts, epochs) = held_columns(held);
    conn.execute(
        "renew leases of positions",
        RENEW_POSITIONS,
        &[&handlers, &streams, &parts, &epochs, &seconds(ttl)],
    )
    .await
}

/// Gives leases back.
pub async fn release_positions(conn: &Conn, held: &[HeldPosition]) -> Result<u64, StoreError> {
    if held.is_empty() {
        return Ok(0);
    }
    let (handlers, streams, parts, epochs) = held_columns(held);
    conn.execute("release leases of positions", RELEASE_POSITIONS, &[&handlers, &streams, &parts, &epochs])
        .await
}

const LOCK_POSITION: &str = "
    select pseq from system.consumer_positions
    where handler_kind = $1 and stream = $2 and part = $3 and epoch = $4 for update";
const LOCK_POSITION_ANY: &str = "
    select pseq from system.consumer_positions
    where handler_kind = $1 and stream = $2 and part = $3 for update";
const MOVE_POSITION: &str = "
    update system.consumer_positions
       set pseq = $5, updated_at = now(),
           lease_expires_at = greatest(lease_expires_at, clock_timestamp() + make_interval(secs => $6))
    where handler_kind = $1 and stream = $2 and part = $3 and epoch = $4 and pseq < $5";

fn position_fenced(handler: &str, stream: &str, part: u16) -> StoreError {
    StoreError::Fenced { what: format!("the position of {handler} in {stream}.{part}") }
}

/// Locks a position for this transaction and gives it; fails if the lease is no longer ours.
pub async fn lock_position(
    tx: &Tx<'_>,
    handler: &str,
    stream: &str,
    part: u16,
    epoch: i64,
) -> Result<i64, StoreError> {
    let row =
        tx.query_opt("lock a position", LOCK_POSITION, &[&handler, &stream, &small(part), &epoch]).await?;
    row.map(|row| row.get(0)).ok_or_else(|| position_fenced(handler, stream, part))
}

const POSITION: &str = "
    select pseq from system.consumer_positions where handler_kind = $1 and stream = $2 and part = $3";

/// Where a handler is in one partition; none if it never declared itself.
pub async fn position(
    conn: &Conn,
    handler: &str,
    stream: &str,
    part: u16,
) -> Result<Option<i64>, StoreError> {
    let row = conn.query_opt("read a position", POSITION, &[&handler, &stream, &small(part)]).await?;
    Ok(row.map(|row| row.get(0)))
}

/// Locks a position whoever holds its lease, so that an operator's work and live batches exclude each other.
pub async fn lock_position_any(
    tx: &Tx<'_>,
    handler: &str,
    stream: &str,
    part: u16,
) -> Result<Option<i64>, StoreError> {
    let row = tx.query_opt("lock a position", LOCK_POSITION_ANY, &[&handler, &stream, &small(part)]).await?;
    Ok(row.map(|row| row.get(0)))
}

/// Moves a locked position of ours forward, and renews its lease.
pub async fn move_position(
    tx: &Tx<'_>,
    handler: &str,
    stream: &str,
    part: u16,
    epoch: i64,
    pseq: i64,
    ttl: Duration,
) -> Result<(), StoreError> {
    let seconds = ttl.as_secs_f64();
    let moved = tx
        .execute(
            "move a position",
            MOVE_POSITION,
            &[&handler, &stream, &small(part), &epoch, &pseq, &seconds],
        )
        .await?;
    if moved == 0 { Err(position_fenced(handler, stream, part)) } else { Ok(()) }
}

/// Where one handler is in one partition, and how far the log goes.
#[derive(Debug, Clone, PartialEq)]
pub struct ConsumerLag {
    /// The handler.
    pub handler: String,
    /// The stream.
    pub stream: String,
    /// The partition.
    pub part: u16,
    /// Its position.
    pub pseq: i64,
    /// The highest number given.
    pub head: i64,
    /// How long the oldest event it has not handled has had its number; zero when there is none.
    pub lag_seconds: f64,
}

const LAGS: &str = "
    select c.handler_kind, c.stream, c.part, c.pseq, coalesce(b.next_pseq - 1, 0),
           coalesce(extract(epoch from now() - (
               select l.numbered_at from system.bus_log l
               where l.stream = c.stream and l.part = c.part and l.pseq > c.pseq order by l.pseq limit 1
           )), 0)::float8
    from system.consumer_positions c
    left join system.bus_partitions b on b.stream = c.stream and b.part = c.part
    order by c.handler_kind, c.stream, c.part";

/// The lag of every declared handler.
pub async fn consumer_lags(conn: &Conn) -> Result<Vec<ConsumerLag>, StoreError> {
    let rows = conn.query("read consumer lags", LAGS, &[]).await?;
    Ok(rows
        .iter()
        .map(|row| ConsumerLag {
            handler: row.get(0),
            stream: row.get(1),
            part: wide(row.get(2)),
            pseq: row.get(3),
            head: row.get(4),
            lag_seconds: row.get::<_, f64>(5).max(0.0),
        })
        .collect())
}

// ---------------------------------------------------------------------------------------------------------
// Retention

/// One day's partition of one table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Day {
    /// `outbox_events`, `bus_log` or `inbox`.
    pub table: &'static str,
    /// The day.
    pub day: Date,
}

/// The database's day.
pub async fn today(conn: &Conn) -> Result<Date, StoreError> {
    Ok(conn.query_one("read the day", TODAY, &[]).await?.get(0))
}

const DAYS: &str = "
    select to_date(right(c.relname, 8), 'YYYYMMDD')
    from pg_inherits i join pg_class c on c.oid = i.inhrelid
    where i.inhparent = ('system.' || $1::text)::regclass and c.relname ~ ('^' || $1::text || '_[0-9]{8}$')
    order by 1";

/// Days that have a partition of `table`.
pub async fn days(conn: &Conn, table: &str) -> Result<Vec<Date>, StoreError> {
    let rows = conn.query("list day partitions", DAYS, &[&table]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

const CLASSES: &str = "select distinct retention_class from system.outbox_events where day = $1";

/// Retention classes of a day's events.
pub async fn classes_of(conn: &Conn, day: Date) -> Result<Vec<String>, StoreError> {
    let rows = conn.query("read retention classes", CLASSES, &[&day]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

const UNNUMBERED_ON: &str = "
    select exists (
        select from system.outbox_events o where o.day = $1
          and not exists (select from system.bus_log l where l.outbox_day = $1 and l.outbox_seq = o.seq))";

/// Whether a day has events without a number.
pub async fn has_unnumbered_on(conn: &Conn, day: Date) -> Result<bool, StoreError> {
    Ok(conn.query_one("look for events without a number", UNNUMBERED_ON, &[&day]).await?.get(0))
}

const WHO_NEEDS: &str = "
    with tops as (
        select stream, part, max(pseq) as top from system.bus_log where outbox_day = $1 group by stream, part
    )
    select c.handler_kind from tops t
    join system.consumer_positions c on c.stream = t.stream and c.part = t.part
    where c.pseq < t.top
    union all
    select 'the engine ' || b.engine from tops t
    join system.bus_partitions b on b.stream = t.stream and b.part = t.part
    where b.engine <> 'postgres' and b.published_pseq < t.top
    limit 1";

/// Who has not handled every event of a day; none if it may go.
pub async fn who_needs(conn: &Conn, day: Date) -> Result<Option<String>, StoreError> {
    let row = conn.query_opt("look for consumers that lag", WHO_NEEDS, &[&day]).await?;
    Ok(row.map(|row| row.get(0)))
}

/// Drops day partitions. Waits shortly for the lock and gives up rather than queueing (pitfall A19).
pub async fn drop_days(tx: &Tx<'_>, days: &[Day]) -> Result<(), StoreError> {
    tx.batch("limit lock waits", "set local lock_timeout = '2s'").await?;
    for Day { table, day } in days {
        // An identifier of our own making.
        let sql = format!("drop table if exists system.{}", day_partition(table, *day));
        tx.batch("drop a day partition", &sql).await?;
    }
    Ok(())
}

const INBOX_IS_OPEN: &str =
    "select exists (select from system.inbox where event_day = $1 and status in ('PENDING', 'FAIL', 'DLQ'))";

/// Whether a day of the inbox has anything that is not acknowledged.
pub async fn inbox_is_open(conn: &Conn, day: Date) -> Result<bool, StoreError> {
    Ok(conn.query_one("look for open inbox rows", INBOX_IS_OPEN, &[&day]).await?.get(0))
}

const THIN_INBOX: &str = "
    delete from system.inbox_default
    where ctid = any (array(
        select ctid from system.inbox_default
        where status = 'ACK' and first_seen_at < now() - make_interval(secs => $1) limit 10000))";

/// Deletes old acknowledged rows whose event has no day of its own; bounded per call.
pub async fn thin_inbox_default(conn: &Conn, older_than: Duration) -> Result<u64, StoreError> {
    conn.execute("thin the inbox's default partition", THIN_INBOX, &[&seconds(older_than)]).await
}

const HANDLED_BY_ALL: &str = "
    select stream, part, min(pseq) from system.consumer_positions group by stream, part having min(pseq) > 0";

/// The numbers every declared consumer has handled.
pub async fn handled_by_all(conn: &Conn) -> Result<Vec<(String, u16, i64)>, StoreError> {
    let rows = conn.query("read the slowest positions", HANDLED_BY_ALL, &[]).await?;
    Ok(rows.iter().map(|row| (row.get(0), wide(row.get(1)), row.get(2))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_are_taken_apart() {
        assert_eq!(snapshot_parts("10:20:10,14").expect("valid"), ("20", vec!["10", "14"]));
        assert_eq!(snapshot_parts("3:3:").expect("valid"), ("3", vec![]));
        assert!(snapshot_parts("nonsense").is_err());
    }

    #[test]
    fn day_partitions_sort_by_name() {
        let day = Date::from_calendar_date(2026, time::Month::March, 4).expect("a day");
        assert_eq!(day_partition("bus_log", day), "bus_log_20260304");
    }
}
