//! Where the servers' programs are: the project's own folder of downloads first, then the path.

use std::path::{Path, PathBuf};

use anyhow::bail;

/// `TIDEMARK_TOOLS`, or `.tools` of this checkout.
pub fn folder() -> PathBuf {
    std::env::var_os("TIDEMARK_TOOLS")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools"), PathBuf::from)
}

/// `below` the folder of tools, or `name` on the path.
pub(crate) fn find(name: &str, below: &[&str]) -> anyhow::Result<PathBuf> {
    let folder = folder();
    let ours = below.iter().map(|path| folder.join(path));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let theirs = std::env::split_paths(&path).map(|dir| dir.join(name));
    match ours.chain(theirs).find(|program| program.is_file()) {
        Some(program) => Ok(program),
        None => bail!("{name} is not installed: run `make setup-test`, or name its folder in TIDEMARK_TOOLS"),
    }
}
