//! `status`: a table a person can read, or JSON.

use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;
use tidemark_store::status::{self, AppProgress, RawProgress};
use tidemark_store::{Db, DbOptions};

use super::databases;
use crate::cli::StatusArgs;
use crate::config::{Config, Override};
use crate::wire;
use crate::{exit, host};

/// Flags as the last layer of the configuration.
pub fn overrides(args: &StatusArgs) -> Vec<Override> {
    let dir = args.data_dir.as_ref().map(|dir| dir.display().to_string());
    dir.into_iter()
        .map(|value| Override { path: &["database", "data_dir"], value, flag: "--data-dir" })
        .collect()
}

/// Everything the command shows.
#[derive(Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// One line per network.
    pub networks: Vec<NetworkLine>,
    /// One line per role and process.
    pub roles: Vec<RoleLine>,
    /// Open dead letters by handler.
    pub dead_letters: Vec<DeadLetters>,
}

/// A network's heights.
#[derive(Debug, PartialEq, Serialize)]
pub struct NetworkLine {
    /// Id.
    pub network_id: i32,
    /// Short name.
    pub slug: String,
    /// Newest height of the nodes.
    pub head: Option<i64>,
    /// Stored up to here.
    pub ingested: Option<i64>,
    /// Normalized up to here.
    pub normalized: Option<i64>,
    /// Projected up to here.
    pub projected: Option<i64>,
    /// Final and applied up to here.
    pub finalized: Option<i64>,
    /// Blocks between head and projection, or as far as the data goes.
    pub lag_blocks: Option<i64>,
    /// Why it is stopped, if it is.
    pub halted: Option<String>,
}

/// A role of a process.
#[derive(Debug, PartialEq, Serialize)]
pub struct RoleLine {
    /// Which process.
    pub instance: String,
    /// Which role.
    pub role: String,
    /// What it does; `lost` when it fell silent.
    pub state: String,
    /// How often it was started again.
    pub restarts: i64,
    /// Why the last time.
    pub last_error: Option<String>,
}

/// Dead letters of a handler.
#[derive(Debug, PartialEq, Serialize)]
pub struct DeadLetters {
    /// Which handler.
    pub handler_kind: String,
    /// How many.
    pub open: i64,
}

/// Runs it.
pub async fn run(args: StatusArgs, config: Config) -> anyhow::Result<u8> {
    let (raw, app) = open(&config)?;
    if !args.watch {
        let report = report(&raw, &app).await?;
        match args.json {
            true => println!("{}", serde_json::to_string_pretty(&report)?),
            false => print!("{}", table(&report)),
        }
        return Ok(exit::OK);
    }
    let mut stop = std::pin::pin!(host::asked_to_stop());
    loop {
        // A database that is away for a moment is part of what one watches.
        let shown =
            report(&raw, &app).await.map_or_else(|error| format!("{error:#}\n"), |report| table(&report));
        print!("\x1b[2J\x1b[H{shown}");
        tokio::select! {
            stopped = &mut stop => return stopped.map(|()| exit::OK),
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
        }
    }
}

fn open(config: &Config) -> anyhow::Result<(Db, Db)> {
    let (raw, app) = databases::urls(config)?;
    let options =
        DbOptions { application_name: "tidemark status".into(), connections_max: 2, ..DbOptions::default() };
    Ok((Db::open(&raw, &options)?, Db::open(&app, &options)?))
}

async fn report(raw: &Db, app: &Db) -> anyhow::Result<Report> {
    let app = app.conn().await?;
    let roles = status::processes(&app).await?;
    let ledger = status::app_progress(&app).await?;
    let dead_letters = status::open_dlq(&app).await?;
    drop(app);
    let raw = status::raw_progress(&raw.conn().await?).await?;
    Ok(Report {
        networks: raw.into_iter().map(|network| line(network, &ledger)).collect(),
        roles: roles
            .into_iter()
            .map(|process| RoleLine {
                state: if wire::is_alive(&process) { process.state } else { "lost".into() },
                instance: process.instance,
                role: process.role,
                restarts: process.restarts,
                last_error: process.last_error,
            })
            .collect(),
        dead_letters: dead_letters
            .into_iter()
            .map(|(handler_kind, open)| DeadLetters { handler_kind, open })
            .collect(),
    })
}

fn line(raw: RawProgress, ledger: &[AppProgress]) -> NetworkLine {
    let ledger = ledger.iter().find(|line| line.network_id == raw.network_id);
    // Heights below zero say that nothing is done yet.
    let height = |of: fn(&AppProgress) -> Option<i64>| ledger.and_then(of).filter(|height| *height >= 0);
    let projected = height(|line| line.projected);
    let normalized = height(|line| line.normalized);
    let done = projected.or(normalized).or(raw.ingested);
    NetworkLine {
        network_id: raw.network_id,
        slug: raw.slug,
        head: raw.latest,
        ingested: raw.ingested,
        normalized,
        projected,
        finalized: height(|line| line.finalized),
        lag_blocks: raw.latest.zip(done).map(|(head, done)| (head - done).max(0)),
        halted: raw.halted,
    }
}

/// The report for people.
pub fn table(report: &Report) -> String {
    let mut text = String::new();
    let number = |value: Option<i64>| value.map_or_else(|| "-".to_owned(), |value| value.to_string());
    if report.networks.is_empty() {
        text.push_str("No network is known yet.\n");
    } else {
        let header = ["NETWORK", "HEAD", "INGESTED", "NORMALIZED", "PROJECTED", "FINALIZED", "LAG", "STATE"];
        let rows = report.networks.iter().map(|network| {
            vec![
                network.slug.clone(),
                number(network.head),
                number(network.ingested),
                number(network.normalized),
                number(network.projected),
                number(network.finalized),
                number(network.lag_blocks),
                network.halted.as_ref().map_or_else(|| "ok".to_owned(), |reason| format!("halted: {reason}")),
            ]
        });
        columns(&mut text, &header, rows.collect());
    }
    text.push('\n');
    if report.roles.is_empty() {
        text.push_str("No process is running.\n");
    } else {
        let rows = report.roles.iter().map(|role| {
            vec![
                role.instance.clone(),
                role.role.clone(),
                role.state.clone(),
                role.restarts.to_string(),
                role.last_error.clone().unwrap_or_else(|| "-".into()),
            ]
        });
        columns(&mut text, &["PROCESS", "ROLE", "STATE", "RESTARTS", "LAST ERROR"], rows.collect());
    }
    for letters in &report.dead_letters {
        let _ = writeln!(
            text,
            "\n{} dead letters of {}: see `tidemark dlq list`.",
            letters.open, letters.handler_kind
        );
    }
    text
}

/// Left-aligned columns, as wide as their widest cell; the last one is not padded.
pub(super) fn columns(text: &mut String, header: &[&str], rows: Vec<Vec<String>>) {
    let header: Vec<String> = header.iter().map(|title| (*title).to_owned()).collect();
    let all: Vec<Vec<String>> = std::iter::once(header).chain(rows).collect();
    let width = |column: usize| all.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    for row in &all {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let _ = write!(line, "{cell:<width$}  ", width = width(column));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_lines_up() {
        let report = Report {
            networks: vec![NetworkLine {
                network_id: 1,
                slug: "ethereum".into(),
                head: Some(120),
                ingested: Some(118),
                normalized: Some(118),
                projected: None,
                finalized: Some(56),
                lag_blocks: Some(2),
                halted: None,
            }],
            roles: vec![RoleLine {
                instance: "host-1".into(),
                role: "ingest".into(),
                state: "running".into(),
                restarts: 0,
                last_error: None,
            }],
            dead_letters: vec![DeadLetters { handler_kind: "ledger".into(), open: 2 }],
        };
        let expected = "\
NETWORK   HEAD  INGESTED  NORMALIZED  PROJECTED  FINALIZED  LAG  STATE
ethereum  120   118       118         -          56         2    ok

PROCESS  ROLE    STATE    RESTARTS  LAST ERROR
host-1   ingest  running  0         -

2 dead letters of ledger: see `tidemark dlq list`.
";
        assert_eq!(table(&report), expected);
    }
}
