// With ROCQ_NO_PROFILE the profile's calls do nothing, and say so; timers stay.
#define ROCQ_NO_PROFILE
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static bool no_write(const void *src, int64_t size, void *user) {
    (void)src;
    (void)size;
    (void)user;
    fail_msg("a report is written");
    return false;
}

static void calls_do_nothing(void **state) {
    (void)state;
    rocq_ctx *ctx = NULL;
    rocq_region_stats s;
    rocq_stats before, after;
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1};
    memset(&s, 0x5a, sizeof s);
    const rocq_region_stats untouched = s;
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    assert_int_equal(rocq_get_stats(ctx, &before), ROCQ_OK);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(rocq_profile_start(ctx, NULL), ROCQ_OK);
        assert_int_equal(rocq_region_begin(ctx, "a"), ROCQ_OK);
        assert_int_equal(rocq_region_work(ctx, 1, 1, ROCQ_ACCESS_STREAM), ROCQ_OK);
        assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
        assert_int_equal(rocq_region_end(ctx), ROCQ_OK);
    }
    assert_int_equal(rocq_profile_count(ctx), 0);
    assert_int_equal(rocq_profile_region(ctx, 0, &s), ROCQ_E_ARGUMENT);
    assert_memory_equal(&s, &untouched, sizeof s);
    for (int kind = 0; kind < 3; kind++) {
        assert_int_equal(rocq_profile_report(ctx, (rocq_report)kind, no_write, NULL), ROCQ_OK);
    }
    assert_int_equal(rocq_profile_stop(ctx), ROCQ_OK);
    assert_int_equal(rocq_profile_clear(ctx), ROCQ_OK);
    assert_int_equal(rocq_profile_start(NULL, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_region_begin(NULL, "a"), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_get_stats(ctx, &after), ROCQ_OK);
    assert_int_equal(after.n_allocs, before.n_allocs);
    rocq_close(&ctx);
}

static void timers_stay(void **state) {
    (void)state;
    rocq_ctx *ctx = NULL;
    rocq_timer t;
    double ns = -1;
    rocq_launch_cost cost;
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1};
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    assert_int_equal(rocq_timer_init(ctx, &t, ROCQ_TIMER_HOST), ROCQ_OK);
    assert_int_equal(rocq_timer_start(ctx, &t), ROCQ_OK);
    for (int64_t start = rocq_time_ns(); rocq_time_ns() < start + 1000000;) {}
    assert_int_equal(rocq_timer_stop(ctx, &t), ROCQ_OK);
    assert_int_equal(rocq_timer_read(ctx, &t, &ns), ROCQ_OK);
    assert_true(ns >= 1e6 && ns < 60e9);
    rocq_timer_free(ctx, &t);
    assert_int_equal(rocq_measure_launch(ctx, 3, &cost), ROCQ_OK);
    assert_int_equal(cost.row_ns.count, 3);
    rocq_close(&ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_do_nothing),
        cmocka_unit_test(timers_stay),
    };
    return cmocka_run_group_tests_name("profile_off", tests, NULL, NULL);
}
