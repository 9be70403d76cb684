//! Each database role can do what it must and nothing else.

use tidemark_model::redact::RedactedUrl;
use tidemark_store::{Conn, Db, DbOptions};
use tidemark_testkit::pg::TestDb;

const SCHEMAS: [&str; 8] = ["ref", "raw", "ledger", "catalog", "market", "projection", "system", "app"];

struct As {
    conn: Conn,
    role: &'static str,
    _db: Db,
}

async fn connect(test: &TestDb, role: Option<&'static str>) -> As {
    let options = DbOptions { role: role.map(str::to_owned), ..DbOptions::default() };
    let db = Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &options).expect("a pool");
    As { conn: db.conn().await.expect("connects"), role: role.unwrap_or("owner"), _db: db }
}

impl As {
    async fn may(&self, sql: &str) {
        if let Err(error) = self.conn.batch("try", sql).await {
            panic!("{} must be able to `{sql}`: {error}", self.role);
        }
    }
    async fn may_not(&self, sql: &str) {
        match self.conn.batch("try", sql).await {
            Ok(()) => panic!("{} must not be able to `{sql}`", self.role),
            Err(error) => assert_eq!(
                error.code().map(|code| code.code()),
                Some("42501"),
                "{}: {sql}: {error}",
                self.role
            ),
        }
    }
}

/// A table or view of our schemas.
struct Table {
    /// `schema.name`
    name: String,
    schema: String,
    /// Nobody deletes from a view over several tables.
    is_view: bool,
}

async fn tables(owner: &As) -> Vec<Table> {
    let sql = "
        select n.nspname || '.' || c.relname, n.nspname::text, c.relkind = 'v'
          from pg_class c join pg_namespace n on n.oid = c.relnamespace
         where n.nspname = any ($1) and c.relkind in ('r', 'p', 'v') order by 1";
    let schemas: Vec<&str> = SCHEMAS.to_vec();
    let rows = owner.conn.query("list tables", sql, &[&schemas]).await.expect("lists");
    rows.iter().map(|row| Table { name: row.get(0), schema: row.get(1), is_view: row.get(2) }).collect()
}

#[tokio::test]
async fn the_api_reads_projections_and_references_and_touches_nothing() {
    let test = TestDb::new().await.expect("a database");
    let owner = connect(&test, None).await;
    let api = connect(&test, Some("tidemark_api")).await;
    for Table { name, schema, is_view } in tables(&owner).await {
        let select = format!("select * from {name} limit 0");
        match schema.as_str() {
            "projection" | "ref" => api.may(&select).await,
            _ => api.may_not(&select).await,
        }
        if !is_view {
            api.may_not(&format!("delete from {name}")).await;
        }
    }
    api.may_not("create table projection.mine (n int)").await;
    // What comes later is covered too: new partitions, new projections.
    owner.may("create table projection.later (n int)").await;
    api.may("select * from projection.later").await;
    owner.may("create table ledger.later (n int)").await;
    api.may_not("select * from ledger.later").await;
}

#[tokio::test]
async fn history_behind_a_function_is_readable_and_nothing_else_of_it() {
    let test = TestDb::new().await.expect("a database");
    let owner = connect(&test, None).await;
    owner
        .may(
            "create function projection.event_count() returns bigint language sql security definer
             set search_path = pg_catalog as 'select count(*) from ledger.normalized_events'",
        )
        .await;
    let api = connect(&test, Some("tidemark_api")).await;
    api.may("select projection.event_count()").await;
    api.may_not("select count(*) from ledger.normalized_events").await;
}

#[tokio::test]
async fn ingest_writes_raw_and_its_cursors_and_sees_nothing_past_them() {
    let test = TestDb::new().await.expect("a database");
    let owner = connect(&test, None).await;
    let ingest = connect(&test, Some("tidemark_ingest")).await;
    let own = [
        "system.sync_cursors",
        "system.network_heads",
        "system.reorg_checkpoints",
        "system.processes",
        "system.job_runs",
        "app.indexing_checkpoints",
        "app.worker_leases",
        "app.indexing_errors",
    ];
    for Table { name, schema, .. } in tables(&owner).await {
        let select = format!("select * from {name} limit 0");
        let delete = format!("delete from {name}");
        if schema == "raw" || own.contains(&name.as_str()) {
            ingest.may(&select).await;
            ingest.may(&delete).await;
        } else if ["ledger", "catalog", "market", "projection"].contains(&schema.as_str()) {
            ingest.may_not(&select).await;
            ingest.may_not(&delete).await;
        } else {
            ingest.may_not(&delete).await;
        }
    }
    // Appends to the outbox, cannot change what was said.
    ingest.may_not("update system.outbox_events set topic = ''").await;
    ingest.may_not("select * from system.dlq").await;
    ingest.may("insert into ref.networks (id, slug, family, start_block, confirmations) values (1, 'x', 'evm', 0, 1)").await;
    ingest
        .may("insert into system.sync_cursors (id, network_id, cursor_type, start_height, last_processed_block) values ('c', 1, 'height', 0, -1)")
        .await;
}

#[tokio::test]
async fn workers_write_everything_past_raw_and_only_read_raw() {
    let test = TestDb::new().await.expect("a database");
    let owner = connect(&test, None).await;
    let worker = connect(&test, Some("tidemark_worker")).await;
    for Table { name, schema, is_view } in tables(&owner).await {
        worker.may(&format!("select * from {name} limit 0")).await;
        if is_view {
            continue;
        }
        let delete = format!("delete from {name} where false");
        match schema.as_str() {
            "raw" | "ref" => worker.may_not(&delete).await,
            _ => worker.may(&delete).await,
        }
    }
    worker.may_not("create table ledger.mine (n int)").await;
}

#[tokio::test]
async fn admin_does_everything() {
    let test = TestDb::new().await.expect("a database");
    let owner = connect(&test, None).await;
    let admin = connect(&test, Some("tidemark_admin")).await;
    for Table { name, is_view, .. } in tables(&owner).await {
        admin.may(&format!("select * from {name} limit 0")).await;
        if !is_view {
            admin.may(&format!("delete from {name} where false")).await;
        }
    }
    for schema in SCHEMAS {
        admin.may(&format!("create table {schema}.made_by_admin (n int)")).await;
    }
}

#[tokio::test]
async fn a_login_that_may_not_create_roles_can_still_migrate() {
    let test = TestDb::empty().await.expect("a database");
    let owner = connect(&test, None).await;
    let login = format!("plain_{}", uuid::Uuid::new_v4().simple());
    owner
        .may(&format!("create role {login} nologin; grant create on database {} to {login}", test.name))
        .await;
    let options = DbOptions { role: Some(login.clone()), ..DbOptions::default() };
    let db = Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &options).expect("a pool");
    tidemark_store::migrate::run(&db).await.expect("migrates");
    db.close();
    owner.may(&format!("drop owned by {login}; drop role {login}")).await;
}

#[tokio::test]
async fn whoever_may_take_a_role_is_known() {
    let test = TestDb::new().await.expect("a database");
    let owner = connect(&test, None).await;
    assert!(tidemark_store::status::may_act_as(&owner.conn, "tidemark_api").await.expect("answers"));
    assert!(!tidemark_store::status::may_act_as(&owner.conn, "nobody_at_all").await.expect("answers"));
    let api = connect(&test, Some("tidemark_api")).await;
    assert!(!tidemark_store::status::may_act_as(&api.conn, "tidemark_admin").await.expect("answers"));
}
