// What this machine can do, measured the way the engine uses it: one pinned thread per core.
//   cc -O3 -march=native -pthread limits.c -o limits && ./limits THREADS     prints one JSON line
//
// read_gb_s:     streaming reads of 1 GiB with 64-byte loads, what decode is bound by
// bf16_tflop_s:  vdpbf16ps on registers, what a GEMM without AMX is bound by (0 where the CPU has none)
// amx_tflop_s:   tdpbf16ps on registers (0 where the CPU has none)
// fp32_tflop_s:  512-bit fused multiply-add on registers
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
#else
    for (int k = 0; k < 32; k++) sums[k & 3] += *(const uint64_t *)(at + i + 8 * k);
#endif
  }
  sink += (float)(sums[0] + sums[1] + sums[2] + sums[3]);
  return (double)share;
}

#ifdef __AVX512F__
// Twelve independent chains: more than latency times width on every core with 512-bit units.
static double fma_fp32(int thread, int threads) {
  (void)threads;
  const long rounds = 20000000;
  __m512 a = _mm512_set1_ps(1.0f + 1e-7f * (float)thread), b = _mm512_set1_ps(1e-9f), c[12];
  for (int k = 0; k < 12; k++) c[k] = _mm512_set1_ps((float)k);
  for (long i = 0; i < rounds; i++)
    for (int k = 0; k < 12; k++) c[k] = _mm512_fmadd_ps(a, c[k], b);
  for (int k = 0; k < 12; k++) sink += _mm512_reduce_add_ps(c[k]);
  return rounds * 12.0 * 16 * 2;
}
#endif

#ifdef __AVX512BF16__
static double dot_bf16(int thread, int threads) {
  (void)threads;
  const long rounds = 20000000;
  __m512bh a = (__m512bh)_mm512_set1_epi16((short)(0x3f80 + thread)), b = (__m512bh)_mm512_set1_epi16(0x2000);
  __m512 c[12];
  for (int k = 0; k < 12; k++) c[k] = _mm512_set1_ps((float)k);
  for (long i = 0; i < rounds; i++)
    for (int k = 0; k < 12; k++) c[k] = _mm512_dpbf16_ps(c[k], a, b);
  for (int k = 0; k < 12; k++) sink += _mm512_reduce_add_ps(c[k]);
  return rounds * 12.0 * 32 * 2;
}
#endif

#ifdef __AMX_BF16__
static double dot_amx(int thread, int threads) {
  (void)thread, (void)threads;
  struct { uint8_t palette, start, reserved[14]; uint16_t columns[16]; uint8_t rows[16]; } config = {.palette = 1};
  for (int k = 0; k < 8; k++) config.columns[k] = 64, config.rows[k] = 16;
  __asm__ volatile("" : : "r"(&config) : "memory");  // gcc 12 drops stores before ldtilecfg
  if (syscall(SYS_arch_prctl, 0x1023, 18)) return 0;
  _tile_loadconfig(&config);
  const long rounds = 5000000;
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); _tile_zero(4); _tile_zero(5); _tile_zero(6); _tile_zero(7);
  for (long i = 0; i < rounds; i++) {
    _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return rounds * 4.0 * 16 * 16 * 32 * 2;
}
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

static double median(work_fn work, int threads) {
  double rates[RUNS];
  for (int i = 0; i < RUNS; i++) rates[i] = once(work, threads);
  qsort(rates, RUNS, sizeof rates[0], ascending);
  return rates[RUNS / 2];
}

int main(int count, char **words) {
  int threads = count > 1 ? atoi(words[1]) : 1;
  if (threads < 1 || threads > THREADS_MAX) return 2;
  memory = mmap(NULL, BYTES + 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  madvise(memory, BYTES, MADV_HUGEPAGE);
  memset(memory, 1, BYTES + 65536);
  double fp32 = 0, bf16 = 0, amx = 0;
#ifdef __AVX512F__
  fp32 = median(fma_fp32, threads);
#endif
#ifdef __AVX512BF16__
  bf16 = median(dot_bf16, threads);
#endif
#ifdef __AMX_BF16__
  amx = median(dot_amx, threads);
#endif
  printf("{\"engine\": \"limit\", \"threads\": %d, \"read_gb_s\": %.2f, \"bf16_tflop_s\": %.3f, \"amx_tflop_s\": %.3f, \"fp32_tflop_s\": %.3f}\n",
         threads, median(read_memory, threads) / 1e9, bf16 / 1e12, amx / 1e12, fp32 / 1e12);
  return 0;
}
