//! system.outbox_events: the only way to emit an event. [`Emitter::append`] runs inside the transaction of
//! the change it tells of, after the changed row is locked, so that `seq` follows the order of changes per
//! key (pitfall A4). Nothing is marked or deleted later: the relay reads by snapshot windows.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, RwLock};

use serde_json::Value;
use tidemark_model::clock::{Clock, SystemClock};
use tidemark_model::envelope::{
    Actor, ActorKind, DataResidency, Draft, ENVELOPE_BYTES_MAX, Envelope, RetentionClass, Source,
};
use tidemark_model::partition::{PARTITIONS_DEFAULT, partition_of};
use tidemark_model::subject::Subject;
use uuid::Uuid;

use crate::db::{StoreError, Tx};

/// Most events of one statement: bounds memory here and the size of one message to the server.
const APPEND_ROWS_MAX: usize = 1_000;

/// Most partitions of one stream; the column is a smallint and every one costs a lease row per handler.
pub const PARTITIONS_MAX: u16 = 1_024;

/// Knows every published schema. Lives in the bus; the store only asks.
pub trait SchemaCheck: Send + Sync + 'static {
    /// The schema's URI with content hash, if `payload` is valid for `subject`.
    fn check(&self, subject: &Subject, payload: &Value) -> Result<String, SchemaError>;
}

/// Why a payload may not travel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SchemaError {
    /// The registry has no such subject.
    #[error("{subject} has no schema: add schemas/{}.json", .subject.replace('.', "/"))]
    Unknown {
        /// The subject, with version.
        subject: String,
    },
    /// The payload is not what the schema says.
    #[error("the payload of {subject} is not valid at {at:?}: {reason}")]
    Invalid {
        /// The subject, with version.
        subject: String,
        /// JSON pointer to the place.
        at: String,
        /// What is wrong there, without the value.
        reason: String,
    },
}

/// Why an event was not appended. The transaction must end: an effect without its event is a lie.
#[derive(Debug, thiserror::Error)]
pub enum OutboxError {
    /// The database said no.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The payload does not fit its schema.
    #[error(transparent)]
    Schema(#[from] SchemaError),
    /// Larger than the backbone carries.
    #[error(
        "the envelope of {subject} has {bytes} bytes, the most is {ENVELOPE_BYTES_MAX}: store the payload and send a reference"
    )]
    TooLarge {
        /// The subject.
        subject: String,
        /// The envelope's size.
        bytes: usize,
    },
    /// Postgres cannot store U+0000 in jsonb.
    #[error("the payload of {subject} holds a NUL character: clean the text before emitting it")]
    Nul {
        /// The subject.
        subject: String,
    },
    /// The stream exists with another number of partitions.
    #[error(
        "stream {stream} has {recorded} partitions and the configuration says {configured}: \
         keys would move; set it back, or drain the stream and start a new one"
    )]
    PartitionsChanged {
        /// Which stream.
        stream: String,
        /// In system.bus_streams.
        recorded: u16,
        /// In the configuration.
        configured: u16,
    },
}

impl OutboxError {
    /// The store error inside, if it is one: its verdict says whether to run the transaction again.
    pub fn store(&self) -> Option<&StoreError> {
        match self {
            Self::Store(error) => Some(error),
            Self::Schema(_) | Self::TooLarge { .. } | Self::Nul { .. } | Self::PartitionsChanged { .. } => {
                None
            }
        }
    }
}

/// How many partitions each stream has. Part of a stream's identity (pitfall B29).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partitions {
    default: u16,
    per_stream: BTreeMap<String, u16>,
    /// Large tenants with a partition of their own, after the hashed ones (S2 §15).
    tenants: Vec<String>,
}

impl Default for Partitions {
    /// Twelve everywhere (S2 §15); `projection` has one, its numbers are the live stream's ids.
    fn default() -> Self {
        Self {
            default: PARTITIONS_DEFAULT,
            per_stream: BTreeMap::from([("projection".to_owned(), 1)]),
            tenants: Vec::new(),
        }
    }
}

impl Partitions {
    /// `default` partitions for every stream that is not named; `projection` keeps one.
    pub fn with_default(default: u16) -> Self {
        Self { default: default.clamp(1, PARTITIONS_MAX), ..Self::default() }
    }
    /// The same with `parts` partitions for `stream`.
    #[must_use]
    pub fn with(mut self, stream: &str, parts: u16) -> Self {
        self.per_stream.insert(stream.to_owned(), parts.clamp(1, PARTITIONS_MAX));
        self
    }
    /// The same with a partition of its own for a large tenant, in every stream but `projection`.
    #[must_use]
    pub fn with_tenant(mut self, tenant: &str) -> Self {
        self.tenants.push(tenant.to_owned());
        self
    }
    /// Partitions of `stream`, those of large tenants included.
    pub fn of(&self, stream: &str) -> u16 {
        let tenants = if stream == "projection" { 0 } else { self.tenants.len() };
        self.hashed(stream).saturating_add(u16::try_from(tenants).unwrap_or(u16::MAX)).min(PARTITIONS_MAX)
    }
    fn hashed(&self, stream: &str) -> u16 {
        self.per_stream.get(stream).copied().unwrap_or(self.default)
    }
    /// Where an event goes: a large tenant's own partition, or the hash of the key.
    pub fn place(&self, stream: &str, tenant: &str, key: &str) -> u16 {
        let hashed = self.hashed(stream);
        let own = self.tenants.iter().position(|large| large == tenant);
        match own.and_then(|place| u16::try_from(place).ok()).filter(|_| stream != "projection") {
            Some(place) => hashed.saturating_add(place).min(PARTITIONS_MAX - 1),
            None => partition_of(key, hashed),
        }
    }
}

/// Who emits, for whom, and how long it is kept.
#[derive(Debug, Clone)]
pub struct EmitterOptions {
    /// The producing process.
    pub source: Source,
    /// Whose data it is.
    pub tenant_id: String,
    /// Where it may be kept.
    pub residency: DataResidency,
    /// How long it is kept.
    pub retention: RetentionClass,
    /// Partition counts.
    pub partitions: Partitions,
}

impl Default for EmitterOptions {
    fn default() -> Self {
        Self {
            source: Source {
                service: "tidemark".to_owned(),
                instance: format!("pid-{}", std::process::id()),
                commit: option_env!("TIDEMARK_COMMIT").unwrap_or("unknown").to_owned(),
            },
            tenant_id: "default".to_owned(),
            residency: DataResidency::Eu,
            retention: RetentionClass::Operational,
            partitions: Partitions::default(),
        }
    }
}

/// Makes envelopes of drafts and appends them. Built once at wiring; cloning is cheap.
#[derive(Clone)]
pub struct Emitter {
    inner: Arc<Inner>,
}

struct Inner {
    options: EmitterOptions,
    schemas: Arc<dyn SchemaCheck>,
    clock: Arc<dyn Clock>,
    /// Streams whose recorded partition count was read and agreed with.
    agreed: RwLock<BTreeSet<String>>,
}

impl std::fmt::Debug for Emitter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Emitter").field("options", &self.inner.options).finish_non_exhaustive()
    }
}

const DECLARE_STREAM: &str =
    "insert into system.bus_streams (stream, parts) values ($1, $2) on conflict (stream) do nothing";
const STREAM_PARTS: &str = "select parts from system.bus_streams where stream = $1";

// The database's own time is put in here, so that dbWriteTs is what its name says; into the text, which ends
// where it belongs, so that it is parsed once.
const APPEND: &str = "
    insert into system.outbox_events
        (id, aggregate_type, aggregate_id, event_type, topic, stream, part, partition_key, correlation_id,
         retention_class, tenant_id, envelope)
    select e.id, e.aggregate_type, e.partition_key, e.event_type, e.topic, e.stream, e.part, e.partition_key,
           e.correlation_id, $10, $11,
           (e.envelope || n.at || '}}')::json
    from (select to_json(now())::text as at offset 0) n
   cross join unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::smallint[], $7::text[],
                $8::uuid[], $9::text[]) with ordinality
         as e (id, aggregate_type, event_type, topic, stream, part, partition_key, correlation_id, envelope,
               place)
    order by e.place";

impl Emitter {
    /// An emitter that checks with `schemas`.
    pub fn new(options: EmitterOptions, schemas: Arc<dyn SchemaCheck>) -> Self {
        Self::with_clock(options, schemas, Arc::new(SystemClock))
    }

    /// An emitter with a clock of its own, for tests.
    pub fn with_clock(options: EmitterOptions, schemas: Arc<dyn SchemaCheck>, clock: Arc<dyn Clock>) -> Self {
        Self { inner: Arc::new(Inner { options, schemas, clock, agreed: RwLock::default() }) }
    }

    /// Partition counts it was built with.
    pub fn partitions(&self) -> &Partitions {
        &self.inner.options.partitions
    }

    /// Records the partition counts of `streams` at wiring, so that no business transaction has to, and
    /// refuses other counts than the recorded ones at once.
    pub async fn declare(&self, tx: &Tx<'_>, streams: &[&str]) -> Result<(), OutboxError> {
        for stream in streams {
            declare_stream(tx, stream, self.partitions().of(stream)).await?;
        }
        Ok(())
    }

    /// Appends `drafts` in order. Call it AFTER the changed row was locked or updated. On an error the
    /// transaction must be rolled back.
    pub async fn append(&self, tx: &Tx<'_>, drafts: &[Draft]) -> Result<(), OutboxError> {
        for chunk in drafts.chunks(APPEND_ROWS_MAX) {
            self.append_chunk(tx, chunk).await?;
        }
        Ok(())
    }

    async fn append_chunk(&self, tx: &Tx<'_>, drafts: &[Draft]) -> Result<(), OutboxError> {
        let mut rows = Rows::default();
        for draft in drafts {
            let envelope = self.with_payload(draft, &draft.payload)?;
            let text = to_text(draft, &envelope)?;
            let stream = draft.subject.service();
            self.agree(tx, stream).await?;
            let part = self.partitions().place(stream, &envelope.tenant_id, &draft.partition_key);
            rows.push(draft, &envelope, text, part);
        }
        let options = &self.inner.options;
        tx.execute(
            "append events to the outbox",
            APPEND,
            &[
                &rows.ids,
                &rows.aggregates,
                &rows.event_types,
                &rows.topics,
                &rows.streams,
                &rows.parts,
                &rows.keys,
                &rows.correlations,
                &rows.envelopes,
                &options.retention.as_str(),
                &options.tenant_id,
            ],
        )
        .await?;
        Ok(())
    }

    /// The whole envelope of a draft. Pure but for the clock.
    pub fn envelope(&self, draft: &Draft) -> Result<Envelope, OutboxError> {
        self.with_payload(draft, draft.payload.clone())
    }

    /// The same around the draft's payload as the caller has it: what is only written need not be copied first.
    fn with_payload<P>(&self, draft: &Draft, payload: P) -> Result<Envelope<P>, OutboxError> {
        let options = &self.inner.options;
        let schema_uri = self.inner.schemas.check(&draft.subject, &draft.payload)?;
        let correlation_id = draft.correlation_id.unwrap_or(draft.event_id);
        let traceparent = draft
            .traceparent
            .clone()
            .unwrap_or_else(|| traceparent_of(correlation_id.into(), draft.event_id.into()));
        Ok(Envelope {
            event_id: draft.event_id,
            event_type: draft.subject.event_type(),
            event_version: draft.subject.version(),
            schema_uri,
            source: options.source.clone(),
            occurred_at: draft.occurred_at,
            ingested_at: self.inner.clock.now(),
            causation_id: draft.causation_id,
            correlation_id,
            traceparent: Some(traceparent),
            tenant_id: options.tenant_id.clone(),
            actor: Actor { kind: ActorKind::System, id: options.source.service.clone() },
            payload,
            partition_key: draft.partition_key.clone(),
            outbox: None, // The insert adds it, with the database's time.
            retention_class: options.retention,
            data_residency: options.residency,
        })
    }

    /// The recorded partition count is the configured one, or there was none and now there is.
    async fn agree(&self, tx: &Tx<'_>, stream: &'static str) -> Result<(), OutboxError> {
        if self.inner.agreed.read().expect("no panic while held").contains(stream) {
            return Ok(());
        }
        let configured = self.partitions().of(stream);
        let before = recorded_parts(tx, stream).await?;
        declare_stream(tx, stream, configured).await?;
        // Only a row that was there before is sure to stay: this transaction may still roll back.
        if before.is_some() {
            self.inner.agreed.write().expect("no panic while held").insert(stream.to_owned());
        }
        Ok(())
    }
}

/// The trace group's bytes are the trace id; the event itself is the span.
fn traceparent_of(correlation: u128, event: u128) -> String {
    let span = event & u128::from(u64::MAX);
    format!("00-{correlation:032x}-{:016x}-01", span.max(1))
}

async fn recorded_parts(tx: &Tx<'_>, stream: &str) -> Result<Option<u16>, StoreError> {
    let row = tx.query_opt("read a stream's partitions", STREAM_PARTS, &[&stream]).await?;
    row.map(|row| {
        let parts: i16 = row.get(0);
        u16::try_from(parts).map_err(|_| StoreError::Corrupt {
            what: format!("system.bus_streams of {stream}"),
            found: format!("{parts} partitions"),
            hint: "a count is at least one: restore the row from a backup",
        })
    })
    .transpose()
}

/// Records the partition count of `stream`; refuses another count than the recorded one.
pub async fn declare_stream(tx: &Tx<'_>, stream: &str, configured: u16) -> Result<(), OutboxError> {
    let parts = i16::try_from(configured).unwrap_or(i16::MAX);
    tx.execute("declare a stream", DECLARE_STREAM, &[&stream, &parts]).await?;
    match recorded_parts(tx, stream).await? {
        Some(recorded) if recorded != configured => {
            Err(OutboxError::PartitionsChanged { stream: stream.to_owned(), recorded, configured })
        }
        _ => Ok(()),
    }
}

fn to_text(draft: &Draft, envelope: &Envelope<&Value>) -> Result<String, OutboxError> {
    let subject = || draft.subject.to_string();
    let text = serde_json::to_string(envelope).expect("an envelope has only text keys");
    if text.len() > ENVELOPE_BYTES_MAX {
        return Err(OutboxError::TooLarge { subject: subject(), bytes: text.len() });
    }
    // The escape may also be a backslash followed by the letters; look closer only then.
    if text.contains("\\u0000") && (holds_nul(&draft.payload) || draft.partition_key.contains('\0')) {
        return Err(OutboxError::Nul { subject: subject() });
    }
    Ok(text)
}

fn holds_nul(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains('\0'),
        Value::Array(items) => items.iter().any(holds_nul),
        Value::Object(fields) => fields.iter().any(|(name, field)| name.contains('\0') || holds_nul(field)),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

/// The columns of one insert.
#[derive(Default)]
struct Rows {
    ids: Vec<Uuid>,
    aggregates: Vec<String>,
    event_types: Vec<String>,
    topics: Vec<String>,
    streams: Vec<&'static str>,
    parts: Vec<i16>,
    keys: Vec<String>,
    correlations: Vec<Uuid>,
    envelopes: Vec<String>,
}

impl Rows {
    fn push(&mut self, draft: &Draft, envelope: &Envelope<&Value>, mut text: String, part: u16) {
        self.ids.push(Uuid::from_u128(u128::from(draft.event_id)));
        self.aggregates.push(draft.subject.aggregate().to_owned());
        self.event_types.push(envelope.event_type.clone());
        self.topics.push(draft.subject.to_string());
        self.streams.push(draft.subject.service());
        self.parts.push(i16::try_from(part).expect("below PARTITIONS_MAX"));
        self.keys.push(draft.partition_key.clone());
        self.correlations.push(Uuid::from_u128(u128::from(envelope.correlation_id)));
        assert_eq!(text.pop(), Some('}'), "an envelope is an object");
        text.push_str(&format!(r#","outbox":{{"outboxId":"{}","dbWriteTs":"#, draft.event_id));
        self.envelopes.push(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn projection_has_one_partition_unless_told_otherwise() {
        assert_eq!(Partitions::default().of("projection"), 1);
        assert_eq!(Partitions::default().of("chain"), 12);
        assert_eq!(Partitions::with_default(3).of("projection"), 1);
        assert_eq!(Partitions::with_default(3).with("chain", 5).of("chain"), 5);
        assert_eq!(Partitions::with_default(0).of("ledger"), 1);
    }

    #[test]
    fn a_large_tenant_has_a_partition_of_its_own_and_moves_nobody_else() {
        let plain = Partitions::with_default(4);
        let large = plain.clone().with_tenant("acme");
        assert_eq!(large.of("chain"), 5);
        assert_eq!(large.of("projection"), 1);
        assert_eq!(large.place("chain", "acme", "any"), 4);
        assert_eq!(large.place("projection", "acme", "any"), 0);
        for key in ["a", "b", "c"] {
            assert_eq!(large.place("chain", "other", key), plain.place("chain", "other", key));
        }
    }

    #[test]
    fn nul_is_found_and_its_spelling_is_not() {
        assert!(holds_nul(&serde_json::json!({"a": ["x\u{0}"]})));
        assert!(!holds_nul(&serde_json::json!({"a": "\\u0000"})));
    }
}
