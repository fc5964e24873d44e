/* rocq_kernels.hip - the GPU kernels of rocq.h, for AMD RDNA3 and RDNA3.5

   Device code only: which kernel runs, and on what grid, is decided in rocq.h (>>hip_launch).

   As a code object that a program loads when it runs (examples/build-kernels does this):

       hipcc -O3 --genco -mcode-object-version=5 -nogpuinc -nogpulib \
           --offload-arch=gfx1100,gfx1101,gfx1102,gfx1103,gfx1150,gfx1151,gfx1152 \
           rocq_kernels.hip -o rocq_kernels.co

   Linked into a program, which then needs nothing at run time but the HIP runtime:

       hipcc -O3 --offload-arch=gfx1100 -x hip app.c rocq_kernels.hip -o app

   Both with clang 19 or newer, which ROCm has from 6.4 on. gfx1153 is unknown to clang 19, and can
   be added to the list for a newer one.

   Licence: MIT or public domain, at your choice; see the end of rocq.h.

   CONTENTS (search for the mark)

       >>platform    what differs between compilers: gfx11, NVIDIA (tests), the CPU (tests)
       >>wave        reductions over a wave and a block
       >>memory      reading and writing tensors
       >>blocks      decoders of all formats, for the planar and the GGUF layout
       >>quantize    encoders of Q8_0 and Q4_0; repack
       >>matvec      decode: w x for up to 8 columns; the products and the router of experts
       >>matmul      prompts: tiles on the matrix unit
       >>attention   decode and prefill
       >>ops         norms, rope, maps, softmax, gather, argmax, sample, shortconv, delta_net;
                     copies and comparisons of ranges (>>warm in rocq.h)
       >>pictures    convolution and its norms, resize, pixels
       >>training    the backward of the ops, cross-entropy, AdamW
       >>entry       the self-test, and the table of kernels for programs that link this file

   Parts of matmul, attention, pictures and training that only chips with more than 64 KiB of LDS a
   block run (NVIDIA's Hopper) are headed by [large LDS] and where RDNA3's code goes on.

   CONVENTIONS
   A wave is 32 lanes. Blocks are one-dimensional. Every kernel takes one args struct by value and
   adds args.common.block0 to blockIdx.x, so that the host can cut a long grid into short launches.
   Global memory is read and written with gload and gstore, LDS with lget and lput: on the GPU they
   are plain accesses, in the tests they check bounds, uninitialised memory and races. Sums are in
   F32 and in a fixed order. A operands are rows of M, B operands columns of N, both with K
   innermost: C[m][n] = sum A[m][k] B[n][k].

   WORDS
   unit      32 neighbouring weights of a row, the smallest number that all block formats share
   vector    16 bytes of a row of a plain format (F32, F16, BF16)
   quad      4 neighbouring elements of a row
   product   one of the products w x of a matvec launch (rocq_k_matvec_product)
   split     one of the shares of K, or of the KV positions, that several blocks take of one result
   uniform   equal in all lanes of a wave, so that the compiler can keep it in a scalar register
   live      of a lane or wave: it has something to compute. Lanes that are not live go along where
             a barrier or an exchange between lanes needs all of them
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
//   LDS(type, name, n)       an LDS array, 16-byte aligned, in a device function or kernel;
//                            LDS_GRANTED one that the launch has to ask for, aligned to 1024 bytes;
//                            LDS_LARGE one of over 48 KB, which NVIDIA alone wants asked for
//   f16 f16x2 u32x2 u32x4    a half, and vectors with .x .y .z .w
//   gload gstore lget lput   see above; T is a scalar or one of the vectors. gload<ONCE> is for
//                            data such as a step's weights, of which nothing will be in the caches
//                            any more when they are next read. On NVIDIA they are the first to be
//                            evicted from L2, so that code and KV, which the next launches read,
//                            stay there; on gfx11 it is a gload like the others
//   block_sync               barrier of the block: what its threads stored before it, in LDS and in
//                            global memory, is visible to all of them after it
//   block_sync_lds           barrier of the block that orders LDS only. Loads and stores of global
//                            memory stay in flight across it, so global data that one wave stores
//                            before it must not be read or written by another wave after it. Data
//                            that one wave loads before it must not be written by another after it,
//                            unless the first wave has used before the barrier what it loaded
//   group_sync_lds(group)    block_sync_lds for the four waves of a group, or for more of them
//   wave_sync                what lanes of the wave wrote to LDS before it is visible to the wave's
//                            other lanes after it
//   block_index, n_threads   blockIdx.x, blockDim.x
//   wave_xor<mask>(x)        x of lane ^ mask, for the masks 1 2 4 8 16
//   wave_read(x, lane)       x of that lane, which is uniform, for all lanes
//   wave_ballot(bool)        bit l is lane l's
//   dot4(a, b, c)            c + sum of four int8 products
//   dot2(a, b, c)            c + sum of two half products, in F32
//   fma2(a, b, c)            on f16x2
//   byte_perm(hi, lo, sel)   byte i of the result is byte (sel >> 8 i) & 7 of lo (0-3) and hi
//                            (4-7); the other bits of sel have to be 0
//   halves_times(x, n)       each 16-bit half of x times n; the products have to fit their halves
//   byte_levels(table, n)    looks bytes up in a table of 16: byte i of x is byte (n >> 8 i) & 15
//                            of the table, byte i of y likewise for n >> 4
//   e2m1_dot(n, low, high, plus, minus)     adds two dot products to plus - minus: the E2M1 levels
//                            of n's low nibbles by the bytes of low, and those of its high nibbles
//                            by high's. e2m1_order(low, high) comes first. Only if E2M1_SIGNS is 1
//   exp2_fast log2_fast rcp_fast     to about 1 ulp, denormals may be 0
//   copy_async(to, from, live)  copies a vector from global memory to LDS, or zeros if not live;
//                            copy_async_part its first bytes, and zeros behind them. copies_close
//                            ends a group of copies; after copies_wait<n> all of the thread's
//                            groups but the last n are done. COPIES_ASYNC: they take no registers
//                            meanwhile; else a copy is done at once
//   fence_device             release and acquire fence at device scope
//   atomic_inc(p)            relaxed; returns the old value
//   atomic_add(p, n)         relaxed
//   atomic_look(p)           loads what others add; relaxed
//   lds_add(p, n), lds_take(p, n)    atomic, in LDS; lds_take returns the old value
//   frag, frag_c, wmma       16x16x16 on the matrix unit, see there
//   wmma_vectors             wmma of vectors that lanes read from memory, see there
//   turn_take(g) turn_pass(g)  group g of four waves waits until another has passed it the turn;
//                            all threads of a group call them. They order no memory
//   launch_begin launch_next  see there; nothing but on Hopper
//   WMMA_LDS, wmma_lds       whether four waves can multiply straight from LDS, see there
//   WMMA_TILES, wmma_tile    and whole tiles from LDS, as in the kernels named _lds
//   target_id                0x1100 and so on, 0 where not gfx

#include <stdint.h>

// A parameter of type as_given<T> takes no part in template argument deduction: T follows from the
// pointer alone, and the value is converted to it.
template <typename T> struct as_given_type { typedef T type; };
template <typename T> using as_given = typename as_given_type<T>::type;

enum reads { AGAIN, ONCE }; // of gload

#if defined(ROCQ_SIMT) // the CPU stand-in of the tests

#include ROCQ_SIMT

#else

#if defined(__CUDACC__)

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define DEV __attribute__((unused)) static __device__ __forceinline__
// On Hopper a launch may begin before the one ahead of it on the stream has ended (programmatic
// dependent launch, see entry_launch): as no kernel says that it may begin earlier, once all blocks
// of that one have left. Its blocks wait here until what that launch stored can be seen. So most of
// the time between two launches is hidden, and no kernel needs to know.
DEV void launch_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The exception is a kernel declared by KERNEL_AHEAD: it waits by itself, and may do before what
// does not depend on the launch ahead of it. launch_next lets the launch behind it begin, whose
// blocks then wait for this one's end, while the caller's block still runs. All threads call both,
// launch_next after launch_begin: so of the launches ahead of a block only one can be unfinished.
DEV void launch_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#define KERNEL_BOUNDS(name, args, ...)                                                          \
    DEV void rocq_body_##name(const args &a);                                                   \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__)                                   \
        rocq_k_##name(const __grid_constant__ args a) {                                         \
        launch_begin();                                                                         \
        rocq_body_##name(a);                                                                    \
    }                                                                                           \
    DEV void rocq_body_##name(const args &a)
#define KERNEL(name, args, threads) KERNEL_BOUNDS(name, args, threads)
#define KERNEL_WAVES(name, args, threads, waves) \
    KERNEL_BOUNDS(name, args, threads, (waves)*128 / (threads))
#define KERNEL_AHEAD(name, args, threads, waves)                                                \
    DEV void rocq_body_##name(const args &a);                                                   \
    extern "C" __global__ void __launch_bounds__(threads, (waves)*128 / (threads))              \
        rocq_k_##name(const __grid_constant__ args a) {                                         \
        rocq_body_##name(a);                                                                    \
    }                                                                                           \
    DEV void rocq_body_##name(const args &a)
#define CONSTANT static __device__ constexpr
#define LDS(type, name, n) __shared__ __attribute__((aligned(16))) type name[n]
#define LDS_GRANTED(type, name, n) extern __shared__ __attribute__((aligned(1024))) type name[]
#define LDS_LARGE(type, name, n) LDS_GRANTED(type, name, n)

DEV void block_sync() { __syncthreads(); }
DEV void block_sync_lds() { __syncthreads(); }
DEV void group_sync_lds(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}
DEV void turn_take(int group) {
    asm volatile("bar.sync %0, 256;" ::"r"(group + 8) : "memory");
}
DEV void turn_pass(int group) {
    asm volatile("bar.arrive %0, 256;" ::"r"(group + 8) : "memory");
}
DEV uint32_t thread_index() { return threadIdx.x; }
DEV uint32_t n_threads() { return blockDim.x; }
DEV uint32_t block_index() { return blockIdx.x; }
DEV uint32_t block_index_z() { return blockIdx.z; }
DEV void fence_device() { __threadfence(); }
DEV uint32_t atomic_inc(uint32_t *p) { return atomicAdd(p, 1u); }
DEV uint32_t atomic_ticket(uint32_t *p) { // as atomic_inc, and a fence
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(p) : "memory");
    return old;
}
DEV void atomic_add(uint32_t *p, uint32_t n) { atomicAdd(p, n); }
DEV uint32_t atomic_look(const uint32_t *p) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
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

enum { COPIES_ASYNC = 1 };
DEV void copy_async_part(u32x4 *to, const u32x4 *from, int bytes) { // to LDS
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes)
                 : "memory");
}
// By way of L1 (.ca): blocks of a unit that read the same weights take them from L2 only once.
DEV void copy_async(u32x4 *to, const u32x4 *from, bool live) {
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from),
                 "r"(live ? 16 : 0) : "memory");
}
DEV void copies_close() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEV void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

DEV u32x4 make4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return make_uint4(x, y, z, w); }
DEV u32x2 make2(uint32_t x, uint32_t y) { return make_uint2(x, y); }
DEV f16x2 pair(f16 x, f16 y) { return __halves2half2(x, y); }
DEV f16x2 pair_floats(float x, float y) { return __floats2half2_rn(x, y); }
template <reads R = AGAIN, typename T> DEV T gload(const T *p) {
    if constexpr (R == ONCE) return __ldcs(p);
    else return *p;
}
template <typename T> DEV void gstore(T *p, as_given<T> v) { *p = v; }
template <int mask, typename T> DEV T wave_xor(T x) {
    return __shfl_xor_sync(0xffffffffu, x, mask);
}
template <typename T> DEV T wave_read(T x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEV uint32_t wave_ballot(bool x) { return __ballot_sync(0xffffffffu, x); }
DEV int dot4(int a, int b, int c) { return __dp4a(a, b, c); }
DEV f16x2 fma2(f16x2 a, f16x2 b, f16x2 c) { return __hfma2(a, b, c); }
DEV uint32_t halves_times(uint32_t x, uint32_t n) { return x * n; }
DEV float dot2(f16x2 a, f16x2 b, float c) {
    const float2 x = __half22float2(a), y = __half22float2(b);
    return fmaf(x.x, y.x, fmaf(x.y, y.y, c));
}
DEV uint32_t byte_perm(uint32_t hi, uint32_t lo, uint32_t sel) { // __byte_perm: a nibble an index
    const uint32_t s = sel | sel >> 4;
    return __byte_perm(lo, hi, (s & 0xff) | (s >> 8 & 0xff00));
}
// The instruction of __byte_perm, which clears bit 3 of each of the four selectors before it.
DEV uint32_t byte_select(uint32_t x, uint32_t y, uint32_t selectors) {
    uint32_t v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(x), "r"(y), "r"(selectors));
    return v;
}
DEV u32x2 byte_levels(u32x4 table, uint32_t n) { // n's nibbles are selectors as they lie
    const uint32_t index = n & 0x77777777u, half = (n >> 1 & 0x44444444u) | 0x32103210u;
    uint32_t v[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t low = byte_select(table.x, table.y, index >> 16 * i),
                       high = byte_select(table.z, table.w, index >> 16 * i);
        v[i] = byte_select(low, high, half >> 16 * i);
    }
    return make_uint2(__byte_perm(v[0], v[1], 0x6420), __byte_perm(v[0], v[1], 0x7531));
}
DEV void e2m1_order(uint32_t &low, uint32_t &high) { // bytes in the order of the nibbles
    const uint32_t x = low;
    low = __byte_perm(x, high, 0x5140);
    high = __byte_perm(x, high, 0x7362);
}
enum { E2M1_SIGNS = 1 };
// A selector's bit 3, which is a code's sign, makes 0 of a byte without a sign: so the instruction
// finds the levels of one sign.
DEV void e2m1_dot(uint32_t n, uint32_t low, uint32_t high, int &plus, int &minus) {
    const uint32_t x = 0x03020100, y = 0x0c080604, m = n ^ 0x88888888u;
    plus = dot4((int)byte_select(x, y, n), (int)low, plus);
    plus = dot4((int)byte_select(x, y, n >> 16), (int)high, plus);
    minus = dot4((int)byte_select(x, y, m), (int)low, minus);
    minus = dot4((int)byte_select(x, y, m >> 16), (int)high, minus);
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

// Fragments: what one lane holds of a matrix of 16 by 16. frag is an operand, with K innermost;
// frag_c and frag_ci are results in F32 and I32, of which the lane's element v is at row
// frag_row(v) and column frag_col(v). The 8 elements lie in FRAG_SLOTS different columns, which are
// numbered: element v is in the column of slot frag_slot(v). With g = lane / 4 and t = lane % 4 as
// in the PTX manual's pictures, an operand's words are
// (row g, k 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8).
struct frag { uint32_t w[4]; };
struct frag_i8 { uint32_t w[2]; };
struct frag_c { float v[8]; };
struct frag_ci { int v[8]; };
enum { FRAG_SLOTS = 4 };
DEV int frag_row(int v) { return (int)(threadIdx.x & 31) / 4 + 8 * (v >> 1 & 1); }
DEV int frag_col(int v) { return 2 * (int)(threadIdx.x & 3) + (v & 1) + 8 * (v >> 2); }
DEV constexpr int frag_slot(int v) { return (v & 1) + 2 * (v >> 2); }
// frag_slot_col: the column of a slot. frag_col_max, _sum: over all 16 rows of it, from x over the
// rows that the lane holds.
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
// Slots of rows: the lane's elements lie in FRAG_ROW_SLOTS rows, element v in slot
// frag_row_slot(v).
enum { FRAG_ROW_SLOTS = 2 };
DEV constexpr int frag_row_slot(int v) { return v >> 1 & 1; }
DEV int frag_slot_row(int s) { return (int)(threadIdx.x & 31) / 4 + 8 * s; }
DEV float frag_row_max(float x) {
    x = fmaxf(x, wave_xor<1>(x));
    return fmaxf(x, wave_xor<2>(x));
}
DEV float frag_row_sum(float x) {
    x += wave_xor<1>(x);
    return x + wave_xor<2>(x);
}
// Stores a result in F16. at(row, col) is the place of an element; those of columns 2 i and 2 i + 1
// follow each other.
template <typename F> DEV void frag_put_halves(const frag_c &c, F at) {
    for (int v = 0; v < 8; v += 2)
        *(f16x2 *)at(frag_row(v), frag_col(v)) = pair_floats(c.v[v], c.v[v + 1]);
}
// Stores a result in F32 to global memory. at(row slot, col) is the place of an element, NULL if it
// is to be left out; those of columns 2 i and 2 i + 1 are treated alike and follow each other.
template <typename F> DEV void frag_put_floats(const frag_c &c, F at) {
    for (int v = 0; v < 8; v += 2) {
        float *const to = at(frag_row_slot(v), frag_col(v));
        if (to) *(float2 *)to = make_float2(c.v[v], c.v[v + 1]);
    }
}

// Operand from tile[row * stride + k], whose rows 0-15 are those of M (A) or N (B) and are aligned
// to 16 bytes.
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
// frag_load for a B operand. Its two instructions take words 0 and 2, then 1 and 3, so they are
// loaded in the order 0 2 1 3.
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
// An operand from a tile whose K is cut into chunks of 8, each a column of rows of 16 bytes:
// element (row, k) is at tile[k / 8 * chunk + row / 8 * eight + row % 8 * 8 + k % 8]. The loads
// take tile + frag_lane(chunk, eight), or frag_lane_b.
DEV int frag_lane(int chunk, int eight) {
    const int lane = (int)(threadIdx.x & 31);
    return lane / 16 * chunk + (lane / 8 & 1) * eight + (lane & 7) * 8;
}
DEV int frag_lane_b(int chunk, int eight) {
    const int lane = (int)(threadIdx.x & 31);
    return (lane / 8 & 1) * chunk + lane / 16 * eight + (lane & 7) * 8;
}
DEV frag frag_load_lane(const f16 *tile, int) {
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(tile);
    frag f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.w[0]), "=r"(f.w[1]), "=r"(f.w[2]), "=r"(f.w[3])
                 : "r"(at) : "memory");
    return f;
}
DEV frag_b frag_load_lane_b(const f16 *tile, int) {
    const frag f = frag_load_lane(tile, 0);
    return {{f.w[0], f.w[1], f.w[2], f.w[3]}};
}
DEV frag frag_load_global(const f16 *tile, int64_t stride) {
    return frag_words([=](int row, int k) { return *(const uint32_t *)(tile + row * stride + k); });
}
// A fragment from global memory, laid out as for frag_load_lane with chunk 128 and eight 64.
DEV frag frag_load_image(const f16 *image) {
    return frag_words([=](int row, int k) {
        return *(const uint32_t *)(image + k / 8 * 128 + row * 8 + k % 8);
    });
}
DEV frag_i8 frag_i8_load(const int8_t *tile, int stride) { // LDS
    const int g = (int)(threadIdx.x & 31) / 4, t = 4 * (int)(threadIdx.x & 3);
    frag_i8 f;
    f.w[0] = *(const uint32_t *)(tile + g * stride + t);
    f.w[1] = *(const uint32_t *)(tile + (g + 8) * stride + t);
    return f;
}
// frag_from_c makes a B operand of a result, rounded to F16, for a further product that sums over
// the rows of the result. A permutation of K does not change such a sum if both operands have it,
// so the operand may have its k in whatever order costs least: k is row frag_k_row(k) of the
// result. Within an aligned group of four k the rows are FRAG_K_STEP apart.
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
// A result of 8 columns only: frag_c8 has values 0 to 3 of frag_c, and frag_b8 has rows 0-7.
// frag_turned is an A operand from a tile that lies in LDS the other way round, k after k, in the
// order of frag_from_c: element (row, k) is tile[frag_k_row(k) * stride + row].
enum { FRAG_8_VALUES = 4, FRAG_8_SLOTS = 2 };
struct frag_c8 { float v[4]; };
struct frag_b8 { uint32_t w[2]; };
DEV frag_b8 frag_load_b8(const f16 *tile, int stride) { // LDS
    const f16 *const at = tile + (int)(threadIdx.x & 31) / 4 * stride + 2 * (int)(threadIdx.x & 3);
    return {{*(const uint32_t *)at, *(const uint32_t *)(at + 8)}};
}
DEV frag_b8 frag_b8_from_c(const frag_c8 &c) {
    frag_b8 f;
    for (int i = 0; i < 2; i++) {
        const __half2 h = __floats2half2_rn(c.v[2 * i], c.v[2 * i + 1]);
        uint32_t w;
        memcpy(&w, &h, 4);
        f.w[i] = frag_transpose(w);
    }
    return f;
}
DEV frag frag_turned(const f16 *tile, int stride) { // LDS
    const int lane = (int)(threadIdx.x & 31), k = (lane & 7) + lane / 16 * 8, row = lane & 8;
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(tile + k * stride + row);
    frag f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.w[0]), "=r"(f.w[1]), "=r"(f.w[2]), "=r"(f.w[3])
                 : "r"(at) : "memory");
    return f;
}
DEV void wmma(frag_c8 &c, const frag &a, const frag_b8 &b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
                 : "r"(a.w[0]), "r"(a.w[1]), "r"(a.w[2]), "r"(a.w[3]), "r"(b.w[0]), "r"(b.w[1]));
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
// Operands that lanes read from memory into registers, as vectors of 8 halves: of 16 rows by 32 k a
// lane has FRAG_VECTORS vectors, vector i from row frag_vector_row(i) and k frag_vector_k(i) on.
// wmma_vectors: c += a b over these 32 k. An instruction takes four neighbouring k from a lane, not
// the four that its layout names, but of both operands alike: the sum is the same.
enum { FRAG_VECTORS = 2 };
DEV int frag_vector_row(int i) { return (int)(threadIdx.x & 31) / 4 + 8 * i; }
DEV int frag_vector_k(int) { return 8 * (int)(threadIdx.x & 3); }
DEV void wmma_vectors(frag_c &c, const u32x4 (&a)[2], const u32x4 (&b)[2]) {
    wmma(c, frag{{a[0].x, a[1].x, a[0].y, a[1].y}}, frag_b{{b[0].x, b[0].y, b[1].x, b[1].y}});
    wmma(c, frag{{a[0].z, a[1].z, a[0].w, a[1].w}}, frag_b{{b[0].z, b[0].w, b[1].z, b[1].w}});
}
// Four waves multiply straight from LDS (wgmma), where tiles are in chunks of K as for frag_lane:
// c += a b with 64 rows of a, of which wave w has 16 w to 16 w + 15, and 16 N columns of b, over 16
// k. a_chunk, a_eight, b_chunk and b_eight are as there, in units of 8 halves.
// The products between wmma_lds_begin and wmma_lds_end are a batch, which runs asynchronously.
// Before it, after their last writes to LDS, all four waves call lds_written and meet at a barrier;
// until wmma_lds_wait nobody may touch c or write what the batch reads. wmma_lds_wait<LEFT> waits
// for all batches but the last LEFT.
// wmma_tile: c[row][col] += sum of a(row, r) b(col, r) for 64 rows of a and 16 N columns of b, over
// r = 16 s to 16 s + 15 of tiles of 64 r. A tile is lines of 128 bytes: the 64 r of a row or,
// transposed, 64 rows at one r, for each r, then for the next 64 rows. The eight vectors of a line
// are swizzled, vector v to v ^ line % 8, against bank conflicts. Tiles are aligned to 1024 bytes.
// wmma_tile_rows: wmma_tile with a in registers: frag_rows_of makes it of results in F32, and each
// wave has its own 16 rows, over 16 r. b is transposed, with R values of r, not 64.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
enum { WMMA_LDS = 1, WMMA_TILES = 1 };
DEV void lds_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEV void wmma_lds_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wmma_lds_end() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT = 0> DEV void wmma_lds_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
DEV uint64_t wmma_lds_tile(const f16 *tile, int chunk, int eight) { // a matrix descriptor
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(tile);
    return (uint64_t)(at >> 4 & 0x3fff) | (uint64_t)chunk << 16 | (uint64_t)eight << 32;
}
// The instruction for N columns; its text names the N / 2 registers of c, by tens.
#define WMMA_10(t)                                                                           \
    "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t \
    "8, %" #t "9, "
#define WMMA_60 WMMA_10() WMMA_10(1) WMMA_10(2) WMMA_10(3) WMMA_10(4) WMMA_10(5)
#define WMMA_C(i)                                                                          \
    "+f"(c[i].v[0]), "+f"(c[i].v[1]), "+f"(c[i].v[2]), "+f"(c[i].v[3]), "+f"(c[i].v[4]), \
        "+f"(c[i].v[5]), "+f"(c[i].v[6]), "+f"(c[i].v[7])
#define WMMA_4C(i) WMMA_C(i), WMMA_C(i + 1), WMMA_C(i + 2), WMMA_C(i + 3)
#define WMMA_64(N, registers, operands, ...)                                                  \
    template <bool A_TURNED, bool B_TURNED>                                                   \
    DEV void wmma_64(frag_c (&c)[N / 16], uint64_t a, uint64_t b) {                           \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" registers "}, " \
                     operands                                                                 \
                     : __VA_ARGS__                                                            \
                     : "l"(a), "l"(b), "n"(A_TURNED ? 1 : 0), "n"(B_TURNED ? 1 : 0));         \
    }
WMMA_64(16, "%0, %1, %2, %3, %4, %5, %6, %7", "%8, %9, 1, 1, 1, %10, %11;", WMMA_C(0))
WMMA_64(64, WMMA_10() WMMA_10(1) WMMA_10(2) "%30, %31", "%32, %33, 1, 1, 1, %34, %35;", WMMA_4C(0))
WMMA_64(128, WMMA_60 "%60, %61, %62, %63", "%64, %65, 1, 1, 1, %66, %67;", WMMA_4C(0), WMMA_4C(4))
WMMA_64(192, WMMA_60 WMMA_10(6) WMMA_10(7) WMMA_10(8) "%90, %91, %92, %93, %94, %95",
        "%96, %97, 1, 1, 1, %98, %99;", WMMA_4C(0), WMMA_4C(4), WMMA_4C(8))
WMMA_64(224, WMMA_60 WMMA_10(6) WMMA_10(7) WMMA_10(8) WMMA_10(9) WMMA_10(10)
        "%110, %111", "%112, %113, 1, 1, 1, %114, %115;", WMMA_4C(0), WMMA_4C(4), WMMA_4C(8),
        WMMA_C(12), WMMA_C(13))
WMMA_64(256, WMMA_60 WMMA_10(6) WMMA_10(7) WMMA_10(8) WMMA_10(9) WMMA_10(10) WMMA_10(11)
        "%120, %121, %122, %123, %124, %125, %126, %127", "%128, %129, 1, 1, 1, %130, %131;",
        WMMA_4C(0), WMMA_4C(4), WMMA_4C(8), WMMA_4C(12))
#define WMMA_ROWS(N, registers, operands, ...)                                                \
    DEV void wmma_rows(frag_c (&c)[N / 16], const frag &a, uint64_t b) {                      \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" registers "}, " \
                     operands                                                                 \
                     : __VA_ARGS__                                                            \
                     : "r"(a.w[0]), "r"(a.w[1]), "r"(a.w[2]), "r"(a.w[3]), "l"(b));           \
    }
WMMA_ROWS(64, WMMA_10() WMMA_10(1) WMMA_10(2) "%30, %31",
          "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;", WMMA_4C(0))
WMMA_ROWS(128, WMMA_60 "%60, %61, %62, %63", "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;", WMMA_4C(0),
          WMMA_4C(4))
WMMA_ROWS(256, WMMA_60 WMMA_10(6) WMMA_10(7) WMMA_10(8) WMMA_10(9) WMMA_10(10) WMMA_10(11)
          "%120, %121, %122, %123, %124, %125, %126, %127",
          "{%128, %129, %130, %131}, %132, 1, 1, 1, 1;", WMMA_4C(0), WMMA_4C(4), WMMA_4C(8),
          WMMA_4C(12))
template <int N>
DEV void wmma_lds(frag_c (&c)[N], const f16 *a, int a_chunk, int a_eight, const f16 *b, int b_chunk,
                  int b_eight) {
    wmma_64<false, false>(c, wmma_lds_tile(a, a_chunk, a_eight),
                          wmma_lds_tile(b, b_chunk, b_eight));
}
template <bool A_TURNED, bool B_TURNED, int N>
DEV void wmma_tile(frag_c (&c)[N], const f16 *a, const f16 *b, int s) {
    const uint64_t exchanged = (uint64_t)1 << 62;
    wmma_64<A_TURNED, B_TURNED>(c,
                                exchanged | wmma_lds_tile(a + s * (A_TURNED ? 1024 : 16), 512, 64),
                                exchanged | wmma_lds_tile(b + s * (B_TURNED ? 1024 : 16), 512, 64));
}
typedef frag frag_rows;
DEV frag_rows frag_rows_of(const frag_c &c) {
    frag_rows f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __half2 h = __floats2half2_rn(c.v[2 * i], c.v[2 * i + 1]);
        memcpy(&f.w[i], &h, 4);
    }
    return f;
}
template <int R, int N>
DEV void wmma_tile_rows(frag_c (&c)[N], const frag_rows &a, const f16 *b, int s) {
    wmma_rows(c, a, (uint64_t)1 << 62 | wmma_lds_tile(b + s * 1024, 8 * R, 64));
}
#else
enum { WMMA_LDS = 0, WMMA_TILES = 0 };
DEV void lds_written() {}
DEV void wmma_lds_begin() {}
DEV void wmma_lds_end() {}
template <int = 0> DEV void wmma_lds_wait() {}
template <int N>
DEV void wmma_lds(frag_c (&)[N], const f16 *, int, int, const f16 *, int, int) {}
template <bool, bool, int N> DEV void wmma_tile(frag_c (&)[N], const f16 *, const f16 *, int) {}
struct frag_rows {};
DEV frag_rows frag_rows_of(const frag_c &) { return {}; }
template <int, int N>
DEV void wmma_tile_rows(frag_c (&)[N], const frag_rows &, const f16 *, int) {}
#endif
DEV void wmma_i8(frag_ci &c, const frag_i8 &a, const frag_i8 &b) {
    for (int h = 0; h < 2; h++) {
        int *v = c.v + 4 * h;
        asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 "
                     "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3])
                     : "r"(a.w[0]), "r"(a.w[1]), "r"(b.w[h]));
    }
}

#else // gfx11, by clang's own attributes and builtins: no header of HIP is needed for the device

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
#define CONSTANT __attribute__((unused, constant)) static constexpr
#define LDS(type, name, n) static __attribute__((shared, aligned(16))) type name[n]
#define LDS_GRANTED(type, name, n) type *const name = nullptr
#define LDS_LARGE(type, name, n) LDS(type, name, n)

DEV void block_sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// block_sync also waits until all loads and stores of global memory are done, and invalidates the
// L0 cache. Here a wave waits for its own LDS accesses alone; the memory clobber keeps the compiler
// from moving accesses across. The barrier is written out because clang 19 waits for global memory
// before the builtin s_barrier on gfx11; clang 22 does not.
DEV void block_sync_lds() { asm volatile("s_waitcnt lgkmcnt(0)\n\ts_barrier" ::: "memory"); }
DEV uint32_t thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEV uint32_t n_threads() { return __builtin_amdgcn_workgroup_size_x(); }
DEV uint32_t block_index() { return __builtin_amdgcn_workgroup_id_x(); }
DEV uint32_t block_index_z() { return __builtin_amdgcn_workgroup_id_z(); }
DEV void fence_device() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
DEV uint32_t atomic_inc(uint32_t *p) {
    return __hip_atomic_fetch_add(p, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
DEV void atomic_add(uint32_t *p, uint32_t n) {
    __hip_atomic_fetch_add(p, n, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
DEV uint32_t atomic_look(const uint32_t *p) {
    return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
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
DEV f16x2 pair_floats(float x, float y) { return f16x2{(f16)x, (f16)y}; }
// The compiler does not know of a pointer in a struct that it points to global memory, and would
// use flat instructions, which are slower.
template <reads = AGAIN, typename T> DEV T gload(const T *p) {
    return *(const __attribute__((address_space(1))) T *)p;
}
template <typename T> DEV void gstore(T *p, as_given<T> v) {
    *(__attribute__((address_space(1))) T *)p = v;
}

enum { COPIES_ASYNC = 0 };
DEV void copy_async(u32x4 *to, const u32x4 *from, bool live) {
    const u32x4 zeros = {0, 0, 0, 0};
    lput(to, live ? gload(from) : zeros);
}
DEV void copy_async_part(u32x4 *, const u32x4 *, int) {} // only where COPIES_ASYNC
DEV void copies_close() {}
template <int> DEV void copies_wait() {}

// The hardware does the LDS accesses of a wave in order. Only the compiler has to be kept from
// moving them.
DEV void wave_sync() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
}
// Within 16 lanes a DPP modifier (row_xmask) exchanges values as a part of the instruction that
// uses them; permlanex16 exchanges the two halves of the wave.
template <int mask, typename T> DEV T wave_xor(T x) {
    static_assert(sizeof(T) == 4, "a lane swaps 32 bits");
    int i = __builtin_bit_cast(int, x);
    if (mask == 16) {
        i = __builtin_amdgcn_permlanex16(i, i, 0x76543210, (int)0xfedcba98, false, false);
        // Keeps the exchange at this point. LLVM before 21 (seen with clang 19.1.7) moves it into a
        // branch that uses its result, where the lanes that it reads from may be inactive.
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
// One instruction; of a 32-bit product the compiler makes v_mul_lo_u32, at a quarter of the rate.
DEV uint32_t halves_times(uint32_t x, uint32_t n) {
    typedef uint16_t u16x2 __attribute__((ext_vector_type(2)));
    return __builtin_bit_cast(uint32_t, __builtin_bit_cast(u16x2, x) * (uint16_t)n);
}
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
enum { E2M1_SIGNS = 0 }; // v_perm_b32 has no such bit: levels are looked up by byte_levels
DEV void e2m1_order(uint32_t &, uint32_t &) {}
DEV void e2m1_dot(uint32_t, uint32_t, uint32_t, int &, int &) {}
DEV float exp2_fast(float x) { return __builtin_amdgcn_exp2f(x); }
DEV float log2_fast(float x) { return __builtin_amdgcn_logf(x); }
DEV float rcp_fast(float x) { return __builtin_amdgcn_rcpf(x); }
// From the assembler's own symbols, so that it is the last step of a compilation that decides:
// examples/build-kernels makes the code of several targets from the optimizer's results for one.
DEV int target_id() {
    int id = 0;
#if defined(__HIP_DEVICE_COMPILE__)
#define GENERATION ".amdgcn.gfx_generation_"
    asm("s_mov_b32 %0, (" GENERATION "number / 10 * 16 + " GENERATION "number %% 10) << 8 | "
        GENERATION "minor << 4 | " GENERATION "stepping" : "=s"(id));
#undef GENERATION
#endif
    return id;
}

// Fragments: what one lane holds of a matrix of 16 by 16. frag is an operand, with K innermost;
// frag_c and frag_ci are results in F32 and I32, of which the lane's element v is at row
// frag_row(v) and column frag_col(v). The 8 elements lie in FRAG_SLOTS different columns, which are
// numbered: element v is in the column of slot frag_slot(v).
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
// frag_slot_col: the column of a slot. frag_col_max, _sum: over all 16 rows of it, from x over the
// rows that the lane holds.
DEV int frag_slot_col(int s) { return (int)(thread_index() & 15); }
DEV float frag_col_max(float x) { return fmaxf(x, wave_xor<16>(x)); }
DEV float frag_col_sum(float x) { return x + wave_xor<16>(x); }
enum { FRAG_ROW_SLOTS = 8 }; // slots of rows, which only WMMA_TILES needs
DEV constexpr int frag_row_slot(int v) { return v; }
DEV int frag_slot_row(int s) { return frag_row(s); }
DEV float frag_row_max(float x) { return x; }
DEV float frag_row_sum(float x) { return x; }
template <typename F> DEV void frag_put_halves(const frag_c &, F) {}
template <typename F> DEV void frag_put_floats(const frag_c &, F) {}

struct frag_halves { u32x4 lo, hi; };
// Operand from tile[row * stride + k], whose rows 0-15 are those of M (A) or N (B) and are aligned
// to 16 bytes.
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
typedef frag frag_b; // a platform may load B operands in an order of their own; this one does not
DEV frag_b frag_load_b(const f16 *tile, int stride) { return frag_load(tile, stride); }
// An operand from a tile whose K is cut into chunks of 8, each a column of rows of 16 bytes:
// element (row, k) is at tile[k / 8 * chunk + row / 8 * eight + row % 8 * 8 + k % 8]. The loads
// take tile + frag_lane(chunk, eight), or frag_lane_b.
DEV int frag_lane(int, int eight) {
    const int lane = (int)thread_index();
    return (lane >> 3 & 1) * eight + (lane & 7) * 8;
}
DEV int frag_lane_b(int chunk, int eight) { return frag_lane(chunk, eight); }
DEV frag frag_load_lane(const f16 *tile, int chunk) {
    const frag_halves h = {lget((const u32x4 *)tile), lget((const u32x4 *)(tile + chunk))};
    return __builtin_bit_cast(frag, h);
}
DEV frag_b frag_load_lane_b(const f16 *tile, int chunk) { return frag_load_lane(tile, chunk); }
// A fragment from global memory, laid out as for frag_load_lane with chunk 128 and eight 64.
DEV frag frag_load_image(const f16 *image) {
    const u32x4 *row = (const u32x4 *)image + (thread_index() & 15);
    const frag_halves h = {gload(row), gload(row + 16)};
    return __builtin_bit_cast(frag, h);
}
DEV frag_i8 frag_i8_load(const int8_t *tile, int stride) { // LDS
    const u32x4 row = lget((const u32x4 *)(tile + (thread_index() & 15) * stride));
    return __builtin_bit_cast(frag_i8, row);
}
// frag_from_c makes a B operand of a result, rounded to F16, for a further product that sums over
// the rows of the result. A permutation of K does not change such a sum if both operands have it,
// so the operand may have its k in whatever order costs least: k is row frag_k_row(k) of the
// result. Here these are the even rows, which lanes 0-15 hold, then the odd rows of lanes 16-31.
// Within an aligned group of four k the rows are FRAG_K_STEP apart.
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
// Operands that lanes read from memory into registers, as vectors of 8 halves: of 16 rows by 32 k a
// lane has FRAG_VECTORS vectors, vector i from row frag_vector_row(i) and k frag_vector_k(i) on.
// wmma_vectors: c += a b over these 32 k.
enum { FRAG_VECTORS = 4 };
DEV int frag_vector_row(int) { return (int)(thread_index() & 15); }
DEV int frag_vector_k(int i) { return 8 * i; }
DEV void wmma_vectors(frag_c &c, const u32x4 (&a)[4], const u32x4 (&b)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const frag_halves ha = {a[i], a[i + 1]}, hb = {b[i], b[i + 1]};
        wmma(c, __builtin_bit_cast(frag, ha), __builtin_bit_cast(frag, hb));
    }
}
enum { FRAG_8_VALUES = 8, FRAG_8_SLOTS = 1 }; // of 8 columns, which only WMMA_TILES has
typedef frag_c frag_c8;
typedef frag frag_b8;
enum { WMMA_LDS = 0, WMMA_TILES = 0 }; // operands are registers
DEV void lds_written() {}
DEV void group_sync_lds(int) {}
DEV void turn_take(int) {}
DEV void turn_pass(int) {}
DEV void launch_begin() {}
DEV void launch_next() {}
#define KERNEL_AHEAD KERNEL_WAVES
DEV void wmma_lds_begin() {}
DEV void wmma_lds_end() {}
template <int = 0> DEV void wmma_lds_wait() {}
template <int N>
DEV void wmma_lds(frag_c (&)[N], const f16 *, int, int, const f16 *, int, int) {}
template <bool, bool, int N> DEV void wmma_tile(frag_c (&)[N], const f16 *, const f16 *, int) {}
struct frag_rows {};
DEV frag_rows frag_rows_of(const frag_c &) { return {}; }
template <int, int N>
DEV void wmma_tile_rows(frag_c (&)[N], const frag_rows &, const f16 *, int) {}
DEV void wmma_i8(frag_ci &c, const frag_i8 &a, const frag_i8 &b) {
    frag_v8i v = __builtin_bit_cast(frag_v8i, c);
    v = __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(true, a, true, b, v, false);
    c = __builtin_bit_cast(frag_ci, v);
}

#endif
#endif // the stand-in

// Optimisation barriers: functions that compute nothing, but keep the compiler from rearranging
// code in a way that costs registers or time. All of them are here, except one asm statement in
// wave_xor. Each comment says what the compiler does without the function, so that a later compiler
// can be tried without it: make it empty, compile, and compare registers (tests/gfx11/check). Clang
// 19.1.7 and 22.1.8 both need every one of them for gfx1100. On other platforms most of them are
// empty.
#if defined(__GFX11__)
#define REGISTER_BARRIER(x) asm volatile("" : "+v"(x))
#elif defined(__CUDACC__)
#define REGISTER_BARRIER(x) asm volatile("" : "+r"(x))
#else
#define REGISTER_BARRIER(x) (void)(x)
#endif

// Returns x, and hides from the compiler that the result is x, so that whatever depends on the
// result is computed after this point. Otherwise addresses that only rare paths of a loop use are
// computed before the loop and kept throughout, and attention_prefill_128 spills 27 to 33
// registers.
DEV int recomputed(int x) {
    REGISTER_BARRIER(x);
    return x;
}
// recomputed for a uniform x, in a scalar register.
DEV int32_t recomputed_scalar(int32_t x) {
#if defined(__GFX11__)
    asm volatile("" : "+s"(x));
#endif
    return x;
}
// Makes the compiler compute x at this point. Otherwise it computes sums and addresses later and
// keeps their operands, which take more registers, until then; or it computes what does not change
// in a loop before the loop, and keeps that throughout: matvec_int8_q4_K_n8 takes 138 to 178 VGPRs,
// not 124.
DEV void computed(uint32_t &x) { REGISTER_BARRIER(x); }
DEV void computed(float &x) {
#if defined(__GFX11__)
    REGISTER_BARRIER(x);
#endif
    (void)x;
}
// Keeps x in a register. nvcc loads a field of the args again at each use, for which a lone wave
// waits. Tests of x with this between them do not become a table, which would be one more load.
#if defined(__CUDACC__)
DEV void held(int32_t &x) { asm volatile("" : "+r"(x)); }
DEV void held(float &x) { asm volatile("" : "+f"(x)); }
DEV void held(char *&x) { asm volatile("" : "+l"(x)); }
#else
template <typename T> DEV void held(T &) {}
#endif
// No instruction is moved across this point. Otherwise loads begin as early as possible, and each
// holds its registers until its data is used: attention_decode_64 takes 246 to 253 VGPRs, not 198
// to 205, and attention_prefill_128 spills with clang 19.
DEV void keep_order() {
#if defined(__GFX11__)
    __builtin_amdgcn_sched_barrier(0);
#endif
}
// Loads before this point are issued before it, and later ones after it. Otherwise a prefetch for
// the next iteration of a loop is moved into that iteration, and the loads of x for all columns to
// the top of the loop: matvec_int8_q4_K_n1 takes 97 VGPRs, not 86, and so the occupancy is 12 waves
// a SIMD, not 16. For nvcc it is a statement that may write to memory.
DEV void loads_issued() {
#if defined(__CUDACC__)
    asm volatile("" ::: "memory");
#else
    keep_order();
#endif
}
// Loads fields of the args before this point, all in one batch with one wait. Otherwise the
// compiler loads each field where it is first used, and waits for one after the other: six times
// before the first load of a matvec's weights, not twice. Returns the first field; what depends on
// the result is computed after this point. Only a single asm statement that has all fields as
// operands does this. It has READ_FIELDS operands; a caller with fewer fields repeats its second.
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
// The kernel's args under a name that the compiler does not know to be the same memory, so that
// fields used after a loop are loaded again there. Otherwise they stay in registers throughout the
// loop, and the attention kernels spill 2 to 17 SGPRs each.
template <typename T> DEV const T &reread(const T &args) {
#if defined(__GFX11__)
    typedef const __attribute__((address_space(4))) T constant;
    (void)args;
    return *(const T *)(constant *)__builtin_amdgcn_kernarg_segment_ptr();
#else
    return args;
#endif
}
// Like reread, but the fields are loaded again at each use. Of two uses of reread the compiler
// knows that they are the same constant memory, so it loads a field once and keeps it in a register
// from one use to the other. Here the empty asm hides where the pointer comes from.
template <typename T> DEV const T &reread_anew(const T &args) {
#if defined(__GFX11__)
    typedef const __attribute__((address_space(4))) T constant;
    (void)args;
    constant *p = (constant *)__builtin_amdgcn_kernarg_segment_ptr();
    asm("" : "+s"(p));
    return *(const T *)p;
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

// Sum and maximum over the 32 lanes. Every lane gets the same bits.
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
// The largest of the lanes' numbers, for all lanes.
DEV uint32_t wave_most(uint32_t x) {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800 // one instruction there
    return __reduce_max_sync(0xffffffffu, x);
#else
    x = max(x, wave_xor<1>(x));
    x = max(x, wave_xor<2>(x));
    x = max(x, wave_xor<4>(x));
    x = max(x, wave_xor<8>(x));
    return max(x, wave_xor<16>(x));
#endif
}

// Sum and maximum over a block. Every thread gets the same bits. work: LDS of BLOCK_WORK floats
// that the kernel uses for nothing else, so that one barrier is enough: nobody overwrites what
// others still read.
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

// Counts this block at a counter in global memory and returns how many blocks were counted before
// it. What those stored before their calls, this block sees after its own. word: LDS. On gfx11
// every wave fences, because a fence waits for the stores of its own wave and invalidates the L0
// cache of its own compute unit. On NVIDIA fences are cumulative: one thread's, behind the barrier,
// covers what the whole block stored, and the counting itself can be the fence.
DEV uint32_t block_ticket(uint32_t *counter, uint32_t *word) {
#if !defined(__CUDACC__)
    fence_device();
#endif
    block_sync();
#if defined(__CUDACC__)
    if (thread_index() == 0) lput(word, atomic_ticket(counter));
#else
    if (thread_index() == 0) lput(word, atomic_inc(counter));
#endif
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
// The address of row (i1, i2, i3). row_repeated: in a tensor that is repeated where its size is 1.
DEV char *row_of(const rocq_k_tensor &t, int64_t i1, int64_t i2, int64_t i3) {
    return (char *)t.data + i1 * t.stride[0] + i2 * t.stride[1] + i3 * t.stride[2];
}
DEV char *row_repeated(const rocq_k_tensor &t, int64_t i1, int64_t i2, int64_t i3) {
    return row_of(t, t.ne[1] == 1 ? 0 : i1, t.ne[2] == 1 ? 0 : i2, t.ne[3] == 1 ? 0 : i3);
}
// Element i of a row of F32, F16 or BF16, in two steps: get_bits loads it, and bits_float converts
// what was loaded. Between the two the load is in flight.
DEV uint32_t get_bits(int32_t format, const char *row, int64_t i) {
    return format == ROCQ_F32 ? gload((const uint32_t *)row + i) : gload((const uint16_t *)row + i);
}
DEV float bits_float(int32_t format, uint32_t x) {
    if (format == ROCQ_F32) return bits<float>(x);
    return format == ROCQ_F16 ? f16_f32((uint16_t)x) : bf16_f32((uint16_t)x);
}
DEV float get_float(int32_t format, const char *row, int64_t i) {
    if (format == ROCQ_F32) return gload((const float *)row + i); // so that F32 takes one branch
    return bits_float(format, gload((const uint16_t *)row + i));
}
DEV void put_float(int32_t format, char *row, int64_t i, float x) {
    if (format == ROCQ_F32) gstore((float *)row + i, x);
    else gstore((uint16_t *)row + i, format == ROCQ_F16 ? f32_f16(x) : f32_bf16(x));
}
DEV float exp_fast(float x) { return exp2_fast(x * 1.44269504f); }

// exp, tanh and erfc of C's library, with a relative error below 4e-7 wherever the result is a
// normal number; a denormal result may be 0. They are written out so that the results do not depend
// on the version of a platform's library, and so that the tests on the CPU run the same code.
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
// For z = |x|: erfc(z) = exp(-z^2) P(u) / (z + 2), P of degree 10 in u = (z - 2) / (z + 2), which
// is in [-1, 1). z^2 is taken in two parts, since exp turns its rounding error into a relative one.
// Not for NaN, which comes out as 0.
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
    case ROCQ_ACT_SILU: return x * rcp_fast(1.0f + exp_fast(-x));
    case ROCQ_ACT_GELU:
        return x * rcp_fast(1.0f + exp_fast(-1.59576912160573f * (x + 0.044715f * x * x * x)));
    case ROCQ_ACT_GELU_ERF: return 0.5f * x * erfc_full(-0.707106781186548f * x);
    case ROCQ_ACT_RELU: return x <= 0.0f ? 0.0f : x; // NaN stays
    case ROCQ_ACT_TANH: return tanh_full(x);
    case ROCQ_ACT_SIGMOID: return rcp_fast(1.0f + exp_fast(-x));
    default: return x;
    }
}

// The derivatives, as rocq__gate_slope1 and rocq__activation_slope compute them on the CPU.
DEV float gate_slope(float x, float linear, float cubic) {
    const float square = x * x, u = x * fmaf(square, cubic, linear);
    const float e = exp_fast(fminf(-u, 86.0f)), s = rcp_fast(1.0f + e);
    return s * fmaf(e * s, x * fmaf(3.0f * square, cubic, linear), 1.0f);
}
DEV float activation_slope(int32_t kind, float x) {
    const float v = x < -100.0f ? -100.0f : x > 100.0f ? 100.0f : x; // NaN stays
    switch (kind) {
    case ROCQ_ACT_SILU: return gate_slope(v, 1.0f, 0.0f);
    case ROCQ_ACT_GELU: return gate_slope(v, 1.59576912160573f, 0.0713548162726f);
    case ROCQ_ACT_GELU_ERF:
        return 0.5f * erfc_full(-0.707106781186548f * v) +
               0.398942280401433f * v * exp_full(-0.5f * v * v);
    case ROCQ_ACT_RELU: return v > 0.0f ? 1.0f : 0.0f;
    case ROCQ_ACT_TANH: return 1.0f - tanh_full(v) * tanh_full(v);
    case ROCQ_ACT_SIGMOID: {
        const float e = exp_fast(-fabsf(v)), s = rcp_fast(1.0f + e);
        return e * s * s;
    }
    default: return 1.0f;
    }
}

// activation and activation_slope of four elements, with one branch for all of them, so that their
// computations overlap: with a branch for each element, dx of a product behind GELU took 2.4 times
// as long on an H200 as without GELU.
#define ROCQ_X_ACTIVATIONS(X) \
    X(ROCQ_ACT_SILU) X(ROCQ_ACT_GELU) X(ROCQ_ACT_GELU_ERF) \
    X(ROCQ_ACT_RELU) X(ROCQ_ACT_TANH) X(ROCQ_ACT_SIGMOID)
DEV void activate4(int32_t kind, float v[4]) {
    switch (kind) {
#define ROCQ_X(KIND) \
    case KIND:       \
        for (int e = 0; e < 4; e++) v[e] = activation(KIND, v[e]); \
        break;
        ROCQ_X_ACTIVATIONS(ROCQ_X)
#undef ROCQ_X
    default: break;
    }
}
DEV void times_slope4(int32_t kind, const float x[4], float v[4]) { // v times the slope at x
    switch (kind) {
#define ROCQ_X(KIND) \
    case KIND:       \
        for (int e = 0; e < 4; e++) v[e] *= activation_slope(KIND, x[e]); \
        break;
        ROCQ_X_ACTIVATIONS(ROCQ_X)
#undef ROCQ_X
    default: break;
    }
}
#undef ROCQ_X_ACTIVATIONS

// ---------------------------------------------------------------------------------------------
// >>blocks
// ---------------------------------------------------------------------------------------------
// The formats that have blocks. Those that are only read (IQ1 to IQ3, TQ and NVFP4, for which rocq
// has no encoder) count as one, `read`, and are told apart when a kernel runs.
#define BLOCK_FORMATS(F, X) PLANE_FORMATS(F, X) F(X, read)
#define PLANE_FORMATS(F, X) ROCQ_K_CODED_FORMATS(F, X) F(X, mxfp6_e2m3) F(X, mxfp6_e3m2)

// The planar layout is drawn at >>kernels in rocq.h. A unit of 32 weights is decoded in two steps:
// load_raw loads it with the widest loads that its planes permit, and decode_raw extracts codes,
// scales and mins. A lane that prefetches one unit while it works on another so needs registers
// only for the raw form of both.
//   value of element e = 4 i + b: scale[e / 16] q - min[e / 16], where q is byte b of q[i]
// The product scale q and min are exact in F32, so a value is rounded at most once. Where the codes
// of a format have an offset (Q4_0: 8), min is scale times the offset. decode_word subtracts the
// offset from the code instead: then the sign of a zero and the effect of an infinite scale are
// those of the CPU backend, and the values have ggml's bits.

// A format at compile time. block_planes: the bytes that 8 units take in each plane
// (ROCQ_K_PLANES). block_layout adds what decoding needs. offset: what is subtracted from a code.
// is_signed: the bytes of q are signed. halves: elements 16-31 have a scale of their own. has_min:
// the format stores a min.
template <int F> struct block_planes {
    enum { n = 0, c = 0, b = 0, s = 0, t = 0, d = 0 };
};
#define ROCQ_X(F, N, C, B, S, T, D)                        \
    template <> struct block_planes<F> {                   \
        enum { n = N, c = C, b = B, s = S, t = T, d = D }; \
    };
ROCQ_K_PLANES(ROCQ_X)
#undef ROCQ_X
template <int F> struct block_layout;
#define ROCQ_X(F, OFFSET, SIGNED, HALVES, MIN)                  \
    template <> struct block_layout<F> : block_planes<F> {      \
        enum { offset = OFFSET, is_signed = SIGNED };           \
        enum { halves = HALVES, has_min = MIN };                \
    };
//                    offset signed halves min
ROCQ_X(ROCQ_Q4_0,        8,    0,     0,   0)
ROCQ_X(ROCQ_Q4_1,        0,    0,     0,   1)
ROCQ_X(ROCQ_Q5_0,       16,    0,     0,   0)
ROCQ_X(ROCQ_Q5_1,        0,    0,     0,   1)
ROCQ_X(ROCQ_Q8_0,        0,    1,     0,   0)
ROCQ_X(ROCQ_Q2_K,        0,    0,     1,   1)
ROCQ_X(ROCQ_Q3_K,        4,    0,     1,   0)
ROCQ_X(ROCQ_Q4_K,        0,    0,     0,   1)
ROCQ_X(ROCQ_Q5_K,        0,    0,     0,   1)
ROCQ_X(ROCQ_Q6_K,       32,    0,     1,   0)
ROCQ_X(ROCQ_IQ4_NL,      0,    1,     0,   0)
ROCQ_X(ROCQ_IQ4_XS,      0,    1,     0,   0)
ROCQ_X(ROCQ_MXFP4,       0,    1,     0,   0)
ROCQ_X(ROCQ_MXFP6_E2M3,  0,    0,     0,   0)
ROCQ_X(ROCQ_MXFP6_E3M2,  0,    0,     0,   0)
#define ROCQ_X_READ(X, f) X(ROCQ_K_ID_##f, 0, 1, 1, 0)
ROCQ_K_READ_FORMATS(ROCQ_X_READ, ROCQ_X)
#undef ROCQ_X_READ
ROCQ_X(ROCQ_K_ID_read,   0,    1,     1,   0)
#undef ROCQ_X

template <int F> DEV constexpr bool is_mxfp6() {
    return F == ROCQ_MXFP6_E2M3 || F == ROCQ_MXFP6_E3M2;
}
template <int F> DEV constexpr bool is_plain() {
    return F == ROCQ_F32 || F == ROCQ_F16 || F == ROCQ_BF16;
}

// The formats that are only read (ROCQ_K_READ_FORMATS) are one F here, READ: their kernels are told
// which it is by an argument, the same for all lanes. Where a format is known to the compiler, F is
// that format itself (is_read): the INT8 kernels of a matvec and of experts branch to code for each
// (matvec_share).
enum { READ = ROCQ_K_ID_read };
template <int F> DEV constexpr bool is_read() {
#define ROCQ_X(X, f) F == ROCQ_K_ID_##f ||
    return ROCQ_K_READ_FORMATS(ROCQ_X, ) F == READ;
#undef ROCQ_X
}
DEV int32_t shared_format(int32_t format) {
    switch (format) {
#define ROCQ_X(X, f) case ROCQ_K_ID_##f:
        ROCQ_K_READ_FORMATS(ROCQ_X, )
#undef ROCQ_X
        return READ;
    default: return format;
    }
}

DEV uint32_t read_bytes(int32_t format) { // of a block
    switch (format) {
#define ROCQ_X(X, f) case ROCQ_K_ID_##f: return (uint32_t)sizeof(rocq_block_##f);
        ROCQ_K_READ_FORMATS(ROCQ_X, )
#undef ROCQ_X
    default: return 0;
    }
}

template <int F> struct planes { const char *n, *c, *b, *s, *t, *d; };
template <> struct planes<READ> {
    const char *blocks;
    int32_t format;
    uint32_t bytes, shift; // of a block; of its 1 << shift units
};
#define ROCQ_X(X, f) template <> struct planes<ROCQ_K_ID_##f> : planes<READ> {};
ROCQ_K_READ_FORMATS(ROCQ_X, )
#undef ROCQ_X
template <int F = READ> DEV planes<F> read_planes(const void *blocks, int32_t format) {
    planes<F> p;
    p.blocks = (const char *)blocks;
    p.format = F == READ ? format : F;
    p.bytes = read_bytes(p.format);
    p.shift = p.format == ROCQ_NVFP4 ? 1 : 3;
    return p;
}

// The planes of a tensor at base, of n_units units in all. format says which one, if F is READ.
template <int F> DEV planes<F> planes_of(const void *base, int64_t n_units, int32_t format = F) {
    typedef block_layout<F> l;
    planes<F> p;
    if constexpr (is_read<F>()) {
        return read_planes<F>(base, format);
    } else {
    (void)format;
    p.n = (const char *)base;
    p.c = p.n + n_units * l::n / 8;
    p.b = p.c + n_units * l::c / 8;
    p.s = p.b + n_units * l::b / 8;
    p.t = p.s + n_units * l::s / 8;
    p.d = p.t + n_units * l::t / 8;
    return p;
    }
}
// The planes from a row's first unit on. If that unit is uniform and load_raw is given a 32-bit
// unit relative to it, each address is a scalar base and one 32-bit offset.
template <int F> DEV planes<F> planes_at(const planes<F> &p, int64_t unit) {
    typedef block_layout<F> l;
    planes<F> q;
    if constexpr (is_read<F>()) {
        q = p;
        q.blocks += (unit >> p.shift) * p.bytes;
        return q;
    } else {
    q.n = p.n + unit * l::n / 8;
    q.c = p.c + unit * l::c / 8;
    q.b = p.b + unit * l::b / 8;
    q.s = p.s + unit * l::s / 8;
    q.t = p.t + unit * l::t / 8;
    q.d = p.d + unit * l::d / 8;
    return q;
    }
}

// A unit as loaded. Members for which a format has no plane are 0 and take no register.
template <int F> struct raw {
    u32x4 n, c, d;
    uint32_t b, s, t;
};
// For formats that are only read: w has the bytes of codes, entries and signs, s those of scales; d
// is the factor. Each is as stored.
template <> struct raw<READ> {
    uint32_t w[8], s, d;
    int32_t format;
};

#define ROCQ_X(X, f) template <> struct raw<ROCQ_K_ID_##f> : raw<READ> {};
ROCQ_K_READ_FORMATS(ROCQ_X, )
#undef ROCQ_X

template <int F, typename I> DEV raw<F> load_read(const planes<F> &p, I unit);

// p has to begin at a superblock (8 units), if the format has these. I: int64_t or uint32_t.
template <int F, reads R = AGAIN, typename I> DEV raw<F> load_planes(const planes<F> &p, I unit) {
    typedef block_layout<F> l;
    const u32x4 none = make4(0, 0, 0, 0);
    raw<F> r = {none, none, none, 0, 0, 0};
    if constexpr (l::n != 0) r.n = gload<R>((const u32x4 *)(p.n + unit * 16));
    if constexpr (l::c == 128) r.c = gload<R>((const u32x4 *)(p.c + unit * 16));
    if constexpr (l::c == 64) {
        const u32x2 c = gload<R>((const u32x2 *)(p.c + unit * 8));
        r.c = make4(c.x, c.y, 0, 0);
    }
    if constexpr (l::b != 0) r.b = gload<R>((const uint32_t *)(p.b + unit * 4));
    if constexpr (l::s == 16) r.s = gload<R>((const uint16_t *)(p.s + unit * 2));
    if constexpr (l::s == 8) r.s = gload<R>((const uint8_t *)(p.s + unit));
    if constexpr (l::t != 0) r.t = gload<R>((const uint32_t *)(p.t + unit / 8 * 4));
    if constexpr (F == ROCQ_Q4_K || F == ROCQ_Q5_K) {
        r.d = gload<R>((const u32x4 *)(p.d + unit / 8 * 16));
    } else if constexpr (F == ROCQ_IQ4_XS) {
        const u32x2 d = gload<R>((const u32x2 *)(p.d + unit / 8 * 8));
        r.d = make4(d.x, d.y, 0, 0);
    } else if constexpr (F == ROCQ_Q2_K) {
        r.d = make4(gload<R>((const uint32_t *)(p.d + unit / 8 * 4)), 0, 0, 0);
    } else if constexpr (l::d == 2) {
        r.d = make4(gload<R>((const uint16_t *)(p.d + unit / 8 * 2)), 0, 0, 0);
    } else if constexpr (l::d == 32) {
        r.d = make4(gload<R>((const uint32_t *)(p.d + unit * 4)), 0, 0, 0);
    } else if constexpr (l::d == 16) {
        r.d = make4(gload<R>((const uint16_t *)(p.d + unit * 2)), 0, 0, 0);
    } else {
        r.d = make4(gload<R>((const uint8_t *)(p.d + unit)), 0, 0, 0);
    }
    return r;
}

template <int F, reads R = AGAIN, typename I> DEV raw<F> load_raw(const planes<F> &p, I unit) {
    // Formats that are only read: several loads share a cache line, which has to stay.
    if constexpr (is_read<F>()) return load_read<F>(p, unit);
    else return load_planes<F, R>(p, unit);
}

// The reverse of load_raw. The lane of a superblock's first unit stores what belongs to all of it.
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
// Formats whose codes are indices into a table of 16 levels.
template <int F> DEV constexpr bool has_levels() {
    return F == ROCQ_IQ4_NL || F == ROCQ_IQ4_XS || F == ROCQ_MXFP4;
}
// The levels that the low nibbles of n's bytes stand for, and those of the high nibbles.
template <int F> DEV u32x2 levels_of(uint32_t n) {
    constexpr int8_t iq4[16] = {ROCQ_IQ4_LEVELS}, mxfp4[16] = {ROCQ_MXFP4_LEVELS};
    const int8_t *level = F == ROCQ_MXFP4 ? mxfp4 : iq4;
    return byte_levels(make4(level_word(level, 0), level_word(level, 4), level_word(level, 8),
                             level_word(level, 12)), n);
}

// Word i of the 8 words of codes of a unit: byte b is element 4 i + b.
template <int F> DEV uint32_t decode_code(const raw<F> &r, int i) {
    typedef block_layout<F> l;
    const uint32_t ns[4] = {r.n.x, r.n.y, r.n.z, r.n.w}, cs[4] = {r.c.x, r.c.y, r.c.z, r.c.w};
    const uint32_t n = ns[i & 3];
    if constexpr (F == ROCQ_Q8_0) return i < 4 ? n : cs[i & 3];
    if constexpr (has_levels<F>()) {
        const u32x2 levels = levels_of<F>(n);
        return i < 4 ? levels.x : levels.y;
    }
    uint32_t q = 0;
    if constexpr (l::n != 0) q = (i < 4 ? n : n >> 4) & 0x0f0f0f0fu;
    if constexpr (l::c != 0) { // to bit 4, or to bit 0 where there is no plane N
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

// value = d sc[g] (q - offset) - dmin mn[g] with g = element / 16. The integers are 1 in formats
// that have none, and equal in formats without halves. dmin is 0 in formats without a min.
struct block_factors {
    float d, dmin;
    int32_t sc[2], mn[2];
};

// 2^(e - 127) for e < 255.
DEV float pow2_e8m0(uint32_t e) { return bits<float>(e == 0 ? 1u << 22 : e << 23); }

template <int F> DEV block_factors read_factors(const raw<F> &r, uint32_t u);
template <int F> DEV void read_codes(const raw<F> &r, uint32_t u, uint32_t q[8]);

template <int F, typename I> DEV block_factors decode_factors(const raw<F> &r, I unit) {
    const uint32_t u = (uint32_t)unit & 7u;
    if constexpr (is_read<F>()) {
        return read_factors<F>(r, u);
    } else {
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
}

// All 8 words of codes of a unit.
template <int F, typename I> DEV void decode_codes(const raw<F> &r, I unit, uint32_t q[8]) {
    if constexpr (is_read<F>()) {
        read_codes<F>(r, (uint32_t)unit & 7u, q);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] = decode_code<F>(r, i);
    }
}

struct unit {
    uint32_t q[8];
    float scale[2], min[2];
};
template <int F> DEV float unit_scale(const block_factors &f, int g) {
    return f.d * (float)f.sc[g];
}
template <int F> DEV float unit_min(const block_factors &f, int g) {
    if (block_layout<F>::has_min) return f.dmin * (float)f.mn[g];
    return (float)block_layout<F>::offset * unit_scale<F>(f, g);
}

// In MXFP6, q are the 6-bit codes and scale is 2^(e - 127); decode_word makes values of them.
template <int F, typename I> DEV unit decode_raw(const raw<F> &r, I at) {
    const block_factors f = decode_factors<F>(r, at);
    unit u;
    decode_codes<F>(r, at, u.q);
#pragma unroll
    for (int g = 0; g < 2; g++) {
        u.scale[g] = unit_scale<F>(f, g);
        u.min[g] = unit_min<F>(f, g);
    }
    return u;
}

// Two 6-bit codes, in bytes 0 and 2, as two F16. The bits are moved to the places of F16's exponent
// and mantissa, so the values are 2^14 (E2M3) or 2^12 (E3M2) too small. Subnormals stay exact.
template <int F> DEV f16x2 mxfp6_halves(uint32_t codes) {
    const int up = F == ROCQ_MXFP6_E2M3 ? 7 : 8;
    return bits<f16x2>((codes << up & 0x001f001fu << up) | (codes << 10 & 0x80008000u));
}

// The values of elements 4 i to 4 i + 3, with the bits that the CPU backend gives them.
template <int F> DEV void decode_word(const unit &u, int i, float v[4]) {
    typedef block_layout<F> l;
    const uint32_t q = u.q[i];
    const float scale = u.scale[i >> 2], min = u.min[i >> 2];
    if constexpr (is_mxfp6<F>()) {
        const float up = F == ROCQ_MXFP6_E2M3 ? 16384.0f : 4096.0f;
        const f16x2 even = mxfp6_halves<F>(q & 0x00ff00ffu);
        const f16x2 odd = mxfp6_halves<F>(q >> 8 & 0x00ff00ffu);
        const f16 h[4] = {even.x, odd.x, even.y, odd.y};
        // adding 0 turns -0 into +0, as on the CPU
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

// The values of one word of codes: q is word i of a unit. i need not be a constant.
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

// Elements of a vector (16 bytes) of a plain format. Block formats have units in its place.
template <int F> DEV constexpr int vector_elems() {
    return F == ROCQ_F32 ? 4 : is_plain<F>() ? 8 : 32;
}

// Elements 4 i to 4 i + 3 of a vector.
template <int F> DEV void decode_vector(const u32x4 &vector, int i, float v[4]) {
    const uint32_t w[4] = {vector.x, vector.y, vector.z, vector.w};
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
// Blocks as they are stored in the file. Their alignment is 2 bytes, or 1 in the MX formats, so the
// source has no wider loads; the compiler for gfx11, which can load from any address, joins
// neighbouring ones.

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

// Bits 0-3 of x, each moved to bit 0 of one of the four bytes.
DEV uint32_t spread_bits(uint32_t x) { return (x & 15u) * 0x00204081u & 0x01010101u; }

// The low nibbles of bytes 0-3 of x, side by side in bits 0-15. The high nibbles of x have to be 0.
DEV uint32_t join_nibbles(uint32_t x) {
    x = (x | x >> 4) & 0x00ff00ffu;
    return (x | x >> 8) & 0xffffu;
}

// -- the formats that are only read: IQ1 to IQ3, TQ and NVFP4, for which rocq has no encoder --
// The codebooks as the compiler makes them of the strings in rocq.h. An entry is eight levels of
// IQ2, a byte each; eight digits of IQ1, those of elements 0-3 in bits 3-4 of its bytes, which is 8
// times the digit, and those of elements 4-7 in bits 0-1; or four levels of IQ3, a byte each.
struct codebooks {
    enum { IQ2_XXS = 0, IQ2_XS = 256, IQ2_S = 768, IQ3_XXS = 0, IQ3_S = 256 }; // where each begins
    uint64_t iq2[1792];
    uint32_t iq1[2048], iq3[768];
    // Digit i of entry k of a string whose characters have four digits each, or two of base 8.
    static constexpr uint32_t digit(const char *text, int k, int i, int base) {
        const int per_char = base == 3 ? 4 : 2;
        int c = text[2 * k + i / per_char] - 35;
        for (int n = i % per_char; n > 0; n--) c /= base;
        return (uint32_t)(c % base);
    }
    constexpr void put_iq2(int at, const char *text, int n) {
        for (int k = 0; k < n; k++) {
            for (int i = 0; i < 8; i++) {
                const uint32_t t = digit(text, k, i, 3);
                iq2[at + k] |= (uint64_t)(t == 0 ? 8 : t == 1 ? 25 : 43) << 8 * i;
            }
        }
    }
    constexpr void put_iq1(int at, const char *text) {
        for (int k = 0; k < 1024; k++) {
            for (int i = 0; i < 8; i++) {
                iq1[at + k] |= digit(text, k, i, 3) << (8 * (i % 4) + (i < 4 ? 3 : 0));
            }
        }
    }
    // The eight levels are equally spaced, except that IQ3_XXS's last is 62 instead of 60.
    constexpr void put_iq3(int at, const char *text, int n, uint32_t per_digit, uint32_t first) {
        for (int k = 0; k < n; k++) {
            for (int i = 0; i < 4; i++) {
                const uint32_t level = per_digit * digit(text, k, i, 8) + first;
                iq3[at + k] |= (level == 60 ? 62 : level) << 8 * i;
            }
        }
    }
    constexpr codebooks() : iq2(), iq1(), iq3() {
        put_iq2(IQ2_XXS, ROCQ_CODEBOOK_IQ2_XXS, 256);
        put_iq2(IQ2_XS, ROCQ_CODEBOOK_IQ2_XS, 512);
        put_iq2(IQ2_S, ROCQ_CODEBOOK_IQ2_S, 1024);
        put_iq1(0, ROCQ_CODEBOOK_IQ1_LOW);
        put_iq1(1024, ROCQ_CODEBOOK_IQ1_HIGH);
        put_iq3(IQ3_XXS, ROCQ_CODEBOOK_IQ3_XXS, 256, 8, 4);
        put_iq3(IQ3_S, ROCQ_CODEBOOK_IQ3_S, 512, 2, 1);
    }
};
CONSTANT codebooks codebook_table = codebooks();

// The levels, negative where the byte of negative is 1. No level is 0, so no carry leaves a byte.
DEV uint32_t signed_levels(uint32_t levels, uint32_t negative) {
    return (levels ^ halves_times(negative, 255)) + negative;
}
// Bits 0-7 of signs, each moved to bit 0 of one of eight bytes.
DEV u32x2 spread_signs(uint32_t signs) {
    return make2(spread_bits(signs), spread_bits(signs >> 4));
}
// spread_signs for signs of which only bits 0-6 are stored: bit 7 is their parity. Higher bits are
// ignored. In `moved` bit i of the seven is at i + 7 j for every j < 4, which puts bits 0-3 to bits
// 0, 8, 16 and 24, and bits 4-6 to bits 4, 12 and 20.
DEV u32x2 spread_even_signs(uint32_t signs) {
    const uint32_t seven = signs & 127u, moved = seven * 0x00204081u;
    return make2(moved & 0x01010101u, (moved >> 4 | (uint32_t)__popc(seven) << 24) & 0x01010101u);
}

// Digit n of each of the bytes of b (see rocq_block_tq1_0).
DEV uint32_t digits_3(uint32_t b, uint32_t n) {
    const uint32_t power = n == 4 ? 81u : 0x1b090301u >> 8 * n & 255u;
    const uint32_t even = (b & 0x00ff00ffu) * power & 0x00ff00ffu;
    const uint32_t odd = (b >> 8 & 0x00ff00ffu) * power & 0x00ff00ffu;
    return (even * 3 >> 8 & 0x00030003u) | (odd * 3 & 0x03000300u);
}

// Only loads: what was loaded is used after other loads have been issued. The unit is unit u of the
// block at blocks + at. at and what depends on u are added before the address: then, if I has 32
// bits, an address is a scalar base, one 32-bit offset and a constant.
template <int F, typename I>
DEV raw<F> load_read_unit(const char *blocks, I at, uint32_t u, int32_t format) {
    raw<F> r = {};
    r.format = format;
    // Else the results of ten comparisons of format stay in registers throughout a tile's loop.
    if (F == READ) format = recomputed_scalar(format);
    const char *const block = blocks + at, *const by1 = blocks + (at + (I)u),
               *const by2 = blocks + (at + (I)(2 * u)), *const by4 = blocks + (at + (I)(4 * u)),
               *const by8 = blocks + (at + (I)(8 * u));
    if (format == ROCQ_TQ1_0 || format == ROCQ_TQ2_0) {
        const bool last = format == ROCQ_TQ1_0 && u >= 5; // these need qs[32] to qh[3]
        const char *from =
            blocks + (at + (I)(format == ROCQ_TQ1_0 ? last ? 32 : 0 : u / 4 * 32));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (F == READ && last && i > 4) break; // a register less than without a branch
            r.w[i] = load_by2(last && i > 4 ? from + 16 : from + 4 * i);
        }
        r.d = gload((const uint16_t *)(block + (format == ROCQ_TQ1_0 ? 52 : 64)));
        return r;
    }
    if (format == ROCQ_NVFP4) {
        const char *const from = blocks + (at + (I)(16 * u)) + 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // Only code for planar tensors, whose words are aligned, has its format in F.
            r.w[i] = F == READ ? load_by1(from + 4 * i) : gload((const uint32_t *)from + i);
        }
        if (F != READ) r.s = gload((const uint16_t *)by2);
        else r.s = gload((const uint8_t *)by2) | (uint32_t)gload((const uint8_t *)by2 + 1) << 8;
        return r;
    }
    if (format != ROCQ_IQ1_M) r.d = gload((const uint16_t *)block);
    switch (format) {
    case ROCQ_IQ2_XXS:
    case ROCQ_IQ2_XS:
    case ROCQ_IQ3_XXS:
    case ROCQ_IQ3_S:
        r.w[0] = load_by2(by8 + 2);
        r.w[1] = load_by2(by8 + 6);
        if (format == ROCQ_IQ2_XS) r.s = gload((const uint8_t *)by1 + 66);
        if (format == ROCQ_IQ3_XXS) r.w[2] = load_by2(by4 + 66);
        if (format == ROCQ_IQ3_S) {
            r.w[2] = load_by2(by4 + 74);
            r.w[3] = gload((const uint8_t *)by1 + 66);
            r.s = gload((const uint8_t *)blocks + (at + (I)(u / 2)) + 106);
        }
        break;
    case ROCQ_IQ2_S:
        r.w[0] = load_by2(by4 + 2);
        r.w[1] = load_by2(by4 + 34);
        r.w[2] = gload((const uint8_t *)by1 + 66);
        r.s = gload((const uint8_t *)by1 + 74);
        break;
    case ROCQ_IQ1_S:
        r.w[0] = load_by2(by4 + 2);
        r.w[1] = gload((const uint16_t *)(by2 + 34));
        break;
    default: // IQ1_M
        r.w[0] = load_by2(by4);
        r.w[1] = gload((const uint16_t *)(by2 + 32));
        r.w[2] = load_by2(block + 48);
        r.w[3] = load_by2(block + 52);
        break;
    }
    return r;
}
template <int F, typename I> DEV raw<F> load_read(const planes<F> &p, I unit) {
    const I block = unit >> p.shift;
    const uint32_t u = (uint32_t)(unit - (block << p.shift));
    // Only matvec and matmul_halves have their format in F. They count units from the first of four
    // rows or of 256 units, so 24 bits hold the block for K up to ROCQ__MATMUL_K. In a tile of 128
    // rows NVFP4's blocks need 25.
    const bool fits_24 = F != READ && sizeof(I) == 4;
    const I at = fits_24 ? (block & 0xffffff) * (p.bytes & 0xff) : block * (I)p.bytes;
    return load_read_unit<F>(p.blocks, at, u, p.format);
}

// d is a half, except in NVFP4: its scales are multiples of 2^-10.
template <int F> DEV block_factors read_factors(const raw<F> &r, uint32_t u) {
    block_factors f = {f16_f32((uint16_t)r.d), 0.0f, {1, 1}, {1, 1}};
    uint32_t s = r.s;
    const int32_t format = F == READ ? r.format : F;
    switch (format) {
    case ROCQ_TQ1_0:
    case ROCQ_TQ2_0: return f;
    case ROCQ_NVFP4:
        f.d = 9.765625e-4f;
#pragma unroll
        for (int g = 0; g < 2; g++) {
            // The scale's bits are a float's, denormals included, but for its bias: it is 2^120
            // times this float, and sc 2^9 times the scale. The sum's last bits count quarters.
            const uint32_t stored = r.s >> 8 * g & 255;
            const float quarter = bits<float>((stored & 127) << 20) * 0x1p127f;
            const uint32_t sc = bits<uint32_t>(quarter + 0x1p21f) & 0x7fffff;
            f.sc[g] = (int)(stored == 127 ? 0 : sc);
        }
        return f;
    case ROCQ_IQ2_XXS: s = (r.w[1] >> 28) * 0x11u; break;
    case ROCQ_IQ3_XXS: s = (r.w[2] >> 28) * 0x11u; break;
    case ROCQ_IQ3_S: s = (r.s >> 4 * (u & 1) & 15) * 0x11u; break;
    case ROCQ_IQ1_S: s = (r.w[1] >> 12 & 7) * 0x11u; break;
    case ROCQ_IQ1_M: {
        const uint32_t two = (u & 4 ? r.w[3] : r.w[2]) >> (8 * (u & 2) + 6 * (u & 1));
        s = (two & 7) | (two >> 3 & 7) << 4;
        f.d = f16_f32((uint16_t)((r.w[2] >> 12 & 15) | (r.w[2] >> 24 & 0xf0) |
                                 (r.w[3] >> 4 & 0xf00) | (r.w[3] >> 16 & 0xf000)));
        break;
    }
    default: break;
    }
    f.sc[0] = (int)(2 * (s & 15) + 1);
    f.sc[1] = (int)(2 * (s >> 4 & 15) + 1);
    f.d *= format == ROCQ_IQ3_S ? 1.0f : format == ROCQ_IQ3_XXS ? 0.25f : 0.125f;
    return f;
}

// The codebook's entry for elements 8 l to 8 l + 7 of a unit of IQ1, whose words are low and high,
// and whether 1/8 is subtracted from these elements instead of added.
DEV uint32_t iq1_entry(int32_t format, uint32_t low, uint32_t high, int l) {
    const uint32_t bits_8 = high >> (format == ROCQ_IQ1_S ? 3 : 4) * l & 7;
    return codebook_table.iq1[(low >> 8 * l & 255) | bits_8 << 8];
}
DEV bool iq1_lower(int32_t format, uint32_t high, int l) {
    return (high >> (format == ROCQ_IQ1_S ? 12 : 4 * l) & 8) != 0;
}

template <int F> DEV void read_codes(const raw<F> &r, uint32_t u, uint32_t q[8]) {
    const int32_t format = F == READ ? recomputed_scalar(r.format) : F;
    if (format == ROCQ_TQ1_0 || format == ROCQ_TQ2_0) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint32_t w = r.w[i], n = u;
            // Units 5 and 6: two digits each of 16 bytes. Unit 7: their last one, then four of qh.
            if (format == ROCQ_TQ1_0 && u >= 5) {
                const bool last = u == 7 && i > 3;
                w = last ? r.w[4] : r.w[i & 3];
                n = last ? (uint32_t)(i - 4) : u == 7 ? 4 : 2 * (u - 5) + (uint32_t)(i >> 2);
            }
            w = format == ROCQ_TQ1_0 ? digits_3(w, n) : w >> 2 * (u & 3) & 0x03030303u;
            q[i] = (w + 0x7f7f7f7fu) ^ 0x80808080u; // w - 1
        }
    } else if (format == ROCQ_NVFP4) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32x2 levels = levels_of<ROCQ_MXFP4>(r.w[i]);
            q[(i & 2) * 2 + (i & 1)] = levels.x;
            q[(i & 2) * 2 + (i & 1) + 2] = levels.y;
        }
    } else if (format == ROCQ_IQ3_XXS || format == ROCQ_IQ3_S) {
        const bool xxs = format == ROCQ_IQ3_XXS;
#pragma unroll
        for (int l = 0; l < 4; l++) { // two words each
            const u32x2 negative = xxs ? spread_even_signs(r.w[2] >> 7 * l)
                                       : spread_signs(r.w[2] >> 8 * l);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int i = 2 * l + h;
                uint32_t k = r.w[i >> 2] >> 8 * (i & 3) & 255;
                k += xxs ? codebooks::IQ3_XXS : codebooks::IQ3_S + ((r.w[3] >> i & 1) << 8);
                q[i] = signed_levels(codebook_table.iq3[k], h ? negative.y : negative.x);
            }
        }
    } else if (format == ROCQ_IQ1_S || format == ROCQ_IQ1_M) { // 8 (t - 1 +- 1/8)
#pragma unroll
        for (int l = 0; l < 4; l++) {
            const uint32_t t = iq1_entry(format, r.w[0], r.w[1], l);
            const uint32_t least = iq1_lower(format, r.w[1], l) ? 0x77777777u : 0x79797979u;
            q[2 * l] = ((t & 0x18181818u) + least) ^ 0x80808080u;
            q[2 * l + 1] = ((t << 3 & 0x18181818u) + least) ^ 0x80808080u;
        }
    } else {
#pragma unroll
        for (int l = 0; l < 4; l++) {
            uint32_t k = r.w[0] >> 8 * l & 255;
            u32x2 negative;
            if (format == ROCQ_IQ2_XXS) {
                k += codebooks::IQ2_XXS;
                negative = spread_even_signs(r.w[1] >> 7 * l);
            } else if (format == ROCQ_IQ2_XS) {
                k = r.w[l >> 1] >> 16 * (l & 1);
                negative = spread_even_signs(k >> 9);
                k = codebooks::IQ2_XS + (k & 511);
            } else {
                k = codebooks::IQ2_S + (k | (r.w[2] >> 2 * l & 3) << 8);
                negative = spread_signs(r.w[1] >> 8 * l);
            }
            const uint64_t levels = codebook_table.iq2[k];
            q[2 * l] = signed_levels((uint32_t)levels, negative.x);
            q[2 * l + 1] = signed_levels((uint32_t)(levels >> 32), negative.y);
        }
    }
}

// Elements k to k + 3 of a row of blocks.
DEV void read_values(const char *row, int32_t format, int64_t k, float v[4]) {
    const raw<READ> r = load_read<READ>(read_planes(row, format), k / 32);
    const uint32_t u = (uint32_t)(k / 32) & 7u;
    const int i = (int)(k >> 2) & 7;
    uint32_t q[8];
    read_codes<READ>(r, u, q);
#pragma unroll
    for (int w = 1; w < 8; w++) q[0] = i == w ? q[w] : q[0];
    decode_quad<READ>(q[0], read_factors<READ>(r, u), i, v);
}

// The stored codes of elements 4 i to 4 i + 3 of unit u of a block, a byte each.
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

// The scales of unit u of a block in the form of the planar layout: s, t and d as load_raw gives
// them. The other members are 0.
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
        // Bits 4-5 of sc[g] are at bit 8 (g % 4) + 2 (g / 4) of the block's word and at bit 2 g of
        // the plane's. That is the transpose of a 4 by 4 matrix of two-bit numbers; two exchanges
        // do it.
        r.t = load_by2(b->scales + 8);
        const uint32_t near = (r.t ^ r.t >> 6) & 0x00cc00ccu;
        r.t ^= near ^ near << 6;
        const uint32_t far = (r.t ^ r.t >> 12) & 0x0000f0f0u;
        r.t ^= far ^ far << 12;
        r.d.x = gload(&b->d);
        break;
    }
    case ROCQ_Q4_K:
    case ROCQ_Q5_K: { // its block has the same fields up to the scales
        const rocq_block_q4_K *b = (const rocq_block_q4_K *)(const void *)block;
        // For g < 4 all 6 bits of sc[g] and mn[g] are in byte g of sc and mn. For g >= 4 bits 4-5
        // are the upper two of byte g - 4 there, and bits 0-3 are the nibbles of byte g - 4 of low.
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

// Unit u of a block in the form of the planar layout. gguf_codes spreads the codes to a byte each,
// the one form that all formats share; here they are joined to the nibbles, bit pairs and bits of
// the planes, which is the reverse of decode_code.
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
    if constexpr (has_levels<F>()) q = levels_of<F>(q).x;
    decode_quad<F>(q, decode_factors<F>(gguf_scales<F>(block, u), u), i, v);
}

// ---------------------------------------------------------------------------------------------
// >>quantize: encoders of Q8_0 and Q4_0 blocks, and of planar Q8_0; rotary position of heads
// ---------------------------------------------------------------------------------------------
// 8 neighbouring lanes hold a unit: the lane with lane % 8 == i has elements 4 i to 4 i + 3. The
// lanes exchange values, so all lanes of the wave have to call; live says whether the unit exists.

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

// The nearest value that a scale in F16 can hold and that is finite, as in rocq__f16_limit.
DEV float f16_limit(float v) { return v >= 65520.0f ? 65504.0f : v <= -65520.0f ? -65504.0f : v; }

DEV void store_by2(void *p, uint32_t v) {
    gstore((uint16_t *)p, v & 0xffffu);
    gstore((uint16_t *)p + 1, v >> 16);
}

// The bytes of ggml's reference encoder (see rocq__encode_plain): the element of largest magnitude
// gets the code 127 or -127, a half is rounded away from 0, and NaN becomes -128.
DEV void put_q8_0(char *block, int i, bool live, const float *v) {
    float top = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; e++) top = fmaxf(top, fabsf(v[e]));
    const float d = f16_limit(oct_max(top) / 127.0f), inverse = d != 0.0f ? 1.0f / d : 0.0f;
    const bool none = inverse > 3.40282347e+38f; // d is so small that F16 stores it as 0
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

// As put_q8_0, but the element of largest magnitude, the first of equals, gets level -8. Magnitudes
// are compared as integers because clang 19 drops the fabsf of fabsf(x != 0 ? x : 0), which is the
// first step of a search that begins with 0.
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

// Unit `unit` of a planar Q8_0 tensor of n units, which is x of an INT8 product. It is encoded as
// by rocq__quantize_32, except that d is rounded up to the next F16, so that no code exceeds 127 in
// magnitude. Where d would exceed F16's range the codes are clipped. A unit with a NaN or an
// infinity gets d NaN, and one whose largest magnitude is below 2^-100 gets d 0.
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
DEV uint32_t q8_codes(const float *v, float inverse) { // of four values; 0 if inverse is 0
    uint32_t codes = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float x = fminf(127.0f, fmaxf(-127.0f, v[e] * inverse));
        codes |= (bits<uint32_t>(x + 12582912.0f) & 255u) << 8 * e; // 1.5 2^23: rounds
    }
    return inverse != 0.0f ? codes : 0u;
}
DEV uint32_t q8_top(const float *v) { // bits of the largest magnitude of four values
    uint32_t top = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const uint32_t magnitude = bits<uint32_t>(v[e]) & 0x7fffffffu;
        top = magnitude > top ? magnitude : top;
    }
    return top;
}
DEV void store_q8_codes(void *base, int64_t n, int64_t unit, int i, uint32_t codes) {
    gstore((uint32_t *)base + (i < 4 ? 0 : 4 * n) + 4 * unit + (i & 3), codes);
}
DEV void put_q8_0_planar(void *base, int64_t n, int64_t unit, int i, bool live, const float *v) {
    const q8_block b = q8_block_of(oct_max(q8_top(v)));
    const uint32_t codes = q8_codes(v, b.inverse);
    if (!live) return;
    store_q8_codes(base, n, unit, i, codes);
    if (i == 0) gstore((uint16_t *)base + 16 * n + unit, b.d);
}

// -- quads --
// A quad is four neighbouring elements of a row, 16 bytes in F32. A tensor of F32, F16 or BF16 is
// wide if all its quads are whole and aligned, and so can be loaded at once; others go element by
// element.

DEV uint32_t rows_of(const rocq_k_tensor &t) {
    return (uint32_t)t.ne[1] * (uint32_t)t.ne[2] * (uint32_t)t.ne[3];
}
// Every row is aligned to the lowest bit that is set here.
DEV uint64_t alignment_bits(const rocq_k_tensor &t) {
    return (uint64_t)(uintptr_t)t.data | (uint64_t)t.stride[0] | (uint64_t)t.stride[1] |
           (uint64_t)t.stride[2];
}
DEV bool is_aligned(const rocq_k_tensor &t) { // its quads, of which the last may not be whole
    return (alignment_bits(t) & (t.format == ROCQ_F32 ? 15u : 7u)) == 0;
}
DEV bool is_wide(const rocq_k_tensor &t) { return (t.ne[0] & 3) == 0 && is_aligned(t); }
// How many elements of the quad at k exist in a row of n.
DEV int quad_count(int64_t n, int64_t k) { return n - k < 4 ? n > k ? (int)(n - k) : 0 : 4; }

// A quad of a row, in two steps: quad_load loads it, and quad_floats converts what was loaded, with
// 0 past its `count` elements. Between the two the load is in flight.
DEV u32x4 quad_load(int32_t format, bool wide, const char *row, int64_t k, int count) {
    if (wide && count == 4) {
        if (format == ROCQ_F32) return gload((const u32x4 *)((const float *)row + k));
        const u32x2 h = gload((const u32x2 *)((const uint16_t *)row + k));
        return make4(h.x & 0xffff, h.x >> 16, h.y & 0xffff, h.y >> 16);
    }
    uint32_t w[4];
#pragma unroll
    for (int e = 0; e < 4; e++) w[e] = e < count ? get_bits(format, row, k + e) : 0;
    return make4(w[0], w[1], w[2], w[3]);
}
DEV void quad_floats(int32_t format, const u32x4 &loaded, float v[4]) {
    v[0] = bits_float(format, loaded.x);
    v[1] = bits_float(format, loaded.y);
    v[2] = bits_float(format, loaded.z);
    v[3] = bits_float(format, loaded.w);
}

// load4: elements k to k + count - 1 of a row of F32, F16 or BF16 as in memory, the rest 0.
// floats4: the numbers that they are. In two steps many loads are issued before one is used.
DEV u32x4 load4(int32_t format, const char *row, bool wide, int64_t k, int count) {
    u32x4 w = make4(0, 0, 0, 0);
    if (count == 0) return w;
    if (format == ROCQ_F32) {
        const uint32_t *const from = (const uint32_t *)row + k;
        if (wide) return gload((const u32x4 *)from);
        w.x = gload(from);
        if (count > 1) w.y = gload(from + 1);
        if (count > 2) w.z = gload(from + 2);
        if (count > 3) w.w = gload(from + 3);
        return w;
    }
    const uint16_t *const from = (const uint16_t *)row + k;
    if (wide) {
        const u32x2 h = gload((const u32x2 *)from);
        return make4(h.x, h.y, 0, 0);
    }
    w.x = gload(from);
    if (count > 1) w.x |= (uint32_t)gload(from + 1) << 16;
    if (count > 2) w.y = gload(from + 2);
    if (count > 3) w.y |= (uint32_t)gload(from + 3) << 16;
    return w;
}
DEV void floats4(int32_t format, const u32x4 &w, float v[4]) {
    if (format == ROCQ_F32) {
        v[0] = bits<float>(w.x);
        v[1] = bits<float>(w.y);
        v[2] = bits<float>(w.z);
        v[3] = bits<float>(w.w);
    } else {
        const uint32_t h[4] = {w.x & 0xffffu, w.x >> 16, w.y & 0xffffu, w.y >> 16};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            v[e] = format == ROCQ_F16 ? f16_f32((uint16_t)h[e]) : bf16_f32((uint16_t)h[e]);
        }
    }
}
DEV void get4(int32_t format, const char *row, bool wide, int64_t k, int count, float v[4]) {
    floats4(format, load4(format, row, wide, k, count), v);
}

// Writes elements k to k + count - 1 of a row of F32, F16 or BF16.
DEV void put_floats(int32_t format, bool wide, char *row, int64_t k, int count, const float v[4]) {
    if (wide && format == ROCQ_F32) {
        if (count == 0) return;
        gstore((u32x4 *)((float *)row + k), make4(bits<uint32_t>(v[0]), bits<uint32_t>(v[1]),
                                                   bits<uint32_t>(v[2]), bits<uint32_t>(v[3])));
    } else if (wide) {
        if (count == 0) return;
        uint32_t h[4];
#pragma unroll
        for (int e = 0; e < 4; e++) h[e] = format == ROCQ_F16 ? f32_f16(v[e]) : f32_bf16(v[e]);
        gstore((u32x2 *)((uint16_t *)row + k), make2(h[0] | h[1] << 16, h[2] | h[3] << 16));
    } else {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (e < count) put_float(format, row, k + e, v[e]);
        }
    }
}

// Writes elements k to k + count - 1 of a row of y; r is the row's number in all of y. Formats:
// F32, F16, BF16, Q8_0 and Q4_0 in the GGUF layout, planar Q8_0. All lanes of the wave have to
// call, with count 0 where there is nothing to write, and for block formats with lane % 8 == k / 4
// % 8.
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
    } else {
        put_floats(y.format, wide, row, k, count, v);
    }
}

// -- rows of ROCQ_LAYOUT_HADAMARD --
// v = v H (see >>cpu_rows in rocq.h) for a row of n elements, n % 32 == 0. A lane has N = 4 or 8
// neighbouring elements, from element N i on, where i and the lane's number agree modulo B / N: so
// a block of B elements is in B / N neighbouring lanes. All lanes of the wave have to call. Both N
// give the same bits.

// One round between lanes `mask` apart: the lower one keeps the sum, the upper one the difference.
template <int mask, int N> DEV void hadamard_lanes(float (&v)[N]) {
    const float sign = thread_index() & mask ? -1.0f : 1.0f;
#pragma unroll
    for (int e = 0; e < N; e++) v[e] = fmaf(sign, v[e], wave_xor<mask>(v[e]));
}
template <int N> DEV void hadamard(float (&v)[N], int n) {
#pragma unroll
    for (int step = 1; step < N; step *= 2) {
#pragma unroll
        for (int e = 0; e < N; e++) {
            if (e & step) continue;
            const float x = v[e], y = v[e + step];
            v[e] = x + y;
            v[e + step] = x - y;
        }
    }
    hadamard_lanes<1>(v);
    hadamard_lanes<2>(v);
    if (N == 4) hadamard_lanes<4>(v);
    if ((n & 32) == 0) hadamard_lanes<32 / N>(v);
    if ((n & 96) == 0) hadamard_lanes<64 / N>(v);
    const float factor = n & 32 ? 0.176776695f : n & 64 ? 0.125f : 0.0883883476f; // 1 / sqrt(B)
#pragma unroll
    for (int e = 0; e < N; e++) v[e] *= factor;
}

// -- heads rotated by position --
// Pair i of a head at position p is rotated by p turn(i) / freq_factors[i] full turns, with turn(i)
// as at rocq_k_rotation in rocq.h: (x0, x1) becomes magnitude (x0 cos - x1 sin, x0 sin + x1 cos).
// Only elements below n_dims are rotated. Pair i is elements i and i + n_dims / 2 with NEOX, else
// 2 i and 2 i + 1.

// Sine and cosine of an angle in turns (2 pi), |turns| <= 1/2. The angle is reduced to an eighth of
// a turn on either side of 0, where the Taylor series have errors of 3e-9 (sine) and 2e-9 (cosine).
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

// Puts sine and cosine of pair i into LDS. The fraction of a turn is found in double: a float would
// be off by 0.004 at position 100,000.
DEV void rotation_angle(const rocq_k_rotation &a, int position, int i, float *sine, float *cosine) {
    double turn = 0.15915494309189535; // 1 / (2 pi)
#pragma unroll
    for (int b = 0; b < 8; b++) turn *= i >> b & 1 ? a.power[b] : 1.0;
    if (a.ext_factor > 0.0) {
        const double ramp = fmin(1.0, fmax(0.0, ((double)i - a.low) * a.per_pair));
        const double keep = (1.0 - ramp) * a.ext_factor;
        turn = turn * a.scale * (1.0 - keep) + turn * keep;
    } else {
        turn *= a.scale;
    }
    double turns = (double)position * turn;
    if (a.freq_factors) turns /= (double)gload(a.freq_factors + i);
    const sine_cosine angle = sincos_turns((float)(turns - rint(turns)));
    lput(sine + i, angle.s * a.sine_magnitude);
    lput(cosine + i, angle.c * a.magnitude);
}

// A quad of a head, and the partner of each of its elements.
struct rotation_quad {
    float v[4], p[4];
    int k, count, rotated; // rotated: elements of the quad with a lower number are rotated
};
// Loads quad k of a head and its partners. live: false loads nothing; plain: no element is rotated.
DEV rotation_quad rotation_load(const rocq_k_rotation &a, int32_t format, const char *row,
                                bool wide, int k, bool live, bool plain) {
    const int n = a.head_dim, half = a.n_dims / 2;
    rotation_quad q;
    q.k = k;
    q.count = live ? quad_count(n, k) : 0;
    q.rotated = plain ? 0 : 2 * half - k;
    get4(format, row, wide, k, q.count, q.v);
    if (!a.neox) {
        q.p[0] = q.v[1];
        q.p[1] = q.v[0];
        q.p[2] = q.v[3];
        q.p[3] = q.v[2];
    } else if ((half & 3) == 0) {
        get4(format, row, wide, k < half ? k + half : k - half, q.rotated > 0 ? q.count : 0, q.p);
    } else {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            q.p[e] = 0.0f;
            if (e < q.count && e < q.rotated) {
                q.p[e] = get_float(format, row, k + e < half ? k + e + half : k + e - half);
            }
        }
    }
    return q;
}
// y = the quad, rotated by the angles whose sines and cosines lie in LDS.
DEV void rotation_apply(const rocq_k_rotation &a, const rotation_quad &q, const float *sine,
                        const float *cosine, float (&y)[4]) {
    const int half = a.n_dims / 2;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        y[e] = q.v[e];
        if (e >= q.count || e >= q.rotated) continue;
        const bool second = a.neox ? q.k + e >= half : (e & 1) != 0;
        const int pair = a.neox ? q.k + e - (second ? half : 0) : (q.k + e) / 2;
        const float c = lget(cosine + pair), sn = lget(sine + pair);
        y[e] = fmaf(q.v[e], c, (second ? q.p[e] : -q.p[e]) * sn);
    }
}

// -- repack --
// dst = src in the planar layout, which is drawn in rocq.h (>>kernels).
//
//   src   GGUF layout, any block format, rows at any stride
//   dst   planar, 16-byte aligned; src's units become units unit0 and up of its n_units units
//
// Neighbouring threads take neighbouring units (gguf_raw). Codes are stored with 16, 8 and 4 bytes
// a lane, contiguous over the wave; the scales of a superblock are stored by the lane of its first
// unit.
// Geometry: 256 threads; a block takes 256 units of src, the last block fewer; less than 2^32
// units.
// Bytes: reads and writes the tensor once. Blocks of 18 bytes are aligned to 2 bytes only, so a
// load is of 2 bytes (1 in the MX formats); the lanes of a wave share the cache lines.

template <int F>
DEV void repack_unit(const char *row, uint32_t column, const rocq_k_repack_args &a, int64_t unit) {
    if constexpr (F == READ) { // the block as it is: each of its units copies a part
        const planes<READ> from = read_planes(row, a.src.format);
        const uint32_t u = column & ((1u << from.shift) - 1), bytes = from.bytes;
        const uint8_t *block = (const uint8_t *)planes_at<READ>(from, column).blocks;
        uint8_t *to = (uint8_t *)a.dst + (unit >> from.shift) * bytes;
        for (uint32_t i = bytes * u >> from.shift; i < bytes * (u + 1) >> from.shift; i++) {
            gstore(to + i, gload(block + i));
        }
    } else {
        const uint32_t per_block = gguf_block<F>::elems / 32;
        const char *block = row + (int64_t)(column / per_block) * gguf_block<F>::bytes;
        const raw<F> r = gguf_raw<F>(block, (int)(column % per_block));
        store_raw<F>(planes_of<F>(a.dst, a.n_units), unit, r);
    }
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
    switch (shared_format(a.src.format)) {
#define ROCQ_X(X, f) case ROCQ_K_ID_##f: repack_unit<ROCQ_K_ID_##f>(from, column, a, unit); break;
        BLOCK_FORMATS(ROCQ_X, )
#undef ROCQ_X
    default: break;
    }
}

// 1 / sqrt(sum share + rest). In a function of its own so that the norm kernel and a product that
// norms its x (matvec_row) round alike.
DEV float norm_rstd(float sum, float share, float rest) {
    return 1.0f / sqrtf(fmaf(sum, share, rest));
}

// -- the epilogue of matvec and matmul --

// What a sum goes through on its way to y: the operations of rocq_k_epilogue. bias(), gate() and
// residual() return the operands of this element and are called only if the product has them. v2 is
// the sum of w2, which the result is multiplied by if there is a w2.
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
// A wave takes ROCQ_K_MATVEC_ROWS rows of w through K together. Of each row a lane takes every 32nd
// unit (plain formats: every 32nd vector), so with one load a lane the wave reads 512 contiguous
// bytes of the row's widest plane. As soon as a unit is decoded its registers receive the lane's
// next unit, so the loads of all four rows are nearly always in flight: 2 KB a wave, counting codes
// alone. The load of x, its sums and its scale are shared by the rows; the load of w and its
// decoding are shared by the columns. k_waves waves share a group of rows, each with every
// k_waves-th step of K, which gives more bytes in flight where M is too small to fill the chip. The
// product of two units is an exact integer; it is added to the lane's F32 sum by one fused
// multiply-add, two if there is a min. At the end the lanes' sums are added by DPP (wave_sums),
// those of the waves and of w2 through LDS, and then each thread takes one y through the epilogue.
// w2 is a second pass over K by the same wave.
//
// matvec_row takes one column of floats as x. Each block norms it, if row.norm is set, and encodes
// it as Q8_0 in LDS; that saves a launch. Meanwhile the first lines of w are prefetched
// (matvec_touch).
//
// Geometry: blocks of 256 threads, 8 waves; a block has 32 / k_waves rows of one product (a launch
// with `low` has blocks of 9 waves, and those of product 0 have 8 / k_waves rows). A launch
// has up to four products of the same x; their blocks follow each other (block_begin). LDS: 256 N
// bytes, of matvec_row 4.7 KB. Rows past m repeat row m - 1 and columns past n repeat column n - 1;
// they are not stored.
// Lanes past the end of K load its last unit and add nothing. Planar tensors are aligned to 16
// bytes. y in Q8_0 needs the 32 rows of a unit in one block: k_waves = 1 and m a multiple of 32.
// Bytes: w once from memory, x once a wave from the caches. VALU instructions per 32 weights of
// Q4_0 with n = 1: 12 to decode, 8 dot4 and 4 others, and 8 dot4 and 13 others that the four rows
// share.

// Sums of V values over the 32 lanes; lane l gets the sum of value l % V. As long as a lane has
// several values, it keeps one half of them, gives the other half to lane ^ mask, and adds what it
// is given; so each step halves the number of values. Once there is one, the rest is a plain sum
// over the lanes.
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

// The product of 24-bit integers, which gfx11 computes at full rate.
DEV int mul24(int a, int b) {
    return ((int)((uint32_t)a << 8) >> 8) * ((int)((uint32_t)b << 8) >> 8);
}

// A wave's rows of w, and the units (plain formats: vectors) of a row that a lane takes.
struct matvec_work {
    int64_t row[ROCQ_K_MATVEC_ROWS];
    uint32_t first, step, count; // a lane's first unit, the distance to its next, units of a row
    int32_t format;              // of w, where it is one of those that are only read
};

struct matvec_x { // a unit of a column
    uint32_t q[8];
    float d;
    int sum[2]; // of the codes of each half; in formats without halves [1] is of all 32
};

// Whether units of w keep their E2M1 codes as stored, in four words, for e2m1_dot. Only with one
// column, as e2m1_dot looks the levels up anew for each.
template <int F, int N> DEV constexpr bool is_e2m1() {
    return E2M1_SIGNS && N == 1 && (F == ROCQ_MXFP4 || F == ROCQ_NVFP4);
}
// The word of x for the low nibbles of word i. The one for the high nibbles is two words later in
// NVFP4, four in MXFP4.
template <int F> DEV constexpr int e2m1_low(int i) {
    return F == ROCQ_NVFP4 ? (i & 2) * 2 + (i & 1) : i;
}
template <int F> DEV constexpr int e2m1_high(int i) {
    return e2m1_low<F>(i) + (F == ROCQ_NVFP4 ? 2 : 4);
}

// Whether units of w keep IQ1's entries of the codebook, in four words, for iq1_dots, and the bits
// that iq1_lower reads in a fifth. Only with one column: iq1_dots has some more instructions for
// each column than eight dots of decoded codes.
template <int F, int N> DEV constexpr bool is_iq1() {
    return N == 1 && (F == ROCQ_IQ1_S || F == ROCQ_IQ1_M);
}
// The dots of both halves. With a digit t of 0 to 2 a code is 8 (t - 1) + 1, or 8 (t - 1) - 1 where
// iq1_lower says so. So the dot of eight codes is that of 8 t, less 7 or 9 times the sum of x. The
// compiler computes that sum once for all rows.
template <int F> DEV void iq1_dots(const uint32_t q[8], const matvec_x &x, int dot[2]) {
    const int ones = 0x01010101;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int sum[2];              // of x, for each eight
        int first = 0, last = 0; // products of the eights' elements 0-3, and of their elements 4-7
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int l = 2 * h + i;
            sum[i] = dot4((int)x.q[2 * l + 1], ones, dot4((int)x.q[2 * l], ones, 0));
            first = dot4((int)(q[l] & 0x18181818u), (int)x.q[2 * l], first);
            last = dot4((int)(q[l] & 0x03030303u), (int)x.q[2 * l + 1], last);
        }
        dot[h] = first + 8 * last - 7 * (sum[0] + sum[1]);
#pragma unroll
        for (int i = 0; i < 2; i++) dot[h] -= iq1_lower(F, q[4], 2 * h + i) ? 2 * sum[i] : 0;
    }
}

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

// sum plus the product of a unit of w and one of x.
template <int F, int N>
DEV float matvec_add(float sum, const uint32_t q[8], const block_factors &f, const matvec_x &x) {
    typedef block_layout<F> l;
    if constexpr (is_e2m1<F, N>()) {
        int plus[2] = {0, 0}, minus[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int h = l::halves ? i / 2 : 0;
            e2m1_dot(q[i], x.q[e2m1_low<F>(i)], x.q[e2m1_high<F>(i)], plus[h], minus[h]);
        }
        const float d = f.d * x.d;
        if (!l::halves) return fmaf(d, (float)(plus[0] - minus[0]), sum);
        sum = fmaf(d * (float)f.sc[0], (float)(plus[0] - minus[0]), sum);
        return fmaf(d * (float)f.sc[1], (float)(plus[1] - minus[1]), sum);
    } else if constexpr (l::halves) {
        int dot[2];
        if constexpr (is_iq1<F, N>()) {
            iq1_dots<F>(q, x, dot);
        } else {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                dot[h] = -l::offset * x.sum[h];
#pragma unroll
                for (int i = 4 * h; i < 4 * h + 4; i++) {
                    dot[h] = dot4((int)q[i], (int)x.q[i], dot[h]);
                }
            }
        }
        // NVFP4's products of a scale and a dot do not fit 32 bits.
        if constexpr (F == READ || F == ROCQ_NVFP4) {
            const float d = f.d * x.d;
            sum = fmaf(d * (float)f.sc[0], (float)dot[0], sum);
            return fmaf(d * (float)f.sc[1], (float)dot[1], sum);
        }
        sum = fmaf(f.d * x.d, (float)(mul24(dot[0], f.sc[0]) + mul24(dot[1], f.sc[1])), sum);
        if (l::has_min) {
            const int mins = mul24(x.sum[0], f.mn[0]) + mul24(x.sum[1], f.mn[1]);
            sum = fmaf(-f.dmin * x.d, (float)mins, sum);
        }
    } else {
        int dot = l::offset ? -l::offset * x.sum[1] : 0;
#pragma unroll
        for (int i = 0; i < 8; i++) dot = dot4((int)q[i], (int)x.q[i], dot);
        sum = fmaf(f.d * x.d, (float)dot, sum);
        if (l::has_min) sum = fmaf(-f.dmin, x.d * (float)x.sum[1], sum);
    }
    return sum;
}

// Where a wave's rows are. Formats with many planes, or many columns, would need too many scalar
// registers for the addresses of each row; then all rows use the addresses of the first one
// (SHARED) with 32-bit offsets in units.
template <int F, bool SHARED> struct matvec_rows {
    planes<F> row[SHARED ? 1 : ROCQ_K_MATVEC_ROWS];
    uint32_t offset[ROCQ_K_MATVEC_ROWS];
};
template <int F, bool SHARED>
DEV matvec_rows<F, SHARED> matvec_rows_of(const void *w, int64_t n_units, int64_t units,
                                          const matvec_work &work) {
    const planes<F> tensor = planes_of<F>(w, n_units, work.format);
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
    return load_raw<F, ONCE>(rows.row[SHARED ? 0 : r], unit + rows.offset[r]);
}
template <int F> DEV constexpr bool many_planes() {
    typedef block_layout<F> l;
    return (l::n != 0) + (l::c != 0) + (l::b != 0) + (l::s != 0) + (l::t != 0) + 1 > 3;
}

template <int F, int N> DEV matvec_x matvec_x_of(const raw<ROCQ_Q8_0> &r) {
    matvec_x x;
#pragma unroll
    for (int i = 0; i < 8; i++) x.q[i] = decode_code<ROCQ_Q8_0>(r, i);
    if constexpr (is_e2m1<F, N>()) {
#pragma unroll
        for (int i = 0; i < 4; i++) e2m1_order(x.q[e2m1_low<F>(i)], x.q[e2m1_high<F>(i)]);
    }
    x.d = f16_f32((uint16_t)r.d.x);
    matvec_x_sums<F>(x);
    return x;
}

DEV void e2m1_words(const raw<ROCQ_MXFP4> &r, uint32_t q[8]) {
    q[0] = r.n.x;
    q[1] = r.n.y;
    q[2] = r.n.z;
    q[3] = r.n.w;
}
DEV void e2m1_words(const raw<ROCQ_NVFP4> &r, uint32_t q[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) q[i] = r.w[i];
}

template <int F> DEV void iq1_words(const raw<F> &r, uint32_t q[8]) {
#pragma unroll
    for (int l = 0; l < 4; l++) q[l] = iq1_entry(F, r.w[0], r.w[1], l);
    q[4] = r.w[1];
}

// A decoded unit of w. In formats without halves d and dmin are multiplied by their integers here,
// once for all columns.
template <int F> struct matvec_unit {
    uint32_t q[8];
    block_factors f;
};
template <int F, int N> DEV matvec_unit<F> matvec_unit_of(const raw<F> &r, uint32_t at) {
    matvec_unit<F> u;
    u.f = decode_factors<F>(r, at);
    if (!block_layout<F>::halves) {
        u.f.d *= (float)u.f.sc[0];
        u.f.dmin *= (float)u.f.mn[0];
    }
    if constexpr (is_e2m1<F, N>()) e2m1_words(r, u.q);
    else if constexpr (is_iq1<F, N>()) iq1_words(r, u.q);
    else decode_codes<F>(r, at, u.q);
    return u;
}

// A block of matvec_row_* makes its own x, one column in planar Q8_0 in LDS: codes 0-15 of all
// units, then codes 16-31, then the scales. Thread t has quads t, t + 256, ... of the row, as in
// the norm kernel, so that the sum of the squares has the same bits. QUADS is how many a thread has
// of the longest row that the instance is for; past the end of a row it loads quad 0 again.
enum {
    ROW_UNITS = ROCQ_K_MATVEC_ROW_K / 32,
    ROW_VECTORS = ROW_UNITS * 17 / 8 // of LDS
};
template <int QUADS> DEV void matvec_row_load(const void *row, int n, float (&v)[QUADS][4]) {
#pragma unroll
    for (int j = 0; j < QUADS; j++) {
        const int quad = j * 256 + (int)thread_index();
        decode_vector<ROCQ_F32>(gload((const u32x4 *)row + (4 * quad < n ? quad : 0)), 0, v[j]);
    }
}

// Maxima of V values over 8 neighbouring lanes, halved as in wave_sums: lane l gets that of value
// l % V. oct_spread is the way back: v[i] becomes what lane i of the 8 has, for i < V.
template <int V, int mask> DEV uint32_t oct_maxima(const uint32_t *v) {
    if constexpr (V == 1) {
        const uint32_t other = wave_xor<mask>(v[0]), top = v[0] > other ? v[0] : other;
        if constexpr (mask == 4) return top;
        else return oct_maxima<1, mask * 2>(&top);
    } else {
        const bool odd = (thread_index() & mask) != 0;
        uint32_t half[V / 2];
#pragma unroll
        for (int i = 0; i < V / 2; i++) {
            const uint32_t own = odd ? v[2 * i + 1] : v[2 * i];
            const uint32_t other = wave_xor<mask>(odd ? v[2 * i] : v[2 * i + 1]);
            half[i] = own > other ? own : other;
        }
        return oct_maxima<V / 2, mask * 2>(half);
    }
}
template <int V, int mask> DEV void oct_spread(float *v) { // v[0 .. mask - 1] are known
    if constexpr (mask < V) {
        const bool odd = (thread_index() & mask) != 0;
#pragma unroll
        for (int i = 0; i < mask; i++) {
            const float own = v[i], other = wave_xor<mask>(own);
            v[i] = odd ? other : own;
            v[i + mask] = odd ? own : other;
        }
        oct_spread<V, mask * 2>(v);
    }
}

// v = v / sqrt(sum v^2 / K + eps) w, as the norm kernel computes it.
template <int QUADS>
DEV void matvec_row_norm(const rocq_k_matvec_args &a, float (&v)[QUADS][4],
                         const float (&w)[QUADS][4], float *work) {
    const int t = (int)thread_index(), n = a.k;
    float square = 0.0f;
#pragma unroll
    for (int j = 0; j < QUADS; j++) {
        float sum = square;
#pragma unroll
        for (int e = 0; e < 4; e++) sum = fmaf(v[j][e], v[j][e], sum);
        if (4 * (j * 256 + t) < n) square = sum;
    }
    const float rstd = norm_rstd(block_sum(square, work), 1.0f / (float)n, a.row.eps);
#pragma unroll
    for (int j = 0; j < QUADS; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) v[j][e] *= rstd;
    }
    if (a.row.weight) {
#pragma unroll
        for (int j = 0; j < QUADS; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) v[j][e] *= w[j][e];
        }
    }
}

// Encodes v as Q8_0 in LDS and, with put, in a.row.y.
template <int QUADS>
DEV void matvec_row_encode(const rocq_k_matvec_args &a, const float (&v)[QUADS][4], bool put,
                           u32x4 *lds) {
    const int t = (int)thread_index(), n = a.k, i = t & 7;
    uint32_t top[QUADS];
#pragma unroll
    for (int j = 0; j < QUADS; j++) top[j] = q8_top(v[j]);
    const q8_block b = q8_block_of(oct_maxima<QUADS, 1>(top)); // of the lane's quad i % QUADS
    float inverse[QUADS];
    inverse[0] = b.inverse;
    oct_spread<QUADS, 1>(inverse);
    const int mine = (i % QUADS * 256 + t) / 8;
    uint32_t codes[QUADS];
#pragma unroll
    for (int j = 0; j < QUADS; j++) {
        const int unit = (j * 256 + t) / 8;
        codes[j] = q8_codes(v[j], inverse[j]);
        lput((uint32_t *)lds + (i < 4 ? 0 : 4 * ROW_UNITS) + 4 * unit + (i & 3), codes[j]);
    }
    if (i < QUADS) lput((uint16_t *)(lds + 2 * ROW_UNITS) + mine, b.d);
    if (put) {
#pragma unroll
        for (int j = 0; j < QUADS; j++) {
            const int unit = (j * 256 + t) / 8;
            if (32 * unit < n) store_q8_codes(a.row.y, n / 32, unit, i, codes[j]);
        }
        if (i < QUADS && 32 * mine < n) gstore((uint16_t *)a.row.y + n / 2 + mine, b.d);
    }
}
// A barrier that the waves of a block meet at from several places of the code.
DEV void matvec_meet() { block_sync_lds(); }
template <int QUADS>
DEV void matvec_row_stage(const rocq_k_matvec_args &a, float (&v)[QUADS][4],
                          const float (&w)[QUADS][4], bool put, u32x4 *lds, float *work) {
    if (a.row.norm) matvec_row_norm(a, v, w, work);
    matvec_row_encode(a, v, put, lds);
    matvec_meet();
}
DEV raw<ROCQ_Q8_0> matvec_row_unit(const u32x4 *lds, uint32_t unit) {
    const uint16_t d = lget((const uint16_t *)(lds + 2 * ROW_UNITS) + unit);
    return {lget(lds + unit), lget(lds + ROW_UNITS + unit), make4(d, 0, 0, 0), 0, 0, 0};
}

// Where a matvec's x in Q8_0 is: in memory, for a product or for the experts of a token, or in LDS,
// made there by a block of matvec_row_*.
enum { X_IN_MEMORY, X_OF_EXPERTS, X_IN_LDS };

// The loop over K of matvec_int8_sums has two forms. In one, which RDNA3 always has, a step loads
// the weights that the next step multiplies. In the other a step multiplies the weights that it has
// loaded itself, which takes fewer instructions and leaves registers for more loads at once. This
// returns 0 for the first form, and for the second how often its loop is unrolled. On an H200 with
// one column the second takes 0.85 to 0.98 of the first's time with x in LDS (4096 x 4096), if it
// is unrolled in those formats whose units need few registers. With x in memory and the registers
// of matvec_waves it takes 0.83 to 1.0 (4096 x 14336), but 1.0 to 1.1 in Q8_0, Q2_K and MXFP4.
// Experts take 0.96 to 1.08 for one token and 1.02 to 1.07 for four.
constexpr int matvec_unrolling(int format, int n, int x) {
    const bool small = format == ROCQ_Q4_0 || format == ROCQ_Q4_1 || format == ROCQ_Q8_0 ||
                       format == ROCQ_Q2_K || format == ROCQ_Q3_K || format == ROCQ_Q4_K ||
                       format == ROCQ_IQ4_NL || format == ROCQ_MXFP4;
    const bool slower = format == ROCQ_Q8_0 || format == ROCQ_Q2_K || format == ROCQ_MXFP4;
    if (!WMMA_TILES || n > 1 || x == X_OF_EXPERTS || (x == X_IN_MEMORY && slower)) return 0;
    return x == X_IN_LDS && small ? 4 : 1;
}
// The same for device code, in which nvcc takes constants but no functions of the host.
template <int F, int N, int FROM>
static constexpr int matvec_unrolled = matvec_unrolling(F, N, FROM);

// Adds to the lane's sums; sums[ROWS c + r] is of row r and column c. Loads return in the order in
// which they are issued, so the loads of x are issued before those loads of w that are needed
// later.
template <int F, int N, int FROM>
DEV void matvec_int8_sums(const rocq_k_matvec_args &a, const void *w, int64_t n_units,
                          const u32x4 *row_x, const matvec_work &work, float *sums) {
    enum {
        ROWS = ROCQ_K_MATVEC_ROWS, SHARED = N > 1 || many_planes<F>(),
        ROW = FROM == X_IN_LDS, UNROLLED = matvec_unrolled<F, N, FROM>, EARLY = UNROLLED == 0
    };
    const int64_t units = a.k / 32;
    const matvec_rows<F, SHARED> rows = matvec_rows_of<F, SHARED>(w, n_units, units, work);
    const planes<ROCQ_Q8_0> x0 =
        planes_at<ROCQ_Q8_0>(planes_of<ROCQ_Q8_0>(a.x, a.x_units), a.x_column0 * units);
    uint32_t column[N]; // units from x0
#pragma unroll
    for (int c = 0; c < N; c++) column[c] = (uint32_t)((c < a.n ? c : a.n - 1) * units);
    const uint32_t last = work.count - 1;
    uint32_t at = work.first;
    computed(at); // else the addresses of the first loads stay in registers throughout
    uint32_t next = at < last ? at : last;
    raw<ROCQ_Q8_0> r_x;
    raw<F> r_w[ROWS];
    if constexpr (!ROW && EARLY) r_x = load_raw<ROCQ_Q8_0>(x0, column[0] + next);
#pragma unroll
    for (int r = 0; EARLY && r < ROWS; r++) r_w[r] = matvec_load(rows, r, next);
    loads_issued();
#pragma unroll EARLY ? 1 : UNROLLED
    for (; at < work.count; at += work.step) {
        if constexpr (!ROW && !EARLY) r_x = load_raw<ROCQ_Q8_0>(x0, column[0] + at);
#pragma unroll
        for (int r = 0; !EARLY && r < ROWS; r++) r_w[r] = matvec_load(rows, r, at);
        if constexpr (!EARLY) loads_issued();
        next = at + work.step < last ? at + work.step : last;
        matvec_unit<F> u[ROWS];
        // Formats that are only read are decoded ahead of the loop over columns: with that inside
        // it, clang 19 does not unroll the loop and keeps u in memory.
        enum { AHEAD = is_read<F>() && N > 1 };
        if constexpr (AHEAD) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                u[r] = matvec_unit_of<F, N>(r_w[r], at);
                r_w[r] = matvec_load(rows, r, next);
                loads_issued();
            }
        }
#pragma unroll
        for (int c = 0; c < N; c++) {
            if constexpr (ROW) r_x = matvec_row_unit(row_x, at);
            const matvec_x x = matvec_x_of<F, N>(r_x);
            if constexpr (!ROW && EARLY) {
                r_x = load_raw<ROCQ_Q8_0>(x0, c + 1 < N ? column[c + 1] + at : column[0] + next);
                loads_issued();
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (!AHEAD && c == 0) u[r] = matvec_unit_of<F, N>(r_w[r], at);
                if (EARLY && !AHEAD && c == N - 1) {
                    r_w[r] = matvec_load(rows, r, next);
                    loads_issued();
                }
                sums[ROWS * c + r] = matvec_add<F, N>(sums[ROWS * c + r], u[r].q, u[r].f, x);
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

// Adds the products of four values of each row, v, with the same four of each column of F32 x.
template <int N>
DEV void matvec_f32_add(float *sums, const char *const column[N], uint32_t offset,
                        const float (&v)[ROCQ_K_MATVEC_ROWS][4]) {
    enum { ROWS = ROCQ_K_MATVEC_ROWS };
#pragma unroll
    for (int c = 0; c < N; c++) {
        const u32x4 x = gload((const u32x4 *)(column[c] + offset));
        float four[4];
        decode_vector<ROCQ_F32>(x, 0, four);
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

// As matvec_int8_sums, but with products in F32, for block formats; the values of w have the bits
// that they have on the CPU. A unit is multiplied in four quarters of 8 weights. They are a loop
// that shifts the codes down, because unrolled a unit and 8 columns would be a thousand
// instructions.
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
    computed(at); // else the addresses of the first loads stay in registers throughout
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

// As matvec_f32_sums, for F32, F16 and BF16. It goes by 16-byte vectors, or by elements where a row
// is not a whole number of vectors or not aligned. On an H200 with one column a loop that uses what
// it has just loaded, four times unrolled, takes 0.98 of the time at 4096 x 4096.
template <int F, int N, int FROM>
DEV void matvec_plain_sums(const rocq_k_matvec_args &a, const void *w, const matvec_work &work,
                           float *sums) {
    enum {
        ROWS = ROCQ_K_MATVEC_ROWS, ELEMS = vector_elems<F>(), SIZE = 16 / ELEMS,
        EARLY = !WMMA_TILES || N > 1 || FROM == X_OF_EXPERTS // whether w is loaded a step ahead
    };
    const char *column[N], *row[ROWS];
#pragma unroll
    for (int c = 0; c < N; c++) column[c] = matvec_column(a, c);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        // Elements are counted, not bytes: a 64-bit product with k times 2 or 4 would be computed
        // in vector registers instead of scalar ones.
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
    computed(at); // else the addresses of the first loads stay in registers throughout
    uint32_t next = at < last ? at : last;
    u32x4 r_w[ROWS];
#pragma unroll
    for (int r = 0; EARLY && r < ROWS; r++) {
        r_w[r] = gload<ONCE>((const u32x4 *)(row[r] + next * 16));
    }
    loads_issued();
#pragma unroll EARLY ? 1 : 4
    for (; at < count; at += work.step) {
        next = at + work.step < last ? at + work.step : last;
        u32x4 vector[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            vector[r] = EARLY ? r_w[r] : gload<ONCE>((const u32x4 *)(row[r] + at * 16));
            if (EARLY) r_w[r] = gload<ONCE>((const u32x4 *)(row[r] + next * 16));
        }
        loads_issued();
#pragma unroll
        for (int i = 0; i < ELEMS / 4; i++) {
            float v[ROWS][4];
#pragma unroll
            for (int r = 0; r < ROWS; r++) decode_vector<F>(vector[r], i, v[r]);
            matvec_f32_add<N>(sums, column, at * (ELEMS * 4) + (uint32_t)i * 16, v);
        }
    }
}

// One wave's share of a product: ROWS rows from `row` on, over k_wave's steps of K. The sums go to
// out[pass][wave][ROWS c + r], with out at this wave; pass 0 is w and pass 1 is w2.
template <int F, int N, bool INT8, int FROM>
DEV void matvec_products(const rocq_k_matvec_args &a, const rocq_k_matvec_weights &p, int row,
                         int k_wave, int k_step, const u32x4 *row_x, float *out) {
    enum { ROWS = ROCQ_K_MATVEC_ROWS, SLOT = ROWS * N };
    matvec_work work;
#pragma unroll
    for (int r = 0; r < ROWS; r++) work.row[r] = p.row0 + (row + r < p.m ? row + r : p.m - 1);
    work.first = (uint32_t)(k_wave * ROCQ_K_WAVE + lane_index());
    work.step = (uint32_t)k_step;
    work.count = (uint32_t)a.k / 32;
    work.format = F == READ ? p.format : F;
    const int passes = p.w2 ? 2 : 1;
#pragma unroll 1
    for (int pass = 0; pass < passes; pass++) {
        const void *w = pass ? p.w2 : p.w;
        float sums[ROWS * N];
#pragma unroll
        for (int i = 0; i < ROWS * N; i++) sums[i] = 0.0f;
        if constexpr (INT8) matvec_int8_sums<F, N, FROM>(a, w, p.n_units, row_x, work, sums);
        else if constexpr (is_plain<F>()) matvec_plain_sums<F, N, FROM>(a, w, work, sums);
        else matvec_f32_sums<F, N>(a, w, p.n_units, work, sums);
        const float sum = wave_sums<SLOT, 1>(sums);
        if (lane_index() < SLOT) lput(out + pass * ROCQ_K_MATVEC_WAVES * SLOT + lane_index(), sum);
    }
}

// matvec_products where F may stand for several formats: branches to the product's format.
enum { MATVEC_MIXED = -1, MATVEC_LOW = -2 }; // LOW: the formats of ROCQ_K_LOW_FORMATS
template <int F, int N, bool INT8, int FROM>
DEV void matvec_share(const rocq_k_matvec_args &a, const rocq_k_matvec_weights &p, int row,
                      int k_wave, int k_step, const u32x4 *row_x, float *out) {
#define ROCQ_X(X, f)                                                                      \
    case ROCQ_K_ID_##f:                                                                   \
        matvec_products<ROCQ_K_ID_##f, N, INT8, FROM>(a, p, row, k_wave, k_step, row_x, out); \
        break;
    if constexpr (F == MATVEC_MIXED) {
        switch (p.format) {
            ROCQ_K_CODED_FORMATS(ROCQ_X, )
        default: break;
        }
    } else if constexpr (F == MATVEC_LOW) {
        int32_t format = p.format;
#define ROCQ_X_LOW(X, f)                                                                         \
    if (format == ROCQ_K_ID_##f) {                                                               \
        matvec_products<ROCQ_K_ID_##f, N, INT8, FROM>(a, p, row, k_wave, k_step, row_x, out);    \
        return;                                                                                  \
    }                                                                                            \
    held(format);
        ROCQ_K_LOW_FORMATS(ROCQ_X_LOW, )
#undef ROCQ_X_LOW
    } else if constexpr (F == READ && INT8) {
        switch (p.format) {
            ROCQ_K_READ_FORMATS(ROCQ_X, )
        default: break;
        }
    } else {
        matvec_products<F, N, INT8, FROM>(a, p, row, k_wave, k_step, row_x, out);
    }
#undef ROCQ_X
}

// What a block works on, which of its waves this is, and the block's LDS.
struct matvec_at {
    uint32_t block;
    int product, first_row, wave, k_shift;
    float *sums, *work;
    u32x4 *row_x;
};

// Each thread finishes one y. This is all that it needs besides the sums. It is loaded before the
// barrier, so that the loads of bias, gate and residual are in flight while other waves still
// multiply.
struct matvec_tail {
    int r, c;  // row, counted from the block's first one, and column
    bool live; // this y exists
    int m, k_shift;
    char *y;
    int64_t y_stride;
    int32_t y_format, y_layout, gate_format, residual_format;
    float bias;
    uint32_t gate, residual; // as in memory
    float lora[2];           // what adapters add to w x and w2 x
    epilogue e;
};
// What an adapter adds to the sum of a row and column.
DEV float matvec_lora(const rocq_k_lora &lora, int row, int c) {
    const u32x4 *const b = (const u32x4 *)((const char *)lora.b + row * lora.b_stride);
    const u32x4 *const t = (const u32x4 *)((const char *)lora.t + c * lora.t_stride);
    const int count = lora.rank / 8;
    float sum = 0.0f;
#pragma unroll 2
    for (int i = 0; i < count; i++) {
        const u32x4 w = gload(b + i), x[2] = {gload(t + 2 * i), gload(t + 2 * i + 1)};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float u[4], v[4];
            decode_vector<ROCQ_F16>(w, h, u);
            decode_vector<ROCQ_F32>(x[h], 0, v);
#pragma unroll
            for (int e = 0; e < 4; e++) sum = fmaf(u[e], v[e], sum);
        }
    }
    return lora.scale * sum;
}
DEV void matvec_tail_lora(const rocq_k_matvec_args &a, int product, int row, matvec_tail &t) {
    t.lora[0] = matvec_lora(a.lora[product][0], row, t.c);
    t.lora[1] = matvec_lora(a.lora[product][1], row, t.c);
}
// k_shift of a product: with LOW product 0 has one of its own, which follows from k_step.
template <bool LOW> DEV int matvec_k_shift(const rocq_k_matvec_args &a, int product) {
    return LOW && product == 0 ? __ffs(a.k_step / ROCQ_K_WAVE) - 1 : a.k_shift;
}
// With LOW one wave has all rows of the block, and matvec_low_wave finds what adapters add.
template <bool LOW>
DEV matvec_tail matvec_tail_of(const rocq_k_matvec_args &a0, int product, int first_row) {
    const rocq_k_matvec_args &a = LOW ? reread_anew(a0) : reread(a0);
    const rocq_k_matvec_product &p = a.product[product];
    const float *bias = p.bias;
    const char *gate = (const char *)p.gate, *residual = (const char *)p.residual;
    const int64_t gate_stride = p.gate_stride, residual_stride = p.residual_stride;
    const int n = a.n;
    const void *w2 = p.weights.w2;
    matvec_tail t;
    t.m = p.weights.m;
    t.k_shift = matvec_k_shift<LOW>(a, product);
    t.y = (char *)p.y;
    t.y_stride = p.y_stride;
    t.y_format = p.y_format;
    t.y_layout = p.y_layout;
    t.gate_format = p.gate_format;
    t.residual_format = p.residual_format;
    t.e.activation = p.activation;
    t.e.softcap = p.softcap;
    const int has_lora = p.has_lora;
    read_together(bias, gate, residual, gate_stride, residual_stride, n, w2, t.m, t.k_shift, t.y,
                  t.y_stride, t.y_format, t.y_layout, t.gate_format, t.residual_format,
                  t.e.activation, t.e.softcap, has_lora);
    const int rows_log2 = 5 - t.k_shift;
    const int thread = LOW ? lane_index() : (int)thread_index();
    t.r = thread & ((1 << rows_log2) - 1);
    t.c = thread >> rows_log2;
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
    t.lora[0] = t.lora[1] = 0.0f;
    if (t.live && has_lora && !LOW) matvec_tail_lora(a, product, row, t);
    return t;
}

// Keeps the fields that are used at the end in registers.
DEV void matvec_tail_hold(matvec_tail &t) {
    int32_t live = t.live, has_bias = t.e.has_bias, has_w2 = t.e.has_w2;
    int32_t has_gate = t.e.has_gate, has_residual = t.e.has_residual;
    held(live), held(has_bias), held(has_w2), held(has_gate), held(has_residual);
    held(t.e.activation), held(t.e.softcap), held(t.k_shift), held(t.y), held(t.y_format);
    held(t.gate_format), held(t.residual_format);
    t.live = live != 0;
    t.e.has_bias = has_bias != 0;
    t.e.has_w2 = has_w2 != 0;
    t.e.has_gate = has_gate != 0;
    t.e.has_residual = has_residual != 0;
}

// The index in LDS of the first sum of a thread's y. Each of the 1 << k_shift waves that share the
// row has one sum; they are SLOT floats apart.
template <int N> DEV int matvec_slot(const matvec_tail &t) {
    enum { ROWS = ROCQ_K_MATVEC_ROWS, SLOT = ROWS * N };
    return (t.r / ROWS << t.k_shift) * SLOT + t.c * ROWS + t.r % ROWS;
}

// A thread's sums of w x and of w2 x: those of the waves that share its row, in their order.
struct matvec_pair {
    float v, v2;
};
template <int N> DEV matvec_pair matvec_pair_of(const matvec_tail &t, const float *sums) {
    enum { SLOT = ROCQ_K_MATVEC_ROWS * N, PASS = ROCQ_K_MATVEC_WAVES * SLOT };
    const int slot = matvec_slot<N>(t);
    matvec_pair p = {lget(sums + slot), t.e.has_w2 ? lget(sums + PASS + slot) : 1.0f};
    for (int k = 1; k < 1 << t.k_shift; k++) {
        p.v += lget(sums + slot + k * SLOT);
        if (t.e.has_w2) p.v2 += lget(sums + PASS + slot + k * SLOT);
    }
    return p;
}

DEV float matvec_y(const matvec_tail &t, const matvec_pair &p) {
    return epilogue_apply(
        t.e, p.v + t.lora[0], p.v2 + t.lora[1], [&] { return t.bias; },
        [&] { return bits_float(t.gate_format, t.gate); },
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

// Stores y at the tail's row and column.
template <int N>
DEV void matvec_put(const rocq_k_matvec_args &a, const matvec_tail &t, int first_row, float *sums,
                    float y) {
    if (t.y_format == ROCQ_Q8_0) matvec_put_q8_0<N>(a, t, first_row, sums, y);
    else put_float(t.y_format, t.y + t.c * t.y_stride, first_row + t.r, y);
}

// A prefetch for the time in which the block makes x: loads a word of the first unit that the lane
// takes of each of its rows, which brings the lines of the rows' widest plane into the caches.
template <int F>
DEV void matvec_touch(const rocq_k_matvec_weights &p, int row, int units, int k_wave,
                      uint32_t (&touched)[ROCQ_K_MATVEC_ROWS]) {
    const int format = F < 0 ? p.format : F;
    const int bytes = format == ROCQ_Q2_K || format == ROCQ_Q3_K ? 8 : 16; // of a unit
    const uint32_t at = (uint32_t)min(k_wave * ROCQ_K_WAVE + lane_index(), units - 1);
#pragma unroll
    for (int r = 0; r < ROCQ_K_MATVEC_ROWS; r++) {
        const int64_t unit = (p.row0 + min(row + r, p.m - 1)) * units;
        const char *from = (const char *)p.w + unit * bytes + at * (uint32_t)bytes;
        if constexpr (F == READ) { // the word of the block that the unit's bytes begin in
            const planes<READ> w = read_planes(p.w, p.format);
            from = w.blocks + ((int64_t)(unit * w.bytes + at * w.bytes) >> w.shift & ~3ll);
        }
        touched[r] = gload((const uint32_t *)from);
    }
}
// `low` of rocq_k_matvec_args: the blocks of product 0 make t = A x, which the other blocks of the
// launch read. Each number of t has a word in memory, which is 0 until the number is known, and
// then the complement of its bits. So a block that waits for t polls these words alone, and the
// first value other than 0 that it sees is t itself. With a flag beside t there would be a fence
// and a second trip to memory between a product's sum and the epilogue that needs it.
// There are two sets of words, which launches use by turns. The blocks of product 0 zero the set
// that the next launch will use; the launch before, which used it last, has ended. The highest bit
// of a.low.words[0] says which set it is. A launch adds 1 << 31 to that word in total: block 0 adds
// 1 << 31 less the number of the other blocks, and each of these adds 1 once it has seen which set
// it is. So the highest bit changes only when all blocks have looked, and all of them find the same
// bit.
// With `low` a block has one wave more, which multiplies no weights. While the others do, it reads
// what the epilogue needs, waits for t and makes B t; once their sums are there, it stores y.
enum { MATVEC_LOOKS = 4096 }; // polls of a word until a block gives up: some milliseconds
DEV uint32_t *matvec_low_words(const rocq_k_matvec_args &a, uint32_t turn) {
    return a.low.words + ROCQ_K_LOW_TURN + turn * ROCQ_K_MATVEC_LOW;
}
DEV void matvec_low_put(uint32_t *words, int row, float t) {
    const uint32_t word = ~bits<uint32_t>(t);
    atomic_or(words + row, word != 0 ? word : 1); // 0 would be a NaN's: another NaN takes its place
}
DEV void matvec_low_clear(const rocq_k_matvec_args &a, uint32_t block, uint32_t turn) {
    uint32_t *const words = matvec_low_words(a, turn ^ 1);
    const uint32_t step = a.block_begin[1] * ROCQ_K_WAVE;
    const uint32_t first = block * ROCQ_K_WAVE + (uint32_t)lane_index();
    for (uint32_t i = first; i < ROCQ_K_MATVEC_LOW; i += step) gstore(words + i, 0);
}

// The sum of one wave's share of a row of product 0: a lane takes unit first + lane and then each
// k_step-th. A wave has one row rather than the four of other products. That is a quarter of the
// instructions ahead of t, which all other blocks wait for.
template <bool ROW>
DEV float matvec_low_sum(const rocq_k_matvec_args &a, const u32x4 *row_x, int row,
                         uint32_t first) {
    const rocq_k_matvec_weights &p = a.product[0].weights;
    const uint32_t units = (uint32_t)a.k / 32, step = (uint32_t)a.k_step, last = units - 1;
    const planes<ROCQ_Q8_0> w =
        planes_at<ROCQ_Q8_0>(planes_of<ROCQ_Q8_0>(p.w, p.n_units), (p.row0 + row) * units);
    const planes<ROCQ_Q8_0> x =
        planes_at<ROCQ_Q8_0>(planes_of<ROCQ_Q8_0>(a.x, a.x_units), a.x_column0 * units);
    uint32_t at = first + (uint32_t)lane_index(), next = at < last ? at : last;
    raw<ROCQ_Q8_0> r_x, r_w = load_raw<ROCQ_Q8_0, ONCE>(w, next);
    if constexpr (!ROW) r_x = load_raw<ROCQ_Q8_0>(x, next);
    float sum = 0.0f;
#pragma unroll 1
    for (; at < units; at += step) {
        next = at + step < last ? at + step : last;
        const matvec_unit<ROCQ_Q8_0> u = matvec_unit_of<ROCQ_Q8_0, 1>(r_w, at);
        if constexpr (ROW) r_x = matvec_row_unit(row_x, at);
        const matvec_x v = matvec_x_of<ROCQ_Q8_0, 1>(r_x);
        r_w = load_raw<ROCQ_Q8_0, ONCE>(w, next);
        if constexpr (!ROW) r_x = load_raw<ROCQ_Q8_0>(x, next);
        loads_issued();
        sum = matvec_add<ROCQ_Q8_0, 1>(sum, u.q, u.f, v);
    }
    return wave_sums<1, 1>(&sum);
}

// Stores the rows of t that a block has the sums of, each times its gate.
DEV void matvec_low_store(const rocq_k_matvec_args &a, int first_row, int k_shift, uint32_t *words,
                          float gate, const float *sums) {
    enum { ROWS = ROCQ_K_MATVEC_ROWS };
    const int r = lane_index(), row = first_row + r;
    if (r >= ROCQ_K_MATVEC_WAVES >> k_shift || row >= a.product[0].weights.m) return;
    sums += (r << k_shift) * ROWS;
    float t = lget(sums);
#pragma unroll 1
    for (int k = 1; k < 1 << k_shift; k++) t += lget(sums + k * ROWS);
    t *= gate;
    matvec_low_put(words, row, t);
    gstore((float *)a.product[0].y + row, t);
}

// Nothing promises that the blocks of product 0, which have the lowest numbers, begin before blocks
// that wait for them. So a wave that has waited in vain computes all of product 0 itself. It adds
// in the order of the blocks of product 0, so it stores the same bits.
template <bool ROW>
DEV void matvec_low_help(const rocq_k_matvec_args &a0, const u32x4 *row_x, uint32_t *words) {
    const rocq_k_matvec_args &a = reread_anew(a0);
    const float *const gate = (const float *)a.product[0].gate;
    const int m = a.product[0].weights.m;
    const uint32_t step = (uint32_t)a.k_step;
#pragma unroll 1
    for (int row = 0; row < m; row++) {
        float t = 0.0f;
#pragma unroll 1
        for (uint32_t first = 0; first < step; first += ROCQ_K_WAVE) {
            const float sum = matvec_low_sum<ROW>(a, row_x, row, first);
            t = first == 0 ? sum : t + sum;
        }
        if (gate) t *= gload(gate + row);
        if (lane_index() == 0) {
            matvec_low_put(words, row, t);
            gstore((float *)a.product[0].y + row, t);
        }
    }
}

// 16 numbers of a row of B from rank0 on, of each adapter.
struct matvec_low_b {
    u32x4 v[2][2];
};
DEV matvec_low_b matvec_low_load(const rocq_k_lora *lora, int row, int rank0) {
    matvec_low_b b;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            b.v[i][h] = make4(0, 0, 0, 0);
            if (rank0 + 8 * h >= lora[i].rank) continue; // b may be NULL
            const char *const from = (const char *)lora[i].b + row * lora[i].b_stride;
            b.v[i][h] = gload((const u32x4 *)from + rank0 / 8 + h);
        }
    }
    return b;
}
// The index of the word of t that a lane polls, for the ranks from rank0 on: lanes 0-15 have those
// of w, the others those of w2. MATVEC_LOW_NONE: there is none to wait for.
enum : uint32_t { MATVEC_LOW_NONE = UINT32_MAX };
DEV uint32_t matvec_low_index(const rocq_k_matvec_args &a, int product, int rank0) {
    const rocq_k_lora *const lora = a.lora[product];
    const bool second = lane_index() >= 16;
    const int r = rank0 + lane_index() % 16;
    const float *const t = second ? lora[1].t : lora[0].t;
    const uint32_t first = (uint32_t)(t - (const float *)a.product[0].y);
    return r < (second ? lora[1].rank : lora[0].rank) ? first + (uint32_t)r : MATVEC_LOW_NONE;
}
DEV uint32_t matvec_low_look(const uint32_t *words, uint32_t index, int looks) {
    uint32_t word = index == MATVEC_LOW_NONE;
#pragma unroll 1
    for (int i = 0; i < looks && word == 0; i++) word = atomic_look(words + index);
    return word;
}
// Waits until all numbers of t that the wave's lanes need are there; false if it gives up. word:
// what the lane first saw at words[index], and then what it saw last.
DEV bool matvec_low_wait(const rocq_k_matvec_args &a, int product, int rank,
                         const uint32_t *words, uint32_t index, uint32_t &word) {
    if (word == 0) word = matvec_low_look(words, index, MATVEC_LOOKS);
    bool there = wave_ballot(word == 0) == 0;
#pragma unroll 1
    for (int rank0 = 16; rank0 < rank && there; rank0 += 16) {
        const uint32_t next = matvec_low_index(a, product, rank0);
        there = wave_ballot(matvec_low_look(words, next, MATVEC_LOOKS) == 0) == 0;
    }
    return there;
}
// What a lane knows of the adapters of its product: the ranks and scales of both, and the word of t
// for the first 16 ranks.
struct matvec_low_own {
    int32_t ranks[2];
    float scales[2];
    uint32_t word;
};
// Makes B t of a lane's row, for each adapter. b is of the first 16 ranks.
DEV void matvec_low_add(const rocq_k_matvec_args &a, int product, int row, const uint32_t *words,
                        matvec_low_b b, const matvec_low_own &own, float (&sums)[2]) {
    uint32_t word = own.word;
    const rocq_k_lora *const lora = a.lora[product];
    const int rank = max(own.ranks[0], own.ranks[1]);
    sums[0] = sums[1] = 0.0f;
#pragma unroll 1
    for (int rank0 = 0; rank0 < rank; rank0 += 16) {
        if (rank0 > 0) {
            b = matvec_low_load(lora, row, rank0);
            word = matvec_low_look(words, matvec_low_index(a, product, rank0), 1);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (rank0 + 8 * h >= own.ranks[i]) continue;
#pragma unroll
                for (int q = 0; q < 2; q++) {
                    float u[4];
                    decode_vector<ROCQ_F16>(b.v[i][h], q, u);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const uint32_t t = ~wave_read(word, 16 * i + 8 * h + 4 * q + e);
                        sums[i] = fmaf(u[e], bits<float>(t), sums[i]);
                    }
                }
            }
        }
    }
    sums[0] *= own.scales[0];
    sums[1] *= own.scales[1];
}

// Makes the x of the kernels matvec_row_*. Block 0 also stores it if a.row.y is set. That pointer
// is read only when the loads have been issued: they would wait for it otherwise.
template <int F, int QUADS>
DEV void matvec_row(const rocq_k_matvec_args &a, const rocq_k_matvec_weights &p,
                    const matvec_at &at, int row, int k_wave) {
    float v[QUADS][4], w[QUADS][4];
    uint32_t touched[ROCQ_K_MATVEC_ROWS];
    matvec_row_load(a.x, a.k, v);
    if (a.row.weight) matvec_row_load(a.row.weight, a.k, w);
    matvec_touch<F>(p, row, a.k / 32, k_wave, touched);
    matvec_row_stage(a, v, w, at.block == 0 && a.row.y, at.row_x, at.work);
#pragma unroll
    for (int r = 0; r < ROCQ_K_MATVEC_ROWS; r++) computed(touched[r]);
}

// The barriers of matvec_row, for a wave that makes no part of x.
DEV void matvec_row_meet(const rocq_k_matvec_args &a, float *work) {
    if (a.row.norm) block_share(0.0f, work, 0.0f);
    matvec_meet();
}

// What the last wave of a block with LOW does. In blocks of product 0 it stores t once the sums are
// there. In the others it makes B t, as t is nearly always there before the block's own sums. The
// turn is the highest bit of words[0]. Each lane loads a word of its own: one that all lanes load
// would go to a uniform register, and nvcc's code would wait for it before it goes on.
template <bool ROW>
DEV void matvec_low_wave(const rocq_k_matvec_args &a, const matvec_at &at, int m) {
    const uint32_t look = atomic_look(a.low.words + lane_index());
    if (at.product == 0) {
        const float *const gates = (const float *)a.product[0].gate;
        const float gate = gates ? gload(gates + min(at.first_row + lane_index(), m - 1)) : 1.0f;
        if (ROW) matvec_row_meet(a, at.work);
        const uint32_t turn = wave_read(look, 0) >> 31;
        const uint32_t share = at.block == 0 ? (1u << 31) - (a.low.n_blocks - 1) : 1;
        if (lane_index() == 0) atomic_add(a.low.words, share);
        matvec_low_clear(a, at.block, turn);
        matvec_meet();
        matvec_low_store(a, at.first_row, at.k_shift, matvec_low_words(a, turn), gate, at.sums);
        return;
    }
    const int rows = ROCQ_K_MATVEC_ROWS * ROCQ_K_MATVEC_WAVES >> at.k_shift;
    const int row = min(at.first_row + (lane_index() & (rows - 1)), m - 1);
    const uint32_t index = matvec_low_index(a, at.product, 0);
    const matvec_low_b b = matvec_low_load(a.lora[at.product], row, 0);
    matvec_tail tail = matvec_tail_of<true>(a, at.product, at.first_row);
    matvec_tail_hold(tail);
    int32_t ranks[2] = {a.lora[at.product][0].rank, a.lora[at.product][1].rank};
    float scales[2] = {a.lora[at.product][0].scale, a.lora[at.product][1].scale};
    held(ranks[0]), held(ranks[1]), held(scales[0]), held(scales[1]);
    if (ROW) matvec_row_meet(a, at.work);
    uint32_t *const words = matvec_low_words(a, wave_read(look, 0) >> 31);
    uint32_t word = matvec_low_look(words, index, 1);
    if (lane_index() == 0) atomic_add(a.low.words, 1);
    const int rank = max(ranks[0], ranks[1]);
    while (!matvec_low_wait(a, at.product, rank, words, index, word)) {
        matvec_low_help<ROW>(a, at.row_x, words);
    }
    const matvec_low_own own = {{ranks[0], ranks[1]}, {scales[0], scales[1]}, word};
    matvec_low_add(a, at.product, row, words, b, own, tail.lora);
    matvec_meet();
    if (!tail.live) return;
    const matvec_pair both = matvec_pair_of<1>(tail, at.sums);
    float y;
    if (tail.e.activation == ROCQ_ACT_IDENTITY) {
        tail.e.activation = ROCQ_ACT_IDENTITY;
        y = matvec_y(tail, both);
    } else {
        held(tail.e.activation);
        y = matvec_y(tail, both);
    }
    matvec_put<1>(a, tail, at.first_row, at.sums, y);
}

// What a block does. F: the format of all products, MATVEC_MIXED or MATVEC_LOW where each has its
// own, or READ where that is one of those that are only read.
//
// When a launch begins its args are in no cache, so every load that depends on another one costs a
// trip to memory. On gfx11 they are therefore loaded in as few dependent steps as possible: first
// the fields before a.product together with product 0, then, if the block belongs to another
// product, that one. y_format and activation are read along only to bring their cache lines, which
// hold what the epilogue needs, into the scalar cache before the loop ends. On NVIDIA args are in
// constant memory, which needs none of this, and nvcc reloads fields to save registers.
template <int F, int N, bool INT8, bool ROW = false, bool LOW = false>
DEV void matvec_block(const rocq_k_matvec_args &a) {
    enum { ROWS = ROCQ_K_MATVEC_ROWS };
    LDS(float, sums, 2 * ROCQ_K_MATVEC_WAVES * ROWS * N);
    LDS(u32x4, row_x, ROW ? ROW_VECTORS : 1);
    LDS(float, work, ROW ? BLOCK_WORK : 1);
    uint32_t block = a.common.block0, begin = 0;
    int product = 0;
#if defined(__CUDACC__) // as a loop: then nvcc keeps the product in its uniform registers
    block += block_index();
    while (product < ROCQ_K_PRODUCTS - 1 && block >= a.block_begin[product + 1]) {
        begin = a.block_begin[++product];
    }
    const rocq_k_matvec_weights &p = a.product[product].weights;
#else
    rocq_k_matvec_weights p = a.product[0].weights;
    static_assert(ROCQ_K_PRODUCTS == 4, "four beginnings");
    block = read_together(block, a.block_begin[0], a.block_begin[1], a.block_begin[2],
                          a.block_begin[3], a.x, a.x_units, a.x_column0, a.x_stride, a.k, a.n,
                          a.k_shift, a.k_step, p.w, p.w2, p.n_units, p.row0, p.m, p.format,
                          a.product[0].y_format, a.product[0].activation);
    block += block_index();
#pragma unroll
    for (int i = 1; i < ROCQ_K_PRODUCTS; i++) {
        begin = block < a.block_begin[i] ? begin : a.block_begin[i];
        product = block < a.block_begin[i] ? product : i;
    }
    if (product != 0) {
        const rocq_k_matvec_product &own = a.product[product];
        p = own.weights;
        read_together(own.y_format, own.activation, p.w, p.w2, p.n_units, p.row0, p.m, p.format);
    }
#endif
    if ((ROW || LOW) && a.k == 0) return;
    const int wave = wave_read(wave_index(), 0); // known to be uniform: row addresses are scalar
    const int k_shift = matvec_k_shift<LOW>(a, product);
    const int k_step = LOW ? ROCQ_K_WAVE << k_shift : a.k_step;
    const bool makes_t = LOW && product == 0;
    const int wave_rows = makes_t ? 1 : ROWS;
    const int first_row = (int)(block - begin) * (wave_rows * ROCQ_K_MATVEC_WAVES >> k_shift);
    const int row = first_row + (wave >> k_shift) * wave_rows, k_wave = wave & ((1 << k_shift) - 1);
    float *out = sums + wave * ROWS * N;
    const matvec_at at = {block, product, first_row, wave, k_shift, sums, work, row_x};
    if (LOW && wave == ROCQ_K_MATVEC_WAVES) {
        matvec_low_wave<ROW>(a, at, p.m);
        return;
    }
    if constexpr (ROW) {
#define ROCQ_QUADS(n) matvec_row<F, n>(a, p, at, row, k_wave)
        if (a.k > 2048) ROCQ_QUADS(4);
        else if (a.k > 1024) ROCQ_QUADS(2);
        else ROCQ_QUADS(1);
#undef ROCQ_QUADS
    }
    if (row >= p.m) {
    } else if (makes_t) {
        const uint32_t first = (uint32_t)(k_wave * ROCQ_K_WAVE);
        const float sum = matvec_low_sum<ROW>(a, row_x, row, first);
        if (lane_index() == 0) lput(out, sum);
    } else {
        constexpr int x = ROW ? X_IN_LDS : X_IN_MEMORY;
        matvec_share<F, N, INT8, x>(a, p, row, k_wave, k_step, row_x, out);
    }
    if constexpr (LOW) {
        matvec_meet();
        return;
    }
    const matvec_tail tail = matvec_tail_of<false>(a, product, first_row);
    block_sync_lds();
    if (!tail.live) return;
    const float y = matvec_y(tail, matvec_pair_of<N>(tail, sums));
    matvec_put<N>(a, tail, first_row, sums, y);
}

// The occupancy in waves a SIMD that the compiler has to allow for. It is the most for which
// NVIDIA's compiler does not spill in the loop (8 waves: 64 registers a thread), but READ spills
// some: IQ2_XXS at 4096x4096 takes 7.9 us so, and 10.1 with 6 waves (H200). On gfx11 all kernels
// need far fewer registers than it permits. With 6 waves instead of 8 what matvec_unrolling unrolls
// with x in memory has more loads under way: Q4_K at 4096x14336 takes 12.7 us instead of 16.7. A
// matvec_row, which has more blocks, takes 13.8 instead of 11.3 at 14336x4096 (H200).
constexpr int matvec_waves(int format, int n, bool int8, int x) {
    const bool plain = format == ROCQ_F32 || format == ROCQ_F16 || format == ROCQ_BF16;
    if (!int8 && !plain) return n == 1 ? 4 : 2;
    // Two columns at 14336x4096 on an H100: Q4_0 16.9 us, Q6_K 22.7; with 6 waves 21.2 and 27.5
    if (n > 1 || format == MATVEC_MIXED) return 4;
    if (plain || format == READ) return 8;
    const bool unrolls = x == X_IN_MEMORY && matvec_unrolling(format, n, x) > 0;
    return unrolls || format == ROCQ_Q5_K ? 6 : 8;
}

#define ROCQ_X(n, f, type, is_int8)                                        \
    KERNEL_WAVES(matvec_##type##_##f##_n##n, rocq_k_matvec_args, 256,      \
                 matvec_waves(ROCQ_K_ID_##f, n, is_int8, X_IN_MEMORY)) {   \
        matvec_block<ROCQ_K_ID_##f, n, is_int8>(a);                        \
    }
#define ROCQ_X_INT8(X, f) \
    X(1, f, int8, true) X(2, f, int8, true) X(4, f, int8, true) X(8, f, int8, true)
#define ROCQ_X_F32(X, f) X(1, f, f32, false) X(8, f, f32, false)
#define ROCQ_X_PLAIN(X, f) X(2, f, f32, false) X(4, f, f32, false)
ROCQ_K_CODED_FORMATS(ROCQ_X_INT8, ROCQ_X)
ROCQ_X(1, read, int8, true)
ROCQ_X(8, read, int8, true)
KERNEL_WAVES(matvec_int8_mixed_n1, rocq_k_matvec_args, 256,
             matvec_waves(MATVEC_MIXED, 1, true, X_IN_MEMORY)) {
    matvec_block<MATVEC_MIXED, 1, true>(a);
}
#define ROCQ_X_ROW(X, f)                                                                         \
    KERNEL_WAVES(matvec_row_##f, rocq_k_matvec_args, 256,                                        \
                 matvec_waves(ROCQ_K_ID_##f, 1, true, X_IN_LDS)) {                               \
        matvec_block<ROCQ_K_ID_##f, 1, true, true>(a);                                           \
    }
ROCQ_K_INT8_FORMATS(ROCQ_X_ROW, )
// Registers for 6 waves a SIMD, as the 384 blocks of a 7B's Q, K and V are then all resident on an
// H200: the launch takes 13.9 us. With 4 the last blocks wait until others have ended: 18.7 us.
KERNEL_WAVES(matvec_row_mixed, rocq_k_matvec_args, 256, 6) {
    matvec_block<MATVEC_MIXED, 1, true, true>(a);
}
// Registers for 7 waves a SIMD: three blocks of nine waves on a multiprocessor, as many as blocks
// of eight waves with registers for 6.
KERNEL_WAVES(matvec_int8_low_n1, rocq_k_matvec_args, ROCQ_K_MATVEC_LOW_THREADS, 7) {
    matvec_block<MATVEC_LOW, 1, true, false, true>(a);
}
KERNEL_WAVES(matvec_row_low, rocq_k_matvec_args, ROCQ_K_MATVEC_LOW_THREADS, 7) {
    matvec_block<MATVEC_LOW, 1, true, true, true>(a);
}
#undef ROCQ_X_ROW
ROCQ_K_ALL_FORMATS(ROCQ_X_F32, ROCQ_X)
ROCQ_K_PLAIN_FORMATS(ROCQ_X_PLAIN, ROCQ_X)
#undef ROCQ_X
#undef ROCQ_X_INT8
#undef ROCQ_X_F32
#undef ROCQ_X_PLAIN

// -- by expert --

// v of rocq_experts_params from z and, if there is a w2, z2.
DEV float experts_value(int32_t kind, float limit, float alpha, bool has_w2, float z, float z2) {
    if (limit > 0.0f) { // comparisons that NaN fails leave it as it is
        const float g = z > limit ? limit : z, most = z2 > limit ? limit : z2;
        return g * rcp_fast(1.0f + exp_fast(-alpha * g)) * ((most < -limit ? -limit : most) + 1.0f);
    }
    const float v = activation(kind, z);
    return has_w2 ? v * z2 : v;
}

// The index of expert e's copy, or -1 if it has none. All lanes have the same e; reading the first
// lane's entry lets the compiler keep what follows from it in scalar registers.
DEV int experts_copy(const rocq_k_experts_copies &copies, int e) {
    const int at = copies.n > 0 ? wave_read(gload(copies.at + e), 0) : -1;
    return (uint32_t)at < (uint32_t)copies.n ? at : -1;
}

// The w, or the w2, of expert e or of its copy.
DEV rocq_k_matvec_weights experts_weights(const rocq_k_experts_args &a, int e, int copy,
                                          bool second) {
    rocq_k_matvec_weights p = a.weights;
    p.w = copy < 0 ? (second ? a.weights.w2 : a.weights.w) : (second ? a.copies.w2 : a.copies.w);
    p.w2 = nullptr;
    p.n_units = copy < 0 ? a.weights.n_units : a.copies.n_units;
    p.row0 = (int64_t)(copy < 0 ? e : copy) * p.m;
    return p;
}

// Encodes v as Q8_0, as matvec_put_q8_0 does: a block has the 32 rows of a unit, and its first wave
// has their values.
DEV void experts_put_q8_0(const rocq_k_experts_args &a, int token, int slot, int first_row,
                          float *sums, float v) {
    const int i = lane_index() & 7, column = first_row / 32;
    float four[4];
    lput(sums + lane_index(), v);
    wave_sync();
#pragma unroll
    for (int b = 0; b < 4; b++) four[b] = lget(sums + 4 * i + b);
    const bool live = lane_index() < 8;
    if (a.y.layout == ROCQ_LAYOUT_PLANAR) {
        const int64_t units = a.weights.m / 32, pair = (int64_t)token * a.n_slots + slot;
        put_q8_0_planar(a.y.data, units * a.n_slots * a.n, units * pair + column, i, live, four);
    } else {
        put_q8_0(row_of(a.y, slot, token, 0) + column * 34, i, live, four);
    }
}

// experts_int8, experts_f32: the product by expert for few pairs of a token and one of its slots. A
// block is that of a matvec with one column, whose rows of w are those of the pair's expert; so
// only these are read. Without weights a block has one pair. With weights it has all slots of a
// token: the waves that share rows in a matvec take slots instead of parts of K, and their sums,
// each times its weight, are added in the order of the waves. An id out of range adds nothing and
// sets a bit of the status.
// Geometry: see rocq_k_experts_args. LDS: 256 bytes. Bytes: the rows of each pair's expert.
template <int F, bool INT8> DEV void experts_block(const rocq_k_experts_args &a0) {
    enum { ROWS = ROCQ_K_MATVEC_ROWS, WAVES = ROCQ_K_MATVEC_WAVES };
    LDS(float, sums, 2 * WAVES * ROWS);
    if (a0.weights.m == 0) return;
    const bool sums_up = a0.scale != 0;
    const int z = a0.first + (int)block_index_z(), n_slots = a0.n_slots;
    const int token = sums_up ? z : z / n_slots, slot0 = sums_up ? 0 : z - token * n_slots;
    const int wave = wave_read(wave_index(), 0); // known to be uniform, as in matvec_block
    const int first_row = (int)(a0.common.block0 + block_index()) * (ROWS * WAVES >> a0.k_shift);
    const int row = first_row + (wave >> a0.k_shift) * ROWS, part = wave & ((1 << a0.k_shift) - 1);
    float *const out = sums + wave * ROWS;
    float sum = 0.0f;
    if (row < a0.weights.m) {
#pragma unroll 1
        for (int slot = sums_up ? part : slot0; slot < n_slots;) {
            const rocq_k_experts_args &a = reread(a0); // held, they take too many scalar registers
            const int e = wave_read(gload(a.ids + token * a.ids_stride + slot), 0);
            if ((uint32_t)e >= (uint32_t)a.n_experts) {
                if (row == 0 && lane_index() == 0) atomic_or(a.common.status, ROCQ_K_BAD_ID);
            } else {
                const int copy = experts_copy(a.copies, e);
                // One pass for each matrix. A single pass over both would keep the addresses of
                // both live throughout, and with 64 registers a thread nvcc spilled.
#pragma unroll 1
                for (int pass = 0; pass < (a.weights.w2 ? 2 : 1); pass++) {
                    const rocq_k_matvec_weights p = experts_weights(a, e, copy, pass);
                    rocq_k_matvec_args one;
                    one.x = a.x;
                    one.x_units = a.x_units;
                    one.x_stride = a.x_stride;
                    one.x_column0 = (int64_t)token * a.x_slots + (a.x_slots == 1 ? 0 : slot);
                    one.k = a.k;
                    one.n = 1;
                    // READ has code for ten formats, each with its own offsets of the four rows.
                    // Those follow from row alone, so the compiler would compute all of them ahead
                    // of both loops and spill 32 scalar registers; hiding row's value prevents it.
                    const int own_row = F == READ ? recomputed_scalar(row) : row;
                    matvec_share<F, 1, INT8, X_OF_EXPERTS>(one, p, own_row, sums_up ? 0 : part,
                                                           a.k_step, 0,
                                                           out + pass * WAVES * ROWS);
                }
            }
            if (!sums_up) break;
            if ((uint32_t)e < (uint32_t)a.n_experts && lane_index() < ROWS) {
                const float weight = gload(a.scale + token * a.scale_stride + slot);
                sum = fmaf(weight, lget(out + lane_index()), sum);
            }
            slot += 1 << a.k_shift;
        }
        if (sums_up && lane_index() < ROWS) lput(out + lane_index(), sum);
    }
    block_sync_lds();
    const rocq_k_experts_args &a = reread(a0);
    const int r = (int)thread_index(), m = first_row + r, share = 1 << a.k_shift;
    const int32_t *const ids = a.ids + token * a.ids_stride;
    if (r >= ROWS * WAVES >> a.k_shift || m >= a.weights.m) return;
    const int own = gload(ids + slot0);
    if (!sums_up && (uint32_t)own >= (uint32_t)a.n_experts) return;
    const float *const from = sums + (r / ROWS << a.k_shift) * ROWS + r % ROWS;
    float v = 0.0f, v2 = 0.0f;
    for (int k = 0; k < share; k++) v += lget(from + k * ROWS);
    if (!sums_up) {
        if (a.weights.w2) {
            for (int k = 0; k < share; k++) v2 += lget(from + WAVES * ROWS + k * ROWS);
        }
        if (a.bias) v += gload(a.bias + own * a.bias_stride + m);
        if (a.bias2) v2 += gload(a.bias2 + own * a.bias2_stride + m);
        v = experts_value(a.activation, a.limit, a.alpha, a.weights.w2 != 0, v, v2);
        if (a.y.format == ROCQ_Q8_0) experts_put_q8_0(a, token, slot0, first_row, sums, v);
        else put_float(a.y.format, row_of(a.y, slot0, token, 0), m, v);
        return;
    }
    for (int slot = 0; a.bias && slot < n_slots; slot++) {
        const int e = gload(ids + slot);
        if ((uint32_t)e >= (uint32_t)a.n_experts) continue;
        const float weight = gload(a.scale + token * a.scale_stride + slot);
        v = fmaf(weight, gload(a.bias + e * a.bias_stride + m), v);
    }
    if (a.residual.data) v += get_float(a.residual.format, row_of(a.residual, token, 0, 0), m);
    put_float(a.y.format, row_of(a.y, token, 0, 0), m, v);
}

// With one column matvec's plain formats and READ have 8 waves; here that has not been measured.
constexpr int experts_waves(int format, bool int8) {
    const bool plain = format == ROCQ_F32 || format == ROCQ_F16 || format == ROCQ_BF16;
    return plain || format == READ ? 6 : matvec_waves(format, 1, int8, X_OF_EXPERTS);
}
#define ROCQ_X(f, type, is_int8)                                  \
    KERNEL_WAVES(experts_##type##_##f, rocq_k_experts_args, 256,  \
                 experts_waves(ROCQ_K_ID_##f, is_int8)) {         \
        experts_block<ROCQ_K_ID_##f, is_int8>(a);                 \
    }
#define ROCQ_X_INT8(X, f) X(f, int8, true)
#define ROCQ_X_F32(X, f) X(f, f32, false)
ROCQ_K_INT8_FORMATS(ROCQ_X_INT8, ROCQ_X)
ROCQ_K_ALL_FORMATS(ROCQ_X_F32, ROCQ_X)
#undef ROCQ_X
#undef ROCQ_X_INT8
#undef ROCQ_X_F32

// experts_merge: the values of a token's slots, each times its weight, added in the order of slots.
// A thread has one element of y.
KERNEL(experts_merge, rocq_k_experts_args, 256) {
    if (a.weights.m == 0) return;
    const uint32_t per_token = ((uint32_t)a.weights.m + 255) / 256;
    const uint32_t block = a.common.block0 + block_index(), token = block / per_token;
    const int m = (int)((block - token * per_token) * 256 + thread_index());
    if (m >= a.weights.m) return;
    const float *from = (const float *)a.x + (int64_t)token * a.n_slots * a.x_stride + m;
    const float *const weight = a.scale + token * a.scale_stride;
    float v = 0.0f;
    for (int slot = 0; slot < a.n_slots; slot++, from += a.x_stride) {
        v = fmaf(gload(weight + slot), gload(from), v);
    }
    if (a.residual.data) {
        v += get_float(a.residual.format, row_of(a.residual, token, 0, 0), m);
    }
    put_float(a.y.format, row_of(a.y, token, 0, 0), m, v);
}

// experts_sort: sorts the pairs by expert (those of one expert keep their order), and cuts each
// expert's into tiles of N = columns. Block e writes what belongs to expert e, and finds where that
// begins by counting the pairs with a lower id; so no block waits for another. The tiles of e begin
// at (its first sorted pair) / N + e, as the e experts before it never need more. Tiles that are
// left over are empty. Pairs with an id out of range are left out.
// Where experts are fetched, the i-th of those without a copy goes to slice i, if there is one and
// some pair has chosen it.
// A thread counts, then writes, a run of pairs. LDS: 3 KB. Bytes: ids twice for each expert, from
// L2.
KERNEL(experts_sort, rocq_k_experts_args, 256) {
    LDS(int, counts, 256);
    LDS(int, lower, 256);
    LDS(int, missing, 256);
    const int e = (int)(a.common.block0 + block_index()), t = (int)thread_index();
    const int n_pairs = a.n * a.n_slots, run = (n_pairs + 255) / 256;
    const int begin = t * run < n_pairs ? t * run : n_pairs;
    const int end = begin + run < n_pairs ? begin + run : n_pairs;
    if (e >= a.n_experts) return;
    int n_own = 0, n_lower = 0, n_missing = 0;
    bool bad = false;
    for (int i = begin; i < end; i++) {
        const int id = gload(a.ids + i / a.n_slots * a.ids_stride + i % a.n_slots);
        n_own += id == e;
        n_lower += id >= 0 && id < e;
        bad = bad || (uint32_t)id >= (uint32_t)a.n_experts;
    }
    for (int i = t; a.fetched && i < e; i += 256) {
        n_missing += (uint32_t)gload(a.copies.at + i) >= (uint32_t)a.copies.n;
    }
    if (bad && e == 0) atomic_or(a.common.status, ROCQ_K_BAD_ID);
    lput(counts + t, n_own);
    lput(lower + t, n_lower);
    lput(missing + t, n_missing);
    block_sync_lds();
    int start = 0, all = 0, at = 0, slice = 0;
    for (int i = 0; i < 256; i++) {
        const int n = lget(counts + i);
        start += lget(lower + i);
        slice += lget(missing + i);
        at += i < t ? n : 0;
        all += n;
    }
    at += start;
    for (int i = begin; n_own > 0 && i < end; i++) {
        const int id = gload(a.ids + i / a.n_slots * a.ids_stride + i % a.n_slots);
        if (id == e) gstore(a.pairs + at++, i);
    }
    const int copy = experts_copy(a.copies, e);
    const bool fetch = a.fetched && copy < 0 && all > 0 && slice < a.n_fetched;
    if (a.fetched && t == 0) gstore(a.fetched + e, fetch ? slice : -1);
    const int where = copy >= 0 ? 4 * copy + ROCQ_K_EXPERTS_COPIES
                      : fetch   ? 4 * slice + ROCQ_K_EXPERTS_FETCHED
                                : 4 * e + ROCQ_K_EXPERTS_W;
    const int N = a.columns, n_tiles = ROCQ_K_EXPERTS_TILES(n_pairs, a.n_experts, N);
    const int first = start / N + e;
    const int last = e + 1 < a.n_experts ? (start + all) / N + e + 1 : n_tiles;
    for (int i = first + t; i < last; i += 256) {
        const int from = (i - first) * N, left = all - from;
        gstore(a.tiles + 4 * i, e);
        gstore(a.tiles + 4 * i + 1, start + from);
        gstore(a.tiles + 4 * i + 2, left < 0 ? 0 : left < N ? left : N);
        gstore(a.tiles + 4 * i + 3, where);
    }
}

// experts_fetch: see rocq_k_experts_fetch_args. A thread has four vectors of 16 bytes in flight,
// where planes are aligned so. Bytes: the experts that are fetched, in and out.
template <typename T>
DEV void experts_fetch_plane(const char *from, char *to, int64_t n, int64_t first, int64_t step) {
    const T *const x = (const T *)from;
    T *const y = (T *)to;
#pragma unroll 1
    for (int64_t i = first; i < n / (int)sizeof(T); i += 4 * step) {
        T v[4];
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const int64_t at = i + u * step;
            if (at < n / (int)sizeof(T)) v[u] = gload(x + at);
        }
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const int64_t at = i + u * step;
            if (at < n / (int)sizeof(T)) gstore(y + at, v[u]);
        }
    }
}
KERNEL(experts_fetch, rocq_k_experts_fetch_args, 256) {
    const int e = (int)block_index_z();
    if (e >= a.n_experts) return;
    const int slice = wave_read(gload(a.fetched + e), 0);
    if (slice < 0) return;
    const int64_t first = (int64_t)(a.common.block0 + block_index()) * 256 + thread_index();
    const int64_t step = (int64_t)a.blocks * 256;
#pragma unroll 1
    for (int i = 0; i < 2 && a.from[i]; i++) {
        const char *from = (const char *)a.from[i];
        char *to = (char *)a.to[i];
#pragma unroll 1
        for (int k = 0; k < 6; k++) {
            const int64_t n = a.bytes[k];
            const char *const x = from + e * n;
            char *const y = to + slice * n;
            if ((((uint64_t)(uintptr_t)x | (uint64_t)(uintptr_t)y | (uint64_t)n) & 15) == 0) {
                experts_fetch_plane<u32x4>(x, y, n, first, step);
            } else {
                experts_fetch_plane<uint8_t>(x, y, n, first, step);
            }
            from += n * a.n_experts;
            to += n * a.n_fetched;
        }
    }
}

// -- route --

// As in rocq_route_params. A wave has a token, and a lane every 32nd of its experts. Keys are
// integers in the order of the numbers compared, with NaN below -inf, and 0 for an expert that has
// been taken or must not be. LDS: 13 KB. Bytes: the logits once.
// Loops are not unrolled: the one wave that chooses mostly waits for its code from L2.
DEV uint32_t route_key(float x) {
    const uint32_t u = bits<uint32_t>(x + 0.0f); // -0 and 0 are equal
    return x != x ? 1 : u >> 31 ? ~u : u | 0x80000000u;
}
// The index of the largest of n keys in LDS, the lowest of equals; that key is set to 0.
DEV int route_take(uint32_t *keys, int n) {
    uint32_t own = 0, own_e = 0x7fffffff;
#pragma unroll 1
    for (int e = lane_index(); e < n; e += ROCQ_K_WAVE) {
        const uint32_t key = lget(keys + e);
        if (key > own) {
            own = key;
            own_e = (uint32_t)e;
        }
    }
    const uint32_t key = wave_most(own);
    const int e = (int)~wave_most(own == key ? ~own_e : 0u);
    if (e % ROCQ_K_WAVE == lane_index() && e < n) lput(keys + e, 0u);
    return e;
}

enum {
    ROUTE_BYTES = 12 * ROCQ_K_ROUTE_EXPERTS + 4 * ROCQ_K_ROUTE_SLOTS // of LDS
};
struct route_lds {
    float *scores;          // of each expert
    uint32_t *keys;         // what the choice goes by, of each expert and of each group of them
    uint32_t *groups;
    int *chosen;            // expert of each slot
};
// Computes the scores and keys of all experts.
DEV void route_score(const rocq_k_route_args &a, int64_t token, const route_lds &lds) {
    const float *const logits = a.logits + token * a.logits_stride;
    const int lane = lane_index(), n = a.n_experts;
    const bool by_score = a.bias || a.n_groups > 1;
    float top = -INFINITY, sum = 0.0f;
#pragma unroll 4 // four loads are in flight
    for (int e = lane; e < n; e += 32) {
        const float x = gload(logits + e);
        lput(lds.scores + e, x);
        lput(lds.keys + e, route_key(x));
        top = fmaxf(top, x);
    }
    if (a.scores == ROCQ_SCORES_SOFTMAX) {
        top = wave_max(top);
#pragma unroll 1
        for (int e = lane; e < n; e += 32) {
            const float x = exp_full(lget(lds.scores + e) - top);
            lput(lds.scores + e, x);
            sum += x;
        }
        sum = wave_sum(sum);
    }
#pragma unroll 1
    for (int e = lane; e < n; e += 32) {
        float s = lget(lds.scores + e);
        if (a.scores == ROCQ_SCORES_SIGMOID) s = 1.0f / (1.0f + exp_full(-s));
        if (a.scores == ROCQ_SCORES_SOFTMAX) s /= sum;
        lput(lds.scores + e, s);
        if (by_score) lput(lds.keys + e, route_key(s + (a.bias ? gload(a.bias + e) : 0.0f)));
    }
    wave_sync();
}
// Chooses groups by the sum of their two best experts. Experts of the others must not be chosen.
DEV void route_choose_groups(const rocq_k_route_args &a, const route_lds &lds) {
    const int lane = lane_index(), n = a.n_experts, size = n / a.n_groups;
#pragma unroll 1
    for (int g = lane; g < a.n_groups; g += 32) {
        uint32_t first = 0, second = 0;
        float best = 0.0f, next = 0.0f;
#pragma unroll 1
        for (int e = g * size; e < (g + 1) * size; e++) {
            const uint32_t key = lget(lds.keys + e);
            const float v = lget(lds.scores + e) + (a.bias ? gload(a.bias + e) : 0.0f);
            if (key > first) {
                second = first;
                next = best;
                first = key;
                best = v;
            } else if (key > second) {
                second = key;
                next = v;
            }
        }
        lput(lds.groups + g, route_key(size > 1 ? best + next : best));
    }
    wave_sync();
#pragma unroll 1
    for (int i = 0; i < a.top_groups; i++) {
        route_take(lds.groups, a.n_groups);
        wave_sync();
    }
#pragma unroll 1
    for (int e = lane; e < n; e += 32) {
        if (lget(lds.groups + e / size) != 0) lput(lds.keys + e, 0u);
    }
    wave_sync();
}
// Stores the experts that have been chosen, and their weights.
DEV void route_weigh(const rocq_k_route_args &a, int64_t token, const route_lds &lds) {
    const bool softmax = a.scores == ROCQ_SCORES_SOFTMAX_CHOSEN;
    const int lane = lane_index();
    float top = -INFINITY, sum = 0.0f;
#pragma unroll 1
    for (int slot = lane; slot < a.n_slots; slot += 32) {
        top = fmaxf(top, lget(lds.scores + lget(lds.chosen + slot)));
    }
    top = wave_max(top);
#pragma unroll 1
    for (int slot = lane; slot < a.n_slots; slot += 32) {
        const float s = lget(lds.scores + lget(lds.chosen + slot));
        sum += softmax ? exp_full(s - top) : s;
    }
    sum = wave_sum(sum);
    const float least = sum < 0x1p-14f ? 0x1p-14f : sum;
    const float factor = softmax ? a.scale / sum : a.renormalise ? a.scale / least : a.scale;
#pragma unroll 1
    for (int slot = lane; slot < a.n_slots; slot += 32) {
        const int e = lget(lds.chosen + slot);
        const float s = lget(lds.scores + e);
        const float own = a.expert_scale ? gload(a.expert_scale + e) : 1.0f;
        gstore(a.ids + token * a.ids_stride + slot, e);
        gstore(a.weights + token * a.weights_stride + slot,
               (softmax ? exp_full(s - top) : s) * factor * own);
    }
}
DEV void route_token(const rocq_k_route_args &a, int64_t token, u32x4 *at) {
    uint32_t *const keys = (uint32_t *)at + ROCQ_K_ROUTE_EXPERTS,
             *const groups = keys + ROCQ_K_ROUTE_EXPERTS;
    const route_lds lds = {(float *)at, keys, groups, (int *)(groups + ROCQ_K_ROUTE_EXPERTS)};
    route_score(a, token, lds);
    if (a.n_groups > 1) route_choose_groups(a, lds);
#pragma unroll 1
    for (int slot = 0; slot < a.n_slots; slot++) {
        const int e = route_take(keys, a.n_experts);
        if (lane_index() == 0) lput(lds.chosen + slot, e);
        wave_sync();
    }
    route_weigh(a, token, lds);
}
KERNEL(route, rocq_k_route_args, 32) {
    LDS(u32x4, lds, ROUTE_BYTES / 16);
    if (a.n_experts == 0) return;
    route_token(a, a.common.block0 + block_index(), lds);
}

// router: rmsnorm of one column of x, products of the result with F32 weights, and the choice of
// experts; the logits that it goes by are the result of one of these products. Blocks and waves own
// rows as in a matvec. Every block computes the norm for itself, as in matvec_row, and keeps the
// normed x in LDS. One more block, which has no rows, stores it, in F32 and, if row.y is set, in
// Q8_0, so that no logit waits for that. The block that finishes last finds all logits in memory,
// and its first wave chooses.
// Geometry: see rocq_k_router_args. LDS: 17 KB. Bytes: w once, x and the norm's weight once a
// block.
enum {
    ROUTER_BYTES = 4 * ROCQ_K_MATVEC_ROW_K // of LDS
};
static_assert(16 * (int)ROW_VECTORS <= (int)ROUTER_BYTES, "x in Q8_0 has the LDS of x in F32");
static_assert((int)ROUTE_BYTES <= (int)ROUTER_BYTES, "the choice has the LDS that x had");

// Loads vector `at`, or the last one, of each of a wave's rows.
DEV void router_load(const float *w, const matvec_work &work, int k, uint32_t at,
                     u32x4 (&r_w)[ROCQ_K_MATVEC_ROWS]) {
    const uint32_t vector = min(at, work.count - 1);
#pragma unroll
    for (int r = 0; r < ROCQ_K_MATVEC_ROWS; r++) {
        r_w[r] = gload((const u32x4 *)(w + work.row[r] * k) + vector);
    }
}
// The lane's sums of its wave's rows, in matvec_plain_sums' order. x: LDS. r_w: the first vectors,
// loaded before x was there.
DEV void router_sums(const float *w, const matvec_work &work, int k, const u32x4 *x,
                     u32x4 (&r_w)[ROCQ_K_MATVEC_ROWS], float (&sums)[ROCQ_K_MATVEC_ROWS]) {
    enum { ROWS = ROCQ_K_MATVEC_ROWS };
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r] = 0.0f;
#pragma unroll 1
    for (uint32_t at = work.first; at < work.count; at += work.step) {
        float v[ROWS][4], four[4];
        decode_vector<ROCQ_F32>(lget(x + at), 0, four);
#pragma unroll
        for (int r = 0; r < ROWS; r++) decode_vector<ROCQ_F32>(r_w[r], 0, v[r]);
        router_load(w, work, k, at + work.step, r_w);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int b = 0; b < 4; b++) sums[r] = fmaf(v[r][b], four[b], sums[r]);
        }
    }
}
// Puts the normed x into LDS, or memory.
DEV void router_stage(const rocq_k_router_args &a, float (&v)[4][4], const float (&w)[4][4],
                      bool stores, u32x4 *lds, float *work) {
    matvec_row_norm(a.matvec, v, w, work);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int quad = j * 256 + (int)thread_index();
        if (4 * quad >= a.matvec.k) continue;
        const u32x4 four = make4(bits<uint32_t>(v[j][0]), bits<uint32_t>(v[j][1]),
                                 bits<uint32_t>(v[j][2]), bits<uint32_t>(v[j][3]));
        if (stores) gstore((u32x4 *)a.x + quad, four);
        else lput(lds + quad, four);
    }
    if (stores && a.matvec.row.y) matvec_row_encode(a.matvec, v, true, lds);
    block_sync_lds();
}
KERNEL(router, rocq_k_router_args, 256) {
    enum { ROWS = ROCQ_K_MATVEC_ROWS, WAVES = ROCQ_K_MATVEC_WAVES };
    LDS(u32x4, lds, ROUTER_BYTES / 16);
    LDS(float, sums, WAVES * ROWS);
    LDS(float, norm_work, BLOCK_WORK);
    LDS(uint32_t, word, 1);
    const rocq_k_matvec_args &m = a.matvec;
    if (m.k == 0) return;
    const uint32_t index = m.common.block0 + block_index();
    const bool stores = index == (uint32_t)a.n_blocks;
    const uint32_t block = stores ? 0 : index; // what it loads of w is not used
    int product = 0;
    while (product < ROCQ_K_PRODUCTS - 1 && block >= m.block_begin[product + 1]) product++;
    const rocq_k_matvec_weights &p = m.product[product].weights;
    const int wave = wave_read(wave_index(), 0); // known to be uniform, as in matvec_block
    const int first_row =
        (int)(block - m.block_begin[product]) * (ROWS * WAVES >> m.k_shift);
    const int row = first_row + (wave >> m.k_shift) * ROWS;
    matvec_work work;
#pragma unroll
    for (int r = 0; r < ROWS; r++) work.row[r] = min(row + r, p.m - 1);
    work.first = (uint32_t)((wave & ((1 << m.k_shift) - 1)) * ROCQ_K_WAVE + lane_index());
    work.step = (uint32_t)m.k_step;
    work.count = (uint32_t)m.k / 4;

    float v[4][4], w[4][4], own[ROWS];
    u32x4 r_w[ROWS];
    matvec_row_load(m.x, m.k, v);
    if (m.row.weight) matvec_row_load(m.row.weight, m.k, w);
    router_load((const float *)p.w, work, m.k, work.first, r_w);
    loads_issued();
    router_stage(a, v, w, stores, lds, norm_work);
    if (stores) return;
    router_sums((const float *)p.w, work, m.k, lds, r_w, own);
    const float sum = wave_sums<ROWS, 1>(own);
    if (lane_index() < ROWS) lput(sums + wave * ROWS + lane_index(), sum);
    const matvec_tail tail = matvec_tail_of<false>(m, product, first_row);
    block_sync_lds();
    if (tail.live) {
        const float y = matvec_y(tail, matvec_pair_of<1>(tail, sums));
        put_float(tail.y_format, tail.y, first_row + tail.r, y);
    }

    if (block_ticket(a.counter, word) != (uint32_t)a.n_blocks - 1) return;
    if (thread_index() == 0) gstore(a.counter, 0u);
    if (wave == 0) route_token(reread(a).route, 0, lds);
}

// ---------------------------------------------------------------------------------------------
// >>matmul
// ---------------------------------------------------------------------------------------------
// y[m, n] = epilogue(sum over k of w[k, m] x[k, n]) for more columns n than a matvec takes: the
// product of prompts. A block computes a tile of y and goes through K in steps. In a step w is
// decoded and x copied into LDS, and the waves multiply from there; meanwhile the next step's
// bytes, not yet decoded, are prefetched into registers.
//
//   w    planar [K, M, ..], or plain F32, F16 or BF16 of any K; no gaps between its matrices
//   x    column c of batch z is column z n + c: F16 or F32 with x_stride elements from column to
//        column, or planar Q8_0. F16 and F32 columns begin at multiples of 16 bytes and can be read
//        up to the next such multiple past K; what lies there has no effect
//   y    F32 or F16, likewise gate and residual, any strides; y may be gate or residual
//
// Geometry: a launch has the blocks of one product, or of several of the same x behind each other.
// Those of a product count tiles_m * tiles_n tiles, once for each of n_splits splits of K;
// blockIdx.z counts the batches of x. One tile goes through K no faster than the latency of
// its loads permits. So where there are fewer tiles than the chip holds blocks, several blocks
// split the K of each, in whole steps: they store their sums in `work`, and matmul_merge, a second
// launch, adds them up in the order of the splits.
// Tiles: ROCQ_K_MATMUL_M rows by ROCQ_K_MATMUL_F16_N, _F16_N_FEW, _INT8_N or _F32_N columns, with
// 128 threads (matmul_f32: 256). Those of the kernels named _lds are in ROCQ_K_LDS_TILES and
// ROCQ_K_LDS_DECODED_TILES. Rows past M repeat row M - 1 and columns past N repeat column N - 1;
// they are not stored. The order of a sum over K depends neither on n nor on the tile, but the
// kernels named _lds have an order of their own.
// Numbers of units and offsets within a tile are 32-bit: 128 rows of w and 128 columns of x have
// less than 4 GB each. The kernels named _lds count elements and units in 32 bits, of which 256
// rows of w have less than 2^32, and bytes in 64 bits.

// Where a block's tile lies. Tiles are counted in bands of MATMUL_BAND tiles along M, and within a
// band along M first: blocks that run at the same time then share both rows of w and columns of x
// in L2.
enum { MATMUL_BAND = 16 };
struct matmul_place {
    int64_t m0, n0;     // first row and column
    int64_t w_row;      // row m0 in all of w
    int64_t x_column;   // column n0 in all of x
    int32_t i2, i3;     // batch
    uint32_t split, begin, end; // the split of K, and its steps
};
// The product that a block belongs to, and the block's number among those of this product.
// matmul_finish and matmul_f32_finish begin with a copy of the product. What a loop reads behind a
// condition clang loads before the loop only if it knows that the memory is there, and it does not
// know that of a product whose index is a variable: then each turn of the loop loads it anew.
struct matmul_block {
    int product;
    uint32_t index;
};
DEV matmul_block matmul_block_of(const rocq_k_matmul_args &a) {
    const uint32_t index = a.common.block0 + block_index();
    uint32_t begin = 0;
    int product = 0;
#pragma unroll
    for (int i = 1; i < ROCQ_K_PRODUCTS; i++) {
        begin = index < a.block_begin[i] ? begin : a.block_begin[i];
        product = index < a.block_begin[i] ? product : i;
    }
    return matmul_block{product, index - begin};
}
DEV matmul_place matmul_place_of(const rocq_k_matmul_args &a, const matmul_block &own, int bm,
                                 int bn, uint32_t n_steps) {
    const rocq_k_matmul_product &product = a.product[own.product];
    const uint32_t tiles_m = (uint32_t)product.tiles_m, tiles_n = (uint32_t)a.tiles_n;
    const uint32_t n_splits = (uint32_t)a.n_splits, z = block_index_z();
    const uint32_t split = own.index / (tiles_m * tiles_n);
    const uint32_t tile = own.index - split * (tiles_m * tiles_n);
    const uint32_t band = tile / (MATMUL_BAND * tiles_n);
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
    p.w_row = (p.i2 / a.run2 + (int64_t)(p.i3 / a.run3) * a.w_batch2) * product.m + p.m0;
    p.x_column = z * a.n + p.n0;
    return p;
}

// The index of the wave, read from lane 0, so that the compiler knows it to be uniform.
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

template <int F> DEV planes<F> matmul_planes(const rocq_k_matmul_product &product) {
    return planes_of<F>(product.w, product.w_units, product.format);
}

// The address in work of a column's sums of the first split; those of the next are M floats further
// on. Columns are counted through all batches.
DEV float *matmul_split_sums(const rocq_k_matmul_args &a, const rocq_k_matmul_product &product,
                             int64_t column) {
    return product.work + column * a.n_splits * product.m;
}

// One wave finishes column n of y, rows m0 to m0 + 32 R - 1. sum(m, r) returns the sum of row
// m = m0 + 32 r + lane.
template <int R, typename S>
DEV void matmul_put_column(const rocq_k_matmul_product &product, const matmul_place &at, int64_t m0,
                           int64_t n, S sum) {
    const rocq_k_epilogue &from = product.epilogue;
    char *y = row_of(from.y, n, at.i2, at.i3);
    const char *gate = row_of(from.gate, n, at.i2, at.i3);
    const char *residual = row_of(from.residual, n, at.i2, at.i3);
    const epilogue e = {from.activation, from.softcap, from.bias != 0, from.gate.data != 0, false,
                        from.residual.data != 0};
#pragma unroll 1
    for (int r = 0; r < R; r++) {
        const int64_t m = m0 + 32 * r + lane_index();
        if (m >= product.m) return;
        const float x = epilogue_apply(
            e, sum(m, r), 1.0f, [&] { return gload(from.bias + m); },
            [&] { return get_float(from.gate.format, gate, m); },
            [&] { return get_float(from.residual.format, residual, m); });
        put_float(from.y.format, y, m, x);
    }
}

// matmul_put_column with sums in LDS. If K is split they are stored in work, for matmul_merge.
template <int R>
DEV void matmul_put_sums(const rocq_k_matmul_args &a, const rocq_k_matmul_product &product,
                         const matmul_place &at, const float *sums, int64_t m0, int64_t n) {
    if (a.n_splits == 1) {
        matmul_put_column<R>(product, at, m0, n, [=](int64_t, int r) {
            return lget(sums + 32 * r + lane_index());
        });
        return;
    }
    float *own = matmul_split_sums(a, product, at.x_column - at.n0 + n) + at.split * product.m;
#pragma unroll 1
    for (int r = 0; r < R; r++) {
        const int64_t m = m0 + 32 * r + lane_index();
        if (m < product.m) gstore(own + m, lget(sums + 32 * r + lane_index()));
    }
}

// Whether all quads of a tensor but the last of a row are aligned and whole.
DEV bool quads_are_wide(const rocq_k_tensor &t) {
    return (alignment_bits(t) & (t.format == ROCQ_F32 ? 15u : 7u)) == 0;
}

// matmul_merge: y = epilogue(sum of the splits, added in their order). A thread has a quad, rows m
// to m + 3 of a column, with the loads of up to four splits in flight at once. A wave has 128 rows
// of a column, so that whole cache lines are read and written, and a block of 256 threads 8
// columns. No LDS. Bytes: the sums of every split once, from L2 or the Infinity Cache, which they
// were just written to.
DEV void matmul_merge(const rocq_k_matmul_args &a) {
    enum { AHEAD = 4 };
    const matmul_block block = matmul_block_of(a);
    const rocq_k_matmul_product &product = a.product[block.product];
    if (product.tiles_m == 0) return;
    const rocq_k_epilogue &from = product.epilogue;
    const matmul_place at = matmul_place_of(a, block, ROCQ_K_MERGE_M, ROCQ_K_MERGE_N, 1);
    const int wave = matmul_wave();
    const int64_t n = at.n0 + wave, m = at.m0 + 4 * lane_index();
    const int there = n < a.n ? quad_count(product.m, m) : 0;
    if (there == 0) return;
    const float *const splits = matmul_split_sums(a, product, at.x_column + wave);
    const bool wide = (product.m & 3) == 0;
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int first = 0; first < a.n_splits; first += AHEAD) {
        u32x4 sums[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const char *const row = (const char *)(splits + (int64_t)(first + i) * product.m);
            const bool live = first + i < a.n_splits;
            sums[i] = make4(0, 0, 0, 0);
            if (live) sums[i] = quad_load(ROCQ_F32, wide, row, m, there);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            float sum[4];
            quad_floats(ROCQ_F32, sums[i], sum);
#pragma unroll
            for (int e = 0; e < 4; e++) v[e] += sum[e];
        }
    }
    const char *gate = row_of(from.gate, n, at.i2, at.i3);
    const char *residual = row_of(from.residual, n, at.i2, at.i3);
    const epilogue e = {from.activation, from.softcap, from.bias != 0, from.gate.data != 0, false,
                        from.residual.data != 0};
#pragma unroll 1
    for (int i = 0; i < 4; i++) { // v turns by one, so that its indices are constants
        const int64_t k = m + (i < there ? i : 0);
        const float x = epilogue_apply(
            e, v[0], 1.0f, [&] { return gload(from.bias + k); },
            [&] { return get_float(from.gate.format, gate, k); },
            [&] { return get_float(from.residual.format, residual, k); });
        v[0] = v[1];
        v[1] = v[2];
        v[2] = v[3];
        v[3] = x;
    }
    put_floats(from.y.format, quads_are_wide(from.y) && there == 4,
               row_of(from.y, n, at.i2, at.i3), m, there, v);
}
KERNEL(matmul_merge, rocq_k_matmul_args, 256) { matmul_merge(a); }

// Puts 16 columns of a wave's sums, those of the fragments c[..][which], into LDS, `stride` floats
// from column to column. which is a variable, but c is in registers, whose numbers are constants:
// hence the loop.
template <int TM, int TN>
DEV void frags_put(const frag_c (&c)[TM][TN], int which, float *to, int stride) {
#pragma unroll
    for (int j = 0; j < TN; j++) {
        if (j != which) continue;
#pragma unroll
        for (int i = 0; i < TM; i++) {
#pragma unroll
            for (int v = 0; v < 8; v++) {
                lput(to + frag_col(v) * stride + 16 * i + frag_row(v), c[i][j].v[v]);
            }
        }
    }
}

// Finishes a wave's 16 TM by 16 TN sums, from row m0 and column n0 on. A fragment has few rows of
// many columns, while in memory the rows of a column are neighbours. So 16 columns at a time go
// through LDS, after which a wave reads and writes runs of 32 rows. work: LDS,
// matmul_pass_floats<TM> for each wave; two words of padding a column keep its writes and reads
// free of bank conflicts. It has barriers: all waves must call it.
template <int TM> DEV constexpr int matmul_pass_floats() { return 16 * (16 * TM + 2); }
template <int TM, int TN>
DEV void matmul_finish(const rocq_k_matmul_args &a, const matmul_block &block,
                       const matmul_place &at, const frag_c (&c)[TM][TN], float *work, int64_t m0,
                       int64_t n0) {
    const rocq_k_matmul_product product = a.product[block.product]; // a copy, see matmul_block
    const int stride = 16 * TM + 2;
    work += matmul_wave() * matmul_pass_floats<TM>();
#pragma unroll 1
    for (int pass = 0; pass < TN; pass++) {
        block_sync_lds();
        frags_put(c, pass, work, stride);
        block_sync_lds();
#pragma unroll 1
        for (int column = 0; column < 16; column++) {
            const int64_t n = n0 + 16 * pass + column;
            if (n >= a.n) break;
            matmul_put_sums<TM / 2>(a, product, at, work + column * stride, m0, n);
        }
    }
}

// -- tiles by expert --

struct experts_tile {
    int expert, first, n; // its columns are sorted pairs first to first + n - 1
    int slice, where;     // see rocq_k_experts_tiles
};
DEV experts_tile experts_tile_of(const rocq_k_experts_tiles &experts, uint32_t tile) {
    const int32_t *const from = experts.tiles + 4 * (int64_t)tile;
    const int expert = wave_read(gload(from), 0), at = wave_read(gload(from + 3), 0);
    return experts_tile{expert, wave_read(gload(from + 1), 0), wave_read(gload(from + 2), 0),
                        at >> 2, at & 3};
}
// If the tile's expert is read from a copy: its w, w2 and number of units.
DEV void experts_choose_copy(const rocq_k_experts_tiles &experts, const experts_tile &own,
                             const void *&w, const void *&w2, int64_t &n_units) {
    if (own.where == ROCQ_K_EXPERTS_W) return;
    const rocq_k_experts_copies &other =
        own.where == ROCQ_K_EXPERTS_COPIES ? experts.copies : experts.fetched;
    w = other.w;
    w2 = other.w2;
    n_units = other.n_units;
}
DEV int experts_pair(const rocq_k_experts_tiles &experts, const experts_tile &own, int column) {
    return gload(experts.pairs + own.first + column);
}
// The column of x, in F16, of the pair at `column` of a tile.
DEV const char *experts_column(const rocq_k_matmul_args &a, const experts_tile &own,
                               uint32_t column) {
    const int pair = experts_pair(a.experts, own, (int)column);
    const int64_t from = a.experts.x_slots == 1 ? pair / a.experts.n_slots : pair;
    return (const char *)a.x + from * a.x_stride * 2;
}
DEV matmul_place experts_place_of(const rocq_k_matmul_product &product, uint32_t block,
                                  const experts_tile &own, int64_t tile_m, uint32_t n_steps) {
    matmul_place p = {};
    p.m0 = block % (uint32_t)product.tiles_m * tile_m;
    p.w_row = own.slice * product.m + p.m0;
    p.end = n_steps;
    return p;
}

// matmul_finish for a tile by expert: a wave has all columns of its own rows, from row m0 of its
// matrix on. With split_rows, waves 0 and 1 have rows of w, and waves 2 and 3 the same rows of w2:
// then waves i and i + 2 both read z and z2 of these rows from LDS, and share the columns.
template <int TM, int TN>
DEV void experts_finish(const rocq_k_matmul_product &product,
                        const rocq_k_experts_tiles &experts,
                        const experts_tile &own, const frag_c (&c)[TM][TN], float *work,
                        bool split_rows, int64_t m0) {
    enum { STRIDE = 16 * TM + 2, PASS = matmul_pass_floats<TM>() };
    static_assert(TM == 2, "a lane finishes one row");
    const int wave = matmul_wave(), step = split_rows ? 2 : 1;
    const float *const z = work + (split_rows ? wave % 2 : wave) * PASS, *const z2 = z + 2 * PASS;
    const int64_t m = m0 + lane_index();
    const float *const bias = product.epilogue.bias, *const bias2 = experts.bias2;
    const bool there = m < product.m;
    const float b = bias && there ? gload(bias + own.expert * experts.bias_stride + m) : 0.0f;
    const float b2 = bias2 && there ? gload(bias2 + own.expert * experts.bias2_stride + m) : 0.0f;
#pragma unroll 1
    for (int pass = 0; pass < TN; pass++) {
        block_sync_lds();
        frags_put(c, pass, work + wave * PASS, STRIDE);
        block_sync_lds();
#pragma unroll 1
        for (int column = split_rows ? wave / 2 : 0; column < 16; column += step) {
            if (16 * pass + column >= own.n) break;
            if (!there) continue;
            const int pair = experts_pair(experts, own, 16 * pass + column);
            const int token = pair / experts.n_slots, slot = pair - token * experts.n_slots;
            const int at = column * STRIDE + lane_index();
            const float v = experts_value(product.epilogue.activation, experts.limit, experts.alpha,
                                          split_rows, lget(z + at) + b,
                                          split_rows ? lget(z2 + at) + b2 : 1.0f);
            put_float(product.epilogue.y.format, row_of(product.epilogue.y, slot, token, 0), m, v);
        }
    }
}

// -- F16 --

// matmul_f16: x in F16, w decoded to F16, products and sums on the matrix unit with F32 sums.
//
// A step is 64 of K, two units a row. A thread decodes one unit of each of two rows of w and its
// neighbour the other unit of both rows (plain formats: 16-byte vectors, 8 threads a row), and
// copies vectors of x, 8 threads a column. So x is read in whole cache lines, and a load of w
// touches no more lines than it has to.
// Tile of 128 columns: waves 2 by 2, each 64 by 64, so that 4 + 4 fragments feed 16 WMMA and LDS is
// busy for a third of the time that the matrix units are; 128 sums a lane. Tile of 32 columns: the
// waves are one above the other, each 32 by 32, so that a unit is still decoded only once; of a
// tile with up to 16 columns only those are multiplied.
// A SIMD of RDNA3 issues no WMMA while it decodes, but a weight is decoded once for all columns of
// a tile: 2 to 4 VALU operations per 32 cycles of WMMA (128 columns) or 8 (32 columns).
//
// LDS: 36 KB (32 columns: 23 KB), rows of 64 halves and 8 of padding. One buffer and two barriers
// in a step of 64 wait as often as two buffers and one barrier in a step of 32 would, and the loads
// of w and x are twice as long. A WGP holds three blocks (five), so three waves a SIMD with 256
// registers each; the epilogue uses the same LDS.
// Bytes: w tiles_n times and x tiles_m times, mostly from L2. Weights beyond F16's range become
// infinite here.
enum {
    MATMUL_F16_BK = 64,
    MATMUL_F16_ROW = MATMUL_F16_BK + 8, // of LDS, in halves: 36 words spread 8 rows over all banks
    MATMUL_F16_CHUNKS = MATMUL_F16_BK / 8,
    MATMUL_F16_LOAD_ROWS = 128 / MATMUL_F16_CHUNKS // that a block loads vectors of at once
};

// The 32 weights of a unit in F16. With 0x64 as its upper byte, a code is the F16 number 1024 +
// code; subtracting 1024 is exact, so a value is rounded twice: with its scale and as the product.
template <int F> DEV void matmul_unit_halves(const raw<F> &r, uint32_t unit, u32x4 h[4]) {
    typedef block_layout<F> l;
    const block_factors f = decode_factors<F>(r, unit);
    uint32_t w[16], codes[8];
    decode_codes<F>(r, unit, codes);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const f16 s = (f16)(f.d * (float)f.sc[i >> 2]);
        const uint32_t q = codes[i];
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

// take_row: which of the two units that a thread has prefetched is decoded in pass i of two. For
// formats that are only read the passes are a loop, so their code and constants are there once.
template <int F> DEV constexpr int decode_passes() { return F == READ ? 1 : 2; } // unrolled
template <int F> DEV raw<F> take_row(raw<F> (&r)[2], int i) {
    if constexpr (F != READ) return r[i];
    const raw<F> first = r[0];
    r[0] = r[1];
    return first;
}

// Eight elements of a plain format in F16.
template <int F> DEV u32x4 matmul_vector_halves(const u32x4 &vector) {
    if constexpr (F == ROCQ_F16) {
        return vector;
    } else {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float v[4];
            decode_vector<F>(vector, i, v);
            w[2 * i] = bits<uint32_t>(pair((f16)v[0], (f16)v[1]));
            w[2 * i + 1] = bits<uint32_t>(pair((f16)v[2], (f16)v[3]));
        }
        return make4(w[0], w[1], w[2], w[3]);
    }
}

// The vector at element k of a row of n elements of a plain format, with zeros past the end.
// wide: a row is a whole number of vectors.
template <int F> DEV u32x4 matmul_load_vector(const char *row, uint32_t k, uint32_t n, bool wide) {
    const int size = 16 / vector_elems<F>();
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

// Puts a unit into LDS, in F16.
template <int F> DEV void matmul_put_unit(u32x4 *to, const raw<F> &r, uint32_t unit) {
    u32x4 halves[4];
    matmul_unit_halves<F>(r, unit, halves);
#pragma unroll
    for (int j = 0; j < 4; j++) lput(to + j, halves[j]);
}

// A vector that has elements k to k + 7 of a row of n, with those past the end set to 0.
DEV u32x4 matmul_mask_halves(const u32x4 &vector, int64_t k, int64_t n) {
    uint32_t w[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int64_t e = k + 2 * i;
        w[i] = e + 1 < n ? w[i] : e < n ? w[i] & 0xffffu : 0;
    }
    return make4(w[0], w[1], w[2], w[3]);
}

// The bytes before the vector of halves at element e of a row, or before the row's last one.
DEV uint32_t matmul_vector_at(uint32_t e, uint32_t k) {
    const uint32_t last = (k - 1) & ~7u;
    return (e < last ? e : last) * 2;
}
// How many times 16 of K there are in a step; the last step may have fewer than the others.
DEV int matmul_n16(uint32_t k, uint32_t step) {
    const uint32_t left = (k - step * MATMUL_F16_BK + 15) / 16;
    return left < MATMUL_F16_BK / 16 ? (int)left : MATMUL_F16_BK / 16;
}
// c += w x over 16 * n16 elements of K. w and x point into LDS to the wave's first row and column;
// 16 * USED columns are multiplied, whose fragments are x_stride halves apart. A fragment's
// registers are loaded again as soon as its last product is issued.
template <int TM, int TN, int USED>
DEV void matmul_multiply(frag_c (&c)[TM][TN], const f16 *w, const f16 *x, int n16,
                         int x_stride = 16 * MATMUL_F16_ROW) {
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
            const int from = last ? 16 * s : (j + 1) * x_stride + 16 * (s - 1);
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
        const int from = (j + 1) * x_stride + 16 * (n16 - 1);
        const frag_b next_x = j + 1 < USED ? frag_load_b(x + from, ROW) : fx;
#pragma unroll
        for (int i = 0; i < TM; i++) wmma(c[i][j], fw[i], fx);
        fx = next_x;
    }
}

// A block's tile: BM rows by BN columns; a wave has WM by WN of them, or TM by TN fragments.
template <int BN> struct matmul_f16_shape {
    enum {
        BM = ROCQ_K_MATMUL_M, WN = BN >= 64 ? 64 : 32, WM = BM * BN / 4 / WN,
        TM = WM / 16, TN = WN / 16,
        N_W = BM / MATMUL_F16_LOAD_ROWS, N_X = BN / MATMUL_F16_LOAD_ROWS // a thread's vectors
    };
};

// Where a thread finds x: vector `chunk` of a step in column `row` of the tile and in every
// MATMUL_F16_LOAD_ROWS-th from there on, so that 8 lanes read the vectors of a column's cache line.
// Columns past the last repeat it: offsets are limited to that of the last column. What is loaded
// lies in an array beside this, which the compiler would else not take apart into registers before
// it unrolls the loops over it.
struct matmul_f16_x {
    const char *first; // the tile's first column
    uint32_t bytes;    // from one column to the next
    uint32_t last;     // column of the tile
    uint32_t k;        // elements of a column
    int chunk, row;
};
// pairs: with EXPERTS, the thread's columns, which are those of the tile's pairs.
template <int BN, bool EXPERTS, int N>
DEV void matmul_f16_place_x(matmul_f16_x &x, const char *(&pairs)[N], const rocq_k_matmul_args &a,
                            const matmul_place &at, const experts_tile &own) {
    const int64_t n_columns = EXPERTS ? own.n : a.n;
    x.first = (const char *)a.x + at.x_column * a.x_stride * 2;
    x.bytes = (uint32_t)a.x_stride * 2;
    x.last = (uint32_t)(n_columns - at.n0 < BN ? n_columns - at.n0 : BN) - 1;
    x.k = (uint32_t)a.k;
    x.chunk = (int)thread_index() % MATMUL_F16_CHUNKS;
    x.row = (int)thread_index() / MATMUL_F16_CHUNKS;
    if constexpr (EXPERTS) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const uint32_t column = (uint32_t)(x.row + i * MATMUL_F16_LOAD_ROWS);
            pairs[i] = experts_column(a, own, column < x.last ? column : x.last);
        }
    }
}
// Loads the thread's vectors of a step.
template <bool EXPERTS, int N, int N_PAIRS>
DEV void matmul_f16_load_x(u32x4 (&v)[N], const matmul_f16_x &x, const char *(&pairs)[N_PAIRS],
                           uint32_t step) {
    enum { BK = MATMUL_F16_BK, LOAD_ROWS = MATMUL_F16_LOAD_ROWS };
    const uint32_t from = matmul_vector_at(step * BK + 8 * (uint32_t)x.chunk, x.k);
    const uint32_t most = x.last * x.bytes + from, first = (uint32_t)x.row * x.bytes + from;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const uint32_t offset = first + (uint32_t)(i * LOAD_ROWS) * x.bytes;
        if constexpr (EXPERTS) v[i] = gload((const u32x4 *)(pairs[i] + from));
        else v[i] = gload((const u32x4 *)(x.first + (offset < most ? offset : most)));
    }
}
// Puts them into LDS. F is the format of w: K may end within a vector only if that is plain.
template <int F, int N>
DEV void matmul_f16_store_x(f16 *xt, const u32x4 (&v)[N], const matmul_f16_x &x, uint32_t step) {
    enum { BK = MATMUL_F16_BK, ROW = MATMUL_F16_ROW };
    const bool tail = is_plain<F>() && step * BK + BK > x.k;
#pragma unroll
    for (int i = 0; i < N; i++) {
        u32x4 *to = (u32x4 *)(xt + (x.row + i * MATMUL_F16_LOAD_ROWS) * ROW) + x.chunk;
        lput(to, tail ? matmul_mask_halves(v[i], step * BK + 8 * (uint32_t)x.chunk, x.k) : v[i]);
    }
}

// The matrix that a block multiplies, and with split_rows the other one.
struct matmul_f16_matrix {
    const void *w, *w2;
    int64_t n_units;
};
// Where a thread finds w. Block formats: unit `half` of a step's two, of rows t / 2 and t / 2 + 64
// of the tile, so that two lanes share a cache line. Plain formats: vectors, as of x. Rows past the
// last repeat it.
template <int F> struct matmul_f16_w {
    planes<F> p, p2;    // block formats, from the tile's first row on; p2: of its second half
    uint32_t unit;      // of row t / 2, the first one
    uint32_t row_units, half;
    const char *w, *w2; // plain formats, from the tile's first row on
    bool wide;          // a row is a whole number of vectors
    bool split_rows;    // the second half of the tile's rows is of w2
    uint32_t second;    // that half's first row in its own matrix
    uint32_t last;      // row of the tile in its own matrix
    uint32_t k;         // elements of a row
    int t, chunk, row;  // the thread, and its vectors
};
template <int F, bool EXPERTS>
DEV void matmul_f16_place_w(matmul_f16_w<F> &w, const matmul_f16_matrix &from,
                            const rocq_k_matmul_args &a, const rocq_k_matmul_product &product,
                            const matmul_place &at) {
    enum { BM = ROCQ_K_MATMUL_M };
    w.split_rows = EXPERTS && a.experts.w2 != 0;
    w.second = w.split_rows ? 0 : BM / 2;
    const int64_t tile_m = w.split_rows ? BM / 2 : BM;
    w.last = (uint32_t)(product.m - at.m0 < tile_m ? product.m - at.m0 : tile_m) - 1;
    w.t = (int)thread_index();
    w.chunk = w.t % MATMUL_F16_CHUNKS;
    w.row = w.t / MATMUL_F16_CHUNKS;
    w.half = (uint32_t)w.t % 2;
    w.k = (uint32_t)a.k;
    w.row_units = w.k / 32;
    if constexpr (is_plain<F>()) {
        w.w2 = nullptr;
        w.w = (const char *)from.w + at.w_row * w.k * (16 / vector_elems<F>());
        if (EXPERTS && w.split_rows) w.w2 = (const char *)from.w2 + (w.w - (const char *)from.w);
        w.wide = w.k % vector_elems<F>() == 0;
    } else {
        w.p = planes_at(planes_of<F>(from.w, from.n_units, product.format), at.w_row * w.row_units);
        if constexpr (EXPERTS) {
            w.p2 = w.p;
            if (w.split_rows) {
                w.p2 = planes_at(planes_of<F>(from.w2, from.n_units, product.format),
                                 at.w_row * w.row_units);
            }
        }
        w.unit = (uint32_t)w.t / 2 * w.row_units;
    }
}
// Loads the thread's units of a step, or its vectors if rows are whole vectors.
template <int F, bool EXPERTS, int N>
DEV void matmul_f16_load_w(raw<F> (&r)[2], u32x4 (&v)[N], const matmul_f16_w<F> &w,
                           uint32_t step) {
    enum { BM = ROCQ_K_MATMUL_M, BK = MATMUL_F16_BK, LOAD_ROWS = MATMUL_F16_LOAD_ROWS };
    if constexpr (!is_plain<F>()) {
        const uint32_t u = 2 * step + w.half < w.row_units ? 2 * step + w.half : w.row_units - 1;
        const uint32_t most = w.last * w.row_units;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t first = w.unit + (uint32_t)i * w.second * w.row_units;
            const uint32_t unit = (first < most ? first : most) + u;
            r[i] = EXPERTS && i == 1 ? load_raw(w.p2, unit) : load_raw(w.p, unit);
        }
    } else if (F != ROCQ_F32 && w.wide) {
        const uint32_t e = step * BK + 8 * (uint32_t)w.chunk;
        const uint32_t first = ((uint32_t)w.row * w.k + e) * 2, most = (w.last * w.k + e) * 2;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const bool other = EXPERTS && w.split_rows && i >= N / 2;
            const int rows = i * LOAD_ROWS - (other ? BM / 2 : 0);
            const uint32_t offset = first + (uint32_t)rows * w.k * 2;
            const char *const from = other ? w.w2 : w.w;
            v[i] = make4(0, 0, 0, 0);
            if (e < w.k) v[i] = gload((const u32x4 *)(from + (offset < most ? offset : most)));
        }
    }
}
// Loads a step of w, of a plain format, and puts it into LDS, each thread every 128th vector. No
// prefetch: F32 would take 64 registers for it, misaligned rows many loads.
template <int F, bool EXPERTS>
DEV void matmul_f16_copy_w(f16 *wt, const matmul_f16_w<F> &w, uint32_t step) {
    enum { BM = ROCQ_K_MATMUL_M, BK = MATMUL_F16_BK, ROW = MATMUL_F16_ROW };
    const int vectors = BK / vector_elems<F>(); // of a row
#pragma unroll 1
    for (int i = w.t; i < BM * vectors; i += 128) {
        const int r = i / vectors, e = i % vectors * vector_elems<F>();
        const bool other = EXPERTS && w.split_rows && r >= BM / 2;
        const uint32_t r_own = (uint32_t)(other ? r - BM / 2 : r);
        const uint32_t r_in = r_own < w.last ? r_own : w.last;
        const char *const w_row = (other ? w.w2 : w.w) + r_in * (w.k * (16 / vector_elems<F>()));
        const u32x4 vector = matmul_load_vector<F>(w_row, step * BK + (uint32_t)e, w.k, w.wide);
        f16 *const to = wt + r * ROW + e;
        if constexpr (F == ROCQ_F32) {
            float v[4];
            decode_vector<F>(vector, 0, v);
            lput((u32x2 *)to, make2(bits<uint32_t>(pair((f16)v[0], (f16)v[1])),
                                    bits<uint32_t>(pair((f16)v[2], (f16)v[3]))));
        } else {
            lput((u32x4 *)to, matmul_vector_halves<F>(vector));
        }
    }
}
// Puts a step of w into LDS, in F16: what was loaded, or else what is loaded here.
template <int F, bool EXPERTS, int N>
DEV void matmul_f16_store_w(f16 *wt, raw<F> (&r)[2], const u32x4 (&v)[N], const matmul_f16_w<F> &w,
                            uint32_t step) {
    enum { BM = ROCQ_K_MATMUL_M, ROW = MATMUL_F16_ROW, LOAD_ROWS = MATMUL_F16_LOAD_ROWS };
    if constexpr (!is_plain<F>()) {
#pragma unroll decode_passes<F>()
        for (int i = 0; i < 2; i++) {
            u32x4 *to = (u32x4 *)(wt + (w.t / 2 + i * (BM / 2)) * ROW) + 4 * w.half;
            matmul_put_unit<F>(to, take_row<F>(r, i), 2 * step + w.half);
        }
    } else if (F != ROCQ_F32 && w.wide) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            u32x4 *to = (u32x4 *)(wt + (w.row + i * LOAD_ROWS) * ROW) + w.chunk;
            lput(to, matmul_vector_halves<F>(v[i]));
        }
    } else {
        matmul_f16_copy_w<F, EXPERTS>(wt, w, step);
    }
}

// With EXPERTS it is matmul_experts, the product by expert, in tiles of 32 or 64 columns. A weight
// is decoded once for all columns of a tile, so 64 are for prompts that fill them: a wave has 32 by
// 64, LDS is 27 KB, and of a tile with up to 32 columns only those are multiplied. experts_sort
// tells which expert's matrix it multiplies, and which pairs of a token and a slot its columns are;
// a block whose tile is empty leaves. With w2 rows 0 to 63 of the tile are of w and 64 to 127 of
// w2, so that both products of a row meet in the epilogue, which takes z and z2 from the LDS of two
// waves.
template <int F, int BN, bool EXPERTS> DEV void matmul_f16(const rocq_k_matmul_args &a) {
    typedef matmul_f16_shape<BN> S;
    enum { BM = S::BM, WM = S::WM, WN = S::WN, TM = S::TM, TN = S::TN };
    enum { BK = MATMUL_F16_BK, ROW = MATMUL_F16_ROW };
    LDS(u32x4, tile, (BM + BN) * ROW / 8);
    static_assert(16 * matmul_pass_floats<TM>() <= (int)sizeof(tile), "matmul_finish's work");
    f16 *const wt = (f16 *)tile, *const xt = wt + BM * ROW;
    const matmul_block block =
        EXPERTS ? matmul_block{0, a.common.block0 + block_index()} : matmul_block_of(a);
    const rocq_k_matmul_product &product = a.product[block.product];
    const rocq_k_experts_tiles &experts = a.experts;
    if (product.tiles_m == 0) return;
    const uint32_t k = (uint32_t)a.k;
    const bool split_rows = EXPERTS && experts.w2 != 0; // rows of w and of w2
    const int64_t tile_m = split_rows ? BM / 2 : BM;
    matmul_place at;
    experts_tile own = {0, 0, 0, 0, 0};
    const void *all_w = product.w, *all_w2 = experts.w2;
    int64_t w_units = product.w_units;
    if constexpr (EXPERTS) {
        own = experts_tile_of(experts, block.index / (uint32_t)product.tiles_m);
        if (own.n == 0) return;
        experts_choose_copy(experts, own, all_w, all_w2, w_units);
        at = experts_place_of(product, block.index, own, tile_m, (k + BK - 1) / BK);
    } else {
        at = matmul_place_of(a, block, BM, BN, (k + BK - 1) / BK);
    }
    const int64_t n_columns = EXPERTS ? own.n : a.n;
    const int wave = matmul_wave();
    const int wm = wave % (BM / WM) * WM, wn = wave / (BM / WM) * WN;

    // What the thread loads of x and w for the next step, and from where
    matmul_f16_x x;
    u32x4 xr[S::N_X];
    const char *pairs[EXPERTS ? S::N_X : 1];
    matmul_f16_place_x<BN, EXPERTS>(x, pairs, a, at, own);
    matmul_f16_w<F> w;
    raw<F> wr[2];
    u32x4 wp[S::N_W];
    matmul_f16_place_w<F, EXPERTS>(w, {all_w, all_w2, w_units}, a, product, at);
    // Lambdas, as calls of the helpers themselves cost registers: they would be inlined before any
    // optimization, while these are optimized by themselves first
    const auto load_x = [&](uint32_t step) { matmul_f16_load_x<EXPERTS>(xr, x, pairs, step); };
    const auto load_w = [&](uint32_t step) { matmul_f16_load_w<F, EXPERTS>(wr, wp, w, step); };
    const auto store_x = [&](uint32_t step) { matmul_f16_store_x<F>(xt, xr, x, step); };
    const auto store_w = [&](uint32_t s) { matmul_f16_store_w<F, EXPERTS>(wt, wr, wp, w, s); };

    const int wm_own = split_rows ? wm % (BM / 2) : wm; // in its own matrix
    const bool has_work = at.m0 + wm_own < product.m && at.n0 + wn < n_columns; // of the wave
    frag_c c[TM][TN];
    matmul_clear(c);
    const bool half_tile = TM == 2 && x.last < BN / 2;
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
        const int n16 = matmul_n16(k, step);
        const f16 *const w_wave = wt + wm * ROW, *const x_wave = xt + wn * ROW;
        enum { HALF = TM == 2 ? TN / 2 : TN };
        if (half_tile && has_work) matmul_multiply<TM, TN, HALF>(c, w_wave, x_wave, n16);
        else if (has_work) matmul_multiply<TM, TN, TN>(c, w_wave, x_wave, n16);
        block_sync_lds();
    }
    if constexpr (EXPERTS) {
        experts_finish<TM, TN>(product, experts, own, c, (float *)tile, split_rows, at.m0 + wm_own);
    } else {
        matmul_finish<TM, TN>(a, block, at, c, (float *)tile, at.m0 + wm, at.n0 + wn);
    }
}

#define ROCQ_X(X, f)                                                        \
    KERNEL(matmul_f16_##f##_128, rocq_k_matmul_args, 128) {                 \
        matmul_f16<ROCQ_K_ID_##f, ROCQ_K_MATMUL_F16_N, false>(a);           \
    }                                                                       \
    KERNEL(matmul_f16_##f##_32, rocq_k_matmul_args, 128) {                  \
        matmul_f16<ROCQ_K_ID_##f, ROCQ_K_MATMUL_F16_N_FEW, false>(a);       \
    }                                                                       \
    KERNEL(matmul_experts_##f##_32, rocq_k_matmul_args, 128) {              \
        matmul_f16<ROCQ_K_ID_##f, 32, true>(a);                             \
    }                                                                       \
    KERNEL(matmul_experts_##f##_64, rocq_k_matmul_args, 128) {              \
        matmul_f16<ROCQ_K_ID_##f, 64, true>(a);                             \
    }
ROCQ_K_ALL_FORMATS(ROCQ_X, )
#undef ROCQ_X

// -- F16, from LDS --
// [large LDS] RDNA3: skip to "-- INT8 --". Only chips with over 64 KiB of LDS run this.

// Products of F16 operands where four waves multiply straight from LDS (WMMA_TILES), for matmul and
// matmul_backward: c[row][col] = sum over r of a(row, r) b(col, r), where columns are what lies
// innermost in memory of the result, and in each operand r is innermost or, transposed, its rows.
// Elsewhere these kernels are empty, and no launch has them.
//
// A tile is BM rows, 64 or 128 for each group of four waves, by BN columns; a step is 64 of r. LDS
// is a ring of STAGES steps, which are copied unchanged, asynchronously and AHEAD steps ahead. With
// AHEAD = STAGES - 2 a step's products are begun before the wait for those of the step before, so
// that a block that is alone on its compute unit always has work for the matrix unit; with
// STAGES - 1 they are waited for at once, while other blocks multiply, or, with 128 rows a group, a
// second barrier says that the stage of the step before is free. Eight threads copy a line of
// 64 elements, with zeros past the last r and row, where nothing is read. A launch asks for the
// LDS, ROCQ_K_LDS_BYTES; the epilogue uses the same. On an H100 128 tiles of 224 x 256, K = 4096,
// one on each compute unit, take 96 us with their epilogue, 620 TFLOPS.
struct lds_operand {
    const char *data; // the tile's first row at r 0
    int64_t stride;   // bytes from row to row; transposed: from r to r
    int32_t rows;     // from the tile's first row on
};
// A thread's lines are THREADS / 8 apart and so have the same swizzle (see >>wmma_lds). Each
// address is the one before plus a constant: on an H200 that makes products of 512 columns 1.05
// times as fast.
template <bool TURNED, int ROWS, int THREADS>
DEV void lds_load(const lds_operand &from, int32_t r0, int32_t n_r, f16 *to) {
    const int t = (int)thread_index(), vector = t % 8, first = t / 8;
    static_assert(THREADS % 64 == 0, "lines of a thread are multiples of 8 apart");
    to += first * 64 + (vector ^ (first & 7)) * 8;
    if constexpr (!TURNED) {
        const int32_t left = n_r - r0 - 8 * vector;
        const int32_t bytes = left <= 0 ? 0 : left < 8 ? 2 * left : 16;
        const char *line = from.data + first * from.stride + (r0 + 8 * vector) * 2;
#pragma unroll
        for (int i = 0; i < 8 * ROWS / THREADS; i++) {
            copy_async_part((u32x4 *)(to + i * (8 * THREADS)), (const u32x4 *)line,
                            first + i * (THREADS / 8) < from.rows ? bytes : 0);
            line += THREADS / 8 * from.stride;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8 * ROWS / THREADS; i++) {
            const int line = first + i * (THREADS / 8);
            const int32_t row = line / 64 * 64 + 8 * vector, r = r0 + line % 64;
            const int32_t there = r >= n_r || row >= from.rows ? 0 : from.rows - row;
            copy_async_part((u32x4 *)(to + i * (8 * THREADS)),
                            (const u32x4 *)(from.data + r * from.stride + row * 2),
                            there < 8 ? 2 * there : 16);
        }
    }
}

// Each group of four waves has TM times 64 rows of the tile, in c[0], c[1] and so on: groups take
// turns at 64 rows. beside(tile of a) is called while a step's products run, before the wait.
// begin must be below end, which rocq__tile_splits sees to: a split has ROCQ__TILE_SPLIT of r at
// least. For a loop that may have no step ptxas waits for each product at once, since then c is
// also read where no product has written it (message C7515), and takes 1.4 times as long.
template <bool A_TURNED, bool B_TURNED, int BM, int BN, int STAGES, int AHEAD, int TM, typename F>
DEV void lds_multiply(frag_c (&c)[TM][BN / 16], const lds_operand &a, const lds_operand &b,
                      int32_t n_r, uint32_t begin, uint32_t end, f16 *tiles, F beside) {
    enum { THREADS = 2 * BM / TM, STEP = 64 * (BM + BN), LATE = TM > 1 && AHEAD == STAGES - 1 };
    int stage = 0, free = 0;
    uint32_t ahead = begin;
    const auto load = [&]() {
        f16 *const to = tiles + free * STEP;
        if (ahead < end) {
            lds_load<A_TURNED, BM, THREADS>(a, (int32_t)ahead * 64, n_r, to);
            lds_load<B_TURNED, BN, THREADS>(b, (int32_t)ahead * 64, n_r, to + 64 * BM);
        }
        copies_close();
        ahead++;
        free = free + 1 == STAGES ? 0 : free + 1;
    };
    for (int i = 0; i < AHEAD; i++) load();
#pragma unroll 1
    do {
        const f16 *const a_tile = tiles + stage * STEP;
        copies_wait<AHEAD - 1>();
        lds_written();
        block_sync_lds();
        wmma_lds_begin();
#pragma unroll
        for (int s = 0; s < 4; s++) {
#pragma unroll
            for (int i = 0; i < TM; i++) {
                wmma_tile<A_TURNED, B_TURNED>(
                    c[i], a_tile + (matmul_wave() / 4 + i * (THREADS / 128)) * 4096,
                    a_tile + 64 * BM, s);
            }
        }
        wmma_lds_end();
        if constexpr (LATE) {
            wmma_lds_wait<1>();
            block_sync_lds();
        }
        load();
        beside(a_tile);
        if constexpr (!LATE) wmma_lds_wait<STAGES - 1 - AHEAD>();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    } while (++begin < end);
    wmma_lds_wait();
    copies_wait<0>();
    block_sync_lds();
}

// The epilogue of a wave's 16 rows of a tile. A WMMA result has a column in each lane, but y is
// stored by rows: so the wave transposes its sums in LDS, and each lane then reads whole quads of a
// row. It does so for AHEAD quads at a time, whose operands are all in flight before the first is
// used: load(row, col) loads the up to three quads (bias, residual ...) that the quad there needs,
// and store(row, col, loaded, sums) computes and stores it. store has much code, which is fetched
// when the loop over K has ended: so it is there once, and the loaded quads move up to it.
struct lds_loaded { u32x4 quad[3]; };
// lds_put writes the sums to LDS and returns where the wave's are; behind a wave_sync,
// lds_finish_rows does the rest.
template <int BN> DEV float *lds_put(const frag_c (&c)[BN / 16], float *work) {
    enum { STRIDE = BN + 8 };
    work += matmul_wave() * 16 * STRIDE;
#pragma unroll
    for (int j = 0; j < BN / 16; j++) {
#pragma unroll
        for (int v = 0; v < 8; v++) {
            lput(work + frag_row(v) * STRIDE + 16 * j + frag_col(v), c[j].v[v]);
        }
    }
    return work;
}
template <int BN, typename L, typename S>
DEV void lds_finish_rows(const float *work, L load, S store) {
    enum { STRIDE = BN + 8, QUADS = BN / 4, AHEAD = 4 };
    const int wave = matmul_wave();
#pragma unroll 1
    for (int i = lane_index(); i < 16 * QUADS; i += 32 * AHEAD) {
        lds_loaded loaded[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int quad = i + 32 * j;
            loaded[j] = load(16 * wave + quad / QUADS, 4 * (quad % QUADS));
        }
#pragma unroll 1
        for (int j = 0; j < AHEAD; j++) {
            const int quad = i + 32 * j, row = quad / QUADS, col = 4 * (quad % QUADS);
            float v[4];
            decode_vector<ROCQ_F32>(lget((const u32x4 *)(work + row * STRIDE + col)), 0, v);
            store(16 * wave + row, col, loaded[0], v);
#pragma unroll
            for (int next = 1; next < AHEAD; next++) loaded[next - 1] = loaded[next];
        }
    }
}

template <int BN, typename L, typename S>
DEV void lds_finish(const frag_c (&c)[BN / 16], float *work, L load, S store) {
    work = lds_put<BN>(c, work);
    wave_sync();
    lds_finish_rows<BN>(work, load, store);
}
// lds_finish_rows for what most products want: y = activation(sum) * gate + residual in rows of
// whole quads, of which `rows` and `quads` are there; gate and residual F32 or absent, y F32 or
// F16, and the activation SiLU or none. Each points to row 0 of the tile. That takes a fraction of
// the instructions, which a block has to fetch from L2 when its loop ends: at 29 columns and K 256
// the general code took 6 us for a residual and 12 for SiLU and a gate (H100).
struct lds_rows {
    char *y;
    const char *gate, *residual;
    int64_t y_stride, gate_stride, residual_stride; // bytes
    int rows, quads;
    bool silu, f16;
};
template <int BN> DEV void lds_store_rows(const float *work, const lds_rows &to) {
    enum { STRIDE = BN + 8, QUADS = BN / 4, AHEAD = 4 };
    const int first = 16 * matmul_wave();
#pragma unroll 1
    for (int i = lane_index(); i < 16 * QUADS; i += 32 * AHEAD) {
        u32x4 gate[AHEAD], residual[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int quad = i + 32 * j, row = first + quad / QUADS, col = quad % QUADS;
            const bool there = row < to.rows && col < to.quads;
            gate[j] = residual[j] = make4(0, 0, 0, 0);
            if (to.gate && there) {
                gate[j] = gload((const u32x4 *)(to.gate + row * to.gate_stride) + col);
            }
            if (to.residual && there) {
                residual[j] = gload((const u32x4 *)(to.residual + row * to.residual_stride) + col);
            }
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int quad = i + 32 * j, row = first + quad / QUADS, col = quad % QUADS;
            float v[4], with[4];
            const u32x4 sums = lget((const u32x4 *)(work + quad / QUADS * STRIDE) + col);
            decode_vector<ROCQ_F32>(sums, 0, v);
            if (to.silu) activate4(ROCQ_ACT_SILU, v);
            decode_vector<ROCQ_F32>(gate[j], 0, with);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (to.gate) v[e] *= with[e];
            }
            decode_vector<ROCQ_F32>(residual[j], 0, with);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (to.residual) v[e] += with[e];
            }
            if (row < to.rows && col < to.quads) {
                put_floats(to.f16 ? ROCQ_F16 : ROCQ_F32, true, to.y + row * to.y_stride, 4 * col,
                           4, v);
            }
        }
    }
}

// Whether lds_store_rows can read t, a gate or residual, or it is absent.
DEV bool lds_takes_rows(const rocq_k_tensor &t, bool wide) {
    return !t.data || (t.format == ROCQ_F32 && wide);
}

// matmul_lds_finish for any format, alignment and epilogue. wide: of y, or of a split's sums.
template <int BN>
DEV void matmul_lds_finish_any(const rocq_k_matmul_args &a, const rocq_k_matmul_product &product,
                               const matmul_place &at, const float *work, bool wide) {
    const rocq_k_epilogue &e = product.epilogue;
    const bool whole = a.n_splits == 1, bias_wide = (uintptr_t)e.bias % 16 == 0;
    const bool gate_wide = quads_are_wide(e.gate), residual_wide = quads_are_wide(e.residual);
    const bool loads = whole && (e.bias || e.gate.data || e.residual.data);
    const epilogue between = {ROCQ_ACT_IDENTITY, e.softcap, false, e.gate.data != 0, false, false};
    const auto count = [&](int row, int col) {
        return at.n0 + row < a.n ? quad_count(product.m, at.m0 + col) : 0;
    };
    const auto load = [&](int row, int col) {
        const int64_t n = at.n0 + row, m = at.m0 + col;
        lds_loaded x = {};
        if (!loads) return x;
        const int there = count(row, col);
        if (e.bias) x.quad[0] = quad_load(ROCQ_F32, bias_wide, (const char *)e.bias, m, there);
        if (e.gate.data) {
            x.quad[1] = quad_load(e.gate.format, gate_wide, row_of(e.gate, n, at.i2, at.i3), m,
                                  there);
        }
        if (e.residual.data) {
            x.quad[2] = quad_load(e.residual.format, residual_wide,
                                  row_of(e.residual, n, at.i2, at.i3), m, there);
        }
        return x;
    };
    const auto store = [&](int row, int col, const lds_loaded &x, float (&v)[4]) {
        const int64_t n = at.n0 + row, m = at.m0 + col;
        const int there = count(row, col);
        if (!whole) {
            float *const sums =
                matmul_split_sums(a, product, at.x_column + row) + at.split * product.m;
            put_floats(ROCQ_F32, wide && there == 4, (char *)sums, m, there, v);
            return;
        }
        float with[4];
        if (e.bias) {
            quad_floats(ROCQ_F32, x.quad[0], with);
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] += with[i];
        }
        if (e.activation != ROCQ_ACT_IDENTITY || e.softcap > 0.0f || e.gate.data) {
            quad_floats(e.gate.format, x.quad[1], with);
            activate4(e.activation, v);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[i] = epilogue_apply(between, v[i], 1.0f, [] { return 0.0f; },
                                      [&] { return with[i]; }, [] { return 0.0f; });
            }
        }
        if (e.residual.data) {
            quad_floats(e.residual.format, x.quad[2], with);
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] += with[i];
        }
        put_floats(e.y.format, wide && there == 4, row_of(e.y, n, at.i2, at.i3), m, there, v);
    };
    lds_finish_rows<BN>(work, load, store);
}
// matmul's epilogue, or stores a split's sums. Rows of the tile are columns n of y.
template <int BN>
DEV void matmul_lds_finish(const rocq_k_matmul_args &a, const rocq_k_matmul_product &product,
                           const matmul_place &at, const float *work) {
    const rocq_k_epilogue &e = product.epilogue;
    const bool whole = a.n_splits == 1;
    const bool wide = whole ? quads_are_wide(e.y) : (product.m & 3) == 0;
    const bool gate_wide = quads_are_wide(e.gate), residual_wide = quads_are_wide(e.residual);
    const bool silu = whole && e.activation == ROCQ_ACT_SILU, f16 = whole && e.y.format == ROCQ_F16;
    if (wide && (product.m & 3) == 0 &&
        (!whole || ((f16 || e.y.format == ROCQ_F32) && !e.bias && e.softcap <= 0.0f &&
                    (silu || e.activation == ROCQ_ACT_IDENTITY) &&
                    lds_takes_rows(e.gate, gate_wide) &&
                    lds_takes_rows(e.residual, residual_wide)))) {
        lds_rows to = {};
        to.y_stride = a.n_splits * product.m * 4;
        if (whole) {
            to.y_stride = e.y.stride[0];
            to.y = row_of(e.y, at.n0, at.i2, at.i3);
            if (e.gate.data) to.gate = row_of(e.gate, at.n0, at.i2, at.i3) + at.m0 * 4;
            if (e.residual.data) {
                to.residual = row_of(e.residual, at.n0, at.i2, at.i3) + at.m0 * 4;
            }
            to.gate_stride = e.gate.stride[0];
            to.residual_stride = e.residual.stride[0];
        } else {
            to.y = (char *)(matmul_split_sums(a, product, at.x_column) + at.split * product.m);
        }
        to.y += at.m0 * (f16 ? 2 : 4);
        to.silu = silu;
        to.f16 = f16;
        const int64_t rows = a.n - at.n0, quads = (product.m - at.m0) / 4;
        to.rows = (int)(rows < 4096 ? rows : 4096);
        to.quads = (int)(quads < BN ? quads : BN);
        lds_store_rows<BN>(work, to);
        return;
    }
    matmul_lds_finish_any<BN>(a, product, at, work, wide);
}
// Finishes a group's TM tiles of 64 rows, which are BM / TM rows apart.
template <int BN, int BM, int TM>
DEV void matmul_lds_finish(const rocq_k_matmul_args &a, const rocq_k_matmul_product &product,
                           matmul_place at, const frag_c (&c)[TM][BN / 16], float *work) {
#pragma unroll
    for (int i = 0; i < TM; i++) {
        if (i > 0) wave_sync(); // lanes have read the sums of before
        const float *const own = lds_put<BN>(c[i], work);
        wave_sync();
        matmul_lds_finish<BN>(a, product, at, own);
        at.n0 += BM / TM;
        at.x_column += BM / TM;
    }
}

// matmul of F16 weights: rows are columns of x, columns rows of w. K is a multiple of 8.
template <int BN, int BM, int STAGES, int AHEAD>
DEV void matmul_lds(const rocq_k_matmul_args &a) {
    enum { TM = 2 * BM / ROCQ_K_LDS_THREADS(BM) };
    LDS_GRANTED(u32x4, tile, ROCQ_K_LDS_BYTES(BN, BM, STAGES) / 16);
    const matmul_block block = matmul_block_of(a);
    const rocq_k_matmul_product &product = a.product[block.product];
    if (product.tiles_m == 0) return;
    const int32_t k = (int32_t)a.k;
    const matmul_place at = matmul_place_of(a, block, BN, BM, ((uint32_t)k + 63) / 64);
    const int64_t rows = a.n - at.n0, cols = product.m - at.m0;
    const lds_operand x = {(const char *)a.x + at.x_column * a.x_stride * 2,
                           a.x_stride * 2, (int32_t)(rows < BM ? rows : BM)};
    const lds_operand w = {(const char *)product.w + at.w_row * k * 2, (int64_t)k * 2,
                           (int32_t)(cols < BN ? cols : BN)};
    frag_c c[TM][BN / 16];
    matmul_clear(c);
    lds_multiply<false, false, BM, BN, STAGES, AHEAD>(c, x, w, k, at.begin, at.end, (f16 *)tile,
                                                      [](const f16 *) {});
    matmul_lds_finish<BN, BM>(a, product, at, c, (float *)tile);
}
#define ROCQ_X(X, name, columns, rows, steps, ahead, blocks)                                \
    KERNEL_WAVES(matmul_lds_##name, rocq_k_matmul_args, ROCQ_K_LDS_THREADS(rows),           \
                 blocks * ROCQ_K_LDS_THREADS(rows) / 128) {                                 \
        if constexpr (WMMA_TILES) matmul_lds<columns, rows, steps, ahead>(a);               \
    }
ROCQ_K_LDS_FORWARD_TILES(ROCQ_X, )
#undef ROCQ_X

// The rows of w that a thread decodes in matmul_lds_decoded. In each step it loads one unit of each
// of UNITS rows (BF16: VECTORS vectors). Rows past the tile's last repeat it.
template <int F, int BN, int BM> struct lds_weights {
    enum { THREADS = 2 * BM, UNITS = BN / BM, VECTORS = 8 * BN / THREADS };
    const char *w; // the tile's first row, of a plain format
    planes<F> p;   // or of another
    uint32_t k, row_units, last_row;
    uint32_t thread; // its index, held in a register
    raw<F> units[2];
    u32x4 vectors[is_plain<F>() ? (int)VECTORS : 1];
};
template <int F, int BN, int BM>
DEV lds_weights<F, BN, BM> lds_weights_of(const rocq_k_matmul_product &product, uint32_t k,
                                          const matmul_place &at) {
    lds_weights<F, BN, BM> w;
    w.k = k;
    w.row_units = w.k / 32;
    w.thread = thread_index();
    computed(w.thread);
    w.last_row = (uint32_t)(product.m - at.m0 < BN ? product.m - at.m0 : BN) - 1;
    if constexpr (is_plain<F>()) w.w = (const char *)product.w + at.w_row * w.k * 2;
    else w.p = planes_at(matmul_planes<F>(product), at.w_row * w.row_units);
    return w;
}
template <int F, int BN, int BM>
DEV void lds_weights_load(lds_weights<F, BN, BM> &w, uint32_t step) {
    const uint32_t t = w.thread;
    if constexpr (is_plain<F>()) {
        const uint32_t e = 64 * step + 8 * (t % 8);
#pragma unroll
        for (int i = 0; i < w.VECTORS; i++) {
            const uint32_t row = t / 8 + (uint32_t)(i * (w.THREADS / 8));
            const uint32_t from = (row < w.last_row ? row : w.last_row) * w.k + e;
            w.vectors[i] = make4(0, 0, 0, 0);
            if (e < w.k) w.vectors[i] = gload((const u32x4 *)(w.w + (int64_t)from * 2));
        }
    } else {
        const uint32_t own = 2 * step + t % 2, u = own < w.row_units ? own : w.row_units - 1;
#pragma unroll
        for (int i = 0; i < w.UNITS; i++) {
            const uint32_t row = t / 2 + (uint32_t)(i * BM);
            w.units[i] = load_raw(w.p, (row < w.last_row ? row : w.last_row) * w.row_units + u);
        }
    }
}
// Decodes what was loaded into a tile of LDS.
template <int F, int BN, int BM>
DEV void lds_weights_store(lds_weights<F, BN, BM> &w, uint32_t step, f16 *to) {
    const int t = (int)w.thread;
    if constexpr (is_plain<F>()) {
#pragma unroll
        for (int i = 0; i < w.VECTORS; i++) {
            const int row = t / 8 + i * (w.THREADS / 8);
            lput((u32x4 *)(to + 64 * row) + (t % 8 ^ (row & 7)),
                 matmul_vector_halves<F>(w.vectors[i]));
        }
    } else {
        const uint32_t half = (uint32_t)t % 2;
        const bool there = 2 * step + half < w.row_units;
#pragma unroll decode_passes<F>()
        for (int i = 0; i < w.UNITS; i++) {
            const int row = t / 2 + i * BM;
            u32x4 halves[4];
            matmul_unit_halves<F>(w.UNITS == 1 ? w.units[0] : take_row<F>(w.units, i),
                                  2 * step + half, halves);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                lput((u32x4 *)(to + 64 * row) + ((4 * (int)half + j) ^ (row & 7)),
                     there ? halves[j] : make4(0, 0, 0, 0));
            }
        }
    }
}

// matmul of the other formats, except F32, on chips with WMMA_TILES: as matmul_lds, with w decoded
// to F16 into the tile. In each step a thread decodes one unit of each of UNITS rows (BF16: VECTORS
// vectors), which it loaded a step earlier, while the matrix unit still has the products of the
// step before. The stage of LDS that it writes is free: each wave had waited for its last products
// that read it before it came to the last barrier. K is a multiple of 8; a block format's missing
// half of the last step counts as 0. Weights are rounded as by matmul_f16, and sums have another
// order. On an H200 195 to 365 TFLOPS from 512 columns on.
template <int F, int BN, int BM, int STAGES, int AHEAD>
DEV void matmul_lds_decoded(const rocq_k_matmul_args &a) {
    enum { STEP = 64 * (BM + BN) };
    static_assert(AHEAD <= STAGES - 2, "stages are free in time");
    LDS_GRANTED(u32x4, tile, ROCQ_K_LDS_BYTES(BN, BM, STAGES) / 16);
    const matmul_block block = matmul_block_of(a);
    const rocq_k_matmul_product &product = a.product[block.product];
    if (product.tiles_m == 0) return;
    f16 *const tiles = (f16 *)tile;
    const uint32_t k = (uint32_t)a.k;
    const matmul_place at = matmul_place_of(a, block, BN, BM, (k + 63) / 64);
    const int64_t rows = a.n - at.n0;
    const lds_operand x = {(const char *)a.x + at.x_column * a.x_stride * 2,
                           a.x_stride * 2, (int32_t)(rows < BM ? rows : BM)};
    lds_weights<F, BN, BM> w = lds_weights_of<F, BN, BM>(product, k, at);
    int stage = 0, free = 0;
    uint32_t ahead = at.begin;
    const auto load_x = [&]() {
        if (ahead < at.end) {
            lds_load<false, BM, 2 * BM>(x, (int32_t)ahead * 64, (int32_t)k, tiles + free * STEP);
        }
        copies_close();
        ahead++;
        free = free + 1 == STAGES ? 0 : free + 1;
    };
    frag_c c[1][BN / 16];
    matmul_clear(c);
    lds_weights_load(w, at.begin);
    for (int i = 0; i < AHEAD; i++) load_x();
    uint32_t step = at.begin;
#pragma unroll 1
    do { // at least once, see lds_multiply
        f16 *const x_tile = tiles + stage * STEP, *const w_tile = x_tile + 64 * BM;
        lds_weights_store(w, step, w_tile);
        if (step + 1 < at.end) lds_weights_load(w, step + 1);
        copies_wait<AHEAD - 1>();
        lds_written();
        block_sync_lds();
        wmma_lds_begin();
#pragma unroll
        for (int s = 0; s < 4; s++) {
            wmma_tile<false, false>(c[0], x_tile + matmul_wave() / 4 * 4096, w_tile, s);
        }
        wmma_lds_end();
        load_x();
        wmma_lds_wait<1>();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    } while (++step < at.end);
    wmma_lds_wait();
    copies_wait<0>();
    block_sync_lds();
    matmul_lds_finish<BN, BM>(a, product, at, c, (float *)tile);
}
#define ROCQ_X_TILE(F, f, columns, rows, steps, ahead, blocks)                          \
    KERNEL_WAVES(matmul_lds_##f##_##columns##x##rows, rocq_k_matmul_args,               \
                 ROCQ_K_LDS_THREADS(rows), blocks * rows / 64) {                        \
        if constexpr (WMMA_TILES) matmul_lds_decoded<F, columns, rows, steps, ahead>(a); \
    }
#define ROCQ_X(X, f) ROCQ_K_LDS_DECODED_TILES(ROCQ_X_TILE, ROCQ_K_ID_##f, f)
ROCQ_K_DECODED_FORMATS(ROCQ_X, )
#undef ROCQ_X
#undef ROCQ_X_TILE

// matmul_few: F16 and BF16 weights and up to 16 TN columns of x: reading w takes most of the time.
// x is of format X, F16 or F32, which is rounded to F16 here, so that no launch has to do it
// before.
// A wave reads the operands of 32 rows straight into registers: without tiles of LDS and barriers,
// all 16 waves of a compute unit always have loads of w in flight. The 8 waves of a block take
// turns of 64 of K, wave i the steps i, i + 8 and so on. Their sums meet in LDS and are added in
// the order of the waves. Each block reads its columns of x, from L2: half of the bytes of w for 8
// columns in F32, as many for 32 in F16. So for more columns a tile of LDS is faster. K is a
// multiple of 8.
// 14336 x 4096 in F16, 8 columns: 44.3 us on an H100, where reading w alone takes 40.4.
DEV u32x4 matmul_few_halves(const u32x4 (&v)[1]) { return v[0]; }
DEV u32x4 matmul_few_halves(const u32x4 (&v)[2]) {
    const auto halves = [](uint32_t low, uint32_t high) {
        return bits<uint32_t>(pair_floats(bits<float>(low), bits<float>(high)));
    };
    return make4(halves(v[0].x, v[0].y), halves(v[0].z, v[0].w), halves(v[1].x, v[1].y),
                 halves(v[1].z, v[1].w));
}
// c += w x over 64 of K, from a wave's vectors of both halves of a step.
template <int F, int TM, int TN, int V, int PARTS>
DEV void matmul_few_multiply(frag_c (&c)[TM][TN], const u32x4 (&wv)[2][TM][V],
                             const u32x4 (&xv)[2][TN][V][PARTS]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32x4 wh[V], xh[TN][V];
#pragma unroll
        for (int j = 0; j < TN; j++) {
#pragma unroll
            for (int v = 0; v < V; v++) xh[j][v] = matmul_few_halves(xv[h][j][v]);
        }
#pragma unroll
        for (int i = 0; i < TM; i++) {
#pragma unroll
            for (int v = 0; v < V; v++) wh[v] = matmul_vector_halves<F>(wv[h][i][v]);
#pragma unroll
            for (int j = 0; j < TN; j++) wmma_vectors(c[i][j], wh, xh[j]);
        }
    }
}
// Adds up the sums of the waves, by way of LDS, 16 columns at a time, of which a wave stores every
// eighth. It has barriers.
enum {
    MATMUL_FEW_WAVES = 8,
    MATMUL_FEW_STRIDE = ROCQ_K_MATMUL_FEW_M + 4, // floats: a lane's columns are in different banks
    MATMUL_FEW_COLUMNS = 16 * MATMUL_FEW_STRIDE  // floats of a wave
};
template <int TM, int TN>
DEV void matmul_few_finish(const rocq_k_matmul_args &a, const rocq_k_matmul_product &product,
                           const matmul_place &at, const frag_c (&c)[TM][TN], float *sums) {
    enum { WAVES = MATMUL_FEW_WAVES, STRIDE = MATMUL_FEW_STRIDE, COLUMNS = MATMUL_FEW_COLUMNS };
    const int wave = matmul_wave();
    float *const own = sums + wave * COLUMNS;
#pragma unroll
    for (int j = 0; j < TN; j++) {
        if (j > 0) block_sync_lds(); // the sums of before have been read
#pragma unroll
        for (int i = 0; i < TM; i++) {
#pragma unroll
            for (int v = 0; v < 8; v++) {
                lput(own + frag_col(v) * STRIDE + 16 * i + frag_row(v), c[i][j].v[v]);
            }
        }
        block_sync_lds();
#pragma unroll 1
        for (int column = wave; column < 16; column += WAVES) {
            const int64_t n = at.n0 + 16 * j + column;
            if (n >= a.n) break;
            float *const first = sums + column * STRIDE + lane_index();
            float sum = lget(first);
#pragma unroll
            for (int i = 1; i < WAVES; i++) sum += lget(first + i * COLUMNS);
            lput(first, sum);
            matmul_put_sums<1>(a, product, at, sums + column * STRIDE, at.m0, n);
        }
    }
}
template <int F, int TN, int X> DEV void matmul_few(const rocq_k_matmul_args &a) {
    enum {
        TM = ROCQ_K_MATMUL_FEW_M / 16, V = FRAG_VECTORS, WAVES = MATMUL_FEW_WAVES,
        X_BYTES = X == ROCQ_F32 ? 4 : 2, PARTS = X_BYTES / 2 // loads for eight elements of x
    };
    LDS(float, sums, WAVES * MATMUL_FEW_COLUMNS);
    const matmul_block block = matmul_block_of(a);
    const rocq_k_matmul_product &product = a.product[block.product];
    if (product.tiles_m == 0) return;
    const uint32_t k = (uint32_t)a.k;
    const matmul_place at = matmul_place_of(a, block, 16 * TM, 16 * TN, (k + 63) / 64);
    const int wave = matmul_wave();
    // Rows and columns past the last repeat it.
    const char *const w = (const char *)product.w + at.w_row * k * 2;
    const char *const x = (const char *)a.x + at.x_column * a.x_stride * X_BYTES;
    const uint32_t x_stride = (uint32_t)a.x_stride;
    const int w_last = (int)(product.m - at.m0 < 16 * TM ? product.m - at.m0 : 16 * TM) - 1;
    const int x_last = (int)(a.n - at.n0 < 16 * TN ? a.n - at.n0 : 16 * TN) - 1;
    uint32_t w_row[TM][V], x_row[TN][V]; // elements to the vectors' rows
#pragma unroll
    for (int v = 0; v < V; v++) {
#pragma unroll
        for (int i = 0; i < TM; i++) {
            w_row[i][v] = (uint32_t)min(16 * i + frag_vector_row(v), w_last) * k;
        }
#pragma unroll
        for (int j = 0; j < TN; j++) {
            x_row[j][v] = (uint32_t)min(16 * j + frag_vector_row(v), x_last) * x_stride;
        }
    }
    frag_c c[TM][TN];
    matmul_clear(c);
#pragma unroll 1
    for (uint32_t step = at.begin + (uint32_t)wave; step < at.end; step += WAVES) {
        u32x4 wv[2][TM][V], xv[2][TN][V][PARTS];
        const bool tail = 64 * step + 64 > k; // then vectors past the end are read elsewhere
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int v = 0; v < V; v++) {
                uint32_t e = 64 * step + 32 * (uint32_t)h + (uint32_t)frag_vector_k(v);
                if (tail && e >= k) e = 0;
#pragma unroll
                for (int i = 0; i < TM; i++) {
                    wv[h][i][v] = gload<ONCE>((const u32x4 *)(w + (int64_t)(w_row[i][v] + e) * 2));
                }
#pragma unroll
                for (int j = 0; j < TN; j++) {
                    const u32x4 *const from =
                        (const u32x4 *)(x + (int64_t)(x_row[j][v] + e) * X_BYTES);
#pragma unroll
                    for (int p = 0; p < PARTS; p++) xv[h][j][v][p] = gload(from + p);
                }
            }
        }
        if (tail) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int v = 0; v < V; v++) {
                    if (64 * step + 32 * (uint32_t)h + (uint32_t)frag_vector_k(v) < k) continue;
#pragma unroll
                    for (int i = 0; i < TM; i++) wv[h][i][v] = make4(0, 0, 0, 0);
#pragma unroll
                    for (int j = 0; j < TN; j++) {
#pragma unroll
                        for (int p = 0; p < PARTS; p++) xv[h][j][v][p] = make4(0, 0, 0, 0);
                    }
                }
            }
        }
        matmul_few_multiply<F>(c, wv, xv);
    }
    matmul_few_finish(a, product, at, c, sums);
}
#define ROCQ_X(X, f)                                                               \
    KERNEL_WAVES(matmul_few_##f##_16, rocq_k_matmul_args, 256, 4) {                \
        if constexpr (WMMA_TILES) matmul_few<ROCQ_K_ID_##f, 1, ROCQ_F32>(a);       \
    }                                                                              \
    KERNEL_WAVES(matmul_few_##f##_32, rocq_k_matmul_args, 256, 4) {                \
        if constexpr (WMMA_TILES) matmul_few<ROCQ_K_ID_##f, 2, ROCQ_F16>(a);       \
    }
ROCQ_X(, f16)
ROCQ_X(, bf16)
#undef ROCQ_X

// matmul_halves: decodes a whole matrix of a format that is only read to F16, for matmul_lds: with
// many columns it pays to look codebooks up once instead of once for each tile's columns. Weights
// are rounded as by matmul_f16. A thread has a unit. A wave stores its 2 KB in order by way of LDS,
// where vector j of unit t is at j ^ t / 2 % 4: eight lanes that write vector j of their units, or
// read the eight vectors of two units, touch all banks. Empty where matmul_lds is.
template <int F> DEV void matmul_put_halves(const rocq_k_matmul_args &a, u32x4 *work) {
    const rocq_k_matmul_product &product = a.product[0];
    const int lane = lane_index(), wave = matmul_wave();
    const int64_t block = (int64_t)(a.common.block0 + block_index()) * 256;
    const int64_t left = product.w_units - block - 32 * wave;
    if (left <= 0) return;
    const int there = left < 32 ? (int)left : 32; // units of the wave
    const uint32_t unit = (uint32_t)(32 * wave + (lane < there ? lane : there - 1));
    const planes<F> p = planes_at(matmul_planes<F>(product), block);
    u32x4 *const to = (u32x4 *)product.work + 4 * (block + 32 * wave), halves[4];
    matmul_unit_halves<F>(load_raw(p, unit), unit, halves);
    work += 128 * wave;
#pragma unroll
    for (int j = 0; j < 4; j++) lput(work + 4 * lane + (j ^ (lane >> 1 & 3)), halves[j]);
    wave_sync();
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int v = 32 * j + lane;
        if (v < 4 * there) gstore(to + v, lget(work + (v ^ (v >> 3 & 3))));
    }
}
KERNEL(matmul_halves, rocq_k_matmul_args, 256) {
    if constexpr (WMMA_TILES) {
        LDS(u32x4, work, 4 * 256);
        switch (a.product[0].format) {
#define ROCQ_X(X, f) case ROCQ_K_ID_##f: matmul_put_halves<ROCQ_K_ID_##f>(a, work); break;
            ROCQ_K_READ_FORMATS(ROCQ_X, )
#undef ROCQ_X
        default: break;
        }
    }
}

// -- INT8 --

// matmul_int8: x in planar Q8_0, w's codes as int8. The matrix unit gives the sum of a group (32 of
// K; 16 where a unit has two scales) as an exact integer. It is multiplied by the scales of its row
// and its column and added to the F32 sums. For a min, min times the sum of x's group is
// subtracted; x's sums are computed when x is staged, and offsets such as Q4_0's 8 are subtracted
// from codes when w is.
//
// A step is 64 of K, two units a row. A thread decodes one of the two units of two rows of w and of
// a column of x. Waves 2 by 2, each 64 rows by 32 columns, 64 sums a lane. LDS: 17 to 21 KB; rows
// of 64 codes and 16 of padding, then scales, mins and sums by groups.
// Scaling a group of 16 by 16 sums takes 24 VALU cycles, 32 with a min, so WMMA cannot have more
// than 73% (67%) of the cycles, or 57% (50%) with groups of 16. As RDNA3's matrix units are no
// faster in int8, matmul_f16 is faster for every n; this is for callers that ask for INT8's
// arithmetic.
enum {
    MATMUL_INT8_BK = 64,
    MATMUL_INT8_ROW = MATMUL_INT8_BK + 16 // of LDS, in bytes: 20 words spread 8 rows over all banks
};

// Subtracts an offset from the four bytes of q, codes of up to 7 bits, to give signed bytes. 128 -
// offset is added, which carries into no other byte, and then 128 is subtracted by flipping the top
// bits.
DEV uint32_t matmul_less_offset(uint32_t q, int offset) {
    return (q + 0x01010101u * (uint32_t)(128 - offset)) ^ 0x80808080u;
}

template <int F> struct matmul_int8_shape {
    enum {
        BM = ROCQ_K_MATMUL_M, BN = ROCQ_K_MATMUL_INT8_N, BK = MATMUL_INT8_BK, ROW = MATMUL_INT8_ROW,
        WM = 64, WN = 32, TM = WM / 16, TN = WN / 16,
        GROUPS = block_layout<F>::halves ? 4 : 2, // of BK elements
        GROUP = BK / GROUPS, // elements
        // LDS has the codes, then floats: scales of w and of x, mins of w and sums of the values of
        // x, each group after group.
        CODES = (BM + BN) * ROW, XS = GROUPS * BM, WMIN = XS + 2 * BN, XSUM = WMIN + GROUPS * BM,
        FLOATS = block_layout<F>::has_min ? XSUM + GROUPS * BN : WMIN
    };
};
struct matmul_int8_lds {
    int8_t *w, *x;
    float *w_scale, *x_scale, *w_min, *x_sum;
};

// Stores codes and factors of a thread's units, half `half` of a step, in LDS.
template <int F>
DEV void matmul_int8_store_w(const matmul_int8_lds &lds, raw<F> (&from)[2], uint32_t step) {
    typedef block_layout<F> l;
    typedef matmul_int8_shape<F> S;
    const int t = (int)thread_index();
    const uint32_t half = (uint32_t)t % 2;
#pragma unroll decode_passes<F>()
    for (int i = 0; i < 2; i++) {
        const uint32_t row = (uint32_t)(t / 2 + i * (S::BM / 2));
        const unit u = decode_raw<F>(take_row<F>(from, i), 2 * step + half);
        uint32_t q[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            q[j] = l::offset ? matmul_less_offset(u.q[j], l::offset) : u.q[j];
        }
        u32x4 *to = (u32x4 *)(lds.w + row * S::ROW) + 2 * half;
        lput(to, make4(q[0], q[1], q[2], q[3]));
        lput(to + 1, make4(q[4], q[5], q[6], q[7]));
#pragma unroll
        for (int g = 0; g < S::GROUPS / 2; g++) {
            lput(lds.w_scale + (half * S::GROUPS / 2 + g) * S::BM + row, u.scale[g]);
            if (l::has_min) lput(lds.w_min + (half * S::GROUPS / 2 + g) * S::BM + row, u.min[g]);
        }
    }
}
template <int F>
DEV void matmul_int8_store_x(const matmul_int8_lds &lds, const raw<ROCQ_Q8_0> &from) {
    typedef matmul_int8_shape<F> S;
    const uint32_t column = thread_index() / 2, half = thread_index() % 2;
    u32x4 *to = (u32x4 *)(lds.x + column * S::ROW) + 2 * half;
    lput(to, from.n);
    lput(to + 1, from.c);
    const float d = f16_f32((uint16_t)from.d.x);
    lput(lds.x_scale + half * S::BN + column, d);
    if (!block_layout<F>::has_min) return;
    const uint32_t q[8] = {from.n.x, from.n.y, from.n.z, from.n.w,
                           from.c.x, from.c.y, from.c.z, from.c.w};
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        sum = dot4((int)q[i], 0x01010101, sum);
        if ((i + 1) % (16 / S::GROUPS) != 0) continue;
        lput(lds.x_sum + (half * S::GROUPS / 2 + i * S::GROUPS / 16) * S::BN + column,
             d * (float)sum);
        sum = 0;
    }
}

// c += w x over a group: the exact products of the codes fw and fx, times the scales sw and sx; if
// the format has mins, less min times the sum of x's group.
template <bool HAS_MIN, int N>
DEV void matmul_int8_add(frag_c &c, const frag_i8 (&fw)[N], const frag_i8 (&fx)[N],
                         const float (&sw)[8], const float (&sx)[FRAG_SLOTS], const float (&min)[8],
                         const float (&sum)[FRAG_SLOTS]) {
    frag_ci ci = {{0, 0, 0, 0, 0, 0, 0, 0}};
#pragma unroll
    for (int h = 0; h < N; h++) wmma_i8(ci, fw[h], fx[h]);
#pragma unroll
    for (int v = 0; v < 8; v++) {
        const int s = frag_slot(v);
        c.v[v] = fmaf((float)ci.v[v], sw[v] * sx[s], c.v[v]);
        if (HAS_MIN) c.v[v] = fmaf(-min[v], sum[s], c.v[v]);
    }
}

// Loads unit u of two rows, which begin at unit `first` and `apart` units behind it; or, where one
// would begin past unit `last`, of the row there.
template <int F>
DEV void matmul_load_units(raw<F> (&r)[2], const planes<F> &p, uint32_t first, uint32_t apart,
                           uint32_t last, uint32_t u) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t own = first + (uint32_t)i * apart;
        r[i] = load_raw(p, (own < last ? own : last) + u);
    }
}

template <int F> DEV void matmul_int8(const rocq_k_matmul_args &a) {
    typedef matmul_int8_shape<F> S;
    enum { BM = S::BM, BN = S::BN, ROW = S::ROW, TM = S::TM, TN = S::TN };
    enum { GROUPS = S::GROUPS, GROUP = S::GROUP };
    const bool has_min = block_layout<F>::has_min;
    LDS(u32x4, tile, S::CODES / 16 + S::FLOATS / 4);
    static_assert(16 * matmul_pass_floats<TM>() <= (int)sizeof(tile), "matmul_finish's work");
    int8_t *const wt = (int8_t *)tile, *const xt = wt + BM * ROW;
    float *const ws = (float *)tile + S::CODES / 4, *const xs = ws + S::XS;
    float *const wmin = ws + S::WMIN, *const xsum = ws + S::XSUM;
    const matmul_int8_lds lds = {wt, xt, ws, xs, wmin, xsum};
    const matmul_block block = matmul_block_of(a);
    const rocq_k_matmul_product &product = a.product[block.product];
    if (product.tiles_m == 0) return;
    const uint32_t row_units = (uint32_t)(a.k / 32);
    const matmul_place at = matmul_place_of(a, block, BM, BN, (row_units + 1) / 2);
    const int t = (int)thread_index(), wave = matmul_wave();
    const int wm = wave % (BM / S::WM) * S::WM, wn = wave / (BM / S::WM) * S::WN;
    const uint32_t w_last = (uint32_t)(product.m - at.m0 < BM ? product.m - at.m0 : BM) - 1;
    const uint32_t x_last = (uint32_t)(a.n - at.n0 < BN ? a.n - at.n0 : BN) - 1;
    const planes<F> wp = planes_at(matmul_planes<F>(product), at.w_row * row_units);
    const planes<ROCQ_Q8_0> xp =
        planes_at(planes_of<ROCQ_Q8_0>(a.x, a.x_units), at.x_column * row_units);
    const uint32_t column = (uint32_t)t / 2, half = (uint32_t)t % 2, w_unit = column * row_units;
    const uint32_t x_unit = (column < x_last ? column : x_last) * row_units;
    raw<F> wr[2];
    raw<ROCQ_Q8_0> xr;
    const auto load = [&](uint32_t step) {
        const uint32_t u = 2 * step + half < row_units ? 2 * step + half : row_units - 1;
        matmul_load_units(wr, wp, w_unit, (BM / 2) * row_units, w_last * row_units, u);
        xr = load_raw(xp, x_unit + u);
    };

    const bool has_work = at.m0 + wm < product.m && at.n0 + wn < a.n; // of the wave
    frag_c c[TM][TN];
    matmul_clear(c);
    load(at.begin);
    for (uint32_t step = at.begin; step < at.end; step++) {
        matmul_int8_store_w<F>(lds, wr, step);
        matmul_int8_store_x<F>(lds, xr);
        block_sync_lds();
        load(step + 1 < at.end ? step + 1 : step);
        const int n_groups = !has_work ? 0 : 2 * step + 1 < row_units ? GROUPS : GROUPS / 2;
#pragma unroll 1
        for (int g = 0; g < n_groups; g++) {
            frag_i8 fx[TN][GROUP / 16];
            float sx[TN][FRAG_SLOTS], sum[TN][FRAG_SLOTS];
#pragma unroll
            for (int j = 0; j < TN; j++) {
#pragma unroll
                for (int h = 0; h < GROUP / 16; h++) {
                    fx[j][h] = frag_i8_load(xt + (wn + 16 * j) * ROW + GROUP * g + 16 * h, ROW);
                }
#pragma unroll
                for (int s = 0; s < FRAG_SLOTS; s++) {
                    const int n = wn + 16 * j + frag_slot_col(s);
                    sx[j][s] = lget(xs + g / (GROUPS / 2) * BN + n);
                    if (has_min) sum[j][s] = lget(xsum + g * BN + n);
                }
            }
#pragma unroll
            for (int i = 0; i < TM; i++) {
                frag_i8 fw[GROUP / 16];
                float sw[8], min[8];
#pragma unroll
                for (int h = 0; h < GROUP / 16; h++) {
                    fw[h] = frag_i8_load(wt + (wm + 16 * i) * ROW + GROUP * g + 16 * h, ROW);
                }
#pragma unroll
                for (int v = 0; v < 8; v++) {
                    const int m = wm + 16 * i + frag_row(v);
                    sw[v] = lget(ws + g * BM + m);
                    if (has_min) min[v] = lget(wmin + g * BM + m);
                }
#pragma unroll
                for (int j = 0; j < TN; j++) {
                    matmul_int8_add<has_min>(c[i][j], fw, fx[j], sw, sx[j], min, sum[j]);
                }
            }
        }
        block_sync_lds();
    }
    matmul_finish<TM, TN>(a, block, at, c, (float *)tile, at.m0 + wm, at.n0 + wn);
}

#define ROCQ_X(X, f) \
    KERNEL(matmul_int8_##f, rocq_k_matmul_args, 128) { matmul_int8<ROCQ_K_ID_##f>(a); }
ROCQ_K_INT8_FORMATS(ROCQ_X, )
#undef ROCQ_X

// -- F32 --

// Loads half h of a step, 32 elements, of row row0 + r of w, undecoded; of a block format the whole
// unit.
template <int F>
DEV void matmul_load_half(const rocq_k_matmul_product &product, uint32_t k, int64_t row0,
                          uint32_t r, uint32_t step, int h, u32x4 (&to)[4]) {
    if constexpr (is_plain<F>()) {
        const int elems = vector_elems<F>();
        const char *row = (const char *)product.w + (row0 + r) * k * (16 / elems);
#pragma unroll
        for (int i = 0; i < 16 / elems; i++) {
            const uint32_t at = 32 * step + 16 * (uint32_t)h + (uint32_t)(i * elems);
            to[i] = matmul_load_vector<F>(row, at, k, k % elems == 0);
        }
    } else {
        const planes<F> p = planes_at(matmul_planes<F>(product), row0 * (k / 32));
        const raw<F> u = load_raw(p, r * (k / 32) + step);
        static_assert(sizeof u <= sizeof to, "a unit passes here");
        __builtin_memcpy(to, &u, sizeof u);
    }
}

// Writes that half to LDS as floats, transposed: element e of the step goes to to[e * stride].
template <int F>
DEV void matmul_put_half(const u32x4 (&from)[4], int32_t format, uint32_t step, int h, float *to,
                         int stride) {
    (void)format;
    if constexpr (is_plain<F>()) {
        const int elems = vector_elems<F>();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float v[4];
            decode_vector<F>(from[i * 4 / elems], i % (elems / 4), v);
#pragma unroll
            for (int b = 0; b < 4; b++) lput(to + (16 * h + 4 * i + b) * stride, v[b]);
        }
    } else {
        raw<F> r;
        __builtin_memcpy(&r, from, sizeof r);
        if constexpr (F == READ) r.format = format; // known to be uniform
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

// c += w x over n of K, for a thread's 8 rows and the first 4 HALVES of its columns.
template <int HALVES>
DEV void matmul_multiply_f32(float (&c)[8][8], const float *w, const float *x, int stride, int n) {
#pragma unroll 2
    for (int e = 0; e < n; e++) {
        float vw[8], vx[4 * HALVES];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            decode_vector<ROCQ_F32>(lget((const u32x4 *)(w + e * stride + 64 * h)), 0, vw + 4 * h);
        }
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            decode_vector<ROCQ_F32>(lget((const u32x4 *)(x + e * stride + 64 * h)), 0, vx + 4 * h);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
#pragma unroll
            for (int j = 0; j < 4 * HALVES; j++) c[i][j] = fmaf(vw[i], vx[j], c[i][j]);
        }
    }
}

DEV void matmul_f32_clear(float (&c)[8][8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) c[i][j] = 0.0f;
    }
}

enum { MATMUL_F32_STRIDE = ROCQ_K_MATMUL_M + 4 }; // of LDS, in floats

// Stores a thread's sums, by way of LDS, in which each pass has 16 columns of the tile.
DEV void matmul_f32_finish(const rocq_k_matmul_args &a, const matmul_block &block,
                           const matmul_place &at, const float (&c)[8][8], float *work, int tm,
                           int tn) {
    const rocq_k_matmul_product product = a.product[block.product]; // a copy, see matmul_block
    enum { STRIDE = MATMUL_F32_STRIDE };
    const int wave = matmul_wave();
#pragma unroll 1
    for (int pass = 0; pass < 8; pass++) { // one of every thread's 8 columns
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (j != pass) continue;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                lput(work + tn * STRIDE + i / 4 * 64 + 4 * tm + i % 4, c[i][j]);
            }
        }
        block_sync_lds();
#pragma unroll 1
        for (int column = wave; column < 16; column += 8) {
            const int64_t n = at.n0 + pass / 4 * 64 + 4 * column + pass % 4;
            if (n < a.n) matmul_put_sums<4>(a, product, at, work + column * STRIDE, at.m0, n);
        }
        block_sync_lds();
    }
}

// matmul_f32: x and products in F32, for any format of w: the precision of the CPU's F32.
//
// A block of 256 threads has 128 rows by 128 columns. A thread has 8 by 8 of them: 4 rows from 4 tm
// on and 4 from 64 + 4 tm on, and columns likewise from 4 tn on. A step is 32 of K: a thread
// decodes half a step of a row of w into LDS and copies half a step of a column of x, while the
// next step's bytes are prefetched into registers. LDS: 33 KB. Both operands have K outermost
// there, so that a thread reads 4 rows or 4 columns at once: 4 reads of 16 bytes for 64
// multiply-adds, which gfx11 issues in pairs, or 3 for 32 where a tile has at most 64 columns. The
// format is a uniform branch in each step.
DEV void matmul_f32(const rocq_k_matmul_args &a) {
    enum {
        BM = ROCQ_K_MATMUL_M, BN = ROCQ_K_MATMUL_F32_N, BK = 32, STRIDE = MATMUL_F32_STRIDE
    };
    static_assert(BM == BN, "rows and columns are shared out alike");
    LDS(float, wt, BK * STRIDE);
    LDS(float, xt, BK * STRIDE);
    const matmul_block block = matmul_block_of(a);
    const rocq_k_matmul_product &product = a.product[block.product];
    if (product.tiles_m == 0) return;
    const uint32_t n_steps = (uint32_t)((a.k + BK - 1) / BK);
    const matmul_place at = matmul_place_of(a, block, BM, BN, n_steps);
    const int t = (int)thread_index(), wave = matmul_wave(), lane = lane_index();
    const int tm = wave % 2 * 8 + lane % 8, tn = wave / 2 * 4 + lane / 8, half = wave / 4;
    const int64_t w_last = (product.m - at.m0 < BM ? product.m - at.m0 : BM) - 1;
    const int64_t x_last = (a.n - at.n0 < BN ? a.n - at.n0 : BN) - 1;
    const int row = t % BM;
    const uint32_t w_row = (uint32_t)(row < w_last ? row : w_last);
    const float *const x =
        (const float *)a.x + (at.x_column + (row < x_last ? row : x_last)) * a.x_stride;
    u32x4 wr[4], xr[4];
    const auto load = [&](uint32_t step) {
        // Held, they take too many scalar registers.
        const rocq_k_matmul_product &now = reread(a).product[block.product];
        switch (shared_format(now.format)) {
#define ROCQ_X(X, f) \
        case ROCQ_K_ID_##f: \
            matmul_load_half<ROCQ_K_ID_##f>(now, (uint32_t)a.k, at.w_row, w_row, step, half, \
                                             wr); \
            break;
        ROCQ_K_ALL_FORMATS(ROCQ_X, )
#undef ROCQ_X
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int64_t k = (int64_t)step * BK + 16 * half + 4 * i;
            xr[i] = k < a.k ? gload((const u32x4 *)(x + k)) : make4(0, 0, 0, 0);
        }
    };
    const auto store = [&](uint32_t step) {
        switch (shared_format(product.format)) {
#define ROCQ_X(X, f) \
        case ROCQ_K_ID_##f: \
            matmul_put_half<ROCQ_K_ID_##f>(wr, product.format, step, half, wt + row, STRIDE); \
            break;
        ROCQ_K_ALL_FORMATS(ROCQ_X, )
#undef ROCQ_X
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int64_t k = (int64_t)step * BK + 16 * half + 4 * i;
            float v[4];
            decode_vector<ROCQ_F32>(xr[i], 0, v);
#pragma unroll
            for (int b = 0; b < 4; b++) {
                lput(xt + (16 * half + 4 * i + b) * STRIDE + row, k + b < a.k ? v[b] : 0.0f);
            }
        }
    };

    const bool half_tile = x_last < BN / 2;
    float c[8][8];
    matmul_f32_clear(c);
    load(at.begin);
    for (uint32_t step = at.begin; step < at.end; step++) {
        store(step);
        block_sync_lds();
        if (step + 1 < at.end) load(step + 1);
        if (half_tile) matmul_multiply_f32<1>(c, wt + 4 * tm, xt + 4 * tn, STRIDE, BK);
        else matmul_multiply_f32<2>(c, wt + 4 * tm, xt + 4 * tn, STRIDE, BK);
        block_sync_lds();
    }
    matmul_f32_finish(a, block, at, c, wt, tm, tn);
}
KERNEL_WAVES(matmul_f32, rocq_k_matmul_args, 256, 4) { matmul_f32(a); }

// ---------------------------------------------------------------------------------------------
// >>attention
// ---------------------------------------------------------------------------------------------
// out[d, h, i] = sum over j of softmax_j(score(i, j)) v[d, h_kv, j], as in rocq_attention_params.
//
// A column is a pair of a query i and a head h of the group of heads that share a KV head; columns
// are counted query after query. So K and V are read once for all heads of a group. 16 columns are
// a column tile. KV positions are taken in KV tiles of TILE positions. For each KV tile
//   S = K Q^T      [position][column]: K is the A and Q the B operand; a lane has few columns
//   P = 2^(S - m)  m is the column's running maximum; l += sum of P
//   O = O + V^T P  [d][column]: P, a result, becomes an operand in registers (frag_from_c), V
//                  is transposed in LDS
// Scores are in units of log2: exp is one fma and one exp2. m is raised only when the true maximum
// is more than 8 above it: up to there P is at most 2^8 and stays within F16's range, and nearly
// all rescaling of O is saved.
//
// A block is 4 waves, or 16 in prefill of D = 512. For D over 128 the head is cut into SLICES of
// 128 elements, and a wave has one slice of Q, of K and of O. So no wave holds more than 128
// elements of a column; the waves of a column tile add their partial sums of S in LDS. How the
// waves divide the rest of the work:
//   decode   into SETS. A set takes every SETS-th KV tile. Each wave stages its slice of K and V in
//            LDS of its own, without a barrier. At the end (m, l, O) of the sets are merged in LDS
//   prefill  into COLUMN_TILES. All waves stage and use one KV tile in LDS
//
//   D                      64  80-128   256   512
//   decode   SETS           4     4      2     1
//            TILE          32    16     16    16
//            columns       16    16     16    16   of a block
//   prefill  COLUMN_TILES   4     4      2     4
//            TILE          64    32     16    16
//            columns       64    64     32    64
//
// The positions that a block's columns see are cut into runs, one a block: n_splits of them, or
// fewer where one of several would have less than ROCQ_K_ATTEND_RUN positions. The result of a
// single run goes straight to out. Otherwise each block stores m, l and O of its columns in work,
// and the block that finishes last, which the counter tells, merges them in the order of the runs.
// A row that sees no position is 0.
//
// Grid    as at rocq_k_attention_args in rocq.h; 128 threads, or 512
// LDS     13 to 43 KB, or 60 KB: K [position][BD + 8], V^T [row][TILE + 8], F16. The padding of 8
//         puts the 16-byte words of consecutive rows into different banks when they are loaded. Row
//         r of a slice of V^T is element 8 (r % (W / 8)) + r / (W / 8): the lanes of a wave, which
//         store neighbouring chunks of 8 elements, so store to neighbouring rows and have no bank
//         conflicts. The k of V^T and P are in the order of frag_k_row. In decode K and V take
//         turns in the same place, and Q is in LDS too
// KV      rows are less than 2^32 bytes apart. F32, F16 and BF16: loads of 16 bytes where rows are
//         aligned to 16 bytes and up to 16 MB apart and head_dim is a multiple of 8, else of single
//         elements; blocks of Q8_0 and Q4_0: of 2 and 8 bytes. Pages are looked up a tile ahead
// Values  Q, K, V and P are rounded to F16 (so K and V past 65504 become infinite), sums are F32.
//         What a column does not see has no effect on it, except that a NaN or infinity in V before
//         the end of the run reaches all columns of a wave that uses its KV tile: 0 times it is NaN
// Bytes   K and V once per column tile (decode) or block (prefill), Q and out once
// Math    per 16 positions and 16 columns of a wave W / 8 WMMA (512 cycles for W = 128) and, in
//         prefill, some 80 cycles of the rest

// Hopper has further kernels for prompts, see "prefill straight from LDS".

enum {
    ATTEND_COLUMNS = 16 // of a column tile
};

// Sizes that decode and prefill have in common. D: elements of a head. TILES: column tiles of a
// block. HELD: elements of a head that a KV tile holds, a slice or all. N: positions of a KV tile.
// LOADERS: threads that stage a KV tile together, a wave or the block.
//
// A thread stages LOADS chunks of 8 elements (16 bytes in F16), one in each pass. A picture for
// D = 128 in decode on gfx11, where the 32 lanes of a wave stage 16 positions of 16 chunks in 8
// passes:
//
//   K   chunks        0 to 7                     8 to 15
//   position 0        lanes 0-7    in pass 0     pass 4
//            1        lanes 8-15   in pass 0     pass 4
//            2        lanes 16-23  in pass 0     pass 4
//            3        lanes 24-31  in pass 0     pass 4
//            4 to 7   as 0 to 3    in pass 1     pass 5
//            8 to 11  as 0 to 3    in pass 2     pass 6
//           12 to 15  as 0 to 3    in pass 3     pass 7
//
//   V   chunks        0 to 7                     8 to 15
//   k =  0 to 3       lanes 0-7    in passes 0-3 passes 4-7
//        4 to 7       lanes 8-15   in passes 0-3 passes 4-7
//        8 to 11      lanes 16-23  in passes 0-3 passes 4-7
//       12 to 15      lanes 24-31  in passes 0-3 passes 4-7
//
// Lane t loads chunk t % 8 of position t / 8 of K; each pass goes ROWS_K = 4 positions further and,
// after the last one, 8 chunks. Of V it loads chunk t % 8 of four consecutive k in four passes: 4
// by 8 elements, which it transposes in registers and stores as 8 rows of V^T with 4 elements each.
// k stands for position frag_k_row(k): 0 2 4 .. 14, then 1 3 5 .. 15.
template <int D, int BLOCK_WAVES, int TILES, int HELD, int N, int LOADERS> struct attend_shape {
    enum {
        HEAD = D,
        WAVES = BLOCK_WAVES,
        BLOCK = 32 * WAVES, // threads
        COLUMN_TILES = TILES,
        SLICES = D > 128 ? D / 128 : 1,
        W = D / SLICES, // elements of a slice
        SETS = WAVES / (COLUMN_TILES * SLICES), // that share the positions
        BD = HELD,
        TILE = N,
        ROUND = TILE * SETS, // positions that all sets take in one iteration
        THREADS = LOADERS,
        LOADS = TILE * ((BD + 63) / 64) * 8 / THREADS, // of 8 elements, per thread
        S_FRAGS = TILE / 16, // fragments of a wave: of S and of P, 16 positions each
        O_FRAGS = W / 16,    // and of O, 16 elements each
        WORDS = (TILE + 31) / 32, // that hold a bit for each position
        COLUMNS = ATTEND_COLUMNS * COLUMN_TILES,
        // LDS: halves from one row to the next, then bytes
        K_STRIDE = BD + 8,
        V_STRIDE = TILE + 8,
        Q_STRIDE = BD + 8,
        K_BYTES = TILE * K_STRIDE * 2,
        V_BYTES = BD * V_STRIDE * 2,
        // of the merge at the end: columns of a column tile that go through LDS at a time; rows of
        // all sets and column tiles, and floats from one to the next
        OUT_COLUMNS = COLUMN_TILES * D <= 512 ? 8 : 4,
        OUT_STRIDE = D + 4,
        OUT_ROWS = SETS * COLUMN_TILES * OUT_COLUMNS,
        OUT_BYTES = OUT_ROWS * (OUT_STRIDE + 2) * 4,
        // of a wave: lists of the KV rows of two tiles (attend_place), and of the mask's rows
        ROW_BYTES = 2 * TILE * 4 + ATTEND_COLUMNS * 8
    };
    static_assert(ROCQ_K_ATTEND_RUN % ROUND == 0, "the shortest run is whole rounds");
    static constexpr uint64_t ALL_SEEN = ~(uint64_t)0 >> (64 - TILE);

    // In pass p thread t loads chunk lane_chunk(t) + pass_chunk(p) of row lane_row(t) +
    // pass_row(p), a row being a position of the KV tile. The terms that depend on the pass are
    // constants, so all passes of a thread share the address computation.
    enum { ROWS_K = THREADS / 8, GROUPS = TILE / 4 };
    template <bool V> DEV int lane_row(int t) {
        if (!V) return ROWS_K > TILE ? t / 8 % TILE : t / 8;
        const int k = 4 * (t / 8 % GROUPS);
        return (k & ~15) + frag_k_row(k & 15);
    }
    template <bool V> DEV int lane_chunk(int t) {
        return t % 8 + (V ? 8 * (t / 8 / GROUPS) : ROWS_K > TILE ? 8 * (t / 8 / TILE) : 0);
    }
    template <bool V> DEV constexpr int pass_row(int p) {
        return V ? FRAG_K_STEP * (p % 4) + 4 * (ROWS_K * (p / 4) % GROUPS) : ROWS_K * p % TILE;
    }
    template <bool V> DEV constexpr int pass_chunk(int p) {
        return V ? 8 * (ROWS_K * (p / 4) / GROUPS) : 8 * (ROWS_K * p / TILE);
    }
};

// LDS, as offsets in bytes. First what the loop uses, which the merge at the end overwrites; then
// ROW_BYTES for each wave; then one word.
template <typename S> struct attend_lds {
    enum {
        ROWS_AT = (int)S::LOOP_BYTES > (int)S::OUT_BYTES ? (int)S::LOOP_BYTES : (int)S::OUT_BYTES,
        WORD_AT = ROWS_AT + S::WAVES * S::ROW_BYTES,
        BYTES = WORD_AT + 16
    };
};

// LDS of decode: a KV tile for each wave, in which K and V take turns; then Q of all slices. The
// slices' shares of S are exchanged in the place of K.
template <int D>
struct attend_decode_shape
    : attend_shape<D, 4, 1, (D > 128 ? 128 : D), (D <= 64 ? 32 : 16), ROCQ_K_WAVE> {
    typedef attend_shape<D, 4, 1, (D > 128 ? 128 : D), (D <= 64 ? 32 : 16), ROCQ_K_WAVE> shape;
    enum {
        WAVE_BYTES = (int)shape::K_BYTES > (int)shape::V_BYTES ? (int)shape::K_BYTES
                                                               : (int)shape::V_BYTES,
        SUM_STRIDE = WAVE_BYTES / 4, // floats from one wave to the next
        Q_COLUMNS = ATTEND_COLUMNS,
        Q_AT = shape::WAVES * WAVE_BYTES,
        LOOP_BYTES = Q_AT + shape::SLICES * ATTEND_COLUMNS * shape::Q_STRIDE * 2
    };
};

// LDS of prefill: one KV tile for all waves, K and then V; then the slices' shares of S. Q is
// staged in the place of K before the loop, and goes on to registers. With D = 512, 16 waves are
// four column tiles of four slices; half of the threads stage K, the others V, and Q, which would
// not fit at once, is staged a column tile at a time.
template <int D> struct attend_prefill_shape
    : attend_shape<D, (D == 512 ? 16 : 4), (D == 256 ? 2 : 4), D,
                   (D <= 64 ? 64 : D <= 128 ? 32 : 16), (D == 512 ? 256 : 128)> {
    typedef attend_shape<D, (D == 512 ? 16 : 4), (D == 256 ? 2 : 4), D,
                         (D <= 64 ? 64 : D <= 128 ? 32 : 16), (D == 512 ? 256 : 128)> shape;
    enum {
        Q_COLUMNS = D == 512 ? (int)ATTEND_COLUMNS : (int)shape::COLUMNS,
        V_AT = shape::K_BYTES,
        SUMS_AT = V_AT + shape::V_BYTES,
        SUM_STRIDE = shape::S_FRAGS * 256, // floats from one wave to the next
        LOOP_BYTES = SUMS_AT + (shape::SLICES > 1 ? shape::WAVES * SUM_STRIDE * 4 : 0)
    };
};

// How a row is loaded, in chunks of 8 elements. WIDE (F16 and BF16): 16 bytes, prefetched while the
// tile before is used. Q8_0, Q4_0 and F32 are loaded when their tile is staged: prefetched, they
// would share registers with the other form, and the compiler then copies those registers, for
// which it has to wait for the loads. ANY: element by element.
enum { ATTEND_WIDE, ATTEND_Q8_0, ATTEND_Q4_0, ATTEND_F32, ATTEND_ANY };

struct attend_rows { // of Q, K or V
    const char *base;
    uint32_t step; // bytes from one row to the next
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

// Loads elements 8 chunk to 8 chunk + 7 of a row. F16 and BF16 are returned as they are and F32 as
// F16; of blocks x and y are the codes and z is the scale.
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

// Eight elements in F16 from what attend_load returned. A code becomes the low byte of the F16
// number 1024 + code, which is exact, so the only rounding is that of scale times code.
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

// Where a KV tile lies in memory.
struct attend_place {
    int first, end; // its first position; the end of the block's run
    int listed;     // the rows of its positions are in the list `rows`; else they are consecutive
    int chunk0;     // first chunk of the slice
    int32_t *rows;  // LDS of the wave. Positions past the end have the row of the last position
    uint64_t seen;  // bit r: position first + r is before the end and in a valid page; masks aside
};

DEV const char *attend_row(const attend_rows &t, const attend_place &at, int r) {
    return t.base + (uint64_t)(uint32_t)lget(at.rows + r) * t.step;
}

// Loads a thread's share of a tile of K or V. Past the end it loads the last position, and past
// head_dim the last chunk, again. attend_put stores zeros instead, except for K past the end:
// attend_hide sets those scores to -infinity.
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
        // All loads use one offset, unless the chunks of a row are not a whole number of passes.
        const int pass_c = S::BD % 64 == 0 ? 0 : S::template pass_chunk<V>(p);
        const int c = S::BD % 64 == 0 ? chunk : min(chunk + pass_c, t.last_chunk);
        const char *pass = tile + (uint32_t)S::template pass_row<V>(p) * step +
                           16 * (S::template pass_chunk<V>(p) - pass_c);
        raw[p] = gload((const u32x4 *)(pass + ((uint32_t)row * t.step + 16u * (uint32_t)c)));
    }
}

// Stores what passes p to p + 3 loaded, in F16, to the tile. Then it stores 0 where chunks are past
// head_dim and, for V, where at.seen has no bit: the weight there is 0, but 0 times an infinity or
// NaN would not be.
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
// Stages a tile from memory to LDS without a prefetch: attend_stage_direct by chunks,
// attend_stage_any element by element.
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

// What a block works on: one run of positions (split) for the columns from column0 on of a KV head
// of a sequence.
struct attend_task {
    uint32_t tile_index; // of these columns, where work and counter have their results
    int split, column0, kv_head, seq;
};
DEV attend_task attend_task_of(const rocq_k_attention_args &a, int block, int columns) {
    attend_task t;
    // In a decode step most of these are 1, and the divisions would take longer than all else here.
    const uint32_t n_splits = (uint32_t)a.n_splits, n_tiles = (uint32_t)a.n_tiles;
    t.tile_index = n_splits == 1 ? (uint32_t)block : (uint32_t)block / n_splits;
    t.split = (int)((uint32_t)block - t.tile_index * n_splits);
    const uint32_t heads = (uint32_t)(a.n_kv_heads * a.n_seqs);
    const uint32_t back = n_tiles == 1 ? 0 : t.tile_index / heads; // tiles from the last one
    const uint32_t head_seq = t.tile_index - back * heads;
    t.column0 = (int)(n_tiles - 1 - back) * columns;
    t.seq = a.n_seqs == 1 ? 0 : (int)(head_seq / (uint32_t)a.n_kv_heads);
    t.kv_head = (int)head_seq - t.seq * a.n_kv_heads;
    return t;
}
template <typename S> DEV attend_task attend_task_of(const rocq_k_attention_args &a, int block) {
    return attend_task_of(a, block, S::COLUMNS);
}
struct attend_role { // of a wave: which slice, column tile and set
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

// Stages Q_COLUMNS columns of Q in LDS, from column0 on, with zeros past the last one.
// attend_score uses the magnitude of the scale; the sign of a negative one goes into Q here.
template <typename S, int WAY>
DEV void attend_stage_q_as(f16 *tile, const rocq_k_attention_args &a, const attend_task &task,
                           int column0) {
    enum {
        CHUNKS = S::HEAD / 8,
        SLICE = S::BD / 8,
        SLICE_HALVES = ATTEND_COLUMNS * S::Q_STRIDE,
        ALL = S::Q_COLUMNS * CHUNKS,
        EACH = ALL / S::BLOCK,
        AHEAD = WAY == ATTEND_ANY ? 1 : EACH < 4 ? EACH : 4 // loads in flight
    };
    const uint32_t flip = a.scale < 0.0f ? 0x80008000u : 0u;
    const int n_there = a.group * a.n_q - column0, last_chunk = (a.head_dim - 1) / 8;
#pragma unroll 1
    for (int first = (int)thread_index(); first < ALL; first += S::BLOCK * AHEAD) {
        u32x4 x[AHEAD];
#pragma unroll
        for (int n = 0; n < AHEAD; n++) {
            const int i = min(first + S::BLOCK * n, ALL - 1),
                      chunk = min(i % CHUNKS, last_chunk);
            const attend_column of =
                attend_column_of(a, column0 + min(i / CHUNKS, n_there - 1));
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
            const int i = first + S::BLOCK * n, c = i / CHUNKS, chunk = i % CHUNKS;
            const bool there = c < n_there && chunk <= last_chunk;
            const u32x4 got = make4(x[n].x ^ flip, x[n].y ^ flip, x[n].z ^ flip, x[n].w ^ flip);
            const u32x4 h = there ? got : make4(0, 0, 0, 0);
            if (i < ALL) {
                lput((u32x4 *)(tile + chunk / SLICE * SLICE_HALVES + c * S::Q_STRIDE +
                               8 * (chunk % SLICE)), h);
            }
        }
    }
}
template <typename S>
DEV void attend_stage_q(f16 *tile, const rocq_k_attention_args &a, const attend_task &task,
                        int column0) {
    const int way = attend_rows_of(a.q, 0, 0, a.head_dim).way;
    if (way == ATTEND_F32) attend_stage_q_as<S, ATTEND_F32>(tile, a, task, column0);
    else if (way == ATTEND_WIDE) attend_stage_q_as<S, ATTEND_WIDE>(tile, a, task, column0);
    else attend_stage_q_as<S, ATTEND_ANY>(tile, a, task, column0);
}

// Q H in place of Q, for K in ROCQ_LAYOUT_HADAMARD. A thread has the chunks that it has staged.
template <typename S> DEV void attend_hadamard_q(f16 *tile, const rocq_k_attention_args &a) {
    enum { CHUNKS = S::HEAD / 8, SLICE = S::BD / 8, SLICE_HALVES = ATTEND_COLUMNS * S::Q_STRIDE };
#pragma unroll 1
    for (int i = (int)thread_index(); i < S::Q_COLUMNS * CHUNKS; i += S::BLOCK) {
        const int chunk = i % CHUNKS;
        u32x4 *at = (u32x4 *)(tile + chunk / SLICE * SLICE_HALVES + i / CHUNKS * S::Q_STRIDE +
                              8 * (chunk % SLICE));
        const u32x4 h = lget(at);
        const uint32_t word[4] = {h.x, h.y, h.z, h.w};
        float v[8];
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = f16_f32((uint16_t)(word[e / 2] >> 16 * (e & 1)));
        hadamard(v, a.head_dim);
        lput(at, make4(attend_pair(v[0], v[1]), attend_pair(v[2], v[3]), attend_pair(v[4], v[5]),
                       attend_pair(v[6], v[7])));
    }
}

// What a wave holds of its columns' results. The rows of o are those of V^T.
template <typename S> struct attend_state {
    frag_c o[S::O_FRAGS];
    float m[FRAG_SLOTS], l[FRAG_SLOTS]; // l is over the lane's own positions until attend_finish
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

// The factor that takes a sum relative to maximum m to the new maximum top. Both may be -infinity.
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

// A query sees the positions from attend_low to attend_high - 1, apart from the mask.
DEV int attend_low(const rocq_k_attention_args &a, int len, int query) {
    const int p = len - a.n_q + query;
    return a.window > 0 && p >= a.window ? p - a.window + 1 : 0;
}
DEV int attend_high(const rocq_k_attention_args &a, int len, int query) {
    return a.causal ? max(len - a.n_q + query + 1, 0) : len;
}

// The row of k and v that has position j of a sequence; -1, with a status bit set, if the table
// names a page that does not exist.
DEV int attend_paged_row(const rocq_k_attention_args &a0, int seq, int j) {
    const rocq_k_attention_args &a = reread(a0);
    const int size = a.page_size;
    const int page = gload(a.page_table + (int64_t)seq * a.n_pages + j / size);
    const int64_t row = (int64_t)page * size + j % size;
    if (page >= 0 && row < a.k.ne[2]) return (int)row;
    atomic_or(a.common.status, ROCQ_K_BAD_PAGE);
    return -1;
}

// Looks up the rows of a tile's positions; lane l has those of positions l and l + 32. It is called
// a tile ahead, so that the loads of the page table are in flight meanwhile.
template <typename S>
DEV void attend_look_up(int (&row)[S::WORDS], const rocq_k_attention_args &a, int seq, int first,
                        int end) {
#pragma unroll
    for (int w = 0; w < S::WORDS; w++) {
        const int r = 32 * w + lane_index();
        row[w] = r < S::TILE && first + r < end ? attend_paged_row(a, seq, first + r) : -1;
    }
}
// Makes `at` the tile at position first, whose rows have been looked up in `row` if the cache is
// paged.
template <typename S>
DEV void attend_go_to(attend_place &at, const int (&row)[S::WORDS], bool paged, bool list,
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

// Multiplies the scores of positions first and up by factor and adds the mask. last is the last
// position whose mask may be read.
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

// Sets scores to -infinity where the position is not in [low, high) of its column, or its bit of
// seen is 0.
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

// Turns scores into weights P = 2^(score * factor - m) and adds them to l. Where a scaled score is
// more than 8 above m, m is raised first.
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

// Returns 1 / l, the factor for a column's sums, after the column's sink has been added to l. m:
// the maximum that the sums are relative to. l == 0: the column saw no position, and the caller
// stores 0. Stores the lse if it is asked for and lse_too is set.
DEV float attend_divisor(const rocq_k_attention_args &a, const attend_task &t,
                         const attend_column &c, float m, float l, bool lse_too) {
    const int head = t.kv_head * a.group + c.head;
    const bool saw = l != 0.0f;
    float factor = 1.0f;
    if (a.sinks) {
        const float sink = gload(a.sinks + head) * 1.44269504f, top = fmaxf(m, sink);
        const float keep = attend_keep(m, top);
        l = l * keep + attend_keep(sink, top);
        factor = keep;
        m = top;
    }
    if (a.lse.data && lse_too) {
        const float lse = saw ? (m + log2_fast(l)) * 0.693147181f : -INFINITY;
        gstore((float *)row_of(a.lse, c.query, t.seq, 0) + head, lse);
    }
    return factor * rcp_fast(l);
}
// Divides elements d to d + 3 of a column by its sum and stores them in out. All lanes of the wave
// must call it.
DEV void attend_put_out(const rocq_k_attention_args &a, const attend_task &t, int column, int d,
                        bool live, float m, float l, float (&x)[4]) {
    const attend_column c = attend_column_of(a, live ? column : 0);
    const int head = t.kv_head * a.group + c.head;
    const bool saw = l != 0.0f;
    const float factor = attend_divisor(a, t, c, m, l, live && d == 0);
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = saw ? x[e] * factor : 0.0f;
    if (a.v.layout == ROCQ_LAYOUT_HADAMARD) hadamard(x, a.head_dim);
    put4(a.out, is_wide(a.out), row_of(a.out, head, c.query, t.seq),
         (uint32_t)(head + a.n_heads * (c.query + a.n_q * t.seq)), d,
         live ? quad_count(a.head_dim, d) : 0, x);
}

// Merges the runs of a block's columns, whose results are in work one after the other, into out. A
// thread merges a quad of a column over all runs, with the loads of AHEAD runs in flight.
template <int D>
DEV void attend_merge(const rocq_k_attention_args &a, const attend_task &t, const float *results,
                      int n_runs, int columns, int threads) {
    enum { AHEAD = 8 };
    const int n_there = min(columns, a.group * a.n_q - t.column0);
    const int64_t floats = columns * (D + 2);
    const int quads = n_there * (D / 4);
    for (int i = recomputed((int)thread_index()); i < (quads + threads - 1) / threads * threads;
         i += threads) {
        const int column = min(i / (D / 4), n_there - 1), d = i % (D / 4) * 4;
        const bool live = i < quads && d < a.head_dim;
        const float *from = results + 2 * columns + column * D + (live ? d : 0);
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
                const int64_t at = (first + k) * floats;
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

// Stores elements d to d + 3 of a column of a block's result in work and, with the first of them,
// its m and l.
template <typename S>
DEV void attend_put_result(float *result, int column, int d, float m, float l,
                           const float (&x)[4]) {
    gstore((u32x4 *)(result + 2 * S::COLUMNS + column * S::HEAD + d),
           make4(bits<uint32_t>(x[0]), bits<uint32_t>(x[1]), bits<uint32_t>(x[2]),
                 bits<uint32_t>(x[3])));
    if (d == 0) gstore((u32x2 *)result + column, make2(bits<uint32_t>(m), bits<uint32_t>(l)));
}

// Merges the states of the block's sets. If there is a single run, the columns then go to out. Else
// each block stores its result in work, and the last one to do so merges all. LDS takes OUT_COLUMNS
// columns at a time: o as rows [set][column tile][column], then m and l of each row. A result in
// work is m and l of each column, then o, column by column; columns past the end are left out.
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
    const int own_row = (w.set * S::COLUMN_TILES + w.column_tile) * S::OUT_COLUMNS;
#pragma unroll
    for (int s = 0; s < FRAG_SLOTS; s++) state.l[s] = frag_col_sum(state.l[s]);

#pragma unroll 1
    for (int first = 0; first < ATTEND_COLUMNS && first < n_there; first += S::OUT_COLUMNS) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int c = frag_col(i) - first;
            if (c < 0 || c >= S::OUT_COLUMNS) continue;
            float *to = lds + (own_row + c) * S::OUT_STRIDE + w.slice * S::W + frag_row(i);
#pragma unroll
            for (int f = 0; f < S::O_FRAGS; f++) lput(to + 16 * f, state.o[f].v[i]);
        }
#pragma unroll
        for (int s = 0; s < FRAG_SLOTS; s++) {
            const int c = frag_slot_col(s) - first;
            if (w.slice != 0 || frag_row(0) != 0 || c < 0 || c >= S::OUT_COLUMNS) continue;
            lput((u32x2 *)m_l + own_row + c,
                 make2(bits<uint32_t>(state.m[s]), bits<uint32_t>(state.l[s])));
        }
        block_sync_lds();
        const int rows = S::COLUMN_TILES > 1 ? S::COLUMN_TILES * S::OUT_COLUMNS
                                             : min(n_there - first, (int)S::OUT_COLUMNS);
        for (int i = thread; i < (rows * (S::HEAD / 4) + S::BLOCK - 1) / S::BLOCK * S::BLOCK;
             i += S::BLOCK) {
            const int row = min(i / (S::HEAD / 4), rows - 1), d = i % (S::HEAD / 4) * 4,
                      column = row / S::OUT_COLUMNS * ATTEND_COLUMNS + first + row % S::OUT_COLUMNS;
            const bool live = i < rows * (S::HEAD / 4) && column < n_there && d < a.head_dim;
            const float *from =
                lds + row * S::OUT_STRIDE + d / S::W * S::W + d % 8 * (S::W / 8) + d % S::W / 8;
            float x[4] = {0.0f, 0.0f, 0.0f, 0.0f}, m[S::SETS], l[S::SETS];
            float top = -INFINITY, sum = 0.0f;
#pragma unroll
            for (int k = 0; k < S::SETS; k++) {
                const u32x2 v = lget((u32x2 *)m_l + k * S::COLUMN_TILES * S::OUT_COLUMNS + row);
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
                    x[e] += add * lget(from + k * S::COLUMN_TILES * S::OUT_COLUMNS * S::OUT_STRIDE +
                                       e * (S::W / 8));
                }
            }
            if (n_runs > 1) {
                if (live) attend_put_result<S>(result, column, d, top, sum, x);
            } else {
                attend_put_out(a, t, t.column0 + column, d, live, top, sum, x);
            }
        }
        block_sync_lds();
    }
    if (n_runs == 1) return;

    if (block_ticket(a.counter + t.tile_index, word) != (uint32_t)n_runs - 1) return;
    if (thread_index() == 0) gstore(a.counter + t.tile_index, 0u);

    attend_merge<S::HEAD>(a, t, results, n_runs, S::COLUMNS, S::BLOCK);
}

// Positions that a sequence has. A length out of range sets a status bit.
DEV int attend_length(const rocq_k_attention_args &a, int seq) {
    if (!a.kv_len) return a.n_kv;
    const int len = wave_read(gload(a.kv_len + seq), 0);
    if (len >= 1 && len <= a.n_kv) return len;
    if (thread_index() == 0) atomic_or(a.common.status, ROCQ_K_BAD_LENGTH);
    return len < 1 ? 1 : a.n_kv;
}

// A block's run, positions begin to end - 1: what its columns see is cut into n_runs runs of whole
// rounds, of which the block has one. len: positions that the sequence has.
struct attend_run { int len, begin, end, n_runs; };
DEV attend_run attend_run_of(const rocq_k_attention_args &a, const attend_task &t, int columns,
                             int round) {
    attend_run r;
    r.len = attend_length(a, t.seq);
    const int column_end = min(t.column0 + columns, a.group * a.n_q);
    r.begin = attend_low(a, r.len, attend_column_of(a, t.column0).query);
    r.end = attend_high(a, r.len, attend_column_of(a, column_end - 1).query);
    const int all = max(r.end - r.begin, 0);
    int length = all;
    r.n_runs = 1;
    if (a.n_splits > 1) {
        const int n = max(min(all / ROCQ_K_ATTEND_RUN, a.n_splits), 1);
        length = max(((all + n - 1) / n + round - 1) / round * round, round);
        r.n_runs = max((all + length - 1) / length, 1);
    }
    r.begin = (int)min((int64_t)r.begin + (int64_t)t.split * length, (int64_t)r.end);
    r.end = min(r.end - r.begin, length) + r.begin;
    return r;
}
template <typename S>
DEV attend_run attend_run_of(const rocq_k_attention_args &a, const attend_task &t) {
    return attend_run_of(a, t, S::COLUMNS, S::ROUND);
}

// No tile yet: attend_go_to gives it one.
DEV attend_place attend_place_in(const attend_run &run, int chunk0, int32_t *rows) {
    attend_place at;
    at.end = run.end;
    at.chunk0 = chunk0;
    at.rows = rows;
    return at;
}

// K and V of the block's KV head and sequence.
struct attend_kv {
    attend_rows k, v;
    bool paged;
    bool listed; // the rows of every tile have to be listed (attend_place)
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

// The positions that a wave's columns see: its first and its last one, which bound all, and each of
// the lane's columns. Columns past the end repeat the last one.
struct attend_limits {
    int low_first, low_last, high_first, high_last;
    int low[FRAG_SLOTS], high[FRAG_SLOTS];
};
DEV attend_limits attend_limits_of(const rocq_k_attention_args &a, const attend_run &run,
                                   int first) {
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
// Stores the addresses of the mask's rows, for the columns from first on, in LDS.
DEV void attend_list_mask(const rocq_k_attention_args &a, const attend_task &t, int first,
                          u32x2 *mask_rows) {
    if (!a.mask.data || lane_index() >= ATTEND_COLUMNS) return;
    const attend_column c = attend_column_of(a, min(first + lane_index(), a.group * a.n_q - 1));
    const uintptr_t to =
        (uintptr_t)row_repeated(a.mask, c.query, t.kv_head * a.group + c.head, t.seq);
    lput(mask_rows + lane_index(), make2((uint32_t)to, (uint32_t)((uint64_t)to >> 32)));
}

// How scores follow from products of Q and K: cap tanh(scale q.k / cap) + mask, all times log2(e).
// Without cap and mask nothing is done to the products, and the fma before exp2 multiplies them by
// factor. tanh(x) is 1 - 2 / (1 + e^2x).
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

// s += K Q^T over a slice. k: the tile of K at the slice's first element. q(i): fragment i of the
// columns of Q, elements 16 i and up of the slice.
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
// The waves of a column tile exchange their slices' partial sums of S: each stores its own, and
// behind a barrier loads and adds up all, in the same order in every wave, so that all get the same
// bits. sums: LDS, where wave 0's begin.
template <typename S>
DEV void attend_put_slice(const frag_c (&s)[S::S_FRAGS], float *sums, int wave) {
    float *own = sums + wave * S::SUM_STRIDE + 4 * lane_index();
#pragma unroll
    for (int i = 0; i < 2 * S::S_FRAGS; i++) {
        const float *v = s[i / 2].v + i % 2 * 4;
        lput((u32x4 *)(own + 128 * i), make4(bits<uint32_t>(v[0]), bits<uint32_t>(v[1]),
                                             bits<uint32_t>(v[2]), bits<uint32_t>(v[3])));
    }
}
template <typename S>
DEV void attend_add_slices(frag_c (&s)[S::S_FRAGS], const float *sums, int wave, int slice) {
    const float *all = sums + (wave - slice) * S::SUM_STRIDE + 4 * lane_index();
#pragma unroll
    for (int i = 0; i < 2 * S::S_FRAGS; i++) {
        float *v = s[i / 2].v + i % 2 * 4;
#pragma unroll
        for (int j = 0; j < S::SLICES; j++) {
            const u32x4 x = lget((const u32x4 *)(all + j * S::SUM_STRIDE + 128 * i));
            const float part[4] = {bits<float>(x.x), bits<float>(x.y), bits<float>(x.z),
                                   bits<float>(x.w)};
#pragma unroll
            for (int e = 0; e < 4; e++) v[e] = j == 0 ? part[e] : v[e] + part[e];
        }
    }
}
// The columns of a wave: what they see, and how their scores follow. mask_rows: LDS of the wave.
struct attend_columns {
    attend_limits limits;
    attend_score score;
    const u32x2 *mask_rows;
};
DEV attend_columns attend_columns_of(const rocq_k_attention_args &a, const attend_task &t,
                                     const attend_run &run, int first, u32x2 *mask_rows) {
    attend_columns to;
    to.limits = attend_limits_of(a, run, first);
    attend_list_mask(a, t, first, mask_rows);
    to.score = attend_score_of(a);
    to.mask_rows = mask_rows;
    return to;
}
// Whether any column of the wave may see a position of the tile. If not, the wave only takes part
// in staging it.
template <typename S> DEV bool attend_is_live(const attend_columns &of, const attend_place &at) {
    return at.first < of.limits.high_last && at.first + S::TILE > of.limits.low_first;
}
// Turns the products of Q and K of a tile into weights P, as operands of attend_multiply_v.
template <typename S>
DEV void attend_weights(frag (&p)[S::S_FRAGS], frag_c (&s)[S::S_FRAGS], attend_state<S> &state,
                        const rocq_k_attention_args &a, const attend_columns &of,
                        const attend_place &at) {
    const attend_limits &limits = of.limits;
    const attend_score &score = of.score;
    if (score.capped) {
#pragma unroll
        for (int i = 0; i < 8 * S::S_FRAGS; i++) {
            float &x = s[i / 8].v[i % 8];
            x = score.cap - 2.0f * score.cap * rcp_fast(1.0f + exp2_fast(x * score.to_cap));
        }
    }
    if (score.masked) {
        attend_bias<S>(s, a, of.mask_rows, at.first, at.end - 1, score.capped ? 1.0f : score.scale);
    }
    if (at.first < limits.low_last || at.first + S::TILE > limits.high_first ||
        at.seen != S::ALL_SEEN) {
        attend_hide<S>(s, limits.low, limits.high, at.first, at.seen);
    }
    attend_weigh<S>(state, s, score.factor);
#pragma unroll
    for (int b = 0; b < S::S_FRAGS; b++) p[b] = frag_from_c(s[b]);
}
// o += V^T P. v: the tile of V^T at the slice's first row.
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
// A prefetch for the time in which the block rotates Q: loads a word of each line of a wave's first
// tile of K or V, if its rows are plain and not in pages.
template <typename S>
DEV uint32_t attend_touch(const attend_rows &t, bool paged, int chunk0, int first, int end) {
    if (t.way != ATTEND_WIDE || paged || first >= end) return 0;
    const int row = min(first + lane_index() % S::TILE, end - 1);
    const int at = min(16 * chunk0 + lane_index() / S::TILE * 128, 2 * t.head_dim - 4);
    return gload((const uint32_t *)(t.base + (uint64_t)(uint32_t)row * t.step + at));
}

// What a rope_append before attention does, for a KV head: Q is rotated and staged in LDS, as by
// attend_stage_q. A block that reads the row of the new position first stores K and V of that
// position in the cache, as does the first block of a head, in case no block reads it. Where
// several blocks store them, they store the same bits.
// scratch: LDS for the angles, 2 KB.
template <typename S>
DEV void attend_append(const rocq_k_attention_args &a0, f16 *q_tile, float *scratch,
                       const attend_task &t, const attend_run &run) {
    const rocq_k_attention_args &a = reread(a0);
    enum {
        QUADS = S::HEAD / 4,
        SLICE = S::BD / 4,
        SLICE_HALVES = ATTEND_COLUMNS * S::Q_STRIDE,
        PART = (QUADS + 31) / 32 * 32 // lanes of whole waves for a head, which put4 needs
    };
    const int thread = (int)thread_index();
    const int position = gload(a.rotation.pos), cell = gload(a.rotation.cell);
    float *sine = scratch, *cosine = scratch + 256;
    const auto load = [&](int i) { // quad i of K, of V and of the columns of Q
        const int part = i < PART ? 0 : i < 2 * PART ? 1 : 2, at = i - part * PART;
        const rocq_k_tensor &from = part < 2 ? a.append[part] : a.q;
        const int c = part < 2 ? 0 : at / QUADS, k = 4 * (part < 2 ? at : at % QUADS);
        const bool live = part < 2 || c < a.group;
        const int head = part < 2 ? t.kv_head : t.kv_head * a.group + (live ? c : 0);
        return rotation_load(a.rotation, ROCQ_F32, row_of(from, head, 0, 0), is_wide(from), k, live,
                             part == 1);
    };
    rotation_quad q = load(thread); // before the angles, which take as long
    for (int i = thread; i < a.rotation.n_dims / 2; i += 128) {
        rotation_angle(a.rotation, position, i, sine, cosine);
    }
    block_sync_lds();
    const uint32_t flip = a.scale < 0.0f ? 0x80008000u : 0u;
    const bool valid = cell >= 0 && cell < a.rotation.n_cells;
    const bool puts =
        valid && (t.split == 0 || a.page_table || (cell >= run.begin && cell < run.end));
    if (!valid && t.split == 0 && thread == 0) atomic_or(a.common.status, ROCQ_K_BAD_CELL);
#pragma unroll 1
    for (int i = thread;;) {
        float y[4];
        rotation_apply(a.rotation, q, sine, cosine, y);
        if (i < 2 * PART) { // whole waves
            const rocq_k_tensor &to = i < PART ? a.k : a.v;
            if (to.layout == ROCQ_LAYOUT_HADAMARD) hadamard(y, a.head_dim);
            put4(to, is_wide(to), row_of(to, t.kv_head, puts ? cell : 0, 0), 0, q.k,
                 puts ? q.count : 0, y);
        } else {
            const int c = (i - 2 * PART) / QUADS, quad = q.k / 4;
            lput((u32x2 *)(q_tile + quad / SLICE * SLICE_HALVES + c * S::Q_STRIDE +
                           4 * (quad % SLICE)),
                 make2(attend_pair(y[0], y[1]) ^ flip, attend_pair(y[2], y[3]) ^ flip));
        }
        i += 128;
        if (i >= 2 * PART + ATTEND_COLUMNS * QUADS) break;
        q = load(i);
    }
    block_sync();
}

// A decode step over plain F16 rows (attention_step, args.step). From one launch of it to the next
// the weights of a layer evict its code from the caches, so each launch reads its code from memory:
// this is a kernel of its own because it has about a third of attention_decode's code. It requests
// K and V before it rotates Q, and it stages no tiles. A block has one head and a run of positions.
// Blocks that have the same run for the heads of one group are neighbours in the grid, so that they
// find each other's K and V in the caches. The waves of a block take KV tiles in turn.
//
//   D                  64   128
//   LANES of a row      8    16    each with 8 elements, 16 bytes
//   GROUPS              4     2    of LANES, in a wave
//   TILE               64    32    positions of a wave, 16 of each group, in halves of 8
//
//   s[p] = K[16 group + p] q   of a lane's elements; the eight sums of a half are added up over the
//                              lanes so that each lane ends with one position's (attend_halve)
//   P = 2^(s - m)              m and l of a group; weights go to all its lanes through LDS
//   o[e] += P V                in F32, of a lane's 8 elements and a group's positions
//
// A wave rescales the sums of its groups of lanes to the largest m among them, adds them up and
// leaves o, m and l in LDS, where the block merges its waves in the same way. If a head has several
// runs, each block stores its o, and then m and l, in work. The last block of a head to finish
// merges the runs: its waves take them in turn and leave their sums in LDS, to be merged as before.
// LDS     4 or 5 KB: Q and the new rows of K and V in F16, angles, a wave's weights and rows of
//         pages, sums of the waves
// Values  Q is rounded to F16, weights and sums are F32. A NaN or infinity in V stays in its column
// Bytes   K and V once from memory, and once for each head of the group from the caches
template <int D> struct attend_step_shape {
    enum {
        THREADS = 128,
        WAVES = THREADS / ROCQ_K_WAVE,
        LANES = D / 8,
        GROUPS = ROCQ_K_WAVE / LANES,
        POSITIONS = 16, // of a group
        TILE = GROUPS * POSITIONS,
        QUADS = D / 4,
        KEPT = D / ROCQ_K_WAVE, // elements that a lane has when groups are added up
        RESULT = D + 2, // floats of a block in work
        // LDS, in bytes: Q, K and V of the new position; sines and cosines; weights and rows of
        // each wave; its m, then its l; a word; its o
        ANGLES_AT = 3 * D * 2,
        WEIGHTS_AT = ANGLES_AT + D * 4,
        ROWS_AT = WEIGHTS_AT + WAVES * TILE * 4,
        M_AT = ROWS_AT + WAVES * TILE * 4,
        WORD_AT = M_AT + 2 * WAVES * 4,
        SUMS_AT = WORD_AT + 16,
        BYTES = SUMS_AT + WAVES * D * 4
    };
    static_assert(SUMS_AT % 16 == 0, "sums are read in words of 16 bytes");
};

// Adds v of two lanes `mask` apart: each keeps half of the N elements, the upper lane the upper.
template <int mask, int N> DEV void attend_halve(float (&v)[8]) {
    const bool upper = (lane_index() & mask) != 0;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const float other = wave_xor<mask>(upper ? v[i] : v[i + N / 2]);
        v[i] = (upper ? v[i + N / 2] : v[i]) + other;
    }
}

// What a block works on: run `run` of one head's positions. split counts the blocks of its KV head.
struct attend_step_task { int split, seq, kv_head, run, head; };
DEV attend_step_task attend_step_task_of(const rocq_k_attention_args &a) {
    const uint32_t block = block_index() + a.common.block0, n_splits = (uint32_t)a.n_splits;
    const uint32_t tile_index = n_splits == 1 ? block : block / n_splits;
    attend_step_task t;
    t.split = (int)(block - tile_index * n_splits);
    t.seq = a.n_seqs == 1 ? 0 : (int)(tile_index / (uint32_t)a.n_kv_heads);
    t.kv_head = (int)tile_index - t.seq * a.n_kv_heads;
    t.run = (int)((uint32_t)t.split / (uint32_t)a.group);
    t.head = t.kv_head * a.group + t.split - t.run * a.group;
    return t;
}

// What a thread works on, and where things are in LDS.
template <int D> struct attend_step_place {
    int thread, lane, wave;
    int chunk, group; // the lane has elements 8 chunk to 8 chunk + 7 of the rows of its group
    int own;          // it weighs positions own and own + 8 of a tile
    f16 *q_row;       // then the new rows of K and V
    float *sine, *cosine;
    float *weights;   // of the wave's tile, and the rows of its positions where they are in pages
    int32_t *rows;
    float *m, *l;     // of each wave
    uint32_t *word;
    float *sums;      // o of each wave
};
template <int D> DEV attend_step_place<D> attend_step_place_of(u32x4 *lds) {
    typedef attend_step_shape<D> S;
    char *const at = (char *)lds;
    attend_step_place<D> p;
    p.thread = (int)thread_index();
    p.lane = lane_index();
    p.wave = wave_read(wave_index(), 0);
    p.chunk = p.lane % S::LANES;
    p.group = p.lane / S::LANES;
    p.own = S::POSITIONS * p.group + p.chunk / (S::LANES / 8);
    p.q_row = (f16 *)at;
    p.sine = (float *)(at + S::ANGLES_AT);
    p.cosine = p.sine + D / 2;
    p.weights = (float *)(at + S::WEIGHTS_AT) + S::TILE * p.wave;
    p.rows = (int32_t *)(at + S::ROWS_AT) + S::TILE * p.wave;
    p.m = (float *)(at + S::M_AT);
    p.l = p.m + S::WAVES;
    p.word = (uint32_t *)(at + S::WORD_AT);
    p.sums = (float *)(at + S::SUMS_AT);
    return p;
}

// Loads the thread's quad of Q, or of the new K or of the new V.
template <int D>
DEV rotation_quad attend_step_load(const rocq_k_attention_args &a, const attend_step_task &t,
                                   int thread) {
    typedef attend_step_shape<D> S;
    const int item = thread / S::QUADS, half = a.rotation.n_dims / 2;
    const float *const row =
        (const float *)(item == 0   ? row_of(a.q, t.head, 0, t.seq)
                        : item == 1 ? row_of(a.append[0], t.kv_head, 0, 0)
                                    : row_of(a.append[1], t.kv_head, 0, 0));
    rotation_quad quad;
    quad.k = 4 * (thread % S::QUADS);
    quad.count = 4;
    quad.rotated = item > 1 ? 0 : 2 * half - quad.k;
    const u32x4 v = gload((const u32x4 *)(row + quad.k));
    u32x4 p = make4(v.y, v.x, v.w, v.z);
    if (a.rotation.neox && quad.rotated > 0)
        p = gload((const u32x4 *)(row + (quad.k < half ? quad.k + half : quad.k - half)));
    floats4(ROCQ_F32, v, quad.v);
    floats4(ROCQ_F32, p, quad.p);
    return quad;
}

// The runs of a head that has len positions, and the one that is the block's.
template <int D>
DEV attend_run attend_step_run_of(const rocq_k_attention_args &a, int len, int run) {
    typedef attend_step_shape<D> S;
    enum { ROUND = S::TILE * S::WAVES };
    // In a short head two or three runs save no more time than merging them takes.
    const int most = min(len / ROUND, a.step);
    const int n = most < 4 && len <= ROCQ_K_STEP_RUN ? 1 : max(most, 1);
    const int length = ((len + n - 1) / n + S::TILE - 1) / S::TILE * S::TILE;
    const int begin = run * length;
    return {len, begin, min(begin + length, len), (len + length - 1) / length};
}

// K and V of the block's KV head; where its run ends; the cell of the new position, or -1.
struct attend_step_kv {
    const char *k, *v;
    uint32_t k_step, v_step;
    bool paged;
    int seq, cell, end;
};
// A tile of the wave, from position `first` on: the lane's elements of its group's rows.
template <int D> struct attend_step_tile {
    int first;
    u32x4 k[attend_step_shape<D>::POSITIONS], v[attend_step_shape<D>::POSITIONS];
};
// Loads the tile. Positions past the end have the row of the last one.
template <int D>
DEV void attend_step_fetch(attend_step_tile<D> &tile, const rocq_k_attention_args &a,
                           const attend_step_kv &kv, const attend_step_place<D> &at) {
    typedef attend_step_shape<D> S;
    const int last = kv.end - 1 - tile.first,
              r0 = S::POSITIONS * (recomputed(at.lane) / S::LANES);
    const uint32_t chunk_at = 16u * (uint32_t)at.chunk;
    if (!kv.paged) {
        const char *const k_tile = kv.k + (uint64_t)(uint32_t)tile.first * kv.k_step,
                         *const v_tile = kv.v + (uint64_t)(uint32_t)tile.first * kv.v_step;
#pragma unroll
        for (int p = 0; p < S::POSITIONS; p++) {
            const uint32_t r = (uint32_t)min(r0 + p, last) & (S::TILE - 1);
            tile.k[p] = gload((const u32x4 *)(k_tile + (r * kv.k_step + chunk_at)));
        }
#pragma unroll
        for (int p = 0; p < S::POSITIONS; p++) {
            const uint32_t r = (uint32_t)min(r0 + p, last) & (S::TILE - 1);
            tile.v[p] = gload((const u32x4 *)(v_tile + (r * kv.v_step + chunk_at)));
        }
    } else {
#pragma unroll
        for (int i = 0; i < S::TILE; i += ROCQ_K_WAVE) {
            const int position = tile.first + min(i + at.lane, last);
            lput(at.rows + i + at.lane, attend_paged_row(a, kv.seq, position));
        }
        wave_sync();
#pragma unroll
        for (int p = 0; p < S::POSITIONS; p++) {
            const uint64_t r = (uint32_t)max(lget(at.rows + r0 + p), 0);
            tile.k[p] = gload((const u32x4 *)(kv.k + (r * kv.k_step + chunk_at)));
            tile.v[p] = gload((const u32x4 *)(kv.v + (r * kv.v_step + chunk_at)));
        }
        wave_sync(); // else clang joins these loads and those above, with addresses in VGPRs
    }
}

// Q, and what a rope_append before attention does: rotates the thread's quad and puts it in LDS,
// where the new rows of K and V are for those who read them.
template <int D>
DEV void attend_step_rotate(const rocq_k_attention_args &a, const attend_step_task &t,
                            const rotation_quad &quad, bool has_quad, int position, int &cell,
                            const attend_step_place<D> &at) {
    for (int i = at.thread; i < a.rotation.n_dims / 2; i += attend_step_shape<D>::THREADS) {
        rotation_angle(a.rotation, position, i, at.sine, at.cosine);
    }
    block_sync_lds();
    if (a.rotation.pos && (cell < 0 || cell >= a.rotation.n_cells)) {
        if (t.split == 0 && at.thread == 0) atomic_or(a.common.status, ROCQ_K_BAD_CELL);
        cell = -1;
    }
    if (has_quad) {
        float y[4];
        rotation_apply(a.rotation, quad, at.sine, at.cosine, y);
        lput((u32x2 *)at.q_row + at.thread,
             make2(attend_pair(y[0], y[1]), attend_pair(y[2], y[3])));
    }
    block_sync_lds();
}
// Puts the new rows into a tile that was loaded before they existed.
template <int D>
DEV void attend_step_renew(attend_step_tile<D> &tile, const attend_step_kv &kv,
                           const attend_step_place<D> &at) {
    typedef attend_step_shape<D> S;
    const int last = kv.end - 1 - tile.first;
    if (kv.cell < 0 || !(kv.paged || (kv.cell >= tile.first &&
                                      kv.cell < min(tile.first + S::TILE, kv.end)))) return;
    const u32x4 *const fresh = (const u32x4 *)at.q_row + S::LANES + at.chunk;
    const u32x4 new_k = lget(fresh), new_v = lget(fresh + S::LANES);
#pragma unroll
    for (int p = 0; p < S::POSITIONS; p++) {
        const int r = S::POSITIONS * at.group + p;
        if ((kv.paged ? lget(at.rows + r) : tile.first + min(r, last)) != kv.cell) continue;
        tile.k[p] = new_k;
        tile.v[p] = new_v;
    }
}
// The first block stores the new rows in the KV cache, once its waves have read them.
template <int D>
DEV void attend_step_append(const rocq_k_attention_args &a, const attend_step_task &t, int cell,
                            const attend_step_place<D> &at) {
    typedef attend_step_shape<D> S;
    if (!a.rotation.pos || cell < 0 || t.split != 0 || at.thread >= 2 * S::QUADS) return;
    char *const row = at.thread < S::QUADS ? row_of(a.k, t.kv_head, cell, 0)
                                           : row_of(a.v, t.kv_head, cell, 0);
    gstore((u32x2 *)row + at.thread % S::QUADS,
           lget((const u32x2 *)at.q_row + S::QUADS + at.thread));
}

// The scores of the lane's two positions, one in each half of its group's; q: its elements of Q.
template <int D>
DEV void attend_step_scores(float (&score)[2], const attend_step_tile<D> &tile, const u32x4 &q,
                            float factor, const attend_step_kv &kv,
                            const attend_step_place<D> &at) {
    typedef attend_step_shape<D> S;
    const int last = kv.end - 1 - tile.first;
    const uint32_t q_word[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float s[8];
#pragma unroll
        for (int p = 0; p < 8; p++) {
            const u32x4 x = tile.k[8 * h + p];
            const uint32_t k_word[4] = {x.x, x.y, x.z, x.w};
            s[p] = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[p] = dot2(bits<f16x2>(k_word[i]), bits<f16x2>(q_word[i]), s[p]);
            if (p % 4 == 3) keep_order();
        }
        attend_halve<S::LANES / 2, 8>(s);
        attend_halve<S::LANES / 4, 4>(s);
        attend_halve<S::LANES / 8, 2>(s);
        score[h] = s[0];
        if (S::LANES > 8) score[h] += wave_xor<1>(score[h]);
        const int position = at.own + 8 * h;
        const bool seen = position <= last && (!kv.paged || lget(at.rows + position) >= 0);
        score[h] = seen ? score[h] * factor : -INFINITY;
    }
}
// What a lane holds of its group's result: the sum of its elements of V, the maximum that it and l
// are relative to, and the sum of the lane's own weights.
struct attend_step_state { float o[8], m, l; };
// Turns the scores into weights, which it adds to l and puts in LDS.
template <int D>
DEV void attend_step_weigh(attend_step_state &c, const float (&score)[2],
                           const attend_step_place<D> &at) {
    typedef attend_step_shape<D> S;
    float top = fmaxf(score[0], score[1]);
    top = fmaxf(top, wave_xor<S::LANES / 2>(top));
    top = fmaxf(top, wave_xor<S::LANES / 4>(top));
    top = fmaxf(top, wave_xor<S::LANES / 8>(top));
    const bool moves = top > c.m + 8.0f;
    if (wave_ballot(moves) != 0) {
        const float to = moves ? top : c.m, keep = attend_keep(c.m, to);
        c.m = to;
        c.l *= keep;
#pragma unroll
        for (int e = 0; e < 8; e++) c.o[e] *= keep;
    }
    wave_sync();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float weight = exp2_fast(score[h] - (c.m == -INFINITY ? 0.0f : c.m));
        c.l += weight;
        lput(at.weights + at.own + 8 * h, weight);
    }
    wave_sync();
}
// o += P V
template <int D>
DEV void attend_step_multiply_v(attend_step_state &c, const attend_step_tile<D> &tile,
                                const attend_step_place<D> &at) {
    typedef attend_step_shape<D> S;
#pragma unroll
    for (int p = 0; p < S::POSITIONS; p++) {
        if (p % 4 == 0) keep_order();
        const float w = lget(at.weights + S::POSITIONS * at.group + p);
        const u32x4 v = tile.v[p];
        const uint32_t v_word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float x = f16_f32((uint16_t)(v_word[e / 2] >> 16 * (e & 1)));
            c.o[e] = fmaf(w, x, c.o[e]);
        }
    }
}

// Adds up the wave's groups of lanes and leaves o, m and l of the wave in LDS.
template <int D>
DEV void attend_step_add_groups(attend_step_state &c, const attend_step_place<D> &at) {
    typedef attend_step_shape<D> S;
    float top = c.m;
    if (S::LANES <= 8) top = fmaxf(top, wave_xor<8>(top));
    top = fmaxf(top, wave_xor<16>(top));
    const float keep = attend_keep(c.m, top);
    float l = c.l * keep;
    if (S::LANES <= 8) l += wave_xor<1>(l); // the other lanes have another position's weights
    l += wave_xor<2>(l);
    l += wave_xor<4>(l);
    l += wave_xor<8>(l);
    l += wave_xor<16>(l);
#pragma unroll
    for (int e = 0; e < 8; e++) c.o[e] *= keep;
    attend_halve<16, 8>(c.o);
    if (S::GROUPS > 2) attend_halve<8, 4>(c.o);
    float *const to = at.sums + D * at.wave + 8 * at.chunk + (at.lane & 16 ? 4 : 0) +
                      (S::GROUPS > 2 && (at.lane & 8) ? 2 : 0);
#pragma unroll
    for (int e = 0; e < S::KEPT; e += 2)
        lput((u32x2 *)(to + e), make2(bits<uint32_t>(c.o[e]), bits<uint32_t>(c.o[e + 1])));
    lput(at.m + at.wave, top);
    lput(at.l + at.wave, l);
}

// Elements d to d + 3 of the result, over what the waves have in LDS.
struct attend_step_result { float x[4], m, l; };
template <int D>
DEV attend_step_result attend_step_add_waves(const attend_step_place<D> &at, int d) {
    typedef attend_step_shape<D> S;
    attend_step_result r = {{}, -INFINITY, 0.0f};
#pragma unroll
    for (int w = 0; w < S::WAVES; w++) r.m = fmaxf(r.m, lget(at.m + w));
#pragma unroll
    for (int w = 0; w < S::WAVES; w++) {
        const float add = attend_keep(lget(at.m + w), r.m);
        const u32x4 part = lget((const u32x4 *)(at.sums + D * w + d));
        r.x[0] += add * bits<float>(part.x);
        r.x[1] += add * bits<float>(part.y);
        r.x[2] += add * bits<float>(part.z);
        r.x[3] += add * bits<float>(part.w);
        r.l += add * lget(at.l + w);
    }
    return r;
}

// Stores the block's result in work: o, then m and l.
template <int D> DEV void attend_step_put_run(float *to, const attend_step_place<D> &at) {
    typedef attend_step_shape<D> S;
    static_assert(3 * S::QUADS <= S::THREADS, "no thread has two quads");
    if (at.thread >= S::QUADS) return;
    const attend_step_result r = attend_step_add_waves(at, 4 * at.thread);
    gstore((u32x2 *)to + 2 * at.thread, make2(bits<uint32_t>(r.x[0]), bits<uint32_t>(r.x[1])));
    gstore((u32x2 *)to + 2 * at.thread + 1, make2(bits<uint32_t>(r.x[2]), bits<uint32_t>(r.x[3])));
    if (at.thread == 0)
        gstore((u32x2 *)to + D / 2, make2(bits<uint32_t>(r.m), bits<uint32_t>(r.l)));
}
// Merges the results of all runs into what waves leave in LDS. A wave takes every WAVES-th run,
// with the loads of AHEAD in flight; a lane has pairs of elements.
template <int D>
DEV void attend_step_add_runs(const float *results, int n_runs, const attend_step_place<D> &at) {
    typedef attend_step_shape<D> S;
    enum { AHEAD = 4, PAIRS = S::KEPT / 2 };
    float x[2 * PAIRS] = {}, m = -INFINITY, l = 0.0f;
#pragma unroll 1
    for (int r = at.wave; r < n_runs; r += AHEAD * S::WAVES) {
        u32x2 part[AHEAD][PAIRS], m_l[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int of = min(r + i * S::WAVES, n_runs - 1);
            const u32x2 *const from = (const u32x2 *)(results + of * S::RESULT);
            m_l[i] = gload(from + D / 2);
#pragma unroll
            for (int e = 0; e < PAIRS; e++) part[i][e] = gload(from + 32 * e + at.lane);
        }
        float top = m;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (r + i * S::WAVES >= n_runs) m_l[i] = make2(bits<uint32_t>(-INFINITY), 0);
            top = fmaxf(top, bits<float>(m_l[i].x));
        }
        const float keep = attend_keep(m, top);
        m = top;
        l *= keep;
#pragma unroll
        for (int e = 0; e < 2 * PAIRS; e++) x[e] *= keep;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const float add =
                r + i * S::WAVES < n_runs ? attend_keep(bits<float>(m_l[i].x), top) : 0.0f;
            l += bits<float>(m_l[i].y) * add;
#pragma unroll
            for (int e = 0; e < PAIRS; e++) {
                x[2 * e] += bits<float>(part[i][e].x) * add;
                x[2 * e + 1] += bits<float>(part[i][e].y) * add;
            }
        }
    }
#pragma unroll
    for (int e = 0; e < PAIRS; e++) {
        lput((u32x2 *)(at.sums + D * at.wave) + 32 * e + at.lane,
             make2(bits<uint32_t>(x[2 * e]), bits<uint32_t>(x[2 * e + 1])));
    }
    lput(at.m + at.wave, m);
    lput(at.l + at.wave, l);
}

template <int D> DEV void attend_step(const rocq_k_attention_args &a) {
    typedef attend_step_shape<D> S;
    static_assert(S::BYTES <= ROCQ_K_ATTEND_STEP_LDS && S::BYTES + 1024 > ROCQ_K_ATTEND_STEP_LDS,
                  "what the host counts with, less than a granule of LDS apart");
    LDS(u32x4, lds, S::BYTES / 16);
    if (a.n_splits == 0) return;
    const attend_step_place<D> at = attend_step_place_of<D>(lds);
    const attend_step_task t = attend_step_task_of(a);
    const bool append = a.rotation.pos != 0, has_quad = at.thread < (append ? 3 : 1) * S::QUADS;
    rotation_quad quad = {};
    if (has_quad) quad = attend_step_load<D>(a, t, at.thread);
    attend_step_kv kv;
    kv.seq = t.seq;
    kv.cell = -1;
    int position = 0;
    if (append) {
        position = gload(a.rotation.pos);
        kv.cell = wave_read(gload(a.rotation.cell), 0);
    }
    const attend_run run = attend_step_run_of<D>(a, attend_length(a, t.seq), t.run);
    if (t.run >= run.n_runs) return;
    kv.end = run.end;
    kv.paged = a.page_table != 0;
    kv.k = row_of(a.k, t.kv_head, 0, kv.paged ? 0 : t.seq);
    kv.v = row_of(a.v, t.kv_head, 0, kv.paged ? 0 : t.seq);
    // The mask tells the compiler that 24-bit products do, each of which is one instruction.
    kv.k_step = (uint32_t)a.k.stride[1] & 0xffffff;
    kv.v_step = (uint32_t)a.v.stride[1] & 0xffffff;
    attend_step_tile<D> tile;
    tile.first = run.begin + at.wave * S::TILE;
    const bool idle = tile.first >= run.end;
    if (!idle) attend_step_fetch(tile, a, kv, at);

    attend_step_rotate(a, t, quad, has_quad, position, kv.cell, at);
    const u32x4 q = lget((const u32x4 *)at.q_row + at.chunk);
    const float factor = a.scale * 1.44269504f;
    attend_step_state state = {{}, -INFINITY, 0.0f};
#pragma unroll 1
    while (!idle) {
        attend_step_renew(tile, kv, at);
        float score[2];
        attend_step_scores(score, tile, q, factor, kv, at);
        attend_step_weigh(state, score, at);
        attend_step_multiply_v(state, tile, at);
        tile.first += S::TILE * S::WAVES;
        if (tile.first >= run.end) break;
        attend_step_fetch(tile, a, kv, at);
    }
    attend_step_add_groups(state, at);
    block_sync_lds();
    attend_step_append(a, t, kv.cell, at);

    if (run.n_runs > 1) {
        const int64_t of_head = t.head + (int64_t)a.n_heads * t.seq;
        float *const results = a.work + of_head * a.step * S::RESULT;
        attend_step_put_run(results + t.run * S::RESULT, at);
        uint32_t *const counter = a.counter + of_head;
        if (block_ticket(counter, at.word) != (uint32_t)run.n_runs - 1) return;
        if (at.thread == 0) gstore(counter, 0u);
        attend_step_add_runs(results, run.n_runs, at);
        block_sync_lds();
    }
    if (at.wave == 0) {
        const int d = 4 * (at.lane % S::QUADS);
        attend_step_result r = attend_step_add_waves(at, d);
        const float share = r.l != 0.0f ? rcp_fast(r.l) : 0.0f;
#pragma unroll
        for (int e = 0; e < 4; e++) r.x[e] = r.l != 0.0f ? r.x[e] * share : 0.0f;
        put4(a.out, is_wide(a.out), row_of(a.out, t.head, 0, t.seq),
             (uint32_t)(t.head + a.n_heads * t.seq), d, at.lane < S::QUADS ? 4 : 0, r.x);
    }
}

// [large LDS] RDNA3: skip to attend_decode. Only chips with over 64 KiB of LDS run this.
// A decode step over plain F16 rows on chips with WMMA_TILES, whose LDS is large and whose copies
// to it take no registers (attention_group). A block has a run of positions and up to COLUMNS heads
// of a KV head's group, so that K and V are read once for all of them. Its waves take KV tiles in
// turn. Each has a ring in LDS of its own, of UNITS units: a unit is K or V of one of its tiles,
// K[0] V[0] K[1] V[1] and so on. Once it is done with a unit, the wave requests the one that is
// UNITS further on in its place. So as many bytes as a ring holds are in flight all the time, and
// they take no registers.
//
//   D                 64   128   256
//   TILE              32    16    16    positions of a wave
//   UNITS              4     4     2
//   LDS, in KB       149   141   140
//
// S = K Q^T, P and O = O + V^T P are as in the other kernels (see the top of this part), on tiles
// of 8 columns. Columns past the group's last one have zeros for Q, and nothing of them is stored.
// At the end the waves leave o, m and l in the place of the rings, where the block merges them. If
// there are several runs each block stores its result in work: m and l of the columns, then o of
// one column after the other. In the last block to finish the waves take the runs in turn and leave
// their sums in LDS, to be merged as before.
// Values  Q, K, V and P are F16, sums F32. Rows past the end, or of pages that do not exist, are
//         zeros, with weight 0. A NaN or infinity in V stays in its element
// Bytes   K and V once, for each COLUMNS heads of a group
template <int D> struct attend_group_shape {
    enum {
        WAVES = ROCQ_K_GROUP_THREADS / ROCQ_K_WAVE,
        COLUMNS = ROCQ_K_GROUP_COLUMNS,
        TILE = D == 64 ? 32 : 16,
        UNITS = D == 256 ? 2 : 4,
        LISTS = UNITS / 2 + 1, // tiles of which some unit is in the ring
        FRAGS = TILE / 16,
        O_FRAGS = D / 16,
        QUADS = D / 4,
        CHUNKS = D / 8,              // of 16 bytes, in a row
        ROWS = ROCQ_K_WAVE / CHUNKS, // that a wave copies at once
        STRIDE = D + 8,              // halves from one row to the next, in LDS
        UNIT = TILE * STRIDE,        // halves
        RESULT = COLUMNS * (D + 2),  // floats of a block in work
        SUM_STRIDE = D + 4,          // floats from one column to the next, when waves are merged
        // quads of Q, and of the new K and V, that a thread has
        LOADS = ((COLUMNS + 2) * QUADS + ROCQ_K_GROUP_THREADS - 1) / ROCQ_K_GROUP_THREADS,
        // LDS, in bytes: rows of Q, then K and V of the new position; sines and cosines; m and l of
        // each wave's columns; a word; rows of the tiles' positions where they are in pages; rings
        ANGLES_AT = (COLUMNS + 2) * STRIDE * 2,
        M_L_AT = ANGLES_AT + D * 4,
        WORD_AT = M_L_AT + WAVES * COLUMNS * 8,
        ROWS_AT = WORD_AT + 16,
        RING_AT = ROWS_AT + WAVES * LISTS * TILE * 4,
        RINGS = WAVES * UNITS * UNIT * 2,
        BYTES = RING_AT + RINGS
    };
    static_assert(RING_AT % 16 == 0, "units are copied in words of 16 bytes");
    static_assert(WAVES * COLUMNS * SUM_STRIDE * 4 <= RINGS, "sums take the rings' place");
    static_assert(BYTES <= ROCQ_K_GROUP_LDS, "what the launch asks for");
};

// What a wave reads, and how far it has requested it.
template <int D> struct attend_group_stream {
    const char *k, *v;
    uint32_t k_step, v_step;
    bool paged;
    int seq, end;
    int first, unit; // the next unit's tile begins there; its number
    f16 *ring;
    int32_t *rows;   // LISTS lists
};
// Place in LDS of a unit, and the rows of its tile.
template <int D> DEV f16 *attend_group_unit(const attend_group_stream<D> &s, int unit) {
    typedef attend_group_shape<D> S;
    return s.ring + (int)((uint32_t)unit % S::UNITS) * S::UNIT;
}
template <int D> DEV int32_t *attend_group_rows(const attend_group_stream<D> &s, int unit) {
    typedef attend_group_shape<D> S;
    return s.rows + (int)((uint32_t)unit / 2 % S::LISTS) * S::TILE;
}
// Requests the next unit, if there is one.
template <int D>
DEV void attend_group_request(attend_group_stream<D> &s, const rocq_k_attention_args &a) {
    typedef attend_group_shape<D> S;
    if (s.first < s.end) {
        const bool of_v = s.unit & 1;
        const int lane = lane_index(), row = lane / S::CHUNKS, last = s.end - 1 - s.first;
        const uint32_t step = of_v ? s.v_step : s.k_step;
        const char *from = (of_v ? s.v : s.k) + 16 * (lane % S::CHUNKS);
        u32x4 *const to = (u32x4 *)(attend_group_unit(s, s.unit) + row * S::STRIDE) +
                          lane % S::CHUNKS;
        if (!s.paged) {
            from += (uint64_t)(uint32_t)(s.first + row) * step;
#pragma unroll
            for (int r = 0; r < S::TILE; r += S::ROWS) {
                copy_async_part(to + r * S::STRIDE / 8, (const u32x4 *)from,
                                row + r <= last ? 16 : 0);
                from += (uint32_t)S::ROWS * step;
            }
        } else {
            int32_t *const rows = attend_group_rows(s, s.unit);
            if (!of_v) {
                wave_sync();
                if (lane < S::TILE) {
                    lput(rows + lane,
                         lane <= last ? attend_paged_row(a, s.seq, s.first + lane) : -1);
                }
                wave_sync();
            }
#pragma unroll
            for (int r = 0; r < S::TILE; r += S::ROWS) {
                const int at = lget(rows + row + r);
                copy_async_part(to + r * S::STRIDE / 8,
                                (const u32x4 *)(from + (uint64_t)(uint32_t)max(at, 0) * step),
                                at >= 0 ? 16 : 0);
            }
        }
        if (of_v) s.first += S::TILE * S::WAVES;
    }
    s.unit++;
    copies_close();
}
// Waits for a unit, the oldest in the ring, of the tile at `first`. If the new position is there,
// its row becomes `fresh`.
template <int D>
DEV const f16 *attend_group_take(const attend_group_stream<D> &s, int unit, int first, int cell,
                                 const f16 *fresh) {
    typedef attend_group_shape<D> S;
    f16 *const tile = attend_group_unit(s, unit);
    copies_wait<S::UNITS - 1>();
    wave_sync();
    if (cell < 0) return tile;
    const int lane = lane_index();
    const bool there = s.paged ? lane < S::TILE &&
                                     lget(attend_group_rows(s, unit) + lane % S::TILE) == cell
                               : first + lane == cell && lane < S::TILE && cell < s.end;
    uint32_t left = wave_ballot(there);
    for (int r = 0; left != 0; r++, left >>= 1) {
        if ((left & 1) != 0 && lane < S::CHUNKS)
            lput((u32x4 *)(tile + r * S::STRIDE) + lane, lget((const u32x4 *)fresh + lane));
        wave_sync();
    }
    return tile;
}

// A bit for each position of a unit's tile, which begins at `first`: whether it is there.
template <int D>
DEV uint32_t attend_group_seen(const attend_group_stream<D> &s, int unit, int first) {
    typedef attend_group_shape<D> S;
    if (s.paged) {
        return wave_ballot(lget(attend_group_rows(s, unit) + lane_index() % S::TILE) >= 0);
    }
    return s.end - first >= 32 ? ~0u : (1u << (s.end - first)) - 1;
}

template <int D> struct attend_group_state {
    frag_c8 o[D / 16];
    float m[FRAG_8_SLOTS], l[FRAG_8_SLOTS]; // l is over the lane's own positions
};
// Scores of a tile's positions, as products times factor; -infinity where the bit of seen is 0.
template <int D>
DEV void attend_group_scores(frag_c8 (&s)[attend_group_shape<D>::FRAGS], const f16 *k,
                             const frag_b8 (&q)[D / 16], float factor, uint32_t seen) {
    typedef attend_group_shape<D> S;
#pragma unroll
    for (int b = 0; b < S::FRAGS; b++) {
        frag_c8 part[2] = {}; // two sums, so that one need not wait for the other
#pragma unroll
        for (int i = 0; i < S::O_FRAGS; i++)
            wmma(part[i % 2], frag_load(k + 16 * b * S::STRIDE + 16 * i, S::STRIDE), q[i]);
#pragma unroll
        for (int i = 0; i < FRAG_8_VALUES; i++) {
            const float x = (part[0].v[i] + part[1].v[i]) * factor;
            s[b].v[i] = seen >> (16 * b + frag_row(i)) & 1 ? x : -INFINITY;
        }
    }
}
// Turns scores into weights and adds them to l, as attend_weigh does.
template <int D>
DEV void attend_group_weigh(attend_group_state<D> &c,
                            frag_c8 (&s)[attend_group_shape<D>::FRAGS]) {
    typedef attend_group_shape<D> S;
    float top[FRAG_8_SLOTS];
    bool moves = false;
#pragma unroll
    for (int i = 0; i < FRAG_8_SLOTS; i++) top[i] = -INFINITY;
#pragma unroll
    for (int i = 0; i < FRAG_8_VALUES * S::FRAGS; i++) {
        float &t = top[frag_slot(i % FRAG_8_VALUES)];
        t = fmaxf(t, s[i / FRAG_8_VALUES].v[i % FRAG_8_VALUES]);
    }
#pragma unroll
    for (int i = 0; i < FRAG_8_SLOTS; i++) {
        top[i] = frag_col_max(top[i]);
        moves = moves || top[i] > c.m[i] + 8.0f;
    }
    if (wave_ballot(moves) != 0) {
        float keep[FRAG_8_SLOTS];
#pragma unroll
        for (int i = 0; i < FRAG_8_SLOTS; i++) {
            const float m = top[i] > c.m[i] + 8.0f ? top[i] : c.m[i];
            keep[i] = attend_keep(c.m[i], m);
            c.l[i] *= keep[i];
            c.m[i] = m;
        }
#pragma unroll
        for (int i = 0; i < FRAG_8_VALUES * S::O_FRAGS; i++)
            c.o[i / FRAG_8_VALUES].v[i % FRAG_8_VALUES] *= keep[frag_slot(i % FRAG_8_VALUES)];
    }
#pragma unroll
    for (int i = 0; i < FRAG_8_VALUES * S::FRAGS; i++) {
        const int slot = frag_slot(i % FRAG_8_VALUES);
        float &x = s[i / FRAG_8_VALUES].v[i % FRAG_8_VALUES];
        x = exp2_fast(x - (c.m[slot] == -INFINITY ? 0.0f : c.m[slot]));
        c.l[slot] += x;
    }
}
// Leaves the wave's o, m and l in LDS.
template <int D>
DEV void attend_group_put(attend_group_state<D> &c, float *sums, u32x2 *m_l) {
    typedef attend_group_shape<D> S;
    const int wave = wave_index();
#pragma unroll
    for (int i = 0; i < FRAG_8_VALUES; i++) {
        if (frag_col(i) >= S::COLUMNS) continue;
        float *to = sums + (wave * S::COLUMNS + frag_col(i)) * S::SUM_STRIDE + frag_row(i);
#pragma unroll
        for (int f = 0; f < S::O_FRAGS; f++) lput(to + 16 * f, c.o[f].v[i]);
    }
#pragma unroll
    for (int s = 0; s < FRAG_8_SLOTS; s++) {
        const float l = frag_col_sum(c.l[s]);
        if (frag_row(0) != 0 || frag_slot_col(s) >= S::COLUMNS) continue;
        lput(m_l + wave * S::COLUMNS + frag_slot_col(s),
             make2(bits<uint32_t>(c.m[s]), bits<uint32_t>(l)));
    }
}
// Four elements of a column, merged over what the waves have left in LDS.
struct attend_group_sum { float x[4], m, l; };
template <int D>
DEV attend_group_sum attend_group_add_waves(const float *sums, const u32x2 *m_l, int column,
                                            int d) {
    typedef attend_group_shape<D> S;
    attend_group_sum r = {{}, -INFINITY, 0.0f};
    u32x2 of[S::WAVES];
#pragma unroll
    for (int w = 0; w < S::WAVES; w++) {
        of[w] = lget(m_l + w * S::COLUMNS + column);
        r.m = fmaxf(r.m, bits<float>(of[w].x));
    }
#pragma unroll
    for (int w = 0; w < S::WAVES; w++) {
        const u32x4 part =
            lget((const u32x4 *)(sums + (w * S::COLUMNS + column) * S::SUM_STRIDE + d));
        const float add = attend_keep(bits<float>(of[w].x), r.m);
        r.l += add * bits<float>(of[w].y);
        r.x[0] += add * bits<float>(part.x);
        r.x[1] += add * bits<float>(part.y);
        r.x[2] += add * bits<float>(part.z);
        r.x[3] += add * bits<float>(part.w);
    }
    return r;
}
DEV u32x4 attend_group_words(const attend_group_sum &r) {
    return make4(bits<uint32_t>(r.x[0]), bits<uint32_t>(r.x[1]), bits<uint32_t>(r.x[2]),
                 bits<uint32_t>(r.x[3]));
}
// Merges the results of all runs into what waves leave in LDS. A wave takes every WAVES-th run, a
// lane a quad in each of STEPS steps, with the loads of AHEAD runs in flight.
template <int D>
DEV void attend_group_add_runs(const float *results, int n_runs, int n_there, float *sums,
                               u32x2 *m_l) {
    typedef attend_group_shape<D> S;
    enum { AHEAD = 4, STEPS = 4 };
    const int lane = lane_index(), wave = wave_read(wave_index(), 0), quads = n_there * S::QUADS;
#pragma unroll 1
    for (int first = 0; first < quads; first += STEPS * ROCQ_K_WAVE) {
        attend_group_sum r[STEPS];
#pragma unroll
        for (int s = 0; s < STEPS; s++) r[s] = {{}, -INFINITY, 0.0f};
#pragma unroll 1
        for (int run = wave; run < n_runs; run += AHEAD * S::WAVES) {
            u32x4 part[STEPS][AHEAD];
            u32x2 of[STEPS][AHEAD];
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                if (first + ROCQ_K_WAVE * s >= quads) break;
                const int i = min(first + ROCQ_K_WAVE * s + lane, quads - 1);
#pragma unroll
                for (int k = 0; k < AHEAD; k++) {
                    const float *const from =
                        results + min(run + k * S::WAVES, n_runs - 1) * S::RESULT;
                    of[s][k] = gload((const u32x2 *)from + i / S::QUADS);
                    part[s][k] = gload((const u32x4 *)(from + 2 * S::COLUMNS) + i);
                }
            }
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                if (first + ROCQ_K_WAVE * s >= quads) break;
                float top = r[s].m;
#pragma unroll
                for (int k = 0; k < AHEAD; k++) top = fmaxf(top, bits<float>(of[s][k].x));
                const float keep = attend_keep(r[s].m, top);
                r[s].m = top;
                r[s].l *= keep;
#pragma unroll
                for (int e = 0; e < 4; e++) r[s].x[e] *= keep;
#pragma unroll
                for (int k = 0; k < AHEAD; k++) {
                    const float add = run + k * S::WAVES < n_runs
                        ? attend_keep(bits<float>(of[s][k].x), top) : 0.0f;
                    r[s].l += add * bits<float>(of[s][k].y);
                    r[s].x[0] += add * bits<float>(part[s][k].x);
                    r[s].x[1] += add * bits<float>(part[s][k].y);
                    r[s].x[2] += add * bits<float>(part[s][k].z);
                    r[s].x[3] += add * bits<float>(part[s][k].w);
                }
            }
        }
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const int i = first + ROCQ_K_WAVE * s + lane, to = wave * S::COLUMNS + i / S::QUADS;
            if (i >= quads) break;
            lput((u32x4 *)(sums + to * S::SUM_STRIDE) + i % S::QUADS, attend_group_words(r[s]));
            if (i % S::QUADS == 0)
                lput(m_l + to, make2(bits<uint32_t>(r[s].m), bits<uint32_t>(r[s].l)));
        }
    }
}

// The runs of len positions, and the one that is the block's. With n runs, merging takes about as
// long as reading len / n positions if n is the root of len / (4 columns). A short head is one run.
template <int D>
DEV attend_run attend_group_run_of(const rocq_k_attention_args &a, int len, int n_there,
                                   int run) {
    enum { TILE = attend_group_shape<D>::TILE };
    int n = 1;
    if (len > ROCQ_K_GROUP_RUN / D) {
        const float columns = (float)n_there,
                    even = exp2_fast(0.5f * (log2_fast((float)len) - log2_fast(4.0f * columns)));
        n = max(min((int)even, a.n_splits), 1);
    }
    const int length = ((len + n - 1) / n + TILE - 1) / TILE * TILE;
    const int begin = run * length;
    return {len, begin, min(begin + length, len), (len + length - 1) / length};
}

// Loads a thread's quads of Q and, where they are appended, of the new rows of K and V.
template <int D>
DEV void attend_group_load_new(rotation_quad (&quad)[attend_group_shape<D>::LOADS],
                               const rocq_k_attention_args &a, const attend_task &t, int n_there) {
    typedef attend_group_shape<D> S;
    const bool append = a.rotation.pos != 0;
#pragma unroll
    for (int j = 0; j < S::LOADS; j++) {
        const int i = (int)thread_index() + j * ROCQ_K_GROUP_THREADS, row = i / S::QUADS;
        const int item = max(row - S::COLUMNS + 1, 0), head = t.kv_head * a.group + t.column0 + row;
        if (item == 0 ? row < n_there : append && item < 3)
            quad[j] = attend_step_load<D>(a, {t.split, t.seq, t.kv_head, t.split, head},
                                          item * S::QUADS + i % S::QUADS);
    }
}
// Puts them into LDS, rotated.
template <int D>
DEV void attend_group_put_new(f16 *rows, const rocq_k_attention_args &a,
                              const rotation_quad (&quad)[attend_group_shape<D>::LOADS],
                              const float *sine, const float *cosine) {
    typedef attend_group_shape<D> S;
#pragma unroll
    for (int j = 0; j < S::LOADS; j++) {
        const int i = (int)thread_index() + j * ROCQ_K_GROUP_THREADS, row = i / S::QUADS;
        if (row >= S::COLUMNS + 2) continue;
        float y[4];
        rotation_apply(a.rotation, quad[j], sine, cosine, y);
        lput((u32x2 *)(rows + row * S::STRIDE) + i % S::QUADS,
             make2(attend_pair(y[0], y[1]), attend_pair(y[2], y[3])));
    }
}
// Stores the new rows of K and V, which lie in LDS, in the caches.
template <int D>
DEV void attend_group_append(const rocq_k_attention_args &a, int kv_head, int cell,
                             const f16 *fresh) {
    typedef attend_group_shape<D> S;
    const int thread = (int)thread_index();
    if (thread >= 2 * S::QUADS) return;
    const bool of_v = thread >= S::QUADS;
    char *const row = row_of(of_v ? a.v : a.k, kv_head, cell, 0);
    gstore((u32x2 *)row + thread % S::QUADS,
           lget((const u32x2 *)(fresh + of_v * S::STRIDE) + thread % S::QUADS));
}
// A wave's part of a run: what it reads, and where that lies in LDS.
template <int D>
DEV attend_group_stream<D> attend_group_stream_of(const rocq_k_attention_args &a,
                                                  const attend_task &t, const attend_run &run,
                                                  char *lds) {
    typedef attend_group_shape<D> S;
    const int wave = wave_read(wave_index(), 0);
    attend_group_stream<D> stream;
    stream.paged = a.page_table != 0;
    stream.k = row_of(a.k, t.kv_head, 0, stream.paged ? 0 : t.seq);
    stream.v = row_of(a.v, t.kv_head, 0, stream.paged ? 0 : t.seq);
    stream.k_step = (uint32_t)a.k.stride[1];
    stream.v_step = (uint32_t)a.v.stride[1];
    stream.seq = t.seq;
    stream.first = run.begin + wave * S::TILE;
    stream.end = run.end;
    stream.unit = 0;
    stream.ring = (f16 *)(lds + S::RING_AT) + wave * (S::UNITS * S::UNIT);
    stream.rows = (int32_t *)(lds + S::ROWS_AT) + wave * (S::LISTS * S::TILE);
    return stream;
}
template <int D> DEV void attend_group_clear(attend_group_state<D> &c) {
    typedef attend_group_shape<D> S;
#pragma unroll
    for (int i = 0; i < FRAG_8_VALUES * S::O_FRAGS; i++)
        c.o[i / FRAG_8_VALUES].v[i % FRAG_8_VALUES] = 0.0f;
#pragma unroll
    for (int i = 0; i < FRAG_8_SLOTS; i++) {
        c.m[i] = -INFINITY;
        c.l[i] = 0.0f;
    }
}
// O += V^T P of a tile.
template <int D>
DEV void attend_group_add(attend_group_state<D> &c, const f16 *v,
                          const frag_b8 (&p)[attend_group_shape<D>::FRAGS]) {
    typedef attend_group_shape<D> S;
#pragma unroll
    for (int b = 0; b < S::FRAGS; b++) {
#pragma unroll
        for (int f = 0; f < S::O_FRAGS; f++)
            wmma(c.o[f], frag_turned(v + 16 * b * S::STRIDE + 16 * f, S::STRIDE), p[b]);
    }
}
// What a run's block leaves in work: m and l of its columns, then o of one after the other.
template <int D>
DEV void attend_group_put_run(float *to, const float *sums, const u32x2 *m_l, int n_there) {
    typedef attend_group_shape<D> S;
    for (int i = (int)thread_index(); i < n_there * S::QUADS; i += ROCQ_K_GROUP_THREADS) {
        const int column = i / S::QUADS, d = i % S::QUADS * 4;
        const attend_group_sum r = attend_group_add_waves<D>(sums, m_l, column, d);
        gstore((u32x4 *)(to + 2 * S::COLUMNS) + i, attend_group_words(r));
        if (d == 0) {
            gstore((u32x2 *)to + column, make2(bits<uint32_t>(r.m), bits<uint32_t>(r.l)));
        }
    }
}
// The result: what waves have left in LDS, merged and divided by l.
template <int D>
DEV void attend_group_put_out(const rocq_k_attention_args &a, const attend_task &t,
                              const float *sums, const u32x2 *m_l, int n_there) {
    typedef attend_group_shape<D> S;
    for (int first_quad = 0; first_quad < n_there * S::QUADS; first_quad += ROCQ_K_GROUP_THREADS) {
        const int i = first_quad + (int)thread_index(), column = min(i / S::QUADS, n_there - 1),
                  d = i % S::QUADS * 4, head = t.kv_head * a.group + t.column0 + column;
        attend_group_sum r = attend_group_add_waves<D>(sums, m_l, column, d);
        const float share = r.l != 0.0f ? rcp_fast(r.l) : 0.0f;
#pragma unroll
        for (int e = 0; e < 4; e++) r.x[e] = r.l != 0.0f ? r.x[e] * share : 0.0f;
        put4(a.out, is_wide(a.out), row_of(a.out, head, 0, t.seq),
             (uint32_t)(head + a.n_heads * t.seq), d, i < n_there * S::QUADS ? 4 : 0, r.x);
    }
}

template <int D> DEV void attend_group(const rocq_k_attention_args &a) {
    typedef attend_group_shape<D> S;
    LDS_GRANTED(u32x4, lds, S::BYTES / 16);
    if (a.n_splits == 0) return;
    char *const at = (char *)lds;
    f16 *const q_rows = (f16 *)at, *const fresh = q_rows + S::COLUMNS * S::STRIDE;
    float *const sine = (float *)(at + S::ANGLES_AT), *const cosine = sine + D / 2;
    u32x2 *const m_l = (u32x2 *)(at + S::M_L_AT);
    float *const sums = (float *)(at + S::RING_AT);
    const int thread = (int)thread_index();
    const attend_task t = attend_task_of<S>(a, (int)(block_index() + a.common.block0));
    const int n_there = min((int)S::COLUMNS, a.group - t.column0);
    const bool append = a.rotation.pos != 0;

    rotation_quad quad[S::LOADS] = {};
    attend_group_load_new<D>(quad, a, t, n_there);
    int position = 0, cell = -1;
    if (append) {
        position = gload(a.rotation.pos);
        cell = wave_read(gload(a.rotation.cell), 0);
    }
    const attend_run run = attend_group_run_of<D>(a, attend_length(a, t.seq), n_there, t.split);
    if (t.split >= run.n_runs) return;
    attend_group_stream<D> stream = attend_group_stream_of<D>(a, t, run, at);
    int first = stream.first;
#pragma unroll 1
    for (int u = 0; u < S::UNITS; u++) attend_group_request(stream, a);

    for (int i = thread; i < a.rotation.n_dims / 2; i += ROCQ_K_GROUP_THREADS)
        rotation_angle(a.rotation, position, i, sine, cosine);
    block_sync_lds();
    if (append && (cell < 0 || cell >= a.rotation.n_cells)) {
        if (t.split == 0 && thread == 0) atomic_or(a.common.status, ROCQ_K_BAD_CELL);
        cell = -1;
    }
    attend_group_put_new<D>(q_rows, a, quad, sine, cosine);
    block_sync_lds();
    frag_b8 q[S::O_FRAGS];
#pragma unroll
    for (int i = 0; i < S::O_FRAGS; i++) q[i] = frag_load_b8(q_rows + 16 * i, S::STRIDE);
    const float factor = a.scale * 1.44269504f;
    attend_group_state<D> state;
    attend_group_clear<D>(state);
#pragma unroll 1
    for (int unit = 0; first < run.end; unit += 2, first += S::TILE * S::WAVES) {
        const f16 *const k = attend_group_take(stream, unit, first, cell, fresh);
        const uint32_t seen = attend_group_seen(stream, unit, first);
        frag_c8 s[S::FRAGS];
        attend_group_scores<D>(s, k, q, factor, seen);
        wave_sync();
        attend_group_request(stream, a);
        attend_group_weigh<D>(state, s);
        frag_b8 p[S::FRAGS];
#pragma unroll
        for (int b = 0; b < S::FRAGS; b++) p[b] = frag_b8_from_c(s[b]);

        const f16 *const v =
            attend_group_take(stream, unit + 1, first, cell, fresh + S::STRIDE);
        attend_group_add<D>(state, v, p);
        wave_sync();
        attend_group_request(stream, a);
    }
    launch_next();
    block_sync_lds();
    attend_group_put<D>(state, sums, m_l);
    block_sync_lds();
    // The first block stores the new rows in the caches, when no wave of it reads them any more.
    if (append && cell >= 0 && t.split == 0 && t.column0 == 0) {
        attend_group_append<D>(a, t.kv_head, cell, fresh);
    }

    if (run.n_runs > 1) {
        float *const results = a.work + (int64_t)t.tile_index * a.n_splits * S::RESULT;
        attend_group_put_run<D>(results + t.split * S::RESULT, sums, m_l, n_there);
        uint32_t *const counter = a.counter + t.tile_index;
        if (block_ticket(counter, (uint32_t *)(at + S::WORD_AT)) != (uint32_t)run.n_runs - 1)
            return;
        if (thread == 0) gstore(counter, 0u);
        attend_group_add_runs<D>(results, run.n_runs, n_there, sums, m_l);
        block_sync_lds();
    }
    attend_group_put_out<D>(a, t, sums, m_l, n_there);
}

// Decode is bound by memory, so a wave has K and V of its next tile in flight while it works on
// this one. The loop needs no barriers except for the slices' sums. Q is read from LDS for every
// tile, because the prefetched data takes the registers.
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

    f16 *q_tile = (f16 *)((char *)lds + S::Q_AT);
    const bool append = a.rotation.pos != 0;
    const attend_kv kv = attend_kv_of<S>(a, t);
    const int own_first = run.begin + w.set * S::TILE, chunk0 = w.slice * (S::W / 8);
    if (append) {
        uint32_t k_word = attend_touch<S>(kv.k, kv.paged, chunk0, own_first, run.end),
                 v_word = attend_touch<S>(kv.v, kv.paged, chunk0, own_first, run.end);
        attend_append<S>(a, q_tile, (float *)lds, t, run);
        computed(k_word);
        computed(v_word);
    }
    int32_t *const tables = (int32_t *)((char *)lds + attend_lds<S>::ROWS_AT + wave * S::ROW_BYTES);
    attend_place at = attend_place_in(run, chunk0, tables);
    u32x4 raw_k[S::LOADS], raw_v[S::LOADS];
    int row[S::WORDS] = {};
    if (run.begin < run.end) {
        if (kv.paged) attend_look_up<S>(row, a, t.seq, own_first, run.end);
        attend_go_to<S>(at, row, kv.paged, kv.listed, own_first);
        attend_fetch<S, false>(raw_k, kv.k, at, lane);
        attend_fetch<S, true>(raw_v, kv.v, at, lane);
        if (kv.paged) attend_look_up<S>(row, a, t.seq, own_first + S::ROUND, run.end);
    }
    const attend_columns columns =
        attend_columns_of(a, t, run, t.column0, (u32x2 *)(tables + 2 * S::TILE));
    if (!append) attend_stage_q<S>(q_tile, a, t, t.column0);
    if (a.k.layout == ROCQ_LAYOUT_HADAMARD) attend_hadamard_q<S>(q_tile, a);
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
        attend_go_to<S>(next, row, kv.paged, kv.listed, at.first + S::ROUND);
        attend_fetch<S, false>(raw_k, kv.k, next, lane); // past the end it loads the last position
        if (kv.paged) attend_look_up<S>(row, a, t.seq, at.first + 2 * S::ROUND, run.end);

        const bool live = attend_is_live<S>(columns, at);
        frag_c s[S::S_FRAGS];
        attend_clear_scores<S>(s);
        if (live) {
            attend_multiply_k<S>(s, tile, [=](int i) {
                return frag_load(q_tile + 16 * i, S::Q_STRIDE);
            });
        }
        if (S::SLICES > 1) {
            wave_sync();
            if (live) attend_put_slice<S>(s, (float *)lds, wave);
            block_sync_lds();
            if (live) attend_add_slices<S>(s, (float *)lds, wave, w.slice);
            block_sync_lds();
        }
        frag p[S::S_FRAGS];
        if (live) attend_weights<S>(p, s, state, a, columns, at);

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

// Stages Q_COLUMNS columns of Q, from the block's column `first` on, and loads the wave's.
template <typename S>
DEV void attend_load_q(frag (&q)[S::O_FRAGS], const rocq_k_attention_args &a, const attend_task &t,
                       const attend_role &w, int first, f16 *tile) {
    const int own = ATTEND_COLUMNS * w.column_tile - first;
    attend_stage_q<S>(tile, a, t, t.column0 + first);
    if (a.k.layout == ROCQ_LAYOUT_HADAMARD) attend_hadamard_q<S>(tile, a);
    block_sync_lds();
    if (S::Q_COLUMNS == S::COLUMNS || (own >= 0 && own < S::Q_COLUMNS)) {
        const f16 *const from = tile + own * S::Q_STRIDE + w.slice * S::W;
#pragma unroll
        for (int i = 0; i < S::O_FRAGS; i++) q[i] = frag_load(from + 16 * i, S::Q_STRIDE);
    }
    block_sync_lds();
}

// Prefill is bound by arithmetic. All waves stage and use one KV tile. While they work on its K,
// its V is in flight, and while they work on V, the next tile's K. The occupancy is enough to hide
// the rest of the latency, so Q stays in the registers that further prefetches would need.
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
    attend_place at = attend_place_in(run, 0, tables);
    u32x4 raw_k[S::LOADS];
    int row[S::WORDS] = {};
    if (run.begin < run.end) {
        if (kv.paged) attend_look_up<S>(row, a, t.seq, run.begin, run.end);
        attend_go_to<S>(at, row, kv.paged, kv.listed, run.begin);
        attend_fetch<S, false>(raw_k, kv.k, at, thread);
    }
    const int first_column = t.column0 + ATTEND_COLUMNS * w.column_tile;
    const attend_columns columns =
        attend_columns_of(a, t, run, first_column, (u32x2 *)(tables + 2 * S::TILE));
    frag q[S::O_FRAGS];
    attend_load_q<S>(q, a, t, w, 0, k_tile);
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

        const bool live = attend_is_live<S>(columns, at);
        frag_c s[S::S_FRAGS];
        attend_clear_scores<S>(s);
        if (live) attend_multiply_k<S>(s, k_tile + w.slice * S::W, [&](int i) { return q[i]; });
        if (S::SLICES > 1) {
            float *const sums = (float *)((char *)lds + S::SUMS_AT);
            if (live) attend_put_slice<S>(s, sums, wave);
            block_sync_lds();
            if (live) attend_add_slices<S>(s, sums, wave, w.slice);
        }
        frag p[S::S_FRAGS];
        if (live) attend_weights<S>(p, s, state, a, columns, at);

        attend_stage<S, true>(v_tile, raw_v, kv.v, at, thread);
        attend_go_to<S>(next, row, kv.paged, kv.listed, at.first + S::ROUND);
        block_sync_lds();
        attend_fetch<S, false>(raw_k, kv.k, next, thread);
        if (live) attend_multiply_v<S>(state, v_tile + w.slice * S::W * S::V_STRIDE, p);
        at = next;
    }
    block_sync_lds();
    attend_finish<S>(a, state, run.n_runs, lds);
}

// Prefill of D = 512. Sixteen waves, four slices of four column tiles, share each KV tile: with one
// column tile a block, K and V would be read from L2 for every 16 columns, which takes longer than
// the products. S of tile n is computed before O of tile n - 1, so that two barriers a tile are
// enough: between them all waves multiply, or all weigh and stage. The first half of the threads
// stages K, a tile ahead of V, which the second half stages.
template <int D> DEV void attend_prefill_wide(const rocq_k_attention_args &a) {
    typedef attend_prefill_shape<D> S;
    static_assert(attend_lds<S>::BYTES == ROCQ_K_ATTEND_WIDE_LDS, "what the launch asks for");
    LDS_LARGE(u32x4, lds, attend_lds<S>::BYTES / 16);
    if (a.n_splits == 0) return;
    const int thread = (int)thread_index() % S::THREADS, wave = wave_read(wave_index(), 0);
    const bool has_k = wave < S::THREADS / 32;
    const attend_role w = attend_role_of<S>(wave);
    f16 *const k_tile = (f16 *)lds, *const v_tile = (f16 *)((char *)lds + S::V_AT);
    float *const sums = (float *)((char *)lds + S::SUMS_AT);
    const attend_task t = attend_task_of<S>(a, (int)(block_index() + a.common.block0));
    const attend_run run = attend_run_of<S>(a, t);
    if (t.split >= run.n_runs) return;

    const attend_kv kv = attend_kv_of<S>(a, t);
    int32_t *const tables = (int32_t *)((char *)lds + attend_lds<S>::ROWS_AT + wave * S::ROW_BYTES);
    attend_place at = attend_place_in(run, 0, tables); // of the tile that the thread stages next
    u32x4 raw[S::LOADS]; // whose chunks these are
    int row[S::WORDS] = {};
    const auto fetch = [&](int first) {
        attend_go_to<S>(at, row, kv.paged, kv.listed, first); // past the end: the last position
        if (has_k) attend_fetch<S, false>(raw, kv.k, at, recomputed(thread));
        else attend_fetch<S, true>(raw, kv.v, at, recomputed(thread));
        if (kv.paged) attend_look_up<S>(row, a, t.seq, first + S::TILE, run.end);
    };
    const int first_column = t.column0 + ATTEND_COLUMNS * w.column_tile;
    const attend_columns columns =
        attend_columns_of(a, t, run, first_column, (u32x2 *)(tables + 2 * S::TILE));
    frag q[S::O_FRAGS];
#pragma unroll 1
    for (int c = 0; c < S::COLUMNS; c += S::Q_COLUMNS) attend_load_q<S>(q, a, t, w, c, k_tile);
    attend_state<S> state;
    attend_clear<S>(state);
    frag p[S::S_FRAGS];
    bool lives = false; // whether the wave's columns see any position of the tile at `first`
    if (run.begin < run.end) {
        if (kv.paged) attend_look_up<S>(row, a, t.seq, run.begin, run.end);
        fetch(run.begin);
    }
    int first = run.begin < run.end ? run.begin - S::TILE : run.end;
    for (; first < run.end; first += S::TILE) {
        uint64_t seen = at.seen; // of the tile at first + TILE, whose scores are computed now
        if (has_k || first >= run.begin) {
            if (has_k) attend_stage<S, false>(k_tile, raw, kv.k, at, thread);
            else attend_stage<S, true>(v_tile, raw, kv.v, at, thread);
            fetch(at.first + S::TILE);
            if (!has_k) seen = at.seen;
        }
        block_sync_lds();
        attend_place next = at;
        next.first = first + S::TILE;
        next.seen = seen;
        const bool live = next.first < run.end && attend_is_live<S>(columns, next);
        frag_c s[S::S_FRAGS];
        attend_clear_scores<S>(s);
        if (live) {
            attend_multiply_k<S>(s, k_tile + w.slice * S::W, [&](int i) { return q[i]; });
            attend_put_slice<S>(s, sums, wave);
        }
        if (lives) attend_multiply_v<S>(state, v_tile + w.slice * S::W * S::V_STRIDE, p);
        block_sync_lds();
        if (live) {
            attend_add_slices<S>(s, sums, wave, w.slice);
            attend_weights<S>(p, s, state, a, columns, next);
        }
        lives = live;
    }
    attend_finish<S>(a, state, run.n_runs, lds);
}

#define ROCQ_X(X, d)                                                                               \
    KERNEL(attention_decode_##d, rocq_k_attention_args, 128) { attend_decode<d>(a); }              \
    KERNEL(attention_prefill_##d, rocq_k_attention_args, ROCQ_K_PREFILL_THREADS(d)) {              \
        if constexpr (d < 512) attend_prefill<d>(a);                                               \
        else attend_prefill_wide<d>(a);                                                            \
    }
ROCQ_K_HEAD_DIMS(ROCQ_X, unused)
#undef ROCQ_X

// -- prefill straight from LDS --
// [large LDS] RDNA3: skip to ">>ops". Only chips with over 64 KiB of LDS run this.

// Prefill where four waves multiply straight from LDS (WMMA_TILES), for what rocq__attention_lds
// allows: heads to 256, no mask and no pages. A group of four waves has 64 columns, a block is one
// or two groups. Here rows are columns of the work:
//   S = Q K^T   [column][position]
//   P = 2^(S - m), as above. A result's rows are an operand in registers (frag_rows_of)
//   O += P V    [column][d]
// S of the next KV tile and O of this one are a batch each; behind them the waves copy the tiles
// that follow and turn that S into P. A wave stops at a product whose operand is in registers until
// those before it have been done (time stamps on an H100): so most of O is there by then.

// LDS: Q of each 64 columns, [chunk of 64 elements][column], then two tiles of K and two of V,
// [chunk][position], all in lines of 64 elements as wmma_tile has them.
template <int D> struct attend_tiles_shape {
    enum {
        TILE = ROCQ_K_ATTEND_LDS_TILE(D),
        CHUNKS = D / 64,
        KV = TILE * D, // halves of a KV tile
        N = TILE / 16  // fragments of S and P
    };
    static_assert(8 * 16 * (D + 8) * 4 <= ROCQ_K_ATTEND_LDS_BYTES(D, 256), "results");
};
// A wave's 16 columns, as in attend_state, and the positions that they see: each of the lane's
// rows, and all of the columns in common.
template <int D> struct attend_tiles_state {
    frag_c o[1][D / 16];
    float m[FRAG_ROW_SLOTS], l[FRAG_ROW_SLOTS];
    int low[FRAG_ROW_SLOTS], high[FRAG_ROW_SLOTS], all_low, all_high;
};

// Copies the positions from `first` on of K or V to a tile, with zeros past the end and past
// head_dim. F16 is copied asynchronously.
template <int D, int WAY, int FORMAT>
DEV void attend_tiles_stage_as(f16 *tile, const attend_rows &from, int first, int end) {
    typedef attend_tiles_shape<D> S;
    enum { THREADS = 256, LINES = S::TILE * 8 / THREADS, ALL = S::CHUNKS * LINES,
           AHEAD = ALL < 4 ? ALL : 4 };
#pragma unroll 1
    for (int part = 0; part < THREADS; part += (int)n_threads()) { // a block may have half of them
        const int thread = (int)thread_index() + part, vector = thread % 8, line = thread / 8;
        f16 *const to = tile + line * 64 + (vector ^ (line & 7)) * 8;
#pragma unroll
        for (int p = 0; p < ALL; p += AHEAD) {
            u32x4 x[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int row = first + line + (p + i) % LINES * (THREADS / 8),
                          chunk = (p + i) / LINES * 8 + vector;
                const bool live = row < end && chunk <= from.last_chunk;
                const char *const at =
                    from.base + (uint64_t)(uint32_t)min(row, end - 1) * from.step;
                if constexpr (FORMAT == ROCQ_F16) {
                    copy_async_part((u32x4 *)(to + ((p + i) / LINES * S::TILE +
                                                    (p + i) % LINES * (THREADS / 8)) * 64),
                                    (const u32x4 *)at + chunk, live ? 16 : 0);
                } else {
                    x[i] = attend_load<WAY>(at, min(chunk, from.last_chunk));
                }
            }
#pragma unroll
            for (int i = 0; i < AHEAD && FORMAT != ROCQ_F16; i++) {
                const int row = first + line + (p + i) % LINES * (THREADS / 8),
                          chunk = (p + i) / LINES * 8 + vector;
                const u32x4 h = attend_halves<WAY>(x[i], chunk, FORMAT);
                lput((u32x4 *)(to + ((p + i) / LINES * S::TILE +
                                     (p + i) % LINES * (THREADS / 8)) * 64),
                     row < end && chunk <= from.last_chunk ? h : make4(0, 0, 0, 0));
            }
        }
    }
}
template <int D>
DEV void attend_tiles_stage(f16 *tile, const attend_rows &from, int first, int end) {
    if (from.format == ROCQ_F16)
        attend_tiles_stage_as<D, ATTEND_WIDE, ROCQ_F16>(tile, from, first, end);
    else if (from.way == ATTEND_WIDE)
        attend_tiles_stage_as<D, ATTEND_WIDE, ROCQ_BF16>(tile, from, first, end);
    else if (from.way == ATTEND_Q8_0)
        attend_tiles_stage_as<D, ATTEND_Q8_0, ROCQ_Q8_0>(tile, from, first, end);
    else if (from.way == ATTEND_Q4_0)
        attend_tiles_stage_as<D, ATTEND_Q4_0, ROCQ_Q4_0>(tile, from, first, end);
    else attend_tiles_stage_as<D, ATTEND_F32, ROCQ_F32>(tile, from, first, end);
}

// Puts the block's columns of Q in LDS, with zeros past the last one and past head_dim.
template <int D, int WAY>
DEV void attend_tiles_stage_q(f16 *tile, const rocq_k_attention_args &a, const attend_task &t) {
    enum { CHUNKS = D / 8, EACH = D / 16, AHEAD = EACH < 8 ? EACH : 8 };
    const int n_there = a.group * a.n_q - t.column0, last_chunk = (a.head_dim - 1) / 8;
    const uint32_t flip = a.scale < 0.0f ? 0x80008000u : 0u;
#pragma unroll 1
    for (int first = 0; first < EACH; first += AHEAD) {
        u32x4 x[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int at = (int)(thread_index() + (first + i) * n_threads());
            const attend_column c =
                attend_column_of(a, t.column0 + min(at / CHUNKS, n_there - 1));
            x[i] = attend_load<WAY>(row_of(a.q, t.kv_head * a.group + c.head, c.query, t.seq),
                                    min(at % CHUNKS, last_chunk));
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int at = (int)(thread_index() + (first + i) * n_threads());
            const int c = at / CHUNKS, chunk = at % CHUNKS;
            const bool there = c < n_there && chunk <= last_chunk;
            const u32x4 h = make4(x[i].x ^ flip, x[i].y ^ flip, x[i].z ^ flip, x[i].w ^ flip);
            lput((u32x4 *)(tile + c / 64 * (64 * D) + chunk / 8 * 4096 + c % 64 * 64 +
                           (chunk % 8 ^ (c & 7)) * 8), there ? h : make4(0, 0, 0, 0));
        }
    }
}

// As attend_weigh, for the tile from position `first` on, but leaves the factors of O in keep.
// Returns whether m has moved in any row of the wave, so that O has to be multiplied.
template <int D>
DEV bool attend_tiles_weigh(attend_tiles_state<D> &c,
                            frag_c (&s)[1][attend_tiles_shape<D>::TILE / 16],
                            float (&keep)[FRAG_ROW_SLOTS], const attend_score &score, int first) {
    typedef attend_tiles_shape<D> S;
    if (score.capped) {
#pragma unroll
        for (int i = 0; i < 8 * S::N; i++) {
            float &x = s[0][i / 8].v[i % 8];
            x = score.cap - 2.0f * score.cap * rcp_fast(1.0f + exp2_fast(x * score.to_cap));
        }
    }
    if (first < c.all_low || first + S::TILE > c.all_high) {
#pragma unroll
        for (int i = 0; i < 8 * S::N; i++) {
            const int slot = frag_row_slot(i % 8), at = first + 16 * (i / 8) + frag_col(i % 8);
            if (at < c.low[slot] || at >= c.high[slot]) s[0][i / 8].v[i % 8] = -INFINITY;
        }
    }
    float top[FRAG_ROW_SLOTS], base[FRAG_ROW_SLOTS];
    bool moves = false;
#pragma unroll
    for (int i = 0; i < FRAG_ROW_SLOTS; i++) top[i] = -INFINITY;
#pragma unroll
    for (int i = 0; i < 8 * S::N; i++) {
        float &to = top[frag_row_slot(i % 8)];
        to = fmaxf(to, s[0][i / 8].v[i % 8]);
    }
#pragma unroll
    for (int i = 0; i < FRAG_ROW_SLOTS; i++) {
        top[i] = frag_row_max(top[i]) * score.factor;
        moves = moves || top[i] > c.m[i] + 8.0f;
    }
    const bool any = wave_ballot(moves) != 0;
    if (any) {
#pragma unroll
        for (int i = 0; i < FRAG_ROW_SLOTS; i++) {
            const float to = top[i] > c.m[i] + 8.0f ? top[i] : c.m[i];
            keep[i] = attend_keep(c.m[i], to);
            c.l[i] *= keep[i];
            c.m[i] = to;
        }
    }
#pragma unroll
    for (int i = 0; i < FRAG_ROW_SLOTS; i++) base[i] = c.m[i] == -INFINITY ? 0.0f : c.m[i];
#pragma unroll
    for (int i = 0; i < 8 * S::N; i++) {
        const int slot = frag_row_slot(i % 8);
        float &x = s[0][i / 8].v[i % 8];
        x = exp2_fast(fmaf(x, score.factor, -base[slot]));
        c.l[slot] += x;
    }
    return any;
}

// Results of a single run are divided by l and go to out, those of several to work, as in
// attend_finish. F32 is stored from the registers, other formats by way of LDS.
template <int D>
DEV void attend_tiles_finish(const rocq_k_attention_args &a, const attend_task &t,
                             attend_tiles_state<D> &c, int n_runs, int columns, u32x4 *lds) {
    const int n_there = min(columns, a.group * a.n_q - t.column0);
    const int column0 = matmul_wave() * 16;
    const bool direct = n_runs > 1 || (a.out.format == ROCQ_F32 && is_wide(a.out));
    float *const results =
        a.work + (n_runs > 1 ? (int64_t)t.tile_index * a.n_splits * columns * (D + 2) : 0);
    float *const result = results + (int64_t)t.split * columns * (D + 2);
    float *rows[FRAG_ROW_SLOTS];
#pragma unroll
    for (int i = 0; i < FRAG_ROW_SLOTS; i++) {
        const int column = column0 + frag_slot_row(i);
        const float l = frag_row_sum(c.l[i]);
        const bool live = column < n_there, first = live && frag_col(0) == 0;
        if (n_runs > 1) {
            rows[i] = live ? result + 2 * columns + column * D : 0;
            if (first)
                gstore((u32x2 *)result + column, make2(bits<uint32_t>(c.m[i]), bits<uint32_t>(l)));
            continue;
        }
        const attend_column of = attend_column_of(a, t.column0 + (live ? column : 0));
        const float factor = attend_divisor(a, t, of, c.m[i], l, first);
        rows[i] =
            live ? (float *)row_of(a.out, t.kv_head * a.group + of.head, of.query, t.seq) : 0;
#pragma unroll
        for (int j = 0; j < 8 * (D / 16); j++) {
            float &x = c.o[0][j / 8].v[j % 8];
            if (frag_row_slot(j % 8) == i) x = l != 0.0f ? x * factor : 0.0f;
        }
    }
    if (direct) {
#pragma unroll
        for (int f = 0; f < D / 16; f++) {
            frag_put_floats(c.o[0][f], [&](int slot, int col) {
                const int d = 16 * f + col;
                return rows[slot] && d < a.head_dim ? rows[slot] + d : (float *)0;
            });
        }
    } else {
        lds_finish<D>(c.o[0], (float *)lds, [](int, int) { return lds_loaded(); },
                           [&](int column, int d, const lds_loaded &, float (&x)[4]) {
            const bool live = column < n_there;
            const attend_column of = attend_column_of(a, t.column0 + (live ? column : 0));
            const int head = t.kv_head * a.group + of.head;
            put4(a.out, is_wide(a.out), row_of(a.out, head, of.query, t.seq),
                 (uint32_t)(head + a.n_heads * (of.query + a.n_q * t.seq)), d,
                 live ? quad_count(a.head_dim, d) : 0, x);
        });
    }
    if (n_runs == 1) return;
    if (block_ticket(a.counter + t.tile_index, (uint32_t *)lds) != (uint32_t)n_runs - 1) return;
    if (thread_index() == 0) gstore(a.counter + t.tile_index, 0u);
    attend_merge<D>(a, t, results, n_runs, columns, (int)n_threads());
}

// Keeps code that computes c before this point, and code that uses c after it, even if only a wait
// for the matrix unit ties them together.
template <int N> DEV void attend_tiles_held(frag_c (&c)[N]) {
#pragma unroll
    for (int i = 0; i < 8 * N; i++) held(c[i / 8].v[i % 8]);
}

// A wave's state before its first tile. own: the first of its 16 columns.
template <int D>
DEV void attend_tiles_begin(attend_tiles_state<D> &c, const rocq_k_attention_args &a,
                            const attend_run &run, int own) {
    matmul_clear(c.o);
    const auto query = [&](int row) {
        return attend_column_of(a, min(own + row, a.group * a.n_q - 1)).query;
    };
    c.all_low = attend_low(a, run.len, query(15));
    c.all_high = min(attend_high(a, run.len, query(0)), run.end);
#pragma unroll
    for (int i = 0; i < FRAG_ROW_SLOTS; i++) {
        c.low[i] = attend_low(a, run.len, query(frag_slot_row(i)));
        c.high[i] = min(attend_high(a, run.len, query(frag_slot_row(i))), run.end);
        c.m[i] = -INFINITY;
        c.l[i] = 0.0f;
    }
}
// S = Q K^T, and O += P V, of a group's 64 columns and a tile.
template <int D>
DEV void attend_tiles_multiply_k(frag_c (&s)[1][attend_tiles_shape<D>::N], const f16 *q,
                                 const f16 *k) {
    typedef attend_tiles_shape<D> S;
    matmul_clear(s);
    wmma_lds_begin();
#pragma unroll
    for (int c = 0; c < S::CHUNKS; c++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            wmma_tile<false, false>(s[0], q + c * 4096, k + c * (S::TILE * 64), i);
    }
    wmma_lds_end();
}
template <int D>
DEV void attend_tiles_multiply_v(attend_tiles_state<D> &c,
                                 const frag_rows (&p)[attend_tiles_shape<D>::N], const f16 *v) {
    typedef attend_tiles_shape<D> S;
#pragma unroll
    for (int i = 0; i < S::N; i++) wmma_tile_rows<S::TILE>(c.o[0], p[i], v, i);
    wmma_lds_end();
}
// P, from its weights in s.
template <int D>
DEV void attend_tiles_operand(frag_rows (&p)[attend_tiles_shape<D>::N],
                              const frag_c (&s)[1][attend_tiles_shape<D>::N]) {
#pragma unroll
    for (int i = 0; i < attend_tiles_shape<D>::N; i++) p[i] = frag_rows_of(s[0][i]);
}
// O times the factors of its rows.
template <int D>
DEV void attend_tiles_scale(attend_tiles_state<D> &c, const float (&keep)[FRAG_ROW_SLOTS]) {
#pragma unroll
    for (int i = 0; i < 8 * (D / 16); i++) c.o[0][i / 8].v[i % 8] *= keep[frag_row_slot(i % 8)];
}

template <int D> DEV void attend_tiles(const rocq_k_attention_args &a) {
    typedef attend_tiles_shape<D> S;
    LDS_GRANTED(u32x4, lds, ROCQ_K_ATTEND_LDS_BYTES(D, 256) / 16);
    if (a.n_splits == 0) return;
    const int group = matmul_wave() / 4, columns = ROCQ_K_ATTEND_LDS_COLUMNS((int)n_threads());
    const attend_task t = attend_task_of(a, (int)(block_index() + a.common.block0), columns);
    const attend_run run = attend_run_of(a, t, columns, S::TILE);
    if (t.split >= run.n_runs) return;
    const int n = run.end > run.begin ? (run.end - run.begin + S::TILE - 1) / S::TILE : 0;
    f16 *const q_tiles = (f16 *)lds, *const k_tiles = q_tiles + columns * D,
        *const v_tiles = k_tiles + 2 * S::KV;
    const attend_rows k = attend_rows_of(a.k, row_of(a.k, t.kv_head, 0, t.seq), a.k.stride[1],
                                         a.head_dim);
    const attend_rows v = attend_rows_of(a.v, row_of(a.v, t.kv_head, 0, t.seq), a.v.stride[1],
                                         a.head_dim);
    const auto load = [&](int i) { // K and V of tile 0, of tile 1, and so on
        if (i / 2 < n) {
            attend_rows from = k;
            if (i % 2) from = v;
            attend_tiles_stage<D>((i % 2 ? v_tiles : k_tiles) + i / 2 % 2 * S::KV, from,
                                  run.begin + i / 2 * S::TILE, run.end);
        }
        copies_close();
    };
#pragma unroll 1
    for (int i = 0; i < 3; i++) load(i);
    if (a.q.format == ROCQ_F32) attend_tiles_stage_q<D, ATTEND_F32>(q_tiles, a, t);
    else attend_tiles_stage_q<D, ATTEND_WIDE>(q_tiles, a, t);

    attend_tiles_state<D> state;
    attend_tiles_begin(state, a, run, t.column0 + group * 64 + matmul_wave() % 4 * 16);
    const attend_score score = attend_score_of(a);
    const f16 *const own_q = q_tiles + group * (64 * D);
    frag_c s[1][S::N];
    frag_rows p[S::N];
    const auto multiply_k = [&](int tile) {
        attend_tiles_multiply_k<D>(s, own_q, k_tiles + tile % 2 * S::KV);
    };
    const auto multiply_v = [&](int tile) {
        attend_tiles_multiply_v<D>(state, p, v_tiles + tile % 2 * S::KV);
    };
    const auto arrived = [&]() {
        lds_written();
        block_sync_lds();
    };
    float keep[FRAG_ROW_SLOTS];
    if (n > 0) {
        copies_wait<2>(); // K is there, V and the next K are under way
        arrived();
        multiply_k(0);
        wmma_lds_wait();
        attend_tiles_held(s[0]);
        attend_tiles_weigh<D>(state, s, keep, score, run.begin);
        attend_tiles_operand<D>(p, s);
#pragma unroll 1
        for (int tile = 0; tile + 1 < n; tile++) {
            copies_wait<0>();
            arrived();
            multiply_k(tile + 1);
            multiply_v(tile);
#pragma unroll 1
            for (int i = 0; i < 2; i++) load(2 * tile + 3 + i);
            wmma_lds_wait<1>();
            attend_tiles_held(s[0]);
            const bool moves =
                attend_tiles_weigh<D>(state, s, keep, score, run.begin + (tile + 1) * S::TILE);
            attend_tiles_held(s[0]);
            wmma_lds_wait();
            attend_tiles_held(state.o[0]);
            if (moves) attend_tiles_scale<D>(state, keep);
            attend_tiles_operand<D>(p, s);
        }
        copies_wait<0>();
        arrived();
        wmma_lds_begin();
        multiply_v(n - 1);
        wmma_lds_wait();
        attend_tiles_held(state.o[0]);
    }
    copies_wait<0>();
    block_sync_lds();
    attend_tiles_finish<D>(a, t, state, run.n_runs, columns, lds);
}
#define ROCQ_X(X, d)                                                \
    KERNEL_WAVES(attention_lds_##d, rocq_k_attention_args, 256, 2) { \
        if constexpr (WMMA_TILES) attend_tiles<d>(a);               \
    }
ROCQ_K_ATTEND_LDS_DIMS(ROCQ_X, unused)
#undef ROCQ_X

// LDS of attend_wide_tiles: chunks of 64 elements of Q, K and V, then P of each group.
template <int D> struct attend_wide_tiles_shape {
    enum { TILE = 64, CHUNKS = D / 64, CHUNK = 64 * 64, HALF = D / 2, TILES = 3 * CHUNKS + 2 };
    static_assert(TILES * CHUNK * 2 == ROCQ_K_ATTENTION_LDS_BYTES, "what a launch asks for");
    static_assert(8 * 16 * (HALF + 8) * 4 + TILE * 8 <= ROCQ_K_ATTENTION_LDS_BYTES, "results");
};
// What a wave has of its 16 queries, as in attend_state.
template <int D> struct attend_wide_tiles_state {
    frag_c o[1][attend_wide_tiles_shape<D>::HALF / 16];
    float m[FRAG_ROW_SLOTS], l[FRAG_ROW_SLOTS];
};
// As attend_weigh, for a tile whose positions are from `first` on; those from n on do not exist.
// The group's P goes to p_tile.
template <int D>
DEV void attend_wide_tiles_weigh(attend_wide_tiles_state<D> &c,
                                 frag_c (&s)[1][attend_wide_tiles_shape<D>::TILE / 16],
                                 float factor, int first, int n, f16 *p_tile) {
    typedef attend_wide_tiles_shape<D> S;
    float top[FRAG_ROW_SLOTS];
    bool moves = false;
#pragma unroll
    for (int i = 0; i < FRAG_ROW_SLOTS; i++) top[i] = -INFINITY;
#pragma unroll
    for (int i = 0; i < 8 * (S::TILE / 16); i++) {
        float &x = s[0][i / 8].v[i % 8];
        if (first + S::TILE > n && first + 16 * (i / 8) + frag_col(i % 8) >= n) x = -INFINITY;
        top[frag_row_slot(i % 8)] = fmaxf(top[frag_row_slot(i % 8)], x);
    }
#pragma unroll
    for (int i = 0; i < FRAG_ROW_SLOTS; i++) {
        top[i] = frag_row_max(top[i]) * factor;
        moves = moves || top[i] > c.m[i] + 8.0f;
    }
    if (wave_ballot(moves) != 0) {
#pragma unroll
        for (int i = 0; i < FRAG_ROW_SLOTS; i++) {
            const float to = top[i] > c.m[i] + 8.0f ? top[i] : c.m[i];
            top[i] = attend_keep(c.m[i], to);
            c.l[i] *= top[i];
            c.m[i] = to;
        }
#pragma unroll
        for (int i = 0; i < 8 * (S::HALF / 16); i++)
            c.o[0][i / 8].v[i % 8] *= top[frag_row_slot(i % 8)];
    }
#pragma unroll
    for (int i = 0; i < S::TILE / 16; i++) {
#pragma unroll
        for (int v = 0; v < 8; v++) {
            float &x = s[0][i].v[v];
            const float base = c.m[frag_row_slot(v)];
            x = exp2_fast(fmaf(x, factor, base == -INFINITY ? 0.0f : -base));
            c.l[frag_row_slot(v)] += x;
        }
        frag_put_halves(s[0][i], [&](int row, int col) {
            row += matmul_wave() % 4 * 16;
            return p_tile + row * 64 + ((2 * i + col / 8) ^ (row & 7)) * 8 + col % 8;
        });
    }
}

// Divides the sums of the block's queries by l and stores them.
template <int D>
DEV void attend_wide_tiles_finish(const rocq_k_attention_args &a, const attend_task &t,
                                  const attend_wide_tiles_state<D> &c, int n_there, float *lds) {
    typedef attend_wide_tiles_shape<D> S;
    const int wave = matmul_wave();
    float *const m_l = lds + 8 * 16 * (S::HALF + 8);
#pragma unroll
    for (int i = 0; i < FRAG_ROW_SLOTS; i++) {
        const float sum = frag_row_sum(c.l[i]);
        if (wave < 4) { // the other group has the same
            lput((u32x2 *)m_l + wave * 16 + frag_slot_row(i),
                 make2(bits<uint32_t>(c.m[i]), bits<uint32_t>(sum)));
        }
    }
    block_sync_lds();
    lds_finish<S::HALF>(c.o[0], lds, [](int, int) { return lds_loaded(); },
                        [&](int row, int col, const lds_loaded &, float (&x)[4]) {
        const int query = row % S::TILE;
        const u32x2 of = lget((const u32x2 *)m_l + query);
        attend_put_out(a, t, t.column0 + query, row / S::TILE * S::HALF + col, query < n_there,
                       bits<float>(of.x), bits<float>(of.y), x);
    });
}

// Prefill of D = 512 where four waves multiply straight from LDS (WMMA_TILES), without what
// rocq__attention_lds_wide excludes: two groups of four waves for 64 queries, in KV tiles of 64
// positions. Here rows are queries:
//   S = Q K^T   [query][position]: both groups compute all of it, so that none waits for the other
//   O += P V    [query][d]: P goes through LDS; each group has half of O
// K of the next tile is copied while P and O are computed, V of the next while S is.
template <int D> DEV void attend_wide_tiles(const rocq_k_attention_args &a) {
    typedef attend_wide_tiles_shape<D> S;
    static_assert(S::TILE == attend_prefill_shape<D>::COLUMNS, "the host cuts columns so");
    enum { TILE = S::TILE, CHUNKS = S::CHUNKS, CHUNK = S::CHUNK };
    LDS_GRANTED(u32x4, lds, ROCQ_K_ATTENTION_LDS_BYTES / 16);
    if (a.n_splits == 0) return;
    const int group = matmul_wave() / 4, n = a.n_kv;
    const attend_task t =
        attend_task_of<attend_prefill_shape<D>>(a, (int)(block_index() + a.common.block0));
    const int n_there = min(a.n_q - t.column0, (int)TILE);
    f16 *const q_tile = (f16 *)lds, *const k_tile = q_tile + CHUNKS * CHUNK,
        *const v_tile = k_tile + CHUNKS * CHUNK, *const p_tile = v_tile + (CHUNKS + group) * CHUNK;
    const auto load = [&](const rocq_k_tensor &from, int first, int there, f16 *to) {
        const lds_operand rows = {row_of(from, t.kv_head, first, t.seq), from.stride[1], there};
        for (int c = 0; c < CHUNKS; c++)
            lds_load<false, TILE, 256>(rows, 64 * c, D, to + c * CHUNK);
    };
    const auto load_k = [&](int first) {
        if (first < n) load(a.k, first, n - first, k_tile);
        copies_close();
    };
    const auto load_v = [&](int first) {
        const lds_operand rows = {row_of(a.v, t.kv_head, 0, t.seq), a.v.stride[1], D};
        if (first < n) lds_load<true, D, 256>(rows, first, n, v_tile);
        copies_close();
    };
    load(a.q, t.column0, n_there, q_tile);
    load_k(0);
    load_v(0);
    const float factor = attend_score_of(a).factor;
    attend_wide_tiles_state<D> state;
    matmul_clear(state.o);
#pragma unroll
    for (int i = 0; i < FRAG_ROW_SLOTS; i++) {
        state.m[i] = -INFINITY;
        state.l[i] = 0.0f;
    }
#pragma unroll 1
    for (int first = 0; first < n; first += TILE) {
        copies_wait<1>(); // Q and K are there, V is under way
        lds_written();
        block_sync_lds();
        frag_c s[1][TILE / 16];
        matmul_clear(s);
        wmma_lds_begin();
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                wmma_tile<false, false>(s[0], q_tile + c * CHUNK, k_tile + c * CHUNK, i);
        }
        wmma_lds_end();
        wmma_lds_wait();
        block_sync_lds();
        load_k(first + TILE);

        attend_wide_tiles_weigh<D>(state, s, factor, first, n, p_tile);
        copies_wait<1>(); // V is there, K of the next tile is under way
        lds_written();
        block_sync_lds();
        wmma_lds_begin();
#pragma unroll
        for (int i = 0; i < 4; i++)
            wmma_tile<false, true>(state.o[0], p_tile, v_tile + group * (CHUNKS / 2 * CHUNK), i);
        wmma_lds_end();
        wmma_lds_wait();
        block_sync_lds();
        load_v(first + TILE);
    }
    copies_wait<0>();
    attend_wide_tiles_finish<D>(a, t, state, n_there, (float *)lds);
}
KERNEL_WAVES(attention_lds_512, rocq_k_attention_args, 256, 2) {
    if constexpr (WMMA_TILES) attend_wide_tiles<512>(a);
}

#define ROCQ_X(X, d) \
    KERNEL(attention_step_##d, rocq_k_attention_args, 128) { attend_step<d>(a); }
ROCQ_K_STEP_DIMS(ROCQ_X, unused)
#undef ROCQ_X
#define ROCQ_X(X, d)                                                                    \
    KERNEL_WAVES(attention_group_##d, rocq_k_attention_args, ROCQ_K_GROUP_THREADS, 2) { \
        if constexpr (WMMA_TILES) attend_group<d>(a);                                   \
    }
ROCQ_K_ATTEND_LDS_DIMS(ROCQ_X, unused)
#undef ROCQ_X

// ---------------------------------------------------------------------------------------------
// >>ops: in the order of ROCQ_OPS
// ---------------------------------------------------------------------------------------------
// A lane works on quads (see >>quantize).

// The indices in dimensions 1 to 3 of row number r of t.
struct place { uint32_t i1, i2, i3; };
DEV place place_of(const rocq_k_tensor &t, uint32_t r) {
    if ((t.ne[2] | t.ne[3]) == 1) return {r, 0, 0}; // the divisions take longer than a load
    const uint32_t ne1 = (uint32_t)t.ne[1], ne2 = (uint32_t)t.ne[2];
    const uint32_t plane = r / ne1, i3 = plane / ne2;
    return {r - plane * ne1, plane - i3 * ne2, i3};
}

// Whether rows of so many bytes follow each other without gaps; in planar tensors they always do.
DEV bool is_packed_as(const rocq_k_tensor &t, int64_t row) {
    return (t.ne[1] == 1 || t.stride[0] == row) && (t.ne[2] == 1 || t.stride[1] == row * t.ne[1]) &&
           (t.ne[3] == 1 || t.stride[2] == row * t.ne[1] * t.ne[2]);
}
DEV bool is_packed(const rocq_k_tensor &t) {
    const int64_t row = (int64_t)(t.ne[0] / format_elems(t.format)) * format_bytes(t.format);
    return t.layout == ROCQ_LAYOUT_PLANAR || is_packed_as(t, row);
}

// Kernels that give a row to a block take it in tiles of Q quads a thread; quad j of thread t is
// quad j * n_threads() + t of the tile. A row of no more than one tile stays in registers from the
// first pass over it to the last; TILE_QUADS is chosen for that.
enum { TILE_QUADS = 8 };
DEV int tile_at(int base, int j) { return base + 4 * (j * (int)n_threads() + (int)thread_index()); }
DEV int tile_size(int quads) { return 4 * quads * (int)n_threads(); }

// How many quads of a tile at least one lane has, and whether all lanes have all of quad j. Both
// are uniform.
DEV int tile_quads(int n, int base) {
    const int step = 4 * (int)n_threads();
    return (n - base + step - 1) / step;
}
DEV bool is_full(int n, int base, int j) { return base + 4 * (j + 1) * (int)n_threads() <= n; }

// Loads a tile, elements base and up of a row of n in F32 or F16. Past the row's end v is 0; quads
// that no lane has are left as they are. All loads are issued before the first one is used. Lanes
// past the end load element 0, so that no lane branches.
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
// mean is rounded, which matters where it is large compared with the spread of x; rest corrects
// that.
//
//   x     F32 or F16 [K, rows], any strides     weight, bias  F32 [K], either may be absent
//   y     F32, F16, Q8_0 raw or planar, x's shape; may be x when their formats are equal
//   mean, rstd  F32 [rows], written where present
//
// A block takes a row and thread t its quads t, t + threads, ...; so a unit, for whose scale a
// quantized y needs all elements, is in 8 neighbouring lanes.
// Geometry: a block a row of the one or two norms, 32 to 512 threads as the host chooses. LDS: 384
// bytes.
// Bytes: x and weight once if K <= 16 * threads (8192 with 512): then they stay in registers, and
// all loads are issued before one is used, as the one row of a decode step is bound by latency.
// Else x once per pass, of which there are three with center and two without. y once. Sums are F32
// in a fixed order: a lane's own elements, then a tree over the lanes, then one over the waves.
enum { NORM_QUADS = 4 }; // of a tile
KERNEL(norm, rocq_k_norm_args, 512) {
    LDS(float, work, 3 * BLOCK_WORK);
    if (a.of[0].x.ne[0] == 0) return;
    const uint32_t block = a.common.block0 + block_index(), other = block < a.n_first ? 0 : 1;
    const uint32_t r = other ? block - a.n_first : block;
    const rocq_k_norm_rows &rows = a.of[other];
    const place at = place_of(rows.x, r);
    const char *x_row = row_of(rows.x, at.i1, at.i2, at.i3);
    char *y_row = row_of(rows.y, at.i1, at.i2, at.i3);
    const int n = rows.x.ne[0], tile = tile_size(NORM_QUADS);
    const bool whole = n <= tile, x_wide = is_wide(rows.x), y_wide = is_wide(rows.y);
    const bool w_wide = (((uintptr_t)rows.weight | (uintptr_t)a.bias) & 15u) == 0 && (n & 3) == 0;
    const float share = 1.0f / (float)n;
    float v[NORM_QUADS][4], w[NORM_QUADS][4], mean = 0.0f, rest = 0.0f, rstd = 0.0f;
    const int first = a.center ? 0 : 1;
    for (int pass = first; pass < 3; pass++) { // 0 mean, 1 rest and rstd, 2 y
        float sum = 0.0f, square = 0.0f;
        for (int base = 0; base < n; base += tile) {
            if (rows.weight && pass == (whole ? first : 2)) {
                load_tile(ROCQ_F32, w_wide, (const char *)rows.weight, n, base, w);
            }
            if (!whole || pass == first) load_tile(rows.x.format, x_wide, x_row, n, base, v);
            if (pass == 2) {
                // Not unrolled, to keep the code small: the quads are shifted down, so that quad j
                // is always in v[0] and w[0].
#pragma unroll 1
                for (int j = 0; j < NORM_QUADS && j < tile_quads(n, base); j++) {
                    const int k = tile_at(base, j), count = quad_count(n, k);
                    float b[4], y[4];
                    if (a.bias) get4(ROCQ_F32, (const char *)a.bias, w_wide, k, count, b);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        y[e] = ((v[0][e] - mean) - rest) * rstd;
                        if (rows.weight) y[e] *= w[0][e];
                        if (a.bias) y[e] += b[e];
                    }
                    put4(rows.y, y_wide, y_row, r, k, count, y);
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
            square = block_sum(square, work + 2 * BLOCK_WORK);
            rstd = norm_rstd(square, share, fmaf(-rest, rest, a.eps));
        }
    }
    if (thread_index() == 0) {
        if (a.mean.data) gstore((float *)row_of(a.mean, at.i2, at.i3, 0) + at.i1, mean + rest);
        if (a.rstd.data) gstore((float *)row_of(a.rstd, at.i2, at.i3, 0) + at.i1, rstd);
    }
}

// -- rope, rope_append --

// Up to three streams in one launch: q is rotated in place by pos[t] (see >>quantize), k is rotated
// and stored in the KV cache, and v is stored there.
//
//   x     F32 or F16 [D, heads, tokens], any strides
//   y     F32 F16 BF16, raw Q8_0 Q4_0 [D, heads, cells or tokens], any strides; may be x. Elements
//         from n_dims on are copied; n_dims <= 512
//   cell  the row of y for token t, where to_cell is set. A cell out of range stores nothing and
//         sets a bit of the status
//
// Geometry: 256 threads. With Q = ceil(D / 4) quads a head, a block takes heads = max(1, 256 / Q)
// heads of one stream and token. A stream has slices = ceil(its heads / heads) blocks a token; S is
// the sum over all streams. Block b is slice b % S of token b / S, and there are tokens * S blocks.
// A thread takes a quad of a head, so a unit is in 8 neighbouring lanes. Heads of more than 1024
// elements take several rounds.
// The angles of a token are computed once in a block and shared by its heads in 2 KB of LDS. A
// decode step's launch is bound by latency, so the angles and the loads of pos, cell and x
// do not depend on each other.
// x may be y, and with NEOX the elements of a pair are loaded by two lanes, which are of two waves
// unless a head's quads divide 32. Therefore all loads of rotated elements, which are in the first
// round, are done before the barrier, and all stores come after it. That takes block_sync: on gfx11
// the waves of a block have two L0 caches, and one wave's store may overtake another one's load.
// Bytes: x and y once. Angles take a thread some 12 operations in double, at 1/32 of F32's rate,
// which cost less than the loads.
KERNEL(rope, rocq_k_rope_args, 256) {
    LDS(float, cosine, 256);
    LDS(float, sine, 256);
    if (a.n_streams == 0) return;
    const rocq_k_rotation &r = a.rotation;
    const int quads = (r.head_dim + 3) / 4, t = (int)thread_index();
    const uint32_t b = a.common.block0 + block_index();
    const uint32_t token = b < a.slices ? 0 : b / a.slices;
    uint32_t slice = b - token * a.slices;
    int s = 0;
    for (; s + 1 < a.n_streams && slice >= a.stream[s].slices; s++) slice -= a.stream[s].slices;
    const rocq_k_rope_stream &stream = a.stream[s];
    const int position = gload(r.pos + token);
    const int cell = stream.to_cell ? gload(r.cell + token) : 0;

    const int local = quads < 256 ? t / quads : 0, head = (int)slice * a.heads + local;
    const bool live = local < a.heads && head < stream.x.ne[1], x_wide = is_wide(stream.x);
    const char *x_row = row_of(stream.x, live ? head : 0, token, 0);
    const int k = 4 * (t - local * quads);
    rotation_quad q = rotation_load(r, stream.x.format, x_row, x_wide, k, live, stream.plain);
    if (!stream.plain && t < r.n_dims / 2) rotation_angle(r, position, t, sine, cosine);
    block_sync();

    const bool stored = !stream.to_cell || (cell >= 0 && cell < r.n_cells);
    const int64_t to = !stream.to_cell ? token : stored ? cell : 0;
    char *y_row = row_of(stream.y, live ? head : 0, to, 0);
    const bool y_wide = is_wide(stream.y);
    if (!stored && t == 0) atomic_or(a.common.status, ROCQ_K_BAD_CELL);
    for (int first = 0;;) {
        float y[4];
        rotation_apply(r, q, sine, cosine, y);
        if (stream.y.layout == ROCQ_LAYOUT_HADAMARD) hadamard(y, r.head_dim);
        put4(stream.y, y_wide, y_row, 0, q.k, stored ? q.count : 0, y);
        first += 256;
        if (first >= quads) break;
        q = rotation_load(r, stream.x.format, x_row, x_wide, k + 4 * first, live, stream.plain);
    }
}

// -- activate, glu, add, mul, scale, cast --

DEV int64_t row_bytes_of(const rocq_k_tensor &t) {
    return (int64_t)(t.ne[0] / format_elems(t.format)) * format_bytes(t.format);
}
// Copies the 16 bytes at byte k of a row of n bytes, or those of them that exist.
template <typename T> DEV void copy_16(char *to, const char *from, int64_t k, int64_t n) {
    const int each = (int)sizeof(T);
#pragma unroll
    for (int e = 0; e < 16 / each; e++) {
        if (k + e * each < n) gstore((T *)(to + k) + e, gload((const T *)(from + k) + e));
    }
}

// y = activation(a), activation(a) b, a + b, a b, activation(a) scale + bias or a, by op. A cast to
// a's own format and layout copies bytes, of blocks and I32 too. A cast into or out of
// ROCQ_LAYOUT_HADAMARD multiplies rows by H; out of it, a is the cache's rows decoded to floats.
//
//   a, b  F32, F16 or BF16; b is repeated where its size is 1, along a row too; any strides
//   y     F32 F16 BF16, Q8_0 raw or planar, Q4_0 raw, a's shape; may be a or b of the same format
//
// This is also what turns activations into the planar Q8_0 or the F16 that a product takes.
// Geometry: 256 threads. A thread takes a quad, of which a row has ceil(ne0 / 4); in a copy it
// takes a chunk of 16 bytes, of which a row has ceil(bytes / 16). They are counted through all
// rows, and there must be fewer than 2^32. A unit of a quantized y is the quads of 8 neighbouring
// lanes; three exchanges between lanes give its largest magnitude.
// Bytes: a, b and y once, 16 a lane on wide rows, neighbouring lanes side by side.
KERNEL(map, rocq_k_map_args, 256) {
    if (a.y.ne[0] == 0) return;
    const uint32_t at = (a.common.block0 + block_index()) * 256 + thread_index();
    const uint32_t rows = rows_of(a.y);
    if (a.op == ROCQ_OP_CAST && a.y.format == a.a.format && a.y.layout == a.a.layout) {
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
    // Most products in F16 convert their x so: with little code, since most of such a launch's time
    // is fetching that.
    if (a.op == ROCQ_OP_CAST && a.y.format == ROCQ_F16 && a.a.format == ROCQ_F32 &&
        a.y.layout == a.a.layout && is_packed_as(a.y, 2 * (int64_t)a.y.ne[0]) &&
        is_packed_as(a.a, 4 * (int64_t)a.y.ne[0]) &&
        ((alignment_bits(a.y) | alignment_bits(a.a) | (uint64_t)a.y.ne[0]) & 7) == 0) {
        if (at >= (uint32_t)a.y.ne[0] / 4 * rows) return;
        const u32x4 v = gload((const u32x4 *)a.a.data + at);
        const f16x2 low = pair_floats(bits<float>(v.x), bits<float>(v.y));
        const f16x2 high = pair_floats(bits<float>(v.z), bits<float>(v.w));
        gstore((u32x2 *)a.y.data + at, make2(bits<uint32_t>(low), bits<uint32_t>(high)));
        return;
    }
    // The general computation of an address takes more of the ALU's time than all the rest. So
    // tensors without gaps are treated as one long row, and with two dimensions one product gives
    // the row.
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
    activate4(a.activation, v); // none but for activate, glu and scale
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
    if ((a.y.layout == ROCQ_LAYOUT_HADAMARD) != (a.a.layout == ROCQ_LAYOUT_HADAMARD)) {
        hadamard(v, a.y.ne[0]);
    }
    put4(a.y, is_wide(a.y), y_row, r, k, count, v);
}

// -- softmax --
// Per row of K: y = exp(s - max s) / (sum of that), s = x scale + mask. A mask of -inf hides x,
// whatever it is. A row in which all of s is -inf becomes 0. One NaN makes its whole row NaN.
//
//   x, y  F32 [K, rows], any strides; y may be x
//   mask  F32 or F16, x's shape or 1 in dimensions 1 to 3, where it is repeated; may be absent
//
// A block takes a row and thread t its quads t, t + threads, ... Geometry: a block a row, 32 to 256
// threads as the host chooses. LDS: 256 bytes.
// Bytes: x and mask once if K <= 32 * threads (8192 with 256), as they stay in registers then; else
// three times.
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
    for (int pass = 0; pass < 3; pass++) { // 0 largest, 1 sum, 2 y
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
                        top = fmaxf(top, v[j][e]); // a NaN leaves top as it is
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

// The values of word i of unit `unit` of a planar tensor of n_units units. i differs between lanes,
// so the word is selected: an array whose index is not a constant would be in memory. Levels are
// looked up after that, for one word instead of eight.
template <int F>
DEV void planar_values(const void *x, int64_t n_units, int64_t unit, int i, float v[4]) {
    const raw<F> r = load_raw<F>(planes_of<F>(x, n_units), unit);
    uint32_t q;
    if constexpr (has_levels<F>()) {
        const uint32_t low = i & 1 ? r.n.y : r.n.x, high = i & 1 ? r.n.w : r.n.z;
        const u32x2 levels = levels_of<F>(i & 2 ? high : low);
        q = i < 4 ? levels.x : levels.y;
    } else {
        q = decode_code<F>(r, 0);
#pragma unroll
        for (int w = 1; w < 8; w++) q = i == w ? decode_code<F>(r, w) : q;
    }
    decode_quad<F>(q, decode_factors<F>(r, unit), i, v);
}

// y[., r] = x[., ids ? ids[r] : r] scale, decoded: embedding rows, and cast from every format.
//
//   x  any format, raw at any strides or planar; I32, which is copied
//   y  F32, F16 or BF16 (I32 when x is), any strides
//   ids  I32 [rows of y] or absent; x then has 2 dimensions. One out of range gives a row of zeros
//      and sets a bit of the status
//
// Geometry: 256 threads. A thread takes a quad of y, of which a row has ceil(ne0 / 4), counted
// through all rows; there must be fewer than 2^32. Neighbouring lanes write neighbouring quads, so
// stores are contiguous, 16 bytes a lane (F16: 8). The 8 lanes of a unit load the same scale and,
// of a planar tensor, the same codes, which is one request of the wave. Each lane decodes the whole
// unit, which the stores hide: in F32 they are 4 bytes for each weight. With scale 1 the result has
// the bits of rocq_dequantize.
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
        } else if (shared_format(a.x.format) == READ) { // contiguous rows, if planar
            read_values(x_row, a.x.format, k, v);
        } else if (a.x.layout == ROCQ_LAYOUT_PLANAR) {
            const int64_t per_row = a.x.ne[0] / 32, n_units = per_row * rows_of(a.x);
            const int64_t unit = row * per_row + k / 32;
            switch (a.x.format) {
#define ROCQ_X(X, f)                                                                           \
    case ROCQ_K_ID_##f:                                                                        \
        planar_values<ROCQ_K_ID_##f>(a.x.data, n_units, unit, (int)(k >> 2) & 7, v);           \
        break;
                PLANE_FORMATS(ROCQ_X, )
#undef ROCQ_X
            default: break;
            }
        } else {
            switch (a.x.format) {
#define ROCQ_X(X, f) case ROCQ_K_ID_##f: gguf_values<ROCQ_K_ID_##f>(x_row, k, v); break;
                PLANE_FORMATS(ROCQ_X, )
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
// The best of a block. xs and is have room for one a wave, and are free again afterwards.
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

// index[r] = the first k for which x[k, r] is the largest of row r. NaN is never the largest; a row
// of NaN alone gives 0.
//
//   x  F32 [K, rows], any strides; index: I32 [rows]
//
// A block takes a row and thread t its quads t, t + threads, ..., with four loads of 16 bytes in
// flight.
// Geometry: a block a row, 32 to 1024 threads as the host chooses, 1024 for a vocabulary. LDS: 8
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
// Draws a token from logits [n_vocab], with all of rocq_sample_params. Tokens that `allowed`
// excludes drop out, and penalties are applied by the counts in recent (an id out of range is left
// out and sets a bit of the status). If temperature is 0, the best token is the result; otherwise
// top_k, top_p and min_p filter the softmax of what is left, and a token is drawn at the
// temperature. Writes the token and, if asked for, its probability; if no token is left, -1 and a
// bit of the status.
//
// Each filter keeps the front part of the order "higher logit first, then lower token", and the
// draw goes through the tokens in their order. So all three are the same task, a step: add up
// masses in an order and find the place where the sum reaches a target. The mass of a candidate is
// 1 (top_k) or its weight in fixed point, in units of 2^-(62 - bits of a token). Sums of integers
// do not depend on their order, so the token depends on nothing but the arguments.
//
// A step is done in one of two ways:
//   list    Up to 1024 candidates are sorted, one a thread, and a scan over the threads adds up
//           masses.
//   digits  More candidates are not sorted. Their places in the order are numbers (sample_rank, or
//           the token), and a radix search finds the number at which the target is reached,
//           digit by digit from the top: a pass over the logits adds the masses up in 2048 bins,
//           one for each value of the next digit. After each digit of a filter all candidates
//           behind that bin are out (`cut`). As soon as all candidates that are left fit a list,
//           the step goes on with that list. If only those of the bin fit one, a list of them
//           gives the exact place. A draw ends when 1024 tokens are left, one a thread.
// To get to a list at once: if k threads' own best candidates are at or before a rank, then so are
// at least k candidates, and for a usual top_k not many more. The k-th of the threads' best is the
// first cut.
//
// Geometry: one block of 1024 threads; thread t takes the quads t, t + 1024, ... LDS 25 KB. work:
// n_vocab floats, 16-byte aligned, used with recent or allowed; while recent is counted they are
// the counts.
// Bytes: logits once, and for a usual top_k once more from the second-level cache. Otherwise each
// filter reads them once a digit, usually one, and once for its list, and the draw reads them once.

enum {
    SAMPLE_BITS = 11,   // of the digit that a pass finds
    SAMPLE_BINS = 1 << SAMPLE_BITS,
    SAMPLE_LIST = 1024, // candidates of a list: one a thread
    SAMPLE_QUADS = 4,   // of a tile of logits
    SAMPLE_NEAR = 26,   // a filter's first digit: logits less than 2^26 floats from the best one
    SAMPLE_TOP_K = 0, SAMPLE_TOP_P, SAMPLE_DRAW, // the steps
    SAMPLE_BY_RANK = 0, SAMPLE_BY_TOKEN,         // orders: of TOP_K and TOP_P, and of DRAW
    SAMPLE_UNSORTED
};

struct sample_state {
    const float *logits; // a token that is no candidate has -inf or NaN
    bool wide;           // as in load_tile
    int n, width;        // tokens, and the bits that the number of one takes
    float top;           // the largest logit
    uint32_t best;       // its place among all floats: sample_order
    uint64_t cut;        // candidates of a greater rank have dropped out
    float unit;          // a weight of 1 in fixed point
    float temperature, min_p;
};

struct sample_work { // LDS
    unsigned long long *mass;      // [SAMPLE_BINS] of the bins; of a list the keys, while it is
                                   // sorted
    uint32_t *count;               // [SAMPLE_BINS] candidates in the bins
    unsigned long long *wave_mass; // [32] masses of the waves
    uint32_t *wave_count;          // [32] candidates of the waves
    uint32_t *listed;              // [1] candidates of the list
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

// Exclusive scans: the sum of x over the lanes (wave_scan), or the 1024 threads (block_scan),
// before this one. total: the sum over all of them.
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

// Sorts the keys of 1024 threads, one each, in ascending order. size, a power of two: only the
// first size keys are sorted, as none of the others is less. work: LDS [2048]. A bitonic sort: it
// makes sorted runs of `run` keys, every other one descending, from pairs of runs of half the
// length. Keys that are compared are `apart`: they meet in LDS or, within a wave, by exchanges
// between lanes.
DEV uint64_t sort_keep(uint64_t own, uint64_t other, int apart, int run) {
    const int t = (int)thread_index();
    const bool least = ((t & apart) == 0) == ((t & run) == 0);
    return (other < own) == least ? other : own;
}
DEV uint64_t block_sort(uint64_t key, int size, unsigned long long *work) {
    const int t = (int)thread_index();
    int side = 0; // of the two buffers that take turns, so that one barrier a comparison is enough
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

// The place of a logit among all floats, from the greatest down: its bits, changed to ascend where
// logits descend.
DEV uint32_t sample_order(float logit) {
    const uint32_t u = bits<uint32_t>(logit + 0.0f); // -0 is 0
    return u & 0x80000000u ? u : u ^ 0x7fffffffu;
}
// The place in the order "higher logit first, then lower token" as a number: how many floats the
// logit is from the best one, then the token. ~0 stands for no candidate.
DEV uint64_t sample_rank(const sample_state &s, float logit, uint32_t token) {
    return (uint64_t)(sample_order(logit) - s.best) << s.width | token;
}
DEV float sample_logit(const sample_state &s, uint64_t rank) {
    const uint32_t order = s.best + (uint32_t)(rank >> s.width);
    return bits<float>(order & 0x80000000u ? order : order ^ 0x7fffffffu);
}
// exp((logit - top) / temperature), 1 for the top itself even where that is infinite.
DEV float sample_weight(const sample_state &s, float logit, float temperature) {
    return logit == s.top ? 1.0f : exp_full((logit - s.top) / temperature);
}
// The mass of a candidate in a step.
DEV uint64_t sample_mass(const sample_state &s, int step, float logit) {
    if (step == SAMPLE_TOP_K) return 1;
    if (step == SAMPLE_DRAW && s.min_p > 0.0f && sample_weight(s, logit, 1.0f) < s.min_p) return 0;
    const float temperature = step == SAMPLE_DRAW ? s.temperature : 1.0f;
    return (uint64_t)(sample_weight(s, logit, temperature) * s.unit);
}
// The target of a step whose masses have this sum: top_k, at least top_p of the sum, or for the
// draw just above its uniform number times the sum.
DEV uint64_t sample_target(const rocq_k_sample_args &a, int step, uint64_t sum) {
    if (step == SAMPLE_TOP_K) return (uint64_t)a.top_k;
    const double share = step == SAMPLE_TOP_P ? (double)a.top_p
                                             : (double)a.uniform_hi + (double)a.uniform_lo;
    const double at = share * (double)sum;
    const uint64_t target = step == SAMPLE_TOP_P ? (uint64_t)ceil(at) : (uint64_t)at + 1;
    return target < 1 ? 1 : target > sum ? sum : target;
}

DEV void sample_put(const rocq_k_sample_args &a, int token, float prob) {
    gstore(a.token, token);
    if (a.prob) gstore(a.prob, prob);
}

// Goes through the candidates. All lanes of a wave call f(live, logit, token) together; live is
// false for a lane whose token is no candidate. A lane has a quad, whose elements come one after
// the other. Where no lane's quad has a candidate, f is not called.
template <typename F> DEV void sample_each(const sample_state &s, F f) {
    const bool all = s.best + (s.cut >> s.width) >= 0xff800000u; // the order of -inf
    const float least = all ? -INFINITY : sample_logit(s, s.cut);
    for (int base = 0; base < s.n; base += tile_size(SAMPLE_QUADS)) {
        float v[SAMPLE_QUADS][4] = {}; // else old values of quads past the end stay in registers
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

// A list of the candidates: each of the first n threads has one, in ascending order of their keys.
// A key is the rank, or the token followed by the bits of the logit; so both have logit and token.
struct sample_list {
    uint64_t key; // ~0: none
    int n;        // more than SAMPLE_LIST: there are too many for a list
    int order;    // of the keys: BY_RANK or BY_TOKEN; UNSORTED
};
DEV uint64_t sample_key(const sample_state &s, int order, float logit, uint32_t token) {
    if (order == SAMPLE_BY_RANK) return sample_rank(s, logit, token);
    return (uint64_t)token << 32 | bits<uint32_t>(logit);
}
DEV float sample_key_logit(const sample_state &s, int order, uint64_t key) {
    return order == SAMPLE_BY_RANK ? sample_logit(s, key) : bits<float>((uint32_t)key);
}
DEV uint32_t sample_key_token(const sample_state &s, int order, uint64_t key) {
    return order == SAMPLE_BY_RANK ? (uint32_t)key & ((1u << s.width) - 1u) : (uint32_t)(key >> 32);
}

// Tries to list the candidates from a rank to the cut. Their keys are ranks, but unsorted.
DEV void sample_collect(const sample_state &s, const sample_work &work, uint64_t from,
                        sample_list &list) {
    if (thread_index() == 0) lput(work.listed, 0u);
    block_sync_lds();
    sample_each(s, [&](bool live, float logit, uint32_t token) {
        const uint64_t rank = sample_rank(s, logit, token);
        live = live && rank >= from;
        const uint32_t all = wave_ballot(live);
        if (all == 0) return;
        const int lane = lane_index(), first = __ffs((int)all) - 1;
        uint32_t at = 0;
        if (lane == first) at = lds_take(work.listed, (uint32_t)__popc(all));
        at = wave_read(at, first) + (uint32_t)__popc(all & ((1u << lane) - 1u));
        if (live && at < SAMPLE_LIST) lput(work.mass + at, rank);
    });
    block_sync_lds();
    list.n = (int)lget(work.listed);
    list.order = SAMPLE_UNSORTED;
    list.key = (int)thread_index() < list.n ? lget(work.mass + thread_index()) : ~0ull;
    block_sync_lds();
}

// Sorts a list by `order`, if it is not yet. The keys of a list just collected are ranks, so such a
// list has to be sorted BY_RANK first. One that is sorted by the other order gets this order's keys
// here.
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

// Adds masses and candidates to the bins. If all candidates of the wave fall into one bin, which is
// usual where logits are close together, the wave adds them up and does one atomic addition.
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

// The first lane at which front plus the x of the lanes up to it reaches target; 32 if none does.
// front becomes the sum before that lane.
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

// How far the search of a step has come.
struct sample_search {
    uint64_t target;        // 0: not known yet
    uint64_t sum;           // of the masses of all candidates
    uint64_t prefix, front; // the digits found so far, and the masses of the numbers before them
    int shift;              // bits that are left to find
    bool near;              // the next digit is of numbers below 2^shift, but its last bin also has
                            // all others
    uint32_t n_front;       // candidates before the numbers that begin with the digits found so far
    uint32_t n_last;        // candidates whose numbers begin with them
};

// Finds the bin in which the sum reaches the target, which is the next digit. False if target is
// more than the sum of all masses. Each wave adds up 64 bins, two a lane. Then every wave does the
// same search: for the wave whose sums reach the target, the lane there, and the bin.
DEV bool sample_bin(const rocq_k_sample_args &a, const sample_state &s, const sample_work &work,
                    int step, int digit, sample_search &search) {
    const unsigned long long *own = work.mass + 2 * thread_index();
    const uint32_t *own_n = work.count + 2 * thread_index();
    const uint64_t of_wave = wave_sum64(lget(own) + lget(own + 1));
    const uint64_t n_of_wave = wave_sum64(lget(own_n) + lget(own_n + 1));
    if (lane_index() == 0) lput(work.wave_mass + wave_index(), of_wave);
    if (lane_index() == 0) lput(work.wave_count + wave_index(), (uint32_t)n_of_wave);
    block_sync_lds();
    const uint64_t masses = lget(work.wave_mass + lane_index());
    if (search.target == 0) {
        search.sum = wave_sum64(masses);
        search.target = sample_target(a, step, search.sum);
    }
    const int w = wave_reach(masses, search.front, search.target);
    if (w < 32) {
        const int at = 64 * w + 2 * (int)lane_index();
        const uint64_t pair = lget(work.mass + at) + lget(work.mass + at + 1);
        const int l = wave_reach(pair, search.front, search.target);
        uint64_t n = (int)lane_index() < w ? lget(work.wave_count + lane_index()) : 0;
        if ((int)lane_index() < l) n += lget(work.count + at) + lget(work.count + at + 1);
        search.n_front += (uint32_t)wave_sum64(n);
        uint32_t bin = 64u * (uint32_t)w + 2u * (uint32_t)l;
        const uint64_t even = lget(work.mass + bin);
        if (search.front + even < search.target) {
            search.front += even;
            search.n_front += lget(work.count + bin);
            bin++;
        }
        search.n_last = lget(work.count + bin);
        search.prefix = search.prefix << digit | bin;
        search.shift -= digit;
        if (search.near && bin == SAMPLE_BINS - 1) {
            search = {search.target, search.sum, 0, 0, 32 + s.width, false, 0, 0};
        }
        search.near = false;
    }
    block_sync_lds();
    return w < 32;
}

// Adds up the bins of the next digit, then finds the digit (sample_bin).
//
// The place that a filter looks for is usually near the best logit, but a first digit of all floats
// would have most candidates in a few bins. So the first digit of a filter is one of numbers below
// 2^(SAMPLE_NEAR + width) only: of logits down to 1/256 of the best one or, if that is negative, to
// 256 times it. All others go to the last bin. If the place is in that, the search starts anew with
// all floats.
DEV bool sample_digit(const rocq_k_sample_args &a, const sample_state &s, const sample_work &work,
                      int step, sample_search &search) {
    // The last 7 bits of a token are a digit of their own. A wave reads 128 tokens at a time; they
    // have all other bits in common, so their masses go to one bin.
    const int above = search.shift, rest = step == SAMPLE_DRAW && above > 7 ? 7 : 0;
    const int digit = above - rest < SAMPLE_BITS ? above - rest : SAMPLE_BITS;
    const int shift = above - digit;
    for (uint32_t b = thread_index(); b < SAMPLE_BINS; b += 1024) {
        lput(work.mass + b, 0ull);
        lput(work.count + b, 0u);
    }
    block_sync_lds();
    uint64_t quad = 0; // the masses of a quad, if they go to one bin
    // What this thread has for the last bin of a near digit: it is added once, since that bin often
    // gets most candidates.
    uint64_t far = 0;
    uint32_t n_far = 0;
    sample_each(s, [&](bool live, float logit, uint32_t token) {
        const uint64_t rank = step == SAMPLE_DRAW ? token : sample_rank(s, logit, token);
        const uint32_t bin = (uint32_t)(rank >> shift) & ((1u << digit) - 1u);
        const bool other = rank >> above != search.prefix;
        if (other && !search.near) live = false;
        uint64_t own = live ? sample_mass(s, step, logit) : 0;
        if (other) {
            far += own;
            n_far += live ? 1u : 0u;
            live = false;
        }
        if (rest > 0) {
            quad += own;
            if ((token & 3) != 3) return;
            own = quad;
            live = own != 0;
            quad = 0;
        }
        sample_add(work, live, bin, own);
    });
    if (search.near) {
        far = wave_sum64(far);
        n_far = (uint32_t)wave_sum64(n_far);
        if (lane_index() == 0) lds_add(work.mass + SAMPLE_BINS - 1, far);
        if (lane_index() == 0) lds_add(work.count + SAMPLE_BINS - 1, n_far);
    }
    block_sync_lds();
    return sample_bin(a, s, work, step, digit, search);
}

// Finds the place where the target is reached in a list in the step's order. front: the masses of
// all candidates before the list. A filter drops what is behind the place; in DRAW the thread there
// stores its token.
DEV void sample_place(const rocq_k_sample_args &a, const sample_state &s, const sample_work &work,
                      int step, uint64_t front, sample_search &search, sample_list &list) {
    const uint32_t t = thread_index();
    const float logit = sample_key_logit(s, list.order, list.key);
    const uint64_t own = list.key != ~0ull ? sample_mass(s, step, logit) : 0;
    uint64_t sum;
    if (t == 0) lput(work.listed, (uint32_t)list.n);
    const uint64_t before = front + block_scan(own, work.wave_mass, sum);
    if (search.target == 0) {
        search.sum = sum;
        search.target = sample_target(a, step, sum);
    }
    if (before < search.target && before + own >= search.target) { // at most one thread
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

// Finds one digit of a filter. True if the cut is then exact. If not, `list` may now have all
// candidates that are left; otherwise more digits have to be found.
DEV bool sample_narrow(const rocq_k_sample_args &a, sample_state &s, const sample_work &work,
                       int step, sample_search &search, sample_list &list) {
    if (!sample_digit(a, s, work, step, search)) return true;
    if (search.shift == 32 + s.width) return false; // the search starts anew
    const uint64_t first = search.prefix << search.shift;
    const uint64_t last = first + ((uint64_t)1 << search.shift) - 1;
    s.cut = last < s.cut ? last : s.cut;
    if (search.shift == 0 || search.n_last <= 1 ||
        (step == SAMPLE_TOP_K && search.front + search.n_last == search.target)) {
        return true;
    }
    const bool whole = search.n_front + search.n_last <= SAMPLE_LIST;
    if (!whole && search.n_last > SAMPLE_LIST) return false;
    sample_list found;
    sample_collect(s, work, whole ? 0 : first, found);
    if (whole) {
        list = found;
        return false;
    }
    sample_sort(s, work, SAMPLE_BY_RANK, found);
    sample_place(a, s, work, step, search.front, search, found);
    if ((int)thread_index() == found.n - 1) lput(work.wave_mass, found.key);
    block_sync_lds();
    s.cut = lget(work.wave_mass);
    block_sync_lds();
    return true;
}

// Draws by digits of the token. As soon as 1024 tokens are left, each thread has one.
DEV void sample_draw(const rocq_k_sample_args &a, const sample_state &s, const sample_work &work,
                     sample_search &search) {
    while (search.shift > 10 && sample_digit(a, s, work, SAMPLE_DRAW, search)) continue;
    const uint32_t t = thread_index();
    const uint32_t token = (uint32_t)(search.prefix << search.shift) + t;
    const bool inside = t >> search.shift == 0 && token < (uint32_t)s.n;
    const float x = inside ? gload(s.logits + token) : -INFINITY;
    const bool live = x > -INFINITY && sample_rank(s, x, token) <= s.cut;
    const uint64_t own = live ? sample_mass(s, SAMPLE_DRAW, x) : 0;
    uint64_t sum;
    const uint64_t before = search.front + block_scan(own, work.wave_mass, sum);
    // Masses may be rounded in another way here than in sample_digit, and add up to less.
    const uint64_t most = search.front + sum;
    const uint64_t target = search.target < most ? search.target : most;
    if (before < target && before + own >= target) { // one thread
        sample_put(a, (int)token, (float)((double)own / (double)search.sum));
    }
}

// The logits after penalties and `allowed`, in work if there are any. Ends with a barrier then.
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

// The best token of the quads that a thread takes.
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
                const int k = tile_at(base, j) + e; // > keeps the first of equals
                if (v[j][e] > own.x && (full || k < n)) own = best_of{v[j][e], k};
            }
        }
    }
    return own;
}

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
    sample_state s = {logits, wide, n, width, best.x, sample_order(best.x), ~0ull, unit,
                      a.temperature, a.min_p};
    const sample_work work = {mass, bins, total, (uint32_t *)is, listed};
    const bool has_k = a.top_k > 0 && a.top_k < n, has_p = a.top_p > 0.0f && a.top_p < 1.0f;
    sample_list list = {~0ull, SAMPLE_LIST + 1, SAMPLE_UNSORTED};
    if (n <= SAMPLE_LIST) { // all tokens are a list already, by token
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
        sample_collect(s, work, 0, list);
    }
    for (int step = SAMPLE_TOP_K; step <= SAMPLE_DRAW; step++) {
        if ((step == SAMPLE_TOP_K && !has_k) || (step == SAMPLE_TOP_P && !has_p)) continue;
        const bool draws = step == SAMPLE_DRAW;
        sample_search search = {0, 0, 0, 0, width + (draws ? 0 : SAMPLE_NEAR), !draws, 0, 0};
        bool exact = false;
        while (!draws && !exact && list.n > SAMPLE_LIST) {
            exact = sample_narrow(a, s, work, step, search, list);
        }
        if (list.n <= SAMPLE_LIST) {
            sample_sort(s, work, draws ? SAMPLE_BY_TOKEN : SAMPLE_BY_RANK, list);
            sample_place(a, s, work, step, 0, search, list);
        } else if (draws) {
            sample_draw(a, s, work, search);
        }
    }
}

// -- shortconv --
// y = c activation(the convolution of u = b x over the newest L tokens), as in
// rocq_shortconv_params.
//
//   bcx  F32 or F16 [3 D, n, sequences], or x alone, [D, n, sequences]
//   y    F32, F16 or Q8_0 [D, n, sequences]
//   w    F32 [L, D], L <= 4; state F32 [D, S, sequences], S >= L - 1; any strides
//
// A block has 32 channels of a sequence and all its tokens, because it overwrites the state that it
// reads: every load of the state comes before the barrier, every store after it. Eight lanes have a
// quad of channels each, together a unit of y, and take a run of `run` tokens one after the other.
// The L - 1 values of u before a run are computed again from bcx, or, for tokens of earlier calls,
// read from the state. Geometry: 32 to 256 threads. Sums are in the order of w, so that the bits of
// y do not depend on how tokens are divided into runs.
// Bytes: bcx and y once, and for each run L - 1 columns more of b and x. A step of one token is
// bound by latency: one round of loads after that of pos.
enum { SHORTCONV_TAPS = ROCQ_SHORTCONV_TAPS };

DEV void shortconv_u(const rocq_k_shortconv_args &a, bool wide, const char *row, int64_t k,
                     int count, float u[4]) {
    float x[4];
    get4(a.bcx.format, row, wide, k, count, u);
    if (a.bcx.ne[0] == a.y.ne[0]) return;
    get4(a.bcx.format, row, wide, 2 * (int64_t)a.y.ne[0] + k, count, x);
#pragma unroll
    for (int e = 0; e < 4; e++) u[e] *= x[e];
}

KERNEL(shortconv, rocq_k_shortconv_args, 256) {
    if (a.y.ne[0] == 0) return;
    const uint32_t b = a.common.block0 + block_index(), seq = b / a.slices;
    const int64_t k = 32 * (int64_t)(b - seq * a.slices) + 4 * (thread_index() & 7);
    const int n = a.y.ne[1], taps = a.w.ne[0], count = quad_count(a.y.ne[0], k);
    const int first = (int)(thread_index() >> 3) * a.run;
    const bool wide = is_wide(a.bcx), y_wide = is_wide(a.y), state_wide = is_wide(a.state);
    const uint32_t slots = (uint32_t)a.state.ne[1];
    const int pos = gload(a.pos + seq);
    if (pos < 0) {
        if (thread_index() == 0) atomic_or(a.common.status, ROCQ_K_BAD_CELL);
        return;
    }
    // Only the last L of these are used, so that the token's own tap is the last for every L.
    float w[SHORTCONV_TAPS][4] = {}, u[SHORTCONV_TAPS][4] = {};
#pragma unroll
    for (int j = 0; j < SHORTCONV_TAPS; j++) {
        const int tap = j - (SHORTCONV_TAPS - taps);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (tap < 0 || e >= count) continue;
            w[j][e] = gload((const float *)row_of(a.w, k + e, 0, 0) + tap);
        }
    }
#pragma unroll
    for (int j = 1; j < SHORTCONV_TAPS; j++) { // token first - j
        const int t = first - j;
        if (j >= taps || t >= n || t < -pos) continue;
        float *const to = u[SHORTCONV_TAPS - 1 - j];
        if (t >= 0) shortconv_u(a, wide, row_of(a.bcx, t, seq, 0), k, count, to);
        else get4(ROCQ_F32, row_of(a.state, (uint32_t)(pos + t) % slots, seq, 0), state_wide, k,
                  count, to);
    }
    block_sync();
    float *const now = u[SHORTCONV_TAPS - 1];
    for (int i = 0; i < a.run; i++) {
        const int t = first + i, own = t < n ? count : 0;
        const char *const row = row_of(a.bcx, own > 0 ? t : 0, seq, 0);
        float c[4], sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        shortconv_u(a, wide, row, k, own, now);
        const bool gated = a.bcx.ne[0] != a.y.ne[0];
        if (gated) get4(a.bcx.format, row, wide, a.y.ne[0] + k, own, c);
        if (t >= n - (int)slots) {
            put_floats(ROCQ_F32, state_wide,
                       row_of(a.state, ((uint32_t)pos + (uint32_t)t) % slots, seq, 0), k, own, now);
        }
#pragma unroll
        for (int j = 0; j < SHORTCONV_TAPS; j++) {
            if (j < SHORTCONV_TAPS - taps) continue;
#pragma unroll
            for (int e = 0; e < 4; e++) sum[e] = fmaf(w[j][e], u[j][e], sum[e]);
        }
        activate4(a.activation, sum);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (gated) sum[e] *= c[e];
#pragma unroll
            for (int j = 0; j + 1 < SHORTCONV_TAPS; j++) u[j][e] = u[j + 1][e];
        }
        put4(a.y, y_wide, row_of(a.y, own > 0 ? t : 0, seq, 0), seq * (uint32_t)n + (uint32_t)t, k,
             own, sum);
    }
}

// -- delta_net, delta_step --
// The gated delta rule of rocq_delta_net_params (arXiv 2412.06464): S = exp(g) S,
// S += k' (b (v - S^T k'))^T, y = S^T q' / sqrt(K), token by token.
//
//   state  F32 [K, V, H, slots], K <= 128; q, k F32 [K, G, n, sequences]
//   v, y   F32 [V, H, n, sequences], y may be v; alpha, beta F32 [H, n, sequences]; any strides
//
// The columns of S depend on q and k only, not on each other. A block has 32 columns of a head of a
// sequence. 8 neighbouring lanes share a column, in delta_net two columns, which stay in registers
// from the first token to the last: lane i of them has quads i, i + 8, i + 16 and i + 24 of it, and
// the same quads of k' and q'. So a sum over K is 16 fma in four chains and three exchanges between
// lanes.
//   delta_step takes the one or two tokens of a step, without LDS or a barrier: the 8 lanes find
// the lengths of k and q for themselves. Geometry: 256 threads.
//   delta_net takes longer texts in chunks of 16 tokens: the block finds k', q' and the gates of a
// chunk once, not once for each column, and keeps them in LDS, while what the next chunk reads is
// in flight in registers. Inside a chunk a token waits for the one before through S^T k' alone: a
// sum within lanes and three exchanges, by which the y of the token before is added up too.
// Geometry: 128 threads.
//   Both add in the same order, so a text has the same bits however its tokens are cut into calls.
// Bytes: the state once in and once out, which bounds a step of one token: 2 MB a layer of 32 heads
// of 128. Long texts: 7 flops for each token and element of S, 4 instructions. The chunked form of
// the literature (the WY representation with the UT transform, ibid. section 3.3: a triangular
// system of C by C gives the updates of C tokens at once) takes 11 flops in chunks of C = 32, so it
// could only pay on the matrix unit, whose F16 operands would bound the state to three digits.
enum { DELTA_CHUNK = 16 };
struct delta_chunk { // in flight: a wave has every fourth token's k and q, a lane a quad of each
    u32x4 k[DELTA_CHUNK / 4], q[DELTA_CHUNK / 4], v; // v: thread i a quad of token i / 8
    float alpha, beta;                               // of token thread_index()
};

// Begins the loads of the chunk of tokens from `first` on.
DEV void delta_load(const rocq_k_delta_net_args &a, int head, int first, int seq, int column,
                    delta_chunk *to) {
    const int group = head % a.k.ne[1], n = a.v.ne[2], thread = (int)thread_index();
    const bool k_wide = is_wide(a.k), q_wide = is_wide(a.q);
#pragma unroll
    for (int i = 0; i < DELTA_CHUNK / 4; i++) {
        const int t = first + wave_index() + 4 * i, at = 4 * lane_index();
        const int count = t < n ? quad_count(a.k.ne[0], at) : 0;
        to->k[i] = load4(ROCQ_F32, row_of(a.k, group, t, seq), k_wide, at, count);
        to->q[i] = load4(ROCQ_F32, row_of(a.q, group, t, seq), q_wide, at, count);
    }
    const int t = first + thread / 8, at = column + 4 * (thread & 7);
    to->v = load4(ROCQ_F32, row_of(a.v, head, t, seq), is_wide(a.v), at,
                  t < n ? quad_count(a.v.ne[0], at) : 0);
    const int own = first + thread;
    if (thread < DELTA_CHUNK && own < n) {
        to->alpha = gload((const float *)row_of(a.alpha, own, seq, 0) + head);
        to->beta = gload((const float *)row_of(a.beta, own, seq, 0) + head);
    }
}

DEV float delta_decay(float x, float factor) { // exp(factor log(1 + exp(x)))
    return exp_full(factor * (x > 20.0f ? x : 0.693147181f * log2_fast(1.0f + exp_fast(x))));
}

DEV float delta_square(const float x[4]) {
    return fmaf(x[0], x[0], x[1] * x[1]) + fmaf(x[2], x[2], x[3] * x[3]);
}

// factor x / sqrt(|x|^2 + eps) of a row of which each lane of the wave has a quad.
DEV u32x4 delta_direction(const u32x4 &loaded, float eps, float factor) {
    float x[4];
    floats4(ROCQ_F32, loaded, x);
    const float by = factor / sqrtf(wave_sum(delta_square(x)) + eps);
    return make4(bits<uint32_t>(by * x[0]), bits<uint32_t>(by * x[1]), bits<uint32_t>(by * x[2]),
                 bits<uint32_t>(by * x[3]));
}

// The quads of a row in LDS that match the lane's quads of its columns.
DEV void delta_quads(const u32x4 *row, float x[16]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        floats4(ROCQ_F32, lget(row + (thread_index() & 7) + 8 * i), x + 4 * i);
}

DEV float delta_dot(const float x[16], const float y[16]) {
    float sum[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[i] = x[4 * i] * y[4 * i];
#pragma unroll
        for (int e = 1; e < 4; e++) sum[i] = fmaf(x[4 * i + e], y[4 * i + e], sum[i]);
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Adds up x and y over 8 neighbouring lanes, each of which gets both sums, and z, of which even
// lanes get the sum of their z[0] and odd lanes that of z[1].
DEV float delta_sums(float &x, float &y, const float z[2]) {
    const bool odd = (thread_index() & 1) != 0;
    float sum = odd ? z[1] : z[0];
    x += wave_xor<1>(x);
    y += wave_xor<1>(y);
    sum += wave_xor<1>(odd ? z[0] : z[1]);
    x += wave_xor<2>(x);
    y += wave_xor<2>(y);
    sum += wave_xor<2>(sum);
    x += wave_xor<4>(x);
    y += wave_xor<4>(y);
    return sum + wave_xor<4>(sum);
}

// A lane's share of a column of a slot's state: every 8th quad, as 8 lanes share it. Slot -1 and
// columns past the last one are zeros. WHOLE: a.whole.
template <bool WHOLE = false>
DEV void delta_get_state(const rocq_k_delta_net_args &a, uint32_t head, int slot, int column,
                         float (&s)[16]) {
    const int lane = (int)thread_index() & 7;
    const bool there = slot >= 0 && (WHOLE || column < a.v.ne[0]);
    const char *const row = row_of(a.state, there ? column : 0, head, there ? slot : 0);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = 4 * (lane + 8 * i), most = WHOLE ? 4 : quad_count(a.k.ne[0], at);
        get4(ROCQ_F32, row, WHOLE || is_wide(a.state), at, there ? most : 0, s + 4 * i);
    }
}
template <bool WHOLE = false>
DEV void delta_put_state(const rocq_k_delta_net_args &a, uint32_t head, int slot, int column,
                         const float (&s)[16]) {
    const int lane = (int)thread_index() & 7;
    const bool there = WHOLE || column < a.v.ne[0];
    char *const row = row_of(a.state, there ? column : 0, head, slot);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = 4 * (lane + 8 * i), most = WHOLE ? 4 : quad_count(a.k.ne[0], at);
        put_floats(ROCQ_F32, WHOLE || is_wide(a.state), row, at, there ? most : 0, s + 4 * i);
    }
}

KERNEL(delta_net, rocq_k_delta_net_args, 128) {
    LDS(u32x4, rows, 2 * DELTA_CHUNK * 32); // k' of the chunk's tokens, then q' / sqrt(K)
    LDS(u32x4, values, DELTA_CHUNK * 8);    // v of the block's columns
    LDS(float, gates, 2 * DELTA_CHUNK);     // exp(g), then b
    if (a.y.ne[0] == 0) return;
    const uint32_t b = a.common.block0 + block_index(), both = b / a.slices;
    const int head = (int)(both % (uint32_t)a.v.ne[1]), seq = (int)(both / (uint32_t)a.v.ne[1]);
    const int first = 32 * (int)(b - both * a.slices), n = a.v.ne[2];
    const int thread = (int)thread_index(), lane = thread & 7, pair = thread >> 3;
    const int32_t *const slot = a.slot + seq * a.slot_stride;
    const int from = gload(slot), to = gload(slot + 1);
    if (from < -1 || from >= a.state.ne[3] || to < 0 || to >= a.state.ne[3]) {
        if (thread == 0) atomic_or(a.common.status, ROCQ_K_BAD_CELL);
        return;
    }
    const float scale = 1.0f / sqrtf((float)a.k.ne[0]);
    const float factor = gload(a.a + head), shift = gload(a.dt + head);
    delta_chunk next;
    next.alpha = next.beta = 0.0f;
    delta_load(a, head, 0, seq, first, &next);
    float s[2][16];
#pragma unroll
    for (int c = 0; c < 2; c++) delta_get_state(a, head, from, first + 2 * pair + c, s[c]);
    const int own = first + 2 * pair + (lane & 1);     // the column whose y this lane stores
    const bool stores = lane < 2 && own < a.v.ne[0];
    for (int t0 = 0; t0 < n; t0 += DELTA_CHUNK) {
        block_sync_lds();
#pragma unroll
        for (int i = 0; i < DELTA_CHUNK / 4; i++) {
            const int at = 32 * (wave_index() + 4 * i) + lane_index();
            lput(rows + at, delta_direction(next.k[i], a.eps, 1.0f));
            lput(rows + 32 * DELTA_CHUNK + at, delta_direction(next.q[i], a.eps, scale));
        }
        lput(values + thread, next.v);
        if (thread < DELTA_CHUNK) {
            lput(gates + thread, delta_decay(next.alpha + shift, factor));
            lput(gates + DELTA_CHUNK + thread, activation(ROCQ_ACT_SIGMOID, next.beta));
        }
        block_sync_lds();
        if (t0 + DELTA_CHUNK < n) delta_load(a, head, t0 + DELTA_CHUNK, seq, first, &next);
        const int m = n - t0 < DELTA_CHUNK ? n - t0 : DELTA_CHUNK;
        float k[16], q[16], y[2] = {0.0f, 0.0f};
        delta_quads(rows, k);
        delta_quads(rows + 32 * DELTA_CHUNK, q);
        for (int j = 0; j < m; j++) {
            const int after = j + 1 < m ? j + 1 : j;
            const float decay = lget(gates + j), share = lget(gates + DELTA_CHUNK + j);
            const float *const v = (const float *)values + 32 * j + 2 * pair;
            float seen[2] = {delta_dot(s[0], k), delta_dot(s[1], k)};
            const float sum = delta_sums(seen[0], seen[1], y);
            if (stores && j > 0) gstore((float *)row_of(a.y, head, t0 + j - 1, seq) + own, sum);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const float by = share * fmaf(-decay, seen[c], lget(v + c));
#pragma unroll
                for (int i = 0; i < 16; i++) s[c][i] = fmaf(by, k[i], decay * s[c][i]);
            }
            delta_quads(rows + 32 * after, k);
            y[0] = delta_dot(s[0], q);
            y[1] = delta_dot(s[1], q);
            delta_quads(rows + 32 * (DELTA_CHUNK + after), q);
        }
        float none[2] = {0.0f, 0.0f};
        const float sum = delta_sums(none[0], none[1], y);
        if (stores) gstore((float *)row_of(a.y, head, t0 + m - 1, seq) + own, sum);
    }
#pragma unroll
    for (int c = 0; c < 2; c++) delta_put_state(a, head, to, first + 2 * pair + c, s[c]);
}

DEV float sum_of_8(float x) { // over 8 neighbouring lanes; each gets the same bits
    x += wave_xor<1>(x);
    x += wave_xor<2>(x);
    return x + wave_xor<4>(x);
}

struct delta_token {
    u32x4 k[4], q[4];
    float v, alpha, beta;
};

struct delta_rows { // of a token; v, y, alpha and beta from the head's first element on
    const char *k, *q, *v, *alpha, *beta;
    char *y;
};

DEV delta_rows delta_rows_of(const rocq_k_delta_net_args &a, uint32_t head, uint32_t seq) {
    const uint32_t group = head % (uint32_t)a.k.ne[1];
    delta_rows r;
    r.k = row_of(a.k, group, 0, seq);
    r.q = row_of(a.q, group, 0, seq);
    r.v = row_of(a.v, head, 0, seq);
    r.alpha = row_of(a.alpha, 0, seq, 0) + 4 * head;
    r.beta = row_of(a.beta, 0, seq, 0) + 4 * head;
    r.y = row_of(a.y, head, 0, seq);
    return r;
}
DEV void delta_rows_next(const rocq_k_delta_net_args &a, delta_rows &r) {
    r.k += a.k.stride[1];
    r.q += a.q.stride[1];
    r.v += a.v.stride[1];
    r.alpha += a.alpha.stride[0];
    r.beta += a.beta.stride[0];
    r.y += a.y.stride[1];
}

template <bool WHOLE>
DEV void delta_load_token(const rocq_k_delta_net_args &a, const delta_rows &r, int column,
                          delta_token *to) {
    const bool k_wide = WHOLE || is_wide(a.k), q_wide = WHOLE || is_wide(a.q);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = 4 * (int)((thread_index() & 7) + 8 * i);
        const int count = WHOLE ? 4 : quad_count(a.k.ne[0], at);
        to->k[i] = load4(ROCQ_F32, r.k, k_wide, at, count);
        to->q[i] = load4(ROCQ_F32, r.q, q_wide, at, count);
    }
    to->v = gload((const float *)r.v + column);
    to->alpha = gload((const float *)r.alpha);
    to->beta = gload((const float *)r.beta);
}

// |x|^2 of a row of which 8 lanes have four quads each, added in the order of delta_direction.
DEV float delta_square_of_8(const u32x4 loaded[4], float x[16]) {
    float sum[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        floats4(ROCQ_F32, loaded[i], x + 4 * i);
        sum[i] = sum_of_8(delta_square(x + 4 * i));
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// A block requests all that it reads before it waits for any of it, except the state, whose place
// depends on the slot. WHOLE: see rocq_k_delta_net_args; loads and stores then need no branches.
template <bool WHOLE>
DEV void delta_step_block(const rocq_k_delta_net_args &a, uint32_t head, int own,
                          const int32_t *slot, delta_rows rows) {
    const int column = WHOLE || own < a.v.ne[0] ? own : 0, n = a.v.ne[2];
    launch_begin();
    int32_t from = gload(slot), to = gload(slot + 1);
    const float factor = gload(a.a + head), shift = gload(a.dt + head);
    const float scale = 1.0f / sqrtf((float)(WHOLE ? ROCQ_DELTA_NET_KEYS : a.k.ne[0]));
    float s[16];
    for (int t = 0;; t++) {
        delta_token now;
        float k[16], q[16];
        delta_load_token<WHOLE>(a, rows, column, &now);
        if (t == 0) {
            if (from < -1 || from >= a.state.ne[3] || to < 0 || to >= a.state.ne[3]) {
                if (thread_index() == 0) atomic_or(a.common.status, ROCQ_K_BAD_CELL);
                from = to = -1;
            }
            delta_get_state<WHOLE>(a, head, from, own, s);
        }
        const float decay = delta_decay(now.alpha + shift, factor);
        const float k_square = delta_square_of_8(now.k, k), q_square = delta_square_of_8(now.q, q);
        const float k_by = 1.0f / sqrtf(k_square + a.eps), q_by = scale / sqrtf(q_square + a.eps);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            k[i] *= k_by;
            q[i] *= q_by;
        }
        const float by = activation(ROCQ_ACT_SIGMOID, now.beta) *
                         fmaf(-decay, sum_of_8(delta_dot(s, k)), now.v);
#pragma unroll
        for (int i = 0; i < 16; i++) s[i] = fmaf(by, k[i], decay * s[i]);
        const bool last = t + 1 == n;
        if (last && to >= 0) delta_put_state<WHOLE>(a, head, to, own, s);
        const float y = sum_of_8(delta_dot(s, q)); // while the state is on its way
        if (to >= 0 && column == own && (thread_index() & 7) == 0) gstore((float *)rows.y + own, y);
        if (last) return;
        delta_rows_next(a, rows);
    }
}

KERNEL_AHEAD(delta_step, rocq_k_delta_net_args, 256, 2) {
    if (a.y.ne[0] == 0) return;
    const uint32_t b = a.common.block0 + block_index(), both = b / a.slices;
    const uint32_t head = both % (uint32_t)a.v.ne[1], seq = both / (uint32_t)a.v.ne[1];
    const int own = 32 * (int)(b - both * a.slices) + (int)(thread_index() >> 3);
    const delta_rows rows = delta_rows_of(a, head, seq);
    const int32_t *const slot = a.slot + seq * a.slot_stride;
    if (a.whole) delta_step_block<true>(a, head, own, slot, rows);
    else delta_step_block<false>(a, head, own, slot, rows);
}

// -- ranges --
// Copies ranges of memory to or from one buffer, fills them, or compares them with their copies, in
// one launch, where a copy of each by the runtime would take two microseconds for a few bytes.
//
//   ranges  of any addresses and sizes, sorted by where their copies begin in the buffer
//
// Geometry: 256 threads. A thread takes 16 bytes of the buffer, which are of one range, and finds
// the range by a binary search. It takes words where these are whole and aligned, else bytes.

template <typename T>
DEV void ranges_part(const rocq_k_ranges_args &a, const rocq_k_range *range, uint64_t address,
                     int64_t copy, int n) {
    T *x = (T *)address, *y = (T *)(a.copies + copy);
    if (a.task == ROCQ_K_FILL && !gload(&range->filled)) return;
    for (int i = 0; i < n / (int)sizeof(T); i++) {
        if (a.task == ROCQ_K_SAVE) {
            gstore(y + i, gload(x + i));
        } else if (a.task == ROCQ_K_RESTORE) {
            gstore(x + i, gload(y + i));
        } else if (a.task == ROCQ_K_FILL) {
            gstore(x + i, (T)gload(&range->fill));
        } else if (gload(x + i) != gload(y + i) && atomic_inc(&a.difference->n) == 0) {
            gstore(&a.difference->copy, copy + i * (int64_t)sizeof(T));
        }
    }
}

KERNEL(ranges, rocq_k_ranges_args, 256) {
    const int64_t at = 16 * ((int64_t)(a.common.block0 + block_index()) * 256 + thread_index());
    if (at >= a.size) return;
    int first = 0, last = a.n - 1; // the last range whose copy begins at `at` or before is in here
    while (first < last) {
        const int middle = first + (last - first + 1) / 2;
        if (gload(&a.ranges[middle].copy) <= at) first = middle;
        else last = middle - 1;
    }
    const rocq_k_range *range = a.ranges + first;
    const int64_t from = at - gload(&range->copy), left = gload(&range->size) - from;
    const uint64_t address = gload(&range->address) + (uint64_t)from;
    const int n = left < 16 ? (int)left : 16; // negative in the gap behind a copy
    if (((address | (uint64_t)n) & 3) == 0) ranges_part<uint32_t>(a, range, address, at, n);
    else ranges_part<uint8_t>(a, range, address, at, n);
}

// ---------------------------------------------------------------------------------------------
// >>pictures
// ---------------------------------------------------------------------------------------------
// Pictures are channels-last, [C, W, H, N].

// Eight neighbouring elements of a row of F32, F16 or BF16, in two steps: conv_load loads them, and
// conv_floats converts what was loaded. Between the two the load is in flight.
struct conv_raw { u32x4 lo, hi; };
DEV conv_raw conv_load(int32_t format, const char *row, int64_t k) { // aligned to 16 bytes
    conv_raw r;
    if (format == ROCQ_F32) {
        r.lo = gload((const u32x4 *)((const float *)row + k));
        r.hi = gload((const u32x4 *)((const float *)row + k) + 1);
    } else {
        r.lo = gload((const u32x4 *)((const uint16_t *)row + k));
        r.hi = r.lo;
    }
    return r;
}
DEV void conv_floats(int32_t format, const conv_raw &r, float v[8]) {
    if (format == ROCQ_F32) {
        decode_vector<ROCQ_F32>(r.lo, 0, v);
        decode_vector<ROCQ_F32>(r.hi, 0, v + 4);
    } else if (format == ROCQ_F16) {
        decode_vector<ROCQ_F16>(r.lo, 0, v);
        decode_vector<ROCQ_F16>(r.lo, 1, v + 4);
    } else {
        decode_vector<ROCQ_BF16>(r.lo, 0, v);
        decode_vector<ROCQ_BF16>(r.lo, 1, v + 4);
    }
}
// Both steps for elements one by one, at any alignment; v is 0 past the row's n elements.
DEV void conv_gather(int32_t format, const char *row, int64_t k, int64_t n, float v[8]) {
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = k + e < n ? get_float(format, row, k + e) : 0.0f;
}
DEV u32x4 conv_halves(const float v[8]) {
    return make4(bits<uint32_t>(pair_floats(v[0], v[1])), bits<uint32_t>(pair_floats(v[2], v[3])),
                 bits<uint32_t>(pair_floats(v[4], v[5])), bits<uint32_t>(pair_floats(v[6], v[7])));
}
// Stores eight channels, from element k of a row on.
DEV void conv_store(int32_t format, char *row, int64_t k, const float v[8]) {
    if (format == ROCQ_F32) {
        u32x4 *const to = (u32x4 *)((float *)row + k);
        gstore(to, make4(bits<uint32_t>(v[0]), bits<uint32_t>(v[1]), bits<uint32_t>(v[2]),
                         bits<uint32_t>(v[3])));
        gstore(to + 1, make4(bits<uint32_t>(v[4]), bits<uint32_t>(v[5]), bits<uint32_t>(v[6]),
                             bits<uint32_t>(v[7])));
    } else if (format == ROCQ_F16) {
        gstore((u32x4 *)((uint16_t *)row + k), conv_halves(v));
    } else {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = f32_bf16(v[2 * i]) | (uint32_t)f32_bf16(v[2 * i + 1]) << 16;
        }
        gstore((u32x4 *)((uint16_t *)row + k), make4(w[0], w[1], w[2], w[3]));
    }
}

// -- conv --
// y[m, ox, oy, t] = activation(bias + residual + sum over the taps and channels of w z), z being x
// after norm, activation and repetition, as in rocq_conv_params: an implicit product of w [K, M]
// and the positions of y, with K in the order frame, row and column of the kernel, channel.
//
//   w        F16 [K, M] without gaps
//   x        F32, F16 or BF16, any strides; y and residual likewise
//   folded   w has four kernels [K, M] of 2 x 2 taps, one for each phase: every other column and
//            row of y, from 0 or 1 on. A block has positions of one phase, and below, positions
//            and tiles are counted within it; conv_column and conv_row say where they lie in y
//
// A block computes ROCQ_K_CONV_H rows of ROCQ_K_CONV_W positions of a frame by BM channels m. It
// takes 64 channels of one frame of x at a time. halo: the positions that all kw kh taps read are
// staged in LDS as one patch, up to ROCQ_K_CONV_PATCH of them, so that x is loaded, normalised and
// activated once and not for every tap; a tap is an offset into the patch. Without halo (stride 2,
// large kernels), a patch has the positions of a single tap. z is rounded to F16 in the patch. The
// block's weights are staged in steps of a tap and 32 channels; those of the next CONV_AHEAD steps
// are prefetched while the waves multiply, into registers or by asynchronous copies.
// In LDS both are split into chunks of 8 channels. A chunk is a column of 16-byte words, one for
// each row of w or position of z; their number is odd, so that the words of one row or position lie
// in different banks. Eight neighbouring positions of a line of the tile are 128 bytes without gaps
// for every tap: a B fragment is two of these, and Hopper's matrix unit reads them by itself.
// What a wave computes: with BM 128, 64 channels by 64 positions, the waves lying 2 by 2; with BM
// 64 and 16 (TAESD; layers that make a picture's 3 channels) all channels by 32 positions. Where
// the matrix unit reads LDS by itself (Hopper), a quarter of the channels by all positions.
//
// Geometry: 128 threads; blockIdx.x counts tiles_m fastest, so that blocks that run at the same
// time share a patch in L2, then tiles_x, tiles_y and n_splits; blockIdx.z counts frames of y. With
// n_splits over 1 a block has a share of K, in whole patches, and stores its sums in `work`, which
// conv_merge adds up in the order of the splits. LDS: a patch of 23 KB and CONV_AHEAD + 1 tiles of
// w of 64 (BM + 1) bytes, 39 KB with BM 128 on gfx11, where three blocks fit on a WGP.
// Sums run in the order frame, 64 channels, row, column, channel. Offsets within 128 rows of w are
// 32-bit.
enum {
    CONV_BK = 64,                            // channels of a patch
    CONV_W_BK = 32,                          // and of a tile of w
    CONV_W_CHUNKS = CONV_W_BK / 8,
    CONV_LOAD_ROWS = 128 / CONV_W_CHUNKS,    // rows of w that the threads load at once
    CONV_AHEAD = COPIES_ASYNC ? 2 : 1,       // tiles of w that are under way
    CONV_CHUNK = 8 * (ROCQ_K_CONV_PATCH + 1) // halves from chunk to chunk of a patch
};

// A step of the sums: a tap and CONV_W_BK channels. k and tap are carried from step to step instead
// of computed from the rest, since a block has only few waves to hide that latency.
struct conv_step {
    // patch = s slices + slice. s, j, i: frame, row and column of the tap. half: of the slice
    int32_t patch, s, slice, j, i, half;
    int32_t k;   // of the step's first channel in a row of w
    int32_t tap; // positions from the patch's first to the tap's
};
DEV int32_t conv_channel(const conv_step &at) {
    return at.slice * CONV_BK + at.half * CONV_W_BK;
}
DEV conv_step conv_step_of(const rocq_k_conv_args &a, int32_t patch) {
    const int32_t s = patch / a.slices, slice = patch - s * a.slices;
    return {patch, s, slice, 0, 0, 0, s * a.kh * a.kw * a.c + slice * CONV_BK, 0};
}
DEV conv_step conv_next(const rocq_k_conv_args &a, conv_step at) {
    if (CONV_W_BK < CONV_BK && at.half == 0 && conv_channel(at) + CONV_W_BK < a.c) {
        at.half = 1;
        at.k += CONV_W_BK;
        return at;
    }
    at.k += a.c - at.half * CONV_W_BK;
    at.half = 0;
    at.tap += a.halo;
    if (++at.i < a.kw) return at;
    at.i = 0;
    at.tap += a.halo ? a.patch_w - a.kw : 0;
    if (++at.j < a.kh) return at;
    return conv_step_of(a, at.patch + 1);
}

struct conv_place {
    int32_t m0, ox0, oy0, frame; // first channel, column and row, and the frame of y
    int32_t split;
    int32_t phase_x, phase_y;    // folded: 0 or 1
    int32_t pad_x, pad_y;        // of the taps that are multiplied
    int32_t w_row;               // of w's rows, the first of the phase's
};
// The phase of a folded conv, as rocq__conv_phase in rocq.h: of three taps, the first reads doubled
// position 2 i + phase - pad; even or odd, it says which sums of taps the phase has.
DEV void conv_place_phase(const rocq_k_conv_args &a, conv_place &p, int32_t phase) {
    p.phase_x = phase & 1, p.phase_y = phase >> 1;
    p.pad_x = a.pad_x, p.pad_y = a.pad_y, p.w_row = 0;
    if (!a.folded) return;
    p.w_row = (((p.phase_x + a.pad_x) & 1) + 2 * ((p.phase_y + a.pad_y) & 1)) * a.m;
    p.pad_x = 1 - (2 + p.phase_x - a.pad_x) / 2;
    p.pad_y = 1 - (2 + p.phase_y - a.pad_y) / 2;
}
// Where column x and row y of the phase lie.
DEV int32_t conv_column(const rocq_k_conv_args &a, const conv_place &p, int32_t x) {
    return (x << a.folded) + p.phase_x;
}
DEV int32_t conv_row(const rocq_k_conv_args &a, const conv_place &p, int32_t y) {
    return (y << a.folded) + p.phase_y;
}
// The place of tile `block` of a frame, counted as conv's blocks.
DEV conv_place conv_place_at(const rocq_k_conv_args &a, int bm, uint32_t block, int32_t frame) {
    const uint32_t tiles_m = (uint32_t)a.tiles_m << 2 * a.folded;
    const uint32_t tile = block / tiles_m, row = tile / (uint32_t)a.tiles_x;
    const uint32_t own = block - tile * tiles_m, phase = a.folded ? own / (uint32_t)a.tiles_m : 0;
    conv_place p;
    p.m0 = (int32_t)(own - phase * (uint32_t)a.tiles_m) * bm;
    conv_place_phase(a, p, (int32_t)phase);
    p.ox0 = (int32_t)(tile - row * (uint32_t)a.tiles_x) * ROCQ_K_CONV_W;
    p.split = (int32_t)(row / (uint32_t)a.tiles_y);
    p.oy0 = (int32_t)(row - (uint32_t)p.split * (uint32_t)a.tiles_y) * ROCQ_K_CONV_H;
    p.frame = frame;
    return p;
}
DEV conv_place conv_place_of(const rocq_k_conv_args &a, int bm) {
    return conv_place_at(a, bm, a.common.block0 + block_index(), (int32_t)block_index_z());
}

// The activations of common layers, E elements at once; others are applied one element at a time.
// Two elements of SiLU, x / (1 + exp(-x)), share one reciprocal: 1 / p is q (1 / (p q)). exp is
// held at 2^63, so that p q stays finite; below x = -43 the result is then x 2^-63 in place of
// about 0: less than F16's smallest number for x down to -2^39.
template <int E> DEV void conv_activate(int32_t kind, float v[8]) {
    if (kind == ROCQ_ACT_SILU) {
#pragma unroll
        for (int e = 0; e < E; e += 2) {
            const float p = 1.0f + exp2_fast(fminf(-1.44269504f * v[e], 63.0f));
            const float q = 1.0f + exp2_fast(fminf(-1.44269504f * v[e + 1], 63.0f));
            const float r = rcp_fast(p * q);
            v[e] *= r * q;
            v[e + 1] *= r * p;
        }
    } else if (kind == ROCQ_ACT_RELU) {
#pragma unroll
        for (int e = 0; e < E; e++) v[e] = v[e] <= 0.0f ? 0.0f : v[e]; // NaN stays
    }
}
DEV bool conv_is_common(int32_t kind) {
    return kind == ROCQ_ACT_IDENTITY || kind == ROCQ_ACT_SILU || kind == ROCQ_ACT_RELU;
}

// The norm of channels c to c + E - 1 of frame it of x as a multiply-add: x scale + shift.
template <int E> struct conv_affine { float scale[E], shift[E]; };
template <int E>
DEV conv_affine<E> conv_norm(const rocq_k_conv_args &a, int32_t c, int32_t it) {
    conv_affine<E> n;
    const char *const stats = row_repeated(a.stats, 0, it, 0);
    int32_t group = c / a.group, at = c - group * a.group;
#pragma unroll
    for (int e = 0; e < E; e++) {
        n.scale[e] = a.norm_weight ? gload(a.norm_weight + c + e) : 1.0f;
        n.shift[e] = a.norm_bias ? gload(a.norm_bias + c + e) : 0.0f;
        if (a.stats.ne[0] != 2) continue;
        const float *const own = (const float *)(stats + group * a.stats.stride[0]);
        n.scale[e] *= gload(own + 1);
        n.shift[e] = fmaf(-gload(own), n.scale[e], n.shift[e]);
        if (++at == a.group) group++, at = 0;
    }
    return n;
}

// Where a step's patch lies in z, and the position of x behind position q of it.
struct conv_patch {
    int32_t zx0, zy0, apart; // z's column and row of its first position, and from one to the next
    int32_t it;              // frame of x, below 0 if there is none
    const char *frame;
};
struct conv_position {
    bool inside;
    int32_t ix, iy;
};
DEV conv_patch conv_patch_of(const rocq_k_conv_args &a, const conv_place &p, const conv_step &at) {
    conv_patch patch;
    patch.zx0 = p.ox0 * a.stride - p.pad_x + (a.halo ? 0 : at.i);
    patch.zy0 = p.oy0 * a.stride - p.pad_y + (a.halo ? 0 : at.j);
    patch.apart = a.halo ? 1 : a.stride;
    patch.it = p.frame + at.s + a.past - (a.kt - 1);
    patch.frame = (const char *)a.x.data + (patch.it < 0 ? 0 : patch.it) * a.x.stride[2];
    return patch;
}
DEV conv_position conv_position_of(const rocq_k_conv_args &a, const conv_patch &p, int32_t q) {
    const int32_t py = (int32_t)((uint32_t)q * (uint32_t)a.patch_w_inverse >> 16);
    const int32_t zx = p.zx0 + (q - py * a.patch_w) * p.apart, zy = p.zy0 + py * p.apart;
    const bool inside = q < a.patch_n && p.it >= 0 && (uint32_t)zx < (uint32_t)a.z_w &&
                        (uint32_t)zy < (uint32_t)a.z_h;
    return {inside, inside ? zx >> a.upsample : 0, inside ? zy >> a.upsample : 0};
}

// Stages the patch of a step. A thread has one vector of channels, 16 bytes of elements of F, of
// every ROWS-th position. The loads of BATCH vectors are in flight together.
// F is F32, or F16 for x in F16 or BF16.
template <int F>
DEV void conv_stage(const rocq_k_conv_args &args, const conv_place &p, const conv_step &at,
                    f16 *patch) {
    enum { E = vector_elems<F>(), VECTORS = CONV_BK / E, ROWS = 128 / VECTORS, BATCH = 4 };
    const rocq_k_conv_args &a = reread(args);
    const int t = recomputed((int)thread_index()), vector = t % VECTORS;
    const int32_t c = at.slice * CONV_BK + E * vector;
    const conv_patch from = conv_patch_of(a, p, at);
    const bool live = c < a.c, normed = a.stats.data != 0;
    const bool by_position = normed && a.stats.ne[0] == 1;
    const bool copied = a.x.format == ROCQ_F16 && !normed &&
                        a.x_activation == ROCQ_ACT_IDENTITY && a.x_scale == 1.0f;
    f16 *const own = patch + vector * E / 8 * CONV_CHUNK + vector * E % 8;
    if (COPIES_ASYNC && copied) {
#pragma unroll 4
        for (int q = t / VECTORS; q < a.patch_n; q += ROWS) {
            const conv_position at_x = conv_position_of(a, from, q);
            const char *row =
                from.frame + at_x.iy * a.x.stride[1] + at_x.ix * a.x.stride[0];
            copy_async((u32x4 *)(own + 8 * q), (const u32x4 *)row + (live ? c / E : 0),
                       at_x.inside && live);
        }
        return;
    }
    conv_affine<E> norm;
    if (normed && live && from.it >= 0) norm = conv_norm<E>(a, c, from.it);
#pragma unroll 1
    for (int q0 = t / VECTORS; q0 < a.patch_n; q0 += ROWS * BATCH) {
        u32x4 r[BATCH];
        float factor[BATCH];
        bool inside[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const conv_position q = conv_position_of(a, from, q0 + ROWS * b);
            inside[b] = q.inside && live;
            const char *row = from.frame + q.iy * a.x.stride[1] + q.ix * a.x.stride[0];
            r[b] = gload((const u32x4 *)row + (live ? c / E : 0));
            factor[b] = 1.0f;
            if (by_position && inside[b]) {
                factor[b] = gload((const float *)row_of(a.stats, q.ix, q.iy, from.it));
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            keep_order(); // one vector at a time is in floats
            if (q0 + ROWS * b >= a.patch_n) break;
            f16 *const to = own + 8 * (q0 + ROWS * b);
            if (copied) {
                lput((u32x4 *)to, inside[b] ? r[b] : make4(0, 0, 0, 0));
                continue;
            }
            uint32_t h[4] = {0, 0, 0, 0};
            if (inside[b]) {
                float v[8];
#pragma unroll
                for (int i = 0; i < E / 4; i++) {
                    const bool is_f = F == ROCQ_F32 || a.x.format == ROCQ_F16;
                    if (is_f) decode_vector<F>(r[b], i, v + 4 * i);
                    else decode_vector<ROCQ_BF16>(r[b], i, v + 4 * i);
                }
                if (normed) {
#pragma unroll
                    for (int e = 0; e < E; e++) {
                        v[e] = fmaf(by_position ? v[e] * factor[b] : v[e], norm.scale[e],
                                    norm.shift[e]);
                    }
                }
                conv_activate<E>(a.x_activation, v);
                if (a.x_scale != 1.0f) {
#pragma unroll
                    for (int e = 0; e < E; e++) v[e] *= a.x_scale;
                }
#pragma unroll
                for (int i = 0; i < E / 2; i++) {
                    h[i] = bits<uint32_t>(pair_floats(v[2 * i], v[2 * i + 1]));
                }
            }
            if (E == 4) lput((u32x2 *)to, make2(h[0], h[1]));
            else lput((u32x4 *)to, make4(h[0], h[1], h[2], h[3]));
        }
    }
}
// conv_stage by single elements: for any alignment, number of channels and activation.
DEV void conv_stage_any(const rocq_k_conv_args &args, const conv_place &p, const conv_step &at,
                        f16 *patch) {
    const rocq_k_conv_args &a = reread(args);
    const conv_patch from = conv_patch_of(a, p, at);
    const int left = a.c - at.slice * CONV_BK; // 16 channels at least are staged
    const int log = left > 32 ? 6 : left > 16 ? 5 : 4;
    enum { BATCH = 4 }; // loads in flight together
#pragma unroll 1
    for (int i0 = recomputed((int)thread_index()); i0 < a.patch_n << log; i0 += 128 * BATCH) {
        uint32_t r[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int i = i0 + 128 * b;
            const conv_position at_x = conv_position_of(a, from, i >> log);
            const int32_t c = at.slice * CONV_BK + (i & ((1 << log) - 1));
            r[b] = 0;
            if (!at_x.inside || c >= a.c) continue;
            r[b] = get_bits(a.x.format, from.frame + at_x.iy * a.x.stride[1] +
                            at_x.ix * a.x.stride[0], c);
        }
#pragma unroll 1
        for (int b = 0; b < BATCH; b++) {
            const int i = i0 + 128 * b, q = i >> log, own = i & ((1 << log) - 1);
            if (q >= a.patch_n) break;
            const conv_position at_x = conv_position_of(a, from, q);
            const int32_t c = at.slice * CONV_BK + own;
            float v = bits_float(a.x.format, b == 0 ? r[0] : b == 1 ? r[1] : b == 2 ? r[2] : r[3]);
            if (!at_x.inside || c >= a.c) {
                v = 0.0f;
            } else {
                if (a.stats.data) {
                    const conv_affine<1> norm = conv_norm<1>(a, c, from.it);
                    if (a.stats.ne[0] == 1) {
                        v *= gload((const float *)row_of(a.stats, at_x.ix, at_x.iy, from.it));
                    }
                    v = fmaf(v, norm.scale[0], norm.shift[0]);
                }
                v = activation(a.x_activation, v) * a.x_scale;
            }
            lput((uint16_t *)patch + own / 8 * CONV_CHUNK + 8 * q + own % 8, f32_f16(v));
        }
    }
}

// Finishes y of channels m to m + 7 at a position from their sums v. loaded: of residual, or 0.
DEV void conv_put(const rocq_k_conv_args &a, int32_t ox, int32_t oy, int32_t frame, int32_t m,
                  const conv_raw &loaded, float v[8]) {
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] *= a.y_scale;
    if (a.bias) {
        float b[8];
        conv_floats(ROCQ_F32, conv_load(ROCQ_F32, (const char *)a.bias, m), b);
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] += b[e];
    }
    if (a.residual.data) {
        float r[8];
        conv_floats(a.residual.format, loaded, r);
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] += r[e];
    }
    conv_activate<8>(a.activation, v);
    conv_store(a.y.format, row_of(a.y, ox, oy, frame), m, v);
}
// conv_put for one channel, at any alignment, any activation.
DEV void conv_put_any(const rocq_k_conv_args &a, int32_t ox, int32_t oy, int32_t frame, int32_t m,
                      float v) {
    v *= a.y_scale;
    if (a.bias) v += gload(a.bias + m);
    if (a.residual.data) {
        v += get_float(a.residual.format, row_of(a.residual, ox, oy, frame), m);
    }
    put_float(a.y.format, row_of(a.y, ox, oy, frame), m, activation(a.activation, v));
}

// The address in work of a position's sums of the first split; the next are M floats further on.
DEV float *conv_split_sums(const rocq_k_conv_args &a, int32_t ox, int32_t oy, int32_t frame) {
    const int64_t position = ((int64_t)frame * a.y.ne[2] + oy) * a.y.ne[1] + ox;
    return a.work + position * a.n_splits * a.m;
}

// Finishes a wave's 16 TM channels by TN rows of 16 positions, from channel m0 and row oy0 on. As
// in matmul_finish the sums go through LDS, 16 positions at a time, after which a lane has eight
// neighbouring channels of a position. work: LDS, conv_pass_floats<TM> for each wave.
template <int TM> DEV constexpr int conv_pass_floats() { return 16 * (16 * TM + 4); }
template <int TM, int TN>
DEV void conv_finish(const rocq_k_conv_args &args, const conv_place &p,
                     const frag_c (&c)[TM][TN], float *work, int32_t m0, int32_t oy0) {
    const rocq_k_conv_args &a = reread(args);
    enum { STRIDE = 16 * TM + 4, VECTORS = 2 * TM, TOGETHER = TM < 2 ? 1 : 2 };
    const int lane = lane_index();
    work += matmul_wave() * conv_pass_floats<TM>();
#pragma unroll 1
    for (int pass = 0; pass < TN; pass++) {
        block_sync_lds();
        frags_put(c, pass, work, STRIDE);
        block_sync_lds();
        const int32_t oy = oy0 + 2 * pass; // columns 0-7 of the fragments; 8-15: the next row
        if (conv_row(a, p, oy) >= a.y.ne[2]) continue;
        if (a.n_splits > 1 || !a.y_wide || !conv_is_common(a.activation)) {
#pragma unroll 1
            for (int i = lane; i < 256 * TM; i += 32) {
                const int column = i / (16 * TM);
                const int32_t ox = conv_column(a, p, p.ox0 + column % 8);
                const int32_t own = conv_row(a, p, oy + column / 8);
                const int32_t m = m0 + i % (16 * TM);
                if (ox >= a.y.ne[1] || own >= a.y.ne[2] || m >= a.m) continue;
                const float v = lget(work + column * STRIDE + i % (16 * TM));
                if (a.n_splits == 1) conv_put_any(a, ox, own, p.frame, m, v);
                else gstore(conv_split_sums(a, ox, own, p.frame) + p.split * a.m + m, v);
            }
            continue;
        }
#pragma unroll 1
        for (int r0 = lane; r0 < 32 * TM; r0 += 32 * TOGETHER) {
            conv_raw loaded[TOGETHER];
            bool live[TOGETHER];
#pragma unroll
            for (int r = 0; r < TOGETHER; r++) {
                const int column = (r0 + 32 * r) / VECTORS;
                const int32_t ox = conv_column(a, p, p.ox0 + column % 8);
                const int32_t own = conv_row(a, p, oy + column / 8);
                const int32_t m = m0 + 8 * ((r0 + 32 * r) % VECTORS);
                live[r] = ox < a.y.ne[1] && own < a.y.ne[2] && m < a.m;
                loaded[r].lo = loaded[r].hi = make4(0, 0, 0, 0);
                if (!a.residual.data || !live[r]) continue;
                loaded[r] = conv_load(a.residual.format, row_of(a.residual, ox, own, p.frame), m);
            }
#pragma unroll
            for (int r = 0; r < TOGETHER; r++) {
                if (!live[r]) continue;
                const int column = (r0 + 32 * r) / VECTORS, vector = (r0 + 32 * r) % VECTORS;
                const u32x4 *from = (const u32x4 *)(work + column * STRIDE + 8 * vector);
                float v[8];
                decode_vector<ROCQ_F32>(lget(from), 0, v);
                decode_vector<ROCQ_F32>(lget(from + 1), 0, v + 4);
                conv_put(a, conv_column(a, p, p.ox0 + column % 8),
                         conv_row(a, p, oy + column / 8), p.frame, m0 + 8 * vector, loaded[r], v);
            }
        }
    }
}

// c += w z over 16 n16 elements of K, by fragments. w and z point into LDS to the wave's first
// channel and position. Chunks of w are w_chunk halves apart, and lines of 8 positions of z `line`.
// A fragment's registers are loaded again as soon as its last product is issued.
template <int TM, int TN>
DEV void conv_multiply(frag_c (&c)[TM][TN], const f16 *w, int w_chunk, const f16 *z, int line,
                       int n16) {
    w += frag_lane(w_chunk, 64);
    z += frag_lane_b(CONV_CHUNK, line);
    frag fw[TM];
    frag_b fz = frag_load_lane_b(z, CONV_CHUNK);
#pragma unroll
    for (int i = 0; i < TM; i++) fw[i] = frag_load_lane(w + 128 * i, w_chunk);
#pragma unroll 1
    for (; n16 > 1; n16--) {
#pragma unroll
        for (int j = 0; j < TN; j++) {
            const bool last = j + 1 == TN;
            const int from = last ? 2 * CONV_CHUNK : (j + 1) * 2 * line;
            const frag_b next = frag_load_lane_b(z + from, CONV_CHUNK);
#pragma unroll
            for (int i = 0; i < TM; i++) {
                wmma(c[i][j], fw[i], fz);
                if (last) fw[i] = frag_load_lane(w + 128 * i + 2 * w_chunk, w_chunk);
            }
            fz = next;
        }
        w += 2 * w_chunk;
        z += 2 * CONV_CHUNK;
    }
#pragma unroll
    for (int j = 0; j < TN; j++) {
        const frag_b next = j + 1 < TN ? frag_load_lane_b(z + (j + 1) * 2 * line, CONV_CHUNK) : fz;
#pragma unroll
        for (int i = 0; i < TM; i++) wmma(c[i][j], fw[i], fz);
        fz = next;
    }
}

// conv_multiply where the matrix unit reads both operands from LDS (Hopper), by four waves
// together. It only starts the products; conv_f16 waits for their end (wmma_lds_wait).
template <int TM, int N16>
DEV void conv_multiply_lds(frag_c (&c)[TM][8], const f16 *w, int w_chunk, const f16 *z, int line) {
    wmma_lds_begin();
#pragma unroll
    for (int s = 0; s < N16; s++) {
#pragma unroll
        for (int i = 0; i < TM; i++) {
            wmma_lds(c[i], w + 2 * s * w_chunk + 64 * 8 * i, w_chunk / 8, 8, z + 2 * s * CONV_CHUNK,
                     CONV_CHUNK / 8, line);
        }
    }
    wmma_lds_end();
}

// Where a thread's vectors of w lie: in bytes, vector `chunk` of each of its rows.
template <int N>
DEV void conv_w_offsets(uint32_t (&own)[N], int row, uint32_t last, uint32_t k, int chunk) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        const uint32_t r = (uint32_t)(row + i * CONV_LOAD_ROWS);
        own[i] = ((r < last ? r : last) * k + 8 * (uint32_t)chunk) * 2;
    }
}
// Eight halves of w one by one, at any alignment; those from number `left` on are 0.
DEV u32x4 conv_gather_w(const uint16_t *from, int left) {
    uint32_t h[8];
#pragma unroll
    for (int j = 0; j < 8; j++) h[j] = j < left ? gload(from + j) : 0;
    return make4(h[0] | h[1] << 16, h[2] | h[3] << 16, h[4] | h[5] << 16, h[6] | h[7] << 16);
}

// A block's tile: BM channels by BN positions; a wave has WM by WN of them, or TM by TN fragments.
// LDS has a ring of BUFFERS tiles of w, then a patch.
template <int BM> struct conv_f16_shape {
    enum {
        BN = ROCQ_K_CONV_W * ROCQ_K_CONV_H, FROM_LDS = WMMA_LDS && BM >= 64,
        WN = FROM_LDS ? BN : BM == 128 ? 64 : 32, WM = BM * BN / 4 / WN, TM = WM / 16,
        TN = WN / 16, W_CHUNK = 8 * (BM + 1), W_TILE = CONV_W_CHUNKS * W_CHUNK,
        N_W = (BM + CONV_LOAD_ROWS - 1) / CONV_LOAD_ROWS, // a thread's vectors of w
        BUFFERS = CONV_AHEAD + 1, ALL = (BUFFERS * W_TILE + CONV_BK / 8 * CONV_CHUNK) / 8
    };
};
// Where a thread finds w: vector `chunk` of a step in row `row` of the tile and in every
// CONV_LOAD_ROWS-th from there on, which lie `own` bytes from w (conv_w_offsets). Rows past the
// last repeat it.
struct conv_f16_w {
    const char *w;  // the tile's first row
    int chunk, row;
};
// Where vector i of a thread goes in LDS. If the matrix unit reads it there, the 32 channels of a
// wave are 16 of each of its tiles of 64 rows.
template <int BM> DEV u32x4 *conv_f16_slot(f16 *wt, const conv_f16_w &from, int buffer, int i) {
    typedef conv_f16_shape<BM> S;
    const int r = from.row + i * CONV_LOAD_ROWS;
    const int at = S::FROM_LDS && S::TM == 2 ? r / 32 * 16 + (r & 16) * 4 + (r & 15) : r;
    return (u32x4 *)(wt + buffer * S::W_TILE + from.chunk * S::W_CHUNK) + at;
}
// Loads a thread's vectors of a step, into wr or straight into a tile of the ring.
template <int BM, int N>
DEV void conv_f16_load_w(u32x4 (&wr)[N], f16 *wt, const rocq_k_conv_args &a, const conv_f16_w &from,
                         const uint32_t (&own)[N], const conv_step &at, int buffer) {
    if (!a.w_wide || from.row >= BM) return;
    const bool live = conv_channel(at) + 8 * from.chunk < a.c;
    const char *const step = from.w + (live ? 2 * at.k : 0);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const u32x4 *const vector = (const u32x4 *)(step + own[i]);
        if (COPIES_ASYNC) {
            copy_async(conv_f16_slot<BM>(wt, from, buffer, i), vector, live);
        } else {
            wr[i] = make4(0, 0, 0, 0);
            if (live) wr[i] = gload(vector);
        }
    }
}
// Puts them into the ring. Those that are not aligned are only loaded here.
template <int BM, int N>
DEV void conv_f16_store_w(u32x4 (&wr)[N], f16 *wt, const rocq_k_conv_args &a,
                          const conv_f16_w &from, const uint32_t (&own)[N], const conv_step &at,
                          int buffer) {
    if (from.row >= BM) return;
    if (a.w_wide) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (!COPIES_ASYNC) lput(conv_f16_slot<BM>(wt, from, buffer, i), wr[i]);
        }
        return;
    }
    const int left = a.c - (conv_channel(at) + 8 * from.chunk);
    if (left <= -8) return; // channels are multiplied 16 at a time: up to there w is 0
#pragma unroll
    for (int i = 0; i < N; i++) {
        wr[i] = conv_gather_w((const uint16_t *)(from.w + own[i]) + at.k, left);
    }
#pragma unroll
    for (int i = 0; i < N; i++) lput(conv_f16_slot<BM>(wt, from, buffer, i), wr[i]);
}

// The patches that a block multiplies: numbers first to end - 1. Frames before x's first are zeros,
// so their patches are skipped.
struct conv_range {
    int32_t first, end;
};
DEV conv_range conv_patches_of(const rocq_k_conv_args &a, const conv_place &p) {
    const int32_t patches = a.kt * a.slices, missing = (a.kt - 1 - a.past - p.frame) * a.slices;
    const int32_t first = patches * p.split / a.n_splits;
    return {first < missing ? missing : first, patches * (p.split + 1) / a.n_splits};
}

template <int BM, int F> DEV void conv_f16(const rocq_k_conv_args &a) {
    typedef conv_f16_shape<BM> S;
    enum { FROM_LDS = S::FROM_LDS, WM = S::WM, WN = S::WN, TM = S::TM, TN = S::TN };
    LDS(u32x4, tile, S::ALL);
    static_assert(16 * conv_pass_floats<TM>() <= (int)sizeof(tile), "conv_finish's work");
    static_assert(S::BN <= ROCQ_K_CONV_PATCH, "a patch without halo");
    f16 *const wt = (f16 *)tile, *const patch = wt + S::BUFFERS * S::W_TILE;
    if (a.tiles_m == 0) return;
    const conv_place p = conv_place_of(a, BM);
    const int t = (int)thread_index(), wave = matmul_wave();
    const int wm = wave % (BM / WM) * WM, wn = wave / (BM / WM) * WN;
    const uint32_t k = (uint32_t)(a.kt * a.kh * a.kw * a.c);
    const char *const w = (const char *)a.w + (int64_t)(p.w_row + p.m0) * k * 2;
    const uint32_t w_last = (uint32_t)(a.m - p.m0 < BM ? a.m - p.m0 : BM) - 1;
    const conv_f16_w from_w = {w, t % CONV_W_CHUNKS, t / CONV_W_CHUNKS};
    uint32_t own[S::N_W];
    conv_w_offsets(own, from_w.row, w_last, k, from_w.chunk);
    u32x4 wr[S::N_W];
    const auto load_w = [&](const conv_step &at, int buffer) {
        conv_f16_load_w<BM>(wr, wt, a, from_w, own, at, buffer);
    };
    const auto store_w = [&](const conv_step &at, int buffer) {
        conv_f16_store_w<BM>(wr, wt, a, from_w, own, at, buffer);
    };

    const conv_range patches = conv_patches_of(a, p);
    const int32_t end = patches.end;
    const bool common = a.x_wide && conv_is_common(a.x_activation);
    const bool has_work = p.m0 + wm < a.m; // of the wave
    frag_c c[TM][TN];
    matmul_clear(c);
    conv_step at = conv_step_of(a, patches.first);
    const auto is_fresh = [&](const conv_step &s) {
        return s.half == 0 && (!a.halo || (s.i | s.j) == 0);
    };
    // LDS holds a ring of BUFFERS tiles of w. A tile overwrites that of BUFFERS steps before, after
    // a barrier that each wave passes only once it has multiplied that, and is read after the next.
    conv_step ahead = at;
    int buffer = 0, free = 0; // tiles
    const auto begin_w = [&]() {
        if (ahead.patch < end) load_w(ahead, free);
        copies_close();
        ahead = conv_next(a, ahead);
        free = free + 1 == S::BUFFERS ? 0 : free + 1;
    };
    if (COPIES_ASYNC) {
        for (int i = 0; i < CONV_AHEAD; i++) begin_w();
    }
#pragma unroll 1
    while (at.patch < end) {
        if (is_fresh(at)) {
            block_sync_lds();
            if (!common) conv_stage_any(a, p, at, patch);
            else conv_stage<F>(a, p, at, patch);
            copies_close();
            copies_wait<0>();
            if (!COPIES_ASYNC) begin_w(); // not before: its registers are the patch's until then
        }
        copies_wait<CONV_AHEAD - 1>();
        store_w(at, buffer);
        lds_written();
        block_sync_lds();
        enum { N16 = CONV_W_BK / 16 };
        const int left = (a.c - conv_channel(at) + 15) / 16, n16 = left < N16 ? left : N16;
        const f16 *const own_w = wt + buffer * S::W_TILE;
        const f16 *const own_z = patch + at.half * (CONV_W_CHUNKS * CONV_CHUNK) + at.tap * 8;
        if constexpr (FROM_LDS) {
            static_assert(N16 == 2, "n16 is 1 or 2");
            if (n16 == 2) conv_multiply_lds<TM, 2>(c, own_w, S::W_CHUNK, own_z, a.patch_w);
            else conv_multiply_lds<TM, 1>(c, own_w, S::W_CHUNK, own_z, a.patch_w);
        }
        at = conv_next(a, at);
        buffer = buffer + 1 == S::BUFFERS ? 0 : buffer + 1;
        if (COPIES_ASYNC || !is_fresh(at)) begin_w();
        if constexpr (FROM_LDS) {
            wmma_lds_wait();
        } else if (has_work) {
            conv_multiply<TM, TN>(c, own_w + wm * 8, S::W_CHUNK,
                                  own_z + wn / 8 * a.patch_w * 8, a.patch_w * 8, n16);
        }
    }
    block_sync_lds();
    conv_finish<TM, TN>(a, p, c, (float *)tile, p.m0 + wm, p.oy0 + wn / ROCQ_K_CONV_W);
}

#define ROCQ_X(X, bm)                                                                \
    KERNEL(conv_f32_##bm, rocq_k_conv_args, 128) { conv_f16<bm, ROCQ_F32>(a); }      \
    KERNEL(conv_f16_##bm, rocq_k_conv_args, 128) { conv_f16<bm, ROCQ_F16>(a); }
ROCQ_K_CONV_TILES(ROCQ_X, )
#undef ROCQ_X

// -- conv_lds --
// [large LDS] RDNA3: skip to conv_input. Only chips with over 64 KiB of LDS run this.
// conv where the matrix unit reads both operands from LDS (WMMA_TILES): x is F16, of whole vectors
// of 8 channels, without norm, activation and scale, and a patch has a halo. Elsewhere these
// kernels are empty, and no launch has them. The order of the sums is that of conv. LDS, which a
// launch asks for: ROCQ_K_CONV_LDS_BYTES, ROCQ_K_CONV_LDS_128_BYTES.
//
// Sums of a group of four waves, 64 channels by 64 positions at a time, lie in LDS by positions,
// CONV_LDS_STRIDE floats apart. Of each vector of eight channels the first four lie in the first
// half of a position's floats, the others in the second, from CONV_LDS_HIGH on. So the threads that
// read a position, and the lanes that write the fragments, meet all banks. Below, `own` is a
// thread's index in its group; the thread stores eight channels, from m on, of four of the 8 by 8
// positions from row oy0 on.
enum { CONV_LDS_STRIDE = 64 + 4, CONV_LDS_HIGH = 32 + 4 };
DEV int conv_lds_slot(int channel) {
    return channel / 8 * 4 + channel % 4 + channel / 4 % 2 * CONV_LDS_HIGH;
}
DEV void conv_lds_vector(const float *work, int at, int vector, float v[8]) {
    const u32x4 *const from = (const u32x4 *)(work + at * CONV_LDS_STRIDE + 4 * vector);
    decode_vector<ROCQ_F32>(lget(from), 0, v);
    decode_vector<ROCQ_F32>(lget(from + CONV_LDS_HIGH / 4), 0, v + 4);
}
DEV bool conv_lds_is_live(const rocq_k_conv_args &a, const conv_place &p, int32_t oy0, int at) {
    return conv_column(a, p, p.ox0 + at % 8) < a.y.ne[1] &&
           conv_row(a, p, oy0 + at / 8) < a.y.ne[2];
}
template <int TN> DEV void conv_lds_put(float *work, const frag_c *c) {
#pragma unroll
    for (int j = 0; j < TN; j++) {
#pragma unroll
        for (int v = 0; v < 8; v++) {
            lput(work + (16 * j + frag_col(v)) * CONV_LDS_STRIDE +
                     conv_lds_slot(16 * (matmul_wave() % 4) + frag_row(v)), c[j].v[v]);
        }
    }
}
// Loads the residual of what conv_lds_store stores, before the sums are there.
DEV void conv_lds_residual(const rocq_k_conv_args &a, const conv_place &p, int32_t m, int32_t oy0,
                           int own, bool live, conv_raw (&to)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = own / 8 + 16 * i;
        to[i].lo = to[i].hi = make4(0, 0, 0, 0);
        if (!a.residual.data || !live || !conv_lds_is_live(a, p, oy0, at)) continue;
        to[i] = conv_load(a.residual.format,
                          row_of(a.residual, conv_column(a, p, p.ox0 + at % 8),
                                 conv_row(a, p, oy0 + at / 8), p.frame), m);
    }
}
// The epilogue of the thread's eight channels at four positions.
DEV void conv_lds_store(const rocq_k_conv_args &a, const conv_place &p, int32_t m, int32_t oy0,
                        int own, bool live, const conv_raw (&residual)[4], const float (&bias)[8],
                        const float *work) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = own / 8 + 16 * i;
        if (!live || !conv_lds_is_live(a, p, oy0, at)) continue;
        float v[8], r[8];
        conv_lds_vector(work, at, own % 8, v);
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = v[e] * a.y_scale + bias[e];
        if (a.residual.data) {
            conv_floats(a.residual.format, residual[i], r);
#pragma unroll
            for (int e = 0; e < 8; e++) v[e] += r[e];
        }
        conv_activate<8>(a.activation, v);
        conv_store(a.y.format, row_of(a.y, conv_column(a, p, p.ox0 + at % 8),
                                      conv_row(a, p, oy0 + at / 8), p.frame), m, v);
    }
}
// conv_lds_store for any alignment, channels and activation, and for the sums of a split. m0 is the
// group's first channel.
DEV void conv_lds_store_any(const rocq_k_conv_args &a, const conv_place &p, int32_t m0, int32_t oy0,
                            int own, const float *work) {
    const int n = a.m - m0 < 64 ? a.m - m0 : 64; // channels
#pragma unroll 1
    for (int i = own; i < 64 * n; i += 128) {
        const int at = i / n, e = i - at * n;
        const int32_t ox = conv_column(a, p, p.ox0 + at % 8);
        const int32_t oy = conv_row(a, p, oy0 + at / 8);
        if (!conv_lds_is_live(a, p, oy0, at)) continue;
        const float v = lget(work + at * CONV_LDS_STRIDE + conv_lds_slot(e));
        if (a.n_splits == 1) conv_put_any(a, ox, oy, p.frame, m0 + e, v);
        else gstore(conv_split_sums(a, ox, oy, p.frame) + p.split * a.m + m0 + e, v);
    }
}
DEV void conv_lds_bias(const rocq_k_conv_args &a, int32_t m, bool live, float (&bias)[8]) {
#pragma unroll
    for (int e = 0; e < 8; e++) bias[e] = 0.0f;
    if (a.bias && live) conv_floats(ROCQ_F32, conv_load(ROCQ_F32, (const char *)a.bias, m), bias);
}

// conv_lds_64 and conv_lds_16: 3x3 taps, or for conv_lds_64 also folded ones, up to 64 channels to
// up to 64 or 16 (TAESD's layers), kt = 1, one split. All weights stay in LDS, of a folded conv
// those of one phase: blocks are at most as many as compute units, and each takes one tile after
// another, so that weights are copied once for a block and not once for a tile, and no step of the
// sums waits for a copy or a barrier. Where the launch ahead does not write them (w_ahead, see
// rocq__conv_launch_ahead) they are copied before it has ended.
//
// A block has ROCQ_K_CONV_LDS_GROUPS groups of four waves, which share the weights: a group has
// tiles and two patches of its own, so that one group finishes its tile while another multiplies. A
// group copies the patch of its next tile while it computes one. Patches come by way of L1
// (copy_async): past it every vector was fetched by itself, and that took most of the time (H100,
// 64 channels at 512 x 512: 49 us, now 41). Where there are no more tiles than units a block is one
// group with one tile and one patch, so that blocks of two launches fit on a unit. All groups of a
// block go through as many rounds, the last of which may be empty. What a thread copies and stores
// is at the same places of every tile, so their offsets are computed once; with loops over taps,
// and the places of each tile computed anew, a tile took twice as many instructions, and ptxas
// waited for each product before the next.
//
// conv_lds_64: rows of the fragments are channels; sums go through the patch that was multiplied,
// half of the tile at a time; y and residual are F16. conv_lds_16: rows are positions, 64 at once.
//
// Geometry: blockIdx.x counts n_blocks blocks of one group or of all; tiles are those of conv,
// counted by columns, rows and frames. The offsets of x and y within a tile are 32-bit.
template <int BM> struct conv_lds_sums;
template <> struct conv_lds_sums<64> { frag_c c[1][8]; };
template <> struct conv_lds_sums<16> { frag_c c[2][1]; };
template <int BM> DEV constexpr int conv_lds_w_chunk() { return 8 * (BM + 1); }
template <int N16, int SIDE>
DEV void conv_lds_multiply(conv_lds_sums<64> &sums, const f16 *w, const f16 *patch) {
    enum { W_CHUNK = conv_lds_w_chunk<64>(), LINE = ROCQ_K_CONV_W + SIDE - 1 };
    wmma_lds_begin();
#pragma unroll
    for (int tap = 0; tap < SIDE * SIDE; tap++) {
        const f16 *const z = patch + 8 * (tap / SIDE * LINE + tap % SIDE);
#pragma unroll
        for (int s = 0; s < N16; s++) {
            wmma_lds(sums.c[0], w + 2 * (N16 * tap + s) * W_CHUNK, W_CHUNK / 8, 8,
                     z + 2 * s * CONV_CHUNK, CONV_CHUNK / 8, LINE);
        }
    }
    wmma_lds_end();
}
template <int N16, int SIDE>
DEV void conv_lds_multiply(conv_lds_sums<16> &sums, const f16 *w, const f16 *patch) {
    enum { W_CHUNK = conv_lds_w_chunk<16>(), LINE = ROCQ_K_CONV_W + SIDE - 1 };
    wmma_lds_begin();
#pragma unroll
    for (int tap = 0; tap < SIDE * SIDE; tap++) {
        const f16 *const z = patch + 8 * (tap / SIDE * LINE + tap % SIDE);
#pragma unroll
        for (int s = 0; s < N16; s++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                wmma_lds(sums.c[half], z + 2 * s * CONV_CHUNK + 8 * 8 * LINE * half,
                         CONV_CHUNK / 8, LINE, w + 2 * (N16 * tap + s) * W_CHUNK, W_CHUNK / 8, 8);
            }
        }
    }
    wmma_lds_end();
}
// What a thread stores of every tile of conv_lds_64: vectors of eight channels, of every other row
// of a column of the tile.
struct conv_lds_own {
    int column, row, vector, own, group;
    int32_t y_offset, r_offset;
    float bias[8], least;
};
template <int BM>
DEV conv_lds_own conv_lds_own_of(const rocq_k_conv_args &a, int group, int own) {
    conv_lds_own o;
    o.column = own / 8 % 8, o.row = own / 64, o.vector = own % 8, o.own = own, o.group = group;
    o.y_offset = ((o.row * (int32_t)a.y.stride[1] + o.column * (int32_t)a.y.stride[0])
                  << a.folded) + 16 * o.vector;
    o.r_offset = ((o.row * (int32_t)a.residual.stride[1] +
                   o.column * (int32_t)a.residual.stride[0]) << a.folded) + 16 * o.vector;
    o.least = a.activation == ROCQ_ACT_RELU ? 0.0f : bits<float>(0xff800000u);
    conv_lds_bias(a, 8 * o.vector, BM == 64 && 8 * o.vector < a.m, o.bias);
    return o;
}
// The tile's sums, of products that are under way, become y. work: the patch of the tile.
DEV void conv_lds_finish(const rocq_k_conv_args &a, const conv_place &p, bool has_tile,
                         conv_lds_sums<64> &sums, float *work, const conv_lds_own &o) {
    const bool has_residual = a.residual.data != 0;
    const bool stores = has_tile && 8 * o.vector < a.m &&
                        conv_column(a, p, p.ox0 + o.column) < a.y.ne[1];
    const int32_t all = (a.y.ne[2] - p.phase_y + a.folded) >> a.folded; // rows of the phase
    const int32_t rows = stores ? all - p.oy0 - o.row : 0; // from the thread's first on
    const int32_t ox = conv_column(a, p, p.ox0), oy = conv_row(a, p, p.oy0);
    u32x4 residual[8];
    if (has_residual) {
        const char *const from = row_of(a.residual, ox, oy, p.frame) + o.r_offset;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (2 * i >= rows) residual[i] = make4(0, 0, 0, 0);
            else residual[i] = gload((const u32x4 *)(from + (2 * i * a.residual.stride[1]
                                                             << a.folded)));
        }
    }
    wmma_lds_wait();
    char *const to = row_of(a.y, ox, oy, p.frame) + o.y_offset;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        group_sync_lds(o.group);
        conv_lds_put<4>(work, sums.c[0] + 4 * half);
        group_sync_lds(o.group);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (2 * (4 * half + i) >= rows) continue;
            float v[8], r[8];
            conv_lds_vector(work, o.own / 8 + 16 * i, o.vector, v);
#pragma unroll
            for (int e = 0; e < 8; e++) v[e] = v[e] * a.y_scale + o.bias[e];
            if (has_residual) {
                decode_vector<ROCQ_F16>(residual[4 * half + i], 0, r);
                decode_vector<ROCQ_F16>(residual[4 * half + i], 1, r + 4);
#pragma unroll
                for (int e = 0; e < 8; e++) v[e] += r[e];
            }
#pragma unroll
            for (int e = 0; e < 8; e++) v[e] = v[e] <= o.least ? o.least : v[e]; // NaN stays
            gstore((u32x4 *)(to + (2 * (4 * half + i) * a.y.stride[1] << a.folded)),
                   conv_halves(v));
        }
    }
}
// Rows of the fragments are positions, so a thread has few channels of each, and stores them one by
// one.
DEV void conv_lds_finish(const rocq_k_conv_args &a, const conv_place &p, bool has_tile,
                         conv_lds_sums<16> &sums, float *, const conv_lds_own &) {
    wmma_lds_wait();
    if (!has_tile) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int v = 0; v < 8; v++) {
            const int at = 64 * i + 16 * (matmul_wave() % 4) + frag_row(v), m = frag_col(v);
            if (m >= a.m || !conv_lds_is_live(a, p, p.oy0, at)) continue;
            conv_put_any(a, conv_column(a, p, p.ox0 + at % 8), conv_row(a, p, p.oy0 + at / 8),
                         p.frame, m, sums.c[i][0].v[v]);
        }
    }
}
// The patch of a tile, of which a thread copies a vector at every 16th position. SIDE: 3, or 2 for
// folded weights.
template <int SIDE> struct conv_lds_small_patch {
    enum {
        W = ROCQ_K_CONV_W + SIDE - 1, H = ROCQ_K_CONV_H + SIDE - 1, N = W * H,
        PIECES = (N + 15) / 16
    };
};
// Which vector a thread copies, and whether it is there in LDS, and live in w and x. own: the
// thread's index in its group.
struct conv_lds_vectors {
    int own, vector;
    bool there, live;
};
// Copies all weights of a phase, from row w_row on: columns of BM rows, for each tap `columns` of 8
// channels.
template <int BM, int SIDE>
DEV void conv_lds_copy_w(f16 *w, const rocq_k_conv_args &a, int32_t w_row, int columns,
                         const conv_lds_vectors &v) {
    enum { W_CHUNK = conv_lds_w_chunk<BM>() };
    const int n_groups = (int)n_threads() / 128;
    const uint32_t k = SIDE * SIDE * (uint32_t)a.c;
    const uint16_t *const w_phase = (const uint16_t *)a.w + (int64_t)w_row * k;
#pragma unroll 2
    for (int i = (int)thread_index() / 8; v.there && i < BM * SIDE * SIDE; i += 16 * n_groups) {
        const int row = i % BM, tap = i / BM;
        const bool inside = v.live && row < a.m;
        const uint32_t from = (uint32_t)row * k + (uint32_t)(tap * a.c + 8 * v.vector);
        copy_async((u32x4 *)(w + (columns * tap + v.vector) * W_CHUNK) + row,
                   (const u32x4 *)(w_phase + (inside ? from : 0)), inside);
    }
}
// Where x has the thread's vectors of a tile, in bytes. A tile's first row and column are even, so
// that with `upsample` positions of x lie alike in all tiles.
template <int SIDE, int PIECES>
DEV void conv_lds_offsets(int32_t (&offsets)[PIECES], const rocq_k_conv_args &a,
                          const conv_place &place, const conv_lds_vectors &v) {
    enum { W = conv_lds_small_patch<SIDE>::W };
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int q = v.own / 8 + 16 * i, py = q / W;
        offsets[i] = ((py - place.pad_y) >> a.upsample) * (int32_t)a.x.stride[1] +
                     ((q - py * W - place.pad_x) >> a.upsample) * (int32_t)a.x.stride[0] +
                     (v.live ? 16 * v.vector : 0);
    }
}
// Copies a tile's patch, if it is there: by the offsets, or at the edges of z position by position.
template <int SIDE, int PIECES>
DEV void conv_lds_copy_patch(f16 *patch, const rocq_k_conv_args &a, const conv_place &p,
                             const conv_lds_vectors &v, const int32_t (&offsets)[PIECES],
                             bool there) {
    typedef conv_lds_small_patch<SIDE> S;
    u32x4 *const to = (u32x4 *)(patch + v.vector * CONV_CHUNK) + v.own / 8;
    const int32_t zx = p.ox0 - p.pad_x, zy = p.oy0 - p.pad_y;
    const bool inner = zx >= 0 && zy >= 0 && zx + S::W <= a.z_w && zy + S::H <= a.z_h;
    if (there && inner) {
        const char *const from = (const char *)a.x.data + p.frame * a.x.stride[2] +
                                 (p.oy0 >> a.upsample) * a.x.stride[1] +
                                 (p.ox0 >> a.upsample) * a.x.stride[0];
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            if (16 * i + 15 >= S::N && v.own / 8 >= S::N - 16 * i) break;
            copy_async(to + 16 * i, (const u32x4 *)(from + offsets[i]), v.live);
        }
    } else if (there) {
        const conv_patch from = conv_patch_of(a, p, conv_step_of(a, 0));
#pragma unroll 4
        for (int q = v.own / 8; q < S::N; q += 16) {
            const conv_position at = conv_position_of(a, from, q);
            const char *row = from.frame + at.iy * a.x.stride[1] + at.ix * a.x.stride[0];
            copy_async(to + q - v.own / 8, (const u32x4 *)row + (v.live ? v.vector : 0),
                       at.inside && v.live);
        }
    }
}

template <int BM, int SIDE> DEV void conv_lds_small(const rocq_k_conv_args &a) {
    enum {
        W_ALL = ROCQ_K_CONV_LDS_TAPS * 8 * conv_lds_w_chunk<BM>(), PATCH = CONV_BK / 8 * CONV_CHUNK,
        MOST = ROCQ_K_CONV_LDS_GROUPS, PHASES = SIDE == 2 ? 4 : 1
    };
    static_assert(2 * (W_ALL + 2 * MOST * PATCH) == ROCQ_K_CONV_LDS_BYTES(BM, MOST), "LDS");
    static_assert(4 * CONV_LDS_STRIDE * 64 <= 2 * PATCH, "sums of half a tile");
    LDS_GRANTED(u32x4, tile, ROCQ_K_CONV_LDS_BYTES(BM, MOST) / 16);
    if (a.tiles_m == 0) return;
    if (!a.w_ahead) launch_begin();
    const int n_groups = (int)n_threads() / 128;
    const int group = matmul_wave() / 4, own = (int)thread_index() % 128, vector = own % 8;
    f16 *const w = (f16 *)tile, *const patches = w + W_ALL + group * 2 * PATCH;
    const bool deep = a.c > 32; // else 32 channels are multiplied; past C there are zeros
    const int columns = deep ? 8 : 4;
    const conv_lds_vectors copied = {own, vector, vector < columns, 8 * vector < a.c};
    const int32_t index = (int32_t)(a.common.block0 + block_index());
    const int32_t first = index / PHASES; // of the blocks of its phase
    conv_place place;
    conv_place_phase(a, place, index % PHASES);

    conv_lds_copy_w<BM, SIDE>(w, a, place.w_row, columns, copied);
    if (a.w_ahead) launch_begin();
    launch_next();
    const int32_t frame_tiles = a.tiles_x * a.tiles_y;
    const int32_t n_blocks = a.n_blocks / PHASES;
    const int32_t step = n_blocks * n_groups;
    const auto place_of_tile = [&](int32_t number) {
        conv_place p = place;
        p.frame = number / frame_tiles;
        const int32_t at = number - p.frame * frame_tiles, row = at / a.tiles_x;
        p.m0 = p.split = 0;
        p.ox0 = (at - row * a.tiles_x) * ROCQ_K_CONV_W;
        p.oy0 = row * ROCQ_K_CONV_H;
        return p;
    };
    int32_t offsets[conv_lds_small_patch<SIDE>::PIECES];
    conv_lds_offsets<SIDE>(offsets, a, place, copied);
    const auto load = [&](int32_t number, const conv_place &p, f16 *patch) {
        const bool there = number < a.tile_end && copied.there;
        conv_lds_copy_patch<SIDE>(patch, a, p, copied, offsets, there);
        copies_close();
    };
    const int32_t behind = a.tile_end - a.tile0 - first; // tiles from the block's first on
    const int32_t rounds = (behind + step - 1) / step;   // of group 0, which has most
    int32_t number = a.tile0 + first + group * n_blocks;
    conv_place p = place_of_tile(number);
    load(number, p, patches);
    const conv_lds_own store = conv_lds_own_of<BM>(a, group, own);
    copies_wait<0>();
    lds_written();
    block_sync_lds();
    // Groups take turns to multiply. Else all would multiply at once, each at a third of the speed,
    // and then all finish their tiles at once, while the matrix unit is idle.
    if (group == n_groups - 1) turn_pass(0);
#pragma unroll 1
    for (int32_t round = 0; round < rounds; round++) {
        f16 *const patch = patches + (round & 1) * PATCH;
        const conv_place next = place_of_tile(number + step);
        load(number + step, next, patches + (~round & 1) * PATCH);
        const bool has_tile = number < a.tile_end;
        conv_lds_sums<BM> sums;
        matmul_clear(sums.c);
        turn_take(group);
        if (has_tile) {
            if (deep) conv_lds_multiply<4, SIDE>(sums, w, patch);
            else conv_lds_multiply<2, SIDE>(sums, w, patch);
        }
        if (group < n_groups - 1) turn_pass(group + 1);
        else if (round + 1 < rounds) turn_pass(0);
        conv_lds_finish(a, p, has_tile, sums, (float *)patch, store);
        copies_wait<0>();
        lds_written();
        group_sync_lds(group);
        number += step;
        p = next;
    }
}
KERNEL_AHEAD(conv_lds_64, rocq_k_conv_args, 128 * ROCQ_K_CONV_LDS_GROUPS, ROCQ_K_CONV_LDS_GROUPS) {
    if constexpr (WMMA_TILES) {
        if (a.folded) conv_lds_small<64, 2>(a);
        else conv_lds_small<64, 3>(a);
    }
}
KERNEL_AHEAD(conv_lds_16, rocq_k_conv_args, 128 * ROCQ_K_CONV_LDS_GROUPS, ROCQ_K_CONV_LDS_GROUPS) {
    if constexpr (WMMA_TILES) conv_lds_small<16, 3>(a);
}

// conv_lds_128: tiles of 128 channels, 64 for each of two groups of four waves, by 8 columns and
// ROCQ_K_CONV_LDS_H rows; four taps at least, 3 by 3 at most. A step is a tap and
// 64 channels. Its products are begun before those of the step before are waited for, so
// that the block, which is alone on its compute unit, always has work for the matrix unit. Both
// groups read the same positions, so a clock of the matrix unit moves 100 bytes of LDS, of 128 at
// most; tiles of 128 by 128 would move 133.
//
// Blocks are at most as many as compute units, and each takes one tile after another: while it
// multiplies the last patch of a tile, it copies the first one of the next. So a tile costs no
// more than its steps and the time in which its sums become y.
//
// LDS has a ring of STAGES steps of w, copied AHEAD steps ahead, and two patches: while one is
// multiplied, the next is copied into the other, a few positions with each step. That begins with
// the second step, whose barrier says that all waves have multiplied the patch that was there
// before. It ends with the last step but two, since the first step of the next patch waits for all
// copies except those of the last steps. Behind them each group has room for the sums of 64
// positions, on their way to y.
//
// Geometry: 256 threads; blockIdx.x counts n_blocks blocks; tiles, from tile0 to tile_end - 1, are
// those of conv, counted by frames last.
enum {
    CONV_LDS_W = 8 * (128 + 1), CONV_LDS_Z = 8 * (ROCQ_K_CONV_LDS_PATCH + 1), // chunks, halves
    CONV_LDS_PASSES = 8 * ROCQ_K_CONV_LDS_H / 64 // positions of a tile by 64
};
// Begins a batch: the products of 16 N16 channels of a tap. The batch is also ended here, before
// the two forms of a step (N16 4 and 2) meet again. Behind the branch between them, ptxas would end
// it by an empty batch of its own, and wmma_lds_wait<1>, which leaves the last batch alone, would
// wait for the products.
template <int N16, int TN>
DEV void conv_lds_step(frag_c (&c)[TN], const f16 *w, const f16 *z, int line) {
    wmma_lds_begin();
#pragma unroll
    for (int s = 0; s < N16; s++) {
        wmma_lds(c, w + 2 * s * CONV_LDS_W, CONV_LDS_W / 8, 8, z + 2 * s * CONV_LDS_Z,
                 CONV_LDS_Z / 8, line);
    }
    wmma_lds_end();
}
// Where a block is in its work: a patch of one of its tiles.
struct conv_lds_patch {
    int32_t tile;  // its number among the tiles of all frames
    int32_t end;   // the number behind that of the tile's last patch
    conv_place p;  // of the tile
    conv_step at;  // the patch's first step
};
// The first patch of a tile, and the patch that a block multiplies after another.
DEV conv_lds_patch conv_lds_tile(const rocq_k_conv_args &a, int32_t tile) {
    const uint32_t of_frame = ((uint32_t)a.tiles_m << 2 * a.folded) * (uint32_t)a.tiles_x *
                              (uint32_t)a.tiles_y * (uint32_t)a.n_splits;
    const uint32_t frame = (uint32_t)tile / of_frame;
    conv_lds_patch n;
    n.tile = tile;
    n.p = conv_place_at(a, 128, (uint32_t)tile - frame * of_frame, (int32_t)frame);
    n.p.oy0 *= ROCQ_K_CONV_LDS_H / ROCQ_K_CONV_H;
    // Frames before x's first are zeros, so their patches are skipped, all but a split's last
    const int32_t all = a.kt * a.slices, missing = (a.kt - 1 - a.past - n.p.frame) * a.slices;
    const int32_t from = all * n.p.split / a.n_splits;
    n.end = all * (n.p.split + 1) / a.n_splits;
    n.at = conv_step_of(a, missing < from ? from : missing < n.end ? missing : n.end - 1);
    return n;
}
DEV conv_lds_patch conv_lds_next(const rocq_k_conv_args &a, const conv_lds_patch &own) {
    if (own.at.patch + 1 == own.end) return conv_lds_tile(a, own.tile + a.n_blocks);
    conv_lds_patch n = own;
    n.at = conv_step_of(a, own.at.patch + 1);
    return n;
}
// A group's sums become y, 64 positions at a time, or the sums of a split.
template <int TN>
DEV void conv_lds_128_finish(const rocq_k_conv_args &a, const conv_place &p, frag_c (&c)[TN],
                             float *work) {
    const int t = (int)thread_index(), group = t / 128, own = t % 128;
    const int32_t m0 = p.m0 + 64 * group, m = m0 + 8 * (own % 8);
    const bool wide = a.n_splits == 1 && a.y_wide && conv_is_common(a.activation);
    const bool stores = wide && m < a.m;
    float bias[8];
    conv_lds_bias(a, m, stores, bias);
    conv_raw residual[4];
    if (wide) conv_lds_residual(a, p, m, p.oy0, own, stores, residual);
#pragma unroll 1
    for (int i = 0; i < CONV_LDS_PASSES; i++) {
        group_sync_lds(group); // the sums before are read
#pragma unroll
        for (int j = 0; j < CONV_LDS_PASSES; j++) {
            if (j == i) conv_lds_put<4>(work, c + 4 * j);
        }
        group_sync_lds(group);
        const int32_t oy0 = p.oy0 + 8 * i;
        if (!wide) {
            conv_lds_store_any(a, p, m0, oy0, own, work);
            continue;
        }
        conv_lds_store(a, p, m, oy0, own, stores, residual, bias, work);
        if (i + 1 < CONV_LDS_PASSES) {
            conv_lds_residual(a, p, m, oy0 + 8, own, stores, residual);
        }
    }
}
// Where a thread finds w: vector thread % 8 of row thread / 8 of the tile and of every 32nd from
// there on.
struct conv_lds_source {
    const char *at; // of the first tap
    uint32_t live;  // bits
};
DEV conv_lds_source conv_lds_source_of(const rocq_k_conv_args &a, const conv_lds_patch &n,
                                       uint32_t k) {
    const int t = (int)thread_index(), vector = t % 8;
    conv_lds_source from = {(const char *)a.w, 0};
    const int32_t row = n.p.m0 + t / 8;
    if (n.tile >= a.tile_end || 64 * n.at.slice + 8 * vector >= a.c) return from;
    from.at += 2 * ((int64_t)(n.p.w_row + row) * k + n.at.k + 8 * vector);
#pragma unroll
    for (int i = 0; i < 4; i++) from.live |= (uint32_t)(row + 32 * i < a.m) << i;
    return from;
}
// Copies a patch, or the part of it that is `count` times 32 positions, from 32 times `begin` on.
enum { CONV_LDS_COPIES = (ROCQ_K_CONV_LDS_PATCH + 31) / 32 };
DEV void conv_lds_copy_z(f16 *patch, const rocq_k_conv_args &a, int32_t slice,
                         const conv_patch &from, int begin = 0, int count = CONV_LDS_COPIES) {
    const int t = (int)thread_index(), vector = t % 8;
    const int32_t c = 64 * slice + 8 * vector;
    const bool live = c < a.c;
    for (int i = begin; i < begin + count && i < CONV_LDS_COPIES; i++) {
        const int q = t / 8 + 32 * i;
        if (q >= a.patch_n) break;
        const conv_position at = conv_position_of(a, from, q);
        const char *row = from.frame + at.iy * a.x.stride[1] + at.ix * a.x.stride[0];
        copy_async((u32x4 *)(patch + vector * CONV_LDS_Z) + q,
                   (const u32x4 *)row + (live ? c / 8 : 0), at.inside && live);
    }
}
DEV void conv_lds_128_run(const rocq_k_conv_args &a) {
    enum {
        W_TILE = 8 * CONV_LDS_W, STAGES = ROCQ_K_CONV_LDS_STAGES, AHEAD = STAGES - 2,
        PATCH = 8 * CONV_LDS_Z
    };
    static_assert(2 * (STAGES * W_TILE + 2 * PATCH) + 2 * 4 * CONV_LDS_STRIDE * 64 ==
                  ROCQ_K_CONV_LDS_128_BYTES, "LDS");
    LDS_GRANTED(u32x4, tile, ROCQ_K_CONV_LDS_128_BYTES / 16);
    if (a.tiles_m == 0) return;
    const int t = (int)thread_index(), group = t / 128, vector = t % 8;
    f16 *const wt = (f16 *)tile, *const patches = wt + STAGES * W_TILE;
    float *const work = (float *)(patches + 2 * PATCH) + group * 64 * CONV_LDS_STRIDE;
    const int n_taps = a.kw * a.kh;

    const uint32_t k = (uint32_t)(a.kt * n_taps * a.c), apart = 64 * k; // bytes
    const auto load_w = [&](const char *at, uint32_t rows, int tap, int stage) {
        u32x4 *const to = (u32x4 *)(wt + stage * W_TILE + vector * CONV_LDS_W) + t / 8;
        if (rows) at += 2 * tap * a.c;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool live = rows >> i & 1;
            copy_async(to + 32 * i, (const u32x4 *)(at + (live ? i * apart : 0)), live);
        }
    };
    const int per_step = (CONV_LDS_COPIES + n_taps - 4) / (n_taps - 3);

    conv_lds_patch own =
        conv_lds_tile(a, a.tile0 + (int32_t)(a.common.block0 + block_index()));
    conv_lds_source w = conv_lds_source_of(a, own, k);
    for (int i = 0; i < AHEAD; i++) {
        load_w(w.at, w.live, i, i);
        if (i == 0) conv_lds_copy_z(patches, a, own.at.slice, conv_patch_of(a, own.p, own.at));
        copies_close();
    }
    frag_c c[1][4 * CONV_LDS_PASSES];
    int stage = 0, ahead = AHEAD; // stages: of the step, and of the one AHEAD steps ahead
    f16 *patch = patches, *other = patches + PATCH;
    bool more = true;
#pragma unroll 1
    while (more) {
        matmul_clear(c);
        const conv_place p = own.p;
        bool last = false;
#pragma unroll 1
        while (!last) {
            const conv_lds_patch next = conv_lds_next(a, own);
            const conv_lds_source next_w = conv_lds_source_of(a, next, k);
            const conv_patch from = conv_patch_of(a, next.p, next.at);
            const int32_t left = a.c - 64 * own.at.slice;
            last = next.tile != own.tile;
            more = next.tile < a.tile_end;
            const f16 *z = patch;
            int column = 0;
#pragma unroll 1
            for (int tap = 0; tap < n_taps; tap++) {
                copies_wait<AHEAD - 1>();
                lds_written();
                block_sync_lds();
                const f16 *const own_w = wt + stage * W_TILE + 64 * 8 * group;
                if (left > 32) conv_lds_step<4>(c[0], own_w, z, a.patch_w);
                else conv_lds_step<2>(c[0], own_w, z, a.patch_w);
                wmma_lds_wait<1>();
                const bool same = tap + AHEAD < n_taps;
                load_w(same ? w.at : next_w.at, same ? w.live : next_w.live,
                       tap + AHEAD - (same ? 0 : n_taps), ahead);
                if (tap > 0 && more) {
                    conv_lds_copy_z(other, a, next.at.slice, from, (tap - 1) * per_step, per_step);
                }
                copies_close();
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                ahead = ahead + 1 == STAGES ? 0 : ahead + 1;
                z += 8;
                if (++column == a.kw) column = 0, z += 8 * (a.patch_w - a.kw);
            }
            own = next;
            w = next_w;
            f16 *const free = patch;
            patch = other, other = free;
        }
        wmma_lds_wait();
        conv_lds_128_finish(a, p, c[0], work);
    }
    copies_wait<0>();
}
KERNEL_WAVES(conv_lds_128, rocq_k_conv_args, 256, 2) {
    if constexpr (WMMA_TILES) conv_lds_128_run(a);
}

// conv_input: y = x after norm and activation, times x_scale, in F16: the work of conv_stage once,
// where many blocks would repeat it. A thread takes eight channels of four positions of a frame, of
// which the loads are in flight together. Geometry: 256 threads; blockIdx.z counts frames. Bytes: x
// and y once.
KERNEL(conv_input, rocq_k_conv_args, 256) {
    enum { PAR = 4 };
    if (a.slices == 0) return;
    const uint32_t item = (a.common.block0 + block_index()) * 256 + thread_index();
    const uint32_t vectors = (uint32_t)a.c / 8, group = item / vectors;
    const uint32_t n = (uint32_t)a.x.ne[1] * (uint32_t)a.x.ne[2], first = group * PAR;
    if (first >= n) return;
    const int32_t c = 8 * (int32_t)(item - group * vectors), frame = (int32_t)block_index_z();
    conv_raw r[PAR];
    float factor[PAR];
#pragma unroll
    for (int b = 0; b < PAR; b++) {
        const uint32_t q = first + (uint32_t)b < n ? first + (uint32_t)b : n - 1;
        const uint32_t iy = q / (uint32_t)a.x.ne[1], ix = q - iy * (uint32_t)a.x.ne[1];
        r[b] = conv_load(a.x.format, row_of(a.x, ix, iy, frame), c);
        factor[b] = 1.0f;
        if (a.stats.data && a.stats.ne[0] == 1) {
            factor[b] = gload((const float *)row_of(a.stats, ix, iy, frame));
        }
    }
    conv_affine<8> norm;
    if (a.stats.data) norm = conv_norm<8>(a, c, frame);
#pragma unroll
    for (int b = 0; b < PAR; b++) {
        float v[8];
        conv_floats(a.x.format, r[b], v);
        if (a.stats.data) {
#pragma unroll
            for (int e = 0; e < 8; e++) {
                v[e] = fmaf(v[e] * factor[b], norm.scale[e], norm.shift[e]);
            }
        }
        conv_activate<8>(a.x_activation, v);
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] *= a.x_scale;
        if (first + (uint32_t)b >= n) break;
        conv_store(ROCQ_F16, (char *)a.y.data + ((int64_t)frame * n + first + b) * a.c * 2, c, v);
    }
}

// conv_merge: the sum of the splits, added in their order, then as conv. A thread takes eight
// channels of a position of y, of which there are ceil(M / 8), counted through all positions; fewer
// than 2^32. Geometry: 256 threads. Bytes: the sums of every split once, from L2.
KERNEL(conv_merge, rocq_k_conv_args, 256) {
    if (a.tiles_m == 0) return;
    const uint32_t item = (a.common.block0 + block_index()) * 256 + thread_index();
    const uint32_t vectors = (uint32_t)(a.m + 7) / 8, r = item / vectors;
    if (r >= rows_of(a.y)) return;
    const int32_t m = 8 * (int32_t)(item - r * vectors);
    const uint32_t line = r / (uint32_t)a.y.ne[1], frame = line / (uint32_t)a.y.ne[2];
    const int32_t ox = (int32_t)(r - line * (uint32_t)a.y.ne[1]);
    const int32_t oy = (int32_t)(line - frame * (uint32_t)a.y.ne[2]);
    const float *const splits = conv_split_sums(a, ox, oy, (int32_t)frame);
    if (!a.y_wide || !conv_is_common(a.activation)) {
#pragma unroll 1
        for (int32_t e = m; e < m + 8 && e < a.m; e++) {
            float v = 0.0f;
            for (int s = 0; s < a.n_splits; s++) v += gload(splits + (int64_t)s * a.m + e);
            conv_put_any(a, ox, oy, (int32_t)frame, e, v);
        }
        return;
    }
    float v[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
    for (int s = 0; s < a.n_splits; s++) {
        const char *const from = (const char *)(splits + (int64_t)s * a.m);
        float own[8];
        conv_floats(ROCQ_F32, conv_load(ROCQ_F32, from, m), own);
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] += own[e];
    }
    conv_raw loaded;
    loaded.lo = loaded.hi = make4(0, 0, 0, 0);
    if (a.residual.data) {
        loaded = conv_load(a.residual.format, row_of(a.residual, ox, oy, frame), m);
    }
    conv_put(a, ox, oy, (int32_t)frame, m, loaded, v);
}

// -- norm_stats --
// The moments of a set are the number of its elements, their mean, and the sum of their squared
// differences from the mean; those of two sets together are as Chan, Golub and LeVeque give them
// (1979). No sum of plain squares is ever taken, so a mean that is large beside the deviation costs
// no digits, and no sum in a row has more than ROCQ_K_STATS_RUN terms, so neither does a large
// picture.
//
// norm_stats: per channel, over a share of a frame's positions. A thread takes 8 neighbouring
// channels of every step-th position. Of each channel it sums the differences from the first
// element that it met, and their squares. Then one thread a channel merges the threads' moments in
// their order, and stores mean and sum in work, [2, C, shares, N]. Geometry: 256 threads;
// blockIdx.x counts blocks of 256 channels fastest, then shares; blockIdx.z frames. LDS: 16 KB.
// norm_stats_merge: one block of 256 threads a group and frame. A thread merges every 256th of its
// channels and shares in their order, then pairs of threads are merged. Bytes: x once.
struct stats_moments { float n, mean, sum; };
DEV stats_moments stats_merge(const stats_moments &a, const stats_moments &b) {
    if (b.n == 0.0f) return a;
    if (a.n == 0.0f) return b;
    const float n = a.n + b.n, d = b.mean - a.mean, share = b.n / n;
    return {n, fmaf(d, share, a.mean), a.sum + fmaf(d * d, a.n * share, b.sum)};
}

// The first position of a share, which ends where the next one begins.
DEV int32_t stats_first(const rocq_k_norm_stats_args &a, int32_t share) {
    const int64_t positions = (int64_t)a.x.ne[1] * a.x.ne[2];
    return (int32_t)(positions * share / a.n_shares);
}

KERNEL(norm_stats, rocq_k_norm_stats_args, 256) {
    LDS(float, means, 256 * 8);
    LDS(float, squares, 256 * 8);
    if (a.n_shares == 0) return;
    const int32_t channels = a.x.ne[0], blocks = (channels + 255) / 256;
    const int32_t block = (int32_t)(a.common.block0 + block_index());
    const int32_t share = block / blocks, c0 = (block - share * blocks) * 256;
    const int32_t frame = (int32_t)block_index_z(), t = (int32_t)thread_index();
    const int32_t own = channels - c0 < 256 ? channels - c0 : 256; // channels of the block
    const int32_t chunks = (own + 7) / 8, step = 256 / chunks, first = t / chunks;
    const int32_t begin = stats_first(a, share), n = stats_first(a, share + 1) - begin;
    const int32_t c = c0 + 8 * (t - first * chunks);
    const int32_t count = first < step && first < n ? (n - first + step - 1) / step : 0;
    const char *const x = (const char *)a.x.data + frame * a.x.stride[2];
    float pivot[8], sum[8], square[8];
#pragma unroll
    for (int e = 0; e < 8; e++) pivot[e] = sum[e] = square[e] = 0.0f;
    const auto row = [&](int32_t i) {
        const uint32_t at = (uint32_t)(begin + first + i * step);
        const uint32_t line = a.packed ? 0 : at / (uint32_t)a.x.ne[1];
        return x + line * a.x.stride[1] + (at - line * (uint32_t)a.x.ne[1]) * a.x.stride[0];
    };
    const auto add = [&](const float v[8]) {
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float d = v[e] - pivot[e];
            sum[e] += d;
            square[e] = fmaf(d, d, square[e]);
        }
    };
    float v[8];
    if (count > 0) conv_gather(a.x.format, row(0), c, channels, pivot);
    int32_t i = 0;
#pragma unroll 1
    for (; a.wide && i + 4 <= count; i += 4) {
        conv_raw r[4];
#pragma unroll
        for (int b = 0; b < 4; b++) r[b] = conv_load(a.x.format, row(i + b), c);
#pragma unroll
        for (int b = 0; b < 4; b++) {
            conv_floats(a.x.format, r[b], v);
            add(v);
        }
    }
#pragma unroll 1
    for (; i < count; i++) {
        conv_gather(a.x.format, row(i), c, channels, v);
        add(v);
    }
    const float inverse = count > 0 ? 1.0f / (float)count : 0.0f;
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const float d = sum[e] * inverse;
        lput(means + 8 * t + e, pivot[e] + d);
        lput(squares + 8 * t + e, fmaf(-d, sum[e], square[e]));
    }
    block_sync_lds();
    if (t >= own) return;
    stats_moments all = {0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int32_t s = 0; s < step && s < n; s++) {
        const int at = 8 * s * chunks + t;
        all = stats_merge(all, {(float)((n - s + step - 1) / step), lget(means + at),
                                lget(squares + at)});
    }
    float *to = a.work + 2 * (((int64_t)frame * a.n_shares + share) * channels + c0 + t);
    gstore(to, all.mean);
    gstore(to + 1, all.sum);
}

KERNEL(norm_stats_merge, rocq_k_norm_stats_args, 256) {
    LDS(float, work, 256 * 3);
    if (a.n_shares == 0) return;
    const int32_t g = (int32_t)(a.common.block0 + block_index()), frame = (int32_t)block_index_z();
    const int32_t t = (int32_t)thread_index(), channels = a.x.ne[0];
    const uint32_t items = (uint32_t)a.group * (uint32_t)a.n_shares;
    stats_moments all = {0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (uint32_t i = (uint32_t)t; i < items; i += 256) {
        const int32_t share = (int32_t)(i / (uint32_t)a.group);
        const int32_t c = g * a.group + (int32_t)(i - (uint32_t)share * (uint32_t)a.group);
        const float *from = a.work + 2 * (((int64_t)frame * a.n_shares + share) * channels + c);
        const int32_t n = stats_first(a, share + 1) - stats_first(a, share);
        all = stats_merge(all, {(float)n, gload(from), gload(from + 1)});
    }
#pragma unroll 1
    for (int half = 128; half > 0; half /= 2) {
        if (t >= half && t < 2 * half) {
            lput(work + 3 * t, all.n);
            lput(work + 3 * t + 1, all.mean);
            lput(work + 3 * t + 2, all.sum);
        }
        block_sync_lds();
        if (t < half) {
            const int from = 3 * (t + half);
            all = stats_merge(
                all, {lget(work + from), lget(work + from + 1), lget(work + from + 2)});
        }
    }
    if (t != 0) return;
    if (a.moments.data) {
        float *had = (float *)row_of(a.moments, g, frame, 0);
        if (!a.first) all = stats_merge({gload(had), gload(had + 1), gload(had + 2)}, all);
        gstore(had, all.n);
        gstore(had + 1, all.mean);
        gstore(had + 2, all.sum);
    }
    if (a.stats.data) {
        float *stats = (float *)row_of(a.stats, g, frame, 0);
        gstore(stats, all.mean);
        gstore(stats + 1, 1.0f / sqrtf(all.sum / all.n + a.eps));
    }
}

// norm_stats_positions: stats[p] = 1 / sqrt(mean over c of x[c, p]^2 + eps). A wave takes a
// position and a lane every 32nd channel. Geometry: 256 threads, 8 positions.
KERNEL(norm_stats_positions, rocq_k_norm_stats_args, 256) {
    if (a.x.ne[0] == 0) return;
    const uint32_t r = (a.common.block0 + block_index()) * 8 + (uint32_t)matmul_wave();
    if (r >= rows_of(a.x)) return;
    const place at = place_of(a.x, r);
    const char *const x = row_of(a.x, at.i1, at.i2, at.i3);
    float sum = 0.0f;
#pragma unroll 4
    for (int32_t c = lane_index(); c < a.x.ne[0]; c += 32) {
        const float v = get_float(a.x.format, x, c);
        sum = fmaf(v, v, sum);
    }
    sum = wave_sum(sum);
    if (lane_index() != 0) return;
    gstore((float *)row_of(a.stats, at.i1, at.i2, at.i3),
           1.0f / sqrtf(sum / (float)a.x.ne[0] + a.eps));
}

// -- resize --
// y = x at another size, as in rocq_resize_params. A thread takes a quad of channels of a position
// of y; quads are counted through all positions, fewer than 2^32. Geometry: 256 threads.
struct resize_between { int32_t first, second; float share; };
DEV resize_between resize_at(int32_t bilinear, int32_t o, int32_t n_y, int32_t n_x) {
    if (!bilinear) {
        const int32_t at = (int32_t)((int64_t)o * n_x / n_y);
        return {at, at, 0.0f};
    }
    // (o + 1/2) n_x / n_y - 1/2, over 2 n_y: exact, so that the neighbours are the CPU's
    const int64_t over = ((int64_t)2 * o + 1) * n_x - n_y, at = over > 0 ? over : 0;
    const int64_t whole = at / (2 * (int64_t)n_y);
    const float share = (float)(at - whole * 2 * n_y) / (float)(2 * (int64_t)n_y);
    const int32_t first = whole < n_x - 1 ? (int32_t)whole : n_x - 1;
    return {first, first + 1 < n_x ? first + 1 : n_x - 1, share};
}

// Interpolates from a to b. At share 0 b is not used at all, since 0 times infinity would be NaN.
DEV float resize_mix(float a, float b, float share) {
    return share > 0.0f ? a + (b - a) * share : a;
}

KERNEL(resize, rocq_k_resize_args, 256) {
    if (a.y.ne[0] == 0) return;
    const uint32_t item = (a.common.block0 + block_index()) * 256 + thread_index();
    const uint32_t quads = (uint32_t)(a.y.ne[0] + 3) / 4, r = item / quads;
    if (r >= rows_of(a.y)) return;
    const int64_t k = 4 * (int64_t)(item - r * quads);
    const int count = quad_count(a.y.ne[0], k);
    const place p = place_of(a.y, r);
    const resize_between w = resize_at(a.bilinear, (int32_t)p.i1, a.y.ne[1], a.x.ne[1]);
    const resize_between h = resize_at(a.bilinear, (int32_t)p.i2, a.y.ne[2], a.x.ne[2]);
    const bool wide = is_wide(a.x);
    float v[4];
    get4(a.x.format, row_of(a.x, w.first, h.first, p.i3), wide, k, count, v);
    if (a.bilinear) {
        float right[4], lower[4], corner[4];
        get4(a.x.format, row_of(a.x, w.second, h.first, p.i3), wide, k, count, right);
        get4(a.x.format, row_of(a.x, w.first, h.second, p.i3), wide, k, count, lower);
        get4(a.x.format, row_of(a.x, w.second, h.second, p.i3), wide, k, count, corner);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            v[e] = resize_mix(resize_mix(v[e], right[e], w.share),
                              resize_mix(lower[e], corner[e], w.share), h.share);
        }
    }
    put4(a.y, is_wide(a.y), row_of(a.y, p.i1, p.i2, p.i3), r, k, count, v);
}

// -- pixels --
// y = 255 s(x scale + bias) as bytes, and for each row of x whether all values are finite, as in
// rocq_pixels_params. A block takes a row, a thread every 256th position of it.
// Geometry: 256 threads, blockIdx.x counts rows of all pictures; fewer than 2^32 positions.
DEV float pixels_srgb(float x) { // IEC 61966-2-1
    return x <= 0.0031308f ? 12.92f * x
                           : fmaf(1.055f, exp2_fast(log2_fast(x) * (1.0f / 2.4f)), -0.055f);
}

KERNEL(pixels, rocq_k_pixels_args, 256) {
    LDS(float, work, BLOCK_WORK);
    if (a.y.ne[0] == 0) return;
    const uint32_t r = a.common.block0 + block_index();
    const int32_t i3 = (int32_t)(r / (uint32_t)a.y.ne[2]), i2 = (int32_t)r - i3 * a.y.ne[2];
    const int32_t n = a.y.ne[0] > a.x.ne[0] ? a.y.ne[0] : a.x.ne[0];
    float bad = 0.0f;
    for (int32_t i1 = (int32_t)thread_index(); i1 < a.y.ne[1]; i1 += 256) {
        uint8_t *const y = (uint8_t *)row_of(a.y, i1, i2, i3);
        const char *const x = row_of(a.x, i1, i2, i3);
        float value = 0.0f; // of x; grey is that of all channels
        for (int32_t c = 0; c < n; c++) {
            if (c < a.x.ne[0]) value = get_float(a.x.format, x, c);
            if (!(value - value == 0.0f)) bad = 1.0f;
            if (c >= a.y.ne[0]) continue;
            float v = 1.0f;
            if (c < 3 || a.x.ne[0] == 4) {
                v = value * a.scale + a.bias;
                v = !(v > 0.0f) ? 0.0f : v > 1.0f ? 1.0f : v;
                if (a.srgb && c < 3) v = pixels_srgb(v);
            }
            gstore(y + c, (uint8_t)rintf(255.0f * v));
        }
    }
    if (!a.finite.data) return;
    bad = block_sum(bad, work);
    if (thread_index() == 0) gstore((uint8_t *)row_of(a.finite, i3, 0, 0) + i2, bad == 0.0f);
}

// ---------------------------------------------------------------------------------------------
// >>training: in the order of ROCQ_OPS
// ---------------------------------------------------------------------------------------------

// -- matmul_backward --
// c[k, row] = activation'(z) scale sum over r of a(row, r) b[k, r] + before: for dx a row is a
// column n of dy, r a row m, a is dy and b is w; for dw a row is a row m of w, r a column n, a is
// dy transposed (TURNED in the code) and b is x.
//
//   b    F16 [K, R], or planar blocks; a F16 [R, rows], or transposed [rows, R]: rows at multiples
//        of 16 bytes, readable up to the next such multiple; what lies there has no effect
//   c    F32 or F16 [K, rows], z and before likewise, any strides; before may be c
//
// Memory has k innermost, and for dw rows too, while the matrix unit takes r innermost: operands
// are transposed on their way to LDS. A thread loads 8 by 8 halves and stores them transposed, at
// half an instruction an element; of planar blocks, a unit of each of two neighbouring rows, whose
// elements it stores in pairs. The rows of LDS are k 0 8 16 .. 56, 1 9 17 .., so that the lanes
// that hold neighbouring chunks of 8 k write to neighbouring rows, free of bank conflicts; the
// epilogue puts k back in order (backward_permuted). Where the matrix unit reads LDS by itself
// (Hopper), it also transposes, and matmul_backward_lds copies operands as they lie.
//
// Tiles of 128 k by 128 rows, 128 threads; step, waves, sums and LDS as in matmul_f16 with tiles of
// 128 columns. Geometry: blockIdx.x counts tiles_k fastest, so that blocks that run at the same
// time share rows of a in L2, then tiles_rows and n_splits. With n_splits over 1 a block has a
// share of r, in whole steps, and stores its sums in `work`, which matmul_backward_merge adds up in
// the order of the splits. db[row] = scale sum of a(row, r): blocks of the first k sum it up from
// LDS.
enum { BACKWARD_TILE = ROCQ_K_BACKWARD_TILE, BACKWARD_ROW = MATMUL_F16_ROW };

struct backward_place {
    int32_t k0, row0;
    uint32_t split, begin, end; // the split of r, and its steps
};
DEV backward_place backward_place_of(const rocq_k_backward_part &a, uint32_t block, int bk,
                                     int brow, int step) {
    const uint32_t tiles = (uint32_t)a.tiles_k * (uint32_t)a.tiles_rows;
    const uint32_t n_steps = ((uint32_t)a.n_r + (uint32_t)step - 1) / (uint32_t)step;
    backward_place p;
    p.split = block / tiles;
    const uint32_t tile = block - p.split * tiles, row = tile / (uint32_t)a.tiles_k;
    p.k0 = (int32_t)(tile - row * (uint32_t)a.tiles_k) * bk;
    p.row0 = (int32_t)row * brow;
    p.begin = n_steps * p.split / (uint32_t)a.n_splits;
    p.end = n_steps * (p.split + 1) / (uint32_t)a.n_splits;
    return p;
}

// Whether the block is of dw: a launch has dx, dw or both. block: its number among dx's or dw's.
DEV bool backward_is_dw(const rocq_k_matmul_backward_args &a, uint32_t &block) {
    const uint32_t own = a.common.block0 + block_index();
    const bool of_dw = own - a.dw.block0 < a.dw.n_blocks;
    block = own - (of_dw ? a.dw.block0 : a.dx.block0);
    return of_dw;
}
template <bool OF_DW>
DEV const rocq_k_backward_part &backward_part(const rocq_k_matmul_backward_args &a) {
    if constexpr (OF_DW) return a.dw;
    else return a.dx;
}

// The address in work of a row's sums of the first split; those of the next are K floats further
// on. Behind all of them are the sums of db, [rows, n_splits].
DEV float *backward_split_sums(const rocq_k_backward_part &a, int64_t row) {
    return a.work + row * a.n_splits * a.n_k;
}

DEV void backward_put(const rocq_k_backward_part &a, int64_t row, int64_t k, float sum) {
    float v = sum * a.scale;
    if (a.z.data) {
        v *= activation_slope(a.activation, get_float(a.z.format, row_of(a.z, row, 0, 0), k));
    }
    if (a.before.data) v += get_float(a.before.format, row_of(a.before, row, 0, 0), k);
    put_float(a.c.format, row_of(a.c, row, 0, 0), k, v);
}
DEV void backward_put_db(const rocq_k_backward_part &a, int64_t row, float sum) {
    gstore(a.db + row, fmaf(sum, a.scale, a.accumulate ? gload(a.db + row) : 0.0f));
}

// Four neighbouring elements of a row, in two steps as conv_load and conv_floats.
DEV u32x4 backward_load4(const rocq_k_tensor &t, int64_t row, int64_t k) {
    const char *const from = row_of(t, row, 0, 0);
    if (t.format == ROCQ_F32) return gload((const u32x4 *)((const float *)from + k));
    const u32x2 h = gload((const u32x2 *)((const uint16_t *)from + k));
    return make4(h.x, h.y, 0, 0);
}
DEV void backward_floats4(const rocq_k_tensor &t, const u32x4 &loaded, float v[4]) {
    if (t.format == ROCQ_F32) decode_vector<ROCQ_F32>(loaded, 0, v);
    else decode_vector<ROCQ_F16>(loaded, 0, v);
}

// A wave finishes the 128 k of N rows, whose sums lie `stride` floats apart in LDS; row(i) is the
// i-th row. Its loads for all of them are in flight together.
template <int N, typename R>
DEV void backward_put_rows(const rocq_k_backward_part &a, const backward_place &at,
                           const float *sums, int stride, R row) {
    if (!a.wide) {
#pragma unroll 1
        for (int i = 0; i < 4 * N; i++) {
            const int64_t k = at.k0 + 32 * (i % 4) + lane_index();
            if (k >= a.n_k || row(i / 4) >= a.n_rows) continue;
            const float v = lget(sums + i / 4 * stride + 32 * (i % 4) + lane_index());
            if (a.n_splits == 1) backward_put(a, row(i / 4), k, v);
            else gstore(backward_split_sums(a, row(i / 4)) + (int64_t)at.split * a.n_k + k, v);
        }
        return;
    }
    const int64_t k = at.k0 + 4 * lane_index();
    if (k >= a.n_k) return;
    u32x4 z[N], before[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        z[i] = before[i] = make4(0, 0, 0, 0);
        if (row(i) >= a.n_rows || a.n_splits > 1) continue;
        if (a.z.data) z[i] = backward_load4(a.z, row(i), k);
        if (a.before.data) before[i] = backward_load4(a.before, row(i), k);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (row(i) >= a.n_rows) continue;
        const u32x4 sum = lget((const u32x4 *)(sums + i * stride) + lane_index());
        if (a.n_splits > 1) {
            gstore((u32x4 *)(backward_split_sums(a, row(i)) + (int64_t)at.split * a.n_k + k), sum);
            continue;
        }
        float v[4], own[4], zs[4];
        decode_vector<ROCQ_F32>(sum, 0, v);
        backward_floats4(a.before, before[i], own);
        backward_floats4(a.z, z[i], zs);
#pragma unroll
        for (int e = 0; e < 4; e++) v[e] *= a.scale;
        if (a.z.data) times_slope4(a.activation, zs, v);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (a.before.data) v[e] += own[e];
        }
        char *const to = row_of(a.c, row(i), 0, 0);
        if (a.c.format == ROCQ_F32) {
            gstore((u32x4 *)((float *)to + k), make4(bits<uint32_t>(v[0]), bits<uint32_t>(v[1]),
                                                     bits<uint32_t>(v[2]), bits<uint32_t>(v[3])));
        } else {
            gstore((u32x2 *)((uint16_t *)to + k),
                   make2(bits<uint32_t>(pair_floats(v[0], v[1])),
                         bits<uint32_t>(pair_floats(v[2], v[3]))));
        }
    }
}
DEV void backward_end_db(const rocq_k_backward_part &a, const backward_place &at,
                         int64_t row, float sum) {
    if (row >= a.n_rows) return;
    if (a.n_splits == 1) backward_put_db(a, row, sum);
    else gstore(backward_split_sums(a, a.n_rows) + (int64_t)at.split * a.n_rows + row, sum);
}

// The k, or the row of c, that row p of LDS holds, both within the tile: p with its two octal
// digits swapped within 64. The function is its own inverse.
DEV int backward_permuted(int p) { return (p & 64) | (p & 7) << 3 | (p >> 3 & 7); }

// Finishes a block's 128 k by 128 rows: as in matmul_finish the sums go through LDS, 16 rows of
// each wave at a time, after which each wave has all k of some rows. Within a wave's 64 by 64, k
// are in the order of backward_permuted, and with PERMUTE_ROWS the rows are, too.
enum { BACKWARD_STRIDE = BACKWARD_TILE + 4 };
template <bool PERMUTE_ROWS>
DEV void backward_finish(const rocq_k_matmul_backward_args &args, const backward_place &at,
                         const frag_c (&c)[4][4], float *work) {
    const rocq_k_backward_part &a = backward_part<PERMUTE_ROWS>(reread(args));
    const int wave = matmul_wave();
    float *const own = work + 16 * (wave / 2) * BACKWARD_STRIDE;
    enum { TOGETHER = 4 }; // rows whose loads are in flight at once
#pragma unroll 1
    for (int pass = 0; pass < 4; pass++) {
        block_sync_lds();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j != pass) continue;
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int v = 0; v < 8; v++) {
                    const int k = wave % 2 * 64 + backward_permuted(16 * i + frag_row(v));
                    lput(own + frag_col(v) * BACKWARD_STRIDE + k, c[i][j].v[v]);
                }
            }
        }
        block_sync_lds();
#pragma unroll 1
        for (int column = TOGETHER * wave; column < 32; column += 4 * TOGETHER) {
            backward_put_rows<TOGETHER>(a, at, work + column * BACKWARD_STRIDE, BACKWARD_STRIDE,
                                 [=](int i) {
                const int p = 16 * pass + (column + i) % 16;
                return (int64_t)at.row0 + (column + i) / 16 * 64 +
                       (PERMUTE_ROWS ? backward_permuted(p) : p);
            });
        }
    }
}

// Transposes 8 by 8 halves, of which each vector is a row, and stores the columns, each eight rows
// of LDS behind the one before.
template <int WORD> DEV uint32_t vector_word(const u32x4 &v) {
    return WORD == 0 ? v.x : WORD == 1 ? v.y : WORD == 2 ? v.z : v.w;
}
template <int C = 0> DEV void backward_store_transposed(const u32x4 (&v)[8], f16 *to) {
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        w[j] = byte_perm(vector_word<C / 2>(v[2 * j + 1]), vector_word<C / 2>(v[2 * j]),
                         C % 2 ? 0x07060302 : 0x05040100);
    }
    lput((u32x4 *)(to + C * 8 * BACKWARD_ROW), make4(w[0], w[1], w[2], w[3]));
    if constexpr (C < 7) backward_store_transposed<C + 1>(v, to);
}

// A unit as pairs of halves, or zeros if it is not live.
template <int F>
DEV void backward_unit(const raw<F> &from, uint32_t unit, bool live, uint32_t (&w)[16]) {
    u32x4 h[4];
    matmul_unit_halves<F>(from, unit, h);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        w[4 * j] = live ? h[j].x : 0;
        w[4 * j + 1] = live ? h[j].y : 0;
        w[4 * j + 2] = live ? h[j].z : 0;
        w[4 * j + 3] = live ? h[j].w : 0;
    }
}

// Stores the units of rows r and r + 1, transposed: each element of one beside that of the other.
DEV void backward_store_pairs(const uint32_t (&w)[2][16], f16 *to) {
#pragma unroll
    for (int e = 0; e < 32; e++) {
        lput((uint32_t *)(to + (e % 8 * 8 + e / 8) * BACKWARD_ROW),
             byte_perm(w[1][e / 2], w[0][e / 2], e % 2 ? 0x07060302 : 0x05040100));
    }
}

// What a thread loads of an operand with r outermost: a chunk of 8 elements of each of 8
// neighbouring r. Past the end of a row it loads the row's last chunk again, of which nothing is
// stored in c. Past the last r it loads that again, and backward_clear_tail sets it to 0.
struct backward_source {
    const char *data; // the tile's first element of row 0
    uint32_t stride;  // bytes from row to row
    uint32_t own;     // bytes from there to the thread's elements
};
DEV backward_source backward_source_of(const void *data, int64_t stride, int32_t first,
                                       int32_t n, int chunk) {
    const int32_t last = (n - 1 - first) / 8; // chunk
    return {(const char *)data + (int64_t)first * 2, (uint32_t)stride * 2,
            (uint32_t)(chunk < last ? chunk : last) * 16};
}
DEV void backward_load(const backward_source &from, uint32_t r, uint32_t group, uint32_t n_r,
                       u32x4 (&v)[8]) {
    const char *const rows = from.data + (int64_t)r * from.stride;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
        const uint32_t own = group + i, last = n_r - 1 - r;
        v[i] = gload((const u32x4 *)(rows + ((own < last ? own : last) * from.stride + from.own)));
    }
}
DEV void backward_clear_tail(uint32_t r, uint32_t group, uint32_t n_r, u32x4 (&v)[8]) {
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
        if (r + group + i >= n_r) v[i] = make4(0, 0, 0, 0);
    }
}

// sum plus the numbers of a row of a step, in LDS.
DEV float backward_add_row(float sum, const u32x4 *row) {
    const f16x2 ones = pair_floats(1.0f, 1.0f);
#pragma unroll 1
    for (int i = 0; i < MATMUL_F16_BK / 8; i++) {
        const u32x4 v = lget(row + i);
        sum = dot2(bits<f16x2>(v.x), ones, dot2(bits<f16x2>(v.y), ones, sum));
        sum = dot2(bits<f16x2>(v.z), ones, dot2(bits<f16x2>(v.w), ones, sum));
    }
    return sum;
}

// The tile's unit of that number in a row, or the row's last one.
DEV uint32_t backward_unit_of(const backward_place &at, uint32_t row_units, uint32_t number) {
    const uint32_t unit = (uint32_t)at.k0 / 32 + number;
    return unit < row_units ? unit : row_units - 1;
}

// What a thread loads of an a with r innermost: chunk `chunk` of 8 r of a step, of row `row` of the
// tile and every 16th from there on. Rows past the last repeat it.
struct backward_rows {
    const char *first; // the tile's first row
    uint32_t bytes;    // from row to row
    uint32_t last;     // row of the tile
    int chunk, row;
};
DEV void backward_load_rows(const backward_rows &from, uint32_t r, uint32_t n_r, u32x4 (&v)[8]) {
    const uint32_t e = r + 8 * (uint32_t)from.chunk, e_last = (n_r - 1) & ~7u;
    const uint32_t at = (e < e_last ? e : e_last) * 2, most = from.last * from.bytes + at;
    const uint32_t first = (uint32_t)from.row * from.bytes + at;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
        const uint32_t offset = first + 16 * i * from.bytes;
        v[i] = gload((const u32x4 *)(from.first + (offset < most ? offset : most)));
    }
}
DEV void backward_store_rows(f16 *to, const backward_rows &from, uint32_t r, uint32_t n_r,
                             bool tail, const u32x4 (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u32x4 *const own = (u32x4 *)(to + (from.row + 16 * i) * BACKWARD_ROW) + from.chunk;
        lput(own, tail ? matmul_mask_halves(v[i], r + 8 * (uint32_t)from.chunk, n_r) : v[i]);
    }
}
// What a thread loads of a planar b: unit `unit` of two neighbouring r, from `first` on. Past the
// last r it loads that again, and stores zeros.
template <int F>
DEV void backward_load_units(raw<F> (&to)[2], const planes<F> &p, uint32_t row_units, uint32_t unit,
                             uint32_t first, uint32_t n_r) {
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t own_r = first + i < n_r ? first + i : n_r - 1;
        to[i] = load_raw(planes_at(p, (int64_t)own_r * row_units), unit);
    }
}
template <int F>
DEV void backward_store_units(f16 *to, const raw<F> (&from)[2], uint32_t unit, uint32_t first,
                              uint32_t n_r) {
    uint32_t w[2][16];
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) backward_unit<F>(from[i], unit, first + i < n_r, w[i]);
    backward_store_pairs(w, to);
}

enum { BACKWARD_LDS = 2 * BACKWARD_TILE * BACKWARD_ROW / 8 }; // u32x4
static_assert(4 * 32 * BACKWARD_STRIDE <= 16 * BACKWARD_LDS, "backward_finish's work");
// F: the format of b. TURNED: dw, for which a is transposed, with rows innermost; else dx.
template <int F, bool TURNED>
DEV void matmul_backward_f16(const rocq_k_matmul_backward_args &args, uint32_t block,
                             u32x4 *tile) {
    enum { BK = MATMUL_F16_BK, ROW = BACKWARD_ROW, TILE = BACKWARD_TILE, PLAIN = F == ROCQ_F16 };
    const rocq_k_backward_part &a = backward_part<TURNED>(args);
    f16 *const bt = (f16 *)tile, *const at_a = bt + TILE * ROW;
    if (a.tiles_k == 0) return;
    const backward_place at = backward_place_of(a, block, BACKWARD_TILE, BACKWARD_TILE, BK);
    const uint32_t n_r = (uint32_t)a.n_r;
    const int t = (int)thread_index(), wave = matmul_wave();
    const int wk = wave % 2 * 64, wrow = wave / 2 * 64;

    // Operands with r outermost: 16 chunks of 8 elements by 8 groups of 8 r
    const int chunk = t % 16;
    const uint32_t group = (uint32_t)t / 16 * 8;
    f16 *const own = (f16 *)tile + ((chunk & 8) * 8 + (chunk & 7)) * ROW + group;
    backward_source from_b = {nullptr, 0, 0}, from_a = {nullptr, 0, 0};
    if constexpr (PLAIN) from_b = backward_source_of(a.b, a.b_stride, at.k0, a.n_k, chunk);
    if constexpr (TURNED) from_a = backward_source_of(a.a, a.a_stride, at.row0, a.n_rows, chunk);
    u32x4 bv[PLAIN ? 8 : 1], av[8];

    // Planar b: one of the tile's four units of 32 k, of two neighbouring rows
    raw<F> br[2];
    planes<F> p;
    const uint32_t row_units = (uint32_t)a.n_k / 32, pair_r = (uint32_t)t / 4 * 2;
    const uint32_t unit = backward_unit_of(at, row_units, (uint32_t)t % 4);
    if constexpr (!PLAIN) p = planes_of<F>(a.b, a.b_units, a.format);

    // a with r innermost
    const uint32_t a_last = (uint32_t)(a.n_rows - at.row0 < TILE ? a.n_rows - at.row0 : TILE) - 1;
    const backward_rows rows_a = {(const char *)a.a + (int64_t)at.row0 * a.a_stride * 2,
                                  (uint32_t)a.a_stride * 2, a_last, t % 8, t / 8};

    const auto load = [&](uint32_t step) {
        const uint32_t r = step * BK;
        if constexpr (PLAIN) backward_load(from_b, r, group, n_r, bv);
        else backward_load_units<F>(br, p, row_units, unit, r + pair_r, n_r);
        if constexpr (TURNED) backward_load(from_a, r, group, n_r, av);
        else backward_load_rows(rows_a, r, n_r, av);
    };
    const auto store = [&](uint32_t step) {
        const uint32_t r = step * BK;
        const bool tail = r + BK > n_r;
        if constexpr (PLAIN) {
            if (tail) backward_clear_tail(r, group, n_r, bv);
            backward_store_transposed(bv, own);
        } else {
            f16 *const to = bt + ((t % 4 & 2) * 32 + (t & 1) * 4) * ROW + pair_r;
            backward_store_units<F>(to, br, unit, r + pair_r, n_r);
        }
        keep_order(); // one operand is transposed at a time
        if constexpr (TURNED) {
            if (tail) backward_clear_tail(r, group, n_r, av);
            backward_store_transposed(av, own + TILE * ROW);
        } else {
            backward_store_rows(at_a, rows_a, r, n_r, tail, av);
        }
    };

    const bool has_work = at.k0 + wk < a.n_k && at.row0 + wrow < a.n_rows; // of the wave
    const bool sums_db = TURNED && a.db && at.k0 == 0;
    frag_c c[4][4];
    matmul_clear(c);
    float db = 0.0f; // of row t of LDS
    load(at.begin);
    for (uint32_t step = at.begin; step < at.end; step++) {
        store(step);
        block_sync_lds();
        if (step + 1 < at.end) load(step + 1);
        if (sums_db) {
            db = backward_add_row(db, (const u32x4 *)(at_a + t * ROW));
        }
        const int n16 = matmul_n16(n_r, step);
        if (has_work) matmul_multiply<4, 4, 4>(c, bt + wk * ROW, at_a + wrow * ROW, n16);
        block_sync_lds();
    }
    if (sums_db) backward_end_db(a, at, at.row0 + backward_permuted(t), db);
    backward_finish<TURNED>(args, at, c, (float *)tile);
}

// [large LDS] RDNA3: skip to matmul_backward_dx_. Only chips with over 64 KiB of LDS run this.
// The epilogue of matmul_backward, or the sums of a split of r. OF_DW tells the compiler that dw is
// always F32 and has no z: each of a lane's quads has a copy of this code.
template <bool OF_DW, int BN>
DEV void backward_lds_finish(const rocq_k_backward_part &a, const backward_place &at,
                             const frag_c (&c)[BN / 16], float *work) {
    const bool whole = a.n_splits == 1;
    const bool wide = whole ? quads_are_wide(a.c) : (a.n_k & 3) == 0;
    const bool has_z = !OF_DW && a.z.data, loads = whole && (has_z || a.before.data);
    const int32_t c_format = OF_DW ? ROCQ_F32 : a.c.format;
    const int32_t before_format = OF_DW ? ROCQ_F32 : a.before.format;
    const bool z_wide = quads_are_wide(a.z), before_wide = quads_are_wide(a.before);
    const auto count = [&](int row, int col) {
        return at.row0 + row < a.n_rows ? quad_count(a.n_k, at.k0 + col) : 0;
    };
    const auto load = [&](int own, int col) {
        const int64_t row = at.row0 + own, k = at.k0 + col;
        lds_loaded x = {};
        if (!loads) return x;
        const int there = count(own, col);
        if (has_z) x.quad[0] = quad_load(a.z.format, z_wide, row_of(a.z, row, 0, 0), k, there);
        if (a.before.data) {
            x.quad[1] =
                quad_load(before_format, before_wide, row_of(a.before, row, 0, 0), k, there);
        }
        return x;
    };
    const auto store = [&](int own, int col, const lds_loaded &x, float (&v)[4]) {
        const int64_t row = at.row0 + own, k = at.k0 + col;
        const int there = count(own, col);
        if (!whole) {
            float *const sums = backward_split_sums(a, row) + (int64_t)at.split * a.n_k;
            put_floats(ROCQ_F32, wide && there == 4, (char *)sums, k, there, v);
            return;
        }
        float with[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] *= a.scale;
        if (has_z) {
            quad_floats(a.z.format, x.quad[0], with);
            times_slope4(a.activation, with, v);
        }
        if (a.before.data) {
            quad_floats(before_format, x.quad[1], with);
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] += with[i];
        }
        put_floats(c_format, wide && there == 4, row_of(a.c, row, 0, 0), k, there, v);
    };
    lds_finish<BN>(c, work, load, store);
}

// dx and dw of F16 operands where four waves multiply straight from LDS: see matmul_lds. Rows of
// the tile are rows of c, and its columns k. A thread adds up two rows of db over 16 r of a step.
template <bool TURNED, int BN, int BM, int STAGES, int AHEAD>
DEV void matmul_backward_lds(const rocq_k_backward_part &a, uint32_t block, u32x4 *tile) {
    if (a.tiles_k == 0) return;
    const backward_place at = backward_place_of(a, block, BN, BM, 64);
    const int t = (int)thread_index(), pair_row = 2 * t % BM, quarter = 2 * t / BM;
    const int32_t rows = a.n_rows - at.row0, cols = a.n_k - at.k0;
    const lds_operand dy = {(const char *)a.a + (TURNED ? 2 : a.a_stride * 2) * at.row0,
                            a.a_stride * 2, rows < BM ? rows : BM};
    const lds_operand b = {(const char *)a.b + (int64_t)at.k0 * 2, a.b_stride * 2,
                           cols < BN ? cols : BN};
    const bool sums_db = TURNED && a.db && at.k0 == 0;
    float db[2] = {0.0f, 0.0f};
    frag_c c[1][BN / 16];
    matmul_clear(c);
    lds_multiply<TURNED, true, BM, BN, STAGES, AHEAD>(c, dy, b, a.n_r, at.begin, at.end,
                                                      (f16 *)tile, [&](const f16 *dy_tile) {
        if (!sums_db) return;
        const f16 *const from = dy_tile + (pair_row / 64 * 64 + 16 * quarter) * 64 + pair_row % 8;
#pragma unroll
        for (int r = 0; r < 16; r++) {
            const uint32_t two =
                lget((const uint32_t *)(from + r * 64 + (pair_row / 8 % 8 ^ (r & 7)) * 8));
            db[0] += f16_f32((uint16_t)two);
            db[1] += f16_f32((uint16_t)(two >> 16));
        }
    });
    if (sums_db) { // four threads have a row's sums
        float *const work = (float *)tile;
        lput(work + quarter * BM + pair_row, db[0]);
        lput(work + quarter * BM + pair_row + 1, db[1]);
        block_sync_lds();
        if (t < BM) {
            backward_end_db(a, at, at.row0 + t,
                            lget(work + t) + lget(work + BM + t) +
                                (lget(work + 2 * BM + t) + lget(work + 3 * BM + t)));
        }
        block_sync_lds();
    }
    backward_lds_finish<TURNED, BN>(a, at, c[0], (float *)tile);
}

// A block of dx or dw. Its kernel has the tiles of ROCQ_K_LDS_TILES that take THREADS threads, with
// BLOCKS blocks on a compute unit; a.columns selects one of these.
template <bool TURNED, int THREADS, int BLOCKS>
DEV void backward_lds_part(const rocq_k_backward_part &a, uint32_t block, u32x4 *tile) {
#define ROCQ_X(X, name, columns_, rows, steps, ahead, blocks)                             \
    if constexpr (ROCQ_K_LDS_THREADS(rows) == THREADS && (blocks) == BLOCKS) {            \
        if (a.columns == (columns_)) {                                                    \
            matmul_backward_lds<TURNED, columns_, rows, steps, ahead>(a, block, tile);    \
        }                                                                                 \
    }
    ROCQ_K_LDS_TILES(ROCQ_X, )
#undef ROCQ_X
}
template <int THREADS, int BLOCKS, int BYTES>
DEV void matmul_backward_lds_parts(const rocq_k_matmul_backward_args &a) {
    LDS_GRANTED(u32x4, tile, BYTES / 16);
    uint32_t block;
    if (backward_is_dw(a, block)) backward_lds_part<true, THREADS, BLOCKS>(a.dw, block, tile);
    else backward_lds_part<false, THREADS, BLOCKS>(a.dx, block, tile);
}
#define ROCQ_X(X, name, threads, blocks, bytes)                                               \
    KERNEL_WAVES(matmul_backward_lds_##name, rocq_k_matmul_backward_args, threads,            \
                 blocks * threads / 128) {                                                    \
        if constexpr (WMMA_TILES) matmul_backward_lds_parts<threads, blocks, bytes>(a);       \
    }
ROCQ_K_BACKWARD_LDS_KERNELS(ROCQ_X, )
#undef ROCQ_X

#define ROCQ_X(X, f)                                                   \
    KERNEL(matmul_backward_dx_##f, rocq_k_matmul_backward_args, 128) { \
        LDS(u32x4, tile, BACKWARD_LDS);                                \
        matmul_backward_f16<ROCQ_K_ID_##f, false>(                     \
            a, a.common.block0 + block_index(), tile);                 \
    }
PLANE_FORMATS(ROCQ_X, )
#undef ROCQ_X
KERNEL_WAVES(matmul_backward_f16, rocq_k_matmul_backward_args, 128, 3) {
    LDS(u32x4, tile, BACKWARD_LDS);
    uint32_t block;
    if (backward_is_dw(a, block)) matmul_backward_f16<ROCQ_F16, true>(a, block, tile);
    else matmul_backward_f16<ROCQ_F16, false>(a, block, tile);
}

// matmul_backward_f32: operands, products and sums in F32; b is F32 or planar blocks. Tiles, sums
// and LDS as in matmul_f32, for which operands lie with r outermost: those that memory has so are
// only copied. A step is 32 of r.
enum { BACKWARD_F32_BK = 32, BACKWARD_F32_STRIDE = BACKWARD_TILE + 4,
       BACKWARD_F32_LDS = BACKWARD_F32_BK * BACKWARD_F32_STRIDE }; // floats, of each operand
// Copies every eighth vector of a row to LDS, vectors past the last one as that; or zeros.
DEV void backward_f32_copy(u32x4 *to, const u32x4 *row, int first, int32_t last, bool live) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int32_t vector = first + 8 * i;
        u32x4 v = make4(0, 0, 0, 0);
        if (live) v = gload(row + (vector < last ? vector : last));
        lput(to + vector, v);
    }
}

// b as the weights of a product, as far as they are loaded.
DEV rocq_k_matmul_product backward_product(const rocq_k_backward_part &a) {
    rocq_k_matmul_product w = {};
    w.w = a.b;
    w.w_units = a.b_units;
    w.format = a.format;
    return w;
}

// Stores a thread's 8 by 8 sums, one of its rows at a time, by way of LDS: bt has the 16 rows of a
// pass, of which a wave takes every eighth. It has barriers.
DEV void backward_f32_finish(const rocq_k_backward_part &a, const backward_place &at,
                             const float (&c)[8][8], float *bt, int tk, int trow) {
    enum { STRIDE = BACKWARD_F32_STRIDE };
    const int wave = matmul_wave();
#pragma unroll 1
    for (int pass = 0; pass < 8; pass++) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (j != pass) continue;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                lput(bt + trow * STRIDE + i / 4 * 64 + 4 * tk + i % 4, c[i][j]);
            }
        }
        block_sync_lds();
#pragma unroll 1
        for (int column = wave; column < 16; column += 8) {
            const int64_t row = at.row0 + pass / 4 * 64 + 4 * column + pass % 4;
            backward_put_rows<1>(a, at, bt + column * STRIDE, 0, [=](int) { return row; });
        }
        block_sync_lds();
    }
}

template <bool TURNED>
DEV void matmul_backward_f32(const rocq_k_backward_part &a, uint32_t block, float *bt,
                             float *at_a) {
    enum { TILE = BACKWARD_TILE, BK = BACKWARD_F32_BK, STRIDE = BACKWARD_F32_STRIDE };
    if (a.tiles_k == 0) return;
    const backward_place at = backward_place_of(a, block, BACKWARD_TILE, BACKWARD_TILE, BK);
    const int t = (int)thread_index(), wave = matmul_wave(), lane = lane_index();
    const int tk = wave % 2 * 8 + lane % 8, trow = wave / 2 * 4 + lane / 8;
    // Copies 16 elements of row t / 8 of the step; in place of those past n, others of the row,
    // whose products are not stored
    const auto copy = [&](float *to, const void *from, int64_t stride, int32_t first, int32_t n,
                          uint32_t step) {
        const int32_t r = (int32_t)step * BK + t / 8, last = (n - 1 - first) / 4;
        const float *const row = (const float *)from + first + (r < a.n_r ? r : 0) * stride;
        backward_f32_copy((u32x4 *)(to + t / 8 * STRIDE), (const u32x4 *)row, t % 8, last,
                          r < a.n_r);
    };
    const auto decode = [&](uint32_t step) {
        const uint32_t own = step * BK + (uint32_t)t / 8, row_units = (uint32_t)a.n_k / 32;
        const uint32_t r = own < (uint32_t)a.n_r ? own : (uint32_t)a.n_r - 1;
        const uint32_t first = (uint32_t)at.k0 / 32 + (uint32_t)t / 2 % 4;
        const uint32_t unit = first < row_units ? first : row_units - 1;
        const rocq_k_matmul_product w = backward_product(a);
        float *const to = bt + t / 8 * STRIDE + t / 2 % 4 * 32;
        u32x4 half[4];
        switch (shared_format(a.format)) {
#define ROCQ_X(X, f)                                                \
        case ROCQ_K_ID_##f:                                         \
            matmul_load_half<ROCQ_K_ID_##f>(w, (uint32_t)a.n_k, 0, r, unit, t % 2, half); \
            matmul_put_half<ROCQ_K_ID_##f>(half, a.format, unit, t % 2, to, 1); \
            break;
        PLANE_FORMATS(ROCQ_X, )
#undef ROCQ_X
        }
        if (own < (uint32_t)a.n_r) return;
#pragma unroll
        for (int i = 0; i < 16; i++) lput(to + t % 2 * 16 + i, 0.0f);
    };
    // Transposes row t % 128 of an a that has r innermost, half a step of it
    const auto transpose = [&](uint32_t step) {
        const int32_t most = a.n_rows - 1 - at.row0, row = t % TILE < most ? t % TILE : most;
        const float *const from = (const float *)a.a + (at.row0 + row) * a.a_stride;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int32_t own = t / TILE * 16 + 4 * i, r = (int32_t)step * BK + own;
            float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (r < a.n_r) decode_vector<ROCQ_F32>(gload((const u32x4 *)(from + r)), 0, v);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                lput(at_a + (own + e) * STRIDE + t % TILE, r + e < a.n_r ? v[e] : 0.0f);
            }
        }
    };

    const bool sums_db = TURNED && a.db && at.k0 == 0 && t < TILE;
    float c[8][8], db = 0.0f;
    matmul_f32_clear(c);
    for (uint32_t step = at.begin; step < at.end; step++) {
        if (a.format == ROCQ_F32) copy(bt, a.b, a.b_stride, at.k0, a.n_k, step);
        else decode(step);
        if (TURNED) copy(at_a, a.a, a.a_stride, at.row0, a.n_rows, step);
        else transpose(step);
        block_sync_lds();
        if (sums_db) {
            for (int r = 0; r < BK; r++) db += lget(at_a + r * STRIDE + t);
        }
        matmul_multiply_f32<2>(c, bt + 4 * tk, at_a + 4 * trow, STRIDE, BK);
        block_sync_lds();
    }
    if (sums_db) backward_end_db(a, at, at.row0 + t, db);
    backward_f32_finish(a, at, c, bt, tk, trow);
}

KERNEL_WAVES(matmul_backward_f32, rocq_k_matmul_backward_args, 256, 4) {
    LDS(float, bt, BACKWARD_F32_LDS);
    LDS(float, at_a, BACKWARD_F32_LDS);
    uint32_t block;
    if (backward_is_dw(a, block)) matmul_backward_f32<true>(a.dw, block, bt, at_a);
    else matmul_backward_f32<false>(a.dx, block, bt, at_a);
}

// matmul_backward_merge: c = epilogue(sum of the splits, added in their order), a thread an
// element; the first threads also have one of db each. Geometry: 256 threads. Bytes: the sums of
// every split once, from L2.
DEV void backward_merge(const rocq_k_backward_part &a, uint32_t block) {
    if (a.tiles_k == 0) return;
    const uint32_t item = block * 256 + thread_index();
    const uint32_t row = item / (uint32_t)a.n_k, k = item - row * (uint32_t)a.n_k;
    if (row < (uint32_t)a.n_rows) {
        const float *const splits = backward_split_sums(a, row) + k;
        float v = 0.0f;
#pragma unroll 4
        for (int s = 0; s < a.n_splits; s++) v += gload(splits + (int64_t)s * a.n_k);
        backward_put(a, row, k, v);
    }
    if (!a.db || item >= (uint32_t)a.n_rows) return;
    const float *const splits = backward_split_sums(a, a.n_rows) + item;
    float v = 0.0f;
    for (int s = 0; s < a.n_splits; s++) v += gload(splits + (int64_t)s * a.n_rows);
    backward_put_db(a, item, v);
}
KERNEL(matmul_backward_merge, rocq_k_matmul_backward_args, 256) {
    uint32_t block;
    if (backward_is_dw(a, block)) backward_merge(a.dw, block);
    else backward_merge(a.dx, block);
}

// -- attention_backward --
// The formulas of rocq_attention_backward_params, in two kernels: one makes images of Q, dO, K and
// V, from which fragments are loaded without regard to heads, strides, formats and ends. The other
// has two kinds of blocks: those of attend_back_kv have dK and dV of 64 positions in registers and
// go through the columns that see them; those of attend_back_q have dQ of 16 columns a wave and go
// through the positions that they see. So no two blocks add to the same sum. The price is that both
// compute S and dP, two of the seven products.
//
// attend_back_kv, for 16 columns and 16 positions:
//   S = Q K^T, dP = dO V^T      [column][position]; P = 2^(S scale log2(e) - lse log2(e)), 0 where
//                               the position is hidden
//   dV += P^T dO, dK += dS^T Q  [position][d]; dS = P cap' (dP - delta). P and dS, which are
//                               results, become operands in registers (frag_from_c)
// Two waves share 16 or 32 positions: one has K and dV, computes S and P, and gives P cap' to the
// other through LDS, which has V and dK and computes dP and dS. So each needs half of the
// registers, and both have as much to do.
// attend_back_q: S^T = K Q^T, dP^T = V dO^T [position][column]; dQ += dS K [column][d].
//
// Grid    as at rocq_k_attention_backward_args; of each kind, blocks with most to do first
// LDS     12 to 45 KB: the tile of columns or positions that all waves use, while the next one is
//         on its way in registers; images have no bank conflicts
// Values  Q, K, V, dO, P and dS are rounded to F16, sums are F32
// Bytes   7 images of 32 D bytes written once a tile; kv reads four of columns once for each 64
//         positions, q three of positions for each block's columns
// Math    per 16 x 16 and 16 d, 4 WMMA in kv and 3 in q, of 32 cycles each. On gfx1100 the rest
//         adds 5 to 8 cycles to each

template <int D> struct back_shape {
    enum {
        FRAGS = D / 16,
        IMAGE = 16 * D,              // halves
        KEY_FRAGS = D <= 64 ? 2 : 1, // of 16 positions, of a wave of kv
        PAIRS = 4 / KEY_FRAGS,       // of waves
        Q_TILES = D <= 64 ? 2 : 1,   // of 16 positions, in LDS in q; kv has one of columns
        THREADS = ROCQ_K_BACK_THREADS(D),
        COLUMNS = ROCQ_K_BACK_COLUMNS(D), // of a block of q
        DOUT_IN_LDS = D > 96,             // in q, where registers would not hold it
        KV_CHUNKS = 4 * IMAGE / 8,        // of 16 bytes in LDS: of the tile
        KV_LDS = KV_CHUNKS + PAIRS * KEY_FRAGS * 64 / 2 + 3 * 16 / 4, // of all
        Q_CHUNKS = Q_TILES * 3 * IMAGE / 8,
        Q_LDS = Q_CHUNKS + (DOUT_IN_LDS ? COLUMNS / 16 * IMAGE / 8 : 0)
    };
    static_assert(32 * 2 * PAIRS == THREADS && COLUMNS == THREADS / 2, "two waves a pair");
};

// Elements 8 chunk to 8 chunk + 7 of a row of F32 or F16; 0 past its end, or if it is not there.
DEV void back_load(float (&x)[8], const rocq_k_tensor &t, const char *row, int chunk, bool there) {
    const int way = attend_rows_of(t, 0, 0, t.ne[0]).way;
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] = 0.0f;
    if (!there || 8 * chunk >= t.ne[0]) return;
    if (way == ATTEND_F32) {
        const u32x4 lo = gload((const u32x4 *)row + 2 * chunk),
                    hi = gload((const u32x4 *)row + 2 * chunk + 1);
        const uint32_t w[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
        for (int e = 0; e < 8; e++) x[e] = bits<float>(w[e]);
    } else if (way == ATTEND_WIDE) {
        const u32x4 h = gload((const u32x4 *)row + chunk);
        const uint32_t w[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
        for (int e = 0; e < 8; e++) x[e] = f16_f32((uint16_t)(w[e / 2] >> 16 * (e % 2)));
    } else {
#pragma unroll
        for (int e = 0; e < 8; e++) {
            if (8 * chunk + e < t.ne[0]) x[e] = get_float(t.format, row, 8 * chunk + e);
        }
    }
}
DEV u32x4 back_halves(const float (&x)[8]) {
    return make4(attend_pair(x[0], x[1]), attend_pair(x[2], x[3]), attend_pair(x[4], x[5]),
                 attend_pair(x[6], x[7]));
}

// Writes the image of transposed rows from the image of rows in LDS.
DEV void back_transpose(u32x4 *to, const f16 *rows, int d) {
    for (int i = (int)thread_index(); i < 2 * d; i += 128) {
        const int e = i / 32 * 16 + i % 16, k0 = i / 16 % 2 * 8; // element, first k
        uint32_t w[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const f16 *from = rows + e / 8 * 128 + e % 8;
            w[k] = bits<uint32_t>(pair(lget(from + 8 * frag_k_row(k0 + 2 * k)),
                                       lget(from + 8 * frag_k_row(k0 + 2 * k + 1))));
        }
        gstore(to + i, make4(w[0], w[1], w[2], w[3]));
    }
}

// A block makes the images of one tile of columns or positions, a thread a chunk of 8 elements.
KERNEL(attention_backward_tiles, rocq_k_attention_backward_args, 128) {
    LDS(u32x4, first, 16 * 128 / 8);
    LDS(u32x4, second, 16 * 128 / 8);
    LDS(float, deltas, 16 * 16);
    if (a.n_columns == 0) return;
    const uint32_t block = block_index() + a.common.block0,
                   all = (uint32_t)(a.tiles_q + a.tiles_kv);
    const int tile = (int)(block % all), head_seq = (int)(block / all), d = a.d;
    const int kv_head = head_seq % a.n_kv_heads, seq = head_seq / a.n_kv_heads, image = 2 * d;
    if (tile >= a.tiles_q) {
        const int t = tile - a.tiles_q;
        u32x4 *const to = (u32x4 *)a.positions + ((int64_t)head_seq * a.tiles_kv + t) * 3 * image;
        for (int i = (int)thread_index(); i < image; i += 128) {
            const int row = i % 16, j = 16 * t + row, at = min(j, a.n_kv - 1);
            float k[8], v[8];
            back_load(k, a.k, row_of(a.k, kv_head, at, seq), i / 16, j < a.n_kv);
            back_load(v, a.v, row_of(a.v, kv_head, at, seq), i / 16, j < a.n_kv);
            gstore(to + i, back_halves(k));
            gstore(to + image + i, back_halves(v));
            lput(first + i, back_halves(k));
        }
        block_sync_lds();
        back_transpose(to + 2 * image, (const f16 *)first, d);
        return;
    }
    u32x4 *const to = (u32x4 *)a.columns + ((int64_t)head_seq * a.tiles_q + tile) * 4 * image;
    for (int i = (int)thread_index(); i < image; i += 128) {
        const int column = 16 * tile + i % 16, c = min(column, a.n_columns - 1);
        const int query = c / a.group, head = kv_head * a.group + c % a.group;
        const bool there = column < a.n_columns;
        float q[8], dout[8], out[8], sum = 0.0f;
        back_load(q, a.q, row_of(a.q, head, query, seq), i / 16, there);
        back_load(dout, a.dout, row_of(a.dout, head, query, seq), i / 16, there);
        back_load(out, a.out, row_of(a.out, head, query, seq), i / 16, there);
#pragma unroll
        for (int e = 0; e < 8; e++) sum = fmaf(dout[e], out[e], sum);
        gstore(to + i, back_halves(q));
        gstore(to + image + i, back_halves(dout));
        lput(first + i, back_halves(dout));
        lput(second + i, back_halves(q));
        lput(deltas + i, sum);
    }
    block_sync_lds();
    back_transpose(to + 2 * image, (const f16 *)first, d);
    back_transpose(to + 3 * image, (const f16 *)second, d);
    const int column = 16 * tile + (int)thread_index();
    if (thread_index() >= 16) return;
    const int c = min(column, a.n_columns - 1), head = kv_head * a.group + c % a.group;
    float delta = 0.0f, lse = INFINITY;
    for (int i = 0; i < d / 8; i++) delta += lget(deltas + 16 * i + (int)thread_index());
    if (column < a.n_columns) {
        lse = gload((const float *)row_of(a.lse, c / a.group, seq, 0) + head) * 1.44269504f;
    }
    if (lse == -INFINITY) lse = INFINITY;
    gstore((u32x4 *)a.sides + (int64_t)head_seq * a.tiles_q * 16 + column,
           make4(bits<uint32_t>(lse), bits<uint32_t>(delta),
                 (uint32_t)(a.n_kv - a.n_q + column / a.group), 0));
}

// P = 2^(x factor - lse), where x is a product of Q and K; or, with a softcap, its tanh (back_cap);
// then dS has the factor 1 - x^2. One branch for all elements of a fragment.
struct back_score {
    bool capped;
    float factor, to_tanh;
};
DEV back_score back_score_of(const rocq_k_attention_backward_args &a) {
    back_score to;
    to.capped = a.softcap > 0.0f;
    to.factor = (to.capped ? a.softcap : a.scale) * 1.44269504f;
    to.to_tanh = to.capped ? 2.0f * 1.44269504f * a.scale / a.softcap : 0.0f;
    return to;
}
DEV void back_cap(const back_score &score, frag_c &x) {
    if (!score.capped) return;
#pragma unroll
    for (int v = 0; v < 8; v++) {
        x.v[v] = 1.0f - 2.0f * rcp_fast(1.0f + exp2_fast(x.v[v] * score.to_tanh));
    }
}
// With a softcap: p times its slope, 1 - x^2, where x is the tanh that back_cap has computed.
DEV void back_bend(const back_score &score, float (&p)[8], const frag_c &x) {
    if (!score.capped) return;
#pragma unroll
    for (int v = 0; v < 8; v++) p[v] *= fmaf(-x.v[v], x.v[v], 1.0f);
}

// Loads a thread's share of CHUNKS chunks, and stores it in LDS.
template <int CHUNKS, int THREADS> struct back_share {
    enum { LOADS = (CHUNKS + THREADS - 1) / THREADS };
    u32x4 raw[LOADS];
};
template <int CHUNKS, int THREADS>
DEV void back_fetch(back_share<CHUNKS, THREADS> &share, const u32x4 *from) {
    const int thread = (int)thread_index();
#pragma unroll
    for (int i = 0; i < share.LOADS; i++) {
        if ((i + 1) * THREADS <= CHUNKS || i * THREADS + thread < CHUNKS) {
            share.raw[i] = gload(from + i * THREADS + thread);
        }
    }
}
template <int CHUNKS, int THREADS>
DEV void back_put(u32x4 *to, const back_share<CHUNKS, THREADS> &share) {
    const int thread = (int)thread_index();
#pragma unroll
    for (int i = 0; i < share.LOADS; i++) {
        if ((i + 1) * THREADS <= CHUNKS || i * THREADS + thread < CHUNKS) {
            lput(to + i * THREADS + thread, share.raw[i]);
        }
    }
}

template <typename F> DEV void back_clear(F &c) {
#pragma unroll
    for (int v = 0; v < 8; v++) c.v[v] = 0.0f;
}

// Stores the lane's elements of a row of a result: element v of each of its fragments.
template <int N>
DEV void back_put_row(const rocq_k_tensor &t, char *row, const frag_c (&sum)[N], int v,
                      const int32_t &head_dim, const float &scale) {
#pragma unroll
    for (int f = 0; f < N; f++) {
        const int e = 16 * f + frag_col(v);
        if (e < head_dim) put_float(t.format, row, e, sum[f].v[v] * scale);
    }
}

// dS of dP in s, from P cap' that the other wave has left in LDS.
DEV void back_turn(frag_c &s, const u32x2 *weights, const float *delta) {
    const u32x2 lo = lget(weights), hi = lget(weights + 32);
    const uint32_t w[4] = {lo.x, lo.y, hi.x, hi.y};
#pragma unroll
    for (int v = 0; v < 8; v++) {
        const float p = f16_f32((uint16_t)(w[v / 2] >> 16 * (v % 2)));
        s.v[v] = p * (s.v[v] - lget(delta + frag_row(v)));
    }
}

// P is 0 where a query, whose position is in LDS, does not see the position: first and up.
DEV void back_hide(float (&p)[8], const int *queries, int first, int window) {
#pragma unroll
    for (int v = 0; v < 8; v++) {
        const int back = lget(queries + frag_row(v)) - first - frag_col(v);
        if (back < 0 || back >= window) p[v] = 0.0f;
    }
}
// P cap' of a fragment, into LDS, for the other wave of a pair.
DEV void back_give(u32x2 *weights, const float (&p)[8]) {
    lput(weights, make2(attend_pair(p[0], p[1]), attend_pair(p[2], p[3])));
    lput(weights + 32, make2(attend_pair(p[4], p[5]), attend_pair(p[6], p[7])));
}

// s = Q K^T or dO V^T: the image of a tile of columns times fragments of KEYS times 16 positions.
template <int KEYS, int FRAGS>
DEV void back_multiply(frag_c (&s)[KEYS], const f16 *image, const frag (&own)[KEYS][FRAGS]) {
#pragma unroll
    for (int key = 0; key < KEYS; key++) back_clear(s[key]);
#pragma unroll
    for (int f = 0; f < FRAGS; f++) {
        if (f % 2 == 0) keep_order();
        const frag x = frag_load_lane(image + 256 * f, 128);
#pragma unroll
        for (int key = 0; key < KEYS; key++) wmma(s[key], x, own[key][f]);
    }
}

DEV void back_put_side(const u32x4 &side, float *lse, float *delta, int *position) { // into LDS
    lput(lse, bits<float>(side.x));
    lput(delta, bits<float>(side.y));
    lput(position, (int)side.z);
}

// P, in place of the scores x that it was made of; and P cap' for the other wave.
DEV void back_share_weights(frag_c &x, const back_score &score, float (&p)[8], u32x2 *to) {
    const frag_c bare = {{p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]}};
    back_bend(score, p, x);
    x = bare;
    back_give(to, p);
}

// dV += P^T dO, or dK += dS^T Q: own is P or dS of the wave's positions.
template <int KEYS, int FRAGS>
DEV void back_add(frag_c (&sum)[KEYS][FRAGS], const frag (&own)[KEYS], const f16 *image) {
#pragma unroll
    for (int f = 0; f < FRAGS; f++) {
        if (f % 2 == 0) keep_order();
        const frag x = frag_load_lane(image + 256 * f, 128);
#pragma unroll
        for (int key = 0; key < KEYS; key++) wmma(sum[key][f], own[key], x);
    }
}

// The columns whose queries see any of a block's positions, from n0 on; begin is a whole tile's.
struct back_range {
    int begin, end;
};
DEV back_range back_columns_of(const rocq_k_attention_backward_args &a, int n0) {
    const int64_t shift = a.n_kv - a.n_q, n_q = a.n_q;
    const int64_t low = a.causal ? min(max(n0 - shift, (int64_t)0), n_q) : 0;
    const int64_t past = (int64_t)n0 + ROCQ_K_BACK_BLOCK - 1 + a.window - shift;
    const int64_t high = a.window > 0 ? max(min(past, n_q), (int64_t)0) : n_q;
    return {(int)low * a.group / 16 * 16, (int)high * a.group};
}

// P of scores, with the columns' lse in LDS.
DEV void back_weigh(float (&p)[8], const frag_c &x, const back_score &score, const float *lse) {
#pragma unroll
    for (int v = 0; v < 8; v++) {
        p[v] = exp2_fast(fmaf(x.v[v], score.factor, -lget(lse + frag_row(v))));
    }
}

// Stores what a wave has summed up of its positions from `first` on: dV of role 0, dK of role 1.
template <int D>
DEV void back_put_kv(const rocq_k_attention_backward_args &a,
                     const frag_c (&sum)[back_shape<D>::KEY_FRAGS][back_shape<D>::FRAGS], int role,
                     int head_seq, int first) {
    typedef back_shape<D> S;
    const rocq_k_attention_backward_args &b = reread(a);
    const rocq_k_tensor &to = role == 0 ? b.dv : b.dk;
    const float scale = role == 0 ? 1.0f : b.scale;
    const int kv_head = head_seq % b.n_kv_heads, seq = head_seq / b.n_kv_heads;
#pragma unroll
    for (int key = 0; key < S::KEY_FRAGS; key++) {
#pragma unroll
        for (int v = 0; v < 8; v++) {
            const int j = first + 16 * key + frag_row(v);
            if (j >= b.n_kv) continue;
            back_put_row(to, row_of(to, kv_head, j, seq), sum[key], v, b.head_dim, scale);
        }
    }
}

// dK and dV of the block's positions.
template <int D>
DEV void attend_back_kv(const rocq_k_attention_backward_args &a, uint32_t block, u32x4 *tile) {
    typedef back_shape<D> S;
    u32x2 *const shared = (u32x2 *)(tile + S::KV_CHUNKS); // P cap' of each fragment
    float *const lse = (float *)(shared + S::PAIRS * S::KEY_FRAGS * 64), *const delta = lse + 16;
    int *const at = (int *)(delta + 16); // positions of queries
    // A wave of role 0 has K, P and dV, one of role 1 V, dS and dK of the same positions.
    const int wave = wave_read(wave_index(), 0), role = wave & 1, own = wave / 2 * S::KEY_FRAGS;
    const int lane = lane_index(), thread = (int)thread_index();
    const uint32_t heads = (uint32_t)(a.n_kv_heads * a.n_seqs);
    const int head_seq = (int)(block % heads), n0 = (int)(block / heads) * ROCQ_K_BACK_BLOCK;
    const int first = n0 + 16 * own, last = first + 16 * S::KEY_FRAGS - 1; // of the wave
    const f16 *positions = (const f16 *)a.positions +
                           ((int64_t)head_seq * a.tiles_kv + n0 / 16 + own) * 3 * S::IMAGE;
    const u32x4 *columns = (const u32x4 *)a.columns + (int64_t)head_seq * a.tiles_q * S::IMAGE / 2;
    const u32x4 *sides = (const u32x4 *)a.sides + (int64_t)head_seq * a.tiles_q * 16;
    const back_score score = back_score_of(a);
    const int window = a.window > 0 ? a.window : INT32_MAX;

    const back_range range = back_columns_of(a, n0);
    const int begin = range.begin, end = range.end;

    frag mine[S::KEY_FRAGS][S::FRAGS]; // K or V
    frag_c sum[S::KEY_FRAGS][S::FRAGS]; // dV or dK
#pragma unroll
    for (int i = 0; i < S::KEY_FRAGS * S::FRAGS; i++) {
        const int key = i / S::FRAGS, f = i % S::FRAGS;
        mine[key][f] = frag_load_image(positions + (3 * key + role) * S::IMAGE + 256 * f);
        back_clear(sum[key][f]);
    }
    back_share<S::KV_CHUNKS, S::THREADS> share;
    u32x4 side = make4(0, 0, 0, 0);
    const f16 *const images = (const f16 *)tile + role * S::IMAGE + frag_lane(128, 64);
    u32x2 *const weights = shared + own * 64 + lane;
    if (begin < end) {
        back_fetch(share, columns + begin / 16 * (S::IMAGE / 2));
        if (thread < 16) side = gload(sides + begin + thread);
    }
    for (int c = begin; c < end; c += 16) {
        block_sync_lds();
        back_put(tile, share);
        if (thread < 16) {
            back_put_side(side, lse + thread, delta + thread, at + thread);
        }
        block_sync_lds();
        const int next = c + 16;
        if (next < end) {
            back_fetch(share, columns + next / 16 * (S::IMAGE / 2));
            if (thread < 16) side = gload(sides + next + thread);
        }
        const int p_first = wave_read(lget(at), 0), p_last = wave_read(lget(at + 15), 0);
        const bool live = !a.causal || (first <= p_last && p_first - last < window);
        const bool hides = a.causal && (last > p_first || p_last - first >= window);
        frag_c s[S::KEY_FRAGS]; // S or dP, then P or dS
        if (live) {
            back_multiply(s, images, mine);
        }
        if (live && role == 0) {
#pragma unroll
            for (int key = 0; key < S::KEY_FRAGS; key++) {
                float p[8];
                back_cap(score, s[key]);
                back_weigh(p, s[key], score, lse);
                if (hides) back_hide(p, at, first + 16 * key, window);
                back_share_weights(s[key], score, p, weights + 64 * key);
            }
        }
        block_sync_lds();
        if (!live) continue;
        frag operand[S::KEY_FRAGS];
#pragma unroll
        for (int key = 0; key < S::KEY_FRAGS; key++) {
            if (role == 1) back_turn(s[key], weights + 64 * key, delta);
            operand[key] = frag_from_c(s[key]);
        }
        back_add(sum, operand, images + 2 * S::IMAGE);
    }

    back_put_kv<D>(a, sum, role, head_seq, first);
}

// Of each column of the lane: lse and delta, and the positions from low to high - 1, which it sees.
struct back_sides {
    float lse[FRAG_SLOTS], delta[FRAG_SLOTS];
    int low[FRAG_SLOTS], high[FRAG_SLOTS];
};
DEV back_sides back_sides_of(const rocq_k_attention_backward_args &a, const u32x4 *from) {
    back_sides s;
#pragma unroll
    for (int i = 0; i < FRAG_SLOTS; i++) {
        const u32x4 side = gload(from + frag_slot_col(i));
        s.lse[i] = bits<float>(side.x);
        s.delta[i] = bits<float>(side.y);
        s.low[i] = a.window > 0 ? (int)side.z - a.window + 1 : 0;
        s.high[i] = a.causal ? min((int)side.z + 1, a.n_kv) : a.n_kv;
    }
    return s;
}

// s += an image of 16 positions times the fragments of 16 columns.
template <bool ORDERED, int N>
DEV void back_products(frag_c &s, const f16 *image, const frag (&own)[N]) {
#pragma unroll
    for (int f = 0; f < N; f++) {
        if (ORDERED || f % 2 == 0) keep_order();
        wmma(s, frag_load_lane(image + 256 * f, 128), own[f]);
    }
}
template <int N> DEV void back_products(frag_c &s, const f16 *image, const f16 *own) {
#pragma unroll
    for (int f = 0; f < N; f++) {
        keep_order();
        const frag x = frag_load_lane(image + 256 * f, 128);
        wmma(s, x, frag_load_lane(own + 256 * f, 128));
    }
}
// dQ += dS K, from the image of 16 positions of K transposed.
template <bool ORDERED, int N>
DEV void back_add_dq(frag_c (&sum)[N], const frag &ds, const f16 *image) {
#pragma unroll
    for (int f = 0; f < N; f++) {
        if (ORDERED || f % 2 == 0) keep_order();
        wmma(sum[f], ds, frag_load_lane(image + 256 * f, 128));
    }
}
// P cap' of S, for the positions from first on. hides: some are hidden from some of the columns.
DEV void back_weigh(float (&p)[8], frag_c &s, const back_score &score, const back_sides &side,
                    bool hides, int first) {
    back_cap(score, s);
#pragma unroll
    for (int v = 0; v < 8; v++) {
        const int slot = frag_slot(v), j = first + frag_row(v);
        p[v] = exp2_fast(fmaf(s.v[v], score.factor, -side.lse[slot]));
        if (hides && (j < side.low[slot] || j >= side.high[slot])) p[v] = 0.0f;
    }
    back_bend(score, p, s);
}

// Stores dQ of a wave's 16 columns, from `column` on.
template <int N>
DEV void back_put_q(const rocq_k_attention_backward_args &a, const frag_c (&sum)[N], int head_seq,
                    int column) {
    const rocq_k_attention_backward_args &b = reread(a);
    const int kv_head = head_seq % b.n_kv_heads, seq = head_seq / b.n_kv_heads;
#pragma unroll
    for (int v = 0; v < 8; v++) {
        const int c = column + frag_row(v);
        if (c >= b.n_columns) continue;
        char *const row = row_of(b.dq, kv_head * b.group + c % b.group, c / b.group, seq);
        back_put_row(b.dq, row, sum, v, b.head_dim, b.scale);
    }
}

// dQ of the block's columns.
template <int D>
DEV void attend_back_q(const rocq_k_attention_backward_args &a, uint32_t block, u32x4 *tile) {
    typedef back_shape<D> S;
    enum { DOUT_IN_LDS = S::DOUT_IN_LDS };
    u32x4 *const douts = tile + S::Q_CHUNKS;
    const int wave = wave_read(wave_index(), 0), lane = lane_index();
    const uint32_t heads = (uint32_t)(a.n_kv_heads * a.n_seqs);
    const int head_seq = (int)(block % heads);
    const int column0 = a.tiles_q * 16 - ((int)(block / heads) + 1) * S::COLUMNS;
    const int column = column0 + 16 * wave;
    const f16 *own = (const f16 *)a.columns +
                     ((int64_t)head_seq * a.tiles_q + column / 16) * 4 * S::IMAGE;
    const u32x4 *positions = (const u32x4 *)a.positions +
                             (int64_t)head_seq * a.tiles_kv * 3 * (S::IMAGE / 8);
    const u32x4 *sides = (const u32x4 *)a.sides + (int64_t)head_seq * a.tiles_q * 16;
    const back_score score = back_score_of(a);

    // What the queries of the block's first and last columns see bounds what all see.
    const int shift = a.n_kv - a.n_q, past = min(column0 + (int)S::COLUMNS, a.n_columns) - 1;
    const int p_first = shift + column0 / a.group, p_last = shift + past / a.group;
    const int begin = a.window > 0 && p_first >= a.window
                          ? (p_first - a.window + 1) / (16 * S::Q_TILES) * (16 * S::Q_TILES) : 0;
    const int end = a.causal ? min(p_last + 1, a.n_kv) : a.n_kv;

    frag q[S::FRAGS], dout[DOUT_IN_LDS ? 1 : S::FRAGS];
    frag_c sum[S::FRAGS];
#pragma unroll
    for (int f = 0; f < S::FRAGS; f++) {
        q[f] = frag_load_image(own + 256 * f);
        if (!DOUT_IN_LDS) dout[f] = frag_load_image(own + S::IMAGE + 256 * f);
        back_clear(sum[f]);
    }
    f16 *const dout_image = (f16 *)douts + wave * S::IMAGE;
    if (DOUT_IN_LDS) {
        for (int i = lane; i < S::IMAGE / 8; i += 32) {
            lput((u32x4 *)dout_image + i, gload((const u32x4 *)(own + S::IMAGE) + i));
        }
        wave_sync();
    }
    const back_sides side = back_sides_of(a, sides + column);
    const int wave_low = shift + column / a.group, wave_high = shift + (column + 15) / a.group;
    back_share<S::Q_CHUNKS, S::THREADS> share;
    const f16 *const images = (const f16 *)tile + frag_lane(128, 64);
    if (begin < end) back_fetch(share, positions + begin / 16 * 3 * (S::IMAGE / 8));
    for (int j = begin; j < end; j += 16 * S::Q_TILES) {
        block_sync_lds();
        back_put(tile, share);
        block_sync_lds();
        const int next = j + 16 * S::Q_TILES;
        if (next < end) back_fetch(share, positions + next / 16 * 3 * (S::IMAGE / 8));
#pragma unroll
        for (int t = 0; t < S::Q_TILES; t++) {
            const int first = j + 16 * t, last = first + 15;
            if (a.causal && (first > wave_high ||
                             (a.window > 0 && last <= wave_low - a.window))) continue;
            const bool hides = last >= a.n_kv ||
                               (a.causal && (last > wave_low ||
                                             (a.window > 0 && first <= wave_high - a.window)));
            const f16 *const k = images + t * 3 * S::IMAGE;
            const f16 *const dout_lane = dout_image + recomputed(frag_lane(128, 64));
            frag_c s, ds;
            back_clear(s);
            back_clear(ds);
            back_products<DOUT_IN_LDS != 0>(s, k, q);
            float weight[8];
            back_weigh(weight, s, score, side, hides, first);
            if constexpr (DOUT_IN_LDS) back_products<S::FRAGS>(ds, k + S::IMAGE, dout_lane);
            else back_products<DOUT_IN_LDS != 0>(ds, k + S::IMAGE, dout);
#pragma unroll
            for (int v = 0; v < 8; v++) ds.v[v] = weight[v] * (ds.v[v] - side.delta[frag_slot(v)]);
            const frag operand = frag_from_c(ds);
            back_add_dq<DOUT_IN_LDS != 0>(sum, operand, k + 2 * S::IMAGE);
        }
    }

    back_put_q(a, sum, head_seq, column);
}

#define ROCQ_X(X, d)                                                                            \
    KERNEL(attention_backward_##d, rocq_k_attention_backward_args, ROCQ_K_BACK_THREADS(d)) {    \
        typedef back_shape<d> S;                                                                \
        LDS(u32x4, tile, S::KV_LDS > S::Q_LDS ? S::KV_LDS : S::Q_LDS);                          \
        if (a.n_columns == 0) return;                                                           \
        const uint32_t block = block_index() + a.common.block0;                                 \
        const uint32_t n_kv = (uint32_t)(a.tiles_kv / (ROCQ_K_BACK_BLOCK / ROCQ_K_BACK_TILE) *  \
                                         a.n_kv_heads * a.n_seqs);                              \
        if (block < n_kv) attend_back_kv<d>(a, block, tile);                                    \
        else attend_back_q<d>(a, block - n_kv, tile);                                           \
    }
ROCQ_K_BACK_DIMS(ROCQ_X, unused)
#undef ROCQ_X

// -- norm_backward, activate_backward, glu_backward, gather_backward --

// norm_backward: as in rocq_norm_backward_params.
//
//   dx, dy, x, residual  F32 or F16 [K, rows], any strides; dx may be dy or residual
//   dx16                 F16, dx again, or absent
//   work                 F32 [128, 2, n_shares, tiles]
//
// Two kinds of blocks, of 256 threads, in one launch; or in two, where dx is dy.
// Blocks below n_sums are for dweight and dbias: block b takes tile b / n_shares of 128 columns,
// and share b % n_shares of the rows. A lane takes a quad, and a wave every 8th row, four at a
// time. The waves' sums are added up in order, and by the last block of a tile the shares' sums.
// The other blocks are for dx: up to K = 1024 a wave takes a row, so that no barrier is in its way,
// else all of the block. Of a row of up to 24 elements a thread x and dy are read once and stay in
// registers; of a longer one they are read twice, for the means and for dx, the second time from a
// cache. LDS: 8 KB. Bytes: dy, x, residual and dx once, where other reads meet a cache.
enum { NORM_BACKWARD_ROWS = 4, NORM_BACKWARD_QUADS = 6 }; // loaded at once

DEV float norm_at(const rocq_k_tensor &t, const place &at) { // mean or rstd of a row
    return gload((const float *)row_of(t, at.i2, at.i3, 0) + at.i1);
}

DEV void norm_backward_sums(const rocq_k_norm_backward_args &a, uint32_t block, float *parts,
                            uint32_t *word) {
    enum { R = NORM_BACKWARD_ROWS };
    const uint32_t n_shares = (uint32_t)a.n_shares, tile = block / n_shares;
    const uint32_t share = block - tile * n_shares, rows = rows_of(a.x);
    const uint32_t end = (uint32_t)((uint64_t)rows * (share + 1) / n_shares);
    const int n = a.x.ne[0], k = (int)tile * 128 + 4 * lane_index();
    const int count = quad_count(n, k), t = (int)thread_index();
    const bool x_wide = is_wide(a.x), dy_wide = is_wide(a.dy);
    float dw[4] = {0.0f, 0.0f, 0.0f, 0.0f}, db[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (uint32_t r = (uint32_t)((uint64_t)rows * share / n_shares) + (uint32_t)wave_index();
         r < end; r += 8 * R) {
        u32x4 x_raw[R], dy_raw[R];
        float mean[R], rstd[R];
#pragma unroll
        for (int i = 0; i < R; i++) {
            const bool live = r + 8 * (uint32_t)i < end;
            const place at = place_of(a.x, live ? r + 8 * (uint32_t)i : r);
            x_raw[i] = load4(a.x.format, row_of(a.x, at.i1, at.i2, at.i3), x_wide, k, count);
            dy_raw[i] = load4(a.dy.format, row_of(a.dy, at.i1, at.i2, at.i3), dy_wide, k,
                              live ? count : 0);
            mean[i] = a.mean.data ? norm_at(a.mean, at) : 0.0f;
            rstd[i] = norm_at(a.rstd, at);
        }
#pragma unroll
        for (int i = 0; i < R; i++) {
            float x[4], dy[4];
            if (r + 8 * (uint32_t)i >= end) continue; // else 0 times an infinity would be NaN
            floats4(a.x.format, x_raw[i], x);
            floats4(a.dy.format, dy_raw[i], dy);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                dw[e] = fmaf(dy[e], (x[e] - mean[i]) * rstd[i], dw[e]);
                db[e] += dy[e];
            }
        }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        lput(parts + wave_index() * 256 + 4 * lane_index() + e, dw[e]);
        lput(parts + wave_index() * 256 + 128 + 4 * lane_index() + e, db[e]);
    }
    block_sync_lds();
    float sum = 0.0f; // of dweight for the first half of the threads, of dbias for the others
#pragma unroll
    for (int w = 0; w < 8; w++) sum += lget(parts + w * 256 + t);
    if (n_shares > 1) {
        float *const work = a.work + (int64_t)tile * n_shares * 256 + t;
        gstore(work + 256 * share, sum);
        if (block_ticket(a.counter + tile, word) != n_shares - 1) return;
        if (t == 0) gstore(a.counter + tile, 0u);
        sum = 0.0f;
#pragma unroll 8
        for (uint32_t i = 0; i < n_shares; i++) sum += gload(work + 256 * i);
    }
    float *to = t < 128 ? a.dweight : a.dbias;
    const int column = (int)tile * 128 + (t & 127);
    if (!to || column >= n) return;
    gstore(to + column, a.accumulate ? gload(to + column) + sum : sum);
}

DEV void norm_backward_row(const rocq_k_norm_backward_args &a, uint32_t row, int thread,
                           int threads, float *lds) {
    enum { Q = NORM_BACKWARD_QUADS };
    const place at = place_of(a.x, row);
    const int n = a.x.ne[0];
    const char *const x_row = row_of(a.x, at.i1, at.i2, at.i3);
    const char *const dy_row = row_of(a.dy, at.i1, at.i2, at.i3);
    const char *const residual_row = row_of(a.residual, at.i1, at.i2, at.i3);
    char *const dx_row = row_of(a.dx, at.i1, at.i2, at.i3);
    char *const dx16_row = row_of(a.dx16, at.i1, at.i2, at.i3);
    // One flag for all, because one for each would spill scalar registers on gfx1150 (clang 19).
    const bool wide = is_wide(a.x) && is_wide(a.dy) && is_wide(a.dx) && is_wide(a.residual) &&
                      is_wide(a.dx16) && ((uintptr_t)a.weight & 15u) == 0;
    const float rstd = norm_at(a.rstd, at), mean = a.mean.data ? norm_at(a.mean, at) : 0.0f;
    const bool once = n <= 4 * Q * threads; // then both passes have all of the row in registers
    float g_mean = 0.0f, gx_mean = 0.0f;
    float x[Q][4], g[Q][4];
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
#pragma unroll 1
        for (int base = 4 * thread; base < n; base += 4 * Q * threads) {
            u32x4 raw[Q], dy[Q];
            if (pass == 0 || !once) {
#pragma unroll
                for (int j = 0; j < Q; j++) {
                    const int k = base + 4 * j * threads, count = quad_count(n, k);
                    raw[j] = load4(a.x.format, x_row, wide, k, count);
                    dy[j] = load4(a.dy.format, dy_row, wide, k, count);
                }
#pragma unroll
                for (int j = 0; j < Q; j++) {
                    const int k = base + 4 * j * threads, count = quad_count(n, k);
                    float w[4];
                    floats4(a.x.format, raw[j], x[j]);
                    floats4(a.dy.format, dy[j], g[j]);
                    if (a.weight) get4(ROCQ_F32, (const char *)a.weight, wide, k, count, w);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        if (a.weight) g[j][e] *= w[e];
                        x[j][e] = (x[j][e] - mean) * rstd;
                    }
                }
            }
            if (pass == 0) {
#pragma unroll
                for (int j = 0; j < Q; j++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        g_mean += g[j][e]; // beyond the row it is 0
                        gx_mean = fmaf(g[j][e], x[j][e], gx_mean);
                    }
                }
                continue;
            }
#pragma unroll
            for (int j = 0; j < Q; j++) {
                const int k = base + 4 * j * threads, count = quad_count(n, k);
                raw[j] = make4(0, 0, 0, 0);
                if (!a.residual.data) continue;
                raw[j] = load4(a.residual.format, residual_row, wide, k, count);
            }
#pragma unroll
            for (int j = 0; j < Q; j++) {
                const int k = base + 4 * j * threads, count = quad_count(n, k);
                float v[4];
                floats4(a.residual.format, raw[j], v);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    v[e] = fmaf(fmaf(-x[j][e], gx_mean, g[j][e] - g_mean), rstd, v[e]);
                }
                put_floats(a.dx.format, wide, dx_row, k, count, v);
                if (a.dx16.data) put_floats(ROCQ_F16, wide, dx16_row, k, count, v);
            }
        }
        if (pass == 1) break;
        g_mean = threads == 32 ? wave_sum(g_mean) : block_sum(g_mean, lds);
        gx_mean = threads == 32 ? wave_sum(gx_mean) : block_sum(gx_mean, lds + BLOCK_WORK);
        g_mean = a.mean.data ? g_mean / (float)n : 0.0f;
        gx_mean /= (float)n;
    }
}

KERNEL(norm_backward, rocq_k_norm_backward_args, 256) {
    LDS(float, lds, 8 * 256);
    LDS(uint32_t, word, 1);
    if (a.x.ne[0] == 0) return;
    const uint32_t block = a.first + a.common.block0 + block_index();
    if (block < (uint32_t)a.n_sums) {
        norm_backward_sums(a, block, lds, word);
    } else {
        const bool alone = a.x.ne[0] <= 1024; // each wave has a row
        uint32_t row = block - (uint32_t)a.n_sums;
        if (alone) row = 8 * row + (uint32_t)wave_index();
        if (row >= rows_of(a.x)) return;
        norm_backward_row(a, row, alone ? lane_index() : (int)thread_index(), alone ? 32 : 256,
                          lds);
    }
}

// map_backward: dx = activation'(x) dy up, dup = activation(x) dy, without up as if that were 1.
//
//   all  F32 or F16 of one shape, any strides; dx may be dy or x
//
// Geometry: 256 threads, a quad each, of which a row has ceil(ne0 / 4); fewer than 2^32 in all.
// Bytes: every operand once.
KERNEL(map_backward, rocq_k_map_backward_args, 256) {
    if (a.dx.ne[0] == 0) return;
    const uint32_t item = (a.common.block0 + block_index()) * 256 + thread_index();
    const uint32_t quads = (uint32_t)(a.dx.ne[0] + 3) / 4, r = item / quads;
    if (r >= rows_of(a.dx)) return;
    const int64_t k = 4 * (int64_t)(item - r * quads);
    const int count = quad_count(a.dx.ne[0], k);
    const place p = place_of(a.dx, r);
    float dy[4], x[4], up[4], dx[4];
    get4(a.dy.format, row_of(a.dy, p.i1, p.i2, p.i3), is_wide(a.dy), k, count, dy);
    get4(a.x.format, row_of(a.x, p.i1, p.i2, p.i3), is_wide(a.x), k, count, x);
    if (a.up.data) {
        get4(a.up.format, row_of(a.up, p.i1, p.i2, p.i3), is_wide(a.up), k, count, up);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) dx[e] = dy[e];
    times_slope4(a.activation, x, dx);
    if (a.up.data) {
        activate4(a.activation, x);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            dx[e] *= up[e];
            x[e] *= dy[e];
        }
        put_floats(a.dup.format, is_wide(a.dup), row_of(a.dup, p.i1, p.i2, p.i3), k, count, x);
    }
    put_floats(a.dx.format, is_wide(a.dx), row_of(a.dx, p.i1, p.i2, p.i3), k, count, dx);
}

// gather_backward: dtable[., ids[i]] += scale dy[., i], equal ids in the order of i.
//
//   dtable  F32 [K, rows]     dy  F32 or F16 [K, n]     ids  I32 [n]; one out of range adds nothing
//           and sets a bit of the status
//
// A block takes token i, and acts only if no earlier token has its id; then it adds all later ones
// as well. It looks through the ids 1024 at a time: 32 words in LDS have a bit for each that is
// equal, and from them follows a list, in order. A thread takes every 256th quad of the row, and
// loads eight rows of the list at a time. Geometry: a block of 256 threads a token. LDS: 4.1 KB.
// Bytes: dy once, the rows of dtable twice; the ids once for each token, from L2: 64 MB for 4096.
KERNEL(gather_backward, rocq_k_gather_backward_args, 256) {
    LDS(uint32_t, mask, 32);
    LDS(int, list, 1024);
    if (a.n == 0) return;
    const int i = (int)(a.common.block0 + block_index()), t = (int)thread_index();
    const int id = gload(a.ids + i), n = a.dy.ne[0];
    if (id < 0 || id >= a.dtable.ne[1]) {
        if (t == 0) atomic_or(a.common.status, ROCQ_K_BAD_ID);
        return;
    }
    float *const row = (float *)row_of(a.dtable, id, 0, 0);
    const bool wide = is_wide(a.dtable), dy_wide = is_wide(a.dy);
#pragma unroll 1
    for (int first = 0; first < a.n; first += 1024) {
        bool same[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int j = first + 256 * e + t;
            same[e] = j < a.n && gload(a.ids + (j < a.n ? j : 0)) == id;
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const uint32_t word = wave_ballot(same[e]);
            if (lane_index() == 0) lput(mask + 8 * e + wave_index(), word);
        }
        block_sync_lds();
        const int total = wave_sum(__popc(lget(mask + lane_index())));
#pragma unroll 1
        for (int e = 0; e < 4; e++) {
            if (!(e == 0 ? same[0] : e == 1 ? same[1] : e == 2 ? same[2] : same[3])) continue;
            const int own = 8 * e + wave_index();
            int rank = __popc(lget(mask + own) & ((1u << lane_index()) - 1u));
#pragma unroll 1
            for (int w = 0; w < own; w++) rank += __popc(lget(mask + w));
            lput(list + rank, first + 256 * e + t);
        }
        block_sync_lds();
        if (total > 0 && lget(list) < i) return;
#pragma unroll 1
        for (int k = 4 * t; k < n && total > 0; k += 1024) {
            const int count = quad_count(n, k);
            float v[4];
            get4(ROCQ_F32, (const char *)row, wide, k, count, v);
#pragma unroll 1
            for (int m = 0; m < total; m += 8) {
                float y[8][4];
#pragma unroll
                for (int u = 0; u < 8; u++) {
                    const int j = lget(list + (m + u < total ? m + u : m));
                    get4(a.dy.format, row_of(a.dy, j, 0, 0), dy_wide, k, m + u < total ? count : 0,
                         y[u]);
                }
#pragma unroll
                for (int u = 0; u < 8; u++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) v[e] = fmaf(y[u][e], a.scale, v[e]);
                }
            }
            put_floats(ROCQ_F32, wide, (char *)row, k, count, v);
        }
        block_sync_lds(); // the list has been read, before the next 1024
    }
}

// -- cross_entropy, grad_norm, adamw --

// cross_entropy: the loss of a column and its gradient, as in rocq_cross_entropy_params.
//
//   logits, dlogits  F32 or F16 [V, n], rows at any stride; dlogits may be logits or absent
//   targets          I32 [n]; one of V or more is ignored and sets a bit of the status
//
// A block takes a column. In one pass each thread finds the largest of its own logits and the sum
// of exp(logit - largest), scaling the sum down where a tile has a larger one; then the sums are
// rescaled to the block's largest and added up. A second pass writes the gradient; the thread that
// has the target's element then writes that again, with the target's term.
// Geometry: a block a column, 32 to 1024 threads as the host chooses. LDS: 256 bytes.
// Bytes: logits twice, the second time from L2 where all columns under way fit, and dlogits once.
enum { ENTROPY_QUADS = 4 };
KERNEL(cross_entropy, rocq_k_cross_entropy_args, 1024) {
    LDS(float, work, 2 * BLOCK_WORK);
    if (a.logits.ne[0] == 0) return;
    const uint32_t column = a.common.block0 + block_index();
    const int n = a.logits.ne[0], target = gload(a.targets + column);
    const char *row = row_of(a.logits, column, 0, 0);
    char *to = a.dlogits.data ? row_of(a.dlogits, column, 0, 0) : nullptr;
    const bool aligned = is_aligned(a.logits), to_aligned = is_aligned(a.dlogits);
    const float weight = a.weights ? gload(a.weights + column) : 1.0f;
    const float all = a.scale ? weight * gload(a.scale) : weight;
    const bool counts = target >= 0 && target < n && weight != 0.0f;
    const float at_target = counts ? get_float(a.logits.format, row, target) : 0.0f;
    if (target >= n && thread_index() == 0) atomic_or(a.common.status, ROCQ_K_BAD_ID);
    u32x4 raw[ENTROPY_QUADS];
    const auto load = [&](int base) { // not past the end, where others may have written
#pragma unroll
        for (int j = 0; j < ENTROPY_QUADS; j++) {
            const int k = tile_at(base, j), count = quad_count(n, k);
            raw[j] = load4(a.logits.format, row, aligned && count == 4, k, count);
        }
    };
    float v[ENTROPY_QUADS][4], top = -INFINITY, sum = 0.0f;
#pragma unroll 1
    for (int base = 0; counts && base < n; base += tile_size(ENTROPY_QUADS)) {
        load(base);
        float most = -INFINITY;
#pragma unroll
        for (int j = 0; j < ENTROPY_QUADS; j++) {
            floats4(a.logits.format, raw[j], v[j]);
            if (!is_full(n, base, j)) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (tile_at(base, j) + e >= n) v[j][e] = -INFINITY;
                }
            }
#pragma unroll
            for (int e = 0; e < 4; e++) most = fmaxf(most, v[j][e]); // a NaN leaves it as it is
        }
        if (most > top) {
            sum *= exp_fast(top - most);
            top = most;
        }
        const float shift = top == -INFINITY ? 0.0f : top; // exp(-inf - -inf) would be NaN
#pragma unroll
        for (int j = 0; j < ENTROPY_QUADS; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) sum += exp_fast(v[j][e] - shift);
        }
    }
    float factor = 0.0f, largest = 0.0f;
    if (counts) {
        largest = block_max(top, work);
        sum = block_sum(top == -INFINITY ? sum : sum * exp_fast(top - largest), work + BLOCK_WORK);
        factor = all / sum;
    }
    if (thread_index() == 0 && a.loss) {
        const float log_sum = 0.693147181f * log2_fast(sum);
        gstore(a.loss + column, counts ? log_sum + (largest - at_target) : 0.0f);
    }
    if (!to) return;
    // The gradient of logit x. Without a softcap the slope is 1, but c is NaN for a logit of -inf.
    const auto slope = [&](float x, float less) {
        const float d = exp_fast(x - largest) * factor - less, c = x * a.per_cap;
        return a.per_cap == 0.0f ? d : d * fmaf(-c, c, 1.0f);
    };
#pragma unroll 1
    for (int base = 0; base < n; base += tile_size(ENTROPY_QUADS)) {
        if (counts) load(base);
#pragma unroll
        for (int j = 0; j < ENTROPY_QUADS; j++) {
            const int k = tile_at(base, j), count = quad_count(n, k);
            float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (k >= n) break;
            floats4(a.logits.format, raw[j], v[j]);
#pragma unroll
            for (int e = 0; counts && e < 4; e++) d[e] = slope(v[j][e], 0.0f);
            put_floats(a.dlogits.format, to_aligned && count == 4, to, k, count, d);
        }
    }
    if (counts && (uint32_t)target / 4 % n_threads() == thread_index()) {
        put_float(a.dlogits.format, to, target, slope(at_target, all));
    }
}

// grad_norm: the norm of g, and what follows for the state, as in rocq_grad_norm_params.
//
//   g  F32 [n]     state  F32 [ROCQ_TRAIN_STATE]     work  F32 [n_blocks]
//
// A thread adds up the squares of every (256 n_blocks)th quad, four at a time in flight; the last
// block to finish adds up the blocks' sums in order. Geometry: n_blocks of 256 threads, as many as
// the chip holds. LDS: 260 bytes. Bytes: g once.
DEV void grad_state(const rocq_k_grad_norm_args &a, float sum) {
    const float scale = gload(a.state + ROCQ_TRAIN_LOSS_SCALE), norm = sqrtf(sum) / scale;
    const bool finite = norm <= 3.40282347e38f; // NaN is not
    const int count = finite ? ROCQ_TRAIN_STEPS : ROCQ_TRAIN_SKIPPED;
    float since = finite ? gload(a.state + ROCQ_TRAIN_SINCE) + 1.0f : 0.0f, next = scale;
    float factor = 0.0f;
    if (finite)
        factor = (a.max_norm > 0.0f && norm > a.max_norm ? a.max_norm / norm : 1.0f) / scale;
    if (a.growth_interval > 0 && !finite) next = fmaxf(0.5f * scale, 1.0f);
    if (a.growth_interval > 0 && since >= (float)a.growth_interval) {
        next = fminf(2.0f * scale, 16777216.0f);
        since = 0.0f;
    }
    gstore(a.state + ROCQ_TRAIN_LOSS_SCALE, next);
    gstore(a.state + ROCQ_TRAIN_FACTOR, factor);
    gstore(a.state + ROCQ_TRAIN_NORM, norm);
    gstore(a.state + ROCQ_TRAIN_SINCE, since);
    gstore(a.state + count, gload(a.state + count) + 1.0f);
}

KERNEL(grad_norm, rocq_k_grad_norm_args, 256) {
    LDS(float, work, 2 * BLOCK_WORK);
    LDS(uint32_t, word, 1);
    if (a.n_blocks == 0) return;
    const uint32_t block = a.common.block0 + block_index(), step = 1024u * (uint32_t)a.n_blocks;
    const bool wide = ((uintptr_t)a.g & 15u) == 0;
    float sum = 0.0f;
    int64_t k = 4 * (int64_t)(256 * block + thread_index());
#pragma unroll 1
    for (; k + 3 * (int64_t)step + 4 <= a.n; k += 4 * (int64_t)step) {
        float v[4][4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            get4(ROCQ_F32, (const char *)a.g, wide, k + j * (int64_t)step, 4, v[j]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) sum = fmaf(v[j][e], v[j][e], sum);
        }
    }
#pragma unroll 1
    for (; k < a.n; k += step) {
        const int count = quad_count(a.n, k);
        float v[4];
        get4(ROCQ_F32, (const char *)a.g, wide && count == 4, k, count, v);
#pragma unroll
        for (int e = 0; e < 4; e++) sum = fmaf(v[e], v[e], sum);
    }
    sum = block_sum(sum, work);
    if (thread_index() == 0) gstore(a.work + block, sum);
    if (block_ticket(a.counter, word) != (uint32_t)a.n_blocks - 1) return;
    if (thread_index() == 0) gstore(a.counter, 0u);
    sum = 0.0f;
#pragma unroll 4
    for (int b = (int)thread_index(); b < a.n_blocks; b += 256) sum += gload(a.work + b);
    sum = block_sum(sum, work + BLOCK_WORK);
    if (thread_index() == 0) grad_state(a, sum);
}

// adamw: as in rocq_adamw_params.
//
//   w, g  F32 [n]     w16  F16 or BF16 [n] or absent     m, v  F32 [n], or int8 codes with a scale
//   in F32 for every 256
//
// A wave takes 256 elements, a lane two quads of them that lie 128 apart, so that all its loads, up
// to eight of 16 bytes, are under way together and stores are side by side. Geometry: 256 threads,
// 2048 elements a block. Bytes: w, m and v twice, g once, or twice with clear, w16 once: 28 bytes
// an element at least in F32. Some 60 instructions an element take less time than that.
// 1 - beta^t is -expm1(t log beta). Where beta^t is near 1 the difference would cancel, so the
// series is summed.
DEV float one_less_power(float log_beta, float t) {
    const float x = t * log_beta;
    if (x < -0.35f) return 1.0f - exp_full(x);
    float y = 1.0f;
#pragma unroll
    for (int i = 7; i > 1; i--) y = fmaf(x / (float)i, y, 1.0f);
    return -x * y;
}

// The codes of m, or of v (SECOND), as numbers, and back. Before rounding, an offset from
// -1/2 to 1/2 is added that depends on the element and the step: see rocq__moment_encode_scalar.
template <bool SECOND>
DEV void moment_load(const void *codes, int64_t k, int count, bool wide, float scale, float v[4]) {
    uint32_t word = 0;
    if (wide && count == 4) {
        word = gload((const uint32_t *)((const char *)codes + k));
    } else {
        for (int e = 0; e < count; e++) {
            word |= (uint32_t)gload((const uint8_t *)codes + k + e) << 8 * e;
        }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float root = (float)((int8_t)(word >> 8 * e) + (SECOND ? 128 : 0)) * scale;
        v[e] = SECOND ? root * root : root;
    }
}
template <bool SECOND>
DEV void moment_store(void *codes, int64_t k, int count, bool wide, float inverse, float dither,
                      const float v[4]) {
    uint32_t word = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float u = fmaf((float)((int)(k & 255) + e), 0.618033989f, dither);
        float q = rintf(fmaf(SECOND ? sqrtf(v[e]) : v[e], inverse, u - rintf(u)));
        if (SECOND) q = fmaxf(q, v[e] > 0.0f ? 1.0f : 0.0f) - 128.0f;
        q = fminf(fmaxf(q, SECOND ? -128.0f : -127.0f), 127.0f);
        word |= ((uint32_t)(int)q & 255u) << 8 * e;
    }
    if (wide && count == 4) {
        gstore((uint32_t *)((char *)codes + k), word);
    } else {
        for (int e = 0; e < count; e++) {
            gstore((uint8_t *)codes + k + e, (uint8_t)(word >> 8 * e));
        }
    }
}

KERNEL(adamw, rocq_k_adamw_args, 256) {
    if (a.n == 0) return;
    const int64_t strip = (int64_t)(a.common.block0 + block_index()) * 8 + wave_index();
    const bool wide = ((((uintptr_t)a.w | (uintptr_t)a.g) & 15u) |
                       (((uintptr_t)a.m | (uintptr_t)a.v) & (a.coded ? 3u : 15u)) |
                       ((uintptr_t)a.w16 & 7u)) == 0;
    const float factor = gload(a.state + ROCQ_TRAIN_FACTOR), lr = gload(a.lr);
    const float t = fmaxf(gload(a.state + ROCQ_TRAIN_STEPS), 1.0f);
    float w[2][4], g[2][4], m[2][4], v[2][4], m_scale = 0.0f, v_scale = 0.0f;
    int64_t k[2];
    int count[2];
    bool whole[2];
    if (256 * strip >= a.n) return;
    if (a.coded) {
        m_scale = gload(a.m_scale + strip);
        v_scale = gload(a.v_scale + strip);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        k[j] = 256 * strip + 128 * j + 4 * lane_index();
        count[j] = quad_count(a.n, k[j]);
        whole[j] = wide && count[j] == 4;
        get4(ROCQ_F32, (const char *)a.w, whole[j], k[j], count[j], w[j]);
        get4(ROCQ_F32, (const char *)a.g, whole[j], k[j], count[j], g[j]);
        if (a.coded) {
            moment_load<false>(a.m, k[j], count[j], wide, m_scale, m[j]);
            moment_load<true>(a.v, k[j], count[j], wide, v_scale, v[j]);
        } else {
            get4(ROCQ_F32, (const char *)a.m, whole[j], k[j], count[j], m[j]);
            get4(ROCQ_F32, (const char *)a.v, whole[j], k[j], count[j], v[j]);
        }
    }
    if (factor != 0.0f) {
        const float step = lr / one_less_power(a.log_beta1, t);
        const float grow = 1.0f / one_less_power(a.log_beta2, t), decay = lr * a.weight_decay;
        float m_most = 0.0f, v_most = 0.0f;
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float G = g[j][e] * factor;
                m[j][e] = fmaf(a.beta1, m[j][e], a.rest1 * G);
                v[j][e] = fmaf(a.beta2, v[j][e], a.rest2 * G * G);
                const float root = sqrtf(v[j][e] * grow) + a.eps;
                w[j][e] = fmaf(-decay, w[j][e], w[j][e]) - step * m[j][e] / root;
                m_most = fmaxf(m_most, fabsf(m[j][e]));
                v_most = fmaxf(v_most, v[j][e]);
            }
            put_floats(ROCQ_F32, whole[j], (char *)a.w, k[j], count[j], w[j]);
            if (a.w16) put_floats(a.w16_format, whole[j], (char *)a.w16, k[j], count[j], w[j]);
            if (!a.coded) put_floats(ROCQ_F32, whole[j], (char *)a.m, k[j], count[j], m[j]);
            if (!a.coded) put_floats(ROCQ_F32, whole[j], (char *)a.v, k[j], count[j], v[j]);
        }
        if (a.coded) {
            m_most = wave_max(m_most);
            v_most = sqrtf(wave_max(v_most));
            const float m_inverse = m_most > 0.0f ? 127.0f / m_most : 0.0f;
            const float v_inverse = v_most > 0.0f ? 255.0f / v_most : 0.0f;
            const float dither = (float)((uint32_t)t * 0x9e3779b9u >> 8) * 0x1p-24f;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                moment_store<false>(a.m, k[j], count[j], wide, m_inverse, dither, m[j]);
                moment_store<true>(a.v, k[j], count[j], wide, v_inverse, dither + 0.5f, v[j]);
            }
            if (lane_index() == 0) {
                gstore(a.m_scale + strip, m_most / 127.0f);
                gstore(a.v_scale + strip, v_most / 255.0f);
            }
        }
    }
    if (!a.clear) return;
    const float zeros[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < 2; j++) {
        put_floats(ROCQ_F32, whole[j], (char *)a.g, k[j], count[j], zeros);
    }
}

// ---------------------------------------------------------------------------------------------
// >>entry
// ---------------------------------------------------------------------------------------------

// Checks, before a device is used for anything else, that it computes what this file expects:
//   out[0] target_id              out[1] lanes of a wave      out[2] ROCQ_VERSION
//   out[3] sizes of all args structs, summed: rocq.h and this file agree about them
//   out[4] sum over lanes of (lane + 1)^2                       by all five masks of wave_xor
//   out[5] sum over lanes of dot4((1, -1, -128, 127), (3, -5, 7, -9), lane)
//   out[6] sum over m, n of (16 m + n + 1) C[m][n] for C = A B on the matrix unit in F16, with
//          A[m][k] = (3 m + 5 k) % 7 - 3 and B[n][k] = (2 n + 3 k) % 5 - 2: every number is exact
//   out[7] as out[6], in int8     out[8] whether the kernels named _lds are to be launched
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
    gstore(a.out + 8, (uint32_t)WMMA_LDS);
}

// What a program that is linked with this file has in place of libamdhip64 and a code object: the
// runtime's functions as struct rocq_hip wants them, and the kernels' host stubs. Code objects do
// not have it (--genco compiles no host code), nor does the tests' stand-in, which brings its own.
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

// For each line of ROCQ_HIP_FUNCTIONS a function entry_FIELD that calls the runtime's. struct
// rocq_hip has void * for streams, events and graphs and int for enumerations, so every argument is
// passed as an entry_argument, which converts to whatever type the runtime's parameter has. These
// functions are templates only so that the parameter lists need not be repeated here: the table
// below makes each of them with the parameters of its field. Where there is also an ordinary
// function of the same name, the table takes that one, and the template is never made.
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
#if defined(__CUDACC__)
// Whether the kernels are code for Hopper or later, which waits in launch_begin. Only then may a
// launch begin before the one ahead of it has ended. Code that the driver made for this GPU from
// PTX of an older one does not wait, so what counts is what __CUDA_ARCH__ was: ptxVersion.
static bool entry_waits() {
    static const bool waits = [] {
        cudaFuncAttributes code = {};
        return cudaFuncGetAttributes(&code, (const void *)&rocq_k_selftest) == cudaSuccess &&
               code.ptxVersion >= 90;
    }();
    return waits;
}
#endif
static int entry_launch(const void *stub, unsigned grid_x, unsigned grid_z, unsigned threads,
                        unsigned lds, void *args, void *stream) {
    void *list[1] = {args};
#if defined(__CUDACC__) // more than 48 KB are a kernel's only after it has asked for them
    if (lds > 49152) {
        cudaFuncSetAttribute(stub, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)lds);
    }
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid_x, 1, grid_z);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = lds;
    config.stream = (cudaStream_t)stream;
    config.attrs = &overlap;
    config.numAttrs = entry_waits() ? 1 : 0;
    return (int)cudaLaunchKernelExC(&config, stub, list);
#else
    return (int)RUNTIME(LaunchKernel)(stub, dim3(grid_x, 1, grid_z), dim3(threads), list, lds,
                                      (RUNTIME(Stream_t))stream);
#endif
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
