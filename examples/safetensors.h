// safetensors.h - reads safetensors files (huggingface.co/docs/safetensors), on rocq.h and cJSON
// (Debian's libcjson-dev; programs are linked with -lcjson).
//
//     safetensors_file f;
//     if (safetensors_open(&f, "model.safetensors") != ROCQ_OK) puts(f.error);
//     const safetensors_tensor *t = safetensors_find(&f, "decoder.conv_in.weight");
//     if (t) safetensors_read(&f, t, memory);                 // t->size bytes
//     safetensors_close(&f);
//
// A file is 8 bytes with the header's length, little endian, the header, which is JSON, and the
// tensors' bytes. Opening it checks the whole header: types, shapes, sizes, no name twice, and that
// the tensors cover the rest of the file without gap or overlap, as the format demands.

#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include "../rocq.h"

#include <cjson/cJSON.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---------------------------------------------------------------------------------------------
// Interface
// ---------------------------------------------------------------------------------------------

enum { SAFETENSORS_MAX_DIMS = 8 };

typedef struct safetensors_tensor {
    const char *name;
    const char *dtype;   // as the file has it: "BF16"
    bool known;          // format is one that rocq has: F32, F16 or BF16
    rocq_format format;
    int32_t n_dims;
    int64_t shape[SAFETENSORS_MAX_DIMS]; // outermost first, as PyTorch prints it
    int64_t size;        // bytes
    int64_t offset;      // of them, from the file's start
} safetensors_tensor;

typedef struct safetensors_file {
    int64_t n_tensors;
    safetensors_tensor *tensors; // sorted by name
    char error[256];             // of the last failure
    FILE *stream;                // private from here on: the file,
    const unsigned char *data;   // or where it is in memory
    int64_t size;
    cJSON *header;               // holds the names
} safetensors_file;

// On failure all is freed again, and *f is zero but for f->error. data is not copied: it must be
// there as long as the file is open.
static inline rocq_result safetensors_open(safetensors_file *f, const char *path);
static inline rocq_result safetensors_open_memory(safetensors_file *f, const void *data,
                                                  int64_t size);
static inline void safetensors_close(safetensors_file *f); // twice, or zeroed, is harmless

// NULL where there is none of that name.
static inline const safetensors_tensor *safetensors_find(const safetensors_file *f,
                                                         const char *name);

// The string of that key in the header's __metadata__, or NULL.
static inline const char *safetensors_metadata(const safetensors_file *f, const char *key);

// Copies the tensor's bytes to dst, which has room for t->size.
static inline rocq_result safetensors_read(safetensors_file *f, const safetensors_tensor *t,
                                           void *dst);

// ---------------------------------------------------------------------------------------------
// The header
// ---------------------------------------------------------------------------------------------

#define SAFETENSORS__TRY(call)                                  \
    do {                                                        \
        const rocq_result safetensors__r = (call);              \
        if (safetensors__r != ROCQ_OK) return safetensors__r;   \
    } while (0)

enum { SAFETENSORS__MAX_HEADER = 100 * 1000 * 1000 }; // as the format's own readers have it

static rocq_result safetensors__fail(safetensors_file *f, rocq_result result, const char *format,
                                     ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(f->error, sizeof f->error, format, args);
    va_end(args);
    rocq_message_clean(f->error, sizeof f->error);
    return result;
}

static rocq_result safetensors__read_at(safetensors_file *f, int64_t offset, void *dst,
                                        int64_t size) {
    if (f->data) {
        memcpy(dst, f->data + offset, (size_t)size);
        return ROCQ_OK;
    }
#ifdef _WIN32
    const bool there = _fseeki64(f->stream, offset, SEEK_SET) == 0;
#else
    const bool there = offset <= LONG_MAX && fseek(f->stream, (long)offset, SEEK_SET) == 0;
#endif
    if (there && fread(dst, 1, (size_t)size, f->stream) == (size_t)size) return ROCQ_OK;
    return safetensors__fail(f, ROCQ_E_IO, "cannot read %.0f bytes at %.0f", (double)size,
                             (double)offset);
}

// A whole number from 0 to 2^53, up to which doubles, cJSON's numbers, are exact.
static bool safetensors__whole(const cJSON *item, int64_t *out) {
    if (!cJSON_IsNumber(item)) return false;
    const double value = item->valuedouble;
    if (!(value >= 0 && value <= 9007199254740992.0) || value != (double)(int64_t)value)
        return false;
    *out = (int64_t)value;
    return true;
}

static const struct safetensors__dtype {
    const char *name;
    int64_t size;
    bool known;
    rocq_format format;
} safetensors__dtypes[] = {
    {"F32", 4, true, ROCQ_F32},    {"F16", 2, true, ROCQ_F16},    {"BF16", 2, true, ROCQ_BF16},
    {"F64", 8, false, ROCQ_F32},   {"I64", 8, false, ROCQ_F32},   {"U64", 8, false, ROCQ_F32},
    {"I32", 4, false, ROCQ_F32},   {"U32", 4, false, ROCQ_F32},   {"I16", 2, false, ROCQ_F32},
    {"U16", 2, false, ROCQ_F32},   {"I8", 1, false, ROCQ_F32},    {"U8", 1, false, ROCQ_F32},
    {"BOOL", 1, false, ROCQ_F32},  {"F8_E4M3", 1, false, ROCQ_F32},
    {"F8_E5M2", 1, false, ROCQ_F32},
};

// Elements and bytes of shape; false where they are no int64_t.
static bool safetensors__bytes(const safetensors_tensor *t, int64_t elem, int64_t *bytes) {
    int64_t n = elem;
    for (int32_t i = 0; i < t->n_dims; i++) {
        if (t->shape[i] > 0 && n > INT64_MAX / t->shape[i]) return false;
        n *= t->shape[i];
    }
    *bytes = n;
    return true;
}

// {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, offsets from the end of the header.
static rocq_result safetensors__entry(safetensors_file *f, const cJSON *item,
                                      safetensors_tensor *t) {
    const cJSON *dtype = NULL, *shape = NULL, *offsets = NULL, *child;
    const struct safetensors__dtype *type = NULL;
    int64_t begin, end, bytes;
    t->name = item->string;
    if (!cJSON_IsObject(item)) {
        return safetensors__fail(f, ROCQ_E_CORRUPT, "tensor %.100s is no object", t->name);
    }
    cJSON_ArrayForEach(child, item) {
        const cJSON **field = strcmp(child->string, "dtype") == 0          ? &dtype
                              : strcmp(child->string, "shape") == 0        ? &shape
                              : strcmp(child->string, "data_offsets") == 0 ? &offsets
                                                                           : NULL;
        if (!field || *field) {
            return safetensors__fail(f, ROCQ_E_CORRUPT, "tensor %.100s has %s field %.60s", t->name,
                                     field ? "twice the" : "an unknown", child->string);
        }
        *field = child;
    }
    if (!cJSON_IsString(dtype) || !cJSON_IsArray(shape) ||
        !cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 ||
        !safetensors__whole(offsets->child, &begin) ||
        !safetensors__whole(offsets->child->next, &end)) {
        return safetensors__fail(f, ROCQ_E_CORRUPT,
                                 "tensor %.100s has no dtype, shape and data_offsets", t->name);
    }
    t->dtype = dtype->valuestring;
    for (size_t i = 0; i < sizeof safetensors__dtypes / sizeof safetensors__dtypes[0]; i++) {
        if (strcmp(safetensors__dtypes[i].name, t->dtype) == 0) type = &safetensors__dtypes[i];
    }
    if (!type) {
        return safetensors__fail(f, ROCQ_E_UNSUPPORTED, "tensor %.100s has the unknown type %.60s",
                                 t->name, t->dtype);
    }
    t->known = type->known;
    t->format = type->format;
    cJSON_ArrayForEach(child, shape) {
        if (t->n_dims == SAFETENSORS_MAX_DIMS ||
            !safetensors__whole(child, &t->shape[t->n_dims])) {
            return safetensors__fail(f, ROCQ_E_SHAPE, "tensor %.100s has a shape that is not of 0 "
                                     "to %d sizes", t->name, (int)SAFETENSORS_MAX_DIMS);
        }
        t->n_dims++;
    }
    t->offset = begin;
    t->size = end - begin;
    if (end < begin || !safetensors__bytes(t, type->size, &bytes) || bytes != t->size) {
        return safetensors__fail(
            f, ROCQ_E_SHAPE, "tensor %.100s has data_offsets that do not fit its shape", t->name);
    }
    return ROCQ_OK;
}

static int safetensors__by_offset(const void *a, const void *b) {
    const safetensors_tensor *x = (const safetensors_tensor *)a;
    const safetensors_tensor *y = (const safetensors_tensor *)b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return (x->size > y->size) - (x->size < y->size); // empty ones before what begins there
}

static int safetensors__by_name(const void *a, const void *b) {
    return strcmp(((const safetensors_tensor *)a)->name, ((const safetensors_tensor *)b)->name);
}

// The tensors one behind the other, from 0 to the end of the file; then sorted by name.
static rocq_result safetensors__layout(safetensors_file *f, int64_t first) {
    int64_t at = 0;
    qsort(f->tensors, (size_t)f->n_tensors, sizeof *f->tensors, safetensors__by_offset);
    for (int64_t i = 0; i < f->n_tensors; i++) {
        safetensors_tensor *t = &f->tensors[i];
        if (t->offset != at) {
            return safetensors__fail(f, ROCQ_E_CORRUPT, "%s bytes before tensor %.100s",
                                     t->offset > at ? "unused" : "overlapping", t->name);
        }
        at += t->size;
        if (at > f->size - first) {
            return safetensors__fail(f, ROCQ_E_TRUNCATED,
                                     "tensor %.100s ends behind the end of the file", t->name);
        }
        t->offset += first;
    }
    if (at != f->size - first) {
        return safetensors__fail(f, ROCQ_E_CORRUPT, "%.0f bytes behind the last tensor",
                                 (double)(f->size - first - at));
    }
    qsort(f->tensors, (size_t)f->n_tensors, sizeof *f->tensors, safetensors__by_name);
    for (int64_t i = 1; i < f->n_tensors; i++) {
        if (safetensors__by_name(&f->tensors[i - 1], &f->tensors[i]) == 0) {
            return safetensors__fail(f, ROCQ_E_CORRUPT, "tensor %.100s is there twice",
                                     f->tensors[i].name);
        }
    }
    return ROCQ_OK;
}

static rocq_result safetensors__parse(safetensors_file *f, const char *text, int64_t length) {
    const cJSON *item, *entry, *metadata = NULL;
    const char *end = NULL;
    f->header = cJSON_ParseWithLengthOpts(text, (size_t)length, &end, 0);
    if (!cJSON_IsObject(f->header)) {
        return safetensors__fail(f, ROCQ_E_CORRUPT, "the header is no JSON object");
    }
    for (; end < text + length; end++) {
        if (*end != ' ') {
            return safetensors__fail(f, ROCQ_E_CORRUPT, "the header's JSON ends before the header");
        }
    }
    f->tensors = (safetensors_tensor *)calloc((size_t)cJSON_GetArraySize(f->header) + 1,
                                              sizeof *f->tensors);
    if (!f->tensors) return safetensors__fail(f, ROCQ_E_MEMORY, "no memory for the directory");
    cJSON_ArrayForEach(item, f->header) {
        if (strcmp(item->string, "__metadata__") != 0) {
            SAFETENSORS__TRY(safetensors__entry(f, item, &f->tensors[f->n_tensors]));
            f->n_tensors++;
            continue;
        }
        if (metadata || !cJSON_IsObject(item)) {
            return safetensors__fail(f, ROCQ_E_CORRUPT,
                                     "__metadata__ is there twice, or no object");
        }
        metadata = item;
        cJSON_ArrayForEach(entry, metadata) {
            if (cJSON_IsString(entry)) continue;
            return safetensors__fail(f, ROCQ_E_CORRUPT,
                                     "__metadata__ has %.60s, which is no string", entry->string);
        }
    }
    return safetensors__layout(f, 8 + length);
}

static rocq_result safetensors__read_header(safetensors_file *f) {
    unsigned char head[8];
    uint64_t length = 0;
    if (f->size < 8) return safetensors__fail(f, ROCQ_E_TRUNCATED, "the file has under 8 bytes");
    SAFETENSORS__TRY(safetensors__read_at(f, 0, head, 8));
    for (int i = 0; i < 8; i++) length |= (uint64_t)head[i] << 8 * i;
    if (length > SAFETENSORS__MAX_HEADER) {
        return safetensors__fail(f, ROCQ_E_MAGIC, "a header of %.0f bytes: this is no safetensors "
                                 "file", (double)length);
    }
    if ((int64_t)length > f->size - 8) {
        return safetensors__fail(f, ROCQ_E_TRUNCATED, "the header ends behind the end of the file");
    }
    char *text = (char *)malloc((size_t)length + 1);
    if (!text) return safetensors__fail(f, ROCQ_E_MEMORY, "no memory for the header");
    rocq_result result = safetensors__read_at(f, 8, text, (int64_t)length);
    if (result == ROCQ_OK && (length == 0 || text[0] != '{')) {
        result = safetensors__fail(f, ROCQ_E_MAGIC, "the header does not begin with {: this is no "
                                   "safetensors file");
    }
    if (result == ROCQ_OK) result = safetensors__parse(f, text, (int64_t)length);
    free(text);
    return result;
}

// ---------------------------------------------------------------------------------------------
// Bodies of the interface
// ---------------------------------------------------------------------------------------------

static rocq_result safetensors__opened(safetensors_file *f, rocq_result result) {
    char error[sizeof f->error];
    if (result == ROCQ_OK) return result;
    memcpy(error, f->error, sizeof error);
    safetensors_close(f);
    memcpy(f->error, error, sizeof error);
    return result;
}

static rocq_result safetensors__measure(safetensors_file *f) {
#ifdef _WIN32
    const bool ended = _fseeki64(f->stream, 0, SEEK_END) == 0;
    f->size = ended ? (int64_t)_ftelli64(f->stream) : -1;
#else
    const bool ended = fseek(f->stream, 0, SEEK_END) == 0;
    f->size = ended ? (int64_t)ftell(f->stream) : -1;
#endif
    if (f->size < 0) return safetensors__fail(f, ROCQ_E_IO, "it is no regular file");
    return safetensors__read_header(f);
}

static inline rocq_result safetensors_open(safetensors_file *f, const char *path) {
    memset(f, 0, sizeof *f);
    f->stream = path ? fopen(path, "rb") : NULL;
    if (!f->stream) return safetensors__fail(f, ROCQ_E_IO, "it cannot be opened");
    return safetensors__opened(f, safetensors__measure(f));
}

static inline rocq_result safetensors_open_memory(safetensors_file *f, const void *data,
                                                  int64_t size) {
    memset(f, 0, sizeof *f);
    if (!data || size < 0) return safetensors__fail(f, ROCQ_E_ARGUMENT, "there is no data");
    f->data = (const unsigned char *)data;
    f->size = size;
    return safetensors__opened(f, safetensors__read_header(f));
}

static inline void safetensors_close(safetensors_file *f) {
    if (f->stream) fclose(f->stream);
    cJSON_Delete(f->header);
    free(f->tensors);
    memset(f, 0, sizeof *f);
}

static inline const safetensors_tensor *safetensors_find(const safetensors_file *f,
                                                         const char *name) {
    safetensors_tensor key;
    key.name = name;
    if (f->n_tensors == 0) return NULL;
    return (const safetensors_tensor *)bsearch(&key, f->tensors, (size_t)f->n_tensors, sizeof key,
                                               safetensors__by_name);
}

static inline const char *safetensors_metadata(const safetensors_file *f, const char *key) {
    const cJSON *metadata = cJSON_GetObjectItemCaseSensitive(f->header, "__metadata__");
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(metadata, key);
    return item ? item->valuestring : NULL;
}

static inline rocq_result safetensors_read(safetensors_file *f, const safetensors_tensor *t,
                                           void *dst) {
    f->error[0] = '\0';
    return safetensors__read_at(f, t->offset, dst, t->size);
}

#undef SAFETENSORS__TRY

#endif // SAFETENSORS_H
