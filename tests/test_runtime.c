// What a GPU context does around its kernels: devices, memory, order, graphs, and all that can
// fail. The stand-in's runtime (tests/simt/hip.h) fails on demand and counts what is left behind.
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "simt/hip.h"
#include "simt/left.h"

// -- host memory, counted --

typedef struct host_count {
    int64_t blocks;
} host_count;

static void *counted_alloc(size_t size, void *user) {
    void *ptr = malloc(size);
    if (ptr) ((host_count *)user)->blocks++;
    return ptr;
}

static void counted_free(void *ptr, size_t size, void *user) {
    (void)size;
    ((host_count *)user)->blocks--;
    free(ptr);
}

static host_count host;

static rocq_desc gpu_desc(void) {
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_GPU, .n_threads = 1,
                            .allocator = {counted_alloc, counted_free, &host}};
    return desc;
}

static void print_failure(rocq_log_level level, const char *message, void *user) {
    (void)user;
    if (level == ROCQ_LOG_ERROR) print_message("# %s\n", message);
}

// What the log got, without INFO.
typedef struct log_count {
    int64_t n_errors, n_warnings;
    char error[512]; // the last
} log_count;

static void count_failures(rocq_log_level level, const char *message, void *user) {
    log_count *l = (log_count *)user;
    if (level == ROCQ_LOG_WARN) l->n_warnings++;
    if (level != ROCQ_LOG_ERROR) return;
    l->n_errors++;
    snprintf(l->error, sizeof l->error, "%s", message);
}

static rocq_ctx *open_gpu(const rocq_desc *desc) {
    rocq_ctx *ctx = NULL;
    rocq_desc loud = desc ? *desc : gpu_desc();
    loud.log = print_failure;
    const rocq_result result = rocq_open(&ctx, &loud);
    assert_int_equal(result, ROCQ_OK);
    ctx->desc.log = NULL;
    return ctx;
}

static int begin(void **state) {
    (void)state;
    simt_begin();
    host.blocks = 0;
    return 0;
}

// Nothing is left, here or there, and the runtime was never called wrongly.
static int nothing_is_left(void **state) {
    (void)state;
    return simt_check_left(host.blocks);
}

static rocq_tensor device_tensor(rocq_ctx *ctx, rocq_format format, int64_t ne0, int64_t ne1) {
    rocq_tensor t;
    rocq_buffer buffer;
    const int64_t ne[2] = {ne0, ne1};
    int64_t row;
    assert_int_equal(rocq_row_size(format, ne0, &row), ROCQ_OK);
    assert_int_equal(rocq_buffer_alloc(ctx, &buffer, row * ne1), ROCQ_OK);
    assert_int_equal(rocq_tensor_init(&t, &buffer, 0, format, 2, ne), ROCQ_OK);
    return t;
}

static uint32_t random_next(void) {
    static uint32_t state = 12345;
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

static float *random_floats(int64_t n) {
    float *v = (float *)malloc((size_t)n * sizeof *v);
    assert_non_null(v);
    for (int64_t i = 0; i < n; i++) v[i] = (float)random_next() / 8388608.0f - 1.0f;
    return v;
}

// -- devices --

static void one_device_is_found(void **state) {
    (void)state;
    rocq_ctx *ctx = open_gpu(NULL);
    rocq_info info;
    assert_int_equal(rocq_get_info(ctx, &info), ROCQ_OK);
    assert_int_equal(info.backend, ROCQ_BACKEND_GPU);
    assert_int_equal(info.gpu_result, ROCQ_OK);
    assert_string_equal(info.gpu_message, "");
    assert_string_equal(info.runtime, "linked");
    assert_string_equal(info.kernels, "linked");
    assert_string_equal(info.pci, "0000:03:00.0");
    assert_int_equal(info.device_bytes, 1 << 30);
    assert_true(info.n_units > 0);
    assert_int_equal(info.desc.dispatch_us, 1000);
    assert_int_equal(info.desc.device, 1); // the first, which a 0 has stood for
    assert_int_equal(rocq_sync(ctx), ROCQ_OK);
    rocq_close(&ctx);
    rocq_close(&ctx);
}

static void devices_are_chosen_by_number_and_address(void **state) {
    (void)state;
    static const struct {
        int32_t device;
        const char *pci, *found; // NULL: none
    } cases[] = {
        {1, NULL, "0000:03:00.0"}, {3, NULL, "0000:05:00.0"}, {4, NULL, NULL},
        {0, "0000:04:00.0", "0000:04:00.0"}, {0, "05:00.0", "0000:05:00.0"},
        {0, "0000:07:00.0", NULL}, {0, "5:00.0", NULL}, {0, "", NULL},
        {2, "0000:04:00.0", "0000:04:00.0"}, {1, "0000:04:00.0", NULL}};
    simt_set_devices(3);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        rocq_ctx *ctx;
        rocq_info info;
        rocq_desc desc = gpu_desc();
        desc.device = cases[i].device;
        desc.pci = cases[i].pci;
        assert_int_equal(rocq_open(&ctx, &desc), cases[i].found ? ROCQ_OK : ROCQ_E_NO_DEVICE);
        if (!cases[i].found) continue;
        rocq_get_info(ctx, &info);
        assert_string_equal(info.pci, cases[i].found);
        assert_int_equal(info.desc.device, cases[i].found[6] - '2'); // buses 03, 04 and 05
        rocq_close(&ctx);
    }
}

static void why_there_is_no_gpu_is_told(void **state) {
    (void)state;
    rocq_ctx *ctx;
    rocq_info info;
    rocq_desc desc = gpu_desc();
    simt_set_devices(0);
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_E_NO_DEVICE);
    assert_null(ctx);
    simt_set_devices(1);
    simt_set_selftest_error(1);
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_E_NO_DEVICE);
    for (int automatic = 0; automatic < 2; automatic++) {
        desc.prefer = automatic ? ROCQ_BACKEND_AUTO : ROCQ_BACKEND_GPU;
        desc.allow_fallback = !automatic;
        assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
        rocq_get_info(ctx, &info);
        assert_int_equal(info.backend, ROCQ_BACKEND_CPU);
        assert_int_equal(info.gpu_result, ROCQ_E_NO_DEVICE);
        assert_non_null(strstr(info.gpu_message, "self-test"));
        assert_non_null(strstr(info.gpu_message, "simt")); // the device's name
        assert_string_equal(rocq_error(ctx), "");
        rocq_close(&ctx);
    }
    simt_set_selftest_error(0);
    desc.device = -1;
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_E_ARGUMENT);
    desc.device = 0;
    desc.dispatch_us = -2;
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_E_ARGUMENT);
}

static void count_unlisted(rocq_log_level level, const char *message, void *user) {
    if (level == ROCQ_LOG_WARN && strstr(message, "has no figures of this chip")) ++*(int *)user;
}

// A chip of gfx11 that is newer than this rocq works, and is told apart from those with figures.
static void an_unlisted_chip_is_told(void **state) {
    (void)state;
    static const struct {
        int target;
        bool unlisted;
        const char *text;
    } chips[] = {{0x1153, false, " gfx1153, "}, {0x1154, true, " gfx1154 (unlisted), "},
                 {0, false, ", "}};
    for (size_t i = 0; i < sizeof chips / sizeof chips[0]; i++) {
        rocq_ctx *ctx;
        rocq_info info;
        rocq_desc desc = gpu_desc();
        int warned = 0;
        desc.log = count_unlisted;
        desc.log_user = &warned;
        simt_set_target(chips[i].target);
        assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
        memset(&info, 0xff, sizeof info);
        assert_int_equal(rocq_get_info(ctx, &info), ROCQ_OK);
        assert_int_equal(info.target, chips[i].target);
        assert_int_equal(info.target_unlisted, chips[i].unlisted);
        assert_non_null(strstr(info.device, chips[i].text));
        assert_int_equal(warned, chips[i].unlisted);
        // No bandwidth is claimed where none is known.
        rocq_profile_desc peaks;
        memset(&peaks, 0, sizeof peaks);
        rocq__profile_peaks(ctx, &peaks);
        assert_int_equal(peaks.bytes_per_s > 0.0, !chips[i].unlisted);
        rocq_close(&ctx);
    }
    simt_set_target(0);
}

static void put_u64(unsigned char *p, uint64_t v) {
    for (int i = 0; i < 8; i++) p[i] = (unsigned char)(v >> 8 * i);
}

// A bundle of n entries of 16 bytes each, whose contents the stand-in does not look at.
static int64_t make_bundle(unsigned char *p, int n) {
    int64_t at = 32;
    memset(p, 0, 1024);
    memcpy(p, "__CLANG_OFFLOAD_BUNDLE__", 24);
    put_u64(p + 24, (uint64_t)n);
    for (int i = 0; i < n; i++, at += 24 + 3) {
        put_u64(p + at, (uint64_t)(512 + 16 * i));
        put_u64(p + at + 8, 16);
        put_u64(p + at + 16, 3);
    }
    return 512 + 16 * n;
}

static void code_objects_are_read_with_care(void **state) {
    (void)state;
    unsigned char image[1024];
    rocq_ctx *ctx;
    rocq_info info;
    rocq_desc desc = gpu_desc();
    const int64_t size = make_bundle(image, 2);
    desc.kernels_data = image;
    desc.kernels_size = size;
    ctx = open_gpu(&desc);
    rocq_get_info(ctx, &info);
    assert_string_equal(info.kernels, "memory");
    rocq_close(&ctx);

    const char *path = "rocq_test_kernels.co";
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(image, 1, (size_t)size, file), size);
    fclose(file);
    rocq_desc from_file = gpu_desc();
    from_file.kernels_path = path;
    ctx = open_gpu(&from_file);
    rocq_get_info(ctx, &info);
    assert_string_equal(info.kernels, path);
    rocq_close(&ctx);
    remove(path);
    assert_int_equal(rocq_open(&ctx, &from_file), ROCQ_E_NO_KERNELS);
    log_count failures = {0};
    from_file.kernels_path = "no\x1b[1m\nkernels";
    from_file.log = count_failures;
    from_file.log_user = &failures;
    assert_int_equal(rocq_open(&ctx, &from_file), ROCQ_E_NO_KERNELS);
    assert_non_null(strstr(failures.error, "'no?[1m?kernels'"));
    file = fopen("rocq_test\x1b.co", "wb"); // too short
    assert_non_null(file);
    assert_int_equal(fwrite(image, 1, 32, file), 32);
    fclose(file);
    from_file.kernels_path = "rocq_test\x1b.co";
    assert_int_equal(rocq_open(&ctx, &from_file), ROCQ_E_NO_KERNELS);
    assert_non_null(strstr(failures.error, "rocq_test?.co: not a whole"));
    remove("rocq_test\x1b.co");
    char end[6]; // as rocq_info has it of a long path: from a whole character on
    rocq__copy_end(end, sizeof end, "/long/\xc3\xa9\xc3\xa9.co");
    assert_string_equal(end, "\xc3\xa9.co");
    rocq__copy_end(end, sizeof end, "/\xc3\xa9\xc3\xa9\xc3\xa9");
    assert_string_equal(end, "\xc3\xa9\xc3\xa9");

    for (int64_t cut = 1; cut < size; cut++) { // a file that ends early
        unsigned char *part = (unsigned char *)malloc((size_t)cut);
        assert_non_null(part);
        memcpy(part, image, (size_t)cut);
        desc.kernels_data = part;
        desc.kernels_size = cut;
        assert_int_equal(rocq_open(&ctx, &desc), ROCQ_E_NO_KERNELS);
        free(part);
    }
    static const struct { int at; uint64_t value; } bad[] = {
        {0, 0}, {24, 1000}, {24, UINT64_MAX}, {32, UINT64_MAX}, {40, UINT64_MAX}, {48, UINT64_MAX},
        {40, 600}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        desc.kernels_data = image;
        desc.kernels_size = make_bundle(image, 2);
        put_u64(image + bad[i].at, bad[i].value);
        assert_int_equal(rocq_open(&ctx, &desc), ROCQ_E_NO_KERNELS);
    }
    desc.kernels_size = make_bundle(image, 2);
    simt_set_image_error(209); // no image for this device
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_E_NO_KERNELS);
    simt_set_image_error(0);
    desc.kernels_size = 0;
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_E_ARGUMENT);
    desc.kernels_size = size;
    desc.kernels_path = "x";
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_E_ARGUMENT);

    memset(image, 0, sizeof image); // an ELF with two sections, the second without bytes
    memcpy(image, "\177ELF\2\1", 6);
    put_u64(image + 40, 64);
    put_u64(image + 56, (uint64_t)2 << 32);
    put_u64(image + 64 + 24, 192);
    put_u64(image + 64 + 32, 100);
    put_u64(image + 128, (uint64_t)8 << 32);
    put_u64(image + 128 + 32, 1 << 20);
    desc.kernels_path = NULL;
    for (int64_t n = 64; n < 300; n++) {
        desc.kernels_size = n;
        assert_int_equal(rocq_open(&ctx, &desc), n < 292 ? ROCQ_E_NO_KERNELS : ROCQ_OK);
        rocq_close(&ctx);
    }
}

// -- memory and order --

static void copies_of_any_size_come_back(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 15, 1000, 262144, 262145, 2500000};
    rocq_ctx *ctx = open_gpu(NULL);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const int64_t n = sizes[i], bytes = n * 4;
        rocq_tensor t = device_tensor(ctx, ROCQ_F32, n, 1);
        float *in = random_floats(n), *out = random_floats(n),
              *copy = (float *)malloc((size_t)bytes);
        memcpy(copy, in, (size_t)bytes);
        assert_int_equal(rocq_upload(ctx, &t, in, bytes), ROCQ_OK);
        memset(in, 0xff, (size_t)bytes); // never read after the call
        assert_int_equal(rocq_download(ctx, out, &t, bytes), ROCQ_OK);
        assert_memory_equal(out, copy, (size_t)bytes);
        assert_int_equal(rocq_upload(ctx, &t, in, bytes - 4), ROCQ_E_SHAPE);
        assert_int_equal(rocq_upload(ctx, &t, NULL, bytes), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_buffer_free(ctx, &t.buffer), ROCQ_OK);
        free(in);
        free(out);
        free(copy);
    }
    // Small uploads, more of them than the ring holds at once, each seen by the op after it.
    rocq_tensor x = device_tensor(ctx, ROCQ_F32, 1024, 1),
                sum = device_tensor(ctx, ROCQ_F32, 1024, 1);
    float *values = random_floats(1024), *total = (float *)calloc(1024, 4),
          *out = random_floats(1024);
    assert_int_equal(rocq_upload(ctx, &sum, total, 4096), ROCQ_OK);
    const rocq_binary_params add = {.y = &sum, .a = &sum, .b = &x};
    for (int i = 0; i < 1500; i++) {
        for (int k = 0; k < 1024; k++) total[k] += (values[k] = (float)((i + k) % 7));
        assert_int_equal(rocq_upload(ctx, &x, values, 4096), ROCQ_OK);
        assert_int_equal(rocq_add(ctx, &add), ROCQ_OK);
    }
    assert_int_equal(rocq_download(ctx, out, &sum, 4096), ROCQ_OK);
    assert_memory_equal(out, total, 4096);
    free(values);
    free(total);
    free(out);
    rocq_close(&ctx);
}

static void planar_tensors_decode_to_the_same_bits(void **state) {
    (void)state;
    rocq_ctx *ctx = open_gpu(NULL);
    static const rocq_format formats[] = {
#define ROCQ_X(NAME, name, id, elems, bytes) ROCQ_##NAME,
        ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
    };
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++) {
        const rocq_format_info *info = rocq_get_format_info(formats[f]);
        const int64_t n = formats[f] == ROCQ_Q4_0 ? 2048 * 1024 : 256 * 9, rows = n / 256;
        if (rocq_quantize(formats[f], NULL, NULL, 0, 256, NULL) != ROCQ_OK) continue; // only read
        int64_t size;
        rocq_row_size(formats[f], n, &size);
        float *values = random_floats(n), *want = random_floats(n), *got = random_floats(n);
        void *blocks = malloc((size_t)size);
        assert_int_equal(rocq_quantize(formats[f], blocks, values, rows, 256, NULL), ROCQ_OK);
        assert_int_equal(rocq_dequantize(formats[f], want, blocks, n), ROCQ_OK);
        rocq_tensor x = device_tensor(ctx, formats[f], 256, rows),
                    y = device_tensor(ctx, ROCQ_F32, 256, rows);
        if (info->block_elems > 1) x.layout = ROCQ_LAYOUT_PLANAR;
        assert_int_equal(rocq_upload(ctx, &x, blocks, size), ROCQ_OK);
        const rocq_cast_params cast = {.y = &y, .x = &x};
        assert_int_equal(rocq_cast(ctx, &cast), ROCQ_OK);
        assert_int_equal(rocq_download(ctx, got, &y, n * 4), ROCQ_OK);
        assert_memory_equal(got, want, (size_t)n * 4);
        if (info->block_elems > 1) {
            assert_int_equal(rocq_download(ctx, blocks, &x, size), ROCQ_E_UNSUPPORTED);
        }
        assert_int_equal(rocq_buffer_free(ctx, &x.buffer), ROCQ_OK);
        assert_int_equal(rocq_buffer_free(ctx, &y.buffer), ROCQ_OK);
        free(values);
        free(want);
        free(got);
        free(blocks);
    }
    rocq_close(&ctx);
}

static void budget_and_exhaustion_leave_the_context_usable(void **state) {
    (void)state;
    rocq_desc desc = gpu_desc();
    rocq_buffer a, b;
    rocq_stats stats;
    desc.memory_budget = 1 << 20;
    desc.scratch_bytes = 1 << 18;
    rocq_ctx *ctx = open_gpu(&desc);
    assert_int_equal(rocq_buffer_alloc(ctx, &a, 1 << 19), ROCQ_OK);
    assert_int_equal(rocq_buffer_alloc(ctx, &b, 1 << 19), ROCQ_E_BUDGET);
    assert_int_equal(rocq_reserve(ctx, 1 << 20), ROCQ_E_BUDGET);
    assert_int_equal(rocq_get_stats(ctx, &stats), ROCQ_OK);
    assert_int_equal(stats.scratch_bytes, 1 << 18);
    assert_int_equal(rocq_reserve(ctx, 1 << 19), ROCQ_OK); // grows into what is left
    assert_int_equal(rocq_buffer_free(ctx, &a), ROCQ_OK);
    assert_int_equal(rocq_buffer_alloc(ctx, &a, 1 << 19), ROCQ_OK);
    assert_int_equal(a.device.address % 256, 0);
    rocq_close(&ctx);

    simt_set_memory(1 << 20);
    desc.memory_budget = 0;
    ctx = open_gpu(&desc);
    assert_int_equal(rocq_buffer_alloc(ctx, &a, 1 << 20), ROCQ_E_MEMORY);
    assert_int_equal(rocq_reserve(ctx, 1 << 20), ROCQ_E_MEMORY);
    assert_int_equal(rocq_buffer_alloc(ctx, &a, INT64_MAX), ROCQ_E_MEMORY);
    assert_int_equal(rocq_buffer_alloc(ctx, &a, 1 << 18), ROCQ_OK);
    rocq_tensor t;
    const int64_t ne = 100;
    float v[100] = {1.0f}, w[100];
    assert_int_equal(rocq_tensor_init(&t, &a, 0, ROCQ_F32, 1, &ne), ROCQ_OK);
    assert_int_equal(rocq_upload(ctx, &t, v, sizeof v), ROCQ_OK);
    assert_int_equal(rocq_download(ctx, w, &t, sizeof w), ROCQ_OK);
    assert_memory_equal(v, w, sizeof v);
    rocq_close(&ctx);
}

// Scratch that grows is never there twice, not even while ops that use the old block are yet to run;
// and where it cannot grow, graphs that were captured over the old block do without.
static void growing_scratch_takes_the_place_of_the_old(void **state) {
    (void)state;
    simt_set_work(SIMT_LATEST); // memory that is freed too early is found
    rocq_desc desc = gpu_desc();
    desc.memory_budget = 1 << 20;
    rocq_ctx *ctx = open_gpu(&desc);
    const int64_t device_before = (int64_t)simt_get_live().device_bytes;
    rocq_tensor x = device_tensor(ctx, ROCQ_F32, 256, 2), w = device_tensor(ctx, ROCQ_Q8_0, 256, 9),
                y = device_tensor(ctx, ROCQ_F32, 9, 2);
    const int64_t buffers = ctx->budget_used;
    float *v = random_floats(256 * 9), want[18], got[18];
    unsigned char blocks[9 * 272];
    assert_int_equal(rocq_quantize(ROCQ_Q8_0, blocks, v, 9, 256, NULL), ROCQ_OK);
    assert_int_equal(rocq_upload(ctx, &w, blocks, sizeof blocks), ROCQ_OK);
    assert_int_equal(rocq_upload(ctx, &x, v, 2048), ROCQ_OK);
    // The rows of w are repacked into scratch memory first.
    const rocq_matmul_params mm = {.y = &y, .w = &w, .x = &x, .precision = ROCQ_PRECISION_INT8};
    assert_int_equal(rocq_matmul(ctx, &mm), ROCQ_OK);
    assert_true(ctx->stats.scratch_bytes > 0);
    assert_int_equal(rocq_download(ctx, want, &y, sizeof want), ROCQ_OK);
    ctx->stats.peak_bytes = ctx->stats.live_bytes;
    const int64_t others = ctx->stats.live_bytes - buffers - ctx->stats.scratch_bytes;
    for (int64_t size = 400000; size <= 1000000; size += 300000) {
        memset(got, 0xff, sizeof got);
        assert_int_equal(rocq_upload(ctx, &y, got, sizeof got), ROCQ_OK);
        assert_int_equal(rocq_matmul(ctx, &mm), ROCQ_OK); // is still to run
        assert_int_equal(rocq_reserve(ctx, size), ROCQ_OK);
        assert_int_equal(ctx->budget_used, buffers + size);
        assert_int_equal(rocq_download(ctx, got, &y, sizeof got), ROCQ_OK);
        assert_memory_equal(got, want, sizeof want);
    }
    assert_true(ctx->stats.peak_bytes <= others + desc.memory_budget);
    rocq_graph *graph;
    assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
    assert_int_equal(rocq_matmul(ctx, &mm), ROCQ_OK);
    assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);

    // No budget: nothing changes. No memory: the old block is gone, and the graph knows.
    const int64_t scratch = ctx->stats.scratch_bytes;
    assert_int_equal(rocq_reserve(ctx, 1 << 20), ROCQ_E_BUDGET);
    assert_int_equal(ctx->stats.scratch_bytes, scratch);
    ctx->desc.memory_budget = 0;
    for (int again = 0; again < 2; again++) { // the second time there is none to begin with
        assert_int_equal(rocq_reserve(ctx, (int64_t)1 << 40), ROCQ_E_MEMORY);
        assert_int_equal(ctx->stats.scratch_bytes, 0);
        assert_int_equal(ctx->budget_used, buffers);
        assert_int_equal(simt_get_live().device_bytes, device_before + buffers);
    }
    memset(got, 0xff, sizeof got);
    assert_int_equal(rocq_upload(ctx, &y, got, sizeof got), ROCQ_OK);
    assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK);
    assert_true(ctx->stats.scratch_bytes > 0 && ctx->stats.scratch_bytes < scratch);
    assert_int_equal(ctx->budget_used, buffers + ctx->stats.scratch_bytes);
    assert_int_equal(rocq_download(ctx, got, &y, sizeof got), ROCQ_OK);
    assert_memory_equal(got, want, sizeof want);
    rocq_graph_destroy(ctx, &graph);
    free(v);
    rocq_close(&ctx);
}

static void steady_state_allocates_nothing(void **state) {
    (void)state;
    rocq_ctx *ctx = open_gpu(NULL);
    rocq_tensor x = device_tensor(ctx, ROCQ_F32, 256, 3), w = device_tensor(ctx, ROCQ_Q4_0, 256, 9),
                y = device_tensor(ctx, ROCQ_F32, 9, 3);
    float *v = random_floats(768), out[27];
    const rocq_matmul_params mm = {.y = &y, .w = &w, .x = &x};
    rocq_stats before, after;
    simt_live live;
    void *zeros = calloc(1, 9 * 144);
    assert_int_equal(rocq_upload(ctx, &w, zeros, 9 * 144), ROCQ_OK);
    for (int i = 0; i < 20; i++) {
        assert_int_equal(rocq_upload(ctx, &x, v, 768 * 4), ROCQ_OK);
        assert_int_equal(rocq_matmul(ctx, &mm), ROCQ_OK);
        assert_int_equal(rocq_download(ctx, out, &y, sizeof out), ROCQ_OK);
        assert_int_equal(rocq_sync(ctx), ROCQ_OK);
        rocq_get_stats(ctx, &after);
        const simt_live now = simt_get_live();
        if (i > 0) {
            assert_int_equal(before.n_allocs, after.n_allocs);
            assert_int_equal(before.live_bytes, after.live_bytes);
            assert_int_equal(live.device_blocks + live.host_blocks,
                             now.device_blocks + now.host_blocks);
        }
        before = after;
        live = now;
    }
    free(zeros);
    free(v);
    rocq_close(&ctx);
}

static void long_work_is_cut_and_stays_the_same(void **state) {
    (void)state;
    float *v = random_floats(256 * 4096), *first = random_floats(256 * 4096),
          *out = random_floats(256 * 4096);
    int64_t launches[2];
    for (int i = 0; i < 2; i++) {
        rocq_desc desc = gpu_desc();
        rocq_stats stats;
        desc.dispatch_us = i == 0 ? -1 : 1;
        rocq_ctx *ctx = open_gpu(&desc);
        rocq_tensor x = device_tensor(ctx, ROCQ_F32, 256, 4096);
        const rocq_norm_params norm = {.y = &x, .x = &x};
        assert_int_equal(rocq_upload(ctx, &x, v, 256 * 4096 * 4), ROCQ_OK);
        assert_int_equal(rocq_rmsnorm(ctx, &norm), ROCQ_OK);
        assert_int_equal(rocq_download(ctx, i == 0 ? first : out, &x, 256 * 4096 * 4), ROCQ_OK);
        rocq_get_stats(ctx, &stats);
        launches[i] = stats.n_launches;
        rocq_close(&ctx);
    }
    assert_int_equal(launches[0], 1);
    assert_true(launches[1] > 4);
    assert_memory_equal(first, out, 256 * 4096 * 4);
    free(v);
    free(first);
    free(out);
}

// -- beside a renderer --

// Opens a context, and checks that what rocq_get_info says of its queue is so.
static rocq_info open_shared(rocq_desc *desc, rocq_ctx **ctx) {
    rocq_info info;
    simt_stream made;
    desc->prefer = ROCQ_BACKEND_GPU;
    *ctx = open_gpu(desc);
    assert_int_equal(rocq_get_info(*ctx, &info), ROCQ_OK);
    assert_int_equal(simt_get_live().streams, 1); // the plain queue is gone
    assert_true(simt_get_stream(&made));
    assert_int_equal(info.max_units, made.n_units < 0 ? info.n_units : made.n_units);
    assert_int_equal(info.priority, made.priority > 0   ? ROCQ_PRIORITY_LOW
                                    : made.priority < 0 ? ROCQ_PRIORITY_HIGH
                                                        : ROCQ_PRIORITY_NORMAL);
    return info;
}

static void is_ignored(const rocq_info *info, const char *what, const char *why) {
    if (strstr(info->ignored, what) && strstr(info->ignored, why)) return;
    fail_msg("ignored: '%s', expected '%s ... %s'", info->ignored, what, why);
}

static void presets_are_a_queue_and_limits(void **state) {
    (void)state;
    static const struct {
        rocq_sharing sharing;
        rocq_priority priority;
        int32_t max_waves, dispatch_us;
    } presets[] = {{ROCQ_SHARING_BALANCED, ROCQ_PRIORITY_NORMAL, 16, 1000},
                   {ROCQ_SHARING_GRAPHICS_FIRST, ROCQ_PRIORITY_LOW, 8, 500},
                   {ROCQ_SHARING_COMPUTE_FIRST, ROCQ_PRIORITY_HIGH, 16, 5000}};
    rocq_ctx *ctx;
    simt_stream made;
    simt_set_target(0x1100);
    for (int i = 0; i < 3; i++) {
        for (int own = 0; own < 2; own++) { // fields that are set go before the preset
            rocq_desc desc = gpu_desc();
            desc.sharing = presets[i].sharing;
            if (own) {
                desc.priority = ROCQ_PRIORITY_NORMAL;
                desc.max_waves = 10;
                desc.dispatch_us = -1;
            }
            const rocq_info info = open_shared(&desc, &ctx);
            assert_int_equal(info.desc.sharing, presets[i].sharing);
            assert_int_equal(info.priority, own ? ROCQ_PRIORITY_NORMAL : presets[i].priority);
            assert_int_equal(info.desc.priority, info.priority);
            assert_int_equal(info.max_waves, own ? 10 : presets[i].max_waves);
            assert_int_equal(info.desc.dispatch_us, own ? -1 : presets[i].dispatch_us);
            assert_int_equal(info.n_units, 8); // HIP counts those of RDNA in pairs
            assert_int_equal(info.max_units, 8);
            assert_string_equal(info.ignored, "");
            assert_true(simt_get_stream(&made));
            assert_int_equal(made.flags, ROCQ_HIP_NON_BLOCKING);
            rocq_close(&ctx);
        }
    }
    simt_set_target(0);
    rocq_desc bad[5] = {gpu_desc(), gpu_desc(), gpu_desc(), gpu_desc(), gpu_desc()};
    bad[0].sharing = (rocq_sharing)3;
    bad[1].priority = (rocq_priority)4;
    bad[2].max_units = -2;
    bad[3].max_waves = -2;
    bad[4].priority = (rocq_priority)-1;
    for (int i = 0; i < 5; i++) assert_int_equal(rocq_open(&ctx, &bad[i]), ROCQ_E_ARGUMENT);
    const rocq_desc on_cpu = {.prefer = ROCQ_BACKEND_CPU, .sharing = ROCQ_SHARING_GRAPHICS_FIRST};
    rocq_info info;
    assert_int_equal(rocq_open(&ctx, &on_cpu), ROCQ_OK);
    assert_int_equal(rocq_get_info(ctx, &info), ROCQ_OK);
    assert_int_equal(info.priority, ROCQ_PRIORITY_DEFAULT);
    assert_int_equal(info.max_units, 0);
    assert_int_equal(info.max_waves, 0);
    assert_string_equal(info.ignored, "");
    rocq_close(&ctx);
}

static void a_mask_has_whole_wgps(void **state) {
    (void)state;
    static const int32_t asked[] = {1, 2, 3, 4, 5, -1}, got[] = {2, 2, 2, 4, 4, 4};
    for (int i = 0; i < 6; i++) { // of 4 compute units
        rocq_ctx *ctx;
        simt_stream made;
        rocq_desc desc = gpu_desc();
        desc.max_units = asked[i];
        const rocq_info info = open_shared(&desc, &ctx);
        assert_int_equal(info.max_units, got[i]);
        assert_string_equal(info.ignored, "");
        assert_true(simt_get_stream(&made));
        assert_int_equal(made.first_units, got[i] == 4 ? 0 : 3);
        rocq_close(&ctx);
    }
}

// What the runtime does not have, or what fails, is told, and the context works without.
static void what_is_ignored_is_told(void **state) {
    (void)state;
    static const char *const missing[] = {"hipStreamCreateWithPriority",
                                          "hipDeviceGetStreamPriorityRange"};
    rocq_ctx *ctx;
    rocq_desc desc = gpu_desc();
    rocq_info info;
    desc.sharing = ROCQ_SHARING_GRAPHICS_FIRST;
    desc.max_waves = -1;
    for (int i = 0; i < 2; i++) {
        simt_set_missing(missing[i]);
        info = open_shared(&desc, &ctx);
        is_ignored(&info, "priority low", missing[i]);
        assert_int_equal(info.desc.priority, ROCQ_PRIORITY_LOW); // as it was wanted
        assert_int_equal(info.priority, ROCQ_PRIORITY_NORMAL);
        rocq_close(&ctx);
    }
    simt_set_missing("hipExtStreamCreateWithCUMask");
    desc.max_units = 2;
    info = open_shared(&desc, &ctx);
    is_ignored(&info, "max_units 2", "hipExtStreamCreateWithCUMask");
    assert_int_equal(info.priority, ROCQ_PRIORITY_LOW);
    rocq_close(&ctx);
    simt_set_missing(NULL);
    info = open_shared(&desc, &ctx); // both: a queue with a mask has no priority
    is_ignored(&info, "priority low", "max_units");
    assert_int_equal(info.max_units, 2);
    rocq_close(&ctx);
    desc.max_units = 0;
    simt_set_priorities(0, 0); // as where the driver knows one priority
    info = open_shared(&desc, &ctx);
    is_ignored(&info, "priority low", "none below normal");
    rocq_close(&ctx);
    desc.priority = ROCQ_PRIORITY_HIGH;
    info = open_shared(&desc, &ctx);
    is_ignored(&info, "priority high", "none above normal");
    rocq_close(&ctx);
    simt_set_priorities(1, -1);
    desc.max_waves = 8; // of a chip that is not known
    info = open_shared(&desc, &ctx);
    is_ignored(&info, "max_waves 8", "chip");
    assert_int_equal(info.max_waves, 16);
    rocq_close(&ctx);
    int n_told = 0;
    for (int mask = 0; mask < 2; mask++) {
        const char *call = mask ? "CUMask failed" : "WithPriority failed";
        for (int64_t at = 1;; at++) { // each call of the runtime fails once
            rocq_desc d = gpu_desc();
            const int64_t calls = simt_calls();
            d.priority = mask ? ROCQ_PRIORITY_DEFAULT : ROCQ_PRIORITY_HIGH;
            d.max_units = mask ? 2 : 0;
            simt_fail_once(at, 1);
            const rocq_result result = rocq_open(&ctx, &d);
            const bool all = simt_calls() - calls < at;
            simt_fail_at(0, 0);
            rocq_close(&ctx);
            assert_int_equal(simt_live_sum(), 0);
            if (all) break;
            if (result != ROCQ_OK) continue;
            simt_fail_once(at, 1); // the same again, to be looked at
            info = open_shared(&d, &ctx);
            simt_fail_at(0, 0);
            const bool took = mask ? info.max_units <= 2 : info.priority == ROCQ_PRIORITY_HIGH;
            assert_int_equal(took, info.ignored[0] == '\0');
            n_told += strstr(info.ignored, call) != NULL;
            assert_int_equal(rocq_sync(ctx), ROCQ_OK);
            rocq_close(&ctx);
        }
    }
    assert_int_equal(n_told, 2);
}

// The least or the most LDS that a matvec (or a matvec_row) has of its own, as compiled for gfx11.
static int32_t own_lds(bool row, bool low, bool most) {
    int32_t found = -1;
    char line[256];
    FILE *table = fopen("tests/gfx11/kernels.tsv", "r");
    assert_non_null(table);
    while (fgets(line, sizeof line, table)) {
        int lds;
        if (sscanf(line, "matvec_%*s %d", &lds) != 1) continue;
        if ((strncmp(line, "matvec_row_", 11) == 0) != row) continue;
        if ((strstr(line, "_low") != NULL) != low) continue;
        if (found < 0 || (most ? lds > found : lds < found)) found = lds;
    }
    fclose(table);
    assert_true(found > 0);
    return found;
}

// So much LDS that by the rule of occupancy just as many waves as wanted fit.
static void waves_are_limited_by_lds(void **state) {
    (void)state;
    rocq_ctx *ctx;
    int64_t last = INT64_MAX;
    simt_set_target(0x1100);
    for (int32_t waves = 4; waves <= 14; waves += 2) {
        rocq_desc desc = gpu_desc();
        desc.max_waves = waves;
        const rocq_info info = open_shared(&desc, &ctx);
        assert_int_equal(info.max_waves, waves);
        for (int i = 0; i < 8; i++) {
            const bool row = i / 2 % 2 == 1, low = i >= 4;
            const int kernel = low   ? row ? ROCQ_K_matvec_row_low : ROCQ_K_matvec_int8_low_n1
                               : row ? ROCQ_K_matvec_row_q4_0
                                     : ROCQ_K_matvec_f32_f32_n1;
            const int32_t own = own_lds(row, low, i % 2 == 1);
            const int32_t granted = (int32_t)rocq__lds_of(ctx->gpu, kernel, 256);
            const rocq_occupancy_params p = {.target = 0x1100, .vgprs = 64, .threads = 256,
                                             .lds_bytes = own + granted};
            assert_true(own <= (row ? ROCQ_K_MATVEC_ROW_LDS : ROCQ_K_MATVEC_LDS));
            rocq_occupancy o;
            assert_int_equal(rocq_get_occupancy(&p, &o), ROCQ_OK);
            if (o.waves != waves) fail_msg("%d waves, own LDS %d: %g", waves, own, o.waves);
        }
        // A block of attention_step has half the waves.
        for (int i = 0; i < 2; i++) {
            const int kernel = i ? ROCQ_K_attention_step_128 : ROCQ_K_attention_step_64;
            const rocq_occupancy_params p = {
                .target = 0x1100, .vgprs = 64, .threads = 128,
                .lds_bytes = (i ? 4400 : 3760) + (int32_t)rocq__lds_of(ctx->gpu, kernel, 128)};
            rocq_occupancy o;
            assert_int_equal(rocq_get_occupancy(&p, &o), ROCQ_OK);
            if (o.waves != waves / 2) fail_msg("attention_step at %d waves: %g", waves, o.waves);
        }
        // Attention is cut in as many of them as fit on all units at once, and at most two a unit.
        const int64_t q_ne[3] = {128, 1, 1}, kv_ne[3] = {128, 1, 2048};
        rocq_tensor q = device_tensor(ctx, ROCQ_F32, 128, 1),
                    out = device_tensor(ctx, ROCQ_F32, 128, 1),
                    kv = device_tensor(ctx, ROCQ_F16, 128, 2048);
        assert_int_equal(rocq_tensor_reshape(&q, &q, 3, q_ne), ROCQ_OK);
        assert_int_equal(rocq_tensor_reshape(&out, &out, 3, q_ne), ROCQ_OK);
        assert_int_equal(rocq_tensor_reshape(&kv, &kv, 3, kv_ne), ROCQ_OK);
        const rocq_attention_params attention = {.out = &out, .q = &q, .k = &kv, .v = &kv};
        const rocq__attention_grid g = rocq__attention_cut(ctx, &attention);
        assert_int_equal(g.kernel, ROCQ_K_attention_step_128);
        assert_int_equal(g.runs, info.n_units * (waves < 8 ? waves : 8) / 4);
        assert_true(ctx->gpu->block_lds < last); // with more of it fewer fit
        last = ctx->gpu->block_lds;
        rocq_close(&ctx);
    }
    // Kernels that are not limited, such as norm, ask for none.
    rocq_desc desc = gpu_desc();
    desc.max_waves = 8;
    open_shared(&desc, &ctx);
    rocq_tensor x = device_tensor(ctx, ROCQ_F32, 64, 1), w = device_tensor(ctx, ROCQ_F32, 64, 8),
                y = device_tensor(ctx, ROCQ_F32, 8, 1);
    const rocq_norm_params norm = {.y = &x, .x = &x};
    const rocq_matmul_params mm = {.y = &y, .w = &w, .x = &x, .precision = ROCQ_PRECISION_F32};
    assert_int_equal(rocq_rmsnorm(ctx, &norm), ROCQ_OK);
    assert_int_equal(rocq_matmul(ctx, &mm), ROCQ_OK);
    assert_int_equal(rocq_sync(ctx), ROCQ_OK);
    assert_int_equal(simt_get_lds("matvec_f32_f32_n1"),
                     ctx->gpu->block_lds - ROCQ_K_MATVEC_LDS);
    assert_int_equal(simt_get_lds("norm"), 0);
    rocq_close(&ctx);
    simt_set_target(0);
}

// -- bad input --

static void foreign_and_crooked_tensors_are_refused(void **state) {
    (void)state;
    rocq_ctx *ctx = open_gpu(NULL), *cpu;
    const rocq_desc on_cpu = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1};
    float memory[64] = {0};
    const int64_t ne[2] = {32, 1};
    rocq_tensor x = device_tensor(ctx, ROCQ_F32, 32, 2), y = device_tensor(ctx, ROCQ_F32, 32, 2);
    rocq_tensor t, onhost;
    rocq_scale_params p = {.y = &y, .x = &t, .scale = 1.0f};
    assert_int_equal(rocq_open(&cpu, &on_cpu), ROCQ_OK);
    assert_int_equal(rocq_tensor_from_host(&onhost, memory, ROCQ_F32, 2, ne), ROCQ_OK);
    t = x;
    assert_int_equal(rocq_scale(ctx, &p), ROCQ_OK);
    assert_int_equal(rocq_scale(cpu, &p), ROCQ_E_ARGUMENT); // device memory on the CPU
    assert_null(rocq_tensor_data(&x));
    p.x = p.y = &onhost;
    assert_int_equal(rocq_scale(ctx, &p), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_upload(ctx, &onhost, memory, 128), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_download(ctx, memory, &onhost, 128), ROCQ_E_ARGUMENT);
    p.x = &t;
    p.y = &y;
    t.buffer.host = memory; // both
    assert_int_equal(rocq_scale(ctx, &p), ROCQ_E_ARGUMENT);
    t = x;
    t.buffer.device.address = 0;
    assert_int_equal(rocq_scale(ctx, &p), ROCQ_E_ARGUMENT);
    t = x;
    t.ne[1] = 1;
    assert_int_equal(rocq_scale(ctx, &p), ROCQ_E_SHAPE);
    t.offset = 2;
    assert_int_equal(rocq_scale(ctx, &p), ROCQ_E_ALIGNMENT);
    t = x;
    t.offset = 4;
    assert_int_equal(rocq_scale(ctx, &p), ROCQ_E_BOUNDS);
    t = x;
    t.buffer = rocq_buffer_from_device(UINT64_MAX - 100, 256);
    assert_int_equal(rocq_scale(ctx, &p), ROCQ_E_OVERFLOW);
    t = x;
    t.ne[0] = (int64_t)INT32_MAX + 1; // one dimension too long for a kernel
    t.buffer.size = INT64_MAX - (int64_t)(t.buffer.device.address & INT64_MAX);
    t.ne[1] = 1;
    assert_int_equal(rocq_scale(ctx, &p), ROCQ_E_UNSUPPORTED);
    t = y;
    t.ne[1] = 1;
    t.offset = 64; // y on the second half of x's row
    y.ne[1] = 1;
    assert_int_equal(rocq_scale(ctx, &p), ROCQ_E_ARGUMENT);

    // Planar: only where it is taken, whole, aligned, of a block format.
    rocq_tensor w = device_tensor(ctx, ROCQ_Q8_0, 64, 4), view;
    const int64_t start[4] = {0, 1, 0, 0}, box[4] = {64, 2, 1, 1};
    const int32_t axes[4] = {0, 2, 1, 3};
    rocq_tensor f = device_tensor(ctx, ROCQ_F32, 64, 4);
    rocq_cast_params cast = {.y = &f, .x = &view};
    w.layout = ROCQ_LAYOUT_PLANAR;
    assert_int_equal(rocq_tensor_view(&view, &w, start, box), ROCQ_E_UNSUPPORTED);
    assert_int_equal(rocq_tensor_permute(&view, &w, axes), ROCQ_E_UNSUPPORTED);
    view = w;
    assert_int_equal(rocq_cast(ctx, &cast), ROCQ_OK);
    view.stride[1] = 96;
    assert_int_equal(rocq_cast(ctx, &cast), ROCQ_E_BOUNDS);
    view.buffer.size += 4096;
    assert_int_equal(rocq_cast(ctx, &cast), ROCQ_E_SHAPE);
    view = w;
    view.offset = 2;
    view.buffer.size += 16;
    assert_int_equal(rocq_cast(ctx, &cast), ROCQ_E_ALIGNMENT);
    view = w;
    view.layout = ROCQ_LAYOUT_INTERLEAVED; // the CPU's
    assert_int_equal(rocq_cast(ctx, &cast), ROCQ_E_UNSUPPORTED);
    view.layout = (rocq_layout)(ROCQ_LAYOUT_INTERLEAVED + 1);
    assert_int_equal(rocq_cast(ctx, &cast), ROCQ_E_FORMAT);
    view = f;
    view.layout = ROCQ_LAYOUT_PLANAR;
    assert_int_equal(rocq_cast(ctx, &cast), ROCQ_E_UNSUPPORTED);
    rocq_tensor pos = device_tensor(ctx, ROCQ_I32, 1, 1);
    rocq_rope_append_params append = {.k = &f, .v = &f, .k_cache = &w, .v_cache = &w, .pos = &pos};
    assert_int_equal(rocq_rope_append(ctx, &append), ROCQ_E_UNSUPPORTED);

    // More batches than a grid counts: one row, over and over.
    const int64_t batches[3] = {1, 1, 65536};
    rocq_tensor sums = device_tensor(ctx, ROCQ_F32, 1, 65536), row = f, rows;
    rocq_matmul_params mm = {.y = &sums, .w = &row, .x = &rows};
    assert_int_equal(rocq_tensor_reshape(&sums, &sums, 3, batches), ROCQ_OK);
    row.ne[1] = 1;
    rows = row;
    rows.ne[2] = 65536;
    rows.stride[2] = 0;
    assert_int_equal(rocq_matmul(ctx, &mm), ROCQ_E_UNSUPPORTED);
    rows.ne[2] = sums.ne[2] = 65535;
    assert_int_equal(rocq_supports(ctx, ROCQ_OP_MATMUL, &mm, NULL), ROCQ_OK);

    // Buffers: inner, foreign and stale addresses reach neither runtime nor allocator.
    rocq_buffer inner = x.buffer, stale = x.buffer, foreign = rocq_buffer_from_host(memory, 64);
    inner.device.address += 16;
    assert_int_equal(rocq_buffer_free(ctx, &inner), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_buffer_free(ctx, &foreign), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_buffer_free(cpu, &x.buffer), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_buffer_free(ctx, &x.buffer), ROCQ_OK);
    assert_int_equal(x.buffer.size, 0);
    assert_int_equal(rocq_buffer_free(ctx, &x.buffer), ROCQ_OK);
    assert_int_equal(rocq_buffer_free(ctx, &stale), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_buffer_alloc(ctx, &stale, 0), ROCQ_E_ARGUMENT);
    rocq_close(&cpu);
    rocq_close(&ctx);
}

static void indices_out_of_range_are_told_at_sync(void **state) {
    (void)state;
    rocq_ctx *ctx = open_gpu(NULL);
    rocq_tensor table = device_tensor(ctx, ROCQ_F32, 32, 4),
                y = device_tensor(ctx, ROCQ_F32, 32, 3), ids = device_tensor(ctx, ROCQ_I32, 3, 1);
    const int32_t bad[3] = {0, 4, -1}, good[3] = {3, 2, 1};
    float *v = random_floats(128), out[96];
    const rocq_gather_params p = {.y = &y, .table = &table, .ids = &ids};
    assert_int_equal(rocq_upload(ctx, &table, v, 512), ROCQ_OK);
    assert_int_equal(rocq_upload(ctx, &ids, bad, 12), ROCQ_OK);
    assert_int_equal(rocq_gather(ctx, &p), ROCQ_OK);
    assert_int_equal(rocq_sync(ctx), ROCQ_E_BOUNDS);
    assert_non_null(strstr(rocq_error(ctx), "id"));
    assert_int_equal(rocq_sync(ctx), ROCQ_OK); // told once
    assert_int_equal(rocq_upload(ctx, &ids, good, 12), ROCQ_OK);
    assert_int_equal(rocq_gather(ctx, &p), ROCQ_OK);
    assert_int_equal(rocq_sync(ctx), ROCQ_OK);
    assert_int_equal(rocq_download(ctx, out, &y, sizeof out), ROCQ_OK);
    assert_memory_equal(out, v + 96, 128);
    free(v);
    rocq_close(&ctx);
}

// -- graphs, cancel, fallback --

// y = 2 x + 1, x = y
static void record_two(rocq_ctx *ctx, const rocq_tensor *x, const rocq_tensor *y) {
    const rocq_scale_params p = {.y = y, .x = x, .scale = 2.0f, .bias = 1.0f};
    const rocq_cast_params copy = {.y = x, .x = y};
    assert_int_equal(rocq_scale(ctx, &p), ROCQ_OK);
    assert_int_equal(rocq_cast(ctx, &copy), ROCQ_OK);
}

static float first_of(rocq_ctx *ctx, const rocq_tensor *t) {
    float *v = random_floats(rocq_tensor_count(t));
    assert_int_equal(rocq_download(ctx, v, t, rocq_tensor_size(t)), ROCQ_OK);
    const float first = v[0];
    free(v);
    return first;
}

static void graphs_replay(void **state) {
    (void)state;
    enum { CAPTURED, NO_GRAPHS, NO_FUNCTIONS, ON_CPU, N_KINDS };
    for (int kind = 0; kind < N_KINDS; kind++) {
        rocq_desc desc = gpu_desc();
        rocq_stats before, after;
        rocq_graph *graph = NULL, *empty = NULL;
        desc.no_graphs = kind == NO_GRAPHS;
        desc.prefer = kind == ON_CPU ? ROCQ_BACKEND_CPU : ROCQ_BACKEND_GPU;
        simt_set_optional(kind != NO_FUNCTIONS);
        rocq_ctx *ctx = open_gpu(&desc);
        rocq_tensor x = device_tensor(ctx, ROCQ_F32, 100, 1),
                    y = device_tensor(ctx, ROCQ_F32, 100, 1);
        float v[100] = {0};
        assert_int_equal(rocq_upload(ctx, &x, v, sizeof v), ROCQ_OK);
        assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
        record_two(ctx, &x, &y);
        assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);
        assert_true(first_of(ctx, &x) == 0.0f); // recorded, not run
        assert_int_equal(simt_get_live().execs, kind == CAPTURED);
        rocq_get_stats(ctx, &before);
        for (int i = 0; i < 5; i++) assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK);
        assert_true(first_of(ctx, &x) == 31.0f);
        rocq_get_stats(ctx, &after);
        assert_int_equal(after.n_launches - before.n_launches, kind == ON_CPU ? 0 : 10);
        assert_int_equal(after.n_allocs, before.n_allocs);
        assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK); // runs as scratch moves
        assert_int_equal(rocq_reserve(ctx, after.scratch_bytes + 4096), ROCQ_OK);
        assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK);
        assert_true(first_of(ctx, &x) == 127.0f);
        assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK); // and as it is given back
        assert_int_equal(rocq_trim(ctx, 0), ROCQ_OK);
        rocq_get_stats(ctx, &after);
        assert_int_equal(after.scratch_bytes, 0);
        assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK);
        assert_true(first_of(ctx, &x) == 511.0f);
        assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
        assert_int_equal(rocq_graph_end(ctx, &empty), ROCQ_OK);
        assert_int_equal(rocq_graph_launch(ctx, empty), ROCQ_OK);
        rocq_graph_destroy(ctx, &graph);
        assert_null(graph);
        rocq_graph_destroy(ctx, &graph);
        rocq_close(&ctx); // frees the other one
    }
}

static void graphs_over_scratch_follow_it(void **state) {
    (void)state;
    rocq_ctx *ctx = open_gpu(NULL);
    rocq_tensor x = device_tensor(ctx, ROCQ_F32, 256, 20),
                w = device_tensor(ctx, ROCQ_Q8_0, 256, 32),
                y = device_tensor(ctx, ROCQ_F32, 32, 20),
                big = device_tensor(ctx, ROCQ_Q8_0, 1 << 16, 17);
    float *v = random_floats(256 * 20), *want = random_floats(640), *got = random_floats(640);
    float *values = random_floats(256 * 32);
    unsigned char blocks[32 * 272],
        *many = (unsigned char *)calloc(1, (size_t)rocq_tensor_size(&big));
    const rocq_matmul_params mm = {.y = &y, .w = &w, .x = &x, .precision = ROCQ_PRECISION_INT8};
    rocq_graph *graph;
    rocq_quantize(ROCQ_Q8_0, blocks, values, 32, 256, NULL);
    w.layout = big.layout = ROCQ_LAYOUT_PLANAR;
    assert_int_equal(rocq_upload(ctx, &w, blocks, sizeof blocks), ROCQ_OK);
    assert_int_equal(rocq_upload(ctx, &x, v, 256 * 20 * 4), ROCQ_OK);
    assert_int_equal(rocq_matmul(ctx, &mm), ROCQ_OK);
    assert_int_equal(rocq_download(ctx, want, &y, 2560), ROCQ_OK);
    assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
    assert_int_equal(rocq_matmul(ctx, &mm), ROCQ_OK);
    assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);
    for (int i = 0; i < 3; i++) {
        if (i == 1) assert_int_equal(rocq_upload(ctx, &big, many, rocq_tensor_size(&big)), ROCQ_OK);
        if (i == 2) assert_int_equal(rocq_reserve(ctx, 1 << 22), ROCQ_OK);
        memset(got, 0xff, 2560);
        assert_int_equal(rocq_upload(ctx, &y, got, 2560), ROCQ_OK);
        assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK);
        assert_int_equal(rocq_download(ctx, got, &y, 2560), ROCQ_OK);
        assert_memory_equal(got, want, 2560);
    }
    free(v);
    free(want);
    free(got);
    free(values);
    free(many);
    rocq_close(&ctx);
}

static void graphs_are_hard_to_misuse(void **state) {
    (void)state;
    rocq_ctx *ctx = open_gpu(NULL), *other = open_gpu(NULL);
    rocq_graph *graph = NULL, *second = NULL;
    rocq_tensor x = device_tensor(ctx, ROCQ_F32, 100, 1), y = device_tensor(ctx, ROCQ_F32, 100, 1);
    float v[100] = {0};
    assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_E_STATE);
    assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
    assert_int_equal(rocq_graph_begin(ctx), ROCQ_E_STATE);
    assert_int_equal(rocq_upload(ctx, &x, v, sizeof v), ROCQ_E_STATE);
    assert_int_equal(rocq_download(ctx, v, &x, sizeof v), ROCQ_E_STATE);
    assert_int_equal(rocq_sync(ctx), ROCQ_E_STATE);
    assert_int_equal(rocq_graph_launch(ctx, NULL), ROCQ_E_STATE);
    const rocq_scale_params bad = {.y = &y, .x = NULL};
    assert_int_equal(rocq_scale(ctx, &bad), ROCQ_E_ARGUMENT); // and is not recorded
    record_two(ctx, &x, &y);
    assert_int_equal(rocq_graph_end(ctx, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_upload(ctx, &x, v, sizeof v), ROCQ_OK);
    assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
    record_two(ctx, &x, &y);
    assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);
    assert_int_equal(rocq_graph_launch(other, graph), ROCQ_E_ARGUMENT);
    second = graph;
    rocq_graph_destroy(other, &second);
    assert_non_null(second);
    assert_int_equal(rocq_graph_launch(ctx, NULL), ROCQ_E_ARGUMENT);
    rocq_cancel(ctx);
    assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_E_CANCELLED);
    assert_int_equal(rocq_sync(ctx), ROCQ_OK);
    assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK);
    assert_true(first_of(ctx, &x) == 1.0f);
    rocq_graph_destroy(ctx, &graph);
    assert_int_equal(rocq_graph_launch(ctx, second), ROCQ_E_ARGUMENT); // stale
    assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK); // still recording when it closes
    record_two(ctx, &x, &y);
    rocq_close(&ctx);
    rocq_close(&other);
}

static void cancel_stops_what_comes_after(void **state) {
    (void)state;
    for (int on_cpu = 0; on_cpu < 2; on_cpu++) {
        rocq_desc desc = gpu_desc();
        if (on_cpu) desc.prefer = ROCQ_BACKEND_CPU;
        rocq_ctx *ctx = open_gpu(&desc);
        rocq_tensor x = device_tensor(ctx, ROCQ_F32, 100, 1);
        float v[100] = {1.0f};
        const rocq_scale_params p = {.y = &x, .x = &x, .scale = 3.0f};
        assert_int_equal(rocq_upload(ctx, &x, v, sizeof v), ROCQ_OK);
        assert_int_equal(rocq_scale(ctx, &p), ROCQ_OK);
        rocq_cancel(ctx);
        assert_int_equal(rocq_scale(ctx, &p), ROCQ_E_CANCELLED);
        assert_int_equal(rocq_scale(ctx, &p), ROCQ_E_CANCELLED);
        assert_true(first_of(ctx, &x) == 3.0f); // what came before is done
        assert_int_equal(rocq_sync(ctx), ROCQ_OK);
        assert_int_equal(rocq_scale(ctx, &p), ROCQ_OK);
        assert_true(first_of(ctx, &x) == 9.0f);
        rocq_close(&ctx);
    }
    rocq_cancel(NULL);
}

// Heads of 1024 turned whole, which no kernel does; q, k and v lie in one buffer, and so do the
// rows of both caches: all of them must keep what the others write.
static void ops_without_a_kernel_fall_back_when_allowed(void **state) {
    (void)state;
    enum { D = 1024, N = 3, CELLS = 5, ROW = 3 * D, ALL = ROW * N + 2 * D * CELLS };
    float *v = random_floats(ALL), *want = random_floats(ALL), *got = random_floats(ALL);
    const int32_t positions[N] = {4, 0, 2};
    for (int kind = 0; kind < 4; kind++) { // CPU, refused, falls back, falls back in a graph
        rocq_desc desc = gpu_desc();
        rocq_stats stats;
        log_count log = {0};
        desc.prefer = kind == 0 ? ROCQ_BACKEND_CPU : ROCQ_BACKEND_GPU;
        desc.allow_fallback = kind > 1;
        rocq_ctx *ctx = open_gpu(&desc);
        ctx->desc.log = count_failures;
        ctx->desc.log_user = &log;
        rocq_tensor all = device_tensor(ctx, ROCQ_F32, ALL, 1),
                    pos = device_tensor(ctx, ROCQ_I32, N, 1);
        rocq_tensor qkv, cache, part[3], half[2];
        const int64_t qkv_ne[3] = {D, 3, N}, cache_ne[3] = {D, 2, CELLS};
        assert_int_equal(rocq_upload(ctx, &all, v, ALL * 4), ROCQ_OK);
        assert_int_equal(rocq_upload(ctx, &pos, positions, sizeof positions), ROCQ_OK);
        assert_int_equal(rocq_tensor_init(&qkv, &all.buffer, 0, ROCQ_F32, 3, qkv_ne), ROCQ_OK);
        assert_int_equal(rocq_tensor_init(&cache, &all.buffer, ROW * N * 4, ROCQ_F32, 3, cache_ne),
                         ROCQ_OK);
        for (int i = 0; i < 3; i++) {
            const int64_t start[4] = {0, i, 0, 0}, box[4] = {D, 1, N, 1},
                          cells[4] = {D, 1, CELLS, 1};
            assert_int_equal(rocq_tensor_view(&part[i], &qkv, start, box), ROCQ_OK);
            if (i < 2) assert_int_equal(rocq_tensor_view(&half[i], &cache, start, cells), ROCQ_OK);
        }
        const rocq_rope_append_params p = {.q = &part[0], .k = &part[1], .v = &part[2],
                                           .k_cache = &half[0], .v_cache = &half[1], .pos = &pos};
        const char *why;
        const rocq_result expected = kind == 1 ? ROCQ_E_UNSUPPORTED : ROCQ_OK;
        rocq_graph *graph = NULL;
        assert_int_equal(rocq_supports(ctx, ROCQ_OP_ROPE_APPEND, &p, &why), expected);
        assert_int_equal(strlen(why) > 5, kind == 1);
        if (kind == 3) assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
        assert_int_equal(rocq_rope_append(ctx, &p), expected);
        if (kind == 3) {
            assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);
            assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK);
        }
        assert_int_equal(rocq_download(ctx, kind == 0 ? want : got, &all, ALL * 4), ROCQ_OK);
        if (kind > 1) assert_memory_equal(got, want, ALL * 4);
        rocq_get_stats(ctx, &stats);
        assert_int_equal(stats.n_fallbacks, kind > 1);
        // Falling back is no failure, neither in the log nor in rocq_error.
        assert_int_equal(log.n_errors, kind == 1);
        if (kind == 1) assert_string_equal(rocq_error(ctx), log.error);
        else assert_string_equal(rocq_error(ctx), "");
        assert_int_equal(rocq_rope_append(ctx, NULL), ROCQ_E_ARGUMENT);
        snprintf(log.error, sizeof log.error, "%s", rocq_error(ctx));
        assert_int_equal(rocq_rope_append(ctx, &p), expected);
        if (kind > 1) assert_string_equal(rocq_error(ctx), log.error); // that of the call before
        rocq_close(&ctx);
    }
    assert_memory_not_equal(want, v, ALL * 4);
    free(v);
    free(want);
    free(got);
}

// What allow_fallback does not help with is a failure as any other: sizes that cannot be counted.
static void failures_beside_fallback_are_logged(void **state) {
    (void)state;
    const int64_t w_ne[3] = {4096, INT32_MAX, 32768}, x_ne[3] = {4096, 1, 1},
                  y_ne[3] = {INT32_MAX, 1, 32768};
    for (int fallback = 0; fallback < 2; fallback++) {
        rocq_desc desc = gpu_desc();
        log_count log = {0};
        rocq_tensor w, x, y;
        desc.allow_fallback = fallback == 1;
        desc.log = count_failures;
        desc.log_user = &log;
        rocq_ctx *ctx = NULL;
        assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
        // Addresses that nobody touches: both products' weights would be repacked.
        const rocq_buffer of_w = rocq_buffer_from_device((uint64_t)1 << 62, INT64_MAX),
                          of_x = rocq_buffer_from_device((uint64_t)1 << 36, (int64_t)1 << 35),
                          of_y = rocq_buffer_from_device((uint64_t)1 << 50, (int64_t)1 << 51);
        assert_int_equal(rocq_tensor_init(&w, &of_w, 0, ROCQ_Q8_0, 3, w_ne), ROCQ_OK);
        assert_int_equal(rocq_tensor_init(&x, &of_x, 0, ROCQ_F32, 3, x_ne), ROCQ_OK);
        assert_int_equal(rocq_tensor_init(&y, &of_y, 0, ROCQ_F32, 3, y_ne), ROCQ_OK);
        x.ne[2] = 32768;
        x.stride[2] = 0;
        const rocq_matmul_params p = {
            .y = &y, .w = &w, .x = &x, .w2 = &w, .activation = ROCQ_ACT_SILU};
        assert_int_equal(rocq_supports(ctx, ROCQ_OP_MATMUL, &p, NULL), ROCQ_E_OVERFLOW);
        assert_int_equal(log.n_errors, 0); // it only asks
        assert_int_equal(rocq_matmul(ctx, &p), ROCQ_E_OVERFLOW);
        assert_int_equal(log.n_errors, 1);
        assert_string_equal(log.error, rocq_error(ctx));
        rocq_close(&ctx);
    }
}

// -- a device that fails --

static int64_t file_size;
static unsigned char file_bytes[1 << 16];

static bool file_write(const void *src, int64_t size, void *user) {
    (void)user;
    if (size > (int64_t)sizeof file_bytes - file_size) return false;
    memcpy(file_bytes + file_size, src, (size_t)size);
    file_size += size;
    return true;
}

static bool file_read(void *dst, int64_t offset, int64_t size, void *user) {
    (void)user;
    memcpy(dst, file_bytes + offset, (size_t)size);
    return true;
}

static void make_file(void) {
    rocq_ctx *ctx;
    rocq_gguf_writer *writer;
    const rocq_desc on_cpu = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1};
    const rocq_gguf_writer_desc desc = {.write = file_write};
    const int64_t ne[2] = {256, 9};
    unsigned char blocks[9 * 144];
    float *v = random_floats(256 * 9);
    file_size = 0;
    assert_int_equal(rocq_open(&ctx, &on_cpu), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_open(ctx, &writer, &desc), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_add_tensor(writer, "w", ROCQ_Q4_K, 2, ne), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_add_tensor(writer, "f", ROCQ_F32, 2, ne), ROCQ_OK);
    assert_int_equal(rocq_quantize(ROCQ_Q4_K, blocks, v, 9, 256, NULL), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_write(writer, blocks, sizeof blocks), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_write(writer, v, 256 * 9 * 4), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_close(&writer), ROCQ_OK);
    rocq_close(&ctx);
    free(v);
}

// Keeps the first failure, and asserts what must hold after one.
typedef struct outcome {
    rocq_ctx *ctx;
    rocq_result first, last;
    bool lost;
    log_count log; // since the last call
} outcome;

// A failure is in the log, once, in the words of rocq_error, and nothing else is.
static void check_log(outcome *o, rocq_result result) {
    assert_int_equal(o->log.n_errors, result != ROCQ_OK);
    if (result != ROCQ_OK && o->ctx) assert_string_equal(o->log.error, rocq_error(o->ctx));
    o->log.n_errors = 0;
}

static bool went_well(outcome *o, rocq_result result) {
    o->last = result;
    check_log(o, result);
    if (o->lost) assert_int_equal(result, ROCQ_E_LOST);
    if (result == ROCQ_OK) return true;
    assert_true(result == ROCQ_E_LOST || result == ROCQ_E_MEMORY || result == ROCQ_E_NO_DEVICE ||
                result == ROCQ_E_NO_KERNELS || result == ROCQ_E_DEVICE);
    if (o->ctx) assert_true(strlen(rocq_error(o->ctx)) > 5);
    if (o->first == ROCQ_OK) o->first = result;
    o->lost = o->lost || result == ROCQ_E_LOST;
    return false;
}

// Uses everything that reaches the runtime. Returns whether all went well and the result was right.
static bool use_all(outcome *o, bool from_image) {
    unsigned char image[1024];
    rocq_desc desc = gpu_desc();
    const rocq_gguf_desc source = {.size = file_size, .read = file_read};
    rocq_buffer buffer;
    rocq_gguf *file = NULL;
    rocq_graph *graph = NULL;
    bool right = false;
    memset(o, 0, sizeof *o);
    desc.scratch_bytes = 1000;
    desc.sharing = ROCQ_SHARING_GRAPHICS_FIRST; // without any of it the context works as well
    desc.max_units = from_image ? 2 : 0;
    desc.allow_fallback = false;
    desc.log = count_failures;
    desc.log_user = &o->log;
    if (from_image) {
        desc.kernels_data = image;
        desc.kernels_size = make_bundle(image, 1);
    }
    if (!went_well(o, rocq_open(&o->ctx, &desc))) {
        assert_null(o->ctx);
        return false;
    }
    rocq_ctx *ctx = o->ctx;
    assert_int_equal(rocq_gguf_open(ctx, &file, &source), ROCQ_OK);
    rocq_tensor w, f, x, y, out;
    rocq_buffer w_buffer, f_buffer;
    const int64_t ne[2] = {256, 2}, ne_y[2] = {9, 2};
    float *v = random_floats(512), *large = random_floats(300000), results[18];
    bool all = went_well(o, rocq_gguf_upload(ctx, file, "w", &w, &w_buffer));
    all &= went_well(o, rocq_gguf_upload(ctx, file, "f", &f, &f_buffer));
    all &= went_well(o, rocq_buffer_alloc(ctx, &buffer, 1 << 21));
    if (all) {
        assert_int_equal(rocq_tensor_init(&x, &buffer, 0, ROCQ_F32, 2, ne), ROCQ_OK);
        assert_int_equal(rocq_tensor_init(&y, &buffer, 4096, ROCQ_F32, 2, ne_y), ROCQ_OK);
        assert_int_equal(
            rocq_tensor_init(&out, &buffer, 8192, ROCQ_F32, 1, (const int64_t[]){300000}), ROCQ_OK);
        const rocq_norm_params norm = {.y = &x, .x = &x};
        const rocq_matmul_params mm = {.y = &y, .w = &w, .x = &x, .precision = ROCQ_PRECISION_INT8};
        bool well = went_well(o, rocq_upload(ctx, &x, v, 2048));
        well &= went_well(o, rocq_upload(ctx, &out, large, 1200000));
        well &= went_well(o, rocq_rmsnorm(ctx, &norm));
        well &= went_well(o, rocq_matmul(ctx, &mm));
        const bool recording = went_well(o, rocq_graph_begin(ctx));
        if (recording) {
            well &= went_well(o, rocq_rmsnorm(ctx, &norm));
            well &= went_well(o, rocq_matmul(ctx, &mm));
            well &= went_well(o, rocq_graph_end(ctx, &graph));
        }
        well &= recording;
        if (graph) {
            well &= went_well(o, rocq_graph_launch(ctx, graph));
            well &= went_well(o, rocq_reserve(ctx, 1 << 20));
            well &= went_well(o, rocq_graph_launch(ctx, graph));
        }
        well &= went_well(o, rocq_download(ctx, large, &out, 1200000));
        well &= went_well(o, rocq_download(ctx, results, &y, sizeof results));
        well &= went_well(o, rocq_sync(ctx));
        right = well;
        for (int i = 0; i < 18; i++) right &= !(results[i] != results[i]);
        rocq_graph_destroy(ctx, &graph);
        o->log.n_errors = 0; // a free has no result, or none that is asked for
        check_log(o, rocq_buffer_free(ctx, &buffer));
    }
    free(v);
    free(large);
    rocq_gguf_close(&file);
    rocq_close(&o->ctx);
    return right;
}

static void every_runtime_call_may_fail(void **state) {
    (void)state;
    outcome o;
    make_file();
    for (int from_image = 0; from_image < 2; from_image++) {
        const int64_t before = simt_calls();
        assert_true(use_all(&o, from_image == 1));
        const int64_t n = simt_calls() - before;
        assert_int_equal(nothing_is_left(NULL), 0);
        for (int kind = 0; kind < 4; kind++) { // lost, lost late, fails once, out of memory once
            const bool once = kind >= 2;
            simt_set_work(kind == 1 ? SIMT_AT_ONCE : SIMT_LATE);
            // The module's functions are 150 calls alike: a few of them stand for all.
            for (int64_t i = 1; i <= n; i += i > 20 && i < n - 140 && from_image ? 13 : 1) {
                if (once) simt_fail_once(i, kind == 2 ? 719 : 2);
                else simt_fail_at(i, 719);
                use_all(&o, from_image == 1);
                if (kind == 3 && o.lost) fail_msg("call %d: out of memory lost the device", (int)i);
                if (nothing_is_left(NULL) != 0) {
                    fail_msg("call %d of %d, kind %d", (int)i, (int)n, kind);
                }
            }
            simt_set_work(SIMT_LATE);
        }
    }
    assert_true(use_all(&o, false)); // and the next context is as new
}

static void a_lost_context_only_closes(void **state) {
    (void)state;
    rocq_ctx *ctx = open_gpu(NULL);
    rocq_tensor x = device_tensor(ctx, ROCQ_F32, 100, 1);
    rocq_buffer buffer;
    float v[100] = {0};
    const rocq_scale_params p = {.y = &x, .x = &x, .scale = 1.0f};
    rocq_stats stats;
    rocq_graph *graph;
    simt_fail_at(1, 719);
    assert_int_equal(rocq_scale(ctx, &p), ROCQ_E_LOST);
    assert_non_null(strstr(rocq_error(ctx), "lost"));
    simt_fail_at(0, 0); // the runtime may say what it likes now
    assert_int_equal(rocq_scale(ctx, &p), ROCQ_E_LOST);
    assert_int_equal(rocq_upload(ctx, &x, v, sizeof v), ROCQ_E_LOST);
    assert_int_equal(rocq_download(ctx, v, &x, sizeof v), ROCQ_E_LOST);
    assert_int_equal(rocq_sync(ctx), ROCQ_E_LOST);
    assert_int_equal(rocq_reserve(ctx, 100000), ROCQ_E_LOST);
    assert_int_equal(rocq_buffer_alloc(ctx, &buffer, 100), ROCQ_E_LOST);
    assert_int_equal(rocq_graph_begin(ctx), ROCQ_E_LOST);
    assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_E_STATE);
    assert_int_equal(rocq_get_stats(ctx, &stats), ROCQ_OK);
    assert_int_equal(rocq_buffer_free(ctx, &x.buffer), ROCQ_OK); // gives back what it can
    rocq_close(&ctx);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, begin, nothing_is_left)
    const struct CMUnitTest tests[] = {
        TEST(one_device_is_found),
        TEST(devices_are_chosen_by_number_and_address),
        TEST(why_there_is_no_gpu_is_told),
        TEST(an_unlisted_chip_is_told),
        TEST(code_objects_are_read_with_care),
        TEST(copies_of_any_size_come_back),
        TEST(planar_tensors_decode_to_the_same_bits),
        TEST(budget_and_exhaustion_leave_the_context_usable),
        TEST(growing_scratch_takes_the_place_of_the_old),
        TEST(steady_state_allocates_nothing),
        TEST(long_work_is_cut_and_stays_the_same),
        TEST(presets_are_a_queue_and_limits),
        TEST(a_mask_has_whole_wgps),
        TEST(what_is_ignored_is_told),
        TEST(waves_are_limited_by_lds),
        TEST(foreign_and_crooked_tensors_are_refused),
        TEST(indices_out_of_range_are_told_at_sync),
        TEST(graphs_replay),
        TEST(graphs_over_scratch_follow_it),
        TEST(graphs_are_hard_to_misuse),
        TEST(cancel_stops_what_comes_after),
        TEST(ops_without_a_kernel_fall_back_when_allowed),
        TEST(failures_beside_fallback_are_logged),
        TEST(every_runtime_call_may_fail),
        TEST(a_lost_context_only_closes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
