// Runs the tasks of a CPU context and calls rocq_cancel at one of them: for tests of what a
// cancellation leaves, wherever it comes.

#ifndef TESTS_CANCELLING_H
#define TESTS_CANCELLING_H

#include "../rocq.h"

static rocq_ctx *to_cancel;
static int64_t n_runs, cancel_at = -1; // runs of tasks so far, and the one with rocq_cancel
static bool cancel_behind;             // that comes when the run is over, not when it begins

// rocq_desc.run_tasks
static void cancelling_tasks(void (*task)(void *arg, int32_t i), void *arg, int32_t n,
                             void *user) {
    const bool cancels = n_runs++ == cancel_at;
    (void)user;
    if (cancels && !cancel_behind) rocq_cancel(to_cancel);
    for (int32_t i = 0; i < n; i++) task(arg, i);
    if (cancels && cancel_behind) rocq_cancel(to_cancel);
}

#endif // TESTS_CANCELLING_H
