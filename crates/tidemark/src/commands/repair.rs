//! `repair lookups`

use serde_json::{Value, json};
use tidemark_model::ids::HeightRange;
use tidemark_pipeline::ingest::verify::repair_lookups;
use tidemark_store::{cursor, status};

use super::databases;
use crate::cli::RepairCommand;
use crate::exit;

/// The shard that this build ingests.
const SHARD: i32 = 0;

/// Runs it.
pub async fn run(command: RepairCommand) -> anyhow::Result<u8> {
    let RepairCommand::Lookups(args) = command;
    let ctx = databases::open(&args.database)?;
    let mut answers: Vec<Value> = vec![];
    for network in databases::networks(&ctx, args.network.as_deref()).await? {
        let mut conn = ctx.raw.conn().await?;
        let seen = status::raw_progress(&conn).await?;
        let read = seen.iter().any(|line| line.network_id == network.id.0 && line.ingested.is_some());
        let range = if read {
            let cursor = cursor::read(&conn, &cursor::cursor_id(&network, SHARD)).await?;
            HeightRange::new(cursor.start, cursor.next)
        } else {
            None
        };
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
