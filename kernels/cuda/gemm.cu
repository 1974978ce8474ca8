// Products by the matrix instructions of a warp, on every architecture: for few tokens, and for many where there is nothing faster.
//
// Weights are the 16 rows of an instruction and tokens its 8 columns, so that a step of one token wastes seven columns of eight and not
// fifteen. Tiles of both operands go through shared memory, DEPTH deep, several of them under way while one is multiplied.
#include "gemm.cuh"

// Shape of a tile: warps over weights and tokens, instructions of a warp over both, and tiles of K in shared memory.
template <u32 WARPS_N_, u32 WARPS_M_, u32 BLOCKS_N_, u32 BLOCKS_M_, u32 STAGES_>
struct Tile {
  static constexpr u32 WARPS_N = WARPS_N_, WARPS_M = WARPS_M_, BLOCKS_N = BLOCKS_N_, BLOCKS_M = BLOCKS_M_, STAGES = STAGES_;
  static constexpr u32 THREADS = 32 * WARPS_N * WARPS_M, N = WARPS_N * BLOCKS_N * 16, M = WARPS_M * BLOCKS_M * 8;
  struct Stage {
    Quad weight[N * PIECES], x[M * PIECES];
  };
  struct Shared {
    Stage stages[STAGES];
  };
};

// Up to 8 tokens: weights decide, which pass through once. Thin, so that a small weight has blocks for every multiprocessor; tall for large ones.
typedef Tile<1, 1, 1, 1, 10> Tile8;
typedef Tile<4, 1, 1, 1, 8> Tile8Tall;
// Some tokens, and many.
typedef Tile<2, 2, 1, 4, 8> Tile64;
typedef Tile<2, 4, 4, 4, 3> Tile128;

// Sums of a warp: c[i][j] holds the fragment of weights 16i..16i+16 and tokens 8j..8j+8.
template <class T>
using Sums = float[T::BLOCKS_N][T::BLOCKS_M][4];

template <class T>
DEVICE void multiply(Sums<T> &c, const Quad *weight, const Quad *tokens) {
  const u32 lane = thread_index() % 32;
// One half after the other where sums fill the registers.
#pragma unroll(T::BLOCKS_N * T::BLOCKS_M < 16 ? 2 : 1)
  for (u32 half = 0; half < 2; half++) {
    u32 x[T::BLOCKS_M][4];
#pragma unroll
    for (u32 j = 0; j < T::BLOCKS_M; j++) load_matrices(x[j], &tokens[place(j * 8 + lane % 8, half * 4 + lane / 8)]);
#pragma unroll
    for (u32 i = 0; i < T::BLOCKS_N; i++)
#pragma unroll
      for (u32 step = 0; step < 2; step++) {
        u32 a[4];
        load_matrices(a, &weight[place(i * 16 + lane % 16, half * 4 + step * 2 + lane / 16)]);
#pragma unroll
        for (u32 j = 0; j < T::BLOCKS_M; j++) {
          const u32 b[2] = {x[j][2 * step], x[j][2 * step + 1]};
          mma_bf16(c[i][j], a, b);
        }
      }
  }
}

// Computes the block's tile, as one chain or in chunks.
template <class T, bool CHUNKED>
DEVICE void product(Sums<T> &total, typename T::Shared &shared, const GemmParams &p) {
  const u32 first_n = block_y() * T::N, first_m = block_x() * T::M, warp = thread_index() / 32;
  const u32 own_n = warp % T::WARPS_N * T::BLOCKS_N * 16, own_m = warp / T::WARPS_N * T::BLOCKS_M * 8;
  auto load_weight = [&](u32 step) { load_rows<T::N, T::THREADS>(shared.stages[step % T::STAGES].weight, p.weight, first_n, p.columns, p.depth, step * DEPTH); };
  auto load_x = [&](u32 step) { load_rows<T::M, T::THREADS>(shared.stages[step % T::STAGES].x, p.x, first_m, p.rows, p.depth, step * DEPTH); };
#pragma unroll
  for (u32 step = 0; step < T::STAGES - 1; step++)
    if (step * DEPTH < p.depth) load_weight(step);
  after_previous();
#pragma unroll
  for (u32 step = 0; step < T::STAGES - 1; step++) {
    if (step * DEPTH < p.depth) load_x(step);
    commit_copies();
  }
  Sums<T> c = {};
  for (u32 step = 0; step * DEPTH < p.depth; step++) {
    wait_copies<T::STAGES - 2>();
#ifndef PLANT_GEMM_BARRIER
    block_barrier();
#endif
    const u32 next = step + T::STAGES - 1;
    if (next * DEPTH < p.depth) load_weight(next), load_x(next);
    commit_copies();
    const typename T::Stage &stage = shared.stages[step % T::STAGES];
    // Eight rows have one way of placing pieces, so that tiles begin at any of them.
    multiply<T>(CHUNKED ? c : total, &stage.weight[own_n * PIECES], &stage.x[own_m * PIECES]);
    if (CHUNKED && ((step + 1) * DEPTH % p.chunk == 0 || (step + 1) * DEPTH >= p.depth)) close_chunk(total, c);
  }
}

// Computes the block's tile, and ends it.
template <class T, class End, bool CHUNKED = false>
DEVICE void run(typename T::Shared &shared, const typename End::Params &p) {
  begin_next();
  const GemmParams &gemm = End::gemm(p);
  Sums<T> c = {};
  product<T, CHUNKED>(c, shared, gemm);
  const u32 warp = thread_index() / 32;
  const u32 first_n = block_y() * T::N + warp % T::WARPS_N * T::BLOCKS_N * 16, first_m = block_x() * T::M + warp / T::WARPS_N * T::BLOCKS_M * 8;
  each_pair(c, gemm, first_n, first_m, [&](u32 token, u32 n, float first, float second) { End::write(p, token, n, first, second); });
}

// Shape of a tile whose warps take a chunk each: 16 weights, and some tokens. A warp has stages of its own and waits for no other.
template <u32 BLOCKS_M_, u32 STAGES_>
struct Chunks {
  static constexpr u32 BLOCKS_N = 1, BLOCKS_M = BLOCKS_M_, STAGES = STAGES_, N = 16, M = BLOCKS_M * 8, THREADS = 32 * CHUNKS;
  struct Stage {
    Quad weight[N * PIECES], x[M * PIECES];
  };
  struct Shared {
    Stage stages[CHUNKS][STAGES];
  };
};
typedef Chunks<1, 6> Chunks8;
typedef Chunks<4, 4> Chunks32;

// Computes the block's tile, and ends it.
template <class T, class End>
DEVICE void run_chunks(typename T::Shared &shared, const typename End::Params &p) {
  begin_next();
  const GemmParams &gemm = End::gemm(p);
  const u32 lane = thread_index() % 32, warp = thread_index() / 32, first_n = block_y() * T::N, first_m = block_x() * T::M;
  const u32 begin = warp * gemm.chunk, end = begin + gemm.chunk < gemm.depth ? begin + gemm.chunk : gemm.depth;
  typename T::Stage *stages = shared.stages[warp];
  auto load_weight = [&](u32 step) {
    load_rows<T::N, 32>(lane, stages[step % T::STAGES].weight, gemm.weight, first_n, gemm.columns, gemm.depth, begin + step * DEPTH);
  };
  auto load_x = [&](u32 step) { load_rows<T::M, 32>(lane, stages[step % T::STAGES].x, gemm.x, first_m, gemm.rows, gemm.depth, begin + step * DEPTH); };
#pragma unroll
  for (u32 step = 0; step < T::STAGES - 1; step++)
    if (begin + step * DEPTH < end) load_weight(step);
  after_previous();
#pragma unroll
  for (u32 step = 0; step < T::STAGES - 1; step++) {
    if (begin + step * DEPTH < end) load_x(step);
    commit_copies();
  }
  Sums<T> c = {};
  for (u32 step = 0; begin + step * DEPTH < end; step++) {
    wait_copies<T::STAGES - 2>();
    warp_barrier();
    const u32 next = step + T::STAGES - 1;
    if (begin + next * DEPTH < end) load_weight(next), load_x(next);
    commit_copies();
    multiply<T>(c, stages[step % T::STAGES].weight, stages[step % T::STAGES].x);
  }
  // Sums of a chunk take the place of the warp's stages, which nobody reads any more.
  static_assert(sizeof(Four) * T::BLOCKS_M * 32 <= sizeof(shared.stages[0]), "sums of a chunk fit into its stages");
  wait_copies<0>();
  warp_barrier();
  Four *own = (Four *)stages;
#pragma unroll
  for (u32 j = 0; j < T::BLOCKS_M; j++) own[j * 32 + lane] = {{c[0][j][0], c[0][j][1], c[0][j][2], c[0][j][3]}};
#ifndef PLANT_CHUNKS_BARRIER
  block_barrier();
#endif
  for (u32 j = warp; j < T::BLOCKS_M; j += CHUNKS) {
    float total[1][1][4] = {};
    for (u32 chunk = 0; chunk * gemm.chunk < gemm.depth; chunk++) {
      const Four sums = ((const Four *)shared.stages[chunk])[j * 32 + lane];
#pragma unroll
      for (u32 v = 0; v < 4; v++) total[0][0][v] += sums.v[v];
    }
    each_pair(total, gemm, first_n, first_m + j * 8, [&](u32 token, u32 n, float first, float second) { End::write(p, token, n, first, second); });
  }
}

KERNEL(Tile8::THREADS) gemm_store_8(GemmParams p) {
  SHARED_LARGE(Tile8::Shared, shared);
  run<Tile8, Store>(shared, p);
}

KERNEL(Tile8Tall::THREADS) gemm_store_8_tall(GemmParams p) {
  SHARED_LARGE(Tile8Tall::Shared, shared);
  run<Tile8Tall, Store>(shared, p);
}

KERNEL(Tile64::THREADS) gemm_store_64(GemmParams p) {
  SHARED_LARGE(Tile64::Shared, shared);
  run<Tile64, Store>(shared, p);
}

KERNEL(Tile128::THREADS) gemm_store_128(GemmParams p) {
  SHARED_LARGE(Tile128::Shared, shared);
  run<Tile128, Store>(shared, p);
}

KERNEL(Tile8::THREADS) gemm_add_8(GemmParams p) {
  SHARED_LARGE(Tile8::Shared, shared);
  run<Tile8, Add>(shared, p);
}

KERNEL(Tile8Tall::THREADS) gemm_add_8_tall(GemmParams p) {
  SHARED_LARGE(Tile8Tall::Shared, shared);
  run<Tile8Tall, Add>(shared, p);
}

KERNEL(Tile64::THREADS) gemm_add_64(GemmParams p) {
  SHARED_LARGE(Tile64::Shared, shared);
  run<Tile64, Add>(shared, p);
}

KERNEL(Tile128::THREADS) gemm_add_128(GemmParams p) {
  SHARED_LARGE(Tile128::Shared, shared);
  run<Tile128, Add>(shared, p);
}

KERNEL(Tile8::THREADS) gemm_silu_8(GatedParams p) {
  SHARED_LARGE(Tile8::Shared, shared);
  run<Tile8, Silu>(shared, p);
}

KERNEL(Tile8Tall::THREADS) gemm_silu_8_tall(GatedParams p) {
  SHARED_LARGE(Tile8Tall::Shared, shared);
  run<Tile8Tall, Silu>(shared, p);
}

KERNEL(Tile64::THREADS) gemm_silu_64(GatedParams p) {
  SHARED_LARGE(Tile64::Shared, shared);
  run<Tile64, Silu>(shared, p);
}

KERNEL(Tile128::THREADS) gemm_silu_128(GatedParams p) {
  SHARED_LARGE(Tile128::Shared, shared);
  run<Tile128, Silu>(shared, p);
}

KERNEL(Chunks8::THREADS) gemm_store_chunks_8(GemmParams p) {
  SHARED_LARGE(Chunks8::Shared, shared);
  run_chunks<Chunks8, Store>(shared, p);
}

KERNEL(Chunks32::THREADS) gemm_store_chunks_32(GemmParams p) {
  SHARED_LARGE(Chunks32::Shared, shared);
  run_chunks<Chunks32, Store>(shared, p);
}

KERNEL(Tile128::THREADS) gemm_store_chunks_128(GemmParams p) {
  SHARED_LARGE(Tile128::Shared, shared);
  run<Tile128, Store, true>(shared, p);
}

KERNEL(Chunks8::THREADS) gemm_add_chunks_8(GemmParams p) {
  SHARED_LARGE(Chunks8::Shared, shared);
  run_chunks<Chunks8, Add>(shared, p);
}

KERNEL(Chunks32::THREADS) gemm_add_chunks_32(GemmParams p) {
  SHARED_LARGE(Chunks32::Shared, shared);
  run_chunks<Chunks32, Add>(shared, p);
}

KERNEL(Tile128::THREADS) gemm_add_chunks_128(GemmParams p) {
  SHARED_LARGE(Tile128::Shared, shared);
  run<Tile128, Add, true>(shared, p);
}
