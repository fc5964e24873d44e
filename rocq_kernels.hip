/* rocq_kernels.hip - the GPU kernels of rocq.h, for AMD RDNA3 and RDNA3.5

   Device code only: which kernel runs, and on what grid, is decided in rocq.h (>>hip_launch).

   As a code object that a program loads when it runs (examples/build-kernels does this):

       hipcc -O3 --genco -mcode-object-version=5 -nogpuinc -nogpulib \
           --offload-arch=gfx1100,gfx1101,gfx1102,gfx1103,gfx1150,gfx1151,gfx1152 \
           rocq_kernels.hip -o rocq_kernels.co

   Linked into a program, which then needs nothing at run time but the HIP runtime:

       hipcc -O3 --offload-arch=gfx1100 -x hip app.c rocq_kernels.hip -o app

   Both with clang 19 or newer, which ROCm has from 6.4 on. gfx1153 is unknown to clang 19, and can be
   added to the list for a newer one.

   Licence: MIT or public domain, at your choice; see the end of rocq.h.

   CONTENTS (search for the mark)

       >>platform    what differs between compilers: gfx11, NVIDIA (tests), the CPU (tests)
       >>wave        reductions over a wave and a block
       >>memory      reading and writing tensors
       >>blocks      one decoder per format, for the planar and the GGUF layout; repack
       >>quantize    encoders of Q8_0 and Q4_0
       >>matvec      decode: w x for up to 8 columns
       >>matmul      prompts: tiles on the matrix unit
       >>attention   decode and prefill
       >>ops         norms, rope, maps, softmax, gather, argmax, sample
       >>entry       the self-test, and the table of kernels for programs that link this file

   CONVENTIONS
   A wave is 32 lanes. Blocks are one-dimensional. Every kernel takes one args struct by value and
   adds args.common.block0 to blockIdx.x, so that the host can cut a long grid into short launches.
   Global memory is read and written with gload and gstore, LDS with lget and lput: on the GPU they
   are plain accesses, in the tests they check bounds, poison and races. Sums are in F32 and in a
   fixed order. A operands are rows of M, B operands columns of N, both with K innermost:
   C[m][n] = sum A[m][k] B[n][k].
*/

#if !defined(ROCQ_SIMT) && !defined(__CUDACC__) && (!defined(__clang__) || __clang_major__ < 19)
#error "rocq_kernels.hip needs clang 19 or newer: hipcc of ROCm 6.4, or clang++-19"
#endif

#define ROCQ_DEVICE
#include "rocq.h"

// ---------------------------------------------------------------------------------------------
// >>platform
// ---------------------------------------------------------------------------------------------
// Each platform defines the same names:
//   DEV                      a device function; KERNEL(name, args, threads) the head of a kernel,
//                            KERNEL_WAVES(.., waves) with registers for that many waves a SIMD
//   LDS(type, name, n)       an LDS array, 16-byte aligned, in a device function or kernel
//   f16 f16x2 u32x2 u32x4    a half, and vectors with .x .y .z .w
//   gload gstore lget lput   see above; T is a scalar or one of the vectors
//   block_sync               barrier of the block: what its threads stored before, in LDS and in
//                            global memory, is there for all of them after
//   block_sync_lds           barrier of the block that orders LDS only: loads and stores of global
//                            memory stay under way across it, so that no global data that one wave
//                            stores may be read or written by another behind it
//   wave_sync                what lanes of the wave wrote to LDS before is there for the others after
//   block_index, n_threads   blockIdx.x, blockDim.x
//   wave_xor<mask>(x)        x of lane ^ mask, mask 1 2 4 8 16; wave_read(x, lane): lane uniform
//   wave_ballot(bool)        a bit a lane
//   dot4(a, b, c)            c + sum of four int8 products; dot2(a, b, c): of two half products, in F32
//   fma2(a, b, c)            on f16x2
//   byte_perm(hi, lo, sel)   byte i of the result is byte (sel >> 8 i) & 7 of lo (0-3) and hi (4-7);
//                            sel's other bits are 0
//   byte_levels(table, n)    bytes of a table of 16: byte i of x is byte (n >> 8 i) & 15, y that of n >> 4
//   exp2_fast log2_fast rcp_fast     to about 1 ulp, denormals may be 0
//   fence_device, atomic_inc(p)      release or acquire at device scope; returns the old value
//   lds_add(p, n), lds_take(p, n)    atomic, in LDS; lds_take returns the old value
//   frag, frag_c, wmma       16x16x16 on the matrix unit, see there
//   target_id                0x1100 and so on, 0 where not gfx

#include <stdint.h>

// A parameter of this type takes no part in deducing T: stores convert to the type of the memory.
template <typename T> struct as_given_type { typedef T type; };
template <typename T> using as_given = typename as_given_type<T>::type;

#if defined(ROCQ_SIMT) // the CPU stand-in of the tests

#include ROCQ_SIMT

#else

#if defined(__CUDACC__)

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define DEV __attribute__((unused)) static __device__ __forceinline__
#define KERNEL(name, args, threads) \
    extern "C" __global__ void __launch_bounds__(threads) rocq_k_##name(const args a)
#define KERNEL_WAVES(name, args, threads, waves)                                                   \
    extern "C" __global__ void __launch_bounds__(threads, (waves)*128 / (threads))                 \
        rocq_k_##name(const args a)
#define LDS(type, name, n) __shared__ __attribute__((aligned(16))) type name[n]

DEV void block_sync() { __syncthreads(); }
DEV void block_sync_lds() { __syncthreads(); }
DEV uint32_t thread_index() { return threadIdx.x; }
DEV uint32_t n_threads() { return blockDim.x; }
DEV uint32_t block_index() { return blockIdx.x; }
DEV uint32_t block_index_z() { return blockIdx.z; }
DEV void fence_device() { __threadfence(); }
DEV uint32_t atomic_inc(uint32_t *p) { return atomicAdd(p, 1u); }
DEV void atomic_or(uint32_t *p, uint32_t bits) { atomicOr(p, bits); }
DEV void lds_add(uint32_t *p, uint32_t v) { atomicAdd(p, v); }
DEV void lds_add(unsigned long long *p, unsigned long long v) { atomicAdd(p, v); }
DEV uint32_t lds_take(uint32_t *p, uint32_t n) { return atomicAdd(p, n); }

template <typename T> DEV T lget(const T *p) { return *p; }
template <typename T> DEV void lput(T *p, as_given<T> v) { *p = v; }

DEV void wave_sync() { __syncwarp(); }

typedef __half f16;
typedef __half2 f16x2;
typedef uint2 u32x2;
typedef uint4 u32x4;

DEV u32x4 make4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return make_uint4(x, y, z, w); }
DEV u32x2 make2(uint32_t x, uint32_t y) { return make_uint2(x, y); }
DEV f16x2 pair(f16 x, f16 y) { return __halves2half2(x, y); }
template <typename T> DEV T gload(const T *p) { return *p; }
template <typename T> DEV void gstore(T *p, as_given<T> v) { *p = v; }
template <int mask, typename T> DEV T wave_xor(T x) {
    return __shfl_xor_sync(0xffffffffu, x, mask);
}
template <typename T> DEV T wave_read(T x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEV uint32_t wave_ballot(bool x) { return __ballot_sync(0xffffffffu, x); }
DEV int dot4(int a, int b, int c) { return __dp4a(a, b, c); }
DEV f16x2 fma2(f16x2 a, f16x2 b, f16x2 c) { return __hfma2(a, b, c); }
DEV float dot2(f16x2 a, f16x2 b, float c) {
    const float2 x = __half22float2(a), y = __half22float2(b);
    return fmaf(x.x, y.x, fmaf(x.y, y.y, c));
}
DEV uint32_t byte_perm(uint32_t hi, uint32_t lo, uint32_t sel) { // one nibble an index here
    const uint32_t s = sel | sel >> 4;
    return __byte_perm(lo, hi, (s & 0xff) | (s >> 8 & 0xff00));
}
DEV u32x2 byte_levels(u32x4 table, uint32_t n) { // n's nibbles are selectors as they lie
    const uint32_t index = n & 0x77777777u, half = (n >> 1 & 0x44444444u) | 0x32103210u;
    uint32_t v[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t low = __byte_perm(table.x, table.y, index >> 16 * i),
                       high = __byte_perm(table.z, table.w, index >> 16 * i);
        v[i] = __byte_perm(low, high, half >> 16 * i);
    }
    return make_uint2(__byte_perm(v[0], v[1], 0x6420), __byte_perm(v[0], v[1], 0x7531));
}
DEV float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEV float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEV float rcp_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEV int target_id() { return 0; }

// The fragments. One lane's share of a 16x16 operand with K innermost (frag), and of the F32 or I32
// result (frag_c, frag_ci), whose element v stands at row frag_row(v), column frag_col(v). A lane's
// elements lie in FRAG_SLOTS columns; frag_slot(v) says in which. With g = lane / 4, t = lane % 4 as
// in the PTX manual's pictures, words are (row g, k 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8).
struct frag { uint32_t w[4]; };
struct frag_i8 { uint32_t w[2]; };
struct frag_c { float v[8]; };
struct frag_ci { int v[8]; };
enum { FRAG_SLOTS = 4 };
DEV int frag_row(int v) { return (int)(threadIdx.x & 31) / 4 + 8 * (v >> 1 & 1); }
DEV int frag_col(int v) { return 2 * (int)(threadIdx.x & 3) + (v & 1) + 8 * (v >> 2); }
DEV constexpr int frag_slot(int v) { return (v & 1) + 2 * (v >> 2); }
// Column of a slot, and the reductions over all rows of each slot's column.
DEV int frag_slot_col(int s) { return 2 * (int)(threadIdx.x & 3) + (s & 1) + 8 * (s >> 1); }
DEV float frag_col_max(float x) {
    x = fmaxf(x, wave_xor<4>(x));
    x = fmaxf(x, wave_xor<8>(x));
    return fmaxf(x, wave_xor<16>(x));
}
DEV float frag_col_sum(float x) {
    x += wave_xor<4>(x);
    x += wave_xor<8>(x);
    return x + wave_xor<16>(x);
}

// tile[row * stride + k], 16-byte aligned rows; row 0-15 is M (A) or N (B).
template <typename F> DEV frag frag_words(F word) {
    const int g = (int)(threadIdx.x & 31) / 4, t = 2 * (int)(threadIdx.x & 3);
    frag f;
    f.w[0] = word(g, t);
    f.w[1] = word(g + 8, t);
    f.w[2] = word(g, t + 8);
    f.w[3] = word(g + 8, t + 8);
    return f;
}
DEV frag frag_load(const f16 *tile, int stride) { // LDS
    const int row = (int)(threadIdx.x & 15), k = (int)(threadIdx.x & 16) / 2;
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(tile + row * stride + k);
    frag f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.w[0]), "=r"(f.w[1]), "=r"(f.w[2]), "=r"(f.w[3])
                 : "r"(at) : "memory");
    return f;
}
// The same as a B operand only, in the order in which its instructions want the words: 0 2 1 3.
struct frag_b { uint32_t w[4]; };
DEV frag_b frag_load_b(const f16 *tile, int stride) { // LDS
    const int lane = (int)(threadIdx.x & 31), row = (lane & 7) + lane / 16 * 8, k = lane & 8;
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(tile + row * stride + k);
    frag_b f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.w[0]), "=r"(f.w[1]), "=r"(f.w[2]), "=r"(f.w[3])
                 : "r"(at) : "memory");
    return f;
}
DEV frag frag_load_global(const f16 *tile, int64_t stride) {
    return frag_words([=](int row, int k) { return *(const uint32_t *)(tile + row * stride + k); });
}
DEV frag_i8 frag_i8_load(const int8_t *tile, int stride) { // LDS
    const int g = (int)(threadIdx.x & 31) / 4, t = 4 * (int)(threadIdx.x & 3);
    frag_i8 f;
    f.w[0] = *(const uint32_t *)(tile + g * stride + t);
    f.w[1] = *(const uint32_t *)(tile + (g + 8) * stride + t);
    return f;
}
// The B operand whose element (k, n) is element (row frag_k_row(k), column n) of a result, rounded to
// F16. From one k of an aligned group of four to the next are FRAG_K_STEP rows.
enum { FRAG_K_STEP = 1 };
DEV int frag_k_row(int k) { return k; }
DEV uint32_t frag_transpose(uint32_t x) {
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
DEV frag frag_from_c(const frag_c &c) {
    frag f;
    for (int i = 0; i < 4; i++) { // (rows, columns) 0-7 0-7, 8-15 0-7, 0-7 8-15, 8-15 8-15
        const __half2 h = __floats2half2_rn(c.v[2 * i], c.v[2 * i + 1]);
        uint32_t w;
        memcpy(&w, &h, 4);
        f.w[(i & 1) * 2 + (i >> 1)] = frag_transpose(w);
    }
    return f;
}
DEV void wmma(frag_c &c, const frag &a, const frag &b) { // c += a b
    for (int h = 0; h < 2; h++) {
        float *v = c.v + 4 * h;
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])
                     : "r"(a.w[0]), "r"(a.w[1]), "r"(a.w[2]), "r"(a.w[3]), "r"(b.w[h]),
                       "r"(b.w[h + 2]));
    }
}
DEV void wmma(frag_c &c, const frag &a, const frag_b &b) {
    for (int h = 0; h < 2; h++) {
        float *v = c.v + 4 * h;
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])
                     : "r"(a.w[0]), "r"(a.w[1]), "r"(a.w[2]), "r"(a.w[3]), "r"(b.w[2 * h]),
                       "r"(b.w[2 * h + 1]));
    }
}
DEV void wmma_i8(frag_ci &c, const frag_i8 &a, const frag_i8 &b) {
    for (int h = 0; h < 2; h++) {
        int *v = c.v + 4 * h;
        asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 "
                     "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3])
                     : "r"(a.w[0]), "r"(a.w[1]), "r"(b.w[h]));
    }
}

#else // gfx11, by clang's own attributes and builtins: the device pass reads no header of HIP

#if defined(__HIP_DEVICE_COMPILE__)
#if !defined(__GFX11__)
#error "rocq_kernels.hip is for gfx11 targets: pass --offload-arch=gfx1100 or the like"
#endif
#else // >>entry and the host stubs of the kernels call the runtime
#include <hip/hip_runtime_api.h>
#endif

// The names of C's library and of CUDA, as builtins that clang makes instructions of.
#define ceil __builtin_ceil
#define fabsf __builtin_fabsf
#define fmaf __builtin_fmaf
#define fmaxf __builtin_fmaxf
#define fminf __builtin_fminf
#define rintf __builtin_rintf
#define sqrtf __builtin_sqrtf
#define fmax __builtin_fmax
#define fmin __builtin_fmin
#define rint __builtin_rint
#define __clz __builtin_clz
#define __ffs __builtin_ffs
#define __popc __builtin_popcount
#ifndef INFINITY
#define INFINITY __builtin_inff()
#endif
#define max __builtin_elementwise_max // of integers
#define min __builtin_elementwise_min

#define DEV __attribute__((unused, device, always_inline)) static inline
#define KERNEL(name, args, threads)                                                            \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, threads))) void           \
        rocq_k_##name(const args a)
#define KERNEL_WAVES(name, args, threads, waves)                                               \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, threads),                 \
                              amdgpu_waves_per_eu(waves))) void rocq_k_##name(const args a)
#define LDS(type, name, n) static __attribute__((shared, aligned(16))) type name[n]

DEV void block_sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// block_sync also waits until all loads and stores of global memory are done, and drops the L0 cache.
// Here the wave waits for its own LDS accesses alone, and the compiler, which is told that memory
// changes, moves no access across. The instruction is written out because before the builtin
// s_barrier clang 19 waits for global memory on gfx11; clang 22 does not.
DEV void block_sync_lds() { asm volatile("s_waitcnt lgkmcnt(0)\n\ts_barrier" ::: "memory"); }
DEV uint32_t thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEV uint32_t n_threads() { return __builtin_amdgcn_workgroup_size_x(); }
DEV uint32_t block_index() { return __builtin_amdgcn_workgroup_id_x(); }
DEV uint32_t block_index_z() { return __builtin_amdgcn_workgroup_id_z(); }
DEV void fence_device() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
DEV uint32_t atomic_inc(uint32_t *p) {
    return __hip_atomic_fetch_add(p, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
DEV void atomic_or(uint32_t *p, uint32_t bits) {
    __hip_atomic_fetch_or(p, bits, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <typename T> DEV void lds_add(T *p, as_given<T> v) {
    __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
DEV uint32_t lds_take(uint32_t *p, uint32_t n) {
    return __hip_atomic_fetch_add(p, n, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

template <typename T> DEV T lget(const T *p) { return *p; }
template <typename T> DEV void lput(T *p, as_given<T> v) { *p = v; }

typedef _Float16 f16;
typedef _Float16 f16x2 __attribute__((ext_vector_type(2)));
typedef uint32_t u32x2 __attribute__((ext_vector_type(2)));
typedef uint32_t u32x4 __attribute__((ext_vector_type(4)));

DEV u32x4 make4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return u32x4{x, y, z, w}; }
DEV u32x2 make2(uint32_t x, uint32_t y) { return u32x2{x, y}; }
DEV f16x2 pair(f16 x, f16 y) { return f16x2{x, y}; }
// Through the global address space, so that no flat instruction is made of a pointer from a struct.
template <typename T> DEV T gload(const T *p) {
    return *(const __attribute__((address_space(1))) T *)p;
}
template <typename T> DEV void gstore(T *p, as_given<T> v) {
    *(__attribute__((address_space(1))) T *)p = v;
}

// LDS accesses of a wave are done in order: only the compiler must keep them so.
DEV void wave_sync() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
}
// DPP row_xmask swaps within 16 lanes at no cost beside the next instruction; permlanex16 swaps rows.
template <int mask, typename T> DEV T wave_xor(T x) {
    static_assert(sizeof(T) == 4, "a lane swaps 32 bits");
    int i = __builtin_bit_cast(int, x);
    if (mask == 16) {
        i = __builtin_amdgcn_permlanex16(i, i, 0x76543210, (int)0xfedcba98, false, false);
        // Keeps the swap at this point: LLVM before 21 (seen with clang 19.1.7) moves it into a
        // branch that uses its result, where the lanes it takes values from may be inactive.
        asm volatile("" : "+v"(i));
    } else {
        i = __builtin_amdgcn_update_dpp(i, i, 0x160 | (mask & 15), 0xf, 0xf, true);
    }
    return __builtin_bit_cast(T, i);
}
template <typename T> DEV T wave_read(T x, int lane) {
    return __builtin_bit_cast(T, __builtin_amdgcn_readlane(__builtin_bit_cast(int, x), lane));
}
DEV uint32_t wave_ballot(bool x) { return __builtin_amdgcn_ballot_w32(x); }
DEV int dot4(int a, int b, int c) { return __builtin_amdgcn_sudot4(true, a, true, b, c, false); }
DEV f16x2 fma2(f16x2 a, f16x2 b, f16x2 c) { return a * b + c; } // contracted to v_pk_fma_f16
DEV float dot2(f16x2 a, f16x2 b, float c) { return __builtin_amdgcn_fdot2(a, b, c, false); }
DEV uint32_t byte_perm(uint32_t hi, uint32_t lo, uint32_t sel) {
    return __builtin_amdgcn_perm(hi, lo, sel);
}
DEV u32x2 byte_levels(u32x4 table, uint32_t n) { // two look-ups of 8, and a choice by bit 3
    uint32_t v[2];
#pragma unroll
    for (int i = 0; i < 2; i++, n >>= 4) {
        const uint32_t index = n & 0x07070707u;
        v[i] = byte_perm(byte_perm(table.w, table.z, index), byte_perm(table.y, table.x, index),
                         (n >> 1 & 0x04040404u) | 0x03020100u);
    }
    return u32x2{v[0], v[1]};
}
DEV float exp2_fast(float x) { return __builtin_amdgcn_exp2f(x); }
DEV float log2_fast(float x) { return __builtin_amdgcn_logf(x); }
DEV float rcp_fast(float x) { return __builtin_amdgcn_rcpf(x); }
// The digits of a processor's name, "gfx1103", as a hexadecimal number.
DEV constexpr int target_number(const char *name, int number = 0) {
    return *name >= '0' && *name <= '9'   ? target_number(name + 1, 16 * number + *name - '0')
           : *name >= 'a' && *name <= 'f' ? target_number(name + 1, 16 * number + *name - 'a' + 10)
                                          : number;
}
DEV int target_id() {
#if defined(__HIP_DEVICE_COMPILE__)
    constexpr int number = target_number(&__amdgcn_processor__[3]);
    return number;
#else
    return 0;
#endif
}

// The fragments. One lane's share of a 16x16 operand with K innermost (frag), and of the F32 or I32
// result (frag_c, frag_ci), whose element v stands at row frag_row(v), column frag_col(v). A lane's
// elements lie in FRAG_SLOTS columns; frag_slot(v) says in which.
//   operand: lane l holds all 16 k of row l % 16; lanes 16-31 repeat lanes 0-15
//   result:  lane l holds column l % 16, rows 2 v + l / 16
typedef _Float16 frag __attribute__((ext_vector_type(16)));
typedef int frag_i8 __attribute__((ext_vector_type(4)));
struct frag_c { float v[8]; };
struct frag_ci { int v[8]; };
enum { FRAG_SLOTS = 1 };
DEV int frag_row(int v) { return 2 * v + (int)(thread_index() >> 4 & 1); }
DEV int frag_col(int v) { return (int)(thread_index() & 15); }
DEV constexpr int frag_slot(int v) { return 0; }
// Column of a slot, and the reductions over all rows of each slot's column.
DEV int frag_slot_col(int s) { return (int)(thread_index() & 15); }
DEV float frag_col_max(float x) { return fmaxf(x, wave_xor<16>(x)); }
DEV float frag_col_sum(float x) { return x + wave_xor<16>(x); }

struct frag_halves { u32x4 lo, hi; };
// tile[row * stride + k], 16-byte aligned rows; row 0-15 is M (A) or N (B).
DEV frag frag_load(const f16 *tile, int stride) { // LDS
    const u32x4 *row = (const u32x4 *)(tile + (thread_index() & 15) * stride);
    const frag_halves h = {lget(row), lget(row + 1)};
    return __builtin_bit_cast(frag, h);
}
DEV frag frag_load_global(const f16 *tile, int64_t stride) {
    const u32x4 *row = (const u32x4 *)(tile + (thread_index() & 15) * stride);
    const frag_halves h = {gload(row), gload(row + 1)};
    return __builtin_bit_cast(frag, h);
}
typedef frag frag_b; // a B operand in the order that suits the platform best; here there is one
DEV frag_b frag_load_b(const f16 *tile, int stride) { return frag_load(tile, stride); }
DEV frag_i8 frag_i8_load(const int8_t *tile, int stride) { // LDS
    const u32x4 row = lget((const u32x4 *)(tile + (thread_index() & 15) * stride));
    return __builtin_bit_cast(frag_i8, row);
}
// The B operand whose element (k, n) is element (row frag_k_row(k), column n) of a result, rounded to
// F16: the even rows, which lanes 0-15 have, then the odd ones of lanes 16-31. From one k of an
// aligned group of four to the next are FRAG_K_STEP rows.
enum { FRAG_K_STEP = 2 };
DEV int frag_k_row(int k) { return (k << 1 & 15) | k >> 3; }
DEV frag frag_from_c(const frag_c &c) {
    const bool odd = (thread_index() & 16) != 0;
    uint32_t w[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const f16x2 h = {(f16)c.v[2 * i], (f16)c.v[2 * i + 1]};
        const uint32_t own = __builtin_bit_cast(uint32_t, h), other = wave_xor<16>(own);
        w[i] = odd ? other : own;
        w[4 + i] = odd ? own : other;
    }
    const frag_halves f = {{w[0], w[1], w[2], w[3]}, {w[4], w[5], w[6], w[7]}};
    return __builtin_bit_cast(frag, f);
}
typedef float frag_v8 __attribute__((ext_vector_type(8)));
typedef int frag_v8i __attribute__((ext_vector_type(8)));
DEV void wmma(frag_c &c, const frag &a, const frag &b) { // c += a b
    frag_v8 v = __builtin_bit_cast(frag_v8, c);
    v = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, v);
    c = __builtin_bit_cast(frag_c, v);
}
DEV void wmma_i8(frag_ci &c, const frag_i8 &a, const frag_i8 &b) {
    frag_v8i v = __builtin_bit_cast(frag_v8i, c);
    v = __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(true, a, true, b, v, false);
    c = __builtin_bit_cast(frag_ci, v);
}

#endif
#endif // the stand-in

// Functions that compute nothing, but keep the compiler from a harmful rearrangement. All of them
// stand here, besides one asm statement in wave_xor. Each comment says what the compiler does without the
// function, so that a later compiler can be tried without it: make it empty, compile, and compare
// registers (tests/gfx11/check). Clang 19.1.7 and 22.1.8 both need every one of them for gfx1100. On a
// platform for which a function has no code it does nothing.
#if defined(__GFX11__)
#define REGISTER_BARRIER(x) asm volatile("" : "+v"(x))
#elif defined(__CUDACC__)
#define REGISTER_BARRIER(x) asm volatile("" : "+r"(x))
#else
#define REGISTER_BARRIER(x) (void)(x)
#endif

// Returns x, and hides from the compiler that it is x: what is computed from the result is computed
// after this point. Otherwise addresses that only rare paths use are computed before the loop that
// holds those paths, and attention_prefill_128 spills 27 to 33 registers.
DEV int recomputed(int x) {
    REGISTER_BARRIER(x);
    return x;
}
// Makes the compiler compute x at this point. Otherwise it computes sums and addresses later, and their
// operands, which take more registers, are kept until then; or it computes them before a loop in which
// they do not change, and keeps them throughout: matvec_int8_q4_K_n8 takes 138 to 178 VGPRs, not 124.
DEV void computed(uint32_t &x) { REGISTER_BARRIER(x); }
DEV void computed(float &x) {
#if defined(__GFX11__)
    REGISTER_BARRIER(x);
#endif
    (void)x;
}
// No instruction is moved across this point. Otherwise loads begin as early as possible, and each holds
// its registers until its data is used: attention_decode_64 takes 246 to 253 VGPRs, not 198 to 205, and
// attention_prefill_128 spills with clang 19.
DEV void keep_order() {
#if defined(__GFX11__)
    __builtin_amdgcn_sched_barrier(0);
#endif
}
// Loads before this point are issued before it, and later ones after it. Otherwise a prefetch for the
// next trip of a loop is moved into that trip, and the loads of x for all columns to the top of the
// loop: matvec_int8_q4_K_n1 takes 97 VGPRs, not 86, and so 12 waves a SIMD, not 16. For nvcc it is a
// statement that may write to memory.
DEV void loads_issued() {
#if defined(__CUDACC__)
    asm volatile("" ::: "memory");
#else
    keep_order();
#endif
}
// Reads fields of the args before this point, all together, with one wait. Otherwise the compiler reads
// each field where it is first used, and so waits for one after the other: six times before the first
// load of a matvec's weights, not twice. Returns the first field; what is computed from the result is
// computed after this point. A single asm statement with READ_FIELDS operands has to take them all:
// where there are fewer fields, the second one fills the rest.
enum { READ_FIELDS = 21 };
#if defined(__GFX11__)
template <typename A, typename B, typename C, typename D, typename E, typename F, typename G,
          typename H, typename I, typename J, typename K, typename L, typename M, typename N,
          typename O, typename P, typename Q, typename R, typename S, typename T, typename U>
DEV A read_fields(A a, B b, C c, D d, E e, F f, G g, H h, I i, J j, K k, L l, M m, N n, O o, P p,
                  Q q, R r, S s, T t, U u) {
    asm volatile("" : "+s"(a) : "s"(b), "s"(c), "s"(d), "s"(e), "s"(f), "s"(g), "s"(h), "s"(i),
                 "s"(j), "s"(k), "s"(l), "s"(m), "s"(n), "s"(o), "s"(p), "s"(q), "s"(r), "s"(s),
                 "s"(t), "s"(u));
    return a;
}
#endif
template <typename First, typename Second, typename... More>
DEV First read_together(First first, Second second, More... more) {
#if defined(__GFX11__)
    if constexpr (sizeof...(more) + 2 < READ_FIELDS) {
        return read_together(first, second, second, more...);
    } else {
        return read_fields(first, second, more...);
    }
#else
    (void)second, (void)sizeof...(more);
    return first;
#endif
}
// A kernel's args, to be read from memory again. Otherwise fields that are used after a loop stay in
// registers throughout it, and the attention kernels spill 2 to 17 SGPRs each.
template <typename T> DEV const T &reread(const T &args) {
#if defined(__GFX11__)
    typedef const __attribute__((address_space(4))) T constant;
    (void)args;
    return *(const T *)(constant *)__builtin_amdgcn_kernarg_segment_ptr();
#else
    return args;
#endif
}

// From here on every platform is the same.

template <typename To, typename From> DEV To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits are reinterpreted, not converted");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
DEV int lane_index() { return (int)(thread_index() & 31); }
DEV int wave_index() { return (int)(thread_index() >> 5); }

// ---------------------------------------------------------------------------------------------
// >>wave
// ---------------------------------------------------------------------------------------------

// Over the 32 lanes, the same bits in each.
template <typename T> DEV T wave_sum(T x) {
    x += wave_xor<1>(x);
    x += wave_xor<2>(x);
    x += wave_xor<4>(x);
    x += wave_xor<8>(x);
    return x + wave_xor<16>(x);
}
DEV float wave_max(float x) {
    x = fmaxf(x, wave_xor<1>(x));
    x = fmaxf(x, wave_xor<2>(x));
    x = fmaxf(x, wave_xor<4>(x));
    x = fmaxf(x, wave_xor<8>(x));
    return fmaxf(x, wave_xor<16>(x));
}

// Over a block, the same bits in every thread. work: LDS of BLOCK_WORK floats that nothing else of the
// kernel uses, so that one barrier does.
enum { BLOCK_WORK = 32 };
DEV float block_share(float x, float *work, float none) { // lane w gets wave w's x
    if (lane_index() == 0) lput(work + wave_index(), x);
    block_sync_lds();
    return lane_index() < (int)n_threads() / 32 ? lget(work + lane_index()) : none;
}
DEV float block_sum(float x, float *work) {
    x = wave_sum(x);
    return n_threads() == 32 ? x : wave_sum(block_share(x, work, 0.0f));
}
DEV float block_max(float x, float *work) {
    x = wave_max(x);
    return n_threads() == 32 ? x : wave_max(block_share(x, work, -INFINITY));
}

// How many blocks came to a counter in global memory before this one; what they stored before is
// there for this one after. word: LDS. A wave of gfx11 has its own stores to wait for and may have
// an L0 of its own to drop; on NVIDIA the fence of one thread is for all that the barrier ordered.
DEV uint32_t block_ticket(uint32_t *counter, uint32_t *word) {
#if !defined(__CUDACC__)
    fence_device();
#endif
    block_sync();
    if (thread_index() == 0) {
#if defined(__CUDACC__)
        fence_device();
#endif
        lput(word, atomic_inc(counter));
#if defined(__CUDACC__)
        fence_device();
#endif
    }
    block_sync();
#if !defined(__CUDACC__)
    fence_device();
#endif
    return lget(word);
}

// ---------------------------------------------------------------------------------------------
// >>memory
// ---------------------------------------------------------------------------------------------

DEV float bf16_f32(uint16_t b) { return bits<float>((uint32_t)b << 16); }
DEV uint16_t f32_bf16(float x) { // nearest even, NaN stays NaN
    const uint32_t u = bits<uint32_t>(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 64u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
DEV float f16_f32(uint16_t h) { return (float)bits<f16>(h); }
DEV uint16_t f32_f16(float x) { return bits<uint16_t>((f16)x); }

// 8 bytes at an even address.
DEV u32x2 gload_even(const uint16_t *p) {
#if defined(__GFX11__)
    typedef u32x2 even __attribute__((aligned(2))); // the hardware reads at any address
    return *(const __attribute__((address_space(1))) even *)p;
#else
    return make2(gload(p) | (uint32_t)gload(p + 1) << 16,
                 gload(p + 2) | (uint32_t)gload(p + 3) << 16);
#endif
}
// Address of row (i1, i2, i3), and of the same in an operand that is repeated where it has 1.
DEV char *row_of(const rocq_k_tensor &t, int64_t i1, int64_t i2, int64_t i3) {
    return (char *)t.data + i1 * t.stride[0] + i2 * t.stride[1] + i3 * t.stride[2];
}
DEV char *row_repeated(const rocq_k_tensor &t, int64_t i1, int64_t i2, int64_t i3) {
    return row_of(t, t.ne[1] == 1 ? 0 : i1, t.ne[2] == 1 ? 0 : i2, t.ne[3] == 1 ? 0 : i3);
}
// Element i of a row of F32, F16 or BF16: its bits, which may be under way, and what they mean.
DEV uint32_t get_bits(int32_t format, const char *row, int64_t i) {
    return format == ROCQ_F32 ? gload((const uint32_t *)row + i) : gload((const uint16_t *)row + i);
}
DEV float bits_float(int32_t format, uint32_t x) {
    if (format == ROCQ_F32) return bits<float>(x);
    return format == ROCQ_F16 ? f16_f32((uint16_t)x) : bf16_f32((uint16_t)x);
}
DEV float get_float(int32_t format, const char *row, int64_t i) {
    if (format == ROCQ_F32) return gload((const float *)row + i); // as one branch, not two
    return bits_float(format, gload((const uint16_t *)row + i));
}
DEV void put_float(int32_t format, char *row, int64_t i, float x) {
    if (format == ROCQ_F32) gstore((float *)row + i, x);
    else gstore((uint16_t *)row + i, format == ROCQ_F16 ? f32_f16(x) : f32_bf16(x));
}
DEV float exp_fast(float x) { return exp2_fast(x * 1.44269504f); }

// What C's library calls exp, tanh and erfc, to within 4e-7 of the result wherever that is a normal
// number; a denormal result may be 0. They are written out because each platform's own come from a
// library of its age, and because the tests on the CPU then run these and no others.
DEV float exp_full(float x) { // e^x = 2^p (1 + rest ln 2), where p is x log2(e) rounded
    const float p = x * 1.44269502f, y = exp2_fast(p);
    const float rest = fmaf(x, 1.44269502f, -p) + x * 1.92596299e-8f;
    return fabsf(p) < 160.0f ? fmaf(y, rest * 0.693147181f, y) : y; // y is 0, inf or NaN beyond
}
DEV float tanh_full(float x) { // a polynomial where 1 - 2 / (e^2x + 1) would cancel
    const float z = x * x;
    if (z < 0.25f) {
        float y = fmaf(z, 0.0179991693f, -0.0533910327f);
        y = fmaf(z, y, 0.133305134f);
        y = fmaf(z, y, -0.333333116f);
        return fmaf(x * z, y, x);
    }
    const float y = fmaf(-2.0f, rcp_fast(exp_fast(2.0f * fabsf(x)) + 1.0f), 1.0f);
    return x < 0.0f ? -y : y;
}
// For z = |x|: erfc(z) = exp(-z^2) P(u) / (z + 2), P of degree 10 in u = (z - 2) / (z + 2), which is in
// [-1, 1). z^2 is taken in two parts, since exp turns its rounding error into a relative one. Not for
// NaN, which comes out as 0.
DEV float erfc_full(float x) {
    const float z = fminf(fabsf(x), 16.0f), square = z * z, rest = fmaf(z, z, -square);
    const float r = rcp_fast(z + 2.0f), u = fmaf(-4.0f, r, 1.0f);
    float p = fmaf(u, 8.43223943e-5f, 7.32037539e-5f);
    p = fmaf(u, p, -5.98765424e-4f);
    p = fmaf(u, p, -8.61340977e-4f);
    p = fmaf(u, p, 3.05831432e-3f);
    p = fmaf(u, p, 6.48690384e-3f);
    p = fmaf(u, p, -2.15032524e-2f);
    p = fmaf(u, p, -3.64433389e-2f);
    p = fmaf(u, p, 0.279471467f);
    p = fmaf(u, p, -0.687160637f);
    p = fmaf(u, p, 1.02158271f);
    p *= r * exp_full(-square) * (1.0f - rest);
    return x < 0.0f ? 2.0f - p : p;
}

DEV float activation(int32_t kind, float x) { // as in rocq_activation
    switch (kind) {
    case ROCQ_SILU: return x * rcp_fast(1.0f + exp_fast(-x));
    case ROCQ_GELU:
        return x * rcp_fast(1.0f + exp_fast(-1.59576912160573f * (x + 0.044715f * x * x * x)));
    case ROCQ_GELU_ERF: return 0.5f * x * erfc_full(-0.707106781186548f * x);
    case ROCQ_RELU: return fmaxf(x, 0.0f);
    case ROCQ_TANH: return tanh_full(x);
    default: return x;
    }
}


// ---------------------------------------------------------------------------------------------
// >>blocks
// ---------------------------------------------------------------------------------------------
// The id of a format by its name in the lists of rocq.h, and those formats that have blocks.
enum {
#define ROCQ_X(NAME, name, id, elems, bytes) format_id_##name = id,
    ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
};
#define BLOCK_FORMATS(F, X) ROCQ_K_INT8_FORMATS(F, X) F(X, mxfp6_e2m3) F(X, mxfp6_e3m2)

// The planar layout, a unit of 32 weights at a time: planes_of finds the planes, load_raw reads a
// unit with the widest loads there are, decode_raw takes it apart. A lane that loads one unit while
// it works on another keeps only the raw registers of both. The planes are drawn at >>kernels in
// rocq.h.
//   value of element e = 4 i + b: scale[e / 16] q - min[e / 16], q being byte b of q[i]
// scale q and min are exact in F32, so the value has one rounding at most. Where a format counts
// its codes from an offset (Q4_0: 8), min holds scale times the offset; decode_word subtracts it
// from the code instead, which also keeps the sign of a zero and an infinite scale as they are on
// the CPU: its values have ggml's bits.

// Bytes per 8 units of the planes in their order: n (N, L), c (C, H), b (B), s (sl and Q2_K's and
// Q6_K's scales), t (sh), d (d, dmin, m, e, head and what lies with them). offset: what a code
// counts from. is_signed: q holds signed bytes. halves: elements 16-31 have a scale of their own.
// has_min: there is a min beside the offset.
template <int F> struct block_layout;
#define ROCQ_X(F, N, C, B, S, T, D, OFFSET, SIGNED, HALVES, MIN)                              \
    template <> struct block_layout<F> {                                                      \
        enum { n = N, c = C, b = B, s = S, t = T, d = D };                                    \
        enum { offset = OFFSET, is_signed = SIGNED };                                         \
        enum { halves = HALVES, has_min = MIN };                                              \
    };
//                        n    c   b   s  t  d   offset signed halves min
ROCQ_X(ROCQ_Q4_0,        128,   0,  0,  0, 0, 16,  8,    0,     0,   0)
ROCQ_X(ROCQ_Q4_1,        128,   0,  0,  0, 0, 32,  0,    0,     0,   1)
ROCQ_X(ROCQ_Q5_0,        128,   0, 32,  0, 0, 16, 16,    0,     0,   0)
ROCQ_X(ROCQ_Q5_1,        128,   0, 32,  0, 0, 32,  0,    0,     0,   1)
ROCQ_X(ROCQ_Q8_0,        128, 128,  0,  0, 0, 16,  0,    1,     0,   0)
ROCQ_X(ROCQ_Q2_K,          0,  64,  0, 16, 0,  4,  0,    0,     1,   1)
ROCQ_X(ROCQ_Q3_K,          0,  64, 32,  8, 4,  2,  4,    0,     1,   0)
ROCQ_X(ROCQ_Q4_K,        128,   0,  0,  0, 0, 16,  0,    0,     0,   1)
ROCQ_X(ROCQ_Q5_K,        128,   0, 32,  0, 0, 16,  0,    0,     0,   1)
ROCQ_X(ROCQ_Q6_K,        128,  64,  0, 16, 0,  2, 32,    0,     1,   0)
ROCQ_X(ROCQ_IQ4_NL,      128,   0,  0,  0, 0, 16,  0,    1,     0,   0)
ROCQ_X(ROCQ_IQ4_XS,      128,   0,  0,  0, 0,  8,  0,    1,     0,   0)
ROCQ_X(ROCQ_MXFP4,       128,   0,  0,  0, 0,  8,  0,    1,     0,   0)
ROCQ_X(ROCQ_MXFP6_E2M3,  128,  64,  0,  0, 0,  8,  0,    0,     0,   0)
ROCQ_X(ROCQ_MXFP6_E3M2,  128,  64,  0,  0, 0,  8,  0,    0,     0,   0)
#undef ROCQ_X

template <int F> DEV constexpr bool is_mxfp6() {
    return F == ROCQ_MXFP6_E2M3 || F == ROCQ_MXFP6_E3M2;
}
template <int F> DEV constexpr bool is_plain() {
    return F == ROCQ_F32 || F == ROCQ_F16 || F == ROCQ_BF16;
}

template <int F> struct planes { const char *n, *c, *b, *s, *t, *d; };

// base: of a tensor with n_units units in all.
template <int F> DEV planes<F> planes_of(const void *base, int64_t n_units) {
    typedef block_layout<F> l;
    planes<F> p;
    p.n = (const char *)base;
    p.c = p.n + n_units * l::n / 8;
    p.b = p.c + n_units * l::c / 8;
    p.s = p.b + n_units * l::b / 8;
    p.t = p.s + n_units * l::s / 8;
    p.d = p.t + n_units * l::t / 8;
    return p;
}
// The planes from a row's first unit on. With a uniform unit here and a 32-bit one for load_raw, an
// address is a scalar base and one 32-bit offset.
template <int F> DEV planes<F> planes_at(const planes<F> &p, int64_t unit) {
    typedef block_layout<F> l;
    planes<F> q;
    q.n = p.n + unit * l::n / 8;
    q.c = p.c + unit * l::c / 8;
    q.b = p.b + unit * l::b / 8;
    q.s = p.s + unit * l::s / 8;
    q.t = p.t + unit * l::t / 8;
    q.d = p.d + unit * l::d / 8;
    return q;
}

// A unit as loaded; what a format has no plane for is 0 and takes no register.
template <int F> struct raw {
    u32x4 n, c, d;
    uint32_t b, s, t;
};

// Of superblock formats, unit 0 of p begins a superblock. I: int64_t or uint32_t.
template <int F, typename I> DEV raw<F> load_raw(const planes<F> &p, I unit) {
    typedef block_layout<F> l;
    const u32x4 none = make4(0, 0, 0, 0);
    raw<F> r = {none, none, none, 0, 0, 0};
    if constexpr (l::n != 0) r.n = gload((const u32x4 *)(p.n + unit * 16));
    if constexpr (l::c == 128) r.c = gload((const u32x4 *)(p.c + unit * 16));
    if constexpr (l::c == 64) {
        const u32x2 c = gload((const u32x2 *)(p.c + unit * 8));
        r.c = make4(c.x, c.y, 0, 0);
    }
    if constexpr (l::b != 0) r.b = gload((const uint32_t *)(p.b + unit * 4));
    if constexpr (l::s == 16) r.s = gload((const uint16_t *)(p.s + unit * 2));
    if constexpr (l::s == 8) r.s = gload((const uint8_t *)(p.s + unit));
    if constexpr (l::t != 0) r.t = gload((const uint32_t *)(p.t + unit / 8 * 4));
    if constexpr (F == ROCQ_Q4_K || F == ROCQ_Q5_K) {
        r.d = gload((const u32x4 *)(p.d + unit / 8 * 16));
    } else if constexpr (F == ROCQ_IQ4_XS) {
        const u32x2 d = gload((const u32x2 *)(p.d + unit / 8 * 8));
        r.d = make4(d.x, d.y, 0, 0);
    } else if constexpr (F == ROCQ_Q2_K) {
        r.d = make4(gload((const uint32_t *)(p.d + unit / 8 * 4)), 0, 0, 0);
    } else if constexpr (l::d == 2) {
        r.d = make4(gload((const uint16_t *)(p.d + unit / 8 * 2)), 0, 0, 0);
    } else if constexpr (l::d == 32) {
        r.d = make4(gload((const uint32_t *)(p.d + unit * 4)), 0, 0, 0);
    } else if constexpr (l::d == 16) {
        r.d = make4(gload((const uint16_t *)(p.d + unit * 2)), 0, 0, 0);
    } else {
        r.d = make4(gload((const uint8_t *)(p.d + unit)), 0, 0, 0);
    }
    return r;
}

// The reverse of load_raw. What belongs to a superblock is stored by the lane of its unit 0.
template <int F> DEV void store_raw(const planes<F> &p, int64_t unit, const raw<F> &r) {
    typedef block_layout<F> l;
    const bool first = unit % 8 == 0;
    if constexpr (l::n != 0) gstore((u32x4 *)p.n + unit, r.n);
    if constexpr (l::c == 128) gstore((u32x4 *)p.c + unit, r.c);
    if constexpr (l::c == 64) gstore((u32x2 *)p.c + unit, make2(r.c.x, r.c.y));
    if constexpr (l::b != 0) gstore((uint32_t *)p.b + unit, r.b);
    if constexpr (l::s == 16) gstore((uint16_t *)p.s + unit, r.s);
    if constexpr (l::s == 8) gstore((uint8_t *)p.s + unit, r.s);
    if constexpr (l::t != 0) {
        if (first) gstore((uint32_t *)p.t + unit / 8, r.t);
    }
    if constexpr (F == ROCQ_Q4_K || F == ROCQ_Q5_K) {
        if (first) gstore((u32x4 *)p.d + unit / 8, r.d);
    } else if constexpr (F == ROCQ_IQ4_XS) {
        if (first) gstore((u32x2 *)p.d + unit / 8, make2(r.d.x, r.d.y));
    } else if constexpr (F == ROCQ_Q2_K) {
        if (first) gstore((uint32_t *)p.d + unit / 8, r.d.x);
    } else if constexpr (l::d == 2) {
        if (first) gstore((uint16_t *)p.d + unit / 8, r.d.x);
    } else if constexpr (l::d == 32) {
        gstore((uint32_t *)p.d + unit, r.d.x);
    } else if constexpr (l::d == 16) {
        gstore((uint16_t *)p.d + unit, r.d.x);
    } else {
        gstore((uint8_t *)p.d + unit, r.d.x);
    }
}

DEV uint32_t level_word(const int8_t *level, int i) {
    return (uint32_t)(uint8_t)level[i] | (uint32_t)(uint8_t)level[i + 1] << 8 |
           (uint32_t)(uint8_t)level[i + 2] << 16 | (uint32_t)(uint8_t)level[i + 3] << 24;
}
// Of the low nibbles of n's bytes, and of the high ones.
template <int F> DEV u32x2 levels_of(uint32_t n) {
    constexpr int8_t iq4[16] = {ROCQ_IQ4_LEVELS}, mxfp4[16] = {ROCQ_MXFP4_LEVELS};
    const int8_t *level = F == ROCQ_MXFP4 ? mxfp4 : iq4;
    return byte_levels(make4(level_word(level, 0), level_word(level, 4), level_word(level, 8),
                             level_word(level, 12)), n);
}

// The codes of a unit, words i of 8: element 4 i + b is byte b.
template <int F> DEV uint32_t decode_code(const raw<F> &r, int i) {
    typedef block_layout<F> l;
    const uint32_t ns[4] = {r.n.x, r.n.y, r.n.z, r.n.w}, cs[4] = {r.c.x, r.c.y, r.c.z, r.c.w};
    const uint32_t n = ns[i & 3];
    if constexpr (F == ROCQ_Q8_0) return i < 4 ? n : cs[i & 3];
    if constexpr (F == ROCQ_IQ4_NL || F == ROCQ_IQ4_XS || F == ROCQ_MXFP4) {
        const u32x2 levels = levels_of<F>(n);
        return i < 4 ? levels.x : levels.y;
    }
    uint32_t q = 0;
    if constexpr (l::n != 0) q = (i < 4 ? n : n >> 4) & 0x0f0f0f0fu;
    if constexpr (l::c != 0) { // at bit 4, or 0 where there is no N
        const int at = 2 * (i & 3), to = l::n != 0 ? 4 : 0;
        const uint32_t c = cs[i >> 2];
        q |= (at < to ? c << (to - at) : c >> (at - to)) & 0x03030303u << to;
    }
    if constexpr (l::b != 0) {
        const int to = l::n != 0 ? 4 : 2;
        q |= (i < to ? r.b << (to - i) : r.b >> (i - to)) & 0x01010101u << to;
    }
    return q;
}

// value = d sc[g] (q - offset) - dmin mn[g], g = element / 16; the integers are 1 where a format
// has none, and equal where it has no halves. dmin is 0 without a min.
struct block_factors {
    float d, dmin;
    int32_t sc[2], mn[2];
};

// 2^(e - 127) for e < 255.
DEV float pow2_e8m0(uint32_t e) { return bits<float>(e == 0 ? 1u << 22 : e << 23); }

template <int F, typename I> DEV block_factors decode_factors(const raw<F> &r, I unit) {
    const uint32_t u = (uint32_t)unit & 7u;
    block_factors f = {0.0f, 0.0f, {1, 1}, {1, 1}};
    if constexpr (F == ROCQ_MXFP4) { // 2^(e - 128), a denormal for e < 2
        const uint32_t e = r.d.x;
        f.d = bits<float>(e < 2 ? 1u << (21 + e) : (e - 1) << 23);
    } else if constexpr (is_mxfp6<F>()) {
        f.d = r.d.x == 255 ? bits<float>(0x7fc00000u) : pow2_e8m0(r.d.x);
    } else {
        f.d = f16_f32((uint16_t)r.d.x);
    }
    if constexpr (F == ROCQ_Q4_1 || F == ROCQ_Q5_1) f.dmin = -f16_f32((uint16_t)(r.d.x >> 16));
    if constexpr (F == ROCQ_Q2_K) {
        f.dmin = f16_f32((uint16_t)(r.d.x >> 16));
        f.sc[0] = (int)(r.s & 15);
        f.mn[0] = (int)(r.s >> 4 & 15);
        f.sc[1] = (int)(r.s >> 8 & 15);
        f.mn[1] = (int)(r.s >> 12);
    }
    if constexpr (F == ROCQ_Q3_K) {
        const uint32_t high = r.t >> 4 * u;
        f.sc[0] = (int)((r.s & 15) | (high << 4 & 0x30)) - 32;
        f.sc[1] = (int)(r.s >> 4 | (high << 2 & 0x30)) - 32;
    }
    if constexpr (F == ROCQ_Q4_K || F == ROCQ_Q5_K) {
        const uint32_t low = byte_perm(r.d.z, r.d.y, u), high = r.d.w >> 4 * u;
        f.dmin = f16_f32((uint16_t)(r.d.x >> 16));
        f.sc[0] = f.sc[1] = (int)((low & 15) | (high << 4 & 0x30));
        f.mn[0] = f.mn[1] = (int)((low >> 4 & 15) | (high << 2 & 0x30));
    }
    if constexpr (F == ROCQ_Q6_K) {
        f.sc[0] = (int8_t)(r.s & 255);
        f.sc[1] = (int8_t)(r.s >> 8);
    }
    if constexpr (F == ROCQ_IQ4_XS) {
        const uint32_t low = r.d.y >> 4 * u & 15, high = r.d.x >> 2 * u;
        f.sc[0] = f.sc[1] = (int)(low | (high >> 12 & 0x30)) - 32;
    }
    return f;
}

struct unit {
    uint32_t q[8];
    float scale[2], min[2];
};
template <int F> DEV float unit_scale(const block_factors &f, int g) { return f.d * (float)f.sc[g]; }
template <int F> DEV float unit_min(const block_factors &f, int g) {
    if (block_layout<F>::has_min) return f.dmin * (float)f.mn[g];
    return (float)block_layout<F>::offset * unit_scale<F>(f, g);
}

// Of the MXFP6 formats, q are the 6-bit codes and scale is 2^(e - 127): decode_word has the values.
template <int F, typename I> DEV unit decode_raw(const raw<F> &r, I at) {
    const block_factors f = decode_factors<F>(r, at);
    unit u;
#pragma unroll
    for (int i = 0; i < 8; i++) u.q[i] = decode_code<F>(r, i);
#pragma unroll
    for (int g = 0; g < 2; g++) {
        u.scale[g] = unit_scale<F>(f, g);
        u.min[g] = unit_min<F>(f, g);
    }
    return u;
}

// Two 6-bit codes, in bytes 0 and 2, as F16: the exponent lies at F16's, 14 (E2M3) or 12 (E3M2) too
// low, and subnormals stay exact.
template <int F> DEV f16x2 mxfp6_halves(uint32_t codes) {
    const int up = F == ROCQ_MXFP6_E2M3 ? 7 : 8;
    return bits<f16x2>((codes << up & 0x001f001fu << up) | (codes << 10 & 0x80008000u));
}

// Elements 4 i to 4 i + 3, with the bits that the CPU backend gives them.
template <int F> DEV void decode_word(const unit &u, int i, float v[4]) {
    typedef block_layout<F> l;
    const uint32_t q = u.q[i];
    const float scale = u.scale[i >> 2], min = u.min[i >> 2];
    if constexpr (is_mxfp6<F>()) {
        const float up = F == ROCQ_MXFP6_E2M3 ? 16384.0f : 4096.0f;
        const f16x2 even = mxfp6_halves<F>(q & 0x00ff00ffu);
        const f16x2 odd = mxfp6_halves<F>(q >> 8 & 0x00ff00ffu);
        const f16 h[4] = {even.x, odd.x, even.y, odd.y};
        // + 0: -0 decodes as +0
        for (int b = 0; b < 4; b++) v[b] = fmaf((float)h[b], up, 0.0f) * scale;
    } else {
#pragma unroll
        for (int b = 0; b < 4; b++) {
            const uint32_t byte = q >> 8 * b & 255;
            const float code = l::is_signed ? (float)(int8_t)byte : (float)byte;
            if (l::offset != 0) v[b] = (code - (float)l::offset) * scale;
            else if (l::has_min) v[b] = fmaf(code, scale, -min);
            else v[b] = code * scale;
        }
    }
}

// The values of one word of codes, q = word i of a unit, where i need not be constant.
template <int F> DEV void decode_quad(uint32_t q, const block_factors &f, int i, float v[4]) {
    block_factors half = f;
    half.sc[0] = i < 4 ? f.sc[0] : f.sc[1];
    half.mn[0] = i < 4 ? f.mn[0] : f.mn[1];
    unit one;
    one.q[0] = q;
    one.scale[0] = unit_scale<F>(half, 0);
    one.min[0] = unit_min<F>(half, 0);
    decode_word<F>(one, 0, v);
}

// Plain formats: a piece is 16 bytes, 4 (F32) or 8 elements. Of block formats it is a unit.
template <int F> DEV constexpr int piece_elems() {
    return F == ROCQ_F32 ? 4 : is_plain<F>() ? 8 : 32;
}

// Elements 4 i to 4 i + 3 of a piece.
template <int F> DEV void decode_piece(const u32x4 &piece, int i, float v[4]) {
    const uint32_t w[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int b = 0; b < 4; b++) {
        if constexpr (F == ROCQ_F32) v[b] = bits<float>(w[b]);
        if constexpr (F == ROCQ_F16) v[b] = f16_f32((uint16_t)(w[2 * i + b / 2] >> 16 * (b & 1)));
        if constexpr (F == ROCQ_BF16) {
            const uint32_t pair = w[2 * i + b / 2];
            v[b] = bits<float>(b & 1 ? pair & 0xffff0000u : pair << 16);
        }
    }
}

// -- the GGUF layout --
// Blocks as they lie in the file, read with nothing wider than their alignment warrants: 2 bytes, 1
// for the MX formats. gfx11 reads at any address, and its compiler joins neighbouring loads.

template <int F> struct gguf_block;
#define ROCQ_X(NAME, name, id, n_elems, n_bytes)  \
    template <> struct gguf_block<ROCQ_##NAME> {  \
        typedef rocq_block_##name type;           \
        enum { elems = n_elems, bytes = n_bytes }; \
    };
ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X

// Elements and bytes of a block, for formats known only when the kernel runs.
DEV int format_elems(int32_t format) {
    switch (format) {
#define ROCQ_X(NAME, name, id, elems, bytes) \
    case id: return elems;
        ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
    default: return 1;
    }
}
DEV int format_bytes(int32_t format) {
    switch (format) {
#define ROCQ_X(NAME, name, id, elems, bytes) \
    case id: return bytes;
        ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
    default: return 4;
    }
}

DEV uint32_t load_by2(const void *p) { // 4 bytes
    const uint16_t *h = (const uint16_t *)p;
    return (uint32_t)gload(h) | (uint32_t)gload(h + 1) << 16;
}
DEV uint32_t load_by1(const void *p) {
    const uint8_t *b = (const uint8_t *)p;
    return (uint32_t)gload(b) | (uint32_t)gload(b + 1) << 8 | (uint32_t)gload(b + 2) << 16 |
           (uint32_t)gload(b + 3) << 24;
}

// Bits 0-3 of x as bit 0 of bytes 0-3.
DEV uint32_t spread_bits(uint32_t x) { return (x & 15u) * 0x00204081u & 0x01010101u; }

// The low nibbles of bytes 0-3 of x, whose high ones are 0, as bits 0-15.
DEV uint32_t join_nibbles(uint32_t x) {
    x = (x | x >> 4) & 0x00ff00ffu;
    return (x | x >> 8) & 0xffffu;
}

// Codes as stored of elements 4 i to 4 i + 3 of unit u (32 elements) of a block, a byte each.
template <int F> DEV uint32_t gguf_codes(const char *block, int u, int i) {
    const typename gguf_block<F>::type *any = (const typename gguf_block<F>::type *)block;
    switch (F) {
    case ROCQ_Q4_0:
    case ROCQ_IQ4_NL: {
        const rocq_block_q4_0 *b = (const rocq_block_q4_0 *)any;
        return load_by2(b->qs + 4 * (i & 3)) >> (i & 4) & 0x0f0f0f0fu;
    }
    case ROCQ_Q4_1: {
        const rocq_block_q4_1 *b = (const rocq_block_q4_1 *)any;
        return load_by2(b->qs + 4 * (i & 3)) >> (i & 4) & 0x0f0f0f0fu;
    }
    case ROCQ_Q5_0: {
        const rocq_block_q5_0 *b = (const rocq_block_q5_0 *)any;
        return (load_by2(b->qs + 4 * (i & 3)) >> (i & 4) & 0x0f0f0f0fu) |
               spread_bits(load_by2(b->qh) >> 4 * i) << 4;
    }
    case ROCQ_Q5_1: {
        const rocq_block_q5_1 *b = (const rocq_block_q5_1 *)any;
        return (load_by2(b->qs + 4 * (i & 3)) >> (i & 4) & 0x0f0f0f0fu) |
               spread_bits(load_by2(b->qh) >> 4 * i) << 4;
    }
    case ROCQ_Q8_0: return load_by2(((const rocq_block_q8_0 *)any)->qs + 4 * i);
    case ROCQ_Q2_K: {
        const rocq_block_q2_K *b = (const rocq_block_q2_K *)any;
        return load_by2(b->qs + 32 * (u >> 2) + 4 * i) >> 2 * (u & 3) & 0x03030303u;
    }
    case ROCQ_Q3_K: {
        const rocq_block_q3_K *b = (const rocq_block_q3_K *)any;
        return (load_by2(b->qs + 32 * (u >> 2) + 4 * i) >> 2 * (u & 3) & 0x03030303u) |
               (load_by2(b->hmask + 4 * i) >> u & 0x01010101u) << 2;
    }
    case ROCQ_Q4_K: {
        const rocq_block_q4_K *b = (const rocq_block_q4_K *)any;
        return load_by2(b->qs + 32 * (u >> 1) + 4 * i) >> 4 * (u & 1) & 0x0f0f0f0fu;
    }
    case ROCQ_Q5_K: {
        const rocq_block_q5_K *b = (const rocq_block_q5_K *)any;
        return (load_by2(b->qs + 32 * (u >> 1) + 4 * i) >> 4 * (u & 1) & 0x0f0f0f0fu) |
               (load_by2(b->qh + 4 * i) >> u & 0x01010101u) << 4;
    }
    case ROCQ_Q6_K: {
        const rocq_block_q6_K *b = (const rocq_block_q6_K *)any;
        return (load_by2(b->ql + 64 * (u >> 2) + 32 * (u & 1) + 4 * i) >> 2 * (u & 2) &
                0x0f0f0f0fu) |
               (load_by2(b->qh + 32 * (u >> 2) + 4 * i) >> 2 * (u & 3) & 0x03030303u) << 4;
    }
    case ROCQ_IQ4_XS: {
        const rocq_block_iq4_xs *b = (const rocq_block_iq4_xs *)any;
        return load_by2(b->qs + 16 * u + 4 * (i & 3)) >> (i & 4) & 0x0f0f0f0fu;
    }
    case ROCQ_MXFP4: {
        const rocq_block_mxfp4 *b = (const rocq_block_mxfp4 *)any;
        return load_by1(b->qs + 4 * (i & 3)) >> (i & 4) & 0x0f0f0f0fu;
    }
    default: { // MXFP6: 3 bytes
        const uint8_t *qs = ((const rocq_block_mxfp6_e2m3 *)any)->qs + 3 * i;
        const uint32_t v = (uint32_t)gload(qs) | (uint32_t)gload(qs + 1) << 8 |
                           (uint32_t)gload(qs + 2) << 16;
        return (v & 63u) | (v & 63u << 6) << 2 | (v & 63u << 12) << 4 | (v & 63u << 18) << 6;
    }
    }
}

// The scale fields of unit u of a block as the planar layout has them: s, t and d of load_raw. The
// rest of the result is 0.
template <int F> DEV raw<F> gguf_scales(const char *block, int u) {
    raw<F> r = {};
    switch (F) {
    case ROCQ_Q4_1:
    case ROCQ_Q5_1: r.d.x = load_by2(block); break;
    case ROCQ_Q2_K: {
        const rocq_block_q2_K *b = (const rocq_block_q2_K *)(const void *)block;
        r.s = gload((const uint16_t *)b->scales + u);
        r.d.x = load_by2(&b->d);
        break;
    }
    case ROCQ_Q3_K: {
        const rocq_block_q3_K *b = (const rocq_block_q3_K *)(const void *)block;
        // Bits 0-3 of sc[2 u] and sc[2 u + 1] are nibbles u / 4 of two bytes.
        const uint32_t low = gload((const uint16_t *)b->scales + (u & 3)) >> 4 * (u >> 2) & 0x0f0fu;
        r.s = (low | low >> 4) & 255u;
        // Bits 4-5 of sc[g]: the block has them at bit 8 (g % 4) + 2 (g / 4), the plane at bit 2 g: a
        // 4 by 4 matrix of two-bit numbers is transposed, by two swaps of halves.
        r.t = load_by2(b->scales + 8);
        const uint32_t near = (r.t ^ r.t >> 6) & 0x00cc00ccu;
        r.t ^= near ^ near << 6;
        const uint32_t far = (r.t ^ r.t >> 12) & 0x0000f0f0u;
        r.t ^= far ^ far << 12;
        r.d.x = gload(&b->d);
        break;
    }
    case ROCQ_Q4_K:
    case ROCQ_Q5_K: { // both begin alike
        const rocq_block_q4_K *b = (const rocq_block_q4_K *)(const void *)block;
        // Byte g % 4 of sc and mn: bits 0-5 are those of sc[g] and mn[g] for g < 4, bits 6-7 are
        // bits 4-5 of those for g >= 4, whose bits 0-3 are in low.
        const uint32_t sc = load_by2(b->scales), mn = load_by2(b->scales + 4);
        const uint32_t low = load_by2(b->scales + 8), two = 0x03030303u;
        const uint32_t hi0 = (sc >> 4 & two) | (mn >> 4 & two) << 2;
        const uint32_t hi4 = (sc >> 6 & two) | (mn >> 6 & two) << 2;
        r.d = make4(load_by2(&b->d), (sc & 0x0f0f0f0fu) | (mn & 0x0f0f0f0fu) << 4, low,
                    join_nibbles(hi0) | join_nibbles(hi4) << 16);
        break;
    }
    case ROCQ_Q6_K: {
        const rocq_block_q6_K *b = (const rocq_block_q6_K *)(const void *)block;
        r.s = gload((const uint16_t *)b->scales + u);
        r.d.x = gload(&b->d);
        break;
    }
    case ROCQ_IQ4_XS:
        r.d.x = load_by2(block);
        r.d.y = load_by2(block + 4);
        break;
    case ROCQ_MXFP4:
    case ROCQ_MXFP6_E2M3:
    case ROCQ_MXFP6_E3M2: r.d.x = gload((const uint8_t *)block); break;
    default: r.d.x = gload((const uint16_t *)block); break;
    }
    return r;
}

// All of unit u of a block as the planar layout has it. The codes are first spread to a byte each,
// which all formats can do, and then joined into the nibbles, pairs and bits of the planes:
// decode_code in reverse.
template <int F> DEV raw<F> gguf_raw(const char *block, int u) {
    typedef block_layout<F> l;
    raw<F> r = gguf_scales<F>(block, u);
    uint32_t q[8];
#pragma unroll
    for (int i = 0; i < 8; i++) q[i] = gguf_codes<F>(block, u, i);
    if constexpr (F == ROCQ_Q8_0) {
        r.n = make4(q[0], q[1], q[2], q[3]);
        r.c = make4(q[4], q[5], q[6], q[7]);
        return r;
    }
    if constexpr (l::n != 0) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = (q[i] & 0x0f0f0f0fu) | (q[i + 4] & 0x0f0f0f0fu) << 4;
        r.n = make4(w[0], w[1], w[2], w[3]);
    }
    if constexpr (l::c != 0) {
        uint32_t w[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            w[i / 4] |= (q[i] >> (l::n != 0 ? 4 : 0) & 0x03030303u) << 2 * (i % 4);
        }
        r.c = make4(w[0], w[1], 0, 0);
    }
    if constexpr (l::b != 0) {
#pragma unroll
        for (int i = 0; i < 8; i++) r.b |= (q[i] >> (l::n != 0 ? 4 : 2) & 0x01010101u) << i;
    }
    return r;
}

// Elements k to k + 3 of a row, with the bits that the CPU backend gives them.
template <int F> DEV void gguf_values(const char *row, int64_t k, float v[4]) {
    typedef gguf_block<F> b;
    const char *block = row + k / b::elems * b::bytes;
    const int u = (int)(k % b::elems) / 32, i = (int)(k >> 2) & 7;
    uint32_t q = gguf_codes<F>(block, u, i);
    if constexpr (F == ROCQ_IQ4_NL || F == ROCQ_IQ4_XS || F == ROCQ_MXFP4) q = levels_of<F>(q).x;
    decode_quad<F>(q, decode_factors<F>(gguf_scales<F>(block, u), u), i, v);
}

// ---------------------------------------------------------------------------------------------
// >>quantize: encoders of Q8_0 and Q4_0 blocks, and of planar Q8_0
// ---------------------------------------------------------------------------------------------
// A unit of 32 lies in 8 neighbouring lanes: lane % 8 == i holds elements 4 i to 4 i + 3. All lanes
// of a wave must come; live says whether the unit exists.

DEV float oct_max(float x) {
    x = fmaxf(x, wave_xor<1>(x));
    x = fmaxf(x, wave_xor<2>(x));
    return fmaxf(x, wave_xor<4>(x));
}
DEV uint32_t oct_max(uint32_t x) {
    uint32_t y = wave_xor<1>(x);
    x = y > x ? y : x;
    y = wave_xor<2>(x);
    x = y > x ? y : x;
    y = wave_xor<4>(x);
    return y > x ? y : x;
}

// What a scale field can hold, as in rocq__f16_limit.
DEV float f16_limit(float v) { return v >= 65520.0f ? 65504.0f : v <= -65520.0f ? -65504.0f : v; }

DEV void store_by2(void *p, uint32_t v) {
    gstore((uint16_t *)p, v & 0xffffu);
    gstore((uint16_t *)p + 1, v >> 16);
}

// ggml's reference bytes (see rocq__encode_plain): 127 is the largest magnitude, halves round away
// from 0, NaN becomes -128.
DEV void put_q8_0(char *block, int i, bool live, const float *v) {
    float top = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; e++) top = fmaxf(top, fabsf(v[e]));
    const float d = f16_limit(oct_max(top) / 127.0f), inverse = d != 0.0f ? 1.0f / d : 0.0f;
    const bool none = inverse > 3.40282347e+38f; // d is so small that it is stored as 0
    uint32_t codes = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float x = v[e] * inverse;
        const float t = x > -128.0f ? x < 127.0f ? x : 127.0f : -128.0f;
        const int whole = (int)t;
        const float rest = t - (float)whole;
        const int q = whole + (rest >= 0.5f) - (rest <= -0.5f);
        codes |= none ? 0u : ((uint32_t)q & 255u) << 8 * e;
    }
    if (!live) return;
    if (i == 0) gstore((uint16_t *)block, f32_f16(d));
    store_by2(block + 2 + 4 * i, codes);
}

// As above: the element of largest magnitude, the first of equals, takes level -8. Magnitudes
// compare as integers: clang 19 drops the fabsf of fabsf(x != 0 ? x : 0), which a search from 0
// begins with.
DEV float farther(float x, float y) { // x when equal or when y is NaN
    const uint32_t mx = bits<uint32_t>(x) & 0x7fffffffu, my = bits<uint32_t>(y) & 0x7fffffffu;
    return my > mx && my <= 0x7f800000u ? y : x;
}
template <int mask> DEV float oct_farther(float x) {
    const float y = wave_xor<mask>(x);
    return thread_index() & mask ? farther(y, x) : farther(x, y);
}
DEV void put_q4_0(char *block, int i, bool live, const float *v) {
    float top = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; e++) top = farther(top, v[e]);
    top = oct_farther<4>(oct_farther<2>(oct_farther<1>(top)));
    const float d = f16_limit(top / -8.0f), inverse = d != 0.0f ? 1.0f / d : 0.0f;
    const bool none = fabsf(inverse) > 3.40282347e+38f;
    uint32_t codes = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float x = v[e] * inverse;
        const float t = x > -8.0f ? x < 7.0f ? x : 7.0f : -8.0f;
        codes |= none ? 0u : (uint32_t)(t + 8.5f) << 8 * e;
    }
    const uint32_t upper = wave_xor<4>(codes); // elements 16 on, for lanes 0 to 3
    if (!live) return;
    if (i == 0) gstore((uint16_t *)block, f32_f16(d));
    if (i < 4) store_by2(block + 2 + 4 * i, codes | upper << 4);
}

// Unit `unit` of a planar Q8_0 tensor of n units: x of an INT8 product. As rocq__quantize_32, but d
// is the next F16 upwards, so that codes stay within -127 to 127; past F16's range they are
// clipped.
// A block with a NaN or an infinity has d NaN, one that is all but 0 has d 0.
struct q8_block { uint16_t d; float inverse; };
DEV q8_block q8_block_of(uint32_t top) { // bits of the largest magnitude, NaN on top
    const float amax = bits<float>(top);
    if (top >= 0x7f800000u) return {0x7e00, 0.0f};
    if (amax < 7.88860905e-31f) return {0, 0.0f}; // 2^-100
    const float d = amax * (1.0f / 127.0f);
    uint32_t h = f32_f16(d);
    if (f16_f32((uint16_t)h) < d) h++;
    h = h < 0x7bffu ? h : 0x7bffu;
    return {(uint16_t)h, 1.0f / f16_f32((uint16_t)h)};
}
DEV uint32_t q8_codes(const float *v, float inverse) { // of four values
    uint32_t codes = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float x = fminf(127.0f, fmaxf(-127.0f, rintf(v[e] * inverse)));
        codes |= ((uint32_t)(int)x & 255u) << 8 * e;
    }
    return codes;
}
DEV void put_q8_0_planar(void *base, int64_t n, int64_t unit, int i, bool live, const float *v) {
    uint32_t top = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const uint32_t magnitude = bits<uint32_t>(v[e]) & 0x7fffffffu;
        top = magnitude > top ? magnitude : top;
    }
    const q8_block b = q8_block_of(oct_max(top));
    const uint32_t codes = b.inverse != 0.0f ? q8_codes(v, b.inverse) : 0u;
    if (!live) return;
    gstore((uint32_t *)base + (i < 4 ? 0 : 4 * n) + 4 * unit + (i & 3), codes);
    if (i == 0) gstore((uint16_t *)base + 16 * n + unit, b.d);
}

// -- quads --
// Four neighbouring elements of a row, 16 bytes of F32. Rows of F32, F16 and BF16 are wide when all
// their quads are whole and aligned; others go element by element.

DEV uint32_t rows_of(const rocq_k_tensor &t) {
    return (uint32_t)t.ne[1] * (uint32_t)t.ne[2] * (uint32_t)t.ne[3];
}
DEV uint64_t alignment_bits(const rocq_k_tensor &t) { // no bit below the alignment of every row
    return (uint64_t)(uintptr_t)t.data | (uint64_t)t.stride[0] | (uint64_t)t.stride[1] |
           (uint64_t)t.stride[2];
}
DEV bool is_wide(const rocq_k_tensor &t) {
    return ((t.ne[0] & 3) | (int)(alignment_bits(t) & (t.format == ROCQ_F32 ? 15u : 7u))) == 0;
}
// Elements of the quad at k of a row of n that exist.
DEV int quad_count(int64_t n, int64_t k) { return n - k < 4 ? n > k ? (int)(n - k) : 0 : 4; }

// Writes elements k to k + count - 1 to a row of y, which is row number r of it. Formats: F32 F16
// BF16, raw Q8_0 and Q4_0, planar Q8_0. All lanes of a wave must come, with count 0 where there is
// nothing to write, and of block formats lane % 8 == k / 4 % 8.
DEV void put4(const rocq_k_tensor &y, bool wide, char *row, uint32_t r, int64_t k, int count,
              const float v[4]) {
    const int i = (int)(k >> 2) & 7;
    if (y.format == ROCQ_Q8_0 && y.layout == ROCQ_LAYOUT_PLANAR) {
        const int64_t per_row = y.ne[0] / 32;
        put_q8_0_planar(y.data, per_row * rows_of(y), per_row * r + k / 32, i, count > 0, v);
    } else if (y.format == ROCQ_Q8_0) {
        put_q8_0(row + k / 32 * (int)sizeof(rocq_block_q8_0), i, count > 0, v);
    } else if (y.format == ROCQ_Q4_0) {
        put_q4_0(row + k / 32 * (int)sizeof(rocq_block_q4_0), i, count > 0, v);
    } else if (wide && y.format == ROCQ_F32) {
        if (count == 0) return;
        gstore((u32x4 *)((float *)row + k), make4(bits<uint32_t>(v[0]), bits<uint32_t>(v[1]),
                                                   bits<uint32_t>(v[2]), bits<uint32_t>(v[3])));
    } else if (wide) {
        if (count == 0) return;
        uint32_t h[4];
#pragma unroll
        for (int e = 0; e < 4; e++) h[e] = y.format == ROCQ_F16 ? f32_f16(v[e]) : f32_bf16(v[e]);
        gstore((u32x2 *)((uint16_t *)row + k), make2(h[0] | h[1] << 16, h[2] | h[3] << 16));
    } else {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (e < count) put_float(y.format, row, k + e, v[e]);
        }
    }
}

// -- repack --
// dst = src with the bits of every block sorted into planes (the picture stands in rocq.h,
// >>kernels).
//
//   src   GGUF layout, any of the 15 block formats, rows at any stride
//   dst   planar, 16-byte aligned; src's units become units unit0 and up of n_units
//
// A thread takes a unit of 32 weights, neighbouring threads neighbouring units (gguf_raw). Stores of
// codes are 16, 8 and 4 bytes a lane and contiguous over the wave; the scales of a superblock are
// stored by the lane of its first unit.
// Geometry: 256 threads, a block for 256 units of src, the last one in part; fewer than 2^32 units.
// Bytes: reads and writes the tensor once. Blocks are read 2 bytes at a time (MX formats 1), since
// blocks of 18 bytes have no better alignment; lanes of a wave share the cache lines.

template <int F>
DEV void repack_unit(const char *row, uint32_t column, const rocq_k_repack_args &a, int64_t unit) {
    const uint32_t per_block = gguf_block<F>::elems / 32;
    const char *block = row + (int64_t)(column / per_block) * gguf_block<F>::bytes;
    const raw<F> r = gguf_raw<F>(block, (int)(column % per_block));
    store_raw<F>(planes_of<F>(a.dst, a.n_units), unit, r);
}

KERNEL(repack, rocq_k_repack_args, 256) {
    const uint32_t per_row = (uint32_t)a.src.ne[0] / 32;
    const uint32_t n =
        per_row * (uint32_t)a.src.ne[1] * (uint32_t)a.src.ne[2] * (uint32_t)a.src.ne[3];
    const uint32_t at = (a.common.block0 + block_index()) * 256 + thread_index();
    if (at >= n) return;
    const uint32_t row = at / per_row, column = at - row * per_row;
    const uint32_t plane = row / (uint32_t)a.src.ne[1], i1 = row - plane * (uint32_t)a.src.ne[1];
    const uint32_t i3 = plane / (uint32_t)a.src.ne[2], i2 = plane - i3 * (uint32_t)a.src.ne[2];
    const char *from = row_of(a.src, i1, i2, i3);
    const int64_t unit = a.unit0 + at;
    switch (a.src.format) {
#define ROCQ_X(X, f) case format_id_##f: repack_unit<format_id_##f>(from, column, a, unit); break;
        BLOCK_FORMATS(ROCQ_X, )
#undef ROCQ_X
    default: break;
    }
}

// -- the epilogue of matvec and matmul --

// What a sum goes through on its way to y, as rocq_k_epilogue has it. bias(), gate() and residual()
// give the operands of this element and are called only where there are any. v2 is the sum of w2.
struct epilogue {
    int32_t activation;
    float softcap;
    bool has_bias, has_gate, has_w2, has_residual;
};
template <typename B, typename G, typename R>
DEV float epilogue_apply(const epilogue &e, float v, float v2, B bias, G gate, R residual) {
    if (e.has_bias) v += bias();
    v = activation(e.activation, v);
    if (e.softcap > 0.0f) v = e.softcap * tanh_full(v / e.softcap);
    if (e.has_gate) v *= gate();
    if (e.has_w2) v *= v2;
    if (e.has_residual) v += residual();
    return v;
}

// ---------------------------------------------------------------------------------------------
// >>matvec
// ---------------------------------------------------------------------------------------------
// y[m, c] = epilogue(sum over k of w[k, m] x[k, c]) for n <= N columns c: the product of decode.
//
//   w    planar [K, M] (rows row0 and up of a tensor of n_units units), or plain F32, F16 or BF16
//   x    int8: planar Q8_0 [K, x_columns], columns x_column0 and up; f32: F32, column c at
//        x + (x_column0 + c) x_stride
//   y    column c is dimension 1; F32, F16, or Q8_0 (raw; or planar: columns x_column0 and up)
//
// A wave takes ROCQ_K_MATVEC_ROWS rows of w through K together; a lane owns every 32nd unit of 32
// weights of each (plain formats: every 32nd piece of 16 bytes), so the wave reads 512 contiguous
// bytes of each row's widest plane in one load a lane. As soon as a unit is taken apart its
// registers receive the lane's next one, so all four rows' loads are nearly always in flight: 2 KB
// a wave with codes alone. What belongs to x, its load, its sums and its scale, is shared by the
// rows; what belongs to w, its load and its unpacking, by the columns. k_waves waves share a row
// group, each with every k_waves-th step of K: more bytes in flight where M is too small to fill
// the chip. A unit's product is an exact integer; it enters the lane's F32 sum by one fused
// multiply-add, two with a min. Lanes are added by DPP, halving the sums a lane holds as long as it
// holds several; waves and w2 meet in LDS, and then a thread takes one y through the epilogue. w2
// is a second pass over K by the same wave.
//
// Geometry: blocks of 256 threads, 8 waves; a block owns 32 / k_waves rows of one part. Parts are
// laid end to end (block_begin). LDS: 256 N bytes. Rows past m repeat row m - 1, columns past n
// column n - 1, and are not stored; lanes past the end of K load its last unit and add nothing.
// Assumes planar tensors aligned to 16 bytes. y in Q8_0 needs the 32 rows of its units in one
// block: k_waves = 1 and m a multiple of 32.
// Bytes: w once from memory, x once a wave from the caches. VALU per 32 weights of Q4_0, n = 1: 12
// unpacking, 8 dot4 and 4 others, and 8 dot4 and 13 others that the four rows share.

// Sums of V values over the 32 lanes. Lane l gets value l % V: as long as there are several, a lane
// passes on the half that is not its own. mask: lanes to meet next.
template <int V, int mask> DEV float wave_sums(const float *v) {
    if constexpr (mask == 32) {
        return v[0];
    } else if constexpr (V == 1) {
        const float sum = v[0] + wave_xor<mask>(v[0]);
        return wave_sums<1, mask * 2>(&sum);
    } else {
        const bool odd = (thread_index() & mask) != 0;
        float half[V / 2];
#pragma unroll
        for (int i = 0; i < V / 2; i++) {
            const float v0 = v[2 * i], v1 = v[2 * i + 1];
            half[i] = (odd ? v1 : v0) + wave_xor<mask>(odd ? v0 : v1);
        }
        return wave_sums<V / 2, mask * 2>(half);
    }
}

// The product of 24-bit integers, full rate on gfx11.
DEV int mul24(int a, int b) {
    return ((int)((uint32_t)a << 8) >> 8) * ((int)((uint32_t)b << 8) >> 8);
}

// Where a wave works: rows of a part, in units or pieces, and the share of K.
struct matvec_work {
    int64_t row[ROCQ_K_MATVEC_ROWS];
    uint32_t first, step, count; // a lane's first unit, to its next, and units of a row
};

struct matvec_x {
    uint32_t q[8];
    float d;
    int sum[2]; // of the codes of each half
};

template <int F> DEV void matvec_x_sums(matvec_x &x) {
    typedef block_layout<F> l;
    if (l::offset == 0 && !l::has_min) return;
    const int ones = 0x01010101;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        x.sum[h] = h == 1 && !l::halves ? x.sum[0] : 0;
#pragma unroll
        for (int i = 0; i < 4; i++) x.sum[h] = dot4((int)x.q[4 * h + i], ones, x.sum[h]);
    }
}

// Adds a unit's product to sum.
template <int F> DEV float matvec_add(float sum, const uint32_t q[8], const block_factors &f,
                                      const matvec_x &x) {
    typedef block_layout<F> l;
    if constexpr (l::halves) {
        int dot[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            dot[h] = -l::offset * x.sum[h];
#pragma unroll
            for (int i = 4 * h; i < 4 * h + 4; i++) dot[h] = dot4((int)q[i], (int)x.q[i], dot[h]);
        }
        sum = fmaf(f.d * x.d, (float)(mul24(dot[0], f.sc[0]) + mul24(dot[1], f.sc[1])), sum);
        if (l::has_min) {
            const int mins = mul24(x.sum[0], f.mn[0]) + mul24(x.sum[1], f.mn[1]);
            sum = fmaf(-f.dmin * x.d, (float)mins, sum);
        }
    } else { // sum[1] is of all 32
        int dot = l::offset ? -l::offset * x.sum[1] : 0;
#pragma unroll
        for (int i = 0; i < 8; i++) dot = dot4((int)q[i], (int)x.q[i], dot);
        sum = fmaf(f.d * x.d, (float)dot, sum);
        if (l::has_min) sum = fmaf(-f.dmin, x.d * (float)x.sum[1], sum);
    }
    return sum;
}

// The units of a wave's rows. Where scalar registers are short, because of many planes or columns,
// the rows share the first one's addresses and differ in a lane's 32-bit offset.
template <int F, bool SHARED> struct matvec_rows {
    planes<F> row[SHARED ? 1 : ROCQ_K_MATVEC_ROWS];
    uint32_t offset[ROCQ_K_MATVEC_ROWS];
};
template <int F, bool SHARED>
DEV matvec_rows<F, SHARED> matvec_rows_of(const void *w, int64_t n_units, int64_t units,
                                          const matvec_work &work) {
    const planes<F> tensor = planes_of<F>(w, n_units);
    matvec_rows<F, SHARED> rows;
#pragma unroll
    for (int r = 0; r < ROCQ_K_MATVEC_ROWS; r++) {
        if (!SHARED || r == 0) rows.row[r] = planes_at<F>(tensor, work.row[r] * units);
        rows.offset[r] = SHARED ? (uint32_t)((work.row[r] - work.row[0]) * units) : 0;
    }
    return rows;
}
template <int F, bool SHARED>
DEV raw<F> matvec_load(const matvec_rows<F, SHARED> &rows, int r, uint32_t unit) {
    return load_raw<F>(rows.row[SHARED ? 0 : r], unit + rows.offset[r]);
}
template <int F> DEV constexpr bool many_planes() {
    typedef block_layout<F> l;
    return (l::n != 0) + (l::c != 0) + (l::b != 0) + (l::s != 0) + (l::t != 0) + 1 > 3;
}

template <int F> DEV matvec_x matvec_x_of(const raw<ROCQ_Q8_0> &r) {
    matvec_x x;
#pragma unroll
    for (int i = 0; i < 8; i++) x.q[i] = decode_code<ROCQ_Q8_0>(r, i);
    x.d = f16_f32((uint16_t)r.d.x);
    matvec_x_sums<F>(x);
    return x;
}

// A unit of w, taken apart. Without halves, d and dmin are multiplied by their integers here, once
// for all columns.
template <int F> struct matvec_unit {
    uint32_t q[8];
    block_factors f;
};
template <int F> DEV matvec_unit<F> matvec_unit_of(const raw<F> &r, uint32_t at) {
    matvec_unit<F> u;
    u.f = decode_factors<F>(r, at);
    if (!block_layout<F>::halves) {
        u.f.d *= (float)u.f.sc[0];
        u.f.dmin *= (float)u.f.mn[0];
    }
#pragma unroll
    for (int i = 0; i < 8; i++) u.q[i] = decode_code<F>(r, i);
    return u;
}

// sums[ROWS c + r] of the lane, of row r and column c. Loads return in order, so those of x go out
// ahead of those of w that are needed later.
template <int F, int N>
DEV void matvec_int8_sums(const rocq_k_matvec_args &a, const void *w, int64_t n_units,
                          const matvec_work &work, float *sums) {
    enum { ROWS = ROCQ_K_MATVEC_ROWS, SHARED = N > 1 || many_planes<F>() };
    const int64_t units = a.k / 32;
    const matvec_rows<F, SHARED> rows = matvec_rows_of<F, SHARED>(w, n_units, units, work);
    const planes<ROCQ_Q8_0> x0 =
        planes_at<ROCQ_Q8_0>(planes_of<ROCQ_Q8_0>(a.x, a.x_units), a.x_column0 * units);
    uint32_t column[N]; // units from x0
#pragma unroll
    for (int c = 0; c < N; c++) column[c] = (uint32_t)((c < a.n ? c : a.n - 1) * units);
    const uint32_t last = work.count - 1;
    uint32_t at = work.first;
    computed(at); // the first addresses would take registers throughout
    uint32_t next = at < last ? at : last;
    raw<ROCQ_Q8_0> r_x = load_raw<ROCQ_Q8_0>(x0, column[0] + next);
    raw<F> r_w[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) r_w[r] = matvec_load(rows, r, next);
    loads_issued();
#pragma unroll 1
    for (; at < work.count; at += work.step) {
        next = at + work.step < last ? at + work.step : last;
        matvec_unit<F> u[ROWS];
#pragma unroll
        for (int c = 0; c < N; c++) {
            const matvec_x x = matvec_x_of<F>(r_x);
            r_x = load_raw<ROCQ_Q8_0>(x0, c + 1 < N ? column[c + 1] + at : column[0] + next);
            loads_issued();
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (c == 0) u[r] = matvec_unit_of<F>(r_w[r], at);
                if (c == N - 1) {
                    r_w[r] = matvec_load(rows, r, next);
                    loads_issued();
                }
                sums[ROWS * c + r] = matvec_add<F>(sums[ROWS * c + r], u[r].q, u[r].f, x);
                if (N > 1) computed(sums[ROWS * c + r]);
            }
        }
    }
}

// Column c of F32 x.
DEV const char *matvec_column(const rocq_k_matvec_args &a, int c) {
    const int64_t at = a.x_column0 + (c < a.n ? c : a.n - 1);
    return (const char *)((const float *)a.x + at * a.x_stride);
}

// Four values of the columns of F32 x, times v of the rows.
template <int N>
DEV void matvec_f32_add(float *sums, const char *const column[N], uint32_t offset,
                        const float (&v)[ROCQ_K_MATVEC_ROWS][4]) {
    enum { ROWS = ROCQ_K_MATVEC_ROWS };
#pragma unroll
    for (int c = 0; c < N; c++) {
        const u32x4 x = gload((const u32x4 *)(column[c] + offset));
        float four[4];
        decode_piece<ROCQ_F32>(x, 0, four);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int b = 0; b < 4; b++) {
                sums[ROWS * c + r] = fmaf(v[r][b], four[b], sums[ROWS * c + r]);
            }
            if (N > 1) computed(sums[ROWS * c + r]);
        }
    }
}

// The same from values in F32, w's with the bits that they have on the CPU. Block formats: a unit
// in four parts of 8 weights, in a loop that moves the codes down, since 8 columns of a whole unit
// are a thousand instructions.
template <int F, int N>
DEV void matvec_f32_sums(const rocq_k_matvec_args &a, const void *w, int64_t n_units,
                         const matvec_work &work, float *sums) {
    enum { ROWS = ROCQ_K_MATVEC_ROWS, SHARED = N > 2 || many_planes<F>() };
    const char *column[N];
#pragma unroll
    for (int c = 0; c < N; c++) column[c] = matvec_column(a, c);
    const int64_t units = a.k / 32;
    const matvec_rows<F, SHARED> rows = matvec_rows_of<F, SHARED>(w, n_units, units, work);
    const uint32_t last = work.count - 1;
    uint32_t at = work.first;
    computed(at); // the first addresses would take registers throughout
    uint32_t next = at < last ? at : last;
    raw<F> r_w[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) r_w[r] = matvec_load(rows, r, next);
    loads_issued();
#pragma unroll 1
    for (; at < work.count; at += work.step) {
        next = at + work.step < last ? at + work.step : last;
        unit u[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            u[r] = decode_raw<F>(r_w[r], at);
            r_w[r] = matvec_load(rows, r, next);
            loads_issued();
        }
#pragma unroll 1
        for (uint32_t quarter = 0; quarter < 4; quarter++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float v[ROWS][4];
#pragma unroll
                for (int r = 0; r < ROWS; r++) decode_word<F>(u[r], i, v[r]);
                matvec_f32_add<N>(sums, column, at * 128 + quarter * 32 + (uint32_t)i * 16, v);
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
#pragma unroll
                for (int i = 0; i < 6; i++) u[r].q[i] = u[r].q[i + 2];
                u[r].scale[0] = quarter == 1 ? u[r].scale[1] : u[r].scale[0];
                u[r].min[0] = quarter == 1 ? u[r].min[1] : u[r].min[0];
            }
        }
    }
}

// F32, F16 and BF16 rows: pieces of 16 bytes, or elements where a row is not a whole number of
// pieces or not aligned.
template <int F, int N>
DEV void matvec_plain_sums(const rocq_k_matvec_args &a, const void *w, const matvec_work &work,
                           float *sums) {
    enum { ROWS = ROCQ_K_MATVEC_ROWS, ELEMS = piece_elems<F>(), SIZE = 16 / ELEMS };
    const char *column[N], *row[ROWS];
#pragma unroll
    for (int c = 0; c < N; c++) column[c] = matvec_column(a, c);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        // Elements are counted, not bytes: a 64-bit product with k times 2 or 4 would be computed in
        // vector registers instead of scalar ones.
        const int64_t first = work.row[r] * a.k;
        if (SIZE == 2) row[r] = (const char *)((const uint16_t *)w + first);
        else row[r] = (const char *)((const uint32_t *)w + first);
    }
    if (a.k % ELEMS != 0 || a.x_stride % 4 != 0 || ((uintptr_t)a.x | (uintptr_t)w) % 16 != 0) {
#pragma unroll 1
        for (uint32_t k = work.first; k < (uint32_t)a.k; k += work.step) {
            float v[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) v[r] = get_float(F, row[r], k);
#pragma unroll
            for (int c = 0; c < N; c++) {
                const float x = gload((const float *)column[c] + k);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    sums[ROWS * c + r] = fmaf(v[r], x, sums[ROWS * c + r]);
                }
            }
        }
        return;
    }
    const uint32_t count = (uint32_t)a.k / ELEMS, last = count - 1;
    uint32_t at = work.first;
    computed(at); // the first addresses would take registers throughout
    uint32_t next = at < last ? at : last;
    u32x4 r_w[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) r_w[r] = gload((const u32x4 *)(row[r] + next * 16));
    loads_issued();
#pragma unroll 1
    for (; at < count; at += work.step) {
        next = at + work.step < last ? at + work.step : last;
        u32x4 piece[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            piece[r] = r_w[r];
            r_w[r] = gload((const u32x4 *)(row[r] + next * 16));
        }
        loads_issued();
#pragma unroll
        for (int i = 0; i < ELEMS / 4; i++) {
            float v[ROWS][4];
#pragma unroll
            for (int r = 0; r < ROWS; r++) decode_piece<F>(piece[r], i, v[r]);
            matvec_f32_add<N>(sums, column, at * (ELEMS * 4) + (uint32_t)i * 16, v);
        }
    }
}

// Rows row and up of a part, by one wave; its sums go to out[pass][ROWS c + r], pass 1 being w2's.
template <int F, int N, bool INT8>
DEV void matvec_products(const rocq_k_matvec_args &a, const rocq_k_matvec_weights &p, int row,
                         int k_wave, float *out) {
    enum { ROWS = ROCQ_K_MATVEC_ROWS, SLOT = ROWS * N };
    matvec_work work;
#pragma unroll
    for (int r = 0; r < ROWS; r++) work.row[r] = p.row0 + (row + r < p.m ? row + r : p.m - 1);
    work.first = (uint32_t)(k_wave * ROCQ_K_WAVE + lane_index());
    work.step = (uint32_t)a.k_step;
    work.count = (uint32_t)a.k / 32;
    const int passes = p.w2 ? 2 : 1;
#pragma unroll 1
    for (int pass = 0; pass < passes; pass++) {
        const void *w = pass ? p.w2 : p.w;
        float sums[ROWS * N];
#pragma unroll
        for (int i = 0; i < ROWS * N; i++) sums[i] = 0.0f;
        if constexpr (INT8) matvec_int8_sums<F, N>(a, w, p.n_units, work, sums);
        else if constexpr (is_plain<F>()) matvec_plain_sums<F, N>(a, w, work, sums);
        else matvec_f32_sums<F, N>(a, w, p.n_units, work, sums);
        const float sum = wave_sums<SLOT, 1>(sums);
        if (lane_index() < SLOT) lput(out + pass * ROCQ_K_MATVEC_WAVES * SLOT + lane_index(), sum);
    }
}

// Each thread finishes one y: this is all that it needs besides the sums. It is read before the
// barrier, so that loads of bias, gate and residual are under way while other waves finish.
struct matvec_tail {
    int r, c;  // row, from the block's first one on, and column
    bool live; // there is such a y
    int m, k_shift;
    char *y;
    int64_t y_stride;
    int32_t y_format, y_layout, gate_format, residual_format;
    float bias;
    uint32_t gate, residual; // as in memory
    epilogue e;
};
DEV matvec_tail matvec_tail_of(const rocq_k_matvec_args &a0, int part, int first_row) {
    const rocq_k_matvec_args &a = reread(a0);
    const rocq_k_matvec_part &p = a.part[part];
    const float *bias = p.bias;
    const char *gate = (const char *)p.gate, *residual = (const char *)p.residual;
    const int64_t gate_stride = p.gate_stride, residual_stride = p.residual_stride;
    const int n = a.n;
    const void *w2 = p.weights.w2;
    matvec_tail t;
    t.m = p.weights.m;
    t.k_shift = a.k_shift;
    t.y = (char *)p.y;
    t.y_stride = p.y_stride;
    t.y_format = p.y_format;
    t.y_layout = p.y_layout;
    t.gate_format = p.gate_format;
    t.residual_format = p.residual_format;
    t.e.activation = p.activation;
    t.e.softcap = p.softcap;
    read_together(bias, gate, residual, gate_stride, residual_stride, n, w2, t.m, t.k_shift, t.y,
                  t.y_stride, t.y_format, t.y_layout, t.gate_format, t.residual_format,
                  t.e.activation, t.e.softcap);
    const int rows_log2 = 5 - t.k_shift;
    t.r = (int)thread_index() & ((1 << rows_log2) - 1);
    t.c = (int)thread_index() >> rows_log2;
    const int row = first_row + t.r;
    t.live = t.c < n && row < t.m;
    t.e.has_w2 = w2 != 0;
    t.e.has_bias = bias != 0;
    t.e.has_gate = gate != 0;
    t.e.has_residual = residual != 0;
    t.bias = t.live && bias ? gload(bias + row) : 0.0f;
    t.gate = t.live && gate ? get_bits(t.gate_format, gate + t.c * gate_stride, row) : 0;
    t.residual = 0;
    if (t.live && residual) {
        t.residual = get_bits(t.residual_format, residual + t.c * residual_stride, row);
    }
    return t;
}

// Where the sums of a thread's y begin in LDS: one for each wave that shares the row, a slot apart.
template <int N> DEV int matvec_slot(const matvec_tail &t) {
    enum { ROWS = ROCQ_K_MATVEC_ROWS, SLOT = ROWS * N };
    return (t.r / ROWS << t.k_shift) * SLOT + t.c * ROWS + t.r % ROWS;
}

// A thread's y: the sums of the waves that share its row, in their order, and the epilogue.
template <int N> DEV float matvec_y(const matvec_tail &t, const float *sums) {
    enum { SLOT = ROCQ_K_MATVEC_ROWS * N, PASS = ROCQ_K_MATVEC_WAVES * SLOT };
    const int slot = matvec_slot<N>(t);
    float v = lget(sums + slot), v2 = t.e.has_w2 ? lget(sums + PASS + slot) : 1.0f;
    for (int k = 1; k < 1 << t.k_shift; k++) {
        v += lget(sums + slot + k * SLOT);
        if (t.e.has_w2) v2 += lget(sums + PASS + slot + k * SLOT);
    }
    return epilogue_apply(
        t.e, v, v2, [&] { return t.bias; }, [&] { return bits_float(t.gate_format, t.gate); },
        [&] { return bits_float(t.residual_format, t.residual); });
}

// Encodes y as Q8_0. The 32 lanes of a wave have the 32 rows of one unit of column c; the encoders
// want four neighbouring rows in each of 8 lanes. So every lane puts its y where its sum was, and 8
// lanes read four each. All lanes come: m is a multiple of 32, and k_shift is 0.
template <int N>
DEV void matvec_put_q8_0(const rocq_k_matvec_args &a, const matvec_tail &t, int first_row,
                         float *sums, float y) {
    enum { ROWS = ROCQ_K_MATVEC_ROWS, SLOT = ROWS * N };
    const int i = lane_index() & 7;
    float four[4];
    lput(sums + matvec_slot<N>(t), y);
    wave_sync();
#pragma unroll
    for (int b = 0; b < 4; b++) four[b] = lget(sums + i * SLOT + t.c * ROWS + b);
    const bool live = lane_index() < 8;
    if (t.y_layout == ROCQ_LAYOUT_PLANAR) {
        const int64_t unit = (a.x_column0 + t.c) * (t.m / 32) + first_row / 32;
        put_q8_0_planar(t.y, t.y_stride, unit, i, live, four);
    } else {
        put_q8_0(t.y + t.c * t.y_stride + first_row / 32 * 34, i, live, four);
    }
}

// A block's work. F: the one format of all parts, or MATVEC_MIXED: each part has its own.
//
// The args are in no cache yet, so on gfx11 they are read in as few dependent steps as possible: what
// precedes the parts, together with part 0; then, for a block of another part, that part. y_format and
// activation are read with them only to bring their cache lines, those of the epilogue, into the scalar
// cache before the end of the loop. On NVIDIA args are in constant memory, which needs none of this, and
// nvcc reads a field again rather than keep it in a register.
enum { MATVEC_MIXED = -1 };
template <int F, int N, bool INT8> DEV void matvec_block(const rocq_k_matvec_args &a) {
    enum { ROWS = ROCQ_K_MATVEC_ROWS };
    LDS(float, sums, 2 * ROCQ_K_MATVEC_WAVES * ROWS * N);
    uint32_t block = a.common.block0, begin = 0;
    int part = 0;
#if defined(__CUDACC__) // a loop, so that nvcc finds the part in its uniform registers
    block += block_index();
    while (part < ROCQ_K_MATVEC_PARTS - 1 && block >= a.block_begin[part + 1]) {
        begin = a.block_begin[++part];
    }
    const rocq_k_matvec_weights &p = a.part[part].weights;
#else
    rocq_k_matvec_weights p = a.part[0].weights;
    static_assert(ROCQ_K_MATVEC_PARTS == 4, "four beginnings");
    block = read_together(block, a.block_begin[0], a.block_begin[1], a.block_begin[2],
                          a.block_begin[3], a.x, a.x_units, a.x_column0, a.x_stride, a.k, a.n,
                          a.k_shift, a.k_step, p.w, p.w2, p.n_units, p.row0, p.m, p.format,
                          a.part[0].y_format, a.part[0].activation);
    block += block_index();
#pragma unroll
    for (int i = 1; i < ROCQ_K_MATVEC_PARTS; i++) {
        begin = block < a.block_begin[i] ? begin : a.block_begin[i];
        part = block < a.block_begin[i] ? part : i;
    }
    if (part != 0) {
        const rocq_k_matvec_part &own = a.part[part];
        p = own.weights;
        read_together(own.y_format, own.activation, p.w, p.w2, p.n_units, p.row0, p.m, p.format);
    }
#endif
    const int wave = wave_read(wave_index(), 0); // uniform: addresses of rows stay scalar
    const int first_row = (int)(block - begin) * (ROWS * ROCQ_K_MATVEC_WAVES >> a.k_shift);
    const int row = first_row + (wave >> a.k_shift) * ROWS, k_wave = wave & ((1 << a.k_shift) - 1);
    float *out = sums + wave * ROWS * N;
    if (row < p.m) {
        if constexpr (F == MATVEC_MIXED) {
            switch (p.format) {
#define ROCQ_X(X, f) \
    case format_id_##f: matvec_products<format_id_##f, N, INT8>(a, p, row, k_wave, out); break;
                ROCQ_K_INT8_FORMATS(ROCQ_X, )
#undef ROCQ_X
            default: break;
            }
        } else {
            matvec_products<F, N, INT8>(a, p, row, k_wave, out);
        }
    }
    const matvec_tail tail = matvec_tail_of(a, part, first_row);
    block_sync_lds();
    if (!tail.live) return;
    const float y = matvec_y<N>(tail, sums);
    if (tail.y_format == ROCQ_Q8_0) matvec_put_q8_0<N>(a, tail, first_row, sums, y);
    else put_float(tail.y_format, tail.y + tail.c * tail.y_stride, first_row + tail.r, y);
}

// Waves a SIMD that the registers leave room for: as many as NVIDIA's compiler finds registers for
// without spilling in the loop (8 waves: 64 a thread); on gfx11 all kernels stay well below.
constexpr int matvec_waves(int format, int n, bool int8) {
    const bool plain = format == ROCQ_F32 || format == ROCQ_F16 || format == ROCQ_BF16;
    if (!int8 && !plain) return n == 1 ? 4 : 2;
    if (n > 2 || format == MATVEC_MIXED) return 4;
    if (n == 2 && format == ROCQ_Q8_0) return 4; // 21.4 us, not 26.3, at 14336x4096 on an H200
    return n == 1 && int8 && format != ROCQ_Q5_K ? 8 : 6;
}

#define ROCQ_X(n, f, type, is_int8)                                        \
    KERNEL_WAVES(matvec_##type##_##f##_n##n, rocq_k_matvec_args, 256,      \
                 matvec_waves(format_id_##f, n, is_int8)) {                \
        matvec_block<format_id_##f, n, is_int8>(a);                        \
    }
#define ROCQ_X_INT8(X, f) \
    X(1, f, int8, true) X(2, f, int8, true) X(4, f, int8, true) X(8, f, int8, true)
#define ROCQ_X_F32(X, f) X(1, f, f32, false) X(8, f, f32, false)
#define ROCQ_X_PLAIN(X, f) X(2, f, f32, false) X(4, f, f32, false)
ROCQ_K_INT8_FORMATS(ROCQ_X_INT8, ROCQ_X)
KERNEL_WAVES(matvec_int8_mixed_n1, rocq_k_matvec_args, 256, matvec_waves(MATVEC_MIXED, 1, true)) {
    matvec_block<MATVEC_MIXED, 1, true>(a);
}
ROCQ_K_ALL_FORMATS(ROCQ_X_F32, ROCQ_X)
ROCQ_K_PLAIN_FORMATS(ROCQ_X_PLAIN, ROCQ_X)
#undef ROCQ_X
#undef ROCQ_X_INT8
#undef ROCQ_X_F32
#undef ROCQ_X_PLAIN

// ---------------------------------------------------------------------------------------------
// >>matmul
// ---------------------------------------------------------------------------------------------
// y[m, n] = epilogue(sum over k of w[k, m] x[k, n]) for more columns n than a matvec takes: the
// product of prompts. A block owns a tile of y and goes through K in steps: w is decoded and x
// copied into LDS, from where the waves multiply, while the next step's bytes, not yet decoded, are
// on their way into registers.
//
//   w    planar [K, M, ..], or plain F32, F16 or BF16 of any K; matrices follow each other
//   x    column c of batch z is column z n + c: F16 or F32 with x_stride elements from column to
//        column, or planar Q8_0. F16 and F32 columns begin at multiples of 16 bytes and can be read
//        up to the next such multiple past K; what lies there has no effect
//   y    F32 or F16, likewise gate and residual, any strides; y may be gate or residual
//
// Geometry: blockIdx.x (+ block0) counts tiles_m tiles_n tiles, once for each of n_splits parts of
// K, blockIdx.z batches of x. A tile alone goes through K no faster than its loads come back, so
// where there are fewer tiles than the chip holds blocks, several blocks share the K of each: they
// leave their sums in work, and matmul_merge, a second launch, adds them. Tiles are ROCQ_K_MATMUL_M
// rows by ROCQ_K_MATMUL_F16_N, _F16_N_FEW, _INT8_N or _F32_N columns; 128 threads, matmul_f32 256.
// Rows past M are row M - 1, columns past N column N - 1, and are not stored. Sums run over K in one
// order, whatever n and the tile are; those of parts, each of whole steps, are added in their order.
// Numbers of units and offsets within a tile are 32-bit: 128 rows of w and 128 columns of x are less
// than 4 GB each.

// Where a block's tile lies. Blocks go through bands of MATMUL_BAND tiles of M, in a band through M
// first: those that run at one time share rows of w and columns of x in L2 about equally.
enum { MATMUL_BAND = 16 };
struct matmul_place {
    int64_t m0, n0;     // first row and column
    int64_t w_row;      // row m0 in all of w
    int64_t x_column;   // column n0 in all of x
    int32_t i2, i3;     // batch
    uint32_t split, begin, end; // its share of K: steps
};
DEV matmul_place matmul_place_of(const rocq_k_matmul_args &a, int bm, int bn, uint32_t n_steps) {
    const uint32_t tiles_m = (uint32_t)a.tiles_m, tiles_n = (uint32_t)a.tiles_n;
    const uint32_t n_splits = (uint32_t)a.n_splits, z = block_index_z();
    const uint32_t block = a.common.block0 + block_index(), split = block / (tiles_m * tiles_n);
    const uint32_t tile = block - split * (tiles_m * tiles_n), band = tile / (MATMUL_BAND * tiles_n);
    const uint32_t at = tile - band * (MATMUL_BAND * tiles_n), left = tiles_m - band * MATMUL_BAND;
    const uint32_t height = left < MATMUL_BAND ? left : MATMUL_BAND;
    matmul_place p;
    p.split = split;
    p.begin = n_steps * split / n_splits;
    p.end = n_steps * (split + 1) / n_splits;
    p.m0 = (int64_t)(band * MATMUL_BAND + at % height) * bm;
    p.n0 = (int64_t)(at / height) * bn;
    p.i2 = (int32_t)(z % (uint32_t)a.batch2);
    p.i3 = (int32_t)(z / (uint32_t)a.batch2);
    p.w_row = (p.i2 / a.run2 + (int64_t)(p.i3 / a.run3) * a.w_batch2) * a.m + p.m0;
    p.x_column = z * a.n + p.n0;
    return p;
}

// The index of the wave, known to be uniform: what follows from it is scalar.
DEV int matmul_wave() { return wave_read(wave_index(), 0); }

template <int TM, int TN> DEV void matmul_clear(frag_c (&c)[TM][TN]) {
#pragma unroll
    for (int i = 0; i < TM; i++) {
#pragma unroll
        for (int j = 0; j < TN; j++) {
#pragma unroll
            for (int v = 0; v < 8; v++) c[i][j].v[v] = 0.0f;
        }
    }
}

// Where the sums of a column's first part lie, the column counted through the batches; parts of it
// are M apart.
DEV float *matmul_split_sums(const rocq_k_matmul_args &a, int64_t column) {
    return a.work + column * a.n_splits * a.m;
}

// Column n of y, rows m0 to m0 + 32 R - 1: a wave's work. sum(m, r) is that of row m = m0 + 32 r +
// lane.
template <int R, typename S>
DEV void matmul_put_column(const rocq_k_matmul_args &a, const matmul_place &at, int64_t m0, int64_t n,
                       S sum) {
    const rocq_k_epilogue &from = a.epilogue;
    char *y = row_of(from.y, n, at.i2, at.i3);
    const char *gate = row_of(from.gate, n, at.i2, at.i3);
    const char *residual = row_of(from.residual, n, at.i2, at.i3);
    const epilogue e = {from.activation, from.softcap, from.bias != 0, from.gate.data != 0, false,
                        from.residual.data != 0};
#pragma unroll 1
    for (int r = 0; r < R; r++) {
        const int64_t m = m0 + 32 * r + lane_index();
        if (m >= a.m) return;
        const float x = epilogue_apply(
            e, sum(m, r), 1.0f, [&] { return gload(from.bias + m); },
            [&] { return get_float(from.gate.format, gate, m); },
            [&] { return get_float(from.residual.format, residual, m); });
        put_float(from.y.format, y, m, x);
    }
}

// The same from sums in LDS; where K is split, they become a part, for matmul_merge.
template <int R>
DEV void matmul_put_sums(const rocq_k_matmul_args &a, const matmul_place &at, const float *sums, int64_t m0,
                     int64_t n) {
    if (a.n_splits == 1) {
        matmul_put_column<R>(a, at, m0, n, [=](int64_t, int r) {
            return lget(sums + 32 * r + lane_index());
        });
        return;
    }
    float *own = matmul_split_sums(a, at.x_column - at.n0 + n) + at.split * a.m;
#pragma unroll 1
    for (int r = 0; r < R; r++) {
        const int64_t m = m0 + 32 * r + lane_index();
        if (m < a.m) gstore(own + m, lget(sums + 32 * r + lane_index()));
    }
}

// matmul_merge: y = epilogue(parts, added in their order), of products whose K was split. A wave owns
// 64 rows of a column and a lane every 32nd of them, so that parts and y are read and written in
// whole lines; a block of 256 threads has 8 columns. No LDS. Bytes: every part once, from L2 or the
// Infinity Cache, where it was written just now.
KERNEL(matmul_merge, rocq_k_matmul_args, 256) {
    if (a.tiles_m == 0) return;
    const matmul_place at = matmul_place_of(a, ROCQ_K_MERGE_M, ROCQ_K_MERGE_N, 1);
    const int wave = matmul_wave();
    const int64_t n = at.n0 + wave;
    if (n >= a.n) return;
    const float *const splits = matmul_split_sums(a, at.x_column + wave);
    matmul_put_column<ROCQ_K_MERGE_M / 32>(a, at, at.m0, n, [=](int64_t m, int) {
        float x = 0.0f;
#pragma unroll 4
        for (int s = 0; s < a.n_splits; s++) x += gload(splits + s * a.m + m);
        return x;
    });
}

// The sums of a wave's 16 TM by 16 TN elements, from row m0 and column n0 on, become y. A fragment
// has few rows of many columns, y has its rows side by side: 16 columns at a time pass through LDS,
// so that a wave reads and writes runs of 32 rows. work: the block's, of matmul_pass_floats<TM> a wave;
// two words of padding a column keep both sides free of bank conflicts. All waves must come.
template <int TM> DEV constexpr int matmul_pass_floats() { return 16 * (16 * TM + 2); }
template <int TM, int TN>
DEV void matmul_finish(const rocq_k_matmul_args &a, const matmul_place &at, const frag_c (&c)[TM][TN],
                   float *work, int64_t m0, int64_t n0) {
    const int stride = 16 * TM + 2;
    work += matmul_wave() * matmul_pass_floats<TM>();
#pragma unroll 1
    for (int pass = 0; pass < TN; pass++) {
        block_sync_lds();
#pragma unroll
        for (int j = 0; j < TN; j++) {
            if (j != pass) continue;
#pragma unroll
            for (int i = 0; i < TM; i++) {
#pragma unroll
                for (int v = 0; v < 8; v++) {
                    lput(work + frag_col(v) * stride + 16 * i + frag_row(v), c[i][j].v[v]);
                }
            }
        }
        block_sync_lds();
#pragma unroll 1
        for (int column = 0; column < 16; column++) {
            const int64_t n = n0 + 16 * pass + column;
            if (n >= a.n) break;
            matmul_put_sums<TM / 2>(a, at, work + column * stride, m0, n);
        }
    }
}

// -- F16 --

// matmul_f16: x in F16, w decoded to F16, products and sums on the matrix unit with F32 sums.
//
// A step is 64 of K. A thread decodes a unit of each of two rows of w, its neighbour the other unit of
// both (plain formats: pieces of 16 bytes, 8 threads a row), and copies pieces of x, 8 threads a
// column: x is read in whole lines, and a load of w touches no more lines than it must.
// Tile of 128 columns: waves 2 by 2, each 64 by 64, so that 4 + 4 fragments feed 16 WMMA and LDS is
// busy for a third of the time that the matrix units are; 128 sums a lane. Tile of 32 columns: the
// waves lie one above the other, 32 by 32 each, and a unit is still decoded once; of a tile with up to
// 16 columns only those are multiplied.
// RDNA3 issues no WMMA while it decodes, but a weight is decoded once for all columns of a tile: 2
// to 4 VALU operations beside 32 cycles of WMMA (128 columns) or 8 (32 columns).
//
// LDS: 36 KB (23 KB), rows of 64 halves and 8 of padding. One buffer and two barriers a step of 64
// wait as often as two buffers and one barrier a step of 32 would, and w and x are read in pieces
// twice as long. A WGP holds three blocks (five), so three waves a SIMD, which leaves each 256
// registers; the epilogue passes through the same LDS.
// Bytes: w tiles_n times, x tiles_m times, most of it from L2. Weights beyond F16's range are
// infinite here.
enum {
    MATMUL_F16_BK = 64,
    MATMUL_F16_ROW = MATMUL_F16_BK + 8, // halves of a row in LDS: 36 words spread 8 rows over all banks
    MATMUL_F16_CHUNKS = MATMUL_F16_BK / 8
};

// The 32 weights of a unit as halves. A code under the byte 0x64 is the half 1024 + code; the
// subtraction is exact, so a value has the rounding of its scale and one of its own.
template <int F> DEV void matmul_unit_halves(const raw<F> &r, uint32_t unit, u32x4 h[4]) {
    typedef block_layout<F> l;
    const block_factors f = decode_factors<F>(r, unit);
    uint32_t w[16];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const f16 s = (f16)(f.d * (float)f.sc[i >> 2]);
        const uint32_t q = decode_code<F>(r, i);
        f16x2 v[2];
        if constexpr (is_mxfp6<F>()) {
            const f16 up = (f16)(F == ROCQ_MXFP6_E2M3 ? 16384.0f : 4096.0f);
            const uint32_t e = bits<uint32_t>(mxfp6_halves<F>(q & 0x00ff00ffu));
            const uint32_t o = bits<uint32_t>(mxfp6_halves<F>(q >> 8 & 0x00ff00ffu));
            v[0] = bits<f16x2>(byte_perm(o, e, 0x05040100)) * pair(up, up) * pair(s, s);
            v[1] = bits<f16x2>(byte_perm(o, e, 0x07060302)) * pair(up, up) * pair(s, s);
        } else {
            const f16 zero = (f16)(float)(1024 + (l::is_signed ? 128 : l::offset));
            const uint32_t code = l::is_signed ? q ^ 0x80808080u : q;
            v[0] = bits<f16x2>(byte_perm(0x64646464, code, 0x04010400)) - pair(zero, zero);
            v[1] = bits<f16x2>(byte_perm(0x64646464, code, 0x04030402)) - pair(zero, zero);
            if constexpr (l::has_min) {
                const f16 min = (f16)(f.dmin * (float)f.mn[i >> 2]);
                v[0] = fma2(v[0], pair(s, s), pair(-min, -min));
                v[1] = fma2(v[1], pair(s, s), pair(-min, -min));
            } else {
                v[0] = v[0] * pair(s, s);
                v[1] = v[1] * pair(s, s);
            }
        }
        w[2 * i] = bits<uint32_t>(v[0]);
        w[2 * i + 1] = bits<uint32_t>(v[1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) h[i] = make4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]);
}

// Eight elements of a plain format as halves.
template <int F> DEV u32x4 matmul_piece_halves(const u32x4 &piece) {
    if constexpr (F == ROCQ_F16) {
        return piece;
    } else {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float v[4];
            decode_piece<F>(piece, i, v);
            w[2 * i] = bits<uint32_t>(pair((f16)v[0], (f16)v[1]));
            w[2 * i + 1] = bits<uint32_t>(pair((f16)v[2], (f16)v[3]));
        }
        return make4(w[0], w[1], w[2], w[3]);
    }
}

// A piece (16 bytes) of a row of n elements of a plain format, from element k on; 0 past the end.
// wide: a row is a whole number of pieces.
template <int F> DEV u32x4 matmul_load_piece(const char *row, uint32_t k, uint32_t n, bool wide) {
    const int size = 16 / piece_elems<F>();
    if (k >= n) return make4(0, 0, 0, 0);
    if (wide) return gload((const u32x4 *)(row + k * size));
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (F == ROCQ_F32) {
            w[i] = k + i < n ? gload((const uint32_t *)row + k + i) : 0;
        } else {
            const uint32_t e = k + 2 * i;
            const uint32_t low = e < n ? gload((const uint16_t *)row + e) : 0;
            w[i] = low | (e + 1 < n ? (uint32_t)gload((const uint16_t *)row + e + 1) << 16 : 0);
        }
    }
    return make4(w[0], w[1], w[2], w[3]);
}

// Elements k to k + 7, those past n 0.
DEV u32x4 matmul_mask_halves(const u32x4 &piece, int64_t k, int64_t n) {
    uint32_t w[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int64_t e = k + 2 * i;
        w[i] = e + 1 < n ? w[i] : e < n ? w[i] & 0xffffu : 0;
    }
    return make4(w[0], w[1], w[2], w[3]);
}

// c += w x over n16 times 16 of K: rows from w on, columns from x on, in LDS, of which the first
// 16 USED are used. A fragment is loaded again as soon as its last product has been issued.
template <int TM, int TN, int USED>
DEV void matmul_multiply(frag_c (&c)[TM][TN], const f16 *w, const f16 *x, int n16) {
    enum { ROW = MATMUL_F16_ROW };
    frag fw[TM];
    frag_b fx = frag_load_b(x, ROW);
#pragma unroll
    for (int i = 0; i < TM; i++) fw[i] = frag_load(w + 16 * i * ROW, ROW);
#pragma unroll 1
    for (int s = 1; s < n16; s++) {
#pragma unroll
        for (int j = 0; j < USED; j++) {
            const bool last = j + 1 == USED;
            const int from = last ? 16 * s : 16 * (j + 1) * ROW + 16 * (s - 1);
            const frag_b next_x = frag_load_b(x + from, ROW);
#pragma unroll
            for (int i = 0; i < TM; i++) {
                wmma(c[i][j], fw[i], fx);
                if (last) fw[i] = frag_load(w + 16 * i * ROW + 16 * s, ROW);
            }
            fx = next_x;
        }
    }
#pragma unroll
    for (int j = 0; j < USED; j++) {
        const int from = 16 * (j + 1) * ROW + 16 * (n16 - 1);
        const frag_b next_x = j + 1 < USED ? frag_load_b(x + from, ROW) : fx;
#pragma unroll
        for (int i = 0; i < TM; i++) wmma(c[i][j], fw[i], fx);
        fx = next_x;
    }
}

template <int F, int BN> DEV void matmul_f16(const rocq_k_matmul_args &a) {
    enum {
        BM = ROCQ_K_MATMUL_M, BK = MATMUL_F16_BK, ROW = MATMUL_F16_ROW, CHUNKS = MATMUL_F16_CHUNKS,
        WN = BN == 128 ? 64 : 32, WM = BM * BN / 4 / WN, TM = WM / 16, TN = WN / 16,
        LOAD_ROWS = 128 / CHUNKS, N_W = BM / LOAD_ROWS, N_X = BN / LOAD_ROWS
    };
    LDS(u32x4, tile, (BM + BN) * ROW / 8);
    static_assert(4 * matmul_pass_floats<TM>() * 4 <= (int)sizeof(tile), "the epilogue passes here");
    f16 *const wt = (f16 *)tile, *const xt = wt + BM * ROW;
    if (a.tiles_m == 0) return;
    const uint32_t k = (uint32_t)a.k;
    const matmul_place at = matmul_place_of(a, BM, BN, (k + BK - 1) / BK);
    const int t = (int)thread_index(), wave = matmul_wave();
    const int wm = wave % (BM / WM) * WM, wn = wave / (BM / WM) * WN;
    const int chunk = t % CHUNKS, row = t / CHUNKS; // of pieces: 8 lanes read one line of a row

    // x: rows past the last are the last one, whose offset is the largest
    const char *const x = (const char *)a.x + at.x_column * a.x_stride * 2;
    const uint32_t x_bytes = (uint32_t)a.x_stride * 2;
    const uint32_t x_last = (uint32_t)(a.n - at.n0 < BN ? a.n - at.n0 : BN) - 1;
    u32x4 xr[N_X];
    const auto load_x = [&](uint32_t step) {
        const uint32_t e = step * BK + 8 * (uint32_t)chunk, e_last = (k - 1) & ~7u;
        const uint32_t from = (e < e_last ? e : e_last) * 2, most = x_last * x_bytes + from;
        const uint32_t first = (uint32_t)row * x_bytes + from;
#pragma unroll
        for (int i = 0; i < N_X; i++) {
            const uint32_t offset = first + (uint32_t)(i * LOAD_ROWS) * x_bytes;
            xr[i] = gload((const u32x4 *)(x + (offset < most ? offset : most)));
        }
    };
    const auto store_x = [&](uint32_t step) {
        const bool tail = is_plain<F>() && step * BK + BK > k;
#pragma unroll
        for (int i = 0; i < N_X; i++) {
            u32x4 *to = (u32x4 *)(xt + (row + i * LOAD_ROWS) * ROW) + chunk;
            lput(to, tail ? matmul_mask_halves(xr[i], step * BK + 8 * (uint32_t)chunk, k) : xr[i]);
        }
    };

    // w: of a quantized format one of the step's two units, of rows t / 2 and 64 further on, so that
    // two lanes share a line of memory; of a plain one pieces
    const uint32_t w_last = (uint32_t)(a.m - at.m0 < BM ? a.m - at.m0 : BM) - 1;
    const uint32_t row_units = k / 32, half = (uint32_t)t % 2;
    raw<F> wr[2];
    u32x4 wp[N_W];
    planes<F> p;
    uint32_t w_unit = 0;
    const char *w = nullptr;
    bool wide = false;
    if constexpr (is_plain<F>()) {
        w = (const char *)a.w + at.w_row * k * (16 / piece_elems<F>());
        wide = k % piece_elems<F>() == 0;
    } else {
        p = planes_at(planes_of<F>(a.w, a.w_units), at.w_row * row_units);
        w_unit = (uint32_t)t / 2 * row_units;
    }
    const auto load_w = [&](uint32_t step) {
        if constexpr (!is_plain<F>()) {
            const uint32_t u = 2 * step + half < row_units ? 2 * step + half : row_units - 1;
            const uint32_t most = w_last * row_units;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t first = w_unit + (uint32_t)i * (BM / 2) * row_units;
                wr[i] = load_raw(p, (first < most ? first : most) + u);
            }
        } else if (F != ROCQ_F32 && wide) {
            const uint32_t e = step * BK + 8 * (uint32_t)chunk;
            const uint32_t first = ((uint32_t)row * k + e) * 2, most = (w_last * k + e) * 2;
#pragma unroll
            for (int i = 0; i < N_W; i++) {
                const uint32_t offset = first + (uint32_t)(i * LOAD_ROWS) * k * 2;
                wp[i] = make4(0, 0, 0, 0);
                if (e < k) wp[i] = gload((const u32x4 *)(w + (offset < most ? offset : most)));
            }
        }
    };
    const auto store_w = [&](uint32_t step) {
        if constexpr (!is_plain<F>()) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                u32x4 *to = (u32x4 *)(wt + (t / 2 + i * (BM / 2)) * ROW) + 4 * half;
                u32x4 halves[4];
                matmul_unit_halves<F>(wr[i], 2 * step + half, halves);
#pragma unroll
                for (int j = 0; j < 4; j++) lput(to + j, halves[j]);
            }
        } else if (F != ROCQ_F32 && wide) {
#pragma unroll
            for (int i = 0; i < N_W; i++) {
                u32x4 *to = (u32x4 *)(wt + (row + i * LOAD_ROWS) * ROW) + chunk;
                lput(to, matmul_piece_halves<F>(wp[i]));
            }
        } else { // F32 would take 64 registers a step, misaligned rows many loads
            const int pieces = BK / piece_elems<F>(); // of a row
#pragma unroll 1
            for (int i = t; i < BM * pieces; i += 128) {
                const int r = i / pieces, e = i % pieces * piece_elems<F>();
                const uint32_t r_in = (uint32_t)r < w_last ? (uint32_t)r : w_last;
                const u32x4 piece = matmul_load_piece<F>(w + r_in * (k * (16 / piece_elems<F>())),
                                                     step * BK + (uint32_t)e, k, wide);
                f16 *const to = wt + r * ROW + e;
                if constexpr (F == ROCQ_F32) {
                    float v[4];
                    decode_piece<F>(piece, 0, v);
                    lput((u32x2 *)to, make2(bits<uint32_t>(pair((f16)v[0], (f16)v[1])),
                                            bits<uint32_t>(pair((f16)v[2], (f16)v[3]))));
                } else {
                    lput((u32x4 *)to, matmul_piece_halves<F>(piece));
                }
            }
        }
    };

    const bool has_work = at.m0 + wm < a.m && at.n0 + wn < a.n; // of the wave
    frag_c c[TM][TN];
    matmul_clear(c);
    const bool half_tile = TN == 2 && a.n - at.n0 <= 16;
    load_w(at.begin);
    load_x(at.begin);
    for (uint32_t step = at.begin; step < at.end; step++) {
        store_w(step);
        store_x(step);
        block_sync_lds();
        if (step + 1 < at.end) {
            load_w(step + 1);
            load_x(step + 1);
        }
        const uint32_t left = (k - step * BK + 15) / 16;
        const int n16 = left < BK / 16 ? (int)left : BK / 16;
        const f16 *const w_wave = wt + wm * ROW, *const x_wave = xt + wn * ROW;
        if (half_tile && has_work) matmul_multiply<TM, TN, TN == 2 ? 1 : TN>(c, w_wave, x_wave, n16);
        else if (has_work) matmul_multiply<TM, TN, TN>(c, w_wave, x_wave, n16);
        block_sync_lds();
    }
    matmul_finish<TM, TN>(a, at, c, (float *)tile, at.m0 + wm, at.n0 + wn);
}

#define ROCQ_X(X, f)                                                    \
    KERNEL(matmul_f16_##f##_128, rocq_k_matmul_args, 128) {                 \
        matmul_f16<format_id_##f, ROCQ_K_MATMUL_F16_N>(a);                         \
    }                                                                       \
    KERNEL(matmul_f16_##f##_32, rocq_k_matmul_args, 128) {                  \
        matmul_f16<format_id_##f, ROCQ_K_MATMUL_F16_N_FEW>(a);                     \
    }
ROCQ_K_ALL_FORMATS(ROCQ_X, )
#undef ROCQ_X

// -- INT8 --

// matmul_int8: x in planar Q8_0, w's codes as int8. The sum of a group (32 of K; 16 where a unit
// has two scales) is an exact integer from the matrix unit; it enters the F32 sums multiplied by
// the scales of its row and its column. A min takes away min times the sum of x's group, which is
// computed when x is staged; offsets such as Q4_0's 8 are taken off the codes there.
//
// A step is 64 of K: a thread unpacks one of its two units, of two rows of w and a column of x. Waves
// 2 by 2, each 64 rows by 32 columns, 64 sums a lane. LDS: 17 to 21 KB, rows of 64 codes and 16 of padding, then
// scales, mins and sums by groups.
// Scaling takes 24 VALU cycles a group and 16 by 16 sums, 32 with a min: WMMA cannot have more than
// 73% (67%) of the cycles, 57% (50%) with groups of 16. As RDNA3's matrix units are no faster in
// int8, matmul_f16 is ahead for every n; this is for callers that ask for INT8's arithmetic.
enum {
    MATMUL_INT8_BK = 64,
    MATMUL_INT8_ROW = MATMUL_INT8_BK + 16 // bytes of a row in LDS: 20 words spread 8 rows over all banks
};

// Bytes of q less an offset below 128 - q: no byte carries into the next.
DEV uint32_t matmul_less_offset(uint32_t q, int offset) {
    return (q + 0x01010101u * (uint32_t)(128 - offset)) ^ 0x80808080u;
}

template <int F> DEV void matmul_int8(const rocq_k_matmul_args &a) {
    typedef block_layout<F> l;
    enum {
        BM = ROCQ_K_MATMUL_M, BN = ROCQ_K_MATMUL_INT8_N, BK = MATMUL_INT8_BK, ROW = MATMUL_INT8_ROW,
        WM = 64, WN = 32, TM = WM / 16, TN = WN / 16,
        GROUPS = l::halves ? 4 : 2 // of BK elements
    };
    // Codes, then floats: scales of w and of x, mins of w and sums of the values of x, by groups.
    enum {
        CODES = (BM + BN) * ROW, XS = GROUPS * BM, WMIN = XS + 2 * BN, XSUM = WMIN + GROUPS * BM,
        FLOATS = l::has_min ? XSUM + GROUPS * BN : WMIN
    };
    LDS(u32x4, tile, CODES / 16 + FLOATS / 4);
    static_assert(4 * matmul_pass_floats<TM>() * 4 <= (int)sizeof(tile), "the epilogue passes here");
    float *const ws = (float *)tile + CODES / 4;
    float *const xs = ws + XS, *const wmin = ws + WMIN, *const xsum = ws + XSUM;
    int8_t *const wt = (int8_t *)tile, *const xt = wt + BM * ROW;
    if (a.tiles_m == 0) return;
    const uint32_t row_units = (uint32_t)(a.k / 32);
    const matmul_place at = matmul_place_of(a, BM, BN, (row_units + 1) / 2);
    const int t = (int)thread_index(), wave = matmul_wave();
    const int wm = wave % (BM / WM) * WM, wn = wave / (BM / WM) * WN;
    const uint32_t w_last = (uint32_t)(a.m - at.m0 < BM ? a.m - at.m0 : BM) - 1;
    const uint32_t x_last = (uint32_t)(a.n - at.n0 < BN ? a.n - at.n0 : BN) - 1;
    const planes<F> wp = planes_at(planes_of<F>(a.w, a.w_units), at.w_row * row_units);
    const planes<ROCQ_Q8_0> xp =
        planes_at(planes_of<ROCQ_Q8_0>(a.x, a.x_units), at.x_column * row_units);
    const uint32_t w_unit = (uint32_t)t / 2 * row_units;
    const uint32_t column = (uint32_t)t / 2, half = (uint32_t)t % 2;
    const uint32_t x_unit = (column < x_last ? column : x_last) * row_units;

    raw<F> wr[2];
    raw<ROCQ_Q8_0> xr;
    const auto load = [&](uint32_t step) {
        const uint32_t u = 2 * step + half < row_units ? 2 * step + half : row_units - 1;
        const uint32_t most = w_last * row_units;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t first = w_unit + (uint32_t)i * (BM / 2) * row_units;
            wr[i] = load_raw(wp, (first < most ? first : most) + u);
        }
        xr = load_raw(xp, x_unit + u);
    };
    const auto store = [&](uint32_t step) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t row = (uint32_t)(t / 2 + i * (BM / 2));
            const unit u = decode_raw<F>(wr[i], 2 * step + half);
            uint32_t q[8];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                q[j] = l::offset ? matmul_less_offset(u.q[j], l::offset) : u.q[j];
            }
            u32x4 *to = (u32x4 *)(wt + row * ROW) + 2 * half;
            lput(to, make4(q[0], q[1], q[2], q[3]));
            lput(to + 1, make4(q[4], q[5], q[6], q[7]));
#pragma unroll
            for (int g = 0; g < GROUPS / 2; g++) {
                lput(ws + (half * GROUPS / 2 + g) * BM + row, u.scale[g]);
                if (l::has_min) lput(wmin + (half * GROUPS / 2 + g) * BM + row, u.min[g]);
            }
        }
        u32x4 *to = (u32x4 *)(xt + column * ROW) + 2 * half;
        lput(to, xr.n);
        lput(to + 1, xr.c);
        const float d = f16_f32((uint16_t)xr.d.x);
        lput(xs + half * BN + column, d);
        if (l::has_min) {
            const uint32_t q[8] = {xr.n.x, xr.n.y, xr.n.z, xr.n.w, xr.c.x, xr.c.y, xr.c.z, xr.c.w};
            int sum = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                sum = dot4((int)q[i], 0x01010101, sum);
                if ((i + 1) % (16 / GROUPS) != 0) continue;
                lput(xsum + (half * GROUPS / 2 + i * GROUPS / 16) * BN + column, d * (float)sum);
                sum = 0;
            }
        }
    };

    const bool has_work = at.m0 + wm < a.m && at.n0 + wn < a.n; // of the wave
    frag_c c[TM][TN];
    matmul_clear(c);
    load(at.begin);
    for (uint32_t step = at.begin; step < at.end; step++) {
        store(step);
        block_sync_lds();
        load(step + 1 < at.end ? step + 1 : step);
        const int n_groups = !has_work ? 0 : 2 * step + 1 < row_units ? GROUPS : GROUPS / 2;
#pragma unroll 1
        for (int g = 0; g < n_groups; g++) {
            const int wide = BK / GROUPS; // elements of a group
            frag_i8 fx[TN][BK / GROUPS / 16];
            float sx[TN][FRAG_SLOTS], sum[TN][FRAG_SLOTS];
#pragma unroll
            for (int j = 0; j < TN; j++) {
#pragma unroll
                for (int h = 0; h < wide / 16; h++) {
                    fx[j][h] = frag_i8_load(xt + (wn + 16 * j) * ROW + wide * g + 16 * h, ROW);
                }
#pragma unroll
                for (int s = 0; s < FRAG_SLOTS; s++) {
                    const int n = wn + 16 * j + frag_slot_col(s);
                    sx[j][s] = lget(xs + g / (GROUPS / 2) * BN + n);
                    if (l::has_min) sum[j][s] = lget(xsum + g * BN + n);
                }
            }
#pragma unroll
            for (int i = 0; i < TM; i++) {
                frag_i8 fw[BK / GROUPS / 16];
                float sw[8], min[8];
#pragma unroll
                for (int h = 0; h < wide / 16; h++) {
                    fw[h] = frag_i8_load(wt + (wm + 16 * i) * ROW + wide * g + 16 * h, ROW);
                }
#pragma unroll
                for (int v = 0; v < 8; v++) {
                    const int m = wm + 16 * i + frag_row(v);
                    sw[v] = lget(ws + g * BM + m);
                    if (l::has_min) min[v] = lget(wmin + g * BM + m);
                }
#pragma unroll
                for (int j = 0; j < TN; j++) {
                    frag_ci ci = {{0, 0, 0, 0, 0, 0, 0, 0}};
#pragma unroll
                    for (int h = 0; h < wide / 16; h++) wmma_i8(ci, fw[h], fx[j][h]);
#pragma unroll
                    for (int v = 0; v < 8; v++) {
                        float *x = &c[i][j].v[v];
                        const int s = frag_slot(v);
                        *x = fmaf((float)ci.v[v], sw[v] * sx[j][s], *x);
                        if (l::has_min) *x = fmaf(-min[v], sum[j][s], *x);
                    }
                }
            }
        }
        block_sync_lds();
    }
    matmul_finish<TM, TN>(a, at, c, (float *)tile, at.m0 + wm, at.n0 + wn);
}

#define ROCQ_X(X, f) \
    KERNEL(matmul_int8_##f, rocq_k_matmul_args, 128) { matmul_int8<format_id_##f>(a); }
ROCQ_K_INT8_FORMATS(ROCQ_X, )
#undef ROCQ_X

// -- F32 --

// Half h of a step of 32 elements of row row0 + r of w, as it lies in memory; of a unit all.
template <int F>
DEV void matmul_load_half(const rocq_k_matmul_args &a, int64_t row0, uint32_t r, uint32_t step, int h,
                      u32x4 (&to)[4]) {
    const uint32_t k = (uint32_t)a.k;
    if constexpr (is_plain<F>()) {
        const int elems = piece_elems<F>();
        const char *row = (const char *)a.w + (row0 + r) * k * (16 / elems);
#pragma unroll
        for (int i = 0; i < 16 / elems; i++) {
            to[i] = matmul_load_piece<F>(row, 32 * step + 16 * (uint32_t)h + (uint32_t)(i * elems), k,
                                     k % elems == 0);
        }
    } else {
        const planes<F> p = planes_at(planes_of<F>(a.w, a.w_units), row0 * (k / 32));
        const raw<F> u = load_raw(p, r * (k / 32) + step);
        static_assert(sizeof u <= sizeof to, "a unit passes here");
        __builtin_memcpy(to, &u, sizeof u);
    }
}

// The same as floats, transposed into LDS: element e of the step goes to to[e * stride].
template <int F>
DEV void matmul_put_half(const u32x4 (&from)[4], uint32_t step, int h, float *to, int stride) {
    if constexpr (is_plain<F>()) {
        const int elems = piece_elems<F>();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float v[4];
            decode_piece<F>(from[i * 4 / elems], i % (elems / 4), v);
#pragma unroll
            for (int b = 0; b < 4; b++) lput(to + (16 * h + 4 * i + b) * stride, v[b]);
        }
    } else {
        raw<F> r;
        __builtin_memcpy(&r, from, sizeof r);
        const unit u = decode_raw<F>(r, step);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (i / 4 != h) continue;
            float v[4];
            decode_word<F>(u, i, v);
#pragma unroll
            for (int b = 0; b < 4; b++) lput(to + (4 * i + b) * stride, v[b]);
        }
    }
}

// c += w x over n of K, of a thread's 8 rows and the first 4 HALVES of its columns.
template <int HALVES>
DEV void matmul_multiply_f32(float (&c)[8][8], const float *w, const float *x, int stride, int n) {
#pragma unroll 2
    for (int e = 0; e < n; e++) {
        float vw[8], vx[4 * HALVES];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            decode_piece<ROCQ_F32>(lget((const u32x4 *)(w + e * stride + 64 * h)), 0, vw + 4 * h);
        }
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            decode_piece<ROCQ_F32>(lget((const u32x4 *)(x + e * stride + 64 * h)), 0, vx + 4 * h);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
#pragma unroll
            for (int j = 0; j < 4 * HALVES; j++) c[i][j] = fmaf(vw[i], vx[j], c[i][j]);
        }
    }
}

// matmul_f32: x and products in F32, for any format of w: the precision of the CPU's F32.
//
// A block of 256 threads owns 128 rows by 128 columns, a wave 32 by 16 and as much 64 rows and 64
// columns further on, a thread 8 by 8: rows from 4 tm and from 64 + 4 tm on, columns likewise from
// 4 tn. A step is 32 of K: a thread decodes half of it of a row of w into LDS and copies half of it of
// a column of x, while the next step's bytes are on their way into registers. LDS: 33 KB, both
// operands with K outermost, so that a thread reads 4 rows or columns at once: 4 reads of 16 bytes
// for 64 multiply-adds, which gfx11 issues in pairs, and 3 for 32 where a tile has at most 64 columns.
// The format is a uniform branch a step.
KERNEL_WAVES(matmul_f32, rocq_k_matmul_args, 256, 4) {
    enum { BM = ROCQ_K_MATMUL_M, BN = ROCQ_K_MATMUL_F32_N, BK = 32, STRIDE = BM + 4 };
    static_assert(BM == BN, "rows and columns are shared out alike");
    LDS(float, wt, BK * STRIDE);
    LDS(float, xt, BK * STRIDE);
    if (a.tiles_m == 0) return;
    const matmul_place at = matmul_place_of(a, BM, BN, (uint32_t)((a.k + BK - 1) / BK));
    const int t = (int)thread_index(), wave = matmul_wave(), lane = lane_index();
    const int tm = wave % 2 * 8 + lane % 8, tn = wave / 2 * 4 + lane / 8, half = wave / 4;
    const int64_t w_last = (a.m - at.m0 < BM ? a.m - at.m0 : BM) - 1;
    const int64_t x_last = (a.n - at.n0 < BN ? a.n - at.n0 : BN) - 1;
    const int row = t % BM;
    const uint32_t w_row = (uint32_t)(row < w_last ? row : w_last);
    const float *const x =
        (const float *)a.x + (at.x_column + (row < x_last ? row : x_last)) * a.x_stride;
    u32x4 wr[4], xr[4];
    const auto load = [&](uint32_t step) {
        switch (a.format) {
#define ROCQ_X(NAME, name, id, elems, bytes) \
        case id: matmul_load_half<id>(a, at.w_row, w_row, step, half, wr); break;
        ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int64_t k = (int64_t)step * BK + 16 * half + 4 * i;
            xr[i] = k < a.k ? gload((const u32x4 *)(x + k)) : make4(0, 0, 0, 0);
        }
    };
    const auto store = [&](uint32_t step) {
        switch (a.format) {
#define ROCQ_X(NAME, name, id, elems, bytes) \
        case id: matmul_put_half<id>(wr, step, half, wt + row, STRIDE); break;
        ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int64_t k = (int64_t)step * BK + 16 * half + 4 * i;
            float v[4];
            decode_piece<ROCQ_F32>(xr[i], 0, v);
#pragma unroll
            for (int b = 0; b < 4; b++) {
                lput(xt + (16 * half + 4 * i + b) * STRIDE + row, k + b < a.k ? v[b] : 0.0f);
            }
        }
    };

    const bool half_tile = x_last < BN / 2;
    float c[8][8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) c[i][j] = 0.0f;
    }
    load(at.begin);
    for (uint32_t step = at.begin; step < at.end; step++) {
        store(step);
        block_sync_lds();
        if (step + 1 < at.end) load(step + 1);
        if (half_tile) matmul_multiply_f32<1>(c, wt + 4 * tm, xt + 4 * tn, STRIDE, BK);
        else matmul_multiply_f32<2>(c, wt + 4 * tm, xt + 4 * tn, STRIDE, BK);
        block_sync_lds();
    }
#pragma unroll 1
    for (int pass = 0; pass < 8; pass++) { // column pass of every thread
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (j != pass) continue;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                lput(wt + tn * STRIDE + i / 4 * 64 + 4 * tm + i % 4, c[i][j]);
            }
        }
        block_sync_lds();
#pragma unroll 1
        for (int column = wave; column < 16; column += 8) {
            const int64_t n = at.n0 + pass / 4 * 64 + 4 * column + pass % 4;
            if (n < a.n) matmul_put_sums<4>(a, at, wt + column * STRIDE, at.m0, n);
        }
        block_sync_lds();
    }
}

// ---------------------------------------------------------------------------------------------
// >>attention
// ---------------------------------------------------------------------------------------------
// out[d, h, i] = sum over j of softmax_j(score(i, j)) v[d, h_kv, j], as in rocq_attention_params.
//
// The columns of the work are the pairs (query i, head h of the group of one KV head), query after
// query, so that K and V are read once for all heads of a group. 16 columns are a column tile. KV
// positions pass by in KV tiles of TILE, and per KV tile
//   S = K Q^T      [position][column]: K is the A, Q the B operand, so that a lane owns columns
//   P = 2^(S - m)  m the column's running maximum, l += sum of P
//   O = O + V^T P  [d][column]: P goes from result to operand in registers, V is transposed in LDS
// Scores are in units of log2: exp is one fma and one exp2. m follows the true maximum only when it
// is more than 2^8 away, which leaves P in F16's range and spares nearly all rescaling of O.
//
// A block is 4 waves. For D over 128 the head is cut into SLICES of 128 and a wave has one slice of
// Q, of K and of O: no wave has more than 128 elements of a column, and the waves of a column tile
// add up their parts of S in LDS. What waves are left are   decode   SETS that take every SETS-th
// KV tile, each wave staging its own slice of K and V in its            own LDS without a barrier;
// in the end the sets' (m, l, O) are merged through LDS   prefill  COLUMN_TILES, with one KV tile
// in LDS that all four waves stage and use
//
//   D                      64  80-128   256   512
//   decode   SETS           4     4      2     1
//            TILE          32    16     16    16
//            columns       16    16     16    16   of a block
//   prefill  COLUMN_TILES   4     4      2     1
//            TILE          64    32     16    16
//            columns       64    64     32    16
//
// The run of positions that the columns see is cut into parts, one a block: n_splits, or as many as
// have ROCQ_K_ATTEND_RUN positions. A part alone goes straight to out. Else blocks leave m, l and O
// of their columns in work, and the last one of a column tile (told by counter) merges them in
// their order. A row that sees nothing is 0.
//
// Grid    as at rocq_k_attention_args in rocq.h; 128 threads
// LDS     13 to 43 KB: K [position][BD + 8], V^T [row][TILE + 8], F16. The 8 put the 16-byte words
//         of consecutive rows into different banks, on loads. Row r of a slice of V^T is element
//         8 (r % (W / 8)) + r / (W / 8), and k of V^T and P are in the order of frag_k_row: so the
//         stores of 4 positions by the lanes of a wave meet in no bank. Decode: K and V in turn in
//         the same place, and Q
// KV      steps between positions below 2^32 bytes. 16-byte loads of F32, F16 and BF16 where rows
//         are aligned to 16 bytes and head_dim is a multiple of 8, else single elements; GGUF
//         blocks of Q8_0 and Q4_0 in pieces of 2 or 8 bytes. Pages are looked up a tile ahead
// Values  Q, K, V and P are rounded to F16 (so K and V past 65504 are infinite), sums are F32. What
//         a column does not see takes no part, except that a NaN or infinity in V reaches columns
//         that do not see its position, where they share the KV tile with one that does
// Bytes   K and V once per column tile (decode) or block (prefill), Q and out once
// Math    per 16 positions and 16 columns of a wave W / 8 WMMA (512 cycles for W = 128) and, in
//         prefill, some 80 cycles of the rest

enum {
    ATTEND_WAVES = 4,
    ATTEND_COLUMNS = 16, // of a column tile
    ATTEND_HALF = 8      // of those that pass through LDS at a time in the end
};

// What decode and prefill have in common. D: elements of a head. TILES: column tiles of a block.
// HELD: elements of a head that a KV tile holds. N: positions of a KV tile. LOADERS: threads that
// load one.
template <int D, int TILES, int HELD, int N, int LOADERS> struct attend_shape {
    enum {
        HEAD = D,
        COLUMN_TILES = TILES,
        SLICES = D > 128 ? D / 128 : 1,
        W = D / SLICES, // elements of a slice
        SETS = ATTEND_WAVES / (COLUMN_TILES * SLICES),
        BD = HELD,
        TILE = N,
        ROUND = TILE * SETS, // positions that all sets take in one trip of the loop
        THREADS = LOADERS,
        LOADS = TILE * ((BD + 63) / 64) * 8 / THREADS, // of 8 elements, per thread
        S_FRAGS = TILE / 16, // fragments of a wave: of S and of P, 16 positions each
        O_FRAGS = W / 16,    // and of O, 16 elements each
        WORDS = (TILE + 31) / 32, // that have a bit for each position
        COLUMNS = ATTEND_COLUMNS * COLUMN_TILES,
        // LDS: halves from row to row, then bytes
        K_STRIDE = BD + 8,
        V_STRIDE = TILE + 8,
        Q_STRIDE = BD + 8,
        K_BYTES = TILE * K_STRIDE * 2,
        V_BYTES = BD * V_STRIDE * 2,
        // of the merge at the end: floats from row to row; half of the columns pass at a time
        OUT_STRIDE = D + 4,
        OUT_ROWS = SETS * COLUMN_TILES * ATTEND_HALF,
        OUT_BYTES = OUT_ROWS * (OUT_STRIDE + 2) * 4,
        // of a wave: the rows of K and V of two tiles, and of the mask
        ROW_BYTES = 2 * TILE * 4 + ATTEND_COLUMNS * 8
    };
    static_assert(ROCQ_K_ATTEND_RUN % ROUND == 0, "the shortest run is whole rounds");
    static constexpr uint64_t ALL_SEEN = ~(uint64_t)0 >> (64 - TILE);

    // Which 8 elements of which row of the tile thread t loads at its p-th load: row lane_row +
    // pass_row, chunk lane_chunk + pass_chunk. For V four loads are four consecutive k.
    enum { ROWS_K = THREADS / 8, GROUPS = TILE / 4 };
    template <bool V> DEV int lane_row(int t) {
        if (!V) return t / 8;
        const int k = 4 * (t / 8 % GROUPS);
        return (k & ~15) + frag_k_row(k & 15);
    }
    template <bool V> DEV int lane_chunk(int t) { return t % 8 + (V ? 8 * (t / 8 / GROUPS) : 0); }
    template <bool V> DEV constexpr int pass_row(int p) {
        return V ? FRAG_K_STEP * (p % 4) + 4 * (ROWS_K * (p / 4) % GROUPS) : ROWS_K * p % TILE;
    }
    template <bool V> DEV constexpr int pass_chunk(int p) {
        return V ? 8 * (ROWS_K * (p / 4) / GROUPS) : 8 * (ROWS_K * p / TILE);
    }
};

// LDS by offsets in bytes: what the loop has, in whose place the merge comes; then ROW_BYTES of each
// wave; then one word.
template <typename S> struct attend_lds {
    enum {
        ROWS_AT = (int)S::LOOP_BYTES > (int)S::OUT_BYTES ? (int)S::LOOP_BYTES : (int)S::OUT_BYTES,
        WORD_AT = ROWS_AT + ATTEND_WAVES * S::ROW_BYTES,
        BYTES = WORD_AT + 16
    };
};

// Decode: every wave has a KV tile of its own, where K and V take turns; then Q of all slices. The
// slices' sums come in the place of K.
template <int D>
struct attend_decode_shape
    : attend_shape<D, 1, (D > 128 ? 128 : D), (D <= 64 ? 32 : 16), ROCQ_K_WAVE> {
    typedef attend_shape<D, 1, (D > 128 ? 128 : D), (D <= 64 ? 32 : 16), ROCQ_K_WAVE> shape;
    enum {
        WAVE_BYTES = (int)shape::K_BYTES > (int)shape::V_BYTES ? (int)shape::K_BYTES
                                                               : (int)shape::V_BYTES,
        SUM_STRIDE = WAVE_BYTES / 4, // floats from wave to wave
        Q_AT = ATTEND_WAVES * WAVE_BYTES,
        LOOP_BYTES = Q_AT + shape::SLICES * ATTEND_COLUMNS * shape::Q_STRIDE * 2
    };
};

// Prefill: one KV tile for all waves, K and V side by side; then the slices' sums. Q comes through the
// place of K into registers.
template <int D>
struct attend_prefill_shape
    : attend_shape<D, (D <= 128 ? 4 : 512 / D), D, (D <= 64 ? 64 : D <= 128 ? 32 : 16), 128> {
    typedef attend_shape<D, (D <= 128 ? 4 : 512 / D), D, (D <= 64 ? 64 : D <= 128 ? 32 : 16), 128>
        shape;
    enum {
        V_AT = shape::K_BYTES,
        SUMS_AT = V_AT + shape::V_BYTES,
        SUM_STRIDE = shape::S_FRAGS * 256, // floats from wave to wave
        LOOP_BYTES = SUMS_AT + (shape::SLICES > 1 ? ATTEND_WAVES * SUM_STRIDE * 4 : 0)
    };
};

// How rows are read, in chunks of 8 elements. WIDE (F16 and BF16): 16 bytes that are on their way
// while the tile before is used. Q8_0, Q4_0 and F32 are read when their tile is staged, since a
// second set of registers that may hold either form makes the compiler copy them, and so wait for
// them. ANY: by elements.
enum { ATTEND_WIDE, ATTEND_Q8_0, ATTEND_Q4_0, ATTEND_F32, ATTEND_ANY };

struct attend_rows { // of Q, K or V
    const char *base;
    uint32_t step; // bytes from row to row
    int32_t format, way, head_dim, last_chunk;
};

DEV attend_rows attend_rows_of(const rocq_k_tensor &t, const char *base, int64_t step,
                               int head_dim) {
    attend_rows rows;
    rows.base = base;
    rows.step = (uint32_t)step;
    rows.format = t.format;
    rows.head_dim = head_dim;
    rows.last_chunk = (head_dim - 1) / 8;
    const int64_t all = (int64_t)(uintptr_t)t.data | t.stride[0] | t.stride[1] | t.stride[2];
    if (t.format == ROCQ_Q8_0) rows.way = ATTEND_Q8_0;
    else if (t.format == ROCQ_Q4_0) rows.way = ATTEND_Q4_0;
    else if ((all & 15) != 0 || head_dim % 8 != 0 || step > 0x1000000) rows.way = ATTEND_ANY;
    else rows.way = t.format == ROCQ_F32 ? ATTEND_F32 : ATTEND_WIDE;
    return rows;
}

DEV uint32_t attend_pair(float x, float y) {
    return bits<uint32_t>(pair((f16)x, (f16)y));
}

// Elements 8 chunk ... 8 chunk + 7 of a row: F16 or BF16 as they are, F32 as F16, of blocks x, y
// the codes and z the scale.
template <int WAY> DEV u32x4 attend_load(const char *row, int chunk) {
    if (WAY == ATTEND_F32) {
        const u32x4 lo = gload((const u32x4 *)row + 2 * chunk),
                    hi = gload((const u32x4 *)row + 2 * chunk + 1);
        return make4(attend_pair(bits<float>(lo.x), bits<float>(lo.y)),
                     attend_pair(bits<float>(lo.z), bits<float>(lo.w)),
                     attend_pair(bits<float>(hi.x), bits<float>(hi.y)),
                     attend_pair(bits<float>(hi.z), bits<float>(hi.w)));
    }
    if (WAY == ATTEND_WIDE) return gload((const u32x4 *)row + chunk);
    const uint16_t *block = (const uint16_t *)(row + (WAY == ATTEND_Q8_0 ? 34 : 18) * (chunk >> 2));
    const u32x2 code = gload_even(block + 1 + 4 * (chunk & (WAY == ATTEND_Q8_0 ? 3 : 1)));
    return make4(code.x, code.y, gload(block), 0);
}

// The 8 halves of what attend_load gave. A code as the low byte of a half 1024 + code is exact, so
// that the only rounding is that of scale times code.
template <int WAY> DEV u32x4 attend_halves(u32x4 r, int chunk, int format) {
    if (WAY == ATTEND_WIDE && format == ROCQ_BF16) {
        uint32_t w[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            w[i] = attend_pair(bits<float>(w[i] << 16), bits<float>(w[i] & 0xffff0000u));
        return make4(w[0], w[1], w[2], w[3]);
    }
    if (WAY != ATTEND_Q8_0 && WAY != ATTEND_Q4_0) return r;
    const uint32_t shift = chunk & 2 ? 4 : 0;
    uint32_t code[2] = {r.x, r.y}, w[4];
    const f16 offset = (f16)(WAY == ATTEND_Q8_0 ? -1152.0f : -1032.0f), one = (f16)1.0f;
    const f16 scale = bits<f16>((uint16_t)r.z), zero = (f16)-0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t c =
            WAY == ATTEND_Q8_0 ? code[i / 2] ^ 0x80808080u : code[i / 2] >> shift & 0x0f0f0f0fu;
        const uint32_t h = byte_perm(0x64646464u, c, i % 2 ? 0x04030402u : 0x04010400u);
        const f16x2 q = fma2(bits<f16x2>(h), pair(one, one), pair(offset, offset));
        w[i] = bits<uint32_t>(fma2(q, pair(scale, scale), pair(zero, zero)));
    }
    return make4(w[0], w[1], w[2], w[3]);
}

// Where a KV tile lies.
struct attend_place {
    int first, end; // its first position; the end of the run that the block works on
    int listed;     // rows holds the rows of its positions, past the end those of the last one
    int chunk0;     // first chunk of the slice
    int32_t *rows;  // LDS, of the wave
    uint64_t seen;  // bit r: its position r lies before end and in a page that exists
};

DEV const char *attend_row(const attend_rows &t, const attend_place &at, int r) {
    return t.base + (uint64_t)(uint32_t)lget(at.rows + r) * t.step;
}

// Loads a thread's share of a tile of K or V. What lies past the end or past head_dim is loaded
// from the last position or chunk, and dropped on the way to LDS.
template <typename S, bool V>
DEV void attend_fetch(u32x4 (&raw)[S::LOADS], const attend_rows &t, const attend_place &at,
                      int thread) {
    if (t.way != ATTEND_WIDE) return;
    if (at.listed) {
        thread = recomputed(thread);
#pragma unroll
        for (int p = 0; p < S::LOADS; p++) {
            const int c =
                at.chunk0 + S::template lane_chunk<V>(thread) + S::template pass_chunk<V>(p);
            const char *row =
                attend_row(t, at, S::template lane_row<V>(thread) + S::template pass_row<V>(p));
            raw[p] = attend_load<ATTEND_WIDE>(row, min(c, t.last_chunk));
        }
        return;
    }
    const int row = S::template lane_row<V>(thread),
              chunk = at.chunk0 + S::template lane_chunk<V>(thread);
    const uint32_t step = t.step;
    const char *tile = t.base + (uint64_t)(uint32_t)at.first * step;
#pragma unroll
    for (int p = 0; p < S::LOADS; p++) {
        // One offset serves all loads, but where a row of chunks is not whole passes.
        const int pass_c = S::BD % 64 == 0 ? 0 : S::template pass_chunk<V>(p);
        const int c = S::BD % 64 == 0 ? chunk : min(chunk + pass_c, t.last_chunk);
        const char *pass = tile + (uint32_t)S::template pass_row<V>(p) * step +
                           16 * (S::template pass_chunk<V>(p) - pass_c);
        raw[p] = gload((const u32x4 *)(pass + ((uint32_t)row * t.step + 16u * (uint32_t)c)));
    }
}

// Puts the halves of loads p to p + 3 into the tile. Then 0 over what head_dim does not have, and
// for V over positions not seen, whose weight is 0 but whose values may be anything.
template <typename S, bool V>
DEV void attend_put(f16 *tile, const u32x4 (&h)[4], int p, const attend_rows &t,
                    const attend_place &at, int thread) {
    const int lane_c = S::template lane_chunk<V>(thread), lane_r = S::template lane_row<V>(thread);
    if (!V) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int c = lane_c + S::template pass_chunk<V>(p + i),
                      r = lane_r + S::template pass_row<V>(p + i);
            if (S::BD % 64 == 0 || c < S::BD / 8)
                lput((u32x4 *)(tile + r * S::K_STRIDE + 8 * c), h[i]);
        }
        if (t.head_dim == S::HEAD) return;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int c = recomputed(lane_c) + S::template pass_chunk<V>(p + i),
                      r = lane_r + S::template pass_row<V>(p + i);
            if (at.chunk0 + c > t.last_chunk && c < S::BD / 8)
                lput((u32x4 *)(tile + r * S::K_STRIDE + 8 * c), make4(0, 0, 0, 0));
        }
        return;
    }
    const int c = lane_c + S::template pass_chunk<V>(p);
    if (S::BD % 64 != 0 && c >= S::BD / 8) return;
    f16 *to = tile + (c / (S::W / 8) * S::W + c % (S::W / 8)) * S::V_STRIDE +
              4 * (thread / 8 % S::GROUPS + S::ROWS_K * (p / 4) % S::GROUPS);
    const uint32_t w[4][4] = {{h[0].x, h[0].y, h[0].z, h[0].w},
                              {h[1].x, h[1].y, h[1].z, h[1].w},
                              {h[2].x, h[2].y, h[2].z, h[2].w},
                              {h[3].x, h[3].y, h[3].z, h[3].w}};
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const uint32_t which = e % 2 ? 0x07060302u : 0x05040100u;
        lput((u32x2 *)(to + e * (S::W / 8) * S::V_STRIDE),
             make2(byte_perm(w[1][e / 2], w[0][e / 2], which),
                   byte_perm(w[3][e / 2], w[2][e / 2], which)));
    }
    if (at.seen == S::ALL_SEEN) return;
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        if (at.seen >> (lane_r + S::template pass_row<V>(p) + FRAG_K_STEP * i) & 1) continue;
#pragma unroll
        for (int e = 0; e < 8; e++) lput(to + e * (S::W / 8) * S::V_STRIDE + i, (f16)0.0f);
    }
}
template <typename S, bool V>
DEV void attend_stage_wide(f16 *tile, u32x4 (&raw)[S::LOADS], int format, const attend_rows &t,
                           const attend_place &at, int thread) {
#pragma unroll
    for (int p = 0; p < S::LOADS; p += 4) {
        u32x4 h[4];
#pragma unroll
        for (int i = 0; i < 4; i++) h[i] = attend_halves<ATTEND_WIDE>(raw[p + i], 0, format);
        attend_put<S, V>(tile, h, p, t, at, thread);
    }
}
// The same straight from memory.
template <typename S, bool V, int WAY>
DEV void attend_stage_direct(f16 *tile, const attend_rows &t, const attend_place &at, int thread) {
#pragma unroll
    for (int p = 0; p < S::LOADS; p += 4) {
        u32x4 h[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (WAY == ATTEND_F32 && i == 2) keep_order();
            const char *row =
                attend_row(t, at, S::template lane_row<V>(thread) + S::template pass_row<V>(p + i));
            const int c =
                at.chunk0 + S::template lane_chunk<V>(thread) + S::template pass_chunk<V>(p + i);
            h[i] = attend_load<WAY>(row, min(c, t.last_chunk));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            h[i] = attend_halves<WAY>(h[i],
                                      at.chunk0 + S::template lane_chunk<V>(thread) +
                                          S::template pass_chunk<V>(p + i),
                                      0);
        }
        attend_put<S, V>(tile, h, p, t, at, thread);
    }
}
// Element by element, straight from memory.
template <typename S, bool V>
DEV void attend_stage_any(f16 *tile, const attend_rows &t, const attend_place &at, int thread) {
#pragma unroll 1
    for (int i = thread; i < S::TILE * S::BD; i += S::THREADS) {
        const int e = i % S::BD, n = i / S::BD, d = 8 * at.chunk0 + e;
        const int r = V ? (n & ~15) + frag_k_row(n & 15) : n;
        const bool there = d < t.head_dim && (at.seen >> r & 1);
        const float x = there ? get_float(t.format, attend_row(t, at, r), d) : 0.0f;
        f16 *to = V ? tile + (e / S::W * S::W + e % 8 * (S::W / 8) + e % S::W / 8) * S::V_STRIDE + n
                    : tile + r * S::K_STRIDE + e;
        lput(to, (f16)x);
    }
}
template <typename S, bool V>
DEV void attend_stage(f16 *tile, u32x4 (&raw)[S::LOADS], const attend_rows &t,
                      const attend_place &at, int thread) {
    if (t.way == ATTEND_WIDE && t.format == ROCQ_F16) {
        attend_stage_wide<S, V>(tile, raw, ROCQ_F16, t, at, thread);
        return;
    }
    thread = recomputed(thread);
    if (t.way == ATTEND_WIDE) attend_stage_wide<S, V>(tile, raw, ROCQ_BF16, t, at, thread);
    else if (t.way == ATTEND_Q8_0) attend_stage_direct<S, V, ATTEND_Q8_0>(tile, t, at, thread);
    else if (t.way == ATTEND_Q4_0) attend_stage_direct<S, V, ATTEND_Q4_0>(tile, t, at, thread);
    else if (t.way == ATTEND_F32) attend_stage_direct<S, V, ATTEND_F32>(tile, t, at, thread);
    else attend_stage_any<S, V>(tile, t, at, thread);
}

// What a block works on, and a wave's part in it.
struct attend_task {
    uint32_t tile_index; // of the columns of a KV head and sequence, for work and counter
    int split, column0, kv_head, seq;
};
template <typename S> DEV attend_task attend_task_of(const rocq_k_attention_args &a, int block) {
    attend_task t;
    // A decode step has one of most of these, and divisions take longer than what else comes first.
    const uint32_t n_splits = (uint32_t)a.n_splits, n_tiles = (uint32_t)a.n_tiles;
    t.tile_index = n_splits == 1 ? (uint32_t)block : (uint32_t)block / n_splits;
    t.split = (int)((uint32_t)block - t.tile_index * n_splits);
    const uint32_t heads = (uint32_t)(a.n_kv_heads * a.n_seqs);
    const uint32_t back = n_tiles == 1 ? 0 : t.tile_index / heads; // tiles from the last one
    const uint32_t head_seq = t.tile_index - back * heads;
    t.column0 = (int)(n_tiles - 1 - back) * S::COLUMNS;
    t.seq = a.n_seqs == 1 ? 0 : (int)(head_seq / (uint32_t)a.n_kv_heads);
    t.kv_head = (int)head_seq - t.seq * a.n_kv_heads;
    return t;
}
struct attend_role { // of a wave in its block
    int slice, column_tile, set;
};
template <typename S> DEV attend_role attend_role_of(int wave) {
    return {wave % S::SLICES, wave / S::SLICES % S::COLUMN_TILES,
            wave / (S::SLICES * S::COLUMN_TILES)};
}

// Column c of the work of a KV head.
struct attend_column {
    int query, head;
};
DEV attend_column attend_column_of(const rocq_k_attention_args &a, int c) {
    if (a.n_q == 1) return {0, c};
    const int query = (int)(((uint64_t)(uint32_t)c * a.group_inverse + a.group_inverse) >> 32);
    return {query, c - query * a.group};
}

// Columns column0 and up of Q in LDS; 0 past the last one. A negative scale turns their signs.
template <typename S, int WAY>
DEV void attend_stage_q_as(f16 *tile, const rocq_k_attention_args &a, const attend_task &task) {
    enum {
        CHUNKS = S::HEAD / 8,
        SLICE = S::BD / 8,
        SLICE_HALVES = ATTEND_COLUMNS * S::Q_STRIDE,
        ALL = S::COLUMNS * CHUNKS,
        AHEAD = WAY == ATTEND_ANY ? 1 : ALL < 512 ? ALL / 128 : 4 // loads under way
    };
    const uint32_t flip = a.scale < 0.0f ? 0x80008000u : 0u;
    const int n_there = a.group * a.n_q - task.column0, last_chunk = (a.head_dim - 1) / 8;
#pragma unroll 1
    for (int first = (int)thread_index(); first < ALL; first += 128 * AHEAD) {
        u32x4 x[AHEAD];
#pragma unroll
        for (int n = 0; n < AHEAD; n++) {
            const int i = min(first + 128 * n, ALL - 1), chunk = min(i % CHUNKS, last_chunk);
            const attend_column of =
                attend_column_of(a, task.column0 + min(i / CHUNKS, n_there - 1));
            const char *row = row_of(a.q, task.kv_head * a.group + of.head, of.query, task.seq);
            if (WAY == ATTEND_ANY) {
                float v[8] = {};
#pragma unroll 1
                for (int e = 0; e < 8; e++) {
#pragma unroll
                    for (int k = 0; k < 7; k++) v[k] = v[k + 1];
                    const int d = 8 * chunk + e;
                    v[7] = d < a.head_dim ? get_float(a.q.format, row, d) : 0.0f;
                }
                x[n] = make4(attend_pair(v[0], v[1]), attend_pair(v[2], v[3]),
                             attend_pair(v[4], v[5]), attend_pair(v[6], v[7]));
            } else {
                x[n] = attend_load<WAY>(row, chunk);
            }
        }
#pragma unroll
        for (int n = 0; n < AHEAD; n++) {
            const int i = first + 128 * n, c = i / CHUNKS, chunk = i % CHUNKS;
            const bool there = c < n_there && chunk <= last_chunk;
            const u32x4 h = there ? make4(x[n].x ^ flip, x[n].y ^ flip, x[n].z ^ flip, x[n].w ^ flip)
                                  : make4(0, 0, 0, 0);
            if (i < ALL) {
                lput((u32x4 *)(tile + chunk / SLICE * SLICE_HALVES + c * S::Q_STRIDE +
                               8 * (chunk % SLICE)), h);
            }
        }
    }
}
template <typename S>
DEV void attend_stage_q(f16 *tile, const rocq_k_attention_args &a, const attend_task &task) {
    const int way = attend_rows_of(a.q, 0, 0, a.head_dim).way;
    if (way == ATTEND_F32) attend_stage_q_as<S, ATTEND_F32>(tile, a, task);
    else if (way == ATTEND_WIDE) attend_stage_q_as<S, ATTEND_WIDE>(tile, a, task);
    else attend_stage_q_as<S, ATTEND_ANY>(tile, a, task);
}

// What a wave keeps of its columns; rows of o are those of V^T.
template <typename S> struct attend_state {
    frag_c o[S::O_FRAGS];
    float m[FRAG_SLOTS], l[FRAG_SLOTS]; // l: of the lane's own rows until the end of the loop
};

template <typename S> DEV void attend_clear(attend_state<S> &c) {
#pragma unroll
    for (int i = 0; i < 8 * S::O_FRAGS; i++) c.o[i / 8].v[i % 8] = 0.0f;
#pragma unroll
    for (int s = 0; s < FRAG_SLOTS; s++) {
        c.m[s] = -INFINITY;
        c.l[s] = 0.0f;
    }
}

template <typename S> DEV void attend_clear_scores(frag_c (&s)[S::S_FRAGS]) {
#pragma unroll
    for (int i = 0; i < 8 * S::S_FRAGS; i++) s[i / 8].v[i % 8] = 0.0f;
}

DEV float attend_keep(float m, float top) {
    return m == top ? 1.0f : exp2_fast(m - top);
}

template <typename S> DEV void attend_rescale(attend_state<S> &c, const float (&keep)[FRAG_SLOTS]) {
#pragma unroll
    for (int f = 0; f < S::O_FRAGS; f++) {
#pragma unroll
        for (int v = 0; v < 8; v++) c.o[f].v[v] *= keep[frag_slot(v)];
    }
}

// The positions that a query sees but for the mask.
DEV int attend_low(const rocq_k_attention_args &a, int len, int query) {
    const int p = len - a.n_q + query;
    return a.window > 0 && p >= a.window ? p - a.window + 1 : 0;
}
DEV int attend_high(const rocq_k_attention_args &a, int len, int query) {
    return a.causal ? max(len - a.n_q + query + 1, 0) : len;
}

// Row of position j of a sequence in the pools, -1 if the table names a page that they do not have.
DEV int attend_paged_row(const rocq_k_attention_args &a0, int seq, int j) {
    const rocq_k_attention_args &a = reread(a0);
    const int size = a.page_size;
    const int page = gload(a.page_table + (int64_t)seq * a.n_pages + j / size);
    const int64_t row = (int64_t)page * size + j % size;
    if (page >= 0 && row < a.k.ne[2]) return (int)row;
    atomic_or(a.common.status, ROCQ_K_BAD_PAGE);
    return -1;
}

// at becomes the tile at first. Its pages are looked up a tile ahead, in row.
template <typename S>
DEV void attend_look_up(int (&row)[S::WORDS], const rocq_k_attention_args &a, int seq, int first,
                        int end) {
#pragma unroll
    for (int w = 0; w < S::WORDS; w++) {
        const int r = 32 * w + lane_index();
        row[w] = r < S::TILE && first + r < end ? attend_paged_row(a, seq, first + r) : -1;
    }
}
template <typename S>
DEV void attend_turn_to(attend_place &at, const int (&row)[S::WORDS], bool paged, bool list,
                        int first) {
    const int n = max(at.end - first, 0);
    at.first = first;
    at.seen = n < S::TILE ? ((uint64_t)1 << n) - 1 : S::ALL_SEEN;
    at.listed = list || n < S::TILE;
    if (!at.listed) return;
    wave_sync();
    if (paged) at.seen = 0;
#pragma unroll
    for (int w = 0; w < S::WORDS; w++) {
        const int r = 32 * w + recomputed(lane_index());
        if (paged) at.seen |= (uint64_t)wave_ballot(row[w] >= 0) << 32 * w;
        if (r < S::TILE) lput(at.rows + r, paged ? max(row[w], 0) : min(first + r, at.end - 1));
    }
    wave_sync();
}

// Scores times factor plus the mask at positions first and up, of which last is the last.
template <typename S>
DEV void attend_bias(frag_c (&s)[S::S_FRAGS], const rocq_k_attention_args &a, const u32x2 *rows,
                     int first, int last, float factor) {
    const char *mask[FRAG_SLOTS];
#pragma unroll
    for (int i = 0; i < FRAG_SLOTS; i++) {
        const u32x2 row = lget(rows + recomputed(frag_slot_col(i)));
        mask[i] = (const char *)(uintptr_t)((uint64_t)row.y << 32 | row.x);
    }
    first += recomputed(frag_row(0));
#pragma unroll
    for (int b = 0; b < S::S_FRAGS; b++) {
        float bias[8];
        keep_order();
        if (a.mask.format == ROCQ_F32) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int j = min(first + 16 * b + (frag_row(i) - frag_row(0)), last);
                bias[i] = gload((const float *)mask[frag_slot(i)] + j);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int j = min(first + 16 * b + (frag_row(i) - frag_row(0)), last);
                bias[i] = f16_f32(gload((const uint16_t *)mask[frag_slot(i)] + j));
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float &x = s[b].v[i];
            x = bias[i] == -INFINITY ? bias[i] : x * factor + bias[i] * 1.44269504f;
        }
    }
}

// -inf where position first + row is not in [low, high) or not seen.
template <typename S>
DEV void attend_hide(frag_c (&s)[S::S_FRAGS], const int (&low)[FRAG_SLOTS],
                     const int (&high)[FRAG_SLOTS], int first, uint64_t seen) {
    const int row = recomputed(frag_row(0));
#pragma unroll
    for (int i = 0; i < 8 * S::S_FRAGS; i++) {
        const int slot = frag_slot(i % 8), step = frag_row(i % 8) - frag_row(0);
        const uint32_t word = (uint32_t)(seen >> 16 * (i / 8)) >> row;
        const bool inside = (uint32_t)(first + row - low[slot] + 16 * (i / 8) + step) <
                            (uint32_t)(high[slot] - low[slot]);
        if (!inside | !(word >> step & 1)) s[i / 8].v[i % 8] = -INFINITY;
    }
}

// Scores, in units of log2 when times factor, become weights.
template <typename S>
DEV void attend_weigh(attend_state<S> &c, frag_c (&s)[S::S_FRAGS], float factor) {
    float top[FRAG_SLOTS], keep[FRAG_SLOTS], base[FRAG_SLOTS];
    bool moves = false;
#pragma unroll
    for (int i = 0; i < FRAG_SLOTS; i++) top[i] = -INFINITY;
#pragma unroll
    for (int i = 0; i < 8 * S::S_FRAGS; i++) {
        float &t = top[frag_slot(i % 8)];
        t = fmaxf(t, s[i / 8].v[i % 8]);
    }
#pragma unroll
    for (int i = 0; i < FRAG_SLOTS; i++) {
        top[i] = frag_col_max(top[i]) * factor;
        moves = moves || top[i] > c.m[i] + 8.0f;
    }
    if (wave_ballot(moves) != 0) {
#pragma unroll
        for (int i = 0; i < FRAG_SLOTS; i++) {
            const float m = top[i] > c.m[i] + 8.0f ? top[i] : c.m[i];
            keep[i] = attend_keep(c.m[i], m);
            c.l[i] *= keep[i];
            c.m[i] = m;
        }
        attend_rescale<S>(c, keep);
    }
#pragma unroll
    for (int i = 0; i < FRAG_SLOTS; i++) base[i] = c.m[i] == -INFINITY ? 0.0f : c.m[i];
#pragma unroll
    for (int i = 0; i < 8 * S::S_FRAGS; i++) {
        const int slot = frag_slot(i % 8);
        const float p = exp2_fast(fmaf(s[i / 8].v[i % 8], factor, -base[slot]));
        c.l[slot] += p;
        s[i / 8].v[i % 8] = p;
    }
}

// Elements d to d + 3 of a column with maximum m and sum l to out, whose sink joins them; all lanes
// of the wave come. A column that saw nothing is 0.
DEV void attend_put_out(const rocq_k_attention_args &a, const attend_task &t, int column, int d,
                        bool live, float m, float l, float (&x)[4]) {
    const attend_column c = attend_column_of(a, live ? column : 0);
    const int head = t.kv_head * a.group + c.head;
    const bool saw = l != 0.0f;
    float factor = 1.0f;
    if (a.sinks) {
        const float sink = gload(a.sinks + head) * 1.44269504f, top = fmaxf(m, sink);
        const float keep = attend_keep(m, top);
        l = l * keep + attend_keep(sink, top);
        factor = keep;
    }
    factor *= rcp_fast(l);
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = saw ? x[e] * factor : 0.0f;
    put4(a.out, is_wide(a.out), row_of(a.out, head, c.query, t.seq),
         (uint32_t)(head + a.n_heads * (c.query + a.n_q * t.seq)), d,
         live ? quad_count(a.head_dim, d) : 0, x);
}

// Merges the states of the block's sets and, in the last block of a column tile, of all its blocks,
// and writes the columns. lds: all of it, and a word. Its rows are [set][column tile][column of a
// half], then come m and l of each. A block's result in work is m and l of each column, then o, a
// column after the other; columns past the end are left out.
template <typename S>
DEV void attend_finish(const rocq_k_attention_args &a0, attend_state<S> &state, int n_runs,
                       u32x4 *all_lds) {
    const rocq_k_attention_args &a = reread(a0);
    float *const lds = (float *)all_lds;
    uint32_t *const word = (uint32_t *)((char *)all_lds + attend_lds<S>::WORD_AT);
    const int thread = recomputed((int)thread_index());
    const attend_task t =
        attend_task_of<S>(a, (int)(block_index() + a.common.block0));
    const attend_role w = attend_role_of<S>(wave_read(wave_index(), 0));
    const int n_there = min((int)S::COLUMNS, a.group * a.n_q - t.column0);
    const int64_t result_floats = S::COLUMNS * (S::HEAD + 2);
    float *results = a.work;
    if (n_runs > 1) results += (int64_t)t.tile_index * a.n_splits * result_floats;
    float *result = results + t.split * result_floats, *m_l = lds + S::OUT_ROWS * S::OUT_STRIDE;
    const int own_row = (w.set * S::COLUMN_TILES + w.column_tile) * ATTEND_HALF;
#pragma unroll
    for (int s = 0; s < FRAG_SLOTS; s++) state.l[s] = frag_col_sum(state.l[s]);

#pragma unroll 1
    for (int half = 0; half < ATTEND_COLUMNS && half < n_there; half += ATTEND_HALF) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int c = frag_col(i) - half;
            if (c < 0 || c >= ATTEND_HALF) continue;
            float *to = lds + (own_row + c) * S::OUT_STRIDE + w.slice * S::W + frag_row(i);
#pragma unroll
            for (int f = 0; f < S::O_FRAGS; f++) lput(to + 16 * f, state.o[f].v[i]);
        }
#pragma unroll
        for (int s = 0; s < FRAG_SLOTS; s++) {
            const int c = frag_slot_col(s) - half;
            if (w.slice != 0 || frag_row(0) != 0 || c < 0 || c >= ATTEND_HALF) continue;
            lput((u32x2 *)m_l + own_row + c,
                 make2(bits<uint32_t>(state.m[s]), bits<uint32_t>(state.l[s])));
        }
        block_sync_lds();
        const int rows = S::COLUMN_TILES > 1 ? S::COLUMN_TILES * ATTEND_HALF
                                             : min(n_there - half, (int)ATTEND_HALF);
        for (int i = thread; i < (rows * (S::HEAD / 4) + 127) / 128 * 128; i += 128) {
            const int row = min(i / (S::HEAD / 4), rows - 1), d = i % (S::HEAD / 4) * 4,
                      column = row / ATTEND_HALF * ATTEND_COLUMNS + half + row % ATTEND_HALF;
            const bool live = i < rows * (S::HEAD / 4) && column < n_there && d < a.head_dim;
            const float *from =
                lds + row * S::OUT_STRIDE + d / S::W * S::W + d % 8 * (S::W / 8) + d % S::W / 8;
            float x[4] = {0.0f, 0.0f, 0.0f, 0.0f}, m[S::SETS], l[S::SETS], top = -INFINITY, sum = 0.0f;
#pragma unroll
            for (int k = 0; k < S::SETS; k++) {
                const u32x2 v = lget((u32x2 *)m_l + k * S::COLUMN_TILES * ATTEND_HALF + row);
                m[k] = bits<float>(v.x);
                l[k] = bits<float>(v.y);
                top = fmaxf(top, m[k]);
            }
#pragma unroll
            for (int k = 0; k < S::SETS; k++) {
                const float add = attend_keep(m[k], top);
                sum += l[k] * add;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    x[e] += add * lget(from + k * S::COLUMN_TILES * ATTEND_HALF * S::OUT_STRIDE +
                                       e * (S::W / 8));
                }
            }
            if (n_runs > 1) {
                if (live) {
                    gstore((u32x4 *)(result + 2 * S::COLUMNS + column * S::HEAD + d),
                           make4(bits<uint32_t>(x[0]), bits<uint32_t>(x[1]), bits<uint32_t>(x[2]),
                                 bits<uint32_t>(x[3])));
                    if (d == 0)
                        gstore((u32x2 *)result + column, make2(bits<uint32_t>(top), bits<uint32_t>(sum)));
                }
            } else {
                attend_put_out(a, t, t.column0 + column, d, live, top, sum, x);
            }
        }
        block_sync_lds();
    }
    if (n_runs == 1) return;

    if (block_ticket(a.counter + t.tile_index, word) != (uint32_t)n_runs - 1) return;
    if (thread_index() == 0) gstore(a.counter + t.tile_index, 0u);

    // A thread merges a quad of a column, the loads of AHEAD parts under way at a time.
    enum { AHEAD = 8 };
    const int quads = n_there * (S::HEAD / 4);
    for (int i = thread; i < (quads + 127) / 128 * 128; i += 128) {
        const int column = min(i / (S::HEAD / 4), n_there - 1), d = i % (S::HEAD / 4) * 4;
        const bool live = i < quads && d < a.head_dim;
        const float *from = results + 2 * S::COLUMNS + column * S::HEAD + (live ? d : 0);
        float x[4] = {0.0f, 0.0f, 0.0f, 0.0f}, m = -INFINITY, l = 0.0f;
#pragma unroll 1
        for (int first = 0; first < n_runs; first += AHEAD) {
            u32x4 o[AHEAD];
            u32x2 m_l[AHEAD];
            float top = m;
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                o[k] = make4(0, 0, 0, 0);
                m_l[k] = make2(bits<uint32_t>(-INFINITY), 0);
                if (first + k >= n_runs) continue;
                const int64_t at = (first + k) * result_floats;
                m_l[k] = gload((const u32x2 *)(results + at) + column);
                o[k] = gload((const u32x4 *)(from + at));
            }
#pragma unroll
            for (int k = 0; k < AHEAD; k++) top = fmaxf(top, bits<float>(m_l[k].x));
            const float keep = attend_keep(m, top);
            m = top;
            l *= keep;
#pragma unroll
            for (int e = 0; e < 4; e++) x[e] *= keep;
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                const float add = attend_keep(bits<float>(m_l[k].x), top);
                l += bits<float>(m_l[k].y) * add;
                x[0] += bits<float>(o[k].x) * add;
                x[1] += bits<float>(o[k].y) * add;
                x[2] += bits<float>(o[k].z) * add;
                x[3] += bits<float>(o[k].w) * add;
            }
        }
        attend_put_out(a, t, t.column0 + column, d, live, m, l, x);
    }
}

// The run of positions that a block works on, and how many runs the positions are cut into: what the
// columns of the block see, in runs of whole rounds.
struct attend_run { int len, begin, end, n_runs; };
template <typename S>
DEV attend_run attend_run_of(const rocq_k_attention_args &a, const attend_task &t) {
    attend_run r;
    r.len = a.n_kv;
    if (a.kv_len) {
        r.len = gload(a.kv_len + t.seq);
        if (r.len < 1 || r.len > a.n_kv) {
            if (thread_index() == 0) atomic_or(a.common.status, ROCQ_K_BAD_LENGTH);
            r.len = r.len < 1 ? 1 : a.n_kv;
        }
    }
    const int column_end = min(t.column0 + (int)S::COLUMNS, a.group * a.n_q);
    r.begin = attend_low(a, r.len, attend_column_of(a, t.column0).query);
    r.end = attend_high(a, r.len, attend_column_of(a, column_end - 1).query);
    const int all = max(r.end - r.begin, 0);
    int length = all;
    r.n_runs = 1;
    if (a.n_splits > 1) {
        const int share = (all + a.n_splits - 1) / a.n_splits, round = S::ROUND;
        length = max((share + round - 1) / round * round, (int)ROCQ_K_ATTEND_RUN);
        r.n_runs = max((all + length - 1) / length, 1);
    }
    r.begin = (int)min((int64_t)r.begin + (int64_t)t.split * length, (int64_t)r.end);
    r.end = min(r.end - r.begin, length) + r.begin;
    return r;
}

// K and V of the block's KV head and sequence.
struct attend_kv {
    attend_rows k, v;
    bool paged;
    bool listed; // every tile needs its list of rows (attend_place)
};
template <typename S>
DEV attend_kv attend_kv_of(const rocq_k_attention_args &a, const attend_task &t) {
    attend_kv kv;
    kv.paged = a.page_table != 0;
    const int seq = kv.paged ? 0 : t.seq;
    kv.k = attend_rows_of(a.k, row_of(a.k, t.kv_head, 0, seq), a.k.stride[1], a.head_dim);
    kv.v = attend_rows_of(a.v, row_of(a.v, t.kv_head, 0, seq), a.v.stride[1], a.head_dim);
    kv.listed = kv.paged || kv.k.way != ATTEND_WIDE || kv.v.way != ATTEND_WIDE ||
                a.head_dim < S::HEAD;
    return kv;
}

// The positions that a wave's columns see, and those of each slot of the lane. Columns past the end are
// the last one again.
struct attend_limits {
    int low_first, low_last, high_first, high_last; // of the first column and of the last
    int low[FRAG_SLOTS], high[FRAG_SLOTS];
};
DEV attend_limits attend_limits_of(const rocq_k_attention_args &a, const attend_run &run, int first) {
    const int n_columns = a.group * a.n_q;
    const attend_column c_first = attend_column_of(a, min(first, n_columns - 1));
    const attend_column c_last = attend_column_of(a, min(first + ATTEND_COLUMNS, n_columns) - 1);
    attend_limits to;
    to.low_first = attend_low(a, run.len, c_first.query);
    to.low_last = attend_low(a, run.len, c_last.query);
    to.high_first = min(attend_high(a, run.len, c_first.query), run.end);
    to.high_last = first < n_columns ? min(attend_high(a, run.len, c_last.query), run.end) : 0;
#pragma unroll
    for (int s = 0; s < FRAG_SLOTS; s++) {
        const attend_column c = attend_column_of(a, min(first + frag_slot_col(s), n_columns - 1));
        to.low[s] = attend_low(a, run.len, c.query);
        to.high[s] = min(attend_high(a, run.len, c.query), run.end);
    }
    return to;
}
// Addresses of the mask's rows of the columns from first on, to LDS.
DEV void attend_list_mask(const rocq_k_attention_args &a, const attend_task &t, int first,
                          u32x2 *mask_rows) {
    if (!a.mask.data || lane_index() >= ATTEND_COLUMNS) return;
    const attend_column c = attend_column_of(a, min(first + lane_index(), a.group * a.n_q - 1));
    const uintptr_t to =
        (uintptr_t)row_repeated(a.mask, c.query, t.kv_head * a.group + c.head, t.seq);
    lput(mask_rows + lane_index(), make2((uint32_t)to, (uint32_t)((uint64_t)to >> 32)));
}

// From the products of Q and K to scores: cap tanh(scale q.k / cap) + mask, times log2(e). Without cap
// and mask the multiplication by factor is left to the fma before exp2. tanh(x) is
// 1 - 2 / (1 + e^2x).
struct attend_score {
    bool capped, masked;
    float scale, cap, to_cap, factor;
};
DEV attend_score attend_score_of(const rocq_k_attention_args &a) {
    const float log2_e = 1.44269504f;
    attend_score to;
    to.scale = fabsf(a.scale) * log2_e;
    to.capped = a.softcap > 0.0f;
    to.masked = a.mask.data != 0;
    to.cap = a.softcap * log2_e;
    to.to_cap = to.capped ? 2.0f * to.scale / a.softcap : 0.0f;
    to.factor = to.capped || to.masked ? 1.0f : to.scale;
    return to;
}

// s += K Q^T over a slice. k: the tile's from the slice on. q(i): elements 16 i and up of the columns.
template <typename S, typename Q>
DEV void attend_multiply_k(frag_c (&s)[S::S_FRAGS], const f16 *k, Q q) {
#pragma unroll
    for (int i = 0; i < S::O_FRAGS; i++) {
        if (i % (S::S_FRAGS < 4 ? 4 / S::S_FRAGS : 1) == 0) keep_order();
        const frag qi = q(i);
#pragma unroll
        for (int b = 0; b < S::S_FRAGS; b++) {
            wmma(s[b], frag_load(k + 16 * b * S::K_STRIDE + 16 * i, S::K_STRIDE), qi);
        }
    }
}
// Adds up the slices' products, always in the same order, so that all their waves have the same bits.
// sums: those of wave 0. All waves come.
template <typename S>
DEV void attend_add_slices(frag_c (&s)[S::S_FRAGS], float *sums, bool live, int wave, int slice) {
    float *own = sums + wave * S::SUM_STRIDE + lane_index();
    const float *all = own - slice * S::SUM_STRIDE;
    if (live) {
#pragma unroll
        for (int i = 0; i < 8 * S::S_FRAGS; i++) lput(own + 32 * i, s[i / 8].v[i % 8]);
    }
    block_sync_lds();
    if (!live) return;
#pragma unroll
    for (int i = 0; i < 8 * S::S_FRAGS; i++) {
        float sum = lget(all + 32 * i);
#pragma unroll
        for (int j = 1; j < S::SLICES; j++) sum += lget(all + j * S::SUM_STRIDE + 32 * i);
        s[i / 8].v[i % 8] = sum;
    }
}
// P of a tile from the products of Q and K.
template <typename S>
DEV void attend_weights(frag (&p)[S::S_FRAGS], frag_c (&s)[S::S_FRAGS], attend_state<S> &state,
                        const rocq_k_attention_args &a, const attend_score &score,
                        const attend_limits &limits, const attend_place &at, const u32x2 *mask_rows) {
    if (score.capped) {
#pragma unroll
        for (int i = 0; i < 8 * S::S_FRAGS; i++) {
            float &x = s[i / 8].v[i % 8];
            x = score.cap - 2.0f * score.cap * rcp_fast(1.0f + exp2_fast(x * score.to_cap));
        }
    }
    if (score.masked) {
        attend_bias<S>(s, a, mask_rows, at.first, at.end - 1, score.capped ? 1.0f : score.scale);
    }
    if (at.first < limits.low_last || at.first + S::TILE > limits.high_first ||
        at.seen != S::ALL_SEEN) {
        attend_hide<S>(s, limits.low, limits.high, at.first, at.seen);
    }
    attend_weigh<S>(state, s, score.factor);
#pragma unroll
    for (int b = 0; b < S::S_FRAGS; b++) p[b] = frag_from_c(s[b]);
}
// o += V^T P. v: the tile's from the slice on.
template <typename S>
DEV void attend_multiply_v(attend_state<S> &state, const f16 *v, const frag (&p)[S::S_FRAGS]) {
#pragma unroll
    for (int b = 0; b < S::S_FRAGS; b++) {
#pragma unroll
        for (int f = 0; f < S::O_FRAGS; f++) {
            if (f % 4 == 0) keep_order();
            wmma(state.o[f], frag_load(v + 16 * f * S::V_STRIDE + 16 * b, S::V_STRIDE), p[b]);
        }
    }
}
// Whether any column of a wave sees a position of the tile; if none does, the wave leaves it out.
template <typename S> DEV bool attend_is_live(const attend_limits &limits, const attend_place &at) {
    return at.first < limits.high_last && at.first + S::TILE > limits.low_first;
}

// Decode. Waves share nothing in the loop but the slices' sums: a wave waits for memory, and has K and
// V of the next tile in flight while it works on this one. Q is read from LDS, because the registers
// are full of data in flight.
template <int D> DEV void attend_decode(const rocq_k_attention_args &a) {
    typedef attend_decode_shape<D> S;
    LDS(u32x4, lds, attend_lds<S>::BYTES / 16);
    if (a.n_splits == 0) return;
    const int lane = lane_index(), wave = wave_read(wave_index(), 0);
    const attend_role w = attend_role_of<S>(wave);
    f16 *const tile = (f16 *)((char *)lds + wave * S::WAVE_BYTES);
    const attend_task t = attend_task_of<S>(a, (int)(block_index() + a.common.block0));
    const attend_run run = attend_run_of<S>(a, t);
    if (t.split >= run.n_runs) return;

    const attend_kv kv = attend_kv_of<S>(a, t);
    int32_t *const tables = (int32_t *)((char *)lds + attend_lds<S>::ROWS_AT + wave * S::ROW_BYTES);
    u32x2 *const mask_rows = (u32x2 *)(tables + 2 * S::TILE);
    attend_place at;
    at.end = run.end;
    at.rows = tables;
    at.chunk0 = w.slice * (S::W / 8);
    u32x4 raw_k[S::LOADS], raw_v[S::LOADS];
    int row[S::WORDS] = {};
    if (run.begin < run.end) {
        const int first = run.begin + w.set * S::TILE;
        if (kv.paged) attend_look_up<S>(row, a, t.seq, first, run.end);
        attend_turn_to<S>(at, row, kv.paged, kv.listed, first);
        attend_fetch<S, false>(raw_k, kv.k, at, lane);
        attend_fetch<S, true>(raw_v, kv.v, at, lane);
        if (kv.paged) attend_look_up<S>(row, a, t.seq, first + S::ROUND, run.end);
    }
    const attend_limits limits = attend_limits_of(a, run, t.column0);
    attend_list_mask(a, t, t.column0, mask_rows);
    const attend_score score = attend_score_of(a);
    f16 *q_tile = (f16 *)((char *)lds + S::Q_AT);
    attend_stage_q<S>(q_tile, a, t);
    q_tile += w.slice * ATTEND_COLUMNS * S::Q_STRIDE;
    block_sync_lds();
    attend_state<S> state;
    attend_clear<S>(state);
    int begin = run.begin;
    for (int side = S::TILE; begin < run.end; begin += S::ROUND, side ^= S::TILE) {
        attend_stage<S, false>(tile, raw_k, kv.k, at, lane);
        wave_sync();
        attend_place next = at;
        next.rows = tables + side;
        attend_turn_to<S>(next, row, kv.paged, kv.listed, at.first + S::ROUND);
        attend_fetch<S, false>(raw_k, kv.k, next, lane); // past the end: the last position again
        if (kv.paged) attend_look_up<S>(row, a, t.seq, at.first + 2 * S::ROUND, run.end);

        const bool live = attend_is_live<S>(limits, at);
        frag_c s[S::S_FRAGS];
        attend_clear_scores<S>(s);
        if (live) {
            attend_multiply_k<S>(s, tile, [=](int i) {
                return frag_load(q_tile + 16 * i, S::Q_STRIDE);
            });
        }
        if (S::SLICES > 1) {
            wave_sync();
            attend_add_slices<S>(s, (float *)lds, live, wave, w.slice);
            block_sync_lds();
        }
        frag p[S::S_FRAGS];
        if (live) attend_weights<S>(p, s, state, a, score, limits, at, mask_rows);

        wave_sync();
        attend_stage<S, true>(tile, raw_v, kv.v, at, lane);
        attend_fetch<S, true>(raw_v, kv.v, next, lane);
        wave_sync();
        if (live) attend_multiply_v<S>(state, tile, p);
        wave_sync();
        at = next;
    }
    block_sync_lds();
    attend_finish<S>(a, state, run.n_runs, lds);
}

// Prefill. All waves stage and use one KV tile. While they work on its K its V is in flight, and while
// they work on that the next tile's K: the waves of other blocks hide what is left of the latency,
// and Q takes the registers that a further tile would.
template <int D> DEV void attend_prefill(const rocq_k_attention_args &a) {
    typedef attend_prefill_shape<D> S;
    LDS(u32x4, lds, attend_lds<S>::BYTES / 16);
    if (a.n_splits == 0) return;
    const int thread = (int)thread_index(), wave = wave_read(wave_index(), 0);
    const attend_role w = attend_role_of<S>(wave);
    f16 *const k_tile = (f16 *)lds, *const v_tile = (f16 *)((char *)lds + S::V_AT);
    const attend_task t = attend_task_of<S>(a, (int)(block_index() + a.common.block0));
    const attend_run run = attend_run_of<S>(a, t);
    if (t.split >= run.n_runs) return;

    const attend_kv kv = attend_kv_of<S>(a, t);
    int32_t *const tables = (int32_t *)((char *)lds + attend_lds<S>::ROWS_AT + wave * S::ROW_BYTES);
    u32x2 *const mask_rows = (u32x2 *)(tables + 2 * S::TILE);
    attend_place at;
    at.end = run.end;
    at.rows = tables;
    at.chunk0 = 0;
    u32x4 raw_k[S::LOADS];
    int row[S::WORDS] = {};
    if (run.begin < run.end) {
        if (kv.paged) attend_look_up<S>(row, a, t.seq, run.begin, run.end);
        attend_turn_to<S>(at, row, kv.paged, kv.listed, run.begin);
        attend_fetch<S, false>(raw_k, kv.k, at, thread);
    }
    const int first_column = t.column0 + ATTEND_COLUMNS * w.column_tile;
    const attend_limits limits = attend_limits_of(a, run, first_column);
    attend_list_mask(a, t, first_column, mask_rows);
    const attend_score score = attend_score_of(a);
    frag q[S::O_FRAGS];
    attend_stage_q<S>(k_tile, a, t);
    block_sync_lds();
    const f16 *const q_wave =
        k_tile + w.column_tile * ATTEND_COLUMNS * S::Q_STRIDE + w.slice * S::W;
#pragma unroll
    for (int i = 0; i < S::O_FRAGS; i++) q[i] = frag_load(q_wave + 16 * i, S::Q_STRIDE);
    block_sync_lds();
    attend_state<S> state;
    attend_clear<S>(state);
    int begin = run.begin;
    for (int side = S::TILE; begin < run.end; begin += S::ROUND, side ^= S::TILE) {
        attend_stage<S, false>(k_tile, raw_k, kv.k, at, thread);
        block_sync_lds();
        attend_place next = at;
        next.rows = tables + side;
        u32x4 raw_v[S::LOADS];
        attend_fetch<S, true>(raw_v, kv.v, at, thread);
        if (kv.paged) attend_look_up<S>(row, a, t.seq, at.first + S::ROUND, run.end);

        const bool live = attend_is_live<S>(limits, at);
        frag_c s[S::S_FRAGS];
        attend_clear_scores<S>(s);
        if (live) attend_multiply_k<S>(s, k_tile + w.slice * S::W, [&](int i) { return q[i]; });
        if (S::SLICES > 1) {
            attend_add_slices<S>(s, (float *)((char *)lds + S::SUMS_AT), live, wave, w.slice);
        }
        frag p[S::S_FRAGS];
        if (live) attend_weights<S>(p, s, state, a, score, limits, at, mask_rows);

        attend_stage<S, true>(v_tile, raw_v, kv.v, at, thread);
        attend_turn_to<S>(next, row, kv.paged, kv.listed, at.first + S::ROUND);
        block_sync_lds();
        attend_fetch<S, false>(raw_k, kv.k, next, thread);
        if (live) attend_multiply_v<S>(state, v_tile + w.slice * S::W * S::V_STRIDE, p);
        at = next;
    }
    block_sync_lds();
    attend_finish<S>(a, state, run.n_runs, lds);
}

// With D = 512 a block's four waves are the slices of one column tile, as in decode.
#define ROCQ_X(X, d)                                                                               \
    KERNEL(attention_decode_##d, rocq_k_attention_args, 128) { attend_decode<d>(a); }              \
    KERNEL(attention_prefill_##d, rocq_k_attention_args, 128) {                                    \
        if constexpr (d < 512) attend_prefill<d>(a);                                               \
        else attend_decode<d>(a);                                                                  \
    }
ROCQ_K_HEAD_DIMS(ROCQ_X, unused)
#undef ROCQ_X

// ---------------------------------------------------------------------------------------------
// >>ops: in the order of ROCQ_OPS
// ---------------------------------------------------------------------------------------------
// A lane works on quads (see >>quantize).

// Dimensions 1 to 3 of row number r of t.
struct place { uint32_t i1, i2, i3; };
DEV place place_of(const rocq_k_tensor &t, uint32_t r) {
    if ((t.ne[2] | t.ne[3]) == 1) return {r, 0, 0}; // divisions take longer than a load
    const uint32_t ne1 = (uint32_t)t.ne[1], ne2 = (uint32_t)t.ne[2];
    const uint32_t plane = r / ne1, i3 = plane / ne2;
    return {r - plane * ne1, plane - i3 * ne2, i3};
}

// Rows follow each other without gaps; planar tensors always do.
DEV bool is_packed(const rocq_k_tensor &t) {
    const int64_t row = (int64_t)(t.ne[0] / format_elems(t.format)) * format_bytes(t.format);
    return t.layout == ROCQ_LAYOUT_PLANAR ||
           ((t.ne[1] == 1 || t.stride[0] == row) &&
            (t.ne[2] == 1 || t.stride[1] == row * t.ne[1]) &&
            (t.ne[3] == 1 || t.stride[2] == row * t.ne[1] * t.ne[2]));
}

// Elements k to k + count - 1 of a row of F32, F16 or BF16, then zeros.
DEV void get4(int32_t format, const char *row, bool wide, int64_t k, int count, float v[4]) {
#pragma unroll
    for (int e = 0; e < 4; e++) v[e] = 0.0f;
    if (wide && format == ROCQ_F32) {
        if (count == 0) return;
        const u32x4 w = gload((const u32x4 *)((const float *)row + k));
        v[0] = bits<float>(w.x);
        v[1] = bits<float>(w.y);
        v[2] = bits<float>(w.z);
        v[3] = bits<float>(w.w);
    } else if (wide) {
        if (count == 0) return;
        const u32x2 w = gload((const u32x2 *)((const uint16_t *)row + k));
        const uint32_t h[4] = {w.x & 0xffffu, w.x >> 16, w.y & 0xffffu, w.y >> 16};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            v[e] = format == ROCQ_F16 ? f16_f32((uint16_t)h[e]) : bf16_f32((uint16_t)h[e]);
        }
    } else {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (e < count) v[e] = get_float(format, row, k + e);
        }
    }
}

// A tile of a row: Q quads a thread, quad j of thread t being quad j * n_threads() + t of the tile.
// With 8, rows of up to one tile stay in registers from the first pass to the last.
enum { TILE_QUADS = 8 };
DEV int tile_at(int base, int j) { return base + 4 * (j * (int)n_threads() + (int)thread_index()); }
DEV int tile_size(int quads) { return 4 * quads * (int)n_threads(); }

// How many of the quads j of a tile any lane has, and whether all lanes have all of quad j;
// uniform.
DEV int tile_quads(int n, int base) {
    const int step = 4 * (int)n_threads();
    return (n - base + step - 1) / step;
}
DEV bool is_full(int n, int base, int j) { return base + 4 * (j + 1) * (int)n_threads() <= n; }

// Elements from base on of a row of n, F32 or F16; zeros past its end, nothing in quads past the
// tile's. All loads are under way before one is used, and lanes past the end read element 0, so
// that no lane branches.
template <int Q>
DEV void load_tile(int32_t format, bool wide, const char *row, int n, int base, float (&v)[Q][4]) {
    const int quads = tile_quads(n, base);
    uint32_t w[Q][4];
#pragma unroll
    for (int j = 0; j < Q; j++) {
        if (j >= quads) break;
        const int k = tile_at(base, j), k0 = k < n ? k : 0;
        if (wide && format == ROCQ_F32) {
            const u32x4 q = gload((const u32x4 *)((const float *)row + k0));
            w[j][0] = q.x;
            w[j][1] = q.y;
            w[j][2] = q.z;
            w[j][3] = q.w;
        } else if (wide) {
            const u32x2 q = gload((const u32x2 *)((const uint16_t *)row + k0));
            w[j][0] = q.x;
            w[j][1] = q.y;
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int at = k + e < n ? k + e : 0;
                w[j][e] = format == ROCQ_F32 ? gload((const uint32_t *)row + at)
                                             : gload((const uint16_t *)row + at);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < Q; j++) {
        if (j >= quads) break;
        if (format == ROCQ_F32) {
#pragma unroll
            for (int e = 0; e < 4; e++) v[j][e] = bits<float>(w[j][e]);
        } else {
            const uint32_t x = w[j][0], y = w[j][1];
            v[j][0] = f16_f32((uint16_t)x);
            v[j][1] = f16_f32((uint16_t)(wide ? x >> 16 : y));
            v[j][2] = f16_f32((uint16_t)(wide ? y : w[j][2]));
            v[j][3] = f16_f32((uint16_t)(wide ? y >> 16 : w[j][3]));
        }
        if (is_full(n, base, j)) continue;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (tile_at(base, j) + e >= n) v[j][e] = 0.0f;
        }
    }
}

// -- rmsnorm, layernorm --
// Per row of K: y = ((x - mean) - rest) rstd weight + bias, mean = sum x / K, rest = sum (x - mean)
// / K, rstd = 1 / sqrt(sum (x - mean)^2 / K - rest^2 + eps); without center mean and rest are 0.
// The first mean is rounded, which shows where it is large next to the spread of x; rest corrects
// it.
//
//   x     F32 or F16 [K, rows], any strides     weight, bias  F32 [K], either may be absent
//   y     F32, F16, Q8_0 raw or planar, x's shape; may be x when their formats are equal
//   mean, rstd  F32 [rows], written where present
//
// A block owns a row, a thread the quads t, t + threads, ... of it; a unit of 32 that y needs for
// its scale lies in 8 neighbouring lanes.
// Geometry: a block a row, 32 to 512 threads by the host's choice. LDS: 384 bytes.
// Bytes: x and weight once while K <= 16 threads (8192 with 512), kept in registers, and all under
// way before one is used, since the lone row of a decode step is all latency; else x once per pass,
// three in all with center, two without. y once. Sums are F32 in a fixed order: a lane's own elements,
// then a tree over the lanes, then one over the waves.
enum { NORM_QUADS = 4 }; // of a tile
KERNEL(norm, rocq_k_norm_args, 512) {
    LDS(float, work, 3 * BLOCK_WORK);
    if (a.x.ne[0] == 0) return;
    const uint32_t r = a.common.block0 + block_index();
    const place at = place_of(a.x, r);
    const char *x_row = row_of(a.x, at.i1, at.i2, at.i3);
    char *y_row = row_of(a.y, at.i1, at.i2, at.i3);
    const int n = a.x.ne[0], tile = tile_size(NORM_QUADS);
    const bool whole = n <= tile, x_wide = is_wide(a.x), y_wide = is_wide(a.y);
    const bool w_wide = (((uintptr_t)a.weight | (uintptr_t)a.bias) & 15u) == 0 && (n & 3) == 0;
    const float share = 1.0f / (float)n;
    float v[NORM_QUADS][4], w[NORM_QUADS][4], mean = 0.0f, rest = 0.0f, rstd = 0.0f;
    const int first = a.center ? 0 : 1;
    for (int pass = first; pass < 3; pass++) { // mean; rest and rstd; y
        float sum = 0.0f, square = 0.0f;
        for (int base = 0; base < n; base += tile) {
            if (a.weight && pass == (whole ? first : 2)) {
                load_tile(ROCQ_F32, w_wide, (const char *)a.weight, n, base, w);
            }
            if (!whole || pass == first) load_tile(a.x.format, x_wide, x_row, n, base, v);
            if (pass == 2) {
                // Not unrolled, for the sake of code size: quad j is always in v[0] and w[0].
#pragma unroll 1
                for (int j = 0; j < NORM_QUADS && j < tile_quads(n, base); j++) {
                    const int k = tile_at(base, j), count = quad_count(n, k);
                    float b[4], y[4];
                    if (a.bias) get4(ROCQ_F32, (const char *)a.bias, w_wide, k, count, b);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        y[e] = ((v[0][e] - mean) - rest) * rstd;
                        if (a.weight) y[e] *= w[0][e];
                        if (a.bias) y[e] += b[e];
                    }
                    put4(a.y, y_wide, y_row, r, k, count, y);
#pragma unroll
                    for (int i = 0; i + 1 < NORM_QUADS; i++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            v[i][e] = v[i + 1][e];
                            w[i][e] = w[i + 1][e];
                        }
                    }
                }
                continue;
            }
            const int quads = tile_quads(n, base);
#pragma unroll
            for (int j = 0; j < NORM_QUADS; j++) {
                if (j >= quads) break;
                const bool full = is_full(n, base, j);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float d = v[j][e] - mean;
                    if (!full && tile_at(base, j) + e >= n) d = 0.0f;
                    sum += d;
                    square = fmaf(d, d, square);
                }
            }
        }
        if (pass == 2) break;
        if (a.center) sum = block_sum(sum, work + pass * BLOCK_WORK) * share;
        if (pass == 0) {
            mean = sum;
        } else {
            if (a.center) rest = sum;
            const float mean_square = block_sum(square, work + 2 * BLOCK_WORK) * share;
            rstd = 1.0f / sqrtf(fmaf(-rest, rest, mean_square) + a.eps);
        }
    }
    if (thread_index() == 0) {
        if (a.mean.data) gstore((float *)row_of(a.mean, at.i2, at.i3, 0) + at.i1, mean + rest);
        if (a.rstd.data) gstore((float *)row_of(a.rstd, at.i2, at.i3, 0) + at.i1, rstd);
    }
}

// -- rope, rope_append --

// Sine and cosine of `turns` whole turns, |turns| <= 1/2: reduced to an eighth of a turn around 0,
// where the Taylor series leave 3e-9 (sine) and 2e-9 (cosine).
struct sine_cosine { float s, c; };
DEV sine_cosine sincos_turns(float turns) {
    const float quarter = rintf(4.0f * turns); // -2 to 2
    const float x = fmaf(quarter, -0.25f, turns) * 6.28318531f, z = x * x;
    float s = fmaf(z, 2.75573192e-6f, -1.98412698e-4f);
    s = fmaf(z, s, 8.33333333e-3f);
    s = fmaf(z, s, -1.66666667e-1f);
    s = fmaf(x * z, s, x);
    float c = fmaf(z, -2.75573192e-7f, 2.48015873e-5f);
    c = fmaf(z, c, -1.38888889e-3f);
    c = fmaf(z, c, 4.16666667e-2f);
    c = fmaf(z, c, -0.5f);
    c = fmaf(z, c, 1.0f);
    const int q = (int)quarter & 3;
    return {q == 0 ? s : q == 1 ? c : q == 2 ? -s : -c, q == 0 ? c : q == 1 ? -s : q == 2 ? -c : s};
}

// Up to three streams in one launch: q turned in place, k turned and stored in the KV cache, v
// stored there. Pair i of token t turns by pos[t] turn(i) / freq_factors[i] whole turns:
// (x0, x1) becomes magnitude (x0 cos - x1 sin, x0 sin + x1 cos).
//
//   x     F32 or F16 [D, heads, tokens], any strides
//   y     F32 F16 BF16, raw Q8_0 Q4_0 [D, heads, cells or tokens], any strides; may be x. Elements
//         from n_dims on are copied; n_dims <= 512
//   cell  row of y for token t where to_cell is set; one out of range stores nothing and sets a bit
//         of the status
//
// Geometry: 256 threads. With Q = ceil(D / 4) quads a head, a block owns heads = max(1, 256 / Q)
// heads of one stream and token; a stream has slices = ceil(its heads / heads) blocks a token, all
// together S, and block b is slice b % S of token b / S: tokens S blocks in all. A thread owns a quad of a
// head, and one unit of 32 lies in 8 neighbouring lanes. Heads of more than 1024 elements take
// several rounds.
// The angles of a token are worked out once in a block, in double up to the fraction of a turn (at
// position 100,000 a float would be off by 0.004), and shared by its heads: LDS 2 KB. That and the
// loads of pos, cell and x wait for each other nowhere: a decode step's launch is all latency.
// Where x is y, all loads of turned elements, which are in the first round, come before the barrier
// and all stores after it: the elements of a pair are read by two lanes (NEOX).
// Bytes: x and y once; some 12 double operations a thread, which at 1/32 rate cost less than the loads.
KERNEL(rope, rocq_k_rope_args, 256) {
    LDS(float, cosine, 256);
    LDS(float, sine, 256);
    if (a.n_streams == 0) return;
    const int n = a.head_dim, half = a.n_dims / 2, quads = (n + 3) / 4, t = (int)thread_index();
    const uint32_t b = a.common.block0 + block_index();
    const uint32_t token = b < a.slices ? 0 : b / a.slices;
    uint32_t slice = b - token * a.slices;
    int s = 0;
    for (; s + 1 < a.n_streams && slice >= a.stream[s].slices; s++) slice -= a.stream[s].slices;
    const rocq_k_rope_stream &stream = a.stream[s];
    const int position = gload(a.pos + token);
    const int cell = stream.to_cell ? gload((a.cell ? a.cell : a.pos) + token) : 0;

    const int local = quads < 256 ? t / quads : 0, head = (int)slice * a.heads + local;
    const bool live = local < a.heads && head < stream.x.ne[1], x_wide = is_wide(stream.x);
    const char *x_row = row_of(stream.x, live ? head : 0, token, 0);
    float v[4], p[4]; // a quad, and what its elements turn with
    int k, count, turned; // turned: elements of the quad below n_dims
    const auto load = [&](int first) {
        k = 4 * (first + t - local * quads);
        count = live ? quad_count(n, k) : 0;
        turned = stream.plain ? 0 : 2 * half - k;
        get4(stream.x.format, x_row, x_wide, k, count, v);
        if (!a.neox) {
            p[0] = v[1];
            p[1] = v[0];
            p[2] = v[3];
            p[3] = v[2];
        } else if ((half & 3) == 0) {
            get4(stream.x.format, x_row, x_wide, k < half ? k + half : k - half,
                 turned > 0 ? count : 0, p);
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                p[e] = 0.0f;
                if (e < count && e < turned) {
                    p[e] = get_float(stream.x.format, x_row,
                                     k + e < half ? k + e + half : k + e - half);
                }
            }
        }
    };
    load(0);
    if (!stream.plain && t < half) {
        double turn = 0.15915494309189535; // 1 / (2 pi)
#pragma unroll
        for (int i = 0; i < 8; i++) turn *= t >> i & 1 ? a.power[i] : 1.0;
        if (a.ext_factor > 0.0) {
            const double ramp = fmin(1.0, fmax(0.0, ((double)t - a.low) * a.per_pair));
            const double keep = (1.0 - ramp) * a.ext_factor;
            turn = turn * a.scale * (1.0 - keep) + turn * keep;
        } else {
            turn *= a.scale;
        }
        double turns = (double)position * turn;
        if (a.freq_factors) turns /= (double)gload(a.freq_factors + t);
        const sine_cosine angle = sincos_turns((float)(turns - rint(turns)));
        lput(sine + t, angle.s * a.magnitude);
        lput(cosine + t, angle.c * a.magnitude);
    }
    block_sync_lds();

    const bool stored = !stream.to_cell || (cell >= 0 && cell < a.n_cells);
    const int64_t to = !stream.to_cell ? token : stored ? cell : 0;
    char *y_row = row_of(stream.y, live ? head : 0, to, 0);
    const bool y_wide = is_wide(stream.y);
    if (!stored && t == 0) atomic_or(a.common.status, ROCQ_K_BAD_CELL);
    for (int first = 0;;) {
        float y[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            y[e] = v[e];
            if (e >= count || e >= turned) continue;
            const bool second = a.neox ? k + e >= half : (e & 1) != 0;
            const int pair = a.neox ? k + e - (second ? half : 0) : (k + e) / 2;
            const float c = lget(cosine + pair), sn = lget(sine + pair);
            y[e] = fmaf(v[e], c, (second ? p[e] : -p[e]) * sn);
        }
        put4(stream.y, y_wide, y_row, 0, k, stored ? count : 0, y);
        first += 256;
        if (first >= quads) break;
        load(first);
    }
}

// -- activate, glu, add, mul, scale, cast --

// Bytes of a row.
DEV int64_t row_bytes_of(const rocq_k_tensor &t) {
    return (int64_t)(t.ne[0] / format_elems(t.format)) * format_bytes(t.format);
}
// 16 bytes at byte k of a row of n, or what is left of it.
template <typename T> DEV void copy_16(char *to, const char *from, int64_t k, int64_t n) {
    const int each = (int)sizeof(T);
#pragma unroll
    for (int e = 0; e < 16 / each; e++) {
        if (k + e * each < n) gstore((T *)(to + k) + e, gload((const T *)(from + k) + e));
    }
}

DEV void activate4(int32_t kind, float v[4]) {
    switch (kind) {
#define ROCQ_X(KIND) \
    case KIND:       \
        for (int e = 0; e < 4; e++) v[e] = activation(KIND, v[e]); \
        break;
        ROCQ_X(ROCQ_SILU)
        ROCQ_X(ROCQ_GELU)
        ROCQ_X(ROCQ_GELU_ERF)
        ROCQ_X(ROCQ_RELU)
        ROCQ_X(ROCQ_TANH)
#undef ROCQ_X
    default: break;
    }
}

// y = activation(a), activation(a) b, a + b, a b, a scale + bias or a, by op; a cast to a's own
// format copies bytes, also of blocks and I32.
//
//   a, b  F32, F16 or BF16; b is repeated where it has 1, also along a row; any strides
//   y     F32 F16 BF16, Q8_0 raw or planar, Q4_0 raw, a's shape; may be a or b of its format
//
// This is also what turns activations into the planar Q8_0 or the F16 that a product takes.
// Geometry: 256 threads, a thread a piece. A piece is a quad, ceil(ne0 / 4) to a row; in a copy it
// is 16 bytes, ceil(bytes of a row / 16) to a row. Pieces are counted through all rows, and there
// must be fewer than 2^32. A unit of 32 of a quantized y is the quads of 8 neighbouring lanes, its
// largest magnitude comes by three lane swaps.
// Bytes: a, b and y once, 16 a lane on wide rows, neighbouring lanes side by side.
KERNEL(map, rocq_k_map_args, 256) {
    if (a.y.ne[0] == 0) return;
    const uint32_t at = (a.common.block0 + block_index()) * 256 + thread_index();
    const uint32_t rows = rows_of(a.y);
    if (a.op == ROCQ_OP_CAST && a.y.format == a.a.format) {
        const int64_t n = row_bytes_of(a.y);
        const uint32_t chunks = (uint32_t)((n + 15) / 16), r = at / chunks;
        if (r >= rows) return;
        const int64_t k = 16 * (int64_t)(at - r * chunks);
        const place p = place_of(a.y, r);
        char *to = row_of(a.y, p.i1, p.i2, p.i3);
        const char *from = row_of(a.a, p.i1, p.i2, p.i3);
        const uint64_t low = alignment_bits(a.y) | alignment_bits(a.a);
        if (((low | (uint64_t)n) & 15) == 0) copy_16<u32x4>(to, from, k, n);
        else if (((low | (uint64_t)n) & 3) == 0) copy_16<uint32_t>(to, from, k, n);
        else if (((low | (uint64_t)n) & 1) == 0) copy_16<uint16_t>(to, from, k, n);
        else copy_16<uint8_t>(to, from, k, n);
        return;
    }
    // Whole tensors are one long row, and two dimensions need one product a row: the general
    // address takes more of the ALU's time than the rest.
    const bool one_row =
        (a.y.ne[0] & 3) == 0 && is_packed(a.y) && is_packed(a.a) &&
        (!a.b.data || (is_packed(a.b) && a.b.ne[0] == a.y.ne[0] && rows_of(a.b) == rows));
    const uint32_t quads = (uint32_t)(a.y.ne[0] + 3) / 4, row = one_row ? 0 : at / quads;
    const bool live = one_row ? at < quads * rows : row < rows;
    const uint32_t r = live ? row : 0;
    const int64_t k = 4 * (int64_t)(at - row * quads);
    const int count = !live ? 0 : one_row ? 4 : quad_count(a.y.ne[0], k);
    const char *a_row = (const char *)a.a.data, *b_row = (const char *)a.b.data;
    char *y_row = (char *)a.y.data;
    if (!one_row && a.y.ne[2] == 1 && a.y.ne[3] == 1) {
        a_row = row_of(a.a, r, 0, 0);
        if (a.b.data) b_row = row_repeated(a.b, r, 0, 0);
        y_row = row_of(a.y, r, 0, 0);
    } else if (!one_row) {
        const place p = place_of(a.y, r);
        a_row = row_of(a.a, p.i1, p.i2, p.i3);
        if (a.b.data) b_row = row_repeated(a.b, p.i1, p.i2, p.i3);
        y_row = row_of(a.y, p.i1, p.i2, p.i3);
    }
    float v[4], b[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    get4(a.a.format, a_row, is_wide(a.a), k, count, v);
    if (a.b.data) {
        if (a.b.ne[0] == 1) b[0] = b[1] = b[2] = b[3] = get_float(a.b.format, b_row, 0);
        else get4(a.b.format, b_row, is_wide(a.b), k, count, b);
    }
    if (a.op == ROCQ_OP_ACTIVATE || a.op == ROCQ_OP_GLU) activate4(a.activation, v);
#pragma unroll
    for (int e = 0; e < 4; e++) {
        switch (a.op) {
        case ROCQ_OP_ADD: v[e] += b[e]; break;
        case ROCQ_OP_GLU:
        case ROCQ_OP_MUL: v[e] *= b[e]; break;
        case ROCQ_OP_SCALE: v[e] = fmaf(v[e], a.scale, a.bias); break;
        default: break;
        }
    }
    put4(a.y, is_wide(a.y), y_row, r, k, count, v);
}

// -- softmax --
// Per row of K: y = exp(s - max s) / sum of it, s = x scale + mask; a mask of -inf hides whatever x
// is, and a row that is -inf throughout becomes 0 throughout. One NaN makes its row NaN.
//
//   x, y  F32 [K, rows], any strides; y may be x
//   mask  F32 or F16, x's shape or 1 in dimensions 1 to 3, where it is repeated; may be absent
//
// A block owns a row, a thread the quads t, t + threads, ... of it. Geometry: a block a row, 32 to
// 256 threads by the host's choice. LDS: 256 bytes.
// Bytes: x and mask once while K <= 32 threads (8192 with 256), kept in registers; else three
// times.
KERNEL(softmax, rocq_k_softmax_args, 256) {
    LDS(float, work, 2 * BLOCK_WORK);
    if (a.x.ne[0] == 0) return;
    const uint32_t r = a.common.block0 + block_index();
    const place at = place_of(a.x, r);
    const char *x_row = row_of(a.x, at.i1, at.i2, at.i3);
    const char *mask_row = a.mask.data ? row_repeated(a.mask, at.i1, at.i2, at.i3) : x_row;
    char *y_row = row_of(a.y, at.i1, at.i2, at.i3);
    const int n = a.x.ne[0], tile = tile_size(TILE_QUADS);
    const bool x_wide = is_wide(a.x), y_wide = is_wide(a.y), mask_wide = is_wide(a.mask);
    float v[TILE_QUADS][4], top = -INFINITY, shift = 0.0f, factor = 0.0f;
    for (int pass = 0; pass < 3; pass++) { // largest; sum; y
        float sum = 0.0f;
        for (int base = 0; base < n; base += tile) {
            const int quads = tile_quads(n, base);
            if (n > tile || pass == 0) {
                load_tile(ROCQ_F32, x_wide, x_row, n, base, v);
                float m[TILE_QUADS][4];
                if (a.mask.data) load_tile(a.mask.format, mask_wide, mask_row, n, base, m);
#pragma unroll
                for (int j = 0; j < TILE_QUADS; j++) {
                    if (j >= quads) break;
                    const bool full = is_full(n, base, j);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        v[j][e] *= a.scale;
                        if (a.mask.data) {
                            v[j][e] = m[j][e] == -INFINITY ? -INFINITY : v[j][e] + m[j][e];
                        }
                        if (!full && tile_at(base, j) + e >= n) v[j][e] = -INFINITY;
                        top = fmaxf(top, v[j][e]); // NaN: keeps top
                    }
                }
            }
            if (pass == 0) continue;
#pragma unroll
            for (int j = 0; j < TILE_QUADS; j++) {
                if (j >= quads) break;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (n > tile || pass == 1) v[j][e] = exp_fast(v[j][e] - shift);
                    sum += v[j][e];
                }
            }
            if (pass == 1) continue;
#pragma unroll
            for (int j = 0; j < TILE_QUADS; j++) {
                if (j >= quads) break;
                const int k = tile_at(base, j);
                if (y_wide && k < n) {
                    gstore((u32x4 *)((float *)y_row + k),
                           make4(bits<uint32_t>(v[j][0] * factor), bits<uint32_t>(v[j][1] * factor),
                                 bits<uint32_t>(v[j][2] * factor),
                                 bits<uint32_t>(v[j][3] * factor)));
                } else if (!y_wide) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        if (k + e < n) gstore((float *)y_row + k + e, v[j][e] * factor);
                    }
                }
            }
        }
        if (pass == 0) {
            top = block_max(top, work);
            shift = top == -INFINITY ? 0.0f : top; // exp(-inf - -inf) would be NaN
        } else if (pass == 1) {
            sum = block_sum(sum, work + BLOCK_WORK);
            factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        }
    }
}

// -- gather, and cast from every format --

// Word i of unit `unit` of a planar tensor of n_units units, decoded; i is the lane's own. q[i] is
// selected, since an array with an index that is no constant would lie in memory.
template <int F>
DEV void planar_values(const void *x, int64_t n_units, int64_t unit, int i, float v[4]) {
    const raw<F> r = load_raw<F>(planes_of<F>(x, n_units), unit);
    uint32_t q = decode_code<F>(r, 0);
#pragma unroll
    for (int w = 1; w < 8; w++) q = i == w ? decode_code<F>(r, w) : q;
    decode_quad<F>(q, decode_factors<F>(r, unit), i, v);
}

// y[., r] = x[., ids ? ids[r] : r] scale, decoded: embedding rows, and cast from every format.
//
//   x  any of the 18 formats, raw at any strides or planar; I32, which is copied
//   y  F32, F16 or BF16 (I32 when x is), any strides
//   ids  I32 [rows of y] or absent; x then has 2 dimensions. One out of range gives a row of zeros
//      and sets a bit of the status
//
// Geometry: 256 threads, a thread a quad of y, ceil(ne0 / 4) to a row, counted through all rows;
// fewer than 2^32 in all. Neighbouring lanes write neighbouring quads, so stores are 16 bytes (F16:
// 8) a lane and contiguous. The 8 lanes of a unit read the same scale and, planar, the same codes:
// one request of the wave. With F32 out, 4 bytes written a weight dominate, and decoding the whole
// unit in each lane stays far below what the ALU does meanwhile.
// scale 1 gives the bits of rocq_dequantize.
KERNEL(decode, rocq_k_decode_args, 256) {
    if (a.y.ne[0] == 0) return;
    const uint32_t at = (a.common.block0 + block_index()) * 256 + thread_index();
    const uint32_t quads = (uint32_t)(a.y.ne[0] + 3) / 4, r = at / quads;
    if (r >= rows_of(a.y)) return;
    const int64_t k = 4 * (int64_t)(at - r * quads);
    const int count = quad_count(a.y.ne[0], k);
    const place p = place_of(a.y, r);
    char *y_row = row_of(a.y, p.i1, p.i2, p.i3);
    const char *x_row = row_of(a.x, p.i1, p.i2, p.i3);
    int64_t row = r;
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    bool found = true;
    if (a.ids) {
        row = gload(a.ids + r);
        found = row >= 0 && row < a.x.ne[1];
        if (!found && k == 0) atomic_or(a.common.status, ROCQ_K_BAD_ID);
        x_row = row_of(a.x, found ? row : 0, 0, 0);
    }
    if (a.x.format == ROCQ_I32) {
        for (int e = 0; e < count; e++) {
            gstore((int32_t *)y_row + k + e, found ? gload((const int32_t *)x_row + k + e) : 0);
        }
        return;
    }
    if (found) {
        if (a.x.format == ROCQ_F32 || a.x.format == ROCQ_F16 || a.x.format == ROCQ_BF16) {
            get4(a.x.format, x_row, is_wide(a.x), k, count, v);
        } else if (a.x.layout == ROCQ_LAYOUT_PLANAR) {
            const int64_t per_row = a.x.ne[0] / 32, n_units = per_row * rows_of(a.x);
            const int64_t unit = row * per_row + k / 32;
            switch (a.x.format) {
#define ROCQ_X(X, f)                                                                           \
    case format_id_##f:                                                                        \
        planar_values<format_id_##f>(a.x.data, n_units, unit, (int)(k >> 2) & 7, v);           \
        break;
                BLOCK_FORMATS(ROCQ_X, )
#undef ROCQ_X
            default: break;
            }
        } else {
            switch (a.x.format) {
#define ROCQ_X(X, f) case format_id_##f: gguf_values<format_id_##f>(x_row, k, v); break;
                BLOCK_FORMATS(ROCQ_X, )
#undef ROCQ_X
            default: break;
            }
        }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) v[e] *= a.scale;
    if (a.y.format == ROCQ_F32 || a.y.format == ROCQ_F16 || a.y.format == ROCQ_BF16) {
        put4(a.y, is_wide(a.y), y_row, r, k, count, v);
    }
}

// -- argmax --

// A candidate for the largest: the higher value, then the lower index.
struct best_of { float x; int i; };
DEV bool is_better(float x, int i, const best_of &than) {
    return x > than.x || (x == than.x && i < than.i);
}
template <int mask> DEV best_of wave_better(const best_of &b) {
    const float x = wave_xor<mask>(b.x);
    const int i = wave_xor<mask>(b.i);
    return is_better(x, i, b) ? best_of{x, i} : b;
}
// Over a block; xs and is hold one a wave and are free again after the call.
DEV best_of block_best(best_of b, float *xs, int *is) {
    b = wave_better<16>(wave_better<8>(wave_better<4>(wave_better<2>(wave_better<1>(b)))));
    if (lane_index() == 0) {
        lput(xs + wave_index(), b.x);
        lput(is + wave_index(), b.i);
    }
    block_sync_lds();
    for (int w = 0; w < (int)n_threads() / 32; w++) {
        const float x = lget(xs + w);
        const int i = lget(is + w);
        if (is_better(x, i, b)) b = best_of{x, i};
    }
    block_sync_lds();
    return b;
}

// index[r] = the first k with x[k, r] the largest of row r. NaN never wins; a row of nothing else
// gives 0.
//
//   x  F32 [K, rows], any strides; index: I32 [rows]
//
// A block owns a row, a thread the quads t, t + threads, ... of it, four loads of 16 bytes under
// way.
// Geometry: a block a row, 32 to 1024 threads by the host's choice, 1024 for a vocabulary. LDS: 8
// bytes a wave. Bytes: x once.
KERNEL(argmax, rocq_k_argmax_args, 1024) {
    LDS(float, xs, 32);
    LDS(int, is, 32);
    if (a.x.ne[0] == 0) return;
    const uint32_t r = a.common.block0 + block_index();
    const char *row = row_of(a.x, r, 0, 0);
    const int n = a.x.ne[0];
    const bool wide = is_wide(a.x);
    best_of best = {-INFINITY, 0x7fffffff};
    float v[4][4];
    for (int base = 0; base < n; base += tile_size(4)) {
        load_tile(ROCQ_F32, wide, row, n, base, v);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j >= tile_quads(n, base)) break;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int k = tile_at(base, j) + e;
                if (k < n && is_better(v[j][e], k, best)) best = best_of{v[j][e], k};
            }
        }
    }
    best = block_best(best, xs, is);
    if (thread_index() == 0) gstore(a.index + r, best.i == 0x7fffffff ? 0 : best.i);
}

// -- sample --

enum {
    SAMPLE_BITS = 11,   // of a rank that one pass sorts by
    SAMPLE_BINS = 1 << SAMPLE_BITS,
    SAMPLE_LIST = 1024, // candidates that can be sorted: one a thread
    SAMPLE_QUADS = 4,   // of a tile of logits
    SAMPLE_TOP_K = 0, SAMPLE_TOP_P, SAMPLE_DRAW, // the steps, each of which finds a place in an order:
    SAMPLE_BY_RANK = 0, SAMPLE_BY_TOKEN,         // TOP_K and TOP_P by rank, DRAW by token
    SAMPLE_UNSORTED
};

struct sample_state {
    const float *logits; // a token that is no candidate has -inf or NaN
    bool wide;           // as in load_tile
    int n, width;        // tokens, and bits of one
    float top;           // largest logit
    uint64_t cut;        // candidates of a greater rank are out
    uint64_t tried;      // the cut for which a list was last tried
    float unit;          // of the fixed point sums
    float temperature, min_p;
};

struct sample_work { // LDS
    unsigned long long *mass;  // [SAMPLE_BINS]; else the list, and twice as many keys to sort it
    uint32_t *count;           // [SAMPLE_BINS]
    unsigned long long *total; // [32]: of waves
    uint32_t *listed;          // [1]
};

template <int mask> DEV uint64_t wave_xor64(uint64_t x) {
    return (uint64_t)wave_xor<mask>((uint32_t)x) |
           (uint64_t)wave_xor<mask>((uint32_t)(x >> 32)) << 32;
}
DEV uint64_t wave_sum64(uint64_t x) {
    x += wave_xor64<1>(x);
    x += wave_xor64<2>(x);
    x += wave_xor64<4>(x);
    x += wave_xor64<8>(x);
    return x + wave_xor64<16>(x);
}

// Sums of x over the lanes, and over the 1024 threads, before the own one; and over all.
template <int mask> DEV void wave_scan_step(uint64_t &before, uint64_t &sum) {
    const uint64_t other = wave_xor64<mask>(sum);
    if (thread_index() & mask) before += other;
    sum += other;
}
DEV uint64_t wave_scan(uint64_t x, uint64_t &total) {
    uint64_t before = 0;
    wave_scan_step<1>(before, x);
    wave_scan_step<2>(before, x);
    wave_scan_step<4>(before, x);
    wave_scan_step<8>(before, x);
    wave_scan_step<16>(before, x);
    total = x;
    return before;
}
DEV uint64_t block_scan(uint64_t x, unsigned long long *work, uint64_t &total) { // work: LDS [32]
    const uint64_t before = wave_scan(x, x);
    if (lane_index() == 0) lput(work + wave_index(), x);
    block_sync_lds();
    const uint64_t of_wave = lget(work + lane_index());
    block_sync_lds();
    total = wave_sum64(of_wave);
    return before + wave_sum64(lane_index() < wave_index() ? of_wave : 0);
}

// Keys in ascending order, one a thread of 1024; those from size (a power of two) on are no less than
// any before. work: LDS [2048]. A bitonic sort: runs of `run` keys, every other one descending, come
// from pairs of such runs of half the length; keys closer than a wave meet in registers.
DEV uint64_t sort_keep(uint64_t own, uint64_t other, int apart, int run) {
    const int t = (int)thread_index();
    const bool least = ((t & apart) == 0) == ((t & run) == 0);
    return (other < own) == least ? other : own;
}
DEV uint64_t block_sort(uint64_t key, int size, unsigned long long *work) {
    const int t = (int)thread_index();
    int side = 0; // two of them, so that a step needs one barrier
#pragma unroll 1
    for (int run = 2; run <= size; run *= 2) {
#pragma unroll 1
        for (int apart = run / 2; apart >= 32; apart /= 2, side ^= 1024) {
            lput(work + side + t, key);
            block_sync_lds();
            key = sort_keep(key, lget(work + side + (t ^ apart)), apart, run);
        }
        if (run > 16) key = sort_keep(key, wave_xor64<16>(key), 16, run);
        if (run > 8) key = sort_keep(key, wave_xor64<8>(key), 8, run);
        if (run > 4) key = sort_keep(key, wave_xor64<4>(key), 4, run);
        if (run > 2) key = sort_keep(key, wave_xor64<2>(key), 2, run);
        key = sort_keep(key, wave_xor64<1>(key), 1, run);
    }
    block_sync_lds();
    return key;
}

// The place in the order "higher logit first, then lower token", as a number; ~0 is none.
DEV uint64_t sample_rank(const sample_state &s, float logit, uint32_t token) {
    const uint32_t u = bits<uint32_t>(logit + 0.0f); // -0 is 0
    const uint32_t order = u & 0x80000000u ? u : u ^ 0x7fffffffu;
    return (uint64_t)order << s.width | token;
}
DEV float sample_logit(uint32_t order) {
    return bits<float>(order & 0x80000000u ? order : order ^ 0x7fffffffu);
}
// exp((logit - top) / temperature), 1 for the top itself even where that is infinite.
DEV float sample_weight(const sample_state &s, float logit, float temperature) {
    return logit == s.top ? 1.0f : exp_full((logit - s.top) / temperature);
}
// What a step adds up: candidates, or their weights in fixed point, whose sum no order changes.
DEV uint64_t sample_mass(const sample_state &s, int step, float logit) {
    if (step == SAMPLE_TOP_K) return 1;
    if (step == SAMPLE_DRAW && s.min_p > 0.0f && sample_weight(s, logit, 1.0f) < s.min_p) return 0;
    const float temperature = step == SAMPLE_DRAW ? s.temperature : 1.0f;
    return (uint64_t)(sample_weight(s, logit, temperature) * s.unit);
}
// The sum that a step looks for: at least top_p of all, or beyond the draw's part of it.
DEV uint64_t sample_target(const rocq_k_sample_args &a, int step, uint64_t sum) {
    if (step == SAMPLE_TOP_K) return (uint64_t)a.top_k;
    const double part = step == SAMPLE_TOP_P ? (double)a.top_p
                                             : (double)a.uniform_hi + (double)a.uniform_lo;
    const double at = part * (double)sum;
    const uint64_t target = step == SAMPLE_TOP_P ? (uint64_t)ceil(at) : (uint64_t)at + 1;
    return target < 1 ? 1 : target > sum ? sum : target;
}

DEV void sample_put(const rocq_k_sample_args &a, int token, float prob) {
    gstore(a.token, token);
    if (a.prob) gstore(a.prob, prob);
}

// Calls f(live, logit, token) for every candidate and for lanes without one, all lanes of a wave
// together: a quad a lane, one element after the other. Quads without a candidate in the wave are
// left out.
template <typename F> DEV void sample_each(const sample_state &s, F f) {
    const uint32_t last = (uint32_t)(s.cut >> s.width); // order of the cut
    const float least = last >= 0xff800000u ? -INFINITY : sample_logit(last);
    for (int base = 0; base < s.n; base += tile_size(SAMPLE_QUADS)) {
        float v[SAMPLE_QUADS][4] = {};
        load_tile(ROCQ_F32, s.wide, (const char *)s.logits, s.n, base, v);
#pragma unroll 1
        for (int j = 0; j < SAMPLE_QUADS && j < tile_quads(s.n, base); j++) {
            const int k = tile_at(base, j);
            const float best = fmaxf(fmaxf(v[0][0], v[0][1]), fmaxf(v[0][2], v[0][3]));
            if (wave_ballot(k < s.n && best >= least) != 0) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float x = v[0][e];
                    const bool live = k + e < s.n && x > -INFINITY &&
                                      sample_rank(s, x, (uint32_t)(k + e)) <= s.cut;
                    f(live, x, (uint32_t)(k + e));
                }
            }
#pragma unroll
            for (int i = 0; i + 1 < SAMPLE_QUADS; i++) {
#pragma unroll
                for (int e = 0; e < 4; e++) v[i][e] = v[i + 1][e];
            }
        }
    }
}

// The candidates, one a thread of the first n, in order of their keys. A key is the rank of a
// candidate, or its token with the bits of the logit below.
struct sample_list {
    uint64_t key; // ~0: none
    int n;        // more than SAMPLE_LIST: there is no list
    int order;    // that they are in, or SAMPLE_UNSORTED
};
DEV uint64_t sample_key(const sample_state &s, int order, float logit, uint32_t token) {
    if (order == SAMPLE_BY_RANK) return sample_rank(s, logit, token);
    return (uint64_t)token << 32 | bits<uint32_t>(logit);
}
DEV float sample_key_logit(const sample_state &s, int order, uint64_t key) {
    return order == SAMPLE_BY_RANK ? sample_logit((uint32_t)(key >> s.width))
                                   : bits<float>((uint32_t)key);
}
DEV uint32_t sample_key_token(const sample_state &s, int order, uint64_t key) {
    return order == SAMPLE_BY_RANK ? (uint32_t)key & ((1u << s.width) - 1u) : (uint32_t)(key >> 32);
}

// Tries to list the candidates up to the cut, with keys of the order, unsorted.
DEV void sample_collect(sample_state &s, const sample_work &work, int order, sample_list &list) {
    s.tried = s.cut;
    if (thread_index() == 0) lput(work.listed, 0u);
    block_sync_lds();
    sample_each(s, [&](bool live, float logit, uint32_t token) {
        const uint32_t all = wave_ballot(live);
        if (all == 0) return;
        const int lane = lane_index(), first = __ffs((int)all) - 1;
        uint32_t at = 0;
        if (lane == first) at = lds_take(work.listed, (uint32_t)__popc(all));
        at = wave_read(at, first) + (uint32_t)__popc(all & ((1u << lane) - 1u));
        if (live && at < SAMPLE_LIST) lput(work.mass + at, sample_key(s, order, logit, token));
    });
    block_sync_lds();
    list.n = (int)lget(work.listed);
    list.order = SAMPLE_UNSORTED;
    list.key = (int)thread_index() < list.n ? lget(work.mass + thread_index()) : ~0ull;
    block_sync_lds();
}

// Brings a list into an order: one that was collected for it, or was in the other.
DEV void sample_sort(const sample_state &s, const sample_work &work, int order, sample_list &list) {
    if (list.order == order) return;
    if (list.order != SAMPLE_UNSORTED && list.key != ~0ull) {
        list.key = sample_key(s, order, sample_key_logit(s, list.order, list.key),
                              sample_key_token(s, list.order, list.key));
    }
    int size = 32;
    while (size < list.n) size *= 2;
    list.key = block_sort(list.key, size, work.mass);
    list.order = order;
}

// Adds to a bin. Where all candidates of a wave fall into one, which crowded logits do, they go there
// in one addition.
DEV void sample_add(const sample_work &work, bool live, uint32_t bin, uint64_t x) {
    const uint32_t all = wave_ballot(live);
    if (all == 0) return;
    const int first = __ffs((int)all) - 1;
    const uint32_t common = wave_read(bin, first);
    if (wave_ballot(live && bin == common) == all) {
        x = wave_sum64(live ? x : 0);
        if (lane_index() == first) {
            lds_add(work.mass + bin, x);
            lds_add(work.count + bin, (uint32_t)__popc(all));
        }
    } else if (live) {
        lds_add(work.mass + bin, x);
        lds_add(work.count + bin, 1u);
    }
}

// The first lane at which front plus the lanes' x, added up in order, reaches target, or 32; front
// becomes the sum before that lane.
DEV int wave_reach(uint64_t x, uint64_t &front, uint64_t target) {
    uint64_t all;
    const uint64_t before = wave_scan(x, all);
    const uint32_t reached = wave_ballot(front + before + x >= target);
    if (reached == 0) return 32;
    const int lane = __ffs((int)reached) - 1;
    front += (uint64_t)wave_read((uint32_t)before, lane) |
             (uint64_t)wave_read((uint32_t)(before >> 32), lane) << 32;
    return lane;
}

// A search for the place in an order at which masses reach target: digit after digit of its number,
// from the top.
struct sample_search {
    uint64_t target, sum;   // 0: not known yet; sum: of the masses of all candidates
    uint64_t prefix, front; // the digits so far, and the masses before them
    int shift;              // bits that are left
};

// Finds the next digit, or nothing (false) where target is beyond all. count: candidates that share
// the digits so far.
DEV bool sample_digit(const rocq_k_sample_args &a, const sample_state &s, const sample_work &work,
                      int step, sample_search &search, uint32_t &count) {
    // Of tokens the last 7 bits are a digit of their own: the 128 that a wave reads at a time have all
    // others in common, and go to one bin.
    const int above = search.shift, rest = step == SAMPLE_DRAW && above > 7 ? 7 : 0;
    const int digit = above - rest < SAMPLE_BITS ? above - rest : SAMPLE_BITS, shift = above - digit;
    for (uint32_t b = thread_index(); b < SAMPLE_BINS; b += 1024) {
        lput(work.mass + b, 0ull);
        lput(work.count + b, 0u);
    }
    block_sync_lds();
    uint64_t quad = 0; // DRAW: a quad's masses go to one bin together
    sample_each(s, [&](bool live, float logit, uint32_t token) {
        const uint64_t rank = step == SAMPLE_DRAW ? token : sample_rank(s, logit, token);
        const uint32_t bin = (uint32_t)(rank >> shift) & ((1u << digit) - 1u);
        if (rank >> above != search.prefix) live = false;
        uint64_t own = live ? sample_mass(s, step, logit) : 0;
        if (rest > 0) {
            quad += own;
            if ((token & 3) != 3) return;
            own = quad;
            live = own != 0;
            quad = 0;
        }
        sample_add(work, live, bin, own);
    });
    block_sync_lds();
    // Two bins a thread, 64 a wave; then every wave searches alike.
    const unsigned long long *own = work.mass + 2 * thread_index();
    const uint64_t of_wave = wave_sum64(lget(own) + lget(own + 1));
    if (lane_index() == 0) lput(work.total + wave_index(), of_wave);
    block_sync_lds();
    const uint64_t totals = lget(work.total + lane_index());
    if (search.target == 0) {
        search.sum = wave_sum64(totals);
        search.target = sample_target(a, step, search.sum);
    }
    const int w = wave_reach(totals, search.front, search.target);
    if (w < 32) {
        const unsigned long long *pair = work.mass + 64 * w + 2 * lane_index();
        const int l = wave_reach(lget(pair) + lget(pair + 1), search.front, search.target);
        uint32_t bin = 64u * (uint32_t)w + 2u * (uint32_t)l;
        const uint64_t even = lget(work.mass + bin);
        if (search.front + even < search.target) {
            search.front += even;
            bin++;
        }
        count = lget(work.count + bin);
        search.prefix = search.prefix << digit | bin;
        search.shift = shift;
    }
    block_sync_lds();
    return w < 32;
}

// Ends a step on a list: of a filter's, what is behind the place drops out; of DRAW, the thread there
// has the token, and stores it.
DEV void sample_place(const rocq_k_sample_args &a, const sample_state &s, const sample_work &work,
                      int step, sample_search &search, sample_list &list) {
    const uint32_t t = thread_index();
    const float logit = sample_key_logit(s, list.order, list.key);
    const uint64_t own = list.key != ~0ull ? sample_mass(s, step, logit) : 0;
    if (t == 0) lput(work.listed, (uint32_t)list.n);
    const uint64_t before = block_scan(own, work.total, search.sum);
    if (search.target == 0) search.target = sample_target(a, step, search.sum);
    if (before < search.target && before + own >= search.target) { // one thread, or none
        lput(work.listed, t + 1);
        if (step == SAMPLE_DRAW) {
            sample_put(a, (int)sample_key_token(s, list.order, list.key),
                       (float)((double)own / (double)search.sum));
        }
    }
    block_sync_lds();
    list.n = (int)lget(work.listed);
    if ((int)t >= list.n) list.key = ~0ull;
    block_sync_lds();
}

// Does one digit of a step. True when that ends the step: the digits of DRAW's place are the token,
// and up to the place of a filter's the candidates stay.
DEV bool sample_narrow(const rocq_k_sample_args &a, sample_state &s, const sample_work &work, int step,
                       sample_search &search) {
    uint32_t count = 0;
    const bool there = sample_digit(a, s, work, step, search, count);
    if (step == SAMPLE_DRAW) {
        if (search.shift > 0) return false;
        const int token = (int)search.prefix;
        const uint64_t own = sample_mass(s, step, gload(s.logits + token));
        if (thread_index() == 0) sample_put(a, token, (float)((double)own / (double)search.sum));
        return true;
    }
    if (!there) return true;
    const uint64_t last = ((search.prefix + 1) << search.shift) - 1;
    s.cut = last < s.cut ? last : s.cut;
    return search.shift == 0 || count <= 1 ||
           (step == SAMPLE_TOP_K && search.front + count == search.target);
}

// What penalties and `allowed` leave of the logits. Ends with a barrier where it wrote them to work.
DEV const float *sample_penalize(const rocq_k_sample_args &a) {
    const int t = (int)thread_index(), n = a.n_vocab;
    uint32_t *counts = (uint32_t *)a.work;
    if (!a.recent && !a.allowed) return a.logits;
    if (a.recent) {
        for (int i = t; i < n; i += 1024) gstore(counts + i, 0u);
        fence_device();
        block_sync();
        for (int i = t; i < a.n_recent; i += 1024) {
            const uint32_t id = (uint32_t)gload(a.recent + i);
            if (id < (uint32_t)n) atomic_inc(counts + id);
            else atomic_or(a.common.status, ROCQ_K_BAD_ID);
        }
        fence_device();
        block_sync();
    }
    const float repeat = a.repeat_penalty > 0.0f ? a.repeat_penalty : 1.0f;
    for (int base = t; base < n; base += 4096) {
        float v[4];
        uint32_t c[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int i = base + 1024 * j, at = i < n ? i : base; // a word of the thread's own
            v[j] = gload(a.logits + at);
            c[j] = a.recent ? gload(counts + at) : 0;
            if (a.allowed && !((uint32_t)gload(a.allowed + at / 32) >> (at & 31) & 1u)) {
                v[j] = -INFINITY;
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (base + 1024 * j >= n) continue;
            if (c[j] > 0) {
                v[j] = v[j] > 0.0f ? v[j] / repeat : v[j] * repeat;
                v[j] -= (float)c[j] * a.frequency_penalty + a.presence_penalty;
            }
            gstore(a.work + base + 1024 * j, v[j]);
        }
    }
    fence_device();
    block_sync();
    return a.work;
}

// The best of the quads that a thread reads.
DEV best_of sample_own_best(const float *logits, bool wide, int n) {
    best_of own = {-INFINITY, 0x7fffffff};
    for (int base = 0; base < n; base += tile_size(SAMPLE_QUADS)) {
        float v[SAMPLE_QUADS][4];
        load_tile(ROCQ_F32, wide, (const char *)logits, n, base, v);
#pragma unroll
        for (int j = 0; j < SAMPLE_QUADS; j++) {
            if (j >= tile_quads(n, base)) break;
            const bool full = is_full(n, base, j);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int k = tile_at(base, j) + e;
                if (v[j][e] > own.x && (full || k < n)) own = best_of{v[j][e], k}; // first of equals
            }
        }
    }
    return own;
}

// Draws a token from logits [n_vocab], all of rocq_sample_params: tokens outside `allowed` drop
// out, penalties by the counts in recent (an id out of range is left out and sets a bit of the
// status), then, unless temperature is 0 and the best token stands, top_k, top_p and min_p over the
// softmax of what is left, temperature and the draw. Writes the token, and its probability where
// asked for; with no token left -1 and a bit of the status.
//
// Each filter keeps a front part of the order "higher logit first, then lower token", and the draw
// walks in token order, so each is the same task: find where masses added up in an order reach a
// target. Masses are fixed point integers, in units of 2^-(62 - bits of a token), so sums depend on
// no order and the token on nothing but the arguments.
// Up to 1024 candidates are sorted, one a thread, and their masses added up along the threads. To
// come to so few: the k-th best of the threads' own best ones has k candidates up to it or more, and
// for a usual top_k not many more. Otherwise places in the order are numbers, and a radix search
// finds the number's digits from the top, 2048 bins a pass over work, until what is left is few.
//
// Geometry: one block of 1024 threads, a thread the quads t, t + 1024, ... LDS 25 KB. work: n_vocab
// floats, 16-byte aligned, used with recent or allowed; while recent is counted they are the counts.
// Bytes: logits once, and from the second-level cache once more for a usual top_k, else twice for
// every digit.
KERNEL(sample, rocq_k_sample_args, 1024) {
    LDS(unsigned long long, mass, SAMPLE_BINS);
    LDS(uint32_t, bins, SAMPLE_BINS);
    LDS(unsigned long long, total, 32);
    LDS(uint32_t, listed, 1);
    LDS(float, xs, 32);
    LDS(int, is, 32);
    if (a.n_vocab == 0) return;
    const int t = (int)thread_index(), n = a.n_vocab;
    const float *logits = sample_penalize(a);
    const bool wide = (n & 3) == 0 && ((uintptr_t)logits & 15u) == 0;
    const best_of own = sample_own_best(logits, wide, n), best = block_best(own, xs, is);
    if (best.i == 0x7fffffff || !(a.temperature > 0.0f)) {
        const bool none = best.i == 0x7fffffff;
        if (t == 0 && none) atomic_or(a.common.status, ROCQ_K_NO_TOKEN);
        if (t == 0) sample_put(a, none ? -1 : best.i, none ? 0.0f : 1.0f);
        return;
    }

    const int width = n > 1 ? 32 - __clz(n - 1) : 1;
    const float unit = bits<float>((uint32_t)(62 - width + 127) << 23);
    sample_state s = {logits, wide, n, width, best.x, ~0ull, ~0ull, unit, a.temperature, a.min_p};
    const sample_work work = {mass, bins, total, listed};
    const bool has_k = a.top_k > 0 && a.top_k < n, has_p = a.top_p > 0.0f && a.top_p < 1.0f;
    sample_list list = {~0ull, SAMPLE_LIST + 1, SAMPLE_UNSORTED};
    if (n <= SAMPLE_LIST) { // all tokens, as they lie
        const float x = t < n ? gload(logits + t) : -INFINITY;
        if (x > -INFINITY) list.key = sample_key(s, SAMPLE_BY_TOKEN, x, (uint32_t)t);
        list.n = n;
        list.order = SAMPLE_BY_TOKEN;
    } else if (has_k && a.top_k <= SAMPLE_LIST) { // a first cut from the threads' own best
        uint64_t key = own.i == 0x7fffffff ? ~0ull : sample_rank(s, own.x, (uint32_t)own.i);
        key = block_sort(key, SAMPLE_LIST, mass);
        if (t == a.top_k - 1) lput(total, key);
        block_sync_lds();
        s.cut = lget(total);
        block_sync_lds();
    }
    for (int step = SAMPLE_TOP_K; step <= SAMPLE_DRAW; step++) {
        if ((step == SAMPLE_TOP_K && !has_k) || (step == SAMPLE_TOP_P && !has_p)) continue;
        const int order = step == SAMPLE_DRAW ? SAMPLE_BY_TOKEN : SAMPLE_BY_RANK;
        sample_search search = {0, 0, 0, 0, step == SAMPLE_DRAW ? width : 32 + width};
        do { // digits, until the step is done or those left are few enough for a list
            if (list.n > SAMPLE_LIST && s.cut != s.tried) sample_collect(s, work, order, list);
            if (list.n <= SAMPLE_LIST) {
                sample_sort(s, work, order, list);
                sample_place(a, s, work, step, search, list);
                break;
            }
        } while (!sample_narrow(a, s, work, step, search));
    }
}

// ---------------------------------------------------------------------------------------------
// >>entry
// ---------------------------------------------------------------------------------------------

// Shows that a device computes what this file means it to, before it is trusted with anything:
//   out[0] target_id              out[1] lanes of a wave      out[2] ROCQ_VERSION
//   out[3] sizes of all args structs, summed: rocq.h and this file agree about them
//   out[4] sum over lanes of (lane + 1)^2                       crosses a wave by every step
//   out[5] sum over lanes of dot4((1, -1, -128, 127), (3, -5, 7, -9), lane)
//   out[6] sum over m, n of (16 m + n + 1) C[m][n] for C = A B on the matrix unit in F16, with
//          A[m][k] = (3 m + 5 k) % 7 - 3 and B[n][k] = (2 n + 3 k) % 5 - 2: every number is exact
//   out[7] the same in int8
// One wave; 2 KiB of LDS, tiles of 16 rows (24 halves or 16 bytes from row to row).
DEV int selftest_a(int m, int k) { return (3 * m + 5 * k) % 7 - 3; }
DEV int selftest_b(int n, int k) { return (2 * n + 3 * k) % 5 - 2; }

DEV uint32_t selftest_lanes() {
#if defined(ROCQ_SIMT) || defined(__CUDACC__)
    return ROCQ_K_WAVE;
#else
    return (uint32_t)__builtin_amdgcn_wavefrontsize();
#endif
}

KERNEL(selftest, rocq_k_selftest_args, 32) {
    LDS(f16, halves, 2 * 16 * 24);
    LDS(int8_t, codes, 2 * 16 * 16);
    const int lane = lane_index();
    for (int i = lane; i < 256; i += 32) {
        const int row = i / 16, k = i % 16;
        lput(halves + row * 24 + k, (f16)(float)selftest_a(row, k));
        lput(halves + (16 + row) * 24 + k, (f16)(float)selftest_b(row, k));
        lput(codes + row * 16 + k, (int8_t)selftest_a(row, k));
        lput(codes + (16 + row) * 16 + k, (int8_t)selftest_b(row, k));
    }
    block_sync_lds();
    frag_c c = {{0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}};
    frag_ci ci = {{0, 0, 0, 0, 0, 0, 0, 0}};
    wmma(c, frag_load(halves, 24), frag_load(halves + 16 * 24, 24));
    wmma_i8(ci, frag_i8_load(codes, 16), frag_i8_load(codes + 16 * 16, 16));
    int sum = 0, sum_i8 = 0;
    for (int v = 0; v < 8; v++) {
        const int weight = 16 * frag_row(v) + frag_col(v) + 1;
        sum += weight * (int)c.v[v];
        sum_i8 += weight * ci.v[v];
    }
    const int squares = wave_sum((lane + 1) * (lane + 1));
    const int dots = wave_sum(dot4(0x7f80ff01, (int)0xf707fb03, lane));
    sum = wave_sum(sum);
    sum_i8 = wave_sum(sum_i8);
    uint32_t sizes = 0;
#define ROCQ_X(name, args, threads) sizes += (uint32_t)sizeof(args);
    ROCQ_KERNELS(ROCQ_X)
#undef ROCQ_X
    if (lane != 0 || !a.out) return;
    gstore(a.out + 0, (uint32_t)target_id());
    gstore(a.out + 1, selftest_lanes());
    gstore(a.out + 2, (uint32_t)ROCQ_VERSION);
    gstore(a.out + 3, sizes);
    gstore(a.out + 4, (uint32_t)squares);
    gstore(a.out + 5, (uint32_t)dots);
    gstore(a.out + 6, (uint32_t)sum);
    gstore(a.out + 7, (uint32_t)sum_i8);
}

// What a program that is linked with this file has in place of libamdhip64 and a code object: the
// runtime's functions as struct rocq_hip wants them, and the kernels' host stubs. Code objects do not
// have it (--genco compiles no host code), nor does the tests' stand-in, which brings its own.
#if !defined(ROCQ_SIMT) && !defined(__HIP_DEVICE_COMPILE__) && !defined(__CUDA_ARCH__)

#if defined(__CUDACC__)
#define RUNTIME(name) cuda##name
#define ENTRY_MODULE(function) nullptr // there is no code object to load
#else
#define RUNTIME(name) hip##name
#define ENTRY_MODULE(function) function
#endif
#define ENTRY_REQUIRED(function) function
#define ENTRY_OPTIONAL(function) function

// For each line of ROCQ_HIP_FUNCTIONS a function entry_FIELD that calls the runtime's. struct rocq_hip
// has void * for streams, events and graphs and int for enumerations, so every argument is passed as
// an entry_argument, which converts to whatever type the runtime's parameter has. These functions are
// templates only so that the parameter lists need not be repeated here: the table below makes each of
// them with the parameters of its field. Where there is also an ordinary function of the same name,
// the table takes that one, and the template is never made.
namespace {
template <typename From> struct entry_argument {
    From value;
    template <typename To> operator To() const { return (To)value; }
};
} // namespace
#define ROCQ_X(need, field, symbol, parameters)                              \
    template <typename... From> static int entry_##field(From... from) {     \
        return (int)RUNTIME(symbol)(entry_argument<From>{from}...);          \
    }
ROCQ_HIP_FUNCTIONS(ROCQ_X)
#undef ROCQ_X

#if defined(__CUDACC__) // what CUDA has under another name or in another form, or not at all
static int entry_device_attribute(int *value, int attribute, int device) {
    cudaDeviceAttr attr;
    switch (attribute) {
    case ROCQ_HIP_CLOCK_KHZ: attr = cudaDevAttrClockRate; break;
    case ROCQ_HIP_INTEGRATED: attr = cudaDevAttrIntegrated; break;
    case ROCQ_HIP_MEMORY_BITS: attr = cudaDevAttrGlobalMemoryBusWidth; break;
    case ROCQ_HIP_MEMORY_KHZ: attr = cudaDevAttrMemoryClockRate; break;
    case ROCQ_HIP_UNITS: attr = cudaDevAttrMultiProcessorCount; break;
    default: return (int)cudaErrorInvalidValue;
    }
    return (int)cudaDeviceGetAttribute(value, attr, device);
}
static int entry_device_name(char *name, int size, int device) {
    cudaDeviceProp properties;
    const cudaError_t error = cudaGetDeviceProperties(&properties, device);
    for (int i = 0; error == cudaSuccess && i < size; i++) {
        name[i] = i + 1 < size ? properties.name[i] : '\0';
        if (name[i] == '\0') break;
    }
    return (int)error;
}
static int entry_device_memory(size_t *bytes, int device) {
    cudaDeviceProp properties;
    const cudaError_t error = cudaGetDeviceProperties(&properties, device);
    if (error == cudaSuccess) *bytes = properties.totalGlobalMem;
    return (int)error;
}
static int entry_host_alloc(void **ptr, size_t size, unsigned flags) {
    return (int)cudaHostAlloc(ptr, size, flags);
}
static int entry_host_free(void *ptr) { return (int)cudaFreeHost(ptr); }
static int entry_graph_instantiate(void **exec, void *graph, void **, char *, size_t) {
    return (int)cudaGraphInstantiate((cudaGraphExec_t *)exec, (cudaGraph_t)graph, 0);
}
static int entry_stream_create_units(void **, uint32_t, const uint32_t *) {
    return (int)cudaErrorNotSupported;
}
#elif HIP_VERSION < 60000000 // whether the headers declare hipGraphUpload differs
static int entry_graph_upload(void *, void *) { return 0; }
#endif

static const char *entry_error_name(int error) {
    return RUNTIME(GetErrorName)((RUNTIME(Error_t))error);
}
static int entry_launch(const void *stub, unsigned grid_x, unsigned grid_z, unsigned threads,
                        unsigned lds, void *args, void *stream) {
    void *list[1] = {args};
    return (int)RUNTIME(LaunchKernel)(stub, dim3(grid_x, 1, grid_z), dim3(threads), list, lds,
                                      (RUNTIME(Stream_t))stream);
}
static const void *const entry_stubs[] = {
#define ROCQ_X(name, args, threads) (const void *)&rocq_k_##name,
    ROCQ_KERNELS(ROCQ_X)
#undef ROCQ_X
};

extern "C" const rocq_hip *rocq_hip_linked(void) {
    static const rocq_hip table = {
#define ROCQ_X(need, field, symbol, parameters) ENTRY_##need(entry_##field),
        ROCQ_HIP_FUNCTIONS(ROCQ_X)
#undef ROCQ_X
        entry_error_name, entry_launch, entry_stubs, ROCQ_K_COUNT, ROCQ_VERSION,
    };
    return &table;
}

#endif
