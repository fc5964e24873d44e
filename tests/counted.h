// Allocation functions that count, and deny one call, for tests that rename those of a program. An
// implementation of rocq.h in another object has its calls renamed there (tests/run), so the two
// functions that it calls have external linkage.

#ifndef TESTS_COUNTED_H
#define TESTS_COUNTED_H

#include <stdint.h>
#include <stdlib.h>

static int64_t n_live, n_calls, fail_at = -1; // blocks alive, calls so far, and the call that fails

void *counted_malloc(size_t size) {
    if (n_calls++ == fail_at) return NULL;
    void *ptr = (malloc)(size);
    if (ptr) n_live++;
    return ptr;
}

static inline void *counted_calloc(size_t n, size_t size) {
    if (n_calls++ == fail_at) return NULL;
    void *ptr = (calloc)(n, size);
    if (ptr) n_live++;
    return ptr;
}

static inline void *counted_realloc(void *ptr, size_t size) {
    if (n_calls++ == fail_at) return NULL;
    void *moved = (realloc)(ptr, size);
    if (moved && !ptr) n_live++;
    return moved;
}

void counted_free(void *ptr) {
    if (ptr) n_live--;
    (free)(ptr);
}

#endif // TESTS_COUNTED_H
