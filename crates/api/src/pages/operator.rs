//! The operator page: the pipeline as a line, per network, with what waits on every edge; then what needs a
//! person. Read-only.

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use serde_json::Value;
use tidemark_store::reads;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::view::{Shell, ago, group};
use super::{Oops, html};
use crate::reader::Reader;
use crate::state::ApiState;

/// One network's way through the pipeline.
struct Line {
    slug: String,
    halted: Option<String>,
    stages: Vec<Stage>,
}

/// A place in the pipeline, and what waits before it.
struct Stage {
    name: &'static str,
    at: String,
    behind: Option<i64>,
}

impl Stage {
    fn class(&self) -> &'static str {
        match self.behind {
            Some(0) | None => "",
            Some(1..=50) => "some",
            Some(_) => "much",
        }
    }
    fn waiting(&self) -> String {
        match self.behind {
            None => String::new(),
            Some(0) => "0".to_owned(),
            Some(blocks) => group(blocks),
        }
    }
}

/// A table made of facts: caption, headings, rows.
struct Table {
    id: &'static str,
    caption: &'static str,
    empty: &'static str,
    headings: &'static [&'static str],
    rows: Vec<Vec<String>>,
    more: i64,
}

#[derive(Template)]
#[template(path = "operator.html", whitespace = "minimize")]
struct OperatorPage {
    shell: Shell,
    lines: Vec<Line>,
    summary: Vec<(&'static str, String, &'static str)>,
    tables: Vec<Table>,
}

pub(super) async fn page(State(state): State<ApiState>) -> Result<Response, Oops> {
    let reader = Reader::open(&state).await?;
    let app = reads::operator_facts(&reader.conn).await?;
    let raw = if reads::is_same_database(state.app(), state.raw()) {
        app.clone()
    } else {
        reads::operator_facts(&state.raw().conn().await?).await?
    };
    let mut lines = vec![backbone(&app)];
    let of_networks = reader.networks.iter().map(|network| {
        let of = |facts: &Value, list: &str, field: &str| {
            let rows = facts[list].as_array().into_iter().flatten();
            rows.filter(|row| row["network_id"] == network.network_id)
                .filter_map(|row| row[field].as_i64())
                .min()
        };
        let head = of(&raw, "heads", "latest_height").or(network.head_height);
        let ingested = of(&raw, "cursors", "height").or(network.ingested_height);
        let ledger = of(&app, "ledger", "head_height").or(network.normalized_height);
        let behind = |before: Option<i64>, after: Option<i64>| Some((before? - after?).max(0));
        let stage = |name, at: Option<i64>, behind| Stage {
            name,
            at: at.map_or("none yet".to_owned(), group),
            behind,
        };
        Line {
            slug: network.slug.clone(),
            halted: network.halted_reason.clone(),
            stages: vec![
                stage("node", head, None),
                stage("raw", ingested, behind(head, ingested)),
                stage("ledger", ledger, behind(ingested, ledger)),
                stage("projection", network.projected_height, behind(ledger, network.projected_height)),
                stage("final", network.finalized_height, None),
            ],
        }
    });
    lines.extend(of_networks);
    let count = |facts: &Value, name: &str| facts[name].as_i64().unwrap_or(0);
    let outbox = count(&app, "outbox_waiting");
    let depth: i64 =
        app["consumers"].as_array().into_iter().flatten().filter_map(|row| row["depth"].as_i64()).sum();
    let alarm = |number: i64| if number > 0 { "bad" } else { "" };
    let (dlq, quarantine) = (count(&app, "dlq_open"), count(&app, "quarantine_open"));
    let parked = i64::try_from(app["parked"].as_array().map_or(0, Vec::len)).unwrap_or(0);
    let errors = count(&app, "errors_open");
    let summary = vec![
        ("outbox waiting", if outbox > 10_000 { "> 10 000".to_owned() } else { group(outbox) }, ""),
        ("bus depth", group(depth), ""),
        ("dead letters", group(dlq), alarm(dlq)),
        ("parked keys", group(parked), alarm(parked)),
        ("quarantined", group(quarantine), alarm(quarantine)),
        ("open errors", group(errors), alarm(errors)),
    ];
    let tables = tables(&app, &raw, &reader);
    Ok(html(&OperatorPage { shell: Shell::new(&reader, "Operator", ""), lines, summary, tables }))
}

/// The backbone, in events over all networks: what waits before each stop.
fn backbone(app: &Value) -> Line {
    let streams = || app["streams"].as_array().into_iter().flatten();
    let sum = |field: &str| streams().filter_map(|row| row[field].as_i64()).sum::<i64>();
    let depth = |handler: &str| {
        let rows = app["consumers"].as_array().into_iter().flatten();
        rows.filter(|row| row["handler_kind"] == handler).filter_map(|row| row["depth"].as_i64()).sum::<i64>()
    };
    let stop = |name, at: String, behind| Stage { name, at, behind };
    Line {
        slug: "events".to_owned(),
        halted: None,
        stages: vec![
            stop("outbox", "committed".to_owned(), None),
            stop("bus", format!("{} numbered", group(sum("written"))), app["outbox_waiting"].as_i64()),
            stop("ledger", "of chain events".to_owned(), Some(depth("ledger"))),
            stop("projection", "of ledger events".to_owned(), Some(depth("projector"))),
        ],
    }
}

fn tables(app: &Value, raw: &Value, reader: &Reader) -> Vec<Table> {
    let network = |row: &Value| {
        let id = row["network_id"].as_i64().unwrap_or(0);
        let found = reader.networks.iter().find(|network| i64::from(network.network_id) == id);
        found.map_or_else(|| id.to_string(), |network| network.slug.clone())
    };
    let rows = |facts: &Value, list: &str, make: &dyn Fn(&Value) -> Vec<String>| -> Vec<Vec<String>> {
        facts[list].as_array().into_iter().flatten().map(make).collect()
    };
    let shown = |list: &str| i64::try_from(app[list].as_array().map_or(0, Vec::len)).unwrap_or(0);
    let rest = |count: &str, list: &str| (app[count].as_i64().unwrap_or(0) - shown(list)).max(0);
    vec![
        Table {
            id: "dlq",
            caption: "Dead letters",
            empty: "No dead letters. An event that fails ten times would wait here, with its key parked behind it.",
            headings: &["Handler", "Subject", "Key", "Error", "Tries", "Since"],
            rows: rows(app, "dlq", &|row| {
                vec![
                    text(row, "handler_kind"),
                    text(row, "topic"),
                    text(row, "key"),
                    text(row, "error"),
                    number(row, "attempts"),
                    age(row, "failed_at"),
                ]
            }),
            more: rest("dlq_open", "dlq"),
        },
        Table {
            id: "parked",
            caption: "Parked keys",
            empty: "No key is parked: every partition flows.",
            headings: &["Handler", "Stream", "Key", "Behind event", "Since"],
            rows: rows(app, "parked", &|row| {
                vec![
                    text(row, "handler_kind"),
                    text(row, "stream"),
                    text(row, "key"),
                    number(row, "pseq"),
                    age(row, "parked_at"),
                ]
            }),
            more: 0,
        },
        Table {
            id: "quarantine",
            caption: "Quarantine",
            empty: "Nothing is quarantined: no event would make a balance negative.",
            headings: &["Network", "Block", "Event", "Reason", "Since"],
            rows: rows(app, "quarantine", &|row| {
                vec![
                    network(row),
                    number(row, "block_number"),
                    text(row, "source_event_id"),
                    text(row, "reason"),
                    age(row, "quarantined_at"),
                ]
            }),
            more: rest("quarantine_open", "quarantine"),
        },
        Table {
            id: "errors",
            caption: "Open errors",
            empty: "No open errors.",
            headings: &["Worker", "Network", "Block", "Message", "Times", "Last"],
            rows: rows(app, "errors", &|row| {
                vec![
                    text(row, "worker_name"),
                    network(row),
                    number(row, "block_height"),
                    text(row, "message"),
                    number(row, "occurrences"),
                    age(row, "last_seen_at"),
                ]
            }),
            more: rest("errors_open", "errors"),
        },
        Table {
            id: "consumers",
            caption: "Consumers",
            empty: "No consumer has started yet.",
            headings: &["Handler", "Stream", "Waiting", "Moved"],
            rows: rows(app, "consumers", &|row| {
                vec![
                    text(row, "handler_kind"),
                    text(row, "stream"),
                    number(row, "depth"),
                    age(row, "updated_at"),
                ]
            }),
            more: 0,
        },
        Table {
            id: "streams",
            caption: "Streams",
            empty: "Nothing has been numbered yet.",
            headings: &["Stream", "Written", "Published", "Waiting"],
            rows: rows(app, "streams", &|row| {
                let (written, published) =
                    (row["written"].as_i64().unwrap_or(0), row["published"].as_i64().unwrap_or(0));
                vec![
                    text(row, "stream"),
                    group(written),
                    group(published),
                    group((written - published).max(0)),
                ]
            }),
            more: 0,
        },
        Table {
            id: "processes",
            caption: "Workers",
            empty: "No worker has reported yet.",
            headings: &["Role", "Instance", "State", "Restarts", "Last error", "Heartbeat"],
            rows: rows(app, "processes", &|row| {
                vec![
                    text(row, "role"),
                    text(row, "instance"),
                    text(row, "state"),
                    number(row, "restarts"),
                    text(row, "last_error"),
                    age(row, "heartbeat_at"),
                ]
            }),
            more: 0,
        },
        Table {
            id: "leases",
            caption: "History leases",
            empty: "No range of history is leased: either it is read, or nobody reads it.",
            headings: &["Worker", "Network", "Active", "Failed", "From", "To"],
            rows: rows(raw, "leases", &|row| {
                vec![
                    text(row, "worker_type"),
                    network(row),
                    number(row, "active"),
                    number(row, "failed"),
                    number(row, "from_height"),
                    number(row, "to_height"),
                ]
            }),
            more: 0,
        },
        Table {
            id: "reorgs",
            caption: "Reorgs",
            empty: "No reorg has been seen.",
            headings: &["Network", "Blocks", "From", "To", "When"],
            rows: rows(raw, "reorgs", &|row| {
                vec![
                    network(row),
                    number(row, "blocks"),
                    number(row, "from_height"),
                    number(row, "to_height"),
                    age(row, "checked_at"),
                ]
            }),
            more: 0,
        },
    ]
}

fn text(row: &Value, field: &str) -> String {
    row[field].as_str().map(tidemark_model::text::shown).unwrap_or_default()
}
fn number(row: &Value, field: &str) -> String {
    row[field].as_i64().map(group).unwrap_or_default()
}
fn age(row: &Value, field: &str) -> String {
    row[field].as_str().and_then(|at| OffsetDateTime::parse(at, &Rfc3339).ok()).map(ago).unwrap_or_default()
}
