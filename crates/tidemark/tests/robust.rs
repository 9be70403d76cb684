//! What goes away comes back: the database, the node, room on the disk. Nobody has to do anything but that.

mod world;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tidemark::embedded_pg::{EmbeddedPg, Options};
use tidemark_sim::{FaultProfile, Sim, SimConfig};
use world::{Setup, World};

/// A machine with other work to do is slow.
const PATIENCE: Duration = Duration::from_secs(120);

/// A folder that goes away with its test.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        let dir = std::env::temp_dir().join(format!("tidemark-r-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir_all(&dir).expect("a folder");
        Self(dir)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_role_in_a_process_of_its_own_survives_the_loss_of_its_database() {
    let scratch = Scratch::new();
    let options = Options { data_dir: scratch.0.clone(), port: None };
    let server = EmbeddedPg::start(&options).await.expect("starts");
    let sim = Sim::new(SimConfig::small(11));
    sim.mine(30);
    let url = server.url().expose().to_string();
    let mut world = World::on(url, sim, vec![FaultProfile::default()], Setup::default()).await;
    let mut roles: Vec<_> =
        ["ingest", "relay", "workers", "api"].map(|role| world.start(&["run", "--roles", role])).into();
    world.settle(&mut roles[0], 11).await;

    server.stop().await.expect("stops");
    world.sim.mine(7);
    // Everybody has noticed: nothing can be read, written or carried now.
    for role in &mut roles {
        until("it has noticed", || role.log().contains("cannot connect") || role.has_ended()).await;
        assert!(!role.has_ended(), "{}", role.log());
    }
    let server = EmbeddedPg::start(&options).await.expect("starts again");
    world.settle(&mut roles[0], 11).await;
    for role in roles {
        let ended = role.stop().await;
        assert_eq!(ended.code, Some(0), "{}", ended.err);
    }
    world.verify(11).await;
    server.stop().await.expect("stops");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_gone_is_waited_for() {
    let sim = Sim::new(SimConfig::small(12));
    sim.mine(30);
    let mut world = World::plain(sim).await;
    let mut running = world.live();
    world.settle(&mut running, 12).await;
    let node = world.servers.remove(0);
    let address = node.address;
    node.stop().await;
    world.sim.mine(9);
    world.reach(&mut running, "select count(*) from app.indexing_errors", 1).await;
    let node = world.sim.serve(address, FaultProfile::default()).await.expect("serves again");
    world.servers.push(node);
    world.settle(&mut running, 12).await;
    assert_eq!(running.stop().await.code, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_of_a_newer_version_is_refused_and_left_alone() {
    let mut world = World::plain(Sim::new(SimConfig::small(13))).await;
    world.run(&["migrate"]).await.succeeded("migrates");
    let conn = world.db.conn().await.expect("connects");
    conn.batch("pretend", "insert into system.migrations (name, checksum) values ('9999_later', '')")
        .await
        .expect("writes");
    drop(conn);
    for args in [["migrate"].as_slice(), &["run"]] {
        let ended = world.run(args).await;
        assert_eq!(ended.code, Some(1), "{args:?}: {}", ended.err);
        assert!(ended.err.contains("newer Tidemark"), "{args:?}: {}", ended.err);
    }
    assert_eq!(world.number("select count(*) from system.processes").await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_ends_the_start_and_names_the_setting() {
    let mut world = World::plain(Sim::new(SimConfig::small(14))).await;
    world.run(&["migrate"]).await.succeeded("migrates");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    for (variable, key) in [
        ("TIDEMARK__API__LISTEN", "api.listen"),
        ("TIDEMARK__API__ADMIN_LISTEN", "api.admin_listen"),
        ("TIDEMARK__TELEMETRY__LISTEN", "telemetry.listen"),
    ] {
        let token = ("TIDEMARK__API__ADMIN_TOKEN", "a-token-that-is-long-enough-for-this".to_owned());
        world.env = vec![(variable, address.clone()), token];
        let ended = world.run(&["run"]).await;
        assert_eq!(ended.code, Some(1), "{variable}: {}", ended.err);
        let said = format!("{address} is in use: stop what listens there, or set {key}");
        assert!(ended.err.contains(&said), "{variable}: {}", ended.err);
    }
    assert_eq!(world.number("select count(*) from system.processes").await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn status_is_watched_while_its_database_goes_and_comes_back() {
    let scratch = Scratch::new();
    let options = Options { data_dir: scratch.0.clone(), port: None };
    let server = EmbeddedPg::start(&options).await.expect("starts");
    let url = server.url().expose().to_string();
    let sim = Sim::new(SimConfig::small(15));
    let mut world = World::on(url, sim, vec![FaultProfile::default()], Setup::default()).await;
    world.run(&["sync", "--until", "finalized"]).await.succeeded("syncs");
    let watching = world.start(&["status", "--watch"]);
    let screens = |watching: &world::Running| watching.said().matches("\x1b[2J").count();
    until("it shows the network twice", || watching.said().matches("simnet").count() >= 2).await;
    server.stop().await.expect("stops");
    until("it says what is wrong", || watching.said().contains("cannot connect")).await;
    let server = EmbeddedPg::start(&options).await.expect("starts again");
    let before = screens(&watching);
    until("it shows the network again", || {
        let said = watching.said();
        let latest = said.rsplit("\x1b[2J").next().unwrap_or_default();
        screens(&watching) > before + 1 && latest.contains("simnet")
    })
    .await;
    assert_eq!(watching.stop().await.code, Some(0));
    server.stop().await.expect("stops");
}

/// A small file system in memory, unmounted with its test; none where we may not mount.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn new(at: &Path, mebibytes: u32) -> Option<Self> {
        std::fs::create_dir_all(at).expect("a folder");
        let size = format!("size={mebibytes}m,mode=755");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "tmpfs"])
            .arg(at)
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
        if !mounted {
            eprintln!("SKIPPED: a full disk needs a mount of its own, and this user may not mount");
        }
        mounted.then(|| Self(at.to_path_buf()))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn dev(dir: &Path, log: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidemark"));
    command
        .args(["dev", "--listen", "127.0.0.1:0", "--data-dir"])
        .arg(dir)
        .env("TIDEMARK__TELEMETRY__LISTEN", "off")
        .env_remove("TIDEMARK_CONFIG")
        .current_dir(std::env::temp_dir())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(log).expect("a log"));
    command
}

#[test]
fn a_disk_that_is_full_from_the_start_is_named() {
    let scratch = Scratch::new();
    let Some(disk) = SmallDisk::new(&scratch.0.join("disk"), 24) else { return };
    let log = scratch.0.join("log");
    let status = dev(&disk.0.join("data"), &log).status().expect("runs");
    let said = std::fs::read_to_string(&log).expect("a log");
    assert_eq!(status.code(), Some(4), "{said}");
    assert!(said.contains("no space left") && said.contains("start again"), "{said}");
}

/// Ends with its test, also when that fails.
struct Owned(std::process::Child);

impl Drop for Owned {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Blocks in the read models of the private database in `dir`; none while it does not answer.
async fn projected(dir: &Path) -> Option<i64> {
    let url = std::fs::read_to_string(dir.join("url")).ok()?;
    let url = tidemark_model::redact::RedactedUrl::parse(&url).ok()?;
    let db = tidemark_store::Db::open(&url, &tidemark_store::DbOptions::default()).ok()?;
    let conn = db.conn().await.ok()?;
    let row = conn.query_opt("ask", "select projected_height from projection.network_status", &[]).await;
    row.ok()??.get(0)
}

async fn projected_above(dir: &Path, height: i64, log: &Path) -> i64 {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match projected(dir).await {
            Some(now) if now > height => return now,
            now => assert!(
                Instant::now() < deadline,
                "projected {now:?}, not above {height}\n{}",
                std::fs::read_to_string(log).unwrap_or_default()
            ),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_fills_up_is_waited_out_and_nothing_is_lost() {
    let scratch = Scratch::new();
    let Some(disk) = SmallDisk::new(&scratch.0.join("disk"), 400) else { return };
    let (dir, log) = (disk.0.join("data"), scratch.0.join("log"));
    let mut running = Owned(dev(&dir, &log).spawn().expect("starts"));
    let before = projected_above(&dir, 400, &log).await;
    // All that is left, to the last byte.
    let filler = disk.0.join("filler");
    let mut file = std::fs::File::create(&filler).expect("a file");
    let piece = vec![0_u8; 1 << 16];
    while std::io::Write::write_all(&mut file, &piece).is_ok() {}
    drop(file);
    let said = || std::fs::read_to_string(&log).unwrap_or_default().to_lowercase();
    until("it says that there is no room", || said().contains("no space left")).await;
    std::fs::remove_file(&filler).expect("makes room");
    projected_above(&dir, before + 3, &log).await;
    assert!(running.0.try_wait().expect("asks").is_none(), "the process is still the same");
    let asked = Command::new("kill").args(["-INT", &running.0.id().to_string()]).status().expect("kill runs");
    assert!(asked.success());
    let status = running.0.wait().expect("ends");
    assert!(status.success(), "{}", std::fs::read_to_string(&log).unwrap_or_default());
}
