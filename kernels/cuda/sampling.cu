// The most likely token of each row of logits, so that a row of 152k logits does not cross the bus for one token.
//
// `best_parts` reads each logit once: 4n bytes for a row of n. A row is cut into parts, one block each, so that one row alone is read by
// many multiprocessors. `best_tokens` merges the parts of each row. The largest logit wins, the lowest token among equals, so the order of
// merging decides nothing. The CPU's sampler (`backends/engine/src/logits.rs`, `max` and `position`) has the same answer for each row, useless
// rows included.
#include "ptx.cuh"

constexpr u32 PART_THREADS = 256, MERGE_THREADS = 32;
// Logits of one part: 16 loads per thread, which are all in flight at once.
constexpr u32 PART = 4096;
// Token of a useless row: one with a NaN or +∞, or with nothing above −∞.
constexpr u32 NO_TOKEN = ~0u;

struct Best {
  float value;
  u32 token;
};

// A useless logit is +∞ without a token, which wins against everything.
DEVICE Best better(Best a, Best b) {
#ifdef PLANT_BEST_TIES
  return a.value >= b.value ? a : b;
#else
  return a.value > b.value || (a.value == b.value && a.token < b.token) ? a : b;
#endif
}

template <u32 THREADS>
struct BestShared {
  Best best[THREADS];
};

// Best of the block, in thread 0; all threads take part.
template <u32 THREADS>
DEVICE Best block_best(BestShared<THREADS> &shared, Best best) {
  const u32 thread = thread_index();
  shared.best[thread] = best;
  for (u32 half = THREADS / 2; half > 0; half /= 2) {
    block_barrier();
    if (thread < half) shared.best[thread] = better(shared.best[thread], shared.best[thread + half]);
  }
  return shared.best[0];
}

struct BestPartsParams {
  Best *out;           // [rows, parts]
  const float *logits; // [rows, columns]
  u32 columns, parts;
};

KERNEL(PART_THREADS) best_parts(BestPartsParams p) {
  SHARED(BestShared<PART_THREADS>, shared);
  const u64 row = block_y();
  const float *logits = p.logits + row * p.columns;
  const u32 first = block_x() * PART + thread_index();
  Best best = {-INFINITE, NO_TOKEN};
#pragma unroll
  for (u32 n = 0; n < PART / PART_THREADS; n++) {
    const u32 token = first + n * PART_THREADS;
    const float value = token < p.columns ? logits[token] : -INFINITE;
    const bool useless = value != value || value == INFINITE;
    if (useless || value > best.value) best = {useless ? INFINITE : value, useless ? NO_TOKEN : token};
  }
  best = block_best(shared, best);
  if (thread_index() == 0) p.out[row * p.parts + block_x()] = best;
}

struct BestTokensParams {
  Best *out;         // [rows]
  const Best *parts; // [rows, parts]
  u32 count;         // parts of a row
};

KERNEL(MERGE_THREADS) best_tokens(BestTokensParams p) {
  SHARED(BestShared<MERGE_THREADS>, shared);
  const u64 row = block_x();
  Best best = {-INFINITE, NO_TOKEN};
  for (u32 part = thread_index(); part < p.count; part += MERGE_THREADS) best = better(best, p.parts[row * p.count + part]);
  best = block_best(shared, best);
  if (thread_index() == 0) p.out[row] = best;
}
