//! A URL whose secrets never reach a log line (pitfall I103): provider keys live in paths and queries,
//! database passwords in the authority. `Display` and `Debug` show scheme, host and port only.

use std::fmt;

use serde::{Deserialize, Serialize};
use url::Url;

/// A URL that prints without user info, path and query. [`RedactedUrl::expose`] is the only way to the
/// whole text.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct RedactedUrl(Url);

impl RedactedUrl {
    /// Parses; the error never repeats the text.
    pub fn parse(text: &str) -> Result<Self, InvalidUrl> {
        Url::parse(text).map(Self).map_err(|error| InvalidUrl(error.to_string()))
    }
    /// The whole URL, secrets included: for the connection itself and nothing else.
    pub fn expose(&self) -> &Url {
        &self.0
    }
}

/// What is wrong with a URL, without the URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a URL: {0}")]
pub struct InvalidUrl(String);

impl fmt::Display for RedactedUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.0.scheme(), self.0.host_str().unwrap_or(""))?;
        if let Some(port) = self.0.port() {
            write!(f, ":{port}")?;
        }
        let hidden = self.0.path().len() > 1 || self.0.query().is_some();
        f.write_str(if hidden { "/…" } else { "" })
    }
}
impl fmt::Debug for RedactedUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
impl Serialize for RedactedUrl {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
impl<'de> Deserialize<'de> for RedactedUrl {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_secret_is_printed() {
        for text in [
            "https://user:CANARY@eth.example.com/v2/CANARY?key=CANARY#CANARY",
            "postgres://me:CANARY@db:5432/CANARY",
        ] {
            let url = RedactedUrl::parse(text).expect("a URL");
            assert!(!format!("{url} {url:?}").contains("CANARY"), "{url}");
            assert!(url.expose().as_str().contains("CANARY"));
        }
        assert_eq!(
            RedactedUrl::parse("http://127.0.0.1:8545").expect("a URL").to_string(),
            "http://127.0.0.1:8545"
        );
        let error = RedactedUrl::parse("CANARY").expect_err("no scheme");
        assert!(!error.to_string().contains("CANARY"));
    }
}
