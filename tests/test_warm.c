// rocq_warm: what is left to do after it, errors, and that ops see nothing of it. On the CPU, and in a
// GPU context on the stand-in.
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "simt/hip.h"

enum { K = 64, M = 96, ROWS = 3 };

typedef struct work { // norm, then a product, then a gather of its own result
    rocq_ctx *ctx;
    rocq_buffer memory;
    rocq_tensor x, h, w, y, ids, z;
    rocq_graph *graph;
    float values[K * M];
} work;

static float value_of(int64_t i) { return (float)(i * 37 % 101) / 50.0f - 1.0f; }

static rocq_result work_open(work *k, rocq_backend backend) {
    const rocq_desc desc = {.prefer = backend, .n_threads = 3};
    memset(k, 0, sizeof *k);
    return rocq_open(&k->ctx, &desc);
}

static rocq_result work_make(work *k) {
    const struct { rocq_tensor *t; rocq_format format; int64_t ne[2]; } list[] = {
        {&k->x, ROCQ_F32, {K, ROWS}}, {&k->h, ROCQ_F32, {K, ROWS}}, {&k->w, ROCQ_F32, {K, M}},
        {&k->y, ROCQ_F32, {M, ROWS}}, {&k->ids, ROCQ_I32, {2, 1}},  {&k->z, ROCQ_F32, {M, 2}},
    };
    const int32_t ids[2] = {2, 0};
    rocq_arena arena;
    rocq_result result = rocq_buffer_alloc(k->ctx, &k->memory, 1 << 17);
    if (result != ROCQ_OK) return result;
    rocq_arena_init(&arena, &k->memory);
    for (size_t i = 0; i < sizeof list / sizeof *list && result == ROCQ_OK; i++) {
        result = rocq_arena_tensor(&arena, list[i].t, list[i].format, 2, list[i].ne);
    }
    for (int64_t i = 0; i < K * M; i++) k->values[i] = value_of(i);
    if (result == ROCQ_OK) result = rocq_upload(k->ctx, &k->x, k->values, K * ROWS * 4);
    if (result == ROCQ_OK) result = rocq_upload(k->ctx, &k->w, k->values, K * M * 4);
    return result == ROCQ_OK ? rocq_upload(k->ctx, &k->ids, ids, sizeof ids) : result;
}

static rocq_result work_record(work *k) {
    const rocq_norm_params norm = {.y = &k->h, .x = &k->x};
    const rocq_matmul_params product = {.y = &k->y, .w = &k->w, .x = &k->h,
                                        .precision = ROCQ_PRECISION_F32};
    const rocq_gather_params gather = {.y = &k->z, .table = &k->y, .ids = &k->ids};
    rocq_result result = rocq_graph_begin(k->ctx);
    if (result != ROCQ_OK) return result;
    result = rocq_rmsnorm(k->ctx, &norm);
    if (result == ROCQ_OK) result = rocq_matmul(k->ctx, &product);
    if (result == ROCQ_OK) result = rocq_gather(k->ctx, &gather);
    const rocq_result ended = rocq_graph_end(k->ctx, &k->graph);
    return result != ROCQ_OK ? result : ended;
}

static void work_close(work *k) {
    if (k->ctx) {
        rocq_graph_free(k->ctx, &k->graph);
        if (k->memory.size > 0) rocq_buffer_free(k->ctx, &k->memory);
    }
    rocq_close(&k->ctx);
}

static void is_right(work *k) {
    float got[M * 2];
    assert_int_equal(rocq_download(k->ctx, got, &k->z, sizeof got), ROCQ_OK);
    for (int row = 0; row < 2; row++) {
        const float *x = k->values + (row == 0 ? 2 : 0) * K;
        double square = 0.0;
        for (int i = 0; i < K; i++) square += (double)x[i] * x[i];
        const double rstd = 1.0 / sqrt(square / K + 1e-5);
        for (int m = 0; m < M; m++) {
            double sum = 0.0;
            for (int i = 0; i < K; i++) sum += (double)k->values[m * K + i] * x[i] * rstd;
            if (!(fabs(got[row * M + m] - sum) <= 1e-4)) {
                fail_msg("row %d, %d: %g, expected %g", row, m, (double)got[row * M + m], sum);
            }
        }
    }
}

static void nothing_wrong(void) {
    if (simt_error_count() != 0) fail_msg("%s", simt_errors_text());
    assert_int_equal(simt_live_sum(), 0);
}

// After warming, the first launch and copies allocate nothing, and the values of all tensors are what
// they were.
static void check_warm(rocq_backend backend) {
    work k;
    rocq_stats before, after;
    float got[M * ROWS], poison[M * ROWS];
    assert_int_equal(work_open(&k, backend), ROCQ_OK);
    assert_int_equal(work_make(&k), ROCQ_OK);
    assert_int_equal(work_record(&k), ROCQ_OK);
    for (int i = 0; i < M * ROWS; i++) poison[i] = value_of(i + 5);
    assert_int_equal(rocq_upload(k.ctx, &k.y, poison, sizeof poison), ROCQ_OK);
    assert_int_equal(rocq_warm(k.ctx, k.graph), ROCQ_OK);
    assert_int_equal(rocq_get_stats(k.ctx, &before), ROCQ_OK);
    assert_int_equal(rocq_download(k.ctx, got, &k.y, sizeof got), ROCQ_OK);
    assert_memory_equal(got, poison, sizeof poison);
    assert_int_equal(rocq_graph_launch(k.ctx, k.graph), ROCQ_OK);
    is_right(&k);
    assert_int_equal(rocq_get_stats(k.ctx, &after), ROCQ_OK);
    assert_int_equal(after.n_allocs, before.n_allocs);
    assert_int_equal(rocq_warm(k.ctx, k.graph), ROCQ_OK); // again, and all kernels: harmless
    assert_int_equal(rocq_warm(k.ctx, NULL), ROCQ_OK);
    assert_int_equal(rocq_get_stats(k.ctx, &before), ROCQ_OK);
    assert_int_equal(before.live_bytes, after.live_bytes); // what it took is given back
    assert_int_equal(rocq_graph_launch(k.ctx, k.graph), ROCQ_OK);
    is_right(&k);
    assert_int_equal(rocq_get_stats(k.ctx, &after), ROCQ_OK);
    assert_int_equal(after.n_allocs, before.n_allocs);
    work_close(&k);
    nothing_wrong();
}
static void test_cpu(void **state) {
    (void)state;
    check_warm(ROCQ_CPU);
}
static void test_gpu(void **state) {
    (void)state;
    for (int optional = 0; optional < 2; optional++) { // without graphs, and with
        simt_set_optional(optional);
        check_warm(ROCQ_GPU);
    }
}

// On the CPU the ops are rehearsed. Whatever is in their operands, which a step has yet to upload,
// no byte of it changes, and nothing is complained about: neither ids out of range, nor those that
// a rehearsal would have (1) where only 0 is in range.
static void test_rehearsal(void **state) {
    (void)state;
    for (int one_row = 0; one_row < 2; one_row++) {
        work k;
        unsigned char had[1 << 17];
        const int32_t ids[2] = {-5, 1 << 30};
        rocq_stats stats;
        assert_int_equal(work_open(&k, ROCQ_CPU), ROCQ_OK);
        assert_int_equal(work_make(&k), ROCQ_OK);
        if (one_row) k.x.ne[1] = k.h.ne[1] = k.y.ne[1] = 1;
        assert_int_equal(work_record(&k), ROCQ_OK);
        assert_int_equal(rocq_upload(k.ctx, &k.ids, ids, sizeof ids), ROCQ_OK);
        assert_true(k.memory.size == sizeof had);
        memcpy(had, k.memory.host, sizeof had);
        assert_int_equal(rocq_warm(k.ctx, k.graph), ROCQ_OK);
        assert_memory_equal(k.memory.host, had, sizeof had);
        assert_string_equal(rocq_error(k.ctx), "");
        assert_int_equal(rocq_get_stats(k.ctx, &stats), ROCQ_OK);
        assert_int_equal(stats.n_launches, 0);
        assert_int_equal(rocq_graph_launch(k.ctx, k.graph), ROCQ_E_BOUNDS); // a launch complains
        work_close(&k);
    }
}

static void count_pieces(void *user, int64_t begin, int64_t end, int32_t thread) {
    int32_t *const runs = (int32_t *)user;
    assert_true(thread >= 0 && thread < 4);
    for (int64_t i = begin; i < end; i++) runs[i]++;
}

// Jobs of all sizes, in a row and with pauses about as long as threads look before they sleep: each
// item is done once, by the time the caller goes on.
static void test_threads(void **state) {
    (void)state;
    enum { ITEMS = 100, JOBS = 3000 };
    rocq_ctx *ctx = NULL;
    const rocq_desc desc = {.prefer = ROCQ_CPU, .n_threads = 4};
    uint32_t random = 1;
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    for (int job = 0; job < JOBS; job++) {
        int32_t runs[ITEMS] = {0};
        random = random * 1664525u + 1013904223u;
        const int n = 1 + (int)(random >> 16) % ITEMS;
        rocq__parallel(ctx, n, 1 + job % 3, count_pieces, runs);
        for (int i = 0; i < ITEMS; i++) {
            if (runs[i] != (i < n)) fail_msg("job %d: item %d of %d ran %d times", job, i, n,
                                             runs[i]);
        }
        const int64_t pause = (int64_t)(random >> 8) % (job % 8 == 0 ? 2 * ROCQ__SPIN_NS : 1000);
        for (const int64_t end = rocq_time_ns() + pause; rocq_time_ns() < end;) continue;
    }
    rocq_close(&ctx);
}

// The first copy of a context finds its memory there.
static void test_first_copy(void **state) {
    (void)state;
    work k;
    rocq_stats before, after;
    assert_int_equal(work_open(&k, ROCQ_GPU), ROCQ_OK);
    assert_int_equal(rocq_buffer_alloc(k.ctx, &k.memory, 1024), ROCQ_OK);
    assert_int_equal(rocq_warm(k.ctx, NULL), ROCQ_OK);
    const int64_t ne = 8;
    assert_int_equal(rocq_tensor_init(&k.x, &k.memory, 0, ROCQ_F32, 1, &ne), ROCQ_OK);
    assert_int_equal(rocq_get_stats(k.ctx, &before), ROCQ_OK);
    assert_int_equal(rocq_upload(k.ctx, &k.x, k.values, 32), ROCQ_OK);
    assert_int_equal(rocq_get_stats(k.ctx, &after), ROCQ_OK);
    assert_int_equal(after.n_allocs, before.n_allocs);
    work_close(&k);
    nothing_wrong();
}

// Only the kernels of the graph's ops run, once each; none counts as an op's launch.
static void test_kernels(void **state) {
    (void)state;
    work k;
    assert_int_equal(work_open(&k, ROCQ_GPU), ROCQ_OK);
    assert_int_equal(work_make(&k), ROCQ_OK);
    assert_int_equal(work_record(&k), ROCQ_OK);
    const int needed[] = {ROCQ_K_norm, ROCQ_K_matvec_f32_f32_n4, ROCQ_K_decode};
    int64_t had[ROCQ_K_COUNT], counted[ROCQ_K_COUNT];
    bool runs[ROCQ_K_COUNT] = {false};
    for (int i = 0; i < 3; i++) runs[needed[i]] = true;
    for (int i = 0; i < ROCQ_K_COUNT; i++) {
        had[i] = simt_launches(rocq__kernels[i].name + 7);
        counted[i] = k.ctx->gpu->launches[i];
    }
    assert_int_equal(rocq_warm(k.ctx, k.graph), ROCQ_OK);
    for (int i = 0; i < ROCQ_K_COUNT; i++) {
        const int64_t now = simt_launches(rocq__kernels[i].name + 7);
        if (now - had[i] != (runs[i] ? 1 : 0)) {
            fail_msg("%s ran %d times", rocq__kernels[i].name, (int)(now - had[i]));
        }
        assert_int_equal(k.ctx->gpu->launches[i], counted[i]);
    }
    rocq_stats stats;
    assert_int_equal(rocq_get_stats(k.ctx, &stats), ROCQ_OK);
    assert_int_equal(stats.n_launches, 0);
    work_close(&k);
    nothing_wrong();
}

static void test_misuse(void **state) {
    (void)state;
    const rocq_backend backends[] = {ROCQ_CPU, ROCQ_GPU};
    assert_int_equal(rocq_warm(NULL, NULL), ROCQ_E_ARGUMENT);
    for (int b = 0; b < 2; b++) {
        work k, other;
        assert_int_equal(work_open(&k, backends[b]), ROCQ_OK);
        assert_int_equal(work_make(&k), ROCQ_OK);
        assert_int_equal(work_open(&other, backends[b]), ROCQ_OK);
        assert_int_equal(rocq_graph_begin(k.ctx), ROCQ_OK);
        assert_int_equal(rocq_warm(k.ctx, NULL), ROCQ_E_STATE);
        assert_int_equal(rocq_graph_end(k.ctx, &k.graph), ROCQ_OK);
        assert_int_equal(rocq_warm(other.ctx, k.graph), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_warm(k.ctx, k.graph), ROCQ_OK); // without ops
        rocq_cancel(k.ctx);
        assert_int_equal(rocq_warm(k.ctx, NULL), ROCQ_E_CANCELLED);
        work_close(&other);
        work_close(&k);
    }
    nothing_wrong();
}

// A failure of any call of the runtime comes back as a code, and nothing is left behind.
static void test_failures(void **state) {
    (void)state;
    int n_failed = 0;
    for (int64_t at = 1;; at++) {
        work k;
        assert_int_equal(work_open(&k, ROCQ_GPU), ROCQ_OK);
        assert_int_equal(work_make(&k), ROCQ_OK);
        assert_int_equal(work_record(&k), ROCQ_OK);
        const int64_t calls = simt_calls();
        simt_fail_once(at, ROCQ_HIP_OUT_OF_MEMORY);
        const rocq_result result = rocq_warm(k.ctx, k.graph);
        const bool all = simt_calls() - calls < at;
        simt_fail_at(0, 0);
        n_failed += result != ROCQ_OK;
        if (result == ROCQ_OK) { // a refused capture is no failure: the ops then run one by one
            assert_int_equal(rocq_graph_launch(k.ctx, k.graph), ROCQ_OK);
            is_right(&k);
        }
        work_close(&k);
        nothing_wrong();
        if (all) break;
    }
    assert_true(n_failed > 3);
}

// Memory of the host that runs out at any point of a warm-up.
static int64_t allowed; // allocations until one is refused, < 0: none is
static void *scarce(size_t size, void *user) {
    (void)user;
    if (allowed == 0) return NULL;
    allowed--;
    return malloc(size);
}
static void release(void *memory, size_t size, void *user) {
    (void)size;
    (void)user;
    free(memory);
}
static void test_no_memory(void **state) {
    (void)state;
    const rocq_desc desc = {.prefer = ROCQ_CPU, .allocator = {.alloc = scarce, .free = release}};
    int n_failed = 0;
    rocq_result result = ROCQ_E_MEMORY;
    for (int64_t at = 0; result != ROCQ_OK; at++, n_failed++) {
        work k;
        rocq_stats before, after;
        allowed = -1;
        memset(&k, 0, sizeof k);
        assert_int_equal(rocq_open(&k.ctx, &desc), ROCQ_OK);
        assert_int_equal(work_make(&k), ROCQ_OK);
        assert_int_equal(work_record(&k), ROCQ_OK);
        assert_int_equal(rocq_reserve(k.ctx, 1 << 20), ROCQ_OK); // more than the ops want
        assert_int_equal(rocq_get_stats(k.ctx, &before), ROCQ_OK);
        allowed = at;
        result = rocq_warm(k.ctx, k.graph);
        allowed = -1;
        assert_true(result == ROCQ_OK || result == ROCQ_E_MEMORY);
        if (result != ROCQ_OK) assert_true(strlen(rocq_error(k.ctx)) > 0);
        assert_int_equal(rocq_get_stats(k.ctx, &after), ROCQ_OK);
        assert_int_equal(after.live_bytes, before.live_bytes);
        assert_int_equal(rocq_graph_launch(k.ctx, k.graph), ROCQ_OK);
        is_right(&k);
        work_close(&k);
    }
    assert_true(n_failed > 4); // three ops and their memory
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cpu),        cmocka_unit_test(test_gpu),
        cmocka_unit_test(test_rehearsal),  cmocka_unit_test(test_threads),
        cmocka_unit_test(test_first_copy), cmocka_unit_test(test_kernels),
        cmocka_unit_test(test_misuse),     cmocka_unit_test(test_failures),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests_name("warm", tests, NULL, NULL);
}
