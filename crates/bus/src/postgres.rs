//! The engine without a server of its own: the outbox is the log, read by number. No second copy.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tidemark_store::Db;
use tidemark_store::buslog::{self, LogRow};

use crate::tail::Tails;
use crate::{Bus, BusError, Consumer, Numbered, Received};

/// The log as a bus.
#[derive(Debug, Clone)]
pub struct PostgresBus {
    db: Db,
    tails: Arc<Tails>,
}

impl PostgresBus {
    /// Reads the log in `db`; `tails` is shared with the relay of this process.
    pub fn new(db: Db, tails: Arc<Tails>) -> Self {
        Self { db, tails }
    }
}

#[async_trait]
impl Bus for PostgresBus {
    fn engine(&self) -> &'static str {
        "postgres"
    }
    fn is_log(&self) -> bool {
        true
    }
    async fn publish(&self, _events: &[Numbered]) -> Result<(), BusError> {
        Ok(()) // Numbered is published here.
    }
    async fn subscribe(&self, stream: &str, part: u16, after: i64) -> Result<Box<dyn Consumer>, BusError> {
        Ok(Box::new(LogReader {
            db: self.db.clone(),
            tails: Arc::clone(&self.tails),
            stream: stream.to_owned(),
            part,
            position: after,
        }))
    }
}

/// Pause after a head that had nothing behind it.
const EMPTY_WAIT: Duration = Duration::from_millis(250);

struct LogReader {
    db: Db,
    tails: Arc<Tails>,
    stream: String,
    part: u16,
    position: i64,
}

#[async_trait]
impl Consumer for LogReader {
    async fn next(&mut self, at_most: usize, wait: Duration) -> Result<Vec<Received>, BusError> {
        if !self.tails.beyond(&self.stream, self.part, self.position, wait).await? {
            return Ok(Vec::new());
        }
        let events = read_log(&self.db, &self.stream, self.part, self.position, at_most).await?;
        match events.last() {
            Some(last) => self.position = last.pseq,
            // The head was of another history (a database set back below us): do not spin on it.
            None => tokio::time::sleep(wait.min(EMPTY_WAIT)).await,
        }
        Ok(events)
    }
}

/// Events of the log after `after`. A hole in the log itself is only at its beginning, where retention cut
/// it off; a declared consumer never sees that.
pub(crate) async fn read_log(
    db: &Db,
    stream: &str,
    part: u16,
    after: i64,
    at_most: usize,
) -> Result<Vec<Received>, BusError> {
    let limit = u32::try_from(at_most).unwrap_or(u32::MAX);
    let rows = buslog::read(&db.conn().await?, stream, part, after, limit).await?;
    if let Some(first) = rows.first().filter(|first| first.pseq != after + 1) {
        tracing::warn!(
            stream,
            part,
            after,
            first = first.pseq,
            action = "read_log",
            "The log begins later than asked for: older events were dropped by retention."
        );
    }
    rows.into_iter().map(|row| parse(stream, part, row)).collect()
}

fn parse(stream: &str, part: u16, row: LogRow) -> Result<Received, BusError> {
    let envelope = serde_json::from_str(&row.envelope).map_err(|error| BusError::NotAnEnvelope {
        stream: stream.to_owned(),
        part,
        pseq: row.pseq,
        reason: error.to_string(),
    })?;
    Ok(Received { pseq: row.pseq, envelope })
}
