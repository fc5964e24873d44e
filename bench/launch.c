// launch.c - what it costs the host to have work done, and to measure it.
//
//   launch/submit, /complete, /row  rocq_measure_launch: a kernel that does nothing (on the CPU, a
//                                   job handed to the threads); medians, and the 95th percentiles
//                                   as p95
//   launch/timer/KIND               a timer started, stopped and read
//   profile/clock, /region          reading the host's clock; a region of the program, begun and
//                                   ended
//   profile/op/STATE                an op too small to matter, with the profile off and on; region
//                                   and op with every call measured
//   profile/step/MODEL/STATE        a step (eval, draw, the token on the host), off and on, in
//                                   turn: the ratio is what a profile costs. demo: the shipped
//                                   model; 1.1B: a llama shape with random weights, written to
//                                   TMPDIR (or /tmp) and unlinked
//   profile/step_every/MODEL/STATE  the same with every call measured, instead of as many as cost
//                                   little
//   profile/step_host/MODEL/STATE   on a GPU: every call, host times alone, without events in the
//                                   queue
//
// From the top level, where the model is.

#include "bench.h"
#include "../examples/llama.h"
#include "model.h"

enum { PAST = 64 };

typedef struct state {
    bench *b;
    rocq_timer timer;
    rocq_tensor x;
    llama_model m;
    int32_t token, drawn, wanted;
    rocq_profile_desc profile;
    int calls, steps; // of a run
} state;

// -- launches and timers --

static void launches(bench *b) {
    if (!bench_wants(b, "launch/")) return;
    rocq_launch_cost cost;
    memset(&cost, 0, sizeof cost);
    const int32_t n = b->tiny ? 10 : 1000;
    const bool ok = rocq_measure_launch(b->ctx, n, &cost) == ROCQ_OK;
    const struct { const char *name; const rocq_summary *times; } rows[] = {
        {"submit", &cost.submit_ns}, {"complete", &cost.complete_ns}, {"row", &cost.row_ns}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "launch/%s", rows[i].name);
        bench_value(b, name, rows[i].times->median, "ns", ok && rows[i].times->count == n);
        snprintf(name, sizeof name, "launch/%s/p95", rows[i].name);
        bench_value(b, name, rows[i].times->p95, "ns", ok);
    }
}

static rocq_result time_nothing(void *user) {
    state *s = (state *)user;
    double ns;
    rocq_result result = rocq_timer_start(s->b->ctx, &s->timer);
    if (result == ROCQ_OK) result = rocq_timer_stop(s->b->ctx, &s->timer);
    return result == ROCQ_OK ? rocq_timer_read(s->b->ctx, &s->timer, &ns) : result;
}

static void timers(state *s) {
    for (int gpu = 0; gpu < (s->b->gpu ? 2 : 1); gpu++) {
        const char *name = gpu ? "launch/timer/gpu" : "launch/timer/host";
        const bench_case c = {.name = name, .run = time_nothing, .user = s};
        if (!bench_wants(s->b, name)) continue;
        if (rocq_timer_init(s->b->ctx, &s->timer, gpu ? ROCQ_TIMER_GPU : ROCQ_TIMER_HOST)) {
            bench_fail(s->b, name, rocq_error(s->b->ctx));
            continue;
        }
        bench_run(s->b, &c);
        rocq_timer_free(s->b->ctx, &s->timer);
    }
}

// -- the profile's own cost --

static void profile_on(void *user) {
    state *s = (state *)user;
    if (rocq_profile_start(s->b->ctx, &s->profile)) bench__die(rocq_error(s->b->ctx));
}
static void profile_off(void *user) {
    const state *s = (const state *)user;
    if (rocq_profile_clear(s->b->ctx)) bench__die(rocq_error(s->b->ctx));
}

static volatile int64_t clock_sink;

static rocq_result read_clock(void *user) {
    const state *s = (const state *)user;
    for (int i = 0; i < s->calls; i++) clock_sink = rocq_time_ns();
    return ROCQ_OK;
}
static rocq_result mark_regions(void *user) {
    const state *s = (const state *)user;
    rocq_result result = ROCQ_OK;
    for (int i = 0; i < s->calls && result == ROCQ_OK; i++) {
        result = rocq_region_begin(s->b->ctx, "region");
        if (result == ROCQ_OK) result = rocq_region_end(s->b->ctx);
    }
    return result;
}
static rocq_result run_ops(void *user) {
    const state *s = (const state *)user;
    const rocq_scale_params p = {.y = &s->x, .x = &s->x, .scale = 1};
    rocq_result result = ROCQ_OK;
    for (int i = 0; i < s->calls && result == ROCQ_OK; i++) result = rocq_scale(s->b->ctx, &p);
    return result;
}

static void small_costs(state *s) {
    bench *b = s->b;
    const bench_case calls[] = {
        {.name = "profile/clock", .run = read_clock, .user = s, .inner = s->calls},
        {.name = "profile/region", .run = mark_regions, .enter = profile_on, .leave = profile_off,
         .user = s, .inner = s->calls}};
    const bench_case ops[] = {
        {.name = "profile/op/off", .run = run_ops, .user = s, .inner = s->calls},
        {.name = "profile/op/on", .run = run_ops, .enter = profile_on, .leave = profile_off,
         .user = s, .inner = s->calls}};
    for (int i = 0; i < 2; i++) {
        if (bench_wants(b, calls[i].name)) bench_run(b, &calls[i]);
    }
    if (!bench_wants(b, "profile/op/")) return;
    rocq_buffer memory = {0};
    const int64_t ne[1] = {32};
    if (rocq_buffer_alloc(b->ctx, &memory, 128) ||
        rocq_tensor_init(&s->x, &memory, 0, ROCQ_F32, 1, ne)) {
        bench__die(rocq_error(b->ctx));
    }
    bench_run_pair(b, ops, 2);
    rocq_buffer_free(b->ctx, &memory);
}

// -- a step of the shipped model --

static rocq_result step(void *user) {
    static const rocq_sample_params greedy; // temperature 0
    state *s = (state *)user;
    rocq_result result = ROCQ_OK;
    for (int i = 0; i < s->steps && result == ROCQ_OK; i++) {
        s->m.n_past = PAST;
        result = llama_eval(&s->m, &s->token, 1, NULL);
        if (result == ROCQ_OK) result = llama_sample(&s->m, &greedy, &s->drawn);
    }
    return result;
}
static bool same_token(void *user) { // profiled or not
    const state *s = (const state *)user;
    return s->drawn == s->wanted;
}

// Pairs of a step with the profile off and on.
static void compare_steps(state *s, const char *kind, const char *model,
                          const rocq_profile_desc *profile) {
    char names[2][64], value[64];
    for (int i = 0; i < 2; i++) {
        snprintf(names[i], sizeof names[i], "profile/%s/%s/%s", kind, model, i ? "on" : "off");
    }
    const bench_case cases[] = {
        {.name = names[0], .run = step, .verify = same_token, .user = s, .inner = s->steps},
        {.name = names[1], .run = step, .verify = same_token, .enter = profile_on,
         .leave = profile_off, .user = s, .inner = s->steps}};
    s->profile = *profile;
    const bench_result *results = bench_run_pair(s->b, cases, 2);
    snprintf(value, sizeof value, "profile/%s/%s/cost", kind, model);
    if (results) bench_value(s->b, value, 100 * (results[1].ratio - 1), "% of a step", true);
}

static void steps_of(state *s, const char *model, const char *path) {
    bench *b = s->b;
    rocq_gguf *file = NULL;
    const rocq_gguf_desc source = {.path = path};
    int32_t prompt[PAST];
    for (int32_t i = 0; i < PAST; i++) prompt[i] = 100 + i;
    s->token = 7;
    if (rocq_gguf_open(b->ctx, &file, &source) || llama_open(&s->m, b->ctx, file, NULL) ||
        llama_eval(&s->m, prompt, PAST, NULL) || step(s)) {
        bench_fail(b, model, file ? s->m.error : rocq_error(b->ctx));
    } else {
        s->wanted = s->drawn;
        const rocq_profile_desc some = {0}, every = {.cost = 1},
            host = {.cost = 1, .host_only = true};
        compare_steps(s, "step", model, &some);
        compare_steps(s, "step_every", model, &every);
        if (b->gpu) compare_steps(s, "step_host", model, &host);
    }
    llama_close(&s->m);
    rocq_gguf_close(&file);
}

static bool wants_steps(const bench *b, const char *model) {
    static const char *const kinds[] = {"step", "step_every", "step_host"};
    char name[64];
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        snprintf(name, sizeof name, "profile/%s/%s/", kinds[i], model);
        if (bench_wants(b, name)) return true;
    }
    return false;
}

static void steps(state *s) {
    bench *b = s->b;
    const model_shape *shape = model_small(b);
    const char *name = b->tiny ? shape->name : "1.1B";
    const char *dir = getenv("TMPDIR");
    char path[512];
    s->steps = b->tiny ? 1 : 128; // so many that the profile has found out how often to measure
    if (!b->tiny && wants_steps(b, "demo")) steps_of(s, "demo", "examples/model/rocq-demo.gguf");
    if (!wants_steps(b, name)) return;
    s->steps = b->tiny ? 1 : 32;
    snprintf(path, sizeof path, "%s/rocq-launch-%d.gguf", dir && *dir ? dir : "/tmp",
             (int)getpid());
    if (write_model(b, shape, 512, path)) steps_of(s, name, path);
    else bench_fail(b, name, rocq_error(b->ctx));
    unlink(path);
}

int main(int argc, char **argv) {
    static state s;
    bench b;
    if (!bench_open(&b, argc, argv, "launch")) return 1;
    s.b = &b;
    s.profile.cost = 1;
    s.calls = b.tiny ? 20 : 1000;
    launches(&b);
    timers(&s);
    small_costs(&s);
    steps(&s);
    return bench_close(&b);
}
