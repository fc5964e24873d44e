// frames.c - what a renderer and a context cost each other on one GPU: frame times and tokens a
// second together, by rocq_sharing, and of each alone.
//
// The renderer is played by a second stream (bench/probe.hip): 144 times a second a frame of 12
// short kernels, 3 ms in all where nothing else runs, each drawn and waited for by a thread of its
// own. A frame's time is taken on the host's clock, from when it is submitted to when it is done.
// One that takes longer than 6.94 ms is late, and the next begins at once. Meanwhile the context
// decodes: each step draws a token and waits for it, as a program does.
//
//   frames/renderer/alone/FIGURE        FIGURE: median, p95, p99, worst (ms), late (% of frames)
//   frames/MODEL/PRESET/FIGURE          with the context at work; PRESET: balanced, graphics_first,
//                                       compute_first; or sliced, which is graphics_first with a
//                                       step in slices (llama_eval_for), one of half a millisecond
//                                       in each frame, as examples/frame.c speaks
//   frames/MODEL/PRESET/tokens_per_s    beside the renderer
//   frames/MODEL/alone/tokens_per_s     without it
//
// CUDA has no priority below that of a plain stream. Where graphics_first does not get it, the
// renderer's stream is raised above a plain one instead, and a line says so: what counts is the
// order of the two. Compute units and waves are not limited there either (rocq_get_info, ignored).
//
//     frames [options of bench.h] [--model FILE]    else a llama shape of 1.1B with random weights
//
// Each case takes --seconds, two at least.

#include "bench.h"
#include "../examples/llama.h"
#include "model.h"

enum { PAST = 128, CONTEXT = 512, CHECKED = 16, PASSES = 12, FRAMES = 100000, SLICE_US = 500 };
static const double frame_ns = 1e9 / 144, pass_ms = 3.0 / PASSES;

// Of probe.hip: opens a stream on the GPU at this PCI address and finds out how much work takes
// pass_ms; submits passes and waits for them. 0, or an error of the runtime.
#ifdef __cplusplus
extern "C" {
#endif
__attribute__((weak)) int bench_renderer_open(const char *pci, int raised, double pass_ms);
__attribute__((weak)) int bench_renderer_draw(int passes);
__attribute__((weak)) void bench_renderer_close(void);
#ifdef __cplusplus
}
#endif

typedef struct renderer {
    pthread_t thread;
    int32_t stop; // atomic
    int error;
    int64_t n, n_late;
    double ns[FRAMES];
} renderer;

typedef struct model { // open on a context of its own
    rocq_ctx *ctx;
    rocq_gguf *file;
    llama_model m;
    rocq_info info;
    bool sliced;
    double next; // when its next frame begins
} model;

// Waits for the beginning of a frame, and moves it on to that of the next: what is missed is not
// made up for.
static void frame_begin(double *next) {
    double now = (double)rocq_time_ns();
    if (now < *next) {
        const struct timespec wait = {.tv_sec = 0, .tv_nsec = (long)(*next - now)};
        nanosleep(&wait, NULL);
        now = (double)rocq_time_ns();
    }
    *next = *next + frame_ns > now ? *next + frame_ns : now;
}

// -- the renderer --

static void *draw_frames(void *arg) {
    renderer *r = (renderer *)arg;
    double next = (double)rocq_time_ns();
    while (!__atomic_load_n(&r->stop, __ATOMIC_ACQUIRE) && r->n < FRAMES && !r->error) {
        frame_begin(&next);
        const double start = (double)rocq_time_ns();
        r->error = bench_renderer_draw(PASSES);
        r->ns[r->n] = (double)rocq_time_ns() - start;
        r->n_late += r->ns[r->n++] > frame_ns;
    }
    return NULL;
}

static bool renderer_start(renderer *r) {
    memset(r, 0, sizeof *r);
    return pthread_create(&r->thread, NULL, draw_frames, r) == 0;
}

static void renderer_stop(renderer *r) {
    __atomic_store_n(&r->stop, 1, __ATOMIC_RELEASE);
    pthread_join(r->thread, NULL);
}

static void put_frames(bench *b, const char *what, renderer *r) {
    rocq_summary s;
    char name[160];
    memset(&s, 0, sizeof s);
    rocq_summarize(&s, r->ns, r->n);
    const double figures[] = {s.median, s.p95, s.p99, s.max};
    const char *const names[] = {"median", "p95", "p99", "worst"};
    const bool drawn = r->error == 0 && r->n >= (b->tiny ? 1 : 100);
    for (int i = 0; i < 4; i++) {
        snprintf(name, sizeof name, "%s/%s", what, names[i]);
        bench_value(b, name, figures[i] * 1e-6, "ms", drawn);
    }
    snprintf(name, sizeof name, "%s/late", what);
    bench_value(b, name, r->n > 0 ? 100.0 * (double)r->n_late / (double)r->n : 0, "%", drawn);
}

// -- the context --

static bool step(model *k, int32_t past, int32_t *drawn) {
    static const rocq_sample_params greedy = {.temperature = 0};
    const int32_t token = past * 7919 % k->m.n_vocab;
    int64_t done = k->sliced ? 0 : 1;
    k->m.n_past = past;
    if (!k->sliced && llama_eval(&k->m, &token, 1, NULL) != ROCQ_OK) return false;
    while (done == 0) {
        frame_begin(&k->next);
        if (llama_eval_for(&k->m, &token, 1, SLICE_US, &done) != ROCQ_OK) return false;
    }
    return llama_sample(&k->m, &greedy, drawn) == ROCQ_OK;
}

static bool model_open(bench *b, model *k, const char *path, rocq_sharing sharing, bool sliced) {
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_GPU, .kernels_path = b->info.desc.kernels_path,
                            .sharing = sharing, .slice_us = sliced ? SLICE_US / 2 : 0};
    const llama_options options = {.n_ctx = CONTEXT, .n_batch = PAST};
    const rocq_gguf_desc source = {.path = path};
    int32_t prompt[PAST];
    memset(k, 0, sizeof *k);
    k->sliced = sliced;
    if (rocq_open(&k->ctx, &desc) != ROCQ_OK || rocq_get_info(k->ctx, &k->info) != ROCQ_OK ||
        rocq_gguf_open(k->ctx, &k->file, &source) != ROCQ_OK ||
        llama_open(&k->m, k->ctx, k->file, &options) != ROCQ_OK ||
        llama_warm(&k->m) != ROCQ_OK) {
        return false;
    }
    for (int32_t i = 0; i < PAST; i++) prompt[i] = i * 7919 % k->m.n_vocab;
    return llama_eval(&k->m, prompt, PAST, NULL) == ROCQ_OK;
}

static void model_close(model *k) {
    llama_close(&k->m);
    rocq_gguf_close(&k->file);
    rocq_close(&k->ctx);
}

// Tokens a second, over so many seconds; *ok: and the first ones are those that were expected.
static double decode(model *k, double seconds, int32_t *expected, bool check, bool *ok) {
    const double start = bench__now(), end = start + 1e9 * seconds;
    int64_t n = 0;
    *ok = true;
    for (; *ok && (n < CHECKED || bench__now() < end) && !bench__stopped; n++) {
        int32_t drawn = -1;
        *ok = step(k, PAST + (int32_t)(n % (CONTEXT - PAST)), &drawn);
        if (n >= CHECKED) continue;
        if (check) *ok = *ok && drawn == expected[n];
        else expected[n] = drawn;
    }
    return 1e9 * (double)n / (bench__now() - start);
}

// -- cases --

static void alone(bench *b, renderer *r, double seconds) {
    const struct timespec wait = {.tv_sec = (time_t)seconds,
                                  .tv_nsec = (long)(1e9 * (seconds - floor(seconds)))};
    if (!bench_wants(b, "frames/renderer/alone/")) return;
    const int error = bench_renderer_open(b->info.pci, 0, pass_ms);
    if (error != 0 || !renderer_start(r)) {
        bench_fail(b, "frames/renderer/alone", "the renderer's stream could not be opened");
    } else {
        nanosleep(&wait, NULL);
        renderer_stop(r);
        put_frames(b, "frames/renderer/alone", r);
    }
    bench_renderer_close();
}

static void together(bench *b, renderer *r, model *k, const char *what, double seconds,
                     int32_t *expected) {
    const bool raised =
        k->info.desc.priority == ROCQ_PRIORITY_LOW && k->info.priority != ROCQ_PRIORITY_LOW;
    char name[160];
    bool ok = false;
    const int error = bench_renderer_open(b->info.pci, raised, pass_ms);
    if (k->info.ignored[0]) printf("%-44s ignored: %s\n", what, k->info.ignored);
    if (raised) printf("%-44s the renderer's stream is raised instead\n", what);
    if (error != 0 || !renderer_start(r)) {
        bench_fail(b, what, "the renderer's stream could not be opened");
    } else {
        const double tokens = decode(k, seconds, expected, true, &ok);
        renderer_stop(r);
        put_frames(b, what, r);
        snprintf(name, sizeof name, "%s/tokens_per_s", what);
        bench_value(b, name, tokens, "tokens/s", ok);
    }
    bench_renderer_close();
}

static void measure(bench *b, const char *model_name, const char *path, double seconds) {
    static const struct { const char *name; rocq_sharing sharing; bool sliced; } presets[] = {
        {"balanced", ROCQ_SHARING_BALANCED, false},
        {"graphics_first", ROCQ_SHARING_GRAPHICS_FIRST, false},
        {"compute_first", ROCQ_SHARING_COMPUTE_FIRST, false},
        {"sliced", ROCQ_SHARING_GRAPHICS_FIRST, true}};
    static renderer r;
    static model k;
    int32_t expected[CHECKED];
    bool known = false;
    char name[128], own[160];
    alone(b, &r, seconds);
    snprintf(own, sizeof own, "frames/%s/alone/tokens_per_s", model_name);
    for (int preset = 0; preset < (int)(sizeof presets / sizeof *presets); preset++) {
        bool ok = false;
        snprintf(name, sizeof name, "frames/%s/%s/", model_name, presets[preset].name);
        const bool wanted = bench_wants(b, name), without = preset == 0 && bench_wants(b, own);
        name[strlen(name) - 1] = '\0';
        if (!wanted && !without) continue;
        if (!model_open(b, &k, path, presets[preset].sharing, presets[preset].sliced)) {
            bench_fail(b, name, k.m.error[0] ? k.m.error : "the context could not be opened");
        } else { // alone first: balanced has no limits but that of a launch
            const double tokens = decode(&k, without ? seconds : 0, expected, known, &ok);
            known = ok;
            if (without) bench_value(b, own, tokens, "tokens/s", ok);
            if (wanted) together(b, &r, &k, name, seconds, expected);
        }
        model_close(&k);
    }
}

int main(int argc, char **argv) {
    bench b;
    const char *given = model_option(&argc, argv);
    if (!bench_open(&b, argc, argv, "frames")) return 1;
    const model_choice m = model_choose(&b, given, "frames");
    const double seconds = b.tiny ? 0.05 : b.seconds > 2 ? b.seconds : 2;
    if (!b.gpu) {
        bench_skip(&b, "frames/", "on the CPU there is no renderer to share with: needs a GPU");
    } else if (!bench_renderer_open) {
        bench_skip(&b, "frames/", "the renderer is in bench/probe.hip, which this program is not "
                                  "linked with");
    } else if (m.given || write_model(&b, m.shape, CONTEXT, m.path)) {
        measure(&b, m.name, m.given ? m.given : m.path, seconds);
    } else {
        bench_fail(&b, m.name, rocq_error(b.ctx));
    }
    if (!m.given) unlink(m.path);
    return bench_close(&b);
}
