// Products of activations with a weight, bf16 operands and f32 sums: out[m][n] = Σ_k x[m][k] · w[n][k]. What the tiles of `gemm.cu` and
// `wgmma.cu` share: parameters, the way into shared memory, and what is done with sums.
//
// One order for every output of a weight, whatever the number of rows, the row's place in its tile and the tile's shape: a single chain of
// matrix instructions 16 deep, from k = 0 up; or, for a deep weight of few rows, a chain for each of at most CHUNKS chunks of k, whose sums are
// added in ascending order, so that several warps share an output. So a token's bits do not depend on the batch. On an H100 the instructions of a
// warp and those of four warps give the same bits, so tiles of both kinds serve one pool.
//
// Blocks along x share rows of the weight and follow each other, so that a weight is read from memory once. Rows of both operands are padded
// with zeros to a multiple of DEPTH.
#pragma once
#include "ptx.cuh"

constexpr u32 DEPTH = 64;
// Sixteen-byte pieces of a row in shared memory.
constexpr u32 PIECES = DEPTH / 8;
// Most chunks of a weight's depth.
constexpr u32 CHUNKS = 4;

struct GemmParams {
  const u16 *x;      // [rows, depth] bf16
  const u16 *weight; // [columns, depth] bf16
  const float *bias; // [columns], or null
  void *out;         // [rows, out_stride], f32 or bf16
  u32 rows, columns, depth, out_stride;
  u32 chunk; // depth of a chunk, a multiple of DEPTH; kernels of one chain do not read it
};

// Place of piece `piece` of a row: eight neighbouring rows have it in different banks.
DEVICE u32 place(u32 row, u32 piece) { return row * PIECES + (piece ^ (row % 8)); }

// Begins to copy `COUNT` rows of DEPTH values from row `first` and depth `k` on. Places of rows from `rows` on stay as they are: rows do
// not mix in a product, and nobody writes theirs. `thread` is this thread's number among THREADS.
template <u32 COUNT, u32 THREADS>
DEVICE void load_rows(u32 thread, Quad *to, const u16 *from, u32 first, u32 rows, u32 depth, u32 k) {
#pragma unroll
  for (u32 i = 0; i < (COUNT * PIECES + THREADS - 1) / THREADS; i++) {
    const u32 index = i * THREADS + thread, row = index / PIECES, piece = index % PIECES;
    if (COUNT * PIECES % THREADS != 0 && row >= COUNT) break;
    if (first + row < rows) copy_async(to + place(row, piece), from + (u64)(first + row) * depth + k + piece * 8, true);
  }
}

template <u32 COUNT, u32 THREADS>
DEVICE void load_rows(Quad *to, const u16 *from, u32 first, u32 rows, u32 depth, u32 k) {
  load_rows<COUNT, THREADS>(thread_index(), to, from, first, rows, depth, k);
}

// Calls `write(token, row n of the weight, first, second)` for every value of the tile: `first` is row n, `second` row n + 8. `first_n` and
// `first_m` are those of the warp's first fragment.
template <u32 BLOCKS_N, u32 BLOCKS_M, class Write>
DEVICE void each_pair(const float (&c)[BLOCKS_N][BLOCKS_M][4], const GemmParams &p, u32 first_n, u32 first_m, Write write) {
  const u32 lane = thread_index() % 32;
#pragma unroll
  for (u32 i = 0; i < BLOCKS_N; i++)
#pragma unroll
    for (u32 j = 0; j < BLOCKS_M; j++)
#pragma unroll
      for (u32 column = 0; column < 2; column++) {
#ifdef PLANT_GEMM_COLUMNS
        const u32 token = first_m + j * 8 + lane % 4 * 2 + 1 - column;
#else
        const u32 token = first_m + j * 8 + lane % 4 * 2 + column;
#endif
        if (token < p.rows) write(token, first_n + i * 16 + lane / 4, c[i][j][column], c[i][j][column + 2]);
      }
}

// Adds the sums of a chunk to those before it, and clears them.
template <u32 BLOCKS_N, u32 BLOCKS_M>
DEVICE void close_chunk(float (&total)[BLOCKS_N][BLOCKS_M][4], float (&c)[BLOCKS_N][BLOCKS_M][4]) {
#pragma unroll
  for (u32 i = 0; i < BLOCKS_N; i++)
#pragma unroll
    for (u32 j = 0; j < BLOCKS_M; j++)
#pragma unroll
      for (u32 v = 0; v < 4; v++) total[i][j][v] += c[i][j][v], c[i][j][v] = 0;
}

DEVICE float bias_of(const GemmParams &p, u32 n) { return p.bias ? p.bias[n] : 0.0f; }

// out = x·Wᵀ + bias, f32: projections that another kernel finishes, and logits.
struct Store {
  typedef GemmParams Params;
  DEVICE const GemmParams &gemm(const Params &p) { return p; }
  DEVICE void write(const Params &p, u32 token, u32 n, float first, float second) {
    float *out = (float *)p.out + (u64)token * p.out_stride;
    if (n < p.columns) out[n] = first + bias_of(p, n);
    if (n + 8 < p.columns) out[n + 8] = second + bias_of(p, n + 8);
  }
};

// out += x·Wᵀ + bias, f32: the residual stream.
struct Add {
  typedef GemmParams Params;
  DEVICE const GemmParams &gemm(const Params &p) { return p; }
  DEVICE void write(const Params &p, u32 token, u32 n, float first, float second) {
    float *out = (float *)p.out + (u64)token * p.out_stride;
    if (n < p.columns) out[n] += first + bias_of(p, n);
    if (n + 8 < p.columns) out[n + 8] += second + bias_of(p, n + 8);
  }
};

// Ends a tile whose results are f32, stored or added to what is there, in whole rows of the tile: T says its shape (N, M), how many threads have sums
// (WORKERS), and how far apart the sums of a token are in `staged` (PITCH). What was in that memory is read no more.
template <class T, bool ADDS>
DEVICE void end_rows(const float (&c)[1][T::M / 8][4], float *staged, const GemmParams &p, u32 first_n, u32 first_m) {
  each_pair(c, p, first_n + thread_index() / 32 * 16, first_m, [&](u32 token, u32 n, float first, float second) {
    float *to = &staged[(token - first_m) * T::PITCH + n - first_n];
    to[0] = first, to[8] = second;
  });
  block_barrier();
  // Four weights of a thread; tokens by turns, several at once so that what is there is read ahead.
  constexpr u32 LANES = T::N / 4, APART = T::WORKERS / LANES, BATCH = 8;
  static_assert(T::WORKERS % LANES == 0 && T::M % (APART * BATCH) == 0, "batches are whole");
  const u32 at = thread_index() % LANES * 4, n = first_n + at;
  const bool is_whole = n + 4 <= p.columns && p.out_stride % 4 == 0 && (u64)p.out % 16 == 0;
  float bias[4];
#pragma unroll
  for (u32 i = 0; i < 4; i++) bias[i] = n + i < p.columns ? bias_of(p, n + i) : 0.0f;
  for (u32 first = thread_index() / LANES; first < T::M && first_m + first < p.rows; first += APART * BATCH) {
    float *const out = (float *)p.out + (u64)(first_m + first) * p.out_stride + n;
    const u64 apart = (u64)APART * p.out_stride;
    Four old[BATCH];
    if (ADDS && is_whole) {
#pragma unroll
      for (u32 b = 0; b < BATCH; b++)
        if (first_m + first + b * APART < p.rows) old[b] = *(const Four *)(out + b * apart);
    }
#pragma unroll
    for (u32 b = 0; b < BATCH; b++) {
      if (first_m + first + b * APART >= p.rows) break;
      Four sums = *(const Four *)&staged[(first + b * APART) * T::PITCH + at];
      float *const to = out + b * apart;
#pragma unroll
      for (u32 i = 0; i < 4; i++) sums.v[i] += bias[i];
      if (is_whole) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) sums.v[i] = ADDS ? old[b].v[i] + sums.v[i] : sums.v[i];
        *(Four *)to = sums;
        continue;
      }
#pragma unroll
      for (u32 i = 0; i < 4; i++)
        if (n + i < p.columns) to[i] = ADDS ? to[i] + sums.v[i] : sums.v[i];
    }
  }
}

// out = silu(gate) · up, bf16. Rows of gate and up alternate in groups of eight, so one thread holds both values of an output.
// `columns` counts the rows of the weight, gate and up together; groups are whole, and outputs beyond `out_columns` are padding.
struct GatedParams {
  GemmParams gemm;
  u32 out_columns;
};

struct Silu {
  typedef GatedParams Params;
  DEVICE const GemmParams &gemm(const Params &p) { return p.gemm; }
  DEVICE u16 value(const Params &p, u32 n, float first, float second) {
    const float gate = first + bias_of(p.gemm, n), up = second + bias_of(p.gemm, n + 8);
    return to_bf16(gate / (1.0f + exp_fast(-gate)) * up);
  }
  DEVICE void write(const Params &p, u32 token, u32 n, float first, float second) {
    const u32 column = n / 16 * 8 + n % 8;
    if (column < p.out_columns) ((u16 *)p.gemm.out)[(u64)token * p.gemm.out_stride + column] = value(p, n, first, second);
  }
};
