//! Bound on the jobs of one request in the pool at once: a few, so that one request cannot take the whole queue.

use penstock_pool::PoolError;

/// Most jobs of one request in the pool at once.
pub(super) const WAVE_MAX: usize = 16;

/// Jobs `0..total` of one request, submitted in order, the next when one ends.
pub(super) struct Wave {
    total: usize,
    next: usize,
    open: usize,
}

impl Wave {
    /// Wave of `total` jobs, none submitted yet.
    pub(super) fn new(total: usize) -> Self {
        Self { total, next: 0, open: 0 }
    }

    /// Submits jobs up to the bound. A full pool is no failure while a job of this request is in it: that job's end
    /// makes room.
    ///
    /// # Errors
    /// The pool's refusal.
    pub(super) fn fill(&mut self, mut submit: impl FnMut(usize) -> Result<(), PoolError>) -> Result<(), PoolError> {
        while self.open < WAVE_MAX && self.next < self.total {
            match submit(self.next) {
                Ok(()) => (self.next, self.open) = (self.next + 1, self.open + 1),
                Err(PoolError::Overloaded { .. }) if self.open > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Notes the end of a job, which makes room for the next one.
    pub(super) fn end_one(&mut self) {
        self.open = self.open.saturating_sub(1);
    }

    /// Number of jobs that are in the pool now.
    pub(super) fn open(&self) -> usize {
        self.open
    }

    /// Returns true if all jobs of the request have ended.
    pub(super) fn is_done(&self) -> bool {
        self.open == 0 && self.next == self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    fn full() -> PoolError {
        PoolError::Overloaded { open: 1, limit: 1, retry_after: Duration::from_secs(1) }
    }

    proptest! {
        /// Every job runs once, in order, never more than a wave at once, in a pool with `room` for this request.
        #[test]
        fn every_job_has_its_turn(total in 1usize..200, room in 1usize..40) {
            let (mut wave, mut submitted) = (Wave::new(total), Vec::new());
            let mut ended = 0;
            while !wave.is_done() {
                let filled = wave.fill(|at| {
                    if submitted.len() - ended >= room {
                        return Err(full());
                    }
                    submitted.push(at);
                    Ok(())
                });
                prop_assert_eq!(filled, Ok(()));
                prop_assert_eq!(wave.open(), (total - ended).min(WAVE_MAX).min(room));
                wave.end_one();
                ended += 1;
            }
            prop_assert_eq!(submitted, (0..total).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_pool_that_takes_nothing_is_told() {
        assert_eq!(Wave::new(3).fill(|_| Err(full())), Err(full()));
        let mut wave = Wave::new(3);
        let draining = wave.fill(|at| if at == 0 { Ok(()) } else { Err(PoolError::Draining) });
        assert_eq!((draining, wave.open()), (Err(PoolError::Draining), 1));
    }
}
