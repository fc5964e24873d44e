// vae.c - decoding of pictures and videos, and the convolutions it is made of, beside PyTorch.
//
//   vae/MODEL/WHAT             from latents in host memory to bytes in host memory. MODEL: sdxl, an
//                              AutoencoderKL of SDXL's widths; taesd; wan, Wan 2.1's. Random
//                              weights in F16; on the CPU they compute in F32. WHAT, pixels: 256,
//                              512, 1024; 256x4: four pictures at once; 512/f16; 1024/budget: with
//                              three quarters of the memory that it takes whole; 256/video: 17
//                              frames; 512x8: two batches of four; 512/pinned: the bytes go to
//                              pinned memory
//   .../torch, .../compiled    the same by PyTorch, channels last, cuDNN's search on, eager and by
//                              torch.compile (GPU). Ours are verified against its values
//   .../peak, .../planned      MB at once: rocq_stats.peak_bytes of a context of its own, and what
//                              the plan says before; .../allocations of a second decode
//   conv/CxM/KxK/SIZE/HOW      one convolution to M channels of SIZE x SIZE positions, with
//                              GroupNorm and SiLU of its C input channels (norm), without (plain),
//                              or of a picture of half the size (up). Every shape of SDXL's decoder
//                              at 512 x 512 pixels, and TAESD's. PyTorch beside: /torch
//
//     vae [options of bench.h]        PyTorch: the first of python3 and /usr/bin/python3 that has
//                                     it; without it only what needs neither weights nor peer
#include "bench.h"
#include "torch.h"
#include "../examples/vae.h"

// -- pictures --

typedef struct picture_case {
    const char *model, *what;
    int32_t size, frames, n, batch; // pixels; batch: pictures of one call
    bool half, budget;
    const char *activations;        // vae_options
    int32_t most;                   // memory budget in MB; 0 = none
} picture_case;

typedef struct decoding {
    const picture_case *c;
    rocq_ctx *ctx;                  // of its own, so that its peak of memory is this decode's
    bool gpu;
    vae_model m;
    vae_request job;
    torch_peer *peer;
    const char *mode;
    float *latents, *values, *want;
    uint8_t *pixels;
    rocq_pool *pinned;              // that pixels lie in, or NULL
    int64_t n_latents, n_values; // of one picture or video
} decoding;

static rocq_result decode(void *user) {
    decoding *d = (decoding *)user;
    rocq_result result = ROCQ_OK;
    for (int32_t i = 0; i < d->c->n && result == ROCQ_OK; i += d->job.n) {
        vae_request job = d->job;
        job.latents += i * d->n_latents;
        job.pixels += i * d->n_values;
        if (job.values) job.values += i * d->n_values;
        result = vae_decode(&d->m, &job);
    }
    return result;
}

// A decode has waited for its pixels, and PyTorch's process for its own.
static rocq_result waited(void *user) {
    (void)user;
    return ROCQ_OK;
}

// Its values, computed in F32, are [n, 3, T, H, W]; ours are [3, W, H, T, n], innermost first.
// Bounds: on the CPU, where we compute in F32 too, 80 dB. On a GPU we do in F16, 60 dB; TAESD has no
// norms, so that roundings add up through all of its 35 layers, 45 dB.
static bool like_torch(void *user) {
    decoding *d = (decoding *)user;
    char path[100];
    double error = 0;
    const int64_t positions = d->n_values / 3;
    snprintf(path, sizeof path, "%s/values.f32", d->peer->folder);
    FILE *f = fopen(path, "rb");
    const size_t n = (size_t)(d->n_values * d->c->n);
    const bool read = f && fread(d->want, sizeof(float), n, f) == n;
    if (f) fclose(f);
    d->job.values = d->values;
    const bool ran = read && decode(d) == ROCQ_OK;
    d->job.values = NULL;
    for (size_t i = 0; ran && i < n; i++) {
        const int64_t k = (int64_t)i / d->n_values, in = (int64_t)i % d->n_values;
        const double e =
            d->values[k * d->n_values + in % positions * 3 + in / positions] - d->want[i];
        error += e * e;
    }
    const double psnr = -10 * log10(error / (double)n);
    if (ran) printf("%-44s %.1f dB to PyTorch's F32\n", d->c->what, psnr);
    return ran && psnr >= (!d->gpu ? 80 : d->c->model[0] == 't' ? 45 : 60);
}

static double torch_ns(decoding *d, int runs) { // 0: once in F32, and its values are kept
    const int32_t frames = d->job.frames > 0 ? d->job.frames : 1;
    return torch_ask(d->peer, "decode %s %d %d %d %d %s %d", d->c->model, (int)d->job.width,
                    (int)d->job.height, (int)frames, (int)d->c->n, d->mode, runs);
}

static rocq_result torch_decode(void *user) {
    return torch_ns((decoding *)user, 1) < 0 ? ROCQ_E_UNSUPPORTED : ROCQ_OK;
}

static rocq_result open_decoding(decoding *d, const bench *b, const char *weights) {
    const picture_case *c = d->c;
    const vae_options options = {.family = c->model[0] == 's' ? "sdxl" : NULL,
                                 .activations = c->activations};
    const rocq_desc desc = {.prefer = b->gpu ? ROCQ_BACKEND_GPU : ROCQ_BACKEND_CPU,
                            .n_threads = b->n_threads,
                            .kernels_path = b->kernels,
                            .rocm_path = getenv("ROCM_PATH"),
                            .hip_path = getenv("HIP_PATH")};
    safetensors_file file;
    vae_plan plan;
    d->gpu = b->gpu;
    d->job.width = d->job.height = c->size / 8;
    d->job.frames = c->frames;
    d->job.n = c->batch;
    if (rocq_open(&d->ctx, &desc) != ROCQ_OK) return ROCQ_E_DEVICE;
    if (safetensors_open(&file, weights) != ROCQ_OK) bench__die(file.error);
    rocq_result result = vae_open(&d->m, d->ctx, NULL, &file, &options);
    safetensors_close(&file);
    if (result == ROCQ_OK) result = vae_plan_decode(&d->m, &d->job, &plan);
    if (result == ROCQ_OK && c->budget) d->job.memory_budget = plan.peak_bytes / 4 * 3;
    if (c->most) d->job.memory_budget = (int64_t)c->most * 1000000;
    if (result != ROCQ_OK) return result;
    const int64_t frames = c->frames > 0 ? c->frames : 1;
    d->n_latents = (int64_t)d->job.width * d->job.height * frames * d->m.z;
    d->n_values = 3 * (int64_t)c->size * c->size * (c->frames > 0 ? vae_frames(&d->m, frames) : 1);
    d->latents = (float *)bench_alloc(c->n * d->n_latents * (int64_t)sizeof(float));
    d->values = (float *)bench_alloc(c->n * d->n_values * (int64_t)sizeof(float));
    d->want = (float *)bench_alloc(c->n * d->n_values * (int64_t)sizeof(float));
    if (strstr(c->what, "pinned")) {
        const rocq_pool_desc pinned = {.memory = ROCQ_MEMORY_PINNED};
        rocq_buffer buffer;
        result = rocq_pool_create(d->ctx, &d->pinned, &pinned);
        if (result == ROCQ_OK) result = rocq_pool_alloc(d->pinned, &buffer, c->n * d->n_values);
        if (result != ROCQ_OK) return result;
        d->pixels = (uint8_t *)buffer.host;
    } else {
        d->pixels = (uint8_t *)bench_alloc(c->n * d->n_values);
    }
    d->job.latents = d->latents;
    d->job.pixels = d->pixels;
    return ROCQ_OK;
}

// Latents of unit variance; PyTorch gets those that the network sees, after scale and shift.
static void make_latents(decoding *d) {
    uint64_t state = 7;
    char path[100];
    const int64_t n = d->c->n * d->n_latents, run = d->n_latents / d->m.z;
    for (int64_t i = 0; i < n; i++) d->latents[i] = bench_normal(&state);
    snprintf(path, sizeof path, "%s/latents.f32", d->peer->folder);
    FILE *f = d->peer->to ? fopen(path, "wb") : NULL;
    for (int64_t i = 0; f && i < n; i++) {
        float z = d->latents[i] / d->m.latent_scale + d->m.latent_shift;
        if (d->m.video)
            z = d->latents[i] * d->m.z_std[i / run % d->m.z] + d->m.z_mean[i / run % d->m.z];
        fwrite(&z, sizeof z, 1, f);
    }
    if (f) fclose(f);
}

static void memory_values(bench *b, decoding *d, const char *name) {
    char line[128];
    rocq_stats stats;
    rocq_get_stats(d->ctx, &stats);
    const double peak = (double)stats.peak_bytes, planned = (double)d->m.plan.peak_bytes;
    snprintf(line, sizeof line, "%s/peak", name);
    bench_value(b, line, peak * 1e-6, "MB", true);
    snprintf(line, sizeof line, "%s/planned", name);
    bench_value(b, line, planned * 1e-6, "MB", fabs(planned - peak) <= 0.05 * peak);
    const int64_t n_allocs = stats.n_allocs;
    if (decode(d) != ROCQ_OK || rocq_get_stats(d->ctx, &stats) != ROCQ_OK) return;
    snprintf(line, sizeof line, "%s/allocations", name);
    bench_value(b, line, (double)(stats.n_allocs - n_allocs), "of a later decode", true);
}

static void measure_picture(bench *b, torch_peer *peer, const picture_case *c) {
    char name[64], names[2][80], weights[100];
    decoding d = {.c = c, .peer = peer, .mode = "eager"}, compiled;
    snprintf(name, sizeof name, "vae/%s/%s", c->model, c->what);
    if (!bench_wants(b, name)) return;
    snprintf(weights, sizeof weights, "%s/%s.safetensors", peer->folder, c->model);
    struct stat made;
    if (stat(weights, &made) != 0 && torch_ask(peer, "make %s", c->model) < 0) {
        bench_skip(b, name, peer->to ? peer->reply : "no PyTorch, which makes the weights");
        return;
    }
    if (open_decoding(&d, b, weights) == ROCQ_OK) {
        make_latents(&d);
        const bool beside = !c->half && !c->budget && torch_ns(&d, 0) >= 0;
        vae_plan plan;
        vae_plan_decode(&d.m, &d.job, &plan);
        bench_case cases[3] = {{.name = name, .run = decode, .user = &d, .single = true,
                                .sync = waited, .verify = beside ? like_torch : NULL,
                                .unit = b->gpu ? BENCH_F16 : BENCH_F32}};
        cases[0].flops = plan.whole_flops * (c->n / c->batch);
        for (int i = 1; i < 3; i++) {
            cases[i] = cases[0];
            cases[i].verify = NULL;
            cases[i].run = torch_decode;
            snprintf(names[i - 1], sizeof names[0], "%s/%s", name, i == 1 ? "torch" : "compiled");
            cases[i].name = names[i - 1];
        }
        int n_cases = beside ? 2 : 1;
        compiled = d;
        compiled.mode = "compiled";
        cases[2].user = &compiled;
        if (beside && b->gpu && !b->tiny && torch_decode(&compiled) == ROCQ_OK) n_cases = 3;
        if (bench_run_pair(b, cases, n_cases)) memory_values(b, &d, name);
    } else {
        bench_fail(b, name, d.m.error[0] ? d.m.error : rocq_error(d.ctx));
    }
    vae_close(&d.m);
    if (!d.pinned) free(d.pixels);
    rocq_pool_destroy(&d.pinned);
    rocq_close(&d.ctx);
    free(d.latents);
    free(d.values);
    free(d.want);
}

// -- single convolutions --

typedef struct conv_case {
    int32_t c, m, k, size, up; // size: of y
    bool norm;
} conv_case;

enum { CONV_REPEATS = 20 };

typedef struct convolving {
    bench *b;
    conv_case s;
    torch_peer *peer;
    rocq_tensor x, y, w, bias, stats, norm_weight, norm_bias;
    rocq_buffer memory;
    rocq_graph *graph; // on a GPU, of CONV_REPEATS
} convolving;

static bool is_folded(const conv_case *s) { // as in examples/vae.h
    return s->up == 2 && s->k == 3;
}

static rocq_result convolve(convolving *v) {
    const rocq_norm_stats_params stats = {.stats = &v->stats, .x = &v->x};
    rocq_conv_params p = {.y = &v->y, .w = &v->w, .x = &v->x, .bias = &v->bias};
    p.kw = p.kh = v->s.k;
    p.upsample = v->s.up;
    p.folded = is_folded(&v->s);
    if (v->s.norm) {
        const rocq_result result = rocq_norm_stats(v->b->ctx, &stats);
        if (result != ROCQ_OK) return result;
        p.stats = &v->stats;
        p.norm_weight = &v->norm_weight;
        p.norm_bias = &v->norm_bias;
        p.x_activation = ROCQ_ACT_SILU;
    }
    return rocq_conv(v->b->ctx, &p);
}

static rocq_result run_conv(void *user) {
    convolving *v = (convolving *)user;
    return v->graph ? rocq_graph_launch(v->b->ctx, v->graph) : convolve(v);
}

static rocq_result torch_conv(void *user) {
    convolving *v = (convolving *)user;
    const conv_case *s = &v->s;
    const double ns =
        torch_ask(v->peer, "conv %d %d %d %d %d eager %d", (int)s->c, (int)s->m, (int)s->k,
                  (int)(s->size / s->up), (int)s->up, v->graph ? CONV_REPEATS : 1);
    return ns < 0 ? ROCQ_E_UNSUPPORTED : ROCQ_OK;
}

static rocq_result open_conv(convolving *v) {
    const conv_case *s = &v->s;
    const rocq_format format = v->b->gpu ? ROCQ_F16 : ROCQ_F32;
    const int64_t in = s->size / s->up, k = (int64_t)s->c * s->k * s->k;
    const int64_t x_ne[4] = {s->c, in, in, 1}, y_ne[4] = {s->m, s->size, s->size, 1},
                  w_ne[3] = {is_folded(s) ? k / 9 * 4 : k, s->m, is_folded(s) ? 4 : 1};
    const int64_t m_ne[1] = {s->m}, c_ne[1] = {s->c}, stats_ne[3] = {2, s->norm ? 32 : 1, 1};
    const struct {
        rocq_tensor *t;
        rocq_format format;
        int32_t n_dims;
        const int64_t *ne;
    } all[] = {{&v->x, format, 4, x_ne}, {&v->y, format, 4, y_ne}, {&v->w, ROCQ_F16, 3, w_ne},
               {&v->bias, ROCQ_F32, 1, m_ne}, {&v->norm_weight, ROCQ_F32, 1, c_ne},
               {&v->norm_bias, ROCQ_F32, 1, c_ne}, {&v->stats, ROCQ_F32, 3, stats_ne}};
    rocq_arena arena;
    rocq_result result = ROCQ_OK;
    uint64_t state = 3;
    for (int pass = 0; pass < 2 && result == ROCQ_OK; pass++) { // measured, then cut
        if (pass == 1) result = rocq_buffer_alloc(v->b->ctx, &v->memory, arena.peak);
        rocq_arena_init(&arena, pass == 1 ? &v->memory : NULL);
        for (size_t i = 0; i < sizeof all / sizeof *all && result == ROCQ_OK; i++) {
            result = rocq_arena_tensor(&arena, all[i].t, all[i].format, all[i].n_dims, all[i].ne);
        }
    }
    for (size_t i = 0; i < sizeof all / sizeof *all && result == ROCQ_OK; i++) {
        const int64_t n = rocq_tensor_count(all[i].t), size = rocq_tensor_size(all[i].t);
        const float scale = all[i].t == &v->w ? 1 / sqrtf((float)k) : 1;
        float *values = (float *)bench_alloc(n * (int64_t)sizeof *values);
        char *encoded = (char *)bench_alloc(size);
        for (int64_t j = 0; j < n; j++) values[j] = scale * bench_uniform(&state, -1.7f, 1.7f);
        result = rocq_quantize(all[i].format, encoded, values, 1, n, NULL);
        if (result == ROCQ_OK) result = rocq_upload(v->b->ctx, all[i].t, encoded, size);
        free(values);
        free(encoded);
    }
    if (result != ROCQ_OK || !v->b->gpu) return result;
    result = rocq_graph_begin(v->b->ctx);
    for (int i = 0; i < CONV_REPEATS && result == ROCQ_OK; i++) result = convolve(v);
    const rocq_result end = rocq_graph_end(v->b->ctx, &v->graph);
    return result == ROCQ_OK ? end : result;
}

static void measure_conv(bench *b, torch_peer *peer, conv_case s) {
    char name[64], peer_name[80];
    convolving v = {.b = b, .s = s, .peer = peer};
    snprintf(name, sizeof name, "conv/%dx%d/%dx%d/%d/%s", (int)s.c, (int)s.m, (int)s.k, (int)s.k,
             (int)s.size,
             s.up > 1 ? "up"
             : s.norm ? "norm"
                      : "plain");
    if (!bench_wants(b, name)) return;
    if (open_conv(&v) == ROCQ_OK) {
        const double inner = v.graph ? CONV_REPEATS : 1, positions = (double)s.size * s.size;
        bench_case cases[2] = {{.name = name, .run = run_conv, .user = &v, .inner = (int64_t)inner,
                                .unit = b->gpu ? BENCH_F16 : BENCH_F32}};
        cases[0].flops = 2 * positions * s.m * s.c * s.k * s.k * inner;
        cases[1] = cases[0];
        cases[1].run = torch_conv;
        snprintf(peer_name, sizeof peer_name, "%s/torch", name);
        cases[1].name = peer_name;
        bench_run_pair(b, cases, torch_conv(&v) == ROCQ_OK ? 2 : 1);
    } else {
        bench_fail(b, name, rocq_error(b->ctx));
    }
    rocq_graph_destroy(b->ctx, &v.graph);
    rocq_buffer_free(b->ctx, &v.memory);
}

int main(int argc, char **argv) {
    static const picture_case gpu[] = {
        {"sdxl", "256", 256, 0, 1, 1, false, false, NULL, 0},
        {"sdxl", "512", 512, 0, 1, 1, false, false, NULL, 0},
        {"sdxl", "1024", 1024, 0, 1, 1, false, false, NULL, 0},
        {"sdxl", "256x4", 256, 0, 4, 4, false, false, NULL, 0},
        {"sdxl", "512/f16", 512, 0, 1, 1, true, false, "f16", 0},
        {"sdxl", "1024/budget", 1024, 0, 1, 1, false, true, NULL, 0},
        {"sdxl", "512/219MB", 512, 0, 1, 1, false, false, NULL, 219},
        {"sdxl", "1024/857MB", 1024, 0, 1, 1, false, false, NULL, 857},
        {"sdxl", "512x8", 512, 0, 8, 4, false, false, NULL, 0},
        {"wan", "256/video", 256, 5, 1, 1, false, false, NULL, 0},
        {"taesd", "512", 512, 0, 1, 1, false, false, NULL, 0},
        {"taesd", "512/pinned", 512, 0, 1, 1, false, false, NULL, 0},
        {"taesd", "1024", 1024, 0, 1, 1, false, false, NULL, 0}};
    static const picture_case cpu[] = {
        {"taesd", "256", 256, 0, 1, 1, false, false, NULL, 0},
        {"taesd", "512", 512, 0, 1, 1, false, false, NULL, 0},
        {"taesd", "1024", 1024, 0, 1, 1, false, false, NULL, 0},
        {"taesd", "256x4", 256, 0, 4, 4, false, false, NULL, 0},
        {"taesd", "512/f16", 512, 0, 1, 1, true, false, "f16", 0},
        {"taesd", "1024/budget", 1024, 0, 1, 1, false, true, NULL, 0},
        {"taesd", "512x8", 512, 0, 8, 4, false, false, NULL, 0},
        {"sdxl", "256", 256, 0, 1, 1, false, false, NULL, 0},
        {"wan", "64/video", 64, 5, 1, 1, false, false, NULL, 0}};
    static const conv_case convs[] = {
        {4, 512, 3, 64, 1, false}, {512, 512, 3, 64, 1, true}, {512, 512, 1, 64, 1, true},
        {512, 512, 3, 128, 2, false}, {512, 512, 3, 128, 1, true}, {512, 512, 3, 256, 2, false},
        {512, 256, 3, 256, 1, true}, {512, 256, 1, 256, 1, false}, {256, 256, 3, 256, 1, true},
        {256, 256, 3, 512, 2, false}, {256, 128, 3, 512, 1, true}, {256, 128, 1, 512, 1, false},
        {128, 128, 3, 512, 1, true}, {128, 3, 3, 512, 1, true}, {64, 64, 3, 64, 1, false},
        {64, 64, 3, 128, 1, false}, {64, 64, 3, 256, 1, false}, {64, 64, 3, 512, 1, false},
        {64, 64, 3, 512, 2, false}, {64, 3, 3, 512, 1, false}};
    static const picture_case tiny[] = {
        {"taesd", "64", 64, 0, 1, 1, false, false, NULL, 0},
        {"taesd", "64x2/budget", 64, 0, 2, 2, false, true, NULL, 0}};
    bench b;
    torch_peer peer;
    if (!bench_open(&b, argc, argv, "vae")) return 1;
    torch_start(&peer, &b);
    if (b.tiny) {
        for (int i = 0; i < 2; i++) measure_picture(&b, &peer, &tiny[i]);
        measure_conv(&b, &peer, (conv_case){32, 48, 3, 16, 1, true});
        measure_conv(&b, &peer, (conv_case){8, 16, 3, 16, 2, false});
    } else {
        const picture_case *all = b.gpu ? gpu : cpu;
        const size_t n = b.gpu ? sizeof gpu / sizeof *gpu : sizeof cpu / sizeof *cpu;
        for (size_t i = 0; i < sizeof convs / sizeof *convs; i++) measure_conv(&b, &peer, convs[i]);
        for (size_t i = 0; i < n; i++) measure_picture(&b, &peer, &all[i]);
    }
    torch_end(&peer);
    return bench_close(&b);
}
