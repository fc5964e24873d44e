// examples/train.h on a GPU against the CPU backend: some steps of small models, whole and by
// adapters over quantized weights, from a graph and op by op. As gpu_ops.c, for the stand-in and
// for real devices. test_train.c compares the CPU's own steps with PyTorch's.
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include "../examples/train.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "devices.h"
#include "models.h"

// One training on all devices. That of GPU_ONE_BY_ONE takes the model's weights.
typedef struct trio {
    rocq_gguf *file[N_DEVICES];
    llama_model model[N_DEVICES];
    trainer t[N_DEVICES];
} trio;

enum { STEPS = 4, N_SEQS = 2, N_TOKENS = 19, N = N_SEQS * N_TOKENS };

static trio *trio_open(const model_spec *s, const train_options *how) {
    const rocq_gguf_desc source = {.path = model_path(s->name)};
    const llama_options small = {.n_ctx = 8, .n_batch = 1};
    trio *r = (trio *)calloc(1, sizeof *r);
    assert_non_null(r);
    model_write(contexts[CPU], s, source.path, NULL);
    for (int i = 0; i < N_DEVICES; i++) {
        assert_int_equal(rocq_gguf_open(contexts[i], &r->file[i], &source), ROCQ_OK);
        if (llama_open(&r->model[i], contexts[i], r->file[i], &small) != ROCQ_OK) {
            fail_msg("%s: %s", s->name, r->model[i].error);
        }
        train_options own = *how;
        own.take_weights = i == GPU_ONE_BY_ONE;
        if (train_open(&r->t[i], &r->model[i], &own) != ROCQ_OK) {
            fail_msg("%s: %s", s->name, r->t[i].error);
        }
    }
    return r;
}

static void trio_close(trio *r) {
    for (int i = 0; i < N_DEVICES; i++) {
        train_close(&r->t[i]);
        llama_close(&r->model[i]);
        rocq_gguf_close(&r->file[i]);
    }
    free(r);
}

// All that is trained; to be freed.
static float *masters_of(trainer *t) {
    const int64_t size = rocq_tensor_size(&t->masters);
    float *values = (float *)malloc((size_t)size);
    assert_non_null(values);
    assert_int_equal(rocq_download(t->ctx, values, &t->masters, size), ROCQ_OK);
    return values;
}

static void expect_same_masters(trainer *a, trainer *b) {
    float *x = masters_of(a), *y = masters_of(b);
    assert_memory_equal(x, y, (size_t)rocq_tensor_size(&a->masters));
    free(x);
    free(y);
}

// Texts of a few tokens each, so that something is learned, and targets of which some are none.
static void texts(int32_t n_vocab, int32_t ids[STEPS * N], int32_t targets[STEPS * N]) {
    for (int32_t i = 0; i < STEPS * N; i++) {
        ids[i] = (i * i * 7 + 3 * i / N + 1) % 11 * (n_vocab / 11);
        targets[i] = i % 9 == 4 ? -1 : (ids[i] + 5) % n_vocab;
    }
}

// The same steps on all devices: losses within `bound` of the CPU's, gradients' norms within 10
// times that, equal bits of graph and single ops, and nothing allocated after the
// first.
static void check_steps(const model_spec *s, const train_options *options, double bound) {
    train_options how = *options;
    int32_t ids[STEPS * N], targets[STEPS * N];
    how.n_seqs = N_SEQS;
    how.n_tokens = N_TOKENS;
    how.n_logits = 16; // twice, and a rest
    how.eps = 1e-6f;
    trio *r = trio_open(s, &how);
    texts(s->n_vocab, ids, targets);
    double first = 0;
    for (int i = 0; i < STEPS; i++) {
        const train_batch batch = {.ids = ids + i * N, .targets = targets + i * N};
        const train_result *const cpu = &r->t[CPU].result;
        for (int d = 0; d < N_DEVICES; d++) {
            rocq_stats before, after;
            const train_result *const own = &r->t[d].result;
            assert_int_equal(rocq_get_stats(contexts[d], &before), ROCQ_OK);
            if (train_step(&r->t[d], &batch, 4e-4f) != ROCQ_OK) fail_msg("%s", r->t[d].error);
            assert_int_equal(rocq_get_stats(contexts[d], &after), ROCQ_OK);
            if (i > 0) assert_int_equal(after.n_allocs, before.n_allocs);
            assert_int_equal(after.n_fallbacks, 0);
            assert_false(own->skipped);
            if (!(fabs(own->loss / cpu->loss - 1) <= bound) ||
                !(fabs((double)own->norm / (double)cpu->norm - 1) <= 10 * bound)) {
                fail_msg("%s, step %d, device %d: loss %.9g and norm %.9g, CPU %.9g and %.9g",
                         s->name, i, d, own->loss, (double)own->norm, cpu->loss,
                         (double)cpu->norm);
            }
        }
        if (i == 0) first = cpu->loss;
        assert_memory_equal(r->t[GPU_GRAPH].losses, r->t[GPU_ONE_BY_ONE].losses, N * sizeof(float));
    }
    assert_true(r->t[GPU_GRAPH].result.loss < first);
    expect_same_masters(&r->t[GPU_GRAPH], &r->t[GPU_ONE_BY_ONE]);
    // Only adapters leave their model usable
    llama_model *const taken = &r->model[GPU_ONE_BY_ONE];
    assert_int_equal(llama_eval(taken, ids, 1, NULL) == ROCQ_OK, how.rank > 0);
    assert_int_equal(taken->weights.size > 0, how.rank > 0);
    trio_close(r);
}

static const rocq_format q4_K[] = {ROCQ_Q4_K, ROCQ_Q8_0, ROCQ_I32}, f32[] = {ROCQ_F32, ROCQ_I32};

#define SIZES(embd, heads, kv_heads, dim, ff)                                                  \
    .n_embd = embd, .n_heads = heads, .n_kv_heads = kv_heads, .head_dim = dim, .n_ff = ff,     \
    .n_vocab = 301

static const model_spec llama = {"gpu-train-llama", "llama", SIZES(64, 4, 2, 16, 96),
                                 .formats = f32, .rope_freqs = true};
static const model_spec qwen3 = {"gpu-train-qwen3", "qwen3", SIZES(64, 2, 1, 80, 96),
                                 .formats = f32, .tied = true};
static const model_spec gemma2 = {"gpu-train-gemma2", "gemma2", SIZES(64, 4, 2, 16, 96),
                                  .formats = f32, .tied = true, .window = 7, .attention_cap = 50,
                                  .final_cap = 30};
static const model_spec gpt2 = {"gpu-train-gpt2", "gpt2", SIZES(64, 4, 4, 16, 160),
                                .formats = f32, .tied = true};
static const model_spec coded = {"gpu-train-coded", "llama", SIZES(256, 4, 2, 64, 256),
                                 .formats = q4_K};

static void test_weights(void **state) {
    const train_options how = {.weight_decay = 0.01f}, again = {.moments8 = true, .budget = 700000};
    (void)state;
    check_steps(&llama, &how, 2e-4);
    check_steps(&qwen3, &how, 2e-4);
    check_steps(&gemma2, &again, 4e-4);
}

// The bias of K has no effect on the loss, so that its true gradient is 0. AdamW divides what
// rounding leaves of that by its own size: that bias walks elsewhere on every device, and in F16
// moves the loss a little. So losses are compared, not weights.
static void test_gpt2(void **state) {
    const train_options how = {.weight_decay = 0.01f};
    (void)state;
    check_steps(&gpt2, &how, 4e-4);
}

static void test_adapters(void **state) {
    const train_options how = {.rank = 4, .alpha = 8, .seed = 3};
    (void)state;
    check_steps(&coded, &how, 4e-4);
}

// A gradient that is not finite: the step is skipped, the loss scale halved, and the next one is as
// if nothing had been.
static void test_skips(void **state) {
    const train_options how = {.n_seqs = N_SEQS, .n_tokens = N_TOKENS};
    int32_t ids[STEPS * N], targets[STEPS * N];
    float weights[N];
    (void)state;
    trio *r = trio_open(&llama, &how);
    trainer *const t = &r->t[GPU_GRAPH];
    texts(llama.n_vocab, ids, targets);
    for (int i = 0; i < N; i++) weights[i] = i == 3 ? INFINITY : 1.0f;
    targets[3] = 1;
    train_batch batch = {.ids = ids, .targets = targets, .weights = weights};
    float *before = masters_of(t);
    assert_int_equal(train_step(t, &batch, 1e-2f), ROCQ_OK);
    assert_true(t->result.skipped && t->result.n_skipped == 1 && t->result.n_steps == 0);
    assert_true(t->result.loss_scale == 32768);
    float *after = masters_of(t);
    assert_memory_equal(before, after, (size_t)rocq_tensor_size(&t->masters));
    batch.weights = NULL;
    assert_int_equal(train_step(t, &batch, 1e-2f), ROCQ_OK);
    assert_true(!t->result.skipped && t->result.n_steps == 1 && isfinite(t->result.loss));
    free(before);
    free(after);
    trio_close(r);
}

int main(int argc, char **argv) {
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_weights), cmocka_unit_test(test_gpt2),
                                       cmocka_unit_test(test_adapters),
                                       cmocka_unit_test(test_skips)};
    return cmocka_run_group_tests_name("gpu train", tests, open_devices, close_devices);
}
