//! A process shows that it lives by a session lock. The kernel closes a dead process's connections, so the
//! server knows of a `kill -9` at once, and the leases of the dead are free without waiting for their time to
//! run out. It is a hint only: who may write is decided by epochs (pitfall C36), and where the lock cannot be
//! had or seen (a pooler in between) leases run out by time as ever.

use std::time::{Duration, Instant};

use crate::db::{Db, Session, StoreError};

/// The session lock of one owner. Shared by everything in a process that holds leases in one database.
pub struct Presence {
    db: Db,
    owner: String,
    held: tokio::sync::Mutex<Option<Held>>,
}

struct Held {
    session: Session,
    key: i64,
    seen: Instant,
}

impl std::fmt::Debug for Presence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Presence").field("owner", &self.owner).finish_non_exhaustive()
    }
}

const TAKE: &str = "
    select k.key, pg_try_advisory_lock(k.key)
    from (select hashtextextended($1 || current_database(), 0) as key) as k";
const STILL: &str = "select system.is_present($1)";

/// How often the lock is asked for before a lease goes without it, and the first pause between.
const TRIES: u32 = 3;
const PAUSE: Duration = Duration::from_millis(100);
/// The lock's connection is looked at this often.
const LOOK_EVERY: Duration = Duration::from_secs(2);

impl Presence {
    /// Shows the life of `owner` in `db` from the first call of [`Presence::key`] on, until it is dropped.
    pub fn new(db: Db, owner: &str) -> Self {
        Self { db, owner: owner.to_owned(), held: tokio::sync::Mutex::default() }
    }

    /// The lock's key, to be stored with a lease; none if it cannot be had now. Takes it again after its
    /// connection was lost.
    pub async fn key(&self) -> Option<i64> {
        let mut held = self.held.lock().await;
        if let Some(lock) = held.as_mut() {
            if lock.seen.elapsed() < LOOK_EVERY {
                return Some(lock.key);
            }
            let still = lock.session.query_one("look at the own session lock", STILL, &[&lock.key]).await;
            if still.is_ok_and(|row| row.get::<_, bool>(0)) {
                lock.seen = Instant::now();
                return Some(lock.key);
            }
            *held = None;
        }
        // A lease that is claimed without it runs out by time only, so one failure (a server short of
        // connections for a moment) is not taken for an answer.
        for attempt in 1..=TRIES {
            match self.take().await {
                Ok(lock) => {
                    *held = lock;
                    break;
                }
                Err(error) if attempt == TRIES => {
                    tracing::warn!(%error, owner = self.owner, action = "take_presence", "Life is not shown; leases run out by time.");
                }
                Err(_) => tokio::time::sleep(PAUSE * attempt).await,
            }
        }
        held.as_ref().map(|lock| lock.key)
    }

    async fn take(&self) -> Result<Option<Held>, StoreError> {
        let session = self.db.conn().await?.detach();
        let row = session.query_one("take the own session lock", TAKE, &[&self.owner]).await?;
        let (key, taken): (i64, bool) = (row.get(0), row.get(1));
        Ok(taken.then(|| Held { session, key, seen: Instant::now() }))
    }
}
