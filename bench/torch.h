// torch.h - PyTorch as a peer, in a process of its own: bench/PROGRAM_torch.py reads a line, does
// what it says, and answers with a line, which begins with a number, or with "no" and the reason.
// What is too long for a line goes through files in a folder that both know. Needs bench.h.

#ifndef TORCH_H
#define TORCH_H

#include <stdarg.h>

typedef struct torch_peer {
    FILE *to, *from; // NULL: no PyTorch
    char folder[64], reply[512];
    pid_t pid;
} torch_peer;

BENCH_FN void torch__become(const torch_peer *p, const bench *b, const char *python, const int *to,
                            const int *from) {
    char threads[16], script[64];
    snprintf(threads, sizeof threads, "%d", (int)b->n_threads);
    snprintf(script, sizeof script, "bench/%s_torch.py", b->program);
    dup2(to[0], 0);
    dup2(from[1], 1);
    close(to[1]);
    close(from[0]);
    execlp(python, python, script, "--device", b->gpu ? "cuda" : "cpu", "--threads", threads,
           "--folder", p->folder, (char *)NULL);
    _exit(127);
}

// With the first of python3 and /usr/bin/python3 that has it. False: there is none, but the folder
// is there.
BENCH_FN bool torch_start(torch_peer *p, const bench *b) {
    static const char *const pythons[] = {"python3", "/usr/bin/python3"};
    char command[600];
    int to[2], from[2];
    memset(p, 0, sizeof *p);
    snprintf(p->folder, sizeof p->folder, "/tmp/rocq-%s-%d", b->program, (int)getpid());
    if (mkdir(p->folder, 0700) != 0) return false;
    for (int i = 0; i < 2; i++) {
        snprintf(command, sizeof command, "%s -c 'import torch' 2>/dev/null", pythons[i]);
        if (system(command) != 0) continue;
        if (pipe(to) != 0 || pipe(from) != 0) return false;
        p->pid = fork();
        if (p->pid == 0) torch__become(p, b, pythons[i], to, from);
        close(to[0]);
        close(from[1]);
        p->to = fdopen(to[1], "w");
        p->from = fdopen(from[0], "r");
        if (p->pid > 0 && p->to && p->from && fgets(p->reply, sizeof p->reply, p->from))
            return true;
        p->to = NULL;
        return false;
    }
    return false;
}

// The number of the answer, or below 0 where PyTorch says no.
__attribute__((format(printf, 2, 3))) BENCH_FN double torch_ask(torch_peer *p, const char *format,
                                                                ...) {
    va_list args;
    if (!p->to) return -1;
    va_start(args, format);
    vfprintf(p->to, format, args);
    va_end(args);
    fputc('\n', p->to);
    fflush(p->to);
    if (!fgets(p->reply, sizeof p->reply, p->from)) return -1;
    return strncmp(p->reply, "no", 2) == 0 ? -1 : atof(p->reply);
}

BENCH_FN void torch_end(torch_peer *p) {
    char command[100];
    if (p->to) fclose(p->to);
    if (p->from) fclose(p->from);
    if (p->pid > 0) waitpid(p->pid, NULL, 0);
    snprintf(command, sizeof command, "rm -rf '%s'", p->folder);
    if (p->folder[0] && system(command) != 0) fprintf(stderr, "%s is left\n", p->folder);
}

#endif
