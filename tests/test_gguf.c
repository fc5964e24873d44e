// The GGUF reader and writer: round trips, hand-made golden bytes, every way of reading, every
// corruption, truncation and allocation failure, files larger than 4 GiB, and ggml's own reader and
// writer as the peer where ROCQ_GGML_DIR says where its libraries are.
//
//     test_gguf --corpus DIR     writes the seed corpus of fuzz_gguf.c (tests/corpus/gguf) instead
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include <ctype.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

#include "../examples/ds.h"
#include "gguf_walk.h"

#define TMP ".build/test_gguf" // prefix of the files written here; tests run in the repository root

static unsigned seen; // results that some call gave, one bit each, for the last test

static rocq_result note(rocq_result result) {
    if (result <= ROCQ_E_IO && result >= ROCQ_E_TYPE) seen |= 1u << (ROCQ_E_IO - result);
    return result;
}

#define assert_result(call, expected)                                                              \
    do {                                                                                           \
        const rocq_result got_ = note(call);                                                       \
        if (got_ != (expected)) {                                                                  \
            fail_msg("%s: %s, expected %s", #call, rocq_result_name(got_),                         \
                     rocq_result_name((rocq_result)(expected)));                                   \
        }                                                                                          \
    } while (0)
#define assert_ok(call) assert_result(call, ROCQ_OK)

// ---------------------------------------------------------------------------------------------
// Contexts whose memory is counted, files in memory
// ---------------------------------------------------------------------------------------------

typedef struct counter {
    int64_t n, live, fail_at; // fail_at: number of the request that gets nothing, -1 = none
    size_t largest;
} counter;

static void *counter_alloc(size_t size, void *user) {
    counter *c = (counter *)user;
    if (c->n++ == c->fail_at) return NULL;
    if (size > c->largest) c->largest = size;
    c->live++;
    return malloc(size);
}

static void counter_free(void *ptr, size_t size, void *user) {
    memset(ptr, 0xdd, size);
    ((counter *)user)->live--;
    free(ptr);
}

static char last_error[512];
static int n_logged;

static void log_keep(rocq_log_level level, const char *message, void *user) {
    (void)level;
    n_logged++;
    (void)user;
    snprintf(last_error, sizeof last_error, "%s", message);
}

static rocq_ctx *open_ctx(counter *c) {
    rocq_ctx *ctx;
    rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1, .log = log_keep};
    if (c) {
        *c = (counter){.fail_at = -1};
        desc.allocator = (rocq_allocator){counter_alloc, counter_free, c};
    }
    assert_ok(rocq_open(&ctx, &desc));
    return ctx;
}

static int64_t live_bytes(const rocq_ctx *ctx) {
    rocq_stats stats;
    rocq_get_stats(ctx, &stats);
    return stats.live_bytes;
}

// Growing bytes; as a sink it refuses what goes beyond limit.
typedef struct blob {
    unsigned char *data; // stb_ds's array
    int64_t size;
    int64_t limit; // 0 = none
    int64_t n_reads, n_read_bytes;
} blob;

static void put(blob *b, const void *src, int64_t size) {
    arrsetlen(b->data, b->size + size);
    if (size > 0) memcpy(b->data + b->size, src, (size_t)size);
    b->size += size;
}

static void put_int(blob *b, uint64_t value, int size) { // little-endian whatever the host
    for (int i = 0; i < size; i++) put(b, &(unsigned char){(unsigned char)(value >> (8 * i))}, 1);
}

static void put_str(blob *b, const char *text) {
    put_int(b, strlen(text), 8);
    put(b, text, (int64_t)strlen(text));
}

static void put_header(blob *b, uint32_t version, uint64_t n_tensors, uint64_t n_values) {
    put(b, "GGUF", 4);
    put_int(b, version, 4);
    put_int(b, n_tensors, 8);
    put_int(b, n_values, 8);
}

static void put_tensor(blob *b, const char *name, int n_dims, const uint64_t *ne, uint32_t type,
                       uint64_t offset) {
    put_str(b, name);
    put_int(b, (uint64_t)n_dims, 4);
    for (int d = 0; d < n_dims; d++) put_int(b, ne[d], 8);
    put_int(b, type, 4);
    put_int(b, offset, 8);
}

static void put_zeros(blob *b, int64_t size) { // up to size bytes in all
    while (b->size < size) put(b, "", 1);
}

static bool blob_write(const void *src, int64_t size, void *user) {
    blob *b = (blob *)user;
    if (b->limit > 0 && b->size + size > b->limit) return false;
    put(b, src, size);
    return true;
}

static bool blob_read(void *dst, int64_t offset, int64_t size, void *user) {
    blob *b = (blob *)user;
    assert_true(offset >= 0 && size > 0);
    if (offset + size > b->size) return false;
    b->n_reads++;
    b->n_read_bytes += size;
    memcpy(dst, b->data + offset, (size_t)size);
    return true;
}

// A file over a copy of the bytes in a block of exactly their size, so that the sanitizer sees a
// read past the end; free it after the file.
static rocq_result open_span(rocq_ctx *ctx, rocq_gguf **file, const void *data, int64_t size,
                             unsigned char **copy) {
    *copy = (unsigned char *)malloc(size > 0 ? (size_t)size : 1);
    assert_non_null(*copy);
    if (size > 0) memcpy(*copy, data, (size_t)size);
    const rocq_gguf_desc desc = {.data = *copy, .size = size};
    return note(rocq_gguf_open(ctx, file, &desc));
}

static rocq_result open_callback(rocq_ctx *ctx, rocq_gguf **file, blob *b) {
    const rocq_gguf_desc desc = {.size = b->size, .read = blob_read, .user = b};
    return note(rocq_gguf_open(ctx, file, &desc));
}

// Opens the bytes both ways: the result must be the same, a failure must give no handle and keep
// nothing. Returns it.
static rocq_result try_open(rocq_ctx *ctx, const void *data, int64_t size) {
    rocq_result results[2];
    uint64_t hashes[2] = {0, 0};
    blob b = {0};
    put(&b, data, size);
    for (int k = 0; k < 2; k++) {
        rocq_gguf *file = (rocq_gguf *)(uintptr_t)64;
        unsigned char *copy = NULL;
        const int64_t before = live_bytes(ctx);
        last_error[0] = 0;
        results[k] =
            k == 0 ? open_span(ctx, &file, data, size, &copy) : open_callback(ctx, &file, &b);
        if (results[k] == ROCQ_OK) {
            hashes[k] = walk_file(ctx, file, 1 << 20, true);
            rocq_gguf_close(&file);
            assert_null(file);
        } else {
            assert_null(file);
            assert_memory_equal(last_error, "gguf: ", 6);
        }
        assert_int_equal(live_bytes(ctx), before);
        free(copy);
    }
    arrfree(b.data);
    assert_int_equal(results[0], results[1]);
    assert_true(hashes[0] == hashes[1]);
    return results[0];
}

static rocq_gguf_writer *create_in_memory(rocq_ctx *ctx, blob *b, int32_t alignment) {
    rocq_gguf_writer *writer = NULL;
    const rocq_gguf_writer_desc desc = {.write = blob_write, .user = b, .alignment = alignment};
    assert_ok(rocq_gguf_writer_open(ctx, &writer, &desc));
    assert_non_null(writer);
    return writer;
}

// ---------------------------------------------------------------------------------------------
// The golden file, byte by byte
// ---------------------------------------------------------------------------------------------

enum { // offsets of what the tests patch
    G_VERSION = 4,
    G_N_TENSORS = 8,
    G_N_VALUES = 16,
    G_A = 24,
    G_S = 38,
    G_T = 63, // value records: key at +8, type at +9
    G_W = 92,
    G_X = 125, // tensor records: name at +8, n_dims at +9
    G_DATA = 192,
    G_END = 230 // of the last tensor's bytes, before its padding
};

// clang-format off
static const unsigned char golden[256] = {
    'G','G','U','F', 3,0,0,0, 2,0,0,0,0,0,0,0, 3,0,0,0,0,0,0,0,        // v3, 2 tensors, 3 values
    1,0,0,0,0,0,0,0, 'a', 0,0,0,0, 7,                                 // a: u8 7
    1,0,0,0,0,0,0,0, 's', 8,0,0,0, 4,0,0,0,0,0,0,0, 'h','i',0,'!',    // s: "hi\0!"
    1,0,0,0,0,0,0,0, 't', 9,0,0,0, 2,0,0,0, 2,0,0,0,0,0,0,0, 1,0,3,2, // t: u16 [1, 0x0203]
    1,0,0,0,0,0,0,0, 'w', 1,0,0,0, 2,0,0,0,0,0,0,0, 0,0,0,0,          // w: F32 [2]
    0,0,0,0,0,0,0,0,                                                  //    at 0
    1,0,0,0,0,0,0,0, 'x', 2,0,0,0, 1,0,0,0,0,0,0,0, 3,0,0,0,0,0,0,0,  // x: F16 [1, 3]
    1,0,0,0, 32,0,0,0,0,0,0,0,                                        //    at 32
    0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,              // padding from 166 to 192
    0,0,128,63, 0,0,32,192,                                           // 1, -2.5
    0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,
    0,60, 0,64, 0,66                                                  // 1, 2, 3; then 26 zeros
};
// clang-format on

static void golden_bytes_are_read(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    for (int version = 2; version <= 3; version++) {
        unsigned char bytes[256], *copy;
        memcpy(bytes, golden, sizeof bytes);
        bytes[G_VERSION] = (unsigned char)version;
        assert_ok(try_open(ctx, bytes, sizeof bytes));
        rocq_gguf *file = NULL;
        assert_ok(open_span(ctx, &file, bytes, sizeof bytes, &copy));
        assert_int_equal(rocq_gguf_version(file), version);
        assert_int_equal(rocq_gguf_value_count(file), 3);
        assert_int_equal(rocq_gguf_tensor_count(file), 2);

        rocq_gguf_value value;
        uint64_t u64;
        rocq_str text;
        assert_ok(rocq_gguf_value_at(file, 0, &value));
        assert_true(value.key.length == 1 && value.key.data[0] == 'a');
        assert_true(value.type == ROCQ_GGUF_U8 && !value.is_array && value.count == 1);
        assert_ok(rocq_gguf_get_u64(file, "a", &u64));
        assert_int_equal(u64, 7);
        assert_ok(rocq_gguf_get_str(file, "s", &text));
        assert_int_equal(text.length, 4);
        assert_memory_equal(text.data, "hi\0!", 4);
        assert_ok(rocq_gguf_find_value(file, "t", &value));
        assert_true(value.type == ROCQ_GGUF_U16 && value.is_array && value.count == 2);
        assert_ok(rocq_gguf_value_u64(&value, 0, &u64));
        assert_int_equal(u64, 1);
        assert_ok(rocq_gguf_value_u64(&value, 1, &u64));
        assert_int_equal(u64, 0x203);

        rocq_gguf_tensor t;
        float floats[2] = {0};
        assert_ok(rocq_gguf_find_tensor(file, "w", &t));
        assert_true(t.known && t.format == ROCQ_F32 && t.type_id == 0 && t.n_dims == 1);
        assert_true(t.ne[0] == 2 && t.ne[1] == 1 && t.ne[2] == 1 && t.ne[3] == 1);
        assert_true(t.offset == G_DATA && t.size == 8);
        assert_ok(rocq_gguf_read(ctx, file, &t, floats));
        assert_true(floats[0] == 1.0f && floats[1] == -2.5f);
        assert_ok(rocq_gguf_tensor_at(file, 1, &t));
        assert_true(t.known && t.format == ROCQ_F16 && t.n_dims == 2 && t.ne[0] == 1 &&
                    t.ne[1] == 3);
        assert_true(t.name.length == 1 && t.name.data[0] == 'x');
        assert_true(t.offset == G_DATA + 32 && t.size == 6);
        rocq_gguf_close(&file);
        free(copy);
    }
    rocq_close(&ctx);
}

static void golden_bytes_are_written(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    blob b = {0};
    rocq_gguf_writer *writer = create_in_memory(ctx, &b, 0);
    const uint8_t a = 7;
    const uint16_t t[2] = {1, 0x203};
    const rocq_str s = {"hi\0!", 4};
    const int64_t w_ne[] = {2}, x_ne[] = {1, 3};
    assert_ok(rocq_gguf_writer_set(writer, "a", ROCQ_GGUF_U8, false, 1, &a));
    assert_ok(rocq_gguf_writer_set(writer, "s", ROCQ_GGUF_STRING, false, 1, &s));
    assert_ok(rocq_gguf_writer_set(writer, "t", ROCQ_GGUF_U16, true, 2, t));
    assert_ok(rocq_gguf_writer_add_tensor(writer, "w", ROCQ_F32, 1, w_ne));
    assert_ok(rocq_gguf_writer_add_tensor(writer, "x", ROCQ_F16, 2, x_ne));
    assert_ok(rocq_gguf_writer_write(writer, golden + G_DATA, 8));
    assert_ok(rocq_gguf_writer_write(writer, golden + G_DATA + 32, 6));
    assert_ok(rocq_gguf_writer_close(&writer));
    assert_null(writer);
    assert_int_equal(b.size, sizeof golden);
    assert_memory_equal(b.data, golden, sizeof golden);
    arrfree(b.data);
    rocq_close(&ctx);
}

// ---------------------------------------------------------------------------------------------
// The sample file: every type of value, alone and in arrays, and many formats of tensors
// ---------------------------------------------------------------------------------------------

static const uint8_t u8s[3] = {0, 7, UINT8_MAX};
static const int8_t i8s[3] = {INT8_MIN, -1, INT8_MAX};
static const uint16_t u16s[3] = {0, 7, UINT16_MAX};
static const int16_t i16s[3] = {INT16_MIN, -1, INT16_MAX};
static const uint32_t u32s[3] = {0, 7, UINT32_MAX};
static const int32_t i32s[3] = {INT32_MIN, -1, INT32_MAX};
static const uint64_t u64s[3] = {0, 7, UINT64_MAX};
static const int64_t i64s[3] = {INT64_MIN, -1, INT64_MAX};
static const float f32s[3] = {-0.0f, 1.5f, 3.402823466e+38f};
static const double f64s[3] = {1e-310, -2.25, 1.7976931348623157e308};
static const uint8_t bools[3] = {1, 0, 1};
static const rocq_str strings[3] = {{"", 0}, {"zero\0inside", 11}, {"\xf0\x9f\x9a\x80 utf-8", 10}};

static const struct sample_value {
    const char *name;
    rocq_gguf_type type;
    int size; // of an element here
    const void *data;
} sample_values[] = {{"u8", ROCQ_GGUF_U8, 1, u8s},
                     {"i8", ROCQ_GGUF_I8, 1, i8s},
                     {"u16", ROCQ_GGUF_U16, 2, u16s},
                     {"i16", ROCQ_GGUF_I16, 2, i16s},
                     {"u32", ROCQ_GGUF_U32, 4, u32s},
                     {"i32", ROCQ_GGUF_I32, 4, i32s},
                     {"f32", ROCQ_GGUF_F32, 4, f32s},
                     {"bool", ROCQ_GGUF_BOOL, 1, bools},
                     {"string", ROCQ_GGUF_STRING, sizeof(rocq_str), strings},
                     {"u64", ROCQ_GGUF_U64, 8, u64s},
                     {"i64", ROCQ_GGUF_I64, 8, i64s},
                     {"f64", ROCQ_GGUF_F64, 8, f64s}};
enum {
    N_SAMPLE_VALUES = sizeof sample_values / sizeof *sample_values
};

static const struct sample_tensor {
    const char *name;
    rocq_format format;
    int n_dims;
    int64_t ne[4];
} sample_tensors[] = {
    {"token_embd.weight", ROCQ_Q4_K, 2, {256, 3}},
    {"blk.0.attn_norm.weight", ROCQ_F32, 1, {5}},
    {"half", ROCQ_F16, 3, {3, 2, 2}},
    {"brain", ROCQ_BF16, 4, {1, 1, 1, 7}},
    {"odd", ROCQ_MXFP4, 1, {32}},
    {"ids", ROCQ_I32, 1, {9}},
    {"six", ROCQ_MXFP6_E2M3, 2, {64, 1}},
    {"eight", ROCQ_Q8_0, 4, {32, 1, 2, 1}},
    {"last", ROCQ_F32, 2, {16, 2}}}; // a whole number of alignments long: no padding at the end
enum {
    N_SAMPLE_TENSORS = sizeof sample_tensors / sizeof *sample_tensors
};

static void sample_data(int i, unsigned char *dst, int64_t size) {
    uint32_t x = 12345u + (uint32_t)i;
    for (int64_t k = 0; k < size; k++) {
        x = x * 1664525u + 1013904223u;
        dst[k] = (unsigned char)(x >> 24);
    }
}

static int64_t sample_size(int i) {
    rocq_tensor t;
    assert_ok(rocq_tensor_init(&t, NULL, 0, sample_tensors[i].format, sample_tensors[i].n_dims,
                               sample_tensors[i].ne));
    return rocq_tensor_size(&t);
}

// Returns the first failure; the writer is finished either way.
static rocq_result sample_write(rocq_gguf_writer **writer) {
    rocq_result result = ROCQ_OK, end;
    char key[64];
    for (int i = 0; i < N_SAMPLE_VALUES && result == ROCQ_OK; i++) {
        const struct sample_value *s = &sample_values[i];
        for (int k = 0; k < 3 && result == ROCQ_OK; k++) {
            snprintf(key, sizeof key, "sample.%s_%d", s->name, k);
            result = rocq_gguf_writer_set(*writer, key, s->type, false, 1,
                                          (const unsigned char *)s->data + k * s->size);
        }
        snprintf(key, sizeof key, "sample.%s.array", s->name);
        if (result == ROCQ_OK)
            result = rocq_gguf_writer_set(*writer, key, s->type, true, 3, s->data);
        snprintf(key, sizeof key, "sample.%s.empty", s->name);
        if (result == ROCQ_OK) result = rocq_gguf_writer_set(*writer, key, s->type, true, 0, NULL);
    }
    for (int i = 0; i < N_SAMPLE_TENSORS && result == ROCQ_OK; i++) {
        const struct sample_tensor *s = &sample_tensors[i];
        result = rocq_gguf_writer_add_tensor(*writer, s->name, s->format, s->n_dims, s->ne);
    }
    for (int i = 0; i < N_SAMPLE_TENSORS && result == ROCQ_OK; i++) {
        unsigned char data[512];
        const int64_t size = sample_size(i);
        assert_true(size <= (int64_t)sizeof data);
        sample_data(i, data, size);
        result = rocq_gguf_writer_write(*writer, data, size);
    }
    end = rocq_gguf_writer_close(writer);
    return result != ROCQ_OK ? result : end;
}

static blob sample_blob(rocq_ctx *ctx) {
    blob b = {0};
    rocq_gguf_writer *writer = create_in_memory(ctx, &b, 0);
    assert_ok(sample_write(&writer));
    return b;
}

// Native value of element i of the sample, through the getter that holds it.
static void check_sample_element(const struct sample_value *s, const rocq_gguf_value *v, int64_t i,
                                 int64_t k) {
    const unsigned char *expected = (const unsigned char *)s->data + k * s->size;
    unsigned char narrow[8];
    uint64_t u64;
    int64_t i64;
    double f64;
    float f32;
    bool flag;
    rocq_str text;
    switch (s->type) {
    case ROCQ_GGUF_U8:
    case ROCQ_GGUF_U16:
    case ROCQ_GGUF_U32:
    case ROCQ_GGUF_U64:
        assert_ok(rocq_gguf_value_u64(v, i, &u64));
        memcpy(narrow, &u64, 8);
        break;
    case ROCQ_GGUF_I8:
    case ROCQ_GGUF_I16:
    case ROCQ_GGUF_I32:
    case ROCQ_GGUF_I64:
        assert_ok(rocq_gguf_value_i64(v, i, &i64));
        memcpy(narrow, &i64, 8);
        break;
    case ROCQ_GGUF_F32:
        assert_ok(rocq_gguf_value_f64(v, i, &f64));
        f32 = (float)f64;
        assert_true((double)f32 == f64);
        memcpy(narrow, &f32, 4);
        break;
    case ROCQ_GGUF_F64:
        assert_ok(rocq_gguf_value_f64(v, i, &f64));
        memcpy(narrow, &f64, 8);
        break;
    case ROCQ_GGUF_BOOL:
        assert_ok(rocq_gguf_value_bool(v, i, &flag));
        narrow[0] = flag;
        break;
    default:
        assert_ok(rocq_gguf_value_str(v, i, &text));
        assert_int_equal(text.length, strings[k].length);
        assert_memory_equal(text.data, strings[k].data, (size_t)text.length);
        return;
    }
    assert_memory_equal(narrow, expected, (size_t)s->size);
}

static void check_sample(rocq_ctx *ctx, const rocq_gguf *file) {
    char key[64];
    rocq_gguf_value v;
    assert_int_equal(rocq_gguf_value_count(file), N_SAMPLE_VALUES * 5);
    for (int i = 0; i < N_SAMPLE_VALUES; i++) {
        const struct sample_value *s = &sample_values[i];
        for (int k = 0; k < 3; k++) {
            snprintf(key, sizeof key, "sample.%s_%d", s->name, k);
            assert_ok(rocq_gguf_find_value(file, key, &v));
            assert_true(v.type == s->type && !v.is_array && v.count == 1);
            check_sample_element(s, &v, 0, k);
        }
        snprintf(key, sizeof key, "sample.%s.array", s->name);
        assert_ok(rocq_gguf_find_value(file, key, &v));
        assert_true(v.type == s->type && v.is_array && v.count == 3);
        for (int k = 0; k < 3; k++) check_sample_element(s, &v, k, k);
        snprintf(key, sizeof key, "sample.%s.empty", s->name);
        assert_ok(rocq_gguf_find_value(file, key, &v));
        assert_true(v.type == s->type && v.is_array && v.count == 0);
    }
    assert_int_equal(rocq_gguf_tensor_count(file), N_SAMPLE_TENSORS);
    for (int i = 0; i < N_SAMPLE_TENSORS; i++) {
        const struct sample_tensor *s = &sample_tensors[i];
        unsigned char expected[512], got[512];
        rocq_gguf_tensor t, at;
        assert_ok(rocq_gguf_find_tensor(file, s->name, &t));
        assert_ok(rocq_gguf_tensor_at(file, i, &at));
        assert_int_equal(t.offset, at.offset);
        assert_true(t.known && t.format == s->format && t.n_dims == s->n_dims);
        for (int d = 0; d < 4; d++) assert_int_equal(t.ne[d], d < s->n_dims ? s->ne[d] : 1);
        assert_int_equal(t.size, sample_size(i));
        assert_int_equal(t.offset % 32, 0);
        sample_data(i, expected, t.size);
        memset(got, 0xff, sizeof got);
        assert_ok(rocq_gguf_read(ctx, file, &t, got));
        assert_memory_equal(got, expected, (size_t)t.size);
        assert_int_equal(got[t.size], 0xff);
    }
}

static void write_blob(const char *path, const void *data, int64_t size) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, (size_t)size, f), size);
    assert_int_equal(fclose(f), 0);
}

static void every_type_round_trips_through_every_source(void **state) {
    (void)state;
    counter c;
    rocq_ctx *ctx = open_ctx(&c);
    const int64_t before = live_bytes(ctx);
    static const char path[] = TMP "_\xc3\xa9\xe2\x82\xac.gguf"; // UTF-8 in the name
    blob b = sample_blob(ctx);
    rocq_gguf_writer *writer = NULL;
    const rocq_gguf_writer_desc to_path = {.path = path};
    assert_ok(rocq_gguf_writer_open(ctx, &writer, &to_path));
    assert_ok(sample_write(&writer));

    const rocq_gguf_desc descs[] = {{.data = b.data, .size = b.size},
                                    {.size = b.size, .read = blob_read, .user = &b},
                                    {.path = path},
                                    {.path = path, .no_mmap = true}};
    uint64_t hashes[4];
    for (int k = 0; k < 4; k++) {
        rocq_gguf *file = NULL;
        assert_ok(rocq_gguf_open(ctx, &file, &descs[k]));
        check_sample(ctx, file);
        hashes[k] = walk_file(ctx, file, 1 << 20, true);
        assert_true(hashes[k] == hashes[0]);
        rocq_gguf_close(&file);
        rocq_gguf_close(&file); // harmless
        assert_int_equal(live_bytes(ctx), before);
    }
    remove(path);
    arrfree(b.data);
    rocq_close(&ctx);
    assert_int_equal(c.live, 0);
}

// Any address will do: metadata is not aligned in a file.
static void unaligned_spans_read_the_same(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    blob b = sample_blob(ctx);
    uint64_t first = 0;
    for (int shift = 0; shift < 9; shift++) {
        unsigned char *copy = (unsigned char *)malloc((size_t)(b.size + shift));
        memcpy(copy + shift, b.data, (size_t)b.size);
        const rocq_gguf_desc desc = {.data = copy + shift, .size = b.size};
        rocq_gguf *file = NULL;
        assert_ok(rocq_gguf_open(ctx, &file, &desc));
        check_sample(ctx, file);
        const uint64_t hash = walk_file(ctx, file, 1 << 20, true);
        if (shift == 0) first = hash;
        assert_true(hash == first);
        rocq_gguf_close(&file);
        free(copy);
    }
    arrfree(b.data);
    rocq_close(&ctx);
}

// ---------------------------------------------------------------------------------------------
// Getters
// ---------------------------------------------------------------------------------------------

static void numbers_convert_only_without_loss(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    blob b = sample_blob(ctx);
    rocq_gguf *file = NULL;
    assert_ok(open_callback(ctx, &file, &b));
    const struct {
        const char *key;
        int i64, u64, f64, flag, str; // does it read as that
    } expected[] = {
        {"u8_2", 1, 1, 0, 0, 0},         {"i8_0", 1, 0, 0, 0, 0},     {"i8_2", 1, 1, 0, 0, 0},
        {"u16_2", 1, 1, 0, 0, 0},        {"i16_0", 1, 0, 0, 0, 0},    {"i16_2", 1, 1, 0, 0, 0},
        {"u32_2", 1, 1, 0, 0, 0},        {"i32_1", 1, 0, 0, 0, 0},    {"i32_2", 1, 1, 0, 0, 0},
        {"u64_1", 1, 1, 0, 0, 0},        {"u64_2", 0, 1, 0, 0, 0},    {"i64_0", 1, 0, 0, 0, 0},
        {"i64_2", 1, 1, 0, 0, 0},        {"f32_1", 0, 0, 1, 0, 0},    {"f64_1", 0, 0, 1, 0, 0},
        {"bool_0", 0, 0, 0, 1, 0},       {"string_1", 0, 0, 0, 0, 1}, {"u8.array", 0, 0, 0, 0, 0},
        {"string.array", 0, 0, 0, 0, 0}, {"f32.empty", 0, 0, 0, 0, 0}};
    for (size_t k = 0; k < sizeof expected / sizeof *expected; k++) {
        char key[64];
        int64_t i64 = 99;
        uint64_t u64 = 99;
        double f64 = 99;
        bool flag = true;
        rocq_str text = {"99", 2};
        snprintf(key, sizeof key, "sample.%s", expected[k].key);
        assert_result(rocq_gguf_get_i64(file, key, &i64), expected[k].i64 ? ROCQ_OK : ROCQ_E_TYPE);
        assert_result(rocq_gguf_get_u64(file, key, &u64), expected[k].u64 ? ROCQ_OK : ROCQ_E_TYPE);
        assert_result(rocq_gguf_get_f64(file, key, &f64), expected[k].f64 ? ROCQ_OK : ROCQ_E_TYPE);
        assert_result(rocq_gguf_get_bool(file, key, &flag),
                      expected[k].flag ? ROCQ_OK : ROCQ_E_TYPE);
        assert_result(rocq_gguf_get_str(file, key, &text), expected[k].str ? ROCQ_OK : ROCQ_E_TYPE);
        if (!expected[k].i64) assert_true(i64 == 99);
        if (!expected[k].u64) assert_true(u64 == 99);
        if (!expected[k].f64) assert_true(f64 == 99);
        if (!expected[k].flag) assert_true(flag);
        if (!expected[k].str) assert_true(text.length == 2);
        if (!expected[k].str) assert_non_null(strstr(last_error, key)); // the message names the key
    }
    int64_t i64;
    uint64_t u64;
    assert_ok(rocq_gguf_get_i64(file, "sample.i8_0", &i64));
    assert_true(i64 == INT8_MIN);
    assert_ok(rocq_gguf_get_i64(file, "sample.i64_0", &i64));
    assert_true(i64 == INT64_MIN);
    assert_ok(rocq_gguf_get_u64(file, "sample.u64_2", &u64));
    assert_true(u64 == UINT64_MAX);
    assert_ok(rocq_gguf_get_i64(file, "sample.u32_2", &i64));
    assert_true(i64 == UINT32_MAX);

    // What is not there is no error message.
    last_error[0] = 0;
    rocq_gguf_value v;
    rocq_gguf_tensor t;
    assert_result(rocq_gguf_get_i64(file, "sample.none", &i64), ROCQ_E_NOT_FOUND);
    assert_result(rocq_gguf_find_value(file, "", &v), ROCQ_E_NOT_FOUND);
    assert_result(rocq_gguf_find_tensor(file, "sample.u8_0", &t), ROCQ_E_NOT_FOUND);
    assert_int_equal(last_error[0], 0);
    rocq_gguf_close(&file);
    arrfree(b.data);
    rocq_close(&ctx);
}

static void arrays_are_bounded(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    blob b = sample_blob(ctx);
    rocq_gguf *file = NULL;
    assert_ok(open_callback(ctx, &file, &b));
    rocq_gguf_value v;
    rocq_str text = {"x", 1};
    int64_t i64 = 5;
    const int64_t outside[] = {-1, 3, INT64_MIN, INT64_MAX};
    for (int k = 0; k < 4; k++) {
        assert_ok(rocq_gguf_find_value(file, "sample.i32.array", &v));
        assert_result(rocq_gguf_value_i64(&v, outside[k], &i64), ROCQ_E_ARGUMENT);
        assert_ok(rocq_gguf_find_value(file, "sample.string.array", &v));
        assert_result(rocq_gguf_value_str(&v, outside[k], &text), ROCQ_E_ARGUMENT);
    }
    assert_true(i64 == 5 && text.length == 1);

    const void *cursor = NULL;
    for (int k = 0; k < 3; k++) {
        assert_ok(rocq_gguf_next_str(&v, &cursor, &text));
        assert_int_equal(text.length, strings[k].length);
        assert_memory_equal(text.data, strings[k].data, (size_t)text.length);
    }
    for (int k = 0; k < 2; k++) { // the end stays the end
        assert_result(rocq_gguf_next_str(&v, &cursor, &text), ROCQ_E_NOT_FOUND);
        assert_int_equal(text.length, strings[2].length);
    }
    cursor = NULL;
    assert_ok(rocq_gguf_find_value(file, "sample.string.empty", &v));
    assert_result(rocq_gguf_next_str(&v, &cursor, &text), ROCQ_E_NOT_FOUND);
    assert_null(cursor);
    assert_ok(rocq_gguf_find_value(file, "sample.string_1", &v)); // a scalar is a list of one
    assert_ok(rocq_gguf_next_str(&v, &cursor, &text));
    assert_int_equal(text.length, 11);
    assert_result(rocq_gguf_next_str(&v, &cursor, &text), ROCQ_E_NOT_FOUND);
    cursor = NULL;
    assert_ok(rocq_gguf_find_value(file, "sample.u8.array", &v));
    assert_result(rocq_gguf_next_str(&v, &cursor, &text), ROCQ_E_TYPE);
    rocq_gguf_close(&file);
    arrfree(b.data);
    rocq_close(&ctx);
}

static void null_arguments_are_refused(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    rocq_gguf *file = NULL;
    unsigned char *copy;
    assert_ok(open_span(ctx, &file, golden, sizeof golden, &copy));
    rocq_gguf_value v;
    rocq_gguf_tensor t;
    rocq_tensor tensor;
    rocq_buffer buffer;
    rocq_str text;
    uint64_t u64;
    const void *cursor = NULL;
    const rocq_gguf_desc span = {.data = golden, .size = sizeof golden}, none = {0},
                         two = {.data = golden, .size = 1, .path = "x"},
                         negative = {.data = golden, .size = -1},
                         negative_read = {.read = blob_read, .size = -1};
    const rocq_gguf_desc *const wrong[] = {NULL, &none, &two, &negative, &negative_read, &span};
    rocq_gguf *refused;
    assert_result(rocq_gguf_open(ctx, NULL, &span), ROCQ_E_ARGUMENT);
    for (int k = 0; k < 6; k++) { // the last one without a context
        refused = (rocq_gguf *)(uintptr_t)64;
        assert_result(rocq_gguf_open(k < 5 ? ctx : NULL, &refused, wrong[k]), ROCQ_E_ARGUMENT);
        assert_null(refused);
    }
    rocq_gguf_close(NULL);
    rocq_gguf_close(&refused);
    assert_int_equal(rocq_gguf_version(NULL), 0);
    assert_int_equal(rocq_gguf_value_count(NULL), 0);
    assert_int_equal(rocq_gguf_tensor_count(NULL), 0);
    assert_result(rocq_gguf_value_at(NULL, 0, &v), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_value_at(file, 0, NULL), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_value_at(file, -1, &v), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_value_at(file, 3, &v), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_tensor_at(file, -1, &t), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_tensor_at(file, 2, &t), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_tensor_at(file, 0, NULL), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_find_value(NULL, "a", &v), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_find_value(file, NULL, &v), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_find_value(file, "a", NULL), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_find_tensor(NULL, "w", &t), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_find_tensor(file, NULL, &t), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_find_tensor(file, "w", NULL), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_get_u64(file, "a", NULL), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_get_u64(NULL, "a", &u64), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_get_u64(file, NULL, &u64), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_get_str(file, "s", NULL), ROCQ_E_ARGUMENT);
    assert_ok(rocq_gguf_find_value(file, "s", &v));
    assert_result(rocq_gguf_value_i64(NULL, 0, (int64_t *)&u64), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_value_i64(&v, 0, NULL), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_value_u64(NULL, 0, &u64), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_value_u64(&v, 0, NULL), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_value_f64(NULL, 0, (double *)&u64), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_value_f64(&v, 0, NULL), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_value_bool(NULL, 0, (bool *)&u64), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_value_bool(&v, 0, NULL), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_value_str(NULL, 0, &text), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_value_str(&v, 0, NULL), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_next_str(NULL, &cursor, &text), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_next_str(&v, NULL, &text), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_next_str(&v, &cursor, NULL), ROCQ_E_ARGUMENT);
    const rocq_gguf_value zero = {0};
    assert_result(rocq_gguf_value_u64(&zero, 0, &u64), ROCQ_E_ARGUMENT);
    assert_ok(rocq_gguf_find_tensor(file, "w", &t));
    assert_result(rocq_gguf_read(NULL, file, &t, &v), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_read(ctx, NULL, &t, &v), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_read(ctx, file, NULL, &v), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_read(ctx, file, &t, NULL), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_upload(NULL, file, "w", &tensor, &buffer), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_upload(ctx, NULL, "w", &tensor, &buffer), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_upload(ctx, file, NULL, &tensor, &buffer), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_upload(ctx, file, "w", NULL, &buffer), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_upload(ctx, file, "w", &tensor, NULL), ROCQ_E_ARGUMENT);
    t.offset = (int64_t)sizeof golden - 4; // a tensor that is not this file's
    assert_result(rocq_gguf_read(ctx, file, &t, &v), ROCQ_E_BOUNDS);
    t.offset = INT64_MAX;
    assert_result(rocq_gguf_read(ctx, file, &t, &v), ROCQ_E_BOUNDS);
    t.offset = -8;
    assert_result(rocq_gguf_read(ctx, file, &t, &v), ROCQ_E_BOUNDS);
    rocq_gguf_close(&file);
    free(copy);
    rocq_close(&ctx);
}

// ---------------------------------------------------------------------------------------------
// Files that are wrong
// ---------------------------------------------------------------------------------------------

#define P(...) {__VA_ARGS__}, sizeof((const unsigned char[]){__VA_ARGS__})
#define FF 255, 255, 255, 255
static const struct corruption {
    const char *what;
    int at; // in the golden file
    unsigned char bytes[24];
    size_t n;
    rocq_result expected;
    const char *message; // part of it
} corruptions[] = {
    {"magic", 0, P('g'), ROCQ_E_MAGIC,
     "not a GGUF file: it begins with 'gGUF', not 'GGUF'; as a number: 1179993959"},
    {"magic of GGML", 0, P('l', 'm', 'g', 'g'), ROCQ_E_MAGIC, "not a GGUF file"},
    {"version 0", G_VERSION, P(0), ROCQ_E_VERSION, "neither 2 nor 3: 0"},
    {"version 1", G_VERSION, P(1), ROCQ_E_VERSION, "neither 2 nor 3: 1"},
    {"version 4", G_VERSION, P(4), ROCQ_E_VERSION, "neither 2 nor 3: 4"},
    {"version 3 and more", G_VERSION, P(3, 0, 1), ROCQ_E_VERSION, "neither 2 nor 3"},
    {"big-endian", G_VERSION, P(0, 0, 0, 3), ROCQ_E_VERSION, "big-endian"},
    {"tensors, 2^64 - 1", G_N_TENSORS, P(FF, FF), ROCQ_E_TRUNCATED, "tensors"},
    {"tensors, 2^63", G_N_TENSORS, P(0, 0, 0, 0, 0, 0, 0, 128), ROCQ_E_TRUNCATED, "tensors"},
    {"tensors, 10", G_N_TENSORS, P(10), ROCQ_E_TRUNCATED,
     "the file ends at byte 256, before this many tensors: 10"},
    {"tensors, 9: padding and data read as more", G_N_TENSORS, P(9), ROCQ_E_TRUNCATED, "tensor 3"},
    {"values, 2^64 - 1", G_N_VALUES, P(FF, FF), ROCQ_E_TRUNCATED, "values"},
    {"values, 17", G_N_VALUES, P(17), ROCQ_E_TRUNCATED,
     "the file ends at byte 256, before this many values: 17"},
    {"values, one too few", G_N_VALUES, P(2), ROCQ_E_CORRUPT, "more than 4 dimensions: 9"},
    {"key without length", G_A, P(0), ROCQ_E_CORRUPT, "length of the key"},
    {"key past the end", G_A, P(232), ROCQ_E_TRUNCATED, "byte 32, value 0"},
    {"key, 2^64 - 1", G_A, P(FF, FF), ROCQ_E_TRUNCATED, "value 0"},
    {"key, 2^63", G_A, P(0, 0, 0, 0, 0, 0, 0, 128), ROCQ_E_TRUNCATED, "value 0"},
    {"type 13", G_A + 9, P(13), ROCQ_E_CORRUPT, "value 0 'a': type of value is not 0 to 12: 13"},
    {"type 256", G_A + 9, P(0, 1), ROCQ_E_CORRUPT, "type of value is not 0 to 12: 256"},
    {"type 2^32 - 1", G_A + 9, P(FF), ROCQ_E_CORRUPT, "type of value is not 0"},
    {"bool 7", G_A + 9, P(7), ROCQ_E_CORRUPT, "value 0 'a': a bool is neither 0 nor 1: 7"},
    {"string past the end", G_S + 13, P(198), ROCQ_E_TRUNCATED, "value 1 's'"},
    {"string, 2^64 - 1", G_S + 13, P(FF, FF), ROCQ_E_TRUNCATED, "value 1 's'"},
    {"array of arrays", G_T + 13, P(9), ROCQ_E_UNSUPPORTED, "value 2 't': an array of arrays"},
    {"array of type 13", G_T + 13, P(13), ROCQ_E_CORRUPT, "value 2 't': type of value"},
    {"array past the end", G_T + 17, P(85), ROCQ_E_TRUNCATED, "array of length: 85"},
    {"array, size overflows", G_T + 17, P(1, 0, 0, 0, 0, 0, 0, 128), ROCQ_E_TRUNCATED, "array"},
    {"array, 2^64 - 1", G_T + 17, P(FF, FF), ROCQ_E_TRUNCATED, "array"},
    {"array of strings that are none", G_T + 13, P(8), ROCQ_E_TRUNCATED, "value 2 't'"},
    {"same key twice", G_S + 8, P('a'), ROCQ_E_CORRUPT, "value 1 'a': the same name as number: 0"},
    {"same tensor twice", G_X + 8, P('w'), ROCQ_E_CORRUPT, "tensor 1 'w': the same name"},
    {"name past the end", G_X, P(124), ROCQ_E_TRUNCATED, "tensor 1"},
    {"name, 2^64 - 1", G_X, P(FF, FF), ROCQ_E_TRUNCATED, "tensor 1"},
    {"5 dimensions", G_X + 9, P(5), ROCQ_E_CORRUPT, "tensor 1 'x': more than 4 dimensions: 5"},
    {"2^32 - 1 dimensions", G_X + 9, P(FF), ROCQ_E_CORRUPT, "more than 4 dimensions"},
    {"dimension 0", G_W + 13, P(0), ROCQ_E_CORRUPT,
     "tensor 0 'w': a dimension is not 1 to 2^63 - 1: 0"},
    {"dimension -1", G_W + 13, P(FF, FF), ROCQ_E_CORRUPT, "a dimension is not 1"},
    {"dimension 2^63", G_W + 13, P(0, 0, 0, 0, 0, 0, 0, 128), ROCQ_E_CORRUPT, "a dimension is not"},
    {"bytes overflow", G_W + 13, P(0, 0, 0, 0, 0, 0, 0, 64), ROCQ_E_OVERFLOW, "too many bytes"},
    {"elements overflow", G_X + 13, P(0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1), ROCQ_E_OVERFLOW,
     "tensor 1 'x': too many elements"},
    {"rows of half blocks", G_W + 21, P(2), ROCQ_E_CORRUPT,
     "tensor 0 'w': rows are not whole blocks, of Q4_0's 32 elements, but have: 2"},
    {"offset 1", G_W + 25, P(1), ROCQ_E_ALIGNMENT, "alignment, 32: 1"},
    {"offset 8", G_X + 33, P(8), ROCQ_E_ALIGNMENT, "tensor 1 'x': data offset"},
    {"offset 2^64 - 32", G_X + 33, P(224, 255, 255, 255, FF), ROCQ_E_TRUNCATED, "tensor 1 'x'"},
    {"offset 2^63 - 32", G_X + 33, P(224, 255, 255, 255, 255, 255, 255, 127), ROCQ_E_TRUNCATED,
     "'x'"},
    {"data past the end", G_X + 33, P(64), ROCQ_E_TRUNCATED,
     "tensor 1 'x': the file ends before the data, at byte 256; offset: 64"},
    {"data longer than the file", G_X + 21, P(17), ROCQ_E_TRUNCATED, "tensor 1 'x': the file ends"},
    {"same data", G_X + 33, P(0), ROCQ_E_CORRUPT, "overlaps"},
    {"data into the next", G_W + 13, P(9), ROCQ_E_CORRUPT,
     "tensor 1 'x': data overlaps that of number: 0"},
    {"unknown type inside other data", G_X + 29, P(99, 0, 0, 0, 0), ROCQ_E_CORRUPT, "overlaps"},
    {"unknown type past the end", G_X + 29, P(99, 0, 0, 0, 64), ROCQ_E_TRUNCATED, "the file ends"},
    // and some that are not wrong
    {"unknown type", G_X + 29, P(99), ROCQ_OK, ""},
    {"unknown type of 4 bytes", G_X + 29, P(FF), ROCQ_OK, ""},
    {"same name of value and tensor", G_W + 8, P('a'), ROCQ_OK, ""},
    {"the other order", G_W + 25, P(32, 0, 0, 0, 0, 0, 0, 0), ROCQ_E_CORRUPT, "overlaps"},
    {"data up to the end", G_X + 21, P(16), ROCQ_OK, ""}};

static void each_corruption_has_its_code(void **state) {
    (void)state;
    counter c;
    rocq_ctx *ctx = open_ctx(&c);
    for (size_t k = 0; k < sizeof corruptions / sizeof *corruptions; k++) {
        const struct corruption *p = &corruptions[k];
        unsigned char bytes[sizeof golden];
        memcpy(bytes, golden, sizeof bytes);
        assert_true((size_t)p->at + p->n <= sizeof bytes);
        memcpy(bytes + p->at, p->bytes, p->n);
        c.largest = 0;
        const rocq_result got = try_open(ctx, bytes, sizeof bytes);
        if (got != p->expected || (got != ROCQ_OK && !strstr(last_error, p->message))) {
            fail_msg("%s: %s, message '%s'", p->what, rocq_result_name(got), last_error);
        }
        // A hostile number never asks for more than the file could hold (and the handle itself).
        if (c.largest > sizeof golden + sizeof(rocq_gguf)) {
            fail_msg("%s: asked for %zu bytes", p->what, c.largest);
        }
    }
    rocq_close(&ctx);
    assert_int_equal(c.live, 0);
}

static void every_truncation_is_noticed(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    for (int64_t n = 0; n <= (int64_t)sizeof golden; n++) { // the padding at the end may be missing
        assert_result(try_open(ctx, golden, n), n < G_END ? ROCQ_E_TRUNCATED : ROCQ_OK);
    }
    blob b = sample_blob(ctx);
    for (int64_t n = 0; n <= b.size; n++) {
        assert_result(try_open(ctx, b.data, n), n < b.size ? ROCQ_E_TRUNCATED : ROCQ_OK);
    }
    arrfree(b.data);
    rocq_close(&ctx);
}

// Any single byte changed: success or an error, never a crash; most of it through both sources.
static void every_byte_can_be_wrong(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    static const unsigned char masks[] = {0x01, 0x80, 0xff};
    for (size_t at = 0; at < sizeof golden; at++) {
        for (size_t m = 0; m < sizeof masks; m++) {
            unsigned char bytes[sizeof golden];
            memcpy(bytes, golden, sizeof bytes);
            bytes[at] ^= masks[m];
            const rocq_result result = try_open(ctx, bytes, sizeof bytes);
            if (at < 8) assert_true(result == ROCQ_E_MAGIC || result == ROCQ_E_VERSION || at == 4);
            if (at >= 166) assert_int_equal(result, ROCQ_OK);
        }
    }
    rocq_close(&ctx);
}

// A mapped file or a span may change under the reader: it must stay inside, whatever is there now.
static void a_file_that_changes_is_survived(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    blob b = sample_blob(ctx);
    unsigned char *copy;
    rocq_gguf *file = NULL;
    assert_ok(open_span(ctx, &file, b.data, b.size, &copy));
    rocq_gguf_tensor t;
    assert_ok(rocq_gguf_tensor_at(file, 0, &t));
    const int64_t head = t.offset; // up to here is header
    uint32_t x = 1;
    for (int k = 0; k < 4000; k++) {
        x = x * 1664525u + 1013904223u;
        const int64_t at = (int64_t)((x >> 8) % (uint32_t)head);
        copy[at] = (unsigned char)(k % 3 == 0 ? 0xff : x >> 3);
        walk_file(ctx, file, 1 << 20, false);
        if (k % 2 == 0) memcpy(copy, b.data, (size_t)head); // else the damage piles up
    }
    int64_t damaged = 0;
    memset(copy + 24, 0xff, (size_t)head - 24);
    for (int64_t i = 0; i < rocq_gguf_value_count(file); i++) {
        rocq_gguf_value v;
        damaged += note(rocq_gguf_value_at(file, i, &v)) == ROCQ_E_CORRUPT;
    }
    assert_int_equal(damaged, rocq_gguf_value_count(file));
    assert_result(rocq_gguf_tensor_at(file, 0, &t), ROCQ_E_CORRUPT);
    rocq_gguf_close(&file);
    free(copy);
    arrfree(b.data);
    rocq_close(&ctx);
}

// One number of the golden file changes while it is open: the record that holds it is refused as
// soon as it no longer fills the place where it was found.
static void changed_records_are_refused(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    rocq_gguf *file = NULL;
    rocq_gguf_value v;
    rocq_gguf_tensor t;
    rocq_str text = {"x", 1};
    const void *cursor = NULL;
    unsigned char *copy;
    assert_ok(open_span(ctx, &file, golden, sizeof golden, &copy));
    for (unsigned char length = 5; length <= 8; length++) { // s is 4 bytes long
        copy[G_S + 13] = length;
        assert_ok(rocq_gguf_find_value(file, "s", &v));
        assert_result(rocq_gguf_value_str(&v, 0, &text), ROCQ_E_CORRUPT);
        assert_result(rocq_gguf_next_str(&v, &cursor, &text), ROCQ_E_CORRUPT);
        assert_result(rocq_gguf_get_str(file, "s", &text), ROCQ_E_CORRUPT);
    }
    assert_true(text.length == 1 && !cursor);
    copy[G_T + 17] = 3; // t has 2 elements
    assert_result(rocq_gguf_find_value(file, "t", &v), ROCQ_E_CORRUPT);
    copy[G_A + 9] = ROCQ_GGUF_U16; // a has 1 byte
    assert_result(rocq_gguf_find_value(file, "a", &v), ROCQ_E_CORRUPT);
    for (unsigned char n_dims = 0; n_dims < 6; n_dims++) {
        copy[G_W + 9] = n_dims;
        assert_result(rocq_gguf_find_tensor(file, "w", &t), n_dims == 1 ? ROCQ_OK : ROCQ_E_CORRUPT);
        if (n_dims != 1) assert_non_null(strstr(last_error, "dimensions are now"));
    }
    copy[G_X + 33] = 64; // its data would now lie past the end
    assert_result(rocq_gguf_find_tensor(file, "x", &t), ROCQ_E_TRUNCATED);
    rocq_gguf_close(&file);
    free(copy);
    rocq_close(&ctx);
}

static void alignment_must_be_sane(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    const struct {
        int type;
        uint64_t value;
        rocq_result expected;
    } cases[] = {{ROCQ_GGUF_U32, 8, ROCQ_OK},
                 {ROCQ_GGUF_U32, 16, ROCQ_OK},
                 {ROCQ_GGUF_U32, 64, ROCQ_OK},
                 {ROCQ_GGUF_U64, 1 << 20, ROCQ_OK},
                 {ROCQ_GGUF_U32, 0, ROCQ_E_CORRUPT},
                 {ROCQ_GGUF_U32, 4, ROCQ_E_CORRUPT},
                 {ROCQ_GGUF_U32, 24, ROCQ_E_CORRUPT},
                 {ROCQ_GGUF_U32, 1 << 21, ROCQ_E_CORRUPT},
                 {ROCQ_GGUF_U32, UINT32_MAX, ROCQ_E_CORRUPT},
                 {ROCQ_GGUF_F32, 0x42000000, ROCQ_E_CORRUPT},
                 {ROCQ_GGUF_I32, 0xffffffe0, ROCQ_E_CORRUPT},
                 {ROCQ_GGUF_STRING, 0, ROCQ_E_CORRUPT},
                 {ROCQ_GGUF_U64, (uint64_t)1 << 63, ROCQ_E_CORRUPT}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        blob b = {0};
        const uint64_t ne[] = {1};
        put_header(&b, 3, 2, 1);
        put_str(&b, "general.alignment");
        put_int(&b, (uint64_t)cases[k].type, 4);
        put_int(&b, cases[k].value, (int)rocq__gguf_type_size((uint32_t)cases[k].type));
        put_tensor(&b, "a", 1, ne, 0, 0);
        put_tensor(&b, "b", 1, ne, 0, cases[k].value);
        const int64_t align = cases[k].expected == ROCQ_OK ? (int64_t)cases[k].value : 8;
        const int64_t start = (b.size + align - 1) / align * align;
        put_zeros(&b, start + align);
        put(&b, f32s, 4);
        assert_result(try_open(ctx, b.data, b.size), cases[k].expected);
        if (cases[k].expected == ROCQ_OK) {
            rocq_gguf *file = NULL;
            rocq_gguf_tensor t;
            assert_ok(open_callback(ctx, &file, &b));
            assert_ok(rocq_gguf_find_tensor(file, "b", &t));
            assert_int_equal(t.offset, start + align);
            rocq_gguf_close(&file);
        }
        arrfree(b.data);
    }
    rocq_close(&ctx);
}

static void odd_but_valid_files_open(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    blob b = {0};
    put_header(&b, 3, 0, 0); // nothing in it
    assert_ok(try_open(ctx, b.data, b.size));

    // Data in another order than the directory, gaps, trailing bytes, no dimensions, no name, a
    // name longer than ggml's 64, a type nobody knows.
    b.size = 0;
    char name[200];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    const uint64_t ne[] = {3, 2, 1, 1};
    put_header(&b, 2, 4, 1);
    put_str(&b, "key with spaces, \x01 and \xff");
    put_int(&b, ROCQ_GGUF_U8, 4);
    put_int(&b, 9, 1);
    put_tensor(&b, name, 4, ne, ROCQ_F32, 128);
    put_tensor(&b, "", 0, ne, ROCQ_F32, 0);
    put_tensor(&b, "future", 2, ne, 0x10000, 64);
    put_tensor(&b, "f16", 1, ne, ROCQ_F16, 32);
    const int64_t start = (b.size + 31) / 32 * 32;
    put_zeros(&b, start + 256);
    assert_ok(try_open(ctx, b.data, b.size));
    rocq_gguf *file = NULL;
    rocq_gguf_tensor t;
    rocq_tensor loaded;
    rocq_buffer buffer;
    memset(&loaded, 0x55, sizeof loaded);
    const rocq_tensor untouched = loaded;
    unsigned char byte;
    assert_ok(open_callback(ctx, &file, &b));
    assert_ok(rocq_gguf_find_tensor(file, name, &t));
    assert_true(t.offset == start + 128 && t.n_dims == 4 && t.size == 24);
    assert_ok(rocq_gguf_find_tensor(file, "", &t));
    assert_true(t.n_dims == 1 && t.ne[0] == 1 && t.ne[1] == 1 && t.size == 4);
    assert_ok(rocq_gguf_find_tensor(file, "future", &t));
    assert_true(!t.known && t.type_id == 0x10000 && t.size == 0 && t.ne[0] == 3 && t.ne[1] == 2);
    assert_result(rocq_gguf_read(ctx, file, &t, &byte), ROCQ_E_FORMAT);
    assert_result(rocq_gguf_upload(ctx, file, "future", &loaded, &buffer), ROCQ_E_FORMAT);
    assert_result(rocq_gguf_upload(ctx, file, "past", &loaded, &buffer), ROCQ_E_NOT_FOUND);
    assert_non_null(strstr(rocq_error(ctx), "past"));
    assert_memory_equal(&loaded, &untouched, sizeof loaded);
    rocq_gguf_close(&file);

    // The longest key, and one byte more.
    for (uint64_t length = 65535; length <= 65536; length++) {
        b.size = 0;
        put_header(&b, 3, 0, 1);
        put_int(&b, length, 8);
        for (uint64_t i = 0; i < length; i++) put(&b, "k", 1);
        put_int(&b, ROCQ_GGUF_U8, 4);
        put_int(&b, 9, 1);
        assert_result(try_open(ctx, b.data, b.size), length == 65535 ? ROCQ_OK : ROCQ_E_CORRUPT);
    }
    arrfree(b.data);
    rocq_close(&ctx);
}

// Bytes of a message come from a hostile file: control characters and length are kept out of it.
static void messages_are_one_clean_line(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    blob b = {0};
    put_header(&b, 3, 0, 1);
    put_int(&b, 1000, 8);
    for (int i = 0; i < 1000; i++) put(&b, i % 2 ? "\x1b" : "%", 1);
    put_int(&b, 77, 4);
    put_zeros(&b, b.size + 64);
    assert_result(try_open(ctx, b.data, b.size), ROCQ_E_CORRUPT);
    assert_true(strlen(last_error) < 200);
    for (const char *p = last_error; *p; p++) assert_true(*p >= 32 && *p < 127);
    assert_non_null(strstr(last_error, "%?%?"));
    arrfree(b.data);
    rocq_close(&ctx);
}

static void many_names_are_found(void **state) {
    (void)state;
    enum {
        N = 3000
    };
    counter c;
    rocq_ctx *ctx = open_ctx(&c);
    blob b = {0};
    const uint64_t ne[] = {1};
    char name[32];
    put_header(&b, 3, N, N);
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof name, "%d.key.%d", i * 7919 % N, i % 10);
        put_str(&b, name);
        put_int(&b, ROCQ_GGUF_I32, 4);
        put_int(&b, (uint64_t)i, 4);
    }
    const int64_t last_key = b.size;
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof name, "%d", (i + 17) * 7919 % N);
        put_tensor(&b, name, 1, ne, ROCQ_F32, (uint64_t)((i * 4801 + 5) % N * 32));
    }
    put_zeros(&b, (b.size + 31) / 32 * 32 + N * 32);
    rocq_gguf *file = NULL;
    assert_ok(open_callback(ctx, &file, &b));
    assert_true(b.n_read_bytes < b.size); // the data was not touched
    for (int i = 0; i < N; i++) {
        int64_t i64;
        rocq_gguf_tensor t, at;
        snprintf(name, sizeof name, "%d.key.%d", i * 7919 % N, i % 10);
        assert_ok(rocq_gguf_get_i64(file, name, &i64));
        assert_int_equal(i64, i);
        snprintf(name, sizeof name, "%d", (i + 17) * 7919 % N);
        assert_ok(rocq_gguf_find_tensor(file, name, &t));
        assert_ok(rocq_gguf_tensor_at(file, i, &at));
        assert_int_equal(t.offset, at.offset);
    }
    rocq_gguf_close(&file);

    // One name twice among so many is found too.
    blob twice = {0};
    put_header(&twice, 3, 0, N + 1);
    put(&twice, b.data + 24, last_key - 24);
    put_str(&twice, "0.key.0");
    put_int(&twice, ROCQ_GGUF_I32, 4);
    put_int(&twice, 0, 4);
    assert_result(try_open(ctx, twice.data, twice.size), ROCQ_E_CORRUPT);
    assert_non_null(strstr(last_error, "value 3000 '0.key.0': the same name as number: 0"));
    arrfree(twice.data);
    arrfree(b.data);
    rocq_close(&ctx);
    assert_int_equal(c.live, 0);
}

// ---------------------------------------------------------------------------------------------
// Sources
// ---------------------------------------------------------------------------------------------

// A file of more than 4 GiB that exists as its header and a formula.
typedef struct giant {
    blob head;
    int64_t size, read_bytes;
} giant;

static unsigned char giant_byte(int64_t offset) {
    return (unsigned char)((uint64_t)offset * 0x9e3779b97f4a7c15u >> 56);
}

static bool giant_read(void *dst, int64_t offset, int64_t size, void *user) {
    giant *g = (giant *)user;
    unsigned char *p = (unsigned char *)dst;
    assert_true(offset >= 0 && size > 0 && offset + size <= g->size);
    g->read_bytes += size;
    for (int64_t i = offset; i < offset + size; i++) {
        *p++ = i < g->head.size ? g->head.data[i] : giant_byte(i);
    }
    return true;
}

static void offsets_beyond_4_gib_work(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    giant g = {{0}, 0, 0};
    const uint64_t big[] = {1 << 20, 1100}, small[] = {3, 3},
                   huge[] = {(uint64_t)1 << 32, 1 << 10, 7};
    const uint64_t big_size = ((uint64_t)4 << 20) * 1100;
    const uint64_t huge_size = (uint64_t)7 << 43;
    put_header(&g.head, 3, 4, 0);
    put_tensor(&g.head, "big", 2, big, ROCQ_F32, 0);
    put_tensor(&g.head, "after", 2, small, ROCQ_F32, big_size);
    put_tensor(&g.head, "huge", 3, huge, ROCQ_BF16, big_size + 64);
    put_tensor(&g.head, "end", 2, small, ROCQ_F32, big_size + 64 + huge_size);
    const int64_t start = (g.head.size + 31) / 32 * 32;
    put_zeros(&g.head, start);
    g.size = start + (int64_t)(big_size + 64 + huge_size) + 36;
    const rocq_gguf_desc desc = {.size = g.size, .read = giant_read, .user = &g};
    rocq_gguf *file = NULL;
    assert_ok(rocq_gguf_open(ctx, &file, &desc));
    assert_true(g.read_bytes <= 1 << 16);
    const char *names[] = {"after", "end"};
    for (int k = 0; k < 2; k++) {
        rocq_gguf_tensor t;
        rocq_tensor loaded;
        rocq_buffer buffer;
        unsigned char data[36];
        assert_ok(rocq_gguf_find_tensor(file, names[k], &t));
        assert_true(t.offset > (int64_t)UINT32_MAX && t.size == 36);
        assert_ok(rocq_gguf_read(ctx, file, &t, data));
        for (int i = 0; i < 36; i++) assert_int_equal(data[i], giant_byte(t.offset + i));
        assert_ok(rocq_gguf_upload(ctx, file, names[k], &loaded, &buffer));
        assert_memory_equal(rocq_tensor_data(&loaded), data, 36);
        assert_ok(rocq_buffer_free(ctx, &buffer));
    }
    rocq_gguf_tensor t;
    assert_ok(rocq_gguf_find_tensor(file, "big", &t));
    assert_true(t.size == (int64_t)big_size);
    rocq_gguf_close(&file);
    g.size--; // one byte short is too short out there as well
    const rocq_gguf_desc shorter = {.size = g.size, .read = giant_read, .user = &g};
    assert_result(rocq_gguf_open(ctx, &file, &shorter), ROCQ_E_TRUNCATED);

    // The largest file there can be.
    g.head.size = 0;
    put_header(&g.head, 3, 0, 0);
    g.size = INT64_MAX;
    const rocq_gguf_desc largest = {.size = g.size, .read = giant_read, .user = &g};
    assert_ok(rocq_gguf_open(ctx, &file, &largest));
    rocq_gguf_close(&file);
    arrfree(g.head.data);
    rocq_close(&ctx);
}

// The header window starts small and grows: metadata larger than it, in one piece and in many.
static void large_headers_are_read_in_pieces(void **state) {
    (void)state;
    enum {
        LONG = 300000,
        N = 40000
    };
    rocq_ctx *ctx = open_ctx(NULL);
    blob b = {0};
    rocq_gguf_writer *writer = create_in_memory(ctx, &b, 0);
    char *text = (char *)malloc(LONG);
    rocq_str *many = (rocq_str *)malloc(N * sizeof *many);
    for (int i = 0; i < LONG; i++) text[i] = (char)('a' + i % 26);
    for (int i = 0; i < N; i++) many[i] = (rocq_str){text + i % 100, i % 17};
    const rocq_str one = {text, LONG};
    assert_ok(rocq_gguf_writer_set(writer, "one", ROCQ_GGUF_STRING, false, 1, &one));
    assert_ok(rocq_gguf_writer_set(writer, "many", ROCQ_GGUF_STRING, true, N, many));
    const int64_t ne[] = {64};
    assert_ok(rocq_gguf_writer_add_tensor(writer, "t", ROCQ_F32, 1, ne));
    float *floats = (float *)calloc(64, sizeof *floats);
    assert_ok(rocq_gguf_writer_write(writer, floats, 256));
    assert_ok(rocq_gguf_writer_close(&writer));
    assert_ok(try_open(ctx, b.data, b.size));

    rocq_gguf *file = NULL;
    rocq_gguf_value v;
    rocq_str got;
    assert_ok(open_callback(ctx, &file, &b));
    assert_ok(rocq_gguf_get_str(file, "one", &got));
    assert_int_equal(got.length, LONG);
    assert_memory_equal(got.data, text, LONG);
    assert_ok(rocq_gguf_find_value(file, "many", &v));
    const void *cursor = NULL;
    for (int i = 0; i < N; i++) {
        assert_ok(rocq_gguf_next_str(&v, &cursor, &got));
        assert_int_equal(got.length, i % 17);
        assert_memory_equal(got.data, text + i % 100, (size_t)got.length);
    }
    assert_result(rocq_gguf_next_str(&v, &cursor, &got), ROCQ_E_NOT_FOUND);
    assert_ok(rocq_gguf_value_str(&v, N - 1, &got));
    assert_int_equal(got.length, (N - 1) % 17);
    rocq_gguf_close(&file);
    free(floats);
    free(many);
    free(text);
    arrfree(b.data);
    rocq_close(&ctx);
}

static void a_source_that_fails_is_an_io_error(void **state) {
    (void)state;
    counter c;
    rocq_ctx *ctx = open_ctx(&c);
    blob b = sample_blob(ctx);
    const int64_t size = b.size, before = live_bytes(ctx);
    const rocq_gguf_desc desc = {.size = size, .read = blob_read, .user = &b};
    rocq_gguf *file = NULL;
    b.size = 10;
    assert_result(rocq_gguf_open(ctx, &file, &desc), ROCQ_E_IO);
    assert_null(file);
    assert_int_equal(live_bytes(ctx), before);
    b.size = size;
    assert_ok(rocq_gguf_open(ctx, &file, &desc));
    b.size = 10;
    rocq_gguf_tensor t;
    rocq_tensor loaded;
    rocq_buffer buffer;
    unsigned char data[512];
    memset(&loaded, 0x55, sizeof loaded);
    memset(&buffer, 0x55, sizeof buffer);
    const rocq_tensor untouched = loaded;
    const rocq_buffer none = buffer;
    const int64_t open_bytes = live_bytes(ctx);
    assert_ok(rocq_gguf_find_tensor(file, "last", &t));
    assert_result(rocq_gguf_read(ctx, file, &t, data), ROCQ_E_IO);
    assert_non_null(strstr(last_error, "'last'"));
    assert_result(rocq_gguf_upload(ctx, file, "last", &loaded, &buffer), ROCQ_E_IO);
    assert_memory_equal(&loaded, &untouched, sizeof loaded);
    assert_memory_equal(&buffer, &none, sizeof buffer);
    assert_int_equal(live_bytes(ctx), open_bytes);
    rocq_gguf_close(&file);
    arrfree(b.data);
    rocq_close(&ctx);
    assert_int_equal(c.live, 0);
}

// Characters of UTF-8 stay in messages; what would leave its place in the line does not, nor does
// what is no UTF-8.
static void messages_keep_utf8(void **state) {
    (void)state;
    static const struct { const char *name, *shown; } cases[] = {
        {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "'\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80'"},
        {"\xc2\xa0\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf",
         "'\xc2\xa0\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf'"},
        {"a\x1b\x7f\nb", "'a?\?\?b'"},
        {"a\xc2\x9b" "b\xc2\x80", "'a?\?b?\?'"},             // control characters of two bytes
        {"\xe2\x80\xa8\xe2\x80\xae\xe2\x81\xa6", "'?\?\?\?\?\?\?\?\?'"},
        {"\xc3" "a\x80\xff", "'?a?\?'"},                    // not whole; nothing begins so
        {"\xc0\xaf\xe0\x9f\xbf\xf0\x8f\xbf\xbf", "'?\?\?\?\?\?\?\?\?'"},    // overlong
        {"\xed\xa0\x80\xf4\x90\x80\x80\xf5\x80\x80\x80", "'?\?\?\?\?\?\?\?\?\?\?'"},
        {"a\xe2\x82", "'a?\?'"},
        {"0123456789012345678901234567890123456789012345678901234567890\xc3\xa9\xc3\xa9",
         "90\xc3\xa9'"},                                    // cut between characters
    };
    rocq_ctx *ctx = open_ctx(NULL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        blob b = {0};
        put_header(&b, 3, 0, 1);
        put_str(&b, cases[i].name);
        put_int(&b, 77, 4); // of no type
        put_zeros(&b, b.size + 64);
        assert_result(try_open(ctx, b.data, b.size), ROCQ_E_CORRUPT);
        if (!strstr(last_error, cases[i].shown)) fail_msg("%d: %s", (int)i, last_error);
        arrfree(b.data);
    }
    // Of a file the message has the path, a long one's end.
    static const char *const paths[] = {
        TMP "_\xc3\xa9\xe2\x82\xac.bad",
        TMP "_\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac"
            "\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac"
            "\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac"};
    for (size_t i = 0; i < 2; i++) {
        for (int extra = 0; extra < 3; extra++) { // the cut moves through a character
            rocq_gguf *file = NULL;
            char path[256], end[16];
            snprintf(path, sizeof path, "%s%.*s", paths[i], extra, "..");
            snprintf(end, sizeof end, "\xe2\x82\xac%s'", path + strlen(paths[i]) - (i ? 0 : 4));
            write_blob(path, golden, G_END - 1);
            const rocq_gguf_desc desc = {.path = path};
            assert_result(rocq_gguf_open(ctx, &file, &desc), ROCQ_E_TRUNCATED);
            if (!strstr(last_error, end) || strchr(last_error, '?')) fail_msg("%s", last_error);
            assert_true((i == 0) == (strstr(last_error, path) != NULL));
            remove(path);
        }
    }
    rocq_close(&ctx);
}

// What a file says of the files that it is split into, of the wrong type: the message names both.
static void splits_of_a_wrong_type_name_the_file(void **state) {
    (void)state;
    static const char *const keys[] = {"split.count", "split.no", "split.tensors.count"};
    static const char path[] = TMP "_\xc3\xa9.gguf";
    rocq_ctx *ctx = open_ctx(NULL);
    for (size_t i = 0; i < 3; i++) {
        rocq_gguf *file = NULL;
        blob b = {0};
        char words[128];
        put_header(&b, 3, 0, 1);
        put_str(&b, keys[i]);
        put_int(&b, ROCQ_GGUF_STRING, 4);
        put_str(&b, "two");
        put_zeros(&b, b.size + 64);
        write_blob(path, b.data, b.size);
        arrfree(b.data);
        const rocq_gguf_desc desc = {.path = path};
        assert_result(rocq_gguf_open(ctx, &file, &desc), ROCQ_E_TYPE);
        snprintf(words, sizeof words, "'%s' of '%s' does not read as i64", keys[i], path);
        if (!strstr(last_error, words)) fail_msg("%s", last_error);
        assert_string_equal(rocq_error(ctx), last_error);
        assert_null(file);
    }
    remove(path);
    rocq_close(&ctx);
}

// A tensor that two of a model's files have is found by its whole name, not by what messages show
// of it: at most 64 bytes, with marks for what would not stay in its line.
static void tensors_of_two_files_are_told_apart_by_name(void **state) {
    static const char long_name[] = "name.of.70.bytes.aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
                                    ".weights";
    static const struct {
        const char *names[2];
        rocq_result result;
    } cases[] = {{{"w", "w"}, ROCQ_E_CORRUPT}, {{"w", "v"}, ROCQ_OK},
                 {{"a\nb", "a\nb"}, ROCQ_E_CORRUPT}, {{"a?b", "a\nb"}, ROCQ_OK},
                 {{long_name, long_name}, ROCQ_E_CORRUPT}, {{"short", long_name}, ROCQ_OK}};
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char paths[2][64];
        for (int no = 0; no < 2; no++) {
            blob b = {0};
            char cut[65] = "";
            const char *name = cases[i].names[no];
            if (!strcmp(name, "short")) { // what a message shows of the long one
                memcpy(cut, long_name, 64);
                name = cut;
            }
            put_header(&b, 3, 1, 2);
            put_str(&b, "split.no");
            put_int(&b, ROCQ_GGUF_I32, 4);
            put_int(&b, (uint64_t)no, 4);
            put_str(&b, "split.count");
            put_int(&b, ROCQ_GGUF_I32, 4);
            put_int(&b, 2, 4);
            put_tensor(&b, name, 1, (const uint64_t[]){4}, ROCQ_F32, 0);
            put_zeros(&b, (b.size + 31) / 32 * 32 + 32);
            snprintf(paths[no], sizeof paths[no], TMP "-0000%d-of-00002.gguf", no + 1);
            write_blob(paths[no], b.data, b.size);
            arrfree(b.data);
        }
        rocq_gguf *file = NULL;
        const rocq_gguf_desc desc = {.path = paths[0]};
        assert_result(rocq_gguf_open(ctx, &file, &desc), cases[i].result);
        if (cases[i].result != ROCQ_OK) assert_non_null(strstr(last_error, "is in '"));
        rocq_gguf_close(&file);
        for (int no = 0; no < 2; no++) remove(paths[no]);
    }
    rocq_close(&ctx);
}

// A path is shown without its control characters by whatever refuses it, and a failure is logged
// once, also that of a second file.
static void paths_are_shown_in_one_line(void **state) {
    enum { STR = ROCQ_GGUF_STRING, I32 = ROCQ_GGUF_I32 };
    static const struct {
        const char *end;    // of the first file's name
        int type;           // of its split.count
        int32_t no, count;
        int32_t other;      // split.no of a second file; -1: there is none
        rocq_result result;
        const char *says;
    } cases[] = {
        {".gguf", STR, 0, 2, -1, ROCQ_E_TYPE, "?[1m.gguf' does not read"},
        {".gguf", I32, 0, 10000, -1, ROCQ_E_UNSUPPORTED, "?[1m.gguf' is one of 10000"},
        {".gguf", I32, 1, 2, -1, ROCQ_E_UNSUPPORTED, "?[1m.gguf' is file 2"},
        {".gguf", I32, 0, 2, -1, ROCQ_E_ARGUMENT, "?[1m.gguf' is the first of 2"},
        {"-00001-of-00002.gguf", I32, 0, 2, -1, ROCQ_E_IO,
         "gguf: file 2 of 2: gguf: cannot open '" TMP "_?[1m-00002-of-00002.gguf'"},
        {"-00001-of-00002.gguf", I32, 0, 2, 0, ROCQ_E_CORRUPT,
         "?[1m-00002-of-00002.gguf' is number"},
    };
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *const ends[2] = {cases[i].end, "-00002-of-00002.gguf"};
        char paths[2][96];
        for (int k = 0; k < 2; k++) {
            blob b = {0};
            snprintf(paths[k], sizeof paths[k], TMP "_\x1b[1m%s", ends[k]);
            if (k == 1 && cases[i].other < 0) continue;
            put_header(&b, 3, 0, 2);
            put_str(&b, "split.no");
            put_int(&b, I32, 4);
            put_int(&b, (uint64_t)(k ? cases[i].other : cases[i].no), 4);
            put_str(&b, "split.count");
            put_int(&b, (uint64_t)cases[i].type, 4);
            if (cases[i].type == STR) put_str(&b, "two");
            else put_int(&b, (uint64_t)cases[i].count, 4);
            put_zeros(&b, b.size + 64);
            write_blob(paths[k], b.data, b.size);
            arrfree(b.data);
        }
        rocq_gguf *file = NULL;
        const rocq_gguf_desc desc = {.path = paths[0]};
        n_logged = 0;
        assert_result(rocq_gguf_open(ctx, &file, &desc), cases[i].result);
        assert_int_equal(n_logged, 1);
        assert_string_equal(rocq_error(ctx), last_error);
        if (!strstr(last_error, cases[i].says)) fail_msg("%d: %s", (int)i, last_error);
        for (int k = 0; k < 2; k++) remove(paths[k]);
    }
    static const char nowhere[] = TMP "_none\x1b[1m\n/x";
    rocq_gguf *file = NULL;
    rocq_gguf_writer *writer = NULL;
    rocq_file *out = NULL;
    const rocq_gguf_desc in = {.path = nowhere};
    const rocq_gguf_writer_desc to = {.path = nowhere};
    for (int i = 0; i < 3; i++) {
        n_logged = 0;
        assert_result(i == 0   ? rocq_gguf_open(ctx, &file, &in)
                      : i == 1 ? rocq_gguf_writer_open(ctx, &writer, &to)
                               : rocq_file_open(ctx, &out, nowhere), ROCQ_E_IO);
        assert_int_equal(n_logged, 1);
        if (!strstr(last_error, "'" TMP "_none?[1m?/x'")) fail_msg("%s", last_error);
    }
    rocq_close(&ctx);
}

static void paths_that_do_not_work_say_so(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    rocq_gguf *file = NULL;
    rocq_gguf_writer *writer = NULL;
    for (int no_mmap = 0; no_mmap < 2; no_mmap++) {
        const rocq_gguf_desc missing = {.path = TMP ".none", .no_mmap = no_mmap};
        assert_result(rocq_gguf_open(ctx, &file, &missing), ROCQ_E_IO);
        assert_non_null(strstr(last_error, TMP ".none"));
        const rocq_gguf_desc folder = {.path = ".", .no_mmap = no_mmap};
        assert_result(rocq_gguf_open(ctx, &file, &folder), ROCQ_E_IO);
        write_blob(TMP ".bad", "", 0);
        const rocq_gguf_desc bad = {.path = TMP ".bad", .no_mmap = no_mmap};
        assert_result(rocq_gguf_open(ctx, &file, &bad), ROCQ_E_TRUNCATED);
        write_blob(TMP ".bad", "#!/bin/bash", 11);
        assert_result(rocq_gguf_open(ctx, &file, &bad), ROCQ_E_MAGIC);
        write_blob(TMP ".bad", golden, G_END - 1);
        assert_result(rocq_gguf_open(ctx, &file, &bad), ROCQ_E_TRUNCATED);
        write_blob(TMP ".bad", golden, G_END);
        assert_ok(rocq_gguf_open(ctx, &file, &bad));
        rocq_gguf_close(&file);
    }
    remove(TMP ".bad");
    const rocq_gguf_writer_desc nowhere = {.path = TMP ".none/file"};
    writer = (rocq_gguf_writer *)(uintptr_t)64;
    assert_result(rocq_gguf_writer_open(ctx, &writer, &nowhere), ROCQ_E_IO);
    assert_non_null(strstr(last_error, TMP ".none/file"));
    assert_null(file);
    assert_null(writer);
    rocq_close(&ctx);
}

static void upload_is_a_view_where_it_can_be(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    blob b = sample_blob(ctx);
    // At shift 0 all data is aligned; at 1 only the formats made of bytes are.
    for (int shift = 0; shift < 3; shift++) {
        unsigned char *copy = (unsigned char *)malloc((size_t)(b.size + shift));
        memcpy(copy + shift, b.data, (size_t)b.size);
        const rocq_gguf_desc desc = {.data = copy + shift, .size = b.size};
        rocq_gguf *file = NULL;
        assert_ok(rocq_gguf_open(ctx, &file, &desc));
        for (int i = 0; i < N_SAMPLE_TENSORS; i++) {
            const rocq_format f = sample_tensors[i].format;
            const int align = f == ROCQ_F32 || f == ROCQ_I32            ? 4
                              : f == ROCQ_MXFP4 || f == ROCQ_MXFP6_E2M3 ? 1
                                                                        : 2;
            rocq_gguf_tensor t;
            rocq_tensor loaded;
            rocq_buffer buffer;
            unsigned char expected[512];
            assert_ok(rocq_gguf_tensor_at(file, i, &t));
            assert_ok(rocq_gguf_upload(ctx, file, sample_tensors[i].name, &loaded, &buffer));
            sample_data(i, expected, t.size);
            assert_int_equal(rocq_tensor_size(&loaded), t.size);
            assert_int_equal(loaded.n_dims, t.n_dims);
            assert_memory_equal(loaded.ne, t.ne, sizeof t.ne);
            assert_true(loaded.format == f && rocq_tensor_contiguous(&loaded));
            assert_memory_equal(rocq_tensor_data(&loaded), expected, (size_t)t.size);
            const bool view = rocq_tensor_data(&loaded) == (void *)(copy + shift + t.offset);
            assert_int_equal(view, shift % align == 0);
            assert_int_equal(buffer.size, view ? 0 : t.size);
            assert_ok(rocq_buffer_free(ctx, &buffer));
        }
        rocq_gguf_close(&file);
        free(copy);
    }
    arrfree(b.data);
    rocq_close(&ctx);
}

// ---------------------------------------------------------------------------------------------
// Writer
// ---------------------------------------------------------------------------------------------

static void writer_refuses_what_it_should(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    blob b = {0};
    rocq_gguf_writer *writer = NULL;
    const rocq_gguf_writer_desc none = {0}, both = {.path = "x", .write = blob_write},
                                good = {.write = blob_write, .user = &b};
    const rocq_gguf_writer_desc *const wrong[] = {NULL, &none, &both, &good};
    assert_result(rocq_gguf_writer_open(ctx, NULL, &good), ROCQ_E_ARGUMENT);
    for (int k = 0; k < 4; k++) { // the last one without a context
        writer = (rocq_gguf_writer *)(uintptr_t)64;
        assert_result(rocq_gguf_writer_open(k < 3 ? ctx : NULL, &writer, wrong[k]),
                      ROCQ_E_ARGUMENT);
        assert_null(writer);
    }
    const int32_t bad_alignments[] = {1, 4, 7, 24, -32, INT32_MIN, 1 << 21};
    for (size_t k = 0; k < sizeof bad_alignments / sizeof *bad_alignments; k++) {
        const rocq_gguf_writer_desc bad = {
            .write = blob_write, .user = &b, .alignment = bad_alignments[k]};
        writer = (rocq_gguf_writer *)(uintptr_t)64;
        assert_result(rocq_gguf_writer_open(ctx, &writer, &bad), ROCQ_E_ARGUMENT);
    }
    assert_null(writer);
    assert_result(rocq_gguf_writer_close(NULL), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_close(&writer), ROCQ_E_ARGUMENT);

    writer = create_in_memory(ctx, &b, 0);
    const int64_t ne[] = {32, 1, 1, 1, 1}, zero[] = {0}, large[] = {INT64_MAX / 4 * 4, 1};
    const uint8_t two = 2;
    const rocq_str bad_str[] = {
        {"x", -1}, {NULL, 1}, {"x", INT64_MAX}, {"y", INT64_MAX}, {"x", INT64_MAX - 20}};
    char key[65537];
    memset(key, 'k', sizeof key - 1);
    key[65536] = 0;
    assert_result(rocq_gguf_writer_set(NULL, "k", ROCQ_GGUF_U8, false, 1, u8s), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_set(writer, NULL, ROCQ_GGUF_U8, false, 1, u8s), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_set(writer, "", ROCQ_GGUF_U8, false, 1, u8s), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_set(writer, key, ROCQ_GGUF_U8, false, 1, u8s), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_set(writer, "k", ROCQ_GGUF_U8, false, 2, u8s), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_set(writer, "k", ROCQ_GGUF_U8, false, 0, u8s), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_set(writer, "k", ROCQ_GGUF_U8, true, -1, u8s), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_set(writer, "k", ROCQ_GGUF_U8, true, 1, NULL), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_set(writer, "k", ROCQ_GGUF_ARRAY, true, 1, u8s),
                  ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_set(writer, "k", (rocq_gguf_type)13, true, 1, u8s),
                  ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_set(writer, "k", ROCQ_GGUF_BOOL, false, 1, &two),
                  ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_set(writer, "k", ROCQ_GGUF_STRING, false, 1, &bad_str[0]),
                  ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_set(writer, "k", ROCQ_GGUF_STRING, false, 1, &bad_str[1]),
                  ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_set(writer, "k", ROCQ_GGUF_STRING, true, 2, &bad_str[2]),
                  ROCQ_E_OVERFLOW);
    assert_result(rocq_gguf_writer_set(writer, "k", ROCQ_GGUF_STRING, false, 1, &bad_str[4]),
                  ROCQ_E_OVERFLOW);
    assert_result(rocq_gguf_writer_set(writer, "k", ROCQ_GGUF_U64, true, INT64_MAX / 4, u64s),
                  ROCQ_E_OVERFLOW);
    assert_result(rocq_gguf_writer_set(writer, "general.alignment", ROCQ_GGUF_U32, false, 1, u32s),
                  ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_set_str(writer, "k", NULL), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_set_from(writer, NULL), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_add_tensor(NULL, "t", ROCQ_F32, 1, ne), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_add_tensor(writer, NULL, ROCQ_F32, 1, ne), ROCQ_E_ARGUMENT);
    key[64] = 0;
    assert_result(rocq_gguf_writer_add_tensor(writer, key, ROCQ_F32, 1, ne), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_add_tensor(writer, "t", (rocq_format)4, 1, ne), ROCQ_E_FORMAT);
    assert_result(rocq_gguf_writer_add_tensor(writer, "t", ROCQ_F32, 0, ne), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_add_tensor(writer, "t", ROCQ_F32, 5, ne), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_add_tensor(writer, "t", ROCQ_F32, 1, NULL), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_add_tensor(writer, "t", ROCQ_F32, 1, zero), ROCQ_E_SHAPE);
    assert_result(rocq_gguf_writer_add_tensor(writer, "t", ROCQ_Q4_K, 1, ne), ROCQ_E_SHAPE);
    assert_result(rocq_gguf_writer_add_tensor(writer, "t", ROCQ_F32, 2, large), ROCQ_E_OVERFLOW);
    assert_int_equal(b.size, 0);
    const int64_t half[] = {(int64_t)1 << 61};
    assert_ok(rocq_gguf_writer_add_tensor(writer, "half", ROCQ_F16, 1, half));
    assert_result(rocq_gguf_writer_add_tensor(writer, "too", ROCQ_F16, 1, half), ROCQ_E_OVERFLOW);
    assert_result(rocq_gguf_writer_add_tensor(writer, "half", ROCQ_F32, 1, ne), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_close(&writer), ROCQ_E_STATE); // one is missing
    assert_null(writer);

    writer = create_in_memory(ctx, &b, 0);
    key[63] = 0;
    float floats[32] = {0};
    assert_ok(rocq_gguf_writer_add_tensor(writer, key, ROCQ_F32, 1, ne));
    assert_ok(rocq_gguf_writer_add_tensor(writer, "second", ROCQ_F32, 1, ne));
    assert_result(rocq_gguf_writer_write(NULL, floats, 128), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_write(writer, NULL, 128), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_write(writer, floats, 127), ROCQ_E_ARGUMENT);
    assert_result(rocq_gguf_writer_write(writer, floats, -1), ROCQ_E_ARGUMENT);
    assert_int_equal(b.size, 0);
    assert_ok(rocq_gguf_writer_write(writer, floats, 128));
    assert_result(rocq_gguf_writer_set_u32(writer, "late", 1), ROCQ_E_STATE);
    assert_result(rocq_gguf_writer_add_tensor(writer, "late", ROCQ_F32, 1, ne), ROCQ_E_STATE);
    rocq_gguf *file = NULL;
    unsigned char *copy;
    assert_ok(open_span(ctx, &file, golden, sizeof golden, &copy));
    assert_result(rocq_gguf_writer_set_from(writer, file), ROCQ_E_STATE);
    rocq_gguf_close(&file);
    free(copy);
    assert_ok(rocq_gguf_writer_write(writer, floats, 128));
    assert_result(rocq_gguf_writer_write(writer, floats, 128), ROCQ_E_STATE);
    assert_ok(rocq_gguf_writer_close(&writer));
    assert_ok(try_open(ctx, b.data, b.size));
    arrfree(b.data);
    rocq_close(&ctx);
}

static void keys_keep_their_place_and_copies_are_equal(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    blob source = {0}, b = {0};
    rocq_gguf_writer *writer = create_in_memory(ctx, &source, 64);
    assert_ok(rocq_gguf_writer_set_u32(writer, "first", 1));
    assert_ok(rocq_gguf_writer_set_str(writer, "second", "two"));
    assert_ok(rocq_gguf_writer_set(writer, "third", ROCQ_GGUF_STRING, true, 3, strings));
    assert_ok(rocq_gguf_writer_close(&writer));
    rocq_gguf *file = NULL;
    unsigned char *copy;
    uint64_t u64;
    assert_ok(open_span(ctx, &file, source.data, source.size, &copy));
    assert_ok(rocq_gguf_get_u64(file, "general.alignment", &u64));
    assert_int_equal(u64, 64);

    writer = create_in_memory(ctx, &b, 128);
    assert_ok(rocq_gguf_writer_set_bool(writer, "before", true));
    assert_ok(rocq_gguf_writer_set_f32(writer, "second", 0.5f)); // replaced, in place
    assert_ok(rocq_gguf_writer_set_from(writer, file));
    assert_ok(rocq_gguf_writer_set_u32(writer, "first", 11));
    assert_ok(rocq_gguf_writer_set_u32(writer, "last", 12));
    rocq_gguf_close(&file);
    free(copy); // the writer holds copies
    assert_ok(rocq_gguf_writer_close(&writer));

    assert_ok(open_span(ctx, &file, b.data, b.size, &copy));
    static const char *const keys[] = {
        "general.alignment", "before", "second", "first", "third", "last"};
    assert_int_equal(rocq_gguf_value_count(file), 6);
    for (int i = 0; i < 6; i++) {
        rocq_gguf_value v;
        assert_ok(rocq_gguf_value_at(file, i, &v));
        assert_int_equal(v.key.length, strlen(keys[i]));
        assert_memory_equal(v.key.data, keys[i], strlen(keys[i]));
    }
    rocq_str text;
    bool flag = false;
    assert_ok(rocq_gguf_get_u64(file, "general.alignment", &u64));
    assert_int_equal(u64, 128);
    assert_ok(rocq_gguf_get_u64(file, "first", &u64));
    assert_int_equal(u64, 11);
    assert_ok(rocq_gguf_get_bool(file, "before", &flag));
    assert_true(flag);
    assert_ok(rocq_gguf_get_str(file, "second", &text));
    assert_true(text.length == 3 && memcmp(text.data, "two", 3) == 0);
    rocq_gguf_close(&file);
    free(copy);
    arrfree(source.data);
    arrfree(b.data);
    rocq_close(&ctx);
}

static void data_is_padded_to_the_alignment(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    const int32_t alignments[] = {8, 16, 32, 64, 4096, 1 << 20};
    for (size_t k = 0; k < sizeof alignments / sizeof *alignments; k++) {
        blob b = {0};
        rocq_gguf_writer *writer = create_in_memory(ctx, &b, alignments[k]);
        assert_ok(sample_write(&writer));
        assert_int_equal(b.size % alignments[k], 0);
        rocq_gguf *file = NULL;
        assert_ok(open_callback(ctx, &file, &b));
        for (int i = 0; i < N_SAMPLE_TENSORS; i++) {
            rocq_gguf_tensor t;
            unsigned char expected[512];
            assert_ok(rocq_gguf_tensor_at(file, i, &t));
            assert_int_equal(t.offset % alignments[k], 0);
            sample_data(i, expected, t.size);
            assert_memory_equal(b.data + t.offset, expected, (size_t)t.size);
            for (int64_t p = t.offset + t.size; p % alignments[k] != 0; p++)
                assert_int_equal(b.data[p], 0);
        }
        rocq_gguf_close(&file);
        arrfree(b.data);
    }
    rocq_close(&ctx);
}

static void a_sink_that_fails_is_an_io_error(void **state) {
    (void)state;
    counter c;
    rocq_ctx *ctx = open_ctx(&c);
    blob whole = sample_blob(ctx);
    for (int64_t limit = 1; limit < whole.size; limit += limit < 100 ? 1 : 13) {
        blob b = {.limit = limit};
        rocq_gguf_writer *writer = create_in_memory(ctx, &b, 0);
        assert_result(sample_write(&writer), ROCQ_E_IO);
        assert_null(writer);
        assert_true(b.size <= limit &&
                    memcmp(b.data ? b.data : whole.data, whole.data, (size_t)b.size) == 0);
        arrfree(b.data);
    }
    // After a failed write nothing more is taken, and finish repeats the failure.
    blob b = {.limit = 200};
    rocq_gguf_writer *writer = create_in_memory(ctx, &b, 0);
    const int64_t ne[] = {32};
    float floats[32] = {0};
    assert_ok(rocq_gguf_writer_add_tensor(writer, "a", ROCQ_F32, 1, ne));
    assert_ok(rocq_gguf_writer_add_tensor(writer, "b", ROCQ_F32, 1, ne));
    assert_result(rocq_gguf_writer_write(writer, floats, 128), ROCQ_E_IO);
    b.limit = 0;
    assert_result(rocq_gguf_writer_write(writer, floats, 128), ROCQ_E_STATE);
    assert_result(rocq_gguf_writer_close(&writer), ROCQ_E_IO);
    assert_null(writer);
    arrfree(b.data);
    arrfree(whole.data);
#if defined(__linux__)
    // A full disk shows when the C library's buffer is flushed, at the latest in finish.
    const rocq_gguf_writer_desc full = {.path = "/dev/full"};
    if (rocq_gguf_writer_open(ctx, &writer, &full) == ROCQ_OK) {
        assert_ok(rocq_gguf_writer_set_u32(writer, "k", 1));
        assert_result(rocq_gguf_writer_close(&writer), ROCQ_E_IO);
        assert_null(writer);
    }
    // More than that buffer holds fails in write, which names the file and the system's reason.
    static const float many[1 << 18] = {0};
    const int64_t n_many[1] = {1 << 18};
    if (rocq_gguf_writer_open(ctx, &writer, &full) == ROCQ_OK) {
        assert_ok(rocq_gguf_writer_add_tensor(writer, "w", ROCQ_F32, 1, n_many));
        assert_result(rocq_gguf_writer_write(writer, many, (int64_t)sizeof many), ROCQ_E_IO);
        assert_string_equal(rocq_error(ctx), "cannot write '/dev/full': No space left on device");
        assert_result(rocq_gguf_writer_close(&writer), ROCQ_E_IO);
    }
#endif
    rocq_close(&ctx);
    assert_int_equal(c.live, 0);
}

// ---------------------------------------------------------------------------------------------
// Files written whole (rocq_file; tests/outputs has the rest, from outside)
// ---------------------------------------------------------------------------------------------

#define WHOLE TMP ".whole"

static void holds(const char *path, const char *text) {
    char got[64] = {0};
    FILE *in = fopen(path, "rb");
    assert_non_null(in);
    fread(got, 1, sizeof got - 1, in);
    fclose(in);
    assert_string_equal(got, text);
}

static bool exists(const char *path) {
    FILE *in = fopen(path, "rb");
    if (in) fclose(in);
    return in != NULL;
}

static void a_file_is_put_there_whole_or_not_at_all(void **state) {
    (void)state;
    counter c;
    rocq_ctx *ctx = open_ctx(&c);
    const int64_t before = live_bytes(ctx);
    rocq_file *file = NULL, *other = NULL;
    write_blob(WHOLE, "old", 3);
    write_blob(WHOLE ".part", "of someone else", 15);
    assert_ok(rocq_file_open(ctx, &file, WHOLE));
    assert_ok(rocq_file_open(ctx, &other, WHOLE)); // two at once
    assert_true(exists(WHOLE ".part1") && exists(WHOLE ".part2"));
    assert_true(rocq_file_write("ne", 2, file) && rocq_file_write("", 0, file));
    assert_true(rocq_file_write("w", 1, file) && rocq_file_write("other", 5, other));
    holds(WHOLE, "old");
    assert_ok(rocq_file_close(&file, true));
    assert_null(file);
    holds(WHOLE, "new");
    assert_ok(rocq_file_close(&other, false)); // given up
    holds(WHOLE, "new");
    assert_ok(rocq_file_open(ctx, &file, WHOLE));
    assert_false(rocq_file_write("lost", -1, file) || rocq_file_write("lost", 4, file));
    assert_result(rocq_file_close(&file, true), ROCQ_E_IO); // a write failed
    assert_ok(rocq_file_open(ctx, &file, WHOLE));
    assert_true(rocq_file_write("lost", 4, file));
    remove(WHOLE ".part1");
    assert_result(rocq_file_close(&file, true), ROCQ_E_IO); // its part has gone
    assert_non_null(strstr(last_error, WHOLE "'"));
    assert_null(file);
    holds(WHOLE, "new");
    holds(WHOLE ".part", "of someone else");
    assert_false(exists(WHOLE ".part1") || exists(WHOLE ".part2"));

    assert_result(rocq_file_open(NULL, &file, WHOLE), ROCQ_E_ARGUMENT);
    assert_result(rocq_file_open(ctx, NULL, WHOLE), ROCQ_E_ARGUMENT);
    assert_result(rocq_file_open(ctx, &file, NULL), ROCQ_E_ARGUMENT);
    const char *const bad[] = {"", "tests", "tests/", TMP ".none/file", "rocq.h/file"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_result(rocq_file_open(ctx, &file, bad[i]), ROCQ_E_IO);
        assert_non_null(strstr(last_error, bad[i]));
        assert_null(file);
    }
    assert_result(rocq_file_close(NULL, true), ROCQ_E_ARGUMENT);
    assert_result(rocq_file_close(&file, true), ROCQ_E_ARGUMENT);
    assert_false(rocq_file_write("x", 1, NULL));
    remove(WHOLE);
    remove(WHOLE ".part");
    assert_int_equal(live_bytes(ctx), before);
    rocq_close(&ctx);
    assert_int_equal(c.live, 0);
}

// The writer's path may be that of a file which is open and mapped; a model that is not whole does
// not take its place.
static void a_model_can_replace_itself(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    blob b = sample_blob(ctx);
    const rocq_gguf_desc source = {.path = WHOLE};
    const rocq_gguf_writer_desc target = {.path = WHOLE};
    write_blob(WHOLE, b.data, b.size);
    for (int whole = 0; whole < 2; whole++) {
        rocq_gguf *file = NULL;
        rocq_gguf_writer *writer = NULL;
        rocq_gguf_tensor t;
        assert_ok(rocq_gguf_open(ctx, &file, &source));
        assert_ok(rocq_gguf_writer_open(ctx, &writer, &target));
        assert_ok(rocq_gguf_writer_set_from(writer, file));
        assert_ok(rocq_gguf_writer_set_bool(writer, "written.again", whole != 0));
        assert_ok(rocq_gguf_tensor_at(file, 0, &t));
        unsigned char *data = (unsigned char *)malloc((size_t)t.size);
        assert_non_null(data);
        assert_ok(rocq_gguf_writer_add_tensor(writer, "again", t.format, t.n_dims, t.ne));
        assert_ok(rocq_gguf_read(ctx, file, &t, data));
        if (whole) assert_ok(rocq_gguf_writer_write(writer, data, t.size));
        check_sample(ctx, file); // still all there
        assert_result(rocq_gguf_writer_close(&writer), whole ? ROCQ_OK : ROCQ_E_STATE);
        check_sample(ctx, file); // what is open stays the old file
        rocq_gguf_close(&file);
        assert_ok(rocq_gguf_open(ctx, &file, &source));
        if (whole) assert_ok(rocq_gguf_find_tensor(file, "again", &t));
        else check_sample(ctx, file);
        rocq_gguf_close(&file);
        assert_false(exists(WHOLE ".part"));
        free(data);
    }
    remove(WHOLE);
    arrfree(b.data);
    rocq_close(&ctx);
}

// ---------------------------------------------------------------------------------------------
// Memory
// ---------------------------------------------------------------------------------------------

typedef rocq_result (*scenario)(rocq_ctx *ctx, blob *b);

static rocq_result scenario_open(rocq_ctx *ctx, blob *b) { // header window grows on the way
    rocq_gguf *file = NULL;
    rocq_tensor loaded;
    rocq_buffer buffer;
    rocq_result result = open_callback(ctx, &file, b);
    if (result == ROCQ_OK) result = note(rocq_gguf_upload(ctx, file, "last", &loaded, &buffer));
    if (result == ROCQ_OK) result = rocq_buffer_free(ctx, &buffer);
    rocq_gguf_close(&file);
    return result;
}

static rocq_result scenario_open_path(rocq_ctx *ctx, blob *b) {
    (void)b;
    rocq_gguf *file = NULL;
    const rocq_gguf_desc desc = {.path = TMP ".memory"};
    const rocq_result result = note(rocq_gguf_open(ctx, &file, &desc));
    rocq_gguf_close(&file);
    return result;
}

static rocq_result scenario_write(rocq_ctx *ctx, blob *b) {
    (void)b;
    blob out = {0};
    rocq_gguf_writer *writer = NULL;
    const rocq_gguf_writer_desc desc = {.write = blob_write, .user = &out, .alignment = 64};
    rocq_result result = note(rocq_gguf_writer_open(ctx, &writer, &desc));
    if (result == ROCQ_OK) result = note(sample_write(&writer));
    assert_null(writer);
    arrfree(out.data);
    return result;
}

static rocq_result scenario_write_path(rocq_ctx *ctx, blob *b) {
    rocq_gguf_writer *writer = NULL;
    const rocq_gguf_writer_desc desc = {.path = WHOLE};
    (void)b;
    rocq_result result = note(rocq_gguf_writer_open(ctx, &writer, &desc));
    if (result == ROCQ_OK) result = note(sample_write(&writer));
    assert_null(writer);
    assert_true(exists(WHOLE) == (result == ROCQ_OK));
    assert_false(exists(WHOLE ".part"));
    remove(WHOLE);
    return result;
}

static rocq_result scenario_copy(rocq_ctx *ctx, blob *b) {
    blob out = {0};
    rocq_gguf *file = NULL;
    rocq_gguf_writer *writer = NULL;
    const rocq_gguf_writer_desc desc = {.write = blob_write, .user = &out};
    rocq_result result = open_callback(ctx, &file, b), end;
    if (result == ROCQ_OK) result = note(rocq_gguf_writer_open(ctx, &writer, &desc));
    if (result == ROCQ_OK) {
        result = rocq_gguf_writer_set_u32(writer, "sample.u8_0", 1);
        if (result == ROCQ_OK) {
            result = rocq_gguf_writer_set_from(writer, file);
            if (result != ROCQ_OK) assert_int_equal(writer->values.count, 1); // as it was
        }
        end = rocq_gguf_writer_close(&writer);
        if (result == ROCQ_OK) result = end;
    }
    rocq_gguf_close(&file);
    arrfree(out.data);
    return result;
}

static void every_allocation_can_fail(void **state) {
    (void)state;
    counter c;
    rocq_ctx *ctx = open_ctx(NULL);
    blob b = {0};
    char *text = (char *)calloc(1, 100000);
    const rocq_str one = {text, 100000};
    rocq_gguf_writer *writer = create_in_memory(ctx, &b, 0);
    assert_ok(rocq_gguf_writer_set(writer, "long", ROCQ_GGUF_STRING, false, 1, &one));
    assert_ok(sample_write(&writer));
    free(text);
    write_blob(TMP ".memory", b.data, b.size);
    rocq_close(&ctx);
    static const scenario scenarios[] = {scenario_open, scenario_open_path, scenario_write,
                                         scenario_write_path, scenario_copy};
    for (size_t k = 0; k < sizeof scenarios / sizeof *scenarios; k++) {
        int64_t n = 0;
        for (bool done = false; !done; n++) {
            ctx = open_ctx(&c);
            const int64_t before = c.live, bytes = live_bytes(ctx);
            c.fail_at = c.n + n;
            const rocq_result result = scenarios[k](ctx, &b);
            done = c.n <= c.fail_at; // it never got that far
            assert_result(result, done ? ROCQ_OK : ROCQ_E_MEMORY);
            assert_int_equal(c.live, before);
            assert_int_equal(live_bytes(ctx), bytes);
            rocq_close(&ctx);
            assert_int_equal(c.live, 0);
        }
        assert_true(n > 4); // there were allocations to fail
    }
    remove(TMP ".memory");
    arrfree(b.data);
}

// ---------------------------------------------------------------------------------------------
// ggml's own reader and writer
// ---------------------------------------------------------------------------------------------

typedef struct ggml_init {
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
} ggml_init;

typedef struct gguf_init {
    bool no_alloc;
    void **ctx;
} gguf_init;

static struct {
    void *(*init_from_file)(const char *path, gguf_init params);
    void *(*init_empty)(void);
    void (*free)(void *file);
    uint32_t (*version)(const void *file);
    size_t (*alignment)(const void *file);
    size_t (*data_offset)(const void *file);
    int64_t (*n_kv)(const void *file);
    int64_t (*find_key)(const void *file, const char *key);
    const char *(*key)(const void *file, int64_t i);
    int (*kv_type)(const void *file, int64_t i);
    int (*arr_type)(const void *file, int64_t i);
    size_t (*arr_n)(const void *file, int64_t i);
    const void *(*arr_data)(const void *file, int64_t i);
    const char *(*arr_str)(const void *file, int64_t i, size_t k);
    const char *(*val_str)(const void *file, int64_t i);
    const void *(*val_data)(const void *file, int64_t i);
    int64_t (*n_tensors)(const void *file);
    int64_t (*find_tensor)(const void *file, const char *name);
    const char *(*tensor_name)(const void *file, int64_t i);
    int (*tensor_type)(const void *file, int64_t i);
    size_t (*tensor_size)(const void *file, int64_t i);
    size_t (*tensor_offset)(const void *file, int64_t i);
    void (*set_u32)(void *file, const char *key, uint32_t value);
    void (*set_i8)(void *file, const char *key, int8_t value);
    void (*set_f64)(void *file, const char *key, double value);
    void (*set_bool)(void *file, const char *key, bool value);
    void (*set_str)(void *file, const char *key, const char *value);
    void (*set_arr)(void *file, const char *key, int type, const void *data, size_t n);
    void (*set_arr_str)(void *file, const char *key, const char **data, size_t n);
    void (*add_tensor)(void *file, const void *tensor);
    bool (*write)(const void *file, const char *path, bool only_meta);
    void *(*ggml_init)(ggml_init params);
    void (*ggml_free)(void *ctx);
    void *(*new_tensor)(void *ctx, int type, int n_dims, const int64_t *ne);
    void *(*set_name)(void *tensor, const char *name);
    void *(*get_data)(const void *tensor);
    void *(*get_tensor)(void *ctx, const char *name);
    const char *(*type_name)(int type);
} ggml;

static bool load_ggml(void) {
#if defined(_WIN32)
    return false;
#else
    static const struct {
        void **slot;
        const char *name;
    } symbols[] = {{(void **)&ggml.init_from_file, "gguf_init_from_file"},
                   {(void **)&ggml.init_empty, "gguf_init_empty"},
                   {(void **)&ggml.free, "gguf_free"},
                   {(void **)&ggml.version, "gguf_get_version"},
                   {(void **)&ggml.alignment, "gguf_get_alignment"},
                   {(void **)&ggml.data_offset, "gguf_get_data_offset"},
                   {(void **)&ggml.n_kv, "gguf_get_n_kv"},
                   {(void **)&ggml.find_key, "gguf_find_key"},
                   {(void **)&ggml.key, "gguf_get_key"},
                   {(void **)&ggml.kv_type, "gguf_get_kv_type"},
                   {(void **)&ggml.arr_type, "gguf_get_arr_type"},
                   {(void **)&ggml.arr_n, "gguf_get_arr_n"},
                   {(void **)&ggml.arr_data, "gguf_get_arr_data"},
                   {(void **)&ggml.arr_str, "gguf_get_arr_str"},
                   {(void **)&ggml.val_str, "gguf_get_val_str"},
                   {(void **)&ggml.val_data, "gguf_get_val_data"},
                   {(void **)&ggml.n_tensors, "gguf_get_n_tensors"},
                   {(void **)&ggml.find_tensor, "gguf_find_tensor"},
                   {(void **)&ggml.tensor_name, "gguf_get_tensor_name"},
                   {(void **)&ggml.tensor_type, "gguf_get_tensor_type"},
                   {(void **)&ggml.tensor_size, "gguf_get_tensor_size"},
                   {(void **)&ggml.tensor_offset, "gguf_get_tensor_offset"},
                   {(void **)&ggml.set_u32, "gguf_set_val_u32"},
                   {(void **)&ggml.set_i8, "gguf_set_val_i8"},
                   {(void **)&ggml.set_f64, "gguf_set_val_f64"},
                   {(void **)&ggml.set_bool, "gguf_set_val_bool"},
                   {(void **)&ggml.set_str, "gguf_set_val_str"},
                   {(void **)&ggml.set_arr, "gguf_set_arr_data"},
                   {(void **)&ggml.set_arr_str, "gguf_set_arr_str"},
                   {(void **)&ggml.add_tensor, "gguf_add_tensor"},
                   {(void **)&ggml.write, "gguf_write_to_file"},
                   {(void **)&ggml.ggml_init, "ggml_init"},
                   {(void **)&ggml.ggml_free, "ggml_free"},
                   {(void **)&ggml.new_tensor, "ggml_new_tensor"},
                   {(void **)&ggml.set_name, "ggml_set_name"},
                   {(void **)&ggml.get_data, "ggml_get_data"},
                   {(void **)&ggml.get_tensor, "ggml_get_tensor"},
                   {(void **)&ggml.type_name, "ggml_type_name"}};
    const char *dir = getenv("ROCQ_GGML_DIR");
    if (!dir || !dir[0]) return false;
    char path[4096];
    snprintf(path, sizeof path, "%s/libggml-base.so", dir);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) fail_msg("ROCQ_GGML_DIR is set, but: %s", dlerror());
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *symbol = dlsym(library, symbols[i].name);
        if (!symbol) fail_msg("libggml-base.so has no %s", symbols[i].name);
        memcpy(symbols[i].slot, &symbol, sizeof symbol);
    }
    return true;
#endif
}

// Everything that both readers say about one file must be the same.
static void compare_with_ggml(rocq_ctx *ctx, const char *path) {
    rocq_gguf *file = NULL;
    const rocq_gguf_desc desc = {.path = path};
    assert_ok(rocq_gguf_open(ctx, &file, &desc));
    void *tensors = NULL;
    void *peer = ggml.init_from_file(path, (gguf_init){.no_alloc = false, .ctx = &tensors});
    assert_non_null(peer);
    assert_int_equal(ggml.version(peer), rocq_gguf_version(file));
    assert_int_equal(ggml.n_kv(peer), rocq_gguf_value_count(file));
    for (int64_t i = 0; i < rocq_gguf_value_count(file); i++) {
        rocq_gguf_value v;
        char name[256];
        assert_ok(rocq_gguf_value_at(file, i, &v));
        assert_true(walk_name(name, v.key));
        assert_string_equal(ggml.key(peer, i), name);
        assert_int_equal(ggml.find_key(peer, name), i);
        assert_int_equal(ggml.kv_type(peer, i), v.is_array ? ROCQ_GGUF_ARRAY : v.type);
        if (v.is_array) assert_int_equal(ggml.arr_type(peer, i), v.type);
        if (v.is_array) assert_int_equal(ggml.arr_n(peer, i), v.count);
        for (int64_t k = 0; k < v.count; k++) {
            if (v.type == ROCQ_GGUF_STRING) { // a C string over there: up to its first zero
                rocq_str text;
                const char *s =
                    v.is_array ? ggml.arr_str(peer, i, (size_t)k) : ggml.val_str(peer, i);
                assert_ok(rocq_gguf_value_str(&v, k, &text));
                assert_true((int64_t)strlen(s) <= text.length);
                assert_memory_equal(s, text.data, strlen(s));
            } else {
                const int64_t size = rocq__gguf_type_size(v.type);
                const void *data = v.is_array ? ggml.arr_data(peer, i) : ggml.val_data(peer, i);
                assert_memory_equal((const char *)data + k * size, (const char *)v.data + k * size,
                                    (size_t)size);
            }
        }
    }
    assert_int_equal(ggml.n_tensors(peer), rocq_gguf_tensor_count(file));
    for (int64_t i = 0; i < rocq_gguf_tensor_count(file); i++) {
        rocq_gguf_tensor t;
        rocq_tensor loaded;
        rocq_buffer buffer;
        char name[256];
        assert_ok(rocq_gguf_tensor_at(file, i, &t));
        assert_true(walk_name(name, t.name));
        assert_string_equal(ggml.tensor_name(peer, i), name);
        assert_int_equal(ggml.find_tensor(peer, name), i);
        assert_int_equal(ggml.tensor_type(peer, i), t.type_id);
        assert_int_equal(ggml.tensor_size(peer, i), t.size);
        assert_int_equal(ggml.data_offset(peer) + ggml.tensor_offset(peer, i), t.offset);
        void *tensor = ggml.get_tensor(tensors, name);
        assert_non_null(tensor);
        assert_ok(rocq_gguf_upload(ctx, file, name, &loaded, &buffer));
        assert_memory_equal(ggml.get_data(tensor), rocq_tensor_data(&loaded), (size_t)t.size);
    }
    ggml.ggml_free(tensors);
    ggml.free(peer);
    rocq_gguf_close(&file);
}

// Every type of tensor that ggml has or had is named, in the directory and where it cannot be read.
// Of types it has given up ggml keeps the name within a sentence, or, of 4 and 5, no name.
static void types_are_named(void **state) {
    (void)state;
    enum { N_TYPES = 42 };
    rocq_ctx *ctx = open_ctx(NULL);
    const bool compared = load_ggml();
    for (uint32_t id = 0; id < N_TYPES + 2; id++) {
        blob b = {0};
        const uint64_t ne[] = {256, 1, 1, 1};
        const uint32_t type = id == N_TYPES + 1 ? UINT32_MAX : id;
        rocq_gguf *file = NULL;
        rocq_gguf_tensor t;
        rocq_tensor loaded;
        rocq_buffer buffer;
        put_header(&b, 3, 1, 0);
        put_tensor(&b, "t", 1, ne, type, 0);
        put_zeros(&b, b.size + 64 + 256 * 8);
        assert_ok(open_callback(ctx, &file, &b));
        assert_ok(rocq_gguf_find_tensor(file, "t", &t));
        assert_int_equal(t.type_id, type);
        if (compared && id < N_TYPES && id != 4 && id != 5) {
            char name[64] = {0}, theirs[128] = {0};
            for (int i = 0; t.type_name[i]; i++) name[i] = (char)toupper(t.type_name[i]);
            for (int i = 0; i < 127 && ggml.type_name((int)id)[i]; i++) {
                theirs[i] = (char)toupper(ggml.type_name((int)id)[i]);
            }
            if (strstr(theirs, "REMOVED")) assert_non_null(strstr(theirs, name));
            else assert_string_equal(name, theirs);
        }
        if (id == 4 || id == 5) assert_string_equal(t.type_name, id == 4 ? "Q4_2" : "Q4_3");
        if (id >= N_TYPES) assert_string_equal(t.type_name, "unknown");
        if (t.known) {
            assert_string_equal(t.type_name, rocq_format_name(t.format));
        } else {
            assert_result(rocq_gguf_upload(ctx, file, "t", &loaded, &buffer), ROCQ_E_FORMAT);
            assert_non_null(strstr(rocq_error(ctx), t.type_name));
            unsigned char byte;
            assert_result(rocq_gguf_read(ctx, file, &t, &byte), ROCQ_E_FORMAT);
            char message[128]; // what is there, and the beginning and the end of what may be
            snprintf(message, sizeof message, "has the type %s (id %u), expected one of I8 I32 F32",
                     t.type_name, (unsigned)t.type_id);
            assert_non_null(strstr(rocq_error(ctx), message));
            assert_non_null(strstr(rocq_error(ctx), " MXFP6_E3M2"));
        }
        rocq_gguf_close(&file);
        arrfree(b.data);
    }
    rocq_close(&ctx);
}

static void ggml_reads_what_we_write(void **state) {
    (void)state;
    if (!load_ggml()) skip();
    rocq_ctx *ctx = open_ctx(NULL);
    for (int32_t alignment = 8; alignment <= 4096; alignment *= 2) {
        rocq_gguf_writer *writer = NULL;
        const rocq_gguf_writer_desc desc = {.path = TMP ".ours", .alignment = alignment};
        assert_ok(rocq_gguf_writer_open(ctx, &writer, &desc));
        for (int i = 0; i < N_SAMPLE_VALUES; i++) {
            const struct sample_value *s = &sample_values[i];
            char key[64];
            snprintf(key, sizeof key, "one.%s", s->name);
            assert_ok(rocq_gguf_writer_set(writer, key, s->type, false, 1,
                                           (const char *)s->data + s->size));
            snprintf(key, sizeof key, "three.%s", s->name);
            assert_ok(rocq_gguf_writer_set(writer, key, s->type, true, 3, s->data));
            snprintf(key, sizeof key, "none.%s", s->name);
            assert_ok(rocq_gguf_writer_set(writer, key, s->type, true, 0, NULL));
        }
        unsigned char data[512];
        for (int i = 0; i < N_SAMPLE_TENSORS; i++) {
            if (sample_tensors[i].format >= ROCQ_MXFP6_E2M3) continue; // ggml has none
            assert_ok(rocq_gguf_writer_add_tensor(writer, sample_tensors[i].name,
                                                  sample_tensors[i].format,
                                                  sample_tensors[i].n_dims, sample_tensors[i].ne));
        }
        for (int i = 0; i < N_SAMPLE_TENSORS; i++) {
            if (sample_tensors[i].format >= ROCQ_MXFP6_E2M3) continue;
            sample_data(i, data, sample_size(i));
            assert_ok(rocq_gguf_writer_write(writer, data, sample_size(i)));
        }
        assert_ok(rocq_gguf_writer_close(&writer));
        compare_with_ggml(ctx, TMP ".ours");
    }
    remove(TMP ".ours");
    rocq_close(&ctx);
}

static void we_read_what_ggml_writes(void **state) {
    (void)state;
    if (!load_ggml()) skip();
    rocq_ctx *ctx = open_ctx(NULL);
    void *tensors = ggml.ggml_init((ggml_init){.mem_size = 1 << 20});
    void *peer = ggml.init_empty();
    assert_non_null(tensors);
    assert_non_null(peer);
    ggml.set_u32(peer, "u32", 7);
    ggml.set_i8(peer, "i8", -7);
    ggml.set_f64(peer, "f64", 1.0 / 3.0);
    ggml.set_bool(peer, "bool", true);
    ggml.set_str(peer, "str", "text");
    ggml.set_arr(peer, "arr", ROCQ_GGUF_I64, i64s, 3);
    ggml.set_arr_str(peer, "arr_str", (const char *[]){"", "a", "bc"}, 3);
    for (int i = 0; i < N_SAMPLE_TENSORS; i++) {
        const struct sample_tensor *s = &sample_tensors[i];
        if (s->format >= ROCQ_MXFP6_E2M3) continue;
        void *tensor = ggml.new_tensor(tensors, (int)s->format, s->n_dims, s->ne);
        assert_non_null(tensor);
        ggml.set_name(tensor, s->name);
        sample_data(i, (unsigned char *)ggml.get_data(tensor), sample_size(i));
        ggml.add_tensor(peer, tensor);
    }
    assert_true(ggml.write(peer, TMP ".theirs", false));
    compare_with_ggml(ctx, TMP ".theirs");
    ggml.free(peer);
    ggml.ggml_free(tensors);
    remove(TMP ".theirs");
    rocq_close(&ctx);
}

// ---------------------------------------------------------------------------------------------
// The fuzzer's seed corpus: small valid files that reach every branch of the reader
// ---------------------------------------------------------------------------------------------

static blob seed(rocq_ctx *ctx, int i) {
    blob b = {0};
    const uint64_t ne[] = {32, 2, 1, 1};
    if (i == 0) { // the golden file
        put(&b, golden, sizeof golden);
    } else if (i == 1) { // the same as version 2
        put(&b, golden, sizeof golden);
        b.data[G_VERSION] = 2;
    } else if (i == 2) { // nothing in it
        put_header(&b, 3, 0, 0);
    } else if (i == 3) { // every type of value
        rocq_gguf_writer *writer = create_in_memory(ctx, &b, 64);
        for (int k = 0; k < N_SAMPLE_VALUES; k++) {
            const struct sample_value *s = &sample_values[k];
            char key[3] = {(char)('a' + k), '1', 0};
            assert_ok(rocq_gguf_writer_set(writer, key, s->type, false, 1,
                                           (const char *)s->data + s->size));
            key[1] = '3';
            assert_ok(rocq_gguf_writer_set(writer, key, s->type, true, 3, s->data));
        }
        assert_ok(rocq_gguf_writer_set(writer, "e", ROCQ_GGUF_STRING, true, 0, NULL));
        assert_ok(rocq_gguf_writer_close(&writer));
    } else if (i == 4) { // several formats, one unknown, out of order, without dimensions
        put_header(&b, 3, 5, 0);
        put_tensor(&b, "q", 2, ne, ROCQ_Q8_0, 96);
        put_tensor(&b, "m", 4, ne, ROCQ_MXFP4, 32);
        put_tensor(&b, "s", 0, ne, ROCQ_F32, 0);
        put_tensor(&b, "", 1, ne, 77, 224);
        put_tensor(&b, "h", 3, ne, ROCQ_BF16, 256);
        put_zeros(&b, (b.size + 31) / 32 * 32 + 384);
    } else { // alignment 8, so that small files have tensors
        put_header(&b, 3, 1, 1);
        put_str(&b, "general.alignment");
        put_int(&b, ROCQ_GGUF_U32, 4);
        put_int(&b, 8, 4);
        put_tensor(&b, "i", 1, (const uint64_t[]){2}, ROCQ_I32, 8);
        put_zeros(&b, (b.size + 7) / 8 * 8 + 16);
    }
    return b;
}
static const char *const seeds[] = {"golden", "golden-v2", "empty", "values", "tensors", "align-8"};
enum {
    N_SEEDS = sizeof seeds / sizeof *seeds
};

static void seed_corpus_is_what_this_program_writes(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx(NULL);
    for (int i = 0; i < N_SEEDS; i++) {
        blob b = seed(ctx, i);
        char path[256];
        unsigned char stored[2048];
        assert_true(b.size < (int64_t)sizeof stored);
        assert_ok(try_open(ctx, b.data, b.size));
        snprintf(path, sizeof path, "tests/corpus/gguf/%s.gguf", seeds[i]);
        FILE *f = fopen(path, "rb");
        assert_non_null(f);
        assert_int_equal(fread(stored, 1, sizeof stored, f), b.size);
        assert_memory_equal(stored, b.data, (size_t)b.size);
        fclose(f);
        arrfree(b.data);
    }
    rocq_close(&ctx);
}

// Runs last.
static void every_file_error_was_provoked(void **state) {
    (void)state;
    assert_int_equal(seen, (1u << (ROCQ_E_IO - ROCQ_E_TYPE + 1)) - 1);
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "--corpus") == 0) {
        rocq_ctx *ctx = open_ctx(NULL);
        for (int i = 0; i < N_SEEDS; i++) {
            blob b = seed(ctx, i);
            char path[1024];
            snprintf(path, sizeof path, "%s/%s.gguf", argv[2], seeds[i]);
            write_blob(path, b.data, b.size);
            arrfree(b.data);
        }
        rocq_close(&ctx);
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_bytes_are_read),
        cmocka_unit_test(golden_bytes_are_written),
        cmocka_unit_test(every_type_round_trips_through_every_source),
        cmocka_unit_test(unaligned_spans_read_the_same),
        cmocka_unit_test(numbers_convert_only_without_loss),
        cmocka_unit_test(arrays_are_bounded),
        cmocka_unit_test(null_arguments_are_refused),
        cmocka_unit_test(each_corruption_has_its_code),
        cmocka_unit_test(every_truncation_is_noticed),
        cmocka_unit_test(every_byte_can_be_wrong),
        cmocka_unit_test(a_file_that_changes_is_survived),
        cmocka_unit_test(changed_records_are_refused),
        cmocka_unit_test(alignment_must_be_sane),
        cmocka_unit_test(odd_but_valid_files_open),
        cmocka_unit_test(messages_are_one_clean_line),
        cmocka_unit_test(messages_keep_utf8),
        cmocka_unit_test(splits_of_a_wrong_type_name_the_file),
        cmocka_unit_test(paths_are_shown_in_one_line),
        cmocka_unit_test(tensors_of_two_files_are_told_apart_by_name),
        cmocka_unit_test(many_names_are_found),
        cmocka_unit_test(offsets_beyond_4_gib_work),
        cmocka_unit_test(large_headers_are_read_in_pieces),
        cmocka_unit_test(a_source_that_fails_is_an_io_error),
        cmocka_unit_test(paths_that_do_not_work_say_so),
        cmocka_unit_test(upload_is_a_view_where_it_can_be),
        cmocka_unit_test(writer_refuses_what_it_should),
        cmocka_unit_test(keys_keep_their_place_and_copies_are_equal),
        cmocka_unit_test(data_is_padded_to_the_alignment),
        cmocka_unit_test(a_sink_that_fails_is_an_io_error),
        cmocka_unit_test(a_file_is_put_there_whole_or_not_at_all),
        cmocka_unit_test(a_model_can_replace_itself),
        cmocka_unit_test(every_allocation_can_fail),
        cmocka_unit_test(types_are_named),
        cmocka_unit_test(ggml_reads_what_we_write),
        cmocka_unit_test(we_read_what_ggml_writes),
        cmocka_unit_test(seed_corpus_is_what_this_program_writes),
        cmocka_unit_test(every_file_error_was_provoked)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
