// Products of activations with a weight, bf16 operands and f32 sums: out[m][n] = Σ_k x[m][k] · w[n][k].
//
// Weights are the 16 rows of the instruction and tokens its 8 columns, so that a step of one token wastes seven columns of eight and not
// fifteen. A block makes 64 weights × 32 tokens, a warp 16 × 32. Both operands pass through shared memory, 64 deep at a time.
//
// One order for every output: a single chain of steps 16 deep, from k = 0 up, whatever the number of rows and the row's place in its
// tile. So a token's bits do not depend on the batch. Rows of both operands are padded with zeros to a multiple of DEPTH.
//
// First version: correct, and simple to read. It moves each weight once per 32 tokens, waits for each tile before it computes, and
// reads fragments word by word.
#include "ptx.cuh"

constexpr u32 GEMM_THREADS = 128, TILE_N = 64, TILE_M = 32, DEPTH = 64;
// Words of a row in shared memory: 32 of data, and 4 so that eight rows begin in eight different groups of banks.
constexpr u32 ROW_WORDS = DEPTH / 2 + 4;

struct GemmParams {
  const u16 *x;      // [rows, depth] bf16
  const u16 *weight; // [columns, depth] bf16
  const float *bias; // [columns], or null
  void *out;         // [rows, out_stride], f32 or bf16
  u32 rows, columns, depth, out_stride;
};

// Aligned for stores of sixteen bytes; rows are multiples of that.
struct alignas(16) GemmShared {
  u32 weight[TILE_N * ROW_WORDS];
  u32 x[TILE_M * ROW_WORDS];
};

// Copies `count` rows of DEPTH values from row `first` and depth `k` on; rows from `rows` on become zeros.
template <u32 COUNT>
DEVICE void load_tile(u32 *to, const u16 *from, u32 first, u32 rows, u32 depth, u32 k) {
#pragma unroll
  for (u32 i = 0; i < COUNT * 8 / GEMM_THREADS; i++) {
    const u32 piece = i * GEMM_THREADS + thread_index(), row = piece / 8, word = piece % 8 * 4;
    Quad quad = {};
    if (first + row < rows) quad = *(const Quad *)(from + (u64)(first + row) * depth + k + word * 2);
    *(Quad *)(to + row * ROW_WORDS + word) = quad;
  }
}

// Accumulates the block's tile: c[t] holds the fragment of tokens 8t..8t+8.
DEVICE void product(float (&c)[TILE_M / 8][4], GemmShared &shared, const GemmParams &p) {
  const u32 lane = thread_index() % 32, warp = thread_index() / 32, g = lane / 4, t = lane % 4;
  const u32 first_n = block_x() * TILE_N, first_m = block_y() * TILE_M;
  const u32 *w = shared.weight + (warp * 16 + g) * ROW_WORDS + t, *x = shared.x + g * ROW_WORDS + t;
  for (u32 k = 0; k < p.depth; k += DEPTH) {
    load_tile<TILE_N>(shared.weight, p.weight, first_n, p.columns, p.depth, k);
    load_tile<TILE_M>(shared.x, p.x, first_m, p.rows, p.depth, k);
    block_barrier();
#pragma unroll
    for (u32 word = 0; word < DEPTH / 2; word += 8) {
      const u32 a[4] = {w[word], w[word + 8 * ROW_WORDS], w[word + 4], w[word + 4 + 8 * ROW_WORDS]};
#pragma unroll
      for (u32 tile = 0; tile < TILE_M / 8; tile++) {
        if (first_m + tile * 8 >= p.rows) break;
        const u32 *column = x + tile * 8 * ROW_WORDS + word;
        const u32 b[2] = {column[0], column[4]};
        mma_bf16(c[tile], a, b);
      }
    }
#ifndef PLANT_GEMM_BARRIER
    block_barrier();
#endif
  }
}

// Calls `write(token, row of the weight's half, first, second)` for every value of the tile: `first` is row n, `second` row n + 8.
template <class Write>
DEVICE void each_pair(const float (&c)[TILE_M / 8][4], const GemmParams &p, Write write) {
  const u32 lane = thread_index() % 32, warp = thread_index() / 32;
  const u32 n = block_x() * TILE_N + warp * 16 + lane / 4;
#pragma unroll
  for (u32 tile = 0; tile < TILE_M / 8; tile++) {
#pragma unroll
    for (u32 column = 0; column < 2; column++) {
#ifdef PLANT_GEMM_COLUMNS
      const u32 token = block_y() * TILE_M + tile * 8 + lane % 4 * 2 + 1 - column;
#else
      const u32 token = block_y() * TILE_M + tile * 8 + lane % 4 * 2 + column;
#endif
      if (token < p.rows) write(token, n, c[tile][column], c[tile][column + 2]);
    }
  }
}

DEVICE float bias_of(const GemmParams &p, u32 n) { return p.bias ? p.bias[n] : 0.0f; }

// out = x·Wᵀ + bias, f32: projections that another kernel finishes, and logits.
KERNEL(GEMM_THREADS) gemm_store(GemmParams p) {
  SHARED(GemmShared, shared);
  float c[TILE_M / 8][4] = {};
  product(c, shared, p);
  each_pair(c, p, [&](u32 token, u32 n, float first, float second) {
    float *out = (float *)p.out + (u64)token * p.out_stride;
    if (n < p.columns) out[n] = first + bias_of(p, n);
    if (n + 8 < p.columns) out[n + 8] = second + bias_of(p, n + 8);
  });
}

// out += x·Wᵀ + bias, f32: the residual stream.
KERNEL(GEMM_THREADS) gemm_add(GemmParams p) {
  SHARED(GemmShared, shared);
  float c[TILE_M / 8][4] = {};
  product(c, shared, p);
  each_pair(c, p, [&](u32 token, u32 n, float first, float second) {
    float *out = (float *)p.out + (u64)token * p.out_stride;
    if (n < p.columns) out[n] += first + bias_of(p, n);
    if (n + 8 < p.columns) out[n + 8] += second + bias_of(p, n + 8);
  });
}

// out = silu(gate) · up, bf16. Rows of gate and up alternate in groups of eight, so one thread holds both values of an output.
// `columns` counts the rows of the weight, gate and up together; groups are whole, and outputs beyond `out_columns` are padding.
struct GatedParams {
  GemmParams gemm;
  u32 out_columns;
};

KERNEL(GEMM_THREADS) gemm_silu(GatedParams p) {
  SHARED(GemmShared, shared);
  float c[TILE_M / 8][4] = {};
  product(c, shared, p.gemm);
  each_pair(c, p.gemm, [&](u32 token, u32 n, float first, float second) {
    const u32 column = n / 16 * 8 + n % 8;
    if (column >= p.out_columns) return;
    const float gate = first + bias_of(p.gemm, n), up = second + bias_of(p.gemm, n + 8);
    ((u16 *)p.gemm.out)[(u64)token * p.gemm.out_stride + column] = to_bf16(gate / (1.0f + exp_fast(-gate)) * up);
  });
}
