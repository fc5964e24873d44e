// ggml.h - ggml as the peer of single operations, in the same process. Include after bench.h.
// Nothing of it is linked: shared objects are found at run time, and a program goes without where
// they are missing.
//
//     CPU   ROCQ_GGML_DIR      of an npm package (tests/fetch-ggml)
//     GPU   ROCQ_GGML_GPU_DIR  libggml-base.so and libggml-cuda.so or libggml-hip.so of a checkout
//                              built with -DBUILD_SHARED_LIBS=ON and -DGGML_CUDA=ON or
//                              -DGGML_HIP=ON; for whole models (inference.c) of one of llama.cpp,
//                              all its libraries in one folder
//
// It runs as llama.cpp runs it: on the CPU with a lasting thread pool, which sleeps between samples
// (GGML_TURNS in a bench_case) so that its busy waiting takes nothing from the other side, and
// weights in the buffer type that ggml prefers, which repacks some formats; on a GPU with one graph
// of all copies.

#ifndef BENCH_GGML_H
#define BENCH_GGML_H

#include <dlfcn.h>

typedef struct ggml_init_params { // passed by value
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
} ggml_init_params;

#define GGML_BASE_FUNCTIONS(X)                                                                     \
    X(void *, ggml_init, (ggml_init_params))                                                       \
    X(void, ggml_free, (void *ctx))                                                                \
    X(void *, ggml_new_tensor_4d, (void *ctx, int type, int64_t, int64_t, int64_t, int64_t))       \
    X(void *, ggml_new_graph_custom, (void *ctx, size_t size, bool grads))                         \
    X(void, ggml_build_forward_expand, (void *graph, void *tensor))                                \
    X(size_t, ggml_tensor_overhead, (void))                                                        \
    X(size_t, ggml_graph_overhead_custom, (size_t size, bool grads))                               \
    X(size_t, ggml_nbytes, (const void *tensor))                                                   \
    X(void *, ggml_mul_mat, (void *ctx, void *w, void *x))                                         \
    X(void *, ggml_mul_mat_id, (void *ctx, void *w, void *x, void *ids))                           \
    X(void *, ggml_swiglu_split, (void *ctx, void *gate, void *up))                                \
    X(void *, ggml_swiglu_oai, (void *ctx, void *gate, void *up, float alpha, float limit))        \
    X(void *, ggml_mul, (void *ctx, void *a, void *b))                                             \
    X(void *, ggml_add, (void *ctx, void *a, void *b))                                             \
    X(void *, ggml_cont, (void *ctx, void *a))                                                     \
    X(void *, ggml_view_2d, (void *ctx, void *a, int64_t, int64_t, size_t stride, size_t offset))  \
    X(void *, ggml_flash_attn_ext, (void *ctx, void *q, void *k, void *v, void *mask, float scale, \
                                    float max_bias, float softcap))                                \
    X(void *, ggml_backend_alloc_ctx_tensors, (void *ctx, void *backend))                          \
    X(void *, ggml_backend_alloc_ctx_tensors_from_buft, (void *ctx, void *type))                   \
    X(void, ggml_backend_buffer_free, (void *buffer))                                              \
    X(void, ggml_backend_tensor_set, (void *tensor, const void *data, size_t offset, size_t size)) \
    X(void, ggml_backend_tensor_get, (const void *tensor, void *data, size_t offset, size_t size)) \
    X(int, ggml_backend_graph_compute_async, (void *backend, void *graph))                         \
    X(void, ggml_backend_synchronize, (void *backend))                                             \
    X(void, ggml_backend_free, (void *backend))                                                    \
    X(void *, ggml_backend_reg_dev_get, (void *reg, size_t index))                                 \
    X(void *, ggml_backend_reg_get_proc_address, (void *reg, const char *name))                    \
    X(void *, ggml_backend_dev_init, (void *device, const char *params))                           \
    X(bool, ggml_backend_dev_supports_op, (void *device, const void *op))                          \
    X(void, ggml_threadpool_params_init, (void *params, int n_threads))                            \
    X(void, ggml_log_set, (void (*log)(int level, const char *text, void *user), void *user))
#define GGML_CPU_FUNCTIONS(X)                                                                      \
    X(void, ggml_backend_cpu_set_n_threads, (void *backend, int n))                                \
    X(void, ggml_backend_cpu_set_threadpool, (void *backend, void *pool))                          \
    X(void *, ggml_threadpool_new, (void *params))                                                 \
    X(void, ggml_threadpool_free, (void *pool))                                                    \
    X(void, ggml_threadpool_pause, (void *pool))                                                   \
    X(void, ggml_threadpool_resume, (void *pool))

static struct {
    void *base, *library, *backend, *device;
    void *pool;            // of threads; NULL on a GPU
    void *buffer_types[8]; // that repack, ended by NULL
    char why[300];         // why there is none
#define GGML_X(result, name, args) result (*name) args;
    GGML_BASE_FUNCTIONS(GGML_X)
    GGML_CPU_FUNCTIONS(GGML_X)
#undef GGML_X
} ggml;

// By way of memcpy, since ISO C casts no object pointer to a function.
BENCH_FN bool ggml__symbol(void *library, const char *name, void *function) {
    void *symbol = dlsym(library, name);
    if (!symbol) snprintf(ggml.why, sizeof ggml.why, "ggml has no %s", name);
    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}

BENCH_FN void *ggml__library(const char *dir, const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/libggml-%s.so", dir, name);
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

// The libraries for this machine, and the functions of them all.
BENCH_FN bool ggml__load(bool gpu) {
    static const char *const cpus[] = {
        "cpu-x64",        "cpu-sse42",    "cpu-sandybridge", "cpu-ivybridge",  "cpu-piledriver",
        "cpu-haswell",    "cpu-skylakex", "cpu-cannonlake",  "cpu-cascadelake", "cpu-cooperlake",
        "cpu-icelake",    "cpu-zen4",     "cpu-alderlake",   "cpu-sapphirerapids"};
    const char *variable = gpu ? "ROCQ_GGML_GPU_DIR" : "ROCQ_GGML_DIR", *dir = getenv(variable);
    int best = 0;
    if (!dir || !*dir) {
        snprintf(ggml.why, sizeof ggml.why, "%s is not set", variable);
        return false;
    }
    ggml.base = ggml__library(dir, "base");
    if (gpu && ggml.base) {
        ggml.library = ggml__library(dir, "cuda");
        if (!ggml.library) ggml.library = ggml__library(dir, "hip");
    }
    for (size_t i = 0; !gpu && ggml.base && i < sizeof cpus / sizeof *cpus; i++) {
        int (*score)(void) = NULL;
        void *library = ggml__library(dir, cpus[i]);
        if (!library || !ggml__symbol(library, "ggml_backend_score", &score)) continue;
        if (score() > best) best = score(), ggml.library = library;
    }
    if (!ggml.library) {
        const char *error = dlerror();
        snprintf(ggml.why, sizeof ggml.why, "%s", error ? error : "no library for this machine");
        return false;
    }
#define GGML_X(result, name, args) if (!ggml__symbol(ggml.base, #name, &ggml.name)) return false;
    GGML_BASE_FUNCTIONS(GGML_X)
#undef GGML_X
#define GGML_X(result, name, args) if (!ggml__symbol(ggml.library, #name, &ggml.name)) return false;
    if (!gpu) { GGML_CPU_FUNCTIONS(GGML_X) }
#undef GGML_X
    return true;
}

BENCH_FN void ggml_wake(void *user) {
    (void)user;
    if (ggml.pool) ggml.ggml_threadpool_resume(ggml.pool);
}
BENCH_FN void ggml_sleep(void *user) {
    (void)user;
    if (ggml.pool) ggml.ggml_threadpool_pause(ggml.pool);
}
BENCH_FN rocq_result ggml_wait(void *user) {
    (void)user;
    ggml.ggml_backend_synchronize(ggml.backend);
    return ROCQ_OK;
}
#define GGML_TURNS .sync = ggml_wait, .enter = ggml_wake, .leave = ggml_sleep

BENCH_FN void ggml__no_log(int level, const char *text, void *user) {
    (void)level, (void)text, (void)user;
}

// Gives the CPU backend n threads; no llama.cpp context may still use those before.
BENCH_FN void ggml_threads(int32_t n) {
    uint64_t params[256] = {0}; // struct ggml_threadpool_params is a quarter of that
    ggml_wake(NULL);
    void *old = ggml.pool;
    ggml.ggml_threadpool_params_init(params, n);
    ggml.pool = ggml.ggml_threadpool_new(params);
    ggml.ggml_backend_cpu_set_n_threads(ggml.backend, n);
    ggml.ggml_backend_cpu_set_threadpool(ggml.backend, ggml.pool);
    if (old) ggml.ggml_threadpool_free(old);
    ggml_sleep(NULL);
}

// Once, on the device of b, with as many threads. False: it is not there, which b's results say.
BENCH_FN bool ggml_open(bench *b) {
    void *(*registry)(void) = NULL;
    if (ggml.backend) return true;
    if (ggml.why[0]) return false;
    // Of CUDA and HIP alike; built as a plug-in it is ggml_backend_init.
    const char *names[2] = {b->gpu ? "ggml_backend_cuda_reg" : "ggml_backend_cpu_reg",
                            "ggml_backend_init"};
    bool ok = ggml__load(b->gpu) && (ggml__symbol(ggml.library, names[0], &registry) ||
                                     ggml__symbol(ggml.library, names[1], &registry));
    void *reg = ok ? registry() : NULL;
    if (reg) {
        ggml.ggml_log_set(ggml__no_log, NULL);
        ggml.device = ggml.ggml_backend_reg_dev_get(reg, 0);
        ggml.backend = ggml.ggml_backend_dev_init(ggml.device, NULL);
    }
    if (!ggml.backend) {
        bench_skip(b, "ggml", ggml.why[0] ? ggml.why : "it finds no device");
        return false;
    }
    ggml.why[0] = 0;
    if (b->gpu) return true;
    ggml_threads(b->n_threads);
    void **(*extra)(void *device) = NULL;
    void *symbol = ggml.ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts");
    memcpy(&extra, &symbol, sizeof symbol);
    void **types = extra ? extra(ggml.device) : NULL;
    for (int i = 0; types && types[i] && i < 7; i++) ggml.buffer_types[i] = types[i];
    return true;
}

BENCH_FN void ggml_close(void) {
    if (!ggml.backend) return;
    ggml_wake(NULL);
    ggml.ggml_backend_free(ggml.backend);
    if (ggml.pool) ggml.ggml_threadpool_free(ggml.pool);
    ggml.backend = ggml.pool = NULL;
}

// One operation over operands of which several copies take turns: make its tensors in ctx and
// weights, each result in results, then ggml_job_ready. ggml_job_run computes the next result, on a
// GPU all.
enum { GGML_MOST = 256 };
typedef struct ggml_job {
    void *ctx, *weight_ctx;          // of weights: matrices of products, which may be repacked
    void *buffer, *weight_buffer;
    void *weights[GGML_MOST], *results[GGML_MOST], *graphs[GGML_MOST];
    int n, n_graphs, turn;
} ggml_job;

BENCH_FN void ggml_job_begin(ggml_job *j, int n) {
    memset(j, 0, sizeof *j);
    const ggml_init_params params = {
        (size_t)(n + 1) * (32 * ggml.ggml_tensor_overhead() +
                           ggml.ggml_graph_overhead_custom(64, false)), NULL, true};
    j->n = n;
    j->ctx = ggml.ggml_init(params);
    j->weight_ctx = ggml.ggml_init(params);
}

// Allocates all tensors, the weights in a type of buffer of their own (NULL: none).
BENCH_FN bool ggml_job_ready(ggml_job *j, void *weight_type) {
    if (j->weights[0]) {
        j->weight_buffer = weight_type
            ? ggml.ggml_backend_alloc_ctx_tensors_from_buft(j->weight_ctx, weight_type)
            : ggml.ggml_backend_alloc_ctx_tensors(j->weight_ctx, ggml.backend);
    }
    j->buffer = ggml.ggml_backend_alloc_ctx_tensors(j->ctx, ggml.backend);
    j->n_graphs = ggml.pool ? j->n : 1;
    for (int i = 0; i < j->n_graphs; i++)
        j->graphs[i] = ggml.ggml_new_graph_custom(j->ctx, (size_t)(32 * j->n / j->n_graphs), false);
    for (int i = 0; i < j->n; i++)
        ggml.ggml_build_forward_expand(j->graphs[i % j->n_graphs], j->results[i]);
    return j->buffer && (j->weight_buffer || !j->weights[0]);
}

BENCH_FN rocq_result ggml_job_run(ggml_job *j) {
    j->turn = (j->turn + 1) % j->n_graphs;
    const int status = ggml.ggml_backend_graph_compute_async(ggml.backend, j->graphs[j->turn]);
    return status == 0 ? ROCQ_OK : ROCQ_E_STATE;
}

BENCH_FN void ggml_job_end(ggml_job *j) {
    if (j->buffer) ggml.ggml_backend_buffer_free(j->buffer);
    if (j->weight_buffer) ggml.ggml_backend_buffer_free(j->weight_buffer);
    if (j->ctx) ggml.ggml_free(j->ctx);
    if (j->weight_ctx) ggml.ggml_free(j->weight_ctx);
    memset(j, 0, sizeof *j);
}

// y [m, n] = w [k, m] x [k, n] for n_copies of w in turn, all alike. False when ggml has no room.
BENCH_FN bool ggml_matmul(ggml_job *j, int n_copies, int type, int64_t k, int64_t m, int64_t n,
                          const void *w, const float *x) {
    void *types[8] = {NULL}; // what repacks is tried first, on a job that is thrown away
    bool ok = false;
    memcpy(types, ggml.buffer_types, sizeof types);
    for (int t = 0; t < 8 && !ok; t++) {
        const bool last = types[t] == NULL;
        for (int final = last; final < 2; final++) {
            ggml_job_begin(j, final ? n_copies : 1);
            void *in = ggml.ggml_new_tensor_4d(j->ctx, ROCQ_F32, k, n, 1, 1);
            for (int i = 0; i < j->n; i++) {
                j->weights[i] = ggml.ggml_new_tensor_4d(j->weight_ctx, type, k, m, 1, 1);
                j->results[i] = ggml.ggml_mul_mat(j->ctx, j->weights[i], in);
            }
            ok = ggml_job_ready(j, types[t]) &&
                ggml.ggml_backend_dev_supports_op(ggml.device, j->results[0]);
            if (ok && final) {
                int64_t bytes = 0;
                rocq_row_size((rocq_format)type, k, &bytes);
                for (int i = 0; i < j->n; i++)
                    ggml.ggml_backend_tensor_set(j->weights[i], w, 0, (size_t)(bytes * m));
                ggml.ggml_backend_tensor_set(in, x, 0, (size_t)(k * n) * sizeof *x);
                return true;
            }
            ggml_job_end(j);
            if (!ok) break;
        }
        if (last) break;
    }
    return false;
}

#endif // BENCH_GGML_H
