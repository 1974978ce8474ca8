// Products by the matrix instructions of four warps (`wgmma`), on sm_90a alone: for many tokens.
//
// Weights are the 64 rows of an instruction and tokens its columns; both operands are read from shared memory, where the tiles have the
// layout of `gemm.cu`. Products of a step run while the next tiles are under way and while the products of the next step are begun.
#include "gemm.cuh"

// Groups of four warps, each 64 weights × M tokens.
template <u32 GROUPS_, u32 M_, u32 STAGES_>
struct Wide {
  static constexpr u32 GROUPS = GROUPS_, M = M_, STAGES = STAGES_, N = GROUPS * 64, THREADS = GROUPS * 128;
  // For `end_rows`: sums of neighbouring tokens are in different banks.
  static constexpr u32 WORKERS = THREADS, PITCH = N + 4;
  struct Stage {
    Quad weight[N * PIECES], x[M * PIECES];
  };
  union alignas(1024) Shared {
    Stage stages[STAGES];
    float sums[M * PITCH];
  };
};
typedef Wide<2, 64, 6> Wide64;
typedef Wide<2, 128, 6> Wide128;

// Where an end reads what is there, it does so in rows: one value after the other would wait for memory each time.
template <class End>
constexpr bool ADDS = false;
template <>
constexpr bool ADDS<Add> = true;

// Computes the block's tile, and ends it.
template <class T, class End>
DEVICE void run_wide(typename T::Shared &shared, const typename End::Params &p) {
  const GemmParams &gemm = End::gemm(p);
  const u32 first_n = block_y() * T::N, first_m = block_x() * T::M, group = thread_index() / 128;
  auto load = [&](u32 step) {
    typename T::Stage &stage = shared.stages[step % T::STAGES];
    if (step * DEPTH < gemm.depth) {
      load_rows<T::N, T::THREADS>(stage.weight, gemm.weight, first_n, gemm.columns, gemm.depth, step * DEPTH);
      load_rows<T::M, T::THREADS>(stage.x, gemm.x, first_m, gemm.rows, gemm.depth, step * DEPTH);
    }
    commit_copies();
  };
#pragma unroll
  for (u32 step = 0; step < T::STAGES - 2; step++) load(step);
  float c[1][T::M / 8][4] = {};
  for (u32 step = 0; step * DEPTH < gemm.depth; step++) {
    wait_copies<T::STAGES - 3>();
    publish_shared();
    block_barrier();
    // Products of the step before the last are done in all groups: their stage is free.
#ifdef PLANT_WIDE_STAGE
    load(step + T::STAGES - 1);
#else
    load(step + T::STAGES - 2);
#endif
    const typename T::Stage &stage = shared.stages[step % T::STAGES];
    const u64 weight = describe(&stage.weight[group * 64 * PIECES]), x = describe(stage.x);
    begin_group();
#pragma unroll
    for (u32 k = 0; k < DEPTH / 16; k++) mma_group(c[0], weight + k * 2, x + k * 2);
    commit_group();
    wait_group<1>();
  }
  wait_group<0>();
  if constexpr (ADDS<End>) {
    // No stage is read any more.
#ifndef PLANT_WIDE_ENDS
    block_barrier();
#endif
    end_rows<T, true>(c, shared.sums, gemm, first_n, first_m);
  } else {
    each_pair(c, gemm, first_n + thread_index() / 32 * 16, first_m, [&](u32 token, u32 n, float first, float second) { End::write(p, token, n, first, second); });
  }
}

KERNEL(Wide64::THREADS) gemm_store_wide_64(GemmParams p) {
  SHARED_LARGE(Wide64::Shared, shared);
  run_wide<Wide64, Store>(shared, p);
}

KERNEL(Wide128::THREADS) gemm_store_wide_128(GemmParams p) {
  SHARED_LARGE(Wide128::Shared, shared);
  run_wide<Wide128, Store>(shared, p);
}

KERNEL(Wide64::THREADS) gemm_add_wide_64(GemmParams p) {
  SHARED_LARGE(Wide64::Shared, shared);
  run_wide<Wide64, Add>(shared, p);
}

KERNEL(Wide128::THREADS) gemm_add_wide_128(GemmParams p) {
  SHARED_LARGE(Wide128::Shared, shared);
  run_wide<Wide128, Add>(shared, p);
}

KERNEL(Wide64::THREADS) gemm_silu_wide_64(GatedParams p) {
  SHARED_LARGE(Wide64::Shared, shared);
  run_wide<Wide64, Silu>(shared, p);
}

KERNEL(Wide128::THREADS) gemm_silu_wide_128(GatedParams p) {
  SHARED_LARGE(Wide128::Shared, shared);
  run_wide<Wide128, Silu>(shared, p);
}
