// Precision: what AUTO picks for every format, shape and backend, and that what is asked for, by
// the params or for the whole context, runs or is refused. On the CPU and on the stand-in.
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "simt/hip.h"
#include "ops.h"

static const rocq_format formats[] = {
#define ROCQ_X(NAME, name, id, elems, bytes) ROCQ_##NAME,
    ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
};
enum { N_FORMATS = sizeof formats / sizeof formats[0], K = 256, M = 40, MOST = 24 };

static rocq_ctx *open_as(rocq_backend backend, rocq_precision precision, bool allow_fallback) {
    rocq_ctx *ctx;
    const rocq_desc desc = {.prefer = backend, .allow_fallback = allow_fallback, .n_threads = 1,
                            .precision = precision};
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    return ctx;
}

// A tensor in the context's memory with these bytes.
static rocq_tensor tensor_of(rocq_ctx *ctx, const box *b) {
    rocq_buffer buffer;
    rocq_tensor t;
    assert_int_equal(rocq_buffer_alloc(ctx, &buffer, b->size), ROCQ_OK);
    assert_int_equal(rocq_tensor_init(&t, &buffer, 0, b->t.format, 4, b->t.ne), ROCQ_OK);
    assert_int_equal(rocq_upload(ctx, &t, b->memory, b->size), ROCQ_OK);
    return t;
}

static rocq_tensor tensor_like(rocq_ctx *ctx, rocq_format format, int64_t a, int64_t b, int64_t c) {
    box empty = box_make(BOX_PLAIN, format, a, b, c, 1);
    const rocq_tensor t = tensor_of(ctx, &empty);
    box_free(&empty);
    return t;
}

static rocq_precision_info info_of(rocq_ctx *ctx, rocq_op op, const void *params) {
    rocq_precision_info info;
    memset(&info, 0xff, sizeof info);
    assert_int_equal(rocq_get_precision(ctx, op, params, &info), ROCQ_OK);
    assert_true(info.why && strlen(info.why) > 10);
    return info;
}

// The contract, written out once more.
static double bound_of(rocq_precision p) {
    return p == ROCQ_PRECISION_F32 ? 1e-6 : p == ROCQ_PRECISION_F16 ? 1e-5 : 5e-4;
}

typedef enum machine { PLAIN, AVX2, GPU } machine;

static bool coded(machine on, rocq_format w) { // INT8 is there
    if (w == ROCQ_MXFP6_E2M3) return on != GPU;
    return w != ROCQ_F32 && w != ROCQ_F16 && w != ROCQ_BF16 && w != ROCQ_MXFP6_E3M2;
}

static rocq_precision automatic(machine on, rocq_format w, int64_t n) {
    if (on == PLAIN) return ROCQ_PRECISION_F32;
    if (on == GPU && n > 8) return w == ROCQ_F32 ? ROCQ_PRECISION_F32 : ROCQ_PRECISION_F16;
    return coded(on, w) ? ROCQ_PRECISION_INT8 : ROCQ_PRECISION_F32;
}

// Every format, by columns, for what the params and the context ask.
static void products(void **state) {
    (void)state;
    static const int64_t columns[] = {1, 8, 9, MOST};
    for (int c = PLAIN; c <= GPU; c++) {
        const machine on = (machine)c;
        for (int i = 0; i < 16; i++) {
            const rocq_precision own = (rocq_precision)(i / 4), all = (rocq_precision)(i % 4);
            const rocq_precision asked = own ? own : all;
            rocq_ctx *ctx = open_as(on == GPU ? ROCQ_BACKEND_GPU : ROCQ_BACKEND_CPU, all, false);
            *inside_has_simd(ctx) = on == AVX2;
            rocq_info opened;
            assert_int_equal(rocq_get_info(ctx, &opened), ROCQ_OK);
            assert_int_equal(opened.desc.precision, all);
            for (int f = 0; f < N_FORMATS; f++) {
                const rocq_format w_format = formats[f];
                rocq_tensor w = tensor_like(ctx, w_format, K, M, 1);
                for (int j = 0; j < 4; j++) {
                    const int64_t n = columns[j];
                    rocq_tensor x = tensor_like(ctx, ROCQ_F32, K, n, 1);
                    rocq_tensor y = tensor_like(ctx, ROCQ_F32, M, n, 1);
                    const rocq_matmul_params p = {.y = &y, .w = &w, .x = &x, .precision = own};
                    if (asked == ROCQ_PRECISION_INT8 && !coded(on, w_format)) {
                        rocq_precision_info info, untouched;
                        memset(&info, 0xa5, sizeof info);
                        untouched = info;
                        assert_int_equal(rocq_get_precision(ctx, ROCQ_OP_MATMUL, &p, &info),
                                         ROCQ_E_UNSUPPORTED);
                        assert_memory_equal(&info, &untouched, sizeof info);
                        assert_int_equal(rocq_matmul(ctx, &p), ROCQ_E_UNSUPPORTED);
                    } else {
                        rocq_precision want = asked;
                        if (!asked) want = automatic(on, w_format, n);
                        if (on == GPU && n <= 8 && want == ROCQ_PRECISION_F16) {
                            want = ROCQ_PRECISION_F32;
                        }
                        const rocq_precision_info info = info_of(ctx, ROCQ_OP_MATMUL, &p);
                        assert_int_equal(info.precision, want);
                        assert_int_equal(info.asked, asked);
                        assert_true(info.nmse == bound_of(want));
                        static const rocq_format read[] = {0, ROCQ_F32, ROCQ_F16, ROCQ_Q8_0};
                        assert_int_equal(rocq_operand_format(ctx, w_format, n, own),
                                         on == GPU ? read[want] : ROCQ_F32);
                    }
                    assert_int_equal(rocq_buffer_free(ctx, &x.buffer), ROCQ_OK);
                    assert_int_equal(rocq_buffer_free(ctx, &y.buffer), ROCQ_OK);
                }
                assert_int_equal(rocq_buffer_free(ctx, &w.buffer), ROCQ_OK);
            }
            rocq_close(&ctx);
        }
    }
}

// Two weights: the less exact of both, and the sum of both bounds. A chip that is known has a
// reason of its own.
static void pairs_and_chips(void **state) {
    (void)state;
    rocq_ctx *ctx = open_as(ROCQ_BACKEND_GPU, ROCQ_PRECISION_AUTO, false);
    const rocq_tensor q4 = tensor_like(ctx, ROCQ_Q4_0, K, M, 1);
    const rocq_tensor f32 = tensor_like(ctx, ROCQ_F32, K, M, 1);
    const rocq_tensor x = tensor_like(ctx, ROCQ_F32, K, MOST, 1);
    const rocq_tensor y = tensor_like(ctx, ROCQ_F32, M, MOST, 1);
    const int64_t start[4] = {0, 0, 0, 0}, one[4] = {K, 1, 1, 1}, one_y[4] = {M, 1, 1, 1};
    rocq_tensor x1, y1;
    assert_int_equal(rocq_tensor_view(&x1, &x, start, one), ROCQ_OK);
    assert_int_equal(rocq_tensor_view(&y1, &y, start, one_y), ROCQ_OK);
    rocq_matmul_params p = {.y = &y1, .w = &f32, .x = &x1, .w2 = &q4};
    rocq_precision_info info = info_of(ctx, ROCQ_OP_MATMUL, &p);
    assert_int_equal(info.precision, ROCQ_PRECISION_INT8);
    assert_true(info.nmse == 1e-6 + 5e-4);
    p.w = &q4;
    p.w2 = &f32;
    info = info_of(ctx, ROCQ_OP_MATMUL, &p);
    assert_int_equal(info.precision, ROCQ_PRECISION_INT8);
    assert_true(info.nmse == 1e-6 + 5e-4);
    p = (rocq_matmul_params){.y = &y, .w = &q4, .x = &x};
    const char *why = info_of(ctx, ROCQ_OP_MATMUL, &p).why;
    assert_null(strstr(why, "RDNA3"));
    *inside_target(ctx) = 0x1151;
    info = info_of(ctx, ROCQ_OP_MATMUL, &p);
    assert_int_equal(info.precision, ROCQ_PRECISION_F16);
    assert_non_null(strstr(info.why, "RDNA3"));
    *inside_target(ctx) = 0;
    rocq_close(&ctx);
}

// What a context is to compute in does for AUTO what the params do, bit for bit, and each precision
// is another one: its error is where its rounding puts it.
static void a_context_is_forced_as_params_are(void **state) {
    (void)state;
    box w = box_make(BOX_PLAIN, ROCQ_Q4_0, K, M, 1, 1);
    box x = box_random(BOX_PLAIN, ROCQ_F32, 1, K, MOST, 1, 1);
    static float got[2][M * MOST];
    static double want[M * MOST], values[M * MOST];
    random_weights(&w);
    for (int64_t n = 0; n < MOST; n++) {
        for (int64_t m = 0; m < M; m++) {
            double sum = 0;
            for (int64_t k = 0; k < K; k++) sum += w.value[m * K + k] * x.value[n * K + k];
            want[n * M + m] = sum;
        }
    }
    for (int backend = ROCQ_BACKEND_CPU; backend <= ROCQ_BACKEND_GPU; backend++) {
        for (int i = ROCQ_PRECISION_F32; i <= ROCQ_PRECISION_INT8; i++) {
            double nmse_bound = 0;
            for (int by_context = 0; by_context < 2; by_context++) {
                const rocq_precision all = by_context ? (rocq_precision)i : ROCQ_PRECISION_AUTO;
                rocq_ctx *ctx = open_as((rocq_backend)backend, all, false);
                const rocq_tensor tw = tensor_of(ctx, &w), tx = tensor_of(ctx, &x);
                const rocq_tensor ty = tensor_like(ctx, ROCQ_F32, M, MOST, 1);
                const rocq_matmul_params p = {
                    .y = &ty, .w = &tw, .x = &tx,
                    .precision = by_context ? ROCQ_PRECISION_AUTO : (rocq_precision)i};
                assert_int_equal(rocq_matmul(ctx, &p), ROCQ_OK);
                assert_int_equal(rocq_download(ctx, got[by_context], &ty, sizeof got[0]), ROCQ_OK);
                nmse_bound = info_of(ctx, ROCQ_OP_MATMUL, &p).nmse;
                rocq_close(&ctx);
            }
            assert_memory_equal(got[0], got[1], sizeof got[0]);
            for (int j = 0; j < M * MOST; j++) values[j] = got[0][j];
            const double e = nmse(ROCQ_F32, values, want, M * MOST);
            static const double least[] = {0, 0, 1e-9, 1e-6};
            if (!(e <= nmse_bound && e >= least[i])) {
                fail_msg("backend %d, precision %d: NMSE %g", backend, i, e);
            }
        }
    }
    boxes_free(&w, &x);
}

static void attention(void **state) {
    (void)state;
    for (int backend = ROCQ_BACKEND_CPU; backend <= ROCQ_BACKEND_GPU; backend++) {
        for (int i = ROCQ_PRECISION_AUTO; i <= ROCQ_PRECISION_INT8; i++) {
            for (int fallback = 0; fallback < 2; fallback++) {
                rocq_ctx *ctx = open_as((rocq_backend)backend, (rocq_precision)i, fallback);
                const rocq_tensor q = tensor_like(ctx, ROCQ_F32, 64, 2, 3);
                const rocq_tensor out = tensor_like(ctx, ROCQ_F32, 64, 2, 3);
                const rocq_tensor k = tensor_like(ctx, ROCQ_F16, 64, 1, 5);
                const rocq_attention_params p = {.out = &out, .q = &q, .k = &k, .v = &k};
                const bool exact = backend == ROCQ_BACKEND_GPU && i == ROCQ_PRECISION_F32;
                if (exact && !fallback) {
                    rocq_precision_info info;
                    const char *why;
                    assert_int_equal(rocq_supports(ctx, ROCQ_OP_ATTENTION, &p, &why),
                                     ROCQ_E_UNSUPPORTED);
                    assert_non_null(strstr(why, "F32"));
                    assert_int_equal(rocq_get_precision(ctx, ROCQ_OP_ATTENTION, &p, &info),
                                     ROCQ_E_UNSUPPORTED);
                    assert_int_equal(rocq_attention(ctx, &p), ROCQ_E_UNSUPPORTED);
                    rocq_close(&ctx);
                    continue;
                }
                const rocq_precision_info info = info_of(ctx, ROCQ_OP_ATTENTION, &p);
                const rocq_precision want =
                    backend == ROCQ_BACKEND_GPU && !exact ? ROCQ_PRECISION_F16 : ROCQ_PRECISION_F32;
                assert_int_equal(info.precision, want);
                assert_int_equal(info.asked, i);
                assert_true(info.nmse == bound_of(want));
                rocq_stats stats;
                assert_int_equal(rocq_attention(ctx, &p), ROCQ_OK);
                assert_int_equal(rocq_get_stats(ctx, &stats), ROCQ_OK);
                assert_int_equal(stats.n_fallbacks, exact);
                rocq_close(&ctx);
            }
        }
    }
}

// All others have one form, F32, which is exact enough for whatever is asked.
static void other_ops(void **state) {
    (void)state;
    for (int backend = ROCQ_BACKEND_CPU; backend <= ROCQ_BACKEND_GPU; backend++) {
        for (int i = ROCQ_PRECISION_AUTO; i <= ROCQ_PRECISION_INT8; i++) {
            rocq_ctx *ctx = open_as((rocq_backend)backend, (rocq_precision)i, false);
            const rocq_tensor x = tensor_like(ctx, ROCQ_F32, 64, 4, 1);
            const rocq_tensor y = tensor_like(ctx, ROCQ_F32, 64, 4, 1);
            const rocq_norm_params norm = {.y = &y, .x = &x};
            const rocq_binary_params add = {.y = &y, .a = &x, .b = &x};
            const rocq_softmax_params softmax = {.y = &y, .x = &x};
            const struct { rocq_op op; const void *params; } ops[] = {
                {ROCQ_OP_RMSNORM, &norm}, {ROCQ_OP_LAYERNORM, &norm}, {ROCQ_OP_ADD, &add},
                {ROCQ_OP_SOFTMAX, &softmax}};
            for (size_t o = 0; o < sizeof ops / sizeof ops[0]; o++) {
                const rocq_precision_info info = info_of(ctx, ops[o].op, ops[o].params);
                assert_int_equal(info.precision, ROCQ_PRECISION_F32);
                assert_int_equal(info.asked, i);
                assert_true(info.nmse == 1e-6);
            }
            rocq_close(&ctx);
        }
    }
}

static void bad_arguments(void **state) {
    (void)state;
    rocq_ctx *ctx = open_as(ROCQ_BACKEND_CPU, ROCQ_PRECISION_AUTO, false), *none = NULL;
    const rocq_tensor x = tensor_like(ctx, ROCQ_F32, 64, 4, 1);
    const rocq_norm_params norm = {.y = &x, .x = &x}, half = {.x = &x};
    rocq_precision_info info, untouched;
    memset(&info, 0xa5, sizeof info);
    untouched = info;
    assert_int_equal(rocq_get_precision(NULL, ROCQ_OP_RMSNORM, &norm, &info), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_get_precision(ctx, ROCQ_OP_RMSNORM, &norm, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_get_precision(ctx, ROCQ_OP_RMSNORM, NULL, &info), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_get_precision(ctx, ROCQ_OP_RMSNORM, &half, &info), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_get_precision(ctx, ROCQ_OP_COUNT, &norm, &info), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_get_precision(ctx, (rocq_op)-1, &norm, &info), ROCQ_E_ARGUMENT);
    assert_memory_equal(&info, &untouched, sizeof info);
    assert_int_equal(rocq_operand_format(NULL, ROCQ_Q4_0, 1, ROCQ_PRECISION_AUTO), ROCQ_F32);
    rocq_close(&ctx);
    ctx = open_as(ROCQ_BACKEND_GPU, ROCQ_PRECISION_AUTO, false); // no such format, no columns
    assert_int_equal(rocq_operand_format(ctx, (rocq_format)4, 1, ROCQ_PRECISION_AUTO), ROCQ_F32);
    assert_int_equal(rocq_operand_format(ctx, ROCQ_Q4_0, -1, ROCQ_PRECISION_AUTO), ROCQ_Q8_0);
    rocq_close(&ctx);
    for (int i = -1; i <= 4; i += 5) {
        const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .precision = (rocq_precision)i};
        assert_int_equal(rocq_open(&none, &desc), ROCQ_E_ARGUMENT);
        assert_null(none);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products),
        cmocka_unit_test(pairs_and_chips),
        cmocka_unit_test(a_context_is_forced_as_params_are),
        cmocka_unit_test(attention),
        cmocka_unit_test(other_ops),
        cmocka_unit_test(bad_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
