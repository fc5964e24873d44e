// examples/vae.h against PyTorch: small random-weight models of every kind, which tests/vae.py
// writes under both ways of naming, decoded and encoded whole, in tiles, and in chunks; what tiles
// must give by their definition; memory as it was planned; and what has to be refused.

#define _POSIX_C_SOURCE 200809L // mkdir

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include "../examples/vae.h"

#include "cancelling.h"

#include <sys/stat.h>

#ifndef VAE_BACKEND // tests/test_vae_gpu.c runs some of it on the stand-in of a GPU
#define VAE_BACKEND ROCQ_BACKEND_CPU
#define VAE_TEARDOWN NULL
#endif

#ifndef VAE_SIMULATED // with it that file has included the stand-in's controls
#define VAE_SIMULATED 0
#endif

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

static rocq_ctx *open_as(int64_t budget, bool no_graphs) {
    rocq_ctx *ctx = NULL;
    rocq_desc desc = {0};
    desc.no_graphs = no_graphs;
    desc.prefer = VAE_BACKEND;
    desc.n_threads = 2;
    desc.memory_budget = budget;
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    return ctx;
}

static rocq_ctx *open_context(int64_t budget) { return open_as(budget, false); }

static rocq_stats stats_of(rocq_ctx *ctx) {
    rocq_stats stats;
    assert_int_equal(rocq_get_stats(ctx, &stats), ROCQ_OK);
    return stats;
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

static double nmse(const float *x, const float *reference, int64_t n) {
    double error = 0, power = 0;
    for (int64_t i = 0; i < n; i++) {
        error += ((double)x[i] - reference[i]) * ((double)x[i] - reference[i]);
        power += (double)reference[i] * reference[i];
    }
    return error / power;
}

// Off by at most the bound. On a GPU, which computes in F16: 50 dB below the values.
static void check_close(const float *got, const float *expected, int64_t n, double bound,
                        int line) {
    const bool gpu = VAE_BACKEND == ROCQ_BACKEND_GPU;
    const double d = gpu ? nmse(got, expected, n) : difference(got, expected, n);
    if (!(d <= (gpu ? 1e-5 : bound))) {
        fail_msg("line %d: off by %g, allowed %g", line, d, gpu ? 1e-5 : bound);
    }
}
#define CLOSE(got, expected, n, bound) check_close(got, expected, n, bound, __LINE__)

// ---------------------------------------------------------------------------------------------
// Against PyTorch
// ---------------------------------------------------------------------------------------------

typedef struct model_case {
    const char *name, *reference; // NAME.safetensors and REFERENCE-io.safetensors
    const char *family, *expected;
    int32_t n_groups;
    bool encoder;
    double bound;
    bool gpu; // on the stand-in too
} model_case;

static const model_case cases[] = {
    {"sd", "sd", NULL, "sd1", 4, true, 2e-5, true},
    {"sd-diffusers", "sd", NULL, "sd1", 4, true, 2e-5, false},
    {"sd-F16", "sd-F16", NULL, "sd1", 4, false, 2e-5, false},
    {"sd-BF16", "sd-BF16", NULL, "sd1", 4, false, 2e-5, false},
    {"sdxl", "sdxl", "sdxl", "sdxl", 4, false, 2e-5, true},
    {"flux", "flux", NULL, "flux", 4, true, 2e-5, false},
    {"flux-diffusers", "flux", "flux", "flux", 4, true, 2e-5, true},
    {"wide", "wide", NULL, "sd1", 0, true, 2e-5, false},
    {"taesd", "taesd", NULL, "taesd", 0, true, 2e-5, true},
    {"taesd-diffusers", "taesd", NULL, "taesd", 0, true, 2e-5, false},
    {"wan", "wan", NULL, "wan2.1", 0, false, 2e-5, false},
    {"wan-diffusers", "wan", NULL, "wan2.1", 0, false, 2e-5, false},
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
    assert_int_equal(stats_of(ctx).n_fallbacks, 0);
    vae_close(&m);
    vae_close(&m);
    io_close(&x);
    rocq_close(&ctx);
}

// ---------------------------------------------------------------------------------------------
// Batches, tiles and chunks
// ---------------------------------------------------------------------------------------------

typedef struct opened {
    rocq_ctx *ctx;
    vae_model m;
    io x;
    int64_t count;
    float *whole, *other; // what is decoded whole, and room for another result
} opened;

static void open_all(opened *o, const char *name, const char *reference, int32_t n_groups,
                     bool encoder) {
    vae_options options = {0};
    options.n_groups = n_groups;
    options.encoder = encoder;
    o->ctx = open_context(0);
    open_model(&o->m, o->ctx, name, &options);
    o->x = io_open(reference);
    o->count = io_count(&o->x);
    o->whole = floats(o->count);
    o->other = floats(o->count);
    vae_request job = request_of(&o->x, o->whole);
    job.tiling = VAE_WHOLE;
    decode(&o->m, &job);
    CLOSE(o->whole, o->x.out, o->count, 2e-5);
}

static void close_all(opened *o) {
    vae_close(&o->m);
    io_close(&o->x);
    free(o->whole);
    free(o->other);
    rocq_close(&o->ctx);
}

static void forget(opened *o) {
    for (int64_t i = 0; i < o->count; i++) o->other[i] = NAN;
}

// Each picture of a batch has the bits that it has alone.
static void test_batches(void **state) {
    opened o;
    (void)state;
    open_all(&o, "sd", "sd", 4, false);
    for (int32_t batch = 0; batch < 2; batch++) {
        for (int64_t i = 0; i < o.x.n && batch == 0; i++) {
            const int64_t each = o.count / o.x.n;
            vae_request job = request_of(&o.x, o.other + i * each);
            job.n = 1;
            job.latents += i * o.x.z * o.x.w * o.x.h;
            decode(&o.m, &job);
        }
        if (batch == 1) { // one after the other, since both do not fit
            vae_request job = request_of(&o.x, o.other);
            vae_plan plan;
            assert_int_equal(vae_plan_decode(&o.m, &job, &plan), ROCQ_OK);
            assert_int_equal(plan.batch, 2);
            job.memory_budget = plan.peak_bytes - 1;
            decode(&o.m, &job);
            assert_true(o.m.plan.batch == 1 && o.m.plan.tiling == VAE_WHOLE);
        }
        assert_memory_equal(o.other, o.whole, (size_t)o.count * sizeof *o.other);
        forget(&o);
    }
    close_all(&o);
}

static bool in_tiles(const vae_model *m) {
    for (int32_t i = 0; i < m->n_segments; i++) {
        if (m->segments[i].tile > 0) return true;
    }
    return false;
}

// A budget between what exact tiles of that size need at least and what the whole picture takes.
static int64_t small_budget(opened *o, const vae_request *whole) {
    vae_request job = *whole;
    vae_plan plan;
    const bool decoder = job.latents != NULL;
    job.n = 1; // as many as exact tiles are of at once
    assert_int_equal((decoder ? vae_plan_decode : vae_plan_encode)(&o->m, &job, &plan), ROCQ_OK);
    job.memory_budget = 1;
    job.tiling = VAE_EXACT;
    const int64_t most = plan.peak_bytes;
    assert_int_equal((decoder ? vae_plan_decode : vae_plan_encode)(&o->m, &job, &plan),
                     ROCQ_E_BUDGET);
    return plan.smallest_bytes + (most - plan.smallest_bytes) / 8;
}

// Several pictures or videos in one call have the bits that each has alone: in tiles and in chunks
// as whole.
static void test_batches_in_parts(void **state) {
    static const struct {
        const char *name;
        vae_tiling tiling;
        int32_t tile, overlap, chunk, chunk_overlap;
    } runs[] = {{"sd", VAE_EXACT, 16, 0, 0, 0},   {"taesd", VAE_EXACT, 24, 0, 0, 0},
                {"sd", VAE_BLEND, 32, 8, 0, 0},   {"taesd", VAE_BLEND, 32, 16, 0, 0},
                {"wan", VAE_WHOLE, 0, 0, 0, 0},   {"wan", VAE_WHOLE, 0, 0, 1, 0},
                {"wan", VAE_WHOLE, 0, 0, 3, 0},   {"wan", VAE_EXACT, 16, 0, 2, 0},
                {"wan", VAE_BLEND, 16, 8, 2, 0},  {"wan", VAE_BLEND, 16, 8, 3, 1}};
    (void)state;
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        opened o;
        open_all(&o, runs[i].name, runs[i].name, 4, false);
        const int64_t each = o.count / o.x.n, latents = o.x.z * o.x.frames * o.x.w * o.x.h;
        float *alone = floats(each);
        vae_request job = request_of(&o.x, o.other);
        job.tiling = runs[i].tiling;
        job.tile = runs[i].tile;
        job.overlap = runs[i].overlap;
        job.chunk = runs[i].chunk;
        job.chunk_overlap = runs[i].chunk_overlap;
        if (job.tiling == VAE_EXACT) job.memory_budget = small_budget(&o, &job);
        assert_true(job.n > 1);
        decode(&o.m, &job);
        assert_true(job.tiling == VAE_WHOLE || o.m.plan.n_tiles > 1);
        assert_true(job.chunk == 0 || o.m.plan.n_chunks > 1);
        if (job.tiling == VAE_WHOLE) {
            assert_memory_equal(o.other, o.whole, (size_t)o.count * sizeof *o.other);
        }
        for (int64_t k = 0; k < o.x.n; k++) {
            vae_request one = job;
            one.n = 1;
            one.latents = o.x.latents + k * latents;
            one.values = alone;
            // Of several, the latents of the next one wait in memory.
            if (one.memory_budget > 0) one.memory_budget -= (4 * latents + 255) / 256 * 256;
            for (int64_t e = 0; e < each; e++) alone[e] = NAN;
            decode(&o.m, &one);
            assert_memory_equal(alone, o.other + k * each, (size_t)each * sizeof *alone);
        }
        free(alone);
        close_all(&o);
    }
}

// Exact tiles, of several sizes: equal to the whole picture up to the rounding of the norms'
// moments, at seams as elsewhere.
static void test_exact(void **state) {
    static const struct {
        const char *name;
        int32_t tile;
    } exact[] = {{"large", 24}, {"large", 16}, {"sd", 16}, {"taesd", 24}};
    (void)state;
    for (size_t i = 0; i < sizeof exact / sizeof exact[0]; i++) {
        opened o;
        if (VAE_BACKEND == ROCQ_BACKEND_GPU && i != 2) continue;
        open_all(&o, exact[i].name, exact[i].name, 4, false);
        vae_request job = request_of(&o.x, o.other);
        job.tile = exact[i].tile;
        job.memory_budget = small_budget(&o, &job);
        job.tiling = VAE_EXACT;
        decode(&o.m, &job);
        const double d = difference(o.other, o.whole, o.count);
        print_message("%s, exact tiles of %d: off by %.3g, %.2f of the memory, %.2f of the work\n",
                      exact[i].name, (int)job.tile, d,
                      (double)o.m.plan.activation_bytes / 1e6,
                      o.m.plan.flops / o.m.plan.whole_flops);
        assert_true(in_tiles(&o.m) && o.m.plan.n_tiles > 1);
        CLOSE(o.other, o.whole, o.count, 2e-6);
        if (strcmp(exact[i].name, "taesd") == 0) { // no norms: the very bits
            assert_memory_equal(o.other, o.whole, (size_t)o.count * sizeof *o.other);
        }
        close_all(&o);
    }
}

// Tiles of any size, also those that convolutions reach far beyond: the bits of the whole, since
// this model has no norms, in the memory that was planned.
static void test_exact_sizes(void **state) {
    enum { W = 27, H = 20 };
    static float latents[4 * W * H], out[2][3 * 64 * W * H];
    (void)state;
    for (int i = 0; i < 4 * W * H; i++) latents[i] = (float)(i * 7919 % 1009) / 500 - 1;
    for (int32_t tile = 0; tile <= 80; tile += tile < 40 ? 8 : 40) {
        rocq_ctx *ctx = open_as(0, true);
        vae_model m;
        open_model(&m, ctx, "taesd", NULL);
        vae_request job = {.width = W, .height = H, .latents = latents, .values = out[tile > 0]};
        memset(out[1], 0xff, sizeof out[1]);
        job.tiling = tile > 0 ? VAE_EXACT : VAE_WHOLE;
        job.tile = tile;
        decode(&m, &job);
        assert_true((double)stats_of(ctx).peak_bytes == (double)m.plan.peak_bytes);
        if (tile > 0) assert_memory_equal(out[0], out[1], sizeof out[0]);
        vae_close(&m);
        rocq_close(&ctx);
    }
}

// Of a video too, in chunks of any length: the bits of the whole, since its norms are of one
// position each, in the memory that was planned.
static void test_exact_video(void **state) {
    enum { W = 13, H = 9, FRAMES = 5, Z = 16, OUT = 3 * 64 * W * H * (4 * FRAMES - 3) };
    static const struct {
        int32_t tile, chunk;
    } cut[] = {{0, 0}, {32, 0}, {32, 2}, {40, 1}, {48, 3}, {64, 1}, {128, 2}};
    static float latents[Z * W * H * FRAMES];
    float *out[2] = {floats(OUT), floats(OUT)};
    (void)state;
    for (int i = 0; i < Z * W * H * FRAMES; i++) latents[i] = (float)(i * 7919 % 1009) / 500 - 1;
    for (size_t i = 0; i < sizeof cut / sizeof cut[0]; i++) {
        rocq_ctx *ctx = open_as(0, true);
        vae_model m;
        open_model(&m, ctx, "wan", NULL);
        vae_request job = {.width = W, .height = H, .frames = FRAMES, .latents = latents};
        job.tiling = i > 0 ? VAE_EXACT : VAE_WHOLE;
        job.tile = cut[i].tile;
        job.chunk = cut[i].chunk;
        job.values = out[i > 0];
        for (int64_t j = 0; j < OUT; j++) job.values[j] = NAN;
        decode(&m, &job);
        print_message("exact tiles of %d, chunks of %d: %.0f bytes, %.2f of the work\n",
                      (int)job.tile, (int)job.chunk, (double)m.plan.peak_bytes,
                      m.plan.flops / m.plan.whole_flops);
        assert_true((double)stats_of(ctx).peak_bytes == (double)m.plan.peak_bytes);
        assert_true((m.plan.n_tiles > 1) == (i > 0 && job.tile < 128));
        if (i > 0) CLOSE(out[1], out[0], OUT, 0);
        vae_close(&m);
        rocq_close(&ctx);
    }
    free(out[0]);
    free(out[1]);
}

// Pictures no larger than the smallest tile are one.
static void test_exact_small(void **state) {
    static const int32_t sizes[][2] = {{1, 1}, {2, 1}, {1, 4}, {4, 4}, {5, 1}, {3, 5}, {5, 5}};
    opened o;
    (void)state;
    open_all(&o, "sd", "sd", 4, false);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        float out[2][3 * 40 * 40];
        const int64_t count = 3 * (int64_t)64 * sizes[i][0] * sizes[i][1];
        vae_request job = request_of(&o.x, out[0]);
        assert_true(count <= 3 * 40 * 40);
        job.n = 1;
        job.width = sizes[i][0];
        job.height = sizes[i][1];
        decode(&o.m, &job);
        job.tiling = VAE_EXACT;
        job.values = out[1];
        decode(&o.m, &job);
        assert_int_equal(o.m.plan.tiling, VAE_EXACT);
        CLOSE(out[1], out[0], count, 2e-6);
        rocq_ctx *ctx = open_as(0, true); // where no scratch memory is left from before
        vae_model m;
        const vae_options options = {.n_groups = 4};
        open_model(&m, ctx, "sd", &options);
        decode(&m, &job);
        assert_int_equal(stats_of(ctx).live_bytes, m.plan.peak_bytes);
        vae_close(&m);
        rocq_close(&ctx);
    }
    close_all(&o);
}

// A model that is open decodes or encodes a request in bands wherever that is possible, whether or
// not a plan would: odd heights, a last band of one row, bands higher than the value, and blocks
// whose result is smaller, or larger with the convolution that enlarges before them, from either
// end of the stack.
static void in_bands(vae_model *m, vae_net *net, const vae_request *job, int32_t tile,
                     int32_t n_enlarging) {
    const bool decodes = net == &m->decoder;
    vae_request exact = *job;
    vae_plan plan;
    int32_t n_bands = 0, n_left = n_enlarging;
    m->planned_net = NULL;
    const rocq_result planned = decodes ? vae_plan_decode(m, job, &plan)
                                        : vae_plan_encode(m, job, &plan);
    assert_int_equal(planned, ROCQ_OK);
    const int64_t room = 2 * plan.activation_bytes;
    exact.tiling = VAE_EXACT;
    exact.tile = tile;
    assert_int_equal(decodes ? vae_plan_decode(m, &exact, &plan)
                             : vae_plan_encode(m, &exact, &plan), ROCQ_OK);
    m->plan.activation_bytes = room; // vae__plan keeps what it finds for a request like the last
    m->n_segments = 0;
    for (int32_t i = 0; i < net->n_modules; i = m->segments[m->n_segments++].end) {
        vae__segment_of *of = &m->segments[m->n_segments];
        const bool two = n_enlarging > 0 && i > 0 && i + 2 <= net->n_modules &&
                         vae__bandable(m, i, i + 2, tile);
        of->end = two ? i + 2 : i + 1;
        of->bands = two || (i > 0 && vae__bandable(m, i, i + 1, tile));
        of->tile = of->bands ? tile : 0;
        n_bands += of->bands;
        n_left -= two;
    }
    const int32_t n_segments = m->n_segments;
    assert_int_equal(n_left, 0);
    assert_true(n_bands > 0);
    const rocq_result result = decodes ? vae_decode(m, &exact) : vae_encode(m, &exact);
    if (result != ROCQ_OK) fail_msg("%s", m->error);
    assert_int_equal(m->n_segments, n_segments);
}

// Small pictures, module by module, one of them in tiles, so that the values behind it lie at the
// other end of the stack: a block whose result replaces its input row by row spoils none of it.
static void test_sides(void **state) {
    static const int32_t sizes[][2] = {{1, 15}, {2, 7}, {3, 5}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const vae_options options = {.n_groups = 4};
        rocq_ctx *ctx = open_context(0);
        vae_model m;
        vae_plan plan;
        open_model(&m, ctx, "large", &options);
        const int64_t area = (int64_t)sizes[i][0] * sizes[i][1];
        const int64_t count = 3 * m.scale * m.scale * area, n_in = m.z * area;
        float *in = floats(n_in), *whole = floats(count), *parts = floats(count);
        for (int64_t j = 0; j < n_in; j++) in[j] = (float)(j * 7919 % 1009) / 1009;
        vae_request job = {.width = sizes[i][0], .height = sizes[i][1], .tiling = VAE_WHOLE,
                           .latents = in, .values = whole};
        decode(&m, &job);
        const int64_t room = 2 * m.plan.activation_bytes;
        job.tiling = VAE_EXACT;
        job.tile = 8;
        job.values = parts;
        for (int32_t k = 0; k < m.decoder.n_modules; k++) {
            m.planned_net = NULL;
            assert_int_equal(vae_plan_decode(&m, &job, &plan), ROCQ_OK);
            m.plan.activation_bytes = room; // as in in_bands
            m.n_segments = m.decoder.n_modules;
            for (int32_t j = 0; j < m.n_segments; j++) {
                m.segments[j].end = j + 1;
                m.segments[j].bands = false;
                m.segments[j].tile = j == k && vae__tileable(&m, j, j + 1) ? 8 : 0;
            }
            for (int64_t j = 0; j < count; j++) parts[j] = NAN;
            decode(&m, &job);
            assert_int_equal(m.n_segments, m.decoder.n_modules);
            CLOSE(parts, whole, count, 4e-6);
        }
        vae_close(&m);
        rocq_close(&ctx);
        free(in);
        free(whole);
        free(parts);
    }
}

static void test_bands(void **state) {
    static const struct {
        const char *name;
        int32_t w, h, tile, n_enlarging; // those whose rows have 256 bytes
    } cut[] = {{"sd", 3, 13, 32, 2}, {"sd", 5, 7, 40, 3}, {"sd", 9, 6, 64, 3}, {"sd", 1, 9, 48, 0},
               {"sd", 4, 1, 72, 3}, {"sd", 2, 33, 32, 2}, {"sd", 6, 11, 56, 3},
               {"taesd", 2, 13, 32, 0}, {"taesd", 8, 5, 40, 2}, {"taesd", 17, 9, 64, 3}};
    (void)state;
    for (size_t i = 0; i < sizeof cut / sizeof cut[0]; i++) {
        const bool norms = strcmp(cut[i].name, "sd") == 0;
        const int64_t area = (int64_t)cut[i].w * cut[i].h, count = 3 * 64 * area;
        const vae_options options = {.n_groups = 4, .encoder = true};
        float *in = floats(count), *whole = floats(count), *banded = floats(count);
        rocq_ctx *ctx = open_context(0);
        vae_model m;
        open_model(&m, ctx, cut[i].name, &options);
        for (int64_t j = 0; j < count; j++) in[j] = (float)(j * 7919 % 1009) / 1009;
        for (int k = 0; k < 3; k++) {
            vae_request job = {.width = cut[i].w, .height = cut[i].h, .tiling = VAE_WHOLE};
            const int64_t n = k < 2 ? count : m.z * area;
            if (k < 2) {
                job.latents = in;
                job.values = whole;
                decode(&m, &job);
                job.values = banded;
            } else {
                job.width *= 8;
                job.height *= 8;
                job.from_values = in;
                job.to_latents = whole;
                assert_int_equal(vae_encode(&m, &job), ROCQ_OK);
                job.to_latents = banded;
            }
            for (int64_t j = 0; j < n; j++) banded[j] = NAN;
            in_bands(&m, k < 2 ? &m.decoder : &m.encoder, &job, cut[i].tile,
                     k == 1 ? cut[i].n_enlarging : 0);
            CLOSE(banded, whole, n, norms ? 4e-6 : 0);
        }
        vae_close(&m);
        rocq_close(&ctx);
        free(in);
        free(whole);
        free(banded);
    }
}

static void test_exact_encoder(void **state) {
    opened o;
    (void)state;
    open_all(&o, "sd", "sd", 4, true);
    const int64_t count = o.x.z * o.x.w * o.x.h;
    float *mean = floats(count);
    vae_request job = {0};
    job.width = (int32_t)o.x.out_w;
    job.height = (int32_t)o.x.out_h;
    job.from_values = o.x.picture;
    job.to_latents = mean;
    job.memory_budget = small_budget(&o, &job);
    job.tiling = VAE_EXACT;
    if (vae_encode(&o.m, &job) != ROCQ_OK) fail_msg("%s", o.m.error);
    assert_true(in_tiles(&o.m));
    CLOSE(mean, o.x.mean, count, 2e-5);
    free(mean);
    close_all(&o);
}

// Of n tiles of size positions over total the first position of number i, and its share of p.
static int64_t start_of(int64_t i, int64_t size, int64_t overlap, int64_t total) {
    const int64_t at = i * (size - overlap);
    return at + size > total ? total - size : at;
}

static double share_of(int64_t i, int64_t n, int64_t size, int64_t overlap, int64_t total,
                       int64_t p) {
    double mine = 0, sum = 0;
    for (int64_t j = 0; j < n; j++) {
        const int64_t a = start_of(j, size, overlap, total), b = a + size;
        double s = p >= a && p < b ? 1 : 0;
        if (s > 0 && j > 0) s = fmin(s, ((double)p + 0.5 - (double)a) /
                                     (double)(start_of(j - 1, size, overlap, total) + size - a));
        if (s > 0 && j + 1 < n) s = fmin(s, ((double)b - 0.5 - (double)p) /
                                         (double)(b - start_of(j + 1, size, overlap, total)));
        sum += s;
        if (j == i) mine = s;
    }
    return mine / sum;
}

typedef struct direction { // of a tile: positions, and how many tiles there are
    int64_t size, overlap, total, n;
} direction;

static direction direction_of(int64_t size, int64_t overlap, int64_t total) {
    direction d = {total, 0, total, 1};
    if (size <= 0 || size >= total) return d;
    d.size = size;
    d.overlap = overlap;
    d.n = (total - overlap + size - overlap - 1) / (size - overlap);
    return d;
}

// Latents of columns at[0] to at[0] + n[0] - 1, rows and frames so too, decoded as a video of its
// own.
static float *decode_piece(opened *o, int64_t item, const int64_t at[3], const int64_t n[3]) {
    const io *x = &o->x;
    const int64_t s = o->m.scale;
    float *latents = floats(x->z * n[0] * n[1] * n[2]);
    for (int64_t i = 0, k = 0; k < x->z; k++) {
        for (int64_t t = at[2]; t < at[2] + n[2]; t++) {
            for (int64_t y = at[1]; y < at[1] + n[1]; y++) {
                for (int64_t c = at[0]; c < at[0] + n[0]; c++, i++) {
                    latents[i] =
                        x->latents[c + x->w * (y + x->h * (t + x->frames * (k + x->z * item)))];
                }
            }
        }
    }
    float *out = floats(3 * s * n[0] * s * n[1] * vae_frames(&o->m, n[2]));
    vae_request job = {0};
    job.width = (int32_t)n[0];
    job.height = (int32_t)n[1];
    job.frames = (int32_t)n[2];
    job.latents = latents;
    job.values = out;
    decode(&o->m, &job);
    free(latents);
    return out;
}

// Blended tiles are by definition pictures or videos of their own, mixed by lines from 0 to 1.
static void check_blend(opened *o, int32_t tile, int32_t overlap, int32_t chunk,
                        int32_t chunk_overlap) {
    const int64_t s = o->m.scale, frames = o->x.frames, t = o->m.time_scale;
    const bool cut = chunk_overlap > 0; // else chunks carry over what they share
    const direction latent = direction_of(cut ? chunk : 0, chunk_overlap, frames);
    const direction d[3] = {direction_of(tile, overlap, o->x.out_w),
                            direction_of(tile, overlap, o->x.out_h),
                            {vae_frames(&o->m, latent.size),
                             vae_frames(&o->m, latent.size) - t * (latent.size - latent.overlap),
                             o->x.out_frames, latent.n}};
    const int64_t n[3] = {d[0].size / s, d[1].size / s, latent.size};
    double *sum = (double *)calloc((size_t)o->count, sizeof *sum);
    assert_non_null(sum);
    for (int64_t i = 0; i < o->x.n * d[0].n * d[1].n * d[2].n; i++) {
        const int64_t part[3] = {i % d[0].n, i / d[0].n % d[1].n, i / d[0].n / d[1].n % d[2].n};
        const int64_t item = i / d[0].n / d[1].n / d[2].n;
        int64_t at[3], to[3];
        for (int k = 0; k < 3; k++) to[k] = start_of(part[k], d[k].size, d[k].overlap, d[k].total);
        for (int k = 0; k < 3; k++) at[k] = to[k] / (k < 2 ? s : t);
        float *out = decode_piece(o, item, at, n);
        for (int64_t j = 0; j < d[0].size * d[1].size * d[2].size; j++) {
            const int64_t p[3] = {to[0] + j % d[0].size, to[1] + j / d[0].size % d[1].size,
                                  to[2] + j / d[0].size / d[1].size};
            double share = 1;
            for (int k = 0; k < 3; k++) {
                share *= share_of(part[k], d[k].n, d[k].size, d[k].overlap, d[k].total, p[k]);
            }
            for (int64_t c = 0; c < 3; c++) {
                sum[c +
                    3 * (p[0] + o->x.out_w * (p[1] + o->x.out_h * (p[2] + d[2].total * item)))] +=
                    share * (double)out[c + 3 * j];
            }
        }
        free(out);
    }
    for (int64_t i = 0; i < o->count; i++) o->whole[i] = (float)sum[i];
    free(sum);
    vae_request job = request_of(&o->x, o->other);
    job.tiling = tile > 0 ? VAE_BLEND : VAE_WHOLE;
    job.tile = tile;
    job.overlap = overlap;
    job.chunk = chunk;
    job.chunk_overlap = chunk_overlap;
    forget(o);
    decode(&o->m, &job);
    assert_int_equal(o->m.plan.n_tiles, d[0].n * d[1].n);
    CLOSE(o->other, o->whole, o->count, 4e-6); // values of up to 10, by up to nine tiles
}

static void test_blend(void **state) {
    opened o;
    (void)state;
    open_all(&o, "taesd", "taesd", 0, false);
    check_blend(&o, 16, 8, 0, 0);
    check_blend(&o, 32, 24, 0, 0); // over three tiles at a position
    check_blend(&o, 48, 8, 0, 0);  // of one direction only
    close_all(&o);
}

// What comes later does not change how a video begins.
static void test_beginning(void **state) {
    const int64_t at[3] = {0, 0, 0};
    opened o = {0};
    (void)state;
    o.ctx = open_context(0);
    open_model(&o.m, o.ctx, "wan", NULL);
    o.x = io_open("wan");
    const int64_t n[3] = {o.x.w, o.x.h, 2};
    float *out = decode_piece(&o, 0, at, n);
    CLOSE(out, o.x.out, 3 * o.x.out_w * o.x.out_h * 5, 2e-5);
    free(out);
    vae_close(&o.m);
    io_close(&o.x);
    rocq_close(&o.ctx);
}

// Tiles of a video, in chunks, and chunks that overlap.
static void test_blend_video(void **state) {
    opened o;
    (void)state;
    open_all(&o, "wan", "wan", 0, false);
    check_blend(&o, 0, 0, 3, 1);
    o.count /= o.x.n; // of one video
    o.x.n = 1;
    check_blend(&o, 16, 8, 2, 0);
    check_blend(&o, 24, 8, 2, 1);
    close_all(&o);
}

// With default tiles, which are larger than the picture, it is whole.
static void test_blend_defaults(void **state) {
    opened o;
    (void)state;
    open_all(&o, "sd", "sd", 4, false);
    vae_request job = request_of(&o.x, o.other);
    job.tiling = VAE_BLEND;
    decode(&o.m, &job);
    assert_true(o.m.plan.tile == 768 && o.m.plan.overlap == 96 && o.m.plan.n_tiles == 1);
    assert_memory_equal(o.other, o.whole, (size_t)o.count * sizeof *o.other);
    close_all(&o);
}

// A video in chunks of any length has the bits that it has whole.
static void test_chunks(void **state) {
    opened o;
    (void)state;
    open_all(&o, "wan", "wan", 0, false);
    for (int32_t chunk = 1; chunk < 5; chunk++) {
        vae_request job = request_of(&o.x, o.other);
        job.chunk = chunk;
        job.n = chunk == 2 ? (int32_t)o.x.n : 1;
        forget(&o);
        decode(&o.m, &job);
        assert_true(o.m.plan.chunk == chunk && o.m.plan.n_chunks == (5 + chunk - 1) / chunk);
        assert_memory_equal(o.other, o.whole,
                            (size_t)(o.count / o.x.n * job.n) * sizeof *o.other);
    }
    close_all(&o);
}

// ---------------------------------------------------------------------------------------------
// Memory
// ---------------------------------------------------------------------------------------------

// What was planned is what is used; and the smallest budget is one that does.
static void check_memory(const char *name, vae_tiling tiling, int32_t tile, int32_t chunk,
                         int32_t n) {
    const vae_options options = {.n_groups = 4};
    rocq_ctx *ctx = open_as(0, true); // graphs take memory that is not planned
    vae_model m;
    vae_plan plan;
    io x = io_open(name);
    float *out = floats(io_count(&x));
    open_model(&m, ctx, name, &options);
    assert_true(x.n >= n);
    x.n = n;
    vae_request job = request_of(&x, out);
    job.tiling = tiling;
    job.tile = tile;
    job.chunk = chunk;
    const rocq_stats before = stats_of(ctx);
    const rocq_result planned = vae_plan_decode(&m, &job, &plan);
    assert_int_equal(stats_of(ctx).n_allocs, before.n_allocs); // planning takes nothing
    if (planned != ROCQ_OK) fail_msg("%s: %s", name, m.error);
    decode(&m, &job);
    const rocq_stats after = stats_of(ctx);
    print_message("%d of %s, tiling %d, tile %d, chunk %d: planned %.0f, measured %.0f bytes\n",
                  (int)n, name, (int)m.plan.tiling, (int)m.plan.tile, (int)m.plan.chunk,
                  (double)plan.peak_bytes, (double)after.peak_bytes);
    assert_true(fabs((double)after.peak_bytes - (double)plan.peak_bytes) <=
                0.05 * (double)plan.peak_bytes);
    CLOSE(out, x.out, tiling == VAE_BLEND ? 0 : io_count(&x), 2e-5);
    decode(&m, &job); // again: what it has is enough
    assert_int_equal(stats_of(ctx).n_allocs, after.n_allocs);
    vae_close(&m);
    io_close(&x);
    free(out);
    rocq_close(&ctx);
}

static void test_memory(void **state) {
    static const struct {
        const char *name;
        vae_tiling tiling;
        int32_t tile, chunk, n;
    } runs[] = {{"large", VAE_WHOLE, 0, 0, 1},  {"large", VAE_EXACT, 16, 0, 1},
                {"large", VAE_EXACT, 0, 0, 1},  {"large", VAE_BLEND, 32, 0, 1},
                {"sd", VAE_WHOLE, 0, 0, 2},     {"sd", VAE_EXACT, 16, 0, 2},
                {"sd", VAE_BLEND, 32, 0, 2},    {"taesd", VAE_WHOLE, 0, 0, 2},
                {"taesd", VAE_EXACT, 24, 0, 2}, {"taesd", VAE_BLEND, 32, 0, 2},
                {"wan", VAE_WHOLE, 0, 0, 1},    {"wan", VAE_WHOLE, 0, 1, 1},
                {"wan", VAE_WHOLE, 0, 2, 1},    {"wan", VAE_BLEND, 16, 2, 1},
                {"wan", VAE_WHOLE, 0, 0, 2},    {"wan", VAE_WHOLE, 0, 2, 2},
                {"wan", VAE_EXACT, 16, 2, 2},   {"wan", VAE_BLEND, 16, 2, 2}};
    (void)state;
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        check_memory(runs[i].name, runs[i].tiling, runs[i].tile, runs[i].chunk, runs[i].n);
    }
}

// Less and less memory: whole, then exact tiles at a rising cost, all of the same picture, then
// none.
static void test_budgets(void **state) {
    const vae_options options = {.n_groups = 4};
    rocq_ctx *ctx = open_context(0);
    vae_model m;
    vae_plan plan;
    io x = io_open("large");
    float *out = floats(io_count(&x));
    (void)state;
    open_model(&m, ctx, "large", &options);
    vae_request job = request_of(&x, out);
    assert_int_equal(vae_plan_decode(&m, &job, &plan), ROCQ_OK);
    assert_int_equal(plan.tiling, VAE_WHOLE);
    assert_true(plan.flops == plan.whole_flops);
    const int64_t whole = plan.peak_bytes;
    job.memory_budget = 1;
    const rocq_stats before = stats_of(ctx);
    assert_int_equal(vae_decode(&m, &job), ROCQ_E_BUDGET);
    const int64_t least = m.plan.smallest_bytes;
    assert_true(strstr(m.error, "the smallest") && least > 0 && least < whole);
    assert_int_equal(stats_of(ctx).n_allocs, before.n_allocs);
    job.memory_budget = least - 1;
    assert_int_equal(vae_decode(&m, &job), ROCQ_E_BUDGET);
    assert_int_equal(m.plan.smallest_bytes, least);
    double work = 1e9;
    for (int i = 0; i < 6; i++) {
        job.memory_budget = i == 5 ? whole - 1 : least + (whole - least) * i / 5;
        decode(&m, &job);
        assert_int_equal(m.plan.tiling, VAE_EXACT);
        assert_true(m.plan.peak_bytes <= job.memory_budget);
        assert_true(m.plan.flops <= work * m.plan.whole_flops * 1.001);
        work = m.plan.flops / m.plan.whole_flops;
        print_message("%.0f bytes: %.2f of the work, tiles of %d\n", (double)job.memory_budget,
                      work, (int)m.plan.tile);
        CLOSE(out, x.out, io_count(&x), 2e-5);
    }
    vae_close(&m);
    rocq_close(&ctx);

    ctx = open_context(least); // the context's own limit: the model is loaded within it too
    open_model(&m, ctx, "large", &options);
    job.memory_budget = 0;
    decode(&m, &job);
    assert_int_equal(m.plan.tiling, VAE_EXACT);
    CLOSE(out, x.out, io_count(&x), 2e-5);
    vae_close(&m);
    rocq_close(&ctx);
    io_close(&x);
    free(out);
}

// Videos too: shorter chunks, then exact tiles.
static void test_video_budgets(void **state) {
    rocq_ctx *ctx = open_context(0);
    vae_model m;
    vae_plan plan;
    io x = io_open("wan");
    float *out = floats(io_count(&x));
    (void)state;
    open_model(&m, ctx, "wan", NULL);
    vae_request job = request_of(&x, out);
    assert_int_equal(vae_plan_decode(&m, &job, &plan), ROCQ_OK);
    assert_true(plan.tiling == VAE_WHOLE && plan.chunk == 5 && plan.n_chunks == 1);
    job.memory_budget = plan.peak_bytes - 1;
    decode(&m, &job);
    assert_true(m.plan.chunk < 5 && m.plan.n_chunks > 1 && m.plan.peak_bytes < plan.peak_bytes);
    CLOSE(out, x.out, io_count(&x), 2e-5);
    job.memory_budget = m.plan.peak_bytes - 1;
    job.tiling = VAE_WHOLE;
    while (vae_plan_decode(&m, &job, &plan) == ROCQ_OK) job.memory_budget = plan.peak_bytes - 1;
    assert_true(m.plan.chunk == 1 && strstr(m.error, "does not fit"));
    const int64_t least = m.plan.smallest_bytes;
    for (int64_t c = 0; c < io_count(&x); c++) out[c] = NAN;
    job.tiling = VAE_AUTO;
    job.memory_budget = least - 1;
    decode(&m, &job);
    assert_true(m.plan.tiling == VAE_EXACT && m.plan.peak_bytes <= job.memory_budget);
    CLOSE(out, x.out, io_count(&x), 2e-5);
    job.memory_budget = 1;
    assert_int_equal(vae_decode(&m, &job), ROCQ_E_BUDGET);
    assert_true(m.plan.smallest_bytes < least);
    job.memory_budget = m.plan.smallest_bytes;
    decode(&m, &job);
    CLOSE(out, x.out, io_count(&x), 2e-5);
    job.tiling = VAE_EXACT;
    job.chunk_overlap = 1;
    job.memory_budget = 0;
    assert_int_equal(vae_decode(&m, &job), ROCQ_E_ARGUMENT);
    assert_non_null(strstr(m.error, "chunks that overlap are blended"));
    vae_close(&m);
    io_close(&x);
    free(out);
    rocq_close(&ctx);
}

static void write_gguf(rocq_ctx *ctx, const char *name, const char *path, rocq_format format);

// ---------------------------------------------------------------------------------------------
// Requests that come again, and batches
// ---------------------------------------------------------------------------------------------

// Decoded again and again, with other latents in between: graphs are recorded once and replayed,
// nothing is allocated any more, and the bits are those of a context without graphs.
static void check_graphs(const char *name, vae_request job, int64_t n_graphs) {
    const vae_options options = {.n_groups = 4};
    rocq_ctx *ctx[2];
    vae_model m[2];
    io x = io_open(name);
    const int64_t n = x.n * x.z * x.frames * x.w * x.h, count = io_count(&x);
    float *latents = floats(n), *out[2] = {floats(count), floats(count)};
    const float *const own = x.latents;
    uint8_t *pixels[2];
    rocq_graph **graphs = NULL;
    job.width = (int32_t)x.w;
    job.height = (int32_t)x.h;
    job.frames = (int32_t)x.frames;
    job.n = (int32_t)x.n;
    for (int64_t i = 0; i < n; i++) latents[i] = own[n - 1 - i];
    for (int k = 0; k < 2; k++) {
        ctx[k] = open_as(0, k == 1);
        open_model(&m[k], ctx[k], name, &options);
        pixels[k] = (uint8_t *)malloc((size_t)count);
        assert_non_null(pixels[k]);
    }
    if (job.memory_budget < 0) { // so much less than it would take
        vae_plan plan;
        const int64_t less = job.memory_budget;
        job.memory_budget = 0;
        assert_int_equal(vae_plan_decode(&m[0], &job, &plan), ROCQ_OK);
        job.memory_budget = plan.peak_bytes + less;
    }
    for (int i = 0; i < 5; i++) {
        rocq_stats before = {0};
        job.latents = i == 2 || i == 3 ? latents : own;
        for (int k = 0; k < 2; k++) {
            before = stats_of(ctx[k]);
            for (int64_t j = 0; j < count; j++) out[k][j] = NAN;
            memset(pixels[k], 77 + k, (size_t)count);
            job.values = out[k];
            job.pixels = i < 4 ? pixels[k] : NULL; // at last another request
            decode(&m[k], &job);
            if (i > 0 && i < 4) assert_int_equal(stats_of(ctx[k]).n_allocs, before.n_allocs);
        }
        assert_memory_equal(out[0], out[1], (size_t)count * sizeof(float));
        if (i < 4) assert_memory_equal(pixels[0], pixels[1], (size_t)count);
        if (i == 0 || i == 4) CLOSE(out[0], x.out, m[0].plan.tiling == VAE_BLEND ? 0 : count, 2e-5);
        assert_true(m[0].recorded && m[1].n_graphs == 0);
        if (i == 0) graphs = m[0].graphs;
        if (i < 4) assert_true(m[0].graphs == graphs && m[0].n_graphs == n_graphs);
    }
    for (int k = 0; k < 2; k++) {
        vae_trim(&m[k]);
        assert_int_equal(m[k].n_graphs, 0);
        vae_close(&m[k]);
        free(out[k]);
        free(pixels[k]);
        rocq_close(&ctx[k]);
    }
    free(latents);
    io_close(&x);
}

static void test_graphs(void **state) {
    const vae_request whole = {.tiling = VAE_WHOLE};
    const vae_request alone = {.tiling = VAE_WHOLE, .memory_budget = -1000}; // picture by picture
    const vae_request exact = {.tiling = VAE_EXACT, .tile = 24};
    const vae_request blend = {.tiling = VAE_BLEND, .tile = 24, .overlap = 8};
    const vae_request chunks = {.chunk = 2};
    const vae_request exact_chunks = {
        .tiling = VAE_EXACT, .tile = 16, .chunk = 2, .memory_budget = -1};
    (void)state;
    check_graphs("sd", whole, 1);
    check_graphs("sd", alone, 1);
    if (VAE_BACKEND == ROCQ_BACKEND_GPU) return;
    check_graphs("taesd", exact, 6);
    check_graphs("taesd", blend, 14); // the first is of the latents, which all tiles read
    check_graphs("wan", chunks, 3);
    check_graphs("wan", exact_chunks, 12); // as many as downloads
}

static bool go_on(const char *what, int64_t done, int64_t total, void *user) {
    (void)what;
    (void)done;
    (void)total;
    (void)user;
    return true;
}

// Requests whose last batch is smaller, and those of which progress is reported, which cuts graphs:
// what is replayed has the bits of a context without graphs.
static void test_graphs_of_batches(void **state) {
    static const struct {
        const char *name;
        vae_request job;
        int32_t batch;
        bool reported;
    } runs[] = {
        {"sd", {.n = 3, .tiling = VAE_WHOLE}, 2, false},
        {"sd", {.n = 3, .tiling = VAE_WHOLE}, 2, true},
        {"taesd", {.n = 3, .tiling = VAE_EXACT, .tile = 24}, 1, true},
        {"wan", {.n = 2, .tiling = VAE_EXACT, .tile = 16, .chunk = 1}, 1, true},
        {"wan", {.n = 2, .tiling = VAE_BLEND, .tile = 24, .overlap = 8, .chunk = 2}, 1, true}};
    (void)state;
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        vae_options options = {.n_groups = 4};
        io x = io_open(runs[i].name);
        const int64_t each = x.z * x.frames * x.w * x.h, n = runs[i].job.n;
        const int64_t count = io_count(&x) / x.n * n;
        float *latents = floats(n * each), *want = floats(count), *got = floats(count);
        if (runs[i].reported) options.progress = go_on;
        for (int64_t k = 0; k < n * each; k++) latents[k] = x.latents[k % (x.n * each)];
        for (int graphs = 0; graphs < 2; graphs++) {
            rocq_ctx *ctx = open_as(0, graphs == 0);
            vae_model m;
            vae_plan plan;
            vae_request job = runs[i].job;
            open_model(&m, ctx, runs[i].name, &options);
            job.width = (int32_t)x.w;
            job.height = (int32_t)x.h;
            job.frames = (int32_t)x.frames;
            job.latents = latents;
            job.values = graphs ? got : want;
            assert_int_equal(vae_plan_decode(&m, &job, &plan), ROCQ_OK);
            for (int32_t k = 0; plan.batch > runs[i].batch && k < 40; k++) {
                job.memory_budget = plan.peak_bytes - 1;
                assert_int_equal(vae_plan_decode(&m, &job, &plan), ROCQ_OK);
            }
            for (int again = 0; again < (graphs ? 3 : 1); again++) {
                for (int64_t k = 0; k < count; k++) job.values[k] = NAN;
                decode(&m, &job);
                assert_int_equal(m.plan.batch, runs[i].batch);
                assert_true(m.recorded == (graphs == 1));
                if (graphs) assert_memory_equal(got, want, (size_t)count * sizeof *got);
            }
            vae_close(&m);
            rocq_close(&ctx);
        }
        free(latents);
        free(want);
        free(got);
        io_close(&x);
    }
}

static int64_t n_live, fail_in = -1; // blocks, and calls until one is denied, -1 = none is

static void *denying_alloc(size_t size, void *user) {
    (void)user;
    if (fail_in >= 0 && fail_in-- == 0) return NULL;
    n_live++;
    return malloc(size);
}

static void denying_free(void *ptr, size_t size, void *user) {
    (void)size;
    (void)user;
    n_live--;
    free(ptr);
}

// Without memory for a tile's way to the host nothing is lost, and nothing of the caller's freed.
static void test_tiles_without_memory(void **state) {
    const rocq_desc desc = {.prefer = VAE_BACKEND, .n_threads = 1,
                            .allocator = {denying_alloc, denying_free, NULL}};
    const vae_options options = {.n_groups = 4};
    (void)state;
    io x = io_open("taesd");
    float *out = floats(io_count(&x));
    rocq_ctx *ctx = NULL;
    vae_model m;
    vae_request job = request_of(&x, out);
    job.tiling = VAE_EXACT;
    job.tile = 24;
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    open_model(&m, ctx, "taesd", &options);
    decode(&m, &job);
    rocq_result result = ROCQ_E_MEMORY;
    for (int64_t i = 0; result != ROCQ_OK; i++) {
        vae_trim(&m);
        const int64_t live = n_live;
        fail_in = i;
        result = vae_decode(&m, &job);
        fail_in = -1;
        vae_trim(&m);
        if (result != ROCQ_OK) assert_int_equal(result, ROCQ_E_MEMORY);
        assert_true(n_live <= live); // scratch memory may be gone
        assert_true(result != ROCQ_OK || i > 20);
    }
    CLOSE(out, x.out, io_count(&x), 2e-5);
    vae_close(&m);
    rocq_close(&ctx);
    assert_int_equal(n_live, 0);
    free(out);
    io_close(&x);
}

// A request that is cancelled while weights are scaled for F16 leaves no model that gives something
// else from then on.
static void test_scaling_cancelled(void **state) {
    const rocq_desc desc = {.prefer = VAE_BACKEND, .n_threads = 2, .no_graphs = true,
                            .run_tasks = cancelling_tasks};
    (void)state;
    enum { SIDE = 16, N = 3 * 64 * SIDE * SIDE };
    const size_t size = N * sizeof(float);
    float latents[4 * SIDE * SIDE], *want = floats(N), *got = floats(N);
    int64_t n = 1, n_refused = 0;
    cancel_behind = true; // so that the weights of that run are scaled
    for (int i = 0; i < 4 * SIDE * SIDE; i++) latents[i] = (float)(i * 37 % 101 - 50) * 0.02f;
    for (int64_t at = -1; at < n; at++) {
        const vae_options options = {.family = "sd1", .scale = 0.13025f, .n_groups = 4,
                                     .activations = "f16", .stream = at % 2 != 0};
        vae_model m;
        const vae_request job = {.width = SIDE, .height = SIDE, .latents = latents,
                                 .values = at < 0 ? want : got};
        safetensors_file f;
        assert_int_equal(rocq_open(&to_cancel, &desc), ROCQ_OK);
        assert_int_equal(safetensors_open(&f, path_of("sdxl")), ROCQ_OK);
        assert_int_equal(vae_open(&m, to_cancel, NULL, &f, &options), ROCQ_OK);
        n_runs = 0;
        cancel_at = at;
        rocq_result result = vae_decode(&m, &job);
        if (at < 0) n = n_runs;
        cancel_at = -1;
        assert_int_equal(rocq_sync(to_cancel), ROCQ_OK);
        if (result != ROCQ_OK && m.gain != 1) { // the others are cheap to leave out
            result = vae_decode(&m, &job);
            n_refused += result == ROCQ_E_STATE;
            assert_true(result == ROCQ_OK || (result == ROCQ_E_STATE && !options.stream));
        }
        if (result == ROCQ_OK) assert_memory_equal(job.values, want, size);
        vae_close(&m);
        safetensors_close(&f);
        rocq_close(&to_cancel);
    }
    assert_true(n > 10);
    print_message("%d of %d cancelled requests leave the model to be opened again\n",
                  (int)n_refused, (int)n);
    free(want);
    free(got);
}

#if VAE_SIMULATED
// On a runtime whose replay of another graph rocq_warm has refused, ops run one by one.
static void test_graphs_refused(void **state) {
    opened o;
    rocq_buffer buffer = {0};
    rocq_tensor t;
    rocq_graph *graph = NULL;
    const int64_t n = 64;
    (void)state;
    open_all(&o, "taesd", "taesd", 4, false);
    assert_true(o.m.n_graphs == 1);
    assert_int_equal(rocq_buffer_alloc(o.ctx, &buffer, n * 4), ROCQ_OK);
    assert_int_equal(rocq_tensor_init(&t, &buffer, 0, ROCQ_F32, 1, &n), ROCQ_OK);
    const rocq_scale_params scale = {.y = &t, .x = &t, .scale = 3};
    simt_set_replay(SIMT_REPLAY_DROPPED, 0);
    assert_int_equal(rocq_graph_begin(o.ctx), ROCQ_OK);
    assert_int_equal(rocq_scale(o.ctx, &scale), ROCQ_OK);
    assert_int_equal(rocq_graph_end(o.ctx, &graph), ROCQ_OK);
    assert_int_equal(rocq_warm(o.ctx, graph), ROCQ_OK);
    assert_int_equal(stats_of(o.ctx).n_replays_refused, 1);
    for (int i = 0; i < 2; i++) { // like the last request, and another
        vae_request job = request_of(&o.x, o.other);
        job.tiling = i == 0 ? VAE_WHOLE : VAE_AUTO;
        forget(&o);
        decode(&o.m, &job); // which a replay would leave undone
        assert_memory_equal(o.other, o.whole, (size_t)o.count * sizeof *o.other);
        assert_true(!o.m.recorded && o.m.n_graphs == 1 - i);
    }
    simt_set_replay(SIMT_REPLAY_RIGHT, 0);
    rocq_graph_destroy(o.ctx, &graph);
    assert_int_equal(rocq_buffer_free(o.ctx, &buffer), ROCQ_OK);
    close_all(&o);
}
#endif

// A recording that fails is thrown away.
static void test_graphs_fail(void **state) {
    opened o;
    (void)state;
    open_all(&o, "sd", "sd", 4, false);
    vae_request job = request_of(&o.x, o.other);
    job.n = 1;
    rocq_cancel(o.ctx);
    assert_int_equal(vae_decode(&o.m, &job), ROCQ_E_CANCELLED);
    assert_true(o.m.n_graphs == 0 && !o.m.recorded);
    assert_int_equal(rocq_sync(o.ctx), ROCQ_OK);
    for (int i = 0; i < 2; i++) decode(&o.m, &job);
    rocq_cancel(o.ctx); // and so is what would be replayed
    assert_int_equal(vae_decode(&o.m, &job), ROCQ_E_CANCELLED);
    assert_int_equal(rocq_sync(o.ctx), ROCQ_OK);
    for (int i = 0; i < 2; i++) {
        forget(&o);
        decode(&o.m, &job);
        assert_memory_equal(o.other, o.whole, (size_t)(o.count / o.x.n) * sizeof *o.other);
    }
    close_all(&o);
}

static char trace[8 << 20];

static bool keep_trace(const void *src, int64_t size, void *user) {
    size_t *n = (size_t *)user;
    if (*n + (size_t)size >= sizeof trace) return false;
    memcpy(trace + *n, src, (size_t)size);
    *n += (size_t)size;
    trace[*n] = '\0';
    return true;
}

// The latents of the second picture are submitted before the first one is waited for; of tiles and
// chunks all are there before the first op.
static void test_uploads(void **state) {
    static const struct {
        const char *name;
        vae_request job;
        int n_uploads; // before the first download
    } cases_of[] = {{"sd", {.tiling = VAE_WHOLE}, 2},
                    {"taesd", {.tiling = VAE_EXACT, .tile = 24}, 2},
                    {"wan", {.chunk = 2}, 2}};
    (void)state;
    for (size_t i = 0; i < sizeof cases_of / sizeof cases_of[0]; i++) {
        const rocq_profile_desc all = {.cost = 1.0};
        const vae_options options = {.n_groups = 4};
        rocq_ctx *ctx = open_as(0, true);
        vae_model m;
        io x = io_open(cases_of[i].name);
        float *out = floats(io_count(&x));
        vae_request job = request_of(&x, out);
        vae_plan plan;
        size_t n = 0;
        int n_uploads = 0, n_late = 0;
        open_model(&m, ctx, cases_of[i].name, &options);
        job.tiling = cases_of[i].job.tiling;
        job.tile = cases_of[i].job.tile;
        job.chunk = cases_of[i].job.chunk;
        assert_int_equal(rocq_profile_start(ctx, &all), ROCQ_OK); // which takes memory
        if (i == 0) { // one after the other
            assert_int_equal(vae_plan_decode(&m, &job, &plan), ROCQ_OK);
            job.memory_budget = plan.peak_bytes - 1;
        }
        decode(&m, &job);
        assert_int_equal(rocq_profile_stop(ctx), ROCQ_OK);
        const rocq_result reported = rocq_profile_report(ctx, ROCQ_REPORT_TRACE, keep_trace, &n);
        if (reported != ROCQ_OK) fail_msg("%s", rocq_error(ctx));
        const char *first = strstr(trace, "\"download\"");
        assert_non_null(first);
        for (const char *at = trace; (at = strstr(at, "\"upload\"")); at++) {
            n_uploads += at < first;
            n_late += at > first;
        }
        assert_int_equal(x.n, 2);
        assert_int_equal(n_uploads, cases_of[i].n_uploads);
        assert_int_equal(n_late, 0);
        CLOSE(out, x.out, io_count(&x), 2e-5);
        vae_close(&m);
        free(out);
        io_close(&x);
        rocq_close(&ctx);
    }
}

// ---------------------------------------------------------------------------------------------
// Weights that are streamed
// ---------------------------------------------------------------------------------------------

// A model in a context of its own, its file kept open. Graphs take memory that is not planned.
typedef struct streaming {
    rocq_ctx *ctx;
    safetensors_file safetensors;
    rocq_gguf *gguf;
    vae_model m;
} streaming;

static void stream_open(streaming *s, const char *name, bool gguf, bool encoder, int64_t budget) {
    const vae_options options = {.n_groups = 4, .encoder = encoder, .stream = true};
    const rocq_gguf_desc desc = {.path = FOLDER "/model.gguf"};
    memset(s, 0, sizeof *s);
    s->ctx = open_as(budget, true);
    if (gguf) assert_int_equal(rocq_gguf_open(s->ctx, &s->gguf, &desc), ROCQ_OK);
    else assert_int_equal(safetensors_open(&s->safetensors, path_of(name)), ROCQ_OK);
    const rocq_stats before = stats_of(s->ctx);
    if (vae_open(&s->m, s->ctx, s->gguf, gguf ? NULL : &s->safetensors, &options) != ROCQ_OK) {
        fail_msg("%s: %s", name, s->m.error);
    }
    const int64_t taken = stats_of(s->ctx).live_bytes - before.live_bytes;
    assert_true(taken < 1000 || VAE_BACKEND == ROCQ_BACKEND_GPU); // nothing is loaded yet
}

static void stream_close(streaming *s) {
    vae_close(&s->m);
    safetensors_close(&s->safetensors);
    rocq_gguf_close(&s->gguf);
    rocq_close(&s->ctx);
}

// Decoded whole, in budgets from the smallest that does to all it takes: the bits that it has with
// its weights in memory, in the memory that was planned, with fewer and fewer weights read anew.
static void check_streaming(const char *name, const char *reference, bool gguf, bool encoder) {
    enum { BUDGETS = 6 };
    opened o;
    streaming s;
    vae_plan plan;
    if (gguf) {
        rocq_ctx *ctx = open_context(0);
        write_gguf(ctx, name, FOLDER "/model.gguf", ROCQ_Q8_0);
        rocq_close(&ctx);
    }
    open_all(&o, name, reference, 4, encoder);
    vae_request job = request_of(&o.x, o.other);
    job.tiling = VAE_WHOLE;
    job.n = 1; // else there are other batches or chunks, before weights are streamed
    job.chunk = job.frames;
    o.count /= o.x.n;
    if (gguf) { // what its own weights give in memory
        stream_open(&s, name, gguf, encoder, 0);
        job.values = o.whole;
        decode(&s.m, &job);
        assert_int_equal(s.m.plan.n_streamed, 0);
        assert_true(s.m.plan.weight_bytes == s.m.weight_bytes);
        job.values = o.other;
        stream_close(&s);
    }
    stream_open(&s, name, gguf, encoder, 0);
    assert_int_equal(vae_plan_decode(&s.m, &job, &plan), ROCQ_OK);
    const int64_t most = plan.peak_bytes;
    job.memory_budget = 1;
    assert_int_equal(vae_plan_decode(&s.m, &job, &plan), ROCQ_E_BUDGET);
    const int64_t least = plan.smallest_bytes;
    job.memory_budget = least - 1;
    assert_int_equal(vae_decode(&s.m, &job), ROCQ_E_BUDGET);
    assert_int_equal(s.m.plan.smallest_bytes, least);
    stream_close(&s);
    int32_t n_streamed = o.m.decoder.n_convs + 1;
    for (int i = 0; i < BUDGETS; i++) {
        const int64_t budget = i == BUDGETS - 1 ? most - 1 : least + (most - least) * i / BUDGETS;
        job.memory_budget = i % 2 ? budget : 0; // the request's, or the context's
        stream_open(&s, name, gguf, encoder, i % 2 ? 0 : budget);
        forget(&o);
        assert_int_equal(vae_plan_decode(&s.m, &job, &plan), ROCQ_OK);
        decode(&s.m, &job);
        print_message("%s, %.0f of %.0f bytes: %d of %d convolutions streamed, planned %.0f, "
                      "measured %.0f\n", name, (double)budget, (double)most,
                      (int)plan.n_streamed, (int)s.m.decoder.n_convs, (double)plan.peak_bytes,
                      (double)stats_of(s.ctx).peak_bytes);
        assert_memory_equal(o.other, o.whole, (size_t)o.count * sizeof *o.other);
        const double peak = (double)stats_of(s.ctx).peak_bytes;
        assert_true(peak <= (double)budget && plan.peak_bytes <= budget);
        assert_true(fabs(peak - (double)plan.peak_bytes) <= 0.05 * (double)plan.peak_bytes);
        assert_true(plan.weight_bytes < s.m.weight_bytes && plan.n_streamed <= n_streamed);
        assert_true(plan.n_streamed > 0 || encoder); // whose weights alone are in the way
        n_streamed = plan.n_streamed;
        const rocq_stats once = stats_of(s.ctx);
        forget(&o);
        decode(&s.m, &job); // again
        assert_memory_equal(o.other, o.whole, (size_t)o.count * sizeof *o.other);
        assert_int_equal(stats_of(s.ctx).live_bytes, once.live_bytes);
        stream_close(&s);
    }
    close_all(&o);
}

static void test_streaming(void **state) {
    (void)state;
    check_streaming("sd", "sd", false, VAE_BACKEND == ROCQ_BACKEND_CPU);
    check_streaming("sd", "sd", true, false);
    if (VAE_BACKEND == ROCQ_BACKEND_CPU) check_streaming("wan", "wan", false, false);
}

// One model in turn with other budgets and for the other network: weights come and go.
static void test_streaming_changes(void **state) {
    streaming s;
    vae_plan plan;
    io x = io_open("sd");
    float *out = floats(io_count(&x)), *mean = floats(x.n * x.z * x.w * x.h);
    (void)state;
    stream_open(&s, "sd", false, true, 0);
    const vae_request back = {.width = (int32_t)x.out_w, .height = (int32_t)x.out_h,
                              .n = (int32_t)x.n, .from_values = x.picture, .to_latents = mean};
    for (int i = 0; i < 5; i++) {
        vae_request jobs[2] = {request_of(&x, out), back};
        for (int k = 0; k < 2; k++) {
            vae_request *job = &jobs[k];
            job->memory_budget = i % 2; // whatever it takes, or the least that will do
            const rocq_result result =
                (k == 0 ? vae_plan_decode : vae_plan_encode)(&s.m, job, &plan);
            assert_int_equal(result, i % 2 ? ROCQ_E_BUDGET : ROCQ_OK);
            if (i % 2) job->memory_budget = plan.smallest_bytes;
            if ((k == 0 ? vae_decode : vae_encode)(&s.m, job) != ROCQ_OK) fail_msg("%s", s.m.error);
            assert_true(i % 2 ? s.m.plan.n_streamed > 0 : s.m.plan.n_streamed == 0);
            if (i % 2) assert_true(stats_of(s.ctx).live_bytes <= job->memory_budget);
        }
        CLOSE(out, x.out, io_count(&x), 2e-5);
        CLOSE(mean, x.mean, x.n * x.z * x.w * x.h, 2e-5);
        for (int64_t k = 0; k < io_count(&x); k++) out[k] = NAN;
        for (int64_t k = 0; k < x.n * x.z * x.w * x.h; k++) mean[k] = NAN;
    }
    stream_close(&s);
    free(out);
    free(mean);
    io_close(&x);
}

// The file ends before its weights do: one line, and the model is as good as before.
static void test_streaming_truncated(void **state) {
    streaming s;
    io x = io_open("sd");
    float *out = floats(io_count(&x));
    (void)state;
    stream_open(&s, "sd", false, false, 0);
    const vae_request job = request_of(&x, out);
    FILE *whole = s.safetensors.stream, *cut = tmpfile();
    assert_true(cut && fputs("short", cut) >= 0);
    s.safetensors.stream = cut;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(vae_decode(&s.m, &job), ROCQ_E_IO);
        assert_true(strstr(s.m.error, "cannot read") && strstr(s.m.error, "_conv.bias"));
    }
    s.safetensors.stream = whole;
    fclose(cut);
    decode(&s.m, &job);
    CLOSE(out, x.out, io_count(&x), 2e-5);
    stream_close(&s);
    free(out);
    io_close(&x);
}


// ---------------------------------------------------------------------------------------------
// Formats
// ---------------------------------------------------------------------------------------------

// The decoder's tensors as a GGUF file: convolutions in three dimensions as [k, k, kt, C M], those
// of block formats with channels innermost, and so in this format if whole blocks are a row.
static void write_gguf(rocq_ctx *ctx, const char *name, const char *path, rocq_format format) {
    safetensors_file f;
    rocq_gguf_writer *w = NULL;
    const rocq_gguf_writer_desc desc = {.path = path};
    assert_int_equal(safetensors_open(&f, path_of(name)), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_open(ctx, &w, &desc), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_set_str(w, "general.architecture", "vae"), ROCQ_OK);
    const int64_t block = rocq_get_format_info(format)->block_elems;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < f.n_tensors; i++) {
            const safetensors_tensor *t = &f.tensors[i];
            int64_t ne[5] = {1, 1, 1, 1, 1}, n = 1;
            int32_t n_dims = t->n_dims;
            for (int32_t d = 0; d < n_dims; d++) {
                ne[d] = t->shape[n_dims - 1 - d];
                n *= ne[d];
            }
            const int64_t rows = t->shape[0], row = n / rows;
            const bool matrix = n_dims >= 4 && rows > 1 && row > 1 && row % block == 0;
            const rocq_format to = matrix ? format : ROCQ_F32;
            if (n_dims == 5) {
                ne[3] *= ne[4];
                n_dims = 4;
            }
            if (matrix && block > 1) {
                ne[0] = row;
                ne[1] = rows;
                n_dims = 2;
            }
            if (pass == 0) {
                assert_int_equal(rocq_gguf_writer_add_tensor(w, t->name, to, n_dims, ne), ROCQ_OK);
                continue;
            }
            float *values = floats(n), *order = floats(n);
            int64_t bytes;
            assert_int_equal(rocq_row_size(to, n, &bytes), ROCQ_OK);
            void *out = malloc((size_t)bytes);
            assert_non_null(out);
            assert_int_equal(safetensors_read(&f, t, values), ROCQ_OK);
            const int64_t c = t->n_dims > 1 ? t->shape[1] : 1, taps = row / c;
            for (int64_t k = 0; k < n; k++) { // from M, C, taps to M, taps, C
                const int64_t r = k / row, at = k % row;
                order[matrix && block > 1 ? r * row + at % taps * c + at / taps : k] = values[k];
            }
            assert_int_equal(rocq_quantize(to, out, order, 1, n, NULL), ROCQ_OK);
            assert_int_equal(rocq_gguf_writer_write(w, out, bytes), ROCQ_OK);
            free(out);
            free(order);
            free(values);
        }
    }
    assert_int_equal(rocq_gguf_writer_close(&w), ROCQ_OK);
    safetensors_close(&f);
}

static double error_of(const float *a, const float *b, int64_t n) { // PSNR in dB, for a peak of 1
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
    return 10 * log10((double)n / sum);
}

static void test_gguf(void **state) {
    static const struct {
        const char *name, *reference;
        rocq_format format;
        double psnr;
    } files[] = {{"sd", "sd", ROCQ_F32, 100},          {"sd-diffusers", "sd", ROCQ_F32, 100},
                 {"flux-diffusers", "flux", ROCQ_F32, 100}, {"sd", "sd", ROCQ_F16, 60},
                 {"sd", "sd", ROCQ_Q8_0, 35},          {"taesd", "taesd", ROCQ_F32, 100},
                 {"wan", "wan", ROCQ_F32, 100},        {"wan-diffusers", "wan", ROCQ_F32, 100}};
    rocq_ctx *ctx = open_context(0);
    (void)state;
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        const vae_options options = {.n_groups = 4};
        const rocq_gguf_desc desc = {.path = FOLDER "/model.gguf"};
        rocq_gguf *file = NULL;
        vae_model m;
        io x = io_open(files[i].reference);
        float *out = floats(io_count(&x));
        write_gguf(ctx, files[i].name, desc.path, files[i].format);
        assert_int_equal(rocq_gguf_open(ctx, &file, &desc), ROCQ_OK);
        if (vae_open(&m, ctx, file, NULL, &options) != ROCQ_OK) {
            fail_msg("%s: %s", files[i].name, m.error);
        }
        rocq_gguf_close(&file);
        const vae_request job = request_of(&x, out);
        decode(&m, &job);
        const double db = error_of(out, x.out, io_count(&x));
        print_message("%s in %s: %.1f dB\n", files[i].name, rocq_format_name(files[i].format), db);
        assert_true(db >= files[i].psnr);
        int n_block = 0, n_folded = 0;
        for (int32_t k = 0; k < m.decoder.n_convs; k++) {
            n_block += m.decoder.convs[k].w.format == files[i].format;
            const vae_conv *c = &m.decoder.convs[k];
            const char *why = c->folded && c->file_format != ROCQ_F32
                                  ? "F32, in which taps that read the same position are added up"
                                  : "as in the file";
            n_folded += c->folded;
            assert_string_equal(c->why, why);
        }
        assert_true(n_folded > 0 || files[i].format == ROCQ_Q8_0);
        assert_true(n_block > m.decoder.n_convs / 2);
        vae_close(&m);
        free(out);
        io_close(&x);
    }
    rocq_close(&ctx);
}

// The model that comes with the examples, on a corner of one of its latents: all its formats are
// used as they are, and exact tiles have the bits of the whole.
static void test_shipped(void **state) {
    enum { SIDE = 5, OUT = 8 * SIDE };
    const rocq_gguf_desc model = {.path = "examples/model/rocq-pictures.gguf"};
    const rocq_gguf_desc latents = {.path = "examples/model/latents.gguf"};
    rocq_ctx *ctx = open_context(0);
    rocq_gguf *file = NULL;
    rocq_gguf_tensor t;
    vae_model m;
    static uint16_t half[64 * 64 * 4];
    static float z[4 * SIDE * SIDE], out[2][3 * OUT * OUT];
    (void)state;
    assert_int_equal(rocq_gguf_open(ctx, &file, &latents), ROCQ_OK);
    assert_int_equal(rocq_gguf_find_tensor(file, "latent.0", &t), ROCQ_OK);
    assert_true(t.format == ROCQ_F16 && t.ne[2] == 4 && t.size <= (int64_t)sizeof half);
    assert_int_equal(rocq_gguf_read(ctx, file, &t, half), ROCQ_OK);
    for (int64_t i = 0; i < 4 * SIDE * SIDE; i++) {
        const int64_t x = 8 + i % SIDE, y = 8 + i / SIDE % SIDE, k = i / SIDE / SIDE;
        z[i] = rocq_f16_to_f32(half[x + t.ne[0] * (y + t.ne[1] * k)]);
    }
    rocq_gguf_close(&file);
    assert_int_equal(rocq_gguf_open(ctx, &file, &model), ROCQ_OK);
    if (vae_open(&m, ctx, file, NULL, NULL) != ROCQ_OK) fail_msg("%s", m.error);
    rocq_gguf_close(&file);
    assert_string_equal(m.family, "taesd");
    assert_int_equal(m.decoder.convs[3].w.format, ROCQ_Q8_0);
    for (int i = 0; i < 2; i++) {
        vae_request job = {.width = SIDE, .height = SIDE, .channels = 4, .latents = z};
        job.values = out[i];
        if (i == 1) { // in as little memory as there is a way for
            job.memory_budget = 1;
            job.tiling = VAE_EXACT;
            assert_int_equal(vae_decode(&m, &job), ROCQ_E_BUDGET);
            job.memory_budget = m.plan.smallest_bytes;
        }
        decode(&m, &job);
    }
    assert_true(in_tiles(&m));
    assert_memory_equal(out[0], out[1], sizeof out[0]);
    vae_close(&m);
    const vae_options f16 = {.activations = "f16"};
    assert_int_equal(rocq_gguf_open(ctx, &file, &model), ROCQ_OK);
    if (vae_open(&m, ctx, file, NULL, &f16) != ROCQ_OK) fail_msg("%s", m.error);
    rocq_gguf_close(&file);
    const vae_request halves = {.width = SIDE, .height = SIDE, .latents = z, .values = out[1]};
    decode(&m, &halves);
    assert_int_equal(m.stream, ROCQ_F16);
    const double db = error_of(out[1], out[0], 3 * OUT * OUT);
    print_message("the shipped model in F16: %.1f dB from F32\n", db);
    assert_true(db >= 60);
    double mean = 0;
    for (int i = 0; i < 3 * OUT * OUT; i++) mean += (double)out[0][i] / (3 * OUT * OUT);
    assert_true(mean > 0.1 && mean < 0.9); // a picture
    vae_close(&m);
    rocq_close(&ctx);
}

// Activations in 16 bits, against float64. F16 is kept where it gives 60 dB: that holds for every
// model with norms. Without them roundings add up through all layers, and those of weights at
// random are no smaller than the values of a picture (test_shipped has a trained one's). Of weights
// like SDXL's, whose residual stream leaves F16, that is found out, and a 64th of it kept, or,
// where the format of weights cannot be scaled, BF16.
static void test_activations(void **state) {
    static const struct {
        const char *name, *family, *asked, *weights;
        rocq_format stream;
        double psnr;
    } runs[] = {
        {"sd", "sd1", "f32", NULL, ROCQ_F32, 100},
        {"sd", "sd1", "f16", NULL, ROCQ_F16, 60},
        {"sd", "sd1", "bf16", NULL, ROCQ_BF16, 35},
        {"sdxl", "sd1", "f16", NULL, ROCQ_F16, 60},
        {"sdxl", "sd1", "f16", "bf16", ROCQ_BF16, 35},
        {"sdxl", "sdxl", "f16", NULL, ROCQ_F16, 60},
        {"sdxl", "sdxl", "f32", NULL, ROCQ_F32, 100},
        {"flux", "flux", "f16", NULL, ROCQ_F16, 60},
        {"wan", "wan2.1", "f16", NULL, ROCQ_F16, 60},
        {"taesd", "taesd", "f16", NULL, ROCQ_F16, 45}};
    (void)state;
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        vae_options options = {.family = runs[i].family, .n_groups = 4};
        const bool guessed =
            strcmp(runs[i].name, "sdxl") == 0 && strcmp(runs[i].family, "sd1") == 0;
        rocq_ctx *ctx = open_context(0);
        vae_model m;
        io x = io_open(runs[i].name);
        float *out = floats(io_count(&x));
        options.activations = runs[i].asked;
        options.weights = runs[i].weights;
        if (guessed) options.scale = 0.13025f;
        open_model(&m, ctx, runs[i].name, &options);
        if (guessed) assert_int_equal(m.stream, ROCQ_F16);
        const vae_request job = request_of(&x, out);
        decode(&m, &job);
        assert_int_equal(m.stream, runs[i].stream);
        if (guessed) {
            assert_string_equal(m.why_stream,
                                runs[i].weights ? "values exceeded F16"
                                                : "a 64th of what blocks add up: it exceeded F16");
            for (int64_t k = 0; k < io_count(&x); k++) out[k] = NAN;
            decode(&m, &job); // with the formats that are known now, and its graphs
        }
        const double db = error_of(out, x.out, io_count(&x));
        print_message("%s as %s in %s: %.1f dB, %s\n", runs[i].name, m.family,
                      rocq_format_name(m.stream), db, m.why_stream);
        assert_true(db >= runs[i].psnr);
        vae_close(&m);
        free(out);
        io_close(&x);
        rocq_close(&ctx);
    }
}

// Models without GroupNorm too: the first convolution's weights are so large that what the blocks
// add up leaves F16.
static void test_overflow(void **state) {
    static const struct {
        const char *name, *weight;
    } large[] = {{"taesd", "decoder.1"}, {"wan", "decoder.conv1"}};
    static unsigned char file[4 << 20];
    (void)state;
    for (size_t i = 0; i < sizeof large / sizeof large[0]; i++) {
        io x = io_open(large[i].name);
        float *out[2] = {floats(io_count(&x)), floats(io_count(&x))};
        FILE *in = fopen(path_of(large[i].name), "rb");
        assert_non_null(in);
        const size_t size = fread(file, 1, sizeof file, in);
        fclose(in);
        assert_true(size > 1000 && size < sizeof file);
        safetensors_file f;
        assert_int_equal(safetensors_open_memory(&f, file, (int64_t)size), ROCQ_OK);
        char name[64];
        snprintf(name, sizeof name, "%s.weight", large[i].weight);
        const safetensors_tensor *t = safetensors_find(&f, name);
        if (!t) fail_msg("no %s", name);
        for (int64_t k = 0; k < t->size; k += 4) {
            float v;
            memcpy(&v, file + t->offset + k, 4);
            v *= 1e6f;
            memcpy(file + t->offset + k, &v, 4);
        }
        uint8_t *pixels = (uint8_t *)malloc((size_t)io_count(&x));
        assert_non_null(pixels);
        for (int k = 0; k < 3; k++) { // at last only bytes, which tell nothing of their values
            const vae_options options = {.activations = k ? "f16" : "f32"};
            rocq_ctx *ctx = open_context(0);
            vae_model m;
            vae_request job = request_of(&x, k < 2 ? out[k] : NULL);
            if (k == 2) job.pixels = pixels;
            assert_int_equal(vae_open(&m, ctx, NULL, &f, &options), ROCQ_OK);
            for (int again = 0; again < 2; again++) {
                decode(&m, &job);
                assert_int_equal(m.stream, k ? ROCQ_BF16 : ROCQ_F32);
            }
            if (k) assert_string_equal(m.why_stream, "values exceeded F16");
            vae_close(&m);
            rocq_close(&ctx);
        }
        for (int64_t k = 0; k < io_count(&x); k++) {
            const float v = out[1][k] > 0 ? out[1][k] < 1 ? out[1][k] : 1 : 0;
            assert_true(fabsf((float)pixels[k] - 255 * v) <= 0.5001f);
        }
        free(pixels);
        const double error = nmse(out[1], out[0], io_count(&x));
        print_message("%s with values beyond F16: nmse %.2g\n", large[i].name, error);
        assert_true(error < 1e-3);
        safetensors_close(&f);
        for (int k = 0; k < 2; k++) free(out[k]);
        io_close(&x);
    }
}

// Bytes are the numbers, cut to 0 to 1 and rounded.
static void test_pixels(void **state) {
    opened o;
    (void)state;
    open_all(&o, "sd", "sd", 4, false);
    uint8_t *pixels = (uint8_t *)malloc((size_t)o.count);
    assert_non_null(pixels);
    for (int tiles = 0; tiles < 2; tiles++) {
        vae_request job = request_of(&o.x, o.other);
        job.pixels = pixels;
        job.tiling = tiles ? VAE_BLEND : VAE_WHOLE;
        job.tile = tiles ? 16 : 0;
        memset(pixels, 77, (size_t)o.count);
        decode(&o.m, &job);
        for (int64_t i = 0; i < o.count; i++) {
            const float v = o.other[i] < 0 ? 0 : o.other[i] > 1 ? 1 : o.other[i];
            assert_true(fabsf((float)pixels[i] - 255 * v) <= 0.5001f);
        }
        job.values = NULL;
        uint8_t *again = (uint8_t *)malloc((size_t)o.count);
        assert_non_null(again);
        job.pixels = again;
        decode(&o.m, &job);
        assert_memory_equal(pixels, again, (size_t)o.count);
        free(again);
    }
    free(pixels);
    close_all(&o);
}

// ---------------------------------------------------------------------------------------------
// What is refused
// ---------------------------------------------------------------------------------------------

static void refuse(opened *o, const vae_request *job, rocq_result result, const char *says) {
    const rocq_result got = vae_decode(&o->m, job);
    if (got != result || !strstr(o->m.error, says)) {
        fail_msg("%s \"%s\", expected %s \"%s\"", rocq_result_name(got), o->m.error,
                 rocq_result_name(result), says);
    }
}

static void test_bad_requests(void **state) {
    opened o;
    vae_request job;
    (void)state;
    open_all(&o, "sd", "sd", 4, false);
    const vae_request good = request_of(&o.x, o.other);
    const float saved = o.x.latents[17];
    for (int i = 0; i < 3; i++) {
        o.x.latents[17] = i == 0 ? NAN : i == 1 ? INFINITY : -INFINITY;
        refuse(&o, &good, ROCQ_E_ARGUMENT, "the latents are not all finite");
    }
    o.x.latents[17] = saved;
    job = good;
    job.channels = 16;
    refuse(&o, &job, ROCQ_E_SHAPE, "latents of 16 channels, the model's have 4");
    job = good;
    job.frames = 2;
    refuse(&o, &job, ROCQ_E_SHAPE, "not a model of videos");
    job = good;
    job.width = 0;
    refuse(&o, &job, ROCQ_E_ARGUMENT, "0 x");
    job = good;
    job.tile = 33;
    refuse(&o, &job, ROCQ_E_ARGUMENT, "no multiples of 8");
    job.tiling = VAE_BLEND;
    job.tile = 64;
    job.overlap = 64;
    refuse(&o, &job, ROCQ_E_ARGUMENT, "tiles of 64 pixels that overlap by 64");
    job.tile = 0; // 768
    job.overlap = 768;
    refuse(&o, &job, ROCQ_E_ARGUMENT, "tiles of 768 pixels that overlap by 768");
    job = good;
    job.memory_budget = -1;
    refuse(&o, &job, ROCQ_E_ARGUMENT, "a field is out of range");
    job = good;
    job.latents = NULL;
    refuse(&o, &job, ROCQ_E_ARGUMENT, "no latents");
    job = good;
    job.values = NULL;
    refuse(&o, &job, ROCQ_E_ARGUMENT, "neither pixels nor values");
    job = good;
    job.from_values = o.x.picture;
    job.to_latents = o.other;
    assert_int_equal(vae_encode(&o.m, &job), ROCQ_E_STATE);
    assert_true(strstr(o.m.error, "the encoder was not loaded"));
    decode(&o.m, &good); // none of it broke anything
    assert_memory_equal(o.other, o.whole, (size_t)o.count * sizeof *o.other);
    close_all(&o);
}

// Weights that are missing, unknown, of other shapes, or of a file cut short.
static void test_bad_weights(void **state) {
    static const struct {
        const char *from, *to; // in the file's header, of the same length
        rocq_result result;
        const char *says;
    } edits[] = {
        {"decoder.conv_in.bias", "decoder.conv_in.what", ROCQ_E_NOT_FOUND,
         "tensor decoder.conv_in.bias is missing"},
        {"decoder.norm_out.weight", "decoder.norm_on1.weight", ROCQ_E_NOT_FOUND,
         "tensor decoder.norm_out.weight is missing"},
        {"post_quant_conv", "sost_quant_conv", ROCQ_E_UNSUPPORTED, "_quant_conv"},
        {"decoder.mid.attn_1.k.weight\":{\"dtype\":\"F32\",\"shape\":[32,32,1,1]",
         "decoder.mid.attn_1.k.weight\":{\"dtype\":\"F32\",\"shape\":[16,64,1,1]", ROCQ_E_SHAPE,
         "1 x 1 x 64 x 16, expected 1 x 1 taps of 32 channels"},
        {"decoder.conv_out.bias\":{\"dtype\":\"F32\",\"shape\":[3]",
         "decoder.conv_out.bias\":{\"dtype\":\"I32\",\"shape\":[3]", ROCQ_E_FORMAT,
         "decoder.conv_out.bias has a type"},
    };
    rocq_ctx *ctx = open_context(0);
    (void)state;
    FILE *in = fopen(path_of("sd"), "rb");
    assert_non_null(in);
    static unsigned char file[4 << 20], copy[4 << 20];
    const size_t size = fread(file, 1, sizeof file, in);
    fclose(in);
    assert_true(size > 1000 && size < sizeof file);
    const size_t header = 8 + file[0] + 256u * file[1] + 65536u * file[2];
    const rocq_stats before = stats_of(ctx);
    for (size_t i = 0; i < sizeof edits / sizeof edits[0]; i++) {
        const size_t length = strlen(edits[i].from);
        const vae_options options = {.n_groups = 4};
        safetensors_file f;
        vae_model m;
        int n = 0;
        assert_int_equal(length, strlen(edits[i].to));
        memcpy(copy, file, size);
        for (size_t at = 8; at + length < header; at++) {
            if (memcmp(copy + at, edits[i].from, length) != 0) continue;
            memcpy(copy + at, edits[i].to, length);
            n++;
        }
        assert_true(n > 0);
        assert_int_equal(safetensors_open_memory(&f, copy, (int64_t)size), ROCQ_OK);
        const rocq_result result = vae_open(&m, ctx, NULL, &f, &options);
        if (result != edits[i].result || !strstr(m.error, edits[i].says)) {
            fail_msg("%s \"%s\", expected %s \"%s\"", rocq_result_name(result), m.error,
                     rocq_result_name(edits[i].result), edits[i].says);
        }
        assert_true(!strchr(m.error, '\n') && !m.ctx);
        safetensors_close(&f);
    }
    assert_int_equal(stats_of(ctx).live_bytes, before.live_bytes);
    vae_model m;
    vae_options options = {.family = "flux", .n_groups = 4};
    safetensors_file f;
    assert_int_equal(safetensors_open_memory(&f, file, (int64_t)size), ROCQ_OK);
    assert_int_equal(vae_open(&m, ctx, NULL, NULL, NULL), ROCQ_E_ARGUMENT);
    options.family = "what";
    assert_int_equal(vae_open(&m, ctx, NULL, &f, &options), ROCQ_E_ARGUMENT);
    assert_true(strstr(m.error, "\"what\" is not one of"));
    options.family = "wan2.1";
    assert_int_equal(vae_open(&m, ctx, NULL, &f, &options), ROCQ_E_ARGUMENT);
    options.family = NULL;
    options.activations = "q8_0";
    assert_int_equal(vae_open(&m, ctx, NULL, &f, &options), ROCQ_E_FORMAT);
    options.activations = NULL;
    options.n_groups = 32; // of 8 channels
    assert_int_equal(vae_open(&m, ctx, NULL, &f, &options), ROCQ_E_SHAPE);
    safetensors_close(&f);
    assert_int_equal(safetensors_open_memory(&f, file, (int64_t)size - 1), ROCQ_E_TRUNCATED);
    const char *other = "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}";
    memset(copy, 0, 8);
    copy[0] = (unsigned char)strlen(other);
    memcpy(copy + 8, other, strlen(other));
    assert_int_equal(safetensors_open_memory(&f, copy, 12 + (int64_t)strlen(other)), ROCQ_OK);
    assert_int_equal(vae_open(&m, ctx, NULL, &f, NULL), ROCQ_E_UNSUPPORTED);
    assert_true(strstr(m.error, "none is an autoencoder's"));
    safetensors_close(&f);
    assert_int_equal(stats_of(ctx).live_bytes, before.live_bytes);
    rocq_close(&ctx);
}

// A file of F32 zeros with these tensors, NAME:SHAPE, which another program may have written.
static rocq_result open_made(vae_model *m, rocq_ctx *ctx, const char *const *tensors,
                             const vae_options *options) {
    static unsigned char file[1 << 20];
    char *header = (char *)file + 8;
    int64_t at = 0;
    size_t n = 0;
    memset(file, 0, sizeof file);
    for (; *tensors; tensors++) {
        int64_t count = 1;
        const char *shape = strchr(*tensors, ':') + 1;
        for (const char *c = shape; c; c = strchr(c, ',') ? strchr(c, ',') + 1 : NULL) {
            count *= count > 0 ? strtoll(c, NULL, 10) : 1;
        }
        n += (size_t)snprintf(header + n, 8192 - n, "%c\"%.*s\":{\"dtype\":\"F32\",\"shape\":[%s],"
                              "\"data_offsets\":[%d,%d]}", n > 0 ? ',' : '{',
                              (int)(shape - 1 - *tensors), *tensors, shape, (int)at,
                              (int)(at + 4 * count));
        at += 4 * count;
    }
    header[n++] = '}';
    file[0] = (unsigned char)n;
    file[1] = (unsigned char)(n >> 8);
    const int64_t size = 8 + (int64_t)n + at;
    assert_true(n < 8192 && size < (int64_t)sizeof file);
    safetensors_file f;
    assert_int_equal(safetensors_open_memory(&f, file, size), ROCQ_OK);
    const rocq_result result = vae_open(m, ctx, NULL, &f, options);
    safetensors_close(&f);
    return result;
}

#define MADE_DECODER                                                     \
    "decoder.layers.0.weight:4,4,3,3", "decoder.layers.0.bias:4",        \
        "decoder.layers.2.weight:4,4,3,3", "decoder.layers.3.weight:3,4,3,3", \
        "decoder.layers.3.bias:3"
#define MADE_ENCODER \
    "encoder.layers.0.weight:4,3,3,3", "encoder.layers.0.bias:4", "encoder.layers.1.weight:4,4,3,3"

// Files whose sizes fit each other, but not what is computed with them.
static void test_made_weights(void **state) {
    static const struct {
        const char *tensors[16];
        const char *says; // NULL = it is good
    } made[] = {
        {{MADE_DECODER, MADE_ENCODER, "encoder.layers.2.weight:4,4,3,3", "encoder.layers.2.bias:4"},
         NULL},
        {{MADE_DECODER, MADE_ENCODER, "encoder.layers.2.weight:4,4,3,3",
          "encoder.layers.2.bias:0,9007199254740992,9007199254740992"},
         "encoder.layers.2.bias has no elements"},
        {{MADE_DECODER, MADE_ENCODER, "encoder.layers.2.conv.0.weight:4,4,3,3",
          "encoder.layers.2.conv.0.bias:4", "encoder.layers.2.conv.2.weight:4,4,3,3",
          "encoder.layers.2.conv.2.bias:4", "encoder.layers.2.conv.4.weight:1,4,3,3",
          "encoder.layers.2.conv.4.bias:1", "encoder.layers.2.skip.weight:1,4,1,1"},
         "an encoder of 3 channels to 1, expected 3 to 4"},
    };
    const vae_options options = {.encoder = true};
    rocq_ctx *ctx = open_context(0);
    (void)state;
    const rocq_stats before = stats_of(ctx);
    for (size_t i = 0; i < sizeof made / sizeof made[0]; i++) {
        vae_model m;
        const rocq_result result = open_made(&m, ctx, made[i].tensors, &options);
        if (made[i].says) {
            assert_true(result == ROCQ_E_SHAPE || result == ROCQ_E_UNSUPPORTED);
            if (!strstr(m.error, made[i].says)) fail_msg("%s", m.error);
        } else if (result != ROCQ_OK) {
            fail_msg("%s", m.error);
        }
        vae_close(&m);
        assert_int_equal(stats_of(ctx).live_bytes, before.live_bytes);
    }
    // 2^32 positions of 2^20 pictures with 2^12 channels
    static const char *const wide[] = {"decoder.layers.0.weight:4096,1,3,3",
                                       "decoder.layers.0.bias:4096",
                                       "decoder.layers.2.weight:3,4096,3,3",
                                       "decoder.layers.2.bias:3", NULL};
    for (int i = 0; i < 4; i++) {
        const vae_request job = {.width = 1 << 16, .height = 1 << 16, .n = 1 << 20,
                                 .tiling = (vae_tiling)i};
        vae_model m;
        vae_plan plan;
        assert_int_equal(open_made(&m, ctx, wide, NULL), ROCQ_OK);
        const rocq_result result = vae_plan_decode(&m, &job, &plan);
        if (result != ROCQ_E_OVERFLOW) fail_msg("%s: %s", rocq_result_name(result), m.error);
        vae_close(&m);
    }
    rocq_close(&ctx);
}

static bool stop_at_half(const char *what, int64_t done, int64_t total, void *user) {
    return strcmp(what, (const char *)user) != 0 || 2 * done < total;
}

static void test_stopped(void **state) {
    vae_options options = {.n_groups = 4, .progress = stop_at_half};
    rocq_ctx *ctx = open_context(0);
    safetensors_file f;
    vae_model m;
    io x = io_open("sd");
    float *out = floats(io_count(&x));
    char loading[] = "loading", computing[] = "computing";
    (void)state;
    assert_int_equal(safetensors_open(&f, path_of("sd")), ROCQ_OK);
    options.user = loading;
    assert_int_equal(vae_open(&m, ctx, NULL, &f, &options), ROCQ_E_STATE);
    assert_string_equal(m.error, "loading was stopped");
    options.user = computing;
    assert_int_equal(vae_open(&m, ctx, NULL, &f, &options), ROCQ_OK);
    const vae_request job = request_of(&x, out);
    assert_int_equal(vae_decode(&m, &job), ROCQ_E_STATE);
    assert_string_equal(m.error, "computing was stopped");
    vae_close(&m);
    safetensors_close(&f);
    io_close(&x);
    free(out);
    rocq_close(&ctx);
}

static int write_models(void **state) {
    const char *dirs[] = {".build", ".build/tests", FOLDER};
    (void)state;
    for (int i = 0; i < 3; i++) (void)mkdir(dirs[i], 0777);
    if (getenv("ROCQ_VAE_MODELS_MADE")) return 0; // elsewhere: there is no PyTorch here
    return system("/usr/bin/python3 tests/vae.py " FOLDER) == 0 ? 0 : -1;
}

int main(int argc, char **argv) {
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    static const struct CMUnitTest everywhere[] = {
        cmocka_unit_test(test_exact), cmocka_unit_test(test_beginning),
        cmocka_unit_test(test_streaming), cmocka_unit_test(test_graphs),
        cmocka_unit_test(test_exact_video), cmocka_unit_test(test_chunks)};
    static const struct CMUnitTest others[] = {
        cmocka_unit_test(test_batches),
        cmocka_unit_test(test_batches_in_parts),
        cmocka_unit_test(test_exact_sizes),
        cmocka_unit_test(test_exact_small),
        cmocka_unit_test(test_exact_encoder),  cmocka_unit_test(test_bands),
        cmocka_unit_test(test_sides),
        cmocka_unit_test(test_blend),          cmocka_unit_test(test_blend_video),
        cmocka_unit_test(test_blend_defaults),
        cmocka_unit_test(test_memory),         cmocka_unit_test(test_budgets),
        cmocka_unit_test(test_video_budgets),  cmocka_unit_test(test_graphs_fail),
        cmocka_unit_test(test_graphs_of_batches), cmocka_unit_test(test_tiles_without_memory),
        cmocka_unit_test(test_scaling_cancelled),
        cmocka_unit_test(test_uploads),        cmocka_unit_test(test_streaming_changes),
        cmocka_unit_test(test_streaming_truncated), cmocka_unit_test(test_gguf),
        cmocka_unit_test(test_shipped),        cmocka_unit_test(test_activations),
        cmocka_unit_test(test_overflow),
        cmocka_unit_test(test_pixels),         cmocka_unit_test(test_bad_requests),
        cmocka_unit_test(test_bad_weights),    cmocka_unit_test(test_made_weights),
        cmocka_unit_test(test_stopped)};
#if VAE_SIMULATED
    static const struct CMUnitTest simulated[] = {cmocka_unit_test(test_graphs_refused)};
#endif
    static struct CMUnitTest tests[64];
    const bool gpu = VAE_BACKEND == ROCQ_BACKEND_GPU;
    size_t n = 0;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (gpu && !cases[i].gpu) continue;
        tests[n] = (struct CMUnitTest){.name = cases[i].name, .test_func = test_model};
        tests[n++].initial_state = (void *)(uintptr_t)&cases[i]; // read only
    }
    for (size_t i = 0; i < sizeof everywhere / sizeof everywhere[0]; i++) {
        const bool video = everywhere[i].test_func == test_chunks ||
                           everywhere[i].test_func == test_exact_video;
        if (VAE_SIMULATED && video) continue; // takes minutes
        tests[n++] = everywhere[i];
    }
    for (size_t i = 0; !gpu && i < sizeof others / sizeof others[0]; i++) tests[n++] = others[i];
#if VAE_SIMULATED
    tests[n++] = simulated[0];
#endif
    return _cmocka_run_group_tests("vae", tests, n, write_models, VAE_TEARDOWN);
}
