// Every kernel on the host model against float64: ragged sizes, outputs poisoned with NaN, permuted pages with NaN in unused slots.
//
//   check [START]    START: runs only the group of GROUPS whose name START begins with, up to the first of the checks so named that fails
//
// Prints a line per check and ends with 1 if one fails. Compiled with -DPLANT_…, a kernel has a bug, and the program must fail.
// Tolerances are of ||out - want|| / ||want||: 3e-3 for bf16 results of f32 sums (half a unit of 8 bits is 2e-3), 1e-5 for f32 results.
#define PENSTOCK_HOST
#include "../rows.cu"
#include "../gemm.cu"
#include "../wgmma.cu"
#include "../wgmma_fed.cu"
#include "../attention.cu"
#include "../wgmma_attention.cu"
#include "../sampling.cu"

#include <algorithm>
#include <functional>
#include <random>
#include <string>

using std::vector;

static int failures = 0;
static std::string wanted;
static std::mt19937_64 noise(7);

static void verdict(const std::string &name, const std::string &found, bool good) {
  printf("%-56s %s%s\n", name.c_str(), found.c_str(), good ? "" : " FAILED");
  failures += !good;
  if (!good && !wanted.empty() && name.compare(0, wanted.size(), wanted) == 0) exit(1);
}

static float random_float() { return std::normal_distribution<float>()(noise); }

static vector<u16> random_bf16(size_t count) {
  vector<u16> values(count);
  for (auto &value : values) value = to_bf16(random_float());
  return values;
}

static vector<float> random_floats(size_t count, float scale, float centre) {
  vector<float> values(count);
  for (auto &value : values) value = random_float() * scale + centre;
  return values;
}

// Rows of `columns` random values, padded with zeros to `stride`.
static vector<u16> padded(size_t rows, size_t columns, size_t stride) {
  vector<u16> values(rows * stride);
  for (size_t row = 0; row < rows; row++)
    for (size_t i = 0; i < columns; i++) values[row * stride + i] = to_bf16(random_float());
  return values;
}

template <class P>
static void launch(void (*kernel)(P), model::Grid grid, unsigned threads, const P &params) {
  struct Call {
    void (*kernel)(P);
    P params;
  } call = {kernel, params};
  model::run(grid, threads, [](const void *c) { ((const Call *)c)->kernel(((const Call *)c)->params); }, &call);
}

static void report(const std::string &name, size_t count, double limit, std::function<double(size_t)> got, std::function<double(size_t)> want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < count; i++) {
    const double w = want(i), d = got(i) - w;
    error += d * d, norm += w * w;
  }
  const double far = sqrt(error / norm);
  const bool good = far <= limit;
  char found[64];
  snprintf(found, sizeof found, "%.3e of %.0e", far, limit);
  verdict(name, found, good);
}

static void check_rows(u32 rows, u32 columns) {
  const std::string size = " " + std::to_string(rows) + " x " + std::to_string(columns);
  const u32 stride = (columns + 63) / 64 * 64, vocab = 50;
  auto table = padded(vocab, columns, stride);
  vector<u32> tokens(rows), sampled;
  for (u32 row = 0; row < rows; row++) {
    tokens[row] = noise() % vocab;
    if (row % 2 == 0) sampled.push_back(row);
  }
  vector<float> x(rows * stride, NAN);
  launch(embed, {rows}, ROW_THREADS, EmbedParams{x.data(), table.data(), tokens.data(), columns, stride, stride});
  auto embedded = [&](size_t i) { return (double)from_bf16(table[tokens[i / columns] * stride + i % columns]); };
  report("embed" + size, rows * columns, 0, [&](size_t i) { return x[i / columns * stride + i % columns]; }, embedded);
  auto weight = random_floats(columns, 0.1f, 1);
  vector<u16> out(rows * stride, 0xffff);
  launch(rmsnorm, {rows}, ROW_THREADS, RmsnormParams{out.data(), x.data(), weight.data(), columns, stride, stride, 1e-6f});
  vector<double> inverse(rows);
  for (u32 row = 0; row < rows; row++) {
    double sum = 0;
    for (u32 i = 0; i < columns; i++) sum += embedded(row * columns + i) * embedded(row * columns + i);
    inverse[row] = 1 / sqrt(sum / columns + 1e-6);
  }
  auto normed = [&](size_t i) { return embedded(i) * inverse[i / columns] * weight[i % columns]; };
  report("rmsnorm" + size, rows * columns, 3e-3, [&](size_t i) { return from_bf16(out[i / columns * stride + i % columns]); }, normed);
  vector<float> cut(sampled.size() * stride, NAN);
  launch(select_rows, {(u32)sampled.size()}, ROW_THREADS, SelectParams{cut.data(), x.data(), sampled.data(), columns, stride});
  report("select_rows" + size, sampled.size() * columns, 0, [&](size_t i) { return cut[i / columns * stride + i % columns]; },
         [&](size_t i) { return embedded(sampled[i / columns] * columns + i % columns); });
}

// A way to compute a product: a kernel and its tile.
template <class P>
struct Way {
  const char *name;
  void (*kernel)(P);
  u32 n, m, threads;
};

template <class T, class P>
static Way<P> way(const char *name, void (*kernel)(P)) { return {name, kernel, T::N, T::M, T::THREADS}; }

template <class P>
static void launch_gemm(const Way<P> &way, const P &params, const GemmParams &gemm) {
  launch(way.kernel, {(gemm.rows + way.m - 1) / way.m, (gemm.columns + way.n - 1) / way.n}, way.threads, params);
}

#define WAYS(what)                                                                                                        \
  {way<Tile8>(#what "_8", what##_8), way<Tile8Tall>(#what "_8_tall", what##_8_tall), way<Tile64>(#what "_64", what##_64), \
   way<Tile128>(#what "_128", what##_128), way<Wide64>(#what "_wide_64", what##_wide_64), way<Wide128>(#what "_wide_128", what##_wide_128), \
   way<Fed256>(#what "_fed_256", what##_fed_256)}
// Of weights that are summed in chunks.
#define CHUNK_WAYS(what)                                                                             \
  {way<Chunks8>(#what "_chunks_8", what##_chunks_8), way<Chunks32>(#what "_chunks_32", what##_chunks_32), \
   way<Tile128>(#what "_chunks_128", what##_chunks_128), way<WideChunks64>(#what "_chunks_wide_64", what##_chunks_wide_64), \
   way<Wide64>(#what "_chunks_wide_tall", what##_chunks_wide_tall), way<Wide128>(#what "_chunks_wide_large", what##_chunks_wide_large)}

typedef vector<Way<GemmParams>> Ways;

// Ways that sum alike give the same bits, also of a row alone.
static void check_stored(const Ways &ways, GemmParams params, const std::string &size, const vector<double> &exact) {
  const u32 rows = params.rows, columns = params.columns;
  vector<float> first;
  for (const Way<GemmParams> &way : ways) {
    vector<float> out(rows * columns, NAN);
    params.out = out.data();
    launch_gemm(way, params, params);
    report(way.name + size, rows * columns, 1e-5, [&](size_t i) { return out[i]; }, [&](size_t i) { return exact[i]; });
    if (first.empty()) first = out;
    bool same = memcmp(first.data(), out.data(), out.size() * 4) == 0;
    vector<float> alone(columns, NAN);
    for (u32 row = 0; row < rows && same; row += 1 + row) {
      GemmParams one = params;
      one.x += (size_t)row * params.depth, one.rows = 1, one.out = alone.data();
      launch_gemm(way, one, one);
      same = memcmp(alone.data(), first.data() + (size_t)row * columns, columns * 4) == 0;
    }
    verdict(way.name + size + ", alone", same ? "the same bits" : "other bits", same);
  }
}

static void check_gemm(u32 rows, u32 columns, u32 depth) {
  const std::string size = " " + std::to_string(rows) + " x " + std::to_string(columns) + " x " + std::to_string(depth);
  const u32 stride = (depth + 63) / 64 * 64;
  auto x = padded(rows, depth, stride), w = padded(columns, depth, stride);
  auto bias = random_floats(columns, 1, 0), residual = random_floats(rows * columns, 3, 0);
  vector<double> exact(rows * columns);
  for (size_t i = 0; i < exact.size(); i++) {
    for (u32 k = 0; k < depth; k++) exact[i] += (double)from_bf16(x[i / columns * stride + k]) * from_bf16(w[i % columns * stride + k]);
    exact[i] += bias[i % columns];
  }
  const u32 chunk = (stride / CHUNKS + DEPTH - 1) / DEPTH * DEPTH;
  GemmParams params = {x.data(), w.data(), bias.data(), nullptr, rows, columns, stride, columns, chunk};
  check_stored(WAYS(gemm_store), params, size, exact);
  check_stored(CHUNK_WAYS(gemm_store), params, size, exact);
  for (const Ways &ways : {Ways WAYS(gemm_add), Ways CHUNK_WAYS(gemm_add)})
    for (const Way<GemmParams> &way : ways) {
      auto sum = residual;
      params.out = sum.data();
      launch_gemm(way, params, params);
      report(way.name + size, rows * columns, 1e-5, [&](size_t i) { return sum[i]; }, [&](size_t i) { return residual[i] + exact[i]; });
    }
  if (columns % 16 != 0) return;
  const u32 gated = columns / 2 - 3;
  for (const Way<GatedParams> &way : std::initializer_list<Way<GatedParams>> WAYS(gemm_silu)) {
    // Rows of the output at multiples of sixteen bytes, or not.
    const u32 apart = rows % 2 ? (gated + 7) / 8 * 8 : gated;
    vector<u16> halves(rows * apart, 0xffff);
    GemmParams own = params;
    own.out = halves.data(), own.out_stride = apart;
    launch_gemm(way, GatedParams{own, gated}, own);
    report(way.name + size, rows * gated, 3e-3, [&](size_t i) { return from_bf16(halves[i / gated * apart + i % gated]); },
           [&](size_t i) {
             const u32 column = i % gated, n = column / 8 * 16 + column % 8;
             const double gate = exact[i / gated * columns + n], up = exact[i / gated * columns + n + 8];
             return gate / (1 + exp(-gate)) * up;
           });
  }
}

struct Sequences {
  vector<u32> positions, table_at, tables;
  u32 pages = 0;
};

// The last `rows` positions of each context, on shuffled pages.
static Sequences sequences(const vector<std::pair<u32, u32>> &parts) {
  Sequences s;
  for (auto [context, rows] : parts) s.pages += (context + PAGE - 1) / PAGE;
  vector<u32> order(s.pages);
  for (u32 i = 0; i < s.pages; i++) order[i] = i;
  std::shuffle(order.begin(), order.end(), noise);
  for (auto [context, rows] : parts) {
    for (u32 i = 0; i < rows; i++) s.positions.push_back(context - rows + i), s.table_at.push_back(s.tables.size());
    for (u32 i = 0; i < (context + PAGE - 1) / PAGE; i++) s.tables.push_back(order[s.tables.size()]);
  }
  return s;
}

static void check_heads(u32 heads, u32 kv_heads, u32 dim, bool norms) {
  const std::string size = " " + std::to_string(heads) + "/" + std::to_string(kv_heads) + " x " + std::to_string(dim);
  Sequences s = sequences({{5, 5}, {70, 3}});
  const u32 rows = s.positions.size(), total = heads + 2 * kv_heads, half = dim / 2, stride = (heads * dim + 63) / 64 * 64;
  auto projected = random_floats(rows * total * dim, 1, 0), norm = random_floats(dim, 0.1f, 1);
  vector<float> cosines(70 * half), sines(70 * half);
  for (u32 i = 0; i < 70 * half; i++) cosines[i] = cosf(i / half * powf(100, -(float)(i % half) / half)), sines[i] = sinf(i / half * powf(100, -(float)(i % half) / half));
  vector<u16> queries(rows * stride, 0xffff), cache(s.pages * page_values(kv_heads, dim), 0xffff);
  const float *weight = norms ? norm.data() : nullptr;
  launch(finish_heads, {rows, (total + WARPS - 1) / WARPS}, HEAD_THREADS,
         HeadsParams{projected.data(), queries.data(), cache.data(), cosines.data(), sines.data(), weight, weight,
                     {s.positions.data(), s.table_at.data(), s.tables.data()}, heads, kv_heads, dim, stride, 1e-6f});
  auto got = [&](size_t i) -> double {
    const u32 row = i / (total * dim), head = i / dim % total, at = i % dim;
    if (head < heads) return from_bf16(queries[row * stride + head * dim + at]);
    const u32 page = s.tables[s.table_at[row] + s.positions[row] / PAGE];
    return from_bf16(cache[page * page_values(kv_heads, dim) + ((head - heads) * PAGE + s.positions[row] % PAGE) * dim + at]);
  };
  auto want = [&](size_t i) -> double {
    const u32 row = i / (total * dim), head = i / dim % total, at = i % dim;
    const float *x = projected.data() + (row * total + head) * dim;
    if (head >= heads + kv_heads) return x[at];
    double sum = 0;
    for (u32 k = 0; k < dim; k++) sum += (double)x[k] * x[k];
    const double inverse = norms ? 1 / sqrt(sum / dim + 1e-6) : 1;
    auto value = [&](u32 k) { return x[k] * inverse * (norms ? norm[k] : 1.0); };
    const u32 pair = at % half;
    const double cosine = cosines[s.positions[row] * half + pair], sine = sines[s.positions[row] * half + pair];
    return at < half ? value(at) * cosine - value(at + half) * sine : value(at) * cosine + value(at - half) * sine;
  };
  report("finish_heads" + size + (norms ? ", norms" : ""), rows * total * dim, 3e-3, got, want);
}

static void check_attention(const vector<std::pair<u32, u32>> &spans, u32 heads, u32 kv_heads, u32 dim, u32 window) {
  const std::string size = " " + std::to_string(spans[0].first) + ", " + std::to_string(heads) + "/" + std::to_string(kv_heads) + " x " +
                           std::to_string(dim) + ", window " + std::to_string(window);
  Sequences s = sequences(spans);
  const u32 rows = s.positions.size(), stride = (heads * dim + 63) / 64 * 64;
  // Slots that no context reaches stay NaN.
  vector<u16> cache(s.pages * page_values(kv_heads, dim), 0xffff), queries = random_bf16(rows * stride), out(rows * stride, 0xffff);
  auto at = [&](u32 table, u32 token, u32 part, u32 head, u32 i) -> u16 & {
    return cache[s.tables[table + token / PAGE] * page_values(kv_heads, dim) + ((part * kv_heads + head) * PAGE + token % PAGE) * dim + i];
  };
  for (u32 row = 0; row < rows; row++)
    for (u32 token = 0; token <= s.positions[row]; token++)
      for (u32 i = 0; i < 2 * kv_heads * dim; i++) {
        u16 &value = at(s.table_at[row], token, i / (kv_heads * dim), i / dim % kv_heads, i % dim);
        if (value == 0xffff) value = to_bf16(random_float());
      }
  const float scale = 1 / sqrtf(dim);
  AttentionParams params = {queries.data(), out.data(), cache.data(), {s.positions.data(), s.table_at.data(), s.tables.data()},
                            nullptr, nullptr, nullptr, heads, kv_heads, dim, stride, scale, window, 1, 0};
  vector<double> want(rows * heads * dim);
  for (u32 row = 0; row < rows; row++)
    for (u32 head = 0; head < heads; head++) {
      const u32 end = s.positions[row] + 1, first = window && end > window ? end - window : 0, kv_head = head / (heads / kv_heads);
      vector<double> scores(end);
      double highest = -INFINITY, total = 0;
      for (u32 token = first; token < end; token++) {
        for (u32 i = 0; i < dim; i++)
          scores[token] += (double)from_bf16(queries[row * stride + head * dim + i]) * from_bf16(at(s.table_at[row], token, 0, kv_head, i));
        highest = fmax(highest, scores[token] *= scale);
      }
      for (u32 token = first; token < end; token++) total += scores[token] = exp(scores[token] - highest);
      for (u32 token = first; token < end; token++)
        for (u32 i = 0; i < dim; i++) want[(row * heads + head) * dim + i] += scores[token] / total * from_bf16(at(s.table_at[row], token, 1, kv_head, i));
    }
  const u32 columns = heads * dim;
  vector<u16> first;
  auto check = [&](const std::string &name) {
    report(name + size, rows * columns, 3e-3, [&](size_t i) { return from_bf16(out[i / columns * stride + i % columns]); },
           [&](size_t i) { return want[i]; });
    bool same = first.empty() || first == out;
    if (first.empty()) first = out;
    if (!same) verdict(name + size, "other bits", false);
    std::fill(out.begin(), out.end(), 0xffff);
  };
  if (dim != 64 && dim != 128) {
    launch(attention, {rows, heads}, HEAD_THREADS, params);
    return check("attention");
  }
  vector<u32> items;
  for (u32 row = 0; row < rows; row++) items.push_back(row);
  // Each row has its own table here, as sequences of one row have.
  vector<u32> own_at, own_tables;
  for (u32 row = 0; row < rows; row++) {
    own_at.push_back(own_tables.size());
    for (u32 i = 0; i <= s.positions[row] / PAGE; i++) own_tables.push_back(s.tables[s.table_at[row] + i]);
  }
  const u32 groups = kv_heads * ((heads / kv_heads + ROWS - 1) / ROWS), longest = *std::max_element(s.positions.begin(), s.positions.end()) + 1;
  vector<u32> arrived(rows * groups);
  AttentionParams one = params;
  one.places.table_at = own_at.data(), one.places.tables = own_tables.data();
  for (u32 depth : {1u, (longest + SPLIT * WARPS - 1) / (SPLIT * WARPS)}) {
    vector<Four> partials((own_tables.size() / (SPLIT / PAGE) + rows) * heads * (dim / 4 + 1), Four{{NAN, NAN, NAN, NAN}});
    one.items = items.data(), one.partials = partials.data(), one.arrived = arrived.data(), one.depth = depth;
    launch(dim == 64 ? attention_decode_64 : attention_decode_128, {rows, groups, depth}, HEAD_THREADS, one);
    for (u32 count : arrived) failures += count != 0;
    check("attention_decode");
  }
  if (heads / kv_heads > PREFILL_ROWS) return;
  items.clear();
  u32 row = 0, most = 0;
  for (auto [context, count] : spans) items.push_back(row), items.push_back(count), row += count, most = std::max(most, count);
  const u32 tile = PREFILL_ROWS / (heads / kv_heads);
  params.items = items.data(), params.depth = (most + tile - 1) / tile;
  const model::Grid grid = {(u32)spans.size(), kv_heads, params.depth};
  launch(dim == 64 ? attention_prefill_64 : attention_prefill_128, grid, PREFILL_THREADS, params);
  check("attention_prefill");
  static_assert(Grouped<64>::ROWS == PREFILL_ROWS && Grouped<128>::ROWS == PREFILL_ROWS, "the same tiles");
  params.sequences = spans.size();
  launch(dim == 64 ? attention_grouped_64 : attention_grouped_128, {3}, Grouped<64>::THREADS, params);
  check("attention_grouped");
}

// Rows of logits with equal values, infinities and NaN at drawn places, and rows that are nothing else.
static void check_best(u32 rows, u32 columns) {
  const u32 parts = (columns + PART - 1) / PART;
  vector<float> logits(rows * columns);
  for (u32 row = 0; row < rows; row++) {
    // Few different values, so that the best of a row is often there more than once.
    for (u32 i = 0; i < columns; i++) logits[row * columns + i] = row % 2 ? random_float() : (float)(noise() % 5) - 2;
    float *own = logits.data() + (size_t)row * columns;
    switch (row % 11) {
    case 2: own[noise() % columns] = NAN; break;
    case 3: own[noise() % columns] = INFINITY; break;
    case 4: std::fill(own, own + columns, -INFINITY); break;
    case 5: std::fill(own, own + columns, -INFINITY), own[noise() % columns] = -3e38f; break;
    case 6: std::fill(own, own + columns, -0.0f), own[columns / 2] = 0.0f; break;
    case 7: own[columns - 1] = 100; break;
    case 8: own[columns - 1] = NAN; break;
    case 9: std::fill(own, own + columns, INFINITY); break;
    }
  }
  vector<Best> partial(rows * parts, Best{NAN, 0}), best(rows, Best{NAN, 0});
  launch(best_parts, {parts, rows}, PART_THREADS, BestPartsParams{partial.data(), logits.data(), columns, parts});
  launch(best_tokens, {rows}, MERGE_THREADS, BestTokensParams{best.data(), partial.data(), parts});
  auto want = [&](u32 row) -> u32 {
    u32 token = NO_TOKEN;
    for (u32 i = 0; i < columns; i++) {
      const float value = logits[(size_t)row * columns + i];
      if (std::isnan(value) || value == INFINITY) return NO_TOKEN;
      if (value > (token == NO_TOKEN ? -INFINITY : logits[(size_t)row * columns + token])) token = i;
    }
    return token;
  };
  u32 wrong = 0;
  for (u32 row = 0; row < rows; row++) {
    const u32 token = want(row);
    wrong += best[row].token != token || (token != NO_TOKEN && best[row].value != logits[(size_t)row * columns + token]);
  }
  const std::string size = " " + std::to_string(rows) + " x " + std::to_string(columns);
  verdict("best_parts" + size, std::to_string(wrong) + " of " + std::to_string(rows) + " rows differ", wrong == 0);
  verdict("best_tokens" + size, std::to_string(wrong) + " of " + std::to_string(rows) + " rows differ", wrong == 0);
}

// Draws at some temperatures, against the CPU's way to the token: each sum in its order, and steps through what is left. Row 2 is useless.
static void check_draw(u32 rows, u32 columns, float spread) {
  const u32 parts = (columns + PART - 1) / PART, chunks = (columns + CHUNK - 1) / CHUNK;
  auto logits = random_floats(rows * columns, spread, 0);
  for (u32 i = 0; i < columns; i += 3) logits[i] = -INFINITY;
  if (rows > 2) logits[2 * columns + noise() % columns] = NAN;
  vector<Best> partial(rows * parts, Best{NAN, 0}), best(rows, Best{NAN, 0});
  launch(best_parts, {parts, rows}, PART_THREADS, BestPartsParams{partial.data(), logits.data(), columns, parts});
  launch(best_tokens, {rows}, MERGE_THREADS, BestTokensParams{best.data(), partial.data(), parts});
  const auto before = best;
  vector<double> sums(rows * chunks, NAN);
  DrawParams params = {best.data(), sums.data(), logits.data(), columns, chunks, {}};
  for (u32 row = 0; row < rows; row++)
    params.draws[rows - 1 - row] = {row % 5 == 4 ? 1 - 1.0 / (1ull << 53) : (noise() >> 11) * (1.0 / (1ull << 53)), 1 / (0.3f + row % 4 * 0.5f), row};
  launch(draw_sums, {(chunks + SUM_THREADS / LANES - 1) / (SUM_THREADS / LANES), rows}, SUM_THREADS, params);
  launch(draw_tokens, {rows}, DRAW_THREADS, params);
  u32 other_sums = 0, other_tokens = 0;
  for (u32 n = 0; n < rows; n++) {
    const Draw draw = params.draws[n];
    const float *own = logits.data() + (size_t)draw.row * columns, max = best[draw.row].value;
    if (before[draw.row].token == NO_TOKEN) {
      other_tokens += best[draw.row].token != NO_TOKEN;
      continue;
    }
    auto weight = [&](u32 i) { return (double)weight_of(own[i], max, draw.scale); };
    double total = 0;
    vector<double> want(chunks);
    for (u32 chunk = 0; chunk < chunks; chunk++) {
      const u32 first = chunk * CHUNK, count = std::min(columns - first, CHUNK);
      double lanes[LANES] = {}, sum = 0, tail = 0;
      for (u32 i = 0; i < count / LANES * LANES; i++) lanes[i % LANES] += weight(first + i);
      for (double lane : lanes) sum += lane;
      for (u32 i = count / LANES * LANES; i < count; i++) tail += weight(first + i);
      want[chunk] = sum + tail, total += want[chunk];
      other_sums += want[chunk] != sums[draw.row * chunks + chunk];
    }
    double left = draw.uniform * total;
    u32 at = 0, last = 0;
    for (u32 chunk = 0; chunk < chunks; chunk++) {
      if (want[chunk] <= 0) continue;
      at = chunk;
      if (left < want[chunk]) break;
      left -= want[chunk];
    }
    for (u32 i = 0; i < std::min(columns - at * CHUNK, CHUNK); i++) {
      if (weight(at * CHUNK + i) <= 0) continue;
      last = i;
      if ((left -= weight(at * CHUNK + i)) < 0) break;
    }
    other_tokens += best[draw.row].token != at * CHUNK + last;
  }
  const std::string size = " " + std::to_string(rows) + " x " + std::to_string(columns);
  verdict("draw_sums" + size, std::to_string(other_sums) + " sums differ", other_sums == 0);
  verdict("draw_tokens" + size, std::to_string(other_tokens) + " tokens differ", other_tokens == 0);
}

static void check_all_rows() {
  check_rows(3, 72);
  check_rows(5, 1000);
}

static void check_all_gemm() {
  check_gemm(1, 64, 64);
  check_gemm(33, 101, 72);
  check_gemm(70, 176, 840);
  check_gemm(150, 272, 128);
  check_gemm(257, 144, 320);
}

static void check_all_heads() {
  check_heads(6, 2, 32, true);
  check_heads(3, 3, 20, false);
  check_heads(2, 1, 256, true);
}

static void check_all_attention() {
  check_attention({{600, 2}, {1, 1}, {40, 9}}, 4, 2, 64, 0);
  check_attention({{1100, 1}, {2500, 1}}, 3, 1, 128, 0);
  check_attention({{300, 27}, {900, 2}, {2100, 1}}, 34, 2, 64, 280);
  check_attention({{1500, 40}, {130, 70}}, 8, 2, 128, 0);
  check_attention({{700, 66}, {40, 1}}, 2, 2, 128, 300);
  check_attention({{1100, 1}}, 2, 1, 80, 0);
  check_attention({{530, 3}, {20, 20}}, 2, 2, 12, 270);
  check_attention({{300, 2}}, 3, 1, 256, 31);
}

static void check_all_best() {
  check_best(22, 1);
  check_best(44, 37);
  check_best(11, PART);
  check_best(33, 3 * PART + 1000);
  check_best(11, 34 * PART + 1);
}

static void check_all_draws() {
  check_draw(30, 1, 1);
  check_draw(30, 37, 1);
  check_draw(40, CHUNK, 3);
  check_draw(60, 5 * CHUNK + 29, 0.5f);
  check_draw(10, 148 * CHUNK + 385, 2);
}

// Groups of checks by the start of their kernels' names.
static const struct {
  std::string start;
  void (*run)();
} GROUPS[] = {{"rmsnorm", check_all_rows},        {"gemm", check_all_gemm}, {"finish_heads", check_all_heads},
              {"attention", check_all_attention}, {"best", check_all_best}, {"draw", check_all_draws}};

int main(int count, char **arguments) {
  if (count > 1) wanted = arguments[1];
  bool known = false;
  for (const auto &group : GROUPS)
    if (wanted.empty() || wanted.compare(0, group.start.size(), group.start) == 0) known = true, group.run();
  if (!known) fprintf(stderr, "check: no checks are named %s\n", wanted.c_str());
  return failures != 0 || !known;
}
