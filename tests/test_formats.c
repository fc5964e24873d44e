// Formats: 16-bit floats, block layouts, decoding and encoding; against the pictures at the block
// structs, the OCP MX specification, float64 and ggml's own library. Closes with a table per
// format.
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "ops.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static const rocq_format formats[] = {
#define X(NAME, lower, id, elems, bytes) ROCQ_##NAME,
    ROCQ_FORMATS(X)
#undef X
};
enum { N_FORMATS = COUNT(formats) };

static int64_t block_bytes(rocq_format format) {
    return rocq_get_format_info(format)->block_bytes;
}

static void *alloc(int64_t size) {
    void *p = malloc(size > 0 ? (size_t)size : 1);
    assert_non_null(p);
    return p;
}

static float *nans(int64_t n) {
    float *v = (float *)alloc(n * 4);
    memset(v, 0xff, (size_t)n * 4);
    return v;
}

static bool same_float(float a, float b) { // bit for bit, but any NaN is a NaN
    return (a != a && b != b) || same_bytes(&a, &b, sizeof a);
}

// -- the table at the end --

typedef struct summary {
    int64_t decoded, decoded_same; // blocks
    int64_t encoded, encoded_same;
    double ratio, worst;           // error of rocq's bytes / of ggml's: sum, largest
    double weighted, weighted_worst;
    int n_ratios, n_weighted;
} summary;

static summary summaries[N_FORMATS];

static int print_table(void **state) {
    (void)state;
    print_message("against ggml, blocks with the same bits, and squared error of rocq / ggml "
                  "(mean and worst over tensors)\n"
                  "format        dequantize           quantize             quantize error     "
                  "with importance\n");
    for (int f = 0; f < N_FORMATS; f++) {
        const summary *s = &summaries[f];
        char text[4][32] = {"-", "-", "-", "-"};
        if (s->decoded)
            snprintf(text[0], 32, "%lld of %lld", (long long)s->decoded_same,
                     (long long)s->decoded);
        if (s->encoded)
            snprintf(text[1], 32, "%lld of %lld", (long long)s->encoded_same,
                     (long long)s->encoded);
        if (s->n_ratios) snprintf(text[2], 32, "%.4f %.4f", s->ratio / s->n_ratios, s->worst);
        if (s->n_weighted)
            snprintf(text[3], 32, "%.4f %.4f", s->weighted / s->n_weighted, s->weighted_worst);
        print_message("%-12s  %-19s  %-19s  %-17s  %s\n", rocq_format_name(formats[f]), text[0],
                      text[1], text[2], text[3]);
    }
    return 0;
}

// -- names and sizes --

static void names_and_sizes(void **state) {
    (void)state;
#define X(NAME, lower, id, elems, bytes)                                                \
    {                                                                                   \
        const rocq_format_info *info = rocq_get_format_info(ROCQ_##NAME);               \
        rocq_format format = ROCQ_I32;                                                  \
        int64_t size = -1;                                                              \
        assert_int_equal(ROCQ_##NAME, id);                                              \
        assert_string_equal(info->name, #NAME);                                         \
        assert_int_equal(info->block_elems, elems);                                     \
        assert_int_equal(info->block_bytes, bytes);                                     \
        assert_true(info->bits_per_weight == 8.0f * bytes / elems);                     \
        assert_int_equal(rocq_format_from_name(&format, #NAME), ROCQ_OK);               \
        assert_int_equal(format, ROCQ_##NAME);                                          \
        format = ROCQ_I32;                                                              \
        assert_int_equal(rocq_format_from_name(&format, #lower), ROCQ_OK);               \
        assert_int_equal(format, ROCQ_##NAME);                                          \
        assert_int_equal(rocq_row_size(ROCQ_##NAME, 7 * elems, &size), ROCQ_OK);        \
        assert_int_equal(size, 7 * bytes);                                              \
        assert_int_equal(rocq_row_size(ROCQ_##NAME, 0, &size), ROCQ_OK);                \
        assert_int_equal(size, 0);                                                      \
    }
    ROCQ_FORMATS(X)
#undef X
    rocq_format format = ROCQ_F32;
    assert_int_equal(rocq_format_from_name(&format, "i32"), ROCQ_OK);
    assert_int_equal(format, ROCQ_I32);
    assert_int_equal(rocq_get_format_info(ROCQ_I32)->block_bytes, 4);
    assert_null(rocq_get_format_info((rocq_format)4));
    assert_null(rocq_get_format_info((rocq_format)-1));
}

// -- 16-bit floats --

// value rounded to `bits` bits of mantissa (with the leading one) and exponents from `low` up, ties
// to even, infinity from `limit` on.
static double rounded(double value, int bits, int low, double limit) {
    if (value == 0 || !isfinite(value)) return value;
    if (fabs(value) >= limit) return copysign(INFINITY, value);
    const int exponent = ilogb(value) > low ? ilogb(value) : low;
    return ldexp(nearbyint(ldexp(value, bits - 1 - exponent)), exponent - bits + 1);
}

static void check_halves(float value) {
    const double f16 = rounded(value, 11, -14, 65520), bf16 = rounded(value, 8, -126, 0x1.ffp127);
    const float got_f16 = rocq_f16_to_f32(rocq_f32_to_f16(value));
    const float got_bf16 = rocq__bf16_to_f32(rocq__f32_to_bf16(value));
    if (!(got_f16 == f16) || !signbit(got_f16) != !signbit(f16)) {
        fail_msg("%a to F16: %a, want %a", (double)value, (double)got_f16, f16);
    }
    if (!(got_bf16 == bf16) || !signbit(got_bf16) != !signbit(bf16)) {
        fail_msg("%a to BF16: %a, want %a", (double)value, (double)got_bf16, bf16);
    }
}

static void halves(void **state) {
    (void)state;
    for (uint32_t h = 0; h < 0x10000; h++) {
        const uint16_t half = (uint16_t)h;
        const uint32_t exponent = h >> 10 & 31, mantissa = h & 1023;
        const double sign = h >> 15 ? -1 : 1;
        const double want = exponent == 31 ? mantissa ? NAN : sign * INFINITY
                            : exponent     ? sign * ldexp(1024 + mantissa, (int)exponent - 25)
                                           : sign * ldexp(mantissa, -24);
        const float got = rocq_f16_to_f32(half);
        assert_true(same_float(got, (float)want));
        if (got == got) {
            assert_int_equal(rocq_f32_to_f16(got), half);
            check_halves(nextafterf(got, INFINITY));
            check_halves(nextafterf(got, -INFINITY));
        } else {
            assert_int_equal(rocq_f32_to_f16(got) & 0x7e00, 0x7e00);
        }
        if (exponent < 31) { // the tie with the next value, and both sides of it
            const float tie =
                (float)((want + (exponent ? sign * ldexp(1025 + mantissa, (int)exponent - 25)
                                          : sign * ldexp(1 + mantissa, -24))) /
                        2);
            check_halves(tie);
            check_halves(nextafterf(tie, INFINITY));
            check_halves(nextafterf(tie, -INFINITY));
        }
        const float wide = rocq__bf16_to_f32(half); // BF16: the upper bits
        if (wide == wide) {
            assert_int_equal(rocq__f32_to_bf16(wide), half);
            const float tie = rocq__bits_f32(h << 16 | 0x8000);
            if (isfinite(wide)) {
                check_halves(tie);
                check_halves(rocq__bits_f32(h << 16 | 0x7fff));
                check_halves(rocq__bits_f32(h << 16 | 0x8001));
            }
        } else {
            assert_true((rocq__f32_to_bf16(wide) & 0x7fc0) == 0x7fc0);
        }
    }
    for (int i = 0; i < 300000; i++) {
        const float value = rocq__bits_f32((uint32_t)random_u64());
        if (value == value) check_halves(value);
    }
    assert_int_equal(rocq_f32_to_f16(65519.996f), 0x7bff);
    assert_int_equal(rocq_f32_to_f16(65520.0f), 0x7c00); // as IEEE 754: infinity
    assert_int_equal(rocq_f32_to_f16(-1e30f), 0xfc00);
    assert_int_equal(rocq_f32_to_f16(0x1p-25f), 0);
    assert_int_equal(rocq_f32_to_f16(-0x1.000002p-25f), 0x8001);
}

// -- layouts: the pictures at the block structs, bit by bit --

typedef enum field { FIELD_Q, FIELD_SC, FIELD_MN, FIELD_D, FIELD_DMIN } field;

typedef struct layout {
    rocq_format format;
    int group, q_bits, sc_bits, mn_bits; // 0 = no such field
    int d, dmin;                         // first byte; d of one byte where it is E8M0
    int q_offset, sc_offset;             // taken off the code
} layout;

static const layout layouts[] = {
    {ROCQ_Q4_0, 32, 4, 0, 0, 0, -1, 8, 0},
    {ROCQ_Q4_1, 32, 4, 0, 0, 0, 2, 0, 0},
    {ROCQ_Q5_0, 32, 5, 0, 0, 0, -1, 16, 0},
    {ROCQ_Q5_1, 32, 5, 0, 0, 0, 2, 0, 0},
    {ROCQ_Q8_0, 32, 8, 0, 0, 0, -1, 0, 0},
    {ROCQ_Q2_K, 16, 2, 4, 4, 80, 82, 0, 0},
    {ROCQ_Q3_K, 16, 3, 6, 0, 108, -1, 4, 32},
    {ROCQ_Q4_K, 32, 4, 6, 6, 0, 2, 0, 0},
    {ROCQ_Q5_K, 32, 5, 6, 6, 0, 2, 0, 0},
    {ROCQ_Q6_K, 16, 6, 8, 0, 208, -1, 32, 0},
    {ROCQ_IQ4_NL, 32, 4, 0, 0, 0, -1, 0, 0},
    {ROCQ_IQ4_XS, 32, 4, 6, 0, 0, -1, 0, 32},
    {ROCQ_MXFP4, 32, 4, 0, 0, 0, -1, 0, 0},
    {ROCQ_MXFP6_E2M3, 32, 6, 0, 0, 0, -1, 0, 0},
    {ROCQ_MXFP6_E3M2, 32, 6, 0, 0, 0, -1, 0, 0},
};

// Where bit b of code i (FIELD_Q) or of a group's scale or min is: 8 byte + bit.
static int place(rocq_format format, field what, int i, int b) {
    const int h = i / 128, r = i / 32 % 4, l = i % 32, half = i / 32, low = i % 16,
              high = i % 32 / 16;
    if (what == FIELD_Q) {
        switch (format) {
        case ROCQ_Q4_0: case ROCQ_IQ4_NL: return 8 * (2 + low) + 4 * high + b;
        case ROCQ_MXFP4: return 8 * (1 + low) + 4 * high + b;
        case ROCQ_Q4_1: return 8 * (4 + low) + 4 * high + b;
        case ROCQ_Q5_0: return b == 4 ? 8 * (2 + i / 8) + i % 8 : 8 * (6 + low) + 4 * high + b;
        case ROCQ_Q5_1: return b == 4 ? 8 * (4 + i / 8) + i % 8 : 8 * (8 + low) + 4 * high + b;
        case ROCQ_Q8_0: return 8 * (2 + i) + b;
        case ROCQ_Q2_K: return 8 * (16 + 32 * h + l) + 2 * r + b;
        case ROCQ_Q3_K: return b == 2 ? 8 * l + 4 * h + r : 8 * (32 + 32 * h + l) + 2 * r + b;
        case ROCQ_Q4_K: return 8 * (16 + 32 * (i / 64) + l) + 4 * (half % 2) + b;
        case ROCQ_Q5_K:
            return b == 4 ? 8 * (16 + l) + half : 8 * (48 + 32 * (i / 64) + l) + 4 * (half % 2) + b;
        case ROCQ_Q6_K:
            return b >= 4 ? 8 * (128 + 32 * h + l) + 2 * r + b - 4
                          : 8 * (64 * h + 32 * (r % 2) + l) + 4 * (r / 2) + b;
        case ROCQ_IQ4_XS: return 8 * (8 + 16 * half + low) + 4 * high + b;
        default: return 8 + 6 * i + b; // MXFP6
        }
    }
    switch (format) {
    case ROCQ_Q2_K: return 8 * i + (what == FIELD_MN ? 4 : 0) + b;
    case ROCQ_Q3_K:
        return b >= 4 ? 8 * (104 + i % 4) + 2 * (i / 4) + b - 4
                      : 8 * (96 + i % 8) + 4 * (i / 8) + b;
    case ROCQ_Q6_K: return 8 * (192 + i) + b;
    case ROCQ_IQ4_XS: return b >= 4 ? 8 * 2 + 2 * i + b - 4 : 8 * (4 + i / 2) + 4 * (i % 2) + b;
    default: // Q4_K, Q5_K
        if (i < 4) return 8 * (4 + i + (what == FIELD_MN ? 4 : 0)) + b;
        if (b < 4) return 8 * (12 + i - 4) + (what == FIELD_MN ? 4 : 0) + b;
        return 8 * (4 + i - 4 + (what == FIELD_MN ? 4 : 0)) + 6 + b - 4;
    }
}

static int read_field(const layout *l, const unsigned char *block, field what, int i) {
    const int bits = what == FIELD_Q ? l->q_bits : what == FIELD_SC ? l->sc_bits : l->mn_bits;
    int value = 0;
    for (int b = 0; b < bits; b++) {
        const int at = place(l->format, what, i, b);
        value |= (block[at / 8] >> at % 8 & 1) << b;
    }
    return value;
}

// An OCP float element by its definition in the specification.
static double element(int code, int e_bits, int m_bits, int bias) {
    const int sign = code >> (e_bits + m_bits), e = code >> m_bits & ((1 << e_bits) - 1);
    const int m = code & ((1 << m_bits) - 1);
    const double fraction = ldexp(m, -m_bits);
    const double value = e == 0 ? ldexp(fraction, 1 - bias) : ldexp(1 + fraction, e - bias);
    return sign ? -value : value;
}

static const double iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                               1,    13,   25,  38,  53,  69,  89,  113};

// The value of element i as the formulas have it; exact in float64 up to the one rounding at the
// end.
static float pictured(const layout *l, const unsigned char *block, int i) {
    const int q = read_field(l, block, FIELD_Q, i), g = i / l->group;
    const double d = rocq_f16_to_f32((uint16_t)(block[l->d] | block[l->d + 1] << 8));
    double scale = d, level = q - l->q_offset, min = 0;
    switch (l->format) {
    case ROCQ_MXFP4: return (float)(ldexp(1, block[0] - 127) * element(q, 2, 1, 1) + 0.0);
    case ROCQ_MXFP6_E2M3:
        return block[0] == 255 ? NAN
                               : (float)(ldexp(1, block[0] - 127) * element(q, 2, 3, 1) + 0.0);
    case ROCQ_MXFP6_E3M2:
        return block[0] == 255 ? NAN
                               : (float)(ldexp(1, block[0] - 127) * element(q, 3, 2, 3) + 0.0);
    case ROCQ_Q8_0: level = q < 128 ? q : q - 256; break;
    case ROCQ_IQ4_NL: case ROCQ_IQ4_XS: level = iq4[q]; break;
    default: break;
    }
    if (l->sc_bits) {
        int sc = read_field(l, block, FIELD_SC, g) - l->sc_offset;
        if (l->format == ROCQ_Q6_K && sc >= 128) sc -= 256;
        scale = d * sc;
    }
    if (l->dmin >= 0) {
        min = rocq_f16_to_f32((uint16_t)(block[l->dmin] | block[l->dmin + 1] << 8));
        min = l->mn_bits ? min * read_field(l, block, FIELD_MN, g) : -min;
    }
    return (float)(scale * level - min);
}

static void random_bytes(unsigned char *p, int64_t n) {
    for (int64_t i = 0; i < n; i++) p[i] = (unsigned char)random_u64();
}

static void pictures(void **state) {
    (void)state;
    // Plain formats have no layout, and ggml says what the formats with codebooks, TQ1_0, TQ2_0 and
    // NVFP4 mean.
    assert_int_equal(COUNT(layouts), N_FORMATS - 3 - 10);
    for (size_t f = 0; f < COUNT(layouts); f++) {
        const layout *l = &layouts[f];
        const int64_t elems = block_elems(l->format), bytes = block_bytes(l->format);
        unsigned char *block = (unsigned char *)alloc(bytes);
        float *got = nans(elems);

        // Every bit of the block belongs to one field, once.
        unsigned char used[256] = {0};
        const int header = bytes % 2 ? 1 : l->dmin >= 0 ? 4 : 2;
        for (int i = 0; i < elems; i++) {
            for (int b = 0; b < l->q_bits; b++) used[place(l->format, FIELD_Q, i, b) / 8]++;
        }
        for (int g = 0; g < elems / l->group; g++) {
            for (int b = 0; b < l->sc_bits; b++) used[place(l->format, FIELD_SC, g, b) / 8]++;
            for (int b = 0; b < l->mn_bits; b++) used[place(l->format, FIELD_MN, g, b) / 8]++;
        }
        int n_unused = 0;
        for (int i = 0; i < bytes; i++) {
            assert_true(used[i] == 8 || used[i] == 0);
            n_unused += used[i] == 0;
        }
        assert_int_equal(n_unused, header);

        for (int n = 0; n < 400; n++) {
            random_bytes(block, bytes);
            if (bytes % 2 && n < 256) block[0] = (unsigned char)n; // every E8M0 scale
            memset(got, 0xff, (size_t)elems * 4);
            assert_int_equal(rocq_dequantize(l->format, got, block, elems), ROCQ_OK);
            for (int i = 0; i < elems; i++) {
                const float want = pictured(l, block, i);
                // The sign of a zero is ggml's to say.
                if (!same_float(got[i], want) && !(got[i] == 0 && want == 0)) {
                    fail_msg("%s element %d: %a, the picture says %a", rocq_format_name(l->format),
                             i, (double)got[i], (double)want);
                }
            }
        }
        free(block);
        free(got);
    }
}

// What pack puts into a block is where the picture has it, and nothing else is in there.
static void packing(void **state) {
    (void)state;
    for (size_t f = 0; f < COUNT(layouts); f++) {
        const layout *l = &layouts[f];
        const rocq__codec *codec = rocq__codec_of(l->format);
        if (!codec->pack) continue;
        for (int n = 0; n < 200; n++) {
            rocq__fields fields;
            unsigned char *block = (unsigned char *)alloc(codec->info.block_bytes);
            random_bytes((unsigned char *)&fields, sizeof fields);
            random_bytes(block, codec->info.block_bytes);
            for (int i = 0; i < 256; i++)
                fields.q[i] = (uint8_t)(fields.q[i] & ((1 << l->q_bits) - 1));
            for (int g = 0; g < 16; g++) {
                fields.sc[g] = (int32_t)random_below(1 << l->sc_bits) - l->sc_offset -
                               (l->format == ROCQ_Q6_K ? 128 : 0);
                fields.mn[g] = (int32_t)random_below(1 << l->mn_bits);
            }
            codec->pack(block, &fields);
            for (int i = 0; i < codec->info.block_elems; i++) {
                const int stored = l->format == ROCQ_Q8_0 ? (fields.q[i] + 128) & 255 : fields.q[i];
                assert_int_equal(read_field(l, block, FIELD_Q, i), stored);
            }
            for (int g = 0; g < codec->info.block_elems / l->group; g++) {
                if (l->sc_bits)
                    assert_int_equal(read_field(l, block, FIELD_SC, g),
                                     (fields.sc[g] + l->sc_offset) & ((1 << l->sc_bits) - 1));
                if (l->mn_bits) assert_int_equal(read_field(l, block, FIELD_MN, g), fields.mn[g]);
            }
            assert_int_equal(block[l->d] | block[l->d + 1] << 8, fields.d);
            if (l->dmin >= 0)
                assert_int_equal(block[l->dmin] | block[l->dmin + 1] << 8, fields.dmin);
            free(block);
        }
    }
}

// -- MXFP6: values worked out from the OCP specification --

typedef struct fp6 {
    rocq_format format;
    int e_bits, m_bits, bias, emax;
    double largest;
} fp6;

static const fp6 fp6s[] = {{ROCQ_MXFP6_E2M3, 2, 3, 1, 2, 7.5}, {ROCQ_MXFP6_E3M2, 3, 2, 3, 4, 28}};

static int fp6_code(const unsigned char *block, int i) {
    int code = 0;
    for (int b = 0; b < 6; b++) code |= (block[1 + (6 * i + b) / 8] >> (6 * i + b) % 8 & 1) << b;
    return code;
}

static void mxfp6_decode(void **state) {
    (void)state;
    // A few elements of each by hand.
    assert_true(element(1, 2, 3, 1) == 0.125 && element(31, 2, 3, 1) == 7.5 &&
                element(8, 2, 3, 1) == 1);
    assert_true(element(1, 3, 2, 3) == 0.0625 && element(31, 3, 2, 3) == 28 &&
                element(12, 3, 2, 3) == 1);
    assert_true(element(63, 2, 3, 1) == -7.5 && element(33, 3, 2, 3) == -0.0625);
    for (size_t k = 0; k < COUNT(fp6s); k++) {
        const fp6 *f = &fp6s[k];
        for (int e = 0; e < 256; e++) {
            for (int half = 0; half < 2; half++) {
                unsigned char block[25] = {0};
                float got[32];
                memset(got, 0xff, sizeof got);
                block[0] = (unsigned char)e;
                for (int i = 0; i < 32; i++) {
                    for (int b = 0; b < 6; b++) {
                        const int bit = (32 * half + i) >> b & 1, at = 6 * i + b;
                        block[1 + at / 8] = (unsigned char)(block[1 + at / 8] | bit << at % 8);
                    }
                }
                assert_int_equal(rocq_dequantize(f->format, got, block, 32), ROCQ_OK);
                for (int i = 0; i < 32; i++) {
                    const double want =
                        ldexp(element(32 * half + i, f->e_bits, f->m_bits, f->bias), e - 127);
                    if (e == 255) assert_true(got[i] != got[i]);
                    else
                        assert_true(got[i] == (float)want &&
                                    (fabs(want) > FLT_MAX || got[i] == want));
                }
            }
        }
    }
}

// The specification's conversion: scale 2^(floor(log2(amax)) - emax), elements to nearest even,
// saturating.
static void check_fp6(const fp6 *f, const float *x) {
    unsigned char block[25];
    double amax = 0;
    memset(block, 0xff, sizeof block);
    assert_int_equal(rocq_quantize(f->format, block, x, 1, 32, NULL), ROCQ_OK);
    for (int i = 0; i < 32; i++) amax = fmax(amax, fabs((double)x[i]));
    const int e = amax > 0 ? (int)fmax(ilogb(amax) - f->emax + 127, 0) : 0;
    assert_int_equal(block[0], e);
    for (int i = 0; i < 32; i++) {
        const double v = ldexp(x[i], 127 - e);
        double want = rounded(v, f->m_bits + 1, 1 - f->bias, INFINITY);
        if (fabs(want) > f->largest) want = copysign(f->largest, v);
        const double got = element(fp6_code(block, i), f->e_bits, f->m_bits, f->bias);
        if (!(got == want)) {
            fail_msg("%s: %a at scale 2^%d gives %g, want %g", rocq_format_name(f->format),
                     (double)x[i], e - 127, got, want);
        }
    }
}

static void mxfp6_encode(void **state) {
    (void)state;
    for (size_t k = 0; k < COUNT(fp6s); k++) {
        const fp6 *f = &fp6s[k];
        const int n_codes = 1 << (f->e_bits + f->m_bits);
        for (int exponent = -120; exponent <= 118; exponent += 7) {
            // All elements, ties between them and both sides of the ties, up to beyond the largest;
            // one element keeps the scale where it is.
            for (int code = 0; code < n_codes; code++) {
                const double at = element(code, f->e_bits, f->m_bits, f->bias);
                const double next = code + 1 < n_codes
                                        ? element(code + 1, f->e_bits, f->m_bits, f->bias)
                                        : ldexp(2, f->emax) * 0.999;
                const float values[6] = {(float)at,
                                         (float)((at + next) / 2),
                                         nextafterf((float)((at + next) / 2), 0),
                                         nextafterf((float)((at + next) / 2), 100),
                                         (float)next,
                                         0};
                float x[32];
                for (int i = 0; i < 32; i++)
                    x[i] = ldexpf(values[i % 6] * (i % 2 ? -1.0f : 1.0f), exponent);
                x[31] = ldexpf((float)f->largest, exponent);
                check_fp6(f, x);
            }
        }
        float zeros[32] = {0}, x[32];
        check_fp6(f, zeros);
        for (int n = 0; n < 2000; n++) {
            for (int i = 0; i < 32; i++) {
                do x[i] = rocq__bits_f32((uint32_t)random_u64());
                while (!isfinite(x[i]));
                if (n % 4) x[i] = random_normal() * ldexpf(1, n % 200 - 100);
            }
            check_fp6(f, x); // all magnitudes up to the largest float, subnormal ones too
        }
    }
}

// -- the same bits from every compiler --

static uint64_t fnv(uint64_t hash, const void *data, int64_t n) {
    const unsigned char *p = (const unsigned char *)data;
    for (int64_t i = 0; i < n; i++) hash = (hash ^ p[i]) * 0x100000001b3u;
    return hash;
}

// Decoding, and encoding by a fixed rule, give these bits with and without fused multiply-add, on
// every processor. (No NaN among them: its bits are the processor's.)
static void same_everywhere(void **state) {
    (void)state;
    static const struct { rocq_format format; uint64_t decoded, encoded; } want[] = {
        {ROCQ_F32, 0x98ac96521109fdf1u, 0x8821f707b0e684ffu},
        {ROCQ_F16, 0x9288b86c06b320e6u, 0xc4f0a7138fa7f282u},
        {ROCQ_Q4_0, 0xcbeb322a26315adau, 0xb3c7b50e9af73847u},
        {ROCQ_Q4_1, 0x53b443842898eab5u, 0x93620b826917713cu},
        {ROCQ_Q5_0, 0x104b53793973103au, 0x8a8fd9291573c55du},
        {ROCQ_Q5_1, 0xdebdb686378630edu, 0x3e849760103885cbu},
        {ROCQ_Q8_0, 0xa61dea070ebc4313u, 0xea2a421776debd22u},
        {ROCQ_Q2_K, 0xb8ed00413a0c465cu, 0},
        {ROCQ_Q3_K, 0xf584837d087aa875u, 0},
        {ROCQ_Q4_K, 0x1d0af2e58d4b5066u, 0},
        {ROCQ_Q5_K, 0x4b895d1ced3684d1u, 0},
        {ROCQ_Q6_K, 0x1d6d901df364af26u, 0},
        {ROCQ_IQ4_NL, 0x0e6ff658fa0e09f2u, 0},
        {ROCQ_IQ4_XS, 0x9e87e389ca789dc5u, 0},
        {ROCQ_BF16, 0x1b0e2ff83ac3af98u, 0x14bea62bd3bef4c2u},
        {ROCQ_MXFP4, 0x00f90d92db48d950u, 0x7bc8cd4ea05390d1u},
        {ROCQ_MXFP6_E2M3, 0xdb6bc25029a09502u, 0x7a1888d2b9c7879au},
        {ROCQ_IQ2_XXS, 0x8a98eb8a6f291134u, 0},
        {ROCQ_IQ2_XS, 0x2aea37aa0bc33e9cu, 0},
        {ROCQ_IQ3_XXS, 0x12211f664030d358u, 0},
        {ROCQ_IQ1_S, 0x453c7c220d383a75u, 0},
        {ROCQ_IQ3_S, 0xbd8b611575bb0a97u, 0},
        {ROCQ_IQ2_S, 0x4cf8af7935579e30u, 0},
        {ROCQ_IQ1_M, 0x9cab445377adb2b4u, 0},
        {ROCQ_TQ1_0, 0xf6c33995a8941734u, 0},
        {ROCQ_TQ2_0, 0x80554043f2dfdf3eu, 0},
        {ROCQ_NVFP4, 0x9e27a27fd9e8d2a9u, 0},
        {ROCQ_MXFP6_E3M2, 0x3b5b184f881f9b8bu, 0x5b3e885d22aaa338u},
    };
    int n_wrong = 0;
    for (size_t f = 0; f < COUNT(want); f++) {
        const rocq_format format = want[f].format;
        const int64_t elems = block_elems(format), bytes = block_bytes(format), n = 64;
        unsigned char *blocks = (unsigned char *)alloc(n * bytes);
        float *values = nans(n * elems);
        uint64_t decoded = 0xcbf29ce484222325u, encoded = decoded;
        random_state = 77;
        for (int turn = 0; turn < 50; turn++) {
            random_bytes(blocks, n * bytes);
            for (int64_t i = 0; i < n; i++) {
                // F16 fields finite: clear a bit of each exponent.
                unsigned char *b = blocks + i * bytes;
                for (size_t k = 0; k < COUNT(layouts); k++) {
                    if (layouts[k].format != format) continue;
                    if (bytes % 2) b[0] &= 127;
                    else b[layouts[k].d + 1] &= 0xbf;
                    if (layouts[k].dmin >= 0) b[layouts[k].dmin + 1] &= 0xbf;
                }
                if (!is_encoded(format) && format != ROCQ_NVFP4) {
                    b[format == ROCQ_IQ1_M   ? 55
                      : format == ROCQ_TQ1_0 ? 53
                      : format == ROCQ_TQ2_0 ? 65
                                             : 1] &= 0xbf;
                }
                if (format == ROCQ_F16 || format == ROCQ_BF16) b[1] &= 0xbf;
                if (format == ROCQ_F32) b[3] &= 0xbf;
            }
            assert_int_equal(rocq_dequantize(format, values, blocks, n * elems), ROCQ_OK);
            decoded = fnv(decoded, values, n * elems * 4);
            if (!want[f].encoded) continue;
            for (int64_t i = 0; i < n * elems; i++)
                values[i] = ldexpf((float)(int32_t)random_u64(), -30 - turn % 8);
            assert_int_equal(rocq_quantize(format, blocks, values, n, elems, NULL), ROCQ_OK);
            encoded = fnv(encoded, blocks, n * bytes);
        }
        if (decoded != want[f].decoded || (want[f].encoded && encoded != want[f].encoded)) {
            n_wrong++;
            print_message("%s: 0x%016llx, 0x%016llx\n", rocq_format_name(format),
                          (unsigned long long)decoded, (unsigned long long)encoded);
        }
        free(blocks);
        free(values);
    }
    assert_int_equal(n_wrong, 0);
}

// The SIMD decoder gives the plain one's bits, whatever the number of blocks, and writes no more.
static void decoders_agree(void **state) {
    (void)state;
    enum { MOST = 19 };
    for (int f = 0; f < N_FORMATS; f++) {
        const rocq_format format = formats[f];
        const int64_t elems = block_elems(format), bytes = block_bytes(format);
        const int64_t step = elems == 1 ? 7 : 1;
        unsigned char *blocks = (unsigned char *)alloc(MOST * step * bytes);
        for (int64_t n = step; n <= MOST * step; n += step) {
            float *want = nans(n * elems + 8), *got = nans(n * elems + 8), *op = nans(n * elems);
            random_bytes(blocks, n * bytes);
            rocq__decode(false, format, want, blocks, n * elems);
            rocq__decode(rocq__cpu_best() > ROCQ_CPU_PLAIN, format, got, blocks, n * elems);
            assert_int_equal(rocq_dequantize(format, op, blocks, n * elems), ROCQ_OK);
            for (int64_t i = 0; i < n * elems; i++) {
                if (!same_float(got[i], want[i]) || !same_float(op[i], want[i])) {
                    fail_msg("%s, %lld blocks: element %lld is %g and %g, not %g",
                             rocq_format_name(format), (long long)n, (long long)i, (double)got[i],
                             (double)op[i], (double)want[i]);
                }
            }
            for (int64_t i = n * elems; i < n * elems + 8; i++) assert_true(got[i] != got[i]);
            free(want);
            free(got);
            free(op);
        }
        free(blocks);
    }
    const int64_t n = 1 << 16; // from here on rocq_dequantize takes SIMD for F16
    uint16_t *half = (uint16_t *)alloc(2 * n);
    float *all = nans(n);
    for (int64_t i = 0; i < n; i++) half[i] = (uint16_t)i;
    assert_int_equal(rocq_dequantize(ROCQ_F16, all, half, n), ROCQ_OK);
    for (int64_t i = 0; i < n; i++) assert_true(same_float(all[i], rocq_f16_to_f32(half[i])));
    free(half);
    free(all);
}

// -- ggml --

typedef struct ggml_formats {
    void *base;
    const char *(*type_name)(int);
    int64_t (*blck_size)(int);
    size_t (*type_size)(int);
    size_t (*row_size)(int, int64_t);
    size_t (*chunk)(int, const float *, void *, int64_t start, int64_t rows, int64_t per_row,
                    const float *imatrix);
} ggml_formats;

static bool in_ggml(rocq_format format) {
    return format < 1000;
}

static ggml_formats find_ggml(void) {
    ggml_formats g;
    const char *dir = getenv("ROCQ_GGML_DIR");
    char path[4096];
    memset(&g, 0, sizeof g);
    if (!dir || !*dir) {
        print_message("SKIPPED: ROCQ_GGML_DIR is not set, no comparison with ggml\n");
        skip();
    }
    snprintf(path, sizeof path, "%s/libggml-base.so", dir);
    g.base = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!g.base) {
        print_message("SKIPPED: cannot load ggml from ROCQ_GGML_DIR: %s\n", dlerror());
        skip();
    }
    ggml_symbol(g.base, "ggml_type_name", &g.type_name);
    ggml_symbol(g.base, "ggml_blck_size", &g.blck_size);
    ggml_symbol(g.base, "ggml_type_size", &g.type_size);
    ggml_symbol(g.base, "ggml_row_size", &g.row_size);
    ggml_symbol(g.base, "ggml_quantize_chunk", &g.chunk);
    return g;
}

// A function of ggml's for one format, by its lower-case name.
static void format_function(const ggml_formats *g, const char *pattern, rocq_format format,
                            void *function) {
    const char *names[] = {
#define X(NAME, lower, id, elems, bytes) #lower,
        ROCQ_FORMATS(X)
#undef X
    };
    char symbol[64];
    for (int f = 0; f < N_FORMATS; f++) {
        if (formats[f] == format) snprintf(symbol, sizeof symbol, pattern, names[f]);
    }
    ggml_symbol(g->base, symbol, function);
}

static void names_are_ggmls(void **state) {
    (void)state;
    const ggml_formats g = find_ggml();
    for (int f = 0; f < N_FORMATS; f++) {
        const rocq_format format = formats[f];
        rocq_format found = ROCQ_I32;
        if (!in_ggml(format)) continue;
        assert_int_equal(rocq_format_from_name(&found, g.type_name((int)format)), ROCQ_OK);
        assert_int_equal(found, format);
        assert_int_equal(block_elems(format), g.blck_size((int)format));
        assert_int_equal(block_bytes(format), g.type_size((int)format));
        for (int64_t blocks = 0; blocks < 4000; blocks += 1 + blocks / 3) {
            int64_t size = -1;
            assert_int_equal(rocq_row_size(format, blocks * block_elems(format), &size), ROCQ_OK);
            assert_int_equal(size, g.row_size((int)format, blocks * block_elems(format)));
        }
    }
    assert_int_equal(g.type_size(ROCQ_I32), rocq_get_format_info(ROCQ_I32)->block_bytes);
}

static void halves_are_ggmls(void **state) {
    (void)state;
    const ggml_formats g = find_ggml();
    float (*from_f16)(uint16_t), (*from_bf16)(uint16_t);
    uint16_t (*to_f16)(float), (*to_bf16)(float);
    ggml_symbol(g.base, "ggml_fp16_to_fp32", &from_f16);
    ggml_symbol(g.base, "ggml_bf16_to_fp32", &from_bf16);
    ggml_symbol(g.base, "ggml_fp32_to_fp16", &to_f16);
    ggml_symbol(g.base, "ggml_fp32_to_bf16", &to_bf16);
    for (uint32_t h = 0; h < 0x10000; h++) {
        const uint16_t half = (uint16_t)h;
        assert_true(same_float(rocq_f16_to_f32(half), from_f16(half)));
        assert_true(same_float(rocq__bf16_to_f32(half), from_bf16(half)));
        for (uint32_t low = 0; low < 3; low++) {
            const float v = rocq__bits_f32(
                h << 16 | (low == 2 ? (uint32_t)random_u64() & 0xffff : 0x8000 - low));
            assert_int_equal(rocq_f32_to_f16(v), to_f16(v));
            assert_int_equal(rocq__f32_to_bf16(v), to_bf16(v));
        }
    }
}

static void decodes_as_ggml(void **state) {
    (void)state;
    const ggml_formats g = find_ggml();
    for (int f = 0; f < N_FORMATS; f++) {
        const rocq_format format = formats[f];
        if (!in_ggml(format) || format == ROCQ_F32 || format == ROCQ_F16 || format == ROCQ_BF16)
            continue;
        const int64_t elems = block_elems(format), bytes = block_bytes(format), n = 500;
        void (*dequantize)(const void *, float *, int64_t);
        format_function(&g, "dequantize_row_%s", format, &dequantize);
        unsigned char *blocks = (unsigned char *)alloc(n * bytes);
        float *got = nans(n * elems), *want = nans(n * elems), *x = nans(n * elems);
        for (int turn = 0; turn < 12; turn++) {
            if (turn < 8 || !is_encoded(format)) {
                // Infinite and NaN scales are among them, and every entry of a codebook: of 2048
                // in 12 * 500 blocks of 32, the chance to miss one is 2048 e^-93.
                random_bytes(blocks, n * bytes);
            } else {
                const float size = ldexpf(1, 4 * turn - 44);
                for (int64_t i = 0; i < n * elems; i++) x[i] = random_normal() * size;
                assert_int_equal(g.chunk((int)format, x, blocks, 0, n, elems, NULL), n * bytes);
            }
            memset(got, 0xff, (size_t)(n * elems) * 4);
            dequantize(blocks, want, n * elems);
            assert_int_equal(rocq_dequantize(format, got, blocks, n * elems), ROCQ_OK);
            for (int64_t b = 0; b < n; b++) {
                bool same = true;
                for (int64_t i = b * elems; i < (b + 1) * elems; i++)
                    same = same && same_float(got[i], want[i]);
                summaries[f].decoded++;
                summaries[f].decoded_same += same;
            }
        }
        free(blocks);
        free(got);
        free(want);
        free(x);
        assert_int_equal(summaries[f].decoded_same, summaries[f].decoded);
    }
}

// Blocks of 32 that a fixed rule must meet exactly: ties, zeros, signs, subnormals, powers of two.
static void awkward_block(float *x, int kind, float largest) {
    const float unit = ldexpf((float)(1 + random_below(4096)), (int)random_below(18) - 20);
    for (int i = 0; i < 32; i++) {
        const int r = (int)random_below(255) - 127;
        switch (kind) {
        case 0: x[i] = random_normal(); break;
        case 1: x[i] = unit * (float)(r / 8) * 0.5f; break;   // ties at 4 bits
        case 2: x[i] = unit * (float)r * 0.5f; break;         // ties at 8 bits
        case 3: x[i] = unit * (float)(r / 8 * 2 + 1); break;
        case 4: x[i] = random_below(4) ? 0.0f : unit; break;
        case 5: x[i] = random_below(2) ? 0.0f : -0.0f; break;
        case 6: x[i] = rocq__bits_f32((uint32_t)random_u64() & 0x807fffff); break; // subnormal
        case 7: x[i] = rocq__bits_f32((uint32_t)random_u64() & 0x83ffffff); break; // and just above
        case 8: x[i] = -fabsf(random_normal()) - 1; break;
        case 9: x[i] = unit; break;
        case 10: x[i] = -unit; break;
        case 11:
            x[i] = nextafterf(ldexpf(random_below(2) ? 1.0f : -1.0f, (int)random_below(36) - 20),
                              (float)r);
            break;
        case 12: x[i] = random_in(-1, 1) * largest; break;
        case 13: x[i] = i == 7 ? largest : random_normal(); break;
        default: // any float up to the largest
            do x[i] = rocq__bits_f32((uint32_t)random_u64());
            while (!(fabsf(x[i]) <= largest));
        }
    }
    if (kind == 3) x[random_below(32)] = unit * 127;
}

static void encodes_as_ggml(void **state) {
    (void)state;
    const ggml_formats g = find_ggml();
    // The largest magnitude for which ggml's scale is a finite F16.
    static const struct { rocq_format format; float largest;
    } exact[] = {{ROCQ_Q4_0, 65519.0f * 8}, {ROCQ_Q4_1, 65519.0f},       {ROCQ_Q5_0, 65519.0f * 16},
                 {ROCQ_Q5_1, 65519.0f},     {ROCQ_Q8_0, 65519.0f * 127}, {ROCQ_MXFP4, FLT_MAX}};
    for (size_t k = 0; k < COUNT(exact); k++) {
        const rocq_format format = exact[k].format;
        const int64_t bytes = block_bytes(format), n = 15 * 400;
        void (*quantize)(const float *, void *, int64_t);
        format_function(&g, "quantize_row_%s_ref", format, &quantize);
        float *x = nans(n * 32);
        unsigned char *got = (unsigned char *)alloc(n * bytes),
                      *want = (unsigned char *)alloc(n * bytes);
        for (int64_t b = 0; b < n; b++) awkward_block(x + 32 * b, (int)(b % 15), exact[k].largest);
        memset(got, 0xa5, (size_t)(n * bytes));
        memset(want, 0x5a, (size_t)(n * bytes));
        quantize(x, want, n * 32);
        assert_int_equal(rocq_quantize(format, got, x, n / 10, 320, NULL), ROCQ_OK);
        summary *s = &summaries[0];
        for (int f = 0; f < N_FORMATS; f++) {
            if (formats[f] == format) s = &summaries[f];
        }
        for (int64_t b = 0; b < n; b++) {
            const bool same = same_bytes(got + b * bytes, want + b * bytes, bytes);
            s->encoded++;
            s->encoded_same += same;
            if (!same && s->encoded - s->encoded_same < 4) {
                print_message("%s differs for blocks of kind %d\n", rocq_format_name(format),
                              (int)(b % 15));
            }
        }
        free(x);
        free(got);
        free(want);
        assert_int_equal(s->encoded_same, s->encoded);
    }
}

// -- error of the searched formats --

static const char *const tensors[] = {
    "normal", "heavy tails", "laplace", "uniform", "positive", "negative", "sparse", "outliers",
    "one in a row",
    "constant", "constant per row", "constant and noise", "ramp", "sine", "two values",
    "three values", "four bits", "tiny", "small", "large", "scales mixed", "zero"};

static void make_tensor(int kind, float *x, int64_t rows, int64_t per_row) {
    float scale = 1;
    for (int64_t i = 0; i < rows * per_row; i++) {
        const float z = random_normal();
        if (kind == 20 ? i % 64 == 0 : i % per_row == 0) scale = expf(random_normal());
        switch (kind) {
        case 0: x[i] = 0.02f * z; break;
        case 1: x[i] = 0.02f * z / (fabsf(random_normal()) + 0.05f); break;
        case 2: x[i] = -0.02f * logf(random_in(1e-6f, 1)) * (z < 0 ? -1.0f : 1.0f); break;
        case 3: x[i] = random_in(-1, 1); break;
        case 4: x[i] = fabsf(z) + 0.5f; break;
        case 5: x[i] = -fabsf(z) - 0.1f; break;
        case 6: x[i] = random_below(10) ? 0.0f : z; break;
        case 7: x[i] = 0.02f * z * (random_below(100) ? 1.0f : 20.0f); break;
        case 8: x[i] = i % 97 == 5 ? z : 0.0f; break;
        case 9: x[i] = 0.731f; break;
        case 10: x[i] = scale; break;
        case 11: x[i] = 0.731f + 0.001f * z; break;
        case 12: x[i] = (float)i / (float)(rows * per_row) * 2 - 1; break;
        case 13: x[i] = 3 * sinf((float)i * 0.05f); break;
        case 14: x[i] = z < 0 ? -0.03f : 0.03f; break;
        case 15: x[i] = 0.05f * (float)(random_below(3) - 1); break;
        case 16: x[i] = 0.01f * scale * (float)(random_below(16) - 8); break;
        case 17: x[i] = 1e-6f * z; break;
        case 18: x[i] = 3e-4f * z; break;
        case 19: x[i] = 1e4f * z; break;
        case 20: x[i] = scale * scale * z; break;
        default: x[i] = 0; break;
        }
    }
}

static bool few_values(int kind) {
    return kind == 8 || kind == 9 || kind == 10 || (kind >= 14 && kind <= 16);
}

static double squared_error(rocq_format format, const float *x, const void *blocks, const float *w,
                            int64_t rows, int64_t per_row) {
    float *y = nans(rows * per_row);
    double sum = 0;
    assert_int_equal(rocq_dequantize(format, y, blocks, rows * per_row), ROCQ_OK);
    for (int64_t i = 0; i < rows * per_row; i++) {
        const double r = (double)x[i] - (double)y[i];
        sum += r * r * (w ? (double)w[i % per_row] : 1.0);
    }
    free(y);
    return sum;
}

// Never worse than ggml, tensor by tensor: plain error without importance, weighted error with it
// (which goes to ggml as its importance matrix).
static void error_against_ggml(void **state) {
    (void)state;
    const ggml_formats g = find_ggml();
    enum { ROWS = 4, PER_ROW = 512, N = ROWS * PER_ROW };
    float *x = nans(N), *w = nans(PER_ROW);
    int n_worse = 0;
    random_state = 5;
    for (int f = 0; f < N_FORMATS; f++) {
        const rocq_format format = formats[f];
        summary *s = &summaries[f];
        if (!rocq__codec_of(format)->pack) continue;
        const bool plain = rocq__codec_of(format)->grid.sc_lo == 1 && format != ROCQ_IQ4_NL;
        const int64_t size = N / block_elems(format) * block_bytes(format);
        unsigned char *ours = (unsigned char *)alloc(size), *theirs = (unsigned char *)alloc(size);
        for (int kind = 0; kind < (int)COUNT(tensors); kind++) {
            for (int weighted = plain; weighted < 2; weighted++) {
                make_tensor(kind, x, ROWS, PER_ROW);
                for (int i = 0; i < PER_ROW; i++) {
                    const float z = random_normal();
                    w[i] = kind % 3 == 1 && i % 17 == 0 ? 0.0f
                                                        : (0.05f + z * z) * expf(random_normal());
                }
                memset(ours, 0xa5, (size_t)size);
                assert_int_equal(rocq_quantize(format, ours, x, ROWS, PER_ROW, weighted ? w : NULL),
                                 ROCQ_OK);
                assert_int_equal(
                    g.chunk((int)format, x, theirs, 0, ROWS, PER_ROW, weighted ? w : NULL), size);
                const double got =
                    squared_error(format, x, ours, weighted ? w : NULL, ROWS, PER_ROW);
                const double peer =
                    squared_error(format, x, theirs, weighted ? w : NULL, ROWS, PER_ROW);
                const double ratio = peer > 0 ? got / peer : got > 0 ? INFINITY : 1;
                if (!weighted) {
                    s->ratio += ratio;
                    s->worst = fmax(s->worst, ratio);
                    s->n_ratios++;
                } else {
                    s->weighted += ratio;
                    s->weighted_worst = fmax(s->weighted_worst, ratio);
                    s->n_weighted++;
                }
                // Importance for the formats with a fixed rule is held to rocq's own rule below.
                if (!plain && !(got <= peer)) {
                    n_worse++;
                    print_message("%s, %s%s: error %g, ggml's %g\n", rocq_format_name(format),
                                  tensors[kind], weighted ? ", with importance" : "", got, peer);
                }
            }
        }
        free(ours);
        free(theirs);
    }
    free(x);
    free(w);
    assert_int_equal(n_worse, 0);
}

// -- encoding, without a peer --

// Importance makes the weighted error smaller, whatever the format (but for tensors of a few
// different values, where that is the luck of how their scales round); unimportant values are not
// thrown away, and weights times a power of two are the same weights.
static void importance(void **state) {
    (void)state;
    enum { ROWS = 2, PER_ROW = 512, N = ROWS * PER_ROW };
    float *x = nans(N), *y = nans(N), *w = nans(PER_ROW), *scaled = nans(PER_ROW),
          zeros[PER_ROW] = {0};
    random_state = 0x9b1c01acf0778b77u;
    for (int f = 0; f < N_FORMATS; f++) {
        const rocq_format format = formats[f];
        if (!is_encoded(format)) continue;
        const int64_t size = N / block_elems(format) * block_bytes(format);
        unsigned char *without = (unsigned char *)alloc(size), *with = (unsigned char *)alloc(size),
                      *again = (unsigned char *)alloc(size);
        double sum[2] = {0, 0};
        for (int kind = 0; kind < (int)COUNT(tensors); kind++) {
            make_tensor(kind, x, ROWS, PER_ROW);
            for (int i = 0; i < PER_ROW; i++) {
                const float z = random_normal();
                w[i] = i % 5 == 0 ? 0.0f : z * z * z * z;
                scaled[i] = w[i] * 0x1p-100f;
            }
            assert_int_equal(rocq_quantize(format, without, x, ROWS, PER_ROW, NULL), ROCQ_OK);
            assert_int_equal(rocq_quantize(format, with, x, ROWS, PER_ROW, w), ROCQ_OK);
            assert_int_equal(rocq_quantize(format, again, x, ROWS, PER_ROW, scaled), ROCQ_OK);
            assert_true(same_bytes(with, again, size));
            const double e0 = squared_error(format, x, without, w, ROWS, PER_ROW);
            const double e1 = squared_error(format, x, with, w, ROWS, PER_ROW);
            if (!few_values(kind) && !(e1 <= e0))
                fail_msg("%s, %s: weighted error %g without importance, %g with",
                         rocq_format_name(format), tensors[kind], e0, e1);
            if (kind == 0) {
                sum[0] = e0;
                sum[1] = e1;
                assert_int_equal(rocq_dequantize(format, y, with, N), ROCQ_OK);
                for (int i = 0; i < N; i++) assert_true(fabsf(y[i]) < 0.2f);
            }
            assert_int_equal(rocq_quantize(format, with, x, ROWS, PER_ROW, zeros), ROCQ_OK);
            const double e2 = squared_error(format, x, with, NULL, ROWS, PER_ROW);
            const double e3 = squared_error(format, x, without, NULL, ROWS, PER_ROW);
            if (!few_values(kind) && !(e2 <= e3))
                fail_msg("%s, %s: all weights 0: error %g, plain %g", rocq_format_name(format),
                         tensors[kind], e2, e3);
        }
        // A power of two as scale leaves little to choose.
        const bool coarse =
            format == ROCQ_MXFP4 || format == ROCQ_MXFP6_E2M3 || format == ROCQ_MXFP6_E3M2;
        if (format != ROCQ_F32 && format != ROCQ_F16 && format != ROCQ_BF16)
            assert_true(sum[1] < (coarse ? 1.0 : 0.97) * sum[0]);
        free(without);
        free(with);
        free(again);
    }
    free(x);
    free(y);
    free(w);
    free(scaled);
}

// Each row is encoded by itself, in place at its offset, into exactly the bytes it needs; blocks
// only need the alignment of their fields.
static void rows(void **state) {
    (void)state;
    for (int f = 0; f < N_FORMATS; f++) {
        const rocq_format format = formats[f];
        if (!is_encoded(format)) continue;
        const int64_t per_row = 3 * block_elems(format), n_rows = 5,
                      row_size = 3 * block_bytes(format);
        const int64_t align = rocq__alignment_of(format);
        float *x = nans(n_rows * per_row), *y = nans(n_rows * per_row), *w = nans(per_row);
        for (int64_t i = 0; i < n_rows * per_row; i++) x[i] = random_normal();
        for (int64_t i = 0; i < per_row; i++) w[i] = random_in(0.1f, 2);
        for (int weighted = 0; weighted < 2; weighted++) {
            unsigned char *all = (unsigned char *)alloc(n_rows * row_size + align),
                          *row = (unsigned char *)alloc(row_size);
            memset(all, 0xa5, (size_t)(n_rows * row_size + align));
            assert_int_equal(
                rocq_quantize(format, all + align, x, n_rows, per_row, weighted ? w : NULL),
                ROCQ_OK);
            for (int64_t r = 0; r < n_rows; r++) {
                assert_int_equal(
                    rocq_quantize(format, row, x + r * per_row, 1, per_row, weighted ? w : NULL),
                    ROCQ_OK);
                assert_true(same_bytes(row, all + align + r * row_size, row_size));
            }
            for (int64_t i = 0; i < align; i++) assert_int_equal(all[i], 0xa5);
            assert_int_equal(rocq_dequantize(format, y, all + align, n_rows * per_row), ROCQ_OK);
            double error = 0, square = 0;
            for (int64_t i = 0; i < n_rows * per_row; i++) {
                error += ((double)x[i] - (double)y[i]) * ((double)x[i] - (double)y[i]);
                square += (double)x[i] * (double)x[i];
            }
            assert_true(error <= 0.15 * square);
            free(all);
            free(row);
        }
        free(x);
        free(y);
        free(w);
    }
}

// Values beyond what F16 scales reach saturate: decoded values are finite, keep their sign where
// the format has one, and are near the largest that can be stored. F16 itself overflows to
// infinity.
static void extremes(void **state) {
    (void)state;
    float w[256];
    for (int i = 0; i < 256; i++) w[i] = (float)(1 + i % 3);
    for (int f = 0; f < N_FORMATS; f++) {
        const rocq_format format = formats[f];
        if (block_elems(format) == 1 || !is_encoded(format)) continue;
        for (int weighted = 0; weighted < 2; weighted++) {
            for (int exponent = -149; exponent <= 127; exponent++) {
                float x[256], y[256];
                unsigned char blocks[256 * 2];
                for (int i = 0; i < 256; i++) {
                    x[i] =
                        ldexpf(i % 16 == 3 ? -1.0f : 1.0f, exponent) * (i % 7 == 0 ? 1.0f : 0.5f);
                }
                memset(y, 0xff, sizeof y);
                memset(blocks, 0xff, sizeof blocks);
                assert_int_equal(rocq_quantize(format, blocks, x, 1, 256, weighted ? w : NULL),
                                 ROCQ_OK);
                assert_int_equal(rocq_dequantize(format, y, blocks, 256), ROCQ_OK);
                for (int i = 0; i < 256; i++) {
                    if (!(fabsf(y[i]) <= FLT_MAX))
                        fail_msg("%s: 2^%d gives %g", rocq_format_name(format), exponent,
                                 (double)y[i]);
                    if (exponent >= 20 && rocq__codec_of(format)->pack)
                        assert_true(fabsf(y[i]) >= 60000 || format == ROCQ_Q2_K ||
                                    (rocq__codec_of(format)->has_min && x[i] < 0));
                    if (exponent < -40 && rocq__codec_of(format)->pack) assert_true(y[i] == 0);
                    if (exponent >= 0 && fabsf(y[i]) > 0 && !rocq__codec_of(format)->has_min)
                        assert_true(x[i] * y[i] > 0 || x[i] * y[i] == INFINITY);
                }
            }
        }
    }
    const float big = 70000;
    uint16_t half = 0;
    assert_int_equal(rocq_quantize(ROCQ_F16, &half, &big, 1, 1, NULL), ROCQ_OK);
    assert_int_equal(half, 0x7c00);
}

// What ops may meet inside: NaN and infinity are no reason for undefined behaviour.
static void not_finite_inside(void **state) {
    (void)state;
    for (int f = 0; f < N_FORMATS; f++) {
        const rocq_format format = formats[f];
        if (!is_encoded(format)) continue;
        for (int kind = 0; kind < 5; kind++) {
            float x[256], w[256];
            unsigned char blocks[256 * 4];
            for (int i = 0; i < 256; i++) {
                x[i] = kind == 0 || i % 5 == kind ? (float)NAN
                       : kind == 3 || i % 11 == 0 ? -INFINITY
                                                  : random_normal();
                w[i] = 1;
            }
            rocq__quantize_row(format, blocks, x, 256, NULL);
            rocq__quantize_row(format, blocks, x, 256, w);
        }
    }
}

// Encoding reads src again after it has looked for what is not finite; neither way may it be dst.
static void overlapping_spans_are_refused(void **state) {
    (void)state;
    enum { N = 256 };
    static _Alignas(16) float memory[5 * N];
    static float before[5 * N];
    for (int i = 0; i < 5 * N; i++) memory[i] = before[i] = random_in(1, 2);
    float *const at = memory + 2 * N;
    for (int f = 0; f < N_FORMATS; f++) {
        const rocq_format format = formats[f];
        int64_t size;
        if (!is_encoded(format)) continue;
        assert_int_equal(rocq_row_size(format, N, &size), ROCQ_OK);
        unsigned char *const first = (unsigned char *)at;
        unsigned char *const places[] = {first, first + 4 * (N - 1), first - size + 4 - size % 4};
        for (int i = 0; i < 3; i++) {
            assert_int_equal(rocq_quantize(format, places[i], at, 1, N, NULL), ROCQ_E_ARGUMENT);
            assert_int_equal(rocq_quantize(format, places[i], memory, 1, N, at), ROCQ_E_ARGUMENT);
            assert_int_equal(rocq_dequantize(format, at, places[i], N), ROCQ_E_ARGUMENT);
        }
        assert_memory_equal(memory, before, sizeof before);
        assert_int_equal(rocq_quantize(format, first + 4 * N, at, 1, N, memory), ROCQ_OK); // touch
        assert_int_equal(rocq_dequantize(format, at, first + 4 * N, N), ROCQ_OK);
        assert_int_equal(rocq_quantize(format, at, at, 0, N, at), ROCQ_OK); // nothing at all
        memcpy(memory, before, sizeof before);
    }
}

static void failures(void **state) {
    (void)state;
    float x[256], y[256];
    unsigned char blocks[256 * 4 + 8], before[sizeof blocks];
    int64_t size = 77;
    rocq_format format = ROCQ_I32;
    for (int i = 0; i < 256; i++) x[i] = (float)i;
    memset(blocks, 0xa5, sizeof blocks);
    memcpy(before, blocks, sizeof blocks);
    memset(y, 0xff, sizeof y);

    assert_int_equal(rocq_row_size((rocq_format)5, 32, &size), ROCQ_E_FORMAT);
    assert_int_equal(rocq_row_size(ROCQ_Q4_0, -32, &size), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_row_size(ROCQ_Q4_0, 32, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_row_size(ROCQ_Q4_0, 33, &size), ROCQ_E_SHAPE);
    assert_int_equal(rocq_row_size(ROCQ_Q4_K, 128, &size), ROCQ_E_SHAPE);
    assert_int_equal(rocq_row_size(ROCQ_F32, INT64_MAX / 2, &size), ROCQ_E_OVERFLOW);
    assert_int_equal(size, 77);

    assert_int_equal(rocq_format_from_name(&format, "Q4_KK"), ROCQ_E_FORMAT);
    assert_int_equal(rocq_format_from_name(&format, "Q4_"), ROCQ_E_FORMAT);
    assert_int_equal(rocq_format_from_name(&format, ""), ROCQ_E_FORMAT);
    assert_int_equal(rocq_format_from_name(&format, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_format_from_name(NULL, "Q4_K"), ROCQ_E_ARGUMENT);
    assert_int_equal(format, ROCQ_I32);

    for (int f = 0; f < N_FORMATS; f++) {
        const rocq_format fmt = formats[f];
        const int64_t elems = block_elems(fmt), align = rocq__alignment_of(fmt);
        const float bad[3] = {NAN, INFINITY, -INFINITY};
        if (!is_encoded(fmt)) {
            assert_int_equal(rocq_quantize(fmt, blocks, x, 1, elems, NULL), ROCQ_E_UNSUPPORTED);
            assert_int_equal(rocq_dequantize(fmt, NULL, blocks, elems), ROCQ_E_ARGUMENT);
            assert_int_equal(rocq_dequantize(fmt, y, blocks, elems - 1), ROCQ_E_SHAPE);
            continue;
        }
        for (int i = 0; i < 3; i++) {
            const float keep = x[elems - 1];
            x[elems - 1] = bad[i];
            assert_int_equal(rocq_quantize(fmt, blocks, x, 1, elems, NULL), ROCQ_E_ARGUMENT);
            x[elems - 1] = keep;
            const float weight[4] = {NAN, INFINITY, -1, -FLT_MIN};
            for (int k = 0; k < 4; k++) {
                float w[256] = {0};
                w[elems - 1] = weight[k];
                assert_int_equal(rocq_quantize(fmt, blocks, x, 1, elems, w), ROCQ_E_ARGUMENT);
            }
        }
        assert_int_equal(rocq_quantize(fmt, NULL, x, 1, elems, NULL), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_quantize(fmt, blocks, NULL, 1, elems, NULL), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_quantize(fmt, blocks, x, -1, elems, NULL), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_quantize(fmt, blocks, x, 1, -elems, NULL), ROCQ_E_ARGUMENT);
        if (elems > 1)
            assert_int_equal(rocq_quantize(fmt, blocks, x, 1, elems + 1, NULL), ROCQ_E_SHAPE);
        assert_int_equal(rocq_quantize(fmt, blocks, x, INT64_MAX / 4, 4 * elems, NULL),
                         ROCQ_E_OVERFLOW);
        assert_int_equal(rocq_quantize(fmt, NULL, NULL, 0, elems, NULL), ROCQ_OK);
        assert_int_equal(rocq_quantize(fmt, NULL, NULL, 1, 0, NULL), ROCQ_OK);
        assert_int_equal(rocq_dequantize(fmt, NULL, blocks, elems), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_dequantize(fmt, y, NULL, elems), ROCQ_E_ARGUMENT);
        assert_int_equal(rocq_dequantize(fmt, y, blocks, -elems), ROCQ_E_ARGUMENT);
        if (elems > 1) assert_int_equal(rocq_dequantize(fmt, y, blocks, elems - 1), ROCQ_E_SHAPE);
        assert_int_equal(rocq_dequantize(fmt, NULL, NULL, 0), ROCQ_OK);
        if (align > 1) {
            unsigned char *odd = blocks + 1 + ((uintptr_t)blocks & 1);
            assert_int_equal(rocq_quantize(fmt, odd, x, 1, elems, NULL), ROCQ_E_ALIGNMENT);
            assert_int_equal(rocq_dequantize(fmt, y, odd, elems), ROCQ_E_ALIGNMENT);
        }
    }
    const rocq_format unknown[3] = {ROCQ_I32, (rocq_format)4, (rocq_format)-1};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(rocq_quantize(unknown[i], blocks, x, 1, 256, NULL), ROCQ_E_FORMAT);
        assert_int_equal(rocq_dequantize(unknown[i], y, blocks, 256), ROCQ_E_FORMAT);
    }
    assert_true(same_bytes(blocks, before, sizeof blocks));
    for (int i = 0; i < 256; i++) assert_true(y[i] != y[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_and_sizes),    cmocka_unit_test(halves),
        cmocka_unit_test(pictures),           cmocka_unit_test(packing),
        cmocka_unit_test(mxfp6_decode),       cmocka_unit_test(mxfp6_encode),
        cmocka_unit_test(same_everywhere),    cmocka_unit_test(decoders_agree),
        cmocka_unit_test(importance),
        cmocka_unit_test(rows),               cmocka_unit_test(extremes),
        cmocka_unit_test(not_finite_inside),  cmocka_unit_test(overlapping_spans_are_refused),
        cmocka_unit_test(failures),
        cmocka_unit_test(names_are_ggmls),    cmocka_unit_test(halves_are_ggmls),
        cmocka_unit_test(decodes_as_ggml),    cmocka_unit_test(encodes_as_ggml),
        cmocka_unit_test(error_against_ggml),
    };
    return cmocka_run_group_tests(tests, NULL, print_table);
}
