//! `repair lookups`

use serde_json::{Value, json};
use tidemark_model::ids::HeightRange;
use tidemark_pipeline::ingest::verify::repair_lookups;
use tidemark_store::cursor;

use super::databases;
use crate::cli::RepairCommand;
use crate::exit;

/// Runs it.
pub async fn run(command: RepairCommand) -> anyhow::Result<u8> {
    let RepairCommand::Lookups(args) = command;
    let ctx = databases::open(&args.database)?;
    let mut answers: Vec<Value> = vec![];
    for network in databases::networks(&ctx, args.network.as_deref()).await? {
        let mut conn = ctx.raw.conn().await?;
        // Where there are several shards, the fastest says how far there is something.
        let cursors = cursor::of_network(&conn, network.id).await?;
        let fastest = cursors.into_iter().max_by_key(|cursor| cursor.next);
        let range = fastest.and_then(|cursor| HeightRange::new(cursor.start, cursor.next));
        let Some(range) = range else {
            if !args.json {
                println!("{}: nothing was read yet.", network.slug);
            }
            continue;
        };
        let done = repair_lookups(&mut conn, network.id, range).await?;
        answers.push(json!({
            "network": network.slug,
            "from": range.from().0,
            "to": range.last().0,
            "transactions_added": done.tx_added,
            "transactions_removed": done.tx_removed,
            "blocks_added": done.block_added,
            "blocks_removed": done.block_removed,
        }));
        if !args.json {
            println!(
                "{}: heights {} to {}: lookups of transactions: {} added, {} removed; of blocks: {} added, {} removed.",
                network.slug,
                range.from(),
                range.last(),
                done.tx_added,
                done.tx_removed,
                done.block_added,
                done.block_removed
            );
        }
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&answers)?);
    }
    Ok(exit::OK)
}
