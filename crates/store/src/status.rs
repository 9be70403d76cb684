//! Processes, heads, watermarks: what `status` shows.

use std::collections::BTreeMap;

use tidemark_model::ids::NetworkId;
use time::OffsetDateTime;

use crate::db::{Conn, StoreError};

/// One role of one process (`system.processes`).
#[derive(Debug, Clone, PartialEq)]
pub struct Process {
    /// Which process.
    pub instance: String,
    /// Which role.
    pub role: String,
    /// starting | running | restarting | stopped | halted
    pub state: String,
    /// How often it was started again.
    pub restarts: i64,
    /// Why the last time.
    pub last_error: Option<String>,
    /// When its present life began.
    pub started_at: OffsetDateTime,
    /// When it last said so; the database's clock.
    pub heartbeat_at: OffsetDateTime,
    /// Seconds since then, by the database's clock.
    pub silent_seconds: f64,
}

const HEARTBEAT: &str = "
    insert into system.processes (instance, role, state, restarts, last_error, started_at, heartbeat_at)
    select $1, role, state, restarts, last_error, started_at, now()
      from unnest($2::text[], $3::text[], $4::bigint[], $5::text[], $6::timestamptz[])
        as seen (role, state, restarts, last_error, started_at)
     order by role
    on conflict (instance, role) do update
       set state = excluded.state, restarts = excluded.restarts, last_error = excluded.last_error,
           started_at = excluded.started_at, heartbeat_at = excluded.heartbeat_at";

/// Writes what the roles of `instance` do right now; their times of heartbeat are the database's.
pub async fn heartbeat(conn: &Conn, instance: &str, seen: &[Process]) -> Result<(), StoreError> {
    let roles: Vec<&str> = seen.iter().map(|process| process.role.as_str()).collect();
    let states: Vec<&str> = seen.iter().map(|process| process.state.as_str()).collect();
    let restarts: Vec<i64> = seen.iter().map(|process| process.restarts).collect();
    let errors: Vec<Option<&str>> = seen.iter().map(|process| process.last_error.as_deref()).collect();
    let started: Vec<OffsetDateTime> = seen.iter().map(|process| process.started_at).collect();
    conn.execute("write a heartbeat", HEARTBEAT, &[&instance, &roles, &states, &restarts, &errors, &started])
        .await?;
    Ok(())
}

const LEDGER_HEIGHTS: &str = "
    select network_id, head_height, finalized_height from ledger.network_progress where network_id = any($1)";

/// Head and finality of many networks' ledgers, in one question; -1 before the first block.
pub async fn ledger_heights(
    conn: &Conn,
    networks: &[NetworkId],
) -> Result<BTreeMap<NetworkId, (i64, i64)>, StoreError> {
    let ids: Vec<i32> = networks.iter().map(|network| network.0).collect();
    let rows = conn.query("read the ledger's heights", LEDGER_HEIGHTS, &[&ids]).await?;
    Ok(rows.iter().map(|row| (NetworkId(row.get(0)), (row.get(1), row.get(2)))).collect())
}

const FORGET: &str = "
    delete from system.processes
     where instance = $1 or heartbeat_at < now() - interval '1 hour'";

/// Removes the rows of a process that ended in order, and of those that fell silent an hour ago.
pub async fn forget(conn: &Conn, instance: &str) -> Result<(), StoreError> {
    conn.execute("forget a process", FORGET, &[&instance]).await?;
    Ok(())
}

const PROCESSES: &str = "
    select instance, role, state, restarts, last_error, started_at, heartbeat_at,
           extract(epoch from now() - heartbeat_at)::float8
      from system.processes
     order by instance, role";

/// All roles of all processes that are known.
pub async fn processes(conn: &Conn) -> Result<Vec<Process>, StoreError> {
    let rows = conn.query("read processes", PROCESSES, &[]).await?;
    let process = |row: &tokio_postgres::Row| Process {
        instance: row.get(0),
        role: row.get(1),
        state: row.get(2),
        restarts: row.get(3),
        last_error: row.get(4),
        started_at: row.get(5),
        heartbeat_at: row.get(6),
        silent_seconds: row.get(7),
    };
    Ok(rows.iter().map(process).collect())
}

/// A network as the raw side knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawProgress {
    /// Network.
    pub network_id: i32,
    /// Its short name.
    pub slug: String,
    /// Newest height the nodes report.
    pub latest: Option<i64>,
    /// Finalized height the nodes report.
    pub finalized: Option<i64>,
    /// Everything at or below is stored (the slowest shard).
    pub ingested: Option<i64>,
    /// Why it is stopped, if it is.
    pub halted: Option<String>,
}

const RAW_PROGRESS: &str = "
    select n.id, n.slug, h.latest_height, h.finalized_height, c.ingested, h.halted_reason
      from ref.networks n
      left join system.network_heads h on h.network_id = n.id
      left join (select network_id, min(last_processed_block) as ingested
                   from system.sync_cursors group by network_id) c on c.network_id = n.id
     order by n.id";

/// Heads and cursors of all networks; asked of the raw database.
pub async fn raw_progress(conn: &Conn) -> Result<Vec<RawProgress>, StoreError> {
    let rows = conn.query("read heads and cursors", RAW_PROGRESS, &[]).await?;
    let progress = |row: &tokio_postgres::Row| RawProgress {
        network_id: row.get(0),
        slug: row.get(1),
        latest: row.get(2),
        finalized: row.get(3),
        ingested: row.get(4),
        halted: row.get(5),
    };
    Ok(rows.iter().map(progress).collect())
}

/// A network as the ledger and the projections know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppProgress {
    /// Network.
    pub network_id: i32,
    /// Newest normalized height.
    pub normalized: Option<i64>,
    /// Height up to which finality was applied.
    pub finalized: Option<i64>,
    /// Newest projected height.
    pub projected: Option<i64>,
    /// Canonical events in the projections.
    pub events: i64,
}

const APP_PROGRESS: &str = "
    select coalesce(l.network_id, p.network_id), l.head_height, l.finalized_height, p.projected_height,
           coalesce(p.events_total, 0)
      from ledger.network_progress l
      full join projection.network_status p on p.network_id = l.network_id
     order by 1";

/// Ledger and projection heights of all networks; asked of the app database.
pub async fn app_progress(conn: &Conn) -> Result<Vec<AppProgress>, StoreError> {
    let rows = conn.query("read ledger heights", APP_PROGRESS, &[]).await?;
    let progress = |row: &tokio_postgres::Row| AppProgress {
        network_id: row.get(0),
        normalized: row.get(1),
        finalized: row.get(2),
        projected: row.get(3),
        events: row.get(4),
    };
    Ok(rows.iter().map(progress).collect())
}

const PROJECTED_HEIGHT: &str = "select projected_height from projection.network_status where network_id = $1";

/// Newest projected height of a network.
pub async fn projected_height(conn: &Conn, network: i32) -> Result<Option<i64>, StoreError> {
    let row = conn.query_opt("read the projected height", PROJECTED_HEIGHT, &[&network]).await?;
    Ok(row.and_then(|row| row.get(0)))
}

const BLOCK_TIMES: &str = "
    select (select b.block_time from projection.block_cards b
             where b.network_id = $1 and b.height <= h.height order by b.height desc limit 1)
      from unnest($2::bigint[]) with ordinality as h (height, at)
     order by h.at";

/// The time of the newest known block at or below each height.
pub async fn block_times(
    conn: &Conn,
    network: i32,
    heights: &[i64],
) -> Result<Vec<Option<OffsetDateTime>>, StoreError> {
    let rows = conn.query("read block times", BLOCK_TIMES, &[&network, &heights]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

const OPEN_DLQ: &str = "
    select handler_kind, count(*) from system.dlq where resolved_at is null group by handler_kind order by 1";

/// Open dead letters by handler.
pub async fn open_dlq(conn: &Conn) -> Result<Vec<(String, i64)>, StoreError> {
    let rows = conn.query("count dead letters", OPEN_DLQ, &[]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

const MAY_ACT_AS: &str = "
    select exists (select from pg_roles where rolname = $1 and pg_has_role(current_user, oid, 'member'))";

/// Can this login `set role` to `role`? Not where migrating it had no right to create roles.
pub async fn may_act_as(conn: &Conn, role: &str) -> Result<bool, StoreError> {
    Ok(conn.query_one("look for a role", MAY_ACT_AS, &[&role]).await?.get(0))
}

const RAW_RECORDS: &str = "select coalesce(sum(records), 0)::bigint from raw.range_evidence";

/// Records that were accepted so far, over all networks.
pub async fn raw_records(conn: &Conn) -> Result<i64, StoreError> {
    Ok(conn.query_one("count accepted records", RAW_RECORDS, &[]).await?.get(0))
}
