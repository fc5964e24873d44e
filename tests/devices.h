// The three contexts that tests of whole models compare: the CPU backend, a GPU whose ops are
// replayed from a graph, and one whose ops are launched one by one. After rocq.h's implementation
// and cmocka.h.

#ifndef TESTS_DEVICES_H
#define TESTS_DEVICES_H

enum { CPU, GPU_GRAPH, GPU_ONE_BY_ONE, N_DEVICES };
static rocq_ctx *contexts[N_DEVICES];

static int open_devices(void **state) {
    (void)state;
    for (int i = 0; i < N_DEVICES; i++) {
        const rocq_desc desc = {.prefer = i == CPU ? ROCQ_BACKEND_CPU : ROCQ_BACKEND_GPU,
                                .no_graphs = i == GPU_ONE_BY_ONE};
        if (rocq_open(&contexts[i], &desc) != ROCQ_OK) return -1;
    }
    return 0;
}

static int close_devices(void **state) {
    (void)state;
    for (int i = 0; i < N_DEVICES; i++) rocq_close(&contexts[i]);
    return 0;
}

#endif // TESTS_DEVICES_H
