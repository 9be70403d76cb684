//! The last door before a log line leaves: URLs lose their user info, path and query, whoever printed them.
//! Our own types redact themselves; libraries put whole URLs into their errors.

use std::borrow::Cow;
use std::io::{self, Write};

use tidemark_model::redact::RedactedUrl;
use tracing_subscriber::fmt::MakeWriter;

/// `text` with every URL redacted.
pub fn scrub(text: &str) -> Cow<'_, str> {
    if !text.contains("://") {
        return Cow::Borrowed(text);
    }
    let mut clean = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let scheme_start = rest[..at]
            .rfind(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.')))
            .map_or(0, |before| before + rest[before..].chars().next().map_or(1, char::len_utf8));
        let end = rest[at..].find(ends_a_url).map_or(rest.len(), |length| at + length);
        // Punctuation of the sentence around it, not of the URL.
        let end = at + rest[at..end].trim_end_matches([':', ',', '.', ';']).len().max("://".len());
        clean.push_str(&rest[..scheme_start]);
        match RedactedUrl::parse(&rest[scheme_start..end]) {
            Ok(url) => clean.push_str(&url.to_string()),
            Err(_) => clean.push_str("(hidden)"),
        }
        rest = &rest[end..];
    }
    clean.push_str(rest);
    Cow::Owned(clean)
}

fn ends_a_url(c: char) -> bool {
    c.is_whitespace() || matches!(c, '"' | '\'' | '\\' | '<' | '>' | ')' | ']' | '}' | '`' | '\u{1b}')
}

/// A writer whose lines are scrubbed. Both formats write one event with one call.
#[derive(Debug, Clone)]
pub struct Scrubbed<M>(M);

impl<M> Scrubbed<M> {
    /// Scrubs what goes to `inner`.
    pub fn new(inner: M) -> Self {
        Self(inner)
    }
}

impl<'a, M: MakeWriter<'a>> MakeWriter<'a> for Scrubbed<M> {
    type Writer = ScrubbedWriter<M::Writer>;
    fn make_writer(&'a self) -> Self::Writer {
        ScrubbedWriter(self.0.make_writer())
    }
}

/// See [`Scrubbed`].
#[derive(Debug)]
pub struct ScrubbedWriter<W>(W);

impl<W: Write> Write for ScrubbedWriter<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        self.0.write_all(scrub(&text).as_bytes())?;
        Ok(line.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_lose_their_secrets_and_the_rest_stays() {
        let text =
            "error sending request for url (https://eth.example.com/v2/CANARY?key=CANARY) after 3 tries";
        assert_eq!(scrub(text), "error sending request for url (https://eth.example.com/…) after 3 tries");
        assert_eq!(
            scrub(r#"{"a":"postgres://u:CANARY@db:1/x","b":1}"#),
            r#"{"a":"postgres://db:1/…","b":1}"#
        );
        assert_eq!(scrub("ßx://h/CANARY: und http://[CANARY"), "ßx://h/…: und (hidden)");
        assert_eq!(scrub("no address"), "no address");
        for text in ["a://b://CANARY", "://CANARY", "x ://u:CANARY@h"] {
            assert!(!scrub(text).contains("CANARY"), "{}", scrub(text));
        }
    }
}
