//! Event backbone: outbox relay, bus engines, dispatcher, schema registry, DLQ, replay.
