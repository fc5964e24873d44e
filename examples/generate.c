// generate.c - continues a prompt with a GGUF model, on a GPU that has kernels, else on the CPU.
//
//     cc -O2 examples/generate.c -o generate -lm -ldl -lpthread        # with libstb-dev, see ds.h
//     ./generate -m model.gguf -p "Once upon a time" --stats
//     examples/build-kernels && ./generate --kernels rocq_kernels.co                  # on a GPU
//
// or with the kernels linked:
//
//     hipcc -O3 --offload-arch=gfx1100 -x hip examples/generate.c rocq_kernels.hip -o generate
//
// The text goes to stdout as it comes, everything else to stderr. Exit status 1, after one line
// that says why, on any failure. --help lists the options.

#define _POSIX_C_SOURCE 200809L // sigaction
#define ROCQ_IMPLEMENTATION
#define ROCQ_STATIC // ops that are not called are not compiled
#define PROGRAM "generate"
#include "../rocq.h"

#include "program.h"

#include "chat.h"
#include "llama.h"
#include "tokenizer.h"

#include <time.h>

static const char usage[] =
    "usage: generate [options]\n"
    "    --help           print this\n"
    "    -m FILE          model (the one in examples/model)\n"
    "    -p TEXT          prompt; the token that begins a text (BOS) is added where the model\n"
    "                     wants one, unless TEXT begins with it (\"<s>\")\n"
    "    --chat           TEXT is a question to an instructed model, asked as its chat template\n"
    "                     says: ChatML, Llama 3, Mistral, Gemma, harmony or Granite\n"
    "    -i               with --chat: more questions follow, a line of standard input each;\n"
    "                     also where that is a terminal, and there is no -p. A question for\n"
    "                     which the context has no room begins a new conversation\n"
    "    --system TEXT    with --chat: what the model is told before the first question\n"
    "    --lora FILE[:X]  add an adapter (LoRA) to the weights, X times as strong as it was\n"
    "                     trained; up to 8 times\n"
    "    -e               \\n, \\t, \\\" and \\\\ in the prompt stand for what they do in C\n"
    "    -n N             tokens to generate at most (256)\n"
    "    -c N             context: tokens of prompt and text together (the model's, at most 4096)\n"
    "    --temp X         0 takes the most probable token (0.8)\n"
    "    --top-k N        only the N most probable tokens, 0 = all (40)\n"
    "    --top-p X        only the most probable tokens that make up X, 0 or 1 = all (0.95)\n"
    "    --min-p X        only tokens X times as probable as the best, 0 = all (0.05)\n"
    "    --repeat-penalty X     divide the logit of a token that was there, or multiply it if it\n"
    "                     is negative, by X; 1 = off (1)\n"
    "    --frequency-penalty X  lower it by X for each time that the token was there (0)\n"
    "    --presence-penalty X   lower it by X once (0)\n"
    "    --repeat-last-n N      of prompt and text the last N tokens are those that were there;\n"
    "                     0 = none, -1 = as many as the context holds (64)\n"
    "    --seed N         of the draw (the time)\n"
    "    --threads N      CPU threads (one per core)\n"
    "    --device NAME    auto, cpu or gpu (auto)\n"
    "    --kernels FILE   code object of rocq_kernels.hip, where it is not linked ($ROCQ_KERNELS)\n"
    "    --no-graph       launch the operations of each token one by one\n"
    "    --kv FORMAT      of the KV cache: f32, f16, bf16, q8_0 or q4_0 (f16)\n"
    "    --kv-page N      keep the cache in pages of N tokens, 0 = in one piece (0)\n"
    "    --expert-memory N      keep copies of a mixture's most used experts in N MiB of the\n"
    "                     device, and read the others from host memory, or on the CPU from the\n"
    "                     file (all are on the device)\n"
    "    --shift N        when the context is full, keep its first N tokens, forget half of the\n"
    "                     others and go on (the text ends, or with -i what was said)\n"
    "    --precision P    of products: auto, f32, f16 or int8 (auto)\n"
    "    --sharing NAME   who goes first where the GPU also draws: graphics, compute or neither,\n"
    "                     which is balanced (balanced)\n"
    "    --tuning FILE    launches that are fastest for this model on this GPU; they are found\n"
    "                     and kept in FILE where it is not there, or of another GPU or driver\n"
    "    --stats          print times, speeds and memory\n"
    "    --expert-stats   with --stats: of each layer, too, how many of its experts are kept, and\n"
    "                     how often the chosen one was among them\n"
    "    --trace FILE     write what ran when, for ui.perfetto.dev or chrome://tracing\n"
    "    --profile FILE   write the times of --stats as JSON\n"
    "    --logits FILE    write n_vocab logits per token of the prompt, and generate nothing\n";

// What the model in examples/model continues: who speaks, and about what.
static const char default_prompt[] =
    "role: blacksmith | mood: weary | topic: the broken windmill | name: Hugo\n";

typedef struct options {
    const char *model, *prompt, *system, *kv, *kernels, *logits, *tuning, *trace, *profile;
    texts loras;
    bool help, escapes, no_graph, stats, expert_stats, chat;
    bool asks;                 // questions come from stdin
    int32_t n, n_ctx, n_threads;
    int32_t expert_memory;     // MiB, -1 = all experts are kept
    int32_t kv_page, shift;    // shift: tokens to keep, -1 = the text ends
    int32_t last_n;            // tokens that penalties look at, -1 = n_ctx
    int32_t device, precision, sharing; // rocq_backend, rocq_precision, rocq_sharing
    rocq_sample_params sample; // the knobs only
} options;

// ---------------------------------------------------------------------------------------------
// Options
// ---------------------------------------------------------------------------------------------

static bool parse(options *o, int argc, char **argv) {
    const option table[] = {
        {"--help", FLAG, 0, 0, &o->help},
        {"-m", TEXT, 0, 0, &o->model},
        {"-p", TEXT, 0, 0, &o->prompt},
        {"--chat", FLAG, 0, 0, &o->chat},
        {"-i", FLAG, 0, 0, &o->asks},
        {"--system", TEXT, 0, 0, &o->system},
        {"--lora", TEXTS, 0, 0, &o->loras},
        {"-e", FLAG, 0, 0, &o->escapes},
        {"-n", INTEGER, 0, 1e9, &o->n},
        {"-c", INTEGER, 1, 1e9, &o->n_ctx},
        {"--temp", NUMBER, 0, 1e6, &o->sample.temperature},
        {"--top-k", INTEGER, 0, 1e9, &o->sample.top_k},
        {"--top-p", NUMBER, 0, 1, &o->sample.top_p},
        {"--min-p", NUMBER, 0, 1, &o->sample.min_p},
        {"--repeat-penalty", NUMBER, 1e-3, 1e3, &o->sample.repeat_penalty},
        {"--frequency-penalty", NUMBER, -1e6, 1e6, &o->sample.frequency_penalty},
        {"--presence-penalty", NUMBER, -1e6, 1e6, &o->sample.presence_penalty},
        {"--repeat-last-n", INTEGER, -1, 1e9, &o->last_n},
        {"--seed", SEED, 0, 9e15, &o->sample.seed},
        {"--threads", INTEGER, 1, 1024, &o->n_threads},
        {"--device", DEVICE, 0, 0, &o->device},
        {"--kernels", TEXT, 0, 0, &o->kernels},
        {"--no-graph", FLAG, 0, 0, &o->no_graph},
        {"--kv", TEXT, 0, 0, &o->kv},
        {"--kv-page", INTEGER, 0, 1e6, &o->kv_page},
        {"--expert-memory", INTEGER, 0, 1e9, &o->expert_memory},
        {"--shift", INTEGER, 0, 1e9, &o->shift},
        {"--precision", PRECISION, 0, 0, &o->precision},
        {"--sharing", SHARING, 0, 0, &o->sharing},
        {"--tuning", TEXT, 0, 0, &o->tuning},
        {"--stats", FLAG, 0, 0, &o->stats},
        {"--expert-stats", FLAG, 0, 0, &o->expert_stats},
        {"--trace", TEXT, 0, 0, &o->trace},
        {"--profile", TEXT, 0, 0, &o->profile},
        {"--logits", TEXT, 0, 0, &o->logits},
    };
    return parse_options(table, sizeof table / sizeof table[0], argc, argv);
}

// The prompt with its escapes resolved, in new memory, which data is; NULL: there is none.
static rocq_str unescape(rocq_str text, bool escapes) {
    char *to = (char *)malloc((size_t)text.length + 1);
    rocq_str out = {to, 0};
    for (int64_t i = 0; to && i < text.length; i++) {
        const char next = i + 1 < text.length ? text.data[i + 1] : '\0';
        const char *escape = "n\nt\t\"\"\\\\"; // pairs
        while (*escape && escape[0] != next) escape += 2;
        const bool found = escapes && text.data[i] == '\\' && *escape;
        to[out.length++] = found ? escape[1] : text.data[i];
        if (found) i++;
    }
    return out;
}

// ---------------------------------------------------------------------------------------------
// Memory, Ctrl-C
// ---------------------------------------------------------------------------------------------

static int64_t n_allocs; // by rocq; ds_n_allocs are the tokenizer's

static void *count_alloc(size_t size, void *user) {
    (void)user;
    n_allocs++;
    return malloc(size);
}

static void count_free(void *ptr, size_t size, void *user) {
    (void)size;
    (void)user;
    free(ptr);
}

static volatile sig_atomic_t interrupted;

static void on_interrupt(int signal_number) {
    interrupted = 1;
    signal(signal_number, SIG_DFL); // a second one ends at once
}

// waits: a call that the signal finds waiting goes on waiting, as for a slow reader of the text.
static void catch_interrupt(bool waits) {
#if defined(_WIN32)
    (void)waits;
    signal(SIGINT, on_interrupt);
#else
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_interrupt;
    action.sa_flags = waits ? SA_RESTART : 0;
    if (!interrupted) sigaction(SIGINT, &action, NULL);
#endif
}

// Progress of loading and of long prompts.
static bool show_progress(const char *what, int64_t done, int64_t total, void *user) {
    if (*(const bool *)user) print_progress(what, done, total, interrupted != 0);
    return !interrupted;
}

// ---------------------------------------------------------------------------------------------
// The job
// ---------------------------------------------------------------------------------------------

// What the time to the first token is made of, in its order.
enum { DEVICE_OPEN, MODEL_OPEN, LOAD, WARM, TOKENIZE, READ_PROMPT, FIRST_TOKEN, N_PHASES };
static const char *const phase_names[N_PHASES] = {"device", "open",   "load",       "warm",
                                                  "tokenize", "prompt", "first token"};

typedef struct run {
    options o;
    rocq_ctx *ctx;
    rocq_gguf *file;
    llama_model model;
    tokenizer tok;
    int32_t *ids; // of the prompt, an array of stb_ds's
    int32_t *last;           // tokens that penalties look at, the newest at the end
    int32_t n_last, last_n;  // how many there are, and at most
    rocq_buffer last_memory; // where ops read a copy of them
    rocq_tensor recent;      // [n_last] of last_memory
    rocq_str prompt;         // with memory of its own
    char *line;              // of stdin, an array of stb_ds's
    const chat_form *form;   // with --chat
    chat_text turn;
    int32_t unread;          // the newest token, which llama_eval has not seen; -1 = none
    float *logits;
    bool terminal;
    int32_t n_prompt, n_generated; // tokens
    int64_t setup_allocs, launches; // kernels launched from the first token on
    double phase[N_PHASES], phase_start; // seconds
    double generate;                     // from the first token on
} run;

// A phase is a region of the profile too, but for the device, without which there is none.
static void begin_phase(run *r, int phase) {
    rocq_region_begin(r->ctx, phase_names[phase]);
    r->phase_start = seconds();
}

static void end_phase(run *r, int phase) {
    r->phase[phase] = seconds() - r->phase_start;
    rocq_region_end(r->ctx);
}

static bool open_context(run *r) {
    const rocq_desc desc = {.prefer = (rocq_backend)r->o.device, .n_threads = r->o.n_threads,
                            .allocator = {count_alloc, count_free, NULL},
                            .kernels_path = r->o.kernels, .no_graphs = r->o.no_graph,
                            .sharing = (rocq_sharing)r->o.sharing};
    return open_device(&r->ctx, desc);
}

static bool on_gpu(const run *r) {
    rocq_info info;
    return rocq_get_info(r->ctx, &info) == ROCQ_OK && info.backend == ROCQ_BACKEND_GPU;
}

// *tuned is false when --tuning names no file, or one that is not for this GPU: it is then made
// anew. Another kind of file is not written over.
static bool load_tuning(run *r, bool *tuned) {
    static char data[1 << 19]; // more than there can be
    FILE *in = fopen(r->o.tuning, "rb");
    *tuned = false;
    if (!in) return true;
    const size_t size = fread(data, 1, sizeof data, in);
    fclose(in);
    const rocq_result loaded = rocq_tuning_load(r->ctx, data, (int64_t)size);
    *tuned = loaded == ROCQ_OK;
    if (*tuned) return true;
    if (loaded == ROCQ_E_MAGIC) {
        return fail(r->o.tuning, "holds something else than tuning results");
    }
    fail(r->o.tuning, rocq_error(r->ctx)); // which is no reason to stop
    return true;
}

static bool make_tuning(run *r) {
    rocq_tune_result result;
    memset(&result, 0, sizeof result);
    if (llama_tune(&r->model, &result) != ROCQ_OK) {
        return fail(r->o.tuning, r->model.error);
    }
    if (r->o.stats) {
        fprintf(stderr, "%-20s %9.3f            times as fast, %d launches tried in %.1f s\n",
                "tuned", result.speedup, (int)result.n_tried, 1e-3 * result.spent_ms);
    }
    rocq_file *out = NULL;
    return create_file(r->ctx, &out, r->o.tuning) &&
           finish_file(r->ctx, &out, r->o.tuning, rocq_tuning_save(r->ctx, rocq_file_write, out));
}

// Their files are read here, and closed again.
static bool add_loras(run *r) {
    char paths[8][1024];
    llama_lora loras[8];
    rocq_gguf *files[8];
    bool good = true;
    int32_t n = 0;
    for (; n < r->o.loras.n && good; n++) {
        loras[n].scale = lora_option(r->o.loras.text[n], paths[n], sizeof paths[n]);
        const rocq_gguf_desc source = {.path = paths[n]};
        good = rocq_gguf_open(r->ctx, &files[n], &source) == ROCQ_OK ||
               fail(paths[n], rocq_error(r->ctx));
        loras[n].name = paths[n];
        loras[n].file = files[n];
    }
    if (good && n > 0 && llama_set_loras(&r->model, loras, n) != ROCQ_OK) {
        good = fail("--lora", r->model.error);
    }
    while (n > 0) rocq_gguf_close(&files[--n]);
    return good;
}

static bool load(run *r) {
    rocq_info info;
    const rocq_gguf_desc source = {.path = r->o.model};
    const llama_options how = {.n_ctx = r->o.n_ctx, .kv_format = r->o.kv,
                               .kv_page = r->o.kv_page,
                               .expert_memory = r->o.expert_memory == 0 ? -1
                                                : r->o.expert_memory < 0
                                                    ? 0
                                                    : (int64_t)r->o.expert_memory << 20,
                               .precision = (rocq_precision)r->o.precision,
                               .progress = show_progress, .user = &r->terminal};
    begin_phase(r, MODEL_OPEN);
    if (rocq_gguf_open(r->ctx, &r->file, &source) != ROCQ_OK) {
        return fail(r->o.model, rocq_error(r->ctx));
    }
    if (tokenizer_open(&r->tok, r->file) != ROCQ_OK) {
        return fail(r->o.model, r->tok.error);
    }
    end_phase(r, MODEL_OPEN);
    begin_phase(r, LOAD);
    if (r->o.tuning && !on_gpu(r)) {
        fprintf(stderr, "generate: --tuning: there is nothing to tune on the CPU\n");
        r->o.tuning = NULL;
    }
    bool tuned = true;
    if (r->o.tuning && !load_tuning(r, &tuned)) return false;
    if (llama_open(&r->model, r->ctx, r->file, &how) != ROCQ_OK) {
        return fail(r->o.model, r->model.error);
    }
    if (r->model.n_ctx > r->model.n_ctx_train) {
        fprintf(stderr, "generate: -c %d: the model was trained on texts of %d tokens, beyond which"
                " its text may make no sense\n", (int)r->model.n_ctx, (int)r->model.n_ctx_train);
    }
    if (!add_loras(r) || (!tuned && !make_tuning(r))) return false;
    end_phase(r, LOAD);
    begin_phase(r, WARM);
    if (llama_warm(&r->model) != ROCQ_OK) return fail("warm-up", r->model.error);
    rocq_get_info(r->ctx, &info);
    if (info.replay[0]) fprintf(stderr, "generate: %s\n", info.replay);
    end_phase(r, WARM);
    return true;
}

// Adds a token to those that penalties look at, and forgets the oldest where there are too many.
static void remember(run *r, int32_t token) {
    if (r->last_n == 0) return;
    if (r->n_last == r->last_n) {
        memmove(r->last, r->last + 1, (size_t)--r->n_last * sizeof *r->last);
    }
    r->last[r->n_last++] = token;
}

// Room for them, where there are penalties, and the tokens of the prompt.
static bool make_last(run *r) {
    const rocq_sample_params *s = &r->o.sample;
    const int32_t last_n = r->o.last_n < 0 || r->o.last_n > r->model.n_ctx ? r->model.n_ctx
                                                                           : r->o.last_n;
    const int64_t bytes = last_n * (int64_t)sizeof(int32_t);
    const bool adds = s->frequency_penalty != 0 || s->presence_penalty != 0;
    if ((s->repeat_penalty == 1 && !adds) || last_n == 0) return true;
    r->last = (int32_t *)malloc((size_t)bytes);
    if (!r->last || rocq_buffer_alloc(r->ctx, &r->last_memory, bytes) != ROCQ_OK) {
        return fail("penalties", "no memory");
    }
    r->last_n = last_n;
    for (int64_t i = 0; i < arrlen(r->ids); i++) remember(r, r->ids[i]);
    return true;
}

static bool upload_last(run *r) {
    const int64_t n = r->n_last;
    if (n == 0) return true;
    r->o.sample.recent = &r->recent;
    return rocq_tensor_init(&r->recent, &r->last_memory, 0, ROCQ_I32, 1, &n) == ROCQ_OK &&
           rocq_upload(r->ctx, &r->recent, r->last, rocq_tensor_size(&r->recent)) == ROCQ_OK;
}

// The next line of stdin, without its end, in r->line; false at the end of the file, and at once
// after Ctrl-C.
static bool read_line(run *r) {
    int c;
    arrsetlen(r->line, 0);
    if (is_terminal(0)) fprintf(stderr, "> ");
    while ((c = getc(stdin)) != EOF && c != '\n') arrput(r->line, (char)c);
    if (interrupted && is_terminal(0)) fprintf(stderr, "\n");
    const bool there = !interrupted && (c != EOF || arrlen(r->line) > 0);
    while (arrlen(r->line) > 0 && r->line[arrlen(r->line) - 1] == '\r') arrpop(r->line);
    return there;
}

static bool find_form(run *r) {
    static const char key[] = "tokenizer.chat_template";
    rocq_str text;
    char why[256] = "the model has none of that name: it was not trained to answer questions";
    if (rocq_gguf_get_str(r->file, key, &text) == ROCQ_OK) {
        r->form = chat_find(text);
        snprintf(why, sizeof why, "is none of ChatML, Llama 3, Mistral, Gemma, harmony, Granite");
    }
    return r->form != NULL || fail(key, why);
}

// The tokens of a question, with what goes before it: of the first BOS and the system message, of
// others the end of the answer before.
static bool encode(run *r, rocq_str question, bool first) {
    char why[256];
    arrsetlen(r->ids, 0);
    chat_clear(&r->turn);
    if (first && r->tok.add_bos) arrput(r->ids, r->tok.bos);
    if (!first && r->unread >= 0) arrput(r->ids, r->unread);
    if (!first) chat_close(&r->turn, r->form);
    chat_ask(&r->turn, r->form, first ? r->o.system : NULL, question);
    if (!chat_encode(&r->turn, r->form, &r->tok, &r->ids, why, sizeof why)) {
        return fail("--chat", why);
    }
    return true;
}

// Tokens that the context has room for.
static int32_t room(const run *r) { return r->model.n_ctx - r->model.n_past; }

// Prepares a question. Where the context has no room for it, --shift may make some, or else the
// conversation begins anew. *fits is false where that would not help either: then nothing changes.
static bool ask(run *r, rocq_str question, bool *fits) {
    llama_model *m = &r->model;
    bool first = m->n_past == 0;
    int64_t known = !first && r->unread >= 0 ? 1 : 0; // it was drawn, and then remembered
    if (!encode(r, question, first)) return false;
    const int64_t n = arrlen(r->ids);
    while (r->o.shift >= 0 && n > room(r) && n <= m->n_ctx - r->o.shift) {
        const int32_t half = (m->n_past - r->o.shift + 1) / 2;
        if (llama_forget(m, r->o.shift, half) != ROCQ_OK) break; // not every model can
    }
    if (n > room(r) && !first) {
        if (!encode(r, question, true)) return false;
        first = arrlen(r->ids) <= m->n_ctx;
        if (first) {
            fprintf(stderr, "generate: the context of %d tokens is full (see -c): the conversation "
                    "begins anew\n", (int)m->n_ctx);
            m->n_past = 0;
            r->n_last = 0;
            known = 0;
        }
    }
    *fits = arrlen(r->ids) <= (first ? m->n_ctx : room(r));
    if (!*fits) return true;
    r->unread = -1;
    r->n_prompt = (int32_t)arrlen(r->ids);
    for (int64_t i = known; i < r->n_prompt; i++) remember(r, r->ids[i]);
    return true;
}

static bool too_long(const run *r) {
    char why[128];
    snprintf(why, sizeof why, "the question, of %d tokens with what is around it, does not fit a "
             "context of %d (see -c)", (int)arrlen(r->ids), (int)r->model.n_ctx);
    return fail("--chat", why);
}

static bool tokenize(run *r) {
    const rocq_str line = {r->line, arrlen(r->line)};
    bool fits;
    begin_phase(r, TOKENIZE);
    r->prompt = unescape(r->o.prompt ? chat_str(r->o.prompt) : line, r->o.escapes);
    if (!r->prompt.data) return fail("prompt", "no memory");
    r->unread = -1;
    if (r->o.chat) {
        if (!find_form(r) || !ask(r, r->prompt, &fits)) return false;
        if (!fits) return too_long(r);
        end_phase(r, TOKENIZE);
        return make_last(r);
    }
    if (tokenizer_encode(&r->tok, &r->ids, r->prompt.data, r->prompt.length, true, true) !=
        ROCQ_OK) {
        return fail("prompt", r->tok.error);
    }
    // A prompt that has its own BOS gets no second one, which no model has seen in training.
    const int32_t *ids = r->ids;
    if (r->tok.add_bos && arrlen(ids) > 1 && ids[0] == r->tok.bos && ids[1] == r->tok.bos) {
        arrdel(r->ids, 0);
    }
    if (arrlen(ids) == 0) return fail("prompt", "is empty, and no token begins a text");
    if (arrlen(ids) > r->model.n_ctx) return fail("prompt", "is longer than the context (see -c)");
    r->n_prompt = (int32_t)arrlen(ids);
    end_phase(r, TOKENIZE);
    return make_last(r);
}

// For tests: all logits of the prompt, to compare with another program's.
static bool write_logits(run *r) {
    const size_t n = (size_t)r->n_prompt * (size_t)r->model.n_vocab;
    r->logits = (float *)malloc(n * sizeof(float));
    if (!r->logits) return fail(r->o.logits, "no memory");
    begin_phase(r, READ_PROMPT);
    if (llama_eval(&r->model, r->ids, r->n_prompt, r->logits) != ROCQ_OK) {
        return fail(r->o.model, r->model.error);
    }
    end_phase(r, READ_PROMPT);
    rocq_region_end(r->ctx); // time to first token, which is not drawn
    rocq_file *out = NULL;
    if (!create_file(r->ctx, &out, r->o.logits)) return false;
    const bool written = rocq_file_write(r->logits, (int64_t)(n * sizeof(float)), out);
    return finish_file(r->ctx, &out, r->o.logits, written ? ROCQ_OK : ROCQ_E_IO);
}

static bool print(rocq_str text) {
    fwrite(text.data, 1, (size_t)text.length, stdout);
    return fflush(stdout) == 0 && !ferror(stdout);
}

// Reads the prompt, then draws tokens until the model, -n, the context or Ctrl-C ends the text.
static bool generate(run *r) {
    tokenizer_stream stream = {{0}, 0};
    const rocq_str prompt = {r->prompt.data, r->o.chat ? 0 : r->prompt.length};
    const int32_t end = r->form ? chat_end_token(r->form, &r->tok) : -1;
    double start = 0;
    int32_t token = -1;
    begin_phase(r, READ_PROMPT);
    if (llama_eval(&r->model, r->ids, r->n_prompt, NULL) != ROCQ_OK) {
        return interrupted ? true : fail(r->o.model, r->model.error);
    }
    if (rocq_sync(r->ctx) != ROCQ_OK) return fail(r->o.model, rocq_error(r->ctx)); // to time it
    end_phase(r, READ_PROMPT);
    if (!print(prompt)) return fail("stdout", "cannot be written");
    while (r->n_generated < r->o.n && !interrupted) {
        const bool first = r->n_generated == 0;
        if (first) {
            begin_phase(r, FIRST_TOKEN);
        } else {
            if (r->model.n_past == r->model.n_ctx) {
                const int32_t half = (r->model.n_ctx - r->o.shift + 1) / 2;
                if (r->o.shift < 0 || half < 1) break;
                if (llama_forget(&r->model, r->o.shift, half) != ROCQ_OK) {
                    fail(r->o.model, r->model.error);
                    if (!r->o.asks) return false;
                    break; // the answer ends; the next question begins the conversation anew
                }
            }
            rocq_region_begin(r->ctx, "token");
            if (llama_eval(&r->model, &token, 1, NULL) != ROCQ_OK) {
                return fail(r->o.model, r->model.error);
            }
            r->unread = -1;
        }
        if (!upload_last(r)) return fail("penalties", rocq_error(r->ctx));
        if (llama_sample(&r->model, &r->o.sample, &token) != ROCQ_OK) {
            return fail(r->o.model, r->model.error);
        }
        r->n_generated++;
        if (first) {
            end_phase(r, FIRST_TOKEN);
            rocq_region_end(r->ctx);
            rocq_region_begin(r->ctx, "generation");
            r->launches = get_stats(r->ctx).n_launches;
            start = seconds();
        } else {
            rocq_region_end(r->ctx);
        }
        r->unread = -1;
        if (tokenizer_is_end(&r->tok, token) || token == end) break;
        r->unread = token;
        remember(r, token);
        if (!print(tokenizer_next(&r->tok, &stream, token, false))) break;
    }
    print(tokenizer_next(&r->tok, &stream, -1, false));
    const rocq_str line_end = {"\n", 1};
    const bool printed = print(line_end);
    rocq_region_end(r->ctx); // generation, or time to first token
    if (r->n_generated > 0) r->generate = seconds() - start;
    r->launches = get_stats(r->ctx).n_launches - r->launches;
    return printed || fail("stdout", "cannot be written");
}

// Questions and answers until stdin ends. What was said stays in the cache. Of a question that is
// too long a user at a terminal is told, and may ask another.
static bool converse(run *r) {
    while (r->o.asks && !interrupted) {
        bool fits;
        catch_interrupt(false);
        const bool there = read_line(r);
        catch_interrupt(true);
        if (!there) break;
        const rocq_str line = {r->line, arrlen(r->line)};
        rocq_region_begin(r->ctx, "time to first token");
        if (!ask(r, line, &fits)) return false;
        if (!fits) {
            rocq_region_end(r->ctx);
            if (!too_long(r) && !is_terminal(0)) return false;
            continue;
        }
        r->n_generated = 0;
        if (!generate(r)) return false;
    }
    return true;
}

static void print_rate(const char *what, int32_t n, double time) {
    fprintf(stderr, "%-20s %9.1f tokens/s   %d in %.3f s\n", what,
            time > 0 ? (double)n / time : 0.0, (int)n, time);
}

// Of a layer, or with -1 of all.
static void print_experts(run *r, int32_t layer) {
    const double mib = 1.0 / (1024 * 1024);
    llama_expert_stats s = {0};
    char name[32] = "experts";
    if (llama_get_expert_stats(&r->model, layer, &s) != ROCQ_OK || s.n_experts == 0) return;
    if (layer >= 0) snprintf(name, sizeof name, "  of layer %d", (int)layer);
    const double hits = s.n_uses > 0 ? (double)s.n_hits / (double)s.n_uses : 1;
    fprintf(stderr, "%-20s %9.1f %% hits       kept %.0f of %.0f, %.2f of %.2f MiB\n", name,
            100 * hits, (double)s.n_kept, (double)s.n_experts, mib * (double)s.kept_bytes,
            mib * (double)s.bytes);
}

static void print_stats(run *r) {
    const double mib = 1.0 / (1024 * 1024);
    const llama_model *m = &r->model;
    double total = 0, weights = (double)m->weight_bytes;
    llama_expert_stats experts = {0};
    rocq_info info;
    rocq_get_info(r->ctx, &info);
    print_device(&info);
    if (info.backend == ROCQ_BACKEND_GPU) {
        fprintf(stderr, "%-20s %9.1f per token%s\n", "launches",
                r->n_generated > 1 ? (double)r->launches / (double)(r->n_generated - 1) : 0.0,
                r->o.no_graph ? "" : ", replayed as a graph");
    }
    fprintf(stderr, "%-20s %s, %d layers, %d x %d heads on %d, context %d\n", "model", m->family,
            (int)m->n_layers, (int)m->n_heads, (int)m->head_dim, (int)m->n_kv_heads, (int)m->n_ctx);
    for (int i = 0; i < N_PHASES; i++) total += r->phase[i];
    fprintf(stderr, "%-20s %9.1f ms         ", "time to first token", 1e3 * total);
    for (int i = 0; i < N_PHASES; i++) {
        fprintf(stderr, "%s%s %.1f", i > 0 ? ", " : "", phase_names[i], 1e3 * r->phase[i]);
    }
    fprintf(stderr, "\n");
    print_rate("prompt", r->n_prompt, r->phase[READ_PROMPT]);
    print_rate("generation", r->n_generated > 1 ? r->n_generated - 1 : 0, r->generate);
    if (llama_get_expert_stats(&r->model, -1, &experts) == ROCQ_OK) {
        weights -= (double)(experts.bytes - experts.kept_bytes);
    }
    fprintf(stderr, "%-20s %9.2f MiB        ", "memory",
            mib * (weights + (double)(m->kv_bytes + m->scratch_bytes)));
    fprintf(stderr, "weights %.2f, KV cache %.2f, scratch %.2f\n", mib * weights,
            mib * (double)m->kv_bytes, mib * (double)m->scratch_bytes);
    for (int32_t i = -1; i < (r->o.expert_stats ? m->n_layers : 0); i++) print_experts(r, i);
    fprintf(stderr, "%-20s %9.0f            after set-up\n", "allocations",
            (double)(n_allocs + ds_n_allocs - r->setup_allocs));
}

static bool whole_run(run *r) {
    const bool profiled = r->o.stats || r->o.trace || r->o.profile;
    begin_phase(r, DEVICE_OPEN);
    if (!open_context(r)) return false;
    end_phase(r, DEVICE_OPEN);
    const rocq_profile_desc profile = {.cost = r->o.trace ? 1.0 : 0.0}; // a trace is without gaps
    if (profiled && rocq_profile_start(r->ctx, &profile) != ROCQ_OK) {
        return fail("profile", rocq_error(r->ctx));
    }
    rocq_region_begin(r->ctx, "time to first token");
    if (!load(r) || !tokenize(r)) return false;
    r->setup_allocs = n_allocs + ds_n_allocs;
    if (r->o.logits ? !write_logits(r) : !generate(r) || !converse(r)) return false;
    rocq_profile_stop(r->ctx);
    if (r->o.stats) {
        print_stats(r);
        fprintf(stderr, "\n");
        rocq_profile_report(r->ctx, ROCQ_REPORT_TEXT, write_stderr, NULL);
    }
    return write_report(r->ctx, r->o.trace, ROCQ_REPORT_TRACE) &&
           write_report(r->ctx, r->o.profile, ROCQ_REPORT_JSON);
}

int main(int argc, char **argv) {
    static char model[1024];
    static run r; // zeroed
    r.o.model = beside_source("model/rocq-demo.gguf", model, sizeof model);
    r.o.prompt = default_prompt;
    r.o.kernels = getenv("ROCQ_KERNELS");
    r.o.n = 256;
    r.o.shift = r.o.expert_memory = -1;
    r.o.sample.temperature = 0.8f;
    r.o.sample.top_k = 40;
    r.o.sample.top_p = 0.95f;
    r.o.sample.min_p = 0.05f;
    r.o.sample.repeat_penalty = 1;
    r.o.last_n = 64;
    r.o.sample.seed = (uint64_t)time(NULL);
    r.terminal = is_terminal(2);
    if (!parse(&r.o, argc, argv)) return 1;
    if (r.o.help) fputs(usage, stdout);
    if (!r.o.chat && (r.o.asks || r.o.system)) {
        fail(r.o.asks ? "-i" : "--system", "goes with --chat");
        return 1;
    }
    if (r.o.chat && !r.o.help && r.o.prompt == default_prompt) { // the first question too is a line
        r.o.asks = r.o.asks || is_terminal(0);
        if (!r.o.asks || !read_line(&r)) {
            fail("--chat", "there is no question: see -p and -i");
            arrfree(r.line);
            return 1;
        }
        r.o.prompt = NULL;
    }
    catch_interrupt(true);
#if !defined(_WIN32)
    signal(SIGXFSZ, SIG_IGN); // a file-size limit then is a write that fails, and is reported
#endif
    const bool good = (r.o.help || whole_run(&r)) && close_streams();
    free(r.logits);
    free(r.last);
    free((void *)(uintptr_t)r.prompt.data);
    arrfree(r.ids);
    arrfree(r.line);
    chat_free(&r.turn);
    tokenizer_close(&r.tok);
    llama_close(&r.model);
    rocq_gguf_close(&r.file);
    rocq_close(&r.ctx);
    return good ? 0 : 1;
}
