// libFuzzer target: any text at all, and any lines with a right head and checksum around them, must
// be refused with nothing changed, or give results that are written as the same text again.
//
//     clang -std=c11 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
//         -I. tests/fuzz_tuning.c -o .build/fuzz_tuning -lm -ldl -lpthread
//     .build/fuzz_tuning .build/new-inputs tests/corpus/tuning
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#define CHECK(condition)             \
    do {                             \
        if (!(condition)) abort();   \
    } while (0)

static rocq__line fuzz_head = {"rocq-tuning 1: here\n", 20};

// The text of what the context holds; returns its size.
static int64_t write_again(const rocq_ctx *ctx, char *text) {
    int64_t size = 0;
    uint64_t sum = 0;
    rocq__line line = fuzz_head;
    for (int32_t i = 0; i <= ctx->n_tuned; i++) {
        memcpy(text + size, line.text, (size_t)line.length);
        size += line.length;
        sum = rocq__checksum(sum, line.text, line.length);
        if (i < ctx->n_tuned) rocq__tuned_line(&ctx->tuned[i], &line);
    }
    rocq__checksum_line(sum, &line);
    memcpy(text + size, line.text, (size_t)line.length);
    return size + line.length;
}

static void load(rocq_ctx *ctx, const char *text, int64_t size) {
    const rocq_result result = rocq__tuning_replace(ctx, &fuzz_head, text, size);
    if (result == ROCQ_OK) {
        char *again = (char *)malloc((size_t)size + 64);
        CHECK(again);
        CHECK(write_again(ctx, again) == size && memcmp(again, text, (size_t)size) == 0);
        free(again);
    } else {
        CHECK(result == ROCQ_E_CORRUPT || result == ROCQ_E_FOREIGN);
        CHECK(ctx->n_tuned == 0 && !ctx->tuned && rocq_error(ctx)[0]);
    }
    rocq_tuning_clear(ctx);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static rocq_ctx *ctx;
    if (!ctx) {
        const rocq_desc desc = {.prefer = ROCQ_CPU, .n_threads = 1};
        CHECK(rocq_open(&ctx, &desc) == ROCQ_OK);
    }
    rocq_stats before, after;
    rocq_get_stats(ctx, &before);

    char *text = (char *)malloc(size + 64);
    CHECK(text);
    if (size) memcpy(text, data, size);
    load(ctx, text, (int64_t)size);

    // the input as lines between a head and a checksum, which would else never come out right
    uint64_t sum = rocq__checksum(0, fuzz_head.text, fuzz_head.length);
    memcpy(text, fuzz_head.text, (size_t)fuzz_head.length);
    if (size) memcpy(text + fuzz_head.length, data, size);
    for (size_t begin = 0, end = 0; end < size; end++) {
        if (data[end] != '\n') continue;
        sum = rocq__checksum(sum, data + begin, (int64_t)(end + 1 - begin));
        begin = end + 1;
    }
    rocq__line last;
    rocq__checksum_line(sum, &last);
    memcpy(text + (size_t)fuzz_head.length + size, last.text, (size_t)last.length);
    load(ctx, text, (int64_t)size + fuzz_head.length + last.length);
    free(text);

    rocq_get_stats(ctx, &after);
    CHECK(before.live_bytes == after.live_bytes);
    return 0;
}
