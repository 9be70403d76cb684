//! One JSON object per line with exactly S0 §15.4's fields, always all of them, then the message and
//! whatever else the line carries. Fields of the surrounding spans are lifted into the line, inner ones win.

use std::fmt;
use std::io::Write;

use serde_json::{Map, Value};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;

/// Fields every line has, in this order, after `timestamp` and `level`; `null` where there is nothing.
const CONTRACT: [&str; 8] =
    ["service", "network_id", "trace_id", "event_id", "source_event_id", "action", "duration_ms", "error"];

/// The layer.
#[derive(Debug)]
pub struct JsonLines<M> {
    service: &'static str,
    writer: M,
}

impl<M> JsonLines<M> {
    /// `service` where no span says otherwise.
    pub fn new(service: &'static str, writer: M) -> Self {
        Self { service, writer }
    }
}

struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), Value::String(format!("{value:?}")));
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().to_owned(), value.into());
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name().to_owned(), value.into());
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().to_owned(), value.into());
    }
    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.0.insert(field.name().to_owned(), Value::String(value.to_string()));
    }
}

impl<S, M> Layer<S> for JsonLines<M>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    M: for<'a> MakeWriter<'a> + 'static,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields(Map::new());
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(fields);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(fields) = span.extensions_mut().get_mut::<Fields>()
        {
            values.record(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields(Map::new());
        for span in context.event_scope(event).into_iter().flat_map(|scope| scope.from_root()) {
            if let Some(own) = span.extensions().get::<Fields>() {
                fields.0.extend(own.0.clone());
            }
        }
        event.record(&mut fields);
        let mut line = self.line(event, fields.0).to_string();
        line.push('\n');
        // A log that cannot be written has nowhere to be reported.
        let _ = self.writer.make_writer().write_all(line.as_bytes());
    }
}

impl<M> JsonLines<M> {
    fn line(&self, event: &Event<'_>, mut fields: Map<String, Value>) -> Value {
        let meta = event.metadata();
        let mut line = Map::new();
        let now = OffsetDateTime::now_utc().format(&Rfc3339).unwrap_or_default();
        line.insert("timestamp".into(), now.into());
        line.insert("level".into(), meta.level().as_str().to_lowercase().into());
        for name in CONTRACT {
            let value = fields.remove(name).unwrap_or_else(|| match name {
                "service" => self.service.into(),
                _ => Value::Null,
            });
            line.insert(name.into(), value);
        }
        line.insert("message".into(), fields.remove("message").unwrap_or(Value::Null));
        line.insert("target".into(), meta.target().into());
        line.extend(fields);
        Value::Object(line)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::layer::SubscriberExt;

    use super::super::Scrubbed;
    use super::*;

    #[derive(Clone, Default)]
    struct Captured(Arc<Mutex<Vec<u8>>>);
    impl Write for Captured {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("no panic").extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn lines(work: impl FnOnce()) -> Vec<Value> {
        let captured = Captured::default();
        let to = captured.clone();
        let layer = JsonLines::new("tidemark", Scrubbed::new(move || to.clone()));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), work);
        let bytes = captured.0.lock().expect("no panic").clone();
        let text = String::from_utf8(bytes).expect("UTF-8");
        text.lines().map(|line| serde_json::from_str(line).expect("one JSON object per line")).collect()
    }

    #[test]
    fn every_line_has_every_field_of_the_contract() {
        let lines = lines(|| {
            tracing::info!("Alone.");
            let outer = tracing::info_span!("work", service = "normalizer", network_id = 42, trace_id = "t");
            let _in = outer.enter();
            let inner = tracing::info_span!("batch", event_id = tracing::field::Empty);
            inner.record("event_id", "e");
            inner.in_scope(|| {
                tracing::error!(
                    action = "apply_delta",
                    duration_ms = 12_u64,
                    rows = 3,
                    error = "broken",
                    "Did not apply."
                );
            });
        });
        for line in &lines {
            for name in CONTRACT.iter().chain(&["timestamp", "level", "message"]) {
                assert!(line.get(name).is_some(), "{name} is missing in {line}");
            }
        }
        assert_eq!(lines[0]["service"], "tidemark");
        assert_eq!(lines[0]["error"], Value::Null);
        assert_eq!(lines[1]["service"], "normalizer");
        assert_eq!(lines[1]["network_id"], 42);
        assert_eq!(lines[1]["event_id"], "e");
        assert_eq!(lines[1]["duration_ms"], 12);
        assert_eq!(lines[1]["level"], "error");
        assert_eq!(lines[1]["rows"], 3);
    }

    #[test]
    fn no_secret_reaches_a_line() {
        let url = "https://u:CANARY@node.example/v2/CANARY?key=CANARY";
        let lines = lines(|| {
            let span = tracing::info_span!("ask", endpoint = url);
            span.in_scope(|| tracing::warn!(error = %format!("cannot reach {url}: timeout"), "From {url}."));
        });
        assert!(!lines[0].to_string().contains("CANARY"), "{}", lines[0]);
        assert!(lines[0]["error"].as_str().is_some_and(|error| error.ends_with(": timeout")), "{}", lines[0]);
    }
}
