// Convolution, the statistics of its norms, resize and pixels: against float64 references in every
// option, format and layout, against one another (tiles and the whole picture, chunks and the whole
// video), and against PyTorch.
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "ops.h"
#include "lend.h"

#define BOUND 1e-9 // NMSE of F32 arithmetic; the contract says 1e-6
#define ULP 0x1p-24 // half of the distance from 1 to the next float

static double *doubles(int64_t n) {
    double *p = (double *)malloc((size_t)n * sizeof(double));
    assert_non_null(p);
    return p;
}

// Runs with a tier's instructions; one that the CPU lacks is the one before.
static void run_tier(rocq_cpu_tier tier, rocq_op op, const void *params, box *const *outputs,
                     int n_outputs) {
    for (int i = 0; i < N_THREAD_COUNTS; i++) {
        *inside_has_avx512(contexts[1][i]) =
            tier == ROCQ_CPU_AVX512 && inside_cpu_has(ROCQ_CPU_AVX512);
    }
    run(tier > ROCQ_CPU_PLAIN, op, params, outputs, n_outputs);
}

static const rocq_format floats[] = {ROCQ_F32, ROCQ_F16, ROCQ_BF16};
static const rocq_format formats[] = {
#define ROCQ_X(NAME, name, id, elems, bytes) ROCQ_##NAME,
    ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
};
enum { N_FORMATS = (int)(sizeof formats / sizeof formats[0]) };

// -- conv --

enum { NO_STATS, SHARED_GROUPS, GROUPS, POSITIONS };       // which norm of x
enum { NO_RESIDUAL, OTHER_RESIDUAL, IN_PLACE_RESIDUAL };

typedef struct conv_case {
    int32_t kw, kh, kt, stride, upsample, pad_x, pad_y; // as in the params
    int64_t c, w, h, m, ow, oh, frames, past;           // frames of y; of x before those
    int stats, residual;
    int64_t groups;
    bool norm_weight, norm_bias, bias, folded;
    rocq_activation x_activation, activation;
    rocq_format w_format, x_format, y_format, residual_format;
    box_layout w_layout, x_layout, y_layout;
} conv_case;

// The operands of a case, and y in float64 with a bound of the error of F32 arithmetic.
typedef struct conv_problem {
    conv_case s;
    rocq_conv_params p;
    box x, w, y, bias, residual, stats, norm_weight, norm_bias;
    double *want, *slack;
} conv_problem;

static double activated(rocq_activation activation, double x) {
    switch (activation) {
    case ROCQ_ACT_SILU: return x / (1 + exp(-x));
    case ROCQ_ACT_GELU:
        return x / 2 * (1 + tanh(sqrt(2 / acos(-1.0)) * (x + 0.044715 * x * x * x)));
    case ROCQ_ACT_GELU_ERF: return x / 2 * erfc(-x / sqrt(2.0));
    case ROCQ_ACT_RELU: return x > 0 ? x : 0;
    case ROCQ_ACT_TANH: return tanh(x);
    case ROCQ_ACT_SIGMOID: return 1 / (1 + exp(-x));
    default: return x;
    }
}

static int32_t at_least_1(int32_t n) { return n < 1 ? 1 : n; }

static box no_box(void) {
    box b;
    memset(&b, 0, sizeof b);
    return b;
}

static conv_problem conv_make(const conv_case *s) {
    conv_problem a;
    memset(&a, 0, sizeof a);
    a.s = *s;
    const int64_t taps = s->folded ? 4 * at_least_1(s->kt)
                                   : at_least_1(s->kw) * at_least_1(s->kh) * at_least_1(s->kt);
    const int64_t k = s->c * taps, x_frames = s->frames + s->past;
    a.x = box_random(s->x_layout, s->x_format, 1, s->c, s->w, s->h, x_frames);
    a.w = box_make(s->w_layout, s->w_format, k, s->m, s->folded ? 4 : 1, 1);
    random_weights(&a.w);
    a.bias = s->bias ? box_random(BOX_PLAIN, ROCQ_F32, 1, s->m, 1, 1, 1) : no_box();
    a.norm_weight = s->norm_weight ? box_random(BOX_PLAIN, ROCQ_F32, 1, s->c, 1, 1, 1) : no_box();
    a.norm_bias = s->norm_bias ? box_random(BOX_PLAIN, ROCQ_F32, 1, s->c, 1, 1, 1) : no_box();
    if (s->stats == POSITIONS) {
        a.stats = box_make(s->x_layout, ROCQ_F32, 1, s->w, s->h, x_frames);
    } else if (s->stats != NO_STATS) {
        a.stats = box_make(s->x_layout, ROCQ_F32, 2, s->groups,
                           s->stats == SHARED_GROUPS ? 1 : x_frames, 1);
    }
    for (int64_t i = 0; i < a.stats.count; i++) {
        const bool mean = s->stats != POSITIONS && i % 2 == 0;
        a.stats.value[i] = mean ? random_normal() : random_in(0.5f, 2);
    }
    if (a.stats.count) box_write(&a.stats);
    if (s->residual == IN_PLACE_RESIDUAL) {
        a.residual = box_random(s->y_layout, s->y_format, 3, s->m, s->ow, s->oh, s->frames);
        a.y = a.residual; // the values of the residual are taken before the op writes y
    } else {
        a.y = box_make(s->y_layout, s->y_format, s->m, s->ow, s->oh, s->frames);
        if (s->residual) {
            a.residual = box_random((box_layout)((s->y_layout + 1) % 3), s->residual_format, 3,
                                    s->m, s->ow, s->oh, s->frames);
        }
    }
    return a;
}

// Tensors are in the problem itself, which the caller may have moved.
static void conv_set_params(conv_problem *a) {
    const conv_case *s = &a->s;
    const rocq_conv_params p = {
        .y = &a->y.t, .w = &a->w.t, .x = &a->x.t,
        .bias = s->bias ? &a->bias.t : NULL,
        .residual = s->residual == IN_PLACE_RESIDUAL ? &a->y.t
                    : s->residual                    ? &a->residual.t
                                                     : NULL,
        .stats = s->stats ? &a->stats.t : NULL,
        .norm_weight = s->norm_weight ? &a->norm_weight.t : NULL,
        .norm_bias = s->norm_bias ? &a->norm_bias.t : NULL,
        .kw = s->kw, .kh = s->kh, .kt = s->kt, .stride = s->stride, .upsample = s->upsample,
        .folded = s->folded, .pad_x = s->pad_x, .pad_y = s->pad_y,
        .x_activation = s->x_activation, .activation = s->activation};
    a->p = p;
}

static void conv_free(conv_problem *a) {
    boxes_free(&a->x, &a->w);
    if (a->s.residual != IN_PLACE_RESIDUAL) box_free(&a->residual);
    boxes_free(&a->y, &a->bias, &a->stats, &a->norm_weight, &a->norm_bias);
    free(a->want);
    free(a->slack);
}

// What x becomes before it is padded, at its own size, and how large the terms of it are.
static void conv_reference_z(const conv_problem *a, double *z, double *size) {
    const conv_case *s = &a->s;
    for (int64_t i = 0; i < a->x.count; i++) {
        const int64_t c = i % s->c, x1 = i / s->c % s->w, x2 = i / s->c / s->w % s->h,
                      it = i / s->c / s->w / s->h;
        double v = a->x.value[i];
        if (s->stats == POSITIONS) {
            v *= box_at(&a->stats, 0, x1, x2, it);
        } else if (s->stats) {
            const int64_t g = c / (s->c / s->groups), n = s->stats == SHARED_GROUPS ? 0 : it;
            v = (v - box_at(&a->stats, 0, g, n, 0)) * box_at(&a->stats, 1, g, n, 0);
        }
        if (s->norm_weight) v *= a->norm_weight.value[c];
        size[i] = fabs(v);
        if (s->norm_bias) v += a->norm_bias.value[c];
        if (s->norm_bias) size[i] += fabs(a->norm_bias.value[c]);
        size[i] *= s->x_activation ? 1.13 : 1; // the steepest slope of an activation
        z[i] = activated(s->x_activation, v);
    }
}

static int32_t padding(int32_t pad, int32_t taps) {
    return pad == 0 ? (taps - 1) / 2 : pad == -1 ? 0 : pad;
}

static int64_t half_down(int64_t n) { return n >= 0 ? n / 2 : -((1 - n) / 2); }

// Of folded weights, whose values are random and no sums of others: position (ox, oy) of y has the
// kernel for whether its first tap reads the first or the second copy of a position of x, and two
// taps in each direction, from that position on.
static void conv_reference(conv_problem *a) {
    const conv_case *s = &a->s;
    const int32_t up = s->folded ? 1 : at_least_1(s->upsample), stride = at_least_1(s->stride);
    const int32_t kw = s->folded ? 2 : at_least_1(s->kw), kh = s->folded ? 2 : at_least_1(s->kh);
    const int32_t kt = at_least_1(s->kt);
    const int32_t pad_x = padding(s->pad_x, at_least_1(s->kw));
    const int32_t pad_y = padding(s->pad_y, at_least_1(s->kh));
    double *z = doubles(a->x.count), *size = doubles(a->x.count);
    conv_reference_z(a, z, size);
    a->want = doubles(a->y.count);
    a->slack = doubles(a->y.count);
    for (int64_t i = 0; i < a->y.count; i++) {
        const int64_t m = i % s->m, ox = i / s->m % s->ow, oy = i / s->m / s->ow % s->oh,
                      ot = i / s->m / s->ow / s->oh;
        double sum = 0, terms = 0;
        int64_t x0 = ox * stride - pad_x, y0 = oy * stride - pad_y, kernel = 0;
        if (s->folded) {
            kernel = (x0 & 1) + 2 * (y0 & 1);
            x0 = half_down(x0);
            y0 = half_down(y0);
        }
        for (int32_t f = 0; f < kt; f++) {
            // the last tap of the last frame of y is the last frame of x
            const int64_t it = s->frames + s->past - 1 - (s->frames - 1 - ot) - (kt - 1 - f);
            for (int32_t j = 0; j < kh && it >= 0; j++) {
                const int64_t iy = y0 + j;
                for (int32_t t = 0; t < kw && iy >= 0 && iy < s->h * up; t++) {
                    const int64_t ix = x0 + t;
                    if (ix < 0 || ix >= s->w * up) continue;
                    const int64_t from = ((it * s->h + iy / up) * s->w + ix / up) * s->c;
                    const double *w = a->w.value + a->w.t.ne[0] * (m + s->m * kernel) +
                                      s->c * (t + kw * (j + (int64_t)kh * f));
                    for (int64_t c = 0; c < s->c; c++) {
                        sum += w[c] * z[from + c];
                        terms += fabs(w[c]) * size[from + c];
                    }
                }
            }
        }
        const double b = s->bias ? a->bias.value[m] : 0;
        const double r = s->residual ? a->residual.value[i] : 0;
        a->want[i] = activated(s->activation, sum + b + r);
        const double k = (double)a->w.t.ne[0];
        a->slack[i] = (terms + fabs(b) + fabs(r)) * (k + 16) * ULP * 1.2 +
                      8 * ULP * fabs(a->want[i]) + 1e-30;
    }
    free(z);
    free(size);
}

// Every element within what K roundings can do, and the sum of squared errors within the contract.
static void conv_check(conv_problem *a, const char *how) {
    box *y = &a->y;
    double error = 0, power = 0;
    const double k = (double)a->w.t.ne[0];
    double *residual = NULL;
    if (a->s.residual == IN_PLACE_RESIDUAL) {
        residual = doubles(y->count);
        memcpy(residual, y->value, (size_t)y->count * sizeof(double));
    }
    box_read(y);
    box_check_outside(y);
    for (int64_t i = 0; i < y->count; i++) {
        const double rounding = rounding_to(y->t.format, a->want[i]) * (1 + 1e-6);
        const double e = fabs(y->value[i] - a->want[i]), over = e <= rounding ? 0 : e - rounding;
        if (!(e <= rounding + a->slack[i])) {
            fail_msg("%s: element %lld is %.9g, expected %.9g (slack %g)", how, (long long)i,
                     y->value[i], a->want[i], a->slack[i]);
        }
        const double spread = a->slack[i] / ULP / k / sqrt(k); // of sums, if products are random
        error += over * over;
        power += fmax(a->want[i] * a->want[i], spread * spread);
    }
    if (!(error <= BOUND * power)) fail_msg("%s: NMSE %g", how, error / power);
    if (residual) memcpy(y->value, residual, (size_t)y->count * sizeof(double));
    free(residual);
}

// In every tier; those above SIMD have its bits.
static void conv_solve(const conv_case *s) {
    conv_problem a = conv_make(s);
    box *y = &a.y;
    unsigned char *before = (unsigned char *)malloc((size_t)y->size), *simd = NULL;
    char how[200];
    conv_set_params(&a);
    conv_reference(&a);
    assert_non_null(before);
    memcpy(before, y->memory, (size_t)y->size);
    for (int tier = ROCQ_CPU_PLAIN; tier <= ROCQ_CPU_AVX512; tier++) {
        if (tier == ROCQ_CPU_AVX_VNNI || !inside_cpu_has((rocq_cpu_tier)tier)) continue;
        snprintf(how, sizeof how,
                 "%s, %s, kernel %d %d %d, stride %d, upsample %d, x %lld %lld %lld, y %lld %lld "
                 "%lld of %s, stats %d", inside_cpu_tier_name((rocq_cpu_tier)tier),
                 rocq_format_name(s->w_format), s->kw, s->kh, s->kt, s->stride, s->upsample,
                 (long long)s->c, (long long)s->w, (long long)s->h, (long long)s->m,
                 (long long)s->ow, (long long)s->oh, rocq_format_name(s->y_format), s->stats);
        memcpy(y->memory, before, (size_t)y->size);
        run_tier((rocq_cpu_tier)tier, ROCQ_OP_CONV, &a.p, &y, 1);
        conv_check(&a, how);
        if (simd) assert_true(same_bytes(simd, y->memory, y->size));
        if (tier != ROCQ_CPU_SIMD) continue;
        simd = (unsigned char *)malloc((size_t)y->size);
        assert_non_null(simd);
        memcpy(simd, y->memory, (size_t)y->size);
    }
    free(simd);
    free(before);
    conv_free(&a);
}

// Sizes of y as far as the kernel reaches with this padding, and so many zeros past the edge.
static int64_t conv_size(int64_t n, int32_t up, int32_t stride, int32_t taps, int32_t pad,
                         int32_t past_edge) {
    const int64_t room = n * at_least_1(up) + padding(pad, taps) + past_edge - taps;
    return room < 0 ? 1 : room / at_least_1(stride) + 1;
}

static const struct { int32_t w, h, t; } kernels[] = {
    {0, 0, 0}, {1, 1, 1}, {3, 3, 0}, {5, 5, 1}, {7, 7, 0}, {1, 7, 1}, {7, 1, 0},
    {3, 3, 3}, {1, 1, 3}, {3, 5, 2}, {0, 3, 7}};
static const int64_t picture_sizes[][2] = {{1, 1}, {7, 5}, {13, 9}, {26, 3}};
static const int64_t small_sizes[][2] = {{1, 1}, {3, 2}, {4, 3}, {5, 1}}; // for long sums
static const int64_t widths[] = {1, 3, 8, 17, 32, 50}, depths[] = {1, 3, 16, 40};
static const int32_t frames[] = {1, 2, 4};

enum {
    O_KERNEL, O_STRIDE, O_UPSAMPLE, O_PAD, O_SIZE, O_DEPTH, O_WIDTH, O_FRAMES, O_PAST, O_STATS,
    O_NORM, O_X_ACTIVATION, O_ACTIVATION, O_BIAS, O_RESIDUAL, O_W, O_X, O_Y, O_R, O_W_LAYOUT,
    O_X_LAYOUT, O_Y_LAYOUT, N_OPTIONS, MOST_VALUES = 40
};
static const int n_values[N_OPTIONS] = {
    (int)(sizeof kernels / sizeof kernels[0]), 3, 3, 4, 4, 4, 6, 3, 3, 4, 4, 6, 6, 2, 3, N_FORMATS,
    3, 3, 3, 2, 3, 3};

static conv_case case_of(const int *o) {
    conv_case s;
    memset(&s, 0, sizeof s);
    const int32_t kw = at_least_1(kernels[o[O_KERNEL]].w), kh = at_least_1(kernels[o[O_KERNEL]].h),
                  kt = at_least_1(kernels[o[O_KERNEL]].t);
    s.kw = kernels[o[O_KERNEL]].w;
    s.kh = kernels[o[O_KERNEL]].h;
    s.kt = kernels[o[O_KERNEL]].t;
    s.stride = o[O_STRIDE];
    s.upsample = o[O_UPSAMPLE];
    // 0: the default, 1: none left and above, but one right and below, as AutoencoderKL's encoder,
    // 2: as far left as it goes, none right, 3: none at all
    s.pad_x = o[O_PAD] == 0 ? 0 : o[O_PAD] == 2 && kw > 1 ? kw - 1 : -1;
    s.pad_y = o[O_PAD] == 0 ? 0 : o[O_PAD] == 2 && kh > 1 ? kh - 1 : -1;
    s.w_format = formats[o[O_W]];
    const int64_t elems = block_elems(s.w_format);
    s.c = elems == 1 ? depths[o[O_DEPTH]] : elems * (elems == 32 ? 1 + o[O_DEPTH] % 2 : 1);
    const bool large = s.c * kw * kh * kt > 1500;
    s.w = (large ? small_sizes : picture_sizes)[o[O_SIZE]][0];
    s.h = (large ? small_sizes : picture_sizes)[o[O_SIZE]][1];
    const int32_t x_past = o[O_PAD] == 0 ? kw / 2 : o[O_PAD] == 1 && kw > 1;
    const int32_t y_past = o[O_PAD] == 0 ? kh / 2 : o[O_PAD] == 1 && kh > 1;
    s.ow = conv_size(s.w, s.upsample, s.stride, kw, s.pad_x, x_past);
    s.oh = conv_size(s.h, s.upsample, s.stride, kh, s.pad_y, y_past);
    s.m = widths[o[O_WIDTH]];
    s.frames = frames[o[O_FRAMES]];
    s.past = o[O_PAST] == 0 ? 0 : o[O_PAST] == 1 ? kt / 2 : kt - 1;
    s.stats = o[O_STATS];
    for (s.groups = 1 + random_below(s.c); s.c % s.groups != 0; s.groups--) {}
    s.norm_weight = s.stats && o[O_NORM] & 1;
    s.norm_bias = s.stats && o[O_NORM] & 2;
    s.x_activation = (rocq_activation)o[O_X_ACTIVATION];
    s.activation = (rocq_activation)o[O_ACTIVATION];
    s.bias = o[O_BIAS];
    s.residual = o[O_RESIDUAL];
    s.x_format = floats[o[O_X]];
    s.y_format = floats[o[O_Y]];
    s.residual_format = floats[o[O_R]];
    s.w_layout = (box_layout)o[O_W_LAYOUT];
    s.x_layout = (box_layout)o[O_X_LAYOUT];
    s.y_layout = (box_layout)o[O_Y_LAYOUT];
    return s;
}

// Cases until each value of each option has met each value of every other: of some random ones
// always that which has the most pairs not seen before.
static void conv_in_all_pairs_of_options(void **state) {
    (void)state;
    static bool seen[N_OPTIONS][MOST_VALUES][N_OPTIONS][MOST_VALUES];
    int left = 0, n_cases = 0;
    memset(seen, 0, sizeof seen);
    random_state = 15;
    for (int a = 0; a < N_OPTIONS; a++) {
        assert_true(n_values[a] <= MOST_VALUES);
        for (int b = a + 1; b < N_OPTIONS; b++) left += n_values[a] * n_values[b];
    }
    for (; left > 0; n_cases++) {
        int best[N_OPTIONS] = {0}, most = -1;
        for (int try = 0; try < 30; try++) {
            int o[N_OPTIONS], fresh = 0;
            for (int a = 0; a < N_OPTIONS; a++) o[a] = (int)random_below(n_values[a]);
            for (int a = 0; a < N_OPTIONS; a++) {
                for (int b = a + 1; b < N_OPTIONS; b++) fresh += !seen[a][o[a]][b][o[b]];
            }
            if (fresh <= most) continue;
            most = fresh;
            memcpy(best, o, sizeof o);
        }
        if (most == 0) continue;
        for (int a = 0; a < N_OPTIONS; a++) {
            for (int b = a + 1; b < N_OPTIONS; b++) seen[a][best[a]][b][best[b]] = true;
        }
        left -= most;
        const conv_case s = case_of(best);
        conv_solve(&s);
    }
    print_message("%d cases\n", n_cases);
}

static conv_case plain_case(int64_t c, int64_t m, int64_t w, int64_t h, int32_t taps) {
    const conv_case s = {.kw = taps, .kh = taps, .c = c, .w = w, .h = h, .m = m, .ow = w, .oh = h,
                         .frames = 1};
    return s;
}

static void conv_with_folded_weights(void **state) {
    (void)state;
    random_state = 20;
    for (int i = 0; i < 40; i++) {
        int o[N_OPTIONS];
        for (int a = 0; a < N_OPTIONS; a++) o[a] = (int)random_below(n_values[a]);
        o[O_KERNEL] = i % 2 ? 2 : 7; // 3 x 3 taps, in 1 or 3 frames
        o[O_STRIDE] = i % 3 == 0;
        o[O_UPSAMPLE] = 2;
        conv_case s = case_of(o);
        s.folded = true;
        conv_solve(&s);
    }
}

// What rocq_conv_weights adds up: folded weights give what the three taps give, but for the
// rounding of F32 sums. At every padding, so that y begins in either phase.
static void folding_changes_only_the_rounding(void **state) {
    (void)state;
    random_state = 21;
    for (int option = 0; option < 18; option++) {
        const int32_t pad_x = option % 3 - 1, pad_y = option / 3 % 3 - 1, kt = option < 9 ? 1 : 2;
        const int64_t c = 12, m = 19, n = c * m * kt;
        conv_case s = plain_case(c, m, 9, 6, 3);
        s.kt = kt;
        s.frames = 2;
        s.upsample = 2;
        s.pad_x = pad_x > 0 ? 2 : pad_x;
        s.pad_y = pad_y > 0 ? 2 : pad_y;
        s.ow = conv_size(s.w, 2, 1, 3, s.pad_x, 1);
        s.oh = conv_size(s.h, 2, 1, 3, s.pad_y, 0);
        conv_problem a = conv_make(&s), b;
        s.folded = true;
        b = conv_make(&s);
        memcpy(b.x.memory, a.x.memory, (size_t)a.x.size);
        float *src = (float *)malloc((size_t)(9 * n) * sizeof *src);
        assert_non_null(src);
        for (int64_t i = 0; i < 9 * n; i++) src[i] = random_normal();
        rocq_conv_weights_params fill = {.w = &a.w.t, .src = src, .src_format = ROCQ_F32,
                                         .src_size = 36 * n, .kw = 3, .kh = 3, .kt = kt};
        assert_int_equal(rocq_conv_weights(contexts[1][0], &fill), ROCQ_OK);
        fill.w = &b.w.t;
        fill.folded = true;
        assert_int_equal(rocq_conv_weights(contexts[1][0], &fill), ROCQ_OK);
        conv_set_params(&a);
        conv_set_params(&b);
        box *y_a = &a.y, *y_b = &b.y;
        run(1, ROCQ_OP_CONV, &a.p, &y_a, 1);
        run(1, ROCQ_OP_CONV, &b.p, &y_b, 1);
        box_read(&a.y);
        box_read(&b.y);
        for (int64_t i = 0; i < a.y.count; i++) {
            if (!(fabs(a.y.value[i] - b.y.value[i]) <= 1e-4)) {
                fail_msg("option %d, element %lld: %.9g, folded %.9g", option, (long long)i,
                         a.y.value[i], b.y.value[i]);
            }
        }
        free(src);
        conv_free(&a);
        conv_free(&b);
    }
}

// Pictures larger than a tile of the op, in the shapes of image decoders.
static void conv_of_larger_pictures(void **state) {
    (void)state;
    static const struct { int64_t c, m, w, h; int32_t taps; } shapes[] = {
        {3, 64, 70, 41, 3}, {4, 40, 31, 29, 3}, {64, 3, 75, 53, 3}, {48, 5, 40, 31, 3},
        {40, 20, 61, 37, 3}, {64, 70, 50, 31, 1}, {16, 8, 129, 65, 1}, {8, 4, 33, 90, 7},
        {200, 33, 23, 17, 3}, {5, 1, 300, 3, 5}, {600, 19, 9, 7, 3}};
    random_state = 16;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        for (int option = 0; option < 3; option++) {
            conv_case s = plain_case(shapes[i].c, shapes[i].m, shapes[i].w, shapes[i].h,
                                     shapes[i].taps);
            s.x_format = floats[i % 3];
            s.y_format = floats[(i / 3 + (size_t)option) % 3];
            s.x_layout = (box_layout)((i + (size_t)option) % 3);
            s.bias = option != 1;
            if (option > 0) {
                s.stats = option == 1 ? GROUPS : POSITIONS;
                s.groups = s.c % 4 == 0 ? s.c / 4 : 1;
                s.norm_weight = s.norm_bias = true;
                s.x_activation = ROCQ_ACT_SILU;
                s.residual = option == 1 ? IN_PLACE_RESIDUAL : NO_RESIDUAL;
                s.activation = option == 2 ? ROCQ_ACT_RELU : ROCQ_ACT_IDENTITY;
            }
            if (option == 2 && i % 2 == 0 && s.kw > 1) { // down, padded right and below only
                s.stride = 2;
                s.pad_x = s.pad_y = -1;
                s.ow = conv_size(s.w, 1, 2, s.kw, -1, 1);
                s.oh = conv_size(s.h, 1, 2, s.kh, -1, 1);
            } else if (option == 2) {
                s.upsample = 2;
                s.ow *= 2;
                s.oh *= 2;
            }
            conv_solve(&s);
        }
    }
}

// A NaN reaches the positions whose kernel sees it, and no other; nor does what lies around x.
static void conv_keeps_nan_where_it_is(void **state) {
    (void)state;
    random_state = 17;
    for (int option = 0; option < 12; option++) {
        const int32_t taps = option % 2 ? 3 : 1;
        conv_case s = plain_case(option % 3 == 0 ? 3 : 24, option % 4 < 2 ? 3 : 17, 19, 11, taps);
        s.x_layout = BOX_STRIDED;
        s.stride = 1 + option / 6;
        s.ow = conv_size(s.w, 1, s.stride, taps, 0, taps / 2);
        s.oh = conv_size(s.h, 1, s.stride, taps, 0, taps / 2);
        conv_problem a = conv_make(&s);
        box *y = &a.y;
        conv_set_params(&a);
        const int64_t bad_x = random_below(s.w), bad_y = random_below(s.h);
        a.x.value[(bad_y * s.w + bad_x) * s.c + random_below(s.c)] = option % 5 ? NAN : INFINITY;
        box_write(&a.x);
        for (int simd = 0; simd < 2; simd++) {
            run(simd, ROCQ_OP_CONV, &a.p, &y, 1);
            box_read(y);
            for (int64_t i = 0; i < y->count; i++) {
                const int64_t ox = i / s.m % s.ow, oy = i / s.m / s.ow;
                const bool sees = llabs(ox * s.stride - bad_x) <= taps / 2 &&
                                  llabs(oy * s.stride - bad_y) <= taps / 2;
                assert_int_equal(sees, !isfinite(y->value[i]));
            }
        }
        conv_free(&a);
    }
}

static void view(rocq_tensor *part, const rocq_tensor *t, int64_t x, int64_t y, int64_t w,
                 int64_t h) {
    const int64_t start[4] = {0, x, y, 0}, ne[4] = {t->ne[0], w, h, t->ne[3]};
    assert_int_equal(rocq_tensor_view(part, t, start, ne), ROCQ_OK);
}

// Tiles of y, each from a view of x with its halo, are bit for bit the whole: in all kernels, with
// the norm of the whole picture.
static void tiles_are_the_whole(void **state) {
    (void)state;
    random_state = 18;
    for (int option = 0; option < 16; option++) {
        const int32_t taps = option % 4 == 3 ? 5 : option % 2 ? 3 : 1;
        conv_case s = plain_case(option % 3 ? 20 : 16, option % 5 ? 37 : 3, 53, 45, taps);
        s.stride = option / 8 + 1;
        s.x_format = floats[option % 3];
        s.y_format = floats[option / 2 % 3];
        s.stats = option % 3 == 2 ? POSITIONS : SHARED_GROUPS;
        s.groups = 4;
        s.norm_weight = s.norm_bias = s.bias = true;
        s.x_activation = ROCQ_ACT_SILU;
        s.residual = option % 4 ? OTHER_RESIDUAL : NO_RESIDUAL;
        s.ow = conv_size(s.w, 1, s.stride, taps, 0, taps / 2);
        s.oh = conv_size(s.h, 1, s.stride, taps, 0, taps / 2);
        conv_problem a = conv_make(&s);
        box *whole = &a.y, tiled = box_make(BOX_STRIDED, s.y_format, s.m, s.ow, s.oh, 1);
        conv_set_params(&a);
        for (int simd = 0; simd < 2; simd++) {
            run(simd, ROCQ_OP_CONV, &a.p, &whole, 1);
            memset(tiled.memory, 0xff, (size_t)tiled.size);
            const int64_t tile_w = 1 + random_below(20), tile_h = 1 + random_below(20);
            for (int64_t oy = 0; oy < s.oh; oy += tile_h) {
                for (int64_t ox = 0; ox < s.ow; ox += tile_w) {
                    const int64_t w = ox + tile_w < s.ow ? tile_w : s.ow - ox;
                    const int64_t h = oy + tile_h < s.oh ? tile_h : s.oh - oy;
                    int64_t at[2] = {ox, oy}, n[2] = {w, h}, first[2], last[2];
                    int32_t pad[2];
                    for (int d = 0; d < 2; d++) { // what of x the tile sees
                        const int64_t begin = at[d] * s.stride - taps / 2;
                        const int64_t end = (at[d] + n[d] - 1) * s.stride + taps / 2;
                        first[d] = begin < 0 ? 0 : begin;
                        last[d] = end < a.x.t.ne[1 + d] ? end : a.x.t.ne[1 + d] - 1;
                        pad[d] = begin < 0 ? (int32_t)-begin : -1;
                    }
                    rocq_tensor x, y, residual, stats;
                    rocq_conv_params p = a.p;
                    const int64_t x_w = last[0] - first[0] + 1, x_h = last[1] - first[1] + 1;
                    view(&x, &a.x.t, first[0], first[1], x_w, x_h);
                    view(&y, &tiled.t, ox, oy, w, h);
                    if (p.residual) view(&residual, &a.residual.t, ox, oy, w, h);
                    if (s.stats == POSITIONS) {
                        view(&stats, &a.stats.t, first[0], first[1], x_w, x_h);
                        p.stats = &stats;
                    }
                    p.x = &x;
                    p.y = &y;
                    if (p.residual) p.residual = &residual;
                    p.pad_x = pad[0];
                    p.pad_y = pad[1];
                    rocq_ctx *ctx = contexts[simd][1];
                    if (rocq_conv(ctx, &p) != ROCQ_OK) fail_msg("%s", rocq_error(ctx));
                }
            }
            box_check_outside(&tiled);
            for (int64_t r = 0; r < box_rows(whole); r++) {
                assert_memory_equal(box_row(whole, r), box_row(&tiled, r), box_row_size(whole));
            }
        }
        box_free(&tiled);
        conv_free(&a);
    }
}

// A video in chunks, each with the last frames of the one before, is bit for bit the whole one.
static void chunks_are_the_whole(void **state) {
    (void)state;
    static const int64_t chunks[] = {1, 4, 2, 1, 3};
    random_state = 19;
    for (int option = 0; option < 8; option++) {
        conv_case s = plain_case(12, option % 2 ? 20 : 24, 13, 9, option & 1 ? 3 : 1);
        s.kt = option < 6 ? 3 : 4;
        s.frames = 11;
        s.bias = true;
        s.stats = option & 2 ? POSITIONS : option & 4 ? GROUPS : NO_STATS;
        s.groups = 3;
        s.x_activation = ROCQ_ACT_SILU;
        s.x_format = floats[option % 3];
        s.y_layout = (box_layout)(option % 3);
        conv_problem a = conv_make(&s);
        box *whole = &a.y, chunked = box_make(s.y_layout, s.y_format, s.m, s.ow, s.oh, s.frames);
        conv_set_params(&a);
        for (int simd = 0; simd < 2; simd++) {
            run(simd, ROCQ_OP_CONV, &a.p, &whole, 1);
            memset(chunked.memory, 0xff, (size_t)chunked.size);
            for (int64_t t = 0, i = 0; t < s.frames; t += chunks[i++]) {
                const int64_t past = t < s.kt - 1 ? t : s.kt - 1;
                int64_t start[4] = {0, 0, 0, t - past}, ne[4] = {s.c, s.w, s.h, past + chunks[i]};
                rocq_tensor x, y, stats;
                rocq_conv_params p = a.p;
                assert_int_equal(rocq_tensor_view(&x, &a.x.t, start, ne), ROCQ_OK);
                if (s.stats == POSITIONS) {
                    ne[0] = 1;
                    assert_int_equal(rocq_tensor_view(&stats, &a.stats.t, start, ne), ROCQ_OK);
                } else if (s.stats == GROUPS) {
                    const int64_t from[4] = {0, 0, t - past, 0}, of[4] = {2, 3, ne[3], 1};
                    assert_int_equal(rocq_tensor_view(&stats, &a.stats.t, from, of), ROCQ_OK);
                }
                if (s.stats) p.stats = &stats;
                start[3] = t;
                ne[0] = s.m;
                ne[3] = chunks[i];
                assert_int_equal(rocq_tensor_view(&y, &chunked.t, start, ne), ROCQ_OK);
                p.x = &x;
                p.y = &y;
                if (rocq_conv(contexts[simd][2], &p) != ROCQ_OK) {
                    fail_msg("%s", rocq_error(contexts[simd][2]));
                }
            }
            box_check_outside(&chunked);
            assert_memory_equal(whole->memory, chunked.memory, chunked.size);
        }
        box_free(&chunked);
        conv_free(&a);
    }
}

// The same bits on 1 to 16 threads, with a job system that runs tasks late and out of order, and in
// a recorded graph.
static void run_backwards(void (*task)(void *arg, int32_t i), void *arg, int32_t n, void *user) {
    (void)user;
    for (int32_t i = n - 1; i >= 0; i--) task(arg, i);
}

static void bits_do_not_depend_on_threads(void **state) {
    (void)state;
    random_state = 20;
    conv_case s = plain_case(24, 37, 61, 43, 3);
    s.stats = GROUPS;
    s.groups = 6;
    s.x_activation = ROCQ_ACT_SILU;
    s.residual = OTHER_RESIDUAL;
    s.x_format = ROCQ_F16;
    conv_problem a = conv_make(&s);
    box stats = box_make(BOX_PLAIN, ROCQ_F32, 2, 6, 1, 1);
    box large = box_make(BOX_PLAIN, ROCQ_F16, s.m, 100, 77, 1);
    box rgb = box_make(BOX_PLAIN, ROCQ_I8, 3, 61, 43, 1);
    rocq_tensor three;
    const int64_t start[4] = {0}, of[4] = {3, 61, 43, 1};
    conv_set_params(&a);
    assert_int_equal(rocq_tensor_view(&three, &a.y.t, start, of), ROCQ_OK);
    a.p.stats = &stats.t;
    const rocq_norm_stats_params norm = {.stats = &stats.t, .x = &a.x.t};
    const rocq_resize_params resize = {.y = &large.t, .x = &a.y.t, .mode = ROCQ_RESIZE_BILINEAR};
    const rocq_pixels_params pixels = {.y = &rgb.t, .x = &three, .scale = 0.05f, .bias = 0.5f,
                                       .srgb = true};
    box *outputs[] = {&stats, &a.y, &large, &rgb};
    unsigned char *first[2][4] = {{NULL}};
    for (int32_t n = 1; n <= 16; n++) {
        for (int kind = 0; kind < 6; kind++) { // plain and SIMD: op by op, in a graph, job system
            const int simd = kind % 2;
            const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = n,
                                    .cpu_tier = simd ? ROCQ_CPU_BEST : ROCQ_CPU_PLAIN,
                                    .run_tasks = kind >= 4 ? run_backwards : NULL};
            rocq_ctx *ctx;
            rocq_graph *graph = NULL;
            for (int o = 0; o < 4; o++) {
                memset(outputs[o]->memory, 0xff, (size_t)outputs[o]->size);
            }
            assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
            const bool record = kind / 2 == 1;
            if (record) assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
            assert_int_equal(rocq_norm_stats(ctx, &norm), ROCQ_OK);
            assert_int_equal(rocq_conv(ctx, &a.p), ROCQ_OK);
            assert_int_equal(rocq_resize(ctx, &resize), ROCQ_OK);
            assert_int_equal(rocq_pixels(ctx, &pixels), ROCQ_OK);
            if (record) {
                assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);
                assert_int_equal(*rgb.memory, 0xff);
                for (int i = 0; i < 2; i++) {
                    assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK);
                }
                rocq_graph_destroy(ctx, &graph);
            }
            rocq_close(&ctx);
            for (int o = 0; o < 4; o++) {
                if (!first[simd][o]) {
                    first[simd][o] = (unsigned char *)malloc((size_t)outputs[o]->size);
                    assert_non_null(first[simd][o]);
                    memcpy(first[simd][o], outputs[o]->memory, (size_t)outputs[o]->size);
                }
                assert_memory_equal(first[simd][o], outputs[o]->memory, outputs[o]->size);
            }
        }
    }
    for (int o = 0; o < 4; o++) {
        free(first[0][o]);
        free(first[1][o]);
    }
    boxes_free(&stats, &large, &rgb);
    conv_free(&a);
}

// -- conv_weights --

static void conv_weights_are_reordered(void **state) {
    (void)state;
    rocq_ctx *ctx = contexts[1][0];
    random_state = 21;
    for (int f = 0; f < N_FORMATS; f++) {
        if (rocq_quantize(formats[f], NULL, NULL, 0, 256, NULL) != ROCQ_OK) continue; // only read
        const int32_t kw = f % 2 ? 3 : 1, kh = f % 3 ? 3 : 0, kt = f % 5 == 4 ? 3 : 0;
        const int64_t taps = kw * at_least_1(kh) * at_least_1(kt), m = 3;
        const int64_t c = block_elems(formats[f]) * (f % 4 == 0 ? 2 : 1), k = c * taps;
        const rocq_format from = floats[f % 3];
        box src = box_random(BOX_PLAIN, from, 1, k, m, 1, 1);
        box w = box_make(BOX_PLAIN, formats[f], k, m, 1, 1);
        box turned = box_make(BOX_PLAIN, ROCQ_F32, k, m, 1, 1);
        for (int64_t r = 0; r < m; r++) { // [kw, kh, kt, C] becomes [C, kw, kh, kt]
            for (int64_t i = 0; i < k; i++) {
                turned.value[r * k + i % taps * c + i / taps] = src.value[r * k + i];
            }
        }
        box_write(&turned);
        unsigned char *want = (unsigned char *)malloc((size_t)w.size);
        assert_non_null(want);
        assert_int_equal(rocq_quantize(formats[f], want, (float *)(void *)turned.memory, m, k,
                                       NULL), ROCQ_OK);
        rocq_conv_weights_params p = {.w = &w.t, .src = src.memory, .src_format = from,
                                      .src_size = src.size, .kw = kw, .kh = kh, .kt = kt};
        assert_int_equal(rocq_conv_weights(ctx, &p), ROCQ_OK);
        assert_memory_equal(w.memory, want, w.size);

        memset(w.memory, 0xff, (size_t)w.size); // and what is refused leaves w as it is
        const rocq_conv_weights_params good = p;
        const rocq_tensor good_w = w.t;
#define REFUSED(change, result)                                       \
    do {                                                              \
        change;                                                       \
        inside_error(ctx)[0] = 0;                                     \
        assert_int_equal(rocq_conv_weights(ctx, &p), result);         \
        assert_true(strlen(rocq_error(ctx)) > 10);                    \
        assert_int_equal(w.memory[0] & w.memory[w.size - 1], 0xff);   \
        p = good;                                                     \
        w.t = good_w;                                                 \
    } while (0)
        REFUSED(p.w = NULL, ROCQ_E_ARGUMENT);
        REFUSED(p.src = NULL, ROCQ_E_ARGUMENT);
        REFUSED(p.src_size -= 2, ROCQ_E_ARGUMENT);
        REFUSED(p.src_size += 4, ROCQ_E_ARGUMENT);
        REFUSED(p.src_format = ROCQ_Q4_0, ROCQ_E_FORMAT);
        REFUSED(p.src_format = (rocq_format)77, ROCQ_E_FORMAT);
        REFUSED(p.src = src.memory + 1, ROCQ_E_ARGUMENT);
        REFUSED(p.kw = 8, ROCQ_E_ARGUMENT);
        REFUSED(p.kh = -1, ROCQ_E_ARGUMENT);
        REFUSED((p.kw = 7, p.kh = 7, p.kt = 7), ROCQ_E_SHAPE);
        REFUSED((p.folded = true, p.kw = 1), ROCQ_E_ARGUMENT);
        REFUSED((p.folded = true, p.kw = p.kh = 3), ROCQ_E_SHAPE); // w has one kernel
        REFUSED(w.t.ne[2] = 2, ROCQ_E_BOUNDS);
        REFUSED(w.t.stride[1] += 256, ROCQ_E_BOUNDS);
        assert_int_equal(rocq_conv_weights(ctx, NULL), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_conv_weights(NULL, &p), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_conv_weights(ctx, &p), ROCQ_OK);
        assert_memory_equal(w.memory, want, w.size);
        free(want);
        boxes_free(&src, &w, &turned);
    }
}

// -- norm_stats --

typedef struct moments { double n, mean, sum; } moments;

// Of group g of frame t of x, or of a part of it: in two passes.
static moments moments_of(const box *x, int64_t n_groups, int64_t g, int64_t t) {
    const int64_t group = x->t.ne[0] / n_groups, positions = x->t.ne[1] * x->t.ne[2];
    const double *v = x->value + t * positions * x->t.ne[0] + g * group;
    moments all = {(double)(group * positions), 0, 0};
    for (int64_t i = 0; i < positions; i++) {
        for (int64_t c = 0; c < group; c++) all.mean += v[i * x->t.ne[0] + c];
    }
    all.mean /= all.n;
    for (int64_t i = 0; i < positions; i++) {
        for (int64_t c = 0; c < group; c++) {
            const double d = v[i * x->t.ne[0] + c] - all.mean;
            all.sum += d * d;
        }
    }
    return all;
}

// The mean to as many roundings as there are tiles, or 1e-6 of the spread; rstd to 1e-6 of itself.
static void check_stats(const float *stats, const float *had, moments want, double eps,
                          int n_tiles) {
    const double spread = sqrt(want.sum / want.n), rstd = 1 / sqrt(want.sum / want.n + eps);
    const double mean_slack = (1 + n_tiles) * ULP * fabs(want.mean) + 1e-6 * spread + 1e-37;
    for (int i = 0; i < 2; i++) {
        const float *got = i ? had : stats;
        if (got && !(fabs((double)got[i] - want.mean) <= mean_slack)) {
            fail_msg("mean %.9g, expected %.9g of spread %g", (double)got[i], want.mean, spread);
        }
    }
    // The means of tiles are known as well as F32 holds them.
    const double slack = 1e-6 + (n_tiles - 1) * ULP * fabs(want.mean) / fmax(spread, 1e-30);
    if (stats && !(fabs((double)stats[1] / rstd - 1) <= slack)) {
        fail_msg("rstd %.9g, expected %.9g", (double)stats[1], rstd);
    }
    if (had) assert_true((double)had[0] == want.n);
    if (had && !(fabs((double)had[2] - want.sum) <= 2 * slack * want.sum)) {
        fail_msg("sum %.9g, expected %.9g", (double)had[2], want.sum);
    }
}

static const float *floats_at(const box *b, int64_t row) {
    return b->count ? (const float *)(const void *)box_row(b, row) : NULL;
}

static void norm_stats_of_groups(void **state) {
    (void)state;
    static const struct { int64_t c, groups; } splits[] = {
        {1, 1}, {3, 3}, {6, 2}, {32, 32}, {64, 32}, {96, 32}, {128, 32}, {40, 5}, {520, 1},
        {600, 2}, {256, 4}, {7, 1}};
    random_state = 22;
    for (size_t i = 0; i < sizeof splits / sizeof splits[0]; i++) {
        for (int option = 0; option < 12; option++) {
            const int64_t c = splits[i].c, g = splits[i].groups;
            const int64_t w = option % 5 == 4 ? 1 : 7 + option, h = option % 7 == 5 ? 70 : 5;
            const box_layout layout = (box_layout)((option + (int)i) % 3);
            const rocq_format format = floats[option % 3];
            const int64_t n = 1 + option % 2 * 2;
            box x = box_random(layout, format, 1, c, w, h, n);
            for (int64_t k = 0; k < x.count; k++) {
                // Some with a mean far from 0, some with an outlier first: either spoils sums of
                // squares, and sums around the first value.
                if (format == ROCQ_F32 && option / 3 == 1) x.value[k] = 1e5 + 0.05 * x.value[k];
                else if (option / 3 == 2) x.value[k] = 20 + x.value[k];
                if (option / 3 == 3 && k % (c * w * h) < c) x.value[k] *= 3e3;
            }
            box_write(&x);
            const bool with_moments = option % 4 != 0, with_stats = option % 4 != 1;
            box stats = with_stats ? box_make(layout, ROCQ_F32, 2, g, n, 1) : no_box();
            box had = with_moments ? box_make(layout, ROCQ_F32, 3, g, n, 1) : no_box();
            const rocq_norm_stats_params p = {.stats = with_stats ? &stats.t : NULL,
                                              .moments = with_moments ? &had.t : NULL,
                                              .x = &x.t, .first = true,
                                              .eps = option % 2 ? 1e-3f : 0};
            box *outputs[2] = {with_stats ? &stats : &had, &had};
            for (int simd = 0; simd < 2; simd++) {
                run(simd, ROCQ_OP_NORM_STATS, &p, outputs, 1 + (with_stats && with_moments));
                for (int64_t r = 0; r < g * n; r++) {
                    check_stats(floats_at(&stats, r), floats_at(&had, r),
                                moments_of(&x, g, r % g, r / g), option % 2 ? (double)1e-3f : 1e-6,
                                1);
                }
                if (with_stats) box_check_outside(&stats);
                if (with_moments) box_check_outside(&had);
            }
            box_free(&x);
            if (with_stats) box_free(&stats);
            if (with_moments) box_free(&had);
        }
    }
}

static void norm_stats_of_positions(void **state) {
    (void)state;
    random_state = 23;
    for (int option = 0; option < 27; option++) {
        const int64_t c = (int64_t[]){1, 5, 8, 96, 384, 1000}[option % 6];
        box x = box_random((box_layout)(option % 3), floats[option / 3 % 3], 3, c, 11, 6, 2);
        box stats = box_make((box_layout)(option / 9), ROCQ_F32, 1, 11, 6, 2), *out = &stats;
        double *want = doubles(stats.count);
        const rocq_norm_stats_params p = {.stats = &stats.t, .x = &x.t,
                                          .eps = option % 2 ? 0.25f : 0};
        for (int64_t r = 0; r < stats.count; r++) {
            double sum = 0;
            for (int64_t i = 0; i < c; i++) sum += x.value[r * c + i] * x.value[r * c + i];
            want[r] = 1 / sqrt(sum / (double)c + (option % 2 ? 0.25 : 1e-6));
        }
        for (int simd = 0; simd < 2; simd++) {
            memset(stats.memory, 0xff, (size_t)stats.size);
            run(simd, ROCQ_OP_NORM_STATS, &p, &out, 1);
            check_rows(&stats, want, 1e-12); // 1e-6 of each
        }
        free(want);
        boxes_free(&x, &stats);
    }
}

// A picture in tiles, of odd sizes and in any order, has the statistics of the whole.
static void norm_stats_merge_over_tiles(void **state) {
    (void)state;
    random_state = 24;
    for (int option = 0; option < 18; option++) {
        const int64_t g = option % 2 ? 32 : 3, c = g * (1 + option % 3 * 2), w = 41, h = 29, n = 2;
        box x = box_random((box_layout)(option % 3), floats[option / 3 % 3], 1, c, w, h, n);
        for (int64_t i = 0; i < x.count; i++) { // unlike means, tile by tile
            x.value[i] += (double)(i / c % w) * 0.5 + (option % 4 == 3 ? 300 : 0);
        }
        box_write(&x);
        box stats = box_make(BOX_STRIDED, ROCQ_F32, 2, g, n, 1), had;
        had = box_make(BOX_PERMUTED, ROCQ_F32, 3, g, n, 1);
        const int64_t tile_w = 1 + random_below(w), tile_h = 1 + random_below(h);
        box *outputs[2] = {&had, &stats};
        for (int simd = 0; simd < 2; simd++) {
            int n_tiles = 0;
            for (int64_t oy = (h - 1) / tile_h * tile_h; oy >= 0; oy -= tile_h) {
                for (int64_t ox = 0; ox < w; ox += tile_w) {
                    rocq_tensor tile;
                    view(&tile, &x.t, ox, oy, ox + tile_w < w ? tile_w : w - ox,
                         oy + tile_h < h ? tile_h : h - oy);
                    const bool last = oy == 0 && ox + tile_w >= w;
                    const rocq_norm_stats_params p = {.stats = last ? &stats.t : NULL,
                                                      .moments = &had.t, .x = &tile,
                                                      .first = n_tiles++ == 0};
                    run(simd, ROCQ_OP_NORM_STATS, &p, outputs, last ? 2 : 1);
                }
            }
            box_check_outside(&had);
            for (int64_t r = 0; r < g * n; r++) {
                check_stats(floats_at(&stats, r), floats_at(&had, r),
                            moments_of(&x, g, r % g, r / g), 1e-6, n_tiles);
            }
        }
        boxes_free(&x, &stats, &had);
    }
}

static void norm_stats_keep_their_digits_at_2048(void **state) {
    (void)state;
    enum { C = 8, G = 2, N = 2048 };
    double worst[2] = {0, 0};
    random_state = 25;
    box x = box_make(BOX_PLAIN, ROCQ_F16, C, N, N, 1), stats = box_make(BOX_PLAIN, ROCQ_F32, 2, G,
                                                                        1, 1);
    uint16_t *half = (uint16_t *)(void *)x.memory;
    for (int64_t i = 0; i < x.count; i++) {
        // mean 8, spread 0.3, and a ramp along the rows; uniform, since a normal one takes a minute
        half[i] = rocq_f32_to_f16(random_in(7.5f, 8.5f) + (float)(i / C % N) * 1e-4f);
        x.value[i] = (double)rocq_f16_to_f32(half[i]);
    }
    const rocq_norm_stats_params p = {.stats = &stats.t, .x = &x.t};
    for (int simd = 0; simd < 2; simd++) {
        memset(stats.memory, 0xff, (size_t)stats.size);
        assert_int_equal(rocq_norm_stats(contexts[simd][1], &p), ROCQ_OK);
        for (int64_t g = 0; g < G; g++) {
            const moments want = moments_of(&x, G, g, 0);
            check_stats(floats_at(&stats, g), NULL, want, 1e-6, 1);
            const double rstd = 1 / sqrt(want.sum / want.n + 1e-6);
            worst[0] = fmax(worst[0], fabs((double)floats_at(&stats, g)[0] - want.mean) * rstd);
            worst[1] = fmax(worst[1], fabs((double)floats_at(&stats, g)[1] / rstd - 1));
        }
    }
    print_message("2048 x 2048: the mean is off by %.2g of the spread, rstd by %.2g of itself\n",
                  worst[0], worst[1]);
    boxes_free(&x, &stats);
}

// -- resize, pixels --

static void resize(void **state) {
    (void)state;
    static const int64_t sizes[][4] = {{1, 1, 1, 1}, {1, 1, 5, 3}, {7, 5, 14, 10}, {7, 5, 7, 5},
                                       {13, 9, 31, 10}, {12, 8, 6, 4}, {9, 11, 5, 7}, {2, 3, 9, 2}};
    random_state = 26;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int option = 0; option < 18; option++) {
            const rocq_resize_mode mode = option % 2 ? ROCQ_RESIZE_BILINEAR : ROCQ_RESIZE_NEAREST;
            const int64_t *n = sizes[i], c = (int64_t[]){1, 3, 8, 19, 300}[(option + (int)i) % 5];
            box x = box_random((box_layout)(option % 3), floats[option / 2 % 3], 1, c, n[0], n[1],
                               2);
            box y = box_make((box_layout)((option + 1) % 3), floats[option / 6], c, n[2], n[3], 2);
            box *out = &y;
            const rocq_resize_params p = {.y = &y.t, .x = &x.t, .mode = mode};
            double *want = doubles(y.count);
            for (int64_t k = 0; k < y.count; k++) {
                const int64_t at[2] = {k / c % n[2], k / c / n[2] % n[3]}, t = k / c / n[2] / n[3];
                int64_t low[2], high[2];
                double share[2];
                for (int d = 0; d < 2; d++) {
                    const double exact = fmax(((double)at[d] + 0.5) * (double)n[d] /
                                              (double)n[2 + d] - 0.5, 0);
                    low[d] = mode ? (int64_t)exact : at[d] * n[d] / n[2 + d];
                    high[d] = low[d] + 1 < n[d] ? low[d] + 1 : n[d] - 1;
                    share[d] = mode ? exact - (double)low[d] : 0;
                }
                want[k] = 0;
                for (int corner = 0; corner < 4; corner++) {
                    const int64_t x1 = corner & 1 ? high[0] : low[0];
                    const int64_t x2 = corner & 2 ? high[1] : low[1];
                    want[k] += box_at(&x, k % c, x1, x2, t) *
                               (corner & 1 ? share[0] : 1 - share[0]) *
                               (corner & 2 ? share[1] : 1 - share[1]);
                }
            }
            for (int simd = 0; simd < 2; simd++) {
                memset(y.memory, 0xff, (size_t)y.size);
                run(simd, ROCQ_OP_RESIZE, &p, &out, 1);
                check_all(&y, want, 1e-11);
            }
            free(want);
            boxes_free(&x, &y);
        }
    }
}

static double srgb(double x) {
    return x <= 0.0031308 ? 12.92 * x : 1.055 * pow(x, 1 / 2.4) - 0.055;
}

// Bytes are the rounded reference, either one where that is within an F32 error of a half.
static void pixels(void **state) {
    (void)state;
    random_state = 27;
    for (int option = 0; option < 72; option++) {
        const int64_t from = (int64_t[]){1, 3, 4}[option % 3], to = option / 3 % 2 ? 3 : 4;
        const bool curve = option / 6 % 2, scaled = option / 12 % 2;
        box x = box_random((box_layout)(option % 3), floats[option / 24], 1, from, 23, 9, 2);
        for (int64_t i = 0; i < x.count; i++) {
            x.value[i] = scaled ? 0.9 * x.value[i] : 0.5 + 0.4 * x.value[i];
            if (i % 7 == 3 && !scaled) x.value[i] = (double)random_below(256) / 255;
        }
        x.value[5] = INFINITY;
        x.value[6] = -INFINITY;
        x.value[7] = 0;
        if (x.t.format != ROCQ_BF16) box_write(&x);
        else x.value[5] = 9, x.value[6] = -9, box_write(&x); // rocq_quantize takes no infinities
        if (x.t.format != ROCQ_BF16) x.value[x.count - 1] = NAN, box_write(&x);
        box y = box_make((box_layout)((option + 1) % 3), ROCQ_I8, to, 23, 9, 2);
        box finite = box_make((box_layout)(option % 3), ROCQ_I8, 9, 2, 1, 1);
        box *outs[] = {&y, &finite};
        const rocq_pixels_params p = {.y = &y.t, .x = &x.t, .finite = option % 5 ? &finite.t : NULL,
                                      .scale = scaled ? 0.5f : 0, .bias = scaled ? 0.5f : 0,
                                      .srgb = curve};
        for (int simd = 0; simd < 2; simd++) {
            memset(y.memory, 0xff, (size_t)y.size);
            memset(finite.memory, 0xff, (size_t)finite.size);
            run(simd, ROCQ_OP_PIXELS, &p, outs, p.finite ? 2 : 1);
            box_read(&y);
            box_read(&finite);
            box_check_outside(&y);
            box_check_outside(&finite);
            for (int64_t i = 0; i < 18 && p.finite; i++) {
                bool all = true;
                for (int64_t k = i * 23 * from; k < (i + 1) * 23 * from; k++) {
                    all &= isfinite(x.value[k]) != 0;
                }
                assert_int_equal(finite.value[i], all);
            }
            for (int64_t i = 0; i < y.count; i++) {
                const int64_t ch = i % to, position = i / to;
                double want = 1;
                if (ch < 3 || from == 4) {
                    want = x.value[position * from + (from == 1 ? 0 : ch)];
                    want = scaled ? want * 0.5 + 0.5 : want;
                    want = want > 1 ? 1 : want > 0 ? want : 0;
                    if (curve && ch < 3) want = srgb(want);
                }
                const double off = fabs(y.value[i] - 255 * want);
                if (!(off <= 0.5 + 1e-4)) {
                    fail_msg("pixel %lld is %g, expected %g", (long long)i, y.value[i], 255 * want);
                }
            }
        }
        boxes_free(&x, &y, &finite);
    }
    const float odd[] = {0.5f, NAN, -NAN, -0.0f, 1e30f, 1.0f};
    const unsigned char bytes[] = {128, 0, 0, 0, 255, 255}; // 127.5 goes to the even neighbour
    unsigned char got[6];
    rocq_tensor x, y;
    const int64_t ne[4] = {3, 2, 1, 1};
    float values[6];
    memcpy(values, odd, sizeof odd);
    assert_int_equal(rocq_tensor_from_host(&x, values, ROCQ_F32, 4, ne), ROCQ_OK);
    assert_int_equal(rocq_tensor_from_host(&y, got, ROCQ_I8, 4, ne), ROCQ_OK);
    const rocq_pixels_params p = {.y = &y, .x = &x};
    for (int simd = 0; simd < 2; simd++) {
        memset(got, 7, sizeof got);
        assert_int_equal(rocq_pixels(contexts[simd][0], &p), ROCQ_OK);
        assert_memory_equal(got, bytes, sizeof bytes);
    }
}

// -- refusals: a code, a message, and outputs as they were (operands one by one: test_core) --

// Changes p or a tensor, expects the code, and takes the change back.
#define REFUSED_OP(change, op, result)                  \
    do {                                                \
        change;                                         \
        if (rocq_supports(contexts[1][1], op, &p, NULL) != (result)) { \
            fail_msg("line %d: %s", __LINE__, rocq_error(contexts[1][1])); \
        }                                               \
        run_fails(op, &p, result, outputs, n_outputs);  \
        p = good;                                       \
        for (int i_ = 0; i_ < n_outputs; i_++) outputs[i_]->t = kept[i_]; \
        x.t = kept_x;                                   \
    } while (0)

static void conv_refuses(void **state) {
    (void)state;
    conv_case s = plain_case(6, 4, 9, 7, 3);
    s.stats = GROUPS;
    s.groups = 2;
    s.bias = s.norm_weight = s.norm_bias = true;
    s.residual = OTHER_RESIDUAL;
    s.frames = 2;
    s.kt = 3;
    s.past = 1;
    conv_problem a = conv_make(&s);
    box wide = box_random(BOX_PLAIN, ROCQ_F32, 1, 50, 9, 7, 3);
    box four = box_random(BOX_PLAIN, ROCQ_F32, 1, 2, 4, 3, 1);
    box x = a.x, *outputs[] = {&a.y};
    const int n_outputs = 1;
    conv_set_params(&a);
    rocq_conv_params p = a.p;
    p.x = &x.t;
    const rocq_conv_params good = p;
    const rocq_tensor kept[] = {a.y.t}, kept_x = x.t;
    const rocq_tensor w = a.w.t, stats = a.stats.t, bias = a.bias.t;
#define NO(change, result) REFUSED_OP(change, ROCQ_OP_CONV, result)
    assert_int_equal(rocq_conv(contexts[1][1], &p), ROCQ_OK);
    memset(a.y.memory, 0xff, (size_t)a.y.size);
    NO(p.y = NULL, ROCQ_E_ARGUMENT);
    NO(p.w = NULL, ROCQ_E_ARGUMENT);
    NO(p.x = NULL, ROCQ_E_ARGUMENT);
    for (int bad = 0; bad < 4; bad++) { // beyond 7, even, negative
        const int32_t taps = (int32_t[]){9, 2, -1, INT32_MAX}[bad];
        NO(p.kw = taps, ROCQ_E_ARGUMENT);
        NO(p.kh = taps, ROCQ_E_ARGUMENT);
        if (taps != 2) NO(p.kt = taps, ROCQ_E_ARGUMENT);
        if (taps != 2) NO(p.stride = taps, ROCQ_E_ARGUMENT);
        if (taps != 2) NO(p.upsample = taps, ROCQ_E_ARGUMENT);
        if (taps != 2) NO(p.precision = (rocq_precision)taps, ROCQ_E_ARGUMENT);
    }
    NO(p.activation = (rocq_activation)(ROCQ_ACT_SIGMOID + 1), ROCQ_E_ARGUMENT);
    NO(p.x_activation = (rocq_activation)-1, ROCQ_E_ARGUMENT);
    NO(p.pad_x = 3, ROCQ_E_ARGUMENT);
    NO(p.pad_y = 3, ROCQ_E_ARGUMENT);
    NO(p.pad_x = -2, ROCQ_E_ARGUMENT);
    NO(p.pad_y = INT32_MIN, ROCQ_E_ARGUMENT);
    NO(p.most_scratch = -1, ROCQ_E_ARGUMENT);
    NO(p.x_scale = 3, ROCQ_E_ARGUMENT);
    NO(p.x_scale = -2, ROCQ_E_ARGUMENT);
    NO(p.x_scale = NAN, ROCQ_E_ARGUMENT);
    NO(p.x_scale = INFINITY, ROCQ_E_ARGUMENT);
    NO(p.kw = 5, ROCQ_E_SHAPE);      // w has other taps
    NO(p.kt = 1, ROCQ_E_SHAPE);
    NO(p.folded = true, ROCQ_E_ARGUMENT); // without upsample 2
    NO((p.folded = true, p.upsample = 2), ROCQ_E_SHAPE); // w is not
    NO((p.folded = true, p.upsample = 2, p.stride = 2), ROCQ_E_ARGUMENT);
    NO((p.folded = true, p.upsample = 2, p.kw = 5), ROCQ_E_ARGUMENT);
    NO((p.folded = true, p.upsample = 2, p.kh = 1), ROCQ_E_ARGUMENT);
    NO(a.w.t.ne[2] = 4, ROCQ_E_BOUNDS); // four kernels, but not folded
    a.w.t = w;
    NO(p.x = &wide.t, ROCQ_E_SHAPE); // other channels
    NO(p.stats = NULL, ROCQ_E_ARGUMENT); // but a weight and a bias of the norm
    NO(p.bias = good.norm_weight, ROCQ_E_SHAPE);
    NO(p.norm_weight = good.bias, ROCQ_E_SHAPE);
    NO(p.norm_bias = good.bias, ROCQ_E_SHAPE);
    NO(p.residual = good.x, ROCQ_E_SHAPE);
    NO(x.t.ne[3] = 1, ROCQ_E_SHAPE); // fewer frames than y, and more than the kernel sees
    NO((p.kt = 0, a.w.t.ne[0] = 6 * 9), ROCQ_E_SHAPE);
    a.w.t = w;
    NO(p.stats = &four.t, ROCQ_E_SHAPE); // 4 groups of 6 channels
    NO(a.stats.t.ne[2] = 2, ROCQ_E_SHAPE); // of 3 frames
    a.stats.t = stats;
    NO(a.stats.t.ne[0] = 1, ROCQ_E_SHAPE);
    a.stats.t = stats;
    NO(a.bias.t.ne[0] = 3, ROCQ_E_SHAPE);
    a.bias.t = bias;
    // Beyond what the kernel can see: a row of y above whose taps there is nothing of z.
    box far_y = box_make(BOX_PLAIN, ROCQ_F32, 4, 11, 7, 2), *far_out = &far_y;
    p.residual = NULL;
    p.y = &far_y.t;
    run_fails(ROCQ_OP_CONV, &p, ROCQ_E_SHAPE, &far_out, 1);
    p = good; // y may share memory with a residual that is y, and with nothing else
    p.residual = p.y;
    assert_int_equal(rocq_conv(contexts[1][1], &p), ROCQ_OK);
    p = good;
    box both = box_make(BOX_PLAIN, ROCQ_F32, 6, 9, 7, 5), *both_out = &both;
    rocq_tensor part_x, part_y;
    const int64_t x_start[4] = {0}, x_ne[4] = {6, 9, 7, 3}, y_ne[4] = {4, 9, 7, 2};
    for (int64_t t = 0; t < 3; t++) {
        const int64_t y_start[4] = {1, 0, 0, t};
        assert_int_equal(rocq_tensor_view(&part_x, &both.t, x_start, x_ne), ROCQ_OK);
        assert_int_equal(rocq_tensor_view(&part_y, &both.t, y_start, y_ne), ROCQ_OK);
        p.x = &part_x;
        p.y = &part_y;
        run_fails(ROCQ_OP_CONV, &p, ROCQ_E_ARGUMENT, &both_out, 1);
    }
    p = good;
    p.precision = ROCQ_PRECISION_F16; // what is less exact may be asked for: the CPU has only F32
    rocq_precision_info info;
    assert_int_equal(rocq_get_precision(contexts[1][1], ROCQ_OP_CONV, &p, &info), ROCQ_OK);
    assert_int_equal(info.precision, ROCQ_PRECISION_F32);
    assert_true(info.nmse == 1e-6);
#undef NO
    boxes_free(&four, &far_y, &both, &wide);
    conv_free(&a);
}

// A position of y that lies on one of x has its very value, whatever is beside it.
static void resize_of_infinities(void **state) {
    (void)state;
    const float inf = HUGE_VALF;
    float x[5] = {inf, 1, -inf, 3, 3e38f}, y[15];
    const int64_t sizes[2] = {5, 15};
    for (int simd = 0; simd < 2; simd++) {
        for (int i = 0; i < 2; i++) {
            const int64_t n = sizes[i], x_ne[3] = {1, 5, 1}, y_ne[3] = {1, n, 1};
            rocq_tensor tx, ty;
            const rocq_resize_params p = {.y = &ty, .x = &tx, .mode = ROCQ_RESIZE_BILINEAR};
            assert_int_equal(rocq_tensor_from_host(&tx, x, ROCQ_F32, 3, x_ne), ROCQ_OK);
            assert_int_equal(rocq_tensor_from_host(&ty, y, ROCQ_F32, 3, y_ne), ROCQ_OK);
            for (int k = 0; k < 15; k++) y[k] = NAN;
            assert_int_equal(rocq_resize(contexts[simd][1], &p), ROCQ_OK);
            for (int64_t k = 0; k < 5; k++) assert_true(y[i == 0 ? k : 3 * k + 1] == x[k]);
        }
    }
}

static void norm_stats_resize_and_pixels_refuse(void **state) {
    (void)state;
    box x = box_random(BOX_STRIDED, ROCQ_F32, 1, 6, 5, 4, 2);
    box stats = box_make(BOX_PLAIN, ROCQ_F32, 2, 3, 2, 1), had = box_make(BOX_PLAIN, ROCQ_F32, 3, 3,
                                                                        2, 1);
    box each = box_make(BOX_PLAIN, ROCQ_F32, 1, 5, 4, 2);
    const rocq_tensor kept_x = x.t;
    {
        box *outputs[] = {&stats, &had, &each};
        const int n_outputs = 3;
        const rocq_tensor kept[] = {stats.t, had.t, each.t};
        const rocq_norm_stats_params good = {.stats = &stats.t, .moments = &had.t, .x = &x.t,
                                             .first = true};
        rocq_norm_stats_params p = good;
#define NO(change, result) REFUSED_OP(change, ROCQ_OP_NORM_STATS, result)
        NO(p.x = NULL, ROCQ_E_ARGUMENT);
        NO((p.stats = NULL, p.moments = NULL), ROCQ_E_ARGUMENT);
        NO(p.eps = -1, ROCQ_E_ARGUMENT);
        NO(p.eps = NAN, ROCQ_E_ARGUMENT);
        NO(p.eps = INFINITY, ROCQ_E_ARGUMENT);
        NO(p.stats = &each.t, ROCQ_E_ARGUMENT); // no moments of positions
        NO((p.stats = &each.t, p.moments = NULL, x.t.ne[1] = 4), ROCQ_E_SHAPE);
        NO(p.stats = &had.t, ROCQ_E_SHAPE);
        NO(stats.t.ne[1] = 2, ROCQ_E_SHAPE); // moments has 3
        NO((stats.t.ne[1] = 2, p.moments = NULL, x.t.ne[0] = 5), ROCQ_E_SHAPE);
        NO(stats.t.ne[2] = 1, ROCQ_E_SHAPE); // x has 2 pictures
        NO(had.t.ne[0] = 2, ROCQ_E_SHAPE);
        NO(p.moments = &stats.t, ROCQ_E_SHAPE);
        NO((x.t.format = ROCQ_I32), ROCQ_E_FORMAT);
        NO((x.t.format = ROCQ_I8), ROCQ_E_FORMAT);
#undef NO
    }
    box y = box_make(BOX_STRIDED, ROCQ_F16, 6, 10, 3, 2);
    {
        box *outputs[] = {&y};
        const int n_outputs = 1;
        const rocq_tensor kept[] = {y.t};
        const rocq_resize_params good = {.y = &y.t, .x = &x.t, .mode = ROCQ_RESIZE_BILINEAR};
        rocq_resize_params p = good;
#define NO(change, result) REFUSED_OP(change, ROCQ_OP_RESIZE, result)
        NO(p.mode = (rocq_resize_mode)2, ROCQ_E_ARGUMENT);
        NO(p.mode = (rocq_resize_mode)-1, ROCQ_E_ARGUMENT);
        NO(y.t.ne[0] = 5, ROCQ_E_SHAPE);
        NO(y.t.ne[3] = 1, ROCQ_E_SHAPE);
        NO(p.y = &x.t, ROCQ_E_ARGUMENT); // in place
        NO(y.t.format = ROCQ_I8, ROCQ_E_FORMAT);
#undef NO
    }
    box rgb = box_make(BOX_STRIDED, ROCQ_I8, 3, 5, 4, 2);
    box four = box_random(BOX_PLAIN, ROCQ_F32, 1, 4, 5, 4, 2);
    {
        box *outputs[] = {&rgb};
        const int n_outputs = 1;
        const rocq_tensor kept[] = {rgb.t};
        const rocq_pixels_params good = {.y = &rgb.t, .x = &four.t};
        rocq_pixels_params p = good;
#define NO(change, result) REFUSED_OP(change, ROCQ_OP_PIXELS, result)
        NO(p.x = &x.t, ROCQ_E_SHAPE); // six channels
        NO(rgb.t.ne[0] = 2, ROCQ_E_SHAPE);
        NO(rgb.t.ne[1] = 4, ROCQ_E_SHAPE);
        NO(rgb.t.ne[3] = 1, ROCQ_E_SHAPE);
        NO(rgb.t.format = ROCQ_F32, ROCQ_E_FORMAT);
        NO(p.scale = NAN, ROCQ_E_ARGUMENT);
        NO(p.scale = INFINITY, ROCQ_E_ARGUMENT);
        NO(p.bias = -INFINITY, ROCQ_E_ARGUMENT);
        NO(p.finite = &rgb.t, ROCQ_E_SHAPE);
#undef NO
    }
    boxes_free(&x, &stats, &had, &each, &y, &rgb, &four);
}

// -- against PyTorch: cases that tests/pictures.py has written --

static float *torch_floats(FILE *f, int64_t n) {
    float *v = (float *)malloc((size_t)n * sizeof *v);
    assert_non_null(v);
    assert_int_equal(fread(v, sizeof *v, (size_t)n, f), n);
    return v;
}

// A tensor of PyTorch, whose sizes stand before its values, outermost first.
static box torch_box(FILE *f) {
    int32_t ne[4];
    assert_int_equal(fread(ne, sizeof *ne, 4, f), 4);
    box b = box_make(BOX_PLAIN, ROCQ_F32, ne[3], ne[2], ne[1], ne[0]);
    float *v = torch_floats(f, b.count);
    for (int64_t i = 0; i < b.count; i++) b.value[i] = (double)v[i];
    box_write(&b);
    free(v);
    return b;
}

static void agrees_with_torch(void **state) {
    (void)state;
    const char *path = getenv("ROCQ_TORCH_CASES");
    if (!path) {
        print_message("SKIPPED: ROCQ_TORCH_CASES is not set: tests/pictures.py writes that file\n");
        skip();
    }
    FILE *f = fopen(path, "rb");
    int n_cases = 0, n_folded = 0;
    assert_non_null(f);
    int32_t o[16]; // kind, taps (w, h, t), stride, upsample, pads, groups, activations
    while (fread(o, sizeof *o, 16, f) == 16) {
        n_cases++;
        box x = torch_box(f), want = torch_box(f);
        box y = box_make(BOX_STRIDED, ROCQ_F32, want.t.ne[0], want.t.ne[1], want.t.ne[2],
                         want.t.ne[3]), *out = &y;
        if (o[0] == 1) {
            const rocq_resize_params p = {.y = &y.t, .x = &x.t, .mode = (rocq_resize_mode)o[1]};
            for (int simd = 0; simd < 2; simd++) {
                run(simd, ROCQ_OP_RESIZE, &p, &out, 1);
                check_all(&y, want.value, 1e-11);
            }
        } else {
            const int64_t m = want.t.ne[0], k = x.t.ne[0] * o[1] * o[2] * o[3];
            const bool folded = o[1] == 3 && o[2] == 3 && o[4] == 1 && o[5] == 2;
            n_folded += folded;
            float *weights = torch_floats(f, m * k);
            box w = box_make(BOX_PLAIN, ROCQ_F32, folded ? k / 9 * 4 : k, m, folded ? 4 : 1, 1);
            box bias = torch_box(f);
            box gain = torch_box(f), shift = torch_box(f);
            box stats = box_make(BOX_PLAIN, ROCQ_F32, 2, o[8] ? o[8] : 1, x.t.ne[3], 1);
            const rocq_conv_weights_params load = {
                .w = &w.t, .src = weights, .src_format = ROCQ_F32,
                .src_size = m * k * (int64_t)sizeof(float), .kw = o[1], .kh = o[2], .kt = o[3],
                .folded = folded};
            const rocq_norm_stats_params norm = {.stats = &stats.t, .x = &x.t, .eps = 1e-5f};
            const rocq_conv_params p = {
                .y = &y.t, .w = &w.t, .x = &x.t, .bias = &bias.t,
                .stats = o[8] ? &stats.t : NULL, .norm_weight = o[8] ? &gain.t : NULL,
                .norm_bias = o[8] ? &shift.t : NULL, .kw = o[1], .kh = o[2], .kt = o[3],
                .stride = o[4], .upsample = o[5], .folded = folded, .pad_x = o[6], .pad_y = o[7],
                .x_activation = (rocq_activation)o[9], .activation = (rocq_activation)o[10]};
            for (int simd = 0; simd < 2; simd++) {
                rocq_ctx *ctx = contexts[simd][1];
                assert_int_equal(rocq_conv_weights(ctx, &load), ROCQ_OK);
                if (o[8]) assert_int_equal(rocq_norm_stats(ctx, &norm), ROCQ_OK);
                run(simd, ROCQ_OP_CONV, &p, &out, 1);
                check_all(&y, want.value, 1e-10); // PyTorch's own error is in it
            }
            free(weights);
            boxes_free(&w, &bias, &gain, &shift, &stats);
        }
        boxes_free(&x, &y, &want);
    }
    fclose(f);
    assert_true(n_cases >= 20 && n_folded >= 2);
}

static void scratch_is_lent(void **state) {
    rocq_ctx *ctx;
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 2};
    (void)state;
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    check_lend(ctx);
    rocq_close(&ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(conv_in_all_pairs_of_options),
        cmocka_unit_test(conv_with_folded_weights),
        cmocka_unit_test(folding_changes_only_the_rounding),
        cmocka_unit_test(conv_of_larger_pictures),
        cmocka_unit_test(conv_keeps_nan_where_it_is),
        cmocka_unit_test(tiles_are_the_whole),
        cmocka_unit_test(chunks_are_the_whole),
        cmocka_unit_test(bits_do_not_depend_on_threads),
        cmocka_unit_test(conv_weights_are_reordered),
        cmocka_unit_test(conv_refuses),
        cmocka_unit_test(norm_stats_of_groups),
        cmocka_unit_test(norm_stats_of_positions),
        cmocka_unit_test(norm_stats_merge_over_tiles),
        cmocka_unit_test(norm_stats_keep_their_digits_at_2048),
        cmocka_unit_test(resize),
        cmocka_unit_test(resize_of_infinities),
        cmocka_unit_test(pixels),
        cmocka_unit_test(norm_stats_resize_and_pixels_refuse),
        cmocka_unit_test(scratch_is_lent),
        cmocka_unit_test(agrees_with_torch),
    };
    return cmocka_run_group_tests_name("pictures", tests, open_contexts, close_contexts);
}
