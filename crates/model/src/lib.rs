//! Facts and rules without I/O. Everything in this crate is a plain value or a plain function: no
//! sockets, no database, no clock of its own, no async runtime. All other crates speak in these words.
//!
//! - [`ids`]: identities that come from the chain, never from us (S0 §2, §6)
//! - [`address`]: canonical addresses per chain family (S0 §3)
//! - [`quantity`]: uint256 amounts and signed deltas with checked arithmetic
//! - [`chain`]: what the system knows of a chain: the adapter contract, raw blocks and raw events
//! - [`finality`]: the lifecycle pending → confirmed → finalized (→ reverted)
//! - [`subject`], [`envelope`], [`partition`]: the words of the event backbone (S2 §3, §4, §15)
//! - [`text`]: names from chains are hostile until shown safely
//! - [`redact`]: URLs that never print their secrets
//! - [`digest`]: the order-independent hash of ownership

pub mod address;
pub mod chain;
pub mod clock;
pub mod digest;
pub mod envelope;
pub mod finality;
pub mod ids;
pub mod partition;
pub mod quantity;
pub mod redact;
pub mod subject;
pub mod text;

pub use alloy_primitives::U256;
pub use time::OffsetDateTime;
pub use uuid::Uuid;
