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

// X(name): inside_NAME is the address of that flag of a context.
#define INSIDE_FLAGS(X)                                                                            \
    X(has_simd) X(has_avx_vnni) X(has_avx512) X(has_vbmi) X(has_sdot) X(reads_in_order)
#define INSIDE_DECLARED(name) INSIDE_FN bool *inside_##name(rocq_ctx *ctx);
INSIDE_FLAGS(INSIDE_DECLARED)
#undef INSIDE_DECLARED

INSIDE_FN int32_t *inside_target(rocq_ctx *ctx); // of the GPU: 0x1100 is gfx1100
INSIDE_FN char *inside_error(rocq_ctx *ctx);
INSIDE_FN size_t inside_error_size(void);
INSIDE_FN int64_t inside_context_size(void);
INSIDE_FN const rocq_stats *inside_stats(const rocq_ctx *ctx);
INSIDE_FN int64_t inside_budget_used(const rocq_ctx *ctx);
INSIDE_FN void inside_free_scratch(rocq_ctx *ctx); // as if nothing had been reserved yet
INSIDE_FN void inside_spoil_scratch(rocq_ctx *ctx); // NaN, where something is read too soon
INSIDE_FN const char *inside_op_name(rocq_op op);
INSIDE_FN size_t inside_params_size(rocq_op op);

// A product of the CPU backend: what multiplies and reads its matrix, each or NULL,
typedef struct inside_mm {
    void (*pass)(void), (*wide_pass)(void), (*pack_pair)(void);
} inside_mm;
INSIDE_FN inside_mm inside_mm_plan(const rocq_ctx *ctx, const rocq_matmul_params *p, int64_t n);

// its plan, of whose stages this is number 1, and what items begin .. end of it read first.
typedef struct inside_plan {
    int32_t n_stages;
    int64_t n, together; // items
    bool has_reads;
    const unsigned char *at[3];
    int64_t bytes[3];
} inside_plan;
INSIDE_FN inside_plan inside_plan_matmul(const rocq_ctx *ctx, const rocq_matmul_params *p,
                                         int64_t begin, int64_t end);
INSIDE_FN int64_t inside_mm_ahead(void); // the most bytes that those are

// What an op computes, and how much of that on the matrix unit.
typedef struct inside_cost {
    double flops, matrix;
} inside_cost;
INSIDE_FN inside_cost inside_cost_of(const rocq_ctx *ctx, rocq_op op, const void *params);

// X(result, name, parameters, arguments): inside_NAME is rocq__NAME.
#define INSIDE_FUNCTIONS(X)                                                                        \
    X(bool, cpu_has, (rocq_cpu_tier tier), (tier))                                                 \
    X(const char *, cpu_tier_name, (rocq_cpu_tier tier), (tier))                                   \
    X(int64_t, scratch_attention_backward_cpu, (const rocq_ctx *ctx, const void *params),          \
      (ctx, params))                                                                               \
    X(void, activate_row, (bool simd, rocq_activation activation, float *x, int64_t n),            \
      (simd, activation, x, n))                                                                    \
    X(void, softcap_row, (bool simd, float cap, float *x, int64_t n), (simd, cap, x, n))           \
    X(bool, interleaves, (rocq_format format), (format))                                           \
    X(unsigned char *, row, (const rocq_tensor *t, int64_t i1, int64_t i2, int64_t i3),            \
      (t, i1, i2, i3))                                                                             \
    X(void, parallel,                                                                              \
      (rocq_ctx *ctx, int64_t n, int64_t grain,                                                    \
       void (*fn)(void *arg, int64_t begin, int64_t end, int32_t thread), void *arg),              \
      (ctx, n, grain, fn, arg))                                                                    \
    X(float, activation_slope, (rocq_activation activation, float x), (activation, x))             \
    X(void, slope_row,                                                                             \
      (bool simd, rocq_activation activation, float *g, const float *x, int64_t n),                \
      (simd, activation, g, x, n))                                                                 \
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

#define INSIDE_DEFINED(name) \
    INSIDE_FN bool *inside_##name(rocq_ctx *ctx) { return &ctx->name; }
INSIDE_FLAGS(INSIDE_DEFINED)
#undef INSIDE_DEFINED

INSIDE_FN int32_t *inside_target(rocq_ctx *ctx) {
    return &ctx->gpu->chip.target;
}

INSIDE_FN char *inside_error(rocq_ctx *ctx) {
    return ctx->error;
}

INSIDE_FN size_t inside_error_size(void) {
    return sizeof ((rocq_ctx *)NULL)->error;
}

INSIDE_FN int64_t inside_context_size(void) {
    return (int64_t)sizeof(rocq_ctx);
}

INSIDE_FN const rocq_stats *inside_stats(const rocq_ctx *ctx) {
    return &ctx->stats;
}

INSIDE_FN int64_t inside_budget_used(const rocq_ctx *ctx) {
    return ctx->budget_used;
}

INSIDE_FN void inside_free_scratch(rocq_ctx *ctx) {
    rocq__free(ctx, ctx->scratch);
    ctx->budget_used -= ctx->scratch_size;
    ctx->scratch = NULL;
    ctx->scratch_size = 0;
}

INSIDE_FN void inside_spoil_scratch(rocq_ctx *ctx) {
    memset(ctx->scratch, 0xff, (size_t)ctx->scratch_size);
}

INSIDE_FN inside_mm inside_mm_plan(const rocq_ctx *ctx, const rocq_matmul_params *p, int64_t n) {
    rocq__mm mm;
    rocq__mm_plan(&mm, ctx, p, n, NULL, NULL);
    return (inside_mm){(void (*)(void))mm.pass, (void (*)(void))mm.wide_pass,
                       (void (*)(void))mm.pack_pair};
}

INSIDE_FN inside_plan inside_plan_matmul(const rocq_ctx *ctx, const rocq_matmul_params *p,
                                         int64_t begin, int64_t end) {
    static _Alignas(16) char memory[ROCQ__PLAN_BYTES], scratch[64];
    rocq__stage stages[ROCQ__PLAN_STAGES];
    rocq__plan plan = {ctx, scratch, ROCQ__WORTH_OP, stages, 0, memory, 0};
    rocq__ahead ahead = {0};
    rocq__plan_matmul_cpu(&plan, ROCQ_OP_MATMUL, p);
    inside_plan found = {.n_stages = plan.n_stages, .n = stages[1].n,
                         .together = stages[1].together, .has_reads = stages[1].reads != NULL};
    if (found.has_reads && begin < end) stages[1].reads(stages[1].arg, begin, end, &ahead);
    for (int i = 0; i < 3; i++) {
        found.at[i] = ahead.at[i];
        found.bytes[i] = ahead.bytes[i];
    }
    return found;
}

INSIDE_FN int64_t inside_mm_ahead(void) {
    return ROCQ__MM_AHEAD;
}

INSIDE_FN inside_cost inside_cost_of(const rocq_ctx *ctx, rocq_op op, const void *params) {
    const rocq__cost cost = rocq__cost_of(ctx, op, params);
    return (inside_cost){cost.flops, cost.matrix};
}

INSIDE_FN const char *inside_op_name(rocq_op op) {
    return rocq__ops[op]->name;
}

INSIDE_FN size_t inside_params_size(rocq_op op) {
    return (size_t)rocq__ops[op]->params_size;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic" // some of these return what is void
#define INSIDE_DEFINED(result, name, parameters, arguments)                                        \
    INSIDE_FN result inside_##name parameters {                                                    \
        return rocq__##name arguments;                                                             \
    }
INSIDE_FUNCTIONS(INSIDE_DEFINED)
#pragma GCC diagnostic pop

#endif // ROCQ_IMPLEMENTATION

#endif // TESTS_INSIDE_H
