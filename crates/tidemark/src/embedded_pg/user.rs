//! The user the server runs as. Postgres refuses root, so root drops to `postgres` or `nobody`.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// Ourselves, or an unprivileged user when we are root.
#[derive(Debug, Clone)]
pub struct ServerUser {
    /// For messages.
    pub name: String,
    /// uid and gid to drop to; `None`: we are not root.
    drop_to: Option<(u32, u32)>,
    /// Keep the one capability that opens folders of others. Needed below root's home, where the
    /// unprivileged user could not even find its own files.
    pub(super) enter_anywhere: bool,
    setpriv: bool,
}

impl ServerUser {
    /// Decides once.
    pub(super) fn find() -> Self {
        let setpriv = Command::new("setpriv")
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
        if !is_root() {
            let name = std::env::var("USER").unwrap_or_else(|_| "of this process".into());
            return Self { name, drop_to: None, enter_anywhere: false, setpriv };
        }
        let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let named = |name: &str| {
            passwd.lines().find_map(|line| {
                let mut fields = line.split(':');
                (fields.next()? == name).then_some(())?;
                let (uid, gid) = (fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
                Some((name.to_owned(), (uid, gid)))
            })
        };
        let (name, ids) = named("postgres")
            .or_else(|| named("nobody"))
            .unwrap_or_else(|| ("nobody".into(), (65_534, 65_534)));
        Self { name, drop_to: Some(ids), enter_anywhere: false, setpriv }
    }

    /// Makes the user the owner of `path`.
    pub(super) fn give(&self, path: &Path) -> std::io::Result<()> {
        match self.drop_to {
            Some((uid, gid)) => std::os::unix::fs::chown(path, Some(uid), Some(gid)),
            None => Ok(()),
        }
    }

    /// Can the user work in `dir`?
    pub(super) fn may_enter(&self, dir: &Path) -> bool {
        if self.drop_to.is_none() {
            return true;
        }
        let script = "cd \"$0\" && test -w .";
        self.command(Path::new("/bin/sh"), None)
            .args(["-c", script])
            .arg(dir)
            .current_dir("/")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    }

    /// `program` as this user; `signal_on_parent_death` is sent by the kernel when the thread that starts
    /// it ends (Linux).
    pub(super) fn command(&self, program: &Path, signal_on_parent_death: Option<&str>) -> Command {
        if !self.setpriv || (self.drop_to.is_none() && signal_on_parent_death.is_none()) {
            return Command::new(program);
        }
        let mut command = Command::new("setpriv");
        if let Some((uid, gid)) = self.drop_to {
            command.args([format!("--reuid={uid}"), format!("--regid={gid}"), "--clear-groups".into()]);
            if self.enter_anywhere {
                command.args(["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]);
            }
        }
        if let Some(signal) = signal_on_parent_death {
            command.args(["--pdeathsig", signal]);
        }
        command.arg("--").arg(program);
        command
    }
}

fn is_root() -> bool {
    match fs::metadata("/proc/self") {
        Ok(meta) => meta.uid() == 0,
        Err(_) => {
            Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0")
        }
    }
}
