//! A private Postgres for `dev` and `sync`: own data directory, own socket, never the system's cluster.
//!
//! Who may use a data directory is decided by a file lock that ends with its holder, so a crash leaves
//! nothing to clean up by hand: with the lock in our hands, a server that still runs there is an orphan and
//! is stopped, and a pid file or socket without a server is stale and is removed. The server gets SIGINT
//! (fast shutdown) from the kernel when this process dies, also by `kill -9`.

mod find;
mod user;

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use tidemark_model::redact::RedactedUrl;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use user::ServerUser;

/// The oldest Postgres we run on.
pub const MAJOR_MIN: u32 = 15;

/// What to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Holds `postgres/` and everything beside it.
    pub data_dir: PathBuf,
    /// A loopback port beside the socket.
    pub port: Option<u16>,
}

/// Why there is no private Postgres, with the next step.
#[derive(Debug, thiserror::Error)]
pub enum PgError {
    /// Nothing installed.
    #[error(
        "no Postgres server binaries found (looked in {looked_in}): run `make setup`, or install them (Debian: \
         apt-get install postgresql; macOS: brew install postgresql@17), or name their folder in TIDEMARK_PG_BIN"
    )]
    NoBinaries {
        /// Folders, for the reader.
        looked_in: String,
    },
    /// Installed, but too old.
    #[error(
        "Postgres {found} in {bin} is too old: install {MAJOR_MIN} or newer, or name it in TIDEMARK_PG_BIN"
    )]
    TooOld {
        /// Its major version.
        found: u32,
        /// Where it is.
        bin: PathBuf,
    },
    /// The files were made by another version.
    #[error(
        "{dir} was made by Postgres {made_by}, installed is {installed}: install Postgres {made_by}, name it in \
         TIDEMARK_PG_BIN, upgrade the folder with pg_upgrade, or use another --data-dir"
    )]
    OtherMajor {
        /// The cluster.
        dir: PathBuf,
        /// Major version in PG_VERSION.
        made_by: String,
        /// Major versions found.
        installed: String,
    },
    /// Another process of ours works there.
    #[error("{dir} is in use by another tidemark (process {pid}): stop it, or use another --data-dir")]
    InUse {
        /// The data directory.
        dir: PathBuf,
        /// As that process wrote it down.
        pid: String,
    },
    /// No room.
    #[error(
        "no space left on the disk of {dir}: free some, then start again; nothing that was committed is lost"
    )]
    DiskFull {
        /// The data directory.
        dir: PathBuf,
    },
    /// Somebody listens there.
    #[error("port {port} of 127.0.0.1 is in use: choose another database.embedded_port, or none")]
    PortInUse {
        /// The port.
        port: u16,
    },
    /// Root's own folder, and the kernel does not let us open it for the server.
    #[error(
        "user {user} may not enter {dir}, and Postgres refuses to run as root: use a --data-dir below a folder \
         others may enter, such as /var/lib/tidemark, or run as another user"
    )]
    NotEnterable {
        /// The unprivileged user.
        user: String,
        /// The data directory.
        dir: PathBuf,
    },
    /// A step failed.
    #[error("{step} failed: {reason}\n    see {log}")]
    Failed {
        /// Which.
        step: &'static str,
        /// The end of what it said.
        reason: String,
        /// Where the rest is.
        log: PathBuf,
    },
    /// A file could not be had.
    #[error("cannot {doing} {path}: {source}")]
    File {
        /// What was being done.
        doing: &'static str,
        /// To which file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
}

fn file<'p>(doing: &'static str, path: &'p Path) -> impl FnOnce(std::io::Error) -> PgError + 'p {
    move |source| match source.kind() {
        std::io::ErrorKind::StorageFull => PgError::DiskFull { dir: path.to_path_buf() },
        _ => PgError::File { doing, path: path.to_path_buf(), source },
    }
}

/// A running private server. Dropping it asks the server to shut down; [`EmbeddedPg::stop`] waits for that.
#[derive(Debug)]
pub struct EmbeddedPg {
    place: Place,
    url: RedactedUrl,
    running: tokio::sync::Mutex<Option<Running>>,
    /// Held while we live: the right to use the directory.
    _lock: File,
}

/// Where everything is.
#[derive(Debug, Clone)]
struct Place {
    data_dir: PathBuf,
    cluster: PathBuf,
    socket_dir: PathBuf,
    log: PathBuf,
    port: Option<u16>,
    bin: PathBuf,
    user: ServerUser,
}

/// One life of the server process.
#[derive(Debug)]
struct Running {
    ended: watch::Receiver<Option<String>>,
}

/// The port names the socket file; with no TCP listener it is only a name.
const SOCKET_PORT: u16 = 5432;
const DATABASE: &str = "tidemark";
/// Socket addresses hold 107 bytes with the file name in them.
const SOCKET_DIR_BYTES_MAX: usize = 85;
/// Recovery after a crash replays up to max_wal_size; the wait ends earlier when the server does.
const START_WAIT: Duration = Duration::from_secs(600);
const STOP_WAIT_SECONDS: &str = "60";

impl EmbeddedPg {
    /// Makes the cluster where there is none, ends what a crash left behind, starts the server and waits
    /// until it answers.
    pub async fn start(options: &Options) -> Result<Self, PgError> {
        let options = options.clone();
        let (place, lock) = blocking(move || prepare(&options)).await?;
        let url = place.url();
        let server = Self { place, url, running: tokio::sync::Mutex::new(None), _lock: lock };
        server.launch().await?;
        server.create_database().await?;
        let at = server.place.data_dir.join("url");
        fs::write(&at, server.url.expose().as_str()).map_err(file("write", &at))?;
        Ok(server)
    }

    /// Where to connect, over the socket.
    pub fn url(&self) -> &RedactedUrl {
        &self.url
    }

    /// Watches the server until `stop`, and starts it again when it ended without being asked. An error
    /// means that it could not be started again; calling once more tries once more.
    pub async fn keep_running(&self, stop: &CancellationToken) -> Result<(), PgError> {
        loop {
            let ended = self.running.lock().await.as_ref().map(|running| running.ended.clone());
            if let Some(mut ended) = ended {
                tokio::select! {
                    () = stop.cancelled() => return Ok(()),
                    _ = ended.wait_for(Option::is_some) => {}
                }
                let how = ended.borrow().clone().unwrap_or_default();
                tracing::error!(action = "postgres_ended", error = %how, "The private Postgres ended by itself.");
            }
            let place = self.place.clone();
            blocking(move || place.clear_stale()).await?;
            self.launch().await?;
            tracing::info!(action = "postgres_restarted", "The private Postgres runs again.");
        }
    }

    /// Fast shutdown; returns when the server is gone.
    pub async fn stop(self) -> Result<(), PgError> {
        let running = self.running.lock().await.take();
        let Some(running) = running.filter(|running| running.ended.borrow().is_none()) else { return Ok(()) };
        let place = self.place.clone();
        blocking(move || place.pg_ctl_stop("fast")).await?;
        let mut ended = running.ended;
        // An error means that the watching thread is gone, and it goes after the server.
        let _ = ended.wait_for(Option::is_some).await;
        if !self.place.socket_dir.starts_with(&self.place.data_dir) {
            let _ = fs::remove_dir_all(&self.place.socket_dir); // Made again at the next start.
        }
        Ok(())
    }

    async fn launch(&self) -> Result<(), PgError> {
        let place = self.place.clone();
        let log_start = fs::metadata(&place.log).map_or(0, |meta| meta.len());
        let running = place.spawn()?;
        let deadline = Instant::now() + START_WAIT;
        while let Err(error) = self.try_connect("postgres").await {
            if let Some(how) = running.ended.borrow().clone() {
                return Err(place.explain("starting Postgres", &how, log_start));
            }
            if Instant::now() > deadline {
                let how = format!("it does not answer: {error}");
                return Err(place.explain("starting Postgres", &how, log_start));
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        *self.running.lock().await = Some(running);
        Ok(())
    }

    async fn try_connect(&self, database: &str) -> Result<Session, tokio_postgres::Error> {
        let (client, connection) = tokio_postgres::Config::new()
            .host_path(&self.place.socket_dir)
            .port(self.place.socket_port())
            .user("postgres")
            .dbname(database)
            .connect_timeout(Duration::from_secs(5))
            .connect(tokio_postgres::NoTls)
            .await?;
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(connection);
        Ok(Session { client, _tasks: tasks })
    }

    async fn create_database(&self) -> Result<(), PgError> {
        let failed = |error: tokio_postgres::Error| PgError::Failed {
            step: "creating the database",
            reason: error.as_db_error().map_or_else(|| error.to_string(), |db| db.message().to_owned()),
            log: self.place.log.clone(),
        };
        let session = self.try_connect("postgres").await.map_err(failed)?;
        let there = session
            .client
            .query_opt("select 1 from pg_database where datname = $1", &[&DATABASE])
            .await
            .map_err(failed)?;
        if there.is_none() {
            session.client.batch_execute("create database tidemark").await.map_err(failed)?;
        }
        Ok(())
    }
}

impl Drop for EmbeddedPg {
    fn drop(&mut self) {
        let left = self.running.get_mut().take();
        if left.is_some_and(|running| running.ended.borrow().is_none()) {
            // No waiting here: this may be a runtime's thread.
            let _ = self
                .place
                .command("pg_ctl")
                .args(["stop", "-W", "-m", "fast", "-D"])
                .arg(&self.place.cluster)
                .output();
        }
    }
}

struct Session {
    client: tokio_postgres::Client,
    /// Drives the connection; ends with the session.
    _tasks: tokio::task::JoinSet<Result<(), tokio_postgres::Error>>,
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, PgError> + Send + 'static,
) -> Result<T, PgError> {
    tokio::task::spawn_blocking(work).await.expect("preparing Postgres does not panic")
}

/// Everything before the server's first breath.
fn prepare(options: &Options) -> Result<(Place, File), PgError> {
    fs::create_dir_all(&options.data_dir).map_err(file("create", &options.data_dir))?;
    let data_dir = options.data_dir.canonicalize().map_err(file("find", &options.data_dir))?;
    let lock = lock(&data_dir)?;
    let cluster = data_dir.join("postgres");
    let made_by = fs::read_to_string(cluster.join("PG_VERSION")).ok().map(|text| text.trim().to_owned());
    let binaries = find::binaries(made_by.as_deref(), &cluster)?;
    let user = ServerUser::find();
    let socket_dir = socket_dir(&data_dir);
    let place = Place {
        log: cluster.join("server.log"),
        port: options.port,
        bin: binaries.dir,
        user,
        data_dir,
        cluster,
        socket_dir,
    };
    let place = place.make_folders()?;
    place.clear_stale()?; // Before the port is looked at: an orphan may hold it.
    place.check_port()?;
    if made_by.is_none() {
        place.initdb()?;
    }
    Ok((place, lock))
}

/// The right to use a data directory. The kernel lets go of it when we end, however we end.
fn lock(data_dir: &Path) -> Result<File, PgError> {
    let path = data_dir.join("owner.lock");
    let mut lock = File::options()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(&path)
        .map_err(file("open", &path))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(fs::TryLockError::WouldBlock) => {
            let mut pid = String::new();
            let _ = lock.read_to_string(&mut pid); // Only for the message.
            return Err(PgError::InUse { dir: data_dir.to_path_buf(), pid: pid.trim().to_owned() });
        }
        Err(fs::TryLockError::Error(error)) => return Err(file("lock", &path)(error)),
    }
    fs::write(&path, std::process::id().to_string()).map_err(file("write", &path))?;
    Ok(lock)
}

/// In the data directory, unless the path is too long for a socket address.
fn socket_dir(data_dir: &Path) -> PathBuf {
    let beside = data_dir.join("socket");
    if beside.as_os_str().len() <= SOCKET_DIR_BYTES_MAX {
        return beside;
    }
    let name = tidemark_model::partition::fnv1a(data_dir.as_os_str().as_encoded_bytes());
    let temp = std::env::temp_dir();
    let base = if temp.as_os_str().len() + 24 <= SOCKET_DIR_BYTES_MAX { temp } else { PathBuf::from("/tmp") };
    base.join(format!("tidemark-{name:08x}"))
}

impl Place {
    fn url(&self) -> RedactedUrl {
        let host: String =
            url::form_urlencoded::byte_serialize(self.socket_dir.as_os_str().as_encoded_bytes()).collect();
        // `+` for a space is a habit of forms; a socket path needs the other escape.
        let host = host.replace('+', "%20");
        let text = format!("postgres:///{DATABASE}?host={host}&user=postgres&port={}", self.socket_port());
        RedactedUrl::parse(&text).expect("made of escaped parts")
    }

    /// The socket file carries the port's number.
    fn socket_port(&self) -> u16 {
        self.port.unwrap_or(SOCKET_PORT)
    }

    /// Folders the server may write, and a user that may enter them.
    fn make_folders(mut self) -> Result<Self, PgError> {
        for dir in [&self.cluster, &self.socket_dir] {
            fs::create_dir_all(dir).map_err(file("create", dir))?;
            // In a folder where everybody may write, a link would lead us to give away what is not ours.
            if fs::symlink_metadata(dir).map_err(file("look at", dir))?.is_symlink() {
                let source = std::io::Error::other("it is a link to somewhere else; remove it");
                return Err(PgError::File { doing: "use", path: dir.clone(), source });
            }
            self.user.give(dir).map_err(file("hand over", dir))?;
            fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).map_err(file("protect", dir))?;
        }
        if !self.user.may_enter(&self.cluster) {
            self.user.enter_anywhere = true;
            if !self.user.may_enter(&self.cluster) {
                return Err(PgError::NotEnterable { user: self.user.name.clone(), dir: self.data_dir });
            }
        }
        Ok(self)
    }

    /// Local connections are trusted, for the socket's folder is ours alone; the optional port asks for
    /// the password in `<data-dir>/password`.
    fn initdb(&self) -> Result<(), PgError> {
        // A half-made cluster of an earlier try is of no use: initdb wants an empty folder.
        for entry in fs::read_dir(&self.cluster).map_err(file("read", &self.cluster))?.flatten() {
            let path = entry.path();
            let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.map_err(file("remove", &path))?;
        }
        let password = self.password()?;
        let output = self
            .command("initdb")
            .args(["-U", "postgres", "--auth-local=trust", "--auth-host=scram-sha-256", "-E", "UTF8"])
            .args(["--locale=C", "--pwfile"])
            .arg(&password)
            .arg("-D")
            .arg(&self.cluster)
            .output()
            .map_err(file("run", &self.bin.join("initdb")))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Err(self.explain_text("making the database cluster (initdb)", said.trim()))
    }

    fn password(&self) -> Result<PathBuf, PgError> {
        let path = self.data_dir.join("password");
        let secret = format!("{}{}\n", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple());
        let _ = fs::remove_file(&path); // Of an earlier try; another owner's would not be writable.
        fs::write(&path, secret).map_err(file("write", &path))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(file("protect", &path))?;
        self.user.give(&path).map_err(file("hand over", &path))?;
        Ok(path)
    }

    /// We hold the lock: whatever is left of a server here is an orphan's or stale.
    fn clear_stale(&self) -> Result<(), PgError> {
        let pid_file = self.cluster.join("postmaster.pid");
        if let Ok(text) = fs::read_to_string(&pid_file) {
            let pid = text.lines().next().unwrap_or("").trim().to_owned();
            if self.is_our_server(&pid) {
                tracing::warn!(
                    action = "stop_orphan",
                    pid,
                    "A server of an earlier run is still there; stopping it."
                );
                self.pg_ctl_stop("fast")?;
            } else {
                match fs::remove_file(&pid_file) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        return Err(file("remove", &pid_file)(error));
                    }
                    _ => {}
                }
            }
        }
        for entry in fs::read_dir(&self.socket_dir).map_err(file("read", &self.socket_dir))?.flatten() {
            let _ = fs::remove_file(entry.path()); // A shutting server may be faster.
        }
        Ok(())
    }

    /// Is this pid a server that works in our cluster? Process ids are used again, above all in
    /// containers, so that a living pid alone says nothing.
    fn is_our_server(&self, pid: &str) -> bool {
        if pid.is_empty() || !pid.bytes().all(|byte| byte.is_ascii_digit()) {
            return false;
        }
        match fs::read_link(format!("/proc/{pid}/cwd")) {
            Ok(cwd) => cwd == self.cluster,
            Err(_) if Path::new("/proc/self/cwd").exists() => false,
            // No /proc on this system.
            Err(_) => self
                .command("pg_ctl")
                .arg("status")
                .arg("-D")
                .arg(&self.cluster)
                .output()
                .is_ok_and(|output| output.status.success()),
        }
    }

    fn check_port(&self) -> Result<(), PgError> {
        match self.port {
            Some(port) => std::net::TcpListener::bind(("127.0.0.1", port))
                .map(drop)
                .map_err(|_| PgError::PortInUse { port }),
            None => Ok(()),
        }
    }

    fn pg_ctl_stop(&self, mode: &str) -> Result<(), PgError> {
        let output = self
            .command("pg_ctl")
            .args(["stop", "-w", "-t", STOP_WAIT_SECONDS, "-m", mode, "-D"])
            .arg(&self.cluster)
            .output()
            .map_err(file("run", &self.bin.join("pg_ctl")))?;
        // It may have gone between our look and the command.
        if output.status.success() || !self.cluster.join("postmaster.pid").exists() {
            return Ok(());
        }
        Err(self.explain_text("stopping Postgres", String::from_utf8_lossy(&output.stderr).trim()))
    }

    fn command(&self, program: &str) -> Command {
        let mut command = self.user.command(&self.bin.join(program), None);
        // A folder the server's user may be in; ours may be root's own.
        command.current_dir("/").stdin(Stdio::null());
        command.env_remove("PGDATA").env_remove("PGPORT").env_remove("PGHOST").env("LC_ALL", "C");
        command
    }

    /// Starts the server below a thread that lives as long as it does: the kernel's "parent died" signal is
    /// bound to the thread that started the child, and tokio's threads come and go.
    fn spawn(&self) -> Result<Running, PgError> {
        let log =
            File::options().create(true).append(true).open(&self.log).map_err(file("open", &self.log))?;
        self.user.give(&self.log).map_err(file("hand over", &self.log))?;
        let errors = log.try_clone().map_err(file("open", &self.log))?;
        let mut command = self.user.command(&self.bin.join("postgres"), Some("INT"));
        command
            .arg("-D")
            .arg(&self.cluster)
            .args(self.settings())
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            .env_remove("PGPORT")
            .env_remove("PGHOST")
            .env("LC_ALL", "C")
            .envs(memory_in_large_pages())
            // Ctrl-C on the terminal is for us; the server is stopped last, by us.
            .process_group(0);
        let (started, start) = std::sync::mpsc::sync_channel(1);
        let (end, ended) = watch::channel(None);
        std::thread::Builder::new()
            .name("postgres".into())
            .spawn(move || match command.spawn() {
                Ok(mut child) => {
                    let _ = started.send(Ok(()));
                    let how = child.wait().map_or_else(|error| error.to_string(), describe);
                    let _ = end.send(Some(how)); // Nobody listens after stop.
                }
                Err(error) => {
                    let _ = started.send(Err(error));
                }
            })
            .map_err(file("start a thread for", &self.bin))?;
        match start.recv() {
            Ok(Ok(())) => Ok(Running { ended }),
            Ok(Err(error)) => Err(file("run", &self.bin.join("postgres"))(error)),
            Err(_) => unreachable!("the thread reports before it ends"),
        }
    }

    /// Does this server know that value? Builds differ in what they were compiled with.
    fn takes(&self, name: &str, value: &str) -> bool {
        self.command("postgres")
            .arg("-D")
            .arg(&self.cluster)
            .args(["-c", &format!("{name}={value}"), "-C", name])
            .output()
            .is_ok_and(|output| output.status.success() && output.stdout.trim_ascii() == value.as_bytes())
    }

    /// Settings for one writer of large batches. Durability stays on: nothing that was committed is lost.
    fn settings(&self) -> Vec<String> {
        let mut settings: Vec<String> = [
            "fsync=on",
            "synchronous_commit=on",
            "wal_buffers=64MB",
            // Nobody replicates this server: an index that is built is synced whole instead of logged as well.
            "wal_level=minimal",
            "max_wal_senders=0",
            "min_wal_size=256MB",
            "checkpoint_timeout=15min",
            "checkpoint_completion_target=0.9",
            "max_connections=200",
            // What a statement over all partitions of a thousand networks takes at once.
            "max_locks_per_transaction=512",
            "work_mem=32MB",
            "maintenance_work_mem=128MB",
            "random_page_cost=1.1",
            "effective_io_concurrency=64",
            "jit=off",
            // Tables that live rewrites all the time are small and cleaned at once: see migration 0026.
            "autovacuum_naptime=5s",
            // Little by little: live blocks share the cores.
            "autovacuum_vacuum_cost_delay=10ms",
            "autovacuum_vacuum_cost_limit=80",
            // What backends write themselves goes to the disk soon, not all at once when the kernel's patience ends:
            // a commit would wait behind it.
            "backend_flush_after=1MB",
            // Room for pages is made before somebody waits for it: by default it is made for 500 pages a second at most,
            // and a block that touches thousands writes out others' pages first.
            "bgwriter_delay=50ms",
            "bgwriter_lru_maxpages=500",
            // Small tables that grow fast would be sampled all the time, each time for seconds of a core; plans
            // here go by keys anyway.
            // Append-only tables need a vacuum for their visibility alone: not with every fifth row of a young one.
            "autovacuum_vacuum_insert_threshold=1000000",
            "autovacuum_analyze_threshold=20000",
            "autovacuum_analyze_scale_factor=0.4",
            "default_statistics_target=30",
            "log_checkpoints=off",
            "log_min_messages=warning",
            "timezone=UTC",
        ]
        .map(str::to_owned)
        .to_vec();
        // Whole pages in the log: lz4 takes a tenth of the time of Postgres' own algorithm.
        let compression = if self.takes("wal_compression", "lz4") { "lz4" } else { "on" };
        settings.push(format!("wal_compression={compression}"));
        if self.takes("default_toast_compression", "lz4") {
            settings.push("default_toast_compression=lz4".to_owned());
        }
        settings.push(format!("max_wal_size={}MB", max_wal_mb(&self.data_dir)));
        settings.push(format!("shared_buffers={}MB", shared_buffers_mb()));
        settings.push(format!("unix_socket_directories={}", self.socket_dir.display()));
        settings.push(match self.port {
            Some(_) => "listen_addresses=127.0.0.1".into(),
            None => "listen_addresses=".into(),
        });
        settings.push(format!("port={}", self.socket_port()));
        settings.into_iter().flat_map(|setting| ["-c".to_owned(), setting]).collect()
    }

    /// Why a step failed, from the log it wrote since `log_start`.
    fn explain(&self, step: &'static str, how: &str, log_start: u64) -> PgError {
        let mut text = String::new();
        if let Ok(mut log) = File::open(&self.log)
            && log.seek(SeekFrom::Start(log_start)).is_ok()
        {
            let _ = log.read_to_string(&mut text); // The status alone must do then.
        }
        let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
        let tail = lines[lines.len().saturating_sub(5)..].join("\n    ");
        self.explain_text(step, &format!("{how}\n    {tail}"))
    }

    fn explain_text(&self, step: &'static str, said: &str) -> PgError {
        if said.contains("No space left on device") {
            return PgError::DiskFull { dir: self.data_dir.clone() };
        }
        match self.port {
            Some(port) if said.contains("Address already in use") => PgError::PortInUse { port },
            _ => PgError::Failed { step, reason: said.to_owned(), log: self.log.clone() },
        }
    }
}

fn describe(status: ExitStatus) -> String {
    format!("Postgres ended with {status}")
}

/// Sorts and joins of the server take memory by tens of megabytes and give it back at the end of every statement, which
/// costs the kernel less by large pages (ADR 0031). An environment that says something itself is left alone; another C
/// library than glibc does not look.
fn memory_in_large_pages() -> Option<(&'static str, &'static str)> {
    const VARIABLE: &str = "GLIBC_TUNABLES";
    std::env::var_os(VARIABLE).is_none().then_some((VARIABLE, "glibc.malloc.hugetlb=1"))
}

/// How much log may stand between two checkpoints. Random keys of a long history touch most index pages between two
/// of them, and the first touch logs the whole page: fewer checkpoints, less log. A quarter of what is free on the
/// disk, because as much again may be on its way while a checkpoint runs.
fn max_wal_mb(data_dir: &Path) -> u64 {
    let free_mb = rustix::fs::statvfs(data_dir).map_or(0, |disk| disk.f_bavail * disk.f_frsize / (1 << 20));
    (free_mb / 4).clamp(1024, 12 * 1024)
}

/// A third of the memory: keys are hashes, so every segment of history touches index pages
/// everywhere, and what does not fit is written out and read back for each of them. Pages nobody touches take
/// no room.
fn shared_buffers_mb() -> u64 {
    let total_kb = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        text.lines().find_map(|line| {
            line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
        })
    });
    (total_kb.unwrap_or(4 << 20) / 1024 / 3).clamp(128, 8192)
}
