// What the tests of single operations share: random tensors in awkward layouts, runs over thread
// counts and instruction sets, comparisons that NaN fails, and ggml's CPU backend as a peer.
// Include after cmocka.h and rocq.h.

#ifndef TESTS_OPS_H
#define TESTS_OPS_H

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inside.h"

#define OPS_FN __attribute__((unused)) static // no test uses all of them

// Where AddressSanitizer is, a program that touches closed memory ends; elsewhere nothing happens.
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define OPS_ASAN 1
#endif
#endif
#if defined(OPS_ASAN) || defined(__SANITIZE_ADDRESS__)
void __asan_poison_memory_region(void const volatile *at, size_t size);
void __asan_unpoison_memory_region(void const volatile *at, size_t size);
OPS_FN void ops_close(const void *at, int64_t size, bool closed) {
    if (closed) __asan_poison_memory_region(at, (size_t)size);
    else __asan_unpoison_memory_region(at, (size_t)size);
}
#else
OPS_FN void ops_close(const void *at, int64_t size, bool closed) {
    (void)at;
    (void)size;
    (void)closed;
}
#endif

// -- random numbers: the same on every run --

static uint64_t random_state = 1;

OPS_FN uint64_t random_u64(void) { // splitmix64
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

OPS_FN int64_t random_below(int64_t n) {
    return (int64_t)(random_u64() % (uint64_t)n);
}

OPS_FN float random_in(float low, float high) {
    return low + (high - low) * (float)((double)(random_u64() >> 11) * 0x1p-53);
}

OPS_FN float random_normal(void) {
    const double u = ((double)(random_u64() >> 11) + 0.5) * 0x1p-53;
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * random_in(0, 1)));
}

// -- boxes: a tensor, the memory around it, and its values in float64 --

typedef enum box_layout {
    BOX_PLAIN,   // contiguous: what is outside is the sanitizer's
    BOX_STRIDED, // a view with unused memory before, between and after its rows
    BOX_PERMUTED // the same, with dimensions 1 and 2 swapped in memory
} box_layout;

typedef struct box {
    rocq_tensor t;
    unsigned char *memory;
    int64_t size;
    double *value; // of every element, counted in the tensor's own order
    int64_t count;
} box;

OPS_FN int64_t block_elems(rocq_format format) {
    return rocq_get_format_info(format)->block_elems;
}

// All bytes are 0xff: NaN in every float format, -1 in I32, 255 in I8.
OPS_FN box box_make(box_layout layout, rocq_format format, int64_t ne0, int64_t ne1, int64_t ne2,
                    int64_t ne3) {
    const int64_t ne[4] = {ne0, ne1, ne2, ne3}, gap = layout == BOX_PLAIN ? 0 : block_elems(format);
    const int64_t whole[4] = {ne0 + 2 * gap, layout == BOX_PLAIN ? ne1 : ne1 + 2,
                              layout == BOX_PLAIN ? ne2 : ne2 + 1,
                              layout == BOX_PLAIN ? ne3 : ne3 + 1};
    const int64_t swapped[4] = {whole[0], whole[2], whole[1], whole[3]};
    const int64_t start[4] = {gap, layout == BOX_PLAIN ? 0 : 1, 0, 0};
    const int32_t axes[4] = {0, 2, 1, 3};
    box b;
    memset(&b, 0, sizeof b);
    assert_int_equal(rocq_row_size(format, whole[0], &b.size), ROCQ_OK);
    b.size *= whole[1] * whole[2] * whole[3];
    b.memory = (unsigned char *)malloc((size_t)b.size);
    assert_non_null(b.memory);
    memset(b.memory, 0xff, (size_t)b.size);
    assert_int_equal(rocq_tensor_from_host(&b.t, b.memory, format, 4,
                                           layout == BOX_PERMUTED ? swapped : whole), ROCQ_OK);
    if (layout == BOX_PERMUTED) assert_int_equal(rocq_tensor_permute(&b.t, &b.t, axes), ROCQ_OK);
    assert_int_equal(rocq_tensor_view(&b.t, &b.t, start, ne), ROCQ_OK);
    b.count = ne0 * ne1 * ne2 * ne3;
    b.value = (double *)malloc((size_t)b.count * sizeof(double));
    assert_non_null(b.value);
    for (int64_t i = 0; i < b.count; i++) b.value[i] = NAN;
    return b;
}

OPS_FN void box_free(box *b) {
    free(b->memory);
    free(b->value);
    memset(b, 0, sizeof *b);
}

#define boxes_free(...)                                                                            \
    do {                                                                                           \
        box *const boxes_[] = {__VA_ARGS__};                                                       \
        for (size_t i_ = 0; i_ < sizeof boxes_ / sizeof boxes_[0]; i_++) box_free(boxes_[i_]);     \
    } while (0)

OPS_FN int64_t box_rows(const box *b) {
    return b->count / b->t.ne[0];
}

OPS_FN unsigned char *box_row(const box *b, int64_t r) {
    const int64_t i1 = r % b->t.ne[1], i2 = r / b->t.ne[1] % b->t.ne[2],
                  i3 = r / b->t.ne[1] / b->t.ne[2];
    const int64_t elems = i1 * b->t.stride[1] + i2 * b->t.stride[2] + i3 * b->t.stride[3];
    int64_t bytes;
    assert_int_equal(rocq_row_size(b->t.format, elems, &bytes), ROCQ_OK);
    return (unsigned char *)rocq_tensor_data(&b->t) + bytes;
}

OPS_FN int64_t box_row_size(const box *b) {
    int64_t bytes;
    assert_int_equal(rocq_row_size(b->t.format, b->t.ne[0], &bytes), ROCQ_OK);
    return bytes;
}

// x = x H of ROCQ_LAYOUT_HADAMARD, by its definition.
OPS_FN void hadamard64(double *x, int64_t n) {
    int64_t size = 1;
    double y[128];
    while (size < 128 && n % (2 * size) == 0) size *= 2;
    for (int64_t first = 0; first < n; first += size) {
        for (int64_t j = 0; j < size; j++) {
            y[j] = 0;
            for (int64_t i = 0; i < size; i++) {
                bool odd = false;
                for (int64_t bits = i & j; bits; bits &= bits - 1) odd = !odd;
                y[j] += (odd ? -x[first + i] : x[first + i]) / sqrt((double)size);
            }
        }
        memcpy(x + first, y, (size_t)size * sizeof *y);
    }
}

// Decodes the tensor into b->value.
OPS_FN void box_read(box *b) {
    const int64_t n = b->t.ne[0];
    float *row = (float *)malloc((size_t)n * sizeof(float));
    assert_non_null(row);
    for (int64_t r = 0; r < box_rows(b); r++) {
        if (b->t.format == ROCQ_I32 || b->t.format == ROCQ_I8) {
            for (int64_t i = 0; i < n; i++) {
                b->value[r * n + i] = b->t.format == ROCQ_I8 ? box_row(b, r)[i]
                                          : ((int32_t *)(void *)box_row(b, r))[i];
            }
            continue;
        }
        if (b->t.format == ROCQ_I8) {
            for (int64_t i = 0; i < n; i++) b->value[r * n + i] = box_row(b, r)[i];
            continue;
        }
        assert_int_equal(rocq_dequantize(b->t.format, row, box_row(b, r), n), ROCQ_OK);
        for (int64_t i = 0; i < n; i++) b->value[r * n + i] = row[i];
        if (b->t.layout == ROCQ_LAYOUT_HADAMARD) hadamard64(b->value + r * n, n);
    }
    free(row);
}

// From now on b's blocks, if it has such, are those of rows times H.
OPS_FN void box_hadamard(box *b) {
    if (b->t.format != ROCQ_Q8_0 && b->t.format != ROCQ_Q4_0) return;
    b->t.layout = ROCQ_LAYOUT_HADAMARD;
    box_read(b);
}

// Whether the format can be written, not only read.
OPS_FN bool is_encoded(rocq_format format) {
    const rocq_result result =
        rocq_quantize(format, NULL, NULL, 0, rocq_get_format_info(format)->block_elems, NULL);
    assert_true(result == ROCQ_OK || result == ROCQ_E_UNSUPPORTED);
    return result == ROCQ_OK;
}

// Encodes b->value into the tensor, and takes back what the format made of it.
OPS_FN void box_write(box *b) {
    const int64_t n = b->t.ne[0];
    float *row = (float *)malloc((size_t)n * sizeof(float));
    assert_non_null(row);
    for (int64_t r = 0; r < box_rows(b); r++) {
        if (b->t.format == ROCQ_I32) {
            for (int64_t i = 0; i < n; i++) {
                ((int32_t *)(void *)box_row(b, r))[i] = (int32_t)b->value[r * n + i];
            }
            continue;
        }
        for (int64_t i = 0; i < n; i++) row[i] = (float)b->value[r * n + i];
        if (b->t.format == ROCQ_F32) { // infinities are wanted here, rocq_quantize refuses them
            memcpy(box_row(b, r), row, (size_t)n * sizeof(float));
        } else if (b->t.format == ROCQ_F16) {
            for (int64_t i = 0; i < n; i++) {
                ((uint16_t *)(void *)box_row(b, r))[i] = rocq_f32_to_f16(row[i]);
            }
        } else {
            assert_int_equal(rocq_quantize(b->t.format, box_row(b, r), row, 1, n, NULL), ROCQ_OK);
        }
    }
    free(row);
    box_read(b);
}

OPS_FN void random_weights(box *w);

// Of a format that is only read, blocks of any bits, whose size is their own.
OPS_FN box box_random(box_layout layout, rocq_format format, float size, int64_t ne0, int64_t ne1,
                      int64_t ne2, int64_t ne3) {
    box b = box_make(layout, format, ne0, ne1, ne2, ne3);
    if (format != ROCQ_I32 && !is_encoded(format)) {
        random_weights(&b);
        return b;
    }
    for (int64_t i = 0; i < b.count; i++) b.value[i] = size * random_normal();
    box_write(&b);
    return b;
}

OPS_FN box box_i32(const int32_t *values, int64_t n) {
    box b = box_make(BOX_PLAIN, ROCQ_I32, n, 1, 1, 1);
    for (int64_t i = 0; i < n; i++) b.value[i] = values[i];
    box_write(&b);
    return b;
}

// -- weights: blocks of any bits at all, with scales of a sensible size --

OPS_FN uint16_t random_half(void) {
    return rocq_f32_to_f16(0.02f * random_normal());
}

OPS_FN void random_block(rocq_format format, void *block) {
    const rocq_format_info *info = rocq_get_format_info(format);
    unsigned char *bytes = (unsigned char *)block;
    for (int32_t i = 0; i < info->block_bytes; i++) bytes[i] = (unsigned char)random_u64();
    switch (format) {
    case ROCQ_F32: *(float *)block = random_normal(); break;
    case ROCQ_F16: *(uint16_t *)block = rocq_f32_to_f16(random_normal()); break;
    case ROCQ_BF16: *(uint16_t *)block = (uint16_t)(inside_f32_bits(random_normal()) >> 16); break;
    case ROCQ_Q4_0: case ROCQ_Q5_0: case ROCQ_Q8_0: case ROCQ_IQ4_NL: case ROCQ_IQ4_XS:
        *(uint16_t *)block = random_half();
        break;
    case ROCQ_Q4_1: case ROCQ_Q5_1: case ROCQ_Q4_K: case ROCQ_Q5_K:
        ((uint16_t *)block)[0] = random_half();
        ((uint16_t *)block)[1] = random_half();
        break;
    case ROCQ_Q2_K:
        ((rocq_block_q2_K *)block)->d = random_half();
        ((rocq_block_q2_K *)block)->dmin = random_half();
        break;
    case ROCQ_Q3_K: ((rocq_block_q3_K *)block)->d = random_half(); break;
    case ROCQ_Q6_K: ((rocq_block_q6_K *)block)->d = random_half(); break;
    case ROCQ_IQ2_XXS:
    case ROCQ_IQ2_XS:
    case ROCQ_IQ2_S:
    case ROCQ_IQ3_XXS:
    case ROCQ_IQ3_S:
    case ROCQ_IQ1_S:
        *(uint16_t *)block = random_half();
        break;
    case ROCQ_IQ1_M: {
        const uint16_t d = random_half();
        uint16_t *scales = ((rocq_block_iq1_m *)block)->scales;
        for (int j = 0; j < 4; j++)
            scales[j] = (uint16_t)((scales[j] & 0xfff) | (d >> 4 * j & 15) << 12);
        break;
    }
    case ROCQ_TQ1_0: ((rocq_block_tq1_0 *)block)->d = random_half(); break;
    case ROCQ_TQ2_0: ((rocq_block_tq2_0 *)block)->d = random_half(); break;
    case ROCQ_NVFP4: // within a few powers of two
        for (int j = 0; j < 4; j++) bytes[j] = (unsigned char)(random_below(256) & 0x9f);
        break;
    default: bytes[0] = (unsigned char)(120 + random_below(10)); break; // the MX formats' exponent
    }
}

OPS_FN void random_weights(box *w) {
    const rocq_format_info *info = rocq_get_format_info(w->t.format);
    for (int64_t r = 0; r < box_rows(w); r++) {
        unsigned char *row = box_row(w, r);
        for (int64_t i = 0; i < w->t.ne[0] / info->block_elems; i++) {
            random_block(w->t.format, row + i * info->block_bytes);
        }
    }
    box_read(w);
}

OPS_FN double box_at(const box *b, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
    const int64_t *ne = b->t.ne;
    return b->value[((i3 * ne[2] + i2) * ne[1] + i1) * ne[0] + i0];
}

// The value of an operand that is repeated along dimensions of size 1.
OPS_FN double box_at_repeated(const box *b, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
    const int64_t *ne = b->t.ne;
    return box_at(b, i0 % ne[0], i1 % ne[1], i2 % ne[2], i3 % ne[3]);
}

// Nothing around the tensor was written.
OPS_FN void box_check_outside(const box *b) {
    unsigned char *inside = (unsigned char *)calloc((size_t)b->size, 1);
    assert_non_null(inside);
    for (int64_t r = 0; r < box_rows(b); r++) {
        memset(inside + (box_row(b, r) - b->memory), 1, (size_t)box_row_size(b));
    }
    for (int64_t i = 0; i < b->size; i++) {
        if (!inside[i] && b->memory[i] != 0xff) {
            fail_msg("byte %lld beside the tensor was written", (long long)i);
        }
    }
    free(inside);
}

// -- comparison --

OPS_FN bool same_bytes(const void *a, const void *b, int64_t size) {
    return memcmp(a, b, (size_t)size) == 0;
}

// Squared error over squared reference; NaN when either side has one. All zero must be met exactly.
// Of an error, rounding to the output's format is free.
OPS_FN double rounding_to(rocq_format format, double want) {
    return format == ROCQ_F16 ? fabs(want) * 0x1p-11 + 0x1p-25
           : format == ROCQ_BF16 ? fabs(want) * 0x1p-8 + 0x1p-134 : 0;
}

OPS_FN double nmse(rocq_format format, const double *got, const double *want, int64_t n) {
    double error = 0, power = 0;
    for (int64_t i = 0; i < n; i++) {
        const double rounding = rounding_to(format, want[i]);
        const double e = fabs(got[i] - want[i]);
        error += e <= rounding ? 0 : (e - rounding) * (e - rounding);
        power += want[i] * want[i];
    }
    return power == 0 ? (error == 0 ? 0 : (double)INFINITY) : error / power;
}

// Every row for itself, so that a wrong one cannot hide among large ones.
OPS_FN void check_rows(box *got, const double *want, double bound) {
    const int64_t n = got->t.ne[0];
    box_read(got);
    box_check_outside(got);
    for (int64_t r = 0; r < box_rows(got); r++) {
        const double e = nmse(got->t.format, got->value + r * n, want + r * n, n);
        if (!(e <= bound)) {
            fail_msg("row %lld: NMSE %g over %g (first %g, expected %g)", (long long)r, e, bound,
                     got->value[r * n], want[r * n]);
        }
    }
}

// All rows together: against a peer whose own error is large in rows of few or nearly equal values.
OPS_FN void check_all(box *got, const double *want, double bound) {
    box_read(got);
    box_check_outside(got);
    const double e = nmse(got->t.format, got->value, want, got->count);
    if (!(e <= bound)) fail_msg("NMSE %g over %g", e, bound);
}

// -- runs --

enum { N_THREAD_COUNTS = 3 };
static const int32_t thread_counts[N_THREAD_COUNTS] = {1, 2, 5};
enum { NO_SIMD, BEST, ONLY_AVX2, N_TIERS };
static rocq_ctx *contexts[N_TIERS][N_THREAD_COUNTS];
static int n_tiers; // those there are: ONLY_AVX2 where AVX-512 is the best, so that both are tested

OPS_FN int open_contexts(void **state) {
    (void)state;
    n_tiers = inside_cpu_has(ROCQ_CPU_AVX512) ? N_TIERS : ONLY_AVX2;
    for (int tier = 0; tier < n_tiers; tier++) {
        for (int i = 0; i < N_THREAD_COUNTS; i++) {
            const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = thread_counts[i],
                                    .cpu_tier = tier == ONLY_AVX2 ? ROCQ_CPU_SIMD : ROCQ_CPU_BEST};
            if (rocq_open(&contexts[tier][i], &desc) != ROCQ_OK) return -1;
            if (tier == NO_SIMD) *inside_has_simd(contexts[tier][i]) = false;
        }
    }
    return 0;
}

OPS_FN int close_contexts(void **state) {
    (void)state;
    for (int tier = 0; tier < n_tiers; tier++) {
        for (int i = 0; i < N_THREAD_COUNTS; i++) rocq_close(&contexts[tier][i]);
    }
    return 0;
}

OPS_FN rocq_result run_one(rocq_ctx *ctx, rocq_op op, const void *params) {
    switch (op) {
#define ROCQ_X(NAME, name, type) \
    case ROCQ_OP_##NAME: return rocq_##name(ctx, (const type *)params);
        ROCQ_OPS(ROCQ_X)
#undef ROCQ_X
    default: return ROCQ_E_ARGUMENT;
    }
}

// The scratch memory that the op plans.
OPS_FN int64_t planned(rocq_ctx *ctx, rocq_op op, const void *params) {
    int64_t scratch = 0;
    assert_int_equal(rocq_plan_begin(ctx, &scratch), ROCQ_OK);
    if (run_one(ctx, op, params) != ROCQ_OK) fail_msg("not planned: %s", rocq_error(ctx));
    rocq_plan_end(ctx);
    return scratch;
}

// Runs op with each thread count: outputs (their memory as it is now, input of in-place runs) must
// come out with the same bits each time. Scratch memory is exactly what was planned, so that the
// sanitizer sees any use beyond it, and the op itself allocates nothing.
OPS_FN void run(int tier, rocq_op op, const void *params, box *const *outputs, int n_outputs) {
    unsigned char *before[8], *first[8];
    for (int o = 0; o < n_outputs; o++) {
        before[o] = (unsigned char *)malloc((size_t)outputs[o]->size);
        first[o] = (unsigned char *)malloc((size_t)outputs[o]->size);
        assert_true(before[o] && first[o]);
        memcpy(before[o], outputs[o]->memory, (size_t)outputs[o]->size);
    }
    for (int i = 0; i < N_THREAD_COUNTS; i++) {
        rocq_ctx *ctx = contexts[tier][i];
        rocq_stats stats, later;
        const char *why = NULL;
        if (rocq_supports(ctx, op, params, &why) != ROCQ_OK) fail_msg("not supported: %s", why);
        const int64_t scratch = planned(ctx, op, params);
        inside_free_scratch(ctx);
        assert_int_equal(rocq_reserve(ctx, scratch), ROCQ_OK);
        assert_int_equal(rocq_get_stats(ctx, &stats), ROCQ_OK);
        for (int o = 0; o < n_outputs; o++) {
            memcpy(outputs[o]->memory, before[o], (size_t)outputs[o]->size);
        }
        if (run_one(ctx, op, params) != ROCQ_OK) fail_msg("failed: %s", rocq_error(ctx));
        assert_int_equal(rocq_get_stats(ctx, &later), ROCQ_OK);
        assert_int_equal(later.n_allocs, stats.n_allocs);
        for (int o = 0; o < n_outputs; o++) {
            if (i == 0) {
                memcpy(first[o], outputs[o]->memory, (size_t)outputs[o]->size);
            } else if (!same_bytes(first[o], outputs[o]->memory, outputs[o]->size)) {
                fail_msg("output %d with %d threads differs from 1 thread", o,
                         (int)thread_counts[i]);
            }
        }
    }
    for (int o = 0; o < n_outputs; o++) {
        free(before[o]);
        free(first[o]);
    }
}

// The op fails with this code and a message, and leaves the outputs as they are.
OPS_FN void run_fails(rocq_op op, const void *params, rocq_result want, box *const *outputs,
                      int n_outputs) {
    rocq_ctx *ctx = contexts[1][1];
    unsigned char *before[8];
    for (int o = 0; o < n_outputs; o++) {
        before[o] = (unsigned char *)malloc((size_t)outputs[o]->size);
        assert_non_null(before[o]);
        memcpy(before[o], outputs[o]->memory, (size_t)outputs[o]->size);
    }
    inside_error(ctx)[0] = 0;
    assert_int_equal(run_one(ctx, op, params), want);
    assert_true(strlen(rocq_error(ctx)) > 10);
    for (int o = 0; o < n_outputs; o++) {
        assert_true(same_bytes(before[o], outputs[o]->memory, outputs[o]->size));
        free(before[o]);
    }
}

// -- ggml: found at run time in ROCQ_GGML_DIR, its graph API declared by hand --

typedef struct ggml_params { // struct ggml_init_params, passed by value
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
} ggml_params;

typedef struct ggml_api {
    void *base, *cpu;
    void *ctx;
    void *(*init)(ggml_params);
    void (*free)(void *);
    void *(*new_tensor_4d)(void *, int, int64_t, int64_t, int64_t, int64_t);
    void *(*get_data)(const void *);
    size_t (*nbytes)(const void *);
    void *(*new_graph)(void *);
    void (*build)(void *, void *);
    void *(*flash_attn_ext)(void *, void *q, void *k, void *v, void *mask, float scale,
                            float max_bias, float softcap);
    void (*flash_attn_ext_add_sinks)(void *, void *);
    void *(*rope_ext)(void *, void *a, void *pos, void *factors, int n_dims, int mode,
                      int n_ctx_orig, float freq_base, float freq_scale, float ext_factor,
                      float attn_factor, float beta_fast, float beta_slow);
    void *(*rms_norm)(void *, void *, float);
    void *(*norm)(void *, void *, float);
    void *(*soft_max_ext)(void *, void *, void *mask, float scale, float max_bias);
    void *(*silu)(void *, void *);
    void *(*gelu)(void *, void *);
    void *(*gelu_erf)(void *, void *);
    int (*compute)(void *ctx, void *graph, int n_threads);
} ggml_api;

// A function pointer out of a library, without a cast that ISO C forbids.
OPS_FN void ggml_symbol(void *library, const char *name, void *function) {
    void *symbol = dlsym(library, name);
    if (!symbol) fail_msg("no %s in ggml", name);
    memcpy(function, &symbol, sizeof symbol);
}

// The variant for this CPU. Libraries stay open: what their initialisers allocate is never freed.
OPS_FN void ggml_find(ggml_api *g) {
    static const char *const variants[] = {
        "x64",     "sse42",    "sandybridge", "ivybridge",     "piledriver",
        "haswell", "skylakex", "cannonlake",  "cascadelake",   "cooperlake",
        "icelake", "zen4",     "alderlake",   "sapphirerapids"};
    const char *dir = getenv("ROCQ_GGML_DIR");
    char path[4096];
    int best = 0;
    if (!dir || !*dir) {
        print_message("SKIPPED: ROCQ_GGML_DIR is not set, no comparison with ggml\n");
        skip();
    }
    snprintf(path, sizeof path, "%s/libggml-base.so", dir);
    g->base = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; g->base && i < sizeof variants / sizeof variants[0]; i++) {
        int (*score)(void) = NULL;
        snprintf(path, sizeof path, "%s/libggml-cpu-%s.so", dir, variants[i]);
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!library) continue;
        ggml_symbol(library, "ggml_backend_score", &score);
        if (score() > best) {
            best = score();
            g->cpu = library;
        }
    }
    if (!g->cpu) {
        print_message("SKIPPED: cannot load ggml from ROCQ_GGML_DIR: %s\n", dlerror());
        skip();
    }
    void (*cpu_init)(void) = NULL;
    ggml_symbol(g->cpu, "ggml_cpu_init", &cpu_init);
    cpu_init();
}

// Skips the test where there is no ggml.
OPS_FN ggml_api ggml_open(void) {
    static ggml_api found;
    if (!found.cpu) ggml_find(&found);
    ggml_api g = found;
    ggml_symbol(g.base, "ggml_init", &g.init);
    ggml_symbol(g.base, "ggml_free", &g.free);
    ggml_symbol(g.base, "ggml_new_tensor_4d", &g.new_tensor_4d);
    ggml_symbol(g.base, "ggml_get_data", &g.get_data);
    ggml_symbol(g.base, "ggml_nbytes", &g.nbytes);
    ggml_symbol(g.base, "ggml_new_graph", &g.new_graph);
    ggml_symbol(g.base, "ggml_build_forward_expand", &g.build);
    ggml_symbol(g.base, "ggml_flash_attn_ext", &g.flash_attn_ext);
    ggml_symbol(g.base, "ggml_flash_attn_ext_add_sinks", &g.flash_attn_ext_add_sinks);
    ggml_symbol(g.base, "ggml_rope_ext", &g.rope_ext);
    ggml_symbol(g.base, "ggml_rms_norm", &g.rms_norm);
    ggml_symbol(g.base, "ggml_norm", &g.norm);
    ggml_symbol(g.base, "ggml_soft_max_ext", &g.soft_max_ext);
    ggml_symbol(g.base, "ggml_silu", &g.silu);
    ggml_symbol(g.base, "ggml_gelu", &g.gelu);
    ggml_symbol(g.base, "ggml_gelu_erf", &g.gelu_erf);
    ggml_symbol(g.cpu, "ggml_graph_compute_with_ctx", &g.compute);
    const ggml_params params = {(size_t)64 << 20, NULL, false};
    g.ctx = g.init(params);
    assert_non_null(g.ctx);
    return g;
}

OPS_FN void ggml_close(ggml_api *g) {
    g->free(g->ctx);
    g->ctx = NULL;
}

// A ggml tensor with the values of a plain box.
OPS_FN void *ggml_from(ggml_api *g, const box *b) {
    void *t =
        g->new_tensor_4d(g->ctx, (int)b->t.format, b->t.ne[0], b->t.ne[1], b->t.ne[2], b->t.ne[3]);
    assert_int_equal(g->nbytes(t), b->size);
    memcpy(g->get_data(t), b->memory, (size_t)b->size);
    return t;
}

// Computes t, an F32 tensor of n elements, into want.
OPS_FN void ggml_run(ggml_api *g, void *t, double *want, int64_t n) {
    void *graph = g->new_graph(g->ctx);
    g->build(graph, t);
    assert_int_equal(g->compute(g->ctx, graph, 1), 0);
    assert_int_equal(g->nbytes(t), n * 4);
    for (int64_t i = 0; i < n; i++) want[i] = ((const float *)g->get_data(t))[i];
}

#endif
