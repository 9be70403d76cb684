//! `dev`: everything in one process.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tidemark_model::chain::Family;
use tidemark_model::ids::NetworkId;
use tidemark_model::redact::RedactedUrl;

use crate::cli::DevArgs;
use crate::config::{Bloom, Config, Finality, Headers, Mode, NetworkConfig, Override};
use crate::dev_chain::{self, DevChain};
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
pub async fn run(args: &DevArgs, mut config: Config) -> anyhow::Result<u8> {
    let listen = config.api.listen;
    // One listener from the first moment: a signal between two of them would be lost.
    let mut stop = std::pin::pin!(host::asked_to_stop());
    let starting = async {
        // Before anything is written to the data directory.
        host::check_ports(&config).await?;
        if let Some(url) = &args.rpc {
            let url = RedactedUrl::parse(url)
                .context("--rpc is not a URL; write for example http://127.0.0.1:8545")?;
            let network = network_at(&url, &config.database.data_dir).await?;
            println!("Reading chain {} from block {}.", network.id, network.start_block);
            config.networks = vec![network];
        }
        host::check_ports(&config).await?;
        let chain = match config.networks.is_empty() {
            true => Some(DevChain::open(&config.database.data_dir, args.seed).await?),
            false => None,
        };
        if let Some(chain) = &chain {
            config.networks = vec![simulated(chain)?];
        }
        let host = Host::open(config, Embedded::Allowed).await?;
        anyhow::Ok((host, chain))
    };
    let (host, chain) = tokio::select! {
        opened = starting => opened?,
        stopped = &mut stop => return stopped.map(|()| exit::OK),
    };
    // From here on there is something to stop in order, also when a signal comes while roles start.
    let started = tokio::select! {
        started = host.start(Role::DEV) => started.map(|_| true),
        stopped = &mut stop => stopped.map(|()| false),
    };
    if !matches!(started, Ok(true)) {
        host.close().await?;
        return started.map(|_| exit::OK);
    }
    if let Some(chain) = chain {
        host.start_chain(chain);
    }
    println!("Tidemark is running. Explorer and API: http://{listen}  (Ctrl-C stops it)");
    stop.await?;
    println!("Stopping.");
    host.close().await?;
    Ok(exit::OK)
}

fn simulated(chain: &DevChain) -> anyhow::Result<NetworkConfig> {
    Ok(NetworkConfig {
        id: NetworkId(i32::try_from(dev_chain::CHAIN_ID)?),
        slug: dev_chain::SLUG.to_owned(),
        family: Family::Evm,
        rpc: vec![RedactedUrl::parse(&chain.server.url)?],
        ws: vec![RedactedUrl::parse(&chain.server.ws_url)?],
        start_block: 0,
        finality: Finality::Tag,
        mode: Mode::Logs,
        contracts: vec![],
        confirmations: 6,
        headers: Headers::All,
        bloom: Bloom::Check,
    })
}

/// Blocks of the past that a first look at a long chain begins with. A configuration file says otherwise.
const PAST_BLOCKS: u64 = 10_000;

/// What was decided at the first look, so that a restart goes on instead of beginning elsewhere.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FirstLook {
    chain_id: i32,
    start_block: u64,
}

/// The network behind `--rpc`: its chain id from the node, its start from the first look.
async fn network_at(url: &RedactedUrl, data_dir: &Path) -> anyhow::Result<NetworkConfig> {
    let chain_id =
        i32::try_from(ask(url, "eth_chainId").await?).context("the node's chain id is too large")?;
    let path = data_dir.join(format!("chain-{chain_id}.json"));
    let known = std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<FirstLook>(&bytes).ok());
    let look = match known {
        Some(look) if look.chain_id == chain_id => look,
        _ => {
            let head = ask(url, "eth_blockNumber").await?;
            let look = FirstLook { chain_id, start_block: head.saturating_sub(PAST_BLOCKS) };
            std::fs::create_dir_all(data_dir)
                .with_context(|| format!("cannot create {}", data_dir.display()))?;
            std::fs::write(&path, serde_json::to_vec(&look)?)
                .with_context(|| format!("cannot write {}", path.display()))?;
            look
        }
    };
    Ok(NetworkConfig {
        id: NetworkId(chain_id),
        slug: format!("chain-{chain_id}"),
        family: Family::Evm,
        rpc: vec![url.clone()],
        ws: vec![],
        start_block: look.start_block,
        finality: Finality::Tag,
        mode: Mode::Logs,
        contracts: vec![],
        confirmations: 12,
        headers: Headers::All,
        bloom: Bloom::Check,
    })
}

/// One number from the node.
async fn ask(url: &RedactedUrl, method: &str) -> anyhow::Result<u64> {
    let client = reqwest::Client::builder().timeout(Duration::from_secs(10)).build()?;
    let question = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": [] });
    let answer = client
        .post(url.expose().clone())
        .json(&question)
        .send()
        .await
        .map_err(reqwest::Error::without_url)
        .with_context(|| format!("{url} (--rpc) does not answer: is the node running?"))?;
    let status = answer.status();
    ensure!(status.is_success(), "{url} (--rpc) refuses {method}: {status}");
    let body: Value = answer.json().await.map_err(reqwest::Error::without_url)?;
    let text = body["result"].as_str().unwrap_or_default();
    u64::from_str_radix(text.trim_start_matches("0x"), 16).with_context(|| {
        format!("{url} (--rpc) answers {method} with something else: is it an Ethereum node?")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn node(head: &'static str) -> RedactedUrl {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let address = listener.local_addr().expect("an address");
        let app = axum::Router::new().route(
            "/",
            axum::routing::post(move |axum::Json(ask): axum::Json<Value>| async move {
                let result = if ask["method"] == "eth_chainId" { "0x7a69" } else { head };
                axum::Json(json!({ "jsonrpc": "2.0", "id": 1, "result": result }))
            }),
        );
        let tracker = tokio_util::task::TaskTracker::new();
        tracker.spawn(async move { axum::serve(listener, app).await });
        RedactedUrl::parse(&format!("http://{address}")).expect("a URL")
    }

    #[tokio::test]
    async fn a_first_look_is_remembered() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let dir = std::env::temp_dir().join(format!("tidemark-look-{}", uuid::Uuid::new_v4().simple()));
        let first = network_at(&node("0x30d40").await, &dir).await.expect("a network");
        assert_eq!((first.id.0, first.start_block), (31_337, 190_000));
        let second = network_at(&node("0x40000").await, &dir).await.expect("a network");
        assert_eq!(second.start_block, 190_000);
        let wrong = network_at(&node("soon").await, &dir.join("other")).await.expect_err("not a number");
        assert!(wrong.to_string().contains("Ethereum node"), "{wrong}");
        std::fs::remove_dir_all(dir).expect("removes");
    }
}
