/* hip.h - the stand-in's HIP runtime (hip.cc), as tests control it

   rocq.h finds it like that of any program that links rocq_kernels.hip (rocq_hip_linked), or as
   the shared library libamdhip64.so.7 when it is built as one. Device memory is malloc's, so that
   AddressSanitizer guards it, begins as 0xff bytes, and blocks up to 1 MiB may be touched by
   kernels and copies only. Launches, copies and fills are queued: nothing runs before somebody
   waits. A wrong call (a copy out of bounds, an unknown stream, ...) is an error of the stand-in
   beside HIP's. */

#ifndef ROCQ_SIMT_HIP_H
#define ROCQ_SIMT_HIP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* When queued work runs.
   SIMT_AT_ONCE   when it is submitted
   SIMT_LATE      when its stream or event is waited for, as far as that asks; mem_free waits for
                  the device, as HIP's does. The default; SIMT_WORK=0, 1, 2 in the environment
                  sets another
   SIMT_LATEST    as SIMT_LATE, but mem_free does not wait: memory freed too early is found */
enum { SIMT_AT_ONCE, SIMT_LATE, SIMT_LATEST };
void simt_set_work(int when);

/* The n-th runtime call from now (1: the next) returns code, and so do all after it: the device is
   lost and what is queued never runs. simt_fail_once: that call alone. n 0: no failure, and the
   device is back. A failing call that frees something still frees it. */
void simt_fail_at(int64_t n, int code);
void simt_fail_once(int64_t n, int code);
int64_t simt_calls(void); /* runtime calls so far */

/* What has been created and not destroyed. */
typedef struct simt_live {
    int device_blocks, host_blocks, streams, events, modules, graphs, execs;
    size_t device_bytes, host_bytes;
} simt_live;
simt_live simt_get_live(void);
int simt_live_sum(void); /* of the counts */

void simt_set_devices(int n);            /* 1 */
void simt_set_memory(size_t bytes);      /* of each device; 1 GiB */
/* From now on blocks lie behind each other, without a gap where sizes are multiples of 256, as those
   of real devices may: in one reserve of so many bytes, which is gone when all of them are freed. */
void simt_set_touching(size_t bytes);
void simt_set_image_error(int code);     /* what module_load answers: 0, or 209 wrong target */
void simt_set_selftest_error(int bits);  /* XORed into the self-test's word 4: computes wrongly */
void simt_set_optional(int there);       /* the table's OPTIONAL functions: 1, or NULL */
void simt_set_missing(const char *name); /* of them the one that is NULL, "hip..."; NULL: none */
void simt_set_target(int target);        /* what the self-test says: 0, or 0x1100 and so on */
void simt_set_priorities(int least, int greatest); /* 1, -1 */

/* How replays of executable graphs go wrong, as those of some runtimes are reported to.
   STALE_ARGS    kernels get the arguments of their last launch before the graph was instantiated
   STALE_COPIES  what was copied to the device since the last launch of a kernel is not seen
   DROPPED       a kernel is left out
   node: the number of the graph's kernel launch that this befalls (STALE_ARGS and DROPPED), or -1
   for all. Set before the graph is instantiated. */
enum { SIMT_REPLAY_RIGHT, SIMT_REPLAY_STALE_ARGS, SIMT_REPLAY_STALE_COPIES, SIMT_REPLAY_DROPPED };
void simt_set_replay(int how, int node);

/* Kernels that run elsewhere (tests/gfx11/emulate), in a program that links none. Before a
   launch memory is called for each block that a kernel may touch, and after it again with size 0.
   launch returns an error of HIP. Set before a context is opened, and for good. */
typedef struct simt_elsewhere {
    void (*memory)(const void *address, size_t size);
    int (*launch)(const char *kernel, unsigned grid_x, unsigned grid_z, unsigned threads,
                  const void *args);
} simt_elsewhere;
void simt_set_elsewhere(const simt_elsewhere *to);

/* The clock, in milliseconds, that events record when the stream comes to them; NULL: the host's. */
void simt_set_clock(double (*ms)(void));

/* The stand-in's own errors, see simt.h. Their text, as printed on stderr. */
int simt_error_count(void);
const char *simt_errors_text(void);
void simt_forget_errors(void);

/* How the newest stream that is left was made: its flags and priority, and the compute units of its
   mask, -1 without one. false: there is none. */
typedef struct simt_stream {
    unsigned flags;
    int priority, n_units;
    unsigned first_units; /* the first word of the mask */
} simt_stream;
int simt_get_stream(simt_stream *s);

/* The most LDS that a launch of rocq_k_NAME has asked for besides its own; -1: no such kernel. */
int64_t simt_get_lds(const char *name);

/* Launches of rocq_k_NAME that ran, -1 when there is no such kernel; kernel by kernel, by index. */
int64_t simt_launches(const char *name);
const char *simt_kernel_at(int index); /* NULL past the last */

#ifdef __cplusplus
}
#endif
#endif
