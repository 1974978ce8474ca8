// What kernels need beyond plain C++: ids, barriers, shuffles, and every PTX instruction, each in one small function.
//
// Two worlds compile the kernels. NVRTC takes the lower half of this file; a C++ compiler for the host, with PENSTOCK_HOST, takes
// `host/model.h`, which gives each function a twin that computes the same on the CPU. No other file holds `asm`, and none includes a
// header of CUDA, so that NVRTC alone compiles them.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Tokens of one KV page (`PAGE_TOKENS` of the crate).
constexpr u32 PAGE = 32;

#ifdef PENSTOCK_HOST
#include "host/model.h"
#else

#define KERNEL(threads) extern "C" __global__ __launch_bounds__(threads) void
#define DEVICE static __device__ __forceinline__
// One object of type T in the shared memory of the block; a kernel has at most one.
#define SHARED(T, name) __shared__ T name

#define INFINITE __int_as_float(0x7f800000)

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }

// Waits for all threads of the block; shared memory written before is seen after it.
DEVICE void block_barrier() { __syncthreads(); }

// Value of the lane whose index differs by `mask`; all 32 lanes take part.
DEVICE float lane_xor(float value, u32 mask) { return __shfl_xor_sync(~0u, value, mask); }

// Value of lane `lane`; all 32 lanes take part.
DEVICE float lane_value(float value, u32 lane) { return __shfl_sync(~0u, value, lane); }

DEVICE float bits_to_float(u32 bits) { return __uint_as_float(bits); }

// Rounds to bf16, ties to even.
DEVICE u16 to_bf16(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// 2^x, within 2 units in the last place; subnormal results become 0.
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// c += a · b for a tile of 16 rows (a) and 8 columns (b), 16 deep; all 32 lanes take part.
// With g = lane / 4 and t = lane % 4: a = {(g, 2t), (g+8, 2t), (g, 2t+8), (g+8, 2t+8)}, b = {(2t, g), (2t+8, g)}, two values of
// neighbouring depth each; c = {(g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)}. PTX ISA, "Matrix Fragments for mma.m16n8k16".
DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

// Sixteen bytes, the widest load of a thread.
struct alignas(16) Quad {
  u32 v[4];
};

DEVICE float from_bf16(u16 bits) { return bits_to_float((u32)bits << 16); }

// e^x by way of 2^x.
DEVICE float exp_fast(float x) { return exp2_fast(x * 1.4426950408889634f); }

// Sum over the warp, in one order for all lanes.
DEVICE float warp_sum(float value) {
#pragma unroll
  for (u32 mask = 16; mask > 0; mask /= 2) value += lane_xor(value, mask);
  return value;
}

// Largest value of the warp; NaN loses against numbers.
DEVICE float warp_max(float value) {
#pragma unroll
  for (u32 mask = 16; mask > 0; mask /= 2) value = fmaxf(value, lane_xor(value, mask));
  return value;
}
