//! CPU time and memory of a process, from /proc.

use std::fs;

/// Clock ticks per second of /proc/*/stat: USER_HZ, 100 on every Linux (`man 5 proc`).
const TICKS_PER_SECOND: f64 = 100.0;

/// CPU time used so far, in seconds. Reads the scheduler's nanoseconds of all threads where the kernel has them, since
/// a tick is as long as a thousand requests.
pub(crate) fn cpu_seconds(pid: u32) -> Option<f64> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let nanoseconds = threads.filter_map(|thread| {
        let text = fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    match nanoseconds.sum::<u64>() {
        0 => ticks(pid),
        sum => Some(sum as f64 / 1e9),
    }
}

fn ticks(pid: u32) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name, which may contain spaces; utime and stime are fields 14 and 15.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some((fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?) / TICKS_PER_SECOND)
}

/// Proportional set size in bytes.
pub(crate) fn memory_bytes(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_cpu_time_and_memory() {
        let own = std::process::id();
        assert!(cpu_seconds(own).is_some_and(|seconds| seconds > 0.0 && seconds < 3600.0));
        assert!(memory_bytes(own).is_some_and(|bytes| bytes > 100 << 10));
        assert!(memory_bytes(u32::MAX).is_none());
    }
}
