// The safetensors reader: good files from a path and from memory, and every way to be a bad one,
// each refused with a line that says what is wrong. tests/fuzz_safetensors.c has the rest.

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include "../examples/safetensors.h"

#include <sys/stat.h>

enum { ROOM = 4096 };

// A file of this header, spaces behind it, and n_data bytes 0, 1, 2 ...
static int64_t build(unsigned char *file, const char *header, int spaces, int64_t n_data) {
    const size_t length = strlen(header);
    const uint64_t claimed = length + (uint64_t)spaces;
    assert_true(8 + claimed + (uint64_t)n_data <= ROOM);
    for (int i = 0; i < 8; i++) file[i] = (unsigned char)(claimed >> 8 * i);
    memcpy(file + 8, header, length);
    memset(file + 8 + length, ' ', (size_t)spaces);
    for (int64_t i = 0; i < n_data; i++) file[8 + (int64_t)claimed + i] = (unsigned char)i;
    return 8 + (int64_t)claimed + n_data;
}

static const char good[] =
    "{\"__metadata__\":{\"format\":\"pt\"},"
    "\"w\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[8,32]},"
    "\"a.b\":{\"dtype\":\"BF16\",\"shape\":[4,1],\"data_offsets\":[0,8]},"
    "\"none\":{\"dtype\":\"F16\",\"shape\":[0,5],\"data_offsets\":[32,32]},"
    "\"one\":{\"dtype\":\"I16\",\"shape\":[],\"data_offsets\":[32,34]}}";

static void check_good(safetensors_file *f) {
    unsigned char bytes[24];
    assert_int_equal(f->n_tensors, 4);
    const safetensors_tensor *w = safetensors_find(f, "w"), *one = safetensors_find(f, "one");
    const safetensors_tensor *a = safetensors_find(f, "a.b"), *none = safetensors_find(f, "none");
    assert_true(w && one && a && none && !safetensors_find(f, "b") && !safetensors_find(f, ""));
    assert_true(w->known && w->format == ROCQ_F32 && w->n_dims == 2 && w->size == 24);
    assert_true(w->shape[0] == 2 && w->shape[1] == 3);
    assert_true(a->known && a->format == ROCQ_BF16 && a->size == 8);
    assert_true(!one->known && one->n_dims == 0 && one->size == 2);
    assert_string_equal(one->dtype, "I16");
    assert_true(none->format == ROCQ_F16 && none->size == 0);
    assert_int_equal(safetensors_read(f, w, bytes), ROCQ_OK);
    for (int i = 0; i < 24; i++) assert_int_equal(bytes[i], 8 + i);
    assert_string_equal(safetensors_metadata(f, "format"), "pt");
    assert_null(safetensors_metadata(f, "w"));
}

static void test_good(void **state) {
    static unsigned char file[ROOM];
    const char *dirs[] = {".build", ".build/tests"}, *path = ".build/tests/good.safetensors";
    safetensors_file f;
    const int64_t size = build(file, good, 5, 34);
    (void)state;
    assert_int_equal(safetensors_open_memory(&f, file, size), ROCQ_OK);
    check_good(&f);
    safetensors_close(&f);
    for (int i = 0; i < 2; i++) (void)mkdir(dirs[i], 0777);
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(file, 1, (size_t)size, out), size);
    assert_int_equal(fclose(out), 0);
    assert_int_equal(safetensors_open(&f, path), ROCQ_OK);
    check_good(&f);
    safetensors_close(&f);
    safetensors_close(&f);
    remove(path);
    assert_int_equal(safetensors_open(&f, path), ROCQ_E_IO);
    assert_true(f.error[0] && !f.stream);
    assert_int_equal(safetensors_open(&f, ".build"), ROCQ_E_IO);
}

// Cut at every byte, it is refused; so is one byte more.
static void test_truncated(void **state) {
    static unsigned char file[ROOM];
    const int64_t size = build(file, good, 5, 34);
    (void)state;
    for (int64_t n = 0; n <= size + 1; n++) {
        safetensors_file f;
        unsigned char *copy =
            (unsigned char *)malloc((size_t)n + 1); // so that a read past it shows
        if (n == size) {
            free(copy);
            continue;
        }
        assert_non_null(copy);
        memcpy(copy, file, (size_t)n);
        unsigned char *exact = (unsigned char *)realloc(copy, (size_t)n + (n == 0));
        const rocq_result result = safetensors_open_memory(&f, exact, n);
        assert_int_equal(result, n > size ? ROCQ_E_CORRUPT : ROCQ_E_TRUNCATED);
        assert_true(f.error[0] && f.n_tensors == 0 && !f.tensors);
        free(exact);
    }
}

#define T(dtype, shape, offsets) \
    "{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" offsets "]}"

static void test_bad(void **state) {
    static const struct {
        const char *header;
        int64_t n_data;
        rocq_result result;
        const char *says;
    } bad[] = {
        {"{\"a\":" T("F32", "2", "0,8") ",\"a\":" T("F32", "2", "8,16") "}", 16, ROCQ_E_CORRUPT,
         "tensor a is there twice"},
        {"{\"a\":" T("F32", "2", "0,8") ",\"b\":" T("F32", "2", "4,12") "}", 12, ROCQ_E_CORRUPT,
         "overlapping bytes before tensor b"},
        {"{\"a\":" T("F32", "2", "0,8") ",\"b\":" T("F32", "2", "12,20") "}", 20, ROCQ_E_CORRUPT,
         "unused bytes before tensor b"},
        {"{\"a\":" T("F32", "2", "4,12") "}", 12, ROCQ_E_CORRUPT, "unused bytes before tensor a"},
        {"{\"a\":" T("F32", "2", "0,8") "}", 9, ROCQ_E_CORRUPT, "1 bytes behind the last"},
        {"{\"a\":" T("F32", "2", "0,8") "}", 7, ROCQ_E_TRUNCATED, "tensor a ends behind"},
        {"{\"a\":" T("F32", "2", "8,0") "}", 8, ROCQ_E_SHAPE, "do not fit its shape"},
        {"{\"a\":" T("F32", "3", "0,8") "}", 8, ROCQ_E_SHAPE, "do not fit its shape"},
        {"{\"a\":" T("F64", "4294967296,4294967296", "0,0") "}", 0, ROCQ_E_SHAPE, "do not fit"},
        {"{\"a\":" T("F32", "-2", "0,8") "}", 8, ROCQ_E_SHAPE, "a shape that is not"},
        {"{\"a\":" T("F32", "1.5", "0,6") "}", 6, ROCQ_E_SHAPE, "a shape that is not"},
        {"{\"a\":" T("F32", "1e300", "0,8") "}", 8, ROCQ_E_SHAPE, "a shape that is not"},
        {"{\"a\":" T("U8", "1,1,1,1,1,1,1,1,1", "0,1") "}", 1, ROCQ_E_SHAPE, "a shape that is not"},
        {"{\"a\":" T("Q4_K", "2", "0,8") "}", 8, ROCQ_E_UNSUPPORTED, "unknown type Q4_K"},
        {"{\"a\":" T("F32", "2", "0") "}", 8, ROCQ_E_CORRUPT, "has no dtype, shape and"},
        {"{\"a\":" T("F32", "2", "\"0\",8") "}", 8, ROCQ_E_CORRUPT, "has no dtype, shape and"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, ROCQ_E_CORRUPT, "has no dtype, shape and"},
        {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}", 8, ROCQ_E_CORRUPT, "twice the field"},
        {"{\"a\":{\"type\":\"F32\"}}", 8, ROCQ_E_CORRUPT, "an unknown field type"},
        {"{\"a\":[\"F32\",[2],[0,8]]}", 8, ROCQ_E_CORRUPT, "tensor a is no object"},
        {"{\"a\":null}", 0, ROCQ_E_CORRUPT, "tensor a is no object"},
        {"{\"__metadata__\":{\"a\":1}}", 0, ROCQ_E_CORRUPT, "a, which is no string"},
        {"{\"__metadata__\":[]}", 0, ROCQ_E_CORRUPT, "no object"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, ROCQ_E_CORRUPT, "twice"},
        {"{\"a\":" T("F32", "2", "0,8"), 8, ROCQ_E_CORRUPT, "no JSON object"},
        {"{\"a\\n\\u009b\x7f\":null}", 0, ROCQ_E_CORRUPT, "tensor a???? is no object"},
        {"{} {}", 0, ROCQ_E_CORRUPT, "ends before the header"},
        {"[]", 0, ROCQ_E_MAGIC, "does not begin with {"},
        {" {}", 0, ROCQ_E_MAGIC, "does not begin with {"},
        {"", 0, ROCQ_E_MAGIC, "does not begin with {"},
    };
    static unsigned char file[ROOM];
    safetensors_file f;
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const int64_t size = build(file, bad[i].header, 0, bad[i].n_data);
        const rocq_result result = safetensors_open_memory(&f, file, size);
        if (result != bad[i].result || !strstr(f.error, bad[i].says)) {
            fail_msg("%s\n gave %s \"%s\", expected %s \"%s\"", bad[i].header,
                     rocq_result_name(result), f.error, rocq_result_name(bad[i].result),
                     bad[i].says);
        }
        assert_true(!f.tensors && !f.header && f.n_tensors == 0);
    }
    for (int letters = 0; letters < 2; letters++) { // 100 bytes of a name, to inside of a character
        char header[300] = "{\"x", says[200] = "tensor x";
        header[2 + letters] = says[7 + letters] = '\0';
        for (int i = 0; i < 60; i++) strcat(header, "\xc3\xa9");
        for (int i = 0; i < 50 - letters; i++) strcat(says, "\xc3\xa9");
        strcat(header, "\":null}");
        strcat(says, letters ? "? is no object" : " is no object");
        const int64_t size = build(file, header, 0, 0);
        assert_int_equal(safetensors_open_memory(&f, file, size), ROCQ_E_CORRUPT);
        assert_string_equal(f.error, says);
    }
    for (int shift = 27; shift < 64; shift++) { // a length that no header has
        memset(file, 0, 8);
        file[shift / 8] = (unsigned char)(1 << shift % 8);
        assert_int_equal(safetensors_open_memory(&f, file, ROOM), ROCQ_E_MAGIC);
    }
    assert_int_equal(safetensors_open_memory(&f, NULL, 1), ROCQ_E_ARGUMENT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good), cmocka_unit_test(test_truncated), cmocka_unit_test(test_bad)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
