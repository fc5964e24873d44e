// rocq_warm: what is left to do after it, errors, that ops see nothing of it, and that a graph
// which a runtime replays wrongly is found out. On the CPU, and in a GPU context on the stand-in.
#define _GNU_SOURCE // mincore
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include <sys/mman.h>
#include <unistd.h>

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
        rocq_graph_destroy(k->ctx, &k->graph);
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

// After warming, the first launch and copies allocate nothing, and the values of all tensors are
// what they were.
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
    check_warm(ROCQ_BACKEND_CPU);
}
static void test_gpu(void **state) {
    (void)state;
    for (int optional = 0; optional < 2; optional++) { // without graphs, and with
        simt_set_optional(optional);
        check_warm(ROCQ_BACKEND_GPU);
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
        assert_int_equal(work_open(&k, ROCQ_BACKEND_CPU), ROCQ_OK);
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

static void count_chunks(void *user, int64_t begin, int64_t end, int32_t thread) {
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
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 4};
    uint32_t random = 1;
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    for (int job = 0; job < JOBS; job++) {
        int32_t runs[ITEMS] = {0};
        random = random * 1664525u + 1013904223u;
        const int n = 1 + (int)(random >> 16) % ITEMS;
        rocq__parallel(ctx, n, 1 + job % 3, count_chunks, runs);
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
    assert_int_equal(work_open(&k, ROCQ_BACKEND_GPU), ROCQ_OK);
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

// Only the kernels of the graph's ops run: once each without work, and three times as the graph
// (rocq__replay_check); and that which puts tensors aside, fills and compares them: before and
// after the runs, before each (twice before the first), and after the last two. None counts as a
// launch of the program's.
static void test_kernels(void **state) {
    (void)state;
    work k;
    assert_int_equal(work_open(&k, ROCQ_BACKEND_GPU), ROCQ_OK);
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
        const int64_t expected = i == ROCQ_K_ranges ? 8 : runs[i] ? 4 : 0;
        if (now - had[i] != expected) {
            fail_msg("%s ran %d times", rocq__kernels[i].name, (int)(now - had[i]));
        }
        const int64_t direct = i == ROCQ_K_ranges ? 8 : runs[i]; // without replays
        assert_int_equal(k.ctx->gpu->launches[i] - counted[i], direct);
    }
    rocq_stats stats;
    assert_int_equal(rocq_get_stats(k.ctx, &stats), ROCQ_OK);
    assert_int_equal(stats.n_launches, 0);
    work_close(&k);
    nothing_wrong();
}

// -- a replay against the ops --

// The kernel that puts ranges aside: of any size and alignment, and without a byte beyond them. One
// byte that differs is found, wherever it is.
static void test_ranges(void **state) {
    (void)state;
    enum { BYTES = 16384, N = 12 };
    static const int32_t sizes[N] = {1, 2, 3, 4, 15, 16, 17, 31, 255, 256, 257, 5000};
    static unsigned char first[BYTES], other[BYTES], got[BYTES], expected[BYTES];
    rocq__touched touched[N];
    rocq_graph graph;
    rocq__replay r;
    rocq_k_difference found;
    rocq_tensor all;
    const int64_t ne = BYTES / 4;
    rocq_buffer buffer;
    uint32_t random = 7;
    memset(&r, 0, sizeof r);
    memset(&graph, 0, sizeof graph);
    memset(touched, 0, sizeof touched);
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_GPU};
    assert_int_equal(rocq_open(&r.ctx, &desc), ROCQ_OK);
    assert_int_equal(rocq_buffer_alloc(r.ctx, &buffer, BYTES), ROCQ_OK);
    assert_int_equal(rocq_tensor_init(&all, &buffer, 0, ROCQ_I32, 1, &ne), ROCQ_OK);
    for (int i = 0; i < BYTES; i++) {
        random = random * 1664525u + 1013904223u;
        first[i] = expected[i] = (unsigned char)(random >> 24);
        other[i] = (unsigned char)(random >> 16);
    }
    r.graph = &graph;
    r.touched = touched;
    r.n_touched = N;
    for (int k = 0, at = 1; k < N; k++) { // odd addresses and aligned ones, some side by side
        if (k % 3 == 0) at = (at + 63) / 16 * 16;
        touched[k].range.begin = buffer.device.address + (uint64_t)at;
        touched[k].range.end = touched[k].range.begin + (uint64_t)sizes[k];
        touched[k].written = k % 4 != 1;
        if (touched[k].written) memset(expected + at, ROCQ__REPLAY_FILL, (size_t)sizes[k]);
        at += sizes[k];
        assert_true(at <= BYTES);
    }
    assert_int_equal(rocq_upload(r.ctx, &all, first, BYTES), ROCQ_OK);
    assert_int_equal(rocq__replay_memory(&r), ROCQ_OK);
    assert_int_equal(rocq__replay_launch(&r, ROCQ_K_SAVE, r.size), ROCQ_OK);
    assert_int_equal(rocq__replay_launch(&r, ROCQ_K_FILL, 0), ROCQ_OK);
    assert_int_equal(rocq_download(r.ctx, got, &all, BYTES), ROCQ_OK);
    assert_memory_equal(got, expected, BYTES);
    memcpy(expected, other, BYTES);
    for (int k = 0; k < N; k++) {
        const uint64_t at = touched[k].range.begin - buffer.device.address;
        memcpy(expected + at, first + at, (size_t)sizes[k]);
    }
    assert_int_equal(rocq_upload(r.ctx, &all, other, BYTES), ROCQ_OK);
    assert_int_equal(rocq__replay_launch(&r, ROCQ_K_RESTORE, r.size), ROCQ_OK);
    assert_int_equal(rocq_download(r.ctx, got, &all, BYTES), ROCQ_OK);
    assert_memory_equal(got, expected, BYTES);
    const char *end = (const char *)r.aside->address + r.aside->size - ROCQ__LINE;
    const uint64_t difference = (uint64_t)(uintptr_t)end;
    for (int k = -1; k < N; k++) { // each range's bytes, or some of them
        const int step = k < 0 || sizes[k] < 300 ? 1 : 499;
        for (int i = 0; i < (k < 0 ? 1 : sizes[k]); i += step) {
            const uint64_t to = k < 0 ? 0 : touched[k].range.begin + (uint64_t)i;
            const unsigned char wrong = k < 0 ? 0 : got[to - buffer.device.address] ^ 1;
            memset(&found, 0, sizeof found);
            assert_int_equal(rocq__upload_bytes(r.ctx, difference, &found, sizeof found), ROCQ_OK);
            if (k >= 0) assert_int_equal(rocq__upload_bytes(r.ctx, to, &wrong, 1), ROCQ_OK);
            assert_int_equal(rocq__replay_launch(&r, ROCQ_K_COMPARE, r.size), ROCQ_OK);
            assert_int_equal(rocq__download_hip(r.ctx, &found, end, sizeof found), ROCQ_OK);
            assert_int_equal(found.n, k >= 0);
            if (k < 0) continue; // touched[k] is range k + 1, behind the status word
            assert_true(found.copy <= r.ranges[k + 1].copy + i);
            assert_true(found.copy > r.ranges[k + 1].copy + i - 4);
            assert_int_equal(rocq__upload_bytes(r.ctx, to, got + (to - buffer.device.address), 1),
                             ROCQ_OK);
        }
    }
    r.ctx->budget_used -= r.aside->size;
    rocq__device_free(r.ctx, r.aside);
    rocq__free(r.ctx, r.ranges);
    rocq_buffer_free(r.ctx, &buffer);
    rocq_close(&r.ctx);
    nothing_wrong();
}

// Inputs in allocations that touch by chance are uploaded by a copy each: runtimes refuse one over
// two allocations. Where a buffer holds both, one copy takes them, as a program would.
static void test_touching(void **state) {
    (void)state;
    enum { N = 64 }; // 256 bytes: blocks of that size touch
    for (int apart = 0; apart < 2; apart++) {
        rocq_ctx *ctx = NULL;
        rocq_buffer memory[3];
        rocq_tensor t[3];
        rocq_graph *graph = NULL;
        rocq_stats stats;
        float values[N], got[N];
        const int64_t ne = N;
        const rocq_desc desc = {.prefer = ROCQ_BACKEND_GPU};
        simt_set_touching(1 << 26);
        assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
        for (int i = 0; i < 3; i++) {
            if (i == 0 || apart) {
                assert_int_equal(rocq_buffer_alloc(ctx, &memory[i], (apart ? N : 3 * N) * 4), ROCQ_OK);
            }
            const int64_t at = apart ? 0 : i * N * 4;
            assert_int_equal(rocq_tensor_init(&t[i], &memory[apart ? i : 0], at, ROCQ_F32, 1, &ne),
                             ROCQ_OK);
            for (int k = 0; k < N; k++) values[k] = value_of(k + i);
            assert_int_equal(rocq_upload(ctx, &t[i], values, sizeof values), ROCQ_OK);
        }
        if (apart) {
            assert_int_equal(memory[1].device.address, memory[0].device.address + memory[0].size);
        }
        const rocq_binary_params add = {.y = &t[2], .a = &t[0], .b = &t[1]};
        assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
        assert_int_equal(rocq_add(ctx, &add), ROCQ_OK);
        assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);
        if (rocq_warm(ctx, graph) != ROCQ_OK) fail_msg("apart %d: %s", apart, rocq_error(ctx));
        assert_int_equal(rocq_get_stats(ctx, &stats), ROCQ_OK);
        assert_int_equal(stats.n_replays_checked, 1);
        assert_int_equal(stats.n_replays_refused, 0);
        assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK);
        assert_int_equal(rocq_download(ctx, got, &t[2], sizeof got), ROCQ_OK);
        for (int k = 0; k < N; k++) assert_true(got[k] == value_of(k) + value_of(k + 1));
        rocq_graph_destroy(ctx, &graph);
        for (int i = 0; i < (apart ? 3 : 1); i++) rocq_buffer_free(ctx, &memory[i]);
        rocq_close(&ctx);
        nothing_wrong();
    }
}

// On the CPU rocq_warm gives memory to all pages of an operand: also to both pages of a small one
// that begins in one page and ends in the next.
static void test_pages(void **state) {
    (void)state;
    enum { N = 32, PAGES = 4 };
    const int64_t page = sysconf(_SC_PAGESIZE), ne = N;
    unsigned char resident[PAGES], *memory =
        (unsigned char *)mmap(NULL, (size_t)(PAGES * page), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    work k;
    float x[N] = {0};
    rocq_tensor from, to;
    assert_true(memory != MAP_FAILED);
    assert_int_equal(work_open(&k, ROCQ_BACKEND_CPU), ROCQ_OK);
    assert_int_equal(rocq_tensor_from_host(&from, x, ROCQ_F32, 1, &ne), ROCQ_OK);
    assert_int_equal(rocq_tensor_from_host(&to, memory + 2 * page - 4, ROCQ_F32, 1, &ne), ROCQ_OK);
    const rocq_activate_params relu = {&to, &from, ROCQ_ACT_RELU};
    assert_int_equal(rocq_graph_begin(k.ctx), ROCQ_OK);
    assert_int_equal(rocq_activate(k.ctx, &relu), ROCQ_OK);
    assert_int_equal(rocq_graph_end(k.ctx, &k.graph), ROCQ_OK);
    assert_int_equal(rocq_warm(k.ctx, k.graph), ROCQ_OK);
    assert_int_equal(mincore(memory, (size_t)(PAGES * page), resident), 0);
    for (int i = 0; i < PAGES; i++) assert_int_equal(resident[i] & 1, i == 1 || i == 2);
    work_close(&k);
    munmap(memory, (size_t)(PAGES * page));
}

// LAYERS of a transformer over T tokens, with their KV cache: ids and positions in, an index out.

enum {
    T = 2, HEAD = 64, HEADS = 2, D = HEAD * HEADS, CELLS = 12, VOCAB = 40, INPUTS = 3 * T + 1,
    LAYERS = 3, MEMORY = 1 << 19, CACHE = 1 << 14
};

typedef struct step {
    rocq_ctx *ctx;
    rocq_buffer memory;
    rocq_kv *kv;
    rocq_kv_view cache[LAYERS];
    rocq_tensor inputs, table, to_q, to_k, to_v, to_out, x, h, q, k, v, seen, logits, index;
    rocq_graph *graph;
    unsigned char had[MEMORY + CACHE + 4]; // memory, that of the cache, and the status word
    rocq_log_level worst; // least of the messages
    char message[400];    // the last one
} step;

static void step_log(rocq_log_level level, const char *message, void *user) {
    step *s = (step *)user;
    if (s->worst == 0 || level < s->worst) s->worst = level;
    snprintf(s->message, sizeof s->message, "%s", message);
}

static rocq_result step_ops(step *s) {
    const rocq_tensor kv_len = rocq_tensor_slice(&s->inputs, 0, 0, 1);
    const rocq_tensor ids = rocq_tensor_slice(&s->inputs, 0, 1, T);
    const rocq_tensor pos = rocq_tensor_slice(&s->inputs, 0, 1 + T, T);
    const rocq_tensor cell = rocq_tensor_slice(&s->inputs, 0, 1 + 2 * T, T);
    const rocq_tensor q = rocq_tensor_heads(&s->q, HEAD), k = rocq_tensor_heads(&s->k, HEAD);
    const rocq_tensor v = rocq_tensor_heads(&s->v, HEAD), seen = rocq_tensor_heads(&s->seen, HEAD);
    const rocq_precision exact = ROCQ_PRECISION_F32;
    const rocq_gather_params embed = {.y = &s->x, .table = &s->table, .ids = &ids};
    const rocq_norm_params norm = {.y = &s->h, .x = &s->x};
    const rocq_matmul_params to_v = {.y = &s->v, .w = &s->to_v, .x = &s->h, .precision = exact};
    const rocq_matmul_params to_k = {.y = &s->k, .w = &s->to_k, .x = &s->h, .precision = exact,
                                     .next = &to_v};
    const rocq_matmul_params to_q = {.y = &s->q, .w = &s->to_q, .x = &s->h, .precision = exact,
                                     .next = &to_k};
    const rocq_matmul_params out = {.y = &s->x, .w = &s->to_out, .x = &s->seen, .residual = &s->x,
                                    .precision = exact};
    const rocq_matmul_params head = {.y = &s->logits, .w = &s->table, .x = &s->x,
                                     .precision = exact};
    const rocq_argmax_params choose = {.index = &s->index, .x = &s->logits};
    rocq_result result = rocq_gather(s->ctx, &embed);
    for (int l = 0; l < LAYERS; l++) {
        const rocq_kv_view *cache = &s->cache[l];
        const rocq_rope_append_params append = {
            .q = &q, .k = &k, .v = &v, .k_cache = &cache->k_cache, .v_cache = &cache->v_cache,
            .pos = &pos, .cell = &cell};
        const rocq_attention_params attend = {
            .out = &seen, .q = &q, .k = &cache->k, .v = &cache->v, .kv_len = &kv_len,
            .page_table = cache->page_size ? &cache->page_table : NULL,
            .page_size = cache->page_size, .causal = true};
        if (result == ROCQ_OK) result = rocq_rmsnorm(s->ctx, &norm);
        if (result == ROCQ_OK) result = rocq_matmul(s->ctx, &to_q);
        if (result == ROCQ_OK) result = rocq_rope_append(s->ctx, &append);
        if (result == ROCQ_OK) result = rocq_attention(s->ctx, &attend);
        if (result == ROCQ_OK) result = rocq_matmul(s->ctx, &out);
    }
    if (result == ROCQ_OK) result = rocq_matmul(s->ctx, &head);
    return result == ROCQ_OK ? rocq_argmax(s->ctx, &choose) : result;
}

static void step_record(step *s) {
    assert_int_equal(rocq_graph_begin(s->ctx), ROCQ_OK);
    assert_int_equal(step_ops(s), ROCQ_OK);
    assert_int_equal(rocq_graph_end(s->ctx, &s->graph), ROCQ_OK);
}

// What the step reads from outside: tokens 3 and 9 at positions 5 and 6, of which there are 7.
static void step_feed(step *s) {
    int32_t words[INPUTS] = {5 + T, 3, 9, 5, 6};
    assert_int_equal(rocq_kv_truncate(s->kv, 0, 0), ROCQ_OK);
    assert_int_equal(rocq_kv_append(s->kv, 0, 5, NULL), ROCQ_OK);
    assert_int_equal(rocq_kv_append(s->kv, 0, T, words + 1 + 2 * T), ROCQ_OK);
    assert_int_equal(rocq_kv_flush(s->kv), ROCQ_OK);
    assert_int_equal(rocq_upload(s->ctx, &s->inputs, words, sizeof words), ROCQ_OK);
}

static int32_t slice_us; // of the next contexts

static void step_open(step *s, rocq_desc desc, int32_t page_size, rocq_format format) {
    const rocq_kv_desc kv = {.n_layers = LAYERS, .n_kv_heads = 1, .head_dim = HEAD,
                             .k_format = format,
                             .v_format = format, .n_ctx = CELLS, .page_size = page_size};
    const struct { rocq_tensor *t; rocq_format format; int64_t ne[2]; } list[] = {
        {&s->inputs, ROCQ_I32, {INPUTS, 1}}, {&s->table, ROCQ_F32, {D, VOCAB}},
        {&s->to_q, ROCQ_F32, {D, D}},        {&s->to_k, ROCQ_F32, {D, HEAD}},
        {&s->to_v, ROCQ_F32, {D, HEAD}},     {&s->to_out, ROCQ_F32, {D, D}},
        {&s->x, ROCQ_F32, {D, T}},           {&s->h, ROCQ_F32, {D, T}},
        {&s->q, ROCQ_F32, {D, T}},           {&s->k, ROCQ_F32, {HEAD, T}},
        {&s->v, ROCQ_F32, {HEAD, T}},        {&s->seen, ROCQ_F32, {D, T}},
        {&s->logits, ROCQ_F32, {VOCAB, T}},  {&s->index, ROCQ_I32, {T, 1}},
    };
    static float values[D * D];
    rocq_arena arena;
    memset(s, 0, sizeof *s);
    desc.prefer = ROCQ_BACKEND_GPU;
    desc.n_threads = 1;
    desc.log = step_log;
    desc.log_user = s;
    desc.slice_us = slice_us;
    for (int i = 0; i < D * D; i++) values[i] = value_of(i) / 8.0f;
    assert_int_equal(rocq_open(&s->ctx, &desc), ROCQ_OK);
    assert_int_equal(rocq_kv_create(s->ctx, &s->kv, &kv), ROCQ_OK);
    for (int l = 0; l < LAYERS; l++) {
        assert_int_equal(rocq_kv_layer(s->kv, l, 0, 1, &s->cache[l]), ROCQ_OK);
    }
    assert_int_equal(rocq_buffer_alloc(s->ctx, &s->memory, MEMORY), ROCQ_OK);
    rocq_arena_init(&arena, &s->memory);
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        assert_int_equal(rocq_arena_tensor(&arena, list[i].t, list[i].format, 2, list[i].ne),
                         ROCQ_OK);
        assert_int_equal(rocq_upload(s->ctx, list[i].t, values, rocq_tensor_size(list[i].t)),
                         ROCQ_OK);
    }
    for (int i = 0; i < 2; i++) { // cells of earlier positions: zeros
        const rocq_tensor *t = i == 0 ? &s->kv->k : &s->kv->v;
        static const unsigned char zeros[CACHE];
        assert_int_equal(rocq_upload(s->ctx, t, zeros, rocq_tensor_size(t)), ROCQ_OK);
    }
    step_feed(s);
}

static void step_close(step *s) {
    rocq_graph_destroy(s->ctx, &s->graph);
    rocq_kv_destroy(&s->kv);
    rocq_buffer_free(s->ctx, &s->memory);
    rocq_close(&s->ctx);
    nothing_wrong();
}

static void step_read(step *s, unsigned char *to) {
    rocq_tensor t = {.format = ROCQ_I32, .n_dims = 1, .ne = {1, 1, 1, 1}, .stride = {1, 1, 1, 1}};
    const rocq_buffer list[] = {s->memory, s->kv->memory,
        rocq_buffer_from_device((uint64_t)(uintptr_t)s->ctx->gpu->status, 4)};
    memset(to, 0, sizeof s->had);
    for (int i = 0; i < 3; i++) {
        t.buffer = list[i];
        t.ne[0] = i == 1 ? (t.buffer.size < CACHE ? t.buffer.size : CACHE) / 4 : t.buffer.size / 4;
        assert_int_equal(rocq_download(s->ctx, to, &t, 4 * t.ne[0]), ROCQ_OK);
        to += i == 0 ? MEMORY : CACHE;
    }
}

static bool step_same(step *s) {
    static unsigned char now[sizeof s->had];
    step_read(s, now);
    return memcmp(now, s->had, sizeof now) == 0;
}

// What the step is to write: the same without graphs.
typedef struct step_result {
    float logits[VOCAB * T], x[D * T];
    int32_t index[T];
} step_result;

static void step_results(step *s, step_result *r) {
    memset(r, 0xff, sizeof *r);
    assert_int_equal(rocq_download(s->ctx, r->logits, &s->logits, sizeof r->logits), ROCQ_OK);
    assert_int_equal(rocq_download(s->ctx, r->x, &s->x, sizeof r->x), ROCQ_OK);
    assert_int_equal(rocq_download(s->ctx, r->index, &s->index, sizeof r->index), ROCQ_OK);
    assert_int_equal(rocq_sync(s->ctx), ROCQ_OK);
}

static void step_expected(int32_t page_size, rocq_format format, step_result *r) {
    static step s;
    const rocq_desc desc = {.no_graphs = true};
    step_open(&s, desc, page_size, format);
    step_record(&s);
    assert_int_equal(rocq_warm(s.ctx, s.graph), ROCQ_OK);
    assert_int_equal(rocq_graph_launch(s.ctx, s.graph), ROCQ_OK);
    step_results(&s, r);
    for (int i = 0; i < VOCAB * T; i++) assert_true(fabsf(r->logits[i]) < 1e3f);
    step_close(&s);
}

// The step once over other tensors, in the memory behind: SIMT_REPLAY_STALE_ARGS takes the
// arguments of these launches.
static void step_elsewhere(step *s) {
    rocq_tensor *const list[] = {&s->x, &s->h, &s->q, &s->k, &s->v, &s->seen, &s->logits,
                                 &s->index};
    for (int i = 0; i < 8; i++) list[i]->buffer.device.address += MEMORY / 2;
    if (step_ops(s) != ROCQ_OK) fail_msg("%s", rocq_error(s->ctx));
    if (rocq_sync(s->ctx) != ROCQ_OK) fail_msg("%s", rocq_error(s->ctx));
    for (int i = 0; i < 8; i++) list[i]->buffer.device.address -= MEMORY / 2;
}

// One graph on a runtime that replays it wrongly, or right. Returns the graph's launches.
static int64_t check_replay(int how, int node, int32_t page_size, rocq_format format) {
    static step s;
    step_result expected, found;
    rocq_stats stats;
    rocq_info info;
    const rocq_desc desc = {0};
    const bool wrong = how != SIMT_REPLAY_RIGHT;
    step_expected(page_size, format, &expected);
    simt_set_replay(how, node);
    step_open(&s, desc, page_size, format);
    step_elsewhere(&s);
    step_record(&s);
    assert_true(s.graph->captured);
    int64_t n = 0;
    for (const rocq__node *subgraph = s.graph->first; subgraph; subgraph = subgraph->end)
        n += subgraph->n_launches;
    step_read(&s, s.had);
    for (int again = 0; again < 2; again++) {
        assert_int_equal(rocq_warm(s.ctx, s.graph), ROCQ_OK);
        assert_int_equal(rocq_get_stats(s.ctx, &stats), ROCQ_OK);
        assert_int_equal(rocq_get_info(s.ctx, &info), ROCQ_OK);
        if (stats.n_replays_refused != wrong || stats.n_replays_checked != 1 ||
            s.graph->captured == wrong) {
            fail_msg("way %d, launch %d: %d checked, %d refused: %s", how, node,
                     (int)stats.n_replays_checked, (int)stats.n_replays_refused, info.replay);
        }
        if (how != SIMT_REPLAY_STALE_ARGS) assert_true(step_same(&s)); // those write elsewhere
    }
    if (wrong) {
        assert_int_equal(s.worst, ROCQ_LOG_WARN);
        assert_string_equal(s.message, info.replay);
        assert_non_null(strstr(info.replay, "one by one"));
    } else {
        assert_int_equal(s.worst, 0);
        assert_string_equal(info.replay, "");
    }
    step_feed(&s);
    assert_int_equal(rocq_graph_launch(s.ctx, s.graph), ROCQ_OK);
    step_results(&s, &found);
    assert_memory_equal(&found, &expected, sizeof found);
    step_close(&s);
    simt_set_replay(SIMT_REPLAY_RIGHT, -1);
    return n;
}

static void test_replay_right(void **state) {
    (void)state;
    for (int32_t page_size = 0; page_size <= 4; page_size += 4) {
        check_replay(SIMT_REPLAY_RIGHT, -1, page_size, ROCQ_F16);
        check_replay(SIMT_REPLAY_RIGHT, -1, page_size, ROCQ_Q8_0);
    }
}
static void test_replay_stale_args(void **state) {
    (void)state;
    const int64_t n = check_replay(SIMT_REPLAY_STALE_ARGS, -1, 0, ROCQ_F16);
    for (int node = 0; node < n; node++) check_replay(SIMT_REPLAY_STALE_ARGS, node, 0, ROCQ_F16);
}
static void test_replay_stale_copies(void **state) {
    (void)state;
    check_replay(SIMT_REPLAY_STALE_COPIES, -1, 0, ROCQ_F16);
    check_replay(SIMT_REPLAY_STALE_COPIES, -1, 4, ROCQ_F16);
}
static void test_replay_dropped(void **state) {
    (void)state;
    const int64_t n = check_replay(SIMT_REPLAY_DROPPED, -1, 0, ROCQ_F16);
    assert_true(n >= 3 + 5 * LAYERS);
    for (int node = 0; node < n; node++) check_replay(SIMT_REPLAY_DROPPED, node, 0, ROCQ_Q8_0);
}

// A graph is judged by itself: another one of the context keeps its replay.
static void test_replay_each(void **state) {
    (void)state;
    static step s;
    rocq_stats stats;
    rocq_graph *right;
    const rocq_desc desc = {0};
    step_open(&s, desc, 0, ROCQ_F16);
    step_record(&s);
    right = s.graph;
    simt_set_replay(SIMT_REPLAY_DROPPED, 3);
    step_record(&s);
    assert_int_equal(rocq_warm(s.ctx, s.graph), ROCQ_OK);
    assert_int_equal(rocq_warm(s.ctx, right), ROCQ_OK);
    assert_true(right->captured);
    assert_false(s.graph->captured);
    assert_int_equal(rocq_get_stats(s.ctx, &stats), ROCQ_OK);
    assert_int_equal(stats.n_replays_checked, 2);
    assert_int_equal(stats.n_replays_refused, 1);
    simt_set_replay(SIMT_REPLAY_RIGHT, -1);
    rocq_graph_destroy(s.ctx, &right);
    step_close(&s);
}

// What ops have found wrong before is still told after.
static void test_replay_status(void **state) {
    (void)state;
    static step s;
    int32_t words[INPUTS] = {5 + T, 3, VOCAB, 5, 6, 5, 6};
    const rocq_desc desc = {0};
    step_open(&s, desc, 0, ROCQ_F16);
    step_record(&s);
    assert_int_equal(rocq_upload(s.ctx, &s.inputs, words, sizeof words), ROCQ_OK);
    assert_int_equal(rocq_graph_launch(s.ctx, s.graph), ROCQ_OK);
    assert_int_equal(rocq_warm(s.ctx, s.graph), ROCQ_OK);
    assert_int_equal(rocq_sync(s.ctx), ROCQ_E_BOUNDS);
    assert_int_equal(rocq_warm(s.ctx, s.graph), ROCQ_OK);
    assert_int_equal(rocq_sync(s.ctx), ROCQ_OK);
    step_close(&s);
}

// Without memory for it the replay is kept, unchecked, and the log says so.
static void test_replay_budget(void **state) {
    (void)state;
    static step s;
    rocq_stats stats;
    step_result expected, found;
    const rocq_desc desc = {0};
    step_expected(0, ROCQ_F16, &expected);
    step_open(&s, desc, 0, ROCQ_F16);
    step_record(&s);
    s.ctx->desc.memory_budget = s.ctx->budget_used + 1024;
    step_read(&s, s.had);
    assert_int_equal(rocq_warm(s.ctx, s.graph), ROCQ_OK);
    assert_int_equal(s.worst, ROCQ_LOG_WARN);
    assert_non_null(strstr(s.message, "not checked"));
    assert_string_equal(rocq_error(s.ctx), ""); // nothing has failed
    assert_true(step_same(&s));
    assert_int_equal(rocq_get_stats(s.ctx, &stats), ROCQ_OK);
    assert_int_equal(stats.n_replays_checked, 0);
    assert_true(s.graph->captured);
    assert_int_equal(rocq_graph_launch(s.ctx, s.graph), ROCQ_OK);
    step_results(&s, &found);
    assert_memory_equal(&found, &expected, sizeof found);
    s.ctx->desc.memory_budget = 0; // and later it is checked
    assert_int_equal(rocq_warm(s.ctx, s.graph), ROCQ_OK);
    assert_int_equal(rocq_get_stats(s.ctx, &stats), ROCQ_OK);
    assert_int_equal(stats.n_replays_checked, 1);
    step_close(&s);
}

// A runtime call that fails in between: either all is as it was, or the context is lost.
static void test_replay_failures(void **state) {
    (void)state;
    static step s;
    const rocq_desc desc = {0};
    int n_lost = 0, n_failed = 0;
    for (int64_t at = 1;; at++) {
        step_open(&s, desc, 0, ROCQ_F16);
        step_record(&s);
        step_read(&s, s.had);
        rocq_stats before, after;
        assert_int_equal(rocq_warm(s.ctx, NULL), ROCQ_OK); // all but the check
        assert_int_equal(rocq_get_stats(s.ctx, &before), ROCQ_OK);
        const int64_t calls = simt_calls();
        simt_fail_once(at, ROCQ_HIP_OUT_OF_MEMORY);
        const rocq_result result = rocq_warm(s.ctx, s.graph);
        const bool all = simt_calls() - calls < at;
        simt_fail_at(0, 0);
        assert_true(result == ROCQ_OK || result == ROCQ_E_MEMORY || result == ROCQ_E_LOST);
        n_failed += result != ROCQ_OK;
        n_lost += result == ROCQ_E_LOST;
        if (result != ROCQ_E_LOST) assert_true(step_same(&s));
        assert_int_equal(rocq_get_stats(s.ctx, &after), ROCQ_OK);
        assert_int_equal(after.live_bytes, before.live_bytes);
        assert_int_equal(s.ctx->gpu->lost, result == ROCQ_E_LOST);
        step_close(&s);
        if (all) break;
    }
    if (n_failed <= 20 || n_lost != 1) fail_msg("%d failed, %d lost", n_failed, n_lost);
}

// -- slices --

static int count_subgraphs(const step *s) {
    int n = 0;
    for (const rocq__node *subgraph = s->graph->first; subgraph; subgraph = subgraph->end) n++;
    return n;
}

// A graph in subgraphs is found out like one in one.
static void test_subgraphs_replay(void **state) {
    (void)state;
    slice_us = 20; // four or five ops
    const int64_t n = check_replay(SIMT_REPLAY_RIGHT, -1, 0, ROCQ_F16);
    assert_true(n >= 3 + 5 * LAYERS);
    for (int how = SIMT_REPLAY_STALE_ARGS; how <= SIMT_REPLAY_DROPPED; how++) {
        check_replay(how, -1, 4, ROCQ_F16);
        check_replay(how, 1, 0, ROCQ_Q8_0); // in each subgraph
    }
    slice_us = 0;
}

// Subgraphs are as long as was asked for by what is expected of their ops; each op is in one.
static void test_subgraphs(void **state) {
    (void)state;
    for (slice_us = 1; slice_us <= 1000; slice_us *= 10) {
        static step s;
        const rocq_desc desc = {0};
        int n_ops = 0, n_subgraphs = 0;
        step_open(&s, desc, 0, ROCQ_F16);
        step_record(&s);
        for (const rocq__node *first = s.graph->first; first; first = first->end, n_subgraphs++) {
            double ns = 0;
            int n = 0;
            for (const rocq__node *node = first; node != first->end; node = node->next, n++) {
                assert_true(node->ns >= ROCQ__OP_NS && node->ns < 1e6);
                assert_true((node->exec != NULL) == (node == first));
                ns += node->ns;
            }
            assert_true(n == 1 || ns <= 1e3 * slice_us);
            n_ops += n;
        }
        assert_int_equal(n_ops, 3 + 5 * LAYERS);
        if (slice_us == 1) assert_int_equal(n_subgraphs, n_ops);
        if (slice_us == 1000) assert_int_equal(n_subgraphs, 1);
        step_close(&s);
    }
    slice_us = 0;
}

static double clock_ms; // of the stand-in: a tick each time that an event is recorded
static double tick_ms = 0.03;
static double ticking(void) { return clock_ms += tick_ms; }

// A step in slices: submitted, not waited for, without an allocation, in any way that it can be
// replayed, with ops between them and without.
static void check_slices(rocq_desc desc, int32_t subgraph_us, int32_t us, bool at_once,
                         bool others) {
    static step s;
    step_result expected, found;
    rocq_stats before, after;
    const rocq_norm_params other = {.y = &s.seen, .x = &s.x}; // written before it is read
    step_expected(0, ROCQ_F16, &expected);
    slice_us = subgraph_us;
    step_open(&s, desc, 0, ROCQ_F16);
    slice_us = 0;
    step_record(&s);
    assert_int_equal(rocq_warm(s.ctx, s.graph), ROCQ_OK);
    assert_int_equal(rocq_get_stats(s.ctx, &before), ROCQ_OK);
    simt_set_work(at_once ? SIMT_AT_ONCE : SIMT_LATE);
    for (int round = 0; round < 4; round++) {
        int n = 0;
        bool done = round % 2;
        step_feed(&s);
        do {
            const bool waits = !at_once && s.graph->marks[0], ran = n > 3;
            rocq__node *was = s.graph->at;
            if (others && n == 0) assert_int_equal(rocq_rmsnorm(s.ctx, &other), ROCQ_OK);
            assert_int_equal(rocq_graph_launch_for(s.ctx, s.graph, us, &done), ROCQ_OK);
            if (waits && !ran && n > 0 && was) { // the GPU has not begun: one subgraph more
                assert_ptr_equal(s.graph->at, s.graph->captured ? was->end : was->next);
            }
            assert_int_equal(done, waits ? ran && !was : !s.graph->at);
            if (waits && n >= 3) assert_int_equal(rocq_sync(s.ctx), ROCQ_OK);
            if (++n > 100) fail_msg("%d slices", n);
        } while (!done);
        if (us == 0) {
            const int least = s.graph->captured ? count_subgraphs(&s) : 3 + 5 * LAYERS;
            assert_true(n >= least && n <= (least > 4 ? least : 4) + 1);
        }
        step_results(&s, &found);
        assert_memory_equal(&found, &expected, sizeof found);
    }
    assert_int_equal(rocq_graph_launch(s.ctx, s.graph), ROCQ_OK);
    step_results(&s, &found);
    assert_memory_equal(&found, &expected, sizeof found);
    assert_int_equal(rocq_get_stats(s.ctx, &after), ROCQ_OK);
    assert_int_equal(after.n_allocs, before.n_allocs);
    simt_set_work(SIMT_LATE);
    step_close(&s);
}
static void test_slices(void **state) {
    (void)state;
    rocq_desc desc = {0};
    for (int i = 0; i < 2 * 3 * 2; i++) {
        const int32_t us[] = {0, 30, 2000000000};
        check_slices(desc, 0, us[i % 3], i / 3 % 2, i / 6); // op by op
        check_slices(desc, 12, us[i % 3], i / 3 % 2, i / 6);
    }
    check_slices(desc, 1, 0, true, true);
    check_slices(desc, 1000, 0, false, true);
    desc.no_graphs = true;
    check_slices(desc, 20, 30, false, true);
    simt_set_optional(0); // no graphs, and no times of events
    check_slices(desc, 20, 30, false, true);
    check_slices(desc, 20, 0, true, false);
    simt_set_optional(1);
}

// What was expected follows the time between the marks: here 30 us however much there is between
// them, at first more, in the end less than what fits.
static void test_slices_learn(void **state) {
    (void)state;
    static step s;
    rocq_desc desc = {0};
    bool done = true;
    simt_set_clock(ticking);
    simt_set_work(SIMT_AT_ONCE);
    slice_us = 1;
    step_open(&s, desc, 0, ROCQ_F16);
    slice_us = 0;
    step_record(&s);
    int n[12];
    for (int step_number = 0; step_number < 12; step_number++) {
        step_feed(&s);
        n[step_number] = 0;
        do {
            assert_int_equal(rocq_graph_launch_for(s.ctx, s.graph, 60, &done), ROCQ_OK);
            n[step_number]++;
        } while (!done);
        if (step_number == 5) tick_ms = 0.12;
    }
    assert_true(n[0] >= 2); // 18 ops of some 4 us
    assert_true(n[5] < n[0]); // two or more of 30 us fit, so they are taken for less, and so on
    assert_int_equal(n[5], 1);
    assert_true(n[11] > n[5]); // two of 120 us do not
    simt_set_clock(NULL);
    simt_set_work(SIMT_LATE);
    tick_ms = 0.03;
    step_close(&s);
}

// A slice that is cancelled ends the step; a half-run graph is launched whole, follows its scratch
// memory, is tuned, warmed, and destroyed.
static void test_slices_left(void **state) {
    (void)state;
    static step s;
    step_result expected, found;
    const rocq_desc desc = {0};
    bool done = true;
    step_expected(0, ROCQ_F16, &expected);
    slice_us = 20;
    step_open(&s, desc, 0, ROCQ_F16);
    slice_us = 0;
    step_record(&s);
    assert_true(count_subgraphs(&s) >= 4);
    for (int way = 0; way < 4; way++) {
        int n = 0;
        done = true;
        step_feed(&s);
        for (; n < 2; n++) {
            assert_int_equal(rocq_graph_launch_for(s.ctx, s.graph, 0, &done), ROCQ_OK);
        }
        assert_ptr_equal(s.graph->at, s.graph->first->end->end);
        if (way == 0) {
            rocq_cancel(s.ctx);
            assert_int_equal(rocq_graph_launch_for(s.ctx, s.graph, 0, &done), ROCQ_E_CANCELLED);
            assert_false(done);
            assert_int_equal(rocq_sync(s.ctx), ROCQ_OK);
            n = 0;
        } else if (way == 1) {
            assert_int_equal(rocq_graph_launch(s.ctx, s.graph), ROCQ_OK);
            n = 0;
        } else if (way == 2) { // captured again, in the same subgraphs
            assert_int_equal(rocq_reserve(s.ctx, s.ctx->stats.scratch_bytes + (1 << 16)), ROCQ_OK);
        } else {
            assert_int_equal(rocq_warm(s.ctx, s.graph), ROCQ_OK);
        }
        for (; !done; n++) {
            assert_int_equal(rocq_graph_launch_for(s.ctx, s.graph, 0, &done), ROCQ_OK);
            assert_int_equal(rocq_sync(s.ctx), ROCQ_OK);
        }
        assert_true(n == count_subgraphs(&s) || n == count_subgraphs(&s) + 1);
        step_results(&s, &found);
        assert_memory_equal(&found, &expected, sizeof found);
    }
    assert_int_equal(rocq_graph_launch_for(s.ctx, s.graph, 0, &done), ROCQ_OK);
    step_close(&s); // destroys it
}

// A profile measures slices as graphs, with the work of their ops.
static void test_slices_profiled(void **state) {
    (void)state;
    static step s;
    rocq_region_stats region;
    double flops = 0;
    const rocq_desc desc = {0};
    const rocq_profile_desc all = {.cost = 1.0};
    bool done = true;
    slice_us = 20;
    step_open(&s, desc, 0, ROCQ_F16);
    slice_us = 0;
    step_record(&s);
    for (const rocq__node *node = s.graph->first; node; node = node->next)
        flops += node->cost.flops;
    simt_set_work(SIMT_AT_ONCE);
    assert_int_equal(rocq_profile_start(s.ctx, &all), ROCQ_OK);
    do {
        assert_int_equal(rocq_graph_launch_for(s.ctx, s.graph, 0, &done), ROCQ_OK);
    } while (!done);
    assert_int_equal(rocq_graph_launch(s.ctx, s.graph), ROCQ_OK);
    assert_int_equal(rocq_profile_stop(s.ctx), ROCQ_OK);
    assert_int_equal(rocq_profile_count(s.ctx), 1);
    assert_int_equal(rocq_profile_region(s.ctx, 0, &region), ROCQ_OK);
    assert_string_equal(region.name, "graph");
    assert_int_equal(region.calls, count_subgraphs(&s) + 1);
    assert_true(fabs(region.flops - 2 * flops) <= 1e-9 * flops);
    simt_set_work(SIMT_LATE);
    step_close(&s);
}

// Any call of the runtime that fails: a code, a context that is lost or goes on, and nothing left.
static void test_slices_failures(void **state) {
    (void)state;
    step_result expected, found;
    int n_lost = 0;
    step_expected(0, ROCQ_F16, &expected);
    for (int64_t at = 1;; at++) {
        static step s;
        const rocq_desc desc = {0};
        bool done = true;
        rocq_result result = ROCQ_OK;
        slice_us = 20;
        step_open(&s, desc, 0, ROCQ_F16);
        slice_us = 0;
        simt_set_work(SIMT_AT_ONCE);
        const int64_t calls = simt_calls();
        simt_fail_once(at, at % 2 ? ROCQ_HIP_OUT_OF_MEMORY : 719);
        result = rocq_graph_begin(s.ctx);
        if (result == ROCQ_OK) {
            const rocq_result recorded = step_ops(&s);
            result = rocq_graph_end(s.ctx, &s.graph);
            if (recorded != ROCQ_OK) { // not all of it
                result = recorded;
                rocq_graph_destroy(s.ctx, &s.graph);
            }
        }
        for (int i = 0; (i == 0 || !done) && result == ROCQ_OK; i++) {
            result = rocq_graph_launch_for(s.ctx, s.graph, i, &done);
        }
        const bool all = simt_calls() - calls < at;
        simt_fail_at(0, 0);
        assert_int_equal(s.ctx->gpu->lost, result == ROCQ_E_LOST);
        assert_true(result == ROCQ_OK || result == ROCQ_E_LOST || result == ROCQ_E_MEMORY);
        n_lost += result == ROCQ_E_LOST;
        if (result == ROCQ_E_MEMORY && s.graph) { // the next slice begins anew
            assert_false(s.graph->begun);
            do {
                result = rocq_graph_launch_for(s.ctx, s.graph, 50, &done);
            } while (result == ROCQ_OK && !done);
            assert_int_equal(result, ROCQ_OK);
        }
        if (result == ROCQ_OK) {
            step_results(&s, &found);
            assert_memory_equal(&found, &expected, sizeof found);
        }
        simt_set_work(SIMT_LATE);
        step_close(&s);
        if (all) break;
    }
    assert_true(n_lost >= 4);
}

static void test_misuse(void **state) {
    (void)state;
    const rocq_backend backends[] = {ROCQ_BACKEND_CPU, ROCQ_BACKEND_GPU};
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
        bool done = false;
        assert_int_equal(rocq_graph_launch_for(k.ctx, k.graph, 0, &done), ROCQ_OK); // nor slices
        assert_true(done);
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
        assert_int_equal(work_open(&k, ROCQ_BACKEND_GPU), ROCQ_OK);
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
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU,
                            .allocator = {.alloc = scarce, .free = release}};
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

int main(int argc, char **argv) {
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cpu),        cmocka_unit_test(test_gpu),
        cmocka_unit_test(test_rehearsal),  cmocka_unit_test(test_threads),
        cmocka_unit_test(test_first_copy), cmocka_unit_test(test_kernels),
        cmocka_unit_test(test_misuse),     cmocka_unit_test(test_failures),
        cmocka_unit_test(test_no_memory),  cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_touching),   cmocka_unit_test(test_pages),
        cmocka_unit_test(test_replay_right),
        cmocka_unit_test(test_replay_stale_args), cmocka_unit_test(test_replay_stale_copies),
        cmocka_unit_test(test_replay_dropped), cmocka_unit_test(test_replay_each),
        cmocka_unit_test(test_replay_status), cmocka_unit_test(test_replay_budget),
        cmocka_unit_test(test_replay_failures), cmocka_unit_test(test_subgraphs),
        cmocka_unit_test(test_subgraphs_replay), cmocka_unit_test(test_slices),
        cmocka_unit_test(test_slices_learn), cmocka_unit_test(test_slices_left),
        cmocka_unit_test(test_slices_profiled), cmocka_unit_test(test_slices_failures),
    };
    return cmocka_run_group_tests_name("warm", tests, NULL, NULL);
}
