// What a pool's block costs against malloc or the GPU runtime, one size at a time and over the
// trace of a training step (bench/training_trace, run by python3); fragmentation; what an arena's
// cut costs.
//
// On the CPU (--device cpu), against glibc's malloc and free:
//     pool/SIZE/request, /alloc_free, /malloc_free   a request alone, a request and its return, and
//                         malloc and free, in turn, one block of one size at a time: glibc's best
//                         case, which cuts the block from the end of its heap and joins it again,
//                         without a call of the system
//     pool/SIZE/live16    sixteen blocks of sizes of one class, freed in another order: what a heap
//                         does when more than one block lives at all
//     pool/trace          all requests of the steps, in order; per request
//     pool/trace/SIZE/... the three of above by class, each call of the trace timed by itself
//     .../touched         the same with the first byte of every page written after each alloc
//     .../thread_safe     a pool that threads may share; malloc always is one
//     .../times_faster    how many times as long malloc and free take
// On a GPU, against the runtime's own calls (hipMalloc, hipHostMalloc and their frees):
//     pool/device/SIZE, pool/device/trace, pool/pinned/SIZE
#define ROCQ_IMPLEMENTATION // the runtime's own allocator is below what rocq.h declares
#include "bench.h"

#include <malloc.h>

enum { PAGE = 4096, LIVE = 16, INNER = 4 * LIVE, REQUESTS = 1024 };

// -- one size --

typedef struct loop {
    bench *b;
    rocq_pool *pool;
    int64_t size;
    bool touch, pinned;
} loop;

static void touch_pages(void *memory, int64_t size) {
    volatile unsigned char *bytes = (volatile unsigned char *)memory;
    for (int64_t i = 0; i < size; i += PAGE) bytes[i] = 1;
}

static rocq_result pool_loop(void *user) {
    const loop *l = (const loop *)user;
    for (int i = 0; i < INNER; i++) {
        rocq_buffer block;
        const rocq_result result = rocq_pool_alloc(l->pool, &block, l->size);
        if (result != ROCQ_OK) return result;
        if (l->touch) touch_pages(block.host, l->size);
        rocq_pool_free(l->pool, &block);
    }
    return ROCQ_OK;
}

// Requests alone, all served from free blocks: what a frame asks for, and gives back later.
typedef struct requests {
    rocq_pool *pool;
    int64_t size;
    int n; // so many that all are 4 GiB at most, which nobody touches
    rocq_buffer blocks[REQUESTS];
} requests;

static rocq_result pool_requests(void *user) {
    requests *r = (requests *)user;
    for (int k = 0; k < r->n; k++) {
        const rocq_result result = rocq_pool_alloc(r->pool, &r->blocks[k], r->size);
        if (result != ROCQ_OK) return result;
    }
    return ROCQ_OK;
}

static void give_back(void *user) {
    requests *r = (requests *)user;
    for (int k = 0; k < r->n; k++) rocq_pool_free(r->pool, &r->blocks[k]); // empty ones too
}

// The k-th of LIVE sizes of one class, and the order in which they are freed.
static int64_t size_of(const loop *l, int k) { return l->size - l->size / 128 * k; }
static int order(int k) { return k * 5 % LIVE; }

static rocq_result pool_live(void *user) {
    const loop *l = (const loop *)user;
    rocq_buffer blocks[LIVE];
    for (int i = 0; i < INNER / LIVE; i++) {
        for (int k = 0; k < LIVE; k++) {
            const rocq_result result = rocq_pool_alloc(l->pool, &blocks[k], size_of(l, k));
            if (result != ROCQ_OK) return result;
            if (l->touch) touch_pages(blocks[k].host, size_of(l, k));
        }
        for (int k = 0; k < LIVE; k++) rocq_pool_free(l->pool, &blocks[order(k)]);
    }
    return ROCQ_OK;
}

static rocq_result malloc_live(void *user) {
    const loop *l = (const loop *)user;
    void *volatile blocks[LIVE];
    for (int i = 0; i < INNER / LIVE; i++) {
        for (int k = 0; k < LIVE; k++) {
            blocks[k] = malloc((size_t)size_of(l, k));
            if (!blocks[k]) return ROCQ_E_MEMORY;
            if (l->touch) touch_pages(blocks[k], size_of(l, k));
        }
        for (int k = 0; k < LIVE; k++) free(blocks[order(k)]);
    }
    return ROCQ_OK;
}

static rocq_result malloc_loop(void *user) {
    const loop *l = (const loop *)user;
    for (int i = 0; i < INNER; i++) {
        void *volatile block = malloc((size_t)l->size); // volatile: or the pair is optimised away
        if (!block) return ROCQ_E_MEMORY;
        if (l->touch) touch_pages(block, l->size);
        free(block);
    }
    return ROCQ_OK;
}

static rocq_result runtime_loop(void *user) {
    const loop *l = (const loop *)user;
    const rocq_hip *hip = l->b->ctx->gpu->hip;
    for (int i = 0; i < INNER; i++) {
        void *block = NULL;
        if (l->pinned ? hip->host_alloc(&block, (size_t)l->size, 0)
                      : hip->mem_alloc(&block, (size_t)l->size)) {
            return ROCQ_E_DEVICE;
        }
        if (l->pinned ? hip->host_free(block) : hip->mem_free(block)) return ROCQ_E_DEVICE;
    }
    return ROCQ_OK;
}

// -- the trace --

static volatile double clock_sink;

typedef struct event {
    int32_t number; // of the buffer
    int64_t size;   // 0 = it is freed
} event;

typedef struct trace {
    bench *b;
    event *events; // [n], an array of stb_ds's
    int64_t n, n_requests, warm, n_warm; // warm: first event of the last quarter of the steps
    int32_t n_numbers;
    int64_t peak, peak_at; // bytes asked for at once, and the event after which
    rocq_pool *pool;
    rocq_buffer *buffers;
    bool touch;
} trace;

static bool read_trace(trace *t, int steps) {
    char line[100];
    snprintf(line, sizeof line, "python3 bench/training_trace --steps %d 2>/dev/null", steps);
    FILE *file = popen(line, "r");
    int64_t live = 0, *sizes = NULL; // sizes: an array of stb_ds's, by number
    int step = 0;
    while (file && fgets(line, sizeof line, file)) {
        long long number = 0, size = 0;
        if (line[0] == 's' && step++ == steps * 3 / 4) t->warm = t->n, t->n_warm = t->n_requests;
        if (sscanf(line, "a %lld %lld", &number, &size) != 2 &&
            sscanf(line, "f %lld", &number) != 1) {
            continue;
        }
        const event e = {(int32_t)number, size};
        arrput(t->events, e);
        t->n++;
        if (number >= arrlen(sizes)) arrsetlen(sizes, number + 1);
        live += size > 0 ? size : -sizes[number];
        if (size > 0) sizes[number] = size, t->n_requests++;
        if (live > t->peak) t->peak = live, t->peak_at = t->n;
    }
    t->n_numbers = (int32_t)arrlen(sizes);
    arrfree(sizes);
    const bool whole = file && pclose(file) == 0 && t->n > 0;
    if (whole) t->buffers = (rocq_buffer *)bench_alloc(t->n_numbers * (int64_t)sizeof(rocq_buffer));
    return whole;
}

static rocq_result replay_pool(trace *t, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
        const event *e = &t->events[i];
        rocq_buffer *block = &t->buffers[e->number];
        const rocq_result result = e->size > 0 ? rocq_pool_alloc(t->pool, block, e->size)
                                               : rocq_pool_free(t->pool, block);
        if (result != ROCQ_OK) return result;
        if (t->touch && e->size > 0) touch_pages(block->host, e->size);
    }
    return ROCQ_OK;
}

static rocq_result trace_pool(void *user) {
    trace *t = (trace *)user;
    return replay_pool(t, t->warm, t->n);
}

static rocq_result trace_malloc(void *user) {
    trace *t = (trace *)user;
    for (int64_t i = t->warm; i < t->n; i++) {
        const event *e = &t->events[i];
        void **block = &t->buffers[e->number].host;
        if (e->size == 0) {
            free(*block);
            *block = NULL;
            continue;
        }
        *block = malloc((size_t)e->size);
        if (!*block) return ROCQ_E_MEMORY;
        if (t->touch) touch_pages(*block, e->size);
    }
    return ROCQ_OK;
}

static rocq_result trace_runtime(void *user) {
    trace *t = (trace *)user;
    const rocq_hip *hip = t->b->ctx->gpu->hip;
    for (int64_t i = t->warm; i < t->n; i++) {
        const event *e = &t->events[i];
        void **block = &t->buffers[e->number].host;
        if (e->size > 0 ? hip->mem_alloc(block, (size_t)e->size) : hip->mem_free(*block)) {
            return ROCQ_E_DEVICE;
        }
        if (e->size == 0) *block = NULL;
    }
    return ROCQ_OK;
}

// -- cases --

// The pool's row, and the row of what it is compared with: x how many times the pool's time.
static void compare(bench *b, const char *name, const char *peer, rocq_result (*run)(void *),
                    rocq_result (*peer_run)(void *), void *user, int64_t inner) {
    char names[2][100];
    snprintf(names[0], sizeof names[0], "pool/%s", name);
    snprintf(names[1], sizeof names[1], "pool/%s/%s", name, peer);
    const bench_case cases[2] = {{.name = names[0], .run = run, .user = user, .inner = inner},
                                 {.name = names[1], .run = peer_run, .user = user, .inner = inner}};
    bench_run_pair(b, cases, 2);
}

static void size_name(char out[32], int64_t size) {
    if (size < 1 << 20) snprintf(out, 32, "%lldKiB", (long long)(size >> 10));
    else snprintf(out, 32, "%lldMiB", (long long)(size >> 20));
}

static void times_faster(bench *b, const char *name, double ratio) {
    char line[320];
    snprintf(line, sizeof line, "%s/times_faster", name);
    bench_value(b, line, ratio, "x: malloc_free over it", true);
}

// A request by itself, and with its return, against malloc and free of the same size.
static void host_size(bench *b, rocq_pool *pool, int64_t size) {
    static requests r;
    static const char *const kinds[] = {"request", "alloc_free", "malloc_free"};
    char sized[32], names[3][100];
    loop l = {b, pool, size, false, false};
    memset(&r, 0, sizeof r);
    r.pool = pool;
    r.size = size;
    r.n = (int)((int64_t)REQUESTS * size < 4LL << 30 ? REQUESTS : (4LL << 30) / size);
    size_name(sized, size);
    for (int k = 0; k < 3; k++) snprintf(names[k], sizeof names[k], "pool/%s/%s", sized, kinds[k]);
    const bench_case cases[3] = {
        {.name = names[0], .run = pool_requests, .reset = give_back, .user = &r, .inner = r.n},
        {.name = names[1], .run = pool_loop, .user = &l, .inner = INNER},
        {.name = names[2], .run = malloc_loop, .user = &l, .inner = INNER}};
    const bench_result *results = bench_run_pair(b, cases, 3);
    for (int k = 0; results && k < 2; k++) {
        times_faster(b, names[k], results[2].summary.median / results[k].summary.median);
        results = b->results + arrlen(b->results) - 3;
    }
    give_back(&r);
}

static rocq_pool *open_pool(bench *b, const rocq_pool_desc *desc) {
    rocq_pool *pool;
    if (rocq_pool_create(b->ctx, &pool, desc) != ROCQ_OK) bench_fail(b, "pool", rocq_error(b->ctx));
    return pool;
}

static void host_sizes(bench *b) {
    const rocq_pool_desc desc = {.memory = ROCQ_MEMORY_HOST},
                         shared = {.memory = ROCQ_MEMORY_HOST, .thread_safe = true};
    rocq_pool *pool = open_pool(b, &desc), *safe = open_pool(b, &shared);
    const struct {
        const char *name;
        bool touch, safe;
    } kinds[] = {{"/live16", false, false},
                 {"/live16/touched", true, false},
                 {"/live16/thread_safe", false, true}};
    const int64_t most = b->tiny ? 64 << 10 : 64 << 20;
    for (int64_t size = 64 << 10; pool && size <= most; size *= 4) host_size(b, pool, size);
    for (size_t i = 0; pool && safe && i < sizeof kinds / sizeof kinds[0]; i++) {
        malloc_trim(0); // what traces and other sizes have left
        for (int64_t size = 64 << 10; size <= most; size *= 4) {
            char sized[32], name[80];
            loop l = {b, kinds[i].safe ? safe : pool, size, kinds[i].touch, false};
            size_name(sized, size);
            snprintf(name, sizeof name, "%s%s", sized, kinds[i].name);
            compare(b, name, "malloc", pool_live, malloc_live, &l, INNER);
        }
        rocq_pool_trim(pool, 0);
        rocq_pool_trim(safe, 0);
    }
    rocq_pool_destroy(&pool);
    rocq_pool_destroy(&safe);
}

static void device_sizes(bench *b) {
    for (int pinned = 0; pinned < 2; pinned++) {
        const rocq_pool_desc desc = {.memory = pinned ? ROCQ_MEMORY_PINNED : ROCQ_MEMORY_DEVICE};
        rocq_pool *pool = open_pool(b, &desc);
        for (int64_t size = 64 << 10; pool && size <= (b->tiny ? 64 << 10 : 64 << 20); size *= 4) {
            char sized[32], name[80];
            size_name(sized, size);
            loop l = {b, pool, size, false, pinned != 0};
            snprintf(name, sizeof name, "%s/%s", pinned ? "pinned" : "device", sized);
            compare(b, name, "runtime", pool_loop, runtime_loop, &l, INNER);
        }
        rocq_pool_destroy(&pool);
    }
}

// Hit rate and fragmentation over the last quarter of the steps, within some memory: as much as the
// pool likes, or so many times what the trace needs at once.
static void trace_figures(bench *b, trace *t, rocq_memory memory, double budget, bool exact) {
    const rocq_pool_desc desc = {.memory = memory, .budget = (int64_t)(budget * (double)t->peak),
                                 .exact = exact};
    rocq_pool_stats warm, peak, end;
    char name[100], within[40] = "";
    if (budget > 0) snprintf(within, sizeof within, "/budget_%.2fx", budget);
    if (exact) strcat(within, "/exact");
    t->pool = open_pool(b, &desc);
    t->touch = false;
    // Through once as recorded, then up to the moment of most memory, for the state it is in there.
    bool fine = t->pool && replay_pool(t, 0, t->warm) == ROCQ_OK &&
                rocq_pool_get_stats(t->pool, -1, &warm) == ROCQ_OK &&
                replay_pool(t, t->warm, t->n) == ROCQ_OK &&
                rocq_pool_get_stats(t->pool, -1, &end) == ROCQ_OK &&
                replay_pool(t, 0, t->peak_at) == ROCQ_OK &&
                rocq_pool_get_stats(t->pool, -1, &peak) == ROCQ_OK &&
                replay_pool(t, t->peak_at, t->n) == ROCQ_OK;
    if (!fine) {
        snprintf(name, sizeof name, "pool/trace%s", within);
        bench_fail(b, name, rocq_error(b->ctx));
        return;
    }
    const double n = (double)(end.n_requests - warm.n_requests);
    const struct {
        const char *name;
        double value;
        const char *unit;
        bool verified;
    } figures[] = {
        {"hit_rate", (double)(end.n_hits - warm.n_hits) / n, "of requests",
         budget > 0 || (double)(end.n_hits - warm.n_hits) / n >= 0.95},
        {"internal", peak.internal, "of blocks, at the peak", !exact || peak.internal <= 0.125},
        {"external", peak.external, "of reserved, at the peak", true},
        {"asked_peak", (double)peak.peak_bytes, "bytes", peak.peak_bytes == t->peak},
        {"reserved_peak", (double)end.reserved_peak, "bytes",
         budget <= 0 || end.reserved_peak <= desc.budget}};
    for (size_t i = 0; i < sizeof figures / sizeof figures[0]; i++) {
        snprintf(name, sizeof name, "pool/trace%s/%s", within, figures[i].name);
        bench_value(b, name, figures[i].value, figures[i].unit, figures[i].verified);
    }
    rocq_pool_destroy(&t->pool);
}

enum { CLASSES = 64, ROUNDS = 9 };

typedef struct class_cost {
    int64_t size, n;    // of its blocks; requests
    double sums[2][2];  // ns: of malloc and free, of the pool's calls
} class_cost;

static int64_t class_size(rocq_pool *pool, int64_t size) {
    rocq_pool_stats stats;
    for (int32_t c = 0; rocq_pool_get_stats(pool, c, &stats) == ROCQ_OK; c++) {
        if (stats.block_size >= size) return stats.block_size;
    }
    return 0;
}

// Once through the steps of the last quarter, every call between two reads of the clock.
static rocq_result time_calls(trace *t, bool pool, int round, double (*ns)[ROUNDS]) {
    rocq_result result = ROCQ_OK;
    for (int64_t i = t->warm; i < t->n && result == ROCQ_OK; i++) {
        const event *e = &t->events[i];
        rocq_buffer *block = &t->buffers[e->number];
        const double start = bench__now();
        if (pool && e->size > 0) result = rocq_pool_alloc(t->pool, block, e->size);
        else if (pool) result = rocq_pool_free(t->pool, block);
        else if (e->size > 0) block->host = malloc((size_t)e->size);
        else free(block->host);
        ns[i - t->warm][round] = bench__now() - start;
    }
    return result;
}

static double median_of(double samples[ROUNDS]) {
    rocq_summary summary;
    rocq_summarize(&summary, samples, ROUNDS);
    return summary.median;
}

// By class: the median of each call over the rounds, less what reading the clock takes, summed.
static int32_t sum_classes(trace *t, double (*ns[2])[ROUNDS], class_cost costs[CLASSES]) {
    int32_t n = 0, *class_of = (int32_t *)bench_alloc(t->n_numbers * (int64_t)sizeof *class_of);
    double clock[ROUNDS];
    for (int k = 0; k < ROUNDS; k++) {
        const double start = bench__now();
        for (int i = 0; i < 1000; i++) clock_sink = bench__now();
        clock[k] = (bench__now() - start) / 1001;
    }
    const double read = median_of(clock);
    for (int64_t i = 0; i < t->n; i++) {
        const event *e = &t->events[i];
        const int64_t size = e->size > 0 ? class_size(t->pool, e->size) : 0;
        int32_t c = e->size > 0 ? 0 : class_of[e->number];
        while (e->size > 0 && c < n && costs[c].size != size) c++;
        if (c == CLASSES) bench__die("the trace has too many classes");
        if (c == n) costs[n++].size = size;
        class_of[e->number] = c;
        if (i < t->warm) continue;
        costs[c].n += e->size > 0;
        for (int k = 0; k < 2; k++) {
            costs[c].sums[k][e->size == 0] += median_of(ns[k][i - t->warm]) - read;
        }
    }
    free(class_of);
    return n;
}

static void trace_classes(trace *t) {
    static class_cost costs[CLASSES];
    double (*ns[2])[ROUNDS], least[2] = {INFINITY, INFINITY};
    bench *b = t->b;
    if (!bench_wants(b, "pool/trace/")) return;
    for (int k = 0; k < 2; k++) {
        ns[k] = (double(*)[ROUNDS])bench_alloc((t->n - t->warm) * (int64_t)sizeof *ns[k]);
    }
    for (int i = 0; i < 2 * ROUNDS; i++) { // in turn
        const bool pool = i % 4 == 1 || i % 4 == 2;
        if (time_calls(t, pool, i / 2, ns[pool])) bench__die(rocq_error(b->ctx));
    }
    const int32_t n = sum_classes(t, ns, costs);
    for (int64_t size = 64 << 10;;) { // rising
        const class_cost *c = NULL;
        for (int32_t k = 0; k < n; k++) {
            if (costs[k].size < size || costs[k].n == 0) continue;
            if (!c || costs[k].size < c->size) c = &costs[k];
        }
        if (!c) break;
        const double calls = (double)c->n, malloc_free = (c->sums[0][0] + c->sums[0][1]) / calls;
        const double ours[2] = {c->sums[1][0] / calls, (c->sums[1][0] + c->sums[1][1]) / calls};
        char name[100];
        for (int k = 0; k < 2; k++) {
            snprintf(name, sizeof name, "pool/trace/%lldKiB/%s", (long long)(c->size >> 10),
                     k ? "alloc_free" : "request");
            bench_value(b, name, ours[k], "ns", true);
            times_faster(b, name, malloc_free / ours[k]);
            least[k] = fmin(least[k], malloc_free / ours[k]);
        }
        size = c->size + 1;
    }
    bench_value(b, "pool/trace/least/request/times_faster", least[0], "x: of its class", true);
    bench_value(b, "pool/trace/least/alloc_free/times_faster", least[1], "x: of its class", true);
    free(ns[0]);
    free(ns[1]);
}

static void traces(bench *b) {
    trace t;
    memset(&t, 0, sizeof t);
    t.b = b;
    if (!read_trace(&t, b->tiny ? 8 : 64)) {
        bench_skip(b, "pool/trace",
                   "python3 bench/training_trace, from the top level, gave nothing");
        return;
    }
    const rocq_memory memory = b->gpu ? ROCQ_MEMORY_DEVICE : ROCQ_MEMORY_HOST;
    const struct {
        double budget;
        bool exact;
    } figures[] = {{0, false}, {0, true}, {2, false}, {1.5, false}, {1.5, true}, {1.25, true}};
    bench_value(b, "pool/trace/requests", (double)t.n_requests / (b->tiny ? 8 : 64), "a step",
                true);
    for (int i = 0; i < (b->tiny ? 2 : 6); i++) {
        trace_figures(b, &t, memory, figures[i].budget, figures[i].exact);
    }

    const rocq_pool_desc desc = {.memory = memory};
    const int64_t n = t.n_requests - t.n_warm;
    t.pool = open_pool(b, &desc);
    if (b->gpu) {
        compare(b, "device/trace", "runtime", trace_pool, trace_runtime, &t, n);
    } else {
        compare(b, "trace", "malloc", trace_pool, trace_malloc, &t, n);
        trace_classes(&t);
        t.touch = true;
        compare(b, "trace/touched", "malloc", trace_pool, trace_malloc, &t, n);
    }
    rocq_pool_destroy(&t.pool);
    arrfree(t.events);
    free(t.buffers);
}

// -- arena --

static rocq_result arena_loop(void *user) {
    rocq_arena *arena = (rocq_arena *)user;
    rocq_buffer piece;
    const int64_t mark = rocq_arena_mark(arena);
    for (int i = 0; i < INNER; i++) {
        const rocq_result result = rocq_arena_alloc(arena, &piece, 10000, 0);
        if (result != ROCQ_OK) return result;
    }
    rocq_arena_reset(arena, mark);
    return ROCQ_OK;
}

static void arenas(bench *b) {
    rocq_arena arena;
    rocq_buffer buffer;
    const bench_case c = {.name = "arena/fixed/10KB", .run = arena_loop, .user = &arena,
                          .inner = INNER};
    if (rocq_buffer_alloc(b->ctx, &buffer, 2 << 20) == ROCQ_OK) {
        rocq_arena_init(&arena, &buffer);
        bench_run(b, &c);
        rocq_buffer_free(b->ctx, &buffer);
    }
}

int main(int argc, char **argv) {
    bench b;
    if (!bench_open(&b, argc, argv, "memory")) return 1;
    arenas(&b);
    traces(&b);
    if (b.gpu) device_sizes(&b);
    else host_sizes(&b);
    return bench_close(&b);
}
