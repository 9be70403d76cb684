//! Migrations: embedded, forward only, in one order, each applied once. Two processes that start together
//! wait for each other on an advisory lock; a migration that cannot get its table lock gives up quickly and
//! is tried again, so that it never queues in front of readers (pitfall A19).

use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::db::{Db, StoreError};

/// One embedded file.
#[derive(Debug, Clone, Copy)]
pub struct Migration {
    /// `NNNN_what`
    pub name: &'static str,
    /// Its text.
    pub sql: &'static str,
}

macro_rules! migrations {
    ($($name:literal),* $(,)?) => {
        /// All migrations, in order. A test compares this list with the folder.
        pub const MIGRATIONS: &[Migration] =
            &[$(Migration { name: $name, sql: include_str!(concat!("../migrations/", $name, ".sql")) }),*];
    };
}

migrations!(
    "0001_foundation",
    "0002_raw",
    "0003_backbone",
    "0004_ledger",
    "0005_projection",
    "0006_roles",
    "0007_reads",
    "0008_ledger_blocks",
    "0010_backbone_defaults",
    "0011_projector",
    "0012_bulk",
    "0013_presence",
    "0014_claims_by_age",
    "0015_api",
    "0016_shards",
    "0017_open_height",
    "0018_log_heights",
    "0019_finality_lines",
    "0020_read_models_due",
    "0021_whole_indexes",
    "0022_final_by_the_line",
    "0023_envelopes_as_text",
    "0024_sides_of_positions",
    "0025_read_models_behind",
    "0026_hot_tables",
    "0027_shown_with_indexes",
    "0028_one_row_per_event",
    "0029_caught_up_by_halves",
    "0030_owners_ahead",
    "0031_room_in_indexes",
);

/// What [`run`] did.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Names of the migrations applied now.
    pub now: Vec<&'static str>,
    /// How many were there before.
    pub before: usize,
}

const LOCK_KEY: i64 = 0x7469_6465_6d61_726b; // "tidemark"
const VERSION: &str = "select current_setting('server_version_num')::int";
/// The oldest server our statements run on.
const SERVER_MAJOR_MIN: i32 = 15;
const LOCK: &str = "select pg_try_advisory_lock($1)";
const UNLOCK: &str = "select pg_advisory_unlock($1)";
const CREATE_TABLE: &str = "
    create schema if not exists system;
    create table if not exists system.migrations (
        name       text primary key,
        checksum   bytea not null,
        applied_at timestamptz not null default now()
    )";
const APPLIED: &str = "select name, checksum from system.migrations order by name";
const RECORD: &str = "insert into system.migrations (name, checksum) values ($1, $2)";

/// Tries for one migration's table locks before giving up.
const LOCK_TRIES: u32 = 20;

/// Brings the database to the newest schema. Safe to call from several processes at once.
pub async fn run(db: &Db) -> Result<Applied, StoreError> {
    let mut conn = db.conn().await?;
    let version: i32 = conn.query_one("read the server's version", VERSION, &[]).await?.get(0);
    check_version(version)?;
    while !conn.query_one("lock migrations", LOCK, &[&LOCK_KEY]).await?.get::<_, bool>(0) {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let result = run_locked(&mut conn).await;
    conn.query_one("unlock migrations", UNLOCK, &[&LOCK_KEY]).await?;
    result
}

/// Refuses a server that is too old for our statements, before anything is written.
fn check_version(number: i32) -> Result<(), StoreError> {
    match number / 10_000 {
        major if major < SERVER_MAJOR_MIN => Err(StoreError::ServerTooOld { major }),
        _ => Ok(()),
    }
}

async fn run_locked(conn: &mut crate::Conn) -> Result<Applied, StoreError> {
    conn.batch("create the table of migrations", CREATE_TABLE).await?;
    let rows = conn.query("read applied migrations", APPLIED, &[]).await?;
    let mut applied = Applied { before: rows.len(), ..Applied::default() };
    for row in &rows {
        let (name, checksum): (String, Vec<u8>) = (row.get(0), row.get(1));
        match MIGRATIONS.iter().find(|migration| migration.name == name) {
            None => {
                return Err(StoreError::Corrupt {
                    what: "system.migrations".into(),
                    found: format!("migration {name}"),
                    hint: "this database was made by a newer Tidemark: use that version, or another database",
                });
            }
            Some(migration) if checksum_of(migration) != checksum.as_slice() => {
                return Err(StoreError::Corrupt {
                    what: format!("migration {name}"),
                    found: "another checksum".into(),
                    hint: "an applied migration was edited: migrations are forward only, restore its text",
                });
            }
            Some(_) => {}
        }
    }
    let is_there = |name: &str| rows.iter().any(|row| row.get::<_, &str>(0) == name);
    for migration in MIGRATIONS.iter().filter(|migration| !is_there(migration.name)) {
        apply(conn, migration).await?;
        tracing::info!(action = "migrate", migration = migration.name, "Applied a migration.");
        applied.now.push(migration.name);
    }
    Ok(applied)
}

async fn apply(conn: &mut crate::Conn, migration: &Migration) -> Result<(), StoreError> {
    for attempt in 1.. {
        match apply_once(conn, migration).await {
            Err(error)
                if attempt < LOCK_TRIES
                    && error.code() == Some(&tokio_postgres::error::SqlState::LOCK_NOT_AVAILABLE) =>
            {
                tokio::time::sleep(Duration::from_millis(250)).await;
            }
            other => return other,
        }
    }
    unreachable!("the loop returns on its last attempt")
}

async fn apply_once(conn: &mut crate::Conn, migration: &Migration) -> Result<(), StoreError> {
    let tx = conn.tx().await?;
    tx.batch("limit lock waits", "set local lock_timeout = '2s'; set local statement_timeout = 0").await?;
    tx.batch("apply a migration", migration.sql).await?;
    tx.execute("record a migration", RECORD, &[&migration.name, &checksum_of(migration).as_slice()]).await?;
    tx.commit().await
}

fn checksum_of(migration: &Migration) -> [u8; 32] {
    Sha256::digest(migration.sql.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_too_old_is_named_with_the_next_step() {
        assert!(check_version(150_000).is_ok() && check_version(180_001).is_ok());
        let error = check_version(140_011).expect_err("too old").to_string();
        assert!(error.contains("14") && error.contains("database.url"), "{error}");
    }
}
