// dequant.c - decoding weights to floats: every format, the 4096 x 4096 that ROCmForge published,
// and ggml's decoders beside (as both libraries have them for hosts: on one thread).

#include "bench.h"
#include "ggml.h"

typedef struct weights {
    bench *b;
    rocq_format format;
    int64_t rows, k, bytes, n_copies, turn, last;
    char *blocks;           // n_copies of them
    float *rows_in, *out, *want;
    rocq_buffer memory;     // for the op: copies and output
    rocq_tensor *copies, dy;
    rocq_graph *graph;
    void (*peer)(const void *src, float *dst, int64_t n);
} weights;

static void *next(weights *w) {
    w->last = w->turn;
    w->turn = (w->turn + 1) % w->n_copies;
    return w->blocks + w->last * w->bytes;
}

static rocq_result run_host(void *user) {
    weights *w = (weights *)user;
    return rocq_dequantize(w->format, w->out, next(w), w->rows * w->k);
}

static rocq_result run_peer(void *user) {
    weights *w = (weights *)user;
    w->peer(next(w), w->out, w->rows * w->k);
    return ROCQ_OK;
}

static rocq_result run_op(void *user) {
    weights *w = (weights *)user;
    if (w->graph) return rocq_graph_launch(w->b->ctx, w->graph);
    const rocq_cast_params params = {.y = &w->dy, .x = &w->copies[w->turn]};
    w->turn = (w->turn + 1) % w->n_copies;
    return rocq_cast(w->b->ctx, &params);
}

// The one decoder is right when what it gives is near what was encoded: nearer than Q2_K gets. Of
// a format that is only read nothing was encoded: there ggml's decoder, which must give the same
// bits, is the check. The others must then give its bits.
static bool verify_host(void *user) {
    const weights *w = (const weights *)user;
    return bench_nmse(w->out, w->rows_in, 64 * w->k) < 0.2;
}
static bool same_bits(void *user) {
    const weights *w = (const weights *)user;
    return memcmp(w->out, w->want, (size_t)(w->rows * w->k) * sizeof *w->out) == 0;
}
static bool verify_op(void *user) {
    weights *w = (weights *)user;
    return rocq_download(w->b->ctx, w->out, &w->dy, rocq_tensor_size(&w->dy)) == ROCQ_OK &&
        same_bits(w);
}

static rocq_result make_op(weights *w) {
    rocq_ctx *ctx = w->b->ctx;
    rocq_arena arena;
    rocq_result result = ROCQ_OK;
    w->copies = (rocq_tensor *)bench_alloc(w->n_copies * (int64_t)sizeof *w->copies);
    for (int pass = 0; pass < 2 && result == ROCQ_OK; pass++) { // measured, then cut
        if (pass == 1) result = rocq_buffer_alloc(ctx, &w->memory, arena.peak);
        rocq_arena_init(&arena, pass == 1 ? &w->memory : NULL);
        for (int64_t i = 0; i < w->n_copies && result == ROCQ_OK; i++)
            result = rocq_tensor_2d(&arena, &w->copies[i], w->format, w->k, w->rows);
        if (result == ROCQ_OK) result = rocq_tensor_2d(&arena, &w->dy, ROCQ_F32, w->k, w->rows);
    }
    for (int64_t i = 0; i < w->n_copies && result == ROCQ_OK; i++) {
        if (w->b->gpu && rocq_get_format_info(w->format)->block_elems > 1)
            w->copies[i].layout = ROCQ_LAYOUT_PLANAR;
        result = rocq_upload(ctx, &w->copies[i], w->blocks, w->bytes);
    }
    if (result != ROCQ_OK || !w->b->gpu) return result;
    result = rocq_graph_begin(ctx);
    for (int64_t i = 0; i < w->n_copies && result == ROCQ_OK; i++) {
        const rocq_cast_params params = {.y = &w->dy, .x = &w->copies[i]};
        result = rocq_cast(ctx, &params);
    }
    const rocq_result end = rocq_graph_end(ctx, &w->graph);
    return result == ROCQ_OK ? end : result;
}

// decoder: ggml's name of it
static void measure(bench *b, rocq_format format, const char *decoder, int64_t rows, int64_t k) {
    const rocq_format_info *info = rocq_get_format_info(format);
    char name[96], host[112], peer[112];
    weights w = {.b = b, .format = format, .rows = rows, .k = k};
    snprintf(name, sizeof name, "dequant/%s/%lldx%lld", info->name, (long long)rows, (long long)k);
    snprintf(host, sizeof host, "%s/host", name);
    snprintf(peer, sizeof peer, "%s/host/ggml", name);
    if (!bench_wants(b, name) && !bench_wants(b, peer)) return;

    uint64_t state = 1;
    int64_t row;
    if (rocq_row_size(format, k, &row) != ROCQ_OK) return;
    w.bytes = row * rows;
    // The output passes through the cache, too.
    w.n_copies = bench_copies(b, w.bytes + rows * k * (int64_t)sizeof(float));
    w.blocks = (char *)bench_alloc(w.bytes * w.n_copies);
    w.rows_in = (float *)bench_alloc(64 * k * (int64_t)sizeof(float));
    w.out = (float *)bench_alloc(rows * k * (int64_t)sizeof(float));
    w.want = (float *)bench_alloc(rows * k * (int64_t)sizeof(float));
    for (int64_t i = 0; i < 64 * k; i++) w.rows_in[i] = 0.02f * bench_normal(&state);
    bool ok = bench_encode(format, w.blocks, w.rows_in, 64, k) == ROCQ_OK;
    for (int64_t r = 64; r < rows * w.n_copies; r++) // rows repeat
        memcpy(w.blocks + r * row, w.blocks + r % 64 * row, (size_t)row);
    ok = ok && rocq_dequantize(format, w.want, w.blocks, rows * k) == ROCQ_OK;
    if (rocq_quantize(format, NULL, NULL, 0, k, NULL) == ROCQ_E_UNSUPPORTED)
        memcpy(w.rows_in, w.want, (size_t)(64 * k) * sizeof *w.want);

    const double bytes = (double)w.bytes + 4.0 * (double)(rows * k);
    const bench_case on_host[2] = {
        {.name = host, .bytes = bytes, .run = run_host, .verify = verify_host, .user = &w,
         .threads = 1},
        {.name = peer, .bytes = bytes, .run = run_peer, .verify = same_bits, .user = &w,
         .threads = 1},
    };
    const bool has_peer = !b->gpu && info->block_elems > 1 && format < ROCQ_MXFP6_E2M3 &&
        ggml_open(b) && ggml__symbol(ggml.base, decoder, &w.peer);
    if (!ok) bench_fail(b, name, "cannot be encoded");
    else if (!b->gpu) bench_run_pair(b, on_host, has_peer ? 2 : 1);

    const int64_t n_ops = make_op(&w) == ROCQ_OK ? (b->gpu ? w.n_copies : 1) : 0;
    const bench_case op = {.name = name, .bytes = bytes * (double)n_ops, .run = run_op,
                           .verify = verify_op, .user = &w, .inner = n_ops};
    w.turn = 0;
    if (n_ops > 0) bench_run(b, &op);
    else bench_fail(b, name, rocq_error(b->ctx));
    rocq_graph_destroy(b->ctx, &w.graph);
    rocq_buffer_free(b->ctx, &w.memory);
    free(w.copies);
    free(w.blocks);
    free(w.rows_in);
    free(w.out);
    free(w.want);
}

int main(int argc, char **argv) {
    bench b;
    if (!bench_open(&b, argc, argv, "dequant")) return 1;
    const int64_t rows = b.tiny ? 64 : 4096, k = b.tiny ? 256 : 4096;
#define ROCQ_X(NAME, name, id, elems, bytes) \
    if (id != ROCQ_F32) measure(&b, ROCQ_##NAME, "dequantize_row_" #name, rows, k);
    ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
    ggml_close();
    return bench_close(&b);
}
