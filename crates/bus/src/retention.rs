//! Retention: whole days of outbox and log are dropped when every event in them is older than its class
//! allows, has its number, is published, and was handled by every declared consumer. Never before.

use std::time::Duration;

use tidemark_model::envelope::RetentionClass;
use tidemark_store::buslog::{self, Day};
use tidemark_store::{Conn, Db};
use time::Date;

use crate::{Bus, BusError};

/// How long classes stay hot (S2 §2).
#[derive(Debug, Clone)]
pub struct RetentionOptions {
    /// Operational events.
    pub operational: Duration,
    /// Regulated events.
    pub regulated: Duration,
    /// Audit events.
    pub audit: Duration,
}

const DAY: Duration = Duration::from_secs(86_400);

impl Default for RetentionOptions {
    fn default() -> Self {
        Self { operational: DAY * 30, regulated: DAY * 180, audit: DAY * 180 }
    }
}

impl RetentionOptions {
    fn of(&self, class: &str) -> Duration {
        if class == RetentionClass::Operational.as_str() {
            self.operational
        } else if class == RetentionClass::Regulated.as_str() {
            self.regulated
        } else {
            self.audit
        }
    }
    fn longest(&self) -> Duration {
        self.operational.max(self.regulated).max(self.audit)
    }
}

/// What one run did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RetentionReport {
    /// Days of outbox and log that were dropped.
    pub dropped: Vec<Date>,
    /// Days that are old enough and still needed, and by whom.
    pub kept: Vec<(Date, String)>,
    /// Days of the inbox that were dropped.
    pub inbox_dropped: Vec<Date>,
}

/// Drops what may go. Tells the engine what nobody needs any more.
pub async fn run(db: &Db, bus: &dyn Bus, options: &RetentionOptions) -> Result<RetentionReport, BusError> {
    let mut conn = db.conn().await?;
    let today = buslog::today(&conn).await?;
    let mut report = RetentionReport::default();
    for day in buslog::days(&conn, "outbox_events").await? {
        let classes = buslog::classes_of(&conn, day).await?;
        let keep = classes.iter().map(|class| options.of(class)).max().unwrap_or(options.operational);
        if !is_over(day, today, keep) {
            continue;
        }
        match why_needed(&conn, day).await? {
            Some(reason) => report.kept.push((day, reason)),
            None => {
                let tx = conn.tx().await?;
                buslog::drop_days(&tx, &[Day { table: "bus_log", day }, Day { table: "outbox_events", day }])
                    .await?;
                tx.commit().await?;
                tracing::info!(%day, action = "drop_day", "Dropped a day of the outbox.");
                report.dropped.push(day);
            }
        }
    }
    for day in buslog::days(&conn, "inbox").await? {
        // Longer than the log, so that nothing that can still be delivered is forgotten.
        if is_over(day, today, options.longest() + DAY * 7) && !buslog::inbox_is_open(&conn, day).await? {
            let tx = conn.tx().await?;
            buslog::drop_days(&tx, &[Day { table: "inbox", day }]).await?;
            tx.commit().await?;
            report.inbox_dropped.push(day);
        }
    }
    buslog::thin_inbox_default(&conn, options.longest() + DAY * 7).await?;
    for (stream, part, through) in buslog::handled_by_all(&conn).await? {
        bus.trim(&stream, part, through).await?;
    }
    Ok(report)
}

fn is_over(day: Date, today: Date, keep: Duration) -> bool {
    time::Duration::try_from(keep).is_ok_and(|keep| day + time::Duration::DAY + keep <= today)
}

async fn why_needed(conn: &Conn, day: Date) -> Result<Option<String>, BusError> {
    if buslog::has_unnumbered_on(conn, day).await? {
        return Ok(Some("the relay: events without a number".to_owned()));
    }
    if let Some(handler) = buslog::who_needs(conn, day).await? {
        return Ok(Some(format!("{handler}: events it has not handled")));
    }
    Ok(None)
}
