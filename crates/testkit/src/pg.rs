//! The shared cluster and a fresh database per test, copied from a migrated template in milliseconds.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, bail, ensure};

/// A database of one test's own. It goes away with the cluster; the name is unique.
#[derive(Debug, Clone)]
pub struct TestDb {
    /// `postgres://…`, superuser.
    pub url: String,
    /// The database's name.
    pub name: String,
}

impl TestDb {
    /// A database with all migrations applied.
    pub async fn new() -> anyhow::Result<Self> {
        let cluster = cluster()?;
        Self::create(cluster, &cluster.template).await
    }
    /// A database with nothing in it.
    pub async fn empty() -> anyhow::Result<Self> {
        Self::create(cluster()?, "template0").await
    }
    async fn create(cluster: &Cluster, template: &str) -> anyhow::Result<Self> {
        let name = format!("t_{}", uuid::Uuid::new_v4().simple());
        let sql = format!("create database {name} template {template}");
        // Copying a template fails while another connection is on it; another test may be copying.
        for attempt in 0.. {
            match cluster.psql("postgres", &sql) {
                Ok(_) => break,
                Err(error) if attempt > 100 => return Err(error),
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(50)).await,
            }
        }
        Ok(Self { url: cluster.url(&name), name })
    }
}

struct Cluster {
    bin: PathBuf,
    dir: PathBuf,
    port: u16,
    template: String,
    /// Held until the process ends; the watchdog waits for it.
    _user: File,
}

impl Cluster {
    fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }
    fn psql(&self, database: &str, sql: &str) -> anyhow::Result<String> {
        psql(&self.bin, &self.url(database), sql)
    }
}

/// A cluster of one test's own, which may die and come back. Its database has all migrations applied.
pub struct PrivatePg {
    /// `postgres://…`, superuser.
    pub url: String,
    bin: PathBuf,
    port: crate::process::Port,
    process: Option<crate::process::Process>,
    dir: PathBuf,
}

impl PrivatePg {
    /// Makes and starts one.
    pub fn start() -> anyhow::Result<Self> {
        let bin = server_binaries()?;
        let dir = std::env::temp_dir().join(format!("tidemark-pg-{}", uuid::Uuid::new_v4().simple()));
        fs::create_dir_all(&dir)?;
        give_to_server_user(&dir)?;
        initdb(&bin, &dir)?;
        let port = crate::process::Port::free()?;
        let url = format!("postgres://postgres@127.0.0.1:{}/t", port.number);
        let mut server = Self { url, bin, port, process: None, dir };
        server.launch()?;
        server.psql("postgres", "create database t")?;
        server.psql("t", &migrations()?)?;
        Ok(server)
    }

    /// `kill -9` of the whole server.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Starts it after a kill; returns when it answers.
    pub fn launch(&mut self) -> anyhow::Result<()> {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        loop {
            let program = as_server_user(Path::new("--pdeathsig=KILL"));
            let mut args: Vec<String> =
                program.get_args().map(|arg| arg.to_string_lossy().into_owned()).collect();
            if args.is_empty() {
                args.push("--pdeathsig=KILL".to_owned());
            }
            args.push(self.bin.join("postgres").display().to_string());
            let port = self.port.number.to_string();
            args.extend(["-D".to_owned(), self.dir.display().to_string(), "-p".to_owned(), port]);
            let settings = ["listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off"];
            args.extend(settings.iter().flat_map(|setting| ["-c".to_owned(), (*setting).to_owned()]));
            let log = self.dir.with_extension("log");
            self.process = Some(crate::process::Process::start(Path::new("setpriv"), &args, &log)?);
            // Backends of a killed server need a moment to go; until then a new one refuses to start.
            let patience = std::time::Instant::now() + std::time::Duration::from_secs(5);
            while std::time::Instant::now() < patience {
                if self.psql("postgres", "select 1").is_ok() {
                    return Ok(());
                }
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            ensure!(
                std::time::Instant::now() < deadline,
                "a private Postgres does not start: {}",
                fs::read_to_string(&log).unwrap_or_default()
            );
            self.process = None;
        }
    }

    fn psql(&self, database: &str, sql: &str) -> anyhow::Result<String> {
        let url = format!("postgres://postgres@127.0.0.1:{}/{database}", self.port.number);
        psql(&self.bin, &url, sql)
    }
}

impl Drop for PrivatePg {
    fn drop(&mut self) {
        self.process = None;
        let _ = fs::remove_dir_all(&self.dir);
        let _ = fs::remove_file(self.dir.with_extension("log"));
    }
}

fn psql(bin: &Path, url: &str, sql: &str) -> anyhow::Result<String> {
    let output = Command::new(bin.join("psql"))
        .args(["-q", "-X", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", sql, url])
        .output()
        .context("psql does not start")?;
    ensure!(output.status.success(), "psql: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Newest installed server binaries.
pub fn server_binaries() -> anyhow::Result<PathBuf> {
    if let Some(dir) = std::env::var_os("TIDEMARK_PG_BIN") {
        return Ok(PathBuf::from(dir));
    }
    let mut versions: Vec<(u32, PathBuf)> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin"))))
        .filter(|(_, bin)| bin.join("initdb").exists())
        .collect();
    versions.sort();
    match versions.pop() {
        Some((_, bin)) => Ok(bin),
        None => bail!("no Postgres server binaries found: run `make setup-test`, or set TIDEMARK_PG_BIN"),
    }
}

fn cluster() -> anyhow::Result<&'static Cluster> {
    static CLUSTER: OnceLock<Result<Cluster, String>> = OnceLock::new();
    let started = CLUSTER.get_or_init(|| start().map_err(|error| format!("{error:#}")));
    started.as_ref().map_err(|error| anyhow::anyhow!("the test cluster does not start: {error}"))
}

fn start() -> anyhow::Result<Cluster> {
    let bin = server_binaries()?;
    // Postgres refuses root and must be able to enter its directory: not below a home of root's.
    let dir = std::env::temp_dir().join(format!("tidemark-test-{}", fingerprint(&crate::scratch_dir())));
    fs::create_dir_all(&dir)?;
    let gate = File::create(dir.join("gate.lock"))?;
    gate.lock()?;
    let user = File::options().create(true).append(true).open(dir.join("users.lock"))?;
    user.lock_shared()?;
    let port_file = dir.join("port");
    let running = fs::read_to_string(&port_file).ok().and_then(|text| text.trim().parse::<u16>().ok());
    let mut cluster = Cluster { bin, dir, port: running.unwrap_or(0), template: String::new(), _user: user };
    if running.is_none() || cluster.psql("postgres", "select 1").is_err() {
        cluster.port = launch(&cluster.bin, &cluster.dir)?;
        fs::write(&port_file, cluster.port.to_string())?;
    }
    cluster.template = template(&cluster)?;
    drop(gate);
    Ok(cluster)
}

fn launch(bin: &Path, dir: &Path) -> anyhow::Result<u16> {
    let data = dir.join("data");
    // A stale cluster: something ended it without removing its files.
    let _ = as_server_user(&bin.join("pg_ctl")).args(["-m", "immediate", "stop", "-D"]).arg(&data).output();
    let _ = fs::remove_dir_all(&data);
    fs::create_dir(&data)?;
    give_to_server_user(&data)?;
    initdb(bin, &data)?;
    let port = std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    let options = format!(
        "-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off -c max_connections=400 \
         -c shared_buffers=256MB -c autovacuum_naptime=10s"
    );
    let log = data.join("server.log");
    let started = as_server_user(&bin.join("pg_ctl"))
        .args(["-w", "-t", "60", "start", "-o", &options, "-D"])
        .arg(&data)
        .arg("-l")
        .arg(&log)
        .current_dir(&data)
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()?;
    ensure!(started.success(), "pg_ctl start: {}", fs::read_to_string(&log).unwrap_or_default());
    watchdog(bin, dir, &data)?;
    Ok(port)
}

fn initdb(bin: &Path, data: &Path) -> anyhow::Result<()> {
    let output = as_server_user(&bin.join("initdb"))
        .args(["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "-D"])
        .arg(data)
        .current_dir(data)
        .output()?;
    ensure!(output.status.success(), "initdb: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Ends the cluster when nobody has held the users' lock for a while. It stops the server while it holds
/// the lock itself, so that a test that starts at that moment waits and then starts a new one.
const WATCHDOG: &str = r#"
idle=0
while [ $idle -lt 15 ]; do
    sleep 2
    if flock -n -x users.lock true; then idle=$((idle + 1)); else idle=0; fi
    if [ $idle -eq 15 ]; then
        flock -n -x users.lock sh -c '"$@"; rm -f port; mv data old-$$' stop "$@" || idle=0
    fi
done
# Gigabytes take their time; whoever starts the next cluster must not wait for it.
rm -rf old-*
"#;

fn watchdog(bin: &Path, dir: &Path, data: &Path) -> anyhow::Result<()> {
    let stop = as_server_user(&bin.join("pg_ctl"));
    Command::new("setsid")
        .args(["sh", "-c", WATCHDOG, "watchdog"])
        .arg(stop.get_program())
        .args(stop.get_args())
        .args(["-m", "immediate", "stop", "-D"])
        .arg(data)
        .current_dir(dir)
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .context("setsid does not start")?;
    Ok(())
}

/// The template for this checkout's migrations: named by their content, made once.
fn template(cluster: &Cluster) -> anyhow::Result<String> {
    let sql = migrations()?;
    let name = format!("template_{}", fingerprint(Path::new(&sql)));
    let there = cluster.psql("postgres", &format!("select 1 from pg_database where datname = '{name}'"))?;
    if there.is_empty() {
        let draft = format!("draft_{}", uuid::Uuid::new_v4().simple());
        cluster.psql("postgres", &format!("create database {draft}"))?;
        cluster.psql(&draft, &sql)?;
        cluster.psql("postgres", &format!("alter database {draft} rename to {name}"))?;
    }
    Ok(name)
}

/// This checkout's migrations in order, as one script.
fn migrations() -> anyhow::Result<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../store/migrations");
    let mut files: Vec<PathBuf> = fs::read_dir(&folder)?.flatten().map(|entry| entry.path()).collect();
    files.sort();
    Ok(files.iter().map(fs::read_to_string).collect::<Result<Vec<_>, _>>()?.join("\n;\n"))
}

fn fingerprint(of: &Path) -> String {
    format!("{:08x}", tidemark_model::partition::fnv1a(of.as_os_str().as_encoded_bytes()))
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

/// `program` as a user Postgres accepts: ourselves, or `nobody` when we are root.
pub fn as_server_user(program: &Path) -> Command {
    if !is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(program);
    command
}

fn give_to_server_user(dir: &Path) -> anyhow::Result<()> {
    if is_root() {
        std::os::unix::fs::chown(dir, Some(65534), Some(65534))?;
    }
    fs::set_permissions(dir, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
    Ok(())
}
