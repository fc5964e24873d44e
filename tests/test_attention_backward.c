// The backward of attention against float64, which is itself checked by finite differences of the
// forward in float64.
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "ops.h"

// Of the squared error over the squared sums of the sizes of all terms, because these may cancel.
#define BOUND 1e-11

typedef struct shape {
    int64_t head_dim, n_heads, n_kv_heads, n_q, n_kv, n_seqs;
    rocq_format format, out_format; // of what is read, of what is written
    box_layout layout;
    bool causal;
    int32_t window;
    float softcap, scale;
} shape;

enum { Q, K, V, N_IN };

typedef struct problem {
    shape s;
    box in[N_IN], dout, out, lse, grad[N_IN];
    double *want[N_IN], *size[N_IN]; // dq, dk, dv; the sums of their terms' sizes
    rocq_attention_backward_params p;
} problem;

static double *zeros(int64_t n) {
    double *x = (double *)calloc((size_t)n, sizeof(double));
    assert_non_null(x);
    return x;
}

static double scale_of(const shape *s) {
    return s->scale != 0 ? s->scale : 1 / sqrt((double)s->head_dim);
}

static bool visible(const shape *s, int64_t i, int64_t j) {
    const int64_t p = s->n_kv - s->n_q + i;
    return !(s->causal && j > p) && !(s->window && j <= p - s->window);
}

static int64_t row_at(const box *b, int64_t head, int64_t i, int64_t seq) {
    return ((seq * b->t.ne[2] + i) * b->t.ne[1] + head) * b->t.ne[0];
}

static double dot(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// The score of query i of a head and position j; *bend is its derivative by the product.
static double score_of(const problem *a, int64_t head, int64_t i, int64_t j, int64_t seq,
                       double *bend) {
    const shape *s = &a->s;
    const double *q = a->in[Q].value + row_at(&a->in[Q], head, i, seq);
    const double *k = a->in[K].value + row_at(&a->in[K], head * s->n_kv_heads / s->n_heads, j, seq);
    const double x = scale_of(s) * dot(q, k, s->head_dim);
    *bend = 1;
    if (s->softcap == 0) return x;
    const double t = tanh(x / s->softcap);
    *bend = 1 - t * t;
    return s->softcap * t;
}

// out and lse of one query and head in float64, out as [head_dim].
static void forward(const problem *a, int64_t head, int64_t i, int64_t seq, double *out,
                    double *lse) {
    const shape *s = &a->s;
    double top = -(double)INFINITY, sum = 0, bend;
    for (int64_t d = 0; d < s->head_dim; d++) out[d] = 0;
    for (int64_t j = 0; j < s->n_kv; j++) {
        if (visible(s, i, j)) top = fmax(top, score_of(a, head, i, j, seq, &bend));
    }
    for (int64_t j = 0; j < s->n_kv; j++) {
        if (!visible(s, i, j)) continue;
        const double weight = exp(score_of(a, head, i, j, seq, &bend) - top);
        const double *v =
            a->in[V].value + row_at(&a->in[V], head * s->n_kv_heads / s->n_heads, j, seq);
        sum += weight;
        for (int64_t d = 0; d < s->head_dim; d++) out[d] += weight * v[d];
    }
    for (int64_t d = 0; d < s->head_dim && sum > 0; d++) out[d] /= sum;
    *lse = top + log(sum);
    if (sum == 0) *lse = -(double)INFINITY;
}

// The formulas of rocq_attention_backward_params, from out and lse as the op gets them.
static void backward(problem *a) {
    const shape *s = &a->s;
    for (int t = 0; t < N_IN; t++) {
        memset(a->want[t], 0, (size_t)a->in[t].count * sizeof(double));
        memset(a->size[t], 0, (size_t)a->in[t].count * sizeof(double));
    }
    for (int64_t seq = 0; seq < s->n_seqs; seq++) {
        for (int64_t i = 0; i < s->n_q; i++) {
            for (int64_t head = 0; head < s->n_heads; head++) {
                const int64_t n = s->head_dim, kv_head = head * s->n_kv_heads / s->n_heads;
                const int64_t at = row_at(&a->in[Q], head, i, seq);
                const double *q = a->in[Q].value + at, *dout = a->dout.value + at;
                const double delta = dot(dout, a->out.value + at, n);
                const double lse = a->lse.value[at / n];
                for (int64_t j = 0; j < s->n_kv; j++) {
                    if (!visible(s, i, j)) continue;
                    const int64_t kv = row_at(&a->in[K], kv_head, j, seq);
                    const double *k = a->in[K].value + kv, *v = a->in[V].value + kv;
                    double bend;
                    const double p = exp(score_of(a, head, i, j, seq, &bend) - lse);
                    const double dp = dot(dout, v, n), factor = p * bend * scale_of(s);
                    const double ds = factor * (dp - delta);
                    const double most = fabs(factor) * (fabs(dp) + fabs(delta));
                    for (int64_t d = 0; d < n; d++) {
                        a->size[V][kv + d] += p * fabs(dout[d]);
                        a->size[Q][at + d] += most * fabs(k[d]);
                        a->size[K][kv + d] += most * fabs(q[d]);
                        a->want[V][kv + d] += p * dout[d];
                        a->want[Q][at + d] += ds * k[d];
                        a->want[K][kv + d] += ds * q[d];
                    }
                }
            }
        }
    }
}

static void problem_link(problem *a) {
    const rocq_attention_backward_params p = {
        .dq = &a->grad[Q].t, .dk = &a->grad[K].t, .dv = &a->grad[V].t, .dout = &a->dout.t,
        .out = &a->out.t, .q = &a->in[Q].t, .k = &a->in[K].t, .v = &a->in[V].t, .lse = &a->lse.t,
        .scale = a->s.scale, .softcap = a->s.softcap, .window = a->s.window,
        .causal = a->s.causal};
    a->p = p;
}

// Random operands, and what the forward makes of them.
static void problem_make(problem *a, shape s) {
    static const float size[N_IN] = {2, 1, 1};
    memset(a, 0, sizeof *a);
    a->s = s;
    for (int t = 0; t < N_IN; t++) {
        const int64_t heads = t == Q ? s.n_heads : s.n_kv_heads, n = t == Q ? s.n_q : s.n_kv;
        a->in[t] = box_random(s.layout, s.format, size[t], s.head_dim, heads, n, s.n_seqs);
        a->grad[t] = box_make(s.layout, s.out_format, s.head_dim, heads, n, s.n_seqs);
        a->want[t] = zeros(a->in[t].count);
        a->size[t] = zeros(a->in[t].count);
    }
    a->dout = box_random(s.layout, s.format, 1, s.head_dim, s.n_heads, s.n_q, s.n_seqs);
    a->out = box_make(s.layout, s.format, s.head_dim, s.n_heads, s.n_q, s.n_seqs);
    a->lse = box_make(s.layout, ROCQ_F32, s.n_heads, s.n_q, s.n_seqs, 1);
    for (int64_t seq = 0; seq < s.n_seqs; seq++) {
        for (int64_t i = 0; i < s.n_q; i++) {
            for (int64_t head = 0; head < s.n_heads; head++) {
                const int64_t at = row_at(&a->out, head, i, seq);
                forward(a, head, i, seq, a->out.value + at, a->lse.value + at / s.head_dim);
            }
        }
    }
    box_write(&a->out);
    box_write(&a->lse);
    problem_link(a);
}

static void problem_free(problem *a) {
    for (int t = 0; t < N_IN; t++) {
        boxes_free(&a->in[t], &a->grad[t]);
        free(a->want[t]);
        free(a->size[t]);
    }
    boxes_free(&a->dout, &a->out, &a->lse);
}

static void check_gradient(box *got, const double *want, const double *size, const char *what) {
    double error = 0, power = 0;
    box_read(got);
    box_check_outside(got);
    for (int64_t i = 0; i < got->count; i++) {
        const double rounding = rounding_to(got->t.format, want[i]);
        const double e = fabs(got->value[i] - want[i]);
        error += e <= rounding ? 0 : (e - rounding) * (e - rounding);
        power += size[i] * size[i];
    }
    if (!(error <= BOUND * power)) fail_msg("%s: squared error %g over %g", what, error, power);
}

static void check(problem *a) {
    static const char *const name[N_IN] = {"dq", "dk", "dv"};
    box *grads[N_IN] = {&a->grad[Q], &a->grad[K], &a->grad[V]};
    backward(a);
    for (int tier = 0; tier < n_tiers; tier++) {
        for (int t = 0; t < N_IN; t++) memset(grads[t]->memory, 0xff, (size_t)grads[t]->size);
        run(tier, ROCQ_OP_ATTENTION_BACKWARD, &a->p, grads, N_IN);
        for (int t = 0; t < N_IN; t++) {
            check_gradient(grads[t], a->want[t], a->size[t], name[t]);
        }
    }
}

static void solve(shape s) {
    problem a;
    problem_make(&a, s);
    check(&a);
    problem_free(&a);
}

static shape basic(void) { // GQA, nothing optional
    const shape s = {.head_dim = 64, .n_heads = 4, .n_kv_heads = 2, .n_q = 29, .n_kv = 29,
                     .n_seqs = 1, .format = ROCQ_F32, .out_format = ROCQ_F32};
    return s;
}

// The sum over all of dout out, whose gradient by q, k and v the op computes.
static double loss(const problem *a) {
    double sum = 0, lse, *out = zeros(a->s.head_dim);
    for (int64_t seq = 0; seq < a->s.n_seqs; seq++) {
        for (int64_t i = 0; i < a->s.n_q; i++) {
            for (int64_t head = 0; head < a->s.n_heads; head++) {
                forward(a, head, i, seq, out, &lse);
                sum += dot(out, a->dout.value + row_at(&a->dout, head, i, seq), a->s.head_dim);
            }
        }
    }
    free(out);
    return sum;
}

static void reference_agrees_with_finite_differences(void **state) {
    (void)state;
    for (int option = 0; option < 4; option++) {
        shape s = basic();
        s.head_dim = 8;
        s.n_q = 5;
        s.n_kv = option == 3 ? 3 : 7; // queries 0 and 1 see nothing
        s.causal = option > 0;
        s.window = option == 2 ? 3 : 0;
        s.softcap = option == 1 ? 1.5f : 0;
        problem a;
        problem_make(&a, s);
        for (int64_t r = 0; r < box_rows(&a.out); r++) { // out and lse without their rounding
            forward(&a, r % s.n_heads, r / s.n_heads, 0, a.out.value + r * s.head_dim,
                    a.lse.value + r);
        }
        backward(&a);
        for (int t = 0; t < N_IN; t++) {
            for (int64_t i = 0; i < a.in[t].count; i++) {
                double *x = &a.in[t].value[i];
                const double was = *x, h = 1e-5;
                *x = was + h;
                const double more = loss(&a);
                *x = was - h;
                const double difference = (more - loss(&a)) / (2 * h);
                *x = was;
                if (!(fabs(difference - a.want[t][i]) <= 1e-8 * (1 + fabs(difference)))) {
                    fail_msg("option %d, input %d, element %d: %g by differences, %g", option, t,
                             (int)i, difference, a.want[t][i]);
                }
            }
        }
        check(&a);
        problem_free(&a);
    }
}

static void head_sizes(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 7, 40, 64, 80, 96, 112, 128, 200, 256, 512};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        shape s = basic();
        s.head_dim = sizes[i];
        s.layout = (box_layout)(i % 3);
        solve(s);
        s.causal = true;
        s.n_q = 27; // 54 rows: a tile, and a short one
        s.n_kv = 101;
        solve(s);
    }
}

// Queries before the first position see nothing: their dq is 0.
static void counts_of_queries_and_keys(void **state) {
    (void)state;
    static const int64_t counts[] = {1, 2, 6, 15, 16, 17, 33, 48, 49, 100};
    const int n = (int)(sizeof counts / sizeof counts[0]);
    for (int i = 0; i < n * n; i++) {
        shape s = basic();
        s.head_dim = 16;
        s.n_q = counts[i / n];
        s.n_kv = counts[i % n];
        s.n_heads = 2 + 2 * (i % 3);
        s.causal = i % 2 == 0;
        s.window = s.causal && i % 5 == 0 ? (int32_t)(1 + i % 40) : 0;
        solve(s);
    }
}

static void head_groups(void **state) {
    (void)state;
    static const int64_t heads[][2] = {{1, 1}, {5, 5}, {6, 2}, {7, 1}, {40, 1}, {33, 11}};
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        shape s = basic();
        s.head_dim = 24;
        s.n_heads = heads[i][0];
        s.n_kv_heads = heads[i][1];
        s.n_seqs = 1 + (int64_t)i % 3;
        s.causal = true;
        solve(s);
    }
}

static void each_option(void **state) {
    (void)state;
    for (int option = 0; option < 16; option++) {
        shape s = basic();
        s.head_dim = 32;
        s.n_seqs = 2;
        s.n_q = 60;
        s.n_kv = 75;
        s.causal = option % 8 > 0 && option % 8 < 5;
        if (option % 8 == 2) s.window = 9;
        if (option % 8 == 3) s.window = 1;
        if (option % 8 == 4 || option % 8 == 5) s.softcap = 2;
        if (option % 8 == 6) s.scale = -0.25f;
        if (option % 8 == 7) s.scale = 3; // nearly one-hot
        s.layout = (box_layout)(option % 3);
        s.format = option < 8 ? ROCQ_F32 : ROCQ_F16;
        s.out_format = option % 4 < 2 ? ROCQ_F32 : ROCQ_F16;
        solve(s);
    }
}

static void everything_together(void **state) {
    (void)state;
    for (int round = 0; round < 40; round++) {
        shape s = {.head_dim = 1 + random_below(70)};
        s.n_kv_heads = 1 + random_below(3);
        s.n_heads = s.n_kv_heads * (1 + random_below(5));
        s.n_q = 1 + random_below(90);
        s.n_kv = 1 + random_below(90);
        s.n_seqs = 1 + random_below(3);
        s.format = random_below(2) ? ROCQ_F32 : ROCQ_F16;
        s.out_format = random_below(2) ? ROCQ_F32 : ROCQ_F16;
        s.layout = (box_layout)random_below(3);
        s.causal = random_below(3) > 0;
        if (s.causal && random_below(2)) s.window = (int32_t)(1 + random_below(s.n_kv + 5));
        if (random_below(3) == 0) s.softcap = random_in(1, 20);
        if (random_below(3) == 0) s.scale = random_in(-0.5f, 0.5f);
        solve(s);
    }
}

// q, k and v as columns of one tensor, dq, dk and dv as columns of another: the bits are those of
// separate tensors. out and lse are the forward's own. A gradient that takes in a column of another
// is refused.
static void columns_of_one_tensor(void **state) {
    (void)state;
    enum { D = 32, HEADS = 4, KV = 2, N = 70, ALL = HEADS + 2 * KV };
    static const int64_t first[N_IN] = {0, HEADS, HEADS + KV}, heads[N_IN] = {HEADS, KV, KV};
    rocq_ctx *ctx = contexts[1][1];
    box fused = box_random(BOX_PLAIN, ROCQ_F32, 1, D, ALL, N, 1);
    box grads = box_make(BOX_PLAIN, ROCQ_F32, D, ALL, N, 1), *whole = &grads;
    box out = box_make(BOX_PLAIN, ROCQ_F32, D, HEADS, N, 1);
    box lse = box_make(BOX_PLAIN, ROCQ_F32, HEADS, N, 1, 1);
    box dout = box_random(BOX_PLAIN, ROCQ_F32, 1, D, HEADS, N, 1);
    box own[N_IN], apart[N_IN];
    rocq_tensor t[N_IN], dt[N_IN];
    for (int i = 0; i < N_IN; i++) {
        const int64_t start[4] = {0, first[i], 0, 0}, ne[4] = {D, heads[i], N, 1};
        assert_int_equal(rocq_tensor_view(&t[i], &fused.t, start, ne), ROCQ_OK);
        assert_int_equal(rocq_tensor_view(&dt[i], &grads.t, start, ne), ROCQ_OK);
        own[i] = box_make(BOX_PLAIN, ROCQ_F32, D, heads[i], N, 1);
        apart[i] = box_make(BOX_PLAIN, ROCQ_F32, D, heads[i], N, 1);
        const rocq_cast_params copy = {.y = &own[i].t, .x = &t[i]};
        assert_int_equal(rocq_cast(ctx, &copy), ROCQ_OK);
    }
    const rocq_attention_params attention = {.out = &out.t, .lse = &lse.t, .q = &t[Q], .k = &t[K],
                                             .v = &t[V], .causal = true};
    assert_int_equal(rocq_attention(ctx, &attention), ROCQ_OK);
    rocq_attention_backward_params p = {.dq = &apart[Q].t, .dk = &apart[K].t, .dv = &apart[V].t,
                                        .dout = &dout.t, .out = &out.t, .lse = &lse.t,
                                        .q = &own[Q].t, .k = &own[K].t, .v = &own[V].t,
                                        .causal = true};
    assert_int_equal(rocq_attention_backward(ctx, &p), ROCQ_OK);
    p.q = &t[Q];
    p.k = &t[K];
    p.v = &t[V];
    p.dk = &dt[K];
    p.dv = &dt[V];
    rocq_tensor wrong = dt[Q];
    wrong.offset += D * 4; // its last head is dk's first
    p.dq = &wrong;
    run_fails(ROCQ_OP_ATTENTION_BACKWARD, &p, ROCQ_E_ARGUMENT, &whole, 1);
    p.dq = &dt[Q];
    assert_int_equal(rocq_attention_backward(ctx, &p), ROCQ_OK);
    for (int i = 0; i < N_IN; i++) {
        const rocq_cast_params copy = {.y = &own[i].t, .x = &dt[i]};
        assert_int_equal(rocq_cast(ctx, &copy), ROCQ_OK);
        assert_memory_equal(own[i].memory, apart[i].memory, (size_t)own[i].size);
        boxes_free(&own[i], &apart[i]);
    }
    boxes_free(&fused, &grads, &out, &lse, &dout);
}

// The scratch memory is sums of dk and dv, a few times their size, and not a matrix of scores.
static void scratch_is_linear(void **state) {
    (void)state;
    int64_t scratch[2];
    for (int i = 0; i < 2; i++) {
        static float nothing[1]; // sizes are all that is looked at
        const int64_t n = 10000 << i, ne[4] = {64, 1, n, 1}, rows[4] = {1, n, 1, 1};
        const rocq_buffer memory = {.size = 64 * n * 4, .host = nothing};
        rocq_tensor t, dq, dk, dv, lse;
        assert_int_equal(rocq_tensor_init(&t, &memory, 0, ROCQ_F32, 4, ne), ROCQ_OK);
        assert_int_equal(rocq_tensor_init(&lse, &memory, 0, ROCQ_F32, 4, rows), ROCQ_OK);
        dq = dk = dv = t;
        const rocq_attention_backward_params p = {.dq = &dq, .dk = &dk, .dv = &dv, .dout = &t,
                                                  .out = &t, .q = &t, .k = &t, .v = &t,
                                                  .lse = &lse};
        scratch[i] = inside_scratch_attention_backward_cpu(contexts[1][0], &p);
    }
    assert_true(scratch[1] <= 2 * scratch[0] && scratch[0] < 10000 * 64 * 4 * 24);
}

static void not_a_number_reaches_the_gradients(void **state) {
    (void)state;
    for (int tier = 0; tier < n_tiers; tier++) {
        problem a;
        problem_make(&a, basic());
        a.dout.value[3] = NAN; // of head 0
        box_write(&a.dout);
        box *grads[N_IN] = {&a.grad[Q], &a.grad[K], &a.grad[V]};
        run(tier, ROCQ_OP_ATTENTION_BACKWARD, &a.p, grads, N_IN);
        for (int t = 0; t < N_IN; t++) {
            box_read(grads[t]);
            assert_true(isnan(grads[t]->value[3]));
        }
        problem_free(&a);
    }
}

static void refusals(void **state) {
    (void)state;
    problem a;
    problem_make(&a, basic());
    box *grads[N_IN] = {&a.grad[Q], &a.grad[K], &a.grad[V]};
    rocq_attention_backward_params p = a.p;
    p.window = 3;
    run_fails(ROCQ_OP_ATTENTION_BACKWARD, &p, ROCQ_E_ARGUMENT, grads, N_IN);
    assert_non_null(strstr(rocq_error(contexts[1][1]), "attention_backward: window 3"));
    p = a.p;
    p.softcap = -1;
    run_fails(ROCQ_OP_ATTENTION_BACKWARD, &p, ROCQ_E_ARGUMENT, grads, N_IN);
    p = a.p;
    p.dk = p.k; // read again after it is written
    run_fails(ROCQ_OP_ATTENTION_BACKWARD, &p, ROCQ_E_ARGUMENT, grads, N_IN);
    p.dk = &a.grad[Q].t;
    run_fails(ROCQ_OP_ATTENTION_BACKWARD, &p, ROCQ_E_SHAPE, grads, N_IN);
    p = a.p;
    p.lse = NULL;
    run_fails(ROCQ_OP_ATTENTION_BACKWARD, &p, ROCQ_E_ARGUMENT, grads, N_IN);
    rocq_tensor large = a.in[Q].t;
    large.ne[0] = 513;
    p = a.p;
    p.q = &large;
    run_fails(ROCQ_OP_ATTENTION_BACKWARD, &p, ROCQ_E_BOUNDS, grads, N_IN);
    problem_free(&a);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reference_agrees_with_finite_differences),
        cmocka_unit_test(head_sizes),
        cmocka_unit_test(counts_of_queries_and_keys),
        cmocka_unit_test(head_groups),
        cmocka_unit_test(each_option),
        cmocka_unit_test(everything_together),
        cmocka_unit_test(columns_of_one_tensor),
        cmocka_unit_test(scratch_is_linear),
        cmocka_unit_test(not_a_number_reaches_the_gradients),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests_name("attention_backward", tests, open_contexts, close_contexts);
}
