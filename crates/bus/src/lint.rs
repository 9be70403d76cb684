//! The evolution rules of S2 §10, enforced with evidence: a change is refused when a document exists that
//! the published text of a version accepts and its new text refuses. That document is the counterexample.
//! Adding an optional field and widening an enum have no such document; adding a required field, removing,
//! renaming, narrowing and changing a type have one. Files come from a folder or a git revision; this module
//! only compares texts.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use jsonschema::Validator;
use serde_json::{Map, Value, json};

use crate::dispatch::Handler;
use crate::registry::{RegistryError, compile, subject_of};

/// A version some consumer takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Declared {
    /// The handler.
    pub handler: String,
    /// `service.aggregate.event.vN`
    pub subject: String,
}

/// What the handlers of this build take.
pub fn declared_by(handlers: &[Arc<dyn Handler>]) -> Vec<Declared> {
    let mut found = Vec::new();
    for handler in handlers {
        for accepts in handler.accepts() {
            found.extend(accepts.versions.iter().map(|version| Declared {
                handler: handler.kind().to_owned(),
                subject: format!("{}.v{version}", accepts.subject),
            }));
        }
    }
    found
}

/// The schemas of a git revision, by path without ending; `repository` is the checkout, `folder` the place
/// of the schemas in it.
pub fn read_revision(
    repository: &Path,
    folder: &str,
    revision: &str,
) -> Result<Vec<(String, String)>, RegistryError> {
    let git = |arguments: &[&str]| {
        let path = repository.to_path_buf();
        let fail = |source| RegistryError::Read { path: path.clone(), source };
        let output = Command::new("git").arg("-C").arg(repository).args(arguments).output().map_err(fail)?;
        if !output.status.success() {
            let reason = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(fail(std::io::Error::other(reason)));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    // A revision that looks like an option is none.
    let tree = format!("{}:{folder}", revision.trim_start_matches('-'));
    let mut found = Vec::new();
    for path in git(&["ls-tree", "-r", "--name-only", &tree])?.lines() {
        if let Some(name) = path.strip_suffix(".json") {
            found.push((name.to_owned(), git(&["show", &format!("{tree}/{path}")])?));
        }
    }
    found.sort();
    Ok(found)
}

/// Which rule a change breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// An object takes fields nobody described.
    Open,
    /// A field became required.
    RequiredField,
    /// A field is gone or has another name.
    RemovedField,
    /// A value that was allowed is not any more.
    NarrowedEnum,
    /// Type, range, length, pattern or format became stricter.
    NarrowedValue,
    /// A consumer still takes the removed version.
    RemovedVersion,
    /// No document could be made to compare with: give the schema `examples`.
    NoSample,
}

impl Rule {
    /// What to do instead.
    pub fn advice(self) -> &'static str {
        match self {
            Self::Open => "say additionalProperties: false",
            Self::RequiredField => "make it optional, or add a new version and publish both",
            Self::RemovedField => "keep the field, or add a new version and publish both",
            Self::NarrowedEnum | Self::NarrowedValue => "keep what was allowed, or add a new version",
            Self::RemovedVersion => "move the consumer to a newer version first",
            Self::NoSample => "add examples to the properties",
        }
    }
}

/// A change that may not be made.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal {
    /// The schema, as `chain/block/ingested/v1`.
    pub schema: String,
    /// The rule.
    pub rule: Rule,
    /// Where and what.
    pub detail: String,
    /// Accepted before and refused now (for [`Rule::Open`]: accepted and should not be).
    pub counterexample: Option<Value>,
}

/// Most documents tried per schema.
const SAMPLES_MAX: usize = 2_000;
/// Most variants of one value.
const VARIANTS_MAX: usize = 48;

/// Compares two sets of schemas by path without ending. Empty means that the change may be made.
pub fn lint(
    old: &[(String, String)],
    new: &[(String, String)],
    consumers: &[Declared],
) -> Result<Vec<Refusal>, RegistryError> {
    let before: BTreeMap<&str, &str> =
        old.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    let after: BTreeMap<&str, &str> = new.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    let mut refusals = Vec::new();
    for (name, text) in &after {
        let schema = parse(name, text)?;
        let validator = compile(name, &schema)?;
        if *name != "envelope/v1" {
            subject_of(name)?;
            refusals.extend(must_be_closed(name, &schema, &validator));
        }
        if let Some(published) = before.get(name).filter(|published| *published != text) {
            refusals.extend(compare(name, &parse(name, published)?, &validator)?);
        }
    }
    for (name, text) in before.iter().filter(|(name, _)| !after.contains_key(*name)) {
        refusals.extend(removed(name, &parse(name, text)?, consumers));
    }
    Ok(refusals)
}

fn parse(name: &str, text: &str) -> Result<Value, RegistryError> {
    serde_json::from_str(text).map_err(|source| RegistryError::NotJson { name: name.to_owned(), source })
}

/// An unknown field, wherever it is put, must be refused.
fn must_be_closed(name: &str, schema: &Value, validator: &Validator) -> Option<Refusal> {
    let base = samples(schema).into_iter().find(|sample| validator.is_valid(sample))?;
    let intruded = intrusions(&base).into_iter().find(|document| validator.is_valid(document))?;
    Some(Refusal {
        schema: name.to_owned(),
        rule: Rule::Open,
        detail: "a field nobody described is accepted".to_owned(),
        counterexample: Some(intruded),
    })
}

/// The document with an unknown field, once per object in it.
fn intrusions(document: &Value) -> Vec<Value> {
    const INTRUDER: &str = "nobody_described_this";
    let mut found = Vec::new();
    match document {
        Value::Object(fields) => {
            let mut intruded = fields.clone();
            intruded.insert(INTRUDER.to_owned(), Value::Bool(true));
            found.push(Value::Object(intruded));
            for (name, field) in fields {
                for inner in intrusions(field) {
                    let mut outer = fields.clone();
                    outer.insert(name.clone(), inner);
                    found.push(Value::Object(outer));
                }
            }
        }
        Value::Array(items) => {
            for (place, item) in items.iter().enumerate().take(1) {
                for inner in intrusions(item) {
                    let mut outer = items.clone();
                    outer[place] = inner;
                    found.push(Value::Array(outer));
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
    found
}

fn compare(name: &str, published: &Value, new: &Validator) -> Result<Vec<Refusal>, RegistryError> {
    let old = compile(name, published)?;
    let mut refusals: Vec<Refusal> = Vec::new();
    let mut compared = 0_usize;
    for sample in samples(published) {
        if !old.is_valid(&sample) {
            continue;
        }
        compared += 1;
        let errors: Vec<(Rule, String)> = new
            .iter_errors(&sample)
            .map(|error| {
                let detail = format!("at {:?}: {}", error.instance_path().to_string(), error.masked());
                (rule_of(error.kind().keyword()), detail)
            })
            .collect();
        for (rule, detail) in errors {
            if !refusals.iter().any(|known| known.rule == rule && known.detail == detail) {
                let counterexample = Some(sample.clone());
                refusals.push(Refusal { schema: name.to_owned(), rule, detail, counterexample });
            }
        }
    }
    if compared == 0 {
        refusals.push(Refusal {
            schema: name.to_owned(),
            rule: Rule::NoSample,
            detail: "no document of the published text could be made".to_owned(),
            counterexample: None,
        });
    }
    Ok(refusals)
}

fn rule_of(keyword: &str) -> Rule {
    match keyword {
        "required" => Rule::RequiredField,
        "additionalProperties" | "unevaluatedProperties" => Rule::RemovedField,
        "enum" | "const" => Rule::NarrowedEnum,
        _ => Rule::NarrowedValue,
    }
}

fn removed(name: &str, published: &Value, consumers: &[Declared]) -> Option<Refusal> {
    let subject = name.replace('/', ".");
    let still: Vec<&str> = consumers
        .iter()
        .filter(|declared| declared.subject == subject)
        .map(|declared| declared.handler.as_str())
        .collect();
    if still.is_empty() {
        return None;
    }
    Some(Refusal {
        schema: name.to_owned(),
        rule: Rule::RemovedVersion,
        detail: format!("{} still takes it", still.join(", ")),
        counterexample: samples(published).into_iter().next(),
    })
}

/// Documents a schema means to accept: everything present, each field varied, each optional field left out.
/// They are candidates; the validator decides.
pub(crate) fn samples(schema: &Value) -> Vec<Value> {
    let mut found = variants(schema, SAMPLES_MAX);
    found.dedup();
    found
}

fn variants(schema: &Value, most: usize) -> Vec<Value> {
    let Value::Object(keywords) = schema else {
        return vec![json!(null), json!(0), json!("a"), json!({})];
    };
    let mut found: Vec<Value> = list(keywords, "examples").to_vec();
    if let Some(value) = keywords.get("const") {
        found.push(value.clone());
    }
    found.extend(list(keywords, "enum").iter().cloned());
    for branch in list(keywords, "anyOf").iter().chain(list(keywords, "oneOf")) {
        found.extend(variants(branch, VARIANTS_MAX));
    }
    if !keywords.contains_key("const") && !keywords.contains_key("enum") {
        for kind in types(keywords) {
            found.extend(match kind {
                "object" => objects(keywords, most),
                "array" => arrays(keywords),
                "string" => strings(keywords),
                "integer" => integers(keywords),
                "number" => integers(keywords).into_iter().chain([json!(0.5), json!(-1.5)]).collect(),
                "boolean" => vec![json!(true), json!(false)],
                _ => vec![Value::Null],
            });
        }
    }
    found.truncate(most);
    found
}

fn list<'a>(keywords: &'a Map<String, Value>, name: &str) -> &'a [Value] {
    keywords.get(name).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn types(keywords: &Map<String, Value>) -> Vec<&str> {
    match keywords.get("type") {
        Some(Value::String(one)) => vec![one.as_str()],
        Some(Value::Array(several)) => several.iter().filter_map(Value::as_str).collect(),
        _ if keywords.contains_key("properties") => vec!["object"],
        _ if keywords.contains_key("anyOf") || keywords.contains_key("oneOf") => vec![],
        _ => vec!["null", "boolean", "integer", "string", "array", "object"],
    }
}

fn objects(keywords: &Map<String, Value>, most: usize) -> Vec<Value> {
    let empty = Map::new();
    let properties = keywords.get("properties").and_then(Value::as_object).unwrap_or(&empty);
    let required: Vec<&str> = list(keywords, "required").iter().filter_map(Value::as_str).collect();
    let choices: BTreeMap<&String, Vec<Value>> =
        properties.iter().map(|(name, schema)| (name, variants(schema, VARIANTS_MAX))).collect();
    let base: Map<String, Value> = choices
        .iter()
        .filter_map(|(name, values)| Some(((*name).clone(), values.first()?.clone())))
        .collect();
    let minimal: Map<String, Value> = base
        .iter()
        .filter(|(name, _)| required.contains(&name.as_str()))
        .map(|(n, v)| (n.clone(), v.clone()))
        .collect();
    let mut found = vec![Value::Object(base.clone()), Value::Object(minimal)];
    for (name, values) in &choices {
        if !required.contains(&name.as_str()) {
            let mut without = base.clone();
            without.remove(name.as_str());
            found.push(Value::Object(without));
        }
        for value in values.iter().skip(1) {
            let mut varied = base.clone();
            varied.insert((*name).clone(), value.clone());
            found.push(Value::Object(varied));
        }
    }
    found.truncate(most);
    found
}

fn arrays(keywords: &Map<String, Value>) -> Vec<Value> {
    let bound = |name| keywords.get(name).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
    let (least, most) = (bound("minItems").unwrap_or(0), bound("maxItems").unwrap_or(usize::MAX));
    let items = keywords.get("items").map_or_else(|| vec![json!(0)], |schema| variants(schema, VARIANTS_MAX));
    let mut found = Vec::new();
    for item in &items {
        found.push(Value::Array(vec![item.clone(); least.max(1).min(most)]));
    }
    if let Some(item) = items.first() {
        if least == 0 {
            found.push(json!([]));
        }
        if most <= 1_000 {
            found.push(Value::Array(vec![item.clone(); most]));
        } else {
            found.push(Value::Array(vec![item.clone(); least.max(1) + 20]));
        }
    }
    found
}

fn integers(keywords: &Map<String, Value>) -> Vec<Value> {
    let bound = |name| keywords.get(name).and_then(Value::as_i64);
    let least = bound("minimum").or_else(|| bound("exclusiveMinimum").map(|n| n.saturating_add(1)));
    let most = bound("maximum").or_else(|| bound("exclusiveMaximum").map(|n| n.saturating_sub(1)));
    let mut found = vec![least.unwrap_or(0).max(1).min(most.unwrap_or(i64::MAX))];
    found.extend(least.into_iter().flat_map(|n| [n, n.saturating_add(1)]));
    found.extend(most.into_iter().flat_map(|n| [n, n.saturating_sub(1)]));
    found.extend([0, 1, -1, 1_000_000_007, i64::MAX]);
    found.into_iter().map(Value::from).collect()
}

fn strings(keywords: &Map<String, Value>) -> Vec<Value> {
    let text = |name| keywords.get(name).and_then(Value::as_str);
    let mut found: Vec<String> = Vec::new();
    if let Some(pattern) = text("pattern") {
        found.extend(pattern::samples(pattern));
    }
    found.extend(
        match text("format") {
            Some("uuid") => vec!["0190b5a0-0000-7000-8000-000000000001"],
            Some("date-time") => vec!["2026-01-02T03:04:05Z", "2026-01-02T03:04:05.123456+02:00"],
            Some("date") => vec!["2026-01-02"],
            Some("uri") => vec!["https://example.com/a?b=c"],
            Some("email") => vec!["someone@example.com"],
            _ => vec![],
        }
        .into_iter()
        .map(str::to_owned),
    );
    let bound = |name| keywords.get(name).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
    let (least, most) = (bound("minLength").unwrap_or(0), bound("maxLength"));
    found.extend(["a".to_owned(), "Z9 _-é".to_owned(), "a".repeat(least)]);
    found.push("a".repeat(most.unwrap_or(least + 300).min(5_000)));
    found.into_iter().map(Value::String).collect()
}

/// Texts that match simple patterns: literals, classes, groups, alternatives and counts.
mod pattern {
    use std::iter::Peekable;
    use std::str::Chars;

    enum Node {
        Class(Vec<(char, char)>),
        Sequence(Vec<Node>),
        Choice(Vec<Node>),
        Repeat(Box<Node>, u32, u32),
    }

    /// An open end is tried this far.
    const MANY: u32 = 40;

    /// Low and high characters, fewest and most repetitions, each alternative.
    pub(super) fn samples(pattern: &str) -> Vec<String> {
        let mut chars = pattern.chars().peekable();
        let node = choice(&mut chars);
        let mut found = Vec::new();
        for (high, many) in [(false, false), (true, false), (false, true), (true, true)] {
            for turn in 0..4 {
                let mut text = String::new();
                write(&node, high, many, turn, &mut text);
                if !found.contains(&text) {
                    found.push(text);
                }
            }
        }
        found
    }

    fn write(node: &Node, high: bool, many: bool, turn: usize, out: &mut String) {
        match node {
            Node::Class(ranges) => {
                let range = ranges.get(turn % ranges.len().max(1));
                out.extend(range.map(|(low, top)| if high { *top } else { *low }));
            }
            Node::Sequence(nodes) => nodes.iter().for_each(|node| write(node, high, many, turn, out)),
            Node::Choice(nodes) => {
                if let Some(node) = nodes.get(turn % nodes.len().max(1)) {
                    write(node, high, many, turn, out);
                }
            }
            Node::Repeat(node, least, most) => {
                for _ in 0..if many { *most } else { *least } {
                    write(node, high, many, turn, out);
                }
            }
        }
    }

    fn choice(chars: &mut Peekable<Chars<'_>>) -> Node {
        let mut branches = vec![sequence(chars)];
        while chars.next_if_eq(&'|').is_some() {
            branches.push(sequence(chars));
        }
        Node::Choice(branches)
    }

    fn sequence(chars: &mut Peekable<Chars<'_>>) -> Node {
        let mut nodes = Vec::new();
        while let Some(next) = chars.next_if(|next| !matches!(next, '|' | ')')) {
            let node = match next {
                '^' | '$' => continue,
                '[' => class(chars),
                '(' => {
                    if chars.next_if_eq(&'?').is_some() {
                        chars.next(); // `(?:`; other kinds give texts the validator will refuse.
                    }
                    let inner = choice(chars);
                    chars.next();
                    inner
                }
                '\\' => escape(chars.next().unwrap_or('\\')),
                '.' => Node::Class(vec![('a', 'z')]),
                literal => Node::Class(vec![(literal, literal)]),
            };
            nodes.push(repeat(node, chars));
        }
        Node::Sequence(nodes)
    }

    fn escape(letter: char) -> Node {
        Node::Class(match letter {
            'd' => vec![('0', '9')],
            'w' => vec![('a', 'z'), ('0', '9'), ('_', '_')],
            's' => vec![(' ', ' ')],
            other => vec![(other, other)],
        })
    }

    fn class(chars: &mut Peekable<Chars<'_>>) -> Node {
        let mut ranges = Vec::new();
        while let Some(first) = chars.next().filter(|first| *first != ']') {
            let first = if first == '\\' { chars.next().unwrap_or('\\') } else { first };
            let mut ahead = chars.clone();
            if ahead.next() == Some('-') && ahead.peek().is_some_and(|last| *last != ']') {
                chars.next();
                ranges.push((first, chars.next().unwrap_or(first)));
            } else {
                ranges.push((first, first));
            }
        }
        Node::Class(ranges)
    }

    fn repeat(node: Node, chars: &mut Peekable<Chars<'_>>) -> Node {
        let (least, most) = match chars.peek() {
            Some('*') => (0, MANY),
            Some('+') => (1, MANY),
            Some('?') => (0, 1),
            Some('{') => {
                chars.next();
                let inner: String = chars.by_ref().take_while(|next| *next != '}').collect();
                let mut bounds = inner.split(',');
                let least = bounds.next().and_then(|n| n.parse().ok()).unwrap_or(1);
                let most = bounds.next().map_or(least, |n| n.parse().unwrap_or(least + MANY));
                return Node::Repeat(Box::new(node), least, most);
            }
            _ => return node,
        };
        chars.next();
        Node::Repeat(Box::new(node), least, most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema(edit: impl FnOnce(&mut Value)) -> String {
        let mut schema = json!({
            "type": "object",
            "additionalProperties": false,
            "required": ["id", "kind", "inner"],
            "properties": {
                "id": {"type": "string", "pattern": "^0x[0-9a-f]{4,8}$"},
                "kind": {"type": "string", "enum": ["a", "b"]},
                "note": {"type": ["string", "null"], "maxLength": 20},
                "count": {"type": "integer", "minimum": 0, "maximum": 500},
                "inner": {"type": "object", "additionalProperties": false, "required": ["x"],
                          "properties": {"x": {"type": "integer"}, "y": {"type": "boolean"}}},
                "list": {"type": "array", "maxItems": 9, "items": {"type": "string", "format": "uuid"}}
            }
        });
        edit(&mut schema);
        schema.to_string()
    }

    fn files(text: String) -> Vec<(String, String)> {
        vec![("ledger/thing/changed/v1".to_owned(), text)]
    }

    /// Every refusal's counterexample is accepted by the old text and refused by the new one.
    #[track_caller]
    fn check(edit: impl FnOnce(&mut Value), expected: &[Rule]) {
        let (old, new) = (schema(|_| {}), schema(edit));
        let refusals = lint(&files(old.clone()), &files(new.clone()), &[]).expect("schemas");
        let mut rules: Vec<Rule> = refusals.iter().map(|refusal| refusal.rule).collect();
        rules.sort();
        rules.dedup();
        assert_eq!(rules, expected, "{refusals:#?}");
        let before = compile("old", &serde_json::from_str(&old).expect("json")).expect("schema");
        let after = compile("new", &serde_json::from_str(&new).expect("json")).expect("schema");
        for refusal in refusals.iter().filter(|refusal| refusal.rule != Rule::Open) {
            let document = refusal.counterexample.as_ref().expect("evidence");
            assert!(before.is_valid(document) && !after.is_valid(document), "{document}");
        }
    }

    #[test]
    fn an_optional_field_may_be_added() {
        check(|schema| schema["properties"]["more"] = json!({"type": "string"}), &[]);
    }
    #[test]
    fn an_enum_may_be_widened() {
        check(|schema| schema["properties"]["kind"]["enum"] = json!(["a", "b", "c"]), &[]);
    }
    #[test]
    fn a_description_may_change() {
        check(|schema| schema["description"] = json!("more words"), &[]);
    }
    #[test]
    fn a_required_field_may_not_be_added() {
        check(
            |schema| {
                schema["properties"]["more"] = json!({"type": "string"});
                schema["required"] = json!(["id", "kind", "inner", "more"]);
            },
            &[Rule::RequiredField],
        );
    }
    #[test]
    fn an_optional_field_may_not_become_required() {
        check(|schema| schema["required"] = json!(["id", "kind", "inner", "note"]), &[Rule::RequiredField]);
    }
    #[test]
    fn a_field_may_not_be_removed() {
        check(
            |schema| {
                schema["properties"].as_object_mut().expect("object").remove("note");
            },
            &[Rule::RemovedField],
        );
    }
    #[test]
    fn a_field_may_not_be_renamed() {
        check(
            |schema| {
                let properties = schema["properties"].as_object_mut().expect("object");
                let id = properties.remove("id").expect("there");
                properties.insert("identity".to_owned(), id);
                schema["required"] = json!(["identity", "kind", "inner"]);
            },
            &[Rule::RequiredField, Rule::RemovedField],
        );
    }
    #[test]
    fn an_enum_may_not_be_narrowed() {
        check(|schema| schema["properties"]["kind"]["enum"] = json!(["a"]), &[Rule::NarrowedEnum]);
    }
    #[test]
    fn a_type_may_not_change() {
        check(|schema| schema["properties"]["note"]["type"] = json!("string"), &[Rule::NarrowedValue]);
        check(|schema| schema["properties"]["count"] = json!({"type": "string"}), &[Rule::NarrowedValue]);
    }
    #[test]
    fn bounds_lengths_and_patterns_may_not_tighten() {
        check(|schema| schema["properties"]["count"]["maximum"] = json!(400), &[Rule::NarrowedValue]);
        check(|schema| schema["properties"]["note"]["maxLength"] = json!(19), &[Rule::NarrowedValue]);
        check(|schema| schema["properties"]["list"]["maxItems"] = json!(8), &[Rule::NarrowedValue]);
        check(
            |schema| schema["properties"]["id"]["pattern"] = json!("^0x[0-9a-f]{4}$"),
            &[Rule::NarrowedValue],
        );
    }
    #[test]
    fn a_nested_change_is_seen() {
        check(|schema| schema["properties"]["inner"]["required"] = json!(["x", "y"]), &[Rule::RequiredField]);
    }
    #[test]
    fn an_open_object_is_refused_wherever_it_is() {
        check(|schema| schema["additionalProperties"] = json!(true), &[Rule::Open]);
        check(|schema| schema["properties"]["inner"]["additionalProperties"] = json!(true), &[Rule::Open]);
    }
    #[test]
    fn a_version_goes_only_when_nobody_takes_it() {
        let old = files(schema(|_| {}));
        assert_eq!(lint(&old, &[], &[]).expect("schemas"), []);
        let declared = Declared { handler: "h".into(), subject: "ledger.thing.changed.v1".into() };
        let refusals = lint(&old, &[], &[declared]).expect("schemas");
        assert_eq!(refusals[0].rule, Rule::RemovedVersion);
        assert!(refusals[0].counterexample.is_some());
    }
    #[test]
    fn a_new_event_is_welcome() {
        assert_eq!(lint(&[], &files(schema(|_| {})), &[]).expect("schemas"), []);
    }

    #[test]
    fn the_repositorys_own_schemas_are_closed_and_every_one_has_a_sample() {
        let texts: Vec<(String, String)> =
            crate::registry::BUILTIN.iter().map(|(name, text)| ((*name).into(), (*text).into())).collect();
        assert_eq!(lint(&texts, &texts, &[]).expect("schemas"), []);
        for (name, text) in &texts {
            let schema: Value = serde_json::from_str(text).expect("json");
            let validator = compile(name, &schema).expect("schema");
            assert!(samples(&schema).iter().any(|sample| validator.is_valid(sample)), "{name}");
        }
    }

    #[test]
    fn a_revision_is_read_as_the_folder_is() {
        let dir = tempfile();
        let write = |name: &str, text: &str| {
            let path = dir.join("schemas").join(name);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            std::fs::write(path, text).expect("written");
        };
        let git = |arguments: &[&str]| {
            let identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"];
            let done = Command::new("git").arg("-C").arg(&dir).args(identity).args(arguments).output();
            assert!(done.expect("git").status.success(), "{arguments:?}");
        };
        write("ledger/thing/changed/v1.json", &schema(|_| {}));
        git(&["init", "-q"]);
        git(&["add", "-A"]);
        git(&["commit", "-q", "-m", "one"]);
        let old = read_revision(&dir, "schemas", "HEAD").expect("a revision");
        assert_eq!(old, crate::registry::read_dir(&dir.join("schemas")).expect("a folder"));
        write("ledger/thing/changed/v1.json", &schema(|schema| schema["required"] = json!(["id", "count"])));
        let new = crate::registry::read_dir(&dir.join("schemas")).expect("a folder");
        assert_eq!(lint(&old, &new, &[]).expect("schemas")[0].rule, Rule::RequiredField);
        assert!(read_revision(&dir, "schemas", "no-such-revision").is_err());
        std::fs::remove_dir_all(&dir).expect("removed");
    }

    fn tempfile() -> std::path::PathBuf {
        let dir = std::env::temp_dir().join(format!("tidemark-lint-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir_all(&dir).expect("made");
        dir
    }

    #[test]
    fn the_builtin_list_is_the_folder() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../schemas");
        let found: Vec<String> =
            crate::registry::read_dir(&dir).expect("the folder").into_iter().map(|(name, _)| name).collect();
        let listed: Vec<&str> = crate::registry::BUILTIN.iter().map(|(name, _)| *name).collect();
        assert_eq!(found, listed);
    }
}
