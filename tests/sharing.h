// sharing.h - models with llama_options.share: each has the bits that it has by itself, whatever
// the others do between its calls and whoever is closed first, and takes no memory for weights. For
// programs that have included cmocka.h, rocq.h, llama.h and models.h.

enum { SHARERS = 3, SHARE_PROMPT = 23, SHARE_STEPS = 4, SHARE_TOKENS = SHARE_PROMPT + SHARE_STEPS };

typedef struct sharer {
    llama_model m;
    int32_t tokens[SHARE_TOKENS];
    float *logits, *want; // of all tokens
    int64_t bytes;        // that it takes by itself, weights included
    int64_t steps;        // tokens done in slices
} sharer;

// Each has another n_ctx, on which some families' rope depends. share NULL: by itself.
static void sharer_open(sharer *s, int i, rocq_ctx *ctx, const rocq_gguf *file, int64_t memory,
                        const llama_model *share) {
    const int32_t n_batch = 9 + 7 * i;
    const llama_options options = {
        .n_ctx = i == 1 ? 30 : 64, .n_batch = n_batch, .n_logits = n_batch,
        .kv_format = i == 2 ? "f32" : "f16", .kv_page = i == 2 ? 8 : 0,
        .expert_memory = memory == 0 ? 0 : i == 2 ? -1 : i == 1 && share ? 0 : memory,
        .share = share};
    if (llama_open(&s->m, ctx, file, &options) != ROCQ_OK) fail_msg("%s", s->m.error);
}

static void sharer_last(sharer *s) { // the logits of its newest token
    float *to = s->logits + (int64_t)(s->m.n_past - 1) * s->m.n_vocab;
    const rocq_result r = rocq_download(s->m.ctx, to, &s->m.last, rocq_tensor_size(&s->m.last));
    assert_int_equal(r, ROCQ_OK);
}

// All n by turns: each its prompt from an empty cache, then each a token, in slices, if that is asked
// for and a step is recorded.
static void sharers_run(sharer *s, int n, bool slices) {
    const size_t n_vocab = (size_t)s[0].m.n_vocab;
    for (int i = 0; i < n; i++) {
        memset(s[i].logits, 0xff, SHARE_TOKENS * n_vocab * sizeof(float));
        s[i].m.n_past = 0;
        s[i].steps = 0;
        if (llama_eval(&s[i].m, s[i].tokens, SHARE_PROMPT, s[i].logits) != ROCQ_OK) {
            fail_msg("%s", s[i].m.error);
        }
    }
    for (bool more = true; more;) {
        more = false;
        for (int i = 0; i < n; i++) {
            llama_model *m = &s[i].m;
            const int32_t *next = s[i].tokens + SHARE_PROMPT;
            const int32_t had = m->n_past;
            if (had == SHARE_TOKENS) continue;
            const rocq_result r = slices && m->step
                                      ? llama_eval_for(m, next, had - SHARE_PROMPT + 1, 0,
                                                       &s[i].steps)
                                      : llama_eval(m, next + had - SHARE_PROMPT, 1, NULL);
            if (r != ROCQ_OK) fail_msg("%s", m->error);
            if (m->n_past > had) sharer_last(&s[i]);
            assert_int_equal(rocq_sync(m->ctx), ROCQ_OK); // only then a stand-in for a GPU runs it
            more = true;
        }
    }
}

static void sharers_check(const sharer *s, int n) {
    const size_t size = SHARE_TOKENS * (size_t)s[0].m.n_vocab * sizeof(float);
    for (int i = 0; i < n; i++) assert_memory_equal(s[i].logits, s[i].want, size);
}

static int64_t live_bytes(rocq_ctx *ctx) { // without what ops share anyway
    rocq_stats stats;
    assert_int_equal(rocq_get_stats(ctx, &stats), ROCQ_OK);
    return stats.live_bytes - stats.scratch_bytes;
}

// memory: of experts, 0 = all.
static void check_sharing(rocq_ctx *ctx, const char *path, int64_t memory) {
    const rocq_gguf_desc source = {.path = path};
    rocq_gguf *file = NULL;
    sharer s[SHARERS];
    memset(s, 0, sizeof s);
    assert_int_equal(rocq_gguf_open(ctx, &file, &source), ROCQ_OK);
    for (int i = 0; i < SHARERS; i++) {
        const int64_t had = live_bytes(ctx);
        sharer_open(&s[i], i, ctx, file, memory, NULL);
        s[i].bytes = live_bytes(ctx) - had;
        const size_t count = SHARE_TOKENS * (size_t)s[i].m.n_vocab;
        s[i].logits = (float *)malloc(2 * count * sizeof(float));
        assert_non_null(s[i].logits);
        s[i].want = s[i].logits + count;
        for (int k = 0; k < SHARE_TOKENS; k++) {
            s[i].tokens[k] = 3 + (k * (37 + i) + 5 * i) % (s[i].m.n_vocab - 4);
        }
        sharers_run(&s[i], 1, false);
        memcpy(s[i].want, s[i].logits, count * sizeof(float));
        llama_close(&s[i].m);
    }
    const int64_t before = live_bytes(ctx); // with what a GPU's copies go through
    for (int order = 0; order < 2; order++) { // who loaded is closed first, then last
        for (int i = 0; i < SHARERS; i++) {
            llama_model *m = &s[i].m;
            const int64_t had = live_bytes(ctx);
            sharer_open(&s[i], i, ctx, file, memory, i > 0 ? &s[i - 1].m : NULL);
            assert_true((m->weight_bytes > 0) == (i == 0) && m->counts == s[0].m.counts);
            const int64_t own = s[i].bytes - (i > 0 ? m->weights.size + m->experts.size : 0);
            assert_true(live_bytes(ctx) - had <= own);
            if (i == 1) assert_int_equal(m->slots.size, s[0].m.slots.size);
        }
        rocq_stats first, last;
        assert_int_equal(rocq_get_stats(ctx, &first), ROCQ_OK);
        sharers_run(s, SHARERS, order == 1);
        assert_int_equal(rocq_get_stats(ctx, &last), ROCQ_OK);
        assert_int_equal(first.n_allocs, last.n_allocs);
        sharers_check(s, SHARERS);
        for (int n = SHARERS; n-- > 0;) {
            sharer *left = order == 0 ? &s[SHARERS - n] : s;
            llama_close(order == 0 ? &left[-1].m : &s[n].m);
            if (n == 0) break;
            sharers_run(left, n, false);
            sharers_check(left, n);
        }
        assert_int_equal(live_bytes(ctx), before);
    }
    for (int i = 0; i < SHARERS; i++) free(s[i].logits);
    rocq_gguf_close(&file);
}
