// Matrix products: every format, operand, precision and size against float64, SIMD against scalar,
// and ggml as a peer.
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "ops.h"

static const rocq_format all_formats[] = {
#define ROCQ_X(NAME, name, id, elems, bytes) ROCQ_##NAME,
    ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
};
enum { N_FORMATS = sizeof all_formats / sizeof all_formats[0] };

static bool has_int8(rocq_format f) {
    return f != ROCQ_F32 && f != ROCQ_F16 && f != ROCQ_BF16 && f != ROCQ_MXFP6_E3M2;
}

static const char *name_of(rocq_format f) {
    return rocq_format_name(f);
}

// -- problems --

typedef struct shape {
    rocq_format w, x, y, gate, residual;
    rocq_precision precision;
    int64_t m, n, k, w_batch[2], x_batch[2];
    box_layout w_layout, x_layout, y_layout;
    bool has_bias, has_gate, has_residual;
    rocq_activation activation;
    float softcap;
    int64_t rank;     // of an adapter, 0 = none
    rocq_format lora; // of its B
    float lora_scale;
    enum { SEPARATE, Y_IS_RESIDUAL, Y_IS_GATE } in_place;
} shape;

typedef struct problem {
    shape s;
    box w, x, y, bias, gate, residual, lora_b, lora_t;
    rocq_matmul_params p;
    double *exact; // products of the operands as they are
    double *want;  // of the operands as the precision takes them, through the epilogue
    double *slack; // what F32 arithmetic may add to that
} problem;

// What is asked for: 0 stands for INT8 where there is one. What AUTO is, test_precision.c asks.
static rocq_precision precision_of(const shape *s) {
    if (s->precision != ROCQ_PRECISION_AUTO) return s->precision;
    return has_int8(s->w) ? ROCQ_PRECISION_INT8 : ROCQ_PRECISION_F32;
}

// x as the precision takes it, in float64.
static double *rounded_x(const problem *a) {
    const box *x = &a->x;
    double *v = (double *)malloc((size_t)x->count * sizeof(double));
    assert_non_null(v);
    memcpy(v, x->value, (size_t)x->count * sizeof(double));
    const rocq_precision precision = precision_of(&a->s);
    if (precision == ROCQ_PRECISION_F16) {
        for (int64_t i = 0; i < x->count; i++) {
            v[i] = rocq_f16_to_f32(rocq_f32_to_f16((float)v[i]));
        }
    }
    if (precision != ROCQ_PRECISION_INT8) return v;
    for (int64_t b = 0; b < x->count; b += 32) {
        float top = 0;
        if (a->s.x == ROCQ_Q8_0) { // kept as it is, but for blocks that hold a code of -128
            const int64_t r = b / x->t.ne[0], i = b % x->t.ne[0] / 32;
            const rocq_block_q8_0 *block = (const rocq_block_q8_0 *)(const void *)box_row(x, r) + i;
            if (!memchr(block->qs, 0x80, 32)) continue;
        }
        for (int64_t i = b; i < b + 32; i++) top = fmaxf(top, fabsf((float)v[i]));
        const float inverse = top > 0 ? 127.0f / top : 0.0f;
        for (int64_t i = b; i < b + 32; i++) {
            v[i] = (double)(top / 127.0f) * nearbyintf((float)v[i] * inverse);
        }
    }
    return v;
}

static double activate(rocq_activation activation, double x) {
    switch (activation) {
    case ROCQ_ACT_SILU: return x / (1 + exp(-x));
    case ROCQ_ACT_GELU:
        return x / 2 * (1 + tanh(sqrt(2 / 3.14159265358979) * (x + 0.044715 * x * x * x)));
    case ROCQ_ACT_GELU_ERF: return x / 2 * (1 + erf(x / sqrt(2.0)));
    case ROCQ_ACT_RELU: return x > 0 ? x : 0;
    case ROCQ_ACT_TANH: return tanh(x);
    case ROCQ_ACT_SIGMOID: return 1 / (1 + exp(-x));
    default: return x;
    }
}

// The comment at rocq_matmul_params, word for word. Rounding: K/8 partial sums and then some, each
// at most half a unit of the largest that can have come together; the largest of w's neighbours
// stands in for the scale and min that a small weight may be the difference of.
static void reference(problem *a) {
    const shape *s = &a->s;
    const double unit = 0x1p-23;
    double *x = rounded_x(a), *largest = (double *)malloc((size_t)a->w.count * sizeof(double));
    assert_non_null(largest);
    for (int64_t i = 0; i < a->w.count; i++) {
        const int64_t k = i % s->k, first = i - k % 32;
        largest[i] = 0;
        for (int64_t j = first; j < first + 32 && j < i - k + s->k; j++) {
            largest[i] = fmax(largest[i], fabs(a->w.value[j]));
        }
    }
    for (int64_t i = 0; i < a->y.count; i++) {
        const int64_t m = i % s->m, n = i / s->m % s->n;
        const int64_t i2 = i / s->m / s->n % s->x_batch[0], i3 = i / s->m / s->n / s->x_batch[0];
        const int64_t w2 = i2 / (s->x_batch[0] / s->w_batch[0]);
        const int64_t w3 = i3 / (s->x_batch[1] / s->w_batch[1]);
        const double *w = a->w.value + ((w3 * s->w_batch[0] + w2) * s->m + m) * s->k;
        const double *size = largest + ((w3 * s->w_batch[0] + w2) * s->m + m) * s->k;
        const int64_t column = ((i3 * s->x_batch[0] + i2) * s->n + n) * s->k;
        double t = 0, exact = 0, e = 0;
        for (int64_t k = 0; k < s->k; k++) {
            t += w[k] * x[column + k];
            exact += w[k] * a->x.value[column + k];
            e += size[k] * fabs(x[column + k]);
        }
        a->exact[i] = exact;
        e *= unit / 2 * (double)(s->k / 8 + 16);
        if (s->rank > 0) {
            double sum = 0, size_of = 0;
            for (int64_t r = 0; r < s->rank; r++) {
                const double product =
                    a->lora_b.value[m * s->rank + r] * a->lora_t.value[n * s->rank + r];
                sum += product;
                size_of += fabs(product);
            }
            const double scale = s->lora_scale != 0 ? (double)s->lora_scale : 1;
            t += scale * sum;
            e += unit * (fabs(t) + fabs(scale) * size_of * (double)(s->rank + 1) / 2);
        }
        if (s->has_bias) {
            t += a->bias.value[m];
            e += unit * fabs(t);
        }
        if (s->activation != ROCQ_ACT_IDENTITY) {
            e = 1.2 * e + 8 * unit * fabs(t); // no activation is steeper than 1.13
            t = activate(s->activation, t);
        }
        if (s->softcap > 0) {
            e += 8 * unit * fabs(t);
            t = s->softcap * tanh(t / s->softcap);
        }
        if (s->has_gate) {
            t *= a->gate.value[i];
            e = e * fabs(a->gate.value[i]) + unit * fabs(t);
        }
        if (s->has_residual) {
            t += a->residual.value[i];
            e += unit * (fabs(t) + fabs(a->residual.value[i]));
        }
        if (s->y == ROCQ_F16) e += 0x1p-11 * (fabs(t) + e) + 0x1p-25;
        a->want[i] = t;
        a->slack[i] = e;
    }
    free(largest);
    free(x);
}

static box operand(const shape *s, bool present, rocq_format format) {
    box b;
    memset(&b, 0, sizeof b);
    if (!present) return b;
    return box_random(s->y_layout, format, 1, s->m, s->n, s->x_batch[0], s->x_batch[1]);
}

// Operands, params and a reference. Sizes and batches left 0 are 1.
static problem make(shape s) {
    problem a;
    memset(&a, 0, sizeof a);
    for (int i = 0; i < 2; i++) {
        if (!s.w_batch[i]) s.w_batch[i] = 1;
        if (!s.x_batch[i]) s.x_batch[i] = 1;
    }
    a.s = s;
    a.w = box_make(s.w_layout, s.w, s.k, s.m, s.w_batch[0], s.w_batch[1]);
    random_weights(&a.w);
    a.x = box_random(s.x_layout, s.x, 1, s.k, s.n, s.x_batch[0], s.x_batch[1]);
    if (s.has_bias) a.bias = box_random(BOX_PLAIN, ROCQ_F32, 1, s.m, 1, 1, 1);
    a.gate = operand(&s, s.has_gate, s.in_place == Y_IS_GATE ? s.y : s.gate);
    a.residual = operand(&s, s.has_residual, s.in_place == Y_IS_RESIDUAL ? s.y : s.residual);
    if (s.rank > 0) {
        a.lora_b = box_random(s.y_layout, s.lora, 1, s.rank, s.m, 1, 1);
        a.lora_t = box_random(s.x_layout, ROCQ_F32, 1, s.rank, s.n, 1, 1);
    }
    a.y = box_make(s.y_layout, s.y, s.m, s.n, s.x_batch[0], s.x_batch[1]);
    a.exact = (double *)malloc((size_t)a.y.count * sizeof(double));
    a.want = (double *)malloc((size_t)a.y.count * sizeof(double));
    a.slack = (double *)malloc((size_t)a.y.count * sizeof(double));
    assert_true(a.exact && a.want && a.slack);
    reference(&a);
    return a;
}

static void destroy(problem *a) {
    boxes_free(&a->w, &a->x, &a->y, &a->bias, &a->gate, &a->residual, &a->lora_b, &a->lora_t);
    free(a->exact);
    free(a->want);
    free(a->slack);
}

// The tensors' addresses are those of a, which must not move from here on.
static void set_params(problem *a) {
    memset(&a->p, 0, sizeof a->p);
    a->p.y = &a->y.t;
    a->p.w = &a->w.t;
    a->p.x = &a->x.t;
    a->p.bias = a->s.has_bias ? &a->bias.t : NULL;
    a->p.gate = a->s.has_gate ? a->s.in_place == Y_IS_GATE ? &a->y.t : &a->gate.t : NULL;
    a->p.residual = a->s.has_residual
                        ? a->s.in_place == Y_IS_RESIDUAL ? &a->y.t : &a->residual.t : NULL;
    a->p.activation = a->s.activation;
    a->p.softcap = a->s.softcap;
    a->p.precision = precision_of(&a->s);
    a->p.lora_b = a->s.rank > 0 ? &a->lora_b.t : NULL;
    a->p.lora_t = a->s.rank > 0 ? &a->lora_t.t : NULL;
    a->p.lora_scale = a->s.lora_scale;
}

// y before the call: NaN, or the operand that it is in place of.
static void reset_y(problem *a) {
    memset(a->y.memory, 0xff, (size_t)a->y.size);
    const box *from = a->s.in_place == Y_IS_GATE ? &a->gate : &a->residual;
    if (a->s.in_place == SEPARATE) return;
    for (int64_t r = 0; r < box_rows(&a->y); r++) {
        memcpy(box_row(&a->y, r), box_row(from, r), (size_t)box_row_size(&a->y));
    }
}

static void check_y(problem *a, const char *how) {
    const shape *s = &a->s;
    rocq_precision_info contract;
    box_read(&a->y);
    box_check_outside(&a->y);
    for (int64_t i = 0; i < a->y.count; i++) {
        if (!(fabs(a->y.value[i] - a->want[i]) <= a->slack[i])) {
            fail_msg("%s x %s, precision %d, m %d n %d k %d, %s: y[%d] is %.9g, not %.9g +- %.2g",
                     name_of(s->w), name_of(s->x), (int)s->precision, (int)s->m, (int)s->n,
                     (int)s->k, how, (int)i, a->y.value[i], a->want[i], a->slack[i]);
        }
    }
    // A few numbers may all be small by chance, and their errors then are not.
    const bool plain = !s->has_bias && !s->has_gate && !s->has_residual &&
                       s->activation == ROCQ_ACT_IDENTITY && s->softcap == 0 && s->y == ROCQ_F32 &&
                       s->rank == 0;
    if (!plain || a->y.count < 256) return;
    const double e = nmse(ROCQ_F32, a->y.value, a->exact, a->y.count);
    assert_int_equal(rocq_get_precision(contexts[1][0], ROCQ_OP_MATMUL, &a->p, &contract), ROCQ_OK);
    assert_int_equal(contract.precision, precision_of(s));
    if (!(e <= contract.nmse)) {
        fail_msg("%s x %s, precision %d, k %d, %s: NMSE %g", name_of(s->w), name_of(s->x),
                 (int)s->precision, (int)s->k, how, e);
    }
}

// Lets the SIMD contexts use a tier's instructions, as far as the CPU has them. A tier that it
// lacks is the one before. Behind the last is AVX-512 without AVX-VNNI and VBMI, as older
// processors have it.
enum { WIDE_ALONE = ROCQ_CPU_AVX512 + 1 };
// Whatever the processor, the contexts of five threads read memory in order, the others in streams.
static void use_tier(int tier) {
    static int has_vbmi = -1;
    if (has_vbmi < 0) has_vbmi = *inside_has_vbmi(contexts[1][0]); // as it was opened
    for (int i = 0; i < N_THREAD_COUNTS; i++) {
        const bool vnni = inside_cpu_has(ROCQ_CPU_AVX_VNNI), wide = inside_cpu_has(ROCQ_CPU_AVX512);
        rocq_ctx *ctx = contexts[1][i];
        *inside_has_avx_vnni(ctx) = tier >= ROCQ_CPU_AVX_VNNI && tier < WIDE_ALONE && vnni;
        *inside_has_avx512(ctx) = tier >= ROCQ_CPU_AVX512 && wide;
        *inside_has_vbmi(ctx) = tier == ROCQ_CPU_AVX512 && has_vbmi;
        *inside_has_sdot(ctx) = tier >= ROCQ_CPU_SDOT && vnni; // of Arm
        *inside_reads_in_order(ctx) = i == N_THREAD_COUNTS - 1;
    }
}

// In every tier, on 1, 2 and 5 threads; INT8 gives the same bits throughout, and the tiers above
// SIMD give those of SIMD. y is left as the last made it.
static void solve(problem *a) {
    box *y = &a->y;
    unsigned char *before = (unsigned char *)malloc((size_t)y->size);
    assert_non_null(before);
    set_params(a);
    for (int tier = ROCQ_CPU_PLAIN; tier <= WIDE_ALONE; tier++) {
        const char *name = tier == WIDE_ALONE ? "AVX-512 without AVX-VNNI and VBMI"
                                              : inside_cpu_tier_name((rocq_cpu_tier)tier);
        use_tier(tier);
        reset_y(a);
        run(tier > ROCQ_CPU_PLAIN, ROCQ_OP_MATMUL, &a->p, &y, 1);
        check_y(a, name);
        const bool same = tier > ROCQ_CPU_SIMD || (tier == ROCQ_CPU_SIMD &&
                                                   precision_of(&a->s) == ROCQ_PRECISION_INT8);
        if (same && !same_bytes(before, y->memory, y->size)) {
            fail_msg("%s x %s: bits of %s and of the tier before differ", name_of(a->s.w),
                     name_of(a->s.x), name);
        }
        memcpy(before, y->memory, (size_t)y->size);
    }
    free(before);
}

// m rows and n columns of the problem as a problem of its own: the same bits as in the whole.
static void check_part(const problem *a, int simd, int64_t m0, int64_t m, int64_t n0, int64_t n) {
    const int64_t w_start[4] = {0, m0, 0, 0}, w_ne[4] = {a->s.k, m, 1, 1};
    const int64_t x_start[4] = {0, n0, 0, 0}, x_ne[4] = {a->s.k, n, 1, 1};
    box y = box_make(BOX_STRIDED, a->s.y, m, n, 1, 1);
    rocq_tensor w, x;
    assert_int_equal(rocq_tensor_view(&w, &a->w.t, w_start, w_ne), ROCQ_OK);
    assert_int_equal(rocq_tensor_view(&x, &a->x.t, x_start, x_ne), ROCQ_OK);
    rocq_matmul_params p = {.y = &y.t, .w = &w, .x = &x, .precision = precision_of(&a->s)};
    rocq_tensor b, t;
    if (a->s.rank > 0) {
        b = rocq_tensor_slice(&a->lora_b.t, 1, m0, m);
        t = rocq_tensor_slice(&a->lora_t.t, 1, n0, n);
        p.lora_b = &b;
        p.lora_t = &t;
        p.lora_scale = a->s.lora_scale;
    }
    rocq_ctx *ctx = contexts[simd][1];
    // The parts of one_format come in 32, in fours of eights: from problem to problem each meets
    // another tier.
    static int turn;
    use_tier(ROCQ_CPU_SIMD + (turn + turn / 8 + turn / 32) % 4);
    turn++;
    inside_spoil_scratch(ctx);
    assert_int_equal(rocq_matmul(ctx, &p), ROCQ_OK);
    use_tier(ROCQ_CPU_AVX512);
    box_check_outside(&y);
    for (int64_t c = 0; c < n; c++) {
        const unsigned char *whole = box_row(&a->y, n0 + c) + m0 * 4;
        if (!same_bytes(box_row(&y, c), whole, m * 4)) {
            fail_msg("%s x %s, precision %d, k %d: column %d differs when %d x %d are computed",
                     name_of(a->s.w), name_of(a->s.x), (int)a->s.precision, (int)a->s.k,
                     (int)(n0 + c), (int)m, (int)n);
        }
    }
    box_free(&y);
}

// -- tests --

// Every format x operand x precision x K; then every m and n as a part of the largest.
static void one_format(rocq_format format) {
    static const rocq_format xs[] = {ROCQ_F32, ROCQ_F16, ROCQ_Q8_0};
    static const int64_t ms[] = {1, 3, 17, 33}, ns[] = {1, 2, 3, 4, 5, 8, 17, 33};
    const int64_t elems = block_elems(format);
    for (int x = 0; x < 3; x++) {
        const int64_t unit = xs[x] == ROCQ_Q8_0 && elems == 1 ? 32 : elems;
        // Short blocks are taken four or two at a time, and what is left two or one at a time.
        const int64_t ks[6] = {unit, unit * (unit == 1 ? 37 : 3), unit == 1 ? 519 : 512 + unit,
                               6 * unit, 7 * unit, 8 * unit};
        const int n_ks = unit > 1 && unit < 256 ? 6 : 3;
        for (int precision = ROCQ_PRECISION_F32; precision <= ROCQ_PRECISION_INT8; precision++) {
            if (precision == ROCQ_PRECISION_INT8 && !has_int8(format)) continue;
            for (int k = 0; k < n_ks; k++) {
                const shape s = {.w = format, .x = xs[x], .precision = (rocq_precision)precision,
                                 .m = 33, .n = 33, .k = ks[k], .w_layout = (box_layout)(k % 2),
                                 .x_layout = (box_layout)(precision % 2), .y_layout = BOX_STRIDED};
                problem a = make(s);
                solve(&a);
                for (int m = 0; m < 4; m++) {
                    for (int n = 0; n < 8; n++) {
                        const int64_t m0 = m % 2 ? 0 : 33 - ms[m], n0 = n % 2 ? 33 - ns[n] : 0;
                        check_part(&a, 1, m0, ms[m], n0, ns[n]);
                    }
                }
                destroy(&a);
            }
        }
    }
}

#define ROCQ_X(NAME, name, id, elems, bytes) \
    static void format_##name(void **state) { \
        (void)state;                          \
        one_format(ROCQ_##NAME);              \
    }
ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X

// More columns than a tile has, and more rows than a tile and a chunk of a thread; a lone column of
// many rows, which 64-byte passes read, also in streams (rocq__mm_column_sums).
static void tiles(void **state) {
    static const rocq_format formats[] = {
        ROCQ_Q4_0, ROCQ_Q4_1, ROCQ_Q5_0, ROCQ_Q5_1,   ROCQ_Q8_0,   ROCQ_Q2_K,
        ROCQ_Q3_K, ROCQ_Q4_K, ROCQ_Q5_K, ROCQ_Q6_K,   ROCQ_IQ4_NL, ROCQ_IQ4_XS,
        ROCQ_MXFP4, ROCQ_NVFP4, ROCQ_TQ1_0, ROCQ_TQ2_0, ROCQ_F16,  ROCQ_F32};
    (void)state;
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++) {
        const shape s = {.w = formats[f], .x = ROCQ_F32, .m = 75, .n = 261, .k = 256};
        problem a = make(s);
        solve(&a);
        for (int64_t n = 15; n <= 18; n++) {
            check_part(&a, 1, 0, 75, 120, n);
            if (has_int8(s.w)) check_part(&a, 0, 0, 75, 120, n); // the whole is SIMD's
        }
        check_part(&a, 1, 3, 41, 0, 129);
        check_part(&a, 1, 3, 72, 133, 128);
        destroy(&a);
        for (int i = 0; i < 2; i++) {
            const shape tall = {.w = formats[f], .x = ROCQ_F32, .m = i ? 2061 : 1029, .n = 1,
                                .k = i ? 1024 : 256 + block_elems(formats[f])};
            problem b = make(tall);
            solve(&b);
            destroy(&b);
        }
    }
}

// Two and three columns, whose panels are decoded by the blocks of the pass for one where a format
// has such a decoder: whole pairs of panels, whole tiles and rows left over, K of one block, of
// four and of more than a segment. A column has the bits that it has alone, and products of a
// chain, one of them with a w2 of another format, have those of the products by themselves.
static void few_columns(void **state) {
    static const int64_t ms[] = {16, 37, 150};
    (void)state;
    for (int i = 0; i < 18 * N_FORMATS; i++) {
        const rocq_format format = all_formats[i / 18];
        const rocq_format other = all_formats[(i / 18 + 1) % N_FORMATS];
        if (!has_int8(format)) continue;
        const int64_t elems = block_elems(format), ks[] = {elems, 4 * elems, 768};
        const shape s = {.w = format, .x = ROCQ_F32, .m = ms[i % 3], .n = 2 + i / 3 % 2,
                         .k = ks[i / 6 % 3], .w_layout = (box_layout)(i % 2),
                         .x_layout = BOX_STRIDED, .y_layout = BOX_STRIDED};
        problem a = make(s);
        solve(&a);
        for (int64_t c = 0; c < s.n; c++) {
            for (int tier = 0; tier < 4; tier++) check_part(&a, 1, 0, s.m, c, 1);
        }
        if (has_int8(other) && s.k % block_elems(other) == 0) {
            const shape s2 = {.w = other, .x = ROCQ_F32, .m = s.m, .n = s.n, .k = s.k,
                              .y_layout = BOX_STRIDED};
            problem b = make(s2);
            box both = box_make(BOX_STRIDED, ROCQ_F32, s.m, s.n, 1, 1);
            box *alone = &b.y, *out[2] = {&both, &a.y};
            set_params(&b);
            b.p.x = &a.x.t;
            run(1, ROCQ_OP_MATMUL, &b.p, &alone, 1);
            box_read(&a.y);
            box_read(&b.y);
            double *want = (double *)malloc((size_t)a.y.count * 2 * sizeof(double));
            assert_non_null(want);
            for (int64_t e = 0; e < a.y.count; e++) { // as floats are multiplied
                want[e] = (double)((float)a.y.value[e] * (float)b.y.value[e]);
                want[a.y.count + e] = a.y.value[e];
            }
            rocq_matmul_params p[2] = {a.p, a.p};
            p[0].y = &both.t;
            p[0].w2 = &b.w.t;
            p[0].next = &p[1];
            run(1, ROCQ_OP_MATMUL, p, out, 2);
            for (int j = 0; j < 2; j++) {
                box_read(out[j]);
                box_check_outside(out[j]);
                assert_true(same_bytes(out[j]->value, want + j * a.y.count,
                                       a.y.count * (int64_t)sizeof(double)));
            }
            free(want);
            box_free(&both);
            destroy(&b);
        }
        destroy(&a);
    }
}

// A lone column of floats and a long K: the contexts that read memory in order multiply row by row
// (rocq__dot_row), four segments at once, then one by one, of which the last may be shorter. The
// others multiply eight rows at a time, and many columns have no other way: the same bits.
static void long_rows_of_floats(void **state) {
    static const rocq_format formats[] = {ROCQ_F32, ROCQ_F16, ROCQ_BF16};
    static const int64_t ks[] = {2040, 2048, 2056, 4096 + 512 + 16, 4100};
    (void)state;
    for (int i = 0; i < 15; i++) {
        shape s = {.w = formats[i / 5], .x = ROCQ_F32, .m = 11, .n = 18, .k = ks[i % 5],
                   .w_layout = i % 2 ? BOX_STRIDED : BOX_PLAIN, .y_layout = BOX_STRIDED};
        problem a = make(s);
        solve(&a);
        for (int c = 0; c < 18; c++) check_part(&a, 1, c % 3, 8 + c % 2, c, 1);
        destroy(&a);
        s.n = 1;
        a = make(s);
        solve(&a);
        destroy(&a);
    }
}

// -- rows that lie interleaved --

static const rocq_format interleaved_formats[] = {ROCQ_Q4_0, ROCQ_Q8_0, ROCQ_Q4_K, ROCQ_Q5_K,
                                                  ROCQ_Q6_K};
enum { N_INTERLEAVED = sizeof interleaved_formats / sizeof interleaved_formats[0] };

// A copy of a box without gaps; the caller frees the memory.
static rocq_tensor interleaved(const box *b) {
    const int64_t size = rocq_tensor_size(&b->t);
    rocq_tensor t;
    void *memory = malloc((size_t)size);
    assert_non_null(memory);
    memset(memory, 0xff, (size_t)size);
    assert_int_equal(rocq_tensor_from_host(&t, memory, b->t.format, b->t.n_dims, b->t.ne), ROCQ_OK);
    t.layout = ROCQ_LAYOUT_INTERLEAVED;
    assert_int_equal(rocq_upload(contexts[1][1], &t, rocq_tensor_data(&b->t), size), ROCQ_OK);
    return t;
}

// In every tier the bits of the file's layout.
static void solve_interleaved(problem *a) {
    box *y = &a->y;
    rocq_tensor w = interleaved(&a->w);
    unsigned char *before = (unsigned char *)malloc((size_t)y->size);
    assert_non_null(before);
    solve(a);
    for (int tier = ROCQ_CPU_PLAIN; tier <= ROCQ_CPU_AVX512; tier++) {
        use_tier(tier);
        for (int i = 0; i < 2; i++) {
            a->p.w = i ? &w : &a->w.t;
            reset_y(a);
            run(tier > ROCQ_CPU_PLAIN, ROCQ_OP_MATMUL, &a->p, &y, 1);
            box_check_outside(y);
            if (i == 0) memcpy(before, y->memory, (size_t)y->size);
        }
        if (!same_bytes(before, y->memory, y->size)) {
            fail_msg("%s, m %d n %d k %d, precision %d, %s: interleaved rows give other bits",
                     name_of(a->s.w), (int)a->s.m, (int)a->s.n, (int)a->s.k, (int)a->s.precision,
                     inside_cpu_tier_name((rocq_cpu_tier)tier));
        }
    }
    free(before);
    free(rocq_tensor_data(&w));
}

// AVX2, AVX-VNNI and AVX-512 read interleaved rows as they lie, a lone column's with a pass of the
// format's own; AVX-VNNI takes AVX2's for K formats. None of them falls back to rows that are
// copied first, as all other code does.
static void interleaved_rows_are_not_copied(void **state) {
    const bool avx2 = inside_cpu_has(ROCQ_CPU_SIMD) &&
                      !strcmp(inside_cpu_tier_name(ROCQ_CPU_SIMD), "AVX2"); // not NEON
    void (*passes[3 * N_INTERLEAVED])(void);
    int n_passes = 0;
    (void)state;
    for (int i = 0; i < 6 * N_INTERLEAVED; i++) {
        const rocq_cpu_tier tier = (rocq_cpu_tier)(ROCQ_CPU_SIMD + i / 2 % 3);
        const bool one = i % 2;
        const shape s = {.w = interleaved_formats[i / 6], .x = ROCQ_F32, .m = 32,
                         .n = one ? 1 : 2, .k = 256};
        problem a = make(s);
        rocq_tensor w = interleaved(&a.w);
        set_params(&a);
        a.p.w = &w;
        use_tier(tier);
        const inside_mm mm = inside_mm_plan(contexts[1][1], &a.p, s.n);
        if (avx2) {
            assert_true(one ? mm.pass && mm.wide_pass : mm.pack_pair != NULL);
            const bool own = tier != ROCQ_CPU_AVX_VNNI || i / 6 < 2;
            if (one && own && inside_cpu_has(tier)) passes[n_passes++] = mm.wide_pass;
            if (!own && one) assert_true(mm.wide_pass == passes[n_passes - 1]);
        } else {
            assert_true(!mm.pass && !mm.wide_pass && !mm.pack_pair);
        }
        use_tier(ROCQ_CPU_AVX512);
        free(rocq_tensor_data(&w));
        destroy(&a);
    }
    for (int i = 0; i < n_passes; i++) {
        for (int j = 0; j < i; j++) assert_true(passes[i] != passes[j]);
    }
}

static void interleaved_rows(void **state) {
    static const int64_t m[] = {16, 48, 80, 272}, n[] = {1, 2, 9, 33, 130};
    (void)state;
    for (int f = 0; f < N_INTERLEAVED; f++) {
        for (int i = 0; i < 20; i++) {
            shape s = {.w = interleaved_formats[f], .x = i % 3 == 1 ? ROCQ_F16 : ROCQ_F32,
                       .m = m[i % 4], .n = n[i / 4], .k = 256 * (1 + i % 3),
                       .precision = i % 7 == 3   ? ROCQ_PRECISION_F32
                                    : i % 7 == 5 ? ROCQ_PRECISION_F16 : ROCQ_PRECISION_AUTO};
            if (f < 2 && i % 5 == 2) s.k += 96;
            if (i % 4 == 2) s.rank = 8, s.lora = ROCQ_F16;
            if (i % 6 == 1) s.has_bias = s.has_gate = true, s.gate = ROCQ_F32;
            problem a = make(s);
            solve_interleaved(&a);
            destroy(&a);
        }
        // in streams, and several matrices
        const shape streams = {.w = interleaved_formats[f], .x = ROCQ_F32, .m = 1136, .n = 1,
                               .k = 256};
        const shape batch = {.w = interleaved_formats[f], .x = ROCQ_F32, .m = 32, .n = 3, .k = 256,
                             .w_batch = {3, 2}, .x_batch = {6, 2}};
        problem a = make(streams), b = make(batch);
        solve_interleaved(&a);
        solve_interleaved(&b);
        destroy(&a);
        destroy(&b);
    }
}

// gather, cast and the gradient of a product's input read such a matrix, too, by decoding its rows.
static void interleaved_rows_are_decoded(void **state) {
    enum { K = 512, M = 48, N = 5 };
    (void)state;
    for (int f = 0; f < N_INTERLEAVED; f++) {
        box w = box_random(BOX_PLAIN, interleaved_formats[f], 1.0f, K, M, 1, 1);
        rocq_tensor table = interleaved(&w);
        int32_t rows[N] = {47, 0, 16, 31, 15};
        const int64_t n[1] = {N}, dy_ne[2] = {M, N};
        float dy_values[M * N];
        rocq_tensor ids, dy;
        box y[2] = {box_make(BOX_PLAIN, ROCQ_F32, K, N, 1, 1),
                    box_make(BOX_PLAIN, ROCQ_F32, K, N, 1, 1)};
        for (int i = 0; i < M * N; i++) dy_values[i] = (float)(i * 7 % 23) - 11.0f;
        assert_int_equal(rocq_tensor_from_host(&ids, rows, ROCQ_I32, 1, n), ROCQ_OK);
        assert_int_equal(rocq_tensor_from_host(&dy, dy_values, ROCQ_F32, 2, dy_ne), ROCQ_OK);
        for (int simd = 0; simd < 2; simd++) {
            for (int op = 0; op < 2; op++) {
                for (int i = 0; i < 2; i++) {
                    const rocq_tensor *from = i ? &table : &w.t;
                    const rocq_gather_params gather = {.y = &y[i].t, .table = from, .ids = &ids};
                    const rocq_matmul_backward_params back = {.dx = &y[i].t, .dy = &dy, .w = from};
                    memset(y[i].memory, 0xff, (size_t)y[i].size);
                    assert_int_equal(op ? rocq_matmul_backward(contexts[simd][1], &back)
                                        : rocq_gather(contexts[simd][1], &gather), ROCQ_OK);
                    box_check_outside(&y[i]);
                }
                assert_true(same_bytes(y[0].memory, y[1].memory, y[0].size));
                box_read(&y[1]);
                for (int64_t k = 0; op == 0 && k < K * N; k++) { // the decoded values themselves
                    assert_true(y[1].value[k] == w.value[rows[k / K] * K + k % K]);
                }
            }
        }
        // cast gives the values, or the matrix as a file has it
        box floats = box_make(BOX_STRIDED, ROCQ_F32, K, M, 1, 1);
        box same = box_make(BOX_STRIDED, w.t.format, K, M, 1, 1);
        for (int i = 0; i < 2; i++) {
            box *to = i ? &same : &floats;
            const rocq_cast_params cast = {.y = &to->t, .x = &table};
            memset(to->memory, 0xff, (size_t)to->size);
            assert_int_equal(rocq_cast(contexts[1][1], &cast), ROCQ_OK);
            box_read(to);
            box_check_outside(to);
            for (int64_t k = 0; k < K * M; k++) assert_true(to->value[k] == w.value[k]);
        }
        for (int64_t r = 0; r < M; r++) {
            assert_true(same_bytes(box_row(&same, r), box_row(&w, r), box_row_size(&w)));
        }
        rocq_tensor plain = table;
        plain.layout = ROCQ_LAYOUT_GGUF;
        const rocq_cast_params in_place = {.y = &plain, .x = &table};
        assert_int_equal(rocq_cast(contexts[1][1], &in_place), ROCQ_E_ARGUMENT);
        for (int i = 0; i < 2; i++) box_free(&y[i]);
        box_free(&floats);
        box_free(&same);
        box_free(&w);
        free(rocq_tensor_data(&table));
    }
}

static void interleaved_rows_that_are_refused(void **state) {
    enum { K = 256, M = 32 };
    static unsigned char memory[K * (M + 16) * 4];
    static float out[K * M];
    rocq_ctx *ctx = contexts[1][1];
    rocq_tensor t, view, x, y;
    const int64_t ne[2] = {K, M}, few[2] = {K, M - 8}, start[4] = {0}, part[4] = {K, 16, 1, 1};
    const int64_t other[2] = {2 * K, M / 2}, x_ne[1] = {K}, y_ne[1] = {M};
    const int32_t axes[4] = {0, 1, 2, 3};
    (void)state;
    assert_int_equal(rocq_tensor_from_host(&t, memory, ROCQ_Q4_0, 2, ne), ROCQ_OK);
    t.layout = ROCQ_LAYOUT_INTERLEAVED;
    // no part of it is a tensor
    assert_int_equal(rocq_tensor_view(&view, &t, start, part), ROCQ_E_UNSUPPORTED);
    assert_int_equal(rocq_tensor_reshape(&view, &t, 2, other), ROCQ_E_UNSUPPORTED);
    assert_int_equal(rocq_tensor_permute(&view, &t, axes), ROCQ_E_UNSUPPORTED);
    assert_int_equal(rocq_tensor_slice(&t, 1, 0, 16).n_dims, 0);
    assert_int_equal(rocq_tensor_heads(&t, 64).n_dims, 0);
    assert_int_equal(rocq_download(ctx, out, &t, rocq_tensor_size(&t)), ROCQ_E_UNSUPPORTED);
    assert_non_null(strstr(rocq_error(ctx), "cannot be interleaved"));
    // an op that does not take it, a format that does not come in it, rows that do not fill it
    assert_int_equal(rocq_tensor_from_host(&y, out, ROCQ_F32, 2, ne), ROCQ_OK);
    const rocq_cast_params cast = {.y = &t, .x = &y};
    assert_int_equal(rocq_cast(ctx, &cast), ROCQ_E_UNSUPPORTED);
    assert_int_equal(rocq_tensor_from_host(&x, out, ROCQ_F32, 1, x_ne), ROCQ_OK);
    assert_int_equal(rocq_tensor_from_host(&y, out + K, ROCQ_F32, 1, y_ne), ROCQ_OK);
    const rocq_matmul_params product = {.y = &y, .w = &t, .x = &x};
    assert_int_equal(rocq_matmul(ctx, &product), ROCQ_OK);
    t.format = ROCQ_Q5_0;
    t.buffer.size = sizeof memory;
    assert_int_equal(rocq_matmul(ctx, &product), ROCQ_E_UNSUPPORTED);
    t.format = ROCQ_Q4_0;
    t.ne[1] = y.ne[0] = M - 8;
    assert_int_equal(rocq_matmul(ctx, &product), ROCQ_E_SHAPE);
    t.ne[1] = y.ne[0] = M;
    t.stride[1] = 2 * K;
    assert_int_equal(rocq_matmul(ctx, &product), ROCQ_E_SHAPE);
    assert_int_equal(rocq_tensor_from_host(&t, memory, ROCQ_Q4_0, 2, few), ROCQ_OK);
    t.layout = ROCQ_LAYOUT_INTERLEAVED;
    assert_int_equal(rocq_upload(ctx, &t, memory + 8, rocq_tensor_size(&t)), ROCQ_E_SHAPE);
}

// Threads take larger parts of a lone column's product where its matrix is read in streams, and of
// no other product.
static void only_streams_are_taken_together(void **state) {
    const bool wide = inside_cpu_has(ROCQ_CPU_AVX512);
    (void)state;
    for (int i = 0; i < 16; i++) {
        const bool one = i & 1, quantized = i & 2, tier = i & 4, streams = i & 8;
        rocq_ctx *ctx = contexts[1][streams ? 1 : N_THREAD_COUNTS - 1]; // see use_tier
        const shape s = {.w = quantized ? ROCQ_Q4_K : ROCQ_F16, .x = ROCQ_F32, .m = 64,
                         .n = one ? 1 : 2, .k = 256};
        problem a = make(s);
        set_params(&a);
        use_tier(tier ? ROCQ_CPU_AVX512 : ROCQ_CPU_AVX_VNNI);
        const inside_plan plan = inside_plan_matmul(ctx, &a.p, 0, 0);
        assert_int_equal(plan.n_stages, 2);
        assert_int_equal(plan.together > 0, one && quantized && tier && wide && streams);
        use_tier(ROCQ_CPU_AVX512);
        destroy(&a);
    }
}

// What a lone column's product reads first: of w2, then of w, from the first row of the share on.
static void a_share_reads_its_first_rows_first(void **state) {
    const int64_t most = inside_mm_ahead();
    (void)state;
    for (int i = 0; i < 8; i++) {
        const bool one = i & 1, two = i & 2, tall = i & 4;
        const shape s = {.w = ROCQ_Q8_0, .x = ROCQ_F32, .m = tall ? 1040 : 80, .n = one ? 1 : 2,
                         .k = 256};
        const int64_t row = 272, begin = 2, end = tall ? 65 : 5;
        problem a = make(s), b = make(s);
        set_params(&a);
        if (two) a.p.w2 = &b.w.t;
        const inside_plan plan = inside_plan_matmul(contexts[1][1], &a.p, begin, end);
        assert_int_equal(plan.has_reads, one);
        if (one) {
            const int64_t panel = (s.m + plan.n - 1) / plan.n; // rows of an item
            const int64_t bytes = (end - begin) * panel * row;
            const int64_t half = tall ? most / 2 : bytes;
            const rocq_tensor *first = two ? &b.w.t : &a.w.t;
            assert_true(!tall || bytes > most);
            assert_ptr_equal(plan.at[0], inside_row(first, begin * panel, 0, 0));
            assert_int_equal(plan.bytes[0], two ? half : tall ? most : bytes);
            assert_int_equal(plan.bytes[1], two ? half : 0);
            if (two) assert_ptr_equal(plan.at[1], inside_row(&a.w.t, begin * panel, 0, 0));
            assert_int_equal(plan.bytes[2], 0);
        }
        destroy(&a);
        destroy(&b);
    }
}

// Activations as real models have them: a few channels far above the rest, in every token.
static void outliers(void **state) {
    (void)state;
    for (int f = 0; f < N_FORMATS; f++) {
        const shape s = {.w = all_formats[f], .x = ROCQ_F32, .m = 64, .n = 17, .k = 1024};
        problem a = make(s);
        for (int64_t i = 0; i < a.x.count; i++) {
            const int64_t k = i % s.k;
            if (k == 7 || k == 300 || k == 301 || k == 999) a.x.value[i] *= k == 7 ? 500 : 60;
        }
        box_write(&a.x);
        reference(&a);
        solve(&a);
        destroy(&a);
    }
}

// All bits of w and all codes of x at their ends, where a sum of products could leave its type.
// Columns are 127, -127, -128, the first two in turn, and anything; first all of them, then each
// alone, which a pass multiplies.
static void extreme_codes(void **state) {
    (void)state;
    for (int part = 0; part < 6 * N_FORMATS; part++) {
        const int first = part % 6 ? part % 6 - 1 : 0;
        const shape s = {.w = all_formats[part / 6], .x = ROCQ_Q8_0, .m = 16,
                         .n = part % 6 ? 1 : 5, .k = 512};
        const rocq_format_info *info = rocq_get_format_info(s.w);
        problem a = make(s);
        for (int64_t r = 0; r < s.m && has_int8(s.w); r++) {
            for (int64_t i = 0; i < s.k / info->block_elems; i++) {
                unsigned char *block = box_row(&a.w, r) + i * info->block_bytes, kept[512];
                memcpy(kept, block, (size_t)info->block_bytes);
                memset(block, r % 2 ? 0xff : 0, (size_t)info->block_bytes);
                // Scales of F16 come back: a block of nothing but ones is NaN in most formats.
                switch (s.w) {
                case ROCQ_Q2_K: memcpy(block + 80, kept + 80, 4); break;
                case ROCQ_Q3_K: memcpy(block + 108, kept + 108, 2); break;
                case ROCQ_Q6_K: memcpy(block + 208, kept + 208, 2); break;
                case ROCQ_MXFP4: case ROCQ_MXFP6_E2M3: block[0] = kept[0]; break;
                case ROCQ_IQ1_M: memcpy(block + 48, kept + 48, 8); break;
                case ROCQ_TQ1_0: memcpy(block + 52, kept + 52, 2); break;
                case ROCQ_TQ2_0: memcpy(block + 64, kept + 64, 2); break;
                case ROCQ_Q4_1: case ROCQ_Q5_1: case ROCQ_Q4_K: case ROCQ_Q5_K: case ROCQ_NVFP4:
                    memcpy(block, kept, 4);
                    break;
                default: memcpy(block, kept, 2); break;
                }
                if (s.w == ROCQ_Q8_0) memset(block + 2, r % 4 ? 0x80 : 0x7f, 32);
            }
        }
        box_read(&a.w);
        for (int64_t n = 0; n < s.n; n++) {
            for (int64_t i = 0; i < s.k / 32; i++) {
                rocq_block_q8_0 *block = (rocq_block_q8_0 *)(void *)box_row(&a.x, n) + i;
                static const int8_t codes[3] = {127, -127, -128};
                for (int j = 0; j < 32; j++) {
                    const int64_t c = first + n;
                    block->qs[j] = c < 3 ? codes[c] : c == 3 ? codes[j % 2] : (int8_t)random_u64();
                }
            }
        }
        box_read(&a.x);
        reference(&a);
        if (inside_interleaves(s.w)) solve_interleaved(&a);
        else solve(&a);
        destroy(&a);
    }
}

// Every E8M0 exponent, up to where F32 ends, and NaN; every scale of NVFP4. All elements of a row
// are the same.
static void block_exponents(void **state) {
    static const rocq_format formats[] = {ROCQ_MXFP4, ROCQ_MXFP6_E2M3, ROCQ_MXFP6_E3M2, ROCQ_NVFP4};
    (void)state;
    for (int c = 0; c < 8; c++) {
        const int f = c % 4;
        const shape s = {.w = formats[f], .x = ROCQ_F32, .m = 256, .n = 1 + c / 4,
                         .k = 4 * block_elems(formats[f])};
        const int64_t bytes = rocq_get_format_info(formats[f])->block_bytes;
        problem a = make(s);
        for (int64_t r = 0; r < s.m; r++) {
            memset(box_row(&a.w, r), r % 2 ? 0xff : 0x55, (size_t)box_row_size(&a.w));
            for (int64_t b = 0; b < 4; b++) {
                memset(box_row(&a.w, r) + b * bytes, (int)r, formats[f] == ROCQ_NVFP4 ? 4 : 1);
            }
        }
        for (int64_t i = 0; i < a.x.count; i++) a.x.value[i] = i % 2 ? 0.25 : -0.125;
        box_write(&a.x);
        box_read(&a.w);
        reference(&a);
        set_params(&a);
        for (int simd = 0; simd < 2; simd++) {
            box *y = &a.y;
            reset_y(&a);
            run(simd, ROCQ_OP_MATMUL, &a.p, &y, 1);
            box_read(y);
            for (int64_t i = 0; i < y->count; i++) {
                // The scales' product may be a subnormal number: the sum of 32 products of codes
                // up to 60 and 127 multiplies that rounding, in each of four blocks.
                const double e = a.slack[i] + 0x1p-150 * 4 * 32 * 60 * 127;
                // Decoded, w is beyond F32, or the sum is.
                if (isinf(a.w.value[i % s.m * s.k]) || fabs(a.want[i]) > 0x1p127) continue;
                if (isnan(a.want[i]) != isnan(y->value[i]) || fabs(y->value[i] - a.want[i]) > e) {
                    fail_msg("%s, exponent %d: %g, expected %g", name_of(s.w), (int)(i % 256),
                             y->value[i], a.want[i]);
                }
            }
        }
        destroy(&a);
    }
}

// Each step of the epilogue alone, and all together, in both formats and in place.
static void epilogues(void **state) {
    static const rocq_format floats[] = {ROCQ_F32, ROCQ_F16};
    (void)state;
    for (int w = 0; w < 2; w++) {
        for (int f = 0; f < 4; f++) {
            const shape plain = {.w = w ? ROCQ_Q5_K : ROCQ_F32, .x = ROCQ_F32, .y = floats[f % 2],
                                 .gate = floats[f / 2], .residual = floats[1 - f / 2],
                                 .m = 37, .n = 19, .k = 256, .y_layout = (box_layout)(f % 3)};
            for (int step = 0; step < 18; step++) {
                const bool most = step >= 10 && step < 16;
                shape s = plain;
                s.has_bias = step == 1 || most;
                s.rank = step >= 15 ? 5 : 0; // beside all others, and alone
                s.lora = floats[(step + f) % 2];
                s.lora_scale = -0.3f;
                if (step >= 2 && step <= 6) s.activation = (rocq_activation)(step - 1);
                if (step == 17) s.activation = ROCQ_ACT_SIGMOID;
                if (most) s.activation = (rocq_activation)(step - 10);
                s.softcap = step == 7 ? 3.0f : most ? 5.0f : 0.0f;
                s.has_gate = step == 8 || most;
                s.has_residual = step == 9 || most;
                problem a = make(s);
                solve(&a);
                destroy(&a);
                for (int place = Y_IS_RESIDUAL; place <= Y_IS_GATE; place++) {
                    if (!(place == Y_IS_GATE ? s.has_gate : s.has_residual)) continue;
                    s.in_place = place == Y_IS_GATE ? Y_IS_GATE : Y_IS_RESIDUAL;
                    a = make(s);
                    solve(&a);
                    destroy(&a);
                }
            }
        }
    }
}

// Low-rank adapters: ranks of no, one and several vectors and the highest, one column, few and
// many; the bits of a part are those of the whole.
static void adapters(void **state) {
    static const rocq_format formats[] = {ROCQ_Q4_K, ROCQ_Q8_0, ROCQ_F16, ROCQ_F32};
    static const int64_t ranks[] = {1, 3, 8, 16, 37, 72, 512};
    (void)state;
    for (int f = 0; f < 4; f++) {
        for (int r = 0; r < 7; r++) {
            const shape s = {.w = formats[f], .x = ROCQ_F32, .m = r % 2 ? 75 : 33, .n = 35,
                             .k = 256, .rank = ranks[r], .lora = (f + r) % 2 ? ROCQ_F16 : ROCQ_F32,
                             .lora_scale = r % 3 ? 0.25f : 0.0f, .x_layout = (box_layout)(r % 3),
                             .y_layout = r % 2 ? BOX_PLAIN : BOX_STRIDED};
            problem a = make(s);
            solve(&a);
            check_part(&a, 1, 0, s.m, 7, 1);
            check_part(&a, 1, 5, 17, 3, 4);
            check_part(&a, 1, 1, 24, 2, 33);
            if (has_int8(s.w)) check_part(&a, 0, 0, s.m, 7, 1); // the whole is SIMD's
            destroy(&a);
        }
    }
}

// Columns of a batch that use different adapters: they lie behind each other, and a gate of zeros
// in the product that makes lora_t chooses. Each column has the bits of its own adapter alone, and
// one without any those of the product without an adapter.
static void adapter_by_column(void **state) {
    enum { K = 96, M = 40, N = 5, R = 8, N_ADAPTERS = 3 };
    static const int own[N] = {1, -1, 0, 2, 1};
    rocq_ctx *ctx = contexts[1][1];
    box x = box_random(BOX_PLAIN, ROCQ_F32, 1, K, N, 1, 1),
        w = box_make(BOX_PLAIN, ROCQ_Q8_0, K, M, 1, 1);
    box down = box_random(BOX_PLAIN, ROCQ_F16, 1, K, R * N_ADAPTERS, 1, 1);
    box up = box_random(BOX_PLAIN, ROCQ_F16, 1, R * N_ADAPTERS, M, 1, 1);
    box gate = box_make(BOX_PLAIN, ROCQ_F32, R * N_ADAPTERS, N, 1, 1);
    box t = box_make(BOX_PLAIN, ROCQ_F32, R * N_ADAPTERS, N, 1, 1);
    box y = box_make(BOX_PLAIN, ROCQ_F32, M, N, 1, 1),
        alone = box_make(BOX_PLAIN, ROCQ_F32, M, N, 1, 1);
    (void)state;
    random_weights(&w);
    for (int64_t i = 0; i < gate.count; i++) {
        gate.value[i] = i % (R * N_ADAPTERS) / R == own[i / (R * N_ADAPTERS)] ? 0.5 : 0;
    }
    box_write(&gate);
    const rocq_matmul_params low = {.y = &t.t, .w = &down.t, .x = &x.t, .gate = &gate.t};
    const rocq_matmul_params all = {.y = &y.t, .w = &w.t, .x = &x.t, .lora_b = &up.t,
                                    .lora_t = &t.t};
    assert_int_equal(rocq_matmul(ctx, &low), ROCQ_OK);
    assert_int_equal(rocq_matmul(ctx, &all), ROCQ_OK);
    for (int c = 0; c < N; c++) {
        const rocq_tensor column = rocq_tensor_slice(&x.t, 1, c, 1);
        const rocq_tensor out = rocq_tensor_slice(&alone.t, 1, c, 1);
        const int64_t first = own[c] < 0 ? 0 : own[c] * R;
        const rocq_tensor a = rocq_tensor_slice(&down.t, 1, first, R);
        const rocq_tensor b = rocq_tensor_slice(&up.t, 0, first, R);
        const rocq_tensor of_t = rocq_tensor_slice(&t.t, 1, c, 1);
        const rocq_tensor some = rocq_tensor_slice(&of_t, 0, 0, R);
        const rocq_matmul_params part = {.y = &some, .w = &a, .x = &column};
        rocq_matmul_params one = {.y = &out, .w = &w.t, .x = &column};
        if (own[c] >= 0) {
            assert_int_equal(rocq_matmul(ctx, &part), ROCQ_OK);
            one.lora_b = &b;
            one.lora_t = &some;
            one.lora_scale = 0.5f;
        }
        assert_int_equal(rocq_matmul(ctx, &one), ROCQ_OK);
    }
    assert_true(same_bytes(y.memory, alone.memory, y.size));
    box *boxes[] = {&x, &w, &down, &up, &gate, &t, &y, &alone};
    for (size_t i = 0; i < sizeof boxes / sizeof *boxes; i++) box_free(boxes[i]);
}

static void wrong_adapters(void **state) {
    box w = box_make(BOX_PLAIN, ROCQ_F32, 8, 4, 1, 1),
        x = box_random(BOX_PLAIN, ROCQ_F32, 1, 8, 2, 1, 1);
    box y = box_make(BOX_PLAIN, ROCQ_F32, 4, 2, 1, 1), *out = &y;
    box b = box_random(BOX_PLAIN, ROCQ_F32, 1, 3, 4, 1, 1),
        t = box_random(BOX_PLAIN, ROCQ_F32, 1, 3, 2, 1, 1);
    box few = box_random(BOX_PLAIN, ROCQ_F32, 1, 3, 1, 1, 1),
        half = box_random(BOX_PLAIN, ROCQ_F16, 1, 3, 2, 1, 1);
    box high = box_random(BOX_PLAIN, ROCQ_F32, 1, 513, 4, 1, 1),
        high_t = box_random(BOX_PLAIN, ROCQ_F32, 1, 513, 2, 1, 1);
    box deep_x = box_random(BOX_PLAIN, ROCQ_F32, 1, 8, 2, 3, 1),
        deep_y = box_make(BOX_PLAIN, ROCQ_F32, 4, 2, 3, 1), *deep = &deep_y;
    const rocq_matmul_params fine = {.y = &y.t, .w = &w.t, .x = &x.t, .lora_b = &b.t,
                                     .lora_t = &t.t};
    rocq_matmul_params p;
    (void)state;
    random_weights(&w);
#define WRONG(change, result, out) p = fine; change; run_fails(ROCQ_OP_MATMUL, &p, result, out, 1)
    WRONG(p.lora_t = NULL, ROCQ_E_ARGUMENT, &out);
    WRONG(p.lora_b = NULL, ROCQ_E_ARGUMENT, &out);
    WRONG((p.lora_b2 = &b.t, p.lora_t2 = &t.t), ROCQ_E_ARGUMENT, &out); // without w2
    WRONG((p.w2 = &w.t, p.lora_b2 = &b.t), ROCQ_E_ARGUMENT, &out);
    WRONG(p.lora_b = &t.t, ROCQ_E_SHAPE, &out);
    WRONG(p.lora_t = &few.t, ROCQ_E_SHAPE, &out);
    WRONG(p.lora_t = &x.t, ROCQ_E_SHAPE, &out);
    WRONG(p.lora_t = &half.t, ROCQ_E_FORMAT, &out);
    WRONG((p.lora_b = &high.t, p.lora_t = &high_t.t), ROCQ_E_UNSUPPORTED, &out);
    WRONG((p.x = &deep_x.t, p.y = &deep_y.t), ROCQ_E_UNSUPPORTED, &deep);
    WRONG(p.lora_scale = NAN, ROCQ_E_ARGUMENT, &out);
    rocq_tensor same = y.t; // what is written is read
    same.ne[0] = 3;
    WRONG(p.lora_t = &same, ROCQ_E_ARGUMENT, &out);
#undef WRONG
    assert_int_equal(rocq_matmul(contexts[1][1], &fine), ROCQ_OK);
    box *boxes[] = {&w, &x, &y, &b, &t, &few, &half, &high, &high_t, &deep_x, &deep_y};
    for (size_t i = 0; i < sizeof boxes / sizeof *boxes; i++) box_free(boxes[i]);
}

// Batches, shared by all ratios of w's to x's, in every memory layout.
static void batches(void **state) {
    static const int64_t counts[][4] = { // of w, of x
        {1, 1, 3, 1}, {1, 1, 1, 3}, {1, 1, 3, 2}, {3, 1, 3, 2},
        {2, 3, 2, 3}, {2, 3, 4, 9}, {1, 2, 5, 2}};
    static const rocq_format formats[] = {ROCQ_F16, ROCQ_Q4_0, ROCQ_Q6_K};
    (void)state;
    for (int f = 0; f < 3; f++) {
        for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
            for (int layout = 0; layout < 9; layout++) {
                const shape s = {.w = formats[f], .x = layout % 2 ? ROCQ_F16 : ROCQ_F32,
                                 .m = 9, .n = 5, .k = 256, .w_batch = {counts[i][0], counts[i][1]},
                                 .x_batch = {counts[i][2], counts[i][3]},
                                 .w_layout = (box_layout)(layout % 3),
                                 .x_layout = (box_layout)(layout / 3),
                                 .y_layout = (box_layout)((layout + 1) % 3),
                                 .residual = ROCQ_F32, .has_residual = layout % 3 == 0};
                problem a = make(s);
                solve(&a);
                destroy(&a);
            }
        }
    }
}

// w2, next and y in Q8_0 are what the same products give one by one: w2's times the rest before the
// residual, each of a chain as if alone, and Q8_0 as if cast.
static void fused(void **state) {
    // all pairs: which of them may read the same converted columns depends on both
    static const rocq_format formats[] = {ROCQ_F32,  ROCQ_BF16, ROCQ_Q4_0, ROCQ_Q4_1, ROCQ_Q8_0,
                                          ROCQ_Q2_K, ROCQ_Q4_K, ROCQ_Q6_K, ROCQ_MXFP6_E3M2};
    (void)state;
    for (int i = 0; i < 3 * 81; i++) {
        const int64_t m = 64, n = 1 + i / 81 * 8, k = 256, batch = 1 + i / 3 % 2;
        const rocq_format f = formats[i % 9], f2 = formats[i / 9 % 9];
        const box_layout layout = (box_layout)(i % 3);
        box x = box_random(layout, i % 2 ? ROCQ_F16 : ROCQ_F32, 1, k, n, batch, 1);
        box w[3], y[3], alone[3];
        for (int j = 0; j < 3; j++) {
            w[j] = box_make((box_layout)(j % 2), j == 1 ? f2 : f, k, m, 1, 1);
            random_weights(&w[j]);
            y[j] = box_make((box_layout)((i + j) % 3), j == 2 ? ROCQ_Q8_0 : ROCQ_F32, m, n, batch,
                            1);
            alone[j] = box_make(BOX_PLAIN, ROCQ_F32, m, n, batch, 1);
        }
        box bias = box_random(BOX_PLAIN, ROCQ_F32, 1, m, 1, 1, 1);
        box gate = box_random(BOX_STRIDED, ROCQ_F16, 1, m, n, batch, 1);
        box residual = box_random(BOX_PLAIN, ROCQ_F32, 1, m, n, batch, 1);
        box cast = box_make(BOX_PLAIN, ROCQ_Q8_0, m, n, batch, 1);
        const bool adapted = batch == 1 && i % 2;
        box b[2], t[2];
        for (int j = 0; j < 2; j++) {
            b[j] = box_random(BOX_STRIDED, j ? ROCQ_F32 : ROCQ_F16, 0.1f, 6 + 3 * j, m, 1, 1);
            t[j] = box_random(BOX_PLAIN, ROCQ_F32, 1, 6 + 3 * j, n, 1, 1);
        }
        rocq_matmul_params p[3] = {
            {.y = &alone[0].t, .w = &w[0].t, .x = &x.t, .bias = &bias.t,
             .gate = i % 4 ? &gate.t : NULL, .activation = ROCQ_ACT_SILU,
             .softcap = i % 5 ? 0.0f : 3.0f},
            {.y = &alone[1].t, .w = &w[1].t, .x = &x.t},
            {.y = &alone[2].t, .w = &w[2].t, .x = &x.t, .bias = &bias.t}};
        box *out[] = {&y[0], &y[1], &y[2]};
        for (int j = 0; j < 2 && adapted; j++) {
            p[j].lora_b = &b[j].t;
            p[j].lora_t = &t[j].t;
            p[j].lora_scale = 1.5f;
        }
        for (int j = 0; j < 3; j++) {
            box *one = &alone[j];
            run(i % 2, ROCQ_OP_MATMUL, &p[j], &one, 1);
            box_read(&alone[j]);
        }
        const rocq_cast_params to_q8_0 = {.y = &cast.t, .x = &alone[2].t};
        box *one = &cast;
        run(i % 2, ROCQ_OP_CAST, &to_q8_0, &one, 1);

        for (int j = 0; j < 3; j++) p[j].y = &y[j].t;
        p[0].w2 = &w[1].t;
        p[0].lora_b2 = p[1].lora_b;
        p[0].lora_t2 = p[1].lora_t;
        p[0].residual = &residual.t;
        p[0].next = &p[1];
        p[1].next = &p[2];
        run(i % 2, ROCQ_OP_MATMUL, &p[0], out, 3);
        for (int j = 0; j < 3; j++) {
            box_read(&y[j]);
            box_check_outside(&y[j]);
        }
        box_read(&cast);
        double *want = (double *)malloc((size_t)y[0].count * sizeof(double));
        assert_non_null(want);
        for (int64_t e = 0; e < y[0].count; e++) {
            want[e] = alone[0].value[e] * alone[1].value[e] + residual.value[e];
        }
        check_rows(&y[0], want, 1e-13);
        assert_true(same_bytes(y[1].value, alone[1].value, y[1].count * (int64_t)sizeof(double)));
        assert_true(same_bytes(y[2].value, cast.value, y[2].count * (int64_t)sizeof(double)));
        free(want);
        for (int j = 0; j < 3; j++) {
            boxes_free(&w[j], &y[j], &alone[j]);
        }
        for (int j = 0; j < 2; j++) {
            boxes_free(&b[j], &t[j]);
        }
        boxes_free(&x, &bias, &gate, &residual, &cast);
    }
}

static void wrong_chains(void **state) {
    box w = box_make(BOX_PLAIN, ROCQ_F32, 8, 4, 1, 1),
        wide = box_make(BOX_PLAIN, ROCQ_F32, 8, 5, 1, 1);
    box x = box_random(BOX_PLAIN, ROCQ_F32, 1, 8, 2, 1, 1),
        x2 = box_random(BOX_PLAIN, ROCQ_F32, 1, 8, 2, 1, 1);
    box y = box_make(BOX_PLAIN, ROCQ_F32, 4, 2, 1, 1),
        y2 = box_make(BOX_PLAIN, ROCQ_F32, 4, 2, 1, 1);
    box *out[] = {&y, &y2};
    rocq_matmul_params second = {.y = &y2.t, .w = &w.t, .x = &x.t};
    rocq_matmul_params first = {.y = &y.t, .w = &w.t, .x = &x.t, .next = &second};
    (void)state;
    random_weights(&w);
    random_weights(&wide);
    second.x = &x2.t; // all products of a chain have one x
    run_fails(ROCQ_OP_MATMUL, &first, ROCQ_E_ARGUMENT, out, 2);
    second.x = &x.t;
    second.y = &y.t; // two products that write the same
    run_fails(ROCQ_OP_MATMUL, &first, ROCQ_E_ARGUMENT, out, 2);
    second.y = &y2.t;
    second.gate = &y.t; // one that reads what the other writes
    run_fails(ROCQ_OP_MATMUL, &first, ROCQ_E_ARGUMENT, out, 2);
    second.gate = NULL;
    second.next = &first; // a circle
    run_fails(ROCQ_OP_MATMUL, &first, ROCQ_E_ARGUMENT, out, 2);
    second.next = NULL;
    second.w = &wide.t; // the last of a chain is checked before the first runs
    run_fails(ROCQ_OP_MATMUL, &first, ROCQ_E_SHAPE, out, 2);
    second.w = &w.t;
    first.w2 = &wide.t;
    run_fails(ROCQ_OP_MATMUL, &first, ROCQ_E_SHAPE, out, 2);
    boxes_free(&w, &wide, &x, &x2, &y, &y2);
}

// The outputs of a chain may be columns of one tensor, but neither on one another nor, but for its
// own gate, on what any product of the chain reads.
static void chains_into_columns(void **state) {
    (void)state;
    enum { K = 64, M = 32, N = 3 };
    rocq_ctx *ctx = contexts[1][1];
    box x = box_random(BOX_PLAIN, ROCQ_F32, 1, K, N, 1, 1);
    box fused = box_random(BOX_PLAIN, ROCQ_F32, 1, 4 * M, N, 1, 1), *out = &fused;
    box w[3], alone[3], got = box_make(BOX_PLAIN, ROCQ_F32, M, N, 1, 1);
    rocq_tensor y[4];
    rocq_matmul_params p[3];
    memset(p, 0, sizeof p);
    for (int i = 0; i < 4; i++) {
        const int64_t start[4] = {i * M, 0, 0, 0}, ne[4] = {M, N, 1, 1};
        assert_int_equal(rocq_tensor_view(&y[i], &fused.t, start, ne), ROCQ_OK);
    }
    for (int i = 0; i < 3; i++) {
        w[i] = box_make(BOX_PLAIN, ROCQ_Q8_0, K, M, 1, 1);
        random_weights(&w[i]);
        alone[i] = box_make(BOX_PLAIN, ROCQ_F32, M, N, 1, 1);
        p[i].y = &alone[i].t;
        p[i].w = &w[i].t;
        p[i].x = &x.t;
        p[i].gate = i == 2 ? &y[3] : NULL; // a column that nobody writes
        assert_int_equal(rocq_matmul(ctx, &p[i]), ROCQ_OK);
    }
    for (int i = 0; i < 3; i++) {
        p[i].y = &y[i];
        p[i].next = i < 2 ? &p[i + 1] : NULL;
    }
    rocq_tensor wrong = y[1];
    wrong.offset -= 4; // its first element is the last of the column before
    p[1].y = &wrong;
    run_fails(ROCQ_OP_MATMUL, p, ROCQ_E_ARGUMENT, &out, 1);
    p[1].y = &y[1];
    p[2].gate = &y[0];
    run_fails(ROCQ_OP_MATMUL, p, ROCQ_E_ARGUMENT, &out, 1);
    p[2].gate = &y[3];
    assert_int_equal(rocq_matmul(ctx, p), ROCQ_OK);
    for (int i = 0; i < 3; i++) {
        const rocq_cast_params copy = {.y = &got.t, .x = &y[i]};
        assert_int_equal(rocq_cast(ctx, &copy), ROCQ_OK);
        assert_memory_equal(got.memory, alone[i].memory, (size_t)got.size);
        boxes_free(&w[i], &alone[i]);
    }
    boxes_free(&x, &fused, &got);
}

// One column seen n times through a stride of 0, and one row of w seen m times.
static void repeated_rows(void **state) {
    (void)state;
    for (int f = 0; f < 2; f++) {
        const shape s = {.w = f ? ROCQ_Q4_K : ROCQ_F32, .x = ROCQ_F32, .m = 1, .n = 1, .k = 256};
        problem a = make(s);
        solve(&a);
        box y = box_make(BOX_STRIDED, ROCQ_F32, 11, 6, 1, 1);
        rocq_tensor w = a.w.t, x = a.x.t;
        w.ne[1] = 11;
        x.ne[1] = 6;
        w.stride[1] = x.stride[1] = 0;
        const rocq_matmul_params p = {.y = &y.t, .w = &w, .x = &x,
                                      .precision = precision_of(&a.s)};
        assert_int_equal(rocq_matmul(contexts[1][1], &p), ROCQ_OK);
        box_check_outside(&y);
        for (int64_t c = 0; c < 6; c++) {
            for (int64_t m = 0; m < 11; m++) {
                assert_true(same_bytes(box_row(&y, c) + 4 * m, box_row(&a.y, 0), 4));
            }
        }
        box_free(&y);
        destroy(&a);
    }
}

// NaN and infinity stay visible in their own column, and only there; zeros give zeros, and numbers
// too small for a scale next to nothing.
static void special_values(void **state) {
    static const float specials[] = {NAN, INFINITY, -INFINITY};
    (void)state;
    for (int f = 0; f < N_FORMATS; f++) {
        for (int special = 0; special < 3; special++) {
            const shape s = {.w = all_formats[f], .x = special == 1 ? ROCQ_F16 : ROCQ_F32,
                             .m = 33, .n = 7, .k = 256};
            problem a = make(s);
            box *y = &a.y;
            unsigned char *scalar = (unsigned char *)malloc((size_t)y->size);
            assert_non_null(scalar);
            for (int64_t k = 0; k < s.k; k++) {
                a.x.value[2 * s.k + k] = k % 2 ? 0.0 : -0.0;
                a.x.value[5 * s.k + k] = s.x == ROCQ_F32 ? 1e-38 : 0.0;
            }
            box_write(&a.x);
            if (s.x == ROCQ_F32) {
                ((float *)(void *)box_row(&a.x, 3))[201] = specials[special];
            } else {
                ((uint16_t *)(void *)box_row(&a.x, 3))[201] = rocq_f32_to_f16(specials[special]);
            }
            set_params(&a);
            for (int simd = 0; simd < 2; simd++) {
                reset_y(&a);
                run(simd, ROCQ_OP_MATMUL, &a.p, &y, 1);
                box_read(y);
                for (int64_t i = 0; i < y->count; i++) {
                    const double got = y->value[i];
                    const int64_t n = i / s.m;
                    const bool right = n == 3   ? !isfinite(got)
                                       : n == 2 ? got == 0
                                       : n == 5 ? fabs(got) < 1e-33
                                                : isfinite(got);
                    if (!right) {
                        fail_msg("%s: with %g in column 3, column %d became %g", name_of(s.w),
                                 (double)specials[special], (int)n, got);
                    }
                }
                if (!simd) memcpy(scalar, y->memory, (size_t)y->size);
            }
            assert_true(!has_int8(s.w) || same_bytes(scalar, y->memory, y->size));
            free(scalar);
            destroy(&a);
        }
    }
}

// INT8 without integer codes is refused.
static void refusals(void **state) {
    (void)state;
    for (int f = 0; f < N_FORMATS; f++) {
        const shape s = {.w = all_formats[f], .x = ROCQ_F32, .m = 3, .n = 2, .k = 256,
                         .precision = ROCQ_PRECISION_INT8};
        if (has_int8(s.w)) continue;
        problem a = make(s);
        box *y = &a.y;
        set_params(&a);
        run_fails(ROCQ_OP_MATMUL, &a.p, ROCQ_E_UNSUPPORTED, &y, 1);
        destroy(&a);
    }
}

// Each side's error against float64 is its own rounding of x. Where there are enough columns to
// even out chance, ours is at most a quarter above ggml's.
static void agrees_with_ggml(void **state) {
    static const int64_t ns[] = {1, 5, 33};
    (void)state;
    ggml_api g = ggml_open();
    void *(*mul_mat)(void *, void *, void *) = NULL;
    ggml_symbol(g.base, "ggml_mul_mat", &mul_mat);
    print_message("NMSE           ours, ggml's against float64; ours against ggml's\n");
    for (int f = 0; f < N_FORMATS; f++) {
        if (all_formats[f] == ROCQ_MXFP6_E2M3 || all_formats[f] == ROCQ_MXFP6_E3M2) continue;
        for (int n = 0; n < 3; n++) {
            const shape s = {.w = all_formats[f], .x = ROCQ_F32, .m = 256, .n = ns[n], .k = 1024};
            problem a = make(s);
            set_params(&a);
            assert_int_equal(rocq_matmul(contexts[1][0], &a.p), ROCQ_OK);
            check_y(&a, "SIMD");
            double *theirs = (double *)malloc((size_t)a.y.count * sizeof(double));
            assert_non_null(theirs);
            void *w = ggml_from(&g, &a.w), *x = ggml_from(&g, &a.x);
            ggml_run(&g, mul_mat(g.ctx, w, x), theirs, a.y.count);
            const double ours_error = nmse(ROCQ_F32, a.y.value, a.exact, a.y.count);
            const double their_error = nmse(ROCQ_F32, theirs, a.exact, a.y.count);
            const double between = nmse(ROCQ_F32, a.y.value, theirs, a.y.count);
            print_message("%-7s n=%-3d %.2e %.2e; %.2e\n", name_of(s.w), (int)s.n, ours_error,
                          their_error, between);
            assert_true(between <= 5e-4);
            if (s.n == 33) assert_true(ours_error <= 1.25 * their_error + 1e-12);
            free(theirs);
            destroy(&a);
        }
    }
    ggml_close(&g);
}

int main(void) {
    const struct CMUnitTest tests[] = {
#define ROCQ_X(NAME, name, id, elems, bytes) cmocka_unit_test(format_##name),
        ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
        cmocka_unit_test(interleaved_rows), cmocka_unit_test(interleaved_rows_are_decoded),
        cmocka_unit_test(interleaved_rows_are_not_copied),
        cmocka_unit_test(interleaved_rows_that_are_refused),
        cmocka_unit_test(tiles), cmocka_unit_test(few_columns),
        cmocka_unit_test(long_rows_of_floats),
        cmocka_unit_test(only_streams_are_taken_together),
        cmocka_unit_test(a_share_reads_its_first_rows_first),
        cmocka_unit_test(outliers),
        cmocka_unit_test(extreme_codes),
        cmocka_unit_test(block_exponents),
        cmocka_unit_test(epilogues),
        cmocka_unit_test(adapters),
        cmocka_unit_test(adapter_by_column),
        cmocka_unit_test(wrong_adapters),
        cmocka_unit_test(batches),
        cmocka_unit_test(fused),
        cmocka_unit_test(wrong_chains),
        cmocka_unit_test(chains_into_columns),
        cmocka_unit_test(repeated_rows),
        cmocka_unit_test(special_values),
        cmocka_unit_test(refusals),
        cmocka_unit_test(agrees_with_ggml),
    };
    return cmocka_run_group_tests_name("matmul", tests, open_contexts, close_contexts);
}
