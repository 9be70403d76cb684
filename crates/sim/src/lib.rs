//! A simulated Ethereum node with a seeded NFT economy, real JSON-RPC and every fault of a bad provider.
//!
//! - [`Sim`] is the chain: it mines, reorgs on demand ([`ReorgKind`]), and knows the truth
//!   ([`Sim::owners_at`], [`Sim::logs`]), so that every test can compare.
//! - [`Sim::serve`] opens a provider of that chain, over HTTP and WebSocket; each has its own
//!   [`FaultProfile`], which can change while it runs.
//! - [`Sim::run_clock`] lets it live in real time.
//!
//! It shares no code with the adapter that reads it: header hashing, blooms, hexadecimal and ABI are its
//! own, so that the two cannot be wrong in the same way. The same [`SimConfig`] and the same sequence of
//! `mine` and `reorg` calls give the same hashes.
//!
//! ```
//! use tidemark_sim::{ReorgKind, Sim, SimConfig};
//!
//! let sim = Sim::new(SimConfig::small(7));
//! sim.mine(20);
//! let before = sim.block(20).expect("mined").hash;
//! sim.reorg(2, ReorgKind::ReincludeSame);
//! assert_eq!(sim.head(), 21);
//! assert_ne!(sim.block(20).expect("mined again").hash, before);
//! ```

mod block;
mod bloom;
mod book;
mod call;
mod chain;
mod clock;
mod config;
mod economy;
mod encode;
mod faults;
mod filter;
mod hexed;
mod limits;
mod logs;
mod node;
mod rng;
mod server;
mod truth;

pub use block::{SimBlock, SimEvent, SimLog};
pub use bloom::Bloom;
pub use chain::{ReorgKind, Sim, supply};
pub use clock::ReorgSchedule;
pub use config::SimConfig;
pub use faults::{BeyondHead, BloomFault, FaultProfile, FinalizedTag, LogNumbering, PrunedStyle};
pub use filter::EmptyAddresses;
pub use limits::LimitStyle;
pub use server::SimServer;
pub use truth::{BalanceKey, Truth};
