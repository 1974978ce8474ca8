//! Memory and cores that a process may use of its machine, within the limits of its control groups (cgroups).
//!
//! In a container the host's figures (`/proc/meminfo`, the number of cores) are far above the process's limits: a
//! process sized by them is killed by the kernel, or starts threads that wait for each other. So both results are the
//! least of the machine's free resources and the remainder of every cgroup, from the process's own up to the mounted
//! one: a limit of any ancestor holds.
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
//! *Absent*: decisions about the use of the memory; swap, which is no place for weights or KV.
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

    /// Memory that this process can use now.
    pub fn memory(&self) -> Memory {
        memory::of(self)
    }

    /// CPU quota of this process's cgroups in cores' worth of time, at least 1; `None` if there is no quota.
    ///
    /// [`std::thread::available_parallelism`] knows the quota too, but only for a process that has all of its cores
    /// for one purpose; a process that divides cores among others needs the quota itself.
    pub fn cores_max(&self) -> Option<usize> {
        let groups = self.groups(None, Controller::Cpu);
        let quota = groups.iter().filter_map(Group::cores).min_by(f64::total_cmp)?;
        // A process with half a core still needs a thread; one with two and a half could keep a third thread busy for
        // half of the time only.
        Some((quota.floor() as usize).max(1))
    }

    /// Starts to count the processes of `pid`'s cgroup that the kernel kills for lack of memory.
    pub fn oom_kills(&self, pid: u32) -> OomKills {
        OomKills::of(self, pid)
    }

    /// Cgroups of a process (`None`: this one) that may limit `controller`'s resource, its own first.
    fn groups(&self, pid: Option<u32>, controller: Controller) -> Vec<Group> {
        let of = pid.map_or_else(|| "self".into(), |pid| pid.to_string());
        let [paths, mounts] = ["cgroup", "mountinfo"].map(|file| self.text(&format!("proc/{of}/{file}")));
        cgroup::groups(&self.root, &paths, &mounts, controller)
    }

    /// Text of a file; empty if it does not exist.
    fn text(&self, path: &str) -> String {
        fs::read_to_string(self.root.join(path)).unwrap_or_default()
    }
}

/// Number that is the whole content of a file; `None` for `max`, and if the file does not exist.
fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The number after `name` in a file of lines `NAME NUMBER`.
fn field(path: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    value.trim().parse().ok()
}
