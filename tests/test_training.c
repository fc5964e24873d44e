// The ops of training: against float64 references, finite differences of float64 forwards, and a
// float64 optimizer over many steps.
#include "../rocq.h"

#include <float.h>

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "ops.h"

#define ULP 0x1p-24 // half of the distance from 1 to the next float

static double *doubles(int64_t n) {
    double *p = (double *)calloc((size_t)n, sizeof(double));
    assert_non_null(p);
    return p;
}

static double *copied(const box *b) {
    return (double *)memcpy(doubles(b->count), b->value, (size_t)b->count * sizeof(double));
}

// Every element within slack[i] and the rounding to the format of what is wanted.
static void check_close(box *got, const double *want, const double *slack, const char *what) {
    box_read(got);
    box_check_outside(got);
    for (int64_t i = 0; i < got->count; i++) {
        const double rounding = rounding_to(got->t.format, want[i]) * (1 + 1e-6);
        if (!(fabs(got->value[i] - want[i]) <= slack[i] + rounding + 1e-37)) {
            fail_msg("%s: element %lld is %.9g, expected %.9g (slack %g)", what, (long long)i,
                     got->value[i], want[i], slack[i]);
        }
    }
}

static box box_f32(const double *values, int64_t n) {
    box b = box_make(BOX_PLAIN, ROCQ_F32, n, 1, 1, 1);
    memcpy(b.value, values, (size_t)n * sizeof(double));
    box_write(&b);
    return b;
}

static rocq_format random_float(void) { return random_below(2) ? ROCQ_F16 : ROCQ_F32; }
static box_layout random_layout(void) { return (box_layout)random_below(3); }

// -- norm_backward --

typedef struct norm_problem {
    rocq_norm_backward_params p;
    box dx, dx16, dweight, dbias, dy, x, weight, mean, rstd, residual;
    double *want_dx, *slack_dx, *want[2], *slack[2]; // dweight, dbias
} norm_problem;

static void norm_reference(norm_problem *a) {
    const int64_t n = a->x.t.ne[0], n_rows = a->x.count / n;
    a->want_dx = doubles(a->x.count);
    a->slack_dx = doubles(a->x.count);
    for (int i = 0; i < 2; i++) {
        const box *old = i == 0 ? &a->dweight : &a->dbias;
        a->want[i] = doubles(n);
        a->slack[i] = doubles(n);
        for (int64_t k = 0; a->p.accumulate && k < n; k++) {
            a->want[i][k] = old->value[k];
            a->slack[i][k] = 4 * ULP * fabs(old->value[k]);
        }
    }
    for (int64_t r = 0; r < n_rows; r++) {
        const double mean = a->p.mean ? a->mean.value[r] : 0, rstd = a->rstd.value[r];
        double sum_g = 0, sum_gx = 0, size_g = 0, size_gx = 0;
        for (int pass = 0; pass < 2; pass++) {
            for (int64_t k = 0; k < n; k++) {
                const double dy = a->dy.value[r * n + k];
                const double xh = (a->x.value[r * n + k] - mean) * rstd;
                const double g = a->p.weight ? dy * a->weight.value[k] : dy;
                const double residual = a->p.residual ? a->residual.value[r * n + k] : 0;
                if (pass == 0) {
                    sum_g += g / (double)n;
                    sum_gx += g * xh / (double)n;
                    size_g += fabs(g) / (double)n;
                    size_gx += fabs(g * xh) / (double)n;
                    continue;
                }
                a->want_dx[r * n + k] =
                    rstd * (g - (a->p.mean ? sum_g : 0) - xh * sum_gx) + residual;
                a->slack_dx[r * n + k] =
                    40 * ULP * (rstd * (fabs(g) + size_g + fabs(xh) * size_gx) + fabs(residual));
                a->want[0][k] += dy * xh;
                a->want[1][k] += dy;
                a->slack[0][k] += 40 * ULP * fabs(dy * xh);
                a->slack[1][k] += 40 * ULP * fabs(dy);
            }
        }
    }
}

// Mean and rstd of each row of x, as the forward saves them.
static void norm_save(const box *x, box *mean, box *rstd, bool center) {
    const int64_t n = x->t.ne[0];
    for (int64_t r = 0; r < x->count / n; r++) {
        double m = 0, square = 0;
        for (int64_t k = 0; center && k < n; k++) m += x->value[r * n + k] / (double)n;
        for (int64_t k = 0; k < n; k++) {
            square += (x->value[r * n + k] - m) * (x->value[r * n + k] - m) / (double)n;
        }
        if (center) mean->value[r] = m;
        rstd->value[r] = 1 / sqrt(square + 1e-5);
    }
    if (center) box_write(mean);
    box_write(rstd);
}

static void norm_solve(int64_t n, const int64_t *rows) {
    norm_problem a;
    memset(&a, 0, sizeof a);
    const bool center = random_below(2), accumulate = random_below(2);
    const int in_place = (int)random_below(3); // 0 none, 1 dy, 2 residual
    const bool residual = in_place == 2 || random_below(2);
    a.x = box_random(random_layout(), random_float(), 2, n, rows[0], rows[1], rows[2]);
    for (int64_t i = 0; center && i < a.x.count; i++) a.x.value[i] += 3;
    if (center) box_write(&a.x);
    a.dy = box_random(random_layout(), random_float(), 1, n, rows[0], rows[1], rows[2]);
    a.weight = box_random(BOX_PLAIN, ROCQ_F32, 1, n, 1, 1, 1);
    a.dweight = box_random(BOX_PLAIN, ROCQ_F32, accumulate ? 1 : NAN, n, 1, 1, 1);
    a.dbias = box_random(BOX_PLAIN, ROCQ_F32, accumulate ? 1 : NAN, n, 1, 1, 1);
    a.mean = box_make(random_layout(), ROCQ_F32, rows[0], rows[1], rows[2], 1);
    a.rstd = box_make(random_layout(), ROCQ_F32, rows[0], rows[1], rows[2], 1);
    norm_save(&a.x, &a.mean, &a.rstd, center);
    a.residual = box_random(random_layout(), random_float(), 1, n, rows[0], rows[1], rows[2]);
    a.dx = in_place == 1 ? a.dy
           : in_place == 2
               ? a.residual
               : box_make(random_layout(), random_float(), n, rows[0], rows[1], rows[2]);
    a.dx16 = box_make(random_layout(), ROCQ_F16, n, rows[0], rows[1], rows[2]);
    const rocq_norm_backward_params p = {
        .dx = &a.dx.t, .dx16 = random_below(2) ? &a.dx16.t : NULL,
        .dweight = random_below(4) ? &a.dweight.t : NULL,
        .dbias = random_below(4) ? &a.dbias.t : NULL, .dy = in_place == 1 ? &a.dx.t : &a.dy.t,
        .x = &a.x.t, .weight = random_below(4) ? &a.weight.t : NULL,
        .mean = center ? &a.mean.t : NULL, .rstd = &a.rstd.t,
        .residual = !residual ? NULL : in_place == 2 ? &a.dx.t : &a.residual.t,
        .accumulate = accumulate};
    a.p = p;
    norm_reference(&a);
    box *const outputs[4] = {&a.dx, &a.dweight, &a.dbias, &a.dx16};
    const box before[4] = {a.dx, a.dweight, a.dbias, a.dx16};
    unsigned char *bytes[4];
    for (int o = 0; o < 4; o++) {
        bytes[o] = (unsigned char *)malloc((size_t)before[o].size);
        assert_non_null(bytes[o]);
        memcpy(bytes[o], before[o].memory, (size_t)before[o].size);
    }
    double *const values = a.dx.value;
    a.dx.value = doubles(a.dx.count);
    for (int simd = 0; simd < 2; simd++) {
        for (int o = 0; o < 4; o++) {
            memcpy(outputs[o]->memory, bytes[o], (size_t)outputs[o]->size);
        }
        run(simd, ROCQ_OP_NORM_BACKWARD, &a.p, outputs, 4);
        check_close(&a.dx, a.want_dx, a.slack_dx, "dx");
        if (p.dx16) check_close(&a.dx16, a.want_dx, a.slack_dx, "dx16");
        if (p.dweight) check_close(&a.dweight, a.want[0], a.slack[0], "dweight");
        if (p.dbias) check_close(&a.dbias, a.want[1], a.slack[1], "dbias");
    }
    for (int o = 0; o < 4; o++) free(bytes[o]);
    free(a.dx.value);
    a.dx.value = values;
    if (in_place == 0) box_free(&a.dx);
    box *const all[] = {&a.dx16, &a.dweight, &a.dbias, &a.dy, &a.x, &a.weight, &a.mean, &a.rstd};
    for (int i = 0; i < 8; i++) box_free(all[i]);
    box_free(&a.residual);
    free(a.want_dx);
    free(a.slack_dx);
    for (int i = 0; i < 2; i++) {
        free(a.want[i]);
        free(a.slack[i]);
    }
}

static void norm_backward_matches_the_reference(void **state) {
    static const int64_t widths[] = {1, 2, 7, 8, 31, 64, 255, 256, 257, 768, 1000};
    static const int64_t rows[][3] = {{1, 1, 1}, {3, 2, 2}, {17, 1, 1}, {2, 5, 3}, {600, 1, 1}};
    (void)state;
    random_state = 1;
    for (size_t w = 0; w < sizeof widths / sizeof widths[0]; w++) {
        for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
            for (int i = 0; i < (rows[r][0] > 100 ? 2 : 6); i++) norm_solve(widths[w], rows[r]);
        }
    }
}

// sum of dy y for y = norm(x), in float64
static double norm_forward(const double *x, const double *weight, const double *bias,
                           const double *dy, int64_t n, int64_t n_rows, bool center) {
    double sum = 0;
    for (int64_t r = 0; r < n_rows; r++, x += n, dy += n) {
        double mean = 0, square = 0;
        for (int64_t k = 0; center && k < n; k++) mean += x[k] / (double)n;
        for (int64_t k = 0; k < n; k++) square += (x[k] - mean) * (x[k] - mean) / (double)n;
        for (int64_t k = 0; k < n; k++) {
            sum += dy[k] * ((x[k] - mean) / sqrt(square + 1e-5) * weight[k] + bias[k]);
        }
    }
    return sum;
}

// The forward op saves mean and rstd, and the backward op's gradients are its slopes.
static void norm_backward_is_the_forwards_slope(void **state) {
    enum { N = 20, ROWS = 5 };
    (void)state;
    random_state = 2;
    for (int center = 0; center < 2; center++) {
        box x = box_random(BOX_PLAIN, ROCQ_F32, 2, N, ROWS, 1, 1);
        box dy = box_random(BOX_PLAIN, ROCQ_F32, 1, N, ROWS, 1, 1);
        box weight = box_random(BOX_PLAIN, ROCQ_F32, 1, N, 1, 1, 1);
        box bias = box_random(BOX_PLAIN, ROCQ_F32, 1, N, 1, 1, 1);
        box y = box_make(BOX_PLAIN, ROCQ_F32, N, ROWS, 1, 1),
            mean = box_make(BOX_PLAIN, ROCQ_F32, ROWS, 1, 1, 1);
        box rstd = box_make(BOX_PLAIN, ROCQ_F32, ROWS, 1, 1, 1);
        box dx = box_make(BOX_PLAIN, ROCQ_F32, N, ROWS, 1, 1);
        box dw = box_make(BOX_PLAIN, ROCQ_F32, N, 1, 1, 1),
            db = box_make(BOX_PLAIN, ROCQ_F32, N, 1, 1, 1);
        const rocq_norm_params forward = {.y = &y.t, .x = &x.t, .weight = &weight.t,
                                          .bias = center ? &bias.t : NULL,
                                          .mean = center ? &mean.t : NULL, .rstd = &rstd.t};
        const rocq_norm_backward_params backward = {
            .dx = &dx.t, .dweight = &dw.t, .dbias = &db.t, .dy = &dy.t, .x = &x.t,
            .weight = &weight.t, .mean = center ? &mean.t : NULL, .rstd = &rstd.t};
        rocq_ctx *ctx = contexts[1][0];
        assert_int_equal(center ? rocq_layernorm(ctx, &forward) : rocq_rmsnorm(ctx, &forward),
                         ROCQ_OK);
        assert_int_equal(rocq_norm_backward(ctx, &backward), ROCQ_OK);
        struct { double *at; box *got; } slopes[] = {
            {x.value, &dx}, {weight.value, &dw}, {bias.value, &db}};
        for (int s = 0; s < 3; s++) {
            box_read(slopes[s].got);
            for (int64_t i = 0; i < slopes[s].got->count; i++) {
                const double was = slopes[s].at[i], step = 1e-5;
                slopes[s].at[i] = was + step;
                double slope =
                    norm_forward(x.value, weight.value, bias.value, dy.value, N, ROWS, center);
                slopes[s].at[i] = was - step;
                slope -= norm_forward(x.value, weight.value, bias.value, dy.value, N, ROWS, center);
                slopes[s].at[i] = was;
                slope /= 2 * step;
                if (!(fabs(slopes[s].got->value[i] - slope) <= 1e-5 * (1 + fabs(slope)))) {
                    fail_msg("gradient %g, slope %g", slopes[s].got->value[i], slope);
                }
            }
        }
        box *const all[10] = {&x, &dy, &weight, &bias, &y, &mean, &rstd, &dx, &dw, &db};
        for (int i = 0; i < 10; i++) box_free(all[i]);
    }
}

// -- activate_backward, glu_backward --

static double activated(rocq_activation activation, double x) {
    switch (activation) {
    case ROCQ_ACT_SILU: return x / (1 + exp(-x));
    case ROCQ_ACT_GELU:
        return x / 2 * (1 + tanh(sqrt(2 / acos(-1.0)) * (x + 0.044715 * x * x * x)));
    case ROCQ_ACT_GELU_ERF: return x / 2 * erfc(-x / sqrt(2.0));
    case ROCQ_ACT_RELU: return x > 0 ? x : 0;
    case ROCQ_ACT_TANH: return tanh(x);
    default: return x;
    }
}

// By a difference of float64 values, right to 1e-9; RELU is not asked for near 0.
static double slope_of(rocq_activation activation, double x) {
    const double step = 1e-4;
    const double wide = activated(activation, x + 2 * step) - activated(activation, x - 2 * step);
    const double near_by = activated(activation, x + step) - activated(activation, x - step);
    return (8 * near_by - wide) / (12 * step);
}

static void map_solve(rocq_activation activation, bool glu, int in_place) {
    const int64_t ne[4] = {1 + random_below(600), 1 + random_below(4), 1 + random_below(3), 2};
    const rocq_format format = random_float();
    box dy = box_random(random_layout(), in_place == 1 ? format : random_float(), 1, ne[0], ne[1],
                        ne[2], ne[3]);
    box x = box_random(random_layout(), in_place == 2 ? format : random_float(), 3, ne[0], ne[1],
                       ne[2], ne[3]);
    box up = box_random(random_layout(), random_float(), 2, ne[0], ne[1], ne[2], ne[3]);
    for (int64_t i = 0; i < x.count; i++) {
        if (fabs(x.value[i]) < 1e-3) x.value[i] = 1e-3;
        if (random_below(100) == 0) x.value[i] *= 1000;
    }
    box_write(&x);
    box dup = box_make(random_layout(), random_float(), ne[0], ne[1], ne[2], ne[3]);
    box dx = in_place == 1   ? dy
             : in_place == 2 ? x
                             : box_make(random_layout(), format, ne[0], ne[1], ne[2], ne[3]);
    const rocq_glu_backward_params p = {
        .dgate = &dx.t, .dup = &dup.t, .dy = in_place == 1 ? &dx.t : &dy.t,
        .gate = in_place == 2 ? &dx.t : &x.t, .up = &up.t, .activation = activation};
    const rocq_activate_backward_params alone = {p.dgate, p.dy, p.gate, activation};
    double *want = doubles(x.count), *slack = doubles(x.count), *want_up = doubles(x.count),
           *slack_up = doubles(x.count);
    for (int64_t i = 0; i < x.count; i++) {
        const double all = dy.value[i] * (glu ? up.value[i] : 1);
        want[i] = slope_of(activation, x.value[i]) * all;
        slack[i] = 1e-6 * fabs(all);
        want_up[i] = activated(activation, x.value[i]) * dy.value[i];
        slack_up[i] = 1e-6 * fabs(dy.value[i]) * (1e-3 + fabs(activated(activation, x.value[i])));
    }
    unsigned char *before = (unsigned char *)malloc((size_t)dx.size);
    assert_non_null(before);
    memcpy(before, dx.memory, (size_t)dx.size);
    double *const values = dx.value;
    dx.value = doubles(dx.count);
    box *const outputs[2] = {&dx, &dup};
    for (int simd = 0; simd < 2; simd++) {
        memcpy(dx.memory, before, (size_t)dx.size);
        if (glu) run(simd, ROCQ_OP_GLU_BACKWARD, &p, outputs, 2);
        else run(simd, ROCQ_OP_ACTIVATE_BACKWARD, &alone, outputs, 1);
        check_close(&dx, want, slack, "dx");
        if (glu) check_close(&dup, want_up, slack_up, "dup");
    }
    free(dx.value);
    dx.value = values;
    if (in_place == 0) box_free(&dx);
    boxes_free(&dy, &x, &up, &dup);
    free(before); free(want); free(slack); free(want_up); free(slack_up);
}

static void slopes_of_activations(void **state) {
    (void)state;
    random_state = 10;
    for (int i = 0; i < 72; i++) map_solve((rocq_activation)(i % 6), i / 6 % 2, i / 12 % 3);
}

// -- gather_backward --

static void gather_backward_adds_in_order(void **state) {
    static const int64_t widths[] = {1, 7, 63, 64, 65, 200, 768};
    (void)state;
    random_state = 11;
    for (size_t w = 0; w < sizeof widths / sizeof widths[0]; w++) {
        for (int c = 0; c < 6; c++) {
            const int64_t n = widths[w], n_ids = 1 + random_below(40), n_rows = c % 2 ? 9 : 1000;
            const float scale = c % 3 == 2 ? -0.37f : 0;
            int32_t ids[40];
            for (int64_t i = 0; i < n_ids; i++) ids[i] = (int32_t)random_below(n_rows);
            box table = box_random(random_layout(), ROCQ_F32, 1, n, n_rows, 1, 1);
            box dy = box_random(random_layout(), random_float(), 1, n, n_ids, 1, 1),
                list = box_i32(ids, n_ids);
            const rocq_gather_backward_params p = {&table.t, &dy.t, &list.t, scale};
            double *want = copied(&table), *slack = doubles(table.count);
            for (int64_t i = 0; i < n_ids; i++) {
                for (int64_t k = 0; k < n; k++) {
                    const double add = dy.value[i * n + k] * (double)(scale != 0 ? scale : 1);
                    want[ids[i] * n + k] += add;
                    slack[ids[i] * n + k] +=
                        40 * ULP * (fabs(add) + fabs(table.value[ids[i] * n + k]));
                }
            }
            unsigned char *before = (unsigned char *)malloc((size_t)table.size);
            assert_non_null(before);
            memcpy(before, table.memory, (size_t)table.size);
            box *const outputs[1] = {&table};
            for (int simd = 0; simd < 2; simd++) {
                memcpy(table.memory, before, (size_t)table.size);
                run(simd, ROCQ_OP_GATHER_BACKWARD, &p, outputs, 1);
                check_close(&table, want, slack, "dtable"); // other rows exactly
            }
            list.value[n_ids - 1] = c % 2 ? -1 : (double)n_rows;
            box_write(&list);
            run_fails(ROCQ_OP_GATHER_BACKWARD, &p, ROCQ_E_BOUNDS, outputs, 1);
            free(before); free(want); free(slack);
            boxes_free(&table, &dy, &list);
        }
    }
}

// -- rope: backward --

// The backward is the transpose of the forward: dy . rope(x) = rope_backward(dy) . x.
static void rope_backward_is_the_transpose(void **state) {
    (void)state;
    random_state = 12;
    for (int c = 0; c < 24; c++) {
        const int64_t d = c % 3 == 0 ? 10 : 64, heads = 1 + random_below(5),
                      n = 1 + random_below(9);
        int32_t pos[9];
        for (int64_t i = 0; i < n; i++) pos[i] = (int32_t)random_below(100000);
        box x = box_random(random_layout(), ROCQ_F32, 1, d, heads, n, 1), at = box_i32(pos, n);
        box dy = box_random(random_layout(), random_float(), 1, d, heads, n, 1);
        box y = box_make(random_layout(), ROCQ_F32, d, heads, n, 1),
            dx = box_make(random_layout(), ROCQ_F32, d, heads, n, 1);
        rocq_rope_params p = {.y = &y.t, .x = &x.t, .pos = &at.t,
                              .rope = {.pairing = c % 2 ? ROCQ_ROPE_NEOX : ROCQ_ROPE_NORM,
                                       .n_dims = c % 4 < 2 ? 0 : (int32_t)d - 2,
                                       .attn_factor = c % 5 ? 0 : 1.5f}};
        box *const outputs[2] = {&y, &dx};
        for (int simd = 0; simd < 2; simd++) {
            double forward = 0, backward = 0, size = 0;
            p.y = &y.t;
            p.x = &x.t;
            p.backward = false;
            run(simd, ROCQ_OP_ROPE, &p, outputs, 1);
            p.y = &dx.t;
            p.x = &dy.t;
            p.backward = true;
            run(simd, ROCQ_OP_ROPE, &p, outputs + 1, 1);
            box_read(&y);
            box_read(&dx);
            for (int64_t i = 0; i < x.count; i++) {
                forward += dy.value[i] * y.value[i];
                backward += dx.value[i] * x.value[i];
                size += fabs(dy.value[i] * y.value[i]) + fabs(dx.value[i] * x.value[i]);
            }
            assert_true(fabs(forward - backward) <= 2 * ULP * size);
        }
        boxes_free(&x, &at, &dy, &y, &dx);
    }
}

// -- cross_entropy --

typedef struct entropy_case {
    int64_t n_classes, n;
    rocq_format format, d_format;
    bool in_place, weights, scale;
    float softcap, shift;
} entropy_case;

static void entropy_solve(const entropy_case *s) {
    const int64_t v = s->n_classes, n = s->n;
    box logits = box_random(random_layout(), s->format, 3, v, n, 1, 1);
    for (int64_t i = 0; i < logits.count; i++) {
        if (s->softcap > 0) logits.value[i] = s->softcap * tanh(logits.value[i] / s->softcap);
        logits.value[i] += s->shift;
        // and whole strips at the front of some columns, as of a vocabulary that is masked
        const bool masked = i / v % 3 == 1 && i % v < v - v / 3;
        if (v > 4 && (random_below(50) == 0 || masked)) {
            logits.value[i] = s->softcap > 0 ? 0 : (double)-INFINITY;
        }
    }
    box weights = box_random(BOX_PLAIN, ROCQ_F32, 1, n, 1, 1, 1);
    box scale = box_random(BOX_PLAIN, ROCQ_F32, 100, 1, 1, 1, 1);
    box loss = box_make(BOX_PLAIN, ROCQ_F32, n, 1, 1, 1);
    box dlogits = s->in_place ? logits : box_make(random_layout(), s->d_format, v, n, 1, 1);
    int32_t *targets = (int32_t *)malloc((size_t)n * sizeof *targets);
    assert_non_null(targets);
    for (int64_t i = 0; i < n; i++) {
        targets[i] = i % 5 == 3 ? -1 - (int32_t)random_below(100) : (int32_t)random_below(v);
        if (targets[i] >= 0 && logits.value[i * v + targets[i]] < -1e30)
            logits.value[i * v + targets[i]] = 1;
        // what is ignored is not looked at
        if (targets[i] < 0) logits.value[i * v] = NAN;
    }
    if (n > 2) weights.value[2] = 0;
    box_write(&weights);
    box_write(&logits);
    box ids = box_i32(targets, n);
    double *want = doubles(v * n), *slack = doubles(v * n), *want_loss = doubles(n),
           *slack_loss = doubles(n);
    for (int64_t i = 0; i < n; i++) {
        const double *x = logits.value + i * v;
        const double weight = s->weights ? weights.value[i] : 1,
                     all = s->scale ? weight * scale.value[0] : weight;
        double top = -INFINITY, sum = 0;
        if (targets[i] < 0 || weight == 0) continue;
        for (int64_t k = 0; k < v; k++) top = fmax(top, x[k]);
        for (int64_t k = 0; k < v; k++) sum += exp(x[k] - top);
        want_loss[i] = log(sum) + top - x[targets[i]];
        slack_loss[i] = 60 * ULP * (1 + fabs(want_loss[i]));
        for (int64_t k = 0; k < v; k++) {
            const double slope = s->softcap > 0 ? 1 - x[k] * x[k] / s->softcap / s->softcap : 1;
            const double softmax = exp(x[k] - top) / sum, one = k == targets[i];
            want[i * v + k] = all * (softmax - one) * slope;
            // the difference x - top is rounded
            slack[i * v + k] =
                (60 + 2 * (top - x[k] < 1e3 ? top - x[k] : 0)) * ULP * fabs(all) * (softmax + one);
        }
    }
    const rocq_cross_entropy_params p = {
        .loss = random_below(4) ? &loss.t : NULL, .dlogits = &dlogits.t,
        .logits = s->in_place ? &dlogits.t : &logits.t, .targets = &ids.t,
        .weights = s->weights ? &weights.t : NULL, .scale = s->scale ? &scale.t : NULL,
        .softcap = s->softcap};
    box *const outputs[2] = {&dlogits, &loss};
    unsigned char *before = (unsigned char *)malloc((size_t)dlogits.size);
    assert_non_null(before);
    memcpy(before, dlogits.memory, (size_t)dlogits.size);
    double *values = dlogits.value;
    dlogits.value = doubles(v * n);
    for (int simd = 0; simd < 2; simd++) {
        memcpy(dlogits.memory, before, (size_t)dlogits.size);
        run(simd, ROCQ_OP_CROSS_ENTROPY, &p, outputs, 2);
        check_close(&dlogits, want, slack, "dlogits");
        if (p.loss) check_close(&loss, want_loss, slack_loss, "loss");
    }
    free(before);
    free(dlogits.value);
    dlogits.value = values;
    if (!s->in_place) { // the loss alone
        const rocq_cross_entropy_params alone = {.loss = &loss.t, .logits = &logits.t,
                                                 .targets = &ids.t, .weights = p.weights};
        memset(loss.memory, 0xff, (size_t)loss.size);
        run(1, ROCQ_OP_CROSS_ENTROPY, &alone, outputs + 1, 1);
        check_close(&loss, want_loss, slack_loss, "loss");
        box_free(&dlogits);
    }
    boxes_free(&logits, &weights, &scale, &loss, &ids);
    free(targets);
    free(want);
    free(slack);
    free(want_loss);
    free(slack_loss);
}

static void cross_entropy_matches_the_reference(void **state) {
    static const int64_t classes[] = {1, 2, 7, 255, 256, 257, 1000, 50257};
    (void)state;
    random_state = 3;
    for (size_t c = 0; c < sizeof classes / sizeof classes[0]; c++) {
        for (int i = 0; i < (classes[c] > 2000 ? 2 : 12); i++) {
            const rocq_format format = random_float();
            const bool in_place = i % 3 == 0;
            const entropy_case s = {
                .n_classes = classes[c], .n = 1 + random_below(classes[c] > 2000 ? 5 : 20),
                .format = format, .d_format = in_place ? format : random_float(),
                .in_place = in_place, .weights = i % 2, .scale = i % 4 < 2,
                .softcap = i % 5 == 4 ? 4.0f : 0.0f, .shift = i % 6 == 5 ? 1000.0f : 0.0f};
            if (s.softcap > 0 && s.shift > 0) continue;
            entropy_solve(&s);
        }
    }
}

static void cross_entropy_has_the_slope_of_its_loss(void **state) {
    enum { V = 30, N = 4 };
    static const int32_t targets[N] = {0, 29, 7, 7};
    (void)state;
    random_state = 4;
    // of z, whose softcap is what the op gets
    const double cap = 2;
    box z = box_random(BOX_PLAIN, ROCQ_F32, 2, V, N, 1, 1),
        logits = box_make(BOX_PLAIN, ROCQ_F32, V, N, 1, 1);
    box d = box_make(BOX_PLAIN, ROCQ_F32, V, N, 1, 1), ids = box_i32(targets, N);
    for (int64_t i = 0; i < z.count; i++) logits.value[i] = cap * tanh(z.value[i] / cap);
    box_write(&logits);
    const rocq_cross_entropy_params p = {.dlogits = &d.t, .logits = &logits.t, .targets = &ids.t,
                                         .softcap = (float)cap};
    assert_int_equal(rocq_cross_entropy(contexts[1][0], &p), ROCQ_OK);
    box_read(&d);
    for (int64_t i = 0; i < z.count; i++) {
        const double step = 1e-5;
        double slope = 0;
        for (int sign = -1; sign < 2; sign += 2) {
            double sum = 0, at = 0;
            for (int64_t k = 0; k < V; k++) {
                const int64_t j = i / V * V + k;
                const double x = cap * tanh((z.value[j] + (j == i ? sign * step : 0)) / cap);
                sum += exp(x);
                if (k == targets[i / V]) at = x;
            }
            slope += sign * (log(sum) - at) / (2 * step);
        }
        assert_true(fabs(d.value[i] - slope) <= 1e-5);
    }
    boxes_free(&z, &logits, &d, &ids);
}

static void cross_entropy_of_bad_targets_and_logits(void **state) {
    int32_t targets[3] = {0, 10, -7};
    (void)state;
    random_state = 5;
    box logits = box_random(BOX_STRIDED, ROCQ_F32, 1, 10, 3, 1, 1),
        loss = box_make(BOX_PLAIN, ROCQ_F32, 3, 1, 1, 1);
    box ids = box_i32(targets, 3);
    rocq_cross_entropy_params p = {.loss = &loss.t, .dlogits = &logits.t, .logits = &logits.t,
                                   .targets = &ids.t};
    box *const outputs[2] = {&loss, &logits};
    run_fails(ROCQ_OP_CROSS_ENTROPY, &p, ROCQ_E_BOUNDS, outputs, 2);
    ids.value[1] = 9;
    box_write(&ids);
    logits.value[14] = NAN; // shows in its own column alone
    logits.value[3] = INFINITY;
    box_write(&logits);
    run(1, ROCQ_OP_CROSS_ENTROPY, &p, outputs, 2);
    box_read(&loss);
    box_read(&logits);
    assert_true(isnan(loss.value[0]) && isnan(loss.value[1]) && loss.value[2] == 0);
    for (int i = 10; i < 20; i++) assert_true(isnan(logits.value[i]));
    for (int i = 20; i < 30; i++) assert_true(logits.value[i] == 0);
    p.loss = p.dlogits = NULL;
    run_fails(ROCQ_OP_CROSS_ENTROPY, &p, ROCQ_E_ARGUMENT, outputs, 2);
    boxes_free(&logits, &loss, &ids);
}

// -- grad_norm, adamw --

static const double fresh_state[ROCQ_TRAIN_STATE] = {1};

static void grad_norm_measures_clips_and_counts(void **state) {
    static const int64_t sizes[] = {1, 7, 256, 1000, 8192, 100001, 3000017};
    (void)state;
    random_state = 6;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int simd = 0; simd < 2; simd++) {
            const double first[ROCQ_TRAIN_STATE] = {128, 7, 7, 41, 2, 5, 3, 4};
            box g = box_random(BOX_PLAIN, ROCQ_F32, 3, sizes[i], 1, 1, 1),
                s = box_f32(first, ROCQ_TRAIN_STATE);
            const double max_norm = i % 2 ? 0.01 : 0;
            const rocq_grad_norm_params p = {.state = &s.t, .g = &g.t, .max_norm = (float)max_norm,
                                             .growth_interval = 100};
            double square = 0;
            for (int64_t k = 0; k < g.count; k++) square += g.value[k] * g.value[k];
            const double norm = sqrt(square) / 128;
            const double factor = (max_norm > 0 && norm > max_norm ? max_norm / norm : 1) / 128;
            const double want[ROCQ_TRAIN_STATE] = {128, factor, norm, 42, 2, 6, 3, 4};
            const double slack[ROCQ_TRAIN_STATE] = {0, 20 * ULP * factor, 20 * ULP * norm};
            box *const outputs[1] = {&s};
            run(simd, ROCQ_OP_GRAD_NORM, &p, outputs, 1);
            check_close(&s, want, slack, "state");
            boxes_free(&g, &s);
        }
    }
}

// The loss scale doubles and halves, within its bounds.
static void grad_norm_moves_the_loss_scale(void **state) {
    (void)state;
    const double one[3] = {1, 2, 2}, first[ROCQ_TRAIN_STATE] = {4};
    box g = box_f32(one, 3), s = box_f32(first, ROCQ_TRAIN_STATE);
    rocq_grad_norm_params p = {.state = &s.t, .g = &g.t, .growth_interval = 3};
    static const struct { float g; double scale, factor, steps, skipped, since; } want[] = {
        {1, 4, 0.25, 1, 0, 1}, {1, 4, 0.25, 2, 0, 2}, {1, 8, 0.25, 3, 0, 0},
        {1, 8, 0.125, 4, 0, 1}, {NAN, 4, 0, 4, 1, 0}, {1, 4, 0.25, 5, 1, 1},
        {-INFINITY, 2, 0, 5, 2, 0}, {INFINITY, 1, 0, 5, 3, 0}, {3e30f, 1, 0, 5, 4, 0},
        {1, 1, 1, 6, 4, 1}, {1, 1, 1, 7, 4, 2}, {1, 2, 1, 8, 4, 0}};
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        ((float *)(void *)g.memory)[0] = want[i].g;
        assert_int_equal(rocq_grad_norm(contexts[1][1], &p), ROCQ_OK);
        box_read(&s);
        assert_true(s.value[ROCQ_TRAIN_LOSS_SCALE] == want[i].scale);
        assert_true(s.value[ROCQ_TRAIN_FACTOR] == want[i].factor);
        assert_true(s.value[ROCQ_TRAIN_STEPS] == want[i].steps);
        assert_true(s.value[ROCQ_TRAIN_SKIPPED] == want[i].skipped);
        assert_true(s.value[ROCQ_TRAIN_SINCE] == want[i].since);
        assert_true(want[i].factor == 0 ? !(s.value[ROCQ_TRAIN_NORM] <= FLT_MAX)
                                        : s.value[ROCQ_TRAIN_NORM] == 3 * want[i].factor);
    }
    s.value[ROCQ_TRAIN_LOSS_SCALE] = 16777216;
    s.value[ROCQ_TRAIN_SINCE] = 2;
    box_write(&s);
    assert_int_equal(rocq_grad_norm(contexts[1][1], &p), ROCQ_OK);
    box_read(&s);
    assert_true(s.value[ROCQ_TRAIN_LOSS_SCALE] == 16777216 && s.value[ROCQ_TRAIN_SINCE] == 0);
    p.growth_interval = 0; // never
    ((float *)(void *)g.memory)[0] = NAN;
    assert_int_equal(rocq_grad_norm(contexts[1][1], &p), ROCQ_OK);
    box_read(&s);
    assert_true(s.value[ROCQ_TRAIN_LOSS_SCALE] == 16777216 && s.value[ROCQ_TRAIN_FACTOR] == 0);
    p.growth_interval = -1;
    box *const outputs[1] = {&s};
    run_fails(ROCQ_OP_GRAD_NORM, &p, ROCQ_E_ARGUMENT, outputs, 1);
    boxes_free(&g, &s);
}

enum { ADAM_W, ADAM_W16, ADAM_M, ADAM_V, ADAM_G, ADAM_M_SCALE, ADAM_V_SCALE, ADAM_BOXES };

typedef struct adam {
    box b[ADAM_BOXES], state, lr;
    rocq_adamw_params p;
    rocq_grad_norm_params norm;
} adam;

static void adam_make(adam *a, int64_t n, rocq_format moments, rocq_format halves) {
    const double lr = 0.01;
    memset(a, 0, sizeof *a);
    for (int i = 0; i < ADAM_BOXES; i++) {
        const bool scale = i >= ADAM_M_SCALE, moment = i == ADAM_M || i == ADAM_V;
        a->b[i] = box_make(BOX_PLAIN, i == ADAM_W16 ? halves : moment ? moments : ROCQ_F32,
                           scale ? (n + 255) / 256 : n, 1, 1, 1);
        if (moment || scale) memset(a->b[i].memory, 0, (size_t)a->b[i].size);
    }
    for (int64_t i = 0; i < n; i++) a->b[ADAM_W].value[i] = random_normal();
    box_write(&a->b[ADAM_W]);
    a->state = box_f32(fresh_state, ROCQ_TRAIN_STATE);
    a->lr = box_f32(&lr, 1);
    const rocq_adamw_params p = {
        .w = &a->b[ADAM_W].t, .w16 = &a->b[ADAM_W16].t, .m = &a->b[ADAM_M].t, .v = &a->b[ADAM_V].t,
        .m_scale = moments == ROCQ_I8 ? &a->b[ADAM_M_SCALE].t : NULL,
        .v_scale = moments == ROCQ_I8 ? &a->b[ADAM_V_SCALE].t : NULL, .g = &a->b[ADAM_G].t,
        .state = &a->state.t, .lr = &a->lr.t};
    const rocq_grad_norm_params norm = {.state = &a->state.t, .g = &a->b[ADAM_G].t};
    a->p = p;
    a->norm = norm;
}

static void adam_free(adam *a) {
    for (int i = 0; i < ADAM_BOXES; i++) box_free(&a->b[i]);
    boxes_free(&a->state, &a->lr);
}

static void adam_run(adam *a, int simd) {
    box *outputs[ADAM_BOXES];
    for (int i = 0; i < ADAM_BOXES; i++) outputs[i] = &a->b[i];
    box *const state[1] = {&a->state};
    run(simd, ROCQ_OP_GRAD_NORM, &a->norm, state, 1);
    run(simd, ROCQ_OP_ADAMW, &a->p, outputs, ADAM_BOXES);
}

static void adamw_matches_a_float64_one(void **state) {
    enum { N = 1003, STEPS = 20 };
    (void)state;
    for (int c = 0; c < 8; c++) {
        const int simd = c % 2;
        const bool own = c / 2 % 2, clear = c / 4;
        random_state = 7;
        adam a;
        adam_make(&a, N, ROCQ_F32, own ? ROCQ_BF16 : ROCQ_F16);
        a.p.beta1 = own ? 0.8f : 0;
        a.p.beta2 = own ? 0.95f : 0;
        a.p.eps = own ? 1e-3f : 0;
        a.p.weight_decay = own ? 0.1f : 0;
        a.p.clear = clear;
        a.norm.max_norm = own ? 2 : 0;
        const double beta1 = own ? (double)0.8f : (double)0.9f,
                     beta2 = own ? (double)0.95f : (double)0.999f;
        const double eps = own ? (double)1e-3f : 1e-8, decay = own ? (double)0.1f : 0;
        const double lr = (double)0.01f;
        double *w = copied(&a.b[ADAM_W]), *m = doubles(N), *v = doubles(N), *slack = doubles(N);
        double *size = doubles(N), *slack_m = doubles(N), *slack_v = doubles(N);
        for (int t = 1; t <= STEPS; t++) {
            box *g = &a.b[ADAM_G];
            double square = 0;
            for (int64_t i = 0; i < N; i++) {
                g->value[i] = i % 100 == 7 ? 0 : exp(random_in(-8, 1)) * random_normal();
            }
            box_write(g);
            for (int64_t i = 0; i < N; i++) square += g->value[i] * g->value[i];
            const double norm = sqrt(square), factor = own && norm > 2 ? 2 / norm : 1;
            for (int64_t i = 0; i < N; i++) {
                const double x = g->value[i] * factor;
                m[i] = beta1 * m[i] + (1 - beta1) * x;
                v[i] = beta2 * v[i] + (1 - beta2) * x * x;
                size[i] = beta1 * size[i] + (1 - beta1) * fabs(x);
                const double bottom = sqrt(v[i] / (1 - pow(beta2, t))) + eps,
                             top = lr / (1 - pow(beta1, t));
                w[i] -= top * m[i] / bottom + lr * decay * w[i];
                slack_m[i] = 64 * ULP * size[i];
                slack_v[i] = 128 * ULP * v[i];
                slack[i] += 2 * ULP * fabs(w[i]) + 128 * ULP * top * size[i] / bottom;
            }
            adam_run(&a, simd);
        }
        check_close(&a.b[ADAM_W], w, slack, "w");
        check_close(&a.b[ADAM_M], m, slack_m, "m");
        check_close(&a.b[ADAM_V], v, slack_v, "v");
        memset(slack, 0, N * sizeof *slack);
        check_close(&a.b[ADAM_W16], a.b[ADAM_W].value, slack, "w16");
        double *g = copied(&a.b[ADAM_G]);
        if (clear) memset(g, 0, N * sizeof *g);
        check_close(&a.b[ADAM_G], g, slack, "g");
        for (int64_t i = 7; i < N && !own; i += 100) assert_true(m[i] == 0 && v[i] == 0);
        free(w); free(m); free(v); free(slack); free(size); free(slack_m); free(slack_v); free(g);
        adam_free(&a);
    }
}

// Nothing but g changes in a step whose gradient is not finite.
static void adamw_skips_a_bad_gradient(void **state) {
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    (void)state;
    random_state = 8;
    for (int c = 0; c < 12; c++) {
        adam a;
        adam_make(&a, 777, c % 2 ? ROCQ_I8 : ROCQ_F32, ROCQ_F16);
        a.p.clear = c / 2 % 2;
        for (int64_t i = 0; i < 777; i++) a.b[ADAM_G].value[i] = random_normal();
        box_write(&a.b[ADAM_G]);
        adam_run(&a, 1);
        for (int64_t i = 0; i < 777; i++) a.b[ADAM_G].value[i] = random_normal();
        box_write(&a.b[ADAM_G]);
        ((float *)(void *)a.b[ADAM_G].memory)[random_below(777)] = bad[c / 4];
        unsigned char *before[ADAM_BOXES];
        for (int i = 0; i < ADAM_BOXES; i++) {
            before[i] = (unsigned char *)malloc((size_t)a.b[i].size);
            assert_non_null(before[i]);
            memcpy(before[i], a.b[i].memory, (size_t)a.b[i].size);
        }
        adam_run(&a, 1);
        if (a.p.clear) memset(before[ADAM_G], 0, (size_t)a.b[ADAM_G].size);
        for (int i = 0; i < ADAM_BOXES; i++) {
            assert_true(same_bytes(before[i], a.b[i].memory, a.b[i].size));
            free(before[i]);
        }
        box_read(&a.state);
        assert_true(a.state.value[ROCQ_TRAIN_SKIPPED] == 1 && a.state.value[ROCQ_TRAIN_STEPS] == 1);
        adam_free(&a);
    }
}

// A state that no grad_norm has written, as of a forged checkpoint: counts beyond 2^24 are 2^24,
// what is no number is 1, and a NaN that reaches codes of m is the least of them and leaves the
// scale to the others: it is the same for scalars as for vectors.
static void adamw_with_a_bad_state(void **state) {
    static const float steps[][2] = {{1e30f, 16777216}, {INFINITY, 16777216}, {NAN, 1}, {-5, 1}};
    enum { N = 300 };
    float scale = 0;
    (void)state;
    for (int c = 0; c < 8; c++) {
        unsigned char *first[ADAM_BOXES];
        for (int k = 0; k < 2; k++) {
            random_state = 8;
            adam a;
            adam_make(&a, N, ROCQ_I8, ROCQ_F16);
            for (int64_t i = 0; i < N; i++) a.b[ADAM_G].value[i] = random_normal();
            box_write(&a.b[ADAM_G]);
            float *in = (float *)(void *)a.state.memory, *g = (float *)(void *)a.b[ADAM_G].memory;
            in[ROCQ_TRAIN_FACTOR] = 1;
            in[ROCQ_TRAIN_STEPS] = steps[c / 2][k];
            g[0] = 100; // the largest, before NaN and in the same lane
            g[8] = NAN;
            assert_int_equal(rocq_adamw(contexts[c % 2][0], &a.p), ROCQ_OK);
            assert_int_equal((int8_t)a.b[ADAM_M].memory[8], -127);
            const float own = ((float *)(void *)a.b[ADAM_M_SCALE].memory)[0];
            assert_true(own > 0.05f && own < 0.1f); // 10 / 127 and a little
            if (c % 2 == 0) scale = own;
            else assert_true(fabsf(own - scale) <= 1e-5f * scale);
            for (int i = 0; i < ADAM_BOXES; i++) {
                const size_t size = (size_t)a.b[i].size;
                if (k == 1) assert_true(same_bytes(first[i], a.b[i].memory, a.b[i].size));
                if (k == 1) free(first[i]);
                if (k == 0) memcpy(first[i] = (unsigned char *)malloc(size), a.b[i].memory, size);
            }
            adam_free(&a);
        }
    }
}

// Least squares with inputs of very different sizes, by AdamW: what is left of the loss.
static double regression(rocq_format moments, int simd, int n_steps) {
    enum { N = 700, ROWS = 60 };
    random_state = 9;
    adam a;
    adam_make(&a, N, moments, ROCQ_F16);
    double *x = doubles(N * ROWS), y[ROWS], loss = 0;
    for (int64_t i = 0; i < N * ROWS; i++)
        x[i] = random_normal() * pow(10, -2.0 * (double)(i % N % 7) / 6);
    for (int r = 0; r < ROWS; r++) {
        y[r] = 0;
        for (int64_t i = 0; i < N; i++) y[r] += x[r * N + i] * ((double)(i % 3) - 1);
    }
    for (int t = 0; t <= n_steps; t++) {
        box *g = &a.b[ADAM_G];
        box_read(&a.b[ADAM_W]);
        memset(g->value, 0, N * sizeof(double));
        loss = 0;
        for (int r = 0; r < ROWS; r++) {
            double e = -y[r];
            for (int64_t i = 0; i < N; i++) e += x[r * N + i] * a.b[ADAM_W].value[i];
            for (int64_t i = 0; i < N; i++) g->value[i] += e * x[r * N + i] / ROWS;
            loss += e * e / ROWS / 2;
        }
        box_write(g);
        if (t == 0) assert_true(loss > 100);
        if (t < n_steps) {
            assert_int_equal(rocq_grad_norm(contexts[simd][0], &a.norm), ROCQ_OK);
            assert_int_equal(rocq_adamw(contexts[simd][0], &a.p), ROCQ_OK);
        }
    }
    free(x);
    adam_free(&a);
    return loss;
}

static void adamw_with_8_bit_moments_converges(void **state) {
    (void)state;
    for (int simd = 0; simd < 2; simd++) {
        for (int n = 30; n <= 300; n *= 10) {
            const double exact = regression(ROCQ_F32, simd, n),
                         coded = regression(ROCQ_I8, simd, n);
            assert_true(coded <= 1.02 * exact + 1e-6 && exact < (n == 30 ? 50 : 1e-6));
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norm_backward_matches_the_reference),
        cmocka_unit_test(norm_backward_is_the_forwards_slope),
        cmocka_unit_test(slopes_of_activations),
        cmocka_unit_test(gather_backward_adds_in_order),
        cmocka_unit_test(rope_backward_is_the_transpose),
        cmocka_unit_test(cross_entropy_matches_the_reference),
        cmocka_unit_test(cross_entropy_has_the_slope_of_its_loss),
        cmocka_unit_test(cross_entropy_of_bad_targets_and_logits),
        cmocka_unit_test(grad_norm_measures_clips_and_counts),
        cmocka_unit_test(grad_norm_moves_the_loss_scale),
        cmocka_unit_test(adamw_matches_a_float64_one),
        cmocka_unit_test(adamw_skips_a_bad_gradient),
        cmocka_unit_test(adamw_with_a_bad_state),
        cmocka_unit_test(adamw_with_8_bit_moments_converges),
    };
    return cmocka_run_group_tests(tests, open_contexts, close_contexts);
}
