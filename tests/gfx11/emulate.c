// What tests/gfx11/emulate runs, as a shared library: every family of kernels through rocq.h, on a
// HIP runtime whose device memory is the host's and whose launches are the harness's. Each case
// runs an op on the CPU backend and on that device, over the same memory, and compares.

#include <setjmp.h>
#include <stdarg.h>
#define ROCQ_IMPLEMENTATION
#include "rocq.h"

// cmocka's names as far as tests/ops.h uses them: a failure ends the case.
static jmp_buf failed;
static char failure[512];

__attribute__((format(printf, 1, 2), noreturn)) static void fail_msg(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(failure, sizeof failure, format, args);
    va_end(args);
    longjmp(failed, 1);
}
#define assert_true(x) ((x) ? (void)0 : fail_msg("line %d: not %s", __LINE__, #x))
#define assert_non_null(x) assert_true((x) != NULL)
#define assert_int_equal(a, b) assert_true((long long)(a) == (long long)(b))
#define print_message(...) ((void)0)
#define skip() fail_msg("skipped")
#include "tests/ops.h"
#include "tests/simt/hip.h"

// ---------------------------------------------------------------------------------------------
// The runtime: everything happens when it is called
// ---------------------------------------------------------------------------------------------

static simt_elsewhere host;

static int fake_count(int *n) { *n = 1; return 0; }
static int fake_nothing_i(int a) { (void)a; return 0; }
static int fake_nothing_p(void *a) { (void)a; return 0; }
static int fake_attribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) { // of a 7900 XTX, as HIP reports it
    case ROCQ_HIP_UNITS: *value = 48; return 0;
    case ROCQ_HIP_CLOCK_KHZ: *value = 2500000; return 0;
    default: *value = 0; return 0;
    }
}
static int fake_text(char *text, int size, int device) {
    (void)device;
    snprintf(text, (size_t)size, "emulated");
    return 0;
}
static int fake_total(size_t *bytes, int device) {
    (void)device;
    *bytes = (size_t)1 << 30;
    return 0;
}
static int fake_alloc(void **ptr, size_t size) { // NaN and -1, as a device's memory may be
    if (posix_memalign(ptr, 256, size) != 0) return ROCQ_HIP_OUT_OF_MEMORY;
    memset(*ptr, 0xff, size);
    host.memory(*ptr, size);
    return 0;
}
static int fake_free(void *ptr) {
    if (ptr) host.memory(ptr, 0);
    free(ptr);
    return 0;
}
static int fake_host_alloc(void **ptr, size_t size, unsigned flags) {
    (void)flags;
    return (*ptr = malloc(size)) ? 0 : ROCQ_HIP_OUT_OF_MEMORY;
}
static int fake_host_free(void *ptr) { free(ptr); return 0; }
static int fake_copy(void *dst, const void *src, size_t size, int kind, void *stream) {
    (void)kind;
    (void)stream;
    memcpy(dst, src, size);
    return 0;
}
static int fake_fill(void *dst, int byte, size_t size, void *stream) {
    (void)stream;
    memset(dst, byte, size);
    return 0;
}
static int fake_make(void **handle, unsigned flags) { (void)flags; *handle = &host; return 0; }
static int fake_record(void *event, void *stream) { (void)event; (void)stream; return 0; }
static int fake_load(void **module, const void *image) {
    (void)image;
    *module = &host;
    return 0;
}
static int fake_function(void **function, void *module, const char *name) {
    (void)module;
    *function = (void *)(uintptr_t)name; // a literal of rocq.h
    return 0;
}
static int fake_launch(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned lds,
                       void *stream, void **args, void **extra) {
    (void)stream;
    if (grid_y != 1 || block_y != 1 || block_z != 1 || lds != 0 || extra) return 1;
    return host.launch((const char *)function, grid_x, grid_z, block_x, args[0]);
}

const rocq_hip *rocq_hip_linked(void) {
    static rocq_hip hip;
    hip.device_count = fake_count;
    hip.set_device = fake_nothing_i;
    hip.device_attribute = fake_attribute;
    hip.device_name = hip.device_pci = fake_text;
    hip.device_memory = fake_total;
    hip.mem_alloc = fake_alloc;
    hip.mem_free = fake_free;
    hip.host_alloc = fake_host_alloc;
    hip.host_free = fake_host_free;
    hip.copy = fake_copy;
    hip.fill = fake_fill;
    hip.stream_create = hip.event_create = fake_make;
    hip.stream_destroy = hip.stream_wait = hip.event_destroy = hip.event_wait = fake_nothing_p;
    hip.event_record = fake_record;
    hip.module_load = fake_load;
    hip.module_unload = fake_nothing_p;
    hip.module_function = fake_function;
    hip.module_launch = fake_launch;
    hip.n_stubs = ROCQ_K_COUNT;
    hip.version = ROCQ_VERSION;
    return &hip;
}

// ---------------------------------------------------------------------------------------------
// Plumbing: one box of memory, a tensor on the CPU and on the device in turn
// ---------------------------------------------------------------------------------------------

typedef struct emulated {  // what the harness reads
    char shape[80];
    double work;           // what the counts are divided by
    double error;          // largest, over the root mean square of the reference
    double nmse, bound;    // of the whole output, and what it may be; 0 asks for equal values
} emulated;

enum { MAX_BOXES = 16 };
static rocq_ctx *cpu, *gpu;
static box *boxes[MAX_BOXES];
static int n_boxes;

static box *keep(box b) {
    box *kept = (box *)malloc(sizeof b);
    assert_true(kept && n_boxes < MAX_BOXES);
    *kept = b;
    host.memory(b.memory, (size_t)b.size);
    return boxes[n_boxes++] = kept;
}
static box *normal(rocq_format format, float size, int64_t ne0, int64_t ne1, int64_t ne2) {
    return keep(box_random(BOX_PLAIN, format, size, ne0, ne1, ne2, 1));
}
static box *output(rocq_format format, int64_t ne0, int64_t ne1, int64_t ne2) {
    return keep(box_make(BOX_PLAIN, format, ne0, ne1, ne2, 1));
}
static box *weights(rocq_format format, int64_t k, int64_t m) {
    box *b = keep(box_make(BOX_PLAIN, format, k, m, 1, 1));
    random_weights(b);
    return b;
}
static box *indices(const int32_t *values, int64_t n) { return keep(box_i32(values, n)); }

static void release(void) {
    for (int i = 0; i < n_boxes; i++) {
        host.memory(boxes[i]->memory, 0);
        if (boxes[i]->t.buffer.device.address &&
            boxes[i]->t.buffer.device.address != (uintptr_t)boxes[i]->memory) {
            rocq_buffer_free(gpu, &boxes[i]->t.buffer);
        }
        box_free(boxes[i]);
        free(boxes[i]);
    }
    n_boxes = 0;
}

static void succeeds(rocq_ctx *ctx, rocq_result result) {
    if (result != ROCQ_OK) fail_msg("%s", rocq_error(ctx));
}

// Weights go to the device as an upload brings them there, in planes; all else stays where it is.
static void to_device(const box *w) {
    for (int i = 0; i < n_boxes; i++) {
        rocq_tensor *t = &boxes[i]->t;
        if (boxes[i] != w || rocq_get_format_info(t->format)->block_elems == 1) {
            t->buffer = rocq_buffer_from_device((uintptr_t)boxes[i]->memory, boxes[i]->size);
            continue;
        }
        succeeds(gpu, rocq_buffer_alloc(gpu, &t->buffer, boxes[i]->size));
        t->layout = ROCQ_LAYOUT_PLANAR;
        succeeds(gpu, rocq_upload(gpu, t, boxes[i]->memory, rocq_tensor_size(t)));
    }
}

// What is compared: ops that run one after the other, on the GPU as a recorded graph launches them.
typedef struct compared {
    rocq_op op;
    const void *on_cpu, *on_gpu; // params
} compared;

// Ops that share a launch are found, planned and launched by the library, as for the capture of a
// graph; there is no runtime here that captures.
static void run_on_gpu(const compared *ops, int n) {
    rocq_graph *graph = NULL;
    if (n == 1) {
        succeeds(gpu, run_one(gpu, ops->op, ops->on_gpu));
        return;
    }
    succeeds(gpu, rocq_graph_begin(gpu));
    for (int i = 0; i < n; i++) succeeds(gpu, run_one(gpu, ops[i].op, ops[i].on_gpu));
    succeeds(gpu, rocq_graph_end(gpu, &graph));
    succeeds(gpu, rocq__subgraph_launch(gpu, graph->first));
    rocq_graph_destroy(gpu, &graph);
}

// The ops on both; the worst of the outputs counts. on_cpu has params of the reference, on_gpu the
// op's own: they differ in precision. w, or NULL, is to be planar.
static void compare_ops(emulated *e, const compared *ops, int n, box *const *out, int n_out,
                        const box *w) {
    enum { MOST = 4 };
    double *want[MOST];
    unsigned char *before[MOST];
    for (int o = 0; o < n_out; o++) {
        before[o] = (unsigned char *)malloc((size_t)out[o]->size);
        want[o] = (double *)malloc((size_t)out[o]->count * sizeof(double));
        assert_true(before[o] && want[o]);
        memcpy(before[o], out[o]->memory, (size_t)out[o]->size);
    }
    for (int i = 0; i < n; i++) succeeds(cpu, run_one(cpu, ops[i].op, ops[i].on_cpu));
    for (int o = 0; o < n_out; o++) {
        box_read(out[o]);
        memcpy(want[o], out[o]->value, (size_t)out[o]->count * sizeof(double));
        memcpy(out[o]->memory, before[o], (size_t)out[o]->size);
    }
    to_device(w);
    run_on_gpu(ops, n);
    succeeds(gpu, rocq_sync(gpu));
    for (int o = 0; o < n_out; o++) {
        double power = 0, error = 0;
        out[o]->t.buffer = rocq_buffer_from_host(out[o]->memory, out[o]->size);
        box_read(out[o]);
        box_check_outside(out[o]);
        for (int64_t i = 0; i < out[o]->count; i++) {
            const double d = fabs(out[o]->value[i] - want[o][i]);
            power += want[o][i] * want[o][i];
            if (!(d <= error)) error = d; // NaN too
        }
        const double all = nmse(out[o]->t.format, out[o]->value, want[o], out[o]->count);
        const double rms = sqrt(power / (double)out[o]->count);
        if (!(all <= e->nmse)) e->nmse = all;
        if (!(error / rms <= e->error)) e->error = error == 0 ? 0 : error / rms;
        free(before[o]);
        free(want[o]);
    }
}
static void compare(emulated *e, rocq_op op, const void *on_cpu, const void *on_gpu,
                    box *const *out, int n_out, const box *w) {
    const compared one = {op, on_cpu, on_gpu};
    compare_ops(e, &one, 1, out, n_out, w);
}

// ---------------------------------------------------------------------------------------------
// Cases. scale 2 is the same with twice the inner loop: the difference has no prologue.
// ---------------------------------------------------------------------------------------------

static void selftest(emulated *e, int scale, int format, int p) { // rocq_open compares its results
    (void)scale;
    (void)format;
    (void)p;
    rocq_ctx *again = NULL;
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_GPU, .kernels_path = gpu->desc.kernels_path,
                            .dispatch_us = -1};
    snprintf(e->shape, sizeof e->shape, "one wave");
    const rocq_result result = rocq_open(&again, &desc);
    rocq_close(&again);
    assert_int_equal(result, ROCQ_OK);
    e->work = 1;
}

static void product_of(emulated *e, rocq_format format, rocq_precision precision, int64_t m,
                       int64_t n, int64_t k, bool row) {
    const bool halves = precision == ROCQ_PRECISION_INT8 && n == 1 && !row; // not matvec_row
    box *w = weights(format, k, m), *x = normal(halves ? ROCQ_F16 : ROCQ_F32, 1, k, n, 1),
        *y = output(ROCQ_F32, m, n, 1);
    rocq_matmul_params on_gpu = {.y = &y->t, .w = &w->t, .x = &x->t, .precision = precision};
    rocq_matmul_params on_cpu = on_gpu;
    on_cpu.precision = ROCQ_PRECISION_F32;
    compare(e, ROCQ_OP_MATMUL, &on_cpu, &on_gpu, &y, 1, w);
    snprintf(e->shape, sizeof e->shape, "M %d, N %d, K %d", (int)m, (int)n, (int)k);
    e->bound = precision == ROCQ_PRECISION_INT8  ? 5e-4
               : precision == ROCQ_PRECISION_F16 ? 1e-5
                                                 : 1e-6;
}

static void product(emulated *e, rocq_format format, rocq_precision precision, int64_t m, int64_t n,
                    int64_t k) {
    product_of(e, format, precision, m, n, k, false);
}

// Work: weights. 96 rows are what two of 96 units have to do of 4608.
static void matvec_int8(emulated *e, int scale, int format, int n) {
    product(e, (rocq_format)format, ROCQ_PRECISION_INT8, 96, n, 4096 * scale);
    e->work = 96.0 * 4096 * scale;
}
static void matvec_row(emulated *e, int scale, int format, int n) {
    product_of(e, (rocq_format)format, ROCQ_PRECISION_INT8, 96, n, 2048 * scale, true);
    e->work = 96.0 * 2048 * scale;
}
// A format that is only read, whose kernels have no name of their own.
static void matvec_read(emulated *e, int scale, int format, int row) {
    product_of(e, (rocq_format)format, ROCQ_PRECISION_INT8, 96, 1, 2048 * scale, row);
    snprintf(e->shape, sizeof e->shape, "%s, M 96, N 1, K %d",
             rocq_format_name((rocq_format)format), 2048 * scale);
    e->work = 96.0 * 2048 * scale;
}
static void matvec_int8_short(emulated *e, int scale, int format, int n) {
    product(e, (rocq_format)format, ROCQ_PRECISION_INT8, 33, n, 512 * scale);
    e->work = 33.0 * 512 * scale;
}
static void matvec_f32(emulated *e, int scale, int format, int n) {
    product(e, (rocq_format)format, ROCQ_PRECISION_F32, 33, n, 512 * scale);
    e->work = 33.0 * 512 * scale;
}
static void matvec_mixed(emulated *e, int scale, int format, int row) { // q, k and v of a layer
    const rocq_format formats[3] = {ROCQ_Q4_K, ROCQ_Q6_K, ROCQ_Q8_0};
    const int64_t k = 512 * scale, rows[3] = {64, 33, 20};
    box *x = normal(row ? ROCQ_F32 : ROCQ_F16, 1, k, 1, 1), *y[3], *w[3];
    rocq_matmul_params on_cpu[3], on_gpu[3];
    rocq_tensor planar[3];
    (void)format;
    memset(on_gpu, 0, sizeof on_gpu);
    for (int i = 0; i < 3; i++) {
        w[i] = weights(formats[i], k, rows[i]);
        y[i] = output(ROCQ_F32, rows[i], 1, 1);
        planar[i] = w[i]->t;
        planar[i].layout = ROCQ_LAYOUT_PLANAR;
        succeeds(gpu, rocq_buffer_alloc(gpu, &planar[i].buffer, w[i]->size));
        succeeds(gpu, rocq_upload(gpu, &planar[i], w[i]->memory, w[i]->size));
        on_gpu[i].y = &y[i]->t;
        on_gpu[i].w = &planar[i];
        on_gpu[i].x = &x->t;
        on_gpu[i].precision = ROCQ_PRECISION_INT8;
        on_gpu[i].next = i < 2 ? &on_gpu[i + 1] : NULL;
        on_cpu[i] = on_gpu[i];
        on_cpu[i].w = &w[i]->t;
        on_cpu[i].precision = ROCQ_PRECISION_F32;
        on_cpu[i].next = i < 2 ? &on_cpu[i + 1] : NULL;
    }
    compare(e, ROCQ_OP_MATMUL, &on_cpu[0], &on_gpu[0], y, 3, NULL);
    for (int i = 0; i < 3; i++) succeeds(gpu, rocq_buffer_free(gpu, &planar[i].buffer));
    snprintf(e->shape, sizeof e->shape, "Q4_K, Q6_K, Q8_0, M 64, 33, 20, K %d", (int)k);
    e->bound = 5e-4;
    e->work = 117.0 * (double)k;
}

// Work: products of 16x16x16.
static void matmul_f16(emulated *e, int scale, int format, int n) {
    product(e, (rocq_format)format, ROCQ_PRECISION_F16, 256, n, 512 * scale);
    e->work = 256.0 * n * 512 * scale / 4096;
}
static void matmul_merge(emulated *e, int scale, int format, int n) { // work: y's elements
    const int32_t n_units = gpu->gpu->chip.n_units;
    gpu->gpu->chip.n_units = 96; // so that K is split
    product(e, (rocq_format)format, ROCQ_PRECISION_F16, 128, n, 1024 * scale);
    gpu->gpu->chip.n_units = n_units;
    e->work = 128.0 * n;
}
static void matmul_int8(emulated *e, int scale, int format, int n) {
    product(e, (rocq_format)format, ROCQ_PRECISION_INT8, 256, n, 512 * scale);
    e->work = 256.0 * n * 512 * scale / 4096;
}
static void matmul_f32(emulated *e, int scale, int format, int n) {
    product(e, (rocq_format)format, ROCQ_PRECISION_F32, 64, n, 64 * scale);
    e->work = 64.0 * n * 64 * scale / 4096;
}

static void attend(emulated *e, rocq_format format, int64_t d, int64_t n_heads, int64_t n_kv_heads,
                   int64_t n_q, int64_t n_kv, bool causal, bool lse) {
    box *q = normal(ROCQ_F32, 1, d, n_heads, n_q), *out = output(ROCQ_F32, d, n_heads, n_q);
    box *k = normal(format, 1, d, n_kv_heads, n_kv), *v = normal(format, 1, d, n_kv_heads, n_kv);
    box *sums = output(ROCQ_F32, n_heads, n_q, 1);
    const rocq_attention_params p = {.out = &out->t, .lse = lse ? &sums->t : NULL, .q = &q->t,
                                     .k = &k->t, .v = &v->t, .causal = causal};
    compare(e, ROCQ_OP_ATTENTION, &p, &p, &out, 1, NULL);
    snprintf(e->shape, sizeof e->shape, "%s KV, D %d, %d heads on %d, %d queries, %d positions",
             rocq_format_name(format), (int)d, (int)n_heads, (int)n_kv_heads, (int)n_q,
             (int)n_kv);
    e->bound = 1e-5;
}
// Work: elements of K and V. With lse it does not go by a head a block.
static void attention_decode(emulated *e, int scale, int format, int d) {
    attend(e, (rocq_format)format, d, 8, 2, 1, 512 * scale, true, format == ROCQ_F16);
    e->work = 2.0 * d * 2 * 512 * scale;
}
// A step's attention in blocks of one head, each cut in two runs. Both heads of a group read K and V.
static void attention_step(emulated *e, int scale, int format, int d) {
    attend(e, (rocq_format)format, d, 2, 1, 1, 512 * scale, true, false);
    e->work = 2.0 * d * 512 * scale;
}
// Work: products of 16x16x16, of which Q K^T and P V take n_q n_kv d / 4096 a head each.
static void attention_prefill(emulated *e, int scale, int format, int d) {
    attend(e, (rocq_format)format, d, 4, 1, 128, 128 * scale, false, false);
    e->work = 2.0 * 4 * 128 * 128 * scale * d / 4096;
}
// The same of one head without a mask, as a picture's decoder has it.
static void attention_picture(emulated *e, int scale, int format, int d) {
    attend(e, (rocq_format)format, d, 1, 1, 64, 64 * scale, false, false);
    e->work = 2.0 * 64 * 64 * scale * d / 4096;
}

static void attention_backward(emulated *e, int64_t d, int64_t n_q, int64_t n_kv) {
    const int64_t n_heads = 2;
    box *q = normal(ROCQ_F16, 1, d, n_heads, n_q), *dout = normal(ROCQ_F16, 1, d, n_heads, n_q);
    box *k = normal(ROCQ_F16, 1, d, 1, n_kv), *v = normal(ROCQ_F16, 1, d, 1, n_kv);
    box *out = output(ROCQ_F16, d, n_heads, n_q), *lse = output(ROCQ_F32, n_heads, n_q, 1);
    box *grad[3] = {output(ROCQ_F32, d, n_heads, n_q), output(ROCQ_F32, d, 1, n_kv),
                    output(ROCQ_F32, d, 1, n_kv)};
    const rocq_attention_params forward = {.out = &out->t, .q = &q->t, .k = &k->t, .v = &v->t,
                                           .lse = &lse->t};
    const rocq_attention_backward_params p = {
        .dq = &grad[0]->t, .dk = &grad[1]->t, .dv = &grad[2]->t, .dout = &dout->t, .out = &out->t,
        .q = &q->t, .k = &k->t, .v = &v->t, .lse = &lse->t};
    succeeds(cpu, rocq_attention(cpu, &forward));
    compare(e, ROCQ_OP_ATTENTION_BACKWARD, &p, &p, grad, 3, NULL);
    snprintf(e->shape, sizeof e->shape, "D %d, 2 heads on 1, %d queries, %d positions", (int)d,
             (int)n_q, (int)n_kv);
    e->bound = 1e-5;
}
// Work: products of 16x16x16: seven of n_q n_kv d / 4096 a head.
static void attention_backward_both(emulated *e, int scale, int format, int d) {
    (void)format;
    attention_backward(e, d, 64 * scale, 64);
    e->work = 7.0 * 2 * 64 * scale * 64 * d / 4096;
}
static void attention_backward_tiles(emulated *e, int scale, int format, int d) {
    (void)format;
    attention_backward(e, d, 32 * scale, 64 * scale); // elements of q, dout, out, k and v
    e->work = (3.0 * 2 * 32 + 2.0 * 64) * scale * d;
}

// A token's products by expert, work: weights. Gate and up of 96 rows with hidden values in Q8_0,
// or down, whose slots are weighted and added.
static void experts_of(emulated *e, int format, bool down, int64_t k, int64_t m, int64_t n_experts,
                       int64_t slots, int64_t n, const int32_t *chosen) {
    rocq_tensor planar[2];
    box *w[2], *x = normal(ROCQ_F32, 1, k, down ? slots : 1, n),
               *shares = normal(ROCQ_F32, 1, slots, n, 1);
    box *y = down ? output(ROCQ_F32, m, n, 1) : output(ROCQ_Q8_0, m, slots, n);
    rocq_tensor *ids = &indices(chosen, slots * n)->t;
    ids->ne[0] = slots;
    ids->ne[1] = n;
    ids->stride[1] = slots;
    rocq_experts_params on_cpu = {.y = &y->t, .x = &x->t, .ids = ids};
    for (int i = 0; i < 2; i++) {
        w[i] = keep(box_make(BOX_PLAIN, (rocq_format)format, k, m, n_experts, 1));
        random_weights(w[i]);
        planar[i] = w[i]->t;
        planar[i].layout = ROCQ_LAYOUT_PLANAR;
        succeeds(gpu, rocq_buffer_alloc(gpu, &planar[i].buffer, w[i]->size));
        succeeds(gpu, rocq_upload(gpu, &planar[i], w[i]->memory, w[i]->size));
    }
    if (down) on_cpu.weights = &shares->t;
    else on_cpu.activation = ROCQ_ACT_SILU;
    on_cpu.w = &w[0]->t;
    if (!down) on_cpu.w2 = &w[1]->t;
    rocq_experts_params on_gpu = on_cpu;
    on_cpu.precision = ROCQ_PRECISION_F32;
    on_gpu.w = &planar[0];
    if (!down) on_gpu.w2 = &planar[1];
    compare(e, ROCQ_OP_EXPERTS, &on_cpu, &on_gpu, &y, 1, NULL);
    for (int i = 0; i < 2; i++) succeeds(gpu, rocq_buffer_free(gpu, &planar[i].buffer));
    e->bound = 1e-3;
}
static void experts(emulated *e, int scale, int format, int down) {
    const int64_t k = 1024 * scale, m = down ? 33 : 96;
    const int32_t chosen[3] = {4, 0, 3};
    experts_of(e, format, down, k, m, 5, 3, 1, chosen);
    snprintf(e->shape, sizeof e->shape, "%s, M %d, K %d, 3 of 5", down ? "down" : "gate and up",
             (int)m, (int)k);
    e->work = (double)((down ? 1 : 2) * 3 * m * k);
}
// A prompt of 64 tokens, two of four experts each, 32 tokens an expert. Work: products of 16x16x16,
// or of what sorts the pairs of a token and an expert, and what adds a token's two results, pairs
// and elements.
static void experts_prompt(emulated *e, int scale, int format, int what) {
    const int64_t k = 256 * scale, m = 128;
    const bool down = what != 0;
    int32_t chosen[128];
    for (int i = 0; i < 128; i++) chosen[i] = (i / 2 + i % 2 * (1 + i / 8 % 3)) % 4;
    experts_of(e, format, down, k, m, 4, 2, 64, chosen);
    snprintf(e->shape, sizeof e->shape, "%s, M %d, K %d, 64 tokens, 2 of 4",
             down ? "down" : "gate and up", (int)m, (int)k);
    e->work = what == 2   ? 128.0
              : what == 3 ? 64.0 * (double)m
                          : (down ? 1 : 2) * 128.0 * (double)(m * k) / 4096;
}

// Work, from here on: elements.
static void route(emulated *e, int scale, int format, int p) {
    const int64_t n_experts = 128 * scale, slots = 8;
    box *logits = normal(ROCQ_F32, 2, n_experts, 1, 1);
    box *out[2] = {output(ROCQ_I32, slots, 1, 1), output(ROCQ_F32, slots, 1, 1)};
    (void)format;
    (void)p;
    const rocq_route_params params = {.ids = &out[0]->t, .weights = &out[1]->t,
                                      .logits = &logits->t, .renormalise = true};
    compare(e, ROCQ_OP_ROUTE, &params, &params, out, 2, NULL);
    snprintf(e->shape, sizeof e->shape, "8 of %d", (int)n_experts);
    e->bound = 1e-10;
    e->work = (double)n_experts;
}
// The norm before a router, its product and its choice, which are one launch.
static void router(emulated *e, int scale, int format, int p) {
    const int64_t n_experts = 128, slots = 8, k = 512 * scale;
    box *x = normal(ROCQ_F32, 1, k, 1, 1), *gain = normal(ROCQ_F32, 1, k, 1, 1);
    box *w = normal(ROCQ_F32, 0.1f, k, n_experts, 1);
    box *out[4] = {output(ROCQ_I32, slots, 1, 1), output(ROCQ_F32, slots, 1, 1),
                   output(ROCQ_F32, k, 1, 1), output(ROCQ_F32, n_experts, 1, 1)};
    (void)format;
    (void)p;
    const rocq_norm_params norm = {.y = &out[2]->t, .x = &x->t, .weight = &gain->t};
    const rocq_matmul_params product = {.y = &out[3]->t, .w = &w->t, .x = &out[2]->t,
                                        .precision = ROCQ_PRECISION_F32};
    const rocq_route_params choice = {.ids = &out[0]->t, .weights = &out[1]->t,
                                      .logits = &out[3]->t, .renormalise = true};
    const compared ops[3] = {{ROCQ_OP_RMSNORM, &norm, &norm},
                             {ROCQ_OP_MATMUL, &product, &product},
                             {ROCQ_OP_ROUTE, &choice, &choice}};
    compare_ops(e, ops, 3, out, 4, NULL);
    snprintf(e->shape, sizeof e->shape, "norm and choice of 8 of %d, K %d", (int)n_experts, (int)k);
    e->bound = 1e-10;
    e->work = (double)(n_experts * k);
}
static void shortconv(emulated *e, int scale, int format, int p) {
    const int64_t channels = 512 * scale, taps = 3;
    const int32_t pos = 7;
    box *bcx = normal(ROCQ_F32, 1, 3 * channels, 1, 1), *w = normal(ROCQ_F32, 1, taps, channels, 1);
    box *out[2] = {output(ROCQ_F32, channels, 1, 1), normal(ROCQ_F32, 1, channels, taps - 1, 1)};
    (void)format;
    (void)p;
    const rocq_shortconv_params params = {.y = &out[0]->t, .bcx = &bcx->t, .w = &w->t,
                                          .state = &out[1]->t, .pos = &indices(&pos, 1)->t};
    compare(e, ROCQ_OP_SHORTCONV, &params, &params, out, 2, NULL);
    snprintf(e->shape, sizeof e->shape, "a token of %d channels, %d taps", (int)channels,
             (int)taps);
    e->bound = 1e-10;
    e->work = (double)channels;
}
// Work: elements of the state.
static void delta_net(emulated *e, int scale, int format, int tokens) {
    const int64_t d = 128, heads = 2, n = (int64_t)scale * tokens;
    const int32_t slots[2] = {0, 1};
    box *q = normal(ROCQ_F32, 1, d, heads, n), *k = normal(ROCQ_F32, 1, d, heads, n),
        *v = normal(ROCQ_F32, 1, d, heads, n), *alpha = normal(ROCQ_F32, 1, heads, n, 1),
        *beta = normal(ROCQ_F32, 1, heads, n, 1), *a = normal(ROCQ_F32, 0.1f, heads, 1, 1),
        *dt = normal(ROCQ_F32, 1, heads, 1, 1);
    box *out[2] = {output(ROCQ_F32, d, heads, n),
                   keep(box_random(BOX_PLAIN, ROCQ_F32, 0.3f, d, d, heads, 2))};
    (void)format;
    for (int64_t h = 0; h < heads; h++) a->value[h] = -fabs(a->value[h]);
    box_write(a);
    const rocq_delta_net_params params = {
        .y = &out[0]->t, .state = &out[1]->t, .q = &q->t, .k = &k->t, .v = &v->t,
        .alpha = &alpha->t, .beta = &beta->t, .a = &a->t, .dt = &dt->t,
        .slot = &indices(slots, 2)->t, .eps = 1e-6f};
    compare(e, ROCQ_OP_DELTA_NET, &params, &params, out, 2, NULL);
    snprintf(e->shape, sizeof e->shape, "%d tokens, 2 heads of 128 x 128", (int)n);
    e->bound = 1e-9;
    e->work = (double)(heads * d * d * n);
}
static void norms(emulated *e, int scale, int format, int center) {
    const int64_t k = 4096 * scale, rows = 2;
    box *x = normal(ROCQ_F32, 1, k, rows, 1), *weight = normal(ROCQ_F32, 1, k, 1, 1);
    box *bias = normal(ROCQ_F32, 1, k, 1, 1);
    box *out[3] = {output((rocq_format)format, k, rows, 1), output(ROCQ_F32, rows, 1, 1),
                   output(ROCQ_F32, rows, 1, 1)};
    rocq_norm_params p = {.y = &out[0]->t, .x = &x->t, .weight = &weight->t, .rstd = &out[1]->t};
    if (center) {
        p.bias = &bias->t;
        p.mean = &out[2]->t;
    }
    compare(e, center ? ROCQ_OP_LAYERNORM : ROCQ_OP_RMSNORM, &p, &p, out, center ? 3 : 2, NULL);
    snprintf(e->shape, sizeof e->shape, "%s of %d rows of %d to %s",
             center ? "layernorm" : "rmsnorm", (int)rows, (int)k,
             rocq_format_name((rocq_format)format));
    e->bound = format == ROCQ_Q8_0 ? 1e-4 : 1e-6;
    e->work = (double)(k * rows);
}

static void rope_append(emulated *e, int scale, int format, int pairing) {
    const int64_t d = 128, n = 3, heads = 4 * scale, kv_heads = 2 * scale, cells = 8;
    const int32_t pos[3] = {5, 6, 7}, cell[3] = {5, 2, 7};
    box *out[3] = {normal(ROCQ_F32, 1, d, heads, n),
                   output((rocq_format)format, d, kv_heads, cells),
                   output((rocq_format)format, d, kv_heads, cells)};
    box *k = normal(ROCQ_F32, 1, d, kv_heads, n), *v = normal(ROCQ_F32, 1, d, kv_heads, n);
    for (int i = 1; i < 3; i++) { // the cells that are not written hold numbers
        memset(out[i]->memory, 0, (size_t)out[i]->size);
    }
    const rocq_rope_append_params p = {
        .q = &out[0]->t, .k = &k->t, .v = &v->t, .k_cache = &out[1]->t, .v_cache = &out[2]->t,
        .pos = &indices(pos, n)->t, .cell = &indices(cell, n)->t,
        .rope = {.pairing = (rocq_rope_pairing)pairing, .freq_base = 1e6f}};
    compare(e, ROCQ_OP_ROPE_APPEND, &p, &p, out, 3, NULL);
    snprintf(
        e->shape, sizeof e->shape, "rope and append, %s cache, D %d, %d and %d heads, %d tokens",
        rocq_format_name((rocq_format)format), (int)d, (int)heads, (int)kv_heads, (int)n);
    e->bound = format == ROCQ_Q8_0 ? 1e-4 : 1e-5;
    e->work = (double)(d * n * (heads + 2 * kv_heads));
}

static void map(emulated *e, int scale, int format, int op) {
    const int64_t k = 1024 * scale, rows = 2;
    box *a = normal(ROCQ_F32, 1, k, rows, 1),
        *b = normal(ROCQ_F32, 1, k, op == ROCQ_OP_ADD ? 1 : rows, 1);
    box *y = output((rocq_format)format, k, rows, 1);
    union {
        rocq_glu_params glu;
        rocq_binary_params add;
        rocq_activate_params activate;
        rocq_cast_params cast;
    } p;
    memset(&p, 0, sizeof p);
    switch (op) {
    case ROCQ_OP_GLU: p.glu = (rocq_glu_params){&y->t, &a->t, &b->t, ROCQ_ACT_SILU}; break;
    case ROCQ_OP_ADD: p.add = (rocq_binary_params){&y->t, &a->t, &b->t}; break;
    case ROCQ_OP_ACTIVATE:
        p.activate = (rocq_activate_params){&y->t, &a->t, ROCQ_ACT_GELU_ERF};
        break;
    default: p.cast = (rocq_cast_params){&y->t, &a->t}; break;
    }
    compare(e, (rocq_op)op, &p, &p, &y, 1, NULL);
    snprintf(e->shape, sizeof e->shape, "%s of %d rows of %d to %s", rocq__ops[op]->name, (int)rows,
             (int)k, rocq_format_name((rocq_format)format));
    e->bound = format == ROCQ_F32 ? 1e-6 : 1e-4;
    e->work = (double)(k * rows);
}

static void gather(emulated *e, int scale, int format, int planar) {
    const int64_t k = 512 * scale;
    const int32_t ids[5] = {4, 0, 31, 7, 4};
    box *table = weights((rocq_format)format, k, 32), *y = output(ROCQ_F32, k, 5, 1);
    const rocq_gather_params p = {.y = &y->t, .table = &table->t, .ids = &indices(ids, 5)->t};
    compare(e, ROCQ_OP_GATHER, &p, &p, &y, 1, planar ? table : NULL);
    snprintf(e->shape, sizeof e->shape, "5 rows of %d from %s%s", (int)k, planar ? "planar " : "",
             rocq_format_name((rocq_format)format));
    e->work = 5.0 * (double)k;
}

// The upload of planar blocks, then their values by gather: exactly those of the GGUF layout.
static void repack(emulated *e, int scale, int format, int p) {
    int32_t ids[32];
    const int64_t k = 512 * scale;
    box *table = weights((rocq_format)format, k, 32), *y = output(ROCQ_F32, k, 32, 1);
    (void)p;
    for (int32_t i = 0; i < 32; i++) ids[i] = i;
    const rocq_gather_params params = {.y = &y->t, .table = &table->t, .ids = &indices(ids, 32)->t};
    compare(e, ROCQ_OP_GATHER, &params, &params, &y, 1, table);
    snprintf(e->shape, sizeof e->shape, "%s, 32 rows of %d",
             rocq_format_name((rocq_format)format), (int)k);
    e->work = 32.0 * (double)k;
}

static void softmax(emulated *e, int scale, int format, int p) {
    const int64_t k = 512 * scale, rows = 3;
    box *x = normal(ROCQ_F32, 2, k, rows, 1), *mask = normal(ROCQ_F16, 1, k, 1, 1);
    box *y = output(ROCQ_F32, k, rows, 1);
    (void)format;
    (void)p;
    const rocq_softmax_params params = {.y = &y->t, .x = &x->t, .mask = &mask->t, .scale = 0.5f};
    compare(e, ROCQ_OP_SOFTMAX, &params, &params, &y, 1, NULL);
    snprintf(e->shape, sizeof e->shape, "%d rows of %d with a mask", (int)rows, (int)k);
    e->bound = 1e-6;
    e->work = (double)(k * rows);
}

static void argmax(emulated *e, int scale, int format, int p) {
    const int64_t k = 1000 * scale, rows = 2;
    box *x = normal(ROCQ_F32, 1, k, rows, 1), *index = output(ROCQ_I32, rows, 1, 1);
    (void)format;
    (void)p;
    const rocq_argmax_params params = {.index = &index->t, .x = &x->t};
    compare(e, ROCQ_OP_ARGMAX, &params, &params, &index, 1, NULL);
    snprintf(e->shape, sizeof e->shape, "%d rows of %d", (int)rows, (int)k);
    e->work = (double)(k * rows);
}

static void sample(emulated *e, int scale, int format, int p) {
    const int64_t n = 2000 * scale;
    const int32_t recent[4] = {3, 17, 3, 1999};
    box *logits = normal(ROCQ_F32, 3, n, 1, 1), *token = output(ROCQ_I32, 1, 1, 1);
    (void)format;
    (void)p;
    const rocq_sample_params params = {
        .token = &token->t, .logits = &logits->t, .recent = &indices(recent, 4)->t,
        .temperature = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.02f, .repeat_penalty = 1.1f,
        .seed = 7, .step = 3};
    compare(e, ROCQ_OP_SAMPLE, &params, &params, &token, 1, NULL);
    snprintf(e->shape, sizeof e->shape, "%d logits, top 40, top p, min p, penalties", (int)n);
    e->work = (double)n;
}

// unit is what the work of a case counts.
#define FORMATS_OF_MATVEC(X)                                                    \
    X(q4_0, Q4_0) X(q8_0, Q8_0) X(q4_K, Q4_K) X(q5_K, Q5_K) X(q6_K, Q6_K)       \
    X(q4_1, Q4_1) X(q5_0, Q5_0) X(q5_1, Q5_1) X(q2_K, Q2_K) X(q3_K, Q3_K)       \
    X(iq4_nl, IQ4_NL) X(iq4_xs, IQ4_XS) X(mxfp4, MXFP4)
// Work: products of 16x16x16. 3x3 over two tiles of 8 by 16 positions, one a unit's block each,
// with group norm and SiLU of x and a residual, or plain.
// folded: of doubled positions, four kernels of 2x2 taps.
static void conv_3x3(emulated *e, int scale, rocq_format format, int m, bool fused, bool folded) {
    const int32_t n_units = gpu->gpu->chip.n_units;
    const int64_t c = 64 * scale, w = 16, h = folded ? 32 : 16, up = folded ? 2 : 1;
    const int64_t taps = folded ? 4 : 9;
    box *x = normal(format, 1, c, w / up, h / up), *y = output(ROCQ_F16, m, w, h);
    box *weight = normal(ROCQ_F16, 0.1f, c * taps, m, folded ? 4 : 1), *bias = normal(ROCQ_F32, 1, m, 1, 1);
    box *stats = normal(ROCQ_F32, 1, 2, 32, 1), *residual = normal(ROCQ_F16, 1, m, w, h);
    box *gain = normal(ROCQ_F32, 1, c, 1, 1), *shift = normal(ROCQ_F32, 1, c, 1, 1);
    rocq_conv_params p = {.y = &y->t, .w = &weight->t, .x = &x->t, .bias = &bias->t, .kw = 3,
                          .kh = 3, .upsample = (int32_t)up, .folded = folded};
    if (fused) {
        p.stats = &stats->t;
        p.norm_weight = &gain->t;
        p.norm_bias = &shift->t;
        p.x_activation = ROCQ_ACT_SILU;
        p.residual = &residual->t;
    }
    gpu->gpu->chip.n_units = 1; // so that K is not split
    compare(e, ROCQ_OP_CONV, &p, &p, &y, 1, NULL);
    gpu->gpu->chip.n_units = n_units;
    snprintf(e->shape, sizeof e->shape, "3x3, C %d, M %d, %d x %d%s", (int)c, m, (int)w, (int)h,
             fused ? ", norm, SiLU, residual" : folded ? ", folded" : "");
    e->bound = 1e-5;
    e->work = (double)((m + 15) / 16) * (double)(w * h / 16) * (double)(c / 16) * (double)taps;
}
static void conv(emulated *e, int scale, int format, int m) {
    conv_3x3(e, scale, (rocq_format)format, m, false, false);
}
static void conv_fused(emulated *e, int scale, int format, int m) {
    conv_3x3(e, scale, (rocq_format)format, m, true, false);
}
static void conv_folded(emulated *e, int scale, int format, int m) {
    conv_3x3(e, scale, (rocq_format)format, m, false, true);
}
static void norm_stats(emulated *e, int scale, int format, int c) {
    (void)scale;
    box *x = normal((rocq_format)format, 1, c, 64, 16), *stats = output(ROCQ_F32, 2, 32, 1);
    const rocq_norm_stats_params p = {.stats = &stats->t, .x = &x->t};
    compare(e, ROCQ_OP_NORM_STATS, &p, &p, &stats, 1, NULL);
    snprintf(e->shape, sizeof e->shape, "C %d, 64 x 16", c);
    e->bound = 1e-9;
    e->work = 64.0 * 16 * c;
}
// Work: products of 16x16x16. A tile of dx, or of dw with a row of the bias's gradient.
static void matmul_backward(emulated *e, int scale, int format, int of_dw) {
    const int64_t r = 256 * scale, k = of_dw ? 128 : 256, m = of_dw ? 128 : r, n = of_dw ? r : 128;
    box *dy = normal(ROCQ_F16, 1, m, n, 1), *x = normal(ROCQ_F16, 1, k, n, 1);
    box *w = of_dw ? NULL : weights((rocq_format)format, k, m);
    box *out[2] = {output(ROCQ_F32, k, of_dw ? m : n, 1), output(ROCQ_F32, m, 1, 1)};
    rocq_matmul_backward_params p = {.dy = &dy->t, .precision = ROCQ_PRECISION_F16};
    if (of_dw) {
        p.dw = &out[0]->t;
        p.db = &out[1]->t;
        p.x = &x->t;
    } else {
        p.dx = &out[0]->t;
        p.w = &w->t;
    }
    const int32_t n_units = gpu->gpu->chip.n_units;
    gpu->gpu->chip.n_units = 1; // so that r is not split
    compare(e, ROCQ_OP_MATMUL_BACKWARD, &p, &p, out, of_dw ? 2 : 1, w);
    gpu->gpu->chip.n_units = n_units;
    snprintf(e->shape, sizeof e->shape, "K %d, M %d, N %d", (int)k, (int)m, (int)n);
    e->bound = 1e-5;
    e->work = (double)(k * m * n) / 4096;
}

static const struct {
    const char *kernel, *unit;
    void (*run)(emulated *e, int scale, int format, int p);
    int format, p, scales;
} cases[] = {
    {"selftest", "run", selftest, 0, 0, 1},
#define ROCQ_X(name, NAME) {"matvec_int8_" #name "_n1", "weight", matvec_int8, ROCQ_##NAME, 1, 2},
    FORMATS_OF_MATVEC(ROCQ_X)
#undef ROCQ_X
    {"matvec_int8_q4_K_n2", "weight", matvec_int8_short, ROCQ_Q4_K, 2, 1},
    {"matvec_int8_q4_K_n4", "weight", matvec_int8_short, ROCQ_Q4_K, 4, 1},
    {"matvec_int8_q4_K_n8", "weight", matvec_int8_short, ROCQ_Q4_K, 7, 1},
    {"matvec_int8_mixed_n1", "weight", matvec_mixed, 0, 0, 1},
    {"matvec_row_q4_0", "weight", matvec_row, ROCQ_Q4_0, 1, 2},
    {"matvec_row_q4_K", "weight", matvec_row, ROCQ_Q4_K, 1, 2},
    {"matvec_row_q6_K", "weight", matvec_row, ROCQ_Q6_K, 1, 2},
    {"matvec_row_mixed", "weight", matvec_mixed, 0, 1, 1},
    {"matvec_int8_read_n1", "weight", matvec_read, ROCQ_IQ3_S, 0, 2},
    {"matvec_row_read", "weight", matvec_read, ROCQ_IQ2_XXS, 1, 2},
    {"matvec_f32_f32_n1", "weight", matvec_f32, ROCQ_F32, 1, 1},
    {"matvec_f32_f16_n1", "weight", matvec_f32, ROCQ_F16, 1, 1},
    {"matvec_f32_f16_n4", "weight", matvec_f32, ROCQ_F16, 4, 1},
    {"matvec_f32_q6_K_n1", "weight", matvec_f32, ROCQ_Q6_K, 1, 1},
    {"matvec_f32_mxfp6_e2m3_n8", "weight", matvec_f32, ROCQ_MXFP6_E2M3, 5, 1},
    {"matmul_f16_q4_K_128", "16x16x16", matmul_f16, ROCQ_Q4_K, 128, 2},
    {"matmul_f16_q6_K_128", "16x16x16", matmul_f16, ROCQ_Q6_K, 128, 2},
    {"matmul_f16_q8_0_128", "16x16x16", matmul_f16, ROCQ_Q8_0, 128, 2},
    {"matmul_f16_f16_128", "16x16x16", matmul_f16, ROCQ_F16, 128, 2},
    {"matmul_f16_q4_K_32", "16x16x16", matmul_f16, ROCQ_Q4_K, 32, 2},
    {"matmul_f16_q4_0_32", "16x16x16", matmul_f16, ROCQ_Q4_0, 16, 2},
    {"matmul_merge", "element", matmul_merge, ROCQ_Q4_0, 16, 1},
    {"matmul_int8_q4_K", "16x16x16", matmul_int8, ROCQ_Q4_K, 64, 2},
    {"matmul_int8_q8_0", "16x16x16", matmul_int8, ROCQ_Q8_0, 64, 2},
    {"matmul_f32", "16x16x16", matmul_f32, ROCQ_F32, 64, 2},
    {"attention_decode_128", "KV element", attention_decode, ROCQ_F16, 128, 2},
    {"attention_decode_64", "KV element", attention_decode, ROCQ_Q8_0, 64, 2},
    {"attention_step_128", "KV element", attention_step, ROCQ_F16, 128, 2},
    {"attention_step_64", "KV element", attention_step, ROCQ_F16, 64, 2},
    {"attention_prefill_128", "16x16x16", attention_prefill, ROCQ_F16, 128, 2},
    {"attention_prefill_64", "16x16x16", attention_prefill, ROCQ_F16, 64, 2},
    {"attention_prefill_512", "16x16x16", attention_picture, ROCQ_F16, 512, 2},
    {"attention_backward_128", "16x16x16", attention_backward_both, 0, 128, 2},
    {"attention_backward_64", "16x16x16", attention_backward_both, 0, 64, 2},
    {"attention_backward_tiles", "element", attention_backward_tiles, 0, 64, 1},
    {"norm", "element", norms, ROCQ_F32, 0, 1},
    {"norm", "element", norms, ROCQ_Q8_0, 0, 1},
    {"norm", "element", norms, ROCQ_F32, 1, 1},
    {"rope", "element", rope_append, ROCQ_F16, ROCQ_ROPE_NEOX, 1},
    {"rope", "element", rope_append, ROCQ_Q8_0, ROCQ_ROPE_NORM, 1},
    {"map", "element", map, ROCQ_F32, ROCQ_OP_GLU, 1},
    {"map", "element", map, ROCQ_F32, ROCQ_OP_ADD, 1},
    {"map", "element", map, ROCQ_F16, ROCQ_OP_ACTIVATE, 1},
    {"map", "element", map, ROCQ_Q8_0, ROCQ_OP_CAST, 1},
    {"decode", "element", gather, ROCQ_Q6_K, 0, 1},
    {"decode", "element", gather, ROCQ_Q4_K, 1, 1},
    {"repack", "element", repack, ROCQ_Q4_K, 0, 1},
    {"repack", "element", repack, ROCQ_Q3_K, 0, 1},
    {"softmax", "element", softmax, 0, 0, 1},
    {"argmax", "element", argmax, 0, 0, 1},
    {"sample", "element", sample, 0, 0, 1},
    {"conv_f16_128", "16x16x16", conv, ROCQ_F16, 128, 2},
    {"conv_f16_128", "16x16x16", conv_fused, ROCQ_F16, 128, 2},
    {"conv_f16_128", "16x16x16", conv_folded, ROCQ_F16, 128, 2},
    {"conv_f32_128", "16x16x16", conv_fused, ROCQ_F32, 128, 2},
    {"conv_f16_64", "16x16x16", conv, ROCQ_F16, 64, 2},
    {"conv_f16_16", "16x16x16", conv, ROCQ_F16, 3, 2},
    {"norm_stats", "element", norm_stats, ROCQ_F16, 128, 1},
    {"matmul_backward_f16", "16x16x16", matmul_backward, ROCQ_F16, 0, 2},
    {"matmul_backward_f16", "16x16x16", matmul_backward, ROCQ_F16, 1, 2},
    {"experts_int8_q4_K", "weight", experts, ROCQ_Q4_K, 0, 2},
    {"experts_int8_q6_K", "weight", experts, ROCQ_Q6_K, 1, 2},
    {"experts_int8_mxfp4", "weight", experts, ROCQ_MXFP4, 0, 2},
    {"experts_int8_mxfp4", "weight", experts, ROCQ_MXFP4, 1, 2},
    {"matmul_experts_q4_K_32", "16x16x16", experts_prompt, ROCQ_Q4_K, 0, 2},
    {"matmul_experts_q6_K_32", "16x16x16", experts_prompt, ROCQ_Q6_K, 1, 2},
    {"experts_sort", "element", experts_prompt, ROCQ_Q4_K, 2, 1},
    {"experts_merge", "element", experts_prompt, ROCQ_Q4_K, 3, 1},
    {"route", "element", route, 0, 0, 1},
    {"router", "weight", router, 0, 0, 2},
    {"shortconv", "element", shortconv, 0, 0, 1},
    {"delta_step", "element", delta_net, 0, 1, 2},
    {"delta_net", "element", delta_net, 0, 16, 2},
};

// ---------------------------------------------------------------------------------------------
// What the harness calls
// ---------------------------------------------------------------------------------------------

const char *emulate_case(int i, const char **unit, int *scales) { // NULL past the last
    if (i < 0 || i >= (int)(sizeof cases / sizeof cases[0])) return NULL;
    *unit = cases[i].unit;
    *scales = cases[i].scales;
    return cases[i].kernel;
}

// NULL, or what went wrong. The device is cut to 2 of 96 compute units and their share of
// bandwidth, so that small operands are spread as large ones are over all.
const char *emulate_open(const simt_elsewhere *h, const char *code_object) {
    const rocq_desc host_desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1};
    const rocq_desc desc = {
        .prefer = ROCQ_BACKEND_GPU, .kernels_path = code_object, .dispatch_us = -1};
    host = *h;
    if (rocq_open(&cpu, &host_desc) != ROCQ_OK) return "no CPU context";
    if (rocq_open(&gpu, &desc) != ROCQ_OK) {
        rocq_info info;
        const rocq_desc any = {.kernels_path = code_object};
        if (rocq_open(&gpu, &any) == ROCQ_OK && rocq_get_info(gpu, &info) == ROCQ_OK) {
            return info.gpu_message;
        }
        return "no context";
    }
    if (rocq_warm(gpu, NULL) != ROCQ_OK) return "a kernel without work does something";
    gpu->gpu->chip.n_units = 2;
    gpu->gpu->chip.bytes_per_us /= 48;
    gpu->gpu->chip.matrix_per_us /= 48;
    return NULL;
}

const char *emulate_run(int i, int scale, emulated *e) {
    memset(e, 0, sizeof *e);
    failure[0] = 0;
    random_state = (uint64_t)i + 1;
    if (setjmp(failed) == 0) cases[i].run(e, scale, cases[i].format, cases[i].p);
    release();
    if (!failure[0] && !(e->nmse <= e->bound)) {
        snprintf(failure, sizeof failure, "NMSE %.3g over %.3g", e->nmse, e->bound);
    }
    return failure[0] ? failure : NULL;
}
