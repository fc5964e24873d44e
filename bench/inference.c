// inference.c - whole models through examples/llama.h: time to the first token of prompts of 128,
// 512 and 2048, and the step of a token, with llama.cpp's library beside: on the CPU that of
// ROCQ_GGML_DIR, on a GPU that of ROCQ_GGML_GPU_DIR (see ggml.h) with all layers on it.
//
// Models: the shipped one, and llama shapes with random weights, written to a file in TMPDIR (or
// /tmp) that is unlinked at once: 0.1B and 0.3B are SmolLM2 135M and 360M, whose rows of 576 and
// 960 weights no K format takes, 1.1B is TinyLlama, 7B Llama 2; and mixtures of experts: 8x1B is
// 1.1B's with eight experts of which a token takes two, qwen3moe-30B-A3B takes 8 of 128,
// gpt-oss-20B 4 of 32. 7B and mixtures run on a GPU, or where a filter names them. Tokens are drawn
// greedily, and brought to the host.
//
//   inference/MODEL/ttft/N     from N tokens to the first one drawn; the cache is empty before. A
//                              prompt that a CPU would read for more than 3 s, by the shorter one
//                              before it, is left out unless a filter names it
//   inference/MODEL/decode/N   a step with N tokens in the cache: eval, draw, the token on the
//                              host. What fits the caches is there, but between steps llama.cpp has
//                              its turn and threads fall asleep. Of the shipped model also
//       .../row                a step of 16 in a row, as text is generated
//       .../cold               a step after the CPU's caches were emptied, as by a game's frame
//   inference/MODEL/lora/N     a step like decode/N, with an adapter of rank 16 beside all
//                              matrices, in turn with the same step without it, .../off
//   inference/MODEL/phase/N/.. what the time to the first token is made of
//   values: load (ms, file in the page cache), launches (with the adapter, too), allocations (none)
//   a step, bytes
//
// And where a filter contains "threads" (bench/run cpu threads), on the CPU:
//
//   inference/MODEL/ttft/128/threads/N, decode/128/threads/N     with 1, 2, 4 ... threads, as many
//                              as there are cores, and a table of these in the end

#include "bench.h"
#include "ggml.h"
#include "../examples/llama.h"
#include "model.h"

// What tests/llama_cpp.h takes from cmocka: a library that does not fit is one that is not there.
#include <setjmp.h>
static jmp_buf peer_failed;
static char peer_why[400];
#define fail_msg(...) (snprintf(peer_why, sizeof peer_why, __VA_ARGS__), longjmp(peer_failed, 1))
#define assert_true(x) ((x) ? (void)0 : fail_msg("%s is not so", #x))
#define assert_non_null(p) assert_true(p)
#define assert_int_equal(a, b) assert_true((a) == (b))
#include "../tests/llama_cpp.h"

enum { MAX_PROMPT = 4608, VERIFY = 24, ROW = 16 };

typedef struct session {
    bench *b;
    const char *name, *threads; // of the model; "" or "/threads/N"
    double n_weights;    // that a token multiplies: of the products (an embedding that is no output
                         // is looked up), and of the experts those that it takes
    double step_bytes;   // of these
    int32_t n_threads;   // of the CPU
    rocq_gguf *file;
    llama_model m;
    peer_model peer;
    int32_t tokens[MAX_PROMPT], n, past; // of the case: tokens to read, tokens before,
    int32_t steps;                       // and how often to go on by n more
    int32_t drawn;
    bool right, peer_right;
} session;

static const rocq_sample_params greedy; // temperature 0

static rocq_result run(void *user) {
    session *s = (session *)user;
    rocq_result result = ROCQ_OK;
    for (int32_t i = 0; i < s->steps && result == ROCQ_OK; i++) {
        result = llama_eval(&s->m, s->tokens + s->past + i * s->n, s->n, NULL);
        if (result == ROCQ_OK) result = llama_sample(&s->m, &greedy, &s->drawn);
    }
    return result;
}
static void reset(void *user) {
    session *s = (session *)user;
    s->m.n_past = s->past;
}

static rocq_result peer_eval(session *s, int32_t first, int32_t n) {
    peer_batch batch = {0};
    batch.n_tokens = n;
    batch.token = s->tokens + first;
    batch.logits = s->peer.wanted + MAX_PROMPT - n; // zeros, but for the last
    return peer.llama_decode(s->peer.context, batch) == 0 ? ROCQ_OK : ROCQ_E_STATE;
}
static rocq_result peer_run(void *user) {
    session *s = (session *)user;
    for (int32_t i = 0; i < s->steps; i++) {
        const rocq_result result = peer_eval(s, s->past + i * s->n, s->n);
        if (result != ROCQ_OK) return result;
        const float *logits = peer.llama_get_logits_ith(s->peer.context, -1);
        s->drawn = 0;
        for (int32_t t = 1; t < s->peer.n_vocab; t++)
            if (logits[t] > logits[s->drawn]) s->drawn = t;
    }
    return ROCQ_OK;
}
static void peer_reset(void *user) {
    session *s = (session *)user;
    peer.llama_memory_seq_rm(peer.llama_get_memory(s->peer.context), 0, s->past, -1);
}

static bool is_right(void *user) { // of the model: see check
    const session *s = (const session *)user;
    return s->right && s->drawn >= 0 && s->drawn < s->m.n_vocab;
}
static bool peer_is_right(void *user) {
    return ((const session *)user)->peer_right && is_right(user);
}

// Logits of the same tokens, read at once and one by one, must agree, since they come from
// different kernels; and with llama.cpp's, where it is there. Int8 activations of 22 layers differ
// by more than one product's bound.
static void check(session *s, const char *name) {
    char value[160];
    const int32_t n = VERIFY;
    float *all = (float *)bench_alloc((int64_t)n * s->m.n_vocab * (int64_t)sizeof *all);
    float *one = (float *)bench_alloc(s->m.n_vocab * (int64_t)sizeof *one);
    const float *last = all + (int64_t)(n - 1) * s->m.n_vocab;
    s->m.n_past = 0;
    s->right = llama_eval(&s->m, s->tokens, n, all) == ROCQ_OK;
    s->m.n_past = 0;
    for (int32_t i = 0; i < n && s->right; i++)
        s->right = llama_eval(&s->m, s->tokens + i, 1, one) == ROCQ_OK;
    double nmse = s->right ? bench_nmse(one, last, s->m.n_vocab) : INFINITY;
    snprintf(value, sizeof value, "%s/nmse/steps%s", name, s->threads);
    s->right = nmse < 0.02;
    bench_value(s->b, value, nmse, "nmse", s->right);
    if (s->peer.context) {
        s->past = 0;
        peer_reset(s);
        nmse = INFINITY;
        if (peer_eval(s, 0, n) == ROCQ_OK)
            nmse = bench_nmse(last, peer.llama_get_logits_ith(s->peer.context, -1), s->m.n_vocab);
        snprintf(value, sizeof value, "%s/nmse/llama.cpp%s", name, s->threads);
        s->peer_right = nmse < 0.02;
        bench_value(s->b, value, nmse, "nmse", s->peer_right);
    }
    free(all);
    free(one);
}

// ---------------------------------------------------------------------------------------------

static bool open_peer(session *s, const char *path, int32_t n_ctx) {
    if (!ggml_open(s->b)) return false;
    peer.dir = getenv(s->b->gpu ? "ROCQ_GGML_GPU_DIR" : "ROCQ_GGML_DIR");
    snprintf(peer_why, sizeof peer_why, "there is no libllama.so in %s", peer.dir);
    if (setjmp(peer_failed) || !peer_open()) return false;
    snprintf(peer_why, sizeof peer_why, "it does not open the model");
    peer_model_params mp = peer.llama_model_default_params(); // all layers on the GPU
    peer_context_params cp = peer.llama_context_default_params();
    s->peer.model = peer.llama_model_load_from_file(path, mp);
    if (!s->peer.model) return false;
    s->peer.vocab = peer.llama_model_get_vocab(s->peer.model);
    s->peer.n_vocab = s->m.n_vocab;
    cp.n_ctx = (uint32_t)n_ctx;
    cp.n_ubatch = 512;
    cp.n_batch = (uint32_t)n_ctx; // taken in one call, computed 512 at a time
    cp.flash_attention = 1;
    cp.n_threads = cp.n_threads_batch = s->n_threads;
    s->peer.context = peer.llama_init_from_model(s->peer.model, cp);
    if (!s->peer.context) return false;
    if (ggml.pool) peer.llama_attach_threadpool(s->peer.context, ggml.pool, ggml.pool);
    s->peer.wanted = (int8_t *)calloc(MAX_PROMPT, 1);
    s->peer.wanted[MAX_PROMPT - 1] = 1;
    return true;
}

// What the time to the first token is made of: medians of five, or of what takes a second, each
// phase waited for.
static void phases(session *s, const char *prefix, int32_t n) {
    static const char *const names[2] = {"prompt", "draw"};
    char name[160];
    double samples[2][5];
    const double end = bench__now() + 1e9;
    rocq_summary summary;
    bool ok = true;
    int taken = 0;
    for (int i = 0; i < 5 && ok && (i == 0 || bench__now() < end); i++, taken++) {
        s->m.n_past = 0;
        const double start = bench__now();
        ok = llama_eval(&s->m, s->tokens, n, NULL) == ROCQ_OK && rocq_sync(s->b->ctx) == ROCQ_OK;
        const double read = bench__now();
        ok = ok && llama_sample(&s->m, &greedy, &s->drawn) == ROCQ_OK;
        samples[0][i] = read - start;
        samples[1][i] = bench__now() - read;
    }
    for (int i = 0; i < 2 && ok; i++) {
        rocq_summarize(&summary, samples[i], taken);
        snprintf(name, sizeof name, "%s/phase/%d/%s", prefix, (int)n, names[i]);
        bench_value(s->b, name, summary.median * 1e-6, "ms", s->right);
    }
}

// What to measure, by its name below "inference/MODEL/".
typedef struct measured {
    const char *what, *form; // "ttft" or "decode"; "", "/row", "/cold" or "/threads/N"
    int32_t n, past, steps;
    bool flush;
} measured;

// Prompts that take longer on a CPU are left out, by the time of a token in the one before: they
// take seven samples at least, and llama.cpp as many.
static bool too_long(const session *s, const char *name, int32_t n, double ns_per_token) {
    bool named = s->b->gpu;
    for (int i = 0; i < s->b->n_filters; i++)
        named |= strncmp(s->b->filters[i], name, strlen(name)) == 0;
    return !named && ns_per_token * n > 3e9;
}

// Returns the median of a run, in ns; 0 where it was not measured.
static double measure(session *s, const measured *w) {
    char name[128], peer_name[160];
    snprintf(name, sizeof name, "inference/%s/%s/%d%s", s->name, w->what,
             (int)(w->past > 0 ? w->past : w->n), w->form);
    snprintf(peer_name, sizeof peer_name, "%s/llama.cpp", name);
    if (w->n * w->steps + w->past > s->m.n_ctx) return 0;
    if (!bench_wants(s->b, name) && !bench_wants(s->b, peer_name)) return 0;
    s->past = 0;
    if (w->past > 0) { // what stands in both caches
        s->m.n_past = 0;
        bool ok = llama_eval(&s->m, s->tokens, w->past, NULL) == ROCQ_OK;
        if (s->peer.context) {
            ggml_wake(NULL);
            peer_reset(s);
            ok = ok && peer_eval(s, 0, w->past) == ROCQ_OK;
            ggml_sleep(NULL);
        }
        if (!ok) bench_fail(s->b, name, s->m.error);
    }
    s->n = w->n;
    s->past = w->past;
    s->steps = w->steps;
    const bool fits = s->m.weight_bytes < s->b->cache_bytes;
    bench_case c = {.name = name,
                    .bytes = (w->n > 1 ? (double)s->m.weight_bytes : s->step_bytes) * w->steps,
                    .flops = 2 * s->n_weights * w->n * w->steps,
                    .run = run,
                    .reset = reset,
                    .verify = is_right,
                    .user = s,
                    .inner = w->steps,
                    .single = true,
                    .flush = w->flush,
                    .warm = fits && !w->flush,
                    .threads = s->n_threads,
                    .unit = s->b->gpu ? BENCH_F16 : BENCH_INT8};
    bench_case cases[2] = {c, c};
    const bench_case turns = {GGML_TURNS};
    cases[1].name = peer_name;
    cases[1].run = peer_run;
    cases[1].reset = peer_reset;
    cases[1].verify = peer_is_right;
    cases[1].sync = turns.sync;
    cases[1].enter = turns.enter;
    cases[1].leave = turns.leave;
    const bench_result *result = bench_run_pair(s->b, cases, s->peer.context ? 2 : 1);
    return result ? result->summary.median : 0;
}

// Counts what a step launches.
static double launches(session *s, bool *ran) {
    rocq_stats before, after;
    s->n = s->steps = 1;
    reset(s);
    rocq_get_stats(s->b->ctx, &before);
    *ran = run(s) == ROCQ_OK;
    rocq_get_stats(s->b->ctx, &after);
    return (double)(after.n_launches - before.n_launches);
}

// Opens the model of s once more, with an adapter of rank 16 for all of its matrices.
static rocq_result open_adapted(session *s, const session *plain, const llama_options *options) {
    const char *dir = getenv("TMPDIR");
    char path[512];
    snprintf(path, sizeof path, "%s/rocq-bench-lora-%d.gguf", dir && *dir ? dir : "/tmp",
             (int)getpid());
    const rocq_gguf_desc desc = {.path = path};
    rocq_gguf *file = NULL;
    rocq_result result = ROCQ_E_IO;
    if (write_lora(s->b, plain->file, 16, path)) result = rocq_gguf_open(s->b->ctx, &file, &desc);
    if (result == ROCQ_OK) result = llama_open(&s->m, s->b->ctx, plain->file, options);
    const llama_lora lora = {"rank 16", file, 1};
    if (result == ROCQ_OK) result = llama_set_loras(&s->m, &lora, 1);
    rocq_gguf_close(&file);
    unlink(path);
    return result;
}

static void measure_lora(session *plain, const llama_options *options) {
    char name[128], off[160];
    const int32_t past = plain->b->tiny ? 16 : 128;
    snprintf(name, sizeof name, "inference/%s/lora/%d", plain->name, (int)past);
    snprintf(off, sizeof off, "%s/off", name);
    if (plain->m.n_experts > 1 || !bench_wants(plain->b, name)) return;
    session *s = (session *)bench_alloc((int64_t)sizeof *s);
    memcpy(s, plain, sizeof *s);
    memset(&s->m, 0, sizeof s->m);
    s->past = plain->past = 0;
    s->n = plain->n = past;
    s->steps = plain->steps = 1;
    plain->m.n_past = 0;
    if (open_adapted(s, plain, options) != ROCQ_OK || run(s) != ROCQ_OK || run(plain) != ROCQ_OK) {
        bench_fail(s->b, name, s->m.error[0] ? s->m.error : rocq_error(s->b->ctx));
    } else {
        s->past = plain->past = past;
        s->n = plain->n = 1;
        const bool fits = s->m.weight_bytes < s->b->cache_bytes;
        const double bytes = s->step_bytes + (double)s->m.adapters.memory.size;
        const bench_case cases[2] = {
            {.name = off, .bytes = s->step_bytes, .run = run, .reset = reset, .verify = is_right,
             .user = plain, .inner = 1, .single = true, .warm = fits},
            {.name = name, .bytes = bytes, .run = run, .reset = reset, .verify = is_right,
             .user = s, .inner = 1, .single = true, .warm = fits}};
        bool ran;
        bench_run_pair(s->b, cases, 2);
        snprintf(name, sizeof name, "inference/%s/lora/launches_per_token", s->name);
        const double n = launches(s, &ran);
        bench_value(s->b, name, n, "launches", ran);
    }
    llama_close(&s->m);
    free(s);
}

// Opens the model on both sides. False: said why.
static bool session_open(session *s, const char *path, const llama_options *options,
                         double *load) {
    uint64_t state = 1;
    char prefix[96];
    bench *b = s->b;
    const rocq_gguf_desc desc = {.path = path};
    const double start = bench__now();
    rocq_result result = rocq_gguf_open(b->ctx, &s->file, &desc);
    if (result == ROCQ_OK) result = llama_open(&s->m, b->ctx, s->file, options);
    if (result == ROCQ_OK) result = rocq_sync(b->ctx);
    *load = bench__now() - start;
    snprintf(prefix, sizeof prefix, "inference/%s", s->name);
    if (result != ROCQ_OK) {
        bench_fail(b, prefix, s->m.error[0] ? s->m.error : rocq_error(b->ctx));
        return false;
    }
    rocq_gguf_tensor t;
    const bool tied = rocq_gguf_find_tensor(s->file, "output.weight", &t) != ROCQ_OK;
    s->step_bytes = (double)s->m.weight_bytes;
    for (int64_t i = 0; rocq_gguf_tensor_at(s->file, i, &t) == ROCQ_OK; i++) {
        const double taken = t.n_dims == 3 ? (double)s->m.n_used / (double)t.ne[2] : 1;
        s->step_bytes -= (1 - taken) * (double)t.size;
        if (t.n_dims >= 2 && (tied || strncmp(t.name.data, "token_embd", 10) != 0))
            s->n_weights += taken * (double)(t.ne[0] * t.ne[1] * t.ne[2]);
    }
    for (int32_t i = 0; i < MAX_PROMPT; i++)
        s->tokens[i] = (int32_t)(bench_random(&state) % (uint64_t)s->m.n_vocab);
    if (!open_peer(s, path, s->m.n_ctx)) {
        peer_close(&s->peer);
        if (ggml.backend) bench_skip(b, "llama.cpp", peer_why);
    }
    if (s->peer.context) ggml_wake(NULL);
    check(s, prefix);
    if (s->peer.context) ggml_sleep(NULL);
    s->steps = 1;
    return true;
}
// Prompts and steps of the model, and what a step launches and allocates.
static void measure_all(session *s) {
    static const int32_t prompts[] = {29, 128, 512, 2048}, pasts[] = {128, 512, 4096};
    char name[128], prefix[96];
    bench *b = s->b;
    double per_token = 0;
    snprintf(prefix, sizeof prefix, "inference/%s", s->name);
    const int first = strcmp(s->name, "demo") == 0 ? 0 : 1; // a player's line has some 29 tokens
    for (int i = first; i < (b->tiny ? first + 1 : 4); i++) {
        const measured w = {"ttft", "", b->tiny ? 16 : prompts[i], 0, 1, false};
        snprintf(name, sizeof name, "%s/ttft/%d", prefix, (int)w.n);
        if (too_long(s, name, w.n, per_token)) {
            if (bench_wants(b, name)) bench_skip(b, name, "it would take long; name it to have it");
            continue;
        }
        const double ns = measure(s, &w);
        if (ns > 0) per_token = ns / w.n;
        if (ns > 0) phases(s, prefix, w.n);
    }
    for (int i = 0; i < (b->tiny ? 1 : 3); i++) {
        static const char *const forms[] = {"", "/row", "/cold"};
        const bool small = !b->gpu && (b->tiny || (i == 0 && strcmp(s->name, "demo") == 0));
        for (int form = 0; form < (small ? 3 : 1); form++) {
            const measured w = {"decode", forms[form], 1, b->tiny ? 16 : pasts[i],
                                form == 1 ? ROW : 1, form == 2};
            measure(s, &w);
        }
    }

    rocq_stats before, after;
    bool ran;
    rocq_get_stats(b->ctx, &before);
    const double n = launches(s, &ran);
    rocq_get_stats(b->ctx, &after);
    snprintf(name, sizeof name, "%s/launches_per_token", prefix);
    bench_value(b, name, n, "launches", ran);
    snprintf(name, sizeof name, "%s/allocations_per_token", prefix);
    bench_value(b, name, (double)(after.n_allocs - before.n_allocs), "allocations",
                ran && after.n_allocs == before.n_allocs);
}

static void session_close(session *s) {
    peer_close(&s->peer);
    llama_close(&s->m);
    rocq_gguf_close(&s->file);
    free(s);
}

static void measure_file(bench *b, const char *name, const char *path,
                         const llama_options *options) {
    double load;
    char value[128];
    session *s = (session *)bench_alloc((int64_t)sizeof *s);
    s->b = b;
    s->name = name;
    s->threads = "";
    s->n_threads = b->n_threads;
    if (session_open(s, path, options, &load)) {
        snprintf(value, sizeof value, "inference/%s/load", name);
        bench_value(b, value, load * 1e-6, "ms", s->right);
        const struct { const char *what; double value; } sizes[] = {
            {"weights", (double)s->m.weight_bytes}, {"kv", (double)s->m.kv_bytes},
            {"scratch", (double)s->m.scratch_bytes}};
        for (int i = 0; i < 3; i++) {
            snprintf(value, sizeof value, "inference/%s/bytes/%s", name, sizes[i].what);
            bench_value(b, value, sizes[i].value, "bytes", s->right);
        }
        measure_all(s);
        measure_lora(s, options);
    }
    session_close(s);
}

// A mixture of which all experts, a half, a quarter and none are kept (expert_memory):
// a prompt, then the median step of tokens that differ and the share of hits in these steps, after
// as many steps by which experts have been chosen.
static void measure_experts(bench *b, const char *name, const char *path,
                            const llama_options *options) {
    enum { STEPS = 64 };
    static const int32_t percents[] = {100, 50, 25, 0};
    const int32_t n_prompt = b->tiny ? 16 : 512, n_steps = b->tiny ? 8 : STEPS;
    double samples[STEPS], load;
    int64_t bytes = 0;
    for (int k = 0; k < 4; k++) {
        llama_expert_stats before = {0, 0, 0, 0, 0, 0}, after = before;
        llama_options own = *options;
        char value[160];
        session *s = (session *)bench_alloc((int64_t)sizeof *s);
        s->b = b;
        s->name = name;
        s->threads = "";
        s->n_threads = b->n_threads;
        if (percents[k] < 100) own.expert_memory = percents[k] > 0 ? bytes * percents[k] / 100 : -1;
        bool ok = session_open(s, path, &own, &load) && s->right;
        bytes = s->m.expert_bytes;
        double prompt = 0;
        for (int i = 0; i < 2 && ok; i++) {
            const double start = bench__now();
            s->m.n_past = 0;
            ok = llama_eval(&s->m, s->tokens, n_prompt, NULL) == ROCQ_OK &&
                 llama_sample(&s->m, &greedy, &s->drawn) == ROCQ_OK;
            prompt = bench__now() - start;
        }
        for (int i = 0; i < 2 * n_steps && ok; i++) {
            if (i == n_steps) llama_get_expert_stats(&s->m, -1, &before);
            const double start = bench__now();
            ok = llama_eval(&s->m, &s->tokens[n_prompt + i], 1, NULL) == ROCQ_OK &&
                 llama_sample(&s->m, &greedy, &s->drawn) == ROCQ_OK;
            samples[i % n_steps] = bench__now() - start;
        }
        rocq_summary summary;
        if (ok && llama_get_expert_stats(&s->m, -1, &after) == ROCQ_OK) {
            const double uses = (double)(after.n_uses - before.n_uses);
            rocq_summarize(&summary, samples, n_steps);
            snprintf(value, sizeof value, "inference/%s/experts/%d/step", name, (int)percents[k]);
            bench_value(b, value, summary.median * 1e-6, "ms", true);
            snprintf(value, sizeof value, "inference/%s/experts/%d/hits", name, (int)percents[k]);
            bench_value(b, value,
                        uses > 0 ? 100 * (double)(after.n_hits - before.n_hits) / uses : 100, "%",
                        after.n_kept * 100 <= after.n_experts * percents[k]);
            snprintf(value, sizeof value, "inference/%s/experts/%d/prompt", name,
                     (int)percents[k]);
            bench_value(b, value, prompt * 1e-6, "ms", true);
        }
        session_close(s);
    }
}

// The same prompt and step with more and more threads, on both sides: a context of its own each
// time. A program that is asked for threads alone measures nothing else.
static void measure_threads(bench *b, const char *name, const char *path,
                            const llama_options *options) {
    const int32_t cores = b->tiny ? 2 : (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
    rocq_ctx *const own = b->ctx;
    for (int32_t n = 1; n <= cores && bench_wants(b, "inference/"); n *= 2) {
        char form[32];
        double load;
        snprintf(form, sizeof form, "/threads/%d", (int)n);
        rocq_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.prefer = ROCQ_BACKEND_CPU;
        desc.n_threads = n;
        if (rocq_open(&b->ctx, &desc) != ROCQ_OK) bench__die("no context");
        if (ggml_open(b)) ggml_threads(n);
        session *s = (session *)bench_alloc((int64_t)sizeof *s);
        s->b = b;
        s->name = name;
        s->threads = form;
        s->n_threads = n;
        if (session_open(s, path, options, &load)) {
            const int32_t tokens = b->tiny ? 16 : 128;
            const measured prompt = {"ttft", form, tokens, 0, 1, false};
            const measured step = {"decode", form, 1, tokens, 1, false};
            measure(s, &prompt);
            measure(s, &step);
        }
        session_close(s);
        rocq_close(&b->ctx);
        b->ctx = own;
    }
    if (ggml.backend) ggml_threads(b->n_threads);
}

static const bench_result *find_result(const bench *b, const char *name) {
    for (int64_t i = 0; i < arrlen(b->results); i++)
        if (strcmp(b->results[i].name, name) == 0) return &b->results[i];
    return NULL;
}

// Of each case with 1, 2, 4 ... threads a line: the time, how many times as fast as with one
// thread, and the same of llama.cpp.
static void print_threads(const bench *b) {
    static const char *const sides[2] = {"", "/llama.cpp"};
    for (int64_t i = 0; i < arrlen(b->results); i++) {
        const char *name = b->results[i].name, *at = strstr(name, "/threads/1");
        if (!at || strcmp(at, "/threads/1") != 0) continue;
        const int length = (int)(at - name);
        printf("%.*s\n%8s %11s %8s %11s %8s %11s\n", length, name, "threads", "rocq", "",
               "llama.cpp", "", "its / rocq's");
        for (int n = 1; n <= 1024; n *= 2) {
            double ns[2] = {0, 0};
            for (int side = 0; side < 2; side++) {
                char other[192], median[16] = "";
                snprintf(other, sizeof other, "%.*s/threads/%d%s", length, name, n, sides[side]);
                const bench_result *r = find_result(b, other);
                snprintf(other, sizeof other, "%s%s", name, sides[side]);
                const bench_result *one = find_result(b, other);
                if (!r || !one) continue;
                ns[side] = r->summary.median;
                bench__time_text(median, ns[side]);
                if (side == 0) printf("%8d", n);
                printf(" %11s  x %5.2f", median, one->summary.median / ns[side]);
            }
            if (ns[1] > 0) printf(" %11.2f", ns[1] / ns[0]);
            if (ns[0] > 0) printf("\n");
        }
    }
}

static bool filters_have(const bench *b, const char *word, bool all) {
    int n = 0;
    for (int i = 0; i < b->n_filters; i++) n += strstr(b->filters[i], word) != NULL;
    return all ? n > 0 && n == b->n_filters : n > 0;
}

static void measure_model(bench *b, const model_shape *shape) {
    const char *name = shape->name ? shape->name : "demo";
    char prefix[96], path[512] = "examples/model/rocq-demo.gguf";
    snprintf(prefix, sizeof prefix, "inference/%s/", name);
    if (!bench_wants(b, prefix)) return;
    if (shape->name) {
        const char *dir = getenv("TMPDIR");
        snprintf(path, sizeof path, "%s/rocq-bench-%d.gguf", dir && *dir ? dir : "/tmp",
                 (int)getpid());
        if (!write_model(b, shape, MAX_PROMPT, path)) {
            prefix[strlen(prefix) - 1] = 0;
            bench_fail(b, prefix, rocq_error(b->ctx));
            unlink(path);
            return;
        }
    }
    llama_options options = {
        .n_ctx = !shape->name ? 0 : b->tiny ? 64 : b->gpu ? MAX_PROMPT : 2304, .n_batch = 512};
    if (!filters_have(b, "threads", true) && !filters_have(b, "experts/", true))
        measure_file(b, name, path, &options);
    if (shape->experts > 0 && (b->tiny || filters_have(b, "experts/", false)))
        measure_experts(b, name, path, &options);
    if (shape->name && !b->tiny) options.n_ctx = 512;
    if (!b->gpu && (b->tiny || filters_have(b, "threads", false)))
        measure_threads(b, name, path, &options);
    if (shape->name) unlink(path);
}

int main(int argc, char **argv) {
    bench b;
    if (!bench_open(&b, argc, argv, "inference")) return 1;
    static const model_shape shapes[] = {
        {.name = NULL},
        {"0.1B-Q4_0", 576, 1536, 9, 3, 30, 49152, ROCQ_Q4_0, ROCQ_Q8_0, .tied = true},
        {"0.1B-Q8_0", 576, 1536, 9, 3, 30, 49152, ROCQ_Q8_0, ROCQ_Q8_0, .tied = true},
        {"0.3B-Q4_0", 960, 2560, 15, 5, 32, 49152, ROCQ_Q4_0, ROCQ_Q8_0, .tied = true},
        {"1.1B-Q4_K", 2048, 5632, 32, 4, 22, 32000, .low = ROCQ_Q4_K, .high = ROCQ_Q6_K},
    };
    static const model_shape large[] = {
        {"7B-Q4_K", 4096, 11008, 32, 32, 32, 32000, .low = ROCQ_Q4_K, .high = ROCQ_Q6_K},
        {"7B-Q4_0", 4096, 11008, 32, 32, 32, 32000, .low = ROCQ_Q4_0, .high = ROCQ_Q6_K},
        {"8x1B-Q4_K", 2048, 5632, 32, 4, 22, 32000, .low = ROCQ_Q4_K, .high = ROCQ_Q6_K,
         .experts = 8, .used = 2, .of_experts = ROCQ_Q4_K},
        {"8x1B-Q4_0", 2048, 5632, 32, 4, 22, 32000, .low = ROCQ_Q4_0, .high = ROCQ_Q6_K,
         .experts = 8, .used = 2, .of_experts = ROCQ_Q4_0},
        {"gpt-oss-20B", 2880, 2880, 64, 8, 24, 201088, .low = ROCQ_Q8_0, .high = ROCQ_Q8_0,
         .arch = "gpt-oss", .head = 64, .experts = 32, .used = 4, .of_experts = ROCQ_MXFP4},
        {"qwen3moe-30B-A3B-Q4_K", 2048, 768, 32, 4, 48, 151936, .low = ROCQ_Q4_K,
         .high = ROCQ_Q6_K, .arch = "qwen3moe", .head = 128, .experts = 128, .used = 8,
         .of_experts = ROCQ_Q4_K},
    };
    static const model_shape tiny[] = {
        {"tiny", 128, 256, 4, 2, 2, 320, .low = ROCQ_Q4_0, .high = ROCQ_Q8_0},
        {"tiny-qwen3moe", 128, 64, 4, 2, 2, 320, .low = ROCQ_Q8_0, .high = ROCQ_Q8_0,
         .arch = "qwen3moe", .head = 64, .experts = 8, .used = 2, .of_experts = ROCQ_Q4_0},
        {"tiny-gpt-oss", 128, 64, 4, 2, 2, 320, .low = ROCQ_Q8_0, .high = ROCQ_Q8_0,
         .arch = "gpt-oss", .head = 64, .experts = 4, .used = 2, .of_experts = ROCQ_MXFP4},
    };
    for (int i = 0; i < 5 && !b.tiny; i++) measure_model(&b, &shapes[i]);
    for (int i = 0; i < 6 && !b.tiny; i++)
        if (b.gpu || filters_have(&b, large[i].name, false)) measure_model(&b, &large[i]);
    for (int i = 0; i < 3 && b.tiny; i++) measure_model(&b, &tiny[i]);
    print_threads(&b);
    ggml_close();
    return bench_close(&b);
}
