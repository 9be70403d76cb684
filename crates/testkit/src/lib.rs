//! Private servers for tests. One Postgres cluster serves a whole test run, also when nextest runs every
//! test in its own process: the first test starts it under a file lock, every user holds a shared lock, and
//! a watchdog ends it when nobody has held that lock for a while, even after `kill -9` of the whole run.

pub mod pg;

use std::path::PathBuf;

/// `target/testkit`: everything a test run leaves behind while it runs.
pub fn scratch_dir() -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("../../target"), PathBuf::from);
    target.join("testkit")
}
