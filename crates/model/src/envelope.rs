//! The event envelope (S2 §4), every field of it. Event ids of derived events are deterministic: the same
//! cause and kind give the same id, so a retried publish is the same event.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use time::OffsetDateTime;
use ulid::Ulid;

use crate::subject::Subject;

/// Largest envelope in bytes; more goes to object storage with a reference in the payload (pitfall B31).
pub const ENVELOPE_BYTES_MAX: usize = 256 * 1024;

/// One event on the backbone. Its payload may be somebody else's (`P = &Value`), to write an event that need not be kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Envelope<P = Value> {
    /// Globally unique.
    pub event_id: Ulid,
    /// `service.aggregate.event`, without version.
    pub event_type: String,
    /// 1, 2, …
    pub event_version: u32,
    /// `schemas://service/aggregate/event/vN#sha256-…`
    pub schema_uri: String,
    /// Who produced it.
    pub source: Source,
    /// When the fact happened (block time for chain facts).
    #[serde(with = "time::serde::rfc3339")]
    pub occurred_at: OffsetDateTime,
    /// When we learnt of it.
    #[serde(with = "time::serde::rfc3339")]
    pub ingested_at: OffsetDateTime,
    /// The event that caused this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub causation_id: Option<Ulid>,
    /// The trace group; its bytes are the W3C trace id.
    pub correlation_id: Ulid,
    /// W3C trace context, when there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
    /// Whose data it is.
    pub tenant_id: String,
    /// Who did it.
    pub actor: Actor,
    /// The fact itself, valid against `schema_uri`.
    pub payload: P,
    /// Order is kept per key.
    pub partition_key: String,
    /// Set by the outbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outbox: Option<OutboxInfo>,
    /// How long it is kept.
    pub retention_class: RetentionClass,
    /// Where it may be kept.
    pub data_residency: DataResidency,
}

/// The producing process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Service name.
    pub service: String,
    /// Process instance.
    pub instance: String,
    /// Commit the binary was built from.
    pub commit: String,
}

/// Who acted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Actor {
    /// Kind of actor.
    #[serde(rename = "type")]
    pub kind: ActorKind,
    /// Its id.
    pub id: String,
}

/// Kinds of actor (S2 §4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActorKind {
    /// A person.
    User,
    /// Ourselves.
    System,
    /// A program with a key.
    ApiKey,
    /// A service account.
    ServiceAccount,
}

/// Written when the row entered the outbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct OutboxInfo {
    /// Database time of the write.
    #[serde(with = "time::serde::rfc3339")]
    pub db_write_ts: OffsetDateTime,
    /// The outbox row.
    pub outbox_id: Ulid,
}

/// Retention classes (S2 §2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RetentionClass {
    /// 30 days hot.
    Operational,
    /// 180 days hot.
    Regulated,
    /// 180 days hot.
    Audit,
}

impl RetentionClass {
    /// The label used in Postgres.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Operational => "operational",
            Self::Regulated => "regulated",
            Self::Audit => "audit",
        }
    }
}

/// Regions (S2 §4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DataResidency {
    /// United States.
    Us,
    /// European Union.
    Eu,
    /// Middle East.
    Me,
    /// Asia-Pacific.
    Ap,
}

impl Envelope {
    /// The subject without partition. Fails only for an envelope that was not made by us.
    pub fn subject(&self) -> Result<Subject, crate::subject::NotASubject> {
        format!("{}.v{}", self.event_type, self.event_version).parse()
    }
}

/// What a producer says of a new event; the outbox adds the rest.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    /// What happened.
    pub subject: Subject,
    /// Deterministic id; see [`derived_id`].
    pub event_id: Ulid,
    /// Order is kept per key.
    pub partition_key: String,
    /// The fact.
    pub payload: Value,
    /// When it happened.
    pub occurred_at: OffsetDateTime,
    /// The event that caused it, if any.
    pub causation_id: Option<Ulid>,
    /// The trace group; defaults to the event's own id.
    pub correlation_id: Option<Ulid>,
    /// W3C trace context, when there is one.
    pub traceparent: Option<String>,
}

impl Draft {
    /// A draft whose id is derived from `cause` (anything that names the fact uniquely) and the subject.
    pub fn derived(
        subject: Subject,
        cause: &str,
        partition_key: String,
        payload: Value,
        occurred_at: OffsetDateTime,
    ) -> Self {
        let event_id = derived_id(occurred_at, &[&subject.to_string(), cause]);
        Self {
            subject,
            event_id,
            partition_key,
            payload,
            occurred_at,
            causation_id: None,
            correlation_id: None,
            traceparent: None,
        }
    }
    /// Names the event that caused this one and stays in its trace.
    #[must_use]
    pub fn caused_by(mut self, cause: &Envelope) -> Self {
        self.causation_id = Some(cause.event_id);
        self.correlation_id = Some(cause.correlation_id);
        self.traceparent.clone_from(&cause.traceparent);
        self
    }
}

/// A ULID whose time is `at` and whose random part is a hash of `parts`: the same fact, the same id.
pub fn derived_id(at: OffsetDateTime, parts: &[&str]) -> Ulid {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update(part.as_bytes());
        hasher.update([0]);
    }
    let hash: [u8; 32] = hasher.finalize().into();
    let mut random = [0; 16];
    random[6..].copy_from_slice(&hash[..10]);
    let millis = u64::try_from(at.unix_timestamp_nanos() / 1_000_000).unwrap_or(0);
    Ulid::from_parts(millis, u128::from_be_bytes(random))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_ids_depend_on_the_fact_alone() {
        let at = OffsetDateTime::from_unix_timestamp(1_700_000_000).expect("a time");
        let id = derived_id(at, &["chain.block.ingested.v1", "1:0xab"]);
        assert_eq!(id, derived_id(at, &["chain.block.ingested.v1", "1:0xab"]));
        assert_ne!(id, derived_id(at, &["chain.block.ingested.v1", "1:0xac"]));
        assert_ne!(derived_id(at, &["ab", "c"]), derived_id(at, &["a", "bc"]));
        assert_eq!(id.timestamp_ms(), 1_700_000_000_000);
    }

    #[test]
    fn the_json_has_the_specified_names() {
        let at = OffsetDateTime::from_unix_timestamp(1_700_000_000).expect("a time");
        let envelope = Envelope {
            event_id: derived_id(at, &["x"]),
            event_type: "chain.block.ingested".into(),
            event_version: 1,
            schema_uri: "schemas://chain/block/ingested/v1#sha256-00".into(),
            source: Source { service: "ingester".into(), instance: "i".into(), commit: "c".into() },
            occurred_at: at,
            ingested_at: at,
            causation_id: None,
            correlation_id: derived_id(at, &["x"]),
            traceparent: None,
            tenant_id: "t".into(),
            actor: Actor { kind: ActorKind::System, id: "ingester".into() },
            payload: serde_json::json!({}),
            partition_key: "1".into(),
            outbox: None,
            retention_class: RetentionClass::Operational,
            data_residency: DataResidency::Eu,
        };
        let value = serde_json::to_value(&envelope).expect("serializes");
        for key in [
            "eventId",
            "eventType",
            "eventVersion",
            "schemaUri",
            "source",
            "occurredAt",
            "ingestedAt",
            "correlationId",
            "tenantId",
            "actor",
            "payload",
            "partitionKey",
            "retentionClass",
            "dataResidency",
        ] {
            assert!(value.get(key).is_some(), "{key}");
        }
        assert_eq!(value["occurredAt"], "2023-11-14T22:13:20Z");
        assert_eq!(serde_json::from_value::<Envelope>(value).expect("reads back"), envelope);
        assert_eq!(envelope.subject().expect("valid").to_string(), "chain.block.ingested.v1");
    }
}
