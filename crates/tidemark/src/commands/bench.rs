//! `bench NAME`

use crate::bench::sync::{self, Size};
use crate::cli::{BenchArgs, BenchName};
use crate::exit;

/// Runs it; the table goes to standard output, the JSON to `--out`.
pub async fn run(args: BenchArgs) -> anyhow::Result<u8> {
    anyhow::ensure!(args.blocks >= 10 && args.logs >= args.blocks, "at least ten blocks, and a log in each");
    match args.name {
        BenchName::All | BenchName::Sync => {
            let size = Size { logs: args.logs, blocks: args.blocks };
            sync::run(size, &args.out).await?;
            println!("written to {}", args.out.join("sync.json").display());
        }
    }
    Ok(exit::OK)
}
