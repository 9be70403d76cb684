//! system.outbox_events: the only way to emit an event.
