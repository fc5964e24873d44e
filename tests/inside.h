// What suites look at inside of rocq.h, which is compiled once for several of them
// (tests/compile/inside.c): its private functions under other names, and what they touch of a
// context. A suite that has an implementation of its own has these, too.

#ifndef TESTS_INSIDE_H
#define TESTS_INSIDE_H

#include "../rocq.h"

#if defined(ROCQ_IMPLEMENTATION) && !defined(INSIDE_SHARED)
#define INSIDE_FN __attribute__((unused)) static
#else
#define INSIDE_FN
#endif

INSIDE_FN bool *inside_has_simd(rocq_ctx *ctx);
INSIDE_FN bool *inside_has_avx512(rocq_ctx *ctx);
INSIDE_FN char *inside_error(rocq_ctx *ctx);
INSIDE_FN void inside_free_scratch(rocq_ctx *ctx); // as if nothing had been reserved yet
INSIDE_FN const char *inside_op_name(rocq_op op);
INSIDE_FN size_t inside_params_size(rocq_op op);

// X(result, name, parameters, arguments): inside_NAME is rocq__NAME.
#define INSIDE_FUNCTIONS(X)                                                                        \
    X(bool, cpu_has, (rocq_cpu_tier tier), (tier))                                                 \
    X(const char *, cpu_tier_name, (rocq_cpu_tier tier), (tier))                                   \
    X(int64_t, scratch_attention_backward_cpu, (const rocq_ctx *ctx, const void *params),          \
      (ctx, params))                                                                               \
    X(void, activate_row, (bool simd, rocq_activation activation, float *x, int64_t n),            \
      (simd, activation, x, n))                                                                    \
    X(void, softcap_row, (bool simd, float cap, float *x, int64_t n), (simd, cap, x, n))           \
    X(float, exp1, (float x), (x))                                                                 \
    X(float, bits_f32, (uint32_t bits), (bits))                                                    \
    X(uint32_t, f32_bits, (float value), (value))                                                  \
    X(int64_t, alignment_of, (rocq_format format), (format))                                       \
    X(bool, extent, (const rocq_tensor *t, int64_t *extent), (t, extent))                          \
    X(bool, meet, (const rocq_tensor *a, const rocq_tensor *b), (a, b))

#define INSIDE_DECLARED(result, name, parameters, arguments)                                        \
    INSIDE_FN result inside_##name parameters;
INSIDE_FUNCTIONS(INSIDE_DECLARED)

#ifdef ROCQ_IMPLEMENTATION

INSIDE_FN bool *inside_has_simd(rocq_ctx *ctx) {
    return &ctx->has_simd;
}

INSIDE_FN bool *inside_has_avx512(rocq_ctx *ctx) {
    return &ctx->has_avx512;
}

INSIDE_FN char *inside_error(rocq_ctx *ctx) {
    return ctx->error;
}

INSIDE_FN void inside_free_scratch(rocq_ctx *ctx) {
    rocq__free(ctx, ctx->scratch);
    ctx->budget_used -= ctx->scratch_size;
    ctx->scratch = NULL;
    ctx->scratch_size = 0;
}

INSIDE_FN const char *inside_op_name(rocq_op op) {
    return rocq__ops[op]->name;
}

INSIDE_FN size_t inside_params_size(rocq_op op) {
    return (size_t)rocq__ops[op]->params_size;
}

#define INSIDE_DEFINED(result, name, parameters, arguments)                                        \
    INSIDE_FN result inside_##name parameters {                                                    \
        return rocq__##name arguments;                                                             \
    }
INSIDE_FUNCTIONS(INSIDE_DEFINED)

#endif // ROCQ_IMPLEMENTATION

#endif // TESTS_INSIDE_H
