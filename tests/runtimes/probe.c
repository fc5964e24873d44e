// probe.c - opens a context and prints what became of it, one "key: value" a line, for
// tests/runtimes/check.
//
//     --load FILE      before that, loads a library
//     --rocm, --hip DIR   rocq_desc.rocm_path and hip_path
//     --gpu            no fallback to the CPU
//     --still FILE     afterwards, tells whether this library is loaded
//     --then FILE TO   afterwards, renames a file and opens once more
//     --threads N      opens in N threads at once; prints the first one, and whether all were alike

#define ROCQ_IMPLEMENTATION
#include "../../rocq.h"

#include <stdio.h>
#include <string.h>

// A code object without content: the stand-in looks no further.
static unsigned char image[64] = "\177ELF\2\1";

static void print_log(rocq_log_level level, const char *message, void *user) {
    const char *const names[] = {"", "error", "warning", "info"};
    if (!user) printf("%s: %s\n", names[level], message);
}

static void probe(rocq_desc *desc, rocq_info *info) {
    static const rocq_info none;
    rocq_ctx *ctx = NULL;
    const rocq_result result = rocq_open(&ctx, desc);
    *info = none;
    info->gpu_result = result;
    if (!ctx) {
        if (!desc->log_user) printf("result: %s\n", rocq_result_name(result));
        return;
    }
    rocq_get_info(ctx, info);
    if (!desc->log_user) {
        printf("result: %s\nbackend: %s\ngpu: %s\n", rocq_result_name(result),
               info->backend == ROCQ_BACKEND_GPU ? "gpu" : "cpu",
               rocq_result_name(info->gpu_result));
        printf("message: %s\nruntime: %s\ntried: %s\n", info->gpu_message, info->runtime,
               info->runtimes_tried);
        if (info->desc.rocm_path || info->desc.hip_path) printf("desc keeps a path\n");
    }
    rocq_close(&ctx);
}

#if defined(_WIN32)
static bool load(const char *path) { return LoadLibraryA(path) != NULL; }
static bool loaded(const char *path) { return GetModuleHandleA(path) != NULL; }
#else
static bool load(const char *path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL) != NULL; }
static bool loaded(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (library) dlclose(library);
    return library != NULL;
}

static void *probe_quietly(void *user) {
    rocq_desc desc = *(const rocq_desc *)user;
    rocq_info info;
    desc.log_user = &info;
    probe(&desc, &info);
    return (void *)(intptr_t)(info.gpu_result == ROCQ_OK && info.backend == ROCQ_BACKEND_GPU);
}
#endif

int main(int argc, char **argv) {
    rocq_desc desc;
    rocq_info info;
    const char *still = NULL, *from = NULL, *to = NULL;
    int n_threads = 0;
    memset(&desc, 0, sizeof desc);
    desc.prefer = ROCQ_BACKEND_GPU;
    desc.allow_fallback = true;
    desc.n_threads = 1;
    desc.kernels_data = image;
    desc.kernels_size = sizeof image;
    desc.log = print_log;
    for (int i = 1; i < argc; i++) {
        const char *next = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--gpu")) {
            desc.allow_fallback = false;
            continue;
        }
        if (!strcmp(argv[i], "--rocm")) desc.rocm_path = next;
        else if (!strcmp(argv[i], "--hip")) desc.hip_path = next;
        else if (!strcmp(argv[i], "--still")) still = next;
        else if (!strcmp(argv[i], "--threads")) n_threads = atoi(next);
        else if (!strcmp(argv[i], "--load")) printf("load: %d\n", load(next));
        else if (!strcmp(argv[i], "--then") && i + 2 < argc) {
            from = next;
            to = argv[++i + 1];
        } else {
            return 2;
        }
        i++;
    }
#if defined(_WIN32)
    if (n_threads) return 3;
#else
    pthread_t threads[16];
    int alike = 0;
    for (int i = 0; i < n_threads; i++) {
        if (pthread_create(&threads[i], NULL, probe_quietly, &desc)) return 3;
    }
    for (int i = 0; i < n_threads; i++) {
        void *on_gpu;
        pthread_join(threads[i], &on_gpu);
        alike += on_gpu != NULL;
    }
    if (n_threads) printf("threads: %d\n", alike);
#endif
    probe(&desc, &info);
    if (still) printf("still: %s\n", loaded(still) ? "yes" : "no");
    if (from) {
        if (rename(from, to)) return 4;
        printf("then:\n");
        probe(&desc, &info);
    }
    return 0;
}
