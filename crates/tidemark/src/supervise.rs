//! Roles as supervised tasks. A role that fails or panics is started again with a growing, jittered pause;
//! the others do not notice. What each role does right now is visible: states for readiness and `status`,
//! metrics for alerts. Shutdown drains stage by stage, and ends what does not end by itself.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::Rng;
use time::OffsetDateTime;
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

/// When a role stops at shutdown: sources first, so that what they made is still carried on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Reads chains.
    Source,
    /// Carries events.
    Relay,
    /// Handles events.
    Worker,
    /// Answers questions.
    Serve,
    /// What the others stand on: telemetry, the private Postgres.
    Base,
}

const STAGES: [Stage; 5] = [Stage::Source, Stage::Relay, Stage::Worker, Stage::Serve, Stage::Base];

/// What a role does right now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Begun, not yet at work.
    Starting,
    /// At work.
    Running,
    /// Failed; waits for its next try.
    Restarting,
    /// Ended because it was asked to.
    Stopped,
    /// Refuses to go on until an operator looks.
    Halted,
}

impl State {
    /// The label in `system.processes` and in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Restarting => "restarting",
            Self::Stopped => "stopped",
            Self::Halted => "halted",
        }
    }
}

/// A role as seen from outside.
#[derive(Debug, Clone)]
pub struct RoleState {
    /// Its name.
    pub role: String,
    /// What it does.
    pub state: State,
    /// How often it was started again.
    pub restarts: u64,
    /// Why the last time, in one line.
    pub last_error: Option<String>,
    /// When the present life began.
    pub started_at: OffsetDateTime,
}

/// An error that another try would not mend: the role halts, the others go on.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Halt(pub String);

/// What a role's future is given.
#[derive(Debug, Clone)]
pub struct Running {
    /// Cancelled when the role should end.
    pub stop: CancellationToken,
    entry: Arc<Entry>,
}

impl Running {
    /// The role is at work; until it says so the process is not ready.
    pub fn up(&self) {
        self.entry.set(State::Running);
    }
}

/// What alerts look at, by role.
struct RoleMetrics {
    /// 1 while it is at work.
    up: metrics::Gauge,
    /// Lives after the first.
    restarts: metrics::Counter,
}

impl RoleMetrics {
    fn new(role: &str) -> Self {
        Self {
            up: metrics::gauge!("tidemark_role_up", "role" => role.to_owned()),
            restarts: metrics::counter!("tidemark_role_restarts_total", "role" => role.to_owned()),
        }
    }
}

impl fmt::Debug for RoleMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RoleMetrics")
    }
}

#[derive(Debug)]
struct Entry {
    metrics: RoleMetrics,
    stage: Stage,
    /// Asks the role to end.
    stop: CancellationToken,
    /// Ends it.
    kill: CancellationToken,
    seen: Mutex<RoleState>,
}

impl Entry {
    fn seen(&self) -> MutexGuard<'_, RoleState> {
        // A panic while holding it leaves plain data behind.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn set(&self, state: State) {
        let mut seen = self.seen();
        if state == State::Starting {
            seen.started_at = OffsetDateTime::now_utc();
        }
        seen.state = state;
        self.metrics.up.set(if state == State::Running { 1.0 } else { 0.0 });
    }
}

/// Pauses and limits.
#[derive(Debug, Clone)]
pub struct Limits {
    /// First pause after a failure; doubled with each further one.
    pub backoff_min: Duration,
    /// Longest pause.
    pub backoff_max: Duration,
    /// A life this long starts the pauses anew.
    pub healthy_after: Duration,
    /// All of shutdown.
    pub drain_max: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            backoff_min: Duration::from_millis(500),
            backoff_max: Duration::from_secs(10),
            healthy_after: Duration::from_secs(60),
            drain_max: Duration::from_secs(20),
        }
    }
}

/// All roles of one process.
#[derive(Debug, Clone)]
pub struct Supervisor {
    limits: Limits,
    entries: Arc<Mutex<Vec<Arc<Entry>>>>,
    tasks: TaskTracker,
    complete: Arc<AtomicBool>,
}

/// How a shutdown went.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Roles that had to be ended.
    pub ended_by_force: Vec<String>,
}

impl Supervisor {
    /// No roles yet.
    pub fn new(limits: Limits) -> Self {
        Self { limits, entries: Arc::default(), tasks: TaskTracker::new(), complete: Arc::default() }
    }

    /// Starts `role` and keeps it alive. `run` is called for every life; its future ends only when
    /// `Running::stop` asks it to, and any other end is a failure.
    pub fn start<F, Fut>(&self, role: impl Into<String>, stage: Stage, run: F)
    where
        F: Fn(Running) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        let role = role.into();
        let entry = Arc::new(Entry {
            metrics: RoleMetrics::new(&role),
            stage,
            stop: CancellationToken::new(),
            kill: CancellationToken::new(),
            seen: Mutex::new(RoleState {
                role,
                state: State::Starting,
                restarts: 0,
                last_error: None,
                started_at: OffsetDateTime::now_utc(),
            }),
        });
        self.entries().push(Arc::clone(&entry));
        let limits = self.limits.clone();
        self.tasks.spawn(async move { keep_alive(&entry, &limits, run).await });
    }

    /// What every role does right now, in order of start.
    pub fn states(&self) -> Vec<RoleState> {
        self.entries().iter().map(|entry| entry.seen().clone()).collect()
    }

    /// Says that all roles the process was asked for have been started; it is not ready before.
    pub fn complete(&self) {
        self.complete.store(true, Ordering::Release);
    }

    /// Are all roles there and at work?
    pub fn is_ready(&self) -> bool {
        let states = self.states();
        self.complete.load(Ordering::Acquire)
            && !states.is_empty()
            && states.iter().all(|role| role.state == State::Running)
    }

    /// Asks the roles to end, stage by stage; ends those that do not within the limit.
    pub async fn shut_down(&self) -> Drained {
        let deadline = Instant::now() + self.limits.drain_max;
        let mut drained = Drained::default();
        for stage in STAGES {
            let roles: Vec<_> = self.entries().iter().filter(|entry| entry.stage == stage).cloned().collect();
            roles.iter().for_each(|entry| entry.stop.cancel());
            // The last stages get a moment even when the first ones used all the time.
            let until = deadline.max(Instant::now() + Duration::from_millis(500));
            for entry in &roles {
                if tokio::time::timeout_at(until, ended(entry)).await.is_err() {
                    drained.ended_by_force.push(entry.seen().role.clone());
                    entry.kill.cancel();
                    ended(entry).await;
                }
            }
        }
        self.tasks.close();
        self.tasks.wait().await;
        drained
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Arc<Entry>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns when the role's task is over. A halted role is.
async fn ended(entry: &Entry) {
    while !matches!(entry.seen().state, State::Stopped | State::Halted) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn keep_alive<F, Fut>(entry: &Arc<Entry>, limits: &Limits, run: F)
where
    F: Fn(Running) -> Fut,
    Fut: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    let mut failures = 0_u32;
    loop {
        entry.set(State::Starting);
        let began = Instant::now();
        let outcome =
            one_life(entry, run(Running { stop: entry.stop.clone(), entry: Arc::clone(entry) })).await;
        if entry.stop.is_cancelled() {
            if let Err(error) = &outcome {
                note(entry, error);
            }
            entry.set(State::Stopped);
            return;
        }
        let error = match outcome {
            Ok(()) => anyhow::anyhow!("it ended without being asked to"),
            Err(error) => error,
        };
        note(entry, &error);
        if error.chain().any(|cause| cause.is::<Halt>()) {
            tracing::error!(role = entry.seen().role, action = "role_halted", error = %Chain(&error), "A role halted.");
            entry.set(State::Halted);
            return;
        }
        if began.elapsed() >= limits.healthy_after {
            failures = 0;
        }
        let pause = pause_after(failures, limits);
        failures = failures.saturating_add(1);
        let pause_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
        tracing::error!(role = entry.seen().role, action = "role_restart", pause_ms, error = %Chain(&error), "A role failed and will be started again.");
        entry.set(State::Restarting);
        tokio::select! {
            () = entry.stop.cancelled() => {
                entry.set(State::Stopped);
                return;
            }
            () = tokio::time::sleep(pause) => {}
        }
        entry.seen().restarts += 1;
        entry.metrics.restarts.increment(1);
    }
}

/// Runs one life in a task of its own, so that a panic is an answer and not an end.
async fn one_life(
    entry: &Entry,
    life: impl Future<Output = anyhow::Result<()>> + Send + 'static,
) -> anyhow::Result<()> {
    // Every line a role logs says whose it is.
    let role = entry.seen().role.clone();
    let service = role.split(':').next().unwrap_or_default();
    let mut tasks = JoinSet::new();
    tasks.spawn(life.instrument(tracing::info_span!("role", service, role)));
    tokio::select! {
        joined = tasks.join_next() => match joined.expect("one task was spawned") {
            Ok(outcome) => outcome,
            Err(error) => Err(anyhow::anyhow!(panic_message(error))),
        },
        () = entry.kill.cancelled() => {
            tasks.shutdown().await;
            Err(anyhow::anyhow!("it did not end in time and was ended"))
        }
    }
}

fn panic_message(error: JoinError) -> String {
    match error.try_into_panic() {
        Ok(payload) => {
            let text = payload
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| payload.downcast_ref::<String>().cloned());
            format!("it panicked: {}", text.unwrap_or_else(|| "without a message".into()))
        }
        Err(error) => format!("its task was ended: {error}"),
    }
}

fn note(entry: &Entry, error: &anyhow::Error) {
    entry.seen().last_error = Some(Chain(error).to_string());
}

/// Doubles up to the longest pause; a random part keeps processes that failed together apart.
fn pause_after(failures: u32, limits: &Limits) -> Duration {
    let doubled = limits.backoff_min.saturating_mul(2_u32.saturating_pow(failures.min(16)));
    doubled.min(limits.backoff_max).mul_f64(rand::rng().random_range(0.75..1.25))
}

/// An error with its causes in one line, for logs.
#[derive(Debug)]
pub struct Chain<'a>(pub &'a anyhow::Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    fn quick() -> Limits {
        Limits {
            backoff_min: Duration::from_millis(1),
            backoff_max: Duration::from_millis(5),
            drain_max: Duration::from_millis(300),
            ..Limits::default()
        }
    }

    async fn until(what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !holds() {
            assert!(Instant::now() < deadline, "waited in vain until {what}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    async fn obedient(running: Running) -> anyhow::Result<()> {
        running.up();
        running.stop.cancelled().await;
        Ok(())
    }

    #[tokio::test]
    async fn a_panic_restarts_its_role_and_no_other() {
        let group = Supervisor::new(quick());
        group.start("steady", Stage::Worker, obedient);
        let lives = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&lives);
        group.start("shaky", Stage::Worker, move |running| {
            let life = counted.fetch_add(1, Ordering::SeqCst);
            async move {
                match life {
                    0 => panic!("the first life ends badly"),
                    1 => anyhow::bail!("so does the second"),
                    2 => Ok(()),
                    _ => obedient(running).await,
                }
            }
        });
        until("both run", || group.states().iter().all(|role| role.state == State::Running)).await;
        assert!(!group.is_ready(), "more roles may come");
        group.complete();
        assert!(group.is_ready());
        let states = group.states();
        assert_eq!((states[0].restarts, states[1].restarts), (0, 3));
        assert_eq!(states[1].last_error.as_deref(), Some("it ended without being asked to"));
        assert_eq!(group.shut_down().await, Drained::default());
        assert!(group.states().iter().all(|role| role.state == State::Stopped));
    }

    #[tokio::test]
    async fn a_role_that_is_up_again_is_ready_again() {
        let group = Supervisor::new(Limits { backoff_min: Duration::from_secs(60), ..quick() });
        group.complete();
        group.start("gone", Stage::Source, |_| async { anyhow::bail!("database gone") });
        until("it waits for its next try", || group.states()[0].state == State::Restarting).await;
        assert!(!group.is_ready());
        assert_eq!(group.states()[0].last_error.as_deref(), Some("database gone"));
        assert_eq!(group.shut_down().await, Drained::default());
    }

    #[tokio::test]
    async fn a_halt_is_not_retried() {
        let group = Supervisor::new(quick());
        group.start("halts", Stage::Source, |_| async { Err(Halt("wrong chain".into()).into()) });
        group.start("steady", Stage::Worker, obedient);
        until("it halts", || group.states()[0].state == State::Halted).await;
        until("the other runs", || group.states()[1].state == State::Running).await;
        assert_eq!(group.states()[0].restarts, 0);
        assert_eq!(group.shut_down().await, Drained::default());
    }

    #[tokio::test]
    async fn stages_drain_in_order_and_the_deaf_are_ended() {
        let group = Supervisor::new(quick());
        let order = Arc::new(Mutex::new(vec![]));
        for (role, stage) in [("base", Stage::Base), ("worker", Stage::Worker), ("source", Stage::Source)] {
            let order = Arc::clone(&order);
            group.start(role, stage, move |running| {
                let order = Arc::clone(&order);
                async move {
                    obedient(running).await?;
                    order.lock().expect("no panic").push(role);
                    Ok(())
                }
            });
        }
        group.start("deaf", Stage::Relay, |running| async move {
            running.up();
            std::future::pending().await
        });
        group.complete();
        until("all run", || group.is_ready()).await;
        assert_eq!(group.shut_down().await, Drained { ended_by_force: vec!["deaf".into()] });
        assert_eq!(*order.lock().expect("no panic"), ["source", "worker", "base"]);
    }

    #[test]
    fn pauses_grow_to_a_limit() {
        let limits = Limits::default();
        assert!(pause_after(0, &limits) < Duration::from_millis(626));
        assert!(pause_after(60, &limits) >= Duration::from_millis(7_500));
        assert!(pause_after(60, &limits) <= Duration::from_millis(12_500));
    }
}
