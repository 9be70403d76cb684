//! `bench NAME`

use clap::Parser;

use crate::bench::{api, bus, growth, ingest, ledger, live, rows, sync};
use crate::cli::{BenchArgs, BenchCommand, Cli, Command};
use crate::exit;

/// Runs it; the table goes to standard output, the JSON to `--out`.
pub async fn run(args: BenchArgs) -> anyhow::Result<u8> {
    let out = &args.out;
    match &args.name {
        BenchCommand::Sync(sync) => sync::run(sync, out).await?,
        BenchCommand::Rows(rows) => rows::run(rows, out).await?,
        BenchCommand::Ledger(ledger) => ledger::run(ledger, out).await?,
        BenchCommand::Ingest(ingest) => ingest::run(ingest, out).await?,
        BenchCommand::Bus(bus) => bus::run(bus, out).await?,
        BenchCommand::Live(live) => live::run(live, out).await?,
        BenchCommand::Growth(growth) => growth::run(growth, out).await?,
        BenchCommand::Api(args) => api::run(args, out).await?,
        BenchCommand::All => {
            for name in BenchCommand::EACH {
                all(name, out).await?;
            }
        }
    }
    Ok(exit::OK)
}

/// One of them as if it had been asked for by name, so that its defaults are those of its own help.
async fn all(name: &str, out: &std::path::Path) -> anyhow::Result<()> {
    eprintln!("== bench {name}");
    let words = [
        std::ffi::OsStr::new("tidemark"),
        "bench".as_ref(),
        name.as_ref(),
        "--out".as_ref(),
        out.as_os_str(),
    ];
    match Cli::try_parse_from(words)?.command {
        Command::Bench(args) => Box::pin(run(args)).await.map(|_| ()),
        _ => anyhow::bail!("{name} is no benchmark"),
    }
}
