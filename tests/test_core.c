// Contexts, memory, arena, tensors, threads, and what every op refuses: no file, no arithmetic.
#include "../rocq.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "inside.h"

// An allocator that counts, and fails the request numbered fail_at.
typedef struct counter {
    int64_t n, live, fail_at;
} counter;

static void *counter_alloc(size_t size, void *user) {
    counter *c = (counter *)user;
    if (c->n++ == c->fail_at) return NULL;
    c->live++;
    return malloc(size);
}

static void counter_free(void *ptr, size_t size, void *user) {
    counter *c = (counter *)user;
    assert_non_null(ptr);
    memset(ptr, 0xdd, size); // the size is the one asked for, or the sanitizer speaks up
    c->live--;
    free(ptr);
}

typedef struct log_entry {
    int n;
    rocq_log_level level;
    char text[512];
} log_entry;

static void log_keep(rocq_log_level level, const char *message, void *user) {
    log_entry *entry = (log_entry *)user;
    entry->n++;
    entry->level = level;
    snprintf(entry->text, sizeof entry->text, "%s", message);
}

static rocq_ctx *open_cpu(void) {
    rocq_ctx *ctx;
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 2};
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    return ctx;
}

static void results_have_names_and_stable_codes(void **state) {
    (void)state;
    static const struct { int code; const char *name; } golden[] = {
        {0, "ROCQ_OK"}, {-1, "ROCQ_E_ARGUMENT"}, {-2, "ROCQ_E_SHAPE"}, {-3, "ROCQ_E_FORMAT"},
        {-4, "ROCQ_E_ALIGNMENT"}, {-5, "ROCQ_E_OVERFLOW"}, {-6, "ROCQ_E_BOUNDS"},
        {-7, "ROCQ_E_UNSUPPORTED"}, {-8, "ROCQ_E_STATE"}, {-20, "ROCQ_E_MEMORY"},
        {-21, "ROCQ_E_BUDGET"}, {-22, "ROCQ_E_ARENA"}, {-40, "ROCQ_E_IO"}, {-41, "ROCQ_E_MAGIC"},
        {-42, "ROCQ_E_VERSION"}, {-43, "ROCQ_E_TRUNCATED"}, {-44, "ROCQ_E_CORRUPT"},
        {-45, "ROCQ_E_NOT_FOUND"}, {-46, "ROCQ_E_TYPE"}, {-47, "ROCQ_E_FOREIGN"},
        {-60, "ROCQ_E_NO_RUNTIME"},
        {-61, "ROCQ_E_NO_KERNELS"}, {-62, "ROCQ_E_NO_DEVICE"}, {-63, "ROCQ_E_DEVICE"},
        {-64, "ROCQ_E_LOST"}, {-65, "ROCQ_E_CANCELLED"}};
    size_t n = 0;
#define ROCQ_X(NAME, code, message) n++;
    ROCQ_RESULTS(ROCQ_X)
#undef ROCQ_X
    assert_int_equal(n, sizeof golden / sizeof golden[0]);
    for (size_t i = 0; i < n; i++) {
        assert_string_equal(rocq_result_name((rocq_result)golden[i].code), golden[i].name);
        assert_true(strlen(rocq_result_message((rocq_result)golden[i].code)) > 5);
    }
    assert_string_equal(rocq_result_name((rocq_result)-999), "ROCQ_E_?");
}

static void open_fills_in_defaults(void **state) {
    (void)state;
    rocq_ctx *ctx;
    rocq_info info;
    assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
    assert_int_equal(rocq_get_info(ctx, &info), ROCQ_OK);
    assert_int_equal(info.backend, ROCQ_BACKEND_CPU);
    assert_int_equal(info.gpu_result, ROCQ_E_NO_KERNELS);
    assert_true(info.desc.n_threads >= 1);
    assert_non_null(info.desc.allocator.alloc);
    assert_non_null(strstr(info.device, "CPU"));
    assert_string_equal(rocq_error(ctx), "");
    assert_int_equal(rocq_sync(ctx), ROCQ_OK);
    rocq_close(&ctx);
    assert_null(ctx);
    rocq_close(&ctx);
    rocq_close(NULL);
}

static void open_refuses_bad_descs(void **state) {
    (void)state;
    counter memory = {0, 0, -1};
    log_entry log = {0, ROCQ_LOG_INFO, ""};
    const rocq_desc good = {.prefer = ROCQ_BACKEND_CPU,
                            .allocator = {counter_alloc, counter_free, &memory},
                            .log = log_keep,
                            .log_user = &log};
    rocq_desc bad[7];
    for (int i = 0; i < 7; i++) bad[i] = good;
    bad[0].allocator.free = NULL;
    bad[1].prefer = (rocq_backend)7;
    bad[2].n_threads = -1;
    bad[3].memory_budget = -1;
    bad[4].scratch_bytes = -5;
    bad[6].slice_us = -1;
    bad[5].cpu_tier = (rocq_cpu_tier)(ROCQ_CPU_AVX512 + 1);
    for (int i = 0; i < 7; i++) {
        rocq_ctx *ctx = (rocq_ctx *)&memory;
        log.n = 0;
        assert_int_equal(rocq_open(&ctx, &bad[i]), ROCQ_E_ARGUMENT);
        assert_null(ctx);
        assert_int_equal(log.n, 1);
        assert_int_equal(log.level, ROCQ_LOG_ERROR);
    }
    assert_int_equal(rocq_open(NULL, &good), ROCQ_E_ARGUMENT);
    assert_int_equal(memory.live, 0);
}

// A tier is what runs, or rocq_open says that there is none such.
static void cpu_tiers(void **state) {
    (void)state;
    int n_open = 0;
    for (int tier = ROCQ_CPU_PLAIN; tier <= ROCQ_CPU_AVX512; tier++) {
        log_entry log = {0, ROCQ_LOG_INFO, ""};
        const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .log = log_keep, .log_user = &log,
                                .cpu_tier = (rocq_cpu_tier)tier};
        rocq_ctx *ctx;
        rocq_info info;
        const rocq_result result = rocq_open(&ctx, &desc);
        if (result != ROCQ_OK) {
            assert_int_equal(result, ROCQ_E_UNSUPPORTED);
            assert_null(ctx);
            assert_int_equal(log.n, 1);
            continue;
        }
        n_open++;
        assert_int_equal(rocq_get_info(ctx, &info), ROCQ_OK);
        assert_int_equal(info.desc.cpu_tier, tier);
        assert_non_null(strstr(info.device, inside_cpu_tier_name((rocq_cpu_tier)tier)));
        assert_int_equal(*inside_has_simd(ctx), tier >= ROCQ_CPU_SIMD);
        assert_int_equal(*inside_has_avx512(ctx), tier == ROCQ_CPU_AVX512);
        rocq_close(&ctx);
    }
    assert_true(n_open >= 1); // portable code runs anywhere
    rocq_ctx *ctx = open_cpu();
    rocq_info info;
    assert_int_equal(rocq_get_info(ctx, &info), ROCQ_OK);
    assert_true(info.desc.cpu_tier >= ROCQ_CPU_PLAIN && inside_cpu_has(info.desc.cpu_tier));
    rocq_close(&ctx);
}

static void gpu_is_refused_or_falls_back(void **state) {
    (void)state;
    log_entry log = {0, ROCQ_LOG_INFO, ""};
    rocq_ctx *ctx;
    rocq_info info;
    rocq_desc desc = {.prefer = ROCQ_BACKEND_GPU, .log = log_keep, .log_user = &log};
    const rocq_result result = rocq_open(&ctx, &desc);
    assert_true(result == ROCQ_E_NO_RUNTIME || result == ROCQ_E_NO_KERNELS);
    assert_null(ctx);
    assert_int_equal(log.n, 1);
    desc.allow_fallback = true;
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    assert_int_equal(rocq_get_info(ctx, &info), ROCQ_OK);
    assert_int_equal(info.backend, ROCQ_BACKEND_CPU);
    assert_int_equal(info.gpu_result, result);
    assert_int_equal(log.n, 2); // a fallback is never silent
    rocq_close(&ctx);
}

static void every_failing_allocation_of_open_is_reported(void **state) {
    (void)state;
    for (int64_t k = 0; k < 2; k++) {
        counter memory = {0, 0, k};
        rocq_ctx *ctx;
        const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .scratch_bytes = 1000,
                                .allocator = {counter_alloc, counter_free, &memory}};
        assert_int_equal(rocq_open(&ctx, &desc), ROCQ_E_MEMORY);
        assert_null(ctx);
        assert_int_equal(memory.live, 0);
    }
}

static void slices_are_hard_to_misuse(void **state) {
    (void)state;
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1};
    rocq_ctx *ctx, *other;
    rocq_graph *graph = NULL, *stale;
    float v[4] = {1, 2, 3, 4};
    const int64_t ne = 4;
    rocq_tensor x;
    const rocq_scale_params twice = {.y = &x, .x = &x, .scale = 2};
    bool done = true;
    assert_int_equal(rocq_tensor_from_host(&x, v, ROCQ_F32, 1, &ne), ROCQ_OK);
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    assert_int_equal(rocq_open(&other, &desc), ROCQ_OK);
    assert_int_equal(rocq_graph_launch_for(NULL, NULL, 0, &done), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_graph_launch_for(ctx, NULL, 0, &done), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
    for (int i = 0; i < 3; i++) assert_int_equal(rocq_scale(ctx, &twice), ROCQ_OK);
    assert_int_equal(rocq_graph_launch_for(ctx, NULL, 0, &done), ROCQ_E_STATE);
    assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);
    stale = graph;
    assert_int_equal(rocq_graph_launch_for(other, graph, 0, &done), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_graph_launch_for(ctx, graph, -1, &done), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_graph_launch_for(ctx, graph, 0, NULL), ROCQ_E_ARGUMENT);
    assert_true(done && v[0] == 1);
    assert_int_equal(rocq_graph_launch_for(ctx, graph, 0, &done), ROCQ_OK);
    assert_true(!done && v[0] == 2);
    // wrong arguments change nothing: the step goes on
    assert_int_equal(rocq_graph_launch_for(ctx, graph, -1, &done), ROCQ_E_ARGUMENT);
    assert_non_null(strstr(rocq_error(ctx), "us is negative"));
    assert_int_equal(rocq_graph_launch_for(ctx, graph, 0, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_graph_launch_for(ctx, graph, INT32_MAX, &done), ROCQ_OK);
    assert_true(done && v[0] == 8 && v[3] == 32);
    rocq_graph_destroy(ctx, &graph);
    assert_int_equal(rocq_graph_launch_for(ctx, stale, 0, &done), ROCQ_E_ARGUMENT);
    rocq_close(&other);
    rocq_close(&ctx);
}

static void buffers_are_aligned_counted_and_freed(void **state) {
    (void)state;
    counter memory = {0, 0, -1};
    rocq_ctx *ctx;
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .memory_budget = 10000,
                            .allocator = {counter_alloc, counter_free, &memory}};
    rocq_buffer a, b, copy;
    rocq_stats stats;
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    assert_int_equal(rocq_buffer_alloc(ctx, &a, 6000), ROCQ_OK);
    assert_int_equal((uintptr_t)a.host % 256, 0);
    memset(a.host, 1, 6000);

    memset(&b, 0x5a, sizeof b);
    copy = b;
    assert_int_equal(rocq_buffer_alloc(ctx, &b, 4001), ROCQ_E_BUDGET);
    assert_int_equal(rocq_buffer_alloc(ctx, &b, 0), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_buffer_alloc(ctx, &b, INT64_MAX), ROCQ_E_BUDGET);
    assert_int_equal(rocq_buffer_alloc(ctx, NULL, 1), ROCQ_E_ARGUMENT);
    memory.fail_at = memory.n;
    assert_int_equal(rocq_buffer_alloc(ctx, &b, 10), ROCQ_E_MEMORY);
    assert_memory_equal(&b, &copy, sizeof b); // untouched by all of these
    assert_int_equal(rocq_buffer_alloc(ctx, &b, 4000), ROCQ_OK); // failures took no budget

    copy = a;
    assert_int_equal(rocq_buffer_free(ctx, &a), ROCQ_OK);
    assert_null(a.host);
    assert_int_equal(rocq_buffer_free(ctx, &a), ROCQ_OK); // empty
    assert_int_equal(rocq_buffer_free(ctx, &copy), ROCQ_E_ARGUMENT); // stale
    copy = rocq_buffer_from_host(&memory, 8);
    assert_int_equal(rocq_buffer_free(ctx, &copy), ROCQ_E_ARGUMENT); // foreign

    assert_int_equal(rocq_reserve(ctx, 5000), ROCQ_OK);
    assert_int_equal(rocq_reserve(ctx, 100), ROCQ_OK); // smaller: nothing to do
    assert_int_equal(rocq_reserve(ctx, 6001), ROCQ_E_BUDGET);
    assert_int_equal(rocq_reserve(ctx, -1), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_get_stats(ctx, &stats), ROCQ_OK);
    assert_int_equal(stats.scratch_bytes, 5000);
    assert_int_equal(stats.n_allocs, 4);
    assert_int_equal(stats.live_bytes, inside_context_size() + 4000 + 5000);
    assert_int_equal(rocq_trim(ctx, -1), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_trim(NULL, 0), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_trim(ctx, 5000), ROCQ_OK); // there is no more than that
    assert_int_equal(inside_stats(ctx)->scratch_bytes, 5000);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(rocq_trim(ctx, i == 0 ? 4999 : 0), ROCQ_OK);
        assert_int_equal(rocq_get_stats(ctx, &stats), ROCQ_OK);
        assert_int_equal(stats.scratch_bytes, 0);
        assert_int_equal(stats.live_bytes, inside_context_size() + 4000);
        assert_int_equal(inside_budget_used(ctx), 4000);
    }
    assert_int_equal(rocq_reserve(ctx, 6000), ROCQ_OK); // there is room again
    rocq_close(&ctx); // with b still alive
    assert_int_equal(memory.live, 0);
}

// An arena's piece that starts where its buffer does is not that buffer.
static void only_a_whole_buffer_is_freed(void **state) {
    (void)state;
    counter memory = {0, 0, -1};
    rocq_ctx *ctx;
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1, .memory_budget = 10000,
                            .allocator = {counter_alloc, counter_free, &memory}};
    rocq_buffer buffer, piece, copy;
    rocq_arena arena;
    rocq_stats before, after;
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    assert_int_equal(rocq_buffer_alloc(ctx, &buffer, 4096), ROCQ_OK);
    rocq_arena_init(&arena, &buffer);
    assert_int_equal(rocq_arena_alloc(&arena, &piece, 100, 0), ROCQ_OK);
    assert_ptr_equal(piece.host, arena.buffer.host);
    copy = piece;
    assert_int_equal(rocq_get_stats(ctx, &before), ROCQ_OK);
    assert_int_equal(rocq_buffer_free(ctx, &piece), ROCQ_E_ARGUMENT);
    assert_non_null(strstr(rocq_error(ctx), "100 bytes"));
    assert_non_null(strstr(rocq_error(ctx), "4096"));
    assert_memory_equal(&piece, &copy, sizeof piece);
    copy.size = 5000; // nor is one that reaches further
    assert_int_equal(rocq_buffer_free(ctx, &copy), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_get_stats(ctx, &after), ROCQ_OK);
    assert_memory_equal(&before, &after, sizeof before);
    memset(arena.buffer.host, 1, 4096); // still there
    assert_int_equal(rocq_buffer_free(ctx, &buffer), ROCQ_OK);
    assert_int_equal(inside_budget_used(ctx), 0);
    rocq_close(&ctx);
    assert_int_equal(memory.live, 0);
}

// Scratch memory that grows is never there twice: live memory stays within the budget.
static void growing_scratch_keeps_the_budget(void **state) {
    (void)state;
    counter memory = {0, 0, -1};
    rocq_ctx *ctx;
    const int64_t budget = 1050000;
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1, .memory_budget = budget,
                            .allocator = {counter_alloc, counter_free, &memory}};
    rocq_buffer buffer;
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    const int64_t context = inside_stats(ctx)->live_bytes;
    assert_int_equal(rocq_buffer_alloc(ctx, &buffer, 50000), ROCQ_OK);
    for (int64_t size = 100000; size <= 1000000; size += 300000) {
        assert_int_equal(rocq_reserve(ctx, size), ROCQ_OK);
        assert_int_equal(inside_stats(ctx)->scratch_bytes, size);
        assert_int_equal(inside_budget_used(ctx), 50000 + size);
        assert_int_equal(inside_stats(ctx)->live_bytes, context + 50000 + size);
    }
    assert_true(inside_stats(ctx)->peak_bytes <= context + budget);
    assert_int_equal(rocq_buffer_free(ctx, &buffer), ROCQ_OK);
    assert_int_equal(rocq_reserve(ctx, budget + 1), ROCQ_E_BUDGET); // which changes nothing
    assert_int_equal(inside_stats(ctx)->scratch_bytes, 1000000);

    // Where there is no memory, there is no scratch until somebody takes some.
    memory.fail_at = memory.n;
    assert_int_equal(rocq_reserve(ctx, budget), ROCQ_E_MEMORY);
    assert_int_equal(inside_stats(ctx)->scratch_bytes, 0);
    assert_int_equal(inside_budget_used(ctx), 0);
    assert_int_equal(inside_stats(ctx)->live_bytes, context);
    float x[100];
    for (int i = 0; i < 100; i++) x[i] = (float)(i % 10);
    int32_t token = -1;
    rocq_tensor logits, out;
    const int64_t ne = 100, one = 1;
    assert_int_equal(rocq_tensor_from_host(&logits, x, ROCQ_F32, 1, &ne), ROCQ_OK);
    assert_int_equal(rocq_tensor_from_host(&out, &token, ROCQ_I32, 1, &one), ROCQ_OK);
    const rocq_sample_params p = {.token = &out, .logits = &logits, .temperature = 1.0f,
                                  .top_k = 5, .seed = 1};
    assert_int_equal(rocq_sample(ctx, &p), ROCQ_OK);
    assert_int_equal(token % 10, 9); // the five largest are alike
    assert_true(inside_stats(ctx)->scratch_bytes > 0);
    assert_int_equal(inside_budget_used(ctx), inside_stats(ctx)->scratch_bytes);
    assert_int_equal(rocq_reserve(ctx, budget), ROCQ_OK);
    assert_int_equal(inside_budget_used(ctx), budget);
    rocq_close(&ctx);
    assert_int_equal(memory.live, 0);
}

// Cuts of all alignments, with marks and resets between them. Returns the first failure.
static rocq_result cut_all(rocq_arena *arena, uint32_t seed) {
    rocq_buffer piece;
    int64_t marks[4] = {0};
    for (int i = 0; i < 40; i++) {
        seed = seed * 1664525u + 1013904223u;
        const int64_t align = (int64_t)1 << (seed >> 8) % 13, size = (seed >> 16) % 700;
        const rocq_result result = rocq_arena_alloc(arena, &piece, size, align);
        if (result != ROCQ_OK) return result;
        if (!arena->measuring) {
            assert_int_equal((uintptr_t)piece.host % (uintptr_t)align, 0);
            memset(piece.host, i, (size_t)size);
        }
        if (i % 5 == 0) marks[(seed >> 24) % 4] = rocq_arena_mark(arena);
        if (i % 7 == 6) rocq_arena_reset(arena, marks[(seed >> 28) % 4]);
    }
    return ROCQ_OK;
}

// What a measuring arena counts is enough wherever the memory starts.
static void a_measured_peak_fits_any_memory(void **state) {
    (void)state;
    const int64_t ne[1] = {1};
    rocq_arena arena;
    rocq_tensor t;
    rocq_buffer buffer;
    rocq_arena_init(&arena, NULL); // two tensors over malloc's memory
    for (int i = 0; i < 2; i++) {
        assert_int_equal(rocq_arena_tensor(&arena, &t, ROCQ_F32, 1, ne), ROCQ_OK);
    }
    const int64_t two = arena.peak;
    for (int64_t skew = 0; skew < 256; skew += 16) {
        unsigned char *memory = (unsigned char *)malloc((size_t)(two + 512));
        assert_non_null(memory);
        unsigned char *start = memory + (256 - (uintptr_t)memory % 256) + skew;
        buffer = rocq_buffer_from_host(start, two);
        rocq_arena_init(&arena, &buffer);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(rocq_arena_tensor(&arena, &t, ROCQ_F32, 1, ne), ROCQ_OK);
        }
        assert_true(arena.used <= two && arena.peak <= two);
        free(memory);
    }
    for (uint32_t seed = 0; seed < 20; seed++) {
        rocq_arena_init(&arena, NULL);
        assert_int_equal(cut_all(&arena, seed), ROCQ_OK);
        const int64_t peak = arena.peak;
        for (int64_t skew = 0; skew < 4096; skew += seed % 2 ? 16 : 97) {
            unsigned char *memory = (unsigned char *)malloc((size_t)(peak + 8192));
            assert_non_null(memory);
            buffer = rocq_buffer_from_host(memory + (4096 - (uintptr_t)memory % 4096) + skew, peak);
            rocq_arena_init(&arena, &buffer);
            assert_int_equal(cut_all(&arena, seed), ROCQ_OK);
            free(memory);
        }
    }

    // An empty buffer has no memory, wherever it says it is.
    buffer = rocq_buffer_from_host(&arena, 0);
    rocq_arena_init(&arena, &buffer);
    assert_true(arena.measuring);
    assert_int_equal(rocq_arena_alloc(&arena, &buffer, 10, 1), ROCQ_OK);
    assert_null(buffer.host);
    assert_int_equal(arena.peak, 10); // aligned to 1, no more is needed anywhere
    assert_int_equal(rocq_arena_alloc(&arena, &buffer, INT64_MAX - 300, 512), ROCQ_E_OVERFLOW);
    assert_int_equal(arena.used, 10);
}

static void arena_measures_cuts_and_resets(void **state) {
    (void)state;
    _Alignas(256) static unsigned char memory[4096];
    rocq_arena arena;
    rocq_buffer piece, buffer;
    rocq_tensor t;
    const int64_t ne[2] = {33, 3};
    int64_t peak = 0;
    for (int pass = 0; pass < 2; pass++) { // the same code measures, then cuts
        buffer = rocq_buffer_from_host(memory, peak);
        rocq_arena_init(&arena, pass == 0 ? NULL : &buffer);
        assert_int_equal(rocq_arena_alloc(&arena, &piece, 10, 1), ROCQ_OK);
        assert_int_equal(rocq_arena_tensor(&arena, &t, ROCQ_F32, 2, ne), ROCQ_OK);
        assert_int_equal(arena.used, 256 + 33 * 3 * 4);
        const int64_t mark = rocq_arena_mark(&arena);
        assert_int_equal(rocq_arena_alloc(&arena, &piece, 100, 64), ROCQ_OK);
        rocq_arena_reset(&arena, mark);
        assert_int_equal(rocq_arena_alloc(&arena, &piece, 50, 64), ROCQ_OK);
        assert_int_equal(arena.used, 704 + 50);
        assert_int_equal(arena.peak, pass == 0 ? 704 + 100 + 255 : 704 + 100);
        if (pass == 0) assert_true(arena.measuring);
        peak = 704 + 100; // the memory is aligned
    }
    assert_ptr_equal(piece.host, memory + 704);
    assert_ptr_equal(rocq_tensor_data(&t), memory + 256);

    const rocq_buffer untouched = piece;
    assert_int_equal(rocq_arena_alloc(&arena, &piece, 100, 0), ROCQ_E_ARENA);
    assert_int_equal(arena.peak, 768 + 100); // names the size that would do
    assert_memory_equal(&piece, &untouched, sizeof piece);
    assert_int_equal(arena.used, 704 + 50);
    assert_int_equal(rocq_arena_alloc(&arena, &piece, INT64_MAX, 0), ROCQ_E_OVERFLOW);
    assert_int_equal(rocq_arena_alloc(&arena, &piece, 1, 3), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_arena_alloc(&arena, &piece, -1, 0), ROCQ_E_ARGUMENT);
    rocq_arena_reset(&arena, 0);
    assert_int_equal(arena.used, 0);

    // Alignment is of the address, wherever the caller's memory starts.
    buffer = rocq_buffer_from_host(memory + 4, 1000);
    rocq_arena_init(&arena, &buffer);
    assert_int_equal(rocq_arena_alloc(&arena, &piece, 8, 64), ROCQ_OK);
    assert_ptr_equal(piece.host, memory + 64);
}

static void tensors_know_their_size_and_bounds(void **state) {
    (void)state;
    _Alignas(64) static unsigned char memory[4096];
    const rocq_buffer buffer = rocq_buffer_from_host(memory, 288);
    const int64_t q4_k[2] = {256, 2}, one[1] = {72}, half_block[1] = {128}, none[1] = {0};
    const int64_t huge[4] = {1 << 30, 1 << 30, 1 << 30, 1};
    rocq_tensor t, untouched;
    memset(&t, 0x5a, sizeof t);
    untouched = t;
    assert_int_equal(rocq_tensor_init(&t, &buffer, 1, ROCQ_Q4_K, 2, q4_k), ROCQ_E_BOUNDS);
    assert_int_equal(rocq_tensor_init(&t, &buffer, 0, ROCQ_Q4_K, 1, half_block), ROCQ_E_SHAPE);
    assert_int_equal(rocq_tensor_init(&t, &buffer, 0, ROCQ_F32, 1, none), ROCQ_E_SHAPE);
    assert_int_equal(rocq_tensor_init(&t, &buffer, 0, ROCQ_F32, 4, huge), ROCQ_E_OVERFLOW);
    assert_int_equal(rocq_tensor_init(&t, &buffer, 0, (rocq_format)4, 1, one), ROCQ_E_FORMAT);
    assert_int_equal(rocq_tensor_init(&t, &buffer, 2, ROCQ_F32, 1, (int64_t[]){71}),
                     ROCQ_E_ALIGNMENT);
    assert_int_equal(rocq_tensor_init(&t, &buffer, 0, ROCQ_F32, 5, one), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_tensor_init(&t, &buffer, 0, ROCQ_F32, 1, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_tensor_from_host(&t, NULL, ROCQ_F32, 1, one), ROCQ_E_ARGUMENT);
    assert_memory_equal(&t, &untouched, sizeof t);

    assert_int_equal(rocq_tensor_init(&t, &buffer, 0, ROCQ_Q4_K, 2, q4_k), ROCQ_OK);
    assert_int_equal(rocq_tensor_size(&t), 288);
    assert_int_equal(rocq_tensor_count(&t), 512);
    assert_true(rocq_tensor_contiguous(&t));
    assert_ptr_equal(inside_row(&t, 1, 0, 0), memory + 144);
}

static void views_reshapes_and_permutations(void **state) {
    (void)state;
    static float memory[2 * 3 * 4 * 5];
    for (int i = 0; i < 2 * 3 * 4 * 5; i++) memory[i] = (float)i;
    const int64_t ne[4] = {5, 4, 3, 2};
    rocq_tensor t, v, w;
    assert_int_equal(rocq_tensor_from_host(&t, memory, ROCQ_F32, 4, ne), ROCQ_OK);

    assert_int_equal(rocq_tensor_view(&v, &t, (int64_t[4]){1, 2, 0, 1}, (int64_t[4]){3, 2, 3, 1}),
                     ROCQ_OK);
    assert_float_equal(((float *)rocq_tensor_data(&v))[0], 1 + 2 * 5 + 60, 0);
    assert_float_equal(*(float *)(void *)inside_row(&v, 1, 2, 0), 1 + 3 * 5 + 2 * 20 + 60, 0);
    assert_false(rocq_tensor_contiguous(&v));
    assert_int_equal(rocq_tensor_reshape(&w, &v, 1, (int64_t[]){18}), ROCQ_E_SHAPE);
    assert_int_equal(rocq_tensor_view(&w, &v, (int64_t[4]){1, 0, 0, 0}, (int64_t[4]){2, 2, 3, 1}),
                     ROCQ_OK);
    assert_float_equal(((float *)rocq_tensor_data(&w))[0], 2 + 2 * 5 + 60, 0);
    assert_int_equal(rocq_tensor_view(&w, &v, (int64_t[4]){2, 0, 0, 0}, (int64_t[4]){2, 2, 3, 1}),
                     ROCQ_E_SHAPE);
    assert_int_equal(rocq_tensor_view(&w, &v, (int64_t[4]){-1, 0, 0, 0}, (int64_t[4]){1, 1, 1, 1}),
                     ROCQ_E_SHAPE);
    assert_int_equal(
        rocq_tensor_view(&w, &v, (int64_t[4]){INT64_MAX, 0, 0, 0}, (int64_t[4]){1, 1, 1, 1}),
        ROCQ_E_SHAPE);

    assert_int_equal(rocq_tensor_reshape(&v, &t, 2, (int64_t[]){20, 6}), ROCQ_OK);
    assert_float_equal(*(float *)(void *)inside_row(&v, 5, 0, 0), 100, 0);
    assert_int_equal(rocq_tensor_reshape(&w, &t, 2, (int64_t[]){20, 5}), ROCQ_E_SHAPE);

    assert_int_equal(rocq_tensor_permute(&v, &t, (int32_t[4]){0, 2, 1, 3}), ROCQ_OK);
    assert_int_equal(v.ne[1], 3);
    assert_float_equal(*(float *)(void *)inside_row(&v, 2, 1, 0), 2 * 20 + 5, 0);
    assert_int_equal(rocq_tensor_permute(&w, &t, (int32_t[4]){1, 0, 2, 3}), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_tensor_permute(&w, &t, (int32_t[4]){0, 1, 1, 3}), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_tensor_permute(&w, &t, (int32_t[4]){0, 1, 2, 9}), ROCQ_E_ARGUMENT);
}

// Every element of a slice and of heads is the one of the tensor that they are cut from.
static void slices_and_heads(void **state) {
    (void)state;
    static float memory[12 * 4 * 3 * 2];
    static unsigned char blocks[34 * 4 * 3];
    for (int i = 0; i < 12 * 4 * 3 * 2; i++) memory[i] = (float)i;
    rocq_tensor t, wide, view, zero;
    memset(&zero, 0, sizeof zero);
    assert_int_equal(rocq_tensor_from_host(&t, memory, ROCQ_F32, 4, (int64_t[]){12, 4, 3, 2}),
                     ROCQ_OK);
    for (int dim = 0; dim < 4; dim++) {
        for (int64_t first = 0; first < t.ne[dim]; first++) {
            for (int64_t n = 1; n <= t.ne[dim] - first; n++) {
                view = rocq_tensor_slice(&t, dim, first, n);
                for (int d = 0; d < 4; d++) assert_int_equal(view.ne[d], d == dim ? n : t.ne[d]);
                assert_memory_equal(view.stride, t.stride, sizeof t.stride);
                assert_float_equal(((float *)rocq_tensor_data(&view))[0],
                                   (float)(first * t.stride[dim]), 0);
                assert_int_equal(view.n_dims, 4);
            }
        }
        const struct { int64_t first, n;
        } bad[] = {{-1, 1},        {0, 0},         {0, -1},       {0, t.ne[dim] + 1},
                   {t.ne[dim], 1}, {1, INT64_MAX}, {INT64_MAX, 1}};
        for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
            view = rocq_tensor_slice(&t, dim, bad[i].first, bad[i].n);
            assert_memory_equal(&view, &zero, sizeof zero);
        }
    }
    for (int dim = -1; dim <= 4; dim += 5) {
        view = rocq_tensor_slice(&t, dim, 0, 1);
        assert_memory_equal(&view, &zero, sizeof zero);
    }
    view = rocq_tensor_slice(NULL, 0, 0, 1);
    assert_memory_equal(&view, &zero, sizeof zero);

    // Heads of some columns, with rows in between that are not seen.
    wide = rocq_tensor_slice(&t, 3, 1, 1);
    wide = rocq_tensor_slice(&wide, 1, 1, 2);
    view = rocq_tensor_heads(&wide, 4);
    assert_int_equal(view.n_dims, 4);
    assert_memory_equal(view.ne, ((int64_t[4]){4, 3, 2, 3}), sizeof view.ne);
    for (int64_t b = 0; b < 3; b++) {
        for (int64_t n = 0; n < 2; n++) {
            for (int64_t h = 0; h < 3; h++) {
                const float *row = (const float *)(const void *)inside_row(&view, h, n, b);
                for (int64_t d = 0; d < 4; d++) {
                    assert_float_equal(row[d], (float)(d + 4 * h + 12 * (n + 1) + 48 * b + 144), 0);
                }
            }
        }
    }
    wide = rocq_tensor_slice(&t, 3, 0, 1);
    for (int64_t head_dim = -1; head_dim <= 13; head_dim++) {
        view = rocq_tensor_heads(&wide, head_dim);
        const bool fits = head_dim > 0 && 12 % head_dim == 0;
        assert_int_equal(view.ne[1], fits ? 12 / head_dim : 0);
        if (!fits) assert_memory_equal(&view, &zero, sizeof zero);
    }
    view = rocq_tensor_heads(&t, 4); // has a fourth dimension already
    assert_memory_equal(&view, &zero, sizeof zero);
    view = rocq_tensor_heads(NULL, 4);
    assert_memory_equal(&view, &zero, sizeof zero);

    // Blocks are not cut; one dimension becomes [head_dim, heads, 1].
    assert_int_equal(rocq_tensor_from_host(&t, blocks, ROCQ_Q8_0, 1, (int64_t[]){128}), ROCQ_OK);
    view = rocq_tensor_slice(&t, 0, 16, 32);
    assert_memory_equal(&view, &zero, sizeof zero);
    view = rocq_tensor_heads(&t, 16);
    assert_memory_equal(&view, &zero, sizeof zero);
    view = rocq_tensor_slice(&t, 0, 32, 64);
    assert_ptr_equal(rocq_tensor_data(&view), blocks + 34);
    view = rocq_tensor_heads(&t, 64);
    assert_memory_equal(view.ne, ((int64_t[4]){64, 2, 1, 1}), sizeof view.ne);
    assert_int_equal(view.n_dims, 3);
    assert_int_equal(rocq_tensor_size(&view), rocq_tensor_size(&t));
    assert_true(rocq_tensor_contiguous(&view));
    t.format = (rocq_format)4;
    view = rocq_tensor_heads(&t, 64);
    assert_memory_equal(&view, &zero, sizeof zero);

    // What an op says of an empty one.
    rocq_ctx *ctx = open_cpu();
    assert_int_equal(rocq_tensor_from_host(&t, memory, ROCQ_F32, 1, (int64_t[]){12}), ROCQ_OK);
    const rocq_scale_params scale = {.y = &t, .x = &zero, .scale = 2};
    assert_int_equal(rocq_scale(ctx, &scale), ROCQ_E_SHAPE);
    assert_non_null(strstr(rocq_error(ctx), "x has 0 elements"));
    rocq_close(&ctx);
}

// The same tensors as from lists of sizes, and the same refusals, with nothing cut.
static void tensors_of_plain_sizes(void **state) {
    (void)state;
    static unsigned char memory[4096];
    const rocq_buffer buffer = rocq_buffer_from_host(memory, sizeof memory);
    const int64_t ne[3] = {64, 3, 2};
    rocq_arena arena, by_list;
    rocq_tensor t[3], want, untouched;
    rocq_arena_init(&arena, &buffer);
    rocq_arena_init(&by_list, &buffer);
    memset(&untouched, 0x5a, sizeof untouched);
    assert_int_equal(rocq_tensor_1d(&arena, &t[0], ROCQ_I32, 64), ROCQ_OK);
    assert_int_equal(rocq_tensor_2d(&arena, &t[1], ROCQ_Q8_0, 64, 3), ROCQ_OK);
    assert_int_equal(rocq_tensor_3d(&arena, &t[2], ROCQ_F32, 64, 3, 2), ROCQ_OK);
    for (int i = 0; i < 3; i++) {
        const rocq_format format = i == 0 ? ROCQ_I32 : i == 1 ? ROCQ_Q8_0 : ROCQ_F32;
        assert_int_equal(rocq_arena_tensor(&by_list, &want, format, i + 1, ne), ROCQ_OK);
        assert_memory_equal(&t[i], &want, sizeof want);
    }
    const int64_t used = arena.used;
    t[0] = untouched;
    assert_int_equal(rocq_tensor_1d(NULL, &t[0], ROCQ_F32, 1), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_tensor_2d(&arena, NULL, ROCQ_F32, 1, 1), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_tensor_3d(&arena, &t[0], ROCQ_F32, 1, 1, 0), ROCQ_E_SHAPE);
    assert_int_equal(rocq_tensor_2d(&arena, &t[0], ROCQ_Q4_K, 64, 1), ROCQ_E_SHAPE);
    assert_int_equal(rocq_tensor_1d(&arena, &t[0], (rocq_format)4, 1), ROCQ_E_FORMAT);
    assert_int_equal(rocq_tensor_3d(&arena, &t[0], ROCQ_F32, 1 << 30, 1 << 30, 1 << 30),
                     ROCQ_E_OVERFLOW);
    assert_int_equal(rocq_tensor_2d(&arena, &t[0], ROCQ_F32, 1024, 1), ROCQ_E_ARENA);
    assert_memory_equal(&t[0], &untouched, sizeof untouched);
    assert_int_equal(arena.used, used);
}

static void strings_and_names(void **state) {
    (void)state;
    const struct { rocq_str s; const char *text; bool equal; } cases[] = {
        {{"yarn", 4}, "yarn", true},   {{"yarns", 4}, "yarn", true}, {{"yarn", 3}, "yarn", false},
        {{"yarn", 4}, "yar", false},   {{"a\0b", 3}, "a", false},    {{"", 0}, "", true},
        {{NULL, 0}, "", true},         {{NULL, 0}, "a", false},      {{"a", 1}, NULL, false},
        {{NULL, 1}, "a", false},       {{"a", -1}, "a", false},      {{"a", INT64_MIN}, "", false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(rocq_str_equal(cases[i].s, cases[i].text), cases[i].equal);
    }
    assert_string_equal(rocq_format_name(ROCQ_Q4_K), "Q4_K");
    assert_string_equal(rocq_format_name(ROCQ_I32), "I32");
    assert_string_equal(rocq_format_name((rocq_format)4), "?");
    assert_string_equal(rocq_format_name((rocq_format)-1), "?");
}

static void uploads_and_downloads_are_exact(void **state) {
    (void)state;
    rocq_ctx *ctx = open_cpu();
    rocq_buffer buffer;
    rocq_tensor t, v;
    const float in[6] = {1, 2, 3, 4, 5, 6};
    float out[6] = {0};
    assert_int_equal(rocq_buffer_alloc(ctx, &buffer, sizeof in), ROCQ_OK);
    assert_int_equal(rocq_tensor_init(&t, &buffer, 0, ROCQ_F32, 2, (int64_t[]){3, 2}), ROCQ_OK);
    assert_int_equal(rocq_upload(ctx, &t, in, sizeof in), ROCQ_OK);
    assert_int_equal(rocq_download(ctx, out, &t, sizeof out), ROCQ_OK);
    assert_memory_equal(in, out, sizeof in);
    assert_int_equal(rocq_upload(ctx, &t, in, sizeof in - 4), ROCQ_E_SHAPE);
    assert_int_equal(rocq_upload(ctx, &t, NULL, sizeof in), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_upload(ctx, NULL, in, sizeof in), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_tensor_view(&v, &t, (int64_t[4]){0}, (int64_t[4]){2, 2, 1, 1}), ROCQ_OK);
    assert_int_equal(rocq_download(ctx, out, &v, 16), ROCQ_E_SHAPE); // strided
    const rocq_tensor row = rocq_tensor_slice(&t, 1, 1, 1);
    float last[3] = {0};
    rocq_transfer both[2] = {{out, &t, sizeof out}, {last, &row, sizeof last}};
    memset(out, 0, sizeof out);
    assert_int_equal(rocq_download_all(ctx, both, 2), ROCQ_OK);
    assert_memory_equal(in, out, sizeof in);
    assert_memory_equal(in + 3, last, sizeof last);
    memset(out, 0, sizeof out);
    both[1].size = 8; // then the first one is not copied either
    assert_int_equal(rocq_download_all(ctx, both, 2), ROCQ_E_SHAPE);
    assert_true(out[5] == 0);
    assert_int_equal(rocq_download_all(ctx, both, 0), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_download_all(ctx, NULL, 1), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_download_all(NULL, both, 1), ROCQ_E_ARGUMENT);
    v = t;
    memset(&v.buffer, 0, sizeof v.buffer);
    v.buffer.device.address = 4096;
    v.buffer.size = 1000;
    assert_int_equal(rocq_upload(ctx, &v, in, sizeof in), ROCQ_E_ARGUMENT); // device memory on a
                                                                            // CPU
    rocq_close(&ctx);
}

typedef struct sum_job {
    int64_t *hits;
    int32_t n_threads;
    bool bad_thread;
} sum_job;

static void sum_task(void *arg, int64_t begin, int64_t end, int32_t thread) {
    sum_job *job = (sum_job *)arg;
    if (thread < 0 || thread >= job->n_threads) job->bad_thread = true;
    for (int64_t i = begin; i < end; i++) job->hits[i] += i + 1;
}

static void threads_do_every_item_once(void **state) {
    (void)state;
    enum { N = 1000, ROUNDS = 500 };
    static const int32_t counts[] = {1, 2, 3, 8, 64};
    static int64_t hits[N];
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        rocq_ctx *ctx;
        const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = counts[c]};
        sum_job job = {hits, counts[c], false};
        memset(hits, 0, sizeof hits);
        assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
        for (int round = 0; round < ROUNDS; round++) {
            inside_parallel(ctx, N, 1 + round % 300, sum_task, &job);
        }
        inside_parallel(ctx, 0, 1, sum_task, &job);
        for (int64_t i = 0; i < N; i++) assert_int_equal(hits[i], (i + 1) * ROUNDS);
        assert_false(job.bad_thread);
        rocq_close(&ctx);
    }
}

// Every op, given valid params, refuses each operand that is missing, in a wrong format, outside
// its buffer, misaligned, self-overlapping or of a wrong shape; and says so before touching an
// output.
enum { SLOT = 1 << 16, N_SLOTS = 12 };
static _Alignas(256) unsigned char arena_memory[SLOT * N_SLOTS];

static rocq_tensor slot_tensor(int slot, rocq_format format, int64_t ne0, int64_t ne1, int64_t ne2,
                               int64_t ne3) {
    const rocq_buffer buffer = rocq_buffer_from_host(arena_memory + slot * SLOT, SLOT);
    const int64_t ne[4] = {ne0, ne1, ne2, ne3};
    rocq_tensor t;
    assert_int_equal(rocq_tensor_init(&t, &buffer, 0, format, 4, ne), ROCQ_OK);
    return t;
}

typedef struct op_case {
    rocq_op op;
    const void *params;
    rocq_tensor *operand[12]; // all tensors the params point to
    bool is_output[12];
} op_case;

static rocq_result ask(rocq_ctx *ctx, const op_case *c) {
    const char *why = NULL;
    const rocq_result result = rocq_supports(ctx, c->op, c->params, &why);
    assert_non_null(why);
    assert_int_equal(result == ROCQ_OK, why[0] == '\0');
    return result;
}

static void check_refusals(rocq_ctx *ctx, const op_case *c) {
    static unsigned char before[sizeof arena_memory];
    memcpy(before, arena_memory, sizeof before);
    assert_int_equal(ask(ctx, c), ROCQ_OK);
    for (int i = 0; i < 12 && c->operand[i]; i++) {
        rocq_tensor *t = c->operand[i];
        const rocq_tensor good = *t;
        t->format = (rocq_format)5;
        assert_int_equal(ask(ctx, c), ROCQ_E_FORMAT);
        *t = good;
        t->buffer.size = rocq_tensor_size(&good) - 1;
        assert_int_equal(ask(ctx, c), ROCQ_E_BOUNDS);
        *t = good;
        t->offset = -4;
        assert_int_equal(ask(ctx, c), ROCQ_E_BOUNDS);
        *t = good;
        t->offset = SLOT + 4;
        assert_int_equal(ask(ctx, c), ROCQ_E_BOUNDS);
        *t = good;
        t->stride[1] = INT64_MAX / 2 / 256 * 256;
        t->ne[1] = good.ne[1] + 7;
        const rocq_result overflow = ask(ctx, c);
        assert_true(overflow == ROCQ_E_OVERFLOW || overflow == ROCQ_E_SHAPE);
        *t = good;
        for (int d = 1; d < 4; d++) { // a stride that no element needs is turned into bytes too
            if (good.ne[d] != 1) continue;
            t->stride[d] = INT64_MAX / 256 * 256;
            assert_int_equal(ask(ctx, c), ROCQ_E_OVERFLOW);
            *t = good;
        }
        t->ne[0] = 0;
        assert_int_equal(ask(ctx, c), ROCQ_E_SHAPE);
        *t = good;
        t->stride[2] = -1;
        assert_int_equal(ask(ctx, c), ROCQ_E_SHAPE);
        *t = good;
        t->stride[0] = 2;
        assert_int_equal(ask(ctx, c), ROCQ_E_SHAPE);
        *t = good;
        t->layout = (rocq_layout)9;
        assert_int_equal(ask(ctx, c), ROCQ_E_FORMAT);
        *t = good;
        memset(&t->buffer, 0, sizeof t->buffer);
        assert_int_equal(ask(ctx, c), ROCQ_E_ARGUMENT);
        *t = good;
        if (inside_alignment_of(good.format) > 1) {
            t->offset = 1;
            assert_int_equal(ask(ctx, c), ROCQ_E_ALIGNMENT);
            *t = good;
        }
        if (c->is_output[i] && good.ne[1] > 1) {
            t->stride[1] = 0;
            assert_int_equal(ask(ctx, c), ROCQ_E_SHAPE);
            *t = good;
        }
        if (good.ne[1] > 1 || good.ne[2] > 1) { // one row or plane too many cannot fit all the
                                                // others
            const int d = good.ne[2] > 1 ? 2 : 1;
            t->ne[d]++;
            const rocq_result more = ask(ctx, c);
            assert_true(more == ROCQ_E_SHAPE || c->operand[1] == NULL ||
                        (c->op == ROCQ_OP_GATHER && t != c->operand[0]) ||
                        (c->op == ROCQ_OP_GATHER_BACKWARD && i == 2) || // a table of any size
                        c->op == ROCQ_OP_ROPE_APPEND || c->op == ROCQ_OP_ATTENTION ||
                        c->op == ROCQ_OP_CONV || c->op == ROCQ_OP_NORM_STATS ||
                        c->op == ROCQ_OP_RESIZE); // x of any size
            *t = good;
        }
        assert_int_equal(ask(ctx, c), ROCQ_OK);
    }
    assert_memory_equal(before, arena_memory, sizeof before);
    assert_int_equal(rocq_supports(ctx, c->op, NULL, NULL), ROCQ_E_ARGUMENT);
}

static void ops_refuse_bad_operands(void **state) {
    (void)state;
    rocq_ctx *ctx = open_cpu();
    rocq_tensor t[N_SLOTS];
    int64_t bytes = 0;

    t[0] = slot_tensor(0, ROCQ_F32, 5, 3, 2, 1);
    t[1] = slot_tensor(1, ROCQ_Q4_K, 256, 5, 1, 1);
    t[2] = slot_tensor(2, ROCQ_F32, 256, 3, 2, 1);
    t[3] = slot_tensor(3, ROCQ_F32, 5, 1, 1, 1);
    t[4] = slot_tensor(4, ROCQ_F16, 5, 3, 2, 1);
    t[5] = slot_tensor(5, ROCQ_F32, 5, 3, 2, 1);
    rocq_matmul_params mm = {.y = &t[0], .w = &t[1], .x = &t[2], .bias = &t[3], .gate = &t[4],
                             .residual = &t[5], .activation = ROCQ_ACT_SILU};
    check_refusals(
        ctx, &(op_case){ROCQ_OP_MATMUL, &mm, {&t[0], &t[1], &t[2], &t[3], &t[4], &t[5]}, {true}});
    assert_int_equal(rocq_plan_begin(ctx, &bytes), ROCQ_OK);
    assert_int_equal(rocq_matmul(ctx, &mm), ROCQ_OK);
    rocq_plan_end(ctx);
    assert_true(bytes > 0);
    mm.activation = (rocq_activation)17;
    assert_int_equal(rocq_matmul(ctx, &mm), ROCQ_E_ARGUMENT);
    mm.activation = ROCQ_ACT_IDENTITY;
    mm.softcap = NAN;
    assert_int_equal(rocq_matmul(ctx, &mm), ROCQ_E_ARGUMENT);
    mm.softcap = 0;
    mm.precision = (rocq_precision)9;
    assert_int_equal(rocq_matmul(ctx, &mm), ROCQ_E_ARGUMENT);
    t[1] = slot_tensor(1, ROCQ_F32, 256, 5, 1, 1);
    mm.precision = ROCQ_PRECISION_INT8;
    assert_int_equal(rocq_matmul(ctx, &mm), ROCQ_E_UNSUPPORTED);
    mm.precision = ROCQ_PRECISION_AUTO;
    t[1] = slot_tensor(1, ROCQ_F32, 256, 5, 3, 1);
    assert_int_equal(rocq_matmul(ctx, &mm), ROCQ_E_SHAPE); // batch 3 does not divide 2

    t[0] = slot_tensor(0, ROCQ_F32, 64, 4, 3, 2);
    t[1] = slot_tensor(1, ROCQ_F32, 64, 4, 3, 2);
    t[2] = slot_tensor(2, ROCQ_F16, 64, 2, 7, 2);
    t[3] = slot_tensor(3, ROCQ_Q8_0, 64, 2, 7, 2);
    t[4] = slot_tensor(4, ROCQ_F32, 7, 3, 4, 2);
    t[5] = slot_tensor(5, ROCQ_F32, 4, 1, 1, 1);
    t[6] = slot_tensor(6, ROCQ_I32, 2, 1, 1, 1);
    t[7] = slot_tensor(7, ROCQ_F32, 4, 3, 2, 1);
    rocq_attention_params at = {.out = &t[0], .q = &t[1], .k = &t[2], .v = &t[3], .mask = &t[4],
                                .sinks = &t[5], .kv_len = &t[6], .lse = &t[7], .causal = true};
    check_refusals(ctx, &(op_case){ROCQ_OP_ATTENTION, &at,
                                   {&t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6], &t[7]},
                                   {true, [7] = true}});
    at.lse = NULL;
    at.window = -1;
    assert_int_equal(rocq_attention(ctx, &at), ROCQ_E_ARGUMENT);
    at.window = 4;
    at.causal = false;
    assert_int_equal(rocq_attention(ctx, &at), ROCQ_E_ARGUMENT);
    at.window = 0;
    at.softcap = -1;
    assert_int_equal(rocq_attention(ctx, &at), ROCQ_E_ARGUMENT);
    at.softcap = 0;
    t[2] = slot_tensor(2, ROCQ_F16, 64, 3, 7, 2);
    t[3] = slot_tensor(3, ROCQ_F16, 64, 3, 7, 2);
    assert_int_equal(rocq_attention(ctx, &at), ROCQ_E_SHAPE); // 4 heads over 3
    t[2] = slot_tensor(2, ROCQ_F16, 64, 2, 8, 1);
    t[3] = slot_tensor(3, ROCQ_F16, 64, 2, 8, 1);
    t[4] = slot_tensor(4, ROCQ_F32, 6, 3, 1, 1);
    t[7] = slot_tensor(7, ROCQ_I32, 3, 2, 1, 1);
    at.page_table = &t[7];
    at.page_size = 2;
    check_refusals(ctx, &(op_case){ROCQ_OP_ATTENTION, &at, {&t[0], &t[7]}, {true}});
    at.page_size = 0;
    assert_int_equal(rocq_attention(ctx, &at), ROCQ_E_ARGUMENT);

    for (int i = 0; i < 9; i++) { // dq, dout, out, q; dk, dv, k, v; lse
        t[i] = i < 4 ? slot_tensor(i, ROCQ_F32, 64, 4, 3, 2)
                     : slot_tensor(i, ROCQ_F16, 64, 2, 7, 2);
    }
    t[8] = slot_tensor(8, ROCQ_F32, 4, 3, 2, 1);
    rocq_attention_backward_params attend = {
        .dq = &t[0], .dk = &t[4], .dv = &t[5], .dout = &t[1], .out = &t[2], .q = &t[3],
        .k = &t[6], .v = &t[7], .lse = &t[8], .causal = true};
    check_refusals(ctx, &(op_case){ROCQ_OP_ATTENTION_BACKWARD, &attend,
                                   {&t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6], &t[7], &t[8]},
                                   {true, [4] = true, [5] = true}});
    bytes = 0;
    assert_int_equal(rocq_plan_begin(ctx, &bytes), ROCQ_OK);
    assert_int_equal(rocq_attention_backward(ctx, &attend), ROCQ_OK);
    rocq_plan_end(ctx);
    assert_true(bytes > 0);
    attend.window = -1;
    assert_int_equal(rocq_attention_backward(ctx, &attend), ROCQ_E_ARGUMENT);
    attend.window = 0;
    attend.softcap = NAN;
    assert_int_equal(rocq_attention_backward(ctx, &attend), ROCQ_E_ARGUMENT);
    attend.softcap = 0;
    for (int i = 4; i < 8; i++) t[i] = slot_tensor(i, ROCQ_F32, 64, 3, 7, 2);
    assert_int_equal(rocq_attention_backward(ctx, &attend), ROCQ_E_SHAPE); // 4 heads over 3
    for (int i = 0; i < 8; i++) t[i] = slot_tensor(i, ROCQ_F32, 520, 1, 2, 1);
    t[8] = slot_tensor(8, ROCQ_F32, 1, 2, 1, 1);
    assert_int_equal(rocq_attention_backward(ctx, &attend), ROCQ_E_UNSUPPORTED);

    t[0] = slot_tensor(0, ROCQ_Q8_0, 32, 3, 2, 1);
    t[1] = slot_tensor(1, ROCQ_F32, 32, 3, 2, 1);
    t[2] = slot_tensor(2, ROCQ_F32, 32, 1, 1, 1);
    t[3] = slot_tensor(3, ROCQ_F32, 32, 1, 1, 1);
    t[4] = slot_tensor(4, ROCQ_F32, 3, 2, 1, 1);
    t[5] = slot_tensor(5, ROCQ_F32, 3, 2, 1, 1);
    rocq_norm_params norm = {&t[0], &t[1], &t[2], NULL, NULL, &t[5], 0};
    check_refusals(
        ctx, &(op_case){
                 ROCQ_OP_RMSNORM, &norm, {&t[0], &t[1], &t[2], &t[5]}, {true, false, false, true}});
    norm.bias = &t[3];
    assert_int_equal(rocq_rmsnorm(ctx, &norm), ROCQ_E_ARGUMENT);
    norm.mean = &t[4];
    check_refusals(ctx, &(op_case){ROCQ_OP_LAYERNORM,
                                   &norm,
                                   {&t[0], &t[1], &t[2], &t[3], &t[4], &t[5]},
                                   {true, false, false, false, true, true}});
    norm.eps = -1;
    assert_int_equal(rocq_layernorm(ctx, &norm), ROCQ_E_ARGUMENT);

    t[0] = slot_tensor(0, ROCQ_F32, 64, 4, 3, 1);
    t[1] = slot_tensor(1, ROCQ_F16, 64, 4, 3, 1);
    t[2] = slot_tensor(2, ROCQ_I32, 3, 1, 1, 1);
    t[3] = slot_tensor(3, ROCQ_F32, 16, 1, 1, 1);
    rocq_rope_params rope = {.y = &t[0], .x = &t[1], .pos = &t[2],
                             .rope = {.n_dims = 32, .freq_factors = &t[3]}};
    check_refusals(ctx, &(op_case){ROCQ_OP_ROPE, &rope, {&t[0], &t[1], &t[2], &t[3]}, {true}});
    rope.rope.n_dims = 31;
    assert_int_equal(rocq_rope(ctx, &rope), ROCQ_E_SHAPE);
    rope.rope.n_dims = 66;
    assert_int_equal(rocq_rope(ctx, &rope), ROCQ_E_SHAPE);
    rope.rope.n_dims = 32;
    rope.rope.ext_factor = 1;
    assert_int_equal(rocq_rope(ctx, &rope), ROCQ_E_ARGUMENT); // YaRN without n_ctx_orig
    rope.rope.ext_factor = 0;
    rope.rope.pairing = (rocq_rope_pairing)5;
    assert_int_equal(rocq_rope(ctx, &rope), ROCQ_E_ARGUMENT);

    t[0] = slot_tensor(0, ROCQ_F32, 64, 4, 3, 1);
    t[1] = slot_tensor(1, ROCQ_F32, 64, 2, 3, 1);
    t[2] = slot_tensor(2, ROCQ_F32, 64, 2, 3, 1);
    t[3] = slot_tensor(3, ROCQ_F16, 64, 2, 9, 1);
    t[4] = slot_tensor(4, ROCQ_Q8_0, 64, 2, 9, 1);
    t[5] = slot_tensor(5, ROCQ_I32, 3, 1, 1, 1);
    t[6] = slot_tensor(6, ROCQ_I32, 3, 1, 1, 1);
    rocq_rope_append_params append = {&t[0], &t[1], &t[2], &t[3],
                                      &t[4], &t[5], &t[6], {.n_dims = 64}};
    check_refusals(ctx, &(op_case){ROCQ_OP_ROPE_APPEND, &append,
                                   {&t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6]},
                                   {true, false, false, true, true}});

    t[0] = slot_tensor(0, ROCQ_F32, 32, 3, 2, 1);
    t[1] = slot_tensor(1, ROCQ_F16, 32, 3, 2, 1);
    t[2] = slot_tensor(2, ROCQ_F32, 32, 3, 2, 1);
    const rocq_activate_params activate = {&t[0], &t[1], ROCQ_ACT_GELU};
    check_refusals(ctx, &(op_case){ROCQ_OP_ACTIVATE, &activate, {&t[0], &t[1]}, {true}});
    const rocq_glu_params glu = {&t[0], &t[1], &t[2], ROCQ_ACT_SILU};
    check_refusals(ctx, &(op_case){ROCQ_OP_GLU, &glu, {&t[0], &t[1], &t[2]}, {true}});
    const rocq_binary_params binary = {&t[0], &t[1], &t[2]};
    check_refusals(ctx, &(op_case){ROCQ_OP_ADD, &binary, {&t[0], &t[1], &t[2]}, {true}});
    check_refusals(ctx, &(op_case){ROCQ_OP_MUL, &binary, {&t[0], &t[1], &t[2]}, {true}});
    const rocq_scale_params scale = {&t[0], &t[1], 2, 1, ROCQ_ACT_TANH};
    check_refusals(ctx, &(op_case){ROCQ_OP_SCALE, &scale, {&t[0], &t[1]}, {true}});
    t[3] = slot_tensor(3, ROCQ_Q5_1, 32, 3, 2, 1);
    const rocq_cast_params cast = {&t[3], &t[1]};
    check_refusals(ctx, &(op_case){ROCQ_OP_CAST, &cast, {&t[3], &t[1]}, {true}});
    t[4] = slot_tensor(4, ROCQ_I32, 32, 3, 2, 1);
    const rocq_cast_params cast_i32 = {&t[4], &t[1]};
    assert_int_equal(rocq_cast(ctx, &cast_i32), ROCQ_E_FORMAT);
    t[5] = slot_tensor(5, ROCQ_F16, 32, 3, 1, 1);
    const rocq_softmax_params softmax = {&t[0], &t[2], &t[5], 0};
    check_refusals(ctx, &(op_case){ROCQ_OP_SOFTMAX, &softmax, {&t[0], &t[2], &t[5]}, {true}});

    t[0] = slot_tensor(0, ROCQ_F32, 256, 3, 1, 1);
    t[1] = slot_tensor(1, ROCQ_Q6_K, 256, 9, 1, 1);
    t[2] = slot_tensor(2, ROCQ_I32, 3, 1, 1, 1);
    const rocq_gather_params gather = {&t[0], &t[1], &t[2], 0};
    check_refusals(ctx, &(op_case){ROCQ_OP_GATHER, &gather, {&t[0], &t[1], &t[2]}, {true}});
    const rocq_argmax_params argmax = {&t[2], &t[0]};
    check_refusals(ctx, &(op_case){ROCQ_OP_ARGMAX, &argmax, {&t[2], &t[0]}, {true}});

    t[0] = slot_tensor(0, ROCQ_I32, 1, 1, 1, 1);
    t[1] = slot_tensor(1, ROCQ_F32, 1, 1, 1, 1);
    t[2] = slot_tensor(2, ROCQ_F32, 100, 1, 1, 1);
    t[3] = slot_tensor(3, ROCQ_I32, 7, 1, 1, 1);
    t[4] = slot_tensor(4, ROCQ_I32, 4, 1, 1, 1);
    rocq_sample_params sample = {.token = &t[0], .prob = &t[1], .logits = &t[2], .recent = &t[3],
                                 .allowed = &t[4], .temperature = 1};
    check_refusals(
        ctx,
        &(op_case){ROCQ_OP_SAMPLE, &sample, {&t[0], &t[1], &t[2], &t[3], &t[4]}, {true, true}});
    sample.temperature = NAN;
    assert_int_equal(rocq_sample(ctx, &sample), ROCQ_E_ARGUMENT);
    sample.temperature = 1;
    sample.top_k = -1;
    assert_int_equal(rocq_sample(ctx, &sample), ROCQ_E_ARGUMENT);

    t[0] = slot_tensor(0, ROCQ_I32, 2, 3, 1, 1);
    t[1] = slot_tensor(1, ROCQ_F32, 2, 3, 1, 1);
    t[2] = slot_tensor(2, ROCQ_F32, 8, 3, 1, 1);
    t[3] = slot_tensor(3, ROCQ_F32, 8, 1, 1, 1);
    t[4] = slot_tensor(4, ROCQ_F32, 8, 1, 1, 1);
    rocq_route_params route = {.ids = &t[0], .weights = &t[1], .logits = &t[2], .bias = &t[3],
                               .expert_scale = &t[4]};
    check_refusals(ctx, &(op_case){ROCQ_OP_ROUTE, &route, {&t[0], &t[1], &t[2], &t[3], &t[4]},
                                   {true, true}});
    route.n_groups = 3;
    assert_int_equal(rocq_route(ctx, &route), ROCQ_E_ARGUMENT);

    t[0] = slot_tensor(0, ROCQ_F32, 32, 3, 1, 1);
    t[1] = slot_tensor(1, ROCQ_Q4_K, 256, 32, 4, 1);
    t[2] = slot_tensor(2, ROCQ_Q4_K, 256, 32, 4, 1);
    t[3] = slot_tensor(3, ROCQ_F32, 256, 1, 3, 1);
    t[4] = slot_tensor(4, ROCQ_I32, 2, 3, 1, 1);
    t[5] = slot_tensor(5, ROCQ_F32, 32, 4, 1, 1);
    t[6] = slot_tensor(6, ROCQ_F32, 32, 4, 1, 1);
    t[7] = slot_tensor(7, ROCQ_F32, 2, 3, 1, 1);
    t[8] = slot_tensor(8, ROCQ_F32, 32, 3, 1, 1);
    t[9] = slot_tensor(9, ROCQ_I32, 4, 1, 1, 1);
    t[10] = slot_tensor(10, ROCQ_Q4_K, 256, 32, 3, 1);
    t[11] = slot_tensor(11, ROCQ_Q4_K, 256, 32, 3, 1);
    rocq_experts_params experts = {.y = &t[0], .w = &t[1], .w2 = &t[2], .x = &t[3], .ids = &t[4],
                                   .bias = &t[5], .bias2 = &t[6], .weights = &t[7],
                                   .residual = &t[8], .kept = &t[9], .w_kept = &t[10],
                                   .w2_kept = &t[11]};
    check_refusals(ctx, &(op_case){ROCQ_OP_EXPERTS, &experts,
                                   {&t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6], &t[7], &t[8],
                                    &t[9], &t[10], &t[11]},
                                   {true}});
    experts.kept = experts.w_kept = experts.w2_kept = NULL;
    experts.w2 = NULL;
    assert_int_equal(rocq_experts(ctx, &experts), ROCQ_E_ARGUMENT);

    t[0] = slot_tensor(0, ROCQ_F16, 5, 3, 2, 1);
    t[1] = slot_tensor(1, ROCQ_F32, 5, 4, 2, 1);
    t[2] = slot_tensor(2, ROCQ_F32, 15, 3, 2, 1);
    t[3] = slot_tensor(3, ROCQ_F32, 3, 5, 1, 1);
    t[4] = slot_tensor(4, ROCQ_I32, 2, 1, 1, 1);
    const rocq_shortconv_params shortconv = {.y = &t[0], .state = &t[1], .bcx = &t[2], .w = &t[3],
                                             .pos = &t[4]};
    check_refusals(ctx, &(op_case){ROCQ_OP_SHORTCONV, &shortconv,
                                   {&t[0], &t[1], &t[2], &t[3], &t[4]}, {true, true}});

    t[0] = slot_tensor(0, ROCQ_F32, 5, 4, 3, 2);
    t[1] = slot_tensor(1, ROCQ_F32, 7, 5, 4, 3);
    t[2] = slot_tensor(2, ROCQ_F32, 7, 2, 3, 2);
    t[3] = slot_tensor(3, ROCQ_F32, 7, 2, 3, 2);
    t[4] = slot_tensor(4, ROCQ_F32, 5, 4, 3, 2);
    t[5] = slot_tensor(5, ROCQ_F32, 4, 3, 2, 1);
    t[6] = slot_tensor(6, ROCQ_F32, 4, 3, 2, 1);
    t[7] = slot_tensor(7, ROCQ_F32, 4, 1, 1, 1);
    t[8] = slot_tensor(8, ROCQ_F32, 4, 1, 1, 1);
    t[9] = slot_tensor(9, ROCQ_I32, 2, 2, 1, 1);
    const rocq_delta_net_params delta_net = {
        .y = &t[0], .state = &t[1], .q = &t[2], .k = &t[3], .v = &t[4], .alpha = &t[5],
        .beta = &t[6], .a = &t[7], .dt = &t[8], .slot = &t[9]};
    check_refusals(ctx, &(op_case){ROCQ_OP_DELTA_NET, &delta_net,
                                   {&t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6], &t[7], &t[8],
                                    &t[9]}, {true, true}});

    t[0] = slot_tensor(0, ROCQ_BF16, 5, 7, 6, 2);
    t[1] = slot_tensor(1, ROCQ_Q8_0, 32 * 9, 5, 1, 1);
    t[2] = slot_tensor(2, ROCQ_F16, 32, 7, 6, 2);
    t[3] = slot_tensor(3, ROCQ_F32, 5, 1, 1, 1);
    t[4] = slot_tensor(4, ROCQ_F32, 5, 7, 6, 2);
    t[5] = slot_tensor(5, ROCQ_F32, 2, 8, 2, 1);
    t[6] = slot_tensor(6, ROCQ_F32, 32, 1, 1, 1);
    t[7] = slot_tensor(7, ROCQ_F32, 32, 1, 1, 1);
    const rocq_conv_params conv = {.y = &t[0], .w = &t[1], .x = &t[2], .bias = &t[3],
                                   .residual = &t[4], .stats = &t[5], .norm_weight = &t[6],
                                   .norm_bias = &t[7], .kw = 3, .kh = 3};
    check_refusals(ctx, &(op_case){ROCQ_OP_CONV, &conv, {&t[0], &t[1], &t[2], &t[3], &t[4], &t[5],
                                                         &t[6], &t[7]}, {true}});
    bytes = 0;
    assert_int_equal(rocq_plan_begin(ctx, &bytes), ROCQ_OK);
    assert_int_equal(rocq_conv(ctx, &conv), ROCQ_OK);
    rocq_plan_end(ctx);
    assert_true(bytes >= 32 * 9 * 5 * 4); // w in F32
    t[3] = slot_tensor(3, ROCQ_F32, 3, 8, 2, 1);
    const rocq_norm_stats_params norm_stats = {.stats = &t[5], .moments = &t[3], .x = &t[2]};
    check_refusals(ctx, &(op_case){ROCQ_OP_NORM_STATS, &norm_stats, {&t[5], &t[3], &t[2]},
                                   {true, true}});
    t[1] = slot_tensor(1, ROCQ_F32, 5, 3, 11, 2);
    const rocq_resize_params resize = {&t[0], &t[1], ROCQ_RESIZE_BILINEAR};
    check_refusals(ctx, &(op_case){ROCQ_OP_RESIZE, &resize, {&t[0], &t[1]}, {true}});
    t[0] = slot_tensor(0, ROCQ_I8, 4, 7, 6, 2);
    t[1] = slot_tensor(1, ROCQ_F16, 3, 7, 6, 2);
    t[2] = slot_tensor(2, ROCQ_I8, 6, 2, 1, 1);
    const rocq_pixels_params pixels = {.y = &t[0], .x = &t[1], .finite = &t[2]};
    check_refusals(ctx, &(op_case){ROCQ_OP_PIXELS, &pixels, {&t[0], &t[1], &t[2]},
                                   {true, false, true}});

    t[0] = slot_tensor(0, ROCQ_F32, 256, 3, 1, 1);
    t[1] = slot_tensor(1, ROCQ_F32, 256, 5, 1, 1);
    t[2] = slot_tensor(2, ROCQ_F32, 5, 1, 1, 1);
    t[3] = slot_tensor(3, ROCQ_F16, 5, 3, 1, 1);
    t[4] = slot_tensor(4, ROCQ_Q4_K, 256, 5, 1, 1);
    t[5] = slot_tensor(5, ROCQ_F32, 256, 3, 1, 1);
    t[6] = slot_tensor(6, ROCQ_F16, 256, 3, 1, 1);
    t[7] = slot_tensor(7, ROCQ_F32, 256, 3, 1, 1);
    const rocq_matmul_backward_params back = {
        .dx = &t[0], .dw = &t[1], .db = &t[2], .dy = &t[3], .w = &t[4], .x = &t[5], .z = &t[6],
        .residual = &t[7], .activation = ROCQ_ACT_GELU};
    check_refusals(ctx, &(op_case){ROCQ_OP_MATMUL_BACKWARD, &back,
                                   {&t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6], &t[7]},
                                   {true, true, true}});
    t[0] = slot_tensor(0, ROCQ_F16, 32, 3, 2, 1);
    t[1] = slot_tensor(1, ROCQ_F32, 32, 1, 1, 1);
    t[2] = slot_tensor(2, ROCQ_F32, 32, 1, 1, 1);
    t[3] = slot_tensor(3, ROCQ_F32, 32, 3, 2, 1);
    t[4] = slot_tensor(4, ROCQ_F16, 32, 3, 2, 1);
    t[5] = slot_tensor(5, ROCQ_F32, 32, 1, 1, 1);
    t[6] = slot_tensor(6, ROCQ_F32, 3, 2, 1, 1);
    t[7] = slot_tensor(7, ROCQ_F32, 3, 2, 1, 1);
    t[8] = slot_tensor(8, ROCQ_F16, 32, 3, 2, 1);
    const rocq_norm_backward_params norm_backward = {
        .dx = &t[0], .dx16 = &t[8], .dweight = &t[1], .dbias = &t[2], .dy = &t[3], .x = &t[4],
        .weight = &t[5], .mean = &t[6], .rstd = &t[7], .residual = &t[0]};
    check_refusals(ctx, &(op_case){ROCQ_OP_NORM_BACKWARD, &norm_backward,
                                   {&t[0], &t[1], &t[2], &t[8], &t[3], &t[4], &t[5], &t[6], &t[7]},
                                   {true, true, true, true}});
    t[5] = slot_tensor(5, ROCQ_F16, 32, 3, 2, 1);
    t[6] = slot_tensor(6, ROCQ_F32, 32, 3, 2, 1);
    rocq_activate_backward_params slope = {&t[0], &t[3], &t[4], ROCQ_ACT_SILU};
    check_refusals(ctx,
                   &(op_case){ROCQ_OP_ACTIVATE_BACKWARD, &slope, {&t[0], &t[3], &t[4]}, {true}});
    slope.activation = (rocq_activation)9;
    assert_int_equal(rocq_activate_backward(ctx, &slope), ROCQ_E_ARGUMENT);
    const rocq_glu_backward_params slopes = {&t[0], &t[6], &t[3], &t[4], &t[5], ROCQ_ACT_GELU};
    check_refusals(
        ctx, &(op_case){
                 ROCQ_OP_GLU_BACKWARD, &slopes, {&t[0], &t[6], &t[3], &t[4], &t[5]}, {true, true}});
    t[0] = slot_tensor(0, ROCQ_F32, 100, 9, 1, 1);
    t[2] = slot_tensor(2, ROCQ_F16, 100, 3, 1, 1);
    t[3] = slot_tensor(3, ROCQ_I32, 3, 1, 1, 1);
    const rocq_gather_backward_params scatter = {&t[0], &t[2], &t[3], 0};
    check_refusals(ctx, &(op_case){ROCQ_OP_GATHER_BACKWARD, &scatter, {&t[2], &t[3], &t[0]},
                                   {false, false, true}});
    t[1] = slot_tensor(1, ROCQ_F32, 3, 1, 1, 1);
    t[2] = slot_tensor(2, ROCQ_F32, 100, 3, 1, 1);
    t[4] = slot_tensor(4, ROCQ_F32, 3, 1, 1, 1);
    t[5] = slot_tensor(5, ROCQ_F32, 1, 1, 1, 1);
    t[6] = slot_tensor(6, ROCQ_F16, 100, 3, 1, 1);
    rocq_cross_entropy_params entropy = {.loss = &t[1], .dlogits = &t[6], .logits = &t[2],
                                         .targets = &t[3], .weights = &t[4], .scale = &t[5]};
    check_refusals(ctx, &(op_case){ROCQ_OP_CROSS_ENTROPY, &entropy,
                                   {&t[1], &t[2], &t[3], &t[4], &t[5], &t[6]},
                                   {true, false, false, false, false, true}});
    entropy.softcap = -1;
    assert_int_equal(rocq_cross_entropy(ctx, &entropy), ROCQ_E_ARGUMENT);
    t[0] = slot_tensor(0, ROCQ_F32, ROCQ_TRAIN_STATE, 1, 1, 1);
    t[1] = slot_tensor(1, ROCQ_F32, 700, 1, 1, 1);
    rocq_grad_norm_params grad_norm = {.state = &t[0], .g = &t[1]};
    check_refusals(ctx, &(op_case){ROCQ_OP_GRAD_NORM, &grad_norm, {&t[0], &t[1]}, {true}});
    grad_norm.max_norm = NAN;
    assert_int_equal(rocq_grad_norm(ctx, &grad_norm), ROCQ_E_ARGUMENT);
    t[2] = slot_tensor(2, ROCQ_I8, 700, 1, 1, 1);
    t[3] = slot_tensor(3, ROCQ_I8, 700, 1, 1, 1);
    t[4] = slot_tensor(4, ROCQ_F32, 3, 1, 1, 1);
    t[5] = slot_tensor(5, ROCQ_F32, 3, 1, 1, 1);
    t[6] = slot_tensor(6, ROCQ_BF16, 700, 1, 1, 1);
    t[7] = slot_tensor(7, ROCQ_F32, 700, 1, 1, 1);
    t[8] = slot_tensor(8, ROCQ_F32, 1, 1, 1, 1);
    rocq_adamw_params adamw = {.w = &t[1], .w16 = &t[6], .m = &t[2], .v = &t[3], .m_scale = &t[4],
                               .v_scale = &t[5], .g = &t[7], .state = &t[0], .lr = &t[8]};
    check_refusals(ctx, &(op_case){ROCQ_OP_ADAMW, &adamw,
                                   {&t[1], &t[2], &t[3], &t[4], &t[5], &t[6], &t[7], &t[0], &t[8]},
                                   {true, true, true, true, true, true, true}});
    adamw.m_scale = NULL;
    assert_int_equal(rocq_adamw(ctx, &adamw), ROCQ_E_ARGUMENT);
    adamw.m_scale = &t[4];
    adamw.beta2 = 1;
    assert_int_equal(rocq_adamw(ctx, &adamw), ROCQ_E_ARGUMENT);
    adamw.beta2 = 0;
    t[3].format = ROCQ_F32;
    assert_int_equal(rocq_adamw(ctx, &adamw), ROCQ_E_FORMAT);
    t[3].format = ROCQ_I8;
    t[4].ne[0] = 2;
    assert_int_equal(rocq_adamw(ctx, &adamw), ROCQ_E_SHAPE);

    assert_int_equal(rocq_supports(ctx, (rocq_op)99, &sample, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_supports(NULL, ROCQ_OP_SAMPLE, &sample, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_matmul(NULL, &mm), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_matmul(ctx, NULL), ROCQ_E_ARGUMENT);
    rocq_close(&ctx);
}

// What is planned is checked and measured, and writes nothing.
static void ops_are_planned(void **state) {
    (void)state;
    rocq_ctx *ctx = open_cpu();
    const rocq_tensor y = slot_tensor(0, ROCQ_F32, 5, 3, 1, 1);
    const rocq_tensor w = slot_tensor(1, ROCQ_Q4_K, 256, 5, 1, 1);
    const rocq_tensor x = slot_tensor(2, ROCQ_F32, 256, 3, 1, 1);
    const rocq_matmul_params mm = {.y = &y, .w = &w, .x = &x};
    const rocq_scale_params scale = {.y = &y, .x = &y, .scale = 2}, bad = {.y = &y};
    rocq_graph *graph;
    rocq_stats before, after;
    float v[15];
    int64_t bytes = 1, most;
    memset(arena_memory, 1, sizeof arena_memory);
    assert_int_equal(rocq_plan_begin(NULL, &bytes), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_plan_begin(ctx, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_get_stats(ctx, &before), ROCQ_OK);
    assert_int_equal(rocq_plan_begin(ctx, &bytes), ROCQ_OK);
    assert_int_equal(rocq_plan_begin(ctx, &most), ROCQ_E_STATE);
    assert_int_equal(rocq_graph_begin(ctx), ROCQ_E_STATE);
    assert_int_equal(rocq_upload(ctx, &y, v, sizeof v), ROCQ_E_STATE);
    assert_int_equal(rocq_download(ctx, v, &y, sizeof v), ROCQ_E_STATE);
    assert_int_equal(rocq_sync(ctx), ROCQ_E_STATE);
    assert_string_equal(rocq_error(ctx), "sync: ops are being planned");
    assert_int_equal(rocq_scale(ctx, &scale), ROCQ_OK);
    assert_int_equal(bytes, 1); // it needs none
    assert_int_equal(rocq_matmul(ctx, &mm), ROCQ_OK);
    assert_true(bytes > 1);
    most = bytes;
    assert_int_equal(rocq_scale(ctx, &bad), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_scale(ctx, &scale), ROCQ_OK);
    assert_int_equal(bytes, most);
    rocq_plan_end(ctx);
    rocq_plan_end(ctx);
    rocq_plan_end(NULL);
    for (size_t i = 0; i < sizeof arena_memory; i++) assert_int_equal(arena_memory[i], 1);
    assert_int_equal(rocq_get_stats(ctx, &after), ROCQ_OK);
    assert_int_equal(after.n_allocs, before.n_allocs);
    assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
    assert_int_equal(rocq_plan_begin(ctx, &bytes), ROCQ_E_STATE);
    assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);
    assert_int_equal(rocq_reserve(ctx, bytes), ROCQ_OK);
    assert_int_equal(rocq_get_stats(ctx, &before), ROCQ_OK);
    assert_int_equal(rocq_matmul(ctx, &mm), ROCQ_OK);
    assert_int_equal(rocq_get_stats(ctx, &after), ROCQ_OK);
    assert_int_equal(after.n_allocs, before.n_allocs);
    assert_true(arena_memory[0] != 1 || arena_memory[1] != 1);
    rocq_close(&ctx);
}

// What the program cancelled is in the log, but not as an error; other failures are errors still.
static void cancelling_is_no_error_of_the_log(void **state) {
    (void)state;
    enum { N = 1 << 16 }; // enough for all threads
    static float v[N];
    const int64_t ne = N;
    rocq_ctx *ctx;
    rocq_graph *graph = NULL;
    rocq_tensor x;
    log_entry entry = {0};
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 2, .log = log_keep,
                            .log_user = &entry};
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    assert_int_equal(rocq_tensor_from_host(&x, v, ROCQ_F32, 1, &ne), ROCQ_OK);
    const rocq_scale_params twice = {.y = &x, .x = &x, .scale = 2}, none = {.y = &x};
    assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
    assert_int_equal(rocq_scale(ctx, &twice), ROCQ_OK);
    assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);
    for (int replay = 0; replay < 2; replay++) {
        entry = (log_entry){0};
        rocq_cancel(ctx);
        assert_int_equal(entry.n, 0);
        assert_int_equal(replay ? rocq_graph_launch(ctx, graph) : rocq_scale(ctx, &twice),
                         ROCQ_E_CANCELLED);
        assert_int_equal(entry.n, 1);
        assert_int_equal(entry.level, ROCQ_LOG_INFO);
        assert_non_null(strstr(entry.text, "rocq_cancel was called"));
        assert_string_equal(entry.text, rocq_error(ctx));
        assert_int_equal(rocq_sync(ctx), ROCQ_OK);
        assert_int_equal(rocq_scale(ctx, &none), ROCQ_E_ARGUMENT);
        assert_int_equal(entry.n, 2);
        assert_int_equal(entry.level, ROCQ_LOG_ERROR);
    }
    rocq_graph_destroy(ctx, &graph);
    rocq_close(&ctx);
}

// A message of any text is a line of UTF-8, and what is too long ends with a whole character.
static void messages_are_one_line_of_utf8(void **state) {
    (void)state;
    static const struct { const char *text; size_t size; const char *message; } cases[] = {
        {"", 1, ""}, {"", 8, ""}, {"plain", 6, "plain"},
        {"a\tb\x1b[31m\x7f\n", 64, "a?b?[31m?\?"}, {"\xc2\x9b\xe2\x80\xa8", 64, "?\?\?\?\?"},
        {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", 10, "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"},
        {"ab\xc3", 4, "ab"}, {"ab\xe2\x82", 5, "ab"}, {"ab\xf0\x9f\x98", 6, "ab"}, {"\xe2", 2, ""},
        {"ab\xc3", 5, "ab?"}, {"ab\xe2\x82", 64, "ab?\?"}, // not cut, but no UTF-8
        {"ab\x82", 4, "ab?"}, {"\xff\xff", 3, "?\?"}, {"\xc3z\xc3", 4, "?z"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[64];
        snprintf(text, sizeof text, "%s", cases[i].text);
        rocq_message_clean(text, cases[i].size);
        if (strcmp(text, cases[i].message) != 0) fail_msg("case %d gave %s", (int)i, text);
    }
    rocq_message_clean(NULL, 0);

    log_entry entry = {0};
    rocq_ctx *ctx = NULL;
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1, .log = log_keep,
                            .log_user = &entry};
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    for (int letters = 0; letters < 3; letters++) { // the cut moves through a character
        char path[640] = "xx";
        rocq_file *file = NULL;
        path[letters] = '\0';
        while (strlen(path) < 630) strcat(path, "\xe2\x82\xac");
        assert_true(rocq_file_open(ctx, &file, path) != ROCQ_OK);
        const char *message = rocq_error(ctx), *euros = strchr(message, '\xe2');
        assert_string_equal(entry.text, message);
        assert_in_range(strlen(message), inside_error_size() - 3, inside_error_size() - 1);
        assert_non_null(euros);
        assert_int_equal(strlen(euros) % 3, 0);
        assert_memory_equal(path + letters, euros, strlen(euros));
    }
    rocq_close(&ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(results_have_names_and_stable_codes),
        cmocka_unit_test(messages_are_one_line_of_utf8),
        cmocka_unit_test(cancelling_is_no_error_of_the_log),
        cmocka_unit_test(slices_are_hard_to_misuse),
        cmocka_unit_test(open_fills_in_defaults),
        cmocka_unit_test(open_refuses_bad_descs),
        cmocka_unit_test(cpu_tiers),
        cmocka_unit_test(gpu_is_refused_or_falls_back),
        cmocka_unit_test(every_failing_allocation_of_open_is_reported),
        cmocka_unit_test(buffers_are_aligned_counted_and_freed),
        cmocka_unit_test(only_a_whole_buffer_is_freed),
        cmocka_unit_test(growing_scratch_keeps_the_budget),
        cmocka_unit_test(arena_measures_cuts_and_resets),
        cmocka_unit_test(a_measured_peak_fits_any_memory),
        cmocka_unit_test(tensors_know_their_size_and_bounds),
        cmocka_unit_test(views_reshapes_and_permutations),
        cmocka_unit_test(slices_and_heads),
        cmocka_unit_test(tensors_of_plain_sizes),
        cmocka_unit_test(strings_and_names),
        cmocka_unit_test(uploads_and_downloads_are_exact),
        cmocka_unit_test(threads_do_every_item_once),
        cmocka_unit_test(ops_refuse_bad_operands),
        cmocka_unit_test(ops_are_planned),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
