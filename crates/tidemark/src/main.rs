//! The Tidemark binary.

use std::process::ExitCode;

use clap::Parser;
use tidemark::{cli, commands, exit, parent, telemetry};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    parent::obey();
    let cli = cli::Cli::parse();
    // One provider for every TLS connection of the process; an error means that it is there already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("tidemark: cannot start: {error}");
            return ExitCode::from(exit::FAILURE);
        }
    };
    match runtime.block_on(commands::run(cli)) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("tidemark: {}", telemetry::scrub(&format!("{error:#}")));
            ExitCode::from(exit::code(&error))
        }
    }
}
