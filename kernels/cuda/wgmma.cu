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

// Computes the block's tile, as one chain or in chunks, and ends it.
template <class T, class End, bool CHUNKED = false>
DEVICE void run_wide(typename T::Shared &shared, const typename End::Params &p) {
  begin_next();
  const GemmParams &gemm = End::gemm(p);
  const u32 first_n = block_y() * T::N, first_m = block_x() * T::M, group = thread_index() / 128;
  auto load_weight = [&](u32 step) {
    load_rows<T::N, T::THREADS>(shared.stages[step % T::STAGES].weight, gemm.weight, first_n, gemm.columns, gemm.depth, step * DEPTH);
  };
  auto load_x = [&](u32 step) {
    load_rows<T::M, T::THREADS>(shared.stages[step % T::STAGES].x, gemm.x, first_m, gemm.rows, gemm.depth, step * DEPTH);
  };
  float c[1][T::M / 8][4] = {}, total[1][T::M / 8][4] = {};
  auto multiply = [&](u32 step) {
    wait_copies<T::STAGES - 3>();
    publish_shared();
    block_barrier();
    // Products of the step before the last are done in all groups: their stage is free.
#ifdef PLANT_WIDE_STAGE
    const u32 next = step + T::STAGES - 1;
#else
    const u32 next = step + T::STAGES - 2;
#endif
    if (next * DEPTH < gemm.depth) load_weight(next), load_x(next);
    commit_copies();
    const typename T::Stage &stage = shared.stages[step % T::STAGES];
    const u64 weight = describe(&stage.weight[group * 64 * PIECES]), x = describe(stage.x);
    begin_group();
#pragma unroll
    for (u32 k = 0; k < DEPTH / 16; k++) mma_group(c[0], weight + k * 2, x + k * 2);
    commit_group();
    wait_group<1>();
  };
#pragma unroll
  for (u32 step = 0; step < T::STAGES - 2; step++)
    if (step * DEPTH < gemm.depth) load_weight(step);
  after_previous();
#pragma unroll
  for (u32 step = 0; step < T::STAGES - 2; step++) {
    if (step * DEPTH < gemm.depth) load_x(step);
    commit_copies();
  }
  if (CHUNKED) {
    for (u32 step = 0; step * DEPTH < gemm.depth;) {
      for (const u32 end = step * DEPTH + gemm.chunk; step * DEPTH < end && step * DEPTH < gemm.depth; step++) multiply(step);
      wait_group<0>();
      close_chunk(total, c);
    }
  } else {
    for (u32 step = 0; step * DEPTH < gemm.depth; step++) multiply(step);
    wait_group<0>();
  }
  const auto &sums = CHUNKED ? total : c;
  if constexpr (ADDS<End>) {
    // No stage is read any more.
    wait_copies<0>();
#ifndef PLANT_WIDE_ENDS
    block_barrier();
#endif
    end_rows<T, true>(sums, shared.sums, gemm, first_n, first_m);
  } else {
    each_pair(sums, gemm, first_n + thread_index() / 32 * 16, first_m, [&](u32 token, u32 n, float first, float second) { End::write(p, token, n, first, second); });
  }
}

// A tile of 64 weights whose groups take a chunk each, for weights of so few rows that other tiles leave multiprocessors idle. Groups go through
// their chunks in step.
template <u32 M_, u32 STAGES_>
struct WideChunks {
  static constexpr u32 N = 64, M = M_, STAGES = STAGES_, THREADS = CHUNKS * 128;
  struct Stage {
    Quad weight[N * PIECES], x[M * PIECES];
  };
  struct alignas(1024) Shared {
    Stage stages[CHUNKS][STAGES];
  };
};

typedef WideChunks<64, 3> WideChunks64;

template <class T, class End>
DEVICE void run_wide_chunks(typename T::Shared &shared, const typename End::Params &p) {
  begin_next();
  const GemmParams &gemm = End::gemm(p);
  const u32 first_n = block_y() * T::N, first_m = block_x() * T::M, group = thread_index() / 128, own = thread_index() % 128;
  const u32 begin = group * gemm.chunk, end = begin + gemm.chunk < gemm.depth ? begin + gemm.chunk : gemm.depth;
  typename T::Stage *stages = shared.stages[group];
  auto load_weight = [&](u32 step) {
    load_rows<T::N, 128>(own, stages[step % T::STAGES].weight, gemm.weight, first_n, gemm.columns, gemm.depth, begin + step * DEPTH);
  };
  auto load_x = [&](u32 step) {
    load_rows<T::M, 128>(own, stages[step % T::STAGES].x, gemm.x, first_m, gemm.rows, gemm.depth, begin + step * DEPTH);
  };
#pragma unroll
  for (u32 step = 0; step < T::STAGES - 1; step++)
    if (begin + step * DEPTH < end) load_weight(step);
  after_previous();
#pragma unroll
  for (u32 step = 0; step < T::STAGES - 1; step++) {
    if (begin + step * DEPTH < end) load_x(step);
    commit_copies();
  }
  float c[T::M / 8][4] = {};
  for (u32 step = 0; step * DEPTH < gemm.chunk; step++) {
    wait_copies<T::STAGES - 2>();
    publish_shared();
    // Products of the step before are done in all groups: their stage is free.
    wait_group<0>();
    block_barrier();
    const u32 next = step + T::STAGES - 1;
    if (begin + next * DEPTH < end) load_weight(next), load_x(next);
    commit_copies();
    const u64 weight = describe(stages[step % T::STAGES].weight), x = describe(stages[step % T::STAGES].x);
    if (begin + step * DEPTH < end) {
      begin_group();
#pragma unroll
      for (u32 k = 0; k < DEPTH / 16; k++) mma_group(c, weight + k * 2, x + k * 2);
      commit_group();
    }
  }
  wait_copies<0>();
  wait_group<0>();
  // Sums of a chunk take the place of its group's stages.
  block_barrier();
  Four *sums = (Four *)stages;
#pragma unroll
  for (u32 j = 0; j < T::M / 8; j++) sums[j * 128 + own] = {{c[j][0], c[j][1], c[j][2], c[j][3]}};
  block_barrier();
#pragma unroll
  for (u32 i = 0; i < T::M / 8 / CHUNKS; i++) {
    const u32 j = i * CHUNKS + group;
    float total[1][1][4] = {};
    for (u32 chunk = 0; chunk * gemm.chunk < gemm.depth; chunk++) {
      const Four added = ((const Four *)shared.stages[chunk])[j * 128 + own];
#pragma unroll
      for (u32 v = 0; v < 4; v++) total[0][0][v] += added.v[v];
    }
    each_pair(total, gemm, first_n + own / 32 * 16, first_m + j * 8, [&](u32 token, u32 n, float first, float second) { End::write(p, token, n, first, second); });
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

KERNEL(WideChunks64::THREADS) gemm_store_chunks_wide_64(GemmParams p) {
  SHARED_LARGE(WideChunks64::Shared, shared);
  run_wide_chunks<WideChunks64, Store>(shared, p);
}

KERNEL(Wide64::THREADS) gemm_store_chunks_wide_tall(GemmParams p) {
  SHARED_LARGE(Wide64::Shared, shared);
  run_wide<Wide64, Store, true>(shared, p);
}

KERNEL(Wide128::THREADS) gemm_store_chunks_wide_large(GemmParams p) {
  SHARED_LARGE(Wide128::Shared, shared);
  run_wide<Wide128, Store, true>(shared, p);
}

KERNEL(WideChunks64::THREADS) gemm_add_chunks_wide_64(GemmParams p) {
  SHARED_LARGE(WideChunks64::Shared, shared);
  run_wide_chunks<WideChunks64, Add>(shared, p);
}

KERNEL(Wide64::THREADS) gemm_add_chunks_wide_tall(GemmParams p) {
  SHARED_LARGE(Wide64::Shared, shared);
  run_wide<Wide64, Add, true>(shared, p);
}

KERNEL(Wide128::THREADS) gemm_add_chunks_wide_large(GemmParams p) {
  SHARED_LARGE(Wide128::Shared, shared);
  run_wide<Wide128, Add, true>(shared, p);
}
