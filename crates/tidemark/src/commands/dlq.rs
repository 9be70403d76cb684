//! `dlq list | show | retry | release | discard`

use anyhow::Context as _;
use serde_json::{Value, json};
use tidemark_bus::dlq::{self, RetryOptions};
use tidemark_store::dlq::{DeadLetter, Filter};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::databases;
use super::status::columns;
use crate::cli::{
    DlqCommand, DlqDiscardArgs, DlqListArgs, DlqReleaseArgs, DlqRetryArgs, DlqShowArgs, LetterArgs,
};
use crate::exit;
use crate::roles::Shop;

/// Runs it.
pub async fn run(command: DlqCommand) -> anyhow::Result<u8> {
    match command {
        DlqCommand::List(args) => list(args).await,
        DlqCommand::Show(args) => show(args).await,
        DlqCommand::Retry(args) => retry(args).await,
        DlqCommand::Release(args) => release(args).await,
        DlqCommand::Discard(args) => discard(args).await,
    }
}

fn filter(args: &LetterArgs) -> Filter {
    Filter {
        handler: args.handler.clone(),
        key: args.key.clone(),
        topic: args.topic.clone(),
        kind: args.kind.clone(),
        ..Filter::default()
    }
}

async fn list(args: DlqListArgs) -> anyhow::Result<u8> {
    let ctx = databases::open(&args.database)?;
    let filter = Filter { resolved: args.all, ..filter(&args.letters) };
    let letters = dlq::list(&ctx.app, &filter, args.letters.limit).await?;
    let parked = dlq::parked(&ctx.app, args.letters.handler.as_deref()).await?;
    if args.json {
        let letters: Vec<Value> = letters.iter().map(summary).collect();
        let parked: Vec<Value> = parked
            .iter()
            .map(|key| {
                json!({
                    "handler": key.handler, "stream": key.stream, "part": key.part,
                    "key": key.partition_key, "open": key.open,
                })
            })
            .collect();
        println!("{}", serde_json::to_string_pretty(&json!({ "letters": letters, "parked": parked }))?);
    } else if letters.is_empty() {
        println!("No dead letters.");
    } else {
        let rows = letters.iter().map(|letter| {
            vec![
                letter.id.to_string(),
                letter.handler.clone(),
                letter.resolution.clone().unwrap_or_else(|| letter.kind.clone()),
                letter.topic.clone(),
                letter.partition_key.clone(),
                letter.pseq.to_string(),
                letter.attempts.to_string(),
                letter.error.clone(),
            ]
        });
        let header = ["ID", "HANDLER", "KIND", "SUBJECT", "KEY", "NUMBER", "ATTEMPTS", "ERROR"];
        let mut text = String::new();
        columns(&mut text, &header, rows.collect());
        print!("{text}");
        for key in &parked {
            println!(
                "\nKey {} of {} is parked with {} letters: `tidemark dlq release --handler {} --key {}`.",
                key.partition_key, key.handler, key.open, key.handler, key.partition_key
            );
        }
    }
    let open = letters.iter().any(|letter| letter.resolved_at.is_none());
    Ok(if open { exit::FOUND } else { exit::OK })
}

fn when(at: OffsetDateTime) -> String {
    at.format(&Rfc3339).unwrap_or_default()
}

fn summary(letter: &DeadLetter) -> Value {
    json!({
        "id": letter.id,
        "handler": letter.handler,
        "subject": letter.topic,
        "stream": letter.stream,
        "part": letter.part,
        "number": letter.pseq,
        "key": letter.partition_key,
        "event_id": letter.event_id,
        "kind": letter.kind,
        "error": letter.error,
        "attempts": letter.attempts,
        "failed_at": when(letter.failed_at),
        "resolved_at": letter.resolved_at.map(when),
        "resolution": letter.resolution,
    })
}

async fn show(args: DlqShowArgs) -> anyhow::Result<u8> {
    let ctx = databases::open(&args.database)?;
    let letter = dlq::show(&ctx.app, args.id).await?;
    let letter = letter
        .with_context(|| format!("there is no dead letter {}: see `tidemark dlq list --all`", args.id))?;
    let mut whole = summary(&letter);
    whole["error_chain"] = json!(letter.chain);
    whole["versions"] = letter.versions;
    whole["envelope"] = letter.envelope;
    println!("{}", serde_json::to_string_pretty(&whole)?);
    Ok(exit::OK)
}

async fn retry(args: DlqRetryArgs) -> anyhow::Result<u8> {
    let ctx = databases::open(&args.database)?;
    let desk = Shop::open(&ctx).await?.desk();
    let ids = (!args.ids.is_empty()).then(|| args.ids.clone());
    let filter = Filter { ids, ..filter(&args.letters) };
    let options = RetryOptions {
        by: args.actor.by,
        reason: args.reason,
        limit: args.letters.limit,
        per_second: args.per_second,
        dry_run: args.dry_run,
    };
    let report = dlq::retry(&desk, &filter, &options).await?;
    let missing: Vec<i64> = {
        let failed = report.failed.iter().map(|(id, _)| *id);
        let seen: Vec<i64> = report.done.iter().chain(&report.waiting).copied().chain(failed).collect();
        args.ids.into_iter().filter(|id| !seen.contains(id)).collect()
    };
    match args.dry_run {
        true => println!("Would retry {}: {:?}.", report.done.len(), report.done),
        false => println!("Retried {}: {:?}.", report.done.len(), report.done),
    }
    for id in &report.waiting {
        println!("  {id} waits for an earlier letter of its key");
    }
    for (id, error) in &report.failed {
        println!("  {id} failed again: {error}");
    }
    for id in &missing {
        println!("  {id} is not an open letter");
    }
    let all = report.waiting.is_empty() && report.failed.is_empty() && missing.is_empty();
    Ok(if all { exit::OK } else { exit::FOUND })
}

async fn release(args: DlqReleaseArgs) -> anyhow::Result<u8> {
    let ctx = databases::open(&args.database)?;
    let desk = Shop::open(&ctx).await?.desk();
    let done = dlq::release(&desk, &args.handler, &args.key, &args.actor.by, args.reason.as_deref()).await?;
    println!(
        "Applied {} letters; key {} of {} is {}.",
        done.applied,
        args.key,
        args.handler,
        if done.unparked { "free again" } else { "still parked" }
    );
    if let Some((id, error)) = &done.failed {
        println!("  {id} failed again: {error}");
    }
    Ok(if done.unparked { exit::OK } else { exit::FOUND })
}

async fn discard(args: DlqDiscardArgs) -> anyhow::Result<u8> {
    let ctx = databases::open(&args.database)?;
    dlq::discard(&ctx.app, args.id, &args.actor.by, &args.reason).await?;
    println!("Discarded {}; its event never has its effect.", args.id);
    Ok(exit::OK)
}
