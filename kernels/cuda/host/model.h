// Host model of CUDA's execution: kernels run on the CPU, from the same source. For tests; nothing of it is in the product.
//
// Every thread of a block is a fiber; blocks run one after the other. A barrier or a warp operation is a switch to another fiber. Warps
// are scheduled in an order drawn from a seed, so a missing barrier shows. Shared memory is filled with 0xff (NaN) before each block. Errors
// (lanes of a warp at different operations, a barrier that some threads never reach) end the process with a message.
//
// Not modelled: speed, banks, caches, the memory order between blocks. The twin of an instruction may share a misunderstanding with
// the kernel that uses it.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

namespace model {

constexpr unsigned WARP = 32, THREADS_MAX = 1024;
constexpr size_t STACK = 64 << 10, SHARED_MAX = 48 << 10, LARGE_MAX = 227 << 10;

// What a thread waits for; `phase`: the end of a phase of a barrier in shared memory.
enum class Wait { none, warp, block, phase };

// An asynchronous copy that a thread began: it is done when its group is waited for, or at any time before.
struct Copy {
  void *to;
  const void *from;
  unsigned group, bytes;
};

// Products of a group of warps that are under way.
struct Product {
  unsigned group;
  std::function<void()> run;
};

struct Fiber {
  jmp_buf context;
  ucontext_t start;
  std::unique_ptr<char[]> stack;
  bool begun = false, done = false;
  Wait wait = Wait::none;
  unsigned long round = 0; // warp operations that this lane has entered
  std::vector<Copy> copies;
  unsigned groups = 0; // groups of copies that were committed
  std::vector<Product> products;
  unsigned matrix_groups = 0; // groups of products that were committed
  bool waited = false;        // for the kernel before this one
};

// What lanes of a warp hand to each other; two, because a lane may enter the next operation before others have left the last.
struct Exchange {
  unsigned arrived = 0;
  const char *what = nullptr;
  float value[WARP];
  u32 a[WARP][4], b[WARP][2];
  float c[WARP][4];
  const void *rows[WARP];
};

struct Warp {
  Exchange exchange[2];
  unsigned long rounds = 0; // operations that all lanes have entered
};

struct Block {
  unsigned thread = 0, x = 0, y = 0, z = 0, threads = 0, blocks = 0;
  jmp_buf scheduler;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  void (*body)(const void *) = nullptr;
  const void *params = nullptr;
  uint64_t seed = 1;
  unsigned long arrivals = 0; // at barriers in shared memory
  alignas(1024) unsigned char shared[LARGE_MAX];
};

inline Block block;

[[noreturn]] inline void fail(const char *message) {
  fprintf(stderr, "host model: block (%u, %u), thread %u: %s\n", block.x, block.y, block.thread, message);
  abort();
}

inline uint64_t random_number() {
  block.seed = block.seed * 6364136223846793005u + 1442695040888963407u;
  return block.seed >> 33;
}

inline void yield(Wait wait) {
  Fiber &fiber = block.fibers[block.thread];
  fiber.wait = wait;
  if (!_setjmp(fiber.context)) _longjmp(block.scheduler, 1);
}

inline void fiber_main() {
  block.body(block.params);
  if (!block.fibers[block.thread].waited) fail("a thread that never waits for the kernel before its own");
  block.fibers[block.thread].done = true;
  _longjmp(block.scheduler, 1);
}

// Runs `thread` until it waits or ends.
inline void resume(unsigned thread) {
  Fiber &fiber = block.fibers[thread];
  block.thread = thread;
  fiber.wait = Wait::none;
  if (_setjmp(block.scheduler)) return;
  if (fiber.begun) _longjmp(fiber.context, 1);
  fiber.begun = true;
  getcontext(&fiber.start);
  if (!fiber.stack) fiber.stack.reset(new char[STACK]);
  fiber.start.uc_stack.ss_sp = fiber.stack.get();
  fiber.start.uc_stack.ss_size = STACK;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, fiber_main, 0);
  setcontext(&fiber.start);
}

// Enters an operation of the whole warp: `leave` deposits this lane's part, the last lane computes, and all read the result.
template <class Deposit, class Compute>
Exchange &together(const char *what, Deposit deposit, Compute compute) {
  Warp &warp = block.warps[block.thread / WARP];
  Fiber &fiber = block.fibers[block.thread];
  Exchange &exchange = warp.exchange[fiber.round % 2];
  if (exchange.arrived == 0) exchange.what = what;
  if (exchange.what != what) fail("lanes of a warp are at different operations");
  deposit(exchange, block.thread % WARP);
  fiber.round++;
  if (++exchange.arrived == WARP) {
    compute(exchange);
    exchange.arrived = 0;
    warp.rounds++;
  } else {
    while (warp.rounds < fiber.round) yield(Wait::warp);
  }
  return exchange;
}

// Runs lanes of a warp until all wait at the block's barrier or have ended.
inline void run_warp(unsigned first, unsigned end) {
  for (unsigned idle = 0;;) {
    const unsigned long before = block.warps[first / WARP].rounds;
    bool waits = false, ran = false, is_held = false;
    for (unsigned thread = first; thread < end; thread++) {
      Fiber &fiber = block.fibers[thread];
      is_held |= !fiber.done && fiber.wait == Wait::phase;
      if (fiber.done || fiber.wait == Wait::block || fiber.wait == Wait::phase) continue;
      resume(thread);
      ran = true;
      waits |= !fiber.done && fiber.wait == Wait::warp;
    }
    if (!waits || !ran) return;
    idle = block.warps[first / WARP].rounds == before ? idle + 1 : 0;
    // Lanes that wait for a phase may come later.
    if (idle > 2 && is_held) return;
    if (idle > 2) fail("a warp operation that some lanes never reach");
  }
}

// Runs one block to its end.
inline void run_block(unsigned x, unsigned y, unsigned z, unsigned threads) {
  block.x = x, block.y = y, block.z = z, block.threads = threads;
  block.fibers.resize(threads > block.fibers.size() ? threads : block.fibers.size());
  block.warps.assign((threads + WARP - 1) / WARP, Warp());
  memset(block.shared, 0xff, sizeof block.shared);
  for (Fiber &fiber : block.fibers) {
    fiber.begun = fiber.done = false, fiber.wait = Wait::none, fiber.round = 0;
    fiber.copies.clear(), fiber.groups = 0, fiber.products.clear(), fiber.matrix_groups = 0;
    fiber.waited = false;
  }
  unsigned idle = 0, done_before = 0;
  for (unsigned long arrivals = block.arrivals;; arrivals = block.arrivals) {
    const unsigned warps = block.warps.size(), offset = random_number() % warps;
    const bool backwards = random_number() % 2;
    for (unsigned i = 0; i < warps; i++) {
      const unsigned warp = ((backwards ? warps - 1 - i : i) + offset) % warps;
      run_warp(warp * WARP, (warp + 1) * WARP < threads ? (warp + 1) * WARP : threads);
    }
    unsigned done = 0, phases = 0;
    for (unsigned thread = 0; thread < threads; thread++) done += block.fibers[thread].done, phases += block.fibers[thread].wait == Wait::phase;
    if (done == threads) return;
    // Threads at the block's barrier stay there while others wait for phases.
    idle = phases != 0 && arrivals == block.arrivals && done == done_before ? idle + 1 : 0, done_before = done;
    if (idle > 2) fail("a phase that never ends");
    if (phases == 0 && done != 0) fail("a barrier that some threads never reach");
    for (unsigned thread = 0; thread < threads; thread++)
      if (phases == 0 || block.fibers[thread].wait == Wait::phase) block.fibers[thread].wait = Wait::none;
  }
}

struct Grid {
  unsigned x, y = 1, z = 1;
};

// Runs a kernel over its grid, blocks forwards or backwards. `body` gets `params`.
inline void run(Grid grid, unsigned threads, void (*body)(const void *), const void *params) {
  block.body = body, block.params = params, block.blocks = grid.x;
  const uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z;
  const bool backwards = random_number() % 2;
  for (uint64_t i = 0; i < blocks; i++) {
    const uint64_t at = backwards ? blocks - 1 - i : i;
    run_block(at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y, threads);
  }
}

// A barrier in shared memory as the model keeps it: arrivals that are missing in this phase, arrivals of a phase, and phases that have ended.
struct Phases {
  u16 missing, count;
  u32 ended;

  void arrive() {
    if (missing == 0 || missing > count || count > THREADS_MAX) fail("an arrival at a barrier that nobody has made");
    block.arrivals++;
    if (--missing == 0) missing = count, ended++;
  }
};
static_assert(sizeof(Phases) == sizeof(u64), "it lies in the place of the real one");
inline Phases &phases_of(u64 *barrier) { return *reinterpret_cast<Phases *>(barrier); }

// Does the copies of this thread that belong to the first `groups` groups. One of no bytes is an arrival when those before it are done.
inline void finish_copies(unsigned groups) {
  auto &copies = block.fibers[block.thread].copies;
  size_t done = 0;
  for (; done < copies.size() && copies[done].group < groups; done++) {
    const Copy &copy = copies[done];
    if (copy.bytes == 0) phases_of((u64 *)copy.to).arrive();
    else if (copy.from) memcpy(copy.to, copy.from, copy.bytes);
    else memset(copy.to, 0, copy.bytes);
  }
  copies.erase(copies.begin(), copies.begin() + done);
}

// Does what this thread arrives behind.
inline void finish_arrivals() {
  for (const Copy &copy : block.fibers[block.thread].copies)
    if (copy.bytes == 0) return finish_copies(~0u);
}

} // namespace model

#define KERNEL(...) void
#define DEVICE static inline
#define DEVICE_MEMBER inline
#define SHARED(T, name)                                                           \
  static_assert(sizeof(T) <= model::SHARED_MAX, "more than 48 KiB of shared memory"); \
  T &name = *reinterpret_cast<T *>(model::block.shared)
#define SHARED_LARGE(T, name)                                                     \
  static_assert(sizeof(T) <= model::LARGE_MAX, "more shared memory than there is"); \
  T &name = *reinterpret_cast<T *>(model::block.shared)
#define INFINITE HUGE_VALF

inline u32 thread_index() { return model::block.thread; }
inline u32 block_x() { return model::block.x; }
inline u32 block_y() { return model::block.y; }
inline u32 block_z() { return model::block.z; }
inline u32 blocks_x() { return model::block.blocks; }
inline void block_barrier() {
  model::finish_arrivals();
  model::yield(model::Wait::block);
}

inline void warp_barrier() {
  model::together("warp_barrier", [](auto &, u32) {}, [](auto &) {});
}

// Kernels run one after the other here: what one reads too early does not show, but that it never waits does.
inline void after_previous() { model::block.fibers[model::block.thread].waited = true; }
inline void begin_next() {}

inline float lane_xor(float value, u32 mask) {
  auto &all = model::together("lane_xor", [&](auto &e, u32 lane) { e.value[lane] = value; }, [](auto &) {});
  return all.value[(model::block.thread % 32) ^ mask];
}

inline float lane_value(float value, u32 lane) {
  auto &all = model::together("lane_value", [&](auto &e, u32 own) { e.value[own] = value; }, [](auto &) {});
  return all.value[lane % 32];
}

inline float bits_to_float(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline u16 to_bf16(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  if (value != value) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline u32 pack_bf16(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }

inline float mul_add(float a, float b, float c) { return fmaf(a, b, c); }
inline float mul(float a, float b) { return a * b; }

inline u32 low_halves(u32 a, u32 b) { return (a & 0xffff) | b << 16; }
inline u32 high_halves(u32 a, u32 b) { return a >> 16 | (b & 0xffff0000u); }

// The place is NaN until the copy is done.
template <u32 BYTES>
inline void begin_copy(void *to, const void *from, bool is_there) {
  if ((uintptr_t)to % BYTES || (uintptr_t)from % BYTES) model::fail("a copy to or from an address that is no multiple of its size");
  memset(to, 0xff, BYTES);
  auto &fiber = model::block.fibers[model::block.thread];
  fiber.copies.push_back({to, is_there ? from : nullptr, fiber.groups, BYTES});
}
inline void copy_async(void *to, const void *from, bool is_there) { begin_copy<16>(to, from, is_there); }
inline void copy_async_8(void *to, const void *from, bool is_there) { begin_copy<8>(to, from, is_there); }
inline void commit_copies() {
  auto &fiber = model::block.fibers[model::block.thread];
  fiber.groups++;
  if (model::random_number() % 4 == 0) model::finish_copies(fiber.groups);
}
template <u32 LEFT>
inline void wait_copies() {
  const unsigned groups = model::block.fibers[model::block.thread].groups;
  model::finish_copies(groups > LEFT ? groups - LEFT : 0);
}

inline void load_matrices(u32 (&r)[4], const void *row) {
  if ((uintptr_t)row % 16) model::fail("a row of a matrix that is not aligned to sixteen bytes");
  auto &all = model::together("load_matrices", [&](auto &e, u32 lane) { e.rows[lane] = row; }, [](auto &) {});
  const u32 lane = model::block.thread % 32;
  for (u32 i = 0; i < 4; i++) memcpy(&r[i], (const char *)all.rows[i * 8 + lane / 4] + lane % 4 * 4, 4);
}

// Offset into the block's shared memory, in units of sixteen bytes.
inline u64 describe(const void *tile) {
  const u64 offset = (const unsigned char *)tile - model::block.shared;
  if (offset % 1024) model::fail("a tile that is not aligned to 1024 bytes");
  return offset / 16;
}
inline void publish_shared() {}
inline void begin_group() {}
inline void commit_group() { model::block.fibers[model::block.thread].matrix_groups++; }

// As late as possible: what is overwritten before the wait shows.
template <u32 LEFT>
inline void wait_group() {
  auto &fiber = model::block.fibers[model::block.thread];
  size_t done = 0;
  for (; done < fiber.products.size() && fiber.products[done].group + LEFT < fiber.matrix_groups; done++) fiber.products[done].run();
  fiber.products.erase(fiber.products.begin(), fiber.products.begin() + done);
}

inline void init_phases(u64 *barrier, u32 count) { model::phases_of(barrier) = {(u16)count, (u16)count, 0}; }
inline void arrive(u64 *barrier) { model::phases_of(barrier).arrive(); }
// At once, or when this thread waits for something else.
inline void arrive_copied(u64 *barrier) {
  auto &fiber = model::block.fibers[model::block.thread];
  fiber.copies.push_back({barrier, nullptr, fiber.groups, 0});
  if (model::random_number() % 4 == 0) model::finish_copies(~0u);
}
inline void wait_phase(u64 *barrier, u32 parity) {
  model::finish_arrivals();
  while (model::phases_of(barrier).ended % 2 == parity) model::yield(model::Wait::phase);
}

template <u32 N>
inline void mma_group(float (&c)[N][4], u64 a, u64 b) {
  // Value k of row `row` of the tile that `descriptor` is in: pieces of a row are swapped by the row's place among eight.
  auto at = [](u64 descriptor, u32 row, u32 k) {
    const u64 tile = descriptor / 64 * 1024, piece = descriptor % 64 % 8 + k / 8;
    u16 value;
    memcpy(&value, model::block.shared + tile + row * 128 + (piece ^ (row % 8)) * 16 + k % 8 * 2, 2);
    return (double)bits_to_float((u32)value << 16);
  };
  const u32 lane = model::block.thread % 32, warp = model::block.thread / 32 % 4;
  auto &fiber = model::block.fibers[model::block.thread];
  fiber.products.push_back({fiber.matrix_groups, [=, &c] {
    for (u32 j = 0; j < N; j++)
      for (u32 v = 0; v < 4; v++) {
        const u32 row = warp * 16 + lane / 4 + v / 2 * 8, column = j * 8 + lane % 4 * 2 + v % 2;
        double sum = 0;
        for (u32 k = 0; k < 16; k++) sum += at(a, row, k) * at(b, column, k);
        c[j][v] = (float)(c[j][v] + sum);
      }
  }});
}

inline u32 count(u32 *counter) { return (*counter)++; }
inline void fence() {}

inline float exp2_fast(float x) {
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.0f : y;
}

// Products are exact and their sum of sixteen is rounded once with the accumulator; tensor cores round a little more often.
inline void mma_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  auto deposit = [&](model::Exchange &e, u32 lane) {
    memcpy(e.a[lane], a, sizeof a), memcpy(e.b[lane], b, sizeof b), memcpy(e.c[lane], c, sizeof c);
  };
  auto compute = [](model::Exchange &e) {
    float left[16][16], right[16][8];
    for (u32 lane = 0; lane < 32; lane++) {
      const u32 g = lane / 4, t = lane % 4 * 2;
      for (u32 i = 0; i < 2; i++) {
        auto half = [&](u32 pair) { return bits_to_float(i ? pair & 0xffff0000u : pair << 16); };
        left[g][t + i] = half(e.a[lane][0]), left[g + 8][t + i] = half(e.a[lane][1]);
        left[g][t + 8 + i] = half(e.a[lane][2]), left[g + 8][t + 8 + i] = half(e.a[lane][3]);
        right[t + i][g] = half(e.b[lane][0]), right[t + 8 + i][g] = half(e.b[lane][1]);
      }
    }
    double sums[16][8] = {};
    for (u32 row = 0; row < 16; row++)
      for (u32 k = 0; k < 16; k++)
        for (u32 column = 0; column < 8; column++) sums[row][column] += (double)left[row][k] * right[k][column];
    for (u32 lane = 0; lane < 32; lane++)
      for (u32 i = 0; i < 4; i++) e.c[lane][i] = (float)(e.c[lane][i] + sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
  };
  auto &all = model::together("mma_bf16", deposit, compute);
  memcpy(c, all.c[model::block.thread % 32], sizeof c);
}

// Offset into the block's shared memory.
inline u32 shared_address(const void *at) { return (const unsigned char *)at - model::block.shared; }

inline void arrive_if(u64 *barrier, bool does) {
  if (does) arrive(barrier);
}
inline u32 uniform(u32 value) { return value; }
template <class T>
inline T opaque(T value) { return value; }
template <u32 COUNT>
inline void fewer_registers() {}
template <u32 COUNT>
inline void more_registers() {}
template <u32 N>
inline void settle(float (&)[N][4]) {}

namespace model {

// Value at an address of shared memory whose bits 4 to 6 are swapped by bits 7 to 9, as all layouts of 128 bytes have it.
inline double swizzled(u32 address) {
  address ^= address >> 3 & 0x70;
  if (address + 2 > LARGE_MAX) fail("a matrix instruction reads behind the shared memory");
  u16 value;
  memcpy(&value, block.shared + address, 2);
  return (double)bits_to_float((u32)value << 16);
}

// Fields of a descriptor of such a layout, in bytes.
struct Descriptor {
  u32 start, leading, stride;
  explicit Descriptor(u64 bits) : start((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4), stride((bits >> 32 & 0x3fff) << 4) {
    if (bits >> 62 != 1 || bits >> 46 << 46 != (u64)1 << 62) fail("a descriptor of another layout");
  }
  // Row `row`, value k along it; value `column` of the row that is depth k.
  double along(u32 row, u32 k) const { return swizzled(start + row / 8 * stride + row % 8 * 128 + k * 2); }
  double across(u32 column, u32 k) const { return swizzled(start + column / 64 * leading + column % 64 * 2 + k / 8 * stride + k % 8 * 128); }
};

// Begins c = Σ_k left(row, k) · right(column, k), or adds it.
template <u32 N, class Left, class Right>
inline void begin_product(float (&c)[N][4], bool adds, Left left, Right right) {
  const u32 lane = block.thread % 32, warp = block.thread / 32 % 4;
  Fiber &fiber = block.fibers[block.thread];
  fiber.products.push_back({fiber.matrix_groups, [=, &c] {
    for (u32 j = 0; j < N; j++)
      for (u32 v = 0; v < 4; v++) {
        const u32 row = warp * 16 + lane / 4 + v / 2 * 8, column = j * 8 + lane % 4 * 2 + v % 2;
        double sum = 0;
        for (u32 k = 0; k < 16; k++) sum += left(row, k) * right(column, k);
        c[j][v] = adds ? (float)(c[j][v] + sum) : (float)sum;
      }
  }});
}

} // namespace model

template <u32 N>
inline void mma_rows(float (&c)[N][4], u64 a, u64 b, bool adds) {
  const model::Descriptor left(a), right(b);
  model::begin_product(c, adds, [=](u32 row, u32 k) { return left.along(row, k); }, [=](u32 column, u32 k) { return right.along(column, k); });
}

// The fragments of all lanes are handed over when the instruction begins.
template <u32 N>
inline void mma_columns(float (&c)[N][4], const u32 (&a)[4], u64 b, bool adds) {
  auto &all = model::together("mma_columns", [&](auto &e, u32 lane) { memcpy(e.a[lane], a, sizeof a); }, [](auto &) {});
  std::array<std::array<float, 16>, 16> rows;
  for (u32 lane = 0; lane < 32; lane++)
    for (u32 i = 0; i < 4; i++)
      for (u32 half = 0; half < 2; half++)
        rows[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8 + half] = bits_to_float(half ? all.a[lane][i] & 0xffff0000u : all.a[lane][i] << 16);
  const model::Descriptor right(b);
  model::begin_product(c, adds, [=](u32 row, u32 k) { return (double)rows[row % 16][k]; }, [=](u32 column, u32 k) { return right.across(column, k); });
}
