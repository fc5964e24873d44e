// kv.c - the KV cache: what it holds and wastes as sequences grow, come and go, in both layouts;
// what its calls cost; and attention over pages beside attention over one piece.
//
// kv/memory/FORMAT/LAYOUT/N      bytes that a sequence of N positions keeps from others, a layer
// kv/mixed/LAYOUT/...            64 sequences of mixed lengths, each followed by another at its end
// kv/CALL/LAYOUT                 times of calls: append of one position, flush after it; fork, save
//                                and restore of a whole sequence; page_copy: the first write to a
//                                shared page; shift: half of a sequence dropped, 3/8 moved up
// kv/decode/FORMAT/LAYOUT/kvN    attention of one token over all layers
// LAYOUT is contiguous or the positions of a page.

#include "bench.h"

enum { HEADS = 32, KV_HEADS = 8, DIM = 128, TABLE = 256 }; // TABLE: tokens whose k and v repeat

static const int32_t pages[] = {0, 16, 64, 256};
enum { N_LAYOUTS = 4 };

static const char *layout_of(int32_t page_size) {
    static const char *const names[N_LAYOUTS] = {"contiguous", "page16", "page64", "page256"};
    for (int i = 0; i < N_LAYOUTS; i++) {
        if (pages[i] == page_size) return names[i];
    }
    return "?";
}

// -- memory: bookkeeping alone, over caches of one small layer --

static rocq_kv *small_cache(bench *b, rocq_format format, int32_t n_seqs, int32_t n_ctx,
                            int32_t page_size) {
    const rocq_kv_desc desc = {.n_layers = 1, .n_kv_heads = KV_HEADS, .head_dim = DIM,
                               .k_format = format, .v_format = format, .n_seqs = n_seqs,
                               .n_ctx = n_ctx, .page_size = page_size};
    rocq_kv *kv = NULL;
    if (rocq_kv_create(b->ctx, &kv, &desc) != ROCQ_OK) bench__die(rocq_error(b->ctx));
    return kv;
}

static rocq_kv_stats stats_of(const rocq_kv *kv) {
    rocq_kv_stats stats;
    if (rocq_kv_get_stats(kv, &stats) != ROCQ_OK) bench__die("no statistics");
    return stats;
}

// Of the room that sequences with positions hold: used_bytes / (1 - internal).
static double held_bytes(const rocq_kv_stats *stats) {
    return (double)stats->used_bytes / (1 - stats->internal);
}

static void growth(bench *b, rocq_format format, int32_t page_size) {
    const int32_t n_ctx = b->tiny ? 256 : 8192;
    const char *name = rocq_format_name(format);
    char label[96];
    snprintf(label, sizeof label, "kv/memory/%s/%s/", name, layout_of(page_size));
    if (!bench_wants(b, label)) return;
    rocq_kv *kv = small_cache(b, format, 1, n_ctx, page_size);
    int64_t row = 0;
    rocq_row_size(format, DIM, &row);
    for (int32_t n = 1; n <= n_ctx; n *= 2) {
        const rocq_result result = rocq_kv_append(kv, 0, n - rocq_kv_length(kv, 0), NULL);
        const rocq_kv_stats stats = stats_of(kv);
        const int32_t room = page_size ? (n + page_size - 1) / page_size * page_size : n_ctx;
        const double want = (double)(2 * KV_HEADS * row) * room, held = held_bytes(&stats);
        snprintf(label, sizeof label, "kv/memory/%s/%s/%d", name, layout_of(page_size), (int)n);
        bench_value(b, label, held, "B", result == ROCQ_OK && fabs(held / want - 1) < 1e-9);
    }
    rocq_kv_destroy(&kv);
}

// Lengths of conversations: a few words to full contexts, median about 450.
static int32_t random_length(uint64_t *state, int32_t n_ctx) {
    const float length = expf(6.1f + 1.1f * bench_normal(state));
    return length < 8 ? 8 : length > (float)n_ctx ? n_ctx : (int32_t)length;
}

// In each round every sequence grows by a token; one that has reached its length makes place for a
// new one, whose prompt is half of it. Every fourth is forked from a neighbour, as answers drawn
// more than once are, and shares what that has.
static void mixed(bench *b, int32_t page_size) {
    enum { SEQS = 64 };
    const int32_t n_ctx = 4096, rounds = b->tiny ? 200 : 4000, first = rounds / 2;
    int32_t goal[SEQS];
    double internal = 0, used = 0, held = 0, most = 0, positions = 0;
    uint64_t state = 1;
    char label[96];
    bool ok = true;
    snprintf(label, sizeof label, "kv/mixed/%s/", layout_of(page_size));
    if (!bench_wants(b, label)) return;
    rocq_kv *kv = small_cache(b, ROCQ_Q4_0, SEQS, n_ctx, page_size);
    memset(goal, 0, sizeof goal);
    for (int32_t round = 0; round < rounds && ok; round++) {
        for (int32_t s = 0; s < SEQS && ok; s++) {
            if (rocq_kv_length(kv, s) < goal[s]) {
                ok = rocq_kv_append(kv, s, 1, NULL) == ROCQ_OK;
                continue;
            }
            const int32_t from = (s + 1) % SEQS;
            goal[s] = random_length(&state, n_ctx);
            ok = rocq_kv_truncate(kv, s, 0) == ROCQ_OK;
            if (bench_random(&state) % 4 == 0 && rocq_kv_length(kv, from) <= goal[s]) {
                ok = ok && rocq_kv_fork(kv, from, s) == ROCQ_OK;
            } else {
                ok = ok && rocq_kv_append(kv, s, goal[s] / 2, NULL) == ROCQ_OK;
            }
        }
        if (round < first) continue;
        const rocq_kv_stats stats = stats_of(kv);
        const double holds = held_bytes(&stats);
        internal += stats.internal;
        used += (double)stats.used_bytes;
        held += holds;
        positions += (double)stats.n_positions;
        if (holds > most) most = holds;
    }
    const double n = rounds - first;
    const struct {
        const char *name, *unit;
        double value;
    } values[] = {{"positions", "positions", positions / n},    {"used", "B", used / n},
                  {"held", "B", held / n},                      {"held_most", "B", most},
                  {"reserved", "B", (double)stats_of(kv).reserved_bytes},
                  {"internal_fragmentation", "ratio", internal / n}};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        snprintf(label, sizeof label, "kv/mixed/%s/%s", layout_of(page_size), values[i].name);
        bench_value(b, label, values[i].value, values[i].unit, ok);
    }
    rocq_kv_destroy(&kv);
}

// -- a model's cache --

typedef struct cache {
    bench *b;
    rocq_kv *kv;
    int32_t n_layers, n_ctx, page_size, length;
    rocq_rope_config rope;
    rocq_buffer memory;
    rocq_tensor k, v, pos, cell; // [DIM, KV_HEADS, TABLE], I32 [TABLE]
    rocq_tensor q, out;          // [DIM, HEADS]
    float *want, *got;           // out
    unsigned char *shot[2];
    int64_t shot_size;
    int32_t first, n;            // what a shift drops
    rocq_graph *graph;
} cache;

// Appends the tokens from number token on: their keys and values are those of number % TABLE.
static rocq_result fill(cache *c, int32_t seq, int32_t token, int32_t n) {
    int32_t cells[TABLE], pos[TABLE];
    for (int32_t done = 0, m; done < n; done += m) {
        const int32_t at = (token + done) % TABLE;
        m = n - done < TABLE - at ? n - done : TABLE - at;
        for (int32_t i = 0; i < m; i++) pos[i] = rocq_kv_length(c->kv, seq) + i;
        const rocq_tensor k = rocq_tensor_slice(&c->k, 2, at, m);
        const rocq_tensor v = rocq_tensor_slice(&c->v, 2, at, m);
        const rocq_tensor p = rocq_tensor_slice(&c->pos, 0, 0, m);
        const rocq_tensor cell = rocq_tensor_slice(&c->cell, 0, 0, m);
        rocq_result result = rocq_kv_append(c->kv, seq, m, cells);
        if (result == ROCQ_OK) result = rocq_upload(c->b->ctx, &p, pos, 4 * m);
        if (result == ROCQ_OK) result = rocq_upload(c->b->ctx, &cell, cells, 4 * m);
        for (int32_t layer = 0; layer < c->n_layers && result == ROCQ_OK; layer++) {
            rocq_kv_view view;
            result = rocq_kv_layer(c->kv, layer, seq, 1, &view);
            const rocq_rope_append_params params = {
                .k = &k, .v = &v, .k_cache = &view.k_cache, .v_cache = &view.v_cache, .pos = &p,
                .cell = &cell, .rope = c->rope};
            if (result == ROCQ_OK) result = rocq_rope_append(c->b->ctx, &params);
        }
        if (result != ROCQ_OK) return result;
    }
    return rocq_kv_flush(c->kv);
}

static rocq_result attend(cache *c, int32_t layer) {
    rocq_kv_view view;
    const rocq_result result = rocq_kv_layer(c->kv, layer, 0, 1, &view);
    const rocq_attention_params params = {
        .out = &c->out, .q = &c->q, .k = &view.k, .v = &view.v, .kv_len = &view.kv_len,
        .page_table = c->page_size ? &view.page_table : NULL, .page_size = view.page_size,
        .causal = true};
    return result == ROCQ_OK ? rocq_attention(c->b->ctx, &params) : result;
}

// Attention over the last layer of sequence 0, to memory of the host.
static rocq_result look(cache *c, float *out) {
    rocq_result result = rocq_kv_flush(c->kv);
    if (result == ROCQ_OK) result = attend(c, c->n_layers - 1);
    if (result != ROCQ_OK) return result;
    return rocq_download(c->b->ctx, out, &c->out, rocq_tensor_size(&c->out));
}

static void cache_free(cache *c) {
    rocq_graph_destroy(c->b->ctx, &c->graph);
    rocq_kv_destroy(&c->kv);
    rocq_buffer_free(c->b->ctx, &c->memory);
    for (int i = 0; i < 2; i++) free(c->shot[i]);
    free(c->want);
    free(c->got);
}

// A cache with length positions in sequence 0, whose pages do not follow each other: sequence 1
// takes every second one while both grow, and is then emptied.
static rocq_result cache_make(cache *c, bench *b, rocq_format format, int32_t page_size,
                              int32_t length) {
    rocq_arena arena;
    uint64_t state = 1;
    rocq_result result = ROCQ_OK;
    memset(c, 0, sizeof *c);
    c->b = b;
    c->n_layers = b->tiny ? 2 : b->gpu ? 32 : 4;
    c->n_ctx = length + 1;
    c->page_size = page_size;
    c->length = length;
    c->first = length / 8;
    c->n = length / 2;
    const rocq_kv_desc desc = {.n_layers = c->n_layers, .n_kv_heads = KV_HEADS, .head_dim = DIM,
                               .k_format = format, .v_format = format, .n_seqs = 2,
                               .n_ctx = c->n_ctx, .page_size = page_size, .rope = c->rope};
    for (int pass = 0; pass < 2 && result == ROCQ_OK; pass++) { // measured, then cut
        if (pass == 1) result = rocq_buffer_alloc(b->ctx, &c->memory, arena.peak);
        rocq_arena_init(&arena, pass == 1 ? &c->memory : NULL);
        if (result == ROCQ_OK)
            result = rocq_tensor_3d(&arena, &c->k, ROCQ_F32, DIM, KV_HEADS, TABLE);
        if (result == ROCQ_OK)
            result = rocq_tensor_3d(&arena, &c->v, ROCQ_F32, DIM, KV_HEADS, TABLE);
        if (result == ROCQ_OK) result = rocq_tensor_1d(&arena, &c->pos, ROCQ_I32, TABLE);
        if (result == ROCQ_OK) result = rocq_tensor_1d(&arena, &c->cell, ROCQ_I32, TABLE);
        if (result == ROCQ_OK) result = rocq_tensor_2d(&arena, &c->q, ROCQ_F32, DIM, HEADS);
        if (result == ROCQ_OK) result = rocq_tensor_2d(&arena, &c->out, ROCQ_F32, DIM, HEADS);
    }
    c->want = (float *)bench_alloc(DIM * HEADS * (int64_t)sizeof(float));
    c->got = (float *)bench_alloc(DIM * HEADS * (int64_t)sizeof(float));
    float *rows = (float *)bench_alloc(DIM * KV_HEADS * TABLE * (int64_t)sizeof(float));
    rocq_tensor *random[3] = {&c->k, &c->v, &c->q};
    for (int i = 0; i < 3 && result == ROCQ_OK; i++) {
        for (int64_t e = 0; e < rocq_tensor_count(random[i]); e++) rows[e] = bench_normal(&state);
        result = rocq_upload(b->ctx, random[i], rows, rocq_tensor_size(random[i]));
    }
    free(rows);
    if (result == ROCQ_OK) result = rocq_kv_create(b->ctx, &c->kv, &desc);
    const int32_t step = page_size ? page_size : length;
    for (int32_t at = 0; at < length && result == ROCQ_OK; at += step) {
        const int32_t n = length - at < step ? length - at : step;
        result = fill(c, 0, at, n);
        if (result == ROCQ_OK && at + n < length) result = rocq_kv_append(c->kv, 1, n, NULL);
    }
    if (result == ROCQ_OK) result = rocq_kv_truncate(c->kv, 1, 0);
    if (result == ROCQ_OK) result = look(c, c->want);
    if (result == ROCQ_OK) result = rocq_kv_save(c->kv, 0, NULL, 0, &c->shot_size);
    if (result != ROCQ_OK) return result;
    for (int i = 0; i < 2; i++) c->shot[i] = (unsigned char *)bench_alloc(c->shot_size);
    return rocq_kv_save(c->kv, 0, c->shot[0], c->shot_size, NULL);
}

static bool is_wanted(cache *c) { // attention sees what it saw at first
    memset(c->got, 0xff, DIM * HEADS * sizeof(float));
    return look(c, c->got) == ROCQ_OK && bench_nmse(c->got, c->want, DIM * HEADS) <= 1e-6;
}

// -- calls --

static rocq_result run_append(void *user) { // a sequence, token by token
    cache *c = (cache *)user;
    int32_t cell = 0;
    rocq_result result = rocq_kv_truncate(c->kv, 1, 0);
    for (int32_t i = 0; i < c->length && result == ROCQ_OK; i++) {
        result = rocq_kv_append(c->kv, 1, 1, &cell);
    }
    return result;
}

static bool verify_append(void *user) {
    cache *c = (cache *)user;
    return rocq_kv_length(c->kv, 1) == c->length && is_wanted(c);
}

static rocq_result run_flush(void *user) { // after an append, as before every step
    cache *c = (cache *)user;
    rocq_result result = ROCQ_OK;
    for (int i = 0; i < 16 && result == ROCQ_OK; i++) {
        result = rocq_kv_truncate(c->kv, 0, c->length - 1);
        if (result == ROCQ_OK) result = rocq_kv_append(c->kv, 0, 1, NULL);
        if (result == ROCQ_OK) result = rocq_kv_flush(c->kv);
    }
    return result;
}

static bool verify_same(void *user) { return is_wanted((cache *)user); }

static rocq_result run_fork(void *user) {
    return rocq_kv_fork(((cache *)user)->kv, 0, 1);
}

// The copy is as good as what it is of: it comes back in its place.
static bool verify_fork(void *user) {
    cache *c = (cache *)user;
    return rocq_kv_truncate(c->kv, 0, 0) == ROCQ_OK && rocq_kv_fork(c->kv, 1, 0) == ROCQ_OK &&
        is_wanted(c);
}

static void empty_other(void *user) {
    if (rocq_kv_truncate(((cache *)user)->kv, 1, 0) != ROCQ_OK) bench__die("truncate");
}

static rocq_result run_page_copy(void *user) { // the first write to a page that is shared
    return rocq_kv_append(((cache *)user)->kv, 1, 1, NULL);
}

// Of a page that is shared, the first half: what a write behind it copies.
static int32_t half_page(const cache *c) {
    return (c->page_size < c->length ? c->page_size : c->length) / 2;
}

static void share(void *user) {
    cache *c = (cache *)user;
    if (rocq_kv_fork(c->kv, 0, 1) != ROCQ_OK ||
        rocq_kv_truncate(c->kv, 1, half_page(c)) != ROCQ_OK ||
        (c->b->gpu && rocq_sync(c->b->ctx) != ROCQ_OK)) bench__die("fork");
}

static rocq_result run_shift(void *user) {
    cache *c = (cache *)user;
    return rocq_kv_shift(c->kv, 0, c->first, c->n);
}

static void restore_all(void *user) {
    cache *c = (cache *)user;
    if (rocq_kv_restore(c->kv, 0, c->shot[0], c->shot_size) != ROCQ_OK ||
        (c->b->gpu && rocq_sync(c->b->ctx) != ROCQ_OK)) bench__die("restore");
}

// As if the dropped tokens had never been there; keys have one rounding more.
static bool verify_shift(void *user) {
    cache *c = (cache *)user;
    if (look(c, c->got) != ROCQ_OK || rocq_kv_truncate(c->kv, 0, 0) != ROCQ_OK ||
        fill(c, 0, 0, c->first) != ROCQ_OK ||
        fill(c, 0, c->first + c->n, c->length - c->first - c->n) != ROCQ_OK) return false;
    float *want = (float *)bench_alloc(DIM * HEADS * (int64_t)sizeof(float));
    const bool ok = look(c, want) == ROCQ_OK && bench_nmse(c->got, want, DIM * HEADS) <= 1e-5;
    free(want);
    return ok;
}

static rocq_result run_save(void *user) {
    cache *c = (cache *)user;
    return rocq_kv_save(c->kv, 0, c->shot[1], c->shot_size, NULL);
}

static bool verify_save(void *user) {
    cache *c = (cache *)user;
    return memcmp(c->shot[0], c->shot[1], (size_t)c->shot_size) == 0;
}

static rocq_result run_restore(void *user) {
    cache *c = (cache *)user;
    return rocq_kv_restore(c->kv, 0, c->shot[0], c->shot_size);
}

static void calls(bench *b, int32_t page_size) {
    const char *layout = layout_of(page_size);
    const int32_t length = b->tiny ? 96 : b->gpu ? 4096 : 2048;
    char label[96];
    cache c;
    bool wanted = false;
    static const char *const names[] = {"append", "flush", "fork", "page_copy", "shift", "save",
                                        "restore"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        snprintf(label, sizeof label, "kv/%s/%s", names[i], layout);
        wanted |= bench_wants(b, label);
    }
    if (!wanted) return;
    if (cache_make(&c, b, ROCQ_F16, page_size, length) != ROCQ_OK) {
        bench_fail(b, layout, rocq_error(b->ctx));
        cache_free(&c);
        return;
    }
    const double bytes = 2.0 * DIM * KV_HEADS * c.n_layers * 2, all = bytes * length; // F16
    const double tail = bytes * (length - c.first - c.n);
    const bool whole = page_size && c.first % page_size == 0 && c.n % page_size == 0;
    const bench_case cases[] = {
        {.name = "append", .run = run_append, .verify = verify_append, .user = &c, .inner = length},
        {.name = "flush", .run = run_flush, .verify = verify_same, .user = &c, .inner = 16},
        {.name = "fork", .bytes = page_size ? 0 : 2 * all, .run = run_fork, .reset = empty_other,
         .verify = verify_fork, .user = &c},
        {.name = "page_copy", .bytes = 2 * bytes * half_page(&c), .run = run_page_copy,
         .reset = share, .verify = verify_same, .user = &c},
        {.name = "shift", .bytes = whole ? tail : 2 * tail, .run = run_shift, .reset = restore_all,
         .verify = verify_shift, .user = &c},
        {.name = "save", .bytes = all, .run = run_save, .reset = restore_all, .verify = verify_save,
         .user = &c},
        {.name = "restore", .bytes = all, .run = run_restore, .verify = verify_same, .user = &c},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        bench_case one = cases[i];
        snprintf(label, sizeof label, "kv/%s/%s", cases[i].name, layout);
        one.name = label;
        if (!page_size && one.run == run_page_copy) continue;
        if (bench_wants(b, label)) bench_run(b, &one);
        empty_other(&c);
    }
    cache_free(&c);
}

// -- attention --

static rocq_result run_decode(void *user) {
    cache *c = (cache *)user;
    rocq_result result = ROCQ_OK;
    if (c->graph) return rocq_graph_launch(c->b->ctx, c->graph);
    for (int32_t i = 0; i < c->n_layers && result == ROCQ_OK; i++) result = attend(c, i);
    return result;
}

static bool verify_decode(void *user) { // all layers hold the same
    cache *c = (cache *)user;
    memset(c->got, 0xff, DIM * HEADS * sizeof(float));
    return rocq_download(c->b->ctx, c->got, &c->out, rocq_tensor_size(&c->out)) == ROCQ_OK &&
        bench_nmse(c->got, c->want, DIM * HEADS) <= 1e-6;
}

static void decode(bench *b, rocq_format format, int32_t length) {
    cache c[N_LAYOUTS];
    char names[N_LAYOUTS][96];
    bench_case cases[N_LAYOUTS];
    bool wanted = false, ok = true;
    int64_t row = 0;
    memset(c, 0, sizeof c);
    memset(cases, 0, sizeof cases);
    rocq_row_size(format, DIM, &row);
    for (int i = 0; i < N_LAYOUTS; i++) {
        snprintf(names[i], sizeof names[i], "kv/decode/%s/%s/kv%d",
                 rocq_format_name(format), layout_of(pages[i]), (int)length);
        wanted |= bench_wants(b, names[i]);
        c[i].b = b;
    }
    if (!wanted) return;
    for (int i = 0; i < N_LAYOUTS && ok; i++) {
        ok = cache_make(&c[i], b, format, pages[i], length) == ROCQ_OK;
        // they see the same, in whatever cells it is
        if (ok) memcpy(c[i].want, c[0].want, DIM * HEADS * sizeof(float));
        if (ok && b->gpu) {
            ok = rocq_graph_begin(b->ctx) == ROCQ_OK && run_decode(&c[i]) == ROCQ_OK;
            ok = rocq_graph_end(b->ctx, &c[i].graph) == ROCQ_OK && ok;
        }
        cases[i].name = names[i];
        cases[i].bytes = 2.0 * KV_HEADS * (double)row * length * c[i].n_layers;
        cases[i].flops = 4.0 * DIM * HEADS * (double)length * c[i].n_layers;
        cases[i].run = run_decode;
        cases[i].verify = verify_decode;
        cases[i].user = &c[i];
    }
    if (ok) bench_run_pair(b, cases, N_LAYOUTS);
    else bench_fail(b, names[0], rocq_error(b->ctx));
    for (int i = 0; i < N_LAYOUTS; i++) cache_free(&c[i]);
}

int main(int argc, char **argv) {
    static const rocq_format formats[] = {ROCQ_F16, ROCQ_Q8_0, ROCQ_Q4_0};
    bench b;
    if (!bench_open(&b, argc, argv, "kv")) return 1;
    for (int f = 0; f < 3; f++) {
        for (int i = 0; i < N_LAYOUTS; i++) growth(&b, formats[f], pages[i]);
    }
    for (int i = 0; i < N_LAYOUTS; i++) mixed(&b, pages[i]);
    for (int i = 0; i < N_LAYOUTS; i++) calls(&b, pages[i]);
    for (int f = 0; f < 3; f++) decode(&b, formats[f], b.tiny ? 96 : 2048);
    if (b.gpu && !b.tiny) decode(&b, ROCQ_F16, 16384);
    return bench_close(&b);
}
