// The backward of products: against float64 in every format, layout and option, and against finite
// differences of the forward in float64.
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "ops.h"

#define BOUND 1e-9 // NMSE of F32 arithmetic; the contract says 1e-6

static const rocq_format formats[] = {
#define ROCQ_X(NAME, name, id, elems, bytes) ROCQ_##NAME,
    ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
};
enum {
    N_FORMATS = (int)(sizeof formats / sizeof formats[0]),
    N_ACTIVATIONS = ROCQ_ACT_SIGMOID + 1
};

static double *doubles(int64_t n) {
    double *p = (double *)malloc((size_t)n * sizeof(double));
    assert_non_null(p);
    return p;
}

// -- activations in float64 --

static const double pi = 3.14159265358979323846;

static double activated(rocq_activation activation, double x) {
    switch (activation) {
    case ROCQ_ACT_SILU: return x / (1 + exp(-x));
    case ROCQ_ACT_GELU: return x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x * x * x)));
    case ROCQ_ACT_GELU_ERF: return x / 2 * erfc(-x / sqrt(2.0));
    case ROCQ_ACT_RELU: return x > 0 ? x : 0;
    case ROCQ_ACT_TANH: return tanh(x);
    case ROCQ_ACT_SIGMOID: return 1 / (1 + exp(-x));
    default: return x;
    }
}

static double slope(rocq_activation activation, double x) {
    const double s = 1 / (1 + exp(-x)), t = tanh(sqrt(2 / pi) * (x + 0.044715 * x * x * x));
    switch (activation) {
    case ROCQ_ACT_SILU: return s + x * s * (1 - s);
    case ROCQ_ACT_GELU:
        return (1 + t) / 2 + x / 2 * (1 - t * t) * sqrt(2 / pi) * (1 + 3 * 0.044715 * x * x);
    case ROCQ_ACT_GELU_ERF: return erfc(-x / sqrt(2.0)) / 2 + x * exp(-x * x / 2) / sqrt(2 * pi);
    case ROCQ_ACT_RELU: return x > 0;
    case ROCQ_ACT_TANH: return 1 - tanh(x) * tanh(x);
    case ROCQ_ACT_SIGMOID: return s * (1 - s);
    default: return 1;
    }
}

static void slopes_are_those_of_the_activations(void **state) {
    (void)state;
    enum { N = 4001 };
    static float x[N], g[2][N];
    for (int a = 0; a < N_ACTIVATIONS; a++) {
        const rocq_activation activation = (rocq_activation)a;
        for (int i = 0; i < N; i++) x[i] = (float)(i - N / 2) / 150 + 1e-4f;
        for (int simd = 0; simd < 2; simd++) {
            for (int i = 0; i < N; i++) g[simd][i] = i % 2 ? 1 : -3;
            inside_slope_row(*inside_has_simd(contexts[simd][0]), activation, g[simd], x, N);
        }
        for (int i = 0; i < N; i++) {
            const double h = 1e-5, at = (double)x[i], factor = i % 2 ? 1 : -3;
            const double want = slope(activation, at);
            const double finite = (activated(activation, at + h) - activated(activation, at - h)) /
                                  (2 * h);
            assert_true(fabs(finite - want) < 1e-6 || fabs(at) < h * 2);
            const double one = (double)inside_activation_slope(activation, x[i]);
            assert_true(fabs(one - want) < 5e-7);
            assert_true(fabs((double)g[0][i] - factor * want) < 2e-6);
            assert_true(fabs((double)g[1][i] - factor * want) < 2e-6);
        }
        // Far out it is 0 or 1, and NaN stays but in RELU, whose value is 0 there too.
        static const float far[] = {INFINITY, 3e38f, 1e20f, 200, -200, -1e20f, -3e38f, -INFINITY};
        for (int i = 0; i < N; i++) x[i] = i < N - 8 ? far[i % 8] : NAN;
        for (int simd = 0; simd < 2; simd++) {
            for (int i = 0; i < N; i++) g[simd][i] = 1;
            inside_slope_row(*inside_has_simd(contexts[simd][0]), activation, g[simd], x, N);
            for (int i = 0; i < N - 8; i++) {
                const bool flat = a == ROCQ_ACT_TANH || a == ROCQ_ACT_SIGMOID;
                const float want = a == ROCQ_ACT_IDENTITY ? 1 : flat ? 0 : i % 8 < 4;
                assert_true(fabsf(g[simd][i] - want) < 1e-30f);
            }
            for (int i = N - 8; i < N; i++) {
                assert_int_equal(isnan(g[simd][i]) != 0,
                                 a != ROCQ_ACT_IDENTITY && a != ROCQ_ACT_RELU);
            }
        }
    }
}

// -- the op --

enum { DX = 1, DW = 2, DB = 4, Z = 8, RESIDUAL = 16, IN_PLACE = 32, ACCUMULATE = 64 };

typedef struct back_case {
    int64_t k, m, n;
    int options;
    rocq_format w, x, dy, dx, z, residual;
    box_layout layout;
    rocq_activation activation;
    float scale;
} back_case;

typedef struct back_problem {
    back_case s;
    rocq_matmul_backward_params p;
    box dx, dw, db, dy, w, x, z, residual;
    double *want_dx, *want_dw, *want_db;
} back_problem;

static box_layout other_layout(box_layout layout, int i) {
    return (box_layout)(((int)layout + i) % 3);
}

static void back_make(back_problem *a, const back_case *s) {
    const int o = s->options;
    memset(a, 0, sizeof *a);
    a->s = *s;
    a->dy = box_random(s->layout, s->dy, 1, s->m, s->n, 1, 1);
    rocq_matmul_backward_params p = {.dy = &a->dy.t, .scale = s->scale,
                                     .activation = o & Z ? s->activation : ROCQ_ACT_IDENTITY,
                                     .accumulate = (o & ACCUMULATE) != 0};
    if (o & DX) {
        a->w = box_make(other_layout(s->layout, 1), s->w, s->k, s->m, 1, 1);
        random_weights(&a->w);
        a->dx = o & IN_PLACE ? box_random(s->layout, s->dx, 3, s->k, s->n, 1, 1)
                             : box_make(s->layout, s->dx, s->k, s->n, 1, 1);
        p.dx = &a->dx.t;
        p.w = &a->w.t;
    }
    if (o & DW) {
        a->x = box_random(other_layout(s->layout, 2), s->x, 1, s->k, s->n, 1, 1);
        a->dw = o & ACCUMULATE ? box_random(s->layout, ROCQ_F32, 3, s->k, s->m, 1, 1)
                               : box_make(s->layout, ROCQ_F32, s->k, s->m, 1, 1);
        p.dw = &a->dw.t;
        p.x = &a->x.t;
    }
    if (o & DB) {
        a->db = o & ACCUMULATE ? box_random(BOX_STRIDED, ROCQ_F32, 3, s->m, 1, 1, 1)
                               : box_make(BOX_STRIDED, ROCQ_F32, s->m, 1, 1, 1);
        p.db = &a->db.t;
    }
    if (o & Z) {
        a->z = box_random(other_layout(s->layout, 1), s->z, 2, s->k, s->n, 1, 1);
        p.z = &a->z.t;
    }
    if (o & RESIDUAL) {
        a->residual = box_random(other_layout(s->layout, 2), s->residual, 3, s->k, s->n, 1, 1);
        p.residual = &a->residual.t;
    }
    if (o & IN_PLACE) p.residual = &a->dx.t;
    a->p = p;
}

static void back_free(back_problem *a) {
    box *all[] = {&a->dx, &a->dw, &a->db, &a->dy, &a->w, &a->x, &a->z, &a->residual};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) box_free(all[i]);
    free(a->want_dx);
    free(a->want_dw);
    free(a->want_db);
}

static void back_want(back_problem *a) {
    const int64_t k = a->s.k, m = a->s.m, n = a->s.n;
    const double scale = a->s.scale == 0 ? 1 : (double)a->s.scale;
    const bool accumulate = a->p.accumulate;
    a->want_dx = doubles(k * n);
    a->want_dw = doubles(k * m);
    a->want_db = doubles(m);
    for (int64_t i = 0; a->p.dx && i < k * n; i++) {
        double sum = 0;
        for (int64_t j = 0; j < m; j++) {
            sum += a->w.value[j * k + i % k] * a->dy.value[i / k * m + j];
        }
        sum *= scale;
        if (a->p.z) sum *= slope(a->p.activation, a->z.value[i]);
        if (a->p.residual) sum += (a->s.options & IN_PLACE ? &a->dx : &a->residual)->value[i];
        a->want_dx[i] = sum;
    }
    for (int64_t i = 0; a->p.dw && i < k * m; i++) {
        double sum = 0;
        for (int64_t j = 0; j < n; j++) {
            sum += a->x.value[j * k + i % k] * a->dy.value[j * m + i / k];
        }
        a->want_dw[i] = scale * sum + (accumulate ? a->dw.value[i] : 0);
    }
    for (int64_t i = 0; a->p.db && i < m; i++) {
        double sum = 0;
        for (int64_t j = 0; j < n; j++) sum += a->dy.value[j * m + i];
        a->want_db[i] = scale * sum + (accumulate ? a->db.value[i] : 0);
    }
}

static int back_outputs(back_problem *a, box **outputs) {
    int n = 0;
    if (a->p.dx) outputs[n++] = &a->dx;
    if (a->p.dw) outputs[n++] = &a->dw;
    if (a->p.db) outputs[n++] = &a->db;
    return n;
}

static void back_solve(const back_case *s) {
    back_problem a;
    back_make(&a, s);
    back_want(&a);
    box *outputs[3];
    unsigned char *before[3];
    const int n = back_outputs(&a, outputs);
    for (int o = 0; o < n; o++) {
        before[o] = (unsigned char *)malloc((size_t)outputs[o]->size);
        assert_non_null(before[o]);
        memcpy(before[o], outputs[o]->memory, (size_t)outputs[o]->size);
    }
    for (int tier = 0; tier < n_tiers; tier++) {
        for (int o = 0; o < n; o++) {
            memcpy(outputs[o]->memory, before[o], (size_t)outputs[o]->size);
        }
        run(tier, ROCQ_OP_MATMUL_BACKWARD, &a.p, outputs, n);
        if (a.p.dx) check_rows(&a.dx, a.want_dx, BOUND);
        if (a.p.dw) check_rows(&a.dw, a.want_dw, BOUND);
        if (a.p.db) check_rows(&a.db, a.want_db, BOUND);
    }
    for (int o = 0; o < n; o++) free(before[o]);
    back_free(&a);
}

static void gradients_with_w_in_every_format(void **state) {
    (void)state;
    random_state = 31;
    for (int f = 0; f < N_FORMATS; f++) {
        const int64_t elems = block_elems(formats[f]);
        for (int i = 0; i < 3; i++) {
            back_case s = {.k = elems == 1 ? 37 + 16 * i : elems * (i + 1), .m = 5 + 20 * i,
                           .n = i ? 33 : 1, .options = DX | (i ? DW | DB : 0),
                           .w = formats[f], .x = ROCQ_F32, .dy = i % 2 ? ROCQ_F16 : ROCQ_F32,
                           .layout = i ? BOX_PERMUTED : BOX_PLAIN};
            s.dx = (f + i) % 2 ? ROCQ_F16 : ROCQ_F32;
            if (elems > 1) s.layout = BOX_PLAIN;
            back_solve(&s);
        }
    }
}

// Any option with any other, on sizes of one tile and of several, none a multiple of anything.
static void gradients_with_every_option(void **state) {
    (void)state;
    static const struct { int64_t k, m, n; } sizes[] = {
        {1, 1, 1}, {17, 3, 2}, {16, 130, 7}, {31, 40, 129}, {300, 19, 250}, {70, 270, 35},
        {523, 67, 8}, {8, 600, 300}};
    static const rocq_format floats[] = {ROCQ_F32, ROCQ_F16};
    random_state = 32;
    for (int i = 0; i < 96; i++) {
        const size_t size = (size_t)i % (sizeof sizes / sizeof sizes[0]);
        int options = (int)random_below(128);
        if (!(options & DX)) options = (options | DW) & ~(Z | RESIDUAL | IN_PLACE);
        if (options & IN_PLACE) options &= ~RESIDUAL;
        if (!(options & DW)) options &= ~DB;
        back_case s = {.k = sizes[size].k, .m = sizes[size].m, .n = sizes[size].n,
                       .options = options, .w = floats[random_below(2)],
                       .x = floats[random_below(2)], .dy = floats[random_below(2)],
                       .dx = floats[random_below(2)], .z = floats[random_below(2)],
                       .residual = floats[random_below(2)], .layout = (box_layout)random_below(3),
                       .activation = (rocq_activation)random_below(N_ACTIVATIONS),
                       .scale = i % 3 ? (float)(i % 5) - 2.5f : 0};
        back_solve(&s);
    }
}

// The loss is the sum of dy (w act(z) + bias): its differences are the gradients.
static void gradients_are_finite_differences(void **state) {
    (void)state;
    enum { K = 5, M = 4, N = 3 };
    random_state = 33;
    for (int act = 0; act < N_ACTIVATIONS; act++) {
        const back_case s = {.k = K, .m = M, .n = N, .options = DX | DW | DB | Z, .scale = 0,
                             .activation = (rocq_activation)act, .layout = BOX_STRIDED};
        back_problem a;
        back_make(&a, &s);
        for (int i = 0; i < K * N; i++) a.x.value[i] = activated(s.activation, a.z.value[i]);
        box_write(&a.x);
        box *outputs[3];
        run(1, ROCQ_OP_MATMUL_BACKWARD, &a.p, outputs, back_outputs(&a, outputs));
        box_read(&a.dx);
        box_read(&a.dw);
        box_read(&a.db);
        double *const in[3] = {a.z.value, a.w.value, (double[M]){0}};
        const double *const got[3] = {a.dx.value, a.dw.value, a.db.value};
        const int count[3] = {K * N, K * M, M};
        for (int which = 0; which < 3; which++) {
            for (int i = 0; i < count[which]; i++) {
                double loss[2] = {0, 0};
                const double at = in[which][i], h = 1e-5;
                for (int side = 0; side < 2; side++) {
                    in[which][i] = side ? at + h : at - h;
                    for (int c = 0; c < M * N; c++) {
                        double y = in[2][c % M];
                        for (int k = 0; k < K; k++) {
                            y += a.w.value[c % M * K + k] *
                                 activated(s.activation, a.z.value[c / M * K + k]);
                        }
                        loss[side] += a.dy.value[c] * y;
                    }
                }
                in[which][i] = at;
                const double want = (loss[1] - loss[0]) / (2 * h);
                assert_true(fabs(got[which][i] - want) < 1e-5 * (1 + fabs(want)));
            }
        }
        back_free(&a);
    }
}

// A NaN in dy reaches its column of dx and its row of dw and db, and nothing else.
static void nan_stays_in_its_row(void **state) {
    (void)state;
    random_state = 34;
    const back_case s = {.k = 40, .m = 37, .n = 29, .options = DX | DW | DB,
                         .layout = BOX_STRIDED};
    back_problem a;
    back_make(&a, &s);
    const int64_t bad_m = 21, bad_n = 13;
    a.dy.value[bad_n * s.m + bad_m] = NAN;
    box_write(&a.dy);
    box *outputs[3];
    for (int tier = 0; tier < n_tiers; tier++) {
        run(tier, ROCQ_OP_MATMUL_BACKWARD, &a.p, outputs, back_outputs(&a, outputs));
        for (int o = 0; o < 3; o++) box_read(outputs[o]);
        for (int64_t i = 0; i < s.k * s.n; i++) {
            assert_int_equal(isnan(a.dx.value[i]) != 0, i / s.k == bad_n);
        }
        for (int64_t i = 0; i < s.k * s.m; i++) {
            assert_int_equal(isnan(a.dw.value[i]) != 0, i / s.k == bad_m);
        }
        for (int64_t i = 0; i < s.m; i++) {
            assert_int_equal(isnan(a.db.value[i]) != 0, i == bad_m);
        }
    }
    back_free(&a);
}

// A recorded step adds to dw each time it is launched, and its bits are those of the op.
static void graphs_accumulate(void **state) {
    (void)state;
    random_state = 35;
    const back_case s = {.k = 70, .m = 50, .n = 41, .options = DX | DW | DB | ACCUMULATE,
                         .layout = BOX_STRIDED};
    back_problem a;
    back_make(&a, &s);
    const size_t size = (size_t)a.dw.size;
    unsigned char *before = (unsigned char *)malloc(size), *twice = (unsigned char *)malloc(size);
    assert_true(before && twice);
    memcpy(before, a.dw.memory, size);
    for (int i = 0; i < N_THREAD_COUNTS; i++) {
        rocq_ctx *ctx = contexts[1][i];
        rocq_graph *graph = NULL;
        memcpy(a.dw.memory, before, size);
        for (int j = 0; j < 2; j++) assert_int_equal(rocq_matmul_backward(ctx, &a.p), ROCQ_OK);
        memcpy(twice, a.dw.memory, size);
        memcpy(a.dw.memory, before, size);
        assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
        assert_int_equal(rocq_matmul_backward(ctx, &a.p), ROCQ_OK);
        assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);
        assert_memory_equal(a.dw.memory, before, size);
        for (int j = 0; j < 2; j++) assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK);
        rocq_graph_destroy(ctx, &graph);
        assert_memory_equal(a.dw.memory, twice, size);
    }
    free(before);
    free(twice);
    back_free(&a);
}

static void refusals_and_what_it_costs(void **state) {
    (void)state;
    rocq_ctx *ctx = contexts[1][1];
    random_state = 36;
    const back_case s = {.k = 20, .m = 7, .n = 5, .options = DX | DW | DB | Z | RESIDUAL,
                         .layout = BOX_STRIDED};
    back_problem a;
    back_make(&a, &s);
    box *outputs[3];
    const int n_outputs = back_outputs(&a, outputs);
    rocq_matmul_backward_params p = a.p;
#define NO(change, result)                                                          \
    do {                                                                            \
        const rocq_tensor kept = a.dy.t;                                            \
        change;                                                                     \
        run_fails(ROCQ_OP_MATMUL_BACKWARD, &p, result, outputs, n_outputs);         \
        p = a.p;                                                                    \
        a.dy.t = kept;                                                              \
    } while (0)
    NO((p.dx = NULL, p.dw = NULL, p.db = NULL, p.z = NULL, p.residual = NULL), ROCQ_E_ARGUMENT);
    NO(p.dy = NULL, ROCQ_E_ARGUMENT);
    NO(p.w = NULL, ROCQ_E_ARGUMENT);
    NO(p.x = NULL, ROCQ_E_ARGUMENT);
    NO(p.dw = NULL, ROCQ_E_ARGUMENT); // but db
    NO((p.dx = NULL, p.residual = NULL), ROCQ_E_ARGUMENT); // but z
    NO((p.dx = NULL, p.z = NULL), ROCQ_E_ARGUMENT); // but a residual
    NO((p.z = NULL, p.activation = ROCQ_ACT_SILU), ROCQ_E_ARGUMENT);
    NO(p.activation = (rocq_activation)7, ROCQ_E_ARGUMENT);
    NO(p.precision = (rocq_precision)4, ROCQ_E_ARGUMENT);
    NO(p.scale = NAN, ROCQ_E_ARGUMENT);
    NO(p.scale = INFINITY, ROCQ_E_ARGUMENT);
    NO(p.w = &a.x.t, ROCQ_E_SHAPE);
    NO(p.x = &a.w.t, ROCQ_E_SHAPE);
    NO(p.z = &a.w.t, ROCQ_E_SHAPE);
    NO(p.residual = &a.w.t, ROCQ_E_SHAPE);
    NO(p.dw = &a.dx.t, ROCQ_E_SHAPE);
    NO(p.db = &a.dw.t, ROCQ_E_SHAPE);
    NO(a.dy.t.ne[0] = 6, ROCQ_E_SHAPE);
    NO(a.dy.t.ne[1] = 4, ROCQ_E_SHAPE);
    NO(p.dx = &a.x.t, ROCQ_E_ARGUMENT); // in place of x
#undef NO
    p = a.p;
    rocq_precision_info info;
    for (int precision = 0; precision < 4; precision++) { // the CPU has only one
        p.precision = (rocq_precision)precision;
        assert_int_equal(rocq_get_precision(ctx, ROCQ_OP_MATMUL_BACKWARD, &p, &info), ROCQ_OK);
        assert_int_equal(info.precision, ROCQ_PRECISION_F32);
        assert_int_equal(info.asked, precision);
    }
    const inside_cost cost = inside_cost_of(ctx, ROCQ_OP_MATMUL_BACKWARD, &a.p);
    assert_true(cost.flops == 4.0 * 20 * 7 * 5 && cost.matrix == 0);
    p = a.p;
    p.dw = p.db = p.x = NULL;
    assert_true(inside_cost_of(ctx, ROCQ_OP_MATMUL_BACKWARD, &p).flops == 2.0 * 20 * 7 * 5);
    back_free(&a);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slopes_are_those_of_the_activations),
        cmocka_unit_test(gradients_with_w_in_every_format),
        cmocka_unit_test(gradients_with_every_option),
        cmocka_unit_test(gradients_are_finite_differences),
        cmocka_unit_test(nan_stays_in_its_row),
        cmocka_unit_test(graphs_accumulate),
        cmocka_unit_test(refusals_and_what_it_costs),
    };
    return cmocka_run_group_tests(tests, open_contexts, close_contexts);
}
