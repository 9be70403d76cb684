//! Private servers for tests. One Postgres cluster serves a whole test run, also when nextest runs every
//! test in its own process: the first test starts it under a file lock, every user holds a shared lock, and
//! a watchdog ends it when nobody has held that lock for a while, even after `kill -9` of the whole run.
//!
//! NATS, Redis, anvil and S3 are started per test on free ports, with folders of their own; they end when they
//! are dropped, and the kernel ends them when the test process dies.

pub mod anvil;
pub mod nats;
pub mod pg;
mod process;
pub mod redis;
pub mod s3;
pub mod tools;

pub use anvil::Anvil;
pub use nats::Nats;
pub use redis::Redis;
pub use s3::S3;

use std::path::PathBuf;

/// `target/testkit`: everything a test run leaves behind while it runs.
pub fn scratch_dir() -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("../../target"), PathBuf::from);
    target.join("testkit")
}
