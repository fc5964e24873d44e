// What rocq_tune is worth: shapes of 1B to 13B models, tuned on the GPU, then measured tuned
// against untuned, in turn. Weights and caches are read from memory, not from the GPU's cache, as
// in a model.
//
//     gcc -O2 -I. bench/tuning.c kernels.o -o tuning ...      see bench.h; --device gpu
//
// Values at the end: of the speed-up over all shapes the geometric mean, minimum and maximum;
// configurations tried; time spent. Where the tuner leaves the default, the launches are the same
// ones, and the speed-up is 1 without a measurement.
#include "bench.h"

typedef struct shape {
    const char *name; // kind/format/what
    rocq_format format;
    int32_t m, k, n;  // attention: head size, heads, KV heads
    int32_t n_kv, n_q; // attention
} shape;

static const shape shapes[] = {
    {"matvec/Q4_K/2048x2048/n1", ROCQ_Q4_K, 2048, 2048, 1, 0, 0},        // 1B
    {"matvec/Q4_K/256x2048/n1", ROCQ_Q4_K, 256, 2048, 1, 0, 0},
    {"matvec/Q4_K/5632x2048/n1", ROCQ_Q4_K, 5632, 2048, 1, 0, 0},
    {"matvec/Q6_K/2048x5632/n1", ROCQ_Q6_K, 2048, 5632, 1, 0, 0},
    {"matvec/Q6_K/32000x2048/n1", ROCQ_Q6_K, 32000, 2048, 1, 0, 0},
    {"matvec/Q4_0/4096x4096/n1", ROCQ_Q4_0, 4096, 4096, 1, 0, 0},        // 7B
    {"matvec/Q8_0/4096x4096/n1", ROCQ_Q8_0, 4096, 4096, 1, 0, 0},
    {"matvec/Q4_K/4096x4096/n1", ROCQ_Q4_K, 4096, 4096, 1, 0, 0},
    {"matvec/Q4_0/11008x4096/n1", ROCQ_Q4_0, 11008, 4096, 1, 0, 0},
    {"matvec/Q6_K/4096x11008/n1", ROCQ_Q6_K, 4096, 11008, 1, 0, 0},
    {"matvec/Q4_K/1024x4096/n1", ROCQ_Q4_K, 1024, 4096, 1, 0, 0},        // 8B
    {"matvec/Q4_K/14336x4096/n1", ROCQ_Q4_K, 14336, 4096, 1, 0, 0},
    {"matvec/Q4_K/4096x14336/n1", ROCQ_Q4_K, 4096, 14336, 1, 0, 0},
    {"matvec/Q6_K/128256x4096/n1", ROCQ_Q6_K, 128256, 4096, 1, 0, 0},
    {"matvec/Q5_K/5120x5120/n1", ROCQ_Q5_K, 5120, 5120, 1, 0, 0},        // 13B
    {"matvec/Q4_K/13824x5120/n1", ROCQ_Q4_K, 13824, 5120, 1, 0, 0},
    {"matvec/Q6_K/5120x13824/n1", ROCQ_Q6_K, 5120, 13824, 1, 0, 0},
    {"matvec/F16/4096x4096/n1", ROCQ_F16, 4096, 4096, 1, 0, 0},
    {"matvec/Q4_K/4096x4096/n2", ROCQ_Q4_K, 4096, 4096, 2, 0, 0},
    {"matvec/Q4_K/4096x4096/n4", ROCQ_Q4_K, 4096, 4096, 4, 0, 0},
    {"matvec/Q4_K/4096x4096/n8", ROCQ_Q4_K, 4096, 4096, 8, 0, 0},
    {"matvec/Q4_K/4096x14336/n4", ROCQ_Q4_K, 4096, 14336, 4, 0, 0},
    {"matvec/Q4_K/4096x14336/n8", ROCQ_Q4_K, 4096, 14336, 8, 0, 0},
    {"matmul/Q4_K/4096x4096/n16", ROCQ_Q4_K, 4096, 4096, 16, 0, 0},
    {"matmul/Q4_K/4096x4096/n64", ROCQ_Q4_K, 4096, 4096, 64, 0, 0},
    {"matmul/Q4_K/4096x4096/n128", ROCQ_Q4_K, 4096, 4096, 128, 0, 0},
    {"matmul/Q4_K/4096x4096/n256", ROCQ_Q4_K, 4096, 4096, 256, 0, 0},
    {"matmul/Q4_K/4096x4096/n512", ROCQ_Q4_K, 4096, 4096, 512, 0, 0},
    {"matmul/Q4_K/4096x4096/n2048", ROCQ_Q4_K, 4096, 4096, 2048, 0, 0},
    {"matmul/Q4_K/14336x4096/n64", ROCQ_Q4_K, 14336, 4096, 64, 0, 0},
    {"matmul/Q4_K/14336x4096/n160", ROCQ_Q4_K, 14336, 4096, 160, 0, 0},
    {"matmul/Q6_K/4096x14336/n512", ROCQ_Q6_K, 4096, 14336, 512, 0, 0},
    {"matmul/Q4_K/1024x4096/n512", ROCQ_Q4_K, 1024, 4096, 512, 0, 0},
    {"matmul/Q4_K/2048x5632/n128", ROCQ_Q4_K, 2048, 5632, 128, 0, 0},
    {"matmul/Q8_0/5120x5120/n320", ROCQ_Q8_0, 5120, 5120, 320, 0, 0},
    {"matmul/F16/4096x4096/n128", ROCQ_F16, 4096, 4096, 128, 0, 0},
    {"attention/F16/d64h32kv4/kv1024/q1", ROCQ_F16, 64, 32, 4, 1024, 1},  // 1B
    {"attention/F16/d64h32kv4/kv8192/q1", ROCQ_F16, 64, 32, 4, 8192, 1},
    {"attention/F16/d128h32kv32/kv128/q1", ROCQ_F16, 128, 32, 32, 128, 1}, // 7B
    {"attention/F16/d128h32kv32/kv4096/q1", ROCQ_F16, 128, 32, 32, 4096, 1},
    {"attention/F16/d128h32kv8/kv128/q1", ROCQ_F16, 128, 32, 8, 128, 1},  // 8B
    {"attention/F16/d128h32kv8/kv1024/q1", ROCQ_F16, 128, 32, 8, 1024, 1},
    {"attention/F16/d128h32kv8/kv4096/q1", ROCQ_F16, 128, 32, 8, 4096, 1},
    {"attention/F16/d128h32kv8/kv32768/q1", ROCQ_F16, 128, 32, 8, 32768, 1},
    {"attention/Q8_0/d128h32kv8/kv4096/q1", ROCQ_Q8_0, 128, 32, 8, 4096, 1},
    {"attention/F16/d128h32kv8/kv4096/q4", ROCQ_F16, 128, 32, 8, 4096, 4},
    {"attention/F16/d128h32kv8/kv4096/q8", ROCQ_F16, 128, 32, 8, 4096, 8},
    {"attention/F16/d128h32kv8/kv512/q512", ROCQ_F16, 128, 32, 8, 512, 512},
    {"attention/F16/d128h32kv8/kv4096/q512", ROCQ_F16, 128, 32, 8, 4096, 512},
    {"attention/F16/d128h40kv40/kv2048/q1", ROCQ_F16, 128, 40, 40, 2048, 1}, // 13B
    {"attention/F16/d256h16kv8/kv4096/q1", ROCQ_F16, 256, 16, 8, 4096, 1},
    {"attention/F16/d256h16kv8/kv1024/q128", ROCQ_F16, 256, 16, 8, 1024, 128},
};

enum { COPIES = 64 }; // rocq_tune_graph takes up to 64 ops of a class in turn

// An op on as many copies of its large operands as do not fit a cache.
typedef struct work {
    bench *b;
    shape s;
    rocq_op op;
    int64_t n; // copies
    rocq_tensor w[COPIES], v[COPIES], x, y; // attention: k, v, q, out
    rocq_graph *graph; // of an op on each copy
    struct work *untuned;
    float *out;
} work;

static void check(const char *what, rocq_ctx *ctx, rocq_result result) {
    if (result == ROCQ_OK) return;
    fprintf(stderr, "tuning: %s: %s\n", what, rocq_error(ctx));
    exit(1);
}

// On the device, with random rows that repeat; *blocks keeps them for the next of the same shape.
static rocq_tensor random_tensor(bench *b, rocq_format format, int64_t ne0, int64_t ne1,
                                 int64_t ne2, bool planar, const void **blocks) {
    const int64_t ne[3] = {ne0, ne1, ne2}, rows = ne1 * ne2, some = rows < 32 ? rows : 32;
    int64_t row;
    rocq_buffer buffer;
    rocq_tensor t;
    rocq_row_size(format, ne0, &row);
    if (!*blocks) {
        uint64_t state = 7;
        char *all = (char *)bench_alloc(row * rows);
        float *values = (float *)bench_alloc(some * ne0 * 4);
        for (int64_t i = 0; i < some * ne0; i++) values[i] = bench_normal(&state);
        check("quantize", b->ctx, rocq_quantize(format, all, values, some, ne0, NULL));
        for (int64_t r = some; r < rows; r++) {
            memcpy(all + r * row, all + (r * 7 + r / some) % some * row, (size_t)row);
        }
        free(values);
        *blocks = all;
    }
    check("buffer", b->ctx, rocq_buffer_alloc(b->ctx, &buffer, row * rows));
    rocq_tensor_init(&t, &buffer, 0, format, 3, ne);
    if (planar && rocq_get_format_info(format)->block_elems > 1) t.layout = ROCQ_LAYOUT_PLANAR;
    check("upload", b->ctx, rocq_upload(b->ctx, &t, *blocks, row * rows));
    return t;
}

static rocq_result submit(work *w) {
    for (int64_t i = 0; i < w->n; i++) {
        const rocq_matmul_params product = {.y = &w->y, .w = &w->w[i], .x = &w->x};
        const rocq_attention_params attend = {.out = &w->y, .q = &w->x, .k = &w->w[i],
                                              .v = &w->v[i], .causal = true};
        const rocq_result r = w->op == ROCQ_OP_MATMUL ? rocq_matmul(w->b->ctx, &product)
                                                      : rocq_attention(w->b->ctx, &attend);
        if (r != ROCQ_OK) return r;
    }
    return ROCQ_OK;
}

static void record(work *w) {
    check("record", w->b->ctx, rocq_graph_begin(w->b->ctx));
    check(w->s.name, w->b->ctx, submit(w));
    check("record", w->b->ctx, rocq_graph_end(w->b->ctx, &w->graph));
}

static rocq_result launch(void *user) {
    work *w = (work *)user;
    return rocq_graph_launch(w->b->ctx, w->graph);
}

static void run_once(work *w, float *out) {
    const int64_t n = rocq_tensor_count(&w->y);
    for (int64_t i = 0; i < n; i++) out[i] = NAN;
    check("upload", w->b->ctx, rocq_upload(w->b->ctx, &w->y, out, 4 * n));
    check("launch", w->b->ctx, launch(w));
    check("sync", w->b->ctx, rocq_sync(w->b->ctx));
    check("download", w->b->ctx, rocq_download(w->b->ctx, out, &w->y, 4 * n));
}

// The tuned op against the untuned one: the same up to the order of sums, attention's also up to
// the F16 in which a part holds its probabilities.
static bool agrees(void *user) {
    work *w = (work *)user;
    const int64_t n = rocq_tensor_count(&w->y);
    run_once(w->untuned, w->untuned->out);
    run_once(w, w->out);
    return bench_nmse(w->out, w->untuned->out, n) <= (w->op == ROCQ_OP_MATMUL ? 1e-9 : 1e-5);
}

static void make(work *w, bench *b, const shape *s) {
    const void *w_blocks = NULL, *x_blocks = NULL;
    memset(w, 0, sizeof *w);
    w->b = b;
    w->s = *s;
    if (b->tiny) { // the smallest of each kind
        w->s.m = 64;
        w->s.k = s->n_kv > 0 ? 4 : 256;
        w->s.n = s->n_kv > 0 ? 2 : s->n < 32 ? s->n : 32;
        w->s.n_kv = s->n_kv > 0 ? 256 : 0;
        w->s.n_q = s->n_q < 32 ? s->n_q : 32;
    }
    s = &w->s;
    int64_t row;
    if (s->n_kv > 0) {
        rocq_row_size(s->format, s->m, &row);
        w->op = ROCQ_OP_ATTENTION;
        w->n = bench_copies(b, 2 * row * s->n * s->n_kv);
    } else {
        rocq_row_size(s->format, s->k, &row);
        w->op = ROCQ_OP_MATMUL;
        w->n = bench_copies(b, row * s->m);
    }
    if (w->n > COPIES) w->n = COPIES;
    for (int64_t i = 0; i < w->n; i++) {
        if (s->n_kv > 0) {
            w->w[i] = random_tensor(b, s->format, s->m, s->n, s->n_kv, false, &w_blocks);
            w->v[i] = random_tensor(b, s->format, s->m, s->n, s->n_kv, false, &w_blocks);
        } else {
            w->w[i] = random_tensor(b, s->format, s->k, s->m, 1, true, &w_blocks);
        }
    }
    // x as a model has it: in the format that the product wants
    const bool few = s->n <= 8, plain = rocq_get_format_info(s->format)->block_elems == 1;
    const void *y_blocks = NULL;
    if (s->n_kv > 0) {
        w->x = random_tensor(b, ROCQ_F32, s->m, s->k, s->n_q, false, &x_blocks);
        w->y = random_tensor(b, ROCQ_F32, s->m, s->k, s->n_q, false, &y_blocks);
    } else {
        const rocq_format x_format = !few ? ROCQ_F16 : plain ? ROCQ_F32 : ROCQ_Q8_0;
        w->x = random_tensor(b, x_format, s->k, s->n, 1, true, &x_blocks);
        w->y = random_tensor(b, ROCQ_F32, s->m, s->n, 1, false, &y_blocks);
    }
    free((void *)(uintptr_t)w_blocks);
    free((void *)(uintptr_t)x_blocks);
    free((void *)(uintptr_t)y_blocks);
    w->out = (float *)bench_alloc(4 * rocq_tensor_count(&w->y));
}

static void unmake(work *w) {
    rocq_ctx *ctx = w->b->ctx;
    for (int64_t i = 0; i < w->n; i++) {
        check("free", ctx, rocq_buffer_free(ctx, &w->w[i].buffer));
        check("free", ctx, rocq_buffer_free(ctx, &w->v[i].buffer));
    }
    check("free", ctx, rocq_buffer_free(ctx, &w->x.buffer));
    check("free", ctx, rocq_buffer_free(ctx, &w->y.buffer));
    free(w->out);
}

// What all shapes, or those of a kind, come to.
typedef struct tally {
    const char *kind;
    int n, n_default;
    double sum_log, min, max;
} tally;

static void tally_add(tally *t, double speedup, bool is_default) {
    t->min = t->n == 0 || speedup < t->min ? speedup : t->min;
    t->max = t->n == 0 || speedup > t->max ? speedup : t->max;
    t->sum_log += log(speedup);
    t->n++;
    t->n_default += is_default;
}

static void tally_report(bench *b, const tally *t) {
    char name[128];
    const char *const what[] = {"geometric_mean", "min", "max", "shapes", "default_kept"};
    const double mean = exp(t->sum_log / (t->n > 0 ? t->n : 1));
    const double value[] = {mean, t->min, t->max, (double)t->n, (double)t->n_default};
    for (int i = 0; i < 5 && t->n > 0; i++) {
        snprintf(name, sizeof name, "tuning/%s/%s", t->kind, what[i]);
        bench_value(b, name, value[i], i < 3 ? "tuned over untuned" : "shapes", true);
    }
}

int main(int argc, char **argv) {
    bench b;
    tally tallies[4] = {{.kind = "all"}, {.kind = "matvec"}, {.kind = "matmul"},
                        {.kind = "attention"}};
    double found = 0, spent = 0;
    int tried = 0, space = 0;
    if (!bench_open(&b, argc, argv, "tuning")) return 1;
    if (!b.gpu) {
        bench_skip(&b, "tuning/", "there is nothing to tune on the CPU");
        return bench_close(&b);
    }
    if (b.seconds > 1) b.seconds = 1; // there are many shapes
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        char name[128];
        snprintf(name, sizeof name, "tuning/%s", shapes[i].name);
        if (!bench_wants(&b, name)) continue;
        static work untuned, tuned; // large
        rocq_tune_result r;
        make(&tuned, &b, &shapes[i]);
        record(&tuned);
        check("tune", b.ctx, rocq_tune_graph(b.ctx, tuned.graph, NULL, &r));
        found += log(r.speedup);
        spent += r.spent_ms;
        tried += r.n_tried;
        space += r.n_space;
        // Recorded after all scratch memory has been taken, so that neither is captured again.
        rocq_tuning_clear(b.ctx);
        untuned = tuned;
        untuned.out = (float *)bench_alloc(4 * rocq_tensor_count(&tuned.y));
        record(&untuned);
        tuned.untuned = &untuned;

        const rocq_launch_config none = {0, 0, 0};
        const bool is_default = memcmp(&r.config, &none, sizeof none) == 0;
        double speedup = 1;
        if (!is_default) {
            char names[2][160];
            snprintf(names[0], sizeof names[0], "%s/untuned", name);
            snprintf(names[1], sizeof names[1], "%s/k_waves%d,tile_n%d,n_splits%d", name,
                     r.config.k_waves, r.config.tile_n, r.config.n_splits);
            const double s = r.best_ns * 1e-9; // of the whole graph
            const double bytes = r.bytes_per_s * s, flops = r.flops_per_s * s;
            const bench_case pair[2] = {
                {.name = names[0], .bytes = bytes, .flops = flops, .run = launch, .user = &untuned,
                 .inner = tuned.n, .unit = BENCH_F16},
                {.name = names[1], .bytes = bytes, .flops = flops, .run = launch, .verify = agrees,
                 .user = &tuned, .inner = tuned.n, .unit = BENCH_F16}};
            const bench_result *times = bench_run_pair(&b, pair, 2);
            if (times) speedup = times[0].summary.median / times[1].summary.median;
        } else {
            printf("%-52s default kept of %d (%d tried)\n", name, r.n_space, r.n_tried);
        }
        for (int k = 0; k < 4; k++) {
            const size_t length = strlen(tallies[k].kind);
            if (k == 0 || strncmp(shapes[i].name, tallies[k].kind, length) == 0) {
                tally_add(&tallies[k], speedup, is_default);
            }
        }
        free(untuned.out);
        rocq_graph_destroy(b.ctx, &untuned.graph);
        rocq_graph_destroy(b.ctx, &tuned.graph);
        unmake(&tuned);
    }
    const int n = tallies[0].n > 0 ? tallies[0].n : 1;
    for (int k = 0; k < 4; k++) tally_report(&b, &tallies[k]);
    if (tallies[0].n > 0) {
        bench_value(&b, "tuning/tried", tried, "configurations", true);
        bench_value(&b, "tuning/space", space, "configurations", true);
        bench_value(&b, "tuning/spent", spent, "ms", true);
        bench_value(&b, "tuning/found", exp(found / n), "tuned over untuned, as it found", true);
    }
    return bench_close(&b);
}
