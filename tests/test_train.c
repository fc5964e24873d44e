// examples/train.h against PyTorch: small models of every family, which tests/training.py writes,
// trained for twenty steps, whole and by adapters; adapters over quantized weights; memory budgets;
// checkpoints; the files that come out, which llama.cpp and llama.h read; and what has to be
// refused.

#define _POSIX_C_SOURCE 200809L // setenv, mkdir

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include "../examples/train.h"

#include "llama_cpp.h"
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
static void expect_same_weights(const char *name, torch_run *p, trainer *t, const float *first,
                                double loose) {
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
        if (!(sqrt(e) <= loose * 3e-3 * sqrt(w)))
            fail_msg("%s: %s went elsewhere: %g of %g", name, param->name, sqrt(e), sqrt(w));
        error += e;
        way += w;
        free(reference);
    }
    print_message("    %-12s weights %.2g, of their way %.2g\n", name, sqrt(error / power),
                  sqrt(error / way));
    if (!(sqrt(error) <= loose * 1e-4 * sqrt(power))) fail_msg("%s: weights differ", name);
    if (!(sqrt(error) <= loose * 1e-3 * sqrt(way))) fail_msg("%s: weights went elsewhere", name);
    free(values);
}

// loose: how many times the tolerance of F32.
static void twenty_steps_as(const char *name, rocq_precision precision, double loose) {
    torch_run p;
    rig r;
    torch_open(&p, name);
    p.how.precision = precision;
    rig_open(&r, path_of(name), &p.how, 2);
    float *first = masters_of(&r.t);
    for (int i = 0; i < STEPS; i++) {
        const train_batch batch = torch_batch(&p, i);
        double mean = 0, total = 0;
        step(&r.t, &batch, p.lr);
        expect_near(name, i, r.t.result.loss, (double)p.losses[i], loose * 1e-4);
        expect_near(name, i, (double)r.t.result.norm, (double)p.norms[i], loose * 1e-3);
        for (int64_t k = 0; k < p.n; k++) {
            if (batch.targets[k] < 0) assert_true(r.t.losses[k] == 0);
            else total += (double)batch.weights[k];
            mean += (double)(batch.weights[k] * r.t.losses[k]);
        }
        expect_near("mean of the losses", i, mean / total, r.t.result.loss, 1e-5);
        assert_int_equal(r.t.result.n_steps, i + 1);
        assert_false(r.t.result.skipped);
    }
    expect_same_weights(name, &p, &r.t, first, loose);
    free(first);
    rig_close(&r);
    torch_close(&p);
}

static void twenty_steps_of(const char *name) { twenty_steps_as(name, ROCQ_PRECISION_AUTO, 1); }

static void gpt2_agrees_with_pytorch(void **state) { (void)state; twenty_steps_of("gpt2"); }
static void llama_agrees_with_pytorch(void **state) { (void)state; twenty_steps_of("llama"); }
static void qwen2_agrees_with_pytorch(void **state) { (void)state; twenty_steps_of("qwen2"); }
static void qwen3_agrees_with_pytorch(void **state) { (void)state; twenty_steps_of("qwen3"); }
static void gemma2_agrees_with_pytorch(void **state) { (void)state; twenty_steps_of("gemma2"); }
static void adapters_agree_with_pytorch(void **state) {
    (void)state;
    twenty_steps_of("lora");
    twenty_steps_of("lora-gpt2");
    twenty_steps_of("lora-gemma2");
}

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
static void expect_refused(trainer *t, rocq_result result, rocq_result expected,
                           const char *words) {
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

// What a checkpoint holds of a trainer, for the caller to free.
static char *whole_state(trainer *t, size_t *size) {
    train__part parts[TRAIN__MOST_PARTS];
    const int n = train__parts(t, parts);
    *size = sizeof t->user;
    for (int i = 0; i < n; i++) *size += (size_t)rocq_tensor_size(parts[i].tensor);
    char *all = (char *)malloc(*size), *to = all + sizeof t->user;
    assert_non_null(all);
    memcpy(all, t->user, sizeof t->user);
    for (int i = 0; i < n; i++) {
        const int64_t bytes = rocq_tensor_size(parts[i].tensor);
        assert_int_equal(rocq_download(t->ctx, to, parts[i].tensor, bytes), ROCQ_OK);
        to += bytes;
    }
    return all;
}

// One to four changes: mostly where a file says what it is, and in what would be a number there.
static void mutate(unsigned char *data, size_t size, size_t head, model_random *random) {
    static const uint64_t numbers[] = {0, 1, 0x7f, 0xff, 0xffff, INT32_MAX, UINT32_MAX, INT64_MAX,
                                       (uint64_t)INT64_MAX + 1, UINT64_MAX};
    const uint64_t n = 1 + model_u64(random) % 4;
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t how = model_u64(random);
        const size_t at = (size_t)(model_u64(random) % (how % 4 ? head : size));
        const size_t width = (size_t)1 << model_u64(random) % 4;
        const size_t room = size - at < width ? size - at : width;
        uint64_t number = numbers[model_u64(random) % (sizeof numbers / sizeof *numbers)];
        switch (how / 4 % 4) {
        case 0: data[at] ^= (unsigned char)(1u << model_u64(random) % 8); break;
        case 1: data[at] = (unsigned char)model_u64(random); break;
        case 2: memcpy(&data[at], &number, room); break; // little endian
        default: memmove(&data[at], &data[model_u64(random) % (size - room)], room); break;
        }
    }
}

// Whatever bytes of a checkpoint are changed: it is refused in one line, and then nothing has
// changed; or those bytes say nothing that is loaded, and what is loaded is what was written.
static void a_changed_checkpoint_does_no_harm(void **state) {
    (void)state;
    static const struct {
        const char *name, *targets;
        int32_t rank, n;
        bool moments8;
    } cases[] = {{"lora", "k", 1, 400, false}, {"lora-gpt2", "qkv", 2, 200, true},
                 {"gpt2", NULL, 0, 60, true}};
    static const int32_t ids[] = {1, 2, 3, 4, 5}, targets[] = {2, 3, 4, 5, 6};
    const train_batch batch = {ids, targets, NULL};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        const train_options how = {.n_tokens = 5, .rank = cases[k].rank,
                                   .targets = cases[k].targets, .moments8 = cases[k].moments8};
        model_random random = {k + 1};
        int n_taken = 0;
        char *bytes;
        size_t n_state, n_after;
        rig r;
        rig_open(&r, path_of(cases[k].name), &how, 1);
        for (int i = 0; i < 2; i++) step(&r.t, &batch, 1e-2f);
        assert_int_equal(train_save(&r.t, CHECKPOINT), ROCQ_OK);
        const size_t size = read_bytes(CHECKPOINT, &bytes);
        char *saved = whole_state(&r.t, &n_state);
        step(&r.t, &batch, 1e-2f);
        char *before = whole_state(&r.t, &n_state);
        unsigned char *changed = (unsigned char *)malloc(size);
        assert_non_null(changed);
        for (int i = 0; i < cases[k].n; i++) {
            memcpy(changed, bytes, size);
            mutate(changed, size, 700, &random); // the metadata and the list of tensors
            write_bytes(FOLDER "/changed.gguf", changed, size);
            const rocq_result result = train_load(&r.t, FOLDER "/changed.gguf");
            char *after = whole_state(&r.t, &n_after);
            assert_int_equal(n_after, n_state);
            assert_memory_equal(after, result == ROCQ_OK ? saved : before, n_state);
            free(after);
            if (result == ROCQ_OK) {
                n_taken++;
                step(&r.t, &batch, 1e-2f); // to where it was
            } else {
                expect_refused(&r.t, result, result, "");
            }
        }
        printf("# %s: of %d changed checkpoints %d were taken\n", cases[k].name, cases[k].n,
               n_taken);
        assert_true(n_taken < cases[k].n / 5);
        assert_int_equal(train_load(&r.t, CHECKPOINT), ROCQ_OK);
        assert_int_equal(r.t.result.n_steps, 2);
        free(changed);
        free(before);
        free(saved);
        free(bytes);
        rig_close(&r);
    }
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

// ---- adapters over quantized weights ------------------------------------------------------------

// A copy of a model with other formats of its matrices: quantized, or quantized and decoded again.
static void convert(const char *from, const char *to, rocq_format format, bool decode) {
    rocq_ctx *ctx = NULL;
    rocq_desc desc = {0};
    rocq_gguf_writer *out = NULL;
    rocq_gguf_writer_desc target = {0};
    desc.prefer = ROCQ_BACKEND_CPU;
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    rocq_gguf *file = gguf_open(ctx, from);
    target.path = to;
    assert_int_equal(rocq_gguf_writer_open(ctx, &out, &target), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_set_from(out, file), ROCQ_OK);
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < rocq_gguf_tensor_count(file); i++) {
            rocq_gguf_tensor t;
            char name[64];
            assert_int_equal(rocq_gguf_tensor_at(file, i, &t), ROCQ_OK);
            const bool matrix = t.n_dims > 1;
            const rocq_format f = matrix && !decode ? format : ROCQ_F32;
            if (pass == 0) {
                assert_int_equal(
                    rocq_gguf_writer_add_tensor(out, train__name(&t, name), f, t.n_dims, t.ne),
                    ROCQ_OK);
                continue;
            }
            const int64_t n = t.ne[0] * t.ne[1];
            int64_t row = 0;
            float *values = (float *)malloc((size_t)n * 4);
            if (matrix) assert_int_equal(rocq_row_size(format, t.ne[0], &row), ROCQ_OK);
            void *codes = malloc((size_t)(row * t.ne[1]) + 1);
            assert_true(values && codes);
            assert_int_equal(rocq_gguf_read(ctx, file, &t, values), ROCQ_OK);
            if (matrix) {
                assert_int_equal(rocq_quantize(format, codes, values, t.ne[1], t.ne[0], NULL),
                                 ROCQ_OK);
                assert_int_equal(rocq_dequantize(format, values, codes, n), ROCQ_OK);
            }
            assert_int_equal(f == ROCQ_F32 ? rocq_gguf_writer_write(out, values, n * 4)
                                           : rocq_gguf_writer_write(out, codes, row * t.ne[1]),
                             ROCQ_OK);
            free(values);
            free(codes);
        }
    }
    assert_int_equal(rocq_gguf_writer_close(&out), ROCQ_OK);
    rocq_gguf_close(&file);
    rocq_close(&ctx);
}

static double relative(const float *x, const float *y, int64_t n) {
    double error = 0, power = 0;
    for (int64_t i = 0; i < n; i++) {
        error += ((double)x[i] - (double)y[i]) * ((double)x[i] - (double)y[i]);
        power += (double)y[i] * (double)y[i];
    }
    return sqrt(error / power);
}

// Over weights in any format adapters learn what they learn over the same weights in F32, which
// PyTorch has confirmed.
static void adapters_learn_over_quantized_weights(void **state) {
    (void)state;
    static const rocq_format formats[] = {ROCQ_Q4_K, ROCQ_Q6_K, ROCQ_Q8_0, ROCQ_Q4_0, ROCQ_IQ4_XS,
                                          ROCQ_F16,  ROCQ_BF16};
    for (size_t k = 0; k < sizeof formats / sizeof *formats; k++) {
        torch_run p;
        rig coded, plain;
        char path[2][256];
        snprintf(path[0], sizeof path[0], "%s", path_of("wide-coded"));
        snprintf(path[1], sizeof path[1], "%s", path_of("wide-plain"));
        convert(path_of("wide"), path[0], formats[k], false);
        convert(path_of("wide"), path[1], formats[k], true);
        torch_open(&p, "wide");
        rig_open(&coded, path[0], &p.how, 2);
        rig_open(&plain, path[1], &p.how, 2);
        assert_int_equal(coded.model.layers[0].q.format, formats[k]);
        assert_int_equal(plain.model.layers[0].q.format, ROCQ_F32);
        for (int i = 0; i < 6; i++) {
            const train_batch batch = torch_batch(&p, i);
            step(&coded.t, &batch, p.lr);
            step(&plain.t, &batch, p.lr);
            expect_near("quantized", i, coded.t.result.loss, plain.t.result.loss, 1e-5);
            expect_near("quantized", i, (double)coded.t.result.norm, (double)plain.t.result.norm,
                        1e-4);
        }
        float *x = masters_of(&coded.t), *y = masters_of(&plain.t);
        const double away = relative(x, y, coded.t.n_weights);
        if (!(away <= 1e-4)) fail_msg("%s: %g", rocq_format_name(formats[k]), away);
        free(x);
        free(y);
        rig_close(&coded);
        rig_close(&plain);
        torch_close(&p);
    }
}

static double mean_loss(trainer *t, const train_batch *batch) {
    float losses[64];
    double sum = 0;
    int32_t n = 0;
    assert_int_equal(train_evaluate(t, batch, losses), ROCQ_OK);
    for (int64_t i = 0; i < t->n; i++) {
        sum += batch->targets[i] >= 0 ? (double)losses[i] : 0;
        n += batch->targets[i] >= 0;
    }
    return sum / n;
}

// The gradient of each half of each adapter, at its largest entry, against differences of the loss.
static void gradients_are_differences_of_the_loss(void **state) {
    (void)state;
    torch_run p;
    rig r;
    char path[256];
    snprintf(path, sizeof path, "%s", path_of("wide-coded"));
    convert(path_of("wide"), path, ROCQ_Q4_K, false);
    torch_open(&p, "wide");
    rig_open(&r, path, &p.how, 2);
    for (int i = 0; i < 8; i++) { // until B is no longer 0
        const train_batch batch = torch_batch(&p, i);
        step(&r.t, &batch, 1e-2f);
    }
    const train_batch batch = {p.ids, p.aims, NULL};
    step(&r.t, &batch, 0);
    for (int32_t i = 0; i < r.t.n_params; i++) {
        const rocq_tensor w = train__view(&r.t.params[i], &r.t.masters);
        const rocq_tensor dw = train__view(&r.t.params[i], &r.t.gradients);
        const int64_t n = rocq_tensor_count(&w);
        float *values = (float *)malloc((size_t)n * 4), *gradient = (float *)malloc((size_t)n * 4);
        assert_true(values && gradient);
        assert_int_equal(rocq_download(r.ctx, values, &w, n * 4), ROCQ_OK);
        assert_int_equal(rocq_download(r.ctx, gradient, &dw, n * 4), ROCQ_OK);
        int64_t best = 0;
        for (int64_t k = 0; k < n; k++) {
            if (fabsf(gradient[k]) > fabsf(gradient[best])) best = k;
        }
        const float was = values[best], h = 4e-3f;
        values[best] = was + h;
        assert_int_equal(rocq_upload(r.ctx, &w, values, n * 4), ROCQ_OK);
        const double above = mean_loss(&r.t, &batch);
        values[best] = was - h;
        assert_int_equal(rocq_upload(r.ctx, &w, values, n * 4), ROCQ_OK);
        const double below = mean_loss(&r.t, &batch);
        values[best] = was;
        assert_int_equal(rocq_upload(r.ctx, &w, values, n * 4), ROCQ_OK);
        const double slope = (above - below) / (2 * (double)h);
        if (!(fabs(slope - (double)gradient[best]) <= 1e-2 * fabs(slope)))
            fail_msg("%s: gradient %g, slope %g", r.t.params[i].name, (double)gradient[best],
                     slope);
        free(values);
        free(gradient);
    }
    rig_close(&r);
    torch_close(&p);
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

// Adapters that were trained, in llama.cpp: the losses that the trainer saw. Without them the
// losses are others.
static const rocq_format f32[] = {ROCQ_F32, ROCQ_I32}, q8_0[] = {ROCQ_Q8_0, ROCQ_I32},
    q4_K[] = {ROCQ_Q6_K, ROCQ_Q4_K, ROCQ_Q4_K, ROCQ_Q6_K, ROCQ_Q4_K, ROCQ_Q4_K, ROCQ_I32};

#define SIZES(embd, heads, kv_heads, dim, ff, vocab)                                            \
    .n_embd = embd, .n_heads = heads, .n_kv_heads = kv_heads, .head_dim = dim, .n_ff = ff,      \
    .n_vocab = vocab

static const model_spec adapted[] = {
    {"train llama-F32", "llama", SIZES(128, 4, 2, 32, 160, 517), .formats = f32},
    {"train llama-Q4_K", "llama", SIZES(256, 4, 2, 64, 256, 517), .formats = q4_K},
    {"train qwen3-Q8_0", "qwen3", SIZES(128, 4, 2, 64, 160, 401), .formats = q8_0, .tied = true},
    {"train gemma2-F32", "gemma2", SIZES(128, 4, 2, 64, 160, 517), .formats = f32, .n_layers = 3,
     .tied = true, .window = 16, .attention_cap = 1, .final_cap = 30},
    {"train gpt2-F32", "gpt2", SIZES(128, 4, 4, 32, 160, 517), .formats = f32},
};

static void expect_other_losses(const float *logits, int32_t n_vocab, const int32_t *targets,
                                const float *losses) {
    double most = 0;
    for (int32_t i = 0; i < N_TEXT; i++) {
        const double s = surprise(logits + (int64_t)i * n_vocab, n_vocab, targets[i]);
        most = fmax(most, fabs(s - (double)losses[i]));
    }
    assert_true(most > 0.5);
}

static void llama_cpp_reads_the_adapter(void **state) {
    (void)state;
    if (!peer_open()) skip();
    for (size_t k = 0; k < sizeof adapted / sizeof *adapted; k++) {
        const model_spec *s = &adapted[k];
        // llama.cpp multiplies quantized weights with activations of 8 bits.
        const double tolerance = s->formats == f32 ? 2e-4 : 5e-2;
        rig r;
        train_options how = {0};
        int32_t ids[N_TEXT], targets[N_TEXT];
        float losses[N_TEXT], scale = 1;
        char base[256];
        rocq_ctx *ctx = NULL;
        assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
        strcpy(base, model_path(s->name));
        model_write(ctx, s, base, peer.quantize);
        rocq_close(&ctx);
        how.n_tokens = N_TEXT;
        how.rank = 5;
        how.alpha = 12;
        rig_open(&r, base, &how, 2);
        text_of(s->n_vocab, ids, targets);
        const train_batch batch = {ids, targets, NULL};
        for (int i = 0; i < 12; i++) step(&r.t, &batch, 1e-2f);
        assert_int_equal(train_evaluate(&r.t, &batch, losses), ROCQ_OK);
        if (train_write_lora(&r.t, path_of("adapter")) != ROCQ_OK) fail_msg("%s", r.t.error);
        expect_refused(&r.t, train_write_gguf(&r.t, r.file, ROCQ_F32, "x"), ROCQ_E_ARGUMENT,
                       "adapters");

        float *logits = (float *)malloc((size_t)N_TEXT * (size_t)s->n_vocab * 4);
        assert_non_null(logits);
        peer_model p;
        peer_load(&p, base, 64, 0);
        peer_decode(&p, ids, N_TEXT, logits);
        expect_other_losses(logits, s->n_vocab, targets, losses);
        void *adapter = peer.llama_adapter_lora_init(p.model, path_of("adapter"));
        if (!adapter) fail_msg("llama.cpp does not load the adapter: %s", peer.log);
        assert_int_equal(peer.llama_set_adapters_lora(p.context, &adapter, 1, &scale), 0);
        peer_forget(&p);
        peer_decode(&p, ids, N_TEXT, logits);
        expect_losses(s->name, logits, s->n_vocab, targets, losses, tolerance);
        peer_close(&p);
        free(logits);
        rig_close(&r);
    }
}

// ---- bad input ----------------------------------------------------------------------------------

static void weights_of_ignored_targets_are_not_read(void **state) {
    (void)state;
    rig r;
    int32_t ids[N_TEXT], targets[N_TEXT];
    float weights[N_TEXT];
    double loss[2];
    for (int i = 0; i < 2; i++) {
        rig_open_trained(&r, "llama", 0, 0);
        text_of(r.model.n_vocab, ids, targets);
        for (int32_t k = 0; k < N_TEXT; k++) weights[k] = 1;
        targets[3] = -1;
        if (i == 1) weights[3] = NAN;
        const train_batch batch = {ids, targets, weights};
        assert_int_equal(train_step(&r.t, &batch, 1e-3f), ROCQ_OK);
        assert_false(r.t.result.skipped);
        loss[i] = r.t.result.loss;
        rig_close(&r);
    }
    assert_true(loss[0] > 0 && loss[0] == loss[1]);
}

static void bad_calls_are_refused(void **state) {
    (void)state;
    rig r;
    train_options how = {0};
    int32_t ids[N_TEXT], targets[N_TEXT];
    float weights[N_TEXT], losses[N_TEXT];
    rig_open_trained(&r, "llama", 0, 0);
    trainer other;
    const int32_t n_vocab = r.model.n_vocab;
    text_of(n_vocab, ids, targets);
    train_batch batch = {ids, targets, NULL};
    step(&r.t, &batch, 1e-3f);
    float *before = masters_of(&r.t);
    const int32_t n_targets = r.t.result.n_targets;
    assert_true(n_targets > 1);
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
    assert_int_equal(r.t.result.n_targets, n_targets); // of the last step that was one
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
               {8, 4, 1, "", ROCQ_E_NOT_FOUND, "no matrix \"\""},
               {8, 4, 1, "q,", ROCQ_E_NOT_FOUND, "no matrix \"\""},
               {8, 4, 1, "norm", ROCQ_E_NOT_FOUND, "no matrix \"norm\""}};
    static const float scales[] = {NAN, INFINITY, -2, 0.5f};
    for (int i = 0; i < 4; i++) {
        const train_options scaled = {.n_tokens = 8, .loss_scale = scales[i]};
        expect_refused(&other, train_open(&other, &r.model, &scaled), ROCQ_E_ARGUMENT,
                       "loss scale");
    }
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
    llama_model sharing; // weights that another model uses, or that are gone
    llama_options shared = {0};
    shared.share = &r.model;
    how.n_tokens = 8;
    how.take_weights = true;
    assert_int_equal(llama_open(&sharing, r.ctx, r.file, &shared), ROCQ_OK);
    expect_refused(&other, train_open(&other, &r.model, &how), ROCQ_E_STATE, "shares them");
    llama_close(&sharing);
    assert_int_equal(train_open(&r.t, &r.model, &how), ROCQ_OK);
    assert_int_equal(llama_open(&sharing, r.ctx, r.file, &shared), ROCQ_E_STATE);
    assert_non_null(strstr(sharing.error, "are gone"));
    assert_int_equal(*r.model.n_users, 1);
    rig_close(&r);
#ifdef SIZES
    static const model_spec strange = {"train gemma3", "gemma3", SIZES(64, 2, 1, 32, 96, 301),
                                       .formats = f32};
    rocq_ctx *ctx = NULL;
    assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
    model_write(ctx, &strange, model_path(strange.name), NULL);
    rocq_close(&ctx);
    rig_open_model(&r, model_path(strange.name), 1);
    how.n_tokens = 8;
    expect_refused(&other, train_open(&other, &r.model, &how), ROCQ_E_UNSUPPORTED,
                   "gemma3 models cannot be trained");
    rig_close(&r);
#endif
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

// A step that fails half way leaves result and losses as the step before has left them, so that the
// two fit together, and not those of its first micro-batches.
static void a_step_that_fails_keeps_the_losses(void **state) {
    (void)state;
    rig r;
    int32_t ids[N_TEXT], targets[N_TEXT];
    float losses[N_TEXT];
    train_options how = {0};
    how.n_tokens = N_TEXT / 2;
    how.n_accumulate = 2;
    rig_open(&r, path_of("llama"), &how, 2);
    text_of(r.model.n_vocab, ids, targets);
    const train_batch batch = {ids, targets, NULL};
    step(&r.t, &batch, 1e-2f);
    const train_result result = r.t.result;
    memcpy(losses, r.t.losses, sizeof losses);
    rocq_graph *const second = r.t.passes[0][1];
    r.t.passes[0][1] = NULL; // so that the second micro-batch cannot be launched
    assert_int_equal(train_step(&r.t, &batch, 1e-2f), ROCQ_E_ARGUMENT);
    r.t.passes[0][1] = second;
    assert_memory_equal(r.t.losses, losses, sizeof losses);
    assert_memory_equal(&r.t.result, &result, sizeof result);
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
    return system("mkdir -p " FOLDER " && /usr/bin/python3 tests/training.py " FOLDER) == 0 ? 0
                                                                                            : -1;
}

int main(int argc, char **argv) {
    if (argc > 1) cmocka_set_test_filter(argv[1]);
#ifdef TRAIN_GPU_TESTS
    const struct CMUnitTest tests[] = {TRAIN_GPU_TESTS};
#else
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpt2_agrees_with_pytorch),
        cmocka_unit_test(llama_agrees_with_pytorch),
        cmocka_unit_test(qwen2_agrees_with_pytorch),
        cmocka_unit_test(qwen3_agrees_with_pytorch),
        cmocka_unit_test(gemma2_agrees_with_pytorch),
        cmocka_unit_test(adapters_agree_with_pytorch),
        cmocka_unit_test(bits_do_not_depend_on_threads),
        cmocka_unit_test(layers_computed_again_give_the_same_bits),
        cmocka_unit_test(a_resumed_run_gives_the_same_bits),
        cmocka_unit_test(a_truncated_checkpoint_is_refused_at_every_byte),
        cmocka_unit_test(a_changed_checkpoint_does_no_harm),
        cmocka_unit_test(checkpoints_of_others_are_refused),
        cmocka_unit_test(adapters_learn_over_quantized_weights),
        cmocka_unit_test(gradients_are_differences_of_the_loss),
        cmocka_unit_test(the_written_model_is_the_trained_one),
        cmocka_unit_test(llama_cpp_reads_the_adapter),
        cmocka_unit_test(weights_of_ignored_targets_are_not_read),
        cmocka_unit_test(bad_calls_are_refused),
        cmocka_unit_test(steps_without_a_finite_gradient_are_skipped),
        cmocka_unit_test(a_step_that_fails_keeps_the_losses),
        cmocka_unit_test(steps_allocate_nothing),
    };
#endif
    return cmocka_run_group_tests(tests, write_models, NULL);
}
