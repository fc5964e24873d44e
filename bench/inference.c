// inference.c - whole models through examples/llama.h: time to the first token of prompts of 128,
// 512 and 2048, and the step of a token, with llama.cpp's library beside: on the CPU that of
// ROCQ_GGML_DIR, on a GPU that of ROCQ_GGML_GPU_DIR (see ggml.h) with all layers on it.
//
// Models: the shipped one, and llama shapes of 1.1B and 7B with random weights, written to a file
// in TMPDIR (or /tmp) that is unlinked at once. 7B runs on a GPU, or where a filter names it.
// Tokens are drawn greedily, and brought to the host.
//
//   inference/MODEL/ttft/N     from N tokens to the first one drawn; the cache is empty before
//   inference/MODEL/decode/N   a step with N tokens in the cache: eval, draw, the token on the host
//   inference/MODEL/phase/N/.. what the time to the first token is made of
//   values: load (ms, file in the page cache), launches, allocations (none) a step, bytes

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

enum { MAX_PROMPT = 4608, VERIFY = 24 };

typedef struct session {
    bench *b;
    rocq_gguf *file;
    llama_model m;
    peer_model peer;
    int32_t tokens[MAX_PROMPT], n, past; // of the case: tokens to read, tokens before
    int32_t drawn;
    bool right, peer_right;
} session;

static const rocq_sample_params greedy; // temperature 0

static rocq_result run(void *user) {
    session *s = (session *)user;
    const rocq_result result = llama_eval(&s->m, s->tokens + s->past, s->n, NULL);
    return result == ROCQ_OK ? llama_sample(&s->m, &greedy, &s->drawn) : result;
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
    const rocq_result result = peer_eval(s, s->past, s->n);
    if (result != ROCQ_OK) return result;
    const float *logits = peer.llama_get_logits_ith(s->peer.context, -1);
    s->drawn = 0;
    for (int32_t t = 1; t < s->peer.n_vocab; t++)
        if (logits[t] > logits[s->drawn]) s->drawn = t;
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
    snprintf(value, sizeof value, "%s/nmse/steps", name);
    s->right = nmse < 0.02;
    bench_value(s->b, value, nmse, "nmse", s->right);
    if (s->peer.context) {
        s->past = 0;
        peer_reset(s);
        nmse = INFINITY;
        if (peer_eval(s, 0, n) == ROCQ_OK)
            nmse = bench_nmse(last, peer.llama_get_logits_ith(s->peer.context, -1), s->m.n_vocab);
        snprintf(value, sizeof value, "%s/nmse/llama.cpp", name);
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
    cp.n_threads = cp.n_threads_batch = s->b->n_threads;
    s->peer.context = peer.llama_init_from_model(s->peer.model, cp);
    if (!s->peer.context) return false;
    if (ggml.pool) peer.llama_attach_threadpool(s->peer.context, ggml.pool, ggml.pool);
    s->peer.wanted = (int8_t *)calloc(MAX_PROMPT, 1);
    s->peer.wanted[MAX_PROMPT - 1] = 1;
    return true;
}

// What the time to the first token is made of: medians of five, each phase waited for.
static void phases(session *s, const char *prefix, int32_t n) {
    static const char *const names[2] = {"prompt", "draw"};
    char name[160];
    double samples[2][5];
    rocq_summary summary;
    bool ok = true;
    for (int i = 0; i < 5 && ok; i++) {
        s->m.n_past = 0;
        const double start = bench__now();
        ok = llama_eval(&s->m, s->tokens, n, NULL) == ROCQ_OK && rocq_sync(s->b->ctx) == ROCQ_OK;
        const double read = bench__now();
        ok = ok && llama_sample(&s->m, &greedy, &s->drawn) == ROCQ_OK;
        samples[0][i] = read - start;
        samples[1][i] = bench__now() - read;
    }
    for (int i = 0; i < 2 && ok; i++) {
        rocq_summarize(&summary, samples[i], 5);
        snprintf(name, sizeof name, "%s/phase/%d/%s", prefix, (int)n, names[i]);
        bench_value(s->b, name, summary.median * 1e-6, "ms", s->right);
    }
}

static void measure(session *s, const char *model, const char *what, int32_t n, int32_t past,
                    double n_weights) {
    char name[128], peer_name[160];
    snprintf(name, sizeof name, "inference/%s/%s/%d", model, what, (int)(n > 1 ? n : past));
    snprintf(peer_name, sizeof peer_name, "%s/llama.cpp", name);
    if (n + past > s->m.n_ctx) return;
    if (!bench_wants(s->b, name) && !bench_wants(s->b, peer_name)) return;
    s->past = 0;
    if (past > 0) { // what stands in both caches
        s->m.n_past = 0;
        bool ok = llama_eval(&s->m, s->tokens, past, NULL) == ROCQ_OK;
        if (s->peer.context) {
            ggml_wake(NULL);
            peer_reset(s);
            ok = ok && peer_eval(s, 0, past) == ROCQ_OK;
            ggml_sleep(NULL);
        }
        if (!ok) bench_fail(s->b, name, s->m.error);
    }
    s->n = n;
    s->past = past;
    const bool warm = s->m.weight_bytes < s->b->cache_bytes; // every step reads all of them
    const bench_unit unit = s->b->gpu ? BENCH_F16 : BENCH_INT8;
    const bench_case cases[2] = {
        {.name = name, .bytes = (double)s->m.weight_bytes, .flops = 2 * n_weights * n, .run = run,
         .reset = reset, .verify = is_right, .user = s, .single = true, .warm = warm, .unit = unit},
        {.name = peer_name, .bytes = (double)s->m.weight_bytes, .flops = 2 * n_weights * n,
         .run = peer_run, .reset = peer_reset, .verify = peer_is_right, .user = s, .warm = warm,
         .unit = unit, GGML_TURNS},
    };
    bench_run_pair(s->b, cases, s->peer.context ? 2 : 1);
    if (past > 0) return;
    snprintf(name, sizeof name, "inference/%s", model);
    phases(s, name, n);
}

static void measure_model(bench *b, const model_shape *shape) {
    const char *name = shape->name ? shape->name : "demo";
    char prefix[96], value[128], path[512] = "examples/model/rocq-demo.gguf";
    snprintf(prefix, sizeof prefix, "inference/%s/", name);
    if (!bench_wants(b, prefix)) return;
    prefix[strlen(prefix) - 1] = 0;
    if (shape->name) {
        const char *dir = getenv("TMPDIR");
        snprintf(path, sizeof path, "%s/rocq-bench-%d.gguf", dir && *dir ? dir : "/tmp",
                 (int)getpid());
        if (!write_model(b, shape, MAX_PROMPT, path)) {
            bench_fail(b, prefix, rocq_error(b->ctx));
            unlink(path);
            return;
        }
    }
    session *s = (session *)bench_alloc((int64_t)sizeof *s);
    s->b = b;
    uint64_t state = 1;
    const rocq_gguf_desc desc = {.path = path};
    const llama_options options = {
        .n_ctx = !shape->name ? 0 : b->tiny ? 64 : b->gpu ? MAX_PROMPT : 2304, .n_batch = 512};
    const double start = bench__now();
    rocq_result result = rocq_gguf_open(b->ctx, &s->file, &desc);
    if (result == ROCQ_OK) result = llama_open(&s->m, b->ctx, s->file, &options);
    if (result == ROCQ_OK) result = rocq_sync(b->ctx);
    const double load = bench__now() - start;
    if (result != ROCQ_OK) bench_fail(b, prefix, s->m.error[0] ? s->m.error : rocq_error(b->ctx));
    for (int32_t i = 0; i < MAX_PROMPT && result == ROCQ_OK; i++)
        s->tokens[i] = (int32_t)(bench_random(&state) % (uint64_t)s->m.n_vocab);
    if (result == ROCQ_OK && !open_peer(s, path, s->m.n_ctx)) {
        peer_close(&s->peer);
        if (ggml.backend) bench_skip(b, "llama.cpp", peer_why);
    }
    if (shape->name) unlink(path);
    if (result == ROCQ_OK) {
        double n_weights = 0; // of the products; the embedding is looked up
        rocq_gguf_tensor t;
        for (int64_t i = 0; rocq_gguf_tensor_at(s->file, i, &t) == ROCQ_OK; i++)
            if (t.n_dims == 2 && strncmp(t.name.data, "token_embd", 10) != 0)
                n_weights += (double)(t.ne[0] * t.ne[1]);
        if (s->peer.context) ggml_wake(NULL);
        check(s, prefix);
        if (s->peer.context) ggml_sleep(NULL);
        snprintf(value, sizeof value, "%s/load", prefix);
        bench_value(b, value, load * 1e-6, "ms", s->right);
        const struct { const char *what; double value; } sizes[] = {
            {"weights", (double)s->m.weight_bytes}, {"kv", (double)s->m.kv_bytes},
            {"scratch", (double)s->m.scratch_bytes}};
        for (int i = 0; i < 3; i++) {
            snprintf(value, sizeof value, "%s/bytes/%s", prefix, sizes[i].what);
            bench_value(b, value, sizes[i].value, "bytes", s->right);
        }
        static const int32_t prompts[] = {128, 512, 2048}, pasts[] = {128, 512, 4096};
        for (int i = 0; i < 3; i++) {
            if (!b->tiny || i == 0)
                measure(s, name, "ttft", b->tiny ? 16 : prompts[i], 0, n_weights);
        }
        for (int i = 0; i < 3; i++)
            if (!b->tiny || i == 0)
                measure(s, name, "decode", 1, b->tiny ? 16 : pasts[i], n_weights);

        rocq_stats before, after;
        s->n = 1;
        reset(s);
        rocq_get_stats(b->ctx, &before);
        const bool ran = run(s) == ROCQ_OK;
        rocq_get_stats(b->ctx, &after);
        snprintf(value, sizeof value, "%s/launches_per_token", prefix);
        bench_value(b, value, (double)(after.n_launches - before.n_launches), "launches", ran);
        snprintf(value, sizeof value, "%s/allocations_per_token", prefix);
        bench_value(b, value, (double)(after.n_allocs - before.n_allocs), "allocations",
                    ran && after.n_allocs == before.n_allocs);
    }
    peer_close(&s->peer);
    llama_close(&s->m);
    rocq_gguf_close(&s->file);
    free(s);
}

int main(int argc, char **argv) {
    bench b;
    if (!bench_open(&b, argc, argv, "inference")) return 1;
    static const model_shape shapes[] = {
        {NULL, 0, 0, 0, 0, 0, 0, ROCQ_F32, ROCQ_F32},
        {"1.1B-Q4_K", 2048, 5632, 32, 4, 22, 32000, ROCQ_Q4_K, ROCQ_Q6_K},
        {"7B-Q4_K", 4096, 11008, 32, 32, 32, 32000, ROCQ_Q4_K, ROCQ_Q6_K},
        {"7B-Q4_0", 4096, 11008, 32, 32, 32, 32000, ROCQ_Q4_0, ROCQ_Q6_K},
    };
    static const model_shape tiny = {"tiny", 128, 256, 4, 2, 2, 320, ROCQ_Q4_0, ROCQ_Q8_0};
    bool large = b.gpu;
    for (int i = 0; i < b.n_filters; i++) large |= strstr(b.filters[i], "7B") != NULL;
    for (int i = 0; i < (b.tiny ? 0 : large ? 4 : 2); i++) measure_model(&b, &shapes[i]);
    if (b.tiny) measure_model(&b, &tiny);
    ggml_close();
    return bench_close(&b);
}
