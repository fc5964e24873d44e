// Whole models of examples/llama.h on a GPU against the CPU backend: every family, weights of
// several formats, few and many tokens at once, and the recorded step of one token. As gpu_ops.c,
// for the stand-in and for real devices.
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include "../examples/llama.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include <stdlib.h>

#include "devices.h"
#include "models.h"

#include "expert_memory.h"

// One model on all devices.
typedef struct trio {
    rocq_gguf *file[N_DEVICES];
    llama_model model[N_DEVICES];
    float *logits[N_DEVICES];
} trio;

enum { N_TOKENS = 40 };

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

// Of logits against the CPU's; NaN where one is.
static double error_of(const trio *t, int device, int64_t n) {
    const float *a = t->logits[CPU], *b = t->logits[device];
    double error = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        error += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)a[i] * (double)a[i];
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
        const double error = error_of(t, i, count);
        if (!(error <= bound)) fail_msg("%d tokens at once: NMSE %g over %g", (int)n, error, bound);
    }
    assert_memory_equal(t->logits[GPU_GRAPH], t->logits[GPU_ONE_BY_ONE],
                        (size_t)count * sizeof(float));
}

// The next token, by way of the recorded step: the same bits as the ops one by one, nothing
// allocated, and no more launches than the step needs.
static void check_step(trio *t, int32_t token, double bound, int64_t most_launches) {
    const int64_t n = t->model[CPU].n_vocab;
    for (int i = 0; i < N_DEVICES; i++) {
        rocq_stats before, after;
        llama_model *m = &t->model[i];
        assert_int_equal(rocq_get_stats(contexts[i], &before), ROCQ_OK);
        if (llama_eval(m, &token, 1, NULL) != ROCQ_OK) fail_msg("%s", m->error);
        assert_int_equal(rocq_get_stats(contexts[i], &after), ROCQ_OK);
        assert_int_equal(after.n_allocs, before.n_allocs);
        assert_int_equal(after.n_fallbacks, 0);
        if (i != CPU && most_launches > 0) {
            assert_in_range(after.n_launches - before.n_launches, 1, most_launches);
        }
        assert_int_equal(
            rocq_download(contexts[i], t->logits[i], &m->last, rocq_tensor_size(&m->last)),
            ROCQ_OK);
    }
    assert_true((t->model[GPU_GRAPH].step != NULL) && (t->model[GPU_ONE_BY_ONE].step == NULL));
    const double error = error_of(t, GPU_GRAPH, n);
    if (!(error <= bound)) fail_msg("a step: NMSE %g over %g", error, bound);
    assert_memory_equal(t->logits[GPU_GRAPH], t->logits[GPU_ONE_BY_ONE], (size_t)n * sizeof(float));
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
    for (int i = 0; i < 2; i++) check_step(t, tokens[i], bound, 0);
    for (int i = GPU_GRAPH; i < N_DEVICES; i++) rocq_tuning_clear(contexts[i]);
}

// layer: launches of one, 0 where they are not counted: then the model is tuned as well.
static void check_model(const model_spec *s, const char *kv, double bound, int64_t layer) {
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
    const int64_t launches = layer > 0 ? layer * t->model[CPU].n_layers + 3 : 0;
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
}

static const rocq_format q4_0[] = {ROCQ_Q4_0, ROCQ_I32}, f16[] = {ROCQ_F16, ROCQ_I32},
                         f32[] = {ROCQ_F32, ROCQ_I32};
static const rocq_format mixed[] = {ROCQ_Q4_K, ROCQ_Q6_K,       ROCQ_Q8_0,
                                    ROCQ_BF16, ROCQ_MXFP6_E2M3, ROCQ_I32};

// Bounds: INT8 activations on one side and F16 on the other; F16 throughout against F32; F32.
static void test_llama(void **state) {
    const model_spec s = {"gpu-llama",  "llama",         .n_embd = 256,
                          .n_heads = 4, .n_kv_heads = 2, .head_dim = 64,
                          .n_ff = 512,  .n_vocab = 301,  .formats = q4_0};
    model_spec other = s;
    (void)state;
    check_model(&s, "f16", 2e-3, 8);
    other.formats = mixed;
    check_model(&other, "q8_0", 2e-3, 0);
    other.formats = f32;
    check_model(&other, "f32", 1e-5, 8);
}

static void test_qwen2(void **state) {
    const model_spec s = {"gpu-qwen2",     "qwen2",        .n_embd = 192, .n_heads = 6,
                          .n_kv_heads = 1, .head_dim = 32, .n_ff = 320,   .n_vocab = 301,
                          .formats = f16,  .biases = true};
    (void)state;
    check_model(&s, "q4_0", 2e-3, 9); // a bias of its own keeps up from joining gate
}

static void test_qwen3(void **state) { // heads of no whole number of blocks; each is normed
    const model_spec s = {"gpu-qwen3",     "qwen3",        .n_embd = 128, .n_heads = 4,
                          .n_kv_heads = 4, .head_dim = 80, .n_ff = 160,   .n_vocab = 301,
                          .formats = q4_0, .tied = true};
    (void)state;
    check_model(&s, "f16", 2e-3, 0);
}

static void test_gemma2(void **state) {
    const model_spec s = {"gpu-gemma2",    "gemma2",        .n_embd = 256, .n_heads = 2,
                          .n_kv_heads = 1, .head_dim = 256, .n_ff = 256,   .n_vocab = 301,
                          .formats = q4_0, .tied = true,    .window = 7,   .attention_cap = 50,
                          .final_cap = 30};
    (void)state;
    check_model(&s, "f16", 2e-3, 12); // two more norms and sums
}

static void test_gpt2(void **state) {
    const model_spec s = {"gpu-gpt2",      "gpt2",         .n_embd = 128, .n_heads = 2,
                          .n_kv_heads = 2, .head_dim = 64, .n_ff = 320,   .n_vocab = 301,
                          .formats = q4_0, .tied = true};
    model_spec other = s;
    (void)state;
    check_model(&s, "f16", 2e-3, 9); // of its 2 layers; positions take two launches of a step
    other.formats = f32;
    check_model(&other, "q8_0", 2e-3, 0);
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
        check_model(&cases[i].spec, "f16", 2e-3, cases[i].layer);
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
        check_model(&cases[i].spec, exact ? "f32" : "f16", cases[i].bound, cases[i].layer);
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

int main(int argc, char **argv) {
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_llama), cmocka_unit_test(test_qwen2),
                                       cmocka_unit_test(test_qwen3), cmocka_unit_test(test_gemma2),
                                       cmocka_unit_test(test_gpt2), cmocka_unit_test(test_others),
                                       cmocka_unit_test(test_expert_memory),
                                       cmocka_unit_test(test_mixtures)};
    return cmocka_run_group_tests_name("gpu models", tests, open_devices, close_devices);
}
