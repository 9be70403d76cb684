//! `rebuild projection | undo | forget`

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use tidemark_pipeline::projectors::{
    Progress, ProjectionName, RebuildReport, forget_rebuild, rebuild_projection, undo_rebuild,
};
use tidemark_store::dlq;

use super::databases;
use crate::cli::{Projections, RebuildArgs, RebuildCommand, RebuiltArgs};
use crate::exit;
use crate::wire::Context;

/// Runs it.
pub async fn run(command: RebuildCommand) -> anyhow::Result<u8> {
    match command {
        RebuildCommand::Projection(args) => projection(args).await,
        RebuildCommand::Undo(args) => undo(args).await,
        RebuildCommand::Forget(args) => forget(args).await,
    }
}

async fn projection(args: RebuildArgs) -> anyhow::Result<u8> {
    let ctx = databases::open(&args.database)?;
    let names = match args.name {
        Projections::All => ProjectionName::ALL.to_vec(),
        Projections::One(name) => vec![name],
    };
    let mut answers = vec![];
    for name in names {
        let bar = progress_bar(name);
        let show = |progress: Progress| {
            bar.set_length(progress.total);
            bar.set_position(progress.done);
            bar.set_message(format!("{}, {} rows", progress.phase, progress.rows));
        };
        let report = rebuild_projection(&ctx.app, name, &show).await?;
        bar.finish_and_clear();
        let detail = json!({ "rows": report.rows, "differing": report.differing.count });
        audit(&ctx, &args.actor.by, "projection.rebuild", name, &detail).await?;
        if !args.json {
            print!("{}", as_text(&report));
        }
        answers.push(as_json(&report));
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&answers)?);
    }
    Ok(exit::OK)
}

fn as_text(report: &RebuildReport) -> String {
    let (name, rows, differing) = (report.name, report.rows, &report.differing);
    let mut text = match differing.count {
        0 => format!("{name}: {rows} rows built, all as they were.\n"),
        count => format!("{name}: {rows} rows built, {count} differed from the live table.\n"),
    };
    let row = |value: &Option<Value>| value.as_ref().map_or_else(|| "no row".to_owned(), Value::to_string);
    for one in &differing.samples {
        text.push_str(&format!("  was {}\n  now {}\n", row(&one.live), row(&one.rebuilt)));
    }
    text
}

fn as_json(report: &RebuildReport) -> Value {
    let samples: Vec<Value> = report
        .differing
        .samples
        .iter()
        .map(|one| json!({ "live": one.live, "rebuilt": one.rebuilt }))
        .collect();
    json!({
        "projection": report.name.as_str(),
        "rows": report.rows,
        "differing": report.differing.count,
        "samples": samples,
    })
}

async fn undo(args: RebuiltArgs) -> anyhow::Result<u8> {
    let ctx = databases::open(&args.database)?;
    anyhow::ensure!(
        undo_rebuild(&ctx.app, args.name).await?,
        "there is nothing to undo: {} was not rebuilt, or its old table was forgotten",
        args.name
    );
    audit(&ctx, &args.actor.by, "projection.rebuild_undo", args.name, &json!({})).await?;
    println!("{} is what it was before the last rebuild.", args.name);
    Ok(exit::OK)
}

async fn forget(args: RebuiltArgs) -> anyhow::Result<u8> {
    let ctx = databases::open(&args.database)?;
    forget_rebuild(&ctx.app, args.name).await?;
    audit(&ctx, &args.actor.by, "projection.rebuild_forget", args.name, &json!({})).await?;
    println!("Nothing is kept of {} before its last rebuild.", args.name);
    Ok(exit::OK)
}

async fn audit(
    ctx: &Context,
    by: &str,
    action: &str,
    name: ProjectionName,
    detail: &Value,
) -> anyhow::Result<()> {
    let mut conn = ctx.app.conn().await?;
    let tx = conn.tx().await?;
    dlq::audit(&tx, by, action, name.as_str(), None, detail).await?;
    Ok(tx.commit().await?)
}

/// Pieces and rows; nothing where nobody looks.
fn progress_bar(name: ProjectionName) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{prefix} {bar:40} {pos}/{len}  {msg}  {eta} left")
        .expect("a fixed template");
    ProgressBar::new(0).with_style(style).with_prefix(name.as_str())
}
