//! The CUDA device: bf16 weights, operands and KV, f32 residual and sums, one stream of one GPU.
//!
//! Reading order: this file (loading, buffers, the trait), `layer.rs` (the operations), `params.rs` (what kernels are given), `probe.rs` (is there a
//! GPU), `tiles.rs` (shapes of products), `images.rs` (compiled kernels), `driver.rs` (the driver as safe types, the only user of `cudarc` but `probe/identity.rs`). The kernels are in `kernels/cuda`.
//!
//! Nothing is linked: the driver's library is loaded when a function is first called, so the binary builds without a toolkit and starts
//! without a driver.
//!
//! Operations enqueue and return. A failure of the driver is kept, ends the step's work, and is reported by [`Device::sample`], or by the next
//! [`Device::begin`]. A step waits twice: `begin` for its upload, [`Device::sample`] (or [`Device::logits`]) for everything else. What they copy back is the
//! one copy to the host: the tokens of rows that the GPU samples, and the logits of the others, which the host samples.
//!
//! Kernels of one step follow each other without a gap: from compute capability 9.0 on, the blocks of a kernel begin while the one before it ends, and a
//! product has its first weights under way before it waits for its operand.
//!
//! Batch invariance is by construction: every output of a product is one chain of steps over k, or a few whose sums are added in order, by the weight's shape
//! and whatever the number of rows; attention is split at
//! absolute positions; no other operation mixes rows. An H100 has confirmed it.

mod driver;
mod images;
mod layer;
mod limits;
mod load;
mod params;
mod probe;
#[cfg(test)]
mod tests;
mod tiles;

pub use limits::bandwidth;
pub use probe::{Gpu, ProbeError, gpus, probe};

use driver::{Context, DriverError, Kernel, Memory, Module, Ordinal, Pointer, Staging, Stream};
use half::bf16;
use images::{Architecture, Groups, unpack};
use layer::{
    DRAW_THREADS, GROUPED_THREADS, HEAD_THREADS, MERGE_THREADS, PART_THREADS, PREFILL_THREADS, ROW_THREADS,
    SUM_THREADS, grouped_shared_bytes, prefill_shared_bytes,
};
use params::Places;
use std::ffi::CStr;
use tiles::{Products, Sum};

use crate::device::{
    Activation, AttentionSpec, Buffer, BufferSpec, DType, Device, DeviceInfo, Feature, Found, Held, HostTensor,
    KernelError, KvFormat, KvSpec, Limits, LogitsSpec, PAGE_TOKENS, Pick, Rope, RopeSpec, Rows, SampledRows, StepBatch,
    Weight, WeightSpec,
};
use crate::source::{Checked, Source};
use crate::step::{Bounds, Step};

/// Columns to which rows of operands are padded with zeros: the depth of a product's tile.
const DEPTH: usize = 64;
/// Counters for blocks that share a row's attention.
const ARRIVED: usize = 4096;
/// Rows of gate and up that alternate in a gated MLP's weight.
const GATED_ROWS: usize = 8;
/// Most values of a head, by the shared memory of the attention kernel.
pub const HEAD_DIM_MAX: usize = 256;

/// Free and total memory of a GPU in bytes. Cost: creates the GPU's context, unless a device holds it.
///
/// # Errors
/// [`KernelError::Fault`] if the driver fails.
pub fn memory_bytes(gpu: &Gpu) -> Result<(u64, u64), KernelError> {
    let faulty = |error: DriverError| fault(gpu, error);
    let context = Context::new(Ordinal::new(gpu.index as i32).map_err(faulty)?).map_err(faulty)?;
    context.memory_bytes().map_err(faulty)
}

/// Name, numerics and weight type of a device on this GPU, without creating it. The compute capability is part of the numerics: two generations
/// round differently inside of a product.
pub fn info(gpu: &Gpu) -> DeviceInfo {
    let (major, minor) = gpu.capability;
    let numerics = format!("cuda-sm{major}{minor}-bf16-v3");
    DeviceInfo { name: format!("cuda {}", gpu.name), numerics, weights: DType::Bf16 }
}

/// Returns true if there are kernels for `feature`; there are for none yet.
pub fn has(feature: Feature) -> bool {
    let _ = feature;
    false
}

/// Refusal of what needs `feature`.
fn lacking(feature: Feature) -> KernelError {
    KernelError::Unavailable { what: feature.name().to_owned(), why: "there are no kernels for it".to_owned() }
}

/// Returns true if a GPU device can hold weights of this type: plain numbers, which become bf16.
fn holds(dtype: DType, held: Held) -> bool {
    held == Held::Stored && !dtype.is_blocks()
}

/// Content of a buffer, decided by the operation that first writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// Nothing was written yet.
    Unknown,
    /// Single precision: the residual stream.
    Single,
    /// bf16, padded with zeros: the operand of a product, or queries.
    Half,
}

#[derive(Debug)]
struct Activations {
    domain: Rows,
    columns: usize,
    memory: Memory,
    content: Content,
}

impl Activations {
    /// Values from row to row.
    fn stride(&self) -> usize {
        self.columns.next_multiple_of(DEPTH)
    }
}

/// Matrix in bf16, `[rows, stride]`, rows padded with zeros.
#[derive(Debug)]
struct Matrix {
    rows: usize,
    columns: usize,
    values: Memory,
    /// One f32 per row.
    bias: Option<Memory>,
    sum: Sum,
}

impl Matrix {
    fn stride(&self) -> usize {
        self.columns.next_multiple_of(DEPTH)
    }
}

#[derive(Debug)]
enum Loaded {
    /// Values in f32, and their number.
    Vector(Memory, usize),
    Matrix(Matrix),
    /// Gate and up, rows alternating in groups of [`GATED_ROWS`], and the number of rows of one of them.
    GateUp(Matrix, usize),
}

#[derive(Debug)]
struct Rotations {
    /// Cosines, then sines, `[positions, half]` f32 each.
    tables: Memory,
    positions: usize,
    half: usize,
}

/// KV cache: one allocation per layer, `[page][K|V][kv_head][token][dim]` bf16, which is the order of transfers too.
#[derive(Debug)]
struct Kv {
    spec: KvSpec,
    layers: Vec<Memory>,
}

impl Kv {
    fn page_bytes(&self) -> usize {
        2 * self.spec.kv_heads * PAGE_TOKENS * self.spec.head_dim * size_of::<bf16>()
    }
}

/// Kernels of the GPU's architecture.
#[derive(Debug)]
struct Kernels {
    embed: Kernel,
    select: Kernel,
    rmsnorm: Kernel,
    products: Products,
    heads: Kernel,
    /// Attention of heads of any size.
    attention: Kernel,
    /// Attention of rows that are alone, and of several rows of a sequence, by size of heads.
    tiled: [TiledAttention; 2],
    best_parts: Kernel,
    best_tokens: Kernel,
    draw_sums: Kernel,
    draw_tokens: Kernel,
    /// Modules that the kernels are in.
    #[expect(dead_code, reason = "held as long as the kernels are used")]
    modules: Vec<Module>,
}

/// Kernels of attention by matrix instructions, for heads of one size.
#[derive(Clone, Copy, Debug)]
struct TiledAttention {
    head_dim: usize,
    decode: Kernel,
    prefill: Kernel,
    /// The prefill of groups of warps, with the same tiles and bits, where it is there and used.
    grouped: Option<Kernel>,
}

/// Rows and sequences of the step for the attention kernels. Their lists are uploaded with the step's other indices.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    /// Sequences of one row, and the longest context among them in tokens.
    alone: (usize, usize),
    /// Sequences of several rows, and the most rows of one.
    several: (usize, usize),
    /// Entries of all block tables.
    pages: usize,
}

/// A GPU as a device: weights, KV cache and activations in its memory.
#[derive(Debug)]
pub struct CudaDevice {
    gpu: Gpu,
    stream: Stream,
    kernels: Kernels,
    bounds: Bounds,
    weights: Vec<Loaded>,
    buffers: Vec<Activations>,
    ropes: Vec<Rotations>,
    kv: Option<Kv>,
    step: Step,
    work: Work,
    multiprocessors: usize,
    /// True if a kernel may begin while the one before it ends.
    overlaps: bool,
    /// Counters of blocks that share a row's attention; zeros between launches.
    arrived: Memory,
    /// Results of splits of rows whose attention several blocks share; grows to its largest need.
    partials: Memory,
    /// Indices of the step as they are uploaded, reused.
    staged: Vec<u32>,
    /// Indices of the step on the GPU; grows to the largest step.
    uploaded: Memory,
    /// Results in f32 that another kernel or the host reads next; grows to its largest need.
    scratch: Memory,
    /// Weights on their way to the GPU, until the first step.
    staging: Option<Staging>,
    logits: Vec<f32>,
    /// Tokens of the sampled rows, and what they were found by; grows to its largest need.
    picked: Memory,
    found: Vec<Found>,
    /// First failure since the last report.
    fault: Option<KernelError>,
}

fn fault(gpu: &Gpu, error: DriverError) -> KernelError {
    KernelError::Fault { device: gpu.name.clone(), call: error.call, error: error.name }
}

impl CudaDevice {
    /// Creates a device without weights on a GPU that [`probe`] found, for steps within `limits`.
    ///
    /// # Errors
    /// [`KernelError::Unavailable`] if there are no kernels for the GPU; [`KernelError::Fault`] if the driver fails.
    pub fn new(gpu: &Gpu, limits: Limits) -> Result<Self, KernelError> {
        let Some(architecture) = Architecture::of(gpu.capability) else {
            let (major, minor) = gpu.capability;
            let why = format!("there are no kernels for compute capability {major}.{minor}");
            return Err(KernelError::Unavailable { what: gpu.name.clone(), why });
        };
        Self::open(gpu, architecture, limits).map_err(|error| fault(gpu, error))
    }

    fn open(gpu: &Gpu, architecture: Architecture, limits: Limits) -> Result<Self, DriverError> {
        let context = Context::new(Ordinal::new(gpu.index as i32)?)?;
        let stream = Stream::new(&context)?;
        let multiprocessors = Ordinal::new(gpu.index as i32)?.multiprocessors()?;
        let images = architecture.images();
        let load = |image| Module::load(&context, &unpack(image));
        let [rows, gemm, heads, sampling] =
            [load(images.rows)?, load(images.gemm)?, load(images.attention)?, load(images.sampling)?];
        let load_all = |groups: Groups| Ok([load(groups.products)?, load(groups.fed)?, load(groups.attention)?]);
        let groups = images.groups.map(load_all).transpose()?;
        let [products, fed, grouped] = groups.map_or([None, None, None], |modules| modules.map(Some));
        let tiled = |head_dim: usize, decode: &CStr, prefill: &CStr, group: &CStr| {
            let decode = heads.kernel(decode, HEAD_THREADS, 0)?;
            let prefill = heads.kernel(prefill, PREFILL_THREADS, prefill_shared_bytes(head_dim))?;
            let group = |module: &Module| module.kernel(group, GROUPED_THREADS, grouped_shared_bytes(head_dim));
            let grouped = grouped.as_ref().map(group).transpose()?;
            Ok::<_, DriverError>(TiledAttention { head_dim, decode, prefill, grouped })
        };
        let kernels = Kernels {
            embed: rows.kernel(c"embed", ROW_THREADS, 0)?,
            select: rows.kernel(c"select_rows", ROW_THREADS, 0)?,
            rmsnorm: rows.kernel(c"rmsnorm", ROW_THREADS, 0)?,
            products: Products::new(&gemm, products.as_ref().zip(fed.as_ref()), multiprocessors)?,
            heads: heads.kernel(c"finish_heads", HEAD_THREADS, 0)?,
            attention: heads.kernel(c"attention", HEAD_THREADS, 0)?,
            tiled: [
                tiled(64, c"attention_decode_64", c"attention_prefill_64", c"attention_grouped_64")?,
                tiled(128, c"attention_decode_128", c"attention_prefill_128", c"attention_grouped_128")?,
            ],
            best_parts: sampling.kernel(c"best_parts", PART_THREADS, 0)?,
            best_tokens: sampling.kernel(c"best_tokens", MERGE_THREADS, 0)?,
            draw_sums: sampling.kernel(c"draw_sums", SUM_THREADS, 0)?,
            draw_tokens: sampling.kernel(c"draw_tokens", DRAW_THREADS, 0)?,
            modules: [rows, gemm, heads, sampling].into_iter().chain(products).chain(fed).chain(grouped).collect(),
        };
        Ok(Self {
            gpu: gpu.clone(),
            kernels,
            bounds: Bounds::new(limits),
            weights: Vec::new(),
            buffers: Vec::new(),
            ropes: Vec::new(),
            kv: None,
            step: Step::default(),
            work: Work::default(),
            multiprocessors,
            overlaps: architecture.overlaps(),
            arrived: stream.allocate(ARRIVED * size_of::<u32>())?,
            partials: stream.allocate(0)?,
            staged: Vec::new(),
            uploaded: stream.allocate(0)?,
            scratch: stream.allocate(0)?,
            staging: None,
            logits: Vec::new(),
            picked: stream.allocate(0)?,
            found: Vec::new(),
            fault: None,
            stream,
        })
    }

    /// Allocates zeroed memory; `what` names its use in the error.
    fn allocate(&self, bytes: Option<usize>, what: &'static str) -> Result<Memory, KernelError> {
        let Some(bytes) = bytes else { return Err(KernelError::Memory { what, bytes: usize::MAX }) };
        self.stream.allocate(bytes).map_err(|error| self.failed(what, bytes, error))
    }

    /// Error of an allocation of `bytes` bytes, whose use `what` names.
    fn failed(&self, what: &'static str, bytes: usize, error: DriverError) -> KernelError {
        if error.is_memory() { KernelError::Memory { what, bytes } } else { fault(&self.gpu, error) }
    }

    /// Allocates memory that holds `values`.
    fn upload<T: crate::host::Element>(&self, values: &[T], what: &'static str) -> Result<Memory, KernelError> {
        let bytes = size_of_val(values);
        let memory = self.stream.allocate_unfilled(bytes).map_err(|error| self.failed(what, bytes, error))?;
        self.stream.write(&memory, 0, values).map_err(|error| fault(&self.gpu, error))?;
        Ok(memory)
    }

    /// Loads `rows` (each a tensor and a row of it, or zeros) as one matrix of bf16; other numbers are rounded.
    fn matrix(&mut self, rows: &[load::Row<'_>], columns: usize, bias: Option<&[f32]>) -> Result<Matrix, KernelError> {
        let stride = columns.next_multiple_of(DEPTH);
        let bytes = rows.len() * stride * size_of::<bf16>();
        let values = load::upload(&self.stream, &mut self.staging, rows, stride);
        let values = values.map_err(|error| self.failed("a matrix of weights", bytes, error))?;
        let bias = bias.map(|bias| self.upload(bias, "a bias")).transpose()?;
        Ok(Matrix { rows: rows.len(), columns, values, bias, sum: Sum::of(rows.len(), stride) })
    }

    /// Loads matrices stacked along their rows.
    fn stacked(&mut self, parts: &[Source<'_>], bias: Option<&[f32]>) -> Result<Matrix, KernelError> {
        let rows: Vec<_> = parts.iter().flat_map(|part| (0..part.rows).map(move |row| Some((part, row)))).collect();
        self.matrix(&rows, parts[0].columns, bias)
    }

    /// Loads gate and up with their rows alternating in groups, so that one thread of the product gets both values of an output.
    fn gated(
        &mut self,
        gate: &Source<'_>,
        up: &Source<'_>,
        biases: Option<&[Vec<f32>; 2]>,
    ) -> Result<Matrix, KernelError> {
        let groups = (0..gate.rows.next_multiple_of(GATED_ROWS)).step_by(GATED_ROWS);
        let places = groups.flat_map(|first| {
            [0, 1].into_iter().flat_map(move |part| (first..first + GATED_ROWS).map(move |row| (part, row)))
        });
        let places: Vec<(usize, usize)> = places.collect();
        let rows: Vec<_> =
            places.iter().map(|&(part, row)| (row < gate.rows).then_some(([gate, up][part], row))).collect();
        let bias = biases.map(|biases| -> Vec<f32> {
            places.iter().map(|&(part, row)| biases[part].get(row).copied().unwrap_or(0.0)).collect()
        });
        // Tiles that gate have no kernels for chunks.
        Ok(Matrix { sum: Sum::Chain, ..self.matrix(&rows, gate.columns, bias.as_deref())? })
    }

    /// Refuses weights in forms that the GPU has no kernels for, by the tensor's name.
    fn refuse(spec: &WeightSpec<'_>, held: Held) -> Result<(), KernelError> {
        let (tensors, held) = match spec {
            WeightSpec::Vector { tensor, .. } => (vec![tensor], Held::Stored),
            WeightSpec::Embedding(tensor) => (vec![tensor], held),
            WeightSpec::Linear { parts, .. } => (parts.iter().collect(), held),
            WeightSpec::GateUp { gate, up, .. } => (vec![gate, up], held),
            WeightSpec::Heads { .. } => return Err(lacking(Feature::Latents)),
            WeightSpec::Table { .. } => return Err(lacking(Feature::Encoders)),
        };
        let is_held = |tensor: &HostTensor<'_>| holds(tensor.dtype, held) && tensor.reader.is_none();
        let Some(tensor) = tensors.into_iter().find(|tensor| !is_held(tensor)) else { return Ok(()) };
        let format = match (held.name(), tensor.reader) {
            (Some(name), _) => name,
            (None, Some(_)) => "a quantized form",
            (None, None) => tensor.dtype.name(),
        };
        let why = "its kernels are for bf16; use the device cpu, or a checkpoint in bf16, f16 or f32".to_owned();
        Err(KernelError::Unavailable { what: format!("{} in {format} on the GPU", tensor.name), why })
    }

    /// Memory of at least `bytes` in place of `memory`; `None` if that is large enough.
    fn larger(&self, memory: &Memory, bytes: usize, what: &'static str) -> Result<Option<Memory>, KernelError> {
        if memory.bytes() >= bytes {
            return Ok(None);
        }
        // Work that is enqueued may use the old memory.
        self.stream.wait().map_err(|error| fault(&self.gpu, error))?;
        self.allocate(bytes.checked_next_power_of_two(), what).map(Some)
    }

    /// Copies the indices of the step to the GPU: tokens, positions, first entries of block tables, sampled rows, block tables, rows that
    /// are alone in their sequence, and first rows and numbers of rows of the other sequences.
    fn stage(&mut self) -> Result<(), KernelError> {
        let mut staged = std::mem::take(&mut self.staged);
        let (step, word) = (&self.step, |index: usize| u32::try_from(index).expect("indices of a step are below 2^32"));
        let (mut first, mut starts) = (0, Vec::with_capacity(step.spans.len()));
        for span in &step.spans {
            starts.push(word(first));
            first += step.pages(span).len();
        }
        staged.clear();
        staged.extend(&step.tokens);
        staged.extend(step.positions.iter().map(|&position| word(position)));
        staged.extend(step.span_of.iter().map(|&span| starts[span]));
        staged.extend(step.sampled.iter().map(|&row| word(row)));
        step.spans.iter().for_each(|span| staged.extend(step.pages(span)));
        let (alone, several) = step.spans.iter().partition::<Vec<_>, _>(|span| span.rows.len() == 1);
        staged.extend(alone.iter().map(|span| word(span.rows.start)));
        staged.extend(several.iter().flat_map(|span| [word(span.rows.start), word(span.rows.len())]));
        self.work = Work {
            alone: (alone.len(), alone.iter().map(|span| step.positions[span.rows.start] + 1).max().unwrap_or(0)),
            several: (several.len(), several.iter().map(|span| span.rows.len()).max().unwrap_or(0)),
            pages: first,
        };
        self.staged = staged;
        if let Some(larger) = self.larger(&self.uploaded, size_of_val(&*self.staged), "the indices of a step")? {
            self.uploaded = larger;
        }
        self.stream.write(&self.uploaded, 0, &self.staged).map_err(|error| fault(&self.gpu, error))
    }

    /// Place of each row in its sequence's pages, on the GPU.
    fn places(&self) -> Places {
        let rows = self.step.rows();
        let at = |index: usize| self.uploaded.at(index * size_of::<u32>());
        let tables = at(3 * rows + self.step.sampled.len());
        Places { positions: at(rows), table_at: at(2 * rows), tables }
    }

    /// Lists of the step for the attention kernels, on the GPU: rows that are alone, and sequences of several rows.
    fn items(&self) -> [Pointer; 2] {
        let alone = 3 * self.step.rows() + self.step.sampled.len() + self.work.pages;
        [alone, alone + self.work.alone.0].map(|index| self.uploaded.at(index * size_of::<u32>()))
    }

    fn rows_of(&self, buffer: Buffer) -> usize {
        match self.buffers[buffer.0 as usize].domain {
            Rows::Batch => self.step.rows(),
            Rows::Sampled => self.step.sampled.len(),
        }
    }

    fn cache(&self) -> &Kv {
        self.kv.as_ref().expect("kv() is called before a step")
    }
}

impl Device for CudaDevice {
    fn info(&self) -> DeviceInfo {
        info(&self.gpu)
    }

    fn has(&self, feature: Feature) -> bool {
        has(feature)
    }

    fn load(&mut self, spec: &WeightSpec<'_>, held: Held) -> Result<Weight, KernelError> {
        Self::refuse(spec, held)?;
        let loaded = match Checked::new(spec)? {
            Checked::Vector(values) => Loaded::Vector(self.upload(&values, "a vector of weights")?, values.len()),
            Checked::Linear { parts, bias } => Loaded::Matrix(self.stacked(&parts, bias.as_deref())?),
            Checked::GateUp { gate, up, biases } => Loaded::GateUp(self.gated(&gate, &up, biases.as_ref())?, gate.rows),
            Checked::Embedding(source) => {
                self.bounds.vocab = self.bounds.vocab.min(source.rows);
                Loaded::Matrix(self.stacked(&[source], None)?)
            }
            Checked::Heads(_) | Checked::Table(..) => unreachable!("refused above"),
        };
        self.weights.push(loaded);
        Ok(Weight(self.weights.len() as u32 - 1))
    }

    fn buffer(&mut self, spec: BufferSpec) -> Result<Buffer, KernelError> {
        let rows = match spec.rows {
            Rows::Batch => self.bounds.rows_max,
            Rows::Sampled => self.bounds.sampled_max,
        };
        let values = spec.columns.checked_next_multiple_of(DEPTH).and_then(|stride| stride.checked_mul(rows));
        let bytes = values.and_then(|values| values.checked_mul(size_of::<f32>()));
        let memory = self.allocate(bytes, "a buffer of activations")?;
        let (domain, columns, content) = (spec.rows, spec.columns, Content::Unknown);
        self.buffers.push(Activations { domain, columns, memory, content });
        Ok(Buffer(self.buffers.len() as u32 - 1))
    }

    fn rope(&mut self, spec: &RopeSpec) -> Result<Rope, KernelError> {
        // As in the reference: the angle in f32, as transformers has it, its sine from f64.
        let angle = |position: usize, f: &f32| f64::from(position as f32 * f);
        let table = |of: fn(f64) -> f64| {
            let rows = 0..spec.positions;
            rows.flat_map(move |position| {
                spec.inverse_frequencies.iter().map(move |f| of(angle(position, f)) as f32 * spec.factor)
            })
        };
        let values: Vec<f32> = table(f64::cos).chain(table(f64::sin)).collect();
        let tables = self.upload(&values, "a table of rotations")?;
        self.ropes.push(Rotations { tables, positions: spec.positions, half: spec.inverse_frequencies.len() });
        self.bounds.positions = self.bounds.positions.min(spec.positions);
        Ok(Rope(self.ropes.len() as u32 - 1))
    }

    fn kv(&mut self, spec: KvSpec) -> Result<(), KernelError> {
        if spec.head_dim > HEAD_DIM_MAX || !spec.head_dim.is_multiple_of(2) {
            let (name, got) = ("head_dim".to_owned(), vec![spec.head_dim]);
            return Err(KernelError::Shape { name, got, want: format!("an even number up to {HEAD_DIM_MAX}") });
        }
        if spec.latent.is_some() {
            return Err(lacking(Feature::Latents));
        }
        if spec.format != KvFormat::Own {
            return Err(lacking(Feature::IntegerKv));
        }
        let parts = [spec.kv_heads, 2 * PAGE_TOKENS * size_of::<bf16>(), spec.head_dim];
        let bytes = parts.iter().try_fold(spec.pages, |bytes, part| bytes.checked_mul(*part));
        let whole = bytes.and_then(|bytes| bytes.checked_mul(spec.layers));
        if whole.is_none() {
            return Err(KernelError::Memory { what: "the KV cache", bytes: usize::MAX });
        }
        let layers = (0..spec.layers).map(|_| self.allocate(bytes, "the KV cache")).collect::<Result<_, _>>()?;
        self.kv = Some(Kv { spec, layers });
        self.bounds.pages = spec.pages;
        Ok(())
    }

    fn begin(&mut self, batch: &StepBatch<'_>) -> Result<(), KernelError> {
        self.staging = None;
        self.step.take(batch, &self.bounds)?;
        let outcome = self.fault.take().map_or_else(|| self.stage(), Err);
        if outcome.is_err() {
            // An empty step: the operations that follow do nothing.
            (self.step, self.work) = (Step::default(), Work::default());
        }
        outcome
    }

    fn embed(&mut self, out: Buffer, table: Weight, scale: f32) {
        assert_eq!(scale, 1.0, "`has` denies a scale of embeddings");
        self.run_embed(out, table);
    }

    fn rmsnorm(&mut self, out: Buffer, x: Buffer, weight: Weight, eps: f32) {
        self.run_rmsnorm(out, x, weight, eps);
    }

    fn qkv(&mut self, out: Buffer, x: Buffer, weight: Weight, attention: &AttentionSpec, layer: usize) {
        self.run_qkv(out, x, weight, attention, layer);
    }

    fn attention(&mut self, out: Buffer, queries: Buffer, attention: &AttentionSpec, layer: usize) {
        self.run_attention(out, queries, attention, layer);
    }

    fn linear_add(&mut self, residual: Buffer, x: Buffer, weight: Weight, scale: f32) {
        assert_eq!(scale, 1.0, "`has` denies a scale of what layers add");
        self.run_linear_add(residual, x, weight);
    }

    fn gate_up(&mut self, out: Buffer, x: Buffer, weight: Weight, activation: Activation) {
        assert_eq!(activation, Activation::Silu, "`has` denies other activations");
        self.run_gate_up(out, x, weight);
    }

    fn select(&mut self, out: Buffer, x: Buffer) {
        self.run_select(out, x);
    }

    fn read_sampled(&mut self, x: Buffer) -> Result<Vec<f32>, KernelError> {
        let rows = self.run_read_sampled(x);
        match self.fault.take() {
            Some(fault) => Err(fault),
            None => Ok(rows),
        }
    }

    fn logits(&mut self, x: Buffer, weight: Weight, spec: LogitsSpec) -> Result<&[f32], KernelError> {
        assert_eq!(spec, LogitsSpec::PLAIN, "`has` denies soft caps and scales of logits");
        self.run_logits(x, weight);
        match self.fault.take() {
            Some(fault) => Err(fault),
            None => Ok(&self.logits),
        }
    }

    fn sample(
        &mut self,
        x: Buffer,
        weight: Weight,
        spec: LogitsSpec,
        picks: &[Pick],
    ) -> Result<SampledRows<'_>, KernelError> {
        assert_eq!(spec, LogitsSpec::PLAIN, "`has` denies soft caps and scales of logits");
        let vocab = self.run_sample(x, weight, picks);
        match self.fault.take() {
            Some(fault) => Err(fault),
            None => Ok(SampledRows::new(&self.logits, vocab, &self.found)),
        }
    }

    fn page(&self, layer: usize, page: u32) -> Vec<f32> {
        let mut bytes = vec![0; self.page_bytes()];
        self.read_page(layer, page, &mut bytes);
        let (pairs, _) = bytes.as_chunks::<2>();
        pairs.iter().map(|pair| bf16::from_le_bytes(*pair).to_f32()).collect()
    }

    fn page_bytes(&self) -> usize {
        self.cache().page_bytes()
    }

    /// # Panics
    /// If the GPU failed: it holds nothing any more, and the process is of no use.
    fn read_page(&self, layer: usize, page: u32, out: &mut [u8]) {
        let (kv, bytes) = (self.cache(), self.page_bytes());
        assert!(out.len() == bytes && (page as usize) < kv.spec.pages, "page {page}, {} bytes", out.len());
        let read = self.stream.read(&kv.layers[layer], page as usize * bytes, out);
        read.unwrap_or_else(|error| panic!("{}", fault(&self.gpu, error)));
    }

    /// # Panics
    /// If the GPU failed, as in [`Device::read_page`].
    fn write_page(&mut self, layer: usize, page: u32, bytes: &[u8]) {
        let kv = self.cache();
        assert!(
            bytes.len() == kv.page_bytes() && (page as usize) < kv.spec.pages,
            "page {page}, {} bytes",
            bytes.len()
        );
        let written = self.stream.write(&kv.layers[layer], page as usize * bytes.len(), bytes);
        written.unwrap_or_else(|error| panic!("{}", fault(&self.gpu, error)));
    }
}
