//! `bench rows`: what one row costs a database backend, and what a claim, a foreign key, a JSONB column, a key of text and
//! an index add to it. The shape of the schema rests on these proportions (ADR 0020).

use std::path::Path;
use std::time::Instant;

use anyhow::ensure;
use serde_json::{Value, json};
use tidemark_model::redact::RedactedUrl;
use tokio_postgres::Client;

use super::{Bench, float, print, write};

/// `bench rows`
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct RowsArgs {
    /// Rows written in each way
    #[arg(long, value_name = "N", default_value_t = 400_000)]
    pub rows: u64,
    /// Rows in one transaction
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    pub batch: u64,
}

/// Each way is measured this often, turn about; the best counts.
const ROUNDS: usize = 2;

/// One way of writing the rows: a table, what goes into it from `events e`, in which order and with which care.
struct Way {
    group: &'static str,
    name: &'static str,
    table: String,
    select: &'static str,
    how: &'static str,
    indexes: Indexes,
}

/// When the secondary indexes are made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Indexes {
    Never,
    First,
    Last,
}

/// An event as the ledger has it: ids are hashes, so they come in no order; assets and accounts come again.
const EVENTS: &str = "
    create schema bench_rows;
    create table bench_rows.events as
    select n, md5('event' || n)::uuid as id, md5('asset' || n % 64000)::uuid as asset,
           md5('account' || n * 7 % 20000)::uuid as sender, md5('account' || n * 13 % 20000)::uuid as receiver,
           n / 20 as height, sha256(int8send(n / 3)) as tx, sha256(int8send(n / 20)) as block_hash,
           '31337:0x' || encode(sha256(int8send(n / 3)), 'hex') || ':' || n % 40 as source,
           substring(sha256(int8send(n % 1000)) for 20) as emitter,
           sha256(int8send(1)) || sha256(int8send(n % 20000)) || sha256(int8send(n * 7 % 20000)) as topics,
           sha256(int8send(n)) as data
      from generate_series(1::bigint, $rows) n;
    create index on bench_rows.events (n);
    create table bench_rows.keys (id uuid primary key);
    insert into bench_rows.keys select id from bench_rows.events order by id;
    create table bench_rows.assets (id uuid primary key);
    insert into bench_rows.assets select distinct asset from bench_rows.events;
    create table bench_rows.accounts (id uuid primary key);
    insert into bench_rows.accounts select distinct sender from bench_rows.events
        union select receiver from bench_rows.events;
    analyze";

const DELTA: &str = "e.id, 0, e.asset, e.sender, e.receiver, 1";
const RAW: &str = "e.height, e.n, e.tx, e.emitter, e.topics, e.data";
const RAW_AND_JSON: &str = "
    e.height, e.n, e.tx, e.emitter, e.topics, e.data, jsonb_build_object('address', '0x' || encode(e.emitter, 'hex'),
        'topics', '0x' || encode(e.topics, 'hex'), 'data', '0x' || encode(e.data, 'hex'), 'blockNumber', e.height,
        'transactionHash', '0x' || encode(e.tx, 'hex'), 'logIndex', e.n, 'removed', false)";
const LEG: &str = "e.asset, e.receiver, e.height, 1, e.id";
const INDEXES: &str = "
    create index on bench_rows.written (asset, height); create index on bench_rows.written (account, height)";
const CAREFUL: &str = "on conflict do nothing";

fn ways() -> Vec<Way> {
    let way = |group, name, table: &str, select, how| Way {
        group,
        name,
        table: table.to_owned(),
        select,
        how,
        indexes: Indexes::Never,
    };
    let key = "id uuid primary key, source text, sub_index text, height bigint, block_hash bytea";
    let keyed = "e.id, e.source, '0', e.height, e.block_hash";
    let both = format!("{key}, unique (source, sub_index)");
    let delta = |event: &str, asset: &str, account: &str| {
        format!(
            "id uuid {event}, at int, asset uuid {asset}, sender uuid {account}, receiver uuid {account},
             qty numeric(78, 0), primary key (id, at)"
        )
    };
    let (event, asset, account) =
        ("references bench_rows.keys", "references bench_rows.assets", "references bench_rows.accounts");
    let raw = "height bigint, log int, tx bytea, emitter bytea, topics bytea, data bytea, primary key (height, log)";
    let raw_and_json = raw.replace("data bytea,", "data bytea, payload jsonb,");
    let hashes = |of: &str| format!("id uuid primary key, asset uuid, tx {of}, block_hash {of}");
    let as_text = "e.id, e.asset, '0x' || encode(e.tx, 'hex'), '0x' || encode(e.block_hash, 'hex')";
    let claim = "consumer text, id uuid, at timestamptz, primary key (consumer, id)";
    let leg = "asset uuid, account uuid, height bigint, qty numeric(78, 0), event uuid";
    let legs = |name, indexes| Way { indexes, ..way("indexes", name, leg, LEG, "") };
    vec![
        way("claim", "a row per event and consumer", claim, "'state-updater', e.id, now()", CAREFUL),
        way("key", "uuid, in its order", key, keyed, "order by e.id"),
        way("key", "uuid, as it comes", key, keyed, ""),
        way("key", "uuid, as it comes, on conflict", key, keyed, CAREFUL),
        way("key", "uuid, as it comes, and unique text beside it", &both, keyed, ""),
        way("foreign key", "none", &delta("", "", ""), DELTA, ""),
        way("foreign key", "to the event", &delta(event, "", ""), DELTA, ""),
        way(
            "foreign key",
            "to the event, the asset, both accounts",
            &delta(event, asset, account),
            DELTA,
            "",
        ),
        way("payload", "columns", raw, RAW, ""),
        way("payload", "columns, and all of it again as JSONB", &raw_and_json, RAW_AND_JSON, ""),
        way("hashes", "as bytea", &hashes("bytea"), "e.id, e.asset, e.tx, e.block_hash", ""),
        way("hashes", "as text", &hashes("text"), as_text, ""),
        legs("none", Indexes::Never),
        legs("two, built when the table is full", Indexes::Last),
        legs("two, kept with every row", Indexes::First),
    ]
}

/// What one way took.
#[derive(Clone, Copy)]
struct Cost {
    micros_per_row: f64,
    bytes_per_row: f64,
}

/// Runs it and writes `out/rows.json`.
pub async fn run(args: &RowsArgs, out: &Path) -> anyhow::Result<()> {
    ensure!(args.batch > 0 && args.rows >= args.batch, "at least one batch of at least one row");
    let bench = Bench::start().await?;
    let result = measure(args, bench.server.url()).await;
    bench.end().await?;
    write(out, "rows", &result?)
}

async fn measure(args: &RowsArgs, url: &RedactedUrl) -> anyhow::Result<Value> {
    let (client, connection) = tokio_postgres::connect(url.expose().as_str(), tokio_postgres::NoTls).await?;
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(connection);
    client.batch_execute(&EVENTS.replace("$rows", &args.rows.to_string())).await?;
    let ways = ways();
    let mut best: Vec<Option<Cost>> = vec![None; ways.len()];
    for round in 1..=ROUNDS {
        eprintln!("round {round} of {ROUNDS} …");
        for (way, best) in ways.iter().zip(&mut best) {
            let cost = write_rows(&client, way, args).await?;
            if best.is_none_or(|best| cost.micros_per_row < best.micros_per_row) {
                *best = Some(cost);
            }
        }
    }
    let mut group = "";
    let mut all = Vec::new();
    for (way, cost) in ways.iter().zip(best.into_iter().flatten()) {
        if way.group != group {
            group = way.group;
            print(&[(group, String::new())]);
        }
        let cost_text = format!("{:>5.1} µs  {:>4.0} bytes", cost.micros_per_row, cost.bytes_per_row);
        print(&[(format!("  {}", way.name).as_str(), cost_text)]);
        all.push(json!({
            "group": way.group, "way": way.name, "micros_per_row": cost.micros_per_row,
            "bytes_per_row": cost.bytes_per_row,
        }));
    }
    Ok(json!({ "rows": args.rows, "batch": args.batch, "ways": all }))
}

/// One backend, one transaction per batch; the table and its indexes go afterwards.
async fn write_rows(client: &Client, way: &Way, args: &RowsArgs) -> anyhow::Result<Cost> {
    client.batch_execute(&format!("create table bench_rows.written ({})", way.table)).await?;
    if way.indexes == Indexes::First {
        client.batch_execute(INDEXES).await?;
    }
    client.batch_execute("checkpoint").await?;
    let insert = format!(
        "insert into bench_rows.written select {} from bench_rows.events e where e.n > $1 and e.n <= $2 {}",
        way.select, way.how
    );
    let insert = client.prepare(&insert).await?;
    let started = Instant::now();
    let mut done = 0;
    while done < args.rows {
        let to = (done + args.batch).min(args.rows);
        client.execute(&insert, &[&i64::try_from(done)?, &i64::try_from(to)?]).await?;
        done = to;
    }
    if way.indexes == Indexes::Last {
        client.batch_execute(INDEXES).await?;
    }
    let seconds = started.elapsed().as_secs_f64();
    let size = client.query_one("select pg_total_relation_size('bench_rows.written')", &[]).await?;
    client.batch_execute("drop table bench_rows.written").await?;
    Ok(Cost {
        micros_per_row: seconds * 1e6 / float(args.rows),
        bytes_per_row: float(size.get::<_, i64>(0).unsigned_abs()) / float(args.rows),
    })
}
