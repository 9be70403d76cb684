//! `run --roles …`

use crate::cli::RunArgs;
use crate::config::Config;
use crate::exit;
use crate::host::{self, Embedded, Host};

/// Runs it until Ctrl-C or SIGTERM.
pub async fn run(args: RunArgs, config: Config) -> anyhow::Result<u8> {
    if config.networks.is_empty() && args.roles.contains(&crate::wire::Role::Ingest) {
        anyhow::bail!(
            "there is no [[network]] to ingest: add one to the configuration; `tidemark config example` shows it"
        );
    }
    // One listener from the first moment: a signal between two of them would be lost.
    let mut stop = std::pin::pin!(host::asked_to_stop());
    let starting = async {
        let host = Host::open(config, Embedded::Refused).await?;
        host.start(&args.roles).await?;
        anyhow::Ok(host)
    };
    let host = tokio::select! {
        host = starting => host?,
        stopped = &mut stop => return stopped.map(|()| exit::OK),
    };
    tracing::info!(action = "running", instance = host.ctx.instance, "Running.");
    stop.await?;
    tracing::info!(action = "draining", "Stopping.");
    host.close().await?;
    Ok(exit::OK)
}
