// examples/train.h against PyTorch: small models of every family, which tests/training.py writes,
// trained for twenty steps; memory budgets; checkpoints; the files that come out, which llama.h reads;
// and what has to be refused.

#define _POSIX_C_SOURCE 200809L // setenv, mkdir

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include "../examples/train.h"

#include "models.h"

#define FOLDER ".build/tests/train-models"

enum { STEPS = 20 };

// A model and its trainer, in a context of their own.
typedef struct rig {
    rocq_ctx *ctx;
    rocq_gguf *file;
    llama_model model;
    trainer t;
} rig;

static const char *path_of(const char *name) {
    static char path[256];
    snprintf(path, sizeof path, FOLDER "/%s.gguf", name);
    return path;
}

static rocq_gguf *gguf_open(rocq_ctx *ctx, const char *path) {
    rocq_gguf *file = NULL;
    rocq_gguf_desc desc = {0};
    desc.path = path;
    if (rocq_gguf_open(ctx, &file, &desc) != ROCQ_OK) fail_msg("%s", rocq_error(ctx));
    return file;
}

static void rig_open_model(rig *r, const char *path, int32_t n_threads) {
    rocq_desc desc = {0};
    llama_options small = {0};
    memset(r, 0, sizeof *r);
    desc.prefer = ROCQ_BACKEND_CPU;
    desc.n_threads = n_threads;
    small.n_ctx = 48;
    small.n_batch = 48;
    small.n_logits = 48;
    small.kv_format = "f32";
    small.precision = ROCQ_PRECISION_F32;
    assert_int_equal(rocq_open(&r->ctx, &desc), ROCQ_OK);
    r->file = gguf_open(r->ctx, path);
    if (llama_open(&r->model, r->ctx, r->file, &small) != ROCQ_OK) fail_msg("%s", r->model.error);
}

static void rig_open(rig *r, const char *path, const train_options *how, int32_t n_threads) {
    rig_open_model(r, path, n_threads);
    if (train_open(&r->t, &r->model, how) != ROCQ_OK) fail_msg("%s: %s", path, r->t.error);
}

static void rig_close(rig *r) {
    train_close(&r->t);
    llama_close(&r->model);
    rocq_gguf_close(&r->file);
    rocq_close(&r->ctx);
}

// All that is trained, in its order.
static float *masters_of(trainer *t) {
    const int64_t size = rocq_tensor_size(&t->masters);
    float *values = (float *)malloc((size_t)size);
    assert_non_null(values);
    assert_int_equal(rocq_download(t->ctx, values, &t->masters, size), ROCQ_OK);
    return values;
}

static void step(trainer *t, const train_batch *batch, float lr) {
    if (train_step(t, batch, lr) != ROCQ_OK) fail_msg("%s", t->error);
}

// ---- against PyTorch ----------------------------------------------------------------------------

// What PyTorch was given, and what it made of it.
typedef struct torch_run {
    rocq_ctx *ctx;
    rocq_gguf *file;
    train_options how;
    char targets[64];
    float lr;
    int32_t *ids, *aims;
    float *weights, *losses, *norms;
    int64_t n; // tokens of a step
} torch_run;

static void *data_of(torch_run *p, const char *name) {
    rocq_gguf_tensor tensor;
    if (rocq_gguf_find_tensor(p->file, name, &tensor) != ROCQ_OK) fail_msg("there is no %s", name);
    void *data = malloc((size_t)tensor.size);
    assert_non_null(data);
    assert_int_equal(rocq_gguf_read(p->ctx, p->file, &tensor, data), ROCQ_OK);
    return data;
}

static double number_of(const torch_run *p, const char *name) {
    char key[64];
    rocq_gguf_value value;
    double x;
    int64_t whole;
    snprintf(key, sizeof key, "run.%s", name);
    assert_int_equal(rocq_gguf_find_value(p->file, key, &value), ROCQ_OK);
    if (rocq_gguf_value_i64(&value, 0, &whole) == ROCQ_OK) return (double)whole;
    assert_int_equal(rocq_gguf_value_f64(&value, 0, &x), ROCQ_OK);
    return x;
}

static void torch_open(torch_run *p, const char *name) {
    char after[64];
    rocq_desc desc = {0};
    rocq_str targets;
    memset(p, 0, sizeof *p);
    desc.prefer = ROCQ_BACKEND_CPU;
    desc.n_threads = 1;
    assert_int_equal(rocq_open(&p->ctx, &desc), ROCQ_OK);
    snprintf(after, sizeof after, "%s-after", name);
    p->file = gguf_open(p->ctx, path_of(after));
    p->how.n_seqs = (int32_t)number_of(p, "seqs");
    p->how.n_tokens = (int32_t)number_of(p, "tokens");
    p->how.n_accumulate = (int32_t)number_of(p, "accumulate");
    p->how.rank = (int32_t)number_of(p, "rank");
    p->how.seed = (uint64_t)number_of(p, "seed");
    p->how.alpha = (float)number_of(p, "alpha");
    p->how.weight_decay = (float)number_of(p, "decay");
    p->how.max_norm = (float)number_of(p, "clip");
    p->how.beta2 = 0.95f;
    p->how.eps = 1e-6f;
    p->how.n_logits = 7; // several times, and a rest
    p->lr = (float)number_of(p, "lr");
    assert_int_equal(rocq_gguf_get_str(p->file, "run.targets", &targets), ROCQ_OK);
    snprintf(p->targets, sizeof p->targets, "%.*s", (int)targets.length, targets.data);
    p->how.targets = p->targets[0] ? p->targets : NULL;
    p->ids = (int32_t *)data_of(p, "ids");
    p->aims = (int32_t *)data_of(p, "targets");
    p->weights = (float *)data_of(p, "target_weights");
    p->losses = (float *)data_of(p, "losses");
    p->norms = (float *)data_of(p, "norms");
    p->n = (int64_t)p->how.n_seqs * p->how.n_tokens * p->how.n_accumulate;
}

static train_batch torch_batch(const torch_run *p, int i) {
    const train_batch batch = {p->ids + i * p->n, p->aims + i * p->n, p->weights + i * p->n};
    return batch;
}

static void torch_close(torch_run *p) {
    free(p->ids);
    free(p->aims);
    free(p->weights);
    free(p->losses);
    free(p->norms);
    rocq_gguf_close(&p->file);
    rocq_close(&p->ctx);
}

static void expect_near(const char *what, int i, double x, double reference, double tolerance) {
    if (!(fabs(x - reference) <= tolerance * fabs(reference)))
        fail_msg("%s, step %d: %.9g, PyTorch %.9g", what, i, x, reference);
}

// Every weight, as one relative distance, and so the way that it went.
static void expect_same_weights(const char *name, torch_run *p, trainer *t, const float *first) {
    float *values = masters_of(t);
    double error = 0, power = 0, way = 0;
    for (int32_t i = 0; i < t->n_params; i++) {
        const train__param *param = &t->params[i];
        float *reference = (float *)data_of(p, param->name);
        double e = 0, w = 0;
        for (int64_t k = 0; k < param->ne[0] * param->ne[1]; k++) {
            const double x = (double)values[param->at + k], y = (double)reference[k];
            const double from = (double)first[param->at + k];
            e += (x - y) * (x - y);
            w += (y - from) * (y - from);
            power += y * y;
        }
        if (!(sqrt(e) <= 3e-3 * sqrt(w)))
            fail_msg("%s: %s went elsewhere: %g of %g", name, param->name, sqrt(e), sqrt(w));
        error += e;
        way += w;
        free(reference);
    }
    print_message("    %-12s weights %.2g, of their way %.2g\n", name, sqrt(error / power),
                  sqrt(error / way));
    if (!(sqrt(error) <= 1e-4 * sqrt(power))) fail_msg("%s: weights differ", name);
    if (!(sqrt(error) <= 1e-3 * sqrt(way))) fail_msg("%s: weights went elsewhere", name);
    free(values);
}

static void twenty_steps_of(const char *name) {
    torch_run p;
    rig r;
    torch_open(&p, name);
    rig_open(&r, path_of(name), &p.how, 2);
    float *first = masters_of(&r.t);
    for (int i = 0; i < STEPS; i++) {
        const train_batch batch = torch_batch(&p, i);
        double mean = 0, total = 0;
        step(&r.t, &batch, p.lr);
        expect_near(name, i, r.t.result.loss, (double)p.losses[i], 1e-4);
        expect_near(name, i, (double)r.t.result.norm, (double)p.norms[i], 1e-3);
        for (int64_t k = 0; k < p.n; k++) {
            if (batch.targets[k] < 0) assert_true(r.t.losses[k] == 0);
            else total += (double)batch.weights[k];
            mean += (double)(batch.weights[k] * r.t.losses[k]);
        }
        expect_near("mean of the losses", i, mean / total, r.t.result.loss, 1e-5);
        assert_int_equal(r.t.result.n_steps, i + 1);
        assert_false(r.t.result.skipped);
    }
    expect_same_weights(name, &p, &r.t, first);
    free(first);
    rig_close(&r);
    torch_close(&p);
}

static void gpt2_agrees_with_pytorch(void **state) { (void)state; twenty_steps_of("gpt2"); }
static void llama_agrees_with_pytorch(void **state) { (void)state; twenty_steps_of("llama"); }
static void qwen2_agrees_with_pytorch(void **state) { (void)state; twenty_steps_of("qwen2"); }
static void qwen3_agrees_with_pytorch(void **state) { (void)state; twenty_steps_of("qwen3"); }
static void gemma2_agrees_with_pytorch(void **state) { (void)state; twenty_steps_of("gemma2"); }
// ---- the same bits ------------------------------------------------------------------------------

// Losses and weights after n steps of a run.
typedef struct outcome {
    double losses[STEPS];
    float *weights;
    int64_t bytes;
} outcome;

static outcome run_steps(const char *name, void (*change)(train_options *how), int32_t n_threads,
                         int32_t n_recomputed) {
    torch_run p;
    rig r;
    outcome o = {0};
    torch_open(&p, name);
    if (change) change(&p.how);
    rig_open(&r, path_of(name), &p.how, n_threads);
    if (n_recomputed >= 0) assert_int_equal(r.t.n_recomputed, n_recomputed);
    for (int i = 0; i < 4; i++) {
        const train_batch batch = torch_batch(&p, i);
        step(&r.t, &batch, p.lr);
        o.losses[i] = r.t.result.loss;
    }
    o.weights = masters_of(&r.t);
    o.bytes = rocq_tensor_size(&r.t.masters);
    rig_close(&r);
    torch_close(&p);
    return o;
}

static void expect_same(const char *what, outcome *a, outcome *b) {
    assert_int_equal(a->bytes, b->bytes);
    if (memcmp(a->losses, b->losses, sizeof a->losses) != 0) fail_msg("%s: other losses", what);
    if (memcmp(a->weights, b->weights, (size_t)a->bytes) != 0) fail_msg("%s: other weights", what);
    free(b->weights);
}

static const char *const some[] = {"gpt2", "llama", "qwen3", "gemma2", "lora-gemma2"};
enum { N_SOME = sizeof some / sizeof *some };

static void bits_do_not_depend_on_threads(void **state) {
    (void)state;
    for (int i = 0; i < N_SOME; i++) {
        outcome one = run_steps(some[i], NULL, 1, 0);
        outcome two = run_steps(some[i], NULL, 2, 0), five = run_steps(some[i], NULL, 5, 0);
        expect_same(some[i], &one, &two);
        expect_same(some[i], &one, &five);
        free(one.weights);
    }
}

static int64_t activations; // of the run before

static void tight(train_options *how) { how->budget = activations; }

static void layers_computed_again_give_the_same_bits(void **state) {
    (void)state;
    for (int i = 0; i < N_SOME; i++) {
        torch_run p;
        rig r;
        torch_open(&p, some[i]);
        rig_open(&r, path_of(some[i]), &p.how, 1);
        const int32_t n_layers = r.model.n_layers;
        outcome all = run_steps(some[i], NULL, 2, 0);
        for (int32_t n = 1; n < n_layers; n++) { // each time a byte less than what the last took
            trainer next;
            activations = (n == 1 ? r.t.activation_bytes : activations) - 1;
            p.how.budget = activations;
            assert_int_equal(train_open(&next, &r.model, &p.how), ROCQ_OK);
            activations = next.activation_bytes;
            assert_true(activations <= p.how.budget);
            train_close(&next);
            outcome some_again = run_steps(some[i], tight, 2, n);
            expect_same(some[i], &all, &some_again);
        }
        trainer none;
        p.how.budget = activations - 1;
        assert_int_equal(train_open(&none, &r.model, &p.how), ROCQ_E_BUDGET);
        assert_non_null(strstr(none.error, "at least"));
        free(all.weights);
        rig_close(&r);
        torch_close(&p);
    }
}

// ---- checkpoints --------------------------------------------------------------------------------

#define CHECKPOINT FOLDER "/checkpoint.gguf"

static void eight_bits(train_options *how) { how->moments8 = true; }
// Weights and losses after six steps, with the run broken off and taken up by another trainer after
// `at` of them (0: never; 6: at the end), step 2 being one that is skipped.
static outcome interrupted_run(const char *name, void (*change)(train_options *how), int at) {
    torch_run p;
    rig r;
    outcome o = {0};
    torch_open(&p, name);
    if (change) change(&p.how);
    rig_open(&r, path_of(name), &p.how, 2);
    for (int i = 0; i < 6; i++) {
        train_batch batch = torch_batch(&p, i);
        float *weights = (float *)malloc((size_t)p.n * sizeof *weights);
        assert_non_null(weights);
        memcpy(weights, batch.weights, (size_t)p.n * sizeof *weights);
        batch.weights = weights;
        if (i == 2) weights[0] = NAN;
        if (i == 2) p.aims[i * p.n] = 1;
        step(&r.t, &batch, p.lr);
        assert_int_equal(r.t.result.skipped, i == 2);
        if (i != 2) o.losses[i] = r.t.result.loss;
        free(weights);
        r.t.user[3] = (uint64_t)i << 40;
        if (i + 1 != at) continue;
        if (train_save(&r.t, CHECKPOINT) != ROCQ_OK) fail_msg("%s", r.t.error);
        rig_close(&r);
        p.how.seed++; // other adapters, had they not been loaded
        rig_open(&r, path_of(name), &p.how, 1);
        if (train_load(&r.t, CHECKPOINT) != ROCQ_OK) fail_msg("%s", r.t.error);
        assert_int_equal(r.t.result.n_steps, i < 2 ? i + 1 : i);
        assert_int_equal(r.t.result.n_skipped, i >= 2);
        assert_true(r.t.user[3] == (uint64_t)i << 40);
    }
    assert_int_equal(r.t.result.n_skipped, 1);
    o.weights = masters_of(&r.t);
    o.bytes = rocq_tensor_size(&r.t.masters);
    rig_close(&r);
    torch_close(&p);
    return o;
}

static void a_resumed_run_gives_the_same_bits(void **state) {
    (void)state;
    const struct {
        const char *name;
        void (*change)(train_options *how);
    } cases[] = {{"gpt2", NULL}, {"llama", NULL}, {"gemma2", eight_bits}, {"lora", NULL},
                 {"lora-gpt2", eight_bits}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        outcome whole = interrupted_run(cases[i].name, cases[i].change, 0);
        for (int at = 1; at <= 6; at++) {
            outcome broken = interrupted_run(cases[i].name, cases[i].change, at);
            expect_same(cases[i].name, &whole, &broken);
        }
        free(whole.weights);
    }
}

static void write_bytes(const char *path, const void *data, size_t n) {
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(data, 1, n, out), n);
    assert_int_equal(fclose(out), 0);
}

static size_t read_bytes(const char *path, char **data) {
    FILE *in = fopen(path, "rb");
    size_t n = 0;
    *data = (char *)malloc(1 << 24);
    assert_non_null(*data);
    if (in) n = fread(*data, 1, 1 << 24, in);
    if (in) fclose(in);
    return n;
}

// A call that is refused with one line and changes no weight.
static void expect_refused(trainer *t, rocq_result result, rocq_result expected, const char *words) {
    assert_int_equal(result, expected);
    if (!strstr(t->error, words) || strchr(t->error, '\n') || strlen(t->error) < 10)
        fail_msg("not a line with \"%s\": %s", words, t->error);
}

static void a_truncated_checkpoint_is_refused_at_every_byte(void **state) {
    (void)state;
    rig r;
    train_options how = {0};
    char *data;
    how.n_tokens = 5;
    how.rank = 1;
    how.targets = "k";
    rig_open(&r, path_of("lora"), &how, 1);
    const int32_t ids[] = {1, 2, 3, 4, 5}, targets[] = {2, 3, 4, 5, 6};
    const train_batch batch = {ids, targets, NULL};
    step(&r.t, &batch, 1e-2f);
    assert_int_equal(train_save(&r.t, CHECKPOINT), ROCQ_OK);
    const size_t n = read_bytes(CHECKPOINT, &data);
    step(&r.t, &batch, 1e-2f);
    float *before = masters_of(&r.t);
    assert_true(n > 4000);
    for (size_t length = 0; length < n; length++) {
        write_bytes(FOLDER "/cut.gguf", data, length);
        const rocq_result result = train_load(&r.t, FOLDER "/cut.gguf");
        if (result == ROCQ_OK) fail_msg("%zu of %zu bytes are a checkpoint", length, n);
        expect_refused(&r.t, result, result, "");
    }
    float *after = masters_of(&r.t);
    assert_memory_equal(before, after, rocq_tensor_size(&r.t.masters));
    assert_int_equal(r.t.result.n_steps, 2);
    step(&r.t, &batch, 1e-2f); // it goes on as if nothing had been
    assert_int_equal(train_load(&r.t, CHECKPOINT), ROCQ_OK);
    assert_int_equal(r.t.result.n_steps, 1);
    free(before);
    free(after);
    free(data);
    rig_close(&r);
}

static void checkpoints_of_others_are_refused(void **state) {
    (void)state;
    rig r, other;
    train_options how = {0}, rank = {0};
    how.n_tokens = 5;
    how.rank = 2;
    rig_open(&r, path_of("lora"), &how, 1);
    assert_int_equal(train_save(&r.t, CHECKPOINT), ROCQ_OK);
    char *before, *after;
    const size_t n = read_bytes(CHECKPOINT, &before);
    const struct {
        const char *model;
        int32_t rank;
        float alpha;
        const char *targets;
        bool moments8;
    } others[] = {{"lora", 3, 2, NULL, false}, {"lora", 2, 5, NULL, false},
                  {"lora", 2, 2, "q,v", false}, {"lora", 2, 2, NULL, true},
                  {"lora", 0, 0, NULL, false},  {"qwen2", 2, 2, NULL, false},
                  {"gpt2", 2, 2, NULL, false},  {"llama", 0, 0, NULL, false}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        rank = how;
        rank.rank = others[i].rank;
        rank.alpha = others[i].alpha;
        rank.targets = others[i].targets;
        rank.moments8 = others[i].moments8;
        rig_open(&other, path_of(others[i].model), &rank, 1);
        float *first = masters_of(&other.t), *last;
        expect_refused(&other.t, train_load(&other.t, CHECKPOINT), ROCQ_E_SHAPE, "checkpoint.gguf");
        last = masters_of(&other.t);
        assert_memory_equal(first, last, rocq_tensor_size(&other.t.masters));
        free(first);
        free(last);
        rig_close(&other);
    }
    expect_refused(&r.t, train_load(&r.t, path_of("lora")), ROCQ_E_MAGIC, "no checkpoint");
    expect_refused(&r.t, train_load(&r.t, FOLDER "/none.gguf"), ROCQ_E_IO, "none.gguf");
    expect_refused(&r.t, train_save(&r.t, FOLDER "/none/x.gguf"), ROCQ_E_IO, "none/x.gguf");
    assert_int_equal(train_load(&r.t, CHECKPOINT), ROCQ_OK);
    assert_int_equal(read_bytes(CHECKPOINT, &after), n);
    assert_memory_equal(before, after, n);
    free(before);
    free(after);
    rig_close(&r);
}

// ---- what comes out -----------------------------------------------------------------------------

enum { N_TEXT = 24 };

static void text_of(int32_t n_vocab, int32_t ids[N_TEXT], int32_t targets[N_TEXT]) {
    for (int32_t i = 0; i <= N_TEXT; i++) {
        const int32_t id = (i * i * 7 + 3 * i + 1) % n_vocab;
        if (i < N_TEXT) ids[i] = id;
        if (i > 0) targets[i - 1] = id;
    }
}

// A trainer over the text of N_TEXT tokens, after some steps.
static void rig_open_trained(rig *r, const char *name, int32_t rank, float alpha) {
    train_options how = {0};
    int32_t ids[N_TEXT], targets[N_TEXT];
    how.n_tokens = N_TEXT;
    how.rank = rank;
    how.alpha = alpha;
    rig_open(r, path_of(name), &how, 2);
    text_of(r->model.n_vocab, ids, targets);
    const train_batch batch = {ids, targets, NULL};
    for (int i = 0; i < 8; i++) step(&r->t, &batch, 5e-3f);
}

// -ln of the target's probability.
static double surprise(const float *logits, int32_t n_vocab, int32_t target) {
    double sum = 0;
    for (int32_t i = 0; i < n_vocab; i++) sum += exp((double)logits[i] - (double)logits[target]);
    return log(sum);
}

static void expect_losses(const char *what, const float *logits, int32_t n_vocab,
                          const int32_t *targets, const float *losses, double tolerance) {
    for (int32_t i = 0; i < N_TEXT; i++) {
        const double s = surprise(logits + (int64_t)i * n_vocab, n_vocab, targets[i]);
        if (!(fabs(s - (double)losses[i]) <= tolerance * (1 + (double)losses[i])))
            fail_msg("%s, token %d: loss %g, by its logits %g", what, i, (double)losses[i], s);
    }
}

// llama.h gives the logits that the trainer saw, before training and, from the file, after it.
static void the_written_model_is_the_trained_one(void **state) {
    (void)state;
    const char *const names[] = {"gpt2", "llama", "qwen2", "qwen3", "gemma2"};
    for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
        rig r, again;
        int32_t ids[N_TEXT], targets[N_TEXT];
        float losses[N_TEXT];
        rig_open_trained(&r, names[k], 0, 0);
        text_of(r.model.n_vocab, ids, targets);
        const train_batch batch = {ids, targets, NULL};
        assert_int_equal(train_evaluate(&r.t, &batch, losses), ROCQ_OK);
        for (int f = 0; f < 3; f++) {
            const rocq_format format = f == 0 ? ROCQ_F32 : f == 1 ? ROCQ_F16 : ROCQ_BF16;
            if (train_write_gguf(&r.t, r.file, format, path_of("written")) != ROCQ_OK)
                fail_msg("%s", r.t.error);
            rig_open_model(&again, path_of("written"), 2);
            assert_int_equal(again.model.embedding.format, format);
            float *logits = (float *)malloc((size_t)N_TEXT * (size_t)r.model.n_vocab * 4);
            assert_non_null(logits);
            if (llama_eval(&again.model, ids, N_TEXT, logits) != ROCQ_OK)
                fail_msg("%s", again.model.error);
            expect_losses(names[k], logits, r.model.n_vocab, targets, losses,
                          f == 0 ? 2e-5 : f == 1 ? 5e-3 : 4e-2);
            free(logits);
            rig_close(&again);
        }
        rig_close(&r);
    }
}

// ---- bad input ----------------------------------------------------------------------------------

static void bad_calls_are_refused(void **state) {
    (void)state;
    rig r;
    train_options how = {0};
    int32_t ids[N_TEXT], targets[N_TEXT];
    float weights[N_TEXT], losses[N_TEXT];
    rig_open_trained(&r, "llama", 0, 0);
    trainer other;
    const int32_t n_vocab = r.model.n_vocab;
    float *before = masters_of(&r.t);
    text_of(n_vocab, ids, targets);
    train_batch batch = {ids, targets, NULL};
    for (int i = 0; i < 4; i++) {
        int32_t *which = i < 2 ? &ids[7] : &targets[11];
        const int32_t was = *which;
        *which = i % 2 == 0 ? n_vocab : i == 1 ? -1 : INT32_MAX;
        expect_refused(&r.t, train_step(&r.t, &batch, 1), ROCQ_E_BOUNDS, "is not one of");
        expect_refused(&r.t, train_evaluate(&r.t, &batch, losses), ROCQ_E_BOUNDS, "is not one of");
        *which = was;
    }
    for (int32_t i = 0; i < N_TEXT; i++) weights[i] = i == 5 ? -1.0f : 0.0f;
    batch.weights = weights;
    expect_refused(&r.t, train_step(&r.t, &batch, 1), ROCQ_E_ARGUMENT, "negative");
    weights[5] = 0;
    expect_refused(&r.t, train_step(&r.t, &batch, 1), ROCQ_E_ARGUMENT, "no target");
    batch.weights = NULL;
    expect_refused(&r.t, train_step(&r.t, &batch, NAN), ROCQ_E_ARGUMENT, "rate");
    expect_refused(&r.t, train_step(&r.t, &batch, -1), ROCQ_E_ARGUMENT, "rate");
    expect_refused(&r.t, train_step(&r.t, NULL, 1), ROCQ_E_ARGUMENT, "batch");
    expect_refused(&r.t, train_write_lora(&r.t, "x"), ROCQ_E_ARGUMENT, "adapter");
    expect_refused(&r.t, train_write_gguf(&r.t, r.file, ROCQ_Q4_0, "x"), ROCQ_E_ARGUMENT, "format");
    rocq_gguf *foreign = gguf_open(r.ctx, path_of("qwen2"));
    expect_refused(&r.t, train_write_gguf(&r.t, foreign, ROCQ_F32, path_of("never")),
                   ROCQ_E_SHAPE, "not the one");
    rocq_gguf_close(&foreign);
    char *none;
    assert_int_equal(read_bytes(path_of("never"), &none), 0);
    free(none);
    float *after = masters_of(&r.t);
    assert_memory_equal(before, after, rocq_tensor_size(&r.t.masters));
    free(before);
    free(after);

    const struct {
        int32_t n_tokens, rank, n_seqs;
        const char *targets;
        rocq_result result;
        const char *words;
    } bad[] = {{-1, 0, 1, NULL, ROCQ_E_ARGUMENT, "options"},
               {8, 513, 1, NULL, ROCQ_E_ARGUMENT, "options"},
               {8, 0, -2, NULL, ROCQ_E_ARGUMENT, "options"},
               {8, 4, 1, "q,qkv", ROCQ_E_NOT_FOUND, "no matrix \"qkv\""},
               {8, 4, 1, "q,,v", ROCQ_E_NOT_FOUND, "no matrix \"\""},
               {8, 4, 1, "norm", ROCQ_E_NOT_FOUND, "no matrix \"norm\""}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        how.n_tokens = bad[i].n_tokens;
        how.rank = bad[i].rank;
        how.n_seqs = bad[i].n_seqs;
        how.targets = bad[i].targets;
        expect_refused(&other, train_open(&other, &r.model, &how), bad[i].result, bad[i].words);
        assert_int_equal(train_step(&other, &batch, 1), ROCQ_E_STATE);
    }
    rig_close(&r);
    rig_open_model(&r, path_of("gpt2"), 1);
    memset(&how, 0, sizeof how);
    how.n_tokens = 65; // it has learned 64 positions
    expect_refused(&other, train_open(&other, &r.model, &how), ROCQ_E_BOUNDS, "64 positions");
    rig_close(&r);
}

// Weights that are not finite: every step is skipped and counted, and nothing is changed.
static void steps_without_a_finite_gradient_are_skipped(void **state) {
    (void)state;
    rig r;
    int32_t ids[N_TEXT], targets[N_TEXT];
    float weights[N_TEXT];
    rig_open_trained(&r, "llama", 0, 0);
    text_of(r.model.n_vocab, ids, targets);
    for (int32_t i = 0; i < N_TEXT; i++) weights[i] = i == 3 ? INFINITY : 1.0f;
    train_batch batch = {ids, targets, weights};
    float *before = masters_of(&r.t), *after;
    for (int64_t i = 1; i <= 3; i++) { // of the data
        step(&r.t, &batch, 1e-2f);
        assert_true(r.t.result.skipped);
        assert_int_equal(r.t.result.n_skipped, i);
        assert_int_equal(r.t.result.n_steps, 8);
    }
    after = masters_of(&r.t);
    assert_memory_equal(before, after, rocq_tensor_size(&r.t.masters));
    batch.weights = NULL;
    step(&r.t, &batch, 1e-2f);
    assert_false(r.t.result.skipped);
    assert_true(isfinite(r.t.result.loss) && isfinite(r.t.result.norm));
    assert_int_equal(r.t.result.n_steps, 9);
    free(before);
    free(after);

    const rocq_tensor one = rocq_tensor_slice(&r.t.masters, 0, r.t.params[r.t.n_params / 2].at, 1);
    const float nan = NAN; // of the weights
    assert_int_equal(rocq_upload(r.ctx, &one, &nan, 4), ROCQ_OK);
    before = masters_of(&r.t);
    step(&r.t, &batch, 1e-2f);
    assert_true(r.t.result.skipped && r.t.result.n_skipped == 4);
    after = masters_of(&r.t);
    assert_memory_equal(before, after, rocq_tensor_size(&r.t.masters));
    expect_refused(&r.t, train_write_gguf(&r.t, r.file, ROCQ_F16, path_of("never")),
                   ROCQ_E_ARGUMENT, "not finite");
    free(before);
    free(after);
    rig_close(&r);
}

static void steps_allocate_nothing(void **state) {
    (void)state;
    for (int i = 0; i < N_SOME; i++) {
        torch_run p;
        rig r;
        rocq_stats before, after;
        torch_open(&p, some[i]);
        rig_open(&r, path_of(some[i]), &p.how, 2);
        assert_int_equal(rocq_get_stats(r.ctx, &before), ROCQ_OK);
        for (int k = 0; k < 3; k++) {
            const train_batch batch = torch_batch(&p, k);
            float losses[64];
            step(&r.t, &batch, p.lr);
            assert_int_equal(train_evaluate(&r.t, &batch, losses), ROCQ_OK);
        }
        assert_int_equal(rocq_get_stats(r.ctx, &after), ROCQ_OK);
        assert_int_equal(after.n_allocs, before.n_allocs);
        train_close(&r.t);
        train_close(&r.t); // harmless
        rig_close(&r);
        torch_close(&p);
    }
}

// ---- the suite ----------------------------------------------------------------------------------

static int write_models(void **state) {
    (void)state;
    return system("mkdir -p " FOLDER " && /usr/bin/python3 tests/training.py " FOLDER) == 0 ? 0 : -1;
}

int main(int argc, char **argv) {
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpt2_agrees_with_pytorch),
        cmocka_unit_test(llama_agrees_with_pytorch),
        cmocka_unit_test(qwen2_agrees_with_pytorch),
        cmocka_unit_test(qwen3_agrees_with_pytorch),
        cmocka_unit_test(gemma2_agrees_with_pytorch),
        cmocka_unit_test(bits_do_not_depend_on_threads),
        cmocka_unit_test(layers_computed_again_give_the_same_bits),
        cmocka_unit_test(a_resumed_run_gives_the_same_bits),
        cmocka_unit_test(a_truncated_checkpoint_is_refused_at_every_byte),
        cmocka_unit_test(checkpoints_of_others_are_refused),
        cmocka_unit_test(the_written_model_is_the_trained_one),
        cmocka_unit_test(bad_calls_are_refused),
        cmocka_unit_test(steps_without_a_finite_gradient_are_skipped),
        cmocka_unit_test(steps_allocate_nothing),
    };
    return cmocka_run_group_tests(tests, write_models, NULL);
}
