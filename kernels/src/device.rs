//! The `Device` interface: handles, the batch of one step, and the operations.
//!
//! Shapes are `[rows, columns]`, row-major in meaning; the layout in memory is the device's own business. Handles are
//! plain indices, given out at load and valid for the device's life, so a forward pass allocates nothing and a graph
//! can be captured.

use std::ops::Range;

use crate::pooling::Pool;

pub use crate::feature::{Activation, Feature};
pub use crate::format::{DType, Held, KvFormat, RowOrder};
pub use crate::reader::{CodeForm, CodeGroups, CodeKind, CodeRows, E4M3, RowReader};
pub use crate::routing::{ExpertGroups, Scoring};

/// Tokens in one KV page; equals the block of the contract (`penstock_proto::BLOCK_TOKENS`).
pub const PAGE_TOKENS: usize = 32;

/// Reason why a device cannot do what it is asked. Carries values; the caller adds the file or tensor.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// A tensor has a shape that the operation does not accept.
    #[error("{name}: shape {got:?}, needs {want}")]
    Shape {
        /// Name of the tensor or the argument with the wrong shape.
        name: String,
        /// Shape that the tensor has, outermost dimension first.
        got: Vec<usize>,
        /// Shape that the operation needs, in words.
        want: String,
    },
    /// An index of the batch points outside what exists.
    #[error("batch: {what} is {got}, limit {limit}")]
    Batch {
        /// Kind of the index, or the rule that it breaks, in words.
        what: &'static str,
        /// Value of the index that was found.
        got: usize,
        /// First value that is out of range.
        limit: usize,
    },
    /// Device or host memory is not enough.
    #[error("{what} needs {bytes} bytes, which are not available")]
    Memory {
        /// Purpose for which the memory was wanted, in words.
        what: &'static str,
        /// Size of the refused allocation in bytes.
        bytes: usize,
    },
    /// The device lacks something that was asked for by name.
    #[error("{what} is not available on this machine: {why}")]
    Unavailable {
        /// Instruction path or device that was asked for.
        what: String,
        /// Instruction or feature that the machine lacks.
        why: String,
    },
    /// The device or its driver failed. Most such failures end the device's use by this process.
    #[error("{device}: {call} failed with {error}")]
    Fault {
        /// Name of the device.
        device: String,
        /// Function of the driver that failed, or that reported an earlier failure.
        call: &'static str,
        /// Name of the error, as the driver has it.
        error: String,
    },
    /// The operating system refused an operation; the text names it.
    #[error("{what}")]
    Os {
        /// Operation that was tried, with the path if there is one.
        what: String,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
}

/// Most adapters of a device; see [`AdapterSlot`].
pub const ADAPTERS_MAX: usize = 64;

/// Highest rank of a low-rank addition.
pub const ADAPTER_RANK_MAX: usize = 256;

/// Most rows of one step; buffers are sized by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most rows of a step: tokens of all its sequences.
    pub rows_max: usize,
    /// Most rows of a step whose logits are computed.
    pub sampled_max: usize,
}

/// A tensor in host memory, row-major, little-endian; borrowed from a mapped file.
#[derive(Clone, Debug)]
pub struct HostTensor<'a> {
    /// Name of the tensor in the checkpoint, for errors.
    pub name: &'a str,
    /// Type of the elements in `bytes`.
    pub dtype: DType,
    /// Shape of the tensor; one or two dimensions here.
    pub shape: &'a [usize],
    /// Data, rows of [`DType::row_bytes`] bytes, any alignment.
    pub bytes: &'a [u8],
    /// Order of the rows in `bytes`; for a vector, of its values.
    pub order: RowOrder,
    /// Maker of the values of a matrix whose stored form the device does not know; `bytes` is then empty, and `dtype` is [`DType::F32`].
    pub reader: Option<&'a dyn RowReader>,
}

/// A weight that the device converts to its own format.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "made once per weight at load, on the stack")]
pub enum WeightSpec<'a> {
    /// Weights of an RMS norm, or weights or biases of a layer norm, `[n]`.
    Vector {
        /// Values of the weights, less the offset.
        tensor: HostTensor<'a>,
        /// Number that is added to each value in f32: 1 for norms that are stored around zero (Gemma), 0 for the others.
        offset: f32,
    },
    /// Linear layer `y = x·Wᵀ + b`. `parts`: `[out_i, in]` each, stacked along `out` in order (q, k, v). `biases`:
    /// empty, or one `[out_i]` per part.
    Linear {
        /// The matrices in the order in which they are stacked, `[out_i, in]` each.
        parts: Vec<HostTensor<'a>>,
        /// Biases of the matrices, `[out_i]` each; empty if there are none.
        biases: Vec<HostTensor<'a>>,
    },
    /// The two matrices of a gated MLP, `[intermediate, in]` each, for [`Device::gate_up`].
    GateUp {
        /// Matrix whose product goes through the activation.
        gate: HostTensor<'a>,
        /// Matrix whose product is multiplied with the gate.
        up: HostTensor<'a>,
        /// Biases of gate and up, `[intermediate]` each.
        biases: Option<[HostTensor<'a>; 2]>,
    },
    /// Embedding table, `[vocab, hidden]`, for [`Device::embed`], and for [`Device::logits`] too (tied heads use one
    /// handle for both).
    Embedding(HostTensor<'a>),
    /// Table whose rows are added to embeddings, for [`Device::add_table`] ([`Feature::Encoders`]): `[rows, hidden]`, held in f32.
    Table {
        /// Rows of the table.
        tensor: HostTensor<'a>,
        /// Index by which a token finds its row.
        index: TableIndex,
    },
    /// Matrices of all heads, for [`Device::per_head`] and [`Device::latent_queries`] ([`Feature::Latents`]): a part of a tensor that has
    /// the matrices of all heads below each other. Held as plain numbers, whatever is asked for.
    Heads {
        /// Matrices of all heads, `[heads · rows of a head, columns]`.
        tensor: HostTensor<'a>,
        /// Number of heads.
        heads: usize,
        /// Rows of each head's matrix that are taken.
        rows: Range<usize>,
        /// True if the product is with the transposed matrix: from `rows` to `columns`.
        transposed: bool,
    },
}

impl WeightSpec<'_> {
    /// Name of the weight's first tensor; empty if it has none.
    pub(crate) fn name(&self) -> &str {
        match self {
            WeightSpec::Vector { tensor, .. } | WeightSpec::Table { tensor, .. } | WeightSpec::Heads { tensor, .. } => {
                tensor.name
            }
            WeightSpec::Linear { parts, .. } => parts.first().map_or("", |tensor| tensor.name),
            WeightSpec::GateUp { gate, .. } => gate.name,
            WeightSpec::Embedding(tensor) => tensor.name,
        }
    }
}

/// Index of a row of [`WeightSpec::Table`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableIndex {
    /// Position of the token, from 0 on, behind the first rows of the table, which no position has.
    Position {
        /// Rows of the table before that of position 0.
        first: usize,
    },
    /// Type of the token: [`StepBatch::types`].
    Type,
}

/// Number of an adapter on a device, below [`ADAPTERS_MAX`]: its additions to all weights have the same one, and the rows of a [`Span`] with it
/// get them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdapterSlot(pub u16);

/// Low-rank addition to some outputs of a linear weight: `y += scale · B·(A·x)` (Hu et al. 2021, arXiv:2106.09685).
#[derive(Clone, Debug)]
pub struct LowRank<'a> {
    /// Index of the first output that is added to, among the stacked outputs of the weight: those of its parts in order, of gate before up.
    pub first: usize,
    /// Matrix from the inputs, `[rank, in]`, of plain numbers; the rank is at most [`ADAPTER_RANK_MAX`].
    pub a: HostTensor<'a>,
    /// Matrix to the outputs, `[outputs, rank]`, of plain numbers.
    pub b: HostTensor<'a>,
    /// Factor on the product of both.
    pub scale: f32,
}

/// One expert of a mixture: the three matrices of a gated MLP.
#[derive(Clone, Debug)]
pub struct ExpertSpec<'a> {
    /// Matrix whose product goes through the activation, `[intermediate, in]`.
    pub gate: HostTensor<'a>,
    /// Matrix whose product is multiplied with the gate, `[intermediate, in]`.
    pub up: HostTensor<'a>,
    /// Matrix from the activations back to the residual, `[in, intermediate]`.
    pub down: HostTensor<'a>,
    /// Biases of gate, up and down, one value per row of each ([`Feature::ExpertBiases`]); all experts of a layer have them, or none.
    pub biases: Option<[HostTensor<'a>; 3]>,
}

impl<'a> From<[HostTensor<'a>; 3]> for ExpertSpec<'a> {
    /// Makes an expert without biases of its gate, up and down matrices.
    fn from([gate, up, down]: [HostTensor<'a>; 3]) -> Self {
        Self { gate, up, down, biases: None }
    }
}

/// Choice of experts for a row, and their weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingSpec {
    /// Number of experts chosen for each row, at most as many as the router has rows.
    pub chosen: usize,
    /// True if the weights of the chosen experts are divided by their sum; false leaves them the shares of a softmax over all experts, or
    /// their sigmoids.
    pub normalized: bool,
    /// Function that makes scores of the router's logits.
    pub scores: Scoring,
    /// Vector `[experts]` that is added to the scores for the choice alone, not for the weights; for [`Scoring::Sigmoid`]. `None` adds nothing.
    pub correction: Option<Weight>,
    /// Groups of experts, of which some are chosen first; `None` chooses among all experts.
    pub groups: Option<ExpertGroups>,
    /// Factor on the weights.
    pub scale: f32,
}

impl RoutingSpec {
    /// The largest logits, weighted by their softmax.
    pub fn softmax(chosen: usize, normalized: bool) -> Self {
        Self { chosen, normalized, scores: Scoring::Softmax, correction: None, groups: None, scale: 1.0 }
    }
}

/// Handle of a weight, from [`Device::load`] or [`Device::load_experts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight(pub u32);

/// Handle of an activation buffer, from [`Device::buffer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer(pub u32);

/// Handle of a table of rotations, from [`Device::rope`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rope(pub u32);

/// Operations behind the product of logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitsSpec {
    /// Number by which each logit is divided; other than 1 ([`Feature::LogitsScale`]) in families that scale them.
    pub divisor: f32,
    /// Soft cap of the divided logits: `cap · tanh(logit / cap)` ([`Feature::SoftCaps`]); `None` leaves them as they are.
    pub soft_cap: Option<f32>,
}

impl LogitsSpec {
    /// Logits as the product has them.
    pub const PLAIN: LogitsSpec = LogitsSpec { divisor: 1.0, soft_cap: None };
}

/// Number of rows of a buffer that an operation touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// One row per token of the step.
    Batch,
    /// One row per sampled row of the step.
    Sampled,
}

/// An activation buffer, `[rows_max, columns]`; `rows_max` comes from the device's limits given at its construction.
#[derive(Clone, Copy, Debug)]
pub struct BufferSpec {
    /// Domain of the buffer's rows: all rows of a step, or the sampled ones.
    pub rows: Rows,
    /// Values per row of the buffer.
    pub columns: usize,
}

/// Rotary embedding in the split-half (NeoX) convention used by all Hugging Face checkpoints served here.
#[derive(Clone, Debug)]
pub struct RopeSpec {
    /// Inverse frequencies, `[rotated values of a head / 2]`, scaling already applied. Where these are fewer than `head_dim / 2`, the last
    /// values of each head are not rotated ([`Feature::PartialRotation`]).
    pub inverse_frequencies: Vec<f32>,
    /// Factor of sine and cosine (YaRN's attention factor); 1 otherwise.
    pub factor: f32,
    /// Number of positions that the table must hold.
    pub positions: usize,
}

/// The paged KV cache: `layers × pages × {K, V} × kv_heads × PAGE_TOKENS × head_dim`; with latents `layers × pages × PAGE_TOKENS × head_dim`.
#[derive(Clone, Copy, Debug)]
pub struct KvSpec {
    /// Number of transformer layers that have KV.
    pub layers: usize,
    /// KV heads of each layer.
    pub kv_heads: usize,
    /// Values per KV head.
    pub head_dim: usize,
    /// Number of first values of each key that are its value too, at most `head_dim` ([`Feature::Latents`]); there is one KV head then, and
    /// pages hold keys alone. `None` has values of their own, as wide as keys.
    pub latent: Option<usize>,
    /// Form of keys and values; latents have the device's own.
    pub format: KvFormat,
    /// Number of pages, each of [`PAGE_TOKENS`] tokens in all layers.
    pub pages: usize,
}

/// Shape of one layer's attention: heads, scale, window, rotation and norms.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSpec {
    /// Query heads of the layer; a multiple of `kv_heads`.
    pub heads: usize,
    /// KV heads; each is shared by an equal group of query heads.
    pub kv_heads: usize,
    /// Values per head, for queries, keys and values alike.
    pub head_dim: usize,
    /// Number of first values of each key that are its value too: [`KvSpec::latent`]. `None` has values of their own.
    pub latent: Option<usize>,
    /// Factor on the products q·k before the softmax.
    pub scale: f32,
    /// True if a row sees no later tokens. False ([`Feature::Encoders`]) lets it see all tokens of its sequence, whose rows are then all in the step.
    pub causal: bool,
    /// Number of last positions that a row sees, itself included, and unless it is causal of so many next ones; `None` sees all.
    pub window: Option<usize>,
    /// Soft cap of the scaled products: `cap · tanh(score / cap)`; `None` leaves them as they are.
    pub soft_cap: Option<f32>,
    /// Numbers that are added to the scores by how far a key is from the query ([`Feature::Encoders`]); `None` adds nothing.
    pub offsets: Option<OffsetBias>,
    /// Attention sinks, a vector `[heads]` ([`Feature::Sinks`]): one more score per head, in the sum of its softmax alone; it has no value
    /// and is not scaled. `None` has none.
    pub sinks: Option<Weight>,
    /// Table of rotations for queries and keys, from [`Device::rope`]; `None` rotates nothing.
    pub rope: Option<Rope>,
    /// RMS norms over queries and keys before the rotation.
    pub norms: HeadNorms,
    /// Epsilon of the RMS norms over queries and keys.
    pub norm_eps: f32,
}

/// Bias of attention by relative positions (Shaw et al. 2018, arXiv:1803.02155; in buckets: Raffel et al. 2020, arXiv:1910.10683), one number per head.
#[derive(Clone, Copy, Debug)]
pub struct OffsetBias {
    /// Vector `[heads · (2·reach + 1)]`: the numbers of each head, from that of a key `reach` before the query on.
    pub values: Weight,
    /// Most positions between query and key for which there is a number; keys further away have that of the last one on their side.
    pub reach: usize,
}

impl OffsetBias {
    /// Numbers of one head.
    pub fn width(&self) -> usize {
        2 * self.reach + 1
    }
}

impl AttentionSpec {
    /// Values per head of attention's output.
    pub fn value_dim(&self) -> usize {
        self.latent.unwrap_or(self.head_dim)
    }
}

/// RMS norms over the queries and keys of a row, before the rotation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeadNorms {
    /// No norm.
    #[default]
    None,
    /// Norm over each head by itself (Qwen3, Gemma 3); both weights are `[head_dim]`.
    Each {
        /// Weights of each query head.
        query: Weight,
        /// Weights of each key head.
        key: Weight,
    },
    /// Norm over all query heads, and over all key heads (OLMo 2).
    Together {
        /// Weights of the queries, `[heads · head_dim]`.
        query: Weight,
        /// Weights of the keys, `[kv_heads · head_dim]`.
        key: Weight,
    },
}

/// The rows of one sequence in a step. Row `i` of `rows` has position `context - rows.len() + i`.
#[derive(Clone, Debug)]
pub struct Span<'a> {
    /// Rows of the batch; spans are contiguous, in order, and cover the batch.
    pub rows: Range<usize>,
    /// Tokens of the sequence once this step is done, at least `rows.len()`.
    pub context: usize,
    /// Page ids, at least `context.div_ceil(PAGE_TOKENS)` of them. Pages before the rows' own hold computed KV. Where the first row is
    /// not the first token of its page, earlier steps computed the tokens before it there, and nobody else wrote to the page since.
    pub block_table: &'a [u32],
    /// Adapter whose additions the products of these rows get; `None` computes the model alone.
    pub adapter: Option<AdapterSlot>,
}

/// Everything that changes from step to step.
#[derive(Clone, Debug, Default)]
pub struct StepBatch<'a> {
    /// Input token ids of all sequences of the step, `[rows]`.
    pub tokens: &'a [u32],
    /// Rows of each sequence, in order; they cover `tokens`.
    pub spans: &'a [Span<'a>],
    /// Rows whose logits are wanted, ascending; at most [`Limits::sampled_max`] of them.
    pub sampled: &'a [usize],
    /// Type of each row's token, `[rows]`, below the rows of the table of types; empty: all are 0.
    pub types: &'a [u32],
    /// Pooling of each sampled row by [`Device::pool`], `[sampled]`; empty: no pooling.
    pub pools: &'a [Pool],
}

/// Way to the token of a sampled row, as far as a device may find it by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pick {
    /// The host finds it: the row's logits are read back.
    Host,
    /// Token of the largest logit, the lowest token among equals.
    Best,
    /// Token drawn from the whole vocabulary: that of [`crate::sampling::draw_from_all`], to the bit.
    Draw {
        /// 1 / temperature.
        scale: f32,
        /// Random number in [0, 1).
        uniform: f64,
    },
}

/// Result of a sampled row, owned: see [`SampledRow`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The row's logits were read back, as the row of this index among all that were.
    Logits(usize),
    /// The device found the token; `None` if a logit is NaN or +∞, or none is above −∞.
    Token(Option<u32>),
}

/// A sampled row as it was read back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SampledRow<'d> {
    /// Logits of the row, `[vocab]`.
    Logits(&'d [f32]),
    /// The token that was asked for; `None` if a logit is NaN or +∞, or none is above −∞.
    Token(Option<u32>),
}

/// Sampled rows of a step as they were read back: logits, or the tokens that the device found.
#[derive(Clone, Copy, Debug)]
pub struct SampledRows<'d> {
    logits: &'d [f32],
    vocab: usize,
    /// Result of each sampled row; `None` if all logits were read back.
    found: Option<&'d [Found]>,
}

impl<'d> SampledRows<'d> {
    /// Makes the result of a step that found no token: `logits` of all sampled rows, `[rows, vocab]`.
    pub fn whole(logits: &'d [f32], rows: usize) -> Self {
        Self { logits, vocab: logits.len() / rows.max(1), found: None }
    }

    /// Makes the result of rows of two kinds. `logits`: `[rows read back, vocab]`; `found`: one entry per sampled row.
    pub fn new(logits: &'d [f32], vocab: usize, found: &'d [Found]) -> Self {
        Self { logits, vocab, found: Some(found) }
    }

    /// Result of the sampled row of index `row`.
    ///
    /// # Panics
    /// If there are fewer rows, or no logits were wanted.
    pub fn row(&self, row: usize) -> SampledRow<'d> {
        let logits = |row: usize| SampledRow::Logits(&self.logits[row * self.vocab..][..self.vocab]);
        match self.found.map(|found| found[row]) {
            None => logits(row),
            Some(Found::Logits(row)) => logits(row),
            Some(Found::Token(token)) => SampledRow::Token(token),
        }
    }
}

/// Name, numerics and weight type of a device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Name for a person: "cpu avx512bf16, 2 threads".
    pub name: String,
    /// Numerics id: backend, path, weight format, kernel version. Same string, same bits.
    pub numerics: String,
    /// Type in which matrices of plain numbers are held. Those stored with more bits of fraction are rounded to it by
    /// [`Device::load`]; blocks of integers are held as they are.
    pub weights: DType,
}

/// A device: weights, buffers, one KV cache, and the operations of a step.
///
/// Order of use: `load`/`buffer`/`rope` any number of times and `kv` once; then per step `begin`, the operations, `logits` or `sample`.
/// Shapes are fixed at load, so operations panic on a handle of the wrong shape (a bug of the model file), and only
/// [`Device::begin`], [`Device::read_sampled`], [`Device::logits`] and [`Device::sample`] can fail (bad batch; device fault).
pub trait Device: Send {
    /// Name, numerics and weight type of this device; the same at every call.
    fn info(&self) -> DeviceInfo;

    /// Returns true if the device computes `feature`. A device that does not implement this computes none.
    fn has(&self, feature: Feature) -> bool {
        let _ = feature;
        false
    }

    /// Loads one weight in the device's own format (prepacked, converted); `held` decides the form of a matrix. The borrowed bytes
    /// are not kept.
    fn load(&mut self, spec: &WeightSpec<'_>, held: Held) -> Result<Weight, KernelError>;

    /// Loads the experts of one layer, all of one shape, for [`Device::experts`]; `held` decides the form of their matrices.
    ///
    /// Errors: [`KernelError::Unavailable`] on a device without mixtures of experts, which is what a device does that does not
    /// implement this; such a model is refused when it is loaded.
    fn load_experts(&mut self, experts: &[ExpertSpec<'_>], held: Held) -> Result<Weight, KernelError> {
        let (what, why) =
            (format!("a mixture of {} experts", experts.len()), self.info().name + " has no operation for it");
        let _ = held;
        Err(KernelError::Unavailable { what, why })
    }

    /// Attaches low-rank additions to a linear weight, or to gate and up: for rows of spans with `slot`, [`Device::qkv`], [`Device::linear`],
    /// [`Device::linear_add`] and [`Device::gate_up`] add them to the products, before biases, norms and rotations. Additions of the same slot that
    /// the weight had before are dropped. The borrowed bytes are not kept.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if a matrix does not fit the weight, or the slot or a rank is out of range; [`KernelError::Unavailable`] on a device
    /// without [`Feature::Adapters`], which is what a device does that does not implement this.
    ///
    /// # Panics
    /// If the weight is not linear.
    fn adapt(&mut self, weight: Weight, slot: AdapterSlot, parts: &[LowRank<'_>]) -> Result<(), KernelError> {
        let _ = (weight, slot, parts);
        let (what, why) = (Feature::Adapters.name().to_owned(), self.info().name + " has no operation for it");
        Err(KernelError::Unavailable { what, why })
    }

    /// Takes the additions of `slot` away from all weights and frees their memory: results are those of a device that never had them. A slot
    /// without additions stays as it is.
    fn unadapt(&mut self, slot: AdapterSlot) {
        let _ = slot;
    }

    /// Allocates a buffer of activations for steps of the largest size.
    fn buffer(&mut self, spec: BufferSpec) -> Result<Buffer, KernelError>;

    /// Makes a table of sines and cosines for every position.
    fn rope(&mut self, spec: &RopeSpec) -> Result<Rope, KernelError>;

    /// Allocates the KV cache for all layers and pages; called once, before the first step.
    fn kv(&mut self, spec: KvSpec) -> Result<(), KernelError>;

    /// Starts a step: checks every index of `batch` against what exists and uploads it.
    fn begin(&mut self, batch: &StepBatch<'_>) -> Result<(), KernelError>;

    /// Embeds tokens: `out[row] = table[token of row] · scale`. `out`: `[batch, hidden]`.
    fn embed(&mut self, out: Buffer, table: Weight, scale: f32);

    /// Adds to each row the row of `table` (from [`WeightSpec::Table`]) that its token has.
    ///
    /// # Panics
    /// On a device without [`Feature::Encoders`].
    fn add_table(&mut self, residual: Buffer, table: Weight) {
        let _ = (residual, table);
        unreachable!("a device without encoders refuses them")
    }

    /// Layer norm (Ba et al. 2016, arXiv:1607.06450): `out = (x - mean(x)) / √(variance(x) + eps) · weight (+ bias)`. `x`: f32; in place (`out` is
    /// `x`) it stays so.
    ///
    /// # Panics
    /// On a device without [`Feature::Encoders`].
    fn layer_norm(&mut self, out: Buffer, x: Buffer, weight: Weight, bias: Option<Weight>, eps: f32) {
        let _ = (out, x, weight, bias, eps);
        unreachable!("a device without encoders refuses them")
    }

    /// Linear layer with an activation: `out = activation(x·Wᵀ (+ bias))`, any but [`Activation::ClampedSwiglu`]. Sampled rows are f32.
    ///
    /// # Panics
    /// On a device without [`Feature::Encoders`].
    fn activated(&mut self, out: Buffer, x: Buffer, weight: Weight, activation: Activation) {
        let _ = (out, x, weight, activation);
        unreachable!("a device without encoders refuses them")
    }

    /// Selects the sampled rows as [`Device::select`] does, or pools the rows of their spans into one, by [`StepBatch::pools`]; sums are added in the
    /// order of the rows. `x`: f32.
    ///
    /// # Panics
    /// On a device without [`Feature::Encoders`].
    fn pool(&mut self, out: Buffer, x: Buffer) {
        let _ = (out, x);
        unreachable!("a device without encoders refuses them")
    }

    /// RMS norm: `out = x / rms(x) · weight`. Both `[rows, n]`; in place the result is f32.
    fn rmsnorm(&mut self, out: Buffer, x: Buffer, weight: Weight, eps: f32);

    /// Query, key and value projections of `x` (`weight`: stacked `[heads + 2·kv_heads, head_dim]` rows of `in`), bias, head norms,
    /// rotation; keys and values go to the KV cache of `layer`, queries to `out` `[batch, heads·head_dim]`.
    fn qkv(&mut self, out: Buffer, x: Buffer, weight: Weight, attention: &AttentionSpec, layer: usize);

    /// Keys of latents: `x` `[batch, head_dim]` f32, of [`Device::linear`], goes to the KV cache of `layer`, its first
    /// [`AttentionSpec::latent`] values through an RMS norm with `norm`, the others rotated.
    ///
    /// # Panics
    /// On a device without [`Feature::Latents`].
    fn latent_keys(&mut self, x: Buffer, norm: Weight, attention: &AttentionSpec, layer: usize) {
        let _ = (x, norm, attention, layer);
        unreachable!("a device without latents refuses models that have them")
    }

    /// Queries for latents. `x`: `[batch, heads · (plain + rotated)]` f32, of [`Device::linear`]; of each head the plain values are
    /// multiplied with its matrix of `keys` (from [`WeightSpec::Heads`], plain to latent), the others are rotated. `out`: `[batch, heads · head_dim]`.
    ///
    /// # Panics
    /// On a device without [`Feature::Latents`].
    fn latent_queries(&mut self, out: Buffer, x: Buffer, keys: Weight, attention: &AttentionSpec) {
        let _ = (out, x, keys, attention);
        unreachable!("a device without latents refuses models that have them")
    }

    /// Product of each head's values of `x` with the head's matrix. `x`: `[batch, heads · in]`, `out`: `[batch, heads · out]`.
    ///
    /// # Panics
    /// On a device without [`Feature::Latents`].
    fn per_head(&mut self, out: Buffer, x: Buffer, weight: Weight) {
        let _ = (out, x, weight);
        unreachable!("a device without latents refuses models that have them")
    }

    /// Attention of `queries` (from [`Device::qkv`] or [`Device::latent_queries`]) over the KV cache of `layer`. `out`:
    /// `[batch, heads · value_dim]`.
    fn attention(&mut self, out: Buffer, queries: Buffer, attention: &AttentionSpec, layer: usize);

    /// Linear layer added to the residual: `residual += scale · (x·Wᵀ (+ bias))`. A scale other than 1 needs [`Feature::ResidualScale`].
    fn linear_add(&mut self, residual: Buffer, x: Buffer, weight: Weight, scale: f32);

    /// Linear layer: `out = x·Wᵀ (+ bias)`, in f32, for [`Device::norm_add`] and the operations of latents.
    ///
    /// # Panics
    /// On a device without [`Feature::PostNorms`] and [`Feature::Latents`].
    fn linear(&mut self, out: Buffer, x: Buffer, weight: Weight) {
        let _ = (out, x, weight);
        unreachable!("a device without norms behind blocks refuses models that have them")
    }

    /// RMS norm added to the residual: `residual += x / rms(x) · weight`. `x`: from [`Device::linear`].
    ///
    /// # Panics
    /// On a device without [`Feature::PostNorms`].
    fn norm_add(&mut self, residual: Buffer, x: Buffer, weight: Weight, eps: f32) {
        let _ = (residual, x, weight, eps);
        unreachable!("a device without norms behind blocks refuses models that have them")
    }

    /// Gated MLP: `out = activation(x·Gateᵀ (+ bias)) · (x·Upᵀ (+ bias))`, or the function that [`Activation`] has of both.
    /// `out`: `[batch, intermediate]`.
    fn gate_up(&mut self, out: Buffer, x: Buffer, weight: Weight, activation: Activation);

    /// Chooses experts for each row by the logits `x·Routerᵀ (+ bias)`, ties to the lowest index. `router`: a linear weight `[experts, in]`.
    /// `out`: `[batch, experts]` f32, the weight of each expert for the row, 0 where it is not chosen (or its share is too small for an f32).
    /// A row whose logits are not all finite has NaN weights.
    ///
    /// # Panics
    /// On a device that refuses [`Device::load_experts`].
    fn route(&mut self, out: Buffer, x: Buffer, router: Weight, routing: &RoutingSpec) {
        let _ = (out, x, router, routing);
        unreachable!("a device without experts refuses to load them")
    }

    /// Adds the weighted outputs of each row's experts, in ascending order of experts:
    /// `residual += weight · (Down·(activation(Gate·x (+ bias)) · (Up·x (+ bias))) (+ bias))`, with the `activation` as in
    /// [`Device::gate_up`]. `routes`: from [`Device::route`].
    ///
    /// # Panics
    /// On a device that refuses [`Device::load_experts`].
    fn experts(&mut self, residual: Buffer, x: Buffer, routes: Buffer, experts: Weight, activation: Activation) {
        let _ = (residual, x, routes, experts, activation);
        unreachable!("a device without experts refuses to load them")
    }

    /// Selects the sampled rows: `out[i] = x[sampled[i]]`. `out` has [`Rows::Sampled`].
    fn select(&mut self, out: Buffer, x: Buffer);

    /// Rows of a buffer of sampled rows, read back to the host as f32: `[sampled, columns]`.
    ///
    /// # Errors
    /// A fault of the device in this step.
    fn read_sampled(&mut self, x: Buffer) -> Result<Vec<f32>, KernelError>;

    /// Logits `x·Wᵀ (+ bias)` of the sampled rows, divided and capped as `spec` has it, read back to the host: `[sampled, vocab]` f32, valid until
    /// the next call on the device.
    fn logits(&mut self, x: Buffer, weight: Weight, spec: LogitsSpec) -> Result<&[f32], KernelError>;

    /// Logits as of [`Device::logits`], of which no more than asked for needs to be read back: `picks` has one entry per sampled row. Valid
    /// until the next call on the device.
    ///
    /// A device in whose memory the host samples reads back all rows, which is what a device does that does not implement this; the
    /// host has to be ready for logits in place of any token.
    fn sample(
        &mut self,
        x: Buffer,
        weight: Weight,
        spec: LogitsSpec,
        picks: &[Pick],
    ) -> Result<SampledRows<'_>, KernelError> {
        self.logits(x, weight, spec).map(|logits| SampledRows::whole(logits, picks.len()))
    }

    /// The weights that [`Device::route`] wrote to `routes`, `[batch, experts]` (tests).
    fn routes(&self, routes: Buffer) -> Vec<f32> {
        let _ = routes;
        unreachable!("a device without experts refuses to load them")
    }

    /// Values of a page of one layer in the canonical order `[K|V][kv_head][token][dim]`, as f32 (tests). With latents there is no V.
    fn page(&self, layer: usize, page: u32) -> Vec<f32>;

    /// Bytes of one page of one layer in wire order: `[K|V][kv_head][token][dim]` in the cache's own element type, little-endian; with latents
    /// there is no V. Of [`KvFormat::Int8`] each row of `dim` integers has its scale in front, an f32.
    fn page_bytes(&self) -> usize;

    /// Copies one page of one layer out, in wire order. `out`: [`Device::page_bytes`] bytes.
    fn read_page(&self, layer: usize, page: u32, out: &mut [u8]);

    /// Writes one page of one layer from wire order; the inverse of [`Device::read_page`], bit for bit.
    fn write_page(&mut self, layer: usize, page: u32, bytes: &[u8]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that has no mixtures of experts, and here nothing else.
    struct Dense;

    impl Device for Dense {
        fn info(&self) -> DeviceInfo {
            DeviceInfo { name: "a dense device".into(), numerics: String::new(), weights: DType::F32 }
        }

        fn load(&mut self, _: &WeightSpec<'_>, _: Held) -> Result<Weight, KernelError> {
            Ok(Weight(0))
        }

        fn buffer(&mut self, _: BufferSpec) -> Result<Buffer, KernelError> {
            Ok(Buffer(0))
        }

        fn rope(&mut self, _: &RopeSpec) -> Result<Rope, KernelError> {
            Ok(Rope(0))
        }

        fn kv(&mut self, _: KvSpec) -> Result<(), KernelError> {
            Ok(())
        }

        fn begin(&mut self, _: &StepBatch<'_>) -> Result<(), KernelError> {
            Ok(())
        }

        fn embed(&mut self, _: Buffer, _: Weight, _: f32) {}

        fn rmsnorm(&mut self, _: Buffer, _: Buffer, _: Weight, _: f32) {}

        fn qkv(&mut self, _: Buffer, _: Buffer, _: Weight, _: &AttentionSpec, _: usize) {}

        fn attention(&mut self, _: Buffer, _: Buffer, _: &AttentionSpec, _: usize) {}

        fn linear_add(&mut self, _: Buffer, _: Buffer, _: Weight, _: f32) {}

        fn gate_up(&mut self, _: Buffer, _: Buffer, _: Weight, _: Activation) {}

        fn select(&mut self, _: Buffer, _: Buffer) {}

        fn read_sampled(&mut self, _: Buffer) -> Result<Vec<f32>, KernelError> {
            Ok(Vec::new())
        }

        fn logits(&mut self, _: Buffer, _: Weight, _: LogitsSpec) -> Result<&[f32], KernelError> {
            Ok(&[])
        }

        fn page(&self, _: usize, _: u32) -> Vec<f32> {
            Vec::new()
        }

        fn page_bytes(&self) -> usize {
            0
        }

        fn read_page(&self, _: usize, _: u32, _: &mut [u8]) {}

        fn write_page(&mut self, _: usize, _: u32, _: &[u8]) {}
    }

    #[test]
    fn a_device_without_experts_refuses_them_at_load() {
        let bytes = [0; 8];
        let tensor = HostTensor {
            name: "e",
            dtype: DType::F32,
            shape: &[1, 2],
            bytes: &bytes,
            order: RowOrder::Plain,
            reader: None,
        };
        let expert = ExpertSpec::from([tensor.clone(), tensor.clone(), tensor]);
        let error = Dense.load_experts(&[expert], Held::Stored).unwrap_err();
        let want = "a mixture of 1 experts is not available on this machine: a dense device has no operation for it";
        assert_eq!(error.to_string(), want);
    }
}
