//! Memory available to a process.

use crate::Machine;
use crate::cgroup::{Controller, Group};

/// Bytes assumed where the system does not say.
const UNKNOWN: u64 = 4 << 30;

/// The tightest limit of the memory that a process can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The free memory of the machine, `MemAvailable`.
    Machine,
    /// The limit of a cgroup, in bytes.
    Cgroup(u64),
    /// The memory of a device of its own, such as a GPU, in bytes.
    Device(u64),
    /// The system does not say: a guess.
    Unknown,
}

/// Memory that a process can use, and the limit that bounds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Bytes that can be used without taking them from another process.
    pub available: u64,
    /// Limit that determines `available`: the machine or a cgroup.
    pub bound: Bound,
}

/// Memory of the process: the least of the machine's free memory and the remainder of each cgroup.
pub(crate) fn of(machine: &Machine) -> Memory {
    let left = |group: &Group| {
        let usage = group.usage()?;
        Some(Memory { available: usage.limit.saturating_sub(usage.used), bound: Bound::Cgroup(usage.limit) })
    };
    let free = of_machine(machine).map(|available| Memory { available, bound: Bound::Machine });
    let groups = machine.groups(None, Controller::Memory);
    let all = free.into_iter().chain(groups.iter().filter_map(left));
    all.min_by_key(|memory| memory.available).unwrap_or(Memory { available: UNKNOWN, bound: Bound::Unknown })
}

/// `MemAvailable` of the machine, in bytes.
fn of_machine(machine: &Machine) -> Option<u64> {
    let text = machine.text("proc/meminfo");
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
