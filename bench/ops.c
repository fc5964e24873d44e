// ops.c - what a step does between its products: RMSNorm, rope and SwiGLU of one column and of 512,
// and the draw of a token from 151,936 logits in each mode.
//
// Operands stay in the caches, as they do in a step. On a GPU a run is one op with its launch.

#include "bench.h"

enum { N_VOCAB = 151936, HEADS = 32, HEAD_DIM = 128 };

typedef struct op {
    bench *b;
    rocq_op id;
    rocq_buffer memory;
    rocq_tensor y, x, other; // other: a norm's weight, positions, what a gate is multiplied by; of
                             // a draw, whose y is a token, its probability
    float *in, *out;         // x and y
    rocq_sample_params draw;
} op;

static rocq_result run(void *user) {
    op *o = (op *)user;
    const rocq_norm_params norm = {.y = &o->y, .x = &o->x, .weight = &o->other};
    const rocq_rope_params rope = {.y = &o->y, .x = &o->x, .pos = &o->other};
    const rocq_glu_params glu = {.y = &o->y, .gate = &o->x, .up = &o->other,
                                 .activation = ROCQ_ACT_SILU};
    if (o->id == ROCQ_OP_RMSNORM) return rocq_rmsnorm(o->b->ctx, &norm);
    if (o->id == ROCQ_OP_ROPE) return rocq_rope(o->b->ctx, &rope);
    if (o->id == ROCQ_OP_GLU) return rocq_glu(o->b->ctx, &glu);
    o->draw.step++;
    return rocq_sample(o->b->ctx, &o->draw);
}

// What y[i] of a row x of n values must be. The weight of a norm and the other factor of SwiGLU are
// 1.5. Rope turns pairs of neighbours; heads are rows, HEADS of them to a position, from 7 on.
static double wanted(const op *o, const float *x, int64_t row, int64_t n, int64_t i) {
    if (o->id == ROCQ_OP_GLU) return 1.5 * x[i] / (1 + exp(-(double)x[i]));
    if (o->id == ROCQ_OP_ROPE) {
        const double turn = pow(10000, -(double)(i / 2 * 2) / HEAD_DIM);
        const double angle = (double)(7 + row / HEADS) * turn;
        return i % 2 ? x[i - 1] * sin(angle) + x[i] * cos(angle)
                     : x[i] * cos(angle) - x[i + 1] * sin(angle);
    }
    double sum = 0;
    for (int64_t j = 0; j < n; j++) sum += (double)x[j] * x[j];
    return 1.5 * x[i] / sqrt(sum / (double)n + 1e-5);
}

static bool verify(void *user) {
    op *o = (op *)user;
    const int64_t n = o->x.ne[0], rows = rocq_tensor_count(&o->x) / n;
    double error = 0, power = 0;
    if (rocq_download(o->b->ctx, o->out, &o->y, rocq_tensor_size(&o->y)) != ROCQ_OK) return false;
    for (int64_t i = 0; i < 200; i++) {
        const int64_t row = i * 7919 % rows, at = i * 104729 % n;
        const double want = wanted(o, o->in + row * n, row, n, at);
        error += (o->out[row * n + at] - want) * (o->out[row * n + at] - want);
        power += want * want;
    }
    return error <= 1e-9 * power;
}

// The token is one that all three limits leave, and where there are none its probability is right.
static bool verify_draw(void *user) {
    op *o = (op *)user;
    const rocq_sample_params *p = &o->draw;
    const int64_t top_k = p->temperature > 0 ? p->top_k : 1;
    int32_t token = -1, above = 0;
    float prob = 0, top = o->in[0];
    if (rocq_download(o->b->ctx, &token, p->token, 4) != ROCQ_OK || token < 0 || token >= N_VOCAB ||
        rocq_download(o->b->ctx, &prob, p->prob, 4) != ROCQ_OK) {
        return false;
    }
    double mass_above = 0, mass = 0, heated = 0;
    for (int64_t i = 0; i < N_VOCAB; i++) top = o->in[i] > top ? o->in[i] : top;
    for (int64_t i = 0; i < N_VOCAB; i++) {
        const double e = exp((double)o->in[i] - top);
        above += o->in[i] > o->in[token];
        mass_above += o->in[i] > o->in[token] ? e : 0;
        mass += e;
        heated += pow(e, 1 / (double)p->temperature);
    }
    const double own = exp((double)o->in[token] - top);
    if (top_k > 0) return above < top_k && prob > 0 && prob <= 1;
    if (p->top_p > 0) return mass_above < (double)p->top_p * mass * (1 + 1e-5);
    if (p->min_p > 0) return own >= (double)p->min_p * (1 - 1e-5);
    return fabs(prob * heated / pow(own, 1 / (double)p->temperature) - 1) < 1e-4;
}

// Tensors and their values. A draw has one row of logits.
static rocq_result make(op *o, const int64_t ne[3], int64_t n_other) {
    const bool draw = o->id == ROCQ_OP_SAMPLE, rope = o->id == ROCQ_OP_ROPE;
    const int64_t n = ne[0] * ne[1] * ne[2];
    rocq_ctx *ctx = o->b->ctx;
    rocq_arena arena;
    rocq_result result = ROCQ_OK;
    uint64_t state = 1;
    o->in = (float *)bench_alloc(n * (int64_t)sizeof *o->in);
    o->out = (float *)bench_alloc(n * (int64_t)sizeof *o->out);
    for (int64_t i = 0; i < n; i++) o->in[i] = (draw ? 3.0f : 1.0f) * bench_normal(&state);
    for (int pass = 0; pass < 2 && result == ROCQ_OK; pass++) { // measured, then cut
        if (pass == 1) result = rocq_buffer_alloc(ctx, &o->memory, arena.peak);
        rocq_arena_init(&arena, pass == 1 ? &o->memory : NULL);
        if (result == ROCQ_OK)
            result = rocq_tensor_3d(&arena, &o->x, ROCQ_F32, ne[0], ne[1], ne[2]);
        if (result == ROCQ_OK && draw) result = rocq_tensor_1d(&arena, &o->y, ROCQ_I32, 1);
        if (result == ROCQ_OK && !draw)
            result = rocq_tensor_3d(&arena, &o->y, ROCQ_F32, ne[0], ne[1], ne[2]);
        if (result == ROCQ_OK && o->id == ROCQ_OP_GLU)
            result = rocq_tensor_3d(&arena, &o->other, ROCQ_F32, ne[0], ne[1], ne[2]);
        else if (result == ROCQ_OK)
            result = rocq_tensor_1d(&arena, &o->other, rope ? ROCQ_I32 : ROCQ_F32, n_other);
    }
    if (result == ROCQ_OK) result = rocq_upload(ctx, &o->x, o->in, rocq_tensor_size(&o->x));
    if (result != ROCQ_OK || draw) return result;
    for (int64_t i = 0; i < n_other; i++) {
        const int32_t position = (int32_t)i + 7;
        o->out[i] = 1.5f;
        if (rope) memcpy(&o->out[i], &position, sizeof position);
    }
    return rocq_upload(ctx, &o->other, o->out, rocq_tensor_size(&o->other));
}

static void measure(bench *b, const char *name, rocq_op id, const int64_t ne[3], int64_t n_other,
                    const rocq_sample_params *how) {
    op o = {.b = b, .id = id};
    if (!bench_wants(b, name)) return;
    if (how) o.draw = *how;
    o.draw.token = &o.y;
    o.draw.prob = &o.other;
    o.draw.logits = &o.x;
    const double n = (double)(ne[0] * ne[1] * ne[2]);
    const double bytes = (how ? 4 : 8) * n + 4 * (double)n_other;
    const bench_case c = {.name = name, .bytes = bytes, .run = run,
                          .verify = how ? verify_draw : verify, .user = &o, .warm = true};
    if (make(&o, ne, n_other) == ROCQ_OK) bench_run(b, &c);
    else bench_fail(b, name, rocq_error(b->ctx));
    rocq_buffer_free(b->ctx, &o.memory);
    free(o.in);
    free(o.out);
}

int main(int argc, char **argv) {
    bench b;
    if (!bench_open(&b, argc, argv, "ops")) return 1;
    char name[96];
    for (int64_t n = 1; n <= (b.tiny ? 1 : 512); n += 511) {
        snprintf(name, sizeof name, "ops/rmsnorm/4096/n%d", (int)n);
        measure(&b, name, ROCQ_OP_RMSNORM, (const int64_t[]){4096, n, 1}, 4096, NULL);
        snprintf(name, sizeof name, "ops/rope/d128/h32/n%d", (int)n);
        measure(&b, name, ROCQ_OP_ROPE, (const int64_t[]){HEAD_DIM, HEADS, n}, n, NULL);
        snprintf(name, sizeof name, "ops/swiglu/14336/n%d", (int)n);
        measure(&b, name, ROCQ_OP_GLU, (const int64_t[]){14336, n, 1}, 14336 * n, NULL);
    }
    static const struct {
        const char *name;
        rocq_sample_params how;
    } draws[] = {{"greedy", {.top_k = 0}},
                 {"top_k40", {.temperature = 0.8f, .top_k = 40}},
                 {"top_k40_top_p", {.temperature = 0.8f, .top_k = 40, .top_p = 0.95f}},
                 {"top_p", {.temperature = 0.8f, .top_p = 0.95f}},
                 {"min_p", {.temperature = 0.8f, .min_p = 0.05f}},
                 {"all", {.temperature = 0.8f}}};
    for (size_t i = 0; i < sizeof draws / sizeof *draws; i++) {
        snprintf(name, sizeof name, "ops/draw/%s/151936", draws[i].name);
        measure(&b, name, ROCQ_OP_SAMPLE, (const int64_t[]){N_VOCAB, 1, 1}, 1, &draws[i].how);
    }
    return bench_close(&b);
}
