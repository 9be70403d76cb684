//! Every statement of `store::reads` is prepared, and none of them scans a large table: the plan of each is read
//! on a database with some thousand rows, as the server makes it for unknown parameters and for real ones.

mod seed;

use seed::Seed;
use serde_json::Value;
use tidemark_store::reads::STATEMENTS;

/// Tables that stay small whatever the chain does.
const SMALL: &[&str] =
    &["network_status", "pg_class", "pg_index", "pg_namespace", "pg_statistic", "pg_attribute"];

/// Fills the large tables, so that the planner has a choice to get wrong.
async fn fill(seed: &Seed) -> anyhow::Result<()> {
    seed.run(
        "insert into projection.transfers (network_id, height, event_index, sub_index, event_id, kind, asset_id,
             collection_id, from_account, to_account, qty, tx_hash, block_hash, event_time)
         select 1, 21000000 + n / 2, n % 2, 0, gen_random_uuid(), 'transfer', md5('a' || n % 3000)::uuid,
             md5('c' || n % 40)::uuid, md5('u' || n % 900)::uuid, md5('u' || n % 700)::uuid, 1,
             decode(md5('t' || n) || md5('t' || n), 'hex'), '\\x00', now() - (100000 - n) * interval '1 second'
           from generate_series(1, 30000) n;
         insert into projection.asset_cards (asset_id, network_id, collection_id, token_id, standard, name, is_stub,
             is_burned, supply, history, finality_status, last_height, updated_at)
         select md5('a' || n)::uuid, 1, md5('c' || n % 40)::uuid, n, 'erc721', case when n % 3 = 0 then 'Name ' || n end,
             n % 3 <> 0, false, 1, 'complete', 'finalized', n, now() from generate_series(1, 12000) n;
         insert into projection.ownership_view (asset_id, account_id, network_id, collection_id, qty, qty_finalized,
             finality_status, updated_at)
         select md5('a' || n)::uuid, md5('u' || n % 900)::uuid, 1, md5('c' || n % 40)::uuid, 1, 1, 'finalized', now()
           from generate_series(1, 12000) n;
         insert into projection.collection_holders (collection_id, account_id, asset_count, qty)
         select md5('c' || n % 40)::uuid, md5('u' || n)::uuid, 1 + n % 9, 1 from generate_series(1, 12000) n;
         insert into projection.collection_stats (collection_id, network_id, address, standard, name, is_stub,
             transfer_count, updated_at)
         select md5('c' || n)::uuid, 1 + n % 2, '0x' || md5('c' || n) || '00000000', 'erc721', 'Set ' || n, false, n % 500, now()
           from generate_series(1, 8000) n;
         insert into projection.account_summaries (account_id, network_id, address, first_seen_at, last_seen_at, updated_at)
         select md5('u' || n)::uuid, 1, '0x' || md5('u' || n) || '00000000', now(), now(), now() from generate_series(1, 12000) n;
         insert into projection.block_cards (network_id, height, hash, parent_hash, block_time, event_count)
         select 1, 21000000 + n, decode(md5('b' || n) || md5('b' || n), 'hex'), '\\x00',
             now() - interval '3 days' + n * interval '1 second', 2 from generate_series(1, 15000) n;
         insert into projection.network_activity (network_id, bucket, events)
         select 5, now() - n * interval '10 seconds', 1 from generate_series(1, 8000) n;
         analyze",
    )
    .await
}

/// A literal for each declared parameter type: enough for a plan.
fn literal(kind: &str) -> &'static str {
    match kind {
        "integer" => "1",
        "bigint" => "51",
        "boolean" => "false",
        "uuid" => "'c4ca4238-a0b9-2382-0dcc-509a6f75849b'",
        "uuid[]" => "array['c4ca4238-a0b9-2382-0dcc-509a6f75849b']::uuid[]",
        "integer[]" => "array[1]",
        "text[]" => "null",
        "text" => "'finalized'",
        "bytea" => "'\\x00'",
        "timestamp with time zone" => "now()",
        other => panic!("no literal for {other}"),
    }
}

fn scans(plan: &Value, found: &mut Vec<String>) {
    if plan["Node Type"] == "Seq Scan" {
        found.push(plan["Relation Name"].as_str().unwrap_or("?").to_owned());
    }
    for child in plan["Plans"].as_array().into_iter().flatten() {
        scans(child, found);
    }
}

#[tokio::test]
async fn no_read_scans_a_large_table() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    fill(&seed).await?;
    let conn = seed.owner.conn().await?;
    let mut wrong = Vec::new();
    for (name, sql) in STATEMENTS {
        conn.batch("prepare", &format!("prepare {name} as {sql}"))
            .await
            .map_err(|error| anyhow::anyhow!("{name}: {error}"))?;
        let kinds: Vec<String> = conn
            .query_one(
                "types",
                "select array(select t::text from unnest(parameter_types) t) from pg_prepared_statements where name = $1",
                &[name],
            )
            .await?
            .get(0);
        let values: Vec<&str> = kinds.iter().map(|kind| literal(kind)).collect();
        let call =
            if values.is_empty() { (*name).to_owned() } else { format!("{name}({})", values.join(", ")) };
        let mut modes = vec!["force_custom_plan"];
        // A page's limit is unknown to a generic plan, so the planner never prefers it for these.
        if !sql.contains("limit $") {
            modes.push("force_generic_plan");
        }
        for mode in modes {
            conn.batch("mode", &format!("set plan_cache_mode = {mode}")).await?;
            let plan: Value = conn
                .query_one("explain", &format!("explain (format json) execute {call}"), &[])
                .await?
                .get(0);
            let mut found = Vec::new();
            scans(&plan[0]["Plan"], &mut found);
            found.retain(|table| !SMALL.contains(&table.as_str()));
            if !found.is_empty() {
                wrong.push(format!("{name} ({mode}) scans {found:?}\n{plan:#}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// The functions hide their plans; their bodies are proven here with the same arguments.
#[tokio::test]
async fn no_function_scans_a_large_table() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    seed.run(
        "insert into ledger.ownership_history (asset_id, account_id, network_id, block_number, event_index, qty_delta,
             event_time, normalized_event_id, leg)
         select md5('a' || n % 3000)::uuid, md5('u' || n % 900)::uuid, 1, n, 0, 1, now(), gen_random_uuid(), 1
           from generate_series(1, 30000) n;
         insert into system.outbox_events (id, aggregate_type, aggregate_id, event_type, topic, stream, part, partition_key,
             correlation_id, retention_class, tenant_id, envelope)
         select gen_random_uuid(), 't', 't', 't', 't', 'projection', 0, '0', gen_random_uuid(), 's', 't', '{}'
           from generate_series(1, 20000) n;
         insert into system.bus_log (stream, part, pseq, outbox_day, outbox_seq)
         select 'projection', 0, row_number() over (order by seq), day, seq from system.outbox_events;
         insert into raw.tx_lookup (network_id, block_height, id, tx_index, block_time)
         select 1, n, decode(md5('t' || n), 'hex'), 0, now() from generate_series(1, 20000) n;
         insert into raw.events (network_id, block_height, tx_id, event_index, tx_index, block_hash, emitter, topics)
         select 1, n, '\\x01', 0, 0, '\\x01', '\\x01', '\\x01' from generate_series(1, 20000) n;
         analyze",
    )
    .await?;
    let conn = seed.owner.conn().await?;
    let id = "'c4ca4238-a0b9-2382-0dcc-509a6f75849b'::uuid";
    for sql in [
        format!("select h.account_id, sum(h.qty_delta) from ledger.ownership_history h where h.asset_id = {id} and h.block_number <= 9 and h.account_id > {id} group by h.account_id having sum(h.qty_delta) > 0 order by h.account_id limit 101"),
        format!("select h.asset_id, sum(h.qty_delta) from ledger.ownership_history h where h.account_id = {id} and h.block_number <= 9 and h.asset_id > {id} group by h.asset_id order by h.asset_id limit 101"),
        "select l.pseq from (select b.pseq, b.outbox_day, b.outbox_seq from system.bus_log b where b.stream = 'projection' and b.part = 0 and b.pseq > 500 order by b.pseq limit 500) l cross join lateral (select e.topic from system.outbox_events e where e.day = l.outbox_day and e.seq = l.outbox_seq limit 1) o order by l.pseq".to_owned(),
        "select b.pseq from system.bus_log b where b.stream = 'projection' and b.part = 0 order by b.pseq desc limit 1".to_owned(),
        "select l.block_height from raw.tx_lookup l where l.network_id = 1 and l.id = '\\x00' order by l.block_height desc limit 1".to_owned(),
        "select e.event_index from raw.events e where e.network_id = 1 and e.block_height = 7 and e.event_index > -1 order by e.event_index limit 101".to_owned(),
    ] {
        let plan: Value = conn.query_one("explain", &format!("explain (format json) {sql}"), &[]).await?.get(0);
        let mut found = Vec::new();
        scans(&plan[0]["Plan"], &mut found);
        assert!(found.is_empty(), "{sql}\nscans {found:?}\n{plan:#}");
    }
    Ok(())
}
