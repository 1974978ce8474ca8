//! Load as the router sees it: how long the queue is in seconds, and how many sequences would start at the next step.

use crate::scheduler::Scheduler;
use crate::sequence::{Sequence, Status};
use penstock_proto::BLOCK_TOKENS;
use penstock_proto::frames::EngineState;

/// Weight of the past at each measured step: the last ten steps or so decide.
const FADE: f64 = 0.9;
/// Rows below which a step says nothing about prefill speed.
const PREFILL_ROWS_MIN: usize = 16;
/// Rows of prefill that a step always takes: one block, at which weights are already streamed for many rows at once.
const PREFILL_ROWS_ALWAYS: usize = 32;

/// What is measured over steps.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stats {
    pub(crate) output_tokens: u64,
    step_seconds: f64,
    rows_faded: f64,
    seconds_faded: f64,
}

impl Stats {
    /// A step of `rows`, of which `prefill` prefill, took `seconds`.
    pub(crate) fn measured(&mut self, rows: usize, prefill: usize, seconds: f64) {
        self.step_seconds = seconds;
        if prefill >= PREFILL_ROWS_MIN && 2 * prefill >= rows && seconds > 0.0 {
            self.rows_faded = self.rows_faded * FADE + rows as f64;
            self.seconds_faded = self.seconds_faded * FADE + seconds;
        }
    }

    /// Tokens per second of prefill; 0 until measured.
    pub(crate) fn prefill_tokens_per_second(&self) -> f64 {
        if self.seconds_faded > 0.0 { self.rows_faded / self.seconds_faded } else { 0.0 }
    }

    /// Rows of prefill that take `seconds` at the measured speed; 0 seconds, or not measured yet: any number.
    pub(crate) fn prefill_rows_in(&self, seconds: f64) -> usize {
        let rate = self.prefill_tokens_per_second();
        if seconds > 0.0 && rate > 0.0 { ((rate * seconds) as usize).max(PREFILL_ROWS_ALWAYS) } else { usize::MAX }
    }

    /// The state after a step.
    pub(crate) fn state(&self, scheduler: &Scheduler, draining: bool) -> EngineState {
        let pending: u64 = scheduler.sequences.values().map(prefill_pending).sum();
        let rate = self.prefill_tokens_per_second();
        let waiting = scheduler.waiting();
        EngineState {
            waiting: waiting as u32,
            running: (scheduler.sequences.len() - waiting) as u32,
            prefill_tokens_pending: pending,
            queue_seconds: if rate > 0.0 { pending as f64 / rate } else { 0.0 },
            step_seconds: self.step_seconds,
            blocks_total: scheduler.pool.total() as u32,
            blocks_free: scheduler.pool.available() as u32,
            blocks_cached: scheduler.pool.cached() as u32,
            credits: if draining { 0 } else { credits(scheduler) },
            prompt_tokens: scheduler.looked_up.0,
            cached_tokens: scheduler.looked_up.1,
            output_tokens: self.output_tokens,
            preemptions: scheduler.preemptions,
            draining,
            prefill_tokens_per_second: rate,
            ..Default::default()
        }
    }
}

/// Prompt tokens (and tokens to recompute) that a sequence still has to compute; decode's one token is not among them.
fn prefill_pending(sequence: &Sequence) -> u64 {
    let waits = sequence.status == Status::Waiting;
    if waits || sequence.wanted() > 1 { sequence.wanted() as u64 } else { 0 }
}

/// Sequences that would start at the step after the next, if they came now: free slots, and budget and pages that the ones
/// known leave. A request granted now arrives while the next step runs, so there is no gap.
fn credits(scheduler: &Scheduler) -> u32 {
    let sizes = &scheduler.sizes;
    let active = scheduler.sequences.values().filter(|sequence| !sequence.stalled());
    let (mut count, mut rows, mut pages_wanted) = (0, 0, 0);
    for sequence in active {
        count += 1;
        rows += sequence.wanted();
        if sequence.status == Status::Waiting {
            pages_wanted += sequence.len().div_ceil(BLOCK_TOKENS);
        } else {
            pages_wanted += 1;
        }
    }
    let slots = sizes.sequences_max.saturating_sub(count);
    // The next step takes one budget away; what is left of the one after can start something.
    let rows_free = (2 * sizes.batch_tokens).saturating_sub(rows).min(sizes.batch_tokens);
    let pages_free = scheduler.pool.available().saturating_sub(pages_wanted);
    slots.min(rows_free).min(pages_free) as u32
}
