// One pass over the library with nothing but the C library around it, for compilers, options and
// emulators where the test suite does not run: formats, matmul, attention, GGUF from a callback, a
// memory span and a file, and what a machine without a GPU answers. Valid C11 and C++17.
//
// The 'digest' lines are hashes of decoded and encoded blocks and of INT8 products: the same on
// every platform, whatever instructions it has.
#ifndef SELFCHECK_EXTERNAL // the implementation is in another file of the program
#define ROCQ_IMPLEMENTATION
#endif
#include "rocq.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int n_failed;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);                                 \
            n_failed++;                                                                            \
        }                                                                                          \
    } while (0)

static uint32_t random_state = 1;

static uint32_t random_bits(void) {
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}

// -1 to 1, exact in a float, so that every platform starts from the same numbers
static float random_float(void) {
    return (float)((int32_t)(random_bits() & 0xffff) - 0x8000) / 0x8000;
}

static uint64_t hash(const void *data, size_t size) {
    const unsigned char *bytes = (const unsigned char *)data;
    uint64_t h = 14695981039346656037u;
    for (size_t i = 0; i < size; i++) {
        h = (h ^ bytes[i]) * 1099511628211u;
    }
    return h;
}

enum {
    N = 1024,
    ROWS = 24,
    COLUMNS = 5,
    HEAD = 32,
    HEADS = 4,
    KV_HEADS = 2,
    KV = 9,
    QUERIES = 3
};

static float source[ROWS * N], decoded[ROWS * N], x[COLUMNS * N], y[COLUMNS * ROWS];
static unsigned char blocks[ROWS * N * 4];

static void fill(float *values, int n) {
    for (int i = 0; i < n; i++) {
        values[i] = random_float();
    }
}

static rocq_tensor tensor(void *data, rocq_format format, int64_t a, int64_t b, int64_t c) {
    rocq_tensor t;
    const int64_t ne[3] = {a, b, c};
    memset(&t, 0, sizeof t);
    CHECK(rocq_tensor_from_host(&t, data, format, 3, ne) == ROCQ_OK);
    return t;
}

// Written so that a NaN anywhere is a failure.
static bool close_enough(const float *got, const double *want, int n, double limit) {
    double error = 0, norm = 0;
    for (int i = 0; i < n; i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    return error <= limit * norm;
}

static void check_format(rocq_format format, const char *name, bool has_reference_bytes) {
    int64_t size = 0;
    double norm = 0, error = 0;
    random_state = (uint32_t)format + 1;
    fill(source, ROWS * N);
    for (int i = 0; i < ROWS * N; i++) {
        decoded[i] = NAN;
    }
    CHECK(rocq_row_size(format, N, &size) == ROCQ_OK);
    const rocq_result written = rocq_quantize(format, blocks, source, ROWS, N, NULL);
    const bool only_read = written == ROCQ_E_UNSUPPORTED && !has_reference_bytes;
    CHECK(written == ROCQ_OK || only_read);
    CHECK(only_read || rocq_dequantize(format, decoded, blocks, ROWS * N) == ROCQ_OK);
    for (int i = 0; i < ROWS * N && !only_read; i++) {
        norm += (double)source[i] * source[i];
        error += ((double)source[i] - decoded[i]) * ((double)source[i] - decoded[i]);
    }
    CHECK(error <= 0.05 * norm);
    if (has_reference_bytes) {
        printf("digest %s encoded %016llx\n", name,
               (unsigned long long)hash(blocks, (size_t)size * ROWS));
    }

    // Every bit pattern of the block decodes alike everywhere; NaN has many encodings, so one is
    // used.
    for (int64_t i = 0; i < size * ROWS; i++) {
        blocks[i] = (unsigned char)random_bits();
    }
    CHECK(rocq_dequantize(format, decoded, blocks, ROWS * N) == ROCQ_OK);
    for (int i = 0; i < ROWS * N; i++) {
        if (isnan(decoded[i])) {
            decoded[i] = 0;
        }
    }
    printf("digest %s decoded %016llx\n", name, (unsigned long long)hash(decoded, sizeof decoded));
}

static void check_matmul(rocq_ctx *ctx, rocq_format format, rocq_precision precision,
                         double limit) {
    static double want[COLUMNS * ROWS];
    rocq_matmul_params p;
    fill(source, ROWS * N);
    fill(x, COLUMNS * N);
    CHECK(rocq_quantize(format, blocks, source, ROWS, N, NULL) == ROCQ_OK);
    CHECK(rocq_dequantize(format, decoded, blocks, ROWS * N) == ROCQ_OK);
    for (int n = 0; n < COLUMNS; n++) {
        for (int m = 0; m < ROWS; m++) {
            double sum = 0;
            for (int k = 0; k < N; k++) {
                sum += (double)decoded[m * N + k] * x[n * N + k];
            }
            want[n * ROWS + m] = sum;
            y[n * ROWS + m] = NAN;
        }
    }
    const rocq_tensor ty = tensor(y, ROCQ_F32, ROWS, COLUMNS, 1),
                      tx = tensor(x, ROCQ_F32, N, COLUMNS, 1),
                      tw = tensor(blocks, format, N, ROWS, 1);
    memset(&p, 0, sizeof p);
    p.y = &ty;
    p.w = &tw;
    p.x = &tx;
    p.precision = precision;
    CHECK(rocq_matmul(ctx, &p) == ROCQ_OK);
    CHECK(close_enough(y, want, COLUMNS * ROWS, limit));
}

// INT8 products have the same bits everywhere. Their weights are random bits that stand for
// moderate numbers, since the encoders of the K formats may round differently where a compiler
// fuses.
static void check_product_bits(rocq_ctx *ctx, int tier, rocq_format format, const char *name,
                               int32_t elems, int32_t bytes) {
    rocq_matmul_params p;
    rocq_result result = ROCQ_OK;
    random_state = (uint32_t)format + 1;
    fill(x, COLUMNS * N);
    for (int b = 0; b < ROWS * N / elems; b++) {
        unsigned char *block = blocks + b * bytes;
        for (bool moderate = false; !moderate;) {
            for (int i = 0; i < bytes; i++) {
                block[i] = (unsigned char)random_bits();
            }
            if (rocq_dequantize(format, decoded, block, elems) != ROCQ_OK) {
                CHECK(!"decodes");
                return;
            }
            moderate = true;
            for (int i = 0; i < elems; i++) {
                moderate = moderate && fabsf(decoded[i]) < 1000;
            }
        }
    }
    const rocq_tensor tw = tensor(blocks, format, N, ROWS, 1);
    memset(&p, 0, sizeof p);
    p.w = &tw;
    p.precision = ROCQ_PRECISION_INT8;
    for (int n = COLUMNS; n > 0 && result == ROCQ_OK; n -= COLUMNS - 1) { // 1 takes other kernels
        const rocq_tensor ty = tensor(y, ROCQ_F32, ROWS, n, 1), tx = tensor(x, ROCQ_F32, N, n, 1);
        p.y = &ty;
        p.x = &tx;
        for (int i = 0; i < COLUMNS * ROWS; i++) {
            y[i] = NAN;
        }
        result = rocq_matmul(ctx, &p);
        // those that have no codes, or too wide ones
        CHECK(result == (elems == 1 || format == ROCQ_MXFP6_E3M2 ? ROCQ_E_UNSUPPORTED : ROCQ_OK));
        if (result == ROCQ_OK) {
            static uint64_t best[64][2]; // of the best tier, whose bits the others must have
            uint64_t *const of_best = &best[(int)format % 64][n == 1];
            const uint64_t digest = hash(y, (size_t)(n * ROWS) * sizeof *y);
            if (tier == ROCQ_CPU_BEST) {
                *of_best = digest;
                printf("digest %s products of %d columns %016llx\n", name, n,
                       (unsigned long long)digest);
            }
            CHECK(digest == *of_best);
        }
    }
}

static void check_attention(rocq_ctx *ctx) {
    static float q[QUERIES * HEADS * HEAD], k[KV * KV_HEADS * HEAD], v[KV * KV_HEADS * HEAD],
        out[QUERIES * HEADS * HEAD];
    static double want[QUERIES * HEADS * HEAD];
    rocq_attention_params p;
    fill(q, QUERIES * HEADS * HEAD);
    fill(k, KV * KV_HEADS * HEAD);
    fill(v, KV * KV_HEADS * HEAD);
    for (int i = 0; i < QUERIES; i++) {
        for (int h = 0; h < HEADS; h++) {
            const float *const qh = q + (i * HEADS + h) * HEAD;
            const int kv_head = h * KV_HEADS / HEADS, first = KV - QUERIES + i;
            double *const o = want + (i * HEADS + h) * HEAD, total = 0;
            for (int d = 0; d < HEAD; d++) {
                out[(i * HEADS + h) * HEAD + d] = NAN;
            }
            for (int j = 0; j <= first; j++) {
                double score = 0, weight;
                for (int d = 0; d < HEAD; d++) {
                    score += (double)qh[d] * k[(j * KV_HEADS + kv_head) * HEAD + d];
                }
                weight = exp(score / sqrt((double)HEAD));
                total += weight;
                for (int d = 0; d < HEAD; d++) {
                    o[d] += weight * v[(j * KV_HEADS + kv_head) * HEAD + d];
                }
            }
            for (int d = 0; d < HEAD; d++) {
                o[d] /= total;
            }
        }
    }
    rocq_tensor tk = tensor(k, ROCQ_F32, HEAD, KV_HEADS, KV),
                tv = tensor(v, ROCQ_F32, HEAD, KV_HEADS, KV);
    const rocq_tensor tq = tensor(q, ROCQ_F32, HEAD, HEADS, QUERIES),
                      to = tensor(out, ROCQ_F32, HEAD, HEADS, QUERIES);
    memset(&p, 0, sizeof p);
    p.out = &to;
    p.q = &tq;
    p.k = &tk;
    p.v = &tv;
    p.causal = true;
    CHECK(rocq_attention(ctx, &p) == ROCQ_OK);
    CHECK(close_enough(out, want, QUERIES * HEADS * HEAD, 1e-6));
}

// A file in memory, for the writer's and the reader's callbacks.
static unsigned char file_bytes[65536];
static int64_t file_size;

static bool write_bytes(const void *src, int64_t size, void *user) {
    (void)user;
    if (size > (int64_t)sizeof file_bytes - file_size) {
        return false;
    }
    memcpy(file_bytes + file_size, src, (size_t)size);
    file_size += size;
    return true;
}

static bool read_bytes(void *dst, int64_t offset, int64_t size, void *user) {
    (void)user;
    memcpy(dst, file_bytes + offset, (size_t)size);
    return true;
}

static void check_gguf(rocq_ctx *ctx, const rocq_gguf_desc *desc) {
    rocq_gguf *file = NULL;
    rocq_tensor t;
    rocq_buffer buffer;
    rocq_str text = {NULL, 0};
    int64_t value = 0;
    CHECK(rocq_gguf_open(ctx, &file, desc) == ROCQ_OK);
    if (!file) {
        printf("%s\n", rocq_error(ctx));
        return;
    }
    CHECK(rocq_gguf_get_i64(file, "check.answer", &value) == ROCQ_OK && value == 42);
    CHECK(rocq_gguf_get_str(file, "check.text", &text) == ROCQ_OK && text.length == 3 &&
          memcmp(text.data, "abc", 3) == 0);
    CHECK(rocq_gguf_upload(ctx, file, "weight", &t, &buffer) == ROCQ_OK);
    CHECK(rocq_tensor_size(&t) == N * 4 && memcmp(rocq_tensor_data(&t), source, N * 4) == 0);
    CHECK(rocq_buffer_free(ctx, &buffer) == ROCQ_OK);
    rocq_gguf_close(&file);
}

static void write_gguf(rocq_ctx *ctx, const rocq_gguf_writer_desc *desc) {
    const int64_t ne[1] = {N};
    rocq_gguf_writer *writer = NULL;
    CHECK(rocq_gguf_writer_open(ctx, &writer, desc) == ROCQ_OK);
    CHECK(rocq_gguf_writer_set_u32(writer, "check.answer", 42) == ROCQ_OK);
    CHECK(rocq_gguf_writer_set_str(writer, "check.text", "abc") == ROCQ_OK);
    CHECK(rocq_gguf_writer_add_tensor(writer, "weight", ROCQ_F32, 1, ne) == ROCQ_OK);
    CHECK(rocq_gguf_writer_write(writer, source, N * 4) == ROCQ_OK);
    CHECK(rocq_gguf_writer_close(&writer) == ROCQ_OK);
}

static void check_files(rocq_ctx *ctx) {
    rocq_gguf_writer_desc to;
    rocq_gguf_desc from;
    memset(&to, 0, sizeof to);
    to.write = write_bytes;
    write_gguf(ctx, &to);
    memset(&from, 0, sizeof from);
    from.data = file_bytes;
    from.size = file_size;
    check_gguf(ctx, &from);
    from.data = NULL;
    from.read = read_bytes;
    check_gguf(ctx, &from);
#ifndef ROCQ_NO_STDIO
    memset(&to, 0, sizeof to);
    to.path = "selfcheck.gguf";
    write_gguf(ctx, &to);
    memset(&from, 0, sizeof from);
    from.path = to.path;
    check_gguf(ctx, &from);
    from.no_mmap = true;
    check_gguf(ctx, &from);
    remove(to.path);
#endif
}

int main(void) {
    rocq_ctx *ctx = NULL;
    rocq_desc desc;
    rocq_info info;
    memset(&desc, 0, sizeof desc);

    desc.prefer = ROCQ_BACKEND_GPU;
    printf("gpu: %s\n", rocq_result_name(rocq_open(&ctx, &desc)));
    CHECK(ctx == NULL);
    desc.allow_fallback = true;
    CHECK(rocq_open(&ctx, &desc) == ROCQ_OK);
    rocq_close(&ctx);

    desc.prefer = ROCQ_BACKEND_CPU;
    desc.n_threads = 2;
    CHECK(rocq_open(&ctx, &desc) == ROCQ_OK);
    if (!ctx) {
        return 1;
    }
    CHECK(rocq_get_info(ctx, &info) == ROCQ_OK);
    printf("%s\n", info.device);
#if !defined(SELFCHECK_EXTERNAL) && !defined(ROCQ_NO_THREADS)
    // What threads change at once lies within a cache line, also where an int64_t needs not.
    CHECK((uintptr_t)&ctx->team.open % 8 == 0 && (uintptr_t)&ctx->team.pending % 8 == 0 &&
          (uintptr_t)&ctx->team.shares[0].left % 8 == 0);
#endif
#define ROCQ_X(NAME, name, id, elems, bytes) check_format(ROCQ_##NAME, #NAME, id < 10 || id == 39);
    ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
    check_matmul(ctx, ROCQ_F32, ROCQ_PRECISION_F32, 1e-6);
    check_matmul(ctx, ROCQ_Q4_0, ROCQ_PRECISION_AUTO, 5e-4);
    check_matmul(ctx, ROCQ_Q4_0, ROCQ_PRECISION_INT8, 5e-4);
    check_matmul(ctx, ROCQ_Q6_K, ROCQ_PRECISION_INT8, 5e-4);
    check_matmul(ctx, ROCQ_Q6_K, ROCQ_PRECISION_F32, 1e-6);
    check_matmul(ctx, ROCQ_MXFP6_E3M2, ROCQ_PRECISION_F16, 1e-5);
    for (int tier = ROCQ_CPU_BEST; tier <= ROCQ_CPU_AVX512; tier++) { // those that are there
        rocq_ctx *other = NULL;
        desc.cpu_tier = (rocq_cpu_tier)tier;
        desc.allow_fallback = false;
        if (rocq_open(&other, &desc) != ROCQ_OK) continue;
        CHECK(rocq_get_info(other, &info) == ROCQ_OK);
        printf("%s\n", info.device);
#define ROCQ_X(NAME, name, id, elems, bytes) \
        check_product_bits(other, tier, ROCQ_##NAME, #NAME, elems, bytes);
        ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
        rocq_close(&other);
    }
    check_attention(ctx);
    check_files(ctx);
    rocq_close(&ctx);
    rocq_close(&ctx);
    printf("%s\n", n_failed ? "selfcheck: FAILED" : "selfcheck: ok");
    return n_failed != 0;
}
