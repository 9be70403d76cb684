//! Every SQL constant of this crate is prepared against a fresh database: a misspelt column is a failing
//! test and not a surprise at run time. Statements over temporary tables see those of their own file (constants
//! that begin with `create temp` are run first); `copy … from stdin` is checked through its column list.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use tidemark_model::ids::{EventId, Height, HeightRange, NetworkId};
use tidemark_model::redact::RedactedUrl;
use tidemark_store::partitions::{Partitions, Table};
use tidemark_store::projection::live;
use tidemark_store::{Db, DbOptions, applied, migrate};
use tidemark_testkit::pg::TestDb;
use tokio_postgres::NoTls;

/// A constant, where it is and what it says.
struct Constant {
    file: PathBuf,
    name: String,
    sql: String,
}

/// All `const NAME: &str = "…"` of a source text, unescaped.
fn constants(file: &Path, text: &str) -> Vec<Constant> {
    let mut found = vec![];
    let mut rest = text;
    while let Some(at) = rest.find("const ") {
        rest = &rest[at + "const ".len()..];
        let Some((name, after)) = rest.split_once(':') else { break };
        let Some(after) = after.strip_prefix(" &str =").or_else(|| after.strip_prefix(" &'static str ="))
        else {
            continue;
        };
        if let Some(sql) = literal(after.trim_start()) {
            found.push(Constant { file: file.to_path_buf(), name: name.trim().to_owned(), sql });
        }
    }
    found
}

/// The string literal at the start of `text`; `None` for anything else, such as a macro.
fn literal(text: &str) -> Option<String> {
    if let Some(raw) = text.strip_prefix("r\"") {
        return raw.split_once('"').map(|(sql, _)| sql.to_owned());
    }
    if let Some(raw) = text.strip_prefix("r#\"") {
        return raw.split_once("\"#").map(|(sql, _)| sql.to_owned());
    }
    let mut sql = String::new();
    let mut letters = text.strip_prefix('"')?.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '"' => return Some(sql),
            '\\' => match letters.next()? {
                'n' => sql.push('\n'),
                't' => sql.push('\t'),
                '\n' => while letters.next_if(|next| next.is_whitespace()).is_some() {},
                other => sql.push(other),
            },
            other => sql.push(other),
        }
    }
    None
}

const VERBS: [&str; 14] = [
    "select", "insert", "update", "delete", "with", "copy", "create", "truncate", "lock", "set", "analyze",
    "drop", "merge", "alter",
];

fn is_sql(text: &str) -> bool {
    let text = text.trim_start().to_lowercase();
    VERBS.iter().any(|verb| text.strip_prefix(verb).is_some_and(|rest| rest.starts_with(char::is_whitespace)))
}

/// Has `{name}` or `{}` outside quotes: the text is completed with a partition's name at run time.
fn is_template(sql: &str) -> bool {
    let outside: String = sql.split('\'').step_by(2).collect();
    outside.contains('{')
}

fn makes_temp_tables(sql: &str) -> bool {
    sql.trim_start().to_lowercase().starts_with("create temp")
}

/// `copy t (a, b) from stdin …` as a statement that names the same columns.
fn as_select(sql: &str) -> Option<String> {
    let rest = sql.trim_start().strip_prefix("copy ")?;
    let (target, _) = rest.split_once(" from stdin")?;
    let (table, columns) = target.split_once('(')?;
    Some(format!("select {} from {}", columns.trim_end().trim_end_matches(')'), table.trim()))
}

fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut found = vec![];
    for entry in std::fs::read_dir(dir).expect("a folder").flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found.sort();
    found
}

#[tokio::test]
async fn every_statement_can_be_prepared() {
    let test = TestDb::empty().await.expect("a database");
    let db = Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &DbOptions::default()).expect("a pool");
    migrate::run(&db).await.expect("migrates");
    let mut problems = String::new();
    let mut prepared = 0;
    let files: Vec<Vec<Constant>> = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"))
        .iter()
        .map(|file| {
            let text = std::fs::read_to_string(file).expect("reads");
            let all = constants(file, &text).into_iter();
            all.filter(|one| is_sql(&one.sql) && !is_template(&one.sql)).collect()
        })
        .collect();
    for all in &files {
        let (client, connection) = tokio_postgres::connect(&test.url, NoTls).await.expect("connects");
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(connection);
        client.batch_execute("begin").await.expect("begins");
        for one in files.iter().flatten().filter(|one| makes_temp_tables(&one.sql)) {
            if let Err(error) = client.batch_execute(&one.sql).await {
                complain(&mut problems, one, &error);
            }
        }
        for one in all {
            client.batch_execute("savepoint one").await.expect("a savepoint");
            let sql = as_select(&one.sql).unwrap_or_else(|| one.sql.clone());
            let several = sql.trim().trim_end_matches(';').contains(';');
            let outcome = match several {
                _ if makes_temp_tables(&sql) => Ok(()),   // Was run above.
                true => client.batch_execute(&sql).await, // A script cannot be prepared; it is run and undone.
                false => client.prepare(&sql).await.map(drop),
            };
            if let Err(error) = outcome {
                complain(&mut problems, one, &error);
            }
            client.batch_execute("rollback to savepoint one").await.expect("rolls back");
            prepared += 1;
        }
    }
    assert!(problems.is_empty(), "these statements do not fit the schema:\n{problems}");
    assert!(prepared >= 10, "only {prepared} statements were found: the scanner is broken");
}

/// After a reorg the newest transfer of many accounts and collections is looked up, each by its own index: a
/// table that was never analyzed must not make the planner walk the primary key down once per account.
#[tokio::test]
async fn the_newest_transfer_is_looked_up_by_its_own_index_without_statistics() {
    let test = TestDb::new().await.expect("a database");
    let db = Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &DbOptions::default()).expect("a pool");
    let (partitions, network) = (Partitions::default(), NetworkId(7));
    let mut conn = db.conn().await.expect("connects");
    let range = HeightRange::one(Height(1));
    partitions.ensure_transfers(&mut conn, network, range).await.expect("a partition");
    partitions.ensure_indexed(&mut conn, &[Table::Transfers], network, Height(1)).await.expect("indexes");
    let fill = "
        alter table projection.transfers_7_0000000000 set (autovacuum_enabled = false);
        insert into projection.transfers (network_id, height, event_index, sub_index, event_id, kind, asset_id,
            collection_id, from_account, to_account, qty, tx_hash, block_hash, event_time, is_reverted)
        select 7, n, 0, 0, md5(n::text)::uuid, 'transfer', md5('a' || n)::uuid, md5('c' || n)::uuid,
               md5('f' || n)::uuid, md5('t' || n)::uuid, 1, '', '', now(), false
          from generate_series(1, 20000) n";
    conn.batch("fill transfers", fill).await.expect("fills");
    for ((name, sql), indexes) in live::EXACT_STATEMENTS.into_iter().zip([
        ["_by_asset"; 2],
        ["_by_collection"; 2],
        ["_by_sender", "_by_receiver"],
    ]) {
        let tx = conn.tx().await.expect("begins");
        tx.look_up_by_key().await.expect("sets");
        tx.plan_for_each_call().await.expect("sets");
        tx.batch("prepare", &format!("prepare it as {sql}")).await.expect("prepares");
        let parameters = (1..20).filter(|n| sql.contains(&format!("${n}::"))).count();
        let nulls = "null, ".repeat(parameters - 1);
        let explain = format!("explain (costs off) execute it ({nulls} 7)");
        let rows = tx.query("explain", &explain, &[]).await.expect("explains");
        let plan: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
        tx.batch("forget", "deallocate it").await.expect("forgets");
        tx.rollback().await.expect("rolls back");
        let plan = plan.join("\n");
        assert!(!plan.contains("transfers_7_0000000000_pkey"), "{name}:\n{plan}");
        for index in indexes {
            assert!(plan.contains(&format!("transfers_7_0000000000{index}")), "{name}:\n{plan}");
        }
    }
}

/// Claims are taken back by consumer and event: a reorg must not read the whole index of claims for each event.
#[tokio::test]
async fn claims_are_released_by_their_key() {
    let test = TestDb::new().await.expect("a database");
    let db = Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &DbOptions::default()).expect("a pool");
    let mut conn = db.conn().await.expect("connects");
    let fill = "insert into ledger.applied_events (consumer, normalized_event_id)
                select 'one', md5(n::text)::uuid from generate_series(1, 5000) n
                union all select 'other', md5(n::text)::uuid from generate_series(1, 5000) n";
    conn.batch("fill claims", fill).await.expect("fills");
    for sql in applied::RELEASES {
        let tx = conn.tx().await.expect("begins");
        tx.look_up_by_key().await.expect("sets");
        tx.batch("prepare", &format!("prepare it as {sql}")).await.expect("prepares");
        let rows = tx.query("explain", "explain (costs off) execute it (null)", &[]).await.expect("explains");
        let plan: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
        let plan = plan.join("\n");
        tx.rollback().await.expect("rolls back");
        conn.batch("forget", "deallocate it").await.expect("forgets");
        let by_key = "Index Cond: ((consumer = c_1.consumer) AND (normalized_event_id = u.id))";
        assert!(plan.contains(by_key), "{sql}:\n{plan}");
    }
    let tx = conn.tx().await.expect("begins");
    let ids: Vec<EventId> = tx
        .query("pick", "select distinct normalized_event_id from ledger.applied_events limit 10", &[])
        .await
        .expect("picks")
        .iter()
        .map(|row| EventId(row.get(0)))
        .collect();
    assert_eq!(applied::release(&tx, &ids).await.expect("releases"), 20, "both consumers' claims go");
    tx.rollback().await.expect("rolls back");
}

fn complain(problems: &mut String, one: &Constant, error: &tokio_postgres::Error) {
    let why = error.as_db_error().map_or_else(|| error.to_string(), |db| db.message().to_owned());
    writeln!(problems, "  {} {}: {why}", one.file.display(), one.name).expect("writes to a string");
}

#[test]
fn constants_are_found_and_unescaped() {
    let text = "/// x\nconst A: &str = \"\n  select \\\"a\\\" \\\n   from b\";\npub(crate) const B: &str = r\"select 1\";\nconst C: u8 = 1;";
    let found = constants(Path::new("x.rs"), text);
    assert_eq!(found.len(), 2);
    assert_eq!(found[0].sql, "\n  select \"a\" from b");
    assert_eq!(
        as_select("copy raw.x (a, b) from stdin (format binary)").as_deref(),
        Some("select a, b from raw.x")
    );
    assert!(is_template("create table {name} ()") && !is_template("select '{}'::jsonb"));
}
