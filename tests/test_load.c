// rocq_gguf_load: every source, format and piece size, on the CPU and on the stand-in of the GPU
// (tests/simt/hip.h), with everything that can stop it or fail on the way.
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "../examples/ds.h"
#include "simt/hip.h"
#include "simt/left.h"

#define PATH ".build/test_load.gguf" // tests run in the repository root

#define assert_result(call, expected)                                                              \
    do {                                                                                           \
        const rocq_result got_ = (call);                                                           \
        if (got_ != (expected)) {                                                                  \
            fail_msg("%s: %s, expected %s", #call, rocq_result_name(got_),                         \
                     rocq_result_name((rocq_result)(expected)));                                   \
        }                                                                                          \
    } while (0)
#define assert_ok(call) assert_result(call, ROCQ_OK)

// ---------------------------------------------------------------------------------------------
// Contexts
// ---------------------------------------------------------------------------------------------

static struct {
    int64_t n, blocks, fail_at; // requests, blocks in use, the request that gets nothing (-1: none)
} host;

static void *host_alloc(size_t size, void *user) {
    (void)user;
    if (host.n++ == host.fail_at) return NULL;
    host.blocks++;
    return malloc(size);
}

static void host_free(void *ptr, size_t size, void *user) {
    (void)user;
    memset(ptr, 0xdd, size);
    host.blocks--;
    free(ptr);
}

static rocq_ctx *open_ctx(rocq_backend backend, int32_t n_threads, int64_t budget) {
    rocq_ctx *ctx = NULL;
    const rocq_desc desc = {.prefer = backend, .n_threads = n_threads, .memory_budget = budget,
                            .allocator = {host_alloc, host_free, NULL}};
    assert_ok(rocq_open(&ctx, &desc));
    return ctx;
}

static rocq_stats stats_of(rocq_ctx *ctx) {
    rocq_stats stats;
    assert_ok(rocq_get_stats(ctx, &stats));
    return stats;
}

static int begin(void **state) {
    (void)state;
    simt_begin();
    memset(&host, 0, sizeof host);
    host.fail_at = -1;
    return 0;
}

// Nothing is left, here or there, and the runtime was never called wrongly.
static int nothing_is_left(void **state) {
    (void)state;
    return simt_check_left(host.blocks);
}

// ---------------------------------------------------------------------------------------------
// A file of all formats, in memory and on disk
// ---------------------------------------------------------------------------------------------

enum { MAX_TENSORS = 64 };

typedef struct model {
    unsigned char *file; // stb_ds's array
    int64_t size;
    int32_t n;
    struct {
        char name[32];
        rocq_format format;
        int32_t n_dims;
        int64_t ne[2], size;
        unsigned char *bytes;
        float *decoded; // NULL for I32
    } tensors[MAX_TENSORS];
    int64_t n_reads, fail_read; // of the callback; the number of the one that fails, -1 = none
    int64_t total, most;        // bytes of all tensors, elements of the largest
    const char *names[MAX_TENSORS];
} model;

static uint32_t random_next(void) {
    static uint32_t state = 12345;
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

static bool model_write(const void *src, int64_t size, void *user) {
    model *m = (model *)user;
    arrsetlen(m->file, m->size + size);
    memcpy(m->file + m->size, src, (size_t)size);
    m->size += size;
    return true;
}

static bool model_read(void *dst, int64_t offset, int64_t size, void *user) {
    model *m = (model *)user;
    assert_true(offset >= 0 && size > 0 && offset + size <= m->size);
    if (m->n_reads++ == m->fail_read) return false;
    memcpy(dst, m->file + offset, (size_t)size);
    return true;
}

static void model_add(model *m, rocq_format format, int64_t cols, int64_t rows) {
    assert_true(m->n < MAX_TENSORS);
    const int32_t i = m->n++;
    const int64_t n = cols * rows, ne[2] = {cols, rows};
    int64_t row;
    assert_ok(rocq_row_size(format, cols, &row));
    m->names[i] = m->tensors[i].name;
    snprintf(m->tensors[i].name, sizeof m->tensors[i].name, "t%d.%s", (int)i,
             rocq_format_name(format));
    m->tensors[i].format = format;
    m->tensors[i].n_dims = rows > 1 ? 2 : 1;
    memcpy(m->tensors[i].ne, ne, sizeof ne);
    m->tensors[i].size = row * rows;
    m->tensors[i].bytes = (unsigned char *)malloc((size_t)(row * rows));
    assert_non_null(m->tensors[i].bytes);
    if (format == ROCQ_I32) {
        for (int64_t k = 0; k < row * rows; k++) {
            m->tensors[i].bytes[k] = (unsigned char)random_next();
        }
    } else {
        float *v = (float *)malloc((size_t)n * sizeof *v);
        assert_non_null(v);
        for (int64_t k = 0; k < n; k++) v[k] = (float)random_next() / 8388608.0f - 1.0f;
        assert_ok(rocq_quantize(format, m->tensors[i].bytes, v, rows, cols, NULL));
        assert_ok(rocq_dequantize(format, v, m->tensors[i].bytes, n));
        m->tensors[i].decoded = v;
    }
    m->total += row * rows;
    m->most = n > m->most ? n : m->most;
}

static void write_file(const model *m, int64_t size) {
    FILE *file = fopen(PATH, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(m->file, 1, (size_t)size, file), size);
    fclose(file);
}

// Lays the tensors out as a file of that alignment, also on disk.
static void model_finish(model *m, int32_t alignment) {
    rocq_ctx *ctx = open_ctx(ROCQ_BACKEND_CPU, 1, 0);
    rocq_gguf_writer *writer = NULL;
    const rocq_gguf_writer_desc desc = {.write = model_write, .user = m, .alignment = alignment};
    assert_ok(rocq_gguf_writer_open(ctx, &writer, &desc));
    for (int32_t i = 0; i < m->n; i++) {
        assert_ok(rocq_gguf_writer_add_tensor(writer, m->tensors[i].name, m->tensors[i].format,
                                              m->tensors[i].n_dims, m->tensors[i].ne));
    }
    for (int32_t i = 0; i < m->n; i++) {
        assert_ok(rocq_gguf_writer_write(writer, m->tensors[i].bytes, m->tensors[i].size));
    }
    assert_ok(rocq_gguf_writer_close(&writer));
    rocq_close(&ctx);
    write_file(m, m->size);
    m->fail_read = -1;
}

static void model_free(model *m) {
    for (int32_t i = 0; i < m->n; i++) {
        free(m->tensors[i].bytes);
        free(m->tensors[i].decoded);
    }
    arrfree(m->file);
    memset(m, 0, sizeof *m);
    remove(PATH);
}

// All formats with a vector or two between them, as models have; large: also more bytes than a
// thread reads at a time, and than the context's ring has in a piece.
static void model_make(model *m, int32_t alignment, bool large) {
    static const rocq_format formats[] = {
#define ROCQ_X(NAME, name, id, elems, bytes) ROCQ_##NAME,
        ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
    };
    memset(m, 0, sizeof *m);
    int64_t n = 0;
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++) {
        if (rocq_quantize(formats[f], NULL, NULL, 0, 256, NULL) != ROCQ_OK) continue; // only read
        model_add(m, formats[f], 256, 3 + n % 4);
        if (n % 3 == 0) model_add(m, ROCQ_F32, 1 + 5 * n, 1);
        if (n == 7) model_add(m, ROCQ_I32, 13, 1);
        n++;
    }
    if (large) {
        model_add(m, ROCQ_Q8_0, 256, 5003);
        model_add(m, ROCQ_Q4_0, 32, 1);
        model_add(m, ROCQ_F32, 300001, 1);
        model_add(m, ROCQ_Q6_K, 256, 1);
    }
    model_finish(m, alignment);
}

typedef enum source { MAPPED, NOT_MAPPED, SPAN, CALLBACK, N_SOURCES } source;

static rocq_gguf *open_model(rocq_ctx *ctx, model *m, source from) {
    rocq_gguf *file = NULL;
    rocq_gguf_desc desc = {0};
    switch (from) {
    case MAPPED: desc.path = PATH; break;
    case NOT_MAPPED: desc.path = PATH; desc.no_mmap = true; break;
    case SPAN: desc.data = m->file; desc.size = m->size; break;
    default: desc.read = model_read; desc.user = m; desc.size = m->size; break;
    }
    assert_ok(rocq_gguf_open(ctx, &file, &desc));
    m->n_reads = 0;
    return file;
}

// ---------------------------------------------------------------------------------------------
// What has been loaded
// ---------------------------------------------------------------------------------------------

// A tensor has the bytes of tensor i, or, where those are in planes, decodes to the same floats.
static void check_tensor(rocq_ctx *ctx, const model *m, int32_t i, const rocq_tensor *t) {
    const int64_t n = rocq_tensor_count(t);
    assert_int_equal(t->format, m->tensors[i].format);
    assert_int_equal(t->n_dims, m->tensors[i].n_dims);
    assert_int_equal(t->ne[0], m->tensors[i].ne[0]);
    assert_int_equal(t->ne[1], m->tensors[i].ne[1]);
    assert_int_equal(rocq_tensor_size(t), m->tensors[i].size);
    if (t->layout == ROCQ_LAYOUT_INTERLEAVED) { // what is `at` bytes into a block of 16 rows
        const int64_t bytes = rocq_get_format_info(t->format)->block_bytes;
        const int64_t row = m->tensors[i].size / t->ne[1], d = bytes % 4 ? t->format == ROCQ_Q6_K
                                                                               ? bytes - 2 : 0 : -1;
        const unsigned char *got = (const unsigned char *)rocq_tensor_data(t);
        for (int64_t k = 0; k < m->tensors[i].size; k++) {
            const int64_t r = k / row, at = k % row % bytes;
            const int64_t first = d == 0 && at >= 2 ? (at - 2) / 4 * 4 + 2 : at / 4 * 4;
            const int64_t piece = d >= 0 && (at == d || at == d + 1) ? 2 : 4;
            const int64_t begin = piece == 2 ? d : first;
            const int64_t place = r / 16 * 16 * row + k % row / bytes * bytes * 16 + 16 * begin +
                                  r % 16 * piece + (at - begin);
            assert_int_equal(got[place], m->tensors[i].bytes[k]);
        }
        return;
    }
    if (t->layout == ROCQ_LAYOUT_GGUF) {
        unsigned char *got = (unsigned char *)malloc((size_t)m->tensors[i].size);
        assert_ok(rocq_download(ctx, got, t, m->tensors[i].size));
        assert_memory_equal(got, m->tensors[i].bytes, (size_t)m->tensors[i].size);
        free(got);
        return;
    }
    rocq_buffer buffer;
    rocq_tensor y;
    assert_ok(rocq_buffer_alloc(ctx, &buffer, n * 4));
    assert_ok(rocq_tensor_init(&y, &buffer, 0, ROCQ_F32, t->n_dims, t->ne));
    const rocq_cast_params cast = {.y = &y, .x = t};
    float *got = (float *)malloc((size_t)n * sizeof *got);
    memset(got, 0xff, (size_t)n * sizeof *got);
    assert_ok(rocq_cast(ctx, &cast));
    assert_ok(rocq_download(ctx, got, &y, n * 4));
    assert_memory_equal(got, m->tensors[i].decoded, (size_t)n * sizeof *got);
    free(got);
    assert_ok(rocq_buffer_free(ctx, &buffer));
}

static void check_all(rocq_ctx *ctx, const model *m, const rocq_tensor *tensors) {
    for (int32_t i = 0; i < m->n; i++) check_tensor(ctx, m, i, &tensors[i]);
}

typedef struct watch {
    rocq_ctx *ctx;
    int64_t calls, stop_at; // stop_at: the call that stops, -1 = none
    bool by_cancel;         // it asks rocq_cancel rather than saying no
    int64_t done, total;    // of the last call
    size_t host_before, host_most; // pinned bytes
    int streams_most;
} watch;

static bool watch_progress(int64_t done, int64_t total, void *user) {
    watch *w = (watch *)user;
    const simt_live live = simt_get_live();
    assert_true(done >= w->done && done <= total && total > 0);
    assert_true(w->calls == 0 || (total == w->total && done > w->done)); // each piece is told once
    w->done = done;
    w->total = total;
    if (live.host_bytes > w->host_most) w->host_most = live.host_bytes;
    if (live.streams > w->streams_most) w->streams_most = live.streams;
    if (w->calls++ != w->stop_at) return true;
    if (!w->by_cancel) return false;
    rocq_cancel(w->ctx);
    return true;
}

// Loads, and checks that a failure touches neither outputs nor what is in use, and that success
// tells all bytes.
static rocq_result load(rocq_ctx *ctx, rocq_gguf *file, const rocq_gguf_load_desc *desc, watch *w,
                        rocq_tensor *tensors, int64_t n, rocq_buffer *buffer) {
    rocq_gguf_load_desc watched = desc ? *desc : (rocq_gguf_load_desc){0};
    rocq_tensor *untouched = (rocq_tensor *)malloc((size_t)n * sizeof *untouched);
    watch idle = {.stop_at = -1};
    if (!w) w = &idle;
    w->ctx = ctx;
    watched.progress = watch_progress;
    watched.user = w;
    memset(tensors, 0x55, (size_t)n * sizeof *tensors);
    memcpy(untouched, tensors, (size_t)n * sizeof *tensors);
    memset(buffer, 0x55, sizeof *buffer);
    const rocq_buffer untouched_buffer = *buffer;
    const rocq_stats before = stats_of(ctx);
    const int64_t budget = ctx->budget_used;
    const int live = simt_live_sum();
    const rocq_result result = rocq_gguf_load(ctx, file, &watched, tensors, buffer);
    const rocq_stats after = stats_of(ctx);
    if (result != ROCQ_OK) {
        assert_memory_equal(tensors, untouched, (size_t)n * sizeof *tensors);
        assert_memory_equal(buffer, &untouched_buffer, sizeof *buffer);
        assert_string_not_equal(rocq_error(ctx), "");
    } else {
        assert_int_equal(w->done, w->total);
    }
    const int64_t kept = result == ROCQ_OK ? buffer->size : 0;
    const bool outside = watched.memory == ROCQ_MEMORY_PINNED && rocq__on_gpu(ctx);
    assert_int_equal(ctx->budget_used, budget + (outside ? 0 : kept));
    assert_int_equal(simt_live_sum(), live + (kept > 0 && rocq__on_gpu(ctx) ? 1 : 0));
    assert_true(after.live_bytes - before.live_bytes - kept < 256);
    free(untouched);
    return result;
}

// ---------------------------------------------------------------------------------------------
// Tests
// ---------------------------------------------------------------------------------------------

static void every_source_loads_the_same(void **state) {
    (void)state;
    static model m;
    static rocq_tensor tensors[MAX_TENSORS], single;
    model_make(&m, 32, true);
    for (int gpu = 0; gpu < 2; gpu++) {
        for (int from = 0; from < N_SOURCES; from++) {
            for (int copy = 0; copy < 2; copy++) {
                rocq_ctx *ctx =
                    open_ctx(gpu ? ROCQ_BACKEND_GPU : ROCQ_BACKEND_CPU, copy ? 3 : 1, 0);
                rocq_gguf *file = open_model(ctx, &m, (source)from);
                rocq_buffer buffer;
                const rocq_gguf_load_desc desc = {.copy = copy};
                assert_ok(load(ctx, file, &desc, NULL, tensors, m.n, &buffer));
                check_all(ctx, &m, tensors);
                const bool views = !gpu && !copy && (from == MAPPED || from == SPAN);
                assert_int_equal(buffer.size == 0, views);
                for (int32_t i = 0; i < m.n; i++) {
                    const int64_t offset = tensors[i].offset;
                    const bool blocks = rocq_get_format_info(tensors[i].format)->block_elems > 1;
                    assert_true(views || (offset % 256 == 0 && offset < buffer.size));
                    assert_int_equal(tensors[i].layout == ROCQ_LAYOUT_PLANAR, gpu && blocks);
                }
                if (copy) { // the same tensors one by one
                    for (int32_t i = 0; i < m.n; i++) {
                        rocq_buffer own;
                        assert_ok(rocq_gguf_upload(ctx, file, m.names[i], &single, &own));
                        check_tensor(ctx, &m, i, &single);
                        const bool view = !gpu && (from == MAPPED || from == SPAN);
                        assert_int_equal(own.size, view ? 0 : rocq_tensor_size(&single));
                        assert_ok(rocq_buffer_free(ctx, &own));
                    }
                }
                assert_ok(rocq_buffer_free(ctx, &buffer));
                rocq_gguf_close(&file);
                rocq_close(&ctx);
            }
        }
    }
    model_free(&m);
}

// Matrices that can be interleaved are, from every source and in pieces of any size, where the CPU
// multiplies them faster so; all others stay views where they were.
static void matrices_are_interleaved(void **state) {
    static model m;
    static rocq_tensor tensors[MAX_TENSORS];
    static const int64_t pieces[] = {512, 5000, 1 << 20, 5000}; // the last without SIMD
    (void)state;
    memset(&m, 0, sizeof m);
    model_add(&m, ROCQ_Q4_0, 544, 48);
    model_add(&m, ROCQ_Q4_K, 256, 40); // 40 rows are no multiple of 16
    model_add(&m, ROCQ_Q8_0, 32, 16);
    model_add(&m, ROCQ_F32, 7, 16);
    model_add(&m, ROCQ_Q6_K, 768, 80);
    model_add(&m, ROCQ_Q5_0, 64, 32);
    model_add(&m, ROCQ_Q5_K, 256, 32);
    model_add(&m, ROCQ_Q4_0, 512, 2064);
    model_add(&m, ROCQ_Q8_0, 32, 1); // a vector
    model_finish(&m, 32);
    rocq_ctx *gpu = open_ctx(ROCQ_BACKEND_GPU, 1, 0); // there it changes nothing
    for (int from = 0; from < N_SOURCES; from++) {
        rocq_gguf *file = open_model(gpu, &m, (source)from);
        rocq_buffer buffer;
        const rocq_gguf_load_desc desc = {.interleave = true};
        assert_ok(load(gpu, file, &desc, NULL, tensors, m.n, &buffer));
        check_all(gpu, &m, tensors);
        for (int32_t k = 0; k < m.n; k++) {
            assert_int_not_equal(tensors[k].layout, ROCQ_LAYOUT_INTERLEAVED);
        }
        assert_ok(rocq_buffer_free(gpu, &buffer));
        rocq_gguf_close(&file);
    }
    rocq_close(&gpu);
    for (int i = 0; i < 2 * N_SOURCES * 4; i++) {
        const source from = (source)(i / 2 % N_SOURCES);
        rocq_ctx *ctx = open_ctx(ROCQ_BACKEND_CPU, 1 + i % 2 * 2, 0);
        rocq_gguf *file = open_model(ctx, &m, from);
        rocq_buffer buffer;
        const rocq_gguf_load_desc desc = {.interleave = true,
                                          .piece_bytes = pieces[i / 2 / N_SOURCES]};
        const bool simd = i / 2 / N_SOURCES < 3 && rocq__cpu_has(ROCQ_CPU_SIMD) &&
                          !strcmp(rocq__cpu_tier_name(ROCQ_CPU_SIMD), "AVX2"); // not NEON
        if (!simd) ctx->has_simd = ctx->has_avx_vnni = ctx->has_avx512 = false;
        assert_ok(load(ctx, file, &desc, NULL, tensors, m.n, &buffer));
        for (int32_t k = 0; k < m.n; k++) {
            const bool can =
                simd && rocq__interleaves(m.tensors[k].format) && k != 1 && k != 8;
            assert_int_equal(tensors[k].layout,
                             can ? ROCQ_LAYOUT_INTERLEAVED : ROCQ_LAYOUT_GGUF);
            assert_int_equal(tensors[k].buffer.host == buffer.host,
                             can || from == NOT_MAPPED || from == CALLBACK);
            check_tensor(ctx, &m, k, &tensors[k]);
        }
        assert_ok(rocq_buffer_free(ctx, &buffer));
        // nothing is left after a read that fails, and without memory
        if (from == CALLBACK) {
            m.n_reads = 0;
            m.fail_read = 3;
            assert_result(load(ctx, file, &desc, NULL, tensors, m.n, &buffer), ROCQ_E_IO);
            m.fail_read = -1;
        }
        for (int64_t k = 0;; k++) { // the k-th request gets nothing
            host.fail_at = host.n + k;
            const rocq_result result = load(ctx, file, &desc, NULL, tensors, m.n, &buffer);
            assert_true(result == ROCQ_OK || result == ROCQ_E_MEMORY);
            host.fail_at = -1;
            if (result != ROCQ_OK) continue;
            assert_ok(rocq_buffer_free(ctx, &buffer));
            break;
        }
        rocq_gguf_close(&file);
        rocq_close(&ctx);
    }
    model_free(&m);
}

static void unaligned_spans_are_copied_where_they_must(void **state) {
    (void)state;
    static model m;
    static rocq_tensor tensors[MAX_TENSORS];
    model_make(&m, 8, false);
    for (int gpu = 0; gpu < 2; gpu++) {
        for (int shift = 1; shift < 3; shift++) {
            rocq_ctx *ctx = open_ctx(gpu ? ROCQ_BACKEND_GPU : ROCQ_BACKEND_CPU, 2, 0);
            unsigned char *moved = (unsigned char *)malloc((size_t)(m.size + shift));
            memcpy(moved + shift, m.file, (size_t)m.size);
            const rocq_gguf_desc from = {.data = moved + shift, .size = m.size};
            rocq_gguf *file;
            rocq_buffer buffer;
            assert_ok(rocq_gguf_open(ctx, &file, &from));
            assert_ok(load(ctx, file, NULL, NULL, tensors, m.n, &buffer));
            check_all(ctx, &m, tensors);
            int32_t n_views = 0;
            for (int32_t i = 0; i < m.n; i++) n_views += tensors[i].buffer.host != buffer.host;
            assert_int_equal(n_views > 0 && n_views < m.n, !gpu);
            assert_ok(rocq_buffer_free(ctx, &buffer));
            rocq_gguf_close(&file);
            rocq_close(&ctx);
            free(moved);
        }
    }
    model_free(&m);
}

// From a block or two to more than the file, in every order of work that a runtime may choose; with
// one stream where the runtime cannot have streams wait for each other.
static void pieces_of_any_size_do(void **state) {
    (void)state;
    static model m;
    static rocq_tensor tensors[MAX_TENSORS];
    static const int64_t sizes[] = {512, 577, 1000, 2048, 10000, 65536};
    model_make(&m, 8, false);
    for (int work = SIMT_AT_ONCE; work <= SIMT_LATEST; work++) {
        for (int optional = 0; optional < 2; optional++) {
            for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
                simt_set_work(work);
                simt_set_optional(optional);
                rocq_ctx *ctx = open_ctx(ROCQ_BACKEND_GPU, 1, 0);
                rocq_gguf *file = open_model(ctx, &m, (source)(k % N_SOURCES));
                rocq_buffer buffer;
                const rocq_gguf_load_desc desc = {.piece_bytes = sizes[k],
                                                  .n_pieces = 3 + (int32_t)k};
                watch w = {.stop_at = -1, .host_before = simt_get_live().host_bytes};
                const int streams = simt_get_live().streams;
                assert_ok(load(ctx, file, &desc, &w, tensors, m.n, &buffer));
                assert_int_equal(w.total, m.total);
                assert_true(w.calls > m.total / sizes[k]);
                const int64_t pinned = (sizes[k] + 63) / 64 * 64 * desc.n_pieces;
                if (w.calls > 2) { // else there is none between start and end
                    assert_int_equal(w.host_most - w.host_before, pinned);
                    assert_int_equal(w.streams_most, streams + optional);
                }
                check_all(ctx, &m, tensors);
                rocq_gguf_close(&file);
                rocq_close(&ctx); // frees the buffer
            }
        }
    }
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        rocq_ctx *ctx = open_ctx(ROCQ_BACKEND_CPU, 2, 0);
        rocq_gguf *file = open_model(ctx, &m, NOT_MAPPED);
        rocq_buffer buffer;
        const rocq_gguf_load_desc desc = {.piece_bytes = sizes[k]};
        watch w = {.stop_at = -1};
        assert_ok(load(ctx, file, &desc, &w, tensors, m.n, &buffer));
        assert_true(w.calls > m.total / sizes[k]);
        check_all(ctx, &m, tensors);
        rocq_gguf_close(&file);
        rocq_close(&ctx);
    }
    model_free(&m);
}

// Many small tensors cost as few pieces as their bytes do, and few copies beside the vectors.
static void small_tensors_share_a_piece(void **state) {
    (void)state;
    static model m;
    static rocq_tensor tensors[MAX_TENSORS];
    memset(&m, 0, sizeof m);
    for (int i = 0; i < MAX_TENSORS; i++) model_add(&m, ROCQ_Q4_0, 32, 1 + i % 3);
    model_finish(&m, 32);
    rocq_ctx *ctx = open_ctx(ROCQ_BACKEND_GPU, 1, 0);
    rocq_gguf *file = open_model(ctx, &m, CALLBACK);
    rocq_buffer buffer;
    watch w = {.stop_at = -1};
    const int64_t calls = simt_calls();
    assert_ok(load(ctx, file, NULL, &w, tensors, m.n, &buffer));
    assert_int_equal(m.n_reads, 1);
    assert_int_equal(w.calls, 2);
    assert_true(simt_calls() - calls < 2 * MAX_TENSORS);
    check_all(ctx, &m, tensors);
    rocq_gguf_close(&file);
    rocq_close(&ctx);
    model_free(&m);
}

static void names_choose_and_order(void **state) {
    (void)state;
    static model m;
    static rocq_tensor tensors[MAX_TENSORS];
    model_make(&m, 32, true);
    for (int gpu = 0; gpu < 2; gpu++) {
        for (int from = 0; from < N_SOURCES; from++) {
            rocq_ctx *ctx = open_ctx(gpu ? ROCQ_BACKEND_GPU : ROCQ_BACKEND_CPU, 1, 0);
            rocq_gguf *file = open_model(ctx, &m, (source)from);
            rocq_buffer buffer;
            const int32_t last = m.n - 1, list[] = {last, 3, 0, 7, 3, 11, last, 3};
            const char *names[8];
            for (int i = 0; i < 8; i++) names[i] = m.names[list[i]];
            rocq_gguf_load_desc desc = {
                .names = names, .n_names = 8, .copy = gpu != 0, .piece_bytes = 1024};
            assert_ok(load(ctx, file, &desc, NULL, tensors, 8, &buffer));
            for (int i = 0; i < 8; i++) check_tensor(ctx, &m, list[i], &tensors[i]);
            assert_memory_equal(&tensors[1], &tensors[4], sizeof tensors[1]); // the same memory
            assert_memory_equal(&tensors[1], &tensors[7], sizeof tensors[1]);
            assert_memory_equal(&tensors[0], &tensors[6], sizeof tensors[0]);
            int64_t bytes = 0;
            for (int i = 0; i < 6; i++) bytes += i == 4 ? 0 : m.tensors[list[i]].size + 256;
            assert_true(buffer.size < bytes);
            assert_ok(rocq_buffer_free(ctx, &buffer));

            names[5] = "no such tensor";
            assert_result(load(ctx, file, &desc, NULL, tensors, 8, &buffer), ROCQ_E_NOT_FOUND);
            assert_non_null(strstr(rocq_error(ctx), "no such tensor"));
            names[5] = NULL;
            assert_result(load(ctx, file, &desc, NULL, tensors, 8, &buffer), ROCQ_E_ARGUMENT);
            desc.n_names = 0; // no tensors at all
            desc.progress = NULL;
            assert_ok(rocq_gguf_load(ctx, file, &desc, tensors, &buffer));
            assert_int_equal(buffer.size, 0);
            assert_ok(rocq_buffer_free(ctx, &buffer));
            rocq_gguf_close(&file);
            rocq_close(&ctx);
        }
    }
    model_free(&m);
}

static void each_piece_can_be_the_last(void **state) {
    (void)state;
    static model m;
    static rocq_tensor tensors[MAX_TENSORS];
    model_make(&m, 32, false);
    for (int gpu = 0; gpu < 2; gpu++) {
        rocq_ctx *ctx = open_ctx(gpu ? ROCQ_BACKEND_GPU : ROCQ_BACKEND_CPU, 1, 0);
        rocq_gguf *file = open_model(ctx, &m, NOT_MAPPED);
        rocq_buffer buffer;
        const rocq_gguf_load_desc desc = {.piece_bytes = 2048};
        for (int by_cancel = 0; by_cancel < 2; by_cancel++) {
            watch w;
            int64_t k = 0;
            for (;; k++) {
                w = (watch){.stop_at = k, .by_cancel = by_cancel};
                const rocq_result result = load(ctx, file, &desc, &w, tensors, m.n, &buffer);
                if (by_cancel) { // is asked before progress is: what the last call asks is too late
                    if (result != ROCQ_OK) assert_ok(rocq_sync(ctx));
                }
                if (result == ROCQ_OK) break;
                assert_int_equal(result, ROCQ_E_CANCELLED);
                assert_int_equal(w.calls, k + 1);
            }
            assert_true(k > 5);
            assert_int_equal(k, by_cancel ? w.calls - 1 : w.calls);
            if (by_cancel) { // and what comes next is cancelled before anything is taken
                const int64_t n_allocs = stats_of(ctx).n_allocs;
                assert_ok(rocq_buffer_free(ctx, &buffer));
                const rocq_result result = load(ctx, file, &desc, NULL, tensors, m.n, &buffer);
                assert_int_equal(result, ROCQ_E_CANCELLED);
                assert_true(stats_of(ctx).n_allocs - n_allocs < 4);
                assert_ok(rocq_sync(ctx));
                assert_ok(load(ctx, file, &desc, NULL, tensors, m.n, &buffer));
            }
            check_all(ctx, &m, tensors);
            assert_ok(rocq_buffer_free(ctx, &buffer));
        }
        rocq_gguf_close(&file);
        rocq_close(&ctx);
    }
    model_free(&m);
}

static void each_read_can_fail(void **state) {
    (void)state;
    static model m;
    static rocq_tensor tensors[MAX_TENSORS];
    model_make(&m, 32, false);
    for (int gpu = 0; gpu < 2; gpu++) {
        rocq_ctx *ctx = open_ctx(gpu ? ROCQ_BACKEND_GPU : ROCQ_BACKEND_CPU, 3, 0);
        rocq_gguf *file = open_model(ctx, &m, CALLBACK);
        rocq_buffer buffer;
        const rocq_gguf_load_desc desc = {.piece_bytes = 2048};
        for (m.fail_read = 0;; m.fail_read++) {
            m.n_reads = 0;
            const rocq_result result = load(ctx, file, &desc, NULL, tensors, m.n, &buffer);
            if (result == ROCQ_OK) break;
            assert_int_equal(result, ROCQ_E_IO);
            assert_non_null(strstr(rocq_error(ctx), "tensor 't"));
            assert_int_equal(m.n_reads, m.fail_read + 1);
        }
        assert_int_equal(m.n_reads, m.fail_read);
        assert_true(m.n_reads > 5);
        check_all(ctx, &m, tensors);
        m.fail_read = -1;
        rocq_gguf_close(&file);
        rocq_close(&ctx);
    }
    model_free(&m);
}

// A file that is cut short while it is open is an error, mapped or not, also where threads read it.
static void a_file_that_shrinks_is_an_io_error(void **state) {
    (void)state;
    static model m;
    static rocq_tensor tensors[MAX_TENSORS];
    model_make(&m, 32, true);
    for (int gpu = 0; gpu < 2; gpu++) {
        for (int from = MAPPED; from <= NOT_MAPPED; from++) {
            rocq_ctx *ctx = open_ctx(gpu ? ROCQ_BACKEND_GPU : ROCQ_BACKEND_CPU, 3, 0);
            rocq_gguf *file = open_model(ctx, &m, (source)from);
            rocq_buffer buffer;
            const rocq_gguf_load_desc desc = {.copy = true};
            write_file(&m, m.size - m.size / 4);
            assert_result(load(ctx, file, &desc, NULL, tensors, m.n, &buffer), ROCQ_E_IO);
            write_file(&m, m.size);
            assert_ok(load(ctx, file, &desc, NULL, tensors, m.n, &buffer));
            check_all(ctx, &m, tensors);
            rocq_gguf_close(&file);
            rocq_close(&ctx);
        }
    }
    model_free(&m);
}

// Once only, out of memory: the context stays usable. From then on, an error: it is lost.
static void every_runtime_call_may_fail(void **state) {
    (void)state;
    static model m;
    static rocq_tensor tensors[MAX_TENSORS];
    model_make(&m, 32, false);
    const rocq_gguf_load_desc desc = {.piece_bytes = 4096, .n_pieces = 3};
    for (int work = SIMT_AT_ONCE; work <= SIMT_LATEST; work++) {
        simt_set_work(work);
        for (int lost = 0; lost < 2; lost++) {
            int64_t n = 1;
            for (bool failed = true; failed; n++) {
                rocq_ctx *ctx = open_ctx(ROCQ_BACKEND_GPU, 1, 0);
                rocq_gguf *file = open_model(ctx, &m, SPAN);
                rocq_buffer buffer;
                const int64_t calls = simt_calls();
                if (lost) simt_fail_at(n, 719);
                else simt_fail_once(n, ROCQ_HIP_OUT_OF_MEMORY);
                const rocq_result result = load(ctx, file, &desc, NULL, tensors, m.n, &buffer);
                failed = simt_calls() - calls >= n;
                simt_fail_at(0, 0);
                if (result != ROCQ_OK) {
                    assert_true(failed);
                    assert_int_equal(result, lost ? ROCQ_E_LOST : ROCQ_E_MEMORY);
                    assert_result(load(ctx, file, &desc, NULL, tensors, m.n, &buffer),
                                  lost ? ROCQ_E_LOST : ROCQ_OK);
                }
                if (result == ROCQ_OK || !lost) check_all(ctx, &m, tensors);
                rocq_gguf_close(&file);
                rocq_close(&ctx);
            }
            assert_true(n > 50);
        }
    }
    model_free(&m);
}

static void every_allocation_may_fail(void **state) {
    (void)state;
    static model m;
    static rocq_tensor tensors[MAX_TENSORS];
    model_make(&m, 32, false);
    for (int gpu = 0; gpu < 2; gpu++) {
        for (int64_t n = 0;; n++) {
            rocq_ctx *ctx = open_ctx(gpu ? ROCQ_BACKEND_GPU : ROCQ_BACKEND_CPU, 1, 0);
            rocq_gguf *file = open_model(ctx, &m, CALLBACK);
            rocq_buffer buffer;
            host.fail_at = host.n + n;
            const rocq_result result = load(ctx, file, NULL, NULL, tensors, m.n, &buffer);
            host.fail_at = -1;
            if (result != ROCQ_OK) {
                assert_int_equal(result, ROCQ_E_MEMORY);
                assert_ok(load(ctx, file, NULL, NULL, tensors, m.n, &buffer));
            }
            check_all(ctx, &m, tensors);
            rocq_gguf_close(&file);
            rocq_close(&ctx);
            if (result == ROCQ_OK) {
                assert_true(n > 1);
                break;
            }
        }
    }
    model_free(&m);
}

static void the_budget_is_kept(void **state) {
    (void)state;
    static model m;
    static rocq_tensor tensors[MAX_TENSORS];
    model_make(&m, 32, false);
    const rocq_gguf_load_desc desc = {.piece_bytes = 4096, .n_pieces = 3};
    rocq_ctx *ctx = open_ctx(ROCQ_BACKEND_GPU, 1, 0);
    rocq_gguf *file = open_model(ctx, &m, SPAN);
    rocq_buffer buffer;
    assert_ok(load(ctx, file, &desc, NULL, tensors, m.n, &buffer));
    const int64_t size = buffer.size, staging = 3 * 4096;
    rocq_gguf_close(&file);
    rocq_close(&ctx);
    const int64_t budgets[] = {size - 1, size + staging - 1, size + staging};
    for (int i = 0; i < 3; i++) {
        ctx = open_ctx(ROCQ_BACKEND_GPU, 1, budgets[i]);
        file = open_model(ctx, &m, SPAN);
        assert_result(load(ctx, file, &desc, NULL, tensors, m.n, &buffer),
                      i < 2 ? ROCQ_E_BUDGET : ROCQ_OK);
        if (i == 2) { // what staging took is there again
            rocq_buffer rest;
            assert_ok(rocq_buffer_alloc(ctx, &rest, staging));
            assert_ok(rocq_buffer_free(ctx, &rest));
            check_tensor(ctx, &m, 0, &tensors[0]);
        }
        rocq_gguf_close(&file);
        rocq_close(&ctx);
    }
    ctx = open_ctx(ROCQ_BACKEND_CPU, 1, 1000);
    file = open_model(ctx, &m, SPAN);
    assert_ok(load(ctx, file, NULL, NULL, tensors, m.n, &buffer)); // views are not its memory
    const rocq_gguf_load_desc copy = {.copy = true};
    assert_result(load(ctx, file, &copy, NULL, tensors, m.n, &buffer), ROCQ_E_BUDGET);
    rocq_gguf_close(&file);
    rocq_close(&ctx);
    model_free(&m);
}

// Tensors in pinned memory: the same, outside the budget, for ops and copies alike.
static void pinned_memory_holds_the_same(void **state) {
    (void)state;
    static model m;
    static rocq_tensor tensors[MAX_TENSORS];
    model_make(&m, 32, true);
    const rocq_gguf_load_desc desc = {.memory = ROCQ_MEMORY_PINNED};
    for (int gpu = 0; gpu < 2; gpu++) {
        rocq_ctx *ctx = open_ctx(gpu ? ROCQ_BACKEND_GPU : ROCQ_BACKEND_CPU, 1, 0);
        rocq_gguf *file = open_model(ctx, &m, CALLBACK);
        rocq_buffer buffer, slices;
        rocq_tensor slice;
        const simt_live before = simt_get_live();
        assert_ok(load(ctx, file, &desc, NULL, tensors, m.n, &buffer));
        const simt_live after = simt_get_live();
        const size_t host_bytes = after.host_bytes - before.host_bytes;
        assert_true(!gpu || host_bytes >= (size_t)buffer.size);
        check_all(ctx, &m, tensors);
        for (int32_t i = 0; i < m.n; i++) { // the second slice of two
            const int64_t ne[3] = {tensors[i].ne[0], tensors[i].ne[1], 2};
            assert_ok(rocq_buffer_alloc(ctx, &slices, 2 * m.tensors[i].size));
            assert_ok(rocq_tensor_init(&slice, &slices, 0, tensors[i].format, 3, ne));
            slice.layout = tensors[i].layout;
            assert_ok(rocq_copy_slice(ctx, &slice, 1, &tensors[i], 0));
            unsigned char *other = (unsigned char *)calloc(1, (size_t)m.tensors[i].size);
            assert_ok(rocq_upload(ctx, &tensors[i], other, m.tensors[i].size));
            assert_ok(rocq_copy_slice(ctx, &tensors[i], 0, &slice, 1));
            check_tensor(ctx, &m, i, &tensors[i]);
            free(other);
            assert_ok(rocq_buffer_free(ctx, &slices));
        }
        assert_ok(rocq_buffer_free(ctx, &buffer));
        rocq_gguf_close(&file);
        rocq_close(&ctx);
    }
    model_free(&m);
}

static void wrong_calls_are_refused(void **state) {
    (void)state;
    static model m;
    static rocq_tensor tensors[MAX_TENSORS];
    model_make(&m, 32, false);
    for (int gpu = 0; gpu < 2; gpu++) {
        rocq_ctx *ctx = open_ctx(gpu ? ROCQ_BACKEND_GPU : ROCQ_BACKEND_CPU, 1, 0);
        rocq_gguf *file = open_model(ctx, &m, CALLBACK);
        rocq_graph *graph;
        rocq_buffer buffer;
        static const rocq_gguf_load_desc bad[] = {
            {.piece_bytes = 511}, {.piece_bytes = -1}, {.piece_bytes = ((int64_t)1 << 28) + 1},
            {.n_pieces = 2}, {.n_pieces = -1}, {.n_pieces = 65}, {.n_names = -1},
            {.memory = ROCQ_MEMORY_HOST}, {.memory = (rocq_memory)-1}};
        for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
            assert_result(load(ctx, file, &bad[i], NULL, tensors, m.n, &buffer), ROCQ_E_ARGUMENT);
        }
        assert_result(rocq_gguf_load(NULL, file, NULL, tensors, &buffer), ROCQ_E_ARGUMENT);
        assert_result(rocq_gguf_load(ctx, NULL, NULL, tensors, &buffer), ROCQ_E_ARGUMENT);
        assert_result(rocq_gguf_load(ctx, file, NULL, NULL, &buffer), ROCQ_E_ARGUMENT);
        assert_result(rocq_gguf_load(ctx, file, NULL, tensors, NULL), ROCQ_E_ARGUMENT);
        assert_ok(rocq_graph_begin(ctx));
        assert_result(load(ctx, file, NULL, NULL, tensors, m.n, &buffer), ROCQ_E_STATE);
        assert_ok(rocq_graph_end(ctx, &graph));
        assert_ok(load(ctx, file, NULL, NULL, tensors, m.n, &buffer));
        rocq_gguf_close(&file);

        // A type that no format has: the last tensor's, 12 bytes before the end of its record.
        unsigned char *p = m.file;
        const char *last = m.names[m.n - 1];
        while (memcmp(p, last, strlen(last)) != 0) p++;
        p += strlen(last) + 4 + 8 * (size_t)m.tensors[m.n - 1].n_dims;
        const unsigned char type = *p;
        *p = 200;
        file = open_model(ctx, &m, SPAN);
        assert_result(load(ctx, file, NULL, NULL, tensors, m.n, &buffer), ROCQ_E_FORMAT);
        assert_non_null(strstr(rocq_error(ctx), last));
        const rocq_gguf_load_desc others = {.names = m.names, .n_names = m.n - 1};
        assert_ok(load(ctx, file, &others, NULL, tensors, m.n - 1, &buffer));
        *p = type;
        rocq_gguf_close(&file);
        rocq_close(&ctx);
    }
    model_free(&m);
}

// The context's own ring, before, during and after: loads leave it and its memory alone.
static void uploads_go_on_around_a_load(void **state) {
    (void)state;
    static model m;
    static rocq_tensor tensors[MAX_TENSORS];
    model_make(&m, 32, false);
    rocq_ctx *ctx = open_ctx(ROCQ_BACKEND_GPU, 2, 0);
    rocq_gguf *file = open_model(ctx, &m, SPAN);
    rocq_buffer memory, buffer;
    rocq_tensor x;
    const int64_t ne = 5000;
    float in[5000], out[5000];
    assert_ok(rocq_buffer_alloc(ctx, &memory, sizeof in));
    assert_ok(rocq_tensor_init(&x, &memory, 0, ROCQ_F32, 1, &ne));
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < 5000; k++) in[k] = (float)(i + k);
        assert_ok(rocq_upload(ctx, &x, in, sizeof in));
        assert_ok(load(ctx, file, NULL, NULL, tensors, m.n, &buffer));
        assert_ok(rocq_download(ctx, out, &x, sizeof out));
        assert_memory_equal(in, out, sizeof in);
        check_tensor(ctx, &m, i, &tensors[i]);
        assert_ok(rocq_buffer_free(ctx, &buffer));
    }
    rocq_gguf_close(&file);
    rocq_close(&ctx);
    model_free(&m);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, begin, nothing_is_left)
    const struct CMUnitTest tests[] = {
        TEST(every_source_loads_the_same),
        TEST(matrices_are_interleaved),
        TEST(unaligned_spans_are_copied_where_they_must),
        TEST(pieces_of_any_size_do),
        TEST(small_tensors_share_a_piece),
        TEST(names_choose_and_order),
        TEST(each_piece_can_be_the_last),
        TEST(each_read_can_fail),
        TEST(a_file_that_shrinks_is_an_io_error),
        TEST(every_runtime_call_may_fail),
        TEST(every_allocation_may_fail),
        TEST(the_budget_is_kept),
        TEST(pinned_memory_holds_the_same),
        TEST(wrong_calls_are_refused),
        TEST(uploads_go_on_around_a_load)};
    return cmocka_run_group_tests_name("load", tests, NULL, NULL);
}
