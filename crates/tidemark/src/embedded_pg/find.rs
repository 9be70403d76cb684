//! Where server binaries are, in the order of trust: named by the user, on the path, the distribution's.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{MAJOR_MIN, PgError};

/// One installation.
#[derive(Debug, Clone)]
pub(super) struct Binaries {
    pub(super) dir: PathBuf,
    major: u32,
}

/// The best installation; the one that made the cluster, where there is one.
pub(super) fn binaries(made_by: Option<&str>, cluster: &Path) -> Result<Binaries, PgError> {
    let folders = folders();
    let found: Vec<Binaries> = folders.iter().filter_map(|dir| look(dir)).collect();
    let Some(first) = found.first() else {
        let looked_in: Vec<String> = folders.iter().map(|dir| dir.display().to_string()).collect();
        let looked_in = if looked_in.is_empty() { "PATH".into() } else { looked_in.join(", ") };
        return Err(PgError::NoBinaries { looked_in });
    };
    match made_by {
        Some(made_by) => {
            found.iter().find(|binaries| binaries.major.to_string() == made_by).cloned().ok_or_else(|| {
                let mut installed: Vec<String> =
                    found.iter().map(|binaries| binaries.major.to_string()).collect();
                installed.dedup();
                PgError::OtherMajor {
                    dir: cluster.to_path_buf(),
                    made_by: made_by.to_owned(),
                    installed: installed.join(", "),
                }
            })
        }
        None => match found.iter().find(|binaries| binaries.major >= MAJOR_MIN) {
            Some(binaries) => Ok(binaries.clone()),
            None => Err(PgError::TooOld { found: first.major, bin: first.dir.clone() }),
        },
    }
}

/// Folders to look in, each once, in order.
fn folders() -> Vec<PathBuf> {
    // A folder that was named is the only one: a wish is not a hint.
    if let Some(named) = std::env::var_os("TIDEMARK_PG_BIN").filter(|named| !named.is_empty()) {
        return vec![PathBuf::from(named)];
    }
    let mut folders: Vec<PathBuf> = vec![];
    let path = std::env::var_os("PATH").unwrap_or_default();
    for dir in std::env::split_paths(&path) {
        // Distributions link single programs into the path; their siblings are where the link leads.
        for program in ["postgres", "initdb"] {
            if let Ok(real) = dir.join(program).canonicalize() {
                folders.extend(real.parent().map(Path::to_path_buf));
            }
        }
    }
    if let Ok(output) = Command::new("pg_config").arg("--bindir").output() {
        folders.push(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()));
    }
    folders.extend(versioned("/usr/lib/postgresql", "", "bin"));
    folders.extend(versioned("/usr", "pgsql-", "bin"));
    folders.push(PathBuf::from("/usr/local/pgsql/bin"));
    folders.push(PathBuf::from("/usr/local/bin"));
    for brew in ["/opt/homebrew/opt", "/usr/local/opt", "/home/linuxbrew/.linuxbrew/opt"] {
        folders.extend(versioned(brew, "postgresql@", "bin"));
    }
    let mut seen = std::collections::HashSet::new();
    folders.retain(|dir| dir.is_absolute() && seen.insert(dir.clone()));
    folders
}

/// `base/<prefix><number>/<below>`, newest first.
fn versioned(base: &str, prefix: &str, below: &str) -> Vec<PathBuf> {
    let mut versions: Vec<(u32, PathBuf)> = std::fs::read_dir(base)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.strip_prefix(prefix)?.parse().ok()?;
            Some((number, entry.path().join(below)))
        })
        .collect();
    versions.sort();
    versions.into_iter().rev().map(|(_, dir)| dir).collect()
}

/// An installation, if all three programs are there and the server tells its version.
fn look(dir: &Path) -> Option<Binaries> {
    if !["postgres", "initdb", "pg_ctl"].iter().all(|program| dir.join(program).exists()) {
        return None;
    }
    let output = Command::new(dir.join("postgres")).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version =
        text.split_whitespace().find(|word| word.starts_with(|first: char| first.is_ascii_digit()))?;
    let digits: String = version.chars().take_while(char::is_ascii_digit).collect();
    Some(Binaries { dir: dir.to_path_buf(), major: digits.parse().ok()? })
}
