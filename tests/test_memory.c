// Pools and arenas of a CPU context: classes, slabs, budgets, misuse, threads, reports, and random
// traces against a model. tests/test_memory_debug.c runs the same with ROCQ_DEBUG's guards,
// tests/test_memory_gpu.c what a GPU context adds.
#define _GNU_SOURCE // popen
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include <cjson/cJSON.h>
#include <pthread.h>

#include "ops.h"

// -- host memory, counted, and denied on demand --

typedef struct host {
    int64_t n_live, n_calls;
    int64_t fail_at;  // this call and `failing` in all are denied; -1 none
    int64_t failing;
} host;

static void *host_alloc(size_t size, void *user) {
    host *h = (host *)user;
    const int64_t call = h->n_calls++;
    if (h->fail_at >= 0 && call >= h->fail_at && call < h->fail_at + h->failing) return NULL;
    void *ptr = malloc(size);
    if (ptr) h->n_live++;
    return ptr;
}

static void host_free(void *ptr, size_t size, void *user) {
    (void)size;
    ((host *)user)->n_live--;
    free(ptr);
}

typedef struct fixture {
    host memory;
    rocq_ctx *ctx;
    int n_logged;
} fixture;

static void count_errors(rocq_log_level level, const char *message, void *user) {
    (void)message;
    if (level == ROCQ_LOG_ERROR) ((fixture *)user)->n_logged++;
}

static void open_with_budget(fixture *f, int64_t budget) {
    memset(f, 0, sizeof *f);
    f->memory.fail_at = -1;
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1, .memory_budget = budget,
                            .allocator = {host_alloc, host_free, &f->memory},
                            .log = count_errors, .log_user = f};
    assert_int_equal(rocq_open(&f->ctx, &desc), ROCQ_OK);
}

static void close_all(fixture *f) {
    rocq_close(&f->ctx);
    assert_int_equal(f->memory.n_live, 0);
}

static rocq_pool *pool_of(rocq_ctx *ctx, rocq_pool_desc desc) {
    rocq_pool *pool = NULL;
    assert_int_equal(rocq_pool_create(ctx, &pool, &desc), ROCQ_OK);
    assert_non_null(pool);
    return pool;
}

static rocq_buffer take(rocq_pool *pool, int64_t size) {
    rocq_buffer b;
    memset(&b, 0xff, sizeof b);
    assert_int_equal(rocq_pool_alloc(pool, &b, size), ROCQ_OK);
    assert_non_null(b.host);
    assert_int_equal(b.device.address, 0);
    assert_int_equal(b.size, size);
    assert_int_equal((uintptr_t)b.host % 256, 0);
    return b;
}

static void give(rocq_pool *pool, rocq_buffer *b) {
    const rocq_buffer empty = {0};
    assert_int_equal(rocq_pool_free(pool, b), ROCQ_OK);
    assert_memory_equal(b, &empty, sizeof empty);
}

static rocq_pool_stats total(rocq_pool *pool) {
    rocq_pool_stats s;
    assert_int_equal(rocq_pool_get_stats(pool, -1, &s), ROCQ_OK);
    return s;
}

// Size of the class that serves a request.
static int64_t class_for(int64_t size) {
    return rocq__default_size(rocq__default_class(size + ROCQ__GUARD));
}

// -- classes --

static void a_class(int32_t c, int64_t size) { // size must fall into class c
    const int64_t block = rocq__default_size(c), below = c > 0 ? rocq__default_size(c - 1) : 0;
    if (rocq__default_class(size) != c || size > block || size <= below || block % 256 != 0 ||
        (size >= 2048 && (block - size) * 8 > block)) {
        fail_msg("%lld bytes: class %d of %lld", (long long)size, rocq__default_class(size),
                 (long long)block);
    }
}

static void default_classes_waste_an_eighth_at_most(void **state) {
    (void)state;
    int32_t c = 0;
    for (int64_t size = 1; size <= 4 << 20; size++) { // every size
        if (size > rocq__default_size(c)) c++;
        a_class(c, size);
    }
    for (; c < ROCQ__CLASSES; c++) { // both ends of every class
        a_class(c, rocq__default_size(c - 1) + 1);
        a_class(c, rocq__default_size(c));
    }
    assert_int_equal(rocq__default_size(ROCQ__CLASSES - 1), (int64_t)1 << 47);
}

static void the_callers_classes_go_first(void **state) {
    (void)state;
    fixture f;
    open_with_budget(&f, 0);
    const int64_t sizes[3] = {256, 1024, 6400};
    rocq_pool *pool = pool_of(f.ctx, (rocq_pool_desc){.classes = sizes, .n_classes = 3});
    rocq_pool_stats s;
    const int64_t expected[] = {256, 1024, 6400, 6656, 7168, 7680, 8192, 9216};
    for (int32_t c = 0; c < 8; c++) {
        assert_int_equal(rocq_pool_get_stats(pool, c, &s), ROCQ_OK);
        assert_int_equal(s.block_size, expected[c]);
    }
    for (int64_t size = 1; size < 20000; size += 13) {
        rocq_buffer b = take(pool, size);
        const int64_t with = size + ROCQ__GUARD;
        const int64_t block = with <= 256 ? 256 : with <= 1024 ? 1024 : with <= 6400 ? 6400
                              : class_for(size);
        assert_int_equal(total(pool).block_bytes, block);
        give(pool, &b);
    }
    rocq_pool_destroy(&pool);
    close_all(&f);
}

static void wrong_descs_are_refused(void **state) {
    (void)state;
    fixture f;
    open_with_budget(&f, 0);
    static const int64_t zero[] = {0}, odd[] = {100}, falling[] = {512, 256}, twice[] = {256, 256},
                         huge[] = {((int64_t)1 << 47) + 256};
    const struct {
        rocq_pool_desc desc;
        rocq_result result;
    } cases[] = {
        {{.memory = ROCQ_MEMORY_DEVICE}, ROCQ_E_UNSUPPORTED},
        {{.memory = (rocq_memory)4}, ROCQ_E_ARGUMENT},
        {{.memory = (rocq_memory)-1}, ROCQ_E_ARGUMENT},
        {{.n_classes = 1}, ROCQ_E_ARGUMENT},
        {{.classes = zero, .n_classes = 1}, ROCQ_E_ARGUMENT},
        {{.classes = zero, .n_classes = -1}, ROCQ_E_ARGUMENT},
        {{.classes = odd, .n_classes = 1}, ROCQ_E_ARGUMENT},
        {{.classes = falling, .n_classes = 2}, ROCQ_E_ARGUMENT},
        {{.classes = twice, .n_classes = 2}, ROCQ_E_ARGUMENT},
        {{.classes = huge, .n_classes = 1}, ROCQ_E_ARGUMENT},
        {{.slab_size = -1}, ROCQ_E_ARGUMENT},
        {{.budget = -2}, ROCQ_E_ARGUMENT}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        rocq_pool *pool = (rocq_pool *)&f;
        assert_int_equal(rocq_pool_create(f.ctx, &pool, &cases[i].desc), cases[i].result);
        assert_null(pool);
        assert_true(strlen(rocq_error(f.ctx)) > 0);
    }
    rocq_pool *pool = (rocq_pool *)&f;
    assert_int_equal(rocq_pool_create(NULL, &pool, NULL), ROCQ_E_ARGUMENT);
    assert_null(pool);
    assert_int_equal(rocq_pool_create(f.ctx, NULL, NULL), ROCQ_E_ARGUMENT);
    rocq_pool_destroy(NULL);
    rocq_pool_destroy(&pool);
    assert_int_equal(rocq_pool_create(f.ctx, &pool, NULL), ROCQ_OK);
    rocq_pool_destroy(&pool);
    assert_null(pool);
    rocq_pool_destroy(&pool);
    for (rocq_memory m = ROCQ_MEMORY_DEFAULT; m <= ROCQ_MEMORY_PINNED; m++) { // all host memory
                                                                              // here
        pool = pool_of(f.ctx, (rocq_pool_desc){.memory = m});
        rocq_buffer b = take(pool, 1);
        give(pool, &b);
        rocq_pool_destroy(&pool);
    }
    close_all(&f);
}

// -- blocks --

static void freed_blocks_are_handed_out_again(void **state) {
    (void)state;
    fixture f;
    open_with_budget(&f, 0);
    rocq_pool *pool = pool_of(f.ctx, (rocq_pool_desc){0});
    rocq_buffer b[64];
    for (int i = 0; i < 64; i++) {
        b[i] = take(pool, 3000 + i);
        memset(b[i].host, i, (size_t)b[i].size);
    }
    for (int i = 0; i < 64; i++) { // nobody wrote into anybody
        for (int64_t k = 0; k < b[i].size; k++)
            assert_int_equal(((unsigned char *)b[i].host)[k], i);
    }
    const rocq_pool_stats full = total(pool);
    assert_int_equal(full.n_requests, 64);
    assert_int_equal(full.n_live, 64);
    assert_int_equal(full.live_bytes, 64 * 3000 + 63 * 32);
    int64_t block_bytes = 0;
    for (int i = 0; i < 64; i++) block_bytes += class_for(b[i].size);
    assert_int_equal(full.block_bytes, block_bytes);
    const int64_t n_allocs = f.ctx->stats.n_allocs;
    for (int i = 0; i < 1000; i++) {
        void *const was = b[i % 64].host;
        const int64_t size = b[i % 64].size;
        give(pool, &b[i % 64]);
        b[i % 64] = take(pool, size);
        assert_ptr_equal(b[i % 64].host, was); // the one freed last is warm in the caches
    }
    assert_int_equal(f.ctx->stats.n_allocs, n_allocs);
    for (int i = 0; i < 64; i++) give(pool, &b[i]);
    const rocq_pool_stats s = total(pool);
    assert_int_equal(s.n_requests, 1064);
    assert_int_equal(s.n_hits, 1064 - (full.n_requests - full.n_hits));
    assert_int_equal(s.n_frees, 1064);
    assert_int_equal(s.n_live, 0);
    assert_int_equal(s.live_bytes, 0);
    assert_int_equal(s.block_bytes, 0);
    assert_int_equal(s.peak_bytes, full.live_bytes);
    assert_true(s.internal == 0.0 && s.external == 1.0);
    rocq_pool_destroy(&pool);
    close_all(&f);
}

// A class begins with 64 KiB, and each slab doubles it, up to slab_size.
static void slabs_double(void **state) {
    (void)state;
    fixture f;
    open_with_budget(&f, 0);
    rocq_pool *pool = pool_of(f.ctx, (rocq_pool_desc){.slab_size = 300000});
    const int64_t expected[] = {65536, 131072, 262144, 524288, 524288 + 299008};
    int64_t reserves = 0;
    rocq_buffer b[200];
    for (int i = 0; i < 200; i++) {
        b[i] = take(pool, 4096 - ROCQ__GUARD);
        const rocq_pool_stats s = total(pool);
        if (s.n_reserves == reserves) continue;
        assert_int_equal(s.reserved_bytes, expected[reserves]);
        reserves = s.n_reserves;
        assert_int_equal(s.n_requests - s.n_hits, reserves);
    }
    assert_int_equal(reserves, 5);
    for (int i = 0; i < 200; i++) give(pool, &b[i]);
    rocq_pool_destroy(&pool);
    close_all(&f);
}

static void large_blocks_are_taken_alone_and_kept(void **state) {
    (void)state;
    fixture f;
    open_with_budget(&f, 0);
    rocq_pool *pool = pool_of(f.ctx, (rocq_pool_desc){.slab_size = 1 << 20});
    const int64_t before = f.ctx->stats.live_bytes;
    rocq_buffer a = take(pool, (256 << 10) - ROCQ__GUARD), b = take(pool, 256 << 10 | 1);
    assert_int_equal(total(pool).reserved_bytes, (256 << 10) + (288 << 10));
    rocq_buffer c = take(pool, 256 << 10 | 1); // of a slab's quarter: two are taken at once now
    assert_int_equal(total(pool).reserved_bytes, (256 << 10) + 2 * (288 << 10));
    void *const was = b.host;
    give(pool, &b);
    assert_int_equal(total(pool).n_free, 1);
    b = take(pool, (288 << 10) - ROCQ__GUARD);
    assert_ptr_equal(b.host, was);
    assert_int_equal(total(pool).n_reserves, 3);
    give(pool, &a);
    give(pool, &b);
    give(pool, &c);
    assert_int_equal(rocq_pool_trim(pool, 0), ROCQ_OK);
    assert_int_equal(total(pool).reserved_bytes, 0);
    assert_int_equal(total(pool).n_trims, 3);
    assert_true(f.ctx->stats.live_bytes - before < 4096); // descriptors stay
    rocq_pool_destroy(&pool);
    close_all(&f);
}

// Before memory is taken, a free block of up to twice the class's size serves, the smallest first.
static void larger_blocks_serve_before_memory_is_taken(void **state) {
    (void)state;
    fixture f;
    open_with_budget(&f, 0);
    for (int exact = 0; exact < 2; exact++) {
        rocq_pool *pool = pool_of(f.ctx, (rocq_pool_desc){.exact = exact != 0});
        const int64_t less = ROCQ__GUARD;
        rocq_buffer a = take(pool, (4 << 20) - less), b = take(pool, (7 << 20) - less), c;
        void *const four = a.host, *const seven = b.host;
        give(pool, &a);
        give(pool, &b);
        a = take(pool, (3 << 20) - less);
        b = take(pool, (3 << 20) - less); // seven is more than twice this
        c = take(pool, (6 << 20) - less);
        assert_int_equal(a.host == four, !exact);
        assert_int_equal(c.host == seven, !exact);
        assert_ptr_not_equal(b.host, seven);
        const rocq_pool_stats s = total(pool);
        assert_int_equal(s.n_hits, exact ? 0 : 2);
        assert_int_equal(s.block_bytes, exact ? 12 << 20 : 14 << 20);
        give(pool, &a);
        give(pool, &b);
        give(pool, &c);
        rocq_pool_destroy(&pool);
    }
    close_all(&f);
}

static void what_is_reserved_ahead_is_there(void **state) {
    (void)state;
    fixture f;
    open_with_budget(&f, 0);
    for (int64_t budget = -1; budget <= 0; budget++) {
        rocq_pool *pool = pool_of(f.ctx, (rocq_pool_desc){.budget = budget});
        rocq_buffer b[100], none = {0}, same = none;
        if (budget < 0) {
            assert_int_equal(rocq_pool_alloc(pool, &none, 5000), ROCQ_E_BUDGET);
            assert_memory_equal(&none, &same, sizeof none);
        }
        assert_int_equal(rocq_pool_reserve(pool, 5000, 100), ROCQ_OK);
        assert_int_equal(rocq_pool_reserve(pool, 5000, 100), ROCQ_OK);
        assert_int_equal(rocq_pool_reserve(pool, 40 << 20, 2), ROCQ_OK); // large ones
        assert_int_equal(rocq_pool_reserve(pool, 1, 0), ROCQ_OK);
        assert_int_equal(total(pool).n_free, 102);
        assert_int_equal(total(pool).n_reserves, 3);
        const int64_t n_allocs = f.ctx->stats.n_allocs;
        for (int i = 0; i < 100; i++) b[i] = take(pool, 5000);
        rocq_buffer large[2] = {take(pool, 40 << 20), take(pool, 40 << 20)};
        assert_int_equal(f.ctx->stats.n_allocs, n_allocs);
        assert_true(total(pool).hit_rate == 1.0);
        if (budget < 0) {
            assert_int_equal(rocq_pool_alloc(pool, &none, 5000), ROCQ_E_BUDGET);
            assert_memory_equal(&none, &same, sizeof none);
        }
        for (int i = 0; i < 100; i++) give(pool, &b[i]);
        for (int i = 0; i < 2; i++) give(pool, &large[i]);
        assert_int_equal(rocq_pool_reserve(pool, 0, 1), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_pool_reserve(pool, INT64_MAX, 1), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_pool_reserve(pool, 1, -1), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_pool_reserve(NULL, 1, 1), ROCQ_E_ARGUMENT);
        rocq_pool_destroy(&pool);
    }
    close_all(&f);
}

// What cannot be counted, or is over a budget, is found out before any memory is taken.
static void impossible_reserves_take_nothing(void **state) {
    (void)state;
    static const struct {
        int64_t size, n, of_pool, of_context;
        rocq_result want;
    } cases[] = {
        {1 << 20, INT64_MAX, 0, 0, ROCQ_E_OVERFLOW},
        {1, INT64_MAX, 0, 0, ROCQ_E_OVERFLOW},
        {256, INT64_MAX / 256, 0, 0, ROCQ_E_OVERFLOW},   // bytes fit, with those there are do not
        {1, (int64_t)INT32_MAX + 1, 0, 0, ROCQ_E_OVERFLOW}, // more than descriptors can be
        {1 << 20, INT64_MAX, 1 << 20, 0, ROCQ_E_OVERFLOW},
        {5000, 10000, 1 << 20, 0, ROCQ_E_BUDGET},
        {5000, 10000, 0, 1 << 20, ROCQ_E_BUDGET},
        {1 << 20, 2, 1 << 20, 0, ROCQ_E_BUDGET}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fixture f;
        open_with_budget(&f, cases[i].of_context);
        rocq_pool *pool = pool_of(f.ctx, (rocq_pool_desc){.budget = cases[i].of_pool});
        assert_int_equal(rocq_pool_reserve(pool, 1000, 3), ROCQ_OK);
        const rocq_pool_stats before = total(pool);
        const int64_t calls = f.memory.n_calls, used = f.ctx->budget_used;
        f.memory.fail_at = calls + 50; // the machine's end, if it comes to that
        f.memory.failing = INT64_MAX / 2;
        assert_int_equal(rocq_pool_reserve(pool, cases[i].size, cases[i].n), cases[i].want);
        assert_int_equal(f.memory.n_calls, calls);
        assert_int_equal(f.ctx->budget_used, used);
        assert_int_equal(f.n_logged, 1);
        assert_true(strlen(rocq_error(f.ctx)) > 10);
        const rocq_pool_stats after = total(pool);
        assert_memory_equal(&before, &after, sizeof before);
        rocq_pool_destroy(&pool);
        close_all(&f);
    }
}

// -- budgets and trim --

static void budgets_hold(void **state) {
    (void)state;
    for (int of_context = 0; of_context < 2; of_context++) {
        fixture f;
        open_with_budget(&f, of_context ? 1 << 20 : 0);
        rocq_pool *pool = pool_of(f.ctx, (rocq_pool_desc){.budget = of_context ? 0 : 1 << 20,
                                                          .slab_size = 1 << 18});
        rocq_buffer b[8], none, same;
        memset(&none, 0x5a, sizeof none);
        same = none;
        for (int i = 0; i < 8; i++) b[i] = take(pool, (128 << 10) - ROCQ__GUARD);
        assert_int_equal(total(pool).reserved_bytes, 1 << 20);
        assert_int_equal(f.n_logged, 0);
        assert_int_equal(rocq_pool_alloc(pool, &none, 1), ROCQ_E_BUDGET);
        assert_memory_equal(&none, &same, sizeof none);
        assert_int_equal(f.n_logged, 1);
        assert_non_null(strstr(rocq_error(f.ctx), "budget"));

        // Free blocks of other classes make room, only as many as are needed, and that is no
        // failure.
        assert_int_equal(rocq_pool_alloc(pool, NULL, 1), ROCQ_E_ARGUMENT);
        char said[512];
        snprintf(said, sizeof said, "%s", rocq_error(f.ctx));
        f.n_logged = 0;
        for (int i = 0; i < 4; i++) give(pool, &b[i]);
        rocq_buffer c = take(pool, (160 << 10) - ROCQ__GUARD);
        assert_int_equal(total(pool).reserved_bytes, (6 * 128 + 160) << 10);
        assert_int_equal(total(pool).n_trims, 2);
        assert_int_equal(f.n_logged, 0);
        assert_string_equal(rocq_error(f.ctx), said);
        give(pool, &c);
        c = take(pool, (384 << 10) - ROCQ__GUARD); // takes all that is free
        assert_int_equal(total(pool).reserved_bytes, (4 * 128 + 384) << 10);
        give(pool, &c);
        // What no empty pool could hold takes no slab away.
        assert_int_equal(rocq_pool_alloc(pool, &none, 2 << 20), ROCQ_E_BUDGET);
        assert_int_equal(total(pool).n_free, 1);
        assert_int_equal(rocq_pool_alloc(pool, &none, (1 << 20) - ROCQ__GUARD), ROCQ_E_BUDGET);
        assert_int_equal(total(pool).n_free, 0);
        assert_int_equal(f.n_logged, 2);
        assert_int_equal(rocq_pool_reserve(pool, 1 << 20, 1), ROCQ_E_BUDGET);
        for (int i = 4; i < 8; i++) give(pool, &b[i]);
        rocq_pool_destroy(&pool);
        if (of_context) { // all of the budget is there again
            assert_int_equal(rocq_buffer_alloc(f.ctx, &c, 1 << 20), ROCQ_OK);
            assert_int_equal(rocq_buffer_free(f.ctx, &c), ROCQ_OK);
        }
        close_all(&f);
    }
}

static void trim_gives_back_whole_slabs(void **state) {
    (void)state;
    fixture f;
    open_with_budget(&f, 0);
    rocq_pool *pool = pool_of(f.ctx, (rocq_pool_desc){0});
    enum { N = 400 };
    rocq_buffer b[N], stale;
    for (int i = 0; i < N; i++) b[i] = take(pool, 16000);
    const rocq_pool_stats full = total(pool);
    assert_true(full.n_reserves > 3);
    assert_int_equal(rocq_pool_trim(pool, 0), ROCQ_OK);
    assert_true(total(pool).reserved_bytes <= full.reserved_bytes);
    const int64_t least = total(pool).reserved_bytes;
    stale = b[1];
    for (int i = 1; i < N; i++) give(pool, &b[i]);
    assert_int_equal(rocq_pool_trim(pool, least), ROCQ_OK); // no more than that is reserved
    assert_int_equal(total(pool).reserved_bytes, least);
    assert_int_equal(rocq_pool_trim(pool, least / 2), ROCQ_OK);
    assert_true(total(pool).reserved_bytes <= least / 2);
    assert_int_equal(rocq_pool_trim(pool, 0), ROCQ_OK);
    rocq_pool_stats s = total(pool);
    assert_true(s.reserved_bytes > 0 && s.reserved_bytes <= 65536); // b[0]'s slab
    assert_int_equal(s.n_live, 1);
    assert_int_equal(s.reserved_peak, full.reserved_bytes);
    assert_int_equal(s.n_reserves - s.n_trims, 1);

    // Descriptors of slabs that are gone serve new ones, and old tickets do not fit them.
    const int64_t n_blocks = pool->n_blocks;
    for (int i = 1; i < N; i++) b[i] = take(pool, 15000);
    assert_true(pool->n_blocks < n_blocks + 10);
    assert_int_equal(rocq_pool_free(pool, &stale), ROCQ_E_ARGUMENT);
    for (int i = 0; i < N; i++) give(pool, &b[i]);
    assert_int_equal(rocq_pool_trim(pool, -1), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_pool_trim(NULL, 0), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_pool_trim(pool, 0), ROCQ_OK);
    assert_int_equal(total(pool).reserved_bytes, 0);
    assert_int_equal(f.ctx->budget_used, 0);
    rocq_pool_destroy(&pool);
    close_all(&f);
}

// -- misuse --

static void refused(rocq_pool *pool, rocq_buffer b) {
    const rocq_buffer same = b;
    const rocq_pool_stats before = total(pool);
    assert_int_equal(rocq_pool_free(pool, &b), ROCQ_E_ARGUMENT);
    assert_memory_equal(&b, &same, sizeof b);
    const rocq_pool_stats after = total(pool);
    assert_memory_equal(&before, &after, sizeof before);
}

static void misuse_is_found(void **state) {
    (void)state;
    fixture f;
    open_with_budget(&f, 0);
    rocq_pool *pool = pool_of(f.ctx, (rocq_pool_desc){0}),
              *other = pool_of(f.ctx, (rocq_pool_desc){0});
    rocq_buffer a = take(pool, 5000), copy = a, theirs = take(other, 5000);
    refused(other, a);
    refused(pool, theirs);
    refused(pool, rocq__buffer_slice(&a, 0, 4999));
    refused(pool, rocq__buffer_slice(&a, 256, 5000));
    refused(pool, rocq_buffer_from_host(a.host, a.size));
    refused(pool, rocq_buffer_from_host(&f, 5000));
    rocq_buffer forged = a;
    forged.ticket += (uint64_t)1 << 32;
    refused(pool, forged);
    forged = a;
    forged.ticket ^= 1;
    refused(pool, forged);
    forged.ticket = UINT64_MAX;
    refused(pool, forged);
    give(pool, &a);
    refused(pool, copy); // freed before, through another copy
    rocq_buffer again = take(pool, 5000);
    assert_ptr_equal(again.host, copy.host);
    refused(pool, copy); // and even where somebody else has it by now
    forged = again;
    give(pool, &again);
    forged.ticket += (uint64_t)1 << 32; // generation of the free block
    forged.size = 0;
    refused(pool, forged);
    give(pool, &a); // an empty buffer is harmless
    assert_int_equal(rocq_pool_free(pool, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_pool_free(NULL, &a), ROCQ_E_ARGUMENT);

    const int64_t sizes[] = {0, -1, INT64_MIN, ((int64_t)1 << 47) + 1, INT64_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const rocq_buffer same = copy;
        assert_int_equal(rocq_pool_alloc(pool, &copy, sizes[i]), ROCQ_E_ARGUMENT);
        assert_memory_equal(&copy, &same, sizeof copy);
    }
    assert_int_equal(rocq_pool_alloc(pool, NULL, 1), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_pool_alloc(NULL, &copy, 1), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_pool_alloc(pool, &copy, (int64_t)1 << 46), ROCQ_E_MEMORY);

    rocq_pool_stats s;
    assert_int_equal(rocq_pool_get_stats(pool, -2, &s), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_pool_get_stats(pool, ROCQ__CLASSES, &s), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_pool_get_stats(pool, 0, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_pool_get_stats(NULL, 0, &s), ROCQ_E_ARGUMENT);
    give(other, &theirs);
    rocq_pool_destroy(&other);
    rocq_pool_destroy(&pool);
    close_all(&f);
}

#ifdef ROCQ_DEBUG
static void guards_find_an_overrun(void **state) {
    (void)state;
    fixture f;
    open_with_budget(&f, 0);
    rocq_pool *pool = pool_of(f.ctx, (rocq_pool_desc){0});
    const int64_t sizes[] = {1, 255, 256, 5000, 1 << 20, 5 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int64_t at = 0; at < ROCQ__GUARD; at += 21) {
            rocq_buffer b = take(pool, sizes[i]), copy = b;
            memset(b.host, 0xa5, (size_t)b.size);
            ((char *)b.host)[b.size + at] ^= 1;
            assert_int_equal(rocq_pool_free(pool, &b), ROCQ_E_CORRUPT);
            assert_memory_equal(&b, &copy, sizeof b);
            refused(pool, b); // it is out of use
            rocq_buffer next = take(pool, sizes[i]);
            assert_ptr_not_equal(next.host, copy.host);
            give(pool, &next);
        }
    }
    const rocq_pool_stats s = total(pool);
    assert_int_equal(s.n_live, 0);
    assert_int_equal(s.live_bytes, 0);
    assert_int_equal(rocq_pool_trim(pool, 0), ROCQ_OK);
    assert_true(total(pool).reserved_bytes > 0);
    rocq_pool_destroy(&pool);
    close_all(&f);
}
#endif

// -- reports --

typedef struct text {
    char data[200000];
    int64_t size;
    int64_t most; // a write that would exceed it fails
} text;

static bool append(const void *src, int64_t size, void *user) {
    text *t = (text *)user;
    if (t->size + size > t->most) return false;
    memcpy(t->data + t->size, src, (size_t)size);
    t->size += size;
    t->data[t->size] = 0;
    return true;
}

static void same_numbers(const cJSON *json, const rocq_pool_stats *s) {
    const struct {
        const char *name;
        double value;
    } fields[] = {
        {"block_size", (double)s->block_size}, {"n_requests", (double)s->n_requests},
        {"n_hits", (double)s->n_hits}, {"n_frees", (double)s->n_frees},
        {"n_live", (double)s->n_live}, {"n_free", (double)s->n_free},
        {"live_bytes", (double)s->live_bytes}, {"peak_bytes", (double)s->peak_bytes},
        {"block_bytes", (double)s->block_bytes}, {"reserved_bytes", (double)s->reserved_bytes},
        {"reserved_peak", (double)s->reserved_peak}, {"n_reserves", (double)s->n_reserves},
        {"n_trims", (double)s->n_trims}, {"hit_rate", s->hit_rate}, {"internal", s->internal},
        {"external", s->external}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        const cJSON *field = cJSON_GetObjectItemCaseSensitive(json, fields[i].name);
        assert_true(cJSON_IsNumber(field));
        assert_true(fabs(field->valuedouble - fields[i].value) <= 1e-6);
    }
    assert_int_equal(cJSON_GetArraySize(json), sizeof fields / sizeof fields[0]);
}

static void reports_are_whole(void **state) {
    (void)state;
    fixture f;
    open_with_budget(&f, 0);
    rocq_pool *pool = pool_of(f.ctx, (rocq_pool_desc){0});
    static text t;
    for (int used = 0; used < 2; used++) {
        rocq_buffer b[40];
        for (int i = 0; used && i < 40; i++) b[i] = take(pool, 100 + 3000 * (int64_t)i);
        for (int i = 0; used && i < 30; i++) give(pool, &b[i]);
        memset(&t, 0, sizeof t);
        t.most = sizeof t.data - 1;
        assert_int_equal(rocq_pool_report(pool, ROCQ_REPORT_JSON, append, &t), ROCQ_OK);
        cJSON *json = cJSON_ParseWithOpts(t.data, NULL, true);
        assert_non_null(json);
        const rocq_pool_stats all = total(pool);
        same_numbers(cJSON_GetObjectItemCaseSensitive(json, "total"), &all);
        const cJSON *of, *classes = cJSON_GetObjectItemCaseSensitive(json, "classes");
        int32_t n = 0, c = 0;
        rocq_pool_stats s;
        cJSON_ArrayForEach(of, classes) {
            do assert_int_equal(rocq_pool_get_stats(pool, c++, &s), ROCQ_OK);
            while (s.n_reserves == 0);
            same_numbers(of, &s);
            n++;
        }
        assert_int_equal(n > 0, used);
        for (; rocq_pool_get_stats(pool, c, &s) == ROCQ_OK; c++) assert_int_equal(s.n_reserves, 0);
        cJSON_Delete(json);

        t.size = 0;
        assert_int_equal(rocq_pool_report(pool, ROCQ_REPORT_TEXT, append, &t), ROCQ_OK);
        int32_t lines = 0;
        for (int64_t i = 0; i < t.size; i++) lines += t.data[i] == '\n';
        assert_int_equal(lines, n + 2);
        for (int i = 30; used && i < 40; i++) give(pool, &b[i]);
    }
    for (rocq_report kind = ROCQ_REPORT_TEXT; kind <= ROCQ_REPORT_JSON; kind++) {
        for (t.most = 0; t.most < 1000; t.most += 50) {
            t.size = 0;
            assert_int_equal(rocq_pool_report(pool, kind, append, &t), ROCQ_E_IO);
        }
    }
    assert_int_equal(rocq_pool_report(pool, ROCQ_REPORT_TRACE, append, &t), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_pool_report(pool, ROCQ_REPORT_TEXT, NULL, &t), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_pool_report(NULL, ROCQ_REPORT_TEXT, append, &t), ROCQ_E_ARGUMENT);
    rocq_pool_destroy(&pool);
    close_all(&f);
}

// -- a million random calls against a model --

enum { MODEL_BLOCKS = 300 };

typedef struct model {
    rocq_pool *pool;
    rocq_buffer live[MODEL_BLOCKS], freed[16]; // copies of freed ones
    uint64_t stamp[MODEL_BLOCKS];              // at both ends of a block
    int64_t n_live, n_requests, n_frees, live_bytes, block_bytes, peak_bytes;
    const int64_t *classes;
    int32_t n_classes;
} model;

// Size of a live block, which is that of its request's class, or up to twice that.
static int64_t model_block(const model *m, const rocq_buffer *b) {
    const int64_t size =
        m->pool->classes[m->pool->blocks[(uint32_t)b->ticket].size_class].block_size;
    int64_t own = class_for(b->size);
    for (int32_t c = m->n_classes - 1; c >= 0; c--) {
        if (b->size + ROCQ__GUARD <= m->classes[c]) own = m->classes[c];
    }
    assert_true(m->pool->exact ? size == own : size >= own && size <= 2 * own);
    return size;
}

static void stamp(const rocq_buffer *b, uint64_t value) {
    memcpy(b->host, &value, (size_t)(b->size < 8 ? b->size : 8));
    if (b->size >= 16) memcpy((char *)b->host + b->size - 8, &value, 8);
}

static bool stamped(const rocq_buffer *b, uint64_t value) {
    return memcmp(b->host, &value, (size_t)(b->size < 8 ? b->size : 8)) == 0 &&
           (b->size < 16 || memcmp((char *)b->host + b->size - 8, &value, 8) == 0);
}

static void model_alloc(model *m) {
    int64_t size = 1 + (int64_t)(random_u64() >> (64 - random_below(19) - 1));
    if (random_below(1000) == 0) size *= 16; // now and then the large path
    rocq_buffer *b = &m->live[m->n_live];
    const rocq_result result = rocq_pool_alloc(m->pool, b, size);
    assert_true(result == ROCQ_OK || (result == ROCQ_E_BUDGET && m->pool->budget > 0));
    if (result != ROCQ_OK) return;
    assert_true(b->host && b->size == size && (uintptr_t)b->host % 256 == 0);
    m->stamp[m->n_live] = random_u64();
    stamp(b, m->stamp[m->n_live++]);
    m->n_requests++;
    m->live_bytes += size;
    m->block_bytes += model_block(m, b);
    if (m->peak_bytes < m->live_bytes) m->peak_bytes = m->live_bytes;
}

static void model_free(model *m) {
    const int64_t i = random_below(m->n_live);
    rocq_buffer *b = &m->live[i];
    assert_true(stamped(b, m->stamp[i]));
    m->live_bytes -= b->size;
    m->block_bytes -= model_block(m, b);
    m->freed[random_below(16)] = *b;
    assert_int_equal(rocq_pool_free(m->pool, b), ROCQ_OK);
    m->live[i] = m->live[--m->n_live];
    m->stamp[i] = m->stamp[m->n_live];
    m->n_frees++;
}

static void model_compare(const model *m) {
    const rocq_pool_stats t = total(m->pool);
    rocq_pool_stats s, sum;
    memset(&sum, 0, sizeof sum);
    for (int32_t c = 0; rocq_pool_get_stats(m->pool, c, &s) == ROCQ_OK; c++) {
        sum.n_requests += s.n_requests;
        sum.n_hits += s.n_hits;
        sum.n_frees += s.n_frees;
        sum.n_live += s.n_live;
        sum.n_free += s.n_free;
        sum.live_bytes += s.live_bytes;
        sum.block_bytes += s.block_bytes;
        sum.reserved_bytes += s.reserved_bytes;
        sum.n_reserves += s.n_reserves;
        sum.n_trims += s.n_trims;
        assert_int_equal((s.n_live + s.n_free) * s.block_size, s.reserved_bytes);
        assert_true(s.reserved_peak >= s.reserved_bytes && s.peak_bytes >= s.live_bytes);
    }
    assert_int_equal(t.n_requests, m->n_requests);
    assert_int_equal(t.n_frees, m->n_frees);
    assert_int_equal(t.n_live, m->n_live);
    assert_int_equal(t.live_bytes, m->live_bytes);
    assert_int_equal(t.block_bytes, m->block_bytes);
    assert_int_equal(t.peak_bytes, m->peak_bytes);
    assert_int_equal(t.n_requests, sum.n_requests);
    assert_int_equal(t.n_hits, sum.n_hits);
    assert_int_equal(t.n_free, sum.n_free);
    assert_int_equal(t.live_bytes, sum.live_bytes);
    assert_int_equal(t.block_bytes, sum.block_bytes);
    assert_int_equal(t.reserved_bytes, sum.reserved_bytes);
    assert_int_equal(t.reserved_bytes, m->pool->ctx->budget_used);
    assert_int_equal(t.n_reserves, sum.n_reserves);
    assert_int_equal(t.n_trims, sum.n_trims);
    assert_true(m->pool->budget <= 0 || t.reserved_peak <= m->pool->budget);
}

static void random_traces_agree_with_a_model(void **state) {
    (void)state;
    static const int64_t classes[] = {256, 4096, 65536, 1 << 20};
    const rocq_pool_desc descs[] = {
        {.slab_size = 1 << 20},
        {.slab_size = 1 << 20, .budget = 6 << 20, .exact = true},
        {.slab_size = 1 << 18, .budget = 6 << 20, .thread_safe = true},
        {.slab_size = 1 << 20, .classes = classes, .n_classes = 4, .exact = true}};
    random_state = 4;
    for (size_t d = 0; d < sizeof descs / sizeof descs[0]; d++) {
        fixture f;
        open_with_budget(&f, 0);
        static model m;
        memset(&m, 0, sizeof m);
        m.pool = pool_of(f.ctx, descs[d]);
        m.classes = descs[d].classes;
        m.n_classes = descs[d].n_classes;
        int64_t most = 1; // live blocks the trace tends to
        for (int i = 0; i < 250000; i++) {
            if (i % 5000 == 0) most = 1 + random_below(MODEL_BLOCKS);
            const int64_t what = random_below(1000);
            if (what < 5) {
                rocq_buffer stale = m.freed[random_below(16)];
                assert_int_equal(rocq_pool_free(m.pool, &stale),
                                 stale.host ? ROCQ_E_ARGUMENT : ROCQ_OK);
            } else if (what == 5 && i % 10 == 0) {
                const int64_t keep = random_below(8 << 20);
                assert_int_equal(rocq_pool_trim(m.pool, keep), ROCQ_OK);
            } else if (random_below(2 * most) >= m.n_live && m.n_live < MODEL_BLOCKS) {
                model_alloc(&m);
            } else if (m.n_live > 0) {
                model_free(&m);
            }
            if (i % 500 == 0) model_compare(&m);
        }
        while (m.n_live > 0) model_free(&m);
        model_compare(&m);
        rocq_pool_destroy(&m.pool);
        assert_int_equal(f.ctx->budget_used, 0);
        close_all(&f);
    }
}

// -- memory that runs out --

// Everything once, with what fails left out. The first code that is not OK, if any.
static rocq_result use_everything(rocq_ctx *ctx) {
    rocq_result worst = ROCQ_OK;
    rocq_pool *pool;
    const int64_t classes[] = {1024, 2048};
    const rocq_pool_desc desc = {.classes = classes, .n_classes = 2, .slab_size = 1 << 20};
    if (rocq_pool_create(ctx, &pool, &desc) != ROCQ_OK) {
        assert_null(pool);
        return ROCQ_E_MEMORY;
    }
    rocq_buffer b[60];
    memset(b, 0, sizeof b);
    for (int i = 0; i < 60; i++) {
        const rocq_buffer before = b[i];
        const rocq_result result = rocq_pool_alloc(pool, &b[i], i % 7 == 0 ? 500000 : 900 * i + 1);
        if (result != ROCQ_OK) assert_memory_equal(&b[i], &before, sizeof before);
        if (result != ROCQ_OK && worst == ROCQ_OK) worst = result;
        if (i % 3 == 0) assert_int_equal(rocq_pool_free(pool, &b[i]), ROCQ_OK);
    }
    const rocq_result reserved = rocq_pool_reserve(pool, 3000, 1000);
    if (worst == ROCQ_OK) worst = reserved;
    for (int i = 0; i < 60; i++) assert_int_equal(rocq_pool_free(pool, &b[i]), ROCQ_OK);
    assert_int_equal(rocq_pool_trim(pool, 0), ROCQ_OK);
    assert_int_equal(total(pool).reserved_bytes, 0);
    rocq_pool_destroy(&pool);
    return worst;
}

static void every_allocation_may_fail(void **state) {
    (void)state;
    int64_t denied = 0, survived = 0;
    for (int64_t failing = 1; failing <= INT32_MAX; failing += INT32_MAX - 1) { // one, or all from
                                                                                // it
        for (int64_t n = 0;; n++) {
            fixture f;
            open_with_budget(&f, 0);
            f.memory.fail_at = f.memory.n_calls + n;
            f.memory.failing = failing;
            const int64_t live = f.memory.n_live;
            const rocq_result result = use_everything(f.ctx);
            const bool reached = f.memory.n_calls > f.memory.fail_at;
            assert_true(result == ROCQ_OK || (reached && result == ROCQ_E_MEMORY));
            assert_int_equal(f.memory.n_live, live);
            assert_int_equal(f.ctx->budget_used, 0);
            if (result == ROCQ_OK) assert_int_equal(f.n_logged, 0);
            f.memory.fail_at = -1;
            assert_int_equal(use_everything(f.ctx), ROCQ_OK);
            close_all(&f);
            if (!reached) break;
            denied++;
            survived += result == ROCQ_OK;
        }
    }
    assert_true(denied > 100 && survived > 0); // by giving back free slabs, or taking smaller ones
}

// -- threads --

enum { N_THREADS = 4 };

typedef struct worker {
    rocq_pool *pool;
    rocq_buffer *mailbox; // blocks that any thread may free
    pthread_mutex_t *mutex;
    uint64_t seed;
    int64_t n_requests, n_failed;
    bool wrong;
} worker;

static void *work(void *arg) {
    worker *w = (worker *)arg;
    uint64_t state = w->seed;
    rocq_buffer mine[8];
    memset(mine, 0, sizeof mine);
    for (int i = 0; i < 20000; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        rocq_buffer *b = &mine[(state >> 40) % 8];
        const int64_t size = 64 + (int64_t)((state >> 50) % 9000);
        if (b->host) {
            unsigned char *bytes = (unsigned char *)b->host;
            w->wrong |= bytes[0] != (unsigned char)w->seed || bytes[b->size - 1] != bytes[0];
            rocq_buffer copy = *b;
            if ((state >> 33) % 4 == 0) { // somebody else frees it
                pthread_mutex_lock(w->mutex);
                rocq_buffer *box = &w->mailbox[(state >> 44) % 4], swap = *box;
                *box = *b;
                *b = swap;
                pthread_mutex_unlock(w->mutex);
            }
            if (b->host) w->wrong |= rocq_pool_free(w->pool, b) != ROCQ_OK;
            if ((state >> 35) % 64 == 0 && copy.host && !b->host) {
                copy.ticket = 0;
                w->wrong |= rocq_pool_free(w->pool, &copy) != ROCQ_E_ARGUMENT;
            }
        } else if (rocq_pool_alloc(w->pool, b, size) == ROCQ_OK) {
            w->n_requests++;
            ((unsigned char *)b->host)[0] = (unsigned char)w->seed;
            ((unsigned char *)b->host)[size - 1] = (unsigned char)w->seed;
        } else {
            w->n_failed++;
        }
    }
    for (int i = 0; i < 8; i++) {
        if (mine[i].host) w->wrong |= rocq_pool_free(w->pool, &mine[i]) != ROCQ_OK;
    }
    return NULL;
}

// The pool grows as threads ask, while nothing else of the context runs; or it does not grow, and
// the context's own thread runs ops and fails at them.
static void threads_share_a_pool(void **state) {
    (void)state;
    for (int beside_ops = 0; beside_ops < 2; beside_ops++) {
        fixture f;
        open_with_budget(&f, 0);
        f.ctx->desc.log = NULL;
        rocq_pool *pool = pool_of(f.ctx, (rocq_pool_desc){.thread_safe = true,
                                                          .budget = beside_ops ? -1 : 0});
        for (int64_t size = 256; beside_ops && size < 9000; size += 256) {
            assert_int_equal(rocq_pool_reserve(pool, size, 1), ROCQ_OK);
        }
        const int64_t n_allocs = f.ctx->stats.n_allocs;
        pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
        pthread_t threads[N_THREADS];
        rocq_buffer mailbox[4];
        worker workers[N_THREADS];
        memset(mailbox, 0, sizeof mailbox);
        for (int i = 0; i < N_THREADS; i++) {
            workers[i] = (worker){pool, mailbox, &mutex, (uint64_t)i + 1, 0, 0, false};
            assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
        }
        float a[256] = {1}, b[256] = {2};
        rocq_tensor ta, tb;
        const int64_t ne[1] = {256};
        assert_int_equal(rocq_tensor_from_host(&ta, a, ROCQ_F32, 1, ne), ROCQ_OK);
        assert_int_equal(rocq_tensor_from_host(&tb, b, ROCQ_F32, 1, ne), ROCQ_OK);
        const rocq_binary_params add = {.y = &ta, .a = &ta, .b = &tb};
        for (int i = 0; beside_ops && i < 2000; i++) {
            assert_int_equal(rocq_add(f.ctx, &add), ROCQ_OK);
            assert_int_equal(rocq_add(f.ctx, NULL), ROCQ_E_ARGUMENT);
            assert_true(strlen(rocq_error(f.ctx)) > 0);
        }
        int64_t n_requests = 0, n_failed = 0;
        for (int i = 0; i < N_THREADS; i++) {
            assert_int_equal(pthread_join(threads[i], NULL), 0);
            assert_false(workers[i].wrong);
            n_requests += workers[i].n_requests;
            n_failed += workers[i].n_failed;
        }
        assert_int_equal(n_failed > 0, beside_ops);
        if (beside_ops) assert_int_equal(f.ctx->stats.n_allocs, n_allocs);
        for (int i = 0; i < 4; i++) assert_int_equal(rocq_pool_free(pool, &mailbox[i]), ROCQ_OK);
        const rocq_pool_stats s = total(pool);
        assert_int_equal(s.n_requests, n_requests);
        assert_int_equal(s.n_frees, n_requests);
        assert_int_equal(s.live_bytes, 0);
        rocq_pool_destroy(&pool);
        close_all(&f);
    }
}

// -- a recorded training step --

// Replays it, and returns the most bytes that were asked for at once.
static int64_t replay_training(int64_t budget) {
    enum { STEPS = 48, WARM = 24, NUMBERS = 4096 };
    static rocq_buffer buffers[NUMBERS];
    FILE *trace = popen("python3 bench/training_trace --steps 48 --seed 1", "r");
    assert_non_null(trace);
    fixture f;
    open_with_budget(&f, 0);
    rocq_pool *pool = pool_of(f.ctx, (rocq_pool_desc){.budget = budget});
    rocq_pool_stats warm;
    memset(&warm, 0, sizeof warm);
    char line[100];
    int32_t steps = 0;
    while (fgets(line, sizeof line, trace)) {
        long long number = -1, size = -1;
        if (line[0] == 's' && steps++ == WARM) warm = total(pool);
        if (line[0] == 'a') {
            assert_int_equal(sscanf(line, "a %lld %lld", &number, &size), 2);
            assert_true(number >= 0 && number < NUMBERS && !buffers[number].host);
            assert_int_equal(rocq_pool_alloc(pool, &buffers[number], size), ROCQ_OK);
        } else if (line[0] == 'f') {
            assert_int_equal(sscanf(line, "f %lld", &number), 1);
            assert_true(number >= 0 && number < NUMBERS && buffers[number].host);
            assert_int_equal(rocq_pool_free(pool, &buffers[number]), ROCQ_OK);
        }
    }
    assert_int_equal(pclose(trace), 0);
    assert_int_equal(steps, STEPS);
    const rocq_pool_stats s = total(pool);
    assert_int_equal(s.n_live, 0);
    const double per_step = (double)s.n_requests / STEPS;
    const double steady =
        (double)(s.n_hits - warm.n_hits) / (double)(s.n_requests - warm.n_requests);
    print_message(
        "# %.0f requests a step, steady hit rate %.4f, of all %.4f, peak %lld of %lld bytes\n",
        per_step, steady, s.hit_rate, (long long)s.peak_bytes, (long long)s.reserved_peak);
    assert_true(per_step > 900 && per_step < 1100);
    assert_true(steady >= 0.95);
    if (budget > 0) assert_true(s.reserved_peak <= budget && 2 * budget <= 3 * s.peak_bytes);
    rocq_pool_destroy(&pool);
    close_all(&f);
    return s.peak_bytes;
}

static void a_training_steps_requests_are_hits(void **state) {
    (void)state;
    const int64_t peak = replay_training(0);
    if (ROCQ__GUARD == 0) replay_training(peak * 3 / 2); // guards change the classes
}

// -- arenas --

// Random cuts, marks and resets: pieces lie apart, and what was cut before a mark survives a reset.
static void random_marks_agree_with_a_model(void **state) {
    (void)state;
    enum { PIECES = 64 };
    struct {
        rocq_buffer piece;
        int64_t mark; // before it was cut
        uint64_t stamp;
    } s[PIECES];
    enum { SIZE = 400000 };
    int n = 0, full = 0;
    unsigned char *memory = (unsigned char *)malloc(SIZE);
    assert_non_null(memory);
    const rocq_buffer buffer = rocq_buffer_from_host(memory + 1, SIZE - 1); // aligned to nothing
    rocq_arena arena;
    random_state = 5;
    rocq_arena_init(&arena, &buffer);
    for (int i = 0; i < 50000; i++) {
        if (n < PIECES && random_below(8) > 0) {
            const int64_t size = 8 + random_below(random_below(20) ? 2000 : 80000);
            const int64_t align = (int64_t)1 << random_below(11);
            s[n].mark = rocq_arena_mark(&arena);
            const rocq_result result = rocq_arena_alloc(&arena, &s[n].piece, size, align);
            if (result != ROCQ_OK) { // and only where it does not fit
                assert_int_equal(result, ROCQ_E_ARENA);
                assert_true(s[n].mark + size + align > SIZE - 1 && arena.peak > SIZE - 1);
                assert_int_equal(arena.used, s[n].mark);
                full++;
                continue;
            }
            assert_int_equal(s[n].piece.size, size);
            assert_int_equal((uintptr_t)s[n].piece.host % (uintptr_t)align, 0);
            s[n].stamp = random_u64();
            stamp(&s[n].piece, s[n].stamp);
            assert_true(arena.used >= s[n].mark + s[n].piece.size);
            n++;
        } else if (n > 0) {
            const int keep = (int)random_below(n);
            rocq_arena_reset(&arena, s[keep].mark);
            assert_int_equal(arena.used, s[keep].mark);
            n = keep;
        }
        for (int k = 0; k < n; k++) assert_true(stamped(&s[k].piece, s[k].stamp));
    }
    assert_true(full > 0);
    free(memory);
}

static void arenas_refuse_wrong_arguments(void **state) {
    (void)state;
    rocq_arena arena;
    rocq_buffer piece = {0};
    const rocq_buffer same = piece;
    rocq_tensor t;
    const int64_t ne[1] = {1};
    rocq_arena_init(NULL, NULL);
    rocq_arena_reset(NULL, 0);
    assert_int_equal(rocq_arena_mark(NULL), 0);
    assert_int_equal(rocq_arena_alloc(NULL, &piece, 1, 0), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_arena_tensor(NULL, &t, ROCQ_F32, 1, ne), ROCQ_E_ARGUMENT);
    rocq_arena_init(&arena, NULL);
    assert_int_equal(rocq_arena_tensor(&arena, NULL, ROCQ_F32, 1, ne), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_arena_alloc(&arena, &piece, -1, 0), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_arena_alloc(&arena, &piece, 1, 3), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_arena_alloc(&arena, NULL, 1, 0), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_arena_alloc(&arena, &piece, INT64_MAX, 0), ROCQ_E_OVERFLOW);
    assert_memory_equal(&piece, &same, sizeof piece);
    rocq_arena_reset(&arena, -1);
    rocq_arena_reset(&arena, 1); // past what is used: ignored
    assert_true(arena.measuring && arena.used == 0 && arena.peak == 0);
}

// -- a decode loop --

// Steps of a small layer with their tensors in an arena that is reset for each, and rows whose
// length grows from a pool: after the first steps nothing is allocated, by anyone.
static void a_decode_loop_allocates_nothing(void **state) {
    (void)state;
    enum { K = 256, STEPS = 200 };
    fixture f;
    open_with_budget(&f, 0);
    rocq_arena arena;
    rocq_buffer memory;
    assert_int_equal(rocq_buffer_alloc(f.ctx, &memory, 4 * K * sizeof(float)), ROCQ_OK);
    rocq_arena_init(&arena, &memory);
    rocq_pool *pool = pool_of(f.ctx, (rocq_pool_desc){0});
    assert_int_equal(rocq_pool_reserve(pool, STEPS * K * 4, 1), ROCQ_OK);
    float *floats = (float *)malloc(K * K * sizeof *floats);
    uint8_t *blocks = (uint8_t *)malloc(K * K);
    assert_true(floats && blocks);
    for (int i = 0; i < K * K; i++) floats[i] = random_normal() / 16;
    assert_int_equal(rocq_quantize(ROCQ_Q4_K, blocks, floats, K, K, NULL), ROCQ_OK);
    rocq_tensor w, scale;
    const int64_t square[2] = {K, K}, row[1] = {K};
    assert_int_equal(rocq_tensor_from_host(&w, blocks, ROCQ_Q4_K, 2, square), ROCQ_OK);
    assert_int_equal(rocq_tensor_from_host(&scale, floats, ROCQ_F32, 1, row), ROCQ_OK);
    int64_t calls = 0, n_allocs = 0;
    for (int step = 0; step < STEPS; step++) {
        rocq_buffer scores;
        rocq_tensor x, norm, gate, up, s;
        rocq_arena_reset(&arena, 0);
        assert_int_equal(rocq_arena_tensor(&arena, &x, ROCQ_F32, 1, row), ROCQ_OK);
        assert_int_equal(rocq_arena_tensor(&arena, &norm, ROCQ_F32, 1, row), ROCQ_OK);
        assert_int_equal(rocq_arena_tensor(&arena, &gate, ROCQ_F32, 1, row), ROCQ_OK);
        assert_int_equal(rocq_arena_tensor(&arena, &up, ROCQ_F32, 1, row), ROCQ_OK);
        const int64_t grown[2] = {K, step < 100 ? 1 + step : 200 - step};
        // Growing lengths meet a class each few steps; a second pass meets none that is new.
        assert_int_equal(rocq_pool_alloc(pool, &scores, grown[0] * grown[1] * 4), ROCQ_OK);
        assert_int_equal(rocq_tensor_init(&s, &scores, 0, ROCQ_F32, 2, grown), ROCQ_OK);
        for (int i = 0; i < K; i++) ((float *)rocq_tensor_data(&x))[i] = (float)(i % 7) - 3.0f;
        memset(rocq_tensor_data(&s), 0, (size_t)rocq_tensor_size(&s));
        const rocq_norm_params rms = {.y = &norm, .x = &x, .weight = &scale, .eps = 1e-5f};
        const rocq_matmul_params g = {.y = &gate, .w = &w, .x = &norm, .activation = ROCQ_ACT_SILU};
        const rocq_matmul_params u = {.y = &up, .w = &w, .x = &gate, .residual = &x};
        const rocq_softmax_params soft = {.y = &s, .x = &s};
        assert_int_equal(rocq_rmsnorm(f.ctx, &rms), ROCQ_OK);
        assert_int_equal(rocq_matmul(f.ctx, &g), ROCQ_OK);
        assert_int_equal(rocq_matmul(f.ctx, &u), ROCQ_OK);
        assert_int_equal(rocq_softmax(f.ctx, &soft), ROCQ_OK);
        assert_int_equal(rocq_pool_free(pool, &scores), ROCQ_OK);
        if (step == 100) calls = f.memory.n_calls, n_allocs = f.ctx->stats.n_allocs;
    }
    assert_int_equal(f.memory.n_calls, calls);
    assert_int_equal(f.ctx->stats.n_allocs, n_allocs);
    assert_int_equal(rocq_buffer_free(f.ctx, &memory), ROCQ_OK);
    rocq_pool_destroy(&pool);
    free(floats);
    free(blocks);
    close_all(&f);
}

int main(int argc, char **argv) { // [name of a test]
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(default_classes_waste_an_eighth_at_most),
        cmocka_unit_test(the_callers_classes_go_first),
        cmocka_unit_test(wrong_descs_are_refused),
        cmocka_unit_test(freed_blocks_are_handed_out_again),
        cmocka_unit_test(slabs_double),
        cmocka_unit_test(large_blocks_are_taken_alone_and_kept),
        cmocka_unit_test(larger_blocks_serve_before_memory_is_taken),
        cmocka_unit_test(what_is_reserved_ahead_is_there),
        cmocka_unit_test(impossible_reserves_take_nothing),
        cmocka_unit_test(budgets_hold),
        cmocka_unit_test(trim_gives_back_whole_slabs),
        cmocka_unit_test(misuse_is_found),
#ifdef ROCQ_DEBUG
        cmocka_unit_test(guards_find_an_overrun),
#endif
        cmocka_unit_test(reports_are_whole),
        cmocka_unit_test(random_traces_agree_with_a_model),
        cmocka_unit_test(every_allocation_may_fail),
        cmocka_unit_test(threads_share_a_pool),
        cmocka_unit_test(a_training_steps_requests_are_hits),
        cmocka_unit_test(random_marks_agree_with_a_model),
        cmocka_unit_test(arenas_refuse_wrong_arguments),
        cmocka_unit_test(a_decode_loop_allocates_nothing)};
    return cmocka_run_group_tests_name("memory", tests, NULL, NULL);
}
