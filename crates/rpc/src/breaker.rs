//! The circuit breaker of one endpoint: after some failures in a row it rests, then lets one request through
//! as a probe; the probe's fate closes it or doubles the rest. Time is passed in, so that tests hold it.

use std::time::{Duration, Instant};

/// When an endpoint rests and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BreakerConfig {
    /// Failures in a row before it rests.
    pub failures_max: u32,
    /// The first rest.
    pub rest_first: Duration,
    /// The longest rest.
    pub rest_max: Duration,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        // One probe in five seconds is no load for a node, and one that is back is found soon.
        Self { failures_max: 5, rest_first: Duration::from_millis(500), rest_max: Duration::from_secs(5) }
    }
}

/// May a request pass?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Permit {
    /// Yes.
    Pass,
    /// Yes, as the one probe of a resting endpoint.
    Probe,
    /// No.
    Rest,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Closed { failures: u32 },
    Open { until: Instant, rest: Duration },
    HalfOpen { since: Instant, rest: Duration },
}

/// The breaker's memory.
#[derive(Debug, Clone)]
pub struct Breaker {
    config: BreakerConfig,
    state: State,
}

impl Breaker {
    /// Closed.
    pub fn new(config: BreakerConfig) -> Self {
        Self { config, state: State::Closed { failures: 0 } }
    }
    /// Asks for permission at `now`.
    pub fn permit(&mut self, now: Instant) -> Permit {
        match self.state {
            State::Closed { .. } => Permit::Pass,
            State::Open { until, rest } if now >= until => {
                self.state = State::HalfOpen { since: now, rest };
                Permit::Probe
            }
            // A probe whose caller was dropped must not close the door for ever.
            State::HalfOpen { since, rest } if now >= since + self.config.rest_max => {
                self.state = State::HalfOpen { since: now, rest };
                Permit::Probe
            }
            State::Open { .. } | State::HalfOpen { .. } => Permit::Rest,
        }
    }
    /// Would a request pass at `now`? Changes nothing.
    pub fn would_pass(&self, now: Instant) -> bool {
        match self.state {
            State::Closed { .. } => true,
            State::Open { until, .. } => now >= until,
            State::HalfOpen { since, .. } => now >= since + self.config.rest_max,
        }
    }
    /// A request came back well.
    pub fn succeeded(&mut self) {
        self.state = State::Closed { failures: 0 };
    }
    /// A request failed at `now`. True when this opened the breaker.
    pub fn failed(&mut self, now: Instant) -> bool {
        match self.state {
            State::Closed { failures } if failures + 1 < self.config.failures_max => {
                self.state = State::Closed { failures: failures + 1 };
                false
            }
            State::Closed { .. } => self.open(now, self.config.rest_first),
            State::HalfOpen { rest, .. } => self.open(now, (rest * 2).min(self.config.rest_max)),
            State::Open { .. } => false,
        }
    }
    /// Rests at once, for `rest`: a wrong chain or a lie needs no second chance soon.
    pub fn trip(&mut self, now: Instant, rest: Duration) {
        self.open(now, rest);
    }
    fn open(&mut self, now: Instant, rest: Duration) -> bool {
        self.state = State::Open { until: now + rest, rest };
        true
    }
    /// 0 closed, 1 half open, 2 open: the value of the gauge.
    pub fn gauge(&self) -> f64 {
        match self.state {
            State::Closed { .. } => 0.0,
            State::HalfOpen { .. } => 1.0,
            State::Open { .. } => 2.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn breaker() -> (Breaker, Instant) {
        let config = BreakerConfig {
            failures_max: 2,
            rest_first: Duration::from_secs(1),
            rest_max: Duration::from_secs(3),
        };
        (Breaker::new(config), Instant::now())
    }

    #[test]
    fn rests_after_failures_in_a_row_and_not_before() {
        let (mut breaker, now) = breaker();
        assert!(!breaker.failed(now));
        breaker.succeeded();
        assert!(!breaker.failed(now));
        assert_eq!(breaker.permit(now), Permit::Pass);
        assert!(breaker.failed(now));
        assert_eq!(breaker.permit(now), Permit::Rest);
    }

    #[test]
    fn one_probe_decides() {
        let (mut breaker, now) = breaker();
        breaker.failed(now);
        breaker.failed(now);
        let later = now + Duration::from_secs(1);
        assert_eq!(breaker.permit(later), Permit::Probe);
        assert_eq!(breaker.permit(later), Permit::Rest, "only one probe at a time");
        assert!(breaker.failed(later));
        assert_eq!(breaker.permit(later + Duration::from_secs(1)), Permit::Rest, "the rest doubled");
        assert_eq!(breaker.permit(later + Duration::from_secs(2)), Permit::Probe);
        breaker.succeeded();
        assert_eq!(breaker.permit(later), Permit::Pass);
    }

    #[test]
    fn a_lost_probe_does_not_close_the_door_for_ever() {
        let (mut breaker, now) = breaker();
        breaker.trip(now, Duration::ZERO);
        assert_eq!(breaker.permit(now), Permit::Probe);
        assert_eq!(breaker.permit(now), Permit::Rest);
        assert_eq!(breaker.permit(now + Duration::from_secs(3)), Permit::Probe);
    }
}
