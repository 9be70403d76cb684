//! The ingester's metrics; the names of S3 and S0 exist here and nowhere else.

use metrics::{Counter, Gauge, counter, gauge};
use tidemark_model::chain::Network;
use tidemark_model::ids::Height;

/// One network's metrics.
pub(super) struct IngestMetrics {
    head: Gauge,
    last_processed_block: Gauge,
    backlog: Gauge,
    lag_seconds: Gauge,
    reorgs: Counter,
    events: Counter,
    errors: Counter,
    halted: Gauge,
}

impl IngestMetrics {
    pub(super) fn new(network: &Network) -> Self {
        let name = network.slug.clone();
        Self {
            head: gauge!("head", "network" => name.clone()),
            last_processed_block: gauge!("last_processed_block", "network" => name.clone()),
            backlog: gauge!("backlog", "network" => name.clone()),
            lag_seconds: gauge!("ingest_lag_seconds", "network" => name.clone()),
            reorgs: counter!("reorg_events_total", "network" => name.clone()),
            events: counter!("ingest_events_total", "network" => name.clone()),
            errors: counter!("ingest_errors_total", "network" => name.clone()),
            halted: gauge!("ingest_halted", "network" => name),
        }
    }
    pub(super) fn position(&self, next: Height, head: Option<Height>) {
        self.last_processed_block.set(as_gauge(next.0.saturating_sub(1)));
        if let Some(head) = head {
            self.head.set(as_gauge(head.0));
            self.backlog.set(as_gauge(head.next().0.saturating_sub(next.0)));
        }
    }
    pub(super) fn lag(&self, seconds: f64) {
        self.lag_seconds.set(seconds.max(0.0));
    }
    pub(super) fn reorg(&self) {
        self.reorgs.increment(1);
    }
    pub(super) fn stored(&self, events: u64) {
        self.events.increment(events);
    }
    pub(super) fn error(&self) {
        self.errors.increment(1);
    }
    pub(super) fn halted(&self, is_halted: bool) {
        self.halted.set(if is_halted { 1.0 } else { 0.0 });
    }
}

/// Gauges are floating point; heights stay far below 2^53.
fn as_gauge(value: u64) -> f64 {
    let high = u32::try_from(value >> 32).unwrap_or(u32::MAX);
    let low = u32::try_from(value & 0xffff_ffff).expect("masked to 32 bits");
    f64::from(high) * 4_294_967_296.0 + f64::from(low)
}
