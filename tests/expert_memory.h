// expert_memory.h - mixtures whose experts do not fit llama_options.expert_memory: the same bits as
// with all of them on the device, whatever is kept, and statistics that add up. For programs that
// have included cmocka.h, rocq.h, llama.h and models.h.

enum { EXPERT_PROMPT = 33, EXPERT_STEPS = 7, EXPERT_TOKENS = EXPERT_PROMPT + EXPERT_STEPS };

// Logits of a prompt in two batches, then of single tokens, from an empty cache.
static void expert_run(llama_model *m, float *logits) {
    int32_t tokens[EXPERT_TOKENS];
    for (int i = 0; i < EXPERT_TOKENS; i++) tokens[i] = 3 + i * 37 % (m->n_vocab - 4);
    m->n_past = 0;
    if (llama_eval(m, tokens, EXPERT_PROMPT, logits) != ROCQ_OK) fail_msg("%s", m->error);
    for (int i = EXPERT_PROMPT; i < EXPERT_TOKENS; i++) {
        if (llama_eval(m, &tokens[i], 1, NULL) != ROCQ_OK) fail_msg("%s", m->error);
        assert_int_equal(rocq_download(m->ctx, logits + (int64_t)i * m->n_vocab, &m->last,
                                       rocq_tensor_size(&m->last)), ROCQ_OK);
    }
}

static void expert_open(llama_model *m, rocq_ctx *ctx, const rocq_gguf *file, int64_t memory) {
    const llama_options options = {.n_ctx = 64, .n_batch = 20, .n_logits = 20,
                                   .expert_memory = memory};
    if (llama_open(m, ctx, file, &options) != ROCQ_OK) fail_msg("%s", m->error);
}

// Returns the share of hits in the second of two runs; 1 where nothing is counted.
static double expert_check(rocq_ctx *ctx, const rocq_gguf *file, int64_t memory,
                           const float *want) {
    llama_model m;
    llama_expert_stats all = {0, 0, 0, 0, 0, 0}, first = all;
    rocq_stats before, after;
    expert_open(&m, ctx, file, memory);
    const size_t size = EXPERT_TOKENS * (size_t)m.n_vocab * sizeof(float);
    float *logits = (float *)malloc(size);
    assert_non_null(logits);
    assert_true(m.slots.size <= (memory > 0 ? memory : 0));
    for (int run = 0; run < 2; run++) {
        int64_t n_kept = 0, n_hits = 0, n_layers = 0;
        if (run == 1) first = all;
        memset(logits, 0xff, size);
        assert_int_equal(rocq_get_stats(ctx, &before), ROCQ_OK);
        expert_run(&m, logits);
        assert_int_equal(rocq_get_stats(ctx, &after), ROCQ_OK);
        assert_int_equal(after.n_allocs, before.n_allocs);
        assert_memory_equal(logits, want, size);
        assert_int_equal(llama_get_expert_stats(&m, -1, &all), ROCQ_OK);
        for (int32_t i = 0; i < m.n_layers; i++) {
            llama_expert_stats own = {0, 0, 0, 0, 0, 0};
            assert_int_equal(llama_get_expert_stats(&m, i, &own), ROCQ_OK);
            n_layers += own.n_experts > 0;
            n_kept += own.n_kept;
            n_hits += own.n_hits;
            assert_true(own.n_hits <= own.n_uses && own.n_kept <= own.n_experts);
        }
        assert_true(n_kept == all.n_kept && n_hits == all.n_hits);
        assert_int_equal(all.n_experts, n_layers * m.n_experts);
        assert_int_equal(all.bytes, m.expert_bytes);
        if (memory < m.expert_bytes) {
            assert_int_equal(all.n_uses, (run + 1) * EXPERT_TOKENS * n_layers * m.n_used);
            assert_true(all.kept_bytes <= (memory > 0 ? memory : 0) && all.n_kept < all.n_experts);
        } else {
            assert_true(all.n_kept == all.n_experts && all.kept_bytes == all.bytes);
        }
    }
    assert_int_equal(llama_get_expert_stats(&m, m.n_layers, &all), ROCQ_E_ARGUMENT);
    assert_int_equal(llama_get_expert_stats(&m, -2, &all), ROCQ_E_ARGUMENT);
    assert_int_equal(llama_get_expert_stats(&m, -1, NULL), ROCQ_E_ARGUMENT);
    const int64_t uses = all.n_uses - first.n_uses, hits = all.n_hits - first.n_hits;
    llama_close(&m);
    free(logits);
    return uses > 0 ? (double)hits / (double)uses : 1;
}

// brief: with two budgets of six.
static void check_expert_memory(rocq_ctx *ctx, const char *path, bool brief) {
    const rocq_gguf_desc source = {.path = path};
    rocq_gguf *file = NULL;
    llama_model m;
    assert_int_equal(rocq_gguf_open(ctx, &file, &source), ROCQ_OK);
    expert_open(&m, ctx, file, 0);
    const int64_t bytes = m.expert_bytes;
    const double share = (double)m.n_used / (double)m.n_experts;
    float *want = (float *)malloc(EXPERT_TOKENS * (size_t)m.n_vocab * sizeof(float));
    assert_non_null(want);
    expert_run(&m, want);
    llama_close(&m);
    // None, less than one, about half of them and all but one, then all.
    assert_true(expert_check(ctx, file, -1, want) == 0);
    // Kept are those used most: where a router chooses, more than a share that knows nothing.
    const double half = expert_check(ctx, file, bytes / 2, want);
    assert_true(half > (share < 1 ? 0.4 : 0.2));
    if (!brief) {
        const double most = expert_check(ctx, file, bytes - 1, want);
        assert_true(most > half && most < 1);
        assert_true(expert_check(ctx, file, 1, want) == 0);
        assert_true(expert_check(ctx, file, bytes, want) == 1);
        assert_true(expert_check(ctx, file, INT64_MAX, want) == 1);
    }
    free(want);
    rocq_gguf_close(&file);
}
