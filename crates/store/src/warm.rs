//! Pages that live blocks look up at random, read in order before they are asked for. Keys are hashes: after a restart,
//! or when a long history has pushed them out, nearly every row of a block begins with a page from the disk, and a
//! block of some hundred transfers with thousands. In order they come a hundred times as fast. As many as fit go into
//! the server's buffers: what a history has left there is written out then, and not while a block waits for the room.
//!
//! It needs Postgres' own extension pg_prewarm, which is taken where the server has it and lets us; elsewhere pages come
//! as they are asked for. It changes nothing but where pages are.

use std::time::{Duration, Instant};

use tokio_postgres::error::SqlState;

use crate::db::{Conn, StoreError};

const OFFERED: &str = "
    select exists (select from pg_available_extensions where name = 'pg_prewarm' and installed_version is null)";
const WHERE: &str = "
    select n.nspname::text from pg_extension e join pg_namespace n on n.oid = e.extnamespace
     where e.extname = 'pg_prewarm'";
// Indexes first: every row is looked up through several of them. Rows of these tables are looked up by their keys and
// rewritten; of the log, and of the lookup by transaction, only the indexes are.
const RELATIONS: &str = "
    with tables as (
        select v.place, t.oid, v.rows_too
          from (values (1, 'ledger.normalized_events', false), (2, 'ledger.ownership_current', true),
                       (3, 'catalog.assets', true), (4, 'projection.ownership_view', true),
                       (5, 'projection.asset_cards', true), (6, 'projection.collection_holders', true),
                       (7, 'projection.account_summaries', true), (8, 'ledger.accounts', true),
                       (9, 'projection.collection_stats', true), (10, 'raw.tx_lookup', false)) v (place, name, rows_too)
         cross join lateral (select relid from pg_partition_tree(to_regclass(v.name)) where isleaf
                             union all
                             select oid from pg_class where oid = to_regclass(v.name) and relkind = 'r') t (oid))
    select r.oid::regclass::text, pg_relation_size(r.oid) / current_setting('block_size')::bigint
      from tables t
     cross join lateral (select t.oid, true where t.rows_too
                         union all select i.indexrelid, false from pg_index i where i.indrelid = t.oid) r (oid, is_rows)
     order by r.is_rows, t.place, r.oid";
// The server's own buffers, and what its administrator says it may count on, at least twice as much. In pages, both.
const ROOM: &str = "
    select max(setting::bigint) filter (where name = 'shared_buffers'),
           max(case name when 'shared_buffers' then 2 else 1 end * setting::bigint)
      from pg_settings where name in ('effective_cache_size', 'shared_buffers')";

/// Pages of one statement: it can be stopped between two.
const PAGES: i64 = 8192;

/// Takes the extension if the server has it and the login may: who may not can still use what an administrator created.
pub async fn prepare(conn: &Conn) -> Result<(), StoreError> {
    if !conn.query_one("look for an extension", OFFERED, &[]).await?.get::<_, bool>(0) {
        return Ok(());
    }
    let created =
        conn.batch("take an extension", "create extension if not exists pg_prewarm schema system").await;
    // Somebody else may have been as fast, and some servers have its description alone.
    let is_harmless = |error: &StoreError| {
        error.code().is_some_and(|code| {
            [
                SqlState::INSUFFICIENT_PRIVILEGE,
                SqlState::DUPLICATE_OBJECT,
                SqlState::DUPLICATE_FUNCTION,
                SqlState::UNIQUE_VIOLATION,
                SqlState::UNDEFINED_FILE,
                SqlState::FEATURE_NOT_SUPPORTED,
            ]
            .contains(code)
        })
    };
    match created {
        Err(error) if is_harmless(&error) => {
            tracing::debug!(%error, "pg_prewarm is not to be had: pages come as they are asked for.");
            Ok(())
        }
        other => other,
    }
}

/// What [`up`] did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Warmed {
    /// Pages read.
    pub pages: i64,
    /// Was that all there is?
    pub is_all: bool,
}

/// Reads what live needs into memory, for at most `within`, and no more than the server has room for. Gives none where
/// the server has no means to do so.
pub async fn up(conn: &Conn, within: Duration) -> Result<Option<Warmed>, StoreError> {
    let Some(schema) = conn.query_opt("look for the means to warm up", WHERE, &[]).await? else {
        return Ok(None);
    };
    let schema: String = schema.get(0);
    let load = format!("select \"{schema}\".pg_prewarm($1::text::regclass, $4, 'main', $2, $3)");
    let room = conn.query_one("look how much room there is", ROOM, &[]).await?;
    let (buffers, room): (i64, i64) = (room.get(0), room.get(1));
    let started = Instant::now();
    let mut warmed = Warmed { pages: 0, is_all: true };
    for relation in conn.query("look what is to be warm", RELATIONS, &[]).await? {
        let (name, pages): (String, i64) = (relation.get(0), relation.get(1));
        let mut at = 0;
        while at < pages {
            if started.elapsed() > within || warmed.pages >= room {
                warmed.is_all = false;
                return Ok(Some(warmed));
            }
            let last = (at + PAGES).min(pages) - 1;
            // Half of the buffers: with more, what comes later pushes out what came first. The rest is at least in the
            // memory of the system.
            let into = if warmed.pages < buffers / 2 { "buffer" } else { "read" };
            conn.query_one("warm up", &load, &[&name, &at, &last, &into]).await?;
            warmed.pages += last + 1 - at;
            at = last + 1;
        }
    }
    Ok(Some(warmed))
}
