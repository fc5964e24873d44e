// matmul.c - products of quantized weights: every format, columns from 1 (decode) to 4096 (prompt),
// the sizes that ROCmForge published, and ggml beside.
//
// Weights take turns from as many copies as no cache holds. On a GPU a run is a recorded graph that
// goes through all copies once, as the steps of a model do, so that launching is not what is
// measured.

#include "bench.h"
#include "ggml.h"

typedef struct product {
    bench *b;
    rocq_format format;
    int64_t m, n, k, w_bytes, n_copies, turn;
    void *w;                 // one copy, as in a file
    float *x, *y;
    rocq_buffer memory;      // of the copies, x and y
    rocq_tensor *copies, dx, dy;
    rocq_graph *graph;       // GPU
    ggml_job job;
} product;

static rocq_result run(void *user) {
    product *p = (product *)user;
    if (p->graph) return rocq_graph_launch(p->b->ctx, p->graph);
    const rocq_matmul_params params = {.y = &p->dy, .w = &p->copies[p->turn], .x = &p->dx};
    p->turn = (p->turn + 1) % p->n_copies;
    return rocq_matmul(p->b->ctx, &params);
}

// 200 outputs of p->y against sums in float64 over the decoded weights. The bound is that of INT8,
// the loosest an operand has; AUTO decides which it is.
static bool close_enough(product *p) {
    float *row = (float *)bench_alloc(p->k * (int64_t)sizeof *row);
    double error = 0, power = 0;
    uint64_t state = 7;
    for (int i = 0; i < 200; i++) {
        const int64_t m = (int64_t)(bench_random(&state) % (uint64_t)p->m);
        const int64_t n = (int64_t)(bench_random(&state) % (uint64_t)p->n);
        double sum = 0;
        rocq_dequantize(p->format, row, (char *)p->w + p->w_bytes / p->m * m, p->k);
        for (int64_t k = 0; k < p->k; k++) sum += (double)row[k] * p->x[n * p->k + k];
        const double off = p->y[n * p->m + m] - sum;
        error += off * off;
        power += sum * sum;
    }
    free(row);
    return error <= 5e-4 * power;
}

static bool verify(void *user) {
    product *p = (product *)user;
    memset(p->y, 0xff, (size_t)(p->m * p->n) * sizeof *p->y);
    return rocq_download(p->b->ctx, p->y, &p->dy, rocq_tensor_size(&p->dy)) == ROCQ_OK &&
        close_enough(p);
}

static rocq_result peer_run(void *user) { return ggml_job_run(&((product *)user)->job); }

static bool peer_verify(void *user) {
    product *p = (product *)user;
    ggml.ggml_backend_tensor_get(p->job.results[p->job.turn], p->y, 0,
                                 (size_t)(p->m * p->n) * sizeof *p->y);
    return close_enough(p);
}

// The data of a case. Rows repeat after 64, which no kernel notices and encoding takes long for.
static rocq_result make(product *p) {
    const int64_t some = p->m < 64 ? p->m : 64;
    rocq_ctx *ctx = p->b->ctx;
    rocq_result result;
    int64_t row;
    uint64_t state = 1;
    if ((result = rocq_row_size(p->format, p->k, &row)) != ROCQ_OK) return result;
    float *rows = (float *)bench_alloc(some * p->k * (int64_t)sizeof *rows);
    for (int64_t i = 0; i < some * p->k; i++) rows[i] = 0.02f * bench_normal(&state);
    p->w_bytes = row * p->m;
    p->w = bench_alloc(p->w_bytes);
    result = bench_encode(p->format, p->w, rows, some, p->k);
    for (int64_t m = some; m < p->m; m++)
        memcpy((char *)p->w + m * row, (char *)p->w + m % some * row, (size_t)row);
    free(rows);
    p->x = (float *)bench_alloc(p->k * p->n * (int64_t)sizeof *p->x);
    p->y = (float *)bench_alloc(p->m * p->n * (int64_t)sizeof *p->y);
    for (int64_t i = 0; i < p->k * p->n; i++) p->x[i] = bench_normal(&state);

    // Where arithmetic is what limits, a few copies do.
    p->n_copies = bench_copies(p->b, p->w_bytes);
    if (p->n >= 64 && p->n_copies > 4) p->n_copies = 4;
    p->copies = (rocq_tensor *)bench_alloc(p->n_copies * (int64_t)sizeof *p->copies);
    rocq_arena arena;
    for (int pass = 0; pass < 2 && result == ROCQ_OK; pass++) { // measured, then cut
        if (pass == 1) result = rocq_buffer_alloc(ctx, &p->memory, arena.peak);
        rocq_arena_init(&arena, pass == 1 ? &p->memory : NULL);
        for (int64_t i = 0; i < p->n_copies && result == ROCQ_OK; i++)
            result = rocq_tensor_2d(&arena, &p->copies[i], p->format, p->k, p->m);
        if (result == ROCQ_OK) result = rocq_tensor_2d(&arena, &p->dx, ROCQ_F32, p->k, p->n);
        if (result == ROCQ_OK) result = rocq_tensor_2d(&arena, &p->dy, ROCQ_F32, p->m, p->n);
    }
    for (int64_t i = 0; i < p->n_copies && result == ROCQ_OK; i++) {
        if (p->b->gpu && rocq_get_format_info(p->format)->block_elems > 1)
            p->copies[i].layout = ROCQ_LAYOUT_PLANAR;
        result = rocq_upload(ctx, &p->copies[i], p->w, p->w_bytes);
    }
    if (result == ROCQ_OK) result = rocq_upload(ctx, &p->dx, p->x, rocq_tensor_size(&p->dx));
    if (result != ROCQ_OK || !p->b->gpu) return result;
    result = rocq_graph_begin(ctx);
    for (int64_t i = 0; i < p->n_copies && result == ROCQ_OK; i++) {
        const rocq_matmul_params params = {.y = &p->dy, .w = &p->copies[i], .x = &p->dx};
        result = rocq_matmul(ctx, &params);
    }
    const rocq_result end = rocq_graph_end(ctx, &p->graph);
    return result == ROCQ_OK ? end : result;
}

static void drop(product *p) {
    rocq_graph_destroy(p->b->ctx, &p->graph);
    rocq_buffer_free(p->b->ctx, &p->memory);
    free(p->copies);
    free(p->w);
    free(p->x);
    free(p->y);
}

static void measure(bench *b, rocq_format format, int64_t m, int64_t k, int64_t n) {
    char name[96], peer_name[112];
    product p = {.b = b, .format = format, .m = m, .n = n, .k = k};
    snprintf(name, sizeof name, "matmul/%s/%lldx%lld/n%lld", rocq_format_name(format),
             (long long)m, (long long)k, (long long)n);
    snprintf(peer_name, sizeof peer_name, "%s/ggml", name);
    if (!bench_wants(b, name) && !bench_wants(b, peer_name)) return;
    if (make(&p) != ROCQ_OK) {
        bench_fail(b, name, rocq_error(b->ctx));
        drop(&p);
        return;
    }
    const double bytes = (double)p.w_bytes + 4.0 * (double)((m + k) * n);
    const double flops = 2.0 * (double)(m * k) * (double)n;
    const double inner = b->gpu ? (double)p.n_copies : 1;
    const rocq_matmul_params params = {.y = &p.dy, .w = &p.copies[0], .x = &p.dx};
    const bench_unit unit = bench_unit_of(b, ROCQ_OP_MATMUL, &params);
    const bench_case cases[2] = {
        {.name = name, .bytes = bytes * inner, .flops = flops * inner, .run = run, .verify = verify,
         .user = &p, .inner = (int64_t)inner, .unit = unit},
        {.name = peer_name, .bytes = bytes * inner, .flops = flops * inner, .run = peer_run,
         .verify = peer_verify, .user = &p, .inner = (int64_t)inner, .unit = unit, GGML_TURNS},
    };
    const bool known = format < ROCQ_MXFP6_E2M3; // to ggml
    const bool peer = known && ggml_open(b) &&
        ggml_matmul(&p.job, (int)p.n_copies, (int)format, k, m, n, p.w, p.x);
    bench_run_pair(b, cases, peer ? 2 : 1);
    if (peer) ggml_job_end(&p.job);
    drop(&p);
}

int main(int argc, char **argv) {
    bench b;
    if (!bench_open(&b, argc, argv, "matmul")) return 1;
    static const rocq_format all[] = {
#define ROCQ_X(NAME, name, id, elems, bytes) ROCQ_##NAME,
        ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
    };
    static const rocq_format few[] = {ROCQ_F16, ROCQ_Q4_0, ROCQ_Q8_0, ROCQ_Q4_K, ROCQ_Q6_K};
    static const int64_t columns[] = {1, 2, 4, 8, 16, 32, 64, 128, 512};
    const int n_all = (int)(sizeof all / sizeof *all), n_few = (int)(sizeof few / sizeof *few);
    if (b.tiny) {
        for (int f = 0; f < n_all; f++) measure(&b, all[f], 24, 256, 1);
        measure(&b, ROCQ_Q4_K, 40, 512, 19);
        measure(&b, ROCQ_F32, 32, 64, 128);
        ggml_close();
        return bench_close(&b);
    }
    for (int f = 0; f < n_all; f++) measure(&b, all[f], 4096, 4096, 1);
    for (int f = 0; f < n_all; f++) measure(&b, all[f], 4096, 4096, 512);
    for (int f = 0; f < n_few; f++) {
        for (int c = 0; c < (int)(sizeof columns / sizeof *columns); c++)
            measure(&b, few[f], 14336, 4096, columns[c]);
        measure(&b, few[f], 4096, 14336, 1);
    }
    // ROCmForge's: dense squares, a small batch, and its quantized sizes that are not above
    for (int64_t n = 512; n <= 4096; n *= 2) measure(&b, ROCQ_F32, n, n, n);
    measure(&b, ROCQ_F32, 128, 4096, 32);
    measure(&b, ROCQ_Q4_0, 4096, 4096, 32);
    measure(&b, ROCQ_Q8_0, 4096, 4096, 32);
    ggml_close();
    return bench_close(&b);
}
