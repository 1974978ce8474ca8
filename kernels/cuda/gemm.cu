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
typedef Tile<1, 1, 1, 1, 12> Tile8;
typedef Tile<4, 1, 1, 1, 8> Tile8Tall;
// Some tokens, and many.
typedef Tile<2, 2, 1, 4, 8> Tile64;
typedef Tile<2, 4, 4, 4, 3> Tile128;

// Sums of a warp: c[i][j] holds the fragment of weights 16i..16i+16 and tokens 8j..8j+8.
template <class T>
using Sums = float[T::BLOCKS_N][T::BLOCKS_M][4];

template <class T>
DEVICE void multiply(Sums<T> &c, const typename T::Stage &stage) {
  const u32 lane = thread_index() % 32, warp = thread_index() / 32;
  const u32 first_n = warp % T::WARPS_N * T::BLOCKS_N * 16, first_m = warp / T::WARPS_N * T::BLOCKS_M * 8;
// One half after the other where sums fill the registers.
#pragma unroll(T::BLOCKS_N * T::BLOCKS_M < 16 ? 2 : 1)
  for (u32 half = 0; half < 2; half++) {
    u32 x[T::BLOCKS_M][4];
#pragma unroll
    for (u32 j = 0; j < T::BLOCKS_M; j++) load_matrices(x[j], &stage.x[place(first_m + j * 8 + lane % 8, half * 4 + lane / 8)]);
#pragma unroll
    for (u32 i = 0; i < T::BLOCKS_N; i++)
#pragma unroll
      for (u32 step = 0; step < 2; step++) {
        u32 a[4];
        load_matrices(a, &stage.weight[place(first_n + i * 16 + lane % 16, half * 4 + step * 2 + lane / 16)]);
#pragma unroll
        for (u32 j = 0; j < T::BLOCKS_M; j++) {
          const u32 b[2] = {x[j][2 * step], x[j][2 * step + 1]};
          mma_bf16(c[i][j], a, b);
        }
      }
  }
}

// Computes the block's tile.
template <class T>
DEVICE void product(Sums<T> &c, typename T::Shared &shared, const GemmParams &p) {
  const u32 first_n = block_y() * T::N, first_m = block_x() * T::M;
  auto load = [&](u32 step) {
    typename T::Stage &stage = shared.stages[step % T::STAGES];
    if (step * DEPTH < p.depth) {
      load_rows<T::N, T::THREADS>(stage.weight, p.weight, first_n, p.columns, p.depth, step * DEPTH);
      load_rows<T::M, T::THREADS>(stage.x, p.x, first_m, p.rows, p.depth, step * DEPTH);
    }
    commit_copies();
  };
#pragma unroll
  for (u32 step = 0; step < T::STAGES - 1; step++) load(step);
  for (u32 step = 0; step * DEPTH < p.depth; step++) {
    wait_copies<T::STAGES - 2>();
#ifndef PLANT_GEMM_BARRIER
    block_barrier();
#endif
    load(step + T::STAGES - 1);
    multiply<T>(c, shared.stages[step % T::STAGES]);
  }
}

// Computes the block's tile, and ends it.
template <class T, class End>
DEVICE void run(typename T::Shared &shared, const typename End::Params &p) {
  const GemmParams &gemm = End::gemm(p);
  Sums<T> c = {};
  product<T>(c, shared, gemm);
  const u32 warp = thread_index() / 32;
  const u32 first_n = block_y() * T::N + warp % T::WARPS_N * T::BLOCKS_N * 16, first_m = block_x() * T::M + warp / T::WARPS_N * T::BLOCKS_M * 8;
  each_pair(c, gemm, first_n, first_m, [&](u32 token, u32 n, float first, float second) { End::write(p, token, n, first, second); });
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
