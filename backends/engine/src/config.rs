//! Configuration of one engine.

/// Sizes and bounds of an [`crate::Engine`]. Values above the model's [`crate::Geometry`] are lowered to it.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Most sequences in prefill or decode at once.
    pub sequences_max: usize,
    /// Token budget of one step, over all sequences.
    pub batch_tokens: usize,
    /// Most tokens of one sequence in one step.
    pub chunk_tokens: usize,
    /// Most seconds that prefill may add to a step in which others decode, at the measured speed: the others' next
    /// token waits for it. 0: no limit except `batch_tokens`.
    pub prefill_seconds_max: f64,
    /// Most waiting sequences; further requests are refused as overloaded.
    pub waiting_max: usize,
    /// Most choices of one request.
    pub choices_max: usize,
    /// Most reported best tokens per position.
    pub logprobs_max: usize,
    /// Most entries (prompt tokens × reported tokens) of prompt_logprobs, of one request and of one frame.
    pub prompt_logprobs_max: usize,
    /// True if computed prefixes are reused; without, every sequence computes its own.
    pub prefix_cache: bool,
    /// True if masks of guided output are computed on a thread of their own while the device computes: of use where
    /// the device leaves a core of the host idle. The tokens are the same either way.
    pub masks_beside: bool,
    /// Most draft tokens of a sequence in one step, copied from where its last tokens occurred before; 0 drafts
    /// nothing. The tokens are the same either way. Over all sequences, a step has at most as many as `batch_tokens`
    /// and the model's `sampled_max` leave beside `sequences_max`.
    pub prompt_lookup: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            sequences_max: 32,
            batch_tokens: 512,
            chunk_tokens: 512,
            prefill_seconds_max: 0.25,
            waiting_max: 256,
            choices_max: 128,
            logprobs_max: 64,
            prompt_logprobs_max: 512 << 10,
            prefix_cache: true,
            masks_beside: false,
            prompt_lookup: 0,
        }
    }
}
