// bench.h - what the measuring programs of this folder share: options, verified and repeated
// timing, statistics, the machine and its ceilings, results as JSON.
//
//     #include "bench.h" // first: it brings the implementation of rocq.h
//
//     int main(int argc, char **argv) {
//         bench b;
//         if (!bench_open(&b, argc, argv, "matmul")) return 1;
//         bench_case c = {.name = "matmul/Q4_K/4096x4096/n1", .bytes = w_bytes,
//                         .flops = 2.0 * m * k, .run = product, .verify = right, .user = &state};
//         if (bench_wants(&b, c.name)) { ...make its data...; bench_run(&b, &c); }
//         return bench_close(&b);
//     }
//
//     gcc -O2 -I. bench/NAME.c -o NAME -lm -ldl -lpthread      CPU, or a GPU with --kernels FILE
//     gcc -O2 -I. bench/NAME.c kernels.o probe.o -o NAME ...   kernels linked (probe.o: probe.hip)
//
// Programs use what rocq.h declares and nothing private: with -DBENCH_EXTERNAL the implementation
// comes from a library, compiled once for all of them. One that must look below the API defines
// ROCQ_IMPLEMENTATION before it includes this file. tests/run bench builds them all with the
// warnings of the examples (-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror), and runs their
// tiny cases.
//
// Options of every program:
//     FILTER...        only cases whose name contains one of these, or is one of these: "NAME$"
//     --json FILE      where results go; the file is whole after every case, so what was measured
//                      is there when a run is stopped: by Ctrl-C, a time limit or a crash
//     --device D       auto (default), cpu or gpu
//     --kernels FILE   code object of rocq_kernels.hip
//     --threads N      of the CPU context; default one per core
//     --seconds S      most a case may take to settle; default 3
//     --warm           operands may stay in caches (see bench_copies)
//     --disturb        another process keeps one core busy while cases are measured (not the
//                      ceilings): the last core this program may use, which it shares with the
//                      program's threads. It ends with the program, however that ends
//     --turns IN,OUT   samples are taken in turn with another process that has the same cases: see
//                      "Turns"
//     --tiny           smallest sizes, five samples: shows that a program works, measures nothing
//
// How a time is taken: run once and verify; warm up; find how many runs a sample needs to be long
// against the clock and the wait for the GPU; then take samples until the 95% confidence interval
// of their median (by order statistics, so of no assumed distribution) is no wider than 2% of it,
// at least 5 and at most 300, or until the time is up. Cases that are compared are sampled in turn,
// every second round backwards, so that what changes with time meets all of them.
//
// Turns: two builds of a program are compared sample by sample, by bench/compare --turns, so that a
// machine whose speed changes changes both. Before its every sample of a case a process reads a
// number from the file descriptor IN, and afterwards it writes one to OUT. The one that is first
// decides for both how many runs a sample is, and when there are samples enough: 100, or those of
// twice the seconds. A number above 0 is the runs of a sample, -1 stands for the last sample, and 0
// for nothing. A process that finds the pipe closed goes on alone.
//
// RESULTS, schema "rocq-bench 1" (bench/run merges the files of several programs into one like it):
//     schema    "rocq-bench 1"
//     program   its name; "all" when merged
//     rocq, commit, time    version; git's name of the sources or ""; UTC, ISO 8601
//     complete  false: stopped before its end
//     options   device, threads, seconds, warm, tiny, disturbed (of older results absent: false),
//               filters
//     machine   cpu, cores, cache_bytes (last level), memory_bytes, cpu_mhz and load (as read after
//               the probes), os, compiler, device (rocq's name of what ran), gpu: null, or name,
//               target, units, bytes, runtime, driver, clock_mhz, memory_mhz (as read; "" where
//               unknown)
//     ceilings  of this run: name (read, copy, f32, f16, int8), threads (0: GPU), value in bytes or
//               operations a second
//     cases     name; unit "ns"; n samples; min, median, mean, p95, p99, max, sd; ci: [low, high]
//               of the median; settled; samples in the order taken; batch (runs in a sample), inner
//               (ops in a run; times are of one op); bytes, flops (of one op), bytes_per_s,
//               flops_per_s (at the median); bound (memory, arithmetic or ""), share of its
//               ceiling (0: unknown); verified (null: nothing to verify); cold (its operands came
//               from memory); against (the case it is compared with, or null), ratio (its median
//               over that of `against`), ratio_ci
//     values    name, value, unit, verified: what is no time of a run
//     failed    name, why: could not run, or wrong. Not timed
//     skipped   name, why
//     later     of a baseline of which parts were renewed by hand, else absent: for each part the
//               commit, the time ("" if unknown), and cases, what the names of its cases begin with
// A number that is not finite is null.

#ifndef BENCH_H
#define BENCH_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#if !defined(ROCQ_IMPLEMENTATION) && !defined(BENCH_EXTERNAL)
#define ROCQ_IMPLEMENTATION
#endif
#include "../rocq.h"

#define DS_PROGRAM "bench"
#include "../examples/ds.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// g++ takes fields that a designated initialiser leaves out for forgotten ones.
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#endif

#define BENCH_FN __attribute__((unused)) static

// ---------------------------------------------------------------------------------------------
// Interface
// ---------------------------------------------------------------------------------------------

typedef enum bench_unit { BENCH_F32 = 0, BENCH_F16, BENCH_INT8, BENCH_N_UNITS } bench_unit;

// Zeroed fields are defaults.
typedef struct bench_case {
    const char *name;               // family/what/sizes, of one case only; copied
    double bytes, flops;            // that one run moves and computes; 0 = not of interest
    rocq_result (*run)(void *user); // on a GPU it submits
    void (*reset)(void *user);      // before every run, untimed; a sample is then one run
    bool (*verify)(void *user);     // after one run and sync: is the result right?
    rocq_result (*sync)(void *user); // ends a sample; default rocq_sync in a GPU context
    void (*enter)(void *user);      // before and after every sample, untimed: what is to rest while
    void (*leave)(void *user);      // other cases take their turn
    void *user;
    int64_t inner;                  // ops in one run, 0 = 1: times are given per op
    bool single;                    // a sample is one run: for what happens once (a first token)
    bool flush;                     // cold: empty the CPU's caches before every run, untimed
    bool warm;                      // its operands stay in caches, whatever the options say
    int32_t threads;                // CPU threads it uses, for the ceiling; 0 = the context's
    bench_unit unit;                // which arithmetic bounds it
} bench_case;

typedef struct bench_result {
    char *name, *against;
    double *samples;                // ns of one op, in the order taken
    int64_t n, batch, inner;
    rocq_summary summary;
    double ci[2], bytes, flops, bytes_per_s, flops_per_s, share, ratio, ratio_ci[2];
    const char *bound;
    bool settled, cold, verified, has_verify;
} bench_result;

typedef struct bench_note { // a value, or why there is none
    char *name, *text;      // text: unit or reason
    double value;
    bool verified;
} bench_note;

typedef struct bench {
    rocq_ctx *ctx;          // open, of the chosen device
    rocq_info info;         // of ctx
    bool gpu, tiny, cold;
    int32_t n_threads;      // of the CPU
    int64_t cache_bytes;    // last level cache of the device, or more
    double seconds;
    // Ceilings: bytes a second and operations a second, with one thread, and with all or on the
    // GPU; 0 where unknown.
    double read_1, read_all, copy_all, unit_1[BENCH_N_UNITS], unit_all[BENCH_N_UNITS];

    // private
    const char *program, *json, *device, *kernels;
    char **filters;
    int n_filters;
    char time[32], commit[64], *machine; // machine: as JSON
    bench_result *results;  // this and the next are arrays of stb_ds's
    bench_note *values, *failed, *skipped;
    unsigned char *flush;   // what bench_flush reads
    int turn_in, turn_out;  // file descriptors
    bool turns, terminal, finished, disturbed;
    pid_t disturber;        // the process that keeps a core busy; 0: none
} bench;

// Reads the options, opens the context, measures the ceilings. False: said why on stderr, or
// --help.
BENCH_FN bool bench_open(bench *b, int argc, char **argv, const char *program);

// Writes the results and frees everything. The exit status: 0, 1 when a case failed or was wrong,
// 130 when the run was stopped.
BENCH_FN int bench_close(bench *b);

// Whether this case, or with a name that ends in '/' any case below it, is to run: ask before its
// data is made. False too once the run is stopped.
BENCH_FN bool bench_wants(const bench *b, const char *name);

// Verifies and times one case, prints its row and keeps its result, which is returned (until the
// next call); NULL when it did not run, was wrong or was stopped.
BENCH_FN const bench_result *bench_run(bench *b, const bench_case *c);

// The same for n cases in turn. cases[0] is what the others are compared with: their ratio is their
// time over its time. One of the others that fails or is wrong is left out. Returns the n results,
// NULL when any is missing.
BENCH_FN const bench_result *bench_run_pair(bench *b, const bench_case *cases, int n);

// A figure that is no time of a run. Not verified: counts as failed.
BENCH_FN void bench_value(bench *b, const char *name, double value, const char *unit,
                          bool verified);

BENCH_FN void bench_skip(bench *b, const char *name, const char *why); // cannot be measured here
BENCH_FN void bench_fail(bench *b, const char *name, const char *why); // the exit status is then 1

// How many copies of an operand of so many bytes are larger than the cache: used in turn, each is
// read from memory. 1 with --warm and --tiny.
BENCH_FN int64_t bench_copies(const bench *b, int64_t bytes);

// The arithmetic that an op takes with AUTO, which bounds it.
BENCH_FN bench_unit bench_unit_of(const bench *b, rocq_op op, const void *params);

// Empties the CPU's caches.
BENCH_FN void bench_flush(bench *b);

// Random numbers, the same on every run: uniform, and normal with unit variance.
BENCH_FN uint64_t bench_random(uint64_t *state);
BENCH_FN float bench_uniform(uint64_t *state, float low, float high);
BENCH_FN float bench_normal(uint64_t *state);

// Encodes rows; of a format that is only read, makes blocks of any bits with scales near 2^-9.
BENCH_FN rocq_result bench_encode(rocq_format format, void *dst, const float *src, int64_t n_rows,
                                  int64_t k);

// Normalised mean squared error of n floats: sum (got - want)^2 / sum want^2; infinite for NaN.
BENCH_FN double bench_nmse(const float *got, const float *want, int64_t n);

// Zeroed, 256-byte aligned memory, freed with free; ends the program where there is none.
BENCH_FN void *bench_alloc(int64_t size);

// ---------------------------------------------------------------------------------------------
// Small things
// ---------------------------------------------------------------------------------------------

static volatile sig_atomic_t bench__stopped;

BENCH_FN void bench__stop(int number) {
    (void)number;
    bench__stopped = 1; // the second time, the default action ends the program
}

BENCH_FN void bench__die(const char *why) {
    fprintf(stderr, "bench: %s\n", why);
    exit(1);
}

BENCH_FN void *bench_alloc(int64_t size) {
    const size_t n = ((size_t)(size > 0 ? size : 1) + 255) / 256 * 256;
    void *p = aligned_alloc(256, n);
    if (!p) bench__die("out of memory");
    memset(p, 0, n);
    return p;
}

BENCH_FN char *bench__copy(const char *text) {
    char *copy = strdup(text ? text : "");
    if (!copy) bench__die("out of memory");
    return copy;
}

BENCH_FN double bench__now(void) { // ns
    return (double)rocq_time_ns();
}

BENCH_FN uint64_t bench_random(uint64_t *state) { // splitmix64
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

BENCH_FN float bench_uniform(uint64_t *state, float low, float high) {
    return low + (high - low) * ((float)(bench_random(state) >> 40) * 0x1p-24f);
}

BENCH_FN float bench_normal(uint64_t *state) {
    const float radius = sqrtf(-2 * logf(bench_uniform(state, 0x1p-24f, 1)));
    return radius * cosf(6.28318531f * bench_uniform(state, 0, 1));
}

BENCH_FN rocq_result bench_encode(rocq_format format, void *dst, const float *src, int64_t n_rows,
                                  int64_t k) {
    const rocq_result result = rocq_quantize(format, dst, src, n_rows, k, NULL);
    const rocq_format_info *info = rocq_get_format_info(format);
    unsigned char *at = (unsigned char *)dst;
    uint64_t state = 3;
    if (result != ROCQ_E_UNSUPPORTED) return result;
    for (int64_t n = n_rows * k / info->block_elems; n > 0; n--, at += info->block_bytes) {
        for (int i = 0; i < info->block_bytes; i++) at[i] = (unsigned char)bench_random(&state);
        // the upper byte of d, an F16
        const int d = format == ROCQ_IQ1_M ? 55 : format == ROCQ_TQ1_0 ? 53
                    : format == ROCQ_TQ2_0 ? 65 : 1;
        if (format != ROCQ_NVFP4) at[d] = (unsigned char)((at[d] & 0x83) | 0x18);
        for (int i = 0; i < 4 && format == ROCQ_NVFP4; i++) at[i] = (unsigned char)(at[i] & 0x1f);
    }
    return ROCQ_OK;
}

BENCH_FN double bench_nmse(const float *got, const float *want, int64_t n) {
    double error = 0, power = 0;
    for (int64_t i = 0; i < n; i++) {
        error += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        power += (double)want[i] * want[i];
    }
    return error <= 0 ? 0 : error / power < INFINITY ? error / power : INFINITY;
}

BENCH_FN bench_unit bench_unit_of(const bench *b, rocq_op op, const void *params) {
    rocq_precision_info info = {.precision = ROCQ_PRECISION_F32};
    rocq_get_precision(b->ctx, op, params, &info);
    return info.precision == ROCQ_PRECISION_F32   ? BENCH_F32
           : info.precision == ROCQ_PRECISION_F16 ? BENCH_F16
                                                  : BENCH_INT8;
}

BENCH_FN int64_t bench_copies(const bench *b, int64_t bytes) {
    if (!b->cold || bytes <= 0) return 1;
    const int64_t n = (b->cache_bytes + b->cache_bytes / 4) / bytes + 2;
    return n < 256 ? n : 256;
}

// Reading as much as 5/4 of the last level, line by line, leaves nothing else in it.
BENCH_FN void bench_flush(bench *b) {
    const int64_t size = b->cache_bytes + b->cache_bytes / 4;
    if (!b->flush) b->flush = (unsigned char *)bench_alloc(size);
    uint64_t sum = 0;
    for (int64_t i = 0; i < size; i += 64) sum += b->flush[i];
    b->flush[sum % 64] = (unsigned char)sum;
}

BENCH_FN bool bench_wants(const bench *b, const char *name) {
    if (bench__stopped) return false;
    bool wanted = b->n_filters == 0;
    const size_t n = strlen(name), own = strlen(b->program);
    const bool below = n > 0 && name[n - 1] == '/'; // and the end of the names is not known yet
    for (int i = 0; i < b->n_filters; i++) {
        const char *f = b->filters[i];
        const size_t length = strcspn(f, "$"), shared = length < n ? length : n;
        const bool exact = f[length] == '$';
        const bool whole = exact || (strncmp(f, b->program, own) == 0 && f[own] == '/');
        const bool same = strncmp(f, name, shared) == 0; // from their starts
        wanted |= below ? !whole || same : exact ? same && length == n : strstr(name, f) != NULL;
    }
    return wanted;
}

// ---------------------------------------------------------------------------------------------
// Statistics
// ---------------------------------------------------------------------------------------------

// 95% interval of the median of n sorted samples: the order statistics whose ranks a binomial
// distribution with p = 1/2 leaves with 2.5% on either side. Below 6 samples, all of them.
BENCH_FN void bench__median_interval(const double *sorted, int64_t n, double ci[2]) {
    const double reach = 0.98 * sqrt((double)n);
    int64_t low = (int64_t)floor((double)n / 2 - reach);
    int64_t high = (int64_t)ceil((double)n / 2 + reach);
    if (low < 0) low = 0;
    if (high > n - 1) high = n - 1;
    ci[0] = sorted[low];
    ci[1] = sorted[high];
}

// 95% interval of median(a) / median(b) by the bootstrap: rounds are drawn, each with both its
// samples, so that what a round's two samples share stays shared.
BENCH_FN void bench__ratio_interval(const double *a, const double *b, int64_t n, double ci[2]) {
    enum { DRAWS = 1000 };
    double ratios[DRAWS];
    rocq_summary of_a, of_b;
    double *x = (double *)bench_alloc(2 * n * (int64_t)sizeof(double)), *y = x + n;
    uint64_t state = 1;
    for (int d = 0; d < DRAWS; d++) {
        for (int64_t i = 0; i < n; i++) {
            const uint64_t round = bench_random(&state) % (uint64_t)n;
            x[i] = a[round];
            y[i] = b[round];
        }
        rocq_summarize(&of_a, x, n);
        rocq_summarize(&of_b, y, n);
        ratios[d] = of_a.median / of_b.median;
    }
    rocq_summarize(&of_a, ratios, DRAWS); // for its sorting
    ci[0] = ratios[DRAWS / 40];
    ci[1] = ratios[DRAWS - 1 - DRAWS / 40];
    free(x);
}

// ---------------------------------------------------------------------------------------------
// The machine and its ceilings
// ---------------------------------------------------------------------------------------------

// What follows key and ": " in a file such as /proc/cpuinfo, or the first line with key NULL.
BENCH_FN void bench__read_line(FILE *f, const char *key, char *out, size_t size) {
    char line[512];
    snprintf(out, size, "%s", "");
    while (f && !*out && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        const char *value = line;
        if (key) {
            value = strncmp(line, key, strlen(key)) == 0 ? strchr(line, ':') : NULL;
            if (value) value += 1 + strspn(value + 1, " \t");
        }
        if (value) snprintf(out, size, "%s", value);
        if (!key) break;
    }
}

BENCH_FN void bench__file_line(const char *path, const char *key, char *out, size_t size) {
    FILE *f = fopen(path, "r");
    bench__read_line(f, key, out, size);
    if (f) fclose(f);
}

BENCH_FN void bench__command_line(const char *command, char *out, size_t size) {
    FILE *f = popen(command, "r");
    bench__read_line(f, NULL, out, size);
    if (f) pclose(f);
}

// Kernels of the probes, for each vector size: eight loads in flight, and more independent fused
// multiply-adds than their latency times the number of units. Their chains start from different
// numbers, since a compiler makes one of those that are alike.
#if defined(__GNUC__) && !defined(__clang__)
#define BENCH__FUSED optimize("fp-contract=fast"),
#else
#define BENCH__FUSED
#endif
#define BENCH__PROBES(name, bytes, ...)                                                            \
    typedef float bench__f_##name __attribute__((vector_size(bytes)));                             \
    typedef uint64_t bench__u_##name __attribute__((vector_size(bytes)));                          \
    __attribute__((__VA_ARGS__ noinline, unused)) static uint64_t bench__read_##name(              \
        const void *data, int64_t size) {                                                          \
        const bench__u_##name *p = (const bench__u_##name *)data;                                  \
        bench__u_##name s[8] = {p[0]};                                                             \
        for (int64_t i = 0; i + 8 <= size / bytes; i += 8) {                                       \
            s[0] += p[i], s[1] += p[i + 1], s[2] += p[i + 2], s[3] += p[i + 3];                    \
            s[4] += p[i + 4], s[5] += p[i + 5], s[6] += p[i + 6], s[7] += p[i + 7];                \
        }                                                                                          \
        s[0] += s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7];                                    \
        return s[0][0] + s[0][1];                                                                  \
    }                                                                                              \
    __attribute__((BENCH__FUSED __VA_ARGS__ noinline, unused)) static double bench__fma_##name(    \
        int64_t n, float x, float y) {                                                             \
        const bench__f_##name a = {x}, b = {y};                                                    \
        bench__f_##name s0 = a, s1 = s0 + b, s2 = s1 + b, s3 = s2 + b, s4 = s3 + b, s5 = s4 + b,   \
                        s6 = s5 + b, s7 = s6 + b, s8 = s7 + b, s9 = s8 + b;                        \
        for (int64_t i = 0; i < n; i++) {                                                          \
            s0 = s0 * a + b, s1 = s1 * a + b, s2 = s2 * a + b, s3 = s3 * a + b, s4 = s4 * a + b;   \
            s5 = s5 * a + b, s6 = s6 * a + b, s7 = s7 * a + b, s8 = s8 * a + b, s9 = s9 * a + b;   \
        }                                                                                          \
        s0 = s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7 + s8 + s9;                                      \
        return s0[0];                                                                              \
    }
#define BENCH__FMA_OPS(bytes) (2.0 * 10 * (bytes) / 4) // of one round of the loop
BENCH__PROBES(base, 16, )
#if defined(__x86_64__)
BENCH__PROBES(avx2, 32, target("avx2,fma"), )
BENCH__PROBES(avx512, 64, target("avx512f"), )

// Sums of products of bytes. AVX2 takes three instructions for it, of which the first has the sum
// as an operand, so that none can be moved out of the loop.
#define BENCH__VNNI(s) s = _mm512_dpbusd_epi32(s, a, a)
#define BENCH__AVX2(s) s = _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_maddubs_epi16(a, s), a))
#define BENCH__DOTS(name, vector, set1, add, ...)                                                  \
    __attribute__((__VA_ARGS__, noinline, unused)) static int bench__dot_##name(int64_t n,         \
                                                                                int x) {           \
        const vector a = set1(x);                                                                  \
        vector s0 = set1(x + 1), s1 = set1(x + 2), s2 = set1(x + 3), s3 = set1(x + 4),             \
               s4 = set1(x + 5), s5 = set1(x + 6), s6 = set1(x + 7), s7 = set1(x + 8),             \
               s8 = set1(x + 9), s9 = set1(x + 10);                                                \
        for (int64_t i = 0; i < n; i++) {                                                          \
            add(s0), add(s1), add(s2), add(s3), add(s4);                                           \
            add(s5), add(s6), add(s7), add(s8), add(s9);                                           \
        }                                                                                          \
        const vector all[10] = {s0, s1, s2, s3, s4, s5, s6, s7, s8, s9};                           \
        int sum = 0, first;                                                                        \
        for (int c = 0; c < 10; c++) memcpy(&first, &all[c], sizeof first), sum ^= first;          \
        return sum;                                                                                \
    }
BENCH__DOTS(vnni, __m512i, _mm512_set1_epi32, BENCH__VNNI, target("avx512f,avx512vnni"))
BENCH__DOTS(avx2, __m256i, _mm256_set1_epi32, BENCH__AVX2, target("avx2"))
#define BENCH__DOT_OPS(bytes) (2.0 * 10 * (bytes))
#endif

typedef struct bench__probe {
    const unsigned char *data; // to be read; NULL: arithmetic
    bench_unit unit;           // of which kind
    int64_t size;              // bytes, or rounds
    double ops;                // out: of arithmetic
} bench__probe;

static volatile double bench__sink; // what keeps the compiler from leaving the probes out

BENCH_FN void *bench__probe_run(void *user) {
    bench__probe *p = (bench__probe *)user;
    const float x = 0.5f + (float)bench__sink * 0, y = x;
    if (!p->data && p->unit == BENCH_INT8) {
        p->ops = 0;
#if defined(__x86_64__)
        if (__builtin_cpu_supports("avx512vnni")) {
            p->ops = BENCH__DOT_OPS(64) * (double)p->size;
            bench__sink = bench__dot_vnni(p->size, 0x01020304);
        } else if (__builtin_cpu_supports("avx2")) {
            p->ops = BENCH__DOT_OPS(32) * (double)p->size;
            bench__sink = bench__dot_avx2(p->size, 0x01020304);
        }
#endif
        return NULL;
    }
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        p->ops = BENCH__FMA_OPS(64) * (double)p->size;
        bench__sink = p->data ? (double)(bench__read_avx512(p->data, p->size) & 1)
                              : bench__fma_avx512(p->size, x, y);
        return NULL;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        p->ops = BENCH__FMA_OPS(32) * (double)p->size;
        bench__sink = p->data ? (double)(bench__read_avx2(p->data, p->size) & 1)
                              : bench__fma_avx2(p->size, x, y);
        return NULL;
    }
#endif
    p->ops = BENCH__FMA_OPS(16) * (double)p->size;
    bench__sink = p->data ? (double)(bench__read_base(p->data, p->size) & 1)
                          : bench__fma_base(p->size, x, y);
    return NULL;
}

// Bytes a second (data), or operations a second (NULL), of n threads, each with its part: the best
// of five, since a ceiling is what can be reached.
BENCH_FN double bench__probe_cpu(const unsigned char *data, bench_unit unit, int64_t size, int n) {
    enum { MOST = 1024 };
    static bench__probe probes[MOST];
    static pthread_t threads[MOST];
    double best = 0;
    if (n > MOST) n = MOST;
    for (int r = 0; r < 5; r++) {
        double work = 0;
        int started = 0;
        const double start = bench__now();
        for (int t = 0; t < n; t++) {
            const int64_t part = data ? size / n / 4096 * 4096 : size;
            probes[t].data = data ? data + part * t : NULL;
            probes[t].unit = unit;
            probes[t].size = part;
            if (t > 0 && pthread_create(&threads[t], NULL, bench__probe_run, &probes[t]) != 0)
                break;
            started = t + 1;
        }
        bench__probe_run(&probes[0]);
        for (int t = 1; t < started; t++) pthread_join(threads[t], NULL);
        const double ns = bench__now() - start;
        for (int t = 0; t < started; t++) work += data ? (double)probes[t].size : probes[t].ops;
        if (work / ns * 1e9 > best) best = work / ns * 1e9;
    }
    return best;
}

// Of probe.hip, where that is linked: rates of reading, and of arithmetic in F32, F16 and int8.
#ifdef __cplusplus
extern "C"
#endif
__attribute__((weak)) void bench_gpu_probe(double rates[1 + BENCH_N_UNITS]);

// Bytes a second of an op that streams through device memory, the best of five.
BENCH_FN double bench__probe_stream(bench *b, rocq_op op, const void *params, double bytes) {
    double best = 0;
    for (int r = 0; r < 6; r++) { // the first warms up
        rocq_result result = ROCQ_OK;
        const double start = bench__now();
        for (int i = 0; i < 8 && result == ROCQ_OK; i++) {
            result = op == ROCQ_OP_CAST ? rocq_cast(b->ctx, (const rocq_cast_params *)params)
                                        : rocq_argmax(b->ctx, (const rocq_argmax_params *)params);
        }
        if (result == ROCQ_OK) result = rocq_sync(b->ctx);
        if (result != ROCQ_OK) return 0;
        const double rate = 8 * bytes / (bench__now() - start) * 1e9;
        if (r > 0 && rate > best) best = rate;
    }
    return best;
}

BENCH_FN void bench__probe_gpu(bench *b) {
    const int64_t rows = b->tiny ? 64 : 2048, size = rows * (b->tiny ? 256 : 65536) * 4;
    const int64_t ne[2] = {size / 4 / rows, rows};
    rocq_buffer memory;
    rocq_tensor x, y, index;
    memset(&memory, 0, sizeof memory);
    if (rocq_buffer_alloc(b->ctx, &memory, 2 * size + rows * 4) != ROCQ_OK) return;
    if (rocq_tensor_init(&x, &memory, 0, ROCQ_F32, 2, ne) == ROCQ_OK &&
        rocq_tensor_init(&y, &memory, size, ROCQ_F32, 2, ne) == ROCQ_OK &&
        rocq_tensor_init(&index, &memory, 2 * size, ROCQ_I32, 1, &rows) == ROCQ_OK) {
        rocq_cast_params copy;
        rocq_argmax_params read;
        memset(&copy, 0, sizeof copy);
        memset(&read, 0, sizeof read);
        copy.y = &y;
        copy.x = &x;
        read.index = &index;
        read.x = &x;
        b->copy_all = bench__probe_stream(b, ROCQ_OP_CAST, &copy, 2 * (double)size);
        b->read_all = bench__probe_stream(b, ROCQ_OP_ARGMAX, &read, (double)size);
        if (b->copy_all > b->read_all) b->read_all = b->copy_all;
    }
    rocq_buffer_free(b->ctx, &memory);
    if (!bench_gpu_probe) return;
    double rates[1 + BENCH_N_UNITS];
    bench_gpu_probe(rates);
    if (rates[0] > b->read_all) b->read_all = rates[0];
    for (int i = 0; i < BENCH_N_UNITS; i++) b->unit_all[i] = rates[1 + i];
}

BENCH_FN void bench__probe_all(bench *b) {
    if (b->gpu) {
        bench__probe_gpu(b);
        return;
    }
    const int64_t size = b->tiny ? 1 << 20 : 2 * b->cache_bytes + (64 << 20);
    const int64_t rounds = b->tiny ? 1000 : 4000000;
    unsigned char *data = (unsigned char *)bench_alloc(size);
    b->read_1 = bench__probe_cpu(data, BENCH_F32, size, 1);
    b->read_all = bench__probe_cpu(data, BENCH_F32, size, b->n_threads);
    for (int u = 0; u < BENCH_N_UNITS; u++) {
        if (u == BENCH_F16) continue; // decoded, not computed with
        b->unit_1[u] = bench__probe_cpu(NULL, (bench_unit)u, rounds, 1);
        b->unit_all[u] = bench__probe_cpu(NULL, (bench_unit)u, rounds, b->n_threads);
    }
    free(data);
}

// ---------------------------------------------------------------------------------------------
// JSON
// ---------------------------------------------------------------------------------------------

BENCH_FN void bench__put_text(FILE *f, const char *text) {
    fputc('"', f);
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        if (*c == '"' || *c == '\\') fprintf(f, "\\%c", *c);
        else if (*c < 32 || *c > 126) fprintf(f, "\\u%04x", *c); // bytes past ASCII as Latin-1
        else fputc(*c, f);
    }
    fputc('"', f);
}

BENCH_FN void bench__put_key(FILE *f, const char *key) { // a new line, but after '{' no comma
    fprintf(f, "%s\"%s\": ", *key == '{' ? "{" : ", ", key + (*key == '{'));
}
BENCH_FN void bench__put_number(FILE *f, const char *key, double value) {
    bench__put_key(f, key);
    fprintf(f, isfinite(value) ? "%.6g" : "null", value);
}
BENCH_FN void bench__put_int(FILE *f, const char *key, int64_t value) {
    bench__put_key(f, key);
    fprintf(f, "%lld", (long long)value);
}
BENCH_FN void bench__put_string(FILE *f, const char *key, const char *value) {
    bench__put_key(f, key);
    if (value) bench__put_text(f, value);
    else fputs("null", f);
}
BENCH_FN void bench__put_bool(FILE *f, const char *key, bool value) {
    bench__put_key(f, key);
    fputs(value ? "true" : "false", f);
}
BENCH_FN void bench__put_list(FILE *f, const char *key, const double *values, int64_t n) {
    bench__put_key(f, key);
    for (int64_t i = 0; i < n; i++) fprintf(f, "%s%.6g", i ? ", " : "[", values[i]);
    fputs("]", f);
}

BENCH_FN void bench__put_machine(FILE *f, const bench *b) {
    char text[512], more[256];
    struct utsname os;
    memset(&os, 0, sizeof os);
    (void)uname(&os);
    bench__file_line("/proc/cpuinfo", "model name", text, sizeof text);
    bench__put_string(f, "{cpu", *text ? text : os.machine);
    bench__put_int(f, "cores", sysconf(_SC_NPROCESSORS_ONLN));
    bench__put_int(f, "cache_bytes", sysconf(_SC_LEVEL3_CACHE_SIZE));
    bench__put_int(f, "memory_bytes", (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE));
    bench__file_line("/proc/cpuinfo", "cpu MHz", text, sizeof text);
    bench__put_number(f, "cpu_mhz", atof(text));
    bench__file_line("/proc/loadavg", NULL, text, sizeof text);
    bench__put_number(f, "load", atof(text));
    snprintf(text, sizeof text, "%.60s %.60s %.60s", os.sysname, os.release, os.machine);
    bench__put_string(f, "os", text);
#if defined(__clang__)
    bench__put_string(f, "compiler", __VERSION__);
#else
    bench__put_string(f, "compiler", "gcc " __VERSION__);
#endif
    bench__put_string(f, "device", b->info.device);
    if (!b->gpu) {
        bench__put_string(f, "gpu", NULL);
        fputs("}", f);
        return;
    }
    bench__put_key(f, "gpu");
    bench__put_string(f, "{name", b->info.device);
    snprintf(text, sizeof text, "gfx%x", (unsigned)b->info.target);
    if (b->info.target == 0) text[0] = 0;
    bench__put_string(f, "target", text);
    bench__put_int(f, "units", b->info.n_units);
    bench__put_int(f, "bytes", b->info.device_bytes);
    bench__put_string(f, "runtime", b->info.runtime);
    // AMD's driver has them in files, NVIDIA's in a program.
    bench__file_line("/sys/module/amdgpu/version", NULL, text, sizeof text);
    if (*text) {
        bench__put_string(f, "driver", text);
        const char *keys[2] = {"clock_mhz", "memory_mhz"}, *names[2] = {"sclk", "mclk"};
        for (int i = 0; i < 2; i++) {
            snprintf(more, sizeof more,
                     "grep -h '[*]' /sys/class/drm/card*/device/pp_dpm_%s 2>/dev/null", names[i]);
            bench__command_line(more, text, sizeof text);
            bench__put_string(f, keys[i], text);
        }
    } else {
        const char *keys[3] = {"driver", "clock_mhz", "memory_mhz"};
        const char *names[3] = {"driver_version", "clocks.sm", "clocks.mem"};
        for (int i = 0; i < 3; i++) {
            snprintf(more, sizeof more, "nvidia-smi --query-gpu=%s --format=csv,noheader,nounits "
                     "2>/dev/null", names[i]);
            bench__command_line(more, text, sizeof text);
            bench__put_string(f, keys[i], text);
        }
    }
    fputs("}}", f);
}

BENCH_FN void bench__put_ceiling(FILE *f, const char *name, int threads, double value, int *n) {
    if (value <= 0) return;
    fputs((*n)++ ? ",\n  " : "\n  ", f);
    bench__put_string(f, "{name", name);
    bench__put_int(f, "threads", threads);
    bench__put_number(f, "value", value);
    fputs("}", f);
}

BENCH_FN void bench__put_result(FILE *f, const bench_result *r) {
    bench__put_string(f, "{name", r->name);
    bench__put_string(f, "unit", "ns");
    bench__put_int(f, "n", r->n);
    bench__put_number(f, "min", r->summary.min);
    bench__put_number(f, "median", r->summary.median);
    bench__put_number(f, "mean", r->summary.mean);
    bench__put_number(f, "p95", r->summary.p95);
    bench__put_number(f, "p99", r->summary.p99);
    bench__put_number(f, "max", r->summary.max);
    bench__put_number(f, "sd", r->summary.deviation);
    bench__put_list(f, "ci", r->ci, 2);
    bench__put_bool(f, "settled", r->settled);
    bench__put_int(f, "batch", r->batch);
    bench__put_int(f, "inner", r->inner);
    bench__put_number(f, "bytes", r->bytes);
    bench__put_number(f, "flops", r->flops);
    bench__put_number(f, "bytes_per_s", r->bytes_per_s);
    bench__put_number(f, "flops_per_s", r->flops_per_s);
    bench__put_string(f, "bound", r->bound);
    bench__put_number(f, "share", r->share);
    if (r->has_verify) bench__put_bool(f, "verified", r->verified);
    else bench__put_string(f, "verified", NULL);
    bench__put_bool(f, "cold", r->cold);
    bench__put_string(f, "against", r->against);
    if (r->against) {
        bench__put_number(f, "ratio", r->ratio);
        bench__put_list(f, "ratio_ci", r->ratio_ci, 2);
    }
    bench__put_list(f, "samples", r->samples, r->n);
    fputs("}", f);
}

BENCH_FN void bench__put_notes(FILE *f, const char *key, const bench_note *notes, bool values) {
    fprintf(f, ",\n\"%s\": [", key);
    for (int64_t i = 0; i < arrlen(notes); i++) {
        const bench_note *note = &notes[i];
        fputs(i ? ",\n  " : "\n  ", f);
        bench__put_string(f, "{name", note->name);
        if (values) bench__put_number(f, "value", note->value);
        bench__put_string(f, values ? "unit" : "why", note->text);
        if (values) bench__put_bool(f, "verified", note->verified);
        fputs("}", f);
    }
    fputs("]", f);
}

// As rocq_file_open writes it, so that the file is whole at every moment.
BENCH_FN bool bench__write(const bench *b) {
    char version[32], *text = NULL;
    size_t size = 0;
    rocq_file *file = NULL;
    if (!b->json) return true;
    FILE *f = open_memstream(&text, &size);
    if (!f) bench__die("out of memory");
    bench__put_string(f, "{schema", "rocq-bench 1");
    bench__put_string(f, "program", b->program);
    snprintf(version, sizeof version, "%d.%d.%d", ROCQ_VERSION_MAJOR, ROCQ_VERSION_MINOR,
             ROCQ_VERSION_PATCH);
    bench__put_string(f, "rocq", version);
    bench__put_string(f, "commit", b->commit);
    bench__put_string(f, "time", b->time);
    bench__put_bool(f, "complete", b->finished && !bench__stopped);
    fputs(",\n\"options\": ", f);
    bench__put_string(f, "{device", b->gpu ? "gpu" : "cpu");
    bench__put_int(f, "threads", b->n_threads);
    bench__put_number(f, "seconds", b->seconds);
    bench__put_bool(f, "warm", !b->cold);
    bench__put_bool(f, "tiny", b->tiny);
    bench__put_bool(f, "disturbed", b->disturbed);
    bench__put_key(f, "filters");
    fputs("[", f);
    for (int i = 0; i < b->n_filters; i++) {
        if (i) fputs(", ", f);
        bench__put_text(f, b->filters[i]);
    }
    fputs("]}", f);
    fprintf(f, ",\n\"machine\": %s,\n\"ceilings\": [", b->machine);
    int n = 0;
    const char *units[BENCH_N_UNITS] = {"f32", "f16", "int8"};
    const int all = b->gpu ? 0 : b->n_threads;
    bench__put_ceiling(f, "read", 1, b->read_1, &n);
    bench__put_ceiling(f, "read", all, b->read_all, &n);
    bench__put_ceiling(f, "copy", all, b->copy_all, &n);
    for (int i = 0; i < BENCH_N_UNITS; i++) {
        bench__put_ceiling(f, units[i], 1, b->unit_1[i], &n);
        bench__put_ceiling(f, units[i], all, b->unit_all[i], &n);
    }
    fputs("],\n\"cases\": [", f);
    for (int64_t i = 0; i < arrlen(b->results); i++) {
        fputs(i ? ",\n  " : "\n  ", f);
        bench__put_result(f, &b->results[i]);
    }
    fputs("]", f);
    bench__put_notes(f, "values", b->values, true);
    bench__put_notes(f, "failed", b->failed, false);
    bench__put_notes(f, "skipped", b->skipped, false);
    fputs("}\n", f);
    if (fclose(f) != 0) bench__die("out of memory");
    rocq_result result = rocq_file_open(b->ctx, &file, b->json);
    if (result == ROCQ_OK) {
        rocq_file_write(text, (int64_t)size, file); // rocq_file_close tells whether that failed
        result = rocq_file_close(&file, true);
    }
    free(text);
    if (result != ROCQ_OK) fprintf(stderr, "bench: %s\n", rocq_error(b->ctx));
    return result == ROCQ_OK;
}

// ---------------------------------------------------------------------------------------------
// Running cases
// ---------------------------------------------------------------------------------------------

BENCH_FN void bench__clear_line(const bench *b) {
    if (b->terminal) fputs("\r\033[K", stderr);
}

BENCH_FN void bench__note(bench *b, bench_note **notes, const char *name, const char *text,
                          double value, bool verified) {
    const bench_note note = {bench__copy(name), bench__copy(text), value, verified};
    arrput(*notes, note);
    bench__clear_line(b);
}

BENCH_FN void bench_fail(bench *b, const char *name, const char *why) {
    bench__note(b, &b->failed, name, why, 0, false);
    printf("%-44s FAILED: %s\n", name, why);
    fflush(stdout);
    bench__write(b);
}

BENCH_FN void bench_skip(bench *b, const char *name, const char *why) {
    if (bench__stopped) return;
    bench__note(b, &b->skipped, name, why, 0, false);
    printf("%-44s skipped: %s\n", name, why);
    fflush(stdout);
    bench__write(b);
}

BENCH_FN void bench_value(bench *b, const char *name, double value, const char *unit,
                          bool verified) {
    if (!bench_wants(b, name)) return;
    if (!verified) {
        bench_fail(b, name, "the figure is not what it must be");
    }
    bench__note(b, &b->values, name, unit, value, verified);
    printf("%-44s %14.6g %s\n", name, value, unit);
    fflush(stdout);
    bench__write(b);
}

BENCH_FN rocq_result bench__sync(bench *b, const bench_case *c) {
    return c->sync ? c->sync(c->user) : b->gpu ? rocq_sync(b->ctx) : ROCQ_OK;
}

// ns of one op over `batch` runs; negative when it failed, which is then said.
BENCH_FN double bench__sample(bench *b, const bench_case *c, int64_t batch) {
    rocq_result result = ROCQ_OK;
    if (c->reset) c->reset(c->user);
    if (c->flush && b->cold) bench_flush(b);
    if (c->enter) c->enter(c->user);
    const double start = bench__now();
    for (int64_t i = 0; i < batch && result == ROCQ_OK; i++) result = c->run(c->user);
    if (result == ROCQ_OK) result = bench__sync(b, c);
    const double ns = bench__now() - start;
    if (c->leave) c->leave(c->user);
    if (result != ROCQ_OK) {
        char why[700];
        snprintf(why, sizeof why, "%s: %s", rocq_result_name(result), rocq_error(b->ctx));
        bench_fail(b, c->name, why);
        return -1;
    }
    return ns / (double)batch / (double)(c->inner > 0 ? c->inner : 1);
}

// The number that the other process hands over with the turn; 0 when there is none.
BENCH_FN int64_t bench__take_turn(const bench *b) {
    int64_t number = 0;
    return b->turns && read(b->turn_in, &number, sizeof number) == sizeof number ? number : 0;
}
BENCH_FN void bench__give_turn(bench *b, int64_t number) {
    if (b->turns && write(b->turn_out, &number, sizeof number) != sizeof number) b->turn_out = -1;
}

// Verifies, warms up, and finds the number of runs of a sample, unless it is given; 0 when the case
// cannot be timed.
BENCH_FN int64_t bench__prepare(bench *b, const bench_case *c, int64_t given) {
    double ns = bench__sample(b, c, 1);
    if (ns < 0) return 0;
    if (c->verify && !c->verify(c->user)) {
        bench_fail(b, c->name, "the result is wrong");
        return 0;
    }
    const double inner = (double)(c->inner > 0 ? c->inner : 1);
    const double enough = b->tiny ? 0 : b->gpu ? 4e6 : 1e6;
    int64_t batch = 1;
    if (given > 0) return bench__sample(b, c, given) < 0 ? 0 : given;
    if (c->reset || c->single || (c->flush && b->cold)) return ns * inner > 1e9 ? 1 :
        bench__sample(b, c, 1) < 0 ? 0 : 1;
    while (!bench__stopped) {
        ns = bench__sample(b, c, batch);
        if (ns < 0) return 0;
        const double took = ns * inner * (double)batch;
        if (took >= enough) break;
        const double more = took > 0 ? 1.2 * enough / took : 10;
        batch = (int64_t)((double)batch * (more < 10 ? more : 10)) + 1;
    }
    return batch;
}

BENCH_FN void bench__rates(const bench *b, const bench_case *c, bench_result *r) {
    const bool one = !b->gpu && c->threads == 1;
    const double read = one ? b->read_1 : b->read_all;
    const double unit = one ? b->unit_1[c->unit] : b->unit_all[c->unit];
    const double s = r->summary.median * 1e-9;
    r->bytes = c->bytes / (double)r->inner;
    r->flops = c->flops / (double)r->inner;
    r->bytes_per_s = r->bytes / s;
    r->flops_per_s = r->flops / s;
    const double memory = read > 0 ? r->bytes_per_s / read : 0;
    const double arithmetic = unit > 0 ? r->flops_per_s / unit : 0;
    r->bound = "";
    if (memory > 0 || arithmetic > 0) r->bound = memory >= arithmetic ? "memory" : "arithmetic";
    r->share = memory >= arithmetic ? memory : arithmetic;
}

BENCH_FN void bench__time_text(char out[16], double ns) {
    const char *const units[4] = {"ns", "us", "ms", "s"};
    int u = 0;
    while (u < 3 && ns >= 999.95) ns /= 1000, u++;
    snprintf(out, 16, "%.*f %s", ns < 9.9995 ? 3 : ns < 99.995 ? 2 : 1, ns, units[u]);
}

BENCH_FN void bench__print_head(void) {
    printf("%-44s %11s %6s %11s %9s %9s %6s %5s  %s\n", "case", "median", "+-", "p95", "GB/s",
           "GFLOP/s", "share", "n", "time over that of the first compared");
}

BENCH_FN void bench__print_row(const bench *b, const bench_result *r) {
    char median[16], p95[16], moved[16] = "", computed[16] = "", share[16] = "";
    bench__time_text(median, r->summary.median);
    bench__time_text(p95, r->summary.p95);
    if (r->bytes > 0) snprintf(moved, sizeof moved, "%.1f", r->bytes_per_s * 1e-9);
    if (r->flops > 0) snprintf(computed, sizeof computed, "%.1f", r->flops_per_s * 1e-9);
    if (r->share > 0) snprintf(share, sizeof share, "%.0f%%", 100 * r->share);
    bench__clear_line(b);
    printf("%-44s %11s %5.1f%% %11s %9s %9s %6s %5lld%s", r->name, median,
           50 * (r->ci[1] - r->ci[0]) / r->summary.median, p95, moved, computed, share,
           (long long)r->n, r->settled || b->tiny ? "" : " unsettled");
    if (r->against) {
        printf("  x %.3f (%.3f to %.3f)", r->ratio, r->ratio_ci[0], r->ratio_ci[1]);
    }
    printf("\n");
    fflush(stdout);
}

// Statistics are of a copy, so that the samples stay in the order they were taken in.
BENCH_FN bool bench__settle(bench_result *r) {
    double *sorted = (double *)bench_alloc(r->n * (int64_t)sizeof(double));
    memcpy(sorted, r->samples, (size_t)r->n * sizeof(double));
    rocq_summarize(&r->summary, sorted, r->n); // sorts them
    bench__median_interval(sorted, r->n, r->ci);
    free(sorted);
    return r->settled = r->n >= 5 && r->ci[1] - r->ci[0] <= 0.02 * r->summary.median;
}

BENCH_FN void bench__free_result(bench_result *r) {
    free(r->name);
    free(r->against);
    free(r->samples);
}

BENCH_FN const bench_result *bench_run_pair(bench *b, const bench_case *cases, int n) {
    enum { LEAST = 5, MOST = 300, TURNS = 100 };
    bool wanted = false, follows = false;
    for (int i = 0; i < n; i++) wanted |= bench_wants(b, cases[i].name);
    if (!wanted) return NULL;
    bench_result *rs = (bench_result *)bench_alloc(n * (int64_t)sizeof *rs);
    const bench_case **cs = (const bench_case **)bench_alloc(n * (int64_t)sizeof *cs);
    bool failed = false, settled = false;
    int64_t rounds = 0;
    int m = 0; // cases that can be timed: without the first, nothing is compared
    for (int i = 0; i < n && (i == 0 || m > 0) && !bench__stopped; i++) {
        const bench_case *c = cs[m] = &cases[i];
        bench_result *r = &rs[m];
        if (b->terminal) fprintf(stderr, "\r\033[K%s: verified, warmed up", c->name);
        const int64_t given = bench__take_turn(b);
        r->batch = bench__prepare(b, c, given);
        bench__give_turn(b, given > 0 ? 0 : r->batch);
        follows = given > 0;
        if (r->batch == 0) continue;
        r->name = bench__copy(c->name);
        r->samples = (double *)bench_alloc(MOST * (int64_t)sizeof(double));
        r->inner = c->inner > 0 ? c->inner : 1;
        r->cold = b->cold && !c->warm;
        r->has_verify = r->verified = c->verify != NULL;
        m++;
    }
    const double start = bench__now();
    const double limit = b->tiny ? 0 : 1e9 * b->seconds * m * (1 + b->turns);
    bool enough = false;
    while (m > 0 && !failed && !settled && !enough && !bench__stopped) {
        const bool last = rounds + 1 >= LEAST &&
            (rounds + 1 >= (b->turns ? TURNS : MOST) || bench__now() - start >= limit);
        enough = last && !follows;
        for (int j = 0; j < m && !failed && !bench__stopped; j++) {
            const int i = rounds % 2 ? m - 1 - j : j;
            enough |= bench__take_turn(b) < 0 || rounds + 1 >= MOST;
            const double ns = bench__sample(b, cs[i], rs[i].batch);
            bench__give_turn(b, enough && !follows ? -1 : 0);
            failed = ns < 0;
            rs[i].samples[rs[i].n++] = ns;
        }
        rounds++;
        if (failed || bench__stopped) break; // an incomplete round
        settled = !b->tiny && !b->turns;
        for (int i = 0; i < m; i++) settled &= bench__settle(&rs[i]);
        if (b->terminal) {
            fprintf(stderr, "\r\033[K%s: %lld samples, +-%.1f%%", rs[0].name, (long long)rounds,
                    50 * (rs[0].ci[1] - rs[0].ci[0]) / rs[0].summary.median);
        }
    }
    int64_t whole = rounds; // rounds in which all took a sample
    for (int i = 0; i < m; i++) whole = rs[i].n < whole ? rs[i].n : whole;
    const bool keep = !failed && whole >= LEAST; // a stopped case is kept when it has enough
    for (int i = 0; i < m; i++) {
        bench_result *r = &rs[i];
        if (!keep) {
            bench__free_result(r);
            continue;
        }
        r->n = whole;
        bench__settle(r);
        bench__rates(b, cs[i], r);
        if (i > 0) {
            r->against = bench__copy(rs[0].name);
            r->ratio = r->summary.median / rs[0].summary.median;
            bench__ratio_interval(r->samples, rs[0].samples, whole, r->ratio_ci);
        }
        arrput(b->results, *r);
        bench__print_row(b, r);
    }
    free(rs);
    free(cs);
    bench__write(b);
    return keep && m == n ? &b->results[arrlen(b->results) - n] : NULL;
}

BENCH_FN const bench_result *bench_run(bench *b, const bench_case *c) {
    return bench_run_pair(b, c, 1);
}

// ---------------------------------------------------------------------------------------------
// Opening and closing
// ---------------------------------------------------------------------------------------------

// Reads a whole number that fits an int, and moves *text behind it. False where there is none.
BENCH_FN bool bench__whole(const char **text, int *number) {
    char *end;
    if (**text < '0' || **text > '9') return false; // strtoll takes " 1", +1, -1
    const long long value = strtoll(*text, &end, 10); // LLONG_MAX if it does not fit
    *text = end;
    *number = (int)value;
    return value <= INT_MAX;
}

// Takes the value of an option that has one. False: it is wrong.
BENCH_FN bool bench__option(bench *b, const char *name, const char *value) {
    if (!strcmp(name, "--json")) b->json = value;
    else if (!strcmp(name, "--device")) {
        b->device = value;
        return !strcmp(value, "auto") || !strcmp(value, "cpu") || !strcmp(value, "gpu");
    } else if (!strcmp(name, "--kernels")) b->kernels = value;
    else if (!strcmp(name, "--threads")) {
        return bench__whole(&value, &b->n_threads) && *value == '\0' && b->n_threads > 0;
    } else if (!strcmp(name, "--seconds")) {
        char *end;
        b->seconds = strtod(value, &end);
        return end > value && *end == '\0' && b->seconds > 0 && isfinite(b->seconds);
    } else { // --turns
        b->turns = true;
        signal(SIGPIPE, SIG_IGN);
        return bench__whole(&value, &b->turn_in) && *value++ == ',' &&
               bench__whole(&value, &b->turn_out) && *value == '\0' &&
               fcntl(b->turn_in, F_GETFD) >= 0 && fcntl(b->turn_out, F_GETFD) >= 0;
    }
    return true;
}

BENCH_FN bool bench__options(bench *b, int argc, char **argv) {
    b->filters = (char **)bench_alloc(argc * (int64_t)sizeof *b->filters);
    b->device = "auto";
    b->seconds = 3;
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        const bool takes = !strcmp(a, "--json") || !strcmp(a, "--device") ||
            !strcmp(a, "--kernels") || !strcmp(a, "--threads") || !strcmp(a, "--seconds") ||
            !strcmp(a, "--turns");
        if (takes && !value) {
            fprintf(stderr, "%s: %s needs a value\n", b->program, a);
            return false;
        }
        i += takes;
        if (takes && !bench__option(b, a, value)) {
            fprintf(stderr, "%s: %s cannot be \"%s\": --device is auto, cpu or gpu; --threads is a"
                    " whole number, --seconds a number, both positive; --turns is two open file"
                    " descriptors\n",
                    b->program, a, value);
            return false;
        }
        if (takes) continue;
        if (!strcmp(a, "--warm")) b->cold = false;
        else if (!strcmp(a, "--disturb")) b->disturbed = true;
        else if (!strcmp(a, "--tiny")) b->tiny = true, b->cold = false;
        else if (a[0] != '-') b->filters[b->n_filters++] = argv[i];
        else {
            fprintf(stderr, "usage: %s [FILTER...] [--json FILE] [--device auto|cpu|gpu]"
                    " [--kernels FILE] [--threads N] [--seconds S] [--warm] [--tiny]"
                    " [--disturb] [--turns IN,OUT]\n",
                    b->program);
            return false;
        }
    }
    if (b->disturbed && b->turns) { // two programs would disturb each other twice
        fprintf(stderr, "%s: --disturb and --turns exclude each other\n", b->program);
        return false;
    }
    return true;
}

// Starts the process that --disturb asks for. The system kills it when this thread ends; Ctrl-C,
// which the terminal sends to both, is left to this program, which still finishes a case.
BENCH_FN bool bench__disturb(bench *b) {
    const pid_t parent = getpid();
    cpu_set_t allowed, one;
    size_t core = CPU_SETSIZE - 1;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
    while (core > 0 && !CPU_ISSET(core, &allowed)) core--;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    fflush(NULL);
    b->disturber = fork();
    if (b->disturber != 0) return b->disturber > 0;
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent) _exit(1);
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    if (sched_setaffinity(0, sizeof one, &one) != 0) _exit(1);
    for (volatile uint64_t n = 0;;) n = n + 1;
}

BENCH_FN void bench__log(rocq_log_level level, const char *message, void *user) {
    if (level == ROCQ_LOG_ERROR) fprintf(stderr, "%s: %s\n", (const char *)user, message);
}

BENCH_FN bool bench_open(bench *b, int argc, char **argv, const char *program) {
    memset(b, 0, sizeof *b);
    b->program = program;
    b->cold = true;
    if (!bench__options(b, argc, argv)) {
        free(b->filters);
        return false;
    }

    const time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(b->time, sizeof b->time, "%Y-%m-%dT%H:%M:%SZ", &utc);
#ifdef BENCH_COMMIT
    snprintf(b->commit, sizeof b->commit, "%s", BENCH_COMMIT);
#else
    bench__command_line("git describe --always --dirty 2>/dev/null", b->commit, sizeof b->commit);
#endif

    rocq_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.prefer = !strcmp(b->device, "cpu")   ? ROCQ_BACKEND_CPU
                  : !strcmp(b->device, "gpu") ? ROCQ_BACKEND_GPU
                                              : ROCQ_BACKEND_AUTO;
    desc.kernels_path = b->kernels;
    desc.n_threads = b->n_threads;
    desc.log = bench__log;
    desc.log_user = (void *)(uintptr_t)program;
    desc.rocm_path = getenv("ROCM_PATH");
    desc.hip_path = getenv("HIP_PATH");
    if (rocq_open(&b->ctx, &desc) != ROCQ_OK) { // the log has said why
        free(b->filters);
        return false;
    }
    rocq_get_info(b->ctx, &b->info);
    b->gpu = b->info.backend == ROCQ_BACKEND_GPU;
    b->n_threads = b->info.desc.n_threads;
    b->cache_bytes = (int64_t)sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (b->cache_bytes <= 0) b->cache_bytes = (int64_t)sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (b->cache_bytes < 32 << 20) b->cache_bytes = 32 << 20;
    // More than the last level of any GPU (AMD's Infinity Cache: 96 MiB on gfx1100), and enough
    // that a row of launches takes longer than its submission.
    if (b->gpu) b->cache_bytes = 400 << 20;
    b->terminal = isatty(STDERR_FILENO) && isatty(STDOUT_FILENO);

    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = bench__stop;
    action.sa_flags = (int)SA_RESETHAND;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);

    bench__probe_all(b);
    printf("%s on %s: read %.1f GB/s", program, b->info.device, b->read_all * 1e-9);
    if (b->read_1 > 0) printf(" (one thread %.1f)", b->read_1 * 1e-9);
    if (b->unit_all[BENCH_F32] > 0) printf(", F32 %.0f GFLOP/s", b->unit_all[BENCH_F32] * 1e-9);
    if (b->unit_all[BENCH_F16] > 0) printf(", F16 matrix %.0f", b->unit_all[BENCH_F16] * 1e-9);
    if (b->unit_all[BENCH_INT8] > 0) printf(", int8 %.0f", b->unit_all[BENCH_INT8] * 1e-9);
    if (b->disturbed) printf("; one core disturbed");
    printf(b->tiny ? "; TINY: no measurement\n" : b->cold ? "; cold\n" : "; warm\n");
    char load[64];
    bench__file_line("/proc/loadavg", NULL, load, sizeof load);
    if (!b->tiny && !b->disturbed && atof(load) > 0.75 * (double)sysconf(_SC_NPROCESSORS_ONLN))
        printf("LOADED: other work runs here (load %.1f): these times are not worth keeping\n",
               atof(load));
    bench__print_head();
    size_t size;
    FILE *f = open_memstream(&b->machine, &size); // after the probes: clocks as they are under load
    if (!f) bench__die("out of memory");
    bench__put_machine(f, b);
    fclose(f);
    if (b->disturbed && !bench__disturb(b)) bench__die("no process to disturb with");
    bench__write(b);
    return true;
}

BENCH_FN void bench__free_notes(bench_note *notes) {
    for (int64_t i = 0; i < arrlen(notes); i++) {
        free(notes[i].name);
        free(notes[i].text);
    }
    arrfree(notes);
}

BENCH_FN int bench_close(bench *b) {
    b->finished = true;
    // One that has ended before was no disturbance: the results are not what they say.
    if (b->disturber > 0 && waitpid(b->disturber, NULL, WNOHANG) != 0) {
        bench_fail(b, b->program, "the process that keeps a core busy has ended");
    } else if (b->disturber > 0) {
        kill(b->disturber, SIGKILL);
        waitpid(b->disturber, NULL, 0);
    }
    const bool written = bench__write(b);
    const int status = bench__stopped ? 130 : arrlen(b->failed) > 0 || !written ? 1 : 0;
    if (bench__stopped) fprintf(stderr, "%s: stopped; what was measured is kept\n", b->program);
    for (int64_t i = 0; i < arrlen(b->results); i++) bench__free_result(&b->results[i]);
    arrfree(b->results);
    bench__free_notes(b->values);
    bench__free_notes(b->failed);
    bench__free_notes(b->skipped);
    free(b->machine);
    free(b->flush);
    free(b->filters);
    rocq_close(&b->ctx);
    return status;
}

#endif // BENCH_H
