//! The simulated node, seen from outside: its chain, its JSON-RPC, its faults.

mod chain;
mod client;
mod faults;
mod rpc;
mod websocket;
