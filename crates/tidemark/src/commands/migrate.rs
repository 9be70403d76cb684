//! `migrate`

use metrics_exporter_prometheus::PrometheusBuilder;

use crate::config::Config;
use crate::exit;
use crate::host;
use crate::wire::Context;

/// Runs it.
pub async fn run(config: Config) -> anyhow::Result<u8> {
    let ctx = Context::open(config, None, PrometheusBuilder::new().build_recorder().handle())?;
    let applied = host::migrate_both(&ctx).await?;
    match applied.now.as_slice() {
        [] => println!("Nothing to do: {} migrations were applied before.", applied.before),
        now => println!("Applied {}: {}.", now.len(), now.join(", ")),
    }
    Ok(exit::OK)
}
