// libFuzzer target: any bytes at all, opened as a span and through a read callback, must give the
// same answers, or the same error; everything readable is read, and nothing may leak.
//
//     clang -std=c11 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
//         -I. tests/fuzz_gguf.c -o .build/fuzz_gguf -lm -ldl -lpthread
//     .build/fuzz_gguf .build/new-inputs tests/corpus/gguf
#define ROCQ_IMPLEMENTATION
#define ROCQ__GGUF_WINDOW 16 // so that the header's window grows many times in a small file
#include "../rocq.h"

#include "gguf_walk.h"

typedef struct span {
    const uint8_t *data;
    size_t size;
} span;

static bool span_read(void *dst, int64_t offset, int64_t size, void *user) {
    const span *s = (const span *)user;
    WALK_CHECK(offset >= 0 && size > 0 && (uint64_t)offset + (uint64_t)size <= s->size);
    memcpy(dst, s->data + offset, (size_t)size);
    return true;
}

static bool discard(const void *src, int64_t size, void *user) {
    uint64_t *hash = (uint64_t *)user;
    *hash = walk_mix(*hash, src, size); // reads it all
    return true;
}

// What was read can be written again.
static void write_again(rocq_ctx *ctx, const rocq_gguf *file) {
    uint64_t hash = 0;
    const rocq_gguf_writer_desc desc = {.write = discard, .user = &hash};
    rocq_gguf_writer *writer = NULL;
    WALK_CHECK(rocq_gguf_writer_open(ctx, &writer, &desc) == ROCQ_OK);
    WALK_CHECK(rocq_gguf_writer_set_from(writer, file) == ROCQ_OK);
    WALK_CHECK(rocq_gguf_writer_set_from(writer, file) == ROCQ_OK); // every key there already
    WALK_CHECK(rocq_gguf_writer_close(&writer) == ROCQ_OK && !writer);
}

// A file whose types are known can be loaded, and each tensor is what reading it gives.
static void load_all(rocq_ctx *ctx, const rocq_gguf *file, bool copy) {
    const int64_t n = rocq_gguf_tensor_count(file);
    rocq_tensor *tensors = (rocq_tensor *)malloc((size_t)n * sizeof *tensors + 1);
    rocq_buffer buffer;
    const rocq_gguf_load_desc desc = {.piece_bytes = 512, .copy = copy};
    if (tensors && rocq_gguf_load(ctx, file, &desc, tensors, &buffer) == ROCQ_OK) {
        for (int64_t i = 0; i < n; i++) {
            rocq_gguf_tensor t;
            WALK_CHECK(rocq_gguf_tensor_at(file, i, &t) == ROCQ_OK);
            void *data = malloc((size_t)t.size);
            WALK_CHECK(data && rocq_gguf_read(ctx, file, &t, data) == ROCQ_OK);
            WALK_CHECK(rocq_tensor_size(&tensors[i]) == t.size);
            WALK_CHECK(memcmp(rocq_tensor_data(&tensors[i]), data, (size_t)t.size) == 0);
            free(data);
        }
        WALK_CHECK(rocq_buffer_free(ctx, &buffer) == ROCQ_OK);
    }
    free(tensors);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static rocq_ctx *ctx;
    if (!ctx) {
        const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1};
        WALK_CHECK(rocq_open(&ctx, &desc) == ROCQ_OK);
    }
    rocq_stats before, after;
    rocq_get_stats(ctx, &before);

    span bytes = {data, size};
    static const uint8_t nothing[1];
    const rocq_gguf_desc descs[2] = {{.data = size ? data : nothing, .size = (int64_t)size},
                                     {.size = (int64_t)size, .read = span_read, .user = &bytes}};
    rocq_result results[2];
    uint64_t hashes[2] = {0, 0};
    for (int k = 0; k < 2; k++) {
        rocq_gguf *file = NULL;
        results[k] = rocq_gguf_open(ctx, &file, &descs[k]);
        WALK_CHECK((results[k] == ROCQ_OK) == (file != NULL));
        if (!file) continue;
        hashes[k] = walk_file(ctx, file, (int64_t)size, true);
        if (k == 0) write_again(ctx, file);
        load_all(ctx, file, k == 1);
        rocq_gguf_close(&file);
    }
    WALK_CHECK(results[0] == results[1] && hashes[0] == hashes[1]);
    rocq_get_stats(ctx, &after);
    WALK_CHECK(before.live_bytes == after.live_bytes);
    return 0;
}
