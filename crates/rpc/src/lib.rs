//! One resilient JSON-RPC client: endpoint pools, breaker, token buckets, batches, error dictionary.
//!
//! - [`pool`]: the read pool and the write pool; every request leaves through one of them
//! - [`endpoint`]: one endpoint with its breaker, buckets, health, head and learned limits
//! - [`errors`]: the dictionary of providers' error texts
//! - [`limits`]: how many blocks one call may ask for, learned per endpoint and query shape
//! - [`heads`]: `newHeads` over WebSocket, as a wake-up only
//!
//! Nothing here believes an answer: that is the adapters' work. Nothing here prints a URL.

pub mod backoff;
pub mod breaker;
pub mod endpoint;
pub mod errors;
pub mod failure;
pub mod heads;
pub mod limits;
pub mod pool;
mod transport;
mod wire;

pub use endpoint::{Endpoint, EndpointConfig, Timeouts};
pub use errors::Class;
pub use failure::RpcError;
pub use pool::{Identity, PoolConfig, ReadPool, WritePool};
pub use wire::Call;
