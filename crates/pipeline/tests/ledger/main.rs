//! The ledger on a real Postgres: reorgs, idempotency, values at the edge, openings, random scripts.

mod idempotency;
mod openings;
mod random;
mod reorgs;
mod segments;
mod truth;
mod values;
mod world;
