// The main job as a user runs it: examples/generate.c itself, its main() called in a child process
// whose output is caught. Files that are wrong, options that are wrong, memory that runs out at
// every single allocation, Ctrl-C: each ends with one line, exit status 1 (0 for Ctrl-C) and
// nothing leaked.

#define _XOPEN_SOURCE 700 // fork, pipe, posix_openpt

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
#define realloc counted_realloc
#define free counted_free
#define main program_main
#include "../examples/generate.c"
#undef main
#undef free
#undef realloc
#undef malloc

#include <cmocka.h> // has a macro of the name of a function above

#include <cjson/cJSON.h>

#include "child.h"
#include "models.h"
#include "vocabs.h"

enum { N_VOCAB = 301 };

static const rocq_format q8_0[] = {ROCQ_Q8_0, ROCQ_I32}, f16[] = {ROCQ_F16, ROCQ_I32};
static const model_spec small = {"generate", "llama", .n_embd = 64, .n_heads = 4, .n_kv_heads = 2,
    .head_dim = 32, .n_ff = 96, .n_vocab = N_VOCAB, .formats = q8_0};

static void write_model(const model_spec *s) {
    rocq_ctx *ctx = NULL;
    assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
    model_write(ctx, s, model_path(s->name), NULL);
    rocq_close(&ctx);
}

// The path of a model like the small one, newly written, for the caller to keep.
static const char *with(char to[256], model_spec s, const char *name) {
    s.name = name;
    write_model(&s);
    strcpy(to, model_path(name));
    return to;
}

static char small_path[256];

static int setup(void **state) {
    (void)state;
    with(small_path, small, small.name);
    return 0;
}

static void test_text(void **state) {
    (void)state;
    char first[20000];
    const outcome *o = RUN("-m", small_path, "-p", "abc", "-n", "40", "--seed", "7");
    expect_success(o);
    assert_int_equal(strncmp(o->out, "abc", 3), 0); // the prompt, then its continuation
    assert_true(strlen(o->out) > 20);
    assert_string_equal(o->err, ""); // no terminal: no progress
    strcpy(first, o->out);

    // The same seed gives the same text, whatever the threads; another one does not.
    o = RUN("-m", small_path, "-p", "abc", "-n", "40", "--seed", "7", "--threads", "3");
    expect_success(o);
    assert_string_equal(o->out, first);
    o = RUN("-m", small_path, "-p", "abc", "-n", "40", "--seed", "8");
    expect_success(o);
    assert_string_not_equal(o->out, first);

    // The most probable tokens: no seed matters.
    o = RUN("-m", small_path, "-p", "abc", "-n", "40", "--temp", "0", "--seed", "1");
    expect_success(o);
    strcpy(first, o->out);
    o = RUN("-m", small_path, "-p", "abc", "-n", "40", "--temp", "0", "--seed", "2");
    expect_success(o);
    assert_string_equal(o->out, first);

    o = RUN("-m", small_path, "-p", "a\\n\\\"b", "-e", "-n", "0");
    expect_success(o);
    assert_string_equal(o->out, "a\n\"b\n");
    o = RUN("-m", small_path, "-p", "a\\nb", "-n", "0");
    expect_success(o);
    assert_string_equal(o->out, "a\\nb\n");
}

// With bytes for stdin.
static const outcome *run_on(const char *bytes, size_t size, const char *const *args) {
    const char *path = model_path("generate-stdin");
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(bytes, 1, size, out), size);
    assert_int_equal(fclose(out), 0);
    const int had = dup(0), in = open(path, O_RDONLY);
    assert_true(had >= 0 && in >= 0 && dup2(in, 0) == 0);
    const outcome *o = run_with(-1, args);
    assert_true(dup2(had, 0) == 0);
    close(in);
    close(had);
    return o;
}

#define RUN_ON(bytes, size, ...) \
    run_on(bytes, size, (const char *const[]){__VA_ARGS__, NULL})

// Questions in the form of a chat template, here the first Mistral's: only </s> is no text there.
static void set_chat(rocq_gguf_writer *w) {
    assert_int_equal(rocq_gguf_writer_set_str(w, "tokenizer.chat_template",
                                              "{{ ' [INST] ' + system_message }}"), ROCQ_OK);
}

static void set_strange_chat(rocq_gguf_writer *w) {
    assert_int_equal(rocq_gguf_writer_set_str(w, "tokenizer.chat_template", "{{ messages }}"),
                     ROCQ_OK);
}

static void test_chat(void **state) {
    (void)state;
    char path[256], strange[256], first[20000], second[20000];
    model_spec s = small;
    s.edit = set_chat;
    with(path, s, "generate-chat");
    s.edit = set_strange_chat;
    with(strange, s, "generate-strange-chat");

    // As if the text had been written out, but only the answer is printed.
    static const char whole[] = " [INST] be kind\n\nabc [/INST]";
    const outcome *o = RUN("-m", path, "-p", whole, "-n", "9", "--temp", "0", "--threads", "1");
    expect_success(o);
    strcpy(first, o->out + sizeof whole - 1);
    o = RUN("-m", path, "--chat", "--system", "be kind", "-p", "abc", "-n", "9", "--temp", "0",
            "--threads", "1");
    expect_success(o);
    assert_string_equal(o->out, first);
    assert_string_equal(o->err, "");

    // Two questions, both from stdin.
    static const char two[] = "abc\r\nand </s> [/INST]?\n";
    for (int again = 0; again < 2; again++) {
        o = RUN_ON(two, sizeof two - 1, "-m", path, "--chat", "-i", "--system", "be kind", "-n",
                   "9", "--temp", "0", "--threads", "1", "--kv-page", again ? "8" : "0");
        expect_success(o);
        assert_int_equal(strncmp(o->out, first, strlen(first)), 0);
        assert_true(strlen(o->out) > strlen(first) + 1);
        if (again) assert_string_equal(o->out, second);
        strcpy(second, o->out);
    }
    // A zero is a character like others, in the first question and in the next: nothing is cut.
    int64_t n_tokens[2][2];
    for (int k = 0; k < 2; k++) {
        for (int zero = 0; zero < 2; zero++) {
            char lines[] = "abc\nde fgh\n";
            if (zero) lines[k ? 6 : 1] = '\0';
            o = RUN_ON(lines, k ? sizeof lines - 1 : 4, "-m", path, "--chat", "-i", "-n", "9",
                       "--temp", "0", "--threads", "1", "--stats");
            expect_success(o);
            const char *at = strstr(o->err, "\nprompt ");
            assert_non_null(at);
            assert_non_null(at = strstr(at, "tokens/s"));
            n_tokens[k][zero] = strtol(at + 8, NULL, 10);
        }
        assert_int_equal(n_tokens[k][1], n_tokens[k][0]);
    }
    expect_failure(RUN("--chat", "-p", "hello"), "not trained to answer"); // the shipped model
    expect_failure(RUN("-m", strange, "--chat", "-p", "hello"), "is none of ChatML, Llama 3");
    expect_failure(RUN("-m", path, "-i"), "goes with --chat");
    expect_failure(RUN("-m", path, "--system", "x"), "goes with --chat");
}

// A context that fills: the conversation begins anew, or with --shift goes on; a question that is
// longer than the context is an error, at a terminal one that can be mended. Ctrl-C is not waited
// for while the program waits for a question.
static void test_full_chat(void **state) {
    (void)state;
    static const char lines[] = "abc\nfirst\nnext </s>\n", alone[] = "next </s>\n", full[] =
        "generate: the context of 40 tokens is full (see -c): the conversation begins anew\n";
    static const char longer[] = "abc\nabcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz\n";
    char path[256], last[2000];
    model_spec s = small;
    s.edit = set_chat;
    with(path, s, "generate-chat");
    const outcome *o = RUN_ON(alone, sizeof alone - 1, "-m", path, "--chat", "-i", "-n", "9", "-c",
                              "40", "--temp", "0", "--threads", "1", "--presence-penalty", "0.1");
    expect_success(o);
    assert_string_equal(o->err, "");
    strcpy(last, o->out);
    o = RUN_ON(lines, sizeof lines - 1, "-m", path, "--chat", "-i", "-n", "9", "-c", "40", "--temp",
               "0", "--threads", "1", "--presence-penalty", "0.1");
    expect_success(o);
    assert_non_null(strstr(o->err, full));
    assert_true(strlen(o->out) > strlen(last));
    assert_string_equal(o->out + strlen(o->out) - strlen(last), last);
    o = RUN_ON(lines, sizeof lines - 1, "-m", path, "--chat", "-i", "-n", "9", "-c", "40", "--temp",
               "0", "--threads", "1", "--shift", "4");
    expect_success(o);
    assert_string_equal(o->err, "");
    o = RUN_ON(longer, sizeof longer - 1, "-m", path, "--chat", "-i", "-n", "9", "-c", "40");
    expect_failure(o, "does not fit a context of 40 (see -c)");

    const char *args[] = {"-m", path, "--chat", "-i", "-n", "9", "-c", "40", NULL};
    static outcome typed;
    char said[4000] = "";
    size_t n = 0;
    int ends[2], n_asked = 0;
    open_terminal(ends);
    const int had = dup(0);
    assert_true(had >= 0 && dup2(ends[1], 0) == 0);
    child c = start(-1, false, args);
    assert_true(dup2(had, 0) == 0);
    assert_int_equal(write(ends[0], longer, sizeof longer - 1), sizeof longer - 1);
    for (const char *from = said; n_asked < 3;) { // two questions are read, the third is waited for
        const ssize_t k = read(c.err, said + n, sizeof said - 1 - n);
        if (k <= 0) fail_msg("ended early: %s", said);
        said[n += (size_t)k] = '\0';
        for (; (from = strstr(from, "> ")); from += 2) n_asked++;
        from = said + n - (n > 0 && said[n - 1] == '>');
    }
    assert_non_null(strstr(said, "does not fit a context of 40 (see -c)"));
    const struct timespec soon = {0, 100000000};
    nanosleep(&soon, NULL); // from the prompt to the read
    assert_int_equal(kill(c.pid, SIGINT), 0);
    finish(&c, &typed, 0);
    expect_success(&typed);
    assert_string_equal(typed.err, "\n");
    close(ends[0]);
    close(ends[1]);
    close(had);
}

// The numbers in a file of --logits.
static size_t read_logits(const char *path, float *to, size_t room) {
    FILE *in = fopen(path, "rb");
    assert_non_null(in);
    const size_t n = fread(to, sizeof *to, room, in);
    assert_true(n < room);
    fclose(in);
    return n;
}

// A prompt that begins with BOS ("<s>" here) is the same as one to which it is added; a second one
// in the text stays.
static void test_bos(void **state) {
    (void)state;
    enum { ROOM = 20 * N_VOCAB };
    static float added[ROOM], written[ROOM];
    const char *path = model_path("generate-bos");
    expect_success(RUN("-m", small_path, "-p", "", "--logits", path));
    assert_int_equal(read_logits(path, added, ROOM), N_VOCAB); // of BOS alone
    expect_success(RUN("-m", small_path, "-p", "<s>", "--logits", path));
    assert_int_equal(read_logits(path, written, ROOM), N_VOCAB);
    assert_memory_equal(written, added, N_VOCAB * sizeof *added);
    expect_success(RUN("-m", small_path, "-p", "<s><s>", "--logits", path));
    assert_int_equal(read_logits(path, written, ROOM), 2 * N_VOCAB);
    const outcome *o = RUN("-m", small_path, "-p", "<s>abc", "-n", "0");
    expect_success(o);
    assert_string_equal(o->out, "<s>abc\n");
}

// A gpt2 model with byte-level BPE, no BOS before a text, and no more positions than it has
// learned.
static void set_bpe(rocq_gguf_writer *w) {
    static vocab v;
    const vocab_options options = {"gpt2", "gpt-2", "<|endoftext|>", "<|endoftext|>", -1, -1, -1};
    vocab_bpe(&v);
    vocab_set(w, &v, &options);
}

static void test_gpt2(void **state) {
    (void)state;
    static vocab v;
    static float logits[3][20000];
    static const char *const texts[3] = {"a", "a!", "<|endoftext|>a"};
    char path[256];
    model_spec s = small;
    s.arch = "gpt2";
    s.n_heads = s.n_kv_heads = 2;
    vocab_bpe(&v);
    s.n_vocab = v.n_tokens;
    s.edit = set_bpe;
    with(path, s, "generate-gpt2");
    for (size_t i = 0; i < 3; i++) {
        const char *to = model_path("generate-logits");
        expect_success(RUN("-m", path, "-p", texts[i], "--logits", to));
        assert_int_equal(read_logits(to, logits[i], 20000), (i > 0 ? 2 : 1) * v.n_tokens);
    }
    assert_memory_equal(logits[1], logits[0], (size_t)v.n_tokens * sizeof(float));
    assert_memory_not_equal(logits[2], logits[0], (size_t)v.n_tokens * sizeof(float));
    static const char text[] = "a na\xc3\xafve  text\n";
    const outcome *o = RUN("-m", path, "-p", text, "-n", "20", "--stats");
    expect_success(o);
    assert_int_equal(strncmp(o->out, text, sizeof text - 1), 0);
    assert_true(statistic(o, "allocations ") == 0);
    expect_failure(RUN("-m", path, "-c", "513"), "512 positions");
    expect_failure(RUN("-m", path, "-p", "a", "-c", "16", "-n", "40", "--shift", "2"),
                   "cannot move up");
}

// The models here were trained on 512 tokens.
static void test_long_context(void **state) {
    (void)state;
    const outcome *o = RUN("-m", small_path, "-n", "2", "-c", "513");
    expect_success(o);
    assert_non_null(strstr(o->err, "generate: -c 513: "));
    assert_non_null(strstr(o->err, " 512 "));
    assert_ptr_equal(strchr(o->err, '\n'), o->err + strlen(o->err) - 1);
    o = RUN("-m", small_path, "-n", "2", "-c", "512");
    expect_success(o);
    assert_string_equal(o->err, "");
}

// The most probable tokens with penalties, against the penalties' formulas on llama_eval's logits.
enum { N_DRAWN = 40 };

typedef struct penalties {
    float repeat, frequency, presence;
    int32_t last_n;
} penalties;

static int32_t best_token(const float *logits, const int32_t *tokens, int32_t n,
                          const penalties *p) {
    int32_t best = -1;
    float top = 0;
    for (int32_t t = 0; t < N_VOCAB; t++) {
        int32_t count = 0;
        for (int32_t i = n > p->last_n ? n - p->last_n : 0; i < n; i++) count += tokens[i] == t;
        float x = logits[t];
        if (count > 0) {
            x = x > 0 ? x / p->repeat : x * p->repeat;
            x -= (float)count * p->frequency + p->presence;
        }
        if (best >= 0 && !(x > top)) continue;
        best = t;
        top = x;
    }
    return best;
}

// The text that should come, by way of llama_eval alone.
static void expected_text(const char *prompt, const penalties *p, char *text, size_t size) {
    static float logits[N_VOCAB * 64];
    int32_t tokens[64 + N_DRAWN];
    rocq_ctx *ctx = NULL;
    rocq_gguf *file = NULL;
    llama_model m;
    tokenizer tok;
    int32_t *ids = NULL;
    tokenizer_stream stream = {{0}, 0};
    const rocq_gguf_desc source = {.path = small_path};
    assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
    assert_int_equal(rocq_gguf_open(ctx, &file, &source), ROCQ_OK);
    assert_int_equal(tokenizer_open(&tok, file), ROCQ_OK);
    assert_int_equal(llama_open(&m, ctx, file, NULL), ROCQ_OK);
    assert_int_equal(tokenizer_encode(&tok, &ids, prompt, (int64_t)strlen(prompt), true, true),
                     ROCQ_OK);
    int32_t n = (int32_t)arrlen(ids);
    assert_true(n <= 64);
    memcpy(tokens, ids, (size_t)n * sizeof *tokens);
    assert_int_equal(llama_eval(&m, tokens, n, logits), ROCQ_OK);
    memmove(logits, logits + (n - 1) * N_VOCAB, N_VOCAB * sizeof *logits);
    size_t used = (size_t)snprintf(text, size, "%s", prompt);
    for (int32_t i = 0; i < N_DRAWN; i++) {
        const int32_t token = best_token(logits, tokens, n, p);
        if (tokenizer_is_end(&tok, token)) break;
        const rocq_str piece = tokenizer_next(&tok, &stream, token, false);
        used += (size_t)snprintf(text + used, size - used, "%.*s", (int)piece.length, piece.data);
        tokens[n++] = token;
        assert_int_equal(llama_eval(&m, &token, 1, logits), ROCQ_OK);
    }
    const rocq_str rest = tokenizer_next(&tok, &stream, -1, false);
    snprintf(text + used, size - used, "%.*s\n", (int)rest.length, rest.data);
    arrfree(ids);
    tokenizer_close(&tok);
    llama_close(&m);
    rocq_gguf_close(&file);
    rocq_close(&ctx);
}

static void test_penalties(void **state) {
    (void)state;
    static const penalties cases[] = {
        {1, 0, 0, 64}, {3, 0, 0, 64}, {0.3f, 0, 0, 64}, {1, 0.7f, 0, 64},   {1, 0, 5, 64},
        {1, 0, 5, 0},  {1, 0, 5, 3},  {2, 0.5f, 1, 7},  {1, -0.5f, 0, 512}, {1, 1000, 0, 512},
    };
    static char expected[4096], plain[4096], option[4][32];
    int n_other = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const penalties *p = &cases[i];
        expected_text("abcab", p, expected, sizeof expected);
        snprintf(option[0], sizeof option[0], "%.9g", (double)p->repeat);
        snprintf(option[1], sizeof option[1], "%.9g", (double)p->frequency);
        snprintf(option[2], sizeof option[2], "%.9g", (double)p->presence);
        snprintf(option[3], sizeof option[3], "%d", p->last_n == 512 ? -1 : (int)p->last_n);
        const outcome *o = RUN("-m", small_path, "-p", "abcab", "-n", "40", "--temp", "0",
                               "--repeat-penalty", option[0], "--frequency-penalty", option[1],
                               "--presence-penalty", option[2], "--repeat-last-n", option[3]);
        expect_success(o);
        assert_string_equal(o->out, expected);
        if (i == 0) strcpy(plain, expected);
        n_other += strcmp(plain, expected) != 0;
    }
    assert_true(n_other >= 6); // they matter
    const outcome *o = RUN("-m", small_path, "-p", "abcab", "-n", "40", "--temp", "0");
    expect_success(o);
    assert_string_equal(o->out, plain);
    o = RUN("-m", small_path, "-n", "40", "--presence-penalty", "1", "--stats");
    expect_success(o);
    assert_true(statistic(o, "allocations ") == 0);
}

static void test_stats(void **state) {
    (void)state;
    // A prompt of several batches, and a context that fills before -n is reached.
    static char prompt[400];
    memset(prompt, 'q', sizeof prompt - 1);
    const outcome *o = RUN("-m", small_path, "-p", prompt, "-n", "500", "-c", "450", "--stats");
    expect_success(o);
    assert_true(statistic(o, "allocations ") == 0);
    assert_true(statistic(o, "time to first token ") > 0);
    assert_true(statistic(o, "generation ") > 0);
    assert_true(statistic(o, "memory ") > 0);
    for (const char *kv[] = {"f32", "q8_0", NULL}, **k = kv; *k; k++) {
        o = RUN("-m", small_path, "-n", "5", "--kv", *k, "--stats");
        expect_success(o);
        assert_true(statistic(o, "allocations ") == 0);
    }
}

// Pages hold the same; and a text goes on where the context is full.
static void test_cache(void **state) {
    (void)state;
    char text[sizeof ((outcome *)0)->out];
    const outcome *o = RUN("-m", small_path, "-p", "abc", "-n", "20", "--temp", "0");
    expect_success(o);
    snprintf(text, sizeof text, "%s", o->out);
    o = RUN("-m", small_path, "-p", "abc", "-n", "20", "--temp", "0", "--kv-page", "3", "--sharing",
            "graphics");
    expect_success(o);
    assert_string_equal(o->out, text);
    o = RUN("-m", small_path, "-p", "abc", "-n", "60", "--temp", "0", "-c", "20");
    expect_success(o);
    snprintf(text, sizeof text, "%s", o->out);
    for (const char *page[] = {"0", "4", NULL}, **p = page; *p; p++) {
        o = RUN("-m", small_path, "-p", "abc", "-n", "60", "--temp", "0", "-c", "20", "--shift",
                "4", "--kv-page", *p, "--stats");
        expect_success(o);
        assert_true(strlen(o->out) > strlen(text));
        assert_memory_equal(o->out, text, strlen(text) - 1); // without the line's end
        assert_true(statistic(o, "allocations ") == 0);
    }
    o = RUN("-m", small_path, "-p", "abc", "-n", "60", "--temp", "0", "-c", "20", "--shift", "20");
    expect_success(o);
    assert_string_equal(o->out, text);
}

// A mixture of 5 MiB of experts: the same text with any budget for them, and what it held.
static void test_expert_memory(void **state) {
    (void)state;
    static const char *const budgets[] = {"0", "2", "100"};
    char text[sizeof ((outcome *)0)->out], path[256];
    model_spec s = small;
    s.n_ff = 1536;
    s.n_experts = 8;
    s.n_used = 2;
    with(path, s, "generate-mixture");
    const outcome *o = RUN("-m", path, "-p", "abc", "-n", "20", "--temp", "0", "--stats");
    expect_success(o);
    assert_true(statistic(o, "experts ") == 100);
    snprintf(text, sizeof text, "%s", o->out);
    for (int i = 0; i < 3; i++) {
        o = RUN("-m", path, "-p", "abc", "-n", "20", "--temp", "0", "--expert-memory", budgets[i],
                "--stats", "--expert-stats");
        expect_success(o);
        assert_string_equal(o->out, text);
        const double hits = statistic(o, "experts ");
        assert_true(i == 0 ? hits == 0 : i == 2 ? hits == 100 : hits > 0 && hits < 100);
        assert_true(statistic(o, "  of layer 1 ") >= 0);
        assert_true(statistic(o, "allocations ") == 0);
        assert_non_null(strstr(o->err, i == 0   ? "kept 0 of 16,"
                                       : i == 2 ? "kept 16 of 16,"
                                                : "kept 6 of 16,"));
    }
    expect_failure(RUN("-m", path, "--expert-memory", "-1"), "--expert-memory");
    expect_failure(RUN("-m", path, "--expert-memory", "some"), "--expert-memory");
}

static cJSON *read_json(const char *path) {
    static char text[1 << 21];
    FILE *in = fopen(path, "rb");
    assert_non_null(in);
    const size_t size = fread(text, 1, sizeof text - 1, in);
    assert_true(size < sizeof text - 1);
    fclose(in);
    text[size] = 0;
    cJSON *json = cJSON_ParseWithOpts(text, NULL, true);
    if (!json) fail_msg("%s: no JSON at: %.80s", path, cJSON_GetErrorPtr());
    return json;
}

// Where a name ends that begins at or after `from`, and is nowhere before it; in microseconds.
static double phase_after(const cJSON *events, const char *name, double from) {
    const cJSON *e;
    cJSON_ArrayForEach(e, events) {
        if (strcmp(cJSON_GetObjectItem(e, "name")->valuestring, name) != 0) continue;
        const double start = cJSON_GetObjectItem(e, "ts")->valuedouble;
        if (start < from) fail_msg("%s begins at %.3f, not after %.3f", name, start, from);
        return start + cJSON_GetObjectItem(e, "dur")->valuedouble;
    }
    fail_msg("there is no %s", name);
    return 0;
}

// The phases one after the other, tokens in generation, ops in tokens; and the text stays the same.
static void test_profile(void **state) {
    (void)state;
    static const char *const phases[] = {"open",     "load",   "warm",
                                         "tokenize", "prompt", "first token"};
    char text[sizeof ((outcome *)0)->out], trace_path[256], profile_path[256];
    snprintf(trace_path, sizeof trace_path, "%s", model_path("generate-trace"));
    snprintf(profile_path, sizeof profile_path, "%s", model_path("generate-profile"));
    const outcome *o = RUN("-m", small_path, "-p", "abc", "-n", "20", "--temp", "0");
    expect_success(o);
    snprintf(text, sizeof text, "%s", o->out);
    o = RUN("-m", small_path, "-p", "abc", "-n", "20", "--temp", "0", "--stats", "--trace",
            trace_path, "--profile", profile_path);
    expect_success(o);
    assert_string_equal(o->out, text);
    assert_true(statistic(o, "allocations ") == 0);
    const char *at = strstr(o->err, "time to first token");
    assert_non_null(at);
    for (size_t i = 0; i < sizeof phases / sizeof phases[0]; i++) {
        assert_non_null(at = strstr(at, phases[i])); // in their order, in the statistics
    }
    assert_non_null(strstr(o->err, "\nregion ")); // and the table
    assert_non_null(strstr(o->err, "\n    matvec Q8_0 "));

    cJSON *trace = read_json(trace_path), *profile = read_json(profile_path);
    const cJSON *e, *events = cJSON_GetObjectItem(trace, "traceEvents");
    while (strcmp(cJSON_GetObjectItem(cJSON_GetArrayItem(events, 0), "ph")->valuestring, "M") ==
           0) {
        cJSON_DeleteItemFromArray(cJSON_GetObjectItem(trace, "traceEvents"), 0);
    }
    double end = 0;
    for (size_t i = 0; i < sizeof phases / sizeof phases[0]; i++) {
        end = phase_after(events, phases[i], end);
    }
    assert_true(phase_after(events, "time to first token", 0) >= end);
    const double generated = phase_after(events, "generation", end);
    int n_tokens = 0, n_ops = 0;
    cJSON_ArrayForEach(e, events) {
        const char *name = cJSON_GetObjectItem(e, "name")->valuestring;
        const double start = cJSON_GetObjectItem(e, "ts")->valuedouble;
        const double stop = start + cJSON_GetObjectItem(e, "dur")->valuedouble;
        if (start < end) continue;
        if (strcmp(name, "generation") != 0) assert_true(stop <= generated + 1e-3);
        n_tokens += strcmp(name, "token") == 0;
        n_ops += strncmp(name, "matvec", 6) == 0;
    }
    assert_true(n_tokens == 19 && n_ops >= 19 * 4);
    bool found = false;
    cJSON_ArrayForEach(e, cJSON_GetObjectItem(profile, "regions")) {
        if (strcmp(cJSON_GetObjectItem(e, "path")->valuestring, "generation/token") != 0) continue;
        const cJSON *times = cJSON_GetObjectItem(e, "host_ns");
        found = cJSON_GetObjectItem(times, "count")->valuedouble == 19 &&
                cJSON_GetObjectItem(e, "bytes_per_s")->valuedouble > 0;
    }
    assert_true(found);
    cJSON_Delete(trace);
    cJSON_Delete(profile);
    o = RUN("-m", small_path, "-p", "abc", "--logits", model_path("generate-logits"), "--profile",
            profile_path);
    expect_success(o);
    assert_string_equal(o->out, "");
    profile = read_json(profile_path);
    e = cJSON_GetArrayItem(cJSON_GetObjectItem(profile, "regions"), 0);
    assert_string_equal(cJSON_GetObjectItem(e, "name")->valuestring, "time to first token");
    assert_true(cJSON_GetObjectItem(e, "total_ns")->valuedouble > 0);
    cJSON_Delete(profile);
    expect_failure(RUN("-m", small_path, "-n", "2", "--trace", "no/such/trace"), "no/such/trace");
    expect_failure(RUN("-m", small_path, "-n", "2", "--profile", "no/such/file"), "no/such/file");
}

static void test_options(void **state) {
    (void)state;
    static const struct { const char *name, *value; } wrong[] = {
        {"--nonsense", NULL}, {"-n", NULL}, {"-n", "x"}, {"-n", "-1"}, {"-n", "1.5"},
        {"-n", "1e12"},
        {"-n", ""}, {"--temp", "-1"}, {"--temp", "nan"}, {"--temp", "1x"}, {"--top-p", "2"},
        {"--threads", "0"}, {"--device", "abacus"}, {"--precision", "int4"}, {"--seed", "1.5"},
        {"-c", "0"}, {"stray", NULL}, {"-m", NULL}, {"-n", " 5"}, {"-n", "0x5"}, {"--temp", "inf"},
        {"--repeat-penalty", "0"}, {"--repeat-penalty", "-1"}, {"--repeat-last-n", "-2"},
        {"--frequency-penalty", "nan"}, {"--presence-penalty", "1e99"}, {"--sharing", "fairly"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const char *args[3] = {wrong[i].name, wrong[i].value, NULL};
        const outcome *o = run_with(-1, args);
        expect_failure(o, wrong[i].name);
        if (wrong[i].value) assert_non_null(strstr(o->err, wrong[i].value));
        assert_string_equal(o->out, "");
    }
    const outcome *o = RUN("--help");
    expect_success(o);
    assert_string_equal(o->err, "");
    assert_int_equal(strncmp(o->out, "usage: generate ", 16), 0);
    expect_failure(RUN("-m", small_path, "--kv", "q2_k"),
                   "format is q2_k, expected f16, f32, bf16, q8_0 or q4_0");
    expect_failure(RUN("-m", small_path, "--kv", "nonsense"),
                   "format is nonsense, expected f16, f32, bf16, q8_0 or q4_0");
    expect_failure(RUN("-m", small_path, "--device", "gpu"), "");
    expect_failure(RUN("-m", small_path, "-c", "3", "-p", "abcdefgh"), "context");
}

static void test_wrong_models(void **state) {
    (void)state;
    char path[256];
    model_spec s = small;
    s.arch = "mamba";
    expect_failure(RUN("-m", with(path, s, "generate-family")), "mamba");

    static const char *const tensors[] = {"token_embd.weight", "output_norm.weight",
        "blk.0.attn_norm.weight", "blk.0.attn_q.weight", "blk.1.attn_k.weight",
        "blk.1.attn_v.weight",
        "blk.0.attn_output.weight", "blk.1.ffn_norm.weight", "blk.0.ffn_gate.weight",
        "blk.1.ffn_up.weight", "blk.1.ffn_down.weight"};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        s = small;
        s.leave_out = tensors[i];
        expect_failure(RUN("-m", with(path, s, "generate-missing")), tensors[i]);
        s.leave_out = NULL;
        s.misshape = tensors[i];
        expect_failure(RUN("-m", with(path, s, "generate-shape")), tensors[i]);
    }
    // Tensors that other families need.
    static const struct { const char *arch, *tensor; } others[] = {
        {"qwen3", "blk.1.attn_k_norm.weight"},
        {"gemma2", "blk.0.post_attention_norm.weight"}, {"gemma2", "blk.1.post_ffw_norm.weight"},
        {"gpt2", "position_embd.weight"}, {"gpt2", "output_norm.bias"},
        {"gpt2", "blk.0.attn_qkv.weight"}, {"gpt2", "blk.1.attn_qkv.bias"},
        {"gpt2", "blk.1.ffn_norm.bias"}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        s = small;
        s.n_heads = s.n_kv_heads = 2; // qwen2 and gpt2 want heads that add up to n_embd
        s.arch = others[i].arch;
        expect_success(RUN("-n", "3", "-m", with(path, s, "generate-other")));
        s.leave_out = others[i].tensor;
        expect_failure(RUN("-m", with(path, s, "generate-other")), others[i].tensor);
    }
}

static void test_wrong_files(void **state) {
    (void)state;
    expect_failure(RUN("-m", "no/such/model.gguf"), "no/such/model.gguf");
    expect_failure(RUN("-m", "tests"), "tests");
    expect_failure(RUN("-m", "tests/test_generate.c"), "tests/test_generate.c");
    expect_failure(RUN("-m", "/dev/null"), "/dev/null");

    // Cut off anywhere: in the header, the vocabulary, the directory, the weights.
    static char bytes[1 << 20];
    FILE *f = fopen(small_path, "rb");
    assert_non_null(f);
    size_t size = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    assert_true(size > 100000 && size < sizeof bytes);
    const char *path = model_path("generate-cut");
    model_random r = {3};
    for (int32_t i = 0; i < 40; i++) {
        size_t cut = i < 12 ? (size_t)i * 3 : i == 12 ? size - 64 : (size_t)(model_u64(&r) % size);
        if (i > 24) cut %= 9000; // where the metadata is
        f = fopen(path, "wb");
        assert_non_null(f);
        assert_int_equal(fwrite(bytes, 1, cut, f), cut);
        assert_int_equal(fclose(f), 0);
        expect_failure(RUN("-m", path), path);
    }
}

// Every allocation of a whole run denied in turn: an error, and nothing left behind.
static void test_no_memory(void **state) {
    (void)state;
    char path[256];
    static const struct { const char *arch, *kv; const rocq_format *formats; } cases[] = {
        {"llama", "f16", q8_0}, {"gemma2", "q8_0", f16}};
    for (size_t i = 0; i < 2; i++) {
        model_spec s = small;
        s.arch = cases[i].arch;
        s.formats = cases[i].formats;
        with(path, s, "generate-memory");
        const char *args[] = {
            "-m",        path,        "-p", "hello there",      "-n",  "6", "--stats", "--kv",
            cases[i].kv, "--threads", "2",  "--repeat-penalty", "1.1", NULL};
        const outcome *o = run_with(-1, args);
        expect_success(o);
        int64_t n = o->calls;
        assert_true(n > 10 && n < 400);
        for (int64_t k = 0; k < n; k++) expect_failure(run_with(k, args), "");
        printf("# %s: each of %d allocations denied\n", s.arch, (int)n);
    }
}

// Progress, in lines that are overwritten and at last erased, and only on a terminal.
static void test_progress(void **state) {
    (void)state;
    static char prompt[300];
    static outcome o;
    memset(prompt, 'q', sizeof prompt - 1);
    const char *args[] = {"-m", small_path, "-p", prompt, "-n", "2", NULL};
    child c = start(-1, true, args);
    finish(&c, &o, 0);
    expect_success(&o);
    assert_non_null(strstr(o.err, "\rreading "));
    assert_null(strchr(o.err, '\n'));
    assert_int_equal(o.err[strlen(o.err) - 1], '\r');
}

// Ctrl-C once n_shown bytes of text are out: the text so far, a newline, exit status 0.
static void interrupt(const char *prompt, size_t n_shown) {
    // A context whose cache fits in memory, and that would take minutes to fill.
    const char *args[] = {"-m", small_path, "-p", prompt, "-n", "100000", "-c", "100000", NULL};
    static outcome o;
    child c = start(-1, false, args);
    size_t n = 0;
    while (n < n_shown) {
        ssize_t k = read(c.out, o.out + n, n_shown - n);
        if (k <= 0) {
            finish(&c, &o, n);
            fail_msg("ended early, exit status %d: %s", o.status, o.err);
        }
        n += (size_t)k;
    }
    assert_int_equal(kill(c.pid, SIGINT), 0);
    finish(&c, &o, n);
    expect_success(&o);
    assert_non_null(strstr(o.err, "-c 100000")); // beyond what the model was trained on
    assert_ptr_equal(strchr(o.err, '\n'), o.err + strlen(o.err) - 1);
    assert_int_equal(strncmp(o.out, prompt, strlen(prompt)), 0);
    assert_int_equal(o.out[strlen(o.out) - 1], '\n');
}

static void test_interrupt(void **state) {
    (void)state;
    interrupt("abc", 40);    // while text is written
    static char prompt[8000];
    memset(prompt, 'q', sizeof prompt - 1);
    interrupt(prompt, 1); // while the prompt is read, which begins when it has been shown
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_chat), cmocka_unit_test(test_full_chat), cmocka_unit_test(test_bos),
        cmocka_unit_test(test_gpt2),
        cmocka_unit_test(test_long_context),
        cmocka_unit_test(test_penalties),
        cmocka_unit_test(test_stats),
        cmocka_unit_test(test_cache),
        cmocka_unit_test(test_expert_memory),
        cmocka_unit_test(test_profile),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_wrong_models),
        cmocka_unit_test(test_wrong_files),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_progress),
        cmocka_unit_test(test_interrupt),
    };
    return cmocka_run_group_tests_name("generate", tests, setup, NULL);
}
