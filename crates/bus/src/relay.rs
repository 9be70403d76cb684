//! The relay: one fenced owner per database that numbers the outbox by snapshot windows (reliability §2.1)
//! and copies numbered events to the engine in order. A crash between publishing and recording publishes the
//! same numbers again; consumers drop them. Rows are never marked or deleted.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tidemark_store::buslog::{self, HeadOf, NumberedRows, RelayLease};
use tidemark_store::presence::Presence;
use tidemark_store::{Db, StoreError, Verdict};
use time::OffsetDateTime;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::tail::Tails;
use crate::{Bus, BusError, Numbered, crash, metric};

/// How the relay works.
#[derive(Debug, Clone)]
pub struct RelayOptions {
    /// This process, as the lease shows it.
    pub owner: String,
    /// How long a lease lives without a sign of its owner.
    pub lease_ttl: Duration,
    /// Pause after a window that had events.
    pub busy_wait: Duration,
    /// Longest pause between two looks at an empty outbox.
    pub idle_wait_max: Duration,
    /// Most events numbered in one transaction. All of it happens in the server; few large pieces of a
    /// backlog are cheaper than many small ones, as each looks at the whole window.
    pub window_rows_max: u32,
    /// Most events of one partition published at once.
    pub publish_rows_max: u32,
    /// Shows that this process lives; none is one of its own.
    pub presence: Option<Arc<Presence>>,
}

impl Default for RelayOptions {
    fn default() -> Self {
        Self {
            owner: format!("relay-{}-{}", std::process::id(), uuid::Uuid::new_v4().simple()),
            lease_ttl: Duration::from_secs(10),
            // Who emits in this process wakes the relay; this is for the others.
            busy_wait: Duration::from_millis(10),
            idle_wait_max: Duration::from_millis(250),
            window_rows_max: 100_000,
            publish_rows_max: 1_000,
            presence: None,
        }
    }
}

/// Most events held for one round of publishing: bounds memory.
const ROUND_EVENTS_MAX: usize = 4_000;
/// Longest pause between two looks at a lease that somebody else holds.
const CLAIM_EVERY_MAX: Duration = Duration::from_secs(1);
/// Longest pause after an error.
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// Day partitions are looked after this often.
const PARTITIONS_EVERY: Duration = Duration::from_secs(900);

/// Wakes the relay of this process: call it after the commit of a transaction that emitted.
#[derive(Debug, Clone, Default)]
pub struct RelayHandle {
    wake: Arc<Notify>,
}

impl RelayHandle {
    /// There is something new in the outbox.
    pub fn wake(&self) {
        self.wake.notify_one();
    }
}

/// Numbers and publishes.
pub struct Relay {
    db: Db,
    bus: Arc<dyn Bus>,
    tails: Arc<Tails>,
    options: RelayOptions,
    presence: Arc<Presence>,
    handle: RelayHandle,
    numbered: Notify,
    /// What the engine called itself when this relay became the owner.
    label: Mutex<String>,
}

impl std::fmt::Debug for Relay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Relay").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Relay {
    /// A relay from the outbox in `db` to `bus`; `tails` is shared with the consumers of this process.
    pub fn new(db: Db, bus: Arc<dyn Bus>, tails: Arc<Tails>, options: RelayOptions) -> Self {
        let label = Mutex::new(bus.engine().to_owned());
        let presence = match &options.presence {
            Some(shared) => Arc::clone(shared),
            None => Arc::new(Presence::new(db.clone(), &options.owner)),
        };
        let (handle, numbered) = (RelayHandle::default(), Notify::new());
        Self { db, bus, tails, options, presence, handle, numbered, label }
    }

    /// The way to wake it.
    pub fn handle(&self) -> RelayHandle {
        self.handle.clone()
    }

    /// Works until `stop`. Waits while another relay owns the lease; survives a database and an engine that
    /// are away. An error is a mistake of ours or a broken database.
    pub async fn run(&self, stop: CancellationToken) -> Result<(), BusError> {
        let mut wait = Duration::ZERO;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                () = tokio::time::sleep(wait) => {}
            }
            let lease = match self.claim().await {
                Ok(Some(lease)) => lease,
                Ok(None) => {
                    wait = (self.options.lease_ttl / 3).min(CLAIM_EVERY_MAX);
                    continue;
                }
                Err(error) => {
                    wait = retry_wait(&error, wait)?;
                    continue;
                }
            };
            let ended = tokio::select! {
                biased;
                () = stop.cancelled() => {
                    self.release(lease).await;
                    return Ok(());
                }
                ended = self.run_leased(lease) => ended,
            };
            let Err(error) = ended;
            tracing::warn!(%error, epoch = lease.epoch, action = "relay", "The relay lost its hold.");
            wait = retry_wait(&error, wait)?;
        }
    }

    async fn release(&self, lease: RelayLease) {
        let released = async { buslog::release_relay(&self.db.conn().await?, lease.epoch).await };
        if let Err(error) = released.await {
            tracing::debug!(%error, action = "release_relay", "The lease will run out by itself.");
        }
    }

    /// Claims the lease and brings a restored or re-engined log in order; none if another relay has it.
    pub async fn claim(&self) -> Result<Option<RelayLease>, BusError> {
        let present = self.presence.key().await;
        let mut conn = self.db.conn().await?;
        let (owner, ttl) = (self.options.owner.as_str(), self.options.lease_ttl);
        let Some(mut lease) = buslog::claim_relay(&conn, owner, ttl, present).await? else {
            return Ok(None);
        };
        crash::point("relay.claimed");
        // The server may have come back between the two: a lease without a sign of life runs out by time only.
        if present.is_none()
            && let Some(key) = self.presence.key().await
        {
            buslog::renew_relay(&conn, lease.epoch, ttl, Some(key)).await?;
        }
        buslog::ensure_partitions(&conn).await?;
        let label = self.bus.begin().await?;
        *self.label.lock().expect("no panic while held") = label.clone();
        if lease.restored {
            let tx = conn.tx().await?;
            tx.batch("allow a long statement", "set local statement_timeout = 0").await?;
            let rows = buslog::drain_restored(&tx, lease.epoch, &label).await?;
            tx.commit().await?;
            lease.restored = false;
            tracing::warn!(
                rows,
                epoch = lease.epoch,
                action = "drain_restored",
                "Numbered a restored outbox by sequence."
            );
        }
        let changed = buslog::adopt_engine(&conn, lease.epoch, &label).await?;
        if changed > 0 && !self.bus.is_log() {
            tracing::warn!(
                partitions = changed,
                engine = self.bus.engine(),
                action = "adopt_engine",
                "Another engine: publishing from the start."
            );
        }
        self.tails.advance(&buslog::heads(&conn).await?);
        tracing::info!(
            epoch = lease.epoch,
            owner = self.options.owner,
            action = "claim_relay",
            "Owns the relay."
        );
        Ok(Some(lease))
    }

    async fn run_leased(&self, lease: RelayLease) -> Result<Infallible, BusError> {
        tokio::select! {
            ended = self.number_forever(lease) => ended,
            ended = self.publish_forever(lease) => ended,
            ended = self.keep(lease) => ended,
        }
    }

    async fn number_forever(&self, lease: RelayLease) -> Result<Infallible, BusError> {
        let mut wait = self.options.busy_wait;
        loop {
            let numbered = self.number(lease).await?;
            self.tails.feed();
            if self.bus.is_log() {
                let oldest = numbered.oldest.map_or(0.0, age_seconds);
                metrics::gauge!(metric::OUTBOX_LAG_SECONDS).set(oldest);
                metrics::gauge!(metric::OUTBOX_UNPUBLISHED_COUNT).set(0.0); // Numbered is published.
            }
            if numbered.more {
                continue;
            }
            wait = if numbered.rows > 0 {
                self.options.busy_wait
            } else {
                (wait * 2).min(self.options.idle_wait_max)
            };
            tokio::select! {
                () = self.handle.wake.notified() => wait = self.options.busy_wait,
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    fn label(&self) -> String {
        self.label.lock().expect("no panic while held").clone()
    }

    /// Numbers what is new, at most one transaction's worth.
    pub async fn number(&self, lease: RelayLease) -> Result<NumberedRows, BusError> {
        let mut conn = self.db.conn().await?;
        if !buslog::has_unnumbered(&conn, lease.epoch).await? {
            return Ok(NumberedRows::default());
        }
        let tx = conn.tx().await?;
        let options = &self.options;
        let numbered =
            buslog::number(&tx, lease.epoch, &self.label(), options.window_rows_max, options.lease_ttl)
                .await?;
        crash::point("relay.number.before_commit");
        tx.commit().await?;
        crash::point("relay.number.after_commit");
        if numbered.rows > 0 {
            self.tails.advance(&numbered.heads);
            self.numbered.notify_one();
            if self.bus.is_log() {
                metrics::counter!(metric::EVENT_PUBLISH_RATE, "engine" => "postgres")
                    .increment(numbered.rows);
            }
        }
        Ok(numbered)
    }

    async fn publish_forever(&self, lease: RelayLease) -> Result<Infallible, BusError> {
        if self.bus.is_log() {
            std::future::pending::<()>().await;
        }
        let mut wait = Duration::ZERO;
        let mut gathered = None;
        loop {
            let round = match gathered.take() {
                Some(round) => round,
                None => self.gather(&[]).await?,
            };
            if round.events.is_empty() {
                wait = Duration::ZERO;
                tokio::select! {
                    () = self.numbered.notified() => {}
                    () = tokio::time::sleep(self.options.idle_wait_max) => {}
                }
                continue;
            }
            // The log is read for the next round while the engine takes this one.
            let (sent, next) = tokio::join!(self.send(lease, &round), self.gather(&round.reached));
            match sent {
                Ok(_) => {
                    wait = Duration::ZERO;
                    gathered = Some(next?).filter(|next| !next.events.is_empty());
                }
                // Numbering goes on while the engine is away: consumers read the log meanwhile.
                Err(error @ BusError::Engine { .. }) => {
                    wait = (wait * 2).clamp(Duration::from_millis(100), BACKOFF_MAX);
                    tracing::warn!(%error, wait_ms = wait.as_millis(), action = "publish", "The engine does not take events.");
                    tokio::time::sleep(wait).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Publishes one round of what the engine lacks, in order per partition, and records it. Gives how many.
    pub async fn publish(&self, lease: RelayLease) -> Result<u64, BusError> {
        let round = self.gather(&[]).await?;
        if round.events.is_empty() { Ok(0) } else { self.send(lease, &round).await }
    }

    /// Reads one round of what the engine lacks, beyond what is `under_way`.
    async fn gather(&self, under_way: &[HeadOf]) -> Result<Round, BusError> {
        let conn = self.db.conn().await?;
        let mut heads = buslog::heads(&conn).await?;
        let behind: i64 = heads.iter().map(|at| at.head - at.published).sum();
        for at in &mut heads {
            let sent = under_way.iter().find(|sent| sent.part == at.part && sent.stream == at.stream);
            at.published = sent.map_or(at.published, |sent| at.published.max(sent.published));
        }
        heads.retain(|at| at.published < at.head);
        // The farthest behind first: a round may not reach all of them.
        heads.sort_by_key(|at| at.published - at.head);
        let mut round = Round::default();
        for at in heads {
            if round.events.len() >= ROUND_EVENTS_MAX {
                break;
            }
            let rows =
                buslog::read(&conn, &at.stream, at.part, at.published, self.options.publish_rows_max).await?;
            if let Some(last) = rows.last() {
                round.reached.push(HeadOf { published: last.pseq, ..at.clone() });
            }
            round.oldest = rows.first().map(|row| row.numbered_at).into_iter().chain(round.oldest).min();
            round.events.extend(rows.into_iter().map(|row| Numbered {
                pseq: row.pseq,
                stream: at.stream.clone(),
                part: at.part,
                event_id: row.event_id,
                body: Bytes::from(row.envelope),
            }));
        }
        if under_way.is_empty() {
            metrics::gauge!(metric::OUTBOX_LAG_SECONDS).set(round.oldest.map_or(0.0, age_seconds));
        }
        metrics::gauge!(metric::OUTBOX_UNPUBLISHED_COUNT)
            .set(f64::from(i32::try_from(behind).unwrap_or(i32::MAX)));
        Ok(round)
    }

    /// Hands a round to the engine and records that it took it.
    async fn send(&self, lease: RelayLease, round: &Round) -> Result<u64, BusError> {
        metrics::gauge!(metric::OUTBOX_LAG_SECONDS).set(round.oldest.map_or(0.0, age_seconds));
        crash::point("relay.publish.before");
        let (first, second) = round.events.split_at(round.events.len() / 2);
        if cfg!(debug_assertions) {
            self.bus.publish(first).await?;
            crash::point("relay.publish.half");
            self.bus.publish(second).await?;
        } else {
            self.bus.publish(&round.events).await?;
        }
        crash::point("relay.publish.after");
        let conn = self.db.conn().await?;
        buslog::set_published(&conn, lease.epoch, &self.label(), &round.reached).await?;
        crash::point("relay.record.after");
        let count = u64::try_from(round.events.len()).unwrap_or(u64::MAX);
        metrics::counter!(metric::EVENT_PUBLISH_RATE, "engine" => self.bus.engine()).increment(count);
        Ok(count)
    }

    /// Keeps the lease and the day partitions.
    async fn keep(&self, lease: RelayLease) -> Result<Infallible, BusError> {
        let mut partitions_due = tokio::time::Instant::now() + PARTITIONS_EVERY;
        loop {
            tokio::time::sleep(self.options.lease_ttl / 3).await;
            let present = self.presence.key().await; // Taken again if its connection was lost.
            let conn = self.db.conn().await?;
            buslog::renew_relay(&conn, lease.epoch, self.options.lease_ttl, present).await?;
            if tokio::time::Instant::now() >= partitions_due {
                buslog::ensure_partitions(&conn).await?;
                partitions_due += PARTITIONS_EVERY;
            }
        }
    }
}

/// Events to be published together.
#[derive(Default)]
struct Round {
    events: Vec<Numbered>,
    /// Where each partition is once the engine has them.
    reached: Vec<HeadOf>,
    /// When the oldest of them got its number.
    oldest: Option<OffsetDateTime>,
}

fn age_seconds(at: OffsetDateTime) -> f64 {
    (OffsetDateTime::now_utc() - at).as_seconds_f64().max(0.0)
}

/// How long to wait after `error`, or the error itself when waiting does not help.
fn retry_wait(error: &BusError, before: Duration) -> Result<Duration, BusError> {
    match error {
        BusError::Store(store) if store.verdict() == Verdict::Fatal => {
            Err(BusError::Store(StoreError::Corrupt {
                what: "the backbone's database".to_owned(),
                found: store.to_string(),
                hint: "the relay cannot work like this: read the message, check migrations and rights",
            }))
        }
        BusError::Misuse { what, hint } => Err(BusError::Misuse { what: what.clone(), hint }),
        BusError::Store(_) | BusError::Engine { .. } | BusError::NotAnEnvelope { .. } => {
            Ok((before * 2).clamp(Duration::from_millis(100), BACKOFF_MAX))
        }
    }
}
