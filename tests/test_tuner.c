// The tuner: what it may choose, what it tries, when it believes a result, and the file that keeps
// what it found. Where a verdict is looked at, the stand-in's clock (tests/simt/hip.h) goes by a
// known landscape, so that it does not depend on the machine; the launches are real ones.
#define _XOPEN_SOURCE 700 // fork, setrlimit
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "simt/hip.h"

// -- a GPU context whose host memory is counted and can run out --

static struct {
    int64_t blocks, calls, fail_at; // fail_at: the call that gets nothing, 0 = none
} host;

static void *counted_alloc(size_t size, void *user) {
    (void)user;
    if (++host.calls == host.fail_at) return NULL;
    void *ptr = malloc(size);
    if (ptr) host.blocks++;
    return ptr;
}

static void counted_free(void *ptr, size_t size, void *user) {
    (void)size;
    (void)user;
    host.blocks--;
    free(ptr);
}

static rocq_ctx *ctx;

static rocq_result open_again(void) {
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_GPU, .n_threads = 1,
                            .allocator = {counted_alloc, counted_free, NULL}};
    rocq_close(&ctx);
    simt_fail_at(0, 0);
    return rocq_open(&ctx, &desc);
}

static int begin(void **state) {
    (void)state;
    memset(&host, 0, sizeof host);
    simt_set_optional(1);
    simt_set_clock(NULL);
    return open_again() == ROCQ_OK ? 0 : -1;
}

static int end(void **state) {
    (void)state;
    simt_fail_at(0, 0);
    rocq_close(&ctx);
    const int errors = simt_error_count();
    if (errors != 0) print_message("%s\n", simt_errors_text());
    simt_forget_errors();
    return host.blocks != 0 || simt_live_sum() != 0 || errors != 0 ? -1 : 0;
}

// -- operands --

static uint64_t random_state = 1;

static float random_float(void) { // splitmix64, -1 to 1
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (float)((double)((z ^ (z >> 31)) >> 11) * 0x1p-52 - 1.0);
}

// A tensor on the device, and what its elements are as floats.
typedef struct operand {
    rocq_tensor t;
    float *value;
    int64_t n;
} operand;

static operand make(rocq_format format, int64_t ne0, int64_t ne1, int64_t ne2) {
    const int64_t ne[4] = {ne0, ne1, ne2, 1};
    operand o = {.n = ne0 * ne1 * ne2};
    rocq_buffer buffer;
    int64_t size;
    assert_int_equal(rocq_row_size(format, o.n, &size), ROCQ_OK);
    assert_int_equal(rocq_buffer_alloc(ctx, &buffer, size), ROCQ_OK);
    assert_int_equal(rocq_tensor_init(&o.t, &buffer, 0, format, 4, ne), ROCQ_OK);
    o.value = (float *)malloc((size_t)o.n * sizeof(float));
    for (int64_t i = 0; i < o.n; i++) o.value[i] = NAN;
    return o;
}

static operand filled(rocq_format format, int64_t ne0, int64_t ne1, int64_t ne2) {
    operand o = make(format, ne0, ne1, ne2);
    void *blocks = malloc((size_t)rocq_tensor_size(&o.t));
    for (int64_t i = 0; i < o.n; i++) o.value[i] = random_float();
    assert_int_equal(rocq_quantize(format, blocks, o.value, o.n / ne0, ne0, NULL), ROCQ_OK);
    assert_int_equal(rocq_dequantize(format, o.value, blocks, o.n), ROCQ_OK);
    if (rocq_get_format_info(format)->block_elems > 1 && ne2 == 1) o.t.layout = ROCQ_LAYOUT_PLANAR;
    assert_int_equal(rocq_upload(ctx, &o.t, blocks, rocq_tensor_size(&o.t)), ROCQ_OK);
    free(blocks);
    return o;
}

static void drop(operand *o) {
    free(o->value);
    assert_int_equal(rocq_buffer_free(ctx, &o->t.buffer), ROCQ_OK);
}

// y = w x, with the kind of launch that its sizes make it.
typedef struct product {
    operand w, x, y;
    rocq_matmul_params p;
} product;

static void product_make(product *a, rocq_format format, int64_t m, int64_t k, int64_t n) {
    memset(a, 0, sizeof *a);
    a->w = filled(format, k, m, 1);
    a->x = filled(ROCQ_F32, k, n, 1);
    a->y = make(ROCQ_F32, m, n, 1);
    a->p = (rocq_matmul_params){.y = &a->y.t, .w = &a->w.t, .x = &a->x.t};
}

static void product_free(product *a) {
    drop(&a->w);
    drop(&a->x);
    drop(&a->y);
}

// The smallest that leaves all four values of k_waves to choose from.
static void waves_make(product *a) { product_make(a, ROCQ_F32, 20, 1024, 1); }

typedef struct attended {
    operand q, k, v, out;
    rocq_attention_params p;
} attended;

static void attended_make(attended *a, int64_t n_heads, int64_t n_kv_heads, int64_t n_q,
                          int64_t n_kv) {
    memset(a, 0, sizeof *a);
    a->q = filled(ROCQ_F32, 64, n_heads, n_q);
    a->k = filled(ROCQ_F16, 64, n_kv_heads, n_kv);
    a->v = filled(ROCQ_F16, 64, n_kv_heads, n_kv);
    a->out = make(ROCQ_F32, 64, n_heads, n_q);
    a->p = (rocq_attention_params){.out = &a->out.t, .q = &a->q.t, .k = &a->k.t, .v = &a->v.t,
                                   .causal = true};
}

static void attended_free(attended *a) {
    drop(&a->q);
    drop(&a->k);
    drop(&a->v);
    drop(&a->out);
}

static void poison(operand *o) {
    for (int64_t i = 0; i < o->n; i++) o->value[i] = NAN;
    assert_int_equal(rocq_upload(ctx, &o->t, o->value, 4 * o->n), ROCQ_OK);
}

static void fetch(operand *o) {
    assert_int_equal(rocq_download(ctx, o->value, &o->t, 4 * o->n), ROCQ_OK);
}

static double nmse(const float *got, const double *want, int64_t n) {
    double error = 0, power = 0;
    for (int64_t i = 0; i < n; i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        power += want[i] * want[i];
    }
    return error / power;
}

static rocq_launch_config config_of(rocq_op op, const void *params) {
    rocq_launch_config c;
    memset(&c, 0xff, sizeof c);
    assert_int_equal(rocq_get_launch_config(ctx, op, params, &c), ROCQ_OK);
    return c;
}

// -- landscapes: how long a launch takes by the stand-in's clock --

static struct {
    double (*ns)(const rocq_launch_config *c); // of one op; half a millisecond at least, so that
                                               // the tuner makes no row of several
    rocq_op op;
    const void *params; // of the op that is tuned
    double ms;          // now
    int32_t marks;
} landscape;

// Between two marks the op runs once, in the configuration that it has now.
static double landscape_clock(void) {
    rocq_launch_config now = {0};
    if (landscape.params) {
        assert_int_equal(rocq_get_launch_config(ctx, landscape.op, landscape.params, &now), 0);
    }
    landscape.marks++;
    return landscape.ms += 1e-6 * landscape.ns(&now);
}

static void go_by(double (*ns)(const rocq_launch_config *c)) {
    landscape.ns = ns;
    landscape.params = NULL;
    landscape.marks = 0;
    landscape.ms = 0;
    simt_set_clock(ns ? landscape_clock : NULL);
}

static double likes_one_wave(const rocq_launch_config *c) { return 1e6 * c->k_waves; }
static double all_alike(const rocq_launch_config *c) { (void)c; return 1e6; }

// One valley, at tile 64 and 6 splits.
static double valley(const rocq_launch_config *c) {
    const double s = log2((double)c->n_splits / 6.0);
    return 1e6 + 3e5 * s * s + (c->tile_n == 64 ? 0.0 : 5e5);
}

enum { PATIENT = 600000 }; // milliseconds: the machine may be busy

static rocq_tune_result tuned(rocq_op op, const void *params, const rocq_tune_desc *desc) {
    static const rocq_tune_desc all = {.max_ms = PATIENT};
    rocq_tune_result r;
    memset(&r, 0xff, sizeof r);
    landscape.op = op;
    landscape.params = params;
    if (rocq_tune(ctx, op, params, desc ? desc : &all, &r) != ROCQ_OK)
        fail_msg("%s", rocq_error(ctx));
    landscape.params = NULL;
    return r;
}

static bool near(double a, double b) { return fabs(a - b) <= 1e-5 * fabs(b); } // of float clocks

// -- what is tried --

static void the_grid_has_the_best(void **state) {
    (void)state;
    attended a;
    attended_make(&a, 4, 2, 4, 600);
    go_by(valley);
    const rocq_tune_result r = tuned(ROCQ_OP_ATTENTION, &a.p, NULL);
    assert_int_equal(r.config.tile_n, 64);
    assert_int_equal(r.config.n_splits, 6);
    assert_int_equal(r.config.k_waves, 0);
    assert_true(near(r.best_ns, 1e6));
    assert_true(r.speedup > 1.0 && fabs(r.speedup - r.default_ns / r.best_ns) < 1e-12);
    assert_true(r.n_space >= 12 && r.n_tried == r.n_space && !r.cached && r.spent_ms >= 0.0);
    assert_true(r.bytes_per_s > 0.0 && r.flops_per_s > 0.0);
    // it is what is launched from now on
    const rocq_launch_config now = config_of(ROCQ_OP_ATTENTION, &a.p);
    assert_memory_equal(&now, &r.config, sizeof now);
    attended_free(&a);
}

// Of a list, what the op can take is tried, and nothing else: here 4 waves, and the default.
static void a_list_of_ones_own(void **state) {
    (void)state;
    product a;
    waves_make(&a);
    const rocq_launch_config list[] = {{.k_waves = 3}, {.k_waves = 4}, {.k_waves = 16},
                                       {.tile_n = 32, .n_splits = 1}, {0}, {.k_waves = 8},
                                       {.k_waves = 4, .n_splits = 1}, {.k_waves = -1}};
    rocq_tune_desc desc = {.configs = list, .n_configs = sizeof list / sizeof list[0],
                           .max_ms = PATIENT};
    assert_int_equal(config_of(ROCQ_OP_MATMUL, &a.p).k_waves, 8);
    go_by(likes_one_wave);
    rocq_tune_result r = tuned(ROCQ_OP_MATMUL, &a.p, &desc);
    assert_int_equal(r.n_space, 2);
    assert_int_equal(r.n_tried, 2);
    assert_int_equal(r.config.k_waves, 4);
    assert_true(near(r.speedup, 2));
    rocq_tuning_clear(ctx);
    desc.n_configs = 1; // nothing that it can take
    r = tuned(ROCQ_OP_MATMUL, &a.p, &desc);
    assert_true(r.n_space == 1 && r.n_tried == 1 && r.config.k_waves == 0 && r.speedup == 1.0);
    rocq_tuning_clear(ctx);
    r = tuned(ROCQ_OP_MATMUL, &a.p, NULL);
    assert_true(r.n_space == 4 && r.n_tried == 4 && r.config.k_waves == 1);
    product_free(&a);
}

static double takes_two_ms(const rocq_launch_config *c) {
    const int64_t end_ns = rocq_time_ns() + 2000000;
    while (rocq_time_ns() < end_ns) {}
    return all_alike(c);
}

static void the_time_limit_is_kept(void **state) {
    (void)state;
    product a;
    waves_make(&a);
    go_by(takes_two_ms); // the default alone takes longer than that
    const rocq_tune_desc hurry = {.max_ms = 1};
    const rocq_tune_result r = tuned(ROCQ_OP_MATMUL, &a.p, &hurry);
    assert_true(r.n_tried == 1 && r.n_space == 4 && r.speedup == 1.0);
    product_free(&a);
}

// Three others than the default of 8 waves: what is far behind it is sampled once, not three times.
static int32_t far_waves;
static double far_behind(const rocq_launch_config *c) {
    return c->k_waves <= far_waves ? 1e7 : 1e6;
}
static void what_is_far_behind_is_left(void **state) {
    (void)state;
    product a;
    waves_make(&a);
    int32_t marks[4];
    for (far_waves = 0; far_waves < 4; far_waves++) {
        go_by(far_behind);
        const rocq_tune_result r = tuned(ROCQ_OP_MATMUL, &a.p, NULL);
        assert_true(r.n_tried == 4 && r.config.k_waves == 0);
        marks[far_waves] = landscape.marks;
        rocq_tuning_clear(ctx);
    }
    const int32_t pair = 4; // marks of a sample of the default and one of the other
    assert_int_equal(marks[0] - marks[1], 2 * pair);
    assert_int_equal(marks[0] - marks[2], 4 * pair);
    assert_int_equal(marks[3], marks[2]);
    product_free(&a);
}

// -- belief --

static double gain; // of 4 waves over all others
static double a_little_better(const rocq_launch_config *c) {
    return c->k_waves == 4 ? 1e6 / (1.0 + gain) : 1e6;
}

static void a_gain_must_be_large_enough(void **state) {
    (void)state;
    product a;
    waves_make(&a);
    const struct {
        double gain, min_gain;
        bool wins;
    } cases[] = {{0.02, 0.0, false}, {0.04, 0.0, true}, {0.04, 0.1, false}, {0.2, 0.1, true},
                 {0.001, 0.0005, true}, {-0.5, 0.0, false}};
    const int32_t rule = config_of(ROCQ_OP_MATMUL, &a.p).k_waves;
    assert_true(rule != 4);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        gain = cases[i].gain;
        go_by(a_little_better);
        const rocq_tune_desc desc = {.min_gain = cases[i].min_gain, .max_ms = PATIENT};
        const rocq_tune_result r = tuned(ROCQ_OP_MATMUL, &a.p, &desc);
        assert_int_equal(r.config.k_waves, cases[i].wins ? 4 : 0);
        assert_int_equal(config_of(ROCQ_OP_MATMUL, &a.p).k_waves, cases[i].wins ? 4 : rule);
        assert_true(r.speedup >= 1.0);
        if (!cases[i].wins) assert_true(r.speedup == 1.0 && r.best_ns == r.default_ns);
        rocq_tuning_clear(ctx);
    }
    product_free(&a);
}

static int32_t lucky_calls;
static double lucky_once(const rocq_launch_config *c) { // fast while it is tried, never again
    return c->k_waves == 4 && lucky_calls++ < 8 ? 1e4 : 1e6; // 4 runs of 2 marks
}

static void luck_is_not_believed(void **state) {
    (void)state;
    product a;
    waves_make(&a);
    go_by(lucky_once);
    lucky_calls = 0;
    const rocq_tune_result r = tuned(ROCQ_OP_MATMUL, &a.p, NULL);
    assert_int_equal(r.config.k_waves, 0);
    assert_true(lucky_calls > 8);
    assert_true(r.speedup == 1.0);
    product_free(&a);
}

static double drift_ns;
static double drifting(const rocq_launch_config *c) { // everything gets slower, all the time
    drift_ns *= 1.02;
    return c->k_waves == 2 ? 0.9 * drift_ns : drift_ns;
}

static void a_clock_that_drifts_is_met_in_turn(void **state) {
    (void)state;
    product a;
    waves_make(&a);
    drift_ns = 1e6;
    go_by(drifting);
    assert_int_equal(tuned(ROCQ_OP_MATMUL, &a.p, NULL).config.k_waves, 2);
    product_free(&a);
}

// Splits need scratch memory: where the budget has none for them they cannot run, however fast.
static double likes_many_splits(const rocq_launch_config *c) { return 1e8 / c->n_splits; }

static void what_cannot_run_is_left_alone(void **state) {
    (void)state;
    attended a;
    rocq_stats stats;
    rocq_tune_result r[2];
    attended_make(&a, 4, 2, 2, 600);
    go_by(likes_many_splits);
    for (int tight = 0; tight < 2; tight++) {
        rocq_tuning_clear(ctx);
        r[tight] = tuned(ROCQ_OP_ATTENTION, &a.p, NULL);
        assert_int_equal(r[tight].n_tried, r[tight].n_space);
        assert_int_equal(rocq_get_stats(ctx, &stats), ROCQ_OK);
        attended_free(&a);
        rocq_desc desc = {.prefer = ROCQ_BACKEND_GPU, .n_threads = 1,
                          .allocator = {counted_alloc, counted_free, NULL}};
        rocq_close(&ctx);
        assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
        attended_make(&a, 4, 2, 2, 600);
        assert_int_equal(rocq_attention(ctx, &a.p), ROCQ_OK);
        assert_int_equal(rocq_sync(ctx), ROCQ_OK);
        ctx->desc.memory_budget = ctx->budget_used; // from now on nothing more
    }
    assert_true(r[1].config.n_splits < r[0].config.n_splits);
    attended_free(&a);
}

// -- what was tuned is what runs --

static void a_second_call_knows(void **state) {
    (void)state;
    product a, same, other;
    waves_make(&a);
    waves_make(&same);
    product_make(&other, ROCQ_F32, 21, 1024, 1);
    go_by(likes_one_wave);
    const rocq_tune_result first = tuned(ROCQ_OP_MATMUL, &a.p, NULL);
    const int32_t marks = landscape.marks;
    assert_int_equal(first.config.k_waves, 1);
    assert_false(first.cached);
    const rocq_tune_result again = tuned(ROCQ_OP_MATMUL, &same.p, NULL);
    assert_int_equal(landscape.marks, marks);
    assert_true(again.cached && again.n_tried == 0 && again.config.k_waves == 1);
    assert_true(again.default_ns == first.default_ns && again.best_ns == first.best_ns);
    assert_int_equal(config_of(ROCQ_OP_MATMUL, &other.p).k_waves, 8); // another class
    rocq_tuning_clear(ctx);
    assert_int_equal(config_of(ROCQ_OP_MATMUL, &a.p).k_waves, 8);
    rocq_tuning_clear(ctx);
    rocq_tuning_clear(NULL);
    product_free(&a);
    product_free(&same);
    product_free(&other);
}

static rocq_launch_config wanted;
static double likes_wanted(const rocq_launch_config *c) {
    return memcmp(c, &wanted, sizeof wanted) == 0 ? 1e6 : 1e7;
}

// Makes the op use each configuration of its space in turn, calling check; returns how many.
static int32_t each_config(rocq_op op, const void *params, void (*check)(void *user), void *user) {
    rocq__survey survey;
    rocq_launch_config space[ROCQ__GRID];
    assert_int_equal(rocq__survey_op(ctx, rocq__ops[op], params, &survey), ROCQ_OK);
    assert_int_equal(survey.n, 1);
    const rocq__site own = rocq__site_class(&survey.site[0]);
    const int32_t n = rocq__grid_of(&own, space);
    for (int32_t i = 0; i < n; i++) {
        const rocq_tune_desc desc = {.configs = &wanted, .n_configs = 1, .max_ms = PATIENT};
        wanted = space[i];
        rocq_tuning_clear(ctx);
        go_by(likes_wanted);
        tuned(op, params, &desc);
        const rocq_launch_config now = config_of(op, params);
        assert_memory_equal(&now, &wanted, sizeof now);
        check(user);
    }
    rocq_tuning_clear(ctx);
    return n;
}

static void check_product(void *user) {
    product *a = (product *)user;
    const int64_t m = a->w.t.ne[1], k = a->w.t.ne[0], n = a->x.t.ne[1];
    double *want = (double *)calloc((size_t)(m * n), sizeof *want);
    for (int64_t c = 0; c < n; c++) {
        for (int64_t r = 0; r < m; r++) {
            for (int64_t i = 0; i < k; i++) {
                want[c * m + r] += (double)a->w.value[r * k + i] * (double)a->x.value[c * k + i];
            }
        }
    }
    poison(&a->y);
    assert_int_equal(rocq_matmul(ctx, &a->p), ROCQ_OK);
    fetch(&a->y);
    const double bound = n > ROCQ_K_FEW ? 1e-5 : a->w.t.format == ROCQ_F32 ? 1e-6 : 5e-4;
    const double error = nmse(a->y.value, want, m * n);
    if (!(error <= bound)) {
        fail_msg("nmse %g with k_waves %d, tile_n %d", error, wanted.k_waves, wanted.tile_n);
    }
    free(want);
}

static void check_attended(void *user) {
    attended *a = (attended *)user;
    const int64_t d = 64, h = a->q.t.ne[1], n_q = a->q.t.ne[2], group = h / a->k.t.ne[1],
                  n_kv = a->k.t.ne[2], kv_row = d * a->k.t.ne[1];
    double *want = (double *)calloc((size_t)a->out.n, sizeof *want);
    double *p = (double *)malloc((size_t)n_kv * sizeof *p);
    for (int64_t i = 0; i < n_q * h; i++) {
        const float *q = a->q.value + i * d;
        const int64_t at = i % h / group * d, seen = n_kv - n_q + i / h + 1;
        double sum = 0;
        for (int64_t j = 0; j < seen; j++) {
            double score = 0;
            for (int64_t e = 0; e < d; e++) {
                score += (double)q[e] * (double)a->k.value[j * kv_row + at + e];
            }
            sum += p[j] = exp(score / 8.0);
        }
        for (int64_t j = 0; j < seen; j++) {
            for (int64_t e = 0; e < d; e++) {
                want[i * d + e] += p[j] / sum * (double)a->v.value[j * kv_row + at + e];
            }
        }
    }
    poison(&a->out);
    assert_int_equal(rocq_attention(ctx, &a->p), ROCQ_OK);
    fetch(&a->out);
    const double error = nmse(a->out.value, want, a->out.n);
    if (!(error <= 1e-5)) {
        fail_msg("nmse %g with tile_n %d, n_splits %d", error, wanted.tile_n, wanted.n_splits);
    }
    free(p);
    free(want);
}

static void every_configuration_is_right(void **state) {
    (void)state;
    product a;
    attended b;
    waves_make(&a);
    assert_int_equal(each_config(ROCQ_OP_MATMUL, &a.p, check_product, &a), 4);
    product_free(&a);
    product_make(&a, ROCQ_Q4_0, 37, 8192, 2);
    assert_int_equal(each_config(ROCQ_OP_MATMUL, &a.p, check_product, &a), 4);
    product_free(&a);
    product_make(&a, ROCQ_Q4_K, 130, 256, 40);
    assert_int_equal(each_config(ROCQ_OP_MATMUL, &a.p, check_product, &a), 2);
    product_free(&a);
    attended_make(&b, 4, 2, 3, 300);
    assert_int_equal(each_config(ROCQ_OP_ATTENTION, &b.p, check_attended, &b), 2 * 4);
    attended_free(&b);
}

static int64_t ran(const char *name) {
    const int64_t n = simt_launches(name);
    assert_true(n >= 0);
    return n;
}

static void the_kernels_of_a_configuration_run(void **state) {
    (void)state;
    product a;
    attended b;
    product_make(&a, ROCQ_Q4_K, 64, 256, 33);
    attended_make(&b, 4, 2, 2, 130);
    go_by(likes_wanted);
    for (int wide = 0; wide < 2; wide++) {
        const char *tile = wide ? "matmul_f16_q4_K_128" : "matmul_f16_q4_K_32";
        const char *block = wide ? "attention_prefill_64" : "attention_decode_64";
        wanted = (rocq_launch_config){.tile_n = wide ? 128 : 32, .n_splits = 1};
        tuned(ROCQ_OP_MATMUL, &a.p, NULL);
        wanted = (rocq_launch_config){.tile_n = wide ? 64 : 16, .n_splits = 2};
        tuned(ROCQ_OP_ATTENTION, &b.p, NULL);
        const int64_t n_tile = ran(tile), n_block = ran(block);
        assert_int_equal(rocq_matmul(ctx, &a.p), ROCQ_OK);
        assert_int_equal(rocq_attention(ctx, &b.p), ROCQ_OK);
        assert_int_equal(rocq_sync(ctx), ROCQ_OK);
        assert_int_equal(ran(tile), n_tile + 1);
        assert_int_equal(ran(block), n_block + 1);
        rocq_tuning_clear(ctx);
    }
    product_free(&a);
    attended_free(&b);
}

static void scratch_is_what_a_tuned_op_takes(void **state) {
    (void)state;
    attended b;
    int64_t before = 0, after = 0;
    rocq_stats stats;
    attended_make(&b, 1, 1, 1, 1000);
    wanted = (rocq_launch_config){.tile_n = 64, .n_splits = 8};
    go_by(likes_wanted);
    assert_int_equal(rocq_plan_begin(ctx, &before), ROCQ_OK);
    assert_int_equal(rocq_attention(ctx, &b.p), ROCQ_OK);
    rocq_plan_end(ctx);
    tuned(ROCQ_OP_ATTENTION, &b.p, NULL);
    assert_int_equal(rocq_plan_begin(ctx, &after), ROCQ_OK);
    assert_int_equal(rocq_attention(ctx, &b.p), ROCQ_OK);
    rocq_plan_end(ctx);
    assert_true(after > before);
    assert_int_equal(rocq_attention(ctx, &b.p), ROCQ_OK);
    assert_int_equal(rocq_get_stats(ctx, &stats), ROCQ_OK);
    assert_int_equal(stats.scratch_bytes, after);
    attended_free(&b);
}

// A graph recorded before keeps its launches, and has the scratch memory it needs when it is
// captured again.
static void graphs_keep_their_launches(void **state) {
    (void)state;
    attended b;
    rocq_graph *graph;
    attended_make(&b, 4, 2, 2, 130);
    assert_int_equal(rocq_reserve(ctx, 1 << 22), ROCQ_OK); // trials need no more
    assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
    assert_int_equal(rocq_attention(ctx, &b.p), ROCQ_OK);
    assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);
    wanted = (rocq_launch_config){.tile_n = 64, .n_splits = 2};
    go_by(likes_wanted);
    tuned(ROCQ_OP_ATTENTION, &b.p, NULL);
    const int64_t before = ran("attention_prefill_64");
    assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK);
    assert_int_equal(rocq_sync(ctx), ROCQ_OK);
    assert_int_equal(ran("attention_prefill_64"), before);
    assert_int_equal(rocq_reserve(ctx, 1 << 23), ROCQ_OK); // moves scratch memory
    assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK);
    assert_int_equal(rocq_sync(ctx), ROCQ_OK);
    assert_int_equal(ran("attention_prefill_64"), before + 1);
    wanted = (rocq_launch_config){0};
    check_attended(&b);
    rocq_graph_destroy(ctx, &graph);
    attended_free(&b);
}

static void a_graph_is_tuned_whole(void **state) {
    (void)state;
    product a[3];
    attended b;
    rocq_graph *graph;
    for (int i = 0; i < 2; i++) waves_make(&a[i]);
    product_make(&a[2], ROCQ_Q8_0, 33, 256, 33);
    attended_make(&b, 4, 2, 2, 130);
    assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
    for (int i = 0; i < 3; i++) assert_int_equal(rocq_matmul(ctx, &a[i].p), ROCQ_OK);
    assert_int_equal(rocq_attention(ctx, &b.p), ROCQ_OK);
    assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);
    go_by(all_alike);
    rocq_tune_result r;
    assert_int_equal(rocq_tune_graph(ctx, graph, NULL, &r), ROCQ_OK);
    assert_int_equal(ctx->n_tuned, 3);
    assert_true(near(r.default_ns, 4e6) && near(r.best_ns, 4e6) && r.speedup == 1.0 && !r.cached);
    assert_int_equal(rocq_tune_graph(ctx, graph, NULL, &r), ROCQ_OK);
    assert_true(r.cached && r.n_tried == 0 && near(r.default_ns, 4e6));
    rocq_tuning_clear(ctx);
    go_by(NULL);
    const rocq_tune_desc desc = {.max_ms = 200}; // by the clock: whatever comes out is right
    assert_int_equal(rocq_tune_graph(ctx, graph, &desc, &r), ROCQ_OK);
    assert_true(r.n_tried >= 3 && r.speedup >= 1.0 && r.best_ns > 0.0);
    for (int i = 0; i < 3; i++) poison(&a[i].y);
    assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK);
    assert_int_equal(rocq_sync(ctx), ROCQ_OK);
    for (int i = 0; i < 3; i++) {
        fetch(&a[i].y);
        for (int64_t k = 0; k < a[i].y.n; k++) assert_true(isfinite(a[i].y.value[k]));
        check_product(&a[i]);
    }
    check_attended(&b);
    rocq_graph_destroy(ctx, &graph);
    for (int i = 0; i < 3; i++) product_free(&a[i]);
    attended_free(&b);
}

// A graph may have any number of classes: all are tuned, and counted.
static void a_graph_of_many_classes_is_tuned_whole(void **state) {
    (void)state;
    enum { CLASSES = 70, OPS = 2 * CLASSES }; // each class twice
    operand w = filled(ROCQ_F32, 1024, CLASSES, 1), x = filled(ROCQ_F32, 1024, 1, 1),
            y = make(ROCQ_F32, CLASSES, 1, 1);
    rocq_graph *graph;
    assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
    for (int i = 0; i < OPS; i++) { // the first rows of w: another m, another class
        rocq_tensor rows = w.t, out = y.t;
        rows.ne[1] = out.ne[0] = 1 + i % CLASSES;
        const rocq_matmul_params p = {.y = &out, .w = &rows, .x = &x.t};
        assert_int_equal(rocq_matmul(ctx, &p), ROCQ_OK);
    }
    assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);
    go_by(all_alike);
    const rocq_launch_config one = {.k_waves = 16}; // no op can take it
    const rocq_tune_desc desc = {.configs = &one, .n_configs = 1};
    rocq_tune_result r;
    for (int again = 0; again < 2; again++) {
        assert_int_equal(rocq_tune_graph(ctx, graph, &desc, &r), ROCQ_OK);
        assert_int_equal(ctx->n_tuned, CLASSES);
        assert_int_equal(r.n_tried, again ? 0 : CLASSES);
        assert_true(near(r.default_ns, 1e6 * OPS) && near(r.best_ns, 1e6 * OPS));
        // Bytes are those of all ops, and so is the time: each row of weights, and little else.
        const double bytes = 2.0 * 4096.0 * CLASSES * (CLASSES + 1) / 2;
        assert_true(r.bytes_per_s * r.best_ns * 1e-9 > bytes);
        assert_true(r.bytes_per_s * r.best_ns * 1e-9 < 1.1 * bytes);
    }
    // Without memory for a list of them it fails, and what was found is kept.
    rocq_tuning_clear(ctx);
    memset(&r, 0x5a, sizeof r);
    const rocq_tune_result untouched = r;
    int64_t n_failed = 0;
    for (int64_t at = 1; at < 60; at++) {
        const int64_t blocks = host.blocks - (ctx->tuned != NULL);
        host.calls = 0;
        host.fail_at = at;
        const rocq_result result = rocq_tune_graph(ctx, graph, &desc, &r);
        const bool failed = host.calls >= at;
        host.fail_at = 0;
        if (!failed) break;
        if (result != ROCQ_OK) {
            assert_int_equal(result, ROCQ_E_MEMORY);
            assert_memory_equal(&r, &untouched, sizeof r);
            assert_int_equal(host.blocks - (ctx->tuned != NULL), blocks);
            n_failed++;
        }
        memset(&r, 0x5a, sizeof r);
    }
    assert_true(n_failed > 5);
    assert_int_equal(rocq_tune_graph(ctx, graph, &desc, &r), ROCQ_OK);
    assert_int_equal(ctx->n_tuned, CLASSES);
    rocq_graph_destroy(ctx, &graph);
    drop(&w);
    drop(&x);
    drop(&y);
}

// Timed on the stand-in, with and without events and graphs: the verdict is not looked at.
static void timing_works_with_what_the_runtime_has(void **state) {
    (void)state;
    for (int optional = 0; optional < 2; optional++) {
        product a;
        simt_set_optional(optional);
        assert_int_equal(open_again(), ROCQ_OK);
        waves_make(&a);
        const rocq_tune_desc quick = {.max_ms = 300};
        const rocq_tune_result r = tuned(ROCQ_OP_MATMUL, &a.p, &quick);
        assert_true(r.default_ns > 0.0 && r.best_ns > 0.0 && r.speedup >= 1.0 && r.n_tried >= 1);
        check_product(&a);
        product_free(&a);
    }
}

// -- refusals --

static void arguments_are_checked(void **state) {
    (void)state;
    product a;
    waves_make(&a);
    rocq_launch_config c = {.k_waves = 1};
    rocq_tune_result r;
    const rocq_tune_desc bad[] = {{.n_configs = 1}, {.configs = &c}, {.n_configs = -1},
                                  {.configs = &c, .n_configs = -1}, {.max_ms = -1},
                                  {.min_gain = -0.1}, {.min_gain = (double)NAN},
                                  {.min_gain = (double)INFINITY}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(rocq_tune(ctx, ROCQ_OP_MATMUL, &a.p, &bad[i], &r), ROCQ_E_ARGUMENT);
    }
    rocq_matmul_params wrong = a.p;
    wrong.x = NULL;
    assert_int_equal(rocq_tune(NULL, ROCQ_OP_MATMUL, &a.p, NULL, &r), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_tune(ctx, ROCQ_OP_COUNT, &a.p, NULL, &r), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_tune(ctx, ROCQ_OP_MATMUL, NULL, NULL, &r), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_tune(ctx, ROCQ_OP_MATMUL, &wrong, NULL, &r), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_tune_graph(ctx, NULL, NULL, &r), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_tune_graph(NULL, NULL, NULL, &r), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_get_launch_config(ctx, ROCQ_OP_MATMUL, &a.p, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_get_launch_config(NULL, ROCQ_OP_MATMUL, &a.p, &c), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_tuning_save(ctx, NULL, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_tuning_load(ctx, NULL, 1), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_tuning_load(ctx, "", -1), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
    assert_int_equal(rocq_tune(ctx, ROCQ_OP_MATMUL, &a.p, NULL, &r), ROCQ_E_STATE);
    rocq_graph *graph;
    assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);
    rocq_graph_destroy(ctx, &graph);
    rocq_cancel(ctx);
    assert_int_equal(rocq_tune(ctx, ROCQ_OP_MATMUL, &a.p, NULL, &r), ROCQ_E_CANCELLED);
    assert_int_equal(rocq_sync(ctx), ROCQ_OK);
    assert_int_equal(ctx->n_tuned, 0);
    product_free(&a);
}

static void an_op_without_choices_has_nothing_to_tune(void **state) {
    (void)state;
    operand x = filled(ROCQ_F32, 64, 2, 1);
    const rocq_norm_params norm = {.y = &x.t, .x = &x.t};
    const rocq_tune_result r = tuned(ROCQ_OP_RMSNORM, &norm, NULL);
    const rocq_launch_config c = config_of(ROCQ_OP_RMSNORM, &norm), none = {0};
    assert_true(r.n_space == 0 && r.n_tried == 0 && r.speedup == 1.0 && r.cached);
    assert_memory_equal(&c, &none, sizeof c);
    drop(&x);
}

static bool to_nowhere(const void *src, int64_t size, void *user) {
    (void)src;
    (void)size;
    return ++*(int *)user < 2;
}

static void the_cpu_has_nothing_to_tune(void **state) {
    (void)state;
    rocq_ctx *cpu;
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1};
    assert_int_equal(rocq_open(&cpu, &desc), ROCQ_OK);
    float v[4] = {1, 2, 3, 4};
    rocq_tensor x;
    assert_int_equal(rocq_tensor_from_host(&x, v, ROCQ_F32, 1, (int64_t[]){4}), ROCQ_OK);
    const rocq_norm_params norm = {.y = &x, .x = &x};
    rocq_launch_config c, none = {0};
    int calls = 0;
    memset(&c, 0xff, sizeof c);
    assert_int_equal(rocq_tune(cpu, ROCQ_OP_RMSNORM, &norm, NULL, NULL), ROCQ_E_UNSUPPORTED);
    assert_int_equal(rocq_tuning_save(cpu, to_nowhere, &calls), ROCQ_E_UNSUPPORTED);
    assert_int_equal(rocq_tuning_load(cpu, "", 0), ROCQ_E_UNSUPPORTED);
    assert_int_equal(rocq_get_launch_config(cpu, ROCQ_OP_RMSNORM, &norm, &c), ROCQ_OK);
    assert_memory_equal(&c, &none, sizeof c);
    assert_int_equal(calls, 0);
    rocq_close(&cpu);
}

static void memory_may_run_out_at_any_point(void **state) {
    (void)state;
    product a;
    waves_make(&a);
    const rocq_launch_config two[] = {{.k_waves = 1}, {.k_waves = 2}};
    const rocq_tune_desc desc = {.configs = two, .n_configs = 2, .max_ms = 100};
    tuned(ROCQ_OP_MATMUL, &a.p, &desc); // takes what stays
    rocq_tuning_clear(ctx);
    bool failed = true;
    int n = 0;
    for (int64_t at = 1; failed && at < 500; at++) {
        const int64_t blocks = host.blocks;
        rocq_tune_result r, untouched;
        memset(&r, 0x5a, sizeof r);
        untouched = r;
        host.calls = 0;
        host.fail_at = at;
        const rocq_result result = rocq_tune(ctx, ROCQ_OP_MATMUL, &a.p, &desc, &r);
        failed = host.calls >= at;
        host.fail_at = 0;
        if (result != ROCQ_OK) {
            assert_int_equal(result, ROCQ_E_MEMORY);
            assert_memory_equal(&r, &untouched, sizeof r);
            assert_int_equal(ctx->n_tuned, 0);
            n++;
        }
        rocq_tuning_clear(ctx);
        assert_int_equal(host.blocks, blocks);
    }
    assert_false(failed);
    assert_true(n > 3);
    check_product(&a);
    product_free(&a);
}

static void a_lost_device_is_reported(void **state) {
    (void)state;
    for (int64_t at = 1; at < 60; at += at < 12 ? 1 : 7) {
        product a;
        waves_make(&a);
        const rocq_launch_config other = {.k_waves = 4};
        const rocq_tune_desc desc = {.configs = &other, .n_configs = 1};
        rocq_tune_result r;
        assert_int_equal(rocq_sync(ctx), ROCQ_OK);
        simt_fail_at(at, 999);
        assert_int_equal(rocq_tune(ctx, ROCQ_OP_MATMUL, &a.p, &desc, &r), ROCQ_E_LOST);
        assert_null(strstr(rocq_error(ctx), "lost earlier")); // the cause, not what followed
        assert_int_equal(rocq_tune(ctx, ROCQ_OP_MATMUL, &a.p, &desc, &r), ROCQ_E_LOST);
        assert_int_equal(ctx->n_tuned, 0);
        free(a.w.value);
        free(a.x.value);
        free(a.y.value);
        assert_int_equal(open_again(), ROCQ_OK);
    }
}

// -- the file --

typedef struct file {
    unsigned char data[8192];
    int64_t size;
} file;

static bool append(const void *src, int64_t size, void *user) {
    file *t = (file *)user;
    if (t->size + size > (int64_t)sizeof t->data) return false;
    memcpy(t->data + t->size, src, (size_t)size);
    t->size += size;
    return true;
}

static file saved(void) {
    file t = {.size = 0};
    assert_int_equal(rocq_tuning_save(ctx, append, &t), ROCQ_OK);
    return t;
}

// One result of each kind.
static file tune_three(void) {
    product a, b;
    attended c;
    waves_make(&a);
    product_make(&b, ROCQ_Q4_K, 64, 256, 33);
    attended_make(&c, 4, 2, 2, 130);
    go_by(all_alike);
    tuned(ROCQ_OP_ATTENTION, &c.p, NULL);
    go_by(likes_one_wave);
    tuned(ROCQ_OP_MATMUL, &a.p, NULL);
    go_by(likes_wanted);
    const rocq_launch_config rule = config_of(ROCQ_OP_MATMUL, &b.p);
    wanted = (rocq_launch_config){.tile_n = rule.tile_n == 32 ? 128 : 32, .n_splits = 1};
    tuned(ROCQ_OP_MATMUL, &b.p, NULL);
    product_free(&a);
    product_free(&b);
    attended_free(&c);
    return saved();
}

static void saved_and_loaded_it_is_the_same(void **state) {
    (void)state;
    const file t = tune_three();
    assert_int_equal(ctx->n_tuned, 3);
    const size_t bytes = 3 * sizeof(rocq__tuned);
    rocq__tuned before[3];
    memcpy(before, ctx->tuned, bytes);
    rocq_tuning_clear(ctx);
    assert_int_equal(rocq_tuning_load(ctx, t.data, t.size), ROCQ_OK);
    assert_int_equal(ctx->n_tuned, 3);
    assert_memory_equal(before, ctx->tuned, bytes);
    const file again = saved();
    assert_int_equal(again.size, t.size);
    assert_memory_equal(again.data, t.data, (size_t)t.size);
    assert_int_equal(rocq_tuning_load(ctx, t.data, t.size), ROCQ_OK); // on top of itself
    assert_int_equal(ctx->n_tuned, 3);
    product a;
    waves_make(&a);
    assert_int_equal(config_of(ROCQ_OP_MATMUL, &a.p).k_waves, 1);
    assert_true(tuned(ROCQ_OP_MATMUL, &a.p, NULL).cached);
    product_free(&a);
    // with others there already, both are kept
    go_by(all_alike);
    rocq_tuning_clear(ctx);
    product_make(&a, ROCQ_F32, 24, 1024, 1);
    tuned(ROCQ_OP_MATMUL, &a.p, NULL);
    product_free(&a);
    assert_int_equal(rocq_tuning_load(ctx, t.data, t.size), ROCQ_OK);
    assert_int_equal(ctx->n_tuned, 4);
    rocq_tuning_clear(ctx);
    const file empty = saved();
    assert_int_equal(rocq_tuning_load(ctx, empty.data, empty.size), ROCQ_OK);
    assert_int_equal(ctx->n_tuned, 0);
    for (int calls = 1; calls >= 0; calls--) { // no room for the header, then for the list
        int n = calls;
        assert_int_equal(rocq_tuning_load(ctx, t.data, t.size), ROCQ_OK);
        assert_int_equal(rocq_tuning_save(ctx, to_nowhere, &n), ROCQ_E_IO);
        assert_int_equal(n, 2);
    }
}

// Loads what must be refused; nothing may change.
static rocq_result refused(const void *data, int64_t size) {
    const rocq__tuned *tuned_before = ctx->tuned;
    const int32_t n = ctx->n_tuned;
    char *copy = (char *)malloc((size_t)size + 1); // exactly as large: reads past it are found
    memcpy(copy, data, (size_t)size);
    char *exact = (char *)realloc(copy, (size_t)(size > 0 ? size : 1));
    const rocq_result result = rocq_tuning_load(ctx, exact, size);
    free(exact);
    assert_true(result == ROCQ_E_CORRUPT || result == ROCQ_E_FOREIGN ||
                result == ROCQ_E_TRUNCATED || result == ROCQ_E_MAGIC);
    assert_null(strchr(rocq_error(ctx), '\n'));
    assert_true(strlen(rocq_error(ctx)) > 20);
    assert_ptr_equal(ctx->tuned, tuned_before);
    assert_int_equal(ctx->n_tuned, n);
    return result;
}

static void every_byte_counts(void **state) {
    (void)state;
    file t = tune_three();
    const int64_t head = (int64_t)sizeof(rocq__tuning_header);
    assert_int_equal(t.size, head + 3 * (int64_t)sizeof(rocq__tuned));
    for (int64_t i = 0; i < t.size; i++) {
        for (int bit = 0; bit < 8; bit++) {
            t.data[i] = (unsigned char)(t.data[i] ^ 1 << bit);
            const rocq_result result = refused(t.data, t.size);
            if (i < 8) assert_int_equal(result, ROCQ_E_MAGIC);
            else if (i < 12) assert_int_equal(result, ROCQ_E_FOREIGN); // the version
            else assert_true(result == ROCQ_E_CORRUPT || result == ROCQ_E_TRUNCATED);
            t.data[i] = (unsigned char)(t.data[i] ^ 1 << bit);
        }
        assert_int_equal(refused(t.data, i), ROCQ_E_TRUNCATED);
    }
    assert_int_equal(refused(t.data, t.size + 1), ROCQ_E_CORRUPT);
    assert_int_equal(rocq_tuning_load(ctx, t.data, t.size), ROCQ_OK);
}

// A file with a right checksum, whatever it says.
static file sealed(rocq__tuning_header h, const rocq__tuned *entries, int32_t n) {
    file t = {.size = 0};
    h.n_results = n;
    h.checksum = 0;
    h.checksum = rocq__tuning_checksum(&h, entries);
    append(&h, (int64_t)sizeof h, &t);
    append(entries, n * (int64_t)sizeof *entries, &t);
    return t;
}

static void what_nobody_would_save_is_refused(void **state) {
    (void)state;
    const rocq__tuning_header own = rocq__tuning_header_of(ctx, 0);
    rocq__tuned good[3], bad[26];
    memset(good, 0, sizeof good);
    good[0] = (rocq__tuned){.site = {.kind = ROCQ__KIND_MATVEC,
                                     .format = ROCQ_Q4_K,
                                     .int8 = 1,
                                     .m = 64,
                                     .k = 8192,
                                     .n = 1,
                                     .row_bytes = 4608},
                            .config = {.k_waves = 8},
                            .default_ns = 10,
                            .best_ns = 9};
    good[1] = (rocq__tuned){
        .site =
            {.kind = ROCQ__KIND_TILES, .format = ROCQ_Q4_K, .m = 64, .k = 256, .n = 64, .batch = 1},
        .config = {.tile_n = 32, .n_splits = 1},
        .default_ns = 10};
    good[2] = (rocq__tuned){.site = {.kind = ROCQ__KIND_ATTENTION,
                                     .format = ROCQ_F16,
                                     .format2 = ROCQ_F16,
                                     .m = 4,
                                     .k = 64,
                                     .n = 256,
                                     .batch = 2}}; // by rule
    file t = sealed(own, good, 3);
    assert_int_equal(rocq_tuning_load(ctx, t.data, t.size), ROCQ_OK);
    assert_int_equal(ctx->n_tuned, 3);
    int n = 0;
#define BAD(i, change) (bad[n] = good[i], bad[n] change, n++)
    BAD(0, .site.kind = -1);
    BAD(0, .site.kind = ROCQ__KINDS);
    BAD(0, .site.m = 0);
    BAD(0, .site.k = -1);
    BAD(0, .site.n = 0);
    BAD(0, .site.k = 2048); // too short for 8 waves
    BAD(0, .config.k_waves = 16);
    BAD(0, .config.k_waves = 3);
    BAD(0, .config.k_waves = -8);
    BAD(0, .config.n_splits = 1);
    BAD(0, .zero = 1);
    BAD(0, .default_ns = -1);
    BAD(0, .best_ns = INT64_MIN);
    BAD(1, .site.n = 33); // no class
    BAD(1, .site.n = 1025);
    BAD(1, .config.tile_n = 64);
    BAD(1, .config.n_splits = 2); // parts too short
    BAD(1, .config.n_splits = 0);
    BAD(1, .config.k_waves = 1);
    BAD(2, .site.n = 255);
    BAD(2, .site.n = INT32_MIN);
    BAD(2, .config.n_splits = 100000);
    BAD(2, .config.tile_n = 16);
    BAD(2, .config.n_splits = -1);
#undef BAD
    for (int i = 0; i < n; i++) {
        t = sealed(own, &bad[i], 1);
        if (refused(t.data, t.size) != ROCQ_E_CORRUPT) fail_msg("%d", i);
    }
    const rocq__tuned twice[] = {good[0], good[0]}, unsorted[] = {good[1], good[0]};
    t = sealed(own, twice, 2);
    assert_int_equal(refused(t.data, t.size), ROCQ_E_CORRUPT);
    t = sealed(own, unsorted, 2);
    assert_int_equal(refused(t.data, t.size), ROCQ_E_CORRUPT);
    const int32_t counts[] = {-1, 2, 4, 4097, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) { // sizes that do not fit
        t = sealed(own, good, 3);
        memcpy(t.data + offsetof(rocq__tuning_header, n_results), &counts[i], sizeof counts[i]);
        assert_int_equal(refused(t.data, t.size),
                         counts[i] == 4 ? ROCQ_E_TRUNCATED : ROCQ_E_CORRUPT);
    }
}

static void of_elsewhere_is_foreign(void **state) {
    (void)state;
    const rocq__tuning_header own = rocq__tuning_header_of(ctx, 0);
    rocq__tuning_header other[6];
    const rocq__tuned none = {.zero = 0};
    for (int i = 0; i < 6; i++) other[i] = own;
    other[0].rocq++;
    other[1].driver++;
    other[2].target ^= 1;
    other[3].n_units++;
    other[4].device[0] ^= 1;
    other[5].version++; // of the future
    for (int i = 0; i < 6; i++) {
        const file t = sealed(other[i], &none, 0);
        assert_int_equal(refused(t.data, t.size), ROCQ_E_FOREIGN);
    }
    static const char text[] = "rocq-tuning 1: rocq 100, gfx1100\n", future[] = "rocqtune\3\0\0\0?";
    assert_int_equal(refused(text, sizeof text - 1), ROCQ_E_MAGIC); // what 0.1 wrote
    assert_int_equal(refused("GGUF", 4), ROCQ_E_MAGIC);
    assert_int_equal(refused(future, 13), ROCQ_E_FOREIGN);
    assert_int_equal(refused("rocqtu", 6), ROCQ_E_TRUNCATED);
    assert_int_equal(refused("", 0), ROCQ_E_TRUNCATED);
}

// More results than a context keeps, here or there.
static void a_full_list_takes_no_more(void **state) {
    (void)state;
    const file three = tune_three();
    rocq__tuned entry;
    bool found;
    memset(&entry, 0, sizeof entry);
    entry.site.m = 1;
    while (ctx->n_tuned < 4096) {
        entry.site.row_bytes++;
        const int32_t place = rocq__tuned_place(ctx, &entry.site, &found);
        assert_int_equal(rocq__tuned_insert(ctx, place, &entry), ROCQ_OK);
    }
    assert_int_equal(rocq_tuning_load(ctx, three.data, three.size), ROCQ_OK); // has them already
    const rocq__site gone = ctx->tuned[4095].site; // one of the three
    rocq__tuned_remove(ctx, &gone);
    entry.site.row_bytes++;
    assert_int_equal(rocq__tuned_insert(ctx, rocq__tuned_place(ctx, &entry.site, &found), &entry),
                     ROCQ_OK);
    const rocq__tuned *before = ctx->tuned;
    assert_int_equal(rocq_tuning_load(ctx, three.data, three.size), ROCQ_E_STATE);
    assert_ptr_equal(ctx->tuned, before);
    assert_int_equal(ctx->n_tuned, 4096);
}

static void loading_may_run_out_of_memory(void **state) {
    (void)state;
    const file t = tune_three();
    for (int64_t at = 1;; at++) {
        const int64_t blocks = host.blocks;
        const rocq__tuned *before = ctx->tuned;
        host.calls = 0;
        host.fail_at = at;
        const rocq_result result = rocq_tuning_load(ctx, t.data, t.size);
        host.fail_at = 0;
        assert_int_equal(host.blocks, blocks);
        if (result == ROCQ_OK) break;
        assert_int_equal(result, ROCQ_E_MEMORY);
        assert_ptr_equal(ctx->tuned, before);
        assert_int_equal(ctx->n_tuned, 3);
    }
}

// -- the file on a disk: tests run in the repository's root --

#define ON_DISK ".build/test_tuner.tuning"

static rocq_result save_to_disk(void) {
    rocq_file *out;
    const rocq_result opened = rocq_file_open(ctx, &out, ON_DISK);
    if (opened != ROCQ_OK) return opened;
    const rocq_result result = rocq_tuning_save(ctx, rocq_file_write, out);
    const rocq_result closed = rocq_file_close(&out, result == ROCQ_OK);
    return result != ROCQ_OK ? result : closed;
}

static file on_disk(void) {
    file t = {.size = 0};
    FILE *in = fopen(ON_DISK, "rb");
    assert_non_null(in);
    t.size = (int64_t)fread(t.data, 1, sizeof t.data, in);
    fclose(in);
    return t;
}

static bool is_left(const char *path) { return access(path, F_OK) == 0; }

// Another process saves no results, over and over, while this one saves three: at every moment the
// file is all of what one of them wrote.
static void two_processes_write_one_file(void **state) {
    (void)state;
    enum { TIMES = 40 };
    const file three = tune_three();
    assert_int_equal(save_to_disk(), ROCQ_OK);
    const pid_t other = fork();
    assert_true(other >= 0);
    if (other == 0) {
        rocq_tuning_clear(ctx);
        for (int i = 0; i < TIMES; i++) {
            if (save_to_disk() != ROCQ_OK) _exit(1);
        }
        _exit(0);
    }
    int status = 0, n_empty = 0;
    pid_t ended = 0;
    for (int i = 0; i < TIMES || ended == 0; i++) {
        const file t = on_disk();
        if (t.size == three.size) assert_memory_equal(t.data, three.data, (size_t)t.size);
        else n_empty++;
        rocq_tuning_clear(ctx);
        assert_int_equal(rocq_tuning_load(ctx, t.data, t.size), ROCQ_OK);
        assert_int_equal(ctx->n_tuned, t.size == three.size ? 3 : 0);
        assert_int_equal(rocq_tuning_load(ctx, three.data, three.size), ROCQ_OK);
        if (i < TIMES) assert_int_equal(save_to_disk(), ROCQ_OK);
        if (ended == 0) ended = waitpid(other, &status, WNOHANG);
    }
    assert_int_equal(ended, other);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_true(n_empty > 0); // it came in between
    assert_false(is_left(ON_DISK ".part") || is_left(ON_DISK ".part1"));
    remove(ON_DISK);
}

// However little of it a disk takes, the old file stays, and no other is left.
static void a_full_disk_keeps_the_old_file(void **state) {
    (void)state;
    struct rlimit before, full;
    const file empty = saved();
    assert_int_equal(save_to_disk(), ROCQ_OK);
    const file three = tune_three();
    const rlim_t rooms[] = {0, 1, 8, 103, 104, 105, 200, (rlim_t)three.size - 1};
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN); // or the limit would end the process
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    for (size_t i = 0; i < sizeof rooms / sizeof rooms[0]; i++) {
        full = before;
        full.rlim_cur = rooms[i];
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &full), 0);
        const rocq_result result = save_to_disk();
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
        assert_int_equal(result, ROCQ_E_IO);
        assert_non_null(strstr(rocq_error(ctx), ON_DISK));
        const file t = on_disk();
        assert_int_equal(t.size, empty.size);
        assert_memory_equal(t.data, empty.data, (size_t)t.size);
        assert_false(is_left(ON_DISK ".part"));
    }
    signal(SIGXFSZ, handler);
    assert_int_equal(save_to_disk(), ROCQ_OK);
    const file t = on_disk();
    assert_int_equal(t.size, three.size);
    assert_memory_equal(t.data, three.data, (size_t)t.size);
    remove(ON_DISK);
}

// The list stays sorted and complete however it grows, and has a limit.
static void many_results_are_kept(void **state) {
    (void)state;
    rocq__tuned entry;
    bool found;
    memset(&entry, 0, sizeof entry);
    for (int32_t i = 0; i < 4096; i++) {
        entry.site.m = (int32_t)((uint32_t)i * 2654435761u >> 8) | 1;
        entry.site.n = i;
        const int32_t place = rocq__tuned_place(ctx, &entry.site, &found);
        assert_false(found);
        assert_int_equal(rocq__tuned_insert(ctx, place, &entry), ROCQ_OK);
    }
    for (int32_t i = 1; i < ctx->n_tuned; i++) {
        assert_true(memcmp(&ctx->tuned[i - 1].site, &ctx->tuned[i].site, sizeof entry.site) < 0);
        const int32_t place = rocq__tuned_place(ctx, &ctx->tuned[i].site, &found);
        assert_true(found && place == i);
    }
    product a;
    waves_make(&a);
    go_by(all_alike);
    rocq_tune_result r, untouched;
    memset(&r, 0x5a, sizeof r);
    untouched = r;
    assert_int_equal(rocq_tune(ctx, ROCQ_OP_MATMUL, &a.p, NULL, &r), ROCQ_E_STATE);
    assert_non_null(strstr(rocq_error(ctx), "4096")); // it is not memory that is missing
    assert_non_null(strstr(rocq_error(ctx), "full"));
    assert_memory_equal(&r, &untouched, sizeof r);
    assert_int_equal(ctx->n_tuned, 4096);
    product_free(&a);
    const rocq__site gone = ctx->tuned[1000].site;
    rocq__tuned_remove(ctx, &gone);
    rocq__tuned_place(ctx, &gone, &found);
    assert_false(found);
    assert_int_equal(ctx->n_tuned, 4095);
}

int main(void) {
    const struct CMUnitTest tests[] = {
#define TEST(f) cmocka_unit_test_setup_teardown(f, begin, end)
        TEST(the_grid_has_the_best),
        TEST(a_list_of_ones_own),
        TEST(the_time_limit_is_kept),
        TEST(what_is_far_behind_is_left),
        TEST(a_gain_must_be_large_enough),
        TEST(luck_is_not_believed),
        TEST(a_clock_that_drifts_is_met_in_turn),
        TEST(what_cannot_run_is_left_alone),
        TEST(a_second_call_knows),
        TEST(every_configuration_is_right),
        TEST(the_kernels_of_a_configuration_run),
        TEST(scratch_is_what_a_tuned_op_takes),
        TEST(graphs_keep_their_launches),
        TEST(a_graph_is_tuned_whole),
        TEST(a_graph_of_many_classes_is_tuned_whole),
        TEST(timing_works_with_what_the_runtime_has),
        TEST(arguments_are_checked),
        TEST(an_op_without_choices_has_nothing_to_tune),
        TEST(the_cpu_has_nothing_to_tune),
        TEST(memory_may_run_out_at_any_point),
        TEST(a_lost_device_is_reported),
        TEST(saved_and_loaded_it_is_the_same),
        TEST(every_byte_counts),
        TEST(what_nobody_would_save_is_refused),
        TEST(of_elsewhere_is_foreign),
        TEST(a_full_list_takes_no_more),
        TEST(loading_may_run_out_of_memory),
        TEST(two_processes_write_one_file),
        TEST(a_full_disk_keeps_the_old_file),
        TEST(many_results_are_kept),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
