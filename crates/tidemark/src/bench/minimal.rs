//! The minimal program every benchmark is measured against: fetch logs, decode them, COPY transfers into one
//! table with a key and two indexes, upsert owners. No raw store, no finality, no reorgs, no checks, no
//! read models: what a competent afternoon gives. Fetch and decode run beside the database writes.

use std::ops::RangeInclusive;
use std::time::Instant;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use tidemark_model::U256;
use tidemark_model::redact::RedactedUrl;
use tidemark_store::copy::CopyBuffer;
use tidemark_store::{Db, DbOptions};

use super::float;

const SCHEMA: &str = "
    drop schema if exists bench_minimal cascade;
    create schema bench_minimal;
    create table bench_minimal.transfers (
        block_number bigint not null, log_index int not null, sub_index int not null, tx_hash bytea not null,
        contract bytea not null, token_id numeric not null, sender bytea not null, receiver bytea not null,
        qty numeric not null, primary key (block_number, log_index, sub_index));
    create index on bench_minimal.transfers (contract, token_id);
    create index on bench_minimal.transfers (receiver);
    create table bench_minimal.owners (
        contract bytea not null, token_id numeric not null, account bytea not null, qty numeric not null,
        primary key (contract, token_id, account))";
const TEMP: &str = "
    create temp table if not exists changes (contract bytea, token_id numeric, account bytea, qty numeric) on commit delete rows";
const COPY_TRANSFERS: &str = "copy bench_minimal.transfers from stdin (format binary)";
const COPY_CHANGES: &str = "copy changes from stdin (format binary)";
const UPSERT: &str = "
    insert into bench_minimal.owners as o (contract, token_id, account, qty)
    select contract, token_id, account, sum(qty) from changes group by 1, 2, 3 order by 1, 2, 3
    on conflict (contract, token_id, account) do update set qty = o.qty + excluded.qty";
const SWEEP: &str = "delete from bench_minimal.owners where qty = 0";

/// What a run took.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct MinimalRun {
    /// Decoded movements.
    pub events: u64,
    /// Wall time.
    pub seconds: f64,
}

impl MinimalRun {
    /// Their quotient.
    pub fn events_per_second(&self) -> f64 {
        float(self.events) / self.seconds
    }
}

#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow)]
    result: Vec<Log<'a>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Log<'a> {
    address: &'a str,
    topics: Vec<&'a str>,
    data: &'a str,
    block_number: &'a str,
    transaction_hash: &'a str,
    log_index: &'a str,
}

struct Batch {
    events: u64,
    transfers: CopyBuffer,
    changes: CopyBuffer,
}

/// Blocks asked for at once: about as many logs as a provider answers.
const STEP: u64 = 500;

/// Reads `blocks` of the node at `rpc` into `database`, on top of what an earlier call left there unless they begin
/// with block 0.
pub async fn run(
    rpc: &str,
    database: &RedactedUrl,
    blocks: RangeInclusive<u64>,
) -> anyhow::Result<MinimalRun> {
    let db = Db::open(database, &DbOptions { statement_timeout: None, ..DbOptions::default() })?;
    let mut conn = db.conn().await?;
    if *blocks.start() == 0 {
        conn.batch("create the minimal schema", SCHEMA).await?;
    }
    let (mut from, last) = blocks.into_inner();
    let started = Instant::now();
    let (sender, mut receiver) = tokio::sync::mpsc::channel::<Batch>(2);
    let url = rpc.to_owned();
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(async move {
        let http = reqwest::Client::builder().gzip(false).build()?;
        while from <= last {
            let to = (from + STEP - 1).min(last);
            let body = serde_json::json!({"jsonrpc": "2.0", "id": 1, "method": "eth_getLogs", "params": [{
                "fromBlock": format!("{from:#x}"), "toBlock": format!("{to:#x}"),
                "topics": [["0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef",
                            "0xc3d58168c5ae7397731d063d5bbf3d657854427343f4c083240f7aacaa2d0f62",
                            "0x4a39dc06d4c0dbc64b70af90fd698a233a518aa5d07e595d983b8c0526c8f7fb"]]}]});
            let bytes = http.post(&url).json(&body).send().await?.bytes().await?;
            let batch = tokio::task::spawn_blocking(move || decode(&bytes)).await??;
            if sender.send(batch).await.is_err() {
                break; // The writer failed; its error is the one to report.
            }
            from = to + 1;
        }
        anyhow::Ok(())
    });
    let mut events = 0;
    while let Some(batch) = receiver.recv().await {
        events += batch.events;
        let tx = conn.tx().await?;
        tx.batch("create the temp table", TEMP).await?;
        tx.copy_in("copy transfers", COPY_TRANSFERS, batch.transfers).await?;
        tx.copy_in("copy changes", COPY_CHANGES, batch.changes).await?;
        tx.execute("upsert owners", UPSERT, &[]).await?;
        tx.commit().await?;
    }
    tasks.join_next().await.context("the fetching task is there")???;
    conn.execute("sweep empty owners", SWEEP, &[]).await?;
    Ok(MinimalRun { events, seconds: started.elapsed().as_secs_f64() })
}

fn decode(bytes: &[u8]) -> anyhow::Result<Batch> {
    let answer: Answer<'_> = serde_json::from_slice(bytes).context("the node answered something else")?;
    let mut batch = Batch { events: 0, transfers: CopyBuffer::new(9), changes: CopyBuffer::new(4) };
    for log in &answer.result {
        let topics: Vec<Vec<u8>> = log.topics.iter().map(|topic| unhex(topic)).collect::<Result<_, _>>()?;
        let data = unhex(log.data)?;
        if topics.len() != 4 {
            continue; // ERC-20
        }
        match (topics[0][0], data.len()) {
            (0xdd, _) => {
                movement(&mut batch, log, 0, &topics[1], &topics[2], word(&topics[3]), U256::from(1))?
            }
            (0xc3, 64) => {
                movement(&mut batch, log, 0, &topics[2], &topics[3], word(&data[..32]), word(&data[32..]))?
            }
            (0x4a, length) if length >= 128 => {
                let count = data[64..].len() / 32;
                let ids = usize::try_from(word(&data[64..96]))?;
                anyhow::ensure!(count >= 2 + 2 * ids, "a batch log is cut short");
                for at in 0..ids {
                    let id = word(&data[96 + 32 * at..128 + 32 * at]);
                    let qty = word(&data[128 + 32 * (ids + at)..160 + 32 * (ids + at)]);
                    movement(&mut batch, log, i32::try_from(at)?, &topics[2], &topics[3], id, qty)?;
                }
            }
            _ => {}
        }
    }
    Ok(batch)
}

fn movement(
    batch: &mut Batch,
    log: &Log<'_>,
    sub_index: i32,
    from: &[u8],
    to: &[u8],
    id: U256,
    qty: U256,
) -> anyhow::Result<()> {
    let contract = unhex(log.address)?;
    let (from, to) = (&from[12..], &to[12..]);
    batch.events += 1;
    batch
        .transfers
        .row()
        .i64(i64::from_str_radix(&log.block_number[2..], 16)?)
        .i32(i32::from_str_radix(&log.log_index[2..], 16)?)
        .i32(sub_index)
        .bytea(&unhex(log.transaction_hash)?)
        .bytea(&contract)
        .u256(id)
        .bytea(from)
        .bytea(to)
        .u256(qty);
    for (account, qty) in [
        (from, tidemark_model::quantity::SignedQty::loss(qty)),
        (to, tidemark_model::quantity::SignedQty::gain(qty)),
    ] {
        if account.iter().any(|byte| *byte != 0) {
            batch.changes.row().bytea(&contract).u256(id).bytea(account).qty(qty);
        }
    }
    Ok(())
}

fn word(bytes: &[u8]) -> U256 {
    U256::from_be_slice(&bytes[..32])
}

fn unhex(text: &str) -> anyhow::Result<Vec<u8>> {
    hex::decode(text.strip_prefix("0x").unwrap_or(text)).context("not hex")
}
