// Causal attention of several rows of a sequence by the matrix instructions of four warps (`wgmma`), on sm_90a alone.
//
// A block stays on its multiprocessor and takes one tile after the other: 128 rows, heads of one KV head for several tokens. Two groups of four warps
// have 64 of them each. A third group brings the queries of the next tile, and keys and values, a split of them at a time: 128 tokens, four pages of
// the table. They go through a ring of slots in shared memory, each with two barriers, one for what was brought and one for what was used.
//
// Of a split a group computes all scores, 64 rows × 128 tokens. Then it adds page by page, as `add_page` in `attention.cu` does: the instructions of
// a page run while the weights of the next page are computed, those for the scores of the next split while this split is merged, and what one group
// leaves idle the other one takes. Every sum has the order that it has there, so the bits are the same:
// - An instruction of scores adds values of depth as a lane has them there: four neighbours of every eight. Units of eight bytes lie in that
//   order in shared memory, those of keys and of queries.
// - A page that a row does not see changes nothing: its weights are 0 and its factor is 1. So a split is always four pages, of which those that
//   nobody sees are zeros.
//
// Cycles of a split for 64 rows of 128 values: matrix instructions 1,024 (4,096 operations per cycle); shared memory 640 for their operands and
// 256 for half of what is brought; 2^x 512 (16 per cycle); each scheduler about 800.
#include "attention.cuh"

constexpr u32 GROUP_THREADS = 128, GROUP_ROWS = 64, SPLIT_PAGES = SPLIT / PAGE;

// A tile of rows: what a block does at a time.
struct Span {
  u32 group, kv_head; // query heads of a KV head, and which one
  u64 first_row;
  u32 tokens, first_position, end_position; // no tokens: there are no more tiles
  u32 seen, begin_split, end_split;         // first token of the first page that is seen; splits
  const u32 *table;
};

template <u32 DIM_>
struct Grouped {
  static constexpr u32 DIM = DIM_, GROUPS = 2, ROWS = GROUPS * GROUP_ROWS, THREADS = (GROUPS + 1) * GROUP_THREADS, HALVES = DIM / 64;
  // Slots of the ring, and those that are under way while another one is begun.
  static constexpr u32 SLOTS = 5, LAG = 2;
  // Of 64 columns each, 128 bytes of each token.
  typedef Quad Slot[HALVES][SPLIT * 8];
  typedef Quad Rows[HALVES][GROUP_ROWS * 8];
  // Queries of the tile and of the next one; a tile is done when its queries are free.
  struct alignas(1024) Shared {
    Rows queries[2][GROUPS];
    Slot slots[SLOTS];
    Span spans[2];
    u64 full[SLOTS], empty[SLOTS], ready[2], done[2], ahead[2];
  };
};

// Place of the slot that comes next: its parity changes with every round of the ring.
template <u32 SLOTS>
struct Cursor {
  u32 slot = 0, parity = 0;
  DEVICE void step(Cursor &c) { c.parity ^= c.slot + 1 == SLOTS, c.slot = c.slot + 1 == SLOTS ? 0 : c.slot + 1; }
};

// Unit of eight bytes `unit` of row `row` in a tile of 64 columns.
DEVICE Pair *unit_of(Quad *tile, u32 row, u32 unit) {
  const u32 place = unit / 8 * 8 + unit % 2 * 4 + unit % 8 / 2;
  return (Pair *)(tile + row * 8 + (place / 2 ^ row % 8)) + place % 2;
}

// Begins to copy the keys of a split that begins at token `first`: zeros for tokens that the block does not see, unless it is whole.
template <class T, bool IS_WHOLE>
DEVICE void copy_keys(typename T::Slot &slot, const u16 *const (&pages)[SPLIT_PAGES], u32 first, const Span &span) {
  // The group takes so many tokens at a time; a thread has one unit of each.
  constexpr u32 UNITS = T::DIM / 4, TOKENS = GROUP_THREADS / UNITS;
  const u32 thread = thread_index() % GROUP_THREADS, token = thread / UNITS, unit = thread % UNITS;
  const u32 before = opaque(first + token - span.seen), seen = opaque(span.end_position - span.seen);
  // Where the unit of a token lies depends on the token's place among eight.
  char *const to[2] = {(char *)unit_of(slot[unit / 16], token, unit % 16), (char *)unit_of(slot[unit / 16], token + TOKENS, unit % 16) - TOKENS * 128};
#pragma unroll
  for (u32 page = 0; page < SPLIT_PAGES; page++) {
    const u16 *from = opaque(pages[page] + thread * 4);
#pragma unroll
    for (u32 i = 0; i < PAGE / TOKENS; i++) {
      const u32 at = page * PAGE + i * TOKENS;
      copy_async_8(to[i % 2] + at * 128, from + i * TOKENS * T::DIM, IS_WHOLE || at + before < seen);
    }
  }
}

// The same for values, which are `to_values` behind their keys.
template <class T, bool IS_WHOLE>
DEVICE void copy_values(typename T::Slot &slot, const u16 *const (&pages)[SPLIT_PAGES], u64 to_values, u32 first, const Span &span) {
  constexpr u32 PIECES = T::DIM / 8, TOKENS = GROUP_THREADS / PIECES;
  static_assert(TOKENS % 8 == 0, "a thread's tokens have one place among eight");
  const u32 thread = thread_index() % GROUP_THREADS, token = thread / PIECES, piece = thread % PIECES;
  const u32 before = opaque(first + token - span.seen), seen = opaque(span.end_position - span.seen);
  char *const to = (char *)&slot[piece / 8][token * 8 + (piece % 8 ^ token % 8)];
#pragma unroll
  for (u32 page = 0; page < SPLIT_PAGES; page++) {
    const u16 *from = opaque(pages[page] + to_values + thread * 8);
#pragma unroll
    for (u32 i = 0; i < PAGE / TOKENS; i++) {
      const u32 at = page * PAGE + i * TOKENS;
      copy_async(to + at * 128, from + i * TOKENS * T::DIM, IS_WHOLE || at + before < seen);
    }
  }
}

// Begins to copy the queries of a tile, each head and token a row; rows beyond the tokens are zeros.
template <class T>
DEVICE void copy_queries(typename T::Rows (&to)[T::GROUPS], const AttentionParams &p, const Span &span) {
  constexpr u32 UNITS = T::DIM / 4;
  const u32 thread = thread_index() % GROUP_THREADS, unit = thread % UNITS;
#pragma unroll 1
  for (u32 row = thread / UNITS; row < T::ROWS; row += GROUP_THREADS / UNITS) {
    const u32 token = row / span.group, head = row % span.group;
    const bool is_there = token < span.tokens;
    const u16 *from = p.queries + (span.first_row + (is_there ? token : 0)) * p.stride + (span.kv_head * span.group + head) * T::DIM + unit * 4;
    copy_async_8(unit_of(to[row / GROUP_ROWS][unit / 16], row % GROUP_ROWS, unit % 16), from, is_there);
  }
}

// Finds tile `index`, of sequences, KV heads, and tiles of tokens, those that see most first; false if its sequence has not so many.
template <class T>
DEVICE bool find(Span &span, const AttentionParams &p, u32 index) {
  span.group = p.heads / p.kv_heads, span.kv_head = index / p.sequences % p.kv_heads;
  const u32 *item = p.items + index % p.sequences * 2;
  const u32 size = T::ROWS / span.group, tiles = (item[1] + size - 1) / size, tile = index / (p.sequences * p.kv_heads);
  if (tile >= tiles) return false;
  const u32 first_token = (tiles - 1 - tile) * size;
  span.tokens = item[1] - first_token < size ? item[1] - first_token : size;
  span.first_row = item[0] + first_token;
  span.first_position = p.places.positions[span.first_row], span.end_position = span.first_position + span.tokens;
  span.table = p.places.tables + p.places.table_at[span.first_row];
  const u32 first_seen = p.window && span.first_position + 1 > p.window ? span.first_position + 1 - p.window : 0;
  span.seen = first_seen / PAGE * PAGE, span.begin_split = first_seen / SPLIT, span.end_split = (span.end_position + SPLIT - 1) / SPLIT;
  return true;
}

// Brings the queries, keys and values of the block's tiles.
template <class T>
DEVICE void bring(typename T::Shared &shared, const AttentionParams &p) {
  const u64 page_size = page_values(p.kv_heads, T::DIM), to_values = (u64)p.kv_heads * PAGE * T::DIM;
  Cursor<T::SLOTS> at;
  Cursor<2> turn;
  // Barriers of what is under way.
  u64 *first = nullptr, *second = nullptr;
  u32 begun = 0;
  auto publish = [&] {
    publish_shared();
    arrive(first);
  };
  auto commit = [&](u64 *barrier) {
    commit_copies();
    if (begun++ >= T::LAG) {
#ifdef PLANT_GROUPED_WAIT
      wait_copies<T::LAG + 1>();
#else
      wait_copies<T::LAG>();
#endif
      publish();
    }
    first = second, second = barrier;
  };
  auto begin = [&] {
    const u32 slot = at.slot;
    wait_phase(&shared.empty[slot], at.parity ^ 1);
    Cursor<T::SLOTS>::step(at);
    return slot;
  };
  auto begin_tile = [&](const Span &span) {
    wait_phase(&shared.done[turn.slot], turn.parity ^ 1);
    if (thread_index() % GROUP_THREADS == 0) shared.spans[turn.slot] = span;
    const u32 slot = turn.slot;
    Cursor<2>::step(turn);
    return slot;
  };
  const u32 tiles = p.sequences * p.kv_heads * p.depth, blocks = blocks_x();
  for (u32 round = 0; round * blocks < tiles; round++) {
    // There and back, so that each block has its share of long tiles.
    const u32 index = round * blocks + (round % 2 ? blocks - 1 - block_x() : block_x());
    Span span;
    if (index >= tiles || !find<T>(span, p, index)) continue;
    const u32 tile = begin_tile(span);
    copy_queries<T>(shared.queries[tile], p, span);
    commit(&shared.ready[tile]);
    const u16 *keys = p.cache + (u64)span.kv_head * PAGE * T::DIM;
    const u32 first_page = span.seen / PAGE, last_page = (span.end_position - 1) / PAGE;
    // Pages outside of the tile's sight are not read: another address stands in.
    auto page_of = [&](u32 split, u32 i) {
      const u32 page = split * SPLIT_PAGES + i;
      return span.table[page < first_page ? first_page : page > last_page ? last_page : page];
    };
    u32 next[SPLIT_PAGES];
#pragma unroll
    for (u32 i = 0; i < SPLIT_PAGES; i++) next[i] = page_of(span.begin_split, i);
    for (u32 split = span.begin_split; split < span.end_split; split++) {
      const u16 *pages[SPLIT_PAGES];
#pragma unroll
      for (u32 i = 0; i < SPLIT_PAGES; i++) pages[i] = keys + next[i] * page_size;
#pragma unroll
      for (u32 i = 0; i < SPLIT_PAGES; i++) next[i] = page_of(split + 1, i);
      const u32 token = split * SPLIT, key_slot = begin();
      const bool is_whole = token >= span.seen && token + SPLIT <= span.end_position;
      is_whole ? copy_keys<T, true>(shared.slots[key_slot], pages, token, span) : copy_keys<T, false>(shared.slots[key_slot], pages, token, span);
      commit(&shared.full[key_slot]);
      const u32 value_slot = begin();
      is_whole ? copy_values<T, true>(shared.slots[value_slot], pages, to_values, token, span)
               : copy_values<T, false>(shared.slots[value_slot], pages, to_values, token, span);
      commit(&shared.full[value_slot]);
    }
  }
  Span none;
  none.tokens = 0;
  commit(&shared.ready[begin_tile(none)]);
  static_assert(T::LAG == 2, "what is under way at the end");
  wait_copies<1>();
  if (begun > 1) publish();
  wait_copies<0>();
  first = second;
  publish();
}

// Computes 64 rows of a tile. `at` is the place in the ring.
template <class T>
DEVICE void attend(typename T::Shared &shared, Cursor<2> turn, Cursor<T::SLOTS> &at, const AttentionParams &p) {
  constexpr u32 DIM = T::DIM, HALVES = T::HALVES, SLOTS = T::SLOTS;
  const u32 lane = thread_index() % 32, own = uniform(thread_index() / GROUP_THREADS);
  const Span &span = shared.spans[turn.slot];
  auto first_seen = [&](u32 end) { return p.window && end > p.window ? end - p.window : 0; };
  // Rows beyond the tokens see what the last token sees, and are not written.
  auto end_of = [&](u32 row) { return span.first_position + (row / span.group < span.tokens ? row / span.group : span.tokens - 1) + 1; };
  // What the group's first and last row see.
  const u32 low_end = end_of(own * GROUP_ROWS), high_end = end_of(own * GROUP_ROWS + GROUP_ROWS - 1), low_first = first_seen(low_end), high_first = first_seen(high_end);
  const bool is_idle = own * GROUP_ROWS / span.group >= span.tokens;
  const u32 begin = uniform(is_idle ? span.end_split : low_first / SPLIT), end = uniform(is_idle ? span.end_split : (high_end + SPLIT - 1) / SPLIT);
  const float scale = p.scale * LOG2_E;
  auto release = [&](u32 slot) { arrive_if(&shared.empty[slot], lane == 0); };
  // Waits for what comes next in the ring.
  auto take = [&] {
    const u32 slot = at.slot;
    wait_phase(&shared.full[slot], at.parity);
    Cursor<SLOTS>::step(at);
    return slot;
  };
  auto skip = [&](u32 splits) {
    for (u32 i = 0; i < 2 * splits; i++) release(take());
  };
  float scores[SPLIT / 8][4], sums[DIM / 8][4], all[DIM / 8][4], highest[2], total[2];
#pragma unroll
  for (u32 row = 0; row < 2; row++) highest[row] = -INFINITE, total[row] = 0;
#pragma unroll
  for (u32 i = 0; i < DIM / 8; i++)
#pragma unroll
    for (u32 v = 0; v < 4; v++) all[i][v] = 0;

  constexpr u32 QUERY_HALF = GROUP_ROWS * 128, SLOT_HALF = SPLIT * 128;
  const u64 queries = describe_tile(shared_address(shared.queries[turn.slot][own]), 1024, 16);
  const u64 keys = describe_tile(shared_address(shared.slots), 1024, 16);
#ifdef PLANT_GROUPED_OFFSETS
  const u64 values = describe_tile(shared_address(shared.slots), SLOT_HALF, 1024);
#else
  const u64 values = describe_tile(shared_address(shared.slots), 1024, SLOT_HALF);
#endif
  auto begin_scores = [&](u32 slot) {
    const u64 key = keys + slot * (sizeof(typename T::Slot) / 16);
#pragma unroll
    for (u32 half = 0; half < HALVES; half++)
#pragma unroll
      for (u32 k = 0; k < 4; k++)
        mma_rows(scores, queries + half * (QUERY_HALF / 16) + k * 2, key + half * (SLOT_HALF / 16) + k * 2, half + k != 0);
  };

  float peaks[SPLIT_PAGES][2], split_total[2];
  // Merges what was summed of a split.
  auto close = [&] {
#pragma unroll
    for (u32 row = 0; row < 2; row++) {
      const Merge m = merge(highest[row], total[row], peaks[SPLIT_PAGES - 1][row], quad_sum(split_total[row]));
#pragma unroll
      for (u32 i = 0; i < DIM / 8; i++)
#pragma unroll
        for (u32 v = 2 * row; v < 2 * row + 2; v++) all[i][v] = mul_add(all[i][v], m.before, mul(sums[i][v], m.added));
    }
  };

  skip(begin - span.begin_split);
  if (begin < end) {
    u32 value_slot = 0;
    auto ask = [&] {
      const u32 slot = take();
      begin_group();
      begin_scores(slot);
      commit_group();
      return slot;
    };
    auto answer = [&](u32 slot) {
      wait_group<0>();
      settle(scores);
      release(slot);
    };
    // Adds the pages of a split whose scores are there; the instructions of the last page are under way.
    auto add_split = [&](u32 split, bool is_last) {
      const u32 first = split * SPLIT;
#pragma unroll
      for (u32 j = 0; j < SPLIT / 8; j++)
#pragma unroll
        for (u32 v = 0; v < 4; v++) scores[j][v] = mul(scores[j][v], scale);
      if (is_last || first < high_first || first + SPLIT > low_end) {
        // Computed here, rather than held in registers all along.
        const u32 thread = opaque(thread_index()), row = thread / 32 * 16 + thread % 32 / 4, ends[2] = {end_of(row), end_of(row + 8)};
        const u32 firsts[2] = {first_seen(ends[0]), first_seen(ends[1])};
#pragma unroll
        for (u32 j = 0; j < SPLIT / 8; j++)
#pragma unroll
          for (u32 v = 0; v < 4; v++) {
            const u32 position = first + j * 8 + thread % 4 * 2 + v % 2;
            scores[j][v] = position >= firsts[v / 2] && position < ends[v / 2] ? scores[j][v] : -INFINITE;
          }
      }
      // Highest scores up to the end of each page.
#pragma unroll
      for (u32 page = 0; page < SPLIT_PAGES; page++)
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
          float peak = -INFINITE;
#pragma unroll
          for (u32 j = page * 4; j < page * 4 + 4; j++) peak = fmaxf(peak, fmaxf(scores[j][2 * row], scores[j][2 * row + 1]));
          peaks[page][row] = peak;
        }
#pragma unroll
      for (u32 page = 0; page < SPLIT_PAGES; page++)
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
          const float peak = quad_max(peaks[page][row]);
          peaks[page][row] = page == 0 ? peak : fmaxf(peaks[page - 1][row], peak);
        }
#pragma unroll
      for (u32 page = 0; page < SPLIT_PAGES; page++) {
        float shrink[2];
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
          const float peak = peaks[page][row], shift = peak == -INFINITE ? 0.0f : peak;
          shrink[row] = page == 0 ? 0.0f : exp2_fast(peaks[page == 0 ? 0 : page - 1][row] - shift);
          float sum = 0;
#pragma unroll
          for (u32 j = page * 4; j < page * 4 + 4; j++)
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
              float &score = scores[j][2 * row + i];
              score = exp2_fast(score - shift);
              sum += score;
            }
          split_total[row] = page == 0 ? sum : mul_add(split_total[row], shrink[row], sum);
        }
        u32 weights[2][4];
#pragma unroll
        for (u32 block = 0; block < 2; block++)
#pragma unroll
          for (u32 i = 0; i < 4; i++) {
            const float (&from)[4] = scores[page * 4 + 2 * block + i / 2];
            weights[block][i] = pack_bf16(from[i % 2 * 2], from[i % 2 * 2 + 1]);
          }
        if (page == 0) {
          value_slot = take();
        } else {
          wait_group<0>();
          settle(sums);
#pragma unroll
          for (u32 i = 0; i < DIM / 8; i++)
#pragma unroll
            for (u32 v = 0; v < 4; v++) sums[i][v] = mul(sums[i][v], shrink[v / 2]);
        }
        const u64 value = values + value_slot * (sizeof(typename T::Slot) / 16) + page * (PAGE * 128 / 16);
        begin_group();
#pragma unroll
        for (u32 block = 0; block < 2; block++) mma_columns(sums, weights[block], value + block * (16 * 128 / 16), page + block != 0);
        commit_group();
        if (page == 0) arrive_if(&shared.ahead[turn.slot], lane == 0 && own == 0 && split == begin);
      }
    };
    // The first group is half a split ahead, and stays so: one has matrix instructions under way where the other one computes weights. On an H100 that
    // pays 10 % where there are many splits, and costs where there are few.
    if (own != 0 && end - begin > 8) wait_phase(&shared.ahead[turn.slot], turn.parity);
    answer(ask());
    // The last split apart, without a branch: between matrix instructions the compiler would wait at one.
    for (u32 split = begin; split + 1 < end; split++) {
      add_split(split, false);
      const u32 key_slot = ask();
      wait_group<1>();
      settle(sums);
      release(value_slot);
      close();
      answer(key_slot);
    }
    add_split(end - 1, true);
    wait_group<0>();
    settle(sums);
    release(value_slot);
    close();
  }
  skip(span.end_split - end);
#pragma unroll
  for (u32 row = 0; row < 2; row++) {
    const u32 thread = opaque(thread_index()), index = thread / 32 * 16 + thread % 32 / 4 + 8 * row, token = index / span.group, head = index % span.group;
    if (token >= span.tokens) continue;
    u32 *out = (u32 *)(p.out + (span.first_row + token) * p.stride + (span.kv_head * span.group + head) * DIM) + thread % 4;
#pragma unroll
    for (u32 i = 0; i < DIM / 8; i++) out[i * 4] = pack_bf16(all[i][2 * row] / total[row], all[i][2 * row + 1] / total[row]);
  }
}

// Blocks along x share the tiles.
template <class T>
DEVICE void attend_grouped(typename T::Shared &shared, const AttentionParams &p) {
  const u32 thread = thread_index(), own = uniform(thread / GROUP_THREADS);
  // Of a group that computes, one lane of each warp arrives.
  constexpr u32 WARPS = T::GROUPS * GROUP_THREADS / 32;
  if (thread < T::SLOTS) init_phases(&shared.full[thread], GROUP_THREADS), init_phases(&shared.empty[thread], WARPS);
  if (thread < 2) init_phases(&shared.ready[thread], GROUP_THREADS), init_phases(&shared.done[thread], WARPS), init_phases(&shared.ahead[thread], GROUP_THREADS / 32);
  block_barrier();
  if (own == T::GROUPS) {
    fewer_registers<24>();
    bring<T>(shared, p);
    return;
  }
  more_registers<240>();
  Cursor<T::SLOTS> at;
  for (Cursor<2> turn;; Cursor<2>::step(turn)) {
    wait_phase(&shared.ready[turn.slot], turn.parity);
    if (uniform(shared.spans[turn.slot].tokens) == 0) return;
    attend<T>(shared, turn, at, p);
    arrive_if(&shared.done[turn.slot], thread % 32 == 0);
  }
}

KERNEL(Grouped<64>::THREADS, 1) attention_grouped_64(AttentionParams p) {
  SHARED_LARGE(Grouped<64>::Shared, shared);
  begin_next();
  after_previous();
  attend_grouped<Grouped<64>>(shared, p);
}
KERNEL(Grouped<128>::THREADS, 1) attention_grouped_128(AttentionParams p) {
  SHARED_LARGE(Grouped<128>::Shared, shared);
  begin_next();
  after_previous();
  attend_grouped<Grouped<128>>(shared, p);
}
