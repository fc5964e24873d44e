// tests/test_kv.c in a GPU context: the same calls through the kernels, on the stand-in.
#define KV_BACKEND ROCQ_BACKEND_GPU
#define KV_SCRIPT 60
#define KV_TEARDOWN nothing_was_wrong
#include "simt/hip.h"
#include "test_kv.c"

static int nothing_was_wrong(void **state) {
    (void)state;
    if (simt_error_count() != 0) print_message("%s\n", simt_errors_text());
    return simt_error_count() != 0 || simt_live_sum() != 0 ? -1 : 0;
}
