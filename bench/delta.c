// delta.c - the gated delta net of Qwen 3.5 and Qwen3-Next, one op for the whole recurrence: steps
// and prompts, with ggml's op beside, which takes k and q as directions, and gates that are made.
//
// Names: delta/dD/hHEADSxGROUPS/nN; a state is D x D in F32 for each head. On a GPU a run is a
// recorded graph of several copies, each with its own state, as the layers of a model have theirs.
// Bytes are the state once in and once out, and q, k, v and y.

#include "bench.h"
#include "ggml.h"

typedef struct recurrence {
    bench *b;
    int64_t d, heads, groups, n, n_copies, turn;
    float *q, *k, *v, *alpha, *beta, *state, *y; // state: of slot 0, as all copies have it
    float *a, *dt;
    rocq_buffer memory;
    rocq_tensor dq, dk, dv, dalpha, dbeta, da, ddt, dslot, dy, states[GGML_MOST];
    rocq_graph *graph;
    ggml_job job;
} recurrence;

static rocq_result one(recurrence *r, int64_t copy) {
    const rocq_delta_net_params params = {
        .y = &r->dy, .state = &r->states[copy], .q = &r->dq, .k = &r->dk, .v = &r->dv,
        .alpha = &r->dalpha, .beta = &r->dbeta, .a = &r->da, .dt = &r->ddt, .slot = &r->dslot,
        .eps = 1e-6f};
    return rocq_delta_net(r->b->ctx, &params);
}

static rocq_result run(void *user) {
    recurrence *r = (recurrence *)user;
    if (r->graph) return rocq_graph_launch(r->b->ctx, r->graph);
    r->turn = (r->turn + 1) % r->n_copies;
    return one(r, r->turn);
}

static double length(const float *x, int64_t n) {
    double sum = 1e-6;
    for (int64_t i = 0; i < n; i++) sum += (double)x[i] * x[i];
    return sqrt(sum);
}
static double gate(const recurrence *r, int64_t head, int64_t t) { // g
    const double x = (double)r->alpha[t * r->heads + head] + r->dt[head];
    return r->a[head] * log1p(exp(x));
}

// Some heads of r->y in float64.
static bool close_enough(const recurrence *r) {
    const int64_t d = r->d, rows = r->heads * d;
    double *s = (double *)bench_alloc(d * d * (int64_t)sizeof *s), error = 0, power = 0;
    for (int64_t i = 0; i < 2; i++) {
        const int64_t head = i == 0 ? 0 : r->heads - 1, group = head % r->groups;
        for (int64_t e = 0; e < d * d; e++) s[e] = r->state[head * d * d + e];
        for (int64_t t = 0; t < r->n; t++) {
            const float *k = r->k + (t * r->groups + group) * d, *q = r->q + (k - r->k);
            const double decay = exp(gate(r, head, t)), of_k = length(k, d), of_q = length(q, d);
            const double share = 1 / (1 + exp(-(double)r->beta[t * r->heads + head]));
            for (int64_t c = 0; c < d; c++) {
                double *const column = s + c * d, seen = 0, y = 0;
                for (int64_t e = 0; e < d; e++) seen += column[e] * k[e];
                const double v = r->v[t * rows + head * d + c];
                const double by = share * (v - decay * seen / of_k) / of_k;
                for (int64_t e = 0; e < d; e++) {
                    column[e] = decay * column[e] + by * k[e];
                    y += column[e] * q[e];
                }
                y /= of_q * sqrt((double)d);
                const double off = r->y[t * rows + head * d + c] - y;
                error += off * off;
                power += y * y;
            }
        }
    }
    free(s);
    return error <= 1e-9 * power;
}

static bool verify(void *user) {
    recurrence *r = (recurrence *)user;
    memset(r->y, 0xff, (size_t)rocq_tensor_size(&r->dy));
    return rocq_download(r->b->ctx, r->y, &r->dy, rocq_tensor_size(&r->dy)) == ROCQ_OK &&
        close_enough(r);
}

static rocq_result peer_run(void *user) { return ggml_job_run(&((recurrence *)user)->job); }

static bool peer_verify(void *user) {
    recurrence *r = (recurrence *)user;
    memset(r->y, 0xff, (size_t)rocq_tensor_size(&r->dy));
    ggml.ggml_backend_tensor_get(r->job.results[r->job.turn], r->y, 0,
                                 (size_t)rocq_tensor_size(&r->dy));
    return close_enough(r);
}

static float *random_floats(int64_t n, float by, uint64_t *state) {
    float *x = (float *)bench_alloc(n * (int64_t)sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = by * bench_normal(state);
    return x;
}

static rocq_result make(recurrence *r) {
    const int64_t d = r->d, h = r->heads, g = r->groups, n = r->n;
    const int64_t q_ne[3] = {d, g, n}, v_ne[3] = {d, h, n}, gate_ne[2] = {h, n}, two[2] = {2, 1};
    const int64_t state_ne[4] = {d, d, h, 2}, half = d * d * h * (int64_t)sizeof(float);
    rocq_ctx *ctx = r->b->ctx;
    uint64_t state = 1;
    r->q = random_floats(d * g * n, 1, &state);
    r->k = random_floats(d * g * n, 1, &state);
    r->v = random_floats(d * h * n, 1, &state);
    r->alpha = random_floats(h * n, 1, &state);
    r->beta = random_floats(h * n, 1, &state);
    r->a = random_floats(h, 0.3f, &state);
    r->dt = random_floats(h, 1, &state);
    r->state = random_floats(d * d * h, 0.1f, &state);
    r->y = random_floats(d * h * n, 1, &state);
    for (int64_t i = 0; i < h; i++) r->a[i] = -fabsf(r->a[i]);
    r->n_copies = n > 1 && bench_copies(r->b, half) > 8 ? 8 : bench_copies(r->b, half);
    if (r->n_copies > GGML_MOST) r->n_copies = GGML_MOST;

    rocq_result result = ROCQ_OK;
    rocq_arena arena;
    struct { rocq_tensor *t; int32_t n_dims; const int64_t *ne; const void *data; } parts[] = {
        {&r->dq, 3, q_ne, r->q}, {&r->dk, 3, q_ne, r->k}, {&r->dv, 3, v_ne, r->v},
        {&r->dalpha, 2, gate_ne, r->alpha}, {&r->dbeta, 2, gate_ne, r->beta},
        {&r->da, 1, gate_ne, r->a}, {&r->ddt, 1, gate_ne, r->dt},
        {&r->dslot, 2, two, (const int32_t[]){0, 1}}, {&r->dy, 3, v_ne, NULL}};
    enum { PARTS = sizeof parts / sizeof *parts };
    for (int pass = 0; pass < 2 && result == ROCQ_OK; pass++) { // measured, then cut
        if (pass == 1) result = rocq_buffer_alloc(ctx, &r->memory, arena.peak);
        rocq_arena_init(&arena, pass == 1 ? &r->memory : NULL);
        for (int i = 0; i < PARTS && result == ROCQ_OK; i++)
            result = rocq_arena_tensor(&arena, parts[i].t, i == 7 ? ROCQ_I32 : ROCQ_F32,
                                       parts[i].n_dims, parts[i].ne);
        for (int64_t i = 0; i < r->n_copies && result == ROCQ_OK; i++)
            result = rocq_arena_tensor(&arena, &r->states[i], ROCQ_F32, 4, state_ne);
    }
    for (int i = 0; i < PARTS - 1 && result == ROCQ_OK; i++)
        result = rocq_upload(ctx, parts[i].t, parts[i].data, rocq_tensor_size(parts[i].t));
    for (int64_t i = 0; i < r->n_copies && result == ROCQ_OK; i++) {
        const rocq_tensor slot = rocq_tensor_slice(&r->states[i], 3, 0, 1);
        result = rocq_upload(ctx, &slot, r->state, half);
    }
    if (result != ROCQ_OK || !r->b->gpu) return result;
    result = rocq_graph_begin(ctx);
    for (int64_t i = 0; i < r->n_copies && result == ROCQ_OK; i++) result = one(r, i);
    const rocq_result end = rocq_graph_end(ctx, &r->graph);
    return result == ROCQ_OK ? end : result;
}

// False also where this ggml does not have the op.
static bool make_peer(recurrence *r) {
    void *(*gated_delta_net)(void *ctx, void *q, void *k, void *v, void *g, void *beta, void *state,
                             int64_t n_snapshots) = NULL;
    const int64_t d = r->d, h = r->heads, groups = r->groups, n = r->n;
    ggml_job *j = &r->job;
    if (!ggml__symbol(ggml.base, "ggml_gated_delta_net", &gated_delta_net)) return false;
    ggml_job_begin(j, (int)r->n_copies);
    void *q = ggml.ggml_new_tensor_4d(j->ctx, ROCQ_F32, d, groups, n, 1);
    void *k = ggml.ggml_new_tensor_4d(j->ctx, ROCQ_F32, d, groups, n, 1);
    void *v = ggml.ggml_new_tensor_4d(j->ctx, ROCQ_F32, d, h, n, 1);
    void *g = ggml.ggml_new_tensor_4d(j->ctx, ROCQ_F32, 1, h, n, 1);
    void *beta = ggml.ggml_new_tensor_4d(j->ctx, ROCQ_F32, 1, h, n, 1), *states[GGML_MOST];
    for (int64_t i = 0; i < r->n_copies; i++) {
        states[i] = ggml.ggml_new_tensor_4d(j->ctx, ROCQ_F32, d, d, h, 1);
        j->results[i] = gated_delta_net(j->ctx, q, k, v, g, beta, states[i], 1);
    }
    if (!ggml_job_ready(j, NULL) ||
        !ggml.ggml_backend_dev_supports_op(ggml.device, j->results[0])) {
        ggml_job_end(j);
        return false;
    }
    float *values = (float *)bench_alloc(d * h * n * (int64_t)sizeof *values);
    for (int side = 0; side < 2; side++) { // directions
        const float *from = side ? r->k : r->q;
        for (int64_t i = 0; i < d * groups * n; i++)
            values[i] = (float)(from[i] / length(from + i / d * d, d));
        ggml.ggml_backend_tensor_set(side ? k : q, values, 0, (size_t)(d * groups * n) * 4);
    }
    for (int64_t i = 0; i < h * n; i++) values[i] = (float)gate(r, i % h, i / h);
    ggml.ggml_backend_tensor_set(g, values, 0, (size_t)(h * n) * 4);
    for (int64_t i = 0; i < h * n; i++) values[i] = (float)(1 / (1 + exp(-(double)r->beta[i])));
    ggml.ggml_backend_tensor_set(beta, values, 0, (size_t)(h * n) * 4);
    ggml.ggml_backend_tensor_set(v, r->v, 0, (size_t)(d * h * n) * 4);
    for (int64_t i = 0; i < r->n_copies; i++)
        ggml.ggml_backend_tensor_set(states[i], r->state, 0, (size_t)(d * d * h) * 4);
    free(values);
    return true;
}

static void measure(bench *b, int64_t d, int64_t heads, int64_t groups, int64_t n) {
    char name[96], peer_name[112];
    recurrence *r = (recurrence *)bench_alloc((int64_t)sizeof *r);
    *r = (recurrence){.b = b, .d = d, .heads = heads, .groups = groups, .n = n};
    snprintf(name, sizeof name, "delta/d%lld/h%lldx%lld/n%lld", (long long)d, (long long)heads,
             (long long)groups, (long long)n);
    snprintf(peer_name, sizeof peer_name, "%s/ggml", name);
    if (!bench_wants(b, name) && !bench_wants(b, peer_name)) {
        free(r);
        return;
    }
    if (make(r) == ROCQ_OK) {
        const double flops = 7 * (double)(d * d * heads * n);
        const double bytes = 8.0 * (double)(d * d * heads) +
            8.0 * (double)(d * (groups + heads) * n);
        const double inner = b->gpu ? (double)r->n_copies : 1;
        const bench_case cases[2] = {
            {.name = name, .bytes = bytes * inner, .flops = flops * inner, .run = run,
             .verify = verify, .user = r, .inner = (int64_t)inner, .unit = BENCH_F32},
            {.name = peer_name, .bytes = bytes * inner, .flops = flops * inner, .run = peer_run,
             .verify = peer_verify, .user = r, .inner = (int64_t)inner, .unit = BENCH_F32,
             GGML_TURNS},
        };
        const bool peer = ggml_open(b) && make_peer(r);
        bench_run_pair(b, cases, peer ? 2 : 1);
        if (peer) ggml_job_end(&r->job);
    } else {
        bench_fail(b, name, rocq_error(b->ctx));
    }
    rocq_graph_destroy(b->ctx, &r->graph);
    rocq_buffer_free(b->ctx, &r->memory);
    float *const own[] = {r->q, r->k, r->v, r->alpha, r->beta, r->a, r->dt, r->state, r->y};
    for (int i = 0; i < 9; i++) free(own[i]);
    free(r);
}

int main(int argc, char **argv) {
    bench b;
    if (!bench_open(&b, argc, argv, "delta")) return 1;
    if (b.tiny) {
        measure(&b, 16, 4, 2, 1);
        measure(&b, 32, 2, 1, 70);
    } else {
        static const int64_t tokens[] = {1, 16, 128, 512, 2048};
        for (int i = 0; i < 5; i++) measure(&b, 128, 32, 16, tokens[i]); // Qwen3-Next, Qwen 3.5 9B
    }
    ggml_close();
    return bench_close(&b);
}
