//! The command line from outside: help, exit codes, and errors that name the next step.

use std::process::{Command, Output};

use clap::CommandFactory;
use tidemark::cli::Cli;

fn tidemark(args: &[&str], env: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidemark"))
        .args(args)
        .env_remove("TIDEMARK_CONFIG")
        .envs(env.iter().copied())
        .current_dir(std::env::temp_dir())
        .output()
        .expect("runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_definition_is_sound() {
    Cli::command().debug_assert();
}

/// All commands, with their path.
fn commands(path: &str, command: &clap::Command, found: &mut Vec<(String, clap::Command)>) {
    for below in command.get_subcommands() {
        let path = format!("{path} {}", below.get_name());
        found.push((path.clone(), below.clone()));
        commands(&path, below, found);
    }
}

#[test]
fn every_command_has_help_with_an_example() {
    let mut all = vec![];
    commands("tidemark", &Cli::command(), &mut all);
    assert!(all.len() >= 8);
    for (path, command) in all.iter().filter(|(_, command)| !command.is_hide_set()) {
        assert!(command.get_about().is_some(), "{path} says nothing of itself");
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        assert!(help.contains("Example") && help.contains("tidemark "), "{path} has no example");
    }
    let help = text(&tidemark(&["--help"], &[]).stdout);
    assert!(help.contains("Exit codes:"), "{help}");
}

/// The help of every command, as `docs/reference/cli.md` shows it.
fn reference() -> String {
    let mut text = String::from(
        "# Command line\n\nGenerated from the program: `TIDEMARK_BLESS=1 cargo nextest run -p tidemark --test cli`.\n",
    );
    let mut all = vec![("tidemark".to_owned(), Cli::command())];
    commands("tidemark", &Cli::command(), &mut all);
    for (path, command) in all.into_iter().filter(|(_, command)| !command.is_hide_set()) {
        let mut command =
            command.bin_name(path.clone()).disable_help_subcommand(true).term_width(100).max_term_width(100);
        let help = command.render_long_help().to_string();
        let help: Vec<&str> = help.lines().map(str::trim_end).collect();
        text.push_str(&format!("\n## `{path}`\n\n```text\n{}\n```\n", help.join("\n").trim()));
    }
    text
}

#[test]
fn the_reference_is_the_help() {
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/cli.md");
    let now = reference();
    if std::env::var_os("TIDEMARK_BLESS").is_some() {
        std::fs::create_dir_all(file.parent().expect("a folder")).expect("creates");
        std::fs::write(&file, &now).expect("writes");
    }
    let kept = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        kept == now,
        "docs/reference/cli.md is old: run this test with TIDEMARK_BLESS=1 and read the diff"
    );
}

#[test]
fn a_bad_configuration_is_two_and_all_its_problems() {
    let output =
        tidemark(&["config", "check"], &[("TIDEMARK__API__LISEN", "x"), ("POLL_INTERVAL_MS", "soon")]);
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert!(
        said.contains("2 problems")
            && said.contains("TIDEMARK__API__LISEN")
            && said.contains("POLL_INTERVAL_MS"),
        "{said}"
    );
    assert!(said.contains("did you mean listen?"), "{said}");
}

#[test]
fn the_printed_example_is_the_committed_one() {
    let output = tidemark(&["config", "example"], &[]);
    assert!(output.status.success());
    assert_eq!(text(&output.stdout), include_str!("../../../tidemark.example.toml"));
}

#[test]
fn what_is_shown_hides_secrets() {
    let output =
        tidemark(&["config", "show"], &[("TIDEMARK__DATABASE__URL", "postgres://u:CANARY@db/CANARY")]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!text(&output.stdout).contains("CANARY"));
    assert!(text(&output.stdout).contains("postgres://db"));
}

#[test]
fn a_database_that_is_not_there_is_four_without_its_password() {
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").expect("binds").local_addr().expect("an address").port();
    let url = format!("postgres://u:CANARY@127.0.0.1:{port}/x");
    let output = tidemark(&["migrate"], &[("TIDEMARK__DATABASE__URL", &url)]);
    assert_eq!(output.status.code(), Some(4), "{}", text(&output.stderr));
    assert!(!text(&output.stderr).contains("CANARY"), "{}", text(&output.stderr));
}

#[test]
fn no_database_at_all_names_the_setting() {
    for command in [
        ["migrate"].as_slice(),
        &["status", "--data-dir", "nowhere"],
        &["verify", "ledger", "--data-dir", "nowhere"],
        &["dlq", "list", "--data-dir", "nowhere"],
        &["reconcile", "--data-dir", "nowhere"],
    ] {
        let output = tidemark(command, &[]);
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("database.url"), "{}", text(&output.stderr));
    }
}

#[test]
fn nothing_to_ingest_is_said() {
    let output =
        tidemark(&["run", "--roles", "ingest"], &[("TIDEMARK__DATABASE__URL", "postgres://127.0.0.1:1/x")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("[[network]]"), "{}", text(&output.stderr));
}

#[test]
fn a_port_in_use_names_the_setting() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
    let listen = taken.local_addr().expect("an address").to_string();
    let dir = std::env::temp_dir().join(format!("tidemark-cli-{}", uuid::Uuid::new_v4().simple()));
    let dir = dir.to_string_lossy().into_owned();
    let output = tidemark(&["dev", "--listen", &listen, "--data-dir", &dir], &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("api.listen"), "{}", text(&output.stderr));
    assert!(!std::path::Path::new(&dir).exists(), "nothing was started");
}

#[test]
fn missing_server_binaries_name_the_next_step() {
    let dir = std::env::temp_dir().join(format!("tidemark-cli-{}", uuid::Uuid::new_v4().simple()));
    let text_dir = dir.to_string_lossy().into_owned();
    let output = tidemark(
        &["dev", "--listen", "127.0.0.1:0", "--data-dir", &text_dir],
        &[("TIDEMARK_PG_BIN", "/nowhere"), ("TIDEMARK__TELEMETRY__LISTEN", "off")],
    );
    assert_eq!(output.status.code(), Some(4), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("make setup"), "{}", text(&output.stderr));
    std::fs::remove_dir_all(dir).expect("removes");
}

#[cfg(target_os = "linux")]
#[test]
fn what_a_benchmark_starts_ends_with_it_also_when_it_is_killed() {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;
    use std::time::{Duration, Instant};

    // A shell in the place of the benchmark: it says who its child is, and waits.
    let script = "TIDEMARK_END_WITH_PARENT=$$ \"$0\" sim --listen 127.0.0.1:0 & echo pid $!; wait";
    let mut parent = Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_tidemark")])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines: Vec<String> =
        BufReader::new(parent.stdout.take().unwrap()).lines().take(2).map(Result::unwrap).collect();
    let pid = lines.iter().find_map(|line| line.strip_prefix("pid ")).unwrap();
    assert!(lines.iter().any(|line| line.starts_with("http://")), "the node serves: {lines:?}");
    let stat = format!("/proc/{pid}/stat");
    assert!(std::fs::exists(&stat).unwrap());
    parent.kill().unwrap();
    parent.wait().unwrap();
    // Gone, or waiting for somebody to take note of it.
    let has_ended = || std::fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "));
    let deadline = Instant::now() + Duration::from_secs(30);
    while !has_ended() {
        assert!(Instant::now() < deadline, "the node lives on");
        std::thread::sleep(Duration::from_millis(20));
    }
}
