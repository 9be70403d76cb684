//! From untyped values to typed ones. A [`Section`] hands out each key once; what nobody asked for is
//! unknown. Problems are collected, never thrown, so that a user sees all of them at once.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use tidemark_model::redact::RedactedUrl;

use super::Secret;
use super::tree::{Node, Origin, Problem, Value};

/// One table being read.
pub(super) struct Section<'a> {
    path: String,
    origin: Origin,
    entries: BTreeMap<String, Node>,
    known: BTreeSet<&'static str>,
    problems: &'a mut Vec<Problem>,
}

impl<'a> Section<'a> {
    /// Reads `node` as a table. `path` is how problems call it.
    pub(super) fn new(path: &str, node: Node, problems: &'a mut Vec<Problem>) -> Self {
        let origin = node.origin.clone();
        let entries = match node.value {
            Value::Table(entries) => entries,
            other => {
                problems.push(Problem {
                    origin: origin.clone(),
                    key: path.to_owned(),
                    what: format!("this is {}, not a table", other.kind()),
                    fix: format!("write [{path}] and its keys below it"),
                });
                BTreeMap::new()
            }
        };
        Self { path: path.to_owned(), origin, entries, known: BTreeSet::new(), problems }
    }

    pub(super) fn problems(&mut self) -> &mut Vec<Problem> {
        self.problems
    }

    /// Where the section itself was written.
    pub(super) fn origin(&self) -> Origin {
        self.origin.clone()
    }

    /// Where `key` was written, or the section if it was not. Ask before taking the key.
    pub(super) fn origin_of(&self, key: &str) -> Origin {
        self.entries.get(key).map_or_else(|| self.origin.clone(), |node| node.origin.clone())
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.entries.contains_key(key)
    }

    fn full(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    pub(super) fn problem(
        &mut self,
        origin: Origin,
        key: &str,
        what: impl Into<String>,
        fix: impl Into<String>,
    ) {
        let key = self.full(key);
        self.problems.push(Problem { origin, key, what: what.into(), fix: fix.into() });
    }

    /// The raw node under `key`.
    pub(super) fn take(&mut self, key: &'static str) -> Option<Node> {
        self.known.insert(key);
        self.entries.remove(key)
    }

    /// The table under `key`; an empty one if nobody wrote it.
    pub(super) fn table(&mut self, key: &'static str) -> Section<'_> {
        let path = self.full(key);
        let node = self.take(key).unwrap_or_else(Node::empty);
        Section::new(&path, node, self.problems)
    }

    fn wrong_kind(&mut self, key: &str, node: &Node, wanted: &str) {
        let what = format!("expected {wanted}, found {}", node.value.kind());
        self.problem(node.origin.clone(), key, what, format!("write {wanted}"));
    }

    pub(super) fn text(&mut self, key: &'static str) -> Option<(String, Origin)> {
        let node = self.take(key)?;
        match node.value {
            Value::Text(text) => Some((text, node.origin)),
            // `slug = 5` in a variable reads as a number; text is what was meant there.
            Value::Int(number) if matches!(node.origin, Origin::Env(_) | Origin::Flag(_)) => {
                Some((number.to_string(), node.origin))
            }
            _ => {
                self.wrong_kind(key, &node, "text in quotes");
                None
            }
        }
    }

    pub(super) fn secret(&mut self, key: &'static str) -> Option<Secret> {
        self.text(key).map(|(text, _)| Secret::new(text))
    }

    /// A whole number within `range`.
    pub(super) fn number(
        &mut self,
        key: &'static str,
        default: u64,
        range: std::ops::RangeInclusive<u64>,
    ) -> u64 {
        self.number_opt(key, range).unwrap_or(default)
    }

    pub(super) fn number_opt(
        &mut self,
        key: &'static str,
        range: std::ops::RangeInclusive<u64>,
    ) -> Option<u64> {
        let node = self.take(key)?;
        let Value::Int(number) = node.value else {
            self.wrong_kind(key, &node, "a whole number");
            return None;
        };
        match u64::try_from(number) {
            Ok(number) if range.contains(&number) => Some(number),
            _ => {
                let (low, high) = (range.start(), range.end());
                let fix = match *high {
                    u64::MAX => format!("use {low} or more"),
                    high => format!("use a number from {low} to {high}"),
                };
                self.problem(node.origin, key, format!("{number} is out of range"), fix);
                None
            }
        }
    }

    pub(super) fn flag(&mut self, key: &'static str, default: bool) -> bool {
        let Some(node) = self.take(key) else { return default };
        match &node.value {
            Value::Bool(flag) => *flag,
            Value::Int(0) => false,
            Value::Int(1) => true,
            _ => {
                self.wrong_kind(key, &node, "true or false");
                default
            }
        }
    }

    pub(super) fn address(&mut self, key: &'static str) -> Option<SocketAddr> {
        let (text, origin) = self.text(key)?;
        match text.parse() {
            Ok(address) => Some(address),
            Err(_) => {
                let fix = "write an IP address and a port, such as 127.0.0.1:8080";
                self.problem(origin, key, "not an address to listen on", fix);
                None
            }
        }
    }

    pub(super) fn url(&mut self, key: &'static str, schemes: &[&str]) -> Option<RedactedUrl> {
        let (text, origin) = self.text(key)?;
        self.parse_url(key, &text, origin, schemes)
    }

    fn parse_url(&mut self, key: &str, text: &str, origin: Origin, schemes: &[&str]) -> Option<RedactedUrl> {
        match RedactedUrl::parse(text) {
            Ok(url) if schemes.contains(&url.expose().scheme()) => Some(url),
            Ok(_) => {
                let fix = format!(
                    "begin it with {}",
                    schemes.iter().map(|scheme| format!("{scheme}://")).collect::<Vec<_>>().join(" or ")
                );
                self.problem(origin, key, "a URL of another kind", fix);
                None
            }
            Err(error) => {
                self.problem(origin, key, error.to_string(), format!("write {}://host:port/…", schemes[0]));
                None
            }
        }
    }

    pub(super) fn urls(&mut self, key: &'static str, schemes: &[&str]) -> Vec<RedactedUrl> {
        self.texts(key)
            .into_iter()
            .filter_map(|(text, origin)| self.parse_url(key, &text, origin, schemes))
            .collect()
    }

    /// A list of texts; a single text counts as a list of one, and in a variable commas separate.
    pub(super) fn texts(&mut self, key: &'static str) -> Vec<(String, Origin)> {
        let Some(node) = self.take(key) else { return vec![] };
        match node.value {
            Value::Text(text) if matches!(node.origin, Origin::Env(_)) => text
                .split(',')
                .map(str::trim)
                .filter(|part| !part.is_empty())
                .map(|part| (part.to_owned(), node.origin.clone()))
                .collect(),
            Value::Text(text) => vec![(text, node.origin)],
            Value::List(items) => {
                let mut texts = vec![];
                for item in items {
                    match item.value {
                        Value::Text(text) => texts.push((text, item.origin)),
                        _ => self.wrong_kind(key, &item, "a list of texts in quotes"),
                    }
                }
                texts
            }
            _ => {
                self.wrong_kind(key, &node, "a list of texts in quotes");
                vec![]
            }
        }
    }

    /// A map from free names to whole numbers; `name=1,other=2` in a variable.
    pub(super) fn numbers(&mut self, key: &'static str) -> BTreeMap<String, u64> {
        let mut found = BTreeMap::new();
        let Some(node) = self.take(key) else { return found };
        match node.value {
            Value::Table(entries) => {
                for (name, entry) in entries {
                    match entry.value {
                        Value::Int(number) if number > 0 => {
                            found.insert(name, number.unsigned_abs());
                        }
                        _ => self.wrong_kind(key, &entry, "a whole number above 0"),
                    }
                }
            }
            Value::Text(ref text) => {
                for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
                    match part.split_once('=').map(|(name, number)| (name.trim(), number.trim().parse())) {
                        Some((name, Ok(number))) if number > 0 => {
                            found.insert(name.to_owned(), number);
                        }
                        _ => self.problem(
                            node.origin.clone(),
                            key,
                            "not a list of name=number",
                            "write for example eth_getLogs=20000,eth_call=5000",
                        ),
                    }
                }
            }
            _ => self.wrong_kind(key, &node, "a table of names and whole numbers"),
        }
        found
    }

    /// One of a few words.
    pub(super) fn word<T: Copy>(&mut self, key: &'static str, default: T, words: &[(&str, T)]) -> T {
        let Some((text, origin)) = self.text(key) else { return default };
        match words.iter().find(|(word, _)| *word == text) {
            Some((_, value)) => *value,
            None => {
                let list: Vec<_> = words.iter().map(|(word, _)| format!("\"{word}\"")).collect();
                self.problem(
                    origin,
                    key,
                    "not one of the words known here",
                    format!("use {}", list.join(", ")),
                );
                default
            }
        }
    }

    /// Everything nobody asked for is unknown. Gives the keys this section knows.
    pub(super) fn finish(self) -> Vec<String> {
        let known: Vec<&str> = self.known.iter().copied().collect();
        for (key, node) in &self.entries {
            let full = if self.path.is_empty() { key.clone() } else { format!("{}.{key}", self.path) };
            let fix = match nearest(key, &known) {
                Some(meant) => format!("did you mean {meant}? Otherwise remove it"),
                None => format!("remove it; known here: {}", known.join(", ")),
            };
            self.problems.push(Problem {
                origin: node.origin.clone(),
                key: full,
                what: "unknown key".into(),
                fix,
            });
        }
        known
            .iter()
            .map(|key| if self.path.is_empty() { (*key).to_owned() } else { format!("{}.{key}", self.path) })
            .collect()
    }
}

/// The known key a typing error was meant to be: at most a third of its letters differ.
fn nearest<'k>(typed: &str, known: &[&'k str]) -> Option<&'k str> {
    known
        .iter()
        .map(|key| (distance(typed, key), *key))
        .filter(|(distance, key)| *distance <= key.len().div_ceil(3))
        .min()
        .map(|(_, key)| key)
}

/// Letters to insert, remove or change to get from one word to the other.
fn distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, left) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, right) in to.iter().enumerate() {
            let changed = diagonal + usize::from(left != *right);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typing_error_finds_its_key() {
        let known = ["listen", "admin_listen", "poll_interval_ms"];
        assert_eq!(nearest("lisen", &known), Some("listen"));
        assert_eq!(nearest("poll_interval", &known), Some("poll_interval_ms"));
        assert_eq!(nearest("colour", &known), None);
    }
}
