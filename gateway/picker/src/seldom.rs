//! Limiter of log lines that a misconfigured proxy would cause with each of its requests.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Seconds between two lines of one kind.
const EACH_SECONDS: u64 = 10;

/// Limiter of one kind of log line: the first at once, then at most one in ten seconds.
#[derive(Debug)]
pub(crate) struct Seldom {
    /// Second from which the next line may be written.
    next: AtomicU64,
    left_out: AtomicU64,
}

impl Seldom {
    /// Limiter that has seen no line.
    pub(crate) const fn new() -> Self {
        Self { next: AtomicU64::new(0), left_out: AtomicU64::new(0) }
    }

    /// Asks for a line; returns the number of lines left out since the last one, or `None` if this one is left out, too.
    pub(crate) fn due(&self) -> Option<u64> {
        static START: OnceLock<Instant> = OnceLock::new();
        self.due_at(START.get_or_init(Instant::now).elapsed().as_secs())
    }

    fn due_at(&self, second: u64) -> Option<u64> {
        let next = self.next.load(Ordering::Relaxed);
        let is_due = second >= next
            && self.next.compare_exchange(next, second + EACH_SECONDS, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !is_due {
            self.left_out.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(self.left_out.swap(0, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_in_ten_seconds_says_how_many_were_left_out() {
        let seldom = Seldom::new();
        let said: Vec<Option<u64>> = [0, 0, 1, 9, 10, 10, 19, 20, 60].map(|second| seldom.due_at(second)).into();
        assert_eq!(said, [Some(0), None, None, None, Some(3), None, None, Some(2), Some(0)]);
    }
}
