// examples/train.c as a user runs it: its main() called in a child process whose output is caught.
// Training, breaking off and going on, Ctrl-C, what comes out; then wrong files and options, and
// memory that runs out at every single allocation: one line each, exit status 1, nothing
// overwritten.

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
#include "../examples/train.c"
#undef main
#undef free
#undef realloc
#undef malloc

#include <cmocka.h> // has a macro of the name of a function above

#include <sys/resource.h>

#include "child.h"
#include "models.h"

#define FOLDER ".build/tests/train-program"
#define TEXT_FILE FOLDER "/text.txt"
#define LINES_FILE FOLDER "/lines.jsonl"
#define CHECK FOLDER "/check.gguf"
#define OUT FOLDER "/out.gguf"
#define CSV FOLDER "/loss.csv"

static const rocq_format q8_0[] = {ROCQ_Q8_0, ROCQ_I32}, f32[] = {ROCQ_F32, ROCQ_I32};
static const model_spec small = {"train", "llama", .n_embd = 64, .n_heads = 4, .n_kv_heads = 2,
    .head_dim = 16, .n_ff = 96, .n_vocab = 301, .formats = q8_0};
static char small_path[256], other_path[256];

static void write_bytes(const char *path, const char *data, size_t size) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

static void write_file(const char *path, const char *text) {
    write_bytes(path, text, strlen(text));
}

static char *bytes_of(const char *path, size_t *size) { // NULL: there is no such file
    FILE *in = fopen(path, "rb");
    if (!in) return NULL;
    char *data = (char *)malloc(1 << 22);
    assert_non_null(data);
    *size = fread(data, 1, (1 << 22) - 1, in);
    data[*size] = '\0';
    fclose(in);
    return data;
}

static void expect_same_file(const char *a, const char *b) {
    size_t n_a, n_b;
    char *x = bytes_of(a, &n_a), *y = bytes_of(b, &n_b);
    assert_true(x && y && n_a > 100);
    assert_int_equal(n_a, n_b);
    assert_memory_equal(x, y, n_a);
    free(x);
    free(y);
}

static int setup(void **state) {
    (void)state;
    rocq_ctx *ctx = NULL;
    model_spec other = small;
    char text[6000] = "", line[200];
    assert_int_equal(system("mkdir -p " FOLDER), 0);
    assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
    strcpy(small_path, model_path("train"));
    model_write(ctx, &small, small_path, NULL);
    other.name = "train-other";
    other.n_ff = 128;
    other.formats = f32;
    strcpy(other_path, model_path("train-other"));
    model_write(ctx, &other, other_path, NULL);
    rocq_close(&ctx);
    for (int i = 0; i < 60; i++) {
        snprintf(line, sizeof line, "the %s cat sat on %d mats%s", i % 3 ? "old" : "new", i % 7,
                 i % 6 == 5 ? "\n\n" : "\n");
        strcat(text, line);
    }
    write_file(TEXT_FILE, text);
    text[0] = 0;
    for (int i = 0; i < 20; i++) {
        snprintf(line, sizeof line,
                 "{\"prompt\": \"who are you %d? \", \"completion\": \"a cat, %d\\n\"}\n", i,
                 i % 5);
        strcat(text, line);
    }
    strcat(text, "\n{\"text\": \"cats \\u00e4nd mats\"}\n");
    write_file(LINES_FILE, text);
    return 0;
}

// What stands in a line of the CSV, by column.
static double column(const char *path, int row, int n) {
    size_t size;
    char *data = bytes_of(path, &size), *at = data;
    assert_non_null(data);
    for (int i = 0; i < row; i++) at = strchr(at, '\n') + 1;
    for (int i = 0; i < n; i++) at = strchr(at, ',') + 1;
    const double x = *at == ',' ? NAN : strtod(at, NULL);
    free(data);
    return x;
}

#define USUAL "--context", "32", "--batch", "2", "--threads", "2"

// All weights, and adapters: the loss falls, the files are there, and the log says what was done.
static void test_training(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        const char *more[] = {i ? "--lora" : "--decay", i ? "4" : "0.1"};
        remove(OUT);
        const outcome *o = RUN(small_path, "--data", TEXT_FILE, "--documents", USUAL, "--steps",
                               "30", "--lr", "1e-2", more[0], more[1], "--eval", TEXT_FILE,
                               "--eval-every", "10", "--csv", CSV, "--out", OUT);
        expect_success(o);
        assert_string_equal(o->err, "");
        assert_non_null(strstr(o->out, "\nstep     30  loss "));
        assert_non_null(strstr(o->out, "step      0  held out "));
        assert_non_null(strstr(o->out, "device "));
        assert_int_equal(column(CSV, 30, 0), 30);
        assert_true(column(CSV, 30, 2) < 0.8 * column(CSV, 1, 2));
        assert_true(column(CSV, 30, 5) < 0.9 * column(CSV, 10, 5));
        assert_true(isnan(column(CSV, 29, 5)));
        assert_true(fabs(column(CSV, 3, 3) - 1e-2) < 1e-8); // the third step ends the warm-up
        assert_true(fabs(column(CSV, 30, 3) - 1e-3) < 1e-8);
        rocq_ctx *ctx = NULL;
        rocq_gguf *file = NULL;
        rocq_gguf_desc desc = {0};
        rocq_gguf_tensor t;
        desc.path = OUT;
        assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
        assert_int_equal(rocq_gguf_open(ctx, &file, &desc), ROCQ_OK);
        assert_int_equal(rocq_gguf_find_tensor(file, i ? "blk.1.ffn_down.weight.lora_b"
                                                       : "blk.1.ffn_down.weight", &t), ROCQ_OK);
        rocq_gguf_close(&file);
        rocq_close(&ctx);
    }
}

// Prompts are read, not learned; the end of a text is.
static void test_lines(void **state) {
    (void)state;
    const outcome *o = RUN(small_path, "--data", LINES_FILE, USUAL, "--epochs", "0.1", "--lora",
                           "2", "--targets", "q,attn_v,down");
    expect_success(o);
    // Letters are tokens of one byte each here, and each begins with a space of its own.
    double learned = 0;
    for (int i = 0; i < 20; i++) learned += (double)strlen("a cat, 0\n") + 1;
    learned += (double)strlen("cats nd mats") + 2 + 1 + 1; // a-umlaut is two bytes; the space, EOS
    const char *at = strstr(o->out, " tokens, ");
    assert_non_null(at);
    assert_true(fabs(strtod(at + 9, NULL) - learned) < 0.5);
    const char *bad[][2] = {{"{\"prompt\": \"x\"}\n", "line 1 has neither"},
                            {"\n{\"text\": 5}\n", "line 2 has neither"},
                            {"{\"text\": \"a\", \"prompt\": \"b\"}", "line 1 has neither"},
                            {"{\"text\": \"a\"} x\n", "line 1 is no JSON"},
                            {"[1, 2]\n", "line 1 has neither"},
                            {"{\"text\": \"a\\\\u0000\\u0000b\"}", "line 1 has a NUL character"},
                            {"plain text\n", "line 1 is no JSON"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_file(FOLDER "/bad.jsonl", bad[i][0]);
        expect_failure(RUN(small_path, "--data", FOLDER "/bad.jsonl", USUAL), bad[i][1]);
    }
}

#define RESUMED(steps, ...)                                                                        \
    RUN(small_path, "--data", TEXT_FILE, "--documents", USUAL, "--lr", "2e-3", "--lora", "3",      \
        "--steps", steps, "--warmup", "2", __VA_ARGS__)

// What is learned does not depend on how lines end, and a NUL byte is one of a text.
static void test_texts(void **state) {
    (void)state;
    static const char *const ends[] = {"\n", "\r\n"};
    double tokens[2];
    for (int i = 0; i < 2; i++) {
        FILE *out = fopen(FOLDER "/ends.txt", "wb");
        assert_non_null(out);
        for (int k = 0; k < 40; k++) {
            fprintf(out, "cat %d", k % 10);
            for (int n = 0; n < 2; n++) fputs(ends[i], out);
        }
        assert_int_equal(fclose(out), 0);
        const outcome *o = RUN(small_path, "--data", FOLDER "/ends.txt", "--documents", USUAL,
                               "--epochs", "0.1", "--lora", "2");
        expect_success(o);
        const char *at = strstr(o->out, "\ndata ");
        assert_non_null(at);
        tokens[i] = strtod(at + 6, NULL);
    }
    // Each document has the \r before its end; a space and EOS are there in both.
    assert_true(fabs(tokens[1] - tokens[0] - 40) < 0.5);
    FILE *out = fopen(FOLDER "/nul.txt", "wb");
    assert_non_null(out);
    for (int k = 0; k < 100; k++) assert_int_equal(fwrite("a\0\xff\xc3", 1, 4, out), 4);
    assert_int_equal(fclose(out), 0);
    expect_success(RUN(small_path, "--data", FOLDER "/nul.txt", USUAL, "--steps", "1"));
    assert_int_equal(rename(FOLDER "/nul.txt", FOLDER "/nul.jsonl"), 0);
    expect_failure(RUN(small_path, "--data", FOLDER "/nul.jsonl", USUAL), "line 1 has a NUL");
}

// A run of 14 steps that is broken off (killed while it works, say) and resumed ends in the same
// files, wherever that was: in the middle of an epoch, at its end.
static void test_resume(void **state) {
    (void)state;
    expect_success(RESUMED("14", "--csv", FOLDER "/whole.csv", "--out", FOLDER "/whole.gguf"));
    static const char *const every[] = {"1", "5", "8", "13"};
    for (size_t i = 0; i < 4; i++) {
        remove(CHECK);
        remove(CSV);
        // It saves after so many steps; those behind them are lost with the last checkpoint.
        expect_success(RESUMED("14", "--checkpoint", CHECK, "--save-every", every[i], "--csv", CSV,
                               "--out", OUT));
        expect_same_file(FOLDER "/whole.gguf", OUT);
    }
    for (int i = 0; i < 3; i++) {
        static const char *const parts[][3] = {
            {"4", "9", "14"}, {"1", "13", "14"}, {"7", "8", "14"}};
        remove(CHECK);
        for (int k = 0; k < 3; k++) {
            // The rate depends on the number of steps: a constant one here, by a warm-up without
            // end.
            const outcome *o = RUN(small_path, "--data", TEXT_FILE, "--documents", USUAL, "--lr",
                                   "2e-3", "--lora", "3", "--warmup", "100", "--steps", parts[i][k],
                                   "--checkpoint", CHECK, "--csv", CSV, "--out", OUT,
                                   k > 0 ? "--resume" : "--documents");
            expect_success(o);
        }
        if (i == 0) assert_int_equal(rename(OUT, FOLDER "/constant.gguf"), 0);
        else expect_same_file(FOLDER "/constant.gguf", OUT);
        for (int row = 1; row <= 14; row++) assert_int_equal(column(CSV, row, 0), row);
    }
}

// Ctrl-C in the middle of a long run: it saves, and ends without failure; resumed it goes on.
static void test_interrupt(void **state) {
    (void)state;
    static outcome o;
    const char *args[] = {small_path, "--data", TEXT_FILE, USUAL, "--steps", "1000000",
                          "--checkpoint", CHECK, "--out", OUT, "--csv", CSV, NULL};
    remove(CHECK);
    remove(OUT);
    child c = start(-1, false, args);
    size_t n = 0;
    while (!strstr(o.out, "step      1  loss")) {
        const ssize_t k = read(c.out, o.out + n, 100);
        assert_true(k > 0);
        n += (size_t)k;
        o.out[n] = '\0';
    }
    assert_int_equal(kill(c.pid, SIGINT), 0);
    finish(&c, &o, n);
    expect_success(&o);
    const double done = statistic(&o, "interrupted after step ");
    assert_true(done >= 1 && done < 1e6);
    assert_ptr_equal(strchr(o.err, '\n'), o.err + strlen(o.err) - 1);
    size_t size;
    char *check = bytes_of(CHECK, &size), *out = bytes_of(OUT, &size);
    assert_true(check && out);
    free(check);
    free(out);
    char more[32], label[64];
    snprintf(more, sizeof more, "%.0f", done + 2);
    const outcome *again = RUN(small_path, "--data", TEXT_FILE, USUAL, "--steps", more,
                               "--checkpoint", CHECK, "--resume");
    expect_success(again);
    snprintf(label, sizeof label, "resumed    after step %.0f\n", done);
    if (!strstr(again->out, label)) fail_msg("no %s in: %s", label, again->out);
}

// Where the disk has no room for a checkpoint, here by a limit on the size of files, training goes
// on and its result is written; the checkpoint that is there stays, and a line tells of each that
// was not written.
static void test_full_disk(void **state) {
    (void)state;
    struct rlimit before, small_files;
    size_t n_check, n_out, n_lines = 0;
    remove(CHECK);
    // A constant rate, by a warm-up without end; the second run first without the limit.
    expect_success(RESUMED("2", "--warmup", "100", "--checkpoint", CHECK));
    char *check = bytes_of(CHECK, &n_check);
    expect_success(RESUMED("8", "--warmup", "100", "--checkpoint", CHECK, "--resume", "--out",
                           FOLDER "/whole.gguf"));
    write_bytes(CHECK, check, n_check);
    char *out = bytes_of(FOLDER "/whole.gguf", &n_out);
    assert_true(check && out && n_out < n_check);
    remove(OUT);
    remove(CSV);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small_files = before;
    small_files.rlim_cur = (n_out + n_check) / 2;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN); // a write fails instead, in the child too
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small_files), 0);
    const outcome *o = RESUMED("8", "--warmup", "100", "--checkpoint", CHECK, "--resume",
                               "--save-every", "2", "--csv", CSV, "--out", OUT);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, handler);
    assert_int_equal(o->status, 1);
    for (const char *at = o->err, *end; *at; at = end + 1, n_lines++) {
        const char *path = strstr(at, CHECK), *too_large = strstr(at, "File too large");
        end = strchr(at, '\n');
        if (!end || !path || path > end || !too_large || too_large > end) fail_msg("%s", o->err);
    }
    assert_int_equal(n_lines, 3); // after steps 4, 6 and 8
    for (int row = 1; row <= 6; row++) assert_int_equal(column(CSV, row, 0), row + 2);
    expect_same_file(OUT, FOLDER "/whole.gguf");
    free(out);
    out = bytes_of(CHECK, &n_out);
    assert_non_null(out);
    assert_int_equal(n_out, n_check);
    assert_memory_equal(out, check, n_check);
    free(out);
    free(check);
    assert_int_not_equal(system("ls " FOLDER "/*.part* >/dev/null 2>&1"), 0);
}

// The CSV of a run that is killed has a row for each step up to the checkpoint, and the resumed run
// goes on behind that one.
static void test_killed(void **state) {
    (void)state;
    static outcome o;
    const char *args[] = {small_path, "--data", TEXT_FILE, USUAL, "--lora", "3", "--steps",
                          "1000000", "--save-every", "3", "--checkpoint", CHECK, "--csv", CSV,
                          NULL};
    size_t n_before, n_after;
    remove(CHECK);
    remove(CSV);
    child c = start(-1, false, args);
    while (access(CHECK, F_OK) != 0) assert_int_equal(waitpid(c.pid, NULL, WNOHANG), 0);
    const bool listed = access(CSV, F_OK) == 0; // before there is a checkpoint
    assert_int_equal(kill(c.pid, SIGKILL), 0);
    finish(&c, &o, 0);
    assert_int_equal(o.status, -SIGKILL);
    assert_true(listed);
    char *before = bytes_of(CSV, &n_before);
    const outcome *again = RUN(small_path, "--data", TEXT_FILE, USUAL, "--lora", "3", "--steps",
                               "100", "--checkpoint", CHECK, "--csv", CSV, "--resume");
    expect_success(again);
    const char *label = "resumed    after step ", *at = strstr(again->out, label);
    if (!at) fail_msg("no %s in: %s", label, again->out);
    const int done = atoi(at + strlen(label));
    assert_true(done >= 3 && done % 3 == 0 && done < 100);
    for (int row = 1; row <= 100; row++) assert_int_equal(column(CSV, row, 0), row);
    char *after = bytes_of(CSV, &n_after);
    assert_true(before && after);
    const char *end = before; // of the rows up to the checkpoint
    for (int row = 0; row <= done; row++) {
        end = strchr(end, '\n');
        assert_non_null(end++);
    }
    assert_memory_equal(before, after, (size_t)(end - before));

    // A CSV that has lost its rows, and one of them twice: a resumed run says what is missing.
    const char *head_end = strchr(after, '\n') + 1, *row_end = strchr(head_end, '\n') + 1;
    FILE *f = fopen(CSV, "wb");
    assert_non_null(f);
    fprintf(f, "%.*s%.*s", (int)(row_end - after), after, (int)(row_end - head_end), head_end);
    assert_int_equal(fclose(f), 0);
    again = RUN(small_path, "--data", TEXT_FILE, USUAL, "--lora", "3", "--steps", "101",
                "--checkpoint", CHECK, "--csv", CSV, "--resume");
    expect_success(again);
    assert_non_null(strstr(again->out, CSV " has 1 of the 100 rows up to there"));
    assert_int_equal(column(CSV, 1, 0), 1);
    assert_int_equal(column(CSV, 2, 0), 101);
    free(after);
    free(before);
}

// The picture is gnuplot's; where there is none, the line says so and the other files are there.
static void test_plot(void **state) {
    (void)state;
    char path[4096];
    size_t size;
    snprintf(path, sizeof path, "%s", getenv("PATH"));
    assert_int_equal(system("mkdir -p " FOLDER "/bin"), 0);
    write_file(FOLDER "/bin/gnuplot", "#!/bin/sh\n/bin/cat >" FOLDER "/script\n");
    assert_int_equal(chmod(FOLDER "/bin/gnuplot", 0755), 0);
    assert_int_equal(setenv("PATH", FOLDER "/bin", 1), 0);
    expect_success(RESUMED("3", "--eval", TEXT_FILE, "--plot", FOLDER "/it's.svg"));
    char *script = bytes_of(FOLDER "/script", &size);
    assert_non_null(script);
    assert_non_null(strstr(script, "EOD\n1 "));
    assert_non_null(strstr(script, "\nEOD\nset terminal svg"));
    assert_non_null(strstr(script, "it''s.svg'\n"));
    assert_non_null(strstr(script, "held out"));
    free(script);
    assert_int_equal(setenv("PATH", FOLDER, 1), 0);
    remove(OUT);
    const outcome *o = RESUMED("3", "--plot", FOLDER "/x.png", "--out", OUT);
    assert_int_equal(o->status, 1);
    assert_non_null(strstr(o->err, "train: --plot: gnuplot is missing"));
    char *out = bytes_of(OUT, &size);
    assert_non_null(out);
    free(out);
    assert_int_equal(setenv("PATH", path, 1), 0);
}

// A file that is there stays as it is when the run fails.
static void expect_kept(const outcome *o, const char *words) {
    size_t size;
    expect_failure(o, words);
    char *out = bytes_of(OUT, &size);
    assert_non_null(out);
    assert_string_equal(out, "precious");
    free(out);
    assert_int_not_equal(system("ls " FOLDER "/*.part* >/dev/null 2>&1"), 0);
}

static void test_bad_input(void **state) {
    (void)state;
    write_file(OUT, "precious");
    write_file(FOLDER "/short.txt", "a cat");
    write_file(FOLDER "/empty.txt", "");
    write_file(FOLDER "/empty.jsonl", "\n\n");
#define WITH(...)                                                                                  \
    RUN(small_path, "--data", TEXT_FILE, USUAL, "--out", OUT, "--steps", "2", __VA_ARGS__)
    expect_kept(RUN("--data", TEXT_FILE), "train MODEL.gguf --data FILE");
    expect_kept(RUN(small_path), "train MODEL.gguf --data FILE");
    expect_kept(RUN(small_path, "--data", FOLDER "/none", "--out", OUT), "none: cannot be opened");
    expect_kept(RUN(FOLDER "/none", "--data", TEXT_FILE, "--out", OUT), FOLDER "/none");
    expect_kept(RUN(TEXT_FILE, "--data", TEXT_FILE, "--out", OUT), TEXT_FILE);
    expect_kept(RUN(small_path, "--data", FOLDER "/short.txt", USUAL, "--out", OUT),
                "tokens, fewer than a context of 32");
    expect_kept(RUN(small_path, "--data", FOLDER "/empty.txt", USUAL, "--out", OUT), "0 tokens");
    expect_kept(RUN(small_path, "--data", FOLDER "/empty.jsonl", USUAL, "--out", OUT), "0 tokens");
    expect_kept(WITH("--eval", FOLDER "/none"), "none: cannot be opened");
    expect_kept(WITH("--eval", FOLDER "/empty.txt"), "nothing to predict");
    expect_kept(WITH("--lora", "0"), "--lora cannot be \"0\"");
    expect_kept(WITH("--lora", "4", "--targets", "q,norm"), "no matrix \"norm\"");
    expect_kept(WITH("--targets", "q"), "needs --lora");
    expect_kept(WITH("--format", "q4_0"), "f32, f16 or bf16");
    expect_kept(WITH("--format", "f16", "--lora", "2"), "always f32");
    expect_kept(WITH("--resume"), "needs --checkpoint");
    expect_kept(WITH("--checkpoint", FOLDER "/none", "--resume"), FOLDER "/none");
    expect_kept(WITH("--checkpoint", LINES_FILE, "--resume"), LINES_FILE);
    expect_kept(WITH("--checkpoint", OUT), "named twice");
    expect_kept(WITH("--csv", OUT), "named twice");
    expect_kept(WITH("--checkpoint", small_path), "named twice");
    expect_kept(WITH("--csv", TEXT_FILE), "named twice");
    expect_kept(WITH("--csv", FOLDER "/./out.gguf"), "named twice");
    expect_kept(WITH("--checkpoint", FOLDER "/../train-program/new", "--csv", FOLDER "/new"),
                "named twice");
    remove(FOLDER "/link.svg");
    assert_int_equal(symlink("text.txt", FOLDER "/link.svg"), 0);
    expect_kept(WITH("--plot", FOLDER "/link.svg"), "named twice"); // gnuplot would write through it
    remove(FOLDER "/hard");
    assert_int_equal(link(TEXT_FILE, FOLDER "/hard"), 0);
    expect_kept(WITH("--checkpoint", FOLDER "/hard"), "named twice");
    expect_kept(WITH("--budget", "1K"), "at least");
    expect_kept(WITH("--bogus"), "--bogus");
    expect_kept(WITH("--context", "1"), "--context cannot be");
    const outcome *o = WITH("--csv", FOLDER "/none/x.csv"); // before a step is done
    expect_kept(o, "none/x.csv");
    assert_null(strstr(o->out, "step "));
    o = WITH("--plot", FOLDER "/none/x.svg");
    expect_kept(o, "none/x.svg");
    assert_null(strstr(o->out, "step "));
    o = WITH("--csv", FOLDER); // a folder
    expect_kept(o, FOLDER);
    assert_null(strstr(o->out, "step "));
    write_file(CSV, "kept");
    o = RUN(small_path, "--data", TEXT_FILE, USUAL, "--steps", "2", "--csv", CSV, "--out",
            FOLDER "/none/x.gguf");
    expect_kept(o, "none/x.gguf");
    size_t size;
    char *text = bytes_of(CSV, &size);
    assert_string_equal(text, "kept"); // as it is, where something else is refused
    free(text);
    expect_kept(WITH("--csv", FOLDER "/no\x1b[1m\n/x.csv"), FOLDER "/no?[1m?/x.csv");
    expect_kept(WITH("--eval", FOLDER "/no\x1b[1m\n"), FOLDER "/no?[1m?: cannot be opened");
    o = WITH("--checkpoint", FOLDER "/none/x.gguf"); // before a step is done
    expect_kept(o, "none/x.gguf");
    assert_null(strstr(o->out, "step "));
    o = RUN(small_path, "--data", TEXT_FILE, USUAL, "--steps", "2", "--out", FOLDER "/none/x.gguf");
    expect_failure(o, "none/x.gguf");
    assert_null(strstr(o->out, "step "));
}

// A pipe is opened once: its reader has all of the CSV.
static void test_csv_to_a_pipe(void **state) {
    (void)state;
    char *text = NULL;
    size_t size;
    assert_int_equal(system("cd " FOLDER " && rm -f pipe piped read && mkfifo pipe && "
                            "(timeout 60 cat pipe >piped; mv piped read) >/dev/null 2>&1 &"), 0);
    expect_success(RUN(small_path, "--data", TEXT_FILE, USUAL, "--steps", "2", "--csv",
                       FOLDER "/pipe"));
    for (int i = 0; i < 100 && !text; i++) {
        text = bytes_of(FOLDER "/read", &size);
        if (!text) nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    }
    assert_non_null(text);
    assert_ptr_equal(strstr(text, csv_head), text);
    assert_non_null(strstr(text, "\n2,"));
    free(text);
}

// The sum that a checkpoint should hold: of its fingerprint, train.user and all other tensors.
static uint64_t sum_of(const char *data, size_t size) {
    const rocq_gguf_desc desc = {.data = data, .size = (int64_t)size};
    rocq_ctx *ctx = NULL;
    rocq_gguf *file = NULL;
    rocq_gguf_value user;
    rocq_gguf_tensor t;
    uint64_t sum = 0;
    assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
    assert_int_equal(rocq_gguf_open(ctx, &file, &desc), ROCQ_OK);
    assert_int_equal(rocq_gguf_get_u64(file, "train.fingerprint", &sum), ROCQ_OK);
    assert_int_equal(rocq_gguf_find_value(file, "train.user", &user), ROCQ_OK);
    sum = train__hash(sum, user.data, 8 * sizeof(uint64_t));
    for (int64_t i = 0; i + 1 < rocq_gguf_tensor_count(file); i++) {
        assert_int_equal(rocq_gguf_tensor_at(file, i, &t), ROCQ_OK);
        sum = train__hash(sum, data + t.offset, (size_t)t.size);
    }
    rocq_gguf_close(&file);
    rocq_close(&ctx);
    return sum;
}

// A checkpoint in which somebody has written: the contexts seen, or a float of the state.
static void forge(const char *data, size_t size, int user, uint64_t seen, int place, float value) {
    char *forged = (char *)malloc(size), *at = forged;
    uint64_t sums[TRAIN__SUMS];
    assert_non_null(forged);
    memcpy(forged, data, size);
    while (memcmp(at, "train.user", 10) != 0) at++;
    if (user >= 0) memcpy(at + 10 + 16 + 8 * user, &seen, sizeof seen); // type, type, count
    else memcpy(forged + size - sizeof sums - 4 * ROCQ_TRAIN_STATE + 4 * place, &value, 4);
    sums[0] = sum_of(forged, size);
    for (int i = 1; i < TRAIN__SUMS; i++) sums[i] = sums[0];
    memcpy(forged + size - sizeof sums, sums, sizeof sums);
    write_bytes(FOLDER "/forged.gguf", forged, size);
    free(forged);
}

static void test_forged_checkpoints(void **state) {
    (void)state;
    static const uint64_t seen[] = {UINT64_MAX, (uint64_t)1 << 63, INT64_MAX, 3, 5};
    static const struct {
        int place;
        float value;
    } list[] = {{0, 0}, {0, -1}, {0, NAN}, {0, INFINITY}, {0, 1e30f}, {3, NAN}, {3, -1}, {3, 1e30f},
                {3, 1.5f}, {4, INFINITY}, {4, -2}, {5, NAN}, {5, -1}};
    size_t size;
    remove(CHECK);
    expect_success(RESUMED("2", "--checkpoint", CHECK));
    char *data = bytes_of(CHECK, &size);
    assert_non_null(data);
    write_file(OUT, "precious");
    forge(data, size, 0, 4, 0, 0); // as it was
    expect_success(RESUMED("2", "--checkpoint", FOLDER "/forged.gguf", "--resume"));
    for (size_t i = 0; i < sizeof seen / sizeof *seen; i++) {
        forge(data, size, 0, seen[i], 0, 0);
        expect_kept(RESUMED("4", "--checkpoint", FOLDER "/forged.gguf", "--resume", "--out", OUT),
                    "of a run with other data");
    }
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        forge(data, size, -1, 0, list[i].place, list[i].value);
        expect_kept(RESUMED("4", "--checkpoint", FOLDER "/forged.gguf", "--resume", "--out", OUT),
                    "make no sense");
    }
    data[size - sizeof(uint64_t) * TRAIN__SUMS - 1] ^= 1; // of a number that no step reads
    write_bytes(FOLDER "/forged.gguf", data, size);
    expect_kept(RESUMED("4", "--checkpoint", FOLDER "/forged.gguf", "--resume", "--out", OUT),
                "has changed since it was written");
    free(data);
    // Lines of a CSV that are none of a run's are left out.
    write_file(CSV, "step,epoch\nnan,1,1,1,1,1,1\n1e300,1,1,1,1,,1\n-3,1,1,1,1,,1\n,,,,,,\n7\n"
                    "1,0.5,2.5,0.001,1,,9\n");
    expect_success(RESUMED("3", "--checkpoint", CHECK, "--resume", "--csv", CSV));
    assert_true(fabs(column(CSV, 1, 2) - 2.5) < 1e-9);
    assert_int_equal(column(CSV, 2, 0), 3);
}

static void test_foreign_checkpoints(void **state) {
    (void)state;
    remove(CHECK);
    expect_success(RESUMED("2", "--checkpoint", CHECK));
    write_file(OUT, "precious");
    expect_kept(RESUMED("4", "--checkpoint", CHECK, "--resume", "--out", OUT, "--seed", "5"),
                "of a run with other data");
    expect_kept(RESUMED("4", "--checkpoint", CHECK, "--resume", "--out", OUT, "--batch", "3"),
                "of a run with other data");
    expect_kept(RESUMED("4", "--checkpoint", CHECK, "--resume", "--out", OUT, "--data", LINES_FILE),
                "of a run with other data");
    expect_kept(RESUMED("4", "--checkpoint", CHECK, "--resume", "--out", OUT, "--alpha", "9"),
                "another model");
    expect_kept(RUN(other_path, "--data", TEXT_FILE, "--documents", USUAL, "--lora", "3", "--steps",
                    "4", "--checkpoint", CHECK, "--resume", "--out", OUT), "another model");
}

// A model with a weight that is not finite: each step is skipped, counted and said, and at last the
// program gives up. (F32 has no finite gradient anywhere then.)
static void poison(void) {
    size_t size;
    char *data = bytes_of(other_path, &size);
    const float nan = NAN;
    assert_non_null(data);
    memcpy(data + size - 400, &nan, sizeof nan); // in the output matrix
    write_bytes(FOLDER "/nan.gguf", data, size);
    free(data);
}

static void test_not_finite(void **state) {
    (void)state;
    poison();
    write_file(OUT, "precious");
    const outcome *o =
        RUN(FOLDER "/nan.gguf", "--data", TEXT_FILE, USUAL, "--steps", "100", "--out", OUT);
    expect_kept(o, "no gradient is finite");
    assert_non_null(
        strstr(o->out, "step      7  was skipped: its gradient is not finite (7 so far)"));
    o = RUN(FOLDER "/nan.gguf", "--data", TEXT_FILE, USUAL, "--steps", "3");
    expect_success(o);
}

static void test_no_memory(void **state) {
    (void)state;
    const char *args[] = {small_path, "--data", LINES_FILE, USUAL, "--steps", "2", "--lora", "2",
                          "--eval", LINES_FILE, "--checkpoint", CHECK, "--out", OUT, "--csv", CSV,
                          "--budget", "1M", NULL};
    const outcome *o = run_with(-1, args);
    expect_success(o);
    const int64_t n = o->calls;
    assert_true(n > 50 && n < 3000);
    const int64_t stride = n < 300 ? 1 : n / 150; // all of them, or some
    for (int64_t k = 0; k < n; k += stride) expect_failure(run_with(k, args), "");
    printf("# %d of %d allocations denied\n", (int)((n + stride - 1) / stride), (int)n);
}

int main(int argc, char **argv) {
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_training),      cmocka_unit_test(test_lines),
        cmocka_unit_test(test_resume),        cmocka_unit_test(test_interrupt),
        cmocka_unit_test(test_full_disk),     cmocka_unit_test(test_killed),
        cmocka_unit_test(test_plot),          cmocka_unit_test(test_bad_input),
        cmocka_unit_test(test_csv_to_a_pipe),
        cmocka_unit_test(test_foreign_checkpoints), cmocka_unit_test(test_forged_checkpoints),
        cmocka_unit_test(test_texts),
        cmocka_unit_test(test_not_finite),    cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
