//! Load, capacity and counters of an engine in frames, by which the router chooses workers.

use crate::guide::GuideState;
use crate::kv::Tier;
use crate::role::Role;
use prost::Message;

/// Load and capacity of one engine, pushed with every step; the router chooses workers by it.
#[derive(Clone, PartialEq, Message)]
pub struct EngineState {
    /// Sequences waiting for their first step.
    #[prost(uint32, tag = "1")]
    pub waiting: u32,
    /// Sequences in prefill or decode.
    #[prost(uint32, tag = "2")]
    pub running: u32,
    /// Prompt tokens not computed so far, of waiting and running sequences.
    #[prost(uint64, tag = "3")]
    pub prefill_tokens_pending: u64,
    /// Time to compute the pending prompt tokens at the measured speed, in seconds.
    #[prost(double, tag = "4")]
    pub queue_seconds: f64,
    /// Duration of the last step with work, in seconds.
    #[prost(double, tag = "5")]
    pub step_seconds: f64,
    /// KV blocks of the device in total: pages of the pool.
    #[prost(uint32, tag = "6")]
    pub blocks_total: u32,
    /// KV blocks of the device that are free or evictable now.
    #[prost(uint32, tag = "7")]
    pub blocks_free: u32,
    /// KV blocks of the device held only by the prefix cache, by no sequence.
    #[prost(uint32, tag = "8")]
    pub blocks_cached: u32,
    /// Number of sequences that the worker would start at its next step.
    #[prost(uint32, tag = "9")]
    pub credits: u32,
    /// Prompt tokens looked up since the epoch began.
    #[prost(uint64, tag = "10")]
    pub prompt_tokens: u64,
    /// Part of `prompt_tokens` that was read from the prefix cache.
    #[prost(uint64, tag = "11")]
    pub cached_tokens: u64,
    /// Output tokens of all sequences since the epoch began.
    #[prost(uint64, tag = "12")]
    pub output_tokens: u64,
    /// Preemptions of running sequences for lack of blocks, since the epoch began.
    #[prost(uint64, tag = "13")]
    pub preemptions: u64,
    /// True if the worker is draining and accepts nothing new.
    #[prost(bool, tag = "14")]
    pub draining: bool,
    /// Measured prefill speed in tokens per second; 0 until known.
    #[prost(double, tag = "15")]
    pub prefill_tokens_per_second: f64,
    /// Age of the step in progress when the frame was written, in seconds; 0 between steps. Distinguishes a hung
    /// engine from an idle one.
    #[prost(double, tag = "16")]
    pub step_age_seconds: f64,
    /// Part of `running` that waits for its reader; these sequences take no slot from others.
    #[prost(uint32, tag = "17")]
    pub stalled: u32,
    /// Attended tokens summed over the tokens in `prefill_tokens_pending`.
    #[prost(double, tag = "18")]
    pub prefill_context_pending: f64,
    /// Context tokens of the running sequences without stalled ones: the attended tokens of a step once all of them
    /// decode.
    #[prost(uint64, tag = "19")]
    pub context_tokens: u64,
    /// Current [`Role`] of the worker, as its number.
    #[prost(enumeration = "Role", tag = "20")]
    pub role: i32,
    /// State of each KV tier below the device (host, disk, remote), fastest first.
    #[prost(message, repeated, tag = "21")]
    pub tiers: Vec<TierState>,
    /// Counters of KV moved from and to other workers.
    #[prost(message, optional, tag = "22")]
    pub transfers: Option<TransferState>,
    /// Free rows of prefill in the step after the next; 0 if unknown.
    #[prost(uint32, tag = "23")]
    pub prefill_rows_free: u32,
    /// Blocks that the waiting sequences will take beyond cached ones: reserved, though still free.
    #[prost(uint32, tag = "24")]
    pub blocks_wanted: u32,
    /// Counters of blocks loaded ahead of requests, on [`crate::frames::Prefetch`] hints.
    #[prost(message, optional, tag = "25")]
    pub prefetches: Option<PrefetchState>,
    /// Counters of outputs that follow a [`crate::frames::Guide`]; `None` if the worker cannot follow one.
    #[prost(message, optional, tag = "26")]
    pub guides: Option<GuideState>,
    /// Reasonings that were closed because their [`crate::frames::ReasoningBudget`] was spent, since the epoch began.
    #[prost(uint64, tag = "27")]
    pub reasonings_closed: u64,
    /// Draft tokens that were computed beside the last token of their sequence, since the epoch began.
    #[prost(uint64, tag = "28")]
    pub drafted_tokens: u64,
    /// Part of `drafted_tokens` that saved a step: they equalled the output, and the token after each came with them.
    #[prost(uint64, tag = "29")]
    pub accepted_tokens: u64,
}

/// Blocks that a [`crate::frames::Prefetch`] loaded, sums since the epoch began.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct PrefetchState {
    /// Prefetched blocks that a request found.
    #[prost(uint64, tag = "1")]
    pub used: u64,
    /// Prefetched blocks that no request asked for within a while.
    #[prost(uint64, tag = "2")]
    pub unused: u64,
}

/// State and counters of one KV tier of one worker.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct TierState {
    /// [`Tier`] that the state describes, as its number.
    #[prost(enumeration = "Tier", tag = "1")]
    pub tier: i32,
    /// Capacity of the tier in KV blocks.
    #[prost(uint64, tag = "2")]
    pub blocks_total: u64,
    /// KV blocks that the tier holds now.
    #[prost(uint64, tag = "3")]
    pub blocks_used: u64,
    /// Measured seconds to bring one block to the device; 0 until known.
    #[prost(double, tag = "4")]
    pub load_seconds_per_block: f64,
    /// Blocks loaded from the tier since the epoch began.
    #[prost(uint64, tag = "5")]
    pub loaded: u64,
    /// Blocks stored in the tier since the epoch began.
    #[prost(uint64, tag = "6")]
    pub stored: u64,
    /// Blocks whose bytes did not match their name, since the epoch began. None of them was used.
    #[prost(uint64, tag = "7")]
    pub corrupt: u64,
    /// Blocks that were not stored because the store was busy, full or broken, since the epoch began.
    #[prost(uint64, tag = "8")]
    pub dropped: u64,
    /// Seconds spent loading, summed over blocks, since the epoch began.
    #[prost(double, tag = "9")]
    pub load_seconds: f64,
    /// Requests that waited for blocks which the tier did not bring in time, and computed them, since the epoch began.
    #[prost(uint64, tag = "10")]
    pub late: u64,
}

/// KV moved between workers, sums since the epoch began.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct TransferState {
    /// Bytes of KV received from other workers.
    #[prost(uint64, tag = "1")]
    pub bytes_in: u64,
    /// Bytes of KV sent to other workers.
    #[prost(uint64, tag = "2")]
    pub bytes_out: u64,
    /// Seconds from the first to the last received byte, summed over transfers.
    #[prost(double, tag = "3")]
    pub seconds: f64,
    /// Part of `seconds` in which the sender was still computing.
    #[prost(double, tag = "4")]
    pub hidden_seconds: f64,
    /// Incoming transfers that ended normally, with all blocks asked for.
    #[prost(uint64, tag = "5")]
    pub completed: u64,
    /// Transfers that failed; the missing blocks were computed.
    #[prost(uint64, tag = "6")]
    pub failed: u64,
    /// Transfers that the receiver ended: no request waited for them any more, or their pages were needed.
    #[prost(uint64, tag = "7")]
    pub cancelled: u64,
    /// Received blocks that could be used.
    #[prost(uint64, tag = "8")]
    pub blocks_in: u64,
    /// First tokens that other workers drew for requests of this worker.
    #[prost(uint64, tag = "9")]
    pub first_tokens: u64,
    /// Part of `seconds` for blocks that the sender computed on request; only this part can be hidden.
    #[prost(double, tag = "10")]
    pub prefill_seconds: f64,
    /// Part of `bytes_in` that came when the sender had nothing left to compute, so that its duration measures the
    /// link alone.
    #[prost(uint64, tag = "11")]
    pub moved_bytes: u64,
    /// Duration of `moved_bytes` in seconds.
    #[prost(double, tag = "12")]
    pub moved_seconds: f64,
    /// Part of `bytes_in` that came through memory which both workers map.
    #[prost(uint64, tag = "13")]
    pub memory_bytes: u64,
    /// Part of `bytes_in` that came on further connections of a transfer beside its first.
    #[prost(uint64, tag = "14")]
    pub stream_bytes: u64,
    /// Part of `failed` after which another prefill worker was asked for the missing blocks.
    #[prost(uint64, tag = "15")]
    pub asked_next: u64,
}
