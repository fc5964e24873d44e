// rocq_lend, for a context of either backend: an op's scratch memory is what was lent, if that is
// enough, also when a graph that was recorded meanwhile is launched; else the context's own.

static int64_t lend__own(rocq_ctx *ctx) { // scratch memory that the context has taken
    rocq_stats stats;
    assert_int_equal(rocq_get_stats(ctx, &stats), ROCQ_OK);
    return stats.scratch_bytes;
}

static void check_lend(rocq_ctx *ctx) {
    enum { C = 64, W = 40, H = 30, GROUPS = 4, MOST = 1 << 20 };
    static float x[C * W * H];
    static unsigned char before[MOST], after[MOST];
    float want[2 * GROUPS], got[2 * GROUPS];
    rocq_buffer memory, lent;
    rocq_tensor t, stats, all;
    rocq_graph *graph;
    int64_t bytes = 0;
    const int64_t ne[4] = {C, W, H, 1}, stats_ne[3] = {2, GROUPS, 1}, all_ne[1] = {MOST};
    for (int i = 0; i < C * W * H; i++) x[i] = (float)(i * 7919 % 1009) / 500 - 1;
    assert_int_equal(rocq_buffer_alloc(ctx, &memory, sizeof x + 256), ROCQ_OK);
    assert_int_equal(rocq_buffer_alloc(ctx, &lent, MOST), ROCQ_OK);
    assert_int_equal(rocq_tensor_init(&t, &memory, 0, ROCQ_F32, 4, ne), ROCQ_OK);
    assert_int_equal(rocq_tensor_init(&stats, &memory, sizeof x, ROCQ_F32, 3, stats_ne), ROCQ_OK);
    assert_int_equal(rocq_tensor_init(&all, &lent, 0, ROCQ_I8, 1, all_ne), ROCQ_OK);
    assert_int_equal(rocq_upload(ctx, &t, x, sizeof x), ROCQ_OK);
    const rocq_norm_stats_params p = {.stats = &stats, .x = &t};
    assert_int_equal(rocq_plan_begin(ctx, &bytes), ROCQ_OK);
    assert_int_equal(rocq_norm_stats(ctx, &p), ROCQ_OK);
    rocq_plan_end(ctx);
    assert_true(bytes > 1 && bytes <= MOST);
    // 0: nothing lent, 1: too little, 2: enough, 3: what begins a byte further, 4: a graph,
    // 5: a graph in slices, 6: no longer
    for (int i = 0; i < 7; i++) {
        rocq_buffer some = lent;
        const bool own = i < 2 || i == 6;
        some.size = i == 1 ? bytes - 1 : bytes;
        if (i == 3) {
            if (some.host) some.host = (char *)some.host + 1;
            if (some.device.address) some.device.address++;
            some.size += 255;
        }
        for (int j = 0; j < MOST; j++) before[j] = (unsigned char)(171 + i);
        assert_int_equal(rocq_upload(ctx, &all, before, MOST), ROCQ_OK);
        assert_int_equal(rocq_trim(ctx, 0), ROCQ_OK);
        if (i > 0) assert_int_equal(rocq_lend(ctx, i < 6 ? &some : NULL), ROCQ_OK);
        if (i == 4 || i == 5) {
            bool done = false;
            assert_int_equal(rocq_graph_begin(ctx), ROCQ_OK);
            assert_int_equal(rocq_norm_stats(ctx, &p), ROCQ_OK);
            assert_int_equal(rocq_graph_end(ctx, &graph), ROCQ_OK);
            assert_int_equal(rocq_lend(ctx, NULL), ROCQ_OK);
            if (lent.host) { // the CPU rehearses in memory of its own
                assert_int_equal(rocq_warm(ctx, graph), ROCQ_OK);
                assert_int_equal(lend__own(ctx), 0);
                assert_int_equal(rocq_download(ctx, after, &all, MOST), ROCQ_OK);
                assert_memory_equal(before, after, MOST);
            }
            if (i == 4) assert_int_equal(rocq_graph_launch(ctx, graph), ROCQ_OK);
            while (i == 5 && !done) { // the stand-in computes when it is waited for
                assert_int_equal(rocq_graph_launch_for(ctx, graph, 1000, &done), ROCQ_OK);
                assert_int_equal(rocq_sync(ctx), ROCQ_OK);
            }
        } else {
            assert_int_equal(rocq_norm_stats(ctx, &p), ROCQ_OK);
        }
        assert_int_equal(rocq_download(ctx, got, &stats, sizeof got), ROCQ_OK);
        assert_int_equal(rocq_download(ctx, after, &all, MOST), ROCQ_OK);
        if (i == 0) memcpy(want, got, sizeof want);
        assert_memory_equal(got, want, sizeof want);
        assert_int_equal(lend__own(ctx) > 0, own);
        assert_int_equal(memcmp(before, after, MOST) == 0, own);
        assert_memory_equal(before + bytes + 256, after + bytes + 256, MOST - bytes - 256);
        if (i == 4 || i == 5) rocq_graph_destroy(ctx, &graph);
    }
    rocq_buffer bad = lent;
    bad.size = -1;
    assert_int_equal(rocq_lend(ctx, &bad), ROCQ_E_ARGUMENT);
    memset(&bad, 0, sizeof bad);
    bad.size = 1000;
    assert_int_equal(rocq_lend(ctx, &bad), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_lend(NULL, &lent), ROCQ_E_ARGUMENT);
    bad.size = 0;
    assert_int_equal(rocq_lend(ctx, &bad), ROCQ_OK); // nothing
    assert_int_equal(rocq_buffer_free(ctx, &lent), ROCQ_OK);
    assert_int_equal(rocq_buffer_free(ctx, &memory), ROCQ_OK);
}
