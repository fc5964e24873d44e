// block_layout of rocq_kernels.hip repeats what the CPU's codecs say of a format. This program has
// both, without any kernel, and fails where they differ.
#define SIMT_PARTS 1
#define SIMT_PART 2 // none of the kernels
#define ROCQ_SIMT "tests/simt/simt.h"
#include "rocq_kernels.hip"

#undef ROCQ_DEVICE
#define ROCQ_IMPLEMENTATION
#include "rocq.h"

#include <stdio.h>

template <int F> static int differs() {
    typedef block_layout<F> layout;
    const rocq__codec *codec = rocq__codec_of((rocq_format)F);
    // The levels of a signed format, of a table and of the MX formats are not code - offset.
    const bool has_offset = codec->pack && !codec->grid.table && !layout::is_signed;
    if (layout::halves == (codec->group == 16) && layout::has_min == codec->has_min &&
        (!has_offset || layout::offset == -codec->grid.q_lo)) return 0;
    printf("block_layout of %s differs from its codec\n", codec->info.name);
    return 1;
}

int main() {
    int n = 0;
#define ROCQ_X(F, N, C, B, S, T, D) n += differs<F>();
    ROCQ_K_PLANES(ROCQ_X)
    return n > 0;
}
