//! The servers themselves: they start, restart, keep or lose their disk, and leave nothing behind.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use tidemark_testkit::{Anvil, Nats, Redis};

fn address(url: &str) -> &str {
    url.split_once("://").expect("a URL").1
}

fn redis(url: &str, command: &str) -> String {
    let mut stream = TcpStream::connect(address(url)).expect("connects");
    stream.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout");
    stream.write_all(format!("{command}\r\n").as_bytes()).expect("writes");
    let mut answer = [0; 64];
    let length = stream.read(&mut answer).expect("answers");
    String::from_utf8_lossy(&answer[..length]).into_owned()
}

#[tokio::test]
async fn redis_keeps_its_disk_or_loses_it_as_asked() {
    let mut server = Redis::start().await.expect("starts");
    assert_eq!(redis(&server.url, "SET k v"), "+OK\r\n");
    server.restart_with_disk().await.expect("restarts");
    assert_eq!(redis(&server.url, "GET k"), "$1\r\nv\r\n");
    server.restart_without_disk().await.expect("restarts");
    assert_eq!(redis(&server.url, "GET k"), "$-1\r\n");
    server.stop();
    TcpStream::connect(address(&server.url)).expect_err("nobody listens");
}

#[tokio::test]
async fn nats_restarts_on_its_port() {
    let mut server = Nats::start().await.expect("starts");
    server.restart_with_disk().await.expect("restarts");
    server.restart_without_disk().await.expect("restarts");
    let url = server.url.clone();
    drop(server);
    TcpStream::connect(address(&url)).expect_err("nobody listens");
}

#[tokio::test]
async fn anvil_answers() {
    let node = Anvil::start(&["--chain-id", "31337", "--silent"]).await.expect("starts");
    assert!(node.url.starts_with("http://127.0.0.1:"));
}

/// Runs as the child of the next test.
#[tokio::test]
async fn hold_a_server_when_asked() {
    let Ok(report) = std::env::var("TESTKIT_REPORT") else { return };
    let server = Redis::start().await.expect("starts");
    std::fs::write(report, &server.url).expect("reports");
    std::future::pending::<()>().await;
}

#[test]
fn a_killed_test_leaves_no_server() {
    let report = std::env::temp_dir().join(format!("tidemark-report-{}", std::process::id()));
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "hold_a_server_when_asked"])
        .env("TESTKIT_REPORT", &report)
        .spawn()
        .expect("starts");
    let deadline = Instant::now() + Duration::from_secs(30);
    let url = loop {
        match std::fs::read_to_string(&report) {
            Ok(url) if !url.is_empty() => break url,
            _ => assert!(Instant::now() < deadline, "the child did not start its server"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    TcpStream::connect(address(&url)).expect("the server listens");
    child.kill().expect("kills");
    child.wait().expect("ends");
    while TcpStream::connect(address(&url)).is_ok() {
        assert!(Instant::now() < deadline, "the server outlived its test");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::fs::remove_file(&report).expect("removes");
}
