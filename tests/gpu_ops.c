// Every operation on a GPU against the CPU backend: all formats, options and odd sizes. The same
// program runs on the lane-accurate stand-in (tests/run simt) and on a real device (tests/gpu): it
// only asks rocq_open for a GPU. Outputs start as NaN, sit between guard bytes, and are compared so
// that NaN fails; at the end every kernel of the list must have been launched.
//
//     gpu_ops [FILTER]     only the tests whose name contains FILTER
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "ops.h"
#include "lend.h"

static rocq_ctx *cpu, *gpu;

// -- operands on the device --

// A copy of a box's memory on the GPU, and the box's tensor over it.
typedef struct twin {
    const box *b;
    rocq_tensor t;
} twin;

enum { MAX_TWINS = 64 };
static twin twins[MAX_TWINS];
static int n_twins;

static rocq_tensor words_of(rocq_buffer buffer, int64_t size) { // all of a buffer's bytes
    rocq_tensor t;
    const int64_t ne = (size + 3) / 4;
    assert_int_equal(rocq_tensor_init(&t, &buffer, 0, ROCQ_I32, 1, &ne), ROCQ_OK);
    return t;
}

static void copy_to_gpu(const twin *w) {
    const rocq_tensor words = words_of(w->t.buffer, w->b->size);
    void *bytes = calloc((size_t)rocq_tensor_size(&words), 1);
    assert_non_null(bytes);
    memcpy(bytes, w->b->memory, (size_t)w->b->size);
    assert_int_equal(rocq_upload(gpu, &words, bytes, rocq_tensor_size(&words)), ROCQ_OK);
    free(bytes);
}

static void copy_from_gpu(const twin *w) {
    const rocq_tensor words = words_of(w->t.buffer, w->b->size);
    void *bytes = malloc((size_t)rocq_tensor_size(&words));
    assert_non_null(bytes);
    if (rocq_download(gpu, bytes, &words, rocq_tensor_size(&words)) != ROCQ_OK) {
        fail_msg("download: %s", rocq_error(gpu));
    }
    memcpy(w->b->memory, bytes, (size_t)w->b->size);
    free(bytes);
}

// planar: block formats lie in planes; the box must be plain.
static rocq_tensor *on_gpu_as(const box *b, bool planar) {
    twin *w = &twins[n_twins++];
    assert_true(n_twins <= MAX_TWINS);
    w->b = b;
    w->t = b->t;
    if (rocq_buffer_alloc(gpu, &w->t.buffer, (b->size + 3) / 4 * 4) != ROCQ_OK) {
        fail_msg("buffer: %s", rocq_error(gpu));
    }
    if (!planar) {
        copy_to_gpu(w);
        return &w->t;
    }
    w->t.layout = ROCQ_LAYOUT_PLANAR;
    if (rocq_upload(gpu, &w->t, b->memory, rocq_tensor_size(&w->t)) != ROCQ_OK) {
        fail_msg("planar upload: %s", rocq_error(gpu));
    }
    return &w->t;
}

static rocq_tensor *on_gpu(const box *b) { return on_gpu_as(b, false); }

static void free_twins(void) {
    while (n_twins > 0) {
        assert_int_equal(rocq_buffer_free(gpu, &twins[--n_twins].t.buffer), ROCQ_OK);
    }
}

// -- one comparison --

// The device's tensor of a host box that is a member of one: boxes are found by their tensor.
static const rocq_tensor *moved(const rocq_tensor *t) {
    for (int i = 0; t && i < n_twins; i++) {
        if (&twins[i].b->t == t) return &twins[i].t;
    }
    return t ? on_gpu((const box *)(const void *)((const char *)t - offsetof(box, t))) : NULL;
}

enum { MAX_CHAIN = 4 };
typedef union any_params {
#define ROCQ_X(NAME, name, type) type name;
    ROCQ_OPS(ROCQ_X)
#undef ROCQ_X
    rocq_matmul_params chain[MAX_CHAIN];
} any_params;

// Params whose tensors are boxes' become params over the GPU's copies. Boxes that are planar there
// have been moved before, with on_gpu_as.
static void move_params(rocq_op op, any_params *p) {
    int32_t end;
    for (int32_t i = rocq__operands_begin(op, &end); i < end; i++) {
        const rocq_tensor *t = moved(rocq__operand_of(p, &rocq__operands[i]));
        memcpy((char *)p + rocq__operands[i].offset, &t, sizeof t);
    }
    for (int i = 0; op == ROCQ_OP_MATMUL && p->chain[i].next; i++) {
        assert_true(i + 1 < MAX_CHAIN);
        any_params next;
        next.matmul = *p->chain[i].next;
        const rocq_matmul_params *rest = next.matmul.next;
        next.matmul.next = NULL;
        move_params(op, &next);
        p->chain[i + 1] = next.matmul;
        p->chain[i + 1].next = rest;
        p->chain[i].next = &p->chain[i + 1];
    }
}

static any_params params_of(rocq_op op, const void *params) {
    any_params p;
    memset(&p, 0, sizeof p);
    switch (op) {
#define ROCQ_X(NAME, name, type) case ROCQ_OP_##NAME: p.name = *(const type *)params; break;
        ROCQ_OPS(ROCQ_X)
#undef ROCQ_X
    default: fail_msg("unknown op");
    }
    return p;
}

static double *values_of(const box *b) {
    double *v = (double *)malloc((size_t)b->count * sizeof(double));
    assert_non_null(v);
    memcpy(v, b->value, (size_t)b->count * sizeof(double));
    return v;
}

#define EXACT (-1.0)

static int64_t op_launches; // of the last op that was compared

// Runs op with `host` on the CPU and with `device` (tensors of boxes, too) on the GPU, and compares
// what they wrote to out, row by row: the NMSE may be what rocq_get_precision says and room
// besides, or EXACT asks for the same bytes. out then holds the GPU's result.
static void compare_as(rocq_op op, const void *host, const void *device, box *const *out, int n_out,
                       double room, const char *what) {
    double *want[8], contract = 0;
    unsigned char *before[8], *bytes[8];
    const char *why = "";
    bool int8 = false;
    for (int o = 0; o < n_out; o++) {
        before[o] = (unsigned char *)malloc((size_t)out[o]->size);
        bytes[o] = (unsigned char *)malloc((size_t)out[o]->size);
        assert_true(before[o] && bytes[o]);
        memcpy(before[o], out[o]->memory, (size_t)out[o]->size);
    }
    if (run_one(cpu, op, host) != ROCQ_OK) fail_msg("%s: CPU: %s", what, rocq_error(cpu));
    for (int o = 0; o < n_out; o++) {
        box_read(out[o]);
        want[o] = values_of(out[o]);
        memcpy(bytes[o], out[o]->memory, (size_t)out[o]->size);
        memcpy(out[o]->memory, before[o], (size_t)out[o]->size);
    }
    any_params p = params_of(op, device);
    move_params(op, &p);
    if (rocq_supports(gpu, op, &p, &why) != ROCQ_OK) fail_msg("%s: not supported: %s", what, why);
    for (const rocq_matmul_params *q = &p.matmul; q; q = op == ROCQ_OP_MATMUL ? q->next : NULL) {
        rocq_precision_info info;
        assert_int_equal(rocq_get_precision(gpu, op, q, &info), ROCQ_OK);
        contract = fmax(contract, info.nmse);
        int8 = int8 || info.precision == ROCQ_PRECISION_INT8;
    }
    rocq_stats stats;
    rocq_get_stats(gpu, &stats);
    const int64_t launched = stats.n_launches;
    if (run_one(gpu, op, &p) != ROCQ_OK) fail_msg("%s: GPU: %s", what, rocq_error(gpu));
    if (rocq_sync(gpu) != ROCQ_OK) fail_msg("%s: sync: %s", what, rocq_error(gpu));
    rocq_get_stats(gpu, &stats);
    op_launches = stats.n_launches - launched;
    for (int i = 0; i < n_twins; i++) {
        for (int o = 0; o < n_out; o++) {
            if (twins[i].b == out[o] && twins[i].t.layout != ROCQ_LAYOUT_PLANAR) {
                copy_from_gpu(&twins[i]);
            }
        }
    }
    for (int o = 0; o < n_out; o++) {
        // Rows of a few elements are judged together: one that happens to be small has no power of
        // its own to measure an error against. And INT8's ratio of two sums over a handful of
        // values scatters around the one over many that the contract bounds.
        const int64_t n = out[o]->t.ne[0], step = n < 32 && room != EXACT ? out[o]->count : n;
        const double bound = contract * (int8 && out[o]->count < 32 ? 2 : 1) + room;
        box_read(out[o]);
        box_check_outside(out[o]);
        for (int64_t i = 0; i < out[o]->count; i += step) {
            if (room != EXACT) {
                const double e = nmse(out[o]->t.format, out[o]->value + i, want[o] + i, step);
                if (!(e <= bound)) {
                    fail_msg("%s: output %d, row %lld: NMSE %g over %g (first %g, expected %g)",
                             what, o, (long long)(i / n), e, bound, out[o]->value[i], want[o][i]);
                }
            } else {
                const unsigned char *got = box_row(out[o], i / n);
                if (!same_bytes(got, bytes[o] + (got - out[o]->memory), box_row_size(out[o]))) {
                    fail_msg("%s: output %d, row %lld differs (first %g, expected %g)", what, o,
                             (long long)(i / n), out[o]->value[i], want[o][i]);
                }
            }
        }
        free(want[o]);
        free(before[o]);
        free(bytes[o]);
    }
    free_twins();
}

static void compare(rocq_op op, const void *params, box *out, double room, const char *what) {
    compare_as(op, params, params, &out, 1, room, what);
}

static const char *say(const char *format, ...) {
    static char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return text;
}

static const char *name_of(rocq_format f) { return rocq_format_name(f); }

static const rocq_format all_formats[] = { // but those that are only read: test_read_formats
    ROCQ_F32,  ROCQ_F16,  ROCQ_Q4_0, ROCQ_Q4_1, ROCQ_Q5_0,   ROCQ_Q5_1,   ROCQ_Q8_0,
    ROCQ_Q2_K, ROCQ_Q3_K, ROCQ_Q4_K, ROCQ_Q5_K, ROCQ_Q6_K,   ROCQ_IQ4_NL, ROCQ_IQ4_XS,
    ROCQ_BF16, ROCQ_MXFP4, ROCQ_MXFP6_E2M3,     ROCQ_MXFP6_E3M2
}, read_formats[] = {
#define ROCQ_X(X, name) (rocq_format)ROCQ_K_ID_##name,
    ROCQ_K_READ_FORMATS(ROCQ_X, )
#undef ROCQ_X
};
enum { N_FORMATS = (int)(sizeof all_formats / sizeof all_formats[0]) };
static const rocq_format floats[] = {ROCQ_F32, ROCQ_F16};

static bool has_int8(rocq_format f) { // on a GPU
    return block_elems(f) > 1 && f != ROCQ_MXFP6_E2M3 && f != ROCQ_MXFP6_E3M2;
}

// -- matmul --

typedef struct product { // a case; 0 = default
    rocq_format w, x, y;
    int64_t m, n, k;
    rocq_precision precision;
    bool planar, planar_x, bias, gate, residual, w2;
    int64_t rank, rank2; // of adapters to w and w2
    rocq_activation activation;
    float softcap;
    box_layout w_layout, x_layout, y_layout;
    int64_t w2_batch[2], x_batch[2]; // of w, and of x
} product;

static int64_t or_1(int64_t n) { return n > 0 ? n : 1; }

static void check_product(const product *s) {
    const int64_t wb2 = or_1(s->w2_batch[0]), wb3 = or_1(s->w2_batch[1]);
    const int64_t xb2 = or_1(s->x_batch[0]), xb3 = or_1(s->x_batch[1]);
    box w = box_make(s->w_layout, s->w, s->k, s->m, wb2, wb3);
    box w2 = box_make(s->w_layout, s->w, s->k, s->m, wb2, wb3);
    box x = box_random(s->x_layout, s->x, 1, s->k, s->n, xb2, xb3);
    box y = box_make(s->y_layout, s->y, s->m, s->n, xb2, xb3);
    box bias = box_random(BOX_PLAIN, ROCQ_F32, 1, s->m, 1, 1, 1);
    box gate = box_random(BOX_STRIDED, ROCQ_F16, 1, s->m, s->n, xb2, xb3);
    box residual = box_random(BOX_PLAIN, ROCQ_F32, 1, s->m, s->n, xb2, xb3);
    random_weights(&w);
    random_weights(&w2);
    rocq_matmul_params p = {.y = &y.t, .w = &w.t, .x = &x.t, .bias = s->bias ? &bias.t : NULL,
                            .gate = s->gate ? &gate.t : NULL,
                            .residual = s->residual ? &residual.t : NULL,
                            .activation = s->activation, .softcap = s->softcap,
                            .precision = s->precision, .w2 = s->w2 ? &w2.t : NULL};
    const bool adapted = s->rank > 0 || s->rank2 > 0;
    box b[2], t[2];
    for (int i = 0; adapted && i < 2; i++) {
        const int64_t rank = or_1(i ? s->rank2 : s->rank);
        const rocq_format format = i && rank % 16 != 0 ? ROCQ_F32 : ROCQ_F16;
        b[i] = box_random((box_layout)(s->rank % 2), format, 0.1f, rank, s->m, 1, 1);
        t[i] = box_random((box_layout)(s->rank2 % 2), ROCQ_F32, 1, rank, s->n, 1, 1);
    }
    if (s->rank > 0) {
        p.lora_b = &b[0].t;
        p.lora_t = &t[0].t;
    }
    if (s->rank2 > 0 && s->w2) {
        p.lora_b2 = &b[1].t;
        p.lora_t2 = &t[1].t;
    }
    p.lora_scale = adapted ? 3.0f : 0.0f;
    rocq_matmul_params host = p;
    host.precision = ROCQ_PRECISION_F32;
    on_gpu_as(&w, s->planar && block_elems(s->w) > 1);
    if (s->w2) on_gpu_as(&w2, s->planar && block_elems(s->w) > 1);
    if (s->planar_x) on_gpu_as(&x, true);
    box *out[] = {&y};
    compare_as(ROCQ_OP_MATMUL, &host, &p, out, 1, s->y == ROCQ_Q8_0 ? 1e-4 : 0,
               say("%s%s x %s, M %d N %d K %d, precision %d", name_of(s->w),
                   s->planar ? " planar" : "", name_of(s->x), (int)s->m, (int)s->n, (int)s->k,
                   (int)s->precision));
    boxes_free(&w, &w2, &x, &y, &bias, &gate, &residual);
    for (int i = 0; adapted && i < 2; i++) {
        boxes_free(&b[i], &t[i]);
    }
}

// K of one block and of more than a wave takes at once; M around a block's rows.
static int64_t small_k(rocq_format f) { return block_elems(f) > 1 ? block_elems(f) : 5; }
static int64_t large_k(rocq_format f) { return block_elems(f) == 1 ? 1003 : 1280; }

static void test_matmul_matvec(void **state) {
    (void)state;
    for (int f = 0; f < N_FORMATS; f++) {
        for (int64_t n = 1; n <= 8; n++) {
            const product s = {.w = all_formats[f], .m = n % 2 ? 1 : 37, .n = n, .planar = true,
                               .k = n % 2 ? small_k(all_formats[f]) : large_k(all_formats[f])};
            check_product(&s);
        }
        const product large = {.w = all_formats[f], .m = 67, .n = 1, .planar = true,
                               .k = large_k(all_formats[f])};
        check_product(&large);
        product exact = large;
        exact.precision = ROCQ_PRECISION_F32;
        check_product(&exact);
        exact.n = 5;
        check_product(&exact);
        if (!has_int8(all_formats[f])) continue;
        const uint64_t saved = random_state;
        product longer = large; // than a row that blocks quantize for themselves
        longer.k = ROCQ_K_MATVEC_ROW_K + 256;
        longer.m = 5;
        check_product(&longer);
        random_state = saved;
    }
}

// Wide tiles are for grids that fill the chip, so on a large one these shapes take narrow tiles:
// the last ones run as on a chip of one unit.
static void test_matmul_tiles_f16(void **state) {
    (void)state;
    static const int64_t n_columns[] = {9, 17, 33, 130, 250};
    const int32_t n_units = gpu->gpu->chip.n_units;
    for (int f = 0; f < N_FORMATS; f++) {
        for (int i = 0; i < 5; i++) {
            gpu->gpu->chip.n_units = i == 4 ? 1 : n_units;
            const rocq_format w = all_formats[f];
            const product s = {.w = w, .m = i % 2 ? 129 : 31, .n = n_columns[i],
                               .k = i % 2 ? small_k(w) : 256 + block_elems(w), .planar = true,
                               .precision = ROCQ_PRECISION_F16};
            check_product(&s);
        }
    }
    gpu->gpu->chip.n_units = n_units;
}

static void test_matmul_tiles_int8(void **state) {
    (void)state;
    for (int f = 0; f < N_FORMATS; f++) {
        if (!has_int8(all_formats[f])) continue;
        for (int i = 0; i < 2; i++) {
            const product s = {.w = all_formats[f], .m = i ? 130 : 5, .n = i ? 133 : 9,
                               .k = i ? 512 : small_k(all_formats[f]), .planar = true,
                               .precision = ROCQ_PRECISION_INT8};
            check_product(&s);
        }
    }
}

static void test_matmul_tiles_f32(void **state) {
    (void)state;
    for (int f = 0; f < N_FORMATS; f++) {
        const product s = {.w = all_formats[f], .m = 65, .n = 11,
                           .k = large_k(all_formats[f]) / 5, .planar = true,
                           .precision = ROCQ_PRECISION_F32};
        product t = s;
        t.k = 2 * small_k(all_formats[f]);
        check_product(&t);
    }
}

// With more compute units than tiles, blocks share K, and their parts are added by a second launch.
static void test_matmul_splits(void **state) {
    (void)state;
    static const rocq_format formats[] = {ROCQ_Q4_0, ROCQ_Q4_K, ROCQ_F16, ROCQ_F32};
    const int32_t n_units = gpu->gpu->chip.n_units;
    gpu->gpu->chip.n_units = 256;
    for (int i = 0; i < 12; i++) {
        const rocq_precision paths[] = {ROCQ_PRECISION_F16, ROCQ_PRECISION_F32,
                                        ROCQ_PRECISION_INT8};
        const rocq_format w = formats[i % 4];
        const product s = {.w = w, .m = i % 2 ? 130 : 70, .n = i % 3 ? 35 : 9,
                           .k = block_elems(w) > 1 ? 1792 : 1413, .planar = true,
                           .precision = paths[has_int8(w) ? i / 4 : i / 4 % 2],
                           .y_layout = BOX_STRIDED, .bias = true, .residual = true,
                           .x_batch = {i % 2 + 1, 1}};
        const int64_t before = gpu->gpu->launches[ROCQ_K_matmul_merge];
        check_product(&s);
        assert_int_equal(gpu->gpu->launches[ROCQ_K_matmul_merge], before + 1);
    }
    gpu->gpu->chip.n_units = n_units;
}

// Raw blocks, strided and permuted rows, F16 and Q8_0 activations, batches: all go by way of
// copies.
static void test_matmul_layouts(void **state) {
    (void)state;
    static const rocq_format formats[] = {ROCQ_F32, ROCQ_F16, ROCQ_Q4_0, ROCQ_Q6_K,
                                          ROCQ_MXFP6_E2M3};
    static const rocq_format x_formats[] = {ROCQ_F32, ROCQ_F16, ROCQ_Q8_0};
    for (int f = 0; f < 5; f++) {
        for (int i = 0; i < 12; i++) {
            product s = {.w = formats[f], .x = x_formats[i % 3], .m = 19, .n = i % 2 ? 3 : 12,
                         .k = 256, .w_layout = (box_layout)(i / 3 % 3),
                         .x_layout = (box_layout)((i + 1) % 3),
                         .y_layout = (box_layout)((i + 2) % 3)};
            if (i % 4 == 3) {
                s.w2_batch[0] = 2;
                s.x_batch[0] = 4;
                s.x_batch[1] = 3;
            }
            check_product(&s);
            if (s.w_layout == BOX_PLAIN) {
                s.planar = true;
                check_product(&s);
            }
        }
    }
    const product planar_x = {.w = ROCQ_Q5_K, .x = ROCQ_Q8_0, .m = 40, .n = 2, .k = 512,
                              .planar = true, .planar_x = true};
    check_product(&planar_x);
}

static void test_matmul_epilogue(void **state) {
    (void)state;
    for (int i = 0; i < 24; i++) {
        const rocq_format f = i % 3 == 0 ? ROCQ_Q4_K : i % 3 == 1 ? ROCQ_Q8_0 : ROCQ_F16;
        const product s = {.w = f, .m = 64, .n = i % 2 ? 2 : 20, .k = 256, .planar = true,
                           .y = i % 5 == 4 ? ROCQ_Q8_0 : i % 4 == 1 ? ROCQ_F16 : ROCQ_F32,
                           .y_layout = i % 5 == 4 ? BOX_PLAIN : BOX_STRIDED,
                           .bias = i % 2 == 0, .gate = i % 3 == 1, .residual = i % 4 < 2,
                           .w2 = i % 5 > 2, .activation = (rocq_activation)(i % 6),
                           .softcap = i % 7 == 3 ? 5.0f : 0.0f};
        check_product(&s);
    }
}

// Low-rank adapters to matvecs of every number of columns, to tiles of every path and to split K.
static void test_matmul_adapters(void **state) {
    (void)state;
    // Of weights around 0: with a common offset, as in Q4_K, a column of x whose sum happens to be
    // small has no power to measure INT8's error against.
    static const rocq_format formats[] = {ROCQ_Q4_0, ROCQ_Q6_K, ROCQ_F16, ROCQ_F32};
    static const rocq_precision paths[] = {ROCQ_PRECISION_AUTO, ROCQ_PRECISION_F16,
                                           ROCQ_PRECISION_F32, ROCQ_PRECISION_INT8};
    static const int64_t n_columns[] = {1, 2, 3, 4, 7, 8, 9, 40}, ranks[] = {1, 4, 16, 37, 64, 70};
    const int32_t n_units = gpu->gpu->chip.n_units;
    const uint64_t state_before = random_state; // for the tests behind this one
    for (int i = 0; i < 64; i++) {
        const rocq_format w = formats[i % 4];
        const rocq_precision path = paths[i / 8 % 4];
        const bool split = i >= 56; // of 1792 elements, for many units
        gpu->gpu->chip.n_units = split ? 256 : n_units;
        const product s = {.w = w, .m = split ? 70 : i % 3 ? 64 : 37, .n = n_columns[i / 2 % 8],
                           .k = split ? 1792 : 256, .planar = true,
                           .precision = path == ROCQ_PRECISION_INT8 && !has_int8(w)
                                            ? ROCQ_PRECISION_AUTO : path,
                           .rank = i % 5 == 4 ? 0 : ranks[i % 6], .rank2 = ranks[i / 6 % 6],
                           .w2 = i % 3 == 1, .bias = i % 4 == 1, .residual = i % 5 == 2,
                           .activation = i % 3 ? ROCQ_ACT_SILU : ROCQ_ACT_IDENTITY,
                           .y_layout = (box_layout)(i % 3)};
        check_product(&s);
    }
    gpu->gpu->chip.n_units = n_units;
    for (int i = 0; i < 48; i++) { // those that a matvec adds itself, with all of the epilogue
        const int64_t n = i % 3 ? 1 : 2 + i / 3 % 7;
        const bool blocks = i % 4 == 3, exact = i % 4 < 2; // y in Q8_0; not INT8, whose errors
                                                           // some activations would enlarge
        const product s = {.w = formats[i / 4 % 4], .m = blocks ? 64 : 37 + i, .n = n,
                           .k = i % 2 ? 256 : 1280, .planar = true,
                           .y = blocks ? ROCQ_Q8_0 : i % 15 == 1 ? ROCQ_F16 : ROCQ_F32,
                           .precision = exact ? ROCQ_PRECISION_F32 : ROCQ_PRECISION_AUTO,
                           .rank = i % 7 == 6 ? 0 : i % 5 ? 16 : 8 * (1 + i / 5),
                           .rank2 = i % 6 == 5 ? 0 : 16 * (1 + i % 3), .w2 = i % 3 == 2,
                           .bias = i % 4 == 1, .gate = i % 8 == 4, .residual = i % 5 < 2,
                           .activation = (rocq_activation)(exact ? i % 6 : i / 4 % 2),
                           .softcap = exact && i % 7 == 3 ? 50.0f : 0.0f};
        check_product(&s);
        assert_in_range(op_launches, 1, n > 1 ? 2 : 1); // INT8 of several columns converts x
    }
    random_state = state_before;
}

// q, k and v in one pass: the same and mixed formats, one and many columns.
static void test_matmul_chain(void **state) {
    (void)state;
    static const rocq_format formats[][3] = {{ROCQ_Q4_K, ROCQ_Q4_K, ROCQ_Q4_K},
                                             {ROCQ_Q4_K, ROCQ_Q4_K, ROCQ_Q6_K},
                                             {ROCQ_Q8_0, ROCQ_F16, ROCQ_MXFP4},
                                             {ROCQ_IQ2_XS, ROCQ_IQ3_S, ROCQ_Q4_K}};
    static const int64_t n_columns[] = {1, 2, 8, 19, 1};
    uint64_t random_kept = random_state;
    for (int f = 0; f < 4; f++) {
        if (f == 3) random_kept = random_state;
        for (int c = 0; c < 5; c++) {
            const int64_t k = c < 4 ? 512 : ROCQ_K_MATVEC_ROW_K + 256;
            const uint64_t before_last = random_state;
            box w[3], y[3], x = box_random(BOX_PLAIN, ROCQ_F32, 1, k, n_columns[c], 1, 1);
            const uint64_t state_before = random_state;
            box b = box_random(BOX_PLAIN, ROCQ_F16, 0.1f, 16, 33, 1, 1);
            box t = box_random(BOX_PLAIN, ROCQ_F32, 1, 16, n_columns[c], 1, 1);
            random_state = state_before;
            rocq_matmul_params p[3], host[3];
            box *out[3];
            memset(p, 0, sizeof p);
            for (int i = 0; i < 3; i++) {
                w[i] = box_make(BOX_PLAIN, formats[f][i], k, i == 0 ? 70 : 33, 1, 1);
                y[i] = box_make(BOX_STRIDED, ROCQ_F32, i == 0 ? 70 : 33, n_columns[c], 1, 1);
                random_weights(&w[i]);
                out[i] = &y[i];
                p[i].y = &y[i].t;
                p[i].w = &w[i].t;
                p[i].x = &x.t;
                p[i].next = i < 2 ? &p[i + 1] : NULL;
                if (i > 0 && c != 1) { // adapters of the second and the third
                    p[i].lora_b = &b.t;
                    p[i].lora_t = &t.t;
                    p[i].lora_scale = (float)i;
                }
                on_gpu_as(&w[i], block_elems(formats[f][i]) > 1);
            }
            memcpy(host, p, sizeof p);
            for (int i = 0; i < 3; i++) {
                host[i].precision = ROCQ_PRECISION_F32;
                host[i].next = i < 2 ? &host[i + 1] : NULL;
            }
            compare_as(ROCQ_OP_MATMUL, &host[0], &p[0], out, 3, 0,
                       say("chain %d, %d columns", f, (int)n_columns[c]));
            for (int i = 0; i < 3; i++) {
                boxes_free(&w[i], &y[i]);
            }
            boxes_free(&x, &b, &t);
            if (c == 4) random_state = before_last;
        }
    }
    random_state = random_kept;
}

// How many splits of K the tiles of a product have.
static int32_t tile_splits(rocq_format w, rocq_precision path, int64_t m, int64_t n, int64_t k) {
    const rocq__site site = {.kind = ROCQ__KIND_TILES, .format = (int32_t)w, .m = (int32_t)m,
                             .n = (int32_t)n, .k = (int32_t)k, .batch = 1};
    const rocq_tensor weights = {.format = w, .n_dims = 2, .ne = {k, m, 1, 1}};
    bool halves = false;
    if (path == ROCQ_PRECISION_F16 && rocq__takes_few(&gpu->gpu->chip, &site, ROCQ_F32)) return 1;
    return path == ROCQ_PRECISION_F16 && rocq__takes_lds(&gpu->gpu->chip, &site)
               ? rocq__tiles_lds(&gpu->gpu->chip, &weights, &site, &halves).n_splits
               : rocq__tiles_plain(gpu, path, w, &site).n_splits;
}

// More columns than a matvec takes: products of one format share a launch of tiles, and with K in
// splits that of matmul_merge. All kinds of kernels, with two to four products, of which some have
// no whole tile, and each with its own part of the epilogue. On a chip of few units, as many share
// a launch as there are units for their tiles; and weights that are decoded to F16 first (NVFP4)
// have launches of their own.
static void test_matmul_tiles_shared(void **state) {
    (void)state;
    static const struct {
        rocq_format w;
        rocq_precision path;
        int64_t n, k;
        int units, launches; // without merges
        bool lds, splits;
    } cases[] = {{ROCQ_Q4_0, ROCQ_PRECISION_F16, 35, 160, 6, 1, false, false},
                 {ROCQ_Q4_0, ROCQ_PRECISION_F16, 130, 1056, 256, 1, false, true},
                 {ROCQ_F16, ROCQ_PRECISION_F16, 35, 136, 6, 1, false, false},
                 {ROCQ_Q4_0, ROCQ_PRECISION_INT8, 70, 160, 2, 2, false, false},
                 {ROCQ_Q4_0, ROCQ_PRECISION_INT8, 9, 1056, 256, 1, false, true},
                 {ROCQ_Q4_0, ROCQ_PRECISION_F32, 9, 32, 6, 1, false, false},
                 {ROCQ_Q4_0, ROCQ_PRECISION_F32, 35, 160, 256, 1, false, true},
                 {ROCQ_Q4_0, ROCQ_PRECISION_F16, 35, 160, 6, 1, true, false},
                 {ROCQ_Q4_0, ROCQ_PRECISION_F16, 29, 1056, 132, 1, true, true},
                 {ROCQ_F16, ROCQ_PRECISION_F16, 35, 520, 132, 1, true, true},
                 {ROCQ_F16, ROCQ_PRECISION_F16, 12, 136, 6, 1, true, false},
                 {ROCQ_NVFP4, ROCQ_PRECISION_F16, 100, 352, 6, 8, true, false}};
    static const int64_t rows[] = {130, 33, 70, 16};
    const uint64_t state_before = random_state; // for the tests behind this one
    const bool first = gpu->gpu->chip.lds_tiles;
    const int32_t n_units = gpu->gpu->chip.n_units;
    rocq_info info;
    rocq_get_info(gpu, &info);
    random_state = 41;
    for (int c = 0; c < 12; c++) {
        if (cases[c].lds && !first && !strstr(info.device, "simt")) continue;
        const int64_t k = cases[c].k / block_elems(cases[c].w) * block_elems(cases[c].w);
        const int64_t n = cases[c].n;
        const int n_products = c % 3 + 2;
        box w[4], y[4], bias[4], residual[4], x = box_random(BOX_PLAIN, ROCQ_F32, 1, k, n, 1, 1);
        rocq_matmul_params p[4], host[4];
        box *out[4];
        int64_t before[ROCQ_K_COUNT], launches = 0, all_rows = 0;
        memset(p, 0, sizeof p);
        for (int i = 0; i < n_products; i++) {
            w[i] = box_make(BOX_PLAIN, cases[c].w, k, rows[i], 1, 1);
            y[i] = box_make((box_layout)((c + i) % 3), ROCQ_F32, rows[i], n, 1, 1);
            bias[i] = box_random(BOX_PLAIN, ROCQ_F32, 1, rows[i], 1, 1, 1);
            residual[i] = box_random(BOX_PLAIN, ROCQ_F32, 1, rows[i], n, 1, 1);
            random_weights(&w[i]);
            all_rows += rows[i];
            out[i] = &y[i];
            p[i].y = &y[i].t;
            p[i].w = &w[i].t;
            p[i].x = &x.t;
            p[i].precision = cases[c].path;
            if ((c + i) % 3 == 0) p[i].bias = &bias[i].t;
            if ((c + i) % 4 == 1) p[i].residual = &residual[i].t;
            if ((c + i) % 5 == 2) p[i].activation = ROCQ_ACT_RELU;
            p[i].next = i + 1 < n_products ? &p[i + 1] : NULL;
            on_gpu_as(&w[i], block_elems(cases[c].w) > 1);
        }
        memcpy(host, p, sizeof p);
        for (int i = 0; i < n_products; i++) {
            host[i].precision = ROCQ_PRECISION_F32;
            host[i].next = i + 1 < n_products ? &host[i + 1] : NULL;
        }
        gpu->gpu->chip.lds_tiles = cases[c].lds;
        gpu->gpu->chip.n_units = cases[c].units;
        memcpy(before, gpu->gpu->launches, sizeof before);
        compare_as(ROCQ_OP_MATMUL, &host[0], &p[0], out, n_products, 0, say("shared %d", c));
        for (int i = 0; i < ROCQ_K_COUNT; i++) {
            if (strncmp(rocq__kernels[i].name, "rocq_k_matmul", 13) == 0) {
                launches += gpu->gpu->launches[i] - before[i];
            }
        }
        const int32_t n_splits = tile_splits(cases[c].w, cases[c].path, all_rows, n, k);
        assert_int_equal(n_splits > 1, cases[c].splits);
        assert_int_equal(launches, cases[c].launches + cases[c].splits);
        for (int i = 0; i < n_products; i++) {
            boxes_free(&w[i], &y[i]);
            boxes_free(&bias[i], &residual[i]);
        }
        boxes_free(&x);
        gpu->gpu->chip.lds_tiles = first;
        gpu->gpu->chip.n_units = n_units;
    }
    random_state = state_before;
}

// -- attention --

typedef struct attend {
    int64_t d, n_heads, n_kv_heads, n_q, n_kv, n_seqs;
    rocq_format q, out, k, v;
    bool causal, mask, mask_heads, sinks, kv_len, in_place, hadamard;
    bool step; // of the kind that attention_step does
    int32_t window, page_size;
    int64_t shorter; // with kv_len: of every second sequence, if not 0
    int64_t infinite; // the scores of so many first positions are -infinity, by what K holds
    float softcap;
    box_layout layout;
} attend;

static void check_attention(const attend *s) {
    const int64_t n_pages = s->page_size ? (s->n_kv + s->page_size - 1) / s->page_size : 1;
    const int64_t n_kv = s->page_size ? n_pages * s->page_size : s->n_kv;
    const int64_t n_rows = s->page_size ? n_pages * s->page_size * s->n_seqs : s->n_kv;
    box q = box_random(s->in_place ? BOX_PLAIN : s->layout, s->q, 1, s->d, s->n_heads, s->n_q,
                       s->n_seqs);
    box out = box_make(s->layout, s->out, s->d, s->n_heads, s->n_q, s->n_seqs);
    const int64_t kv_seqs = s->page_size ? 1 : s->n_seqs;
    box k = box_random(s->layout, s->k, 1, s->d, s->n_kv_heads, n_rows, kv_seqs);
    box v = box_random(s->layout, s->v, 1, s->d, s->n_kv_heads, n_rows, kv_seqs);
    if (s->hadamard) {
        box_hadamard(&k);
        box_hadamard(&v);
    }
    if (s->infinite > 0) {
        for (int64_t i = 0; i < q.count; i += s->d) q.value[i] = 1;
        for (int64_t i = 0; i < k.count / s->d; i++) {
            if (i / s->n_kv_heads % n_rows < s->infinite) k.value[i * s->d] = -INFINITY;
        }
        box_write(&q);
        box_write(&k);
    }
    box mask = box_random(BOX_PLAIN, ROCQ_F16, 1, n_kv, s->n_q, s->mask_heads ? s->n_heads : 1, 1);
    box sinks = box_random(BOX_PLAIN, ROCQ_F32, 2, s->n_heads, 1, 1, 1);
    box kv_len = box_make(BOX_PLAIN, ROCQ_I32, s->n_seqs, 1, 1, 1);
    box pages = box_make(BOX_PLAIN, ROCQ_I32, n_pages, s->n_seqs, 1, 1);
    for (int64_t i = 0; i < mask.count; i++) {
        if (random_below(3) == 0) mask.value[i] = -INFINITY;
    }
    box_write(&mask);
    for (int64_t i = 0; i < s->n_seqs; i++) {
        kv_len.value[i] = (double)(s->shorter && i % 2 ? s->shorter : n_kv - i % n_kv);
    }
    box_write(&kv_len);
    for (int64_t i = 0; i < pages.count; i++) pages.value[i] = (double)((i * 7 + 3) % pages.count);
    if (pages.count % 7 == 0) {
        for (int64_t i = 0; i < pages.count; i++) pages.value[i] = (double)(pages.count - 1 - i);
    }
    box_write(&pages);
    box lse = box_make(s->layout, ROCQ_F32, s->n_heads, s->n_q, s->n_seqs, 1);
    box *o = s->in_place ? &q : &out, *const outputs[2] = {o, &lse};
    // where every query sees something: the difference of two infinities is none
    const bool all_see =
        !s->step && !s->mask && !s->kv_len && (!s->causal || s->n_kv >= s->n_q);
    const rocq_attention_params p = {
        .out = &o->t, .lse = all_see ? &lse.t : NULL, .q = &q.t, .k = &k.t, .v = &v.t,
        .mask = s->mask ? &mask.t : NULL,
        .sinks = s->sinks ? &sinks.t : NULL, .kv_len = s->kv_len ? &kv_len.t : NULL,
        .page_table = s->page_size ? &pages.t : NULL, .page_size = s->page_size,
        .softcap = s->softcap, .window = s->window, .causal = s->causal};
    assert_true(!s->step || rocq__attention_steps(&gpu->gpu->chip, &p));
    compare_as(ROCQ_OP_ATTENTION, &p, &p, outputs, all_see ? 2 : 1, s->out == ROCQ_Q8_0 ? 1e-4 : 0,
            say("D %d, %d heads on %d, n_q %d, n_kv %d, seqs %d, K %s V %s, page %d", (int)s->d,
                (int)s->n_heads, (int)s->n_kv_heads, (int)s->n_q, (int)s->n_kv, (int)s->n_seqs,
                name_of(s->k), name_of(s->v), (int)s->page_size));
    boxes_free(&q, &out, &lse, &k, &v, &mask, &sinks, &kv_len, &pages);
}

// On a chip of one compute unit whatever fills its columns goes to the prefill kernels.
static void check_prefill(const attend *s) {
    const int32_t n_units = gpu->gpu->chip.n_units;
    gpu->gpu->chip.n_units = 1;
    check_attention(s);
    gpu->gpu->chip.n_units = n_units;
}

static void test_attention_heads(void **state) {
    (void)state;
    static const int64_t dims[] = {1, 24, 33, 64, 72, 80, 96, 112, 128, 192, 256, 320, 512};
    for (int i = 0; i < (int)(sizeof dims / sizeof dims[0]); i++) {
        const attend decode = {.d = dims[i], .n_heads = 4, .n_kv_heads = 2, .n_q = 1, .n_kv = 77,
                               .n_seqs = 1, .k = ROCQ_F16, .v = ROCQ_F16};
        attend prefill = decode;
        prefill.n_q = 37;
        prefill.causal = true;
        prefill.mask = gpu->gpu->chip.lds_tiles; // else attention_lds would take these on Hopper
        check_attention(&decode);
        check_attention(&prefill);
        check_prefill(&prefill);
    }
}

static void test_attention_formats(void **state) {
    (void)state;
    static const rocq_format kv[] = {ROCQ_F32, ROCQ_F16, ROCQ_BF16, ROCQ_Q8_0, ROCQ_Q4_0};
    for (int i = 0; i < 25; i++) {
        const attend s = {.d = i % 2 ? 64 : 128, .n_heads = 4, .n_kv_heads = i % 3 ? 2 : 4,
                          .n_q = i % 4 ? 1 : 9, .n_kv = 40 + i, .n_seqs = 1, .k = kv[i / 5],
                          .v = kv[i % 5], .q = floats[i % 2], .out = floats[i / 2 % 2],
                          .causal = true, .layout = (box_layout)(i % 3)};
        check_attention(&s);
    }
}

// Rows times H: every size of H, kernel and way of loading queries; split runs that are merged.
static void test_attention_hadamard(void **state) {
    (void)state;
    const uint64_t saved = random_state;
    static const rocq_format kv[] = {ROCQ_Q8_0, ROCQ_Q4_0, ROCQ_F16};
    static const int64_t dims[] = {32, 64, 96, 128, 192, 256, 512};
    for (int i = 0; i < 28; i++) {
        const bool many = i % 4 == 3;
        const attend s = {.d = dims[i % 7], .n_heads = 6, .n_kv_heads = 2,
                          .n_q = many ? 19 : 1 + i % 2, .n_kv = i % 8 == 1 ? 900 : 50,
                          .n_seqs = 1 + i % 3 / 2, .k = kv[i % 3],
                          .v = kv[i / 3 % 3], .q = floats[i / 4 % 2],
                          .out = i % 5 == 4 ? ROCQ_Q8_0 : ROCQ_F32, .sinks = i % 6 == 5,
                          .causal = true, .page_size = i % 9 == 8 ? 16 : 0,
                          .layout = (box_layout)(i % 3), .hadamard = true};
        if (many) check_prefill(&s);
        else check_attention(&s);
    }
    random_state = saved;
}

static void test_attention_options(void **state) {
    (void)state;
    for (int i = 0; i < 48; i++) {
        const bool many = i % 2 == 1;
        const attend s = {.d = 64, .n_heads = i % 5 == 0 ? 32 : 6, .n_kv_heads = i % 5 == 0 ? 1 : 2,
                          .n_q = many ? 19 : 1 + i % 3, .n_kv = i % 6 == 0 ? 1 : 20 + 9 * (i % 11),
                          .n_seqs = 1 + i % 3, .k = ROCQ_F16, .v = i % 4 ? ROCQ_F16 : ROCQ_Q8_0,
                          .causal = i % 3 != 0, .mask = i % 4 == 2, .mask_heads = i % 8 == 2,
                          .sinks = i % 5 == 1, .kv_len = i % 2 == 0,
                          .window = i % 3 != 0 && i % 4 == 1 ? 1 + i : 0,
                          .softcap = i % 6 == 5 ? 8.0f : 0.0f,
                          .out = i % 7 == 6 ? ROCQ_Q8_0 : ROCQ_F32,
                          .page_size = i % 5 == 2 ? 1 + i % 16 : 0, .in_place = i % 7 == 3};
        if (many) check_prefill(&s);
        else check_attention(&s);
    }
}

// Heads of 257 to 512 in prefill, whose block has 16 waves, which stage K and V in turns: every
// option, format and layout; several KV tiles, tiles that some columns do not see or none, column
// tiles past the last query; alone, and in two runs that are merged.
static void test_attention_wide(void **state) {
    (void)state;
    const uint64_t saved = random_state;
    const int32_t n_units = gpu->gpu->chip.n_units;
    static const rocq_format kv[] = {ROCQ_F16, ROCQ_F32, ROCQ_BF16, ROCQ_Q8_0, ROCQ_Q4_0};
    static const int64_t dims[] = {512, 320, 257, 488, 384};
    for (int i = 0; i < 30; i++) {
        const bool blocks = i % 5 > 2 || i / 5 % 5 > 2; // formats of which a row has whole blocks
        const bool runs = i % 6 == 5;
        const attend s = {.d = blocks ? dims[i % 2 ? 4 : 0] : dims[i / 2 % 5],
                          .n_heads = i % 4 == 0 ? 6 : 3, .n_kv_heads = i % 4 == 0 ? 2 : 1,
                          .n_q = runs ? 30 : 11 + 5 * (i % 9),
                          .n_kv = runs ? 300 : 1 + 13 * (i % 8),
                          .n_seqs = runs ? 1 : 1 + i % 2, .q = floats[i % 3 % 2],
                          .k = kv[i % 5], .v = kv[i / 5 % 5], .causal = i % 3 == 1,
                          .mask = i % 4 == 2, .mask_heads = i % 8 == 2, .sinks = i % 5 == 1,
                          .kv_len = i % 4 == 1, .window = i % 3 == 1 && i % 2 ? 1 + i : 0,
                          .softcap = i % 6 == 4 ? 8.0f : 0.0f,
                          .out = i % 7 == 6 && blocks ? ROCQ_Q8_0 : ROCQ_F32,
                          .page_size = i % 5 == 2 ? 1 + i % 16 : 0, .in_place = i % 7 == 3,
                          .layout = (box_layout)(i / 3 % 3)};
        const int64_t columns = s.n_heads / s.n_kv_heads * s.n_q;
        const int64_t tiles = (columns + 63) / 64 * s.n_kv_heads * s.n_seqs;
        gpu->gpu->chip.n_units = runs ? (int32_t)(4 * tiles) : 1;
        check_attention(&s);
    }
    gpu->gpu->chip.n_units = n_units;
    random_state = saved;
}

// The kernels attention_lds: every size of a head and of a block, whole and ragged tiles of columns
// and positions, one tile and several, groups, sequences, formats, options, outputs in all formats
// and in the place of Q, a first tile whose scores are all -infinity; and what they must leave to
// other kernels.
static int64_t attention_lds_launches(void) {
    int64_t n = 0;
    for (int i = ROCQ_K_attention_lds_64; i <= ROCQ_K_attention_lds_256; i++)
        n += gpu->gpu->launches[i];
    return n;
}

static void test_attention_lds(void **state) {
    (void)state;
    const uint64_t saved = random_state;
    const int32_t n_units = gpu->gpu->chip.n_units;
    const int64_t before = attention_lds_launches();
    const bool lds_tiles = gpu->gpu->chip.lds_tiles;
    rocq_info info;
    rocq_get_info(gpu, &info);
    if (!lds_tiles && !strstr(info.device, "simt")) skip();
    gpu->gpu->chip.lds_tiles = true;
    enum { TAKEN = 40, LEFT = 5 };
    for (int i = 0; i < TAKEN + LEFT; i++) {
        static const int64_t dims[] = {64, 128, 256, 120, 96, 192, 32, 80};
        static const int64_t queries[] = {33, 64, 65, 130, 41};
        static const int64_t lengths[] = {64, 1, 140, 65, 300, 128, 257};
        static const rocq_format kv[] = {ROCQ_F16, ROCQ_F16, ROCQ_F32, ROCQ_BF16, ROCQ_Q8_0,
                                         ROCQ_Q4_0};
        const int other = i - TAKEN;
        const int64_t d = other == 0 ? 60 : dims[i % 8], heads = 1 + i % 3 / 2;
        const bool blocks = d % 32 == 0;
        const attend s = {.d = d, .n_heads = heads * (1 + i % 4 % 3), .n_kv_heads = heads,
                          .n_q = other == 1 ? 1 : queries[i % 5], .n_kv = lengths[i % 7],
                          .n_seqs = 1 + i % 2, .q = floats[i / 2 % 2],
                          .k = other == 4 ? ROCQ_Q8_0 : kv[blocks ? i / 3 % 6 : i % 4],
                          .v = kv[blocks ? i / 5 % 6 : i % 4],
                          .out = i % 4 == 1             ? ROCQ_F16
                                 : i % 4 == 2 && blocks ? ROCQ_Q8_0
                                                        : ROCQ_F32,
                          .in_place = i % 4 == 3, .sinks = i % 5 == 4, .causal = i % 3 != 0,
                          .kv_len = i % 7 == 3, .window = i % 6 == 1 ? 1 + 5 * i : 0,
                          .softcap = i % 6 == 5 ? 8.0f : 0.0f, .mask = other == 2,
                          .page_size = other == 3 ? 16 : 0, .hadamard = other == 4 && blocks};
        gpu->gpu->chip.n_units = i / 2 % 2 ? 1 : 5; // heads of 128: 256 threads a block, or 128
        check_attention(&s);
    }
    const attend infinite = {.d = 64, .n_heads = 1, .n_kv_heads = 1, .n_q = 65, .n_kv = 200,
                             .n_seqs = 1, .k = ROCQ_F16, .v = ROCQ_F16, .infinite = 128};
    check_attention(&infinite);
    for (int i = 0; i < 2; i++) { // in two runs, which are merged
        const attend runs = {.d = i ? 192 : 64, .n_heads = 4, .n_kv_heads = 2, .n_q = 35,
                             .n_kv = 2085, .n_seqs = 1, .k = ROCQ_F16, .v = ROCQ_F16,
                             .causal = true, .sinks = i == 0, .kv_len = i == 1,
                             .out = i ? ROCQ_Q8_0 : ROCQ_F32};
        gpu->gpu->chip.n_units = 10;
        check_attention(&runs);
    }
    assert_int_equal(attention_lds_launches(), before + TAKEN + 3);
    gpu->gpu->chip.lds_tiles = lds_tiles;
    gpu->gpu->chip.n_units = n_units;
    random_state = saved;
}

// The kernel attention_lds_512: whole and ragged tiles of queries and positions, one tile and
// several, heads, sequences, sinks, outputs in all formats and in the place of Q, a first tile
// whose scores are all -infinity; and what it must leave to other kernels.
static void test_attention_lds_wide(void **state) {
    (void)state;
    const uint64_t saved = random_state;
    const int32_t n_units = gpu->gpu->chip.n_units;
    const int64_t before = gpu->gpu->launches[ROCQ_K_attention_lds_512];
    const bool lds_tiles = gpu->gpu->chip.lds_tiles;
    rocq_info info;
    rocq_get_info(gpu, &info);
    if (!lds_tiles && !strstr(info.device, "simt")) skip();
    gpu->gpu->chip.lds_tiles = true;
    gpu->gpu->chip.n_units = 1;
    enum { TAKEN = 14, LEFT = 9 };
    for (int i = 0; i < TAKEN + LEFT; i++) {
        static const int64_t queries[] = {33, 64, 65, 130, 63};
        static const int64_t lengths[] = {64, 1, 63, 65, 200, 128};
        const int other = i - TAKEN;
        const int64_t heads = 1 + i % 3 / 2;
        const attend s = {.d = other == 0 ? 504 : 512, .n_heads = other == 1 ? 2 * heads : heads,
                          .n_kv_heads = heads, .n_q = other == 8 ? 32 : queries[i % 5],
                          .n_kv = lengths[i % 6],
                          .n_seqs = 1 + i % 2, .q = other == 2 ? ROCQ_F32 : ROCQ_F16,
                          .k = other == 3 ? ROCQ_Q8_0 : ROCQ_F16,
                          .v = other == 4 ? ROCQ_BF16 : ROCQ_F16,
                          .out = i % 4 == 1                 ? ROCQ_F16
                                 : i % 4 == 2 && other != 0 ? ROCQ_Q8_0
                                                            : ROCQ_F32,
                          .in_place = i % 4 == 3, .sinks = i % 5 == 4, .causal = other == 5,
                          .mask = other == 6, .kv_len = other == 7};
        check_attention(&s);
    }
    const attend infinite = {.d = 512, .n_heads = 1, .n_kv_heads = 1, .n_q = 65, .n_kv = 130,
                             .n_seqs = 1, .q = ROCQ_F16, .k = ROCQ_F16, .v = ROCQ_F16,
                             .infinite = 64};
    check_attention(&infinite);
    assert_int_equal(gpu->gpu->launches[ROCQ_K_attention_lds_512], before + TAKEN + 1);
    gpu->gpu->chip.lds_tiles = lds_tiles;
    gpu->gpu->chip.n_units = n_units;
    random_state = saved;
}

// Long enough that runs of K and V are split over blocks and merged.
static void test_attention_long(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        const attend s = {.d = 128, .n_heads = 8, .n_kv_heads = 2, .n_q = i < 2 ? 1 : 3,
                          .n_kv = 1500, .n_seqs = 1 + i % 2, .k = ROCQ_F16, .v = ROCQ_F16,
                          .causal = true, .kv_len = i % 2 == 1, .sinks = i > 1};
        check_attention(&s);
    }
}

// Checks decode steps by a head a block (attention_step), then by up to 8 heads a block
// (attention_group), where the chip has that kernel or is the stand-in.
static void both_steps(void (*check)(bool grouped)) {
    const uint64_t saved = random_state;
    const bool lds_tiles = gpu->gpu->chip.lds_tiles;
    rocq_info info;
    rocq_get_info(gpu, &info);
    for (int i = 0; i < (lds_tiles || strstr(info.device, "simt") ? 2 : 1); i++) {
        const int first = i ? ROCQ_K_attention_group_64 : ROCQ_K_attention_step_64;
        const int64_t before[2] = {gpu->gpu->launches[first], gpu->gpu->launches[first + 1]};
        gpu->gpu->chip.lds_tiles = i == 1;
        check(i == 1);
        for (int k = 0; k < 2; k++) assert_true(gpu->gpu->launches[first + k] > before[k]);
    }
    gpu->gpu->chip.lds_tiles = lds_tiles;
    random_state = saved;
}

// A decode step, in a group of more heads than the chip has units by attention_decode: groups of 1
// to 16 heads, lengths about a tile's, a run's and the limits', sequences of different lengths,
// pages, and results in every format.
static void attention_step_cases(bool grouped) {
    static const int64_t lengths[] = {1, 7, 33, 128, 129, 255, 300, 512, 513, 1024, 1500, 2100, 16};
    const int32_t n_units = gpu->gpu->chip.n_units;
    for (int i = 0; i < 52; i++) {
        if (grouped) gpu->gpu->chip.n_units = i % 3 == 0 ? 64 : 4; // more runs than waves, or few
        const int64_t n_kv_heads = 1 + i % 3, group = i % 4 == 0 ? 1 : 1 + i * 5 % 16;
        const attend s = {.d = grouped && i % 3 == 2 ? 256 : i % 2 ? 128 : 64,
                          .n_heads = group * n_kv_heads,
                          .n_kv_heads = n_kv_heads, .n_q = 1, .n_kv = lengths[i % 13],
                          .n_seqs = 1 + i % 7 % 3, .k = ROCQ_F16, .v = ROCQ_F16,
                          .causal = i % 2 == 0, .kv_len = i % 4 > 1,
                          .out = i % 5 == 4 ? ROCQ_F16 : i % 5 == 3 ? ROCQ_Q8_0 : ROCQ_F32,
                          .page_size = i % 3 == 1 ? 1 + i % 16 : 0, .in_place = i % 5 == 2,
                          .step = true};
        check_attention(&s);
    }
    const attend many = {.d = 128, .n_heads = 1, .n_kv_heads = 1, .n_q = 1, .n_kv = 2900,
                         .n_seqs = 1, .k = ROCQ_F16, .v = ROCQ_F16, .step = true};
    gpu->gpu->chip.n_units = 64; // attention_group has 37 runs: a wave merges five, four at once
    check_attention(&many);
    gpu->gpu->chip.n_units = n_units;
}
static void test_attention_step(void **state) {
    (void)state;
    both_steps(attention_step_cases);
}

// A launch's blocks in another order, each in a launch of its own: all those of one residue first.
enum { SHUFFLE = 8 };
static const rocq_hip *in_order;
static int launch_shuffled(const void *stub, unsigned grid_x, unsigned grid_z, unsigned threads,
                           unsigned lds, void *args, void *stream) {
    rocq_k_common *const common = (rocq_k_common *)args;
    const uint32_t block0 = common->block0;
    int error = 0;
    for (unsigned of = 0; of < SHUFFLE; of++) {
        for (unsigned i = of; i < grid_x && !error; i += SHUFFLE) {
            common->block0 = block0 + i;
            error = in_order->launch(stub, 1, grid_z, threads, lds, args, stream);
        }
    }
    common->block0 = block0;
    return error;
}

// Sequences of one launch of which some have one run and others several that are merged: blocks of
// all of them run at once, or, on the stand-in, in turn.
static void attention_step_mixed_cases(bool grouped) {
    const int32_t n_units = gpu->gpu->chip.n_units;
    static rocq_hip shuffled; // the context keeps its address if a check fails
    in_order = gpu->gpu->hip;
    shuffled = *in_order;
    shuffled.launch = launch_shuffled;
    // With two units for each KV head, a head alone has up to four runs, and a group's one. Of
    // attention_group, with four units, any has four.
    static const struct { int64_t group, n_kv_heads, d, shorter; } sizes[] = {
        {1, 4, 128, 550}, {1, 8, 64, 700}, {3, 2, 64, 200}};
    for (int i = 0; i < 4; i++) {
        const int64_t n_kv_heads = sizes[i % 3].n_kv_heads;
        const attend s = {.d = sizes[i % 3].d, .n_heads = sizes[i % 3].group * n_kv_heads,
                          .n_kv_heads = n_kv_heads, .n_q = 1, .n_kv = 1200, .n_seqs = 3,
                          .k = ROCQ_F16, .v = ROCQ_F16, .causal = true, .kv_len = true,
                          .shorter = sizes[i % 3].shorter, .page_size = i == 1 ? 16 : 0,
                          .step = true};
        gpu->gpu->chip.n_units = (int32_t)((grouped ? 4 : 2) * n_kv_heads * s.n_seqs);
        gpu->gpu->hip = i < 3 ? &shuffled : in_order;
        check_attention(&s);
    }
    gpu->gpu->hip = in_order;
    gpu->gpu->chip.n_units = n_units;
}
static void test_attention_step_mixed(void **state) {
    (void)state;
    if (gpu->gpu->image) skip();
    both_steps(attention_step_mixed_cases);
}

// One head of 512 over all positions of a picture of 1024 x 1024 pixels, as in a VAE: so many tiles
// of queries fill any chip, and no scratch memory may go to splits of the positions.
static void test_attention_scratch(void **state) {
    (void)state;
    const int64_t n = 128 * 128;
    rocq_buffer memory;
    rocq_tensor q, k, v, out;
    rocq_arena arena;
    assert_int_equal(rocq_buffer_alloc(gpu, &memory, 4 * n * 512 * 2), ROCQ_OK);
    rocq_arena_init(&arena, &memory);
    rocq_tensor *const all[] = {&q, &k, &v, &out};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(rocq_tensor_3d(&arena, all[i], ROCQ_F16, 512, 1, n), ROCQ_OK);
    }
    const rocq_attention_params p = {.out = &out, .q = &q, .k = &k, .v = &v};
    assert_in_range(planned(gpu, ROCQ_OP_ATTENTION, &p), 0, 1 << 20);
    assert_int_equal(rocq_buffer_free(gpu, &memory), ROCQ_OK);
}

// -- attention_backward --

// The gradients of the GPU against those of the CPU, both from the CPU's out and lse. Terms may
// cancel, in rows or everywhere, so an error is measured against the whole tensor and against the
// power that an element would have if they did not; but no row may be far off.
static void check_gradient(box *got, const double *want, double natural, const char *name,
                           const char *what) {
    const double bound = 1e-5; // of F16
    const int64_t n = got->t.ne[0];
    double error = 0, power = natural * (double)got->count;
    box_read(got);
    box_check_outside(got);
    for (int64_t i = 0; i < got->count; i++) power += want[i] * want[i];
    for (int64_t r = 0; r < box_rows(got); r++) {
        double row = 0, row_power = power / (double)box_rows(got);
        for (int64_t i = r * n; i < (r + 1) * n; i++) {
            const double e = got->value[i] - want[i];
            row += e * e;
            row_power += want[i] * want[i];
        }
        if (!(row <= 100 * bound * row_power)) {
            fail_msg("%s of %s, row %lld: squared error %g over %g (first %g, expected %g)", name,
                     what, (long long)r, row, row_power, got->value[r * n], want[r * n]);
        }
        error += row;
    }
    if (!(error <= bound * power)) fail_msg("%s of %s: NMSE %g", name, what, error / power);
}

static void check_attention_backward(const attend *s, float scale) {
    static const char *const name[3] = {"dq", "dk", "dv"};
    box in[4], grad[3], out = box_make(s->layout, s->q, s->d, s->n_heads, s->n_q, s->n_seqs);
    box lse = box_make(s->layout, ROCQ_F32, s->n_heads, s->n_q, s->n_seqs, 1);
    double *want[3];
    for (int i = 0; i < 4; i++) { // q, k, v, dout
        const int64_t heads = i % 3 == 0 ? s->n_heads : s->n_kv_heads;
        const int64_t n = i % 3 == 0 ? s->n_q : s->n_kv;
        in[i] = box_random(s->layout, i < 3 ? s->q : s->k, 1, s->d, heads, n, s->n_seqs);
        if (i < 3) grad[i] = box_make(s->layout, s->out, s->d, heads, n, s->n_seqs);
    }
    any_params p, forward;
    memset(&p, 0, sizeof p);
    memset(&forward, 0, sizeof forward);
    forward.attention = (rocq_attention_params){
        .out = &out.t, .lse = &lse.t, .q = &in[0].t, .k = &in[1].t, .v = &in[2].t,
        .scale = scale, .softcap = s->softcap, .window = s->window, .causal = s->causal};
    p.attention_backward = (rocq_attention_backward_params){
        .dq = &grad[0].t, .dk = &grad[1].t, .dv = &grad[2].t, .dout = &in[3].t, .out = &out.t,
        .q = &in[0].t, .k = &in[1].t, .v = &in[2].t, .lse = &lse.t, .scale = scale,
        .softcap = s->softcap, .window = s->window, .causal = s->causal};
    const char *what =
        say("backward, D %d, %d heads on %d, n_q %d, n_kv %d, seqs %d, %s %s", (int)s->d,
            (int)s->n_heads, (int)s->n_kv_heads, (int)s->n_q, (int)s->n_kv, (int)s->n_seqs,
            name_of(s->q), name_of(s->out));
    if (rocq_attention(cpu, &forward.attention) != ROCQ_OK ||
        rocq_attention_backward(cpu, &p.attention_backward) != ROCQ_OK) {
        fail_msg("%s: CPU: %s", what, rocq_error(cpu));
    }
    for (int i = 0; i < 3; i++) {
        box_read(&grad[i]);
        want[i] = values_of(&grad[i]);
        memset(grad[i].memory, 0xff, (size_t)grad[i].size);
    }
    box_read(&lse);
    double *const lses = values_of(&lse);
    move_params(ROCQ_OP_ATTENTION_BACKWARD, &p);
    if (rocq_attention_backward(gpu, &p.attention_backward) != ROCQ_OK) {
        fail_msg("%s: GPU: %s", what, rocq_error(gpu));
    }
    for (int i = 0; i < 3; i++) copy_from_gpu(&twins[i]); // the first operands
    const double n_kv = (double)s->n_kv, group = (double)(s->n_heads / s->n_kv_heads);
    for (int i = 0; i < 3; i++) { // terms of size 1, with weights of 1 / n_kv
        const double natural = i == 0 ? 1 / n_kv : (double)s->n_q * group / (n_kv * n_kv);
        check_gradient(&grad[i], want[i], natural, name[i], what);
    }
    free_twins();

    memset(lse.memory, 0xff, (size_t)lse.size); // the forward's, with queries that see nothing
    move_params(ROCQ_OP_ATTENTION, &forward);
    if (rocq_attention(gpu, &forward.attention) != ROCQ_OK) fail_msg("%s", rocq_error(gpu));
    copy_from_gpu(&twins[1]);
    box_read(&lse);
    for (int64_t i = 0; i < lse.count; i++) {
        const double got = lse.value[i];
        if (got != lses[i] && !(fabs(got - lses[i]) <= 2e-3 * (1 + fabs(lses[i])))) {
            fail_msg("%s: lse %g, expected %g", what, got, lses[i]);
        }
    }
    free_twins();
    for (int i = 0; i < 4; i++) box_free(&in[i]);
    for (int i = 0; i < 3; i++) {
        box_free(&grad[i]);
        free(want[i]);
    }
    free(lses);
    boxes_free(&out, &lse);
}

static void test_attention_backward(void **state) {
    (void)state;
    static const int64_t dims[] = {1, 33, 64, 72, 80, 96, 112, 128};
    for (int i = 0; i < 8; i++) {
        const attend s = {.d = dims[i], .n_heads = 4, .n_kv_heads = i % 2 ? 2 : 4, .n_q = 70,
                          .n_kv = 77, .n_seqs = 1, .q = floats[i % 2], .k = floats[i / 2 % 2],
                          .out = floats[i / 4 % 2], .causal = true, .layout = (box_layout)(i % 3)};
        check_attention_backward(&s, 0);
    }
    for (int i = 0; i < 16; i++) {
        const attend s = {.d = i % 3 ? 64 : 128, .n_heads = i % 5 == 0 ? 7 : 6,
                          .n_kv_heads = i % 5 == 0 ? 1 : 2, .n_q = 1 + 13 * (i % 11),
                          .n_kv = 1 + 17 * (i % 7), .n_seqs = 1 + i % 3, .q = floats[i / 2 % 2],
                          .k = floats[i / 3 % 2], .out = floats[i % 2], .causal = i % 4 != 0,
                          .window = i % 4 == 1 ? 1 + 3 * i : 0,
                          .softcap = i % 3 == 2 ? 2.0f : 0.0f, .layout = (box_layout)(i % 3)};
        check_attention_backward(&s, i % 8 == 6 ? -0.2f : 0.0f);
    }
}

// What has no kernel: heads over 128, and F32.
static void test_attention_backward_unsupported(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        box b = box_random(BOX_PLAIN, ROCQ_F16, 1, i ? 64 : 136, 1, 8, 1), grad[3];
        box lse = box_random(BOX_PLAIN, ROCQ_F32, 1, 1, 8, 1, 1);
        for (int k = 0; k < 3; k++) grad[k] = box_make(BOX_PLAIN, ROCQ_F32, i ? 64 : 136, 1, 8, 1);
        any_params p;
        const char *why = NULL;
        memset(&p, 0, sizeof p);
        p.attention_backward = (rocq_attention_backward_params){
            .dq = &grad[0].t, .dk = &grad[1].t, .dv = &grad[2].t, .dout = &b.t, .out = &b.t,
            .q = &b.t, .k = &b.t, .v = &b.t, .lse = &lse.t};
        move_params(ROCQ_OP_ATTENTION_BACKWARD, &p);
        const rocq_precision was = gpu->desc.precision;
        if (i) gpu->desc.precision = ROCQ_PRECISION_F32;
        assert_int_equal(rocq_supports(gpu, ROCQ_OP_ATTENTION_BACKWARD, &p, &why),
                         ROCQ_E_UNSUPPORTED);
        assert_non_null(strstr(why, i ? "F32" : "136 is over 128"));
        gpu->desc.precision = was;
        free_twins();
        boxes_free(&b, &lse);
        for (int k = 0; k < 3; k++) box_free(&grad[k]);
    }
}

// -- rmsnorm, layernorm --

static void test_norms(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 31, 32, 64, 257, 1000, 1024, 4096, 9000};
    static const rocq_format y_formats[] = {ROCQ_F32, ROCQ_F16, ROCQ_Q8_0};
    for (int i = 0; i < 36; i++) {
        const int64_t n = sizes[i % 9];
        const bool center = i % 2 == 1;
        const rocq_format fy = n % 32 == 0 ? y_formats[i % 3] : floats[i % 2];
        box x = box_random((box_layout)(i % 3), floats[i / 3 % 2], 1, n, 3, 2, 1);
        box y = box_make((box_layout)(i / 2 % 3), fy, n, 3, 2, 1);
        box weight = box_random(BOX_PLAIN, ROCQ_F32, 1, n, 1, 1, 1);
        box bias = box_random(BOX_PLAIN, ROCQ_F32, 1, n, 1, 1, 1);
        box mean = box_make(BOX_PLAIN, ROCQ_F32, 3, 2, 1, 1),
            rstd = box_make(BOX_PLAIN, ROCQ_F32, 3, 2, 1, 1);
        if (i % 5 == 0) { // a mean that is large next to the spread
            for (int64_t k = 0; k < x.count; k++) x.value[k] += 100;
            box_write(&x);
        }
        rocq_norm_params p = {.y = &y.t, .x = &x.t, .weight = i % 4 ? &weight.t : NULL,
                              .rstd = &rstd.t};
        if (center) {
            p.bias = i % 3 ? &bias.t : NULL;
            p.mean = &mean.t;
        }
        box *out[] = {&y, &rstd, &mean};
        compare_as(center ? ROCQ_OP_LAYERNORM : ROCQ_OP_RMSNORM, &p, &p, out, center ? 3 : 2,
                   fy == ROCQ_Q8_0 ? 1e-4 : 0,
                   say("norm of %d, %s to %s", (int)n, name_of(x.t.format), name_of(fy)));
        boxes_free(&x, &y, &weight, &bias, &mean, &rstd);
    }
}

// The planar Q8_0 form of a norm or a product feeds a matmul: checked through that product.
static void test_planar_activations(void **state) {
    (void)state;
    box x = box_random(BOX_PLAIN, ROCQ_F32, 1, 256, 2, 1, 1),
        w = box_make(BOX_PLAIN, ROCQ_Q4_K, 256, 96, 1, 1);
    box h = box_make(BOX_PLAIN, ROCQ_Q8_0, 256, 2, 1, 1),
        y = box_make(BOX_PLAIN, ROCQ_F32, 96, 2, 1, 1);
    box g = box_make(BOX_PLAIN, ROCQ_Q8_0, 96, 2, 1, 1);
    random_weights(&w);
    const rocq_norm_params norm = {.y = &h.t, .x = &x.t};
    const rocq_matmul_params mm = {.y = &y.t, .w = &w.t, .x = &h.t};
    const rocq_matmul_params both = {.y = &g.t, .w = &w.t, .x = &h.t, .w2 = &w.t,
                                     .activation = ROCQ_ACT_SILU};
    const rocq_cast_params back = {.y = &y.t, .x = &g.t};
    rocq_matmul_params exact = mm, exact_both = both;
    exact.precision = exact_both.precision = ROCQ_PRECISION_F32;
    for (int glu = 0; glu < 2; glu++) {
        memset(y.memory, 0xff, (size_t)y.size);
        memset(h.memory, 0, (size_t)h.size);
        memset(g.memory, 0, (size_t)g.size);
        on_gpu_as(&h, true);
        on_gpu_as(&g, true);
        on_gpu_as(&w, true);
        any_params n = params_of(ROCQ_OP_RMSNORM, &norm), m = params_of(ROCQ_OP_MATMUL, &mm);
        any_params b = params_of(ROCQ_OP_MATMUL, &both), c = params_of(ROCQ_OP_CAST, &back);
        move_params(ROCQ_OP_RMSNORM, &n);
        move_params(ROCQ_OP_MATMUL, &m);
        move_params(ROCQ_OP_MATMUL, &b);
        move_params(ROCQ_OP_CAST, &c);
        assert_int_equal(rocq_rmsnorm(gpu, &n.rmsnorm), ROCQ_OK);
        if (glu) {
            assert_int_equal(rocq_matmul(gpu, &b.matmul), ROCQ_OK);
            assert_int_equal(rocq_cast(gpu, &c.cast), ROCQ_OK);
        } else {
            assert_int_equal(rocq_matmul(gpu, &m.matmul), ROCQ_OK);
        }
        if (rocq_sync(gpu) != ROCQ_OK) fail_msg("%s", rocq_error(gpu));
        for (int i = 0; i < n_twins; i++) {
            if (twins[i].b == &y) copy_from_gpu(&twins[i]);
        }
        box_read(&y);
        double *got = values_of(&y);
        assert_int_equal(rocq_rmsnorm(cpu, &norm), ROCQ_OK);
        assert_int_equal(rocq_matmul(cpu, glu ? &exact_both : &exact), ROCQ_OK);
        if (glu) assert_int_equal(rocq_cast(cpu, &back), ROCQ_OK);
        box_read(&y);
        const double e = nmse(ROCQ_F32, got, y.value, y.count);
        if (!(e <= 5e-4)) fail_msg("planar activations, glu %d: NMSE %g", glu, e);
        free(got);
        free_twins();
    }
    boxes_free(&x, &w, &h, &y, &g);
}

// -- rope, rope_append --

static rocq_rope_config random_rope(int i, const box *factors) {
    const rocq_rope_config rope = {.pairing = i % 11 == 10 ? ROCQ_ROPE_NONE
                                              : i % 2      ? ROCQ_ROPE_NEOX
                                                           : ROCQ_ROPE_NORM,
                                   .n_dims = i % 3 == 2 ? 32 : 0,
                                   .freq_base = i % 4 == 3 ? 500000.0f : 0.0f,
                                   .freq_scale = i % 5 == 2 ? 0.25f : 0.0f,
                                   .ext_factor = i % 5 == 2 ? 1.0f : 0.0f, .n_ctx_orig = 2048,
                                   .freq_factors = i % 6 == 1 ? &factors->t : NULL};
    return rope;
}

static void test_rope(void **state) {
    (void)state;
    for (int i = 0; i < 24; i++) {
        const int64_t d = i % 3 == 0 ? 64 : i % 3 == 1 ? 80 : 128, n = 1 + i % 4;
        box x = box_random((box_layout)(i % 3), floats[i / 2 % 2], 1, d, 3, n, 1);
        box y = box_make((box_layout)(i / 3 % 3), floats[i % 2], d, 3, n, 1);
        box pos = box_make(BOX_PLAIN, ROCQ_I32, n, 1, 1, 1);
        box factors = box_random(BOX_PLAIN, ROCQ_F32, 0.1f, (i % 3 == 2 ? 32 : d) / 2, 1, 1, 1);
        for (int64_t t = 0; t < n; t++) pos.value[t] = (double)(t * 1000 + 100000 * (i % 2));
        box_write(&pos);
        for (int64_t k = 0; k < factors.count; k++) factors.value[k] = 1 + fabs(factors.value[k]);
        box_write(&factors);
        const rocq_rope_params p = {.y = i % 7 == 6 ? &x.t : &y.t, .x = &x.t, .pos = &pos.t,
                                    .rope = random_rope(i, &factors)};
        compare(ROCQ_OP_ROPE, &p, i % 7 == 6 ? &x : &y, 0, say("rope %d", i));
        boxes_free(&x, &y, &pos, &factors);
    }
}

// Rows times H, stored by rope_append and turned by casts.
static void test_hadamard(void **state) {
    (void)state;
    const uint64_t saved = random_state;
    static const int64_t dims[] = {32, 64, 96, 128, 256, 320};
    for (int i = 0; i < 12; i++) {
        const int64_t d = dims[i % 6];
        const rocq_format format = i % 2 ? ROCQ_Q8_0 : ROCQ_Q4_0;
        box k = box_random(BOX_STRIDED, ROCQ_F32, 1, d, 3, 2, 1),
            v = box_random(BOX_PLAIN, ROCQ_F32, 1, d, 3, 2, 1);
        box cache[2] = {box_random((box_layout)(i % 3), format, 1, d, 3, 5, 1),
                        box_random((box_layout)(i / 3 % 3), format, 1, d, 3, 5, 1)};
        box pos = box_i32((int32_t[]){3, 1}, 2);
        box cast = box_random((box_layout)(i % 3), format, 1, d, 3, 2, 1),
            plain = box_make((box_layout)(i / 2 % 3), floats[i / 3 % 2], d, 3, 2, 1),
            blocks = box_make(BOX_PLAIN, i % 4 ? ROCQ_Q8_0 : ROCQ_Q4_0, d, 3, 2, 1);
        box *const out[] = {&cache[0], &cache[1]};
        for (int c = 0; c < 2; c++) box_hadamard(&cache[c]);
        box_hadamard(&cast);
        const rocq_rope_append_params append = {
            .k = &k.t, .v = &v.t, .k_cache = &cache[0].t, .v_cache = &cache[1].t, .pos = &pos.t,
            .rope = {.pairing = i % 2 ? ROCQ_ROPE_NEOX : ROCQ_ROPE_NORM}};
        const rocq_cast_params encode = {.y = &cast.t, .x = &k.t},
                               decode = {.y = &plain.t, .x = &cast.t},
                               recode = {.y = &blocks.t, .x = &cast.t};
        const double room = format == ROCQ_Q4_0 ? 2e-3 : 1e-5; // as in test_rope_append
        compare_as(ROCQ_OP_ROPE_APPEND, &append, &append, out, 2, room, say("hadamard %d", i));
        compare(ROCQ_OP_CAST, &encode, &cast, room, say("cast to H, %d", i));
        compare(ROCQ_OP_CAST, &decode, &plain, 1e-6, say("cast from H, %d", i));
        compare(ROCQ_OP_CAST, &recode, &blocks, i % 4 ? 1e-5 : 2e-3,
                say("cast from H to blocks, %d", i));
        box *const all[] = {&k, &v, &cache[0], &cache[1], &pos, &cast, &plain, &blocks};
        for (int b = 0; b < 8; b++) box_free(all[b]);
    }
    random_state = saved;
}

static void test_rope_append(void **state) {
    (void)state;
    static const rocq_format kv[] = {ROCQ_F32, ROCQ_F16, ROCQ_BF16, ROCQ_Q8_0, ROCQ_Q4_0};
    for (int i = 0; i < 25; i++) {
        const int64_t d = i % 2 ? 64 : 96, n = 1 + i % 3, cells = 9;
        box q = box_random(BOX_PLAIN, ROCQ_F32, 1, d, 4, n, 1),
            k = box_random(BOX_STRIDED, ROCQ_F32, 1, d, 2, n, 1);
        box v = box_random(BOX_PLAIN, ROCQ_F32, 1, d, 2, n, 1);
        box k_cache = box_make((box_layout)(i % 3), kv[i % 5], d, 2, cells, 1);
        box v_cache = box_make((box_layout)(i / 3 % 3), kv[i / 5], d, 2, cells, 1);
        box pos = box_make(BOX_PLAIN, ROCQ_I32, n, 1, 1, 1),
            cell = box_make(BOX_PLAIN, ROCQ_I32, n, 1, 1, 1);
        box factors = box_random(BOX_PLAIN, ROCQ_F32, 0.1f, (i % 3 == 2 ? 32 : d) / 2, 1, 1, 1);
        for (int64_t t = 0; t < n; t++) {
            pos.value[t] = (double)(t + i % 4);
            cell.value[t] = (double)(8 - 2 * t);
        }
        box_write(&pos);
        box_write(&cell);
        for (int64_t j = 0; j < factors.count; j++) factors.value[j] = 1 + fabs(factors.value[j]);
        box_write(&factors);
        const rocq_rope_append_params p = {
            .q = i % 4 ? &q.t : NULL, .k = &k.t, .v = &v.t, .k_cache = &k_cache.t,
            .v_cache = &v_cache.t, .pos = &pos.t, .cell = i % 3 ? &cell.t : NULL,
            .rope = random_rope(i, &factors)};
        box *out[] = {&k_cache, &v_cache, &q};
        // cells that were not written keep their NaN; compare what was
        const unsigned char fill = 0;
        memset(k_cache.memory, fill, (size_t)k_cache.size);
        memset(v_cache.memory, fill, (size_t)v_cache.size);
        for (int o = 0; o < 2; o++) { // guard bytes again
            unsigned char *inside = (unsigned char *)calloc((size_t)out[o]->size, 1);
            for (int64_t r = 0; r < box_rows(out[o]); r++) {
                memset(inside + (box_row(out[o], r) - out[o]->memory), 1,
                       (size_t)box_row_size(out[o]));
            }
            for (int64_t b = 0; b < out[o]->size; b++) {
                if (!inside[b]) out[o]->memory[b] = 0xff;
            }
            free(inside);
        }
        // a rounding tie of the turned K may fall to the other side: one code of 32
        compare_as(ROCQ_OP_ROPE_APPEND, &p, &p, out, i % 4 ? 3 : 2,
                   kv[i % 5] == ROCQ_Q4_0 ? 2e-3 : 1e-5, say("rope_append %d", i));
        boxes_free(&q, &k, &v, &k_cache, &v_cache, &pos, &cell, &factors);
    }
}

// -- activate, glu, add, mul, scale, cast --

static void test_maps(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 7, 32, 33, 128, 1000};
    for (int i = 0; i < 72; i++) {
        const int64_t n = sizes[i % 6];
        const box_layout lx = (box_layout)(i % 3), ly = (box_layout)(i / 3 % 3);
        box a = box_random(lx, floats[i % 2], 2, n, 3, 2, 2),
            b = box_random(ly, floats[i / 2 % 2], 2, n, 3, 2, 2);
        box y = box_make(ly, floats[i / 4 % 2], n, 3, 2, 2);
        box y8 = box_make(ly, ROCQ_Q8_0, (n + 31) / 32 * 32, 3, 2, 2);
        box row = box_random(BOX_PLAIN, ROCQ_F32, 1, i % 2 ? 1 : n, 1, i % 3 ? 2 : 1, 1);
        const rocq_activation act = (rocq_activation)(i % 6);
        const rocq_activate_params activate = {&y.t, &a.t, act};
        const rocq_glu_params glu = {&y.t, &a.t, &b.t, act}, glu8 = {&y8.t, &a.t, &b.t, act};
        const rocq_binary_params binary = {&y.t, &a.t, i % 2 ? &b.t : &row.t};
        const rocq_scale_params scale = {&y.t, &a.t, 0.37f, i % 2 ? 1.5f : 0.0f,
                                         i / 2 % 2 ? ROCQ_ACT_TANH : ROCQ_ACT_IDENTITY};
        switch (i / 12) {
        case 0: compare(ROCQ_OP_ACTIVATE, &activate, &y, 0, say("activate %d", i)); break;
        case 1: compare(ROCQ_OP_GLU, &glu, &y, 0, say("glu %d", i)); break;
        case 2:
            if (n % 32 == 0) compare(ROCQ_OP_GLU, &glu8, &y8, 1e-4, say("glu to Q8_0 %d", i));
            break;
        case 3: compare(ROCQ_OP_ADD, &binary, &y, 0, say("add %d", i)); break;
        case 4: compare(ROCQ_OP_MUL, &binary, &y, 0, say("mul %d", i)); break;
        default: compare(ROCQ_OP_SCALE, &scale, &y, 0, say("scale %d", i)); break;
        }
        boxes_free(&a, &b, &y, &y8, &row);
    }
}

// Every format to F32, F16 and BF16, raw (any strides) and planar; F32 bit for bit. The formats of
// KV caches back, in ggml's bytes; every format copied.
static void test_casts(void **state) {
    (void)state;
    static const rocq_format to[] = {ROCQ_F32, ROCQ_F16, ROCQ_BF16, ROCQ_Q8_0, ROCQ_Q4_0};
    for (int f = 0; f < N_FORMATS; f++) {
        const rocq_format format = all_formats[f];
        for (int i = 0; i < 9; i++) {
            const int64_t n = block_elems(format) > 1 ? 2 * block_elems(format) : 77;
            const bool planar = i >= 6;
            if (planar && block_elems(format) == 1) continue;
            box x = box_make(planar ? BOX_PLAIN : (box_layout)(i % 3), format, n, 5, 2, 1);
            box y = box_make((box_layout)((i + 1) % 3), i == 5 ? format : to[i % 3], n, 5, 2, 1);
            random_weights(&x);
            if (planar) on_gpu_as(&x, true);
            const rocq_cast_params p = {&y.t, &x.t};
            compare(ROCQ_OP_CAST, &p, &y, EXACT, say("cast %s%s to %s", name_of(format),
                                                 planar ? " planar" : "", name_of(y.t.format)));
            boxes_free(&x, &y);
        }
    }
    for (int i = 0; i < 20; i++) {
        box x = box_random((box_layout)(i % 3), to[i % 3], 1, 96, 7, 2, 1);
        box y = box_make((box_layout)(i / 3 % 3), to[3 + i % 2], 96, 7, 2, 1);
        const rocq_cast_params p = {&y.t, &x.t};
        compare(ROCQ_OP_CAST, &p, &y, EXACT,
                say("cast %s to %s", name_of(x.t.format), name_of(y.t.format)));
        boxes_free(&x, &y);
    }
    const int32_t ids[] = {5, -7, 0, 1 << 30};
    box a = box_i32(ids, 4), b = box_make(BOX_STRIDED, ROCQ_I32, 4, 1, 1, 1);
    const rocq_cast_params p = {&b.t, &a.t};
    compare(ROCQ_OP_CAST, &p, &b, EXACT, "cast I32");
    boxes_free(&a, &b);
}

// The formats that are only read, which share kernels: matvecs, also of two formats at once, tiles
// in each precision, decoding and gathering, raw and planar, and gradients.
static void test_read_formats(void **state) {
    (void)state;
    const uint64_t kept = random_state;
    random_state = 16;
    const int32_t n_units = gpu->gpu->chip.n_units;
    for (size_t f = 0; f < sizeof read_formats / sizeof read_formats[0]; f++) {
        const rocq_format w = read_formats[f];
        const product cases[] = {
            {.w = w, .m = 37, .n = 1, .k = 1280, .planar = true},
            {.w = w, .m = 5, .n = 7, .k = 256},
            {.w = w, .m = 13, .n = 1, .k = 512, .planar = true, .w2 = true,
             .precision = ROCQ_PRECISION_F32},
            {.w = w, .m = 9, .n = f % 2 ? 2 : 4, .k = 1280, .planar = true,
             .precision = f % 3 ? ROCQ_PRECISION_INT8 : ROCQ_PRECISION_F32},
            {.w = w, .m = 65, .n = 9, .k = 2 * block_elems(w), .planar = true,
             .precision = ROCQ_PRECISION_INT8},
            {.w = w, .m = 33, .n = 11, .k = 2 * block_elems(w), .planar = true,
             .precision = ROCQ_PRECISION_F32},
            {.w = w, .m = f % 2 ? 129 : 31, .n = f % 2 ? 17 : 250, .k = 256 + block_elems(w),
             .planar = true, .precision = ROCQ_PRECISION_F16},
            {.w = w, .m = 5, .n = 1, .k = ROCQ_K_MATVEC_ROW_K + 256, .planar = true}, // not a row
            {.w = w, .m = 33, .n = 1, .k = 512, .planar = true, .w2 = true,
             .precision = ROCQ_PRECISION_INT8}};
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            gpu->gpu->chip.n_units = i == 6 && f == 0 ? 1 : n_units; // 1: takes tiles of 128
                                                                     // columns
            check_product(&cases[i]);
        }
        gpu->gpu->chip.n_units = n_units;
        const int32_t ids[] = {4, 0, 6};
        for (int i = 0; i < 4; i++) { // every part of a block, raw, with gaps and planar
            const int64_t n = 2 * block_elems(w);
            box x = box_make(i == 1 ? BOX_STRIDED : BOX_PLAIN, w, n, 7, 1, 1);
            box rows = box_i32(ids, 3), some = box_make(BOX_PLAIN, ROCQ_F32, n, 3, 1, 1);
            box y = box_make(BOX_PLAIN, i == 3 ? ROCQ_F16 : ROCQ_F32, n, 7, 1, 1);
            random_weights(&x);
            if (i > 1) on_gpu_as(&x, true);
            const rocq_cast_params cast = {&y.t, &x.t};
            const rocq_gather_params gather = {.y = &some.t, .table = &x.t, .ids = &rows.t};
            compare(ROCQ_OP_CAST, &cast, &y, EXACT, say("cast %s %d", name_of(w), i));
            if (i > 1) on_gpu_as(&x, true);
            compare(ROCQ_OP_GATHER, &gather, &some, EXACT, say("gather %s %d", name_of(w), i));
            box *all[] = {&x, &rows, &y, &some};
            for (int k = 0; k < 4; k++) box_free(all[k]);
        }
    }
    random_state = kept;
}

// -- softmax, gather, argmax --

static void test_softmax(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 2, 31, 32, 257, 1000, 5000};
    for (int i = 0; i < 21; i++) {
        const int64_t n = sizes[i % 7];
        box x = box_random((box_layout)(i % 3), ROCQ_F32, 3, n, 3, 2, 1);
        box y = box_make((box_layout)(i / 3 % 3), ROCQ_F32, n, 3, 2, 1);
        box mask = box_random(BOX_PLAIN, floats[i % 2], 1, n, 3, i % 3 ? 1 : 2, 1);
        for (int64_t k = 0; k < mask.count; k++) {
            if (random_below(2) == 0 || k / n == 1) mask.value[k] = -INFINITY; // row 1 sees nothing
        }
        box_write(&mask);
        const rocq_softmax_params p = {.y = i % 5 == 4 ? &x.t : &y.t, .x = &x.t,
                                       .mask = i % 2 ? &mask.t : NULL,
                                       .scale = i % 3 ? 0.5f : 0.0f};
        compare(ROCQ_OP_SOFTMAX, &p, i % 5 == 4 ? &x : &y, 0, say("softmax %d", i));
        boxes_free(&x, &y, &mask);
    }
}

static void test_gather(void **state) {
    (void)state;
    const int32_t ids[] = {4, 0, 6, 6, 2};
    for (int f = 0; f < N_FORMATS; f++) {
        for (int i = 0; i < 3; i++) {
            const int64_t n =
                block_elems(all_formats[f]) > 1 ? 2 * block_elems(all_formats[f]) : 77;
            const bool planar = i == 2 && block_elems(all_formats[f]) > 1;
            box table =
                box_make(planar || i == 0 ? BOX_PLAIN : BOX_STRIDED, all_formats[f], n, 7, 1, 1);
            box y = box_make(BOX_STRIDED, floats[i % 2], n, 5, 1, 1), at = box_i32(ids, 5);
            random_weights(&table);
            if (planar) on_gpu_as(&table, true);
            const rocq_gather_params p = {&y.t, &table.t, &at.t, i == 1 ? 3.0f : 0.0f};
            compare(ROCQ_OP_GATHER, &p, &y, EXACT, say("gather %s %d", name_of(all_formats[f]), i));
            boxes_free(&table, &y, &at);
        }
    }
}

static void test_argmax(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 2, 33, 256, 1000, 70000};
    for (int i = 0; i < 12; i++) {
        const int64_t n = sizes[i % 6];
        box x = box_random(i % 2 ? BOX_STRIDED : BOX_PLAIN, ROCQ_F32, 1, n, 4, 1, 1);
        box index = box_make(BOX_PLAIN, ROCQ_I32, 4, 1, 1, 1);
        for (int64_t k = 0; k < n; k++) {
            x.value[n + k] = NAN; // nothing else there
            if (k % 3 == 0) x.value[2 * n + k] = NAN;
            x.value[3 * n + k] = (double)(k / 5 * 5 == n / 2 / 5 * 5); // equals: the first
        }
        box_write(&x);
        const rocq_argmax_params p = {&index.t, &x.t};
        compare(ROCQ_OP_ARGMAX, &p, &index, EXACT, say("argmax of %d", (int)n));
        boxes_free(&x, &index);
    }
}

// -- sample --

// Draws on both; whether the token is the same. Then its probability must be, too.
static bool draws_the_same(const rocq_sample_params *p, box *token, box *prob, int number) {
    assert_int_equal(rocq_sample(cpu, p), ROCQ_OK);
    const int32_t want = *(int32_t *)(void *)token->memory;
    const float want_prob = *(float *)(void *)prob->memory;
    memset(token->memory, 0xff, sizeof want); // not to take the CPU's results for the GPU's
    memset(prob->memory, 0xff, sizeof want_prob);
    any_params d = params_of(ROCQ_OP_SAMPLE, p);
    move_params(ROCQ_OP_SAMPLE, &d);
    if (rocq_sample(gpu, &d.sample) != ROCQ_OK) fail_msg("sample: %s", rocq_error(gpu));
    if (rocq_sync(gpu) != ROCQ_OK) fail_msg("sample: %s", rocq_error(gpu));
    for (int k = 0; k < n_twins; k++) copy_from_gpu(&twins[k]);
    const int32_t got = *(int32_t *)(void *)token->memory;
    const float got_prob = *(float *)(void *)prob->memory;
    assert_true(got >= 0 && got < p->logits->ne[0]);
    if (got == want && !(fabsf(got_prob - want_prob) <= 1e-4f * want_prob + 1e-9f)) {
        fail_msg("sample %d: probability %g, expected %g", number, (double)got_prob,
                 (double)want_prob);
    }
    free_twins();
    return got == want;
}

// The same token as the CPU's, but where rounding of the running sum may decide: then a token whose
// probability the CPU gives as its neighbour's is seen in at most a few draws of hundreds.
static void test_sample(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 5, 100, 1000, 33000};
    int n_draws = 0, n_other = 0;
    for (int i = 0; i < 300; i++) {
        const int64_t n = sizes[i % 5];
        box logits = box_random(BOX_PLAIN, ROCQ_F32, 3, n, 1, 1, 1);
        box token = box_make(BOX_PLAIN, ROCQ_I32, 1, 1, 1, 1),
            prob = box_make(BOX_PLAIN, ROCQ_F32, 1, 1, 1, 1);
        box allowed = box_make(BOX_PLAIN, ROCQ_I32, (n + 31) / 32, 1, 1, 1);
        int32_t recent[7];
        for (int k = 0; k < 7; k++) recent[k] = (int32_t)random_below(n);
        box last = box_i32(recent, 7);
        for (int64_t k = 0; k < allowed.count; k++) {
            ((int32_t *)(void *)allowed.memory)[k] = (int32_t)(random_u64() | 1);
        }
        if (i % 4 == 1) { // ties
            for (int64_t k = 0; k < n; k++) logits.value[k] = floor(logits.value[k]);
            box_write(&logits);
        }
        const rocq_sample_params p = {
            .token = &token.t, .prob = &prob.t, .logits = &logits.t,
            .recent = i % 3 == 0 ? &last.t : NULL, .allowed = i % 6 == 5 ? &allowed.t : NULL,
            .temperature = i % 8 == 0 ? 0.0f : 0.3f + 0.1f * (float)(i % 9),
            .top_k = i % 2 ? 1 + i % 50 : 0, .top_p = i % 3 == 1 ? 0.9f : 0.0f,
            .min_p = i % 5 == 1 ? 0.05f : 0.0f, .repeat_penalty = i % 3 == 0 ? 1.3f : 0.0f,
            .frequency_penalty = i % 9 == 0 ? 0.2f : 0.0f,
            .presence_penalty = i % 9 == 3 ? 0.4f : 0.0f, .seed = (uint64_t)i * 77,
            .step = (uint64_t)i};
        const bool same = draws_the_same(&p, &token, &prob, i);
        if (i % 8 == 0 || p.top_k == 1) assert_true(same);
        n_draws++;
        n_other += !same;
        boxes_free(&logits, &token, &prob, &allowed, &last);
    }
    if (n_other > n_draws / 100) fail_msg("%d of %d draws differ from the CPU's", n_other, n_draws);
}

// Too many candidates for a list, with logits among which a filter's place is hard to find.
static void test_sample_of_many(void **state) {
    (void)state;
    enum { PLAIN, TIES, EQUAL, FAR, NEGATIVE, KINDS, FILTERS = 7 };
    static const int64_t sizes[] = {33000, 151936, 300001}; // of 16, 18 and 19 bits
    static const struct { int32_t top_k; float top_p, min_p; } filters[FILTERS] = {
        {0, 0, 0}, {0, 0.9f, 0}, {0, 0.3f, 0}, {3000, 0, 0}, {3000, 0.9f, 0}, {0, 0.999f, 0.1f},
        {30000, 0.5f, 0}};
    int n_draws = 0, n_other = 0;
    for (int i = 0; i < 2 * KINDS * FILTERS; i++) {
        const int kind = i % KINDS, f = i / KINDS % FILTERS;
        const int64_t n = sizes[i / KINDS / FILTERS == 0 ? 0 : 1 + i % 2];
        box logits = box_random(BOX_PLAIN, ROCQ_F32, 3, n, 1, 1, 1);
        box token = box_make(BOX_PLAIN, ROCQ_I32, 1, 1, 1, 1),
            prob = box_make(BOX_PLAIN, ROCQ_F32, 1, 1, 1, 1);
        for (int64_t k = 0; k < n; k++) {
            double *x = &logits.value[k];
            if (kind == TIES) *x = floor(*x);
            if (kind == EQUAL) *x = 0.25;
            if (kind == FAR) *x = k == n / 3 ? 2 : *x * 1e-6; // 20 binary orders of magnitude
            if (kind == NEGATIVE) *x = -40 + *x;
        }
        box_write(&logits);
        const rocq_sample_params p = {.token = &token.t, .prob = &prob.t, .logits = &logits.t,
                                      .temperature = 0.7f, .top_k = filters[f].top_k,
                                      .top_p = filters[f].top_p, .min_p = filters[f].min_p,
                                      .seed = (uint64_t)i * 77, .step = (uint64_t)i};
        n_draws++;
        n_other += !draws_the_same(&p, &token, &prob, i);
        boxes_free(&logits, &token, &prob);
    }
    if (n_other > 1) fail_msg("%d of %d draws differ from the CPU's", n_other, n_draws);
}

// -- what the device finds out for itself --

// Indices in device memory that are out of range: nothing is written beyond, and rocq_sync reports.
static void test_bad_indices(void **state) {
    (void)state;
    const int32_t ids[] = {1, 1 << 30, -1};
    box table = box_random(BOX_PLAIN, ROCQ_F32, 1, 40, 7, 1, 1),
        y = box_make(BOX_STRIDED, ROCQ_F32, 40, 3, 1, 1);
    box at = box_i32(ids, 3);
    const rocq_gather_params p = {&y.t, &table.t, &at.t, 0};
    any_params d = params_of(ROCQ_OP_GATHER, &p);
    move_params(ROCQ_OP_GATHER, &d);
    assert_int_equal(rocq_gather(gpu, &d.gather), ROCQ_OK);
    assert_int_equal(rocq_sync(gpu), ROCQ_E_BOUNDS);
    assert_true(strlen(rocq_error(gpu)) > 10);
    assert_int_equal(rocq_sync(gpu), ROCQ_OK); // reported once
    for (int i = 0; i < n_twins; i++) copy_from_gpu(&twins[i]);
    box_check_outside(&y);
    free_twins();
    boxes_free(&table, &y, &at);

    box q = box_random(BOX_PLAIN, ROCQ_F32, 1, 64, 2, 2, 1),
        k = box_random(BOX_PLAIN, ROCQ_F32, 1, 64, 2, 2, 1);
    box cache = box_make(BOX_STRIDED, ROCQ_F16, 64, 2, 4, 1), cells = box_i32(ids + 1, 2);
    box other = box_make(BOX_STRIDED, ROCQ_F16, 64, 2, 4, 1), pos = box_i32(ids, 2);
    const rocq_rope_append_params append = {.q = &q.t, .k = &k.t, .v = &k.t, .k_cache = &cache.t,
                                            .v_cache = &other.t, .pos = &pos.t, .cell = &cells.t};
    d = params_of(ROCQ_OP_ROPE_APPEND, &append);
    move_params(ROCQ_OP_ROPE_APPEND, &d);
    assert_int_equal(rocq_rope_append(gpu, &d.rope_append), ROCQ_OK);
    assert_int_equal(rocq_sync(gpu), ROCQ_E_BOUNDS);
    for (int i = 0; i < n_twins; i++) copy_from_gpu(&twins[i]);
    for (int64_t i = 0; i < cache.size; i++) {
        assert_true(cache.memory[i] == 0xff && other.memory[i] == 0xff);
    }
    free_twins();
    boxes_free(&q, &k, &cache, &other, &cells, &pos);

    // Attention: a length of 0 counts as 1, and a page that the pool does not have as unseen.
    const int32_t bad_pages[] = {0, 1 << 30, -1, 1}, bad_lengths[] = {0, 65};
    for (int i = 0; i < 4; i++) {
        const int32_t pages[] = {bad_pages[i % 2 ? 1 : 0], bad_pages[i % 2 ? 2 : 3], 0, 1};
        box query = box_random(BOX_PLAIN, ROCQ_F32, 1, 64, 2, i < 2 ? 1 : 20, 1);
        box rows = box_random(BOX_PLAIN, ROCQ_F16, 1, 64, 1, 32, 1);
        box out = box_make(BOX_STRIDED, ROCQ_F32, 64, 2, i < 2 ? 1 : 20, 1);
        box page_table = box_i32(pages, 4), length = box_i32(&bad_lengths[i / 2], 1);
        const rocq_attention_params attend = {.out = &out.t, .q = &query.t, .k = &rows.t,
                                              .v = &rows.t,
                                              .kv_len = i % 2 ? NULL : &length.t,
                                              .page_table = &page_table.t, .page_size = 16};
        d = params_of(ROCQ_OP_ATTENTION, &attend);
        move_params(ROCQ_OP_ATTENTION, &d);
        if (rocq_attention(gpu, &d.attention) != ROCQ_OK) fail_msg("%s", rocq_error(gpu));
        assert_int_equal(rocq_sync(gpu), ROCQ_E_BOUNDS);
        for (int w = 0; w < n_twins; w++) copy_from_gpu(&twins[w]);
        box_check_outside(&out);
        free_twins();
        boxes_free(&query, &rows, &out, &page_table, &length);
    }

    box logits = box_random(BOX_PLAIN, ROCQ_F32, 1, 100, 1, 1, 1), recent = box_i32(ids, 3);
    box token = box_make(BOX_PLAIN, ROCQ_I32, 1, 1, 1, 1);
    const rocq_sample_params draw = {.token = &token.t, .logits = &logits.t, .recent = &recent.t,
                                     .repeat_penalty = 1.1f};
    d = params_of(ROCQ_OP_SAMPLE, &draw);
    move_params(ROCQ_OP_SAMPLE, &d);
    assert_int_equal(rocq_sample(gpu, &d.sample), ROCQ_OK);
    assert_int_equal(rocq_sync(gpu), ROCQ_E_BOUNDS);
    free_twins();
    boxes_free(&logits, &recent, &token);
}

// A tensor over the same memory as the twin of a box, of which t is a view.
static rocq_tensor on_twin(const rocq_tensor *t, const rocq_tensor *twin) {
    rocq_tensor moved = *t;
    moved.buffer = twin->buffer;
    return moved;
}

// q, k and v as columns of one tensor and caches whose rows take turns come out as on the CPU; what
// lies in its own output, or around its own indices, is refused before anything is launched.
static void test_overlap(void **state) {
    (void)state;
    enum { D = 64, HEADS = 2, KV = 1, N = 3, CELLS = 6, ALL = HEADS + 2 * KV };
    const int32_t cells[N] = {5, 0, 2}, turn[4] = {0, 1, 3, 2};
    box fused = box_random(BOX_PLAIN, ROCQ_F32, 1, D, ALL, N, 1);
    box caches = box_random(BOX_PLAIN, ROCQ_F32, 1, D, KV, 2, CELLS), at = box_i32(cells, N);
    box *const boxes[] = {&fused, &caches};
    const rocq_tensor *twin[] = {on_gpu(&fused), on_gpu(&caches)}, *pos = on_gpu(&at);
    const int64_t first[5] = {0, HEADS, HEADS + KV, 0, 1};
    rocq_tensor t[5], d[5];
    for (int i = 0; i < 5; i++) { // q, k, v, k_cache, v_cache
        const int64_t start[4] = {0, i < 3 ? first[i] : 0, i < 3 ? 0 : first[i], 0};
        const int64_t ne[4] = {D, i == 0 ? HEADS : KV, i < 3 ? N : 1, i < 3 ? 1 : CELLS};
        assert_int_equal(rocq_tensor_view(&t[i], &boxes[i > 2]->t, start, ne), ROCQ_OK);
        if (i > 2) assert_int_equal(rocq_tensor_permute(&t[i], &t[i], turn), ROCQ_OK);
        d[i] = on_twin(&t[i], twin[i > 2]);
    }
    const rocq_rope_append_params host = {.q = &t[0], .k = &t[1], .v = &t[2], .k_cache = &t[3],
                                          .v_cache = &t[4], .pos = &at.t};
    rocq_rope_append_params p = {.q = &d[0], .k = &d[1], .v = &d[2], .k_cache = &d[3],
                                 .v_cache = &d[4], .pos = pos};
    const rocq_tensor c_words = words_of(twin[1]->buffer, caches.size);
    const rocq_tensor q_words = words_of(twin[0]->buffer, fused.size);
    for (int i = 0; i < 8; i++) { // pos or cell, among q or the caches, in rows or gaps
        rocq_tensor in = i % 2 ? c_words : q_words;
        in.ne[0] = N;
        in.offset = D * 4 * (i % 4 < 2 ? HEADS : HEADS + 1);
        rocq_rope_append_params wrong = p;
        if (i < 4) wrong.pos = &in;
        else wrong.cell = &in;
        assert_int_equal(rocq_rope_append(gpu, &wrong), ROCQ_E_ARGUMENT);
    }
    rocq_rope_append_params bad = p;
    bad.v_cache = &d[3];
    assert_int_equal(rocq_rope_append(gpu, &bad), ROCQ_E_ARGUMENT);
    rocq_tensor ids = q_words, rows = d[0]; // the first of the two heads of q, as rows of a table
    ids.ne[0] = N;
    ids.offset = D * 4;
    rows.ne[1] = N;
    rows.ne[2] = 1;
    rows.stride[1] = rows.stride[2];
    rocq_tensor table = *twin[1];
    table.ne[1] = CELLS;
    table.ne[2] = table.ne[3] = 1;
    const rocq_gather_params gather = {.y = &rows, .table = &table, .ids = &ids};
    assert_int_equal(rocq_gather(gpu, &gather), ROCQ_E_ARGUMENT);
    rocq_tensor pages = q_words, pool = table;
    pages.ne[0] = 2;
    pages.offset = HEADS * D * 4; // in a gap of out
    pool.ne[1] = 1;
    pool.ne[2] = CELLS;
    pool.stride[2] = D;
    const rocq_attention_params attend = {.out = &d[0], .q = &d[0], .k = &pool, .v = &pool,
                                          .page_table = &pages, .page_size = 2};
    assert_int_equal(rocq_attention(gpu, &attend), ROCQ_E_ARGUMENT);
    rocq_tensor one = q_words;
    one.ne[0] = 1;
    const rocq_attention_params lengths = {.out = &d[0], .q = &d[0], .k = &pool, .v = &pool,
                                           .kv_len = &one};
    assert_int_equal(rocq_attention(gpu, &lengths), ROCQ_E_ARGUMENT);

    // Nothing of that has run: now the op that is right, against the same on the CPU.
    assert_int_equal(rocq_rope_append(cpu, &host), ROCQ_OK);
    if (rocq_rope_append(gpu, &p) != ROCQ_OK) fail_msg("%s", rocq_error(gpu));
    for (int i = 0; i < 2; i++) {
        box_read(boxes[i]);
        double *want = values_of(boxes[i]);
        copy_from_gpu(&twins[i]);
        box_read(boxes[i]);
        const double e = nmse(ROCQ_F32, boxes[i]->value, want, boxes[i]->count);
        if (!(e <= 1e-10)) fail_msg("%s: NMSE %g", i ? "caches" : "columns", e);
        free(want);
    }
    free_twins();
    boxes_free(&fused, &caches, &at);
}

// -- conv, norm_stats, resize, pixels --

enum { NORM_NONE, NORM_GROUPS, NORM_WEIGHTED, NORM_POSITIONS };

typedef struct picture { // a case; 0 = default
    rocq_format x, w, y;
    int64_t c, m, w_x, h_x; // channels of x and y, size of x
    int64_t t_x, t_y;       // frames
    int64_t w_y, h_y;       // 0 = as large as z, over the stride
    int32_t kw, kh, kt, stride, upsample, pad_x, pad_y, norm, groups;
    rocq_activation x_activation, activation;
    rocq_format residual;
    bool bias, has_residual, in_place, planar, folded;
    float x_scale;
    box_layout layout;      // of x, y and residual
} picture;

static void check_conv(const picture *s) {
    const int64_t t_x = or_1(s->t_x), t_y = or_1(s->t_y), up = or_1(s->upsample);
    const int64_t stride = or_1(s->stride);
    const int64_t w_y = s->w_y ? s->w_y : (s->w_x * up + stride - 1) / stride;
    const int64_t h_y = s->h_y ? s->h_y : (s->h_x * up + stride - 1) / stride;
    const int64_t taps = (s->folded ? 4 : or_1(s->kw) * or_1(s->kh)) * or_1(s->kt);
    const bool by_position = s->norm == NORM_POSITIONS;
    box w = box_make(BOX_PLAIN, s->w, s->c * taps, s->m, s->folded ? 4 : 1, 1);
    box x = box_random(s->layout, s->x, 2, s->c, s->w_x, s->h_x, t_x);
    box y = s->in_place ? box_random(s->layout, s->y, 1, s->m, w_y, h_y, t_y)
                        : box_make(s->layout, s->y, s->m, w_y, h_y, t_y);
    box bias = box_random(BOX_PLAIN, ROCQ_F32, 1, s->m, 1, 1, 1);
    box residual = box_random(s->layout, s->residual, 1, s->m, w_y, h_y, t_y);
    box stats = by_position ? box_random(BOX_STRIDED, ROCQ_F32, 1, 1, s->w_x, s->h_x, t_x)
                            : box_random(BOX_STRIDED, ROCQ_F32, 1, 2, or_1(s->groups), t_x, 1);
    box weight = box_random(BOX_PLAIN, ROCQ_F32, 1, s->c, 1, 1, 1);
    box shift = box_random(BOX_PLAIN, ROCQ_F32, 1, s->c, 1, 1, 1);
    const bool weighted = s->norm >= NORM_WEIGHTED;
    random_weights(&w);
    // Sums of about 1: larger ones saturate tanh and sigmoid, and then what the few small ones are
    // off by is judged, while the contract's bound is of all sums.
    const bool plain = s->w == ROCQ_F32 || s->w == ROCQ_F16 || s->w == ROCQ_BF16;
    for (int64_t i = 0; plain && i < w.count; i++) w.value[i] /= sqrt((double)w.t.ne[0]);
    if (plain) box_write(&w);
    rocq_conv_params p = {.y = &y.t, .w = &w.t, .x = &x.t, .bias = s->bias ? &bias.t : NULL,
                          .residual = s->in_place ? &y.t : s->has_residual ? &residual.t : NULL,
                          .stats = s->norm ? &stats.t : NULL,
                          .norm_weight = weighted ? &weight.t : NULL,
                          .norm_bias = weighted ? &shift.t : NULL,
                          .kw = s->kw, .kh = s->kh, .kt = s->kt, .stride = s->stride,
                          .upsample = s->upsample, .folded = s->folded, .pad_x = s->pad_x,
                          .pad_y = s->pad_y, .x_activation = s->x_activation,
                          .activation = s->activation, .x_scale = s->x_scale};
    on_gpu_as(&w, s->planar);
    // x is normalised and activated by the blocks that load it, and then, where a block could do
    // so, by a pass of its own, which a chip with so much bandwidth prefers.
    // A sum near the middle of two BF16 values may be rounded to either: a step is 1/256 at most.
    const double bytes_per_us = gpu->gpu->chip.bytes_per_us;
    for (int pass = 0; pass < (s->norm || s->x_activation ? 2 : 1); pass++) {
        if (pass) gpu->gpu->chip.bytes_per_us = 1e12;
        compare(ROCQ_OP_CONV, &p, &y, s->y == ROCQ_BF16 ? 0x1p-16 : 0,
                say("%s %dx%dx%d, %s %d x %dx%dx%d to %s %d x %dx%dx%d, stride %d, norm %d, "
                    "activations %d %d%s%s", name_of(s->w), (int)s->kw, (int)s->kh, (int)s->kt,
                    name_of(s->x), (int)s->c, (int)s->w_x, (int)s->h_x, (int)t_x, name_of(s->y),
                    (int)s->m, (int)w_y, (int)h_y, (int)t_y, (int)s->stride, (int)s->norm,
                    (int)s->x_activation, (int)s->activation, pass ? ", by a pass" : "",
                    s->folded ? ", folded" : ""));
    }
    gpu->gpu->chip.bytes_per_us = bytes_per_us;
    box *all[] = {&w, &x, &y, &bias, &residual, &stats, &weight, &shift};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) box_free(all[i]);
}

// Kernels and shapes: with a patch of all taps and without, tiles of 128, 64 and 16 channels,
// whole and ragged; channels by eight and by one; all at once, and split as for a large chip.
static void test_conv_shapes(void **state) {
    (void)state;
    static const picture cases[] = {
        {.c = 8, .m = 8, .w_x = 16, .h_x = 8},
        {.c = 64, .m = 128, .w_x = 16, .h_x = 8, .kw = 3, .kh = 3},
        {.c = 72, .m = 136, .w_x = 19, .h_x = 11, .kw = 3, .kh = 3, .bias = true},
        {.c = 136, .m = 72, .w_x = 5, .h_x = 3, .kw = 3, .kh = 3, .has_residual = true},
        {.c = 40, .m = 3, .w_x = 33, .h_x = 9, .kw = 3, .kh = 3, .bias = true},
        {.c = 4, .m = 65, .w_x = 17, .h_x = 9, .kw = 3, .kh = 3, .bias = true},
        {.c = 3, .m = 5, .w_x = 18, .h_x = 10, .kw = 3, .kh = 3, .has_residual = true},
        {.c = 66, .m = 18, .w_x = 1, .h_x = 17, .kw = 1, .kh = 3},
        {.c = 16, .m = 24, .w_x = 17, .h_x = 1, .kw = 3, .kh = 1},
        {.c = 24, .m = 40, .w_x = 20, .h_x = 12, .kw = 5, .kh = 7},
        {.c = 12, .m = 17, .w_x = 9, .h_x = 9, .kw = 7, .kh = 7},
        {.c = 32, .m = 96, .w_x = 21, .h_x = 13, .kw = 3, .kh = 3, .stride = 2, .pad_x = -1,
         .pad_y = -1, .w_y = 10, .h_y = 6},
        {.c = 40, .m = 16, .w_x = 20, .h_x = 14, .kw = 3, .kh = 3, .stride = 2},
        {.c = 40, .m = 16, .w_x = 20, .h_x = 14, .kw = 3, .kh = 3, .pad_x = 2, .pad_y = -1},
        {.c = 72, .m = 64, .w_x = 9, .h_x = 5, .kw = 3, .kh = 3, .upsample = 2},
        {.c = 72, .m = 64, .w_x = 9, .h_x = 5, .kw = 3, .kh = 3, .upsample = 2, .folded = true},
        {.c = 40, .m = 136, .w_x = 10, .h_x = 9, .t_x = 3, .t_y = 2, .kw = 3, .kh = 3, .kt = 3,
         .upsample = 2, .folded = true, .pad_x = 2, .pad_y = -1, .w_y = 19, .h_y = 15,
         .bias = true, .has_residual = true},
        {.c = 12, .m = 7, .w_x = 1, .h_x = 18, .kw = 3, .kh = 3, .upsample = 2, .folded = true,
         .pad_x = -1, .pad_y = 2, .w_y = 1, .h_y = 33},
        {.c = 10, .m = 9, .w_x = 9, .h_x = 5, .kw = 1, .kh = 1, .stride = 2, .upsample = 2},
        {.c = 16, .m = 32, .w_x = 10, .h_x = 9, .t_x = 3, .t_y = 3, .kw = 3, .kh = 3, .kt = 3},
        {.c = 80, .m = 16, .w_x = 6, .h_x = 9, .t_x = 4, .t_y = 2, .kw = 3, .kh = 3, .kt = 3},
        {.c = 96, .m = 130, .w_x = 5, .h_x = 4, .t_x = 3, .t_y = 2, .kw = 1, .kh = 1, .kt = 3},
    };
    const int32_t n_units = gpu->gpu->chip.n_units;
    for (int round = 0; round < 2; round++) {
        gpu->gpu->chip.n_units = round ? n_units : 1;
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            picture s = cases[i];
            s.w = s.x = round ? ROCQ_F16 : ROCQ_F32;
            s.y = round ? ROCQ_F32 : ROCQ_F16;
            s.residual = round ? ROCQ_F16 : ROCQ_BF16;
            check_conv(&s);
        }
    }
    gpu->gpu->chip.n_units = n_units;
}

static void test_conv_options(void **state) {
    (void)state;
    const picture base = {.x = ROCQ_F16, .w = ROCQ_F16, .y = ROCQ_F16, .c = 64, .m = 72, .w_x = 18,
                          .h_x = 9, .kw = 3, .kh = 3, .groups = 16};
    static const rocq_format kinds[] = {ROCQ_F32, ROCQ_F16, ROCQ_BF16};
    for (int norm = NORM_NONE; norm <= NORM_POSITIONS; norm++) {
        for (int act = 0; act <= (int)ROCQ_ACT_TANH; act++) {
            picture s = base;
            s.x = kinds[(norm + act) % 3];
            s.y = kinds[(norm + 2 * act) % 3];
            s.residual = kinds[act % 3];
            s.norm = norm;
            s.groups = act % 2 ? 16 : 32;
            s.x_activation = (rocq_activation)act;
            s.activation = (rocq_activation)((act + norm) % ((int)ROCQ_ACT_TANH + 1));
            s.bias = act % 2 == 0;
            s.has_residual = act % 3 != 0;
            s.t_x = s.t_y = act == 1 ? 2 : 1;
            s.kt = act == 1 ? 2 : 1;
            check_conv(&s);
            s.layout = act % 2 ? BOX_STRIDED : BOX_PERMUTED;
            s.c = s.groups == 16 ? 48 : 32;
            s.m = 13;
            check_conv(&s);
        }
    }
    const uint64_t state_before = random_state;
    picture s = base;
    s.x_activation = s.activation = ROCQ_ACT_SIGMOID;
    check_conv(&s);
    random_state = state_before;
    s = base;
    s.in_place = s.bias = true;
    check_conv(&s);
    s.x_scale = 0.125f;
    s.activation = ROCQ_ACT_RELU;
    check_conv(&s);
    for (int f = 0; f < N_FORMATS; f++) { // decoded to F16 first
        picture d = base;
        d.w = all_formats[f];
        d.c = block_elems(d.w) > 1 ? block_elems(d.w) : 20;
        d.m = 20;
        d.kw = d.kh = f % 3 ? 1 : 3;
        d.planar = block_elems(d.w) > 1 && f % 2 == 0;
        check_conv(&d);
    }
}

static void test_lend(void **state) {
    (void)state;
    check_lend(gpu);
}

// Where y is small for the chip, K is split over blocks, whose sums are scratch memory, at most as
// much as is allowed; with too little there are none, no second launch, and the same result up to
// the order of the sums.
static void test_conv_most_scratch(void **state) {
    const uint64_t state_before = random_state; // for the tests behind this one
    const int32_t n_units = gpu->gpu->chip.n_units;
    (void)state;
    gpu->gpu->chip.n_units = 100;
    for (int i = 0; i < 6; i++) { // odd sizes; i & 1: in half the channels; two frames; no taps
        const int64_t c = i & 1 ? 264 : 515, m = i < 3 ? 72 : 13, t = i == 4 ? 2 : 1;
        const int32_t taps = i == 5 ? 1 : 3;
        box w = box_make(BOX_PLAIN, ROCQ_F16, c * taps * taps, m, 1, 1);
        box x = box_random(BOX_PLAIN, i & 1 ? ROCQ_F16 : ROCQ_F32, 1, c, 9, 7, t);
        box y = box_make(BOX_PLAIN, ROCQ_F32, m, 9, 7, t);
        box bias = box_random(BOX_PLAIN, ROCQ_F32, 1, m, 1, 1, 1);
        random_weights(&w);
        rocq_conv_params p = {.y = &y.t, .w = &w.t, .x = &x.t, .bias = &bias.t, .kw = taps,
                              .kh = taps};
        const int64_t sums = 4 * rocq_tensor_count(&y.t); // of one split, in F32
        int64_t merges[3], scratch[3] = {0, 0, 0};
        for (int k = 0; k < 3; k++) { // any number; two; nothing for two
            p.most_scratch = k == 0 ? 0 : k == 1 ? 2 * sums + 255 : 2 * sums - 1;
            any_params on_device = params_of(ROCQ_OP_CONV, &p);
            move_params(ROCQ_OP_CONV, &on_device);
            assert_int_equal(rocq_plan_begin(gpu, &scratch[k]), ROCQ_OK);
            assert_int_equal(rocq_conv(gpu, &on_device.conv), ROCQ_OK);
            rocq_plan_end(gpu);
            free_twins();
            merges[k] = -gpu->gpu->launches[ROCQ_K_conv_merge];
            compare(ROCQ_OP_CONV, &p, &y, 0, say("conv, case %d, scratch %d", i, k));
            merges[k] += gpu->gpu->launches[ROCQ_K_conv_merge];
        }
        assert_true(merges[0] > 0 && merges[1] > 0 && merges[2] == 0);
        // Nothing else takes any here.
        assert_true(scratch[0] > 2 * sums + 255 && scratch[2] == 0);
        assert_true(scratch[1] >= 2 * sums && scratch[1] <= 2 * sums + 255);
        box *all[] = {&w, &x, &y, &bias};
        for (size_t j = 0; j < sizeof all / sizeof all[0]; j++) box_free(all[j]);
    }
    gpu->gpu->chip.n_units = n_units;
    random_state = state_before;
}

// Weights are copied before the launch ahead has ended where that is known not to write them:
// behind a conv_lds kernel with another y, and behind no other launch.
static void check_conv_ahead(void) {
    enum { C = 16, N = 8, K = 9 * C };
    rocq_buffer memory;
    rocq_tensor x, y, z, w[2], spread;
    const int64_t ne[4] = {C, N, N, 1}, w_ne[2] = {K, C}, y_ne[4] = {C, N, 18, 1};
    assert_int_equal(rocq_buffer_alloc(gpu, &memory, 1 << 16), ROCQ_OK);
    assert_int_equal(rocq_tensor_init(&x, &memory, 0, ROCQ_F16, 4, ne), ROCQ_OK);
    assert_int_equal(rocq_tensor_init(&y, &memory, 4096, ROCQ_F16, 4, ne), ROCQ_OK);
    assert_int_equal(rocq_tensor_init(&z, &memory, 8192, ROCQ_F16, 4, ne), ROCQ_OK);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(rocq_tensor_init(&w[i], &memory, 16384 + i * 8192, ROCQ_F16, 2, w_ne),
                         ROCQ_OK);
    }
    assert_int_equal(rocq_tensor_init(&spread, &memory, 16384, ROCQ_F16, 4, y_ne), ROCQ_OK); // w[0]
    uint8_t zeros[1 << 13] = {0};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(rocq_upload(gpu, &w[i], zeros, rocq_tensor_size(&w[i])), ROCQ_OK);
    }
    assert_int_equal(rocq_upload(gpu, &x, zeros, rocq_tensor_size(&x)), ROCQ_OK);
    rocq_tensor tall = x; // 18 rows, of which x is the first 8 and y and z the others
    tall.ne[2] = 18;
    assert_int_equal(rocq_upload(gpu, &tall, zeros, rocq_tensor_size(&tall)), ROCQ_OK);
    const rocq_conv_params to_y = {.y = &y, .w = &w[0], .x = &x, .kw = 3, .kh = 3};
    const rocq_conv_params to_z = {.y = &z, .w = &w[1], .x = &y, .kw = 3, .kh = 3};
    const rocq_conv_params to_w = {.y = &spread, .w = &w[1], .x = &tall, .kw = 3, .kh = 3};
    const rocq_scale_params scale = {.y = &w[0], .x = &w[0], .scale = 2};
    const struct {
        const rocq_conv_params *conv; // or scale
        bool ahead;
    } steps[] = {{NULL, false}, {&to_y, false}, {&to_z, true}, {&to_y, true}, {NULL, false},
                 {&to_y, false}, {&to_w, true}, {&to_y, false}, {&to_w, true}, {&to_z, true}};
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        int64_t scratch;
        if (!steps[i].conv) {
            assert_int_equal(rocq_scale(gpu, &scale), ROCQ_OK);
            continue;
        }
        if (rocq_conv(gpu, steps[i].conv) != ROCQ_OK) fail_msg("%s", rocq_error(gpu));
        assert_int_equal(gpu->gpu->conv_ahead, steps[i].ahead);
        assert_int_equal(rocq_plan_begin(gpu, &scratch), ROCQ_OK); // plans launch nothing
        assert_int_equal(rocq_conv(gpu, &to_w), ROCQ_OK);
        rocq_plan_end(gpu);
    }
    // A graph that is recorded launches nothing: the launch ahead is the one that writes w[0].
    rocq_graph *graph;
    assert_int_equal(rocq_scale(gpu, &scale), ROCQ_OK);
    assert_int_equal(rocq_graph_begin(gpu), ROCQ_OK);
    assert_int_equal(rocq_conv(gpu, &to_z), ROCQ_OK);
    assert_int_equal(rocq_graph_end(gpu, &graph), ROCQ_OK);
    assert_int_equal(rocq_conv(gpu, &to_y), ROCQ_OK);
    assert_false(gpu->gpu->conv_ahead);
    rocq_graph_destroy(gpu, &graph);
    assert_int_equal(rocq_sync(gpu), ROCQ_OK);
    rocq_buffer_free(gpu, &memory);
}

// Blocks of the kernels named conv_lds go from tile to tile, so the time cap cuts the tiles: here
// into launches of four, one for each unit, or folded of one for each phase.
static void check_conv_cap(void) {
    static const struct {
        int64_t m, launches;
        int kernel;
        bool folded;
    } cases[] = {{128, 2, ROCQ_K_conv_lds_128, false}, {64, 4, ROCQ_K_conv_lds_64, false},
                 {64, 16, ROCQ_K_conv_lds_64, true}, {16, 4, ROCQ_K_conv_lds_16, false}};
    const rocq__chip before = gpu->gpu->chip;
    gpu->gpu->chip.n_units = 4;
    gpu->gpu->chip.matrix_per_us /= 1000; // so a tile takes longer than the cap
    for (int i = 0; i < 4; i++) {
        const int32_t up = cases[i].folded ? 2 : 1;
        const picture s = {.x = ROCQ_F16, .w = ROCQ_F16, .y = ROCQ_F16, .c = 64, .m = cases[i].m,
                           .w_x = 9, .h_x = 120, .kw = 3, .kh = 3, .upsample = up,
                           .folded = cases[i].folded};
        int64_t launches[2];
        for (int capped = 0; capped < 2; capped++) {
            gpu->desc.dispatch_us = capped;
            launches[capped] = -gpu->gpu->launches[cases[i].kernel];
            check_conv(&s);
            launches[capped] += gpu->gpu->launches[cases[i].kernel];
        }
        assert_true(launches[0] > 0);
        assert_int_equal(launches[1], cases[i].launches * launches[0]);
    }
    gpu->gpu->chip = before;
}

// A norm before a conv of 128 channels is computed beforehand only where memory for it is allowed,
// and not where K would be split: eight tiles fill two units, but not ten.
static void check_conv_beforehand(void) {
    rocq__chip *chip = &gpu->gpu->chip;
    const rocq__chip before = *chip;
    box w = box_make(BOX_PLAIN, ROCQ_F16, 9 * 512, 128, 1, 1);
    box x = box_random(BOX_PLAIN, ROCQ_F16, 1, 512, 16, 64, 1);
    box y = box_make(BOX_PLAIN, ROCQ_F16, 128, 16, 64, 1);
    box stats = box_random(BOX_PLAIN, ROCQ_F32, 1, 2, 32, 1, 1);
    random_weights(&w);
    chip->bytes_per_us = 3.35e6, chip->flops_per_us = 67e6; // as an H100 has them
    for (int i = 0; i < 4; i++) {
        const int64_t copy = 2 * rocq_tensor_count(&x.t) + 255;
        const rocq_conv_params p = {.y = &y.t, .w = &w.t, .x = &x.t, .stats = &stats.t, .kw = 3,
                                    .kh = 3, .x_activation = ROCQ_ACT_SILU,
                                    .most_scratch = i == 0 ? 0 : i == 1 ? copy - 1 : copy};
        chip->n_units = i == 3 ? 10 : 2;
        const int64_t made = gpu->gpu->launches[ROCQ_K_conv_input];
        const int64_t straight = gpu->gpu->launches[ROCQ_K_conv_lds_128];
        compare(ROCQ_OP_CONV, &p, &y, 0, say("conv with norm, scratch %d", i));
        assert_int_equal(gpu->gpu->launches[ROCQ_K_conv_input] - made, i == 2);
        assert_int_equal(gpu->gpu->launches[ROCQ_K_conv_lds_128] - straight, i == 2);
    }
    *chip = before;
    boxes_free(&w, &x, &y);
    box_free(&stats);
}

// The kernels named conv_lds: whole and ragged tiles, several a block, frames, splits, channels by
// eight and one by one, and shapes that they leave to the others. The stand-in has them, although
// its chip does not take them.
static void test_conv_lds(void **state) {
    static const picture cases[] = {
        {.c = 64, .m = 64, .w_x = 40, .h_x = 33, .kw = 3, .kh = 3, .bias = true,
         .has_residual = true, .activation = ROCQ_ACT_RELU},
        {.c = 24, .m = 3, .w_x = 17, .h_x = 19, .kw = 3, .kh = 3, .bias = true},
        {.c = 8, .m = 40, .w_x = 9, .h_x = 7, .kw = 3, .kh = 3, .upsample = 2, .t_x = 2, .t_y = 2},
        {.c = 56, .m = 64, .w_x = 16, .h_x = 16, .activation = ROCQ_ACT_GELU},
        {.c = 48, .m = 16, .w_x = 11, .h_x = 35, .kw = 1, .kh = 3, .in_place = true},
        {.c = 64, .m = 128, .w_x = 9, .h_x = 33, .kw = 3, .kh = 3, .bias = true,
         .has_residual = true, .activation = ROCQ_ACT_SILU},
        {.c = 136, .m = 72, .w_x = 8, .h_x = 31, .kw = 3, .kh = 3, .has_residual = true},
        {.c = 200, .m = 200, .w_x = 5, .h_x = 16, .kw = 3, .kh = 3, .upsample = 2, .bias = true},
        {.c = 136, .m = 136, .w_x = 9, .h_x = 33, .kw = 3, .kh = 3, .upsample = 2, .folded = true,
         .bias = true, .has_residual = true, .activation = ROCQ_ACT_SILU},
        {.c = 72, .m = 72, .w_x = 7, .h_x = 31, .t_x = 3, .t_y = 2, .kw = 3, .kh = 3, .kt = 3,
         .upsample = 2, .folded = true, .pad_x = 2, .pad_y = -1, .w_y = 13},
        {.c = 72, .m = 130, .w_x = 7, .h_x = 27, .kw = 3, .kh = 3, .pad_x = 2,
         .activation = ROCQ_ACT_SIGMOID},
        {.c = 88, .m = 80, .w_x = 6, .h_x = 30, .t_x = 3, .t_y = 3, .kw = 3, .kh = 3, .kt = 3},
        {.c = 128, .m = 96, .w_x = 6, .h_x = 32, .t_x = 4, .t_y = 2, .kw = 3, .kh = 3, .kt = 3,
         .has_residual = true},
    };
    // y and residual in F16, which conv_lds_64 stores by vectors: tiles within the picture, at its
    // edges and of both; several pictures; y apart from whole rows of channels.
    static const picture halves[] = {
        {.c = 64, .m = 64, .w_x = 40, .h_x = 49, .bias = true, .has_residual = true,
         .activation = ROCQ_ACT_RELU},
        {.c = 40, .m = 48, .w_x = 13, .h_x = 25, .upsample = 2, .t_x = 2, .t_y = 2,
         .activation = ROCQ_ACT_RELU},
        {.c = 64, .m = 64, .w_x = 17, .h_x = 34, .upsample = 2, .folded = true, .bias = true,
         .t_x = 2, .t_y = 2, .has_residual = true, .activation = ROCQ_ACT_RELU},
        {.c = 24, .m = 40, .w_x = 18, .h_x = 20, .upsample = 2, .folded = true, .pad_x = -1,
         .pad_y = 2, .w_y = 33, .h_y = 37},
        {.c = 32, .m = 8, .w_x = 24, .h_x = 16, .bias = true, .in_place = true},
        {.c = 40, .m = 16, .w_x = 21, .h_x = 35, .has_residual = true, .activation = ROCQ_ACT_GELU},
        {.c = 16, .m = 64, .w_x = 30, .h_x = 50, .t_x = 3, .t_y = 3, .has_residual = true,
         .x_scale = 0.125f},
        {.c = 64, .m = 56, .w_x = 25, .h_x = 33, .pad_x = 2, .pad_y = -1, .w_y = 21, .h_y = 20},
    };
    static const rocq_format kinds[] = {ROCQ_F16, ROCQ_F32, ROCQ_BF16};
    const uint64_t state_before = random_state; // for the tests behind this one
    const int32_t n_units = gpu->gpu->chip.n_units;
    const bool first = gpu->gpu->chip.lds_tiles;
    rocq_info info;
    rocq_get_info(gpu, &info);
    if (!first && !strstr(info.device, "simt")) return;
    gpu->gpu->chip.lds_tiles = !first;
    if (first) {
        test_conv_shapes(state);
        test_conv_options(state);
    }
    gpu->gpu->chip.lds_tiles = true;
    const int64_t launches[3] = {gpu->gpu->launches[ROCQ_K_conv_lds_64],
                                 gpu->gpu->launches[ROCQ_K_conv_lds_16],
                                 gpu->gpu->launches[ROCQ_K_conv_lds_128]};
    const int32_t cap = gpu->desc.dispatch_us;
    for (int round = 0; round < 3; round++) {
        gpu->gpu->chip.n_units = round == 0 ? 1 : round == 1 ? 3 : 100;
        gpu->desc.dispatch_us = round == 1 ? 1 : cap; // many launches of three tiles each
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            picture s = cases[i];
            s.x = s.w = ROCQ_F16;
            s.y = kinds[round];
            s.residual = kinds[(round + 1 + (int)i) % 3];
            s.layout = (round + i) % 5 == 4 ? BOX_PERMUTED : BOX_PLAIN;
            check_conv(&s);
            s.norm = NORM_WEIGHTED; // of one group, by a pass
            s.x_activation = ROCQ_ACT_SILU;
            if (i % 2 == 0) check_conv(&s);
        }
        for (size_t i = 0; i < sizeof halves / sizeof halves[0]; i++) {
            picture s = halves[i];
            s.kw = s.kh = 3;
            s.x = s.w = s.y = s.residual = ROCQ_F16;
            s.layout = (round + i) % 3 == 2 ? BOX_PERMUTED : BOX_PLAIN;
            check_conv(&s);
            if (i != 6 && round != 1) continue;
            s.norm = NORM_WEIGHTED;
            s.x_activation = ROCQ_ACT_SILU;
            check_conv(&s);
        }
    }
    check_conv_cap();
    gpu->gpu->chip.n_units = n_units;
    gpu->desc.dispatch_us = cap;
    check_conv_ahead();
    check_conv_beforehand();
    gpu->gpu->chip.lds_tiles = first;
    random_state = state_before;
    assert_true(gpu->gpu->launches[ROCQ_K_conv_lds_64] > launches[0]);
    assert_true(gpu->gpu->launches[ROCQ_K_conv_lds_16] > launches[1]);
    assert_true(gpu->gpu->launches[ROCQ_K_conv_lds_128] > launches[2]);
}

// x beyond F16's range, which x_scale brings back into it.
static void test_conv_scale(void **state) {
    (void)state;
    box w = box_random(BOX_PLAIN, ROCQ_F16, 1, 64, 32, 1, 1);
    box x = box_random(BOX_PLAIN, ROCQ_F32, 1e6f, 64, 7, 5, 1);
    box y = box_make(BOX_PLAIN, ROCQ_F32, 32, 7, 5, 1);
    const rocq_conv_params p = {.y = &y.t, .w = &w.t, .x = &x.t, .x_scale = 1.0f / 1024};
    compare(ROCQ_OP_CONV, &p, &y, 0, "x of 1e6, scaled");
    boxes_free(&w, &x, &y);
}

static void check_stats(rocq_format format, box_layout layout, int64_t c, int64_t w, int64_t h,
                        int64_t n, int64_t groups, float mean) {
    box x = box_random(layout, format, 1, c, w, h, n);
    for (int64_t i = 0; i < x.count; i++) x.value[i] += mean;
    box_write(&x);
    box second = box_random(layout, format, 3, c, h, w, n);
    box stats = box_make(BOX_STRIDED, ROCQ_F32, 2, groups, n, 1);
    box moments = box_make(BOX_STRIDED, ROCQ_F32, 3, groups, n, 1);
    box positions = box_make(layout, ROCQ_F32, 1, w, h, n);
    const char *what = say("%s %d x %dx%dx%d, %d groups, mean %g", name_of(format), (int)c, (int)w,
                           (int)h, (int)n, (int)groups, (double)mean);
    rocq_norm_stats_params p = {.stats = &stats.t, .x = &x.t};
    compare(ROCQ_OP_NORM_STATS, &p, &stats, 0, what);
    p.moments = &moments.t;
    p.first = true;
    box *both[] = {&stats, &moments};
    compare_as(ROCQ_OP_NORM_STATS, &p, &p, both, 2, 0, what);
    p.first = false;
    p.x = &second.t;
    p.eps = 0.1f;
    compare_as(ROCQ_OP_NORM_STATS, &p, &p, both, 2, 0, what);
    p.stats = NULL;
    compare(ROCQ_OP_NORM_STATS, &p, &moments, 0, what);
    const rocq_norm_stats_params q = {.stats = &positions.t, .x = &x.t};
    compare(ROCQ_OP_NORM_STATS, &q, &positions, 0, what);
    box *all[] = {&x, &second, &stats, &moments, &positions};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) box_free(all[i]);
}

static void test_norm_stats(void **state) {
    (void)state;
    check_stats(ROCQ_F32, BOX_PLAIN, 1, 1, 1, 1, 1, 0);
    check_stats(ROCQ_F16, BOX_PLAIN, 64, 33, 17, 2, 32, 0);
    check_stats(ROCQ_BF16, BOX_PLAIN, 128, 9, 40, 1, 32, 1);
    check_stats(ROCQ_F32, BOX_PLAIN, 520, 13, 7, 1, 4, 0);
    check_stats(ROCQ_F32, BOX_STRIDED, 30, 21, 5, 2, 3, 0);
    check_stats(ROCQ_F16, BOX_PERMUTED, 12, 5, 31, 2, 12, 0);
    check_stats(ROCQ_F32, BOX_PLAIN, 8, 201, 119, 1, 2, 1000); // the mean is no deviation
}

static void test_resize(void **state) {
    (void)state;
    static const rocq_format kinds[] = {ROCQ_F32, ROCQ_F16, ROCQ_BF16};
    for (int i = 0; i < 18; i++) {
        box x = box_random((box_layout)(i % 3), kinds[i / 3 % 3], 1, i % 4 ? 5 : 8, 7, 4, 2);
        box y = box_make((box_layout)(i / 2 % 3), kinds[i / 3 % 3], i % 4 ? 5 : 8, i % 2 ? 14 : 5,
                         i % 2 ? 9 : 3, 2);
        const rocq_resize_params p = {
            .y = &y.t, .x = &x.t, .mode = i < 9 ? ROCQ_RESIZE_NEAREST : ROCQ_RESIZE_BILINEAR};
        compare(ROCQ_OP_RESIZE, &p, &y, i < 9 ? EXACT : 0, say("resize %d", i));
        boxes_free(&x, &y);
    }
    static const float values[5] = {HUGE_VALF, 1, -HUGE_VALF, 3, 3e38f}; // one beside the other
    box x = box_make(BOX_PLAIN, ROCQ_F32, 1, 5, 1, 1);
    box y = box_make(BOX_PLAIN, ROCQ_F32, 1, 5, 1, 1);
    const rocq_resize_params same = {.y = &y.t, .x = &x.t, .mode = ROCQ_RESIZE_BILINEAR};
    memcpy(rocq_tensor_data(&x.t), values, sizeof values);
    compare(ROCQ_OP_RESIZE, &same, &y, EXACT, "resize of infinities");
    boxes_free(&x, &y);
}

// A value within F32's rounding of a half may fall to either side, so one level is allowed; and
// never in more than one byte of a thousand.
static void test_pixels(void **state) {
    (void)state;
    for (int i = 0; i < 24; i++) {
        const int64_t in = i % 3 == 0 ? 1 : i % 3 + 2, out_c = 3 + i / 3 % 2;
        const rocq_format format = i / 2 % 2 ? ROCQ_F16 : ROCQ_F32;
        box x = box_random((box_layout)(i % 2), format, 0.7f, in, i % 4 == 3 ? 300 : 37, 29, 1);
        const int64_t w = i % 4 == 3 ? 300 : 37; // more columns than a block has threads
        box y = box_make(BOX_PLAIN, ROCQ_I8, out_c, w, 29, 1);
        box finite = box_make(BOX_PLAIN, ROCQ_I8, 29, 1, 1, 1);
        x.value[5] = NAN;
        x.value[6] = INFINITY;
        x.value[7] = -INFINITY;
        if (i / 2 % 2 == 0) box_write(&x);
        const rocq_pixels_params p = {.y = &y.t, .x = &x.t, .finite = i % 5 ? &finite.t : NULL,
                                      .scale = i % 2 ? 0.5f : 0, .bias = i % 2 ? 0.5f : 0,
                                      .srgb = i >= 12};
        assert_int_equal(rocq_pixels(cpu, &p), ROCQ_OK);
        unsigned char *want = (unsigned char *)malloc((size_t)y.size);
        assert_non_null(want);
        memcpy(want, y.memory, (size_t)y.size);
        memset(y.memory, 0x55, (size_t)y.size);
        unsigned char rows[29];
        memcpy(rows, finite.memory, sizeof rows);
        assert_true(!p.finite || (rows[0] == (format == ROCQ_F16) && rows[28] == 1));
        memset(finite.memory, 0x55, (size_t)finite.size);
        any_params d = params_of(ROCQ_OP_PIXELS, &p);
        move_params(ROCQ_OP_PIXELS, &d);
        if (rocq_pixels(gpu, &d.pixels) != ROCQ_OK) fail_msg("pixels: %s", rocq_error(gpu));
        for (int j = 0; j < n_twins; j++) {
            if (twins[j].b == &y || twins[j].b == &finite) copy_from_gpu(&twins[j]);
        }
        if (p.finite) assert_memory_equal(finite.memory, rows, sizeof rows);
        int differ = 0;
        for (int64_t j = 0; j < y.size; j++) {
            const int d = abs((int)y.memory[j] - (int)want[j]);
            if (d > 1) {
                fail_msg("pixels %d: byte %d is %d, not %d", i, (int)j, y.memory[j], want[j]);
            }
            differ += d;
        }
        if (1000 * differ > y.size) fail_msg("pixels %d: %d bytes differ", i, differ);
        free(want);
        free_twins();
        boxes_free(&x, &y, &finite);
    }
}

// -- training --

static rocq_format any_float(void) { return floats[random_below(2)]; }
static box_layout any_layout(void) { return (box_layout)random_below(3); }

// in_place: 1 dx is dy, 2 dx is the residual
static void check_norm_backward(int64_t n, int64_t rows, int in_place) {
    const bool center = random_below(2), residual = in_place == 2 || random_below(2);
    const rocq_format format = any_float();
    box x = box_random(any_layout(), any_float(), 1, n, rows, 2, 1);
    box dy = box_random(any_layout(), in_place == 1 ? format : any_float(), 1, n, rows, 2, 1);
    box add = box_random(any_layout(), in_place == 2 ? format : any_float(), 1, n, rows, 2, 1);
    box dx = in_place == 1   ? dy
             : in_place == 2 ? add
                             : box_make(any_layout(), format, n, rows, 2, 1);
    box weight = box_random(BOX_PLAIN, ROCQ_F32, 1, n, 1, 1, 1);
    box dweight = box_random(BOX_PLAIN, ROCQ_F32, 1, n, 1, 1, 1);
    box dbias = box_random(BOX_PLAIN, ROCQ_F32, 1, n, 1, 1, 1);
    box mean = box_random(any_layout(), ROCQ_F32, 1, rows, 2, 1, 1);
    box rstd = box_random(any_layout(), ROCQ_F32, 1, rows, 2, 1, 1);
    box dx16 = box_make(any_layout(), ROCQ_F16, n, rows, 2, 1);
    const rocq_norm_backward_params p = {
        .dx = &dx.t, .dx16 = random_below(2) ? &dx16.t : NULL,
        .dweight = random_below(4) ? &dweight.t : NULL,
        .dbias = random_below(4) ? &dbias.t : NULL, .dy = in_place == 1 ? &dx.t : &dy.t,
        .x = &x.t, .weight = random_below(4) ? &weight.t : NULL, .mean = center ? &mean.t : NULL,
        .rstd = &rstd.t,
        .residual = !residual ? NULL : in_place == 2 ? &dx.t : &add.t,
        .accumulate = random_below(2)};
    box *out[4] = {&dx}, *const all[8] = {&x, &dy, &add, &weight, &mean, &rstd, &dx16, &dx};
    int n_out = 1;
    if (p.dx16) out[n_out++] = &dx16;
    if (p.dweight) out[n_out++] = &dweight;
    if (p.dbias) out[n_out++] = &dbias;
    compare_as(ROCQ_OP_NORM_BACKWARD, &p, &p, out, n_out, 0,
               say("norm_backward, K %d, %d rows, in place %d", (int)n, (int)rows, in_place));
    for (int i = 0; i < 8; i++) {
        if (i == 7 && in_place) continue;
        box_free(all[i]);
    }
    boxes_free(&dweight, &dbias);
}

static void test_norm_backward(void **state) {
    static const int64_t widths[] = {5, 64, 132, 257, 1000, 1028, 2100};
    (void)state;
    for (int i = 0; i < 7; i++) {
        for (int in_place = 0; in_place < 3; in_place++)
            check_norm_backward(widths[i], 3, in_place);
        check_norm_backward(widths[i], 60, i % 3);
    }
}

static void test_map_backward(void **state) {
    (void)state;
    for (int i = 0; i < 36; i++) {
        const int64_t n = i % 2 ? 1 + random_below(70) : 64, rows = 1 + random_below(4);
        const int in_place = i / 6 % 3; // 1 dx is dy, 2 dx is x
        const rocq_format format = any_float();
        box dy = box_random(any_layout(), in_place == 1 ? format : any_float(), 1, n, rows, 2, 2);
        box x = box_random(any_layout(), in_place == 2 ? format : any_float(), 2, n, rows, 2, 2);
        box up = box_random(any_layout(), any_float(), 1, n, rows, 2, 2);
        box dup = box_make(any_layout(), any_float(), n, rows, 2, 2);
        box dx = in_place == 1   ? dy
                 : in_place == 2 ? x
                                 : box_make(any_layout(), format, n, rows, 2, 2);
        const rocq_glu_backward_params glu = {
            .dgate = &dx.t, .dup = &dup.t, .dy = in_place == 1 ? &dx.t : &dy.t,
            .gate = in_place == 2 ? &dx.t : &x.t, .up = &up.t,
            .activation = (rocq_activation)(i % 6)};
        const rocq_activate_backward_params alone = {glu.dgate, glu.dy, glu.gate, glu.activation};
        box *const out[2] = {&dx, &dup};
        if (i < 18) {
            compare_as(ROCQ_OP_GLU_BACKWARD, &glu, &glu, out, 2, 0,
                       say("glu_backward, activation %d", i % 6));
        } else {
            compare_as(ROCQ_OP_ACTIVATE_BACKWARD, &alone, &alone, out, 1, 0,
                       say("activate_backward, activation %d", i % 6));
        }
        if (!in_place) box_free(&dx);
        boxes_free(&dy, &x, &up, &dup);
    }
}

static void test_gather_backward(void **state) {
    static const int64_t widths[] = {3, 64, 1100};
    (void)state;
    for (int i = 0; i < 9; i++) {
        const int64_t n = widths[i % 3], rows = i < 3 ? 1 : 40,
                      n_ids = i < 6 ? 70 : 1 + random_below(30);
        int32_t ids[70];
        for (int64_t k = 0; k < n_ids; k++) ids[k] = (int32_t)random_below(rows);
        box table = box_random(any_layout(), ROCQ_F32, 1, n, rows, 1, 1),
            list = box_i32(ids, n_ids);
        box dy = box_random(any_layout(), any_float(), 1, n, n_ids, 1, 1);
        const rocq_gather_backward_params p = {&table.t, &dy.t, &list.t, i % 2 ? 0 : -0.3f};
        compare(ROCQ_OP_GATHER_BACKWARD, &p, &table, 0, say("gather_backward, K %d", (int)n));
        boxes_free(&table, &list, &dy);
    }
    // more than one round of 1024 ids, of which many are equal
    enum { N = 2500 };
    int32_t ids[N];
    for (int k = 0; k < N; k++) ids[k] = (int32_t)(k % 7 == 0 ? random_below(3) : random_below(2));
    ids[1500] = 3; // alone, and first seen in the second round
    box table = box_random(BOX_PLAIN, ROCQ_F32, 1, 4, 5, 1, 1), list = box_i32(ids, N);
    box dy = box_random(BOX_PLAIN, ROCQ_F32, 1, 4, N, 1, 1);
    const rocq_gather_backward_params p = {&table.t, &dy.t, &list.t, 0};
    compare(ROCQ_OP_GATHER_BACKWARD, &p, &table, 0, "gather_backward of 2500 ids");
    list.value[7] = 5;
    box_write(&list);
    any_params q = params_of(ROCQ_OP_GATHER_BACKWARD, &p);
    move_params(ROCQ_OP_GATHER_BACKWARD, &q);
    assert_int_equal(run_one(gpu, ROCQ_OP_GATHER_BACKWARD, &q), ROCQ_OK);
    assert_int_equal(rocq_sync(gpu), ROCQ_E_BOUNDS);
    free_twins();
    boxes_free(&table, &list, &dy);
}

static void test_rope_backward(void **state) {
    static const int32_t pos[5] = {0, 1, 77, 4000, 100000};
    (void)state;
    for (int i = 0; i < 4; i++) {
        box dy = box_random(any_layout(), any_float(), 1, 64, 3, 5, 1), at = box_i32(pos, 5);
        box dx = box_make(any_layout(), ROCQ_F32, 64, 3, 5, 1);
        const rocq_rope_params p = {.y = &dx.t, .x = &dy.t, .pos = &at.t,
                                    .rope = {.pairing = i % 2 ? ROCQ_ROPE_NEOX : ROCQ_ROPE_NORM,
                                             .n_dims = i < 2 ? 0 : 48}, .backward = true};
        compare(ROCQ_OP_ROPE, &p, &dx, 0, "rope, backward");
        boxes_free(&dy, &at, &dx);
    }
}

static void test_cross_entropy(void **state) {
    static const int64_t classes[] = {1, 5, 33, 300, 4097, 20000};
    (void)state;
    for (int i = 0; i < 18; i++) {
        const int64_t v = classes[i % 6], n = v > 1000 ? 2 : 7;
        const bool in_place = i / 6 == 2;
        const rocq_format format = any_float();
        box logits = box_random(any_layout(), format, 4, v, n, 1, 1);
        for (int64_t k = 0; k < logits.count; k++) {
            if (v > 5 && random_below(40) == 0) logits.value[k] = (double)-INFINITY;
        }
        int32_t targets[7];
        for (int64_t c = 0; c < n; c++) {
            targets[c] = c == 3 ? -1 : (int32_t)random_below(v);
            if (targets[c] >= 0) logits.value[c * v + targets[c]] = 1;
        }
        box_write(&logits);
        box ids = box_i32(targets, n), loss = box_make(BOX_PLAIN, ROCQ_F32, n, 1, 1, 1);
        box weights = box_random(BOX_PLAIN, ROCQ_F32, 1, n, 1, 1, 1);
        box scale = box_random(BOX_PLAIN, ROCQ_F32, 9, 1, 1, 1, 1);
        if (n > 4) weights.value[4] = 0;
        box_write(&weights);
        box d = in_place ? logits : box_make(any_layout(), any_float(), v, n, 1, 1);
        const rocq_cross_entropy_params p = {
            .loss = i % 5 ? &loss.t : NULL, .dlogits = i == 1 ? NULL : &d.t,
            .logits = in_place ? &d.t : &logits.t, .targets = &ids.t,
            .weights = i % 2 ? &weights.t : NULL, .scale = i % 3 ? &scale.t : NULL,
            .softcap = i % 4 == 3 && v <= 5 ? 30.0f : 0.0f};
        box *out[2];
        int n_out = 0;
        if (p.dlogits) out[n_out++] = &d;
        if (p.loss) out[n_out++] = &loss;
        // a loss or a gradient near 0, of few classes, is a difference of nearly equal numbers
        compare_as(ROCQ_OP_CROSS_ENTROPY, &p, &p, out, n_out, v == 1 ? 1e-3 : 1e-9,
                   say("cross_entropy of %d", (int)v));
        if (!in_place) box_free(&d);
        boxes_free(&logits, &ids, &loss, &weights, &scale);
    }
    const int32_t targets[2] = {1, 9};
    box logits = box_random(BOX_PLAIN, ROCQ_F32, 1, 9, 2, 1, 1), ids = box_i32(targets, 2);
    const rocq_cross_entropy_params p = {.dlogits = &logits.t, .logits = &logits.t,
                                         .targets = &ids.t};
    any_params q = params_of(ROCQ_OP_CROSS_ENTROPY, &p);
    move_params(ROCQ_OP_CROSS_ENTROPY, &q);
    assert_int_equal(run_one(gpu, ROCQ_OP_CROSS_ENTROPY, &q), ROCQ_OK);
    assert_int_equal(rocq_sync(gpu), ROCQ_E_BOUNDS);
    free_twins();
    boxes_free(&logits, &ids);
}

static void test_grad_norm(void **state) {
    static const int64_t sizes[] = {1, 7, 1000, 4096, 50001};
    (void)state;
    for (int i = 0; i < 10; i++) {
        box g = box_random(i % 3 ? BOX_PLAIN : BOX_STRIDED, ROCQ_F32, 3, sizes[i % 5], 1, 1, 1);
        box s = box_make(BOX_PLAIN, ROCQ_F32, ROCQ_TRAIN_STATE, 1, 1, 1);
        const double first[ROCQ_TRAIN_STATE] = {1024, 9, 9, 40, 2, 5};
        memcpy(s.value, first, sizeof first);
        box_write(&s);
        if (i == 7) g.value[999] = INFINITY;
        if (i == 9) g.value[0] = NAN;
        box_write(&g);
        const rocq_grad_norm_params p = {.state = &s.t, .g = &g.t, .max_norm = i % 2 ? 0.001f : 0,
                                         .growth_interval = i % 4 == 3 ? 6 : 100};
        if (i == 7 || i == 9) { // the norm is no number to compare
            any_params q = params_of(ROCQ_OP_GRAD_NORM, &p);
            move_params(ROCQ_OP_GRAD_NORM, &q);
            assert_int_equal(run_one(gpu, ROCQ_OP_GRAD_NORM, &q), ROCQ_OK);
            assert_int_equal(rocq_sync(gpu), ROCQ_OK);
            for (int k = 0; k < n_twins; k++) {
                if (twins[k].b == &s) copy_from_gpu(&twins[k]);
            }
            box_read(&s);
            assert_true(s.value[ROCQ_TRAIN_FACTOR] == 0 && s.value[ROCQ_TRAIN_LOSS_SCALE] == 512);
            assert_true(s.value[ROCQ_TRAIN_SKIPPED] == 3 && s.value[ROCQ_TRAIN_STEPS] == 40);
            assert_true(s.value[ROCQ_TRAIN_SINCE] == 0 && !(s.value[ROCQ_TRAIN_NORM] <= FLT_MAX));
            free_twins();
        } else {
            compare(ROCQ_OP_GRAD_NORM, &p, &s, 0, say("grad_norm of %d", (int)sizes[i % 5]));
            assert_true(s.value[ROCQ_TRAIN_STEPS] == 41);
            assert_true(s.value[ROCQ_TRAIN_LOSS_SCALE] == (i % 4 == 3 ? 2048 : 1024));
        }
        boxes_free(&g, &s);
    }
}

// Some steps on both, with moments in F32 and in codes; of these some may be off by one.
static void check_adamw(int64_t n, box_layout layout, rocq_format moments, bool skip) {
    enum { W, W16, M, V, G, M_SCALE, V_SCALE, STATE, LR, ALL };
    box b[ALL];
    const double first[ROCQ_TRAIN_STATE] = {1, skip ? 0 : 0.7, 1, 3}, lr = 0.01;
    for (int i = 0; i < ALL; i++) {
        const bool moment = i == M || i == V, scale = i == M_SCALE || i == V_SCALE;
        b[i] = box_make(layout,
                        i == W16 ? (n % 2 ? ROCQ_F16 : ROCQ_BF16)
                        : moment ? moments
                                 : ROCQ_F32,
                        i == STATE ? ROCQ_TRAIN_STATE
                        : i == LR  ? 1
                        : scale    ? (n + 255) / 256
                                   : n,
                        1, 1, 1);
        if (moment || scale) memset(box_row(&b[i], 0), 0, (size_t)box_row_size(&b[i]));
    }
    for (int64_t i = 0; i < n; i++) {
        b[W].value[i] = random_normal();
        b[G].value[i] = i % 50 == 3 ? 0 : exp(random_in(-6, 0)) * random_normal();
    }
    memcpy(b[STATE].value, first, sizeof first);
    b[LR].value[0] = lr;
    box_write(&b[W]);
    box_write(&b[G]);
    box_write(&b[STATE]);
    box_write(&b[LR]);
    const bool coded = moments == ROCQ_I8;
    const rocq_adamw_params p = {
        .w = &b[W].t, .w16 = n % 3 ? &b[W16].t : NULL, .m = &b[M].t, .v = &b[V].t,
        .m_scale = coded ? &b[M_SCALE].t : NULL, .v_scale = coded ? &b[V_SCALE].t : NULL,
        .g = &b[G].t, .state = &b[STATE].t, .lr = &b[LR].t, .weight_decay = 0.1f,
        .clear = n % 4 == 1};
    any_params q = params_of(ROCQ_OP_ADAMW, &p);
    move_params(ROCQ_OP_ADAMW, &q);
    for (int step = 0; step < (p.clear ? 1 : 3); step++) {
        assert_int_equal(run_one(cpu, ROCQ_OP_ADAMW, &p), ROCQ_OK);
        if (run_one(gpu, ROCQ_OP_ADAMW, &q) != ROCQ_OK) fail_msg("adamw: %s", rocq_error(gpu));
    }
    if (rocq_sync(gpu) != ROCQ_OK) fail_msg("adamw: %s", rocq_error(gpu));
    double *want[ALL];
    for (int i = 0; i < ALL; i++) {
        box_read(&b[i]);
        want[i] = values_of(&b[i]);
    }
    for (int k = 0; k < n_twins; k++) copy_from_gpu(&twins[k]);
    int64_t off = 0;
    for (int i = 0; i < ALL; i++) {
        box_read(&b[i]);
        box_check_outside(&b[i]);
        for (int64_t k = 0; k < b[i].count && (i == M || i == V) && coded; k++) {
            const int d = (int8_t)(int)b[i].value[k] - (int8_t)(int)want[i][k];
            if (abs(d) > 1) fail_msg("adamw: code %d off by %d", (int)k, d);
            off += d != 0;
        }
        for (int64_t k = 0; k < n && i == W16 && (skip || !p.w16); k++) { // not written
            assert_true(isnan(b[i].value[k]));
        }
        if ((coded && (i == M || i == V)) || (i == W16 && (skip || !p.w16)) ||
            (!coded && (i == M_SCALE || i == V_SCALE)))
            continue;
        const double e = nmse(b[i].t.format, b[i].value, want[i], b[i].count);
        if (!(e <= (coded ? 1e-6 : 1e-11))) fail_msg("adamw of %d: box %d, NMSE %g", (int)n, i, e);
    }
    assert_true(off <= 2 + n / 50);
    free_twins();
    for (int i = 0; i < ALL; i++) {
        free(want[i]);
        box_free(&b[i]);
    }
}

static void test_adamw(void **state) {
    static const int64_t sizes[] = {1, 5, 255, 256, 1024, 2500, 4101};
    (void)state;
    for (int i = 0; i < 7; i++) {
        for (int l = 0; l < 2; l++) {
            check_adamw(sizes[i], (box_layout)l, ROCQ_F32, false);
            check_adamw(sizes[i], (box_layout)l, ROCQ_I8, false);
        }
        check_adamw(sizes[i], BOX_PLAIN, i % 2 ? ROCQ_I8 : ROCQ_F32, true);
    }
}

// -- graphs --

// Recorded once, replayed over what lies in the tensors then.
static void test_graph(void **state) {
    (void)state;
    box x = box_random(BOX_PLAIN, ROCQ_F32, 1, 256, 1, 1, 1),
        w = box_make(BOX_PLAIN, ROCQ_Q4_K, 256, 64, 1, 1);
    box h = box_make(BOX_PLAIN, ROCQ_F32, 256, 1, 1, 1),
        y = box_make(BOX_PLAIN, ROCQ_F32, 64, 1, 1, 1);
    random_weights(&w);
    const rocq_norm_params norm = {.y = &h.t, .x = &x.t};
    const rocq_matmul_params mm = {.y = &y.t, .w = &w.t, .x = &h.t};
    on_gpu_as(&w, true);
    any_params n = params_of(ROCQ_OP_RMSNORM, &norm), m = params_of(ROCQ_OP_MATMUL, &mm);
    move_params(ROCQ_OP_RMSNORM, &n);
    move_params(ROCQ_OP_MATMUL, &m);
    assert_int_equal(rocq_reserve(gpu, planned(gpu, ROCQ_OP_MATMUL, &m)), ROCQ_OK);
    rocq_graph *graph = NULL;
    assert_int_equal(rocq_graph_begin(gpu), ROCQ_OK);
    assert_int_equal(rocq_graph_begin(gpu), ROCQ_E_STATE);
    assert_int_equal(rocq_rmsnorm(gpu, &n.rmsnorm), ROCQ_OK);
    if (rocq_matmul(gpu, &m.matmul) != ROCQ_OK) fail_msg("recording: %s", rocq_error(gpu));
    if (rocq_graph_end(gpu, &graph) != ROCQ_OK) fail_msg("graph_end: %s", rocq_error(gpu));
    if (rocq_warm(gpu, graph) != ROCQ_OK) fail_msg("warm: %s", rocq_error(gpu)); // and its check
    for (int round = 0; round < 3; round++) {
        for (int64_t i = 0; i < x.count; i++) x.value[i] = random_normal();
        box_write(&x);
        for (int i = 0; i < n_twins; i++) {
            if (twins[i].b == &x) copy_to_gpu(&twins[i]);
        }
        if (rocq_graph_launch(gpu, graph) != ROCQ_OK) fail_msg("graph_launch: %s", rocq_error(gpu));
        for (int i = 0; i < n_twins; i++) {
            if (twins[i].b == &y) copy_from_gpu(&twins[i]);
        }
        box_read(&y);
        double *got = values_of(&y);
        assert_int_equal(rocq_rmsnorm(cpu, &norm), ROCQ_OK);
        assert_int_equal(rocq_matmul(cpu, &mm), ROCQ_OK);
        box_read(&y);
        const double e = nmse(ROCQ_F32, got, y.value, y.count);
        if (!(e <= 1e-3)) fail_msg("replay %d: NMSE %g", round, e);
        free(got);
    }
    rocq_graph_destroy(gpu, &graph);
    rocq_graph_destroy(gpu, &graph);
    free_twins();
    boxes_free(&x, &w, &h, &y);
}

// What ops write, replayed from a graph and then one by one: the same bytes, with so many launches
// in the replay.
typedef struct joined {
    rocq_op op[6];
    any_params p[6]; // over the GPU's copies
    int n;
} joined;

static void joined_add(joined *j, rocq_op op, const void *params) {
    j->op[j->n] = op;
    j->p[j->n] = params_of(op, params);
    move_params(op, &j->p[j->n++]);
}

static void joined_run(joined *j, const char *what) {
    for (int i = 0; i < j->n; i++) {
        rocq_result result = ROCQ_E_ARGUMENT;
        switch (j->op[i]) {
#define ROCQ_X(NAME, name, type) \
    case ROCQ_OP_##NAME: result = rocq_##name(gpu, &j->p[i].name); break;
            ROCQ_OPS(ROCQ_X)
#undef ROCQ_X
        default: break;
        }
        if (result != ROCQ_OK) fail_msg("%s: op %d: %s", what, i, rocq_error(gpu));
    }
}

static void joined_check(joined *j, box *const *out, int n_out, int n_launches, const char *what) {
    unsigned char *got[8];
    rocq_graph *graph = NULL;
    assert_int_equal(rocq_graph_begin(gpu), ROCQ_OK);
    joined_run(j, what);
    if (rocq_graph_end(gpu, &graph) != ROCQ_OK) fail_msg("%s: %s", what, rocq_error(gpu));
    if (rocq_warm(gpu, graph) != ROCQ_OK) fail_msg("%s: warm: %s", what, rocq_error(gpu));
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < n_twins; i++) {
            if (twins[i].t.layout != ROCQ_LAYOUT_PLANAR) copy_to_gpu(&twins[i]);
        }
        const int64_t launched = gpu->stats.n_launches;
        if (pass == 0) assert_int_equal(rocq_graph_launch(gpu, graph), ROCQ_OK);
        else joined_run(j, what);
        if (graph->refused) fail_msg("%s: refused: %s", what, gpu->gpu->replay);
        if (pass == 0 && graph->captured && gpu->stats.n_launches - launched != n_launches) {
            fail_msg("%s: %d launches, not %d", what, (int)(gpu->stats.n_launches - launched),
                     n_launches);
        }
        for (int o = 0; o < n_out; o++) {
            const twin *w = twins;
            while (w->b != out[o]) w++;
            const rocq_tensor words = words_of(w->t.buffer, out[o]->size);
            const size_t size = (size_t)rocq_tensor_size(&words);
            unsigned char *bytes = (unsigned char *)malloc(size);
            assert_non_null(bytes);
            if (rocq_download(gpu, bytes, &words, (int64_t)size) != ROCQ_OK) {
                fail_msg("%s: %s", what, rocq_error(gpu));
            }
            if (pass == 0) {
                got[o] = bytes;
                continue;
            }
            if (memcmp(got[o], bytes, size) != 0) fail_msg("%s: output %d differs", what, o);
            free(bytes);
            free(got[o]);
        }
    }
    rocq_graph_destroy(gpu, &graph);
    free_twins();
}

// A norm in the launch of the product of its result: K that fill few and all threads of a block and
// none whole, both products of a pair, chains of several formats; and what must not be joined.
static void test_graph_joins_norm(void **state) {
    (void)state;
    const uint64_t saved = random_state;
    static const rocq_format formats[] = {ROCQ_Q8_0, ROCQ_Q4_0, ROCQ_Q4_K, ROCQ_Q6_K, ROCQ_Q2_K};
    static const int64_t ks[] = {32, 96, 2080, 4096, 4352};
    for (int i = 0; i < 14; i++) {
        const rocq_format f = formats[i % 5];
        const int64_t k = f == ROCQ_Q8_0 || f == ROCQ_Q4_0 ? ks[i / 2 % 5] : i % 3 ? 768 : 4096;
        const int64_t m = i % 3 == 0 ? 70 : 160;
        const bool chain = i % 4 == 1, on_x = i == 9 || i == 11, with_rstd = i == 13;
        const int64_t m_y = on_x ? k : m;
        box x = box_random(BOX_PLAIN, ROCQ_F32, 1, k, 1, 1, 1),
            weight = box_random(BOX_PLAIN, ROCQ_F32, 1, k, 1, 1, 1);
        box w = box_make(BOX_PLAIN, f, k, m_y, 1, 1), w2 = box_make(BOX_PLAIN, f, k, m_y, 1, 1);
        box other = box_make(BOX_PLAIN, ROCQ_Q8_0, k, 40, 1, 1);
        box h = box_make(BOX_PLAIN, ROCQ_Q8_0, k, 1, 1, 1);
        box y = box_make(BOX_PLAIN, ROCQ_F32, m, 1, 1, 1),
            y2 = box_make(BOX_PLAIN, ROCQ_F32, 40, 1, 1, 1);
        box rstd = box_make(BOX_PLAIN, ROCQ_F32, 1, 1, 1, 1);
        random_weights(&w);
        random_weights(&w2);
        random_weights(&other);
        memset(h.memory, 0, (size_t)h.size);
        on_gpu_as(&h, true);
        on_gpu_as(&w, true);
        on_gpu_as(&w2, true);
        on_gpu_as(&other, true);
        const rocq_norm_params norm = {.y = &h.t, .x = &x.t, .weight = i % 3 ? &weight.t : NULL,
                                       .eps = 1e-6f, .rstd = with_rstd ? &rstd.t : NULL};
        const rocq_matmul_params second = {.y = &y2.t, .w = &other.t, .x = &h.t};
        const rocq_matmul_params mm = {.y = on_x ? &x.t : &y.t, .w = &w.t, .x = &h.t,
                                       .residual = on_x ? &x.t : NULL,
                                       .w2 = i % 2 ? &w2.t : NULL,
                                       .activation = i % 2 ? ROCQ_ACT_SILU : ROCQ_ACT_IDENTITY,
                                       .next = chain ? &second : NULL};
        joined j = {{ROCQ_OP_MATMUL}, {{{0}}}, 0};
        joined_add(&j, ROCQ_OP_RMSNORM, &norm);
        joined_add(&j, ROCQ_OP_MATMUL, &mm);
        box *const out[] = {on_x ? &x : &y, &h, &y2};
        const bool joins = k <= ROCQ_K_MATVEC_ROW_K && !on_x && !with_rstd;
        joined_check(&j, out, chain ? 3 : 2, joins ? 1 : 2,
                     say("norm of %d into %s, case %d", (int)k, name_of(f), i));
        boxes_free(&x, &weight, &w, &w2, &other, &h, &y, &y2, &rstd);
    }
    random_state = saved;
}

// The first halves of adapters in the launch of the products that add them, behind a norm and
// without: three products, a pair, one in place, results in Q8_0; and what must not be joined.
static void test_graph_joins_low(void **state) {
    (void)state;
    const uint64_t saved = random_state;
    static const rocq_format formats[] = {ROCQ_Q4_K, ROCQ_Q8_0, ROCQ_Q6_K, ROCQ_Q4_0};
    for (int i = 0; i < 30; i++) {
        const int n = i % 3 == 0 ? 3 : 1;
        const bool pair = i % 3 == 1, normed = i % 4 < 2, as_f32 = i == 8, gates = i == 11;
        const bool other = i >= 18 && i <= 20; // a w in a format that the kernels do not know
        const bool over = i == 21, full = i == 22; // t of 1,032 rows, and of 1,024
        const bool away = i == 23 || i == 24; // the last product reads a t that is not made here
        const bool coarse = i == 12; // A in another format than Q8_0
        const bool coded = i == 14 || i == 16; // y in Q8_0, with zeros
        const bool in_place = i == 15, takes_t = i == 17; // t is its own residual, or that of y
        const int epilogue = i >= 25 ? i - 24 : 0; // of t, more than a gate in F32
        const int64_t k = i % 5 == 4 ? 4352 : i % 5 == 3 ? 4096 : i % 5 == 2 ? 2048 : 768;
        const int64_t rank = over ? 344 : full ? 512 : i % 2 ? 24 : 8;
        const int64_t all = rank * (pair ? 2 : n);
        const int64_t m = gates || takes_t ? all : pair || coded ? 96 : n == 3 ? 70 : k;
        box x = box_random(BOX_PLAIN, ROCQ_F32, 1, k, 1, 1, 1);
        box weight = box_random(BOX_PLAIN, ROCQ_F32, 1, k, 1, 1, 1);
        box gate = box_random(BOX_PLAIN, epilogue == 1 ? ROCQ_F16 : ROCQ_F32, 1, all, 1, 1, 1);
        box h = box_make(BOX_PLAIN, ROCQ_Q8_0, k, 1, 1, 1);
        box a = box_make(BOX_PLAIN, coarse ? ROCQ_Q4_0 : ROCQ_Q8_0, k, all, 1, 1);
        box t = in_place ? box_random(BOX_PLAIN, ROCQ_F32, 1, all, 1, 1, 1)
                         : box_make(BOX_PLAIN, ROCQ_F32, all, 1, 1, 1);
        box elsewhere = box_random(BOX_PLAIN, ROCQ_F32, 1, rank, 1, 1, 1);
        box w[4], b[4], y[3];
        rocq_matmul_params p[3];
        rocq_tensor parts[4];
        box *out[6] = {&t};
        random_weights(&h);
        random_weights(&a);
        on_gpu_as(&h, true);
        on_gpu_as(&a, true);
        memset(p, 0, sizeof p);
        for (int j = 0; j < n + pair; j++) {
            const int64_t rows = j == 2 ? 33 : m;
            const rocq_format f = formats[(i + (pair ? 0 : j)) % 4];
            const rocq_format own = other && (pair || j == n - 1) ? ROCQ_Q5_K : f;
            w[j] = box_make(BOX_PLAIN, own, k, rows, 1, 1);
            b[j] = box_random(BOX_PLAIN, as_f32 ? ROCQ_F32 : ROCQ_F16, 0.1f, rank, rows, 1, 1);
            random_weights(&w[j]);
            on_gpu_as(&w[j], true);
            if (j == n) continue;
            y[j] = coded ? box_make(BOX_PLAIN, ROCQ_Q8_0, rows, 1, 1, 1)
                         : box_random(BOX_PLAIN, ROCQ_F32, 1, rows, 1, 1, 1);
            if (coded) on_gpu_as(&y[j], i == 14);
            p[j] = (rocq_matmul_params){.y = &y[j].t, .w = &w[j].t, .x = &h.t, .lora_b = &b[j].t,
                                        .lora_t = away && j == n - 1 ? &elsewhere.t : &t.t,
                                        .next = j + 1 < n ? &p[j + 1] : NULL};
            out[1 + j] = &y[j];
        }
        if (pair) {
            p[0].w2 = &w[1].t;
            p[0].lora_b2 = &b[1].t;
            p[0].lora_t2 = &t.t;
            p[0].activation = coded ? ROCQ_ACT_RELU : ROCQ_ACT_SILU;
        } else if (coded) {
            p[0].activation = ROCQ_ACT_RELU;
        } else if (n == 1 && !gates) {
            p[0].residual = takes_t ? &t.t : p[0].y;
        }
        const rocq_norm_params norm = {.y = &h.t, .x = &x.t, .weight = &weight.t, .eps = 1e-6f};
        const rocq_matmul_params low = {.y = &t.t, .w = &a.t, .x = &h.t,
                                        .gate = gates ? &y[0].t : epilogue < 2 ? &gate.t : NULL,
                                        .residual = in_place        ? &t.t
                                                    : epilogue == 2 ? &gate.t
                                                                    : NULL,
                                        .bias = epilogue == 3 ? &gate.t : NULL,
                                        .activation = epilogue == 4 ? ROCQ_ACT_RELU
                                                                    : ROCQ_ACT_IDENTITY,
                                        .softcap = epilogue == 5 ? 2.0f : 0.0f};
        joined j = {{ROCQ_OP_MATMUL}, {{{0}}}, 0};
        if (normed) joined_add(&j, ROCQ_OP_RMSNORM, &norm);
        joined_add(&j, ROCQ_OP_MATMUL, &low);
        joined_add(&j, ROCQ_OP_MATMUL, &p[0]);
        any_params *const products = &j.p[j.n - 1];
        for (int q = 0; q < n + pair; q++) {
            parts[q] = rocq_tensor_slice(moved(&t.t), 0, q * rank, rank);
            if (away && q == n - 1) continue;
            if (q < n) products->chain[q].lora_t = &parts[q];
            else products->matmul.lora_t2 = &parts[q];
        }
        const int apart = normed && k > ROCQ_K_MATVEC_ROW_K; // the norm has a launch of its own
        const bool two =
            epilogue || gates || coarse || in_place || takes_t || other || over || away;
        joined_check(&j, out, 1 + n, apart + (as_f32 ? 3 : two ? 2 : 1),
                     say("adapters of %d of %d, case %d", n, (int)k, i));
        for (int q = 0; q < n + pair; q++) {
            boxes_free(&w[q], &b[q]);
            if (q < n) box_free(&y[q]);
        }
        boxes_free(&x, &weight, &gate, &h, &a, &t, &elsewhere);
    }
    random_state = saved;
}

// Two norms in one launch, as of the queries and keys of a layer; and two that must not be.
static void test_graph_joins_beside(void **state) {
    (void)state;
    const uint64_t saved = random_state;
    static const int64_t ds[] = {128, 64, 40, 256, 5120};
    for (int i = 0; i < 10; i++) {
        const int64_t d = ds[i % 5], n = 1 + i % 3;
        const bool apart = i != 6 && i != 7 && i != 8;
        box q = box_random((box_layout)(i % 3), ROCQ_F32, 1, d, 5, n, 1),
            k = box_random((box_layout)(i % 2), ROCQ_F32, 1, i == 8 ? d + 1 : d, 2, n, 1),
            w = box_random(BOX_PLAIN, ROCQ_F32, 1, d, 1, 1, 1),
            w2 = box_random(BOX_PLAIN, ROCQ_F32, 1, k.t.ne[0], 1, 1, 1),
            y = box_make(BOX_PLAIN, i % 2 ? ROCQ_F16 : ROCQ_F32, k.t.ne[0], 2, n, 1);
        const bool chained = i == 7; // the second reads what the first writes
        const rocq_norm_params first = {.y = &k.t, .x = &k.t, .weight = i % 3 ? &w2.t : NULL};
        const rocq_norm_params second = {.y = chained ? &y.t : &q.t, .x = chained ? &k.t : &q.t,
                                         .weight = chained ? &w2.t : &w.t,
                                         .eps = i == 6 ? 0.1f : 0.0f};
        joined j = {{ROCQ_OP_MATMUL}, {{{0}}}, 0};
        joined_add(&j, ROCQ_OP_RMSNORM, &first);
        joined_add(&j, ROCQ_OP_RMSNORM, &second);
        box *const out[] = {&k, chained ? &y : &q};
        joined_check(&j, out, 2, apart ? 1 : 2, say("norms of %d, case %d", (int)d, i));
        box *const all[] = {&q, &k, &w, &w2, &y};
        for (int b = 0; b < 5; b++) box_free(all[b]);
    }
    random_state = saved;
}

// The feed-forward part of a mixture: the norm in Q8_0 and in F32, the products of the router and
// the choice in one launch, and, where x is short, the experts with planar hidden values in two
// more; then what must not be joined.
static void test_graph_joins_router(void **state) {
    (void)state;
    const uint64_t saved = random_state;
    random_state = 40;
    static const int64_t ks[] = {32, 96, 2080, 4096, 768, 4128};
    for (int i = 0; i < 12; i++) {
        const int64_t k = ks[i % 6], n_experts = i % 6 ? 5 : 133, n_slots = i % 4 ? 3 : 5, ff = 32;
        const bool coded = i % 4 != 3, shared = i % 3 == 1, whole = k < 1000;
        const bool rstd = i == 8, other_x = i == 9, w16 = i == 10;
        const bool joins = k <= ROCQ_K_MATVEC_ROW_K && !rstd && !w16;
        box x = box_random(BOX_PLAIN, ROCQ_F32, 1, k, 1, 1, 1),
            x2 = box_random(BOX_PLAIN, ROCQ_F32, 1, k, 1, 1, 1),
            weight = box_random(BOX_PLAIN, ROCQ_F32, 1, k, 1, 1, 1),
            w = box_random(BOX_PLAIN, w16 ? ROCQ_F16 : ROCQ_F32, 0.1f, k, n_experts, 1, 1),
            w_shared = box_random(BOX_PLAIN, ROCQ_F32, 0.1f, k, 1, 1, 1),
            bias = box_random(BOX_PLAIN, ROCQ_F32, 1, n_experts, 1, 1, 1),
            choice_bias = box_random(BOX_PLAIN, ROCQ_F32, 1, n_experts, 1, 1, 1);
        box h = box_make(BOX_PLAIN, ROCQ_Q8_0, k, 1, 1, 1),
            exact = box_make(BOX_PLAIN, ROCQ_F32, k, 1, 1, 1),
            root = box_make(BOX_PLAIN, ROCQ_F32, 1, 1, 1, 1),
            logits = box_make(BOX_PLAIN, ROCQ_F32, n_experts, 1, 1, 1),
            gate = box_make(BOX_PLAIN, ROCQ_F32, 1, 1, 1, 1),
            ids = box_make(BOX_PLAIN, ROCQ_I32, n_slots, 1, 1, 1),
            shares = box_make(BOX_PLAIN, ROCQ_F32, n_slots, 1, 1, 1),
            mixed = box_make(BOX_PLAIN, ROCQ_Q8_0, ff, n_slots, 1, 1),
            y = box_make(BOX_PLAIN, ROCQ_F32, k, 1, 1, 1),
            up = box_make(BOX_PLAIN, ROCQ_Q8_0, whole ? k : 32, ff, n_experts, 1),
            up2 = box_make(BOX_PLAIN, ROCQ_Q8_0, whole ? k : 32, ff, n_experts, 1),
            down = box_make(BOX_PLAIN, ROCQ_Q4_0, ff, whole ? k : 32, n_experts, 1);
        random_weights(&up);
        random_weights(&up2);
        random_weights(&down);
        memset(h.memory, 0, (size_t)h.size);
        memset(mixed.memory, 0, (size_t)mixed.size);
        box *const planar[] = {&h, &mixed, &up, &up2, &down};
        for (int b = 0; b < 5; b++) on_gpu_as(planar[b], true);
        const rocq_tensor *in = coded ? &h.t : &exact.t;
        const rocq_norm_params norms[2] = {
            {.y = &h.t, .x = other_x ? &x2.t : &x.t, .weight = i % 3 ? &weight.t : NULL,
             .eps = 1e-6f},
            {.y = &exact.t, .x = &x.t, .weight = i % 3 ? &weight.t : NULL,
             .rstd = rstd ? &root.t : NULL, .eps = 1e-6f}};
        const rocq_matmul_params open = {.y = &gate.t, .w = &w_shared.t, .x = &exact.t,
                                         .activation = ROCQ_ACT_SIGMOID};
        const rocq_matmul_params score = {.y = &logits.t, .w = &w.t, .x = &exact.t,
                                          .bias = i % 2 ? &bias.t : NULL,
                                          .next = shared ? &open : NULL};
        const rocq_route_params route = {.ids = &ids.t, .weights = &shares.t, .logits = &logits.t,
                                         .bias = i % 4 == 2 ? &choice_bias.t : NULL,
                                         .renormalise = i % 2,
                                         .scores = (rocq_scores)(i / 2 % 3)};
        const rocq_experts_params first = {.y = &mixed.t, .w = &up.t, .x = in, .ids = &ids.t,
                                           .w2 = &up2.t, .activation = ROCQ_ACT_SILU};
        const rocq_experts_params second = {.y = &y.t, .w = &down.t, .x = &mixed.t, .ids = &ids.t,
                                            .weights = &shares.t};
        joined j = {{ROCQ_OP_MATMUL}, {{{0}}}, 0};
        if (coded) joined_add(&j, ROCQ_OP_RMSNORM, &norms[0]);
        joined_add(&j, ROCQ_OP_RMSNORM, &norms[1]);
        joined_add(&j, ROCQ_OP_MATMUL, &score);
        joined_add(&j, ROCQ_OP_ROUTE, &route);
        if (whole) joined_add(&j, ROCQ_OP_EXPERTS, &first);
        if (whole) joined_add(&j, ROCQ_OP_EXPERTS, &second);
        // Without Q8_0 the experts convert x themselves, and a product with F16 weights does so.
        // Where the router has not joined, both norms are one launch, unless one writes rstd.
        const int launches = (joins ? 1 + other_x : 3 + rstd + w16) + (whole ? 2 + !coded : 0);
        box *out[8] = {&exact, &logits, &ids, &shares};
        int n_out = 4;
        if (coded) out[n_out++] = &h;
        if (shared) out[n_out++] = &gate;
        if (whole) out[n_out++] = &mixed;
        if (whole) out[n_out++] = &y;
        joined_check(&j, out, n_out, launches,
                     say("router of %d, K %d, case %d", (int)n_experts, (int)k, i));
        box *const all[] = {&x, &x2, &weight, &w, &w_shared, &bias, &choice_bias, &h, &exact, &root,
                            &logits, &gate, &ids, &shares, &mixed, &y, &up, &up2, &down};
        for (size_t b = 0; b < sizeof all / sizeof all[0]; b++) box_free(all[b]);
    }
    random_state = saved;
}

// No block waits for the one that stores the norm's result, nor does the choice. So what is not
// joined: a product that reads that result as its residual, gate or bias too, a choice that reads it
// as its bias, and one whose weights lie where the norm has its result, x or weight.
static void test_graph_router_reads_norm(void **state) {
    (void)state;
    const uint64_t saved = random_state;
    random_state = 53;
    for (int i = 0; i < 8; i++) {
        const int64_t k = 256;
        box x = box_random(BOX_PLAIN, ROCQ_F32, 1, k, 1, 1, 1),
            weight = box_random(BOX_PLAIN, ROCQ_F32, 1, k, 1, 1, 1),
            w = box_random(BOX_PLAIN, ROCQ_F32, 0.1f, k, k, 1, 1),
            y = box_make(BOX_PLAIN, ROCQ_F32, k, 1, 1, 1),
            logits = box_make(BOX_PLAIN, ROCQ_F32, k, 1, 1, 1),
            ids = box_make(BOX_PLAIN, ROCQ_I32, 4, 1, 1, 1),
            shares = box_make(BOX_PLAIN, ROCQ_F32, 4, 1, 1, 1);
        const rocq_norm_params norm = {.y = &y.t, .x = &x.t, .weight = &weight.t};
        const rocq_matmul_params score = {.y = &logits.t, .w = &w.t, .x = &y.t,
                                          .residual = i == 1 ? &y.t : NULL,
                                          .gate = i == 2 ? &y.t : NULL,
                                          .bias = i == 3 ? &y.t : NULL};
        const rocq_route_params route = {.ids = &ids.t, .weights = &shares.t, .logits = &logits.t,
                                         .bias = i == 4 ? &y.t : NULL};
        joined j = {{ROCQ_OP_MATMUL}, {{{0}}}, 0};
        joined_add(&j, ROCQ_OP_RMSNORM, &norm);
        joined_add(&j, ROCQ_OP_MATMUL, &score);
        joined_add(&j, ROCQ_OP_ROUTE, &route);
        rocq_tensor part;
        if (i > 4) {
            part = rocq_tensor_slice(moved(i == 5 ? &y.t : i == 6 ? &x.t : &weight.t), 0, 0, 4);
            j.p[2].route.weights = &part;
        }
        box *const out[6] = {&y, &logits, &ids, &shares, &x, &weight};
        joined_check(&j, out, 6, i == 0 ? 1 : 3, say("router reads the norm, case %d", i));
        box *const all[] = {&x, &weight, &w, &y, &logits, &ids, &shares};
        for (int b = 0; b < 7; b++) box_free(all[b]);
    }
    random_state = saved;
}

// rope_append in the launch of the attention that follows: short and long caches, in pages too, and
// queries that something reads later, which must then be rotated in memory. Case 0 is not joined:
// a step by a head a block does not read rows that are not aligned.
static void test_graph_joins_append(void **state) {
    (void)state;
    const uint64_t saved = random_state;
    static const rocq_format kv[] = {ROCQ_F16, ROCQ_Q8_0, ROCQ_F32, ROCQ_Q4_0, ROCQ_BF16};
    static const int64_t ds[] = {64, 128, 96, 256, 80, 512};
    for (int i = 0; i < 12; i++) {
        const int64_t d = ds[i % 6], n_kv_heads = 1 + i % 2, n_heads = n_kv_heads * (i % 5 ? 3 : 1);
        const int64_t page = i % 3 == 2 ? 16 : 0, rows = i % 4 == 3 ? 640 : 96;
        const int64_t n_pages = page ? rows / page : 1;
        const bool dead = i != 5;
        box q = box_random(BOX_PLAIN, ROCQ_F32, 1, d, n_heads, 1, 1),
            q_next = box_random(BOX_STRIDED, ROCQ_F32, 1, d, n_heads, 1, 1);
        const bool plain = kv[i % 5] == ROCQ_F16 && i > 0; // as a step by a head a block needs them
        box k = box_random(plain ? BOX_PLAIN : BOX_STRIDED, ROCQ_F32, 1, d, n_kv_heads, 1, 1),
            v = box_random(plain ? BOX_PLAIN : BOX_STRIDED, ROCQ_F32, 1, d, n_kv_heads, 1, 1);
        box out = box_make(BOX_PLAIN, ROCQ_F32, d, n_heads, 1, 1);
        box k_cache = box_random(BOX_PLAIN, kv[i % 5], 1, d, n_kv_heads, rows, 1),
            v_cache = box_random(BOX_PLAIN, kv[i % 5], 1, d, n_kv_heads, rows, 1);
        if (i != 3) {
            box_hadamard(&k_cache);
            box_hadamard(&v_cache);
        }
        box pos = box_make(BOX_PLAIN, ROCQ_I32, 1, 1, 1, 1),
            cell = box_make(BOX_PLAIN, ROCQ_I32, 1, 1, 1, 1),
            kv_len = box_make(BOX_PLAIN, ROCQ_I32, 1, 1, 1, 1),
            pages = box_make(BOX_PLAIN, ROCQ_I32, n_pages, 1, 1, 1);
        box factors = box_random(BOX_PLAIN, ROCQ_F32, 0.1f, (i % 3 == 2 ? 32 : d) / 2, 1, 1, 1);
        const int64_t at = i % 4 == 0 ? 0 : rows - 1 - i; // the new position
        for (int64_t b = 0; b < factors.count; b++) factors.value[b] = 1 + fabs(factors.value[b]);
        for (int64_t b = 0; b < n_pages; b++) pages.value[b] = (double)(n_pages - 1 - b);
        pos.value[0] = (double)(at + 17);
        kv_len.value[0] = (double)(at + 1);
        cell.value[0] = (double)(page ? (n_pages - 1 - at / page) * page + at % page : at);
        box *const written[] = {&factors, &pages, &pos, &kv_len, &cell};
        for (int b = 0; b < 5; b++) box_write(written[b]);
        const rocq_rope_append_params append = {
            .q = &q.t, .k = &k.t, .v = &v.t, .k_cache = &k_cache.t, .v_cache = &v_cache.t,
            .pos = &pos.t, .cell = &cell.t, .rope = random_rope(i, &factors)};
        const rocq_attention_params attend = {
            .out = &out.t, .q = &q.t, .k = &k_cache.t, .v = &v_cache.t, .kv_len = &kv_len.t,
            .page_table = page ? &pages.t : NULL, .page_size = (int32_t)page,
            .scale = i % 6 == 4 ? -0.1f : 0.1f, .causal = true};
        const rocq_cast_params over = {.y = dead ? &q.t : &q_next.t, .x = dead ? &q_next.t : &q.t};
        joined j = {{ROCQ_OP_MATMUL}, {{{0}}}, 0};
        joined_add(&j, ROCQ_OP_ROPE_APPEND, &append);
        joined_add(&j, ROCQ_OP_ATTENTION, &attend);
        joined_add(&j, ROCQ_OP_CAST, &over);
        box *const outs[] = {&out, &k_cache, &v_cache, dead ? &q : &q_next};
        joined_check(&j, outs, 4, dead && i > 0 ? 2 : 3,
                     say("append and attention, D %d, case %d", (int)d, i));
        box *const all[] = {&q, &q_next, &k, &v, &out, &k_cache, &v_cache, &pos, &cell, &kv_len,
                            &pages, &factors};
        for (int b = 0; b < 12; b++) box_free(all[b]);
    }
    random_state = saved;
}

// The same in a step that may go by a head a block, or by 8: groups of 1 to 16 heads, runs that are
// merged, pages, all sizes of heads.
static void joins_append_step_cases(bool grouped) {
    const int32_t n_units = gpu->gpu->chip.n_units;
    gpu->gpu->chip.n_units = 16; // so that heads alone have four runs or more
    for (int i = 0; i < 18; i++) {
        const int64_t d = grouped && i % 3 == 1 ? 256 : i / 2 % 2 ? 128 : 64,
                      n_kv_heads = 1 + i % 2,
                      n_heads = n_kv_heads * (i == 11 || i == 17 ? 1
                                              : grouped && i > 12 ? 1 + i % 16 : 1 + i % 8);
        const int64_t page = i % 4 == 1 ? 16 : 0, rows = i % 3 == 2 ? 640 : i % 5 == 1 ? 1536 : 96;
        const int64_t n_pages = page ? rows / page : 1;
        box q = box_random(BOX_PLAIN, ROCQ_F32, 1, d, n_heads, 1, 1),
            q_next = box_random(BOX_PLAIN, ROCQ_F32, 1, d, n_heads, 1, 1);
        box k = box_random(BOX_PLAIN, ROCQ_F32, 1, d, n_kv_heads, 1, 1),
            v = box_random(BOX_PLAIN, ROCQ_F32, 1, d, n_kv_heads, 1, 1);
        box out = box_make(BOX_PLAIN, i % 5 == 4 ? ROCQ_F16 : ROCQ_F32, d, n_heads, 1, 1);
        box k_cache = box_random(BOX_PLAIN, ROCQ_F16, 1, d, n_kv_heads, rows, 1),
            v_cache = box_random(BOX_PLAIN, ROCQ_F16, 1, d, n_kv_heads, rows, 1);
        box pos = box_make(BOX_PLAIN, ROCQ_I32, 1, 1, 1, 1),
            cell = box_make(BOX_PLAIN, ROCQ_I32, 1, 1, 1, 1),
            kv_len = box_make(BOX_PLAIN, ROCQ_I32, 1, 1, 1, 1),
            pages = box_make(BOX_PLAIN, ROCQ_I32, n_pages, 1, 1, 1);
        const int64_t at = i % 8 == 4 ? i : rows - 1 - i; // the new position
        for (int64_t b = 0; b < n_pages; b++) pages.value[b] = (double)(n_pages - 1 - b);
        pos.value[0] = (double)(at + 17);
        kv_len.value[0] = (double)(at + 1);
        cell.value[0] = (double)(page ? (n_pages - 1 - at / page) * page + at % page : at);
        box *const written[] = {&pages, &pos, &kv_len, &cell};
        for (int b = 0; b < 4; b++) box_write(written[b]);
        const rocq_rope_append_params append = {
            .q = &q.t, .k = &k.t, .v = &v.t, .k_cache = &k_cache.t, .v_cache = &v_cache.t,
            .pos = &pos.t, .cell = &cell.t,
            .rope = {.pairing = i % 3 ? ROCQ_ROPE_NEOX : ROCQ_ROPE_NORM,
                     .n_dims = i % 5 == 3 ? 16 : 0}};
        const rocq_attention_params attend = {
            .out = &out.t, .q = &q.t, .k = &k_cache.t, .v = &v_cache.t, .kv_len = &kv_len.t,
            .page_table = page ? &pages.t : NULL, .page_size = (int32_t)page,
            .scale = i % 6 == 4 ? -0.1f : 0.1f, .causal = true};
        const rocq_cast_params over = {.y = &q.t, .x = &q_next.t};
        assert_true(rocq__attention_steps(&gpu->gpu->chip, &attend));
        joined j = {{ROCQ_OP_MATMUL}, {{{0}}}, 0};
        joined_add(&j, ROCQ_OP_ROPE_APPEND, &append);
        joined_add(&j, ROCQ_OP_ATTENTION, &attend);
        joined_add(&j, ROCQ_OP_CAST, &over);
        box *const outs[] = {&out, &k_cache, &v_cache, &q};
        joined_check(&j, outs, 4, 2, say("append and step, D %d, case %d", (int)d, i));
        box *const all[] = {&q, &q_next, &k, &v, &out, &k_cache, &v_cache, &pos, &cell, &kv_len,
                            &pages};
        for (int b = 0; b < 11; b++) box_free(all[b]);
    }
    gpu->gpu->chip.n_units = n_units;
}
static void test_graph_joins_append_step(void **state) {
    (void)state;
    both_steps(joins_append_step_cases);
}

// Attentions on Hopper one after the other in a graph, which share scratch memory and counters: by
// attention_lds in blocks of 256 threads and then of 128, for which the same kernel asks for less
// LDS, in two runs; and by attention_group, in two runs as well.
static void test_graph_attention_lds(void **state) {
    (void)state;
    const uint64_t saved = random_state;
    const int32_t n_units = gpu->gpu->chip.n_units;
    const bool lds_tiles = gpu->gpu->chip.lds_tiles;
    static const struct { int64_t n_heads, n_kv_heads, n_q, n_kv; int kernel; } sizes[] = {
        {2, 2, 70, 130, ROCQ_K_attention_lds_128}, {1, 1, 35, 2085, ROCQ_K_attention_lds_128},
        {3, 1, 1, 600, ROCQ_K_attention_group_128}};
    rocq_info info;
    rocq_get_info(gpu, &info);
    if (!lds_tiles && !strstr(info.device, "simt")) skip();
    gpu->gpu->chip.lds_tiles = true;
    gpu->gpu->chip.n_units = 2;
    joined j = {{ROCQ_OP_MATMUL}, {{{0}}}, 0};
    box q[3], k[3], v[3], out[3];
    for (int i = 0; i < 3; i++) {
        q[i] = box_random(BOX_PLAIN, ROCQ_F32, 1, 128, sizes[i].n_heads, sizes[i].n_q, 1);
        k[i] = box_random(BOX_PLAIN, ROCQ_F16, 1, 128, sizes[i].n_kv_heads, sizes[i].n_kv, 1);
        v[i] = box_random(BOX_PLAIN, ROCQ_F16, 1, 128, sizes[i].n_kv_heads, sizes[i].n_kv, 1);
        out[i] = box_make(BOX_PLAIN, ROCQ_F32, 128, sizes[i].n_heads, sizes[i].n_q, 1);
        const rocq_attention_params p = {.out = &out[i].t, .q = &q[i].t, .k = &k[i].t,
                                         .v = &v[i].t, .causal = true};
        const rocq__attention_grid g = rocq__attention_cut(gpu, &p);
        assert_true(g.kernel == sizes[i].kernel && g.n_splits == (i > 0 ? 2 : 1) &&
                    g.threads == (i == 1 ? 128 : 256));
        joined_add(&j, ROCQ_OP_ATTENTION, &p);
    }
    box *const outs[] = {&out[0], &out[1], &out[2]};
    joined_check(&j, outs, 3, 3, "attention_lds and attention_group");
    for (int i = 0; i < 3; i++) boxes_free(&q[i], &k[i], &v[i], &out[i]);
    gpu->gpu->chip.lds_tiles = lds_tiles;
    gpu->gpu->chip.n_units = n_units;
    random_state = saved;
}

// -- the same bits, run after run --

static void test_repeatable(void **state) {
    (void)state;
    box w = box_make(BOX_PLAIN, ROCQ_Q6_K, 2048, 70, 1, 1),
        x = box_random(BOX_PLAIN, ROCQ_F32, 1, 2048, 3, 1, 1);
    box y = box_make(BOX_PLAIN, ROCQ_F32, 70, 3, 1, 1),
        first = box_make(BOX_PLAIN, ROCQ_F32, 70, 3, 1, 1);
    random_weights(&w);
    for (int round = 0; round < 3; round++) {
        const rocq_matmul_params p = {.y = &y.t, .w = &w.t, .x = &x.t};
        on_gpu_as(&w, true);
        any_params d = params_of(ROCQ_OP_MATMUL, &p);
        move_params(ROCQ_OP_MATMUL, &d);
        assert_int_equal(rocq_matmul(gpu, &d.matmul), ROCQ_OK);
        for (int i = 0; i < n_twins; i++) {
            if (twins[i].b == &y) copy_from_gpu(&twins[i]);
        }
        if (round == 0) memcpy(first.memory, y.memory, (size_t)y.size);
        assert_true(same_bytes(first.memory, y.memory, y.size));
        free_twins();
    }
    boxes_free(&w, &x, &y, &first);
}

// -- matmul_backward --

enum { BACK_DX = 1, BACK_DW = 2, BACK_DB = 4, BACK_Z = 8, BACK_RESIDUAL = 16, BACK_IN_PLACE = 32,
       BACK_ACCUMULATE = 64 };

typedef struct backward { // a case; 0 = default
    int64_t k, m, n;
    int options;
    rocq_format w, x, dy, dx;
    rocq_precision precision;
    rocq_activation activation;
    bool planar;
    box_layout layout;
} backward;

static void check_backward(const backward *s) {
    const int o = s->options;
    box dy = box_random(s->layout, s->dy, 1, s->m, s->n, 1, 1);
    box w = box_make(s->planar ? BOX_PLAIN : s->layout, s->w, s->k, s->m, 1, 1);
    box x = box_random(s->layout, s->x, 1, s->k, s->n, 1, 1);
    box z = box_random(BOX_STRIDED, ROCQ_F16, 2, s->k, s->n, 1, 1);
    box residual = box_random(s->layout, ROCQ_F32, 1, s->k, s->n, 1, 1);
    box dx = o & BACK_IN_PLACE ? box_random(s->layout, s->dx, 1, s->k, s->n, 1, 1)
                               : box_make(s->layout, s->dx, s->k, s->n, 1, 1);
    box dw = o & BACK_ACCUMULATE ? box_random(s->layout, ROCQ_F32, 1, s->k, s->m, 1, 1)
                                 : box_make(s->layout, ROCQ_F32, s->k, s->m, 1, 1);
    box db = o & BACK_ACCUMULATE ? box_random(BOX_STRIDED, ROCQ_F32, 1, s->m, 1, 1, 1)
                                 : box_make(BOX_STRIDED, ROCQ_F32, s->m, 1, 1, 1);
    random_weights(&w);
    const rocq_matmul_backward_params p = {
        .dx = o & BACK_DX ? &dx.t : NULL, .dw = o & BACK_DW ? &dw.t : NULL,
        .db = o & BACK_DB ? &db.t : NULL, .dy = &dy.t, .w = o & BACK_DX ? &w.t : NULL,
        .x = o & BACK_DW ? &x.t : NULL, .z = o & BACK_Z ? &z.t : NULL,
        .residual = o & BACK_IN_PLACE ? &dx.t : o & BACK_RESIDUAL ? &residual.t : NULL,
        .activation = o & BACK_Z ? s->activation : ROCQ_ACT_IDENTITY, .scale = 0.5f,
        .accumulate = (o & BACK_ACCUMULATE) != 0, .precision = s->precision};
    box *out[3];
    int n_out = 0;
    if (p.dx) out[n_out++] = &dx;
    if (p.dw) out[n_out++] = &dw;
    if (p.db) out[n_out++] = &db;
    if (s->planar && p.w) on_gpu_as(&w, block_elems(s->w) > 1);
    compare_as(ROCQ_OP_MATMUL_BACKWARD, &p, &p, out, n_out, 0,
               say("%s%s, dy %s, x %s, K %d M %d N %d, options %d, precision %d, activation %d",
                   name_of(s->w), s->planar ? " planar" : "", name_of(s->dy), name_of(s->x),
                   (int)s->k, (int)s->m, (int)s->n, o, (int)s->precision, (int)s->activation));
    box *all[] = {&dy, &w, &x, &z, &residual, &dx, &dw, &db};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) box_free(all[i]);
}

static void test_matmul_backward_formats(void **state) {
    (void)state;
    for (int f = 0; f < N_FORMATS; f++) {
        const rocq_format w = all_formats[f];
        for (int i = 0; i < 3; i++) {
            const backward s = {.k = block_elems(w) * (i == 1 ? 1 + 160 / block_elems(w) : 1),
                                .m = i == 1 ? 70 : 129, .n = i == 1 ? 33 : 5,
                                .options = BACK_DX, .w = w, .dy = floats[(f + i) % 2],
                                .dx = floats[i % 2], .planar = i != 2,
                                .precision = i == 2 ? ROCQ_PRECISION_F32 : ROCQ_PRECISION_F16};
            check_backward(&s);
        }
    }
}

// Sizes of one tile and of several, none a multiple of anything; then as on a chip so large that r
// is split.
static void test_matmul_backward_shapes(void **state) {
    (void)state;
    static const struct { int64_t k, m, n; } sizes[] = {
        {1, 1, 1}, {128, 128, 64}, {8, 16, 130}, {131, 67, 33}, {24, 300, 9}, {200, 31, 131},
        {40, 9, 600}, {136, 530, 7}};
    const int32_t n_units = gpu->gpu->chip.n_units;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int half = 0; half < 2; half++) {
            gpu->gpu->chip.n_units = i % 2 ? 1 : 200;
            const backward s = {.k = sizes[i].k, .m = sizes[i].m, .n = sizes[i].n,
                                .options = BACK_DX | BACK_DW | BACK_DB, .w = floats[half],
                                .x = floats[half], .dy = floats[half], .dx = floats[1 - half],
                                .precision = half ? ROCQ_PRECISION_F16 : ROCQ_PRECISION_F32};
            check_backward(&s);
        }
    }
    gpu->gpu->chip.n_units = n_units;
    assert_true(gpu->gpu->launches[ROCQ_K_matmul_backward_merge] > 0);
}

static void test_matmul_backward_options(void **state) {
    (void)state;
    for (int i = 0; i < 36; i++) {
        int options = i < 12 ? BACK_DX | BACK_DW | BACK_DB | BACK_Z : (int)random_below(128);
        if (!(options & BACK_DX)) {
            options = (options | BACK_DW) & ~(BACK_Z | BACK_RESIDUAL | BACK_IN_PLACE);
        }
        if (!(options & BACK_DW)) options &= ~BACK_DB;
        const backward s = {.k = i % 3 ? 40 : 37, .m = i % 4 ? 72 : 515, .n = i % 5 ? 17 : 271,
                            .options = options, .w = floats[i % 2], .x = floats[i / 2 % 2],
                            .dy = floats[i / 3 % 2], .dx = floats[i / 4 % 2],
                            .precision = (rocq_precision)(i % 3),
                            .activation = (rocq_activation)(i % (ROCQ_ACT_TANH + 1)),
                            .layout = (box_layout)(i / 2 % 3)};
        check_backward(&s);
    }
}

// dx and dw of one launch have the bits that each has alone, where r is not split otherwise.
static void test_matmul_backward_together(void **state) {
    (void)state;
    const uint64_t kept = random_state; // for the tests behind this one
    const bool lds_tiles = gpu->gpu->chip.lds_tiles;
    for (int i = 0; i < 6; i++) {
        const int64_t k = i % 2 ? 131 : 264, m = i < 4 ? 70 : 300, n = i % 3 ? 33 : 150;
        const rocq_format format = floats[i / 2 % 2];
        box dy = box_random(BOX_PLAIN, format, 1, m, n, 1, 1);
        box w = box_random(BOX_PLAIN, format, 1, k, m, 1, 1);
        box x = box_random(BOX_PLAIN, format, 1, k, n, 1, 1);
        box out[2][3];
        for (int j = 0; j < 2; j++) {
            out[j][0] = box_make(BOX_PLAIN, ROCQ_F32, k, n, 1, 1);
            out[j][1] = box_make(BOX_PLAIN, ROCQ_F32, k, m, 1, 1);
            out[j][2] = box_make(BOX_PLAIN, ROCQ_F32, m, 1, 1, 1);
        }
        gpu->gpu->chip.lds_tiles = false;
        for (int part = 0; part < 3; part++) { // both, dx, dw
            box *const to = out[part > 0];
            const rocq_matmul_backward_params p = {
                .dx = part != 2 ? &to[0].t : NULL, .dw = part != 1 ? &to[1].t : NULL,
                .db = part != 1 ? &to[2].t : NULL, .dy = &dy.t, .w = part != 2 ? &w.t : NULL,
                .x = part != 1 ? &x.t : NULL,
                .precision = format == ROCQ_F16 ? ROCQ_PRECISION_F16 : ROCQ_PRECISION_F32};
            any_params q = params_of(ROCQ_OP_MATMUL_BACKWARD, &p);
            move_params(ROCQ_OP_MATMUL_BACKWARD, &q);
            const int64_t before = gpu->stats.n_launches;
            assert_int_equal(rocq_matmul_backward(gpu, &q.matmul_backward), ROCQ_OK);
            assert_true(gpu->stats.n_launches - before <= 4); // with casts and a merge
            assert_int_equal(rocq_sync(gpu), ROCQ_OK);
            for (int t = 0; t < n_twins; t++) {
                for (int o = 0; o < 3; o++) {
                    if (twins[t].b == &to[o]) copy_from_gpu(&twins[t]);
                }
            }
            free_twins();
        }
        gpu->gpu->chip.lds_tiles = lds_tiles;
        for (int o = 0; o < 3; o++) {
            assert_memory_equal(out[0][o].memory, out[1][o].memory, (size_t)out[0][o].size);
            for (int j = 0; j < 2; j++) box_free(&out[j][o]);
        }
        for (int b = 0; b < 3; b++) box_free((box *[]){&dy, &w, &x}[b]);
    }
    random_state = kept;
}

// dx through weights in a format that is only read has no kernel: nothing runs, not even dw.
static void test_matmul_backward_read(void **state) {
    (void)state;
    const uint64_t kept = random_state; // for the tests behind this one
    for (size_t f = 0; f < sizeof read_formats / sizeof read_formats[0]; f++) {
        box dy = box_random(BOX_PLAIN, ROCQ_F16, 1, 9, 5, 1, 1);
        box w = box_random(BOX_PLAIN, read_formats[f], 1, 256, 9, 1, 1);
        box x = box_random(BOX_PLAIN, ROCQ_F16, 1, 256, 5, 1, 1);
        box dx = box_make(BOX_PLAIN, ROCQ_F32, 256, 5, 1, 1);
        box dw = box_make(BOX_PLAIN, ROCQ_F32, 256, 9, 1, 1);
        const rocq_matmul_backward_params p = {.dx = &dx.t, .dw = &dw.t, .dy = &dy.t, .w = &w.t,
                                               .x = &x.t};
        any_params q = params_of(ROCQ_OP_MATMUL_BACKWARD, &p);
        on_gpu_as(&w, f % 2 == 0);
        move_params(ROCQ_OP_MATMUL_BACKWARD, &q);
        const char *why = NULL;
        assert_int_equal(rocq_supports(gpu, ROCQ_OP_MATMUL_BACKWARD, &q, &why),
                         ROCQ_E_UNSUPPORTED);
        assert_int_equal(rocq_matmul_backward(gpu, &q.matmul_backward), ROCQ_E_UNSUPPORTED);
        const char *said = say("matmul_backward: no GPU kernel for dx through %s, which is only "
                               "read", name_of(read_formats[f]));
        assert_non_null(strstr(rocq_error(gpu), said));
        assert_non_null(strstr(why, said));
        assert_int_equal(rocq_sync(gpu), ROCQ_OK);
        for (int i = 0; i < n_twins; i++) {
            if (twins[i].b == &dx || twins[i].b == &dw) copy_from_gpu(&twins[i]);
        }
        for (int64_t i = 0; i < dx.size; i++) assert_int_equal(dx.memory[i], 0xff);
        for (int64_t i = 0; i < dw.size; i++) assert_int_equal(dw.memory[i], 0xff);
        q.matmul_backward.dx = NULL; // dw alone does not read w
        q.matmul_backward.w = NULL;
        assert_int_equal(rocq_supports(gpu, ROCQ_OP_MATMUL_BACKWARD, &q, NULL), ROCQ_OK);
        free_twins();
        for (int b = 0; b < 5; b++) box_free((box *[]){&dy, &w, &x, &dx, &dw}[b]);
    }
    random_state = kept;
}

// The tile that dx, or dw, has in a launch of its own: it is marked.
static void note_tile(const backward *b, bool of_dw, bool used[ROCQ__LDS_TILES]) {
    const rocq__site site = {.m = (int32_t)b->k, .k = (int32_t)(of_dw ? b->n : b->m),
                             .n = (int32_t)(of_dw ? b->m : b->n), .batch = 1};
    int32_t n_splits;
    double ns;
    used[rocq__lds_best(&gpu->gpu->chip, &rocq__lds_backward, &site, -1, &n_splits, &ns) -
         rocq__lds_tiles] = true;
}

// Products by the kernels named _lds, and where a chip takes those by itself, by the others, too.
// The stand-in has them, although its chip does not take them. On a chip of few units tiles are
// large, on a chip of many they are small and r is split.
// dx and dw run in one launch, and each in one of its own.
static void test_lds_tiles(void **state) {
    bool used[2][ROCQ__LDS_TILES] = {{false}};
    static const struct { int64_t m, n, k; } sizes[] = {
        {1, 9, 8}, {250, 120, 136}, {70, 9, 2056}, {258, 131, 136}, {321, 67, 520}, {128, 64, 520}};
    const uint64_t state_before = random_state; // for the tests behind this one
    const int32_t n_units = gpu->gpu->chip.n_units;
    const bool first = gpu->gpu->chip.lds_tiles;
    rocq_info info;
    rocq_get_info(gpu, &info);
    if (!first && !strstr(info.device, "simt")) return;
    gpu->gpu->chip.lds_tiles = !first;
    if (first) {
        test_matmul_splits(state);
        test_matmul_backward_shapes(state);
    }
    gpu->gpu->chip.lds_tiles = true;
    for (int i = 0; i < 24; i++) {
        const int at = i / 2 % 6;
        const product s = {.w = ROCQ_F16, .x = floats[i % 2], .y = floats[i / 2 % 2],
                           .m = sizes[at].m, .k = sizes[at].k, // more columns than matmul_few takes
                           .n = sizes[at].n < 33 ? 33 : sizes[at].n,
                           .precision = ROCQ_PRECISION_F16, .bias = i % 3 == 0, .gate = i % 5 == 0,
                           .residual = i % 4 == 0, .softcap = i % 7 == 0 ? 3.0f : 0.0f,
                           .activation = (rocq_activation)(i % (ROCQ_ACT_SIGMOID + 1)),
                           .y_layout = (box_layout)(i / 4 % 3),
                           .x_batch = {i / 12 + 1, 1}};
        const bool turn = i % 2; // which of dx and dw adds up k products
        const backward b = {.k = sizes[at].m, .m = turn ? sizes[at].k : sizes[at].n,
                            .n = turn ? sizes[at].n : sizes[at].k,
                            .options = BACK_DX | BACK_DW | BACK_DB | (int)random_below(128),
                            .w = ROCQ_F16, .x = floats[i % 2], .dy = floats[i / 3 % 2],
                            .dx = floats[i / 2 % 2], .precision = ROCQ_PRECISION_F16,
                            .activation = (rocq_activation)(i % (ROCQ_ACT_SIGMOID + 1)),
                            .layout = (box_layout)(i / 2 % 3)};
        gpu->gpu->chip.n_units = i < 12 ? 1 : i % 4 < 2 ? 40 : 400;
        if (turn) check_product(&s);
        check_backward(&b);
        for (int of_dw = 0; of_dw < 2; of_dw++) {
            backward alone = b;
            alone.options &= of_dw ? BACK_DW | BACK_DB | BACK_ACCUMULATE
                                   : BACK_DX | BACK_Z | BACK_RESIDUAL | BACK_IN_PLACE;
            check_backward(&alone);
            note_tile(&alone, of_dw != 0, used[of_dw]);
        }
    }
    // By the tiles that the backward does not have, and those that are rarely the fastest; each
    // with an epilogue and with none, where sums are stored as they are. The last two split K.
    static const struct { int64_t m, n, k; } forward[] = {{127, 100, 520}, {128, 100, 520},
        {190, 250, 520}, {188, 250, 520}, {223, 250, 520}, {224, 255, 520}, {381, 64, 136},
        {384, 62, 136}, {190, 120, 520}, {192, 127, 520}, {253, 40, 1032}, {256, 40, 1032}};
    const double bytes_per_us = gpu->gpu->chip.bytes_per_us;
    const int64_t merges = gpu->gpu->launches[ROCQ_K_matmul_merge];
    for (int i = 0; i < 12; i++) {
        const bool bare = i % 2;
        gpu->gpu->chip.n_units = i < 10 ? 1 : 400;
        if (i == 10) gpu->gpu->chip.bytes_per_us = 1e7;
        const product s = {.w = ROCQ_F16, .x = floats[i / 2 % 2],
                           .y = bare ? ROCQ_F32 : floats[i / 4 % 2], .m = forward[i].m,
                           .n = forward[i].n, .k = forward[i].k, .precision = ROCQ_PRECISION_F16,
                           .bias = !bare && i % 4 == 0, .residual = !bare && i % 4 == 2,
                           .x_batch = {bare ? 1 : 2, 1}};
        check_product(&s);
    }
    assert_int_equal(gpu->gpu->launches[ROCQ_K_matmul_merge], merges + 2);
    gpu->gpu->chip.bytes_per_us = bytes_per_us;
    gpu->gpu->chip.lds_tiles = first;
    gpu->gpu->chip.n_units = n_units;
    random_state = state_before;
    for (int i = 0; i < ROCQ__LDS_FORWARD_TILES; i++) {
        assert_true(gpu->gpu->launches[rocq__lds_tiles[i].matmul] > 0);
    }
    for (int i = 0; i < ROCQ__LDS_TILES; i++) {
        assert_true(gpu->gpu->launches[rocq__lds_tiles[i].backward] > 0);
        assert_true(used[0][i] && used[1][i]);
    }
}

// The same for weights that are decoded into LDS: each format by both tiles, with a last step that
// is whole and one that is not, ragged rows and columns, batches and K in splits.
static void test_lds_decoded(void **state) {
    (void)state;
    static const struct { int64_t m, n, k, units; } sizes[] = {
        {250, 120, 352, 1}, {70, 9, 1056, 400}, {130, 120, 32, 4}};
    const uint64_t state_before = random_state; // for the tests behind this one
    const int32_t n_units = gpu->gpu->chip.n_units;
    const bool first = gpu->gpu->chip.lds_tiles;
    const int n_read = (int)(sizeof read_formats / sizeof read_formats[0]);
    rocq_info info;
    rocq_get_info(gpu, &info);
    if (!first && !strstr(info.device, "simt")) return;
    gpu->gpu->chip.lds_tiles = !first;
    if (first) {
        test_matmul_tiles_f16(state);
        test_read_formats(state);
    }
    gpu->gpu->chip.lds_tiles = true;
    const int64_t halves_bytes = gpu->gpu->chip.halves_bytes;
    gpu->gpu->chip.halves_bytes = 0; // see test_matmul_halves
    random_state = 17;
    for (int f = 0; f < N_FORMATS + n_read; f++) {
        const rocq_format w = f < N_FORMATS ? all_formats[f] : read_formats[f - N_FORMATS];
        if (w == ROCQ_F32 || w == ROCQ_F16) continue;
        for (int i = 0; i < 3; i++) {
            const int64_t e = block_elems(w) > 1 ? block_elems(w) : 8, k = sizes[i].k;
            const product s = {.w = w, .x = floats[(f + i) % 2], .y = floats[f % 2],
                               .m = sizes[i].m, .n = sizes[i].n, .k = (k + e - 1) / e * e,
                               .planar = true, .precision = ROCQ_PRECISION_F16, .bias = i == f % 3,
                               .gate = f % 5 == i, .residual = f % 4 == i,
                               .activation = (rocq_activation)(f % ROCQ_ACT_TANH),
                               .y_layout = (box_layout)((f + i) % 3),
                               .x_batch = {i == 2 ? 2 : 1, 1}};
            gpu->gpu->chip.n_units = (int32_t)sizes[i].units;
            check_product(&s);
        }
    }
    gpu->gpu->chip.halves_bytes = halves_bytes;
    gpu->gpu->chip.lds_tiles = first;
    gpu->gpu->chip.n_units = n_units;
    random_state = state_before;
    for (int i = ROCQ__LDS_DECODED_FIRST; i <= ROCQ__LDS_DECODED_LAST; i++) {
        if (gpu->gpu->launches[i] == 0) fail_msg("never launched: %s", rocq__kernels[i].name);
    }
}

// Weights of 16 bits with few columns: rows, columns and K of which a block's last ones are missing,
// K that gives no step to some waves and several to others, batches, x in both formats, and every
// part of the epilogue. With AUTO and many rows they are taken from three columns on.
static void test_matmul_few(void **state) {
    (void)state;
    static const struct { int64_t m, n, k; } sizes[] = {
        {17, 9, 8}, {33, 12, 136}, {70, 15, 72}, {32, 16, 1160}, {31, 17, 96}, {65, 25, 520},
        {130, 32, 1032}, {ROCQ__LARGE_ROWS, 3, 72}};
    const uint64_t state_before = random_state; // for the tests behind this one
    const bool first = gpu->gpu->chip.lds_tiles;
    rocq_info info;
    rocq_get_info(gpu, &info);
    if (!first && !strstr(info.device, "simt")) return;
    const int32_t n_units = gpu->gpu->chip.n_units;
    gpu->gpu->chip.lds_tiles = true;
    random_state = 21;
    for (int i = 0; i < 32; i++) {
        const int at = i % 8, bf16 = i / 8 % 2;
        // So that a unit has one block or two, which is where F16 takes this kernel.
        const int64_t rows = sizes[at].m * (i / 16 + 1) * (i / 24 + 1);
        gpu->gpu->chip.n_units = (int32_t)((rows + 2 * ROCQ_K_MATMUL_FEW_M - 1) /
                                           (2 * ROCQ_K_MATMUL_FEW_M));
        const product s = {.w = bf16 ? ROCQ_BF16 : ROCQ_F16, .x = floats[i % 3 == 0],
                           .y = floats[i % 5 == 0], .m = sizes[at].m, .n = sizes[at].n,
                           .k = sizes[at].k, .bias = i % 2 == 0, .gate = i % 3 == 1,
                           .residual = i % 4 == 0, .softcap = i % 7 == 0 ? 3.0f : 0.0f,
                           .w2 = i == 9, .rank = i == 10 ? 8 : 0,
                           .activation = (rocq_activation)(i % (ROCQ_ACT_SIGMOID + 1)),
                           .y_layout = (box_layout)(i % 3), .x_batch = {i / 16 + 1, i / 24 + 1}};
        const int kernel =
            ROCQ_K_matmul_few_f16_16 + 2 * bf16 + (sizes[at].n > 16 || s.x == ROCQ_F16);
        const int64_t before = gpu->gpu->launches[kernel];
        check_product(&s);
        assert_true(gpu->gpu->launches[kernel] > before);
    }
    rocq__site rows = {.format = ROCQ_BF16, .m = 1 << 16, .k = 8, .n = 1, .batch = 1 << 15};
    assert_true(rocq__takes_few(&gpu->gpu->chip, &rows, ROCQ_F16)); // 2^31 rows, over an int32_t
    rows.format = ROCQ_F16;
    assert_false(rocq__takes_few(&gpu->gpu->chip, &rows, ROCQ_F16));
    assert_true(rocq__takes_few(&gpu->gpu->chip, &rows, ROCQ_F32));
    gpu->gpu->chip.lds_tiles = first;
    gpu->gpu->chip.n_units = n_units;
    random_state = state_before;
}

// Where a matrix is decoded to F16 in scratch memory first: ragged rows, columns and blocks of that
// launch, batches, K in splits, and a pair, whose matrices take the same scratch memory in turn.
static void test_matmul_halves(void **state) {
    (void)state;
    static const struct { int64_t m, n, k, units; } sizes[] = {
        {250, 260, 352, 1}, {70, 131, 1056, 132}, {130, 129, 256, 4}, {514, 35, 32, 1}};
    const uint64_t state_before = random_state; // for the tests behind this one
    const int32_t n_units = gpu->gpu->chip.n_units;
    const bool first = gpu->gpu->chip.lds_tiles;
    const int n_read = (int)(sizeof read_formats / sizeof read_formats[0]);
    rocq_info info;
    rocq_get_info(gpu, &info);
    if (!first && !strstr(info.device, "simt")) return;
    gpu->gpu->chip.lds_tiles = true;
    random_state = 18;
    for (int f = 0; f < n_read; f++) {
        const rocq_format w = read_formats[f];
        const int64_t before = gpu->gpu->launches[ROCQ_K_matmul_halves], e = block_elems(w);
        for (int i = 0; i < 4; i++) {
            const product s = {.w = w, .x = floats[(f + i) % 2], .y = floats[f % 2],
                               .m = sizes[i].m, .n = sizes[i].n, .k = (sizes[i].k + e - 1) / e * e,
                               .planar = i != f % 4, .precision = ROCQ_PRECISION_F16,
                               .bias = i == f % 3, .gate = f % 5 == i, .residual = f % 4 == i,
                               .activation = (rocq_activation)(f % ROCQ_ACT_TANH),
                               .y_layout = (box_layout)((f + i) % 3), .w2 = f == 9 && i == 1,
                               .x_batch = {i == 2 ? 2 : 1, 1}};
            gpu->gpu->chip.n_units = (int32_t)sizes[i].units;
            check_product(&s);
        }
        assert_true(gpu->gpu->launches[ROCQ_K_matmul_halves] >= before + 4);
    }
    gpu->gpu->chip.lds_tiles = first;
    gpu->gpu->chip.n_units = n_units;
    random_state = state_before;
}

// Every kernel once with args that are all zero: it must touch nothing, which the stand-in watches
// over, and a device's memory checker.
static void test_no_work(void **state) {
    (void)state;
    if (rocq_warm(gpu, NULL) != ROCQ_OK) fail_msg("warm: %s", rocq_error(gpu));
    if (rocq_sync(gpu) != ROCQ_OK) fail_msg("sync: %s", rocq_error(gpu));
}

static void test_every_kernel_ran(void **state) {
    (void)state;
    int missing = 0;
    for (int i = 0; i < ROCQ_K_COUNT; i++) {
        // The self-test ran in rocq_open.
        if (i == ROCQ_K_selftest || gpu->gpu->launches[i] > 0) continue;
        if (gpu->gpu->chip.target != 0 && strstr(rocq__kernels[i].name, "_lds_")) continue;
        if (gpu->gpu->chip.target != 0 && i == ROCQ_K_matmul_halves) continue;
        if (gpu->gpu->chip.target != 0 && strstr(rocq__kernels[i].name, "_few_")) continue;
        print_message("%s was not launched\n", rocq__kernels[i].name);
        missing++;
    }
    assert_int_equal(missing, 0);
}

// ---------------------------------------------------------------------------------------------

static int open_both(void **state) {
    (void)state;
    const rocq_desc on_cpu = {.prefer = ROCQ_BACKEND_CPU}, on_device = {.prefer = ROCQ_BACKEND_GPU};
    if (rocq_open(&cpu, &on_cpu) != ROCQ_OK) return -1;
    const rocq_result result = rocq_open(&gpu, &on_device);
    if (result != ROCQ_OK) {
        print_message("no GPU: %s\n", rocq_result_message(result));
        return -1;
    }
    rocq_info info;
    rocq_get_info(gpu, &info);
    print_message("# device: %s\n", info.device);
    return 0;
}

static int close_both(void **state) {
    (void)state;
    rocq_close(&gpu);
    rocq_close(&cpu);
    return 0;
}

// -- mixtures of experts --

static void test_route(void **state) {
    (void)state;
    const uint64_t state_before = random_state;
    random_state = 18;
    static const struct { int64_t n_experts, k, n; } sizes[] = {
        {1, 1, 1}, {8, 2, 5}, {33, 4, 3}, {128, 8, 9}, {1024, 64, 2}};
    for (int i = 0; i < 40; i++) {
        const int64_t n_experts = sizes[i % 5].n_experts, k = sizes[i % 5].k, n = sizes[i % 5].n;
        const box_layout layout = i % 2 ? BOX_STRIDED : BOX_PLAIN;
        box ids = box_make(layout, ROCQ_I32, k, n, 1, 1);
        box weights = box_make(layout, ROCQ_F32, k, n, 1, 1);
        box logits = box_random(layout, ROCQ_F32, 2, n_experts, n, 1, 1);
        box bias = box_random(BOX_PLAIN, ROCQ_F32, 0.5f, n_experts, 1, 1, 1);
        box expert_scale = box_random(BOX_PLAIN, ROCQ_F32, 1, n_experts, 1, 1, 1);
        const bool ties = i % 7 == 3;
        for (int64_t e = 0; ties && e < logits.count; e++) {
            logits.value[e] = e % 5 == 2 ? 0 : rint(logits.value[e]);
        }
        box_write(&logits);
        rocq_route_params p = {.ids = &ids.t, .weights = &weights.t, .logits = &logits.t,
                               .bias = i / 5 % 2 && !ties ? &bias.t : NULL,
                               .expert_scale = i % 3 == 2 ? &expert_scale.t : NULL,
                               .scores = (rocq_scores)(i / 2 % 3), .renormalise = i % 4 == 1,
                               .scale = i % 5 == 2 ? 2.5f : 0};
        if (n_experts % 8 == 0 && n_experts > 8 && i % 3 == 0 && !ties) {
            p.n_groups = 8;
            p.top_groups = 4;
        }
        box *out[] = {&ids, &weights};
        compare_as(ROCQ_OP_ROUTE, &p, &p, out, 2, 1e-10, say("route %d", i));
        for (int b = 0; b < 5; b++) {
            box_free((box *[]){&ids, &weights, &logits, &bias, &expert_scale}[b]);
        }
    }
    // NaN is after all numbers, and then by index.
    box ids = box_make(BOX_PLAIN, ROCQ_I32, 3, 1, 1, 1),
        weights = box_make(BOX_PLAIN, ROCQ_F32, 3, 1, 1, 1);
    box logits = box_random(BOX_PLAIN, ROCQ_F32, 1, 40, 1, 1, 1);
    for (int64_t e = 0; e < 40; e++)
        logits.value[e] = e == 37 ? -INFINITY : e == 3 ? NAN : e == 38 ? 1 : NAN;
    box_write(&logits);
    const rocq_route_params p = {.ids = &ids.t, .weights = &weights.t, .logits = &logits.t};
    any_params q = params_of(ROCQ_OP_ROUTE, &p);
    move_params(ROCQ_OP_ROUTE, &q);
    assert_int_equal(rocq_route(gpu, &q.route), ROCQ_OK);
    assert_int_equal(rocq_sync(gpu), ROCQ_OK);
    for (int i = 0; i < n_twins; i++) {
        if (twins[i].b == &ids) copy_from_gpu(&twins[i]);
    }
    assert_memory_equal(ids.memory, ((const int32_t[]){38, 37, 0}), 12);
    free_twins();
    boxes_free(&ids, &weights, &logits);
    random_state = state_before;
}

// -- shortconv --

// Planar y is what lfm2 takes in gpu_models.c.
static void test_shortconv(void **state) {
    (void)state;
    const uint64_t state_before = random_state;
    random_state = 24;
    static const int64_t channels[] = {5, 32, 70, 128, 36}, tokens[] = {1, 2, 5, 31, 33, 70};
    for (int i = 0; i < 75; i++) {
        const rocq_format out_format = i % 3 == 2 ? ROCQ_Q8_0 : floats[i % 3];
        const int64_t d = out_format == ROCQ_Q8_0 ? 32 + i % 4 * 32 : channels[i % 5];
        const int64_t n = tokens[i % 6], n_seqs = 1 + i / 2 % 2, taps = 1 + i / 3 % 4;
        const int64_t slots = (taps > 1 ? taps - 1 : 1) + i % 4 * 9;
        const box_layout layout = (box_layout)(i / 4 % 3);
        box y = box_make(layout, out_format, d, n, n_seqs, 1);
        const int64_t rows = i < 60 ? 3 * d : d;
        box bcx = box_random(layout, floats[i / 6 % 2], 1, rows, n, n_seqs, 1);
        box w = box_random(i % 2 ? BOX_STRIDED : BOX_PLAIN, ROCQ_F32, 1, taps, d, 1, 1);
        box kept = box_random(layout, ROCQ_F32, 1, d, slots, n_seqs, 1);
        box pos = box_make(BOX_PLAIN, ROCQ_I32, n_seqs, 1, 1, 1);
        for (int64_t s = 0; s < n_seqs; s++) pos.value[s] = (double)((i + s) % 4 * (i + s) % 11);
        box_write(&pos);
        const rocq_shortconv_params p = {.y = &y.t, .bcx = &bcx.t, .w = &w.t, .state = &kept.t,
                                         .pos = &pos.t,
                                         .activation = (rocq_activation)(i < 60 ? 0 : i % 7)};
        // of y a rounding tie may fall to the other side
        compare_as(ROCQ_OP_SHORTCONV, &p, &p, (box *[]){&y, &kept}, 2,
                   out_format == ROCQ_Q8_0 ? 1e-4 : 1e-10, say("shortconv %d", i));
        for (int b = 0; b < 5; b++) box_free((box *[]){&y, &bcx, &w, &kept, &pos}[b]);
    }
    box y = box_make(BOX_PLAIN, ROCQ_F32, 8, 2, 1, 1);
    box kept = box_make(BOX_PLAIN, ROCQ_F32, 8, 2, 1, 1);
    box bcx = box_random(BOX_PLAIN, ROCQ_F32, 1, 24, 2, 1, 1);
    box w = box_random(BOX_PLAIN, ROCQ_F32, 1, 3, 8, 1, 1);
    box pos = box_make(BOX_PLAIN, ROCQ_I32, 1, 1, 1, 1); // -1
    const rocq_shortconv_params p = {.y = &y.t, .bcx = &bcx.t, .w = &w.t, .state = &kept.t,
                                     .pos = &pos.t};
    any_params q = params_of(ROCQ_OP_SHORTCONV, &p);
    move_params(ROCQ_OP_SHORTCONV, &q);
    assert_int_equal(rocq_shortconv(gpu, &q.shortconv), ROCQ_OK);
    assert_int_equal(rocq_sync(gpu), ROCQ_E_BOUNDS);
    for (int i = 0; i < n_twins; i++) {
        if (twins[i].b == &y || twins[i].b == &kept) copy_from_gpu(&twins[i]);
    }
    for (int64_t i = 0; i < y.size; i++) assert_true(y.memory[i] == 0xff && kept.memory[i] == 0xff);
    free_twins();
    for (int b = 0; b < 5; b++) box_free((box *[]){&y, &bcx, &w, &kept, &pos}[b]);
    random_state = state_before;
}

// -- delta_net --

static void test_delta_net(void **state) {
    (void)state;
    const uint64_t state_before = random_state;
    random_state = 25;
    static const int64_t keys[] = {128, 5, 64, 31, 32, 100, 1}, values[] = {128, 33, 7, 40};
    static const int64_t tokens[] = {1, 2, 9, 33};
    for (int i = 0; i < 28; i++) {
        const int64_t n_keys = keys[i % 7], n_values = values[i % 4], shared = 1 + i % 2;
        const int64_t n_heads = shared * (1 + i % 3), n = tokens[i / 2 % 4], n_seqs = 1 + i / 3 % 2;
        const box_layout layout = (box_layout)(i / 2 % 3);
        box q = box_random(layout, ROCQ_F32, 1, n_keys, shared, n, n_seqs);
        box k = box_random(layout, ROCQ_F32, 1, n_keys, shared, n, n_seqs);
        box v = box_random(layout, ROCQ_F32, 1, n_values, n_heads, n, n_seqs);
        box y = i % 3 ? box_make(layout, ROCQ_F32, n_values, n_heads, n, n_seqs) : v;
        box alpha = box_random(layout, ROCQ_F32, 2, n_heads, n, n_seqs, 1);
        box beta = box_random(layout, ROCQ_F32, 2, n_heads, n, n_seqs, 1);
        box a = box_random(BOX_PLAIN, ROCQ_F32, -0.3f, n_heads, 1, 1, 1);
        box dt = box_random(BOX_PLAIN, ROCQ_F32, 1, n_heads, 1, 1, 1);
        for (int64_t h = 0; h < n_heads; h++) a.value[h] = -fabs(a.value[h]);
        box_write(&a);
        box kept = box_random(layout, ROCQ_F32, 0.3f, n_keys, n_values, n_heads, 4);
        box slot = box_i32(i % 2 ? (const int32_t[]){-1, 2, 1, 1} : (const int32_t[]){3, 0, 2, 1},
                           2 * n_seqs);
        slot.t.ne[0] = 2;
        slot.t.ne[1] = n_seqs;
        slot.t.stride[1] = 2;
        const rocq_delta_net_params p = {
            .y = &y.t, .state = &kept.t, .q = &q.t, .k = &k.t, .v = &v.t, .alpha = &alpha.t,
            .beta = &beta.t, .a = &a.t, .dt = &dt.t, .slot = &slot.t, .eps = 1e-6f};
        compare_as(ROCQ_OP_DELTA_NET, &p, &p, (box *[]){&y, &kept}, 2, 1e-10,
                   say("delta_net %d", i));
        if (i == 0) { // a slot that is not there: nothing is written
            slot.value[1] = 4;
            box_write(&slot);
            any_params bad = params_of(ROCQ_OP_DELTA_NET, &p);
            move_params(ROCQ_OP_DELTA_NET, &bad);
            unsigned char *before = (unsigned char *)malloc((size_t)kept.size);
            assert_non_null(before);
            memcpy(before, kept.memory, (size_t)kept.size);
            assert_int_equal(rocq_delta_net(gpu, &bad.delta_net), ROCQ_OK);
            assert_int_equal(rocq_sync(gpu), ROCQ_E_BOUNDS);
            for (int w = 0; w < n_twins; w++) {
                if (twins[w].b == &kept) copy_from_gpu(&twins[w]);
            }
            assert_true(same_bytes(before, kept.memory, kept.size));
            free(before);
            free_twins();
        }
        if (i % 3) box_free(&y);
        for (int b = 0; b < 9; b++) {
            box_free((box *[]){&q, &k, &v, &alpha, &beta, &a, &dt, &kept, &slot}[b]);
        }
    }
    random_state = state_before;
}

// A text has the same bits at once and in calls of 2, 1 and 18 tokens: of both kernels in turn, and
// of the code of delta_step for whole slices.
static void delta_net_in_pieces(int32_t K, int32_t V) {
    enum { HEADS = 2, N = 21, MOST = 128 * 64 * HEADS };
    static const int32_t cuts[2][4] = {{0, N, N, N}, {0, 2, 3, N}};
    const uint64_t state_before = random_state;
    random_state = 26;
    const int64_t ne[8][4] = {{K, 1, N, 1}, {K, 1, N, 1},   {V, HEADS, N, 1},  {HEADS, N, 1, 1},
                              {HEADS, N, 1, 1}, {HEADS, 1, 1, 1}, {HEADS, 1, 1, 1},
                              {K, V, HEADS, 2}};
    static float data[8][2 * MOST], y[2][64 * HEADS * N], kept[2][MOST];
    for (int i = 0; i < 8; i++)
        for (int64_t e = 0; e < 2 * MOST; e++) data[i][e] = (float)random_normal();
    for (int way = 0; way < 2; way++) {
        rocq_arena arena;
        rocq_buffer memory = {0};
        rocq_tensor t[8], out, slot;
        for (int pass = 0; pass < 2; pass++) {
            if (pass) assert_int_equal(rocq_buffer_alloc(gpu, &memory, arena.peak), ROCQ_OK);
            rocq_arena_init(&arena, pass ? &memory : NULL);
            for (int i = 0; i < 8; i++)
                assert_int_equal(rocq_arena_tensor(&arena, &t[i], ROCQ_F32, 4, ne[i]), ROCQ_OK);
            assert_int_equal(rocq_arena_tensor(&arena, &out, ROCQ_F32, 4, ne[2]), ROCQ_OK);
            assert_int_equal(rocq_tensor_2d(&arena, &slot, ROCQ_I32, 2, 1), ROCQ_OK);
        }
        for (int i = 0; i < 8; i++)
            assert_int_equal(rocq_upload(gpu, &t[i], data[i], rocq_tensor_size(&t[i])), ROCQ_OK);
        for (int c = 0; c < 3; c++) {
            const int32_t from = cuts[way][c], n = cuts[way][c + 1] - from;
            const int32_t slots[2] = {c == 0 ? -1 : 1, 1};
            if (n == 0) continue;
            rocq_tensor part[6];
            for (int i = 0; i < 5; i++) part[i] = rocq_tensor_slice(&t[i], i < 3 ? 2 : 1, from, n);
            part[5] = rocq_tensor_slice(&out, 2, from, n);
            const rocq_delta_net_params p = {
                .y = &part[5], .state = &t[7], .q = &part[0], .k = &part[1], .v = &part[2],
                .alpha = &part[3], .beta = &part[4], .a = &t[5], .dt = &t[6], .slot = &slot,
                .eps = 1e-6f};
            assert_int_equal(rocq_upload(gpu, &slot, slots, sizeof slots), ROCQ_OK);
            assert_int_equal(rocq_delta_net(gpu, &p), ROCQ_OK);
            assert_int_equal(rocq_sync(gpu), ROCQ_OK);
        }
        const rocq_tensor last = rocq_tensor_slice(&t[7], 3, 1, 1);
        assert_int_equal(rocq_download(gpu, y[way], &out, rocq_tensor_size(&out)), ROCQ_OK);
        assert_int_equal(rocq_download(gpu, kept[way], &last, rocq_tensor_size(&last)), ROCQ_OK);
        rocq_buffer_free(gpu, &memory);
    }
    assert_memory_equal(y[0], y[1], (size_t)(V * HEADS * N) * sizeof y[0][0]);
    assert_memory_equal(kept[0], kept[1], (size_t)(K * V * HEADS) * sizeof kept[0][0]);
    random_state = state_before;
}
static void test_delta_net_in_pieces(void **state) {
    (void)state;
    delta_net_in_pieces(100, 40);
    delta_net_in_pieces(128, 64);
}

typedef struct mixture { // a case; 0 = default
    rocq_format w, x, y;
    int64_t k, m, n_experts, n_slots, n;
    rocq_precision precision;
    bool raw, one_x, w2, bias, weights, residual;
    bool copies; // half of the experts are read from copies
    rocq_activation activation;
    float limit;
    box_layout layout;
    int32_t bad; // this id once, 0 = none
    int64_t left; // of the budget, once the weights are on the device, 0 = no budget
} mixture;

// Moves w and copies to the GPU, and there every second expert from w to copies.
static void move_experts(const box *w, const box *copies, bool planar) {
    const rocq_tensor *from = on_gpu_as(w, planar), *to = on_gpu_as(copies, planar);
    const size_t size = (size_t)rocq_tensor_size(from), one = size / (size_t)from->ne[2];
    unsigned char *rest = (unsigned char *)malloc(size);
    assert_non_null(rest);
    memcpy(rest, w->memory, size);
    for (int64_t e = 0; e < from->ne[2]; e += 2) {
        if (rocq_copy_slice(gpu, to, e / 2, from, e) != ROCQ_OK) fail_msg("%s", rocq_error(gpu));
        memset(rest + (size_t)e * one, 0xff, one);
    }
    assert_int_equal(rocq_upload(gpu, from, rest, (int64_t)size), ROCQ_OK);
    free(rest);
}

static void check_mixture(const mixture *s) {
    box w = box_make(BOX_PLAIN, s->w, s->k, s->m, s->n_experts, 1);
    box w2 = box_make(BOX_PLAIN, s->w, s->k, s->m, s->n_experts, 1);
    box x = box_random(s->layout, s->x, 1, s->k, s->one_x ? 1 : s->n_slots, s->n, 1);
    box ids = box_make(s->layout ? BOX_STRIDED : BOX_PLAIN, ROCQ_I32, s->n_slots, s->n, 1, 1);
    box bias = box_random(BOX_STRIDED, ROCQ_F32, 1, s->m, s->n_experts, 1, 1);
    box bias2 = box_random(BOX_PLAIN, ROCQ_F32, 1, s->m, s->n_experts, 1, 1);
    box weights = box_random(BOX_PLAIN, ROCQ_F32, 1, s->n_slots, s->n, 1, 1);
    const int64_t y1 = s->weights ? s->n : s->n_slots, y2 = s->weights ? 1 : s->n;
    box y = box_make(s->y == ROCQ_Q8_0 ? BOX_PLAIN : s->layout, s->y, s->m, y1, y2, 1);
    box residual = box_random(BOX_PLAIN, ROCQ_F16, 1, s->m, y1, y2, 1);
    const int64_t n_copies = (s->n_experts + 1) / 2;
    box w_kept = box_make(BOX_PLAIN, s->w, s->k, s->m, n_copies, 1);
    box w2_kept = box_make(BOX_PLAIN, s->w, s->k, s->m, n_copies, 1);
    box kept = box_make(BOX_PLAIN, ROCQ_I32, s->n_experts, 1, 1, 1);
    for (int64_t e = 0; e < s->n_experts; e++) {
        kept.value[e] = (double)(e % 2 ? e % 4 == 1 ? -1 : n_copies : e / 2);
    }
    box_write(&kept);
    random_weights(&w);
    random_weights(&w2);
    for (int64_t i = 0; i < ids.count; i++) {
        ids.value[i] = (double)(i % 3 ? random_below(s->n_experts) : s->n_experts - 1);
    }
    if (s->bad) ids.value[ids.count / 2] = s->bad;
    box_write(&ids);
    rocq_experts_params p = {
        .y = &y.t, .w = &w.t, .x = &x.t, .ids = &ids.t, .bias = s->bias ? &bias.t : NULL,
        .w2 = s->w2 ? &w2.t : NULL, .bias2 = s->bias && s->w2 ? &bias2.t : NULL,
        .weights = s->weights ? &weights.t : NULL, .residual = s->residual ? &residual.t : NULL,
        .activation = s->activation, .limit = s->limit, .alpha = s->limit > 0 ? 1.702f : 0,
        .precision = s->precision};
    rocq_experts_params host = p;
    host.precision = ROCQ_PRECISION_F32;
    const bool planar = !s->raw && block_elems(s->w) > 1;
    if (s->copies) {
        move_experts(&w, &w_kept, planar);
        if (s->w2) move_experts(&w2, &w2_kept, planar);
        p.kept = &kept.t;
        p.w_kept = &w_kept.t;
        p.w2_kept = s->w2 ? &w2_kept.t : NULL;
    } else {
        on_gpu_as(&w, planar);
        if (s->w2) on_gpu_as(&w2, planar);
    }
    box *out[] = {&y};
    const char *what = say("experts %s x %s, K %d M %d E %d k %d n %d, precision %d", name_of(s->w),
                           name_of(s->x), (int)s->k, (int)s->m, (int)s->n_experts,
                           (int)s->n_slots, (int)s->n, (int)s->precision);
    if (s->bad) {
        any_params q = params_of(ROCQ_OP_EXPERTS, &p);
        move_params(ROCQ_OP_EXPERTS, &q);
        if (rocq_experts(gpu, &q.experts) != ROCQ_OK) fail_msg("%s: %s", what, rocq_error(gpu));
        assert_int_equal(rocq_sync(gpu), ROCQ_E_BOUNDS);
        free_twins();
    } else {
        if (s->left > 0) {
            assert_int_equal(rocq_trim(gpu, 0), ROCQ_OK);
            gpu->desc.memory_budget = gpu->budget_used + s->left;
        }
        compare_as(ROCQ_OP_EXPERTS, &host, &p, out, 1, s->y == ROCQ_Q8_0 ? 1e-4 : 0, what);
        gpu->desc.memory_budget = 0;
    }
    for (int b = 0; b < 12; b++) {
        box_free((box *[]){&w, &w2, &x, &ids, &bias, &bias2, &weights, &y, &residual, &w_kept,
                           &w2_kept, &kept}[b]);
    }
}

// Few pairs, a matvec each, and many, in tiles.
static void test_experts_formats(void **state) {
    (void)state;
    const uint64_t state_before = random_state;
    random_state = 18;
    for (int f = 0; f < N_FORMATS; f++) {
        const int64_t block = block_elems(all_formats[f]);
        const int64_t odd = block == 1 ? 261 : block == 32 ? 288 : 256;
        for (int i = 0; i < 8; i++) {
            const bool many = i / 2 % 2;
            mixture s = {.w = all_formats[f], .m = i % 2 ? 130 : 37, .n_experts = many ? 3 : 9,
                         .n_slots = i % 2 ? 3 : 2, .n = many ? 41 : 3, .one_x = i % 2,
                         .k = i % 3 ? odd : large_k(all_formats[f]),
                         .precision = i >= 6 ? ROCQ_PRECISION_F16
                                             : i == 5 ? ROCQ_PRECISION_F32 : ROCQ_PRECISION_AUTO,
                         .w2 = i % 2, .weights = i % 2 == 0, .copies = i % 3 == f % 2,
                         .activation = i % 2 ? ROCQ_ACT_SILU : ROCQ_ACT_IDENTITY};
            if (s.m == 130 && i > 1) s.k = odd;
            if ((i == 4 || i == 7) && block_elems(s.w) == 256) continue;
            check_mixture(&s);
        }
    }
    // So many pairs that tiles have 64 columns. Products of two sums have long rows, as above: one
    // of 37 may be so much larger than the others that the row's error is that one's.
    for (int f = 0; f < N_FORMATS; f++) {
        const int64_t block = block_elems(all_formats[f]);
        const mixture s = {.w = all_formats[f], .m = f % 2 ? 130 : 37,
                           .k = block == 1 ? 261 : block == 32 ? 288 : 256, .n_experts = 2,
                           .n_slots = 2, .n = 50 + 3 * f, .one_x = f % 2 == 0, .w2 = f % 2,
                           .weights = f % 2 == 0, .copies = f % 3 == 1,
                           .activation = ROCQ_ACT_SILU,
                           .precision = ROCQ_PRECISION_F16};
        check_mixture(&s);
    }
    random_state = state_before;
}

// Hidden values in planar Q8_0 are those in F32, converted.
static void test_experts_planar(void **state) {
    (void)state;
    const uint64_t state_before = random_state;
    random_state = 41;
    static const rocq_format formats[] = {ROCQ_Q4_0, ROCQ_Q5_K, ROCQ_F16};
    for (int i = 0; i < 6; i++) {
        const int64_t k = 256, m = i % 2 ? 96 : 32, n_slots = 1 + i / 2, n = 1 + i % 2;
        box w = box_make(BOX_PLAIN, formats[i % 3], k, m, 4, 1),
            x = box_random(BOX_PLAIN, ROCQ_F32, 1, k, 1, n, 1),
            ids = box_make(BOX_PLAIN, ROCQ_I32, n_slots, n, 1, 1);
        box y = box_make(BOX_PLAIN, ROCQ_F32, m, n_slots, n, 1),
            coded = box_make(BOX_PLAIN, ROCQ_Q8_0, m, n_slots, n, 1),
            cast = box_make(BOX_PLAIN, ROCQ_Q8_0, m, n_slots, n, 1);
        random_weights(&w);
        memset(coded.memory, 0, (size_t)coded.size);
        memset(cast.memory, 1, (size_t)cast.size);
        for (int64_t t = 0; t < ids.count; t++) ids.value[t] = (double)random_below(4);
        box_write(&ids);
        const rocq_tensor *got = on_gpu_as(&coded, true), *want = on_gpu_as(&cast, true);
        on_gpu_as(&w, block_elems(w.t.format) > 1);
        rocq_experts_params p[2] = {{.y = &y.t, .w = &w.t, .x = &x.t, .ids = &ids.t},
                                    {.y = &coded.t, .w = &w.t, .x = &x.t, .ids = &ids.t}};
        if (i % 3 == 2) p[0].precision = p[1].precision = ROCQ_PRECISION_F32;
        const rocq_cast_params convert = {.y = &cast.t, .x = &y.t};
        joined j = {{ROCQ_OP_MATMUL}, {{{0}}}, 0};
        joined_add(&j, ROCQ_OP_EXPERTS, &p[0]);
        joined_add(&j, ROCQ_OP_CAST, &convert);
        joined_add(&j, ROCQ_OP_EXPERTS, &p[1]);
        joined_run(&j, say("experts to planar Q8_0, case %d", i));
        unsigned char *bytes[2];
        for (int b = 0; b < 2; b++) {
            const rocq_tensor words = words_of((b ? want : got)->buffer, coded.size);
            bytes[b] = (unsigned char *)malloc((size_t)rocq_tensor_size(&words));
            assert_non_null(bytes[b]);
            assert_int_equal(rocq_download(gpu, bytes[b], &words, rocq_tensor_size(&words)),
                             ROCQ_OK);
        }
        if (!same_bytes(bytes[0], bytes[1], coded.size)) fail_msg("case %d: bytes differ", i);
        free(bytes[0]);
        free(bytes[1]);
        free_twins();
        box *const all[] = {&w, &x, &ids, &y, &coded, &cast};
        for (int b = 0; b < 6; b++) box_free(all[b]);
    }
    random_state = state_before;
}

static void test_experts_cases(void **state) {
    (void)state;
    const uint64_t state_before = random_state;
    random_state = 18;
    static const rocq_format outs[] = {ROCQ_F32, ROCQ_F16, ROCQ_Q8_0};
    for (int i = 0; i < 36; i++) {
        mixture s = {.w = i % 4 == 3 ? ROCQ_F16 : i % 4 ? ROCQ_Q4_0 : ROCQ_Q5_K,
                     .x = i % 5 == 4 ? ROCQ_Q8_0 : i % 5 == 2 ? ROCQ_F16 : ROCQ_F32,
                     .y = outs[i % 3], .k = 256, .m = i % 2 ? 64 : 160, .n_experts = 1 + i % 7,
                     .n_slots = 1 + i * 5 % 11, .n = i % 4 < 2 ? 1 : i % 8 < 4 ? 2 : 70,
                     .precision = i % 6 < 4 ? ROCQ_PRECISION_F32 : ROCQ_PRECISION_F16,
                     .raw = i % 9 == 5, .one_x = i % 7 < 3, .w2 = i % 4 < 2, .bias = i % 3 == 1,
                     .weights = i % 5 < 2, .copies = i % 9 > 4, .layout = (box_layout)(i % 3)};
        s.residual = s.weights && i % 2;
        if (s.w2 && s.y == ROCQ_F16) s.y = ROCQ_F32; // which the product of two sums could overflow
        if (s.weights && s.layout == BOX_PERMUTED) s.layout = BOX_STRIDED;
        if (s.w2 && i % 5 == 0) s.limit = i % 10 ? 0.5f : 7.0f;
        else s.activation = i % 2 ? ROCQ_ACT_SILU : ROCQ_ACT_IDENTITY;
        check_mixture(&s);
    }
    // One expert has all, which fills several tiles, and others none.
    const mixture one = {.w = ROCQ_Q4_K, .m = 70, .k = 256, .n_experts = 2, .n_slots = 3, .n = 60,
                         .one_x = true, .w2 = true, .activation = ROCQ_ACT_SILU};
    check_mixture(&one);
    // Formats that are only read: few pairs in INT8 and F32, and both tiles. Scales are of random
    // bits, so that one output can outweigh its row: rows of less than 32 are judged together.
    for (size_t i = 0; i < sizeof read_formats / sizeof read_formats[0]; i++) {
        const mixture read = {.w = read_formats[i], .m = 31, .k = 256, .n_experts = 3, .n_slots = 2,
                              .n = i % 3 ? 1 : i % 2 ? 90 : 30, .w2 = i % 2, .copies = i % 2 == 0,
                              .activation = ROCQ_ACT_SILU,
                              .precision = i % 3 == 0 ? ROCQ_PRECISION_F16
                                           : i % 3 == 1 ? ROCQ_PRECISION_INT8 : ROCQ_PRECISION_F32};
        check_mixture(&read);
    }
    // An id that is none: on sync, and nothing is read there.
    for (int i = 0; i < 8; i++) {
        const mixture bad = {.w = ROCQ_Q8_0, .m = 70, .k = 64, .n_experts = 5, .n_slots = 2,
                             .n = i % 2 ? 30 : 1, .w2 = i / 2 % 2, .weights = i / 4 % 2,
                             .bias = true, .copies = i % 2, .bad = i % 3 ? 5 + i * 1000000 : -1};
        check_mixture(&bad);
    }
    random_state = state_before;
}

// Of eight experts without a copy so many are fetched as the budget has room for: all, some, none.
// Few pairs and weights that are repacked have none fetched.
static void test_experts_room(void **state) {
    (void)state;
    const uint64_t state_before = random_state;
    random_state = 52;
    const int64_t *const launches = gpu->gpu->launches;
    for (int i = 0; i < 10; i++) {
        const bool few = i == 8, raw = i == 9;
        const mixture s = {.w = ROCQ_Q8_0, .m = 130, .k = 512, .n_experts = 16, .n_slots = 2,
                           .n = few ? 3 : 20, .one_x = true, .w2 = i % 2, .copies = true,
                           .raw = raw, .left = i / 2 % 4 == 1 ? 4000000 : i / 2 % 4 == 2 ? 400000
                                               : i / 2 % 4 == 3 ? 100000 : 0,
                           .precision = ROCQ_PRECISION_F16};
        const int64_t before = launches[ROCQ_K_experts_fetch];
        check_mixture(&s);
        const bool fetches = i < 6;
        assert_int_equal(launches[ROCQ_K_experts_fetch] - before, fetches ? 1 : 0);
    }
    random_state = state_before;
}

// Closes or opens, on the stand-in, the slices of all experts but 1 and 4: a part of each plane.
static void close_others(const rocq_tensor *w, bool closed) {
    int64_t bytes[6];
    const char *plane = (const char *)rocq__device_data(w);
    if (strncmp(gpu->gpu->name, "simt", 4) != 0) return;
    rocq__slice_planes(w, bytes);
    for (int k = 0; k < 6; plane += bytes[k++] * w->ne[2]) {
        for (int64_t e = 0; e < w->ne[2]; e++) {
            if (e != 1 && e != 4) ops_close(plane + e * bytes[k], bytes[k], closed);
        }
    }
}

// No byte of an expert that is not chosen is read, in steps and in prompts.
static void test_other_experts(void **state) {
    (void)state;
    const uint64_t state_before = random_state;
    random_state = 54;
    enum { N_READ = sizeof read_formats / sizeof *read_formats };
    for (int i = 0; i < 2 * (N_FORMATS + N_READ); i++) {
        const rocq_format format =
            i / 2 < N_FORMATS ? all_formats[i / 2] : read_formats[i / 2 - N_FORMATS];
        const int64_t n = i % 2 ? 40 : 1;
        box w = box_make(BOX_PLAIN, format, 256, 64, 7, 1);
        box x = box_random(BOX_PLAIN, ROCQ_F32, 1, 256, 1, n, 1);
        box ids = box_make(BOX_PLAIN, ROCQ_I32, 2, n, 1, 1);
        box y = box_make(BOX_PLAIN, ROCQ_F32, 64, 2, n, 1);
        random_weights(&w);
        for (int64_t k = 0; k < ids.count; k++) ids.value[k] = k % 2 ? 4 : 1;
        box_write(&ids);
        // Of more than 1 MiB: the stand-in itself closes and opens smaller buffers.
        rocq_tensor there = w.t;
        if (block_elems(format) > 1) there.layout = ROCQ_LAYOUT_PLANAR;
        assert_int_equal(rocq_buffer_alloc(gpu, &there.buffer, w.size + (2 << 20)), ROCQ_OK);
        assert_int_equal(rocq_upload(gpu, &there, w.memory, w.size), ROCQ_OK);
        const rocq_experts_params p = {.y = &y.t, .w = &w.t, .x = &x.t, .ids = &ids.t};
        any_params q = params_of(ROCQ_OP_EXPERTS, &p);
        move_params(ROCQ_OP_EXPERTS, &q);
        q.experts.w = &there;
        assert_int_equal(rocq_sync(gpu), ROCQ_OK); // what was submitted has run
        close_others(&there, true);
        if (rocq_experts(gpu, &q.experts) != ROCQ_OK) fail_msg("%s", rocq_error(gpu));
        assert_int_equal(rocq_sync(gpu), ROCQ_OK);
        close_others(&there, false);
        assert_int_equal(rocq_buffer_free(gpu, &there.buffer), ROCQ_OK);
        free_twins();
        for (int b = 0; b < 4; b++) box_free((box *[]){&w, &x, &ids, &y}[b]);
    }
    random_state = state_before;
}

// The time cap goes by the rate of the bus for what comes through it: 1.1 MB of missing experts are
// 71 us by estimate, and so are cut under a cap of 50, and so is a product of weights in pinned
// memory.
static void test_bus_time(void **state) {
    (void)state;
    const uint64_t state_before = random_state;
    random_state = 53;
    const int32_t cap = gpu->desc.dispatch_us;
    gpu->desc.dispatch_us = 50;
    const int64_t *const launches = gpu->gpu->launches;
    const int64_t before = launches[ROCQ_K_experts_fetch];
    const mixture s = {.w = ROCQ_Q8_0, .m = 130, .k = 512, .n_experts = 16, .n_slots = 2, .n = 20,
                       .one_x = true, .w2 = true, .copies = true, .precision = ROCQ_PRECISION_F16};
    check_mixture(&s);
    assert_in_range(launches[ROCQ_K_experts_fetch] - before, 2, 32);

    box x = box_random(BOX_PLAIN, ROCQ_F32, 1, 512, 1, 1, 1);
    box y = box_make(BOX_PLAIN, ROCQ_F32, 130, 1, 1, 1);
    rocq_tensor w = {.format = ROCQ_F16, .n_dims = 2, .ne = {512, 130, 1, 1},
                     .stride = {1, 512, 512 * 130, 512 * 130}};
    const double size = 2.0 * 512 * 130;
    const rocq_matmul_params p = {.y = &y.t, .w = &w, .x = &x.t};
    const rocq__job job = {.ctx = gpu};
    double bytes[2];
    for (int i = 0; i < 2; i++) {
        const rocq_memory kind = i ? ROCQ_MEMORY_PINNED : ROCQ_MEMORY_DEVICE;
        assert_int_equal(rocq__buffer_take(gpu, &w.buffer, (int64_t)size, kind), ROCQ_OK);
        bytes[i] = rocq__job_cost(&job, ROCQ_OP_MATMUL, &p).bytes;
        assert_int_equal(rocq_buffer_free(gpu, &w.buffer), ROCQ_OK);
    }
    const double slower = gpu->gpu->chip.bytes_per_us / ROCQ__BUS_BYTES_PER_US;
    assert_true(slower > 1 && fabs(bytes[1] - bytes[0] - (slower - 1) * size) < 1);
    gpu->desc.dispatch_us = cap;
    box_free(&x);
    box_free(&y);
    random_state = state_before;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matmul_matvec),   cmocka_unit_test(test_matmul_tiles_f16),
        cmocka_unit_test(test_matmul_tiles_int8), cmocka_unit_test(test_matmul_tiles_f32),
        cmocka_unit_test(test_matmul_splits),
        cmocka_unit_test(test_matmul_layouts),  cmocka_unit_test(test_matmul_epilogue),
        cmocka_unit_test(test_matmul_adapters), cmocka_unit_test(test_matmul_chain),
        cmocka_unit_test(test_matmul_tiles_shared),
        cmocka_unit_test(test_attention_heads),
        cmocka_unit_test(test_attention_formats), cmocka_unit_test(test_attention_options),
        cmocka_unit_test(test_attention_wide),  cmocka_unit_test(test_attention_lds),
        cmocka_unit_test(test_attention_lds_wide),
        cmocka_unit_test(test_attention_long),  cmocka_unit_test(test_attention_scratch),
        cmocka_unit_test(test_attention_step),  cmocka_unit_test(test_attention_step_mixed),
        cmocka_unit_test(test_graph_joins_append_step),
        cmocka_unit_test(test_graph_attention_lds),
        cmocka_unit_test(test_attention_backward),
        cmocka_unit_test(test_attention_backward_unsupported),
        cmocka_unit_test(test_norms),
        cmocka_unit_test(test_read_formats),
        cmocka_unit_test(test_planar_activations), cmocka_unit_test(test_rope),
        cmocka_unit_test(test_rope_append),     cmocka_unit_test(test_maps),
        cmocka_unit_test(test_hadamard),        cmocka_unit_test(test_attention_hadamard),
        cmocka_unit_test(test_casts),           cmocka_unit_test(test_softmax),
        cmocka_unit_test(test_gather),          cmocka_unit_test(test_argmax),
        cmocka_unit_test(test_sample),          cmocka_unit_test(test_sample_of_many),
        cmocka_unit_test(test_bad_indices),
        cmocka_unit_test(test_conv_shapes),     cmocka_unit_test(test_conv_options),
        cmocka_unit_test(test_conv_lds),        cmocka_unit_test(test_conv_most_scratch),
        cmocka_unit_test(test_lend),
        cmocka_unit_test(test_conv_scale),      cmocka_unit_test(test_norm_stats),
        cmocka_unit_test(test_resize),          cmocka_unit_test(test_pixels),
        cmocka_unit_test(test_matmul_backward_formats),
        cmocka_unit_test(test_matmul_backward_read),
        cmocka_unit_test(test_matmul_backward_shapes),
        cmocka_unit_test(test_matmul_backward_together),
        cmocka_unit_test(test_matmul_backward_options), cmocka_unit_test(test_lds_tiles),
        cmocka_unit_test(test_lds_decoded), cmocka_unit_test(test_matmul_few),
        cmocka_unit_test(test_matmul_halves),
        cmocka_unit_test(test_norm_backward),   cmocka_unit_test(test_map_backward),
        cmocka_unit_test(test_gather_backward), cmocka_unit_test(test_rope_backward),
        cmocka_unit_test(test_cross_entropy),   cmocka_unit_test(test_grad_norm),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_route),
        cmocka_unit_test(test_shortconv),
        cmocka_unit_test(test_delta_net), cmocka_unit_test(test_delta_net_in_pieces),
        cmocka_unit_test(test_experts_formats),
        cmocka_unit_test(test_experts_planar),
        cmocka_unit_test(test_experts_cases),   cmocka_unit_test(test_experts_room),
        cmocka_unit_test(test_other_experts),   cmocka_unit_test(test_bus_time),
        cmocka_unit_test(test_graph_router_reads_norm),
        cmocka_unit_test(test_overlap),         cmocka_unit_test(test_graph),
        cmocka_unit_test(test_graph_joins_norm), cmocka_unit_test(test_graph_joins_low),
        cmocka_unit_test(test_graph_joins_append),
        cmocka_unit_test(test_graph_joins_beside), cmocka_unit_test(test_graph_joins_router),
        cmocka_unit_test(test_repeatable),      cmocka_unit_test(test_no_work),
    };
    const struct CMUnitTest last[] = {cmocka_unit_test(test_every_kernel_ran)};
    if (open_both(NULL) != 0) return 2;
    int failed = 0;
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    failed += cmocka_run_group_tests_name("gpu", tests, NULL, NULL);
    if (argc <= 1) failed += cmocka_run_group_tests_name("kernels", last, NULL, NULL);
    close_both(NULL);
    return failed;
}
