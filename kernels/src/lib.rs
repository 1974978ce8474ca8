//! Every operation that runs on a device, and host memory and file mapping. The only home of `unsafe` below the
//! processes.
//!
//! [`Device`] is the interface: some twenty fused operations over device buffers, implemented by [`mod@reference`]
//! (f32, slow, obvious: the oracle) and [`cpu`] (bf16, AMX / AVX-512 / AVX2 / portable). A model file is a straight line of
//! these calls and knows nothing of the device. CUDA fits the same interface: a handle is an index into device
//! allocations, [`Device::begin`] is the one upload of a step, the operations enqueue on one stream (or replay a
//! captured graph of the bucketed batch size), and [`Device::sample`] (or [`Device::logits`]) is the one
//! synchronisation; see `docs/adr/0003-device-seam.md`.
//!
//! [`sampling`] is the arithmetic of drawing a token: the engine samples by it, and a device that draws has its bits.
//!
//! Batch invariance is a contract of every implementation: a row's result is the same bits whatever other rows are in the
//! step, wherever the row's sequence was cut into steps, and whether its context was computed or found in the cache.

pub mod cpu;
pub mod cuda;
pub mod device;
pub mod host;
pub mod reference;
pub mod sampling;

mod blocks;
mod feature;
mod format;
mod pooling;
mod reader;
mod rounding;
mod routing;
mod source;
mod step;

pub use device::{
    ADAPTER_RANK_MAX, ADAPTERS_MAX, Activation, AdapterSlot, AttentionSpec, Buffer, BufferSpec, CodeForm, CodeGroups,
    CodeKind, CodeRows, DType, Device, DeviceInfo, E4M3, ExpertGroups, ExpertSpec, Feature, Found, HeadNorms, Held,
    HostTensor, KernelError, KvFormat, KvSpec, Limits, LogitsSpec, LowRank, OffsetBias, PAGE_TOKENS, Pick, Rope,
    RopeSpec, RoutingSpec, RowOrder, RowReader, Rows, SampledRow, SampledRows, Scoring, Span, StepBatch, TableIndex,
    Weight, WeightSpec,
};
pub use pooling::{Pool, PoolRule};
