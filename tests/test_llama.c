// Whole models: examples/llama.h against llama.cpp. Random-weight models of every family, in every
// kind of format, are written by models.h and read by both; logits must agree at every position of a
// prompt and of a generated run, and so must every token of that run.

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include "../examples/llama.h"

#include "llama_cpp.h"
#include "models.h"

enum { N_PROMPT = 61, N_GREEDY = 12, N_CTX = 128 };

#define DEMO "examples/model/rocq-demo.gguf"

static const rocq_format f32[] = {ROCQ_F32, ROCQ_I32}, f16[] = {ROCQ_F16, ROCQ_I32},
    q8_0[] = {ROCQ_Q8_0, ROCQ_I32}, q4_0[] = {ROCQ_Q4_0, ROCQ_I32}, q6_K[] = {ROCQ_Q6_K, ROCQ_I32},
    // embedding and ffn_down in Q6_K, attn_v too, the rest in Q4_K
    q4_K[] = {ROCQ_Q6_K, ROCQ_Q4_K, ROCQ_Q4_K, ROCQ_Q6_K, ROCQ_Q4_K, ROCQ_Q4_K, ROCQ_Q4_K, ROCQ_I32},
    others[] = {ROCQ_Q5_K, ROCQ_Q2_K, ROCQ_Q3_K, ROCQ_Q5_0, ROCQ_IQ4_NL, ROCQ_IQ4_XS, ROCQ_MXFP4,
                ROCQ_Q4_1, ROCQ_Q5_1, ROCQ_BF16, ROCQ_F16, ROCQ_I32};

#define SIZES(embd, heads, kv_heads, dim, ff, vocab)                                            \
    .n_embd = embd, .n_heads = heads, .n_kv_heads = kv_heads, .head_dim = dim, .n_ff = ff,      \
    .n_vocab = vocab
#define GEMMA .n_layers = 3, .tied = true, .window = 16, .attention_cap = 1, .final_cap = 30

static const model_spec specs[] = {
    {"llama-F32", "llama", SIZES(256, 4, 4, 64, 256, 517), .formats = f32},
    {"llama-F16", "llama", SIZES(256, 8, 4, 32, 320, 771), .formats = f16, .tied = true},
    {"llama-Q8_0", "llama", SIZES(224, 7, 1, 32, 320, 301), .formats = q8_0},
    {"llama-Q4_0", "llama", SIZES(256, 8, 2, 32, 256, 513), .formats = q4_0, .tied = true},
    {"llama-Q4_K", "llama", SIZES(256, 8, 4, 64, 512, 1021), .formats = q4_K},
    {"llama-Q6_K", "llama", SIZES(256, 7, 1, 64, 256, 601), .formats = q6_K, .tied = true},
    {"llama-others", "llama", SIZES(256, 8, 2, 32, 512, 555), .formats = others},
    {"llama-factors", "llama", SIZES(256, 4, 2, 64, 256, 517), .formats = f32,
     .rope_base = 5e5f, .rope_freqs = true},
    {"llama-linear", "llama", SIZES(256, 4, 2, 64, 256, 517), .formats = f32,
     .rope_scaling = "linear", .rope_factor = 4},
    {"llama-yarn", "llama", SIZES(256, 4, 2, 64, 256, 517), .formats = f32,
     .rope_scaling = "yarn", .rope_factor = 4, .n_ctx_orig = 32},
    {"llama-yarn-Q8_0", "llama", SIZES(256, 2, 1, 128, 256, 517), .formats = q8_0,
     .rope_base = 1e6f, .rope_scaling = "yarn", .rope_factor = 8, .n_ctx_orig = 64},

    {"mistral-F32", "llama", SIZES(256, 8, 2, 64, 256, 769), .formats = f32, .rope_base = 1e6f},
    {"mistral-F16", "llama", SIZES(256, 8, 2, 64, 256, 769), .formats = f16, .rope_base = 1e6f},
    {"mistral-Q8_0", "llama", SIZES(256, 8, 2, 64, 288, 769), .formats = q8_0, .rope_base = 1e6f},
    {"mistral-Q4_0", "llama", SIZES(256, 8, 2, 64, 288, 769), .formats = q4_0, .rope_base = 1e6f},
    {"mistral-Q4_K", "llama", SIZES(256, 4, 1, 64, 512, 769), .formats = q4_K, .rope_base = 1e6f},
    {"mistral-Q6_K", "llama", SIZES(256, 8, 2, 64, 256, 769), .formats = q6_K, .rope_base = 1e6f},

    {"qwen2-F32", "qwen2", SIZES(224, 7, 1, 32, 320, 533), .formats = f32, .rope_base = 1e6f},
    {"qwen2-F16", "qwen2", SIZES(256, 4, 4, 64, 256, 401), .formats = f16, .tied = true},
    {"qwen2-Q8_0", "qwen2", SIZES(448, 14, 2, 32, 352, 707), .formats = q8_0, .tied = true},
    {"qwen2-Q4_0", "qwen2", SIZES(256, 8, 4, 32, 256, 909), .formats = q4_0, .rope_base = 1e6f},
    {"qwen2-Q4_K", "qwen2", SIZES(256, 4, 1, 64, 512, 611), .formats = q4_K, .rope_base = 1e6f},
    {"qwen2-Q6_K", "qwen2", SIZES(448, 14, 2, 32, 256, 499), .formats = q6_K, .tied = true},

    {"qwen3-F32", "qwen3", SIZES(256, 4, 2, 128, 320, 533), .formats = f32, .rope_base = 1e6f},
    {"qwen3-F16", "qwen3", SIZES(256, 4, 4, 64, 256, 401), .formats = f16, .tied = true},
    {"qwen3-Q8_0", "qwen3", SIZES(256, 7, 1, 64, 352, 707), .formats = q8_0, .tied = true},
    {"qwen3-Q4_0", "qwen3", SIZES(256, 8, 2, 64, 256, 909), .formats = q4_0, .rope_base = 1e6f},
    {"qwen3-Q4_K", "qwen3", SIZES(256, 4, 2, 128, 512, 611), .formats = q4_K, .tied = true},
    {"qwen3-Q6_K", "qwen3", SIZES(256, 8, 2, 128, 256, 499), .formats = q6_K, .rope_base = 1e6f},

    {"gemma2-F32", "gemma2", SIZES(256, 4, 2, 64, 256, 517), .formats = f32, GEMMA},
    {"gemma2-F16", "gemma2", SIZES(256, 4, 4, 64, 320, 733), .formats = f16, GEMMA},
    {"gemma2-Q8_0", "gemma2", SIZES(256, 8, 2, 64, 320, 419), .formats = q8_0, GEMMA},
    {"gemma2-Q4_0", "gemma2", SIZES(256, 4, 2, 32, 256, 517), .formats = q4_0, GEMMA},
    {"gemma2-Q4_K", "gemma2", SIZES(256, 8, 4, 64, 256, 651), .formats = q4_K, GEMMA},
    {"gemma2-Q6_K", "gemma2", SIZES(256, 7, 1, 64, 256, 517), .formats = q6_K, GEMMA},
};

enum { N_SPECS = sizeof specs / sizeof *specs };

static double nmse(const float *x, const float *reference, int32_t n) {
    double error = 0, power = 0;
    for (int32_t i = 0; i < n; i++) {
        error += ((double)x[i] - reference[i]) * ((double)x[i] - reference[i]);
        power += (double)reference[i] * reference[i];
    }
    return error / power;
}

static int32_t best_of(const float *x, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

// How far the best leads the second, in units of the values' root mean square.
static double lead_of(const float *x, int32_t n) {
    int32_t best = best_of(x, n);
    double second = -1e30, power = 0;
    for (int32_t i = 0; i < n; i++) {
        if (i != best && x[i] > second) second = x[i];
        power += (double)x[i] * x[i];
    }
    return (x[best] - second) / sqrt(power / n);
}

// A lead that no two results can disagree about while both are within the tolerance of llama.cpp's:
// six standard errors.
static double clear_lead(double tolerance) { return 6 * sqrt(tolerance); }

static float *floats(int64_t n) {
    float *p = (float *)malloc((size_t)n * sizeof *p);
    assert_non_null(p);
    for (int64_t i = 0; i < n; i++) p[i] = NAN;
    return p;
}

typedef struct ours {
    rocq_ctx *ctx;
    rocq_gguf *file;
    llama_model m;
} ours;

static void ours_open(ours *o, const char *path, const llama_options *options) {
    rocq_desc desc = {.prefer = ROCQ_CPU, .n_threads = 2};
    rocq_gguf_desc from = {.path = path};
    memset(o, 0, sizeof *o);
    assert_int_equal(rocq_open(&o->ctx, &desc), ROCQ_OK);
    if (rocq_gguf_open(o->ctx, &o->file, &from) != ROCQ_OK) fail_msg("%s", rocq_error(o->ctx));
    if (llama_open(&o->m, o->ctx, o->file, options) != ROCQ_OK) fail_msg("%s", o->m.error);
}

static void ours_close(ours *o) {
    llama_close(&o->m);
    rocq_gguf_close(&o->file);
    rocq_close(&o->ctx);
}

static void ours_eval(ours *o, const int32_t *tokens, int32_t n, float *logits) {
    if (llama_eval(&o->m, tokens, n, logits) != ROCQ_OK) fail_msg("%s", o->m.error);
}

static int32_t ours_best(ours *o) {
    rocq_sample_params greedy = {.temperature = 0};
    int32_t token = -1;
    if (llama_sample(&o->m, &greedy, &token) != ROCQ_OK) fail_msg("%s", o->m.error);
    return token;
}

static void random_prompt(int32_t *tokens, int32_t n_vocab, uint64_t seed) {
    model_random r = {seed};
    for (int32_t i = 0; i < N_PROMPT; i++)
        tokens[i] = (int32_t)(model_u64(&r) % (uint64_t)n_vocab);
}

// llama.cpp's greedy run: logits of the prompt and of every token of the run, and the run's tokens.
// Prompts are tried until each token leads clearly and the run is no mere repetition, which random
// weights do not always grant.
static void peer_run(const char *path, int32_t kv_type, double lead, int32_t *prompt, float *logits,
                     int32_t *run, int32_t *n_vocab) {
    bool fine = false;
    peer_model p;
    peer_load(&p, path, N_CTX, kv_type);
    *n_vocab = p.n_vocab;
    for (uint64_t seed = 1; seed <= 1000 && !fine; seed++) {
        peer_forget(&p);
        random_prompt(prompt, p.n_vocab, seed);
        peer_decode(&p, prompt, N_PROMPT, logits);
        fine = true;
        int32_t n_distinct = 0;
        for (int32_t i = 0; i < N_GREEDY && fine; i++) {
            const float *last = logits + (int64_t)(N_PROMPT - 1 + i) * p.n_vocab;
            fine = lead_of(last, p.n_vocab) > lead;
            run[i] = best_of(last, p.n_vocab);
            bool seen = false;
            for (int32_t k = 0; k < i; k++) seen = seen || run[k] == run[i];
            n_distinct += !seen;
            peer_decode(&p, &run[i], 1, logits + (int64_t)(N_PROMPT + i) * p.n_vocab);
        }
        fine = fine && n_distinct >= 4;
    }
    peer_close(&p);
    if (!fine) fail_msg("no prompt gives llama.cpp a run without near-ties");
}

static void test_model(void **state) {
    const model_spec *s = (const model_spec *)*state;
    bool exact = s->formats[0] == ROCQ_F32;
    double tolerance = exact || s->formats[0] == ROCQ_F16 ? 1e-5 : 1e-3, worst = 0;
    if (!peer_open()) skip();

    const char *path = model_path(s->name);
    rocq_ctx *ctx = NULL;
    assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
    model_write(ctx, s, path, peer.quantize);
    rocq_close(&ctx);

    int32_t prompt[N_PROMPT], run[N_GREEDY], n_vocab = 0;
    int64_t n = (int64_t)(N_PROMPT + N_GREEDY) * s->n_vocab;
    float *expected = floats(n), *logits = floats(n);
    peer_run(path, exact ? 0 : 1, clear_lead(tolerance), prompt, expected, run, &n_vocab);
    assert_int_equal(n_vocab, s->n_vocab);

    // A batch that the prompt is no multiple of, so that batches and the cache meet.
    ours o;
    llama_options options = {.n_ctx = N_CTX, .n_batch = 16, .n_logits = 5,
                             .kv_format = exact ? "f32" : "f16"};
    ours_open(&o, path, &options);
    assert_int_equal(o.m.n_vocab, n_vocab);
    ours_eval(&o, prompt, N_PROMPT, logits);
    for (int32_t i = 0; i < N_GREEDY; i++) {
        int32_t token = ours_best(&o);
        if (token != run[i]) fail_msg("token %d of the run is %d, not %d", i, token, run[i]);
        ours_eval(&o, &token, 1, logits + (int64_t)(N_PROMPT + i) * n_vocab);
    }
    for (int32_t i = 0; i < N_PROMPT + N_GREEDY; i++) {
        double e = nmse(logits + (int64_t)i * n_vocab, expected + (int64_t)i * n_vocab, n_vocab);
        if (!(e <= tolerance)) fail_msg("position %d: NMSE %g", i, e);
        if (e > worst) worst = e;
    }
    printf("# %s: NMSE at most %.2g\n", s->name, worst);
    ours_close(&o);
    free(logits);
    free(expected);
}

int main(void) {
    static struct CMUnitTest tests[N_SPECS];
    int32_t n = 0;
    for (int32_t i = 0; i < N_SPECS; i++) {
        tests[n].name = specs[i].name;
        tests[n].test_func = test_model;
        tests[n++].initial_state = (void *)(uintptr_t)&specs[i]; // read only
    }
    return _cmocka_run_group_tests("llama", tests, (size_t)n, NULL, NULL);
}
