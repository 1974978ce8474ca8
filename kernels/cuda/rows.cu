// Operations that touch each row of activations once: embedding, RMS norm, selection of sampled rows.
//
// One block per row. Bytes decide: a row of n columns is read once and written once (6n bytes for the norm, f32 in and bf16 out).
#include "ptx.cuh"

constexpr u32 ROW_THREADS = 256;

struct EmbedParams {
  float *out;        // [rows, out_stride]
  const u16 *table;  // [vocab, table_stride]
  const u32 *tokens; // [rows]
  u32 columns, table_stride, out_stride;
};

KERNEL(ROW_THREADS) embed(EmbedParams p) {
  begin_next();
  after_previous();
  const u64 row = block_x();
  const u16 *from = p.table + (u64)p.tokens[row] * p.table_stride;
  for (u32 i = thread_index(); i < p.columns; i += ROW_THREADS) p.out[row * p.out_stride + i] = from_bf16(from[i]);
}

struct SelectParams {
  float *out;         // [sampled, stride]
  const float *x;     // [rows, stride]
  const u32 *sampled; // [sampled]
  u32 columns, stride;
};

KERNEL(ROW_THREADS) select_rows(SelectParams p) {
  begin_next();
  after_previous();
  const u64 row = block_x(), from = p.sampled[row];
  for (u32 i = thread_index(); i < p.columns; i += ROW_THREADS) p.out[row * p.stride + i] = p.x[from * p.stride + i];
}

struct RmsnormParams {
  u16 *out;            // [rows, out_stride] bf16
  const float *x;      // [rows, x_stride]
  const float *weight; // [columns]
  u32 columns, out_stride, x_stride;
  float eps;
};

struct RmsnormShared {
  float sums[ROW_THREADS / 32];
};

// out = x / sqrt(mean(x²) + eps) · weight. The sum's order depends on the number of columns alone.
KERNEL(ROW_THREADS) rmsnorm(RmsnormParams p) {
  SHARED(RmsnormShared, shared);
  begin_next();
  after_previous();
  const u64 row = block_x();
  const float *x = p.x + row * p.x_stride;
  float sum = 0;
  for (u32 i = thread_index(); i < p.columns; i += ROW_THREADS) sum += x[i] * x[i];
  sum = warp_sum(sum);
  if (thread_index() % 32 == 0) shared.sums[thread_index() / 32] = sum;
#ifndef PLANT_RMSNORM_BARRIER
  block_barrier();
#endif
  float total = 0;
#pragma unroll
  for (u32 warp = 0; warp < ROW_THREADS / 32; warp++) total += shared.sums[warp];
  const float inverse = 1.0f / sqrtf(total / (float)p.columns + p.eps);
  for (u32 i = thread_index(); i < p.columns; i += ROW_THREADS)
    p.out[row * p.out_stride + i] = to_bf16(x[i] * inverse * p.weight[i]);
}
