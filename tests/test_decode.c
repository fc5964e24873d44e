// examples/decode.c as a user runs it, its main() called in a child process, on the small models of
// tests/vae.py: pictures against PyTorch's, from both kinds of files, in tiles and under a budget,
// videos as numbered pictures and as Y4M; options and files that are wrong, memory that runs out at
// every single allocation, Ctrl-C. Each failure is one line, exit status 1 and no file. What the
// shipped model makes of the shipped latents is compared by the suite main_job.

#define _XOPEN_SOURCE 700 // fork, pipe, posix_openpt, mkdtemp

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "counted.h"

// Every allocation of the program goes through these: rocq's, the examples' and main's own.
#define malloc counted_malloc
#define calloc counted_calloc
#define realloc counted_realloc
#define free counted_free
#define main program_main
#include "../examples/decode.c"
#undef main
#undef free
#undef realloc
#undef calloc
#undef malloc

#include <cmocka.h> // has a macro of the name of a function above

#include <dirent.h>

#include "child.h"

#define STB_IMAGE_IMPLEMENTATION
#include <stb/stb_image.h>

#define FOLDER ".build/tests/decode-models"
#define MODEL(name) FOLDER "/" name ".safetensors"

// What PyTorch had and made of it: [N, Z, (T,) h, w] and channels last.
typedef struct io {
    int64_t n, z, frames, w, h, out_frames, out_w, out_h;
    float *latents, *out;
} io;

static float *values_of(const char *path, const char *name, safetensors_tensor *t) {
    safetensors_file f;
    assert_int_equal(safetensors_open(&f, path), ROCQ_OK);
    const safetensors_tensor *found = safetensors_find(&f, name);
    assert_non_null(found);
    float *values = (float *)malloc((size_t)found->size);
    assert_non_null(values);
    assert_int_equal(safetensors_read(&f, found, values), ROCQ_OK);
    *t = *found;
    safetensors_close(&f);
    return values;
}

static io io_of(const char *path) {
    io x;
    safetensors_tensor t;
    x.latents = values_of(path, "latents", &t);
    const int64_t *end = t.shape + t.n_dims;
    x.n = t.shape[0];
    x.z = t.shape[1];
    x.frames = t.n_dims == 5 ? t.shape[2] : 1;
    x.h = end[-2];
    x.w = end[-1];
    x.out = values_of(path, "out", &t);
    end = t.shape + t.n_dims;
    x.out_frames = t.n_dims == 5 ? t.shape[1] : 1;
    x.out_h = end[-3];
    x.out_w = end[-2];
    return x;
}

static void io_free(io *x) {
    free(x->latents);
    free(x->out);
}

// A safetensors file of one F32 tensor, and an empty one as in ComfyUI's files.
static void write_safetensors(const char *path, const float *values, int32_t n_dims,
                              const int64_t *shape) {
    char head[512];
    int64_t n = 1;
    size_t used =
        (size_t)snprintf(head, sizeof head, "{\"latent_tensor\":{\"dtype\":\"F32\",\"shape\":[");
    for (int32_t d = 0; d < n_dims; d++) {
        n *= shape[d];
        used +=
            (size_t)snprintf(head + used, sizeof head - used, "%s%d", d ? "," : "", (int)shape[d]);
    }
    used += (size_t)snprintf(head + used, sizeof head - used,
                             "],\"data_offsets\":[0,%d]},\"mark\":{\"dtype\":\"F32\",\"shape\":[0],"
                             "\"data_offsets\":[%d,%d]}}",
                             (int)(4 * n), (int)(4 * n), (int)(4 * n));
    const uint64_t length = used;
    FILE *f = fopen(path, "wb");
    assert_true(f && fwrite(&length, 8, 1, f) == 1 && fwrite(head, 1, used, f) == used);
    assert_true(fwrite(values, 4, (size_t)n, f) == (size_t)n && fclose(f) == 0);
}

// A GGUF file of x's latents, each a tensor, with these titles unless NULL.
static void write_gguf(const char *path, const io *x, const char *const *titles) {
    rocq_ctx *ctx = NULL;
    rocq_gguf_writer *w = NULL;
    rocq_str strings[8];
    const rocq_gguf_writer_desc desc = {.path = path};
    const int64_t each = x->w * x->h * x->frames * x->z, ne[4] = {x->w, x->h, x->frames, x->z};
    const int64_t flat[3] = {x->w, x->h, x->z};
    assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_open(ctx, &w, &desc), ROCQ_OK);
    for (int64_t i = 0; titles && i < x->n; i++) {
        strings[i].data = titles[i];
        strings[i].length = (int64_t)strlen(titles[i]);
    }
    if (titles) {
        assert_int_equal(rocq_gguf_writer_set(w, "latents.title", ROCQ_GGUF_STRING, true, x->n,
                                              strings), ROCQ_OK);
    }
    for (int64_t i = 0; i < x->n; i++) {
        char name[32];
        snprintf(name, sizeof name, "latent.%d", (int)i);
        assert_int_equal(rocq_gguf_writer_add_tensor(w, name, ROCQ_F32, x->frames > 1 ? 4 : 3,
                                                     x->frames > 1 ? ne : flat), ROCQ_OK);
    }
    for (int64_t i = 0; i < x->n; i++) {
        assert_int_equal(rocq_gguf_writer_write(w, x->latents + i * each, 4 * each), ROCQ_OK);
    }
    assert_int_equal(rocq_gguf_writer_close(&w), ROCQ_OK);
    rocq_close(&ctx);
}

// A new empty folder; the one of the call before is removed.
static const char *new_folder(void) {
    static char path[64] = "";
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", path);
    if (*path) assert_int_equal(system(command), 0);
    strcpy(path, "/tmp/rocq-decode.XXXXXX");
    assert_non_null(mkdtemp(path));
    return path;
}

static int n_files(const char *folder) {
    int n = 0;
    DIR *d = opendir(folder);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));) n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static char *bytes_of(const char *folder, const char *name, size_t *size) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "rb");
    if (!f) fail_msg("there is no %s", path);
    char *bytes = (char *)malloc(1 << 22);
    assert_non_null(bytes);
    *size = fread(bytes, 1, (1 << 22) - 1, f);
    bytes[*size] = '\0';
    fclose(f);
    return bytes;
}

static unsigned char *picture_of(const char *folder, const char *name, int64_t want_w,
                                 int64_t want_h) {
    int w, h, channels;
    size_t size;
    char *png = bytes_of(folder, name, &size);
    unsigned char *rgb =
        stbi_load_from_memory((const stbi_uc *)png, (int)size, &w, &h, &channels, 0);
    free(png);
    assert_non_null(rgb);
    assert_true(channels == 3 && w == want_w && h == want_h);
    return rgb;
}

// Levels between a picture and PyTorch's numbers, at most: rounding alone makes it half of one.
static void expect_picture(const char *folder, const char *name, const io *x, int64_t number) {
    const int64_t count = 3 * x->out_w * x->out_h;
    unsigned char *rgb = picture_of(folder, name, x->out_w, x->out_h);
    double worst = 0;
    for (int64_t i = 0; i < count; i++) {
        const double v = x->out[number * count + i], level = 255 * (v < 0 ? 0 : v > 1 ? 1 : v);
        const double error = fabs(level - rgb[i]);
        if (!(error <= worst)) worst = error;
    }
    free(rgb);
    if (!(worst < 0.51)) fail_msg("%s is %g levels off", name, worst);
}

static void expect_same(const char *folder, const char *name, const char *other,
                        const char *other_name) {
    size_t size, other_size;
    char *a = bytes_of(folder, name, &size), *b = bytes_of(other, other_name, &other_size);
    assert_int_equal(size, other_size);
    assert_memory_equal(a, b, size);
    free(a);
    free(b);
}

static io taesd, wan, wide;

static int setup(void **state) {
    (void)state;
    static const char *const titles[] = {"A ring: gold, moss", "/a ring-- gold; moss."};
    if (system("mkdir -p " FOLDER " && /usr/bin/python3 tests/vae.py " FOLDER) != 0) return -1;
    taesd = io_of(MODEL("taesd-io"));
    wan = io_of(MODEL("wan-io"));
    wide = io_of(MODEL("wide-io"));
    write_gguf(FOLDER "/titled.gguf", &taesd, titles);
    write_gguf(FOLDER "/wan.gguf", &wan, NULL);
    const int64_t shape[4] = {taesd.n, taesd.z, taesd.h, taesd.w};
    write_safetensors(FOLDER "/latents.safetensors", taesd.latents, 4, shape);
    const int64_t video[5] = {wan.n, wan.z, wan.frames, wan.h, wan.w};
    write_safetensors(FOLDER "/video.safetensors", wan.latents, 5, video);
    const int64_t one[3] = {wide.z, wide.h, wide.w};
    write_safetensors(FOLDER "/wide-latents.safetensors", wide.latents, 3, one);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    io_free(&taesd);
    io_free(&wan);
    io_free(&wide);
    return rmdir(new_folder());
}

#define TAESD "--model", MODEL("taesd-diffusers"), "--latents", FOLDER "/titled.gguf"

static void test_pictures(void **state) {
    (void)state;
    char lines[256], path[128];
    const char *folder = new_folder();
    const outcome *o = RUN(TAESD, "--out", folder);
    expect_success(o);
    assert_string_equal(o->err, ""); // no terminal: no progress
    snprintf(lines, sizeof lines, "%s/a-ring-gold-moss.png\n%s/a-ring-gold-moss-2.png\n", folder,
             folder);
    assert_string_equal(o->out, lines);
    assert_int_equal(n_files(folder), 2);
    expect_picture(folder, "a-ring-gold-moss.png", &taesd, 0);
    expect_picture(folder, "a-ring-gold-moss-2.png", &taesd, 1);

    // one alone, as a file; both at once; by another number of threads; from the other kind of file
    snprintf(path, sizeof path, "%s/one", folder);
    expect_success(RUN(TAESD, "--only", "1", "--out", path));
    expect_same(folder, "one", folder, "a-ring-gold-moss-2.png");
    const char *second = FOLDER "/second";
    assert_int_equal(system("rm -rf " FOLDER "/second && mkdir " FOLDER "/second"), 0);
    expect_success(RUN(TAESD, "--out", second, "--batch", "2", "--threads", "3"));
    expect_same(folder, "one", second, "a-ring-gold-moss-2.png");
    expect_success(RUN("--model", MODEL("taesd"), "--latents", FOLDER "/latents.safetensors",
                       "--out", FOLDER "/second/"));
    expect_same(second, "a-ring-gold-moss.png", second, "latent_tensor.png");
    expect_same(second, "a-ring-gold-moss-2.png", second, "latent_tensor-2.png");
    assert_int_equal(n_files(second), 4);
}

// scale and shift take the family's place.
static void test_scale(void **state) {
    (void)state;
    const char *folder = new_folder();
    char path[3][128];
    for (int i = 0; i < 3; i++) snprintf(path[i], sizeof path[i], "%s/%d.png", folder, i);
#define WIDE "--model", MODEL("wide"), "--latents", FOLDER "/wide-latents.safetensors", "--out"
    expect_success(RUN(WIDE, path[0]));
    expect_picture(folder, "0.png", &wide, 0);
    expect_success(RUN(WIDE, path[1], "--scale", "0.18215", "--family", "sd1"));
    expect_same(folder, "0.png", folder, "1.png");
    expect_success(RUN(WIDE, path[1], "--family", "sdxl"));
    expect_success(RUN(WIDE, path[2], "--scale", "0.13025", "--shift", "0"));
    expect_same(folder, "1.png", folder, "2.png");
    size_t size[2];
    char *a = bytes_of(folder, "0.png", &size[0]), *b = bytes_of(folder, "1.png", &size[1]);
    assert_true(size[0] != size[1] || memcmp(a, b, size[0]) != 0);
    free(a);
    free(b);
    expect_failure(RUN(WIDE, path[0], "--family", "taesd"), "taesd");
    expect_failure(RUN(WIDE, path[0], "--family", "sd9"), "sd9");
}

// Latents of 24 x 16, of which a picture is large enough for tiles.
static void write_large(const char *path, int64_t w, int64_t h) {
    const int64_t shape[3] = {4, h, w};
    float *values = (float *)malloc((size_t)(4 * w * h) * sizeof *values);
    assert_non_null(values);
    for (int64_t i = 0; i < 4 * w * h; i++) values[i] = (float)sin(0.7 * (double)(i * i % 1009));
    write_safetensors(path, values, 3, shape);
    free(values);
}

static void expect_close(const char *folder, const char *name, int64_t w, int64_t h,
                         int64_t levels) {
    unsigned char *a = picture_of(folder, "whole.png", w, h), *b = picture_of(folder, name, w, h);
    for (int64_t i = 0; i < 3 * w * h; i++) assert_true(abs(a[i] - b[i]) <= levels);
    free(a);
    free(b);
}

static void test_tiles(void **state) {
    (void)state;
    const char *folder = new_folder();
    char path[128], bytes[32];
    write_large(FOLDER "/large.safetensors", 24, 16);
#define LARGE "--model", MODEL("taesd"), "--latents", FOLDER "/large.safetensors", "--out", path
    snprintf(path, sizeof path, "%s/whole.png", folder);
    const outcome *o = RUN(LARGE, "--stats");
    expect_success(o);
    assert_non_null(strstr(o->err, "\nlast plan            whole"));
    const double planned = statistic(o, "\npeak memory "), measured = statistic(o, " planned, ");
    assert_true(fabs(planned - measured) <= 0.05 * planned);
    snprintf(path, sizeof path, "%s/exact.png", folder);
    o = RUN(LARGE, "--exact", "--tile", "64", "--stats");
    expect_success(o);
    assert_non_null(strstr(o->err, "exact tiles, 6 of 64 pixels"));
    expect_close(folder, "exact.png", 192, 128, 1);
    snprintf(path, sizeof path, "%s/mixed.png", folder);
    o = RUN(LARGE, "--tile", "96", "--overlap", "32", "--stats");
    expect_success(o);
    assert_non_null(strstr(o->err, "mixed tiles, 6 of 96 pixels that overlap by 32"));
    // where tiles are alone they are as the whole but for what is beyond their edge
    expect_close(folder, "mixed.png", 192, 128, 255);

    // a budget that takes no whole picture; what was measured keeps it
    snprintf(path, sizeof path, "%s/small.png", folder);
    snprintf(bytes, sizeof bytes, "%.3fM", 0.7 * planned);
    o = RUN(LARGE, "--budget", bytes, "--stats");
    expect_success(o);
    assert_non_null(strstr(o->err, "exact tiles"));
    assert_true(statistic(o, " planned, ") <= 0.7 * planned + 0.005);
    expect_close(folder, "small.png", 192, 128, 1);
    snprintf(path, sizeof path, "%s/none.png", folder);
    expect_failure(RUN(LARGE, "--budget", "1K"), "the smallest that would do is ");
    expect_failure(RUN(LARGE, "--tile", "12"), "12");
    expect_failure(RUN(LARGE, "--tile", "64", "--overlap", "64"), "overlap by 64");
    expect_failure(RUN(LARGE, "--exact", "--overlap", "8"), "--overlap");
    assert_int_equal(n_files(folder), 4);
}

// Levels between the planes of one frame and the formulas of the two standards.
static void expect_yuv(const unsigned char *yuv, const unsigned char *rgb, int64_t w, int64_t h,
                       bool half, double kr, double kb) {
    const int64_t cw = half ? w / 2 : w, ch = half ? h / 2 : h;
    for (int64_t i = 0; i < w * h; i++) {
        const double r = rgb[3 * i] / 255.0, g = rgb[3 * i + 1] / 255.0, b = rgb[3 * i + 2] / 255.0;
        assert_true(fabs(16 + 219 * (kr * r + (1 - kr - kb) * g + kb * b) - yuv[i]) <= 0.5001);
    }
    for (int64_t i = 0; i < cw * ch; i++) {
        double c[3] = {0, 0, 0};
        const int64_t x = i % cw * (w / cw), y = i / cw * (h / ch), n = half ? 4 : 1;
        for (int64_t k = 0; k < n; k++) {
            for (int j = 0; j < 3; j++)
                c[j] += rgb[3 * (x + k % 2 + w * (y + k / 2)) + j] / 255.0 / (double)n;
        }
        const double luma = kr * c[0] + (1 - kr - kb) * c[1] + kb * c[2];
        assert_true(fabs(128 + 224 * (c[2] - luma) / (2 * (1 - kb)) - yuv[w * h + i]) <= 0.5001);
        assert_true(fabs(128 + 224 * (c[0] - luma) / (2 * (1 - kr)) - yuv[w * h + cw * ch + i]) <=
                    0.5001);
    }
}

static void test_video(void **state) {
    (void)state;
    const char *folder = new_folder();
    char name[64];
    const int64_t w = wan.out_w, h = wan.out_h, n = wan.out_frames;
    assert_true(n == 17 && wan.n == 2);
#define WAN "--model", MODEL("wan"), "--out", folder, "--latents"
    expect_success(RUN(WAN, FOLDER "/video.safetensors"));
    assert_int_equal(n_files(folder), 2 * n);
    for (int64_t i = 0; i < 2 * n; i++) {
        snprintf(name, sizeof name, "latent_tensor%s-%04d.png", i < n ? "" : "-2", (int)(i % n));
        expect_picture(folder, name, &wan, i);
    }
    expect_success(RUN(WAN, FOLDER "/wan.gguf", "--chunk", "2", "--only", "1"));
    for (int64_t i = 0; i < n; i++) {
        char other[64];
        snprintf(name, sizeof name, "latent.1-%04d.png", (int)i);
        snprintf(other, sizeof other, "latent_tensor-2-%04d.png", (int)i);
        expect_same(folder, name, folder, other);
    }
    static const struct { const char *chroma, *matrix, *head; } cases[] = {
        {"444", NULL, "YUV4MPEG2 W24 H32 F16:1 Ip A1:1 C444 XCOLORRANGE=LIMITED XMATRIX=BT601\n"},
        {"420", "bt709",
         "YUV4MPEG2 W24 H32 F16:1 Ip A1:1 C420jpeg XCOLORRANGE=LIMITED XMATRIX=BT709\n"},
    };
    assert_true(w == 24 && h == 32);
    for (int k = 0; k < 2; k++) {
        size_t size, at = strlen(cases[k].head);
        const size_t frame = (size_t)(k == 0 ? 3 * w * h : w * h * 3 / 2);
        const char *args[] = {WAN, FOLDER "/wan.gguf", "--y4m", cases[k].chroma,
                              cases[k].matrix ? "--matrix" : NULL, cases[k].matrix, NULL};
        expect_success(run_with(-1, args));
        char *bytes = bytes_of(folder, "latent.1.y4m", &size);
        assert_memory_equal(bytes, cases[k].head, at);
        assert_int_equal(size, at + (size_t)n * (6 + frame));
        for (int64_t i = 0; i < n; i++, at += 6 + frame) {
            snprintf(name, sizeof name, "latent.1-%04d.png", (int)i);
            unsigned char *rgb = picture_of(folder, name, w, h);
            assert_memory_equal(bytes + at, "FRAME\n", 6);
            expect_yuv((const unsigned char *)bytes + at + 6, rgb, w, h, k == 1,
                       k == 1 ? 0.2126 : 0.299, k == 1 ? 0.0722 : 0.114);
            free(rgb);
        }
        free(bytes);
    }
    const char *const whole = folder;
    folder = new_folder();
    expect_success(RUN(WAN, FOLDER "/wan.gguf", "--exact", "--tile", "16", "--chunk", "2"));
    for (int64_t i = 0; i < n; i++) {
        snprintf(name, sizeof name, "latent.1-%04d.png", (int)i);
        expect_same(folder, name, whole, name);
    }
    folder = new_folder();
    expect_failure(RUN("--model", MODEL("wan"), "--latents", FOLDER "/wan.gguf", "--only", "0",
                       "--out", "no-such-folder"),
                   "no-such-folder");
    assert_int_equal(n_files(folder), 0);
}

static void test_stats(void **state) {
    (void)state;
    const char *folder = new_folder();
    char trace[128];
    size_t size;
    snprintf(trace, sizeof trace, "%s/trace", folder);
    const outcome *o = RUN(TAESD, "--out", folder, "--stats", "--trace", trace);
    expect_success(o);
    assert_true(statistic(o, "\ndecoding ") > 0 && statistic(o, "\nwriting ") > 0);
    assert_non_null(strstr(o->err, "\nregion "));
    assert_non_null(strstr(o->err, "\nactivations          F32 (the default of the backend)"));
    char *text = bytes_of(folder, "trace", &size);
    cJSON *json = cJSON_Parse(text);
    assert_non_null(json);
    int n_decode = 0, n_conv = 0;
    const cJSON *e, *events = cJSON_GetObjectItem(json, "traceEvents");
    cJSON_ArrayForEach(e, events) {
        const char *name = cJSON_GetObjectItem(e, "name")->valuestring;
        n_decode += strcmp(name, "decode") == 0;
        n_conv += strncmp(name, "conv", 4) == 0;
    }
    assert_true(n_decode == 2 && n_conv >= 2 * 10);
    cJSON_Delete(json);
    free(text);
}

static void test_options(void **state) {
    (void)state;
    static const struct { const char *name, *value; } wrong[] = {
        {"--nonsense", NULL}, {"--only", NULL}, {"--only", "x"}, {"--only", "-1"}, {"--tile", "0"},
        {"--tile", "1.5"}, {"--batch", "0"}, {"--budget", "0"}, {"--budget", "1X"},
        {"--budget", "M"},
        {"--budget", "1KM"}, {"--budget", "nan"}, {"--y4m", "422"}, {"--matrix", "bt2020"},
        {"--fps", "0"}, {"--threads", "0"}, {"--device", "abacus"}, {"--precision", "int4"},
        {"--scale", "0"}, {"--scale", "inf"}, {"stray", NULL}, {"--out", NULL}, {"--overlap", "-8"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const char *args[3] = {wrong[i].name, wrong[i].value, NULL};
        const outcome *o = run_with(-1, args);
        expect_failure(o, wrong[i].name);
        assert_string_equal(o->out, "");
    }
    const outcome *o = RUN("--help");
    expect_success(o);
    assert_string_equal(o->err, "");
    assert_int_equal(strncmp(o->out, "usage: decode ", 14), 0);
    const char *folder = new_folder();
    expect_failure(RUN(TAESD, "--out", folder, "--weights", "q9_9"), "q9_9");
    expect_failure(RUN(TAESD, "--out", folder, "--activations", "q8_0"), "q8_0");
    expect_failure(RUN(TAESD, "--out", folder, "--device", "gpu"), "");
    expect_failure(RUN(TAESD, "--out", folder, "--only", "2"), "2 latents");
    expect_failure(RUN(TAESD, "--out", "no/such/folder"), "no/such/folder");
    expect_failure(RUN(TAESD, "--only", "0", "--out", "no/such/file.png"), "no/such/file.png");
    expect_failure(RUN(TAESD, "--only", "0", "--out", "/dev/full"), "/dev/full");
    expect_failure(RUN(TAESD, "--only", "0", "--y4m", "420", "--out", "/dev/full"), "/dev/full");
    assert_int_equal(n_files(folder), 0);
    expect_failure(RUN(TAESD, "--only", "0", "--out", folder, "--trace", "/dev/full"), "/dev/full");
}

static void test_wrong_files(void **state) {
    (void)state;
    const char *folder = new_folder();
    static const char *const none[] = {"no/such/file", "tests", "tests/test_decode.c", "/dev/null",
                                       "examples/model/rocq-demo.gguf"};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
        expect_failure(RUN("--model", none[i], "--out", folder), none[i]);
        expect_failure(RUN("--model", MODEL("taesd"), "--latents", none[i], "--out", folder),
                       none[i]);
    }
    expect_failure(RUN("--model", MODEL("wide"), "--latents", FOLDER "/wan.gguf", "--out", folder),
                   "latent.0"); // of 16 channels
    expect_failure(RUN("--model", FOLDER "/titled.gguf", "--out", folder), "titled.gguf");

    // Cut off anywhere; and numbers that are none.
    static const char *const whole[] = {MODEL("taesd"), FOLDER "/titled.gguf",
                                        FOLDER "/latents.safetensors"};
    const char *path = FOLDER "/cut";
    for (int k = 0; k < 3; k++) {
        size_t size;
        char *bytes = bytes_of(".", whole[k], &size);
        for (size_t i = 0; i < 12; i++) {
            const size_t cut = i < 4 ? 5 * i : i < 11 ? size * i / 11 : size - 1;
            FILE *f = fopen(path, "wb");
            assert_non_null(f);
            assert_true(fwrite(bytes, 1, cut, f) == cut && fclose(f) == 0);
            if (k == 0) expect_failure(RUN("--model", path, "--out", folder), path);
            else
                expect_failure(RUN("--model", MODEL("taesd"), "--latents", path, "--out", folder),
                               path);
        }
        free(bytes);
    }
    float values[4 * 3 * 2] = {0};
    const int64_t shape[3] = {4, 3, 2};
    values[7] = NAN;
    write_safetensors(path, values, 3, shape);
    expect_failure(RUN("--model", MODEL("taesd"), "--latents", path, "--out", folder), "finite");
    assert_int_equal(n_files(folder), 0);
}

// Every allocation of a whole run denied in turn: an error, and nothing left behind. Of a PNG, for
// which stb_image_write takes over a thousand, some of those.
static void test_no_memory(void **state) {
    (void)state;
    const char *folder = new_folder();
    static const char *const formats[2][2] = {{"--threads", "2"}, {"--y4m", "420"}};
    for (int i = 0; i < 2; i++) {
        const char *args[] = {TAESD,     "--out",       folder,        "--only", "0",
                              "--stats", formats[i][0], formats[i][1], NULL};
        const outcome *o = run_with(-1, args);
        expect_success(o);
        const int64_t n = o->calls;
        assert_true(n > 10 && (i == 0 || n < 400));
        assert_int_equal(n_files(folder), 1);
        folder = new_folder();
        for (int64_t k = 0; k < n; k += i == 0 && k >= 100 && k < n - 40 ? 39 : 1) {
            expect_failure(run_with(k, args), "");
            // the last ones are of what comes after the picture
            assert_true(n_files(folder) == 0 || k > n - 20);
            if (n_files(folder) > 0) folder = new_folder();
        }
        printf("# %d allocations denied, %s\n", (int)n, i == 0 ? "or some of them" : "each");
        folder = new_folder();
    }
}

// Progress in lines that are overwritten and at last erased, on a terminal only; Ctrl-C while it is
// shown ends the program as that signal does, and leaves no file.
static void test_progress_and_interrupt(void **state) {
    (void)state;
    const char *folder = new_folder();
    static outcome o;
    write_large(FOLDER "/large.safetensors", 24, 16);
    const char *args[] = {"--model", MODEL("taesd"), "--latents", FOLDER "/large.safetensors",
                          "--out",   folder,         NULL};
    child c = start(-1, true, args);
    finish(&c, &o, 0);
    expect_success(&o);
    assert_non_null(strstr(o.err, "\rcomputing "));
    assert_null(strchr(o.err, '\n'));
    assert_int_equal(o.err[strlen(o.err) - 1], '\r');
    assert_int_equal(n_files(folder), 1);

    folder = new_folder();
    args[5] = folder;
    write_large(FOLDER "/large.safetensors", 240, 160); // a hundred times as long
    c = start(-1, true, args);
    char shown[4096];
    size_t n = 0;
    do {
        const ssize_t k = read(c.err, shown + n, sizeof shown - 1 - n);
        assert_true(k > 0);
        shown[n += (size_t)k] = '\0';
    } while (!strstr(shown, "\rcomputing "));
    assert_int_equal(kill(c.pid, SIGINT), 0);
    finish(&c, &o, 0);
    assert_int_equal(o.status, -SIGINT);
    assert_null(strchr(o.err, '\n'));
    assert_string_equal(o.out, "");
    assert_int_equal(n_files(folder), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pictures),
        cmocka_unit_test(test_scale),
        cmocka_unit_test(test_tiles),
        cmocka_unit_test(test_video),
        cmocka_unit_test(test_stats),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_wrong_files),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_progress_and_interrupt),
    };
    return cmocka_run_group_tests_name("decode", tests, setup, teardown);
}
