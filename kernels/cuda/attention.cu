// Head norms, rotation and KV write; causal attention over the paged cache.
//
// The cache of one layer is [page][K|V][kv_head][token][dim] in bf16: one page of one layer is contiguous.
#include "ptx.cuh"

constexpr u32 HEAD_THREADS = 128, WARPS = HEAD_THREADS / 32, DIM_MAX = 256;

// Place of each row in its sequence's pages: arrays over rows, and the block tables one after the other.
struct Places {
  const u32 *positions; // [rows]
  const u32 *table_at;  // [rows], first entry of the row's block table in `tables`
  const u32 *tables;    // page ids
};

DEVICE u64 page_values(u32 kv_heads, u32 dim) { return 2ull * kv_heads * PAGE * dim; }

struct HeadsParams {
  const float *projected; // [rows, (heads + 2·kv_heads) · dim]
  u16 *queries;           // [rows, query_stride] bf16
  u16 *cache;             // the layer's cache
  const float *cosines;   // [positions, dim / 2]
  const float *sines;
  const float *query_norm; // [dim], or null
  const float *key_norm;
  Places places;
  u32 heads, kv_heads, dim, query_stride;
  float eps;
};

// One warp per row and head: RMS norm over the head, rotation of its two halves, and the write to queries or cache. Values are copied.
KERNEL(HEAD_THREADS) finish_heads(HeadsParams p) {
  const u32 lane = thread_index() % 32, head = block_y() * WARPS + thread_index() / 32, half = p.dim / 2;
  const u64 row = block_x();
  const u32 total = p.heads + 2 * p.kv_heads;
  if (head >= total) return;
  const u32 position = p.places.positions[row];
  const float *x = p.projected + (row * total + head) * p.dim;
  const bool is_query = head < p.heads, is_value = head >= p.heads + p.kv_heads;
  u16 *out;
  if (is_query) {
    out = p.queries + row * p.query_stride + head * p.dim;
  } else {
    const u64 page = p.places.tables[p.places.table_at[row] + position / PAGE];
    // Head of the page: keys come first, then values.
    out = p.cache + page * page_values(p.kv_heads, p.dim) + ((u64)(head - p.heads) * PAGE + position % PAGE) * p.dim;
  }
  if (is_value) {
    for (u32 i = lane; i < p.dim; i += 32) out[i] = to_bf16(x[i]);
    return;
  }
  const float *norm = is_query ? p.query_norm : p.key_norm;
  float inverse = 1.0f;
  if (norm) {
    float sum = 0;
    for (u32 i = lane; i < p.dim; i += 32) sum += x[i] * x[i];
    inverse = 1.0f / sqrtf(warp_sum(sum) / (float)p.dim + p.eps);
  }
  for (u32 i = lane; i < half; i += 32) {
    const float a = norm ? x[i] * inverse * norm[i] : x[i], b = norm ? x[i + half] * inverse * norm[i + half] : x[i + half];
    const float cosine = p.cosines[(u64)position * half + i], sine = p.sines[(u64)position * half + i];
    out[i] = to_bf16(a * cosine - b * sine);
#ifdef PLANT_ROPE_SIGN
    out[i + half] = to_bf16(b * cosine - a * sine);
#else
    out[i + half] = to_bf16(b * cosine + a * sine);
#endif
  }
}

struct AttentionParams {
  const u16 *queries; // [rows, stride] bf16
  u16 *out;           // [rows, stride] bf16
  const u16 *cache;   // the layer's cache
  Places places;
  u32 heads, kv_heads, dim, stride;
  float scale;
  u32 window; // last positions that a row sees, itself included; 0: all
};

// Tokens of one split; splits begin at multiples of it, whatever the context.
constexpr u32 SPLIT = 256;

struct AttentionShared {
  float query[DIM_MAX];
  float highest[WARPS], total[WARPS];
  float values[WARPS][DIM_MAX];
};

// One block per row and query head. Warps take splits of 256 tokens at absolute positions, four at a time; partial results are merged in
// ascending order. So the bits of a row depend on its position and its window, and on nothing else in the step. A split goes through its
// pages in order: a lane computes the score of one token, then all lanes add the page's values.
//
// First version: K and V are read once per query head and not once per group of heads, and a score is one lane's dot product.
KERNEL(HEAD_THREADS) attention(AttentionParams p) {
  SHARED(AttentionShared, shared);
  const u32 lane = thread_index() % 32, warp = thread_index() / 32, head = block_y();
  const u64 row = block_x();
  const u32 position = p.places.positions[row], end = position + 1;
  const u32 first = p.window && end > p.window ? end - p.window : 0;
  const u32 *table = p.places.tables + p.places.table_at[row];
  const u32 kv_head = head / (p.heads / p.kv_heads);
  const u16 *keys = p.cache + (u64)kv_head * PAGE * p.dim, *values = keys + (u64)p.kv_heads * PAGE * p.dim;
  const u16 *query = p.queries + row * p.stride + head * p.dim;
  for (u32 i = thread_index(); i < p.dim; i += HEAD_THREADS) shared.query[i] = from_bf16(query[i]);
  block_barrier();

  float highest = -INFINITE, total = 0, sums[DIM_MAX / HEAD_THREADS] = {};
  for (u32 group = first / (SPLIT * WARPS); group * SPLIT * WARPS < end; group++) {
    float m = -INFINITE, l = 0, acc[DIM_MAX / 32] = {};
    const u32 split = (group * WARPS + warp) * SPLIT;
    const u32 begin = split < first ? first / PAGE * PAGE : split, stop = split + SPLIT < end ? split + SPLIT : end;
    for (u32 at = begin; at < stop; at += PAGE) {
      const u64 page = table[at / PAGE] * page_values(p.kv_heads, p.dim);
      const u32 token = at + lane;
#ifdef PLANT_ATTENTION_MASK
      const bool is_seen = token <= stop;
#else
      const bool is_seen = token >= first && token < stop;
#endif
      float score = -INFINITE;
      if (is_seen) {
        const u32 *key = (const u32 *)(keys + page + (u64)lane * p.dim);
        float dot = 0;
        for (u32 i = 0; i < p.dim / 2; i++) {
          const u32 pair = key[i];
          dot += shared.query[2 * i] * bits_to_float(pair << 16);
          dot += shared.query[2 * i + 1] * bits_to_float(pair & 0xffff0000u);
        }
        score = dot * p.scale;
      }
      const float peak = fmaxf(m, warp_max(score)), shrink = exp_fast(m - peak);
      const float weight = is_seen ? exp_fast(score - peak) : 0.0f;
      l = l * shrink + warp_sum(weight);
      m = peak;
#pragma unroll
      for (u32 i = 0; i < DIM_MAX / 32; i++) acc[i] *= shrink;
      // Slots outside of the row's sight may hold anything, also NaN: they are not read.
      const u32 from = at < first ? first - at : 0, to = stop - at < PAGE ? stop - at : PAGE;
      for (u32 slot = from; slot < to; slot++) {
        const float share = lane_value(weight, slot);
        const u16 *value = values + page + (u64)slot * p.dim;
#pragma unroll
        for (u32 i = 0; i < DIM_MAX / 32; i++)
          if (lane + 32 * i < p.dim) acc[i] += share * from_bf16(value[lane + 32 * i]);
      }
    }
    if (lane == 0) shared.highest[warp] = m, shared.total[warp] = l;
#pragma unroll
    for (u32 i = 0; i < DIM_MAX / 32; i++) shared.values[warp][lane + 32 * i] = acc[i];
    block_barrier();
    for (u32 part = 0; part < WARPS; part++) {
      // A split outside of the row's sight has no total.
      if (shared.total[part] == 0.0f) continue;
      const float peak = fmaxf(highest, shared.highest[part]);
      const float before = exp_fast(highest - peak), added = exp_fast(shared.highest[part] - peak);
      total = total * before + shared.total[part] * added;
#pragma unroll
      for (u32 i = 0; i < DIM_MAX / HEAD_THREADS; i++)
        sums[i] = sums[i] * before + shared.values[part][thread_index() + HEAD_THREADS * i] * added;
      highest = peak;
    }
    block_barrier();
  }
  u16 *out = p.out + row * p.stride + head * p.dim;
#pragma unroll
  for (u32 i = 0; i < DIM_MAX / HEAD_THREADS; i++) {
    const u32 column = thread_index() + HEAD_THREADS * i;
    if (column < p.dim) out[column] = to_bf16(sums[i] / total);
  }
}
