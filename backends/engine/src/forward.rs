//! Interface between the engine and the model that computes logits.

use penstock_kernels::{AdapterSlot, KernelError, Pick, SampledRows, StepBatch};

use crate::adapter::Adapter;

/// Fixed sizes of a loaded model.
#[derive(Clone, Debug, Default)]
pub struct Geometry {
    /// Width of a row of logits: the number of token ids.
    pub vocab_size: usize,
    /// Longest sequence that the model serves, prompt and output, in tokens.
    pub context_tokens: usize,
    /// KV pages on the device, of one block each, over all layers.
    pub pages: usize,
    /// Most rows of one step: prompt tokens and decoding sequences together.
    pub rows_max: usize,
    /// Most rows of one step whose logits are computed.
    pub sampled_max: usize,
    /// Numerics id: same string, same bits; salted into the block hash.
    pub numerics: String,
    /// Number of layers that have KV.
    pub layers: usize,
    /// Bytes of one page of one layer in wire order; a block is `layers` of them. 0 if pages cannot be moved.
    pub page_bytes: usize,
    /// Components of a row's final state; 0 if [`Forward::states`] has none.
    pub state_width: usize,
    /// Dense layers of the checkpoint that states go through behind their pooling.
    pub dense_layers: usize,
    /// True if the model has no head: it has states and no logits.
    pub headless: bool,
    /// Encoder, or decoder of whole texts: sequences are computed whole, each in one step; `None` for other decoders.
    pub encoder: Option<EncoderGeometry>,
}

/// Sizes and results of an encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncoderGeometry {
    /// Types that tokens may have.
    pub token_types: usize,
    /// True if [`Forward::states`] gives the values of a head, not states of tokens.
    pub has_head: bool,
    /// True if that head is over the mean of all tokens, not over the first.
    pub head_of_mean: bool,
}

impl Geometry {
    /// Bytes of one block in wire order, `[layer][page_bytes]`.
    pub fn block_bytes(&self) -> usize {
        self.layers * self.page_bytes
    }
}

/// Reader of pages, also while a step is running.
pub trait Pages {
    /// Copies one page of one layer out, in wire order. `out`: [`Geometry::page_bytes`] bytes.
    fn read_page(&self, layer: usize, page: u32, out: &mut [u8]);
}

/// Callback after each layer of a step, when the KV of its rows is written; prefill for another worker sends pages
/// from there.
pub type AfterLayer<'a> = Option<&'a mut dyn FnMut(usize, &dyn Pages)>;

/// Computation of one step. Two implementations: a model on a device (`models/`), and the fake of `sim`.
pub trait Forward: Send {
    /// Fixed sizes of the loaded model; the same at every call.
    fn geometry(&self) -> Geometry;

    /// Runs `batch`, writes its KV, and returns the logits of its sampled rows, `[sampled, vocab_size]`.
    fn forward(&mut self, batch: &StepBatch<'_>, after_layer: AfterLayer<'_>) -> Result<&[f32], KernelError>;

    /// Runs `batch` as [`Forward::forward`] does; of a sampled row whose pick is not [`Pick::Host`], it may return the token in place of the
    /// logits. `picks`: one per sampled row. A computation that does not implement this returns the logits of all rows.
    fn sample(
        &mut self,
        batch: &StepBatch<'_>,
        after_layer: AfterLayer<'_>,
        picks: &[Pick],
    ) -> Result<SampledRows<'_>, KernelError> {
        self.forward(batch, after_layer).map(|logits| SampledRows::whole(logits, picks.len()))
    }

    /// Runs `batch` as [`Forward::forward`] does and appends the final states of its sampled rows, behind the model's last
    /// norm (of an encoder, or a decoder of whole texts: as `batch` pools them) and the checkpoint's dense layers, to `out`: `[sampled, state_width]`. Returns the logits if they are wanted, else nothing: the head is not
    /// computed.
    fn states(
        &mut self,
        batch: &StepBatch<'_>,
        after_layer: AfterLayer<'_>,
        out: &mut Vec<f32>,
        logits: bool,
    ) -> Result<&[f32], KernelError> {
        let _ = (batch, after_layer, out, logits);
        let why = "this computation gives logits only".to_owned();
        Err(KernelError::Unavailable { what: "a final state".to_owned(), why })
    }

    /// Loads what `adapter` changes in one layer under `slot`, between two steps. Spans may name the slot once all layers are loaded; after an
    /// error [`Forward::drop_adapter`] makes the computation what it was.
    ///
    /// # Errors
    /// The computation has no adapters, which is what one says that does not implement this; the device refuses or lacks memory.
    fn adapt_layer(&mut self, layer: usize, slot: AdapterSlot, adapter: &Adapter) -> Result<(), KernelError> {
        let _ = (layer, slot, adapter);
        let why = "this computation has none".to_owned();
        Err(KernelError::Unavailable { what: "a LoRA adapter".to_owned(), why })
    }

    /// Takes the adapter of `slot` away from all layers, between two steps: the computation is what it was without it.
    fn drop_adapter(&mut self, slot: AdapterSlot) {
        let _ = slot;
    }

    /// Loads the whole of `adapter` under `slot`.
    ///
    /// # Errors
    /// As [`Forward::adapt_layer`]; the computation is then as it was.
    fn add_adapter(&mut self, slot: AdapterSlot, adapter: &Adapter) -> Result<(), KernelError> {
        let layers = self.geometry().layers;
        let done = (0..layers).try_for_each(|layer| self.adapt_layer(layer, slot, adapter));
        done.inspect_err(|_| self.drop_adapter(slot))
    }

    /// Reader of the pages between two steps.
    fn pages(&self) -> &dyn Pages;

    /// Writes one page of one layer from wire order: the inverse of [`Pages::read_page`], bit for bit.
    fn write_page(&mut self, layer: usize, page: u32, bytes: &[u8]);
}
