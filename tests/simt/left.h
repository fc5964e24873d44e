// left.h - for cmocka's set-up and tear-down on the stand-in: the runtime as it comes, and nothing
// left behind.

#ifndef SIMT_LEFT_H
#define SIMT_LEFT_H

#include "hip.h"

static int simt_left_before; // by tests that failed

static inline void simt_begin(void) {
    simt_left_before = simt_live_sum();
    simt_fail_at(0, 0);
    simt_set_devices(1);
    simt_set_memory((size_t)1 << 30);
    simt_set_image_error(0);
    simt_set_selftest_error(0);
    simt_set_optional(1);
    simt_set_work(SIMT_LATE);
}

// 0 when nothing is left, here (n_host blocks) or in the runtime, and that was never called
// wrongly.
static inline int simt_check_left(int64_t n_host) {
    simt_fail_at(0, 0);
    if (simt_error_count() != 0) print_message("%s\n", simt_errors_text());
    const int left = simt_live_sum() - simt_left_before, errors = simt_error_count();
    simt_forget_errors();
    if (left != 0 || n_host != 0) print_message("%d and %d left\n", left, (int)n_host);
    return left != 0 || errors != 0 || n_host != 0 ? -1 : 0;
}

#endif
