// The stand-in itself: correct kernels give exact results, broken ones are reported, and its HIP
// runtime keeps the rules that rocq.h relies on.
#define ROCQ_DEVICE
#include "rocq.h"

#include "simt.h"

#include "hip.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/wait.h>
#include <unistd.h>
extern "C" {
#include <cmocka.h>
}

struct test_args {
    const void *in, *in2;
    void *out;
    int n;
};

// ---------------------------------------------------------------------------------------------
// correct kernels
// ---------------------------------------------------------------------------------------------

DEV float in_f32(const test_args &a, uint32_t i) { return gload((const float *)a.in + i); }

// Sum of a block, in the order of a tree over lanes, then over waves.
KERNEL(test_sum, test_args, 1024) {
    LDS(float, work, 32);
    const uint32_t t = thread_index(), lane = t % 32;
    float x = in_f32(a, block_index() * n_threads() + t);
    x += wave_xor<1>(x);
    x += wave_xor<2>(x);
    x += wave_xor<4>(x);
    x += wave_xor<8>(x);
    x += wave_xor<16>(x);
    if (lane == 0) lput(work + t / 32, x);
    block_sync();
    float sum = 0.0f;
    for (uint32_t w = 0; w < n_threads() / 32; w++) sum += lget(work + w);
    gstore((float *)a.out + block_index() * n_threads() + t, sum);
}

// Transpose of n by n bytes, halves or words, of a block's own: n up to 48, a multiple of nothing.
template <typename T> DEV void transpose(const test_args &a) {
    LDS(T, tile, 48 * 48);
    const T *in = (const T *)a.in + (size_t)block_index() * (size_t)(a.n * a.n);
    T *out = (T *)a.out + (size_t)block_index() * (size_t)(a.n * a.n);
    for (int i = (int)thread_index(); i < a.n * a.n; i += (int)n_threads()) {
        lput(tile + i, gload(in + i));
    }
    block_sync();
    for (int i = (int)thread_index(); i < a.n * a.n; i += (int)n_threads()) {
        gstore(out + i, lget(tile + i % a.n * a.n + i / a.n));
    }
}
KERNEL(test_transpose_1, test_args, 256) { transpose<uint8_t>(a); }
KERNEL(test_transpose_2, test_args, 256) { transpose<uint16_t>(a); }
KERNEL(test_transpose_4, test_args, 256) { transpose<uint32_t>(a); }

// Lanes exchange, by every mask, by wave_read, by ballot, and through LDS with wave_sync.
KERNEL(test_lanes, test_args, 64) {
    LDS(uint32_t, mine, 64);
    const uint32_t t = thread_index();
    uint32_t *out = (uint32_t *)a.out + t * 40;
    gstore(out + 0, wave_xor<1>(t));
    gstore(out + 1, wave_xor<2>(t));
    gstore(out + 2, wave_xor<4>(t));
    gstore(out + 3, wave_xor<8>(t));
    gstore(out + 4, wave_xor<16>(t));
    gstore(out + 5, wave_ballot(t % 3 == 0));
    gstore(out + 6, (uint32_t)wave_xor<4>((float)t));
    lput(mine + t, t * t);
    wave_sync();
    gstore(out + 7, lget(mine + (t ^ 31)));
    for (int lane = 0; lane < 32; lane++) gstore(out + 8 + lane, wave_read(t, lane));
}

// Integer atomics of all threads, in LDS and in memory.
KERNEL(test_atomics, test_args, 256) {
    LDS(uint32_t, sum, 1);
    LDS(unsigned long long, wide, 1);
    if (thread_index() == 0) {
        lput(sum, 0u);
        lput(wide, 0ull);
    }
    block_sync();
    lds_add(sum, thread_index());
    lds_add(wide, (unsigned long long)thread_index() << 32);
    const uint32_t ticket = atomic_inc((uint32_t *)a.out);
    atomic_or((uint32_t *)a.out + 1, 1u << (thread_index() & 31));
    block_sync();
    if (thread_index() != 0) return;
    gstore((uint32_t *)a.out + 2, lget(sum));
    gstore((uint32_t *)a.out + 3, (uint32_t)(lget(wide) >> 32));
    gstore((uint32_t *)a.out + 4, ticket);
}

// C = A B^T in F16 through LDS and from memory, C twice over; then the operand that C is made into.
KERNEL(test_wmma, test_args, 32) {
    enum { STRIDE = 24 };
    LDS(f16, tile, 2 * 16 * STRIDE);
    const f16 *in = (const f16 *)a.in;
    const int lane = (int)thread_index();
    for (int i = lane; i < 512; i += 32) lput(tile + i / 16 * STRIDE + i % 16, gload(in + i));
    block_sync();
    frag_c c = {{0, 0, 0, 0, 0, 0, 0, 0}};
    wmma(c, frag_load(tile, STRIDE), frag_load(tile + 16 * STRIDE, STRIDE));
    wmma(c, frag_load_global(in, 16), frag_load_global(in + 256, 16));
    float *out = (float *)a.out;
    for (int v = 0; v < 8; v++) gstore(out + frag_row(v) * 16 + frag_col(v), c.v[v]);
    const frag b = frag_from_c(c);
    for (int k = 0; k < 16; k++) gstore(out + 256 + 16 * (lane & 15) + k, (float)b[k]);
    float top = c.v[0], sum = c.v[0];
    for (int v = 1; v < 8; v++) {
        top = fmaxf(top, c.v[v]);
        sum += c.v[v];
    }
    gstore(out + 512 + frag_slot_col(0), frag_col_max(top));
    gstore(out + 528 + frag_slot_col(0), frag_col_sum(sum));
}
KERNEL(test_wmma_i8, test_args, 32) {
    LDS(int8_t, tile, 512);
    for (int i = (int)thread_index(); i < 512; i += 32) {
        lput(tile + i, gload((const int8_t *)a.in + i));
    }
    block_sync();
    frag_ci c = {{1, 1, 1, 1, 1, 1, 1, 1}};
    wmma_i8(c, frag_i8_load(tile, 16), frag_i8_load(tile + 256, 16));
    for (int v = 0; v < 8; v++) gstore((int *)a.out + frag_row(v) * 16 + frag_col(v), c.v[v]);
}

// Two waves hand a word back and forth, a barrier between all accesses.
KERNEL(test_ping_pong, test_args, 64) {
    LDS(int, word, 1);
    if (thread_index() == 0) lput(word, 1);
    for (int i = 0; i < a.n; i++) {
        block_sync();
        if ((int)thread_index() / 32 == (i & 1) && thread_index() % 32 == 7) {
            lput(word, 3 * lget(word) + i);
        }
    }
    block_sync();
    if (thread_index() == 63) gstore((int *)a.out, lget(word));
}

// Whole waves may leave early when no barrier follows; lanes of a wave may write the same value.
KERNEL(test_early, test_args, 256) {
    LDS(int, flag, 8);
    if (thread_index() >= 128) return;
    const int wave = (int)thread_index() / 32;
    lput(flag + wave, wave);
    wave_sync();
    gstore((int *)a.out + thread_index(), lget(flag + wave));
}

// Global memory passed from wave to wave across block_sync, and LDS across block_sync_lds, beside
// global stores that no other wave reads: of other bytes of the same words, of the same value, of
// the wave's own. n words a thread fill the stand-in's table of stores several times over.
KERNEL(test_passing, test_args, 128) {
    LDS(uint32_t, work, 128);
    const uint32_t t = thread_index(), n = n_threads();
    uint32_t *out = (uint32_t *)a.out;
    for (uint32_t i = 0; i < (uint32_t)a.n; i++) gstore(out + i * n + t, i + t);
    block_sync();
    uint32_t sum = 0;
    for (uint32_t i = 0; i < (uint32_t)a.n; i++) sum += gload(out + i * n + (t ^ 32));
    lput(work + t, sum);
    block_sync_lds();
    sum = lget(work + (t ^ 64));
    uint32_t *more = out + (uint32_t)a.n * n;
    if (t < 32) gstore((uint8_t *)more, (uint8_t)1);
    else if (t >= 64) gstore((uint8_t *)more + 1, (uint8_t)2);
    gstore(more + 1, 7u);
    gstore(more + 2 + t, sum);
    block_sync_lds();
    gstore(more + 2 + t, gload(more + 2 + t) + 1u);
}

KERNEL(test_index, test_args, 96) {
    const uint32_t n = block_index() + 3 * block_index_z();
    gstore((uint32_t *)a.out + n * n_threads() + thread_index(), n * 1000 + thread_index());
}

// ---------------------------------------------------------------------------------------------
// broken kernels
// ---------------------------------------------------------------------------------------------

KERNEL(bad_barrier_lanes, test_args, 64) { if (thread_index() < 40) block_sync(); }
KERNEL(bad_barrier_wave, test_args, 64) { if (thread_index() < 32) block_sync(); }
KERNEL(bad_barrier_twice, test_args, 64) {
    if (thread_index() < 32) block_sync();
    block_sync();
}
KERNEL(bad_barrier_loop, test_args, 64) {
    for (uint32_t i = 0; i <= thread_index() / 32; i++) block_sync();
}
KERNEL(bad_collective_kinds, test_args, 32) {
    uint32_t x = thread_index();
    if (x & 1) x = wave_xor<1>(x);
    else x = wave_ballot(true);
    gstore((uint32_t *)a.out + thread_index(), x);
}
KERNEL(bad_collective_returned, test_args, 32) {
    if (thread_index() == 13) return;
    gstore((uint32_t *)a.out + thread_index(), wave_xor<1>(thread_index()));
}
KERNEL(bad_collective_and_barrier, test_args, 32) {
    if (thread_index() == 31) block_sync();
    else wave_sync();
}
KERNEL(bad_collective_masks, test_args, 32) { // of one line
    uint32_t x = thread_index();
    x = (x & 4) ? wave_xor<1>(x) : wave_xor<2>(x);
    gstore((uint32_t *)a.out + thread_index(), x);
}
KERNEL(bad_read_lanes, test_args, 32) {
    gstore((uint32_t *)a.out + thread_index(), wave_read(1u, (int)(thread_index() / 31)));
}
KERNEL(bad_read_range, test_args, 32) {
    gstore((uint32_t *)a.out + thread_index(), wave_read(1u, 32));
}
KERNEL(bad_byte_perm, test_args, 32) { gstore((uint32_t *)a.out, byte_perm(1, 2, 0x0c)); }

KERNEL(bad_race_write_read, test_args, 64) {
    LDS(float, work, 64);
    lput(work + thread_index(), 1.0f);
    gstore((float *)a.out + thread_index(), lget(work + (thread_index() ^ 32)));
}
KERNEL(bad_race_read_write, test_args, 64) {
    LDS(float, work, 2);
    if (thread_index() < 2) lput(work + thread_index(), 1.0f);
    block_sync();
    // the wave that the stand-in runs first reads
    if ((atomic_inc((uint32_t *)a.out) & 63) < 32) {
        gstore((float *)a.out + 1 + thread_index(), lget(work));
    } else if (thread_index() % 32 == 9) {
        lput(work, 2.0f);
    }
}
KERNEL(bad_race_write_write, test_args, 64) {
    LDS(float, work, 1);
    lput(work, 1.0f);
}
KERNEL(bad_race_bytes, test_args, 64) { // of one word: bytes 1 by wave 0, byte 2 by both
    LDS(uint8_t, work, 4);
    if (thread_index() == 0) lput(work + 1, 1);
    if (thread_index() % 32 == 0) lput(work + 2, 1);
}
KERNEL(bad_race_atomic, test_args, 64) {
    LDS(uint32_t, work, 1);
    if (thread_index() == 0) lput(work, 0u);
    block_sync();
    lds_add(work, 1u);
    if (thread_index() == 40) gstore((uint32_t *)a.out, lget(work));
}
KERNEL(bad_race_lanes, test_args, 32) { // a collective does not order LDS
    LDS(uint32_t, work, 32);
    lput(work + thread_index(), thread_index());
    gstore((uint32_t *)a.out + thread_index(),
           wave_xor<1>(thread_index()) + lget(work + (thread_index() ^ 1)));
}
KERNEL(bad_race_values, test_args, 32) {
    LDS(uint32_t, work, 1);
    lput(work, thread_index());
}

template <typename F> DEV void bad_pass(const test_args &a, F order) {
    if (thread_index() == (uint32_t)a.n) gstore((uint32_t *)a.out + 5, 1u);
    order();
    if (thread_index() == 63u - (uint32_t)a.n) {
        const u32x4 v = gload((const u32x4 *)a.out + 1);
        gstore((uint32_t *)a.out, v.y);
    }
}
KERNEL(bad_pass_none, test_args, 64) { bad_pass(a, [] {}); }
KERNEL(bad_pass_fence, test_args, 64) { bad_pass(a, [] { fence_device(); }); }
KERNEL(bad_pass_lds, test_args, 64) { bad_pass(a, [] { block_sync_lds(); }); }
KERNEL(bad_pass_late, test_args, 64) { // the full barrier came before the store
    block_sync();
    bad_pass(a, [] {
        block_sync_lds();
        block_sync_lds();
    });
    block_sync();
}
KERNEL(bad_pass_part, test_args, 64) { // a byte of what is read
    if (thread_index() == 0) gstore((uint8_t *)a.out + 6, (uint8_t)1);
    block_sync_lds();
    if (thread_index() == 32) gstore((uint32_t *)a.out, gload((const uint32_t *)a.out + 1));
}
KERNEL(bad_pass_atomic, test_args, 64) {
    if (thread_index() == 0) gstore((uint32_t *)a.out, 0u);
    block_sync();
    atomic_inc((uint32_t *)a.out);
    block_sync_lds();
    if (thread_index() == 40) gstore((uint32_t *)a.out + 1, gload((const uint32_t *)a.out));
}
KERNEL(bad_pass_write, test_args, 64) {
    if (thread_index() % 32 == 0) gstore((uint32_t *)a.out, thread_index() + 1);
    block_sync_lds();
}
KERNEL(bad_barrier_kinds, test_args, 64) {
    if (thread_index() < 32) block_sync_lds();
    else block_sync();
}

KERNEL(bad_lds_end, test_args, 32) {
    LDS(float, work, 31);
    lput(work + thread_index(), 0.0f);
}
KERNEL(bad_lds_start, test_args, 32) {
    LDS(float, first, 4);
    LDS(float, work, 32);
    lput(first, 0.0f);
    lput(work + thread_index() - 1, 0.0f);
}
KERNEL(bad_lds_part, test_args, 32) { // the last word of the vector
    LDS(float, work, 7);
    if (thread_index() < 2) lput((u32x4 *)(void *)work + thread_index(), make4(0, 0, 0, 0));
}
KERNEL(bad_lds_none, test_args, 32) {
    gstore((float *)a.out + thread_index(), lget((const float *)a.in));
}
KERNEL(bad_lds_align, test_args, 32) {
    LDS(uint32_t, work, 8);
    if (thread_index() == 0) lput((u32x4 *)(void *)(work + (a.n & 1)), make4(0, 0, 0, 0));
}
KERNEL(bad_lds_unwritten, test_args, 32) {
    LDS(float, work, 32);
    if (thread_index() != 17) lput(work + thread_index(), 1.0f);
    wave_sync();
    gstore((float *)a.out + thread_index(), lget(work + thread_index()));
}
KERNEL(bad_lds_stale, test_args, 32) { // block 1 reads what block 0 wrote, or the other way round
    LDS(float, work, 32);
    if (block_index() == (uint32_t)a.n) lput(work + thread_index(), 1.0f);
    gstore((float *)a.out + thread_index(), lget(work + thread_index()));
}
KERNEL(bad_lds_byte, test_args, 32) {
    LDS(uint8_t, work, 4);
    if (thread_index() < 3) lput(work + thread_index(), 1);
    wave_sync();
    if (thread_index() == 0) gstore((uint32_t *)a.out, lget((const uint32_t *)(const void *)work));
}
KERNEL(bad_lds_size, test_args, 32) {
    LDS(float, work, 16384);
    LDS(float, more, 1);
    lput(work + thread_index(), 0.0f);
    lput(more, 0.0f);
}
KERNEL(bad_wmma_a, test_args, 32) {
    frag_c c = {{0, 0, 0, 0, 0, 0, 0, 0}};
    frag x = {}, y = {};
    if (thread_index() == 20) x[5] = (f16)1.0f;
    wmma(c, x, y);
    gstore((float *)a.out + thread_index(), c.v[0]);
}
KERNEL(bad_wmma_b, test_args, 32) {
    frag_c c = {{0, 0, 0, 0, 0, 0, 0, 0}};
    frag x = {}, y = {};
    if (thread_index() == 3) y[15] = (f16)1.0f;
    wmma(c, x, y);
    gstore((float *)a.out + thread_index(), c.v[0]);
}
KERNEL(bad_wmma_i8, test_args, 32) {
    frag_ci c = {{0, 0, 0, 0, 0, 0, 0, 0}};
    frag_i8 x = {0, 0, 0, 0}, y = {0, 0, 0, 0};
    if (thread_index() == 31) x.w = 1 << 24;
    wmma_i8(c, x, y);
    gstore((int *)a.out + thread_index(), c.v[0]);
}
KERNEL(bad_align, test_args, 32) { gstore((u32x2 *)((uint32_t *)a.out + (a.n & 1)), make2(0, 0)); }
KERNEL(bad_global_read, test_args, 32) {
    gstore((float *)a.out, in_f32(a, (uint32_t)a.n + thread_index()));
}
KERNEL(bad_global_write, test_args, 32) {
    gstore((float *)a.out + (uint32_t)a.n - thread_index(), 1.0f);
}
KERNEL(bad_lds_plain, test_args, 32) {
    LDS(float, work, 32);
    lput(work + thread_index(), 1.0f);
    gstore((float *)a.out + thread_index(), work[thread_index()]);
}

// ---------------------------------------------------------------------------------------------
// tests of kernels
// ---------------------------------------------------------------------------------------------

static uint32_t random_state = 1;
static uint32_t random_u32() {
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8 ^ random_state << 16;
}

// A kernel without errors, in both orders; out is set to 0xff before each.
template <typename F>
static void good(void (*kernel)(const test_args &), uint32_t blocks, uint32_t z, uint32_t threads,
                 test_args a, void *out, size_t size, F check) {
    a.out = out;
    for (int order = 0; order < 2; order++) {
        memset(out, 0xff, size);
        simt_clear_errors();
        assert_int_equal(simt_launch(kernel, blocks, z, threads, a), 0);
        assert_string_equal(simt_error_text(), "");
        check();
    }
}

static void test_reduction(void **) {
    static float in[4 * 1024], out[4 * 1024];
    for (float &x : in) x = (float)(random_u32() % 1000) - 500.0f;
    for (uint32_t threads = 32; threads <= 1024; threads += 32) {
        good(rocq_k_test_sum, 4, 1, threads, {in, nullptr, nullptr, 0}, out, sizeof out, [&] {
            for (uint32_t b = 0; b < 4; b++) {
                float sum = 0.0f;
                for (uint32_t t = 0; t < threads; t++) sum += in[b * threads + t];
                for (uint32_t t = 0; t < threads; t++) assert_true(out[b * threads + t] == sum);
            }
        });
    }
}

static void test_transpose(void **) {
    static uint32_t in[2 * 48 * 48], out[2 * 48 * 48];
    for (uint32_t &x : in) x = random_u32();
    for (int n : {1, 7, 32, 47, 48}) {
        const test_args a = {in, nullptr, nullptr, n};
        good(rocq_k_test_transpose_1, 2, 1, 96, a, out, sizeof out, [&] {
            for (int i = 0; i < 2 * n * n; i++) {
                const int b = i / (n * n), r = i % (n * n) / n, c = i % n;
                assert_int_equal(((uint8_t *)out)[i], ((uint8_t *)in)[b * n * n + c * n + r]);
            }
        });
        good(rocq_k_test_transpose_2, 2, 1, 256, a, out, sizeof out, [&] {
            for (int i = 0; i < 2 * n * n; i++) {
                const int b = i / (n * n), r = i % (n * n) / n, c = i % n;
                assert_int_equal(((uint16_t *)out)[i], ((uint16_t *)in)[b * n * n + c * n + r]);
            }
        });
        good(rocq_k_test_transpose_4, 2, 1, 32, a, out, sizeof out, [&] {
            for (int i = 0; i < 2 * n * n; i++) {
                const int b = i / (n * n), r = i % (n * n) / n, c = i % n;
                assert_int_equal(out[i], in[b * n * n + c * n + r]);
            }
        });
    }
}

static void test_lanes(void **) {
    static uint32_t out[64 * 40];
    good(rocq_k_test_lanes, 1, 1, 64, {}, out, sizeof out, [&] {
        for (uint32_t t = 0; t < 64; t++) {
            const uint32_t *o = out + t * 40;
            uint32_t thirds = 0;
            for (uint32_t l = 0; l < 32; l++) thirds |= (uint32_t)((t / 32 * 32 + l) % 3 == 0) << l;
            for (int i = 0; i < 5; i++) assert_int_equal(o[i], t ^ 1u << i);
            assert_int_equal(o[5], thirds);
            assert_int_equal(o[6], t ^ 4);
            assert_int_equal(o[7], (t ^ 31) * (t ^ 31));
            for (uint32_t l = 0; l < 32; l++) assert_int_equal(o[8 + l], t / 32 * 32 + l);
        }
    });
}

static void test_atomics(void **) {
    uint32_t out[5];
    for (int order = 0; order < 2; order++) {
        test_args a = {};
        memset(out, 0, sizeof out);
        a.out = out;
        assert_int_equal(simt_launch(rocq_k_test_atomics, 3, 1, 256, a), 0);
        assert_int_equal(out[0], 3 * 256);
        assert_int_equal(out[1], 0xffffffffu);
        assert_int_equal(out[2], 255 * 128);
        assert_int_equal(out[3], 255 * 128);
        assert_true(out[4] < 3 * 256);
    }
}

static void test_wmma(void **) {
    static f16 in[512];
    static float out[544];
    for (int kind = 0; kind < 3; kind++) { // small integers, fractions, denormals
        for (f16 &x : in) {
            const float r = (float)(random_u32() % 2048) - 1024.0f;
            x = (f16)(kind == 0 ? truncf(r / 128) : kind == 1 ? r / 512 : r * 0x1p-24f);
        }
        good(rocq_k_test_wmma, 1, 1, 32, {in, nullptr, nullptr, 0}, out, sizeof out, [&] {
            double worst = 0.0;
            for (int m = 0; m < 16; m++) {
                for (int n = 0; n < 16; n++) {
                    double sum = 0.0, size = 0.0;
                    for (int k = 0; k < 16; k++) {
                        const double x = (double)in[m * 16 + k] * (double)in[256 + n * 16 + k];
                        sum += 2.0 * x;
                        size += 2.0 * fabs(x);
                    }
                    const double error = fabs(out[m * 16 + n] - sum) / (size + 1e-300);
                    if (!(error <= worst)) worst = error;
                }
            }
            assert_true(kind == 0 ? worst == 0.0 : worst < 1e-6);
            for (int n = 0; n < 16; n++) {
                float top = -INFINITY;
                for (int m = 0; m < 16; m++) top = fmaxf(top, out[m * 16 + n]);
                assert_true(out[512 + n] == top);
                double sum = 0.0, size = 1e-300;
                for (int m = 0; m < 16; m++) {
                    sum += out[m * 16 + n];
                    size += fabs(out[m * 16 + n]);
                }
                assert_true(fabs(out[528 + n] - sum) / size < 1e-6);
                for (int k = 0; k < 16; k++) {
                    assert_true(out[256 + 16 * n + k] == (float)(f16)out[frag_k_row(k) * 16 + n]);
                }
            }
        });
    }
}

// The layout as rdna3.md states it, from lanes to elements, by operands that name themselves.
static void test_wmma_layout(void **) {
    static f16 in[512];
    static float out[544];
    for (int row = 0; row < 16; row++) {
        for (int col = 0; col < 16; col++) {
            memset(in, 0, sizeof in);
            in[row * 16 + 3] = (f16)1.0f;
            in[256 + col * 16 + 3] = (f16)1.0f;
            test_args a = {in, nullptr, out, 0};
            assert_int_equal(simt_launch(rocq_k_test_wmma, 1, 1, 32, a), 0);
            for (int i = 0; i < 256; i++) {
                assert_true(out[i] == (i == row * 16 + col ? 2.0f : 0.0f));
            }
        }
    }
    for (uint32_t lane = 0; lane < 32; lane++) {
        simt.now = lane;
        for (int v = 0; v < 8; v++) {
            assert_int_equal(frag_row(v), 2 * v + (int)lane / 16);
            assert_int_equal(frag_col(v), lane % 16);
        }
    }
    simt.now = 0;
}

static void test_wmma_i8(void **) {
    static int8_t in[512];
    static int out[256];
    for (int8_t &x : in) x = (int8_t)random_u32();
    in[0] = in[256] = -128;
    good(rocq_k_test_wmma_i8, 1, 1, 32, {in, nullptr, nullptr, 0}, out, sizeof out, [&] {
        for (int i = 0; i < 256; i++) {
            int sum = 1;
            for (int k = 0; k < 16; k++) sum += in[i / 16 * 16 + k] * in[256 + i % 16 * 16 + k];
            assert_int_equal(out[i], sum);
        }
    });
}

static void test_order_of_waves(void **) {
    int out;
    good(rocq_k_test_ping_pong, 2, 1, 64, {nullptr, nullptr, nullptr, 9}, &out, sizeof out, [&] {
        int want = 1;
        for (int i = 0; i < 9; i++) want = 3 * want + i;
        assert_int_equal(out, want);
    });
    static int early[128];
    good(rocq_k_test_early, 1, 1, 256, {}, early, sizeof early, [&] {
        for (int i = 0; i < 128; i++) assert_int_equal(early[i], i / 32);
    });
    enum { PASSED = 100 };
    static uint32_t passed[PASSED * 128 + 130];
    good(rocq_k_test_passing, 1, 1, 128, {nullptr, nullptr, nullptr, PASSED}, passed, sizeof passed,
         [&] {
             const uint32_t *more = passed + PASSED * 128;
             assert_int_equal(more[0], 0xffff0201u);
             assert_int_equal(more[1], 7);
             for (uint32_t t = 0; t < 128; t++) {
                 assert_int_equal(more[2 + t], PASSED * (t ^ 96) + PASSED * (PASSED - 1) / 2 + 1);
             }
         });
    static uint32_t index[15 * 96];
    good(rocq_k_test_index, 3, 5, 96, {}, index, sizeof index, [&] {
        for (uint32_t i = 0; i < 15 * 96; i++) assert_int_equal(index[i], i / 96 * 1000 + i % 96);
    });
}

// -- operations of one lane --

static void test_integers(void **) {
    for (int i = 0; i < 100000; i++) {
        const uint32_t x = random_u32(), y = random_u32(), z = random_u32();
        uint32_t dot = z, perm = 0;
        const uint32_t sel = random_u32() & 0x07070707u;
        for (int b = 0; b < 4; b++) {
            const uint32_t from = sel >> 8 * b & 7;
            dot += (uint32_t)((int)(int8_t)(x >> 8 * b) * (int)(int8_t)(y >> 8 * b));
            perm |= ((from < 4 ? y >> 8 * from : x >> 8 * (from - 4)) & 255u) << 8 * b;
        }
        assert_int_equal((uint32_t)dot4((int)x, (int)y, (int)z), dot);
        assert_int_equal(byte_perm(x, y, sel), perm);
        const u32x4 table = {x, y, z, ~x};
        const u32x2 levels = byte_levels(table, sel ^ z);
        uint8_t bytes[16];
        memcpy(bytes, &table, 16);
        for (int b = 0; b < 4; b++) {
            const uint32_t n = (sel ^ z) >> 8 * b & 255;
            assert_int_equal(levels.x >> 8 * b & 255, bytes[n & 15]);
            assert_int_equal(levels.y >> 8 * b & 255, bytes[n >> 4]);
        }
    }
    assert_int_equal(dot4((int)0x80808080u, (int)0x80808080u, 0), 65536);
}

static void test_floats(void **) {
    for (uint32_t h = 0; h < 65536; h += 16) { // all halves, as wmma reads them
        uint16_t halves[16];
        for (uint32_t i = 0; i < 16; i++) halves[i] = (uint16_t)(h + i);
        frag f;
        simt_f32x16 wide;
        memcpy(&f, halves, sizeof f);
        simt_widen(&wide, &f);
        for (int i = 0; i < 16; i++) {
            assert_true(wide[i] == (float)f[i] || (wide[i] != wide[i] && f[i] != f[i]));
        }
    }
    for (int i = 0; i < 20000; i++) {
        const f16 x = (f16)((float)(int)(random_u32() % 4001 - 2000) / 64.0f);
        const f16 y = (f16)((float)(int)(random_u32() % 4001 - 2000) / 512.0f);
        const f16 z =
            (f16)ldexpf((float)(int)(random_u32() % 4001 - 2000), (int)(random_u32() % 24) - 24);
        const f16x2 r = fma2(pair(x, y), pair(y, z), pair(z, x));
        assert_true(r.x == (f16)((long double)x * (long double)y + (long double)z));
        assert_true(r.y == (f16)((long double)y * (long double)z + (long double)x));
        const double dot = (double)x * (double)y + (double)y * (double)z + 0.5;
        assert_true(fabs(dot2(pair(x, y), pair(y, z), 0.5f) - dot) <= 1e-6 * (fabs(dot) + 100.0));
    }
    assert_true(exp2_fast(3.0f) == 8.0f && exp2_fast(-200.0f) == 0.0f &&
                exp2_fast(INFINITY) == INFINITY);
    assert_true(exp2_fast(-127.0f) == 0.0f && log2_fast(8.0f) == 3.0f &&
                log2_fast(0x1p-130f) == -INFINITY);
    assert_true(rcp_fast(4.0f) == 0.25f && rcp_fast(0.0f) == INFINITY &&
                rcp_fast(0x1p127f) == 0.0f);
    for (int i = -4000; i <= 4000; i++) {
        const float x = (float)i * 0.01171875f;
        float s, c;
        sincospif(x, &s, &c);
        assert_true(fabs(s - sin((double)x * M_PI)) < 1e-6 &&
                    fabs(c - cos((double)x * M_PI)) < 1e-6);
        assert_true(sinpif(x) == s && cospif(x) == c);
        if (i % 256 == 0) assert_true(x == truncf(x) && s == 0.0f && fabsf(c) == 1.0f);
    }
}

// -- errors --

static float bad_in[64], bad_out[256];

// The launch fails in both orders, and the text says all of what.
static void bad_text(void (*kernel)(const test_args &), uint32_t blocks, uint32_t threads, int n,
                     const char *what, const char *more) {
    const test_args a = {bad_in, nullptr, bad_out, n};
    bad_out[0] = 0.0f;
    for (int order = 0; order < 2; order++) {
        simt_clear_errors();
        assert_true(simt_launch(kernel, blocks, 1, threads, a) > 0);
        assert_true(simt_errors() > 0);
        if (!strstr(simt_error_text(), what) || !strstr(simt_error_text(), more)) {
            print_error("no '%s' and '%s' in: %s", what, more, simt_error_text());
            fail();
        }
        simt_clear_errors();
    }
    // the machine is fit for the next launch
    float sum[32];
    good(rocq_k_test_sum, 1, 1, 32, {bad_in, nullptr, nullptr, 0}, sum, sizeof sum, [] {});
}

static void test_divergence(void **) {
    bad_text(rocq_k_bad_barrier_lanes, 1, 64, 0,
             "kernel bad_barrier_lanes, block 0 of 1, wave 1: divergent",
             "lanes 0-7 at block_sync line ");
    bad_text(rocq_k_bad_barrier_lanes, 1, 64, 0, "lanes 8-31 at the end", "");
    bad_text(rocq_k_bad_barrier_wave, 1, 64, 0,
             "not all waves reach the same barrier: wave 0 at block_sync line",
             "wave 1 at the end");
    bad_text(rocq_k_bad_barrier_twice, 1, 64, 0, "not all waves reach the same barrier", "");
    bad_text(rocq_k_bad_barrier_loop, 1, 64, 0, "wave 0 at the end, wave 1 at block_sync", "");
    bad_text(rocq_k_bad_barrier_kinds, 1, 64, 0, "wave 0 at block_sync_lds line",
             "wave 1 at block_sync line");
    bad_text(rocq_k_bad_collective_kinds, 1, 32, 0,
             "lanes 0 2 4 6 8 10 12 14 16 18 20 22 24 26 28 30 at",
             "lanes 1 3 5 7 9 11 13 15 17 19 21 23 25 27 29 31 at wave_xor<1> line ");
    bad_text(rocq_k_bad_collective_returned, 1, 32, 0, "lane 13 at the end",
             "lanes 0-12 14-31 at wave_xor<1> line");
    bad_text(rocq_k_bad_collective_and_barrier, 1, 32, 0, "lanes 0-30 at wave_sync line",
             "lane 31 at block_sync line");
    bad_text(rocq_k_bad_collective_masks, 1, 32, 0,
             "lanes 0-3 8-11 16-19 24-27 at wave_xor<2> line ", "");
    bad_text(rocq_k_bad_read_lanes, 1, 32, 0, "wave_read of lane", "bad_read_lanes");
    bad_text(rocq_k_bad_read_range, 1, 32, 0, "wave_read of lane 32", "");
    bad_text(rocq_k_bad_byte_perm, 1, 32, 0, "byte_perm selects by 0x0000000c", "");
}

static void test_races(void **) {
    bad_text(rocq_k_bad_race_write_read, 1, 64, 0, "race: byte", "was written by another wave");
    bad_text(rocq_k_bad_race_read_write, 1, 64, 0, "race: byte", "was read by another wave");
    bad_text(rocq_k_bad_race_write_write, 1, 64, 0,
             "race: byte 0 of LDS array work is written, and was written", "by another wave");
    bad_text(rocq_k_bad_race_bytes, 1, 64, 0, "race: byte 2 of LDS array work", "");
    assert_null(strstr(simt_error_text(), "byte 1"));
    bad_text(rocq_k_bad_race_atomic, 1, 64, 0, "race: byte 0 of LDS array work", "");
    bad_text(rocq_k_bad_race_lanes, 1, 32, 0, "by another lane without wave_sync", "is read");
    bad_text(rocq_k_bad_race_values, 1, 32, 0, "by another lane without wave_sync", "is written");
}

static void test_passing(void **) {
    for (int writer = 0; writer < 64; writer += 40) { // in both orders of the waves
        const char *by = writer < 32 ? "race: global memory that wave 0 wrote is read"
                                     : "race: global memory that wave 1 wrote is read";
        bad_text(rocq_k_bad_pass_lds, 1, 64, writer, by, "with no block_sync between them");
        bad_text(rocq_k_bad_pass_late, 1, 64, writer, by, "with no block_sync between them");
    }
    // without a barrier there is something to see where the writer comes first
    const test_args a = {bad_in, nullptr, bad_out, 0};
    int found[2] = {0, 0};
    for (int order = 0; order < 2; order++) {
        simt_clear_errors();
        found[0] += simt_launch(rocq_k_bad_pass_none, 1, 1, 64, a);
    }
    for (int order = 0; order < 2; order++) {
        simt_clear_errors();
        found[1] += simt_launch(rocq_k_bad_pass_fence, 1, 1, 64, a);
    }
    assert_int_equal(found[0], 1);
    assert_int_equal(found[1], 1);
    bad_text(rocq_k_bad_pass_part, 1, 64, 0, "race: global memory that wave 0 wrote is read",
             "wave 1 lane 0");
    bad_text(rocq_k_bad_pass_atomic, 1, 64, 0, "global memory that several waves wrote is read",
             "");
    bad_text(rocq_k_bad_pass_write, 1, 64, 0, "wrote is written with another value", "");
}

static void test_lds(void **) {
    bad_text(rocq_k_bad_lds_end, 1, 32, 0,
             "write of 4 bytes at 124 of LDS array work, which has 124", "wave 0 lane 31");
    bad_text(rocq_k_bad_lds_start, 1, 32, 0, "write of 4 bytes, 4 before LDS array work",
             "wave 0 lane 0");
    bad_text(rocq_k_bad_lds_part, 1, 32, 0,
             "write of 16 bytes at 16 of LDS array work, which has 28", "");
    bad_text(rocq_k_bad_lds_none, 1, 32, 0, "read of 4 bytes is not in LDS", "");
    bad_text(rocq_k_bad_lds_align, 1, 32, 1,
             "write of 16 bytes at 4 of LDS array work is misaligned", "");
    bad_text(rocq_k_bad_lds_unwritten, 1, 32, 0,
             "read of byte 68 of LDS array work, which was not written", "wave 0 lane 17");
    bad_text(rocq_k_bad_lds_stale, 2, 32, 0, "was not written in this block", "block 1 of 2");
    bad_text(rocq_k_bad_lds_stale, 2, 32, 1, "was not written in this block", "block 0 of 2");
    bad_text(rocq_k_bad_lds_byte, 1, 32, 0,
             "read of byte 3 of LDS array work, which was not written", "");
    bad_text(rocq_k_bad_lds_size, 1, 32, 0, "more brings LDS to 65552 bytes in 2 arrays", "");
}

static void test_operands(void **) {
    bad_text(rocq_k_bad_wmma_a, 1, 32, 0, "lanes 4 and 20", "operand A of wmma differs at byte");
    bad_text(rocq_k_bad_wmma_b, 1, 32, 0, "lanes 3 and 19", "operand B of wmma differs at byte");
    bad_text(rocq_k_bad_wmma_i8, 1, 32, 0, "lanes 15 and 31",
             "operand A of wmma differs at byte 15");
    bad_text(rocq_k_bad_align, 1, 32, 1, "global access of 8 bytes at", "is misaligned");
}

static void test_launches(void **) {
    test_args a = {bad_in, nullptr, bad_out, 0};
    const uint32_t bad[][3] = {{0, 1, 64}, {1, 0, 64}, {1, 1, 0},
                               {1, 1, 33}, {1, 1, 96}, {1, 1, 2048}};
    for (auto &b : bad) {
        simt_clear_errors();
        assert_true(simt_launch(rocq_k_test_ping_pong, b[0], b[1], b[2], a) > 0);
        assert_non_null(strstr(simt_error_text(), "where at most 64 are declared"));
    }
    simt_clear_errors();
}

// Runs f in a child; its stderr, which must end it with what.
template <typename F> static void dies(const char *what, F f) {
    int pipes[2];
    assert_int_equal(pipe(pipes), 0);
    const pid_t child = fork();
    if (child == 0) {
        dup2(pipes[1], 2);
        close(pipes[0]);
        f();
        _exit(0);
    }
    close(pipes[1]);
    static char text[65536];
    size_t n = 0;
    for (ssize_t got;
         n < sizeof text - 1 && (got = read(pipes[0], text + n, sizeof text - 1 - n)) > 0;) {
        n += (size_t)got;
    }
    text[n] = 0;
    close(pipes[0]);
    int status = 0;
    waitpid(child, &status, 0);
    if (!strstr(text, what) ||
        !(WIFSIGNALED(status) || (WIFEXITED(status) && WEXITSTATUS(status)))) {
        print_error("status %d, no '%s' in: %s\n", status, what, text);
        fail();
    }
}

static void test_global(void **) {
#if SIMT_ASAN
    float *in = (float *)malloc(40 * sizeof(float)), *out = (float *)malloc(32 * sizeof(float));
    test_args a = {in, nullptr, out, 9};
    dies("heap-buffer-overflow", [&] { simt_launch(rocq_k_bad_global_read, 1, 1, 32, a); });
    dies("in kernel bad_global_read, block 0 of 1, z 0, wave 0 lane 31", [&] {
        simt_launch(rocq_k_bad_global_read, 1, 1, 32, a);
    });
    a.n = 32;
    dies("heap-buffer-overflow", [&] { simt_launch(rocq_k_bad_global_write, 1, 1, 32, a); });
    dies("use-after-poison", [&] { simt_launch(rocq_k_bad_lds_plain, 1, 1, 32, a); });
    free(in);
    free(out);
#else
    skip();
#endif
}

// ---------------------------------------------------------------------------------------------
// tests of the runtime
// ---------------------------------------------------------------------------------------------

static const rocq_hip *hip() { return rocq_hip_linked(); }

static int launch(const char *name, uint32_t blocks, uint32_t threads, test_args a, void *stream) {
    return hip()->launch(simt_find_name(name), blocks, 1, threads, 0, &a, stream);
}

static int setup(void **) {
    simt_clear_errors();
    simt_fail_at(0, 0);
    simt_set_work(SIMT_LATE);
    return 0;
}
static int teardown(void **) {
    if (simt_live_sum() || simt_errors()) {
        print_error("%d live, %s", simt_live_sum(), simt_error_text());
    }
    return simt_live_sum() || simt_errors() ? -1 : 0;
}

static void test_round_trip(void **) {
    for (int work = SIMT_AT_ONCE; work <= SIMT_LATEST; work++) {
        simt_set_work(work);
        void *stream = nullptr, *in = nullptr, *out = nullptr, *pinned = nullptr;
        assert_int_equal(hip()->stream_create(&stream, ROCQ_HIP_NON_BLOCKING), 0);
        assert_int_equal(hip()->mem_alloc(&in, 128), 0);
        assert_int_equal(hip()->mem_alloc(&out, 128), 0);
        assert_int_equal(hip()->host_alloc(&pinned, 128, 0), 0);
        assert_int_equal((uintptr_t)in % 256, 0);
        float *host = (float *)pinned;
        for (int i = 0; i < 32; i++) host[i] = (float)i;
        assert_int_equal(hip()->copy(in, host, 128, ROCQ_HIP_TO_DEVICE, stream), 0);
        assert_int_equal(launch("test_sum", 1, 32, {in, nullptr, out, 0}, stream), 0);
        assert_int_equal(hip()->copy(in, out, 64, ROCQ_HIP_ON_DEVICE, stream), 0);
        assert_int_equal(hip()->fill(out, 0, 64, stream), 0);
        float got[64];
        memset(got, 0, sizeof got);
        assert_int_equal(hip()->copy(got, in, 128, ROCQ_HIP_TO_HOST, stream), 0);
        assert_int_equal(hip()->copy(got + 32, out, 128, ROCQ_HIP_TO_HOST, stream), 0);
        // nothing runs before somebody waits
        assert_true(got[0] == (work == SIMT_AT_ONCE ? 496.0f : 0.0f));
        assert_int_equal(hip()->stream_wait(stream), 0);
        for (int i = 0; i < 32; i++) {
            assert_true(got[i] == (i < 16 ? 496.0f : (float)i));
            assert_true(got[32 + i] == (i < 16 ? 0.0f : 496.0f));
        }
        assert_int_equal(simt_live_sum(), 4);
        assert_int_equal(simt_get_live().device_bytes, 256);
        assert_int_equal(hip()->host_free(pinned), 0);
        assert_int_equal(hip()->mem_free(in), 0);
        assert_int_equal(hip()->mem_free(out), 0);
        assert_int_equal(hip()->stream_destroy(stream), 0);
    }
}

// An event waits for what was submitted before it, and for no more.
static void test_events(void **) {
    void *stream, *event, *out;
    uint32_t got[2] = {7, 7}, zero = 0, one = 1;
    assert_int_equal(hip()->stream_create(&stream, ROCQ_HIP_NON_BLOCKING), 0);
    assert_int_equal(hip()->event_create(&event, ROCQ_HIP_NO_TIMING), 0);
    assert_int_equal(hip()->event_wait(event), 0); // never recorded
    assert_int_equal(hip()->mem_alloc(&out, 4), 0);
    assert_int_equal(hip()->copy(out, &zero, 4, ROCQ_HIP_TO_DEVICE, stream), 0);
    assert_int_equal(hip()->copy(&got[0], out, 4, ROCQ_HIP_TO_HOST, stream), 0);
    assert_int_equal(hip()->event_record(event, stream), 0);
    assert_int_equal(hip()->copy(out, &one, 4, ROCQ_HIP_TO_DEVICE, stream), 0);
    assert_int_equal(hip()->copy(&got[1], out, 4, ROCQ_HIP_TO_HOST, stream), 0);
    assert_int_equal(got[0], 7);
    assert_int_equal(hip()->event_wait(event), 0);
    assert_int_equal(got[0], 0);
    assert_int_equal(got[1], 7);
    assert_int_equal(hip()->event_record(event, stream), 0);
    assert_int_equal(hip()->event_wait(event), 0);
    assert_int_equal(got[1], 1);
    assert_int_equal(hip()->event_destroy(event), 0);
    assert_int_equal(hip()->stream_destroy(stream), 0);
    assert_int_equal(hip()->mem_free(out), 0);
}

static void test_graphs(void **) {
    void *stream, *counter, *graph, *exec;
    uint32_t got = 0;
    assert_int_equal(hip()->stream_create(&stream, ROCQ_HIP_NON_BLOCKING), 0);
    assert_int_equal(hip()->mem_alloc(&counter, 32), 0);
    assert_int_equal(hip()->fill(counter, 0, 32, stream), 0);
    assert_int_equal(hip()->capture_begin(stream, ROCQ_HIP_THREAD_LOCAL), 0);
    assert_int_equal(launch("test_atomics", 1, 32, {nullptr, nullptr, counter, 0}, stream), 0);
    assert_int_equal(hip()->capture_end(stream, &graph), 0);
    assert_int_equal(hip()->graph_instantiate(&exec, graph, nullptr, nullptr, 0), 0);
    assert_int_equal(hip()->graph_destroy(graph), 0);
    for (int i = 0; i < 5; i++) assert_int_equal(hip()->graph_launch(exec, stream), 0);
    assert_int_equal(hip()->copy(&got, counter, 4, ROCQ_HIP_TO_HOST, stream), 0);
    assert_int_equal(simt_get_live().execs, 1);
    assert_int_equal(hip()->graph_exec_destroy(exec), 0);
    assert_int_equal(hip()->stream_wait(stream), 0);
    assert_int_equal(got, 5 * 32); // the capture itself ran nothing

    // what waits or allocates ends a capture
    void *memory = nullptr;
    assert_int_equal(hip()->capture_begin(stream, ROCQ_HIP_THREAD_LOCAL), 0);
    assert_int_equal(hip()->mem_alloc(&memory, 16), 900);
    assert_int_equal(hip()->stream_wait(stream), 900);
    assert_int_equal(hip()->capture_end(stream, &graph), 901);
    assert_non_null(strstr(simt_error_text(), "hipMalloc while a stream is being captured"));
    simt_clear_errors();
    assert_int_equal(hip()->mem_free(counter), 0);
    assert_int_equal(hip()->stream_destroy(stream), 0);
}

static void test_wrong_calls(void **) {
    void *stream, *memory, *handle = bad_in;
    char host[64] = {0};
    assert_int_equal(hip()->stream_create(&stream, 0), 0);
    assert_int_equal(hip()->mem_alloc(&memory, 32), 0);
    const int wrong[] = {hip()->copy(memory, host, 33, ROCQ_HIP_TO_DEVICE, stream),
                         hip()->copy(host, (char *)memory + 1, 32, ROCQ_HIP_TO_HOST, stream),
                         hip()->copy(host, host + 32, 8, ROCQ_HIP_TO_DEVICE, stream),
                         hip()->copy(memory, host, 8, ROCQ_HIP_TO_HOST, stream),
                         hip()->copy(memory, host, 8, 5, stream),
                         hip()->fill((char *)memory + 32, 0, 1, stream),
                         hip()->stream_wait(handle),
                         hip()->stream_destroy(handle),
                         hip()->event_wait(handle),
                         hip()->event_destroy(handle),
                         hip()->event_record(handle, stream),
                         hip()->mem_free((char *)memory + 16),
                         hip()->host_free(memory),
                         hip()->graph_launch(handle, stream),
                         hip()->graph_destroy(handle),
                         launch("test_sum", 0, 32, {}, stream),
                         launch("test_ping_pong", 1, 128, {}, stream),
                         launch("no_such_kernel", 1, 32, {}, stream),
                         hip()->set_device(1)};
    for (int error : wrong) assert_int_not_equal(error, 0);
    // a wrong device number is an answer, and no mistake of the host
    assert_int_equal(simt_errors(), (int)(sizeof wrong / sizeof wrong[0]) - 1);
    simt_clear_errors();
    assert_int_equal(hip()->mem_free(memory), 0);
    assert_int_equal(hip()->stream_destroy(stream), 0);

    // a kernel with an error fails the stream it ran in
    assert_int_equal(hip()->stream_create(&stream, 0), 0);
    assert_int_equal(launch("bad_barrier_wave", 1, 64, {}, stream), 0);
    assert_int_equal(hip()->stream_wait(stream), 719);
    simt_clear_errors();
    assert_int_equal(hip()->stream_destroy(stream), 0);
}

static void test_memory_limit(void **) {
    void *p, *q;
    simt_set_memory(1000);
    assert_int_equal(hip()->mem_alloc(&p, 600), 0);
    assert_int_equal(hip()->mem_alloc(&q, 401), ROCQ_HIP_OUT_OF_MEMORY);
    assert_int_equal(hip()->mem_alloc(&q, 400), 0);
    assert_int_equal(hip()->mem_free(p), 0);
    assert_int_equal(hip()->mem_free(q), 0);
    simt_set_memory((size_t)1 << 30);
}

static void test_modules(void **) {
    void *module, *function, *out, *args[1];
    uint32_t got = 0;
    assert_int_equal(hip()->module_load(&module, "image"), 0);
    assert_int_equal(hip()->module_function(&function, module, "rocq_k_nothing"), 500);
    assert_int_equal(hip()->module_function(&function, module, "rocq_k_test_atomics"), 0);
    assert_int_equal(hip()->mem_alloc(&out, 32), 0);
    assert_int_equal(hip()->fill(out, 0, 32, nullptr), 0);
    test_args a = {nullptr, nullptr, out, 0};
    args[0] = &a;
    assert_int_equal(hip()->module_launch(function, 3, 1, 1, 64, 1, 1, 0, nullptr, args, nullptr),
                     0);
    memset(&a, 0xff, sizeof a); // args have been copied
    assert_int_equal(hip()->copy(&got, out, 4, ROCQ_HIP_TO_HOST, nullptr), 0);
    assert_int_equal(hip()->stream_wait(nullptr), 0);
    assert_int_equal(got, 192);
    assert_int_equal(hip()->mem_free(out), 0);
    assert_int_equal(hip()->module_unload(module), 0);
    simt_set_image_error(209);
    assert_int_equal(hip()->module_load(&module, "image"), 209);
    simt_set_image_error(0);
}

// A use of every kind of object, which gives up at the first error and cleans up: with any call
// failing, alone or with all after it, nothing is left.
static int careful(int *got) {
    void *stream = nullptr, *memory = nullptr, *pinned = nullptr, *event = nullptr,
         *graph = nullptr, *exec = nullptr, *module = nullptr;
    int error = hip()->stream_create(&stream, ROCQ_HIP_NON_BLOCKING);
    if (!error) error = hip()->mem_alloc(&memory, 32);
    if (!error) error = hip()->host_alloc(&pinned, 32, 0);
    if (!error) error = hip()->event_create(&event, 0);
    if (!error) error = hip()->module_load(&module, "image");
    if (!error) error = hip()->fill(memory, 0, 32, stream);
    if (!error) {
        error = hip()->capture_begin(stream, ROCQ_HIP_THREAD_LOCAL);
        if (!error) {
            error = launch("test_atomics", 1, 32, {nullptr, nullptr, memory, 0}, stream);
            const int end = hip()->capture_end(stream, &graph);
            if (!error) error = end;
        }
    }
    if (!error) error = hip()->graph_instantiate(&exec, graph, nullptr, nullptr, 0);
    if (!error) error = hip()->graph_launch(exec, stream);
    if (!error) error = hip()->copy(pinned, memory, 4, ROCQ_HIP_TO_HOST, stream);
    if (!error) error = hip()->event_record(event, stream);
    if (!error) error = hip()->event_wait(event);
    if (!error) *got = *(int *)pinned;
    if (stream) hip()->stream_destroy(stream); // waits
    if (exec) hip()->graph_exec_destroy(exec);
    if (graph) hip()->graph_destroy(graph);
    if (module) hip()->module_unload(module);
    if (event) hip()->event_destroy(event);
    if (pinned) hip()->host_free(pinned);
    if (memory) hip()->mem_free(memory);
    return error;
}
static void test_failures(void **) {
    int got = 0;
    const int64_t before = simt_calls();
    assert_int_equal(careful(&got), 0);
    assert_int_equal(got, 32);
    const int64_t calls = simt_calls() - before;
    assert_int_equal(calls, 21);
    for (int64_t n = 1; n <= calls + 1; n++) {
        for (int once = 0; once < 2; once++) {
            if (once) simt_fail_once(n, 710);
            else simt_fail_at(n, 710);
            got = 0;
            const int error = careful(&got);
            assert_int_equal(error, n <= 14 ? 710 : 0);
            assert_int_equal(got, n <= 14 ? 0 : 32);
            simt_fail_at(0, 0);
            assert_int_equal(simt_live_sum(), 0);
        }
    }
}

// What a host does wrong with memory ends the program, as AddressSanitizer finds it.
static void test_host_memory(void **) {
#if SIMT_ASAN
    simt_set_work(SIMT_LATEST);
    dies("use-after-poison", [] {
        void *p;
        hip()->mem_alloc(&p, 64);
        *(volatile int *)p = 1;
    });
    dies("heap-use-after-free", [] { // the source of a copy that has not run
        void *p;
        float *host = (float *)malloc(64);
        hip()->mem_alloc(&p, 64);
        hip()->copy(p, host, 64, ROCQ_HIP_TO_DEVICE, nullptr);
        free(host);
        hip()->stream_wait(nullptr);
    });
    dies("heap-use-after-free", [] { // memory of a launch that has not run
        void *p;
        hip()->mem_alloc(&p, 128);
        launch("test_sum", 1, 32, {p, nullptr, p, 0}, nullptr);
        hip()->mem_free(p);
        hip()->stream_wait(nullptr);
    });
    dies("heap-buffer-overflow", [] {
        void *p;
        hip()->mem_alloc(&p, 124);
        launch("test_sum", 1, 32, {p, nullptr, p, 0}, nullptr);
        hip()->stream_wait(nullptr);
    });
#else
    skip();
#endif
}

int main() {
#define RUNTIME_TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reduction),  cmocka_unit_test(test_transpose),
        cmocka_unit_test(test_lanes),      cmocka_unit_test(test_atomics),
        cmocka_unit_test(test_wmma),       cmocka_unit_test(test_wmma_layout),
        cmocka_unit_test(test_wmma_i8),    cmocka_unit_test(test_order_of_waves),
        cmocka_unit_test(test_integers),   cmocka_unit_test(test_floats),
        cmocka_unit_test(test_divergence), cmocka_unit_test(test_races),
        cmocka_unit_test(test_passing),
        cmocka_unit_test(test_lds),        cmocka_unit_test(test_operands),
        cmocka_unit_test(test_launches),   cmocka_unit_test(test_global),
        RUNTIME_TEST(test_round_trip),     RUNTIME_TEST(test_events),
        RUNTIME_TEST(test_graphs),         RUNTIME_TEST(test_wrong_calls),
        RUNTIME_TEST(test_memory_limit),   RUNTIME_TEST(test_modules),
        RUNTIME_TEST(test_failures),       RUNTIME_TEST(test_host_memory),
    };
    return cmocka_run_group_tests(tests, nullptr, nullptr);
}
