// Mixtures of experts: the router and the product by expert against float64, in every format, with
// few and many tokens; bits that no number of threads or tokens changes; and ids out of range.
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "ops.h"

// -- the router --

typedef struct router {
    rocq_route_params p;
    box ids, weights, logits, bias, expert_scale;
} router;

static void router_make(router *r, int64_t n_experts, int64_t k, int64_t n, box_layout layout) {
    memset(r, 0, sizeof *r);
    r->ids = box_make(layout, ROCQ_I32, k, n, 1, 1);
    r->weights = box_make(layout, ROCQ_F32, k, n, 1, 1);
    r->logits = box_random(layout, ROCQ_F32, 2, n_experts, n, 1, 1);
    r->bias = box_random(BOX_PLAIN, ROCQ_F32, 0.5f, n_experts, 1, 1, 1);
    r->expert_scale = box_random(BOX_PLAIN, ROCQ_F32, 1, n_experts, 1, 1, 1);
    r->p.ids = &r->ids.t;
    r->p.weights = &r->weights.t;
    r->p.logits = &r->logits.t;
}

static void router_free(router *r) {
    box *const boxes[] = {&r->ids, &r->weights, &r->logits, &r->bias, &r->expert_scale};
    for (size_t i = 0; i < sizeof boxes / sizeof boxes[0]; i++)
        box_free(boxes[i]);
}

// How many of n keys come before key e: those that are larger, and equal ones with a lower index.
static int64_t rank_of(const double *key, const bool *out, int64_t n, int64_t e) {
    int64_t rank = 0;
    for (int64_t i = 0; i < n; i++)
        rank += !out[i] && (key[i] > key[e] || (key[i] == key[e] && i < e));
    return rank;
}

static void route_want(const router *r, int64_t token, int32_t *ids, double *weights) {
    const rocq_route_params *p = &r->p;
    const int64_t n = r->logits.t.ne[0], k = r->ids.t.ne[0];
    const double *logit = r->logits.value + token * n;
    double s[1024], key[1024], sum = 0, chosen = 0, top = -INFINITY;
    bool out[1024] = {false};
    for (int64_t e = 0; e < n; e++)
        top = fmax(top, logit[e]);
    for (int64_t e = 0; e < n; e++)
        sum += exp(logit[e] - top);
    for (int64_t e = 0; e < n; e++) {
        s[e] = p->scores == ROCQ_SCORES_SIGMOID   ? 1 / (1 + exp(-logit[e]))
               : p->scores == ROCQ_SCORES_SOFTMAX ? exp(logit[e] - top) / sum
                                                  : logit[e];
        key[e] = s[e] + (p->bias ? r->bias.value[e] : 0);
    }
    if (p->n_groups > 1) {
        const int64_t size = n / p->n_groups;
        const bool none[1024] = {false};
        double score[1024];
        for (int64_t g = 0; g < p->n_groups; g++) {
            score[g] = 0;
            for (int64_t e = 0; e < size; e++) {
                if (rank_of(key + g * size, none, size, e) < 2)
                    score[g] += key[g * size + e];
            }
        }
        for (int64_t e = 0; e < n; e++) {
            out[e] = rank_of(score, none, p->n_groups, e / size) >= p->top_groups;
        }
    }
    for (int64_t e = 0; e < n; e++) {
        const int64_t rank = rank_of(key, out, n, e);
        if (!out[e] && rank < k)
            ids[rank] = (int32_t)e;
    }
    for (int64_t j = 0; j < k; j++) {
        weights[j] = p->scores == ROCQ_SCORES_SOFTMAX_CHOSEN ? exp(s[ids[j]]) : s[ids[j]];
        chosen += weights[j];
    }
    for (int64_t j = 0; j < k; j++) {
        if (p->renormalise || p->scores == ROCQ_SCORES_SOFTMAX_CHOSEN)
            weights[j] /= chosen;
        if (p->scale != 0)
            weights[j] *= (double)p->scale;
        if (p->expert_scale)
            weights[j] *= r->expert_scale.value[ids[j]];
    }
}

static void router_check(router *r) {
    const int64_t n = r->ids.t.ne[1], k = r->ids.t.ne[0];
    double *want = (double *)malloc((size_t)(n * k) * sizeof *want);
    int32_t ids[64];
    for (int simd = 0; simd < 2; simd++) {
        box *const outputs[] = {&r->ids, &r->weights};
        memset(r->ids.memory, 0xff, (size_t)r->ids.size);
        memset(r->weights.memory, 0xff, (size_t)r->weights.size);
        run(simd, ROCQ_OP_ROUTE, &r->p, outputs, 2);
        for (int64_t i = 0; i < n; i++) {
            const int32_t *got = (const int32_t *)(void *)box_row(&r->ids, i);
            route_want(r, i, ids, want + i * k);
            for (int64_t j = 0; j < k; j++)
                assert_int_equal(got[j], ids[j]);
        }
        check_rows(&r->weights, want, 1e-11);
        box_check_outside(&r->ids);
    }
    free(want);
}

static void routes(void **state) {
    static const struct {
        int64_t n_experts, k, n;
    } sizes[] = {{1, 1, 1},  {2, 1, 3},    {8, 2, 5},    {32, 4, 33},
                 {60, 4, 7}, {128, 8, 70}, {512, 10, 3}, {1024, 64, 2}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int what = 0; what < 12; what++) {
            router r;
            router_make(&r, sizes[i].n_experts, sizes[i].k, sizes[i].n,
                        what % 2 ? BOX_STRIDED : BOX_PLAIN);
            r.p.scores = (rocq_scores)(what % 3);
            r.p.renormalise = what % 4 == 1;
            r.p.scale = what % 5 == 2 ? 2.5f : 0;
            if (what % 4 == 2 || what % 4 == 1)
                r.p.bias = &r.bias.t;
            if (what % 4 == 3)
                r.p.expert_scale = &r.expert_scale.t;
            router_check(&r);
            if (sizes[i].n_experts % 8 == 0 && sizes[i].k <= sizes[i].n_experts / 2) {
                r.p.n_groups = what % 2 ? 8 : 4;
                r.p.top_groups = r.p.n_groups / 2 + what % 3 / 2;
                router_check(&r);
            }
            router_free(&r);
        }
    }
}

// Equal logits: the lower index. NaN: after all numbers, and then by index; never the same twice.
static void routes_ties_and_nan(void **state) {
    (void)state;
    router r;
    router_make(&r, 12, 5, 3, BOX_PLAIN);
    const double rows[3][12] = {{1, 2, 2, 1, 2, 0, 2, 1, 0, 0, 2, 2},
                                {NAN, 1, NAN, 3, NAN, NAN, -5, NAN, NAN, NAN, NAN, NAN},
                                {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}};
    const int32_t want[3][5] = {{1, 2, 4, 6, 10}, {3, 1, 6, 0, 2}, {0, 1, 2, 3, 4}};
    for (int64_t i = 0; i < 36; i++)
        r.logits.value[i] = rows[i / 12][i % 12];
    box_write(&r.logits);
    for (int scores = 0; scores < 3; scores++) {
        r.p.scores = (rocq_scores)scores;
        for (int simd = 0; simd < 2; simd++) {
            box *const outputs[] = {&r.ids, &r.weights};
            run(simd, ROCQ_OP_ROUTE, &r.p, outputs, 2);
            for (int64_t i = 0; i < 3; i++)
                assert_memory_equal(box_row(&r.ids, i), want[i], 20);
            box_read(&r.weights);
            for (int64_t i = 10; i < 15; i++)
                assert_true(r.weights.value[i] == r.weights.value[10]);
            assert_true(isnan(r.weights.value[9])); // of an expert with NaN
        }
    }
    // All keys NaN by a NaN in the softmax: with a bias s counts, and the order is that of indices.
    r.p.scores = ROCQ_SCORES_SOFTMAX;
    r.p.bias = &r.bias.t;
    assert_int_equal(rocq_route(contexts[1][0], &r.p), ROCQ_OK);
    for (int32_t j = 0; j < 5; j++)
        assert_int_equal(((int32_t *)(void *)box_row(&r.ids, 1))[j], j);
    router_free(&r);
}

static void routes_refused(void **state) {
    (void)state;
    router r;
    router_make(&r, 12, 5, 3, BOX_PLAIN);
    box *const outputs[] = {&r.ids, &r.weights};
    r.p.n_groups = 5;
    r.p.top_groups = 1;
    run_fails(ROCQ_OP_ROUTE, &r.p, ROCQ_E_ARGUMENT, outputs, 2);
    r.p.n_groups = 4;
    run_fails(ROCQ_OP_ROUTE, &r.p, ROCQ_E_SHAPE, outputs, 2); // 5 of 3
    r.p.top_groups = 5;
    run_fails(ROCQ_OP_ROUTE, &r.p, ROCQ_E_ARGUMENT, outputs, 2);
    r.p.n_groups = 0;
    r.p.scores = (rocq_scores)3;
    run_fails(ROCQ_OP_ROUTE, &r.p, ROCQ_E_ARGUMENT, outputs, 2);
    r.p.scores = ROCQ_SCORES_SIGMOID;
    r.p.scale = NAN;
    run_fails(ROCQ_OP_ROUTE, &r.p, ROCQ_E_ARGUMENT, outputs, 2);
    router_free(&r);
    router_make(&r, 4, 5, 1, BOX_PLAIN);
    run_fails(ROCQ_OP_ROUTE, &r.p, ROCQ_E_SHAPE, (box *const[]){&r.ids}, 1);
    router_free(&r);
    router_make(&r, 1025, 5, 1, BOX_PLAIN);
    run_fails(ROCQ_OP_ROUTE, &r.p, ROCQ_E_UNSUPPORTED, (box *const[]){&r.ids}, 1);
    router_free(&r);
}

// -- the product --

typedef struct shape {
    rocq_format w, w2, x, y, residual;
    int64_t k, m, n_experts, n_slots, n;
    rocq_precision precision;
    rocq_activation activation;
    bool has_w2, has_bias, has_weights, has_residual, in_place, one_x;
    float limit, alpha;
    box_layout layout; // of x, y and ids
    int skew;          // 1: most tokens take the same experts, 2: all the same one
} shape;

typedef struct problem {
    shape s;
    rocq_experts_params p;
    box y, w, w2, x, ids, bias, bias2, weights, residual;
    double *want;
} problem;

static double activated(rocq_activation f, double x) {
    switch (f) {
    case ROCQ_ACT_SILU:
        return x / (1 + exp(-x));
    case ROCQ_ACT_GELU:
        return x / 2 * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
    case ROCQ_ACT_GELU_ERF:
        return x / 2 * erfc(-x / 1.4142135623730951);
    case ROCQ_ACT_RELU:
        return fmax(x, 0);
    case ROCQ_ACT_TANH:
        return tanh(x);
    case ROCQ_ACT_SIGMOID:
        return 1 / (1 + exp(-x));
    default:
        return x;
    }
}

static double dot(const box *w, int64_t m, int64_t e, const double *x) {
    const double *row = w->value + (e * w->t.ne[1] + m) * w->t.ne[0];
    double sum = 0;
    for (int64_t k = 0; k < w->t.ne[0]; k++)
        sum += row[k] * x[k];
    return sum;
}

static double value_of(const problem *a, int64_t m, int64_t j, int64_t i) {
    const shape *s = &a->s;
    const int64_t e = (int64_t)a->ids.value[i * s->n_slots + j];
    const double *x = a->x.value + (s->one_x ? i : i * s->n_slots + j) * s->k;
    double z = dot(&a->w, m, e, x) + (s->has_bias ? box_at(&a->bias, m, e, 0, 0) : 0);
    if (!s->has_w2)
        return activated(s->activation, z);
    double u = dot(&a->w2, m, e, x) + (s->has_bias ? box_at(&a->bias2, m, e, 0, 0) : 0);
    if (s->limit == 0)
        return activated(s->activation, z) * u;
    const double limit = (double)s->limit, alpha = s->alpha != 0 ? (double)s->alpha : 1;
    z = fmin(z, limit);
    u = fmax(fmin(u, limit), -limit);
    return z / (1 + exp(-alpha * z)) * (u + 1);
}

static void problem_make(problem *a, const shape *from) {
    const shape s = *from;
    memset(a, 0, sizeof *a);
    a->s = s;
    a->w = box_make(BOX_PLAIN, s.w, s.k, s.m, s.n_experts, 1);
    random_weights(&a->w);
    a->w2 = box_make(BOX_PLAIN, s.has_w2 ? s.w2 : s.w, s.k, s.m, s.n_experts, 1);
    random_weights(&a->w2);
    a->x = box_random(s.layout, s.x, 1, s.k, s.one_x ? 1 : s.n_slots, s.n, 1);
    a->ids =
        box_make(s.layout == BOX_PLAIN ? BOX_PLAIN : BOX_STRIDED, ROCQ_I32, s.n_slots, s.n, 1, 1);
    a->bias = box_random(BOX_PLAIN, ROCQ_F32, 0.5f, s.m, s.n_experts, 1, 1);
    a->bias2 = box_random(BOX_PLAIN, ROCQ_F32, 0.5f, s.m, s.n_experts, 1, 1);
    a->weights = box_random(BOX_PLAIN, ROCQ_F32, 0.3f, s.n_slots, s.n, 1, 1);
    const int64_t y1 = s.has_weights ? s.n : s.n_slots, y2 = s.has_weights ? 1 : s.n;
    a->y = box_make(s.layout, s.y, s.m, y1, y2, 1);
    a->residual = box_random(BOX_PLAIN, s.residual, 1, s.m, y1, y2, 1);
    for (int64_t i = 0; i < a->ids.count; i++) {
        const bool same = s.skew == 2 || (s.skew == 1 && random_below(4));
        a->ids.value[i] = (double)(same ? i % s.n_slots % s.n_experts : random_below(s.n_experts));
    }
    box_write(&a->ids);
    if (s.in_place) {
        memcpy(a->y.value, a->residual.value, (size_t)a->y.count * sizeof(double));
        box_write(&a->y);
    }
    a->p = (rocq_experts_params){.y = &a->y.t,
                                 .w = &a->w.t,
                                 .x = &a->x.t,
                                 .ids = &a->ids.t,
                                 .bias = s.has_bias ? &a->bias.t : NULL,
                                 .w2 = s.has_w2 ? &a->w2.t : NULL,
                                 .bias2 = s.has_bias && s.has_w2 ? &a->bias2.t : NULL,
                                 .weights = s.has_weights ? &a->weights.t : NULL,
                                 .residual = !s.has_residual ? NULL
                                             : s.in_place    ? &a->y.t
                                                             : &a->residual.t,
                                 .activation = s.activation,
                                 .limit = s.limit,
                                 .alpha = s.alpha,
                                 .precision = s.precision};
    a->want = (double *)malloc((size_t)a->y.count * sizeof(double));
    for (int64_t r = 0; r < y1 * y2; r++) {
        for (int64_t m = 0; m < s.m; m++) {
            double v = 0;
            if (!s.has_weights)
                v = value_of(a, m, r % s.n_slots, r / s.n_slots);
            for (int64_t j = 0; s.has_weights && j < s.n_slots; j++) {
                v += a->weights.value[r * s.n_slots + j] * value_of(a, m, j, r);
            }
            if (s.has_residual)
                v += a->residual.value[r * s.m + m];
            a->want[r * s.m + m] = v;
        }
    }
}

static void problem_free(problem *a) {
    box *const boxes[] = {&a->y,    &a->w,     &a->w2,      &a->x,       &a->ids,
                          &a->bias, &a->bias2, &a->weights, &a->residual};
    for (size_t i = 0; i < sizeof boxes / sizeof boxes[0]; i++)
        box_free(boxes[i]);
    free(a->want);
}

static double bound_of(int simd, const problem *a) {
    rocq_precision_info info;
    assert_int_equal(rocq_get_precision(contexts[simd][0], ROCQ_OP_EXPERTS, &a->p, &info), ROCQ_OK);
    return info.nmse + (a->s.y == ROCQ_Q8_0 ? 1e-4 : 0) + (a->s.y == ROCQ_F16 ? 1e-8 : 0);
}

// Copies of half of the experts, which w and w2 then lack, give the same bits; so does a table with
// places that are none.
static void check_copies(int simd, problem *a) {
    static const double none[] = {-1, 1e6, -2147483648.0};
    const int64_t n = a->s.n_experts, n_copies = (n + 1) / 2;
    box table = box_make(BOX_PLAIN, ROCQ_I32, n, 1, 1, 1);
    box copies[2], *const from[2] = {&a->w, &a->w2};
    unsigned char *want = (unsigned char *)malloc((size_t)a->y.size);
    rocq_experts_params p = a->p;
    memcpy(want, a->y.memory, (size_t)a->y.size);
    for (int64_t e = 0; e < n; e++) {
        table.value[e] = e % 2 ? none[e / 2 % 3] : (double)(n_copies - 1 - e / 2);
    }
    box_write(&table);
    p.kept = &table.t;
    for (int i = 0; i < (p.w2 ? 2 : 1); i++) {
        const rocq_tensor *w = &from[i]->t;
        const size_t size = (size_t)(rocq_tensor_size(w) / n);
        copies[i] = box_make(BOX_PLAIN, w->format, w->ne[0], w->ne[1], n_copies, 1);
        for (int64_t e = 0; e < n; e += 2) {
            assert_int_equal(rocq_copy_slice(contexts[simd][1], &copies[i].t, n_copies - 1 - e / 2,
                                             w, e), ROCQ_OK);
            memset((char *)rocq_tensor_data(w) + (size_t)e * size, 0xff, size);
        }
    }
    p.w_kept = &copies[0].t;
    p.w2_kept = p.w2 ? &copies[1].t : NULL;
    run(simd, ROCQ_OP_EXPERTS, &p, (box *const[]){&a->y}, 1);
    assert_true(same_bytes(want, a->y.memory, a->y.size));
    for (int i = 0; i < (p.w2 ? 2 : 1); i++) {
        const size_t size = (size_t)(rocq_tensor_size(&from[i]->t) / n);
        for (int64_t e = 0; e < n; e += 2) {
            memcpy((char *)rocq_tensor_data(&from[i]->t) + (size_t)e * size,
                   (char *)rocq_tensor_data(&copies[i].t) + (size_t)(n_copies - 1 - e / 2) * size,
                   size);
        }
        box_free(&copies[i]);
    }
    box_free(&table);
    free(want);
}

// Runs it with both instruction sets and all thread counts, and then each token alone: the same
// bits. With INT8 and nothing behind the sums, both instruction sets give the same.
static void problem_check(const shape *s) {
    problem a;
    problem_make(&a, s);
    unsigned char *start = (unsigned char *)malloc((size_t)a.y.size);
    unsigned char *scalar = (unsigned char *)malloc((size_t)a.y.size);
    memcpy(start, a.y.memory, (size_t)a.y.size);
    rocq_precision_info info;
    assert_int_equal(rocq_get_precision(contexts[0][0], ROCQ_OP_EXPERTS, &a.p, &info), ROCQ_OK);
    for (int simd = 0; simd < 2; simd++) {
        memcpy(a.y.memory, start, (size_t)a.y.size);
        run(simd, ROCQ_OP_EXPERTS, &a.p, (box *const[]){&a.y}, 1);
        check_all(&a.y, a.want, bound_of(simd, &a));
        if (simd == 0) {
            memcpy(scalar, a.y.memory, (size_t)a.y.size);
        } else if (info.precision == ROCQ_PRECISION_INT8 && !s->has_w2 && !s->has_weights &&
                   !s->activation && !s->has_residual) {
            assert_true(same_bytes(scalar, a.y.memory, a.y.size));
        }
        if (!s->in_place)
            check_copies(simd, &a);
        if (s->in_place || s->n == 1)
            continue;
        for (int64_t i = 0; i < s->n; i += 1 + s->n / 5) {
            rocq_experts_params p = a.p;
            rocq_tensor x, ids, weights, residual;
            const int64_t n_x = s->one_x ? 1 : s->n_slots, n_y = s->has_weights ? 1 : s->n_slots;
            box y = box_make(BOX_PLAIN, s->y, s->m, n_y, 1, 1);
            const int64_t one[4] = {s->n_slots, 1, 1, 1}, begin[4] = {0, i, 0, 0};
            const int64_t x_ne[4] = {s->k, n_x, 1, 1}, x_begin[4] = {0, 0, i, 0};
            const int64_t r_ne[4] = {s->m, 1, 1, 1};
            assert_int_equal(rocq_tensor_view(&x, a.p.x, x_begin, x_ne), ROCQ_OK);
            assert_int_equal(rocq_tensor_view(&ids, a.p.ids, begin, one), ROCQ_OK);
            p.y = &y.t;
            p.x = &x;
            p.ids = &ids;
            if (p.weights) {
                assert_int_equal(rocq_tensor_view(&weights, a.p.weights, begin, one), ROCQ_OK);
                p.weights = &weights;
            }
            if (p.residual) {
                assert_int_equal(rocq_tensor_view(&residual, a.p.residual, begin, r_ne), ROCQ_OK);
                p.residual = &residual;
            }
            if (rocq_experts(contexts[simd][1], &p))
                fail_msg("%s", rocq_error(contexts[simd][1]));
            for (int64_t r = 0; r < n_y; r++) {
                assert_true(
                    same_bytes(box_row(&y, r), box_row(&a.y, i * n_y + r), box_row_size(&y)));
            }
            box_free(&y);
        }
    }
    free(start);
    free(scalar);
    problem_free(&a);
}

// As in a model: gate and up with GLU from one x, then down with weights.
static void check_format(rocq_format format) {
    static const struct {
        int64_t n, n_slots, n_experts;
    } sizes[] = {{1, 8, 128}, {1, 1, 1}, {3, 2, 8}, {7, 4, 32}, {70, 3, 5}};
    const int64_t block = rocq_get_format_info(format)->block_elems;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int what = 0; what < 2; what++) {
            const shape up = {.w = format,
                              .w2 = format,
                              .x = i % 2 ? ROCQ_F16 : ROCQ_F32,
                              .y = ROCQ_F32,
                              .k = block > 32 ? block * (1 + (int64_t)i % 3) : 96,
                              .m = i % 2 ? 23 : 40,
                              .n_experts = sizes[i].n_experts,
                              .n_slots = sizes[i].n_slots,
                              .n = sizes[i].n,
                              .precision = what ? ROCQ_PRECISION_F32 : ROCQ_PRECISION_AUTO,
                              .activation = ROCQ_ACT_SILU,
                              .has_w2 = true,
                              .one_x = true,
                              .has_bias = i % 2,
                              .skew = i == 4 ? 1 : 0};
            problem_check(&up);
            shape down = up;
            down.activation = ROCQ_ACT_IDENTITY;
            down.has_w2 = down.one_x = false;
            down.has_weights = true;
            problem_check(&down);
            down.has_weights = false;
            if (what == 0 && i >= 3)
                problem_check(&down);
        }
    }
}

#define ROCQ_X(NAME, name, id, elems, bytes)                                                       \
    static void format_##name(void **state) {                                                      \
        const uint64_t kept = random_state;                                                        \
        (void)state;                                                                               \
        check_format(ROCQ_##NAME);                                                                 \
        if (!is_encoded(ROCQ_##NAME)) random_state = kept;                                         \
    }
ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X

// Tiles of more columns than fit one, of one, and of none.
static void many_tokens(void **state) {
    static const rocq_format formats[] = {ROCQ_Q4_K, ROCQ_Q8_0, ROCQ_F16, ROCQ_MXFP4};
    (void)state;
    for (int i = 0; i < 4; i++) {
        for (int skew = 0; skew < 3; skew++) {
            const shape s = {.w = formats[i],
                             .w2 = formats[i],
                             .x = ROCQ_F32,
                             .y = ROCQ_F32,
                             .k = 256,
                             .m = 70,
                             .n_experts = skew == 2 ? 3 : 9,
                             .n_slots = 2,
                             .n = 301,
                             .has_w2 = i % 2 == 0,
                             .one_x = true,
                             .skew = skew,
                             .activation = ROCQ_ACT_SILU,
                             .has_weights = i % 2 == 1};
            problem_check(&s);
        }
    }
}

static void epilogues(void **state) {
    (void)state;
    for (int i = 0; i < 48; i++) {
        static const rocq_format outs[] = {ROCQ_F32, ROCQ_F16, ROCQ_Q8_0};
        static const int64_t tokens[] = {1, 2, 5, 17};
        shape s = {.w = i % 2 ? ROCQ_Q5_K : ROCQ_Q4_0,
                   .x = i % 5 == 4 ? ROCQ_Q8_0 : ROCQ_F32,
                   .y = outs[i % 3],
                   .residual = i % 7 > 3 ? ROCQ_F16 : ROCQ_F32,
                   .k = 256,
                   .m = 64,
                   .precision = ROCQ_PRECISION_F32,
                   .n_experts = 1 + i % 11,
                   .n_slots = 1 + i % 8,
                   .n = tokens[i / 2 % 4],
                   .activation = (rocq_activation)(i % 6),
                   .has_w2 = i % 4 < 2,
                   .has_bias = i % 3 == 1,
                   .has_weights = i % 5 < 2,
                   .one_x = i % 7 < 3,
                   .layout = (box_layout)(i % 3)};
        s.w2 = i % 8 == 5 ? ROCQ_F16 : i % 8 == 4 ? ROCQ_Q5_0 : s.w;
        s.has_residual = s.has_weights && i % 2;
        s.in_place = s.has_residual && i % 4 == 1 && s.y == s.residual;
        if (s.has_weights)
            s.layout = s.layout == BOX_PERMUTED ? BOX_STRIDED : s.layout;
        if (s.has_w2 && i % 3 == 0) {
            s.limit = i % 6 ? 0.5f : 7.0f;
            s.alpha = i % 9 ? 1.702f : 0.0f;
        }
        problem_check(&s);
    }
}

static const rocq_format all_formats[] = {
#define ROCQ_X(NAME, name, id, elems, bytes) ROCQ_##NAME,
    ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
};
enum { N_FORMATS = sizeof all_formats / sizeof *all_formats };

// Closes or opens the slices of the experts that no token has, all but 1 and 4.
static void close_others(const box *w, bool closed) {
    const int64_t one = rocq_tensor_size(&w->t) / w->t.ne[2];
    for (int64_t e = 0; e < w->t.ne[2]; e++) {
        if (e != 1 && e != 4) ops_close(w->memory + e * one, one, closed);
    }
}

// No byte of an expert that is not chosen is read.
static void other_experts_are_not_read(void **state) {
    (void)state;
    for (int f = 0; f < N_FORMATS; f++) {
        for (int many = 0; many < 2; many++) {
            const shape s = {.w = all_formats[f], .w2 = all_formats[f], .x = ROCQ_F32,
                             .y = ROCQ_F32, .k = 256, .m = 32, .n_experts = 7, .n_slots = 2,
                             .n = many ? 40 : 1, .has_w2 = f % 2 == 0, .one_x = true};
            problem a;
            problem_make(&a, &s);
            for (int64_t i = 0; i < a.ids.count; i++) a.ids.value[i] = i % 2 ? 4 : 1;
            box_write(&a.ids);
            close_others(&a.w, true);
            close_others(&a.w2, true);
            for (int simd = 0; simd < 2; simd++) {
                run(simd, ROCQ_OP_EXPERTS, &a.p, (box *const[]){&a.y}, 1);
            }
            close_others(&a.w, false);
            close_others(&a.w2, false);
            problem_free(&a);
        }
    }
}

// NaN in x reaches the rows of its token alone.
static void nan_stays_with_its_token(void **state) {
    (void)state;
    const shape s = {.w = ROCQ_Q4_0, .w2 = ROCQ_Q4_0, .x = ROCQ_F32, .y = ROCQ_F32, .k = 64,
                     .m = 33, .n_experts = 4, .n_slots = 2, .n = 6, .has_w2 = true, .one_x = true,
                     .limit = 7, .alpha = 1.702f};
    problem a;
    problem_make(&a, &s);
    a.x.value[3 * 64 + 5] = NAN;
    box_write(&a.x);
    for (int simd = 0; simd < 2; simd++) {
        run(simd, ROCQ_OP_EXPERTS, &a.p, (box *const[]){&a.y}, 1);
        box_read(&a.y);
        for (int64_t i = 0; i < a.y.count; i++) {
            assert_int_equal(isnan(a.y.value[i]) != 0, i / (2 * 33) == 3);
        }
    }
    problem_free(&a);
}

// On the CPU w and w2 may have different formats, of which one is multiplied in INT8 and the other
// in F32. What rocq_get_precision says is then the less exact of both, and the sum of both bounds.
static void precision_is_that_of_both_matrices(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        const rocq_format w = i ? ROCQ_Q8_0 : ROCQ_F16, w2 = i ? ROCQ_F16 : ROCQ_Q8_0;
        const shape s = {.w = w, .w2 = w2, .x = ROCQ_F32, .y = ROCQ_F32, .k = 64, .m = 32,
                         .n_experts = 5, .n_slots = 2, .n = 3, .has_w2 = true, .one_x = true};
        rocq_precision_info info;
        problem a;
        problem_make(&a, &s);
        const bool int8 = *inside_has_simd(contexts[1][0]); // the portable products are in F32
        assert_int_equal(rocq_get_precision(contexts[1][0], ROCQ_OP_EXPERTS, &a.p, &info), ROCQ_OK);
        assert_int_equal(info.precision, int8 ? ROCQ_PRECISION_INT8 : ROCQ_PRECISION_F32);
        assert_true(info.nmse == (int8 ? 1e-6 + 5e-4 : 2e-6));
        problem_free(&a);
    }
}

static void refusals(void **state) {
    (void)state;
    const shape s = {.w = ROCQ_Q4_K, .w2 = ROCQ_Q4_K, .x = ROCQ_F32, .y = ROCQ_F32, .k = 256,
                     .m = 32, .n_experts = 5, .n_slots = 2, .n = 3, .has_w2 = true, .one_x = true,
                     .has_bias = true};
    problem a;
    problem_make(&a, &s);
    box *const outputs[] = {&a.y};
    static const double bad[] = {-1, 5, 2147483647};
    for (int i = 0; i < 3; i++) {
        const double was = a.ids.value[i * 2];
        a.ids.value[i * 2] = bad[i];
        box_write(&a.ids);
        run_fails(ROCQ_OP_EXPERTS, &a.p, ROCQ_E_BOUNDS, outputs, 1);
        assert_non_null(strstr(rocq_error(contexts[1][1]), "of 5 experts"));
        a.ids.value[i * 2] = was;
    }
    box_write(&a.ids);
    rocq_experts_params p = a.p;
    p.w2 = NULL;
    run_fails(ROCQ_OP_EXPERTS, &p, ROCQ_E_ARGUMENT, outputs, 1); // bias2
    p.bias2 = NULL;
    p.limit = 7;
    run_fails(ROCQ_OP_EXPERTS, &p, ROCQ_E_ARGUMENT, outputs, 1);
    p.limit = NAN;
    run_fails(ROCQ_OP_EXPERTS, &p, ROCQ_E_ARGUMENT, outputs, 1);
    p.limit = 0;
    p.alpha = -1;
    run_fails(ROCQ_OP_EXPERTS, &p, ROCQ_E_ARGUMENT, outputs, 1);
    p.alpha = 0;
    p.residual = &a.residual.t;
    run_fails(ROCQ_OP_EXPERTS, &p, ROCQ_E_ARGUMENT, outputs, 1); // without weights
    p.weights = &a.weights.t;
    run_fails(ROCQ_OP_EXPERTS, &p, ROCQ_E_SHAPE, outputs, 1); // y is [M, n_slots, n]
    p = a.p;
    int32_t places[5] = {0, 0, 0, 0, 0};
    const int64_t n_experts = 5;
    rocq_tensor table, few = a.w.t, other;
    assert_int_equal(rocq_tensor_from_host(&table, places, ROCQ_I32, 1, &n_experts), ROCQ_OK);
    few.ne[2] = 2;
    p.kept = &table;
    run_fails(ROCQ_OP_EXPERTS, &p, ROCQ_E_ARGUMENT, outputs, 1); // without copies
    p.w_kept = &few;
    run_fails(ROCQ_OP_EXPERTS, &p, ROCQ_E_ARGUMENT, outputs, 1); // without those of w2
    p.w2_kept = &few;
    p.kept = NULL;
    run_fails(ROCQ_OP_EXPERTS, &p, ROCQ_E_ARGUMENT, outputs, 1); // without the table
    table.ne[0] = 4;
    p.kept = &table;
    run_fails(ROCQ_OP_EXPERTS, &p, ROCQ_E_SHAPE, outputs, 1);
    table.ne[0] = 5;
    few.ne[1] = 31;
    run_fails(ROCQ_OP_EXPERTS, &p, ROCQ_E_SHAPE, outputs, 1);
    few.ne[1] = 32;
    other = few;
    other.format = ROCQ_Q4_0; // less of it
    p.w_kept = p.w2_kept = &other;
    run_fails(ROCQ_OP_EXPERTS, &p, ROCQ_E_FORMAT, outputs, 1);
    rocq_ctx *ctx = contexts[1][1];
    assert_int_equal(rocq_copy_slice(ctx, &few, 2, &a.w.t, 0), ROCQ_E_BOUNDS);
    assert_int_equal(rocq_copy_slice(ctx, &few, 0, &a.w.t, -1), ROCQ_E_BOUNDS);
    assert_int_equal(rocq_copy_slice(ctx, &other, 0, &a.w.t, 0), ROCQ_E_SHAPE);
    assert_int_equal(rocq_copy_slice(ctx, NULL, 0, &a.w.t, 0), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_copy_slice(NULL, &few, 0, &a.w.t, 0), ROCQ_E_ARGUMENT);
    p = a.p;
    rocq_tensor w = a.w.t;
    w.ne[3] = 2;
    p.w = &w;
    assert_int_not_equal(rocq_experts(contexts[1][1], &p), ROCQ_OK);
    p = a.p;
    p.bias = &a.weights.t;
    run_fails(ROCQ_OP_EXPERTS, &p, ROCQ_E_SHAPE, outputs, 1);
    p = a.p;
    p.activation = (rocq_activation)99;
    run_fails(ROCQ_OP_EXPERTS, &p, ROCQ_E_ARGUMENT, outputs, 1);
    p = a.p;
    p.x = p.y;
    run_fails(ROCQ_OP_EXPERTS, &p, ROCQ_E_SHAPE, outputs, 1);
    problem_free(&a);
    const shape plain = {.w = ROCQ_F16,
                         .x = ROCQ_F32,
                         .y = ROCQ_F32,
                         .k = 64,
                         .m = 32,
                         .n_experts = 5,
                         .n_slots = 2,
                         .n = 3,
                         .precision = ROCQ_PRECISION_INT8};
    problem_make(&a, &plain);
    run_fails(ROCQ_OP_EXPERTS, &a.p, ROCQ_E_UNSUPPORTED, (box *const[]){&a.y}, 1);
    problem_free(&a);
}

// A recorded step, router and both products, follows what the router chooses at each launch, and an
// id that went bad in between ends it.
static void a_graph_follows_the_ids(void **state) {
    (void)state;
    enum {
        K = 256,
        M = 64,
        E = 6,
        SLOTS = 2,
        N = 9
    };
    rocq_ctx *ctx = contexts[1][1];
    router r;
    problem a;
    rocq_graph *graph = NULL;
    router_make(&r, E, SLOTS, N, BOX_PLAIN);
    const shape s = {.w = ROCQ_Q6_K,
                     .w2 = ROCQ_Q6_K,
                     .x = ROCQ_F32,
                     .y = ROCQ_F32,
                     .k = K,
                     .m = M,
                     .n_experts = E,
                     .n_slots = SLOTS,
                     .n = N,
                     .has_w2 = true,
                     .one_x = true,
                     .activation = ROCQ_ACT_SILU};
    problem_make(&a, &s);
    a.p.ids = &r.ids.t;
    assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
    assert_int_equal(rocq_route(ctx, &r.p), ROCQ_OK);
    assert_int_equal(rocq_experts(ctx, &a.p), ROCQ_OK);
    assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);
    unsigned char *first = (unsigned char *)malloc((size_t)a.y.size);
    for (int round = 0; round < 4; round++) {
        for (int64_t i = 0; i < r.logits.count; i++)
            r.logits.value[i] = random_normal();
        box_write(&r.logits);
        memset(a.y.memory, 0xff, (size_t)a.y.size);
        assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK);
        assert_int_equal(rocq_sync(ctx), ROCQ_OK);
        memcpy(first, a.y.memory, (size_t)a.y.size);
        memset(a.y.memory, 0xff, (size_t)a.y.size);
        assert_int_equal(rocq_route(contexts[1][0], &r.p), ROCQ_OK);
        assert_int_equal(rocq_experts(contexts[1][0], &a.p), ROCQ_OK);
        assert_true(same_bytes(first, a.y.memory, a.y.size));
    }
    free(first);
    rocq_graph_destroy(ctx, &graph);
    problem_free(&a);
    router_free(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(routes),
        cmocka_unit_test(routes_ties_and_nan),
        cmocka_unit_test(routes_refused),
#define ROCQ_X(NAME, name, id, elems, bytes) cmocka_unit_test(format_##name),
        ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
            cmocka_unit_test(many_tokens),
        cmocka_unit_test(epilogues),
        cmocka_unit_test(other_experts_are_not_read),
        cmocka_unit_test(nan_stays_with_its_token),
        cmocka_unit_test(precision_is_that_of_both_matrices),
        cmocka_unit_test(refusals),
        cmocka_unit_test(a_graph_follows_the_ids),
    };
    return cmocka_run_group_tests_name("experts", tests, open_contexts, close_contexts);
}
