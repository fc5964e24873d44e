// quantize.c - re-encodes the weights of a GGUF file.
//
//     cc -O2 examples/quantize.c -o quantize -lm -ldl -lpthread
//     ./quantize model-f32.gguf model-q4.gguf q4_k_m
//
// The last argument is a format ("q8_0", "q4_k", "f16" ...) for all matrices, or q4_k_m, a mix:
// Q4_K, with Q6_K where it counts most: for the output matrix, and for attn_v and ffn_down of about
// half of the layers. Vectors and norms are F32. A matrix whose rows are no whole number of
// 256-element blocks takes a format of 32-element blocks of about the same precision, or else F16.
// With --lora FILE[:X], which may be given several times, adapters (LoRA, see lora.h) are merged:
// to each weight, decoded to F32, X times what the adapter adds is added before it is encoded
// again, so that in a quantized format some of it is lost to rounding. The model then needs no
// adapter and no time for one. With `keep` for a format weights keep theirs, and those without an
// adapter their bytes.
//
//     ./quantize model-q4.gguf merged-q4.gguf keep --lora voice.gguf:0.8
//
// Works on one tensor at a time; memory is bounded by the largest. The output may be the input:
// what is written has another name, out.gguf.part, until it is whole, and then takes the place of
// what is there in one step (rocq_file_open). On any failure, and after Ctrl-C, out.gguf is as it
// was.

#define ROCQ_IMPLEMENTATION
#define ROCQ_STATIC // ops that are not called are not compiled
#define PROGRAM "quantize"
#include "../rocq.h"

#include "program.h"

#include "lora.h"

enum { MAX_LORAS = 8 };

typedef struct adapter {
    char path[1024];
    float scale;
    rocq_gguf *file;
} adapter;

typedef struct job {
    const char *in_path, *out_path;
    bool mix;           // q4_k_m
    bool keep;          // each tensor's own format
    rocq_format format; // else
    adapter adapters[MAX_LORAS];
    int n_adapters;
    rocq_buffer lora_file, lora; // a tensor as in its file; all that one weight has, in F32
    rocq_ctx *ctx;
    rocq_gguf *in;
    rocq_gguf_writer *out;
    rocq_file *out_file; // where out writes to
    int32_t n_layers;
    bool tied;                   // there is no output matrix: the embedding serves
    rocq_buffer before, after;   // the largest tensor, as it was and as it will be
    rocq_buffer row, row_after;  // the longest row, in F32
    int64_t bytes_before, bytes_after;
} job;

// A failed call's message, or its meaning where the call has no context to keep one.
static bool check(const job *j, const char *what, rocq_result result) {
    if (result == ROCQ_OK) return true;
    const char *why = rocq_error(j->ctx);
    return fail(what, *why ? why : rocq_result_message(result));
}

// The same for a call that writes the output. Where a write failed only the file knows why:
// rocq_file_close, though asked to keep it, then throws it away and gives the reason.
static bool check_written(job *j, rocq_result result) {
    if (result == ROCQ_E_IO) result = rocq_file_close(&j->out_file, true);
    return check(j, j->out_path, result);
}

// What was printed may still not have arrived: on a full disk, or where stdout is closed.
static bool check_printed(void) {
    const bool good = fflush(stdout) == 0 && !ferror(stdout);
    return good || fail("stdout", "cannot be written");
}

// The format for rows that a format of 256-element blocks does not fit.
static rocq_format fit(rocq_format format, int64_t n_per_row) {
    if (n_per_row % rocq_get_format_info(format)->block_elems == 0) return format;
    switch (format) {
    case ROCQ_Q2_K: case ROCQ_Q3_K: case ROCQ_IQ4_XS: format = ROCQ_IQ4_NL; break;
    case ROCQ_Q4_K: format = ROCQ_Q5_0; break;
    case ROCQ_Q5_K: format = ROCQ_Q5_1; break;
    case ROCQ_Q6_K: format = ROCQ_Q8_0; break;
    default: return ROCQ_F16;
    }
    return n_per_row % 32 == 0 ? format : ROCQ_F16;
}

// The first and last eighth of the layers, and every third between.
static bool layer_counts_more(int32_t layer, int32_t n_layers) {
    const int32_t eighth = n_layers / 8;
    return layer < eighth || layer >= 7 * n_layers / 8 || (layer - eighth) % 3 == 2;
}

static void copy_name(char name[256], const rocq_gguf_tensor *t) {
    snprintf(name, 256, "%.*s", (int)(t->name.length < 255 ? t->name.length : 255), t->name.data);
}

static rocq_format choose(const job *j, const rocq_gguf_tensor *t) {
    char name[256];
    int layer = -1;
    copy_name(name, t);
    if (t->format == ROCQ_I32 || t->format == ROCQ_I8 || j->keep) return t->format;
    if (t->n_dims < 2 || strstr(name, "norm")) return ROCQ_F32;
    // Routers, which choose experts, and the experts' biases, which are a matrix.
    if (strstr(name, "ffn_gate_inp") || strstr(name, ".bias")) return ROCQ_F32;
    if (!j->mix) return fit(j->format, t->ne[0]);
    const bool output = strcmp(name, j->tied ? "token_embd.weight" : "output.weight") == 0;
    const bool candidate = strstr(name, "attn_v.") || strstr(name, "ffn_down");
    if (candidate && sscanf(name, "blk.%d.", &layer) != 1) layer = -1;
    const bool more = output || (layer >= 0 && layer_counts_more(layer, j->n_layers));
    return fit(more ? ROCQ_Q6_K : ROCQ_Q4_K, t->ne[0]);
}

// llama.cpp's number for general.file_type, or -1.
static int file_type(const job *j) {
    if (j->keep) return -1;
    if (j->mix) return 15;
    switch (j->format) {
    case ROCQ_F32: return 0;
    case ROCQ_F16: return 1;
    case ROCQ_Q4_0: return 2;
    case ROCQ_Q4_1: return 3;
    case ROCQ_Q8_0: return 7;
    case ROCQ_Q5_0: return 8;
    case ROCQ_Q5_1: return 9;
    case ROCQ_Q2_K: return 10;
    case ROCQ_Q3_K: return 12;
    case ROCQ_Q4_K: return 14;
    case ROCQ_Q5_K: return 16;
    case ROCQ_Q6_K: return 18;
    case ROCQ_IQ4_NL: return 25;
    case ROCQ_IQ4_XS: return 30;
    case ROCQ_BF16: return 32;
    case ROCQ_MXFP4: return 38;
    default: return -1;
    }
}

// What the adapters have for a weight.
static bool find_pairs(const job *j, const rocq_gguf_tensor *t, lora_pair pairs[MAX_LORAS]) {
    char name[256], error[512];
    copy_name(name, t);
    for (int i = 0; i < j->n_adapters; i++) {
        if (lora_find(j->adapters[i].file, name, t->ne[0], t->ne[1], &pairs[i], error) != ROCQ_OK) {
            return fail(j->adapters[i].path, error);
        }
        if (pairs[i].rank > 0 && (t->ne[2] != 1 || t->ne[3] != 1)) {
            snprintf(error, sizeof error, "is for %s, which has more than two dimensions", name);
            return fail(j->adapters[i].path, error);
        }
    }
    return true;
}

// Opens the adapters, and checks that all of each is for weights of the model.
static bool open_adapters(job *j, rocq_str family) {
    int64_t n_found[MAX_LORAS] = {0}, file = 1, floats = 1;
    lora_pair pairs[MAX_LORAS];
    rocq_gguf_tensor t;
    char error[512];
    for (int i = 0; i < j->n_adapters; i++) {
        adapter *a = &j->adapters[i];
        const rocq_gguf_desc source = {.path = a->path};
        if (same_file(a->path, j->out_path)) return fail(a->path, "would be written over");
        if (!(a->scale > -1e30f && a->scale < 1e30f)) {
            return fail(a->path, "its scale is not between -1e30 and 1e30");
        }
        if (!check(j, a->path, rocq_gguf_open(j->ctx, &a->file, &source))) return false;
        if (lora_check(a->file, family, error) != ROCQ_OK) return fail(a->path, error);
    }
    for (int64_t k = 0; j->n_adapters > 0 && k < rocq_gguf_tensor_count(j->in); k++) {
        int64_t all = 0;
        if (!check(j, j->in_path, rocq_gguf_tensor_at(j->in, k, &t))) return false;
        if (!find_pairs(j, &t, pairs)) return false;
        for (int i = 0; i < j->n_adapters; i++) {
            if (pairs[i].rank == 0) continue;
            n_found[i] += 2;
            all += pairs[i].rank * (t.ne[0] + t.ne[1]);
            if (pairs[i].a.size > file) file = pairs[i].a.size;
            if (pairs[i].b.size > file) file = pairs[i].b.size;
        }
        if (all > floats) floats = all;
    }
    for (int i = 0; i < j->n_adapters; i++) {
        if (n_found[i] == rocq_gguf_tensor_count(j->adapters[i].file)) continue;
        return fail(j->adapters[i].path, "is no adapter for this model: it has tensors for others");
    }
    floats *= (int64_t)sizeof(float);
    return check(j, "memory", rocq_buffer_alloc(j->ctx, &j->lora_file, file)) &&
           check(j, "memory", rocq_buffer_alloc(j->ctx, &j->lora, floats));
}

// Reads a weight's adapters: of each A, then B. *any: whether there are some.
static bool read_adapters(job *j, const rocq_gguf_tensor *t, lora_pair pairs[MAX_LORAS],
                          bool *any) {
    float *to = (float *)j->lora.host;
    *any = false;
    if (!find_pairs(j, t, pairs)) return false;
    for (int i = 0; i < j->n_adapters; i++) {
        const lora_pair *p = &pairs[i];
        const adapter *from = &j->adapters[i];
        if (p->rank == 0) continue;
        *any = true;
        if (!check(j, from->path, lora_read(j->ctx, from->file, &p->a, j->lora_file.host, to)) ||
            !check(j, from->path, lora_read(j->ctx, from->file, &p->b, j->lora_file.host,
                                            to + p->rank * t->ne[0]))) return false;
        to += p->rank * (t->ne[0] + t->ne[1]);
    }
    return true;
}

// Adds what they add to row m of the weight, x.
static void merge_row(const job *j, const rocq_gguf_tensor *t, const lora_pair pairs[MAX_LORAS],
                      int64_t m, float *x) {
    const float *from = (const float *)j->lora.host;
    for (int i = 0; i < j->n_adapters; i++) {
        const int64_t rank = pairs[i].rank;
        const float *b = from + rank * t->ne[0] + m * rank;
        for (int64_t r = 0; r < rank; r++) {
            const float factor = j->adapters[i].scale * pairs[i].scale * b[r];
            for (int64_t k = 0; k < t->ne[0]; k++) x[k] += factor * from[r * t->ne[0] + k];
        }
        from += rank * (t->ne[0] + t->ne[1]);
    }
}

// Reads the input's directory and lays out the output's.
static bool plan(job *j) {
    const rocq_gguf_desc source = {.path = j->in_path};
    rocq_gguf_tensor t;
    rocq_str family = {"", 0};
    int64_t n_layers = 0, before = 1, after = 1, row = 1;
    char key[128];
    if (!check(j, j->in_path, rocq_gguf_open(j->ctx, &j->in, &source))) return false;
    if (rocq_gguf_get_str(j->in, "general.architecture", &family) == ROCQ_OK &&
        family.length < 64) {
        snprintf(key, sizeof key, "%.*s.block_count", (int)family.length, family.data);
        rocq_gguf_get_i64(j->in, key, &n_layers);
    }
    j->n_layers = n_layers > 0 && n_layers < 1 << 20 ? (int32_t)n_layers : 0;
    j->tied = rocq_gguf_find_tensor(j->in, "output.weight", &t) != ROCQ_OK;
    if (!open_adapters(j, family)) return false;

    if (!check(j, j->out_path, rocq_file_open(j->ctx, &j->out_file, j->out_path))) return false;
    const rocq_gguf_writer_desc target = {.write = rocq_file_write, .user = j->out_file};
    rocq_result result = rocq_gguf_writer_open(j->ctx, &j->out, &target);
    if (result == ROCQ_OK) result = rocq_gguf_writer_set_from(j->out, j->in);
    if (result == ROCQ_OK) {
        result = rocq_gguf_writer_set_u32(j->out, "general.quantization_version", 2);
    }
    if (result == ROCQ_OK && file_type(j) >= 0) {
        result = rocq_gguf_writer_set_u32(j->out, "general.file_type", (uint32_t)file_type(j));
    }
    if (!check(j, j->out_path, result)) return false;
    for (int64_t i = 0; i < rocq_gguf_tensor_count(j->in); i++) {
        char name[256];
        int64_t n_bytes, n_rows;
        if (!check(j, j->in_path, rocq_gguf_tensor_at(j->in, i, &t))) return false;
        copy_name(name, &t);
        if (!t.known) return fail(name, "has an unknown format");
        const rocq_format format = choose(j, &t);
        result = rocq_row_size(format, t.ne[0], &n_bytes);
        if (result == ROCQ_OK) {
            result = rocq_gguf_writer_add_tensor(j->out, name, format, t.n_dims, t.ne);
        }
        if (!check(j, name, result)) return false;
        n_rows = t.ne[1] * t.ne[2] * t.ne[3]; // the reader has checked that the product fits
        if (t.size > before) before = t.size;
        if (n_bytes * n_rows > after) after = n_bytes * n_rows;
        if (t.ne[0] > row) row = t.ne[0];
    }
    row *= (int64_t)sizeof(float);
    return check(j, "memory", rocq_buffer_alloc(j->ctx, &j->before, before)) &&
           check(j, "memory", rocq_buffer_alloc(j->ctx, &j->after, after)) &&
           check(j, "memory", rocq_buffer_alloc(j->ctx, &j->row, row)) &&
           check(j, "memory", rocq_buffer_alloc(j->ctx, &j->row_after, row));
}

// Re-encodes row by row, decodes the result again, and prints a line on what became of the tensor.
static bool convert(job *j, const rocq_gguf_tensor *t) {
    const rocq_format format = choose(j, t);
    const int64_t n = t->ne[0], n_rows = t->ne[1] * t->ne[2] * t->ne[3];
    unsigned char *from = (unsigned char *)j->before.host, *to = (unsigned char *)j->after.host;
    float *x = (float *)j->row.host, *y = (float *)j->row_after.host;
    double error = 0, power = 0;
    int64_t from_bytes = 0, to_bytes = 0;
    char name[256], shape[64];
    lora_pair pairs[MAX_LORAS];
    bool merges = false;
    copy_name(name, t);
    if (!check(j, name, rocq_gguf_read(j->ctx, j->in, t, from)) ||
        !check(j, name, rocq_row_size(t->format, n, &from_bytes)) ||
        !check(j, name, rocq_row_size(format, n, &to_bytes)) ||
        !read_adapters(j, t, pairs, &merges)) return false;
    const bool encodes = format != t->format || merges;
    if (!encodes) memcpy(to, from, (size_t)(to_bytes * n_rows));
    for (int64_t i = 0; encodes && i < n_rows; i++) {
        if (stopped) return false;
        if (!check(j, name, rocq_dequantize(t->format, x, from + i * from_bytes, n))) return false;
        if (merges) merge_row(j, t, pairs, i, x);
        if (!check(j, name, rocq_quantize(format, to + i * to_bytes, x, 1, n, NULL)) ||
            !check(j, name, rocq_dequantize(format, y, to + i * to_bytes, n))) return false;
        for (int64_t k = 0; k < n; k++) {
            error += ((double)y[k] - (double)x[k]) * ((double)y[k] - (double)x[k]);
            power += (double)x[k] * (double)x[k];
        }
    }
    snprintf(shape, sizeof shape, "%.0f x %.0f", (double)n, (double)n_rows);
    printf("%-32s %16s  %-10s  %-10s  %8.5f  %12.0f\n", name, shape,
           rocq_format_name(t->format), rocq_format_name(format),
           power > 0 ? sqrt(error / power) : 0.0, (double)(to_bytes * n_rows));
    j->bytes_before += t->size;
    j->bytes_after += to_bytes * n_rows;
    return check_printed() &&
           check_written(j, rocq_gguf_writer_write(j->out, to, to_bytes * n_rows));
}

static bool quantize(job *j) {
    rocq_gguf_tensor t;
    if (!plan(j)) return false;
    printf("%-32s %16s  %-10s  %-10s  %8s  %12s\n", "tensor", "shape", "from", "to", "error",
           "bytes");
    for (int64_t i = 0; i < rocq_gguf_tensor_count(j->in); i++) {
        if (!check(j, j->in_path, rocq_gguf_tensor_at(j->in, i, &t))) return false;
        if (stopped || !convert(j, &t)) return false;
    }
    printf("%.0f bytes of weights become %.0f (%.1f%%); errors are root mean square, relative\n",
           (double)j->bytes_before, (double)j->bytes_after,
           j->bytes_before > 0 ? 100 * (double)j->bytes_after / (double)j->bytes_before : 0.0);
    // All that can fail has come before the output takes its place, for which Windows wants the
    // input closed: it may be the same file.
    const bool written = check_written(j, rocq_gguf_writer_close(&j->out));
    if (!written || !check_printed() || stopped) return false;
    for (int i = 0; i < j->n_adapters; i++) rocq_gguf_close(&j->adapters[i].file);
    rocq_gguf_close(&j->in);
    return check(j, j->out_path, rocq_file_close(&j->out_file, true));
}

// in out format, then any number of --lora FILE[:X]
static bool parse(job *j, int argc, char **argv) {
    if (argc < 4 || argc % 2 != 0 || argc > 4 + 2 * MAX_LORAS) return false;
    j->mix = strcmp(argv[3], "q4_k_m") == 0 || strcmp(argv[3], "Q4_K_M") == 0;
    j->keep = strcmp(argv[3], "keep") == 0;
    const bool all = !j->mix && !j->keep;
    if (all && rocq_format_from_name(&j->format, argv[3]) != ROCQ_OK) return false;
    if (all && j->format == ROCQ_I32) return false;
    if (all && rocq_quantize(j->format, NULL, NULL, 0, 256, NULL) != ROCQ_OK) {
        return fail(argv[3], "is only read, not written");
    }
    for (int i = 4; i < argc; i += 2) {
        adapter *a = &j->adapters[j->n_adapters++];
        if (strcmp(argv[i], "--lora") != 0) return false;
        a->scale = lora_option(argv[i + 1], a->path, sizeof a->path);
    }
    return true;
}

int main(int argc, char **argv) {
    static job j; // zeroed
    const bool help = argc == 2 && strcmp(argv[1], "--help") == 0;
    if (help || !parse(&j, argc, argv)) {
        fprintf(help ? stdout : stderr,
                "usage: quantize in.gguf out.gguf q4_k_m|keep|FORMAT [--lora FILE[:X]]...\n"
                "formats: f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 q8_0 q2_k q3_k q4_k q5_k q6_k"
                " iq4_nl iq4_xs mxfp4\n");
        return help && close_streams() ? 0 : 1;
    }
    j.in_path = argv[1];
    j.out_path = argv[2];
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU};
    if (rocq_open(&j.ctx, &desc) != ROCQ_OK) return fail("rocq", "cannot start") ? 0 : 1;
    catch_signals();
    const bool good = quantize(&j);
    if (j.out) rocq_gguf_writer_close(&j.out);
    if (j.out_file) rocq_file_close(&j.out_file, false);
    for (int i = 0; i < j.n_adapters; i++) rocq_gguf_close(&j.adapters[i].file);
    rocq_gguf_close(&j.in);
    rocq_close(&j.ctx); // with its buffers
    return end_program(good);
}
