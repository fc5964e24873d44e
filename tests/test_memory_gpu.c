// Pools and arenas of a GPU context: device and pinned memory, order of reuse, what waits, memory
// that runs out, and a GPU that is lost. On the stand-in's runtime (tests/simt/hip.h).
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "simt/hip.h"
#include "simt/left.h"

enum { N = 512 }; // elements of a row

static int begin(void **state) {
    (void)state;
    simt_begin();
    simt_set_work(SIMT_LATEST); // memory that is freed too early is found
    return 0;
}

// Nothing is left on the device, and the runtime was never called wrongly.
static int nothing_is_left(void **state) {
    (void)state;
    return simt_check_left(0);
}

static rocq_ctx *open_gpu(int64_t budget) {
    rocq_ctx *ctx = NULL;
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_GPU, .n_threads = 1, .memory_budget = budget};
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    return ctx;
}

static rocq_pool *pool_of(rocq_ctx *ctx, rocq_pool_desc desc) {
    rocq_pool *pool = NULL;
    assert_int_equal(rocq_pool_create(ctx, &pool, &desc), ROCQ_OK);
    return pool;
}

static rocq_pool_stats total(rocq_pool *pool) {
    rocq_pool_stats s;
    assert_int_equal(rocq_pool_get_stats(pool, -1, &s), ROCQ_OK);
    return s;
}

static rocq_tensor row_in(const rocq_buffer *buffer) {
    rocq_tensor t;
    const int64_t ne[1] = {N};
    assert_int_equal(rocq_tensor_init(&t, buffer, 0, ROCQ_F32, 1, ne), ROCQ_OK);
    return t;
}

static int64_t n_launched(void) { // of all kernels
    int64_t n = 0;
    for (int i = 0; simt_kernel_at(i); i++) n += simt_launches(simt_kernel_at(i));
    return n;
}

static void blocks_are_where_they_were_asked_for(void **state) {
    (void)state;
    rocq_ctx *ctx = open_gpu(0);
    for (rocq_memory memory = ROCQ_MEMORY_DEFAULT; memory <= ROCQ_MEMORY_DEVICE; memory++) {
        const simt_live before = simt_get_live();
        const int64_t live = ctx->stats.live_bytes;
        rocq_pool *pool = pool_of(ctx, (rocq_pool_desc){.memory = memory});
        const bool device = memory == ROCQ_MEMORY_DEFAULT || memory == ROCQ_MEMORY_DEVICE;
        const bool pinned = memory == ROCQ_MEMORY_PINNED;
        rocq_buffer b[100];
        for (int i = 0; i < 100; i++) {
            assert_int_equal(rocq_pool_alloc(pool, &b[i], 1 + 700 * (int64_t)i), ROCQ_OK);
            assert_int_equal(b[i].host != NULL, !device);
            assert_int_equal(b[i].device.address != 0, device);
            assert_int_equal((b[i].device.address | (uintptr_t)b[i].host) % 256, 0);
            if (b[i].host) memset(b[i].host, i, (size_t)b[i].size);
        }
        const int64_t reserved = total(pool).reserved_bytes, slabs = total(pool).n_reserves;
        simt_live now = simt_get_live();
        assert_int_equal(now.device_blocks - before.device_blocks, device ? slabs : 0);
        assert_int_equal(now.device_bytes - before.device_bytes, device ? reserved : 0);
        assert_int_equal(now.host_blocks - before.host_blocks, pinned ? slabs : 0);
        assert_true(ctx->stats.live_bytes - live >= reserved);
        assert_int_equal(ctx->budget_used, reserved);
        for (int i = 0; i < 100; i++) {
            rocq_buffer copy = b[i];
            assert_int_equal(rocq_pool_free(pool, &b[i]), ROCQ_OK);
            assert_int_equal(rocq_pool_free(pool, &copy), ROCQ_E_ARGUMENT);
            assert_int_equal(rocq_buffer_free(ctx, &copy), ROCQ_E_ARGUMENT); // it is not the
                                                                             // context's
        }
        assert_int_equal(rocq_pool_trim(pool, 0), ROCQ_OK);
        now = simt_get_live();
        assert_memory_equal(&now, &before, sizeof now);
        assert_int_equal(rocq_pool_alloc(pool, &b[0], 1 << 20), ROCQ_OK);
        rocq_pool_destroy(&pool); // with a block still out
        assert_int_equal(ctx->budget_used, 0);
        assert_int_equal(ctx->stats.live_bytes, live);
    }
    rocq_close(&ctx);
}

// A block may be freed while an op that reads it is still to run: the next owner's writes are
// behind it in the stream. Only what gives memory back waits.
static void freed_blocks_serve_work_in_order(void **state) {
    (void)state;
    rocq_ctx *ctx = open_gpu(0);
    rocq_pool *pool = pool_of(ctx, (rocq_pool_desc){0});
    rocq_buffer sum_block;
    assert_int_equal(rocq_pool_alloc(pool, &sum_block, N * 4), ROCQ_OK);
    const rocq_tensor sum = row_in(&sum_block);
    float host[N], expected[N];
    for (int i = 0; i < N; i++) host[i] = expected[i] = 0;
    assert_int_equal(rocq_upload(ctx, &sum, host, sizeof host), ROCQ_OK);
    uint64_t address = 0;
    for (int step = 1; step <= 20; step++) {
        rocq_buffer block;
        assert_int_equal(rocq_pool_alloc(pool, &block, N * 4), ROCQ_OK);
        if (step > 1) assert_int_equal(block.device.address, address);
        address = block.device.address;
        const rocq_tensor x = row_in(&block);
        for (int i = 0; i < N; i++) {
            host[i] = (float)(step * i % 17);
            expected[i] += host[i];
        }
        assert_int_equal(rocq_upload(ctx, &x, host, sizeof host), ROCQ_OK);
        const rocq_binary_params add = {.y = &sum, .a = &sum, .b = &x};
        assert_int_equal(rocq_add(ctx, &add), ROCQ_OK);
        assert_int_equal(rocq_pool_free(pool, &block), ROCQ_OK);
        if (step % 7 == 0) assert_int_equal(rocq_pool_trim(pool, 0), ROCQ_OK); // sum's slab stays
    }
    for (int i = 0; i < N; i++) host[i] = NAN;
    assert_int_equal(rocq_download(ctx, host, &sum, sizeof host), ROCQ_OK);
    for (int i = 0; i < N; i++) assert_true(host[i] == expected[i]);

    // Work that is still queued over large blocks when they are given back, and when the pool goes.
    for (int destroy = 0; destroy < 2; destroy++) {
        rocq_buffer large[2];
        for (int k = 0; k < 2; k++) {
            assert_int_equal(rocq_pool_alloc(pool, &large[k], 4 << 20), ROCQ_OK);
        }
        const rocq_tensor a = row_in(&large[0]), b = row_in(&large[1]);
        for (int i = 0; i < N; i++) host[i] = 1;
        assert_int_equal(rocq_upload(ctx, &a, host, sizeof host), ROCQ_OK);
        const rocq_binary_params add = {.y = &b, .a = &a, .b = &a};
        assert_int_equal(rocq_add(ctx, &add), ROCQ_OK);
        const int64_t launched = n_launched();
        for (int k = 0; k < 2; k++) assert_int_equal(rocq_pool_free(pool, &large[k]), ROCQ_OK);
        assert_int_equal(n_launched(), launched); // free waits for nothing
        if (destroy) rocq_pool_destroy(&pool);
        else assert_int_equal(rocq_pool_trim(pool, 0), ROCQ_OK);
        assert_true(n_launched() > launched);
    }
    rocq_close(&ctx);
}

// The device has 64 MiB: free blocks are given back for what no longer fits.
static void free_blocks_make_room(void **state) {
    (void)state;
    simt_set_memory(64 << 20);
    rocq_ctx *ctx = open_gpu(0);
    rocq_pool *pool = pool_of(ctx, (rocq_pool_desc){0});
    rocq_buffer b[6], none = {0}, same = none;
    for (int i = 0; i < 6; i++) assert_int_equal(rocq_pool_alloc(pool, &b[i], 8 << 20), ROCQ_OK);
    assert_int_equal(rocq_pool_alloc(pool, &none, 40 << 20), ROCQ_E_MEMORY);
    assert_memory_equal(&none, &same, sizeof none);
    for (int i = 0; i < 6; i++) assert_int_equal(rocq_pool_free(pool, &b[i]), ROCQ_OK);
    assert_int_equal(rocq_pool_alloc(pool, &none, 40 << 20), ROCQ_OK);
    assert_true(total(pool).n_trims >= 5);
    assert_int_equal(rocq_pool_free(pool, &none), ROCQ_OK);
    rocq_pool_destroy(&pool);
    rocq_close(&ctx);
}

static rocq_result use_all(rocq_ctx *ctx, rocq_memory memory) {
    rocq_pool *pool;
    rocq_result result = ROCQ_OK;
    rocq_buffer b[12];
    memset(b, 0, sizeof b);
    const rocq_pool_desc desc = {.memory = memory, .slab_size = 1 << 20};
    if (rocq_pool_create(ctx, &pool, &desc) != ROCQ_OK) return ROCQ_E_MEMORY;
    for (int i = 0; i < 12; i++) {
        const rocq_buffer before = b[i];
        const rocq_result r = rocq_pool_alloc(pool, &b[i], (int64_t)1 << (8 + i));
        if (r != ROCQ_OK) assert_memory_equal(&b[i], &before, sizeof before);
        if (result == ROCQ_OK) result = r;
        if (i % 2 == 0) rocq_pool_free(pool, &b[i]);
    }
    for (int i = 0; i < 12; i++) assert_int_equal(rocq_pool_free(pool, &b[i]), ROCQ_OK);
    const rocq_result trimmed = rocq_pool_trim(pool, 0);
    if (result == ROCQ_OK) result = trimmed;
    rocq_pool_destroy(&pool);
    return result;
}

// Every runtime call fails in turn: once for lack of memory, or for good because the GPU is gone.
static void every_runtime_call_may_fail(void **state) {
    (void)state;
    enum { OUT_OF_MEMORY = 2, GONE = 719 };
    for (rocq_memory memory = ROCQ_MEMORY_PINNED; memory <= ROCQ_MEMORY_DEVICE; memory++) {
        for (int gone = 0; gone < 2; gone++) {
            bool reached = true;
            for (int64_t n = 1; reached; n++) {
                rocq_ctx *ctx = open_gpu(0);
                const int64_t calls = simt_calls();
                if (gone) simt_fail_at(n, GONE);
                else simt_fail_once(n, OUT_OF_MEMORY);
                const rocq_result result = use_all(ctx, memory);
                reached = simt_calls() - calls >= n;
                // A free that fails is nobody's failure; a lack of memory may be made up for.
                assert_true(result == ROCQ_OK ||
                            (reached && result == (gone ? ROCQ_E_LOST : ROCQ_E_MEMORY)));
                if (gone && reached) { // nothing works any more
                    rocq_pool *pool = pool_of(ctx, (rocq_pool_desc){.memory = memory});
                    rocq_buffer b = {0};
                    assert_int_equal(rocq_pool_alloc(pool, &b, 1000), ROCQ_E_LOST);
                    rocq_pool_destroy(&pool);
                }
                simt_fail_at(0, 0);
                if (!gone) assert_int_equal(use_all(ctx, memory), ROCQ_OK);
                rocq_close(&ctx);
            }
        }
    }
}

static void a_lost_gpu_gives_no_blocks(void **state) {
    (void)state;
    rocq_ctx *ctx = open_gpu(0);
    rocq_pool *pool = pool_of(ctx, (rocq_pool_desc){0});
    rocq_buffer b, c;
    assert_int_equal(rocq_pool_alloc(pool, &b, 1000), ROCQ_OK);
    assert_int_equal(rocq_pool_alloc(pool, &c, 1000), ROCQ_OK);
    assert_int_equal(rocq_pool_free(pool, &b), ROCQ_OK);
    simt_fail_at(1, 719);
    assert_int_equal(rocq_sync(ctx), ROCQ_E_LOST);
    assert_int_equal(rocq_pool_alloc(pool, &b, 1000), ROCQ_E_LOST); // though one is free
    assert_int_equal(rocq_pool_trim(pool, 1 << 20), ROCQ_OK);       // nothing to do
    assert_int_equal(rocq_pool_free(pool, &c), ROCQ_OK);
    assert_int_equal(rocq_pool_trim(pool, 0), ROCQ_E_LOST);
    assert_int_equal(total(pool).n_free, 64);
    rocq_pool_destroy(&pool);
    rocq_close(&ctx);

    simt_fail_at(0, 0);
    ctx = open_gpu(0); // closed with the pool's memory still out: nothing is left of it either
    pool = pool_of(ctx, (rocq_pool_desc){.memory = ROCQ_MEMORY_PINNED});
    assert_int_equal(rocq_pool_alloc(pool, &b, 1000), ROCQ_OK);
    rocq_close(&ctx);
}

// Downloads of all sizes at once, some straight to pinned memory, where only what is asked for is
// written; of the others, pieces of the ring are used again.
static void downloads_of_several_tensors(void **state) {
    static const int64_t sizes[] = {1, 300, 262144, 262148, 786432, 1048577, 5000000, 0, 7};
    enum { COUNT = sizeof sizes / sizeof sizes[0], GAP = 64 };
    (void)state;
    rocq_ctx *ctx = open_gpu(0);
    rocq_pool *pool = pool_of(ctx, (rocq_pool_desc){.memory = ROCQ_MEMORY_PINNED});
    rocq_buffer memory, pinned;
    rocq_tensor t[COUNT];
    int64_t size = 0;
    for (int i = 0; i < COUNT; i++) size += (sizes[i] + GAP + 3) / 4 * 4;
    assert_int_equal(rocq_buffer_alloc(ctx, &memory, size), ROCQ_OK);
    assert_int_equal(rocq_pool_alloc(pool, &pinned, size), ROCQ_OK);
    unsigned char *in = (unsigned char *)malloc((size_t)size);
    unsigned char *host = (unsigned char *)malloc((size_t)size);
    assert_true(in && host);
    for (int64_t i = 0; i < size; i++) in[i] = (unsigned char)(i * 2654435761u >> 13);
    assert_int_equal(rocq_tensor_init(&t[0], &memory, 0, ROCQ_I8, 1, &size), ROCQ_OK);
    assert_int_equal(rocq_upload(ctx, &t[0], in, size), ROCQ_OK);
    for (int way = 0; way < 3; way++) { // none, all, or every other one to pinned memory
        rocq_transfer all[COUNT];
        int32_t n = 0;
        memset(host, 0xa5, (size_t)size);
        memset(pinned.host, 0xa5, (size_t)size);
        for (int64_t i = 0, at = 0; i < COUNT; at += (sizes[i++] + GAP + 3) / 4 * 4) {
            if (sizes[i] == 0) continue;
            unsigned char *to = way == 1 || (way == 2 && i % 2) ? (unsigned char *)pinned.host
                                                                : host;
            assert_int_equal(rocq_tensor_init(&t[i], &memory, at, ROCQ_I8, 1, &sizes[i]), ROCQ_OK);
            all[n++] = (rocq_transfer){to + at, &t[i], sizes[i]};
        }
        assert_int_equal(rocq_download_all(ctx, all, n), ROCQ_OK);
        for (int64_t i = 0, at = 0; i < COUNT; at += (sizes[i++] + GAP + 3) / 4 * 4) {
            const bool to_pinned = way == 1 || (way == 2 && i % 2);
            const unsigned char *got = (to_pinned ? (unsigned char *)pinned.host : host) + at;
            assert_memory_equal(got, in + at, (size_t)sizes[i]);
            for (int64_t k = sizes[i]; k < sizes[i] + GAP; k++) assert_int_equal(got[k], 0xa5);
        }
    }
    free(in);
    free(host);
    assert_int_equal(rocq_buffer_free(ctx, &memory), ROCQ_OK);
    rocq_pool_destroy(&pool);
    rocq_close(&ctx);
}

static void arenas_cut_device_memory(void **state) {
    (void)state;
    rocq_ctx *ctx = open_gpu(0);
    rocq_arena arena;
    rocq_buffer memory;
    const int64_t size = (N * (int64_t)sizeof(float) + 255) / 256 * 256 * 8;
    assert_int_equal(rocq_buffer_alloc(ctx, &memory, size), ROCQ_OK);
    rocq_arena_init(&arena, &memory);
    int64_t n_allocs = 0;
    float host[N], back[N];
    for (int i = 0; i < N; i++) host[i] = (float)i;
    for (int step = 0; step < 10; step++) {
        rocq_tensor t[8];
        const int64_t ne[1] = {N};
        rocq_arena_reset(&arena, 0);
        for (int k = 0; k < 8; k++) {
            assert_int_equal(rocq_arena_tensor(&arena, &t[k], ROCQ_F32, 1, ne), ROCQ_OK);
            assert_int_equal((t[k].buffer.device.address + (uint64_t)t[k].offset) % 256, 0);
        }
        assert_int_equal(rocq_upload(ctx, &t[0], host, sizeof host), ROCQ_OK);
        for (int k = 1; k < 8; k++) {
            const rocq_binary_params add = {.y = &t[k], .a = &t[k - 1], .b = &t[0]};
            assert_int_equal(rocq_add(ctx, &add), ROCQ_OK);
        }
        assert_int_equal(rocq_download(ctx, back, &t[7], sizeof back), ROCQ_OK);
        for (int i = 0; i < N; i++) assert_true(back[i] == 8.0f * host[i]);
        if (step == 0) n_allocs = ctx->stats.n_allocs;
        assert_int_equal(ctx->stats.n_allocs, n_allocs);
    }
    assert_int_equal(rocq_buffer_free(ctx, &memory), ROCQ_OK);
    assert_int_equal(ctx->budget_used, ctx->stats.scratch_bytes);
    rocq_close(&ctx);
}

// An arena's first piece begins where its buffer does, and is not that buffer.
static void only_a_whole_buffer_is_freed(void **state) {
    (void)state;
    rocq_ctx *ctx = open_gpu(0);
    rocq_buffer buffer, piece;
    rocq_arena arena;
    assert_int_equal(rocq_buffer_alloc(ctx, &buffer, 4096), ROCQ_OK);
    rocq_arena_init(&arena, &buffer);
    assert_int_equal(rocq_arena_alloc(&arena, &piece, 100, 0), ROCQ_OK);
    assert_int_equal(piece.device.address, buffer.device.address);
    const rocq_buffer same = piece;
    const simt_live before = simt_get_live();
    const rocq_stats stats = ctx->stats;
    assert_int_equal(rocq_buffer_free(ctx, &piece), ROCQ_E_ARGUMENT);
    assert_non_null(strstr(rocq_error(ctx), "100 bytes"));
    assert_memory_equal(&piece, &same, sizeof piece);
    piece.size = 5000;
    assert_int_equal(rocq_buffer_free(ctx, &piece), ROCQ_E_ARGUMENT);
    const simt_live after = simt_get_live();
    assert_memory_equal(&before, &after, sizeof before);
    assert_memory_equal(&stats, &ctx->stats, sizeof stats);
    assert_int_equal(rocq_buffer_free(ctx, &buffer), ROCQ_OK);
    assert_int_equal(ctx->budget_used, 0);
    rocq_close(&ctx);
}

// What cannot be counted is found out before the first slab is taken.
static void impossible_reserves_take_nothing(void **state) {
    (void)state;
    simt_set_memory(64 << 20);
    for (rocq_memory memory = ROCQ_MEMORY_PINNED; memory <= ROCQ_MEMORY_DEVICE; memory++) {
        rocq_ctx *ctx = open_gpu(0);
        rocq_pool *pool = pool_of(ctx, (rocq_pool_desc){.memory = memory});
        const simt_live before = simt_get_live();
        const int64_t calls = simt_calls();
        simt_fail_at(20, 2); // the memory's end, if it comes to that
        assert_int_equal(rocq_pool_reserve(pool, 1 << 20, INT64_MAX), ROCQ_E_OVERFLOW);
        assert_int_equal(rocq_pool_reserve(pool, 1, (int64_t)INT32_MAX + 1), ROCQ_E_OVERFLOW);
        simt_fail_at(0, 0);
        assert_int_equal(simt_calls(), calls);
        const simt_live after = simt_get_live();
        assert_memory_equal(&before, &after, sizeof before);
        assert_int_equal(total(pool).n_reserves, 0);
        rocq_pool_destroy(&pool);
        rocq_close(&ctx);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(blocks_are_where_they_were_asked_for, begin,
                                        nothing_is_left),
        cmocka_unit_test_setup_teardown(freed_blocks_serve_work_in_order, begin, nothing_is_left),
        cmocka_unit_test_setup_teardown(free_blocks_make_room, begin, nothing_is_left),
        cmocka_unit_test_setup_teardown(every_runtime_call_may_fail, begin, nothing_is_left),
        cmocka_unit_test_setup_teardown(a_lost_gpu_gives_no_blocks, begin, nothing_is_left),
        cmocka_unit_test_setup_teardown(downloads_of_several_tensors, begin, nothing_is_left),
        cmocka_unit_test_setup_teardown(arenas_cut_device_memory, begin, nothing_is_left),
        cmocka_unit_test_setup_teardown(only_a_whole_buffer_is_freed, begin, nothing_is_left),
        cmocka_unit_test_setup_teardown(impossible_reserves_take_nothing, begin, nothing_is_left)};
    return cmocka_run_group_tests_name("memory_gpu", tests, NULL, NULL);
}
