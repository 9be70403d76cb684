//! The other yardstick: the same rows, already encoded, COPYed into empty copies of the same tables with the
//! same keys and indexes, and nothing else. No program that fills these tables can be faster by much.

use std::time::Instant;

use bytes::Bytes;
use futures_util::{SinkExt, TryStreamExt};

/// The tables a history sync fills.
pub const TABLES: &[&str] = &[
    "raw.blocks",
    "raw.events",
    "raw.tx_lookup",
    "raw.block_lookup",
    "ledger.normalized_events",
    "ledger.ownership_history",
    "ledger.ownership_current",
    "ledger.accounts",
    "catalog.assets",
    "projection.transfers",
    "projection.ownership_view",
    "projection.asset_cards",
    "projection.collection_holders",
    "projection.account_summaries",
    "projection.block_cards",
];

/// Rows, bytes and time of one table.
#[derive(Debug, Clone, serde::Serialize)]
pub struct TableCopy {
    /// Which table.
    pub table: &'static str,
    /// Rows in it.
    pub rows: u64,
    /// Size with indexes after the sync.
    pub bytes: i64,
    /// Seconds of the bare COPY into an empty copy of it.
    pub seconds: f64,
}

/// The tables that raw ingestion fills.
pub const RAW_TABLES: &[&str] = &["raw.blocks", "raw.events", "raw.tx_lookup", "raw.block_lookup"];

/// Copies every one of `tables` (in `url`'s database) into an empty twin; the rows wait in memory.
pub async fn run(url: &str, tables: &[&'static str]) -> anyhow::Result<Vec<TableCopy>> {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(connection);
    client.batch_execute("drop schema if exists bench_copy cascade; create schema bench_copy").await?;
    let mut copies = Vec::new();
    for table in tables {
        let twin = format!("bench_copy.{}", table.replace('.', "_"));
        client.batch_execute(&format!("create table {twin} (like {table} including all)")).await?;
        for index in partition_indexes(&client, table, &twin).await? {
            client.batch_execute(&index).await?;
        }
        let rows: Vec<Bytes> = client
            .copy_out(&format!("copy (select * from {table}) to stdout (format binary)"))
            .await?
            .try_collect()
            .await?;
        let started = Instant::now();
        let sink = client.copy_in::<_, Bytes>(&format!("copy {twin} from stdin (format binary)")).await?;
        let mut sink = std::pin::pin!(sink);
        for chunk in coalesce(rows) {
            sink.send(chunk).await?;
        }
        let rows = sink.finish().await?;
        let seconds = started.elapsed().as_secs_f64();
        let bytes = client
            .query_one(
                "select coalesce(sum(pg_total_relation_size(relid)), 0)::bigint from pg_partition_tree($1::text::regclass)",
                &[table],
            )
            .await?
            .get(0);
        client.batch_execute(&format!("drop table {twin}")).await?;
        copies.push(TableCopy { table, rows, bytes, seconds });
    }
    Ok(copies)
}

/// Indexes that exist only on partitions (built when full), rewritten for the twin.
async fn partition_indexes(
    client: &tokio_postgres::Client,
    table: &str,
    twin: &str,
) -> anyhow::Result<Vec<String>> {
    let rows = client
        .query(
            "select distinct 'create index on ' || $2::text || ' ' || substring(pg_get_indexdef(x.indexrelid) from 'USING.*$')
               from pg_partition_tree($1::text::regclass) p
               join pg_index x on x.indrelid = p.relid
              where p.isleaf and not x.indisunique and $1::text::regclass <> p.relid
                and not exists (select 1 from pg_inherits i where i.inhrelid = x.indexrelid)",
            &[&table, &twin],
        )
        .await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// The server sends one row per message; sending them back that way would measure messages.
fn coalesce(rows: Vec<Bytes>) -> Vec<Bytes> {
    let mut chunks = Vec::new();
    let mut open = Vec::with_capacity(300 * 1024);
    for row in rows {
        open.extend_from_slice(&row);
        if open.len() > 256 * 1024 {
            chunks.push(Bytes::from(std::mem::replace(&mut open, Vec::with_capacity(300 * 1024))));
        }
    }
    chunks.push(Bytes::from(open));
    chunks
}
