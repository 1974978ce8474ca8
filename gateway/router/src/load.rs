//! Load of the workers and of the pool, as input of the planners of [roles](crate::roles) and of
//! [replicas](crate::replicas): steps go in one by one, a [`WorkerLoad`] per worker comes out once a second.
//!
//! Step time that no other worker could save is not counted as work: the time of an empty step, and that of its first
//! sequence, which no other worker would halve. Pure: time is an argument.

use crate::WorkerId;
use crate::cost::fill;
use penstock_proto::frames::{Batch, EngineState, Role};
use std::time::Duration;

/// Interval at which the planners of roles and replicas look at the load.
const LOOK: Duration = Duration::from_secs(1);

/// Weight of the last look in a worker's smoothed shares.
const FRESH: f64 = 0.3;

/// Weight of older first tokens after each look: about the last ten seconds count.
const KEPT: f64 = 0.9;

/// Least number of first tokens for a share of late ones.
const TELLING: f64 = 5.0;

/// Load of one worker, as the planners of roles and replicas see it at one look.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerLoad {
    /// Id of the worker that the load is of.
    pub worker: WorkerId,
    /// Role that the worker has now: prefill, decode or mixed.
    pub role: Role,
    /// True if the worker takes requests; others are neither counted nor flipped.
    pub ready: bool,
    /// Share of recent time spent on prefill, 0 to 1.
    pub prefill_busy: f64,
    /// Share of recent time that decoding sequences add to the steps, 0 to 1.
    pub decode_busy: f64,
    /// Seconds of prefill queued at the worker.
    pub queue_seconds: f64,
    /// Mean duration of the steps with decodes, in seconds.
    pub step_seconds: f64,
    /// Duration of an empty step, in seconds.
    pub base_seconds: f64,
    /// Share of the KV cache in use, 0 to 1.
    pub fill: f64,
    /// Number of sequences that the worker runs.
    pub running: u32,
    /// Most sequences that the worker can run at once.
    pub sequences_max: u32,
}

impl WorkerLoad {
    pub(crate) fn prefills_for_others(&self) -> bool {
        self.role == Role::Prefill
    }

    /// Seconds of a mean step without the prefill in it, above those of an empty step.
    pub(crate) fn above_base(&self) -> f64 {
        match self.running {
            0 => 0.0,
            _ => (self.step_seconds * (1.0 - self.prefill_busy.clamp(0.0, 1.0)) - self.base_seconds).max(0.0),
        }
    }
}

/// Load that waits in front of the pool's workers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Number of requests in the gateway's queue.
    pub waiting: usize,
    /// Estimated prefill of the requests in the gateway's queue, in seconds.
    pub waiting_seconds: f64,
    /// Share of all prefill that is in prompts long enough to be computed apart, 0 to 1.
    pub long_share: f64,
}

/// Last report of one worker, from which a look computes its load.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// Id of the worker that reported.
    pub worker: WorkerId,
    /// Engine state that the worker last reported.
    pub state: &'a EngineState,
    /// True if the worker takes new requests.
    pub ready: bool,
    /// Most sequences that the worker can run at once.
    pub sequences_max: u32,
    /// Duration of an empty step in seconds; 0: unknown.
    pub base_seconds: f64,
}

/// Work of one worker since the last look, with the smoothed shares of its time.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    /// Seconds of prefill since the last look.
    prefill: f64,
    /// Smoothed share of time spent on prefill.
    busy: f64,
    /// Seconds of decode since the last look, and the sum of decode's shares of steps, both without those of a first sequence.
    decode: (f64, f64),
    /// Smoothed share of time spent on decode beyond empty steps.
    decodes: f64,
    /// Number of steps with decodes since the last look, and their seconds.
    steps: (u32, f64),
    /// Smoothed duration of a step with decodes, in seconds.
    step: f64,
}

/// Recent work of all workers, gathered from their steps for the planners of roles and replicas.
#[derive(Debug)]
pub struct Watch {
    works: Vec<Work>,
    looked: Duration,
}

impl Watch {
    /// A watch over the workers with ids from 0 to `workers` - 1.
    pub fn new(workers: usize) -> Self {
        Self { works: vec![Work::default(); workers], looked: Duration::ZERO }
    }

    /// Adds a step of a worker to the work since the last look.
    pub fn observe(&mut self, worker: WorkerId, batch: &Batch) {
        let (prefill, decodes) = (f64::from(batch.prefill_tokens), f64::from(batch.decodes));
        let Some(work) = self.works.get_mut(usize::from(worker.0)) else { return };
        if !(batch.seconds.is_finite() && batch.seconds > 0.0 && prefill + decodes > 0.0) {
            return;
        }
        work.prefill += batch.seconds * prefill / (prefill + decodes);
        if batch.decodes > 0 {
            let share = (decodes - 1.0) / (prefill + decodes);
            work.decode = (work.decode.0 + batch.seconds * share, work.decode.1 + share);
            work.steps = (work.steps.0 + 1, work.steps.1 + batch.seconds);
        }
    }

    /// Returns true if the next look is due.
    pub fn is_due(&self, now: Duration) -> bool {
        now.saturating_sub(self.looked) >= LOOK
    }

    /// Load of every worker now and since the last look. To be called when it [is due](Self::is_due).
    pub fn look(&mut self, seen: &[Seen<'_>], now: Duration) -> Vec<WorkerLoad> {
        let elapsed = now.saturating_sub(self.looked).max(LOOK).as_secs_f64();
        self.looked = now;
        for seen in seen {
            let Some(work) = self.works.get_mut(usize::from(seen.worker.0)) else { continue };
            let base = finite(seen.base_seconds);
            let share = (std::mem::take(&mut work.prefill) / elapsed).min(1.0);
            work.busy += (share - work.busy) * FRESH;
            let (seconds, steps) = std::mem::take(&mut work.decode);
            let share = ((seconds - base * steps) / elapsed).clamp(0.0, 1.0);
            work.decodes += (share - work.decodes) * FRESH;
            if let (steps @ 1.., seconds) = std::mem::take(&mut work.steps) {
                let step = seconds / f64::from(steps);
                work.step += (step - work.step) * if work.step > 0.0 { FRESH } else { 1.0 };
            }
        }
        seen.iter().map(|seen| self.load(seen)).collect()
    }

    fn load(&self, seen: &Seen<'_>) -> WorkerLoad {
        let state = seen.state;
        let work = self.works.get(usize::from(seen.worker.0)).copied().unwrap_or_default();
        WorkerLoad {
            worker: seen.worker,
            role: state.role(),
            ready: seen.ready,
            prefill_busy: work.busy,
            decode_busy: work.decodes,
            queue_seconds: finite(state.queue_seconds),
            step_seconds: work.step,
            base_seconds: finite(seen.base_seconds),
            fill: fill(state, 0),
            running: state.running.saturating_sub(state.stalled),
            sequences_max: seen.sequences_max,
        }
    }
}

fn finite(value: f64) -> f64 {
    if value.is_finite() { value.max(0.0) } else { 0.0 }
}

/// Share of recent first tokens that came later than promised.
#[derive(Clone, Copy, Debug, Default)]
pub struct Promises {
    late: f64,
    all: f64,
}

impl Promises {
    /// Counts a first token, or a request that can no longer get it in time.
    pub fn first_token(&mut self, took: Duration, promised: Duration) {
        self.all += 1.0;
        self.late += f64::from(u8::from(took > promised));
    }

    /// Share of late first tokens, if enough came to tell; older ones count less with every call.
    pub fn look(&mut self) -> Option<f64> {
        let share = (self.all >= TELLING).then(|| self.late / self.all);
        (self.late, self.all) = (self.late * KEPT, self.all * KEPT);
        share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_step_and_its_first_sequence_are_no_work() {
        let busy = |decodes: u32, seconds: f64| {
            let mut watch = Watch::new(1);
            let state = EngineState::default();
            let seen = Seen { worker: WorkerId(0), state: &state, ready: true, sequences_max: 8, base_seconds: 0.01 };
            for second in 1..30 {
                let steps = (1.0 / seconds) as u32;
                (0..steps).for_each(|_| {
                    watch.observe(WorkerId(0), &Batch { decodes, seconds, ..Batch::default() });
                });
                watch.look(&[seen], Duration::from_secs(second));
            }
            watch.look(&[seen], Duration::from_secs(30))[0].decode_busy / (1.0 - FRESH)
        };
        assert!(busy(1, 0.012) < 0.01, "{}", busy(1, 0.012));
        assert!((busy(10, 0.02) - 0.45).abs() < 0.02, "{}", busy(10, 0.02));
        assert!((busy(100, 0.1) - 0.89).abs() < 0.02, "{}", busy(100, 0.1));
    }

    #[test]
    fn few_first_tokens_tell_nothing_and_old_ones_are_forgotten() {
        let mut promises = Promises::default();
        let (soon, late) = (Duration::from_millis(10), Duration::from_secs(2));
        (0..4).for_each(|_| promises.first_token(late, Duration::from_secs(1)));
        assert_eq!(promises.look(), None);
        (0..4).for_each(|_| promises.first_token(soon, Duration::from_secs(1)));
        assert!(promises.look().is_some_and(|share| (0.4..0.5).contains(&share)));
        (0..100).for_each(|_| _ = promises.look());
        assert_eq!(promises.look(), None);
    }
}
