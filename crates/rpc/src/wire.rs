//! JSON-RPC on the wire. Batch answers are matched by id, never by position: servers reorder and omit.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

/// One question.
#[derive(Debug, Clone)]
pub struct Call {
    /// Method.
    pub method: &'static str,
    /// Positional parameters.
    pub params: Value,
}

impl Call {
    /// A question.
    pub fn new(method: &'static str, params: Value) -> Self {
        Self { method, params }
    }
}

#[derive(Serialize)]
struct Request<'a> {
    jsonrpc: &'static str,
    id: usize,
    method: &'a str,
    params: &'a Value,
}

/// One request; its id is 0.
pub(crate) fn encode_one(call: &Call) -> Vec<u8> {
    encode(&Request { jsonrpc: "2.0", id: 0, method: call.method, params: &call.params })
}

/// A batch; the ids are the positions.
pub(crate) fn encode_batch(calls: &[Call]) -> Vec<u8> {
    let requests: Vec<_> = calls
        .iter()
        .enumerate()
        .map(|(id, call)| Request { jsonrpc: "2.0", id, method: call.method, params: &call.params })
        .collect();
    encode(&requests)
}

fn encode(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("strings and JSON values always serialize")
}

/// A refusal inside an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) code: Option<i64>,
    pub(crate) text: String,
}

/// Errors come as objects, sometimes as plain strings, and some providers put the words into `data`.
fn refusal(raw: &RawValue) -> Option<Refusal> {
    let value: Value = serde_json::from_str(raw.get()).ok()?;
    if value.is_null() {
        return None; // Some servers send `"error": null` beside a result.
    }
    let code = value
        .get("code")
        .and_then(|code| code.as_i64().or_else(|| code.as_str().and_then(|digits| digits.parse().ok())));
    let mut text = match (&value, value.get("message").and_then(Value::as_str)) {
        (_, Some(message)) => message.to_owned(),
        (Value::String(message), None) => message.clone(),
        _ => raw.get().to_owned(),
    };
    if let Some(data) = value.get("data").and_then(Value::as_str).filter(|data| !data.starts_with("0x")) {
        text.push_str(": ");
        text.push_str(data);
    }
    Some(Refusal { code, text: crate::errors::bounded(&text).to_owned() })
}

/// `null` is an answer and is told apart from no answer.
fn present<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

#[derive(Deserialize)]
#[serde(bound(deserialize = "T: Deserialize<'de>"))]
struct One<'a, T> {
    #[serde(default, deserialize_with = "present")]
    result: Option<T>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

/// What an answer to one request holds.
pub(crate) enum Reply<T> {
    Result(T),
    Refused(Refusal),
    /// Neither a result nor an error.
    Empty,
}

/// Reads the answer to one request straight into `T`.
pub(crate) fn decode_one<T: DeserializeOwned>(body: &[u8]) -> Result<Reply<T>, serde_json::Error> {
    let reply: One<'_, T> = serde_json::from_slice(body)?;
    Ok(match (reply.error.and_then(refusal), reply.result) {
        (Some(refused), _) => Reply::Refused(refused),
        (None, Some(result)) => Reply::Result(result),
        (None, None) => Reply::Empty,
    })
}

#[derive(Deserialize)]
struct Item<'a> {
    #[serde(default)]
    id: Value,
    #[serde(borrow, default, deserialize_with = "present")]
    result: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

/// A batch answer in the order of the questions; a missing or doubled id leaves `Empty` in its place.
pub(crate) enum Batch<'a> {
    Items(Vec<Reply<&'a RawValue>>),
    /// The server refused the batch as a whole.
    Refused(Refusal),
}

/// Matches a batch answer with `asked` questions.
pub(crate) fn decode_batch(body: &[u8], asked: usize) -> Result<Batch<'_>, serde_json::Error> {
    if body.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{') {
        let whole: Item<'_> = serde_json::from_slice(body)?;
        let refused = whole
            .error
            .and_then(refusal)
            .unwrap_or_else(|| Refusal { code: None, text: "one object came back for a batch".to_owned() });
        return Ok(Batch::Refused(refused));
    }
    let items: Vec<Item<'_>> = serde_json::from_slice(body)?;
    let mut replies: Vec<Reply<&RawValue>> = (0..asked).map(|_| Reply::Empty).collect();
    let mut seen = vec![false; asked];
    for item in items {
        let id = item.id.as_u64().or_else(|| item.id.as_str().and_then(|digits| digits.parse().ok()));
        let Some(id) = id.and_then(|id| usize::try_from(id).ok()).filter(|id| *id < asked) else { continue };
        let reply = match (item.error.and_then(refusal), item.result) {
            (Some(refused), _) => Reply::Refused(refused),
            (None, Some(result)) => Reply::Result(result),
            (None, None) => Reply::Empty,
        };
        // Two answers to one question: neither can be believed.
        replies[id] = if seen[id] { Reply::Empty } else { reply };
        seen[id] = true;
    }
    Ok(Batch::Items(replies))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(body: &str, expected: &[&str]) {
        let Ok(Batch::Items(items)) = decode_batch(body.as_bytes(), expected.len()) else {
            panic!("not a batch: {body}")
        };
        let found: Vec<String> = items
            .iter()
            .map(|item| match item {
                Reply::Result(raw) => raw.get().to_owned(),
                Reply::Refused(refused) => format!("refused {}", refused.text),
                Reply::Empty => "-".to_owned(),
            })
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn answers_are_matched_by_id() {
        check(r#"[{"id":1,"result":"b"},{"id":0,"result":"a"}]"#, &["\"a\"", "\"b\""]);
        check(r#" [{"id":"1","result":null}]"#, &["-", "null"]);
        check(
            r#"[{"result":1},{"id":7,"result":2},{"id":0,"error":{"code":-1,"message":"no"}}]"#,
            &["refused no"],
        );
        check(r#"[{"id":0,"result":1},{"id":0,"result":2}]"#, &["-"]);
        check(r#"[{"id":0,"result":1,"error":null}]"#, &["1"]);
    }

    #[test]
    fn a_refused_batch_is_told() {
        let body = br#"{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"batch too large"}}"#;
        let Ok(Batch::Refused(refused)) = decode_batch(body, 2) else { panic!("expected a refusal") };
        assert_eq!(refused, Refusal { code: Some(-32600), text: "batch too large".to_owned() });
        assert!(decode_batch(b"[{\"id\":0,\"resu", 1).is_err());
    }

    #[test]
    fn one_answer_is_read_at_once() {
        assert!(matches!(decode_one::<u64>(br#"{"id":0,"result":7}"#), Ok(Reply::Result(7))));
        assert!(matches!(decode_one::<Option<u64>>(br#"{"id":0,"result":null}"#), Ok(Reply::Result(None))));
        assert!(matches!(decode_one::<u64>(br#"{"id":0}"#), Ok(Reply::Empty)));
        let Ok(Reply::Refused(refused)) =
            decode_one::<u64>(br#"{"error":{"code":"-32005","message":"too much","data":"Try [0x1, 0x2]"}}"#)
        else {
            panic!("expected a refusal")
        };
        assert_eq!(refused, Refusal { code: Some(-32005), text: "too much: Try [0x1, 0x2]".to_owned() });
    }
}
