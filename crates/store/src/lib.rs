//! Postgres, the system of record. The store decides nothing: it offers whole-set statements by table
//! family, and workers call them inside the transaction that also records progress.
//!
//! - [`db`]: pools, connections, transactions, errors with a verdict
//! - [`copy`]: the binary COPY encoder of the hot paths
//! - [`migrate`]: embedded migrations under an advisory lock
//!
//! One module per table family; SQL is a named constant beside its only function. A test prepares every
//! one of them against a fresh database.

pub mod applied;
pub mod blob;
pub mod bulk;
pub mod buslog;
pub mod catalog;
pub mod checks;
pub mod copy;
pub mod cursor;
pub mod db;
pub mod digest;
pub mod dlq;
pub mod errors;
pub mod inbox;
pub mod lease;
pub mod ledger;
pub mod log_height;
pub mod migrate;
pub mod outbox;
pub mod ownership;
pub mod partitions;
pub mod presence;
pub mod projection;
pub mod raw;
pub mod reads;
pub mod status;
pub mod together;
pub mod warm;

pub use db::{Conn, Db, DbOptions, Plans, Session, StoreError, Tx, Verdict};
