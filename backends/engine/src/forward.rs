//! The seam between the engine and whatever computes logits.

use penstock_kernels::{KernelError, StepBatch};

/// Fixed sizes of a loaded model.
#[derive(Clone, Debug)]
pub struct Geometry {
    /// Rows of the logits.
    pub vocab_size: usize,
    /// Longest sequence, in tokens.
    pub context_tokens: usize,
    /// KV pages on the device.
    pub pages: usize,
    /// Rows of one step at most.
    pub rows_max: usize,
    /// Sampled rows of one step at most.
    pub sampled_max: usize,
    /// Same string, same bits; salted into the block hash.
    pub numerics: String,
}

/// Computes one step. Two implementations: a model on a device (`models/`), and the fake of `tests/sim`.
pub trait Forward: Send {
    /// Fixed sizes.
    fn geometry(&self) -> Geometry;

    /// Runs `batch`, writes its KV, and returns the logits of its sampled rows, `[sampled, vocab_size]`.
    fn forward(&mut self, batch: &StepBatch<'_>) -> Result<&[f32], KernelError>;
}
