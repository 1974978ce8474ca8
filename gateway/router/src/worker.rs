//! One worker as the router sees it: what it said last, what was sent since, how fast it is.

use crate::fit::Fit;
use crate::queue::{FIRST, Rank};
use penstock_proto::BLOCK_TOKENS;
use penstock_proto::frames::{Batch, EngineState, Tier};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

/// Sequences that may wait at a worker that was sent more than it granted; a worker refuses above that.
const WAITING_AT_WORKER_MAX: u32 = 256;

/// Prompt by which workers are compared.
const PACE_TOKENS: usize = 2048;
/// Bytes per second that a transfer is believed to move before any was measured, and what each takes besides. Rather too many: what
/// is believed to be slow is never tried, and what was tried is known.
const PULL_BYTES_PER_SECOND: f64 = 1e10;
const PULL_LATENCY: f64 = 3e-3;
/// Bytes from which the measured rate is believed.
const PULLED_BYTES_MIN: u64 = 1 << 20;
/// Weight of a step in the mean of what prefill takes of one.
const STALL_FRESH: f64 = 1.0 / 64.0;

/// A worker as it announces itself.
#[derive(Clone, Debug, Default)]
pub struct Member {
    /// What its results are exact within.
    pub numerics_id: Arc<str>,
    /// KV blocks in all.
    pub blocks_total: u32,
    /// Sequences that it runs at once.
    pub sequences_max: u32,
    /// State at this moment.
    pub state: EngineState,
    /// Device and path; workers of an equal one are taken to be as fast until their own steps tell.
    pub device: Arc<str>,
    /// Bytes of one block; 0: its blocks cannot be moved to or from other workers.
    pub block_bytes: u64,
}

/// What was sent and is not yet counted in the worker's state.
#[derive(Clone, Copy)]
pub(crate) struct Sent {
    pub(crate) sequences: u32,
    /// Seconds of prefill.
    pub(crate) seconds: f64,
    pub(crate) tokens: usize,
    /// Of these, not cached.
    pub(crate) rows: usize,
    /// Blocks that it will take.
    pub(crate) blocks: u32,
}

pub(crate) struct WorkerView {
    pub(crate) member: Member,
    pub(crate) fit: Fit,
    /// By the number of the frame, oldest first.
    unseen: BTreeMap<u64, Sent>,
    pub(crate) sent: u64,
    /// Requests that have no first token yet: rows of prefill when they were bound.
    prefilling: BTreeMap<(Rank, u64), usize>,
    /// What other workers will ask it to prefill, and how many states came since: by the second it counts it itself.
    lent: Vec<(Sent, u8)>,
    pub(crate) suspended: bool,
    /// Seconds of prefill in a step of those that decode, smoothed: what they wait for others between two tokens.
    stall: f64,
}

impl WorkerView {
    pub(crate) fn new(member: Member, mut fit: Fit) -> Self {
        fit.observe_state(&member.state);
        let (unseen, prefilling) = Default::default();
        Self { member, fit, unseen, sent: 0, prefilling, lent: Vec::new(), suspended: false, stall: 0.0 }
    }

    /// Takes in a state that counts the first `accepted` frames.
    pub(crate) fn hear(&mut self, state: Option<&EngineState>, accepted: u64) {
        self.unseen.retain(|number, _| *number > accepted);
        if let Some(state) = state {
            self.fit.observe_state(state);
            self.member.state = state.clone();
            self.lent.iter_mut().for_each(|(_, states)| *states += 1);
            self.lent.retain(|(_, states)| *states < 2);
        }
    }

    /// Notes what another worker will ask of it.
    pub(crate) fn lend(&mut self, sent: Sent) {
        self.lent.push((sent, 0));
    }

    fn coming(&self) -> impl Iterator<Item = &Sent> {
        self.unseen.values().chain(self.lent.iter().map(|(sent, _)| sent))
    }

    pub(crate) fn observe(&mut self, batch: &Batch) {
        self.fit.observe(batch);
        if batch.decodes > 0 && batch.seconds > 0.0 {
            let prefill = self.fit.work_seconds(f64::from(batch.prefill_tokens), batch.prefill_context);
            // One that is no number would stay in the mean for ever.
            let stall = prefill.clamp(0.0, batch.seconds);
            let stall = if stall.is_finite() { stall } else { 0.0 };
            self.stall += (stall - self.stall) * STALL_FRESH;
        }
    }

    /// Notes what is sent; the number of its frame.
    pub(crate) fn send(&mut self, sent: Sent) -> u64 {
        self.sent += 1;
        self.unseen.insert(self.sent, sent);
        self.sent
    }

    /// The last frame was not sent after all.
    pub(crate) fn unsend(&mut self, number: u64) {
        if self.sent == number {
            self.unseen.remove(&number);
            self.sent -= 1;
        }
    }

    pub(crate) fn takes_requests(&self) -> bool {
        !self.suspended && !self.member.state.draining
    }

    pub(crate) fn credits(&self) -> u32 {
        if self.takes_requests() { self.member.state.credits.saturating_sub(self.promised()) } else { 0 }
    }

    /// Sequences sent that its state does not count yet.
    fn promised(&self) -> u32 {
        self.coming().map(|sent| sent.sequences).sum()
    }

    /// Blocks that they will take.
    pub(crate) fn promised_blocks(&self) -> u32 {
        self.coming().map(|sent| sent.blocks).sum()
    }

    /// Sequences that it has or will have.
    pub(crate) fn sequences(&self) -> u32 {
        let state = &self.member.state;
        state.running.saturating_add(state.waiting).saturating_add(self.promised())
    }

    /// Whether its next steps have rows left for prefill, beside what was sent already: what is sent beyond that waits there, where
    /// nobody can overtake it.
    fn has_rows(&self) -> bool {
        let state = &self.member.state;
        let sent: u64 = self.coming().map(|sent| sent.rows as u64).sum();
        match state.prefill_rows_free {
            // Not said: then credits alone count.
            0 => true,
            free => sent < u64::from(free),
        }
    }

    /// Whether all sequences of a request would start, or as many as ever do: it may need more than a worker grants at once.
    pub(crate) fn starts(&self, sequences: u32) -> bool {
        self.credits() >= sequences.min(self.most_credits()).max(1) && self.has_rows()
    }

    /// Notes a request until its first token.
    pub(crate) fn begin(&mut self, request: u64, rank: Rank, rows: usize) {
        self.prefilling.insert((rank, request), rows);
    }

    /// It has its first token, or has left.
    pub(crate) fn settle(&mut self, request: u64, rank: Rank) {
        self.prefilling.remove(&(rank, request));
    }

    /// The last of those that have no first token.
    pub(crate) fn last_rank(&self) -> Option<Rank> {
        self.prefilling.last_key_value().map(|((rank, _), _)| *rank)
    }

    /// The first turn of those that have no first token; of those that began elsewhere there is none.
    pub(crate) fn first_turn(&self) -> Option<i64> {
        self.prefilling.keys().map(|((_, turn), _)| *turn).filter(|turn| *turn != FIRST).min()
    }

    /// Rows of prefill that one of this rank goes before.
    fn rows_after(&self, rank: Rank) -> usize {
        self.prefilling.range((Bound::Excluded((rank, u64::MAX)), Bound::Unbounded)).map(|(_, rows)| rows).sum()
    }

    /// Whether a request starts here next although no rows are free: some of what is to be computed comes after it, nothing but the first
    /// of all comes before it, and there is a place, and room for `blocks` more.
    pub(crate) fn lets_pass(&self, rank: Rank, sequences: u32, blocks: u32) -> bool {
        if !self.takes_requests() || self.last_rank().is_none_or(|last| last <= rank) {
            return false;
        }
        let state = &self.member.state;
        let sent: u64 = self.coming().map(|sent| sent.rows as u64).sum();
        let places = self.member.sequences_max.saturating_sub(self.sequences());
        let first = self.prefilling.first_key_value().filter(|((first, _), _)| *first <= rank);
        let others = self.rows_after(rank) + first.map_or(0, |(_, rows)| *rows);
        places >= sequences
            && state.blocks_free >= blocks.saturating_add(self.promised_blocks())
            && state.prefill_tokens_pending.saturating_add(sent) <= others as u64
    }

    /// Whether one of them would start and the others may wait at the worker.
    pub(crate) fn starts_one(&self, sequences: u32) -> bool {
        let waiting = self.member.state.waiting.saturating_add(self.promised());
        self.credits() >= 1 && self.has_rows() && waiting.saturating_add(sequences) <= WAITING_AT_WORKER_MAX
    }

    /// Credits that it would have if nothing ran on it: what it grants now and what holds a slot. Stalled sequences hold none.
    fn most_credits(&self) -> u32 {
        let state = &self.member.state;
        let busy = state.running.saturating_sub(state.stalled).saturating_add(state.waiting);
        state.credits.saturating_add(busy).min(self.member.sequences_max).max(1)
    }

    /// Seconds of prefill ahead of a request of this rank.
    pub(crate) fn queue_before(&self, rank: Rank) -> f64 {
        match self.rows_after(rank) {
            0 => self.queue_seconds(),
            // What came last is computed last: of these, all is still to be done.
            rows => (self.queue_seconds() - self.prefill_seconds(rows, 0)).max(0.0),
        }
    }

    /// Seconds of prefill that it has before it.
    pub(crate) fn queue_seconds(&self) -> f64 {
        let state = &self.member.state;
        // A worker that does not say what its tokens attend to has told the seconds.
        let told = if state.prefill_context_pending > 0.0 {
            self.fit.work_seconds(state.prefill_tokens_pending as f64, state.prefill_context_pending)
        } else {
            state.queue_seconds
        };
        let told = if told.is_finite() { told.max(0.0) } else { 0.0 };
        told + self.coming().map(|sent| sent.seconds).sum::<f64>()
    }

    /// Seconds of a step once all that runs decodes, with so many sequences and tokens more.
    pub(crate) fn step_seconds(&self, more: u32, tokens: usize) -> f64 {
        let state = &self.member.state;
        let coming: usize = self.coming().map(|sent| sent.tokens).sum();
        let decoding = f64::from(state.running.saturating_add(self.promised()).saturating_add(more));
        // In floating point: what a worker says may be anything.
        self.fit.step_seconds(decoding, state.context_tokens as f64 + (coming + tokens) as f64)
    }

    /// Seconds between tokens when its steps take `step` and prefill what it usually takes of them.
    pub(crate) fn tpot(&self, step: f64) -> f64 {
        step + self.stall
    }

    /// Whether those that run there would get their tokens later than `tpot` seconds apart once so many sequences and tokens more have
    /// joined. Not where the newcomer would have to wait as long all alone: then it is not the others that are in its way.
    pub(crate) fn is_crowded(&self, more: u32, tokens: usize, tpot: f64) -> bool {
        self.sequences() > 0
            && self.tpot(self.step_seconds(more, tokens)) > tpot
            && self.fit.step_seconds(f64::from(more), tokens as f64) <= tpot
    }

    /// Whether anything is known of how fast it is.
    pub(crate) fn is_known(&self) -> bool {
        self.fit.is_known()
    }

    /// Seconds until one of its sequences ends and leaves its place, if answers have so many tokens; 0 when none runs.
    pub(crate) fn place_seconds(&self, output_tokens: f64) -> f64 {
        match self.member.state.running {
            0 => 0.0,
            running => output_tokens * self.tpot(self.step_seconds(0, 0)) / f64::from(running),
        }
    }

    /// Engine seconds that one token of a sequence takes of a step. What a step takes anyhow is shared as if the worker were half full at
    /// least: who runs on an empty one takes nothing from anybody.
    pub(crate) fn token_seconds(&self) -> f64 {
        let running = f64::from(self.member.state.running.max(1));
        let base = self.fit.step_seconds(0.0, 0.0);
        let half = f64::from(self.member.sequences_max) / 2.0;
        (self.step_seconds(0, 0) - base).max(0.0) / running + base / running.max(half)
    }

    /// Seconds of prefill of a prompt of which `cached` tokens are there.
    pub(crate) fn prefill_seconds(&self, tokens: usize, cached: usize) -> f64 {
        self.fit.prefill_seconds(tokens.saturating_sub(cached), cached)
    }

    /// Prompts of a usual length that it computes in a second.
    pub(crate) fn pace(&self) -> f64 {
        1.0 / self.fit.prefill_seconds(PACE_TOKENS, 0).max(1e-9)
    }

    /// Seconds to load so many tokens from a tier below the device; `None`: it cannot, or has not said how fast.
    pub(crate) fn load_seconds(&self, tier: Tier, tokens: u32) -> Option<f64> {
        let state = self.member.state.tiers.iter().find(|state| state.tier == tier as i32)?;
        let block = state.load_seconds_per_block;
        (block.is_finite() && block > 0.0).then(|| block * f64::from(tokens) / BLOCK_TOKENS as f64)
    }

    /// Whether it has blocks below its device.
    pub(crate) fn has_tiers(&self) -> bool {
        !self.member.state.tiers.is_empty()
    }

    /// Whether it has this tier, and the tier works.
    pub(crate) fn has_tier(&self, tier: Tier) -> bool {
        self.member.state.tiers.iter().any(|state| state.tier == tier as i32 && state.blocks_total > 0)
    }

    /// Seconds to pull so many tokens from another worker, by what its transfers took so far; `None`: they cannot be moved.
    pub(crate) fn pull_seconds(&self, from: &Self, tokens: u32) -> Option<f64> {
        let bytes = self.member.block_bytes;
        let fits = bytes > 0 && from.member.block_bytes == bytes && from.member.numerics_id == self.member.numerics_id;
        let measured =
            self.member.state.transfers.filter(|t| t.moved_bytes >= PULLED_BYTES_MIN && t.moved_seconds > 0.0);
        let rate = measured.map_or(PULL_BYTES_PER_SECOND, |t| t.moved_bytes as f64 / t.moved_seconds);
        let blocks = f64::from(tokens) / BLOCK_TOKENS as f64;
        (fits && rate.is_finite() && rate > 0.0).then(|| PULL_LATENCY + blocks * bytes as f64 / rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_worker_says_of_itself_may_be_anything() {
        let state = EngineState { context_tokens: u64::MAX, running: u32::MAX, ..EngineState::default() };
        let mut view = WorkerView::new(Member { state, ..Member::default() }, Fit::default());
        assert!(view.step_seconds(1, 1000) > 0.0);
        view.observe(&Batch { prefill_tokens: 1, prefill_context: f64::NAN, seconds: 0.1, ..Batch::default() });
        assert!(view.tpot(1.0) < 2.0, "{}", view.tpot(1.0));
    }
}
