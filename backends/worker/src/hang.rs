//! Steps that do not end, though the process answers: a kernel that hangs, a driver that waits for ever.
//!
//! Gateways give up a worker in such a step, and kill the processes that are their own. A worker that somebody else runs ends itself, so that it is
//! started anew. Time is counted in looks of this process: a process that is stopped, or has no CPU, does not look.

use std::time::Duration;

/// Interval of the looks.
pub(crate) const LOOK: Duration = Duration::from_millis(100);

/// Looks that every step may last: ten minutes, as for gateways.
const LOOKS: u32 = 6000;

/// Multiple of the longest step so far that a step may last in any case; as for gateways.
const LONGEST: u32 = 40;

/// Count of the step in progress; see the module header.
#[derive(Debug, Default)]
pub(crate) struct Hang {
    /// Number of the step in progress; 0: there was none at the last look.
    step: u64,
    /// Looks at this step after the first.
    looks: u32,
    /// Most looks at a step that has ended.
    longest: u32,
}

impl Hang {
    /// Looks at the step in progress, by its number; 0: there is none. Returns true if the step will not end.
    pub(crate) fn look(&mut self, step: u64) -> bool {
        if step != self.step {
            self.longest = self.longest.max(self.looks);
            (self.step, self.looks) = (step, 0);
        } else if step != 0 {
            self.looks += 1;
        }
        self.looks > LOOKS.max(self.longest.saturating_mul(LONGEST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks at `step` until it will not end; `None`: not within `most` looks after the first.
    fn ends(hang: &mut Hang, step: u64, most: u32) -> Option<u32> {
        (0..=most).find(|_| hang.look(step))
    }

    #[test]
    fn a_step_ends_within_ten_minutes_or_by_the_measure_of_longer_ones() {
        let mut hang = Hang::default();
        assert_eq!(ends(&mut hang, 0, 100_000), None, "the engine is idle");
        for step in 1..=5 {
            assert_eq!(ends(&mut hang, step, 1000), None);
        }
        // The longest one took 100 s, so that 4000 s are no wonder.
        assert_eq!(ends(&mut hang, 6, 100_000), Some(40_001));
        let mut hang = Hang::default();
        assert_eq!(ends(&mut hang, 1, 100), None);
        assert_eq!(ends(&mut hang, 0, 10), None);
        assert_eq!(ends(&mut hang, 2, 100_000), Some(6001));
    }
}
