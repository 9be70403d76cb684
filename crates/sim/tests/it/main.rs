//! The simulated node, seen from outside: its chain, its JSON-RPC, its faults.

#![expect(clippy::unwrap_used, reason = "helpers of tests are tests too")]

mod chain;
mod client;
mod faults;
mod rpc;
mod websocket;
