//! Event backbone: outbox relay, bus engines, dispatcher, schema registry, DLQ, replay. It knows nothing
//! of chains.
//!
//! An event's way: `store::outbox::Emitter` writes it in the transaction of the change; [`relay`] gives it a
//! gapless number per (stream, part) and copies it to the engine; [`dispatch`] hands it to a handler inside
//! the transaction that also records inbox and position. The outbox is the log. An engine is a fast copy of
//! it that may lose everything: a consumer that sees a hole reads the outbox.
//!
//! - [`registry`], [`lint`]: schemas, checked at produce and at consume; evolution rules with counterexamples
//! - [`relay`]: numbers and publishes, one fenced owner
//! - [`postgres`], [`nats`], [`redis`]: the engines; [`refill`] closes their holes; [`tail`] knows the heads
//! - [`news`]: wakes who waits in the same process
//! - [`dispatch`]: ordered consumers with exactly-once effect
//! - [`dlq`], [`replay`], [`retention`]: what operators do
//! - [`crash`]: where tests end a process
//!
//! The wiring of a process:
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use tidemark_bus::dispatch::{Dispatcher, DispatcherOptions, Handler};
//! # use tidemark_bus::{postgres::PostgresBus, registry::Registry, relay::{Relay, RelayOptions}, tail::Tails};
//! # use tidemark_store::{Db, outbox::{Emitter, EmitterOptions}};
//! # async fn wire(db: Db, handler: Arc<dyn Handler>) -> Result<(), tidemark_bus::BusError> {
//! let registry = Arc::new(Registry::builtin());
//! let emitter = Emitter::new(EmitterOptions::default(), registry.clone());
//! let tails = Arc::new(Tails::new(db.clone()));
//! let bus = Arc::new(PostgresBus::new(db.clone(), tails.clone()));
//! let relay = Relay::new(db.clone(), bus.clone(), tails, RelayOptions::default());
//! let options = DispatcherOptions {
//!     partitions: emitter.partitions().clone(),
//!     relay: Some(relay.handle()),
//!     ..DispatcherOptions::default()
//! };
//! let dispatcher = Dispatcher::new(db, bus, registry, options).with(handler);
//! let stop = tokio_util::sync::CancellationToken::new();
//! tokio::try_join!(relay.run(stop.clone()), dispatcher.run(stop))?;
//! # Ok(())
//! # }
//! ```

pub mod bench;
pub mod crash;
pub mod dispatch;
pub mod dlq;
pub mod lint;
pub mod metric;
pub mod nats;
pub mod news;
pub mod postgres;
pub mod redis;
pub mod refill;
pub mod registry;
pub mod relay;
pub mod replay;
pub mod retention;
mod share;
pub mod tail;

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tidemark_model::envelope::Envelope;
use tidemark_store::StoreError;
use uuid::Uuid;

/// An event with its number, ready for an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Numbered {
    /// Gapless per (stream, part), from 1.
    pub pseq: i64,
    /// The service.
    pub stream: String,
    /// The partition.
    pub part: u16,
    /// The envelope's id.
    pub event_id: Uuid,
    /// The envelope's JSON text as the outbox holds it.
    pub body: Bytes,
}

/// An event as a consumer gets it.
#[derive(Debug, Clone, PartialEq)]
pub struct Received {
    /// Gapless per (stream, part), from 1.
    pub pseq: i64,
    /// The envelope.
    pub envelope: Envelope,
}

/// Why the backbone could not do something.
#[derive(Debug, thiserror::Error)]
pub enum BusError {
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The engine is away or refuses.
    #[error("{engine} cannot {what}: {reason}")]
    Engine {
        /// Which engine.
        engine: &'static str,
        /// What was being done.
        what: &'static str,
        /// What it said, without secrets.
        reason: String,
    },
    /// The wiring cannot work.
    #[error("{what}: {hint}")]
    Misuse {
        /// What is wrong.
        what: String,
        /// What to do.
        hint: &'static str,
    },
    /// An envelope in the outbox cannot be read.
    #[error("event {pseq} of {stream}.{part} is not an envelope: {reason}")]
    NotAnEnvelope {
        /// The stream.
        stream: String,
        /// The partition.
        part: u16,
        /// Its number.
        pseq: i64,
        /// Why not.
        reason: String,
    },
}

impl BusError {
    pub(crate) fn engine(engine: &'static str, what: &'static str, error: impl std::fmt::Display) -> Self {
        Self::Engine { engine, what, reason: error.to_string() }
    }
}

/// An engine: a fast copy of the log.
#[async_trait]
pub trait Bus: Send + Sync + 'static {
    /// `postgres`, `nats` or `redis`.
    fn engine(&self) -> &'static str;
    /// True if the outbox itself is read, so that nothing is published.
    fn is_log(&self) -> bool {
        false
    }
    /// Called by a relay that has just become the owner. Names what it publishes to, lineage included: what
    /// was acknowledged under another name is published again.
    async fn begin(&self) -> Result<String, BusError> {
        Ok(self.engine().to_owned())
    }
    /// Returns when all are acknowledged. Events of one partition come in order of their numbers.
    /// Publishing a number again changes nothing for consumers.
    async fn publish(&self, events: &[Numbered]) -> Result<(), BusError>;
    /// Events of one partition after `after`.
    async fn subscribe(&self, stream: &str, part: u16, after: i64) -> Result<Box<dyn Consumer>, BusError>;
    /// Nobody needs the numbers at or below `through` any more. An engine that ages by itself ignores it.
    async fn trim(&self, _stream: &str, _part: u16, _through: i64) -> Result<(), BusError> {
        Ok(())
    }
}

/// Reads one partition.
#[async_trait]
pub trait Consumer: Send {
    /// At most `at_most` events in order of their numbers, without holes and without repetition. Waits up
    /// to `wait` for the first; an empty answer means that there was none.
    async fn next(&mut self, at_most: usize, wait: Duration) -> Result<Vec<Received>, BusError>;
}

/// The error and its causes, one line each.
pub(crate) fn chain_of(error: &dyn std::error::Error) -> Vec<String> {
    let mut lines = vec![error.to_string()];
    let mut cause = error.source();
    while let Some(error) = cause {
        lines.push(error.to_string());
        cause = error.source();
    }
    lines
}
