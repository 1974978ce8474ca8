//! Whether the kernel killed a process for want of memory, as far as its counters say.

use crate::cgroup::{Controller, Group};
use crate::{Machine, field};
use std::path::PathBuf;

/// Counts the processes of a cgroup that the kernel killed for want of memory, from its making on.
#[derive(Debug)]
pub struct OomKills {
    /// Files with the counters of the process's cgroup (in a hybrid layout of two), and what they said.
    before: Vec<(PathBuf, u64)>,
}

impl OomKills {
    pub(crate) fn of(machine: &Machine, pid: u32) -> Self {
        let groups = machine.groups(Some(pid), Controller::Memory);
        // A killed process is counted where it was, not where the limit is.
        let own = groups
            .iter()
            .filter(|group| group.is_own)
            .map(Group::oom_file)
            .filter_map(|file| Some((count(&file)?, file)));
        Self { before: own.map(|(count, file)| (file, count)).collect() }
    }

    /// Whether the kernel says how many it killed.
    pub fn is_counted(&self) -> bool {
        !self.before.is_empty()
    }

    /// Processes killed since.
    pub fn since(&self) -> u64 {
        let more = |(file, before): &(PathBuf, u64)| count(file).unwrap_or(0).saturating_sub(*before);
        self.before.iter().map(more).max().unwrap_or(0)
    }
}

fn count(file: &std::path::Path) -> Option<u64> {
    field(file, "oom_kill")
}
