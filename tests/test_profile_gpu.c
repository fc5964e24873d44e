// The profile in a GPU context: times by events, which are harvested without waiting, around graphs
// and copies, and when the device fails. On the stand-in, whose runtime fails on demand
// (tests/simt/hip.h) and whose events have the host's time of when its queue came by.
#include <time.h>

#define clock_gettime test_clock // see profile.h
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "simt/hip.h"
#include "simt/left.h"
#include "profile.h"

static const rocq_profile_desc every = {.cost = 1}; // call is measured

static int setup(void **state) {
    (void)state;
    simt_begin();
    n_live = 0;
    now_ns = -1;
    return 0;
}

static int teardown(void **state) {
    (void)state;
    return simt_check_left(n_live);
}

static rocq_ctx *open_gpu(bool no_graphs) {
    rocq_ctx *ctx = NULL;
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_GPU, .n_threads = 1, .no_graphs = no_graphs,
                            .allocator = {counted_alloc, counted_free, NULL}};
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    return ctx;
}

static rocq_tensor tensor(rocq_ctx *ctx, rocq_format format, int64_t ne0, int64_t ne1) {
    rocq_tensor t;
    rocq_buffer buffer;
    const int64_t ne[2] = {ne0, ne1};
    int64_t row;
    assert_int_equal(rocq_row_size(format, ne0, &row), ROCQ_OK);
    assert_int_equal(rocq_buffer_alloc(ctx, &buffer, row * ne1), ROCQ_OK);
    assert_int_equal(rocq_tensor_init(&t, &buffer, 0, format, 2, ne), ROCQ_OK);
    return t;
}

typedef struct work { // two small ops
    rocq_tensor x, y;
    rocq_scale_params scale;
    rocq_cast_params cast;
} work;

enum { N = 96, SCALE_BYTES = 8 * N, CAST_BYTES = 6 * N };

static void make_work(rocq_ctx *ctx, work *w) {
    static const float ones[N] = {1};
    w->x = tensor(ctx, ROCQ_F32, N, 1);
    w->y = tensor(ctx, ROCQ_F16, N, 1);
    assert_int_equal(rocq_upload(ctx, &w->x, ones, sizeof ones), ROCQ_OK);
    const rocq_scale_params scale = {.y = &w->x, .x = &w->x, .scale = 1};
    const rocq_cast_params cast = {.y = &w->y, .x = &w->x};
    w->scale = scale;
    w->cast = cast;
    assert_int_equal(rocq_sync(ctx), ROCQ_OK);
}

static rocq_result run_work(rocq_ctx *ctx, const work *w) {
    const rocq_result result = rocq_scale(ctx, &w->scale);
    return result == ROCQ_OK ? rocq_cast(ctx, &w->cast) : result;
}

static rocq_result record_work(rocq_ctx *ctx, const work *w, rocq_graph **graph) {
    rocq_result result = rocq_graph_begin(ctx);
    if (result == ROCQ_OK) {
        result = run_work(ctx, w);
        const rocq_result ended = rocq_graph_end(ctx, graph);
        if (result == ROCQ_OK) result = ended;
    }
    return result;
}

static void expect(rocq_ctx *ctx, const char *path, int64_t n, int64_t n_gpu, double bytes) {
    const rocq_region_stats s = stats_of(ctx, path);
    if (s.host_ns.count != n || s.gpu_ns.count != n_gpu || s.bytes != bytes) {
        fail_msg("%s: %d calls, %d on the GPU, %.0f bytes; not %d, %d, %.0f", path,
                 (int)s.host_ns.count, (int)s.gpu_ns.count, s.bytes, (int)n, (int)n_gpu, bytes);
    }
    if (n_gpu > 0) assert_true(s.gpu_ns.min >= 0 && s.gpu_ns.max < 60e9 && s.total_ns > 0);
}

static double field(const char *json, const char *name) {
    const char *at = strstr(json, name);
    if (!at) fail_msg("no %s", name);
    return strtod(at + strlen(name), NULL);
}

// -- stopwatches and launches --

static void stopwatches(void **state) {
    (void)state;
    for (int optional = 0; optional < 2; optional++) {
        simt_set_optional(optional);
        rocq_ctx *ctx = open_gpu(false);
        work w;
        rocq_timer t;
        double ns = NAN;
        make_work(ctx, &w);
        assert_int_equal(rocq_timer_init(ctx, &t, ROCQ_TIMER_GPU), ROCQ_OK);
        assert_int_equal(t.stop_event != NULL, optional);
        assert_int_equal(rocq_timer_stop(ctx, &t), ROCQ_E_STATE);
        for (int i = 0; i < 3; i++) {
            assert_int_equal(rocq_timer_start(ctx, &t), ROCQ_OK);
            assert_int_equal(run_work(ctx, &w), ROCQ_OK);
            assert_int_equal(rocq_timer_read(ctx, &t, &ns), ROCQ_E_STATE);
            assert_int_equal(rocq_timer_stop(ctx, &t), ROCQ_OK);
            assert_int_equal(rocq_timer_read(ctx, &t, &ns), ROCQ_OK);
            assert_true(ns > 0 && ns < 60e9);
        }
        rocq_timer_free(ctx, &t);
        rocq_timer_free(ctx, &t);
        rocq_close(&ctx);
    }
    // Any call may fail: an error, outputs as they were, nothing left.
    for (int64_t k = 1, done = 0; !done; k++) {
        rocq_ctx *ctx = open_gpu(false);
        rocq_timer t;
        memset(&t, 0, sizeof t);
        double ns = -5;
        simt_fail_at(k, 719);
        const int64_t first = simt_calls();
        rocq_result result = rocq_timer_init(ctx, &t, ROCQ_TIMER_GPU);
        if (result == ROCQ_OK) result = rocq_timer_start(ctx, &t);
        if (result == ROCQ_OK) result = rocq_timer_stop(ctx, &t);
        if (result == ROCQ_OK) result = rocq_timer_read(ctx, &t, &ns);
        done = simt_calls() - first < k;
        assert_int_equal(result, done ? ROCQ_OK : ROCQ_E_LOST);
        assert_int_equal(ns == -5, !done);
        rocq_timer_free(ctx, &t);
        rocq_close(&ctx);
        simt_fail_at(0, 0);
    }
}

static void launch_cost(void **state) {
    (void)state;
    rocq_ctx *ctx = open_gpu(false);
    rocq_launch_cost cost;
    memset(&cost, 0xff, sizeof cost);
    assert_int_equal(rocq_measure_launch(ctx, 4, &cost), ROCQ_OK);
    assert_true(cost.submit_ns.count == 4 && cost.submit_ns.min > 0);
    assert_true(cost.complete_ns.min >= cost.submit_ns.min && cost.row_ns.min > 0);
    const rocq_launch_cost before = cost;
    simt_fail_at(30, 719);
    assert_int_equal(rocq_measure_launch(ctx, 4, &cost), ROCQ_E_LOST);
    assert_memory_equal(&cost, &before, sizeof cost);
    rocq_close(&ctx);
}

// -- regions --

static void ops_are_timed(void **state) {
    (void)state;
    for (int at_once = 0; at_once < 2; at_once++) {
        for (int host_only = 0; host_only < 2; host_only++) {
            simt_set_work(at_once ? SIMT_AT_ONCE : SIMT_LATE);
            rocq_ctx *ctx = open_gpu(true);
            work w;
            float back[N];
            const rocq_profile_desc desc = {.host_only = host_only != 0, .cost = 1};
            const int64_t n = host_only ? 0 : 10;
            make_work(ctx, &w);
            assert_int_equal(rocq_profile_start(ctx, &desc), ROCQ_OK);
            const int64_t launches = simt_launches("map");
            for (int i = 0; i < 10; i++) {
                assert_int_equal(rocq_region_begin(ctx, "outer"), ROCQ_OK);
                assert_int_equal(rocq_region_begin(ctx, "inner"), ROCQ_OK);
                assert_int_equal(run_work(ctx, &w), ROCQ_OK);
                assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
                assert_int_equal(rocq_region_begin(ctx, "nothing"), ROCQ_OK);
                assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
                assert_int_equal(rocq_scale(ctx, &w.scale), ROCQ_OK);
                assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
            }
            // Asking never waits: nothing has run.
            if (!at_once) assert_int_equal(simt_launches("map"), launches);
            assert_int_equal(rocq_download(ctx, back, &w.x, sizeof back), ROCQ_OK);
            assert_int_equal(rocq_sync(ctx), ROCQ_OK);
            expect(ctx, "outer/inner/scale", 10, n, 10 * SCALE_BYTES);
            expect(ctx, "outer/inner/cast F16", 10, n, 10 * CAST_BYTES);
            expect(ctx, "outer/inner", 10, n, 10 * (SCALE_BYTES + CAST_BYTES));
            expect(ctx, "outer/nothing", 10, 0, 0);
            expect(ctx, "outer/scale", 10, n, 10 * SCALE_BYTES);
            expect(ctx, "outer", 10, n, 10 * (2 * SCALE_BYTES + CAST_BYTES));
            expect(ctx, "download", 1, 0, sizeof back);
            expect(ctx, "sync", 1, 0, 0);
            if (!host_only) { // a region lasts on the GPU from its first op to its last
                const rocq_region_stats inner = stats_of(ctx, "outer/inner");
                const double ops = stats_of(ctx, "outer/inner/scale").total_ns +
                                   stats_of(ctx, "outer/inner/cast F16").total_ns;
                assert_true(inner.total_ns >= 0.999 * ops);
                assert_true(stats_of(ctx, "outer").total_ns >= 0.999 * inner.total_ns);
            }
            const char *trace = report(ctx, ROCQ_REPORT_TRACE)->data;
            assert_int_equal(strstr(trace, "\"GPU\"") != NULL, !host_only);
            assert_int_equal(strstr(trace, "\"tid\": 2") != NULL, !host_only);
            assert_int_equal(strstr(report(ctx, ROCQ_REPORT_TEXT)->data, "host us") != NULL,
                             !host_only);
            rocq_close(&ctx);
        }
    }
}

// On the GPU's line of the trace, times lie where the host's do.
static void clocks_agree(void **state) {
    (void)state;
    rocq_ctx *ctx = open_gpu(true);
    work w;
    make_work(ctx, &w);
    assert_int_equal(rocq_profile_start(ctx, &every), ROCQ_OK);
    for (int i = 0; i < 20; i++) {
        assert_int_equal(rocq_region_begin(ctx, "step"), ROCQ_OK);
        assert_int_equal(run_work(ctx, &w), ROCQ_OK);
        assert_int_equal(rocq_sync(ctx), ROCQ_OK);
        assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
    }
    assert_int_equal(rocq_profile_count(ctx), 4);
    double from = 0, to = 0;
    int n_gpu = 0, n_host = 0;
    for (const char *at = report(ctx, ROCQ_REPORT_TRACE)->data; (at = strstr(at, "\"ph\": \"X\""));
         at++) {
        const double start = field(at, "\"ts\": "), stop = start + field(at, "\"dur\": ");
        char *end;
        const bool gpu = strtol(strstr(at, "\"tid\": ") + 7, &end, 10) == 2;
        if (!gpu && strstr(end, "\"step\"") == end + strlen(", \"name\": ")) {
            from = n_host++ == 0 ? start : from;
            to = stop;
        }
        n_gpu += gpu;
    }
    assert_true(n_host == 20 && n_gpu == 60);
    for (const char *at = report(ctx, ROCQ_REPORT_TRACE)->data;
         (at = strstr(at, "\"tid\": 2, \"name\": \"s")); at++) {
        const double start = field(at, "\"ts\": "), stop = start + field(at, "\"dur\": ");
        if (!(start >= from - 1000 && stop <= to + 1000)) {
            fail_msg("%.1f to %.1f us on the GPU, %.1f to %.1f on the host", start, stop, from, to);
        }
    }
    rocq_close(&ctx);
}

static void graphs_are_regions(void **state) {
    (void)state;
    for (int no_graphs = 0; no_graphs < 2; no_graphs++) {
        rocq_ctx *ctx = open_gpu(no_graphs != 0);
        work w;
        rocq_graph *graph = NULL;
        make_work(ctx, &w);
        assert_int_equal(rocq_profile_start(ctx, &every), ROCQ_OK);
        const int events = simt_get_live().events;
        assert_int_equal(rocq_region_begin(ctx, "recording"), ROCQ_OK);
        assert_int_equal(record_work(ctx, &w, &graph), ROCQ_OK); // nothing runs, no event in
                                                                 // between
        assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
        assert_int_equal(simt_get_live().events, events + 2); // the graph's own, for slices
        expect(ctx, "recording", 1, 0, 0);
        assert_int_equal(rocq_profile_count(ctx), 1);
        for (int i = 0; i < 5; i++) assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK);
        expect(ctx, "graph", 5, 5, 5 * (SCALE_BYTES + CAST_BYTES));
        if (no_graphs) {
            expect(ctx, "graph/scale", 5, 5, 5 * SCALE_BYTES);
            expect(ctx, "graph/cast F16", 5, 5, 5 * CAST_BYTES);
        }
        assert_int_equal(rocq_profile_count(ctx), no_graphs ? 4 : 2);
        // Captured again, in a launch, when scratch memory has moved.
        if (!no_graphs) {
            assert_int_equal(rocq_reserve(ctx, 1 << 20), ROCQ_OK);
            assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK);
            expect(ctx, "graph", 6, 6, 6 * (SCALE_BYTES + CAST_BYTES));
        }
        rocq_close(&ctx);
    }
}

// More calls on their way than there are events: the oldest are waited for, none is lost.
static void long_queues(void **state) {
    (void)state;
    rocq_ctx *ctx = open_gpu(true);
    work w;
    make_work(ctx, &w);
    const rocq_profile_desc desc = {.max_events = 100, .cost = 1};
    assert_int_equal(rocq_profile_start(ctx, &desc), ROCQ_OK);
    enum { CALLS = 1500 };
    const int64_t allocs = ctx->stats.n_allocs;
    for (int i = 0; i < CALLS; i++) {
        assert_int_equal(rocq_region_begin(ctx, "a"), ROCQ_OK);
        assert_int_equal(rocq_region_begin(ctx, "b"), ROCQ_OK);
        assert_int_equal(rocq_scale(ctx, &w.scale), ROCQ_OK);
        assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
        assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
    }
    assert_int_equal(ctx->stats.n_allocs, allocs);
    expect(ctx, "a", CALLS, CALLS, CALLS * (double)SCALE_BYTES);
    expect(ctx, "a/b", CALLS, CALLS, CALLS * (double)SCALE_BYTES);
    expect(ctx, "a/b/scale", CALLS, CALLS, CALLS * (double)SCALE_BYTES);
    const char *json = report(ctx, ROCQ_REPORT_JSON)->data;
    assert_true(field(json, "\"dropped\": ") == 0 && field(json, "\"dropped_gpu\": ") == 0);
    assert_true(field(json, "\"dropped_events\": ") == 6 * CALLS - 100);
    // With regions that have no room for their names, GPU times of the others still come.
    assert_int_equal(rocq_profile_clear(ctx), ROCQ_OK);
    const rocq_profile_desc few = {.max_regions = 1, .cost = 1};
    assert_int_equal(rocq_profile_start(ctx, &few), ROCQ_OK);
    assert_int_equal(rocq_region_begin(ctx, "a"), ROCQ_OK);
    for (int i = 0; i < 100; i++) assert_int_equal(rocq_region_begin(ctx, "deep"), ROCQ_OK);
    assert_int_equal(rocq_scale(ctx, &w.scale), ROCQ_OK); // deeper than there are frames
    for (int i = 0; i < 100; i++) assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
    assert_int_equal(rocq_scale(ctx, &w.scale), ROCQ_OK);
    assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
    expect(ctx, "a", 1, 1, SCALE_BYTES);
    rocq_close(&ctx);
}

// A region stays open while the log of what is inside it is folded many times over.
static void regions_outlast_the_log(void **state) {
    (void)state;
    rocq_ctx *ctx = open_gpu(true);
    work w;
    make_work(ctx, &w);
    assert_int_equal(rocq_profile_start(ctx, &every), ROCQ_OK);
    enum { CALLS = 4 * ROCQ__LOG };
    assert_int_equal(rocq_region_begin(ctx, "outer"), ROCQ_OK);
    assert_int_equal(rocq_region_begin(ctx, "inner"), ROCQ_OK);
    for (int i = 0; i < CALLS; i++) {
        assert_int_equal(rocq_scale(ctx, &w.scale), ROCQ_OK);
        if (i == CALLS / 2) expect(ctx, "outer/inner/scale", i + 1, i + 1, (i + 1.0) * SCALE_BYTES);
    }
    assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
    assert_int_equal(rocq_cast(ctx, &w.cast), ROCQ_OK);
    assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
    expect(ctx, "outer/inner/scale", CALLS, CALLS, CALLS * (double)SCALE_BYTES);
    expect(ctx, "outer/inner", 1, 1, CALLS * (double)SCALE_BYTES);
    expect(ctx, "outer", 1, 1, CALLS * (double)SCALE_BYTES + CAST_BYTES);
    const double ops = stats_of(ctx, "outer/inner/scale").total_ns;
    const rocq_region_stats inner = stats_of(ctx, "outer/inner"), outer = stats_of(ctx, "outer");
    assert_true(inner.gpu_ns.max >= 0.999 * ops && outer.gpu_ns.max >= inner.gpu_ns.max);
    assert_true(field(report(ctx, ROCQ_REPORT_JSON)->data, "\"dropped_gpu\": ") == 0);
    rocq_close(&ctx);
}

// A full log that cannot be folded for want of the GPU: an op says so, a region of the program goes
// on with host times, and what lost its time on the GPU is counted.
static void full_logs_that_fail(void **state) {
    (void)state;
    for (int lost = 0; lost < 2; lost++) {
        for (int op = 0; op < 2; op++) {
            rocq_ctx *ctx = open_gpu(true);
            work w;
            make_work(ctx, &w);
            assert_int_equal(rocq_profile_start(ctx, &every), ROCQ_OK);
            for (int i = 0; i < ROCQ__LOG; i++)
                assert_int_equal(rocq_scale(ctx, &w.scale), ROCQ_OK);
            const int64_t calls = simt_calls();
            void *last = ctx->profile->marks[ROCQ__BATCH - 1][1];
            assert_int_equal(ctx->gpu->hip->event_wait(last), 0); // only the profile's call fails
            const int64_t wait = op ? 3 : 2; // after set_device, of the op too
            assert_int_equal(simt_calls() - calls, 1);
            if (lost) simt_fail_at(wait, 719);
            else simt_fail_once(wait, ROCQ_HIP_OUT_OF_MEMORY);
            const rocq_result failed = lost ? ROCQ_E_LOST : ROCQ_E_MEMORY;
            if (op) {
                assert_int_equal(rocq_scale(ctx, &w.scale), failed);
            } else {
                assert_int_equal(rocq_region_begin(ctx, "a"), ROCQ_OK);
                assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
            }
            simt_fail_at(0, 0);
            assert_int_equal(ctx->gpu->lost, lost);
            assert_int_equal(rocq_scale(ctx, &w.scale), lost ? ROCQ_E_LOST : ROCQ_OK);
            assert_int_equal(stats_of(ctx, "scale").host_ns.count, ROCQ__LOG + !lost);
            assert_int_equal(stats_of(ctx, "scale").gpu_ns.count, 0);
            if (!op) assert_int_equal(stats_of(ctx, "a").host_ns.count, 1);
            assert_true(field(report(ctx, ROCQ_REPORT_JSON)->data, "\"dropped_gpu\": ") ==
                        ROCQ__LOG);
            rocq_close(&ctx);
        }
    }
}

// Short steps are timed now and then, as a whole, and where they are not nothing is asked of the
// runtime for it; long ones always.
static void short_steps_are_sampled(void **state) {
    (void)state;
    enum { STEPS = 3000, STEP_NS = 100000, MARKS_NS = 1000, OPS = 2 };
    rocq_ctx *ctx = open_gpu(true);
    work w;
    make_work(ctx, &w);
    simt_set_work(SIMT_AT_ONCE);
    int64_t calls = simt_calls();
    assert_int_equal(run_work(ctx, &w), ROCQ_OK);
    const int64_t unprofiled = simt_calls() - calls;
    now_ns = 1000000;
    const rocq_profile_desc desc = {.max_samples = STEPS, .cost = 0.01};
    assert_int_equal(rocq_profile_start(ctx, &desc), ROCQ_OK);
    assert_true(ctx->profile->marks_ns == 0); // measured, by a clock that stands still
    ctx->profile->marks_ns = MARKS_NS; // of every op: 2% of the time when all are timed
    const int64_t started = now_ns;
    int64_t passed = 0;
    for (int i = 0; i < STEPS; i++) {
        assert_int_equal(rocq_region_begin(ctx, "step"), ROCQ_OK);
        const bool passing = rocq__skipping(ctx->profiling);
        calls = simt_calls();
        assert_int_equal(run_work(ctx, &w), ROCQ_OK);
        calls = simt_calls() - calls - unprofiled;
        assert_true(passing ? calls == 0 : calls >= 2 * OPS);
        passed += passing;
        now_ns += STEP_NS;
        assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
    }
    const rocq_region_stats step = stats_of(ctx, "step"), scale = stats_of(ctx, "step/scale"),
                            cast = stats_of(ctx, "step/cast F16");
    const int64_t n = STEPS - passed;
    assert_true(step.calls == STEPS && step.host_ns.count == n && step.gpu_ns.count == n);
    assert_true(scale.host_ns.count == n && scale.gpu_ns.count == n && cast.gpu_ns.count == n);
    const double cost = (double)(OPS * MARKS_NS * n) / (double)(now_ns - started);
    if (!(cost > 0.008 && cost < 0.012)) fail_msg("%d steps, %.4f", (int)n, cost);
    assert_true(step.bytes == STEPS * (double)(SCALE_BYTES + CAST_BYTES));
    assert_true(fabs((double)(scale.calls - STEPS)) < 20);
    assert_true(scale.bytes == (double)scale.calls * SCALE_BYTES);
    const double mean = scale.total_ns / (double)scale.calls; // on the GPU, which has the real
                                                              // clock
    assert_true(mean >= scale.gpu_ns.min && mean <= scale.gpu_ns.max);
    for (int i = 0; i < 100; i++) { // now they last long enough
        if (i == 50) passed = stats_of(ctx, "step").host_ns.count;
        assert_int_equal(rocq_region_begin(ctx, "step"), ROCQ_OK);
        assert_int_equal(run_work(ctx, &w), ROCQ_OK);
        now_ns += 100 * STEP_NS;
        assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
    }
    assert_int_equal(stats_of(ctx, "step").host_ns.count, passed + 50);
    now_ns = -1;
    rocq_close(&ctx);
}

static void without_events(void **state) {
    (void)state;
    simt_set_optional(0);
    rocq_ctx *ctx = open_gpu(false);
    work w;
    make_work(ctx, &w);
    assert_int_equal(rocq_profile_start(ctx, &every), ROCQ_OK);
    assert_int_equal(run_work(ctx, &w), ROCQ_OK);
    expect(ctx, "scale", 1, 0, SCALE_BYTES);
    rocq_close(&ctx);
}

// What only the device knows is left out; what is known is not.
static void unknown_work(void **state) {
    (void)state;
    rocq_ctx *ctx = open_gpu(false);
    const int64_t shape[3] = {64, 2, 1}, cache[3] = {64, 2, 16};
    rocq_tensor q = tensor(ctx, ROCQ_F32, 64, 2), out = tensor(ctx, ROCQ_F32, 64, 2);
    rocq_tensor k = tensor(ctx, ROCQ_F16, 64, 32), v = tensor(ctx, ROCQ_F16, 64, 32);
    rocq_tensor kv_len = tensor(ctx, ROCQ_I32, 1, 1);
    static const uint16_t zeros[64 * 32];
    static const float ones[128] = {1};
    const int32_t length = 5;
    assert_int_equal(rocq_tensor_reshape(&q, &q, 3, shape), ROCQ_OK);
    assert_int_equal(rocq_tensor_reshape(&out, &out, 3, shape), ROCQ_OK);
    assert_int_equal(rocq_tensor_reshape(&k, &k, 3, cache), ROCQ_OK);
    assert_int_equal(rocq_tensor_reshape(&v, &v, 3, cache), ROCQ_OK);
    assert_int_equal(rocq_upload(ctx, &q, ones, sizeof ones), ROCQ_OK);
    assert_int_equal(rocq_upload(ctx, &k, zeros, sizeof zeros), ROCQ_OK);
    assert_int_equal(rocq_upload(ctx, &v, zeros, sizeof zeros), ROCQ_OK);
    assert_int_equal(rocq_upload(ctx, &kv_len, &length, 4), ROCQ_OK);
    const rocq_profile_desc desc = {.bytes_per_s = 1e9, .matrix_per_s = 1e9, .cost = 1};
    assert_int_equal(rocq_profile_start(ctx, &desc), ROCQ_OK);
    rocq_attention_params p = {.out = &out, .q = &q, .k = &k, .v = &v, .kv_len = &kv_len};
    assert_int_equal(rocq_region_begin(ctx, "unknown"), ROCQ_OK);
    assert_int_equal(rocq_attention(ctx, &p), ROCQ_OK);
    assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
    p.kv_len = NULL;
    assert_int_equal(rocq_attention(ctx, &p), ROCQ_OK);
    expect(ctx, "unknown/attention F16", 1, 1, 0);
    expect(ctx, "unknown", 1, 1, 0);
    assert_string_equal(stats_of(ctx, "unknown/attention F16").verdict, "");
    const double known = 2 * 4 * 64 * 2 + 2 * 2 * 64 * 2 * 16;
    expect(ctx, "attention F16", 1, 1, known);
    assert_true(stats_of(ctx, "attention F16").flops == 4.0 * 64 * 2 * 16);
    rocq_close(&ctx);
}

// Start takes events: each call of the runtime may fail, and each may be the one that loses the
// device.
static void starts_that_fail(void **state) {
    (void)state;
    for (int once = 0; once < 2; once++) {
        for (int64_t k = 1, done = 0; !done; k += k < 4 ? 1 : 173) {
            rocq_ctx *ctx = open_gpu(false);
            const int live = simt_live_sum();
            const int64_t first = simt_calls();
            if (once) simt_fail_once(k, ROCQ_HIP_OUT_OF_MEMORY);
            else simt_fail_at(k, 719);
            const rocq_result result = rocq_profile_start(ctx, &every);
            done = simt_calls() - first < k;
            assert_int_equal(result, done ? ROCQ_OK : once ? ROCQ_E_MEMORY : ROCQ_E_LOST);
            simt_fail_at(0, 0);
            if (!done) {
                assert_int_equal(simt_live_sum(), live);
                assert_null(ctx->profile);
                if (once) assert_int_equal(rocq_profile_start(ctx, &every), ROCQ_OK);
            }
            rocq_close(&ctx);
        }
    }
}

// The device is lost at each call in turn: the call says so, results up to then stay, nothing is
// left.
static void lost_devices(void **state) {
    (void)state;
    for (int late = 0; late < 2; late++) {
        for (int64_t k = 1, done = 0; !done; k++) {
            simt_set_work(late ? SIMT_LATE : SIMT_AT_ONCE);
            rocq_ctx *ctx = open_gpu(false);
            work w;
            rocq_graph *graph = NULL;
            make_work(ctx, &w);
            assert_int_equal(record_work(ctx, &w, &graph), ROCQ_OK);
            assert_int_equal(rocq_profile_start(ctx, &every), ROCQ_OK);
            assert_int_equal(run_work(ctx, &w), ROCQ_OK);
            assert_int_equal(rocq_profile_count(ctx), 2);
            const int64_t first = simt_calls();
            simt_fail_at(k, 719);
            assert_int_equal(rocq_region_begin(ctx, "around"), ROCQ_OK);
            rocq_result result = run_work(ctx, &w);
            if (result == ROCQ_OK) result = rocq_graph_launch(ctx, graph);
            if (result == ROCQ_OK) result = run_work(ctx, &w);
            assert_int_equal(rocq_region_end(ctx), ROCQ_OK); // the host's time is there
            if (result == ROCQ_OK) result = rocq_sync(ctx);
            const int32_t n = rocq_profile_count(ctx); // may be the one that finds it lost
            done = simt_calls() - first < k;
            assert_true(n >= 3);
            rocq_region_stats s;
            assert_int_equal(rocq_profile_region(ctx, 0, &s), ROCQ_OK);
            assert_true(s.host_ns.count >= 1 && s.gpu_ns.count >= 1);
            report(ctx, ROCQ_REPORT_TRACE);
            report(ctx, ROCQ_REPORT_JSON);
            if (!done) {
                assert_int_equal(ctx->gpu->lost, true);
                assert_int_equal(run_work(ctx, &w), ROCQ_E_LOST);
            } else {
                assert_int_equal(result, ROCQ_OK);
            }
            if (k % 2) assert_int_equal(rocq_profile_stop(ctx), ROCQ_OK);
            simt_fail_at(0, 0);
            rocq_close(&ctx);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(stopwatches, setup, teardown),
        cmocka_unit_test_setup_teardown(launch_cost, setup, teardown),
        cmocka_unit_test_setup_teardown(ops_are_timed, setup, teardown),
        cmocka_unit_test_setup_teardown(clocks_agree, setup, teardown),
        cmocka_unit_test_setup_teardown(graphs_are_regions, setup, teardown),
        cmocka_unit_test_setup_teardown(long_queues, setup, teardown),
        cmocka_unit_test_setup_teardown(regions_outlast_the_log, setup, teardown),
        cmocka_unit_test_setup_teardown(full_logs_that_fail, setup, teardown),
        cmocka_unit_test_setup_teardown(short_steps_are_sampled, setup, teardown),
        cmocka_unit_test_setup_teardown(without_events, setup, teardown),
        cmocka_unit_test_setup_teardown(unknown_work, setup, teardown),
        cmocka_unit_test_setup_teardown(starts_that_fail, setup, teardown),
        cmocka_unit_test_setup_teardown(lost_devices, setup, teardown),
    };
    return cmocka_run_group_tests_name("profile_gpu", tests, NULL, NULL);
}
