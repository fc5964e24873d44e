// tokenizer.h - text to token ids and back, from a GGUF file's metadata.
//
//     tokenizer t;
//     int32_t *ids = NULL;
//     if (tokenizer_open(&t, file) != ROCQ_OK) puts(t.error);
//     tokenizer_encode(&t, &ids, text, length, true, false);
//     rocq_str piece = tokenizer_piece(&t, ids[0], false); // there are arrlen(ids) of them
//     arrfree(ids);
//     tokenizer_close(&t);
//
// Three kinds of vocabulary: "llama" (SentencePiece BPE: merges by score, bytes as a fallback),
// "gpt2" (byte-level BPE: text is cut into words first, then merged by rank inside each) and
// "gemma4" (characters and bytes as the first's, lines for words, merged by rank). The ids
// are llama.cpp's for any bytes, valid UTF-8 or not, and take time about linear in the text. The
// exception: if the text has many beginnings of a long special token (a control token, with
// parse_special, or one of the user's own), the time is also proportional to that token's length;
// 100,000 bytes made for that take 0.2 s with a token of 1024 bytes.
//
// Its arrays are stb_ds's, which end the program where memory runs out (ds.h).

#ifndef TOKENIZER_H
#define TOKENIZER_H

#include "../rocq.h"
#include "ds.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---------------------------------------------------------------------------------------------
// Interface
// ---------------------------------------------------------------------------------------------

// Bytes that are not yet a whole character; starts zeroed.
typedef struct tokenizer_stream {
    unsigned char pending[4];
    int32_t n_pending;
} tokenizer_stream;

typedef struct tok__map { // finds a string's place in an array of strings
    rocq_str *strings;
    int32_t *slots;             // index + 1, 0 = free; their number is a power of two
    int64_t longest;            // string, in bytes
    uint64_t start, multiplier; // of tok__hash
} tok__map;

typedef struct tokenizer {
    int32_t n_vocab;
    int32_t bos, eos; // -1 = none
    char error[256];  // the message of the last failure, also of tokenizer_open

    // private
    const struct tok__pre *pre; // how words are cut; NULL for SentencePiece and gemma4
    bool ranked;             // merges are by rank, not by score
    bool add_bos, add_eos, add_space;
    int32_t byte_token[256]; // the token of a byte that no other token covers, or -1
    uint16_t byte_char[256]; // byte-level vocabularies: the character that stands for a byte,
    int16_t char_byte[324];  // and back; -1 = none
    tok__map vocab, merges;
    float *scores;            // [n_vocab]
    uint8_t *kinds;           // [n_vocab]: TOK__NORMAL and so on
    int32_t *special;         // tokens that are cut out of text, longest first
    struct tok__node *tree;   // the texts of special tokens
    int32_t roots[256];       // nodes of the tree by a text's first byte; -1 = none
    uint32_t *class_starts;   // where each of tok__class_runs begins
    int32_t *taken;           // from here on: while encoding
    char *text;
    uint32_t *codes;
    uint8_t *classes;
    struct tok__symbol *symbols;
    struct tok__pair *heap;
    char *piece;              // while decoding
} tokenizer;

// Token texts stay in the file, which must stay open. On failure everything is freed again, and *t
// is zero but for t->error.
static inline rocq_result tokenizer_open(tokenizer *t, const rocq_gguf *file);
static inline void tokenizer_close(tokenizer *t); // twice, or on a zeroed struct, is harmless

// Appends the tokens of a text of any bytes to *ids, an array of stb_ds's; on failure none.
// add_special: with BOS and EOS where the file asks for them. parse_special: "</s>" and its like in
// the text become the control tokens of that name.
static inline rocq_result tokenizer_encode(tokenizer *t, int32_t **ids, const char *text,
                                           int64_t length, bool add_special, bool parse_special);

// True when generation ends with this token.
static inline bool tokenizer_is_end(const tokenizer *t, int32_t id);

// The bytes of one token, maybe part of a character only; control tokens are empty unless special
// is set. Valid until the next call on t.
static inline rocq_str tokenizer_piece(tokenizer *t, int32_t id, bool special);

// The same for reading along: only whole UTF-8 characters come out, and U+FFFD for what never
// becomes one. id -1 flushes what is left. Allocates nothing.
static inline rocq_str tokenizer_next(tokenizer *t, tokenizer_stream *s, int32_t id, bool special);

// ---------------------------------------------------------------------------------------------
// Errors
// ---------------------------------------------------------------------------------------------

#define TOK__TRY(call)                        \
    do {                                      \
        const rocq_result tok__r = (call);    \
        if (tok__r != ROCQ_OK) return tok__r; \
    } while (0)

static rocq_result tok__fail(tokenizer *t, rocq_result result, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(t->error, sizeof t->error, format, args);
    va_end(args);
    rocq_message_clean(t->error, sizeof t->error);
    return result;
}

// ---------------------------------------------------------------------------------------------
// Strings by content
// ---------------------------------------------------------------------------------------------

// A table of its own, where stb_ds has maps. With those, of tokens by hash and of merges by pair of
// ids, a vocabulary of 150,000 tokens and 310,000 merges took 105 ms to open instead of 11, and a
// megabyte of text 1.2 to 1.8 times as long (AMD EPYC, best of many runs). SipHash-1-3 in the table
// took 1.1 to 1.4 times as long for text. Nor would a seed help stb_ds 0.67 against a file whose
// strings are made to collide: its hash, SipHash or not, ignores bytes 5 to 8 of a word whose
// fourth is 0x80 or more, as those of UTF-8 often are.

// FNV-1a from a start and with a multiplier that each opening draws anew, so that the writer of a
// file does not know which strings would meet in a slot and make opening it take quadratic time. (A
// few meet under every multiplier, but have a thousand bytes or more each.)
static uint64_t tok__hash(const tok__map *map, uint64_t hash, const char *text, int64_t n) {
    for (int64_t i = 0; i < n; i++) hash = (hash ^ (unsigned char)text[i]) * map->multiplier;
    return hash;
}

// 64 bits that the writer of a file cannot foresee: the clock's nanoseconds and the addresses of
// two objects, mixed by the finalizer of splitmix64. They are no secret of cryptographic strength.
static uint64_t tok__random(const tokenizer *t, const rocq_gguf *file) {
    uint64_t x = (uint64_t)rocq_time_ns() * 0x9e3779b97f4a7c15u;
    x ^= (uint64_t)(uintptr_t)t << 32 ^ (uint64_t)(uintptr_t)file;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// The slot of "a b", or of "a" where b is NULL; or the free slot where it would go.
static int32_t *tok__slot(const tok__map *map, const char *a, int64_t n_a, const char *b,
                          int64_t n_b) {
    const rocq_str *strings = map->strings;
    int32_t *slots = map->slots;
    const int64_t last = arrlen(slots) - 1;
    uint64_t hash = tok__hash(map, map->start, a, n_a);
    if (b) hash = tok__hash(map, tok__hash(map, hash, " ", 1), b, n_b);
    const int64_t length = b ? n_a + 1 + n_b : n_a;
    int64_t i = (int64_t)((hash ^ hash >> 32) & (uint64_t)last);
    for (; slots[i] != 0; i = (i + 1) & last) {
        const rocq_str s = strings[slots[i] - 1];
        if (s.length != length || memcmp(s.data, a, (size_t)n_a) != 0) continue;
        if (!b || (s.data[n_a] == ' ' && memcmp(s.data + n_a + 1, b, (size_t)n_b) == 0)) break;
    }
    return &slots[i];
}

// Index of the string, or -1.
static int32_t tok__find(const tok__map *map, const char *a, int64_t n_a, const char *b,
                         int64_t n_b) {
    if (!map->slots || n_a + n_b > map->longest) return -1;
    return *tok__slot(map, a, n_a, b, n_b) - 1;
}

// Reads an array of strings. Of equal ones the last is found, or the first.
static rocq_result tok__read_map(tokenizer *t, const rocq_gguf *file, const char *key,
                                 tok__map *map, bool last_wins) {
    rocq_gguf_value value;
    const void *cursor = NULL;
    if (rocq_gguf_find_value(file, key, &value) != ROCQ_OK) {
        return tok__fail(t, ROCQ_E_NOT_FOUND, "the file has no %s", key);
    }
    if (!value.is_array || value.type != ROCQ_GGUF_STRING || value.count > INT32_MAX / 2) {
        return tok__fail(t, ROCQ_E_TYPE, "%s is not an array of strings", key);
    }
    int64_t n_slots = 64;
    while (n_slots < 2 * value.count) n_slots *= 2;
    map->start = tok__random(t, file);
    map->multiplier = tok__random(t, file) | 1;
    arrsetlen(map->slots, n_slots);
    arrsetcap(map->strings, (size_t)value.count);
    memset(map->slots, 0, (size_t)n_slots * sizeof *map->slots);
    for (int64_t i = 0; i < value.count; i++) {
        rocq_str s;
        if (rocq_gguf_next_str(&value, &cursor, &s) != ROCQ_OK) {
            return tok__fail(t, ROCQ_E_CORRUPT, "%s ends early", key);
        }
        if (s.length > INT32_MAX / 8) {
            return tok__fail(t, ROCQ_E_OVERFLOW, "%s has a string of %.0f bytes", key,
                             (double)s.length);
        }
        arrput(map->strings, s);
        if (s.length == 0) continue;
        if (s.length > map->longest) map->longest = s.length;
        int32_t *slot = tok__slot(map, s.data, s.length, NULL, 0);
        if (*slot == 0 || last_wins) *slot = (int32_t)i + 1;
    }
    return ROCQ_OK;
}

// ---------------------------------------------------------------------------------------------
// Characters
// ---------------------------------------------------------------------------------------------

enum {
    TOK__OTHER, // symbols, marks, controls, the unassigned
    TOK__NUMBER,
    TOK__LETTER,
    TOK__PUNCTUATION,
    TOK__SPACE // property White_Space; no space is a number, letter or punctuation
};

// General categories N, L and P of Unicode 15.1, as runs of equal class from U+0000 on:
// 4 * length + class. Made from the Unicode Character Database. Beyond them all is OTHER.
static const uint32_t tok__class_runs[] = {
    132, 15, 4, 27, 4, 19, 41, 11, 12, 11, 106, 15, 4, 7, 4, 106, 7, 4, 7, 140, 7, 20, 7, 8, 6, 7,
    24, 9, 4, 6, 11, 4, 5, 6, 7, 13, 7, 94, 4, 126, 4, 1834, 16, 50, 56, 22, 28, 6, 4, 6, 516, 22,
    4, 10, 8, 18, 7, 6, 24, 6, 7, 14, 4, 6, 4, 82, 4, 334, 4, 558, 32, 666, 4, 154, 8, 6, 27, 166,
    11, 204, 7, 4, 7, 8, 7, 8, 7, 36, 110, 16, 18, 11, 80, 11, 4, 11, 52, 7, 4, 15, 174, 84, 41, 19,
    10, 4, 398, 7, 6, 60, 10, 28, 10, 41, 14, 8, 6, 59, 8, 6, 4, 122, 116, 358, 44, 6, 56, 41, 134,
    36, 10, 4, 15, 6, 20, 90, 16, 6, 36, 6, 12, 6, 28, 63, 4, 102, 20, 7, 4, 46, 20, 98, 4, 26, 68,
    170, 232, 218, 12, 6, 72, 6, 28, 42, 8, 11, 41, 7, 66, 16, 34, 8, 10, 8, 90, 4, 30, 4, 6, 12,
    18, 12, 6, 64, 6, 52, 10, 4, 14, 16, 41, 10, 8, 25, 8, 6, 7, 28, 26, 16, 10, 8, 90, 4, 30, 4,
    10, 4, 10, 4, 10, 124, 18, 4, 6, 28, 41, 8, 14, 4, 7, 56, 38, 4, 14, 4, 90, 4, 30, 4, 10, 4, 22,
    12, 6, 72, 6, 60, 10, 16, 41, 7, 32, 6, 44, 34, 8, 10, 8, 90, 4, 30, 4, 10, 4, 22, 12, 6, 120,
    10, 4, 14, 16, 41, 4, 6, 25, 44, 6, 4, 26, 12, 14, 4, 18, 12, 10, 4, 6, 4, 10, 12, 10, 12, 14,
    12, 50, 88, 6, 84, 53, 72, 34, 4, 14, 4, 94, 4, 66, 12, 6, 104, 14, 8, 6, 8, 10, 16, 41, 28, 7,
    29, 4, 6, 12, 7, 34, 4, 14, 4, 94, 4, 42, 4, 22, 12, 6, 124, 10, 4, 10, 16, 41, 4, 10, 68, 38,
    4, 14, 4, 166, 8, 6, 64, 6, 20, 14, 4, 29, 14, 16, 77, 4, 26, 20, 74, 12, 98, 4, 38, 4, 6, 8,
    30, 124, 41, 16, 7, 48, 194, 4, 10, 48, 30, 32, 7, 41, 11, 148, 10, 4, 6, 4, 22, 4, 98, 4, 6, 4,
    42, 4, 10, 36, 6, 8, 22, 4, 6, 36, 41, 8, 18, 128, 6, 12, 63, 4, 7, 44, 81, 24, 19, 8, 34, 4,
    146, 96, 7, 8, 22, 268, 23, 16, 11, 148, 174, 80, 6, 41, 27, 26, 16, 18, 12, 6, 12, 10, 28, 14,
    16, 54, 48, 6, 4, 41, 24, 154, 4, 6, 20, 6, 8, 174, 7, 1334, 4, 18, 8, 30, 4, 6, 4, 18, 8, 166,
    4, 18, 8, 134, 4, 18, 8, 30, 4, 6, 4, 18, 8, 62, 4, 230, 4, 18, 8, 270, 20, 39, 81, 12, 66, 64,
    346, 8, 26, 8, 7, 2482, 4, 7, 70, 4, 106, 11, 12, 302, 15, 13, 34, 28, 74, 52, 78, 12, 11, 36,
    74, 56, 54, 4, 14, 60, 210, 128, 15, 6, 15, 4, 6, 12, 41, 24, 41, 24, 47, 20, 41, 24, 358, 28,
    22, 8, 138, 4, 6, 20, 282, 40, 126, 148, 11, 41, 122, 8, 22, 44, 178, 16, 106, 24, 45, 148, 94,
    28, 11, 214, 172, 41, 24, 41, 24, 31, 6, 27, 348, 190, 68, 34, 12, 41, 31, 112, 11, 16, 122, 52,
    10, 41, 178, 88, 19, 146, 92, 23, 41, 12, 14, 41, 146, 11, 38, 28, 174, 8, 14, 35, 44, 7, 84,
    18, 4, 26, 4, 10, 12, 6, 20, 770, 256, 1114, 8, 26, 8, 154, 8, 26, 8, 34, 4, 6, 4, 6, 4, 6, 4,
    126, 8, 214, 4, 30, 4, 6, 12, 14, 4, 30, 12, 18, 8, 26, 16, 54, 20, 14, 4, 30, 76, 99, 32, 83,
    4, 55, 4, 51, 68, 5, 6, 8, 25, 12, 11, 6, 41, 12, 11, 4, 54, 404, 6, 16, 6, 8, 42, 4, 6, 12, 22,
    24, 6, 4, 6, 4, 6, 4, 18, 4, 46, 8, 18, 20, 22, 16, 6, 4, 205, 10, 21, 1528, 19, 116, 11, 1236,
    241, 312, 89, 2464, 59, 121, 196, 11, 124, 43, 1612, 91, 252, 19, 128, 11, 2056, 918, 24, 18,
    12, 10, 20, 19, 5, 11, 154, 4, 6, 20, 6, 8, 226, 28, 6, 7, 60, 94, 36, 30, 4, 30, 4, 30, 4, 30,
    4, 30, 4, 30, 4, 30, 4, 30, 132, 191, 6, 131, 8, 51, 1676, 15, 4, 10, 5, 43, 8, 51, 4, 37, 24,
    7, 22, 8, 13, 10, 7, 12, 346, 24, 14, 7, 362, 7, 18, 20, 174, 4, 378, 12, 17, 40, 130, 192, 66,
    128, 41, 120, 33, 4, 61, 128, 41, 156, 61, 1280, 26370, 256, 88630, 268, 186, 11, 1078, 15, 66,
    41, 10, 80, 190, 16, 7, 40, 7, 126, 8, 282, 41, 8, 27, 124, 38, 8, 414, 8, 258, 20, 10, 4, 6, 4,
    22, 96, 66, 4, 14, 4, 18, 4, 94, 52, 25, 40, 210, 19, 40, 202, 104, 11, 41, 96, 26, 15, 6, 7,
    10, 4, 41, 114, 32, 11, 94, 96, 7, 118, 28, 190, 56, 55, 4, 6, 41, 16, 11, 22, 4, 42, 41, 22, 4,
    166, 92, 14, 4, 34, 16, 41, 8, 19, 94, 12, 6, 12, 202, 4, 6, 12, 10, 8, 22, 8, 6, 4, 6, 96, 14,
    11, 46, 20, 11, 14, 48, 26, 8, 26, 8, 26, 36, 30, 4, 30, 4, 174, 4, 58, 24, 462, 32, 7, 16, 41,
    24, 44690, 48, 94, 16, 198, 33808, 1466, 8, 426, 152, 30, 48, 22, 20, 6, 4, 42, 4, 54, 4, 22, 4,
    6, 4, 10, 4, 10, 4, 434, 132, 1454, 11, 64, 258, 8, 218, 160, 50, 80, 43, 88, 143, 4, 59, 4, 7,
    16, 7, 4, 11, 16, 22, 4, 542, 16, 15, 4, 27, 4, 19, 41, 11, 12, 11, 106, 15, 4, 7, 4, 106, 7, 4,
    7, 4, 31, 358, 12, 26, 8, 26, 8, 26, 8, 14, 140, 50, 4, 106, 4, 78, 4, 10, 4, 62, 8, 58, 136,
    494, 20, 15, 16, 181, 48, 229, 68, 9, 976, 118, 12, 198, 64, 109, 16, 130, 17, 36, 82, 5, 34, 5,
    20, 154, 40, 122, 4, 7, 146, 16, 34, 7, 21, 168, 634, 8, 41, 24, 146, 16, 146, 16, 162, 32, 210,
    44, 7, 46, 4, 62, 4, 30, 4, 10, 4, 46, 4, 62, 4, 30, 4, 10, 268, 1246, 36, 90, 40, 34, 96, 26,
    4, 170, 4, 38, 276, 26, 8, 6, 4, 178, 4, 10, 12, 6, 8, 94, 4, 7, 33, 94, 8, 29, 126, 32, 37,
    192, 78, 4, 10, 20, 21, 90, 25, 12, 7, 106, 20, 7, 256, 226, 16, 9, 10, 65, 8, 185, 6, 60, 18,
    4, 14, 4, 118, 40, 37, 28, 39, 28, 118, 9, 7, 118, 13, 128, 34, 4, 114, 24, 21, 31, 36, 218, 12,
    31, 90, 8, 33, 78, 20, 33, 74, 28, 19, 48, 29, 320, 294, 220, 206, 52, 206, 28, 25, 146, 48, 41,
    1176, 125, 4, 170, 12, 7, 8, 10, 312, 118, 41, 6, 32, 90, 44, 17, 23, 88, 74, 16, 19, 152, 86,
    29, 80, 94, 48, 214, 60, 31, 16, 121, 4, 10, 8, 6, 52, 182, 44, 11, 4, 19, 56, 102, 28, 41, 36,
    146, 60, 41, 19, 6, 8, 6, 32, 142, 4, 11, 6, 48, 194, 56, 18, 19, 16, 7, 8, 41, 6, 7, 6, 15, 4,
    81, 44, 74, 4, 102, 48, 27, 4, 10, 252, 30, 4, 6, 4, 18, 4, 62, 4, 42, 7, 24, 190, 68, 41, 44,
    34, 8, 10, 8, 90, 4, 30, 4, 10, 4, 22, 12, 6, 72, 6, 48, 22, 632, 214, 72, 18, 23, 41, 11, 4, 7,
    4, 14, 120, 194, 80, 10, 7, 6, 32, 41, 664, 190, 72, 95, 18, 144, 194, 68, 15, 6, 44, 41, 24,
    55, 76, 174, 52, 6, 7, 24, 41, 216, 110, 84, 49, 15, 4, 30, 740, 178, 60, 7, 400, 258, 77, 48,
    34, 8, 6, 8, 34, 4, 10, 4, 98, 60, 6, 4, 6, 8, 15, 36, 41, 280, 34, 8, 158, 64, 6, 7, 6, 112, 6,
    40, 162, 28, 6, 16, 35, 36, 6, 44, 186, 64, 15, 6, 23, 52, 294, 28, 43, 984, 38, 4, 150, 68, 6,
    23, 40, 117, 12, 11, 122, 448, 30, 4, 10, 4, 154, 84, 6, 36, 41, 24, 26, 4, 10, 4, 130, 56, 6,
    28, 41, 1240, 78, 16, 11, 36, 6, 4, 54, 4, 138, 60, 55, 41, 344, 6, 60, 85, 168, 7, 3690, 408,
    445, 4, 23, 44, 786, 10544, 390, 11, 52, 4290, 68, 26, 16100, 2334, 34532, 2278, 28, 126, 4, 41,
    16, 11, 318, 4, 41, 24, 122, 28, 7, 40, 194, 28, 23, 16, 18, 7, 44, 41, 4, 29, 4, 86, 20, 78,
    2752, 258, 93, 19, 404, 302, 20, 6, 264, 54, 256, 10, 7, 6, 112, 24546, 32, 4954, 168, 38,
    35740, 18, 4, 30, 4, 10, 4, 1166, 60, 6, 116, 14, 8, 6, 56, 18, 32, 1586, 9232, 430, 20, 54, 12,
    38, 28, 42, 20, 7, 22656, 81, 48, 81, 432, 101, 540, 342, 4, 286, 4, 10, 8, 6, 8, 10, 8, 18, 4,
    50, 4, 6, 4, 30, 4, 262, 4, 18, 8, 34, 4, 30, 4, 114, 4, 18, 4, 22, 4, 6, 12, 30, 4, 1362, 8,
    102, 4, 102, 4, 126, 4, 102, 4, 126, 4, 102, 4, 126, 4, 102, 4, 126, 4, 102, 4, 34, 8, 201,
    2588, 23, 4560, 126, 24, 26, 1044, 250, 584, 182, 40, 30, 8, 41, 16, 6, 1284, 122, 72, 178, 16,
    41, 1880, 114, 16, 41, 2968, 30, 4, 18, 4, 10, 4, 62, 4, 790, 8, 37, 192, 274, 28, 6, 16, 41,
    16, 11, 3140, 237, 4, 13, 4, 17, 304, 181, 4, 61, 776, 18, 4, 110, 4, 10, 4, 6, 8, 6, 4, 42, 4,
    18, 4, 6, 4, 6, 24, 6, 16, 6, 4, 6, 4, 6, 4, 14, 4, 10, 4, 6, 8, 6, 4, 6, 4, 6, 4, 6, 4, 6, 4,
    10, 4, 6, 8, 18, 4, 30, 4, 18, 4, 18, 4, 6, 4, 42, 4, 70, 20, 14, 4, 22, 4, 70, 2320, 53, 11148,
    41, 4120, 170882, 128, 16618, 24, 890, 8, 23050, 56, 29894, 60, 2490, 9864, 2170, 6024, 19758,
    20, 16770,
};

enum { TOK__N_RUNS = sizeof tok__class_runs / sizeof tok__class_runs[0] };

// General category M from U+0300 on, as runs of marks and of others in turn.
static const uint32_t tok__mark_runs[] = {
    112, 275, 7, 263, 45, 1, 1, 1, 2, 1, 2, 1, 1, 72, 11, 48, 21, 16, 1, 101, 7, 2, 6, 2, 2, 1, 4,
    35, 1, 30, 27, 91, 11, 58, 9, 9, 1, 24, 4, 1, 9, 1, 3, 1, 5, 43, 3, 60, 8, 42, 24, 1, 33, 54, 3,
    1, 18, 1, 7, 10, 2, 29, 3, 56, 1, 1, 7, 2, 2, 2, 3, 9, 1, 10, 2, 26, 1, 2, 3, 56, 1, 1, 5, 4, 2,
    2, 3, 3, 1, 30, 2, 3, 1, 11, 3, 56, 1, 1, 8, 1, 3, 1, 3, 20, 2, 22, 6, 1, 3, 56, 1, 1, 7, 2, 2,
    2, 3, 7, 3, 10, 2, 30, 1, 59, 5, 3, 3, 1, 4, 9, 1, 40, 5, 55, 1, 1, 7, 1, 3, 1, 4, 7, 2, 11, 2,
    29, 3, 56, 1, 1, 7, 1, 3, 1, 4, 7, 2, 11, 2, 15, 1, 12, 4, 55, 2, 1, 7, 1, 3, 1, 4, 9, 1, 10, 2,
    29, 3, 70, 1, 4, 6, 1, 1, 1, 8, 18, 2, 61, 1, 2, 7, 12, 8, 98, 1, 2, 9, 11, 7, 73, 2, 27, 1, 1,
    1, 1, 1, 4, 2, 49, 20, 1, 2, 5, 11, 1, 36, 9, 1, 100, 20, 23, 4, 4, 3, 1, 3, 2, 7, 3, 4, 13, 12,
    1, 1, 10, 4, 703, 3, 946, 4, 28, 3, 29, 2, 30, 2, 64, 32, 9, 1, 45, 3, 1, 1, 117, 2, 34, 1, 118,
    12, 4, 12, 219, 5, 57, 10, 1, 29, 2, 1, 48, 31, 49, 5, 47, 17, 38, 9, 12, 3, 30, 13, 56, 14, 48,
    20, 152, 3, 1, 21, 4, 1, 6, 1, 2, 3, 198, 64, 720, 33, 3070, 3, 141, 1, 96, 32, 554, 6, 105, 2,
    30164, 4, 1, 10, 32, 2, 80, 2, 272, 1, 3, 1, 4, 1, 23, 5, 4, 1, 83, 2, 50, 18, 26, 18, 13, 1,
    38, 8, 25, 13, 44, 4, 47, 14, 36, 1, 67, 14, 12, 1, 8, 2, 45, 3, 50, 1, 1, 3, 2, 2, 5, 2, 1, 1,
    41, 5, 5, 2, 236, 8, 1, 2, 20272, 1, 737, 16, 16, 16, 973, 1, 226, 1, 149, 5, 1670, 3, 1, 2, 5,
    4, 40, 3, 4, 1, 165, 2, 573, 4, 387, 2, 80, 3, 70, 11, 49, 4, 122, 3, 53, 15, 41, 1, 2, 2, 10,
    4, 45, 11, 7, 1, 61, 3, 36, 14, 16, 2, 44, 1, 12, 3, 48, 14, 8, 4, 1, 2, 92, 12, 6, 1, 2, 1,
    157, 12, 21, 4, 55, 2, 1, 7, 2, 2, 2, 3, 9, 1, 10, 2, 2, 7, 3, 5, 192, 18, 23, 1, 81, 20, 235,
    7, 2, 9, 27, 2, 82, 17, 106, 13, 101, 15, 256, 15, 245, 6, 1, 2, 2, 4, 1, 1, 1, 2, 141, 7, 2, 7,
    3, 1, 28, 10, 40, 7, 1, 4, 8, 1, 9, 11, 46, 16, 405, 8, 1, 8, 82, 22, 1, 14, 122, 6, 3, 1, 1, 2,
    1, 7, 1, 1, 66, 5, 1, 2, 1, 5, 347, 4, 9, 2, 1, 1, 48, 7, 3, 5, 5373, 1, 6, 15, 13978, 5, 59, 7,
    1048, 1, 1, 55, 7, 4, 81, 1, 11, 2, 19627, 2, 4705, 46, 2, 23, 542, 5, 3, 6, 8, 8, 2, 7, 30, 4,
    148, 3, 1979, 55, 4, 50, 8, 1, 14, 1, 22, 5, 1, 15, 1360, 7, 1, 17, 2, 7, 1, 2, 1, 5, 100, 1,
    160, 7, 375, 1, 61, 4, 508, 4, 992, 7, 109, 7, 792501, 240};

static bool tok__is_combining(uint32_t code) {
    uint32_t at = 0x300;
    for (size_t i = 0; i < sizeof tok__mark_runs / sizeof tok__mark_runs[0] && at <= code; i++) {
        at += tok__mark_runs[i];
        if (code < at) return i % 2 == 0;
    }
    return false;
}

static int tok__class(const tokenizer *t, uint32_t code) {
    const uint32_t *starts = t->class_starts;
    if ((code >= 9 && code <= 13) || code == 0x20 || code == 0x85 || code == 0xa0 ||
        code == 0x1680 || (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 ||
        code == 0x202f || code == 0x205f || code == 0x3000) {
        return TOK__SPACE;
    }
    if (code >= starts[TOK__N_RUNS]) return TOK__OTHER;
    int low = 0, high = TOK__N_RUNS; // starts[low] <= code < starts[high]
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (starts[middle] <= code) low = middle;
        else high = middle;
    }
    return (int)(tok__class_runs[low] & 3u);
}

static int tok__put_utf8(char *out, uint32_t code) {
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    const int n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--, code >>= 6) out[i] = (char)(0x80u | (code & 0x3fu));
    out[0] = (char)(unsigned char)((0xf0u << (4 - n)) | code);
    return n;
}

// Reads one character as llama.cpp does: any sequence of the right form counts, overlong ones and
// surrogates too; a byte that begins none is U+FFFD.
static int tok__get_utf8(const char *text, int64_t n, uint32_t *code) {
    const unsigned char *s = (const unsigned char *)text, c = s[0];
    const int length = c < 0x80 ? 1 : c < 0xc0 ? 0 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf8 ? 4 : 0;
    bool whole = length > 0 && length <= n;
    for (int i = 1; whole && i < length; i++) whole = (s[i] & 0xc0u) == 0x80u;
    *code = 0xfffd;
    if (!whole) return 1;
    uint32_t value = length == 1 ? c : c & (0x7fu >> length);
    for (int i = 1; i < length; i++) value = value << 6 | (s[i] & 0x3fu);
    if (value <= 0x10ffff) *code = value;
    return length;
}

// Strict, for output: the length of the valid character at s; 0 when n bytes may still become one;
// or minus the number of bytes that cannot.
static int tok__valid_utf8(const unsigned char *s, int32_t n) {
    const unsigned char c = s[0];
    const int length = c < 0x80 ? 1 : c < 0xc2 ? 0 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf5 ? 4 : 0;
    if (length == 0) return -1;
    for (int i = 1; i < length; i++) {
        if (i >= n) return 0;
        const unsigned char low = i > 1 ? 0x80 : c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
        const unsigned char high = i > 1 ? 0xbf : c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
        if (s[i] < low || s[i] > high) return -i;
    }
    return length;
}

// ---------------------------------------------------------------------------------------------
// Cutting text into words, before byte-level BPE
// ---------------------------------------------------------------------------------------------
// A vocabulary was trained on words that a regular expression cut, and only fits words cut the same
// way. Each rule below is one expression, quoted above it, and returns the end of the word at `at`.
// Where an expression only finds things, what lies between is a word too. Several rules in a row:
// each cuts the words of the one before.

typedef struct tok__chars {
    const uint32_t *code;
    const uint8_t *kind; // tok__class of each
} tok__chars;

typedef int64_t (*tok__rule)(const tok__chars *x, int64_t at, int64_t end);

static bool tok__is_symbol(int kind) { // [^\s\p{L}\p{N}]
    return kind == TOK__OTHER || kind == TOK__PUNCTUATION;
}

static bool tok__is_newline(uint32_t code) { return code == '\r' || code == '\n'; }

static bool tok__is_one_of(uint32_t code, const char *ascii) {
    return code > 0 && code < 0x80 && strchr(ascii, (int)code);
}

// Length of 's 't 'm 'd 're 've 'll at `at`, else 0.
static int64_t tok__contraction(const tok__chars *x, int64_t at, int64_t end, bool any_case) {
    uint32_t c[2] = {0, 0};
    if (x->code[at] != '\'') return 0;
    for (int i = 0; i < 2 && at + 1 + i < end; i++) {
        c[i] = x->code[at + 1 + i];
        if (any_case && c[i] >= 'A' && c[i] <= 'Z') c[i] += 'a' - 'A';
    }
    if (c[0] == 's' || c[0] == 't' || c[0] == 'm' || c[0] == 'd') return 2;
    const bool two = c[0] == 'l' ? c[1] == 'l' : (c[0] == 'r' || c[0] == 'v') && c[1] == 'e';
    return two ? 3 : 0;
}

// \s+(?!\S)|\s+ : the last space before a word is left to it. With newlines, before that
// \s*[\r\n]+ : up to the last line end.
static int64_t tok__spaces(const tok__chars *x, int64_t at, int64_t end, bool newlines) {
    int64_t stop = at, line = at;
    for (; stop < end && x->kind[stop] == TOK__SPACE; stop++) {
        if (newlines && tok__is_newline(x->code[stop])) line = stop + 1;
    }
    if (line > at) return line;
    return stop < end && stop > at + 1 ? stop - 1 : stop;
}

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
static int64_t tok__rule_gpt2(const tok__chars *x, int64_t at, int64_t end) {
    const int64_t contraction = tok__contraction(x, at, end, false);
    if (contraction > 0) return at + contraction;
    int64_t i = at + (x->code[at] == ' ' && at + 1 < end ? 1 : 0);
    const int kind = x->kind[i];
    if (kind == TOK__SPACE) return tok__spaces(x, at, end, false);
    while (i < end && (x->kind[i] == kind ||
                       (tok__is_symbol(kind) && tok__is_symbol(x->kind[i])))) i++;
    return i;
}

// What the next four rules share, after their words of letters and numbers:
//  ?[^\s\p{L}\p{N}]+[tail]*|\s*[\r\n]+|\s+(?!\S)|\s+
static int64_t tok__rest(const tok__chars *x, int64_t at, int64_t end, const char *tail) {
    int64_t i = at + (x->code[at] == ' ' && at + 1 < end ? 1 : 0);
    if (!tok__is_symbol(x->kind[i])) return tok__spaces(x, at, end, true);
    while (i < end && tok__is_symbol(x->kind[i])) i++;
    while (i < end && tok__is_one_of(x->code[i], tail)) i++;
    return i;
}

// True at a letter, or at what may stand before one: [^\r\n\p{L}\p{N}]?\p{L}
static bool tok__starts_letters(const tok__chars *x, int64_t at, int64_t end) {
    if (x->kind[at] == TOK__LETTER) return true;
    return x->kind[at] != TOK__NUMBER && !tok__is_newline(x->code[at]) && at + 1 < end &&
           x->kind[at + 1] == TOK__LETTER;
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,digits}| rest
static int64_t tok__rule_letters(const tok__chars *x, int64_t at, int64_t end, int digits,
                                 const char *tail) {
    const int64_t contraction = tok__contraction(x, at, end, true);
    if (contraction > 0) return at + contraction;
    int64_t i = at + 1;
    if (tok__starts_letters(x, at, end)) {
        while (i < end && x->kind[i] == TOK__LETTER) i++;
        return i;
    }
    if (x->kind[at] != TOK__NUMBER) return tok__rest(x, at, end, tail);
    while (i < end && i < at + digits && x->kind[i] == TOK__NUMBER) i++;
    return i;
}

static int64_t tok__rule_llama3(const tok__chars *x, int64_t at, int64_t end) {
    return tok__rule_letters(x, at, end, 3, "\r\n");
}

static int64_t tok__rule_qwen2(const tok__chars *x, int64_t at, int64_t end) {
    return tok__rule_letters(x, at, end, 1, "\r\n");
}

static int64_t tok__rule_seed_coder(const tok__chars *x, int64_t at, int64_t end) {
    return tok__rule_letters(x, at, end, 1, "");
}

// [^\r\n\p{L}\p{N}]?U*W+(?:'s)?|[^\r\n\p{L}\p{N}]?U+W*(?:'s)?|\p{N}{1,digits}| rest, where U is any
// letter but a-z, and W any but A-Z: capitals begin a word. 's is any contraction in any case, and
// is there where contractions is set.
static int64_t tok__rule_capitals(const tok__chars *x, int64_t at, int64_t end, int digits,
                                  bool contractions) {
    int64_t i = at + 1;
    if (!tok__starts_letters(x, at, end)) {
        if (x->kind[at] != TOK__NUMBER) return tok__rest(x, at, end, "\r\n/");
        while (i < end && i < at + digits && x->kind[i] == TOK__NUMBER) i++;
        return i;
    }
    const int64_t first = at + (x->kind[at] == TOK__LETTER ? 0 : 1);
    for (i = first; i < end && x->kind[i] == TOK__LETTER; i++) {
        if (x->code[i] >= 'a' && x->code[i] <= 'z') break;
    }
    const int64_t capitals = i;
    while (i < end && x->kind[i] == TOK__LETTER && !(x->code[i] >= 'A' && x->code[i] <= 'Z')) i++;
    if (i == capitals) {
        while (i > first && x->code[i - 1] < 0x80) i--; // W+ takes the last letter that is not A-Z
        if (i == first) i = capitals;
    }
    return i + (contractions && i < end ? tok__contraction(x, i, end, true) : 0);
}

static int64_t tok__rule_tekken(const tok__chars *x, int64_t at, int64_t end) {
    return tok__rule_capitals(x, at, end, 1, false);
}

static int64_t tok__rule_gpt4o(const tok__chars *x, int64_t at, int64_t end) {
    return tok__rule_capitals(x, at, end, 3, true);
}

// The rules from here on find runs of the characters of some set, and what lies between.
typedef bool (*tok__set)(const tok__chars *x, int64_t i);

// [set]+
static int64_t tok__runs(const tok__chars *x, int64_t at, int64_t end, tok__set in) {
    int64_t i = at + 1;
    while (i < end && in(x, i) == in(x, at)) i++;
    return i;
}

// \s?[set]+ where any_space, else  ?[set]+ ; no space is in the set.
static int64_t tok__spaced_runs(const tok__chars *x, int64_t at, int64_t end, tok__set in,
                                bool any_space) {
    for (int64_t i = at; i < end; i++) {
        const bool space = any_space ? x->kind[i] == TOK__SPACE : x->code[i] == ' ';
        const bool here = in(x, i) || (space && i + 1 < end && in(x, i + 1));
        if (here && i > at) return i;
        if (here) return space ? tok__runs(x, at + 1, end, in) : tok__runs(x, at, end, in);
    }
    return end;
}

static bool tok__is_number(const tok__chars *x, int64_t i) { return x->kind[i] == TOK__NUMBER; }
static bool tok__is_letter(const tok__chars *x, int64_t i) { return x->kind[i] == TOK__LETTER; }
static bool tok__is_punctuation(const tok__chars *x, int64_t i) {
    return x->kind[i] == TOK__PUNCTUATION;
}

static bool tok__is_mark(const tok__chars *x, int64_t i) {
    return tok__is_punctuation(x, i) || tok__is_one_of(x->code[i], "$+<=>^~|");
}

static bool tok__is_falcon_mark(const tok__chars *x, int64_t i) {
    return tok__is_mark(x, i) || x->code[i] == '`';
}

// [\p{P}\$\+<=>\^~\|]+
static int64_t tok__rule_marks(const tok__chars *x, int64_t at, int64_t end) {
    return tok__runs(x, at, end, tok__is_mark);
}

// [\p{P}\$\+<=>\^~\|`]+
static int64_t tok__rule_falcon(const tok__chars *x, int64_t at, int64_t end) {
    return tok__runs(x, at, end, tok__is_falcon_mark);
}

// \p{N}+
static int64_t tok__rule_numbers(const tok__chars *x, int64_t at, int64_t end) {
    return tok__runs(x, at, end, tok__is_number);
}

// \p{N}
static int64_t tok__rule_digit(const tok__chars *x, int64_t at, int64_t end) {
    return x->kind[at] == TOK__NUMBER ? at + 1 : tok__rule_numbers(x, at, end);
}

// [0-9][0-9][0-9]
static int64_t tok__rule_thousands(const tok__chars *x, int64_t at, int64_t end) {
    for (int64_t i = at, n = 0; i < end; i++) {
        n = x->code[i] >= '0' && x->code[i] <= '9' ? n + 1 : 0;
        if (n == 3) return i - 2 > at ? i - 2 : i + 1;
    }
    return end;
}

// [\r\n]
static int64_t tok__rule_line_end(const tok__chars *x, int64_t at, int64_t end) {
    int64_t i = at;
    while (i < end && !tok__is_newline(x->code[i])) i++;
    return i > at ? i : at + 1;
}

// The letters that come as capital and small ones, as deepseek-llm lists them, of an older Unicode
// than tok__class_runs: from U+0000 on, how many are none, how many are, and so forth.
static const uint16_t tok__cased_runs[] = {
    65, 26, 6, 26, 58, 1, 10, 23, 1, 31, 1, 195, 1, 4, 4, 208, 1, 27, 192, 4, 2, 2, 3, 3, 1, 1,
    6, 1, 1, 3, 1, 1, 1, 20, 1, 83, 1, 139, 8, 166, 1, 38, 2889, 38, 730, 86, 2, 6, 2194, 43, 2,
    3, 64, 44, 63, 13, 1, 34, 101, 278, 2, 6, 2, 38, 2, 6, 2, 8, 1, 1, 1, 1, 1, 1, 1, 31, 2, 53,
    1, 7, 1, 1, 3, 3, 1, 7, 3, 4, 2, 6, 4, 13, 5, 3, 1, 7, 261, 1, 4, 1, 2, 10, 1, 1, 3, 5, 6,
    1, 1, 1, 1, 1, 1, 4, 1, 6, 4, 1, 2, 4, 5, 5, 4, 1, 52, 2, 2683, 124, 2, 103, 6, 4, 3, 2,
    31052, 46, 18, 28, 134, 78, 1, 23, 3, 4, 993, 80, 20288, 7, 12, 5, 1033, 26, 6, 26, 1189,
    80, 96, 36, 4, 36, 1924, 51, 13, 51, 2989, 64, 53280, 68};

static bool tok__is_cased(const tok__chars *x, int64_t i) {
    uint32_t from = 0;
    for (size_t k = 0; k < sizeof tok__cased_runs / sizeof tok__cased_runs[0]; k += 2) {
        from += tok__cased_runs[k];
        if (x->code[i] < from) return false;
        from += tok__cased_runs[k + 1];
        if (x->code[i] < from) return true;
    }
    return false;
}

// \s?[cased letters]+
static int64_t tok__rule_cased(const tok__chars *x, int64_t at, int64_t end) {
    return tok__spaced_runs(x, at, end, tok__is_cased, true);
}

static bool tok__is_ascii_mark(const tok__chars *x, int64_t i) { // letters too, and wide ASCII
    const uint32_t c = x->code[i];
    return (c >= '!' && c <= '/') || (c >= ':' && c <= '~') || (c >= 0xff01 && c <= 0xff0f) ||
           (c >= 0xff1a && c <= 0xff5e) || (c >= 0x2018 && c <= 0x201f) ||
           (c >= 0x3001 && c <= 0x3002);
}

// \s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+ ; U+3000 is a space first
static int64_t tok__rule_ascii_marks(const tok__chars *x, int64_t at, int64_t end) {
    return tok__spaced_runs(x, at, end, tok__is_ascii_mark, true);
}

// \s+$ : the spaces at the end of the word
static int64_t tok__rule_last_spaces(const tok__chars *x, int64_t at, int64_t end) {
    int64_t i = end;
    while (i > at && x->kind[i - 1] == TOK__SPACE) i--;
    return i > at ? i : end;
}

// \s?\p{L}+
static int64_t tok__rule_spaced_letters(const tok__chars *x, int64_t at, int64_t end) {
    return tok__spaced_runs(x, at, end, tok__is_letter, true);
}

// \s?\p{P}+
static int64_t tok__rule_spaced_marks(const tok__chars *x, int64_t at, int64_t end) {
    return tok__spaced_runs(x, at, end, tok__is_punctuation, true);
}

static bool tok__is_asian(const tok__chars *x, int64_t i) {
    const uint32_t c = x->code[i];
    return ((c >= 0x800 && c <= 0x9fa5) || (c >= 0xac00 && c <= 0xd7ff)) &&
           x->kind[i] != TOK__SPACE;
}

// [\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+
static int64_t tok__rule_asian(const tok__chars *x, int64_t at, int64_t end) {
    return tok__runs(x, at, end, tok__is_asian);
}

static bool tok__is_in_phrase(const tok__chars *x, int64_t i) {
    static const uint16_t stops[] = {0x2026, 0x3002, 0xff0c, 0x3001, 0x964, 0x6d4, 0x60c};
    for (size_t k = 0; k < sizeof stops / sizeof stops[0]; k++) {
        if (x->code[i] == stops[k]) return false;
    }
    return x->kind[i] != TOK__SPACE && !tok__is_one_of(x->code[i], "(|.,!?)");
}

//  ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+
static int64_t tok__rule_phrase(const tok__chars *x, int64_t at, int64_t end) {
    return tok__spaced_runs(x, at, end, tok__is_in_phrase, false);
}

// tokenizer.ggml.pre, as llama.cpp knows them; others are refused, because guessing would quietly
// give a model the wrong tokens.
typedef struct tok__pre {
    const char *names;  // each between spaces
    tok__rule rules[7]; // NULL at the end
    bool whole_words;   // a word that is a token is not merged from parts
    bool add_bos;       // unless the file says otherwise
    bool marks;         // marks that combine with letters count as letters
} tok__pre;

static const tok__pre tok__pres[] = {
    {" default ", {tok__rule_marks, tok__rule_gpt2, tok__rule_numbers, tok__rule_thousands},
     false, false, false},
    {" gpt-2 phi-2 olmo mpt jais trillion granite-docling modern-bert gigachat mellum exaone4 "
     "a.x-4.0 ", {tok__rule_gpt2}, false, false, false},
    {" llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 ", {tok__rule_llama3},
     true, true, false},
    {" smaug-bpe dbrx ", {tok__rule_llama3}, false, false, false},
    {" qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan solar-open grok-2 kormo f2llmv2 ",
     {tok__rule_qwen2}, false, false, false},
    // [^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+ and so on: qwen2's but for the marks
    {" qwen35 ", {tok__rule_qwen2}, false, false, true},
    {" seed-coder ", {tok__rule_seed_coder}, false, false, false},
    {" tekken ", {tok__rule_tekken}, true, true, false},
    {" gpt-4o llama4 kanana2 ", {tok__rule_gpt4o}, false, false, false},
    {" falcon ", {tok__rule_falcon, tok__rule_gpt2, tok__rule_thousands}, false, false, false},
    {" starcoder refact command-r smollm codeshell exaone minerva-7b mellum2 ",
     {tok__rule_digit, tok__rule_gpt2}, false, false, false},
    {" deepseek-llm ", {tok__rule_line_end, tok__rule_cased, tok__rule_ascii_marks,
                        tok__rule_last_spaces, tok__rule_asian, tok__rule_numbers}, false, false,
     false},
    {" deepseek-coder ", {tok__rule_line_end, tok__rule_spaced_letters, tok__rule_spaced_marks,
                          tok__rule_asian, tok__rule_digit}, false, false, false},
    {" poro-chat ", {tok__rule_phrase}, false, false, false},
    {" viking ", {tok__rule_phrase, tok__rule_digit}, false, false, false},
};

// ---------------------------------------------------------------------------------------------
// Merging: the best pair of neighbours first, until none is left that makes a token
// ---------------------------------------------------------------------------------------------

typedef struct tok__symbol { // a piece of text between its living neighbours
    int32_t prev, next;      // -1 = none
    int32_t at, n;           // bytes; n 0 = merged into the one before
} tok__symbol;

typedef struct tok__pair {
    double key; // larger is merged first, the leftmost of equals
    int32_t left, right;
    int32_t n; // bytes of both, when they were paired
} tok__pair;

static bool tok__better(const tok__pair *a, const tok__pair *b) {
    return a->key > b->key || (a->key == b->key && a->left < b->left);
}

// A heap, the best on top, as an array of stb_ds's.
static void tok__heap_push(tok__pair **heap, tok__pair pair) {
    arrput(*heap, pair);
    tok__pair *pairs = *heap;
    int64_t i = arrlen(pairs) - 1;
    for (; i > 0 && tok__better(&pair, &pairs[(i - 1) / 2]); i = (i - 1) / 2) {
        pairs[i] = pairs[(i - 1) / 2];
    }
    pairs[i] = pair;
}

static tok__pair tok__heap_pop(tok__pair *pairs) {
    const tok__pair top = pairs[0], last = arrpop(pairs);
    const int64_t n = arrlen(pairs);
    int64_t i = 0, child;
    for (; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && tok__better(&pairs[child + 1], &pairs[child])) child++;
        if (!tok__better(&pairs[child], &last)) break;
        pairs[i] = pairs[child];
    }
    pairs[i] = last;
    return top;
}

// Puts a pair of neighbours on the heap, when merging it is allowed.
static void tok__pair_up(tokenizer *t, const char *text, int32_t left, int32_t right) {
    if (left < 0 || right < 0) return;
    const tok__symbol *a = &t->symbols[left], *b = &t->symbols[right];
    tok__pair pair = {0, left, right, a->n + b->n};
    int32_t found;
    if (t->ranked) {
        found = tok__find(&t->merges, text + a->at, a->n, text + b->at, b->n);
        pair.key = -(double)found; // earlier merges first
    } else {
        found = tok__find(&t->vocab, text + a->at, pair.n, NULL, 0);
        if (found >= 0) pair.key = (double)t->scores[found];
    }
    if (found >= 0) tok__heap_push(&t->heap, pair);
}

// Appends the tokens of one word, or of one whole text for SentencePiece.
static void tok__merge(tokenizer *t, int32_t **ids, const char *text, int64_t n) {
    arrsetlen(t->symbols, n);
    tok__symbol *symbols = t->symbols;

    int32_t n_symbols = 0;
    for (int64_t at = 0; at < n; n_symbols++) { // one per character, by its first byte alone
        const unsigned char c = (unsigned char)text[at];
        const int64_t length = c < 0xc0 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
        tok__symbol *s = &symbols[n_symbols];
        s->at = (int32_t)at;
        s->n = (int32_t)(length < n - at ? length : n - at);
        s->prev = n_symbols - 1;
        s->next = at + length < n ? n_symbols + 1 : -1;
        at += length;
    }
    arrsetlen(t->heap, 0);
    // Every merge takes one pair off the heap and adds at most two.
    arrsetcap(t->heap, 2 * (size_t)n_symbols);
    for (int32_t i = 1; i < n_symbols; i++) tok__pair_up(t, text, i - 1, i);
    while (arrlen(t->heap) > 0) {
        const tok__pair pair = tok__heap_pop(t->heap);
        tok__symbol *left = &symbols[pair.left], *right = &symbols[pair.right];
        if (left->n == 0 || right->n == 0 || left->n + right->n != pair.n) continue; // outlived
        left->n = pair.n;
        right->n = 0;
        left->next = right->next;
        if (right->next >= 0) symbols[right->next].prev = pair.left;
        tok__pair_up(t, text, left->prev, pair.left);
        tok__pair_up(t, text, pair.left, left->next);
    }
    for (int32_t i = 0; i >= 0; i = symbols[i].next) {
        const int32_t id = tok__find(&t->vocab, text + symbols[i].at, symbols[i].n, NULL, 0);
        if (id >= 0) arrput(*ids, id);
        for (int32_t k = 0; id < 0 && k < symbols[i].n; k++) {
            const int32_t byte = t->byte_token[(unsigned char)text[symbols[i].at + k]];
            if (byte >= 0) arrput(*ids, byte);
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Encoding
// ---------------------------------------------------------------------------------------------

// SentencePiece: a space is U+2581, and the text is one word.
static void tok__encode_llama(tokenizer *t, int32_t **ids, const char *text, int64_t n,
                              bool space_before) {
    int64_t length = 0;
    arrsetlen(t->text, 3 * (n + 1));
    char *out = t->text;
    for (int64_t i = space_before ? -1 : 0; i < n; i++) {
        if (i < 0 || text[i] == ' ') length += tok__put_utf8(out + length, 0x2581);
        else out[length++] = text[i];
    }
    tok__merge(t, ids, out, length);
}

// gemma4: runs of line ends and what lies between them. A run that is a token is not merged.
static void tok__encode_lines(tokenizer *t, int32_t **ids, const char *text, int64_t n) {
    arrsetlen(t->text, 3 * n);
    for (int64_t at = 0; at < n;) {
        const bool ends = text[at] == '\n';
        char *out = t->text;
        int64_t length = 0;
        while (at < n && (text[at] == '\n') == ends) {
            uint32_t code;
            at += tok__get_utf8(text + at, n - at, &code);
            length += tok__put_utf8(out + length, code == ' ' ? 0x2581 : code);
        }
        const int32_t id = ends ? tok__find(&t->vocab, out, length, NULL, 0) : -1;
        if (id >= 0) arrput(*ids, id);
        else tok__merge(t, ids, out, length);
    }
}

// One word of a byte-level vocabulary: each byte of its UTF-8 becomes a printable character.
static void tok__encode_word(tokenizer *t, int32_t **ids, const uint32_t *code, int64_t n) {
    int64_t length = 0;
    arrsetlen(t->text, 8 * n);
    char *out = t->text;
    for (int64_t i = 0; i < n; i++) {
        char utf8[4];
        const int n_bytes = tok__put_utf8(utf8, code[i]);
        for (int k = 0; k < n_bytes; k++) {
            length += tok__put_utf8(out + length, t->byte_char[(unsigned char)utf8[k]]);
        }
    }
    const int32_t id = t->pre->whole_words ? tok__find(&t->vocab, out, length, NULL, 0) : -1;
    if (id >= 0) arrput(*ids, id);
    else tok__merge(t, ids, out, length);
}

// The words of x[at, end) by rule number `rule` and those after it.
static void tok__encode_words(tokenizer *t, int32_t **ids, const tok__chars *x, int64_t at,
                              int64_t end, int rule) {
    if (!t->pre->rules[rule]) {
        tok__encode_word(t, ids, x->code + at, end - at);
        return;
    }
    while (at < end) {
        const int64_t stop = t->pre->rules[rule](x, at, end);
        tok__encode_words(t, ids, x, at, stop, rule + 1);
        at = stop;
    }
}

static void tok__encode_gpt2(tokenizer *t, int32_t **ids, const char *text, int64_t n) {
    int64_t n_chars = 0;
    arrsetlen(t->codes, n);
    arrsetlen(t->classes, n);
    for (int64_t at = 0; at < n; n_chars++) {
        at += tok__get_utf8(text + at, n - at, &t->codes[n_chars]);
        const uint32_t code = t->codes[n_chars];
        const bool mark = t->pre && t->pre->marks && tok__is_combining(code);
        t->classes[n_chars] = (uint8_t)(mark ? (int)TOK__LETTER : tok__class(t, code));
    }
    const tok__chars x = {t->codes, t->classes};
    tok__encode_words(t, ids, &x, 0, n_chars, 0);
}

enum { // what a token is; bits, because a control token may be found by its text alone
    TOK__NORMAL = 1,
    TOK__UNKNOWN = 2,
    TOK__CONTROL = 4,
    TOK__USER = 8, // always cut out of text, always shown
    TOK__BYTE = 16,
    TOK__END = 32,
    TOK__STRIP = 64 // white space that follows it in the text is dropped
};

// The texts of the special tokens as a tree: the bytes of a text lie one below the other, and texts
// that begin alike share their beginning.
typedef struct tok__node {
    int32_t below, beside; // first byte that may come next, another one in place of this; -1 = none
    int32_t rank;          // of the token that ends here, its place in t->special; -1 = none
    unsigned char byte;
} tok__node;

// The rank of the longest token at text[at] whose last byte is not taken yet, or -1.
static int32_t tok__longest(const tokenizer *t, const char *text, int64_t at, int64_t end,
                            bool parse_special) {
    const tok__node *nodes = t->tree;
    int32_t longest = -1;
    for (int32_t k = t->roots[(unsigned char)text[at]]; k >= 0;) {
        const int32_t rank = nodes[k].rank;
        if (rank >= 0 && t->taken[at] == 0 &&
            (parse_special || !(t->kinds[t->special[rank]] & (TOK__CONTROL | TOK__UNKNOWN)))) {
            longest = rank;
        }
        if (++at == end) break;
        for (k = nodes[k].below; k >= 0 && nodes[k].byte != (unsigned char)text[at];) {
            k = nodes[k].beside;
        }
    }
    return longest;
}

// Finds the special tokens in a text. A longer one goes before a shorter one, wherever the two
// overlap, then the one of smaller id, then the first in the text. taken[i] becomes 0 where byte i
// is text, rank + 1 where a token begins, and -1 inside of one and in white space that is dropped
// behind one.
//
// One pass finds the longest token that begins at each byte, and a heap then hands these out from
// the longest to the shortest. So where bytes of a token are taken already, a token that is at
// least as long has taken them, its first byte or its last one among them. Where the first is still
// free, a shorter token that begins there may fit, and goes back into the heap.
static void tok__cut(tokenizer *t, const char *text, int64_t length, bool parse_special) {
    const int32_t *special = t->special;
    arrsetlen(t->taken, length);
    arrsetlen(t->heap, 0);
    int32_t *taken = t->taken;
    for (int64_t i = 0; i < length; i++) taken[i] = 0;
    for (int64_t i = 0; i < length; i++) {
        const int32_t rank = tok__longest(t, text, i, length, parse_special);
        if (rank < 0) continue;
        const tok__pair found = {-(double)rank, (int32_t)i, rank, 0};
        tok__heap_push(&t->heap, found);
    }
    while (arrlen(t->heap) > 0) {
        tok__pair best = tok__heap_pop(t->heap);
        const int64_t n = t->vocab.strings[special[best.right]].length;
        if (taken[best.left] != 0) continue;
        if (taken[best.left + n - 1] != 0) {
            best.right = tok__longest(t, text, best.left, length, parse_special);
            best.key = -(double)best.right;
            if (best.right >= 0) tok__heap_push(&t->heap, best);
            continue;
        }
        for (int64_t i = 0; i < n; i++) taken[best.left + i] = -1;
        taken[best.left] = best.right + 1;
        if (!(t->kinds[special[best.right]] & TOK__STRIP)) continue;
        for (int64_t i = best.left + n; i < length && taken[i] == 0; i++) {
            if (text[i] != ' ' && (text[i] < '\t' || text[i] > '\r')) break;
            taken[i] = -1;
        }
    }
}

static inline rocq_result tokenizer_encode(tokenizer *t, int32_t **ids, const char *text,
                                           int64_t length, bool add_special, bool parse_special) {
    if (!t->piece) return tok__fail(t, ROCQ_E_STATE, "the tokenizer is not open");
    if (length < 0 || length > INT32_MAX / 8 || (length > 0 && !text)) {
        return tok__fail(t, ROCQ_E_ARGUMENT, "no text, or one of %.0f bytes", (double)length);
    }
    if (add_special && t->add_bos) arrput(*ids, t->bos);

    tok__cut(t, text, length, parse_special);
    bool after_token = true; // as is the beginning
    for (int64_t at = 0, stop; at < length; at = stop) {
        const int32_t id = t->taken[at] > 0 ? t->special[t->taken[at] - 1] : -1;
        if (id >= 0) {
            arrput(*ids, id);
            for (stop = at + 1; stop < length && t->taken[stop] < 0;) stop++;
        } else {
            for (stop = at + 1; stop < length && t->taken[stop] == 0;) stop++;
            const int64_t n = stop - at;
            if (t->pre) tok__encode_gpt2(t, ids, text + at, n);
            else if (t->ranked) tok__encode_lines(t, ids, text + at, n);
            else tok__encode_llama(t, ids, text + at, n, t->add_space && after_token);
        }
        after_token = id >= 0;
    }
    if (add_special && t->add_eos) arrput(*ids, t->eos);
    return ROCQ_OK;
}

// ---------------------------------------------------------------------------------------------
// Decoding
// ---------------------------------------------------------------------------------------------

static inline bool tokenizer_is_end(const tokenizer *t, int32_t id) {
    return id >= 0 && id < t->n_vocab && (t->kinds[id] & TOK__END);
}

// The value of a token text like "<0x0A>", or -1.
static int tok__byte_of(rocq_str text) {
    int value = 0;
    if (text.length != 6 || memcmp(text.data, "<0x", 3) != 0 || text.data[5] != '>') return -1;
    for (int i = 3; i < 5; i++) {
        const char *digits = "0123456789ABCDEF";
        const char *digit = text.data[i] ? strchr(digits, text.data[i]) : NULL;
        if (!digit) return -1;
        value = value * 16 + (int)(digit - digits);
    }
    return value;
}

// Writes the token's bytes to out, which has room for the longest token, and returns their number.
static int64_t tok__decode(const tokenizer *t, int32_t id, bool special, char *out) {
    if (id < 0 || id >= t->n_vocab) return 0;
    const rocq_str text = t->vocab.strings[id];
    const int kind = t->kinds[id];
    int64_t n = 0;
    if (!special && (kind & (TOK__CONTROL | TOK__UNKNOWN))) return 0;
    if (kind & (TOK__CONTROL | TOK__UNKNOWN | TOK__USER)) {
        memcpy(out, text.data, (size_t)text.length);
        return text.length;
    }
    if (kind & TOK__BYTE) {
        const int byte = tok__byte_of(text);
        if (byte >= 0) out[n++] = (char)byte;
        return n;
    }
    for (int64_t i = 0; (kind & TOK__NORMAL) && i < text.length;) {
        uint32_t code;
        const int length = tok__get_utf8(text.data + i, text.length - i, &code);
        if (t->pre && code < 324 && t->char_byte[code] >= 0) {
            out[n++] = (char)t->char_byte[code];
        } else if (!t->pre && code == 0x2581) {
            out[n++] = ' ';
        } else {
            memcpy(out + n, text.data + i, (size_t)length);
            n += length;
        }
        i += length;
    }
    return n;
}

static inline rocq_str tokenizer_piece(tokenizer *t, int32_t id, bool special) {
    rocq_str piece = {t->piece, 0};
    if (t->piece) piece.length = tok__decode(t, id, special, t->piece);
    return piece;
}

static inline rocq_str tokenizer_next(tokenizer *t, tokenizer_stream *s, int32_t id, bool special) {
    rocq_str out = {t->piece, 0};
    if (!t->piece) return out;
    // The front of the buffer is for what goes out, up to three bytes for each that comes in.
    char *to = t->piece;
    unsigned char *from = (unsigned char *)to + 3 * (t->vocab.longest + 4);
    memcpy(from, s->pending, (size_t)s->n_pending);
    int64_t n = s->n_pending, i = 0;
    if (id >= 0) n += tok__decode(t, id, special, (char *)from + n);
    while (i < n) {
        int length = tok__valid_utf8(from + i, (int32_t)(n - i < 4 ? n - i : 4));
        if (length == 0 && id >= 0) break;       // may still become a character
        if (length == 0) length = -(int)(n - i); // never will
        if (length > 0) memcpy(to + out.length, from + i, (size_t)length);
        out.length += length > 0 ? length : tok__put_utf8(to + out.length, 0xfffd);
        i += length > 0 ? length : -length;
    }
    s->n_pending = (int32_t)(n - i);
    memcpy(s->pending, from + i, (size_t)s->n_pending);
    return out;
}

// ---------------------------------------------------------------------------------------------
// Opening
// ---------------------------------------------------------------------------------------------

// Tokens that end generation whatever the file calls them, and tokens for filling in code. Files
// often give them no role, or an ordinary type; either way they are control tokens.
typedef struct tok__role {
    const char *key, *old_key; // take the place of the texts, the old one first; or NULL
    bool ends;
    const char *texts[24];
} tok__role;

static const tok__role tok__roles[] = {
    {NULL, NULL, true,
     {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
      "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
      "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
      "<\xef\xbd\x9c" "end\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>", "[e~["}},
    {"tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id", false,
     {"<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "\xe2\x96\x81<PRE>",
      "<\xef\xbd\x9c" "fim\xe2\x96\x81" "begin\xef\xbd\x9c>", "<|code_prefix|>", "<|prefix|>"}},
    {"tokenizer.ggml.fim_suf_token_id", "tokenizer.ggml.suffix_token_id", false,
     {"<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "\xe2\x96\x81<SUF>",
      "<\xef\xbd\x9c" "fim\xe2\x96\x81hole\xef\xbd\x9c>", "<|code_suffix|>", "<|suffix|>"}},
    {"tokenizer.ggml.fim_mid_token_id", "tokenizer.ggml.middle_token_id", false,
     {"<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "\xe2\x96\x81<MID>",
      "<\xef\xbd\x9c" "fim\xe2\x96\x81" "end\xef\xbd\x9c>", "<|code_middle|>", "<|middle|>"}},
    {"tokenizer.ggml.fim_pad_token_id", NULL, true,
     {"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"}},
    {"tokenizer.ggml.fim_rep_token_id", NULL, true,
     {"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"}},
    {"tokenizer.ggml.fim_sep_token_id", NULL, true, {"<|file_sep|>"}},
    {"tokenizer.ggml.eot_token_id", NULL, true, {NULL}},
    {"tokenizer.ggml.eom_token_id", NULL, true, {NULL}},
};

static int32_t tok__id_of(const tokenizer *t, const char *text) {
    return tok__find(&t->vocab, text, (int64_t)strlen(text), NULL, 0);
}

// Reads the id that a key holds. Where there is none in the vocabulary *id stays, if it is in it.
static rocq_result tok__read_id(tokenizer *t, const rocq_gguf *file, const char *key, int32_t *id) {
    int64_t value = -1;
    const rocq_result result = rocq_gguf_get_i64(file, key, &value);
    if (result != ROCQ_OK && result != ROCQ_E_NOT_FOUND) {
        return tok__fail(t, result, "%s is not an integer", key);
    }
    if (*id >= t->n_vocab) *id = -1;
    if (value >= 0 && value < t->n_vocab) *id = (int32_t)value;
    return ROCQ_OK;
}

// A key that is absent leaves *flag as it is.
static rocq_result tok__read_flag(tokenizer *t, const rocq_gguf *file, const char *key,
                                  bool *flag) {
    const rocq_result result = rocq_gguf_get_bool(file, key, flag);
    if (result == ROCQ_OK || result == ROCQ_E_NOT_FOUND) return ROCQ_OK;
    return tok__fail(t, result, "%s is neither true nor false", key);
}

static rocq_result tok__read_roles(tokenizer *t, const rocq_gguf *file) {
    uint8_t *kinds = t->kinds;
    for (size_t i = 0; i < sizeof tok__roles / sizeof tok__roles[0]; i++) {
        const tok__role *role = &tok__roles[i];
        int32_t id = -1;
        if (role->key) TOK__TRY(tok__read_id(t, file, role->key, &id));
        if (role->old_key) TOK__TRY(tok__read_id(t, file, role->old_key, &id));
        if (id >= 0 && role->ends) kinds[id] |= TOK__END;
        for (int k = 0; id < 0 && role->texts[k]; k++) {
            const int32_t token = tok__id_of(t, role->texts[k]);
            if (token < 0) continue;
            kinds[token] = (uint8_t)(kinds[token] | TOK__CONTROL | (role->ends ? TOK__END : 0));
            if (role->key) break; // the first text takes the role
        }
    }
    if (t->eos >= 0) kinds[t->eos] |= TOK__END;
    return ROCQ_OK;
}

// Families that use the texts above in ways of their own, told apart by what else they have.
static void tok__adapt_roles(tokenizer *t) {
    static const char *const shown[] = {"<|channel|>", "<|message|>", "<|start|>",
                                        "<|constrain|>"};
    uint8_t *kinds = t->kinds;
    for (size_t i = 0; i < sizeof shown / sizeof shown[0]; i++) { // gpt-oss: parts of an answer
        const int32_t id = tok__id_of(t, shown[i]);
        if (id >= 0) kinds[id] = (uint8_t)(TOK__USER | (kinds[id] & TOK__END));
    }
    // In gpt-oss and solar-open <|end|> ends a part of an answer only.
    const int32_t end = tok__id_of(t, "<|end|>");
    const bool calls = tok__id_of(t, "<|call|>") >= 0 || tok__id_of(t, "<|calls|>") >= 0;
    const bool other = tok__id_of(t, "<|return|>") >= 0 || tok__id_of(t, "<|flush|>") >= 0;
    if (end >= 0 && calls && other) kinds[end] = TOK__USER;
    // In gemma 4 </s> is a tag of HTML.
    const int32_t tag = tok__id_of(t, "</s>");
    if (tag >= 0 && tok__id_of(t, "<|tool_response>") >= 0) kinds[tag] = TOK__NORMAL;
}

// Phi-3 was trained with the white space behind a special token dropped. No key of a file says so:
// as in llama.cpp the model's name does.
static void tok__read_strips(tokenizer *t, const rocq_gguf *file) {
    static const char *const names[] = {"phi-3", "phi3"};
    static const char *const others[] = {"<unk>", "<s>", "<|endoftext|>"};
    uint8_t *kinds = t->kinds;
    rocq_str name;
    bool strips = false;
    if (rocq_gguf_get_str(file, "general.name", &name) != ROCQ_OK) return;
    for (int64_t at = 0; at < name.length; at++) {
        for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
            int64_t n = 0; // characters that agree, in capitals or not
            for (; at + n < name.length && names[k][n]; n++) {
                char c = name.data[at + n];
                if (c >= 'A' && c <= 'Z') c = (char)(c + 'a' - 'A');
                if (c != names[k][n]) break;
            }
            strips = strips || !names[k][n];
        }
    }
    for (int32_t i = 0; strips && i < t->n_vocab; i++) {
        if (kinds[i] & (TOK__CONTROL | TOK__UNKNOWN | TOK__USER)) kinds[i] |= TOK__STRIP;
    }
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        const int32_t id = tok__id_of(t, others[i]);
        if (id >= 0) kinds[id] = (uint8_t)(kinds[id] & ~TOK__STRIP);
    }
}

// An optional array of numbers, one per token.
static rocq_result tok__read_array(tokenizer *t, const rocq_gguf *file, const char *key,
                                   rocq_gguf_value *value, bool *there) {
    *there = rocq_gguf_find_value(file, key, value) == ROCQ_OK;
    if (*there && (!value->is_array || value->count < t->n_vocab)) {
        return tok__fail(t, ROCQ_E_CORRUPT, "%s has %.0f entries, expected %d, one for each token",
                         key, (double)value->count, (int)t->n_vocab);
    }
    return ROCQ_OK;
}

static rocq_result tok__read_tokens(tokenizer *t, const rocq_gguf *file) {
    static const uint8_t kind_of[7] = { // by token_type; 0 and 5 are never shown
        0, TOK__NORMAL, TOK__UNKNOWN, TOK__CONTROL, TOK__USER, 0, TOK__BYTE};
    rocq_gguf_value scores, types;
    bool has_scores, has_types;
    TOK__TRY(tok__read_map(t, file, "tokenizer.ggml.tokens", &t->vocab, true));
    t->n_vocab = (int32_t)arrlen(t->vocab.strings);
    if (t->n_vocab == 0) {
        return tok__fail(t, ROCQ_E_CORRUPT, "tokenizer.ggml.tokens has 0 entries, expected 1 or "
                         "more");
    }
    TOK__TRY(tok__read_array(t, file, "tokenizer.ggml.scores", &scores, &has_scores));
    TOK__TRY(tok__read_array(t, file, "tokenizer.ggml.token_type", &types, &has_types));
    arrsetcap(t->scores, (size_t)t->n_vocab);
    arrsetcap(t->kinds, (size_t)t->n_vocab);
    for (int32_t i = 0; i < t->n_vocab; i++) {
        double score = 0;
        int64_t whole = 0, type = 1; // a score may be an integer too
        if (has_scores && rocq_gguf_value_i64(&scores, i, &whole) == ROCQ_OK) {
            score = (double)whole;
        } else if (has_scores && rocq_gguf_value_f64(&scores, i, &score) != ROCQ_OK) {
            return tok__fail(t, ROCQ_E_TYPE, "tokenizer.ggml.scores has no number for token %d",
                             (int)i);
        }
        if (has_types && rocq_gguf_value_i64(&types, i, &type) != ROCQ_OK) {
            return tok__fail(t, ROCQ_E_TYPE, "tokenizer.ggml.token_type has no integer for token "
                             "%d", (int)i);
        }
        arrput(t->scores, (float)score);
        arrput(t->kinds, type >= 0 && type < 7 ? kind_of[type] : 0);
    }
    return ROCQ_OK;
}

static rocq_result tok__find_pre(tokenizer *t, const rocq_gguf *file) {
    rocq_str name = {"default", 7};
    char padded[64]; // as in the lists: a space on both sides
    const rocq_result result = rocq_gguf_get_str(file, "tokenizer.ggml.pre", &name);
    if (result != ROCQ_OK && result != ROCQ_E_NOT_FOUND) {
        return tok__fail(t, result, "tokenizer.ggml.pre is not a string");
    }
    const int length = (int)(name.length < 60 ? name.length : 60);
    snprintf(padded, sizeof padded, " %.*s ", length, name.data);
    for (size_t i = 0; i < sizeof tok__pres / sizeof tok__pres[0]; i++) {
        if (!strchr(padded + 1, ' ')[1] && strstr(tok__pres[i].names, padded)) {
            t->pre = &tok__pres[i];
            return ROCQ_OK;
        }
    }
    return tok__fail(t, ROCQ_E_UNSUPPORTED, "tokenizer.ggml.pre \"%.*s\" is not supported", length,
                     name.data);
}

// Bytes that are printable in Latin-1 stand for themselves, the others for U+0100 and up, in order.
static void tok__map_bytes(tokenizer *t) {
    uint16_t next = 256;
    memset(t->char_byte, -1, sizeof t->char_byte);
    for (int b = 0; b < 256; b++) {
        const bool printable = (b > 0x20 && b < 0x7f) || (b > 0xa0 && b != 0xad);
        t->byte_char[b] = printable ? (uint16_t)b : next++;
        t->char_byte[t->byte_char[b]] = (int16_t)b;
    }
}

// Puts the texts of the special tokens into the tree. Of equal ones the first stays.
static void tok__grow_tree(tokenizer *t) {
    memset(t->roots, -1, sizeof t->roots);
    for (int32_t rank = 0; rank < arrlen(t->special); rank++) {
        const rocq_str text = t->vocab.strings[t->special[rank]];
        int32_t last = -1, at = t->roots[(unsigned char)text.data[0]];
        for (int64_t i = 0; i < text.length; i++) {
            const tok__node leaf = {-1, -1, -1, (unsigned char)text.data[i]};
            int32_t before = -1; // the one that `at` stands beside
            for (; at >= 0 && t->tree[at].byte != leaf.byte; at = t->tree[at].beside) before = at;
            if (at < 0) {
                at = (int32_t)arrlen(t->tree);
                arrput(t->tree, leaf);
                if (before >= 0) t->tree[before].beside = at;
                else if (last >= 0) t->tree[last].below = at;
                else t->roots[leaf.byte] = at;
            }
            last = at;
            at = t->tree[last].below;
        }
        if (t->tree[last].rank < 0) t->tree[last].rank = rank;
    }
}

// Longer tokens are cut out of text before shorter ones.
static rocq_result tok__list_special(tokenizer *t) {
    int64_t bytes = 0;
    for (int32_t i = 0; i < t->n_vocab; i++) {
        const int64_t length = t->vocab.strings[i].length;
        const tok__pair pair = {(double)length, i, 0, 0};
        if (!(t->kinds[i] & (TOK__CONTROL | TOK__UNKNOWN | TOK__USER)) || length == 0) continue;
        tok__heap_push(&t->heap, pair);
        bytes += length;
    }
    if (bytes >= INT32_MAX) return tok__fail(t, ROCQ_E_OVERFLOW, "special tokens are too long");
    while (arrlen(t->heap) > 0) arrput(t->special, tok__heap_pop(t->heap).left);
    tok__grow_tree(t);
    return ROCQ_OK;
}

static rocq_result tok__load(tokenizer *t, const rocq_gguf *file) {
    rocq_str model;
    if (rocq_gguf_get_str(file, "tokenizer.ggml.model", &model) != ROCQ_OK) {
        return tok__fail(t, ROCQ_E_NOT_FOUND, "the file has no tokenizer.ggml.model");
    }
    const bool gpt2 = rocq_str_equal(model, "gpt2"), gemma4 = rocq_str_equal(model, "gemma4");
    if (!gpt2 && !gemma4 && !rocq_str_equal(model, "llama")) {
        return tok__fail(t, ROCQ_E_UNSUPPORTED, "tokenizer.ggml.model \"%.*s\" is not supported",
                         (int)(model.length < 100 ? model.length : 100), model.data);
    }
    if (gpt2) TOK__TRY(tok__find_pre(t, file));
    TOK__TRY(tok__read_tokens(t, file));
    t->ranked = gpt2 || gemma4;
    if (t->ranked) TOK__TRY(tok__read_map(t, file, "tokenizer.ggml.merges", &t->merges, false));

    t->bos = gpt2 ? 11 : gemma4 ? -1 : 1;
    t->eos = gpt2 ? 11 : gemma4 ? -1 : 2;
    t->add_bos = gpt2 ? t->pre->add_bos : true;
    t->add_space = !t->ranked;
    TOK__TRY(tok__read_id(t, file, "tokenizer.ggml.bos_token_id", &t->bos));
    TOK__TRY(tok__read_id(t, file, "tokenizer.ggml.eos_token_id", &t->eos));
    TOK__TRY(tok__read_flag(t, file, "tokenizer.ggml.add_bos_token", &t->add_bos));
    TOK__TRY(tok__read_flag(t, file, "tokenizer.ggml.add_eos_token", &t->add_eos));
    TOK__TRY(tok__read_flag(t, file, "tokenizer.ggml.add_space_prefix", &t->add_space));
    if (gemma4) t->add_bos = true; // as in llama.cpp: files that say otherwise are wrong
    if ((t->add_bos && t->bos < 0) || (t->add_eos && t->eos < 0)) {
        return tok__fail(t, ROCQ_E_CORRUPT, "tokenizer.ggml.add_bos_token or add_eos_token is "
                         "true, but bos_token_id is %d and eos_token_id %d, expected 0 to %d",
                         (int)t->bos, (int)t->eos, (int)t->n_vocab - 1);
    }
    TOK__TRY(tok__read_roles(t, file));
    tok__adapt_roles(t);
    tok__read_strips(t, file);
    TOK__TRY(tok__list_special(t));

    tok__map_bytes(t);
    int32_t unknown = t->ranked ? -1 : 0;
    if (!t->ranked) TOK__TRY(tok__read_id(t, file, "tokenizer.ggml.unknown_token_id", &unknown));
    for (int b = 0; b < 256; b++) {
        char name[8], raw = (char)b;
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)b);
        t->byte_token[b] = gpt2 ? -1 : tok__find(&t->vocab, name, 6, NULL, 0);
        if (t->byte_token[b] < 0) t->byte_token[b] = tok__find(&t->vocab, &raw, 1, NULL, 0);
        if (t->byte_token[b] < 0) t->byte_token[b] = unknown;
    }
    arrput(t->class_starts, 0);
    for (int i = 0; i < TOK__N_RUNS; i++) {
        const uint32_t next = t->class_starts[i] + (tok__class_runs[i] >> 2);
        arrput(t->class_starts, next);
    }
    arrsetlen(t->piece, 4 * (t->vocab.longest + 4)); // see tokenizer_next
    return ROCQ_OK;
}

static inline rocq_result tokenizer_open(tokenizer *t, const rocq_gguf *file) {
    char error[sizeof t->error];
    memset(t, 0, sizeof *t);
    const rocq_result result = file ? tok__load(t, file)
                                    : tok__fail(t, ROCQ_E_ARGUMENT, "there is no file");
    if (result != ROCQ_OK) {
        memcpy(error, t->error, sizeof error);
        tokenizer_close(t);
        memcpy(t->error, error, sizeof error);
    }
    return result;
}

static inline void tokenizer_close(tokenizer *t) {
    arrfree(t->vocab.strings);
    arrfree(t->vocab.slots);
    arrfree(t->merges.strings);
    arrfree(t->merges.slots);
    arrfree(t->scores);
    arrfree(t->kinds);
    arrfree(t->special);
    arrfree(t->tree);
    arrfree(t->class_starts);
    arrfree(t->taken);
    arrfree(t->text);
    arrfree(t->codes);
    arrfree(t->classes);
    arrfree(t->symbols);
    arrfree(t->heap);
    arrfree(t->piece);
    memset(t, 0, sizeof *t);
}

#undef TOK__TRY

#endif // TOKENIZER_H
