// training.c - steps of training through examples/train.h, beside PyTorch.
//
//   training/distilgpt2/BxT     a step over all weights, from ids in host memory to the loss there:
//                               B texts of T tokens. DistilGPT-2's shapes with random weights;
//                               clipping at 1, AdamW with decay. F16 on a GPU with a loss scale,
//                               F32 on a CPU
//   .../torch, .../compiled     the same by PyTorch, eager and by torch.compile (GPU): autocast to
//                               BF16 and fused AdamW on a GPU, F32 on a CPU
//   training/MODEL/lora/BxT     a step of adapters of rank 16 beside all matrices. MODEL:
//                               1.1B-Q4_K, a llama shape with random weights, or demo, the shipped
//                               one
// Values below these names:
//   .../losses                  largest relative difference of the losses of 20 steps in F32 from
//                               PyTorch's, from the same weights over the same texts
//   .../forward /head           ms of a step, by a profile of its ops run one by one; head: logits,
//   .../backward /optimizer     losses and their gradients, both ways
//   .../rest                    what of the recorded step is none of them
//   .../optimizer/share         of the ceiling of copying, at 28 bytes a weight
//   .../open, .../first         ms of opening; the first step as a multiple of later ones
//   .../launches /allocations   of a later step
//   .../peak, .../torch/peak    MB of memory at once: rocq_stats.peak_bytes of a context of its
//                               own, with the model until its weights are taken or, beside
//                               adapters, as llama_open keeps it; PyTorch's allocator
//   .../state, .../activations  MB: weights that are trained, gradients and moments; what forward
//                               keeps for backward
//
// What takes a CPU long runs only where a filter names it: 8x512, 1.1B-Q4_K.
#include "bench.h"
#include "../examples/llama.h"
#include "../examples/train.h"
#include "model.h"
#include "torch.h"

enum { N_TEXTS = 20, PROFILED = 5 }; // steps whose texts differ; steps of a profile

static const float RATE = 1e-4f;

typedef struct training_case {
    const char *model;
    int32_t n_seqs, n_tokens, rank;
    bool large; // on a CPU only where it is named
} training_case;

typedef struct training {
    const training_case *c;
    torch_peer *peer;
    const char *path, *mode;
    rocq_ctx *ctx; // of its own, so that its peak of memory is this training's
    rocq_gguf *file;
    llama_model m;
    trainer t;
    int32_t *ids, *targets; // [N_TEXTS n_seqs n_tokens]
    int64_t at;             // steps so far
    double n_products;      // weights of matrices that a token is multiplied with
} training;

// -- models --

// Uniform values of standard deviation 0.02, norms' weights around 1.
static void gpt2_put(rocq_gguf_writer *w, bool adding, const char *name, int64_t k, int64_t m,
                     float mean, bool *failed) {
    const int64_t ne[2] = {k, m}, n = k * m;
    uint64_t state = (uint64_t)n;
    if (adding) {
        *failed |= rocq_gguf_writer_add_tensor(w, name, ROCQ_F32, m == 1 ? 1 : 2, ne) != ROCQ_OK;
        return;
    }
    float *values = (float *)bench_alloc(n * (int64_t)sizeof *values);
    for (const char *c = name; *c; c++) state = state * 31 + (uint64_t)*c;
    for (int64_t i = 0; i < n; i++) values[i] = mean + bench_uniform(&state, -0.0346f, 0.0346f);
    *failed |= rocq_gguf_writer_write(w, values, n * (int64_t)sizeof *values) != ROCQ_OK;
    free(values);
}

static bool write_gpt2(bench *b, int32_t d, int32_t heads, int32_t layers, int32_t vocab,
                       int32_t n_ctx, const char *path) {
    static const struct {
        const char *name;
        int32_t k, m;
    } parts[] = { // times d; m 0: a norm
        {"attn_norm", 1, 0}, {"attn_qkv", 1, 3}, {"attn_output", 1, 1},
        {"ffn_norm", 1, 0},  {"ffn_up", 1, 4},   {"ffn_down", 4, 1}};
    const rocq_gguf_writer_desc desc = {.path = path};
    rocq_gguf_writer *w;
    char name[64];
    bool failed = false;
    if (rocq_gguf_writer_open(b->ctx, &w, &desc) != ROCQ_OK) return false;
    rocq_gguf_writer_set_str(w, "general.architecture", "gpt2");
    rocq_gguf_writer_set_str(w, "tokenizer.ggml.model", "no_vocab");
    rocq_gguf_writer_set_u32(w, "gpt2.vocab_size", (uint32_t)vocab);
    rocq_gguf_writer_set_u32(w, "gpt2.embedding_length", (uint32_t)d);
    rocq_gguf_writer_set_u32(w, "gpt2.block_count", (uint32_t)layers);
    rocq_gguf_writer_set_u32(w, "gpt2.feed_forward_length", (uint32_t)(4 * d));
    rocq_gguf_writer_set_u32(w, "gpt2.context_length", (uint32_t)n_ctx);
    rocq_gguf_writer_set_u32(w, "gpt2.attention.head_count", (uint32_t)heads);
    rocq_gguf_writer_set_f32(w, "gpt2.attention.layer_norm_epsilon", 1e-5f);
    for (int pass = 0; pass < 2 && !failed; pass++) {
        const bool adding = pass == 0;
        gpt2_put(w, adding, "token_embd.weight", d, vocab, 0, &failed);
        gpt2_put(w, adding, "position_embd.weight", d, n_ctx, 0, &failed);
        for (int32_t l = 0; l < layers; l++) {
            for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
                const bool norm = parts[i].m == 0;
                const int64_t k = norm ? 1 : parts[i].k * d, m = norm ? d : parts[i].m * d;
                snprintf(name, sizeof name, "blk.%d.%s.weight", (int)l, parts[i].name);
                gpt2_put(w, adding, name, norm ? m : k, norm ? 1 : m, norm ? 1 : 0, &failed);
                snprintf(name, sizeof name, "blk.%d.%s.bias", (int)l, parts[i].name);
                gpt2_put(w, adding, name, m, 1, 0, &failed);
            }
        }
        gpt2_put(w, adding, "output_norm.weight", d, 1, 1, &failed);
        gpt2_put(w, adding, "output_norm.bias", d, 1, 0, &failed);
    }
    return rocq_gguf_writer_close(&w) == ROCQ_OK && !failed;
}

static bool write_case(bench *b, const training_case *c, const char *path) {
    struct stat made;
    if (stat(path, &made) == 0) return true;
    if (c->rank > 0) return write_model(b, model_small(b), 512, path);
    if (b->tiny) return write_gpt2(b, 64, 4, 2, 320, 64, path);
    return write_gpt2(b, 768, 12, 6, 50257, 1024, path);
}

// -- ours --

static rocq_result step(void *user) {
    training *d = (training *)user;
    const int64_t at = d->at++ % N_TEXTS * d->c->n_seqs * d->c->n_tokens;
    const train_batch batch = {.ids = d->ids + at, .targets = d->targets + at};
    return train_step(&d->t, &batch, RATE);
}

static bool learned(void *user) { // of the step before
    const training *d = (const training *)user;
    return isfinite(d->t.result.loss) && !d->t.result.skipped;
}

static rocq_result open_training(training *d, const bench *b, rocq_precision precision,
                                 bool no_graphs) {
    const rocq_desc desc = {.prefer = b->gpu ? ROCQ_BACKEND_GPU : ROCQ_BACKEND_CPU,
                            .n_threads = b->n_threads,
                            .kernels_path = b->kernels,
                            .no_graphs = no_graphs,
                            .rocm_path = getenv("ROCM_PATH"),
                            .hip_path = getenv("HIP_PATH")};
    const rocq_gguf_desc file = {.path = d->path};
    const llama_options small = {.n_ctx = 8, .n_batch = 1};
    const train_options how = {.n_seqs = d->c->n_seqs,
                               .n_tokens = d->c->n_tokens,
                               .rank = d->c->rank,
                               .weight_decay = 0.01f,
                               .take_weights = true,
                               .precision = precision};
    d->at = 0;
    if (rocq_open(&d->ctx, &desc) != ROCQ_OK) return ROCQ_E_DEVICE;
    rocq_result result = rocq_gguf_open(d->ctx, &d->file, &file);
    if (result == ROCQ_OK) result = llama_open(&d->m, d->ctx, d->file, &small);
    if (result == ROCQ_OK) result = train_open(&d->t, &d->m, &how);
    return result;
}

static const char *why(const training *d) {
    return d->t.error[0]   ? d->t.error
           : d->m.error[0] ? d->m.error
           : d->ctx        ? rocq_error(d->ctx)
                           : "no context";
}

static void close_training(training *d) {
    train_close(&d->t);
    llama_close(&d->m);
    rocq_gguf_close(&d->file);
    rocq_close(&d->ctx);
}

// Random ids, the next one is each target; for PyTorch in a file, texts of n_tokens + 1.
static void make_texts(training *d, int32_t n_vocab) {
    const int64_t n = d->c->n_tokens, n_texts = (int64_t)N_TEXTS * d->c->n_seqs;
    char path[100];
    uint64_t state = 5;
    snprintf(path, sizeof path, "%s/ids.i32", d->peer->folder);
    FILE *f = fopen(path, "wb");
    d->ids = (int32_t *)bench_alloc(n_texts * n * (int64_t)sizeof *d->ids);
    d->targets = (int32_t *)bench_alloc(n_texts * n * (int64_t)sizeof *d->targets);
    for (int64_t text = 0; text < n_texts; text++) {
        int32_t id = (int32_t)(bench_random(&state) % (uint64_t)n_vocab);
        for (int64_t i = 0; i < n; i++) {
            d->ids[text * n + i] = id;
            if (f) fwrite(&id, sizeof id, 1, f);
            id = (int32_t)(bench_random(&state) % (uint64_t)n_vocab);
            d->targets[text * n + i] = id;
        }
        if (f) fwrite(&id, sizeof id, 1, f);
    }
    if (f) fclose(f);
}

static double count_products(const training *d) {
    rocq_gguf_tensor t;
    double n = 0;
    const bool tied = rocq_gguf_find_tensor(d->file, "output.weight", &t) != ROCQ_OK;
    for (int64_t i = 0; rocq_gguf_tensor_at(d->file, i, &t) == ROCQ_OK; i++) {
        const bool table = strncmp(t.name.data, "position_embd", 13) == 0 ||
                           (!tied && strncmp(t.name.data, "token_embd", 10) == 0);
        if (t.n_dims == 2 && !table) n += (double)(t.ne[0] * t.ne[1]);
    }
    return n;
}

// -- PyTorch's --

static rocq_result torch_step(void *user) {
    training *d = (training *)user;
    const double ns = torch_ask(d->peer, "step %s %d %d %s 1", d->c->model, (int)d->c->n_seqs,
                                (int)d->c->n_tokens, d->mode);
    return ns < 0 ? ROCQ_E_UNSUPPORTED : ROCQ_OK;
}

// An untimed step before every timed one: in training a step follows a step. One that followed the
// other program's would begin with the GPU's change from one process to the other, 0.17 ms on an
// H200, on our side as on PyTorch's.
static void step_before(void *user) { (void)step(user); }
static void torch_step_before(void *user) { (void)torch_step(user); }

// Losses of 20 steps in F32 on both sides.
static void compare_losses(bench *b, training *d, const char *name) {
    char line[128], path[100];
    float theirs[N_TEXTS];
    double worst = 0;
    const double last = torch_ask(d->peer, "losses %s %d %d %d %g", d->c->model, (int)d->c->n_seqs,
                                  (int)d->c->n_tokens, N_TEXTS, (double)RATE);
    snprintf(path, sizeof path, "%s/losses.f32", d->peer->folder);
    FILE *f = last < 0 ? NULL : fopen(path, "rb");
    const bool read = f && fread(theirs, sizeof *theirs, N_TEXTS, f) == N_TEXTS;
    if (f) fclose(f);
    snprintf(line, sizeof line, "%s/losses", name);
    if (!read) {
        bench_skip(b, line, d->peer->to ? d->peer->reply : "no PyTorch");
        return;
    }
    bool ok = open_training(d, b, ROCQ_PRECISION_F32, false) == ROCQ_OK;
    for (int i = 0; i < N_TEXTS && ok; i++) {
        ok = step(d) == ROCQ_OK && !d->t.result.skipped;
        worst = fmax(worst, fabs(d->t.result.loss / (double)theirs[i] - 1));
    }
    if (!ok) bench_fail(b, line, why(d));
    else bench_value(b, line, worst, "of the loss", worst <= 1e-3);
    close_training(d);
}

// -- measuring --

// Values after the timed steps of ns each, in the same context.
static void steady_values(bench *b, training *d, const char *name, double open_ns, double first_ns,
                          double ns) {
    char line[128];
    rocq_stats before, after;
    rocq_get_stats(d->ctx, &before);
    const bool ran = step(d) == ROCQ_OK && rocq_get_stats(d->ctx, &after) == ROCQ_OK;
    if (!ran) {
        bench_fail(b, name, why(d));
        return;
    }
    const double allocs = (double)(after.n_allocs - before.n_allocs);
    const struct {
        const char *what;
        double value;
        const char *unit;
        bool right;
    } values[] = {{"open", open_ns * 1e-6, "ms", true},
                  {"first", first_ns / ns, "of a later step", true},
                  {"launches", (double)(after.n_launches - before.n_launches), "of a step", true},
                  {"allocations", allocs, "of a later step", allocs == 0},
                  {"peak", (double)after.peak_bytes * 1e-6, "MB", true},
                  {"state", (double)d->t.state_bytes * 1e-6, "MB", true},
                  {"activations", (double)d->t.activation_bytes * 1e-6, "MB", true}};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        snprintf(line, sizeof line, "%s/%s", name, values[i].what);
        bench_value(b, line, values[i].value, values[i].unit, values[i].right);
    }
}

// What a step is made of, in a context that runs its ops one by one.
static void part_values(bench *b, training *d, const char *name, double ns) {
    static const char *const parts[4] = {"forward", "head", "backward", "optimizer"};
    const rocq_profile_desc desc = {.cost = 1};
    rocq_region_stats stats;
    char line[128];
    double sum = 0;
    bool ok = open_training(d, b, ROCQ_PRECISION_AUTO, true) == ROCQ_OK && step(d) == ROCQ_OK &&
              rocq_profile_start(d->ctx, &desc) == ROCQ_OK;
    for (int i = 0; i < PROFILED && ok; i++) ok = step(d) == ROCQ_OK;
    if (!ok) bench_fail(b, name, why(d));
    for (int part = 0; part < 4 && ok; part++) {
        double total = 0;
        for (int32_t i = 0; i < rocq_profile_count(d->ctx); i++) {
            if (rocq_profile_region(d->ctx, i, &stats) != ROCQ_OK) continue;
            if (strcmp(stats.name, parts[part]) == 0) total += stats.total_ns / (double)PROFILED;
        }
        snprintf(line, sizeof line, "%s/%s", name, parts[part]);
        if (total > 0) bench_value(b, line, total * 1e-6, "ms", true);
        sum += total;
        if (part < 3 || total <= 0 || b->copy_all <= 0) continue;
        snprintf(line, sizeof line, "%s/optimizer/share", name);
        bench_value(b, line, 28 * (double)d->t.n_weights / total * 1e9 / b->copy_all,
                    "of the copy ceiling", true);
    }
    snprintf(line, sizeof line, "%s/rest", name);
    if (sum > 0) bench_value(b, line, (ns - sum) * 1e-6, "ms", true);
    if (d->ctx) rocq_profile_clear(d->ctx);
    close_training(d);
}

// Beside each other in turn. Returns the median of our step in ns, 0 where it was not measured.
static double measure_steps(bench *b, training *d, const char *name) {
    static const char *const modes[2] = {"eager", "compiled"}, *const endings[2] = {"torch",
                                                                                    "compiled"};
    const double tokens = (double)d->c->n_seqs * d->c->n_tokens, passes = d->c->rank > 0 ? 4 : 6;
    const double scores = tokens * d->c->n_tokens * d->m.n_heads * d->m.head_dim * d->m.n_layers;
    training theirs[2] = {*d, *d};
    char names[2][128];
    bench_case cases[3] = {{.name = name,
                            .bytes = 28 * (double)d->t.n_weights,
                            .flops = passes * (d->n_products * tokens + scores),
                            .run = step,
                            .enter = b->gpu ? step_before : NULL,
                            .verify = learned,
                            .user = d,
                            .single = true,
                            .unit = b->gpu ? BENCH_F16 : BENCH_F32}};
    int n = 1;
    for (int i = 0; i < (d->c->rank > 0 ? 0 : b->gpu && !b->tiny ? 2 : 1); i++) {
        theirs[i].mode = modes[i];
        if (torch_step(&theirs[i]) != ROCQ_OK) continue;
        double peak = 0;
        for (int run = 0; run < 3; run++)
            torch_step(&theirs[i]); // warm; the last is compiled
        snprintf(names[i], sizeof names[i], "%s/%s/peak", name, endings[i]);
        if (b->gpu && (peak = torch_ask(d->peer, "peak")) > 0)
            bench_value(b, names[i], peak * 1e-6, "MB", true);
        snprintf(names[i], sizeof names[i], "%s/%s", name, endings[i]);
        cases[n] = cases[0];
        cases[n].name = names[i];
        cases[n].run = torch_step;
        cases[n].enter = b->gpu ? torch_step_before : NULL;
        cases[n].verify = NULL;
        cases[n++].user = &theirs[i];
    }
    const bench_result *result = bench_run_pair(b, cases, n);
    return result ? result->summary.median : 0;
}

static void measure(bench *b, torch_peer *peer, const training_case *c) {
    char name[96], path[128];
    training d = {.c = c, .peer = peer};
    snprintf(name, sizeof name, "training/%s%s/%dx%d", c->model, c->rank > 0 ? "/lora" : "",
             (int)c->n_seqs, (int)c->n_tokens);
    bool named = b->gpu || !c->large;
    for (int i = 0; i < b->n_filters; i++) named |= strncmp(b->filters[i], name, strlen(name)) == 0;
    if (!bench_wants(b, name)) return;
    if (!named) {
        bench_skip(b, name, "it would take long; name it to have it");
        return;
    }
    snprintf(path, sizeof path, "%s/%s.gguf", peer->folder, c->model);
    d.path = strcmp(c->model, "demo") == 0 ? "examples/model/rocq-demo.gguf" : path;
    if (d.path == path && !write_case(b, c, path)) {
        bench_fail(b, name, rocq_error(b->ctx));
        return;
    }
    const double start = bench__now();
    if (open_training(&d, b, ROCQ_PRECISION_AUTO, false) != ROCQ_OK) {
        bench_fail(b, name, why(&d));
        close_training(&d);
        return;
    }
    const double opened = bench__now();
    make_texts(&d, d.m.n_vocab);
    d.n_products = count_products(&d);
    const double begun = bench__now();
    const bool ran = step(&d) == ROCQ_OK;
    const double first = bench__now() - begun, ns = ran ? measure_steps(b, &d, name) : 0;
    if (!ran) bench_fail(b, name, why(&d));
    if (ns > 0) steady_values(b, &d, name, opened - start, first, ns);
    close_training(&d);
    if (ns > 0) part_values(b, &d, name, ns);
    if (ns > 0 && c->rank == 0) compare_losses(b, &d, name);
    free(d.ids);
    free(d.targets);
}

int main(int argc, char **argv) {
    static const training_case cases[] = {{"distilgpt2", 1, 31, 0, false},
                                          {"distilgpt2", 1, 512, 0, false},
                                          {"distilgpt2", 8, 512, 0, true},
                                          {"demo", 4, 256, 16, false},
                                          {"1.1B-Q4_K", 1, 512, 16, true}};
    static const training_case tiny[] = {{"tiny-gpt2", 2, 16, 0, false},
                                         {"tiny-llama", 2, 16, 4, false}};
    bench b;
    torch_peer peer;
    if (!bench_open(&b, argc, argv, "training")) return 1;
    torch_start(&peer, &b);
    if (b.tiny) {
        for (int i = 0; i < 2; i++) measure(&b, &peer, &tiny[i]);
    } else {
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) measure(&b, &peer, &cases[i]);
    }
    torch_end(&peer);
    return bench_close(&b);
}
