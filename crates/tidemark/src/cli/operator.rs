//! Arguments of the commands that look after data: verify, digest, dlq, replay, rewind, rebuild, schema,
//! repair, reconcile.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand, ValueEnum};
use tidemark_model::redact::RedactedUrl;
use tidemark_pipeline::projectors::ProjectionName;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::ConfigArgs;

/// Where the database is.
#[derive(Debug, Clone, Args)]
pub struct DatabaseArgs {
    /// See [`ConfigArgs`].
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Data directory of `tidemark dev`, where no database is configured [default: ./.tidemark]
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
}

/// Who does it.
#[derive(Debug, Clone, Args)]
pub struct ActorArgs {
    /// Who asks: it goes into the audit log
    #[arg(long, value_name = "NAME", env = "USER", hide_env_values = true, default_value = "operator")]
    pub by: String,
}

/// `verify`
#[derive(Debug, Subcommand)]
pub enum VerifyCommand {
    /// Prove that every height was read and every event stored; exit 3 and every gap if not
    #[command(
        long_about = "Proves from what is stored that a range is complete: accepted ranges follow each other without \
                      gap or overlap, blocks are linked, and every block has the events it promised. Safe beside \
                      running roles. Exit 3 names everything that is missing.",
        after_help = "Examples:\n  tidemark verify completeness\n  tidemark verify completeness --network ethereum --from 18000000 --to 18100000 --json"
    )]
    Completeness(CompletenessArgs),
    /// Ask the ledger for every row that breaks an invariant; exit 3 if there is one
    #[command(
        long_about = "Asks the ledger, in one snapshot, for rows that break an invariant: owners equal the event log, \
                      history sums to owners, single tokens have one owner, digests equal their rows, and more. \
                      Exit 3 prints them. It reads everything: expect minutes on a large ledger.",
        after_help = "Examples:\n  tidemark verify ledger\n  tidemark verify ledger --network 1 --json"
    )]
    Ledger(LedgerArgs),
}

/// `verify completeness`
#[derive(Debug, Args)]
pub struct CompletenessArgs {
    /// See [`DatabaseArgs`].
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// Only this network, by id or short name [default: all]
    #[arg(long, value_name = "NETWORK")]
    pub network: Option<String>,
    /// First height [default: the first that is read]
    #[arg(long, value_name = "HEIGHT")]
    pub from: Option<u64>,
    /// Last height, included [default: the last that is done]
    #[arg(long, value_name = "HEIGHT")]
    pub to: Option<u64>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `verify ledger`
#[derive(Debug, Args)]
pub struct LedgerArgs {
    /// See [`DatabaseArgs`].
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// Only this network, by id or short name [default: all]
    #[arg(long, value_name = "NETWORK")]
    pub network: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `digest`
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct DigestArgs {
    /// Compare instead of print.
    #[command(subcommand)]
    pub command: Option<DigestCommand>,
    /// See [`DatabaseArgs`].
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// Only this network, by id or short name [default: all]
    #[arg(long, value_name = "NETWORK")]
    pub network: Option<String>,
    /// The digest as it was at this height [default: now]
    #[arg(long, value_name = "HEIGHT")]
    pub height: Option<u64>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `digest …`
#[derive(Debug, Subcommand)]
pub enum DigestCommand {
    /// Find the first asset whose owners differ between two databases; exit 3 if there is one
    #[command(
        long_about = "Compares finalized owners of two databases and names the first asset that differs, with its \
                      owners on both sides. Equal buckets are skipped by digest; the rest is found by halves.",
        after_help = "Example:\n  tidemark digest diff postgres://db-a/tidemark postgres://db-b/tidemark --network ethereum"
    )]
    Diff(DigestDiffArgs),
}

/// `digest diff`
#[derive(Debug, Args)]
pub struct DigestDiffArgs {
    /// One database
    #[arg(value_name = "URL_A", value_parser = database_url)]
    pub a: RedactedUrl,
    /// The other database
    #[arg(value_name = "URL_B", value_parser = database_url)]
    pub b: RedactedUrl,
    /// Only this network, by id or short name [default: all of both]
    #[arg(long, value_name = "NETWORK")]
    pub network: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The parser's own error could quote the text, and with it a password.
fn database_url(text: &str) -> Result<RedactedUrl, String> {
    RedactedUrl::parse(text).map_err(|_| "not a URL: write postgres://user@host/database".to_owned())
}

/// `dlq`
#[derive(Debug, Subcommand)]
pub enum DlqCommand {
    /// List dead letters; exit 3 if one is open
    #[command(
        after_help = "Examples:\n  tidemark dlq list\n  tidemark dlq list --handler ledger --all --json"
    )]
    List(DlqListArgs),
    /// Show one dead letter: envelope, errors, attempts
    #[command(after_help = "Example:\n  tidemark dlq show 17")]
    Show(DlqShowArgs),
    /// Hand dead letters to their handler again; exit 3 if one fails again
    #[command(
        long_about = "Hands dead letters to their handler again, in this process, each in a transaction of its own. A \
                      letter behind an earlier one of its key waits for it. It needs the configuration that `run` \
                      has. Exit 3 when a letter failed again or had to wait.",
        after_help = "Examples:\n  tidemark dlq retry 17 --reason 'node is back'\n  tidemark dlq retry --handler ledger --dry-run"
    )]
    Retry(DlqRetryArgs),
    /// Replay all parked events of a key in order and free the key; exit 3 if one fails again
    #[command(
        after_help = "Example:\n  tidemark dlq release --handler ledger --key 1 --reason 'after rewind'"
    )]
    Release(DlqReleaseArgs),
    /// Settle a dead letter without its effect, for a reason
    #[command(after_help = "Example:\n  tidemark dlq discard 17 --reason 'test traffic of 3 May'")]
    Discard(DlqDiscardArgs),
}

/// Which dead letters.
#[derive(Debug, Clone, Args)]
pub struct LetterArgs {
    /// Of this handler
    #[arg(long, value_name = "HANDLER")]
    pub handler: Option<String>,
    /// Of this partition key
    #[arg(long, value_name = "KEY")]
    pub key: Option<String>,
    /// With this subject, as chain.block.ingested.v1
    #[arg(long, value_name = "SUBJECT")]
    pub topic: Option<String>,
    /// poison, follower or schema
    #[arg(long, value_name = "KIND", value_parser = ["poison", "follower", "schema"])]
    pub kind: Option<String>,
    /// At most so many
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub limit: u32,
}

/// `dlq list`
#[derive(Debug, Args)]
pub struct DlqListArgs {
    /// See [`DatabaseArgs`].
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// See [`LetterArgs`].
    #[command(flatten)]
    pub letters: LetterArgs,
    /// Settled ones too
    #[arg(long)]
    pub all: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `dlq show`
#[derive(Debug, Args)]
pub struct DlqShowArgs {
    /// See [`DatabaseArgs`].
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// Its number in `dlq list`
    pub id: i64,
}

/// `dlq retry`
#[derive(Debug, Args)]
pub struct DlqRetryArgs {
    /// See [`DatabaseArgs`].
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// See [`ActorArgs`].
    #[command(flatten)]
    pub actor: ActorArgs,
    /// See [`LetterArgs`].
    #[command(flatten)]
    pub letters: LetterArgs,
    /// Numbers in `dlq list` [default: all that fit the other options]
    #[arg(value_name = "ID")]
    pub ids: Vec<i64>,
    /// Why
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// At most so many per second
    #[arg(long, value_name = "N")]
    pub per_second: Option<u32>,
    /// Only say which
    #[arg(long)]
    pub dry_run: bool,
}

/// `dlq release`
#[derive(Debug, Args)]
pub struct DlqReleaseArgs {
    /// See [`DatabaseArgs`].
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// See [`ActorArgs`].
    #[command(flatten)]
    pub actor: ActorArgs,
    /// Of this handler
    #[arg(long, value_name = "HANDLER")]
    pub handler: String,
    /// This partition key
    #[arg(long, value_name = "KEY")]
    pub key: String,
    /// Why
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// `dlq discard`
#[derive(Debug, Args)]
pub struct DlqDiscardArgs {
    /// See [`DatabaseArgs`].
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// See [`ActorArgs`].
    #[command(flatten)]
    pub actor: ActorArgs,
    /// Its number in `dlq list`
    pub id: i64,
    /// Why: a discarded event never has its effect
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// What `--from` and `--to` of a replay count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReplayUnit {
    /// Numbers of the stream, both included.
    Number,
    /// Block heights, both included.
    Height,
    /// Times as 2026-05-03T10:00:00Z, the end excluded.
    Time,
}

/// `replay`
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// See [`DatabaseArgs`].
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// See [`ActorArgs`].
    #[command(flatten)]
    pub actor: ActorArgs,
    /// Which handler: ledger or projector
    #[arg(long, value_name = "HANDLER")]
    pub handler: String,
    /// Begin
    #[arg(long, value_name = "X")]
    pub from: String,
    /// End
    #[arg(long, value_name = "Y")]
    pub to: String,
    /// What X and Y count
    #[arg(long, value_enum, default_value = "number")]
    pub unit: ReplayUnit,
    /// Only this partition of the stream (with numbers)
    #[arg(long, value_name = "N")]
    pub part: Option<u16>,
    /// Only this network, by id or short name (with heights)
    #[arg(long, value_name = "NETWORK")]
    pub network: Option<String>,
    /// Why
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// At most so many events per second
    #[arg(long, value_name = "N")]
    pub per_second: Option<u32>,
    /// Only count
    #[arg(long)]
    pub dry_run: bool,
}

/// Reads a time of the command line.
pub fn time_of(text: &str) -> Option<OffsetDateTime> {
    OffsetDateTime::parse(text, &Rfc3339).ok()
}

/// `rewind`
#[derive(Debug, Args)]
pub struct RewindArgs {
    /// See [`DatabaseArgs`].
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// See [`ActorArgs`].
    #[command(flatten)]
    pub actor: ActorArgs,
    /// Which network, by id or short name
    #[arg(long, value_name = "NETWORK")]
    pub network: String,
    /// The height that stays final; everything above is open again
    #[arg(long, value_name = "HEIGHT")]
    pub to: u64,
    /// Why
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// Also while roles of that network are running
    #[arg(long)]
    pub force: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `rebuild`
#[derive(Debug, Subcommand)]
pub enum RebuildCommand {
    /// Build a projection anew from the ledger beside the live one, compare, and swap it in
    #[command(
        long_about = "Builds a projection from the ledger while live goes on, prints rows that differ from the live \
                      table, and swaps the new one in. The replaced table stays for `rebuild undo`, for a day or until \
                      what was written since takes a gigabyte; then the workers drop it.",
        after_help = "Examples:\n  tidemark rebuild projection asset_cards\n  tidemark rebuild projection all --json"
    )]
    Projection(RebuildArgs),
    /// Put back what the last rebuild replaced
    #[command(after_help = "Example:\n  tidemark rebuild undo asset_cards")]
    Undo(RebuiltArgs),
    /// Drop what the last rebuild kept for undo
    #[command(after_help = "Example:\n  tidemark rebuild forget asset_cards")]
    Forget(RebuiltArgs),
}

/// One projection or all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Projections {
    /// All, each after its sources.
    All,
    /// This one.
    One(ProjectionName),
}

impl FromStr for Projections {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => Ok(Self::All),
            name => name.parse().map(Self::One).map_err(|error| format!("{error}, or all")),
        }
    }
}

/// `rebuild projection`
#[derive(Debug, Args)]
pub struct RebuildArgs {
    /// See [`DatabaseArgs`].
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// See [`ActorArgs`].
    #[command(flatten)]
    pub actor: ActorArgs,
    /// Its table without schema, or all
    #[arg(value_name = "NAME")]
    pub name: Projections,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `rebuild undo | forget`
#[derive(Debug, Args)]
pub struct RebuiltArgs {
    /// See [`DatabaseArgs`].
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// See [`ActorArgs`].
    #[command(flatten)]
    pub actor: ActorArgs,
    /// Its table without schema
    #[arg(value_name = "NAME")]
    pub name: ProjectionName,
}

/// `schema`
#[derive(Debug, Subcommand)]
pub enum SchemaCommand {
    /// Refuse changes of event schemas that would break a reader; exit 3 with counterexamples
    #[command(
        long_about = "Compares the event schemas of a folder with those of a git revision. A change is refused when a \
                      document exists that was valid and is not any more; that document is printed. Exit 3 on a \
                      refusal. Needs git, and no database.",
        after_help = "Examples:\n  tidemark schema lint\n  tidemark schema lint --against origin/main --dir schemas"
    )]
    Lint(LintArgs),
}

/// `schema lint`
#[derive(Debug, Args)]
pub struct LintArgs {
    /// The git revision that is published
    #[arg(long, value_name = "REV", default_value = "HEAD")]
    pub against: String,
    /// Where the schemas are
    #[arg(long, value_name = "DIR", default_value = "schemas")]
    pub dir: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `repair`
#[derive(Debug, Subcommand)]
pub enum RepairCommand {
    /// Make the lookups of blocks and transactions say what raw data says
    #[command(
        long_about = "Removes lookups of blocks and transactions that point at nothing and adds those that are \
                      missing, window by window. Ingesting waits while a window is repaired.",
        after_help = "Example:\n  tidemark repair lookups --network ethereum"
    )]
    Lookups(LookupsArgs),
}

/// `repair lookups`
#[derive(Debug, Args)]
pub struct LookupsArgs {
    /// See [`DatabaseArgs`].
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// Only this network, by id or short name [default: all]
    #[arg(long, value_name = "NETWORK")]
    pub network: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `reconcile`
#[derive(Debug, Args)]
pub struct ReconcileArgs {
    /// See [`DatabaseArgs`].
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// About how many assets to look at
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(i64).range(1..))]
    pub sample: i64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
