// Attention against float64, in every option, format and layout, and against ggml.
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "ops.h"

// What F32 arithmetic over the decoded values leaves; the contract says 1e-6 (F32) and 1e-5 (F16).
#define BOUND 1e-9

typedef struct shape {
    int64_t head_dim, n_heads, n_kv_heads, n_q, n_kv, n_seqs;
    rocq_format q_format, k_format, v_format, mask_format, out_format;
    box_layout layout;
    bool causal, sinks, kv_len, in_place, hadamard;
    int32_t window, page_size; // 0 = none
    float softcap, scale;
    int64_t mask_heads, mask_seqs; // 0 = no mask
    float mask_hidden;             // share of the mask that is -inf
} shape;

typedef struct problem {
    shape s;
    box q, k, v, out, lse, mask, sinks, kv_len, page_table;
    rocq_attention_params p;
    double *want, *want_lse;
} problem;

static int64_t length_of(const problem *a, int64_t seq) {
    return a->s.kv_len ? (int64_t)a->kv_len.value[seq] : a->s.n_kv;
}

// Row of a position in k and v, and the sequence index there.
static int64_t row_of(const problem *a, int64_t j, int64_t seq, int64_t *row_seq) {
    *row_seq = a->s.page_size ? 0 : seq;
    if (!a->s.page_size) return j;
    const double page = box_at(&a->page_table, j / a->s.page_size, seq, 0, 0);
    return (int64_t)page * a->s.page_size + j % a->s.page_size;
}

static bool visible(const problem *a, int64_t seq, int64_t head, int64_t i, int64_t j) {
    const int64_t p = length_of(a, seq) - a->s.n_q + i;
    if (j >= length_of(a, seq)) return false;
    if (a->s.causal && j > p) return false;
    if (a->s.window && j <= p - a->s.window) return false;
    return !a->s.mask_heads || box_at_repeated(&a->mask, j, i, head, seq) != -INFINITY;
}

// Every step as the comment at rocq_attention_params has it, in float64.
static void reference(problem *a) {
    const shape *s = &a->s;
    const double scale = s->scale != 0 ? s->scale : 1 / sqrt((double)s->head_dim);
    double *score = (double *)malloc((size_t)s->n_kv * sizeof(double)), *out = a->want;
    double *lse = a->want_lse;
    assert_non_null(score);
    for (int64_t seq = 0; seq < s->n_seqs; seq++) {
        for (int64_t i = 0; i < s->n_q; i++) {
            for (int64_t h = 0; h < s->n_heads; h++, out += s->head_dim) {
                const int64_t kv_head = h * s->n_kv_heads / s->n_heads;
                double top = s->sinks ? a->sinks.value[h] : -(double)INFINITY, sum = 0;
                int64_t row_seq;
                for (int64_t j = 0; j < s->n_kv; j++) {
                    if (!visible(a, seq, h, i, j)) continue;
                    const int64_t row = row_of(a, j, seq, &row_seq);
                    double dot = 0;
                    for (int64_t d = 0; d < s->head_dim; d++) {
                        dot +=
                            box_at(&a->q, d, h, i, seq) * box_at(&a->k, d, kv_head, row, row_seq);
                    }
                    score[j] = dot * scale;
                    if (s->softcap > 0) score[j] = s->softcap * tanh(score[j] / s->softcap);
                    if (s->mask_heads) score[j] += box_at_repeated(&a->mask, j, i, h, seq);
                    top = score[j] > top ? score[j] : top;
                }
                bool saw = false;
                if (s->sinks) sum = exp(a->sinks.value[h] - top);
                for (int64_t d = 0; d < s->head_dim; d++) out[d] = 0;
                for (int64_t j = 0; j < s->n_kv; j++) {
                    if (!visible(a, seq, h, i, j)) continue;
                    const int64_t row = row_of(a, j, seq, &row_seq);
                    const double weight = exp(score[j] - top);
                    sum += weight;
                    saw = true;
                    for (int64_t d = 0; d < s->head_dim; d++) {
                        out[d] += weight * box_at(&a->v, d, kv_head, row, row_seq);
                    }
                }
                for (int64_t d = 0; d < s->head_dim && sum > 0; d++) out[d] /= sum;
                *lse++ = saw ? top + log(sum) : -(double)INFINITY;
            }
        }
    }
    free(score);
}

// Random operands. Scores get a spread near 2, so that softmax is neither flat nor one-hot.
static problem problem_make(shape s) {
    problem a;
    memset(&a, 0, sizeof a);
    const rocq_attention_params none = {.out = NULL};
    a.p = none;
    if (s.page_size) s.n_kv = (s.n_kv + s.page_size - 1) / s.page_size * s.page_size;
    a.s = s;
    const int64_t n_pages = s.page_size ? s.n_kv / s.page_size : 0;
    const int64_t n_rows = s.page_size ? (n_pages * s.n_seqs + 1) * s.page_size : s.n_kv;
    const int64_t kv_seqs = s.page_size ? 1 : s.n_seqs;
    a.q = box_random(s.layout, s.q_format, 2, s.head_dim, s.n_heads, s.n_q, s.n_seqs);
    a.k = box_random(s.layout, s.k_format, 1, s.head_dim, s.n_kv_heads, n_rows, kv_seqs);
    a.v = box_random(s.layout, s.v_format, 1, s.head_dim, s.n_kv_heads, n_rows, kv_seqs);
    if (s.hadamard) {
        box_hadamard(&a.k);
        box_hadamard(&a.v);
    }
    a.p.q = &a.q.t;
    a.p.k = &a.k.t;
    a.p.v = &a.v.t;
    if (s.in_place) {
        a.out.t.format = ROCQ_I32; // unused
        a.p.out = &a.q.t;
    } else {
        a.out = box_make(s.layout, s.out_format, s.head_dim, s.n_heads, s.n_q, s.n_seqs);
        a.p.out = &a.out.t;
    }
    if (s.mask_heads) {
        a.mask = box_make(s.layout, s.mask_format, s.n_kv, s.n_q, s.mask_heads, s.mask_seqs);
        for (int64_t i = 0; i < a.mask.count; i++) {
            a.mask.value[i] = random_in(0, 1) < s.mask_hidden ? -(double)INFINITY : random_normal();
        }
        box_write(&a.mask);
        a.p.mask = &a.mask.t;
    }
    if (s.sinks) {
        a.sinks = box_random(BOX_PLAIN, ROCQ_F32, 2, s.n_heads, 1, 1, 1);
        a.p.sinks = &a.sinks.t;
    }
    if (s.kv_len) {
        a.kv_len = box_make(BOX_PLAIN, ROCQ_I32, s.n_seqs, 1, 1, 1);
        for (int64_t i = 0; i < s.n_seqs; i++) {
            a.kv_len.value[i] = (double)(1 + random_below(s.n_kv));
        }
        box_write(&a.kv_len);
        a.p.kv_len = &a.kv_len.t;
    }
    if (s.page_size) { // pages of the pool in an order of their own; page 0 is nobody's
        a.page_table = box_make(s.layout, ROCQ_I32, n_pages, s.n_seqs, 1, 1);
        for (int64_t i = 0; i < a.page_table.count; i++) a.page_table.value[i] = (double)(1 + i);
        for (int64_t i = a.page_table.count - 1; i > 0; i--) {
            const int64_t j = random_below(i + 1);
            const double swap = a.page_table.value[i];
            a.page_table.value[i] = a.page_table.value[j];
            a.page_table.value[j] = swap;
        }
        box_write(&a.page_table);
        a.p.page_table = &a.page_table.t;
        a.p.page_size = s.page_size;
    }
    a.p.scale = s.scale;
    a.p.softcap = s.softcap;
    a.p.window = s.window;
    a.p.causal = s.causal;
    a.lse = box_make(s.layout, ROCQ_F32, s.n_heads, s.n_q, s.n_seqs, 1);
    a.want = (double *)malloc((size_t)a.q.count * sizeof(double));
    a.want_lse = (double *)malloc((size_t)a.lse.count * sizeof(double));
    assert_true(a.want && a.want_lse);
    return a;
}

// The struct moves when it is returned; its params follow.
static void problem_link(problem *a) {
    a->p.q = &a->q.t;
    a->p.k = &a->k.t;
    a->p.v = &a->v.t;
    a->p.out = a->s.in_place ? &a->q.t : &a->out.t;
    if (a->p.mask) a->p.mask = &a->mask.t;
    if (a->p.sinks) a->p.sinks = &a->sinks.t;
    if (a->p.kv_len) a->p.kv_len = &a->kv_len.t;
    if (a->p.page_table) a->p.page_table = &a->page_table.t;
}

static box *problem_out(problem *a) {
    return a->s.in_place ? &a->q : &a->out;
}

static void problem_free(problem *a) {
    boxes_free(&a->q, &a->k, &a->v, &a->out, &a->lse, &a->mask, &a->sinks, &a->kv_len,
               &a->page_table);
    free(a->want);
    free(a->want_lse);
}

// Rows that see nothing must be exactly that.
static void check_lse(problem *a) {
    box_read(&a->lse);
    box_check_outside(&a->lse);
    for (int64_t i = 0; i < a->lse.count; i++) {
        const double got = a->lse.value[i], want = a->want_lse[i];
        if (got != want && !(fabs(got - want) <= 4e-6 * (1 + fabs(want)))) {
            fail_msg("lse of row %lld: %g, expected %g", (long long)i, got, want);
        }
    }
}

static void check(problem *a) {
    problem_link(a);
    reference(a);
    box *out = problem_out(a);
    unsigned char *before = (unsigned char *)malloc((size_t)out->size);
    assert_non_null(before);
    memcpy(before, out->memory, (size_t)out->size);
    const int first = n_tiers > ONLY_AVX2 ? -1 : 0; // that round is AVX2's
    for (int round = first; round < 4; round++) { // with and without SIMD and lse
        box *const outputs[2] = {out, &a->lse};
        memcpy(out->memory, before, (size_t)out->size);
        memset(a->lse.memory, 0xff, (size_t)a->lse.size);
        a->p.lse = round > 1 || round < 0 ? &a->lse.t : NULL;
        run(round < 0 ? ONLY_AVX2 : round % 2, ROCQ_OP_ATTENTION, &a->p, outputs, 2);
        // A short row may be almost nothing, the difference of larger values.
        (a->s.head_dim < 8 ? check_all : check_rows)(out, a->want, BOUND);
        if (a->p.lse) check_lse(a);
    }
    a->p.lse = NULL;
    free(before);
}

static void solve(shape s) {
    problem a = problem_make(s);
    check(&a);
    problem_free(&a);
}

static shape basic(void) { // GQA, nothing optional
    const shape s = {.head_dim = 64,
                     .n_heads = 4,
                     .n_kv_heads = 2,
                     .n_q = 3,
                     .n_kv = 33,
                     .n_seqs = 1,
                     .q_format = ROCQ_F32,
                     .k_format = ROCQ_F32,
                     .v_format = ROCQ_F32,
                     .mask_format = ROCQ_F32,
                     .out_format = ROCQ_F32};
    return s;
}

static const rocq_format kv_formats[] = {ROCQ_F32, ROCQ_F16, ROCQ_BF16, ROCQ_Q8_0, ROCQ_Q4_0};

static void head_sizes(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 7, 40, 64, 80, 96, 112, 128, 256, 512};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int layout = BOX_PLAIN; layout <= BOX_PERMUTED; layout++) {
            shape s = basic();
            s.head_dim = sizes[i];
            s.layout = (box_layout)layout;
            solve(s);
            s.k_format = s.v_format = ROCQ_F16;
            s.causal = true;
            solve(s);
            s.n_q = 27; // 54 rows: a tile, and a short one
            s.n_kv = 101;
            solve(s);
        }
    }
}

static void counts_of_queries_and_keys(void **state) {
    (void)state;
    static const int64_t n_kv[] = {1, 2, 47, 48, 49, 127, 300};
    for (int64_t n_q = 1; n_q <= 34; n_q++) {
        for (size_t i = 0; i < sizeof n_kv / sizeof n_kv[0]; i++) {
            shape s = basic();
            s.head_dim = 16;
            s.n_q = n_q;
            s.n_kv = n_kv[i];
            s.n_heads = 6; // rows of a KV head: 3 n_q, so that tiles of 48 break everywhere
            s.causal = (n_q + (int64_t)i) % 2 == 0;
            solve(s);
        }
    }
}

static void head_groups(void **state) {
    (void)state;
    static const int64_t heads[][2] = {{1, 1}, {5, 5}, {6, 2}, {7, 1}, {40, 1}, {33, 11}};
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        shape s = basic();
        s.n_heads = heads[i][0];
        s.n_kv_heads = heads[i][1];
        s.n_seqs = 2;
        s.causal = true;
        solve(s);
    }
}

// One query of heads that share no keys is a row by itself. F16 has kernels of its own for that,
// where the head size is a multiple of 64. They take eight keys at a time.
static void rows_by_themselves(void **state) {
    (void)state;
    static const int64_t sizes[] = {64, 96, 128, 192};
    for (int64_t n_kv = 1; n_kv <= 210; n_kv += n_kv < 20 || n_kv > 180 ? 1 : 13) {
        for (int kind = 0; kind < 6; kind++) {
            shape s = basic();
            s.head_dim = sizes[(n_kv + kind) % 4];
            s.n_kv_heads = s.n_heads;
            s.n_q = 1;
            s.n_kv = n_kv;
            s.k_format = kind == 4 ? ROCQ_Q8_0 : ROCQ_F16;
            s.v_format = kind == 5 ? ROCQ_BF16 : ROCQ_F16;
            s.causal = true;
            if (kind == 1) s.window = (int32_t)(1 + n_kv / 2);
            if (kind == 2) s.page_size = 16;
            if (kind == 3) {
                s.mask_heads = s.n_heads;
                s.mask_seqs = 1;
                s.mask_hidden = 0.4f;
            }
            solve(s);
        }
    }
}

static void formats(void **state) {
    (void)state;
    for (size_t k = 0; k < sizeof kv_formats / sizeof kv_formats[0]; k++) {
        for (size_t v = 0; v < sizeof kv_formats / sizeof kv_formats[0]; v++) {
            shape s = basic();
            s.k_format = kv_formats[k];
            s.v_format = kv_formats[v];
            s.layout = (box_layout)((k + v) % 3);
            s.q_format = v % 2 ? ROCQ_F16 : ROCQ_F32;
            s.out_format = k % 2 ? ROCQ_F16 : ROCQ_F32;
            solve(s);
            s.n_q = 10; // many rows
            solve(s);
        }
    }
}

// Blocks of rows times H: all sizes of H, few rows of queries and many, short and split.
static void hadamard_rows(void **state) {
    (void)state;
    static const int64_t sizes[] = {32, 64, 96, 128, 160, 192, 256, 320, 512};
    const uint64_t saved = random_state;
    for (int i = 0; i < 72; i++) {
        shape s = basic();
        s.hadamard = true;
        s.head_dim = sizes[i % 9];
        s.k_format = kv_formats[i % 4 == 3 ? 1 : 3 + i % 2];
        s.v_format = kv_formats[i % 4 == 2 ? 0 : 3 + i / 2 % 2];
        s.q_format = i % 5 ? ROCQ_F32 : ROCQ_F16;
        s.out_format = i % 3 ? ROCQ_F32 : ROCQ_F16;
        s.layout = (box_layout)(i % 3);
        s.n_q = i % 7 == 6 ? 27 : 1 + i % 4;
        s.n_kv = i % 6 ? 50 : 420;
        s.n_seqs = 1 + i % 2;
        s.sinks = i % 8 == 1;
        s.softcap = i % 8 == 3 ? 3.0f : 0.0f;
        s.causal = i % 2 == 0;
        s.page_size = i % 8 == 5 ? 16 : 0;
        s.scale = i % 8 == 7 ? -0.1f : 0.0f;
        s.in_place = i % 11 == 10 && s.q_format == ROCQ_F32;
        solve(s);
    }
    random_state = saved;
}

static void each_option(void **state) {
    (void)state;
    for (int round = 0; round < 24; round++) {
        const int option = round % 12;
        shape s = basic();
        s.n_seqs = 2;
        s.n_q = round < 12 ? 4 : 31; // few rows, and many
        s.n_kv = 70;
        s.causal = option == 1 || option == 2 || option == 3;
        if (option == 2) s.window = 9;
        if (option == 3) s.window = 1;
        if (option == 4) s.softcap = 3;
        s.sinks = option == 5;
        s.kv_len = option == 6;
        if (option == 7) s.page_size = 8;
        if (option == 8) s.page_size = 33;
        if (option == 9) s.scale = -0.25f;
        s.in_place = option == 10;
        if (option == 11) {
            s.mask_heads = s.mask_seqs = 1;
            s.mask_hidden = 0.5f;
        }
        solve(s);
    }
}

static void masks(void **state) {
    (void)state;
    for (int kind = 0; kind < 32; kind++) {
        shape s = basic();
        if (kind & 16) s.n_q = 25;
        s.n_seqs = 3;
        s.n_kv = 70;
        s.mask_heads = kind & 1 ? s.n_heads : 1;
        s.mask_seqs = kind & 2 ? s.n_seqs : 1;
        s.mask_format = kind & 4 ? ROCQ_F16 : ROCQ_F32;
        s.mask_hidden = kind & 8 ? 0.9f : 0.0f;
        s.layout = (box_layout)(kind % 3);
        solve(s);
    }
}

static void everything_together(void **state) {
    (void)state;
    static const int64_t dims[] = {32, 64, 96, 128};
    for (int round = 0; round < 120; round++) {
        const bool decode =
            random_below(2); // few queries of a long context, else the other way round
        shape s = {.head_dim = dims[random_below(4)]};
        s.n_kv_heads = 1 + random_below(3);
        s.n_heads = s.n_kv_heads * (1 + random_below(5));
        s.n_q = 1 + random_below(decode ? 3 : 40);
        s.n_kv = 1 + random_below(decode ? 600 : 80);
        s.n_seqs = 1 + random_below(3);
        s.q_format = random_below(2) ? ROCQ_F32 : ROCQ_F16;
        s.k_format = kv_formats[random_below(5)];
        s.v_format = kv_formats[random_below(5)];
        s.mask_format = random_below(2) ? ROCQ_F32 : ROCQ_F16;
        s.layout = (box_layout)random_below(3);
        s.causal = random_below(3) > 0;
        s.sinks = random_below(3) == 0;
        s.kv_len = random_below(2);
        s.in_place = random_below(3) == 0;
        s.out_format = s.in_place || random_below(2) ? s.q_format : ROCQ_F32;
        if (s.causal && random_below(2)) s.window = (int32_t)(1 + random_below(s.n_kv + 5));
        if (random_below(3) == 0) s.page_size = (int32_t)(1 + random_below(40));
        if (random_below(3) == 0) s.softcap = random_in(1, 20);
        if (random_below(3) == 0) s.scale = random_in(-0.5f, 0.5f);
        if (random_below(2)) {
            s.mask_heads = random_below(2) ? 1 : s.n_heads;
            s.mask_seqs = random_below(2) ? 1 : s.n_seqs;
            s.mask_hidden = random_in(0, 1.2f);
        }
        solve(s);
    }
}

// One query row over more than one split, and the same bits whatever the cache's size, with pages
// as without.
static void long_contexts(void **state) {
    (void)state;
    static const int64_t lengths[] = {191, 192, 193, 384, 385, 600, 1000};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        shape s = basic();
        s.n_q = 1;
        s.n_kv = 1000;
        s.k_format = ROCQ_Q8_0;
        s.v_format = ROCQ_F16;
        s.causal = true;
        s.kv_len = true;
        problem a = problem_make(s);
        a.kv_len.value[0] = (double)lengths[i];
        box_write(&a.kv_len);
        check(&a);

        rocq_tensor k, v, out;
        const int64_t start[4] = {0}, ne[4] = {s.head_dim, s.n_kv_heads, lengths[i], 1};
        assert_int_equal(rocq_tensor_view(&k, &a.k.t, start, ne), ROCQ_OK);
        assert_int_equal(rocq_tensor_view(&v, &a.v.t, start, ne), ROCQ_OK);
        box exact = box_make(BOX_PLAIN, ROCQ_F32, s.head_dim, s.n_heads, 1, 1), *exact_out = &exact;
        rocq_attention_params p = a.p;
        p.k = &k;
        p.v = &v;
        p.kv_len = NULL;
        p.out = &exact.t;
        run(1, ROCQ_OP_ATTENTION, &p, &exact_out, 1);
        assert_true(same_bytes(exact.memory, a.out.memory, a.out.size));

        // The cache as pages of 50 rows in their natural order.
        box table = box_make(BOX_PLAIN, ROCQ_I32, 20, 1, 1, 1);
        for (int64_t j = 0; j < 20; j++) table.value[j] = (double)j;
        box_write(&table);
        p = a.p;
        p.page_table = &table.t;
        p.page_size = 50;
        p.out = &out;
        out = exact.t;
        memset(exact.memory, 0xff, (size_t)exact.size);
        run(1, ROCQ_OP_ATTENTION, &p, &exact_out, 1);
        assert_true(same_bytes(exact.memory, a.out.memory, a.out.size));
        boxes_free(&table, &exact);
        problem_free(&a);
    }
}

static void rows_that_see_nothing_are_zero(void **state) {
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        shape s = basic();
        s.sinks = kind & 1;
        s.n_q = 8;
        s.n_kv = 5;
        if (kind & 2) {
            s.mask_heads = s.mask_seqs = 1;
            s.mask_hidden = 2;
        } else {
            s.causal = true; // queries 0, 1 and 2 stand before position 0
        }
        problem a = problem_make(s);
        check(&a);
        const int64_t n_blind = (kind & 2 ? s.n_q : 3) * s.n_heads * s.head_dim;
        for (int64_t i = 0; i < n_blind; i++) assert_true(a.out.value[i] == 0);
        problem_free(&a);
    }
}

// NaN in what a row cannot see must not reach it, be it hidden from all rows or only from some.
static void hidden_positions_may_hold_anything(void **state) {
    (void)state;
    for (int round = 0; round < 12; round++) {
        const int kind = round % 6;
        shape s = basic();
        s.n_q = round < 6 ? 4 : 6; // few rows, and many
        s.n_kv = 80;
        s.kv_len = kind == 0;
        s.causal = kind == 1 || kind == 2;
        if (kind == 2) s.window = 10;
        if (kind >= 3) {
            s.mask_heads = s.n_heads;
            s.mask_seqs = 1;
            s.mask_hidden = 0.3f;
        }
        problem a = problem_make(s);
        if (kind == 0) {
            a.kv_len.value[0] = 50;
            box_write(&a.kv_len);
        }
        problem_link(&a);
        for (int64_t j = 0; j < s.n_kv; j++) {
            bool hidden_from_all = true, hidden_from_some = false;
            for (int64_t i = 0; i < s.n_q; i++) {
                for (int64_t h = 0; h < s.n_heads; h++) {
                    const bool v = visible(&a, 0, h, i, j);
                    hidden_from_all &= !v;
                    hidden_from_some |= !v;
                }
            }
            if (!(hidden_from_all || (hidden_from_some && j == 77))) continue;
            for (int64_t h = 0; h < s.n_kv_heads; h++) {
                for (int64_t d = 0; d < s.head_dim; d++) {
                    const int64_t at = (j * s.n_kv_heads + h) * s.head_dim + d;
                    a.k.value[at] = kind % 2 ? (double)NAN : (double)INFINITY;
                    a.v.value[at] = kind % 2 ? (double)INFINITY : (double)NAN;
                }
            }
        }
        box_write(&a.k);
        box_write(&a.v);
        reference(&a);
        for (int tier = 0; tier < n_tiers; tier++) {
            box *out = &a.out;
            int64_t n_clean = 0, n_dirty = 0;
            memset(out->memory, 0xff, (size_t)out->size);
            run(tier, ROCQ_OP_ATTENTION, &a.p, &out, 1);
            box_read(out);
            for (int64_t r = 0; r < box_rows(out); r++) {
                const double *want = a.want + r * s.head_dim, *got = out->value + r * s.head_dim;
                if (isfinite(want[0])) {
                    assert_true(nmse(ROCQ_F32, got, want, s.head_dim) <= BOUND);
                    n_clean++;
                } else { // what is seen is not hidden
                    assert_true(isnan(got[0]));
                    n_dirty++;
                }
            }
            assert_true(n_clean > 0);
            if (kind == 1) assert_true(n_dirty > 0);
        }
        problem_free(&a);
    }
}

static void bad_contents_are_refused(void **state) {
    (void)state;
    static const int32_t bad_len[] = {0, -1, 65, INT32_MIN, INT32_MAX};
    shape s = basic();
    s.n_kv = 64;
    s.n_seqs = 2;
    s.kv_len = true;
    s.page_size = 16;
    problem a = problem_make(s);
    problem_link(&a);
    box *out = &a.out;
    int32_t *len = (int32_t *)(void *)a.kv_len.memory,
            *page = (int32_t *)(void *)a.page_table.memory;
    for (size_t i = 0; i < sizeof bad_len / sizeof bad_len[0]; i++) {
        len[1] = bad_len[i];
        run_fails(ROCQ_OP_ATTENTION, &a.p, ROCQ_E_BOUNDS, &out, 1);
    }
    // The pool holds pages 0 to 8; the third one of the second sequence is used from length 33 on.
    static const int32_t bad_page[] = {-1, 9, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof bad_page / sizeof bad_page[0]; i++) {
        const int32_t good = page[4 + 2];
        page[4 + 2] = bad_page[i];
        len[1] = 33;
        run_fails(ROCQ_OP_ATTENTION, &a.p, ROCQ_E_BOUNDS, &out, 1);
        len[1] = 32;
        run(1, ROCQ_OP_ATTENTION, &a.p, &out, 1);
        page[4 + 2] = good;
    }
    problem_free(&a);
}

// The table of pages and the lengths are read again for every tile of rows, so out keeps away from
// them, its gaps too. They are good when the op checks them.
static void outputs_never_reach_the_page_table(void **state) {
    (void)state;
    enum { D = 64, HEADS = 2, N_Q = 70, PAGES = 4, PAGE = 32, GAP = 64 };
    shape s = basic();
    s.head_dim = D;
    s.n_heads = HEADS;
    s.n_kv_heads = 1;
    s.n_q = N_Q;
    s.n_kv = PAGES * PAGE;
    s.page_size = PAGE;
    problem a = problem_make(s);
    problem_link(&a);
    box whole = box_make(BOX_PLAIN, ROCQ_F32, D + GAP, HEADS, N_Q, 1), *out = &whole;
    const int64_t start[4] = {0}, ne[4] = {D, HEADS, N_Q, 1};
    rocq_tensor gapped;
    assert_int_equal(rocq_tensor_view(&gapped, &whole.t, start, ne), ROCQ_OK);
    a.p.out = &gapped;
    for (int gap = 0; gap < 2; gap++) {
        const rocq_buffer buffer = rocq_buffer_from_host(whole.memory, whole.size);
        const int64_t at = gap * D * 4, n_pages[2] = {PAGES, 1}, one = 1;
        const int32_t pages[PAGES] = {1, 2, 3, 4}, length = s.n_kv;
        rocq_tensor words;
        memcpy(whole.memory + at, pages, sizeof pages);
        assert_int_equal(rocq_tensor_init(&words, &buffer, at, ROCQ_I32, 2, n_pages), ROCQ_OK);
        a.p.page_table = &words;
        run_fails(ROCQ_OP_ATTENTION, &a.p, ROCQ_E_ARGUMENT, &out, 1);
        memcpy(whole.memory + at, &length, sizeof length);
        assert_int_equal(rocq_tensor_init(&words, &buffer, at, ROCQ_I32, 1, &one), ROCQ_OK);
        a.p.page_table = &a.page_table.t;
        a.p.kv_len = &words;
        run_fails(ROCQ_OP_ATTENTION, &a.p, ROCQ_E_ARGUMENT, &out, 1);
        a.p.kv_len = NULL;
    }
    box_free(&whole);
    problem_free(&a);
}

// q, k and v as columns of one tensor, out in the place of q or in columns of its own: the bits are
// those of the op over separate tensors. Where out takes in a column of k, it is refused.
static void columns_of_one_tensor(void **state) {
    (void)state;
    enum { D = 32, HEADS = 4, KV = 2, N = 40, ALL = 2 * HEADS + 2 * KV };
    static const int64_t first[4] = {0, HEADS, HEADS + KV, HEADS + 2 * KV};
    box fused = box_random(BOX_PLAIN, ROCQ_F32, 1, D, ALL, N, 1), *out = &fused;
    box own[4], got = box_make(BOX_PLAIN, ROCQ_F32, D, HEADS, N, 1);
    rocq_tensor t[4];
    for (int i = 0; i < 4; i++) { // q, k, v, out
        const int64_t n = i == 0 || i == 3 ? HEADS : KV;
        const int64_t start[4] = {0, first[i], 0, 0}, ne[4] = {D, n, N, 1};
        assert_int_equal(rocq_tensor_view(&t[i], &fused.t, start, ne), ROCQ_OK);
        own[i] = box_make(BOX_PLAIN, ROCQ_F32, D, n, N, 1);
        const rocq_cast_params copy = {.y = &own[i].t, .x = &t[i]};
        assert_int_equal(rocq_cast(contexts[1][1], &copy), ROCQ_OK);
    }
    const rocq_attention_params apart = {.out = &own[3].t, .q = &own[0].t, .k = &own[1].t,
                                         .v = &own[2].t, .causal = true};
    rocq_attention_params p = {.q = &t[0], .k = &t[1], .v = &t[2], .causal = true};
    assert_int_equal(rocq_attention(contexts[1][1], &apart), ROCQ_OK);
    rocq_tensor wrong = t[0];
    wrong.offset += D * 4; // its last head is k's first
    p.out = &wrong;
    run_fails(ROCQ_OP_ATTENTION, &p, ROCQ_E_ARGUMENT, &out, 1);
    for (int in_place = 0; in_place < 2; in_place++) {
        p.out = &t[in_place ? 0 : 3];
        const rocq_cast_params copy = {.y = &got.t, .x = p.out};
        assert_int_equal(rocq_attention(contexts[1][1], &p), ROCQ_OK);
        assert_int_equal(rocq_cast(contexts[1][1], &copy), ROCQ_OK);
        assert_memory_equal(got.memory, own[3].memory, (size_t)got.size);
    }
    for (int i = 0; i < 4; i++) box_free(&own[i]);
    boxes_free(&fused, &got);
}

// A last page that the pool holds only in part is good for as many positions as there are.
static void partial_last_page(void **state) {
    (void)state;
    shape s = basic();
    s.n_kv = 64;
    s.kv_len = true;
    s.page_size = 16;
    problem a = problem_make(s);
    problem_link(&a);
    box *out = &a.out;
    const int64_t start[4] = {0}, ne[4] = {s.head_dim, s.n_kv_heads, 4 * 16 + 5, 1};
    rocq_tensor k, v;
    assert_int_equal(rocq_tensor_view(&k, &a.k.t, start, ne), ROCQ_OK);
    assert_int_equal(rocq_tensor_view(&v, &a.v.t, start, ne), ROCQ_OK);
    a.p.k = &k;
    a.p.v = &v;
    const double pages[4] = {1, 3, 4, 2};
    memcpy(a.page_table.value, pages, sizeof pages);
    box_write(&a.page_table);
    for (int32_t length = 36; length <= 38; length++) {
        ((int32_t *)(void *)a.kv_len.memory)[0] = length;
        a.kv_len.value[0] = length;
        memset(out->memory, 0xff, (size_t)out->size);
        if (length <= 37) { // rows 64 to 68 of page 4 are there
            run(1, ROCQ_OP_ATTENTION, &a.p, &out, 1);
            reference(&a);
            check_rows(out, a.want, BOUND);
        } else {
            run_fails(ROCQ_OP_ATTENTION, &a.p, ROCQ_E_BOUNDS, &out, 1);
        }
    }
    problem_free(&a);
}

static void nan_in_a_query_stays_visible(void **state) {
    (void)state;
    for (int round = 0; round < 4; round++) {
        shape s = basic();
        s.n_q = round < 2 ? 1 : 12;
        s.n_kv = round % 2 ? 595 : 5;
        problem a = problem_make(s);
        problem_link(&a);
        a.q.value[3] = NAN; // head 0
        box_write(&a.q);
        reference(&a);
        for (int tier = 0; tier < n_tiers; tier++) {
            box *out = &a.out;
            run(tier, ROCQ_OP_ATTENTION, &a.p, &out, 1);
            box_read(out);
            for (int64_t d = 0; d < s.head_dim; d++) assert_true(isnan(out->value[d]));
            assert_true(nmse(ROCQ_F32, out->value + s.head_dim, a.want + s.head_dim, s.head_dim) <=
                        BOUND);
        }
        problem_free(&a);
    }
}

// Scores far outside what exp can hold.
static void large_scores(void **state) {
    (void)state;
    shape s = basic();
    s.scale = 1000;
    s.causal = true;
    s.n_kv = 300;
    solve(s);
    s.n_q = 1;
    solve(s);
    s.softcap = 50;
    solve(s);
}

// Keys whose score overflows to -inf have no weight, wherever they stand: in a whole tile before
// the others, behind them, in a split of their own, or everywhere.
static void scores_of_minus_infinity(void **state) {
    (void)state;
    enum { D = 8, N = 300, N_Q = 20 };
    static const int ranges[][2] = {{0, 48}, {0, 40}, {0, 96}, {48, 96}, {192, N}, {0, 192},
                                    {0, N}};
    static float k[N * D], v[N * D], q[N_Q * D], out[N_Q * D];
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 2};
    rocq_ctx *ctx = NULL;
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    const bool has_simd = *inside_has_simd(ctx);
    rocq_tensor tq, tk, tv, to;
    int64_t some[4] = {D, 1, 1, 1};
    const int64_t all[4] = {D, 1, N, 1};
    for (int i = 0; i < N_Q; i++) q[i * D] = 3e30f;
    assert_int_equal(rocq_tensor_from_host(&tk, k, ROCQ_F32, 4, all), ROCQ_OK);
    assert_int_equal(rocq_tensor_from_host(&tv, v, ROCQ_F32, 4, all), ROCQ_OK);
    const rocq_attention_params p = {.out = &to, .q = &tq, .k = &tk, .v = &tv};
    for (size_t r = 0; r < sizeof ranges / sizeof ranges[0]; r++) {
        for (int round = 0; round < 4; round++) {
            const bool none = ranges[r][1] - ranges[r][0] == N;
            some[2] = round < 2 ? 1 : N_Q;
            assert_int_equal(rocq_tensor_from_host(&tq, q, ROCQ_F32, 4, some), ROCQ_OK);
            assert_int_equal(rocq_tensor_from_host(&to, out, ROCQ_F32, 4, some), ROCQ_OK);
            *inside_has_simd(ctx) = round % 2 != 0 && has_simd;
            for (int i = 0; i < N * D; i++) {
                const bool far = i / D >= ranges[r][0] && i / D < ranges[r][1];
                k[i] = far && i % D == 0 ? -3e30f : 0.0f;
                v[i] = far ? 5.0f : 1.0f;
            }
            for (int d = 0; d < N_Q * D; d++) out[d] = NAN;
            assert_int_equal(rocq_attention(ctx, &p), ROCQ_OK);
            for (int d = 0; d < some[2] * D; d++) {
                assert_true(fabsf(out[d] - (none ? 0.0f : 1.0f)) <= 1e-5f);
            }
        }
    }
    *inside_has_simd(ctx) = has_simd;
    rocq_close(&ctx);
}

static void agrees_with_ggml(void **state) {
    (void)state;
    ggml_api g = ggml_open();
    // ggml keeps F16 sums of F16 values and rounds q to the format of k, which sets the bounds.
    static const struct { rocq_format format; double bound;
    } kinds[] = {{ROCQ_F32, 1e-11},
                 {ROCQ_F16, 1e-5},
                 {ROCQ_BF16, 5e-5},
                 {ROCQ_Q8_0, 5e-4},
                 {ROCQ_Q4_0, 5e-4}};
    for (size_t f = 0; f < sizeof kinds / sizeof kinds[0]; f++) {
        for (int option = 0; option < 8; option++) {
            shape s = basic();
            s.n_q = 4;
            s.n_kv = 96;
            s.n_seqs = 2;
            s.head_dim = option & 1 ? 128 : 64;
            s.k_format = s.v_format = kinds[f].format;
            s.mask_format = ROCQ_F16; // all that ggml takes
            s.mask_heads = option & 1 ? s.n_heads : 1;
            s.mask_seqs = option & 2 ? s.n_seqs : 1;
            s.mask_hidden = 0.3f;
            s.scale = 0.11f;
            if (option & 2) s.softcap = 4;
            s.sinks = option & 4;
            problem a = problem_make(s);
            problem_link(&a);
            // [D, heads, n, seqs] here, [D, n, heads, seqs] there
            const int32_t axes[4] = {0, 2, 1, 3};
            box q = box_make(BOX_PLAIN, s.q_format, s.head_dim, s.n_q, s.n_heads, s.n_seqs);
            box k = box_make(BOX_PLAIN, s.k_format, s.head_dim, s.n_kv, s.n_kv_heads, s.n_seqs);
            box v = box_make(BOX_PLAIN, s.v_format, s.head_dim, s.n_kv, s.n_kv_heads, s.n_seqs);
            const rocq_tensor *from[3] = {a.p.q, a.p.k, a.p.v};
            box *to[3] = {&q, &k, &v};
            for (int t = 0; t < 3; t++) {
                rocq_tensor turned;
                assert_int_equal(rocq_tensor_permute(&turned, from[t], axes), ROCQ_OK);
                const rocq_cast_params cast = {.y = &to[t]->t, .x = &turned};
                assert_int_equal(rocq_cast(contexts[0][0], &cast), ROCQ_OK);
            }
            void *node =
                g.flash_attn_ext(g.ctx, ggml_from(&g, &q), ggml_from(&g, &k), ggml_from(&g, &v),
                                 ggml_from(&g, &a.mask), s.scale, 0, s.softcap);
            if (s.sinks) g.flash_attn_ext_add_sinks(node, ggml_from(&g, &a.sinks));
            ggml_run(&g, node, a.want, a.out.count);
            box *out = &a.out;
            run(1, ROCQ_OP_ATTENTION, &a.p, &out, 1);
            check_all(out, a.want, kinds[f].bound);
            boxes_free(&q, &k, &v);
            problem_free(&a);
        }
    }
    ggml_close(&g);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(head_sizes),
        cmocka_unit_test(counts_of_queries_and_keys),
        cmocka_unit_test(head_groups),
        cmocka_unit_test(rows_by_themselves),
        cmocka_unit_test(formats),
        cmocka_unit_test(hadamard_rows),
        cmocka_unit_test(each_option),
        cmocka_unit_test(masks),
        cmocka_unit_test(everything_together),
        cmocka_unit_test(long_contexts),
        cmocka_unit_test(rows_that_see_nothing_are_zero),
        cmocka_unit_test(hidden_positions_may_hold_anything),
        cmocka_unit_test(bad_contents_are_refused),
        cmocka_unit_test(outputs_never_reach_the_page_table),
        cmocka_unit_test(columns_of_one_tensor),
        cmocka_unit_test(partial_last_page),
        cmocka_unit_test(nan_in_a_query_stays_visible),
        cmocka_unit_test(large_scores),
        cmocka_unit_test(scores_of_minus_infinity),
        cmocka_unit_test(agrees_with_ggml),
    };
    return cmocka_run_group_tests_name("attention", tests, open_contexts, close_contexts);
}
