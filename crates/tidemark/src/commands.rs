//! One file per command: `async fn run(args, config) -> anyhow::Result<u8>`, the exit code.

#![expect(clippy::print_stdout, reason = "commands speak on stdout")]

pub mod bench;
pub mod config;
pub mod databases;
pub mod dev;
pub mod digest;
pub mod dlq;
pub mod migrate;
pub mod rebuild;
pub mod reconcile;
pub mod repair;
pub mod replay;
pub mod rewind;
pub mod run;
pub mod schema;
pub mod sim;
pub mod status;
pub mod sync;
pub mod verify;

use crate::cli::{Cli, Command};
use crate::config::{Config, Override, Sources};
use crate::telemetry;

/// Does what was asked. Logs are set up as soon as the configuration is known.
pub async fn run(cli: Cli) -> anyhow::Result<u8> {
    match cli.command {
        Command::Config(command) => config::run(&command),
        Command::Dev(args) => {
            let config = load(args.config.config.as_deref(), dev::overrides(&args))?;
            dev::run(&args, config).await
        }
        Command::Run(args) => {
            let config = load(args.config.config.as_deref(), vec![])?;
            run::run(args, config).await
        }
        Command::Sync(args) => {
            let config = load(args.config.config.as_deref(), sync::overrides(&args))?;
            sync::run(args, config).await
        }
        Command::Sim(args) => sim::run(args).await,
        Command::Bench(args) => bench::run(args).await,
        Command::Migrate(args) => migrate::run(load(args.config.as_deref(), vec![])?).await,
        Command::Status(args) => {
            let config = load(args.config.config.as_deref(), status::overrides(&args))?;
            status::run(args, config).await
        }
        Command::Verify(command) => verify::run(command).await,
        Command::Digest(args) => digest::run(args).await,
        Command::Dlq(command) => dlq::run(command).await,
        Command::Replay(args) => replay::run(args).await,
        Command::Rewind(args) => rewind::run(args).await,
        Command::Rebuild(command) => rebuild::run(command).await,
        Command::Schema(command) => schema::run(command),
        Command::Repair(command) => repair::run(command).await,
        Command::Reconcile(args) => reconcile::run(args).await,
    }
}

fn load(file: Option<&std::path::Path>, flags: Vec<Override>) -> anyhow::Result<Config> {
    let config = Config::load(&Sources { flags, ..Sources::here(file) })?;
    telemetry::init_logs(&config.telemetry)?;
    Ok(config)
}
