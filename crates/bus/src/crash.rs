//! Named places at which a test ends this process as `kill -9` would: no destructor runs, nothing is flushed.
//! `TIDEMARK_CRASH_AT=name@n` ends it the n-th time it comes by. Optimised builds do not look.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Every place there is. The chaos test dies at each of them, on every engine.
pub const POINTS: &[&str] = &[
    "relay.claimed",
    "relay.number.before_commit",
    "relay.number.after_commit",
    "relay.publish.before",
    "relay.publish.half",
    "relay.publish.after",
    "relay.record.after",
    "dispatch.claimed",
    "dispatch.received",
    "dispatch.inbox.after",
    "dispatch.effect.after",
    "dispatch.position.after",
    "dispatch.commit.after",
    "dispatch.failure.before_commit",
    "dispatch.failure.after_commit",
    "dispatch.park.before_commit",
    "dispatch.park.after_commit",
    "dispatch.give.before_release",
];

struct Armed {
    name: String,
    left: AtomicU64,
}

fn armed() -> Option<&'static Armed> {
    static ARMED: OnceLock<Option<Armed>> = OnceLock::new();
    let armed = ARMED.get_or_init(|| {
        let text = std::env::var("TIDEMARK_CRASH_AT").ok()?;
        let (name, count) = text.split_once('@').unwrap_or((&text, "1"));
        Some(Armed { name: name.to_owned(), left: AtomicU64::new(count.parse().ok()?) })
    });
    armed.as_ref()
}

/// Comes by the place `name`.
pub(crate) fn point(name: &'static str) {
    debug_assert!(POINTS.contains(&name), "{name} is not in the list");
    if cfg!(debug_assertions)
        && let Some(armed) = armed()
        && armed.name == name
        && armed.left.fetch_sub(1, Ordering::SeqCst) == 1
    {
        std::process::abort();
    }
}
