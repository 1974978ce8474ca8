// The token of each row of logits, the most likely one or one drawn, so that a row of 152k logits does not cross the bus for one token.
//
// `best_parts` reads each logit once: 4n bytes for a row of n. A row is cut into parts, one block each, so that one row alone is read by
// many multiprocessors. `best_tokens` merges the parts of each row. The largest logit wins, the lowest token among equals, so the order of
// merging decides nothing. The CPU's sampler (`backends/engine/src/logits.rs`, `max` and `position`) has the same answer for each row, useless
// rows included.
//
// `draw_sums` and `draw_tokens` draw from all tokens of a row at its temperature, as the CPU does (`kernels/src/sampling.rs`, `draw_from_all`): the
// same operations on f32 and f64 in the same order for each sum, so the same token to the bit. This source is compiled without fused
// products and sums. A row is read twice more, the second time one chunk of it.
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
  begin_next();
  after_previous();
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
  begin_next();
  after_previous();
  const u64 row = block_x();
  Best best = {-INFINITE, NO_TOKEN};
  for (u32 part = thread_index(); part < p.count; part += MERGE_THREADS) best = better(best, p.parts[row * p.count + part]);
  best = block_best(shared, best);
  if (thread_index() == 0) p.out[row] = best;
}

// Logits of a chunk, and sums that make up that of a chunk, as `kernels/src/sampling.rs` has them.
constexpr u32 CHUNK = 1024, LANES = 16;
constexpr u32 SUM_THREADS = 64, DRAW_THREADS = 256;
// Loads of a thread that are in flight at once.
constexpr u32 LOADS = 16;
// Most rows of one launch (parameters are 4 KB at most), and most chunks of a row, by shared memory.
constexpr u32 DRAWS = 128, CHUNKS_MAX = 2048;

struct Draw {
  double uniform; // random number in [0, 1)
  float scale;    // 1 / temperature
  u32 row;
};

struct DrawParams {
  Best *best;          // [rows]: of `best_tokens`, and the tokens drawn
  double *sums;        // [rows, chunks]
  const float *logits; // [rows, columns]
  u32 columns, chunks;
  Draw draws[DRAWS];
};

// e^((value - max) * scale) for value <= max, 0 below e^-87: `exp` of `kernels/src/sampling.rs`, operation by operation.
DEVICE float weight_of(float value, float max, float scale) {
  const float x = (value - max) * scale, magic = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer
  const float clamped = x > -87.0f ? x : -87.0f;
  const float shifted = clamped * 1.44269504088896340736f + magic, n = shifted - magic;
  const float r = clamped - n * 0.6933594f - n * -2.1219444e-4f;
  float p = 1.9875691e-4f;
  p = p * r + 1.3981999e-3f;
  p = p * r + 8.333452e-3f;
  p = p * r + 4.1665796e-2f;
  p = p * r + 1.6666665e-1f;
  p = p * r + 0.5f;
  const float mantissa = p * r * r + r + 1.0f;
  return x > -87.0f ? mantissa * bits_to_float((u32)((int)n + 127) << 23) : 0.0f;
}

struct SumsShared {
  double lanes[SUM_THREADS];
};

// Sum of each chunk: sixteen sums side by side, added in order, and the values that do not fill them last.
KERNEL(SUM_THREADS) draw_sums(DrawParams p) {
  SHARED(SumsShared, shared);
  begin_next();
  after_previous();
  const u32 thread = thread_index(), lane = thread % LANES, chunk = block_x() * (SUM_THREADS / LANES) + thread / LANES;
  const float scale = p.draws[block_y()].scale;
  const u64 row = p.draws[block_y()].row;
  const float *logits = p.logits + row * p.columns, max = p.best[row].value;
  const u32 first = chunk < p.chunks ? chunk * CHUNK : p.columns;
  const u32 end = first + CHUNK < p.columns ? first + CHUNK : p.columns, whole = first + (end - first) / LANES * LANES;
  double sum = 0;
  for (u32 i = first + lane; i < whole; i += LOADS * LANES) {
    float values[LOADS];
#pragma unroll
    for (u32 n = 0; n < LOADS; n++) values[n] = i + n * LANES < whole ? logits[i + n * LANES] : -INFINITE;
#pragma unroll
    for (u32 n = 0; n < LOADS; n++) sum += (double)weight_of(values[n], max, scale); // beyond the chunk: + 0
  }
  shared.lanes[thread] = sum;
  block_barrier();
  if (lane != 0 || chunk >= p.chunks) return;
  double total = 0, tail = 0;
#ifdef PLANT_DRAW_ORDER
  for (u32 i = LANES; i > 0; i--) total += shared.lanes[thread + i - 1];
#else
  for (u32 i = 0; i < LANES; i++) total += shared.lanes[thread + i];
#endif
  for (u32 i = whole; i < end; i++) tail += (double)weight_of(logits[i], max, scale);
  p.sums[row * p.chunks + chunk] = total + tail;
}

struct DrawShared {
  double sums[CHUNKS_MAX], left;
  u32 at;
  float weights[CHUNK];
};

// First weight at which nothing is left of `left`, or the last above 0. `weights` are of a chunk, 0 beyond the row.
DEVICE u32 place_of(const float *weights, double left) {
  for (u32 first = 0; first < CHUNK; first += LANES) {
    double after = left;
#pragma unroll
    for (u32 i = 0; i < LANES; i++) after -= (double)weights[first + i];
    // What is left never grows, so it is enough to look once per group.
    if (after < 0) {
      u32 at = first;
      while ((left -= (double)weights[at]) >= 0) at++;
      return at;
    }
    left = after;
  }
  u32 last = CHUNK - 1;
  while (last > 0 && weights[last] == 0) last--;
  return last;
}

// Token of each row: the chunk in which the drawn share of the whole lies, then the token in it.
KERNEL(DRAW_THREADS) draw_tokens(DrawParams p) {
  SHARED(DrawShared, shared);
  begin_next();
  after_previous();
  const u32 thread = thread_index();
  const float scale = p.draws[block_x()].scale;
  const u64 row = p.draws[block_x()].row;
  const float *logits = p.logits + row * p.columns, max = p.best[row].value;
  for (u32 i = thread; i < p.chunks; i += DRAW_THREADS) shared.sums[i] = p.sums[row * p.chunks + i];
  block_barrier();
  if (thread == 0) {
    double total = 0;
    for (u32 i = 0; i < p.chunks; i++) total += shared.sums[i];
    double left = p.draws[block_x()].uniform * total;
    u32 at = 0;
    for (u32 i = 0; i < p.chunks; i++) {
      const double sum = shared.sums[i];
      if (!(sum > 0)) continue;
      at = i;
      if (left < sum) break;
      left -= sum;
    }
    shared.left = left, shared.at = at;
  }
  block_barrier();
  const u32 first = shared.at * CHUNK;
  for (u32 i = thread; i < CHUNK; i += DRAW_THREADS)
    shared.weights[i] = first + i < p.columns ? weight_of(logits[first + i], max, scale) : 0.0f;
  block_barrier();
  if (thread == 0 && p.best[row].token != NO_TOKEN) p.best[row].token = first + place_of(shared.weights, shared.left);
}
