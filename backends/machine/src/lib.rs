//! What a process may use of its machine: memory and cores, within the limits of its control groups (cgroups).
//!
//! In a container the host's figures (`/proc/meminfo`, the number of cores) are far above what the process may use: whoever sizes itself by
//! them is killed by the kernel, or starts threads that wait for each other. So both are the least of what the machine has free and what
//! every cgroup leaves, from the process's own up to the one that is mounted: a limit of any ancestor holds.
//!
//! ```text
//! ROOT/proc/meminfo               MemAvailable
//! ROOT/proc/PID/cgroup            the process's path in each hierarchy; v2: one, v1: one per controller
//! ROOT/proc/PID/mountinfo         where the hierarchies are mounted, and from which of their folders on
//! ROOT/sys/fs/cgroup/…            v2: memory.max, memory.high, memory.current, memory.stat, memory.events, cpu.max
//!                                 v1: memory.limit_in_bytes, memory.usage_in_bytes, memory.stat, memory.oom_control, cpu.cfs_quota_us
//! ```
//! The root of the file system is an argument, so that folders in a test stand for machines.
//!
//! *Absent*: decisions about what the memory is for; swap, which is no place for weights or KV.
#![forbid(unsafe_code)]

mod cgroup;
mod memory;
mod oom;

pub use memory::{Bound, Memory};
pub use oom::OomKills;

use cgroup::{Controller, Group};
use std::fs;
use std::path::{Path, PathBuf};

/// A machine, as its file system describes it.
#[derive(Clone, Debug)]
pub struct Machine {
    root: PathBuf,
}

impl Default for Machine {
    fn default() -> Self {
        Self { root: "/".into() }
    }
}

impl Machine {
    /// The machine whose `proc` and `sys` are below `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Memory that this process can have now.
    pub fn memory(&self) -> Memory {
        memory::of(self)
    }

    /// Cores' worth of time that the cgroups of this process allow, at least 1; `None`: as much as there is.
    ///
    /// [`std::thread::available_parallelism`] knows this too, but only for a process that has all of its cores for one purpose; whoever shares
    /// cores out among several processes needs the quota itself.
    pub fn cores_max(&self) -> Option<usize> {
        let groups = self.groups(None, Controller::Cpu);
        let quota = groups.iter().filter_map(Group::cores).min_by(f64::total_cmp)?;
        // A process with half a core still needs a thread, and one with two and a half can keep a third busy for half of the time only.
        Some((quota.floor() as usize).max(1))
    }

    /// Counts from now on how many processes of `pid`'s cgroup the kernel kills for want of memory.
    pub fn oom_kills(&self, pid: u32) -> OomKills {
        OomKills::of(self, pid)
    }

    /// The cgroups of a process (`None`: this one) that may limit what `controller` controls, its own first.
    fn groups(&self, pid: Option<u32>, controller: Controller) -> Vec<Group> {
        let of = pid.map_or_else(|| "self".into(), |pid| pid.to_string());
        let [paths, mounts] = ["cgroup", "mountinfo"].map(|file| self.text(&format!("proc/{of}/{file}")));
        cgroup::groups(&self.root, &paths, &mounts, controller)
    }

    /// A file as text; empty where there is none.
    fn text(&self, path: &str) -> String {
        fs::read_to_string(self.root.join(path)).unwrap_or_default()
    }
}

/// A number that is all of a file; `None` for `max`, and where there is no such file.
fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The number after `name` in a file of lines `NAME NUMBER`.
fn field(path: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    value.trim().parse().ok()
}
