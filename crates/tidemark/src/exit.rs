//! Exit codes, documented in `tidemark --help`, and what error gives which.

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

/// The code for an error.
pub fn code(error: &anyhow::Error) -> u8 {
    for cause in error.chain() {
        if cause.is::<Problems>() {
            return USAGE;
        }
        if cause.is::<PgError>() {
            return DATABASE;
        }
        match cause.downcast_ref::<StoreError>() {
            Some(StoreError::Connect { .. }) => return DATABASE,
            Some(error @ StoreError::Statement { .. }) if error.code().is_none() => return DATABASE,
            _ => {}
        }
    }
    FAILURE
}
