//! Values before they have types. Every value remembers where it came from, so that a problem found later
//! can name the key, the file and line (or the variable, or the flag), and the fix.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Where a value was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// A line of a file.
    File {
        /// As the user named it.
        name: String,
        /// Counted from 1.
        line: usize,
    },
    /// An environment variable.
    Env(String),
    /// A command-line flag.
    Flag(&'static str),
    /// Nobody wrote it.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { name, line } => write!(f, "{name}:{line}"),
            Self::Env(name) => write!(f, "environment {name}"),
            Self::Flag(name) => write!(f, "flag {name}"),
            Self::Default => f.write_str("defaults"),
        }
    }
}

/// Something that must be changed before the configuration can be used. Never holds a value: values may
/// be secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Where it was written.
    pub origin: Origin,
    /// The dotted key.
    pub key: String,
    /// What is wrong.
    pub what: String,
    /// What to do.
    pub fix: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.key.as_str() {
            "" => write!(f, "{}: {}", self.origin, self.what)?,
            key => write!(f, "{}: {key}: {}", self.origin, self.what)?,
        }
        write!(f, "\n    fix: {}", self.fix)
    }
}

/// A value and where it came from.
#[derive(Debug, Clone)]
pub struct Node {
    pub(super) value: Value,
    pub(super) origin: Origin,
}

/// What TOML can hold, without dates (we use none).
#[derive(Debug, Clone)]
pub(super) enum Value {
    Text(String),
    Int(i64),
    Float,
    Bool(bool),
    List(Vec<Node>),
    Table(BTreeMap<String, Node>),
    Date,
}

impl Value {
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "text",
            Self::Int(_) => "a whole number",
            Self::Float => "a number with a fraction",
            Self::Bool(_) => "true or false",
            Self::List(_) => "a list",
            Self::Table(_) => "a table",
            Self::Date => "a date",
        }
    }
}

impl Node {
    /// An empty table that nobody wrote.
    pub fn empty() -> Self {
        Self { value: Value::Table(BTreeMap::new()), origin: Origin::Default }
    }
    pub(super) fn text(text: &str, origin: Origin) -> Self {
        Self { value: Value::Text(text.to_owned()), origin }
    }
}

/// Reads a TOML text; `name` is how problems call the file.
pub(super) fn parse(name: &str, text: &str) -> Result<Node, Problem> {
    match DeTable::parse(text) {
        Ok(table) => {
            let lines = Lines { name, text };
            let span = table.span();
            Ok(Node { value: table_value(table.into_inner(), &lines), origin: lines.at(&span) })
        }
        Err(error) => Err(Problem {
            origin: Lines { name, text }.at(&error.span().unwrap_or(0..0)),
            key: String::new(),
            what: format!("not TOML: {}", error.message()),
            fix: "correct this line; `tidemark config example` shows every key".into(),
        }),
    }
}

/// One value out of an environment variable or a flag: TOML where it is TOML, else text as it stands.
pub(super) fn parse_loose(text: &str, origin: &Origin) -> Node {
    match DeValue::parse(text) {
        Ok(value) if !matches!(value.get_ref(), DeValue::Datetime(_)) => {
            let mut node = node(value, &Lines { name: "", text });
            set_origin(&mut node, origin);
            node
        }
        _ => Node::text(text, origin.clone()),
    }
}

fn set_origin(node: &mut Node, origin: &Origin) {
    node.origin = origin.clone();
    match &mut node.value {
        Value::List(items) => items.iter_mut().for_each(|item| set_origin(item, origin)),
        Value::Table(entries) => entries.values_mut().for_each(|entry| set_origin(entry, origin)),
        Value::Text(_) | Value::Int(_) | Value::Float | Value::Bool(_) | Value::Date => {}
    }
}

struct Lines<'a> {
    name: &'a str,
    text: &'a str,
}

impl Lines<'_> {
    fn at(&self, span: &Range<usize>) -> Origin {
        let before = self.text.get(..span.start).unwrap_or(self.text);
        Origin::File { name: self.name.to_owned(), line: before.matches('\n').count() + 1 }
    }
}

fn table_value(table: DeTable<'_>, lines: &Lines<'_>) -> Value {
    let mut entries = BTreeMap::new();
    for (key, value) in table {
        let mut entry = node(value, lines);
        // A key's own place is what people look for; a table's value starts elsewhere.
        entry.origin = lines.at(&key.span());
        entries.insert(key.into_inner().into_owned(), entry);
    }
    Value::Table(entries)
}

fn node(value: Spanned<DeValue<'_>>, lines: &Lines<'_>) -> Node {
    let origin = lines.at(&value.span());
    let value = match value.into_inner() {
        DeValue::String(text) => Value::Text(text.into_owned()),
        DeValue::Integer(number) => match i64::from_str_radix(number.as_str(), number.radix()) {
            Ok(number) => Value::Int(number),
            Err(_) => Value::Float,
        },
        DeValue::Float(_) => Value::Float,
        DeValue::Boolean(flag) => Value::Bool(flag),
        DeValue::Datetime(_) => Value::Date,
        DeValue::Array(items) => Value::List(items.into_iter().map(|item| node(item, lines)).collect()),
        DeValue::Table(table) => table_value(table, lines),
    };
    Node { value, origin }
}

/// Puts `value` at the dotted path, over what was there. Says whether the path leads through a non-table.
pub(super) fn set(root: &mut Node, path: &[String], value: Node) -> Result<(), String> {
    let Some((first, rest)) = path.split_first() else {
        *root = value;
        return Ok(());
    };
    let origin = value.origin.clone();
    match &mut root.value {
        Value::Table(entries) => {
            let next = entries
                .entry(first.clone())
                .or_insert_with(|| Node { value: Value::Table(BTreeMap::new()), origin });
            set(next, rest, value)
        }
        Value::List(items) => match first.parse::<usize>().ok().and_then(|index| items.get_mut(index)) {
            Some(item) => set(item, rest, value),
            None => Err(format!("there is no entry {first} in the list")),
        },
        other => Err(format!("this is {} and has no key {first}", other.kind())),
    }
}
