//! Where the backbone meets the workers: each handler turns a delivery into calls of worker functions inside
//! the dispatcher's transaction, and appends what they emit to the outbox of that transaction.

mod ledger;
mod projector;

pub use ledger::LedgerHandler;
pub use projector::ProjectorHandler;

use serde::de::DeserializeOwned;
use tidemark_bus::dispatch::{Accepts, Delivered, HandleError};

/// Every handler's kind and what it takes, for those who have no database to make one with.
pub const CONSUMERS: &[(&str, &[Accepts])] =
    &[(ledger::KIND, ledger::ACCEPTS), (projector::KIND, projector::ACCEPTS)];

/// The payload as its type. The registry has validated it; a mismatch is a version we do not understand.
fn payload<T: DeserializeOwned>(delivered: &Delivered) -> Result<T, HandleError> {
    T::deserialize(&delivered.envelope.payload).map_err(|error| HandleError::Poison {
        reason: format!("the payload of {} is not what its schema says", delivered.envelope.event_type),
        source: Some(Box::new(error)),
    })
}
