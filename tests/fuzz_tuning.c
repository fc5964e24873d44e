// libFuzzer target: any bytes at all, and any entries behind a right header and checksum, must be
// refused with nothing changed, or give results that are saved as the same bytes again.
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

static const int64_t head = (int64_t)sizeof(rocq__tuning_header),
                     each = (int64_t)sizeof(rocq__tuned);

// What rocq_tuning_save would write for a device of no particular kind.
static rocq__tuning_header header(int32_t n_results, const void *entries) {
    rocq__tuning_header h = {.magic = {'r', 'o', 'c', 'q', 't', 'u', 'n', 'e'},
                             .version = ROCQ__TUNING_VERSION, .rocq = 7, .n_results = n_results,
                             .device = "here"};
    h.checksum = rocq__tuning_checksum(&h, entries);
    return h;
}

static void load(rocq_ctx *ctx, const unsigned char *data, int64_t size) {
    rocq__tuning_header own = header(0, "");
    own.checksum = 0;
    const rocq_result result = rocq__tuning_read(ctx, &own, data, size);
    if (result == ROCQ_OK) {
        const rocq__tuning_header again = header(ctx->n_tuned, ctx->n_tuned ? (void *)ctx->tuned
                                                                            : (void *)"");
        CHECK(size == head + ctx->n_tuned * each && memcmp(&again, data, sizeof again) == 0);
        CHECK(ctx->n_tuned == 0 || memcmp(ctx->tuned, data + head, (size_t)(size - head)) == 0);
    } else {
        CHECK(result == ROCQ_E_CORRUPT || result == ROCQ_E_FOREIGN || result == ROCQ_E_TRUNCATED ||
              result == ROCQ_E_MAGIC);
        CHECK(ctx->n_tuned == 0 && !ctx->tuned && rocq_error(ctx)[0]);
    }
    rocq_tuning_clear(ctx);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static rocq_ctx *ctx;
    if (!ctx) {
        const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1};
        CHECK(rocq_open(&ctx, &desc) == ROCQ_OK);
    }
    rocq_stats before, after;
    rocq_get_stats(ctx, &before);

    unsigned char *file = (unsigned char *)malloc((size_t)head + size + 1); // of exactly one size
    CHECK(file);
    if (size) memcpy(file, data, size);
    load(ctx, file, (int64_t)size);

    // the input as entries behind a header, which would else never come out right
    const int32_t n = (int32_t)((int64_t)size / each);
    const rocq__tuning_header h = header(n, data);
    memcpy(file, &h, sizeof h);
    if (n) memcpy(file + head, data, (size_t)(n * each));
    load(ctx, file, head + n * each);
    free(file);

    rocq_get_stats(ctx, &after);
    CHECK(before.live_bytes == after.live_bytes);
    return 0;
}
