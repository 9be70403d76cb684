//! What happens to a fact, in which transaction. Workers hold the decisions; the store holds the statements;
//! nothing here names a chain.

pub mod handlers;
pub mod history;
pub mod ingest;
pub mod projectors;
pub mod stage_time;
pub mod status;
pub mod workers;

#[cfg(test)]
mod sample;
