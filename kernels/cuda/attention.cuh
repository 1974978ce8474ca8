// What the kernels of attention share: parameters, places in the cache, and the arithmetic by which they agree to the bit.
#pragma once
#include "ptx.cuh"

// Place of each row in its sequence's pages: arrays over rows, and the block tables one after the other.
struct Places {
  const u32 *positions; // [rows]
  const u32 *table_at;  // [rows], first entry of the row's block table in `tables`
  const u32 *tables;    // page ids
};

DEVICE u64 page_values(u32 kv_heads, u32 dim) { return 2ull * kv_heads * PAGE * dim; }

struct AttentionParams {
  const u16 *queries; // [rows, stride] bf16
  u16 *out;           // [rows, stride] bf16
  const u16 *cache;   // the layer's cache
  Places places;
  const u32 *items; // what blocks along x do: rows (decode), or first rows and numbers of rows (prefill)
  Four *partials;   // decode by several blocks for a row: results of single splits
  u32 *arrived;     // [blocks along x and y] blocks along z that have ended; 0 before and after a launch
  u32 heads, kv_heads, dim, stride;
  float scale;
  u32 window; // last positions that a row sees, itself included; 0: all
  u32 depth;     // blocks along z, or most tiles of a sequence
  u32 sequences; // in `items`, where blocks share all tiles
};

// Tokens of one split; splits begin at multiples of it, whatever the context. Within a split pages are added in ascending order, each with
// one step of a running softmax; splits are merged in ascending order. So the bits of a row depend on its position and its window, and
// on nothing else in the step, and the kernels agree on them: they add a page as `add_page` does, and merge by `merge`.
constexpr u32 SPLIT = 128;

// Scores are multiplied by scale · log2(e), so that 2^x gives weights.
constexpr float LOG2_E = 1.4426950408889634f;

// Lanes of four hold a row of a fragment: largest value and sum among them.
DEVICE float quad_max(float value) { return value = fmaxf(value, lane_xor(value, 1)), fmaxf(value, lane_xor(value, 2)); }
DEVICE float quad_sum(float value) { return value += lane_xor(value, 1), value + lane_xor(value, 2); }

// Merges the result of a split into what came before it: factors of the two.
struct Merge {
  float before, added;
};
DEVICE Merge merge(float &highest, float &total, float split_highest, float split_total) {
  // A split outside of the row's sight has no total.
  if (split_total == 0.0f) return {1.0f, 0.0f};
  const float peak = fmaxf(highest, split_highest);
  const Merge m = {exp2_fast(highest - peak), exp2_fast(split_highest - peak)};
  total = mul_add(total, m.before, mul(split_total, m.added));
  highest = peak;
  return m;
}

// Query rows of a block: heads of one KV head, at most sixteen at a time, of one token (decode) or of several (prefill).
constexpr u32 ROWS = 16;
