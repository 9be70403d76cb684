//! Closes the holes of an engine. Numbers are gapless, so a jump means that the engine lost something: the
//! missing events are read from the outbox. An engine that stays silent while the log grows is also a hole.
//! So a consumer never loses an event to a broker, not even to one that came back without its disk.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tidemark_store::Db;
use tokio::time::Instant;

use crate::postgres::read_log;
use crate::tail::Tails;
use crate::{BusError, Consumer, Received, metric};

/// What an engine hands out: a number and the envelope's text.
#[derive(Debug, Clone)]
pub(crate) struct Raw {
    pub(crate) pseq: i64,
    pub(crate) body: Bytes,
}

/// Reads one partition of an engine. May lose, repeat and fail.
#[async_trait]
pub(crate) trait Source: Send {
    async fn read(&mut self, at_most: usize, wait: Duration) -> Result<Vec<Raw>, BusError>;
}

/// Opens sources.
#[async_trait]
pub(crate) trait Open: Send + Sync {
    fn engine(&self) -> &'static str;
    async fn open(&self, stream: &str, part: u16, after: i64) -> Result<Box<dyn Source>, BusError>;
}

/// An engine may take this long to hand out what has its number.
const SILENCE_MAX: Duration = Duration::from_secs(1);
/// One look at the engine.
const LOOK: Duration = Duration::from_millis(250);
/// One look at an engine that is silent: the log is what is read then.
const SHORT_LOOK: Duration = Duration::from_millis(20);
/// Longest pause before an engine is tried again.
const REOPEN_WAIT_MAX: Duration = Duration::from_secs(5);
/// Most events read from the log at once.
const REFILL_ROWS_MAX: usize = 1_000;

pub(crate) struct Refilling {
    db: Db,
    tails: Arc<Tails>,
    opener: Arc<dyn Open>,
    source: Option<Box<dyn Source>>,
    reopen_at: Instant,
    reopen_wait: Duration,
    stream: String,
    part: u16,
    /// Everything up to here was handed out or is pending.
    position: i64,
    pending: VecDeque<Received>,
    behind_since: Option<Instant>,
    silent: bool,
}

impl Refilling {
    pub(crate) fn new(
        db: Db,
        tails: Arc<Tails>,
        opener: Arc<dyn Open>,
        stream: &str,
        part: u16,
        after: i64,
    ) -> Self {
        Self {
            db,
            tails,
            opener,
            source: None,
            reopen_at: Instant::now(),
            reopen_wait: Duration::ZERO,
            stream: stream.to_owned(),
            part,
            position: after,
            pending: VecDeque::new(),
            behind_since: None,
            silent: false,
        }
    }

    /// Reads the engine; an engine that fails reads as empty and is opened again later.
    async fn look(&mut self, at_most: usize, wait: Duration) -> Vec<Raw> {
        let looked = self.try_look(at_most, wait).await;
        match looked {
            Ok(raws) => {
                if !raws.is_empty() {
                    self.reopen_wait = Duration::ZERO;
                }
                raws
            }
            Err(error) => {
                self.source = None;
                self.reopen_wait = (self.reopen_wait * 2).clamp(Duration::from_millis(50), REOPEN_WAIT_MAX);
                self.reopen_at = Instant::now() + self.reopen_wait;
                tracing::debug!(stream = self.stream, part = self.part, %error, action = "read_engine", "The engine cannot be read.");
                Vec::new()
            }
        }
    }

    async fn try_look(&mut self, at_most: usize, wait: Duration) -> Result<Vec<Raw>, BusError> {
        if self.source.is_none() && Instant::now() >= self.reopen_at {
            let opening = self.opener.open(&self.stream, self.part, self.position);
            // An engine that is away may hang instead of failing.
            let opened = tokio::time::timeout(SILENCE_MAX, opening).await;
            self.source = Some(opened.map_err(|_| {
                BusError::engine(self.opener.engine(), "open a partition", "no answer in time")
            })??);
        }
        match &mut self.source {
            Some(source) => source.read(at_most, wait).await,
            None => {
                tokio::time::sleep(wait).await;
                Ok(Vec::new())
            }
        }
    }

    /// Takes in what the engine gave; true if it was of any use.
    async fn accept(&mut self, raws: Vec<Raw>) -> Result<bool, BusError> {
        let before = self.position;
        for raw in raws {
            if raw.pseq <= self.position {
                continue;
            }
            if raw.pseq > self.position + 1 {
                self.refill_to(raw.pseq - 1).await?;
            }
            if raw.pseq <= self.position {
                continue;
            }
            match serde_json::from_slice(&raw.body) {
                Ok(envelope) => {
                    self.pending.push_back(Received { pseq: raw.pseq, envelope });
                    self.position = raw.pseq;
                }
                // Not ours, or damaged: the log has the true one.
                Err(error) => {
                    tracing::warn!(stream = self.stream, part = self.part, pseq = raw.pseq, %error, action = "read_engine", "The engine handed out something that is no envelope.");
                    self.refill_to(raw.pseq).await?;
                }
            }
        }
        Ok(self.position > before)
    }

    /// Reads the log up to `last`, as far as it goes.
    async fn refill_to(&mut self, last: i64) -> Result<(), BusError> {
        while self.position < last {
            let missing = usize::try_from(last - self.position).unwrap_or(REFILL_ROWS_MAX);
            let events =
                read_log(&self.db, &self.stream, self.part, self.position, missing.min(REFILL_ROWS_MAX))
                    .await?;
            if self.refilled(events) == 0 {
                return Ok(()); // Dropped by retention.
            }
        }
        Ok(())
    }

    fn refilled(&mut self, events: Vec<Received>) -> u64 {
        let count = u64::try_from(events.len()).unwrap_or(u64::MAX);
        if let Some(last) = events.last() {
            self.position = last.pseq;
            self.pending.extend(events);
            metrics::counter!(metric::BUS_REFILLED, "engine" => self.opener.engine()).increment(count);
            tracing::info!(
                stream = self.stream,
                part = self.part,
                events = count,
                through = self.position,
                action = "refill",
                "Read from the outbox what the engine did not hand out."
            );
        }
        count
    }

    /// The engine gave nothing new. If the log has gone on for a while, read the log.
    async fn check_silence(&mut self, at_most: usize) -> Result<(), BusError> {
        if self.tails.head(&self.stream, self.part).await? <= self.position {
            self.behind_since = None;
            return Ok(());
        }
        let since = *self.behind_since.get_or_insert_with(Instant::now);
        if self.silent || since.elapsed() >= SILENCE_MAX {
            self.silent = true;
            let events = read_log(&self.db, &self.stream, self.part, self.position, at_most).await?;
            self.refilled(events);
        }
        Ok(())
    }
}

#[async_trait]
impl Consumer for Refilling {
    async fn next(&mut self, at_most: usize, wait: Duration) -> Result<Vec<Received>, BusError> {
        let deadline = Instant::now() + wait;
        loop {
            if !self.pending.is_empty() {
                let count = self.pending.len().min(at_most);
                return Ok(self.pending.drain(..count).collect());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Vec::new());
            }
            let look = if self.silent { SHORT_LOOK } else { LOOK };
            let raws = self.look(at_most, look.min(left)).await;
            if self.accept(raws).await? {
                self.silent = false;
                self.behind_since = None;
            } else {
                self.check_silence(at_most).await?;
            }
        }
    }
}
