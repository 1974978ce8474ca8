//! Parameters of the kernels, field by field as the structs of the same names in `kernels/cuda/*.cu`.

use super::driver::Pointer;

/// Place of each row in its sequence's pages.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Places {
    pub(super) positions: Pointer,
    pub(super) table_at: Pointer,
    pub(super) tables: Pointer,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct EmbedParams {
    pub(super) out: Pointer,
    pub(super) table: Pointer,
    pub(super) tokens: Pointer,
    pub(super) columns: u32,
    pub(super) table_stride: u32,
    pub(super) out_stride: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct SelectParams {
    pub(super) out: Pointer,
    pub(super) x: Pointer,
    pub(super) sampled: Pointer,
    pub(super) columns: u32,
    pub(super) stride: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RmsnormParams {
    pub(super) out: Pointer,
    pub(super) x: Pointer,
    pub(super) weight: Pointer,
    pub(super) columns: u32,
    pub(super) out_stride: u32,
    pub(super) x_stride: u32,
    pub(super) eps: f32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct GemmParams {
    pub(super) x: Pointer,
    pub(super) weight: Pointer,
    pub(super) bias: Pointer,
    pub(super) out: Pointer,
    pub(super) rows: u32,
    pub(super) columns: u32,
    pub(super) depth: u32,
    pub(super) out_stride: u32,
    pub(super) chunk: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct GatedParams {
    pub(super) gemm: GemmParams,
    pub(super) out_columns: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct HeadsParams {
    pub(super) projected: Pointer,
    pub(super) queries: Pointer,
    pub(super) cache: Pointer,
    pub(super) cosines: Pointer,
    pub(super) sines: Pointer,
    pub(super) query_norm: Pointer,
    pub(super) key_norm: Pointer,
    pub(super) places: Places,
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) dim: u32,
    pub(super) query_stride: u32,
    pub(super) eps: f32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct AttentionParams {
    pub(super) queries: Pointer,
    pub(super) out: Pointer,
    pub(super) cache: Pointer,
    pub(super) places: Places,
    pub(super) items: Pointer,
    pub(super) partials: Pointer,
    pub(super) arrived: Pointer,
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) dim: u32,
    pub(super) stride: u32,
    pub(super) scale: f32,
    pub(super) window: u32,
    pub(super) depth: u32,
    pub(super) sequences: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct BestPartsParams {
    pub(super) out: Pointer,
    pub(super) logits: Pointer,
    pub(super) columns: u32,
    pub(super) parts: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct BestTokensParams {
    pub(super) out: Pointer,
    pub(super) parts: Pointer,
    pub(super) count: u32,
}

/// A random number for a row of logits.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Draw {
    pub(super) uniform: f64,
    pub(super) scale: f32,
    pub(super) row: u32,
}

/// Most rows that one launch draws for.
pub(super) const DRAWS: usize = 128;

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct DrawParams {
    pub(super) best: Pointer,
    pub(super) sums: Pointer,
    pub(super) logits: Pointer,
    pub(super) columns: u32,
    pub(super) chunks: u32,
    pub(super) draws: [Draw; DRAWS],
}
