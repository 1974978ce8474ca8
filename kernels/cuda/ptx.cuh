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

// Threads of a block, and blocks that have to fit into a multiprocessor: fewer make room for registers.
#define KERNEL(...) extern "C" __global__ __launch_bounds__(__VA_ARGS__) void
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
// One object of type T in the shared memory of the block; a kernel has at most one.
#define SHARED(T, name) __shared__ T name
// As SHARED, for more than 48 KiB: the launch says how much (`Kernel::with_shared`).
#define SHARED_LARGE(T, name)                         \
  extern __shared__ __align__(1024) unsigned char large[]; \
  T &name = *reinterpret_cast<T *>(large)

#define INFINITE __int_as_float(0x7f800000)

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }
DEVICE u32 block_z() { return blockIdx.z; }
// Blocks of the grid along x.
DEVICE u32 blocks_x() { return gridDim.x; }

// Waits for all threads of the block; shared memory written before is seen after it.
DEVICE void block_barrier() { __syncthreads(); }

// Waits for all lanes of the warp; shared memory written before is seen after it.
DEVICE void warp_barrier() { __syncwarp(); }

// From compute capability 9.0 on a kernel begins while the one before it on its stream ends. Until `after_previous` returns, a kernel may read weights
// and nothing else from global memory, and write nothing there. Every thread of every kernel calls it: so what is before the kernel before is done, too.
DEVICE void after_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets blocks of the next kernel have the room that this one's leave, once all of these are under way.
DEVICE void begin_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

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

// Two numbers rounded to bf16, `low` in the lower half.
DEVICE u32 pack_bf16(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// a · b + c with one rounding, and a · b rounded: the compiler joins products and sums as it likes elsewhere, so two kernels whose bits
// have to agree say which.
DEVICE float mul_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }

// The lower halves of `a` and `b`, a's below; the upper halves.
DEVICE u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
DEVICE u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// Copies sixteen bytes to shared memory, past the L1 cache; zeros if not `is_there`. `from` is a valid address in either case. Done when
// its group, which `commit_copies` ends, has been waited for.
DEVICE void copy_async(void *to, const void *from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
               "r"(is_there ? 16 : 0));
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;"); }
// Waits until at most LEFT of this thread's groups are under way.
template <u32 LEFT>
DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// Adds to a counter in global memory; gives its value before.
DEVICE u32 count(u32 *counter) { return atomicAdd(counter, 1); }
// Orders this thread's writes to global memory before what it writes later, for all threads of the GPU.
DEVICE void fence() { __threadfence(); }

// Four matrices of 8 × 8 bf16 from shared memory: lanes 8i to 8i + 7 give the addresses of the rows of matrix i, and a lane gets the values
// (lane / 4, 2 · (lane % 4)) and the next of each, in r[i]. All 32 lanes take part.
DEVICE void load_matrices(u32 (&r)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"((u32)__cvta_generic_to_shared(row))
               : "memory");
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

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// What a matrix instruction of a group of four warps reads from shared memory: rows of 64 bf16 (128 bytes), eight neighbouring rows in 1,024
// bytes, piece p of row r at p ^ (r % 8). `tile` is aligned to 1,024 bytes. Add 2 for the next 16 values of depth. PTX ISA, "Matrix Descriptor".
DEVICE u64 describe(const void *tile) {
  return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16 | ((u32)__cvta_generic_to_shared(tile) & 0x3ffff) >> 4;
}
// Makes this thread's writes to shared memory seen by matrix instructions of groups, once a barrier has been passed.
DEVICE void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Before the first matrix instruction of a group after its sums were touched.
DEVICE void begin_group() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most LEFT committed groups are under way.
template <u32 LEFT>
DEVICE void wait_group() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

// Address in the block's shared memory.
DEVICE u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }

// A barrier in shared memory that ends a phase when `count` threads have arrived: phases 0, 1, 0, ... Who waits for a phase sees what was
// written before the arrivals. `init_phases` is followed by a barrier of the block.
DEVICE void init_phases(u64 *barrier, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory"); }
DEVICE void arrive(u64 *barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory"); }
// Arrives as soon as the copies that this thread has begun are done, without waiting for them.
DEVICE void arrive_copied(u64 *barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Waits until the phase of this parity has ended.
DEVICE void wait_phase(u64 *barrier, u32 parity) {
  asm volatile(
      "{.reg .pred ended;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
      "@ended bra done;\n"
      "bra again;\n"
      "done:}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// c += a · bᵀ, 64 rows of a (16 of each warp) and as many of b as c has columns, 16 deep, done when waited for. Fragments are those of `mma_bf16`.
DEVICE void mma_group(float (&c)[8][4], u64 a, u64 b) {
  asm volatile(
      "{.reg .pred adds; setp.eq.u32 adds, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
      "%24,%25,%26,%27,%28,%29,%30,%31"
      "}, %32, %33, adds, 1, 1, 0, 0;}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
        "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
        "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
        "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
      : "l"(a), "l"(b));
}
DEVICE void mma_group(float (&c)[32][4], u64 a, u64 b) {
  asm volatile(
      "{.reg .pred adds; setp.eq.u32 adds, 0, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
      "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,"
      "%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,"
      "%120,%121,%122,%123,%124,%125,%126,%127"
      "}, %128, %129, adds, 1, 1, 0, 0;}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
        "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
        "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
        "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3]),
        "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]), "+f"(c[8][3]), "+f"(c[9][0]), "+f"(c[9][1]), "+f"(c[9][2]), "+f"(c[9][3]),
        "+f"(c[10][0]), "+f"(c[10][1]), "+f"(c[10][2]), "+f"(c[10][3]), "+f"(c[11][0]), "+f"(c[11][1]), "+f"(c[11][2]), "+f"(c[11][3]),
        "+f"(c[12][0]), "+f"(c[12][1]), "+f"(c[12][2]), "+f"(c[12][3]), "+f"(c[13][0]), "+f"(c[13][1]), "+f"(c[13][2]), "+f"(c[13][3]),
        "+f"(c[14][0]), "+f"(c[14][1]), "+f"(c[14][2]), "+f"(c[14][3]), "+f"(c[15][0]), "+f"(c[15][1]), "+f"(c[15][2]), "+f"(c[15][3]),
        "+f"(c[16][0]), "+f"(c[16][1]), "+f"(c[16][2]), "+f"(c[16][3]), "+f"(c[17][0]), "+f"(c[17][1]), "+f"(c[17][2]), "+f"(c[17][3]),
        "+f"(c[18][0]), "+f"(c[18][1]), "+f"(c[18][2]), "+f"(c[18][3]), "+f"(c[19][0]), "+f"(c[19][1]), "+f"(c[19][2]), "+f"(c[19][3]),
        "+f"(c[20][0]), "+f"(c[20][1]), "+f"(c[20][2]), "+f"(c[20][3]), "+f"(c[21][0]), "+f"(c[21][1]), "+f"(c[21][2]), "+f"(c[21][3]),
        "+f"(c[22][0]), "+f"(c[22][1]), "+f"(c[22][2]), "+f"(c[22][3]), "+f"(c[23][0]), "+f"(c[23][1]), "+f"(c[23][2]), "+f"(c[23][3]),
        "+f"(c[24][0]), "+f"(c[24][1]), "+f"(c[24][2]), "+f"(c[24][3]), "+f"(c[25][0]), "+f"(c[25][1]), "+f"(c[25][2]), "+f"(c[25][3]),
        "+f"(c[26][0]), "+f"(c[26][1]), "+f"(c[26][2]), "+f"(c[26][3]), "+f"(c[27][0]), "+f"(c[27][1]), "+f"(c[27][2]), "+f"(c[27][3]),
        "+f"(c[28][0]), "+f"(c[28][1]), "+f"(c[28][2]), "+f"(c[28][3]), "+f"(c[29][0]), "+f"(c[29][1]), "+f"(c[29][2]), "+f"(c[29][3]),
        "+f"(c[30][0]), "+f"(c[30][1]), "+f"(c[30][2]), "+f"(c[30][3]), "+f"(c[31][0]), "+f"(c[31][1]), "+f"(c[31][2]), "+f"(c[31][3])
      : "l"(a), "l"(b));
}
DEVICE void mma_group(float (&c)[16][4], u64 a, u64 b) {
  asm volatile(
      "{.reg .pred adds; setp.eq.u32 adds, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
      "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
      "}, %64, %65, adds, 1, 1, 0, 0;}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
        "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
        "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
        "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3]),
        "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]), "+f"(c[8][3]), "+f"(c[9][0]), "+f"(c[9][1]), "+f"(c[9][2]), "+f"(c[9][3]),
        "+f"(c[10][0]), "+f"(c[10][1]), "+f"(c[10][2]), "+f"(c[10][3]), "+f"(c[11][0]), "+f"(c[11][1]), "+f"(c[11][2]), "+f"(c[11][3]),
        "+f"(c[12][0]), "+f"(c[12][1]), "+f"(c[12][2]), "+f"(c[12][3]), "+f"(c[13][0]), "+f"(c[13][1]), "+f"(c[13][2]), "+f"(c[13][3]),
        "+f"(c[14][0]), "+f"(c[14][1]), "+f"(c[14][2]), "+f"(c[14][3]), "+f"(c[15][0]), "+f"(c[15][1]), "+f"(c[15][2]), "+f"(c[15][3])
      : "l"(a), "l"(b));
}

// As `copy_async`, eight bytes, by way of the L1 cache.
DEVICE void copy_async_8(void *to, const void *from, bool is_there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to)), "l"(from), "r"(is_there ? 8 : 0));
}

// As `arrive`, if `does`, without a branch: between matrix instructions the compiler takes a branch for a reason to wait.
DEVICE void arrive_if(u64 *barrier, bool does) {
  asm volatile("{.reg .pred does; setp.ne.u32 does, %1, 0; @does mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(shared_address(barrier)), "r"((u32)does) : "memory");
}
// `value` in a form that the compiler cannot see through: what is computed from it is computed there, not kept in registers from before.
template <class T>
DEVICE T *opaque(T *value) {
  asm volatile("" : "+l"(value));
  return value;
}
DEVICE u32 opaque(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// `value`, equal in all lanes of the warp, in a form in which the compiler knows that it is.
DEVICE u32 uniform(u32 value) { return __shfl_sync(~0u, value, 0); }

// Sets the registers of each thread of this group of four warps, below or above what the kernel was launched with.
template <u32 COUNT>
DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <u32 COUNT>
DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// Keeps the compiler from using sums before they were waited for.
template <u32 N>
DEVICE void settle(float (&c)[N][4]) {
#pragma unroll
  for (u32 i = 0; i < N; i++) asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
}

// c = a · bᵀ, or c += a · bᵀ if `adds`, 64 rows of a (16 of each warp) and 128 of b, 16 deep, both of `describe_tile`. Fragments are those of `mma_bf16`.
DEVICE void mma_rows(float (&c)[16][4], u64 a, u64 b, bool adds) {
  asm volatile(
      "{.reg .pred adds; setp.ne.u32 adds, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
      "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
      "}, %64, %65, adds, 1, 1, 0, 0;}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
        "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3]), "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]), "+f"(c[8][3]), "+f"(c[9][0]), "+f"(c[9][1]), "+f"(c[9][2]), "+f"(c[9][3]), "+f"(c[10][0]), "+f"(c[10][1]), "+f"(c[10][2]), "+f"(c[10][3]), "+f"(c[11][0]), "+f"(c[11][1]), "+f"(c[11][2]), "+f"(c[11][3]),
        "+f"(c[12][0]), "+f"(c[12][1]), "+f"(c[12][2]), "+f"(c[12][3]), "+f"(c[13][0]), "+f"(c[13][1]), "+f"(c[13][2]), "+f"(c[13][3]), "+f"(c[14][0]), "+f"(c[14][1]), "+f"(c[14][2]), "+f"(c[14][3]), "+f"(c[15][0]), "+f"(c[15][1]), "+f"(c[15][2]), "+f"(c[15][3])
      : "l"(a), "l"(b), "r"((u32)adds));
}

// c = a · b, or c += a · b if `adds`: of a each warp has 16 rows, 16 deep, as `mma_bf16` takes them; rows of b are its depth (N-major).
DEVICE void mma_columns(float (&c)[8][4], const u32 (&a)[4], u64 b, bool adds) {
  asm volatile(
      "{.reg .pred adds; setp.ne.u32 adds, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
      "%24,%25,%26,%27,%28,%29,%30,%31"
      "}, {%32,%33,%34,%35}, %36, adds, 1, 1, 1;}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
        "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)adds));
}
DEVICE void mma_columns(float (&c)[16][4], const u32 (&a)[4], u64 b, bool adds) {
  asm volatile(
      "{.reg .pred adds; setp.ne.u32 adds, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
      "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
      "}, {%64,%65,%66,%67}, %68, adds, 1, 1, 1;}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
        "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3]), "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]), "+f"(c[8][3]), "+f"(c[9][0]), "+f"(c[9][1]), "+f"(c[9][2]), "+f"(c[9][3]), "+f"(c[10][0]), "+f"(c[10][1]), "+f"(c[10][2]), "+f"(c[10][3]), "+f"(c[11][0]), "+f"(c[11][1]), "+f"(c[11][2]), "+f"(c[11][3]),
        "+f"(c[12][0]), "+f"(c[12][1]), "+f"(c[12][2]), "+f"(c[12][3]), "+f"(c[13][0]), "+f"(c[13][1]), "+f"(c[13][2]), "+f"(c[13][3]), "+f"(c[14][0]), "+f"(c[14][1]), "+f"(c[14][2]), "+f"(c[14][3]), "+f"(c[15][0]), "+f"(c[15][1]), "+f"(c[15][2]), "+f"(c[15][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)adds));
}
#endif
#endif

// Sixteen bytes, the widest load of a thread.
struct alignas(16) Quad {
  u32 v[4];
};

// Eight bytes.
struct alignas(8) Pair {
  u32 v[2];
};

// What a matrix instruction reads from shared memory: rows of 64 bf16 (128 bytes), eight neighbouring rows in 1,024 bytes, piece p of row r at
// p ^ (r % 8). `address` is that of row 0 in a tile aligned to 1,024 bytes, moved along rows by 32 bytes for each 16 values, or by whole groups of
// rows. `groups` is the distance of groups of eight rows in bytes; `columns` that of the next 64 values, where rows are depth. PTX ISA,
// "Matrix Descriptor": in N-major layouts of 128 bytes the leading offset is the way to the next columns, the stride that to the next depth.
DEVICE u64 describe_tile(u32 address, u32 groups, u32 columns) {
  return (u64)1 << 62 | (u64)(groups >> 4 & 0x3fff) << 32 | (u64)(columns >> 4 & 0x3fff) << 16 | (address >> 4 & 0x3fff);
}

// Four floats, moved as one.
struct alignas(16) Four {
  float v[4];
};

#ifndef PENSTOCK_HOST
// Four floats from the L2 cache: what other blocks of this launch wrote.
DEVICE Four read_l2(const Four *from) {
  Four f;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(f.v[0]), "=f"(f.v[1]), "=f"(f.v[2]), "=f"(f.v[3]) : "l"(from));
  return f;
}
#else
inline Four read_l2(const Four *from) { return *from; }
#endif

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
