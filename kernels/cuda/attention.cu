// Head norms, rotation and KV write; causal attention over the paged cache.
//
// The cache of one layer is [page][K|V][kv_head][token][dim] in bf16: one page of one layer is contiguous.
#include "attention.cuh"

constexpr u32 HEAD_THREADS = 128, WARPS = HEAD_THREADS / 32, DIM_MAX = 256;

struct HeadsParams {
  const float *projected; // [rows, (heads + 2·kv_heads) · dim]
  u16 *queries;           // [rows, query_stride] bf16
  u16 *cache;             // the layer's cache
  const float *cosines;   // [positions, dim / 2]
  const float *sines;
  const float *query_norm; // [dim], or null
  const float *key_norm;
  Places places;
  u32 heads, kv_heads, dim, query_stride;
  float eps;
};

// One warp per row and head: RMS norm over the head, rotation of its two halves, and the write to queries or cache. Values are copied.
KERNEL(HEAD_THREADS) finish_heads(HeadsParams p) {
  begin_next();
  after_previous();
  const u32 lane = thread_index() % 32, head = block_y() * WARPS + thread_index() / 32, half = p.dim / 2;
  const u64 row = block_x();
  const u32 total = p.heads + 2 * p.kv_heads;
  if (head >= total) return;
  const u32 position = p.places.positions[row];
  const float *x = p.projected + (row * total + head) * p.dim;
  const bool is_query = head < p.heads, is_value = head >= p.heads + p.kv_heads;
  u16 *out;
  if (is_query) {
    out = p.queries + row * p.query_stride + head * p.dim;
  } else {
    const u64 page = p.places.tables[p.places.table_at[row] + position / PAGE];
    // Head of the page: keys come first, then values.
    out = p.cache + page * page_values(p.kv_heads, p.dim) + ((u64)(head - p.heads) * PAGE + position % PAGE) * p.dim;
  }
  if (is_value) {
    for (u32 i = lane; i < p.dim; i += 32) out[i] = to_bf16(x[i]);
    return;
  }
  const float *norm = is_query ? p.query_norm : p.key_norm;
  float inverse = 1.0f;
  if (norm) {
    float sum = 0;
    for (u32 i = lane; i < p.dim; i += 32) sum += x[i] * x[i];
    inverse = 1.0f / sqrtf(warp_sum(sum) / (float)p.dim + p.eps);
  }
  for (u32 i = lane; i < half; i += 32) {
    const float a = norm ? x[i] * inverse * norm[i] : x[i], b = norm ? x[i + half] * inverse * norm[i + half] : x[i + half];
    const float cosine = p.cosines[(u64)position * half + i], sine = p.sines[(u64)position * half + i];
    out[i] = to_bf16(a * cosine - b * sine);
#ifdef PLANT_ROPE_SIGN
    out[i + half] = to_bf16(b * cosine - a * sine);
#else
    out[i + half] = to_bf16(b * cosine + a * sine);
#endif
  }
}

// Running softmax of a warp over one split: sixteen rows, of which a lane holds row g in [0] and row g + 8 in [1].
//
// Values of depth are shared out so that every load has sixteen bytes: of a query, a key and a value a lane reads eight neighbours.
// sums[8c + i][0] is column 64c + 16t + i of row g, [1] column 64c + 16t + 8 + i, [2] and [3] those of row g + 8.
template <u32 DIM>
struct Softmax {
  float highest[2], total[2], sums[DIM / 8][4];
};

template <u32 DIM>
DEVICE void reset(Softmax<DIM> &s) {
#pragma unroll
  for (u32 i = 0; i < 2; i++) s.highest[i] = -INFINITE, s.total[i] = 0;
#pragma unroll
  for (u32 i = 0; i < DIM / 8; i++)
#pragma unroll
    for (u32 v = 0; v < 4; v++) s.sums[i][v] = 0;
}

// Adds one page. `first` and `end` bound the positions that rows g and g + 8 see. `query(row, piece)` gives eight columns of row g or g + 8,
// `key(token, piece)` and `value(token, piece)` of a token of the page; values that no row sees are zeros.
template <u32 DIM, class Query, class Key, class Value>
DEVICE void add_page(Softmax<DIM> &s, Query query, float scale, u32 at, const u32 (&first)[2], const u32 (&end)[2], Key key, Value value) {
  const u32 lane = thread_index() % 32, g = lane / 4, t = lane % 4;
  float scores[PAGE / 8][4] = {};
#pragma unroll
  for (u32 block = 0; block < DIM / 32; block++) {
    const Quad upper = query(0, block * 4 + t), lower = query(1, block * 4 + t);
#pragma unroll
    for (u32 j = 0; j < PAGE / 8; j++) {
      const Quad k = key(j * 8 + g, block * 4 + t);
#pragma unroll
      for (u32 step = 0; step < 2; step++) {
        const u32 a[4] = {upper.v[2 * step], lower.v[2 * step], upper.v[2 * step + 1], lower.v[2 * step + 1]};
        const u32 b[2] = {k.v[2 * step], k.v[2 * step + 1]};
        mma_bf16(scores[j], a, b);
      }
    }
  }
  float shift[2];
#pragma unroll
  for (u32 row = 0; row < 2; row++) {
    float peak = -INFINITE;
#pragma unroll
    for (u32 j = 0; j < PAGE / 8; j++)
#pragma unroll
      for (u32 i = 0; i < 2; i++) {
        float &score = scores[j][2 * row + i];
        const u32 position = at + j * 8 + 2 * t + i;
#ifdef PLANT_ATTENTION_MASK
        score = position <= end[row] ? mul(score, scale) : -INFINITE;
#else
        score = position >= first[row] && position < end[row] ? mul(score, scale) : -INFINITE;
#endif
        peak = fmaxf(peak, score);
      }
    peak = fmaxf(s.highest[row], quad_max(peak));
    // Nothing seen yet: any number serves, but infinity.
    shift[row] = peak == -INFINITE ? 0.0f : peak;
    const float shrink = exp2_fast(s.highest[row] - shift[row]);
    s.highest[row] = peak;
    float sum = 0;
#pragma unroll
    for (u32 j = 0; j < PAGE / 8; j++)
#pragma unroll
      for (u32 i = 0; i < 2; i++) {
        float &score = scores[j][2 * row + i];
        score = exp2_fast(score - shift[row]);
        sum += score;
      }
    s.total[row] = mul_add(s.total[row], shrink, sum);
#pragma unroll
    for (u32 i = 0; i < DIM / 8; i++)
#pragma unroll
      for (u32 v = 0; v < 2; v++) s.sums[i][2 * row + v] = mul(s.sums[i][2 * row + v], shrink);
  }
  u32 weights[PAGE / 16][4];
#pragma unroll
  for (u32 block = 0; block < PAGE / 16; block++)
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const float (&from)[4] = scores[2 * block + i / 2];
      weights[block][i] = pack_bf16(from[i % 2 * 2], from[i % 2 * 2 + 1]);
    }
#pragma unroll
  for (u32 block = 0; block < PAGE / 16; block++) {
#pragma unroll
    for (u32 c = 0; c < DIM / 64; c++) {
      const u32 token = block * 16 + 2 * t;
      const Quad v[4] = {value(token, c * 8 + g), value(token + 1, c * 8 + g), value(token + 8, c * 8 + g), value(token + 9, c * 8 + g)};
#pragma unroll
      for (u32 word = 0; word < 4; word++) {
        const u32 even[2] = {low_halves(v[0].v[word], v[1].v[word]), low_halves(v[2].v[word], v[3].v[word])};
        const u32 odd[2] = {high_halves(v[0].v[word], v[1].v[word]), high_halves(v[2].v[word], v[3].v[word])};
        mma_bf16(s.sums[c * 8 + word * 2], weights[block], even);
        mma_bf16(s.sums[c * 8 + word * 2 + 1], weights[block], odd);
      }
    }
  }
}

// Writes eight neighbouring results as bf16.
DEVICE void write_eight(u16 *out, const float (&values)[8]) {
  *(Quad *)out = {{pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]), pack_bf16(values[4], values[5]), pack_bf16(values[6], values[7])}};
}

// Results of a split for one query head: sums, then highest and total.
template <u32 DIM>
using Partial = Four[DIM / 4 + 1];

template <u32 DIM>
struct DecodeShared {
  Partial<DIM> splits[WARPS][ROWS];
  u32 is_last;
};

// Eight columns of one query head, merged from split to split.
struct Merged {
  float highest, total, sums[8];
};

template <class Read>
DEVICE void merge_part(Merged &m, Read read, u32 fours, u32 f) {
  const Four ends = read(fours), low = read(2 * f), high = read(2 * f + 1);
  const Merge factors = merge(m.highest, m.total, ends.v[0], ends.v[1]);
#pragma unroll
  for (u32 v = 0; v < 4; v++) {
    m.sums[v] = mul_add(m.sums[v], factors.before, mul(low.v[v], factors.added));
    m.sums[v + 4] = mul_add(m.sums[v + 4], factors.before, mul(high.v[v], factors.added));
  }
}

// One row: a block per row and group of query heads, or several, along z. A warp takes one split, a block four at a time. Keys and values go
// from memory to registers. Splits are merged in ascending order, by the one block, or by the last of several.
template <u32 DIM>
DEVICE void decode(DecodeShared<DIM> &shared, const AttentionParams &p) {
  // Pieces of eight columns, and those of a thread.
  constexpr u32 PARTS = DIM / 8, OWN = ROWS * PARTS / HEAD_THREADS, STRIDE = SPLIT * WARPS;
  const u32 lane = thread_index() % 32, warp = thread_index() / 32, g = lane / 4, t = lane % 4;
  const u32 group = p.heads / p.kv_heads, groups = (group + ROWS - 1) / ROWS;
  const u32 kv_head = block_y() / groups, part = block_y() % groups * ROWS, heads = group - part < ROWS ? group - part : ROWS;
  const u64 row = p.items[block_x()];
  const u32 end = p.places.positions[row] + 1, first = p.window && end > p.window ? end - p.window : 0;
  const u32 begin_block = first / STRIDE, end_block = (end + STRIDE - 1) / STRIDE, blocks = end_block - begin_block;
  const bool is_shared = p.depth > 1 && blocks > 1;
  if (p.depth > 1 && block_z() >= blocks) return;
  const u32 table_at = p.places.table_at[row];
  const u32 *table = p.places.tables + table_at;
  const u16 *keys = p.cache + (u64)kv_head * PAGE * DIM, *values = keys + (u64)p.kv_heads * PAGE * DIM;
  const u64 head = kv_head * group + part, page_size = page_values(p.kv_heads, DIM);
  const u16 *query = p.queries + row * p.stride + head * DIM;
  u16 *out = p.out + row * p.stride + head * DIM;
  // Results of this row's splits: each row has room for its pages and one split more.
  Partial<DIM> *stored = (Partial<DIM> *)p.partials + ((u64)table_at / (SPLIT / PAGE) + block_x()) * p.heads + head;
  Quad queries[DIM / 32][2] = {};
#pragma unroll
  for (u32 block = 0; block < DIM / 32; block++)
#pragma unroll
    for (u32 i = 0; i < 2; i++)
      if (g + 8 * i < heads) queries[block][i] = *(const Quad *)(query + (g + 8 * i) * DIM + block * 32 + t * 8);
  const float scale = p.scale * LOG2_E;
  const u32 firsts[2] = {first, first}, ends[2] = {end, end};
  Merged merged[OWN];
#pragma unroll
  for (u32 i = 0; i < OWN; i++) merged[i] = {-INFINITE, 0, {}};

  for (u32 block = begin_block + (is_shared ? block_z() : 0); block < end_block; block++) {
    Softmax<DIM> s;
    reset(s);
    const u32 split = (block * WARPS + warp) * SPLIT, stop = split + SPLIT < end ? split + SPLIT : end;
    for (u32 at = split < first ? first / PAGE * PAGE : split; at < stop; at += PAGE) {
      const u64 page = table[at / PAGE] * page_size;
      // Slots outside of the row's sight may hold anything, also NaN, and a weight of 0 does not undo that.
      auto own = [&](u32 i, u32 piece) { return queries[piece / 4][i]; };
      auto key = [&](u32 token, u32 piece) { return *(const Quad *)(keys + page + token * DIM + piece * 8); };
      auto value = [&](u32 token, u32 piece) {
        Quad quad = {};
#ifdef PLANT_DECODE_UNSEEN
        quad = *(const Quad *)(values + page + token * DIM + piece * 8);
#else
        if (at + token >= first && at + token < end) quad = *(const Quad *)(values + page + token * DIM + piece * 8);
#endif
        return quad;
      };
      add_page<DIM>(s, own, scale, at, firsts, ends, key, value);
    }
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      Partial<DIM> &to = shared.splits[warp][g + 8 * i];
      const float total = quad_sum(s.total[i]);
      if (g + 8 * i >= heads) continue;
      if (t == 0) to[DIM / 4] = {{s.highest[i], total, 0, 0}};
#pragma unroll
      for (u32 c = 0; c < DIM / 64; c++)
#pragma unroll
        for (u32 half = 0; half < 2; half++)
#pragma unroll
          for (u32 four = 0; four < 2; four++) {
            const u32 n = c * 8 + four * 4, v = 2 * i + half;
            to[c * 16 + t * 4 + half * 2 + four] = {{s.sums[n][v], s.sums[n + 1][v], s.sums[n + 2][v], s.sums[n + 3][v]}};
          }
    }
    block_barrier();
    if (is_shared) {
      for (u32 i = thread_index(); i < WARPS * heads * (DIM / 4 + 1); i += HEAD_THREADS) {
        const u32 w = i / (heads * (DIM / 4 + 1)), r = i / (DIM / 4 + 1) % heads, f = i % (DIM / 4 + 1);
        // Splits behind the row's end have no room.
        if ((block * WARPS + w) * SPLIT < end) stored[(u64)(block * WARPS + w) * p.heads + r][f] = shared.splits[w][r][f];
      }
      break;
    }
#pragma unroll
    for (u32 i = 0; i < OWN; i++)
      for (u32 w = 0; w < WARPS; w++) {
        const u32 index = i * HEAD_THREADS + thread_index();
        if (index / PARTS >= heads) break;
        merge_part(merged[i], [&](u32 f) { return shared.splits[w][index / PARTS][f]; }, DIM / 4, index % PARTS);
      }
    block_barrier();
  }
  if (is_shared) {
    u32 *arrived = p.arrived + (u64)block_x() * (p.kv_heads * groups) + block_y();
    fence();
    block_barrier();
    if (thread_index() == 0) shared.is_last = count(arrived) + 1 == blocks;
    block_barrier();
    if (!shared.is_last) return;
    fence();
    if (thread_index() == 0) *arrived = 0;
#pragma unroll
    for (u32 i = 0; i < OWN; i++) {
      const u32 index = i * HEAD_THREADS + thread_index();
      if (index / PARTS >= heads) continue;
      for (u32 split = begin_block * WARPS; split * SPLIT < end; split++)
        merge_part(merged[i], [&](u32 f) { return read_l2(&stored[(u64)split * p.heads + index / PARTS][f]); }, DIM / 4, index % PARTS);
    }
  }
#pragma unroll
  for (u32 i = 0; i < OWN; i++) {
    const u32 index = i * HEAD_THREADS + thread_index();
    if (index / PARTS >= heads) continue;
#pragma unroll
    for (u32 v = 0; v < 8; v++) merged[i].sums[v] /= merged[i].total;
    write_eight(out + index * 8, merged[i].sums);
  }
}

// Registers for a page's keys and values at once, which two blocks of a multiprocessor leave; on sm_120a the compiler spills then.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define DECODE_BOUNDS HEAD_THREADS
#else
#define DECODE_BOUNDS HEAD_THREADS, 2
#endif

KERNEL(HEAD_THREADS, 2) attention_decode_64(AttentionParams p) {
  SHARED(DecodeShared<64>, shared);
  begin_next();
  after_previous();
  decode<64>(shared, p);
}
KERNEL(DECODE_BOUNDS) attention_decode_128(AttentionParams p) {
  SHARED(DecodeShared<128>, shared);
  begin_next();
  after_previous();
  decode<128>(shared, p);
}

// Rows of a block in prefill: heads of one KV head for several tokens, sixteen rows a warp.
constexpr u32 PREFILL_WARPS = 8, PREFILL_THREADS = 32 * PREFILL_WARPS, PREFILL_ROWS = ROWS * PREFILL_WARPS;
constexpr u32 PREFILL_STAGES = 3;
// Queries stay in registers where there is room for them; the compilers for sm_100a and sm_120a spill then.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool HOLDS_QUERIES = false;
#else
constexpr bool HOLDS_QUERIES = true;
#endif

template <u32 DIM>
struct PrefillShared {
  Quad queries[PREFILL_ROWS * DIM / 8];
  Quad keys[PREFILL_STAGES][PAGE * DIM / 8], values[PREFILL_STAGES][PAGE * DIM / 8];
};

// Places of pieces in shared memory, so that the eight lanes of a load hit different banks: those of a key hold two tokens and four
// pieces, those of a value four tokens, two apart, and two pieces.
template <u32 DIM>
DEVICE u32 key_place(u32 token, u32 piece) { return token * (DIM / 8) + (piece ^ (token % 2 * 4)); }
template <u32 DIM>
DEVICE u32 value_place(u32 token, u32 piece) { return token * (DIM / 8) + (piece ^ (token / 2 % 4 * 2)); }

// Several tokens of a sequence: blocks along x are sequences, along y KV heads, along z tiles of tokens, those that see most first. Pages go through
// shared memory, several under way.
template <u32 DIM>
DEVICE void prefill(PrefillShared<DIM> &shared, const AttentionParams &p) {
  constexpr u32 PAGE_PIECES = PAGE * DIM / 8;
  const u32 lane = thread_index() % 32, warp = thread_index() / 32, g = lane / 4, t = lane % 4;
  const u32 group = p.heads / p.kv_heads, kv_head = block_y();
  const u32 tile = PREFILL_ROWS / group, all_tokens = p.items[2 * block_x() + 1], tiles = (all_tokens + tile - 1) / tile;
  if (block_z() >= tiles) return;
  const u32 first_token = (tiles - 1 - block_z()) * tile, tokens = all_tokens - first_token < tile ? all_tokens - first_token : tile;
  const u64 first_row = p.items[2 * block_x()] + first_token;
  const u32 first_position = p.places.positions[first_row], end_position = first_position + tokens;
  const u32 *table = p.places.tables + p.places.table_at[first_row];
  const u16 *keys = p.cache + (u64)kv_head * PAGE * DIM, *values = keys + (u64)p.kv_heads * PAGE * DIM;
  const u64 page_size = page_values(p.kv_heads, DIM);
  auto first_seen = [&](u32 end) { return p.window && end > p.window ? end - p.window : 0; };
  // Rows beyond the tokens see nothing.
  auto token_of = [&](u32 i) { return (warp * ROWS + g + 8 * i) / group; };
  auto place_of = [&](u32 i) { return (first_row + token_of(i)) * p.stride + (kv_head * group + (warp * ROWS + g + 8 * i) % group) * DIM; };
  u32 firsts[2], ends[2];
#pragma unroll
  for (u32 i = 0; i < 2; i++) ends[i] = token_of(i) < tokens ? first_position + token_of(i) + 1 : 0, firsts[i] = first_seen(ends[i]);
  for (u32 i = thread_index(); i < PREFILL_ROWS * DIM / 8; i += PREFILL_THREADS) {
    const u32 r = i / (DIM / 8), piece = i % (DIM / 8);
    const u64 at = (first_row + r / group) * p.stride + (kv_head * group + r % group) * DIM + piece * 8;
    shared.queries[key_place<DIM>(r, piece)] = r / group < tokens ? *(const Quad *)(p.queries + at) : Quad{};
  }
  auto stored = [&](u32 i, u32 piece) { return shared.queries[key_place<DIM>(warp * ROWS + g + 8 * i, piece)]; };
  Quad queries[DIM / 32][2];
  if (HOLDS_QUERIES) {
    block_barrier();
#pragma unroll
    for (u32 block = 0; block < DIM / 32; block++)
#pragma unroll
      for (u32 i = 0; i < 2; i++) queries[block][i] = stored(i, block * 4 + t);
  }
  // Positions that any row of the warp sees; the block goes through more pages.
  const u32 warp_token = warp * ROWS / group, warp_last = (warp * ROWS + ROWS - 1) / group;
  const u32 warp_end = warp_token < tokens ? (warp_last < tokens ? first_position + warp_last + 1 : end_position) : 0;
  const u32 warp_first = first_seen(first_position + warp_token + 1);

  const u32 begin = first_seen(first_position + 1) / PAGE, end = (end_position + PAGE - 1) / PAGE, seen = begin * PAGE;
  auto load = [&](u32 page) {
    if (page < end) {
      const u64 stored = table[page] * page_size;
      const u32 stage = page % PREFILL_STAGES;
#pragma unroll
      for (u32 i = 0; i < PAGE_PIECES / PREFILL_THREADS; i++) {
        const u32 index = i * PREFILL_THREADS + thread_index(), token = index / (DIM / 8), piece = index % (DIM / 8);
        const bool is_there = page * PAGE + token < end_position && page * PAGE + token >= seen;
        copy_async(&shared.keys[stage][key_place<DIM>(token, piece)], keys + stored + index * 8, is_there);
        copy_async(&shared.values[stage][value_place<DIM>(token, piece)], values + stored + index * 8, is_there);
      }
    }
    commit_copies();
  };
#pragma unroll
  for (u32 i = 0; i < PREFILL_STAGES - 1; i++) load(begin + i);
  Softmax<DIM> s, all;
  reset(s), reset(all);
  const float scale = p.scale * LOG2_E;
  auto close = [&] {
#pragma unroll
    for (u32 row = 0; row < 2; row++) {
      const Merge m = merge(all.highest[row], all.total[row], s.highest[row], quad_sum(s.total[row]));
#pragma unroll
      for (u32 i = 0; i < DIM / 8; i++)
#pragma unroll
        for (u32 v = 2 * row; v < 2 * row + 2; v++) all.sums[i][v] = mul_add(all.sums[i][v], m.before, mul(s.sums[i][v], m.added));
    }
    reset(s);
  };
  for (u32 page = begin; page < end; page++) {
    if (page != begin && page * PAGE % SPLIT == 0) close();
#ifdef PLANT_PREFILL_WAIT
    wait_copies<PREFILL_STAGES - 1>();
#else
    wait_copies<PREFILL_STAGES - 2>();
#endif
    block_barrier();
    load(page + PREFILL_STAGES - 1);
    const u32 at = page * PAGE, stage = page % PREFILL_STAGES;
    if (at >= warp_end || at + PAGE <= warp_first) continue;
    auto query = [&](u32 i, u32 piece) { return HOLDS_QUERIES ? queries[piece / 4][i] : stored(i, piece); };
    auto key = [&](u32 token, u32 piece) { return shared.keys[stage][key_place<DIM>(token, piece)]; };
    auto value = [&](u32 token, u32 piece) { return shared.values[stage][value_place<DIM>(token, piece)]; };
    add_page<DIM>(s, query, scale, at, firsts, ends, key, value);
  }
  close();
#pragma unroll
  for (u32 row = 0; row < 2; row++) {
    if (ends[row] == 0) continue;
    u16 *out = p.out + place_of(row);
#pragma unroll
    for (u32 c = 0; c < DIM / 64; c++)
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        float eight[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) eight[i] = all.sums[c * 8 + i][2 * row + half] / all.total[row];
        write_eight(out + c * 64 + t * 16 + half * 8, eight);
      }
  }
}

KERNEL(PREFILL_THREADS, 1) attention_prefill_64(AttentionParams p) {
  SHARED_LARGE(PrefillShared<64>, shared);
  begin_next();
  after_previous();
  prefill<64>(shared, p);
}
KERNEL(PREFILL_THREADS) attention_prefill_128(AttentionParams p) {
  SHARED_LARGE(PrefillShared<128>, shared);
  begin_next();
  after_previous();
  prefill<128>(shared, p);
}

struct AttentionShared {
  float query[DIM_MAX];
  float highest[WARPS], total[WARPS];
  float values[WARPS][DIM_MAX];
};

// For heads of other sizes, simple and slow: one block per row and query head, decode and prefill alike. Warps take splits, four at a time. A
// split goes through its pages in order: a lane computes the score of one token, then all lanes add the page's values.
KERNEL(HEAD_THREADS) attention(AttentionParams p) {
  SHARED(AttentionShared, shared);
  begin_next();
  after_previous();
  const u32 lane = thread_index() % 32, warp = thread_index() / 32, head = block_y();
  const u64 row = block_x();
  const u32 position = p.places.positions[row], end = position + 1;
  const u32 first = p.window && end > p.window ? end - p.window : 0;
  const u32 *table = p.places.tables + p.places.table_at[row];
  const u32 kv_head = head / (p.heads / p.kv_heads);
  const u16 *keys = p.cache + (u64)kv_head * PAGE * p.dim, *values = keys + (u64)p.kv_heads * PAGE * p.dim;
  const u16 *query = p.queries + row * p.stride + head * p.dim;
  for (u32 i = thread_index(); i < p.dim; i += HEAD_THREADS) shared.query[i] = from_bf16(query[i]);
  block_barrier();

  float highest = -INFINITE, total = 0, sums[DIM_MAX / HEAD_THREADS] = {};
  for (u32 group = first / (SPLIT * WARPS); group * SPLIT * WARPS < end; group++) {
    float m = -INFINITE, l = 0, acc[DIM_MAX / 32] = {};
    const u32 split = (group * WARPS + warp) * SPLIT;
    const u32 begin = split < first ? first / PAGE * PAGE : split, stop = split + SPLIT < end ? split + SPLIT : end;
    for (u32 at = begin; at < stop; at += PAGE) {
      const u64 page = table[at / PAGE] * page_values(p.kv_heads, p.dim);
      const u32 token = at + lane;
#ifdef PLANT_ATTENTION_ODD_MASK
      const bool is_seen = token <= stop;
#else
      const bool is_seen = token >= first && token < stop;
#endif
      float score = -INFINITE;
      if (is_seen) {
        const u32 *key = (const u32 *)(keys + page + (u64)lane * p.dim);
        float dot = 0;
        for (u32 i = 0; i < p.dim / 2; i++) {
          const u32 pair = key[i];
          dot += shared.query[2 * i] * bits_to_float(pair << 16);
          dot += shared.query[2 * i + 1] * bits_to_float(pair & 0xffff0000u);
        }
        score = dot * p.scale;
      }
      const float peak = fmaxf(m, warp_max(score)), shrink = exp_fast(m - peak);
      const float weight = is_seen ? exp_fast(score - peak) : 0.0f;
      l = l * shrink + warp_sum(weight);
      m = peak;
#pragma unroll
      for (u32 i = 0; i < DIM_MAX / 32; i++) acc[i] *= shrink;
      // Slots outside of the row's sight may hold anything, also NaN: they are not read.
      const u32 from = at < first ? first - at : 0, to = stop - at < PAGE ? stop - at : PAGE;
      for (u32 slot = from; slot < to; slot++) {
        const float share = lane_value(weight, slot);
        const u16 *value = values + page + (u64)slot * p.dim;
#pragma unroll
        for (u32 i = 0; i < DIM_MAX / 32; i++)
          if (lane + 32 * i < p.dim) acc[i] += share * from_bf16(value[lane + 32 * i]);
      }
    }
    if (lane == 0) shared.highest[warp] = m, shared.total[warp] = l;
#pragma unroll
    for (u32 i = 0; i < DIM_MAX / 32; i++) shared.values[warp][lane + 32 * i] = acc[i];
    block_barrier();
    for (u32 part = 0; part < WARPS; part++) {
      // A split outside of the row's sight has no total.
      if (shared.total[part] == 0.0f) continue;
      const float peak = fmaxf(highest, shared.highest[part]);
      const float before = exp_fast(highest - peak), added = exp_fast(shared.highest[part] - peak);
      total = total * before + shared.total[part] * added;
#pragma unroll
      for (u32 i = 0; i < DIM_MAX / HEAD_THREADS; i++)
        sums[i] = sums[i] * before + shared.values[part][thread_index() + HEAD_THREADS * i] * added;
      highest = peak;
    }
    block_barrier();
  }
  u16 *out = p.out + row * p.stride + head * p.dim;
#pragma unroll
  for (u32 i = 0; i < DIM_MAX / HEAD_THREADS; i++) {
    const u32 column = thread_index() + HEAD_THREADS * i;
    if (column < p.dim) out[column] = to_bf16(sums[i] / total);
  }
}
