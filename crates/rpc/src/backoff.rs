//! How long to wait before the next try: exponential, capped, with full jitter so that many clients of one
//! provider do not come back together.

use std::time::Duration;

use rand::Rng;

/// Growth of the pause between tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// Ceiling of the first pause.
    pub first: Duration,
    /// Ceiling of any pause.
    pub max: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { first: Duration::from_millis(50), max: Duration::from_secs(5) }
    }
}

impl Backoff {
    /// The longest pause after `failures` tries that failed.
    pub fn ceiling(&self, failures: u32) -> Duration {
        let factor = 1_u32.checked_shl(failures.min(20)).unwrap_or(u32::MAX);
        self.first.saturating_mul(factor).min(self.max)
    }
    /// A random pause between half the ceiling and the ceiling.
    pub fn pause(&self, failures: u32) -> Duration {
        let ceiling = self.ceiling(failures);
        ceiling.mul_f64(rand::rng().random_range(0.5..=1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_cap() {
        let backoff = Backoff { first: Duration::from_millis(10), max: Duration::from_millis(50) };
        let ceilings: Vec<_> = (0..5).map(|failures| backoff.ceiling(failures).as_millis()).collect();
        assert_eq!(ceilings, [10, 20, 40, 50, 50]);
        assert_eq!(backoff.ceiling(u32::MAX), backoff.max);
        for failures in 0..100 {
            let pause = backoff.pause(failures);
            assert!(pause <= backoff.ceiling(failures) && pause * 2 >= backoff.ceiling(failures));
        }
    }
}
