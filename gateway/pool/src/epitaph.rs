//! Cause of a worker process's end, as far as its exit status, its log and the kernel's OOM counters tell.

use penstock_machine::{Machine, OomKills};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// SIGKILL: cannot be caught, and is sent by the kernel's OOM killer.
const SIGKILL: i32 = 9;

/// Notes on a running process that explain its end: OOM kills of its cgroup, and kills by the gateway.
#[derive(Debug)]
pub(super) struct Witness {
    kills: OomKills,
    /// True if the gateway itself has killed the process.
    is_ours: bool,
}

impl Witness {
    /// Watches the process `pid` from now on: OOM kills of its cgroup are counted.
    pub(super) fn new(pid: i32) -> Self {
        Self { kills: Machine::default().oom_kills(pid.unsigned_abs()), is_ours: false }
    }

    /// Notes that the gateway is about to kill the process.
    pub(super) fn kills(&mut self) {
        self.is_ours = true;
    }

    /// Description of the process's end that a client may read. `status`: `None` when the process is not this gateway's child.
    pub(super) fn how(&self, status: Option<ExitStatus>) -> String {
        how(status, self.is_ours, self.kills.since())
    }
}

fn how(status: Option<ExitStatus>, is_ours: bool, oom_kills: u64) -> String {
    let is_killed = status.is_none_or(|status| status.signal() == Some(SIGKILL));
    match status {
        _ if is_ours && is_killed => "it showed no sign of life, or did not end a step, and was killed".into(),
        _ if is_killed && oom_kills > 0 => {
            "killed by SIGKILL: out of memory, by the kernel's count for its cgroup".into()
        }
        Some(_) if is_killed => "killed by SIGKILL, perhaps out of memory".into(),
        Some(status) => status.to_string(),
        None => "it is gone".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_says_whether_memory_may_be_the_reason() {
        let killed = Some(ExitStatus::from_raw(SIGKILL));
        let check = |status, is_ours, oom_kills, expected: &str| {
            let said = how(status, is_ours, oom_kills);
            assert!(said.contains(expected), "{said}");
        };
        check(killed, false, 0, "perhaps out of memory");
        check(killed, false, 1, "SIGKILL: out of memory, by the kernel's count");
        check(killed, true, 0, "no sign of life");
        check(None, false, 0, "it is gone");
        check(None, false, 2, "out of memory");
        // Another process of the cgroup was killed for memory; this one exited by itself.
        check(Some(ExitStatus::from_raw(1 << 8)), false, 1, "exit status: 1");
        check(Some(ExitStatus::from_raw(11)), false, 1, "SIGSEGV");
    }
}
