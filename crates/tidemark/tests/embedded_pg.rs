//! The private Postgres on real servers: start, crash, restart, and everything it must refuse.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tidemark::embedded_pg::{EmbeddedPg, Options, PgError};
use tidemark_store::{Db, DbOptions, migrate};

/// A folder that goes away with its test.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        let dir = std::env::temp_dir().join(format!("tidemark-e-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir_all(&dir).expect("a folder");
        Self(dir)
    }
    fn options(&self) -> Options {
        Options { data_dir: self.0.clone(), port: None }
    }
}
impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

async fn count(server: &EmbeddedPg, sql: &str) -> i64 {
    let db = Db::open(server.url(), &DbOptions::default()).expect("a pool");
    let conn = db.conn().await.expect("connects");
    conn.query_one("count", sql, &[]).await.expect("answers").get(0)
}

async fn execute(server: &EmbeddedPg, sql: &str) {
    let db = Db::open(server.url(), &DbOptions::default()).expect("a pool");
    db.conn().await.expect("connects").batch("write", sql).await.expect("writes");
}

fn postmaster(dir: &Path) -> Option<u32> {
    let text = std::fs::read_to_string(dir.join("postgres/postmaster.pid")).ok()?;
    text.lines().next()?.trim().parse().ok()
}

/// A zombie is as dead as it gets: nobody may be there to collect it.
fn is_alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

fn kill(signal: &str, pid: u32) {
    let status = Command::new("kill").args([signal, &pid.to_string()]).status().expect("kill runs");
    assert!(status.success(), "kill {signal} {pid}");
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_starts_migrates_stops_and_resumes() {
    let scratch = Scratch::new();
    let server = EmbeddedPg::start(&scratch.options()).await.expect("starts");
    let db = Db::open(server.url(), &DbOptions::default()).expect("a pool");
    let applied = migrate::run(&db).await.expect("migrates");
    assert_eq!(applied.now.len(), migrate::MIGRATIONS.len());
    execute(&server, "create table kept (n int); insert into kept values (1)").await;
    db.close();
    let pid = postmaster(&scratch.0).expect("runs");
    server.stop().await.expect("stops");
    assert!(!is_alive(pid));
    let server = EmbeddedPg::start(&scratch.options()).await.expect("starts again");
    assert_eq!(count(&server, "select count(*) from kept").await, 1);
    server.stop().await.expect("stops");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_user_is_refused_and_the_first_goes_on() {
    let scratch = Scratch::new();
    let server = EmbeddedPg::start(&scratch.options()).await.expect("starts");
    let error = EmbeddedPg::start(&scratch.options()).await.expect_err("in use");
    assert!(
        matches!(&error, PgError::InUse { pid, .. } if *pid == std::process::id().to_string()),
        "{error}"
    );
    assert!(error.to_string().contains("--data-dir"), "{error}");
    assert_eq!(count(&server, "select 1::bigint").await, 1);
    server.stop().await.expect("stops");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crashed_server_is_started_again_with_everything_committed() {
    let scratch = Scratch::new();
    let server = std::sync::Arc::new(EmbeddedPg::start(&scratch.options()).await.expect("starts"));
    execute(&server, "create table kept (n int); insert into kept values (1)").await;
    let stop = tokio_util::sync::CancellationToken::new();
    let mut tasks = tokio::task::JoinSet::new();
    let (kept, token) = (std::sync::Arc::clone(&server), stop.clone());
    tasks.spawn(async move { kept.keep_running(&token).await.map_err(|error| error.to_string()) });
    let first = postmaster(&scratch.0).expect("runs");
    kill("-9", first);
    until("another server runs", || postmaster(&scratch.0).is_some_and(|pid| pid != first)).await;
    let db = Db::open(server.url(), &DbOptions::default()).expect("a pool");
    let deadline = Instant::now() + Duration::from_secs(120);
    let rows = loop {
        assert!(Instant::now() < deadline, "waited in vain for an answer");
        match db.conn().await {
            Ok(conn) => match conn.query_one("count", "select count(*) from kept", &[]).await {
                Ok(row) => break row.get::<_, i64>(0),
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            },
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    assert_eq!(rows, 1);
    stop.cancel();
    tasks.join_next().await.expect("a task").expect("no panic").expect("no error");
    std::sync::Arc::into_inner(server).expect("the only one").stop().await.expect("stops");
}

#[tokio::test(flavor = "multi_thread")]
async fn stale_files_of_a_crash_are_no_obstacle() {
    let scratch = Scratch::new();
    EmbeddedPg::start(&scratch.options()).await.expect("starts").stop().await.expect("stops");
    // The pid of a process that lives and is no server: what a container's restart leaves behind.
    std::fs::write(
        scratch.0.join("postgres/postmaster.pid"),
        format!("{}\n{}\n1\n5432\n/x\n\n  1 1\n", std::process::id(), scratch.0.join("postgres").display()),
    )
    .expect("writes");
    std::fs::write(scratch.0.join("socket/.s.PGSQL.5432.lock"), format!("{}\n", std::process::id()))
        .expect("writes");
    std::fs::write(scratch.0.join("socket/.s.PGSQL.5432"), "").expect("writes");
    let server = EmbeddedPg::start(&scratch.options()).await.expect("starts");
    assert_eq!(count(&server, "select 1::bigint").await, 1);
    server.stop().await.expect("stops");
}

#[tokio::test]
async fn another_major_version_is_refused_with_the_way_out() {
    let scratch = Scratch::new();
    std::fs::create_dir_all(scratch.0.join("postgres")).expect("a folder");
    std::fs::write(scratch.0.join("postgres/PG_VERSION"), "9\n").expect("writes");
    let error = EmbeddedPg::start(&scratch.options()).await.expect_err("refused");
    assert!(matches!(&error, PgError::OtherMajor { made_by, .. } if made_by == "9"), "{error}");
    assert!(error.to_string().contains("pg_upgrade"), "{error}");
    assert!(scratch.0.join("postgres/PG_VERSION").exists(), "nothing was touched");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_named() {
    let scratch = Scratch::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
    let port = taken.local_addr().expect("an address").port();
    let options = Options { port: Some(port), ..scratch.options() };
    let error = EmbeddedPg::start(&options).await.expect_err("in use");
    assert!(matches!(error, PgError::PortInUse { port: named } if named == port), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_path_gets_a_short_socket() {
    let scratch = Scratch::new();
    let dir = scratch.0.join("a-rather-long-folder-name-that-people-do-have".repeat(3));
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").expect("binds").local_addr().expect("an address").port();
    let server = EmbeddedPg::start(&Options { data_dir: dir, port: Some(port) }).await.expect("starts");
    assert_eq!(count(&server, "select 1::bigint").await, 1);
    std::net::TcpStream::connect(("127.0.0.1", port)).expect("the loopback port is open too");
    server.stop().await.expect("stops");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_only_we_may_enter_works_too() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = Scratch::new();
    // Root's own home looks like this: the server's user cannot come here by itself.
    std::fs::set_permissions(&scratch.0, std::fs::Permissions::from_mode(0o700)).expect("protects");
    let options = Options { data_dir: scratch.0.join("below"), port: None };
    let server = EmbeddedPg::start(&options).await.expect("starts");
    execute(&server, "create table kept (n int)").await;
    server.stop().await.expect("stops");
    EmbeddedPg::start(&options).await.expect("starts again").stop().await.expect("stops");
}

/// `tidemark dev` as a process of its own; ended with its test, also when that fails.
struct Dev {
    child: Child,
    telemetry: u16,
}

impl Dev {
    fn start(scratch: &Scratch) -> Self {
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
        let telemetry = free.local_addr().expect("an address").port();
        drop(free);
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(scratch.0.join("dev.log"))
            .expect("a log");
        let child = Command::new(env!("CARGO_BIN_EXE_tidemark"))
            .args(["dev", "--listen", "127.0.0.1:0", "--data-dir"])
            .arg(&scratch.0)
            .env("TIDEMARK__TELEMETRY__LISTEN", format!("127.0.0.1:{telemetry}"))
            .env_remove("TIDEMARK_CONFIG")
            .current_dir(&scratch.0)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("starts");
        Self { child, telemetry }
    }

    /// Status line and body.
    fn get(&self, path: &str) -> Option<String> {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", self.telemetry)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        stream
            .write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").as_bytes())
            .ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    }

    fn is_ready(&self) -> bool {
        self.get("/readyz").is_some_and(|answer| answer.starts_with("HTTP/1.1 200"))
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_leaves_no_server_and_the_next_start_recovers() {
    let scratch = Scratch::new();
    let mut dev = Dev::start(&scratch);
    until("it runs", || dev.is_ready()).await;
    let server = postmaster(&scratch.0).expect("runs");
    dev.child.kill().expect("kills");
    dev.child.wait().expect("ends");
    // A restart that does not wait for anything.
    let mut dev = Dev::start(&scratch);
    until("it runs again", || dev.is_ready()).await;
    assert!(!is_alive(server), "the orphan is still there");
    let second = postmaster(&scratch.0).expect("runs");
    dev.child.kill().expect("kills");
    dev.child.wait().expect("ends");
    until("the server followed", || !is_alive(second)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_stops_everything_in_order() {
    for signal in ["-INT", "-TERM"] {
        let scratch = Scratch::new();
        let mut dev = Dev::start(&scratch);
        until("it runs", || dev.is_ready()).await;
        let server = postmaster(&scratch.0).expect("runs");
        kill(signal, dev.child.id());
        let status = dev.child.wait().expect("ends");
        let log = std::fs::read_to_string(scratch.0.join("dev.log")).unwrap_or_default();
        assert!(status.success(), "{signal}: {status}\n{log}");
        assert!(!is_alive(server), "{signal} left the server");
        assert_eq!(postmaster(&scratch.0), None, "{signal} left a pid file");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_process_shows_itself_and_survives_the_loss_of_its_database() {
    let scratch = Scratch::new();
    let mut dev = Dev::start(&scratch);
    until("it is ready", || dev.is_ready()).await;
    assert!(dev.get("/healthz").is_some_and(|answer| answer.contains("ok")));
    assert!(
        dev.get("/metrics").is_some_and(|answer| answer.contains("tidemark_role_up{role=\"heartbeat\"} 1"))
    );
    let status = || {
        let output = Command::new(env!("CARGO_BIN_EXE_tidemark"))
            .args(["status", "--json", "--data-dir"])
            .arg(&scratch.0)
            .env_remove("TIDEMARK_CONFIG")
            .current_dir(&scratch.0)
            .output()
            .expect("runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    until("status shows it", || status().contains("\"running\"")).await;
    let first = postmaster(&scratch.0).expect("runs");
    kill("-9", first);
    until("another server runs", || postmaster(&scratch.0).is_some_and(|pid| pid != first && is_alive(pid)))
        .await;
    until("it is ready again", || dev.is_ready() && status().contains("\"running\"")).await;
    assert!(dev.child.try_wait().expect("asks").is_none(), "the process is still the same");
    let log = std::fs::read_to_string(scratch.0.join("dev.log")).expect("a log");
    for line in log.lines() {
        let line: serde_json::Value = serde_json::from_str(line).expect("every line is JSON");
        assert!(line.get("trace_id").is_some() && line.get("action").is_some(), "{line}");
    }
}
