// Timers, the profile and its reports on the CPU, under a clock that stands still until a test
// moves it: every time is known. tests/test_profile_gpu.c has what a GPU context adds.
#include <time.h>

#define clock_gettime test_clock // see profile.h
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include <cjson/cJSON.h>
#include <dlfcn.h>

#include "ops.h"
#include "profile.h"

static rocq_ctx *open_cpu(void) {
    rocq_ctx *ctx = NULL;
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1,
                            .allocator = {counted_alloc, counted_free, NULL}};
    n_live = 0;
    fail_at = -1;
    now_ns = 1000000;
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    return ctx;
}

static void close_cpu(rocq_ctx *ctx) {
    rocq_close(&ctx);
    assert_int_equal(n_live, 0);
}

static void begin(rocq_ctx *ctx, const char *name) {
    assert_int_equal(rocq_region_begin(ctx, name), ROCQ_OK);
}
static void end(rocq_ctx *ctx, int64_t after_ns) {
    now_ns += after_ns;
    assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
}
static void once(rocq_ctx *ctx, const char *name, int64_t ns) {
    begin(ctx, name);
    end(ctx, ns);
}

// -- reports --

static cJSON *report_json(rocq_ctx *ctx, rocq_report kind) {
    const text *t = report(ctx, kind);
    const char *parsed_to = NULL;
    cJSON *json = cJSON_ParseWithOpts(t->data, &parsed_to, true);
    if (!json) fail_msg("no JSON at: %.80s", cJSON_GetErrorPtr());
    return json;
}

static double number(const cJSON *of, const char *field) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(of, field);
    if (!cJSON_IsNumber(item)) fail_msg("%s is not a number", field);
    return item->valuedouble;
}
static const char *string(const cJSON *of, const char *field) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(of, field);
    if (!cJSON_IsString(item)) fail_msg("%s is not a string", field);
    return item->valuestring;
}
static void close_to(double got, double want, double error) {
    if (!(fabs(got - want) <= error)) fail_msg("%.9g, not %.9g", got, want);
}

// -- statistics and stopwatches --

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

// The least sample that at least percent % of all do not exceed.
static double nearest_rank(const double *sorted, int64_t n, int64_t percent) {
    for (int64_t i = 0; i < n; i++) {
        if (100 * (i + 1) >= percent * n) return sorted[i];
    }
    return NAN;
}

static void summaries(void **state) {
    (void)state;
    static const int64_t counts[] = {1, 2, 3, 4, 5, 19, 20, 21, 99, 100, 101, 200, 999, 1000};
    static double v[1000], want[1000];
    rocq_summary s;
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        for (int kind = 0; kind < 4; kind++) {
            const int64_t n = counts[c];
            double sum = 0, squares = 0;
            for (int64_t i = 0; i < n; i++) {
                v[i] = kind == 0   ? 1e5 * (double)random_in(-1, 1)
                       : kind == 1 ? 42.5
                       : kind == 2 ? (double)(int)(8 * random_in(0, 1)) // many are equal
                                   : (double)(n - i);
                want[i] = v[i];
                sum += v[i];
            }
            qsort(want, (size_t)n, sizeof want[0], compare);
            for (int64_t i = 0; i < n; i++) squares += pow(want[i] - sum / (double)n, 2);
            memset(&s, 0xff, sizeof s);
            rocq_summarize(&s, v, n);
            assert_memory_equal(v, want, (size_t)n * sizeof v[0]);
            assert_int_equal(s.count, n);
            assert_true(s.min == want[0] && s.max == want[n - 1]);
            assert_true(s.median == (n % 2 ? want[n / 2] : (want[n / 2 - 1] + want[n / 2]) / 2));
            assert_true(s.p95 == nearest_rank(want, n, 95));
            assert_true(s.p99 == nearest_rank(want, n, 99));
            close_to(s.mean, sum / (double)n, 1e-9 * fabs(s.max) + 1e-12);
            close_to(s.deviation, n > 1 ? sqrt(squares / (double)(n - 1)) : 0, 1e-9 * fabs(s.max));
            if (kind == 1) assert_true(s.deviation == 0);
        }
    }
    const rocq_summary nothing = {0};
    for (int64_t n = -1; n <= 0; n++) {
        memset(&s, 0xff, sizeof s);
        rocq_summarize(&s, v, n);
        assert_memory_equal(&s, &nothing, sizeof s);
    }
    rocq_summarize(&s, NULL, 3);
    assert_memory_equal(&s, &nothing, sizeof s);
    rocq_summarize(NULL, v, 3);
}

static void stopwatches(void **state) {
    (void)state;
    rocq_ctx *ctx = open_cpu();
    for (int kind = 0; kind < 2; kind++) {
        rocq_timer t;
        double ns = NAN;
        assert_int_equal(rocq_timer_init(ctx, &t, (rocq_timer_kind)kind), ROCQ_OK);
        assert_int_equal(rocq_timer_stop(ctx, &t), ROCQ_E_STATE);
        assert_int_equal(rocq_timer_read(ctx, &t, &ns), ROCQ_E_STATE);
        for (int64_t i = 1; i < 4; i++) {
            assert_int_equal(rocq_timer_start(ctx, &t), ROCQ_OK);
            assert_int_equal(rocq_timer_read(ctx, &t, &ns), ROCQ_E_STATE);
            now_ns += 123 * i;
            assert_int_equal(rocq_timer_stop(ctx, &t), ROCQ_OK);
            now_ns += 1000;
            assert_int_equal(rocq_timer_read(ctx, &t, &ns), ROCQ_OK);
            assert_true(ns == 123.0 * (double)i);
        }
        assert_int_equal(rocq_timer_read(ctx, &t, NULL), ROCQ_E_ARGUMENT);
        rocq_timer_free(ctx, &t);
        rocq_timer_free(ctx, &t);
        assert_int_equal(rocq_timer_stop(ctx, &t), ROCQ_E_STATE);
    }
    rocq_timer t;
    double ns;
    memset(&t, 0x5a, sizeof t);
    const rocq_timer before = t;
    assert_int_equal(rocq_timer_init(ctx, &t, (rocq_timer_kind)2), ROCQ_E_ARGUMENT);
    assert_memory_equal(&t, &before, sizeof t);
    assert_int_equal(rocq_timer_init(ctx, NULL, ROCQ_TIMER_HOST), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_timer_init(NULL, &t, ROCQ_TIMER_HOST), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_timer_start(ctx, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_timer_start(NULL, &t), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_timer_stop(ctx, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_timer_stop(NULL, &t), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_timer_read(ctx, NULL, &ns), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_timer_read(NULL, &t, &ns), ROCQ_E_ARGUMENT);
    rocq_timer_free(ctx, NULL);
    close_cpu(ctx);
}

static void launch_cost(void **state) {
    (void)state;
    for (int32_t threads = 1; threads < 4; threads++) {
        rocq_ctx *ctx = NULL;
        rocq_launch_cost cost, before;
        const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = threads,
                                .allocator = {counted_alloc, counted_free, NULL}};
        n_live = 0;
        assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
        memset(&cost, 0xff, sizeof cost);
        assert_int_equal(rocq_measure_launch(ctx, 5, &cost), ROCQ_OK);
        assert_true(cost.submit_ns.count == 5 && cost.complete_ns.count == 5);
        assert_true(cost.row_ns.count == 5 && cost.row_ns.max == 0); // the clock stands still
        before = cost;
        assert_int_equal(rocq_measure_launch(ctx, 0, &cost), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_measure_launch(ctx, 5, NULL), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_measure_launch(NULL, 5, &cost), ROCQ_E_ARGUMENT);
        fail_at = n_calls;
        assert_int_equal(rocq_measure_launch(ctx, 5, &cost), ROCQ_E_MEMORY);
        fail_at = -1;
        assert_memory_equal(&cost, &before, sizeof cost);
        close_cpu(ctx);
    }
}

// -- regions --

static void regions_nest(void **state) {
    (void)state;
    rocq_ctx *ctx = open_cpu();
    assert_int_equal(rocq_profile_start(ctx, NULL), ROCQ_OK);
    char same[] = "inner"; // equal to a literal elsewhere
    for (int64_t i = 0; i < 3; i++) {
        begin(ctx, "outer");
        once(ctx, "inner", 100 + i);
        once(ctx, same, 200);
        now_ns += 50;
        begin(ctx, "outer"); // its own name, inside
        once(ctx, "inner", 7);
        end(ctx, 3);
        end(ctx, 40);
    }
    once(ctx, "inner", 1);
    static const struct { const char *path; int32_t depth; int64_t count; double total; } want[] = {
        {"outer", 0, 3, 3 * 400 + 3}, {"outer/inner", 1, 6, 3 * 300 + 3},
        {"outer/outer", 1, 3, 30}, {"outer/outer/inner", 2, 3, 21}, {"inner", 0, 1, 1}};
    assert_int_equal(rocq_profile_count(ctx), 5);
    for (int32_t i = 0; i < 5; i++) {
        rocq_region_stats s;
        assert_int_equal(rocq_profile_region(ctx, i, &s), ROCQ_OK);
        assert_string_equal(s.path, want[i].path);
        assert_string_equal(s.name, strrchr(s.path, '/') ? strrchr(s.path, '/') + 1 : s.path);
        assert_int_equal(s.depth, want[i].depth);
        assert_int_equal(s.host_ns.count, want[i].count);
        assert_int_equal(s.gpu_ns.count, 0);
        assert_true(s.total_ns == want[i].total);
        assert_true(s.bytes == 0 && s.flops == 0 && s.share == 0 && !s.memory_bound);
        assert_string_equal(s.verdict, "");
    }
    const rocq_region_stats s = stats_of(ctx, "outer/inner");
    assert_true(s.host_ns.min == 100 && s.host_ns.max == 200 && s.host_ns.median == 151);
    assert_true(s.host_ns.p95 == 200 && s.host_ns.mean == 903.0 / 6);
    close_cpu(ctx);
}

// Up to 127 bytes a path is whole; of a longer one its end is left, from the beginning of a
// character on.
static void long_paths_keep_their_end(void **state) {
    (void)state;
    rocq_ctx *ctx = open_cpu();
    char names[2][200], whole[402];
    memset(names[0], 'a', sizeof names[0]);
    for (size_t length = 120; length < 140; length++) {
        for (int wide = 0; wide < 2; wide++) { // wide: characters of two bytes
            rocq_region_stats s;
            size_t at = 0;
            for (; at + 2 <= length - 4; at += 2)
                memcpy(names[1] + at, wide ? "\xc3\xa9" : "bc", 2);
            names[1][at] = '\0';
            names[0][length - 1 - at] = '\0'; // both and the '/' are length bytes
            snprintf(whole, sizeof whole, "%s/%s", names[0], names[1]);
            assert_int_equal(strlen(whole), length);
            assert_int_equal(rocq_profile_start(ctx, NULL), ROCQ_OK);
            begin(ctx, names[0]);
            once(ctx, names[1], 1);
            end(ctx, 0);
            assert_int_equal(rocq_profile_region(ctx, 1, &s), ROCQ_OK);
            if (length <= 127) {
                assert_string_equal(s.path, whole);
            } else {
                const char *end_of_it = whole + length - 124;
                while (((unsigned char)*end_of_it & 0xc0) == 0x80) end_of_it++;
                assert_memory_equal(s.path, "...", 3);
                assert_string_equal(s.path + 3, end_of_it);
            }
            assert_int_equal(rocq_profile_clear(ctx), ROCQ_OK);
            names[0][length - 1 - at] = 'a';
        }
    }
    close_cpu(ctx);
}

static void wrong_calls(void **state) {
    (void)state;
    rocq_ctx *ctx = open_cpu();
    rocq_region_stats s;
    text t = {.fail_at = -1};
    // Without a profile regions do nothing.
    assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
    assert_int_equal(rocq_region_begin(ctx, "a"), ROCQ_OK);
    assert_int_equal(rocq_region_begin(ctx, NULL), ROCQ_OK);
    assert_int_equal(rocq_region_work(ctx, -1, 0, ROCQ_ACCESS_STREAM), ROCQ_OK);
    assert_int_equal(rocq_profile_count(ctx), 0);
    assert_int_equal(rocq_profile_count(NULL), 0);
    assert_int_equal(rocq_profile_region(ctx, 0, &s), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_profile_report(ctx, ROCQ_REPORT_TEXT, write_text, &t), ROCQ_E_STATE);
    assert_int_equal(rocq_profile_stop(ctx), ROCQ_OK);
    assert_int_equal(rocq_profile_clear(ctx), ROCQ_OK);
    assert_int_equal(rocq_profile_start(NULL, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_profile_stop(NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_profile_clear(NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_region_begin(NULL, "a"), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_region_work(NULL, 1, 1, ROCQ_ACCESS_STREAM), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_region_end(NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_profile_region(NULL, 0, &s), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_profile_report(NULL, ROCQ_REPORT_TEXT, write_text, &t), ROCQ_E_ARGUMENT);

    const rocq_profile_desc wrong[] = {
        {.max_regions = -1}, {.max_samples = -1}, {.max_events = -1}, {.max_regions = 1 << 25},
        {.max_samples = 1 << 25}, {.max_events = 1 << 25}, {.bytes_per_s = -1},
        {.flops_per_s = (double)NAN}, {.matrix_per_s = -1}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        assert_int_equal(rocq_profile_start(ctx, &wrong[i]), ROCQ_E_ARGUMENT);
        assert_null(ctx->profile);
    }
    const rocq_profile_desc large = {.max_regions = 1 << 24, .max_samples = 1 << 24};
    assert_int_equal(rocq_profile_start(ctx, &large), ROCQ_E_MEMORY);

    assert_int_equal(rocq_profile_start(ctx, NULL), ROCQ_OK);
    assert_int_equal(rocq_profile_start(ctx, NULL), ROCQ_E_STATE);
    assert_int_equal(rocq_region_end(ctx), ROCQ_E_STATE);
    assert_int_equal(rocq_region_work(ctx, 1, 1, ROCQ_ACCESS_STREAM), ROCQ_E_STATE);
    assert_int_equal(rocq_region_begin(ctx, NULL), ROCQ_E_ARGUMENT);
    begin(ctx, "a");
    assert_int_equal(rocq_region_work(ctx, -1, 0, ROCQ_ACCESS_STREAM), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_region_work(ctx, 0, (double)NAN, ROCQ_ACCESS_STREAM), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_region_work(ctx, (double)INFINITY, 0, ROCQ_ACCESS_STREAM),
                     ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_region_work(ctx, 0, 0, (rocq_access)4), ROCQ_E_ARGUMENT);
    end(ctx, 5);
    assert_int_equal(rocq_region_end(ctx), ROCQ_E_STATE);
    memset(&s, 0x5a, sizeof s);
    const rocq_region_stats before = s;
    assert_int_equal(rocq_profile_region(ctx, 1, &s), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_profile_region(ctx, -1, &s), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_profile_region(ctx, 0, NULL), ROCQ_E_ARGUMENT);
    assert_memory_equal(&s, &before, sizeof s);
    assert_int_equal(rocq_profile_report(ctx, ROCQ_REPORT_TEXT, NULL, &t), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_profile_report(ctx, (rocq_report)3, write_text, &t), ROCQ_E_ARGUMENT);
    assert_int_equal(t.size, 0);
    s = stats_of(ctx, "a");
    assert_true(s.total_ns == 5 && s.bytes == 0);
    close_cpu(ctx);
}

// What finds no room is counted; what is there stays right.
static void no_room(void **state) {
    (void)state;
    rocq_ctx *ctx = open_cpu();
    rocq_profile_desc desc = {.max_regions = 3, .max_samples = 4, .max_events = 5};
    assert_int_equal(rocq_profile_start(ctx, &desc), ROCQ_OK);
    for (int64_t i = 0; i < 10; i++) {
        begin(ctx, "a");
        once(ctx, "b", i);
        begin(ctx, "c");
        once(ctx, "d", 5); // no room for its name
        end(ctx, 0);
        end(ctx, 0);
    }
    begin(ctx, "e"); // nor this, nor what is inside
    once(ctx, "a", 3);
    end(ctx, 0);
    assert_int_equal(rocq_profile_count(ctx), 3);
    rocq_region_stats s = stats_of(ctx, "a/b");
    assert_int_equal(s.host_ns.count, 10);
    assert_true(s.total_ns == 45 && s.host_ns.min == 6 && s.host_ns.max == 9);
    assert_true(s.host_ns.median == 7.5);
    s = stats_of(ctx, "a/c");
    assert_true(s.host_ns.count == 10 && s.total_ns == 50);
    assert_int_equal(stats_of(ctx, "a").host_ns.count, 10);
    cJSON *json = report_json(ctx, ROCQ_REPORT_JSON), *trace = report_json(ctx, ROCQ_REPORT_TRACE);
    assert_true(number(json, "dropped") == 12 && number(trace, "dropped") == 12);
    assert_true(number(json, "dropped_events") == 25 && number(json, "dropped_gpu") == 0);
    assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(trace, "traceEvents")), 2 + 5);
    assert_non_null(strstr(report(ctx, ROCQ_REPORT_TEXT)->data,
                           "no room for: 12 calls, 0 GPU times, 25 trace events\n"));
    cJSON_Delete(json);
    cJSON_Delete(trace);

    // Deeper than there are frames.
    assert_int_equal(rocq_profile_clear(ctx), ROCQ_OK);
    assert_int_equal(rocq_profile_start(ctx, NULL), ROCQ_OK);
    for (int i = 0; i < 100; i++) {
        begin(ctx, "deep");
        assert_int_equal(rocq_region_work(ctx, 1, 0, ROCQ_ACCESS_STREAM), ROCQ_OK);
    }
    for (int i = 0; i < 100; i++) end(ctx, 1);
    assert_int_equal(rocq_region_end(ctx), ROCQ_E_STATE);
    assert_int_equal(rocq_profile_count(ctx), 64);
    assert_int_equal(rocq_profile_region(ctx, 63, &s), ROCQ_OK);
    assert_true(s.depth == 63 && s.total_ns == 37 && s.bytes == 1);
    assert_int_equal(strlen(s.path), 127); // its end
    assert_int_equal(strncmp(s.path, "...", 3), 0);
    assert_string_equal(s.path + 127 - 10, "/deep/deep");
    json = report_json(ctx, ROCQ_REPORT_JSON);
    assert_true(number(json, "dropped") == 36);
    cJSON_Delete(json);
    close_cpu(ctx);
}

// -- what measuring may cost --

// Steps of 40 us in "run": two "part" and a "rest", which never lasts as long as the last time.
enum { PART_NS = 10000, REST_NS = 20000, TICK_NS = 250, STEPS = 20000 };

static void take_steps(rocq_ctx *ctx, int32_t from, int32_t to) {
    for (int32_t i = from; i < to; i++) {
        begin(ctx, "step");
        once(ctx, "part", PART_NS);
        assert_int_equal(rocq_region_work(ctx, 1, 2, ROCQ_ACCESS_STREAM), ROCQ_OK);
        once(ctx, "part", PART_NS);
        once(ctx, "rest", i % 2 ? REST_NS / 2 : REST_NS * 3 / 2);
        end(ctx, 0);
    }
}

static int64_t timed(rocq_ctx *ctx, const char *path) { return stats_of(ctx, path).host_ns.count; }

static void short_regions_are_sampled(void **state) {
    (void)state;
    static const double shares[] = {0.005, 0.02, 0.1}; // of the time; measuring all takes over 4%
    rocq_ctx *ctx = open_cpu();
    for (size_t k = 0; k < sizeof shares / sizeof shares[0]; k++) {
        const rocq_profile_desc desc = {.cost = k > 0 ? shares[k] : 0}; // the default
        tick_ns = TICK_NS;
        assert_int_equal(rocq_profile_start(ctx, &desc), ROCQ_OK);
        const int64_t started = now_ns;
        begin(ctx, "run");
        int64_t before = 0;
        for (int tenth = 0; tenth < 10; tenth++) { // evenly
            take_steps(ctx, tenth * STEPS / 10, (tenth + 1) * STEPS / 10);
            const int64_t n = timed(ctx, "run/step") - before;
            if (tenth == 0) before = n;
            else assert_true(2 * n > tenth * before && n < 2 * tenth * before);
        }
        end(ctx, 0);
        tick_ns = 0;
        const double spent = (double)(now_ns - started);
        const rocq_region_stats run = stats_of(ctx, "run"), step = stats_of(ctx, "run/step"),
                                part = stats_of(ctx, "run/step/part"),
                                rest = stats_of(ctx, "run/step/rest");
        assert_true(run.calls == 1 && run.host_ns.count == 1); // a first one
        assert_int_equal(step.calls, STEPS);
        // What is inside follows: a step is measured as a whole.
        assert_true(rest.host_ns.count == step.host_ns.count);
        assert_true(part.host_ns.count == 2 * step.host_ns.count);
        assert_true(part.calls == 2 * rest.calls && llabs(rest.calls - STEPS) < 100);
        // Two reads of the clock more for every region that is measured, and two anyway.
        const double cost = 2.0 * TICK_NS * 4.0 * (double)step.host_ns.count / spent;
        if (shares[k] < 0.05) {
            assert_true(cost < 1.1 * shares[k] && cost > 0.7 * shares[k]);
            assert_true(step.host_ns.count < STEPS / 2);
        } else {
            assert_int_equal(step.host_ns.count, STEPS);
        }
        // Sums are what they would be with all measured, and shares agree.
        close_to(part.total_ns, 2.0 * STEPS * (PART_NS + TICK_NS), 0.02 * part.total_ns);
        close_to(rest.total_ns, 1.0 * STEPS * (REST_NS + TICK_NS), 0.05 * rest.total_ns);
        assert_true(step.total_ns > part.total_ns + rest.total_ns);
        close_to(step.bytes, STEPS, 0.01 * STEPS);
        close_to(run.bytes, STEPS, 0.02 * STEPS);
        close_to(run.flops, 2 * STEPS, 0.04 * STEPS);
        cJSON *json = report_json(ctx, ROCQ_REPORT_JSON);
        const cJSON *r = cJSON_GetArrayItem(cJSON_GetObjectItem(json, "regions"), 1);
        assert_true(number(r, "calls") == STEPS);
        assert_true(number(cJSON_GetObjectItem(r, "host_ns"), "count") ==
                    (double)step.host_ns.count);
        cJSON_Delete(json);
        assert_int_equal(rocq_profile_stop(ctx), ROCQ_OK);
    }
    close_cpu(ctx);
}

// Short calls before do not hide long ones, nor what comes for the first time; nor, after a
// second, what lasts longer from now on.
static void long_regions_are_measured(void **state) {
    (void)state;
    rocq_ctx *ctx = open_cpu();
    assert_int_equal(rocq_profile_start(ctx, NULL), ROCQ_OK);
    tick_ns = TICK_NS;
    int64_t before = 0;
    for (int i = 0; i < 20; i++) {
        take_steps(ctx, 0, 2000);
        begin(ctx, "long");
        begin(ctx, i % 2 ? "odd" : "even"); // a first call, then brief ones
        end(ctx, 100);
        end(ctx, 60000000);
    }
    assert_int_equal(timed(ctx, "long"), 20);
    assert_true(timed(ctx, "long/odd") >= 1 && timed(ctx, "long/even") >= 1);
    take_steps(ctx, 0, 2000);
    for (int i = 0; i < 750; i++) { // the costs of measuring all these are within the limit
        if (i == 500) before = timed(ctx, "step");
        begin(ctx, "step");
        end(ctx, 2000000);
    }
    assert_int_equal(timed(ctx, "step"), before + 250);
    tick_ns = 0;
    assert_int_equal(rocq_profile_stop(ctx), ROCQ_OK);

    // Without a limit all are, and with ranges for a profiler.
    const rocq_profile_desc all[] = {{.cost = 1}, {.roctx = true}};
    for (int k = 0; k < 2; k++) {
        assert_int_equal(rocq_profile_start(ctx, &all[k]), ROCQ_OK);
        tick_ns = 100000;
        take_steps(ctx, 0, 300);
        tick_ns = 0;
        const rocq_region_stats part = stats_of(ctx, "step/part");
        assert_true(part.calls == 600 && part.host_ns.count == 600 && part.bytes == 0);
        assert_int_equal(rocq_profile_stop(ctx), ROCQ_OK);
    }
    close_cpu(ctx);
}

// Stopped, or closed wrongly, in the middle of a call that is passed over.
static void passed_over_and_stopped(void **state) {
    (void)state;
    rocq_ctx *ctx = open_cpu();
    assert_int_equal(rocq_profile_start(ctx, NULL), ROCQ_OK);
    tick_ns = 100000; // longer than what there is to measure
    take_steps(ctx, 0, 100);
    int n = 0;
    while (!rocq__skipping(ctx->profiling) && n++ < 100) {
        if (n > 1) end(ctx, 1);
        begin(ctx, "step");
    }
    assert_true(rocq__skipping(ctx->profiling) && ctx->profiling->depth == 1);
    begin(ctx, "inside");
    assert_int_equal(rocq_region_work(ctx, 5, 5, ROCQ_ACCESS_STREAM), ROCQ_OK);
    end(ctx, 1);
    end(ctx, 1);
    assert_int_equal(rocq_region_end(ctx), ROCQ_E_STATE);
    begin(ctx, "step");
    tick_ns = 0;
    assert_int_equal(rocq_profile_stop(ctx), ROCQ_OK);
    assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
    const rocq_profile_desc wrong[] = {{.cost = -1}, {.cost = (double)NAN}};
    for (int k = 0; k < 2; k++) {
        assert_int_equal(rocq_profile_start(ctx, &wrong[k]), ROCQ_E_ARGUMENT);
    }
    const rocq_profile_desc least = {.cost = 1e-300}; // a first call, and hardly another
    assert_int_equal(rocq_profile_start(ctx, &least), ROCQ_OK);
    tick_ns = TICK_NS;
    for (int i = 0; i < 1000; i++) once(ctx, "new", 5);
    tick_ns = 0;
    assert_int_equal(timed(ctx, "new"), 1);
    assert_int_equal(stats_of(ctx, "new").calls, 1000);
    close_cpu(ctx);
}

static void stop_and_start(void **state) {
    (void)state;
    rocq_ctx *ctx = open_cpu();
    assert_int_equal(rocq_profile_start(ctx, NULL), ROCQ_OK);
    once(ctx, "a", 10);
    begin(ctx, "open");
    begin(ctx, "too");
    now_ns += 5;
    assert_int_equal(rocq_profile_stop(ctx), ROCQ_OK);
    assert_int_equal(rocq_profile_stop(ctx), ROCQ_OK);
    once(ctx, "late", 10); // does nothing
    assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
    assert_int_equal(rocq_profile_count(ctx), 3);
    assert_true(stats_of(ctx, "a").total_ns == 10);
    assert_true(stats_of(ctx, "open").host_ns.count == 0 &&
                stats_of(ctx, "open/too").total_ns == 0);
    cJSON *trace = report_json(ctx, ROCQ_REPORT_TRACE); // without those that never ended
    assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(trace, "traceEvents")), 2 + 1);
    cJSON_Delete(trace);
    assert_int_equal(rocq_profile_start(ctx, NULL), ROCQ_OK); // anew
    assert_int_equal(rocq_profile_count(ctx), 0);
    assert_int_equal(rocq_region_end(ctx), ROCQ_E_STATE);
    once(ctx, "b", 4);
    assert_int_equal(rocq_profile_count(ctx), 1);
    assert_int_equal(rocq_profile_clear(ctx), ROCQ_OK);
    assert_int_equal(rocq_profile_count(ctx), 0);
    assert_int_equal(rocq_profile_start(ctx, NULL), ROCQ_OK); // closed while it is on
    begin(ctx, "open");
    close_cpu(ctx);
}

static void memory_is_taken_by_start(void **state) {
    (void)state;
    rocq_ctx *ctx = open_cpu();
    int64_t n = 1;
    assert_int_equal(rocq_profile_start(ctx, NULL), ROCQ_OK);
    once(ctx, "kept", 3);
    assert_int_equal(rocq_profile_stop(ctx), ROCQ_OK);
    const int64_t live = n_live;
    for (int64_t k = 0; k < n; k++) { // each allocation denied in turn: the old results stay
        const int64_t first = n_calls;
        fail_at = first + k;
        const rocq_result result = rocq_profile_start(ctx, NULL);
        fail_at = -1;
        if (result == ROCQ_OK) break;
        n = k + 2;
        assert_int_equal(result, ROCQ_E_MEMORY);
        assert_int_equal(n_live, live);
        assert_true(stats_of(ctx, "kept").total_ns == 3);
    }
    assert_int_equal(n, 2); // there is one
    assert_int_equal(n_live, live);
    const int64_t calls = n_calls;
    float data[32] = {0};
    const int64_t ne[1] = {32};
    rocq_tensor x;
    assert_int_equal(rocq_tensor_from_host(&x, data, ROCQ_F32, 1, ne), ROCQ_OK);
    const rocq_scale_params scale = {.y = &x, .x = &x, .scale = 1};
    for (int i = 0; i < 3000; i++) {
        begin(ctx, i % 3 ? "a" : "b");
        assert_int_equal(rocq_scale(ctx, &scale), ROCQ_OK);
        end(ctx, i);
    }
    assert_int_equal(rocq_profile_count(ctx), 4);
    stats_of(ctx, "a/scale");
    report(ctx, ROCQ_REPORT_JSON);
    assert_int_equal(n_calls, calls);
    close_cpu(ctx);
}

// -- ops --

static rocq_tensor host_tensor(rocq_ctx *ctx, rocq_format format, int64_t ne0, int64_t ne1,
                               int64_t ne2) {
    rocq_tensor t, shape;
    rocq_buffer buffer;
    const int64_t ne[3] = {ne0, ne1, ne2};
    assert_int_equal(rocq_tensor_init(&shape, NULL, 0, format, 3, ne), ROCQ_OK);
    assert_int_equal(rocq_buffer_alloc(ctx, &buffer, rocq_tensor_size(&shape)), ROCQ_OK);
    memset(buffer.host, 0, (size_t)buffer.size);
    assert_int_equal(rocq_tensor_init(&t, &buffer, 0, format, 3, ne), ROCQ_OK);
    return t;
}

static void expect_work(rocq_ctx *ctx, const char *path, double bytes, double flops) {
    const rocq_region_stats s = stats_of(ctx, path);
    if (s.bytes != bytes || s.flops != flops || s.host_ns.count != 1) {
        fail_msg("%s: %d calls, %.0f bytes, %.0f flops, not %.0f and %.0f", path,
                 (int)s.host_ns.count, s.bytes, s.flops, bytes, flops);
    }
}

static void ops_are_regions(void **state) {
    (void)state;
    rocq_ctx *ctx = open_cpu();
    rocq_tensor x = host_tensor(ctx, ROCQ_F32, 256, 1, 1),
                xs = host_tensor(ctx, ROCQ_F32, 256, 9, 1);
    rocq_tensor y = host_tensor(ctx, ROCQ_F32, 64, 1, 1), ys = host_tensor(ctx, ROCQ_F32, 64, 9, 1);
    rocq_tensor y2 = host_tensor(ctx, ROCQ_F32, 32, 1, 1);
    rocq_tensor w = host_tensor(ctx, ROCQ_Q4_K, 256, 64, 1),
                w2 = host_tensor(ctx, ROCQ_Q6_K, 256, 32, 1);
    rocq_tensor table = host_tensor(ctx, ROCQ_Q8_0, 256, 100, 1),
                ids = host_tensor(ctx, ROCQ_I32, 9, 1, 1);
    rocq_tensor bias = host_tensor(ctx, ROCQ_F32, 64, 1, 1),
                index = host_tensor(ctx, ROCQ_I32, 9, 1, 1);
    assert_int_equal(rocq_profile_start(ctx, NULL), ROCQ_OK);

    const rocq_matmul_params one = {.y = &y, .w = &w, .x = &x, .bias = &bias};
    const rocq_matmul_params many = {.y = &ys, .w = &w, .x = &xs};
    const rocq_matmul_params second = {.y = &y2, .w = &w2, .x = &x};
    const rocq_matmul_params both = {.y = &y, .w = &w, .x = &x, .next = &second};
    const rocq_matmul_params twice = {.y = &y, .w = &w, .x = &x, .w2 = &w};
    const double q4_k = 64 * 144, q6_k = 32 * 210;
    assert_int_equal(rocq_matmul(ctx, &one), ROCQ_OK);
    expect_work(ctx, "matvec Q4_K", q4_k + 4 * (256 + 64 + 64), 2.0 * 256 * 64);
    assert_int_equal(rocq_matmul(ctx, &many), ROCQ_OK);
    expect_work(ctx, "matmul Q4_K", q4_k + 4 * 9 * (256 + 64), 2.0 * 256 * 64 * 9);
    assert_int_equal(rocq_matmul(ctx, &both), ROCQ_OK);
    expect_work(ctx, "matvec mixed", q4_k + q6_k + 4 * (256 + 64 + 32), 2.0 * 256 * (64 + 32));
    begin(ctx, "gated");
    assert_int_equal(rocq_matmul(ctx, &twice), ROCQ_OK);
    end(ctx, 0);
    expect_work(ctx, "gated/matvec Q4_K", 2 * q4_k + 4 * (256 + 64), 4.0 * 256 * 64);
    expect_work(ctx, "gated", 2 * q4_k + 4 * (256 + 64), 4.0 * 256 * 64);
    assert_int_equal(stats_of(ctx, "matvec Q4_K").access, ROCQ_ACCESS_STREAM);
    assert_int_equal(stats_of(ctx, "matmul Q4_K").access, ROCQ_ACCESS_TILED);

    const rocq_gather_params gather = {.y = &xs, .table = &table, .ids = &ids};
    assert_int_equal(rocq_gather(ctx, &gather), ROCQ_OK);
    expect_work(ctx, "gather Q8_0", 9 * (256 / 32 * 34 + 256 * 4 + 4), 9 * 256);
    assert_int_equal(stats_of(ctx, "gather Q8_0").access, ROCQ_ACCESS_GATHER);
    const rocq_norm_params norm = {.y = &xs, .x = &xs};
    assert_int_equal(rocq_rmsnorm(ctx, &norm), ROCQ_OK);
    expect_work(ctx, "rmsnorm", 2 * 9 * 256 * 4, 9 * 256);
    const rocq_argmax_params argmax = {.index = &index, .x = &xs};
    assert_int_equal(rocq_argmax(ctx, &argmax), ROCQ_OK);
    expect_work(ctx, "argmax", 9 * 256 * 4 + 9 * 4, 9 * 256);

    // Rows of a cache that are written, not the cache.
    rocq_tensor k = host_tensor(ctx, ROCQ_F32, 32, 2, 3), v = host_tensor(ctx, ROCQ_F32, 32, 2, 3);
    rocq_tensor q = host_tensor(ctx, ROCQ_F32, 32, 4, 3), pos = host_tensor(ctx, ROCQ_I32, 3, 1, 1);
    rocq_tensor k_cache = host_tensor(ctx, ROCQ_F16, 32, 2, 50),
                v_cache = host_tensor(ctx, ROCQ_F16, 32, 2, 50);
    for (int i = 0; i < 3; i++) ((int32_t *)pos.buffer.host)[i] = i;
    const rocq_rope_append_params append = {.q = &q, .k = &k, .v = &v, .k_cache = &k_cache,
                                            .v_cache = &v_cache, .pos = &pos};
    assert_int_equal(rocq_rope_append(ctx, &append), ROCQ_OK);
    expect_work(ctx, "rope_append", 2 * 32 * 4 * 3 * 4 + 2 * 32 * 2 * 3 * (4 + 2) + 3 * 4,
                32 * 4 * 3);

    // Of a state the columns that are read, then written.
    rocq_tensor bcx = host_tensor(ctx, ROCQ_F32, 96, 3, 1);
    rocq_tensor seen = host_tensor(ctx, ROCQ_F32, 32, 3, 1);
    rocq_tensor taps = host_tensor(ctx, ROCQ_F32, 3, 32, 1);
    rocq_tensor kept = host_tensor(ctx, ROCQ_F32, 32, 50, 1);
    rocq_tensor at = host_tensor(ctx, ROCQ_I32, 1, 1, 1);
    *(int32_t *)at.buffer.host = 0;
    const rocq_shortconv_params shortconv = {.y = &seen, .bcx = &bcx, .w = &taps, .state = &kept,
                                             .pos = &at};
    assert_int_equal(rocq_shortconv(ctx, &shortconv), ROCQ_OK);
    expect_work(ctx, "shortconv", 4 * (32 * 3 + 96 * 3 + 3 * 32 + 32 * (2 + 3) + 1), 32 * 3);

    // A slot is read, another written.
    rocq_tensor qk = host_tensor(ctx, ROCQ_F32, 16, 2, 3), v4 = host_tensor(ctx, ROCQ_F32, 8, 4, 3);
    rocq_tensor y4 = host_tensor(ctx, ROCQ_F32, 8, 4, 3), s4 = host_tensor(ctx, ROCQ_F32, 16, 8, 8);
    rocq_tensor gates = host_tensor(ctx, ROCQ_F32, 4, 3, 1);
    rocq_tensor each = host_tensor(ctx, ROCQ_F32, 4, 1, 1);
    rocq_tensor slot = host_tensor(ctx, ROCQ_I32, 2, 1, 1);
    s4.ne[2] = 4; // and two slots
    s4.ne[3] = 2;
    s4.stride[3] = 4 * s4.stride[2];
    ((int32_t *)slot.buffer.host)[0] = -1;
    ((int32_t *)slot.buffer.host)[1] = 1;
    const rocq_delta_net_params delta_net = {
        .y = &y4, .state = &s4, .q = &qk, .k = &qk, .v = &v4, .alpha = &gates, .beta = &gates,
        .a = &each, .dt = &each, .slot = &slot, .eps = 1};
    assert_int_equal(rocq_delta_net(ctx, &delta_net), ROCQ_OK);
    expect_work(ctx, "delta_net",
                4 * (2 * 8 * 4 * 3 + 2 * 16 * 8 * 4 + 2 * 16 * 2 * 3 + 2 * 4 * 3 + 2 * 4 + 2),
                7 * 8 * 4 * 3 * 16);

    // What fails is no sample, nor is what a graph records.
    const rocq_matmul_params wrong = {.y = &y2, .w = &w, .x = &x};
    assert_int_not_equal(rocq_matmul(ctx, &wrong), ROCQ_OK);
    ((int32_t *)ids.buffer.host)[3] = 100;
    assert_int_equal(rocq_gather(ctx, &gather), ROCQ_E_BOUNDS); // found while it runs
    ((int32_t *)ids.buffer.host)[3] = 0;
    expect_work(ctx, "gather Q8_0", 9 * (256 / 32 * 34 + 256 * 4 + 4), 9 * 256);
    const int32_t n = rocq_profile_count(ctx);
    rocq_graph *graph = NULL;
    assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
    assert_int_equal(rocq_rmsnorm(ctx, &norm), ROCQ_OK);
    assert_int_equal(rocq_matmul(ctx, &one), ROCQ_OK);
    assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);
    assert_int_equal(rocq_profile_count(ctx), n);
    assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK);
    expect_work(ctx, "graph/rmsnorm", 2 * 9 * 256 * 4, 9 * 256);
    expect_work(ctx, "graph", q4_k + 4 * (256 + 64 + 64) + 2 * 9 * 256 * 4,
                2.0 * 256 * 64 + 9 * 256);

    // Copies have bytes of their own, which are not the memory's traffic of regions around.
    float data[64];
    begin(ctx, "copies");
    assert_int_equal(rocq_download(ctx, data, &y, sizeof data), ROCQ_OK);
    assert_int_equal(rocq_upload(ctx, &y, data, sizeof data), ROCQ_OK);
    end(ctx, 0);
    expect_work(ctx, "copies/download", sizeof data, 0);
    expect_work(ctx, "copies/upload", sizeof data, 0);
    expect_work(ctx, "copies", 0, 0);
    close_cpu(ctx);
}

// Pairs of query and position, and positions, counted one by one.
static void attention_is_counted(void **state) {
    (void)state;
    rocq_ctx *ctx = open_cpu();
    enum { D = 64, HEADS = 4, KV_HEADS = 2, N_KV = 24 };
    rocq_tensor k = host_tensor(ctx, ROCQ_F16, D, KV_HEADS, N_KV),
                v = host_tensor(ctx, ROCQ_Q8_0, D, KV_HEADS, N_KV);
    rocq_tensor kv_len = host_tensor(ctx, ROCQ_I32, 1, 1, 1);
    for (int32_t n_q = 1; n_q <= 11; n_q += 5) {
        rocq_tensor q = host_tensor(ctx, ROCQ_F32, D, HEADS, n_q),
                    out = host_tensor(ctx, ROCQ_F32, D, HEADS, n_q);
        for (int32_t length = 1; length <= N_KV; length++) { // less than n_q: some see nothing
            for (int32_t window = -1; window <= 9; window++) { // -1: not causal; 0: none
                double pairs = 0, positions = 0;
                for (int32_t j = 0; j < length; j++) {
                    bool seen = false;
                    for (int32_t i = 0; i < n_q; i++) {
                        const int32_t p = length - n_q + i;
                        const bool sees = window < 0 || (j <= p && (window == 0 || j > p - window));
                        pairs += sees;
                        seen = seen || sees;
                    }
                    positions += seen;
                }
                const rocq_attention_params attention = {
                    .out = &out, .q = &q, .k = &k, .v = &v,
                    .kv_len = length < N_KV ? &kv_len : NULL,
                    .causal = window >= 0, .window = window > 0 ? window : 0};
                *(int32_t *)kv_len.buffer.host = length;
                assert_int_equal(rocq_profile_start(ctx, NULL), ROCQ_OK);
                assert_int_equal(rocq_attention(ctx, &attention), ROCQ_OK);
                const double cache = positions * KV_HEADS * (2 * D + D / 32 * 34);
                expect_work(ctx, "attention F16",
                            cache + 2.0 * 4 * D * HEADS * n_q + (length < N_KV ? 4 : 0),
                            4.0 * D * HEADS * pairs);
                assert_int_equal(stats_of(ctx, "attention F16").access,
                                 n_q > 8 ? ROCQ_ACCESS_TILED : ROCQ_ACCESS_STREAM);
                assert_int_equal(rocq_profile_clear(ctx), ROCQ_OK);
            }
        }
    }
    close_cpu(ctx);
}

// -- verdicts --

static void verdicts(void **state) {
    (void)state;
    static const struct {
        double bytes, flops; // in a millisecond, of 960 GB/s and 61 TFLOP/s
        rocq_access access;
        bool memory_bound;
        const char *verdict;
    } cases[] = {
        {0.82 * 960e6, 1e6, ROCQ_ACCESS_STREAM, true, "memory-bound, 82% of 960 GB/s: excellent"},
        {0.61 * 960e6, 0, ROCQ_ACCESS_GATHER, true, "memory-bound, 61% of 960 GB/s: good"},
        {0.41 * 960e6, 0, ROCQ_ACCESS_STREAM, true,
         "memory-bound, 41% of 960 GB/s: a stream can reach 90%"},
        {0.41 * 960e6, 0, ROCQ_ACCESS_GATHER, true,
         "memory-bound, 41% of 960 GB/s: gathered rows can reach 60%"},
        {0.03 * 960e6, 0, ROCQ_ACCESS_LATENCY, true,
         "latency-bound, 3% of 960 GB/s: too little work to fill the chip"},
        {1e6, 0.5 * 61e9, ROCQ_ACCESS_TILED, false,
         "compute-bound, 50% of 61 TFLOP/s: tiles can reach 85%"},
        {1e6, 0.85 * 61e9, ROCQ_ACCESS_TILED, false, "compute-bound, 85% of 61 TFLOP/s: excellent"},
        {1.3 * 960e6, 0, ROCQ_ACCESS_STREAM, true,
         "memory-bound, 130% of 960 GB/s: more than the peak, from caches"},
        {0, 0, ROCQ_ACCESS_STREAM, false, ""},
    };
    rocq_ctx *ctx = open_cpu();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const rocq_profile_desc desc = {.bytes_per_s = 960e9, .flops_per_s = 61e12};
        assert_int_equal(rocq_profile_start(ctx, &desc), ROCQ_OK);
        for (int k = 0; k < 3; k++) {
            begin(ctx, "outer");
            begin(ctx, "region");
            const double half = 0.5;
            for (int part = 0; part < 2; part++) {
                assert_int_equal(rocq_region_work(ctx, half * cases[i].bytes, half * cases[i].flops,
                                                  cases[i].access), ROCQ_OK);
            }
            end(ctx, 1000000);
            end(ctx, 0);
        }
        const rocq_region_stats s = stats_of(ctx, "outer/region"), outer = stats_of(ctx, "outer");
        assert_string_equal(s.verdict, cases[i].verdict);
        assert_int_equal(s.memory_bound, cases[i].memory_bound);
        assert_int_equal(s.access, cases[i].access);
        close_to(s.bytes, 3 * cases[i].bytes, 1);
        close_to(s.bytes_per_s, 1e3 * cases[i].bytes, 1e3);
        close_to(s.flops_per_s, 1e3 * cases[i].flops, 1e3);
        close_to(s.share, fmax(cases[i].bytes / 960e6, cases[i].flops / 61e9), 1e-9);
        close_to(outer.bytes, s.bytes, 0);
        close_to(outer.flops, s.flops, 0);
        assert_int_equal(rocq_profile_stop(ctx), ROCQ_OK);
    }
    // Without the peak that it is about there is no verdict.
    for (int which = 0; which < 4; which++) {
        const rocq_profile_desc desc = {.bytes_per_s = which & 1 ? 5e9 : 0,
                                        .flops_per_s = which & 2 ? 7e9 : 0};
        assert_int_equal(rocq_profile_start(ctx, &desc), ROCQ_OK);
        for (int tiled = 0; tiled < 2; tiled++) {
            begin(ctx, tiled ? "tiled" : "stream");
            rocq_region_work(ctx, 1e6, 5e6, tiled ? ROCQ_ACCESS_TILED : ROCQ_ACCESS_STREAM);
            end(ctx, 1000000);
        }
        assert_int_equal(*stats_of(ctx, "stream").verdict != 0, (which & 1) != 0);
        assert_int_equal(*stats_of(ctx, "tiled").verdict != 0, (which & 2) != 0);
        assert_int_equal(rocq_profile_stop(ctx), ROCQ_OK);
    }
    close_cpu(ctx);
}

// -- reports --

static const char *const odd_name = "a \"name\"\\ with\n\ttabs, \x01 and \xc3\xa9/\xe2\x82\xac";

static void make_results(rocq_ctx *ctx) {
    const rocq_profile_desc desc = {.bytes_per_s = 960e9};
    assert_int_equal(rocq_profile_start(ctx, &desc), ROCQ_OK);
    for (int i = 0; i < 40; i++) {
        begin(ctx, "first");
        once(ctx, odd_name, 1000 + (int64_t)(5000 * random_in(0, 1)));
        now_ns += 500;
        end(ctx, 0);
        begin(ctx, "second region");
        once(ctx, "x", 123456);
        assert_int_equal(rocq_region_work(ctx, 7e6, 9e4, ROCQ_ACCESS_STREAM), ROCQ_OK);
        end(ctx, 12345 + i);
    }
    begin(ctx, "first");
    once(ctx, "comes late", 77); // below "first" in the table
    end(ctx, 0);
}

static void json_report(void **state) {
    (void)state;
    rocq_ctx *ctx = open_cpu();
    make_results(ctx);
    cJSON *json = report_json(ctx, ROCQ_REPORT_JSON);
    const cJSON *regions = cJSON_GetObjectItemCaseSensitive(json, "regions");
    assert_int_equal(cJSON_GetArraySize(regions), rocq_profile_count(ctx));
    assert_true(number(json, "dropped") == 0 && number(json, "peak_bytes_per_s") == 960e9);
    assert_non_null(strstr(string(json, "device"), "CPU"));
    for (int32_t i = 0; i < rocq_profile_count(ctx); i++) {
        const cJSON *r = cJSON_GetArrayItem(regions, i);
        rocq_region_stats s;
        assert_int_equal(rocq_profile_region(ctx, i, &s), ROCQ_OK);
        assert_string_equal(string(r, "name"), s.name);
        assert_string_equal(string(r, "path"), s.path);
        assert_string_equal(string(r, "verdict"), s.verdict);
        assert_string_equal(string(r, "access"), "stream");
        assert_true(number(r, "depth") == s.depth);
        const cJSON *times = cJSON_GetObjectItemCaseSensitive(r, "host_ns");
        const struct { const char *name; double value; } fields[] = {
            {"count", (double)s.host_ns.count}, {"min", s.host_ns.min},
            {"median", s.host_ns.median},
            {"mean", s.host_ns.mean}, {"p95", s.host_ns.p95}, {"p99", s.host_ns.p99},
            {"max", s.host_ns.max}, {"deviation", s.host_ns.deviation}};
        for (size_t k = 0; k < sizeof fields / sizeof fields[0]; k++) {
            close_to(number(times, fields[k].name), fields[k].value, 0.051);
        }
        assert_int_equal(cJSON_GetArraySize(times), 8);
        assert_true(number(cJSON_GetObjectItem(r, "gpu_ns"), "count") == 0);
        close_to(number(r, "total_ns"), s.total_ns, 0.051);
        close_to(number(r, "bytes"), s.bytes, 0.5);
        close_to(number(r, "flops"), s.flops, 0.5);
        close_to(number(r, "bytes_per_s"), s.bytes_per_s, 0.5);
        close_to(number(r, "flops_per_s"), s.flops_per_s, 0.5);
        close_to(number(r, "share"), s.share, 5e-5);
        assert_int_equal(cJSON_IsTrue(cJSON_GetObjectItem(r, "memory_bound")), s.memory_bound);
    }
    cJSON_Delete(json);
    close_cpu(ctx);
}

static void text_report(void **state) {
    (void)state;
    rocq_ctx *ctx = open_cpu();
    const rocq_profile_desc desc = {.bytes_per_s = 960e9};
    assert_int_equal(rocq_profile_start(ctx, &desc), ROCQ_OK);
    begin(ctx, "first");
    once(ctx, "in \xc3\xa9 it", 250000);
    end(ctx, 750000);
    begin(ctx, "second region");
    assert_int_equal(rocq_region_work(ctx, 1.5 * 0.82 * 960e6, 3e8, ROCQ_ACCESS_STREAM), ROCQ_OK);
    end(ctx, 1500000);
    begin(ctx, "first");
    once(ctx, "late", 500000);
    end(ctx, 0);
    assert_string_equal(
        report(ctx, ROCQ_REPORT_TEXT)->data,
        "region           calls   timed   total ms      %   median us      p95 us      p99 us     "
        "GB/s   GFLOP/s\n"
        "first                2       2      1.500             750.00     1000.00     1000.00\n"
        "  in \xc3\xa9 it            1       1      0.250   16.7      250.00      250.00      "
        "250.00\n"
        "  late               1       1      0.500   33.3      500.00      500.00      500.00\n"
        "second region        1       1      1.500            1500.00     1500.00     1500.00   "
        "787.20     200.0"
        "  memory-bound, 82% of 960 GB/s: excellent\n");
    close_cpu(ctx);
}

static void trace_report(void **state) {
    (void)state;
    rocq_ctx *ctx = open_cpu();
    make_results(ctx);
    const double began = 1e-3 * (double)ctx->profile->start_ns, last = 1e-3 * (double)now_ns;
    cJSON *json = report_json(ctx, ROCQ_REPORT_TRACE);
    const cJSON *e, *events = cJSON_GetObjectItemCaseSensitive(json, "traceEvents");
    struct { double start, stop; } open[8];
    int n_open = 0, n = 0, n_meta = 0, deepest = 0;
    cJSON_ArrayForEach(e, events) {
        assert_true(number(e, "pid") == 1 && number(e, "tid") == 1);
        if (strcmp(string(e, "ph"), "M") == 0) {
            const char *of = string(cJSON_GetObjectItem(e, "args"), "name");
            if (strcmp(string(e, "name"), "thread_name") == 0) assert_string_equal(of, "host");
            else assert_string_equal(string(e, "name"), "process_name");
            n_meta++;
            continue;
        }
        assert_string_equal(string(e, "ph"), "X");
        const double start = number(e, "ts"), stop = start + number(e, "dur");
        while (n_open > 0 && open[n_open - 1].stop <= start + 1e-6) n_open--;
        if (n_open > 0) { // inside what is open
            assert_true(start >= open[n_open - 1].start - 1e-6);
            assert_true(stop <= open[n_open - 1].stop + 1e-6);
        }
        open[n_open].start = start;
        open[n_open++].stop = stop;
        deepest = n_open > deepest ? n_open : deepest;
        assert_true(start >= 0 && stop <= last - began + 1e-6);
        n++;
    }
    assert_true(n == 40 * 4 + 2 && n_meta == 2 && deepest == 2);
    assert_string_equal(string(cJSON_GetArrayItem(events, 3), "name"), odd_name);
    cJSON_Delete(json);
    close_cpu(ctx);
}

// A report that cannot be written, at each of its pieces.
static void reports_that_fail(void **state) {
    (void)state;
    static text t;
    rocq_ctx *ctx = open_cpu();
    const rocq_profile_desc desc = {.max_regions = 2, .bytes_per_s = 1};
    assert_int_equal(rocq_profile_start(ctx, &desc), ROCQ_OK);
    once(ctx, odd_name, 5);
    once(ctx, "b", 5);
    once(ctx, "dropped", 5);
    for (int kind = 0; kind < 3; kind++) {
        const int64_t n = report(ctx, (rocq_report)kind)->n_writes;
        assert_true(n > 5);
        for (int64_t k = 0; k <= n; k++) {
            t.size = t.n_writes = 0;
            t.fail_at = k;
            assert_int_equal(rocq_profile_report(ctx, (rocq_report)kind, write_text, &t),
                             k < n ? ROCQ_E_IO : ROCQ_OK);
            assert_int_equal(t.n_writes, k);
        }
    }
    close_cpu(ctx);
}

// A library of this name, as AMD's profilers bring: every range that is pushed is popped.
static void roctx_ranges(void **state) {
    (void)state;
    static const char source[] = "#include <string.h>\nint depth, pushes; char last[64];\n"
                                 "int roctxRangePushA(const char *name) { strncpy(last, name, 63); "
                                 "pushes++; return depth++; }\n"
                                 "int roctxRangePop(void) { return --depth; }\n";
    char dir[64], path[96], command[256];
    rocq_ctx *ctx = open_cpu();
    const rocq_profile_desc desc = {.max_regions = 3, .roctx = true};
    assert_int_equal(rocq_profile_start(ctx, &desc), ROCQ_OK); // not found: nothing happens
    if (!ctx->profile->range_push) {
        once(ctx, "a", 1);
        snprintf(dir, sizeof dir, "/tmp/rocq-roctx-%d", (int)getpid());
        snprintf(command, sizeof command, "mkdir %s", dir);
        assert_int_equal(system(command), 0);
        snprintf(path, sizeof path, "%s/roctx.c", dir);
        FILE *out = fopen(path, "w");
        assert_non_null(out);
        fputs(source, out);
        assert_int_equal(fclose(out), 0);
        snprintf(command, sizeof command,
                 "cc -shared -fPIC -Wl,-soname,libroctx64.so.4 %s -o %s/libroctx64.so.4", path,
                 dir);
        assert_int_equal(system(command), 0);
        snprintf(path, sizeof path, "%s/libroctx64.so.4", dir);
        void *library = dlopen(path, RTLD_NOW); // is found by its name from now on
        assert_non_null(library);
        snprintf(command, sizeof command, "rm -r %s", dir);
        assert_int_equal(system(command), 0);
        int *depth = (int *)dlsym(library, "depth"), *pushes = (int *)dlsym(library, "pushes");
        const char *last = (const char *)dlsym(library, "last");
        assert_int_equal(rocq_profile_stop(ctx), ROCQ_OK);
        const rocq_profile_desc off = {0};
        assert_int_equal(rocq_profile_start(ctx, &off), ROCQ_OK); // found, but not wanted
        once(ctx, "a", 1);
        assert_int_equal(*pushes, 0);
        assert_int_equal(rocq_profile_stop(ctx), ROCQ_OK);
        assert_int_equal(rocq_profile_start(ctx, &desc), ROCQ_OK);
        rocq_tensor x = host_tensor(ctx, ROCQ_F32, 32, 1, 1),
                    y = host_tensor(ctx, ROCQ_F16, 32, 1, 1);
        const rocq_cast_params cast = {.y = &y, .x = &x};
        begin(ctx, "outer");
        assert_string_equal(last, "outer");
        assert_int_equal(rocq_cast(ctx, &cast), ROCQ_OK);
        assert_string_equal(last, "cast F16");
        assert_int_equal(*depth, 1);
        for (int i = 0; i < 80; i++) begin(ctx, i % 2 ? "deep" : "no room");
        assert_int_equal(*depth, 81);
        for (int i = 0; i < 80; i++) end(ctx, 0);
        assert_int_equal(*depth, 1);
        assert_int_equal(*pushes, 82);
        assert_int_equal(rocq_profile_stop(ctx), ROCQ_OK); // "outer" is still open
        assert_int_equal(*depth, 0);
    }
    close_cpu(ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(summaries),
        cmocka_unit_test(stopwatches),
        cmocka_unit_test(launch_cost),
        cmocka_unit_test(regions_nest),
        cmocka_unit_test(long_paths_keep_their_end),
        cmocka_unit_test(wrong_calls),
        cmocka_unit_test(no_room),
        cmocka_unit_test(short_regions_are_sampled),
        cmocka_unit_test(long_regions_are_measured),
        cmocka_unit_test(passed_over_and_stopped),
        cmocka_unit_test(stop_and_start),
        cmocka_unit_test(memory_is_taken_by_start),
        cmocka_unit_test(ops_are_regions),
        cmocka_unit_test(attention_is_counted),
        cmocka_unit_test(verdicts),
        cmocka_unit_test(json_report),
        cmocka_unit_test(text_report),
        cmocka_unit_test(trace_report),
        cmocka_unit_test(reports_that_fail),
        cmocka_unit_test(roctx_ranges),
    };
    return cmocka_run_group_tests_name("profile", tests, NULL, NULL);
}
