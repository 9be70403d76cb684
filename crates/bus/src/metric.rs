//! Names of the backbone's metrics (S2 §19), once.

/// Age of the oldest event that has no number or is not published, in seconds.
pub const OUTBOX_LAG_SECONDS: &str = "outbox_lag_seconds";
/// Events numbered and not yet acknowledged by the engine.
pub const OUTBOX_UNPUBLISHED_COUNT: &str = "outbox_unpublished_count";
/// Events published; a counter whose rate is the publish rate. Label `engine`.
pub const EVENT_PUBLISH_RATE: &str = "event_publish_rate";
/// Events handled; a counter whose rate is the consume rate. Label `handler`.
pub const EVENT_CONSUME_RATE: &str = "event_consume_rate";
/// Events behind the head. Labels `handler`, `stream`.
pub const CONSUMER_LAG_MESSAGES: &str = "consumer_lag_messages";
/// How long the oldest event that is not handled has had its number. Labels `handler`, `stream`.
pub const CONSUMER_LAG_SECONDS: &str = "consumer_lag_seconds";
/// Open dead letters. Label `handler`.
pub const DLQ_DEPTH: &str = "dlq_depth";
/// Events that do not fit their schema. Labels `subject`, `side` (produce, consume).
pub const SCHEMA_VALIDATION_FAILURES: &str = "schema_validation_failures";
/// Events read from the outbox because the engine had a hole. Label `engine`.
pub const BUS_REFILLED: &str = "bus_refilled_events";
