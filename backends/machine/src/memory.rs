//! How much memory there is for a process.

use crate::Machine;
use crate::cgroup::{Controller, Group};

/// Where the system says nothing.
const UNKNOWN: u64 = 4 << 30;

/// Which limit is the tightest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// What the machine has free.
    Machine,
    /// The limit of a cgroup, in bytes.
    Cgroup(u64),
    /// The system does not say: a guess.
    Unknown,
}

/// Memory that a process can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Bytes, without taking them from somebody else.
    pub available: u64,
    /// What keeps it from having more.
    pub bound: Bound,
}

/// The least of what the machine has free and what each cgroup leaves.
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

/// `MemAvailable`.
fn of_machine(machine: &Machine) -> Option<u64> {
    let text = machine.text("proc/meminfo");
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
