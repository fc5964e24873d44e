// Some of tests/test_vae.c in a GPU context: the same models through the kernels, on the stand-in.
// For a real GPU tests/test_vae.c itself is linked with its kernels, with the backend and no
// teardown defined.
#define VAE_BACKEND ROCQ_BACKEND_GPU
#define VAE_TEARDOWN nothing_was_wrong
#define VAE_SIMULATED 1
static int nothing_was_wrong(void **state);
#include "simt/hip.h"

#include "test_vae.c"

static int nothing_was_wrong(void **state) {
    (void)state;
    if (simt_error_count() != 0) print_message("%s\n", simt_errors_text());
    return simt_error_count() != 0 || simt_live_sum() != 0 ? -1 : 0;
}
