//! `dev`: everything in one process.

use anyhow::Context;
use tidemark_model::chain::Family;
use tidemark_model::ids::NetworkId;
use tidemark_model::redact::RedactedUrl;
use tidemark_rpc::{Call, EndpointConfig, PoolConfig, ReadPool};

use crate::cli::DevArgs;
use crate::config::{Config, Finality, Headers, Mode, NetworkConfig, Override};
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
pub async fn run(args: DevArgs, mut config: Config) -> anyhow::Result<u8> {
    let listen = config.api.listen;
    let starting = async {
        let chain = match &args.rpc {
            Some(url) => {
                config.networks = vec![network_of_node(url, &config).await?];
                None
            }
            None if config.networks.is_empty() => {
                let chain = DevChain::open(&config.database.data_dir, args.seed).await?;
                config.networks = vec![simulated(&chain)?];
                Some(chain)
            }
            None => None,
        };
        let host = Host::open(config, Embedded::Allowed).await?;
        host.start(Role::DEV).await?;
        if let Some(chain) = chain {
            host.start_chain(chain);
        }
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
    })
}

/// Blocks of history read from a node that was given without a configuration.
const FIRST_LOOK_BLOCKS: u64 = 2_000;

/// A network for `--rpc URL`: asks the node who it is and begins near its tip.
async fn network_of_node(url: &str, config: &Config) -> anyhow::Result<NetworkConfig> {
    let rpc = RedactedUrl::parse(url)?;
    let pool = ReadPool::new(PoolConfig::new("the node of --rpc", vec![EndpointConfig::new(rpc.clone())]))?;
    let quantity = async |method| {
        let text: String = pool.ask(&Call::new(method, serde_json::json!([]))).await?.0;
        u64::from_str_radix(text.trim_start_matches("0x"), 16)
            .with_context(|| format!("the node answered {method} with something else"))
    };
    let chain_id =
        quantity("eth_chainId").await.context("the node of --rpc does not say which chain it serves")?;
    let head = quantity("eth_blockNumber").await.context("the node of --rpc does not say how far it is")?;
    let start_block = head.saturating_sub(FIRST_LOOK_BLOCKS);
    let network = NetworkConfig {
        id: NetworkId(i32::try_from(chain_id).context("chain ids above 2^31 are not supported")?),
        slug: format!("chain-{chain_id}"),
        family: Family::Evm,
        rpc: vec![rpc],
        ws: vec![],
        start_block: earlier_start(config, chain_id).unwrap_or(start_block),
        finality: Finality::Tag,
        mode: Mode::Logs,
        contracts: vec![],
        confirmations: 12,
        headers: Headers::All,
    };
    remember_start(config, chain_id, network.start_block)?;
    if network.start_block > 0 {
        println!(
            "Reading chain {chain_id} from block {}. For all of its history use a tidemark.toml with start_block = 0.",
            network.start_block
        );
    }
    Ok(network)
}

/// The start block must not move between two runs on one data directory.
fn start_file(config: &Config, chain_id: u64) -> std::path::PathBuf {
    config.database.data_dir.join(format!("start-{chain_id}"))
}

fn earlier_start(config: &Config, chain_id: u64) -> Option<u64> {
    std::fs::read_to_string(start_file(config, chain_id)).ok()?.trim().parse().ok()
}

fn remember_start(config: &Config, chain_id: u64, start: u64) -> anyhow::Result<()> {
    let file = start_file(config, chain_id);
    std::fs::create_dir_all(&config.database.data_dir)?;
    std::fs::write(&file, start.to_string()).with_context(|| format!("{} cannot be written", file.display()))
}
