//! Subjects of events: `service.aggregate.event.vN[.partition]` (S2 §3). A [`Subject`] that exists is valid.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// S2 §3's services, then ours (design.md §6).
pub const SERVICES: &[&str] = &[
    "identity",
    "tenant",
    "catalog",
    "authoring",
    "content",
    "marketplace",
    "billing",
    "enrollment",
    "assignment",
    "delivery",
    "progress",
    "assessment",
    "certification",
    "notification",
    "media",
    "search",
    "analytics",
    "ai",
    "sync",
    "chain",
    "ledger",
    "market",
    "projection",
    "scoring",
    "social",
    "executor",
];

/// A valid subject.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subject {
    service: &'static str,
    aggregate: String,
    event: String,
    version: u32,
    partition: Option<String>,
}

/// Why a text is not a subject.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a subject: {reason}")]
pub struct NotASubject {
    text: String,
    reason: &'static str,
}

impl Subject {
    /// A subject without partition suffix.
    pub fn new(service: &str, aggregate: &str, event: &str, version: u32) -> Result<Self, NotASubject> {
        let refuse = |reason| NotASubject {
            text: format!("{service}.{aggregate}.{event}.v{version}").chars().take(200).collect(),
            reason,
        };
        let service = SERVICES
            .iter()
            .copied()
            .find(|known| *known == service)
            .ok_or_else(|| refuse("the service is not one of the known services"))?;
        if !is_snake_case(aggregate) {
            return Err(refuse("the aggregate is not a snake_case noun"));
        }
        if !is_snake_case(event) {
            return Err(refuse("the event is not a snake_case verb in the past tense"));
        }
        if version == 0 {
            return Err(refuse("versions start at v1"));
        }
        Ok(Self {
            service,
            aggregate: aggregate.to_owned(),
            event: event.to_owned(),
            version,
            partition: None,
        })
    }
    /// The same subject with a partition suffix.
    pub fn with_partition(mut self, partition: &str) -> Result<Self, NotASubject> {
        if !is_partition(partition) {
            return Err(NotASubject {
                text: partition.chars().take(80).collect(),
                reason: "a partition is letters, digits, '-' and '_', at most 64 of them",
            });
        }
        self.partition = Some(partition.to_owned());
        Ok(self)
    }
    /// The service, which is also the stream's name.
    pub fn service(&self) -> &'static str {
        self.service
    }
    /// The noun.
    pub fn aggregate(&self) -> &str {
        &self.aggregate
    }
    /// The verb.
    pub fn event(&self) -> &str {
        &self.event
    }
    /// The version.
    pub fn version(&self) -> u32 {
        self.version
    }
    /// The partition suffix, if any.
    pub fn partition(&self) -> Option<&str> {
        self.partition.as_deref()
    }
    /// `service.aggregate.event`: the envelope's eventType.
    pub fn event_type(&self) -> String {
        format!("{}.{}.{}", self.service, self.aggregate, self.event)
    }
}

fn is_snake_case(text: &str) -> bool {
    text.len() <= 64
        && text.starts_with(|first: char| first.is_ascii_lowercase())
        && !text.ends_with('_')
        && !text.contains("__")
        && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

fn is_partition(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}

impl FromStr for Subject {
    type Err = NotASubject;
    fn from_str(text: &str) -> Result<Self, NotASubject> {
        let refuse = |reason| NotASubject { text: text.chars().take(200).collect(), reason };
        let mut tokens = text.split('.');
        let mut token = || tokens.next().ok_or_else(|| refuse("it has fewer than four tokens"));
        let (service, aggregate, event, version) = (token()?, token()?, token()?, token()?);
        let digits = version.strip_prefix('v').unwrap_or("");
        if digits.is_empty() || digits.starts_with('0') || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(refuse("the version is not 'v' and a number from 1"));
        }
        let number = digits.parse().map_err(|_| refuse("the version number is too large"))?;
        let subject = Self::new(service, aggregate, event, number)?;
        let partition = tokens.next();
        if tokens.next().is_some() {
            return Err(refuse("it has more than five tokens"));
        }
        match partition {
            Some(partition) => subject.with_partition(partition),
            None => Ok(subject),
        }
    }
}
impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}.v{}", self.service, self.aggregate, self.event, self.version)?;
        match &self.partition {
            Some(partition) => write!(f, ".{partition}"),
            None => Ok(()),
        }
    }
}
impl fmt::Debug for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
impl Serialize for Subject {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
impl<'de> Deserialize<'de> for Subject {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_grammar_is_kept() {
        for text in [
            "chain.block.ingested.v1",
            "authoring.course_draft.published.v12",
            "ledger.event.normalized.v1.p03",
        ] {
            assert_eq!(text.parse::<Subject>().map(|subject| subject.to_string()).as_deref(), Ok(text));
        }
        for text in [
            "",
            "chain",
            "chain.block.ingested",
            "chain.block.ingested.1",
            "chain.block.ingested.v0",
            "chain.block.ingested.v01",
            "chain.Block.ingested.v1",
            "nobody.block.ingested.v1",
            "chain.block.in-gested.v1",
            "chain.block.ingested.v1.",
            "chain.block.ingested.v1.a.b",
            "chain..ingested.v1",
            "chain.block_.ingested.v1",
            "chain.block.ingested.v99999999999",
            "chain.*.x.v1",
            "chain.block.ingested.v1.>",
        ] {
            assert!(text.parse::<Subject>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_parses_prints_the_same(text in "(chain|ledger|ai)\\.[a-z_0-9]{1,9}\\.[a-z_]{1,9}\\.v[0-9]{1,3}(\\.[a-z0-9-]{1,5})?") {
            if let Ok(subject) = text.parse::<Subject>() {
                prop_assert_eq!(subject.to_string(), text);
            }
        }
    }
}
