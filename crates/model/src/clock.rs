//! Time is injected, so that a test can hold it still.

use std::sync::Mutex;
use std::time::Duration;

use time::OffsetDateTime;

/// Where the time comes from. Leases use the database's clock, order comes from block data; this is for
/// everything else.
pub trait Clock: Send + Sync + 'static {
    /// The time now.
    fn now(&self) -> OffsetDateTime;
}

/// The machine's clock.
#[derive(Debug, Default, Clone, Copy)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> OffsetDateTime {
        OffsetDateTime::now_utc()
    }
}

/// A clock that moves only when told to.
#[derive(Debug)]
pub struct ManualClock(Mutex<OffsetDateTime>);

impl ManualClock {
    /// Starts at `start`.
    pub fn new(start: OffsetDateTime) -> Self {
        Self(Mutex::new(start))
    }
    /// Moves forward.
    pub fn advance(&self, by: Duration) {
        *self.0.lock().expect("no test panics while holding the clock") += by;
    }
}

impl Clock for ManualClock {
    fn now(&self) -> OffsetDateTime {
        *self.0.lock().expect("no test panics while holding the clock")
    }
}
