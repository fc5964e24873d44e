// Vocabularies for the tokenizer tests, trained on the spot over a few lines of text that hold a
// bit of everything, and written as GGUF files without tensors. Include after cmocka.h and rocq.h.

#ifndef TESTS_VOCABS_H
#define TESTS_VOCABS_H

#include <stdio.h>
#include <string.h>

enum { VOCAB_MAX = 6000, VOCAB_TEXT = 64 };

typedef struct vocab {
    int32_t n_tokens, n_merges, n_symbols;
    int32_t n_scored; // merges that gave vocab_spm its scores
    char text[VOCAB_MAX][VOCAB_TEXT];
    float score[VOCAB_MAX];
    int32_t type[VOCAB_MAX]; // GGUF's: 1 normal, 2 unknown, 3 control, 4 user defined, 6 byte
    char merge[VOCAB_MAX][2 * VOCAB_TEXT];
    int32_t symbols[8000]; // the training text
    const char *ids[8][2]; // keys, "tokenizer.ggml." before and "_token_id" behind, and the texts of
                           // their tokens
} vocab;

static const char vocab_corpus[] =
    "The quick brown fox jumps over the lazy dog. The dog doesn't care; it's asleep, isn't it?\n"
    "We'll see, they've said, I'm sure you'd know and we're done. WE'LL SEE, I'M SURE, DON'T.\n"
    "int main(void) {\n    return 0;\n}\n\n\tif (x == 10) { y += 3.14159; } // 1234567 2024-11-21\r\n"
    "    while (i < 1000) {\r\n        i++;\r\n    }\r\n\r\n   \n \n\n"
    "Numbers: 1, 12, 123, 1234, 12345, 100000, 3.5e-7, 0x1F. Prices: $5.99, 20%, #1, @home!!! ...\n"
    "Caf\xc3\xa9 na\xc3\xafve \xc3\xbc" "ber stra\xc3\x9f" "e. \xd0\x9f\xd1\x80\xd0\xb8\xd0\xb2\xd0\xb5"
    "\xd1\x82, \xd0\xbc\xd0\xb8\xd1\x80! \xd0\x9f\xd1\x80\xd0\xb8\xd0\xb2\xd0\xb5\xd1\x82 \xd0\xb2"
    "\xd1\x81\xd0\xb5\xd0\xbc.\n"
    "\xe4\xbd\xa0\xe5\xa5\xbd\xef\xbc\x8c\xe4\xb8\x96\xe7\x95\x8c\xe3\x80\x82\xe4\xbd\xa0\xe5\xa5\xbd"
    "\xe5\x90\x97\xef\xbc\x9f \xe3\x81\x93\xe3\x82\x93\xe3\x81\xab\xe3\x81\xa1\xe3\x81\xaf "
    "\xec\x95\x88\xeb\x85\x95\xed\x95\x98\xec\x84\xb8\xec\x9a\x94\n"
    "\xf0\x9f\x98\x80\xf0\x9f\x98\x80 \xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x92\xbb \xf0\x9f\x8e\x89"
    "\xf0\x9f\x98\x80 e\xcc\x81 a\xcc\x80 o\xcc\x88\n"
    "Once upon a time there was a small dragon who lived in a tower near the sea. Every morning the\n"
    "dragon flew over the village, and the people said: \"There it is again!\" But nobody was afraid,\n"
    "because the dragon never burned anything; it only wanted to see what the children were doing.\n"
    "One day, in 1987, a knight came with 12 men and 24 horses, looking for gold, glory and a fight.\n"
    "    for (int i = 0; i < n; i++) {\n        sum += values[i] * weights[i];\n    }\n"
    "    if (!found) {\n        printf(\"%d of %d\\n\", i, n);\n        return -1;\n    }\n\n\n"
    "the king said to the queen: \"the dragon is in the tower, and the tower is on fire!\" the end.\n"
    "hello hello hello world world the the and and of of to to in in is is that that it it was was\n";

static inline const char *vocab_utf8(uint32_t code) {
    static char text[5];
    memset(text, 0, sizeof text);
    if (code < 0x80) {
        text[0] = (char)code;
    } else if (code < 0x800) {
        text[0] = (char)(0xc0 | code >> 6);
        text[1] = (char)(0x80 | (code & 63));
    } else if (code < 0x10000) {
        text[0] = (char)(0xe0 | code >> 12);
        text[1] = (char)(0x80 | (code >> 6 & 63));
        text[2] = (char)(0x80 | (code & 63));
    } else {
        text[0] = (char)(0xf0 | code >> 18);
        text[1] = (char)(0x80 | (code >> 12 & 63));
        text[2] = (char)(0x80 | (code >> 6 & 63));
        text[3] = (char)(0x80 | (code & 63));
    }
    return text;
}

// The printable character that byte-level vocabularies write for a byte: itself where it is a
// visible Latin-1 character, else the next of those from U+0100 on.
static inline const char *vocab_byte(int32_t byte) {
    uint32_t next = 256;
    for (int32_t b = 0; b <= byte; b++) {
        bool visible = (b >= 33 && b <= 126) || (b >= 161 && b != 173);
        if (b == byte) return vocab_utf8(visible ? (uint32_t)b : next);
        if (!visible) next++;
    }
    return "";
}

static inline int32_t vocab_find(const vocab *v, const char *text) {
    for (int32_t i = 0; i < v->n_tokens; i++)
        if (strcmp(v->text[i], text) == 0) return i;
    return -1;
}

static inline int32_t vocab_add(vocab *v, const char *text, float score, int32_t type) {
    assert_true(v->n_tokens < VOCAB_MAX && strlen(text) < VOCAB_TEXT && vocab_find(v, text) < 0);
    strcpy(v->text[v->n_tokens], text);
    v->score[v->n_tokens] = score;
    v->type[v->n_tokens] = type;
    return v->n_tokens++;
}

static inline void vocab_add_merge(vocab *v, int32_t left, int32_t right) {
    char text[2 * VOCAB_TEXT];
    assert_true(v->n_merges < VOCAB_MAX);
    snprintf(text, sizeof text, "%s %s", v->text[left], v->text[right]);
    strcpy(v->merge[v->n_merges], text);
    snprintf(text, sizeof text, "%s%s", v->text[left], v->text[right]);
    if (vocab_find(v, text) < 0) vocab_add(v, text, -(float)(v->n_merges + 1), 1);
    v->n_merges++;
}

// Merges the most frequent neighbours of the training text, n times. inside: not across the start
// of a word. What crosses words shows where a tokenizer splits text.
static inline void vocab_train(vocab *v, int32_t n, bool inside, const char *space, const char *newline) {
    enum { N = 1500 };
    static uint16_t count[N][N];
    for (int32_t k = 0; k < n; k++) {
        int32_t best[2] = {0, 0}, most = 1;
        for (int32_t i = 0; i + 1 < v->n_symbols; i++) {
            int32_t a = v->symbols[i], b = v->symbols[i + 1];
            assert_true(a < N && b < N);
            count[a][b] = 0; // and not all 4.5 MB
        }
        for (int32_t i = 0; i + 1 < v->n_symbols; i++) {
            int32_t a = v->symbols[i], b = v->symbols[i + 1];
            bool starts = strncmp(v->text[b], space, strlen(space)) == 0 ||
                strncmp(v->text[b], newline, strlen(newline)) == 0;
            if ((inside && starts) || strlen(v->text[a]) + strlen(v->text[b]) >= VOCAB_TEXT / 2)
                continue;
            if (++count[a][b] > most) {
                most = count[a][b];
                best[0] = a;
                best[1] = b;
            }
        }
        if (most < 2) return;
        vocab_add_merge(v, best[0], best[1]);
        char text[2 * VOCAB_TEXT];
        snprintf(text, sizeof text, "%s%s", v->text[best[0]], v->text[best[1]]);
        int32_t merged = vocab_find(v, text), to = 0;
        for (int32_t i = 0; i < v->n_symbols; to++) {
            bool here = i + 1 < v->n_symbols && v->symbols[i] == best[0] && v->symbols[i + 1] == best[1];
            v->symbols[to] = here ? merged : v->symbols[i];
            i += here ? 2 : 1;
        }
        v->n_symbols = to;
    }
}

// Byte-level: 256 bytes, merges, then words that only whole-word look-up finds, then specials.
static inline void vocab_bpe(vocab *v) {
    memset(v, 0, sizeof *v);
    for (int32_t b = 0; b < 256; b++) vocab_add(v, vocab_byte(b), 0, 1);
    for (const char *c = vocab_corpus; *c; c++) v->symbols[v->n_symbols++] = (unsigned char)*c;
    char space[8], newline[8];
    strcpy(space, vocab_byte(' '));
    strcpy(newline, vocab_byte('\n'));
    vocab_train(v, 260, true, space, newline);
    vocab_train(v, 200, false, space, newline);
    vocab_add(v, "Hawaii", 0, 1);
    vocab_add(v, "\xc4\xa0unmergeable", 0, 1); // begins with the letter for a space
    vocab_add(v, "777", 0, 1);
    vocab_add(v, "<|endoftext|>", 0, 3);
    vocab_add(v, "<|im_start|>", 0, 3);
    vocab_add(v, "<|im_end|>", 0, 3);
    vocab_add(v, "<|im", 0, 3); // a prefix of others: the longest wins
    vocab_add(v, "<tool>", 0, 4);
    vocab_add(v, "  \n", 0, 4);
}

// What every SentencePiece vocabulary begins with: specials and 256 byte tokens.
static inline void vocab_spm_begin(vocab *v) {
    memset(v, 0, sizeof *v);
    vocab_add(v, "<unk>", 0, 2);
    vocab_add(v, "<s>", 0, 3);
    vocab_add(v, "</s>", 0, 3);
    for (int32_t b = 0; b < 256; b++) {
        char text[8];
        snprintf(text, sizeof text, "<0x%02X>", (unsigned)b);
        vocab_add(v, text, 0, 6);
    }
}

// SentencePiece-like: specials, 256 byte tokens, merges scored by rank, single characters.
static inline void vocab_spm(vocab *v) {
    vocab_spm_begin(v);
    for (const char *c = vocab_corpus; *c;) {
        char text[5] = {0};
        int32_t n = 1;
        while (((unsigned char)c[n] & 0xc0) == 0x80) n++;
        memcpy(text, c, (size_t)n);
        const char *symbol = *c == ' ' ? "\xe2\x96\x81" : text;
        int32_t id = vocab_find(v, symbol);
        v->symbols[v->n_symbols++] = id >= 0 ? id : vocab_add(v, symbol, -5000 - (float)v->n_tokens, 1);
        c += n;
    }
    vocab_train(v, 300, true, "\xe2\x96\x81", "\n");
    vocab_train(v, 150, false, "\xe2\x96\x81", "\n");
    v->n_scored = v->n_merges;
    v->n_merges = 0;
    vocab_add(v, "<start_of_turn>", 0, 3);
    vocab_add(v, "<end_of_turn>", 0, 3);
    vocab_add(v, "<tool>", 0, 4);
    vocab_add(v, "[multi word]", 0, 4);
    vocab_add(v, "\n\n\n", 0, 4);
    vocab_add(v, "unreachable", -1, 1); // no pair of pieces leads to it
}

// gemma4: SentencePiece's tokens, merged by rank; a run of line ends that no merge leads to.
static inline void vocab_lines(vocab *v) {
    vocab_spm(v);
    v->n_merges = v->n_scored;
    vocab_add(v, "\n\n\n\n", 0, 1);
}

// One merge behind every boundary that a pre-tokenizer may draw: the last byte of a character with
// the first byte of the next, with 'a' and with '!'. Splits of a text show in its tokens, so each
// code point's class can be read off.
static inline void vocab_boundaries(vocab *v) {
    memset(v, 0, sizeof *v);
    for (int32_t b = 0; b < 256; b++) vocab_add(v, vocab_byte(b), 0, 1);
    for (int32_t last = 0x80; last < 0xc0; last++) {
        for (int32_t first = 0xc2; first < 0xf5; first++) vocab_add_merge(v, last, first);
        vocab_add_merge(v, last, 'a');
        vocab_add_merge(v, last, '!');
    }
    for (int32_t first = 0xc2; first < 0xf5; first++) vocab_add_merge(v, ' ', first);
}

// Special tokens that overlap, begin alike, end alike and hold each other: control tokens, and
// others that are cut out of any text. No more than 16 in all, since llama.cpp's order among those
// of one length is that of their ids only while its sort is a stable one.
static inline void vocab_overlaps(vocab *v) {
    static const struct { const char *text; int32_t type; } all[] = {
        {"<a><b>", 3}, {"<a>", 3}, {"<b>", 4}, {"><", 3}, {"a><b", 4}, {"<b><a", 3}, {"a>", 4},
        {"<<", 4}, {"<<<", 3}, {"<<<<<", 4}, {"\n\n", 4}, {"\n\n\n", 4}, {"\n\n\n\n\n", 3}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) vocab_add(v, all[i].text, 0, all[i].type);
}

static inline void vocab_bpe_overlaps(vocab *v) {
    memset(v, 0, sizeof *v);
    for (int32_t b = 0; b < 256; b++) vocab_add(v, vocab_byte(b), 0, 1);
    vocab_add_merge(v, '<', 'a');
    vocab_add_merge(v, 'b', '>');
    vocab_overlaps(v);
}

static inline void vocab_spm_overlaps(vocab *v) {
    vocab_spm_begin(v);
    vocab_overlaps(v);
}

// Thousands of special tokens.
static inline void vocab_many(vocab *v) {
    memset(v, 0, sizeof *v);
    for (int32_t b = 0; b < 256; b++) vocab_add(v, vocab_byte(b), 0, 1);
    vocab_add_merge(v, '<', 'u');
    for (int32_t i = 0; i < 5000; i++) {
        char text[VOCAB_TEXT];
        snprintf(text, sizeof text, "<unused%d>", i);
        vocab_add(v, text, 0, i % 2 ? 3 : 4);
    }
}

// Tokens that llama.cpp knows by their texts, of the families in which texts mean different things:
// all of them ordinary tokens in the file.
static inline void vocab_add_all(vocab *v, const char *const *texts) {
    memset(v, 0, sizeof *v);
    for (int32_t b = 0; b < 256; b++) vocab_add(v, vocab_byte(b), 0, 1);
    for (; *texts; texts++) vocab_add(v, *texts, 0, 1);
}

static inline void vocab_ends(vocab *v) {
    static const char *const texts[] = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|flush|>",
        "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
        "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "[e~[",
        "<\xef\xbd\x9c" "end\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>", "<|turn>", "<pad>",
        "<|message|>", "[PAD]", "<REPO>", "<|file_sep|>", "<|code_prefix|>", "<|suffix|>",
        "<\xef\xbd\x9c" "fim\xe2\x96\x81" "end\xef\xbd\x9c>", NULL};
    vocab_add_all(v, texts);
}

static inline void vocab_gpt_oss(vocab *v) {
    static const char *const texts[] = {"<|startoftext|>", "<|endoftext|>", "<|return|>",
        "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>", NULL};
    vocab_add_all(v, texts);
}

static inline void vocab_solar_open(vocab *v) {
    static const char *const texts[] = {"<|endoftext|>", "<|flush|>", "<|end|>", "<|calls|>", NULL};
    vocab_add_all(v, texts);
}

static inline void vocab_gemma4(vocab *v) {
    static const char *const texts[] = {"<pad>", "<eos>", "<bos>", "</s>", "<s>", "<|turn>", "<turn|>",
        "<|tool_response>", "<tool_response|>", NULL};
    vocab_add_all(v, texts);
}

static inline void vocab_fim(vocab *v) {
    static const char *const texts[] = {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "pre",
        "suf", "mid", "pre2", "suf2", "mid2", "eot", "eom", "<|fim_pad|>", "pad", "rep", "sep", NULL};
    vocab_add_all(v, texts);
}

static inline void vocab_fim_keys(vocab *v) {
    static const char *const ids[8][2] = {{"fim_pre", "pre"}, {"fim_suf", "suf"}, {"fim_mid", "mid"},
        {"fim_pad", "pad"}, {"fim_rep", "rep"}, {"fim_sep", "sep"}, {"eot", "eot"}, {"eom", "eom"}};
    vocab_fim(v);
    memcpy(v->ids, ids, sizeof ids);
}

static inline void vocab_fim_old_keys(vocab *v) {
    static const char *const ids[8][2] = {{"prefix", "pre"}, {"suffix", "suf"}, {"middle", "mid"}};
    vocab_fim(v);
    memcpy(v->ids, ids, sizeof ids);
}

static inline void vocab_fim_both_keys(vocab *v) {
    static const char *const ids[8][2] = {{"prefix", "pre2"}, {"suffix", "suf2"}, {"middle", "mid2"},
        {"fim_pre", "pre"}, {"fim_suf", "suf"}, {"fim_mid", "mid"}};
    vocab_fim(v);
    memcpy(v->ids, ids, sizeof ids);
}

typedef struct vocab_options {
    const char *model; // "llama", "gpt2" or "gemma4"
    const char *pre;   // NULL: the key is left out
    const char *bos, *eos;
    int32_t add_bos, add_eos, add_space_prefix; // -1: the key is left out
} vocab_options;

static inline void vocab_set(rocq_gguf_writer *w, const vocab *v, const vocab_options *o) {
    static rocq_str strings[VOCAB_MAX];
    assert_int_equal(rocq_gguf_writer_set_str(w, "tokenizer.ggml.model", o->model), ROCQ_OK);
    if (o->pre)
        assert_int_equal(rocq_gguf_writer_set_str(w, "tokenizer.ggml.pre", o->pre), ROCQ_OK);
    for (int32_t i = 0; i < v->n_tokens; i++) {
        strings[i].data = v->text[i];
        strings[i].length = (int64_t)strlen(v->text[i]);
    }
    assert_int_equal(rocq_gguf_writer_set(w, "tokenizer.ggml.tokens", ROCQ_GGUF_STRING, true,
                                          v->n_tokens, strings),
                     ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_set(w, "tokenizer.ggml.scores", ROCQ_GGUF_F32, true,
                                          v->n_tokens, v->score),
                     ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_set(w, "tokenizer.ggml.token_type", ROCQ_GGUF_I32, true,
                                          v->n_tokens, v->type),
                     ROCQ_OK);
    for (int32_t i = 0; i < v->n_merges; i++) {
        strings[i].data = v->merge[i];
        strings[i].length = (int64_t)strlen(v->merge[i]);
    }
    if (v->n_merges > 0 || strcmp(o->model, "gpt2") == 0)
        assert_int_equal(rocq_gguf_writer_set(w, "tokenizer.ggml.merges", ROCQ_GGUF_STRING, true,
                                              v->n_merges, strings),
                         ROCQ_OK);
    const struct { const char *key; int32_t value; } ids[] = {
        {"tokenizer.ggml.bos_token_id", o->bos ? vocab_find(v, o->bos) : -1},
        {"tokenizer.ggml.eos_token_id", o->eos ? vocab_find(v, o->eos) : -1},
    }, flags[] = {
        {"tokenizer.ggml.add_bos_token", o->add_bos},
        {"tokenizer.ggml.add_eos_token", o->add_eos},
        {"tokenizer.ggml.add_space_prefix", o->add_space_prefix},
    };
    for (size_t i = 0; i < 2; i++)
        if (ids[i].value >= 0)
            assert_int_equal(rocq_gguf_writer_set_u32(w, ids[i].key, (uint32_t)ids[i].value),
                             ROCQ_OK);
    for (size_t i = 0; i < 8 && v->ids[i][0]; i++) {
        char key[64];
        snprintf(key, sizeof key, "tokenizer.ggml.%s_token_id", v->ids[i][0]);
        const int32_t id = vocab_find(v, v->ids[i][1]);
        assert_true(id >= 0);
        assert_int_equal(rocq_gguf_writer_set_u32(w, key, (uint32_t)id), ROCQ_OK);
    }
    for (size_t i = 0; i < 3; i++)
        if (flags[i].value >= 0)
            assert_int_equal(rocq_gguf_writer_set_bool(w, flags[i].key, flags[i].value > 0),
                             ROCQ_OK);
}

static inline void vocab_write(rocq_ctx *ctx, const vocab *v, const vocab_options *o, const char *path) {
    rocq_gguf_writer *w = NULL;
    rocq_gguf_writer_desc desc = {0};
    desc.path = path;
    assert_int_equal(rocq_gguf_writer_open(ctx, &w, &desc), ROCQ_OK);
    // llama.cpp wants a model around the vocabulary; its smallest description will do.
    assert_int_equal(rocq_gguf_writer_set_str(w, "general.architecture", "llama"), ROCQ_OK);
    static const char *const sizes[] = {"context_length", "embedding_length", "block_count",
                                        "feed_forward_length", "attention.head_count"};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char key[64];
        snprintf(key, sizeof key, "llama.%s", sizes[i]);
        assert_int_equal(rocq_gguf_writer_set_u32(w, key, 32), ROCQ_OK);
    }
    assert_int_equal(rocq_gguf_writer_set_f32(w, "llama.attention.layer_norm_rms_epsilon", 1e-5f), ROCQ_OK);
    vocab_set(w, v, o);
    assert_int_equal(rocq_gguf_writer_close(&w), ROCQ_OK);
}

#endif // TESTS_VOCABS_H
