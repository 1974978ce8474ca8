// What this machine can do, measured the way the engine uses it: one pinned thread per core.
//   cc -O3 -march=native -pthread limits.c -o limits && ./limits THREADS     prints one JSON line
//
// read_gb_s:     streaming reads of 1 GiB with 64-byte loads, what decode is bound by
// bf16_tflop_s:  vdpbf16ps on registers, what a GEMM without AMX is bound by (0 where the CPU has none)
// int8_top_s:    vpdpbusd on registers, the same of int8 weights and activations; with AVX2 alone vpmaddubsw, vpmaddwd and vpaddd
// amx_tflop_s:   tdpbf16ps on registers (0 where the CPU has none); amx_int8_top_s: tdpbssd
// fp32_tflop_s:  fused multiply-add on registers of 512 bits, with AVX2 alone of 256: what a GEMM of bf16 is bound by where neither of the others exists
//
// Arithmetic is the best of seven runs, because a limit is what a core can do when nobody disturbs it. Memory is the median of seven: it
// is shared with other machines and moves by a factor of two within an hour, so compare only what was measured in one window.
#define _GNU_SOURCE
#include <cpuid.h>
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { RUNS = 7, THREADS_MAX = 256 };
static const size_t BYTES = 1UL << 30;

typedef double (*work_fn)(int thread, int threads);
typedef struct { work_fn work; int thread, threads; double amount, begin, end; } job_t;

static pthread_barrier_t barrier;
static uint8_t *memory;
static volatile float sink;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static double read_memory(int thread, int threads) {
  size_t share = BYTES / threads / 4096 * 4096;
  const uint8_t *at = memory + share * thread;
  uint64_t sums[4] = {0};
  for (size_t i = 0; i < share; i += 256) {
#ifdef __AVX512F__
    for (int k = 0; k < 4; k++) {
      _mm_prefetch((const char *)at + i + 4096 + 64 * k, _MM_HINT_T0);
      sums[k] += (uint64_t)_mm512_cvtsi512_si32(_mm512_load_si512(at + i + 64 * k));
    }
#elif defined(__AVX2__)
    for (int k = 0; k < 8; k++) {
      if (k % 2 == 0) _mm_prefetch((const char *)at + i + 4096 + 32 * k, _MM_HINT_T0);
      sums[k & 3] += (uint64_t)_mm256_cvtsi256_si32(_mm256_load_si256((const __m256i *)(at + i + 32 * k)));
    }
#else
    for (int k = 0; k < 32; k++) sums[k & 3] += *(const uint64_t *)(at + i + 8 * k);
#endif
  }
  sink += (float)(sums[0] + sums[1] + sums[2] + sums[3]);
  return (double)share;
}

#ifdef __AVX512F__
// 24 independent chains in assembly: a core that starts two 512-bit products a cycle with a latency of six needs twelve at least, and a
// compiler that spills or copies an accumulator measures itself.
#define ONE(op, k) op " %%zmm30,%%zmm31,%%zmm" #k "\n\t"
#define EIGHT(op, a, b, c, d, e, f, g, h) \
  ONE(op, a) ONE(op, b) ONE(op, c) ONE(op, d) ONE(op, e) ONE(op, f) ONE(op, g) ONE(op, h)
#define CHAINS 24
#define PEAK(name, op, operations)                                                                                     \
  static double name(int thread, int threads) {                                                                        \
    (void)thread, (void)threads;                                                                                       \
    const long rounds = 10000000;                                                                                      \
    long left = rounds;                                                                                                \
    __asm__ volatile("vzeroall\n\tvpxord %%zmm30,%%zmm30,%%zmm30\n\tvpxord %%zmm31,%%zmm31,%%zmm31\n\t"              \
                     ".balign 64\n1:\n\t" EIGHT(op, 0, 1, 2, 3, 4, 5, 6, 7) EIGHT(op, 8, 9, 10, 11, 12, 13, 14, 15)    \
                         EIGHT(op, 16, 17, 18, 19, 20, 21, 22, 23) "dec %0\n\tjnz 1b\n\t"                             \
                     : "+r"(left)                                                                                      \
                     :                                                                                                 \
                     : "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10",        \
                       "zmm11", "zmm12", "zmm13", "zmm14", "zmm15", "zmm16", "zmm17", "zmm18", "zmm19", "zmm20",       \
                       "zmm21", "zmm22", "zmm23", "zmm30", "zmm31", "cc");                                             \
    return (double)rounds * CHAINS * (operations);                                                                     \
  }

PEAK(fma_fp32, "vfmadd231ps", 16 * 2)
#elif defined(__AVX2__)
// With sixteen registers: fourteen chains of products and two operands; two 256-bit products a cycle with a latency of four or five need ten.
#define CHAINS 14
#define FMA(k) "vfmadd231ps %%ymm14,%%ymm15,%%ymm" #k "\n\t"
// 32 products of bytes: pairs to 16 bits, pairs of those to 32, and the sum.
#define DOT(k) "vpmaddubsw %%ymm14,%%ymm15,%%ymm12\n\tvpmaddwd %%ymm13,%%ymm12,%%ymm12\n\tvpaddd %%ymm12,%%ymm" #k ",%%ymm" #k "\n\t"
#define PEAK(name, body, operations)                                                                                   \
  static double name(int thread, int threads) {                                                                        \
    (void)thread, (void)threads;                                                                                       \
    const long rounds = 10000000;                                                                                      \
    long left = rounds;                                                                                                \
    __asm__ volatile("vzeroall\n\t.balign 64\n1:\n\t" body "dec %0\n\tjnz 1b\n\t"                                     \
                     : "+r"(left)                                                                                      \
                     :                                                                                                 \
                     : "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9", "ymm10",        \
                       "ymm11", "ymm12", "ymm13", "ymm14", "ymm15", "cc");                                             \
    return (double)rounds * (operations);                                                                              \
  }

PEAK(fma_fp32, FMA(0) FMA(1) FMA(2) FMA(3) FMA(4) FMA(5) FMA(6) FMA(7) FMA(8) FMA(9) FMA(10) FMA(11) FMA(12) FMA(13),
     CHAINS * 8 * 2)
PEAK(dot_int8, DOT(0) DOT(1) DOT(2) DOT(3) DOT(4) DOT(5) DOT(6) DOT(7) DOT(8) DOT(9) DOT(10) DOT(11), 12 * 32 * 2)
#endif

#ifdef __AVX512BF16__
PEAK(dot_bf16, "vdpbf16ps", 32 * 2)
#endif

#ifdef __AVX512VNNI__
PEAK(dot_int8, "vpdpbusd", 64 * 2)
#endif

#ifdef __AMX_BF16__
static double dot_amx(int thread, int threads, int int8) {
  (void)thread, (void)threads;
  struct { uint8_t palette, start, reserved[14]; uint16_t columns[16]; uint8_t rows[16]; } config = {.palette = 1};
  for (int k = 0; k < 8; k++) config.columns[k] = 64, config.rows[k] = 16;
  __asm__ volatile("" : : "r"(&config) : "memory");  // gcc 12 drops stores before ldtilecfg
  if (syscall(SYS_arch_prctl, 0x1023, 18)) return 0;
  _tile_loadconfig(&config);
  const long rounds = 5000000;
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); _tile_zero(4); _tile_zero(5); _tile_zero(6); _tile_zero(7);
  for (long i = 0; !int8 && i < rounds; i++) {
    _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
  }
  for (long i = 0; int8 && i < rounds; i++) {
    _tile_dpbssd(0, 4, 6); _tile_dpbssd(1, 4, 7); _tile_dpbssd(2, 5, 6); _tile_dpbssd(3, 5, 7);
  }
  _tile_release();
  return rounds * 4.0 * 16 * 16 * (int8 ? 64 : 32) * 2;
}

static double amx_bf16(int thread, int threads) { return dot_amx(thread, threads, 0); }
static double amx_int8(int thread, int threads) { return dot_amx(thread, threads, 1); }
#endif

static void *run(void *argument) {
  job_t *job = argument;
  cpu_set_t core;
  CPU_ZERO(&core);
  CPU_SET(job->thread, &core);
  sched_setaffinity(0, sizeof core, &core);
  pthread_barrier_wait(&barrier);
  job->begin = now();
  job->amount = job->work(job->thread, job->threads);
  job->end = now();
  return NULL;
}

static double once(work_fn work, int threads) {
  pthread_t ids[THREADS_MAX];
  job_t jobs[THREADS_MAX];
  pthread_barrier_init(&barrier, NULL, threads);
  for (int i = 0; i < threads; i++) {
    jobs[i] = (job_t){.work = work, .thread = i, .threads = threads};
    pthread_create(&ids[i], NULL, run, &jobs[i]);
  }
  double begin = 1e300, end = 0, amount = 0;
  for (int i = 0; i < threads; i++) {
    pthread_join(ids[i], NULL);
    if (jobs[i].begin < begin) begin = jobs[i].begin;
    if (jobs[i].end > end) end = jobs[i].end;
    amount += jobs[i].amount;
  }
  pthread_barrier_destroy(&barrier);
  return amount / (end - begin);
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

// The rate of `rank`: 0 is the slowest run, RUNS - 1 the fastest.
static double ranked(work_fn work, int threads, int rank) {
  double rates[RUNS];
  for (int i = 0; i < RUNS; i++) rates[i] = once(work, threads);
  qsort(rates, RUNS, sizeof rates[0], ascending);
  return rates[rank];
}

int main(int count, char **words) {
  int threads = count > 1 ? atoi(words[1]) : 1;
  if (threads < 1 || threads > THREADS_MAX) return 2;
  memory = mmap(NULL, BYTES + 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  madvise(memory, BYTES, MADV_HUGEPAGE);
  memset(memory, 1, BYTES + 65536);
  double fp32 = 0, bf16 = 0, int8 = 0, amx = 0, amx8 = 0;
#ifdef __AVX2__
  fp32 = ranked(fma_fp32, threads, RUNS - 1);
#endif
#ifdef __AVX512BF16__
  bf16 = ranked(dot_bf16, threads, RUNS - 1);
#endif
#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__))
  int8 = ranked(dot_int8, threads, RUNS - 1);
#endif
#ifdef __AMX_BF16__
  amx = ranked(amx_bf16, threads, RUNS - 1);
  amx8 = ranked(amx_int8, threads, RUNS - 1);
#endif
  printf("{\"engine\": \"limit\", \"threads\": %d, \"read_gb_s\": %.2f, \"bf16_tflop_s\": %.3f, \"int8_top_s\": %.3f, "
         "\"amx_tflop_s\": %.3f, \"amx_int8_top_s\": %.3f, \"fp32_tflop_s\": %.3f}\n",
         threads, ranked(read_memory, threads, RUNS / 2) / 1e9, bf16 / 1e12, int8 / 1e12, amx / 1e12, amx8 / 1e12, fp32 / 1e12);
  return 0;
}
