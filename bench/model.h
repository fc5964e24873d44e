// model.h - llama shapes with random weights, as GGUF files; needs bench.h.

#ifndef MODEL_H
#define MODEL_H

typedef struct model_shape {
    const char *name; // NULL: the shipped model
    int32_t d, ff, heads, kv_heads, layers, vocab;
    rocq_format low, high; // high: v and down of some layers, as in a Q4_K_M mix, and the output
    bool tied;             // the embedding is the output, in high; all else is in low
} model_shape;

typedef struct model_writer {
    rocq_gguf_writer *w;
    bool adding;       // first pass: names and shapes; second: bytes
    rocq_format format; // of what rows holds, which serves as long as the shape stays
    int64_t k, m;
    char *rows;
    bool failed;
} model_writer;

// Rows repeat after 32, in an order that differs from tensor to tensor.
BENCH_FN void model_put(model_writer *w, rocq_format format, int64_t k, int64_t m,
                        const char *name) {
    const int64_t ne[2] = {k, m}, some = m < 32 ? m : 32;
    int64_t row = 0;
    if (w->adding) {
        w->failed |= rocq_gguf_writer_add_tensor(w->w, name, format, m == 1 ? 1 : 2, ne) != ROCQ_OK;
        return;
    }
    if (rocq_row_size(format, k, &row) != ROCQ_OK) bench__die("a row is no whole number of blocks");
    if (w->format != format || w->k != k || w->m != m || !w->rows) {
        uint64_t state = (uint64_t)k;
        float *values = (float *)bench_alloc(some * k * (int64_t)sizeof *values);
        for (int64_t i = 0; i < some * k; i++)
            values[i] = m == 1 ? 1 : bench_normal(&state) / sqrtf((float)k);
        free(w->rows);
        w->rows = (char *)bench_alloc(row * m);
        w->failed |= rocq_quantize(format, w->rows, values, some, k, NULL) != ROCQ_OK;
        for (int64_t r = some; r < m; r++)
            memcpy(w->rows + r * row, w->rows + (r * 7 + r / 32) % some * row, (size_t)row);
        w->format = format, w->k = k, w->m = m;
        free(values);
    }
    w->failed |= rocq_gguf_writer_write(w->w, w->rows, row * m) != ROCQ_OK;
}

BENCH_FN bool write_model(bench *b, const model_shape *s, int32_t n_ctx, const char *path) {
    const rocq_gguf_writer_desc desc = {.path = path};
    const int64_t d = s->d, kv = (int64_t)s->kv_heads * (s->d / s->heads);
    char name[64];
    model_writer w = {.adding = true};
    if (rocq_gguf_writer_open(b->ctx, &w.w, &desc) != ROCQ_OK) return false;
    rocq_gguf_writer_set_str(w.w, "general.architecture", "llama");
    rocq_gguf_writer_set_str(w.w, "tokenizer.ggml.model", "no_vocab");
    rocq_gguf_writer_set_u32(w.w, "llama.vocab_size", (uint32_t)s->vocab);
    rocq_gguf_writer_set_u32(w.w, "llama.embedding_length", (uint32_t)s->d);
    rocq_gguf_writer_set_u32(w.w, "llama.block_count", (uint32_t)s->layers);
    rocq_gguf_writer_set_u32(w.w, "llama.feed_forward_length", (uint32_t)s->ff);
    rocq_gguf_writer_set_u32(w.w, "llama.context_length", (uint32_t)n_ctx);
    rocq_gguf_writer_set_u32(w.w, "llama.attention.head_count", (uint32_t)s->heads);
    rocq_gguf_writer_set_u32(w.w, "llama.attention.head_count_kv", (uint32_t)s->kv_heads);
    rocq_gguf_writer_set_f32(w.w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    for (int pass = 0; pass < 2 && !w.failed; pass++) {
        w.adding = pass == 0;
        model_put(&w, s->tied ? s->high : s->low, d, s->vocab, "token_embd.weight");
        model_put(&w, ROCQ_F32, d, 1, "output_norm.weight");
        if (!s->tied) model_put(&w, s->high, d, s->vocab, "output.weight");
        for (int32_t l = 0; l < s->layers && !w.failed; l++) {
            const bool high = !s->tied && (l < s->layers / 8 || l >= 7 * s->layers / 8 ||
                                           (l - s->layers / 8) % 3 == 2);
            const struct { const char *name; rocq_format format; int64_t k, m; } parts[] = {
                {"attn_norm", ROCQ_F32, d, 1}, {"ffn_norm", ROCQ_F32, d, 1},
                {"attn_q", s->low, d, d}, {"attn_output", s->low, d, d},
                {"attn_k", s->low, d, kv}, {"attn_v", high ? s->high : s->low, d, kv},
                {"ffn_gate", s->low, d, s->ff}, {"ffn_up", s->low, d, s->ff},
                {"ffn_down", high ? s->high : s->low, s->ff, d},
            };
            for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
                snprintf(name, sizeof name, "blk.%d.%s.weight", (int)l, parts[i].name);
                model_put(&w, parts[i].format, parts[i].k, parts[i].m, name);
            }
        }
    }
    free(w.rows);
    return rocq_gguf_writer_close(&w.w) == ROCQ_OK && !w.failed;
}

// The model of a program that measures one: "--model FILE", or a llama shape, written to path.
typedef struct model_choice {
    const char *name, *given; // given: the file, or NULL
    const model_shape *shape;
    char path[512];
} model_choice;

// Takes --model out of the arguments, before bench_open, which does not know it: its file, or NULL.
BENCH_FN const char *model_option(int *argc, char **argv) {
    const char *given = NULL;
    for (int i = 1; i + 1 < *argc; i++) {
        if (strcmp(argv[i], "--model") != 0) continue;
        given = argv[i + 1];
        for (int k = i; k + 2 < *argc; k++) argv[k] = argv[k + 2];
        *argc -= 2;
    }
    return given;
}

BENCH_FN model_choice model_choose(const bench *b, const char *given, const char *program) {
    static const model_shape large = {"1.1B-Q4_K", 2048,  5632,      32,        4,
                                      22,          32000, ROCQ_Q4_K, ROCQ_Q6_K, false};
    static const model_shape tiny = {"tiny", 128, 256, 4, 2, 2, 320, ROCQ_Q4_0, ROCQ_Q8_0, false};
    const char *dir = getenv("TMPDIR"), *slash = given ? strrchr(given, '/') : NULL;
    model_choice c;
    memset(&c, 0, sizeof c);
    c.given = given;
    c.shape = b->tiny ? &tiny : &large;
    c.name = slash ? slash + 1 : given ? given : c.shape->name;
    snprintf(c.path, sizeof c.path, "%s/rocq-%s-%d.gguf", dir && *dir ? dir : "/tmp", program,
             (int)getpid());
    return c;
}

#endif
