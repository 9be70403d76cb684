//! system.inbox: one effect per (event, handler). A row is written in the transaction of the effect; what
//! the insert returns is what may be applied (pitfall A10).

use time::{Date, OffsetDateTime};
use uuid::Uuid;

use crate::db::{StoreError, Tx};

/// One event as the inbox sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InboxRow {
    /// The event.
    pub event_id: Uuid,
    /// The day of its id's time.
    pub event_day: Date,
    /// Its number.
    pub pseq: i64,
    /// Its key.
    pub partition_key: String,
    /// The block it tells of, if any.
    pub block_number: Option<i64>,
}

/// The day in a ULID's time: equal for equal ids.
pub fn event_day(event_id_millis: u64) -> Date {
    i64::try_from(event_id_millis / 1_000)
        .ok()
        .and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok())
        .map_or(Date::MAX, OffsetDateTime::date)
}

const CLAIM: &str = "
    insert into system.inbox as i
        (event_id, event_day, handler_kind, status, attempts, stream, part, pseq, partition_key, block_number,
         last_attempt_at)
    select e.event_id, e.event_day, $1, 'ACK', 1, $2, $3, e.pseq, e.partition_key, e.block_number, now()
    from unnest($4::uuid[], $5::date[], $6::bigint[], $7::text[], $8::bigint[])
         as e (event_id, event_day, pseq, partition_key, block_number)
    order by e.event_id
    on conflict (event_id, handler_kind, event_day) do update
        set status = 'ACK', attempts = i.attempts + 1, last_attempt_at = now()
        where i.status in ('PENDING', 'FAIL')
    returning i.event_id";

/// Acknowledges `rows` for `handler` as part of this transaction; gives the ids whose effect is due now.
/// Ids inside `rows` must be unique.
pub async fn claim(
    tx: &Tx<'_>,
    handler: &str,
    stream: &str,
    part: u16,
    rows: &[InboxRow],
) -> Result<Vec<Uuid>, StoreError> {
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let part = i16::try_from(part).unwrap_or(i16::MAX);
    let ids: Vec<Uuid> = rows.iter().map(|row| row.event_id).collect();
    let days: Vec<Date> = rows.iter().map(|row| row.event_day).collect();
    let pseqs: Vec<i64> = rows.iter().map(|row| row.pseq).collect();
    let keys: Vec<&str> = rows.iter().map(|row| row.partition_key.as_str()).collect();
    let blocks: Vec<Option<i64>> = rows.iter().map(|row| row.block_number).collect();
    let claimed = tx
        .query("claim events", CLAIM, &[&handler, &stream, &part, &ids, &days, &pseqs, &keys, &blocks])
        .await?;
    Ok(claimed.iter().map(|row| row.get(0)).collect())
}

const FAIL: &str = "
    insert into system.inbox as i
        (event_id, event_day, handler_kind, status, attempts, last_error, stream, part, pseq, partition_key,
         block_number, last_attempt_at)
    values ($1, $2, $3, 'FAIL', 1, $4, $5, $6, $7, $8, $9, now())
    on conflict (event_id, handler_kind, event_day) do update
        set status = 'FAIL', attempts = i.attempts + 1, last_error = excluded.last_error, last_attempt_at = now()
        where i.status in ('PENDING', 'FAIL')
    returning i.attempts";

/// Counts one failed delivery; gives how many there were. None: the event already has its effect.
pub async fn fail(
    tx: &Tx<'_>,
    handler: &str,
    stream: &str,
    part: u16,
    row: &InboxRow,
    error: &str,
) -> Result<Option<u32>, StoreError> {
    let part = i16::try_from(part).unwrap_or(i16::MAX);
    let found = tx
        .query_opt(
            "record a failed delivery",
            FAIL,
            &[
                &row.event_id,
                &row.event_day,
                &handler,
                &error,
                &stream,
                &part,
                &row.pseq,
                &row.partition_key,
                &row.block_number,
            ],
        )
        .await?;
    Ok(found.map(|found| u32::try_from(found.get::<_, i32>(0)).unwrap_or(0)))
}

const TO_DLQ: &str = "
    insert into system.inbox as i
        (event_id, event_day, handler_kind, status, attempts, last_error, stream, part, pseq, partition_key,
         block_number, last_attempt_at)
    select e.event_id, e.event_day, $1, 'DLQ', 0, $9, $2, $3, e.pseq, e.partition_key, e.block_number, now()
    from unnest($4::uuid[], $5::date[], $6::bigint[], $7::text[], $8::bigint[])
         as e (event_id, event_day, pseq, partition_key, block_number)
    order by e.event_id
    on conflict (event_id, handler_kind, event_day) do update
        set status = 'DLQ', last_error = excluded.last_error, last_attempt_at = now()
        where i.status in ('PENDING', 'FAIL')
    returning i.event_id, i.attempts";

/// Marks `rows` as dead-lettered; gives those that were not handled before, with their failed deliveries.
pub async fn to_dlq(
    tx: &Tx<'_>,
    handler: &str,
    stream: &str,
    part: u16,
    rows: &[InboxRow],
    error: &str,
) -> Result<Vec<(Uuid, u32)>, StoreError> {
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let part = i16::try_from(part).unwrap_or(i16::MAX);
    let ids: Vec<Uuid> = rows.iter().map(|row| row.event_id).collect();
    let days: Vec<Date> = rows.iter().map(|row| row.event_day).collect();
    let pseqs: Vec<i64> = rows.iter().map(|row| row.pseq).collect();
    let keys: Vec<&str> = rows.iter().map(|row| row.partition_key.as_str()).collect();
    let blocks: Vec<Option<i64>> = rows.iter().map(|row| row.block_number).collect();
    let marked = tx
        .query(
            "mark events as dead letters",
            TO_DLQ,
            &[&handler, &stream, &part, &ids, &days, &pseqs, &keys, &blocks, &error],
        )
        .await?;
    Ok(marked.iter().map(|row| (row.get(0), u32::try_from(row.get::<_, i32>(1)).unwrap_or(0))).collect())
}

const RESURRECT: &str = "
    update system.inbox set status = 'ACK', attempts = attempts + 1, last_attempt_at = now()
    where event_id = $1 and handler_kind = $2 and event_day = $3 and status = 'DLQ'";

/// Acknowledges a dead letter whose effect happens in this transaction; false if it is not one.
pub async fn resurrect(
    tx: &Tx<'_>,
    handler: &str,
    event_id: Uuid,
    event_day: Date,
) -> Result<bool, StoreError> {
    let touched =
        tx.execute("acknowledge a dead letter", RESURRECT, &[&event_id, &handler, &event_day]).await?;
    Ok(touched == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_day_is_the_ids_day() {
        assert_eq!(event_day(1_700_000_000_000).to_string(), "2023-11-14");
        assert_eq!(event_day(0).to_string(), "1970-01-01");
        assert_eq!(event_day(u64::MAX), Date::MAX);
    }
}
