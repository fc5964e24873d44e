// The KV cache against a plain model of it: random scripts of every call, in both layouts and all
// formats, with the bookkeeping of pages counted anew after each; snapshots, hostile ones too;
// everything that can fail. tests/test_kv_gpu.c runs the same on the stand-in of a GPU.
#ifndef KV_BACKEND
#define KV_BACKEND ROCQ_BACKEND_CPU
#define KV_SCRIPT 500 // calls of a script
#endif

#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "cancelling.h"
#include "ops.h"

#ifdef KV_TEARDOWN
static int KV_TEARDOWN(void **state);
#else
#define KV_TEARDOWN NULL
#endif

// -- the model: each position of a sequence with what was put there --

enum { LAYERS = 2, HEADS = 2, PLANES = LAYERS * HEADS, MOST_DIM = 64, SEQS = 4, CTX = 45 };
enum { MOST = 12 }; // positions of an append

typedef struct place {
    float k[PLANES][MOST_DIM], v[PLANES][MOST_DIM]; // before rope and rounding
    unsigned char k_row[PLANES][4 * MOST_DIM], v_row[PLANES][4 * MOST_DIM]; // as the cache has them
    int32_t n_rounds; // how often the key has been rounded
    bool seen;        // to be right in float64: from then on k_row is
} place;

typedef struct sequence {
    int32_t length;
    place at[CTX];
} sequence;

typedef struct world {
    rocq_ctx *ctx;
    rocq_kv *kv;
    rocq_kv_desc d;
    sequence seq[SEQS];
    rocq_tensor factors;
    rocq_buffer inputs; // k and v, positions, cells of an append
    int64_t k_bytes, v_bytes; // of a row
    unsigned char *k_cells[LAYERS], *v_cells[LAYERS]; // downloaded: [n_cells rows, HEADS]
    int32_t table[SEQS][CTX];
    int64_t n_cells;
} world;

static world w;

static rocq_ctx *open_ctx(void) {
    rocq_ctx *ctx = NULL;
    const rocq_desc desc = {.prefer = KV_BACKEND, .n_threads = 1};
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    return ctx;
}

static rocq_kv_desc small_desc(rocq_format k, rocq_format v, int32_t page_size) {
    const rocq_kv_desc d = {.n_layers = LAYERS, .n_kv_heads = HEADS, .head_dim = 32, .k_format = k,
                            .v_format = v, .n_seqs = SEQS, .n_ctx = CTX, .page_size = page_size};
    return d;
}

static rocq_tensor input(rocq_format format, int64_t offset, int64_t n0, int64_t n1, int64_t n2) {
    rocq_tensor t;
    const int64_t ne[3] = {n0, n1, n2};
    assert_int_equal(rocq_tensor_init(&t, &w.inputs, offset, format, 3, ne), ROCQ_OK);
    return t;
}

enum { K_AT = 0, V_AT = 65536, POS_AT = 131072, CELL_AT = 135168, OUT_AT = 139264 };
enum { INPUTS = 262144 }; // bytes

static void world_open(rocq_ctx *ctx, const rocq_kv_desc *d) {
    memset(&w, 0, sizeof w);
    w.ctx = ctx;
    w.d = *d;
    assert_int_equal(rocq_buffer_alloc(ctx, &w.inputs, INPUTS), ROCQ_OK);
    assert_int_equal(rocq_kv_create(ctx, &w.kv, d), ROCQ_OK);
    const int64_t pages = d->page_size ? (d->n_ctx + d->page_size - 1) / d->page_size : 0;
    if (w.d.n_pages == 0) w.d.n_pages = (int32_t)(d->n_seqs * pages);
    w.n_cells = d->page_size ? (int64_t)w.d.n_pages * d->page_size : d->n_seqs * d->n_ctx;
    assert_int_equal(rocq_row_size(d->k_format, d->head_dim, &w.k_bytes), ROCQ_OK);
    assert_int_equal(rocq_row_size(d->v_format, d->head_dim, &w.v_bytes), ROCQ_OK);
    for (int i = 0; i < LAYERS; i++) {
        w.k_cells[i] = (unsigned char *)malloc((size_t)(w.n_cells * HEADS * w.k_bytes));
        w.v_cells[i] = (unsigned char *)malloc((size_t)(w.n_cells * HEADS * w.v_bytes));
        assert_true(w.k_cells[i] && w.v_cells[i]);
    }
}

static void world_close(void) {
    for (int i = 0; i < LAYERS; i++) {
        free(w.k_cells[i]);
        free(w.v_cells[i]);
    }
    rocq_kv_destroy(&w.kv);
    rocq_kv_destroy(&w.kv);
    assert_null(w.kv);
    assert_int_equal(rocq_buffer_free(w.ctx, &w.inputs), ROCQ_OK);
}

// -- numbers --

// Largest length of a pair, or size of an element that is in none: a turn leaves it as it is.
static double reach_of(const double *x) {
    const rocq_rope_config *r = &w.d.rope;
    const int32_t dim = w.d.head_dim, n = r->n_dims ? r->n_dims : dim;
    double most = 0;
    for (int32_t i = 0; i < n / 2; i++) {
        const int32_t a = r->pairing == ROCQ_ROPE_NEOX ? i : 2 * i;
        const int32_t b = r->pairing == ROCQ_ROPE_NEOX ? i + n / 2 : 2 * i + 1;
        most = fmax(most, hypot(x[a], x[b]));
    }
    for (int32_t i = n; i < dim; i++) most = fmax(most, fabs(x[i]));
    return most;
}

static void rope64(double *y, const float *x, int32_t pos) {
    static const float one = 1;
    const rocq_rope_config *r = &w.d.rope;
    const int32_t dim = w.d.head_dim, n = r->n_dims ? r->n_dims : dim;
    const rocq__rope_scaling s = rocq__rope_scaling_of(r, n);
    for (int32_t i = 0; i < dim; i++) y[i] = (double)x[i];
    for (int32_t i = 0; i < n / 2; i++) {
        const int32_t a = r->pairing == ROCQ_ROPE_NEOX ? i : 2 * i;
        const int32_t b = r->pairing == ROCQ_ROPE_NEOX ? i + n / 2 : 2 * i + 1;
        const float factor = r->freq_factors ? 1.5f + (float)i : one;
        const double own = pow(s.base, -2 * (double)i / s.n_dims) / (double)factor;
        const double angle = pos * rocq__rope_frequency(&s, i, own), m = (double)s.magnitude;
        const double u = y[a], v = y[b];
        y[a] = m * (u * cos(angle) - v * sin(angle));
        y[b] = m * (u * sin(angle) + v * cos(angle));
    }
}

// Of the largest element: how far off one rounding may be. Q4_0 has 16 steps, of which the one
// opposite to the largest element is missing.
static double rounding_of(rocq_format format) {
    switch (format) {
    case ROCQ_F32: return 0x1p-21; // rope's own arithmetic
    case ROCQ_F16: return 0x1p-11 + 0x1p-21;
    case ROCQ_BF16: return 0x1p-8 + 0x1p-21;
    case ROCQ_Q8_0: return 1.0 / 254 + 0x1p-10;
    default: return 1.0 / 8 + 0x1p-9;
    }
}

static rocq_layout layout_of(rocq_format format) {
    const bool blocks = format == ROCQ_Q8_0 || format == ROCQ_Q4_0;
    return blocks && !w.d.no_hadamard ? ROCQ_LAYOUT_HADAMARD : ROCQ_LAYOUT_GGUF;
}

static void check_row(rocq_format format, const unsigned char *row, const double *want,
                      int32_t n_rounds) {
    float got[MOST_DIM];
    double turned[MOST_DIM], reach = reach_of(want);
    if (layout_of(format) == ROCQ_LAYOUT_HADAMARD) {
        memcpy(turned, want, (size_t)w.d.head_dim * sizeof *turned);
        hadamard64(turned, w.d.head_dim);
        want = turned;
        reach = 0;
        for (int32_t i = 0; i < w.d.head_dim; i++) reach = fmax(reach, fabs(want[i]));
        // A turn before the next rounding may take what all elements are off to one of them.
        if (n_rounds > 1) reach *= 2 * sqrt((double)w.d.head_dim);
    }
    // A rounding moves each of a pair's two elements, and turns only turn that: roundings add up.
    const double bound = (pow(1 + sqrt(2.0) * rounding_of(format), n_rounds) - 1) * reach;
    assert_int_equal(rocq_dequantize(format, got, row, w.d.head_dim), ROCQ_OK);
    for (int32_t i = 0; i < w.d.head_dim; i++) {
        if (!(fabs((double)got[i] - want[i]) <= bound)) {
            fail_msg("element %d after %d roundings: %g, expected %g within %g", (int)i,
                     (int)n_rounds, (double)got[i], want[i], bound);
        }
    }
}

// -- looking into the cache --

static void download(void *dst, const rocq_tensor *t) {
    assert_int_equal(rocq_download(w.ctx, dst, t, rocq_tensor_size(t)), ROCQ_OK);
}

// Brings lengths, tables and rows here; the lengths must be right.
static void look(void) {
    const int32_t swap[4] = {0, 2, 1, 3};
    assert_int_equal(rocq_kv_flush(w.kv), ROCQ_OK);
    for (int32_t i = 0; i < LAYERS; i++) {
        rocq_kv_view view;
        rocq_tensor t;
        int32_t length[SEQS];
        assert_int_equal(rocq_kv_layer(w.kv, i, 0, w.d.n_seqs, &view), ROCQ_OK);
        assert_int_equal(view.k_cache.ne[2], w.n_cells);
        assert_int_equal(rocq_tensor_permute(&t, &view.k_cache, swap), ROCQ_OK);
        download(w.k_cells[i], &t);
        assert_int_equal(rocq_tensor_permute(&t, &view.v_cache, swap), ROCQ_OK);
        download(w.v_cells[i], &t);
        download(length, &view.kv_len);
        for (int32_t s = 0; s < w.d.n_seqs; s++) {
            assert_int_equal(length[s], w.seq[s].length);
            assert_int_equal(rocq_kv_length(w.kv, s), w.seq[s].length);
            if (!w.d.page_size) continue;
            rocq_kv_view one;
            assert_int_equal(rocq_kv_layer(w.kv, i, s, 1, &one), ROCQ_OK);
            assert_int_equal(one.page_table.ne[0], (w.d.n_ctx + w.d.page_size - 1) / w.d.page_size);
            download(w.table[s], &one.page_table);
        }
    }
}

static int32_t pages_of(int32_t length) {
    return w.d.page_size ? (length + w.d.page_size - 1) / w.d.page_size : 0;
}

static int32_t cell_of(int32_t s, int32_t pos) {
    const int32_t size = w.d.page_size;
    return size ? w.table[s][pos / size] * size + pos % size : s * w.d.n_ctx + pos;
}

static int32_t users_of(int32_t page) {
    int32_t n = 0;
    for (int32_t s = 0; s < w.d.n_seqs; s++) {
        for (int32_t i = 0; i < pages_of(w.seq[s].length); i++) n += w.table[s][i] == page;
    }
    return n;
}

static int32_t shared_of(int32_t s, int32_t begin, int32_t end) {
    int32_t n = 0;
    for (int32_t i = begin; i < end; i++) n += users_of(w.table[s][i]) > 1;
    return n;
}

static int32_t free_pages(void) {
    int32_t n = w.d.n_pages;
    for (int32_t page = 0; page < w.d.n_pages; page++) n -= users_of(page) > 0;
    return n;
}

// The pages counted from the tables alone.
static void check_stats(void) {
    rocq_kv_stats stats;
    int64_t used = 0, room = 0, positions = 0;
    int32_t shared = 0;
    assert_int_equal(rocq_kv_get_stats(w.kv, &stats), ROCQ_OK);
    for (int32_t s = 0; s < w.d.n_seqs; s++) {
        positions += w.seq[s].length;
        if (!w.d.page_size) used += w.seq[s].length;
        if (!w.d.page_size && w.seq[s].length) room += w.d.n_ctx;
    }
    for (int32_t page = 0; page < w.d.n_pages; page++) {
        int32_t fill = 0;
        for (int32_t s = 0; s < w.d.n_seqs; s++) {
            for (int32_t i = 0; i < pages_of(w.seq[s].length); i++) {
                const int32_t rest = w.seq[s].length - i * w.d.page_size;
                if (w.table[s][i] != page) continue;
                fill = rest > fill ? rest : fill;
            }
        }
        used += fill < w.d.page_size ? fill : w.d.page_size;
        room += fill ? w.d.page_size : 0;
        shared += users_of(page) > 1;
    }
    const int64_t bytes = PLANES * (w.k_bytes + w.v_bytes);
    assert_int_equal(stats.n_positions, positions);
    assert_int_equal(stats.reserved_bytes, w.n_cells * bytes);
    assert_int_equal(stats.used_bytes, used * bytes);
    assert_int_equal(stats.n_pages, w.d.n_pages);
    assert_int_equal(stats.n_free_pages, free_pages());
    assert_int_equal(stats.n_shared_pages, shared);
    assert_true(fabs(stats.internal - (room ? 1 - (double)used / (double)room : 0)) < 1e-12);
    assert_true(fabs(stats.unused - (1 - (double)used / (double)w.n_cells)) < 1e-12);
}

static void check_all_sequences(void) {
    look();
    for (int32_t s = 0; s < w.d.n_seqs; s++) {
        for (int32_t i = 0; i < pages_of(w.seq[s].length); i++) {
            assert_in_range(w.table[s][i], 0, w.d.n_pages - 1);
        }
        for (int32_t pos = 0; pos < w.seq[s].length; pos++) {
            place *at = &w.seq[s].at[pos];
            for (int32_t p = 0; p < PLANES; p++) {
                const int64_t row = p % HEADS * w.n_cells + cell_of(s, pos);
                const unsigned char *k = w.k_cells[p / HEADS] + row * w.k_bytes;
                const unsigned char *v = w.v_cells[p / HEADS] + row * w.v_bytes;
                double want[MOST_DIM];
                if (!at->seen) {
                    rope64(want, at->k[p], pos);
                    check_row(w.d.k_format, k, want, at->n_rounds);
                    if (KV_BACKEND == ROCQ_BACKEND_GPU) memcpy(at->k_row[p], k, (size_t)w.k_bytes);
                }
                assert_memory_equal(k, at->k_row[p], (size_t)w.k_bytes);
                assert_memory_equal(v, at->v_row[p], (size_t)w.v_bytes);
            }
            at->seen = true;
        }
    }
    check_stats();
}

// -- the calls, on both --

// y = x, a row each on the host, in y's format as the cache has it, or x's.
static void cast_row(void *y, rocq_format y_format, rocq_layout y_layout, void *x,
                     rocq_format x_format, rocq_layout x_layout) {
    rocq_tensor to, from;
    const int64_t dim = w.d.head_dim;
    assert_int_equal(rocq_tensor_from_host(&to, y, y_format, 1, &dim), ROCQ_OK);
    assert_int_equal(rocq_tensor_from_host(&from, x, x_format, 1, &dim), ROCQ_OK);
    to.layout = y_layout;
    from.layout = x_layout;
    const rocq_cast_params p = {.y = &to, .x = &from};
    assert_int_equal(rocq_cast(w.ctx, &p), ROCQ_OK);
}

// A key's row as a shift makes it, by the public ops.
static void turn_row(unsigned char *row, int32_t n) {
    float x[MOST_DIM];
    rocq_tensor t, pos;
    const int64_t ne[3] = {w.d.head_dim, 1, 1};
    rocq_rope_params p = {.y = &t, .x = &t, .pos = &pos, .rope = w.d.rope};
    const rocq__rope_scaling s = rocq__rope_scaling_of(&w.d.rope, w.d.head_dim);
    int32_t back = -n;
    cast_row(x, ROCQ_F32, ROCQ_LAYOUT_GGUF, row, w.d.k_format, layout_of(w.d.k_format));
    assert_int_equal(rocq_tensor_from_host(&t, x, ROCQ_F32, 3, ne), ROCQ_OK);
    assert_int_equal(rocq_tensor_from_host(&pos, &back, ROCQ_I32, 1, ne + 1), ROCQ_OK);
    p.rope.attn_factor = (p.rope.attn_factor > 0 ? p.rope.attn_factor : 1) / s.magnitude;
    assert_int_equal(rocq_rope(w.ctx, &p), ROCQ_OK);
    cast_row(row, w.d.k_format, layout_of(w.d.k_format), x, ROCQ_F32, ROCQ_LAYOUT_GGUF);
}

// What rope_append stores, worked out beside it. A GPU's own rows are taken over once they are
// close enough: later moves must keep them to the bit.
static void shadow_rows(int32_t s, int32_t pos) {
    place *at = &w.seq[s].at[pos];
    at->n_rounds = 1;
    at->seen = false;
    for (int32_t p = 0; p < PLANES; p++) {
        const int64_t row = p % HEADS * w.n_cells + cell_of(s, pos), dim = w.d.head_dim;
        double want[MOST_DIM];
        if (KV_BACKEND == ROCQ_BACKEND_GPU) {
            memcpy(at->v_row[p], w.v_cells[p / HEADS] + row * w.v_bytes, (size_t)w.v_bytes);
            for (int64_t i = 0; i < dim; i++) want[i] = (double)at->v[p][i];
            check_row(w.d.v_format, at->v_row[p], want, 1);
            continue;
        }
        float x[MOST_DIM];
        rocq_tensor t, pos_of;
        const int64_t ne[3] = {dim, 1, 1};
        const rocq_rope_params rope = {.y = &t, .x = &t, .pos = &pos_of, .rope = w.d.rope};
        memcpy(x, at->k[p], sizeof x);
        assert_int_equal(rocq_tensor_from_host(&t, x, ROCQ_F32, 3, ne), ROCQ_OK);
        assert_int_equal(rocq_tensor_from_host(&pos_of, &pos, ROCQ_I32, 1, ne + 1), ROCQ_OK);
        assert_int_equal(rocq_rope(w.ctx, &rope), ROCQ_OK);
        const rocq_format k_format = w.d.k_format, v_format = w.d.v_format;
        cast_row(at->k_row[p], k_format, layout_of(k_format), x, ROCQ_F32, ROCQ_LAYOUT_GGUF);
        cast_row(at->v_row[p], v_format, layout_of(v_format), at->v[p], ROCQ_F32, ROCQ_LAYOUT_GGUF);
    }
}

static rocq_result append(int32_t s, int32_t n) {
    int32_t cells[MOST], pos[MOST];
    sequence *q = &w.seq[s];
    const int32_t length = q->length, held = pages_of(length);
    look();
    const bool copies =
        n > 0 && w.d.page_size && length % w.d.page_size && shared_of(s, held - 1, held);
    const bool room = pages_of(length + n) - held + copies <= free_pages();
    for (int32_t i = 0; i < MOST; i++) cells[i] = -77;
    const rocq_result result = rocq_kv_append(w.kv, s, n, cells);
    if (n > w.d.n_ctx - length || !room) {
        assert_int_equal(result, n > w.d.n_ctx - length ? ROCQ_E_BOUNDS : ROCQ_E_MEMORY);
        for (int32_t i = 0; i < MOST; i++) assert_int_equal(cells[i], -77);
        return result;
    }
    assert_int_equal(result, ROCQ_OK);
    q->length += n;
    look();
    if (n == 0) return result;
    for (int32_t i = 0; i < n; i++) {
        pos[i] = length + i;
        assert_int_equal(cells[i], cell_of(s, pos[i]));
        assert_true(!w.d.page_size || users_of(cells[i] / w.d.page_size) == 1);
        for (int32_t p = 0; p < PLANES; p++) {
            for (int32_t e = 0; e < w.d.head_dim; e++) {
                q->at[pos[i]].k[p][e] = random_normal();
                q->at[pos[i]].v[p][e] = random_normal();
            }
        }
    }
    const rocq_tensor k = input(ROCQ_F32, K_AT, w.d.head_dim, HEADS, n);
    const rocq_tensor v = input(ROCQ_F32, V_AT, w.d.head_dim, HEADS, n);
    const rocq_tensor p = input(ROCQ_I32, POS_AT, n, 1, 1), c = input(ROCQ_I32, CELL_AT, n, 1, 1);
    assert_int_equal(rocq_upload(w.ctx, &p, pos, 4 * n), ROCQ_OK);
    assert_int_equal(rocq_upload(w.ctx, &c, cells, 4 * n), ROCQ_OK);
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        static float host[2][MOST * HEADS * MOST_DIM];
        rocq_kv_view view;
        for (int32_t i = 0; i < n; i++) {
            for (int32_t h = 0; h < HEADS; h++) {
                const size_t at = (size_t)((i * HEADS + h) * w.d.head_dim);
                const size_t bytes = (size_t)w.d.head_dim * sizeof(float);
                memcpy(host[0] + at, q->at[pos[i]].k[layer * HEADS + h], bytes);
                memcpy(host[1] + at, q->at[pos[i]].v[layer * HEADS + h], bytes);
            }
        }
        assert_int_equal(rocq_upload(w.ctx, &k, host[0], rocq_tensor_size(&k)), ROCQ_OK);
        assert_int_equal(rocq_upload(w.ctx, &v, host[1], rocq_tensor_size(&v)), ROCQ_OK);
        assert_int_equal(rocq_kv_layer(w.kv, layer, s, 1, &view), ROCQ_OK);
        const rocq_rope_append_params params = {
            .k = &k, .v = &v, .k_cache = &view.k_cache, .v_cache = &view.v_cache, .pos = &p,
            .cell = &c, .rope = w.d.rope};
        if (rocq_rope_append(w.ctx, &params) != ROCQ_OK) fail_msg("%s", rocq_error(w.ctx));
    }
    look();
    for (int32_t i = 0; i < n; i++) shadow_rows(s, pos[i]);
    return result;
}

static void truncate_to(int32_t s, int32_t length) {
    assert_int_equal(rocq_kv_truncate(w.kv, s, length), ROCQ_OK);
    w.seq[s].length = length;
}

static rocq_result shift(int32_t s, int32_t first, int32_t n) {
    sequence *q = &w.seq[s];
    const int32_t size = w.d.page_size, left = q->length - n, end = pages_of(left);
    const bool whole = size && first % size == 0 && n % size == 0;
    const int32_t begin = size && n && first < left ? first / size : end; // pages that are written
    const int32_t out = whole ? n / size : 0;                            // and that are dropped
    look();
    const bool room = shared_of(s, begin + out, end + out) <= free_pages();
    const rocq_result result = rocq_kv_shift(w.kv, s, first, n);
    if (!room) {
        assert_int_equal(result, ROCQ_E_MEMORY);
        return result;
    }
    assert_int_equal(result, ROCQ_OK);
    for (int32_t i = first; n && i < left; i++) {
        q->at[i] = q->at[i + n];
        q->at[i].n_rounds++;
        q->at[i].seen = false;
        for (int32_t p = 0; p < PLANES && KV_BACKEND == ROCQ_BACKEND_CPU; p++) {
            turn_row(q->at[i].k_row[p], n);
        }
    }
    q->length = left;
    return result;
}

static void fork_to(int32_t src, int32_t dst) {
    assert_int_equal(rocq_kv_fork(w.kv, src, dst), ROCQ_OK);
    w.seq[dst] = w.seq[src];
}

typedef struct snapshot {
    unsigned char *bytes;
    int64_t size;
    sequence seq;
} snapshot;

static snapshot save(int32_t s) {
    snapshot shot = {.bytes = NULL, .size = -1};
    int64_t size = -1;
    assert_int_equal(rocq_kv_save(w.kv, s, NULL, 0, &shot.size), ROCQ_OK);
    shot.bytes = (unsigned char *)malloc((size_t)shot.size);
    assert_non_null(shot.bytes);
    memset(shot.bytes, 0xff, (size_t)shot.size);
    assert_int_equal(rocq_kv_save(w.kv, s, shot.bytes, shot.size, &size), ROCQ_OK);
    assert_int_equal(size, shot.size);
    shot.seq = w.seq[s];
    return shot;
}

static rocq_result restore(int32_t s, const snapshot *shot) {
    look();
    const int32_t held = pages_of(w.seq[s].length);
    const bool room = pages_of(shot->seq.length) <= free_pages() + held - shared_of(s, 0, held);
    const rocq_result result = rocq_kv_restore(w.kv, s, shot->bytes, shot->size);
    assert_int_equal(result, room ? ROCQ_OK : ROCQ_E_MEMORY);
    if (room) w.seq[s] = shot->seq;
    return result;
}

// -- attention over what the cache holds --

static void decode64(rocq_format format, double *x, const unsigned char *row) {
    float stored[MOST_DIM];
    assert_int_equal(rocq_dequantize(format, stored, row, w.d.head_dim), ROCQ_OK);
    for (int32_t i = 0; i < w.d.head_dim; i++) x[i] = (double)stored[i];
    if (layout_of(format) == ROCQ_LAYOUT_HADAMARD) hadamard64(x, w.d.head_dim);
}

// In float64 over the rows that were looked at, which have been checked.
static void check_attention(int32_t layer, int32_t s, int32_t n_seqs) {
    enum { GROUP = 2, N_Q = 2 };
    static float q[SEQS][N_Q][GROUP * HEADS][MOST_DIM], got[SEQS][N_Q][GROUP * HEADS][MOST_DIM];
    static double k[CTX][MOST_DIM], v[CTX][MOST_DIM];
    const int32_t dim = w.d.head_dim;
    const int64_t ne[4] = {dim, GROUP * HEADS, N_Q, n_seqs};
    rocq_tensor q_in, out;
    rocq_kv_view view;
    for (int32_t i = s; i < s + n_seqs; i++) {
        if (w.seq[i].length < N_Q) return;
    }
    float *flat = &q[0][0][0][0];
    for (int64_t i = 0; i < dim * GROUP * HEADS * N_Q * n_seqs; i++) flat[i] = random_normal();
    assert_int_equal(rocq_tensor_init(&q_in, &w.inputs, K_AT, ROCQ_F32, 4, ne), ROCQ_OK);
    assert_int_equal(rocq_tensor_init(&out, &w.inputs, OUT_AT, ROCQ_F32, 4, ne), ROCQ_OK);
    assert_int_equal(rocq_upload(w.ctx, &q_in, flat, rocq_tensor_size(&q_in)), ROCQ_OK);
    assert_int_equal(rocq_kv_layer(w.kv, layer, s, n_seqs, &view), ROCQ_OK);
    const rocq_attention_params p = {
        .out = &out, .q = &q_in, .k = &view.k, .v = &view.v, .kv_len = &view.kv_len,
        .page_table = view.page_table.n_dims ? &view.page_table : NULL,
        .page_size = view.page_size, .causal = true};
    if (rocq_attention(w.ctx, &p) != ROCQ_OK) fail_msg("%s", rocq_error(w.ctx));
    flat = &got[0][0][0][0];
    download(flat, &out);
    for (int32_t i = 0; i < n_seqs; i++) {
        const int32_t length = w.seq[s + i].length;
        for (int32_t h = 0; h < GROUP * HEADS; h++) {
            for (int32_t j = 0; j < length; j++) {
                const int64_t row = h / GROUP * w.n_cells + cell_of(s + i, j);
                decode64(w.d.k_format, k[j], w.k_cells[layer] + row * w.k_bytes);
                decode64(w.d.v_format, v[j], w.v_cells[layer] + row * w.v_bytes);
            }
            for (int32_t t = 0; t < N_Q; t++) {
                const int64_t at = ((i * N_Q + t) * GROUP * HEADS + h) * dim;
                double sum = 0, want[MOST_DIM] = {0}, have[MOST_DIM];
                for (int32_t j = 0; j <= length - N_Q + t; j++) {
                    double score = 0;
                    for (int32_t e = 0; e < dim; e++) {
                        score += (double)(&q[0][0][0][0])[at + e] * k[j][e];
                    }
                    const double weight = exp(score / sqrt((double)dim));
                    sum += weight;
                    for (int32_t e = 0; e < dim; e++) want[e] += weight * v[j][e];
                }
                for (int32_t e = 0; e < dim; e++) {
                    want[e] /= sum;
                    have[e] = (double)flat[at + e];
                }
                const double error = nmse(ROCQ_F32, have, want, dim);
                if (!(error <= (KV_BACKEND == ROCQ_BACKEND_GPU ? 1e-5 : 1e-9)))
                    fail_msg("NMSE %g", error);
            }
        }
    }
}

// -- scripts --

static void random_call(snapshot *shots, int32_t n_shots) {
    const int32_t s = (int32_t)random_below(w.d.n_seqs), length = w.seq[s].length;
    const int32_t size = w.d.page_size ? w.d.page_size : 1;
    switch (random_below(12)) {
    case 0: case 1: case 2: case 3: append(s, (int32_t)random_below(MOST)); break;
    case 4: truncate_to(s, (int32_t)random_below(length + 1)); break;
    case 5: case 6: {
        const int32_t first = (int32_t)random_below(length + 1);
        shift(s, first, (int32_t)random_below(length - first + 1));
        break;
    }
    case 7: { // whole pages
        const int32_t first = (int32_t)random_below(length / size + 1) * size;
        shift(s, first, (int32_t)random_below((length - first) / size + 1) * size);
        break;
    }
    case 8: case 9: fork_to(s, (int32_t)random_below(w.d.n_seqs)); break;
    case 10: {
        snapshot *shot = &shots[random_below(n_shots)];
        free(shot->bytes);
        *shot = save(s);
        break;
    }
    default: {
        const snapshot *shot = &shots[random_below(n_shots)];
        if (shot->bytes) restore(s, shot);
        break;
    }
    }
}

// After the first calls have brought everything into being, nothing is allocated.
static void script(rocq_ctx *ctx, const rocq_kv_desc *d, int32_t n_calls) {
    static snapshot shots[3];
    rocq_stats before, after;
    memset(shots, 0, sizeof shots);
    world_open(ctx, d);
    check_all_sequences();
    assert_int_equal(rocq_get_stats(ctx, &before), ROCQ_OK);
    for (int32_t i = 0; i < n_calls; i++) {
        random_call(shots, 3);
        check_all_sequences();
    }
    assert_int_equal(rocq_get_stats(ctx, &after), ROCQ_OK);
    assert_int_equal(after.n_allocs, before.n_allocs);
    for (int32_t s = 0; s < d->n_seqs; s++) {
        check_attention(s % LAYERS, s, 1);
        if (s + 2 <= d->n_seqs) check_attention(s % LAYERS, s, 2);
    }
    for (int32_t i = 0; i < 3; i++) free(shots[i].bytes);
    for (int32_t s = 0; s < d->n_seqs; s++) truncate_to(s, 0);
    check_all_sequences();
    world_close();
}

static const rocq_format formats[] = {ROCQ_F32, ROCQ_F16, ROCQ_BF16, ROCQ_Q8_0, ROCQ_Q4_0};

static void test_scripts(void **state) {
    static const int32_t page_sizes[] = {0, 4, 0, 1, 7, 16, 64};
    (void)state;
    rocq_ctx *ctx = open_ctx();
    random_state = 4;
    // ops grow their scratch once: attention's is not the cache's
    assert_int_equal(rocq_reserve(ctx, 4 << 20), ROCQ_OK);
    for (int32_t i = 0; i < 14; i++) {
        rocq_kv_desc d = small_desc(formats[i % 5], formats[i / 2 % 5], page_sizes[i % 7]);
        rocq_tensor factors;
        float values[MOST_DIM / 2];
        rocq_buffer memory;
        const int64_t n_factors = 16;
        d.head_dim = i % 3 ? 32 : 64;
        d.no_hadamard = i % 3 == 1;
        if (d.page_size && i % 4) d.n_pages = 90 / d.page_size + 1; // half of what would be enough
        d.rope.pairing = i % 2 ? ROCQ_ROPE_NEOX : ROCQ_ROPE_NORM;
        d.rope.n_dims = i % 3 ? 0 : 32;
        d.rope.attn_factor = i % 4 == 1 ? 1.25f : 0;
        if (i % 4 >= 2) {
            d.rope.ext_factor = 1;
            d.rope.freq_scale = 0.25f;
            d.rope.n_ctx_orig = 64;
        }
        for (int32_t k = 0; k < n_factors; k++) values[k] = 1.5f + (float)k;
        assert_int_equal(rocq_buffer_alloc(ctx, &memory, 64), ROCQ_OK);
        assert_int_equal(rocq_tensor_init(&factors, &memory, 0, ROCQ_F32, 1, &n_factors), ROCQ_OK);
        assert_int_equal(rocq_upload(ctx, &factors, values, 64), ROCQ_OK);
        if (i % 5 == 3) d.rope.freq_factors = &factors;
        script(ctx, &d, KV_SCRIPT);
        assert_int_equal(rocq_buffer_free(ctx, &memory), ROCQ_OK);
    }
    rocq_close(&ctx);
}

// -- the two layouts and what they are for --

static void test_sharing(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx();
    rocq_kv_stats stats;
    rocq_kv_desc d = small_desc(ROCQ_F16, ROCQ_F16, 8);
    d.n_pages = 6;
    world_open(ctx, &d);
    random_state = 5;
    assert_int_equal(append(0, 12), ROCQ_OK);
    for (int32_t s = 1; s < SEQS; s++) fork_to(0, s); // two pages for four sequences
    check_all_sequences();
    assert_int_equal(rocq_kv_get_stats(w.kv, &stats), ROCQ_OK);
    assert_int_equal(stats.n_free_pages, 4);
    assert_int_equal(stats.n_shared_pages, 2);
    assert_int_equal(stats.n_positions, 48);
    assert_int_equal(stats.n_page_copies, 0);
    assert_int_equal(append(1, 1), ROCQ_OK); // into a shared page
    assert_int_equal(append(2, 1), ROCQ_OK);
    assert_int_equal(append(3, 1), ROCQ_OK);
    assert_int_equal(append(0, 1), ROCQ_OK); // the last to have the old one keeps it
    check_all_sequences();
    assert_int_equal(rocq_kv_get_stats(w.kv, &stats), ROCQ_OK);
    assert_int_equal(stats.n_page_copies, 3);
    assert_int_equal(stats.n_free_pages, 1);
    assert_int_equal(stats.n_shared_pages, 1);

    // Exhaustion: the sequence stays as it was, and what others give back helps.
    assert_int_equal(append(0, 4), ROCQ_OK);  // takes the last
    assert_int_equal(append(1, 4), ROCQ_E_MEMORY);
    assert_true(strlen(rocq_error(ctx)) > 10);
    assert_int_equal(shift(1, 3, 1), ROCQ_E_MEMORY); // would write to the shared first page
    snapshot shot = save(2); // of two pages, and one is all that sequence 2 can give back
    assert_int_equal(restore(2, &shot), ROCQ_E_MEMORY);
    free(shot.bytes);
    check_all_sequences();
    truncate_to(3, 8);
    assert_int_equal(append(1, 4), ROCQ_OK);
    check_all_sequences();

    // Whole pages: values stay where they are, and no page is needed.
    int32_t table[CTX];
    memcpy(table, w.table[0], sizeof table);
    assert_int_equal(shift(0, 0, 8), ROCQ_OK);
    check_all_sequences();
    assert_int_equal(w.table[0][0], table[1]);
    assert_int_equal(w.table[0][1], table[2]);
    world_close();
    rocq_close(&ctx);
}

// A sequence goes from each layout into each, and bounds are those of the cache it comes to.
static void test_between_layouts(void **state) {
    static const int32_t page_sizes[] = {0, 4, 7};
    (void)state;
    rocq_ctx *ctx = open_ctx();
    random_state = 6;
    for (int32_t from = 0; from < 3; from++) {
        for (int32_t to = 0; to < 3; to++) {
            const rocq_kv_desc d = small_desc(ROCQ_Q8_0, ROCQ_F16, page_sizes[from]);
            rocq_kv_desc other = small_desc(ROCQ_Q8_0, ROCQ_F16, page_sizes[to]);
            world_open(ctx, &d);
            append(1, 11);
            append(1, 3);
            append(2, 5);
            truncate_to(2, 0);
            append(1, 9);
            snapshot shot = save(1), empty = save(3);
            world_close();
            world_open(ctx, &other);
            append(0, 2);
            assert_int_equal(restore(2, &shot), ROCQ_OK);
            assert_int_equal(restore(0, &empty), ROCQ_OK);
            check_all_sequences();
            assert_int_equal(append(2, 3), ROCQ_OK);
            check_all_sequences();
            world_close();
            other.n_ctx = 22;
            world_open(ctx, &other);
            assert_int_equal(rocq_kv_restore(w.kv, 0, shot.bytes, shot.size), ROCQ_E_BOUNDS);
            check_all_sequences();
            world_close();
            free(shot.bytes);
            free(empty.bytes);
        }
    }
    rocq_close(&ctx);
}

static void must_not_restore(const void *bytes, int64_t size, rocq_result want) {
    const rocq_result result = rocq_kv_restore(w.kv, 1, bytes, size);
    if (want != ROCQ_OK) assert_int_equal(result, want);
    assert_true(result == ROCQ_E_CORRUPT || result == ROCQ_E_TRUNCATED || result == ROCQ_E_SHAPE ||
                result == ROCQ_E_FOREIGN || result == ROCQ_E_BOUNDS || result == ROCQ_E_MAGIC);
    assert_int_equal(rocq_kv_length(w.kv, 1), w.seq[1].length);
}

static void test_hostile_snapshots(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx();
    const rocq_kv_desc d = small_desc(ROCQ_Q4_0, ROCQ_Q8_0, 4);
    rocq__kv_header h;
    world_open(ctx, &d);
    random_state = 7;
    append(0, 5);
    append(1, 6);
    snapshot shot = save(0);
    for (int64_t size = 0; size < shot.size; size++) { // in memory of just that size
        unsigned char *cut = (unsigned char *)malloc((size_t)size + (size == 0));
        assert_non_null(cut);
        memcpy(cut, shot.bytes, (size_t)size);
        must_not_restore(cut, size, ROCQ_E_TRUNCATED);
        free(cut);
    }
    for (int64_t i = 0; i < shot.size; i++) {
        const unsigned char old = shot.bytes[i];
        shot.bytes[i] = (unsigned char)(old ^ 1 << random_below(8));
        must_not_restore(shot.bytes, shot.size, i < 8 ? ROCQ_E_MAGIC : ROCQ_OK);
        shot.bytes[i] = old;
    }
    unsigned char *longer = (unsigned char *)calloc((size_t)shot.size + 8, 1);
    assert_non_null(longer);
    memcpy(longer, shot.bytes, (size_t)shot.size);
    must_not_restore(longer, shot.size + 8, ROCQ_E_CORRUPT);
    free(longer);
    // Headers whose checksum is right for what they say.
    memcpy(&h, shot.bytes, sizeof h);
    static const int32_t lengths[] = {-1, INT32_MIN, INT32_MAX, CTX + 1, CTX, 6, 4, 0};
    static const rocq_result wants[] = {ROCQ_E_BOUNDS, ROCQ_E_BOUNDS, ROCQ_E_BOUNDS, ROCQ_E_BOUNDS,
                                        ROCQ_E_TRUNCATED, ROCQ_E_TRUNCATED, ROCQ_E_CORRUPT,
                                        ROCQ_E_CORRUPT};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        rocq__kv_header bad = h;
        bad.length = lengths[i];
        bad.checksum = 0;
        bad.checksum = rocq__kv_checksum(&bad, shot.bytes, shot.size);
        memcpy(shot.bytes, &bad, sizeof bad);
        must_not_restore(shot.bytes, shot.size, wants[i]);
    }
    memcpy(shot.bytes, &h, sizeof h);
    check_all_sequences();
    assert_int_equal(restore(1, &shot), ROCQ_OK);
    check_all_sequences();
    world_close();
    // Another cache of the same number of bytes.
    rocq_kv_desc other = d;
    other.k_format = ROCQ_Q8_0;
    other.v_format = ROCQ_Q4_0;
    world_open(ctx, &other);
    must_not_restore(shot.bytes, shot.size, ROCQ_E_SHAPE);
    world_close();
    other = d;
    other.no_hadamard = true;
    world_open(ctx, &other);
    must_not_restore(shot.bytes, shot.size, ROCQ_E_SHAPE);
    world_close();
    free(shot.bytes);
    rocq_close(&ctx);
}

// -- steps: recorded once, over tables that move on --

static void test_recorded_step(void **state) {
    static const int32_t page_sizes[] = {0, 4};
    (void)state;
    rocq_ctx *ctx = open_ctx();
    random_state = 8;
    for (int32_t i = 0; i < 2; i++) {
        const rocq_kv_desc d = small_desc(ROCQ_F16, ROCQ_Q8_0, page_sizes[i]);
        const int64_t ne[4] = {32, 2 * HEADS, 1, 2};
        rocq_tensor q, out;
        rocq_kv_view view;
        rocq_graph *graph = NULL;
        float values[32 * 2 * HEADS * 2], got[2][32 * 2 * HEADS * 2];
        world_open(ctx, &d);
        assert_int_equal(rocq_tensor_init(&q, &w.inputs, K_AT, ROCQ_F32, 4, ne), ROCQ_OK);
        assert_int_equal(rocq_tensor_init(&out, &w.inputs, OUT_AT, ROCQ_F32, 4, ne), ROCQ_OK);
        assert_int_equal(rocq_kv_layer(w.kv, 1, 1, 2, &view), ROCQ_OK);
        const rocq_attention_params p = {
            .out = &out, .q = &q, .k = &view.k, .v = &view.v, .kv_len = &view.kv_len,
            .page_table = view.page_table.n_dims ? &view.page_table : NULL,
            .page_size = view.page_size, .causal = true};
        assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
        assert_int_equal(rocq_attention(ctx, &p), ROCQ_OK);
        // nothing that would run beside the recorded ops
        int64_t needed;
        rocq_kv *kv = w.kv;
        assert_int_equal(rocq_kv_append(kv, 0, 1, NULL), ROCQ_E_STATE);
        assert_int_equal(rocq_kv_flush(kv), ROCQ_E_STATE);
        assert_int_equal(rocq_kv_shift(kv, 0, 0, 0), ROCQ_E_STATE);
        assert_int_equal(rocq_kv_fork(kv, 0, 1), ROCQ_E_STATE);
        assert_int_equal(rocq_kv_save(kv, 0, NULL, 0, &needed), ROCQ_E_STATE);
        assert_int_equal(rocq_kv_restore(kv, 0, &needed, 8), ROCQ_E_STATE);
        assert_int_equal(rocq_kv_create(ctx, &kv, &d), ROCQ_E_STATE);
        assert_null(kv);
        assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);
        for (int32_t step = 0; step < 6; step++) {
            append(1, 3);
            append(2, 1 + step);
            if (step == 3) fork_to(1, 2);
            if (step == 4) shift(1, 2, 5);
            check_all_sequences();
            const size_t n_values = sizeof values / sizeof values[0];
            for (size_t e = 0; e < n_values; e++) values[e] = random_normal();
            for (int32_t way = 0; way < 2; way++) {
                assert_int_equal(rocq_upload(ctx, &q, values, (int64_t)sizeof values), ROCQ_OK);
                assert_int_equal(way ? rocq_graph_launch(ctx, graph) : rocq_attention(ctx, &p),
                                 ROCQ_OK);
                download(got[way], &out);
            }
            assert_memory_equal(got[0], got[1], sizeof got[0]);
        }
        rocq_graph_destroy(ctx, &graph);
        world_close();
    }
    rocq_close(&ctx);
}

// -- what cannot be --

static void test_bad_descs(void **state) {
    (void)state;
    rocq_ctx *ctx = open_ctx();
    const rocq_kv_desc good = small_desc(ROCQ_Q8_0, ROCQ_F16, 0);
    static const struct {
        rocq_result want;
        size_t field;
        int32_t value;
    } cases[] = {
        {ROCQ_E_ARGUMENT, offsetof(rocq_kv_desc, n_layers), 0},
        {ROCQ_E_ARGUMENT, offsetof(rocq_kv_desc, n_layers), -1},
        {ROCQ_E_ARGUMENT, offsetof(rocq_kv_desc, n_kv_heads), 0},
        {ROCQ_E_ARGUMENT, offsetof(rocq_kv_desc, head_dim), 0},
        {ROCQ_E_ARGUMENT, offsetof(rocq_kv_desc, n_seqs), -1},
        {ROCQ_E_ARGUMENT, offsetof(rocq_kv_desc, n_ctx), 0},
        {ROCQ_E_ARGUMENT, offsetof(rocq_kv_desc, page_size), -1},
        {ROCQ_E_ARGUMENT, offsetof(rocq_kv_desc, n_pages), -1},
        {ROCQ_E_ARGUMENT, offsetof(rocq_kv_desc, n_pages), 5}, // of what size?
        {ROCQ_E_FORMAT, offsetof(rocq_kv_desc, k_format), ROCQ_Q4_K},
        {ROCQ_E_FORMAT, offsetof(rocq_kv_desc, v_format), ROCQ_I32},
        {ROCQ_E_FORMAT, offsetof(rocq_kv_desc, v_format), 12345},
        {ROCQ_E_SHAPE, offsetof(rocq_kv_desc, head_dim), 40},
        {ROCQ_E_OVERFLOW, offsetof(rocq_kv_desc, n_ctx), INT32_MAX},
        {ROCQ_E_OVERFLOW, offsetof(rocq_kv_desc, n_layers), INT32_MAX}};
    int64_t bytes = -1;
    rocq_kv *kv = (rocq_kv *)&bytes;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        rocq_kv_desc bad = good;
        memcpy((char *)&bad + cases[i].field, &cases[i].value, sizeof cases[i].value);
        assert_int_equal(rocq_kv_size(&bad, &bytes), cases[i].want);
        assert_int_equal(bytes, -1);
        ctx->error[0] = '\0';
        assert_int_equal(rocq_kv_create(ctx, &kv, &bad), cases[i].want);
        assert_true(strlen(rocq_error(ctx)) > 10);
        assert_null(kv);
    }
    rocq_kv_desc bad = good;
    bad.page_size = INT32_MAX;
    assert_int_equal(rocq_kv_size(&bad, &bytes), ROCQ_E_OVERFLOW);
    bad.n_pages = INT32_MAX;
    assert_int_equal(rocq_kv_size(&bad, &bytes), ROCQ_E_OVERFLOW);
    bad = good;
    bad.n_seqs = bad.n_ctx = INT32_MAX;
    bad.page_size = 1;
    assert_int_equal(rocq_kv_size(&bad, &bytes), ROCQ_E_OVERFLOW);
    const int64_t factors_ne[1] = {good.head_dim / 2}, wrong_ne[1] = {good.head_dim / 2 + 1};
    rocq_buffer buffer;
    rocq_tensor factors, wrong;
    assert_int_equal(rocq_buffer_alloc(ctx, &buffer, 4096), ROCQ_OK);
    assert_int_equal(rocq_tensor_init(&factors, &buffer, 0, ROCQ_F32, 1, factors_ne), ROCQ_OK);
    const struct {
        rocq_result want;
        rocq_rope_config rope;
        size_t field; // of freq_factors, whose value is -1; or 0
    } turns[] = {
        {ROCQ_E_SHAPE, {.n_dims = 33}, 0},
        {ROCQ_E_SHAPE, {.n_dims = good.head_dim + 2}, 0},
        {ROCQ_E_ARGUMENT, {.pairing = (rocq_rope_pairing)7}, 0},
        {ROCQ_E_ARGUMENT, {.freq_base = -1.0f}, 0},
        {ROCQ_E_ARGUMENT, {.freq_scale = NAN}, 0},
        {ROCQ_E_ARGUMENT, {.beta_fast = INFINITY}, 0},
        {ROCQ_E_ARGUMENT, {.ext_factor = 1.0f}, 0}, // n_ctx_orig
        // what YaRN multiplies by is negative
        {ROCQ_E_ARGUMENT, {.ext_factor = 1.0f, .n_ctx_orig = 64, .freq_scale = 1e30f}, 0},
        {ROCQ_E_SHAPE, {.freq_factors = &wrong}, offsetof(rocq_tensor, stride)},
        {ROCQ_E_FORMAT, {.freq_factors = &wrong}, offsetof(rocq_tensor, format)},
        {ROCQ_E_BOUNDS, {.freq_factors = &wrong}, offsetof(rocq_tensor, offset)},
        {ROCQ_OK, {.freq_factors = &factors}, 0}};
    for (size_t i = 0; i < sizeof turns / sizeof turns[0]; i++) {
        bad = good;
        bad.rope = turns[i].rope;
        wrong = factors;
        if (turns[i].field) memset((char *)&wrong + turns[i].field, 0xff, 4);
        bytes = -1;
        assert_int_equal(rocq_kv_size(&bad, &bytes), turns[i].want);
        assert_int_equal(bytes >= 0, turns[i].want == ROCQ_OK);
        ctx->error[0] = '\0';
        assert_int_equal(rocq_kv_create(ctx, &kv, &bad), turns[i].want);
        assert_int_equal(strlen(rocq_error(ctx)) > 10, turns[i].want != ROCQ_OK);
        if (turns[i].want == ROCQ_OK) assert_int_equal(kv->memory.size, bytes);
        rocq_kv_destroy(&kv);
    }
    bad = good;
    bad.rope.freq_factors = &wrong;
    assert_int_equal(rocq_tensor_init(&wrong, &buffer, 0, ROCQ_F32, 1, wrong_ne), ROCQ_OK);
    assert_int_equal(rocq_kv_size(&bad, &bytes), ROCQ_E_SHAPE);
    assert_int_equal(rocq_kv_create(ctx, &kv, &bad), ROCQ_E_SHAPE);
    const int64_t rows_ne[2] = {good.head_dim / 2, 2};
    assert_int_equal(rocq_tensor_init(&wrong, &buffer, 0, ROCQ_F32, 2, rows_ne), ROCQ_OK);
    assert_int_equal(rocq_kv_size(&bad, &bytes), ROCQ_E_SHAPE);
    assert_int_equal(rocq_kv_create(ctx, &kv, &bad), ROCQ_E_SHAPE);
    assert_non_null(strstr(rocq_error(ctx), "kv: freq_factors"));
    assert_int_equal(rocq_buffer_free(ctx, &buffer), ROCQ_OK);
    assert_int_equal(rocq_kv_create(ctx, &kv, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_kv_create(ctx, NULL, &good), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_kv_create(NULL, &kv, &good), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_kv_size(NULL, &bytes), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_kv_size(&good, NULL), ROCQ_E_ARGUMENT);
    assert_null(kv);
    rocq_kv_destroy(&kv);
    rocq_kv_destroy(NULL);
    rocq_close(&ctx);
}

static void test_bad_arguments(void **state) {
    static const int32_t page_sizes[] = {0, 4};
    (void)state;
    rocq_ctx *ctx = open_ctx();
    random_state = 9;
    for (int32_t i = 0; i < 2; i++) {
        const rocq_kv_desc d = small_desc(ROCQ_F16, ROCQ_Q4_0, page_sizes[i]);
        rocq_kv_view view;
        rocq_kv_stats stats;
        int64_t size = 77;
        char few[64];
        memset(&view, 0x5a, sizeof view);
        const rocq_kv_view untouched = view;
        world_open(ctx, &d);
        append(1, 10);
        rocq_kv *kv = w.kv;
#define BAD(want, call)                                        \
    do {                                                       \
        ctx->error[0] = '\0';                                  \
        assert_int_equal(call, want);                          \
        assert_true(strlen(rocq_error(ctx)) > 10);             \
    } while (0)
        BAD(ROCQ_E_ARGUMENT, rocq_kv_layer(kv, -1, 0, 1, &view));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_layer(kv, LAYERS, 0, 1, &view));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_layer(kv, 0, -1, 1, &view));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_layer(kv, 0, SEQS, 1, &view));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_layer(kv, 0, 1, SEQS, &view));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_layer(kv, 0, 0, 0, &view));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_layer(kv, 0, 0, INT32_MAX, &view));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_layer(kv, 0, 0, 1, NULL));
        assert_memory_equal(&view, &untouched, sizeof view);
        BAD(ROCQ_E_ARGUMENT, rocq_kv_append(kv, SEQS, 1, NULL));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_append(kv, -1, 1, NULL));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_append(kv, 1, -1, NULL));
        BAD(ROCQ_E_BOUNDS, rocq_kv_append(kv, 1, CTX - 9, NULL));
        BAD(ROCQ_E_BOUNDS, rocq_kv_append(kv, 1, INT32_MAX, NULL));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_truncate(kv, SEQS, 0));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_truncate(kv, 1, -1));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_truncate(kv, 1, 11));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_shift(kv, -1, 0, 0));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_shift(kv, 1, -1, 1));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_shift(kv, 1, 0, 11));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_shift(kv, 1, 11, 0));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_shift(kv, 1, 10, INT32_MAX));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_shift(kv, 1, 3, -1));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_fork(kv, SEQS, 0));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_fork(kv, 1, SEQS));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_fork(kv, 1, -1));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_save(kv, 9, NULL, 0, &size));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_save(kv, 1, NULL, 0, NULL));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_save(kv, 1, few, (int64_t)sizeof few, &size));
        assert_int_equal(size, 77);
        BAD(ROCQ_E_ARGUMENT, rocq_kv_restore(kv, SEQS, few, 64));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_restore(kv, 1, NULL, 64));
        BAD(ROCQ_E_TRUNCATED, rocq_kv_restore(kv, 1, few, -1));
        BAD(ROCQ_E_ARGUMENT, rocq_kv_get_stats(kv, NULL));
        assert_int_equal(rocq_kv_length(kv, SEQS), -1);
        assert_int_equal(rocq_kv_length(kv, -1), -1);
        assert_int_equal(rocq_kv_length(NULL, 0), -1);
        assert_int_equal(rocq_kv_layer(NULL, 0, 0, 1, &view), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_kv_append(NULL, 0, 1, NULL), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_kv_flush(NULL), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_kv_truncate(NULL, 0, 0), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_kv_shift(NULL, 0, 0, 0), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_kv_fork(NULL, 0, 0), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_kv_save(NULL, 0, NULL, 0, &size), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_kv_restore(NULL, 0, few, 64), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_kv_get_stats(NULL, &stats), ROCQ_E_ARGUMENT);
        // Cancelled: nothing has begun. What is only bookkeeping goes on.
        rocq_cancel(ctx);
        BAD(ROCQ_E_CANCELLED, rocq_kv_append(kv, 1, 1, NULL));
        BAD(ROCQ_E_CANCELLED, rocq_kv_shift(kv, 1, 0, 1));
        BAD(ROCQ_E_CANCELLED, rocq_kv_fork(kv, 1, 2));
        BAD(ROCQ_E_CANCELLED, rocq_kv_restore(kv, 1, few, 64));
        truncate_to(1, 9);
        assert_int_equal(rocq_sync(ctx), ROCQ_OK);
        check_all_sequences();
#undef BAD
        world_close();
    }
    rocq_close(&ctx);
}

// -- cancelling --

#ifdef ROCQ_SIMT_HIP_H
// On a GPU rocq_cancel comes when the stand-in reads the clock, as it does for each mark of a
// profile: before and behind each op.
static double cancelling_clock(void) {
    static double ms;
    if (n_runs++ == cancel_at) rocq_cancel(to_cancel);
    return ms += 0.001;
}

static void open_to_cancel(void) {
    const rocq_profile_desc profile = {.cost = 1};
    (void)cancelling_tasks; // which a CPU context takes
    simt_set_work(SIMT_AT_ONCE);
    simt_set_clock(cancelling_clock);
    to_cancel = open_ctx();
    assert_int_equal(rocq_profile_start(to_cancel, &profile), ROCQ_OK);
}

static void close_to_cancel(void) {
    rocq_close(&to_cancel);
    simt_set_clock(NULL);
    simt_set_work(SIMT_LATE);
}
#else
static void open_to_cancel(void) {
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 2,
                            .run_tasks = cancelling_tasks};
    assert_int_equal(rocq_open(&to_cancel, &desc), ROCQ_OK);
}

static void close_to_cancel(void) { rocq_close(&to_cancel); }
#endif

// What a call makes of sequence 0, as rocq_kv_save has it; cancelled at the run `at` of tasks, or
// the mark, that comes in it.
static unsigned char *moved_rows(int call, int32_t page_size, int64_t at, int64_t *size) {
    enum { LENGTH = 80 };
    const bool small = KV_BACKEND == ROCQ_BACKEND_GPU; // else rows enough to be shared out
    const rocq_kv_desc d = {.n_layers = small ? 1 : 4, .n_kv_heads = small ? 2 : 8,
                            .head_dim = small ? 32 : 128, .n_seqs = 2, .n_ctx = 96,
                            .page_size = page_size};
    rocq_kv *kv;
    int64_t other_size;
    cancel_at = -1;
    open_to_cancel();
    assert_int_equal(rocq_kv_create(to_cancel, &kv, &d), ROCQ_OK);
    for (int i = 0; i < 2; i++) {
        const rocq_tensor *cache = i == 0 ? &kv->k : &kv->v;
        const int64_t bytes = rocq_tensor_size(cache);
        float *numbers = (float *)malloc((size_t)bytes);
        assert_non_null(numbers);
        for (int64_t j = 0; j < bytes / 4; j++) numbers[j] = (float)(j % 9973 + i);
        assert_int_equal(rocq_upload(to_cancel, cache, numbers, bytes), ROCQ_OK);
        free(numbers);
        assert_int_equal(rocq_kv_append(kv, i, LENGTH - i, NULL), ROCQ_OK);
    }
    assert_int_equal(rocq_kv_save(kv, 1, NULL, 0, &other_size), ROCQ_OK);
    unsigned char *other = (unsigned char *)malloc((size_t)other_size);
    assert_non_null(other);
    assert_int_equal(rocq_kv_save(kv, 1, other, other_size, NULL), ROCQ_OK);
    if (call == 0) assert_int_equal(rocq_kv_fork(kv, 0, 1), ROCQ_OK); // shares a page to append to
    n_runs = 0;
    cancel_at = at;
    const rocq_result result = call == 0   ? rocq_kv_append(kv, 0, 3, NULL)
                               : call == 1 ? rocq_kv_shift(kv, 0, 32, 32)
                               : call == 2 ? rocq_kv_shift(kv, 0, 5, 7)
                               : call == 3 ? rocq_kv_fork(kv, 1, 0)
                                           : rocq_kv_restore(kv, 0, other, other_size);
    const int64_t n = n_runs;
    if (result != ROCQ_OK) fail_msg("%s", rocq_error(to_cancel));
    assert_int_equal(rocq_sync(to_cancel), ROCQ_OK);
    assert_int_equal(rocq_kv_save(kv, 0, NULL, 0, size), ROCQ_OK);
    unsigned char *rows = (unsigned char *)malloc((size_t)*size);
    assert_non_null(rows);
    n_runs = 0;
    assert_int_equal(rocq_kv_save(kv, 0, rows, *size, NULL), ROCQ_OK); // cancelled, too
    assert_int_equal(rocq_sync(to_cancel), ROCQ_OK);
    n_runs = n;
    free(other);
    rocq_kv_destroy(&kv);
    close_to_cancel();
    return rows;
}

// A cancellation that comes while a call moves rows does not stop it: halfway there would be
// neither what was there before nor what was asked for.
static void test_cancelled_moves(void **state) {
    (void)state;
    int64_t size, most = 0, n;
    for (int32_t page_size = 0; page_size <= 32; page_size += 32) {
        for (int call = 0; call < 5; call++) {
            unsigned char *want = moved_rows(call, page_size, -1, &size);
            n = n_runs;
            most = n > most ? n : most;
            for (int64_t at = 0; at < n; at++) {
                int64_t got_size;
                unsigned char *got = moved_rows(call, page_size, at, &got_size);
                assert_int_equal(got_size, size);
                assert_memory_equal(got, want, (size_t)size);
                free(got);
            }
            free(want);
        }
    }
    assert_true(most > 3); // rows are enough to be shared out
}

// -- memory --

typedef struct host_count {
    int64_t blocks, fail_at; // counts down; negative = never
    size_t refused;          // bytes of the block that failed
} host_count;

static void *counted_alloc(size_t size, void *user) {
    host_count *count = (host_count *)user;
    if (count->fail_at >= 0 && count->fail_at-- == 0) {
        count->refused = size;
        return NULL;
    }
    void *ptr = malloc(size);
    if (ptr) count->blocks++;
    return ptr;
}

static void counted_free(void *ptr, size_t size, void *user) {
    (void)size;
    ((host_count *)user)->blocks--;
    free(ptr);
}

// A context shorter than the stage would be takes no more than it can hold.
static void test_tiny_size(void **state) {
    (void)state;
    rocq_kv_desc d = small_desc(ROCQ_F16, ROCQ_F16, 0);
    d.n_ctx = 4;
    const int64_t elems = (int64_t)d.head_dim * d.n_layers * d.n_kv_heads; // of a position
    const int64_t rows = (d.n_seqs * 4 * elems * 2 + 255) / 256 * 256; // K, V alike
    const int64_t stage = (4 * elems * 4 + 255) / 256 * 256;
    int64_t bytes;
    assert_int_equal(rocq_kv_size(&d, &bytes), ROCQ_OK);
    assert_int_equal(bytes, 2 * rows + stage + 4 * (d.n_seqs + 4)); // lengths, turns
}

static void test_memory(void **state) {
    (void)state;
    host_count host = {0, -1, 0};
    const rocq_desc desc = {.prefer = KV_BACKEND, .n_threads = 1, .memory_budget = 1 << 20,
                            .allocator = {counted_alloc, counted_free, &host}};
    rocq_ctx *ctx = NULL;
    assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
    for (int32_t page_size = 0; page_size < 8; page_size += 7) {
        rocq_kv_desc d = small_desc(ROCQ_F16, ROCQ_Q8_0, page_size);
        rocq_stats before, after;
        rocq_kv *kv = NULL;
        int64_t bytes, n_failed = 0;
        assert_int_equal(rocq_kv_size(&d, &bytes), ROCQ_OK);
        for (int64_t fail_at = 0;; fail_at++) {
            const int64_t blocks = host.blocks;
            host.fail_at = fail_at;
            const rocq_result result = rocq_kv_create(ctx, &kv, &d);
            if (result == ROCQ_OK) break;
            assert_int_equal(result, ROCQ_E_MEMORY);
            assert_null(kv);
            if (fail_at == 0) { // the message names the bytes that were asked for
                long long named = 0;
                assert_int_equal(sscanf(rocq_error(ctx), "kv_create: no memory for %lld", &named),
                                 1);
                assert_int_equal(named + 64 + (long long)sizeof(rocq__block), host.refused);
            }
            assert_in_range(host.blocks - blocks, 0, 1); // scratch that was reserved stays
            n_failed++;
        }
        host.fail_at = -1;
        assert_in_range(n_failed, 2, 4);
        rocq_kv_destroy(&kv);
        const int64_t blocks = host.blocks;
        assert_int_equal(rocq_get_stats(ctx, &before), ROCQ_OK);
        assert_int_equal(rocq_kv_create(ctx, &kv, &d), ROCQ_OK);
        assert_int_equal(rocq_get_stats(ctx, &after), ROCQ_OK);
        assert_in_range(after.live_bytes - before.live_bytes, bytes, bytes + 4096);
        rocq_kv_destroy(&kv);
        assert_int_equal(host.blocks, blocks);
        assert_int_equal(rocq_get_stats(ctx, &after), ROCQ_OK);
        assert_int_equal(after.live_bytes, before.live_bytes);
        d.n_ctx = 1 << 20;
        d.page_size = page_size ? 1 << 16 : 0;
        assert_int_equal(rocq_kv_create(ctx, &kv, &d), ROCQ_E_BUDGET);
        assert_null(kv);
        assert_int_equal(host.blocks, blocks);
    }
    rocq_close(&ctx);
    assert_int_equal(host.blocks, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scripts),          cmocka_unit_test(test_sharing),
        cmocka_unit_test(test_between_layouts),  cmocka_unit_test(test_hostile_snapshots),
        cmocka_unit_test(test_recorded_step),    cmocka_unit_test(test_bad_descs),
        cmocka_unit_test(test_bad_arguments),    cmocka_unit_test(test_memory),
        cmocka_unit_test(test_tiny_size),        cmocka_unit_test(test_cancelled_moves),
    };
    return cmocka_run_group_tests(tests, NULL, KV_TEARDOWN);
}
