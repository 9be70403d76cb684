//! An envelope for unit tests: only what it says and of whom matters there.

use serde_json::Value;
use tidemark_model::envelope::{
    Actor, ActorKind, DataResidency, Envelope, RetentionClass, Source, derived_id,
};
use time::OffsetDateTime;

pub(crate) fn envelope(event_type: &str, partition_key: &str, payload: Value) -> Envelope {
    let at = OffsetDateTime::UNIX_EPOCH;
    let id = derived_id(at, &[event_type]);
    Envelope {
        event_id: id,
        event_type: event_type.to_owned(),
        event_version: 1,
        schema_uri: String::new(),
        source: Source { service: "ledger".into(), instance: "i".into(), commit: "c".into() },
        occurred_at: at,
        ingested_at: at,
        causation_id: None,
        correlation_id: id,
        traceparent: None,
        tenant_id: "t".into(),
        actor: Actor { kind: ActorKind::System, id: "ledger".into() },
        payload,
        partition_key: partition_key.to_owned(),
        outbox: None,
        retention_class: RetentionClass::Operational,
        data_residency: DataResidency::Eu,
    }
}
