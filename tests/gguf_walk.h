// Reads everything a GGUF file offers through the public API and boils it down to one number, so
// that two ways of opening the same bytes can be compared. Shared by test_gguf.c and fuzz_gguf.c;
// the includer has rocq.h, <stdlib.h> and <string.h>.

// A broken promise of the library ends the program, in a test as under the fuzzer.
#define WALK_CHECK(condition)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static uint64_t walk_mix(uint64_t hash, const void *data, int64_t size) { // FNV-1a
    const unsigned char *p = (const unsigned char *)data;
    for (int64_t i = 0; i < size; i++) hash = (hash ^ p[i]) * 0x100000001b3u;
    return hash;
}

static uint64_t walk_int(uint64_t hash, int64_t value) {
    return walk_mix(hash, &value, sizeof value);
}

static uint64_t walk_str(uint64_t hash, rocq_str text) {
    return walk_mix(walk_int(hash, text.length), text.data, text.length);
}

// A name as the C string that look-ups take; false when it is none or long.
static bool walk_name(char name[256], rocq_str text) {
    if (text.length > 255 || (text.length > 0 && memchr(text.data, 0, (size_t)text.length)))
        return false;
    if (text.length > 0) memcpy(name, text.data, (size_t)text.length);
    name[text.length] = 0;
    return true;
}

// Every getter on one element; a getter that fails must leave its output alone.
static uint64_t walk_element(uint64_t hash, const rocq_gguf_value *value, int64_t i) {
    int64_t i64 = 77;
    uint64_t u64 = 77;
    double f64 = 77;
    bool flag = true;
    rocq_str text = {"77", 2};
    const rocq_result results[5] = {
        rocq_gguf_value_i64(value, i, &i64), rocq_gguf_value_u64(value, i, &u64),
        rocq_gguf_value_f64(value, i, &f64), rocq_gguf_value_bool(value, i, &flag),
        rocq_gguf_value_str(value, i, &text)};
    WALK_CHECK(results[0] == ROCQ_OK || i64 == 77);
    WALK_CHECK(results[1] == ROCQ_OK || u64 == 77);
    WALK_CHECK(results[2] == ROCQ_OK || f64 == 77);
    WALK_CHECK(results[3] == ROCQ_OK || flag);
    WALK_CHECK(results[4] == ROCQ_OK || text.length == 2);
    WALK_CHECK(results[0] != ROCQ_OK || results[1] != ROCQ_OK || (uint64_t)i64 == u64);
    for (int k = 0; k < 5; k++) hash = walk_int(hash, results[k]);
    hash = walk_mix(walk_int(hash, i64), &u64, sizeof u64);
    hash = walk_mix(walk_int(hash, flag), &f64, sizeof f64);
    return walk_str(hash, text);
}

static uint64_t walk_value(uint64_t hash, const rocq_gguf_value *value) {
    hash = walk_str(hash, value->key);
    hash = walk_int(walk_int(walk_int(hash, value->type), value->is_array), value->count);
    const int64_t count = value->count,
                  probes[] = {-1, 0, 1, count / 2, count - 1, count, INT64_MAX};
    for (size_t k = 0; k < sizeof probes / sizeof *probes; k++)
        hash = walk_element(hash, value, probes[k]);
    const void *cursor = NULL;
    rocq_str text = {NULL, 0};
    rocq_result result;
    int64_t n = 0;
    while ((result = rocq_gguf_next_str(value, &cursor, &text)) == ROCQ_OK) {
        hash = walk_str(hash, text);
        n++;
    }
    return walk_int(walk_int(hash, result), n);
}

static uint64_t walk_tensor(uint64_t hash, rocq_ctx *ctx, const rocq_gguf *file, int64_t limit,
                            const rocq_gguf_tensor *t) {
    hash = walk_str(hash, t->name);
    hash = walk_int(walk_int(walk_int(hash, t->type_id), t->known), t->n_dims);
    for (int d = 0; d < 4; d++) hash = walk_int(hash, t->ne[d]);
    hash = walk_int(walk_int(hash, t->offset), t->size);
    if (!t->known) {
        unsigned char byte = 0;
        WALK_CHECK(rocq_gguf_read(ctx, file, t, &byte) == ROCQ_E_FORMAT);
        return hash;
    }
    if (t->size > limit) return hash;
    char name[256];
    rocq_tensor loaded;
    rocq_buffer buffer;
    unsigned char *data = (unsigned char *)malloc((size_t)t->size);
    WALK_CHECK(data);
    const rocq_result result = rocq_gguf_read(ctx, file, t, data);
    hash = walk_int(hash, result);
    if (result == ROCQ_OK) hash = walk_mix(hash, data, t->size);
    if (result == ROCQ_OK && walk_name(name, t->name) &&
        rocq_gguf_upload(ctx, file, name, &loaded, &buffer) == ROCQ_OK) {
        WALK_CHECK(rocq_tensor_size(&loaded) == t->size);
        WALK_CHECK(memcmp(rocq_tensor_data(&loaded), data, (size_t)t->size) == 0);
        WALK_CHECK(rocq_buffer_free(ctx, &buffer) == ROCQ_OK); // empty where it is a view
    }
    free(data);
    return hash;
}

// steady: nobody changes the bytes meanwhile, so that look-ups must agree with the listing.
// Tensors of more than limit bytes are listed only.
static uint64_t walk_file(rocq_ctx *ctx, const rocq_gguf *file, int64_t limit, bool steady) {
    const int64_t n_values = rocq_gguf_value_count(file), n_tensors = rocq_gguf_tensor_count(file);
    uint64_t hash = walk_int(0xcbf29ce484222325u, rocq_gguf_version(file));
    hash = walk_int(walk_int(hash, n_values), n_tensors);
    char name[256];
    for (int64_t i = 0; i < n_values; i++) {
        rocq_gguf_value value, found;
        const rocq_result result = rocq_gguf_value_at(file, i, &value);
        WALK_CHECK(result == ROCQ_OK || (!steady && result == ROCQ_E_CORRUPT));
        if (result != ROCQ_OK) continue;
        hash = walk_value(hash, &value);
        if (!walk_name(name, value.key)) continue;
        const rocq_result again = rocq_gguf_find_value(file, name, &found);
        WALK_CHECK(!steady || (again == ROCQ_OK && found.data == value.data));
        int64_t i64;
        uint64_t u64;
        double f64;
        bool flag;
        rocq_str text;
        hash = walk_int(hash, rocq_gguf_get_i64(file, name, &i64));
        hash = walk_int(hash, rocq_gguf_get_u64(file, name, &u64));
        hash = walk_int(hash, rocq_gguf_get_f64(file, name, &f64));
        hash = walk_int(hash, rocq_gguf_get_bool(file, name, &flag));
        hash = walk_int(hash, rocq_gguf_get_str(file, name, &text));
    }
    for (int64_t i = 0; i < n_tensors; i++) {
        rocq_gguf_tensor tensor, found;
        const rocq_result result = rocq_gguf_tensor_at(file, i, &tensor);
        WALK_CHECK(result == ROCQ_OK || !steady);
        if (result != ROCQ_OK) continue;
        hash = walk_tensor(hash, ctx, file, limit, &tensor);
        if (!walk_name(name, tensor.name)) continue;
        const rocq_result again = rocq_gguf_find_tensor(file, name, &found);
        WALK_CHECK(!steady || (again == ROCQ_OK && found.offset == tensor.offset));
    }
    rocq_gguf_value value;
    rocq_gguf_tensor tensor;
    WALK_CHECK(rocq_gguf_value_at(file, n_values, &value) == ROCQ_E_ARGUMENT);
    WALK_CHECK(rocq_gguf_tensor_at(file, n_tensors, &tensor) == ROCQ_E_ARGUMENT);
    return hash;
}
