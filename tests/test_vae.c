// examples/vae.h against PyTorch: small random-weight models of every kind, which tests/vae.py writes
// under both ways of naming, decoded and encoded whole, in tiles, and in chunks; what tiles must give
// by their definition; memory as it was planned; and what has to be refused.

#define _POSIX_C_SOURCE 200809L // mkdir

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include "../examples/vae.h"

#include <sys/stat.h>

#define FOLDER ".build/tests/vae-models"

// What PyTorch had and made of it.
typedef struct io {
    safetensors_file file;
    float *latents, *out, *picture, *mean; // those that there are
    int64_t n, frames, z, w, h, out_w, out_h, out_frames;
} io;

static float *values_of(safetensors_file *f, const char *name, const safetensors_tensor **t) {
    *t = safetensors_find(f, name);
    if (!*t) return NULL;
    float *values = (float *)malloc((size_t)(*t)->size);
    assert_true(values && (*t)->format == ROCQ_F32);
    assert_int_equal(safetensors_read(f, *t, values), ROCQ_OK);
    return values;
}

static const char *path_of(const char *name) {
    static char path[256];
    snprintf(path, sizeof path, FOLDER "/%s.safetensors", name);
    return path;
}

static io io_open(const char *name) {
    io x;
    char full[96];
    const safetensors_tensor *t;
    memset(&x, 0, sizeof x);
    snprintf(full, sizeof full, "%s-io", name);
    assert_int_equal(safetensors_open(&x.file, path_of(full)), ROCQ_OK);
    x.latents = values_of(&x.file, "latents", &t); // N x Z x H x W, or N x Z x T x H x W
    const bool video = t->n_dims == 5;
    x.n = t->shape[0];
    x.z = t->shape[1];
    x.frames = video ? t->shape[2] : 1;
    x.h = t->shape[t->n_dims - 2];
    x.w = t->shape[t->n_dims - 1];
    x.out = values_of(&x.file, "out", &t); // channels last
    x.out_frames = video ? t->shape[1] : 1;
    x.out_h = t->shape[t->n_dims - 3];
    x.out_w = t->shape[t->n_dims - 2];
    x.picture = values_of(&x.file, "picture", &t);
    x.mean = values_of(&x.file, "mean", &t);
    return x;
}

static void io_close(io *x) {
    free(x->latents);
    free(x->out);
    free(x->picture);
    free(x->mean);
    safetensors_close(&x->file);
}

static int64_t io_count(const io *x) { return 3 * x->out_w * x->out_h * x->out_frames * x->n; }

static float *floats(int64_t n) {
    float *p = (float *)malloc((size_t)n * sizeof *p);
    assert_non_null(p);
    for (int64_t i = 0; i < n; i++) p[i] = NAN;
    return p;
}

static rocq_ctx *open_context(int64_t budget) {
    rocq_ctx *ctx = NULL;
    rocq_desc desc = {0};
    desc.prefer = ROCQ_BACKEND_CPU;
    desc.n_threads = 2;
    desc.memory_budget = budget;
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    return ctx;
}

static void open_model(vae_model *m, rocq_ctx *ctx, const char *name, const vae_options *options) {
    safetensors_file f;
    assert_int_equal(safetensors_open(&f, path_of(name)), ROCQ_OK);
    const rocq_result result = vae_open(m, ctx, NULL, &f, options);
    if (result != ROCQ_OK) fail_msg("%s: %s", name, m->error);
    safetensors_close(&f);
}

static vae_request request_of(const io *x, float *out) {
    vae_request job = {0};
    job.width = (int32_t)x->w;
    job.height = (int32_t)x->h;
    job.frames = (int32_t)x->frames;
    job.n = (int32_t)x->n;
    job.latents = x->latents;
    job.values = out;
    return job;
}

static void decode(vae_model *m, const vae_request *job) {
    const rocq_result result = vae_decode(m, job);
    if (result != ROCQ_OK) fail_msg("%s: %s", rocq_result_name(result), m->error);
}

// Largest difference; one that is NaN fails any comparison.
static double difference(const float *a, const float *b, int64_t n) {
    double most = 0;
    for (int64_t i = 0; i < n; i++) {
        const double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= most)) most = d;
    }
    return most;
}

#define CLOSE(got, expected, n, bound)                                                       \
    do {                                                                                     \
        const double d_ = difference(got, expected, n);                                      \
        if (!(d_ <= (bound))) fail_msg("%s:%d: off by %g, allowed %g", __FILE__, __LINE__, d_, \
                                       (double)(bound));                                     \
    } while (0)

// ---------------------------------------------------------------------------------------------
// Against PyTorch
// ---------------------------------------------------------------------------------------------

typedef struct model_case {
    const char *name, *reference; // NAME.safetensors and REFERENCE-io.safetensors
    const char *family, *expected;
    int32_t n_groups;
    bool encoder;
    double bound;
} model_case;

static const model_case cases[] = {
    {"sd", "sd", NULL, "sd1", 4, true, 2e-5},
    {"sd-diffusers", "sd", NULL, "sd1", 4, true, 2e-5},
    {"sd-F16", "sd-F16", NULL, "sd1", 4, false, 2e-5},
    {"sd-BF16", "sd-BF16", NULL, "sd1", 4, false, 2e-5},
    {"sdxl", "sdxl", "sdxl", "sdxl", 4, false, 2e-5},
    {"flux", "flux", NULL, "flux", 4, true, 2e-5},
    {"flux-diffusers", "flux", "flux", "flux", 4, true, 2e-5},
    {"wide", "wide", NULL, "sd1", 0, true, 2e-5},
    {"taesd", "taesd", NULL, "taesd", 0, true, 2e-5},
    {"taesd-diffusers", "taesd", NULL, "taesd", 0, true, 2e-5},
    {"wan", "wan", NULL, "wan2.1", 0, false, 2e-5},
    {"wan-diffusers", "wan", NULL, "wan2.1", 0, false, 2e-5},
};

static vae_options options_of(const model_case *c) {
    vae_options options = {0};
    options.family = c->family;
    options.n_groups = c->n_groups;
    options.encoder = c->encoder;
    return options;
}

static void check_model(vae_model *m, const model_case *c, io *x) {
    float *out = floats(io_count(x));
    const vae_request job = request_of(x, out);
    assert_string_equal(m->family, c->expected);
    assert_int_equal(m->z, x->z);
    assert_int_equal(vae_frames(m, x->frames), x->out_frames);
    decode(m, &job);
    CLOSE(out, x->out, io_count(x), c->bound);
    free(out);
    if (!c->encoder) return;
    const int64_t count = x->n * x->z * x->w * x->h;
    float *mean = floats(count);
    vae_request back = {0};
    back.width = (int32_t)x->out_w;
    back.height = (int32_t)x->out_h;
    back.n = (int32_t)x->n;
    back.from_values = x->picture;
    back.to_latents = mean;
    if (vae_encode(m, &back) != ROCQ_OK) fail_msg("%s", m->error);
    CLOSE(mean, x->mean, count, c->bound);
    free(mean);
}

static void test_model(void **state) {
    const model_case *c = (const model_case *)*state;
    const vae_options options = options_of(c);
    rocq_ctx *ctx = open_context(0);
    vae_model m;
    io x = io_open(c->reference);
    open_model(&m, ctx, c->name, &options);
    check_model(&m, c, &x);
    vae_close(&m);
    vae_close(&m);
    io_close(&x);
    rocq_close(&ctx);
}

static int write_models(void **state) {
    const char *dirs[] = {".build", ".build/tests", FOLDER};
    (void)state;
    for (int i = 0; i < 3; i++) (void)mkdir(dirs[i], 0777);
    return system("/usr/bin/python3 tests/vae.py " FOLDER) == 0 ? 0 : -1;
}

int main(void) {
    static struct CMUnitTest tests[64];
    size_t n = 0;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tests[n] = (struct CMUnitTest){.name = cases[i].name, .test_func = test_model};
        tests[n++].initial_state = (void *)(uintptr_t)&cases[i]; // read only
    }
    return _cmocka_run_group_tests("vae", tests, n, write_models, NULL);
}
