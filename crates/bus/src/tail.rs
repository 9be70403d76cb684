//! How far the log goes, per (stream, part), shared by everybody in the process who waits for it. The relay
//! tells it at once; without a relay in this process one of the waiters asks the database for all of them.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use tidemark_store::buslog::{self, HeadOf};
use tidemark_store::{Db, StoreError};
use tokio::time::Instant;

use crate::news::News;

/// Heads of the log.
pub struct Tails {
    db: Db,
    heads: Mutex<HashMap<String, Vec<i64>>>,
    changed: News,
    /// Held by the waiter whose turn it is to ask the database.
    turn: tokio::sync::Mutex<Option<Instant>>,
    /// When a relay of this process last said that it is at work.
    fed: Mutex<Option<Instant>>,
}

/// Between two questions to the database: the latency of a consumer whose relay is in another process.
const INTERVAL: Duration = Duration::from_millis(50);
/// The same while a relay of this process tells its news at once.
const FED_INTERVAL: Duration = Duration::from_secs(1);
/// A relay that says nothing for this long is not at work.
const FED_FOR: Duration = Duration::from_secs(2);

impl std::fmt::Debug for Tails {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tails").finish_non_exhaustive()
    }
}

impl Tails {
    /// Heads of the log in `db`.
    pub fn new(db: Db) -> Self {
        Self {
            db,
            heads: Mutex::default(),
            changed: News::default(),
            turn: tokio::sync::Mutex::default(),
            fed: Mutex::default(),
        }
    }

    /// The highest number known of one partition.
    pub fn known(&self, stream: &str, part: u16) -> i64 {
        let heads = self.heads.lock().expect("no panic while held");
        heads.get(stream).and_then(|parts| parts.get(usize::from(part))).copied().unwrap_or(0)
    }

    /// A relay of this process is at work: its news come at once.
    pub(crate) fn feed(&self) {
        *self.fed.lock().expect("no panic while held") = Some(Instant::now());
    }

    fn interval(&self) -> Duration {
        let fed = *self.fed.lock().expect("no panic while held");
        if fed.is_some_and(|at| at.elapsed() < FED_FOR) { FED_INTERVAL } else { INTERVAL }
    }

    /// Told whenever a head that is known here grows.
    pub fn news(&self) -> News {
        self.changed.clone()
    }

    /// Takes in new heads and wakes everybody who waits.
    pub fn advance(&self, news: &[HeadOf]) {
        let mut grew = false;
        {
            let mut heads = self.heads.lock().expect("no panic while held");
            for at in news {
                let parts = heads.entry(at.stream.clone()).or_default();
                let place = usize::from(at.part);
                if parts.len() <= place {
                    parts.resize(place + 1, 0);
                }
                if parts[place] < at.head {
                    parts[place] = at.head;
                    grew = true;
                }
            }
        }
        if grew {
            self.changed.tell();
        }
    }

    /// Waits until the partition goes beyond `pseq`; false if `wait` passes first.
    pub async fn beyond(
        &self,
        stream: &str,
        part: u16,
        pseq: i64,
        wait: Duration,
    ) -> Result<bool, StoreError> {
        let deadline = Instant::now() + wait;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable(); // From here on no news is missed.
            if self.known(stream, part) > pseq {
                return Ok(true);
            }
            tokio::select! {
                () = changed => {}
                asked = self.ask() => asked?,
                () = tokio::time::sleep_until(deadline) => return Ok(self.known(stream, part) > pseq),
            }
        }
    }

    /// The head as the database says, or as it said a moment ago.
    pub(crate) async fn head(&self, stream: &str, part: u16) -> Result<i64, StoreError> {
        // Somebody else is asking: what was known a moment ago is good enough.
        if let Ok(mut turn) = self.turn.try_lock()
            && turn.is_none_or(|last| last.elapsed() >= self.interval())
        {
            *turn = Some(Instant::now());
            let heads = buslog::heads(&self.db.conn().await?).await?;
            self.advance(&heads);
        }
        Ok(self.known(stream, part))
    }

    /// Asks the database when it is this waiter's turn and the interval is over.
    async fn ask(&self) -> Result<(), StoreError> {
        let mut turn = self.turn.lock().await;
        if let Some(last) = *turn {
            tokio::time::sleep_until(last + self.interval()).await;
        }
        *turn = Some(Instant::now());
        let heads = buslog::heads(&self.db.conn().await?).await?;
        self.advance(&heads);
        Ok(())
    }
}
