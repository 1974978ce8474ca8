//! The CPU device: bf16 weights and operands, f32 sums, one pool of threads.
//!
//! Reading order: this file (loading, buffers), `layer.rs`, `latent.rs`, `encoder.rs` and `experts.rs` (the operations), `matmul.rs` and `attention.rs` (the blocked
//! algorithms), `tile/` (the innermost products per instruction path), `vector.rs` (everything elementwise). Layouts are in `pack.rs`
//! (weights), `narrow/` (weights of 4 and 8 bits that products expand), `operand.rs` (activations), `kv.rs`. Adapters are in `low_rank.rs`.
//!
//! Cost of a token for Qwen3-0.6B (440 M weights in layers, 156 M in the head): 0.88 GFLOP and a share of 1.19 GB of
//! weights. One row streams weights from memory; about twenty rows or more are bound by arithmetic.
//!
//! Batch invariance: a tile's bits do not depend on its height (`tile/`), a row's norm and softmax run over fixed
//! lanes, attention is split at absolute positions. No other operation mixes rows.

mod attention;
mod detect;
mod encoder;
mod experts;
mod integer;
mod kv;
mod lanes;
mod latent;
mod layer;
pub mod limits;
mod low_rank;
mod math;
mod matmul;
mod narrow;
mod operand;
mod pack;
mod pool;
mod scratch;
#[cfg(test)]
pub(crate) mod tests;
mod tile;
mod vector;

pub use detect::Path;

use attention::AttentionScratch;
use experts::{Experts, Slots};
use integer::Form;
use integer::activations::{Integral, Memory};
use kv::KvCache;
use matmul::Left;
use operand::{Groups, Operand, Out, Shared};
use pack::Packed;
use pool::Pool;
use scratch::Scratch;
use tile::Kernel;
use vector::VectorOps;

use crate::device::{
    Activation, AdapterSlot, AttentionSpec, Buffer, BufferSpec, CodeGroups, CodeKind, DType, Device, DeviceInfo,
    ExpertSpec, Feature, Held, KernelError, KvSpec, Limits, LogitsSpec, LowRank, Rope, RopeSpec, RoutingSpec, Rows,
    StepBatch, TableIndex, Weight, WeightSpec,
};
use crate::host::{Arena, Region, WeightCopy};
use crate::source::{Checked, checked_experts};
use crate::step::{Bounds, Step};

/// Options of the CPU device; the defaults use the whole machine.
#[derive(Clone, Debug, Default)]
pub struct CpuOptions {
    /// Number of threads, the calling one included; 0 means one per core of `cores`, or of the machine.
    pub threads: usize,
    /// Cores to pin threads to, in order; the calling thread takes the first.
    pub cores: Option<Vec<usize>>,
    /// Instruction path, which selects the kernels and is part of the numerics id.
    pub path: Path,
}

/// Content of a buffer, decided by the operation that writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// Single precision, row-major, rows padded to 32 columns with zeros: the residual stream.
    Single,
    /// Operand: bf16 in the order of a left operand, read by the next product.
    Operand,
    /// Queries: bf16 `[rows][heads][dim padded to 32]`.
    Queries,
}

struct Activations {
    domain: Rows,
    columns: usize,
    /// Most rows, by the limit of the row domain.
    rows_max: usize,
    memory: Region<f32>,
    content: Content,
}

impl Activations {
    /// Number of f32 per row in memory, padded to 32 columns.
    fn stride(&self) -> usize {
        self.columns.next_multiple_of(32)
    }
}

enum Loaded {
    /// Values padded to 32 with zeros, and the length without padding.
    Vector(Vec<f32>, usize),
    Matrix(Packed),
    GateUp(Packed),
    Embedding(Packed),
    /// Rows padded to 32 with zeros.
    Table(Table),
    Experts(Experts),
    /// Matrices of all heads, each packed by itself.
    Heads(Vec<Packed>),
}

/// Table of rows that are added to embeddings, in f32.
struct Table {
    values: Vec<f32>,
    columns: usize,
    index: TableIndex,
}

struct Rotations {
    /// Cosines of the rotations, `[positions, half]`; `sines` has the same shape.
    cosines: Vec<f32>,
    sines: Vec<f32>,
    half: usize,
}

/// The CPU as a device: packed weights, KV cache, and a pool of threads.
pub struct CpuDevice {
    path: Path,
    kernel: Kernel,
    vector: &'static VectorOps,
    pool: Pool,
    arena: Arena,
    /// Memory of adapters by slot, apart from each other and from weights: that of one is given back when it is unloaded.
    adapter_arenas: Vec<Arena>,
    bounds: Bounds,
    weights: Vec<Loaded>,
    buffers: Vec<Activations>,
    ropes: Vec<Rotations>,
    kv: Option<KvCache>,
    step: Step,
    /// Working space of each thread, grown to its largest need.
    scratch: Vec<Scratch>,
    attention: AttentionScratch,
    /// A left operand converted from a buffer that holds f32.
    converted: Scratch,
    /// A left operand rounded to integers.
    integral: Memory,
    /// Products of adapted rows with the first matrices of their adapters.
    low: Scratch,
    /// Queries, keys and values of a layer whose norms are over all heads together.
    projected: Scratch,
    /// Rows of the step by the experts that they chose.
    slots: Slots,
    /// Activations of experts, before they are converted to a left operand or as one.
    activated: Scratch,
    /// True once a matrix of integers is loaded: norms, attention and SiLU then write f32, from which products round.
    writes_singles: bool,
    logits: Vec<f32>,
}

impl CpuDevice {
    /// Creates a device without weights.
    ///
    /// Errors: [`KernelError::Unavailable`] if a path named in `options` is not on this machine or `cores` does not fit `threads`;
    /// [`KernelError::Os`] if threads cannot be started.
    pub fn new(options: CpuOptions, limits: Limits) -> Result<Self, KernelError> {
        let path = options.path.resolve()?;
        let avx512 = !matches!(path, Path::Avx2 | Path::Portable) && Path::Avx512.missing().is_none();
        let vector = vector::ops(avx512, detect::has_avx2_fma());
        Self::with_kernel(path, tile::kernel(path), vector, options, limits)
    }

    fn with_kernel(
        path: Path,
        kernel: Kernel,
        vector: &'static VectorOps,
        options: CpuOptions,
        limits: Limits,
    ) -> Result<Self, KernelError> {
        let of_machine = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = match (options.threads, &options.cores) {
            (0, Some(cores)) => cores.len().max(1),
            (0, None) => of_machine(),
            (threads, _) => threads,
        };
        if options.cores.as_ref().is_some_and(|cores| cores.len() < threads) {
            let why = format!("the list of cores is shorter than {threads}");
            return Err(KernelError::Unavailable { what: "pinning threads".into(), why });
        }
        Ok(Self {
            path,
            kernel,
            vector,
            pool: Pool::new(threads, options.cores)?,
            arena: Arena::default(),
            adapter_arenas: Vec::new(),
            bounds: Bounds::new(limits),
            weights: Vec::new(),
            buffers: Vec::new(),
            ropes: Vec::new(),
            kv: None,
            step: Step::default(),
            scratch: (0..threads).map(|_| Scratch::default()).collect(),
            attention: AttentionScratch::default(),
            converted: Scratch::default(),
            integral: Memory::default(),
            low: Scratch::default(),
            projected: Scratch::default(),
            slots: Slots::default(),
            activated: Scratch::default(),
            writes_singles: false,
            logits: Vec::new(),
        })
    }

    /// Puts the packed matrices that are loaded from now on into memory that processes share; the rest of the device's memory is its own.
    pub fn with_weights(mut self, copy: WeightCopy) -> Self {
        self.arena = Arena::over(copy);
        self
    }

    /// Bytes of memory for a matrix of `rows` × `columns` that is stored as `dtype`, once it is loaded. (Weights whose parts have formats
    /// that cannot share a panel take more: they are expanded.)
    pub fn held_bytes(dtype: DType, held: Held, rows: usize, columns: usize) -> u64 {
        pack::held_bytes(dtype, held, rows, columns)
    }

    /// Bytes of memory for a matrix of `rows` × `columns` codes ([`RowReader::codes`](crate::RowReader::codes)) that is held as stored, once it is loaded;
    /// `None` for one that is expanded to bf16. (A weight whose parts list other groups of columns and share panels takes more: it is expanded.)
    pub fn codes_bytes(kind: CodeKind, groups: CodeGroups<'_>, rows: usize, columns: usize) -> Option<u64> {
        narrow::held_bytes(kind, groups, rows, columns)
    }

    /// Bytes in which each thread expands panels of a matrix of `columns` codes for many rows, where an epilogue sees one panel at a time.
    pub fn expanded_bytes(columns: usize) -> u64 {
        (matmul::UNIT_BYTES as u64).max(columns.div_ceil(32) as u64 * pack::BLOCK as u64 * 2)
    }

    /// Bytes of memory for a table ([`WeightSpec::Table`]) of `rows` × `columns`.
    pub fn table_bytes(rows: usize, columns: usize) -> u64 {
        4 * (rows as u64) * columns.next_multiple_of(32) as u64
    }

    /// Paths that this machine has, fastest first.
    pub fn paths_available() -> Vec<Path> {
        detect::PATHS.into_iter().filter(|path| path.missing().is_none()).collect()
    }

    /// Instruction path in use, chosen at the start; never [`Path::Auto`].
    pub fn path(&self) -> Path {
        self.path
    }

    fn rows_of(&self, buffer: Buffer) -> usize {
        match self.buffers[buffer.0 as usize].domain {
            Rows::Batch => self.step.rows(),
            Rows::Sampled => self.step.sampled.len(),
        }
    }

    fn groups(&self, buffer: Buffer) -> Groups {
        Groups::new(self.rows_of(buffer), self.kernel.rows_max)
    }

    /// `buffer` to be written by an operation whose results are read by products.
    fn out(&mut self, buffer: Buffer, columns: usize) -> Out {
        if self.writes_singles {
            self.singles_out(buffer, columns)
        } else {
            Out::Operand(self.operand_out(buffer, columns))
        }
    }

    /// `buffer` to be written as f32.
    fn singles_out(&mut self, buffer: Buffer, columns: usize) -> Out {
        let stored = &mut self.buffers[buffer.0 as usize];
        assert_eq!(stored.columns, columns, "columns of buffer {}", buffer.0);
        stored.content = Content::Single;
        let stride = stored.stride();
        Out::Singles { values: Shared::new(&mut stored.memory), stride }
    }

    /// `buffer` as an operand that will be written.
    fn operand_out(&mut self, buffer: Buffer, columns: usize) -> Operand {
        let groups = self.groups(buffer);
        let stored = &mut self.buffers[buffer.0 as usize];
        assert_eq!(stored.columns, columns, "columns of buffer {}", buffer.0);
        stored.content = Content::Operand;
        Operand { values: Shared::halved(&mut stored.memory), groups, k_blocks: columns.div_ceil(32) }
    }

    /// `buffer` as an operand to read; f32 is converted aside, the buffer stays as it is.
    fn operand_in(&mut self, buffer: Buffer, columns: usize) -> Operand {
        let groups = self.groups(buffer);
        let stored = &mut self.buffers[buffer.0 as usize];
        assert_eq!(stored.columns, columns, "columns of buffer {}", buffer.0);
        let k_blocks = columns.div_ceil(32);
        match stored.content {
            Content::Operand => Operand { values: Shared::halved(&mut stored.memory), groups, k_blocks },
            Content::Single => {
                let values = Shared::new(self.converted.halves(groups.rows() * k_blocks * 32));
                let operand = Operand { values, groups, k_blocks };
                let (rows, stride, narrow) = (Shared::new(&mut stored.memory), k_blocks * 32, self.vector.narrow);
                layer::for_rows(&mut self.pool, groups.rows(), stride, &|row| {
                    // SAFETY: borrowed for this operation, and only read.
                    let x = unsafe { rows.slice(row * stride, stride) };
                    // SAFETY: the table is this machine's; each row once.
                    unsafe { narrow(x, operand.row(row)) };
                });
                operand
            }
            Content::Queries => panic!("buffer {} holds queries, which only attention reads", buffer.0),
        }
    }

    /// `buffer` as the left operand of a product with `weight`, in each form that its sections read.
    fn left(&mut self, buffer: Buffer, weight: Weight) -> Left {
        let (Loaded::Matrix(packed) | Loaded::GateUp(packed) | Loaded::Embedding(packed)) =
            &self.weights[weight.0 as usize]
        else {
            panic!("weight {} is not a matrix", weight.0)
        };
        let forms = packed.sections.iter().map(|section| section.form());
        let (has_halves, columns) = (forms.clone().any(|form| form.is_none()), packed.columns);
        let by_row = forms.flatten().map(|form| form == Form::Rows).next();
        let integral = by_row.map(|by_row| self.integral_in(buffer, columns, by_row));
        Left { half: has_halves.then(|| self.operand_in(buffer, columns)), integral }
    }

    /// `buffer`, which holds f32, rounded to integers aside.
    fn integral_in(&mut self, buffer: Buffer, columns: usize, by_row: bool) -> Integral {
        let groups = Groups::new(self.rows_of(buffer), self.kernel.integers.rows_max());
        assert_eq!(self.buffers[buffer.0 as usize].columns, columns, "columns of buffer {}", buffer.0);
        let operand = self.integral.operand(groups, columns.div_ceil(32), by_row);
        let (rows, stride) = self.singles(buffer);
        let quantize = self.vector.quantize;
        layer::for_rows(&mut self.pool, groups.rows(), stride, &|row| {
            // SAFETY: borrowed for this operation, and only read.
            let x = unsafe { rows.slice(row * stride, stride) };
            // SAFETY: the table is this machine's; each row once.
            unsafe { quantize(x, operand.row(row)) };
        });
        operand
    }

    /// Rows of `buffer`, which must hold f32, and their stride.
    fn singles(&mut self, buffer: Buffer) -> (Shared<f32>, usize) {
        let stored = &mut self.buffers[buffer.0 as usize];
        assert_eq!(stored.content, Content::Single, "content of buffer {}", buffer.0);
        let stride = stored.stride();
        (Shared::new(&mut stored.memory), stride)
    }

    /// Packed matrix of a linear weight or an embedding.
    fn matrix(&self, weight: Weight) -> &Packed {
        match &self.weights[weight.0 as usize] {
            Loaded::Matrix(packed) | Loaded::Embedding(packed) => packed,
            _ => panic!("weight {} is not a matrix", weight.0),
        }
    }

    fn vector_of(&self, weight: Weight) -> (&[f32], usize) {
        let Loaded::Vector(values, columns) = &self.weights[weight.0 as usize] else {
            panic!("weight {} is not a vector", weight.0)
        };
        (values, *columns)
    }
}

impl Device for CpuDevice {
    fn info(&self) -> DeviceInfo {
        let name = format!("cpu {}, {} threads", self.path.name(), self.pool.threads());
        DeviceInfo { name, numerics: format!("cpu-bf16-{}-v1", self.kernel.family), weights: DType::Bf16 }
    }

    fn has(&self, _: Feature) -> bool {
        true
    }

    fn load(&mut self, spec: &WeightSpec<'_>, held: Held) -> Result<Weight, KernelError> {
        let (arena, pool) = (&mut self.arena, &mut self.pool);
        arena.about(spec.name());
        let loaded = match Checked::new(spec)? {
            Checked::Vector(mut values) => {
                let columns = values.len();
                values.resize(columns.next_multiple_of(32), 0.0);
                Loaded::Vector(values, columns)
            }
            Checked::Linear { parts, bias } => Loaded::Matrix(Packed::stack(arena, pool, &parts, bias, held)?),
            Checked::GateUp { gate, up, biases } => {
                Loaded::GateUp(Packed::gate_up(arena, pool, gate, up, biases, held)?)
            }
            Checked::Embedding(source) => {
                self.bounds.vocab = self.bounds.vocab.min(source.rows);
                Loaded::Embedding(Packed::stack(arena, pool, &[source], None, held)?)
            }
            Checked::Table(source, index) => {
                self.bounds.has_table(source.rows, index);
                Loaded::Table(Table::new(source, index))
            }
            Checked::Heads(heads) => Loaded::Heads(latent::pack(arena, pool, heads)?),
        };
        if let Loaded::Matrix(packed) | Loaded::GateUp(packed) | Loaded::Embedding(packed) = &loaded {
            self.writes_singles |= packed.has_integers();
        }
        self.weights.push(loaded);
        Ok(Weight(self.weights.len() as u32 - 1))
    }

    fn load_experts(&mut self, experts: &[ExpertSpec<'_>], held: Held) -> Result<Weight, KernelError> {
        self.arena.about(experts.first().map_or("", |expert| expert.gate.name));
        let experts = Experts::pack(&mut self.arena, &mut self.pool, checked_experts(experts)?, held)?;
        self.writes_singles |= experts.has_integers();
        self.weights.push(Loaded::Experts(experts));
        Ok(Weight(self.weights.len() as u32 - 1))
    }

    fn adapt(&mut self, weight: Weight, slot: AdapterSlot, parts: &[LowRank<'_>]) -> Result<(), KernelError> {
        self.run_adapt(weight, slot, parts)
    }

    fn unadapt(&mut self, slot: AdapterSlot) {
        self.run_unadapt(slot);
    }

    fn buffer(&mut self, spec: BufferSpec) -> Result<Buffer, KernelError> {
        let rows_max = match spec.rows {
            Rows::Batch => self.bounds.rows_max,
            Rows::Sampled => self.bounds.sampled_max,
        };
        let count = spec.columns.checked_next_multiple_of(32).and_then(|stride| stride.checked_mul(rows_max));
        let memory = self.arena.alloc(count.unwrap_or(usize::MAX), "a buffer of activations")?;
        let (domain, columns) = (spec.rows, spec.columns);
        self.buffers.push(Activations { domain, columns, rows_max, memory, content: Content::Single });
        Ok(Buffer(self.buffers.len() as u32 - 1))
    }

    fn rope(&mut self, spec: &RopeSpec) -> Result<Rope, KernelError> {
        // As in the reference: the angle in f32, as transformers has it, its sine from f64.
        let angles = (0..spec.positions)
            .flat_map(|position| spec.inverse_frequencies.iter().map(move |f| f64::from(position as f32 * f)));
        let (cosines, sines) = angles.map(|a| (a.cos() as f32 * spec.factor, a.sin() as f32 * spec.factor)).unzip();
        self.ropes.push(Rotations { cosines, sines, half: spec.inverse_frequencies.len() });
        self.bounds.positions = self.bounds.positions.min(spec.positions);
        Ok(Rope(self.ropes.len() as u32 - 1))
    }

    fn kv(&mut self, spec: KvSpec) -> Result<(), KernelError> {
        let widest = if spec.latent.is_some() { latent::LATENT_MAX } else { layer::DIM_MAX };
        if spec.head_dim > widest || !spec.head_dim.is_multiple_of(2) {
            let (name, got) = ("head_dim".to_owned(), vec![spec.head_dim]);
            return Err(KernelError::Shape { name, got, want: format!("an even number up to {widest}") });
        }
        self.kv = Some(KvCache::new(&mut self.arena, spec)?);
        self.bounds.pages = spec.pages;
        Ok(())
    }

    fn begin(&mut self, batch: &StepBatch<'_>) -> Result<(), KernelError> {
        self.pool.pin_caller();
        self.step.take(batch, &self.bounds)
    }

    fn embed(&mut self, out: Buffer, table: Weight, scale: f32) {
        self.run_embed(out, table, scale);
    }

    fn add_table(&mut self, residual: Buffer, table: Weight) {
        self.run_add_table(residual, table);
    }

    fn layer_norm(&mut self, out: Buffer, x: Buffer, weight: Weight, bias: Option<Weight>, eps: f32) {
        self.run_layer_norm(out, x, weight, bias, eps);
    }

    fn activated(&mut self, out: Buffer, x: Buffer, weight: Weight, activation: Activation) {
        self.run_activated(out, x, weight, activation);
    }

    fn pool(&mut self, out: Buffer, x: Buffer) {
        self.run_pool(out, x);
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

    fn latent_keys(&mut self, x: Buffer, norm: Weight, attention: &AttentionSpec, layer: usize) {
        self.run_latent_keys(x, norm, attention, layer);
    }

    fn latent_queries(&mut self, out: Buffer, x: Buffer, keys: Weight, attention: &AttentionSpec) {
        self.run_latent_queries(out, x, keys, attention);
    }

    fn per_head(&mut self, out: Buffer, x: Buffer, weight: Weight) {
        self.run_per_head(out, x, weight);
    }

    fn linear_add(&mut self, residual: Buffer, x: Buffer, weight: Weight, scale: f32) {
        self.run_linear_add(residual, x, weight, scale);
    }

    fn linear(&mut self, out: Buffer, x: Buffer, weight: Weight) {
        self.run_linear(out, x, weight);
    }

    fn norm_add(&mut self, residual: Buffer, x: Buffer, weight: Weight, eps: f32) {
        self.run_norm_add(residual, x, weight, eps);
    }

    fn gate_up(&mut self, out: Buffer, x: Buffer, weight: Weight, activation: Activation) {
        self.run_gate_up(out, x, weight, activation);
    }

    fn route(&mut self, out: Buffer, x: Buffer, router: Weight, routing: &RoutingSpec) {
        self.run_route(out, x, router, routing);
    }

    fn experts(&mut self, residual: Buffer, x: Buffer, routes: Buffer, experts: Weight, activation: Activation) {
        self.run_experts(residual, x, routes, experts, activation);
    }

    fn select(&mut self, out: Buffer, x: Buffer) {
        self.run_select(out, x);
    }

    fn read_sampled(&mut self, x: Buffer) -> Result<Vec<f32>, KernelError> {
        assert_eq!(self.buffers[x.0 as usize].domain, Rows::Sampled, "a buffer of sampled rows is read");
        Ok(self.run_read(x))
    }

    fn logits(&mut self, x: Buffer, weight: Weight, spec: LogitsSpec) -> Result<&[f32], KernelError> {
        self.run_logits(x, weight, spec);
        Ok(&self.logits)
    }

    fn routes(&self, routes: Buffer) -> Vec<f32> {
        let (stored, rows) = (&self.buffers[routes.0 as usize], self.rows_of(routes));
        let rows = stored.memory[..rows * stored.stride()].chunks_exact(stored.stride());
        rows.flat_map(|row| &row[..stored.columns]).copied().collect()
    }

    fn page(&self, layer: usize, page: u32) -> Vec<f32> {
        self.kv.as_ref().expect("kv() is called before page()").page(layer, page as usize)
    }

    fn page_bytes(&self) -> usize {
        self.kv.as_ref().expect("kv() is called before page_bytes()").page_bytes()
    }

    fn read_page(&self, layer: usize, page: u32, out: &mut [u8]) {
        self.kv.as_ref().expect("kv() is called before read_page()").read_page(layer, page as usize, out);
    }

    fn write_page(&mut self, layer: usize, page: u32, bytes: &[u8]) {
        self.kv.as_mut().expect("kv() is called before write_page()").write_page(layer, page as usize, bytes);
    }
}
