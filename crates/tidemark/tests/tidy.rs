//! The house rules that a compiler does not know: which room may use which, names of files, links in docs,
//! promises with an issue number.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What each crate may use of ours, directly. Dev-dependencies are free; `testkit` is only ever one.
const ARROWS: &[(&str, &[&str])] = &[
    ("model", &[]),
    ("rpc", &["model"]),
    ("adapters", &["rpc", "model"]),
    ("store", &["model"]),
    ("bus", &["store", "model"]),
    ("pipeline", &["bus", "store", "model"]),
    ("api", &["bus", "store", "model"]),
    ("sim", &["model"]),
    ("testkit", &["model"]),
    ("tidemark", &["model", "rpc", "adapters", "store", "bus", "pipeline", "api", "sim"]),
];

/// Crates without I/O must not be able to do any.
const FORBIDDEN: &[(&str, &[&str])] = &[
    ("model", &["tokio", "tokio-postgres", "reqwest", "axum"]),
    ("adapters", &["tokio-postgres", "deadpool-postgres", "axum"]),
    ("pipeline", &["reqwest", "axum"]),
    ("sim", &["tokio-postgres", "reqwest"]),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace")
}

/// Files that are ours: what git knows, or would know after `git add`.
fn files() -> Vec<PathBuf> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git runs");
    assert!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut files: Vec<PathBuf> =
        names.lines().map(PathBuf::from).filter(|file| root().join(file).is_file()).collect();
    files.sort();
    files
}

fn read(file: &Path) -> String {
    std::fs::read_to_string(root().join(file)).unwrap_or_default()
}

fn with_extension<'f>(files: &'f [PathBuf], extension: &'f str) -> impl Iterator<Item = &'f PathBuf> {
    files.iter().filter(move |file| file.extension().is_some_and(|found| found == extension))
}

#[track_caller]
fn assert_none(rule: &str, offences: Vec<String>) {
    assert!(offences.is_empty(), "{rule}:\n  {}", offences.join("\n  "));
}

/// Dependencies of every crate, from its manifest: build and normal ones.
fn manifests() -> BTreeMap<String, BTreeSet<String>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(root().join("crates")).expect("crates").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(text) = std::fs::read_to_string(entry.path().join("Cargo.toml")) else { continue };
        let manifest: toml::Table = text.parse().expect("a manifest");
        let mut uses = BTreeSet::new();
        for section in ["dependencies", "build-dependencies"] {
            let table = manifest.get(section).and_then(toml::Value::as_table);
            uses.extend(table.into_iter().flat_map(|table| table.keys().cloned()));
        }
        found.insert(name, uses);
    }
    found
}

#[test]
fn crates_use_only_what_is_drawn() {
    let manifests = manifests();
    let mut offences = vec![];
    for (name, uses) in &manifests {
        let Some((_, allowed)) = ARROWS.iter().find(|(of, _)| of == name) else {
            offences.push(format!("crate {name} has no line in ARROWS: draw its arrows, with an ADR"));
            continue;
        };
        for used in uses.iter().filter_map(|used| used.strip_prefix("tidemark-")) {
            if !allowed.contains(&used) {
                offences.push(format!("{name} uses {used}; it may use {allowed:?}"));
            }
        }
        for (_, forbidden) in FORBIDDEN.iter().filter(|(of, _)| of == name) {
            let found = forbidden.iter().filter(|library| uses.contains(**library));
            offences.extend(found.map(|library| format!("{name} uses {library}")));
        }
    }
    for (name, _) in ARROWS {
        if !manifests.contains_key(*name) {
            offences.push(format!("{name} is drawn and does not exist"));
        }
    }
    assert_none("an arrow that is not drawn is forbidden", offences);
}

#[test]
fn versions_are_said_once() {
    let mut offences = vec![];
    for entry in std::fs::read_dir(root().join("crates")).expect("crates").flatten() {
        let text = std::fs::read_to_string(entry.path().join("Cargo.toml")).unwrap_or_default();
        let manifest: toml::Table = text.parse().expect("a manifest");
        for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
            let table = manifest.get(section).and_then(toml::Value::as_table);
            for (name, value) in table.into_iter().flatten() {
                let shared = value.get("workspace").and_then(toml::Value::as_bool) == Some(true);
                if !shared {
                    offences.push(format!("{}: {name}", entry.path().join("Cargo.toml").display()));
                }
            }
        }
    }
    assert_none("dependencies say `workspace = true`; versions are in the root manifest", offences);
}

#[test]
fn migrations_are_numbered_upwards_and_named_in_lower_case() {
    let files = files();
    let names: Vec<String> = with_extension(&files, "sql")
        .filter(|file| file.starts_with("crates/store/migrations"))
        .map(|file| file.file_stem().expect("a name").to_string_lossy().into_owned())
        .collect();
    let mut offences = vec![];
    let mut last = 0;
    for name in &names {
        let (number, what) = name.split_once('_').unwrap_or((name, ""));
        let number_read: u32 = number.parse().unwrap_or(0);
        if number.len() != 4 || number_read <= last {
            offences.push(format!("{name}: the number must be four digits and larger than {last}"));
        }
        if what.is_empty()
            || !what.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
        {
            offences.push(format!("{name}: say what it does, in a-z, 0-9 and _"));
        }
        last = number_read;
    }
    assert!(!names.is_empty(), "no migrations found");
    assert_none("migrations are NNNN_what.sql", offences);
}

#[test]
fn event_schemas_are_where_their_subject_says() {
    let files = files();
    let offences = with_extension(&files, "json")
        .filter(|file| file.starts_with("schemas"))
        // The envelope is no event: it is what every event comes in.
        .filter(|file| !file.starts_with("schemas/envelope"))
        .filter(|file| {
            let parts: Vec<String> =
                file.iter().skip(1).map(|part| part.to_string_lossy().into_owned()).collect();
            let is_version = |name: &str| {
                name.strip_prefix('v')
                    .and_then(|rest| rest.strip_suffix(".json"))
                    .is_some_and(|number| number.parse::<u32>().is_ok())
            };
            !(parts.len() == 4 && is_version(&parts[3]))
        })
        .map(|file| file.display().to_string())
        .collect();
    assert_none("schemas are schemas/service/aggregate/event/vN.json", offences);
}

/// Targets of `[text](target)` outside code.
fn links(markdown: &str) -> Vec<String> {
    let mut found = vec![];
    let mut in_code = false;
    for line in markdown.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        let outside_code: String = line.split('`').step_by(2).collect();
        for part in outside_code.split("](").skip(1) {
            if let Some((target, _)) = part.split_once(')') {
                found.push(target.split_whitespace().next().unwrap_or("").to_owned());
            }
        }
    }
    found
}

/// The anchor of a heading, as the forges make it.
fn anchor(heading: &str) -> String {
    heading
        .trim_start_matches('#')
        .trim()
        .to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

#[test]
fn links_in_docs_lead_somewhere() {
    let files = files();
    let mut offences = vec![];
    for file in with_extension(&files, "md") {
        let text = read(file);
        for link in links(&text) {
            if link.contains("://") || link.starts_with("mailto:") || link.is_empty() {
                continue;
            }
            let (path, fragment) =
                link.split_once('#').map_or((link.as_str(), None), |(path, at)| (path, Some(at)));
            let target =
                if path.is_empty() { file.clone() } else { file.parent().expect("a folder").join(path) };
            if !root().join(&target).exists() {
                offences.push(format!("{}: {link}", file.display()));
            } else if let Some(fragment) = fragment
                && target.extension().is_some_and(|extension| extension == "md")
                && !read(&target).lines().any(|line| line.starts_with('#') && anchor(line) == fragment)
            {
                offences.push(format!("{}: {link} names no heading", file.display()));
            }
        }
    }
    assert_none("a link leads to a file and a heading that exist", offences);
}

#[test]
fn docs_have_one_title_and_adrs_their_four_parts() {
    let files = files();
    let mut offences = vec![];
    for file in with_extension(&files, "md") {
        let text = read(file);
        if !text.starts_with("# ") {
            offences.push(format!("{}: begins without a title", file.display()));
        }
        if file.starts_with("docs/adr") {
            for part in ["## Context", "## Decision", "## Consequences", "## Refused"] {
                if !text.contains(part) {
                    offences.push(format!("{}: no {part}", file.display()));
                }
            }
        }
    }
    assert_none("docs are readable from the top", offences);
}

#[test]
fn later_work_has_an_issue_number() {
    let files = files();
    let mut offences = vec![];
    for file in files.iter().filter(|file| {
        let kinds = ["rs", "sql", "md", "toml", "sh", "js", "css", "html"];
        file.extension().is_some_and(|found| kinds.iter().any(|kind| found == *kind))
            && !file.ends_with("tests/tidy.rs")
    }) {
        for (number, line) in (1..).zip(read(file).lines()) {
            let promise = ["TODO", "FIXME", "XXX"]
                .iter()
                .any(|word| line.split(|c: char| !c.is_ascii_alphanumeric()).any(|part| part == *word));
            let numbered = line.split('#').skip(1).any(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
            if promise && !numbered {
                offences.push(format!("{}:{number}: {}", file.display(), line.trim()));
            }
        }
    }
    assert_none("write the issue's number beside it, such as TODO(#12), or do it now", offences);
}

#[test]
fn nothing_is_skipped_and_nothing_left_in() {
    let files = files();
    let mut offences = vec![];
    let words = ["#[ignore", "dbg!(", "todo!(", "unimplemented!("];
    for file in with_extension(&files, "rs").filter(|file| !file.ends_with("tests/tidy.rs")) {
        for (number, line) in (1..).zip(read(file).lines()) {
            if words.iter().any(|word| line.contains(word)) {
                offences.push(format!("{}:{number}: {}", file.display(), line.trim()));
            }
        }
    }
    assert_none("tests are not ignored, code is finished", offences);
}

#[test]
fn no_path_of_a_machine_is_committed() {
    let files = files();
    let mut offences = vec![];
    for file in files.iter().filter(|file| !file.ends_with("tests/tidy.rs") && !file.starts_with("fixtures"))
    {
        for (number, line) in (1..).zip(read(file).lines()) {
            if ["/home/", "/Users/", "/root/"].iter().any(|home| line.contains(home))
                && !line.contains("linuxbrew")
            {
                offences.push(format!("{}:{number}", file.display()));
            }
        }
    }
    assert_none("a path into somebody's home works only there", offences);
}

#[test]
fn every_make_target_is_explained() {
    let text = read(Path::new("Makefile"));
    let offences = text
        .lines()
        .filter(|line| {
            line.split_once(':').is_some_and(|(name, rest)| {
                !name.is_empty()
                    && !name.starts_with('.')
                    && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'%')
                    && !rest.starts_with('=')
            })
        })
        .filter(|line| !line.contains(" ## "))
        .map(str::to_owned)
        .collect();
    assert_none("every target has a line for `make help`", offences);
}
