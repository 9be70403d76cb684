//! The databases that many seeds share, each under networks of its own, and the fuse that ends transactions
//! at named places.

use std::collections::BTreeMap;
use std::sync::Mutex;

use tidemark_model::chain::Network;
use tidemark_model::redact::RedactedUrl;
use tidemark_store::{Conn, Db, DbOptions, StoreError, bulk};
use tidemark_testkit::pg::TestDb;

/// Every statement that writes asks the fuse first. It counts down; at zero the statement fails as if the
/// server had gone, and the transaction with it. The place is the table and what was done to it.
const FUSE: &str = "
    create schema simulation;
    create function simulation.fuse() returns trigger language plpgsql as $$
    declare
        fuse int := nullif(current_setting('simulation.fuse', true), '')::int;
    begin
        if fuse is null then return null; end if;
        if fuse = 0 then
            raise exception 'killed at %.% %', tg_table_schema, tg_table_name, lower(tg_op)
                using errcode = 'admin_shutdown';
        end if;
        perform set_config('simulation.fuse', (fuse - 1)::text, false);
        return null;
    end $$;
    do $$
    declare
        place regclass;
    begin
        for place in
            select c.oid::regclass from pg_class c join pg_namespace n on n.oid = c.relnamespace
             where n.nspname in ('ledger', 'catalog', 'projection') and c.relkind in ('r', 'p')
               and not c.relispartition
        loop
            execute format('create trigger fuse before insert or update or delete on %s
                            for each statement execute function simulation.fuse()', place);
        end loop;
    end $$;
    create function simulation.last_breath() returns trigger language plpgsql as $$
    begin
        if current_setting('simulation.last_breath', true) = 'on' then
            raise exception 'killed at commit' using errcode = 'admin_shutdown';
        end if;
        return null;
    end $$;
    create constraint trigger last_breath after update on ledger.network_progress
        deferrable initially deferred for each row execute function simulation.last_breath()";

pub(crate) struct Ground {
    /// Where the schedule runs.
    pub(crate) db: Db,
    /// Where the canonical chain is played once, in order, without faults.
    pub(crate) replay: Db,
    /// Places where transactions were ended, and how often.
    pub(crate) kills: Mutex<BTreeMap<String, u64>>,
}

impl Ground {
    pub(crate) async fn new() -> Self {
        let open = async |script: &str| {
            let test = TestDb::new().await.expect("a database");
            let url = RedactedUrl::parse(&test.url).expect("a URL");
            let pool = || Db::open(&url, &DbOptions::default()).expect("a pool");
            // The server never dies here: nobody needs to wait for its log.
            let hurry = format!("alter database {} set synchronous_commit = off; {script}", test.name);
            pool()
                .conn()
                .await
                .expect("connects")
                .batch("prepare a database", &hurry)
                .await
                .expect("prepares");
            pool()
        };
        let (db, replay) = (open(FUSE).await, open("").await);
        Self { db, replay, kills: Mutex::default() }
    }

    pub(crate) fn note_kill(&self, place: &str) {
        *self.kills.lock().expect("nobody panics").entry(place.to_owned()).or_default() += 1;
    }
}

/// Makes a network's partitions and progress in a database.
pub(crate) async fn settle(db: &Db, network: &Network) -> Result<(), StoreError> {
    let id = network.id;
    let conn = db.conn().await?;
    conn.batch(
        "make room for a network",
        &format!(
            "create table projection.transfers_{id} partition of projection.transfers for values in ({id});
             create index on projection.transfers_{id} (event_id);
             insert into projection.network_status (network_id, slug, family, start_block, confirmations)
                 values ({id}, '{}', 'evm', {}, {})",
            network.slug, network.start_block, network.confirmations
        ),
    )
    .await?;
    bulk::ensure_progress(&conn, id, network.start_block).await
}

/// Lights the fuse of a connection, or puts it out.
pub(crate) async fn set_fuse(conn: &Conn, statements: Option<u32>) -> Result<(), StoreError> {
    let value = statements.map_or_else(String::new, |statements| statements.to_string());
    conn.query("set the fuse", "select set_config('simulation.fuse', $1, false)", &[&value]).await?;
    Ok(())
}

/// Lets a connection fail while it commits a move of the ledger's progress, or not.
pub(crate) async fn set_last_breath(conn: &Conn, last: bool) -> Result<(), StoreError> {
    let value = if last { "on" } else { "" };
    conn.query("set the last breath", "select set_config('simulation.last_breath', $1, false)", &[&value])
        .await?;
    Ok(())
}

/// The place at which the fuse ended a transaction, if it did.
pub(crate) fn killed_at(error: &dyn std::error::Error) -> Option<String> {
    let text = error.to_string();
    let (_, place) = text.split_once("killed at ")?;
    Some(place.split(" (").next().unwrap_or(place).to_owned())
}
