// tokenizer.h - text to token ids and back, from GGUF metadata: "llama" (SentencePiece BPE) and
// "gpt2" (byte-level BPE) vocabularies.  (INTERFACE FIRST; bodies follow.)

#ifndef TOKENIZER_H
#define TOKENIZER_H

#include "../rocq.h"

typedef struct tokenizer {
    int32_t n_vocab;
    int32_t bos, eos;  // -1 = none
    char error[256];   // the message of the last failure, also of tokenizer_open
    // private fields follow
} tokenizer;

// A growing list of token ids; starts zeroed.
typedef struct tokenizer_ids {
    int32_t *data;
    int64_t count, capacity;
} tokenizer_ids;

// Bytes that are not yet a whole character; starts zeroed.
typedef struct tokenizer_stream {
    unsigned char pending[4];
    int32_t n_pending;
} tokenizer_stream;

// Token texts stay in the file, which must stay open. allocator NULL = malloc and free. On failure
// everything is freed again, t is zero but for t->error.
static inline rocq_result tokenizer_open(tokenizer *t, const rocq_gguf *file, const rocq_allocator *allocator);
static inline void tokenizer_close(tokenizer *t); // twice, or on a zeroed struct, is harmless

// Appends the tokens of a text of any bytes. add_special: BOS and EOS where the file asks for them.
// parse_special: "</s>" and its like in the text become control tokens (as llama_tokenize's flags).
static inline rocq_result tokenizer_encode(tokenizer *t, tokenizer_ids *ids, const char *text, int64_t length,
                                           bool add_special, bool parse_special);
static inline void tokenizer_ids_free(tokenizer *t, tokenizer_ids *ids);

// True when generation ends with this token.
static inline bool tokenizer_is_end(const tokenizer *t, int32_t id);

// The bytes of one token, maybe part of a character; control tokens are empty unless special.
// Valid until the next call on t.
static inline rocq_str tokenizer_piece(tokenizer *t, int32_t id, bool special);

// The same for reading along: only whole UTF-8 characters come out, what is never completed becomes
// U+FFFD. id -1 flushes. No allocation.
static inline rocq_str tokenizer_next(tokenizer *t, tokenizer_stream *s, int32_t id, bool special);

#endif
