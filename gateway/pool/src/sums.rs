//! Counters of a worker, summed over all its lives: a restarted worker counts from 0, and a scraped counter must never fall.

use penstock_proto::Epoch;
use penstock_proto::frames::{EngineState, Tier};
use std::ops::AddAssign;

/// Number of KV cache tiers with counters, as the length of an array indexed by [`Tier`].
const TIERS: usize = Tier::Remote as usize + 1;

/// Counters of the engine of one worker, or of several workers added up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    /// Prompt tokens looked up in the prefix cache.
    pub prompt_tokens: u64,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u64,
    /// Tokens that the engine generated.
    pub output_tokens: u64,
    /// Sequences that the engine preempted.
    pub preemptions: u64,
    /// Reasonings that were closed because their budget was spent.
    pub reasonings_closed: u64,
    /// Draft tokens that were computed.
    pub drafted_tokens: u64,
    /// Draft tokens that saved a step.
    pub accepted_tokens: u64,
    /// KV blocks prefetched for waiting requests: those that were used, and those that were not.
    pub prefetched: [u64; 2],
    /// Transfers of KV blocks from other workers to the workers counted here.
    pub transfers: TransferSums,
    /// Work on outputs that follow a grammar.
    pub guides: GuideSums,
    tiers: [TierSums; TIERS],
}

/// Counters of outputs that follow a grammar.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GuideSums {
    /// Tokens that the grammar left no choice about and that took no forward pass of their own.
    pub jumped_tokens: u64,
    /// Masks computed.
    pub masks: u64,
    /// Seconds spent on masks, summed.
    pub mask_seconds: f64,
    /// Grammars compiled, refused ones included.
    pub compiled: u64,
    /// Seconds spent on compiling, summed.
    pub compile_seconds: f64,
    /// Choices that ended because a mask would have been too much work.
    pub too_complex: u64,
}

/// Counters of transfers of KV blocks from other workers, as the receiving worker reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TransferSums {
    /// Transfers that brought all the blocks asked for.
    pub completed: u64,
    /// Transfers that broke off or were refused; the missing blocks were computed.
    pub failed: u64,
    /// Transfers that were cancelled because no request waited for them any more, or their pages were needed.
    pub cancelled: u64,
    /// KV blocks received and usable.
    pub blocks: u64,
    /// Bytes of KV received.
    pub bytes: u64,
    /// Seconds from the first to the last page of a transfer, summed over transfers.
    pub seconds: f64,
    /// Part of `seconds` spent on blocks that the other side computed for the transfer.
    pub prefill_seconds: f64,
    /// Part of `seconds` in which the sending worker still computed.
    pub hidden_seconds: f64,
    /// Part of `bytes` that came through memory that both workers map.
    pub memory_bytes: u64,
    /// Part of `bytes` that came on connections beside the first of their transfer.
    pub stream_bytes: u64,
    /// Failed transfers after which another prefill worker was asked for the missing blocks.
    pub asked_next: u64,
    /// First tokens sampled at the worker that computed the prompt.
    pub first_tokens: u64,
}

/// Counters of one tier of the KV cache below the device: host memory, disk, or remote store.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TierSums {
    /// KV blocks loaded from the tier.
    pub loaded: u64,
    /// Load time in seconds, summed over blocks.
    pub load_seconds: f64,
    /// KV blocks stored in the tier.
    pub stored: u64,
    /// KV blocks that were offered to the tier and that it did not take.
    pub dropped: u64,
    /// Blocks whose content did not match their hash.
    pub corrupt: u64,
    /// Requests that waited for blocks of the tier in vain.
    pub late: u64,
}

impl Sums {
    /// Counters of one life, from the worker's report.
    pub(super) fn of(state: &EngineState) -> Self {
        let transfers = state.transfers.unwrap_or_default();
        let prefetches = state.prefetches.unwrap_or_default();
        let guides = state.guides.unwrap_or_default();
        let mut tiers = [TierSums::default(); TIERS];
        for told in &state.tiers {
            if let Ok(tier) = Tier::try_from(told.tier) {
                tiers[tier as usize] = TierSums {
                    loaded: told.loaded,
                    load_seconds: seconds(told.load_seconds),
                    stored: told.stored,
                    dropped: told.dropped,
                    corrupt: told.corrupt,
                    late: told.late,
                };
            }
        }
        Self {
            prompt_tokens: state.prompt_tokens,
            cached_tokens: state.cached_tokens,
            output_tokens: state.output_tokens,
            preemptions: state.preemptions,
            reasonings_closed: state.reasonings_closed,
            drafted_tokens: state.drafted_tokens,
            accepted_tokens: state.accepted_tokens,
            prefetched: [prefetches.used, prefetches.unused],
            transfers: TransferSums {
                completed: transfers.completed,
                failed: transfers.failed,
                cancelled: transfers.cancelled,
                blocks: transfers.blocks_in,
                bytes: transfers.bytes_in,
                seconds: seconds(transfers.seconds),
                prefill_seconds: seconds(transfers.prefill_seconds),
                hidden_seconds: seconds(transfers.hidden_seconds),
                memory_bytes: transfers.memory_bytes,
                stream_bytes: transfers.stream_bytes,
                asked_next: transfers.asked_next,
                first_tokens: transfers.first_tokens,
            },
            guides: GuideSums {
                jumped_tokens: guides.jumped_tokens,
                masks: guides.masks,
                mask_seconds: seconds(guides.mask_seconds),
                compiled: guides.compiled,
                compile_seconds: seconds(guides.compile_seconds),
                too_complex: guides.too_complex,
            },
            tiers,
        }
    }

    /// Counters of one tier of the KV cache below the device.
    pub fn tier(&self, tier: Tier) -> &TierSums {
        &self.tiers[tier as usize]
    }
}

/// Cleans a reported time: a NaN, infinite or negative value would stay in a sum for ever.
fn seconds(told: f64) -> f64 {
    if told.is_finite() { told.max(0.0) } else { 0.0 }
}

impl AddAssign for Sums {
    fn add_assign(&mut self, more: Self) {
        // Saturating: reported counts may be anything.
        self.join(more, u64::saturating_add, |sum, more| sum + more);
    }
}

impl Sums {
    /// Joins `more` into these counters, field by field.
    fn join(&mut self, more: Self, count: fn(u64, u64) -> u64, time: fn(f64, f64) -> f64) {
        let counted = |sum: &mut u64, more: u64| *sum = count(*sum, more);
        let timed = |sum: &mut f64, more: f64| *sum = time(*sum, more);
        counted(&mut self.prompt_tokens, more.prompt_tokens);
        counted(&mut self.cached_tokens, more.cached_tokens);
        counted(&mut self.output_tokens, more.output_tokens);
        counted(&mut self.preemptions, more.preemptions);
        counted(&mut self.reasonings_closed, more.reasonings_closed);
        counted(&mut self.drafted_tokens, more.drafted_tokens);
        counted(&mut self.accepted_tokens, more.accepted_tokens);
        self.prefetched.iter_mut().zip(more.prefetched).for_each(|(sum, more)| counted(sum, more));
        let (transfers, theirs) = (&mut self.transfers, more.transfers);
        counted(&mut transfers.completed, theirs.completed);
        counted(&mut transfers.failed, theirs.failed);
        counted(&mut transfers.cancelled, theirs.cancelled);
        counted(&mut transfers.blocks, theirs.blocks);
        counted(&mut transfers.bytes, theirs.bytes);
        counted(&mut transfers.memory_bytes, theirs.memory_bytes);
        counted(&mut transfers.stream_bytes, theirs.stream_bytes);
        counted(&mut transfers.asked_next, theirs.asked_next);
        counted(&mut transfers.first_tokens, theirs.first_tokens);
        timed(&mut transfers.seconds, theirs.seconds);
        timed(&mut transfers.prefill_seconds, theirs.prefill_seconds);
        timed(&mut transfers.hidden_seconds, theirs.hidden_seconds);
        let (guides, theirs) = (&mut self.guides, more.guides);
        counted(&mut guides.jumped_tokens, theirs.jumped_tokens);
        counted(&mut guides.masks, theirs.masks);
        timed(&mut guides.mask_seconds, theirs.mask_seconds);
        counted(&mut guides.compiled, theirs.compiled);
        timed(&mut guides.compile_seconds, theirs.compile_seconds);
        counted(&mut guides.too_complex, theirs.too_complex);
        for (tier, theirs) in self.tiers.iter_mut().zip(more.tiers) {
            counted(&mut tier.loaded, theirs.loaded);
            timed(&mut tier.load_seconds, theirs.load_seconds);
            counted(&mut tier.stored, theirs.stored);
            counted(&mut tier.dropped, theirs.dropped);
            counted(&mut tier.corrupt, theirs.corrupt);
            counted(&mut tier.late, theirs.late);
        }
    }
}

/// Counters of one worker over its lives. A life that begins under an epoch the worker had before is not told from the
/// old one: its counters stand still until they pass the old values, and never fall. (Elsewhere a repeated epoch
/// matters as little: state comes from the worker's snapshot when it is ready, an unseen restart ends with its
/// patience, and a request that kills such workers is given up after [`ATTEMPTS_MAX`](super::truth::ATTEMPTS_MAX)
/// attempts instead of two deaths.)
#[derive(Debug, Default)]
pub(super) struct Lives {
    epoch: Epoch,
    before: Sums,
    now: Sums,
}

impl Lives {
    /// Begins a session. Under the same epoch the worker's counters go on; returns true for another one.
    pub(super) fn begin(&mut self, epoch: Epoch) -> bool {
        let is_new = epoch != self.epoch;
        if is_new {
            self.before += std::mem::take(&mut self.now);
            self.epoch = epoch;
        }
        is_new
    }

    /// Takes in the counters of the present life, field by field the largest seen.
    pub(super) fn say(&mut self, state: &EngineState) {
        self.now.join(Sums::of(state), u64::max, f64::max);
    }

    /// Counters of the worker, summed over all of its lives.
    pub(super) fn sums(&self) -> Sums {
        let mut sums = self.before;
        sums += self.now;
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_proto::frames::{TierState, TransferState};

    fn state(output_tokens: u64, hidden_seconds: f64, loaded: u64) -> EngineState {
        let tier = TierState { tier: Tier::Disk as i32, loaded, ..TierState::default() };
        let transfers = TransferState { bytes_in: output_tokens, hidden_seconds, ..TransferState::default() };
        EngineState { output_tokens, transfers: Some(transfers), tiers: vec![tier], ..EngineState::default() }
    }

    #[test]
    fn a_new_life_goes_on_where_the_last_one_ended() {
        let mut lives = Lives::default();
        let read = |lives: &Lives| {
            let sums = lives.sums();
            (sums.output_tokens, sums.transfers.bytes, sums.transfers.hidden_seconds, sums.tier(Tier::Disk).loaded)
        };
        lives.begin(Epoch(7));
        lives.say(&state(10, 0.5, 3));
        lives.say(&state(12, 1.0, 4));
        assert_eq!(read(&lives), (12, 12, 1.0, 4));
        // The session was lost, not the worker.
        lives.begin(Epoch(7));
        lives.say(&state(13, 1.0, 4));
        assert_eq!(read(&lives), (13, 13, 1.0, 4));
        lives.begin(Epoch(8));
        assert_eq!(read(&lives), (13, 13, 1.0, 4));
        lives.say(&state(2, 0.25, 1));
        assert_eq!(read(&lives), (15, 15, 1.25, 5));
    }

    #[test]
    fn a_life_that_is_told_twice_lets_no_sum_fall() {
        let mut lives = Lives::default();
        let read = |lives: &Lives| (lives.sums().output_tokens, lives.sums().transfers.hidden_seconds);
        lives.begin(Epoch(7));
        lives.say(&state(10, 0.5, 3));
        lives.say(&state(2, 1.0, 3));
        assert_eq!(read(&lives), (10, 1.0));
        lives.begin(Epoch(7));
        lives.say(&state(0, 0.0, 0));
        assert_eq!(read(&lives), (10, 1.0));
        lives.say(&state(11, 0.0, 0));
        assert_eq!((read(&lives), lives.sums().tier(Tier::Disk).loaded), ((11, 1.0), 3));
    }

    #[test]
    fn what_makes_no_sense_does_not_stay() {
        let mut lives = Lives::default();
        lives.say(&state(u64::MAX, f64::NAN, 0));
        lives.begin(Epoch(1));
        lives.say(&state(5, f64::INFINITY, 0));
        assert_eq!((lives.sums().output_tokens, lives.sums().transfers.hidden_seconds), (u64::MAX, 0.0));
    }
}
