// libFuzzer target: any bytes at all, opened as a safetensors file; everything readable is read,
// the tensors cover what lies behind the header, each is found by its name, and nothing may leak.
//
//     clang -std=c11 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
//         -I. tests/fuzz_safetensors.c -o .build/fuzz_safetensors -lcjson -lm -ldl -lpthread
//     .build/fuzz_safetensors .build/new-inputs tests/corpus/safetensors
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include "../examples/safetensors.h"

#define CHECK(condition)                                               \
    do {                                                               \
        if (!(condition)) {                                            \
            fprintf(stderr, "%d: %s\n", __LINE__, #condition);         \
            abort();                                                   \
        }                                                              \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const uint8_t nothing[1];
    safetensors_file f;
    int64_t total = 0;
    if (safetensors_open_memory(&f, size ? data : nothing, (int64_t)size) != ROCQ_OK) {
        CHECK(f.error[0] && !f.tensors && !f.header && f.n_tensors == 0);
        CHECK(!strchr(f.error, '\n'));
        return 0;
    }
    for (int64_t i = 0; i < f.n_tensors; i++) {
        const safetensors_tensor *t = &f.tensors[i];
        unsigned char *bytes = (unsigned char *)malloc((size_t)t->size + 1);
        CHECK(bytes && safetensors_find(&f, t->name) == t);
        CHECK(t->offset >= 8 && t->size >= 0 && t->offset + t->size <= (int64_t)size);
        CHECK(safetensors_read(&f, t, bytes) == ROCQ_OK);
        CHECK(memcmp(bytes, data + t->offset, (size_t)t->size) == 0);
        total += t->size;
        free(bytes);
    }
    CHECK(total <= (int64_t)size - 8);
    (void)safetensors_metadata(&f, "format");
    safetensors_close(&f);
    safetensors_close(&f);
    return 0;
}
