//! The seam between the engine and whatever computes logits.

use penstock_kernels::{KernelError, StepBatch};

/// Fixed sizes of a loaded model.
#[derive(Clone, Debug, Default)]
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
    /// Layers that have KV.
    pub layers: usize,
    /// Bytes of one page of one layer in wire order; a block is `layers` of them. 0: pages cannot be moved.
    pub page_bytes: usize,
}

impl Geometry {
    /// Bytes of one block in wire order, `[layer][page_bytes]`.
    pub fn block_bytes(&self) -> usize {
        self.layers * self.page_bytes
    }
}

/// Reads pages, also while a step is under way.
pub trait Pages {
    /// Copies one page of one layer out, in wire order. `out`: [`Geometry::page_bytes`] bytes.
    fn read_page(&self, layer: usize, page: u32, out: &mut [u8]);
}

/// Told after each layer of a step, when the KV of its rows is written: what prefill for another worker sends from.
pub type AfterLayer<'a> = Option<&'a mut dyn FnMut(usize, &dyn Pages)>;

/// Computes one step. Two implementations: a model on a device (`models/`), and the fake of `sim`.
pub trait Forward: Send {
    /// Fixed sizes.
    fn geometry(&self) -> Geometry;

    /// Runs `batch`, writes its KV, and returns the logits of its sampled rows, `[sampled, vocab_size]`.
    fn forward(&mut self, batch: &StepBatch<'_>, after_layer: AfterLayer<'_>) -> Result<&[f32], KernelError>;

    /// Its pages, between two steps.
    fn pages(&self) -> &dyn Pages;

    /// Takes one page of one layer in, in wire order: the inverse of [`Pages::read_page`], bit for bit.
    fn write_page(&mut self, layer: usize, page: u32, bytes: &[u8]);
}
