// upload.c - from a file in the page cache to tensors that ops can use: rocq_gguf_load against what
// bounds it and against a first version of it.
//
//     upload [--gb N] [--dir DIR] [options of bench.h]
//
// Writes a file of about N GB (default 0.25, on a GPU 4) that has the tensors of a llama of 7B,
// Q4_0 and Q4_K in turn with F32 norms, into DIR (default /tmp), removes it at the end, and samples
// in turn:
//   load      rocq_gguf_load, with its defaults; load/MxN: with N pieces of M MiB
//   naive     tensor by tensor: one thread reads it into plain memory, a copy by the runtime waits,
//             a repack waits; the memory is there already
//   read      all threads, into as much pinned memory as load takes, the same way
//   read_one  the same with one thread
//   mapped    all threads, copied out of a fresh mapping instead
//   copy      pinned memory to device memory, in pieces of the same size, nothing else
// On the CPU load and naive read into one buffer, and nothing is copied. The tensors that load and
// naive make are verified on sampled rows.
#define ROCQ_IMPLEMENTATION // bare copies and reads are below what rocq.h declares
#include "bench.h"

#include <fcntl.h>
#include <sys/mman.h>

enum { MAX_TENSORS = 1024, ROWS = 16, WIDEST = 11008, PIECE = 8 << 20, RING = 4 * PIECE };

static const struct { int mib, count; } rings[] = { // that load is also measured with
    {2, 6}, {2, 12}, {4, 3}, {4, 5}, {4, 6}, {4, 8}, {8, 3}};
enum { N_RINGS = sizeof rings / sizeof rings[0] };

typedef struct item {
    char name[32];
    rocq_format format;
    int64_t ne[2], size, at; // size and place in the file
} item;

typedef struct state {
    bench *b;
    char path[512];
    double gb;
    rocq_gguf *file;
    item items[MAX_TENSORS];
    int32_t n;
    int64_t total, largest;                 // bytes of all, and of the largest
    int64_t begin, end;                     // where all are in the file
    rocq_tensor loaded[MAX_TENSORS], naive[MAX_TENSORS];
    rocq_buffer buffer;                     // of loaded; empty between runs
    rocq_buffer device, staging, rows, ids; // of naive; its largest tensor; of verify
    unsigned char *plain;                   // [largest]
    unsigned char *ring;                    // [RING], pinned on a GPU
    unsigned char *map;                     // the file
    int64_t map_size;
    int fd;
} state;

static void die_unless(state *s, rocq_result result) {
    if (result == ROCQ_OK) return;
    fprintf(stderr, "upload: %s\n", rocq_error(s->b->ctx));
    remove(s->path);
    exit(1);
}

// ---------------------------------------------------------------------------------------------
// The file
// ---------------------------------------------------------------------------------------------

static void add_item(state *s, const char *name, rocq_format format, int64_t cols, int64_t rows) {
    int64_t row;
    if (s->n == MAX_TENSORS) bench__die("too many tensors");
    item *t = &s->items[s->n++];
    snprintf(t->name, sizeof t->name, "%s", name);
    t->format = format;
    t->ne[0] = cols;
    t->ne[1] = rows;
    rocq_row_size(format, cols, &row);
    t->size = row * rows;
    s->total += t->size;
    if (t->size > s->largest) s->largest = t->size;
}

static void plan_file(state *s) {
    static const struct { const char *name; int cols, rows; } weights[] = { // 0: 1, 1: embd, 2: ff
        {"attn_norm", 1, 0}, {"attn_q", 1, 1}, {"attn_k", 1, 1}, {"attn_v", 1, 1},
        {"attn_output", 1, 1}, {"ffn_norm", 1, 0}, {"ffn_gate", 1, 2}, {"ffn_up", 1, 2},
        {"ffn_down", 2, 1}};
    const int64_t scale = s->b->tiny ? 16 : s->gb < 1 ? 4 : 1;
    const int64_t embd = 4096 / scale, ff = WIDEST / scale / 256 * 256, vocab = 32000 / scale;
    const int64_t sizes[3] = {1, embd, ff};
    char name[32];
    add_item(s, "token_embd.weight", ROCQ_Q4_K, embd, vocab);
    add_item(s, "output.weight", ROCQ_Q6_K, embd, vocab);
    add_item(s, "output_norm.weight", ROCQ_F32, embd, 1);
    for (int i = 0; i == 0 || ((double)s->total < 1e9 * s->gb && s->n < MAX_TENSORS - 9); i++) {
        for (size_t k = 0; k < sizeof weights / sizeof weights[0]; k++) {
            const rocq_format format = i % 2 ? ROCQ_Q4_K : ROCQ_Q4_0;
            snprintf(name, sizeof name, "blk.%d.%s.weight", i, weights[k].name);
            add_item(s, name, weights[k].rows > 0 ? format : ROCQ_F32, sizes[weights[k].cols],
                     sizes[weights[k].rows]);
        }
    }
}

// Some rows of weights are encoded, and repeated in an order that differs from tensor to tensor.
static void write_file(state *s) {
    enum { KINDS = 64 };
    rocq_gguf_writer *writer = NULL;
    const rocq_gguf_writer_desc desc = {.path = s->path};
    float *values = (float *)bench_alloc(KINDS * WIDEST * (int64_t)sizeof *values);
    uint64_t random = 1;
    for (int i = 0; i < KINDS * WIDEST; i++) values[i] = bench_normal(&random);
    die_unless(s, rocq_gguf_writer_open(s->b->ctx, &writer, &desc));
    for (int32_t i = 0; i < s->n; i++) {
        const item *t = &s->items[i];
        const int32_t n_dims = t->ne[1] > 1 ? 2 : 1;
        die_unless(s, rocq_gguf_writer_add_tensor(writer, t->name, t->format, n_dims, t->ne));
    }
    for (int32_t i = 0; i < s->n; i++) {
        const item *t = &s->items[i];
        const int64_t row = t->size / t->ne[1];
        for (int64_t r = 0; r < t->ne[1]; r++) {
            unsigned char *dst = s->plain + r * row;
            const int64_t kind = (int64_t)(bench_random(&random) % KINDS);
            if (r >= KINDS) memcpy(dst, s->plain + kind * row, (size_t)row);
            else rocq_quantize(t->format, dst, values + kind * WIDEST, 1, t->ne[0], NULL);
        }
        die_unless(s, rocq_gguf_writer_write(writer, s->plain, t->size));
    }
    die_unless(s, rocq_gguf_writer_close(&writer));
    free(values);
}

// ---------------------------------------------------------------------------------------------
// What is measured
// ---------------------------------------------------------------------------------------------

static rocq_result done(void *user) { // each run waits for itself
    (void)user;
    return ROCQ_OK;
}

typedef struct load {
    state *s;
    rocq_gguf_load_desc desc;
    char name[32];
} load;

static void load_reset(void *user) { // of whichever load was last: there is memory for one
    state *s = ((load *)user)->s;
    die_unless(s, rocq_buffer_free(s->b->ctx, &s->buffer));
}

static rocq_result load_run(void *user) {
    const load *l = (const load *)user;
    return rocq_gguf_load(l->s->b->ctx, l->s->file, &l->desc, l->s->loaded, &l->s->buffer);
}

// Bytes of the file to memory by the calling thread.
static bool read_plain(const state *s, void *dst, int64_t at, int64_t size) {
    for (int64_t n; size > 0; at += n, size -= n, dst = (char *)dst + n) {
        n = pread(s->fd, dst, (size_t)size, at);
        if (n <= 0) return false;
    }
    return true;
}

static rocq_result naive_run(void *user) {
    state *s = (state *)user;
    rocq_ctx *ctx = s->b->ctx;
    for (int32_t i = 0; i < s->n; i++) {
        const item *t = &s->items[i];
        const rocq_tensor *dst = &s->naive[i];
        void *host = s->b->gpu ? s->plain : rocq_tensor_data(dst);
        if (!read_plain(s, host, t->at, t->size)) return ROCQ_E_IO;
        if (!s->b->gpu) continue;
        const rocq__gpu *gpu = ctx->gpu;
        const bool planar = dst->layout == ROCQ_LAYOUT_PLANAR;
        void *to = planar ? (void *)(uintptr_t)s->staging.device.address : rocq__device_data(dst);
        int error = gpu->hip->copy(to, host, (size_t)t->size, ROCQ_HIP_TO_DEVICE, gpu->stream);
        if (!error) error = gpu->hip->stream_wait(gpu->stream);
        if (error) return rocq__hip_failed(ctx, "naive copy", error);
        if (!planar) continue;
        const rocq_result result = rocq__repack_hip(ctx, dst, to, 0, t->ne[0] * t->ne[1] / 32);
        if (result != ROCQ_OK) return result;
        error = gpu->hip->stream_wait(gpu->stream);
        if (error) return rocq__hip_failed(ctx, "naive repack", error);
    }
    return ROCQ_OK;
}

// All of the tensors' bytes, a piece at a time into the ring.
static rocq_result read_pieces(state *s, const rocq__source *source) {
    for (int64_t at = s->begin, ring = 0, n; at < s->end; at += n, ring += PIECE) {
        n = at + PIECE < s->end ? PIECE : s->end - at;
        if (ring == RING) ring = 0;
        if (source ? !rocq__source_read(s->b->ctx, source, at, n, s->ring + ring, NULL, NULL)
                   : !read_plain(s, s->ring + ring, at, n)) {
            return ROCQ_E_IO;
        }
    }
    return ROCQ_OK;
}

static rocq_result read_run(void *user) {
    state *s = (state *)user;
    return read_pieces(s, &s->file->source);
}

static rocq_result read_one_run(void *user) {
    return read_pieces((state *)user, NULL);
}

static void mapped_reset(void *user) { // so that every page is met for the first time
    state *s = (state *)user;
    if (s->map) munmap(s->map, (size_t)s->map_size);
    s->map = (unsigned char *)mmap(NULL, (size_t)s->map_size, PROT_READ, MAP_PRIVATE, s->fd, 0);
    if (s->map == MAP_FAILED) bench__die("cannot map the file");
}

static rocq_result mapped_run(void *user) {
    state *s = (state *)user;
    const rocq__source source = {.data = s->map};
    return read_pieces(s, &source);
}

static rocq_result copy_run(void *user) {
    state *s = (state *)user;
    const rocq__gpu *gpu = s->b->ctx->gpu;
    int error = 0;
    for (int64_t at = 0, ring = 0, n; at < s->total && !error; at += n, ring += PIECE) {
        n = at + PIECE < s->total ? PIECE : s->total - at;
        if (ring == RING) ring = 0;
        error = gpu->hip->copy((char *)(uintptr_t)s->device.device.address + at, s->ring + ring,
                               (size_t)n, ROCQ_HIP_TO_DEVICE, gpu->stream);
    }
    if (!error) error = gpu->hip->stream_wait(gpu->stream);
    return error ? rocq__hip_failed(s->b->ctx, "copy", error) : ROCQ_OK;
}

// Rows of every tensor, the last one among them, against what the file has there.
static bool tensors_are_right(state *s, const rocq_tensor *tensors) {
    rocq_ctx *ctx = s->b->ctx;
    uint64_t random = 7;
    float *got = (float *)bench_alloc(ROWS * WIDEST * 4), *want = (float *)bench_alloc(WIDEST * 4);
    mapped_reset(s);
    bool right = true;
    for (int32_t i = 0; i < s->n && right; i++) {
        const item *t = &s->items[i];
        const int64_t row = t->size / t->ne[1], ne[2] = {t->ne[0], ROWS};
        int32_t id[ROWS];
        rocq_tensor y, ids;
        for (int r = 0; r < ROWS; r++) {
            id[r] = (int32_t)(bench_random(&random) % (uint64_t)t->ne[1]);
        }
        id[0] = (int32_t)t->ne[1] - 1;
        memset(got, 0xff, (size_t)(ROWS * t->ne[0] * 4));
        die_unless(s, rocq_tensor_init(&y, &s->rows, 0, ROCQ_F32, 2, ne));
        die_unless(s, rocq_tensor_init(&ids, &s->ids, 0, ROCQ_I32, 1, &ne[1]));
        die_unless(s, rocq_upload(ctx, &ids, id, sizeof id));
        const rocq_gather_params gather = {.y = &y, .table = &tensors[i], .ids = &ids};
        die_unless(s, rocq_gather(ctx, &gather));
        die_unless(s, rocq_download(ctx, got, &y, rocq_tensor_size(&y)));
        for (int r = 0; r < ROWS && right; r++) {
            rocq_dequantize(t->format, want, s->map + t->at + id[r] * row, t->ne[0]);
            right = memcmp(want, got + r * t->ne[0], (size_t)t->ne[0] * 4) == 0;
        }
    }
    free(got);
    free(want);
    return right;
}

static bool load_is_right(void *user) {
    state *s = ((load *)user)->s;
    return tensors_are_right(s, s->loaded);
}

static bool naive_is_right(void *user) {
    state *s = (state *)user;
    return tensors_are_right(s, s->naive);
}

// ---------------------------------------------------------------------------------------------
// Set-up and report
// ---------------------------------------------------------------------------------------------

static void *ring_alloc(state *s) {
    void *ring = NULL;
    if (!s->b->gpu) return bench_alloc(RING);
    if (s->b->ctx->gpu->hip->host_alloc(&ring, (size_t)RING, 0) != 0) {
        bench__die("no pinned memory");
    }
    return ring;
}

static void ring_free(state *s, void *ring) {
    if (s->b->gpu) s->b->ctx->gpu->hip->host_free(ring);
    else free(ring);
}

static void set_up(state *s) {
    rocq_ctx *ctx = s->b->ctx;
    const rocq_gguf_desc from = {.path = s->path};
    plan_file(s);
    s->plain = (unsigned char *)bench_alloc(s->largest);
    write_file(s);
    die_unless(s, rocq_gguf_open(ctx, &s->file, &from));
    s->fd = open(s->path, O_RDONLY);
    if (s->fd < 0) bench__die("cannot open the file");
    s->begin = INT64_MAX;
    for (int32_t i = 0; i < s->n; i++) {
        rocq_gguf_tensor found;
        die_unless(s, rocq_gguf_find_tensor(s->file, s->items[i].name, &found));
        s->items[i].at = found.offset;
        if (found.offset < s->begin) s->begin = found.offset;
        if (found.offset + found.size > s->end) s->end = found.offset + found.size;
    }
    s->map_size = s->end;
    s->ring = (unsigned char *)ring_alloc(s);
    memset(s->ring, 0, (size_t)RING);
    for (int i = 0; i < 2; i++) die_unless(s, read_one_run(s)); // into the page cache
    load first = {.s = s, .desc = {.copy = true}}; // where it puts things is where naive does
    die_unless(s, load_run(&first));
    die_unless(s, rocq_buffer_alloc(ctx, &s->device, s->buffer.size));
    if (s->b->gpu) die_unless(s, rocq_buffer_alloc(ctx, &s->staging, s->largest));
    die_unless(s, rocq_buffer_alloc(ctx, &s->rows, ROWS * WIDEST * 4));
    die_unless(s, rocq_buffer_alloc(ctx, &s->ids, ROWS * 4));
    for (int32_t i = 0; i < s->n; i++) {
        s->naive[i] = s->loaded[i];
        s->naive[i].buffer = s->device;
    }
}

// Microseconds until a copy of 4 MiB is seen to be done, and until a fill is that another stream
// begins behind it: the best of 20.
static double handover(state *s, bool other) {
    const rocq__gpu *gpu = s->b->ctx->gpu;
    const rocq_hip *hip = gpu->hip;
    void *stream = NULL, *event[2] = {NULL, NULL},
         *to = (void *)(uintptr_t)s->device.device.address;
    double best = 1e9;
    int error = hip->stream_create(&stream, ROCQ_HIP_NON_BLOCKING);
    for (int i = 0; i < 2; i++) error |= hip->event_create(&event[i], ROCQ_HIP_NO_TIMING);
    for (int i = 0; i < 20 && !error; i++) {
        const double start = bench__now();
        error |= hip->copy(to, s->ring, 4 << 20, ROCQ_HIP_TO_DEVICE, stream);
        error |= hip->event_record(event[0], stream);
        if (other) {
            error |= hip->stream_wait_event(gpu->stream, event[0], 0);
            error |= hip->fill(to, 0, 4096, gpu->stream);
            error |= hip->event_record(event[1], gpu->stream);
        }
        error |= hip->event_wait(event[other]);
        if (bench__now() - start < best) best = bench__now() - start;
    }
    for (int i = 0; i < 2; i++) hip->event_destroy(event[i]);
    hip->stream_destroy(stream);
    if (error) bench__die("the runtime failed");
    return 1e-3 * best;
}

static void measure(state *s) {
    bench *b = s->b;
    const double bytes = (double)s->total;
    enum { LOAD, NAIVE, READ, READ_ONE, MAPPED, COPY, N_CASES };
    load loads[1 + N_RINGS];
    bench_case cases[N_CASES + N_RINGS] = {
        {.name = "upload/load"},
        {.name = "upload/naive", .run = naive_run, .verify = naive_is_right},
        {.name = "upload/read", .run = read_run},
        {.name = "upload/read_one", .run = read_one_run},
        {.name = "upload/mapped", .run = mapped_run, .reset = mapped_reset},
        {.name = "upload/copy", .run = copy_run}};
    const int n = b->gpu ? N_CASES + N_RINGS : COPY;
    for (int i = 0; i <= N_RINGS; i++) { // copy: on the CPU, where all would be views
        bench_case *c = &cases[i == 0 ? LOAD : N_CASES + i - 1];
        loads[i] = (load){.s = s, .desc = {.copy = true}};
        if (i > 0) {
            loads[i].desc.piece_bytes = rings[i - 1].mib << 20;
            loads[i].desc.n_pieces = rings[i - 1].count;
            snprintf(loads[i].name, sizeof loads[i].name, "upload/load/%dx%d", rings[i - 1].mib,
                     rings[i - 1].count);
            c->name = loads[i].name;
        }
        c->run = load_run;
        c->reset = load_reset;
        c->verify = load_is_right;
        c->user = &loads[i];
    }
    for (int i = 0; i < n; i++) {
        cases[i].bytes = bytes;
        cases[i].sync = done;
        cases[i].single = true;
        if (!cases[i].user) cases[i].user = s;
    }
    const bench_result *r = bench_run_pair(b, cases, n);
    if (!r) return;
    const double whole = r[LOAD].summary.median, read = r[READ].summary.median;
    const double copy = b->gpu ? r[COPY].summary.median : 0, slower = read > copy ? read : copy;
    bench_value(b, "upload/gigabytes", bytes * 1e-9, "GB", true);
    bench_value(b, "upload/of_slower", slower / whole, "of the slower of read and copy", true);
    bench_value(b, "upload/over_naive", r[NAIVE].summary.median / whole, "x", true);
    // What of load's time is neither reading nor copying.
    rocq_buffer buffer;
    load_reset(&loads[0]);
    const double start = bench__now();
    die_unless(s, rocq_buffer_alloc(b->ctx, &buffer, s->device.size));
    const double with_buffer = bench__now();
    void *ring = ring_alloc(s);
    const double with_ring = bench__now();
    ring_free(s, ring);
    const double end = bench__now();
    die_unless(s, rocq_buffer_free(b->ctx, &buffer));
    if (b->gpu && b->ctx->gpu->hip->stream_wait_event && s->total > 4 << 20) {
        bench_value(b, "upload/copy_4_mib", handover(s, false), "us until it is seen", true);
        bench_value(b, "upload/handover", handover(s, true), "us until another stream is behind it",
                    true);
    }
    bench_value(b, "upload/make_buffer", 1e-6 * (with_buffer - start), "ms", true);
    bench_value(b, "upload/make_32_mib_pinned", 1e-6 * (with_ring - with_buffer), "ms", true);
    bench_value(b, "upload/free_32_mib_pinned", 1e-6 * (end - with_ring), "ms", true);
}

int main(int argc, char **argv) {
    static state s;
    static bench b;
    const char *dir = "/tmp";
    int n = 1;
    for (int i = 1; i < argc; i++) { // what bench.h does not know is taken out
        const char *option = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(option, "--gb") == 0) s.gb = atof(value), i++;
        else if (strcmp(option, "--dir") == 0) dir = value, i++;
        else argv[n++] = argv[i];
    }
    if (!bench_open(&b, n, argv, "upload")) return 1;
    s.b = &b;
    if (b.tiny || s.gb <= 0) s.gb = b.tiny ? 0.01 : b.gpu ? 4 : 0.25;
    snprintf(s.path, sizeof s.path, "%s/rocq-upload-%ld.gguf", dir, (long)getpid());
    if (bench_wants(&b, "upload/")) {
        set_up(&s);
        measure(&s);
        rocq_gguf_close(&s.file);
        ring_free(&s, s.ring);
        if (s.map) munmap(s.map, (size_t)s.map_size);
        close(s.fd);
        free(s.plain);
        remove(s.path);
    }
    return bench_close(&b);
}
