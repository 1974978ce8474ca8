//! Detection of processes that the kernel killed for lack of memory, as far as its counters tell.

use crate::cgroup::{Controller, Group};
use crate::{Machine, field};
use std::path::PathBuf;

/// Counter of the processes in a cgroup that the kernel killed for lack of memory, from its creation on.
#[derive(Debug)]
pub struct OomKills {
    /// Files with the counters of the process's cgroup (two in a hybrid layout), and their values at the start.
    before: Vec<(PathBuf, u64)>,
}

impl OomKills {
    pub(crate) fn of(machine: &Machine, pid: u32) -> Self {
        let groups = machine.groups(Some(pid), Controller::Memory);
        // A killed process is counted in its own cgroup, not in the one with the limit.
        let own = groups
            .iter()
            .filter(|group| group.is_own)
            .map(Group::oom_file)
            .filter_map(|file| Some((count(&file)?, file)));
        Self { before: own.map(|(count, file)| (file, count)).collect() }
    }

    /// Returns true if the kernel provides a count.
    pub fn is_counted(&self) -> bool {
        !self.before.is_empty()
    }

    /// Number of processes killed since the start.
    pub fn since(&self) -> u64 {
        let more = |(file, before): &(PathBuf, u64)| count(file).unwrap_or(0).saturating_sub(*before);
        self.before.iter().map(more).max().unwrap_or(0)
    }
}

fn count(file: &std::path::Path) -> Option<u64> {
    field(file, "oom_kill")
}
