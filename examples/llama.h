// llama.h - model graphs on rocq.h: llama (and mistral), qwen2, qwen3, gemma2, from GGUF files.
// (INTERFACE FIRST; bodies follow.)

#ifndef LLAMA_H
#define LLAMA_H

#include "../rocq.h"

// Zero = default, as everywhere in rocq.
typedef struct llama_options {
    int32_t n_ctx;         // positions the KV cache holds; 0 = what the model was made for, at most 4096
    int32_t n_batch;       // tokens computed at once, 0 = 128
    int32_t n_logits;      // positions whose logits are computed at once when all are asked for, 0 = 1
    const char *kv_format; // NULL = "f16"; or "f32", "bf16", "q8_0", "q4_0"
    // Called while weights are found and while a prompt is read; false = stop (ROCQ_E_STATE). Or NULL.
    bool (*progress)(const char *what, int64_t done, int64_t total, void *user);
    void *user;
} llama_options;

typedef struct llama_layer llama_layer;

typedef struct llama_model {
    // public, read only but for n_past
    int32_t n_vocab, n_embd, n_layers, n_heads, n_kv_heads, n_ctx, n_ctx_train, n_batch;
    int32_t n_past;       // tokens in the cache; lower it to forget the newest, 0 starts afresh
    int64_t weight_bytes, kv_bytes, scratch_bytes; // scratch: activations and rocq's own
    char error[512];      // the message of the last failure, also of llama_open
    // private fields follow
} llama_model;

// Reads the configuration, checks every weight's shape, makes the cache and all memory that
// llama_eval and llama_sample will need. The file must stay open while the model is used. On failure
// everything is freed again, m is zero but for m->error.
static inline rocq_result llama_open(llama_model *m, rocq_ctx *ctx, const rocq_gguf *file, const llama_options *options);
static inline void llama_close(llama_model *m); // twice, or on a zeroed struct, is harmless

// Appends tokens[0..n) to the cache, in batches. logits NULL: only the last position's are computed,
// and wait for llama_sample or llama_logits. Otherwise logits receives [n_vocab, n] floats.
static inline rocq_result llama_eval(llama_model *m, const int32_t *tokens, int64_t n, float *logits);

// The last position's logits, n_vocab floats.
static inline rocq_result llama_logits(llama_model *m, float *logits);

// Draws the next token from the last position's logits. how: the knobs of rocq_sample_params; its
// token, prob, logits and step are filled in here.
static inline rocq_result llama_sample(llama_model *m, const rocq_sample_params *how, int32_t *token);

#endif
