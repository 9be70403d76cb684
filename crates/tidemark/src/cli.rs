//! The command line.

mod operator;

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::exit;
use crate::wire::Role;

pub use operator::*;

/// Multi-chain NFT indexer: nothing lost, nothing doubled, finality on every answer.
#[derive(Debug, Parser)]
#[command(name = "tidemark", version, after_help = exit::HELP, max_term_width = 110)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run everything in one process, on a private Postgres and a simulated chain
    #[command(
        long_about = "Runs everything in one process: a private Postgres in the data directory, a simulated chain \
                      (or your own node), all workers, the API and the explorer. Ctrl-C stops it in order; the \
                      next start goes on where it stopped, also after a crash.",
        after_help = "Examples:\n  tidemark dev\n  tidemark dev --rpc http://127.0.0.1:8545 --data-dir /var/lib/tidemark"
    )]
    Dev(DevArgs),
    /// Run chosen roles against the configured database and bus
    #[command(
        long_about = "Runs the chosen roles in this process. Several processes share the work: leases and fenced \
                      cursors keep them apart. `--roles ingest` alone keeps raw data only.",
        after_help = "Examples:\n  tidemark run --config tidemark.toml\n  tidemark run --roles ingest,relay --config tidemark.toml"
    )]
    Run(RunArgs),
    /// Read history until everything up to a height is final and projected, then end
    #[command(
        long_about = "Reads every configured network until everything up to the height is final, in the ledger and in \
                      the projections, then ends with a summary. Without a configured database it uses a private \
                      Postgres in the data directory. It can be interrupted and run again at any time.",
        after_help = "Examples:\n  tidemark sync --config tidemark.toml --until finalized\n  tidemark sync --until 18000000 --json"
    )]
    Sync(SyncArgs),
    /// Run the simulated node alone: a seeded NFT economy over real JSON-RPC
    #[command(
        long_about = "Serves a simulated Ethereum node over HTTP and WebSocket: seeded collections, mints, transfers, \
                      batches and burns, finality, reorgs, and on demand the faults of a bad provider. It knows the \
                      truth: GET /sim/truth?height=N. Prints its URL on standard output.",
        after_help = "Examples:\n  tidemark sim --seed 7\n  tidemark sim --chaos --reorg-every 10 --block-time-ms 500"
    )]
    Sim(SimArgs),
    /// Measure this machine: a table for people, JSON for programs
    #[command(
        long_about = "Runs a benchmark on a private Postgres and a simulated node and prints a table; the figures also \
                      go to a JSON file. Ratios of one run are what counts (docs/benchmarks.md).",
        after_help = "Example:\n  tidemark bench sync --logs 200000 --blocks 10000"
    )]
    Bench(BenchArgs),
    /// Bring the database to the newest schema
    #[command(
        long_about = "Applies the migrations that the database does not have yet, under an advisory lock: several \
                      processes may call it at once. Serving commands do this by themselves at start.",
        after_help = "Example:\n  tidemark migrate --config tidemark.toml"
    )]
    Migrate(ConfigArgs),
    /// Show networks, lag, roles and dead letters
    #[command(
        long_about = "Shows every network's heights and lag, every role of every process, and open dead letters. \
                      Without a configured database it looks at the one of `tidemark dev` in the data directory.",
        after_help = "Examples:\n  tidemark status\n  tidemark status --watch\n  tidemark status --json | jq .networks"
    )]
    Status(StatusArgs),
    /// Check, print or explain the configuration
    #[command(
        subcommand,
        after_help = "Examples:\n  tidemark config example > tidemark.toml\n  tidemark config check --config tidemark.toml\n  tidemark config show"
    )]
    Config(ConfigCommand),
    /// Prove that raw data is complete, or that the ledger holds its invariants
    #[command(subcommand, after_help = "Examples:\n  tidemark verify completeness\n  tidemark verify ledger")]
    Verify(VerifyCommand),
    /// Print the digest of who owns what, or find where two databases differ
    #[command(
        long_about = "Prints one number per network that stands for all finalized owners: equal digests at equal \
                      heights mean equal owners. `digest diff` finds the first difference.",
        after_help = "Examples:\n  tidemark digest\n  tidemark digest --network ethereum --height 18000000 --json"
    )]
    Digest(DigestArgs),
    /// Look after dead letters: list, show, retry, release, discard
    #[command(
        subcommand,
        after_help = "Examples:\n  tidemark dlq list\n  tidemark dlq release --handler ledger --key 1"
    )]
    Dlq(DlqCommand),
    /// Hand events to a handler again
    #[command(
        long_about = "Hands events that a handler has handled before to it again, in order and marked as replayed. \
                      Handlers that act on the outside world refuse. Positions do not move; dead letters and what \
                      lies ahead of the handler are left alone. It needs the configuration that `run` has.",
        after_help = "Examples:\n  tidemark replay --handler projector --from 1 --to 5000 --dry-run\n  \
                      tidemark replay --handler projector --unit height --network 1 --from 18000000 --to 18000100\n  \
                      tidemark replay --handler ledger --unit time --from 2026-05-03T10:00:00Z --to 2026-05-03T11:00:00Z"
    )]
    Replay(ReplayArgs),
    /// Take finality of a network's ledger back to a height
    #[command(
        long_about = "Makes everything above a height open again and rebuilds owners from the event log alone, for a \
                      chain that took back what it had called final. Projections follow; the next report of finality \
                      applies it again; a halted network goes on. Refuses while roles of the network run.",
        after_help = "Example:\n  tidemark rewind --network ethereum --to 18000000 --reason 'finality incident'"
    )]
    Rewind(RewindArgs),
    /// Build projections anew from the ledger
    #[command(
        subcommand,
        after_help = "Examples:\n  tidemark rebuild projection all\n  tidemark rebuild undo transfers"
    )]
    Rebuild(RebuildCommand),
    /// Check event schemas
    #[command(subcommand, after_help = "Example:\n  tidemark schema lint --against origin/main")]
    Schema(SchemaCommand),
    /// Repair what can be derived from raw data
    #[command(subcommand, after_help = "Example:\n  tidemark repair lookups")]
    Repair(RepairCommand),
    /// Compare a sample of the projections with the ledger; exit 3 if too many rows differ
    #[command(
        long_about = "Compares random assets and their collections with the ledger in one snapshot and writes the result \
                      down. Exit 3 when more than one in a thousand differs. On a busy system run it twice before \
                      you believe a small number; `tidemark rebuild` is the cure.",
        after_help = "Examples:\n  tidemark reconcile\n  tidemark reconcile --sample 10000 --json"
    )]
    Reconcile(ReconcileArgs),
}

/// Where the configuration is.
#[derive(Debug, Clone, Args)]
pub struct ConfigArgs {
    /// Configuration file [default: tidemark.toml where it exists]
    #[arg(long, short, value_name = "FILE", env = "TIDEMARK_CONFIG", hide_env_values = true)]
    pub config: Option<PathBuf>,
}

/// `dev`
#[derive(Debug, Args)]
pub struct DevArgs {
    /// See [`ConfigArgs`].
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Where the private Postgres keeps its files [default: ./.tidemark]
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Address of the API and the explorer [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<SocketAddr>,
    /// Seed of the simulated chain: the same seed gives the same chain
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Read this node instead of the simulated chain
    #[arg(long, value_name = "URL")]
    pub rpc: Option<String>,
}

/// `run`
#[derive(Debug, Args)]
pub struct RunArgs {
    /// See [`ConfigArgs`].
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Roles of this process, separated by commas
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "ROLE",
        default_value = "ingest,relay,workers,api"
    )]
    pub roles: Vec<Role>,
}

/// `sync`
#[derive(Debug, Args)]
pub struct SyncArgs {
    /// See [`ConfigArgs`].
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Where the private Postgres keeps its files [default: ./.tidemark]
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// `finalized` (as the nodes say at the start) or a height
    #[arg(long, value_name = "WHAT", default_value = "finalized")]
    pub until: Until,
    /// Read into raw.* only: no ledger, no projections, no events carried
    #[arg(long)]
    pub raw_only: bool,
    /// End with one JSON line: events, seconds, events_per_second, rpc_calls, peak_rss_bytes
    #[arg(long)]
    pub json: bool,
}

/// How far `sync` goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// The finalized height the nodes report first.
    Finalized,
    /// This height, once it is final.
    Height(u64),
}

impl std::str::FromStr for Until {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "finalized" => Ok(Self::Finalized),
            number => number.parse().map(Self::Height).map_err(|_| "write `finalized` or a height".into()),
        }
    }
}

/// `sim`
#[derive(Debug, Args)]
pub struct SimArgs {
    /// Address to listen on
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8545")]
    pub listen: SocketAddr,
    /// Seed: the same seed gives the same chain
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Blocks that exist at the start
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub blocks: u64,
    /// Milliseconds between two blocks
    #[arg(long, value_name = "MS", default_value_t = 2000)]
    pub block_time_ms: u64,
    /// A reorg about once in so many blocks; 0 for none
    #[arg(long, value_name = "BLOCKS", default_value_t = 40)]
    pub reorg_every: u64,
    /// Behave like the worst provider: throttling, outages, lies that can be found out
    #[arg(long)]
    pub chaos: bool,
    /// A still chain with exactly this many logs, for benchmarks
    #[arg(long, value_name = "N", hide = true)]
    pub bench_logs: Option<u64>,
}

/// `bench`
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Which one.
    #[command(subcommand)]
    pub name: BenchCommand,
    /// Where the JSON goes
    #[arg(long, value_name = "DIR", default_value = "target/bench", global = true)]
    pub out: PathBuf,
}

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// All of them, one after another, each at its usual size
    #[command(after_help = "Example:\n  tidemark bench all --out target/bench")]
    All,
    /// History from the first RPC call to finalized owners in the projections
    #[command(after_help = "Example:\n  tidemark bench sync --logs 200000 --blocks 10000")]
    Sync(crate::bench::sync::SyncArgs),
    /// What a row costs a database backend, and what a claim, a foreign key, JSONB, text keys and indexes add
    #[command(after_help = "Example:\n  tidemark bench rows --rows 100000")]
    Rows(crate::bench::rows::RowsArgs),
    /// From raw.* to finalized owners, in bulk and live; what a long history and a wide reorg cost
    #[command(
        after_help = "Example:\n  tidemark bench ledger --logs 50000 --blocks 2500 --class-transfers 100000"
    )]
    Ledger(crate::bench::ledger::LedgerArgs),
    /// History into raw.* and nothing else, beside bare COPY of the same rows
    #[command(after_help = "Example:\n  tidemark bench ingest --logs 200000 --blocks 10000")]
    Ingest(crate::bench::ingest::IngestArgs),
    /// Events from append to effect, per engine of the backbone, beside the engine alone
    #[command(after_help = "Example:\n  tidemark bench bus --events 200000 --engine nats")]
    Bus(crate::bench::bus::BusArgs),
    /// New blocks from the node to their owners in the API, and the repair of reorgs
    #[command(after_help = "Example:\n  tidemark bench live --load 4x500 --seconds 30")]
    Live(crate::bench::live::LiveArgs),
    /// What a thousand quiet networks cost, and how fast an outage of the node is made up for
    #[command(after_help = "Example:\n  tidemark bench growth --networks 100 --outage-seconds 60")]
    Growth(crate::bench::growth::GrowthArgs),
    /// Every route at a fixed rate over HTTP, beside a bare select of the same row
    #[command(
        after_help = "Examples:\n  tidemark bench api --assets 20000 --transfers 100000 --seconds 2\n  \
                            tidemark bench api --keep /var/tmp/bench-api --build-only"
    )]
    Api(crate::bench::api::ApiArgs),
}

impl BenchCommand {
    /// What `all` runs, in this order.
    pub const EACH: &'static [&'static str] =
        &["sync", "rows", "ledger", "ingest", "bus", "live", "growth", "api"];
}

/// `status`
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// See [`ConfigArgs`].
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Data directory of `tidemark dev` [default: ./.tidemark]
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Show it again every second until Ctrl-C
    #[arg(long, conflicts_with = "json")]
    pub watch: bool,
}

/// `config`
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// List all problems of the configuration at once; exit 2 if there is one
    #[command(after_help = "Example:\n  tidemark config check --config tidemark.toml")]
    Check(ConfigArgs),
    /// Print an example with every key, its meaning and its default
    #[command(after_help = "Example:\n  tidemark config example > tidemark.toml")]
    Example,
    /// Print the configuration in force, with secrets masked
    #[command(after_help = "Example:\n  POLL_INTERVAL_MS=250 tidemark config show")]
    Show(ConfigArgs),
}
