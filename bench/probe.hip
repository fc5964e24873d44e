// probe.hip - ceilings of a GPU for bench.h: what a plain streaming read, fused multiply-adds and
// the matrix unit reach, with the instructions that rocq_kernels.hip uses. Linked into the
// measuring programs beside the kernels; without it they know the bandwidth alone, as rocq's own
// kernels reach it. And the renderer of frames.c, since that too is a program of another stream.
//
//     hipcc -O3 --offload-arch=native -x hip -c bench/probe.hip -o probe.o
//     nvcc -O3 -std=c++17 -x cu -gencode=arch=compute_90a,code=sm_90a -c bench/probe.hip -o probe.o

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define RT(name) cuda##name
#define UNITS cudaDevAttrMultiProcessorCount
#else
#include <hip/hip_runtime.h>
#define RT(name) hip##name
#define UNITS hipDeviceAttributeMultiprocessorCount
#endif
#include <stdint.h>

enum { THREADS = 256, ROUNDS = 4096, CHAINS = 8 };

// Four independent 16-byte loads a lane and round.
__global__ void __launch_bounds__(THREADS) probe_read(const uint4 *p, size_t n, uint32_t *out) {
    const size_t step = (size_t)gridDim.x * THREADS;
    size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    uint32_t s = 0;
    for (; i + 3 * step < n; i += 4 * step) {
        const uint4 a = p[i], b = p[i + step], c = p[i + 2 * step], d = p[i + 3 * step];
        s ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
        s ^= c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    if (s == 0x12345678u) *out = s; // never: the loads must be kept
}

__global__ void __launch_bounds__(THREADS) probe_f32(float x, uint32_t *out) {
    float s[CHAINS];
    for (int c = 0; c < CHAINS; c++) s[c] = x + (float)(c + threadIdx.x);
    for (int r = 0; r < ROUNDS; r++) {
#pragma unroll
        for (int c = 0; c < CHAINS; c++) s[c] = fmaf(s[c], x, 1.0f);
    }
    float sum = 0;
    for (int c = 0; c < CHAINS; c++) sum += s[c];
    if (sum == 12345.0f) *out = 1;
}

// Products of 16 x 16 x 16, a chain of them for each of CHAINS results: f16 and int8.
#if defined(__CUDACC__)
struct tile { uint32_t v[8]; }; // of results, floats or integers
__device__ void multiply_f16(tile &c, uint32_t a) {
    for (int h = 0; h < 2; h++) {
        uint32_t *v = c.v + 4 * h;
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, {%0, %1, %2, %3};"
                     : "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3]) : "r"(a));
    }
}
__device__ void multiply_int8(tile &c, uint32_t a) {
    for (int h = 0; h < 2; h++) {
        uint32_t *v = c.v + 4 * h;
        asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 "
                     "{%0, %1, %2, %3}, {%4, %4}, {%4}, {%0, %1, %2, %3};"
                     : "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3]) : "r"(a));
    }
}
#else
typedef float v8f __attribute__((ext_vector_type(8)));
typedef int v8i __attribute__((ext_vector_type(8)));
typedef int v4i __attribute__((ext_vector_type(4)));
typedef _Float16 v16h __attribute__((ext_vector_type(16)));
struct tile { uint32_t v[8]; };
#if !defined(__HIP_DEVICE_COMPILE__) || defined(__GFX11__)
__device__ void multiply_f16(tile &c, uint32_t a) {
    const v16h x = (v16h)__builtin_bit_cast(_Float16, (uint16_t)a);
    c = __builtin_bit_cast(tile, __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(
        x, x, __builtin_bit_cast(v8f, c)));
}
__device__ void multiply_int8(tile &c, uint32_t a) {
    const v4i x = (v4i)(int)a;
    c = __builtin_bit_cast(tile, __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(
        true, x, true, x, __builtin_bit_cast(v8i, c), false));
}
#else
#error "the matrix instructions are those of gfx11"
#endif
#endif
#define PROBE_MATRIX(name)                                                                        \
    __global__ void __launch_bounds__(THREADS) probe_##name(uint32_t a, uint32_t *out) {           \
        tile c[CHAINS] = {};                                                                      \
        for (int i = 0; i < CHAINS; i++) c[i].v[0] = i; /* alike, they would become one */         \
        for (int r = 0; r < ROUNDS / 16; r++) {                                                   \
            _Pragma("unroll") for (int i = 0; i < CHAINS; i++) multiply_##name(c[i], a);           \
        }                                                                                         \
        uint32_t sum = 0;                                                                         \
        for (int i = 0; i < CHAINS; i++) sum += c[i].v[0] + c[i].v[7];                            \
        if (sum == 12345u) *out = sum;                                                            \
    }
PROBE_MATRIX(f16)
PROBE_MATRIX(int8)

// rates: bytes a second read; operations a second in F32, F16 and int8. The best of ten launches
// and several grids each; 0 where the runtime fails.
extern "C" void bench_gpu_probe(double rates[4]) {
    const size_t size = (size_t)1 << 30;
    int device = 0, units = 0;
    void *data = NULL, *out = NULL;
    RT(Event_t) start, stop;
    for (int i = 0; i < 4; i++) rates[i] = 0;
    if (RT(GetDevice)(&device) != 0 || RT(EventCreate)(&start) != 0) return;
    if (RT(EventCreate)(&stop) == 0) {
        bool ok = RT(Malloc)(&data, size) == 0 && RT(Malloc)(&out, 256) == 0 &&
            RT(Memset)(data, 0, size) == 0 &&
            RT(DeviceGetAttribute)(&units, UNITS, device) == 0;
        for (int what = 0; what < 4; what++) {
            for (int run = 0; ok && run < 40; run++) {
                const int blocks = units * (2 << run % 4);
                const double lanes = (double)blocks * THREADS;
                float ms = 0;
                double work = (double)size;
                ok = RT(EventRecord)(start, 0) == 0;
                if (what == 0) {
                    const uint4 *from = (const uint4 *)data;
                    probe_read<<<blocks, THREADS>>>(from, size / 16, (uint32_t *)out);
                } else if (what == 1) {
                    probe_f32<<<blocks, THREADS>>>(0.5f, (uint32_t *)out);
                    work = lanes * ROUNDS * CHAINS * 2;
                } else {
                    const uint32_t a = 0x2c012c01; // numbers, since zeros cost a chip less power
                    if (what == 2) probe_f16<<<blocks, THREADS>>>(a, (uint32_t *)out);
                    else probe_int8<<<blocks, THREADS>>>(a, (uint32_t *)out);
                    work = lanes / 32 * (ROUNDS / 16) * CHAINS * 2 * 16 * 16 * 16;
                }
                ok = ok && RT(EventRecord)(stop, 0) == 0 && RT(GetLastError)() == 0 &&
                    RT(EventSynchronize)(stop) == 0 && RT(EventElapsedTime)(&ms, start, stop) == 0;
                if (ok && ms > 0 && work / ms * 1e3 > rates[what]) rates[what] = work / ms * 1e3;
            }
        }
        if (data) (void)RT(Free)(data);
        if (out) (void)RT(Free)(out);
        (void)RT(EventDestroy)(stop);
    }
    (void)RT(EventDestroy)(start);
}

// ---------------------------------------------------------------------------------------------
// The renderer of frames.c
// ---------------------------------------------------------------------------------------------

// A pass: n loads of 16 bytes, from words of them (a power of two) over and over, and some
// arithmetic to each, as a shader that reads textures does.
__global__ void __launch_bounds__(THREADS) probe_draw(const uint4 *p, size_t words, size_t n,
                                                      uint32_t *out) {
    const size_t step = (size_t)gridDim.x * THREADS;
    float s = 0;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
        const uint4 a = p[i & (words - 1)];
        float x = (float)(a.x ^ a.y ^ a.z ^ a.w);
#pragma unroll
        for (int r = 0; r < 64; r++) x = fmaf(x, 0.999f, 1.0f);
        s += x;
    }
    if (s == 12345.0f) *out = 1; // never: the work must be kept
}

static struct {
    RT(Stream_t) stream;
    RT(Event_t) start, stop;
    void *data, *out;
    int device, units;
    size_t n; // loads of a pass
} renderer;

static const size_t renderer_bytes = (size_t)256 << 20; // more than any cache holds

static int renderer_pass(void) {
    probe_draw<<<8 * renderer.units, THREADS, 0, renderer.stream>>>(
        (const uint4 *)renderer.data, renderer_bytes / 16, renderer.n, (uint32_t *)renderer.out);
    return (int)RT(GetLastError)();
}

// A pass takes ms where nothing else runs: the best of ten is brought there, in three rounds.
static int renderer_calibrate(double ms) {
    renderer.n = renderer_bytes / 16;
    for (int round = 0; round < 3; round++) {
        float best = 0;
        for (int run = 0; run < 10; run++) {
            float took = 0;
            int error = (int)RT(EventRecord)(renderer.start, renderer.stream);
            if (error == 0) error = renderer_pass();
            if (error == 0) error = (int)RT(EventRecord)(renderer.stop, renderer.stream);
            if (error == 0) error = (int)RT(EventSynchronize)(renderer.stop);
            if (error == 0) {
                error = (int)RT(EventElapsedTime)(&took, renderer.start, renderer.stop);
            }
            if (error != 0) return error;
            if (run == 0 || took < best) best = took;
        }
        if (best > 0) renderer.n = (size_t)((double)renderer.n * ms / best) + 1;
    }
    return 0;
}

extern "C" void bench_renderer_close(void) {
    if (renderer.stream) (void)RT(StreamDestroy)(renderer.stream);
    if (renderer.start) (void)RT(EventDestroy)(renderer.start);
    if (renderer.stop) (void)RT(EventDestroy)(renderer.stop);
    if (renderer.data) (void)RT(Free)(renderer.data);
    if (renderer.out) (void)RT(Free)(renderer.out);
    renderer = {};
}

// raised: above the priority of a plain stream. On failure nothing is left but what close frees.
extern "C" int bench_renderer_open(const char *pci, int raised, double pass_ms) {
    int least = 0, greatest = 0;
#if defined(__CUDACC__)
    const unsigned flags = cudaStreamNonBlocking;
#else
    const unsigned flags = hipStreamNonBlocking;
#endif
    int error = (int)RT(DeviceGetByPCIBusId)(&renderer.device, pci);
    if (error == 0) error = (int)RT(SetDevice)(renderer.device);
    if (error == 0) error = (int)RT(DeviceGetAttribute)(&renderer.units, UNITS, renderer.device);
    if (error == 0) error = (int)RT(DeviceGetStreamPriorityRange)(&least, &greatest);
    if (error == 0) {
        error = (int)RT(StreamCreateWithPriority)(&renderer.stream, flags, raised ? greatest : 0);
    }
    if (error == 0) error = (int)RT(EventCreate)(&renderer.start);
    if (error == 0) error = (int)RT(EventCreate)(&renderer.stop);
    if (error == 0) error = (int)RT(Malloc)(&renderer.data, renderer_bytes);
    if (error == 0) error = (int)RT(Malloc)(&renderer.out, 256);
    if (error == 0) error = (int)RT(Memset)(renderer.data, 0, renderer_bytes);
    if (error == 0) error = (int)RT(DeviceSynchronize)();
    return error == 0 ? renderer_calibrate(pass_ms) : error;
}

extern "C" int bench_renderer_draw(int passes) {
    int error = (int)RT(SetDevice)(renderer.device); // of this thread
    for (int i = 0; i < passes && error == 0; i++) error = renderer_pass();
    return error == 0 ? (int)RT(StreamSynchronize)(renderer.stream) : error;
}
