// warm.c - what rocq_warm is worth: the first prompt and the first step of a token in a fresh
// process, against the same once it has run for a while, with and without it (llama_warm).
//
// The program starts itself anew for every measurement, since a runtime keeps what it has loaded,
// with the file dropped from the page cache where the system does that. In one process either the
// prompt or the step comes first, straight after the model has been opened. Processes with (HOW:
// warm) and without (cold) rocq_warm take turns, at least 5 of each and up to 25 in the time of a
// case; figures are medians over them, so a few that something else held up do not count.
//
//   warm/MODEL/HOW/open              ms from opening the file to a model that is ready
//   warm/MODEL/HOW/prompt/first      ms of 128 tokens to the first one drawn; /steady: median of
//                                    later
//   warm/MODEL/HOW/step/first        ms of a token; /steady: median of steps 10 to 60
//   warm/MODEL/HOW/step/replay_check ms by which rocq_warm takes longer for comparing the step's
//   replay
//                                    with its ops, on a GPU. The step runs three times for that,
//                                    once op by op
//   warm/MODEL/HOW/step/replay_check_steps    the same as a multiple of /steady of the same process
//   warm/MODEL/HOW/prompt, step/ratio    of each process first over its own steady, so that what
//                                    slows a whole process is not in it; warm: at most 1.1 is the
//                                    aim
//
//     warm [options of bench.h] [--model FILE]    else a llama shape of 1.1B with random weights

#include "bench.h"
#include "../examples/llama.h"
#include "model.h"

#include <fcntl.h>

enum { PROMPT = 128, STEPS = 60, SKIP = 10, PROMPTS = 9, RUNS = 25, RUNS_LEAST = 5 };
enum { OPEN, FIRST, STEADY, CHECK, CHECK_STEPS, RATIO, FIGURES };

static const char *kernels;

static double median(double *ns, int64_t n) {
    rocq_summary s;
    rocq_summarize(&s, ns, n);
    return s.median;
}

// -- the process that is measured: prints milliseconds to open, of the first and of later ones --

static rocq_result eval(llama_model *m, int32_t n, int32_t past) {
    static const rocq_sample_params how = {.temperature = 0.8f, .top_k = 40, .top_p = 0.95f};
    int32_t tokens[PROMPT], drawn;
    for (int32_t i = 0; i < n; i++) tokens[i] = (past + i) * 7919 % m->n_vocab;
    m->n_past = past;
    const rocq_result result = llama_eval(m, tokens, n, NULL);
    return result == ROCQ_OK ? llama_sample(m, &how, &drawn) : result;
}

// On a GPU rocq_warm also replays a graph twice and runs its ops once, the first time it gets the
// graph. How much longer that takes than the second time. The graph is launched before, on the
// inputs of the last step, since what the first launch of a graph takes longer is not the check's.
static double check_ns(rocq_ctx *ctx, llama_model *m) {
    double ns[2] = {0, 0};
    if (!m->step) return 0;
    rocq_graph_destroy(ctx, &m->step);
    bool ok = llama__record(m, NULL) == ROCQ_OK && rocq_graph_launch(ctx, m->step) == ROCQ_OK &&
              rocq_sync(ctx) == ROCQ_OK;
    for (int i = 0; i < 2 && ok; i++) {
        const int64_t begin = rocq_time_ns();
        ok = rocq_warm(ctx, m->step) == ROCQ_OK;
        ns[i] = (double)(rocq_time_ns() - begin);
    }
    return ok ? ns[0] - ns[1] : 0;
}

static int measured(bool warm, bool step, const char *device, const char *path) {
    const rocq_desc desc = {.prefer =
                                strcmp(device, "gpu") == 0 ? ROCQ_BACKEND_GPU : ROCQ_BACKEND_CPU,
                            .kernels_path = kernels,
                            .rocm_path = getenv("ROCM_PATH"),
                            .hip_path = getenv("HIP_PATH")};
    const llama_options options = {.n_ctx = 512, .n_batch = PROMPT};
    const rocq_gguf_desc source = {.path = path};
    const int32_t n = step ? STEPS : PROMPTS, skip = step ? SKIP : 1, tokens = step ? 1 : PROMPT;
    double ns[STEPS];
    rocq_ctx *ctx = NULL;
    rocq_gguf *file = NULL;
    llama_model m;
    memset(&m, 0, sizeof m);
    if (rocq_open(&ctx, &desc) != ROCQ_OK) return 1;
    const int64_t start = rocq_time_ns();
    bool ok = rocq_gguf_open(ctx, &file, &source) == ROCQ_OK &&
              llama_open(&m, ctx, file, &options) == ROCQ_OK &&
              (!warm || llama_warm(&m) == ROCQ_OK) && rocq_sync(ctx) == ROCQ_OK;
    const double opened = (double)(rocq_time_ns() - start);
    for (int32_t i = 0; i < n && ok; i++) {
        const int64_t begin = rocq_time_ns();
        ok = eval(&m, tokens, step ? i : 0) == ROCQ_OK;
        ns[i] = (double)(rocq_time_ns() - begin);
    }
    if (!ok) fprintf(stderr, "%s %s\n", m.error, rocq_error(ctx));
    else printf("%f %f ", opened * 1e-6, ns[0] * 1e-6);
    if (ok) printf("%f ", median(ns + skip, n - skip) * 1e-6);
    if (ok) printf("%f\n", step ? check_ns(ctx, &m) * 1e-6 : 0);
    llama_close(&m);
    rocq_gguf_close(&file);
    rocq_close(&ctx);
    return ok ? 0 : 1;
}

// -- the process that starts them --

static bool start(const bench *b, bool warm, bool step, const char *path, double figures[FIGURES]) {
    char self[512], command[2048];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length <= 0) return false;
    self[length] = '\0';
    const int fd = open(path, O_RDONLY);
    if (fd >= 0) {
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
    snprintf(command, sizeof command, "'%s' --measured %s %s %s '%s' '%s'", self,
             warm ? "warm" : "cold", step ? "step" : "prompt", b->gpu ? "gpu" : "cpu", path,
             kernels ? kernels : "");
    FILE *f = popen(command, "r");
    if (!f) return false;
    const bool got = fscanf(f, "%lf %lf %lf %lf", &figures[OPEN], &figures[FIRST], &figures[STEADY],
                            &figures[CHECK]) == CHECK + 1;
    figures[CHECK_STEPS] = got ? figures[CHECK] / figures[STEADY] : 0;
    figures[RATIO] = got ? figures[FIRST] / figures[STEADY] : 0;
    return pclose(f) == 0 && got;
}

static void measure(bench *b, const char *model, const char *path, bool step) {
    static const char *const hows[] = {"cold", "warm"};
    static const char *const figure[] = {"open",         "first",              "steady",
                                         "replay_check", "replay_check_steps", "ratio"};
    static double samples[2][FIGURES][RUNS];
    const int64_t end_ns = rocq_time_ns() + (int64_t)(2e9 * b->seconds);
    const int least = b->tiny ? 1 : RUNS_LEAST, most = b->tiny ? 1 : RUNS;
    char name[2][160];
    bool wanted[2], ok[2] = {true, true};
    int n = 0;
    for (int how = 0; how < 2; how++) {
        snprintf(name[how], sizeof name[how], "warm/%s/%s/%s", model, hows[how],
                 step ? "step" : "prompt");
        wanted[how] = bench_wants(b, name[how]);
    }
    if (!wanted[0] && !wanted[1]) return;
    for (; n < least || (n < most && rocq_time_ns() < end_ns); n++) {
        for (int how = 0; how < 2; how++) {
            double figures[FIGURES];
            if (!wanted[how] || !ok[how]) continue;
            ok[how] = start(b, how == 1, step, path, figures);
            for (int i = 0; i < FIGURES && ok[how]; i++) samples[how][i][n] = figures[i];
        }
    }
    for (int how = 0; how < 2; how++) {
        char value[sizeof name + 16];
        if (!wanted[how]) continue;
        if (!ok[how]) {
            bench_fail(b, name[how], "the process that is measured failed");
            continue;
        }
        snprintf(value, sizeof value, "warm/%s/%s/open", model, hows[how]);
        if (step) bench_value(b, value, median(samples[how][OPEN], n), "ms", true);
        for (int i = FIRST; i <= RATIO; i++) {
            if ((i == CHECK || i == CHECK_STEPS) && !(b->gpu && step)) continue;
            snprintf(value, sizeof value, "%s/%s", name[how], figure[i]);
            bench_value(b, value, median(samples[how][i], n), i >= CHECK_STEPS ? "ratio" : "ms",
                        true);
        }
    }
}

int main(int argc, char **argv) {
    if (argc == 7 && strcmp(argv[1], "--measured") == 0) {
        if (argv[6][0]) kernels = argv[6];
        return measured(strcmp(argv[2], "warm") == 0, strcmp(argv[3], "step") == 0, argv[4],
                        argv[5]);
    }
    bench b;
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], "--kernels") == 0) kernels = argv[i + 1];
    }
    const char *given = model_option(&argc, argv);
    if (!bench_open(&b, argc, argv, "warm")) return 1;
    const model_choice m = model_choose(&b, given, "warm");
    if (m.given || write_model(&b, m.shape, 512, m.path)) {
        for (int step = 0; step < 2; step++)
            measure(&b, m.name, m.given ? m.given : m.path, step != 0);
    } else {
        bench_fail(&b, m.name, rocq_error(b.ctx));
    }
    if (!m.given) unlink(m.path);
    return bench_close(&b);
}
