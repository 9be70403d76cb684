//! A simulated Ethereum node with a seeded NFT economy, real JSON-RPC and every fault of a bad provider.
