//! Chain adapters: fetch and parse, nothing else. An adapter never sees a database and never believes a node
//! without a check.

pub mod contract;
pub mod evm;
