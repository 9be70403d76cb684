//! Who has applied which event (S0 §4). A claim and its effect commit together; a revert releases the claim,
//! so that the event can be applied again when it comes back.

use std::collections::BTreeSet;

use tidemark_model::ids::{EventId, NetworkId};
use uuid::Uuid;

use crate::db::{Conn, StoreError, Tx};

const CLAIM: &str = "
    insert into ledger.applied_events (consumer, normalized_event_id)
    select $1, u.id from unnest($2::uuid[]) u (id)
     where not exists (select 1 from ledger.applied_events_archive a
                        where a.consumer = $1 and a.normalized_event_id = u.id)
     order by u.id
    on conflict (consumer, normalized_event_id) do nothing
    returning normalized_event_id";

/// Claims events for a consumer; gives those that nobody had claimed. Only they may be applied.
pub async fn claim(tx: &Tx<'_>, consumer: &str, events: &[EventId]) -> Result<BTreeSet<EventId>, StoreError> {
    if events.is_empty() {
        return Ok(BTreeSet::new());
    }
    let ids = uuids(events);
    let rows = tx.query("claim events", CLAIM, &[&consumer, &ids]).await?;
    Ok(rows.iter().map(|row| EventId(row.get(0))).collect())
}

// The key begins with the consumer. There are few of them, and each is found by one step into the index: by the event
// alone the whole index would be read, once for every event.
macro_rules! release {
    ($table:literal) => {
        concat!(
            "
    with recursive consumers as (
        (select consumer from ", $table, " order by consumer limit 1)
        union all
        select (select a.consumer from ", $table, " a where a.consumer > c.consumer
                 order by a.consumer limit 1)
          from consumers c where c.consumer is not null)
    delete from ", $table, " where ctid = any (array(
        select one.at from consumers c cross join unnest($1::uuid[]) u (id)
         cross join lateral (select a.ctid as at from ", $table, " a
                              where a.consumer = c.consumer and a.normalized_event_id = u.id limit 1) one))"
        )
    };
}
const RELEASE: &str = release!("ledger.applied_events");
const RELEASE_ARCHIVED: &str = release!("ledger.applied_events_archive");
/// For the test that looks at their plans.
#[doc(hidden)]
pub const RELEASES: [&str; 2] = [RELEASE, RELEASE_ARCHIVED];
const RELEASE_ONE: &str =
    "delete from ledger.applied_events where consumer = $2 and normalized_event_id = any($1)";
/// Releases all consumers' claims on events that were undone.
pub async fn release(tx: &Tx<'_>, events: &[EventId]) -> Result<u64, StoreError> {
    if events.is_empty() {
        return Ok(0);
    }
    let ids = uuids(events);
    let live = tx.execute("release claims", RELEASE, &[&ids]).await?;
    Ok(live + tx.execute("release archived claims", RELEASE_ARCHIVED, &[&ids]).await?)
}

/// Releases one consumer's claims on events it could not apply.
pub async fn release_one(tx: &Tx<'_>, consumer: &str, events: &[EventId]) -> Result<u64, StoreError> {
    if events.is_empty() {
        return Ok(0);
    }
    tx.execute("release claims of one consumer", RELEASE_ONE, &[&uuids(events), &consumer]).await
}

const WAS_APPLIED: &str = "
    select u.id
      from unnest($3::uuid[]) u (id)
     where exists (select 1 from ledger.applied_events a
                    where a.consumer = $1 and a.normalized_event_id = u.id)
        or exists (select 1 from ledger.applied_events_archive a
                    where a.consumer = $1 and a.normalized_event_id = u.id)
        or exists (select 1
                     from ledger.normalized_events e
                     join ledger.network_progress p on p.network_id = e.network_id
                    where e.id = u.id and e.network_id = $2
                      and e.block_number <= p.history_height and not e.is_reverted
                      and not exists (select 1 from ledger.quarantine q
                                       where q.consumer = $1 and q.normalized_event_id = u.id
                                         and q.resolved_at is null))";

/// Which of these events the consumer has applied: by a claim, by an archived claim, or because their block
/// lies in the history that was applied in bulk.
pub async fn was_applied(
    conn: &Conn,
    consumer: &str,
    network: NetworkId,
    events: &[EventId],
) -> Result<BTreeSet<EventId>, StoreError> {
    let rows = conn.query("read claims", WAS_APPLIED, &[&consumer, &network.0, &uuids(events)]).await?;
    Ok(rows.iter().map(|row| EventId(row.get(0))).collect())
}

const ARCHIVE: &str = "
    with old as (
        select consumer, normalized_event_id from ledger.applied_events
         where applied_at < now() - make_interval(days => $1)
         limit $2
    ), moved as (
        delete from ledger.applied_events a using old
         where a.consumer = old.consumer and a.normalized_event_id = old.normalized_event_id
        returning a.consumer, a.normalized_event_id, a.applied_at
    )
    insert into ledger.applied_events_archive (consumer, normalized_event_id, applied_at)
    select consumer, normalized_event_id, applied_at from moved
    on conflict (consumer, normalized_event_id) do nothing";

/// Claims older than this many days go to the archive (S0 §4).
pub const ARCHIVE_AFTER_DAYS: i32 = 90;

/// Moves at most `at_most` claims older than `days` to the archive; call until it gives zero.
pub async fn archive(tx: &Tx<'_>, days: i32, at_most: i64) -> Result<u64, StoreError> {
    tx.execute("archive claims", ARCHIVE, &[&days, &at_most]).await
}

fn uuids(events: &[EventId]) -> Vec<Uuid> {
    let mut ids: Vec<Uuid> = events.iter().map(|id| id.0).collect();
    ids.sort_unstable();
    ids
}
