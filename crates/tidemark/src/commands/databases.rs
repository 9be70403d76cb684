//! Which database a command of an operator looks at, and which networks it means.

use std::path::Path;

use anyhow::Context as _;
use metrics_exporter_prometheus::PrometheusBuilder;
use tidemark_model::chain::Network;
use tidemark_model::redact::RedactedUrl;
use tidemark_store::{Db, cursor};

use crate::cli::DatabaseArgs;
use crate::config::{Config, Override};
use crate::exit::Usage;
use crate::wire::Context;

/// Opens the configured database, else that of the `tidemark dev` which runs in the data directory.
pub fn open(args: &DatabaseArgs) -> anyhow::Result<Context> {
    let dir = args.data_dir.as_ref().map(|dir| dir.display().to_string());
    let dir = dir.map(|value| Override { path: &["database", "data_dir"], value, flag: "--data-dir" });
    let mut config = super::load(args.config.config.as_deref(), dir.into_iter().collect())?;
    let (raw, app) = urls(&config)?;
    (config.database.raw_url, config.database.app_url) = (Some(raw), Some(app));
    Context::open(config, None, PrometheusBuilder::new().build_recorder().handle())
}

/// The raw and the app side's address.
pub fn urls(config: &Config) -> anyhow::Result<(RedactedUrl, RedactedUrl)> {
    match (&config.database.raw_url, &config.database.app_url) {
        (Some(raw), Some(app)) => Ok((raw.clone(), app.clone())),
        _ => {
            let url = embedded_url(&config.database.data_dir)?;
            Ok((url.clone(), url))
        }
    }
}

/// Where the private Postgres of `dev` said it is.
fn embedded_url(data_dir: &Path) -> anyhow::Result<RedactedUrl> {
    let path = data_dir.join("url");
    let text = std::fs::read_to_string(&path).with_context(|| {
        format!(
            "no database is configured and {} is not there: set database.url, or start `tidemark dev`",
            path.display()
        )
    })?;
    Ok(RedactedUrl::parse(text.trim())?)
}

/// The networks the database knows; only the one that is named, if one is.
pub async fn networks(ctx: &Context, named: Option<&str>) -> anyhow::Result<Vec<Network>> {
    let known = known(&ctx.raw).await?;
    let chosen = choose(&known, named)?;
    chosen
        .into_iter()
        .map(|network| {
            let family = serde_json::from_value(network.family.clone().into())
                .with_context(|| format!("network {} is of family {:?}", network.slug, network.family))?;
            Ok(Network {
                id: network.id,
                slug: network.slug.clone(),
                family,
                start_block: network.start_block,
                confirmations: network.confirmations,
                reorg_depth_max: ctx.config.ingest.max_reorg_depth,
            })
        })
        .collect()
}

/// The one network that is named.
pub async fn network(ctx: &Context, named: &str) -> anyhow::Result<Network> {
    let mut found = networks(ctx, Some(named)).await?;
    found.pop().context("a named network is found or refused")
}

/// All rows of ref.networks.
pub async fn known(db: &Db) -> anyhow::Result<Vec<cursor::KnownNetwork>> {
    Ok(cursor::networks(&db.conn().await?).await?)
}

/// All of `known`, or the one whose id or short name is `named`.
pub fn choose<'k>(
    known: &'k [cursor::KnownNetwork],
    named: Option<&str>,
) -> Result<Vec<&'k cursor::KnownNetwork>, Usage> {
    let Some(named) = named else { return Ok(known.iter().collect()) };
    match known.iter().find(|network| network.slug == named || network.id.to_string() == named) {
        Some(network) => Ok(vec![network]),
        None => {
            let names: Vec<&str> = known.iter().map(|network| network.slug.as_str()).collect();
            let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            Err(Usage(format!("the database has no network {named}; it has: {names}")))
        }
    }
}
