// examples/quantize.c merges adapters: a model with them merged in gives the logits of the model
// with them beside it; what has none keeps its bytes; wrong files end with one line, and no output.

#define _XOPEN_SOURCE 700 // fork, pipe, posix_openpt

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "counted.h"

// Every allocation of the program goes through these.
#define malloc counted_malloc
#define realloc counted_realloc
#define free counted_free
#define main program_main
#include "../examples/quantize.c"
#include "../examples/llama.h"
#undef main
#undef free
#undef realloc
#undef malloc

#include <cmocka.h>

#include "child.h"
#include "models.h"

enum { N_TOKENS = 23, N_VOCAB = 301 };

static const rocq_format f32[] = {ROCQ_F32, ROCQ_I32}, q4_K[] = {ROCQ_Q4_K, ROCQ_I32};
static const model_spec exact = {"quantize-f32", "qwen2", .n_embd = 64, .n_heads = 2,
    .n_kv_heads = 1, .head_dim = 32, .n_ff = 96, .n_vocab = N_VOCAB, .formats = f32};
static const model_spec coded = {"quantize-q4_K", "llama", .n_embd = 256, .n_heads = 4,
    .n_kv_heads = 2, .head_dim = 64, .n_ff = 256, .n_vocab = N_VOCAB, .formats = q4_K};

// The logits of a fixed text, with the adapters of some files beside the model.
static void logits_of(const char *path, char (*files)[256], const float *scales, int n,
                      float *logits) {
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU};
    const rocq_gguf_desc from = {.path = path};
    const llama_options options = {.n_logits = N_TOKENS, .kv_format = "f32"};
    rocq_ctx *ctx = NULL;
    rocq_gguf *file = NULL, *adapters[2] = {NULL, NULL};
    llama_lora loras[2];
    llama_model m;
    int32_t tokens[N_TOKENS];
    for (int i = 0; i < N_TOKENS; i++) tokens[i] = 3 + i * 37 % (N_VOCAB - 4);
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    assert_int_equal(rocq_gguf_open(ctx, &file, &from), ROCQ_OK);
    if (llama_open(&m, ctx, file, &options) != ROCQ_OK) fail_msg("%s", m.error);
    for (int i = 0; i < n; i++) {
        const rocq_gguf_desc source = {.path = files[i]};
        assert_int_equal(rocq_gguf_open(ctx, &adapters[i], &source), ROCQ_OK);
        loras[i].name = files[i];
        loras[i].file = adapters[i];
        loras[i].scale = scales[i];
    }
    if (llama_set_loras(&m, loras, n) != ROCQ_OK) fail_msg("%s", m.error);
    assert_int_equal(llama_eval(&m, tokens, N_TOKENS, logits), ROCQ_OK);
    llama_close(&m);
    for (int i = 0; i < n; i++) rocq_gguf_close(&adapters[i]);
    rocq_gguf_close(&file);
    rocq_close(&ctx);
}

static double error_of(const float *x, const float *reference) {
    double error = 0, power = 0;
    for (int i = 0; i < N_TOKENS * N_VOCAB; i++) {
        error += ((double)x[i] - (double)reference[i]) * ((double)x[i] - (double)reference[i]);
        power += (double)reference[i] * (double)reference[i];
    }
    return error / power;
}

// A model and two adapters of it.
static void write_all(const model_spec *s, char model[256], char (*adapters)[256]) {
    rocq_ctx *ctx = NULL;
    assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
    strcpy(model, model_path(s->name));
    model_write(ctx, s, model, NULL);
    for (int i = 0; i < 2; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s-%d", s->name, i);
        strcpy(adapters[i], model_path(name));
        model_write_lora(ctx, s, adapters[i], 4 + 3 * i, 8, 1 + (uint64_t)i);
    }
    rocq_close(&ctx);
}

static void test_merge(void **state) {
    static float base[N_TOKENS * N_VOCAB], want[N_TOKENS * N_VOCAB], got[N_TOKENS * N_VOCAB];
    static const float scales[2] = {1.5f, 1};
    (void)state;
    for (int i = 0; i < 2; i++) {
        const model_spec *s = i == 0 ? &exact : &coded;
        char model[256], adapters[2][256], merged[256], first[300];
        write_all(s, model, adapters);
        strcpy(merged, model_path("quantize-merged"));
        snprintf(first, sizeof first, "%s:1.5", adapters[0]);
        const outcome *o = RUN(model, merged, i == 0 ? "keep" : "q8_0", "--lora", first, "--lora",
                               adapters[1]);
        expect_success(o);
        logits_of(model, NULL, NULL, 0, base);
        logits_of(model, adapters, scales, 2, want);
        logits_of(merged, NULL, NULL, 0, got);
        assert_true(error_of(want, base) > 0.01);
        const double error = error_of(got, want);
        printf("# %s: NMSE %.2g from merging\n", s->name, error);
        assert_true(error <= (i == 0 ? 1e-9 : 1e-3)); // F32; Q8_0, which rounds anew
    }
}

// Without an adapter, and with one for other tensors, `keep` copies bytes.
static void test_keep(void **state) {
    char model[256], adapters[2][256], kept[256];
    static unsigned char before[1 << 20], after[1 << 20];
    (void)state;
    write_all(&coded, model, adapters);
    strcpy(kept, model_path("quantize-kept"));
    expect_success(RUN(model, kept, "keep"));
    for (int i = 0; i < 2; i++) {
        rocq_ctx *ctx = NULL;
        rocq_gguf *file[2] = {NULL, NULL};
        const rocq_gguf_desc from[2] = {{.path = model}, {.path = kept}};
        rocq_gguf_tensor t, other;
        assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
        for (int k = 0; k < 2; k++) {
            assert_int_equal(rocq_gguf_open(ctx, &file[k], &from[k]), ROCQ_OK);
        }
        for (int64_t k = 0; k < rocq_gguf_tensor_count(file[0]); k++) {
            char name[64];
            assert_int_equal(rocq_gguf_tensor_at(file[0], k, &t), ROCQ_OK);
            snprintf(name, sizeof name, "%.*s", (int)t.name.length, t.name.data);
            assert_int_equal(rocq_gguf_find_tensor(file[1], name, &other), ROCQ_OK);
            assert_true(t.format == other.format && t.size == other.size);
            assert_true(t.size <= (int64_t)sizeof before);
            assert_int_equal(rocq_gguf_read(ctx, file[0], &t, before), ROCQ_OK);
            assert_int_equal(rocq_gguf_read(ctx, file[1], &other, after), ROCQ_OK);
            const bool has = i == 1 && t.n_dims == 2 && !strstr(name, "_embd");
            assert_true((memcmp(before, after, (size_t)t.size) != 0) == has);
        }
        for (int k = 0; k < 2; k++) rocq_gguf_close(&file[k]);
        rocq_close(&ctx);
        expect_success(RUN(model, kept, "keep", "--lora", adapters[0]));
    }
}

static void test_wrong(void **state) {
    char model[256], adapters[2][256], others[2][256], other[256];
    (void)state;
    write_all(&exact, other, others);
    write_all(&coded, model, adapters);
    const char *out = model_path("quantize-none");
    remove(out);
    expect_failure(RUN(model, out, "keep", "--lora", others[0]), "is no adapter for this model");
    expect_failure(RUN(model, out, "keep", "--lora", model), "is no adapter");
    expect_failure(RUN(model, out, "keep", "--lora", "no/such.gguf"), "no/such.gguf");
    char strong[300];
    snprintf(strong, sizeof strong, "%s:nan", adapters[0]);
    expect_failure(RUN(model, out, "keep", "--lora", strong), "its scale is not between");
    expect_failure(RUN(model, adapters[0], "keep", "--lora", adapters[0]), "would be written over");
    FILE *f = fopen(out, "rb");
    assert_null(f);
    const char *args[] = {model, out, "keep", "--lora", adapters[0], NULL};
    const outcome *o = run_with(-1, args);
    expect_success(o);
    const int64_t n = o->calls;
    assert_true(n > 5 && n < 400);
    for (int64_t k = 0; k < n; k++) expect_failure(run_with(k, args), "");
}

// A weight of three dimensions, as experts have, is none for an adapter, whose halves have two.
static void test_three_dimensions(void **state) {
    (void)state;
    const struct {
        const char *name;
        int32_t n_dims;
        int64_t ne[3];
    } list[] = {{"blk.0.ffn_up_exps.weight", 3, {32, 8, 4}},
                {"blk.0.ffn_up_exps.weight.lora_a", 2, {32, 2, 1}},
                {"blk.0.ffn_up_exps.weight.lora_b", 2, {2, 8, 1}}};
    static const float zeros[32 * 8 * 4];
    char paths[2][256];
    rocq_ctx *ctx = NULL;
    assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
    for (int i = 0; i < 2; i++) { // the model, the adapter
        rocq_gguf_writer *to = NULL;
        strcpy(paths[i], model_path(i == 0 ? "quantize-experts" : "quantize-flat"));
        const rocq_gguf_writer_desc desc = {.path = paths[i]};
        const int first = i, last = 2 * i;
        assert_int_equal(rocq_gguf_writer_open(ctx, &to, &desc), ROCQ_OK);
        rocq_gguf_writer_set_str(to, "general.architecture", "llama");
        if (i == 1) {
            rocq_gguf_writer_set_str(to, "general.type", "adapter");
            rocq_gguf_writer_set_str(to, "adapter.type", "lora");
            rocq_gguf_writer_set_f32(to, "adapter.lora.alpha", 2);
        }
        for (int k = first; k <= last; k++) {
            assert_int_equal(rocq_gguf_writer_add_tensor(to, list[k].name, ROCQ_F32, list[k].n_dims,
                                                         list[k].ne), ROCQ_OK);
        }
        for (int k = first; k <= last; k++) {
            const int64_t n = list[k].ne[0] * list[k].ne[1] * list[k].ne[2];
            assert_int_equal(rocq_gguf_writer_write(to, zeros, 4 * n), ROCQ_OK);
        }
        assert_int_equal(rocq_gguf_writer_close(&to), ROCQ_OK);
    }
    rocq_close(&ctx);
    expect_failure(RUN(paths[0], model_path("quantize-none"), "keep", "--lora", paths[1]),
                   "more than two dimensions");
}

// Integers are no weights: in any format for these they keep theirs, and their bytes.
static void test_integers(void **state) {
    (void)state;
    static const rocq_format formats[2] = {ROCQ_I8, ROCQ_I32};
    static const int64_t ne[2] = {32, 3};
    unsigned char bytes[32 * 3 * 4], back[sizeof bytes];
    char paths[2][256];
    rocq_ctx *ctx = NULL;
    rocq_gguf *file = NULL;
    rocq_gguf_writer *to = NULL;
    rocq_gguf_tensor t;
    for (int i = 0; i < 2; i++)
        strcpy(paths[i], model_path(i == 0 ? "quantize-integers" : "quantize-whole"));
    const rocq_gguf_writer_desc desc = {.path = paths[0]};
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)(31 * i);
    assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_open(ctx, &to, &desc), ROCQ_OK);
    for (int i = 0; i < 2; i++) {
        const char *name = rocq_format_name(formats[i]);
        assert_int_equal(rocq_gguf_writer_add_tensor(to, name, formats[i], 2, ne), ROCQ_OK);
    }
    assert_int_equal(rocq_gguf_writer_write(to, bytes, 32 * 3), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_write(to, bytes, 32 * 3 * 4), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_close(&to), ROCQ_OK);
    expect_success(RUN(paths[0], paths[1], "q8_0"));
    const rocq_gguf_desc from = {.path = paths[1]};
    assert_int_equal(rocq_gguf_open(ctx, &file, &from), ROCQ_OK);
    for (int i = 0; i < 2; i++) {
        const char *name = rocq_format_name(formats[i]);
        assert_int_equal(rocq_gguf_find_tensor(file, name, &t), ROCQ_OK);
        assert_true(t.format == formats[i] && t.size == (i == 0 ? 32 * 3 : 32 * 3 * 4));
        assert_int_equal(rocq_gguf_read(ctx, file, &t, back), ROCQ_OK);
        assert_memory_equal(back, bytes, (size_t)t.size);
    }
    rocq_gguf_close(&file);
    rocq_close(&ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_three_dimensions),
                                       cmocka_unit_test(test_integers),
                                       cmocka_unit_test(test_merge), cmocka_unit_test(test_keep),
                                       cmocka_unit_test(test_wrong)};
    return cmocka_run_group_tests_name("quantize", tests, NULL, NULL);
}
