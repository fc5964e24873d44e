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
    WALK_CHECK(rocq_gguf_create(ctx, &writer, &desc) == ROCQ_OK);
    WALK_CHECK(rocq_gguf_set_from(writer, file) == ROCQ_OK);
    WALK_CHECK(rocq_gguf_set_from(writer, file) == ROCQ_OK); // every key there already
    WALK_CHECK(rocq_gguf_finish(&writer) == ROCQ_OK && !writer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static rocq_ctx *ctx;
    if (!ctx) {
        const rocq_desc desc = {.prefer = ROCQ_CPU, .n_threads = 1};
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
        rocq_gguf_close(&file);
    }
    WALK_CHECK(results[0] == results[1] && hashes[0] == hashes[1]);
    rocq_get_stats(ctx, &after);
    WALK_CHECK(before.live_bytes == after.live_bytes);
    return 0;
}
