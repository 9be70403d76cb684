//! The schema registry: `schemas/service/aggregate/event/vN.json`, JSON Schema 2020-12, compiled into the
//! binary and loadable from a directory. `schemaUri` carries the SHA-256 of the file, so that an event says
//! which text it was checked against. Validators are compiled once.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use jsonschema::Validator;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tidemark_model::envelope::Envelope;
use tidemark_model::subject::Subject;
use tidemark_store::outbox::{SchemaCheck, SchemaError};

use crate::metric;

macro_rules! schemas {
    ($($name:literal),* $(,)?) => {
        /// All schemas of the repository by path without ending. A test compares this list with the folder.
        pub const BUILTIN: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../../../schemas/", $name, ".json")))),*];
    };
}

schemas!(
    "catalog/asset/created/v1",
    "chain/block/ingested/v1",
    "chain/finality/advanced/v1",
    "chain/reorg/detected/v1",
    "envelope/v1",
    "ledger/block/normalized/v1",
    "ledger/event/normalized/v1",
    "ledger/event/reverted/v1",
    "ledger/event/reverted/v2",
    "ledger/finality/advanced/v1",
    "ledger/ownership/changed/v1",
    "projection/finality/advanced/v1",
    "projection/transfer/projected/v1",
    "projection/transfer/retracted/v1",
);

/// The path of the envelope's own schema.
const ENVELOPE: &str = "envelope/v1";

/// Why a set of schemas cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// A file or folder cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file is not JSON.
    #[error("schema {name} is not JSON")]
    NotJson {
        /// Which.
        name: String,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// A file is not a schema.
    #[error("{name} is not a JSON Schema 2020-12: {reason}")]
    NotASchema {
        /// Which.
        name: String,
        /// Why.
        reason: String,
    },
    /// A file's place is not a subject.
    #[error("schema {name} lies at a path that is no subject: {reason}")]
    NotASubject {
        /// Which.
        name: String,
        /// Why.
        reason: String,
    },
}

/// Every known schema, compiled.
pub struct Registry {
    entries: BTreeMap<String, Entry>,
    envelope: Option<Validator>,
}

struct Entry {
    uri: String,
    closed: Validator,
    /// Without `additionalProperties: false`: for events of a newer or older text of the same version
    /// (pitfall B34).
    open: Validator,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.entries.keys()).finish()
    }
}

impl Registry {
    /// The schemas compiled into this binary.
    pub fn builtin() -> Self {
        Self::from_texts(BUILTIN.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())))
            .expect("a test loads every schema of the repository")
    }

    /// The schemas below `dir`.
    pub fn load(dir: &Path) -> Result<Self, RegistryError> {
        Self::from_texts(read_dir(dir)?)
    }

    /// Schemas by path without ending, as `chain/block/ingested/v1`.
    pub fn from_texts(texts: impl IntoIterator<Item = (String, String)>) -> Result<Self, RegistryError> {
        let mut registry = Self { entries: BTreeMap::new(), envelope: None };
        for (name, text) in texts {
            let schema: Value = serde_json::from_str(&text)
                .map_err(|source| RegistryError::NotJson { name: name.clone(), source })?;
            if name == ENVELOPE {
                registry.envelope = Some(compile(&name, &schema)?);
                continue;
            }
            let subject = subject_of(&name)?;
            let entry = Entry {
                uri: format!("schemas://{name}#sha256-{}", hash_of(&text)),
                closed: compile(&name, &schema)?,
                open: compile(&name, &opened(schema))?,
            };
            registry.entries.insert(subject.to_string(), entry);
        }
        Ok(registry)
    }

    /// All subjects, with version.
    pub fn subjects(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Whether the subject (with version) has a schema.
    pub fn knows(&self, subject: &str) -> bool {
        self.entries.contains_key(subject)
    }

    /// The URI with content hash of a subject (with version).
    pub fn uri(&self, subject: &str) -> Option<&str> {
        self.entries.get(subject).map(|entry| entry.uri.as_str())
    }

    /// Says aloud which of `subjects` (with version) have no schema; gives them.
    pub fn warn_missing<'a>(&self, subjects: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
        let missing: Vec<&str> = subjects.into_iter().filter(|subject| !self.knows(subject)).collect();
        for subject in &missing {
            tracing::warn!(subject, action = "check_registry", "A registered subject has no schema.");
        }
        missing
    }

    /// Checks a received event: against the very text it names if that is ours, openly against our text of
    /// the same version otherwise.
    pub fn validate(&self, envelope: &Envelope) -> Result<(), SchemaError> {
        let subject = format!("{}.v{}", envelope.event_type, envelope.event_version);
        let checked = self.validate_as(&subject, envelope);
        if checked.is_err() {
            ::metrics::counter!(metric::SCHEMA_VALIDATION_FAILURES, "subject" => subject, "side" => "consume")
                .increment(1);
        }
        checked
    }

    fn validate_as(&self, subject: &str, envelope: &Envelope) -> Result<(), SchemaError> {
        let entry =
            self.entries.get(subject).ok_or_else(|| SchemaError::Unknown { subject: subject.to_owned() })?;
        let validator = if entry.uri == envelope.schema_uri {
            &entry.closed
        } else if path_of(&entry.uri) == path_of(&envelope.schema_uri) {
            &entry.open
        } else {
            return Err(SchemaError::Invalid {
                subject: subject.to_owned(),
                at: String::new(),
                reason: "its schemaUri names another schema".to_owned(),
            });
        };
        run(validator, subject, &envelope.payload)
    }

    /// Checks a whole envelope as JSON, for those who make envelopes without us.
    pub fn validate_envelope(&self, envelope: &Value) -> Result<(), SchemaError> {
        match &self.envelope {
            Some(validator) => run(validator, ENVELOPE, envelope),
            None => Ok(()),
        }
    }
}

impl SchemaCheck for Registry {
    fn check(&self, subject: &Subject, payload: &Value) -> Result<String, SchemaError> {
        let name = subject.to_string();
        let checked = match self.entries.get(&name) {
            None => Err(SchemaError::Unknown { subject: name.clone() }),
            Some(entry) => run(&entry.closed, &name, payload).map(|()| entry.uri.clone()),
        };
        if checked.is_err() {
            ::metrics::counter!(metric::SCHEMA_VALIDATION_FAILURES, "subject" => name, "side" => "produce")
                .increment(1);
        }
        checked
    }
}

fn run(validator: &Validator, subject: &str, payload: &Value) -> Result<(), SchemaError> {
    if validator.is_valid(payload) {
        return Ok(());
    }
    let first = validator.iter_errors(payload).next();
    Err(SchemaError::Invalid {
        subject: subject.to_owned(),
        at: first.as_ref().map(|error| error.instance_path().to_string()).unwrap_or_default(),
        reason: first.map_or_else(|| "unknown".to_owned(), |error| error.masked().to_string()),
    })
}

/// All `.json` files below `dir` by path without ending.
pub fn read_dir(dir: &Path) -> Result<Vec<(String, String)>, RegistryError> {
    let mut found = Vec::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(folder) = open.pop() {
        let fail = |source| RegistryError::Read { path: folder.clone(), source };
        for entry in std::fs::read_dir(&folder).map_err(fail)? {
            let path = entry.map_err(fail)?.path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|ending| ending == "json") {
                let text = std::fs::read_to_string(&path)
                    .map_err(|source| RegistryError::Read { path: path.clone(), source })?;
                let name = path.strip_prefix(dir).expect("found below it").with_extension("");
                let tokens: Vec<_> = name.iter().map(|token| token.to_string_lossy()).collect();
                found.push((tokens.join("/"), text));
            }
        }
    }
    found.sort();
    Ok(found)
}

/// `chain/block/ingested/v1` → `chain.block.ingested.v1`
pub fn subject_of(name: &str) -> Result<Subject, RegistryError> {
    name.replace('/', ".").parse().map_err(|error: tidemark_model::subject::NotASubject| {
        RegistryError::NotASubject { name: name.to_owned(), reason: error.to_string() }
    })
}

pub(crate) fn compile(name: &str, schema: &Value) -> Result<Validator, RegistryError> {
    jsonschema::draft202012::options()
        .should_validate_formats(true)
        .build(schema)
        .map_err(|error| RegistryError::NotASchema { name: name.to_owned(), reason: error.to_string() })
}

fn path_of(uri: &str) -> &str {
    uri.split('#').next().unwrap_or(uri)
}

fn hash_of(text: &str) -> String {
    use std::fmt::Write;
    Sha256::digest(text.as_bytes()).iter().fold(String::with_capacity(64), |mut hex, byte| {
        write!(hex, "{byte:02x}").expect("a String takes everything");
        hex
    })
}

/// The schema with every object open.
fn opened(schema: Value) -> Value {
    match schema {
        Value::Object(fields) => Value::Object(
            fields
                .into_iter()
                .filter(|(name, value)| !(name == "additionalProperties" && *value == Value::Bool(false)))
                .map(|(name, value)| (name, opened(value)))
                .collect(),
        ),
        Value::Array(items) => Value::Array(items.into_iter().map(opened).collect()),
        other => other,
    }
}
