//! The OpenAPI document: made from the handlers, then completed with what every route has in common.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use utoipa::openapi::{InfoBuilder, OpenApi, OpenApiBuilder};

use crate::problem::ProblemDocument;
use crate::state::ApiState;

const DESCRIPTION: &str = "Owners, transfers and collections over several chains, with a stated finality on every \
answer. Lists answer {items, next, meta}; single things {item, meta}; errors are application/problem+json with a \
stable code. Amounts and token ids are strings. Follow `next` for more; a cursor belongs to its route and filters. \
There is always a lag between chain and answer (meta.data_watermark says how far we are), no order between networks, \
no history before a network's start block, and metadata may never come.";

/// Errors any route may answer with.
const ERRORS: &[(&str, &str)] = &[
    ("400", "A parameter cannot be read"),
    (
        "404",
        "Not known, or min_height was not reached; with X-Data-Status: pending it may still be ahead of our watermark",
    ),
    ("429", "Too many requests; see Retry-After"),
    ("500", "Our mistake"),
    ("503", "The database does not answer; see Retry-After"),
    ("504", "The answer took too long"),
];

/// The empty document with its description.
pub(crate) fn base(state: &ApiState) -> OpenApi {
    described(&state.config().version)
}

pub(crate) fn described(version: &str) -> OpenApi {
    let info = InfoBuilder::new().title("Tidemark").version(version).description(Some(DESCRIPTION)).build();
    OpenApiBuilder::new().info(info).build()
}

/// Adds the problem schema, the common errors and the rate limit headers to every operation.
pub(crate) fn finish(doc: OpenApi) -> Value {
    let mut doc = serde_json::to_value(doc).expect("an OpenAPI document is plain data");
    let problem = serde_json::to_value(<ProblemDocument as utoipa::PartialSchema>::schema())
        .expect("a schema is plain data");
    doc["components"]["schemas"]["Problem"] = problem;
    let headers = json!({
        "RateLimit": {"description": "Requests left and seconds until all are back", "schema": {"type": "string"}},
        "RateLimit-Policy": {"description": "Requests per window", "schema": {"type": "string"}}
    });
    let operations = doc["paths"].as_object_mut().into_iter().flat_map(|paths| paths.iter_mut());
    for (path, item) in operations {
        for (method, operation) in item.as_object_mut().into_iter().flat_map(|item| item.iter_mut()) {
            if !matches!(method.as_str(), "get" | "post") {
                continue;
            }
            let mut errors = ERRORS.to_vec();
            if method == "post" {
                errors.push(("413", "The body is too large"));
            }
            if path == "/v1/stream" {
                errors.push(("410", "The position is no longer kept"));
            }
            for (status, description) in errors {
                operation["responses"][status] = json!({
                    "description": description,
                    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
                });
            }
            let answer = &mut operation["responses"]["200"];
            answer["headers"] = headers.clone();
            if answer["description"].as_str().is_none_or(str::is_empty) {
                answer["description"] = json!("The answer");
            }
        }
    }
    doc
}

/// The query parameters of each route.
pub(crate) fn known_parameters(doc: &Value) -> BTreeMap<String, BTreeSet<String>> {
    let mut known = BTreeMap::new();
    for (path, item) in doc["paths"].as_object().into_iter().flatten() {
        let names: &mut BTreeSet<String> = known.entry(path.clone()).or_default();
        for operation in item.as_object().into_iter().flat_map(|item| item.values()) {
            for parameter in operation["parameters"].as_array().into_iter().flatten() {
                if parameter["in"] == "query" {
                    names.extend(parameter["name"].as_str().map(str::to_owned));
                }
            }
        }
    }
    known
}
