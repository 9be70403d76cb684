//! `verify completeness | ledger`

use serde_json::{Value, json};
use tidemark_model::chain::Network;
use tidemark_model::ids::{Height, HeightRange};
use tidemark_pipeline::ingest::verify::{Report, verify_completeness};
use tidemark_pipeline::workers::verify_ledger;
use tidemark_store::cursor;

use super::databases;
use crate::cli::{CompletenessArgs, LedgerArgs, VerifyCommand};
use crate::exit::{self, Usage};
use crate::wire::Context;

/// Runs it.
pub async fn run(command: VerifyCommand) -> anyhow::Result<u8> {
    match command {
        VerifyCommand::Completeness(args) => completeness(args).await,
        VerifyCommand::Ledger(args) => ledger(args).await,
    }
}

async fn completeness(args: CompletenessArgs) -> anyhow::Result<u8> {
    let ctx = databases::open(&args.database)?;
    let mut code = exit::OK;
    let mut answers = vec![];
    for network in databases::networks(&ctx, args.network.as_deref()).await? {
        let Some(range) = range(&ctx, &network, args.from, args.to).await? else {
            answers.push(json!({ "network": network.slug, "complete": true, "blocks": 0, "problems": [] }));
            if !args.json {
                println!("{}: nothing was read yet.", network.slug);
            }
            continue;
        };
        let report = verify_completeness(&ctx.raw.conn().await?, network.id, range).await?;
        if !report.is_complete() {
            code = exit::FOUND;
        }
        answers.push(as_json(&network, &report));
        if !args.json {
            print!("{}", as_text(&network, &report));
        }
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&answers)?);
    } else if answers.is_empty() {
        println!("No network is known yet.");
    }
    Ok(code)
}

/// What to look at: as asked, else from the first height to the last that is done.
async fn range(
    ctx: &Context,
    network: &Network,
    from: Option<u64>,
    to: Option<u64>,
) -> anyhow::Result<Option<HeightRange>> {
    let conn = ctx.raw.conn().await?;
    // Where there are several shards, the slowest says how far the network is done.
    let slowest = cursor::of_network(&conn, network.id).await?.into_iter().min_by_key(|cursor| cursor.next);
    let (start, next) =
        slowest.map_or((network.start_block, network.start_block), |cursor| (cursor.start, cursor.next));
    let first = from.map_or(start, Height);
    let end = to.map_or(next, |last| Height(last).next());
    match HeightRange::new(first, end) {
        Some(range) => Ok(Some(range)),
        None if from.is_some() || to.is_some() => {
            Err(Usage(format!("{}: there is no height from {first} below {end}", network.slug)).into())
        }
        None => Ok(None),
    }
}

fn as_json(network: &Network, report: &Report) -> Value {
    let gaps: Vec<Value> =
        report.gaps().into_iter().map(|gap| json!({ "from": gap.from().0, "to": gap.last().0 })).collect();
    let problems: Vec<String> = report.problems.iter().map(ToString::to_string).collect();
    json!({
        "network": network.slug,
        "from": report.range.from().0,
        "to": report.range.last().0,
        "complete": report.is_complete(),
        "ranges": report.tiles,
        "blocks": report.blocks,
        "events": report.events,
        "gaps": gaps,
        "problems": problems,
    })
}

fn as_text(network: &Network, report: &Report) -> String {
    let (from, last) = (report.range.from(), report.range.last());
    let mut text = if report.is_complete() {
        format!("{}: heights {from} to {last} are complete", network.slug)
    } else {
        format!("{}: heights {from} to {last} are not complete", network.slug)
    };
    text.push_str(&format!(
        " ({} accepted ranges, {} blocks, {} events).\n",
        report.tiles, report.blocks, report.events
    ));
    for problem in &report.problems {
        text.push_str(&format!("  {problem}\n"));
    }
    text
}

async fn ledger(args: LedgerArgs) -> anyhow::Result<u8> {
    let ctx = databases::open(&args.database)?;
    let mut code = exit::OK;
    let mut answers = vec![];
    for network in databases::networks(&ctx, args.network.as_deref()).await? {
        let mut conn = ctx.app.conn().await?;
        let tx = conn.snapshot_tx().await?;
        let violations = verify_ledger(&tx, network.id).await?;
        tx.rollback().await?;
        if !violations.is_empty() {
            code = exit::FOUND;
        }
        let rows: Vec<Value> =
            violations.iter().map(|one| json!({ "check": one.check, "detail": one.detail })).collect();
        answers.push(json!({ "network": network.slug, "sound": violations.is_empty(), "violations": rows }));
        if args.json {
            continue;
        }
        match violations.len() {
            0 => println!("{}: every invariant holds.", network.slug),
            count => println!("{}: {count} rows break an invariant.", network.slug),
        }
        for violation in &violations {
            println!("  {}: {}", violation.check, violation.detail);
        }
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&answers)?);
    } else if answers.is_empty() {
        println!("No network is known yet.");
    }
    Ok(code)
}
