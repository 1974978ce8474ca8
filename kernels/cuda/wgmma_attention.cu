// Causal attention of several rows of a sequence by the matrix instructions of four warps (`wgmma`), on sm_90a alone.
//
// A block has 128 rows: heads of one KV head for several tokens. Two groups of four warps have 64 of them each; a third group brings keys and
// values, a split of them at a time: 128 tokens, four pages of the table. They go through a ring of slots in shared memory, each with two barriers,
// one for what was brought and one for what was used.
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

template <u32 DIM_>
struct Grouped {
  static constexpr u32 DIM = DIM_, GROUPS = 2, ROWS = GROUPS * GROUP_ROWS, THREADS = (GROUPS + 1) * GROUP_THREADS, HALVES = DIM / 64;
  // Slots of the ring, and those that are under way while another one is begun.
  static constexpr u32 SLOTS = 6, LAG = 2;
  // Of 64 columns each, 128 bytes of each token.
  typedef Quad Slot[HALVES][SPLIT * 8];
  struct alignas(1024) Shared {
    Quad queries[GROUPS][HALVES][GROUP_ROWS * 8];
    Slot slots[SLOTS];
    u64 full[SLOTS], empty[SLOTS], ready[GROUPS];
  };
};

// What a block has to do.
struct Span {
  u32 group, kv_head; // query heads of a KV head, and which one
  u64 first_row;
  u32 tokens, first_position, end_position;
  u32 seen, begin_split, end_split; // first token of the first page that is seen; splits
  const u32 *table;
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

// Brings keys and values of all splits, in turn.
template <class T>
DEVICE void bring(typename T::Shared &shared, const AttentionParams &p, const Span &span) {
  constexpr u32 DIM = T::DIM;
  const u32 first_page = span.seen / PAGE, last_page = (span.end_position - 1) / PAGE;
  const u16 *keys = p.cache + (u64)span.kv_head * PAGE * DIM;
  const u64 page_size = page_values(p.kv_heads, DIM), to_values = (u64)p.kv_heads * PAGE * DIM;
  // Pages outside of the block's sight are not read: another address stands in.
  auto page_of = [&](u32 split, u32 i) {
    const u32 page = split * SPLIT_PAGES + i;
    return span.table[page < first_page ? first_page : page > last_page ? last_page : page];
  };
  u32 next[SPLIT_PAGES];
#pragma unroll
  for (u32 i = 0; i < SPLIT_PAGES; i++) next[i] = page_of(span.begin_split, i);
  Cursor<T::SLOTS> at, published;
  auto publish = [&] {
    publish_shared();
    arrive(&shared.full[published.slot]);
    Cursor<T::SLOTS>::step(published);
  };
  auto begin = [&] {
    const u32 slot = at.slot;
    wait_phase(&shared.empty[slot], at.parity ^ 1);
    return slot;
  };
  u32 begun = 0;
  auto commit = [&] {
    commit_copies();
    Cursor<T::SLOTS>::step(at);
    if (begun++ < T::LAG) return;
#ifdef PLANT_GROUPED_WAIT
    wait_copies<T::LAG + 1>();
#else
    wait_copies<T::LAG>();
#endif
    publish();
  };
  for (u32 split = span.begin_split; split < span.end_split; split++) {
    const u16 *pages[SPLIT_PAGES];
#pragma unroll
    for (u32 i = 0; i < SPLIT_PAGES; i++) pages[i] = keys + next[i] * page_size;
#pragma unroll
    for (u32 i = 0; i < SPLIT_PAGES; i++) next[i] = page_of(split + 1, i);
    const u32 first = split * SPLIT;
    const bool is_whole = first >= span.seen && first + SPLIT <= span.end_position;
    typename T::Slot &key_slot = shared.slots[begin()];
    is_whole ? copy_keys<T, true>(key_slot, pages, first, span) : copy_keys<T, false>(key_slot, pages, first, span);
    commit();
    typename T::Slot &value_slot = shared.slots[begin()];
    is_whole ? copy_values<T, true>(value_slot, pages, to_values, first, span) : copy_values<T, false>(value_slot, pages, to_values, first, span);
    commit();
  }
  static_assert(T::LAG == 2, "slots that are still under way, of two at least");
  wait_copies<1>();
  publish();
  wait_copies<0>();
  publish();
}

// Computes 64 of the block's rows.
template <class T>
DEVICE void attend(typename T::Shared &shared, const AttentionParams &p, const Span &span) {
  constexpr u32 DIM = T::DIM, HALVES = T::HALVES, SLOTS = T::SLOTS;
  const u32 warp = thread_index() / 32, lane = thread_index() % 32, g = lane / 4, t = lane % 4, own = uniform(thread_index() / GROUP_THREADS);
  auto first_seen = [&](u32 end) { return p.window && end > p.window ? end - p.window : 0; };
  // Rows beyond the tokens see what the last token sees, and are not written.
  auto end_of = [&](u32 row) { return span.first_position + (row / span.group < span.tokens ? row / span.group : span.tokens - 1) + 1; };
  const u32 rows[2] = {warp * 16 + g, warp * 16 + g + 8};
  const u32 ends[2] = {end_of(rows[0]), end_of(rows[1])}, firsts[2] = {first_seen(ends[0]), first_seen(ends[1])};
  // What the group's first and last row see.
  const u32 low_end = end_of(own * GROUP_ROWS), high_end = end_of(own * GROUP_ROWS + GROUP_ROWS - 1), low_first = first_seen(low_end), high_first = first_seen(high_end);
  const bool is_idle = own * GROUP_ROWS / span.group >= span.tokens;
  const u32 begin = uniform(is_idle ? span.end_split : low_first / SPLIT), end = uniform(is_idle ? span.end_split : (high_end + SPLIT - 1) / SPLIT);
  const float scale = p.scale * LOG2_E;
  for (u32 i = thread_index() % GROUP_THREADS; i < GROUP_ROWS * DIM / 4; i += GROUP_THREADS) {
    const u32 row = own * GROUP_ROWS + i / (DIM / 4), unit = i % (DIM / 4), token = row / span.group;
    const u64 from = (span.first_row + token) * p.stride + (span.kv_head * span.group + row % span.group) * DIM + unit * 4;
    *unit_of(shared.queries[own][unit / 16], row % GROUP_ROWS, unit % 16) = token < span.tokens ? *(const Pair *)(p.queries + from) : Pair{};
  }
  publish_shared();
  arrive(&shared.ready[own]);
  wait_phase(&shared.ready[own], 0);
  Cursor<SLOTS> at;
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
  const u64 queries = describe_tile(shared_address(shared.queries[own]), 1024, 16);
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
    auto add_split = [&](u32 split) {
      const u32 first = split * SPLIT;
#pragma unroll
      for (u32 j = 0; j < SPLIT / 8; j++)
#pragma unroll
        for (u32 v = 0; v < 4; v++) scores[j][v] = mul(scores[j][v], scale);
      if (first < high_first || first + SPLIT > low_end) {
#pragma unroll
        for (u32 j = 0; j < SPLIT / 8; j++)
#pragma unroll
          for (u32 v = 0; v < 4; v++) {
            const u32 position = first + j * 8 + 2 * t + v % 2;
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
      }
    };
    answer(ask());
    // The last split apart, without a branch: between matrix instructions the compiler would wait at one.
    for (u32 split = begin; split + 1 < end; split++) {
      add_split(split);
      const u32 key_slot = ask();
      wait_group<1>();
      settle(sums);
      release(value_slot);
      close();
      answer(key_slot);
    }
    add_split(end - 1);
    wait_group<0>();
    settle(sums);
    release(value_slot);
    close();
  }
  skip(span.end_split - end);
#pragma unroll
  for (u32 row = 0; row < 2; row++) {
    const u32 token = rows[row] / span.group, head = rows[row] % span.group;
    if (token >= span.tokens) continue;
    u32 *out = (u32 *)(p.out + (span.first_row + token) * p.stride + (span.kv_head * span.group + head) * DIM) + t;
#pragma unroll
    for (u32 i = 0; i < DIM / 8; i++) out[i * 4] = pack_bf16(all[i][2 * row] / total[row], all[i][2 * row + 1] / total[row]);
  }
}

// Blocks along x are sequences, along y KV heads, along z tiles of tokens, those that see most first.
template <class T>
DEVICE void attend_grouped(typename T::Shared &shared, const AttentionParams &p) {
  Span span;
  span.group = p.heads / p.kv_heads, span.kv_head = block_y();
  const u32 tile = T::ROWS / span.group, all_tokens = p.items[2 * block_x() + 1], tiles = (all_tokens + tile - 1) / tile;
  if (block_z() >= tiles) return;
  const u32 first_token = (tiles - 1 - block_z()) * tile;
  span.tokens = all_tokens - first_token < tile ? all_tokens - first_token : tile;
  span.first_row = p.items[2 * block_x()] + first_token;
  span.first_position = p.places.positions[span.first_row], span.end_position = span.first_position + span.tokens;
  span.table = p.places.tables + p.places.table_at[span.first_row];
  const u32 first_seen = p.window && span.first_position + 1 > p.window ? span.first_position + 1 - p.window : 0;
  span.seen = first_seen / PAGE * PAGE, span.begin_split = first_seen / SPLIT, span.end_split = (span.end_position + SPLIT - 1) / SPLIT;
  if (thread_index() < T::SLOTS) {
    init_phases(&shared.full[thread_index()], GROUP_THREADS);
    // One lane of each warp.
    init_phases(&shared.empty[thread_index()], T::GROUPS * GROUP_THREADS / 32);
  }
  if (thread_index() < T::GROUPS) init_phases(&shared.ready[thread_index()], GROUP_THREADS);
  block_barrier();
  if (uniform(thread_index() / GROUP_THREADS) == T::GROUPS) {
    fewer_registers<24>();
    bring<T>(shared, p, span);
  } else {
    more_registers<240>();
    attend<T>(shared, p, span);
  }
}

KERNEL(Grouped<64>::THREADS, 1) attention_grouped_64(AttentionParams p) {
  SHARED_LARGE(Grouped<64>::Shared, shared);
  attend_grouped<Grouped<64>>(shared, p);
}
KERNEL(Grouped<128>::THREADS, 1) attention_grouped_128(AttentionParams p) {
  SHARED_LARGE(Grouped<128>::Shared, shared);
  attend_grouped<Grouped<128>>(shared, p);
}
