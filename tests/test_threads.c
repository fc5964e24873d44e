// The threads of a context: stages of ops and of recorded steps, with more threads than there are
// cores, late ones, and job systems of the program's own. Built with the thread sanitizer.
#define _GNU_SOURCE // for the affinity mask
#include <pthread.h>
#include <sched.h>

// pthread_create fails from its start number threads_left on; below 0 it never does.
static int threads_left = -1;
static int few_threads(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *),
                       void *arg) {
    if (threads_left == 0) return 11; // EAGAIN
    if (threads_left > 0) threads_left--;
    return (pthread_create)(thread, attr, run, arg);
}
#define pthread_create few_threads

#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define TRY(call)                                       \
    do {                                                \
        const rocq_result result_ = (call);             \
        if (result_ != ROCQ_OK) return result_;         \
    } while (0)
#define OK(call) assert_int_equal(call, ROCQ_OK)

// -- a step --

// One layer and its head, from a token id to the next: all ops whose stages differ in kind. Prompts
// have N columns, a step has one.
enum { EMBD = 256, HEADS = 4, KV_HEADS = 2, DIM = 64, FF = 512, VOCAB = 320, CTX = 600, N = 20 };

typedef struct step {
    rocq_ctx *ctx;
    rocq_buffer memory;
    rocq_arena arena;
    int64_t n;
    rocq_tensor embedding, norm, q, k, v, out, gate, up, down, head; // weights
    rocq_tensor ids, pos, len, x, h, hq, qx, kx, vx, seen, ffn, logits, next, k_cache, v_cache;
    rocq_tensor other_x, other, other_y; // of ops that are not the step's
} step;

static float noise(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(*state >> 32) * 0x1p-31f;
}

static void tensor(step *s, rocq_tensor *t, rocq_format format, int64_t ne0, int64_t ne1) {
    OK(rocq_tensor_2d(&s->arena, t, format, ne0, ne1));
    memset(rocq_tensor_data(t), 0xff, (size_t)rocq_tensor_size(t)); // NaN
}

static unsigned char *weights; // of the first step, which the others copy

static void weight(step *s, rocq_tensor *t, rocq_format format, int64_t ne0, int64_t ne1,
                   uint64_t seed) {
    tensor(s, t, format, ne0, ne1);
    if (weights) return;
    float *values = (float *)malloc((size_t)(ne0 * ne1) * sizeof *values);
    assert_non_null(values);
    for (int64_t i = 0; i < ne0 * ne1; i++) values[i] = 0.1f * noise(&seed);
    OK(rocq_quantize(format, rocq_tensor_data(t), values, ne1, ne0, NULL));
    free(values);
}

static bool interleave; // whether steps have their weights in ROCQ_LAYOUT_INTERLEAVED

static void to_interleaved(step *s, rocq_tensor *t) {
    const int64_t size = rocq_tensor_size(t);
    void *rows = malloc((size_t)size);
    assert_non_null(rows);
    memcpy(rows, rocq_tensor_data(t), (size_t)size);
    t->layout = ROCQ_LAYOUT_INTERLEAVED;
    OK(rocq_upload(s->ctx, t, rows, size));
    free(rows);
}

static void step_open(step *s, const rocq_desc *desc, int64_t n) {
    memset(s, 0, sizeof *s);
    OK(rocq_open(&s->ctx, desc));
    OK(rocq_buffer_alloc(s->ctx, &s->memory, 8 << 20));
    rocq_arena_init(&s->arena, &s->memory);
    s->n = n;
    weight(s, &s->embedding, ROCQ_Q8_0, EMBD, VOCAB, 1);
    weight(s, &s->norm, ROCQ_F32, EMBD, 1, 2);
    weight(s, &s->q, ROCQ_Q4_K, EMBD, HEADS * DIM, 3);
    weight(s, &s->k, ROCQ_Q4_K, EMBD, KV_HEADS * DIM, 4);
    weight(s, &s->v, ROCQ_Q6_K, EMBD, KV_HEADS * DIM, 5); // its columns are grouped otherwise
    weight(s, &s->out, ROCQ_Q8_0, HEADS * DIM, EMBD, 6);
    weight(s, &s->gate, ROCQ_Q4_K, EMBD, FF, 7);
    weight(s, &s->up, ROCQ_Q5_0, EMBD, FF, 8);
    weight(s, &s->down, ROCQ_F16, FF, EMBD, 9);
    weight(s, &s->head, ROCQ_Q6_K, EMBD, VOCAB, 10);
    if (!weights) {
        weights = (unsigned char *)malloc((size_t)s->arena.used);
        assert_non_null(weights);
        memcpy(weights, s->memory.host, (size_t)s->arena.used);
    }
    memcpy(s->memory.host, weights, (size_t)s->arena.used);
    rocq_tensor *const rows[] = {&s->q, &s->k, &s->v, &s->out, &s->gate, &s->head};
    for (int i = 0; interleave && i < 6; i++) to_interleaved(s, rows[i]);
    tensor(s, &s->ids, ROCQ_I32, n, 1);
    tensor(s, &s->pos, ROCQ_I32, n, 1);
    tensor(s, &s->len, ROCQ_I32, 1, 1);
    tensor(s, &s->x, ROCQ_F32, EMBD, n);
    tensor(s, &s->h, ROCQ_F32, EMBD, n);
    tensor(s, &s->hq, ROCQ_Q8_0, EMBD, n);
    tensor(s, &s->qx, ROCQ_F32, HEADS * DIM, n);
    tensor(s, &s->kx, ROCQ_F32, KV_HEADS * DIM, n);
    tensor(s, &s->vx, ROCQ_F32, KV_HEADS * DIM, n);
    tensor(s, &s->seen, ROCQ_F32, HEADS * DIM, n);
    tensor(s, &s->ffn, ROCQ_Q8_0, FF, n);
    tensor(s, &s->logits, ROCQ_F32, VOCAB, n);
    tensor(s, &s->next, ROCQ_I32, n, 1);
    tensor(s, &s->other_x, ROCQ_F32, EMBD, N);
    tensor(s, &s->other, ROCQ_F32, EMBD, N);
    tensor(s, &s->other_y, ROCQ_F32, FF, N);
    OK(rocq_tensor_3d(&s->arena, &s->k_cache, ROCQ_F16, DIM, KV_HEADS, CTX));
    OK(rocq_tensor_3d(&s->arena, &s->v_cache, ROCQ_F16, DIM, KV_HEADS, CTX));
}

static void step_close(step *s) { rocq_close(&s->ctx); }

static rocq_result step_ops(step *s) {
    const rocq_tensor q = rocq_tensor_heads(&s->qx, DIM), k = rocq_tensor_heads(&s->kx, DIM);
    const rocq_tensor v = rocq_tensor_heads(&s->vx, DIM), seen = rocq_tensor_heads(&s->seen, DIM);
    const rocq_gather_params embed = {.y = &s->x, .table = &s->embedding, .ids = &s->ids};
    const rocq_norm_params norm = {.y = &s->h, .x = &s->x, .weight = &s->norm};
    const rocq_norm_params norm_q = {.y = &s->hq, .x = &s->x, .weight = &s->norm};
    const rocq_matmul_params to_v = {.y = &s->vx, .w = &s->v, .x = &s->h};
    const rocq_matmul_params to_k = {.y = &s->kx, .w = &s->k, .x = &s->h, .next = &to_v};
    const rocq_matmul_params to_q = {.y = &s->qx, .w = &s->q, .x = &s->h, .next = &to_k};
    const rocq_rope_append_params append = {.q = &q, .k = &k, .v = &v, .k_cache = &s->k_cache,
                                            .v_cache = &s->v_cache, .pos = &s->pos};
    const rocq_attention_params attend = {.out = &seen, .q = &q, .k = &s->k_cache,
                                          .v = &s->v_cache, .kv_len = &s->len, .causal = true};
    const rocq_matmul_params out = {.y = &s->x, .w = &s->out, .x = &s->seen, .residual = &s->x};
    const rocq_matmul_params gate = {.y = &s->ffn, .w = &s->gate, .x = &s->hq, .w2 = &s->up,
                                     .activation = ROCQ_ACT_SILU};
    const rocq_matmul_params down = {.y = &s->x, .w = &s->down, .x = &s->ffn, .residual = &s->x};
    const rocq_matmul_params head = {.y = &s->logits, .w = &s->head, .x = &s->h};
    const rocq_softmax_params soft = {.y = &s->logits, .x = &s->logits};
    const rocq_argmax_params best = {.index = &s->next, .x = &s->logits};
    TRY(rocq_gather(s->ctx, &embed));
    for (int layer = 0; layer < 2; layer++) {
        TRY(rocq_rmsnorm(s->ctx, &norm));
        TRY(rocq_matmul(s->ctx, &to_q));
        TRY(rocq_rope_append(s->ctx, &append));
        TRY(rocq_attention(s->ctx, &attend));
        TRY(rocq_matmul(s->ctx, &out));
        TRY(rocq_rmsnorm(s->ctx, &norm_q));
        TRY(rocq_matmul(s->ctx, &gate));
        TRY(rocq_matmul(s->ctx, &down));
    }
    TRY(rocq_rmsnorm(s->ctx, &norm));
    TRY(rocq_matmul(s->ctx, &head));
    TRY(rocq_softmax(s->ctx, &soft));
    return rocq_argmax(s->ctx, &best);
}

static rocq_graph *step_record(step *s) {
    rocq_graph *graph;
    OK(rocq_graph_begin(s->ctx));
    OK(step_ops(s));
    OK(rocq_graph_end(s->ctx, &graph));
    return graph;
}

// Sets the inputs of a step at a position; the rows of the cache before it are what they are.
static void step_feed(step *s, int32_t position) {
    for (int32_t i = 0; i < (int32_t)s->n; i++) {
        ((int32_t *)rocq_tensor_data(&s->ids))[i] = (position * 31 + i * 7) % VOCAB;
        ((int32_t *)rocq_tensor_data(&s->pos))[i] = position + i;
    }
    *(int32_t *)rocq_tensor_data(&s->len) = position + (int32_t)s->n;
}

static uint64_t digest(uint64_t hash, const rocq_tensor *t) {
    const unsigned char *bytes = (const unsigned char *)rocq_tensor_data(t);
    for (int64_t i = 0; i < rocq_tensor_size(t); i++) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

// Runs at positions of no split, two and three, each after the other; graph NULL: op by op. The
// digest is of what the last ops, and the caches, hold after each.
static const int32_t positions[] = {0, 290, 555, 4};
static uint64_t step_digest(step *s, rocq_graph *graph) {
    uint64_t hash = 0xcbf29ce484222325u;
    memset(rocq_tensor_data(&s->k_cache), 0x11, (size_t)rocq_tensor_size(&s->k_cache));
    memset(rocq_tensor_data(&s->v_cache), 0x22, (size_t)rocq_tensor_size(&s->v_cache));
    for (size_t i = 0; i < sizeof positions / sizeof positions[0]; i++) {
        step_feed(s, positions[i]);
        OK(graph ? rocq_graph_launch(s->ctx, graph) : step_ops(s));
        hash = digest(digest(hash, &s->x), &s->logits);
        hash = digest(digest(digest(hash, &s->next), &s->k_cache), &s->v_cache);
    }
    const float *p = (const float *)rocq_tensor_data(&s->logits);
    double sum = 0.0;
    for (int64_t i = 0; i < VOCAB; i++) sum += (double)p[i];
    assert_true(fabs(sum - 1.0) < 1e-4);
    return hash;
}

static rocq_desc with_threads(int32_t n) {
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = n};
    return desc;
}

static uint64_t wanted[2]; // digests of one column and of N, from ops on one thread

static int compute_wanted(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        step s;
        const rocq_desc desc = with_threads(1);
        step_open(&s, &desc, i ? N : 1);
        wanted[i] = step_digest(&s, NULL);
        step_close(&s);
    }
    return 0;
}

static void check_desc(const rocq_desc *desc, bool prompt) {
    for (int i = 0; i < 1 + prompt; i++) {
        step s;
        step_open(&s, desc, i ? N : 1);
        rocq_graph *graph = step_record(&s);
        for (int round = 0; round < 2; round++) assert_true(step_digest(&s, graph) == wanted[i]);
        assert_true(step_digest(&s, NULL) == wanted[i]);
        step_close(&s);
    }
}

static void a_step_has_the_same_bits_for_any_number_of_threads(void **state) {
    (void)state;
    static const int32_t counts[] = {1, 2, 3, 4, 8, 16};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        const rocq_desc desc = with_threads(counts[i]);
        check_desc(&desc, counts[i] == 3);
        interleave = true;
        check_desc(&desc, counts[i] == 8);
        interleave = false;
    }
}

static void a_launch_allocates_only_after_scratch_memory_moved(void **state) {
    (void)state;
    step s;
    rocq_stats before, after;
    const rocq_desc desc = with_threads(4);
    step_open(&s, &desc, 1);
    rocq_graph *graph = step_record(&s);
    OK(rocq_get_stats(s.ctx, &before));
    assert_true(step_digest(&s, graph) == wanted[0]);
    OK(rocq_get_stats(s.ctx, &after));
    assert_int_equal(after.n_allocs, before.n_allocs);
    OK(rocq_reserve(s.ctx, before.scratch_bytes + (16 << 20)));
    assert_true(step_digest(&s, graph) == wanted[0]);
    step_close(&s);
}

// -- stages --

typedef struct tally {
    int32_t n_threads;
    int32_t hits[3][1000];
    int32_t bad; // (atomic)
    int64_t order;
} tally;

static void count(tally *t, int stage, int64_t begin, int64_t end, int32_t thread) {
    if (thread < 0 || thread >= t->n_threads || begin >= end) rocq__store32(&t->bad, 1);
    for (int64_t i = begin; i < end; i++) {
        // each stage reads what the one before has written, perhaps on another thread
        if (stage > 0 && t->hits[stage - 1][999 - i] != t->hits[stage][i] + 1) {
            rocq__store32(&t->bad, 1);
        }
        t->hits[stage][i]++;
    }
}
static void count_0(void *arg, int64_t begin, int64_t end, int32_t thread) {
    count((tally *)arg, 0, begin, end, thread);
}
static void count_1(void *arg, int64_t begin, int64_t end, int32_t thread) {
    count((tally *)arg, 1, begin, end, thread);
}
static void count_2(void *arg, int64_t begin, int64_t end, int32_t thread) {
    count((tally *)arg, 2, begin, end, thread);
}
static rocq_result one_more(rocq_ctx *ctx, rocq__stage *stage) { // no thread may be at work now
    (void)ctx;
    ((tally *)stage->arg)->order++;
    stage->n = 1000;
    return ROCQ_OK;
}
static rocq_result no_items(rocq_ctx *ctx, rocq__stage *stage) {
    (void)ctx;
    ((tally *)stage->arg)->order++;
    stage->n = 0;
    return ROCQ_OK;
}

static void stages_follow_each_other(void **state) {
    (void)state;
    static const int32_t counts[] = {1, 2, 4, 8, 16};
    enum { ROUNDS = 200 };
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        static tally t;
        rocq_ctx *ctx;
        const rocq_desc desc = with_threads(counts[c]);
        OK(rocq_open(&ctx, &desc));
        memset(&t, 0, sizeof t);
        t.n_threads = counts[c];
        for (int round = 0; round < ROUNDS; round++) {
            const int64_t grain = 1 + round * 7 % 400, together = round * 11 % 1300;
            rocq__stage stages[] = {{count_0, &t, 1000, grain, together, NULL, NULL, NULL},
                                    {count_0, &t, 5, 1, 0, no_items, NULL, NULL},
                                    {count_1, &t, 1000, 1000, 0, NULL, NULL, NULL},
                                    {count_2, &t, 0, 500, 0, one_more, NULL, NULL}};
            OK(rocq__team_run(ctx, "test", stages, 4));
            if (round % 100 == 99) poll(NULL, 0, 2); // the threads fall asleep
        }
        for (int i = 0; i < 3 * 1000; i++) assert_int_equal(t.hits[i / 1000][i % 1000], ROUNDS);
        assert_int_equal(t.bad, 0);
        assert_int_equal(t.order, 2 * ROUNDS);
        rocq_close(&ctx);
    }
}

// A thread that waits asks what its own share of a later stage will read, and only while the stages
// are there: they are freed as soon as a run is over, and then this must not be called.
typedef struct reading {
    int64_t n, n_threads;
    int32_t n_calls, bad; // (atomic)
    int32_t over;         // (atomic)
    unsigned char memory[4096];
} reading;
static void name_reads(const void *arg, int64_t begin, int64_t end, rocq__ahead *to) {
    reading *r = (reading *)(uintptr_t)arg;
    bool own = false;
    for (int64_t t = 0; t < r->n_threads; t++) {
        own |= begin == r->n * t / r->n_threads && end == r->n * (t + 1) / r->n_threads;
    }
    for (int i = 0; i < ROCQ__AHEAD_PARTS; i++) own &= to->at[i] == NULL && to->bytes[i] == 0;
    if (!own || rocq__load32(&r->over)) rocq__store32(&r->bad, 1);
    rocq__fetch_add32(&r->n_calls, 1);
    to->at[0] = r->memory;
    to->bytes[0] = 1000; // no multiple of what is prefetched at once
    to->at[1] = r->memory + 1000;
    to->bytes[1] = 3096;
}
static void take_time(void *arg, int64_t begin, int64_t end, int32_t thread) {
    (void)arg;
    for (int64_t i = begin * (1 + thread % 2) * 20; i < end * (1 + thread % 2) * 20; i++) {
        rocq__relax();
    }
}
static void a_thread_that_waits_looks_ahead(void **state) {
    (void)state;
    for (int32_t n_threads = 1; n_threads <= 5; n_threads++) {
        rocq_ctx *ctx;
        const rocq_desc desc = with_threads(n_threads);
        OK(rocq_open(&ctx, &desc));
        int32_t n_calls = 0;
        for (int round = 0; round < 200; round++) {
            const rocq__stage all[] = {{take_time, NULL, 100 + round, 1, 0, NULL, NULL, NULL},
                                       {take_time, NULL, 1, 1, 0, NULL, NULL, NULL},
                                       {take_time, NULL, 77, 1, 0, NULL, name_reads, NULL}};
            rocq__stage *stages = (rocq__stage *)malloc(sizeof all);
            reading *r = (reading *)calloc(1, sizeof *r);
            memcpy(stages, all, sizeof all);
            r->n = 77;
            r->n_threads = n_threads;
            stages[2].arg = r;
            stages[0].ahead = stages[1].ahead = &stages[2];
            OK(rocq__team_run(ctx, "test", stages, round % 4 ? 3 : 1));
            rocq__store32(&r->over, 1);
            assert_int_equal(r->bad, 0);
            n_calls += r->n_calls;
            free(stages);
            free(r);
        }
        assert_true(n_threads == 1 ? n_calls == 0 : n_calls > 0);
        rocq_close(&ctx);
    }
}

// In a recorded step each stage knows the next product whose matrix is read.
static void a_step_links_its_products(void **state) {
    (void)state;
    step s;
    const rocq_desc desc = with_threads(2);
    step_open(&s, &desc, 1);
    rocq_graph *graph = step_record(&s);
    step_digest(&s, graph);
    const rocq__stage *ahead = NULL;
    int32_t n = 0;
    for (int32_t i = graph->n_stages - 1; i >= 0; i--) {
        const rocq__stage *stage = &graph->stages[i];
        assert_ptr_equal(stage->ahead, ahead);
        assert_int_equal(stage->reads != NULL, stage->fn == rocq__mm_run_all);
        if (stage->reads) ahead = stage, n++;
    }
    assert_true(n > 1);
    step_close(&s);
}

// A thread without a share of small stages, for as many as their numbers go round in and more,
// still has one of a large stage. Jobs are dropped, so that thread 0 alone takes chunks.
static void drop_jobs(void (*task)(void *arg, int32_t i), void *arg, int32_t n, void *user) {
    (void)task;
    (void)arg;
    (void)n;
    (void)user;
}
static void a_share_is_found_after_any_number_of_stages(void **state) {
    (void)state;
    static tally t;
    rocq_ctx *ctx;
    rocq_desc desc = with_threads(4);
    desc.run_tasks = drop_jobs;
    OK(rocq_open(&ctx, &desc));
    t.n_threads = 4;
    for (int64_t i = 1; i <= 24; i++) {
        // as if so many stages had been run; the last ones before each 2^28 really are
        const int64_t number = ((i << 28) - 2) & INT32_MAX;
        rocq__store64(&ctx->team.open, number << 32);
        for (int k = 0; k < 4; k++) rocq__parallel(ctx, 2, 1, count_0, &t);
        if (i % 5 != 0) continue; // the other threads' words are five times 2^28 old
        alarm(60);                // a chunk that nobody finds is waited for without end
        rocq__parallel(ctx, 1000, 1, count_0, &t);
        alarm(0);
    }
    for (int i = 0; i < 1000; i++) assert_int_equal(t.hits[0][i], i < 2 ? 24 * 4 + 4 : 4);
    assert_int_equal(t.bad, 0);
    rocq_close(&ctx);
}

static void between_launches_threads_sleep(void **state) {
    (void)state;
    step s;
    const rocq_desc desc = with_threads(4);
    step_open(&s, &desc, 1);
    rocq_graph *graph = step_record(&s);
    assert_true(step_digest(&s, graph) == wanted[0]);
    int waited = 0;
    while (rocq__load32(&s.ctx->team.asleep) < 3 && waited++ < 5000) poll(NULL, 0, 1);
    assert_int_equal(rocq__load32(&s.ctx->team.asleep), 3);
    const clock_t before = clock(); // of all threads: none of them spins
    poll(NULL, 0, 300);
    assert_in_range((clock() - before) * 1000 / CLOCKS_PER_SEC, 0, 30);
    assert_true(step_digest(&s, graph) == wanted[0]);
    step_close(&s);
}

// Pins the calling thread to a CPU and takes a step while the context's thread sleeps. Then that
// thread may use all CPUs but this one; or all that it had, if there are too few.
static void step_from(step *s, rocq_graph *graph, int cpu, const cpu_set_t *had, bool moves) {
    cpu_set_t one, now, expected = *had;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    for (int waited = 0; rocq__load32(&s->ctx->team.asleep) < 1 && waited < 5000; waited++) {
        poll(NULL, 0, 1);
    }
    assert_int_equal(rocq__load32(&s->ctx->team.asleep), 1);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_true(step_digest(s, graph) == wanted[0]);
    if (moves) CPU_CLR(cpu, &expected);
    assert_int_equal(sched_getaffinity(s->ctx->team.ids[0], sizeof now, &now), 0);
    assert_true(CPU_EQUAL(&now, &expected));
}

static void threads_that_wake_are_kept_off_the_callers_cpu(void **state) {
    (void)state;
    step s;
    cpu_set_t all, had;
    const rocq_desc desc = with_threads(2);
    assert_int_equal(sched_getaffinity(0, sizeof all, &all), 0);
    int first = 0, last = CPU_SETSIZE - 1;
    while (!CPU_ISSET(first, &all)) first++;
    while (!CPU_ISSET(last, &all)) last--;
    for (int few = 0; few < 2; few++) {
        CPU_ZERO(&had);
        CPU_SET(first, &had);
        if (!few) had = all;
        assert_int_equal(sched_setaffinity(0, sizeof had, &had), 0); // the thread inherits it
        step_open(&s, &desc, 1);
        rocq_graph *graph = step_record(&s);
        assert_true(step_digest(&s, graph) == wanted[0]);
        step_from(&s, graph, first, &had, first != last && !few);
        step_from(&s, graph, few ? first : last, &had, first != last && !few);
        step_from(&s, graph, first, &had, first != last && !few);
        CPU_ZERO(&had); // by another program: it stays so
        CPU_SET(first, &had);
        assert_int_equal(sched_setaffinity(s.ctx->team.ids[0], sizeof had, &had), 0);
        step_from(&s, graph, last, &had, false);
        assert_int_equal(sched_setaffinity(0, sizeof all, &all), 0);
        step_close(&s);
    }
}

static void a_graph_may_go_as_soon_as_its_launch_returns(void **state) {
    (void)state;
    step s;
    const rocq_desc desc = with_threads(8);
    step_open(&s, &desc, 1);
    for (int i = 0; i < 20; i++) {
        rocq_graph *graph = step_record(&s);
        step_feed(&s, 7);
        OK(rocq_graph_launch(s.ctx, graph));
        rocq_graph_destroy(s.ctx, &graph);
    }
    step_close(&s);
}

static void threads_that_do_not_start_are_done_without(void **state) {
    (void)state;
    for (int n = 0; n < 4; n += 3) {
        const rocq_desc desc = with_threads(8);
        threads_left = n;
        check_desc(&desc, false); // one context: its threads are started once
        threads_left = -1;
    }
}

static void *run_digests(void *arg) {
    const rocq_desc desc = with_threads(4);
    step s;
    step_open(&s, &desc, 1);
    rocq_graph *graph = step_record(&s);
    for (int i = 0; i < 3; i++) *(bool *)arg &= step_digest(&s, graph) == wanted[0];
    step_close(&s);
    return NULL;
}

static void contexts_on_two_threads_do_not_meet(void **state) {
    (void)state;
    pthread_t threads[2];
    bool right[2] = {true, true};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, run_digests, &right[i]), 0);
    }
    for (int i = 0; i < 2; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
    assert_true(right[0] && right[1]);
}

static int32_t default_threads(rocq_sharing sharing) {
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .sharing = sharing};
    rocq_ctx *ctx;
    rocq_info info;
    OK(rocq_open(&ctx, &desc));
    OK(rocq_get_info(ctx, &info));
    rocq_close(&ctx);
    return info.desc.n_threads;
}

static void the_default_is_one_thread_a_core_that_may_be_used(void **state) {
    (void)state;
    cpu_set_t all, one;
    bool own[ROCQ__MOST_CPUS] = {false};
    char path[] = "rocq-cpus.XXXXXX";
    const int file = mkstemp(path);
    assert_true(file >= 0);
    const char text[] = "other: 1\nlist:\t2-4,7,9-9\n";
    assert_int_equal(write(file, text, sizeof text - 1), sizeof text - 1);
    close(file);
    assert_int_equal(rocq__cpu_list(path, "list:", NULL, own), 2);
    for (int i = 0; i < 12; i++) {
        assert_int_equal(own[i], (i >= 2 && i <= 4) || i == 7 || i == 9);
    }
    own[2] = own[3] = own[4] = false;
    assert_int_equal(rocq__cpu_list(path, "list:", own, NULL), 7);
    assert_int_equal(rocq__cpu_list(path, "none:", NULL, NULL), -1);
    unlink(path);
    assert_int_equal(rocq__cpu_list(path, "list:", NULL, NULL), -1);

    assert_int_equal(sched_getaffinity(0, sizeof all, &all), 0);
    const int32_t n = default_threads(ROCQ_SHARING_BALANCED);
    assert_true(n >= 1 && n <= CPU_COUNT(&all));
    assert_int_equal(default_threads(ROCQ_SHARING_GRAPHICS_FIRST), n > 1 ? n - 1 : 1);
    assert_int_equal(default_threads(ROCQ_SHARING_COMPUTE_FIRST), n);
    int first = 0;
    while (!CPU_ISSET(first, &all)) first++;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_int_equal(default_threads(ROCQ_SHARING_BALANCED), 1);
    assert_int_equal(default_threads(ROCQ_SHARING_GRAPHICS_FIRST), 1);
    assert_int_equal(sched_setaffinity(0, sizeof all, &all), 0);
}

// -- failures --

typedef struct log_entry {
    int n;
    bool elsewhere; // called on another thread
    pthread_t thread;
    char text[512];
} log_entry;

static void log_keep(rocq_log_level level, const char *message, void *user) {
    log_entry *entry = (log_entry *)user;
    (void)level;
    entry->n++;
    entry->elsewhere |= !pthread_equal(entry->thread, pthread_self());
    snprintf(entry->text, sizeof entry->text, "%s", message);
}

static void a_step_that_fails_says_so_once(void **state) {
    (void)state;
    log_entry entry = {.thread = pthread_self()};
    rocq_desc desc = with_threads(4);
    step s;
    desc.log = log_keep;
    desc.log_user = &entry;
    step_open(&s, &desc, 1);
    rocq_graph *graph = step_record(&s);
    entry.n = 0;
    for (int i = 0; i < 20; i++) {
        step_feed(&s, 3);
        if (i % 2) *(int32_t *)rocq_tensor_data(&s.ids) = VOCAB;
        else *(int32_t *)rocq_tensor_data(&s.len) = CTX + 1;
        assert_int_equal(rocq_graph_launch(s.ctx, graph), ROCQ_E_BOUNDS);
        assert_non_null(strstr(rocq_error(s.ctx), i % 2 ? "gather: ids[0]" : "attention: kv_len"));
        assert_string_equal(entry.text, rocq_error(s.ctx));
        assert_int_equal(entry.n, i + 1);
    }
    assert_false(entry.elsewhere);
    assert_true(step_digest(&s, graph) == wanted[0]);
    step_close(&s);
}

typedef struct canceller {
    rocq_ctx *ctx;
    int32_t stop; // (atomic)
} canceller;

static void *cancel_again_and_again(void *arg) {
    canceller *c = (canceller *)arg;
    for (int i = 0; !rocq__load32(&c->stop); i++) {
        rocq_cancel(c->ctx);
        poll(NULL, 0, i % 3);
    }
    return NULL;
}

static void a_launch_is_cancelled_from_another_thread(void **state) {
    (void)state;
    step s;
    pthread_t thread;
    const rocq_desc desc = with_threads(4);
    int n_cancelled = 0, rounds = 0;
    step_open(&s, &desc, N);
    rocq_graph *graph = step_record(&s);
    canceller c = {s.ctx, 0};
    assert_int_equal(pthread_create(&thread, NULL, cancel_again_and_again, &c), 0);
    for (; rounds < 5 || (n_cancelled < 3 && rounds < 2000); rounds++) {
        step_feed(&s, positions[rounds % 4]);
        const rocq_result result = rocq_graph_launch(s.ctx, graph);
        if (result != ROCQ_OK) assert_int_equal(result, ROCQ_E_CANCELLED);
        n_cancelled += result != ROCQ_OK;
        OK(rocq_sync(s.ctx));
    }
    rocq__store32(&c.stop, 1);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_true(n_cancelled >= 3);
    OK(rocq_sync(s.ctx));
    assert_true(step_digest(&s, graph) == wanted[1]);
    step_close(&s);
}

// A stage in whose first chunk rocq_cancel is called runs little more.
typedef struct cancelled_stage {
    rocq_ctx *ctx;
    int64_t n_run; // items (atomic)
    bool later;    // the stage behind it has run
} cancelled_stage;
static void cancel_inside(void *arg, int64_t begin, int64_t end, int32_t thread) {
    cancelled_stage *c = (cancelled_stage *)arg;
    (void)thread;
    rocq__fetch_add64(&c->n_run, end - begin);
    rocq_cancel(c->ctx);
}
static void run_later(void *arg, int64_t begin, int64_t end, int32_t thread) {
    (void)begin;
    (void)end;
    (void)thread;
    ((cancelled_stage *)arg)->later = true;
}
static void a_long_stage_is_cancelled_between_chunks(void **state) {
    (void)state;
    for (int32_t n_threads = 1; n_threads <= 4; n_threads++) {
        for (int last = 0; last < 2; last++) {
            cancelled_stage c = {NULL, 0, false};
            const rocq_desc desc = with_threads(n_threads);
            OK(rocq_open(&c.ctx, &desc));
            rocq__stage stages[] = {{cancel_inside, &c, 100000, 1, 0, NULL, NULL, NULL},
                                    {run_later, &c, 1, 1, 0, NULL, NULL, NULL}};
            assert_int_equal(rocq__team_run(c.ctx, "test", stages, 2 - last), ROCQ_E_CANCELLED);
            assert_non_null(strstr(rocq_error(c.ctx), "test: rocq_cancel"));
            assert_true(c.n_run > 0 && c.n_run < 50000 && !c.later);
            OK(rocq_sync(c.ctx));
            rocq__parallel(c.ctx, 100, 1, cancel_inside, &c); // not an op: runs to its end
            assert_true(c.n_run >= 100);
            rocq_close(&c.ctx);
        }
    }
}

// -- job systems --

typedef struct job_system {
    int32_t width; // tasks that it runs at once; 0: drops them all
    int32_t n_calls;
    void (*task)(void *arg, int32_t i);
    void *arg;
    int32_t n, next; // next: atomic
} job_system;

static void *job_worker(void *arg) {
    job_system *jobs = (job_system *)arg;
    for (int32_t i; (i = rocq__fetch_add32(&jobs->next, 1)) < jobs->n;) jobs->task(jobs->arg, i);
    return NULL;
}

static void job_system_run(void (*task)(void *arg, int32_t i), void *arg, int32_t n, void *user) {
    job_system *jobs = (job_system *)user;
    pthread_t threads[8];
    jobs->n_calls++;
    jobs->task = task;
    jobs->arg = arg;
    jobs->n = n;
    jobs->next = 0;
    for (int32_t i = 1; i < jobs->width; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, job_worker, jobs), 0);
    }
    if (jobs->width > 0) job_worker(jobs);
    for (int32_t i = 1; i < jobs->width; i++) pthread_join(threads[i], NULL);
}

static void a_job_system_runs_the_chunks(void **state) {
    (void)state;
    for (int32_t width = 0; width <= 4; width++) {
        job_system jobs = {.width = width};
        rocq_desc desc = with_threads(4);
        step s;
        desc.run_tasks = job_system_run;
        desc.run_tasks_user = &jobs;
        step_open(&s, &desc, 1);
        rocq_graph *graph = step_record(&s);
        assert_int_equal(jobs.n_calls, 0);
        assert_true(step_digest(&s, graph) == wanted[0]);
        assert_int_equal(jobs.n_calls, 4); // once a launch
        assert_int_equal(jobs.n, 4);
        assert_false(s.ctx->team.started);
        assert_true(step_digest(&s, NULL) == wanted[0]);
        step_close(&s);
    }
}

// -- slices --

// What a step writes last, at one position after another, in slices of us microseconds. The second
// step has none to go on with, and so begins without being told. ops: others between two slices.
static uint64_t sliced_digest(step *s, rocq_graph *graph, int32_t us, bool ops, int *n_slices) {
    uint64_t hash = 0xcbf29ce484222325u;
    const rocq_norm_params other = {.y = &s->other, .x = &s->other_x};
    const rocq_matmul_params wide = {.y = &s->other_y, .w = &s->gate, .x = &s->other};
    memset(rocq_tensor_data(&s->k_cache), 0x11, (size_t)rocq_tensor_size(&s->k_cache));
    memset(rocq_tensor_data(&s->v_cache), 0x22, (size_t)rocq_tensor_size(&s->v_cache));
    for (size_t i = 0; i < sizeof positions / sizeof positions[0]; i++) {
        bool done = i != 1;
        step_feed(s, positions[i]);
        do {
            OK(rocq_graph_launch_for(s->ctx, graph, us, &done));
            ++*n_slices;
            if (!ops || done) continue;
            OK(rocq_rmsnorm(s->ctx, &other)); // and its scratch memory is the step's
            OK(rocq_matmul(s->ctx, &wide));
        } while (!done);
        hash = digest(digest(hash, &s->x), &s->logits);
        hash = digest(digest(digest(hash, &s->next), &s->k_cache), &s->v_cache);
    }
    return hash;
}

static int count_ops(const rocq_graph *graph) {
    int n = 0;
    for (const rocq__node *node = graph->first; node; node = node->next) n++;
    return n;
}

// Slices of no time are single ops; of a little, some; of an hour, the whole step. Nothing is
// allocated, and without a plan too the bits are those of the ops.
static void slices_have_the_bits_of_the_step(void **state) {
    (void)state;
    static const int32_t counts[] = {1, 2, 5}, times[] = {0, 20, 100, 2000000000};
    for (int i = 0; i < 3 * 2 * 2; i++) {
        rocq_desc desc = with_threads(counts[i / 4]);
        const int prompt = i / 2 % 2;
        step s;
        rocq_stats before, after;
        desc.no_graphs = i % 2;
        step_open(&s, &desc, prompt ? N : 1);
        rocq_graph *graph = step_record(&s);
        OK(rocq_rmsnorm(s.ctx, &(rocq_norm_params){.y = &s.other, .x = &s.other_x}));
        OK(rocq_reserve(s.ctx, 1 << 20));
        step_feed(&s, 0);
        OK(rocq_graph_launch(s.ctx, graph));
        OK(rocq_get_stats(s.ctx, &before));
        for (int k = 0; k < 4; k++) {
            int n = 0;
            assert_true(sliced_digest(&s, graph, times[k], k % 2, &n) == wanted[prompt]);
            if (k == 0) assert_int_equal(n, 4 * count_ops(graph));
            if (k == 3) assert_int_equal(n, 4);
            assert_true(n >= 4 && n <= 4 * count_ops(graph));
        }
        OK(rocq_get_stats(s.ctx, &after));
        assert_int_equal(after.n_allocs, before.n_allocs);
        step_close(&s);
    }
}

// A step may be begun anew, left for a whole launch or for ever, follow its scratch memory, and be
// measured by a profile on the way.
static void a_step_in_slices_is_left_and_begun_anew(void **state) {
    (void)state;
    for (int32_t n = 1; n <= 5; n += 2) {
        const rocq_desc desc = with_threads(n);
        step s;
        int slices = 0;
        bool done = true;
        step_open(&s, &desc, 1);
        rocq_graph *graph = step_record(&s);
        step_feed(&s, 3);
        for (int i = 0; i < 5; i++) OK(rocq_graph_launch_for(s.ctx, graph, 0, &done));
        assert_false(done);
        assert_true(graph->at != graph->first);
        assert_true(step_digest(&s, graph) == wanted[0]); // whole
        OK(rocq_graph_launch_for(s.ctx, graph, 0, &done));
        assert_true(graph->at == graph->first->next); // which left nothing to go on with
        done = true;
        OK(rocq_graph_launch_for(s.ctx, graph, 0, &done));
        assert_true(graph->at == graph->first->next);
        done = true;
        assert_true(sliced_digest(&s, graph, 0, false, &slices) == wanted[0]);
        OK(rocq_graph_launch_for(s.ctx, graph, 0, &done));
        OK(rocq_reserve(s.ctx, s.ctx->scratch_size + (1 << 20)));
        assert_true(sliced_digest(&s, graph, 10, false, &slices) == wanted[0]);
        step_feed(&s, positions[3]);
        done = true;
        for (int i = 0; !done || i == 0; i++) {
            if (i == 2) OK(rocq_reserve(s.ctx, s.ctx->scratch_size + (1 << 20)));
            if (i == 4) OK(rocq_profile_start(s.ctx, NULL));
            if (i == 6) OK(rocq_profile_stop(s.ctx));
            OK(rocq_graph_launch_for(s.ctx, graph, 0, &done));
        }
        OK(rocq_graph_launch_for(s.ctx, graph, 0, &done));
        rocq_graph_destroy(s.ctx, &graph); // half run
        assert_true(step_digest(&s, NULL) == wanted[0]);
        step_close(&s);
    }
}

// An error and a cancel, between slices and inside of one, end the step: the next slice begins one.
static void a_slice_that_fails_ends_the_step(void **state) {
    (void)state;
    for (int32_t n = 1; n <= 5; n += 2) {
        const rocq_desc desc = with_threads(n);
        step s;
        int slices = 0;
        step_open(&s, &desc, 1);
        rocq_graph *graph = step_record(&s);
        for (int round = 0; round < 3; round++) {
            rocq_result result = ROCQ_OK;
            bool done = true;
            step_feed(&s, 3);
            for (int i = 0; i < 3; i++) OK(rocq_graph_launch_for(s.ctx, graph, 0, &done));
            if (round == 0) rocq_cancel(s.ctx);
            else if (round == 1) *(int32_t *)rocq_tensor_data(&s.len) = CTX + 1;
            else OK(rocq_graph_launch_for(s.ctx, graph, 1000000, &done));
            while (!done && result == ROCQ_OK) {
                result = rocq_graph_launch_for(s.ctx, graph, 0, &done);
            }
            assert_int_equal(result, round == 0   ? ROCQ_E_CANCELLED
                                     : round == 1 ? ROCQ_E_BOUNDS
                                                  : ROCQ_OK);
            assert_int_equal(done, round == 2);
            assert_false(graph->begun);
            if (round == 0) {
                assert_int_equal(rocq_graph_launch_for(s.ctx, graph, 0, &done), ROCQ_E_CANCELLED);
            }
            OK(rocq_sync(s.ctx));
            assert_true(sliced_digest(&s, graph, 5, false, &slices) == wanted[0]);
        }
        step_close(&s);
    }
}

static void slices_are_cancelled_from_another_thread(void **state) {
    (void)state;
    step s;
    pthread_t thread;
    const rocq_desc desc = with_threads(4);
    int n_cancelled = 0, slices = 0;
    bool done = true;
    step_open(&s, &desc, N);
    rocq_graph *graph = step_record(&s);
    canceller c = {s.ctx, 0};
    step_feed(&s, 3);
    assert_int_equal(pthread_create(&thread, NULL, cancel_again_and_again, &c), 0);
    for (int i = 0; i < 100 || (n_cancelled < 3 && i < 10000); i++) {
        const rocq_result result = rocq_graph_launch_for(s.ctx, graph, 300, &done);
        if (result != ROCQ_OK) assert_int_equal(result, ROCQ_E_CANCELLED);
        n_cancelled += result != ROCQ_OK;
        if (result != ROCQ_OK) OK(rocq_sync(s.ctx));
    }
    rocq__store32(&c.stop, 1);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_true(n_cancelled >= 3);
    OK(rocq_sync(s.ctx));
    assert_true(sliced_digest(&s, graph, 100, true, &slices) == wanted[1]);
    step_close(&s);
}

// What is expected of an op follows what it took, but an outlier only so far.
static void times_of_ops_are_learned(void **state) {
    (void)state;
    double ns = 0;
    rocq__learn(&ns, 1000);
    assert_true(ns == 1000);
    rocq__learn(&ns, 1e9);
    assert_true(ns == 1500);
    for (int i = 0; i < 30; i++) rocq__learn(&ns, 400);
    assert_true(fabs(ns - 400) < 1);
    for (int i = 0; i < 60; i++) rocq__learn(&ns, 40000);
    assert_true(fabs(ns - 40000) < 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages_follow_each_other),
        cmocka_unit_test(a_thread_that_waits_looks_ahead),
        cmocka_unit_test(a_step_links_its_products),
        cmocka_unit_test(a_step_has_the_same_bits_for_any_number_of_threads),
        cmocka_unit_test(a_launch_allocates_only_after_scratch_memory_moved),
        cmocka_unit_test(a_share_is_found_after_any_number_of_stages),
        cmocka_unit_test(between_launches_threads_sleep),
        cmocka_unit_test(threads_that_wake_are_kept_off_the_callers_cpu),
        cmocka_unit_test(a_graph_may_go_as_soon_as_its_launch_returns),
        cmocka_unit_test(threads_that_do_not_start_are_done_without),
        cmocka_unit_test(contexts_on_two_threads_do_not_meet),
        cmocka_unit_test(the_default_is_one_thread_a_core_that_may_be_used),
        cmocka_unit_test(a_step_that_fails_says_so_once),
        cmocka_unit_test(a_launch_is_cancelled_from_another_thread),
        cmocka_unit_test(a_long_stage_is_cancelled_between_chunks),
        cmocka_unit_test(a_job_system_runs_the_chunks),
        cmocka_unit_test(times_of_ops_are_learned),
        cmocka_unit_test(slices_have_the_bits_of_the_step),
        cmocka_unit_test(a_step_in_slices_is_left_and_begun_anew),
        cmocka_unit_test(a_slice_that_fails_ends_the_step),
        cmocka_unit_test(slices_are_cancelled_from_another_thread),
    };
    const int failed = cmocka_run_group_tests(tests, compute_wanted, NULL);
    free(weights);
    return failed;
}
