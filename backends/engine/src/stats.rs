//! Load of the engine as the router sees it: seconds of queue, and sequences that would start at the next step.

use crate::guide::Meter;
use crate::lookup::RowCost;
use crate::scheduler::Scheduler;
use crate::sequence::{Sequence, Status};
use penstock_kv::{Block, PageId};
use penstock_proto::BLOCK_TOKENS;
use penstock_proto::frames::EngineState;
use std::collections::HashMap;

/// Weight of the past at each measured step: about the last ten steps count.
const FADE: f64 = 0.9;
/// Least rows of a step from which the prefill speed is measured.
const PREFILL_ROWS_MIN: usize = 16;
/// Rows of prefill that a step always takes: one block, at which weights are already streamed for many rows at once.
const PREFILL_ROWS_ALWAYS: usize = 32;

/// Duration of the last step, and prefill speed faded over about the last ten measured steps.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stats {
    pub(crate) output_tokens: u64,
    /// Reasonings that were closed because their budget was spent.
    pub(crate) reasonings_closed: u64,
    /// Draft tokens that steps computed, and those of them from whose rows a token was drawn.
    pub(crate) drafted_tokens: u64,
    pub(crate) accepted_tokens: u64,
    /// Cost of a row of decode.
    pub(crate) row_cost: RowCost,
    /// Counters of guided output.
    pub(crate) guides: Meter,
    /// Most seconds of prefill beside decode; see [`crate::EngineConfig::prefill_seconds_max`].
    prefill_seconds_max: f64,
    step_seconds: f64,
    rows_faded: f64,
    seconds_faded: f64,
}

impl Stats {
    pub(crate) fn new(prefill_seconds_max: f64) -> Self {
        Self { prefill_seconds_max, ..Self::default() }
    }

    /// Records a step: `rows` rows, `prefill` of them prefill, took `seconds`.
    pub(crate) fn measured(&mut self, rows: usize, prefill: usize, seconds: f64) {
        self.step_seconds = seconds;
        if prefill == 0 {
            self.row_cost.observe(rows, seconds);
        }
        if prefill >= PREFILL_ROWS_MIN && 2 * prefill >= rows && seconds > 0.0 {
            self.rows_faded = self.rows_faded * FADE + rows as f64;
            self.seconds_faded = self.seconds_faded * FADE + seconds;
        }
    }

    /// Prefill speed in tokens per second; 0 until measured.
    pub(crate) fn prefill_tokens_per_second(&self) -> f64 {
        if self.seconds_faded > 0.0 { self.rows_faded / self.seconds_faded } else { 0.0 }
    }

    /// Rows of prefill that a step with decodes may take, at the measured speed; unlimited until it is measured.
    pub(crate) fn prefill_rows_max(&self) -> usize {
        let rows = self.prefill_tokens_per_second() * self.prefill_seconds_max;
        if rows > 0.0 { (rows as usize).max(PREFILL_ROWS_ALWAYS) } else { usize::MAX }
    }

    /// State of the engine after a step.
    pub(crate) fn state(&self, scheduler: &Scheduler, draining: bool) -> EngineState {
        let (pending, pending_context) = scheduler
            .sequences
            .values()
            .map(prefill_pending)
            .fold((0, 0.0), |(tokens, context), more| (tokens + more.0, context + more.1));
        let rate = self.prefill_tokens_per_second();
        let waiting = scheduler.waiting();
        let (credits, rows_free) = if draining { (0, 0) } else { room(scheduler, self.prefill_rows_max()) };
        EngineState {
            waiting: waiting as u32,
            running: (scheduler.sequences.len() - waiting) as u32,
            prefill_tokens_pending: pending,
            queue_seconds: if rate > 0.0 { pending as f64 / rate } else { 0.0 },
            step_seconds: self.step_seconds,
            blocks_total: scheduler.pool.total() as u32,
            blocks_free: scheduler.pool.available() as u32,
            blocks_cached: scheduler.pool.cached() as u32,
            credits,
            prefill_rows_free: rows_free,
            prompt_tokens: scheduler.looked_up.0,
            cached_tokens: scheduler.looked_up.1,
            output_tokens: self.output_tokens,
            preemptions: scheduler.preemptions,
            draining,
            prefill_tokens_per_second: rate,
            stalled: stalled(scheduler).count() as u32,
            prefill_context_pending: pending_context,
            context_tokens: context_tokens(scheduler),
            blocks_wanted: blocks_wanted(scheduler),
            reasonings_closed: self.reasonings_closed,
            drafted_tokens: self.drafted_tokens,
            accepted_tokens: self.accepted_tokens,
            ..Default::default()
        }
    }
}

/// Prompt tokens (and tokens to recompute) that a sequence still has to compute, and the tokens that they attend to in
/// sum; decode's one token is not among them. Tokens that the cache had at arrival do not count.
fn prefill_pending(sequence: &Sequence) -> (u64, f64) {
    let waits = sequence.status == Status::Waiting;
    if !waits && sequence.decodes() {
        return (0, 0.0);
    }
    let computed = if waits { sequence.cached_hint.min(sequence.len() - 1) } else { sequence.computed };
    let rows = sequence.len() - computed;
    (rows as u64, attended(rows, sequence.len()))
}

/// Attended tokens summed over the last `rows` of `context` tokens.
pub(crate) fn attended(rows: usize, context: usize) -> f64 {
    rows as f64 * (context as f64 - (rows as f64 - 1.0) / 2.0)
}

/// Pages that a waiting sequence takes when it starts, beyond those cached at its arrival.
fn pages_wanted(sequence: &Sequence) -> usize {
    sequence.len().div_ceil(BLOCK_TOKENS) - (sequence.cached_hint / BLOCK_TOKENS).min(sequence.len() / BLOCK_TOKENS)
}

fn blocks_wanted(scheduler: &Scheduler) -> u32 {
    let waiting = scheduler.sequences.values().filter(|s| s.status == Status::Waiting && !s.stalled());
    waiting.map(pages_wanted).sum::<usize>() as u32
}

fn context_tokens(scheduler: &Scheduler) -> u64 {
    let runs = |sequence: &&Sequence| sequence.status == Status::Running && !sequence.stalled();
    scheduler.sequences.values().filter(runs).map(|sequence| sequence.len() as u64).sum()
}

/// Sequences that have pages and wait for their readers.
fn stalled(scheduler: &Scheduler) -> impl Iterator<Item = &Sequence> {
    scheduler.sequences.values().filter(|sequence| sequence.status == Status::Running && sequence.stalled())
}

/// Pages that the stalled sequences give up to others: those that nobody else holds. Counted up to `most`.
fn pages_stalled(scheduler: &Scheduler, most: usize) -> usize {
    let mut holders = HashMap::<u32, u32>::new();
    let mut gives = |page: u32| match scheduler.pool.block(PageId(page)) {
        Block::Shared { refs, .. } if refs > 1 => {
            let seen = holders.entry(page).or_default();
            *seen += 1;
            *seen == refs
        }
        _ => true,
    };
    stalled(scheduler).flat_map(|sequence| &sequence.table).filter(|page| gives(**page)).take(most).count()
}

/// Number of sequences that would start at the step after the next if they came now, and of rows that they would find:
/// free slots, and the budget and pages left by known sequences, of which the stalled ones are preempted. A request
/// granted now arrives while the next step runs, so there is no gap.
fn room(scheduler: &Scheduler, prefill_rows_max: usize) -> (u32, u32) {
    let sizes = &scheduler.sizes;
    let (mut decodes, mut prefills, mut rows, mut pages) = (0, 0, 0, 0);
    for sequence in scheduler.sequences.values().filter(|sequence| !sequence.stalled()) {
        let waits = sequence.status == Status::Waiting;
        // A running sequence has its pages and may begin one more block.
        pages += if waits { pages_wanted(sequence) } else { 1 };
        if waits || !sequence.decodes() {
            (prefills, rows) = (prefills + 1, rows + prefill_pending(sequence).0 as usize);
        } else {
            decodes += 1;
        }
    }
    let beside = if decodes > 0 { prefill_rows_max } else { usize::MAX };
    let budget = sizes.batch_tokens.saturating_sub(decodes).min(beside);
    // The next step takes one budget; the remainder of the one after can start something.
    let rows_free = budget.saturating_mul(2).saturating_sub(rows).min(budget);
    let slots = sizes.sequences_max.saturating_sub(decodes + prefills);
    let (free, wanted) = (scheduler.pool.available(), slots.min(rows_free) + pages);
    let free = if free < wanted { free + pages_stalled(scheduler, wanted - free) } else { free };
    let pages_free = free.saturating_sub(pages);
    (slots.min(rows_free).min(pages_free) as u32, rows_free as u32)
}
