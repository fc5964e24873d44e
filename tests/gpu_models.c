// Whole models of examples/llama.h on a GPU against the CPU backend: every family, weights of
// several formats, few and many tokens at once, and the recorded step of one token; the same greedy
// text of every family in F32 and quantized; and what quantized caches cost. As gpu_ops.c,
// for the stand-in and for real devices.
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

// Models of test_outliers may have a cache whose rows are not turned.
static bool no_hadamard;
static rocq_result create_kv(rocq_ctx *ctx, rocq_kv **kv, const rocq_kv_desc *desc) {
    rocq_kv_desc own = *desc;
    own.no_hadamard = no_hadamard;
    return rocq_kv_create(ctx, kv, &own);
}
#define rocq_kv_create create_kv
#include "../examples/llama.h"
#undef rocq_kv_create

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include <stdlib.h>

#include "devices.h"
#include "models.h"

#include "expert_memory.h"
#include "sharing.h"

// One model on all devices.
typedef struct trio {
    rocq_gguf *file[N_DEVICES];
    llama_model model[N_DEVICES];
    float *logits[N_DEVICES];
} trio;

enum { N_TOKENS = 40 };

static const rocq_format q4_0[] = {ROCQ_Q4_0, ROCQ_I32}, f16[] = {ROCQ_F16, ROCQ_I32},
                         f32[] = {ROCQ_F32, ROCQ_I32};

static void trio_open(trio *t, const model_spec *s, const char *kv) {
    const rocq_gguf_desc source = {.path = model_path(s->name)};
    const llama_options options = {.n_ctx = 96, .n_batch = 20, .n_logits = 20, .kv_format = kv,
                                   .kv_page = strcmp(kv, "f16") == 0 ? 0 : 8}; // both layouts
    model_write(contexts[CPU], s, source.path, NULL);
    for (int i = 0; i < N_DEVICES; i++) {
        assert_int_equal(rocq_gguf_open(contexts[i], &t->file[i], &source), ROCQ_OK);
        if (llama_open(&t->model[i], contexts[i], t->file[i], &options) != ROCQ_OK) {
            fail_msg("%s: %s", s->name, t->model[i].error);
        }
        t->logits[i] = (float *)malloc(N_TOKENS * (size_t)s->n_vocab * sizeof(float));
        assert_non_null(t->logits[i]);
    }
}

static void trio_close(trio *t) {
    for (int i = 0; i < N_DEVICES; i++) {
        llama_close(&t->model[i]);
        rocq_gguf_close(&t->file[i]);
        free(t->logits[i]);
    }
}

// NaN where one is.
static double nmse(const float *x, const float *reference, int64_t n) {
    double error = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        const double d = (double)x[i] - (double)reference[i];
        error += d * d;
        size += (double)reference[i] * (double)reference[i];
    }
    return error / size;
}

// Logits of all tokens, n at a time, from an empty cache.
static void check_prompt(trio *t, const int32_t *tokens, int32_t n, double bound) {
    const int64_t count = (int64_t)n * t->model[CPU].n_vocab;
    for (int i = 0; i < N_DEVICES; i++) {
        t->model[i].n_past = 0;
        if (llama_eval(&t->model[i], tokens, n, t->logits[i]) != ROCQ_OK) {
            fail_msg("%s", t->model[i].error);
        }
    }
    for (int i = GPU_GRAPH; i < N_DEVICES; i++) {
        const double error = nmse(t->logits[i], t->logits[CPU], count);
        if (!(error <= bound)) fail_msg("%d tokens at once: NMSE %g over %g", (int)n, error, bound);
    }
    assert_memory_equal(t->logits[GPU_GRAPH], t->logits[GPU_ONE_BY_ONE],
                        (size_t)count * sizeof(float));
}

// The next token, by way of the recorded step: the same bits as the ops one by one, nothing
// allocated, and no more launches than the step needs.
static void check_step(trio *t, int32_t token, double bound, const int64_t *most_launches) {
    const int64_t n = t->model[CPU].n_vocab;
    for (int i = 0; i < N_DEVICES; i++) {
        rocq_stats before, after;
        llama_model *m = &t->model[i];
        assert_int_equal(rocq_get_stats(contexts[i], &before), ROCQ_OK);
        if (llama_eval(m, &token, 1, NULL) != ROCQ_OK) fail_msg("%s", m->error);
        assert_int_equal(rocq_get_stats(contexts[i], &after), ROCQ_OK);
        assert_int_equal(after.n_allocs, before.n_allocs);
        assert_int_equal(after.n_fallbacks, 0);
        if (i != CPU && most_launches[i] > 0) {
            assert_in_range(after.n_launches - before.n_launches, 1, most_launches[i]);
        }
        assert_int_equal(
            rocq_download(contexts[i], t->logits[i], &m->last, rocq_tensor_size(&m->last)),
            ROCQ_OK);
    }
    assert_true((t->model[GPU_GRAPH].step != NULL) && (t->model[GPU_ONE_BY_ONE].step == NULL));
    const double error = nmse(t->logits[GPU_GRAPH], t->logits[CPU], n);
    if (!(error <= bound)) fail_msg("a step: NMSE %g over %g", error, bound);
    assert_memory_equal(t->logits[GPU_GRAPH], t->logits[GPU_ONE_BY_ONE], (size_t)n * sizeof(float));
}

static bool tried[LLAMA__N_FAMILIES][2]; // in F32, quantized

enum { N_START = 19, N_GREEDY = 8, N_SEEDS = 400 };

// How far the best of n leads the second, in units of their root mean square.
static double lead_of(const float *x, int32_t n, int32_t *best) {
    double second = -1e30, power = 0;
    *best = 0;
    for (int32_t i = 1; i < n; i++) {
        if (x[i] > x[*best]) *best = i;
    }
    for (int32_t i = 0; i < n; i++) {
        if (i != *best && (double)x[i] > second) second = (double)x[i];
        power += (double)x[i] * (double)x[i];
    }
    return ((double)x[*best] - second) / sqrt(power / n);
}

static void eval(llama_model *m, const int32_t *tokens, int32_t n, float *logits) {
    if (llama_eval(m, tokens, n, n > 1 ? logits : NULL) != ROCQ_OK) fail_msg("%s", m->error);
    if (n > 1) return;
    assert_int_equal(rocq_download(m->ctx, logits, &m->last, rocq_tensor_size(&m->last)), ROCQ_OK);
}

// Conformance of the model in the file of s: what tests/test_llama.c demands of the CPU backend
// beside llama.cpp, of a GPU beside the CPU backend. Logits agree at every position of a prompt,
// read in batches, and of a greedy run by the recorded step, and the run's tokens are the same.
// Prompts are tried until each token leads by five standard errors of the tolerance.
static void check_greedy(const model_spec *s) {
    const bool exact = s->formats[0] == ROCQ_F32;
    const double bound = exact ? 1e-5 : 1e-3;
    const rocq_gguf_desc source = {.path = model_path(s->name)};
    const int64_t n = s->n_vocab, count = (N_START + N_GREEDY) * n;
    double worst = 0;
    bool fine = false;
    int32_t tokens[N_START + N_GREEDY], token = -1;
    llama_model m[2];
    rocq_gguf *file[2];
    float *logits[2];
    for (int i = 0; i < 2; i++) {
        const llama_options options = {.n_ctx = 64, .n_batch = 16, .n_logits = 16,
                                       .kv_format = exact ? "f32" : "f16"};
        rocq_ctx *ctx = contexts[i == 0 ? CPU : GPU_GRAPH];
        assert_int_equal(rocq_gguf_open(ctx, &file[i], &source), ROCQ_OK);
        if (llama_open(&m[i], ctx, file[i], &options) != ROCQ_OK) fail_msg("%s", m[i].error);
        logits[i] = (float *)malloc((size_t)count * sizeof(float));
        assert_non_null(logits[i]);
    }
    for (uint64_t seed = 1; seed <= N_SEEDS && !fine; seed++) {
        model_random r = {seed};
        int n_distinct = 0;
        for (int i = 0; i < N_START; i++) tokens[i] = (int32_t)(model_u64(&r) % (uint64_t)n);
        m[0].n_past = 0;
        eval(&m[0], tokens, N_START, logits[0]);
        fine = true;
        for (int i = N_START; i < N_START + N_GREEDY && fine; i++) {
            bool seen = false;
            fine = lead_of(logits[0] + (i - 1) * n, s->n_vocab, &tokens[i]) > 5 * sqrt(bound);
            for (int k = N_START; k < i; k++) seen = seen || tokens[k] == tokens[i];
            n_distinct += !seen;
            eval(&m[0], &tokens[i], 1, logits[0] + i * n);
        }
        fine = fine && n_distinct >= 3;
    }
    if (!fine) fail_msg("%s: no prompt gives a run without near-ties", s->name);
    eval(&m[1], tokens, N_START, logits[1]);
    for (int i = N_START; i < N_START + N_GREEDY; i++) {
        const rocq_sample_params greedy = {.temperature = 0};
        if (llama_sample(&m[1], &greedy, &token) != ROCQ_OK) fail_msg("%s", m[1].error);
        if (token != tokens[i]) {
            fail_msg("%s: token %d is %d, expected %d", s->name, i, (int)token, (int)tokens[i]);
        }
        eval(&m[1], &token, 1, logits[1] + i * n);
    }
    for (int i = 0; i < N_START + N_GREEDY; i++) {
        const double error = nmse(logits[1] + i * n, logits[0] + i * n, n);
        if (!(error <= bound)) {
            fail_msg("%s, position %d: NMSE %g over %g", s->name, i, error, bound);
        }
        if (error > worst) worst = error;
    }
    if (exact || s->formats[0] != ROCQ_F16) tried[m[1].row - llama__families][!exact] = true;
    print_message("# %s in %s: NMSE at most %.2g, %d greedy tokens the same\n", s->name,
                  rocq_format_name(s->formats[0]), worst, (int)N_GREEDY);
    for (int i = 0; i < 2; i++) {
        llama_close(&m[i]);
        rocq_gguf_close(&file[i]);
        free(logits[i]);
    }
}

typedef struct text {
    char data[8192];
    int64_t size;
} text;

static bool append(const void *src, int64_t size, void *user) {
    text *t = (text *)user;
    if (t->size + size > (int64_t)sizeof t->data) return false;
    memcpy(t->data + t->size, src, (size_t)size);
    t->size += size;
    return true;
}

// Tuned on one GPU context and loaded by the other, both are right, and agree.
static void check_tuned(trio *t, const int32_t *tokens, double bound) {
    text found = {.size = 0};
    rocq_tune_result result;
    llama_model *m = &t->model[GPU_GRAPH];
    assert_int_equal(llama_tune(&t->model[CPU], NULL), ROCQ_E_UNSUPPORTED);
    if (llama_tune(m, &result) != ROCQ_OK) fail_msg("%s", m->error);
    assert_true(result.speedup >= 1 && result.n_tried > 0 && !result.cached && m->n_past == 0);
    assert_int_equal(rocq_tuning_save(contexts[GPU_GRAPH], append, &found), ROCQ_OK);
    assert_int_equal(rocq_tuning_load(contexts[GPU_ONE_BY_ONE], found.data, found.size), ROCQ_OK);
    assert_int_equal(llama_tune(&t->model[GPU_ONE_BY_ONE], &result), ROCQ_OK);
    assert_true(result.cached && !t->model[GPU_ONE_BY_ONE].step);
    check_prompt(t, tokens, 1, bound);
    check_prompt(t, tokens, 9, bound);
    const int64_t any[N_DEVICES] = {0};
    for (int i = 0; i < 2; i++) check_step(t, tokens[i], bound, any);
    for (int i = GPU_GRAPH; i < N_DEVICES; i++) rocq_tuning_clear(contexts[i]);
}

// The same in F32 and in Q4_0, there with all experts taken: see test_mixtures.
static void check_text(const model_spec *s) {
    check_greedy(s);
    for (int i = 0; i < 2; i++) {
        model_spec other = *s;
        other.formats = i == 0 ? f32 : q4_0;
        if (other.formats[0] == s->formats[0]) continue;
        if (i == 1) other.n_used = s->n_experts;
        model_write(contexts[CPU], &other, model_path(s->name), NULL);
        check_greedy(&other);
    }
}

// layer: launches of one, op by op; 0 where they are not counted: then the model is tuned as well.
// in_graph: launches of a layer in the recorded step, where ops share them.
static void check_model(const model_spec *s, const char *kv, double bound, int64_t layer,
                        int64_t in_graph) {
    static const int32_t sizes[] = {1, 7, 8, 9, 33};
    trio *t = (trio *)calloc(1, sizeof *t);
    int32_t tokens[N_TOKENS];
    assert_non_null(t);
    for (int i = 0; i < N_TOKENS; i++) tokens[i] = 3 + i * 37 % (s->n_vocab - 4);
    trio_open(t, s, kv);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        check_prompt(t, tokens, sizes[i], bound);
    }
    // Beside the layers: embedding, norm, logits.
    int64_t launches[N_DEVICES] = {0};
    for (int i = GPU_GRAPH; layer > 0 && i < N_DEVICES; i++) {
        launches[i] = (i == GPU_GRAPH ? in_graph : layer) * t->model[CPU].n_layers + 3;
    }
    check_step(t, tokens[0], bound, launches);
    for (int i = 0; i < N_DEVICES; i++) { // steps see nothing of it
        rocq_stats before, after;
        assert_int_equal(rocq_get_stats(contexts[i], &before), ROCQ_OK);
        if (llama_warm(&t->model[i]) != ROCQ_OK) fail_msg("%s", t->model[i].error);
        assert_int_equal(rocq_get_stats(contexts[i], &after), ROCQ_OK);
        assert_int_equal(after.n_replays_checked - before.n_replays_checked, i == GPU_GRAPH);
        assert_int_equal(after.n_replays_refused, 0);
    }
    for (int i = 1; i < 3; i++) check_step(t, tokens[i], bound, launches);
    if (layer == 0) check_tuned(t, tokens, bound);
    trio_close(t);
    free(t);
    check_text(s);
}

static const rocq_format mixed[] = {ROCQ_Q4_K, ROCQ_Q6_K,       ROCQ_Q8_0,
                                    ROCQ_BF16, ROCQ_MXFP6_E2M3, ROCQ_I32};

// Bounds of logits taken together: INT8 activations on one side and F16 on the other; F16
// throughout against F32; F32.
static void test_llama(void **state) {
    const model_spec s = {"gpu-llama",  "llama",         .n_embd = 256,
                          .n_heads = 4, .n_kv_heads = 2, .head_dim = 64,
                          .n_ff = 512,  .n_vocab = 301,  .formats = q4_0};
    model_spec other = s;
    (void)state;
    check_model(&s, "f16", 2e-3, 8, 5);
    other.formats = mixed;
    check_model(&other, "q8_0", 2e-3, 0, 0);
    other.formats = f32;
    check_model(&other, "f32", 1e-5, 8, 8);
}

static void test_qwen2(void **state) {
    const model_spec s = {"gpu-qwen2",     "qwen2",        .n_embd = 192, .n_heads = 6,
                          .n_kv_heads = 1, .head_dim = 32, .n_ff = 320,   .n_vocab = 301,
                          .formats = f16,  .biases = true};
    (void)state;
    check_model(&s, "q4_0", 2e-3, 9, 9); // a bias of its own keeps up from joining gate
}

static void test_qwen3(void **state) { // heads of no whole number of blocks; each is normed
    const model_spec s = {"gpu-qwen3",     "qwen3",        .n_embd = 128, .n_heads = 4,
                          .n_kv_heads = 4, .head_dim = 80, .n_ff = 160,   .n_vocab = 301,
                          .formats = q4_0, .tied = true};
    (void)state;
    check_model(&s, "f16", 2e-3, 0, 0);
}

static void test_gemma2(void **state) {
    const model_spec s = {"gpu-gemma2",    "gemma2",        .n_embd = 256, .n_heads = 2,
                          .n_kv_heads = 1, .head_dim = 256, .n_ff = 256,   .n_vocab = 301,
                          .formats = q4_0, .tied = true,    .window = 7,   .attention_cap = 50,
                          .final_cap = 30};
    (void)state;
    check_model(&s, "f16", 2e-3, 12, 12); // two more norms and sums
}

static void test_gpt2(void **state) {
    const model_spec s = {"gpu-gpt2",      "gpt2",         .n_embd = 128, .n_heads = 2,
                          .n_kv_heads = 2, .head_dim = 64, .n_ff = 320,   .n_vocab = 301,
                          .formats = q4_0, .tied = true};
    model_spec other = s;
    (void)state;
    check_model(&s, "f16", 2e-3, 9, 9); // of its 2 layers; positions take two launches of a step
    other.formats = f32;
    check_model(&other, "q8_0", 2e-3, 0, 0);
}

static void granite_keys(rocq_gguf_writer *w) {
    model_set_f32(w, "granite", "embedding_scale", 2);
    model_set_f32(w, "granite", "residual_scale", 0.6f);
    model_set_f32(w, "granite", "logit_scale", 1.7f);
}

static void granitemoe_keys(rocq_gguf_writer *w) {
    model_set_f32(w, "granitemoe", "residual_scale", 0.6f);
    model_set_f32(w, "granitemoe", "logit_scale", 1.7f);
}

static void mistral3_keys(rocq_gguf_writer *w) {
    model_set_f32(w, "mistral3", "attention.temperature_scale", 0.3f);
    model_set_f32(w, "mistral3", "rope.scaling.yarn_log_multiplier", 1);
}

// The families whose layers launch what those of others do, or one more.
static void test_others(void **state) {
    static const struct {
        model_spec spec;
        int64_t layer; // launches
    } cases[] = {
        {{"gpu-gemma3", "gemma3", .n_embd = 128, .n_heads = 2, .n_kv_heads = 1, .head_dim = 64,
          .n_ff = 160, .n_vocab = 301, .n_layers = 6, .formats = q4_0, .tied = true,
          .rope_base = 1e6f, .window = 7}, 14},
        {{"gpu-granite", "granite", .n_embd = 128, .n_heads = 4, .n_kv_heads = 2, .head_dim = 32,
          .n_ff = 160, .n_vocab = 301, .formats = q4_0, .edit = granite_keys}, 8},
        {{"gpu-smollm3", "smollm3", .n_embd = 128, .n_heads = 4, .n_kv_heads = 2, .head_dim = 32,
          .n_ff = 160, .n_vocab = 301, .n_layers = 4, .formats = q4_0, .tied = true}, 8},
        {{"gpu-mistral3", "mistral3", .n_embd = 128, .n_heads = 4, .n_kv_heads = 2, .head_dim = 32,
          .n_ff = 160, .n_vocab = 301, .formats = q4_0, .rope_scaling = "yarn", .rope_factor = 4,
          .n_ctx_orig = 16, .edit = mistral3_keys}, 9},
        {{"gpu-phi", "phi3", .n_embd = 128, .n_heads = 4, .n_kv_heads = 2, .head_dim = 32,
          .n_ff = 160, .n_vocab = 301, .formats = q4_0, .n_rot = 24, .rope_factors = true,
          .n_ctx_orig = 32}, 9},
        {{"gpu-lfm2", "lfm2", .n_embd = 128, .n_heads = 4, .n_kv_heads = 2, .head_dim = 32,
          .n_ff = 160, .n_vocab = 301, .n_layers = 3, .formats = q4_0, .tied = true, .attends = 3,
          .n_taps = 3}, 10},
        {{"gpu-gemma4", "gemma4", .n_embd = 128, .n_heads = 2, .n_kv_heads = 1, .head_dim = 128,
          .n_ff = 160, .n_vocab = 301, .n_layers = 4, .formats = q4_0, .tied = true,
          .rope_base = 1e6f, .window = 7, .globals = 2, .local_dim = 64, .n_shared_kv = 2,
          .n_apart = 64, .final_cap = 30}, 20},
        {{"gpu-gemma4-same", "gemma4", .n_embd = 128, .n_heads = 2, .n_kv_heads = 2,
          .head_dim = 512, .n_ff = 160, .n_vocab = 301, .formats = q4_0, .tied = true,
          .rope_base = 1e6f, .window = 7, .globals = 2, .local_dim = 256, .global_kv_heads = 1,
          .keys_as_values = true, .final_cap = 30}, 16},
        {{"gpu-qwen35", "qwen35", .n_embd = 128, .n_heads = 4, .n_kv_heads = 2, .head_dim = 32,
          .n_ff = 160, .n_vocab = 301, .n_layers = 2, .formats = q4_0, .n_rot = 16, .attends = 2,
          .n_taps = 4, .delta_groups = 2, .delta_heads = 4, .delta_dim = 32}, 12}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_model(&cases[i].spec, "f16", 2e-3, cases[i].layer, cases[i].layer);
    }
}

// Mixtures. Where weights are rounded all experts are taken: a router's near-tie would go one way
// here and another way there.
static void test_mixtures(void **state) {
    static const rocq_format mxfp4[] = {ROCQ_MXFP4, ROCQ_I32};
    static const struct {
        model_spec spec;
        double bound;
        int64_t layer; // launches
    } cases[] = {
        {{"gpu-mixtral", "llama", .n_embd = 128, .n_heads = 4, .n_kv_heads = 2, .head_dim = 32,
          .n_ff = 96, .n_vocab = 301, .formats = q4_0, .n_experts = 3, .n_used = 3}, 2e-3, 12},
        {{"gpu-qwen3moe", "qwen3moe", .n_embd = 128, .n_heads = 4, .n_kv_heads = 2, .head_dim = 32,
          .n_ff = 96, .n_vocab = 301, .formats = f32, .n_experts = 9, .n_used = 3}, 1e-5, 12},
        {{"gpu-gpt-oss", "gpt-oss", .n_embd = 128, .n_heads = 4, .n_kv_heads = 2, .head_dim = 32,
          .n_ff = 96, .n_vocab = 301, .formats = mxfp4, .n_experts = 4, .n_used = 4, .window = 7,
          .rope_scaling = "yarn", .rope_factor = 4, .n_ctx_orig = 32}, 2e-3, 12},
        {{"gpu-granitemoe", "granitemoe", .n_embd = 128, .n_heads = 4, .n_kv_heads = 2,
          .head_dim = 32, .n_ff = 96, .n_vocab = 301, .formats = q4_0, .n_experts = 3, .n_used = 3,
          .n_shared = 160, .edit = granitemoe_keys}, 2e-3, 14},
        {{"gpu-lfm2moe", "lfm2moe", .n_embd = 128, .n_heads = 4, .n_kv_heads = 2, .head_dim = 32,
          .n_ff = 96, .n_vocab = 301, .n_layers = 4, .formats = f32, .n_experts = 9, .n_used = 3,
          .n_shared = 160, .attends = 2, .n_taps = 3, .n_leading = 2}, 1e-5, 13},
        {{"gpu-gemma4moe", "gemma4", .n_embd = 128, .n_heads = 2, .n_kv_heads = 1,
          .head_dim = 64, .n_ff = 96, .n_vocab = 301, .n_layers = 2, .formats = f32, .tied = true,
          .rope_base = 1e6f, .window = 7, .globals = 2, .local_dim = 32, .keys_as_values = true,
          .n_experts = 9, .n_used = 3, .n_shared = 160, .joined = true, .final_cap = 30}, 1e-5, 26},
        {{"gpu-qwen35moe", "qwen35moe", .n_embd = 128, .n_heads = 4, .n_kv_heads = 2,
          .head_dim = 32, .n_ff = 96, .n_vocab = 301, .n_layers = 3, .formats = f32,
          .n_experts = 9, .n_used = 3, .n_shared = 160, .n_rot = 16, .attends = 2, .n_taps = 4,
          .delta_groups = 1, .delta_heads = 3, .delta_dim = 64}, 1e-5, 16}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const bool exact = cases[i].bound < 1e-4;
        check_model(&cases[i].spec, exact ? "f32" : "f16", cases[i].bound, cases[i].layer,
                    cases[i].layer);
    }
}

static void test_expert_memory(void **state) {
    static const rocq_format mxfp4[] = {ROCQ_MXFP4, ROCQ_I32};
    static const model_spec cases[] = {
        {"gpu-kept-qwen3moe", "qwen3moe", .n_embd = 128, .n_heads = 4, .n_kv_heads = 2,
         .head_dim = 32, .n_ff = 96, .n_vocab = 301, .formats = q4_0, .n_experts = 9, .n_used = 3},
        {"gpu-kept-gpt-oss", "gpt-oss", .n_embd = 128, .n_heads = 4, .n_kv_heads = 2,
         .head_dim = 32, .n_ff = 96, .n_vocab = 301, .formats = mxfp4, .n_experts = 4,
         .n_used = 4, .window = 7}};
    (void)state;
    for (int k = 0; k < 2; k++) {
        const char *path = model_path(cases[k].name);
        model_write(contexts[CPU], &cases[k], path, NULL);
        check_expert_memory(contexts[k == 0 ? GPU_GRAPH : GPU_ONE_BY_ONE], path, true);
    }
}

// Weights in planes on the device, which several models use; experts beside them, in host memory.
static void test_sharing(void **state) {
    static const model_spec cases[] = {
        {"gpu-shared-qwen3", "qwen3", .n_embd = 64, .n_heads = 2, .n_kv_heads = 1, .head_dim = 32,
         .n_ff = 96, .n_vocab = 301, .formats = q4_0},
        {"gpu-shared-qwen3moe", "qwen3moe", .n_embd = 64, .n_heads = 2, .n_kv_heads = 1,
         .head_dim = 32, .n_ff = 64, .n_vocab = 301, .formats = q4_0, .n_experts = 5, .n_used = 2}};
    (void)state;
    for (int k = 0; k < 2; k++) {
        const char *path = model_path(cases[k].name);
        model_write(contexts[CPU], &cases[k], path, NULL);
        check_sharing(contexts[k == 0 ? GPU_GRAPH : GPU_ONE_BY_ONE], path, k == 0 ? 0 : 30000);
    }
}

// What a quantized cache brings into the logits, of keys with a few large elements: the NMSE over a
// prompt, against a cache in F32 on the same device. As tests/test_llama.c, which has llama.cpp
// beside the CPU backend.
static void test_outliers(void **state) {
    enum { N = 61, CACHES = 5 };
    static const char *const formats[CACHES] = {"f32", "q8_0", "q4_0", "q8_0", "q4_0"};
    static const model_spec models[] = {
        {"gpu-outliers-64", "qwen2", .n_embd = 448, .n_heads = 7, .n_kv_heads = 1, .head_dim = 64,
         .n_ff = 352, .n_vocab = 307, .formats = f32, .k_outlier = 40},
        {"gpu-outliers-128", "qwen2", .n_embd = 512, .n_heads = 4, .n_kv_heads = 2, .head_dim = 128,
         .n_ff = 352, .n_vocab = 307, .formats = f32, .k_outlier = 40}};
    (void)state;
    for (int k = 0; k < 2; k++) {
        const model_spec *s = &models[k];
        const rocq_gguf_desc source = {.path = model_path(s->name)};
        const int64_t n = (int64_t)N * s->n_vocab;
        float *logits[2][CACHES];
        double error[2][CACHES];
        int32_t tokens[N];
        model_random r = {5};
        for (int i = 0; i < N; i++) {
            tokens[i] = (int32_t)(model_u64(&r) % (uint64_t)s->n_vocab);
        }
        model_write(contexts[CPU], s, source.path, NULL);
        for (int i = 0; i < 2 * CACHES; i++) {
            const llama_options options = {.n_ctx = 128, .n_logits = N,
                                           .kv_format = formats[i % CACHES]};
            rocq_ctx *ctx = contexts[i < CACHES ? CPU : GPU_GRAPH];
            rocq_gguf *file;
            llama_model m;
            float *out = logits[i / CACHES][i % CACHES] = (float *)malloc((size_t)n * sizeof *out);
            assert_non_null(out);
            no_hadamard = i % CACHES > 2;
            assert_int_equal(rocq_gguf_open(ctx, &file, &source), ROCQ_OK);
            if (llama_open(&m, ctx, file, &options) != ROCQ_OK) fail_msg("%s", m.error);
            eval(&m, tokens, N, out);
            llama_close(&m);
            rocq_gguf_close(&file);
            no_hadamard = false;
            error[i / CACHES][i % CACHES] = nmse(out, logits[i / CACHES][0], n);
        }
        assert_true(nmse(logits[1][0], logits[0][0], n) <= 1e-5);
        for (int i = 1; i < 3; i++) {
            print_message("# %s, KV in %s: NMSE %.3g, as they are %.3g; the CPU's %.3g and %.3g\n",
                          s->name, formats[i], error[1][i], error[1][i + 2], error[0][i],
                          error[0][i + 2]);
            assert_true(error[1][i] <= 1.2 * error[0][i] && error[1][i] <= 0.6 * error[1][i + 2]);
        }
        for (int i = 0; i < 2 * CACHES; i++) free(logits[i / CACHES][i % CACHES]);
    }
}

// None of examples/families.h is forgotten above.
static void test_families(void **state) {
    if (*(const bool *)*state) skip(); // some of the tests alone
    for (int i = 0; i < LLAMA__N_FAMILIES; i++) {
        if (tried[i][0] && tried[i][1]) continue;
        fail_msg("row %d of llama__families, %s, was not tried in F32 and quantized", i,
                 llama__families[i].name);
    }
}

int main(int argc, char **argv) {
    static bool some;
    some = argc > 1;
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_llama), cmocka_unit_test(test_qwen2),
                                       cmocka_unit_test(test_qwen3), cmocka_unit_test(test_gemma2),
                                       cmocka_unit_test(test_gpt2), cmocka_unit_test(test_others),
                                       cmocka_unit_test(test_expert_memory),
                                       cmocka_unit_test(test_sharing),
                                       cmocka_unit_test(test_outliers),
                                       cmocka_unit_test(test_mixtures),
                                       cmocka_unit_test_prestate(test_families, &some)};
    return cmocka_run_group_tests_name("gpu models", tests, open_devices, close_devices);
}
