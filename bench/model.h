// model.h - shapes of models with random weights, as GGUF files: llama's, and mixtures of experts
// of llama (Mixtral), qwen3moe and gpt-oss; needs bench.h.

#ifndef MODEL_H
#define MODEL_H

typedef struct model_shape {
    const char *name; // NULL: the shipped model
    int32_t d, ff, heads, kv_heads, layers, vocab;
    rocq_format low, high; // high: v and down of some layers, as in a Q4_K_M mix, and the output
    bool tied;             // the embedding is the output, in high; all else is in low
    // Mixtures: ff is that of an expert.
    const char *arch;      // NULL: llama
    int32_t head, experts, used; // head 0: d / heads
    rocq_format of_experts;
} model_shape;

// That which most programs measure: TinyLlama's, or a tiny one.
BENCH_FN const model_shape *model_small(const bench *b) {
    static const model_shape large = {"1.1B-Q4_K", 2048, 5632, 32, 4, 22, 32000,
                                      .low = ROCQ_Q4_K, .high = ROCQ_Q6_K};
    static const model_shape tiny = {"tiny", 128, 256, 4, 2, 2, 320,
                                     .low = ROCQ_Q4_0, .high = ROCQ_Q8_0};
    return b->tiny ? &tiny : &large;
}

typedef struct model_writer {
    rocq_gguf_writer *w;
    bool adding;       // first pass: names and shapes; second: bytes
    rocq_format format; // of what rows holds, which serves as long as the shape stays
    int64_t k, m;
    char *rows;
    bool failed;
} model_writer;

// A vector [k], a matrix [k, m], or with experts [k, m, experts]. Rows repeat after 32, in an order
// that differs from expert to expert; but F32 rows, a router's, do not, so that no two experts tie.
BENCH_FN void model_put(model_writer *w, rocq_format format, int64_t k, int64_t m_one,
                        int64_t experts, const char *name) {
    const int64_t ne[3] = {k, m_one, experts}, m = m_one * (experts > 0 ? experts : 1);
    const int64_t some = m < 32 || format == ROCQ_F32 ? m : 32;
    int64_t row = 0;
    if (w->adding) {
        const int32_t n_dims = experts > 0 ? 3 : m == 1 ? 1 : 2;
        w->failed |= rocq_gguf_writer_add_tensor(w->w, name, format, n_dims, ne) != ROCQ_OK;
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

BENCH_FN void model_set(model_writer *w, const char *arch, const char *key, int32_t value) {
    char name[96];
    snprintf(name, sizeof name, "%s.%s", arch, key);
    rocq_gguf_writer_set_u32(w->w, name, (uint32_t)value);
}

BENCH_FN void model_numbers(model_writer *w, const model_shape *s, int32_t n_ctx) {
    const char *arch = s->arch ? s->arch : "llama";
    const int32_t head = s->head ? s->head : s->d / s->heads;
    const struct { const char *key; int32_t value; bool mixture; } numbers[] = {
        {"vocab_size", s->vocab, false}, {"embedding_length", s->d, false},
        {"block_count", s->layers, false}, {"feed_forward_length", s->ff, false},
        {"context_length", n_ctx, false}, {"attention.head_count", s->heads, false},
        {"attention.head_count_kv", s->kv_heads, false},
        {"attention.key_length", head, true}, {"attention.value_length", head, true},
        {"attention.sliding_window", 128, true}, // read for gpt-oss
        {"expert_count", s->experts, true}, {"expert_used_count", s->used, true},
        {"expert_feed_forward_length", s->ff, true},
    };
    char name[96];
    rocq_gguf_writer_set_str(w->w, "general.architecture", arch);
    rocq_gguf_writer_set_str(w->w, "tokenizer.ggml.model", "no_vocab");
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!numbers[i].mixture || s->experts > 0)
            model_set(w, arch, numbers[i].key, numbers[i].value);
    snprintf(name, sizeof name, "%s.attention.layer_norm_rms_epsilon", arch);
    rocq_gguf_writer_set_f32(w->w, name, 1e-5f);
}

// Tensors of a layer; those of no elements are left out.
BENCH_FN void model_layer(model_writer *w, const model_shape *s, int32_t layer) {
    const int64_t d = s->d, head = s->head ? s->head : s->d / s->heads, ff = s->ff;
    const int64_t q = s->heads * head, kv = s->kv_heads * head, e = s->experts;
    const int32_t from = s->layers / 8;
    const bool high = !s->tied && (layer < from || layer >= 7 * s->layers / 8 ||
                                   (layer - from) % 3 == 2);
    const bool gpt_oss = s->arch && strcmp(s->arch, "gpt-oss") == 0;
    const bool qwen3 = s->arch && strcmp(s->arch, "qwen3moe") == 0;
    const int64_t dense = e > 0 ? 0 : ff, mixed = e > 0 ? ff : 0, oss = gpt_oss ? 1 : 0;
    const rocq_format f32 = ROCQ_F32, low = s->low, to = high ? s->high : s->low;
    const struct { const char *name; rocq_format format; int64_t k, m, experts; } parts[] = {
        {"attn_norm.weight", f32, d, 1, 0},
        {gpt_oss ? "post_attention_norm.weight" : "ffn_norm.weight", f32, d, 1, 0},
        {"attn_q.weight", low, d, q, 0}, {"attn_output.weight", low, q, d, 0},
        {"attn_k.weight", low, d, kv, 0}, {"attn_v.weight", to, d, kv, 0},
        {"attn_q_norm.weight", f32, qwen3 ? head : 0, 1, 0},
        {"attn_k_norm.weight", f32, qwen3 ? head : 0, 1, 0},
        {"attn_q.bias", f32, q * oss, 1, 0}, {"attn_k.bias", f32, kv * oss, 1, 0},
        {"attn_v.bias", f32, kv * oss, 1, 0}, {"attn_output.bias", f32, d * oss, 1, 0},
        {"attn_sinks.weight", f32, s->heads * oss, 1, 0},
        {"ffn_gate.weight", low, d, dense, 0}, {"ffn_up.weight", low, d, dense, 0},
        {"ffn_down.weight", to, dense, d, 0},
        {"ffn_gate_inp.weight", f32, d, e, 0}, {"ffn_gate_inp.bias", f32, e * oss, 1, 0},
        {"ffn_gate_exps.weight", s->of_experts, d, mixed, e},
        {"ffn_up_exps.weight", s->of_experts, d, mixed, e},
        {"ffn_down_exps.weight", s->of_experts, mixed, d, e},
        {"ffn_gate_exps.bias", f32, ff * oss, e, 0}, {"ffn_up_exps.bias", f32, ff * oss, e, 0},
        {"ffn_down_exps.bias", f32, d * oss, e, 0},
    };
    char name[64];
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        snprintf(name, sizeof name, "blk.%d.%s", (int)layer, parts[i].name);
        if (parts[i].k > 0 && parts[i].m > 0)
            model_put(w, parts[i].format, parts[i].k, parts[i].m, parts[i].experts, name);
    }
}

BENCH_FN bool write_model(bench *b, const model_shape *s, int32_t n_ctx, const char *path) {
    const rocq_gguf_writer_desc desc = {.path = path};
    model_writer w = {.adding = true};
    if (rocq_gguf_writer_open(b->ctx, &w.w, &desc) != ROCQ_OK) return false;
    model_numbers(&w, s, n_ctx);
    for (int pass = 0; pass < 2 && !w.failed; pass++) {
        w.adding = pass == 0;
        model_put(&w, s->tied ? s->high : s->low, s->d, s->vocab, 0, "token_embd.weight");
        model_put(&w, ROCQ_F32, s->d, 1, 0, "output_norm.weight");
        if (!s->tied) model_put(&w, s->high, s->d, s->vocab, 0, "output.weight");
        for (int32_t l = 0; l < s->layers && !w.failed; l++) model_layer(&w, s, l);
    }
    free(w.rows);
    return rocq_gguf_writer_close(&w.w) == ROCQ_OK && !w.failed;
}

// An adapter (LoRA) for all matrices of a model but its embedding and its experts, with random
// numbers: A and B in F32, as they are trained.
BENCH_FN bool write_lora(bench *b, const rocq_gguf *of, int64_t rank, const char *path) {
    const rocq_gguf_writer_desc desc = {.path = path};
    rocq_gguf_writer *w = NULL;
    rocq_str arch = {NULL, 0};
    rocq_gguf_tensor t;
    char name[256];
    bool good = rocq_gguf_get_str(of, "general.architecture", &arch) == ROCQ_OK;
    if (!good || rocq_gguf_writer_open(b->ctx, &w, &desc) != ROCQ_OK) return false;
    snprintf(name, sizeof name, "%.*s", (int)arch.length, arch.data);
    rocq_gguf_writer_set_str(w, "general.architecture", name);
    rocq_gguf_writer_set_str(w, "general.type", "adapter");
    rocq_gguf_writer_set_str(w, "adapter.type", "lora");
    rocq_gguf_writer_set_f32(w, "adapter.lora.alpha", (float)rank);
    for (int pass = 0; pass < 2; pass++) { // names and shapes, then values
        uint64_t state = 1;
        for (int64_t i = 0; good && rocq_gguf_tensor_at(of, i, &t) == ROCQ_OK; i++) {
            if (t.n_dims != 2 || strncmp(t.name.data, "token_embd", 10) == 0) continue;
            for (int k = 0; k < 2; k++) {
                const int64_t ne[2] = {k ? rank : t.ne[0], k ? t.ne[1] : rank}, n = ne[0] * ne[1];
                snprintf(name, sizeof name, "%.*s.lora_%c", (int)t.name.length, t.name.data,
                         k ? 'b' : 'a');
                if (pass == 0) {
                    good &= rocq_gguf_writer_add_tensor(w, name, ROCQ_F32, 2, ne) == ROCQ_OK;
                    continue;
                }
                float *values = (float *)bench_alloc(n * (int64_t)sizeof *values);
                for (int64_t j = 0; j < n; j++)
                    values[j] = 0.1f * bench_normal(&state) / sqrtf((float)ne[0]);
                good &= rocq_gguf_writer_write(w, values, 4 * n) == ROCQ_OK;
                free(values);
            }
        }
    }
    return rocq_gguf_writer_close(&w) == ROCQ_OK && good;
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
    const char *dir = getenv("TMPDIR"), *slash = given ? strrchr(given, '/') : NULL;
    model_choice c;
    memset(&c, 0, sizeof c);
    c.given = given;
    c.shape = model_small(b);
    c.name = slash ? slash + 1 : given ? given : c.shape->name;
    snprintf(c.path, sizeof c.path, "%s/rocq-%s-%d.gguf", dir && *dir ? dir : "/tmp", program,
             (int)getpid());
    return c;
}

#endif
