// Products by the matrix instructions of four warps (`wgmma`), fed by a group of warps that copies for the others, on sm_90a alone: for many
// tokens.
//
// Operands and sums are those of `wgmma.cu`. A group that multiplies never waits for room in the queues of copies: it waits for a stage to be
// filled, begins its products and says when those of the stage before are done. Sums go back through shared memory, so that the output is
// read and written in whole rows of the tile, sixteen bytes at a time.
#include "gemm.cuh"

// Groups of four warps that multiply, each 64 weights × M tokens, and one that copies.
template <u32 GROUPS_, u32 M_, u32 STAGES_>
struct Fed {
  static constexpr u32 GROUPS = GROUPS_, M = M_, STAGES = STAGES_, N = GROUPS * 64;
  // Threads that multiply, that copy, and all.
  static constexpr u32 WORKERS = GROUPS * 128, COPIERS = 128, THREADS = WORKERS + COPIERS;
  // Values from one token's results to the next's: neighbouring ones are in different banks.
  static constexpr u32 PITCH = N + 4, GATED_PITCH = N / 2 + 8;
  struct Stage {
    Quad weight[N * PIECES], x[M * PIECES];
  };
  struct alignas(1024) Shared {
    union {
      Stage stages[STAGES];
      float sums[M * PITCH];
      u16 gated[M * GATED_PITCH];
    };
    // Phases end when a stage is filled, and when it is free.
    u64 filled[STAGES], freed[STAGES];
  };
};
typedef Fed<2, 256, 4> Fed256;

// Sums of a warp: c[0][j] holds the fragment of its weights and tokens 8j..8j+8.
template <class T>
using FedSums = float[1][T::M / 8][4];

// Rows of an operand as one of THREADS threads copies them: one piece of every THREADS / 8th row.
template <u32 COUNT, u32 THREADS>
struct Copier {
  static constexpr u32 APART = THREADS / PIECES;
  const u16 *from;
  u64 apart;
  u32 left, to;

  // `thread` of THREADS; the block's first row, and how many rows there are.
  DEVICE_MEMBER Copier(const u16 *all, u32 thread, u32 first, u32 rows, u32 depth) {
    const u32 row = thread / PIECES, piece = thread % PIECES;
    from = all + (u64)(first + row) * depth + piece * 8, apart = (u64)APART * depth;
    left = first + row < rows ? rows - first - row : 0, to = place(row, piece);
  }
  // As `load_rows`.
  DEVICE_MEMBER void copy(Quad *stage, u32 k) const {
    static_assert(COUNT % APART == 0 && APART % 8 == 0, "a thread's rows are as many as another's, and have its piece at one place");
#pragma unroll
    for (u32 i = 0; i < COUNT / APART; i++)
      if (i * APART < left) copy_async(stage + to + i * THREADS, from + i * apart + k, true);
  }
};

// Copies for the groups that multiply.
template <class T>
DEVICE void feed(typename T::Shared &shared, const GemmParams &p, u32 first_n, u32 first_m) {
  const u32 thread = thread_index() - T::WORKERS;
  const Copier<T::N, T::COPIERS> weight(p.weight, thread, first_n, p.columns, p.depth);
  const Copier<T::M, T::COPIERS> x(p.x, thread, first_m, p.rows, p.depth);
  for (u32 step = 0; step * DEPTH < p.depth; step++) {
    const u32 at = step % T::STAGES, turn = step / T::STAGES;
    if (turn > 0) wait_phase(&shared.freed[at], (turn - 1) % 2);
    weight.copy(shared.stages[at].weight, step * DEPTH);
    x.copy(shared.stages[at].x, step * DEPTH);
    arrive_copied(&shared.filled[at]);
  }
}

// Multiplies what is fed into `c`.
template <class T>
DEVICE void fed_product(FedSums<T> &c, typename T::Shared &shared, const GemmParams &p) {
  for (u32 step = 0; step * DEPTH < p.depth; step++) {
    const u32 at = step % T::STAGES;
    wait_phase(&shared.filled[at], step / T::STAGES % 2);
    publish_shared();
    const typename T::Stage &stage = shared.stages[at];
    const u64 weight = describe(&stage.weight[thread_index() / 128 * 64 * PIECES]), x = describe(stage.x);
    begin_group();
#pragma unroll
    for (u32 k = 0; k < DEPTH / 16; k++) mma_group(c[0], weight + k * 2, x + k * 2);
    commit_group();
    wait_group<1>();
#ifdef PLANT_FED_PHASE
    if (thread_index() % 32 == 0) arrive(&shared.freed[at]);
#else
    // Products of the step before are done in this warp.
    if (step > 0 && thread_index() % 32 == 0) arrive(&shared.freed[(step - 1) % T::STAGES]);
#endif
  }
  wait_group<0>();
}

template <class T>
DEVICE void end_fed(Store, const FedSums<T> &c, typename T::Shared &shared, const GemmParams &p, u32 first_n, u32 first_m) {
  end_rows<T, false>(c, shared.sums, p, first_n, first_m);
}
template <class T>
DEVICE void end_fed(Add, const FedSums<T> &c, typename T::Shared &shared, const GemmParams &p, u32 first_n, u32 first_m) {
  end_rows<T, true>(c, shared.sums, p, first_n, first_m);
}

// Gated results, bf16: a thread moves eight of them at once.
template <class T>
DEVICE void end_fed(Silu, const FedSums<T> &c, typename T::Shared &shared, const GatedParams &p, u32 first_n, u32 first_m) {
  each_pair(c, p.gemm, first_n + thread_index() / 32 * 16, first_m, [&](u32 token, u32 n, float first, float second) {
    const u32 at = (n - first_n) / 16 * 8 + n % 8;
    if (first_n / 2 + at < p.out_columns) shared.gated[(token - first_m) * T::GATED_PITCH + at] = Silu::value(p, n, first, second);
  });
  block_barrier();
  constexpr u32 LANES = T::N / 16;
  const u32 at = thread_index() % LANES * 8, column = first_n / 2 + at, stride = p.gemm.out_stride;
  const bool is_whole = column + 8 <= p.out_columns && stride % 8 == 0 && (u64)p.gemm.out % 16 == 0;
  for (u32 m = thread_index() / LANES; m < T::M && first_m + m < p.gemm.rows; m += T::WORKERS / LANES) {
    const u16 *from = &shared.gated[m * T::GATED_PITCH + at];
    u16 *to = (u16 *)p.gemm.out + (u64)(first_m + m) * stride + column;
    if (is_whole) {
      *(Quad *)to = *(const Quad *)from;
      continue;
    }
    for (u32 i = 0; i < 8; i++)
      if (column + i < p.out_columns) to[i] = from[i];
  }
}

// Waits until no stage is read any more: sums take their place.
DEVICE void leave_stages() {
#ifndef PLANT_FED_ENDS
  block_barrier();
#endif
}

// Computes the block's tile, and ends it.
template <class T, class End>
DEVICE void run_fed(typename T::Shared &shared, const typename End::Params &p) {
  begin_next();
  const GemmParams &gemm = End::gemm(p);
  const u32 first_n = block_y() * T::N, first_m = block_x() * T::M;
  if (thread_index() == 0) {
    for (u32 i = 0; i < T::STAGES; i++) init_phases(&shared.filled[i], T::COPIERS), init_phases(&shared.freed[i], T::WORKERS / 32);
  }
  block_barrier();
  after_previous();
  if (thread_index() >= T::WORKERS) {
    feed<T>(shared, gemm, first_n, first_m);
    // The barriers of the others: before sums are written, and after.
    leave_stages();
    block_barrier();
    return;
  }
  FedSums<T> c = {};
  fed_product<T>(c, shared, gemm);
  leave_stages();
  end_fed<T>(End(), c, shared, p, first_n, first_m);
}

KERNEL(Fed256::THREADS) gemm_store_fed_256(GemmParams p) {
  SHARED_LARGE(Fed256::Shared, shared);
  run_fed<Fed256, Store>(shared, p);
}

KERNEL(Fed256::THREADS) gemm_add_fed_256(GemmParams p) {
  SHARED_LARGE(Fed256::Shared, shared);
  run_fed<Fed256, Add>(shared, p);
}

KERNEL(Fed256::THREADS) gemm_silu_fed_256(GatedParams p) {
  SHARED_LARGE(Fed256::Shared, shared);
  run_fed<Fed256, Silu>(shared, p);
}
