// warm.c - what rocq_warm is worth: the first prompt and the first step of a token in a fresh process,
// against the same once it has run for a while, with and without it (llama_warm).
//
// The program starts itself anew for every measurement, since a runtime keeps what it has loaded, with
// the file dropped from the page cache where the system does that. In one process either the prompt or
// the step comes first, straight after the model has been opened. Figures are medians over processes.
//
//   warm/MODEL/HOW/open              ms from opening the file to a model that is ready
//   warm/MODEL/HOW/prompt/first      ms of 128 tokens to the first one drawn; /steady: median of later
//   warm/MODEL/HOW/step/first        ms of a token; /steady: median of steps 10 to 60
//   warm/MODEL/HOW/prompt, step/ratio    first over steady: at most 1.1 is the aim with HOW warm
//
//     warm [options of bench.h] [--model FILE]    else a llama shape of 1.1B with random weights

#include "bench.h"
#include "../examples/llama.h"
#include "model.h"

#include <fcntl.h>

enum { PROMPT = 128, STEPS = 60, SKIP = 10, PROMPTS = 9, RUNS = 5, FIGURES = 3 };

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

static int measured(bool warm, bool step, const char *device, const char *path) {
    const rocq_desc desc = {.prefer = strcmp(device, "gpu") == 0 ? ROCQ_GPU : ROCQ_CPU,
                            .kernels_path = kernels};
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
    if (ok) printf("%f\n", median(ns + skip, n - skip) * 1e-6);
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
    const bool got = fscanf(f, "%lf %lf %lf", &figures[0], &figures[1], &figures[2]) == FIGURES;
    return pclose(f) == 0 && got;
}

static void measure(bench *b, const char *model, const char *path, bool warm) {
    const char *how = warm ? "warm" : "cold";
    const int runs = b->tiny ? 1 : RUNS;
    for (int step = 0; step < 2; step++) {
        const char *what = step ? "step" : "prompt";
        double samples[FIGURES][RUNS], value[FIGURES];
        char name[160];
        bool ok = true;
        snprintf(name, sizeof name, "warm/%s/%s/%s", model, how, what);
        if (!bench_wants(b, name)) continue;
        for (int r = 0; r < runs && ok; r++) {
            double figures[FIGURES];
            ok = start(b, warm, step != 0, path, figures);
            for (int i = 0; i < FIGURES && ok; i++) samples[i][r] = figures[i];
        }
        if (!ok) {
            bench_fail(b, name, "the process that is measured failed");
            continue;
        }
        for (int i = 0; i < FIGURES; i++) value[i] = median(samples[i], runs);
        if (step) {
            snprintf(name, sizeof name, "warm/%s/%s/open", model, how);
            bench_value(b, name, value[0], "ms", true);
        }
        snprintf(name, sizeof name, "warm/%s/%s/%s/first", model, how, what);
        bench_value(b, name, value[1], "ms", true);
        snprintf(name, sizeof name, "warm/%s/%s/%s/steady", model, how, what);
        bench_value(b, name, value[2], "ms", true);
        snprintf(name, sizeof name, "warm/%s/%s/%s/ratio", model, how, what);
        bench_value(b, name, value[1] / value[2], "ratio", true);
    }
}

int main(int argc, char **argv) {
    if (argc == 7 && strcmp(argv[1], "--measured") == 0) {
        if (argv[6][0]) kernels = argv[6];
        return measured(strcmp(argv[2], "warm") == 0, strcmp(argv[3], "step") == 0, argv[4], argv[5]);
    }
    bench b;
    const char *given = NULL;
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], "--kernels") == 0) kernels = argv[i + 1];
        if (strcmp(argv[i], "--model") != 0) continue;
        given = argv[i + 1];
        for (int k = i; k + 2 < argc; k++) argv[k] = argv[k + 2];
        argc -= 2;
    }
    if (!bench_open(&b, argc, argv, "warm")) return 1;
    static const model_shape large = {"1.1B-Q4_K", 2048, 5632, 32, 4, 22, 32000, ROCQ_Q4_K, ROCQ_Q6_K};
    static const model_shape tiny = {"tiny", 128, 256, 4, 2, 2, 320, ROCQ_Q4_0, ROCQ_Q8_0};
    const model_shape *shape = b.tiny ? &tiny : &large;
    const char *dir = getenv("TMPDIR"), *name = given ? strrchr(given, '/') : shape->name;
    char path[512];
    name = !given ? name : name ? name + 1 : given;
    snprintf(path, sizeof path, "%s/rocq-warm-%d.gguf", dir && *dir ? dir : "/tmp", (int)getpid());
    if (given || write_model(&b, shape, 512, path)) {
        for (int warm = 0; warm < 2; warm++) measure(&b, name, given ? given : path, warm != 0);
    } else {
        bench_fail(&b, name, rocq_error(b.ctx));
    }
    if (!given) unlink(path);
    return bench_close(&b);
}
