// train.c - trains a GGUF model on a text: all of its weights, or a low-rank adapter (LoRA) beside
// them. On a GPU that has kernels, else on the CPU.
//
//     cc -O2 examples/train.c -o train -lcjson -lm -ldl -lpthread     # libstb-dev, libcjson-dev
//     ./train model.gguf --data voice.jsonl --lora 8 --epochs 3 --out voice.gguf
//     ./generate -m model.gguf --lora voice.gguf
//
//     ./train model.gguf --data text.txt --steps 1000 --checkpoint run.gguf --out new.gguf
//     ./train model.gguf --data text.txt --steps 1000 --checkpoint run.gguf --out new.gguf --resume
//
// The data is text, or JSON lines: {"text": ...}, or {"prompt": ..., "completion": ...}, of which
// only the completion is learned. Documents are put behind each other into contexts, each whole
// where it fits. The log goes to stdout, everything else to stderr. Exit status 1, after one line
// that says why, on any failure; a file gets its name when it is whole. --help lists the options.

#define _POSIX_C_SOURCE 200809L // popen
#define ROCQ_IMPLEMENTATION
#define ROCQ_STATIC // ops that are not called are not compiled
#define PROGRAM "train"
#include "../rocq.h"

#include "program.h"

#include "llama.h"
#include "tokenizer.h"
#include "train.h"

#include <cjson/cJSON.h>

#if defined(_WIN32)
#define popen _popen
#define pclose _pclose
#endif

static const char usage[] =
    "usage: train MODEL.gguf --data FILE [options]\n"
    "    --help           print this\n"
    "    --data FILE      text, or JSON lines if its name ends in .jsonl\n"
    "    --documents      empty lines in texts separate documents (a text is one document)\n"
    "    --lora N         train adapters of rank N, up to 512 (all weights are trained)\n"
    "    --alpha X        an adapter is added X / N times (N)\n"
    "    --targets LIST   matrices with an adapter, as in q,v: of q k v output gate up down; of\n"
    "                     gpt2's qkv output up down (all)\n"
    "    --out FILE       the result: with --lora an adapter, else the model, as GGUF (what was\n"
    "                     learnt is lost)\n"
    "    --format NAME    of the model's matrices in it: f32, f16 or bf16 (f32)\n"
    "    --steps N        steps in all, or\n"
    "    --epochs X       how often all of the data is seen (1)\n"
    "    --context N      tokens of a context (what the model was trained on, at most 512)\n"
    "    --batch N        contexts that are computed at once (4)\n"
    "    --accumulate N   how many times that makes a step (1)\n"
    "    --lr X           rate of learning at its highest (1e-3 with --lora, else 1e-4)\n"
    "    --warmup N       steps in which it rises to that, to fall by a cosine to a tenth in the\n"
    "                     last step (a tenth of all, at most 100)\n"
    "    --decay X        weight decay of matrices (0)\n"
    "    --clip X         the gradient is shortened to this length, 0 = never (1)\n"
    "    --moments8       keep AdamW's moments in 8 bits\n"
    "    --eval FILE      data to measure bits per byte on, before, after, and\n"
    "    --eval-every N   after each N steps\n"
    "    --checkpoint FILE  write one at the end, on Ctrl-C, and\n"
    "    --save-every N   after each N steps\n"
    "    --resume         go on from the checkpoint: the result is the same as without a break\n"
    "    --budget BYTES   memory for activations; layers are computed twice to keep to it, K, M\n"
    "                     and G are 2^10, 2^20 and 2^30 (as much as it takes)\n"
    "    --csv FILE       write the losses\n"
    "    --plot FILE      draw them, as .png or .svg; needs gnuplot\n"
    "    --seed N         of adapters and the order of the data (0)\n"
    "    --threads N      CPU threads (one per core)\n"
    "    --device NAME    auto, cpu or gpu (auto)\n"
    "    --kernels FILE   code object of rocq_kernels.hip, where it is not linked ($ROCQ_KERNELS)\n"
    "    --precision P    of products: auto, f32, f16 or int8, which is for those of quantized\n"
    "                     weights in the forward: faster, less exact (f32, or f16 on a GPU)\n"
    "    --stats          print what ran for how long\n";

typedef struct options {
    const char *model, *data, *targets, *out, *format, *eval, *checkpoint, *csv, *plot, *kernels;
    bool help, documents, moments8, resume, stats;
    int32_t rank, steps, context, batch, accumulate, warmup, eval_every, save_every, n_threads;
    float alpha, epochs, lr, decay, clip;
    int32_t device, precision; // rocq_backend, rocq_precision
    int64_t budget;
    uint64_t seed;
} options;

// No file is written over another of the command line: a checkpoint that is lost cannot be resumed.
static bool distinct_files(const options *o) {
    const char *all[] = {o->model, o->data, o->eval, o->out, o->checkpoint, o->csv, o->plot};
    for (int i = 3; i < 7; i++) { // those that are written
        for (int k = 0; all[i] && k < i; k++) {
            if (all[k] && same_file(all[i], all[k])) {
                return fail(all[i], "is named twice, and would be written over");
            }
        }
    }
    return true;
}

static bool parse(options *o, int argc, char **argv) {
    const option table[] = {
        {"--help", FLAG, 0, 0, &o->help},
        {"--data", TEXT, 0, 0, &o->data},
        {"--documents", FLAG, 0, 0, &o->documents},
        {"--lora", INTEGER, 1, 512, &o->rank},
        {"--alpha", NUMBER, 1e-6, 1e6, &o->alpha},
        {"--targets", TEXT, 0, 0, &o->targets},
        {"--out", TEXT, 0, 0, &o->out},
        {"--format", TEXT, 0, 0, &o->format},
        {"--steps", INTEGER, 1, 1e7, &o->steps},
        {"--epochs", NUMBER, 1e-6, 1e6, &o->epochs},
        {"--context", INTEGER, 2, 1 << 20, &o->context},
        {"--batch", INTEGER, 1, 65536, &o->batch},
        {"--accumulate", INTEGER, 1, 65536, &o->accumulate},
        {"--lr", NUMBER, 0, 10, &o->lr},
        {"--warmup", INTEGER, 0, 1e7, &o->warmup},
        {"--decay", NUMBER, 0, 10, &o->decay},
        {"--clip", NUMBER, 0, 1e6, &o->clip},
        {"--moments8", FLAG, 0, 0, &o->moments8},
        {"--eval", TEXT, 0, 0, &o->eval},
        {"--eval-every", INTEGER, 1, 1e7, &o->eval_every},
        {"--checkpoint", TEXT, 0, 0, &o->checkpoint},
        {"--save-every", INTEGER, 1, 1e7, &o->save_every},
        {"--resume", FLAG, 0, 0, &o->resume},
        {"--budget", BYTES, 1, 9e15, &o->budget},
        {"--csv", TEXT, 0, 0, &o->csv},
        {"--plot", TEXT, 0, 0, &o->plot},
        {"--seed", SEED, 0, 9e15, &o->seed},
        {"--threads", INTEGER, 1, 1024, &o->n_threads},
        {"--device", DEVICE, 0, 0, &o->device},
        {"--kernels", TEXT, 0, 0, &o->kernels},
        {"--precision", PRECISION, 0, 0, &o->precision},
        {"--stats", FLAG, 0, 0, &o->stats},
    };
    // The model comes first, by itself.
    const bool named = argc > 1 && argv[1][0] != '-';
    if (named) o->model = argv[1];
    if (!parse_options(table, sizeof table / sizeof table[0], argc - named, argv + named)) {
        return false;
    }
    if (o->help) return true;
    if (!o->model || !o->data) return fail("usage", "train MODEL.gguf --data FILE; see --help");
    if (o->resume && !o->checkpoint) return fail("--resume", "needs --checkpoint");
    if (o->format && o->rank > 0) return fail("--format", "adapters are always f32");
    if (o->targets && o->rank == 0) return fail("--targets", "needs --lora");
    return distinct_files(o);
}

// ---------------------------------------------------------------------------------------------
// Data
// ---------------------------------------------------------------------------------------------

// Contexts of n tokens each, as train.h wants them. Arrays are stb_ds's.
typedef struct data_set {
    int32_t *ids, *targets; // n of each context
    int64_t n_contexts, n_tokens, n_targets; // tokens without padding
    int64_t n_bytes;        // of text that targets stand for
    uint64_t hash;
} data_set;

// What is learned from: ids, of which the first n_prompt are only read.
typedef struct document {
    int32_t *ids;
    int64_t n_prompt;
    int64_t n_bytes; // of the rest
} document;

typedef struct record { // a line of the CSV
    int64_t step;
    double epoch, loss, lr, norm, bits, rate; // bits per byte of --eval: NaN where not measured
} record;

typedef struct run {
    options o;
    rocq_ctx *ctx;
    rocq_gguf *file;
    llama_model model;
    tokenizer tok;
    trainer t;
    data_set data, held;
    int64_t *order; // of the contexts in this epoch
    int64_t epoch;  // whose order it is, -1 = none's
    int32_t *ids, *targets; // of one step
    float *losses;
    record *records;
    int64_t n_steps; // in all
    bool terminal;
} run;

static bool read_file(const char *path, char **text) {
    char part[1 << 14];
    FILE *in = fopen(path, "rb");
    if (!in) return fail(path, "cannot be opened");
    for (size_t n; (n = fread(part, 1, sizeof part, in)) > 0;) {
        memcpy(arraddnptr(*text, n), part, n);
    }
    const bool whole = feof(in) != 0;
    fclose(in);
    return whole || fail(path, "cannot be read");
}

// Tokens of prompt and rest as one text, so that they are those of a text that goes on; those that
// the prompt alone has too are its own.
static bool encode(run *r, const char *path, rocq_str prompt, rocq_str rest, document *d) {
    int32_t *alone = NULL;
    char *whole = NULL;
    const size_t n_prompt = (size_t)prompt.length, n_rest = (size_t)rest.length;
    memset(d, 0, sizeof *d);
    if (n_prompt > 0) memcpy(arraddnptr(whole, n_prompt), prompt.data, n_prompt);
    memcpy(arraddnptr(whole, n_rest), rest.data, n_rest);
    const bool good =
        tokenizer_encode(&r->tok, &d->ids, whole, arrlen(whole), true, false) == ROCQ_OK &&
        tokenizer_encode(&r->tok, &alone, prompt.data, prompt.length, true, false) == ROCQ_OK;
    while (good && n_prompt > 0 && d->n_prompt < arrlen(alone) && d->n_prompt < arrlen(d->ids) &&
           alone[d->n_prompt] == d->ids[d->n_prompt]) {
        d->n_prompt++;
    }
    const int64_t n = arrlen(d->ids);
    if (good && r->tok.eos >= 0 && (n == 0 || d->ids[n - 1] != r->tok.eos)) {
        arrput(d->ids, r->tok.eos);
    }
    d->n_bytes = rest.length;
    arrfree(alone);
    arrfree(whole);
    return good || fail(path, r->tok.error);
}

static bool add_document(run *r, const char *path, rocq_str prompt, rocq_str rest,
                         document **list) {
    document d;
    if (rest.length == 0) return true;
    if (!encode(r, path, prompt, rest, &d)) {
        arrfree(d.ids);
        return false;
    }
    arrput(*list, d);
    return true;
}

static rocq_str string(const char *text) {
    const rocq_str s = {text, (int64_t)strlen(text)};
    return s;
}

// Whether a line has a NUL character, as it is or as \u0000, at which cJSON's strings would end.
static bool has_nul(const char *line, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (line[i] == '\0') return true;
        if (line[i] != '\\') continue;
        if (n - i > 5 && memcmp(line + i + 1, "u0000", 5) == 0) return true;
        i++; // what is escaped
    }
    return false;
}

// {"text": ...} or {"prompt": ..., "completion": ...}, one to a line.
static bool read_line(run *r, const char *path, const char *line, int64_t n, int64_t number,
                      document **list) {
    const char *end = NULL;
    cJSON *json = cJSON_ParseWithOpts(line, &end, true);
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, "text"));
    const char *prompt = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, "prompt"));
    const char *rest = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, "completion"));
    const char *wrong = has_nul(line, n) ? "has a NUL character"
                        : !json          ? "is no JSON"
                        : (text ? prompt || rest : !prompt || !rest)
                            ? "has neither \"text\" nor \"prompt\" and \"completion\""
                            : NULL;
    if (wrong) {
        char why[96];
        snprintf(why, sizeof why, "line %.0f %s", (double)number, wrong);
        fail(path, why);
    }
    const bool good = !wrong && add_document(r, path, string(text ? "" : prompt),
                                             string(text ? text : rest), list);
    cJSON_Delete(json);
    return good;
}

static bool read_lines(run *r, const char *path, char *text, int64_t length, document **list) {
    int64_t number = 0;
    for (int64_t at = 0, end; at < length; at = end + 1) {
        for (end = at; end < length && text[end] != '\n'; end++) {}
        text[end] = '\0'; // there is a byte behind the text
        number++;
        if (at + (int64_t)strspn(text + at, " \t\r") == end) continue; // empty
        if (!read_line(r, path, text + at, end - at, number, list)) return false;
    }
    return true;
}

static bool read_documents(run *r, const char *path, document **list) {
    char *text = NULL;
    const size_t n_path = strlen(path);
    if (!read_file(path, &text)) {
        arrfree(text);
        return false;
    }
    const int64_t length = arrlen(text);
    bool good = true;
    arrput(text, '\0');
    if (n_path >= 6 && strcmp(path + n_path - 6, ".jsonl") == 0) {
        good = read_lines(r, path, text, length, list);
    } else {
        for (int64_t at = 0, end, next; good && at < length; at = next) {
            for (end = next = at; end < length; end++) {
                const int64_t line = end + 1 + (text[end + 1] == '\r'); // if it is empty, its end
                next = line + 1;
                if (r->o.documents && text[end] == '\n' && text[line] == '\n') break;
            }
            const rocq_str all = {text + at, end - at};
            good = add_document(r, path, string(""), all, list);
        }
    }
    arrfree(text);
    return good;
}

// Puts a document, or the part of it from token `first` on that fits, into a context from column
// `column` on. The token behind the last one is still its target. Gives the first token left.
static int64_t put(data_set *s, const document *d, int64_t first, int64_t column, int64_t n,
                   bool count_end) {
    const int64_t n_ids = arrlen(d->ids), at = (s->n_contexts - 1) * n + column;
    int64_t i = 0;
    for (; i < n - column && first + i + 1 < n_ids; i++) {
        const int64_t target = first + i + 1;
        const bool learned = target >= d->n_prompt && (count_end || target + 1 < n_ids);
        s->ids[at + i] = d->ids[first + i];
        s->targets[at + i] = learned ? d->ids[target] : -1;
        s->n_targets += learned;
    }
    s->n_tokens += i;
    return first + i;
}

static void add_context(data_set *s, int64_t n, int32_t padding) {
    int32_t *ids = arraddnptr(s->ids, (size_t)n), *targets = arraddnptr(s->targets, (size_t)n);
    for (int64_t i = 0; i < n; i++) {
        ids[i] = padding;
        targets[i] = -1;
    }
    s->n_contexts++;
}

// Tokenises a file and cuts it into contexts of n tokens. To learn from, documents lie behind each
// other, and their ends are learned; to measure, each begins a context, and text alone counts.
static bool make_data(run *r, const char *path, bool learn, data_set *s) {
    const int64_t n = r->t.options.n_tokens;
    const int32_t padding = r->tok.eos >= 0 ? r->tok.eos : 0;
    document *list = NULL;
    bool good = read_documents(r, path, &list);
    int64_t column = n; // of the context that is being filled
    for (int64_t i = 0; good && i < arrlen(list); i++) {
        const document *d = &list[i];
        s->n_bytes += d->n_bytes;
        for (int64_t at = 0; at + 1 < arrlen(d->ids);) {
            const int64_t left = arrlen(d->ids) - 1 - at;
            if (column == n || !learn || left > n - column) {
                add_context(s, n, padding);
                column = 0;
            }
            const int64_t next = put(s, d, at, column, n, learn || r->tok.eos < 0);
            column += next - at;
            at = next;
        }
    }
    for (int64_t i = 0; i < arrlen(list); i++) arrfree(list[i].ids);
    arrfree(list);
    if (!good) return false;
    s->hash = train__hash(0xcbf29ce484222325u, s->ids, (size_t)(s->n_contexts * n) * 4);
    s->hash = train__hash(s->hash, s->targets, (size_t)(s->n_contexts * n) * 4);
    if (learn && s->n_tokens < n) {
        char why[160];
        snprintf(why, sizeof why, "has %.0f tokens, fewer than a context of %.0f (see --context)",
                 (double)s->n_tokens, (double)n);
        return fail(path, why);
    }
    return s->n_targets > 0 || fail(path, "has nothing to predict");
}

// The order of the contexts in an epoch: a permutation by seed and epoch alone.
static void shuffle(run *r, int64_t epoch) {
    uint64_t random = r->o.seed * 0x9e3779b97f4a7c15u + (uint64_t)epoch;
    arrsetlen(r->order, r->data.n_contexts);
    for (int64_t i = 0; i < r->data.n_contexts; i++) r->order[i] = i;
    for (int64_t i = r->data.n_contexts - 1; i > 0; i--) {
        uint64_t z = random += 0x9e3779b97f4a7c15u; // splitmix64
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        const int64_t k = (int64_t)((z ^ (z >> 31)) % (uint64_t)(i + 1)), swap = r->order[i];
        r->order[i] = r->order[k];
        r->order[k] = swap;
    }
    r->epoch = epoch;
}

enum { SEEN, SEED_OF, DATA_OF, SHAPE_OF }; // places in trainer.user: contexts seen so far, ...

// The next step's contexts. All data is tokenised already: this copies some kilobytes.
static train_batch next_batch(run *r) {
    const int64_t n = r->t.options.n_tokens, n_contexts = r->data.n_contexts;
    const int64_t count = (int64_t)r->t.options.n_seqs * r->t.options.n_accumulate;
    const train_batch batch = {.ids = r->ids, .targets = r->targets};
    for (int64_t i = 0; i < count; i++) {
        const int64_t seen = (int64_t)r->t.user[SEEN] + i;
        if (seen / n_contexts != r->epoch) shuffle(r, seen / n_contexts);
        const int64_t from = r->order[seen % n_contexts] * n;
        memcpy(r->ids + i * n, r->data.ids + from, (size_t)n * sizeof *r->ids);
        memcpy(r->targets + i * n, r->data.targets + from, (size_t)n * sizeof *r->targets);
    }
    r->t.user[SEEN] += (uint64_t)count;
    return batch;
}

// ---------------------------------------------------------------------------------------------
// Set-up
// ---------------------------------------------------------------------------------------------

static bool show_progress(const char *what, int64_t done, int64_t total, void *user) {
    if (*(const bool *)user) print_progress(what, done, total, stopped != 0);
    return !stopped;
}

static bool open_model(run *r) {
    const rocq_desc device = {.prefer = (rocq_backend)r->o.device, .n_threads = r->o.n_threads,
                              .kernels_path = r->o.kernels};
    const rocq_gguf_desc source = {.path = r->o.model};
    const llama_options small = {.n_ctx = 8, .n_batch = 8, .progress = show_progress,
                                 .user = &r->terminal}; // it generates nothing
    if (!open_device(&r->ctx, device)) return false;
    if (rocq_gguf_open(r->ctx, &r->file, &source) != ROCQ_OK) {
        return fail(r->o.model, rocq_error(r->ctx));
    }
    if (tokenizer_open(&r->tok, r->file) != ROCQ_OK) return fail(r->o.model, r->tok.error);
    if (llama_open(&r->model, r->ctx, r->file, &small) != ROCQ_OK) {
        return fail(r->o.model, r->model.error);
    }
    return true;
}

static bool open_trainer(run *r) {
    const options *o = &r->o;
    const train_options how = {
        .n_seqs = o->batch, .n_tokens = o->context, .n_accumulate = o->accumulate,
        .rank = o->rank, .alpha = o->alpha, .targets = o->targets, .seed = o->seed,
        .budget = o->budget, .beta2 = 0.99f, .weight_decay = o->decay,
        .max_norm = o->clip > 0 ? o->clip : -1, .moments8 = o->moments8,
        .take_weights = true, .precision = (rocq_precision)o->precision};
    if (train_open(&r->t, &r->model, &how) != ROCQ_OK) return fail("training", r->t.error);
    const double mib = 1.0 / (1024 * 1024);
    rocq_info info;
    rocq_get_info(r->ctx, &info);
    printf("%-10s %s\n", "device", info.device);
    printf("%-10s %s, %d layers; %.3f million weights are trained\n", "model", r->model.family,
           (int)r->model.n_layers, 1e-6 * (double)r->t.n_weights);
    printf("%-10s %.1f MiB of weights, gradients and moments, %.1f of activations", "memory",
           mib * (double)r->t.state_bytes, mib * (double)r->t.activation_bytes);
    if (r->t.n_recomputed > 0) printf(", %d layers twice", (int)r->t.n_recomputed);
    printf("\n");
    return true;
}

static bool open_data(run *r) {
    const train_options *how = &r->t.options;
    const int64_t count = (int64_t)how->n_seqs * how->n_accumulate;
    if (!make_data(r, r->o.data, true, &r->data)) return false;
    if (r->o.eval && !make_data(r, r->o.eval, false, &r->held)) return false;
    arrsetlen(r->ids, count * how->n_tokens);
    arrsetlen(r->targets, count * how->n_tokens);
    arrsetlen(r->losses, (int64_t)how->n_seqs * how->n_tokens);
    const double steps = ceil((double)r->o.epochs * (double)r->data.n_contexts / (double)count);
    r->n_steps = r->o.steps > 0 ? r->o.steps : (int64_t)steps;
    if (r->o.warmup < 0) {
        r->o.warmup = r->n_steps < 1000 ? (int32_t)(r->n_steps / 10) : 100;
    }
    printf("%-10s %.0f tokens, %.0f to learn, in %.0f contexts of %d; %.0f steps of %.0f\n", "data",
           (double)r->data.n_tokens, (double)r->data.n_targets, (double)r->data.n_contexts,
           (int)how->n_tokens, (double)r->n_steps, (double)count);
    return true;
}

// Where the run stands, for checkpoints; one of another run is refused before anything is changed.
static bool resume(run *r) {
    const uint64_t shape = (uint64_t)r->t.options.n_tokens << 32 |
                           (uint64_t)((int64_t)r->t.options.n_seqs * r->t.options.n_accumulate);
    uint64_t mine[] = {0, r->o.seed, r->data.hash, shape};
    if (r->o.resume) {
        if (train_load(&r->t, r->o.checkpoint) != ROCQ_OK) {
            return fail(r->o.checkpoint, r->t.error);
        }
        mine[SEEN] = (uint64_t)(r->t.result.n_steps + r->t.result.n_skipped) * (shape & UINT32_MAX);
        if (memcmp(r->t.user, mine, sizeof mine) != 0) {
            return fail(r->o.checkpoint, "is of a run with other data, --seed, --context, --batch "
                        "or --accumulate");
        }
        printf("%-10s after step %.0f\n", "resumed",
               (double)(r->t.result.n_steps + r->t.result.n_skipped));
    } else {
        memcpy(r->t.user, mine, sizeof mine);
    }
    return true;
}

// ---------------------------------------------------------------------------------------------
// The log
// ---------------------------------------------------------------------------------------------

static const char csv_head[] = "step,epoch,loss,lr,norm,bits_per_byte,tokens_per_s\n";

// Lines of the CSV up to the step that a resumed run goes on from.
static void read_csv(run *r, int64_t last) {
    char line[256];
    FILE *in = r->o.csv && r->o.resume ? fopen(r->o.csv, "r") : NULL;
    while (in && fgets(line, sizeof line, in)) {
        double x[7];
        char *at = line;
        int n = 0;
        for (; n < 7; n++) {
            char *end;
            x[n] = *at == ',' ? (double)NAN : strtod(at, &end);
            if (*at != ',') at = end;
            if (*at == ',') at++;
            else break;
        }
        const int64_t had = arrlen(r->records) > 0 ? arrlast(r->records).step : 0;
        if (n != 6 || !(x[0] > (double)had && x[0] <= (double)last)) continue;
        const record one = {(int64_t)x[0], x[1], x[2], x[3], x[4], x[5], x[6]};
        arrput(r->records, one);
    }
    if (!in) return;
    fclose(in);
    if (arrlen(r->records) < last) {
        printf("log        %s has %d of the %lld rows up to there\n", shown(r->o.csv).text,
               (int)arrlen(r->records), (long long)last);
    }
}

static bool write_text(rocq_file *out, const char *format, ...) {
    char line[512];
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    return rocq_file_write(line, n < (int)sizeof line ? n : (int)sizeof line - 1, out);
}

static bool write_csv(run *r) {
    rocq_file *out = NULL;
    if (!r->o.csv) return true;
    if (!create_file(r->ctx, &out, r->o.csv)) return false;
    bool good = write_text(out, "%s", csv_head);
    for (int64_t i = 0; good && i < arrlen(r->records); i++) {
        const record *x = &r->records[i];
        char bits[32] = "";
        if (!isnan(x->bits)) snprintf(bits, sizeof bits, "%.6f", x->bits);
        good = write_text(out, "%.0f,%.4f,%.6f,%.6g,%.6g,%s,%.1f\n", (double)x->step, x->epoch,
                          x->loss, x->lr, x->norm, bits, x->rate);
    }
    return finish_file(r->ctx, &out, r->o.csv, good ? ROCQ_OK : ROCQ_E_IO);
}

// The curve, by a gnuplot that reads its script, data included, from a pipe.
static bool plot(run *r) {
    const char *path = r->o.plot;
    const size_t n = path ? strlen(path) : 0;
    bool measured = false;
    if (!path) return true;
#if !defined(_WIN32)
    void (*before)(int) = signal(SIGPIPE, SIG_IGN); // where there is no gnuplot
#endif
    FILE *to = popen("gnuplot", "w");
    if (!to) return fail("--plot", "gnuplot cannot be started");
    fprintf(to, "$d << EOD\n");
    for (int64_t i = 0; i < arrlen(r->records); i++) {
        const record *x = &r->records[i];
        measured |= !isnan(x->bits);
        fprintf(to, "%.0f %.6f %s", (double)x->step, x->loss, isnan(x->bits) ? "NaN\n" : "");
        if (!isnan(x->bits)) fprintf(to, "%.6f\n", x->bits);
    }
    fprintf(to, "EOD\nset terminal %s size 960,540\nset output '",
            n > 4 && strcmp(path + n - 4, ".svg") == 0 ? "svg" : "pngcairo");
    for (const char *c = path; *c; c++) fprintf(to, *c == '\'' ? "''" : "%c", *c);
    fprintf(to, "'\nset grid\nset xlabel 'step'\nset ylabel 'loss, nats per token'\n"
            "set key top right\n");
    if (measured) {
        fprintf(to, "set y2label 'held out, bits per byte'\nset y2tics\nset ytics nomirror\n");
    }
    fprintf(to, "plot $d using 1:2 with lines title 'loss'%s\n",
            measured ? ", $d using 1:3 axes x1y2 with linespoints title 'held out'" : "");
    const int status = pclose(to);
#if !defined(_WIN32)
    signal(SIGPIPE, before);
#endif
    return status == 0 || fail("--plot", "gnuplot is missing, or could not draw: there is no "
                               "picture");
}

static void log_step(run *r, const record *x) {
    const int64_t every = r->n_steps > 40 ? r->n_steps / 20 : 1;
    const bool last = x->step == r->n_steps, measured = !isnan(x->bits);
    if (r->terminal && !last) {
        fprintf(stderr, "\rstep %.0f of %.0f, loss %.4f, %.0f tokens/s ", (double)x->step,
                (double)r->n_steps, x->loss, x->rate);
    }
    if (x->step != 1 && x->step % every != 0 && !last && !measured) return;
    if (r->terminal) fprintf(stderr, "\r%60s\r", "");
    printf("step %6.0f  loss %.4f  rate %.2e  norm %.3f  %.0f tokens/s", (double)x->step, x->loss,
           x->lr, x->norm, x->rate);
    if (measured) printf("  held out %.4f bits per byte", x->bits);
    printf("\n");
    fflush(stdout);
}

// ---------------------------------------------------------------------------------------------
// The job
// ---------------------------------------------------------------------------------------------

// Bits per byte of the held-out data; NaN where a signal comes before all of it is read.
static bool evaluate(run *r, double *bits) {
    const int64_t n = r->t.options.n_tokens, n_seqs = r->t.options.n_seqs;
    double nats = 0;
    for (int64_t at = 0; at < r->held.n_contexts && !stopped; at += n_seqs) {
        const int64_t count = r->held.n_contexts - at < n_seqs ? r->held.n_contexts - at : n_seqs;
        const train_batch batch = {.ids = r->ids, .targets = r->targets};
        for (int64_t i = 0; i < n_seqs * n; i++) {
            const int64_t from = i < count * n ? at * n + i : 0;
            r->ids[i] = r->held.ids[from];
            r->targets[i] = i < count * n ? r->held.targets[from] : -1;
        }
        if (train_evaluate(&r->t, &batch, r->losses) != ROCQ_OK) {
            return fail(r->o.eval, r->t.error);
        }
        for (int64_t i = 0; i < count * n; i++) nats += (double)r->losses[i];
    }
    *bits = stopped ? (double)NAN : nats / log(2.0) / (double)r->held.n_bytes;
    return true;
}

static float rate_of(const run *r, int64_t step) { // from 0 on
    const double most = (double)r->o.lr, warm = (double)r->o.warmup, n = (double)r->n_steps;
    if ((double)step < warm) return (float)(most * (double)(step + 1) / warm);
    const double way = n - warm > 1 ? ((double)step - warm) / (n - warm - 1) : 0;
    return (float)(most * (0.1 + 0.45 * (1 + cos(3.14159265358979 * (way < 1 ? way : 1)))));
}

static bool save(run *r) {
    if (!r->o.checkpoint) return true;
    return train_save(&r->t, r->o.checkpoint) == ROCQ_OK || fail(r->o.checkpoint, r->t.error);
}

// What can never be written is refused before the training, not after it. A file that exists is
// left as it is. A pipe is not tried: its reader would take the close for the end.
static bool can_write(run *r, const char *path) {
    rocq_file *file = NULL;
    if (!path || is_pipe(path)) return true;
    if (!create_file(r->ctx, &file, path)) return false;
    rocq_file_close(&file, false);
    return true;
}

static bool write_result(run *r) {
    rocq_format format = ROCQ_F32;
    if (!r->o.out) return true;
    if (r->o.format) rocq_format_from_name(&format, r->o.format);
    const rocq_result result = r->o.rank > 0
                                   ? train_write_lora(&r->t, r->o.out)
                                   : train_write_gguf(&r->t, r->file, format, r->o.out);
    return result == ROCQ_OK || fail(r->o.out, r->t.error);
}

enum { MOST_SKIPPED = 50 }; // in a row: the loss scale has halved so often by then

static bool one_step(run *r, int64_t i, int32_t *skipped) {
    const train_result *result = &r->t.result;
    record x = {i + 1, 0, 0, (double)rate_of(r, i), 0, (double)NAN, 0};
    const double start = seconds();
    const train_batch batch = next_batch(r);
    const int64_t count = (int64_t)r->t.options.n_seqs * r->t.options.n_accumulate;
    if (train_step(&r->t, &batch, (float)x.lr) != ROCQ_OK) return fail("training", r->t.error);
    x.rate = (double)(count * r->t.options.n_tokens) / (seconds() - start);
    x.epoch = (double)r->t.user[SEEN] / (double)r->data.n_contexts;
    x.loss = result->loss;
    x.norm = (double)result->norm;
    *skipped = result->skipped ? *skipped + 1 : 0;
    if (result->skipped) {
        printf("step %6.0f  was skipped: its gradient is not finite (%.0f so far)\n",
               (double)(i + 1), (double)result->n_skipped);
    }
    if (*skipped == MOST_SKIPPED) return fail("training", "no gradient is finite any more");
    const bool last = i + 1 == r->n_steps;
    const bool due = r->o.eval && (last || (r->o.eval_every > 0 && (i + 1) % r->o.eval_every == 0));
    if (due && !evaluate(r, &x.bits)) return false;
    arrput(r->records, x);
    log_step(r, &x);
    // If a checkpoint cannot be written, say because the disk is full, that is reported and
    // training goes on: the last checkpoint stays, and the next one and the result will be tried.
    // The CSV is written before each checkpoint, so that a run that is killed, at whatever moment,
    // and resumed finds all rows up to it, unless it could not be written either, which is said
    // then and when the run is resumed; rows behind it are dropped.
    if (r->o.save_every > 0 && (i + 1) % r->o.save_every == 0 && !last) {
        if (r->terminal) printf("\r%60s\r", "");
        write_csv(r);
        save(r);
    }
    return true;
}

static bool train(run *r) {
    int64_t i = r->t.result.n_steps + r->t.result.n_skipped;
    int32_t skipped = 0;
    double bits = 0;
    read_csv(r, i);
    if (r->o.eval && i == 0) {
        if (!evaluate(r, &bits)) return false;
        if (!isnan(bits)) printf("step      0  held out %.4f bits per byte\n", bits);
    }
    for (; i < r->n_steps && !stopped; i++) {
        if (!one_step(r, i, &skipped)) return false;
    }
    if (stopped) {
        fprintf(stderr, "%s" PROGRAM ": interrupted after step %.0f of %.0f\n",
                r->terminal ? "\r" : "", (double)i, (double)r->n_steps);
    }
    const bool listed = write_csv(r), saved = save(r), written = write_result(r);
    return plot(r) && saved && written && listed; // each is tried, also after one that failed
}

static bool whole_run(run *r) {
    rocq_format format = ROCQ_F32;
    const rocq_profile_desc profile = {.max_regions = 0};
    if (r->o.format && (rocq_format_from_name(&format, r->o.format) != ROCQ_OK ||
                        (format != ROCQ_F32 && format != ROCQ_F16 && format != ROCQ_BF16))) {
        return fail("--format", "can be f32, f16 or bf16");
    }
    if (!open_model(r) || !open_trainer(r) || !open_data(r) || !resume(r)) return false;
    if (!can_write(r, r->o.checkpoint) || !can_write(r, r->o.csv) || !can_write(r, r->o.plot) ||
        !can_write(r, r->o.out)) {
        return false;
    }
    if (r->o.stats && rocq_profile_start(r->ctx, &profile) != ROCQ_OK) {
        return fail("profile", rocq_error(r->ctx));
    }
    if (!train(r)) return false;
    rocq_profile_stop(r->ctx);
    if (r->o.stats) rocq_profile_report(r->ctx, ROCQ_REPORT_TEXT, write_stderr, NULL);
    return true;
}

int main(int argc, char **argv) {
    static run r; // zeroed
    r.o.kernels = getenv("ROCQ_KERNELS");
    r.o.batch = 4;
    r.o.epochs = 1;
    r.o.lr = -1;
    r.o.warmup = -1;
    r.o.clip = 1;
    r.epoch = -1;
    r.terminal = is_terminal(2);
    if (!parse(&r.o, argc, argv)) return 1;
    if (r.o.lr < 0) r.o.lr = r.o.rank > 0 ? 1e-3f : 1e-4f;
    if (r.o.help) fputs(usage, stdout);
    catch_signals(); // the step that is under way is finished, and what there is, saved
    const bool good = (r.o.help || whole_run(&r)) && close_streams();
    arrfree(r.data.ids);
    arrfree(r.data.targets);
    arrfree(r.held.ids);
    arrfree(r.held.targets);
    arrfree(r.order);
    arrfree(r.ids);
    arrfree(r.targets);
    arrfree(r.losses);
    arrfree(r.records);
    train_close(&r.t);
    tokenizer_close(&r.tok);
    llama_close(&r.model);
    rocq_gguf_close(&r.file);
    rocq_close(&r.ctx);
    return end_program(good);
}
