//! Processes that a benchmark starts end with it, also when it is killed and cannot tell them: a simulated node of ten
//! million logs that stays behind keeps gigabytes from whatever is measured next.

use std::process::Command;

/// Set for a process that shall not outlive the one that started it.
const VARIABLE: &str = "TIDEMARK_END_WITH_PARENT";

/// This program, to be started as a process that ends with this one.
pub fn child() -> std::io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.env(VARIABLE, std::process::id().to_string());
    Ok(command)
}

/// Ends this process with its parent, if that asked for it. Where the system has no means to do so, nothing happens.
pub fn obey() {
    #[cfg(target_os = "linux")]
    if let Some(parent) = std::env::var(VARIABLE).ok().and_then(|pid| pid.parse::<i32>().ok()) {
        use rustix::process::{Signal, getppid, set_parent_process_death_signal};
        let is_set = set_parent_process_death_signal(Some(Signal::TERM)).is_ok();
        // It may have died before we asked.
        let is_there = getppid().is_some_and(|pid| pid.as_raw_nonzero().get() == parent);
        if is_set && !is_there {
            std::process::exit(i32::from(crate::exit::FAILURE));
        }
    }
}
