//! The ledger on a real Postgres: reorgs, idempotency, values at the edge, openings, random scripts.

mod idempotency;
mod reorgs;
mod values;
mod world;
