// perplexity.c - how well a GGUF model predicts a text: perplexity per token, bits per byte.
//
//     cc -O2 examples/perplexity.c -o perplexity -lm -ldl -lpthread    # with libstb-dev, see ds.h
//     ./perplexity model.gguf text.txt
//     ./perplexity model.gguf texts.txt --documents    empty lines separate texts of their own
//     ./perplexity model.gguf text.txt --device gpu --kernels rocq_kernels.co
//
// Bits per byte compare models with different vocabularies. Each token counts once, in a window
// that holds at least half a context of the text before it; only a text's first window begins
// without. Where the vocabulary asks for it a token of its own (BOS) begins the text; elsewhere the
// first token, which nothing predicts, is not counted.

#define ROCQ_IMPLEMENTATION
#define ROCQ_STATIC // ops that are not called are not compiled
#define PROGRAM "perplexity"
#include "../rocq.h"

#include "program.h"

#include "llama.h"
#include "tokenizer.h"

typedef struct job {
    const char *model_path, *text_path, *kv, *kernels;
    rocq_backend device;
    bool documents;
    int32_t n_ctx;
    rocq_ctx *ctx;
    rocq_gguf *file;
    llama_model model;
    tokenizer tok;
    int32_t *ids; // this and text are arrays of stb_ds's
    char *text;
    float *logits;       // [n_vocab, n_batch]
    double nats;         // sum of -ln p
    int64_t n_tokens, n_bytes;
} job;

static bool read_text(job *j) {
    char part[1 << 16];
    FILE *in = fopen(j->text_path, "rb");
    if (!in) return fail(j->text_path, "cannot be opened");
    for (size_t n; (n = fread(part, 1, sizeof part, in)) > 0;) {
        memcpy(arraddnptr(j->text, n), part, n);
    }
    const bool whole = feof(in) != 0;
    fclose(in);
    return whole || fail(j->text_path, "cannot be read");
}

// -ln of the probability that logits give to the token.
static double surprise(const float *logits, int32_t n_vocab, int32_t token) {
    double sum = 0, top = (double)logits[0];
    for (int32_t i = 1; i < n_vocab; i++) top = (double)logits[i] > top ? (double)logits[i] : top;
    for (int32_t i = 0; i < n_vocab; i++) sum += exp((double)logits[i] - top);
    return top + log(sum) - (double)logits[token];
}

// Evaluates ids[begin, end) as one window, and counts the tokens from number `count` on.
static bool window(job *j, int64_t begin, int64_t end, int64_t count) {
    llama_model *m = &j->model;
    m->n_past = 0;
    for (int64_t at = begin; at < end; at += m->n_batch) {
        const int64_t n = end - at < m->n_batch ? end - at : m->n_batch;
        if (llama_eval(m, j->ids + at, n, j->logits) != ROCQ_OK) {
            return fail(j->model_path, m->error);
        }
        for (int64_t i = 0; i < n; i++) { // position at + i predicts the token after it
            const int64_t next = at + i + 1;
            if (next < count || next >= end) continue;
            const double nats = surprise(j->logits + i * m->n_vocab, m->n_vocab, j->ids[next]);
            if (!isfinite(nats)) return fail(j->model_path, "gives logits that are not finite");
            j->nats += nats;
            j->n_tokens++;
        }
    }
    return true;
}

static bool measure(job *j, const char *text, int64_t length) {
    arrsetlen(j->ids, 0);
    if (tokenizer_encode(&j->tok, &j->ids, text, length, true, false) != ROCQ_OK) {
        return fail(j->text_path, j->tok.error);
    }
    j->n_bytes += length;
    for (int64_t done = 1;
         done < arrlen(j->ids);) { // those before it are counted, or never will be
        const int64_t n_ctx = j->model.n_ctx, before = done < n_ctx / 2 ? done : n_ctx / 2;
        const int64_t begin = done - before;
        const int64_t end = begin + n_ctx < arrlen(j->ids) ? begin + n_ctx : arrlen(j->ids);
        if (!window(j, begin, end, done)) return false;
        done = end;
    }
    return true;
}

static bool run(job *j) {
    const rocq_desc desc = {.prefer = j->device, .kernels_path = j->kernels};
    const rocq_gguf_desc source = {.path = j->model_path};
    const llama_options options = {.n_ctx = j->n_ctx, .n_logits = 128, .kv_format = j->kv};
    if (!read_text(j)) return false;
    if (!open_device(&j->ctx, desc)) return false;
    if (rocq_gguf_open(j->ctx, &j->file, &source) != ROCQ_OK) {
        return fail(j->model_path, rocq_error(j->ctx));
    }
    if (tokenizer_open(&j->tok, j->file) != ROCQ_OK) return fail(j->model_path, j->tok.error);
    if (llama_open(&j->model, j->ctx, j->file, &options) != ROCQ_OK) {
        return fail(j->model_path, j->model.error);
    }
    if (j->model.n_ctx > j->model.n_ctx_train) {
        fprintf(stderr, "perplexity: -c %d: the model was trained on texts of %d tokens\n",
                (int)j->model.n_ctx, (int)j->model.n_ctx_train);
    }
    const size_t n_logits = (size_t)j->model.n_batch * (size_t)j->model.n_vocab;
    j->logits = (float *)malloc(n_logits * sizeof(float));
    if (!j->logits) return fail("logits", "no memory");
    const int64_t length = arrlen(j->text);
    for (int64_t at = 0, end; at < length; at = end + 2) {
        for (end = at; end < length; end++) {
            if (j->documents && end + 1 < length && memcmp(j->text + end, "\n\n", 2) == 0) break;
        }
        if (!measure(j, j->text + at, end - at)) return false;
    }
    if (j->n_tokens == 0) return fail(j->text_path, "there is no token to predict");
    const double perplexity = exp(j->nats / (double)j->n_tokens);
    if (!isfinite(perplexity)) return fail(j->model_path, "has a perplexity beyond all numbers");
    printf("%.4f bits per byte, perplexity %.4f (%.0f tokens, %.0f bytes)\n",
           j->nats / log(2.0) / (double)j->n_bytes, perplexity, (double)j->n_tokens,
           (double)j->n_bytes);
    // What was printed may still not have arrived: on a full disk, or where stdout is closed.
    return (!ferror(stdout) && fclose(stdout) == 0) || fail("stdout", "cannot be written");
}

// A number of 2 to a billion in digits alone, or 0.
static int32_t parse_context(const char *text) {
    const bool digits = *text && text[strspn(text, "0123456789")] == '\0';
    const double x = digits ? strtod(text, NULL) : 0;
    return x >= 2 && x <= 1e9 ? (int32_t)x : 0;
}

int main(int argc, char **argv) {
    static job j; // zeroed
    static const char *const devices[] = {"auto", "cpu", "gpu"}; // in the order of rocq_backend
    const bool help = argc == 2 && strcmp(argv[1], "--help") == 0;
    bool good = argc >= 3;
    j.kernels = getenv("ROCQ_KERNELS");
    for (int i = 3; i < argc && good; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--documents") == 0) j.documents = true;
        else if (strcmp(argv[i], "-c") == 0) {
            j.n_ctx = parse_context(value);
            good = j.n_ctx != 0;
            i++;
        } else if (strcmp(argv[i], "--kv") == 0 && *value) j.kv = argv[++i];
        else if (strcmp(argv[i], "--kernels") == 0 && *value) j.kernels = argv[++i];
        else if (strcmp(argv[i], "--device") == 0) {
            int device = 0;
            while (device < 3 && strcmp(value, devices[device]) != 0) device++;
            good = device < 3;
            j.device = (rocq_backend)device;
            i++;
        } else good = false;
    }
    if (!good) {
        fprintf(help ? stdout : stderr,
                "usage: perplexity model.gguf text.txt [--documents] [-c context]"
                " [--kv f32|f16|bf16|q8_0|q4_0] [--device auto|cpu|gpu] [--kernels file]\n");
        if (help && fclose(stdout) != 0) fail("stdout", "cannot be written");
        else if (help) return 0;
        return 1;
    }
    j.model_path = argv[1];
    j.text_path = argv[2];
    good = run(&j);
    free(j.logits);
    arrfree(j.text);
    arrfree(j.ids);
    tokenizer_close(&j.tok);
    llama_close(&j.model);
    rocq_gguf_close(&j.file);
    rocq_close(&j.ctx);
    return good ? 0 : 1;
}
