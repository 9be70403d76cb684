//! The docs page: the OpenAPI document, drawn on the server.

use std::collections::BTreeMap;
use std::sync::Arc;

use askama::Template;
use axum::response::Response;
use serde_json::Value;

use super::html;
use super::view::Shell;
use crate::problem::CODES;
use crate::state::ApiState;

struct Operation {
    id: String,
    method: String,
    path: String,
    summary: String,
    description: String,
    own: Vec<Parameter>,
    common: Vec<String>,
    answer: String,
}

struct Parameter {
    name: String,
    place: String,
    text: String,
}

#[derive(Template)]
#[template(path = "docs.html", whitespace = "minimize")]
struct DocsPage {
    shell: Shell,
    version: String,
    groups: Vec<(String, Vec<Operation>)>,
    common: Vec<Parameter>,
    schemas: Vec<(String, Vec<Parameter>)>,
    codes: &'static [(&'static str, &'static str)],
}

/// Parameters explained once, at the top.
const COMMON: &[&str] = &["limit", "cursor", "min_finality", "as_of", "min_height", "require_metadata"];
/// In reading order.
const TAGS: &[&str] =
    &["networks", "collections", "assets", "accounts", "transfers", "chain", "search", "stream"];

pub(super) async fn page(state: ApiState, document: Arc<Value>) -> Response {
    let mut groups: BTreeMap<usize, (String, Vec<Operation>)> = BTreeMap::new();
    let mut common: BTreeMap<usize, Parameter> = BTreeMap::new();
    for (path, item) in document["paths"].as_object().into_iter().flatten() {
        for (method, operation) in item.as_object().into_iter().flatten() {
            let tag = operation["tags"][0].as_str().unwrap_or("other");
            let place = TAGS.iter().position(|known| *known == tag).unwrap_or(TAGS.len());
            let (mut own, mut named) = (Vec::new(), Vec::new());
            for parameter in operation["parameters"].as_array().into_iter().flatten() {
                let made = Parameter {
                    name: word(&parameter["name"]),
                    place: word(&parameter["in"]),
                    text: word(&parameter["description"]),
                };
                match COMMON.iter().position(|known| *known == made.name) {
                    Some(at) if path != "/v1/search" => {
                        named.push(made.name.clone());
                        common.entry(at).or_insert(made);
                    }
                    _ if made.name == "network" && made.place == "path" => {}
                    _ => own.push(made),
                }
            }
            groups.entry(place).or_insert_with(|| (tag.to_owned(), Vec::new())).1.push(Operation {
                id: word(&operation["operationId"]),
                method: method.to_uppercase(),
                path: path.clone(),
                summary: word(&operation["summary"]),
                description: word(&operation["description"]),
                own,
                common: named,
                answer: answer(&operation["responses"]["200"]),
            });
        }
    }
    let schemas = document["components"]["schemas"].as_object().into_iter().flatten();
    let schemas = schemas
        .filter(|(name, _)| !name.starts_with("Page_") && !name.starts_with("One_"))
        .map(|(name, schema)| {
            let fields = schema["properties"].as_object().into_iter().flatten();
            let fields = fields
                .map(|(field, schema)| Parameter {
                    name: field.clone(),
                    place: kind(schema),
                    text: word(&schema["description"]),
                })
                .collect();
            (name.clone(), fields)
        })
        .collect();
    html(&DocsPage {
        shell: Shell { operator: state.config().operator_page, ..Shell::bare("API") },
        version: state.config().version.clone(),
        groups: groups.into_values().collect(),
        common: common.into_values().collect(),
        schemas,
        codes: CODES,
    })
}

fn word(value: &Value) -> String {
    value.as_str().unwrap_or("").replace('\n', " ").replace('`', "")
}

/// `Page_Transfer` reads as "list of Transfer".
fn answer(response: &Value) -> String {
    let content = &response["content"];
    if content["text/event-stream"].is_object() {
        return "events".to_owned();
    }
    let name = content["application/json"]["schema"]["$ref"].as_str().unwrap_or("");
    let name = name.rsplit('/').next().unwrap_or("");
    match name.split_once('_') {
        Some(("Page", of)) => format!("list of {of}"),
        Some(("One", of)) => of.to_owned(),
        _ => name.to_owned(),
    }
}

fn kind(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str() {
        return name.rsplit('/').next().unwrap_or("").to_owned();
    }
    match &schema["type"] {
        Value::String(one) if one == "array" => format!("list of {}", kind(&schema["items"])),
        Value::String(one) => one.clone(),
        Value::Array(several) => several.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" or "),
        _ => String::new(),
    }
}
