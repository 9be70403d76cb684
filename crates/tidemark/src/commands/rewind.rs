//! `rewind`: the operator's way back below finality.

use serde_json::json;
use tidemark_model::chain::Network;
use tidemark_model::ids::Height;
use tidemark_pipeline::workers::{Cause, rewind};
use tidemark_store::status::{self, Process};
use tidemark_store::{cursor, dlq};
use time::OffsetDateTime;

use super::databases;
use crate::cli::RewindArgs;
use crate::exit::{self, Usage};
use crate::parts::Parts;
use crate::wire::{self, Context};

/// Runs it.
pub async fn run(args: RewindArgs) -> anyhow::Result<u8> {
    let ctx = databases::open(&args.database)?;
    let network = databases::network(&ctx, &args.network).await?;
    if args.to.saturating_add(1) < network.start_block.0 {
        let start = network.start_block;
        return Err(
            Usage(format!("{} starts at block {start}: --to must not lie below", network.slug)).into()
        );
    }
    let conn = ctx.app.conn().await?;
    let busy = busy(&status::processes(&conn).await?, &network);
    anyhow::ensure!(
        busy.is_empty() || args.force,
        "{} is being worked on by {}: stop them, or say --force",
        network.slug,
        busy.join(", ")
    );
    let progress = status::app_progress(&conn).await?;
    drop(conn);
    let line = progress.iter().find(|line| line.network_id == network.id.0);
    let before = line.and_then(|line| line.finalized).unwrap_or(-1);

    let done = undo(&ctx, &network, &args).await?;
    // Only a ledger that went back may meet the chain again.
    let unhalted = cursor::unhalt(&ctx.raw.conn().await?, network.id).await?;
    let key = network.id.to_string();
    let parked = dlq::parked_keys(&ctx.app.conn().await?, Some("ledger"), Some(&key)).await?;
    if args.json {
        let answer = json!({
            "network": network.slug,
            "final_before": before,
            "final_now": before.min(Height(args.to).as_i64()),
            "events_open_again": done.events,
            "assets_rebuilt": done.assets,
            "events_emitted": done.emitted,
            "unhalted": unhalted,
            "parked_letters": parked.iter().map(|key| key.open).sum::<u64>(),
        });
        println!("{}", serde_json::to_string_pretty(&answer)?);
        return Ok(exit::OK);
    }
    if before <= Height(args.to).as_i64() {
        println!("Nothing to undo: {} is final up to {before}.", network.slug);
    } else {
        println!("{} is final up to {} again; it was {before}.", network.slug, args.to);
        println!(
            "  {} events are open again, {} assets were rebuilt from the event log, {} events tell of it.",
            done.events, done.assets, done.emitted
        );
    }
    if unhalted {
        println!("  The network was halted and goes on.");
    }
    for parked in parked {
        println!(
            "  {} events wait for it: `tidemark dlq release --handler ledger --key {key}`.",
            parked.open
        );
    }
    Ok(exit::OK)
}

struct Undone {
    events: usize,
    assets: usize,
    emitted: usize,
}

/// The rewind, its events and its audit row: one transaction.
async fn undo(ctx: &Context, network: &Network, args: &RewindArgs) -> anyhow::Result<Undone> {
    let emitter = Parts::new(&ctx.config, &ctx.instance)?.emitter;
    let cause = Cause {
        id: format!("rewind:{}:{}:{}", network.id, args.to, uuid::Uuid::now_v7()),
        at: OffsetDateTime::now_utc(),
    };
    let mut conn = ctx.app.conn().await?;
    let tx = conn.tx().await?;
    let done = rewind(&tx, network, Height(args.to), &cause).await?;
    emitter.append(&tx, &done.drafts).await?;
    let undone =
        Undone { events: done.reverted, assets: done.touched_assets.len(), emitted: done.drafts.len() };
    let detail =
        json!({ "to": args.to, "events": undone.events, "assets": undone.assets, "force": args.force });
    let reason = args.reason.as_deref();
    dlq::audit(&tx, &args.actor.by, "ledger.rewind", &network.slug, reason, &detail).await?;
    tx.commit().await?;
    Ok(undone)
}

/// Roles that write this network's ledger, or would at once, and that have said so lately.
fn busy(processes: &[Process], network: &Network) -> Vec<String> {
    let own = [format!("ingest:{}", network.slug), format!("history:{}", network.slug)];
    processes
        .iter()
        .filter(|process| process.role == "ledger" || own.contains(&process.role))
        .filter(|process| wire::is_alive(process))
        .filter(|process| matches!(process.state.as_str(), "starting" | "running" | "restarting"))
        .map(|process| format!("{} of {}", process.role, process.instance))
        .collect()
}
