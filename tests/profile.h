// What tests of the profile share: a clock that a test may stop and move, host memory that is
// counted and denied on demand, a region by its path, and reports as text. Before it:
//
//     #include <time.h>
//     #define clock_gettime test_clock // POSIX hides it from strict C11: rocq.h declares this then
//     #define ROCQ_IMPLEMENTATION
//     #include "../rocq.h"
//     ... cmocka.h

#ifndef TEST_PROFILE_H
#define TEST_PROFILE_H

#undef clock_gettime
extern int clock_gettime(int clock, struct timespec *time);

static int64_t now_ns = -1; // of a clock that stands still; -1: the real one
static int64_t tick_ns;     // what reading it takes

int test_clock(int clock, struct timespec *t) {
    assert_int_equal(clock, 1); // CLOCK_MONOTONIC
    if (now_ns < 0) return clock_gettime(clock, t);
    now_ns += tick_ns;
    t->tv_sec = now_ns / 1000000000;
    t->tv_nsec = now_ns % 1000000000;
    return 0;
}

static int64_t n_live, n_calls, fail_at = -1;

static void *counted_alloc(size_t size, void *user) {
    (void)user;
    if (n_calls++ == fail_at) return NULL;
    void *ptr = malloc(size);
    if (ptr) n_live++;
    return ptr;
}

static void counted_free(void *ptr, size_t size, void *user) {
    (void)size;
    (void)user;
    n_live--;
    free(ptr);
}

// The region with this path; fails where there is none.
static rocq_region_stats stats_of(rocq_ctx *ctx, const char *path) {
    rocq_region_stats s;
    for (int32_t i = 0; i < rocq_profile_count(ctx); i++) {
        memset(&s, 0xff, sizeof s);
        assert_int_equal(rocq_profile_region(ctx, i, &s), ROCQ_OK);
        if (strcmp(s.path, path) == 0) return s;
    }
    fail_msg("there is no region %s", path);
    return s;
}

typedef struct text {
    char data[400000];
    int64_t size, n_writes, fail_at; // fail_at: this write and all after it, -1: none
} text;

static bool write_text(const void *src, int64_t size, void *user) {
    text *t = (text *)user;
    if (t->fail_at >= 0 && t->n_writes >= t->fail_at) return false;
    t->n_writes++;
    assert_true(size > 0 && t->size + size < (int64_t)sizeof t->data);
    memcpy(t->data + t->size, src, (size_t)size);
    t->size += size;
    t->data[t->size] = '\0';
    return true;
}

static text *report(rocq_ctx *ctx, rocq_report kind) {
    static text t;
    t.size = t.n_writes = 0;
    t.fail_at = -1;
    assert_int_equal(rocq_profile_report(ctx, kind, write_text, &t), ROCQ_OK);
    return &t;
}

#endif
