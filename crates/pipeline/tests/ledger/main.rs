//! The ledger on a real Postgres: reorgs, idempotency, values at the edge, openings, segments. Random
//! schedules are in `../simulation`.

mod idempotency;
mod openings;
mod plans;
mod reorgs;
mod segments;
mod values;
mod world;
