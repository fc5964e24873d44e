// simt.h - a lane-accurate CPU stand-in for the GPU, on which rocq_kernels.hip runs unchanged
//
//     clang++-19 -std=c++17 -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -I. \
//         -DROCQ_SIMT='"tests/simt/simt.h"' ...
//     simt_launch(rocq_k_NAME, grid_x, grid_z, threads, args); // runs it to the end; 0, or errors
//
// A lane is a fiber. The lanes of a wave run one after another up to the next collective operation
// (wave_sync, wave_xor, wave_read, wave_ballot, wmma and what is made of them), where all 32 meet;
// the waves of a block run one after another up to the next barrier, where all meet. Blocks run
// one after another on the calling thread; every second launch takes blocks, waves and lanes in the
// opposite order. Reported as errors, with kernel, block, wave, lanes, lines and callers:
//   - lanes of a wave at different collectives, or some that have returned; a barrier that not all
//     threads of the block reach
//   - a lane index of wave_read that differs between lanes; a WMMA operand whose lanes 16-31 do not
//     repeat lanes 0-15
//   - LDS: accesses out of bounds or misaligned, reads of bytes not written in this block, more
//     than 64 KB, and races: two waves touch a byte between two barriers, or two lanes of a wave
//     without wave_sync between them, and at least one writes. Lanes of a wave may write the same
//     value; atomics may meet atomics
//   - global memory: a byte that one wave of a block has written, and another wave of it reads, or
//     writes with another value, with no block_sync between them. block_sync_lds and wave_sync do
//     not count: on the GPU the store may still be under way behind them
//   - misaligned global accesses. Global bounds are AddressSanitizer's, since every buffer is a
//     block of malloc; so are LDS accesses that go around lget and lput
// Asynchronous copies and the matrix unit's products from LDS are done as late as a kernel allows,
// so that a missing wait or barrier shows in the results, or as a race.
// Races and errors of LDS are counted and the launch goes on; the others end it. Of each place the
// first is told. SIMT_PROFILE=1 in the environment lists, at exit, launches and time by kernel.
//
// Not modelled: waves do not interleave between barriers and blocks not at all. Races in global
// memory other than those above, between blocks, between lanes of a wave, or of a write with an
// earlier read, are seen only where the order of blocks, waves or lanes changes a result.

#ifndef ROCQ_SIMT_H
#define ROCQ_SIMT_H

// SIMT_ENGINE_ONLY leaves out the language of the kernels; SIMT_PART and SIMT_PARTS: see KERNEL.

#include <math.h>
#include <mutex>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <vector>

#if !defined(__clang__) || !defined(__x86_64__) || !defined(__linux__)
#error "the stand-in is for clang on x86-64 Linux"
#endif

#if __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define SIMT_ASAN 1
#else
#define SIMT_ASAN 0
#endif

#pragma clang diagnostic ignored "-Wpsabi" // vectors are passed within one program

#define SIMT_UNCHECKED __attribute__((noinline, no_sanitize("address", "undefined")))
#define SIMT_INLINED __attribute__((always_inline, no_sanitize("address", "undefined"))) inline

// ---------------------------------------------------------------------------------------------
// the machine
// ---------------------------------------------------------------------------------------------

enum {
    SIMT_WAVE = 32,
    SIMT_MAX_THREADS = 1024,
    SIMT_STACK = 512 * 1024,   // bytes a lane, of which the lower half is closed, so that a lane
    SIMT_GUARD = 256 * 1024,   // that needs more does not reach its neighbour's
    SIMT_LDS_BYTES = 65536,    // of a block
    SIMT_LDS_GRANTED = 232448, // of a block whose launch asks for them, on Hopper
    SIMT_LDS_ARRAYS = 32,
    SIMT_LDS_SLOT = 2 * 262144, // addresses from array to array, so that an overrun hits none
    SIMT_MAX_PRINTED = 20
};

// Where a lane stopped.
enum simt_kind {
    SIMT_AT_START, SIMT_AT_RETURN, SIMT_AT_BARRIER_LDS, SIMT_AT_BARRIER, SIMT_AT_SYNC, SIMT_AT_XOR,
    SIMT_AT_READ, SIMT_AT_BALLOT, SIMT_AT_WMMA, SIMT_AT_WMMA_I8
};

struct simt_lane {
    void *sp;          // where it goes on
    uint64_t op;       // mask of wave_xor << 48 | simt_kind << 32 | line
    uint64_t value[2]; // what it brings to a collective, by the parity of the wave's rounds: a
    uint64_t aux[2];   // lane is never more than one collective ahead of the others
    const void *in[2]; // operands of wmma, in its own frame
    void *inout;
    char *stack;
};

struct simt_kernel {
    const char *name;
    const void *function;
    size_t args_size;
    uint32_t max_threads;
    void (*call)(const void *args);
    simt_kernel *next;
    int64_t launches = 0, ns = 0;
};

// What is known of a word of LDS, or of a byte of one that was accessed in part.
struct simt_cell {
    uint32_t write_interval, read_interval; // 0 or of an earlier block: not yet
    uint32_t write_span, read_span;
    uint16_t writer, reader;                // threads
    uint8_t atomic, many_writers;           // the last write was atomic; of several waves
    uint8_t many_waves, many_lanes;         // that read
};

// Who stored to a word of global memory.
enum { SIMT_SEVERAL = 255 }; // waves, by atomics
struct simt_stored {
    uintptr_t word;  // address / 4
    uint64_t order;  // simt.order then: an entry of another one is free
    uint8_t by[4];   // of each byte 1 + the wave that wrote it last, 0: none, or SIMT_SEVERAL
    uint8_t atomic;  // bytes, a bit each, that were last written by an atomic
};

struct simt_lds_site { // one declaration
    const char *name;
    int line;
    uint32_t block; // the block that last reached it,
    uint32_t slot;  // and where it lies there
    bool granted;   // LDS_GRANTED
};

struct simt_lds_array {
    const simt_lds_site *site;
    uint32_t size;
};

struct simt_machine {
    simt_lane lane[SIMT_MAX_THREADS];
    uint32_t now;           // the running thread
    uint32_t n_threads, block, block_z, grid_x, grid_z;
    uint32_t flip;          // XORed into lane numbers for the order that lanes run in: 0 or 31
    uint32_t round;         // one more at every collective
    uint32_t span;          // one more at every wave_sync, barrier and change of wave
    uint32_t interval;      // one more at every barrier
    uint32_t first_interval; // of this block
    uint32_t block_serial;  // one more at every block
    uint64_t wave_op;       // where the first lane of the running wave stopped
    bool mismatch;          // lanes of the running wave stopped at different places
    bool running, aborted;
    uint64_t launches;
    simt_kernel *kernel;
    const void *args;
    void *main_sp, *main_fake_stack;
    const void *main_stack;
    size_t main_stack_size;
    char *stacks;           // of all lanes, which to AddressSanitizer are one stack,
    void *lanes_fake_stack; // with one place for what it moves out of frames,
    bool entered;           // on which the launch's caller has just gone on

    char *lds;              // SIMT_LDS_ARRAYS slots
    simt_cell *word, *byte; // of every 4 bytes, and every byte
    uint32_t *split;        // of every 4 bytes: the block in which it was accessed in part
    simt_lds_array array[SIMT_LDS_ARRAYS];
    uint32_t n_arrays, lds_used;

    simt_stored *stored;    // words of global memory that the block wrote since the last
                            // block_sync:
    size_t stored_size;     // open addressing with linear probing, a power of two,
    size_t n_stored;        // of which so many are in use
    uint64_t order;         // one more at every block_sync and every block

    int errors;             // since the last simt_clear_errors
    size_t text_size;
    char text[32768];
    uint64_t told[SIMT_MAX_PRINTED]; // places already reported: the other lanes' are counted only
    int n_told;
    std::mutex lock;
};

inline simt_machine simt;
inline simt_kernel *simt_kernels;

// ---------------------------------------------------------------------------------------------
// errors
// ---------------------------------------------------------------------------------------------

inline int simt_errors() { return simt.errors; }
inline const char *simt_error_text() { return simt.text; }
inline void simt_clear_errors() {
    simt.errors = 0;
    simt.text_size = 0;
    simt.text[0] = 0;
    simt.n_told = 0;
}


// Who calls, from the line in the kernel's own function: found by frame pointers, so that it needs
// -fno-omit-frame-pointer, and llvm-symbolizer. Empty without AddressSanitizer.
SIMT_UNCHECKED inline void simt_callers(char *text, size_t size, uint32_t thread,
                                        const void *frame) {
    text[0] = 0;
#if SIMT_ASAN
    const simt_lane *lane = &simt.lane[thread];
    size_t at = 0;
    for (int depth = 0; depth < 24; depth++) {
        const char *f = (const char *)frame;
        if (f < lane->stack + SIMT_GUARD || f > lane->stack + SIMT_STACK - 16 ||
            (uintptr_t)f % 8 != 0)
            return;
        char names[1024] = {0};
        const void *const *saved = (const void *const *)frame;
        if (!saved[1]) return;
        __sanitizer_symbolize_pc((char *)(uintptr_t)saved[1] - 1, "%f:%l", names, sizeof names - 1);
        // inlined calls, innermost first
        for (const char *name = names; *name; name += strlen(name) + 1) {
            const char *base = strstr(name, "simt_");
            const char *colon = strrchr(name, ':');
            if (base == name || *name == '(' || !colon || !strncmp(name, "__sanitizer", 11))
                continue;
            const size_t n = strcspn(name, "(<:"); // without arguments, and without the type that
            size_t from = n;                       // a template's name begins with
            while (from > 0 && name[from - 1] != ' ') from--;
            if (at + n + 32 > size) return;
            at += (size_t)snprintf(text + at, size - at, "%s%.*s:%s", at ? " < " : "",
                                   (int)(n - from), name + from, colon + 1);
            if (!strncmp(name, "rocq_k_", 7)) return;
        }
        if (saved[0] <= frame) return;
        frame = saved[0];
    }
#else
    (void)size, (void)thread, (void)frame;
#endif
}

// Prints and counts an error. who NULL: the running lane. line 0: none.
__attribute__((format(printf, 3, 4), noinline)) inline void simt_error(const char *who, int line,
                                                                       const char *what, ...) {
    simt.errors++;
    const uint64_t key =
        (uint64_t)(uintptr_t)what * 31 + (uint64_t)line + (uint64_t)(uintptr_t)simt.kernel * 977;
    for (int i = 0; i < simt.n_told; i++) {
        if (simt.told[i] == key) return;
    }
    if (simt.n_told == SIMT_MAX_PRINTED) return;
    simt.told[simt.n_told++] = key;

    char text[2048];
    size_t at = (size_t)snprintf(text, sizeof text, "simt: ");
    if (simt.running) {
        at += (size_t)snprintf(text + at, sizeof text - at, "kernel %s, block %u of %u",
                               simt.kernel->name, simt.block, simt.grid_x);
        if (simt.grid_z > 1) {
            at += (size_t)snprintf(text + at, sizeof text - at, ", z %u", simt.block_z);
        }
        if (who) at += (size_t)snprintf(text + at, sizeof text - at, ", %s", who);
        else
            at += (size_t)snprintf(text + at, sizeof text - at, ", wave %u lane %u",
                                   simt.now / SIMT_WAVE, simt.now % SIMT_WAVE);
        if (line) at += (size_t)snprintf(text + at, sizeof text - at, ", line %d", line);
        at += (size_t)snprintf(text + at, sizeof text - at, ": ");
    }
    va_list list;
    va_start(list, what);
    at += (size_t)vsnprintf(text + at, sizeof text - at, what, list);
    va_end(list);
    if (at > sizeof text - 2) at = sizeof text - 2;
    char callers[512] = "";
    if (simt.running && !who) {
        simt_callers(callers, sizeof callers, simt.now, __builtin_frame_address(0));
    }
    if (callers[0]) at += (size_t)snprintf(text + at, sizeof text - at, " [%s]", callers);
    if (at > sizeof text - 2) at = sizeof text - 2;
    text[at++] = '\n';
    text[at] = 0;
    fputs(text, stderr);
    if (simt.n_told == SIMT_MAX_PRINTED) fputs("simt: further errors are only counted\n", stderr);
    if (simt.text_size + at < sizeof simt.text) {
        memcpy(simt.text + simt.text_size, text, at + 1);
        simt.text_size += at;
    }
}

// ---------------------------------------------------------------------------------------------
// fibers
// ---------------------------------------------------------------------------------------------

// Saves what a call preserves on this stack, goes on with the other.
__attribute__((naked, noinline)) inline void simt_swap_stack(void **, void *) {
    asm("pushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n\t"
        "movq %rsp, (%rdi)\n\tmovq %rsi, %rsp\n\t"
        "popq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n\tret");
}

// Goes on with a lane. AddressSanitizer is told of switches between the launch's caller and the
// lanes only: that takes longer than a switch between two lanes, whose stacks lie in one region.
SIMT_UNCHECKED inline void simt_switch(void **save_sp, uint32_t thread) {
    simt.now = thread;
    simt_swap_stack(save_sp, simt.lane[thread].sp);
}

// Behind a switch to a lane. The caller's stack is known from the first of a launch.
SIMT_UNCHECKED inline void simt_arrived() {
#if SIMT_ASAN
    if (!simt.entered) return;
    simt.entered = false;
    const void *bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(simt.lanes_fake_stack, &bottom, &size);
    if (!simt.main_stack) {
        simt.main_stack = bottom;
        simt.main_stack_size = size;
    }
#endif
}

// From the launch's caller to a lane; returns when a lane leaves.
SIMT_UNCHECKED inline void simt_enter(uint32_t thread) {
#if SIMT_ASAN
    simt.entered = true;
    __sanitizer_start_switch_fiber(&simt.main_fake_stack, simt.stacks,
                                   (size_t)SIMT_MAX_THREADS * SIMT_STACK);
#endif
    simt_switch(&simt.main_sp, thread);
#if SIMT_ASAN
    __sanitizer_finish_switch_fiber(simt.main_fake_stack, nullptr, nullptr);
#endif
}

// From the running lane to the launch's caller; returns when the lane goes on, which it does not
// for_good.
SIMT_UNCHECKED inline void simt_leave(bool for_good = false) {
#if SIMT_ASAN
    __sanitizer_start_switch_fiber(for_good ? nullptr : &simt.lanes_fake_stack, simt.main_stack,
                                   simt.main_stack_size);
#endif
    if (for_good) simt.lanes_fake_stack = nullptr;
    simt_swap_stack(&simt.lane[simt.now].sp, simt.main_sp);
    simt_arrived();
}

inline uint64_t simt_op(simt_kind kind, int line, int mask = 0) {
    return (uint64_t)mask << 48 | (uint64_t)kind << 32 | (uint32_t)line;
}
inline simt_kind simt_kind_of(uint64_t op) { return (simt_kind)(op >> 32 & 0xffff); }
inline const char *simt_kind_name(uint64_t op) {
    static const char *const names[] = {"the start", "the end", "block_sync_lds", "block_sync",
                                        "wave_sync", "wave_xor", "wave_read", "wave_ballot",
                                        "wmma", "wmma_i8"};
    return names[simt_kind_of(op)];
}

// Lists who stands where: "lanes 0-15 31 at wave_xor line 12, lane 16 at the end". unit: lane or
// wave, of per threads each.
inline void simt_describe(char *text, size_t size, uint32_t first, uint32_t n, const char *unit,
                          uint32_t per) {
    size_t at = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t op = simt.lane[first + i * per].op;
        uint32_t count = 0;
        bool listed = false;
        for (uint32_t j = 0; j < n; j++) {
            if (simt.lane[first + j * per].op != op) continue;
            listed = listed || j < i;
            count++;
        }
        if (listed) continue;
        at += (size_t)snprintf(text + at, size - at, "%s%s%s", i ? ", " : "", unit,
                               count > 1 ? "s" : "");
        for (uint32_t j = i; j < n; j++) {
            uint32_t end = j;
            while (end < n && simt.lane[first + end * per].op == op) end++;
            if (end == j) continue;
            if (at + 64 > size) return;
            at += (size_t)snprintf(text + at, size - at, " %u", j);
            if (end > j + 1) at += (size_t)snprintf(text + at, size - at, "-%u", end - 1);
            j = end;
        }
        at += (size_t)snprintf(text + at, size - at, " at %s", simt_kind_name(op));
        if (op >> 48) at += (size_t)snprintf(text + at, size - at, "<%u>", (uint32_t)(op >> 48));
        if ((uint32_t)op) at += (size_t)snprintf(text + at, size - at, " line %u", (uint32_t)op);
        if (at + 64 > size) return;
    }
}

// Ends the launch: the fibers are dropped where they stand.
[[noreturn]] SIMT_UNCHECKED inline void simt_abort() {
    simt.aborted = true;
    simt_leave(true);
    abort();
}

[[noreturn]] SIMT_UNCHECKED inline void simt_diverged() {
    const uint32_t wave = simt.now / SIMT_WAVE, first = wave * SIMT_WAVE;
    char text[400], who[32], callers[2][400];
    uint32_t other = 1; // the first lane that is elsewhere than lane 0
    while (other < SIMT_WAVE - 1 && simt.lane[first + other].op == simt.lane[first].op) other++;
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t t = first + (i ? other : 0);
        // simt_swap_stack left six registers, rbp on top
        simt_callers(callers[i], sizeof callers[i], t,
                     t == simt.now ? __builtin_frame_address(0) : ((void **)simt.lane[t].sp)[5]);
    }
    simt_describe(text, sizeof text, first, SIMT_WAVE, "lane", 1);
    snprintf(who, sizeof who, "wave %u", wave);
    char in[1000] = "";
    size_t at = 0;
    for (uint32_t i = 0; i < 2; i++) {
        if (!callers[i][0]) continue;
        at += (size_t)snprintf(in + at, sizeof in - at, "%slane %u in %s", at ? "; " : " [",
                               i ? other : 0, callers[i]);
    }
    simt_error(who, 0, "divergent: %s%s%s", text, in, at ? "]" : "");
    simt_abort();
}

// The running lane stops at op; returns when it may go on, which for a collective is when all lanes
// of the wave have come, after meet.
SIMT_UNCHECKED inline void simt_stop(uint64_t op, void (*meet)(simt_lane *wave)) {
    const uint32_t first = simt.now / SIMT_WAVE * SIMT_WAVE,
                   turn = (simt.now ^ simt.flip) % SIMT_WAVE;
    simt_lane *self = &simt.lane[simt.now];
    self->op = op;
    if (turn == 0) simt.wave_op = op;
    if (op != simt.wave_op) simt.mismatch = true;
    if (turn + 1 < SIMT_WAVE) {
        simt_switch(&self->sp, first + ((turn + 1) ^ simt.flip));
        simt_arrived();
        return;
    }
    if (simt.mismatch) simt_diverged();
    if (simt_kind_of(op) <= SIMT_AT_BARRIER) {
        simt_leave();
        return;
    }
    if (meet) meet(&simt.lane[first]);
    if (simt_kind_of(op) == SIMT_AT_SYNC) simt.span++;
    simt.round++;
    simt_switch(&self->sp, first ^ simt.flip);
    simt_arrived();
}

// A fiber runs its lane of one block after another.
[[noreturn]] SIMT_UNCHECKED inline void simt_fiber() {
    simt_arrived();
    for (;;) {
        simt.kernel->call(simt.args);
        simt_stop(simt_op(SIMT_AT_RETURN, 0), nullptr);
    }
}

// A fresh fiber. Stack tops differ modulo the page, or all lanes would share a few cache lines.
SIMT_UNCHECKED inline bool simt_prepare(uint32_t thread) {
    simt_lane *lane = &simt.lane[thread];
    if (!lane->stack) {
        char *const stack = simt.stacks + (size_t)thread * SIMT_STACK;
        if (mprotect(stack, SIMT_GUARD, PROT_NONE) != 0) return false;
        lane->stack = stack;
    }
#if SIMT_ASAN
    __asan_unpoison_memory_region(lane->stack + SIMT_GUARD, SIMT_STACK - SIMT_GUARD);
#endif
    void **top = (void **)(lane->stack + SIMT_STACK - 64 - thread % 61 * 192);
    top[-1] = nullptr; // where a caller would have left its return address
    top[-2] = (void *)simt_fiber;
    for (int i = 3; i <= 8; i++) top[-i] = nullptr;
    lane->sp = top - 8;
    lane->op = simt_op(SIMT_AT_START, 0);
    return true;
}

// ---------------------------------------------------------------------------------------------
// LDS
// ---------------------------------------------------------------------------------------------

SIMT_UNCHECKED inline void simt_fill(void *at, int byte, size_t n) { // around the checks of memset
    asm volatile("rep stosb" : "+D"(at), "+c"(n) : "a"(byte) : "memory");
}

// The first lane of a block that comes by a declaration gives it memory.
SIMT_UNCHECKED inline void *simt_lds(simt_lds_site *site, size_t size) {
    if (site->block != simt.block_serial) {
        site->block = simt.block_serial;
        site->slot = simt.n_arrays;
        simt.lds_used += (uint32_t)((size + 15) / 16 * 16);
        const uint32_t most = site->granted ? SIMT_LDS_GRANTED : SIMT_LDS_BYTES;
        if (simt.lds_used > most || simt.n_arrays == SIMT_LDS_ARRAYS) {
            simt_error(nullptr, site->line, "%s brings LDS to %u bytes in %u arrays", site->name,
                       simt.lds_used, simt.n_arrays + 1);
            simt_abort();
        }
        simt.array[simt.n_arrays++] = {site, (uint32_t)size};
        simt_fill(simt.lds + site->slot * SIMT_LDS_SLOT, 0xff, size);
    }
    return simt.lds + site->slot * SIMT_LDS_SLOT;
}

enum simt_access { SIMT_READ, SIMT_WRITE, SIMT_ATOMIC };

// Text of the race that this access is, or NULL; and notes it.
SIMT_INLINED const char *simt_touch(simt_cell *c, int access, bool same_value) {
    const uint32_t me = simt.now, wave = me / SIMT_WAVE;
    const char *race = nullptr;
    if (c->write_interval == simt.interval && !(access == SIMT_ATOMIC && c->atomic)) {
        if (c->writer / SIMT_WAVE != wave || c->many_writers) {
            race = access == SIMT_READ
                       ? "is read, and was written by another wave since the last barrier"
                       : "is written, and was written by another wave since the last barrier";
        } else if (c->writer != me && c->write_span == simt.span &&
                   !(access == SIMT_WRITE && same_value)) {
            race =
                access == SIMT_READ
                    ? "is read, and was written by another lane without wave_sync between them"
                    : "is written, and was written by another lane without wave_sync between them";
        }
    }
    if (access == SIMT_READ) {
        if (c->read_interval != simt.interval) {
            c->read_interval = simt.interval;
            c->read_span = simt.span;
            c->reader = (uint16_t)me;
            c->many_waves = c->many_lanes = 0;
        } else if (c->reader / SIMT_WAVE != wave) {
            c->many_waves = 1;
        } else if (c->read_span != simt.span) {
            c->read_span = simt.span;
            c->reader = (uint16_t)me;
            c->many_lanes = 0;
        } else if (c->reader != me) {
            c->many_lanes = 1;
        }
        return race;
    }
    if (!race && c->read_interval == simt.interval) {
        if (c->many_waves || c->reader / SIMT_WAVE != wave) {
            race = "is written, and was read by another wave since the last barrier";
        } else if (c->read_span == simt.span && (c->reader != me || c->many_lanes) && !same_value) {
            race = "is written, and was read by another lane without wave_sync between them";
        }
    }
    if (c->write_interval != simt.interval) c->many_writers = 0;
    else if (c->writer / SIMT_WAVE != wave) c->many_writers = 1;
    c->write_interval = simt.interval;
    c->write_span = simt.span;
    c->writer = (uint16_t)me;
    c->atomic = access == SIMT_ATOMIC;
    return race;
}

// Every access to LDS. value: of a write. false: there is nothing there to access.
template <int access>
SIMT_UNCHECKED bool simt_lds_access(const void *p, uint32_t size, uint32_t align, const void *value,
                                    int line) {
    static const char *const verb[] = {"read", "write", "atomic"};
    const uint64_t at = (uint64_t)((const char *)p - simt.lds);
    const uint32_t slot = (uint32_t)(at / SIMT_LDS_SLOT), offset = (uint32_t)(at % SIMT_LDS_SLOT);
    if (at >= (uint64_t)SIMT_LDS_ARRAYS * SIMT_LDS_SLOT || slot >= simt.n_arrays) {
        simt_error(nullptr, line, "%s of %u bytes is not in LDS, or before its first array",
                   verb[access], size);
        return false;
    }
    const simt_lds_array *array = &simt.array[slot];
    if (offset + size > array->size) {
        if (offset > SIMT_LDS_SLOT / 2 + SIMT_LDS_SLOT / 4 && slot + 1 < simt.n_arrays) {
            simt_error(nullptr, line, "%s of %u bytes, %u before LDS array %s", verb[access], size,
                       SIMT_LDS_SLOT - offset, simt.array[slot + 1].site->name);
        } else {
            simt_error(nullptr, line, "%s of %u bytes at %u of LDS array %s, which has %u",
                       verb[access], size, offset, array->site->name, array->size);
        }
        return false;
    }
    if (offset % align) {
        simt_error(nullptr, line, "%s of %u bytes at %u of LDS array %s is misaligned",
                   verb[access], size, offset, array->site->name);
    }
    const char *race = nullptr;
    uint32_t bad = 0, bad_thread = 0;
    bool unwritten = false;
    for (uint32_t i = 0; i < size;) {
        const uint64_t word = (at + i) / 4;
        const bool whole = (at + i) % 4 == 0 && size - i >= 4;
        const uint32_t step = whole && simt.split[word] != simt.block_serial ? 4 : 1;
        if (step == 1 && simt.split[word] != simt.block_serial) {
            simt.split[word] = simt.block_serial;
            for (int b = 0; b < 4; b++) simt.byte[word * 4 + b] = simt.word[word];
        }
        simt_cell *cell = step == 4 ? &simt.word[word] : &simt.byte[at + i];
        if (access != SIMT_WRITE && cell->write_interval < simt.first_interval && !unwritten) {
            unwritten = true;
            if (!race) bad = i;
        }
        bool same = false;
        if (access == SIMT_WRITE) {
            same = true;
            for (uint32_t b = 0; b < step; b++) {
                same = same && ((const char *)p)[i + b] == ((const char *)value)[i + b];
            }
        }
        const uint32_t thread = cell->write_interval == simt.interval ? cell->writer : cell->reader;
        const char *found = simt_touch(cell, access, same);
        if (found && !race) {
            race = found;
            bad = i;
            bad_thread = thread;
        }
        i += step;
    }
    if (race) {
        simt_error(nullptr, line, "race: byte %u of LDS array %s %s (wave %u lane %u)",
                   offset + bad, array->site->name, race, bad_thread / SIMT_WAVE,
                   bad_thread % SIMT_WAVE);
    } else if (unwritten) {
        simt_error(nullptr, line,
                   "%s of byte %u of LDS array %s, which was not written in this block",
                   verb[access], offset + bad, array->site->name);
    }
    return true;
}

// ---------------------------------------------------------------------------------------------
// global memory
// ---------------------------------------------------------------------------------------------

inline void *simt_map(size_t size) {
    void *map = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) abort();
    return map;
}

// From here on no store of the block's counts as unordered.
SIMT_UNCHECKED inline void simt_order_global() {
    simt.order++;
    simt.n_stored = 0;
}

// The entry of a word, or the free one where it belongs. 16 words in a row have theirs in a row.
SIMT_UNCHECKED inline simt_stored *simt_stored_at(uintptr_t word) {
    const uint64_t row = (uint64_t)(word / 16) * 0x9e3779b97f4a7c15u >> 32;
    size_t i = (size_t)(row * 16 + word % 16) & (simt.stored_size - 1);
    while (simt.stored[i].order == simt.order && simt.stored[i].word != word) {
        i = (i + 17) & (simt.stored_size - 1);
    }
    return &simt.stored[i];
}

// Doubles the table, and so keeps it at most half full.
SIMT_UNCHECKED inline void simt_stored_grow() {
    simt_stored *const old = simt.stored;
    const size_t old_size = simt.stored_size;
    simt.stored_size = old ? 2 * old_size : 4096;
    simt.stored = (simt_stored *)simt_map(simt.stored_size * sizeof(simt_stored));
    for (size_t i = 0; i < old_size; i++) {
        if (old[i].order == simt.order) *simt_stored_at(old[i].word) = old[i];
    }
    if (old) munmap(old, old_size * sizeof(simt_stored));
}

SIMT_INLINED uint32_t simt_by(const simt_stored *s) {
    uint32_t by;
    __builtin_memcpy(&by, s->by, 4);
    return by;
}

// Every access to global memory, before it is made. value: of a write.
SIMT_UNCHECKED inline void simt_global_access(const void *p, size_t size, int access,
                                              const void *value, int line) {
    static const char *const race[] = {"is read", "is written with another value",
                                       "meets an atomic"};
    if (access == SIMT_READ && simt.n_stored == 0) return;
    const uint8_t me = (uint8_t)(simt.now / SIMT_WAVE + 1);
    const uint32_t mine = me * 0x01010101u; // all bytes of a word
    const uintptr_t at = (uintptr_t)p;
    uint8_t other = 0;
    for (size_t i = 0; i < size;) {
        if (access != SIMT_READ && 2 * (simt.n_stored + 1) > simt.stored_size) simt_stored_grow();
        simt_stored *s = simt_stored_at((at + i) / 4);
        if (s->order != simt.order) {
            if (access == SIMT_READ) {
                i += 4 - (at + i) % 4;
                continue;
            }
            *s = simt_stored{(at + i) / 4, simt.order, {0, 0, 0, 0}, 0};
            simt.n_stored++;
        }
        const bool whole = (at + i) % 4 == 0 && size - i >= 4;
        if (whole && (simt_by(s) == mine || simt_by(s) == 0)) { // what the loop would find and note
            if (access != SIMT_READ) {
                __builtin_memcpy(s->by, &mine, 4);
                s->atomic = access == SIMT_ATOMIC ? 0xf : 0;
            }
            i += 4;
            continue;
        }
        do {
            const size_t b = (at + i) % 4;
            const bool same =
                access == SIMT_WRITE && ((const char *)p)[i] == ((const char *)value)[i];
            const bool atomics = access == SIMT_ATOMIC && (s->atomic >> b & 1);
            if (s->by[b] != 0 && s->by[b] != me && !same && !atomics) other = s->by[b];
            if (access != SIMT_READ) {
                s->by[b] = atomics && s->by[b] != me && s->by[b] != 0 ? SIMT_SEVERAL : me;
                s->atomic = (uint8_t)((s->atomic & ~(1u << b)) | (access == SIMT_ATOMIC) << b);
            }
            i++;
        } while (i < size && (at + i) % 4 != 0);
    }
    if (!other) return;
    char who[16] = "several waves";
    if (other != SIMT_SEVERAL) snprintf(who, sizeof who, "wave %u", other - 1u);
    simt_error(nullptr, line,
               "race: global memory that %s wrote %s with no block_sync between them", who,
               race[access]);
}

// ---------------------------------------------------------------------------------------------
// launches
// ---------------------------------------------------------------------------------------------

inline simt_kernel *simt_find(const void *function) {
    for (simt_kernel *k = simt_kernels; k; k = k->next) {
        if (k->function == function) return k;
    }
    return nullptr;
}
inline simt_kernel *simt_find_name(const char *name) {
    for (simt_kernel *k = simt_kernels; k; k = k->next) {
        if (strcmp(k->name, name) == 0) return k;
    }
    return nullptr;
}

inline int64_t simt_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
inline void simt_profile() {
    for (const simt_kernel *k = simt_kernels; k; k = k->next) {
        if (!k->launches) continue;
        fprintf(stderr, "simt: %9.3f ms %8lld launches %9.1f us each  %s\n", (double)k->ns * 1e-6,
                (long long)k->launches, (double)k->ns * 1e-3 / (double)k->launches, k->name);
    }
}

#if SIMT_ASAN
inline void simt_death() {
    if (!simt.running) return;
    fprintf(stderr, "simt: in kernel %s, block %u of %u, z %u, wave %u lane %u\n",
            simt.kernel->name, simt.block, simt.grid_x, simt.block_z, simt.now / SIMT_WAVE,
            simt.now % SIMT_WAVE);
}
#endif

SIMT_UNCHECKED inline bool simt_run_block() {
    simt.block_serial++;
    simt.interval++;
    simt.first_interval = simt.interval;
    simt.n_arrays = simt.lds_used = 0;
    simt_order_global();
    const uint32_t waves = simt.n_threads / SIMT_WAVE;
    for (;;) {
        for (uint32_t w = 0; w < waves; w++) {
            simt.span++;
            simt.mismatch = false;
            const uint32_t wave = simt.flip ? waves - 1 - w : w;
            simt_enter(wave * SIMT_WAVE ^ simt.flip);
            if (simt.aborted) return false;
        }
        for (uint32_t w = 1; w < waves; w++) {
            if (simt.lane[w * SIMT_WAVE].op == simt.lane[0].op) continue;
            char text[400];
            simt_describe(text, sizeof text, 0, waves, "wave", SIMT_WAVE);
            simt_error("", 0, "not all waves reach the same barrier: %s", text);
            simt.aborted = true;
            return false;
        }
        const simt_kind at = simt_kind_of(simt.lane[0].op);
        if (at == SIMT_AT_RETURN) return true;
        if (at == SIMT_AT_BARRIER) simt_order_global();
        simt.interval++;
    }
}

// Runs every block; 0, or the number of errors.
inline int simt_run(simt_kernel *kernel, uint32_t grid_x, uint32_t grid_z, uint32_t threads,
                    const void *args) {
    std::lock_guard<std::mutex> hold(simt.lock);
    const int before = simt.errors;
    simt.kernel = kernel;
    simt.args = args;
    simt.grid_x = grid_x;
    simt.grid_z = grid_z;
    simt.block = simt.block_z = simt.now = 0;
    if (!kernel || grid_x == 0 || grid_z == 0 || threads == 0 || threads % SIMT_WAVE != 0 ||
        threads > SIMT_MAX_THREADS || threads > kernel->max_threads) {
        simt_error(nullptr, 0,
                   "kernel %s: %u by %u blocks of %u threads, where at most %u are declared",
                   kernel ? kernel->name : "not found", grid_x, grid_z, threads,
                   kernel ? kernel->max_threads : 0);
        return simt.errors - before;
    }
    if (!simt.lds) {
        if (getenv("SIMT_PROFILE")) atexit(simt_profile);
        const size_t bytes = (size_t)SIMT_LDS_ARRAYS * SIMT_LDS_SLOT;
        simt.stacks = (char *)simt_map((size_t)SIMT_MAX_THREADS * SIMT_STACK);
        simt.lds = (char *)simt_map(bytes);
        simt.word = (simt_cell *)simt_map(bytes / 4 * sizeof(simt_cell));
        simt.byte = (simt_cell *)simt_map(bytes * sizeof(simt_cell));
        simt.split = (uint32_t *)simt_map(bytes / 4 * sizeof(uint32_t));
#if SIMT_ASAN
        __asan_poison_memory_region(simt.lds, bytes);
        __sanitizer_set_death_callback(simt_death);
#endif
    }
    simt.n_threads = threads;
    simt.main_stack = nullptr;
    simt.aborted = false;
    simt.flip = simt.launches++ & 1 ? SIMT_WAVE - 1 : 0;
    const int64_t start = simt_ns();
    for (uint32_t t = 0; t < threads; t++) {
        if (!simt.lane[t].stack && !simt_prepare(t)) abort();
    }
    simt.running = true;
    for (uint32_t z = 0; z < grid_z && !simt.aborted; z++) {
        for (uint32_t x = 0; x < grid_x && !simt.aborted; x++) {
            simt.block = simt.flip ? grid_x - 1 - x : x;
            simt.block_z = simt.flip ? grid_z - 1 - z : z;
            simt_run_block();
        }
    }
    simt.running = false;
    kernel->launches++;
    kernel->ns += simt_ns() - start;
    if (simt.aborted) {
        for (uint32_t t = 0; t < threads; t++) simt_prepare(t);
    }
    return simt.errors - before;
}

template <typename A>
int simt_launch(void (*kernel)(const A &), uint32_t grid_x, uint32_t grid_z, uint32_t threads,
                const A &args) {
    return simt_run(simt_find((const void *)kernel), grid_x, grid_z, threads, &args);
}

struct simt_registered : simt_kernel {
    simt_registered(const char *n, const void *f, size_t size, uint32_t threads,
                    void (*c)(const void *))
        : simt_kernel{n, f, size, threads, c, simt_kernels} {
        simt_kernels = this;
    }
};

#ifndef SIMT_ENGINE_ONLY

// ---------------------------------------------------------------------------------------------
// what rocq_kernels.hip is written in
// ---------------------------------------------------------------------------------------------

#define DEV __attribute__((unused)) static inline
// Args by reference, since they are the same for all lanes.
#ifndef SIMT_PARTS
#define KERNEL(name, args, threads)                                                               \
    extern "C" void rocq_k_##name(const args &a);                                                 \
    static simt_registered simt_kernel_##name(                                                    \
        #name, (const void *)rocq_k_##name, sizeof(args), threads,                                \
        [](const void *p) { rocq_k_##name(*(const args *)p); });                                  \
    extern "C" void rocq_k_##name([[maybe_unused]] const args &a)
#else
// The file is compiled in parts side by side: in part SIMT_PARTS the kernels of formats that tests
// use little, in part SIMT_PART, of fewer, number SIMT_PART, + SIMT_PARTS, ... of the others. The
// kernels that are not in a part are templates that nobody asks for there.
constexpr bool simt_is_rare(const char *name) {
    for (; *name; name++) {
        for (const char *format : {"_q1", "_q2", "_q3", "_q4_1", "_q5", "_q6", "_iq", "_tq", "_bf16",
                                   "_mxfp6", "_nvfp"}) {
            size_t n = 0;
            while (format[n] && name[n] == format[n]) n++;
            if (!format[n]) return true;
        }
    }
    return false;
}
constexpr bool simt_in_part(const char *name, int number) {
    return SIMT_PART == SIMT_PARTS ? simt_is_rare(name)
                                   : number % SIMT_PARTS == SIMT_PART && !simt_is_rare(name);
}
#define KERNEL(name, args, threads)                                                               \
    enum { simt_ours_##name = simt_in_part(#name, __COUNTER__) };                                 \
    template <int> static void rocq_k_##name(const args &a);                                      \
    template <int ours> static int simt_register_##name() {                                       \
        if constexpr (ours) {                                                                     \
            static simt_registered kernel(                                                        \
                #name, (const void *)rocq_k_##name<ours>, sizeof(args), threads,                  \
                [](const void *p) { rocq_k_##name<ours>(*(const args *)p); });                    \
        }                                                                                         \
        return ours;                                                                              \
    }                                                                                             \
    [[maybe_unused]] static const int simt_kernel_##name =                                        \
        simt_register_##name<simt_ours_##name>();                                                 \
    template <int> static void rocq_k_##name([[maybe_unused]] const args &a)
#endif
#define KERNEL_WAVES(name, args, threads, waves) KERNEL(name, args, threads)
#define KERNEL_AHEAD KERNEL_WAVES
#define LDS(type, name, n)                                                                        \
    static simt_lds_site simt_site_##name = {#name, __LINE__, 0, 0, false};                       \
    [[maybe_unused]] type(&name)[n] = *(type(*)[n])simt_lds(&simt_site_##name, sizeof(type[n]))

#define CONSTANT static constexpr
#define LDS_GRANTED(type, name, n)                                                                \
    static simt_lds_site simt_site_##name = {#name, __LINE__, 0, 0, true};                        \
    [[maybe_unused]] type(&name)[n] = *(type(*)[n])simt_lds(&simt_site_##name, sizeof(type[n]))

#define LDS_LARGE(type, name, n) LDS(type, name, n)

#define SIMT_LINE int line = __builtin_LINE()

template <typename T> struct simt_given_type { typedef T type; };
template <typename T> using simt_given = typename simt_given_type<T>::type; // as as_given

typedef _Float16 f16;
typedef _Float16 f16x2 __attribute__((ext_vector_type(2)));
typedef uint32_t u32x2 __attribute__((ext_vector_type(2)));
typedef uint32_t u32x4 __attribute__((ext_vector_type(4)));

DEV u32x4 make4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return u32x4{x, y, z, w}; }
DEV u32x2 make2(uint32_t x, uint32_t y) { return u32x2{x, y}; }
DEV f16x2 pair_floats(float x, float y) { return f16x2{(f16)x, (f16)y}; }
DEV f16x2 pair(f16 x, f16 y) { return f16x2{x, y}; }

DEV uint32_t thread_index() { return simt.now; }
DEV uint32_t n_threads() { return simt.n_threads; }
DEV uint32_t block_index() { return simt.block; }
DEV uint32_t block_index_z() { return simt.block_z; }
DEV int target_id() { return 0; }

DEV void block_sync(SIMT_LINE) { simt_stop(simt_op(SIMT_AT_BARRIER, line), nullptr); }
DEV void block_sync_lds(SIMT_LINE) { simt_stop(simt_op(SIMT_AT_BARRIER_LDS, line), nullptr); }
DEV void group_sync_lds(int, SIMT_LINE) { block_sync_lds(line); } // of more waves than on a GPU
DEV void turn_take(int) {} // only for speed
DEV void turn_pass(int) {}
DEV void launch_begin() {}
DEV void launch_next() {}
DEV void wave_sync(SIMT_LINE) { simt_stop(simt_op(SIMT_AT_SYNC, line), nullptr); }
DEV void fence_device() {}
DEV uint32_t atomic_inc(uint32_t *p, SIMT_LINE) {
    simt_global_access(p, sizeof *p, SIMT_ATOMIC, nullptr, line);
    return (*p)++;
}
DEV void atomic_add(uint32_t *p, uint32_t n, SIMT_LINE) {
    simt_global_access(p, sizeof *p, SIMT_ATOMIC, nullptr, line);
    *p += n;
}
DEV uint32_t atomic_look(const uint32_t *p, SIMT_LINE) {
    simt_global_access(p, sizeof *p, SIMT_ATOMIC, nullptr, line);
    return *p;
}
DEV void atomic_or(uint32_t *p, uint32_t bits, SIMT_LINE) {
    simt_global_access(p, sizeof *p, SIMT_ATOMIC, nullptr, line);
    *p |= bits;
}

template <typename T> DEV void simt_aligned(const T *p, int line) {
    if (__builtin_expect((uintptr_t)p % alignof(T) == 0, 1)) return;
    simt_error(nullptr, line, "global access of %zu bytes at %p is misaligned", sizeof(T),
               (const void *)p);
    simt_abort();
}
template <int how = 0, typename T> DEV T gload(const T *p, SIMT_LINE) { // how: AGAIN or ONCE
    simt_aligned(p, line);
    simt_global_access(p, sizeof(T), SIMT_READ, nullptr, line);
    return *p;
}
template <typename T> DEV void gstore(T *p, simt_given<T> v, SIMT_LINE) {
    simt_aligned(p, line);
    simt_global_access(p, sizeof(T), SIMT_WRITE, &v, line);
    *p = v;
}

template <typename T> struct __attribute__((packed)) simt_packed { T v; };
template <typename T> SIMT_UNCHECKED T lget(const T *p, SIMT_LINE) {
    if (!simt_lds_access<SIMT_READ>(p, sizeof(T), alignof(T), nullptr, line)) {
        T poison;
        simt_fill(&poison, 0xff, sizeof(T));
        return poison;
    }
    return ((const simt_packed<T> *)p)->v;
}
template <typename T> SIMT_UNCHECKED void lput(T *p, simt_given<T> v, SIMT_LINE) {
    if (simt_lds_access<SIMT_WRITE>(p, sizeof(T), alignof(T), &v, line)) {
        ((simt_packed<T> *)p)->v = v;
    }
}
SIMT_UNCHECKED inline void lds_add(uint32_t *p, uint32_t v, SIMT_LINE) {
    if (simt_lds_access<SIMT_ATOMIC>(p, sizeof *p, alignof(uint32_t), nullptr, line)) *p += v;
}
SIMT_UNCHECKED inline void lds_add(unsigned long long *p, unsigned long long v, SIMT_LINE) {
    if (simt_lds_access<SIMT_ATOMIC>(p, sizeof *p, alignof(unsigned long long), nullptr, line)) {
        *p += v;
    }
}

SIMT_UNCHECKED inline uint32_t lds_take(uint32_t *p, uint32_t n, SIMT_LINE) {
    if (!simt_lds_access<SIMT_ATOMIC>(p, sizeof *p, alignof(uint32_t), nullptr, line)) return 0;
    const uint32_t was = *p;
    *p += n;
    return was;
}

// Brings value to a collective and waits for the others; the wave's lanes, and which of value and
// aux holds what they brought.
struct simt_met {
    simt_lane *wave;
    int side;
};
SIMT_UNCHECKED inline simt_met simt_meet(uint64_t op, uint64_t value, uint64_t aux) {
    const int side = simt.round & 1;
    simt_lane *lane = &simt.lane[simt.now];
    lane->value[side] = value;
    lane->aux[side] = aux;
    simt_stop(op, nullptr);
    return {&simt.lane[simt.now / SIMT_WAVE * SIMT_WAVE], side};
}

template <int mask, typename T> DEV T wave_xor(T x, SIMT_LINE) {
    static_assert(sizeof(T) == 4, "a lane swaps 32 bits");
    static_assert(mask == 1 || mask == 2 || mask == 4 || mask == 8 || mask == 16, "one bit");
    const simt_met met =
        simt_meet(simt_op(SIMT_AT_XOR, line, mask), __builtin_bit_cast(uint32_t, x), 0);
    return __builtin_bit_cast(T, (uint32_t)met.wave[simt.now % SIMT_WAVE ^ mask].value[met.side]);
}
template <typename T> DEV T wave_read(T x, int lane, SIMT_LINE) {
    static_assert(sizeof(T) == 4, "a lane reads 32 bits");
    const simt_met met =
        simt_meet(simt_op(SIMT_AT_READ, line), __builtin_bit_cast(uint32_t, x), (uint32_t)lane);
    if (met.wave[0].aux[met.side] != (uint32_t)lane || lane < 0 || lane >= SIMT_WAVE) {
        simt_error(nullptr, line, "wave_read of lane %d, and of lane %d in lane 0", lane,
                   (int)met.wave[0].aux[met.side]);
        simt_abort();
    }
    return __builtin_bit_cast(T, (uint32_t)met.wave[lane].value[met.side]);
}
DEV uint32_t wave_ballot(bool x, SIMT_LINE) {
    const simt_met met = simt_meet(simt_op(SIMT_AT_BALLOT, line), x, 0);
    uint32_t votes = 0;
    for (int l = 0; l < SIMT_WAVE; l++) votes |= (uint32_t)met.wave[l].value[met.side] << l;
    return votes;
}

DEV int dot4(int a, int b, int c) {
    uint32_t sum = (uint32_t)c;
    for (int i = 0; i < 32; i += 8) {
        sum += (uint32_t)((int8_t)((uint32_t)a >> i) * (int8_t)((uint32_t)b >> i));
    }
    return (int)sum;
}
DEV uint32_t halves_times(uint32_t x, uint32_t n, SIMT_LINE) {
    const uint32_t low = (x & 0xffffu) * n, high = (x >> 16) * n;
    if (low > 0xffffu || high > 0xffffu) {
        simt_error(nullptr, line, "halves_times makes 0x%08x of 0x%08x", low | high << 16, x);
        simt_abort();
    }
    return low | high << 16;
}
DEV float dot2(f16x2 a, f16x2 b, float c) {
    return fmaf((float)a.x, (float)b.x, fmaf((float)a.y, (float)b.y, c));
}
// Rounded once: sums of a product that does not overflow are exact in double.
DEV f16x2 fma2(f16x2 a, f16x2 b, f16x2 c) {
    return f16x2{(f16)((double)a.x * (double)b.x + (double)c.x),
                 (f16)((double)a.y * (double)b.y + (double)c.y)};
}
DEV uint32_t byte_perm(uint32_t hi, uint32_t lo, uint32_t sel, SIMT_LINE) {
    if (sel & 0xf8f8f8f8u) {
        simt_error(nullptr, line, "byte_perm selects by 0x%08x", sel);
        simt_abort();
    }
    const uint64_t from = (uint64_t)hi << 32 | lo;
    uint32_t to = 0;
    for (int i = 0; i < 32; i += 8) to |= (uint32_t)(from >> 8 * (sel >> i & 7) & 255) << i;
    return to;
}
DEV u32x2 byte_levels(u32x4 table, uint32_t n) {
    u32x2 to = {0, 0};
    for (int i = 0; i < 32; i += 8) {
        const uint32_t low = n >> i & 15, high = n >> (i + 4) & 15;
        to.x |= (table[low / 4] >> 8 * (low % 4) & 255) << i;
        to.y |= (table[high / 4] >> 8 * (high % 4) & 255) << i;
    }
    return to;
}

// The hardware's have no denormals on either side.
DEV float simt_flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
enum { E2M1_SIGNS = 1 };
DEV void e2m1_order(uint32_t &, uint32_t &) {}
DEV void e2m1_dot(uint32_t n, uint32_t low, uint32_t high, int &plus, int &) {
    const u32x2 q = byte_levels(make4(0x03020100, 0x0c080604, 0xfdfeff00, 0xf4f8fafc), n);
    plus = dot4((int)q.y, (int)high, dot4((int)q.x, (int)low, plus));
}
DEV float exp2_fast(float x) { return simt_flush(exp2f(x)); }
DEV float log2_fast(float x) { return log2f(simt_flush(x)); }
__attribute__((no_sanitize("float-divide-by-zero"), unused)) static inline float rcp_fast(float x) {
    return simt_flush(1.0f / simt_flush(x));
}

// The fragments, in RDNA3's layout.
//   operand: lane l holds all 16 k of row l % 16; lanes 16-31 repeat lanes 0-15
//   result:  lane l holds column l % 16, rows 2 v + l / 16
typedef _Float16 frag __attribute__((ext_vector_type(16)));
typedef int frag_i8 __attribute__((ext_vector_type(4)));
struct frag_c { float v[8]; };
struct frag_ci { int v[8]; };
enum { FRAG_SLOTS = 1 };
DEV int frag_row(int v) { return 2 * v + (int)(thread_index() >> 4 & 1); }
DEV int frag_col(int) { return (int)(thread_index() & 15); }
DEV constexpr int frag_slot(int) { return 0; }
DEV int frag_slot_col(int) { return (int)(thread_index() & 15); }
DEV float frag_col_max(float x, SIMT_LINE) { return fmaxf(x, wave_xor<16>(x, line)); }
DEV float frag_col_sum(float x, SIMT_LINE) { return x + wave_xor<16>(x, line); }
enum { FRAG_ROW_SLOTS = 8 };
DEV constexpr int frag_row_slot(int v) { return v; }
DEV int frag_slot_row(int s) { return frag_row(s); }
DEV float frag_row_max(float x, SIMT_LINE) {
    x = fmaxf(x, wave_xor<1>(x, line));
    x = fmaxf(x, wave_xor<2>(x, line));
    x = fmaxf(x, wave_xor<4>(x, line));
    return fmaxf(x, wave_xor<8>(x, line));
}
DEV float frag_row_sum(float x, SIMT_LINE) {
    x += wave_xor<1>(x, line);
    x += wave_xor<2>(x, line);
    x += wave_xor<4>(x, line);
    return x + wave_xor<8>(x, line);
}
template <typename F> DEV void frag_put_halves(const frag_c &c, F at, SIMT_LINE) {
    for (int v = 0; v < 8; v++) lput(at(frag_row(v), frag_col(v)), (f16)c.v[v], line);
}
template <typename F> DEV void frag_put_floats(const frag_c &c, F at, SIMT_LINE) {
    for (int v = 0; v < 8; v++) {
        float *const to = at(frag_row_slot(v), frag_col(v));
        if (to) gstore(to, c.v[v], line);
    }
}

struct frag_halves { u32x4 lo, hi; };
DEV frag frag_load(const f16 *tile, int stride, SIMT_LINE) {
    const u32x4 *row = (const u32x4 *)(tile + (int)(thread_index() & 15) * stride);
    const frag_halves h = {lget(row, line), lget(row + 1, line)};
    return __builtin_bit_cast(frag, h);
}
DEV frag frag_load_global(const f16 *tile, int64_t stride, SIMT_LINE) {
    const u32x4 *row = (const u32x4 *)(tile + (int64_t)(thread_index() & 15) * stride);
    const frag_halves h = {gload(row, line), gload(row + 1, line)};
    return __builtin_bit_cast(frag, h);
}
typedef frag frag_b;
DEV frag_b frag_load_b(const f16 *tile, int stride, SIMT_LINE) {
    return frag_load(tile, stride, line);
}
DEV int frag_lane(int, int eight) {
    const int lane = (int)thread_index();
    return (lane >> 3 & 1) * eight + (lane & 7) * 8;
}
DEV int frag_lane_b(int chunk, int eight) { return frag_lane(chunk, eight); }
DEV frag frag_load_lane(const f16 *tile, int chunk, SIMT_LINE) {
    const frag_halves h = {lget((const u32x4 *)tile, line),
                           lget((const u32x4 *)(tile + chunk), line)};
    return __builtin_bit_cast(frag, h);
}
DEV frag frag_load_image(const f16 *image, SIMT_LINE) {
    const u32x4 *row = (const u32x4 *)image + (thread_index() & 15);
    const frag_halves h = {gload(row, line), gload(row + 16, line)};
    return __builtin_bit_cast(frag, h);
}
DEV frag_b frag_load_lane_b(const f16 *tile, int chunk, SIMT_LINE) {
    return frag_load_lane(tile, chunk, line);
}
enum { WMMA_LDS = 0, WMMA_TILES = 1, COPIES_ASYNC = 0 };
DEV void lds_written() {}
// Products of the matrix unit from LDS, and copies to it, are done as late as they may be: where
// the thread waits for them. What products read must be there from their beginning and stay there,
// and until a copy is waited for, there are NaNs in its place.
struct simt_product {
    void (*compute)(const simt_product &);
    void *c;
    const f16 *a, *b;
    int by[4], line;
    uint32_t batch;
};
struct simt_copy {
    u32x4 *to, value;
    int line;
    uint32_t group;
};
struct simt_pending {
    uint32_t block, batch, group; // whose these are, and how many batches and groups it closed
    std::vector<simt_product> products;
    std::vector<simt_copy> copies;
};
inline simt_pending simt_all_pending[SIMT_MAX_THREADS];
inline simt_pending &simt_own_pending() {
    simt_pending &own = simt_all_pending[simt.now];
    if (own.block == simt.block_serial) return own;
    own.block = simt.block_serial;
    own.batch = own.group = 0;
    own.products.clear();
    own.copies.clear();
    return own;
}
DEV void wmma_lds_begin() {}
DEV void wmma_lds_end() { simt_own_pending().batch++; }
template <int LEFT = 0> DEV void wmma_lds_wait() {
    simt_pending &own = simt_own_pending();
    size_t n = 0;
    while (n < own.products.size() && own.products[n].batch + LEFT < own.batch) {
        own.products[n].compute(own.products[n]);
        n++;
    }
    own.products.erase(own.products.begin(), own.products.begin() + (ptrdiff_t)n);
}
// The lanes of a wave share the checks of what it reads; then each computes without them.
template <int N>
SIMT_UNCHECKED inline void simt_chunks(frag_c (&c)[N], const f16 *a, int a_chunk, int a_eight,
                                       const f16 *b, int b_chunk, int b_eight) {
    const int first = (int)(thread_index() / 32 % 4) * 16;
    for (int r = 0; r < 16; r++) {
        float x[8];
        for (int v = 0; v < 8; v++) {
            const int row = first + frag_row(v);
            x[v] = (float)a[8 * (r / 8 * a_chunk + row / 8 * a_eight + row % 8) + r % 8];
        }
        for (int j = 0; j < N; j++) {
            const int col = 16 * j + frag_col(0);
            const float y = (float)b[8 * (r / 8 * b_chunk + col / 8 * b_eight + col % 8) + r % 8];
            for (int v = 0; v < 8; v++) c[j].v[v] += x[v] * y;
        }
    }
}
template <int N> DEV void simt_chunks_check(const simt_product &p) {
    const int a_chunk = p.by[0], a_eight = p.by[1], b_chunk = p.by[2], b_eight = p.by[3];
    for (int i = (int)(thread_index() & 31); i < 128; i += 32) { // vectors of a
        const int row = i % 64;
        lget((const u32x4 *)p.a + i / 64 * a_chunk + row / 8 * a_eight + row % 8, p.line);
    }
    for (int i = (int)(thread_index() & 31); i < 32 * N; i += 32) { // and of b
        const int col = i % (16 * N);
        lget((const u32x4 *)p.b + i / (16 * N) * b_chunk + col / 8 * b_eight + col % 8, p.line);
    }
}
template <int N>
DEV void wmma_lds(frag_c (&c)[N], const f16 *a, int a_chunk, int a_eight, const f16 *b,
                  int b_chunk, int b_eight, SIMT_LINE) {
    simt_pending &own = simt_own_pending();
    own.products.push_back({[](const simt_product &p) {
                                simt_chunks_check<N>(p);
                                simt_chunks(*(frag_c(*)[N])p.c, p.a, p.by[0], p.by[1], p.b,
                                            p.by[2], p.by[3]);
                            },
                            &c, a, b, {a_chunk, a_eight, b_chunk, b_eight}, line, own.batch});
    simt_chunks_check<N>(own.products.back());
}
DEV int simt_tile_at(bool turned, int row, int r) {
    const int own = turned ? row / 64 * 64 + r : row, at = turned ? row % 64 : r;
    return own * 64 + (at / 8 ^ (own & 7)) * 8 + at % 8;
}
DEV void simt_tile_check(const f16 *tile, bool turned, int rows, int s, int line) {
    for (int i = (int)(thread_index() & 31); i < 2 * rows; i += 32) { // vectors
        const int row = turned ? i % (rows / 8) * 8 : i / 2;
        const int r = turned ? i / (rows / 8) : i % 2 * 8;
        lget((const u32x4 *)(tile + simt_tile_at(turned, row, 16 * s + r)), line);
    }
}
template <bool A_TURNED, bool B_TURNED, int N>
SIMT_UNCHECKED inline void simt_tile(frag_c (&c)[N], const f16 *a, const f16 *b, int s) {
    const int first = (int)(thread_index() / 32 % 4) * 16;
    for (int r = 16 * s; r < 16 * s + 16; r++) {
        float x[8];
        for (int v = 0; v < 8; v++) x[v] = (float)a[simt_tile_at(A_TURNED, first + frag_row(v), r)];
        for (int j = 0; j < N; j++) {
            const float y = (float)b[simt_tile_at(B_TURNED, 16 * j + frag_col(0), r)];
            for (int v = 0; v < 8; v++) c[j].v[v] += x[v] * y;
        }
    }
}
template <bool A_TURNED, bool B_TURNED, int N> DEV void simt_tiles_check(const simt_product &p) {
    simt_tile_check(p.a, A_TURNED, 64, p.by[0], p.line);
    simt_tile_check(p.b, B_TURNED, 16 * N, p.by[0], p.line);
}
template <bool A_TURNED, bool B_TURNED, int N>
DEV void wmma_tile(frag_c (&c)[N], const f16 *a, const f16 *b, int s, SIMT_LINE) {
    simt_pending &own = simt_own_pending();
    own.products.push_back({[](const simt_product &p) {
                                simt_tiles_check<A_TURNED, B_TURNED, N>(p);
                                simt_tile<A_TURNED, B_TURNED>(*(frag_c(*)[N])p.c, p.a, p.b,
                                                              p.by[0]);
                            },
                            &c, a, b, {s, 0, 0, 0}, line, own.batch});
    simt_tiles_check<A_TURNED, B_TURNED, N>(own.products.back());
}
// Rows of a in registers: of all 16 r the values in the lane's rows, in F16.
struct frag_rows { u32x4 at[16]; };
DEV frag_rows frag_rows_of(const frag_c &c, SIMT_LINE) {
    uint32_t w[4];
    for (int i = 0; i < 4; i++) {
        const f16x2 h = {(f16)c.v[2 * i], (f16)c.v[2 * i + 1]};
        w[i] = __builtin_bit_cast(uint32_t, h);
    }
    const simt_met met = simt_meet(simt_op(SIMT_AT_READ, line), (uint64_t)w[1] << 32 | w[0],
                                   (uint64_t)w[3] << 32 | w[2]);
    frag_rows rows;
    for (int r = 0; r < 16; r++) { // lanes r and r + 16 have column r
        const simt_lane &from = met.wave[(thread_index() & 16) + (uint32_t)r];
        const uint64_t low = from.value[met.side], high = from.aux[met.side];
        rows.at[r] = u32x4{(uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high,
                           (uint32_t)(high >> 32)};
    }
    return rows;
}
template <int R> DEV int simt_rows_at(int row, int r) {
    return (row / 64 * R + r) * 64 + (row % 64 / 8 ^ (r & 7)) * 8 + row % 8;
}
template <int R, int N> DEV void simt_rows_check(const simt_product &p) {
    for (int i = (int)(thread_index() & 31); i < 32 * N; i += 32) { // vectors of b
        lget((const u32x4 *)(p.b + simt_rows_at<R>(i % (2 * N) * 8, 16 * p.by[0] + i / (2 * N))),
             p.line);
    }
}
template <int R, int N>
SIMT_UNCHECKED inline void simt_rows(frag_c (&c)[N], const f16 *a, const f16 *b, int s) {
    for (int r = 0; r < 16; r++) {
        for (int j = 0; j < N; j++) {
            const float y = (float)b[simt_rows_at<R>(16 * j + frag_col(0), 16 * s + r)];
            for (int v = 0; v < 8; v++) c[j].v[v] += (float)a[8 * r + v] * y;
        }
    }
}
template <int R, int N>
DEV void wmma_tile_rows(frag_c (&c)[N], const frag_rows &a, const f16 *b, int s, SIMT_LINE) {
    simt_pending &own = simt_own_pending();
    own.products.push_back({[](const simt_product &p) {
                                simt_rows_check<R, N>(p);
                                simt_rows<R>(*(frag_c(*)[N])p.c, p.a, p.b, p.by[0]);
                            },
                            &c, (const f16 *)&a, b, {s, 0, 0, 0}, line, own.batch});
    simt_rows_check<R, N>(own.products.back());
}
DEV void simt_copy_begins(u32x4 *to, const u32x4 &value, int line) {
    const u32x4 nans = {~0u, ~0u, ~0u, ~0u};
    simt_pending &own = simt_own_pending();
    own.copies.push_back({to, value, line, own.group});
    lput(to, nans, line);
}
DEV void copy_async_part(u32x4 *to, const u32x4 *from, int bytes, SIMT_LINE) {
    u32x4 v = {0, 0, 0, 0};
    for (int i = 0; i < bytes / 2; i++) {
        v[i / 2] |= (uint32_t)gload((const uint16_t *)from + i, line) << i % 2 * 16;
    }
    simt_copy_begins(to, v, line);
}
DEV void copy_async(u32x4 *to, const u32x4 *from, bool live, SIMT_LINE) {
    const u32x4 zeros = {0, 0, 0, 0};
    simt_copy_begins(to, live ? gload(from, line) : zeros, line);
}
DEV void copies_close() { simt_own_pending().group++; }
template <int LEFT> DEV void copies_wait() {
    simt_pending &own = simt_own_pending();
    size_t n = 0;
    while (n < own.copies.size() && own.copies[n].group + LEFT < own.group) {
        lput(own.copies[n].to, own.copies[n].value, own.copies[n].line);
        n++;
    }
    own.copies.erase(own.copies.begin(), own.copies.begin() + (ptrdiff_t)n);
}
DEV frag_i8 frag_i8_load(const int8_t *tile, int stride, SIMT_LINE) {
    const u32x4 row = lget((const u32x4 *)(tile + (int)(thread_index() & 15) * stride), line);
    return __builtin_bit_cast(frag_i8, row);
}
enum { FRAG_K_STEP = 2 };
DEV int frag_k_row(int k) { return (k << 1 & 15) | k >> 3; }
DEV frag frag_from_c(const frag_c &c, SIMT_LINE) {
    const bool odd = (thread_index() & 16) != 0;
    uint32_t w[8];
    for (int i = 0; i < 4; i++) {
        const f16x2 h = {(f16)c.v[2 * i], (f16)c.v[2 * i + 1]};
        const uint32_t own = __builtin_bit_cast(uint32_t, h), other = wave_xor<16>(own, line);
        w[i] = odd ? other : own;
        w[4 + i] = odd ? own : other;
    }
    const frag_halves f = {{w[0], w[1], w[2], w[3]}, {w[4], w[5], w[6], w[7]}};
    return __builtin_bit_cast(frag, f);
}
// With 8 columns: those that follow repeat them.
enum { FRAG_8_VALUES = 8, FRAG_8_SLOTS = 1 };
typedef frag_c frag_c8;
typedef frag frag_b8;
DEV frag_b8 frag_load_b8(const f16 *tile, int stride, SIMT_LINE) {
    const u32x4 *row = (const u32x4 *)(tile + (int)(thread_index() & 7) * stride);
    const frag_halves h = {lget(row, line), lget(row + 1, line)};
    return __builtin_bit_cast(frag, h);
}
DEV frag_b8 frag_b8_from_c(const frag_c8 &c, SIMT_LINE) { return frag_from_c(c, line); }
DEV frag frag_turned(const f16 *tile, int stride, SIMT_LINE) {
    uint16_t h[16];
    for (int k = 0; k < 16; k++) {
        h[k] = lget((const uint16_t *)tile + frag_k_row(k) * stride + (int)(thread_index() & 15),
                    line);
    }
    frag f;
    __builtin_memcpy(&f, h, sizeof f);
    return f;
}

typedef float simt_f32x16 __attribute__((ext_vector_type(16)));
typedef int32_t simt_i32x16 __attribute__((ext_vector_type(16)));
typedef uint16_t simt_u16x16 __attribute__((ext_vector_type(16)));

// Widens 16 halves; without F16C the compiler would call a function for each.
SIMT_UNCHECKED inline void simt_widen(simt_f32x16 *to, const frag *from) {
    const simt_i32x16 h = __builtin_convertvector(*(const simt_u16x16 *)from, simt_i32x16);
    const simt_i32x16 magnitude = (h & 0x7fff) << 13;
    const simt_f32x16 scaled = __builtin_bit_cast(simt_f32x16, magnitude) * 0x1p112f;
    simt_i32x16 bits = __builtin_bit_cast(simt_i32x16, scaled);
    bits |= (magnitude >= 0x0f800000) & 0x7f800000; // inf and NaN
    bits |= (h & 0x8000) << 16;
    *to = __builtin_bit_cast(simt_f32x16, bits);
}

// Lanes 16-31 must have brought what lanes 0-15 have.
SIMT_UNCHECKED inline void simt_check_repeats(const simt_lane *wave, size_t size) {
    for (int l = 0; l < 16; l++) {
        for (int o = 0; o < 2; o++) {
            const char *x = (const char *)wave[l].in[o], *y = (const char *)wave[l + 16].in[o];
            for (size_t i = 0; i < size; i++) {
                if (x[i] == y[i]) continue;
                char who[64];
                snprintf(who, sizeof who, "wave %u lanes %d and %d", simt.now / SIMT_WAVE, l,
                         l + 16);
                simt_error(who, (int)(uint32_t)wave->op, "operand %s of wmma differs at byte %zu",
                           o ? "B" : "A", i);
                simt_abort();
            }
        }
    }
}

SIMT_UNCHECKED inline void simt_wmma(simt_lane *wave) {
    simt_f32x16 a[16], b[16], bt[16];
    simt_check_repeats(wave, sizeof(frag));
    for (int l = 0; l < 16; l++) {
        simt_widen(&a[l], (const frag *)wave[l].in[0]);
        simt_widen(&b[l], (const frag *)wave[l].in[1]);
    }
    for (int k = 0; k < 16; k++) {
        for (int n = 0; n < 16; n++) ((float *)&bt[k])[n] = ((const float *)&b[n])[k];
    }
    for (int m = 0; m < 16; m++) {
        simt_lane *half = wave + 16 * (m & 1);
        simt_f32x16 sum;
        for (int n = 0; n < 16; n++) ((float *)&sum)[n] = ((frag_c *)half[n].inout)->v[m / 2];
        for (int k = 0; k < 16; k++) sum += ((const float *)&a[m])[k] * bt[k];
        for (int n = 0; n < 16; n++) ((frag_c *)half[n].inout)->v[m / 2] = ((const float *)&sum)[n];
    }
}

SIMT_UNCHECKED inline void simt_wmma_i8(simt_lane *wave) {
    simt_check_repeats(wave, sizeof(frag_i8));
    for (int m = 0; m < 16; m++) {
        simt_lane *half = wave + 16 * (m & 1);
        const int8_t *a = (const int8_t *)wave[m].in[0];
        for (int n = 0; n < 16; n++) {
            const int8_t *b = (const int8_t *)wave[n].in[1];
            int *c = &((frag_ci *)half[n].inout)->v[m / 2];
            int sum = 0;
            for (int k = 0; k < 16; k++) sum += a[k] * b[k];
            *c = (int)((uint32_t)*c + (uint32_t)sum);
        }
    }
}

DEV void simt_wmma_at(simt_kind kind, const void *a, const void *b, void *c, int line,
                      void (*meet)(simt_lane *)) {
    simt_lane *lane = &simt.lane[simt.now];
    lane->in[0] = a;
    lane->in[1] = b;
    lane->inout = c;
    simt_stop(simt_op(kind, line), meet);
}
DEV void wmma(frag_c &c, const frag &a, const frag &b, SIMT_LINE) { // c += a b
    simt_wmma_at(SIMT_AT_WMMA, &a, &b, &c, line, simt_wmma);
}
enum { FRAG_VECTORS = 4 };
DEV int frag_vector_row(int) { return (int)(thread_index() & 15); }
DEV int frag_vector_k(int i) { return 8 * i; }
DEV void wmma_vectors(frag_c &c, const u32x4 (&a)[4], const u32x4 (&b)[4], SIMT_LINE) {
    for (int i = 0; i < 4; i += 2) {
        const frag_halves ha = {a[i], a[i + 1]}, hb = {b[i], b[i + 1]};
        wmma(c, __builtin_bit_cast(frag, ha), __builtin_bit_cast(frag, hb), line);
    }
}
DEV void wmma_i8(frag_ci &c, const frag_i8 &a, const frag_i8 &b, SIMT_LINE) {
    simt_wmma_at(SIMT_AT_WMMA_I8, &a, &b, &c, line, simt_wmma_i8);
}

// What the GPU languages have beside libm. Macros, since a newer libm may have some, too.
DEV double simt_sinpi(double x) {
    const double r = remainder(x, 2.0); // -1 .. 1, exact
    return fabs(r) <= 0.25 ? sin(r * M_PI) : fabs(r) >= 0.75 ? sin((copysign(1.0, r) - r) * M_PI)
                                           : copysign(cos((fabs(r) - 0.5) * M_PI), r);
}
DEV double simt_cospi(double x) {
    const double r = fabs(remainder(x, 2.0));
    return r <= 0.25 ? cos(r * M_PI) : r >= 0.75 ? -cos((1.0 - r) * M_PI) : sin((0.5 - r) * M_PI);
}
#define sinpi(x) simt_sinpi(x)
#define cospi(x) simt_cospi(x)
#define sinpif(x) ((float)simt_sinpi((double)(float)(x)))
#define cospif(x) ((float)simt_cospi((double)(float)(x)))
DEV void sincospif(float x, float *s, float *c) {
    *s = sinpif(x);
    *c = cospif(x);
}
DEV void sincospi(double x, double *s, double *c) {
    *s = sinpi(x);
    *c = cospi(x);
}
DEV float rsqrtf(float x) { return 1.0f / sqrtf(x); }

template <typename T> DEV T min(T a, T b) { return b < a ? b : a; }
template <typename T> DEV T max(T a, T b) { return a < b ? b : a; }
DEV float min(float a, float b) { return fminf(a, b); }
DEV float max(float a, float b) { return fmaxf(a, b); }
DEV int __popc(uint32_t x) { return __builtin_popcount(x); }
DEV int __ffs(uint32_t x) { return __builtin_ffs((int)x); }
DEV int __clz(int x) { return x ? __builtin_clz((uint32_t)x) : 32; }
DEV uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }

#endif // SIMT_ENGINE_ONLY
#endif
