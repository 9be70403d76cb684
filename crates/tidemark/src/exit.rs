//! Exit codes, documented in `tidemark --help`, and what error gives which.

use std::error::Error;

use tidemark_bus::BusError;
use tidemark_pipeline::{projectors, workers};
use tidemark_store::StoreError;

use crate::config::Problems;
use crate::embedded_pg::PgError;

/// All is well.
pub const OK: u8 = 0;
/// Something failed.
pub const FAILURE: u8 = 1;
/// The command line or the configuration is wrong.
pub const USAGE: u8 = 2;
/// The command worked and found something: a difference, a gap, an open dead letter.
pub const FOUND: u8 = 3;
/// The database cannot be reached or started.
pub const DATABASE: u8 = 4;
/// A second Ctrl-C while draining.
pub const INTERRUPTED: u8 = 130;

/// For `--help`.
pub const HELP: &str = "\
Exit codes:
  0    all is well
  1    something failed; the message says what and what to do next
  2    the command line or the configuration is wrong
  3    a check worked and found something
  4    the database cannot be reached or started
  130  interrupted twice";

/// The command line asks for something that is not there.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// The code for an error.
pub fn code(error: &anyhow::Error) -> u8 {
    for cause in error.chain() {
        if cause.is::<Problems>() || cause.is::<Usage>() {
            return USAGE;
        }
        if cause.is::<PgError>() {
            return DATABASE;
        }
        match store_error(cause) {
            Some(StoreError::Connect { .. }) => return DATABASE,
            Some(error @ StoreError::Statement { .. }) if error.code().is_none() => return DATABASE,
            _ => {}
        }
    }
    FAILURE
}

/// Transparent errors hide the one they hold from the chain.
fn store_error<'e>(cause: &'e (dyn Error + 'static)) -> Option<&'e StoreError> {
    if let Some(BusError::Store(error)) = cause.downcast_ref() {
        return Some(error);
    }
    if let Some(workers::WorkError::Store(error)) = cause.downcast_ref() {
        return Some(error);
    }
    if let Some(projectors::WorkError::Store(error)) = cause.downcast_ref() {
        return Some(error);
    }
    cause.downcast_ref()
}
