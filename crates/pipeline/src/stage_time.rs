//! Where the time of a history goes, beside the database's statements (those count themselves).

use std::time::Instant;

/// The counter of time spent per stage, in microseconds; its label is `stage`.
pub const STAGE_TIME: &str = "pipeline_stage_microseconds_total";

/// Adds the time since `started` to `stage`.
pub(crate) fn count(stage: &'static str, started: Instant) {
    let micros = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
    metrics::counter!(STAGE_TIME, "stage" => stage).increment(micros);
}
