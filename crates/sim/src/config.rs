//! What a simulated chain looks like: its size, its pace and the habits of its economy.

use serde::Deserialize;

/// Settings of one simulated chain. The same settings and the same calls give the same chain.
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct SimConfig {
    /// What `eth_chainId` answers.
    pub chain_id: u64,
    /// Seed of everything random on the chain.
    pub seed: u64,
    /// Unix time of block 0.
    pub genesis_time: i64,
    /// Seconds between the timestamps of two blocks.
    pub block_time_secs: u64,
    /// Blocks between the head and the `finalized` tag.
    pub finality_lag: u64,
    /// Blocks between the head and the `safe` tag.
    pub safe_lag: u64,
    /// ERC-721 collections. The second one is the spam collection, which mints and mints.
    pub collections_721: u32,
    /// ERC-1155 collections.
    pub collections_1155: u32,
    /// ERC-20 contracts that share the `Transfer` topic with ERC-721.
    pub contracts_20: u32,
    /// Accounts; the first hundredth of them are whales.
    pub accounts: u32,
    /// Mean number of logs in a block.
    pub events_per_block: u32,
    /// Every block has exactly `events_per_block` logs, instead of empty, usual and very full ones.
    pub steady: bool,
    /// Share of logs that are `TransferBatch`.
    pub batch_percent: u8,
    /// Share of mints among the NFT logs.
    pub mint_percent: u8,
    /// Share of burns among the NFT logs.
    pub burn_percent: u8,
    /// Share of logs that are ERC-20 transfers.
    pub erc20_noise_percent: u8,
    /// Share of mints that go to the spam collection.
    pub spam_percent: u8,
    /// Token classes in each ERC-1155 collection.
    pub class_tokens_per_1155: u32,
    /// Servers answer the admin paths (`/sim/…`) too.
    pub admin: bool,
    /// Servers compress answers for clients that accept it.
    pub gzip: bool,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            chain_id: 31_337,
            seed: 1,
            genesis_time: 1_700_000_000,
            block_time_secs: 12,
            finality_lag: 64,
            safe_lag: 32,
            collections_721: 12,
            collections_1155: 6,
            contracts_20: 3,
            accounts: 400,
            events_per_block: 12,
            steady: false,
            batch_percent: 5,
            mint_percent: 35,
            burn_percent: 4,
            erc20_noise_percent: 15,
            spam_percent: 15,
            class_tokens_per_1155: 25,
            admin: false,
            gzip: true,
        }
    }
}

impl SimConfig {
    /// The shape of the benchmark: `logs` spread evenly over `blocks`, a thousand collections, a hundred
    /// thousand accounts and 5 % batches. Answers are not compressed: the benchmark measures the reader.
    pub fn bench(logs: u64, blocks: u64) -> Self {
        let events_per_block = u32::try_from(logs.div_ceil(blocks.max(1))).unwrap_or(u32::MAX);
        Self {
            collections_721: 700,
            collections_1155: 300,
            accounts: 100_000,
            events_per_block,
            steady: true,
            batch_percent: 5,
            gzip: false,
            ..Self::default()
        }
    }

    /// The shape of the live benchmark: as [`Self::bench`], and every log is of an NFT contract. Blocks are
    /// mined by hand, with as many logs as wanted.
    pub fn live() -> Self {
        Self { erc20_noise_percent: 0, contracts_20: 0, block_time_secs: 1, ..Self::bench(200, 1) }
    }

    /// A small chain for tests: few blocks of lag, few collections, much happening.
    pub fn small(seed: u64) -> Self {
        Self {
            seed,
            finality_lag: 8,
            safe_lag: 4,
            collections_721: 4,
            collections_1155: 3,
            accounts: 30,
            class_tokens_per_1155: 6,
            ..Self::default()
        }
    }
}
