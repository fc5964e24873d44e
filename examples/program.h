// program.h - what example programs have in common: options, failures in one line on stderr that
// begins with PROGRAM, progress on a terminal, signals, the device, files that get their name when
// whole.

#ifndef PROGRAM_H
#define PROGRAM_H

#include "../rocq.h"

#define DS_PROGRAM PROGRAM // see ds.h

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(_WIN32)
#include <io.h>
#else
#include <sys/stat.h>
#include <unistd.h>
#endif

#if defined(__cplusplus) && defined(__GNUC__) // g++ counts fields that are left zero as forgotten
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#endif

// ---------------------------------------------------------------------------------------------
// Failures, time, terminal
// ---------------------------------------------------------------------------------------------

// A path as it is in rocq's messages.
typedef struct shown_path {
    char text[512];
} shown_path;

static inline shown_path shown(const char *path) {
    shown_path name;
    snprintf(name.text, sizeof name.text, "%.511s", path);
    rocq_message_clean(name.text, sizeof name.text);
    return name;
}

// what: a file, an option. It is left out where why, which may be rocq's message, names it.
static inline bool fail(const char *what, const char *why) {
    const shown_path name = shown(what);
    const bool named = strstr(why, name.text) != NULL;
    char line[1100];
    snprintf(line, sizeof line, "%s%s%s", named ? "" : name.text, named ? "" : ": ", why);
    rocq_message_clean(line, sizeof line);
    fprintf(stderr, PROGRAM ": %s\n", line);
    return false;
}

// What was printed may still not have arrived: on a full disk, or where the stream is closed.
static inline bool close_streams(void) {
    const bool printed = !ferror(stdout), said = !ferror(stderr);
    if (fclose(stdout) != 0 || !printed) return fail("stdout", "cannot be written");
    return said;
}

static inline double seconds(void) { return 1e-9 * (double)rocq_time_ns(); }

static inline bool is_terminal(int file) {
#if defined(_WIN32)
    return _isatty(file) != 0;
#else
    return isatty(file) != 0;
#endif
}

// One line that is overwritten and at last erased; `last` if nothing follows.
static inline void print_progress(const char *what, int64_t done, int64_t total, bool last) {
    if (done > 0 && done < total && !last) {
        fprintf(stderr, "\r%s %d%% ", what, (int)(100 * done / total));
    } else if (done > 0) {
        fprintf(stderr, "\r%*s\r", (int)strlen(what) + 6, "");
    }
}

// ---------------------------------------------------------------------------------------------
// Stopping
// ---------------------------------------------------------------------------------------------

// A signal that asks for the end is kept, so that the work stops at its next step and cleans up.
static volatile sig_atomic_t stopped; // its number, or 0
static rocq_ctx *to_cancel;           // what runs is stopped too; set before signals are caught

static inline void on_signal(int number) {
    if (stopped) signal(number, SIG_DFL); // a third one ends at once
    else signal(number, on_signal);       // some systems forget the function when they call it
    stopped = number;
    if (to_cancel) rocq_cancel(to_cancel);
}

static inline void catch_signal(int number) {
    if (signal(number, on_signal) == SIG_IGN) signal(number, SIG_IGN); // as nohup wants
}

static inline void catch_signals(void) {
    catch_signal(SIGINT);
    catch_signal(SIGTERM);
#if !defined(_WIN32)
    catch_signal(SIGHUP);
    catch_signal(SIGPIPE);
    signal(SIGXFSZ, SIG_IGN); // a file-size limit then is a write that fails
#endif
}

// What main returns, once all is cleaned up. After a signal it ends as that would have ended it.
static inline int end_program(bool good) {
    if (stopped && !good) {
        signal(stopped, SIG_DFL);
        raise(stopped);
    }
    return good ? 0 : 1;
}

// ---------------------------------------------------------------------------------------------
// Options
// ---------------------------------------------------------------------------------------------

enum { FLAG, TEXT, TEXTS, DEVICE, PRECISION, SHARING, INTEGER, NUMBER, SEED, BYTES };

typedef struct option {
    const char *name;
    int type;
    double low, high;
    void *to; // bool, const char *, texts, int32_t, float, uint64_t or int64_t, by type; a name's
              // place in its list
} option;

typedef struct texts { // of an option that may be given several times
    const char *text[8];
    int32_t n;
} texts;

// A file beside this one's source, wherever the program is started.
static inline const char *beside_source(const char *name, char *path, size_t size) {
    const char *source = __FILE__, *end = source + strlen(source);
    while (end > source && end[-1] != '/' && end[-1] != '\\') end--;
    snprintf(path, size, "%.*s%s", (int)(end - source), source, name);
    return path;
}

// Stores an option's value; false when it is none.
static inline bool parse_value(const char *text, const option *o) {
    // In the order of rocq_backend, rocq_precision and rocq_sharing.
    static const char *const names[3][4] = {{"auto", "cpu", "gpu", NULL},
                                            {"auto", "f32", "f16", "int8"},
                                            {"balanced", "graphics", "compute", NULL}};
    const bool named = o->type >= DEVICE && o->type <= SHARING;
    const char *const *list = names[named ? o->type - DEVICE : 0];
    int32_t at = 0;
    char *end;
    double x = strtod(text, &end);
    // else " 1", 0x1f, nan
    const bool plain = end > text && strspn(text, "+-.0123456789eE") >= (size_t)(end - text);
    if (o->type == BYTES && *end != '\0' && strchr("KMG", *end)) {
        x = ldexp(x, *end == 'K' ? 10 : *end == 'M' ? 20 : 30);
        end++;
    }
    const bool number = plain && *end == '\0' && x >= o->low && x <= o->high;
    switch (o->type) {
    case TEXT: *(const char **)o->to = text; return true;
    case TEXTS: {
        texts *all = (texts *)o->to;
        if (all->n == 8) return false;
        all->text[all->n++] = text;
        return true;
    }
    case DEVICE:
    case PRECISION:
    case SHARING:
        while (at < 4 && list[at] && strcmp(text, list[at]) != 0) at++;
        *(int32_t *)o->to = at;
        return at < 4 && list[at];
    case NUMBER:
        if (number) *(float *)o->to = (float)x;
        return number;
    case SEED:
        if (number) *(uint64_t *)o->to = (uint64_t)x;
        return number && x == floor(x);
    case BYTES:
        if (number) *(int64_t *)o->to = (int64_t)x;
        return number;
    default:
        if (number) *(int32_t *)o->to = (int32_t)x;
        return number && x == floor(x);
    }
}

// False, after a line on stderr, when an option is unknown or its value wrong.
static inline bool parse_options(const option *table, size_t n, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        size_t k = 0;
        while (k < n && strcmp(argv[i], table[k].name) != 0) k++;
        if (k == n) {
            fprintf(stderr, PROGRAM ": there is no option %s, see --help\n", argv[i]);
            return false;
        }
        if (table[k].type == FLAG) {
            *(bool *)table[k].to = true;
        } else if (++i == argc) {
            fprintf(stderr, PROGRAM ": option %s needs a value, see --help\n", table[k].name);
            return false;
        } else if (!parse_value(argv[i], &table[k])) {
            fprintf(stderr, PROGRAM ": option %s cannot be \"%s\"", table[k].name, argv[i]);
            if (table[k].type < INTEGER) fprintf(stderr, ", see --help\n");
            else fprintf(stderr, ", only %snumbers from %.16g to %.16g%s\n",
                         table[k].type == INTEGER || table[k].type == SEED ? "whole " : "",
                         table[k].low, table[k].high,
                         table[k].type == BYTES ? "; K, M and G are 2^10, 2^20 and 2^30" : "");
            return false;
        }
    }
    return true;
}

// ---------------------------------------------------------------------------------------------
// The device
// ---------------------------------------------------------------------------------------------

enum { REASON_SIZE = 512 };

// Why rocq_open fails is only said here: there is no context then to ask.
static inline void keep_reason(rocq_log_level level, const char *message, void *user) {
    if (level == ROCQ_LOG_ERROR) snprintf((char *)user, REASON_SIZE, "%s", message);
}

static inline bool open_device(rocq_ctx **ctx, rocq_desc desc) {
    static char reason[REASON_SIZE]; // where the context logs for as long as it is open
    rocq_info info;
    desc.log = keep_reason;
    desc.log_user = reason;
    desc.rocm_path = getenv("ROCM_PATH");
    desc.hip_path = getenv("HIP_PATH");
    const rocq_result result = rocq_open(ctx, &desc);
    if (result != ROCQ_OK) {
        return fail("device", *reason ? reason : rocq_result_message(result));
    }
    // The GPU was only a wish, and one worth a word where there are kernels for it.
    rocq_get_info(*ctx, &info);
    const bool no_kernels = info.gpu_result == ROCQ_E_NO_KERNELS && !desc.kernels_path;
    if (info.backend == ROCQ_BACKEND_CPU && desc.prefer != ROCQ_BACKEND_CPU &&
        info.gpu_result != ROCQ_OK && !no_kernels) {
        fprintf(stderr, PROGRAM ": on the CPU: %s\n", info.gpu_message);
    }
    if (info.ignored[0]) fprintf(stderr, PROGRAM ": --sharing: ignored: %s\n", info.ignored);
    return true;
}

static inline rocq_stats get_stats(const rocq_ctx *ctx) {
    rocq_stats stats;
    if (rocq_get_stats(ctx, &stats) != ROCQ_OK) memset(&stats, 0, sizeof stats);
    return stats;
}

static inline void print_device(const rocq_info *info) {
    fprintf(stderr, "%-20s %s\n", "device", info->device);
    if (info->backend != ROCQ_BACKEND_GPU) return;
    char target[16] = "other";
    if (info->target != 0) snprintf(target, sizeof target, "gfx%x", (unsigned)info->target);
    fprintf(stderr, "%-20s %s, kernels: %s, runtime: %s\n", "target", target, info->kernels,
            info->runtime);
}

// ---------------------------------------------------------------------------------------------
// Files
// ---------------------------------------------------------------------------------------------

// Whether two paths lead to one file, or to one name in one folder where there is none yet: by
// another spelling, a link. On Windows only the spelling counts.
static inline bool same_file(const char *a, const char *b) {
    if (strcmp(a, b) == 0) return true;
#if !defined(_WIN32)
    const char *path[2] = {a, b}, *name[2];
    struct stat file[2], folder[2];
    int n_files = 0, n_folders = 0;
    for (int i = 0; i < 2; i++) {
        char up[4096];
        const char *slash = strrchr(path[i], '/');
        name[i] = slash ? slash + 1 : path[i];
        if (strlen(path[i]) >= sizeof up) return false; // longer than any that can be opened
        snprintf(up, sizeof up, "%.*s", slash ? (int)(name[i] - path[i]) : 1,
                 slash ? path[i] : ".");
        n_files += stat(path[i], &file[i]) == 0;
        n_folders += stat(up, &folder[i]) == 0;
    }
    if (n_files == 2 && file[0].st_dev == file[1].st_dev && file[0].st_ino == file[1].st_ino) {
        return true;
    }
    return n_folders == 2 && folder[0].st_dev == folder[1].st_dev &&
           folder[0].st_ino == folder[1].st_ino && strcmp(name[0], name[1]) == 0;
#else
    return false;
#endif
}

static inline bool is_pipe(const char *path) {
#if !defined(_WIN32)
    struct stat file;
    return stat(path, &file) == 0 && S_ISFIFO(file.st_mode);
#else
    (void)path;
    return false;
#endif
}

static inline bool create_file(rocq_ctx *ctx, rocq_file **out, const char *path) {
    return rocq_file_open(ctx, out, path) == ROCQ_OK || fail(path, rocq_error(ctx));
}

// result: of the call that wrote the file. Where a write failed only the file knows why:
// rocq_file_close, though asked to keep it, then throws it away and gives the reason.
static inline bool finish_file(rocq_ctx *ctx, rocq_file **out, const char *path,
                               rocq_result result) {
    const bool write_failed = result == ROCQ_E_IO;
    if (result == ROCQ_OK || write_failed) result = rocq_file_close(out, true);
    else rocq_file_close(out, false);
    return result == ROCQ_OK || fail(path, rocq_error(ctx));
}

// path NULL = no report is wanted.
static inline bool write_report(rocq_ctx *ctx, const char *path, rocq_report kind) {
    rocq_file *out = NULL;
    if (!path) return true;
    return create_file(ctx, &out, path) &&
           finish_file(ctx, &out, path, rocq_profile_report(ctx, kind, rocq_file_write, out));
}

static inline bool write_stderr(const void *src, int64_t size, void *user) {
    (void)user;
    return fwrite(src, 1, (size_t)size, stderr) == (size_t)size;
}

#endif // PROGRAM_H
