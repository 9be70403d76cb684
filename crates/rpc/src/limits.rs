//! How many blocks one call may ask for, learned per endpoint and query shape (S3: double on success, halve on
//! error). A limit a provider states is a ceiling; one it only implies moves the step.

use std::collections::HashMap;
use std::sync::Mutex;

use crate::errors::Class;

/// Bounds of the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepBounds {
    /// Where it starts.
    pub init: u64,
    /// Soft floor: halving stops here unless the provider still says the range is too large.
    pub min: u64,
    /// Never more.
    pub max: u64,
}

impl Default for StepBounds {
    fn default() -> Self {
        Self { init: 2_000, min: 500, max: 20_000 }
    }
}

#[derive(Debug, Clone, Copy)]
struct Span {
    step: u64,
    ceiling: u64,
}

/// The learned steps of one endpoint, by query shape. A shape is what makes two queries cost alike: method,
/// topics and number of addresses.
#[derive(Debug, Default)]
pub struct Limits(Mutex<HashMap<u64, Span>>);

impl Limits {
    fn with<R>(&self, shape: u64, bounds: StepBounds, change: impl FnOnce(&mut Span) -> R) -> R {
        let mut spans = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let max = bounds.max.max(1);
        change(spans.entry(shape).or_insert(Span { step: bounds.init.clamp(1, max), ceiling: max }))
    }
    /// Blocks to ask for next; never zero.
    pub fn step(&self, shape: u64, bounds: StepBounds) -> u64 {
        self.with(shape, bounds, |span| span.step.clamp(1, span.ceiling))
    }
    /// `asked` blocks came back well and held `records` of them; `records_target` bounds what one call should
    /// bring, so that dense ranges do not fill the memory.
    pub fn grew(&self, shape: u64, bounds: StepBounds, asked: u64, records: u64, records_target: u64) {
        self.with(shape, bounds, |span| {
            // A short last range says nothing about a wide one.
            let wanted = if asked >= span.step { span.step.saturating_mul(2) } else { span.step };
            let dense = if records > records_target {
                let share = u128::from(asked) * u128::from(records_target) / u128::from(records);
                u64::try_from(share).unwrap_or(u64::MAX).max(1)
            } else {
                u64::MAX
            };
            span.step = wanted.min(dense).clamp(1, span.ceiling);
        });
    }
    /// `asked` blocks from `from` on were refused as `class`: the number of blocks to try next on this
    /// endpoint, or `None` when one block is already too much.
    pub fn refused(
        &self,
        shape: u64,
        bounds: StepBounds,
        from: u64,
        asked: u64,
        class: &Class,
    ) -> Option<u64> {
        if asked <= 1 {
            return None;
        }
        self.with(shape, bounds, |span| {
            let half = asked / 2;
            let next = match class {
                Class::RangeTooWide { max_blocks: Some(max), .. } if *max < asked => {
                    span.ceiling = (*max).max(1);
                    *max
                }
                Class::RangeTooWide { suggested: Some(range), .. }
                | Class::TooManyResults { suggested: Some(range), .. }
                    if range.0 == from && range.1 - range.0 + 1 < asked =>
                {
                    range.1 - range.0 + 1
                }
                _ => half,
            };
            span.step = next.clamp(1, span.ceiling);
            Some(span.step)
        })
    }
    /// No answer in time for `asked` blocks: halve, but not below the soft floor.
    pub fn slow(&self, shape: u64, bounds: StepBounds, asked: u64) {
        self.with(shape, bounds, |span| {
            let floor = bounds.min.min(span.step).max(1);
            span.step = span.step.min((asked / 2).max(floor)).clamp(1, span.ceiling);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: StepBounds = StepBounds { init: 1_000, min: 500, max: 20_000 };

    #[test]
    fn doubles_on_success_and_stops_at_the_top() {
        let limits = Limits::default();
        for expected in [1_000, 2_000, 4_000, 8_000, 16_000, 20_000, 20_000] {
            assert_eq!(limits.step(1, BOUNDS), expected);
            limits.grew(1, BOUNDS, expected, 10, 1_000);
        }
        assert_eq!(limits.step(2, BOUNDS), 1_000, "another shape learns for itself");
    }

    #[test]
    fn halves_down_to_one_block() {
        let limits = Limits::default();
        let size = Class::ResponseTooLarge;
        let mut asked = 1_000;
        let mut tries = 0;
        while let Some(next) = limits.refused(1, BOUNDS, 0, asked, &size) {
            assert!(next < asked);
            asked = next;
            tries += 1;
        }
        assert_eq!((asked, tries), (1, 9));
    }

    #[test]
    fn a_stated_limit_is_a_ceiling() {
        let limits = Limits::default();
        let class = Class::RangeTooWide { suggested: None, max_blocks: Some(10) };
        assert_eq!(limits.refused(1, BOUNDS, 0, 1_000, &class), Some(10));
        limits.grew(1, BOUNDS, 10, 0, 1_000);
        assert_eq!(limits.step(1, BOUNDS), 10);
    }

    #[test]
    fn a_suggestion_is_taken_when_it_fits() {
        let limits = Limits::default();
        let class = Class::TooManyResults { suggested: Some((100, 149)), max_results: None };
        assert_eq!(limits.refused(1, BOUNDS, 100, 1_000, &class), Some(50));
        assert_eq!(limits.refused(1, BOUNDS, 90, 1_000, &class), Some(500), "it is for another start");
        let wide = Class::TooManyResults { suggested: Some((0, 5_000)), max_results: None };
        assert_eq!(limits.refused(1, BOUNDS, 0, 1_000, &wide), Some(500), "it must narrow");
    }

    #[test]
    fn dense_ranges_bring_the_step_down() {
        let limits = Limits::default();
        limits.grew(1, BOUNDS, 1_000, 100_000, 20_000);
        assert_eq!(limits.step(1, BOUNDS), 200);
    }

    #[test]
    fn slowness_respects_the_soft_floor() {
        let limits = Limits::default();
        for _ in 0..5 {
            let step = limits.step(1, BOUNDS);
            limits.slow(1, BOUNDS, step);
        }
        assert_eq!(limits.step(1, BOUNDS), 500);
    }
}
