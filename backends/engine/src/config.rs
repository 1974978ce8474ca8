//! How one engine is run.

/// Sizes and bounds of an [`crate::Engine`]. What exceeds the model's [`crate::Geometry`] is lowered to it.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Sequences in prefill or decode at once.
    pub sequences_max: usize,
    /// Token budget of one step.
    pub batch_tokens: usize,
    /// Tokens of one sequence in one step at most.
    pub chunk_tokens: usize,
    /// Seconds that prefill may add to a step in which others decode, at the measured speed: their next token waits for it.
    /// 0: no limit but `batch_tokens`.
    pub prefill_seconds_max: f64,
    /// Sequences that may wait; further requests are refused as overloaded.
    pub waiting_max: usize,
    /// Choices of one request at most.
    pub choices_max: usize,
    /// Best tokens reported per position at most.
    pub logprobs_max: usize,
    /// Entries (prompt tokens × reported tokens) of prompt_logprobs at most, of one request and of one frame.
    pub prompt_logprobs_max: usize,
    /// Reuse computed prefixes. Off: every sequence computes its own.
    pub prefix_cache: bool,
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
        }
    }
}
