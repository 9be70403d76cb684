//! Every statement of `store::reads` is run on a database with some thousand rows per table, and the plan of every
//! statement that the server really ran for it is read, those inside functions included: none scans a large
//! table, none looks at many more rows than it answers with.

mod seed;

use std::collections::BTreeSet;

use seed::Seed;
use serde_json::Value;
use tidemark_store::reads::STATEMENTS;
use tokio::sync::mpsc;
use tokio_postgres::{AsyncMessage, Client};

/// Tables that stay small whatever the chain does: a row per network, partition, handler or process.
const SMALL: &[&str] = &[
    "network_status",
    "finality_lines",
    "network_heads",
    "network_progress",
    "sync_cursors",
    "bus_partitions",
    "consumer_positions",
    "relay_cursor",
    "parked_keys",
    "processes",
    "pg_class",
    "pg_index",
    "pg_namespace",
    "pg_statistic",
    "pg_attribute",
];

/// Once a minute for gauges: statistics of the catalog, and a sample bounded by its limit.
const CATALOG: &[&str] = &["cache_hits", "finality_shares", "finality_sample"];

/// Rows one step of a plan may look at, where pages have a hundred rows and tables some ten thousand and more.
fn rows_max(name: &str) -> f64 {
    // Looking for kinds goes over a stretch of so many rows, and no further.
    if name.starts_with("stretch") { 10_000.0 } else { 2500.0 }
}

/// Fills the large tables, so that the planner has a choice to get wrong. `x1` is an asset, a collection and an
/// account at once.
async fn fill(seed: &Seed) -> anyhow::Result<()> {
    seed.run(
        "insert into projection.transfers (network_id, height, event_index, sub_index, event_id, kind, asset_id,
             collection_id, from_account, to_account, qty, tx_hash, block_hash, event_time)
         select 1, 21000000 + n / 2, n % 2, 0, gen_random_uuid(), 'transfer', md5('x' || n % 3000)::uuid,
             md5('x' || n % 40)::uuid, md5('x' || n % 900)::uuid, md5('x' || n % 700)::uuid, 1,
             decode(md5('t' || n) || md5('t' || n), 'hex'), '\\x00', now() - (100000 - n) * interval '1 second'
           from generate_series(1, 120000) n;
         insert into projection.asset_cards (asset_id, network_id, collection_id, token_id, standard, name, is_stub,
             is_burned, supply, history, finality_status, last_height, updated_at)
         select md5('x' || n)::uuid, 1, md5('x' || n % 40)::uuid, n, 'erc721', case when n % 3 = 0 then 'Name ' || n end,
             n % 3 <> 0, false, 1, 'complete', 'finalized', n, now() from generate_series(1, 12000) n;
         insert into projection.ownership_view (asset_id, account_id, network_id, collection_id, qty, qty_finalized,
             finality_status, updated_at)
         select md5('x' || n)::uuid, md5('x' || n % 900)::uuid, 1, md5('x' || n % 40)::uuid, 1, 1, 'finalized', now()
           from generate_series(1, 12000) n;
         insert into projection.collection_holders (collection_id, account_id, asset_count, qty)
         select md5('x' || n % 40)::uuid, md5('x' || n)::uuid, 1 + n % 9, 1 from generate_series(1, 12000) n;
         insert into projection.collection_stats (collection_id, network_id, address, standard, name, is_stub,
             transfer_count, updated_at)
         select md5('x' || n)::uuid, 1 + n % 2, '0x' || md5('x' || n) || '00000000', 'erc721', 'Set ' || n, false, n % 500, now()
           from generate_series(1, 8000) n;
         insert into projection.account_summaries (account_id, network_id, address, first_seen_at, last_seen_at, updated_at)
         select md5('x' || n)::uuid, 1, '0x' || md5('x' || n) || '00000000', now(), now(), now() from generate_series(1, 12000) n;
         insert into projection.block_cards (network_id, height, hash, parent_hash, block_time, event_count)
         select 1, 21000000 + n, decode(md5('b' || n) || md5('b' || n), 'hex'), '\\x00',
             now() - interval '3 days' + n * interval '1 second', 2 from generate_series(1, 15000) n;
         insert into projection.network_activity (network_id, bucket, events)
         select 5, now() - n * interval '10 seconds', 1 from generate_series(1, 8000) n;
         insert into ledger.ownership_history (asset_id, account_id, network_id, block_number, event_index, qty_delta,
             event_time, normalized_event_id, leg)
         select md5('x' || n % 3000)::uuid, md5('x' || n % 900)::uuid, 1, 21000000 + n, 0, 1, now(), gen_random_uuid(), 1
           from generate_series(1, 30000) n;
         insert into ledger.normalized_events (id, source_event_id, sub_index, network_id, event_kind, block_number,
             block_hash, tx_hash, event_index, event_time, finality_status)
         select md5('x' || n)::uuid, 'e' || n, '0', 1, 'transfer', 21000000 + n, '\\x00', '\\x00', 0, now(), 'finalized'
           from generate_series(1, 20000) n",
    )
    .await?;
    seed.run(
        "insert into system.outbox_events (id, aggregate_type, aggregate_id, event_type, topic, stream, part, partition_key,
             correlation_id, retention_class, tenant_id, envelope)
         select gen_random_uuid(), 't', 't', 't', 't', 'projection', 0, '0', gen_random_uuid(), 's', 't', '{}'
           from generate_series(1, 20000) n;
         insert into system.bus_log (stream, part, pseq, outbox_day, outbox_seq)
         select 'projection', 0, row_number() over (order by seq), day, seq from system.outbox_events;
         insert into raw.blocks (network_id, height, hash, parent_hash, block_time, event_count)
         select 1, 21000000 + n, '\\x01', '\\x00', now(), 1 from generate_series(1, 20000) n;
         insert into raw.tx_lookup (network_id, block_height, id, tx_index, block_time)
         select 1, 21000000 + n, decode(md5('t' || n) || md5('t' || n), 'hex'), 0, now() from generate_series(1, 20000) n;
         insert into raw.transactions (network_id, block_height, id, tx_index, sender, value)
         select 1, 21000000 + n, decode(md5('t' || n) || md5('t' || n), 'hex'), 0, '\\x01', 1 from generate_series(1, 20000) n;
         insert into raw.events (network_id, block_height, tx_id, event_index, tx_index, block_hash, emitter, topics)
         select 1, 21000000 + n, decode(md5('t' || n) || md5('t' || n), 'hex'), 0, 0, '\\x01', '\\x01', '\\x01'
           from generate_series(1, 20000) n;
         -- Years of operation, resolved.
         insert into system.dlq (handler_kind, source_topic, stream, part, pseq, partition_key, event_id, envelope, kind,
             error, attempts, resolved_at)
         select 'ledger', 't', 'chain', 0, n, '1', gen_random_uuid(), '{}', 'poison', 'e', 10, now() from generate_series(1, 9000) n;
         insert into ledger.quarantine (normalized_event_id, consumer, network_id, source_event_id, block_number, reason,
             evidence, resolved_at)
         select gen_random_uuid(), 'c', 1, 's', n, 'r', '{}', now() from generate_series(1, 9000) n;
         insert into system.reorg_checkpoints (network_id, block_number, block_hash, is_canonical, reorg_id, checked_at)
         select 1, n, decode(md5('r' || n), 'hex'), false, 'r' || n / 2, now() - n * interval '1 minute'
           from generate_series(1, 9000) n;
         insert into app.worker_leases (worker_type, network_id, from_height, to_height, status, leased_by, lease_expires_at)
         select 'history', 1, n * 10, n * 10 + 10, 'COMPLETED', 'a', now() from generate_series(1, 9000) n;
         insert into app.indexing_errors (worker_name, network_id, block_height, error_hash, severity, message, resolved)
         select 'w', 1, n, decode(md5('e' || n), 'hex'), 'WARN', 'm', true from generate_series(1, 9000) n;
         analyze",
    )
    .await?;
    // The relay has seen all of it.
    seed.run(
        "insert into system.relay_cursor (id, snapshot, system_identifier) values (1, pg_current_snapshot()::text, '1')
         on conflict (id) do update set snapshot = excluded.snapshot",
    )
    .await
}

/// A literal for a parameter: keys that exist, places in the middle, pages of fifty.
fn literal(kind: &str, is_limit: bool) -> &'static str {
    match kind {
        "integer" if is_limit => "51",
        "bigint" if is_limit => "51",
        "integer" => "1",
        "bigint" => "21007000",
        "boolean" => "false",
        "double precision" => "0.5",
        "uuid" => "md5('x1')::uuid",
        "uuid[]" => "array[md5('x1')::uuid, md5('x2')::uuid]",
        "integer[]" => "array[1]",
        "text[]" => "array['transfer']",
        "text" => "'finalized'",
        "bytea" => "decode(md5('t7000') || md5('t7000'), 'hex')",
        "timestamp with time zone" => "now() - interval '2 days'",
        other => panic!("no literal for {other}"),
    }
}

/// Arguments where the type alone says too little.
fn arguments(name: &str) -> Option<&'static str> {
    Some(match name {
        "collections_by_name" => "'set 1', 'set 1\u{10ffff}', 10",
        "assets_by_name" => "'name 1', 'name 1\u{10ffff}', 10",
        "collections_by_address_prefix" | "accounts_by_prefix" => "'0xc', '0xc\u{10ffff}', 10",
        "activity" => "5, now() - interval '15 minutes'",
        "owners" => "md5('x1')::uuid, '00000000-0000-0000-0000-000000000000', 'pending', 51",
        "holdings" => "md5('x1')::uuid, '00000000-0000-0000-0000-000000000000', 'confirmed', 51, null, false",
        "owners_at" | "holdings_at" => {
            "md5('x1')::uuid, 21029000, '00000000-0000-0000-0000-000000000000', 101"
        }
        "raw_events" => "1, 21007000, null, -1, 101",
        "stream_read" => "500, 500",
        _ => return None,
    })
}

/// A connection that also hears what the server says beside its answers.
async fn listen(url: &str) -> anyhow::Result<(Client, mpsc::Receiver<String>, tokio::task::JoinSet<()>)> {
    let (client, mut connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
    let (said, heard) = mpsc::channel(10_000);
    let mut task = tokio::task::JoinSet::new();
    task.spawn(async move {
        let mut messages = futures_util::stream::poll_fn(move |cx| connection.poll_message(cx));
        while let Some(Ok(message)) = futures_util::StreamExt::next(&mut messages).await {
            if let AsyncMessage::Notice(notice) = message {
                let _ = said.try_send(notice.message().to_owned());
            }
        }
    });
    Ok((client, heard, task))
}

/// The plans among what was heard, with the text of their statement.
fn plans(heard: &mut mpsc::Receiver<String>) -> Vec<Value> {
    let mut found = Vec::new();
    while let Ok(text) = heard.try_recv() {
        if let Some((_, plan)) = text.split_once("plan:\n") {
            found.push(serde_json::from_str(plan).expect("auto_explain writes JSON"));
        }
    }
    found
}

fn faults(plan: &Value, rows_max: f64, found: &mut Vec<String>) {
    let table = plan["Relation Name"].as_str().unwrap_or("");
    if plan["Node Type"] == "Seq Scan" && !SMALL.contains(&table) && plan["Actual Loops"] != 0.0 {
        found.push(format!("scans {table}"));
    }
    let number = |field: &str| plan[field].as_f64().unwrap_or(0.0);
    let looked_at =
        (number("Actual Rows") + number("Rows Removed by Filter")) * number("Actual Loops").max(1.0);
    if looked_at > rows_max {
        found.push(format!("{} of {table:?} looks at {looked_at} rows", plan["Node Type"]));
    }
    for child in plan["Plans"].as_array().into_iter().flatten() {
        faults(child, rows_max, found);
    }
}

#[tokio::test]
async fn no_read_scans_a_large_table_not_even_inside_a_function() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    fill(&seed).await?;
    let (client, mut heard, _task) = listen(&seed.db.url).await?;
    client
        .batch_execute(
            "load 'auto_explain'; set auto_explain.log_min_duration = 0; set auto_explain.log_analyze = on;
             set auto_explain.log_timing = off; set auto_explain.log_nested_statements = on;
             set auto_explain.log_format = json; set auto_explain.log_level = notice; set jit = off",
        )
        .await?;
    let mut wrong = Vec::new();
    for (name, sql) in STATEMENTS {
        client
            .batch_execute(&format!("prepare {name} as {sql}"))
            .await
            .map_err(|error| anyhow::anyhow!("{name}: {error}"))?;
        let row = client
            .query_one(
                "select array(select t::text from unnest(parameter_types) t) from pg_prepared_statements where name = $1",
                &[name],
            )
            .await?;
        let kinds: Vec<String> = row.get(0);
        let values: Vec<&str> = kinds
            .iter()
            .enumerate()
            .map(|(at, kind)| literal(kind, sql.contains(&format!("limit ${}", at + 1))))
            .collect();
        let values = arguments(name).map_or_else(|| values.join(", "), str::to_owned);
        let call = if values.is_empty() { (*name).to_owned() } else { format!("{name}({values})") };
        // The API plans once; an operator who looks does not.
        for mode in ["force_custom_plan", "force_generic_plan"] {
            client.batch_execute(&format!("set plan_cache_mode = {mode}")).await?;
            plans(&mut heard);
            client.batch_execute(&format!("execute {call}")).await.map_err(|error| {
                anyhow::anyhow!(
                    "{call}: {}",
                    error.as_db_error().map_or(error.to_string(), ToString::to_string)
                )
            })?;
            // The answer comes after the notices on one connection, so they have all been heard.
            let seen = plans(&mut heard);
            assert!(!seen.is_empty(), "{name} has no plan");
            for plan in seen.iter().filter(|_| !CATALOG.contains(name)) {
                let mut found = Vec::new();
                faults(&plan["Plan"], rows_max(name), &mut found);
                if !found.is_empty() {
                    wrong.push(format!("{name} ({mode}): {found:?}\n{plan:#}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} statements:\n{}", wrong.len(), wrong.join("\n"));
    Ok(())
}

/// A statement that is not in the list would not be proven: the source says which there are.
#[test]
fn every_statement_of_the_api_is_in_the_list() {
    let source = include_str!("../../store/src/reads.rs");
    let body = source.split("pub const STATEMENTS").next().expect("a beginning");
    let declared: BTreeSet<&str> = body
        .lines()
        .filter_map(|line| line.trim().strip_prefix("const ")?.split_once(": &str"))
        .map(|(name, _)| name)
        .collect();
    let list = source.split("pub const STATEMENTS").nth(1).expect("the list");
    let listed: BTreeSet<&str> = list
        .lines()
        .filter_map(|line| line.trim().strip_prefix("(\"")?.split_once("\", ")?.1.strip_suffix("),"))
        .collect();
    assert!(declared.len() > 30, "the source is not read right: {declared:?}");
    assert_eq!(declared, listed);
    assert_eq!(listed.len(), STATEMENTS.len());
    // And the API itself holds no SQL.
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut folders = vec![folder];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).expect("a source file");
            let sql = text
                .lines()
                .find(|line| line.contains("\"select ") || line.trim_start().starts_with("from projection."));
            assert_eq!(sql, None, "{} holds SQL: it belongs to store::reads", path.display());
        }
    }
}
