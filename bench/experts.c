// experts.c - the feed-forward block of a mixture of experts: gate and up with GLU, then down with
// the weighted sum, each a product by expert, with ggml's mul_mat_id beside.
//
// Tokens take their experts at random, and runs take turns with several choices, so that weights
// come from memory, as in a model. On a GPU a run is a recorded graph that goes through all choices
// once. Bytes are those of the experts that a choice names, which a decode step has to read.

#include "bench.h"
#include "ggml.h"

enum { CHOICES = 16 };

typedef struct mixture {
    bench *b;
    rocq_format format;
    int64_t k, m, n_experts, n_slots, n, turn;
    float limit;
    double distinct; // experts that a choice names, on average
    int64_t w_bytes; // of one of the three tensors
    void *w[3];      // gate and up [k, m], down [m, k], as in a file
    float *x, *y, *weights;
    int32_t *ids;    // [CHOICES][n][n_slots]
    rocq_buffer memory;
    rocq_tensor dw[3], dx, dh, dy, dweights, dids[CHOICES];
    rocq_graph *graph; // GPU
    ggml_job job;
} mixture;

static rocq_result block(mixture *p, int64_t choice) {
    const rocq_experts_params up = {
        .y = &p->dh, .w = &p->dw[0], .x = &p->dx, .ids = &p->dids[choice], .w2 = &p->dw[1],
        .activation = ROCQ_ACT_SILU, .limit = p->limit, .alpha = p->limit > 0 ? 1.702f : 0};
    const rocq_experts_params down = {.y = &p->dy, .w = &p->dw[2], .x = &p->dh,
                                      .ids = &p->dids[choice], .weights = &p->dweights};
    const rocq_result result = rocq_experts(p->b->ctx, &up);
    return result != ROCQ_OK ? result : rocq_experts(p->b->ctx, &down);
}

static rocq_result run(void *user) {
    mixture *p = (mixture *)user;
    if (p->graph) return rocq_graph_launch(p->b->ctx, p->graph);
    p->turn = (p->turn + 1) % CHOICES;
    return block(p, p->turn);
}

static double dot(const mixture *p, int i, int64_t expert, int64_t row, const float *x) {
    const int64_t k = i == 2 ? p->m : p->k, m = i == 2 ? p->k : p->m;
    const int64_t bytes = p->w_bytes / p->n_experts;
    float *w = (float *)bench_alloc(k * (int64_t)sizeof *w);
    double sum = 0;
    rocq_dequantize(p->format, w, (char *)p->w[i] + expert * bytes + bytes / m * row, k);
    for (int64_t e = 0; e < k; e++) sum += (double)w[e] * x[e];
    free(w);
    return sum;
}

// Outputs of one token against float64, with what a step keeps of the hidden values rounded.
static bool close_enough(mixture *p, int64_t choice) {
    const int64_t i = p->n / 2;
    const int32_t *ids = p->ids + (choice * p->n + i) * p->n_slots;
    float *h = (float *)bench_alloc(p->n_slots * p->m * (int64_t)sizeof *h);
    double error = 0, power = 0;
    for (int64_t j = 0; j < p->n_slots; j++) {
        for (int64_t m = 0; m < p->m; m++) {
            const double z = dot(p, 0, ids[j], m, p->x + i * p->k);
            const double u = dot(p, 1, ids[j], m, p->x + i * p->k), limit = (double)p->limit;
            const double g = limit > 0 ? fmin(z, limit) : z, alpha = limit > 0 ? 1.702 : 1;
            const double v = limit > 0 ? fmax(fmin(u, limit), -limit) + 1 : u;
            h[j * p->m + m] = (float)(g / (1 + exp(-alpha * g)) * v);
        }
    }
    for (int64_t k = 0; k < p->k; k += 1 + p->k / 100) {
        double sum = 0;
        for (int64_t j = 0; j < p->n_slots; j++) {
            sum += (double)p->weights[i * p->n_slots + j] * dot(p, 2, ids[j], k, h + j * p->m);
        }
        const double off = p->y[i * p->k + k] - sum;
        error += off * off;
        power += sum * sum;
    }
    free(h);
    return error <= 1.5e-3 * power; // INT8's bound for each of the three products
}

static bool verify(void *user) {
    mixture *p = (mixture *)user;
    memset(p->y, 0xff, (size_t)(p->k * p->n) * sizeof *p->y);
    return rocq_download(p->b->ctx, p->y, &p->dy, rocq_tensor_size(&p->dy)) == ROCQ_OK &&
        close_enough(p, p->graph ? CHOICES - 1 : p->turn);
}

static rocq_result peer_run(void *user) { return ggml_job_run(&((mixture *)user)->job); }

static bool peer_verify(void *user) {
    mixture *p = (mixture *)user;
    const int64_t choice = p->job.n_graphs == 1 ? CHOICES - 1 : p->job.turn;
    ggml.ggml_backend_tensor_get(p->job.results[choice], p->y, 0,
                                 (size_t)(p->k * p->n) * sizeof *p->y);
    return close_enough(p, choice);
}

// The same in ggml, as llama.cpp builds it. Weights are one set of tensors, in the buffer type that
// repacks if there is one.
static bool peer_make(mixture *p) {
    void *types[8] = {NULL};
    memcpy(types, ggml.buffer_types, sizeof types);
    for (int t = 0; t < 8; t++) {
        ggml_job *j = &p->job;
        ggml_job_begin(j, CHOICES);
        void *in = ggml.ggml_new_tensor_4d(j->ctx, ROCQ_F32, p->k, 1, p->n, 1), *w[3];
        void *weights = ggml.ggml_new_tensor_4d(j->ctx, ROCQ_F32, 1, p->n_slots, p->n, 1);
        void *ids[CHOICES];
        for (int i = 0; i < 3; i++) {
            w[i] = ggml.ggml_new_tensor_4d(j->weight_ctx, (int)p->format, i == 2 ? p->m : p->k,
                                           i == 2 ? p->k : p->m, p->n_experts, 1);
        }
        j->weights[0] = w[0];
        bool ok = true;
        for (int c = 0; c < CHOICES; c++) {
            ids[c] = ggml.ggml_new_tensor_4d(j->ctx, ROCQ_I32, p->n_slots, p->n, 1, 1);
            void *gate = ggml.ggml_mul_mat_id(j->ctx, w[0], in, ids[c]);
            void *up = ggml.ggml_mul_mat_id(j->ctx, w[1], in, ids[c]);
            void *h = p->limit > 0 ? ggml.ggml_swiglu_oai(j->ctx, gate, up, 1.702f, p->limit)
                                   : ggml.ggml_swiglu_split(j->ctx, gate, up);
            void *down = ggml.ggml_mul_mat_id(j->ctx, w[2], h, ids[c]);
            void *parts = ggml.ggml_mul(j->ctx, down, weights), *sum = NULL;
            for (int64_t s = 0; s < p->n_slots; s++) {
                void *part = ggml.ggml_view_2d(j->ctx, parts, p->k, p->n,
                                               (size_t)(p->k * p->n_slots) * 4,
                                               (size_t)(p->k * s) * 4);
                sum = sum ? ggml.ggml_add(j->ctx, sum, part) : part;
            }
            j->results[c] = p->n_slots > 1 ? sum : ggml.ggml_cont(j->ctx, sum);
            ok = ok && (!types[t] || ggml.ggml_backend_dev_supports_op(ggml.device, gate));
        }
        ok = ggml_job_ready(j, types[t]) && ok;
        if (ok && types[t]) { // a type of buffer says only now what it takes
            void *probe = ggml.ggml_mul_mat_id(j->ctx, w[0], in, ids[0]);
            ok = ggml.ggml_backend_dev_supports_op(ggml.device, probe);
        }
        if (ok) {
            for (int i = 0; i < 3; i++)
                ggml.ggml_backend_tensor_set(w[i], p->w[i], 0, (size_t)p->w_bytes);
            ggml.ggml_backend_tensor_set(in, p->x, 0, (size_t)(p->k * p->n) * 4);
            ggml.ggml_backend_tensor_set(weights, p->weights, 0, (size_t)(p->n_slots * p->n) * 4);
            for (int c = 0; c < CHOICES; c++) {
                ggml.ggml_backend_tensor_set(ids[c], p->ids + c * p->n * p->n_slots, 0,
                                             (size_t)(p->n_slots * p->n) * 4);
            }
            return true;
        }
        ggml_job_end(j);
        if (!types[t]) break;
    }
    return false;
}

// Rows repeat after 64, which no kernel notices and encoding takes long for.
static rocq_result fill(mixture *p, uint64_t *state) {
    for (int i = 0; i < 3; i++) {
        const int64_t k = i == 2 ? p->m : p->k, rows = p->n_experts * (i == 2 ? p->k : p->m);
        int64_t row;
        float *some = (float *)bench_alloc(64 * k * (int64_t)sizeof *some);
        rocq_result result = rocq_row_size(p->format, k, &row);
        if (result != ROCQ_OK) return result;
        for (int64_t e = 0; e < 64 * k; e++) some[e] = 0.02f * bench_normal(state);
        p->w_bytes = row * rows;
        p->w[i] = bench_alloc(p->w_bytes);
        result = rocq_quantize(p->format, p->w[i], some, rows < 64 ? rows : 64, k, NULL);
        free(some);
        if (result != ROCQ_OK) return result;
        for (int64_t r = 64; r < rows; r++) {
            const int64_t from = (r + r / 64 * 7) % 64; // experts differ
            memcpy((char *)p->w[i] + r * row, (char *)p->w[i] + from * row, (size_t)row);
        }
    }
    p->x = (float *)bench_alloc(p->k * p->n * (int64_t)sizeof *p->x);
    p->y = (float *)bench_alloc(p->k * p->n * (int64_t)sizeof *p->y);
    p->weights = (float *)bench_alloc(p->n_slots * p->n * (int64_t)sizeof *p->weights);
    p->ids = (int32_t *)bench_alloc(CHOICES * p->n_slots * p->n * (int64_t)sizeof *p->ids);
    for (int64_t i = 0; i < p->k * p->n; i++) p->x[i] = bench_normal(state);
    for (int64_t i = 0; i < p->n_slots * p->n; i++) p->weights[i] = bench_uniform(state, 0, 0.3f);
    for (int64_t c = 0; c < CHOICES; c++) {
        char *seen = (char *)bench_alloc(p->n_experts);
        memset(seen, 0, (size_t)p->n_experts);
        for (int64_t i = 0; i < p->n; i++) {
            int32_t *ids = p->ids + (c * p->n + i) * p->n_slots;
            for (int64_t j = 0; j < p->n_slots; j++) { // different ones
                bool taken = true;
                while (taken) {
                    ids[j] = (int32_t)(bench_random(state) % (uint64_t)p->n_experts);
                    taken = false;
                    for (int64_t o = 0; o < j; o++) taken = taken || ids[o] == ids[j];
                }
                p->distinct += seen[ids[j]] ? 0 : 1.0 / CHOICES;
                seen[ids[j]] = 1;
            }
        }
        free(seen);
    }
    return ROCQ_OK;
}

static rocq_result make(mixture *p) {
    rocq_ctx *ctx = p->b->ctx;
    uint64_t state = 1;
    rocq_result result = fill(p, &state);
    rocq_arena arena;
    for (int pass = 0; pass < 2 && result == ROCQ_OK; pass++) { // measured, then cut
        if (pass == 1) result = rocq_buffer_alloc(ctx, &p->memory, arena.peak);
        rocq_arena_init(&arena, pass == 1 ? &p->memory : NULL);
        for (int i = 0; i < 3 && result == ROCQ_OK; i++) {
            result = rocq_tensor_3d(&arena, &p->dw[i], p->format, i == 2 ? p->m : p->k,
                                    i == 2 ? p->k : p->m, p->n_experts);
        }
        for (int c = 0; c < CHOICES && result == ROCQ_OK; c++)
            result = rocq_tensor_2d(&arena, &p->dids[c], ROCQ_I32, p->n_slots, p->n);
        if (result == ROCQ_OK) result = rocq_tensor_3d(&arena, &p->dx, ROCQ_F32, p->k, 1, p->n);
        if (result == ROCQ_OK)
            result = rocq_tensor_3d(&arena, &p->dh, ROCQ_F32, p->m, p->n_slots, p->n);
        if (result == ROCQ_OK) result = rocq_tensor_2d(&arena, &p->dy, ROCQ_F32, p->k, p->n);
        if (result == ROCQ_OK)
            result = rocq_tensor_2d(&arena, &p->dweights, ROCQ_F32, p->n_slots, p->n);
    }
    for (int i = 0; i < 3 && result == ROCQ_OK; i++) {
        if (p->b->gpu && rocq_get_format_info(p->format)->block_elems > 1)
            p->dw[i].layout = ROCQ_LAYOUT_PLANAR;
        result = rocq_upload(ctx, &p->dw[i], p->w[i], p->w_bytes);
    }
    for (int c = 0; c < CHOICES && result == ROCQ_OK; c++)
        result = rocq_upload(ctx, &p->dids[c], p->ids + c * p->n * p->n_slots,
                             rocq_tensor_size(&p->dids[c]));
    if (result == ROCQ_OK) result = rocq_upload(ctx, &p->dx, p->x, rocq_tensor_size(&p->dx));
    if (result == ROCQ_OK)
        result = rocq_upload(ctx, &p->dweights, p->weights, rocq_tensor_size(&p->dweights));
    if (result != ROCQ_OK || !p->b->gpu) return result;
    result = rocq_graph_begin(ctx);
    for (int c = 0; c < CHOICES && result == ROCQ_OK; c++) result = block(p, c);
    const rocq_result end = rocq_graph_end(ctx, &p->graph);
    return result == ROCQ_OK ? end : result;
}

static void drop(mixture *p) {
    rocq_graph_destroy(p->b->ctx, &p->graph);
    rocq_buffer_free(p->b->ctx, &p->memory);
    for (int i = 0; i < 3; i++) free(p->w[i]);
    free(p->x);
    free(p->y);
    free(p->weights);
    free(p->ids);
}

static void measure(bench *b, const char *model, mixture p) {
    char name[96], peer_name[112];
    p.b = b;
    snprintf(name, sizeof name, "experts/%s/%s/n%lld", model, rocq_format_name(p.format),
             (long long)p.n);
    snprintf(peer_name, sizeof peer_name, "%s/ggml", name);
    if (!bench_wants(b, name) && !bench_wants(b, peer_name)) return;
    if (make(&p) != ROCQ_OK) {
        bench_fail(b, name, rocq_error(b->ctx));
        drop(&p);
        return;
    }
    const double bytes = 3.0 * (double)p.w_bytes * p.distinct / (double)p.n_experts;
    const double flops = 6.0 * (double)(p.k * p.m) * (double)(p.n_slots * p.n);
    const double inner = b->gpu ? CHOICES : 1;
    const rocq_experts_params params = {.y = &p.dh, .w = &p.dw[0], .x = &p.dx, .ids = &p.dids[0],
                                        .w2 = &p.dw[1]};
    const bench_unit unit = bench_unit_of(b, ROCQ_OP_EXPERTS, &params);
    const bench_case cases[2] = {
        {.name = name, .bytes = bytes * inner, .flops = flops * inner, .run = run, .verify = verify,
         .user = &p, .inner = (int64_t)inner, .unit = unit},
        {.name = peer_name, .bytes = bytes * inner, .flops = flops * inner, .run = peer_run,
         .verify = peer_verify, .user = &p, .inner = (int64_t)inner, .unit = unit, GGML_TURNS},
    };
    const bool peer = ggml_open(b) && peer_make(&p);
    bench_run_pair(b, cases, peer ? 2 : 1);
    if (peer) ggml_job_end(&p.job);
    drop(&p);
}

int main(int argc, char **argv) {
    bench b;
    if (!bench_open(&b, argc, argv, "experts")) return 1;
    if (b.tiny) {
        measure(&b, "tiny", (mixture){.format = ROCQ_Q4_K, .k = 256, .m = 256, .n_experts = 4,
                                      .n_slots = 2, .n = 3});
        measure(&b, "tiny", (mixture){.format = ROCQ_MXFP4, .k = 64, .m = 32, .n_experts = 3,
                                      .n_slots = 2, .n = 40, .limit = 7});
        ggml_close();
        return bench_close(&b);
    }
    static const int64_t tokens[] = {1, 4, 16, 64, 512};
    for (int i = 0; i < 5; i++) { // Qwen3-30B-A3B, gpt-oss-20b, 1.1B eight times
        measure(&b, "qwen3moe", (mixture){.format = ROCQ_Q4_K, .k = 2048, .m = 768,
                                          .n_experts = 128, .n_slots = 8, .n = tokens[i]});
        measure(&b, "gpt-oss", (mixture){.format = ROCQ_MXFP4, .k = 2880, .m = 2880,
                                         .n_experts = 32, .n_slots = 4, .n = tokens[i],
                                         .limit = 7});
        measure(&b, "8x1B", (mixture){.format = ROCQ_Q4_0, .k = 2048, .m = 5632, .n_experts = 8,
                                      .n_slots = 2, .n = tokens[i]});
    }
    ggml_close();
    return bench_close(&b);
}
