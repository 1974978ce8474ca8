//! One worker as the router sees it: its last report, the requests sent since, and its speed.

use crate::fit::Fit;
use crate::view::{FIRST, Needs, Rank};
use penstock_proto::frames::{Batch, EngineState, Tier};
use penstock_proto::{AdapterId, BLOCK_TOKENS, Capabilities, RequestId};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

/// Most sequences that may wait at a worker beyond its credits; a worker refuses more.
const WAITING_AT_WORKER_MAX: u32 = 256;

/// Prompt length by which workers' speeds are compared.
const PACE_TOKENS: usize = 2048;
/// Bytes per second assumed of a transfer before any was measured, and the fixed seconds of each. An optimistic value:
/// a transfer believed to be slow is never tried, and one that was tried is measured.
const PULL_BYTES_PER_SECOND: f64 = 1e10;
const PULL_LATENCY: f64 = 3e-3;
/// Bytes from which on the measured rate is used.
const PULLED_BYTES_MIN: u64 = 1 << 20;
/// Weight of a step in the mean prefill time per step.
const STALL_FRESH: f64 = 1.0 / 64.0;

/// Worker as it announces itself when it is ready: numerics, size of its cache, and speed class.
#[derive(Clone, Debug, Default)]
pub struct Member {
    /// Numerics of the worker: results are bit-exact between workers of equal numerics.
    pub numerics_id: Arc<str>,
    /// Id of the worker's grammars; empty: the worker follows none.
    pub grammar: Arc<str>,
    /// Capabilities that the worker announces.
    pub capabilities: Capabilities,
    /// Adapters that the worker has loaded.
    pub adapters: Arc<[AdapterId]>,
    /// KV blocks that the worker's device has in all.
    pub blocks_total: u32,
    /// Most sequences that run at once.
    pub sequences_max: u32,
    /// Engine state that came with the announcement.
    pub state: EngineState,
    /// Device and instruction path; workers of an equal one are assumed to be as fast until their own steps tell.
    pub device: Arc<str>,
    /// Bytes of one block; 0: blocks cannot be moved to or from other workers.
    pub block_bytes: u64,
}

/// Request that was sent and is not counted in the worker's state yet.
#[derive(Clone, Copy)]
pub(crate) struct Sent {
    pub(crate) sequences: u32,
    /// Predicted prefill of the request, in seconds.
    pub(crate) seconds: f64,
    pub(crate) tokens: usize,
    /// Prompt tokens of the request that are not cached at the worker.
    pub(crate) rows: usize,
    /// Number of KV blocks that the request will take.
    pub(crate) blocks: u32,
}

pub(crate) struct WorkerView {
    pub(crate) member: Member,
    pub(crate) fit: Fit,
    /// Requests sent that the worker has not counted in a report yet, by frame number.
    unseen: BTreeMap<u64, Sent>,
    pub(crate) sent: u64,
    /// Requests without a first token: their prefill rows at the binding.
    prefilling: BTreeMap<(Rank, RequestId), usize>,
    /// Prefill that other workers will ask for, with the number of states heard since: the second state counts it itself.
    lent: Vec<(Sent, u8)>,
    /// Sequences that this gateway has at the worker, by priority.
    bound: BTreeMap<i32, u32>,
    pub(crate) suspended: bool,
    /// Smoothed seconds of prefill per step with decodes: the time that sequences wait for others between two tokens.
    stall: f64,
}

impl WorkerView {
    /// Returns true if the worker has every ability that a request needs.
    pub(crate) fn meets(&self, needs: &Needs) -> bool {
        needs.are_met_by(&self.member.grammar, self.member.capabilities, self.member.adapters.iter().copied())
    }

    /// Returns true if the worker computes the KV that a worker with the adapter would; `None`: that of the model alone.
    pub(crate) fn has_adapter(&self, adapter: Option<AdapterId>) -> bool {
        adapter.is_none_or(|id| self.member.adapters.contains(&id))
    }

    pub(crate) fn new(member: Member, mut fit: Fit) -> Self {
        fit.observe_state(&member.state);
        let (unseen, prefilling, bound) = Default::default();
        Self { member, fit, unseen, sent: 0, prefilling, lent: Vec::new(), bound, suspended: false, stall: 0.0 }
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

    /// Notes prefill that another worker will ask for.
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
            // A NaN would stay in the mean for ever.
            let stall = prefill.clamp(0.0, batch.seconds);
            let stall = if stall.is_finite() { stall } else { 0.0 };
            self.stall += (stall - self.stall) * STALL_FRESH;
        }
    }

    /// Notes a request that is sent; returns the number of its frame.
    pub(crate) fn send(&mut self, sent: Sent) -> u64 {
        self.sent += 1;
        self.unseen.insert(self.sent, sent);
        self.sent
    }

    /// Takes back the last frame, which was not sent after all.
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

    /// Sequences sent that the worker's state does not count yet.
    fn promised(&self) -> u32 {
        self.coming().map(|sent| sent.sequences).sum()
    }

    /// Blocks that the requests not counted yet will take.
    pub(crate) fn promised_blocks(&self) -> u32 {
        self.coming().map(|sent| sent.blocks).sum()
    }

    /// Number of sequences at the worker, those on their way to it included.
    pub(crate) fn sequences(&self) -> u32 {
        let state = &self.member.state;
        state.running.saturating_add(state.waiting).saturating_add(self.promised())
    }

    /// Returns true if the worker's next steps have prefill rows left beyond the requests already sent. A request sent beyond
    /// that waits at the worker, where none can overtake it.
    fn has_rows(&self) -> bool {
        let state = &self.member.state;
        let sent: u64 = self.coming().map(|sent| sent.rows as u64).sum();
        match state.prefill_rows_free {
            // Not reported: then credits alone count.
            0 => true,
            free => sent < u64::from(free),
        }
    }

    /// Returns true if all sequences of a request would start, or as many as ever can: a request may need more than a worker grants at once.
    pub(crate) fn starts(&self, sequences: u32) -> bool {
        self.credits() >= sequences.min(self.most_credits()).max(1) && self.has_rows()
    }

    /// Returns true if the worker has pages for `blocks` blocks beside those that waiting requests and requests on their way will take.
    /// Also where waiting frees none: nothing runs there, or what runs may be preempted, stalled sequences by any request and the others by
    /// one of this priority. Sequences of other gateways count as such, since their priority is not known.
    pub(crate) fn has_pages(&self, blocks: u32, priority: i32) -> bool {
        let state = &self.member.state;
        let taken = state.blocks_wanted.saturating_add(self.promised_blocks());
        let known: u32 = self.bound.values().sum();
        let less_urgent = self.bound.range((Bound::Excluded(priority), Bound::Unbounded)).next();
        let preempts = state.stalled > 0 || state.running > known || less_urgent.is_some();
        state.running == 0 || preempts || state.blocks_free >= taken.saturating_add(blocks).min(state.blocks_total)
    }

    /// Counts a request's sequences at the worker until it ends, and its uncached tokens as prefill until its first token.
    pub(crate) fn begin(&mut self, request: RequestId, rank: Rank, sequences: u32, rows: usize) {
        self.prefilling.insert((rank, request), rows);
        *self.bound.entry(rank.0).or_default() += sequences;
    }

    /// Removes the sequences of a request that has ended or left.
    pub(crate) fn end(&mut self, rank: Rank, sequences: u32) {
        let left = self.bound.get(&rank.0).map_or(0, |bound| bound.saturating_sub(sequences));
        if left == 0 {
            self.bound.remove(&rank.0);
        } else {
            self.bound.insert(rank.0, left);
        }
    }

    /// Removes a request that has its first token or has left.
    pub(crate) fn settle(&mut self, request: RequestId, rank: Rank) {
        self.prefilling.remove(&(rank, request));
    }

    /// Last rank of the requests without a first token.
    pub(crate) fn last_rank(&self) -> Option<Rank> {
        self.prefilling.last_key_value().map(|((rank, _), _)| *rank)
    }

    /// First turn of the requests without a first token, resumed ones left out.
    pub(crate) fn first_turn(&self) -> Option<i64> {
        self.prefilling.keys().map(|((_, turn), _)| *turn).filter(|turn| *turn != FIRST).min()
    }

    /// Prefill rows of requests that a request of this rank goes before.
    fn rows_after(&self, rank: Rank) -> usize {
        self.prefilling
            .range((Bound::Excluded((rank, RequestId(u64::MAX))), Bound::Unbounded))
            .map(|(_, rows)| rows)
            .sum()
    }

    /// Returns true if a request may be sent although no rows are free, because it would be the next to start: part of the
    /// queued prefill comes after it, nothing but the very first request comes before it, and there is a place with
    /// room for `blocks` more.
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

    /// Returns true if one of the sequences would start and the others may wait at the worker.
    pub(crate) fn starts_one(&self, sequences: u32) -> bool {
        let waiting = self.member.state.waiting.saturating_add(self.promised());
        self.credits() >= 1 && self.has_rows() && waiting.saturating_add(sequences) <= WAITING_AT_WORKER_MAX
    }

    /// Credits of the worker if nothing ran on it: its present credits and the slots in use. Stalled sequences hold no slot.
    fn most_credits(&self) -> u32 {
        let state = &self.member.state;
        let busy = state.running.saturating_sub(state.stalled).saturating_add(state.waiting);
        state.credits.saturating_add(busy).min(self.member.sequences_max).max(1)
    }

    /// Predicted seconds of the prefill at the worker that comes before a request of this rank.
    pub(crate) fn queue_before(&self, rank: Rank) -> f64 {
        match self.rows_after(rank) {
            0 => self.queue_seconds(),
            // The last ones are computed last, so all of their rows are still to be done.
            rows => (self.queue_seconds() - self.prefill_seconds(rows, 0)).max(0.0),
        }
    }

    /// Predicted seconds of the prefill that is queued at the worker.
    pub(crate) fn queue_seconds(&self) -> f64 {
        let state = &self.member.state;
        // A worker that does not report the attended tokens has reported the seconds.
        let told = if state.prefill_context_pending > 0.0 {
            self.fit.work_seconds(state.prefill_tokens_pending as f64, state.prefill_context_pending)
        } else {
            state.queue_seconds
        };
        let told = if told.is_finite() { told.max(0.0) } else { 0.0 };
        told + self.coming().map(|sent| sent.seconds).sum::<f64>()
    }

    /// Seconds of a decode step with all running sequences, and with `more` sequences and `tokens` tokens added.
    pub(crate) fn step_seconds(&self, more: u32, tokens: usize) -> f64 {
        let state = &self.member.state;
        let coming: usize = self.coming().map(|sent| sent.tokens).sum();
        let decoding = f64::from(state.running.saturating_add(self.promised()).saturating_add(more));
        // In floating point: a worker may report any number.
        self.fit.step_seconds(decoding, state.context_tokens as f64 + (coming + tokens) as f64)
    }

    /// Seconds between tokens for steps of `step` seconds with the usual prefill in them.
    pub(crate) fn tpot(&self, step: f64) -> f64 {
        step + self.stall
    }

    /// Returns true if the sequences there would get their tokens more than `tpot` seconds apart once `more` sequences and
    /// `tokens` tokens have joined. False where the newcomer alone would be as slow: then the others are not the cause.
    pub(crate) fn is_crowded(&self, more: u32, tokens: usize, tpot: f64) -> bool {
        self.sequences() > 0
            && self.tpot(self.step_seconds(more, tokens)) > tpot
            && self.fit.step_seconds(f64::from(more), tokens as f64) <= tpot
    }

    /// Returns true if anything is known of the worker's speed.
    pub(crate) fn is_known(&self) -> bool {
        self.fit.is_known()
    }

    /// Predicted seconds until a sequence ends and frees its place, at `output_tokens` per answer; 0 when none runs.
    pub(crate) fn place_seconds(&self, output_tokens: f64) -> f64 {
        match self.member.state.running {
            0 => 0.0,
            running => output_tokens * self.tpot(self.step_seconds(0, 0)) / f64::from(running),
        }
    }

    /// Engine seconds charged for one token of a sequence. The base of a step is shared as if the worker were at least
    /// half full: a sequence on an empty worker takes nothing from others.
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

    /// Speed of the worker: prompts of [`PACE_TOKENS`] tokens per second.
    pub(crate) fn pace(&self) -> f64 {
        1.0 / self.fit.prefill_seconds(PACE_TOKENS, 0).max(1e-9)
    }

    /// Seconds to load `tokens` tokens from a tier below the device; `None`: not possible, or not reported.
    pub(crate) fn load_seconds(&self, tier: Tier, tokens: u32) -> Option<f64> {
        let state = self.member.state.tiers.iter().find(|state| state.tier == tier as i32)?;
        let block = state.load_seconds_per_block;
        (block.is_finite() && block > 0.0).then(|| block * f64::from(tokens) / BLOCK_TOKENS as f64)
    }

    /// Returns true if the worker has tiers below its device.
    pub(crate) fn has_tiers(&self) -> bool {
        !self.member.state.tiers.is_empty()
    }

    /// Returns true if the worker has this tier, and the tier works.
    pub(crate) fn has_tier(&self, tier: Tier) -> bool {
        self.member.state.tiers.iter().any(|state| state.tier == tier as i32 && state.blocks_total > 0)
    }

    /// Seconds to pull `tokens` tokens from another worker, at the rate of past transfers; `None`: blocks cannot be moved between the two.
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
    fn a_worker_has_every_ability_that_a_request_needs() {
        let meets = |member: Member, needs: Needs| WorkerView::new(member, Fit::default()).meets(&needs);
        let adapters = Arc::from([AdapterId(1), AdapterId(2)]);
        let all = || Member {
            grammar: "g".into(),
            capabilities: Capabilities::all(),
            adapters: Arc::clone(&adapters),
            ..Member::default()
        };
        let adapter = |id| Needs { adapter: Some(AdapterId(id)), ..Needs::default() };
        assert!(!meets(all(), adapter(3)), "another adapter, or other content of one");
        let grammar = Needs { grammar: Some("g".into()), ..Needs::default() };
        let others = Capabilities::all().iter().map(|one| Needs { capabilities: one.into(), ..Needs::default() });
        for need in others.chain([grammar, adapter(2)]) {
            assert!(meets(all(), need.clone()), "{need:?}");
            assert!(!meets(Member::default(), need.clone()), "{need:?}: an earlier worker");
        }
        assert!(meets(Member::default(), Needs::default()));
    }

    #[test]
    fn what_a_worker_says_of_itself_may_be_anything() {
        let state = EngineState { context_tokens: u64::MAX, running: u32::MAX, ..EngineState::default() };
        let mut view = WorkerView::new(Member { state, ..Member::default() }, Fit::default());
        assert!(view.step_seconds(1, 1000) > 0.0);
        view.observe(&Batch { prefill_tokens: 1, prefill_context: f64::NAN, seconds: 0.1, ..Batch::default() });
        assert!(view.tpot(1.0) < 2.0, "{}", view.tpot(1.0));
    }
}
