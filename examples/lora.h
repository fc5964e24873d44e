// lora.h - reads low-rank adapters (LoRA, arXiv 2106.09685) from GGUF files in llama.cpp's
// convention, on rocq.h. An adapter adds scale B (A x) to the product w x of some weights:
//
//     general.type "adapter", adapter.type "lora", general.architecture as the model's
//     adapter.lora.alpha   scale = what the user asks for, times alpha / rank if alpha is not 0
//     <weight>.lora_a      [in, rank]; <weight> is the name of a tensor [in, out] of the model
//     <weight>.lora_b      [rank, out]

#ifndef LORA_H
#define LORA_H

#include "../rocq.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct lora_pair { // what a file has for one weight
    rocq_gguf_tensor a, b;
    int64_t rank;      // 0: nothing
    float scale;       // alpha / rank, or 1
} lora_pair;

// Writes to error, of 512 bytes, one line that says why.
static rocq_result lora_fail(char *error, rocq_result result, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(error, 512, format, args);
    va_end(args);
    rocq_message_clean(error, 512);
    return result;
}

// "FILE:X" or "FILE" of a command line: copies FILE to path and returns X, or 1.
static inline float lora_option(const char *text, char *path, size_t size) {
    const char *colon = strrchr(text, ':');
    char *end = NULL;
    const double scale = colon ? strtod(colon + 1, &end) : 1;
    const bool scaled = colon && end > colon + 1 && *end == '\0';
    snprintf(path, size, "%.*s", scaled ? (int)(colon - text) : (int)strlen(text), text);
    return scaled ? (float)scale : 1.0f;
}

// Whether the file is an adapter for models of this family (general.architecture).
static inline rocq_result lora_check(const rocq_gguf *file, rocq_str family, char *error) {
    const struct {
        const char *key;
        rocq_str want;
    } keys[] = {{"general.type", {"adapter", 7}}, {"adapter.type", {"lora", 4}},
                {"general.architecture", family}};
    rocq_str is;
    double alpha;
    for (int i = 0; i < 3; i++) {
        if (rocq_gguf_get_str(file, keys[i].key, &is) != ROCQ_OK) {
            return lora_fail(error, ROCQ_E_NOT_FOUND, "is no adapter: it has no %s", keys[i].key);
        }
        if (is.length == keys[i].want.length &&
            memcmp(is.data, keys[i].want.data, (size_t)is.length) == 0) continue;
        return lora_fail(error, ROCQ_E_UNSUPPORTED, "is no adapter for this model: %s is \"%.*s\", "
                         "not \"%.*s\"", keys[i].key, (int)(is.length < 64 ? is.length : 64),
                         is.data, (int)(keys[i].want.length < 64 ? keys[i].want.length : 64),
                         keys[i].want.data);
    }
    if (rocq_gguf_get_f64(file, "adapter.lora.alpha", &alpha) != ROCQ_OK ||
        !(alpha > -1e30 && alpha < 1e30)) {
        return lora_fail(error, ROCQ_E_NOT_FOUND, "is no adapter: it has no adapter.lora.alpha");
    }
    return ROCQ_OK;
}

// What a file that lora_check has accepted has for a weight [in, out] of this name.
static inline rocq_result lora_find(const rocq_gguf *file, const char *weight, int64_t in,
                                    int64_t out, lora_pair *pair, char *error) {
    char name[2][264];
    double alpha = 0;
    memset(pair, 0, sizeof *pair);
    snprintf(name[0], sizeof name[0], "%s.lora_a", weight);
    snprintf(name[1], sizeof name[1], "%s.lora_b", weight);
    const bool has_a = rocq_gguf_find_tensor(file, name[0], &pair->a) == ROCQ_OK;
    const bool has_b = rocq_gguf_find_tensor(file, name[1], &pair->b) == ROCQ_OK;
    if (!has_a && !has_b) return ROCQ_OK;
    if (!has_a || !has_b) {
        return lora_fail(error, ROCQ_E_NOT_FOUND, "tensor %s is missing", name[has_a]);
    }
    const int64_t rank = pair->a.ne[1];
    for (int i = 0; i < 2; i++) {
        const rocq_gguf_tensor *t = i == 0 ? &pair->a : &pair->b;
        const int64_t cols = i == 0 ? in : rank, rows = i == 0 ? rank : out;
        if (t->ne[0] != cols || t->ne[1] != rows || t->ne[2] != 1 || t->ne[3] != 1) {
            return lora_fail(error, ROCQ_E_SHAPE, "is no adapter for this model: tensor %s is %.0f "
                             "x %.0f, expected %.0f x %.0f", name[i], (double)t->ne[0],
                             (double)t->ne[1], (double)cols, (double)rows);
        }
        if (!t->known || t->format == ROCQ_I32) {
            return lora_fail(error, ROCQ_E_FORMAT, "tensor %s has the type %s (id %u), which "
                             "cannot be used here", name[i], t->type_name, (unsigned)t->type_id);
        }
    }
    rocq_gguf_get_f64(file, "adapter.lora.alpha", &alpha);
    pair->rank = rank;
    pair->scale = alpha != 0 ? (float)(alpha / (double)rank) : 1.0f;
    return ROCQ_OK;
}

// The values of a tensor, of which bytes has room for the file's form: t->size.
static inline rocq_result lora_read(rocq_ctx *ctx, const rocq_gguf *file, const rocq_gguf_tensor *t,
                             void *bytes, float *values) {
    const rocq_result result = rocq_gguf_read(ctx, file, t, bytes);
    return result ? result : rocq_dequantize(t->format, values, bytes, t->ne[0] * t->ne[1]);
}

#endif // LORA_H
