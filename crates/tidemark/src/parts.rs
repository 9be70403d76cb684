//! What roles are built from: adapters, outbox, bus, object storage. Made once per process.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use async_trait::async_trait;
use tidemark_adapters::evm::{BloomPolicy, EvmAdapter, EvmConfig, FinalityRule, HeaderPolicy, Mode};
use tidemark_bus::registry::Registry;
use tidemark_bus::relay::RelayHandle;
use tidemark_model::chain::{ChainAdapter, Family};
use tidemark_model::envelope::Draft;
use tidemark_model::redact::RedactedUrl;
use tidemark_pipeline::ingest::{Emit, IngestOptions};
use tidemark_rpc::EndpointConfig;
use tidemark_store::blob::{BlobStore, ObjectBlobs};
use tidemark_store::cursor::Shard;
use tidemark_store::outbox::{Emitter, EmitterOptions, OutboxError, Partitions as StreamPartitions};
use tidemark_store::partitions::{PartitionSizes, Partitions};
use tidemark_store::raw::RawReader;
use tidemark_store::{StoreError, Tx};

use crate::config::{self, Config, NetworkConfig};

/// Everything roles share.
#[derive(Clone)]
pub struct Parts {
    /// One adapter per network.
    pub adapters: Vec<Arc<dyn ChainAdapter>>,
    /// The readers of each of them: as many as its contracts have shards.
    pub shards: Vec<Vec<(Shard, Arc<dyn ChainAdapter>)>>,
    /// All event schemas.
    pub registry: Arc<Registry>,
    /// The only way to emit.
    pub emitter: Arc<Emitter>,
    /// Streams and their partition counts.
    pub streams: StreamPartitions,
    /// Large bodies.
    pub blobs: Arc<dyn BlobStore>,
    /// Raw blocks, whole.
    pub reader: RawReader,
    /// Height partitions.
    pub partitions: Arc<Partitions>,
}

impl Parts {
    /// Builds them; asks no node yet.
    pub fn new(config: &Config, instance: &str) -> anyhow::Result<Self> {
        let (mut adapters, mut shards) = (vec![], vec![]);
        for network in &config.networks {
            let (adapter, of_network) = readers(config, network)?;
            adapters.push(adapter);
            shards.push(of_network);
        }
        let registry = Arc::new(Registry::builtin());
        // The live stream's number is its Last-Event-ID: one partition, one order.
        let streams = StreamPartitions::with_default(config.bus.partitions).with("projection", 1);
        let streams =
            config.bus.large_tenants.iter().fold(streams, |streams, tenant| streams.with_tenant(tenant));
        let mut options = EmitterOptions {
            partitions: streams.clone(),
            tenant_id: config.bus.tenant.clone(),
            ..EmitterOptions::default()
        };
        instance.clone_into(&mut options.source.instance);
        let emitter = Arc::new(Emitter::new(options, Arc::<Registry>::clone(&registry)));
        let blobs: Arc<dyn BlobStore> = Arc::new(open_objects(config)?);
        Ok(Self {
            adapters,
            shards,
            registry,
            emitter,
            streams,
            reader: RawReader::new(Arc::clone(&blobs)),
            blobs,
            partitions: Arc::new(Partitions::new(PartitionSizes::default(), Default::default())),
        })
    }

    /// How this process ingests.
    pub fn ingest_options(config: &Config, instance: &str) -> IngestOptions {
        let poll = Duration::from_millis(config.ingest.poll_interval_ms);
        IngestOptions {
            instance: instance.to_owned(),
            poll_interval_min: poll.mul_f64(5.0 / 6.0),
            poll_interval_max: poll.mul_f64(7.0 / 6.0),
            ranges_in_flight: config.ingest.history_ranges_in_flight,
            lease_range: config.ingest.lease_range,
            payload_inline_max_bytes: config.ingest.payload_inline_max_bytes,
            ..IngestOptions::default()
        }
    }
}

fn open_objects(config: &Config) -> anyhow::Result<ObjectBlobs> {
    let text = config.objects.url.expose();
    let url = RedactedUrl::parse(text)
        .with_context(|| format!("objects.url {} cannot be read", config.objects.url))?;
    ObjectBlobs::open(&url).with_context(|| format!("objects.url {} cannot be opened", config.objects.url))
}

/// Adapters that read the shards of a network's contracts.
type Readers = Vec<(Shard, Arc<dyn ChainAdapter>)>;

/// The adapter of a network, and those that read its shards (ADDR_SHARDS). Without a list of contracts there is
/// nothing to divide, and whole blocks are not divided.
fn readers(config: &Config, network: &NetworkConfig) -> anyhow::Result<(Arc<dyn ChainAdapter>, Readers)> {
    let adapter = adapter(config, network)?;
    let shards = match network.mode {
        config::Mode::Logs => adapter.shards(config.ingest.addr_shards)?,
        config::Mode::Full => vec![],
    };
    let adapter: Arc<dyn ChainAdapter> = Arc::new(adapter);
    if shards.len() < 2 {
        return Ok((Arc::clone(&adapter), vec![(Shard::ONLY, adapter)]));
    }
    let of = i32::from(config.ingest.addr_shards);
    let readers = shards.into_iter().map(|(number, shard)| {
        let shard: Arc<dyn ChainAdapter> = Arc::new(shard);
        (Shard { number: i32::from(number), of }, shard)
    });
    Ok((adapter, readers.collect()))
}

fn adapter(config: &Config, network: &NetworkConfig) -> anyhow::Result<EvmAdapter> {
    anyhow::ensure!(
        network.family == Family::Evm,
        "network {}: family {:?} is not in this version; only \"evm\" is",
        network.slug,
        network.family.as_str()
    );
    let ingest = &config.ingest;
    let per_second = |calls: u64| u32::try_from(calls).ok().and_then(NonZeroU32::new);
    let endpoints = network
        .rpc
        .iter()
        .map(|url| EndpointConfig {
            rps: ingest.rpc_rps_max.and_then(per_second),
            method_rps: ingest
                .rpc_rps_by_method
                .iter()
                .filter_map(|(method, calls)| Some((method.clone(), per_second(*calls)?)))
                .collect(),
            ..EndpointConfig::new(url.clone())
        })
        .collect();
    let chain_id = u64::try_from(network.id.0).context("an EVM network's id is its chain id, above zero")?;
    let mut evm = EvmConfig::new(network.network(ingest), chain_id, endpoints);
    evm.ws.clone_from(&network.ws);
    evm.contracts.clone_from(&network.contracts);
    evm.mode = match network.mode {
        config::Mode::Logs => Mode::Logs,
        config::Mode::Full => Mode::Full,
    };
    evm.finality = match network.finality {
        config::Finality::Tag => FinalityRule::Tag,
        config::Finality::Depth(depth) => FinalityRule::Depth(depth),
    };
    evm.headers = match network.headers {
        config::Headers::All => HeaderPolicy::All,
        config::Headers::WithRecords => HeaderPolicy::WithRecords,
    };
    evm.bloom = match network.bloom {
        config::Bloom::Check => BloomPolicy::Check,
        config::Bloom::Ignore => BloomPolicy::Ignore,
    };
    (evm.step_init, evm.step_min, evm.step_max) =
        (ingest.getlogs_step_init, ingest.getlogs_step_min, ingest.getlogs_step_max);
    for (method, millis) in &ingest.rpc_timeouts_ms {
        let limit = Duration::from_millis(*millis);
        match method.as_str() {
            "default" => evm.timeouts.other = limit,
            // Also the limit of batches of headers and the like.
            "eth_getBlockReceipts" => evm.timeouts.heavy = limit,
            _ => drop(evm.timeouts.by_method.insert(method.clone(), limit)),
        }
    }
    Ok(EvmAdapter::new(evm)?)
}

/// The ingester's door to the outbox: appends, and wakes the relay of this process.
pub struct TipOutbox {
    emitter: Arc<Emitter>,
    wake: Option<RelayHandle>,
}

impl TipOutbox {
    /// With the relay of this process, if it has one.
    pub fn new(emitter: Arc<Emitter>, wake: Option<RelayHandle>) -> Self {
        Self { emitter, wake }
    }
}

#[async_trait]
impl Emit for TipOutbox {
    async fn append(&self, tx: &Tx<'_>, drafts: &[Draft]) -> Result<(), StoreError> {
        self.emitter.append(tx, drafts).await.map_err(|error| match error {
            OutboxError::Store(error) => error,
            other => StoreError::Corrupt {
                what: "an event of the ingester".to_owned(),
                found: other.to_string(),
                hint: "this is a mistake in Tidemark: please report it with this line",
            },
        })
    }
    fn committed(&self) {
        if let Some(relay) = &self.wake {
            relay.wake();
        }
    }
}
