//! `reconcile`

use serde_json::{Value, json};
use tidemark_pipeline::projectors::{MISMATCH_RATE_MAX, reconcile};

use super::databases;
use super::status::columns;
use crate::cli::ReconcileArgs;
use crate::exit;

/// Runs it.
pub async fn run(args: ReconcileArgs) -> anyhow::Result<u8> {
    let ctx = databases::open(&args.database)?;
    let report = reconcile(&mut ctx.app.conn().await?, args.sample).await?;
    if args.json {
        let runs: Vec<Value> = report
            .runs
            .iter()
            .map(|run| {
                let evidence: Vec<Value> =
                    run.evidence.iter().map(|one| json!({ "id": one.id, "detail": one.detail })).collect();
                json!({
                    "projection": run.projection,
                    "sample_size": run.sample_size,
                    "mismatches": run.mismatches_found,
                    "rate": run.mismatch_rate,
                    "evidence": evidence,
                })
            })
            .collect();
        let answer = json!({ "alarming": report.is_alarming(), "rate_max": MISMATCH_RATE_MAX, "runs": runs });
        println!("{}", serde_json::to_string_pretty(&answer)?);
    } else {
        let rows = report.runs.iter().map(|run| {
            vec![
                run.projection.to_owned(),
                run.sample_size.to_string(),
                run.mismatches_found.to_string(),
                format!("{:.3} %", run.mismatch_rate * 100.0),
            ]
        });
        let mut text = String::new();
        columns(&mut text, &["PROJECTION", "LOOKED AT", "DIFFER", "RATE"], rows.collect());
        print!("{text}");
        for run in &report.runs {
            for one in &run.evidence {
                println!("  {} {}: {}", run.projection, one.id, one.detail);
            }
        }
        if report.is_alarming() {
            println!("Too many differ: `tidemark rebuild projection NAME`.");
        }
    }
    Ok(if report.is_alarming() { exit::FOUND } else { exit::OK })
}
