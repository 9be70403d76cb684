//! app.worker_leases and app.indexing_checkpoints (S1 §6.1-6.2).
//!
//! A lease is a range of heights that one worker owns until the database's clock passes its end. Ranges are
//! aligned, are handed out in order, and FAILED ones come first. `epoch` grows at every claim, so a paused
//! holder that wakes up late writes nothing. Only the reaper counts attempts; an attempt that stored something
//! starts the count anew, so that only a range that never moves becomes a poison pill. The checkpoint is the
//! end of the contiguous done prefix, never the largest done range.

use std::time::Duration;

use tidemark_model::ids::{Height, HeightRange, NetworkId};

use crate::db::{Conn, StoreError, Tx};

/// Attempts after which a range is a poison pill.
pub const ATTEMPTS_MAX: i32 = 5;

/// Whose leases: one kind of work on one network.
#[derive(Debug, Clone)]
pub struct Leases {
    /// `raw_ingester:shard-0`
    pub worker_type: String,
    /// The network.
    pub network: NetworkId,
    /// Who claims; shown to operators.
    pub holder: String,
    /// How long a claim lasts unless renewed.
    pub ttl: Duration,
    /// Heights per range; ranges begin at its multiples.
    pub range_size: u64,
}

/// A claimed range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The row.
    pub id: i64,
    /// The fence.
    pub epoch: i64,
    /// The aligned range.
    pub range: HeightRange,
    /// Attempts that ended without progress.
    pub attempt: i32,
}

/// A range nobody will try again by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoisonPill {
    /// The range.
    pub range: HeightRange,
    /// Attempts made.
    pub attempt: i32,
    /// What went wrong last, if it was written down.
    pub last_error: Option<String>,
}

/// What the reaper did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reaped {
    /// Expired leases that may be claimed again.
    pub failed: u64,
    /// Expired leases that have had all their attempts.
    pub poisoned: Vec<PoisonPill>,
}

const RECLAIM: &str = "
    update app.worker_leases
       set status = 'ACTIVE', leased_by = $4, epoch = epoch + 1, updated_at = now(),
           lease_expires_at = clock_timestamp() + make_interval(secs => $5)
     where id = (select id from app.worker_leases
                  where worker_type = $1 and network_id = $2 and status = 'FAILED' and attempt < $3
                  order by from_height limit 1 for update skip locked)
    returning id, epoch, from_height, to_height, attempt";

const FRONTIER: &str = "
    select max(to_height) from app.worker_leases where worker_type = $1 and network_id = $2";

const INSERT: &str = "
    insert into app.worker_leases
           (worker_type, network_id, from_height, to_height, status, leased_by, lease_expires_at)
    values ($1, $2, $3, $4, 'ACTIVE', $5, clock_timestamp() + make_interval(secs => $6))
    on conflict do nothing
    returning id, epoch, from_height, to_height, attempt";

const RENEW: &str = "
    update app.worker_leases
       set lease_expires_at = clock_timestamp() + make_interval(secs => $3), updated_at = now()
     where worker_type = $1 and network_id = $2 and id = any($4) and leased_by = $5 and status = 'ACTIVE'";

const HOLD: &str = "
    update app.worker_leases
       set lease_expires_at = clock_timestamp() + make_interval(secs => $3), attempt = 0, updated_at = now()
     where id = $1 and epoch = $2 and status = 'ACTIVE'";

const COMPLETE: &str = "
    update app.worker_leases set status = 'COMPLETED', last_error = null, updated_at = now()
     where id = $1 and epoch = $2 and status = 'ACTIVE'";

const RELEASE: &str = "
    update app.worker_leases set status = 'FAILED', updated_at = now()
     where id = $1 and epoch = $2 and status = 'ACTIVE'";

const RELEASE_OWN: &str = "
    update app.worker_leases set status = 'FAILED', updated_at = now()
     where worker_type = $1 and network_id = $2 and leased_by = $3 and status = 'ACTIVE'";

const GIVE_UP: &str = "
    update app.worker_leases set lease_expires_at = clock_timestamp(), last_error = $3, updated_at = now()
     where id = $1 and epoch = $2 and status = 'ACTIVE'";

const REAP: &str = "
    update app.worker_leases
       set status = 'FAILED', attempt = attempt + 1, updated_at = now()
     where id in (select id from app.worker_leases
                   where worker_type = $1 and network_id = $2 and status = 'ACTIVE'
                     and lease_expires_at < clock_timestamp()
                   order by id for update skip locked)
    returning from_height, to_height, attempt, last_error";

const OPEN_OVER: &str = "
    select exists (select from app.worker_leases
                    where worker_type = $1 and network_id = $2 and from_height < $4 and to_height > $3)";

const DONE_FROM: &str = "
    select from_height, to_height from app.worker_leases
     where worker_type = $1 and network_id = $2 and to_height > $3 and status = 'COMPLETED'
     order by from_height";

const POISONED: &str = "
    select from_height, to_height, attempt, last_error from app.worker_leases
     where worker_type = $1 and network_id = $2 and status = 'FAILED' and attempt >= $3
     order by from_height";

const RESET: &str = "
    update app.worker_leases set attempt = 0, updated_at = now()
     where worker_type = $1 and network_id = $2 and status = 'FAILED' and attempt >= $3";

impl Leases {
    /// Claims a FAILED range, or the next new one that ends at or below `end`. The caller holds the lock of
    /// the position (`cursor::lock` or [`lock_checkpoint`]) whose next height is `next`, so claims and moves
    /// of the position never interleave.
    pub async fn claim(&self, tx: &Tx<'_>, next: Height, end: Height) -> Result<Option<Lease>, StoreError> {
        let ttl = self.ttl.as_secs_f64();
        let again = tx
            .query_opt(
                "reclaim a failed range",
                RECLAIM,
                &[&self.worker_type, &self.network.0, &ATTEMPTS_MAX, &self.holder, &ttl],
            )
            .await?;
        if let Some(row) = again {
            return Ok(Some(lease_of(&row)));
        }
        let frontier: Option<i64> = tx
            .query_one("read the newest range", FRONTIER, &[&self.worker_type, &self.network.0])
            .await?
            .get(0);
        let size = self.range_size.max(1);
        // Aligned to the size. Only after a change of the size does a first range begin at the old frontier.
        let from = Height(next.0 / size * size).max(frontier.map_or(Height(0), Height::from_i64));
        let to = Height((from.0 / size).saturating_add(1).saturating_mul(size));
        if to > end {
            return Ok(None);
        }
        let row = tx
            .query_opt(
                "claim a new range",
                INSERT,
                &[&self.worker_type, &self.network.0, &from.as_i64(), &to.as_i64(), &self.holder, &ttl],
            )
            .await?;
        Ok(row.as_ref().map(lease_of))
    }
    /// Prolongs those of `ids` that this holder still has.
    pub async fn renew(&self, conn: &Conn, ids: &[i64]) -> Result<u64, StoreError> {
        let ttl = self.ttl.as_secs_f64();
        conn.execute("renew leases", RENEW, &[&self.worker_type, &self.network.0, &ttl, &ids, &self.holder])
            .await
    }
    /// Proves that the lease is still ours, prolongs it and notes progress. To be called first in every
    /// transaction that writes under it.
    pub async fn hold(&self, tx: &Tx<'_>, lease: &Lease) -> Result<(), StoreError> {
        let ttl = self.ttl.as_secs_f64();
        match tx.execute("hold a lease", HOLD, &[&lease.id, &lease.epoch, &ttl]).await? {
            0 => Err(StoreError::Fenced { what: format!("lease {}", lease.range) }),
            _ => Ok(()),
        }
    }
    /// Everything in the range is stored.
    pub async fn complete(&self, tx: &Tx<'_>, lease: &Lease) -> Result<(), StoreError> {
        match tx.execute("complete a lease", COMPLETE, &[&lease.id, &lease.epoch]).await? {
            0 => Err(StoreError::Fenced { what: format!("lease {}", lease.range) }),
            _ => Ok(()),
        }
    }
    /// Gives a range back in order (shutdown); no attempt is counted.
    pub async fn release(&self, conn: &Conn, lease: &Lease) -> Result<(), StoreError> {
        conn.execute("release a lease", RELEASE, &[&lease.id, &lease.epoch]).await?;
        Ok(())
    }
    /// Gives back what an earlier life of this holder left behind. The epoch protects against a holder that
    /// lives after all.
    pub async fn release_own(&self, conn: &Conn) -> Result<u64, StoreError> {
        conn.execute(
            "release leases of an earlier life",
            RELEASE_OWN,
            &[&self.worker_type, &self.network.0, &self.holder],
        )
        .await
    }
    /// Leaves a range to the reaper with the reason: the attempt counts.
    pub async fn give_up(&self, conn: &Conn, lease: &Lease, error: &str) -> Result<(), StoreError> {
        conn.execute("give up a lease", GIVE_UP, &[&lease.id, &lease.epoch, &error]).await?;
        Ok(())
    }
    /// Makes expired ACTIVE leases FAILED and counts their attempt.
    pub async fn reap(&self, conn: &Conn) -> Result<Reaped, StoreError> {
        let rows = conn.query("reap leases", REAP, &[&self.worker_type, &self.network.0]).await?;
        let mut reaped = Reaped::default();
        for pill in rows.iter().map(pill_of) {
            if pill.attempt >= ATTEMPTS_MAX {
                reaped.poisoned.push(pill);
            } else {
                reaped.failed += 1;
            }
        }
        Ok(reaped)
    }
    /// Is any lease, in whatever state, over a part of `range`? A sequential writer stays out of it.
    pub async fn any_over(&self, tx: &Tx<'_>, range: HeightRange) -> Result<bool, StoreError> {
        let row = tx
            .query_one(
                "look for leases",
                OPEN_OVER,
                &[&self.worker_type, &self.network.0, &range.from().as_i64(), &range.to().as_i64()],
            )
            .await?;
        Ok(row.get(0))
    }
    /// Where the contiguous COMPLETED prefix from `next` ends; `next` itself when there is none. Never jumps.
    pub async fn contiguous_end(&self, tx: &Tx<'_>, next: Height) -> Result<Height, StoreError> {
        let rows = tx
            .query("read completed ranges", DONE_FROM, &[&self.worker_type, &self.network.0, &next.as_i64()])
            .await?;
        let done = rows.iter().map(|row| (Height::from_i64(row.get(0)), Height::from_i64(row.get(1))));
        Ok(contiguous_end(next, done))
    }
    /// Ranges that wait for an operator.
    pub async fn poisoned(&self, conn: &Conn) -> Result<Vec<PoisonPill>, StoreError> {
        let rows = conn
            .query("read poison pills", POISONED, &[&self.worker_type, &self.network.0, &ATTEMPTS_MAX])
            .await?;
        Ok(rows.iter().map(pill_of).collect())
    }
    /// The operator's answer to poison pills: all of them may be tried again.
    pub async fn reset_poisoned(&self, conn: &Conn) -> Result<u64, StoreError> {
        conn.execute("reset poison pills", RESET, &[&self.worker_type, &self.network.0, &ATTEMPTS_MAX]).await
    }
}

/// Follows `done` ranges, ordered by start, from `next` as far as they touch.
fn contiguous_end(next: Height, done: impl Iterator<Item = (Height, Height)>) -> Height {
    let mut end = next;
    for (from, to) in done {
        if from > end {
            break;
        }
        end = end.max(to);
    }
    end
}

fn lease_of(row: &tokio_postgres::Row) -> Lease {
    Lease { id: row.get(0), epoch: row.get(1), range: range_of(row, 2), attempt: row.get(4) }
}

fn pill_of(row: &tokio_postgres::Row) -> PoisonPill {
    PoisonPill { range: range_of(row, 0), attempt: row.get(2), last_error: row.get(3) }
}

fn range_of(row: &tokio_postgres::Row, at: usize) -> HeightRange {
    HeightRange::new(Height::from_i64(row.get(at)), Height::from_i64(row.get(at + 1)))
        .expect("the table checks from_height < to_height")
}

const READ_CHECKPOINT: &str = "
    select height from app.indexing_checkpoints where worker_name = $1 and network_id = $2";

/// The height at and below which a worker is done; `None` before its first checkpoint.
pub async fn checkpoint(conn: &Conn, worker: &str, network: NetworkId) -> Result<Option<Height>, StoreError> {
    let row = conn.query_opt("read a checkpoint", READ_CHECKPOINT, &[&worker, &network.0]).await?;
    Ok(row.map(|row| Height::from_i64(row.get(0))))
}

const ENSURE_CHECKPOINT: &str = "
    insert into app.indexing_checkpoints (worker_name, network_id, height) values ($1, $2, $3)
    on conflict do nothing";
const LOCK_CHECKPOINT: &str = "
    select height from app.indexing_checkpoints where worker_name = $1 and network_id = $2 for update";

/// Locks a worker's checkpoint until the transaction ends and gives its next height; begins at `start`.
pub async fn lock_checkpoint(
    tx: &Tx<'_>,
    worker: &str,
    network: NetworkId,
    start: Height,
) -> Result<Height, StoreError> {
    let before = start.as_i64() - 1;
    tx.execute("create a checkpoint", ENSURE_CHECKPOINT, &[&worker, &network.0, &before]).await?;
    let row = tx.query_one("lock a checkpoint", LOCK_CHECKPOINT, &[&worker, &network.0]).await?;
    Ok(Height::from_i64(row.get::<_, i64>(0) + 1))
}

const SET_CHECKPOINT: &str = "
    insert into app.indexing_checkpoints (worker_name, network_id, height) values ($1, $2, $3)
    on conflict (worker_name, network_id) do update set height = excluded.height, updated_at = now()";

/// Notes that everything below `next` is done. In the transaction that makes it so.
pub async fn set_checkpoint(
    tx: &Tx<'_>,
    worker: &str,
    network: NetworkId,
    next: Height,
) -> Result<(), StoreError> {
    let height = next.as_i64() - 1;
    tx.execute("set a checkpoint", SET_CHECKPOINT, &[&worker, &network.0, &height]).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(next: u64, done: &[(u64, u64)], expected: u64) {
        let done = done.iter().map(|(from, to)| (Height(*from), Height(*to)));
        assert_eq!(contiguous_end(Height(next), done), Height(expected));
    }

    #[test]
    fn the_committer_follows_touching_ranges_only() {
        check(100, &[], 100);
        check(100, &[(100, 200), (200, 300)], 300);
        check(150, &[(100, 200)], 200);
        check(100, &[(200, 300)], 100);
        check(100, &[(100, 200), (300, 400)], 200);
    }
}
