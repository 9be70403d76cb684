//! `config check | example | show`

use crate::cli::ConfigCommand;
use crate::config::{Config, EXAMPLE, Sources};
use crate::exit;

/// Runs it.
pub fn run(command: &ConfigCommand) -> anyhow::Result<u8> {
    match command {
        ConfigCommand::Example => print!("{EXAMPLE}"),
        ConfigCommand::Check(args) => {
            let config = Config::load(&Sources::here(args.config.as_deref()))?;
            let networks: Vec<&str> = config.networks.iter().map(|network| network.slug.as_str()).collect();
            println!(
                "The configuration is fine. Networks: {}.",
                if networks.is_empty() { "none".into() } else { networks.join(", ") }
            );
        }
        ConfigCommand::Show(args) => {
            print!("{}", Config::load(&Sources::here(args.config.as_deref()))?.show())
        }
    }
    Ok(exit::OK)
}
