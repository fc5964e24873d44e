// llama.cpp as the peer of whole-model and tokenizer tests: its C API, out of the shared objects
// of the npm package @node-llama-cpp/linux-x64 (tests/fetch-ggml), found at run time. Include after
// cmocka.h, or what defines its fail_msg and the assert_x used here. Nothing of it is linked, so
// the tests build and skip where the package is missing.
//
// Three structs cross the border by value. They are declared here up to the last field in use,
// padded well past their real size (the callee then reads and writes only its own part), and the
// library's documented defaults are compared at every named offset: by peer_open those that do not
// change between releases of one summer, by peer_load the others. A release with another layout is
// a failed test with a clear message, never a crash or a silent pass.

#ifndef TESTS_LLAMA_CPP_H
#define TESTS_LLAMA_CPP_H

#include <dlfcn.h>
#include <glob.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct peer_model_params {
    void *devices;
    void *buffer_overrides;
    int32_t n_gpu_layers; // -1
    int32_t split_mode;   // 1
    int32_t load_mode;    // -1
    int32_t lazy_mode;    // 1
    unsigned char unused[40];
    bool vocab_only;
    bool check_tensors;
    bool use_extra_bufts; // true
    unsigned char rest[181];
} peer_model_params;

typedef struct peer_context_params {
    uint32_t n_ctx;    // 512
    uint32_t n_batch;  // 2048
    uint32_t n_ubatch; // 512
    uint32_t n_seq_max;// 1
    uint32_t unused0[3];
    int32_t n_threads;
    int32_t n_threads_batch;
    int32_t context_type;
    int32_t rope_scaling, pooling, attention; // -1
    int32_t flash_attention;                  // -1
    float rope_base, rope_scale;              // 0
    float yarn[4];                            // -1
    uint32_t yarn_n_ctx;
    float defrag;
    void *eval[2];
    int32_t type_k; // 1: F16
    int32_t type_v;
    unsigned char unused1[18];
    bool no_perf; // true
    bool op_offload;
    bool swa_full;
    unsigned char rest[122];
} peer_context_params;

typedef struct peer_batch {
    int32_t n_tokens;
    int32_t *token;
    float *embd;
    int32_t *pos;       // NULL: the next ones
    int32_t *n_seq_id;
    int32_t **seq_id;   // NULL: sequence 0
    int8_t *logits;     // which positions are wanted
} peer_batch;

typedef struct peer_message {
    const char *role, *content;
} peer_message;

#define PEER_FUNCTIONS(X)                                                                          \
    X(void, llama_backend_init, (void))                                                            \
    X(void, llama_log_set, (void (*log)(int level, const char *text, void *user), void *user))     \
    X(peer_model_params, llama_model_default_params, (void))                                       \
    X(peer_context_params, llama_context_default_params, (void))                                   \
    X(void *, llama_model_load_from_file, (const char *path, peer_model_params params))            \
    X(void, llama_model_save_to_file, (const void *model, const char *path))                       \
    X(void, llama_model_free, (void *model))                                                       \
    X(void *, llama_init_from_model, (void *model, peer_context_params params))                    \
    X(void, llama_free, (void *context))                                                           \
    X(const void *, llama_model_get_vocab, (const void *model))                                    \
    X(int32_t, llama_vocab_n_tokens, (const void *vocab))                                          \
    X(bool, llama_vocab_is_eog, (const void *vocab, int32_t token))                                \
    X(int32_t, llama_vocab_bos, (const void *vocab))                                               \
    X(int32_t, llama_vocab_eos, (const void *vocab))                                               \
    X(int32_t, llama_decode, (void *context, peer_batch batch))                                    \
    X(void *, llama_get_memory, (const void *context))                                             \
    X(void, llama_memory_clear, (void *memory, bool data))                                         \
    X(bool, llama_memory_seq_rm, (void *memory, int32_t seq, int32_t first, int32_t end))          \
    X(void, llama_attach_threadpool, (void *context, void *pool, void *batch_pool))                \
    X(float *, llama_get_logits_ith, (void *context, int32_t i))                                   \
    X(void *, llama_adapter_lora_init, (void *model, const char *path))                            \
    X(int32_t, llama_set_adapters_lora, (void *context, void **adapters, size_t n, float *scales)) \
    X(int32_t, llama_tokenize, (const void *vocab, const char *text, int32_t length,               \
                                int32_t *tokens, int32_t n_max, bool add_special, bool parse))     \
    X(int32_t, llama_token_to_piece, (const void *vocab, int32_t token, char *text,                \
                                      int32_t length, int32_t lstrip, bool special))               \
    X(int32_t, llama_chat_apply_template, (const char *text, const peer_message *messages,         \
                                           size_t n, bool reply, char *out, int32_t size))         \
    X(int32_t, llama_detokenize, (const void *vocab, const int32_t *tokens, int32_t n_tokens,      \
                                  char *text, int32_t length, bool remove, bool unparse))

// libggml-base's own quantizer, to make models that owe nothing to rocq's, and fast.
typedef size_t (*peer_quantize_fn)(int32_t type, const float *src, void *dst, int64_t start,
                                   int64_t n_rows, int64_t n_per_row, const float *importance);

static struct {
    bool open;
    const char *dir; // where the libraries are; NULL: what ROCQ_GGML_DIR says
    peer_quantize_fn quantize;
    char log[4000]; // the newest warnings and errors, for failure messages
#define PEER_X(result, name, args) result (*name) args;
    PEER_FUNCTIONS(PEER_X)
#undef PEER_X
} peer;

static inline void peer_log(int level, const char *text, void *user) {
    (void)user;
    if (level >= 3 && level <= 5) { // warning, error, and the continuation of a line
        size_t used = strlen(peer.log), n = strlen(text);
        if (used + n >= sizeof peer.log) used = 0;
        if (n < sizeof peer.log) memcpy(peer.log + used, text, n + 1);
    }
}

// The library lib<name>.so or, as the npm package has it, lib<name>.v<release>.so; NULL when it is
// not there.
static inline void *peer_library(const char *name) {
    if (!peer.dir) peer.dir = getenv("ROCQ_GGML_DIR");
    if (!peer.dir || !*peer.dir) return NULL;
    char path[2][4096];
    snprintf(path[0], sizeof path[0], "%s/lib%s.so", peer.dir, name);
    snprintf(path[1], sizeof path[1], "%s/lib%s.v*.so", peer.dir, name);
    glob_t found;
    void *library = NULL;
    if (glob(path[0], 0, NULL, &found) == 0 || glob(path[1], 0, NULL, &found) == 0) {
        library = dlopen(found.gl_pathv[0], RTLD_NOW | RTLD_LOCAL);
        if (!library) fail_msg("%s", dlerror());
    }
    globfree(&found);
    return library;
}

// Loads the library once. False: it is not installed, and the test is to be skipped.
static inline bool peer_open(void) {
    if (peer.open) return true;
    void *all = peer_library("ggml"), *llama = peer_library("llama");
    void *base = peer_library("ggml-base");
    if (!all || !llama || !base) return false;
    void *symbol; // an object pointer, by way of memcpy, since ISO C casts none to a function
#define PEER_X(result, name, args)                  \
    symbol = dlsym(llama, #name);                   \
    if (!symbol) fail_msg("%s is missing", #name);  \
    memcpy(&peer.name, &symbol, sizeof symbol);
    PEER_FUNCTIONS(PEER_X)
#undef PEER_X
    void (*load_backends)(const char *dir) = NULL;
    symbol = dlsym(all, "ggml_backend_load_all_from_path");
    assert_non_null(symbol);
    memcpy(&load_backends, &symbol, sizeof symbol);
    symbol = dlsym(base, "ggml_quantize_chunk");
    assert_non_null(symbol);
    memcpy(&peer.quantize, &symbol, sizeof symbol);
    peer.llama_log_set(peer_log, NULL);
    unsetenv("LLAMA_ATTN_ROT_DISABLE"); // quantized keys and values are rotated, as in rocq's cache
    load_backends(peer.dir);
    peer.llama_backend_init();

    peer_model_params m = peer.llama_model_default_params();
    peer_context_params c = peer.llama_context_default_params();
    bool known = m.n_gpu_layers == -1 && m.split_mode == 1 && c.n_ctx == 512 &&
        c.n_batch == 2048 && c.n_ubatch == 512 && c.n_seq_max == 1 &&
        c.n_threads == c.n_threads_batch && c.n_threads > 0 && c.rope_scaling == -1 &&
        c.pooling == -1 && c.attention == -1 && c.flash_attention == -1 && c.rope_base == 0 &&
        c.yarn[0] == -1 && c.yarn[3] == -1 && c.type_k == 1 && c.type_v == 1 && c.no_perf &&
        c.op_offload && c.swa_full;
    if (!known)
        fail_msg("this llama.cpp release has other parameter structs than tests/llama_cpp.h");
    return peer.open = true;
}

typedef struct peer_model {
    void *model, *context;
    const void *vocab;
    int32_t n_vocab;
    int8_t *wanted; // n_ctx ones
} peer_model;

static inline void peer_close(peer_model *m) {
    if (m->context) peer.llama_free(m->context);
    if (m->model) peer.llama_model_free(m->model);
    free(m->wanted);
    memset(m, 0, sizeof *m);
}

// n_ctx 0 loads the vocabulary alone. kv_type is a GGML type, for K and V.
static inline void peer_load(peer_model *m, const char *path, int32_t n_ctx, int32_t kv_type) {
    memset(m, 0, sizeof *m);
    peer.log[0] = 0;
    peer_model_params mp = peer.llama_model_default_params();
    if (mp.load_mode != -1 || mp.lazy_mode != 1 || mp.vocab_only || mp.check_tensors ||
        !mp.use_extra_bufts)
        fail_msg("this llama.cpp release has other model parameters than tests/llama_cpp.h");
    mp.vocab_only = n_ctx == 0;
    mp.use_extra_bufts = false; // plain kernels: their sums do not depend on the machine's
                                // repacking
    m->model = peer.llama_model_load_from_file(path, mp);
    if (!m->model) fail_msg("llama.cpp does not load %s:\n%s", path, peer.log);
    m->vocab = peer.llama_model_get_vocab(m->model);
    m->n_vocab = peer.llama_vocab_n_tokens(m->vocab);
    if (n_ctx == 0) return;
    peer_context_params cp = peer.llama_context_default_params();
    cp.n_ctx = cp.n_batch = cp.n_ubatch = (uint32_t)n_ctx;
    cp.n_threads = cp.n_threads_batch = 1; // its threads wait in busy loops
    // Plain attention, except that llama.cpp reads quantized values in the fused one only.
    cp.flash_attention = kv_type == 2 || kv_type == 8;
    cp.type_k = cp.type_v = kv_type;
    m->context = peer.llama_init_from_model(m->model, cp);
    if (!m->context) fail_msg("llama.cpp cannot start %s:\n%s", path, peer.log);
    m->wanted = (int8_t *)malloc((size_t)n_ctx);
    assert_non_null(m->wanted);
    memset(m->wanted, 1, (size_t)n_ctx);
}

// Forgets all tokens.
static inline void peer_forget(peer_model *m) {
    peer.llama_memory_clear(peer.llama_get_memory(m->context), true);
}

// Appends n tokens and copies their n_vocab logits each to logits.
static inline void peer_decode(peer_model *m, const int32_t *tokens, int32_t n, float *logits) {
    peer_batch batch = {0};
    batch.n_tokens = n;
    batch.token = (int32_t *)(uintptr_t)tokens; // read only
    batch.logits = m->wanted;
    assert_int_equal(peer.llama_decode(m->context, batch), 0);
    for (int32_t i = 0; i < n; i++) {
        const float *row = peer.llama_get_logits_ith(m->context, i);
        assert_non_null(row);
        memcpy(logits + (int64_t)i * m->n_vocab, row, (size_t)m->n_vocab * sizeof *logits);
    }
}

#endif // TESTS_LLAMA_CPP_H
