//! `schema lint`: may these event schemas be published?

use std::path::Path;
use std::process::Command;

use anyhow::Context as _;
use serde_json::{Value, json};
use tidemark_bus::lint::{Declared, Refusal, lint};
use tidemark_bus::registry::read_dir;
use tidemark_pipeline::handlers::CONSUMERS;

use crate::cli::SchemaCommand;
use crate::exit::{self, Usage};

/// Runs it.
pub fn run(command: SchemaCommand) -> anyhow::Result<u8> {
    let SchemaCommand::Lint(args) = command;
    let new = read_dir(&args.dir)?;
    let old = at_revision(&args.dir, &args.against)?;
    let refusals = lint(&old, &new, &declared())?;
    if args.json {
        let refusals: Vec<Value> = refusals.iter().map(as_json).collect();
        println!("{}", serde_json::to_string_pretty(&refusals)?);
    } else if refusals.is_empty() {
        println!("{} schemas may be published; {} has {}.", new.len(), args.against, old.len());
    } else {
        for refusal in &refusals {
            println!("{}: {} ({:?})", refusal.schema, refusal.detail, refusal.rule);
            if let Some(example) = &refusal.counterexample {
                println!("  counterexample: {example}");
            }
            println!("  instead: {}", refusal.rule.advice());
        }
    }
    Ok(if refusals.is_empty() { exit::OK } else { exit::FOUND })
}

fn as_json(refusal: &Refusal) -> Value {
    json!({
        "schema": refusal.schema,
        "rule": format!("{:?}", refusal.rule),
        "detail": refusal.detail,
        "counterexample": refusal.counterexample,
        "instead": refusal.rule.advice(),
    })
}

/// What the handlers of this build take.
fn declared() -> Vec<Declared> {
    let mut all = vec![];
    for (kind, accepts) in CONSUMERS {
        for one in *accepts {
            all.extend(one.versions.iter().map(|version| Declared {
                handler: (*kind).to_owned(),
                subject: format!("{}.v{version}", one.subject),
            }));
        }
    }
    all
}

/// The schemas of `dir` as they are in a revision, by path without ending.
fn at_revision(dir: &Path, revision: &str) -> anyhow::Result<Vec<(String, String)>> {
    if revision.starts_with('-') || revision.contains(':') {
        return Err(Usage(format!("--against {revision} is not a revision")).into());
    }
    let names = git(dir, &["ls-tree", "-r", "--name-only", revision, "--", "."])?;
    let names = names.lines().filter_map(|name| Some((name, name.strip_suffix(".json")?)));
    names
        .map(|(file, name)| Ok((name.to_owned(), git(dir, &["show", &format!("{revision}:./{file}")])?)))
        .collect()
}

fn git(dir: &Path, args: &[&str]) -> anyhow::Result<String> {
    let output = Command::new("git")
        .arg("-C")
        .arg(dir)
        .args(["-c", "core.quotePath=false"])
        .args(args)
        .output()
        .context("git does not start: install it, the published schemas are read from it")?;
    anyhow::ensure!(
        output.status.success(),
        "git cannot read the published schemas of {}: {}",
        dir.display(),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    String::from_utf8(output.stdout).context("a published schema is not UTF-8")
}
