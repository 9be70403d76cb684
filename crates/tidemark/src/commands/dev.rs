//! `dev`: everything in one process.

use crate::cli::DevArgs;
use crate::config::{Config, Override};
use crate::exit;
use crate::host::{self, Embedded, Host};
use crate::wire::Role;

/// Flags as the last layer of the configuration.
pub fn overrides(args: &DevArgs) -> Vec<Override> {
    let mut flags = vec![];
    let mut put = |path: &'static [&'static str], flag: &'static str, value: Option<String>| {
        flags.extend(value.map(|value| Override { path, value, flag }));
    };
    put(&["database", "data_dir"], "--data-dir", args.data_dir.as_ref().map(|dir| dir.display().to_string()));
    put(&["api", "listen"], "--listen", args.listen.map(|listen| listen.to_string()));
    flags
}

/// Runs it until Ctrl-C or SIGTERM.
pub async fn run(_args: DevArgs, config: Config) -> anyhow::Result<u8> {
    let listen = config.api.listen;
    let starting = async {
        let host = Host::open(config, Embedded::Allowed).await?;
        host.start(Role::DEV).await?;
        anyhow::Ok(host)
    };
    let host = tokio::select! {
        host = starting => host?,
        stop = host::asked_to_stop() => return stop.map(|()| exit::OK),
    };
    println!("Tidemark is running. Explorer and API: http://{listen}  (Ctrl-C stops it)");
    host::asked_to_stop().await?;
    println!("Stopping.");
    host.close().await?;
    Ok(exit::OK)
}
