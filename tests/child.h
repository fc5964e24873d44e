// Runs an example's main() in a child process whose output is caught, with every allocation
// counted, and denied on request. A test includes counted.h, then the example with `main` and the
// allocation functions renamed, then cmocka.h, which has a macro of the name of a function of
// program.h, and this.

#ifndef TESTS_CHILD_H
#define TESTS_CHILD_H

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LEAKED = 99, N_ARGS = 40 };

typedef struct outcome {
    int status; // exit status, or minus the signal that ended it
    char out[1 << 17], err[20000]; // out: more than a pipe holds when Ctrl-C comes late
    int64_t calls; // allocations
} outcome;

typedef struct child {
    pid_t pid;
    int out, err, calls; // read ends
} child;

// As one writes to a terminal: a pseudo-terminal in place of a pipe.
static void open_terminal(int ends[2]) {
    ends[0] = posix_openpt(O_RDWR | O_NOCTTY);
    assert_true(ends[0] >= 0 && grantpt(ends[0]) == 0 && unlockpt(ends[0]) == 0);
    ends[1] = open(ptsname(ends[0]), O_RDWR | O_NOCTTY);
    assert_true(ends[1] >= 0);
}

// Runs main() in a child, with the allocation number `failing` denied, or none (-1).
static child start(int64_t failing, bool terminal, const char *const *args) {
    child c;
    int out[2], err[2], calls[2];
    assert_true(pipe(out) == 0 && pipe(calls) == 0);
    if (terminal) open_terminal(err);
    else assert_int_equal(pipe(err), 0);
    fflush(NULL);
    c.pid = fork();
    assert_true(c.pid >= 0);
    if (c.pid == 0) {
        char *argv[N_ARGS + 1] = {(char *)PROGRAM};
        int argc = 1;
        while (args[argc - 1]) {
            argv[argc] = (char *)(uintptr_t)args[argc - 1]; // main does not write to it
            argc++;
        }
        dup2(out[1], 1);
        dup2(err[1], 2);
        fail_at = failing;
        n_live = n_calls = 0;
        int status = program_main(argc, argv);
        if (write(calls[1], &n_calls, sizeof n_calls) != sizeof n_calls) status = LEAKED;
        if (n_live != 0) fprintf(stderr, "%d blocks are still allocated\n", (int)n_live);
        exit(n_live == 0 ? status : LEAKED); // where the leak checker looks too
    }
    close(out[1]);
    close(err[1]);
    close(calls[1]);
    c.out = out[0];
    c.err = err[0];
    c.calls = calls[0];
    return c;
}

static size_t read_all(int fd, char *to, size_t size, size_t used) {
    ssize_t n;
    while (used + 1 < size && (n = read(fd, to + used, size - 1 - used)) > 0) used += (size_t)n;
    to[used] = 0;
    close(fd);
    return used;
}

static void finish(child *c, outcome *o, size_t n_out) {
    int status = 0;
    read_all(c->out, o->out, sizeof o->out, n_out);
    read_all(c->err, o->err, sizeof o->err, 0);
    o->calls = 0;
    if (read(c->calls, &o->calls, sizeof o->calls) < 0) o->calls = -1;
    close(c->calls);
    assert_int_equal(waitpid(c->pid, &status, 0), c->pid);
    o->status = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static const outcome *run_with(int64_t failing, const char *const *args) {
    static outcome o;
    child c = start(failing, false, args);
    finish(&c, &o, 0);
    return &o;
}

// The arguments as a list: RUN("-m", path, ...).
#define RUN(...) run_with(-1, (const char *const[]){__VA_ARGS__, NULL})

static void expect_success(const outcome *o) {
    if (o->status != 0) fail_msg("exit status %d: %s", o->status, o->err);
}

// Exit status 1, no text, and one line on stderr that names the program and holds `words`.
static void expect_failure(const outcome *o, const char *words) {
    const char *end = strchr(o->err, '\n');
    if (o->status != 1 || !end || end[1] ||
        strncmp(o->err, PROGRAM ": ", sizeof PROGRAM + 1) != 0 || !strstr(o->err, words) ||
        strlen(o->err) < 15)
        fail_msg("exit status %d, expected 1 and a line with \"%s\", not: %s", o->status, words,
                 o->err);
}

// What follows `label` in the statistics.
static inline double statistic(const outcome *o, const char *label) {
    const char *at = strstr(o->err, label);
    if (!at) fail_msg("no %s in: %s", label, o->err);
    return strtod(at + strlen(label), NULL);
}

#endif // TESTS_CHILD_H
