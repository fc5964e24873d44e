// attention.c - attention of one token over a long cache (decode) and of whole prompts, by format
// of keys and values, and ggml's flash attention beside.
//
// Names: attention/KV/dD/hHEADSxKV_HEADS/qN/kvN; queries see what stands before them, but in "full"
// all. Queries are in F32; those of heads of 512, which a picture's decoder has, in F16. Keys and
// values take turns from as many copies as no cache holds; on a GPU all copies are one recorded
// graph, as the layers of a model are.

#include "bench.h"
#include "ggml.h"

typedef struct shape {
    rocq_format format;
    int64_t d, heads, kv_heads, n_q, n_kv;
    bool causal;
} shape;

typedef struct heads {
    bench *b;
    shape s;
    int64_t kv_bytes, n_copies, turn;
    char *k, *v;            // one copy each: [D, n_kv, kv_heads], as a cache holds them
    float *q, *out;         // [D, heads, n_q]
    rocq_buffer memory;
    rocq_tensor *ks, *vs, dq, dout; // as ops take them: [D, kv_heads, n_kv], by strides
    rocq_graph *graph;
    ggml_job job;
} heads;

static rocq_result one(heads *h, int64_t copy) {
    const rocq_attention_params params = {.out = &h->dout, .q = &h->dq, .k = &h->ks[copy],
                                          .v = &h->vs[copy], .causal = h->s.causal};
    return rocq_attention(h->b->ctx, &params);
}

static rocq_result run(void *user) {
    heads *h = (heads *)user;
    if (h->graph) return rocq_graph_launch(h->b->ctx, h->graph);
    h->turn = (h->turn + 1) % h->n_copies;
    return one(h, h->turn);
}

// Some queries of h->out in float64 over the decoded keys and values.
static bool close_enough(const heads *h) {
    const shape *s = &h->s;
    const int64_t row = h->kv_bytes / s->kv_heads / s->n_kv;
    float *x = (float *)bench_alloc(s->d * (int64_t)sizeof *x);
    double *score = (double *)bench_alloc(s->n_kv * (int64_t)sizeof *score);
    double *want = (double *)bench_alloc(s->d * (int64_t)sizeof *want);
    double error = 0, power = 0;
    for (int64_t i = 0; i < 12; i++) { // the last query, the first ones, and others
        const int64_t query = i == 0 ? s->n_q - 1 : i * i * i * 37 % s->n_q;
        const int64_t head = i * 5 % s->heads;
        const int64_t kv = head * s->kv_heads / s->heads;
        const int64_t seen = s->causal ? s->n_kv - s->n_q + query + 1 : s->n_kv;
        const float *q = h->q + (query * s->heads + head) * s->d;
        const float *got = h->out + (query * s->heads + head) * s->d;
        double most = -INFINITY, sum = 0;
        for (int64_t j = 0; j < seen; j++) {
            rocq_dequantize(s->format, x, h->k + (kv * s->n_kv + j) * row, s->d);
            score[j] = 0;
            for (int64_t e = 0; e < s->d; e++) score[j] += (double)q[e] * x[e];
            score[j] /= sqrt((double)s->d);
            if (score[j] > most) most = score[j];
        }
        memset(want, 0, (size_t)s->d * sizeof *want);
        for (int64_t j = 0; j < seen; j++) {
            const double p = exp(score[j] - most);
            rocq_dequantize(s->format, x, h->v + (kv * s->n_kv + j) * row, s->d);
            sum += p;
            for (int64_t e = 0; e < s->d; e++) want[e] += p * x[e];
        }
        for (int64_t e = 0; e < s->d; e++) {
            error += (got[e] - want[e] / sum) * (got[e] - want[e] / sum);
            power += want[e] / sum * (want[e] / sum);
        }
    }
    free(x);
    free(score);
    free(want);
    return error <= 5e-4 * power;
}

static bool verify(void *user) {
    heads *h = (heads *)user;
    memset(h->out, 0xff, (size_t)rocq_tensor_size(&h->dout));
    return rocq_download(h->b->ctx, h->out, &h->dout, rocq_tensor_size(&h->dout)) == ROCQ_OK &&
        close_enough(h);
}

static rocq_result peer_run(void *user) { return ggml_job_run(&((heads *)user)->job); }

static bool peer_verify(void *user) {
    heads *h = (heads *)user;
    ggml.ggml_backend_tensor_get(h->job.results[h->job.turn], h->out, 0,
                                 (size_t)rocq_tensor_size(&h->dout));
    return close_enough(h);
}

static char *random_rows(heads *h, uint64_t *state) {
    const int64_t n = h->s.n_kv * h->s.kv_heads, some = n < 512 ? n : 512; // then they repeat
    float *rows = (float *)bench_alloc(some * h->s.d * (int64_t)sizeof *rows);
    char *data = (char *)bench_alloc(h->kv_bytes);
    for (int64_t i = 0; i < some * h->s.d; i++) rows[i] = bench_normal(state);
    if (rocq_quantize(h->s.format, data, rows, some, h->s.d, NULL) != ROCQ_OK)
        bench__die("keys cannot be encoded");
    for (int64_t r = some; r < n; r++)
        memcpy(data + r * (h->kv_bytes / n), data + r % some * (h->kv_bytes / n),
               (size_t)(h->kv_bytes / n));
    free(rows);
    return data;
}

static rocq_result make(heads *h) {
    const shape *s = &h->s;
    const int64_t kv_ne[3] = {s->d, s->n_kv, s->kv_heads}, q_ne[3] = {s->d, s->heads, s->n_q};
    const int32_t by_position[4] = {0, 2, 1, 3};
    rocq_ctx *ctx = h->b->ctx;
    uint64_t state = 1;
    rocq_result result = rocq_row_size(s->format, s->d * s->n_kv * s->kv_heads, &h->kv_bytes);
    if (result != ROCQ_OK) return result;
    h->k = random_rows(h, &state);
    h->v = random_rows(h, &state);
    h->q = (float *)bench_alloc(s->d * s->heads * s->n_q * (int64_t)sizeof(float));
    h->out = (float *)bench_alloc(s->d * s->heads * s->n_q * (int64_t)sizeof(float));
    for (int64_t i = 0; i < s->d * s->heads * s->n_q; i++) h->q[i] = 2 * bench_normal(&state);

    h->n_copies = bench_copies(h->b, 2 * h->kv_bytes);
    if (s->n_q >= 64 && h->n_copies > 4) h->n_copies = 4; // arithmetic is what limits
    h->ks = (rocq_tensor *)bench_alloc(2 * h->n_copies * (int64_t)sizeof *h->ks);
    h->vs = h->ks + h->n_copies;
    rocq_arena arena;
    for (int pass = 0; pass < 2 && result == ROCQ_OK; pass++) { // measured, then cut
        if (pass == 1) result = rocq_buffer_alloc(ctx, &h->memory, arena.peak);
        rocq_arena_init(&arena, pass == 1 ? &h->memory : NULL);
        for (int64_t i = 0; i < 2 * h->n_copies && result == ROCQ_OK; i++)
            result = rocq_arena_tensor(&arena, &h->ks[i], s->format, 3, kv_ne);
        const rocq_format q = s->d == 512 ? ROCQ_F16 : ROCQ_F32;
        if (result == ROCQ_OK) result = rocq_arena_tensor(&arena, &h->dq, q, 3, q_ne);
        if (result == ROCQ_OK) result = rocq_arena_tensor(&arena, &h->dout, ROCQ_F32, 3, q_ne);
    }
    for (int64_t i = 0; i < 2 * h->n_copies && result == ROCQ_OK; i++) {
        result = rocq_upload(ctx, &h->ks[i], i < h->n_copies ? h->k : h->v, h->kv_bytes);
        if (result == ROCQ_OK) result = rocq_tensor_permute(&h->ks[i], &h->ks[i], by_position);
    }
    const rocq_tensor *dq = &h->dq;
    const int64_t q_bytes = rocq_tensor_size(dq), q_rows = s->heads * s->n_q;
    char *q = (char *)bench_alloc(q_bytes); // h->q with the rounding of dq, for the comparison too
    if (result == ROCQ_OK) result = rocq_quantize(dq->format, q, h->q, q_rows, s->d, NULL);
    if (result == ROCQ_OK) result = rocq_dequantize(dq->format, h->q, q, q_rows * s->d);
    if (result == ROCQ_OK) result = rocq_upload(ctx, dq, q, q_bytes);
    free(q);
    if (result != ROCQ_OK || !h->b->gpu) return result;
    result = rocq_graph_begin(ctx);
    for (int64_t i = 0; i < h->n_copies && result == ROCQ_OK; i++) result = one(h, i);
    const rocq_result end = rocq_graph_end(ctx, &h->graph);
    return result == ROCQ_OK ? end : result;
}

static bool make_peer(heads *h) {
    const shape *s = &h->s;
    void *ks[GGML_MOST], *vs[GGML_MOST], *mask = NULL;
    ggml_job_begin(&h->job, (int)h->n_copies);
    void *ctx = h->job.ctx, *q = ggml.ggml_new_tensor_4d(ctx, ROCQ_F32, s->d, s->n_q, s->heads, 1);
    if (s->causal && s->n_q > 1) // its rows padded for kernels that read tiles of it
        mask = ggml.ggml_new_tensor_4d(ctx, ROCQ_F16, s->n_kv, (s->n_q + 63) / 64 * 64, 1, 1);
    for (int64_t i = 0; i < h->n_copies; i++) {
        ks[i] = ggml.ggml_new_tensor_4d(ctx, (int)s->format, s->d, s->n_kv, s->kv_heads, 1);
        vs[i] = ggml.ggml_new_tensor_4d(ctx, (int)s->format, s->d, s->n_kv, s->kv_heads, 1);
        h->job.results[i] = ggml.ggml_flash_attn_ext(ctx, q, ks[i], vs[i], mask,
                                                     1 / sqrtf((float)s->d), 0, 0);
    }
    if (!ggml_job_ready(&h->job, NULL) ||
        !ggml.ggml_backend_dev_supports_op(ggml.device, h->job.results[0])) {
        ggml_job_end(&h->job);
        return false;
    }
    const size_t row = (size_t)s->d * sizeof(float);
    for (int64_t i = 0; i < s->n_q * s->heads; i++) { // ours are [D, heads, n_q]
        const int64_t query = i / s->heads, head = i % s->heads;
        const size_t at = (size_t)(head * s->n_q + query) * row;
        ggml.ggml_backend_tensor_set(q, h->q + i * s->d, at, row);
    }
    for (int64_t i = 0; mask && i < s->n_q; i++) {
        uint16_t *line = (uint16_t *)bench_alloc(s->n_kv * 2);
        for (int64_t j = s->n_kv - s->n_q + i + 1; j < s->n_kv; j++) line[j] = 0xfc00; // -inf
        ggml.ggml_backend_tensor_set(mask, line, (size_t)(i * s->n_kv) * 2, (size_t)s->n_kv * 2);
        free(line);
    }
    for (int64_t i = 0; i < h->n_copies; i++) {
        ggml.ggml_backend_tensor_set(ks[i], h->k, 0, (size_t)h->kv_bytes);
        ggml.ggml_backend_tensor_set(vs[i], h->v, 0, (size_t)h->kv_bytes);
    }
    return true;
}

static void measure(bench *b, shape s) {
    char name[96], peer_name[112];
    heads h = {.b = b, .s = s};
    snprintf(name, sizeof name, "attention/%s/d%lld/h%lldx%lld/q%lld/kv%lld%s",
             rocq_format_name(s.format), (long long)s.d, (long long)s.heads,
             (long long)s.kv_heads, (long long)s.n_q, (long long)s.n_kv, s.causal ? "" : "/full");
    snprintf(peer_name, sizeof peer_name, "%s/ggml", name);
    if (!bench_wants(b, name) && !bench_wants(b, peer_name)) return;
    if (make(&h) == ROCQ_OK) {
        const double pairs = s.causal // of a query and what it sees
            ? (double)s.n_q * (double)(s.n_kv - s.n_q) + 0.5 * (double)s.n_q * (double)(s.n_q + 1)
            : (double)s.n_q * (double)s.n_kv;
        const double flops = 4 * (double)(s.d * s.heads) * pairs;
        const double bytes = 2 * (double)h.kv_bytes + 8 * (double)(s.d * s.heads * s.n_q);
        const double inner = b->gpu ? (double)h.n_copies : 1;
        const bench_case cases[2] = {
            {.name = name, .bytes = bytes * inner, .flops = flops * inner, .run = run,
             .verify = verify, .user = &h, .inner = (int64_t)inner,
             .unit = b->gpu ? BENCH_F16 : BENCH_F32},
            {.name = peer_name, .bytes = bytes * inner, .flops = flops * inner, .run = peer_run,
             .verify = peer_verify, .user = &h, .inner = (int64_t)inner,
             .unit = b->gpu ? BENCH_F16 : BENCH_F32, GGML_TURNS},
        };
        const bool peer = ggml_open(b) && make_peer(&h);
        bench_run_pair(b, cases, peer ? 2 : 1);
        if (peer) ggml_job_end(&h.job);
    } else {
        bench_fail(b, name, rocq_error(b->ctx));
    }
    rocq_graph_destroy(b->ctx, &h.graph);
    rocq_buffer_free(b->ctx, &h.memory);
    free(h.ks);
    free(h.k);
    free(h.v);
    free(h.q);
    free(h.out);
}

int main(int argc, char **argv) {
    bench b;
    if (!bench_open(&b, argc, argv, "attention")) return 1;
    static const rocq_format formats[] = {ROCQ_F16, ROCQ_Q8_0, ROCQ_Q4_0, ROCQ_BF16, ROCQ_F32};
    if (b.tiny) {
        for (int f = 0; f < 5; f++) measure(&b, (shape){formats[f], 64, 4, 2, 1, 70, true});
        measure(&b, (shape){ROCQ_F16, 64, 2, 1, 40, 40, true});
        measure(&b, (shape){ROCQ_F32, 64, 1, 1, 32, 32, false});
        measure(&b, (shape){ROCQ_F16, 512, 1, 1, 70, 70, false});
    } else {
        for (int64_t n = 512; n <= 32768; n *= 4) // decode
            measure(&b, (shape){ROCQ_F16, 128, 32, 8, 1, n, true});
        for (int f = 1; f < 5; f++) measure(&b, (shape){formats[f], 128, 32, 8, 1, 8192, true});
        measure(&b, (shape){ROCQ_F16, 128, 32, 32, 1, 4096, true});
        measure(&b, (shape){ROCQ_F16, 64, 32, 4, 1, 8192, true});
        measure(&b, (shape){ROCQ_F16, 256, 8, 4, 1, 8192, true});
        for (int64_t n = 512; n <= (b.gpu ? 8192 : 2048); n *= 2) // prompts
            measure(&b, (shape){ROCQ_F16, 128, 32, 8, n, n, true});
        measure(&b, (shape){ROCQ_Q8_0, 128, 32, 8, 512, 512, true});
        measure(&b, (shape){ROCQ_F16, 64, 32, 4, 512, 512, true});
        measure(&b, (shape){ROCQ_F16, 256, 8, 4, 512, 512, true});
        for (int64_t n = 4096; b.gpu && n <= 16384; n *= 4) // pictures of 512 and 1024 pixels
            measure(&b, (shape){ROCQ_F16, 512, 1, 1, n, n, false});
        // ROCmForge's: one head as wide as the sequence is long
        for (int64_t n = 64; n <= 512; n *= 2) measure(&b, (shape){ROCQ_F32, n, 1, 1, n, n, false});
    }
    ggml_close();
    return bench_close(&b);
}
