// llama.h - runs models of the families in families.h (llama, qwen, gemma, lfm2 and others) from
// GGUF files, on rocq.h.
//
//     llama_model m;
//     if (llama_open(&m, ctx, file, NULL) != ROCQ_OK) puts(m.error);
//     llama_eval(&m, prompt, n_prompt, NULL);                 // fills the KV cache
//     rocq_sample_params how = {.temperature = 0.8f, .top_k = 40};
//     for (;;) {
//         int32_t token;
//         llama_sample(&m, &how, &token);
//         llama_eval(&m, &token, 1, NULL);
//     }
//     llama_close(&m);
//
// The graph is llama__layer below: one page, the same for every family. Where families differ, a
// weight is there or not, or a number in the configuration is set: families.h, which says how to
// add one.

#ifndef LLAMA_H
#define LLAMA_H

#include "../rocq.h"

#include "lora.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

// In C++17 designated initialisers are an extension of g++ and clang++; and g++ warns of fields
// that one does not name, although they become 0.
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#if defined(__clang__) || __GNUC__ >= 12
#pragma GCC diagnostic ignored "-Wc++20-extensions"
#endif
#endif

// ---------------------------------------------------------------------------------------------
// Interface
// ---------------------------------------------------------------------------------------------

typedef struct llama_options { // 0 = default, as everywhere in rocq
    int32_t n_ctx;         // positions the KV cache holds; default the model's own, at most 4096
    int32_t n_batch;       // tokens computed at once, default 128
    int32_t n_logits;      // positions whose logits are computed at once, where all are; default 1
    const char *kv_format; // "f16" (default), "f32", "bf16", "q8_0" or "q4_0"
    int32_t kv_page;       // positions of a page of the cache, default 0: contiguous
    int64_t expert_memory; // bytes for the experts of a mixture, default 0: all of them. Where they
                           // are more, they stay in host memory, on the CPU in the file, are read
                           // from there, and only copies of those most used are kept in so much
                           // memory of the device, on the CPU of the program; negative: none.
                           // A GPU's prompts take scratch memory for what a layer lacks. Logits
                           // have the same bits
    rocq_precision precision; // of all products; default AUTO, which differs between CPU and GPU
    int32_t interleave;    // CPU with AVX2: 1 copies the matrices out of the file, interleaved
                           // (ROCQ_LAYOUT_INTERLEAVED), -1 leaves them in it; default: 1 for
                           // weights of up to 256 MiB, which multiply faster so and are copied
                           // soon, where the context has no memory_budget
    const struct llama_model *share; // an open model of the same file and context: its weights are
                           // used, and none are loaded; interleave has no effect then. See
                           // llama_open. Default NULL
    // Called while weights are loaded ("loading") and while a prompt is read ("reading"), with how
    // much is done; false = stop, which makes the call fail with ROCQ_E_STATE. NULL = no call.
    bool (*progress)(const char *what, int64_t done, int64_t total, void *user);
    void *user;
} llama_options;

// Letters in shapes: Q is n_heads * head_dim, KV is n_kv_heads * head_dim, FF is n_ff, of the layer
// where layers differ, A is n_apart. gpt2 has q,
// k and v in one weight, which is q here, [n_embd, Q + 2 KV], and no gate: its ffn_up, which goes
// through the activation, is gate here. It has no k, v and up. Nor has phi3, whose gate has gate
// and up, [n_embd, 2 FF]. A layer that convolves has in_proj, [n_embd, 3 n_embd], as q, and its
// out_proj as out. Where attention's output has a gate (qwen35), q has it too: [n_embd, 2 Q], of
// each head its q, then its gate. A layer with a delta net of H heads of D elements, and G of keys,
// has q, k and v in one weight, q: [n_embd, C], C = (2 G + H) D, and its output's gate as k,
// [n_embd, H D].
typedef struct llama_layer {
    rocq_tensor attn_norm;              // [n_embd]
    rocq_tensor attn_norm_bias;         // [n_embd]                   gpt2, as that of ffn_norm
    rocq_tensor q, k, v;                // [n_embd, Q], [n_embd, KV], [n_embd, KV]
    rocq_tensor q_bias, k_bias, v_bias; // [Q], [KV], [KV]         most of qwen2, gpt2
    rocq_tensor q_norm, k_norm;         // [head_dim], of each head   qwen3, gemma3
    rocq_tensor sinks;                  // [n_heads]                  gpt-oss
    rocq_tensor conv;                   // [taps, n_embd or C]        lfm2, qwen35
    rocq_tensor alpha, beta, a, dt;     // [n_embd, H] and [H] twice  qwen35
    rocq_tensor delta_norm;             // [D], of each head          qwen35
    rocq_tensor out, out_bias;          // [Q, n_embd], [n_embd]
    rocq_tensor attn_post_norm;         // [n_embd]                   gemma
    rocq_tensor ffn_norm, ffn_norm_bias; // [n_embd]
    rocq_tensor gate, gate_bias;        // [n_embd, FF], [FF]
    rocq_tensor up, up_bias;            // [n_embd, FF], [FF]
    rocq_tensor down, down_bias;        // [FF, n_embd], [n_embd]
    rocq_tensor ffn_post_norm;          // [n_embd]                   gemma
    // Of mixtures: E is n_experts, XF is expert_ff. The above then is the shared expert, if any.
    rocq_tensor router, router_bias;           // [n_embd, E], [E]
    rocq_tensor choice_bias;                   // [E]                 lfm2moe
    rocq_tensor shared;                        // [n_embd]            qwen35moe: its gate
    rocq_tensor router_norm, expert_norm;      // [n_embd] of what router and experts read, gemma4
    rocq_tensor expert_post_norm, dense_post_norm; // [n_embd]        gemma4
    rocq_tensor expert_scale;                  // [E] of what an expert gives    gemma4
    rocq_tensor expert_gate, expert_gate_bias; // [n_embd, XF, E] or with up [n_embd, 2 XF, E]; bias
    rocq_tensor expert_up, expert_up_bias;     // [n_embd, XF, E]     [XF, E]
    rocq_tensor expert_down, expert_down_bias; // [XF, n_embd, E], [n_embd, E]
    // With expert_memory: copies of n_kept experts, and the place of each expert's copy, or -1
    rocq_tensor gate_kept, up_kept, down_kept; // as the above, of n_kept
    rocq_tensor kept;                          // I32 [E]
    int32_t n_kept, *place;                    // [E], as kept
    float *heat;                               // [E]: how much they are used
    int64_t n_uses, n_hits;
    // The part of embeddings that is for this layer alone                   gemma4, as the scale
    rocq_tensor apart_gate;             // [n_embd, A]
    rocq_tensor apart_out, apart_norm;  // [A, n_embd], [n_embd]
    rocq_tensor scale;                  // [1] of the residual stream behind the layer
    rocq_kv_view cache;                 // of layers with attention
    int32_t source;                     // number of the layer whose keys and values these are
    int32_t head_dim, n_kv_heads, n_ff; // as the model's, but in gemma4
    rocq_tensor state;                  // F32 [n_embd or C, taps - 1 + LLAMA_BACK] of the others
    rocq_tensor spare;                  // F32 [n_embd or C, taps - 1]: see spared in llama_model
    rocq_tensor deltas;                 // F32 [D, D, 2 H] of delta nets: see kept in llama_model
    int32_t bit;                        // its family or kind, of families.h
    int32_t window;                     // positions a query sees, 0 = all
    rocq_rope_config rope;
} llama_layer;                          // weights that a family lacks have n_dims 0

enum { LLAMA_LORAS = 8, LLAMA_BACK = 64 }; // adapters at once; see n_past

typedef struct llama_lora {
    const char *name;      // for messages
    const rocq_gguf *file; // an adapter of this model, see lora.h; read by llama_set_loras only
    float scale;           // 1 = as it was trained, 0 = off
} llama_lora;

// The adapters of up to three weights that read the same x: t = gate (A x) for all of them, then
// each weight's product adds B t with its part of t. Private.
typedef struct llama_site {
    rocq_tensor a;                // [in, R], R being the sum of all ranks below
    rocq_tensor gate;             // F32 [R]: scales
    rocq_tensor b[3];             // [its part of R, out]
    int32_t rank[3][LLAMA_LORAS]; // of each weight and adapter, in the order of R
    float unit[3][LLAMA_LORAS];   // scale that stands for 1
} llama_site;

typedef struct llama_adapters {
    llama_site *sites; // [4 n_layers + 1]: of each layer q k v, out, gate up, down; last output
    rocq_buffer memory;
    rocq_tensor low;   // F32 [most R, n_batch]
    float scale[LLAMA_LORAS];
    int32_t n;
} llama_adapters;

typedef struct llama_model {
    int32_t n_past; // tokens in the cache; lower it to forget the newest, 0 starts afresh. Models
                    // with convolutions (lfm2) can forget LLAMA_BACK tokens so, or all of them;
                    // with delta nets (qwen35) what the last batch of up to LLAMA_BACK has added,
                    // or all

    // The rest is for reading only.
    const char *family; // general.architecture
    int32_t n_vocab, n_embd, n_layers, n_heads, n_kv_heads, head_dim;
    int32_t n_ff;                        // of a mixture that of its shared expert or dense part, or
                                         // of its first n_leading layers, which are dense; 0 = none
    int32_t n_experts, n_used, expert_ff; // n_experts 1: no mixture
    int32_t n_leading;
    int32_t n_convs, n_taps;             // layers that convolve, over so many tokens: lfm2's, and
                                         // those with a delta net, which has delta_heads heads of
    int32_t delta_heads, delta_groups, delta_dim; // delta_dim elements, and delta_groups of keys
    int32_t n_ahead;                     // layers of the file behind n_layers, which are not read
    int32_t local_dim;                   // head_dim of layers with a window; n_kv_heads and n_ff,
                                         // too, may differ by layer, and are the largest then
    int32_t n_apart;                     // elements of an embedding for each layer alone
    int32_t n_ctx, n_ctx_train, n_batch, n_logits;
    int64_t weight_bytes, kv_bytes; // weight_bytes and expert_bytes are 0 with options.share
    int64_t scratch_bytes; // activations, and what ops need while they run
    int64_t expert_bytes;  // of the weights: those of all experts
    char error[512];       // the message of the last failure, also of llama_open

    // Private from here on. The configuration:
    const struct llama__family *row; // of families.h
    float norm_eps, embedding_scale, attention_scale, attention_softcap, final_softcap;
    float logit_scale, temperature, expert_scale;
    rocq_activation activation;
    rocq_rope_config rope;   // of most layers
    // weights
    rocq_tensor embedding;   // [n_embd, n_vocab]
    rocq_tensor positions;   // [n_embd, n_ctx_train]                 gpt2
    rocq_tensor output_norm, output_norm_bias; // [n_embd]
    rocq_tensor output;      // [n_embd, n_vocab]; may be the embedding
    rocq_tensor output_bias; // [n_vocab]
    rocq_tensor rope_freqs;  // [rope.n_dims / 2]                     llama 3
    rocq_tensor rope_short, rope_long; // the same, up to the trained context and beyond   phi3
    llama_layer *layers;     // [n_layers]
    rocq_buffer weights;     // of those that are not just views of the file
    rocq_buffer experts;     // of experts in host memory: see experts.h
    int32_t *n_users;        // open models that use weights and experts: options.share
    rocq_buffer slots;       // copies of some of them, and the tables
    bool counts;             // whether there is a budget, and it does not hold all experts
    int32_t *places, *taken; // of all layers; m->chosen on the host
    int32_t uncounted, turn; // tokens of the last batch; the layer whose turn is next
    int32_t n_weights;
    rocq_tensor apart_embedding;   // [A n_layers, n_vocab]           gemma4
    rocq_tensor apart_weight, apart_weight_norm; // [n_embd, A n_layers], [A]
    rocq_kv *kv[2];          // the second: of layers with a window, where their heads differ
    llama_adapters adapters;
    rocq_tensor low[3];      // of the last site: the part of t that each weight adds
    // what a batch of n <= n_batch tokens goes through
    rocq_buffer memory;
    rocq_tensor inputs;   // I32 [4 + 4 n_batch]: n_past + n, then of n tokens their ids, their
                          // positions, their cells in the cache and, F32, what queries are
                          // multiplied by                              mistral3
                          // or where convolutions have the first       lfm2, qwen35
                          // and the slots of states: read, written     qwen35
    int32_t *staged;      // the same on the host, for one upload
    rocq_tensor x;        // [n_embd, n_batch] the residual stream
    rocq_tensor h;        // [n_embd, Q or H D, n_batch] normed or attended: see llama__operand
    rocq_tensor qkv;      // [Q + 2 KV, 3 n_embd or C + H D + 2 H, n_batch]
    rocq_tensor convolved; // [C, n_batch]                              qwen35
    rocq_tensor ffn;      // [FF, n_batch], an operand too
    rocq_tensor scores;   // [E, n_batch] of experts, by the router     mixtures, as these
    rocq_tensor chosen;   // I32 [n_used n_layers, n_batch]
    rocq_tensor shares;   // [n_used, n_batch] their weights
    rocq_tensor mixed;    // [XF, n_used, n_batch], an operand too
    rocq_tensor opened;   // [1, n_batch] the shared expert's gate      qwen35moe
    rocq_tensor pair;     // [2 FF, n_batch] gate and up                phi3
                          // or [2 XF n_used, n_batch] of experts       gemma4
    rocq_tensor added;    // [n_embd, n_batch] before its norm         gemma; gpt2: positions;
                          // mixtures: what the router reads
    rocq_tensor apart, apart_rows; // [A n_layers, n_batch] of the tokens     gemma4
    rocq_tensor head_norm; // [n_embd] output_norm with logit_scale     granite
    rocq_tensor router_norms; // [n_embd, n_layers] by 1 / sqrt(n_embd) gemma4
    rocq_tensor logits;   // [n_vocab, n_logits]
    rocq_tensor last;     // [n_vocab] the column of logits that llama_sample draws from
    rocq_tensor token;    // I32 [1]
    rocq_gguf_value suppressed; // the tokens that are never drawn, or an empty array
    rocq_tensor allowed;  // I32 [(n_vocab + 31) / 32] mask of the others
    rocq_format few, many; // of operands, with up to 8 columns and with more
    rocq_graph *step;     // one token, recorded; NULL where ops run one by one
    // Convolutions number all tokens that they have seen: to them, those of the cache stand `moved`
    // positions further, by llama_forget. They can go on with n_past from conv_first to conv_end.
    int32_t moved, conv_first, conv_end;
    // A batch of more than LLAMA_BACK tokens overwrites what it has read of states. So that it can
    // be run again if it fails, the spare states have that; spared is its n_past, 0 = none.
    int32_t spared;
    // Slot i of the states of delta nets is that after kept[i] tokens, 0: of none of this text.
    // Each batch reads one slot and writes the other, so that one that failed can be run again.
    int32_t kept[2];
    int32_t begun, begun_past; // 1 + the token that llama_eval_for has begun, 0 = none; its n_past
    rocq_ctx *ctx;
    const rocq_gguf *file;
    llama_options options;
    int64_t op_scratch;   // that the ops of a step need, see llama__plan
} llama_model;

// Several conversations, as of a game's characters, are several llama_models over one file and
// context, called in turn, also in the middle of llama_eval_for. With options.share they use one
// set of weights. Each still has its own cache, activations, recorded step, options and adapters.
// If the other model's experts do not fit its expert_memory, each also has copies of experts of its
// own, in its expert_memory (default: as much); otherwise expert_memory has no effect. They can be
// closed in any order: the weights are freed with the last one. Without share each loads weights of
// its own, which on the CPU may be the mapped file (options.interleave).
//
// Reads the configuration, checks every weight's shape, and makes the cache and all memory that
// llama_eval and llama_sample will ever need. While the model is open, file and ctx must be, and *m
// must not move. On failure everything is freed again, and *m is zero but for m->error.
static inline rocq_result llama_open(llama_model *m, rocq_ctx *ctx, const rocq_gguf *file,
                                     const llama_options *options);
static inline void llama_close(llama_model *m); // twice, or on a zeroed struct, is harmless

// Does ahead what would make the first tokens slow; call it after llama_tune. On the CPU it also
// runs a step and a draw, and forgets them, unless there are tokens already, graphs are off, or
// experts have a budget.
static inline rocq_result llama_warm(llama_model *m);

// Experts that have copies in options.expert_memory, of a layer or, with layer -1, of all; and how
// often the tokens so far have chosen an expert (n_uses), and one that had a copy (n_hits). Without
// a budget, or where it holds all experts, they all count as kept, and uses are not counted.
typedef struct llama_expert_stats {
    int64_t n_experts, n_kept;  // 0: the layer is no mixture
    int64_t bytes, kept_bytes;
    int64_t n_uses, n_hits;
} llama_expert_stats;
static inline rocq_result llama_get_expert_stats(llama_model *m, int32_t layer,
                                                 llama_expert_stats *stats);

// Appends tokens[0..n) to the cache, batch by batch. With logits NULL only those of the last
// position are computed; else logits receives n rows of n_vocab floats. In both cases llama_sample
// may draw from the last, but not after a failure. Any thread may call rocq_cancel. After that call
// rocq_sync, which ends the cancellation; then pass the tokens that n_past does not count yet to
// llama_eval, or call llama_eval_for again with *done as it left it. n_past counts whole batches;
// of the last one the rows of logits may be missing.
static inline rocq_result llama_eval(llama_model *m, const int32_t *tokens, int64_t n,
                                     float *logits);

// Does the same for about us microseconds, so once in each frame of a game, from tokens[*done] on:
// 0 at first, then what the last call has set, in the end n. Then, and not before, llama_sample may
// draw. It goes token by token through the recorded step, by rocq_graph_launch_for, whose bounds
// and errors are this call's; nothing is waited for. A token that was begun counts once it is done;
// other calls of this model, other tokens and another n_past drop it. The bits are those of
// llama_eval with one token at a time. On a GPU rocq_desc.slice_us should be set. ROCQ_E_STATE with
// rocq_desc.no_graphs.
static inline rocq_result llama_eval_for(llama_model *m, const int32_t *tokens, int64_t n,
                                         int32_t us, int64_t *done);

// Forgets n of the tokens in the cache, from number first on: those behind them move up, and n_past
// goes down by n. So text can go on when the context is full. Not with gpt2, where what tokens
// became depends on learned positions, nor where layers turn keys in different ways, as in gemma3,
// gemma4 and smollm3, nor with delta nets (qwen35), nor the newest tokens that convolutions of lfm2
// still read (E_UNSUPPORTED).
static inline rocq_result llama_forget(llama_model *m, int32_t first, int32_t n);

// Puts n adapters in the place of those that there were; what is in the cache stays as it is.
// Weights keep their format, and each product adds its adapters in the same launch. On failure,
// also with a file that is none of this model's, the adapters are those that there were.
static inline rocq_result llama_set_loras(llama_model *m, const llama_lora *loras, int32_t n);

// Changes the scale of adapter i, counted as in llama_set_loras, from the next token on.
static inline rocq_result llama_scale_lora(llama_model *m, int32_t i, float scale);

// Draws the next token from the logits of the last position. how: the knobs of rocq_sample_params;
// its token, logits and step are filled in here. Tokens that the file says are never to be drawn
// (tokenizer.ggml.suppress_tokens) are not, unless how has a mask of its own.
static inline rocq_result llama_sample(llama_model *m, const rocq_sample_params *how,
                                       int32_t *token);

// Finds the fastest launches for the ops of one token on this GPU, with half the context full
// (rocq_tune_graph): some seconds, after which the cache is empty. rocq_tuning_save keeps them for
// the next time, to be loaded before llama_open. ROCQ_E_UNSUPPORTED on the CPU.
static inline rocq_result llama_tune(llama_model *m, rocq_tune_result *result);

// ---------------------------------------------------------------------------------------------
// Errors
// ---------------------------------------------------------------------------------------------

#define LLAMA__TRY(call)                          \
    do {                                          \
        const rocq_result llama__r = (call);      \
        if (llama__r != ROCQ_OK) return llama__r; \
    } while (0)

static rocq_result llama__fail(llama_model *m, rocq_result result, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(m->error, sizeof m->error, format, args);
    va_end(args);
    rocq_message_clean(m->error, sizeof m->error);
    return result;
}

// What a public call returns: a failure without a message of ours came from the context.
static rocq_result llama__done(llama_model *m, rocq_result result) {
    if (result == ROCQ_OK || m->error[0]) return result;
    return llama__fail(m, result, "%s", rocq_error(m->ctx));
}

static rocq_result llama__progress(llama_model *m, const char *what, int64_t done, int64_t total) {
    const llama_options *o = &m->options;
    if (!o->progress || o->progress(what, done, total, o->user)) return ROCQ_OK;
    return llama__fail(m, ROCQ_E_STATE, "%s was stopped", what);
}

#include "families.h"

// ---------------------------------------------------------------------------------------------
// Weights
// ---------------------------------------------------------------------------------------------

static rocq_info llama__info(const llama_model *m) {
    rocq_info info;
    memset(&info, 0, sizeof info);
    rocq_get_info(m->ctx, &info);
    return info;
}

static rocq_result llama__allocate(llama_model *m, void *out, size_t size) { // *out, cleared
    const rocq_allocator a = llama__info(m).desc.allocator;
    void *data = a.alloc(size, a.user);
    if (!data) return llama__fail(m, ROCQ_E_MEMORY, "no memory for %.0f bytes", (double)size);
    memset(data, 0, size);
    memcpy(out, &data, sizeof data); // out points to a pointer of any type
    return ROCQ_OK;
}

static void llama__free(llama_model *m, void *data, size_t size) {
    const rocq_allocator a = llama__info(m).desc.allocator;
    if (data) a.free(data, size, a.user);
}

enum { LLAMA__FEW = 8 }; // columns: from the next on, a GPU's kernels read another format

// The operands that llama_open starts with suit quantized weights. Several weights read each of
// them, so one that wants F32 decides for all.
static void llama__operands_of(llama_model *m, rocq_format weights) {
    const rocq_precision p = m->options.precision;
    if (rocq_operand_format(m->ctx, weights, 1, p) == ROCQ_F32) m->few = ROCQ_F32;
    if (rocq_operand_format(m->ctx, weights, LLAMA__FEW + 1, p) == ROCQ_F32) m->many = ROCQ_F32;
}

// What is to be loaded, and where it goes: [n_weights] each.
typedef struct llama__list {
    rocq_tensor *tensors;
    rocq_tensor **places;
    const char **names;
    char (*text)[64]; // of the names
} llama__list;

// How many layers the file has tensors of.
static int64_t llama__layers_of(const rocq_gguf *file) {
    int64_t n = 0;
    rocq_gguf_tensor t;
    for (int64_t i = 0; i < rocq_gguf_tensor_count(file); i++) {
        int64_t layer = 0;
        if (rocq_gguf_tensor_at(file, i, &t) != ROCQ_OK || t.name.length < 6 ||
            memcmp(t.name.data, "blk.", 4) != 0) continue;
        for (int64_t k = 4; k < t.name.length && k < 10; k++) {
            const char c = t.name.data[k];
            if (c == '.' && layer >= n) n = layer + 1;
            if (c < '0' || c > '9') break;
            layer = 10 * layer + (c - '0');
        }
    }
    return n;
}

// What a tensor that is missing, or that no layer has, comes from where block_count is wrong.
static rocq_result llama__check_layers(llama_model *m, const rocq_gguf *file) {
    const int64_t n = llama__layers_of(file);
    if (n == m->n_layers + m->n_ahead) return ROCQ_OK;
    return llama__fail(m, ROCQ_E_SHAPE, "%s.block_count is %d, expected %.0f: the file has tensors "
                       "of so many layers", m->family, (int)(m->n_layers + m->n_ahead), (double)n);
}

// Finds one weight, and lists it.
static rocq_result llama__find(llama_model *m, const rocq_gguf *file, llama__list *list,
                               const llama__weight *w, const char *name, const int64_t *size,
                               rocq_tensor *place) {
    const int64_t cols = size[w->cols], rows = size[w->rows];
    const int64_t slices = w->flags & LLAMA__BY_EXPERT ? m->n_experts : 1;
    rocq_gguf_tensor found;
    if ((w->flags & LLAMA__APART) && m->n_apart == 0) return ROCQ_OK;
    if ((w->flags & LLAMA__BESIDE) && m->n_ff == 0) return ROCQ_OK;
    if (rocq_gguf_find_tensor(file, name, &found) != ROCQ_OK) {
        if (w->flags & LLAMA__OPTIONAL) return ROCQ_OK;
        if (strncmp(name, "blk.", 4) == 0) LLAMA__TRY(llama__check_layers(m, file));
        return llama__fail(m, ROCQ_E_NOT_FOUND, "tensor %s is missing, expected %.0f x %.0f x %.0f",
                           name, (double)cols, (double)rows, (double)slices);
    }
    if (found.ne[0] != cols || found.ne[1] != rows || found.ne[2] != slices || found.ne[3] != 1) {
        return llama__fail(m, ROCQ_E_SHAPE, "tensor %s is %.0f x %.0f x %.0f, expected %.0f x %.0f "
                           "x %.0f", name, (double)found.ne[0], (double)found.ne[1],
                           (double)found.ne[2], (double)cols, (double)rows, (double)slices);
    }
    const bool exact = w->rows == LLAMA__1 || (w->flags & LLAMA__F32);
    if (!found.known || found.format == ROCQ_I32 || found.format == ROCQ_I8 ||
        (exact && found.format != ROCQ_F32)) {
#define LLAMA__NAME(NAME, lower, id, elems, bytes) " " #NAME
        return llama__fail(m, ROCQ_E_FORMAT, "tensor %s has the type %s (id %u), expected%s", name,
                           found.type_name, (unsigned)found.type_id,
                           exact ? " F32 (id 0)" : " one of" ROCQ_FORMATS(LLAMA__NAME));
#undef LLAMA__NAME
    }
    const int32_t i = m->n_weights++;
    snprintf(list->text[i], sizeof list->text[i], "%s", name);
    list->names[i] = list->text[i];
    list->places[i] = place;
    if (!exact && !(w->flags & LLAMA__ALONE)) llama__operands_of(m, found.format);
    m->weight_bytes += found.size;
    if (slices > 1) m->expert_bytes += found.size;
    return ROCQ_OK;
}

// Whether a tensor is of the layers that are not read.
static bool llama__is_ahead(const llama_model *m, rocq_str name) {
    for (int32_t i = 0; i < m->n_ahead; i++) {
        char first[24];
        const int n = snprintf(first, sizeof first, "blk.%d.", (int)(m->n_layers + i));
        if (name.length > n && memcmp(name.data, first, (size_t)n) == 0) return true;
    }
    return false;
}

// A weight that the graph does not know would be left out in silence, and the text be wrong.
static rocq_result llama__check_count(llama_model *m, const rocq_gguf *file, llama__list *list) {
    rocq_gguf_tensor t;
    for (int64_t i = 0; i < rocq_gguf_tensor_count(file); i++) {
        bool listed = false;
        if (rocq_gguf_tensor_at(file, i, &t) != ROCQ_OK) continue;
        for (int32_t k = 0; k < m->n_weights && !listed; k++) {
            listed = rocq_str_equal(t.name, list->names[k]);
        }
        if (listed || llama__is_ahead(m, t.name)) continue;
        LLAMA__TRY(llama__check_layers(m, file));
        return llama__fail(m, ROCQ_E_UNSUPPORTED, "of the file's %.0f tensors a %s model of %d "
                           "layers has %d; %.*s is none of them",
                           (double)rocq_gguf_tensor_count(file), m->family, (int)m->n_layers,
                           (int)m->n_weights, (int)(t.name.length < 64 ? t.name.length : 64),
                           t.name.data);
    }
    return ROCQ_OK;
}

// Elements of all heads of a delta net's v, and of its q, k and v together.
static int64_t llama__delta_values(const llama_model *m) {
    return (int64_t)m->delta_heads * m->delta_dim;
}

static int64_t llama__delta_rows(const llama_model *m) {
    return 2 * (int64_t)m->delta_groups * m->delta_dim + llama__delta_values(m);
}

static rocq_result llama__find_all(llama_model *m, const rocq_gguf *file, llama__list *list) {
    const int64_t n_embd = m->n_embd, n_apart = m->n_apart;
    int64_t size[LLAMA__N_SIZES] = {1, n_embd, 0, 0, 0, 0, 0, 0, m->n_vocab, m->n_ctx_train,
                                    m->rope.n_dims / 2, m->n_heads, m->n_experts, m->expert_ff,
                                    2 * (int64_t)m->expert_ff, 3 * n_embd, m->n_taps, n_apart,
                                    n_apart * m->n_layers, 2 * (int64_t)m->n_heads * m->head_dim,
                                    llama__delta_rows(m), llama__delta_values(m), m->delta_heads,
                                    m->delta_dim};
    for (int k = 0; k < LLAMA__N_OTHERS; k++) {
        const llama__weight *w = &llama__others[k];
        rocq_tensor *place = (rocq_tensor *)(void *)((char *)m + w->at);
        if (!(w->families & m->row->bit)) continue;
        LLAMA__TRY(llama__find(m, file, list, w, w->name, size, place));
    }
    for (int32_t i = 0; i < m->n_layers; i++) {
        const llama_layer *l = &m->layers[i];
        size[LLAMA__D] = l->head_dim;
        size[LLAMA__Q] = (int64_t)m->n_heads * l->head_dim;
        size[LLAMA__KV] = (int64_t)l->n_kv_heads * l->head_dim;
        size[LLAMA__QKV] = size[LLAMA__Q] + 2 * size[LLAMA__KV];
        size[LLAMA__F] = l->n_ff;
        size[LLAMA__2F] = 2 * (int64_t)l->n_ff;
        rocq_gguf_tensor pair;
        char name[64];
        snprintf(name, sizeof name, "blk.%d.ffn_gate_up_exps.weight", (int)i);
        const bool joined = (l->bit & LLAMA__JOINS) &&
                            rocq_gguf_find_tensor(file, name, &pair) == ROCQ_OK;
        for (int k = 0; k < LLAMA__N_WEIGHTS; k++) {
            const llama__weight *w = &llama__weights[k];
            rocq_tensor *place = (rocq_tensor *)(void *)((char *)&m->layers[i] + w->at);
            if (!(w->families & l->bit)) continue;
            if (w->flags & (joined ? LLAMA__SPLIT : LLAMA__JOINED)) continue;
            snprintf(name, sizeof name, "blk.%d.%s", (int)i, w->name);
            LLAMA__TRY(llama__find(m, file, list, w, name, size, place));
        }
    }
    return m->n_weights == rocq_gguf_tensor_count(file) ? ROCQ_OK
                                                        : llama__check_count(m, file, list);
}

// What the speeds of turning pairs are divided by: of tensors for two lengths, one.
static void llama__set_factors(llama_model *m) {
    const rocq_tensor *factors = &m->rope_freqs;
    if (factors->n_dims == 0) {
        factors = m->n_ctx > m->rope.n_ctx_orig ? &m->rope_long : &m->rope_short;
    }
    if (factors->n_dims == 0) return;
    m->rope.freq_factors = factors;
    for (int32_t i = 0; i < m->n_layers; i++) {
        if (m->row->local_base > 0 && m->layers[i].window > 0) continue; // nothing stretches them
        m->layers[i].rope.freq_factors = factors;
    }
}

#include "experts.h"

enum { LLAMA__SOON_COPIED = 256 << 20 }; // bytes of weights that are interleaved by default

typedef struct llama__load {
    llama_model *m;
    int64_t before; // bytes of the part that has been loaded
} llama__load;

static bool llama__loading(int64_t done, int64_t total, void *user) {
    const llama__load *load = (const llama__load *)user;
    const int64_t all = load->m->weight_bytes;
    return llama__progress(load->m, "loading", load->before + done,
                           load->before + total > all ? load->before + total : all) == ROCQ_OK;
}

static bool llama__interleaves(const llama_model *m) {
    rocq_info info;
    if (m->options.interleave != 0) return m->options.interleave > 0;
    rocq_get_info(m->ctx, &info);
    return m->weight_bytes <= LLAMA__SOON_COPIED && info.desc.memory_budget == 0;
}

static rocq_result llama__load_own(llama_model *m, const rocq_gguf *file,
                                   const llama__list *list) {
    const int32_t n = llama__experts_last(m, file, list), n_experts = m->n_weights - n;
    llama__load load = {m, 0};
    rocq_gguf_load_desc desc = {
        .names = list->names, .n_names = n, .interleave = llama__interleaves(m),
        .progress = llama__loading, .user = &load};
    rocq_result result = rocq_gguf_load(m->ctx, file, &desc, list->tensors, &m->weights);
    if (result == ROCQ_OK && n_experts > 0) {
        load.before = m->weight_bytes - m->expert_bytes;
        desc.names += n;
        desc.n_names = n_experts;
        desc.memory = ROCQ_MEMORY_PINNED;
        result = rocq_gguf_load(m->ctx, file, &desc, list->tensors + n, &m->experts);
    }
    if (result != ROCQ_OK) return m->error[0] ? ROCQ_E_STATE : result; // progress had it stopped
    for (int32_t i = 0; i < m->n_weights; i++) *list->places[i] = list->tensors[i];
    return ROCQ_OK;
}

// Takes what another model of the file has loaded: from now on it is as much this one's.
static void llama__take_shared(llama_model *m) {
    const llama_model *from = m->options.share;
    for (int k = 0; k < LLAMA__N_OTHERS; k++) {
        const size_t at = llama__others[k].at;
        memcpy((char *)m + at, (const char *)from + at, sizeof(rocq_tensor));
    }
    for (int32_t i = 0; i < m->n_layers; i++) {
        for (int k = 0; k < LLAMA__N_WEIGHTS; k++) {
            const size_t at = llama__weights[k].at;
            memcpy((char *)&m->layers[i] + at, (const char *)&from->layers[i] + at,
                   sizeof(rocq_tensor));
        }
    }
    m->weights = from->weights;
    m->experts = from->experts;
    m->n_users = from->n_users;
    ++*m->n_users;
    m->weight_bytes = m->expert_bytes = 0;
    m->counts = from->counts;
    if (m->options.expert_memory == 0) m->options.expert_memory = from->options.expert_memory;
    m->options.share = NULL; // it may be closed before this model
}

static rocq_result llama__load_listed(llama_model *m, const rocq_gguf *file, llama__list *list) {
    LLAMA__TRY(llama__find_all(m, file, list));
    if (m->options.share) {
        llama__take_shared(m);
    } else {
        LLAMA__TRY(llama__allocate(m, &m->n_users, sizeof *m->n_users));
        *m->n_users = 1;
        LLAMA__TRY(llama__load_own(m, file, list));
    }
    llama__set_factors(m);
    return llama__make_slots(m);
}

static rocq_result llama__load_all(llama_model *m, const rocq_gguf *file) {
    const size_t n = LLAMA__N_OTHERS + (size_t)m->n_layers * LLAMA__N_WEIGHTS;
    llama__list list;
    const size_t size = n * (sizeof *list.tensors + sizeof *list.places + sizeof *list.names +
                             sizeof *list.text);
    LLAMA__TRY(llama__allocate(m, &list.tensors, size));
    list.places = (rocq_tensor **)(void *)(list.tensors + n);
    list.names = (const char **)(void *)(list.places + n);
    list.text = (char (*)[64])(void *)(list.names + n);
    const rocq_result result = llama__load_listed(m, file, &list);
    llama__free(m, list.tensors, size);
    return result;
}

// ---------------------------------------------------------------------------------------------
// The graph
// ---------------------------------------------------------------------------------------------

static const rocq_tensor *llama__maybe(const rocq_tensor *t) { return t->n_dims > 0 ? t : NULL; }

// What a product reads: [rows, n] in t's memory, in the format that suits n.
static rocq_tensor llama__operand(const llama_model *m, const rocq_tensor *t, int64_t rows,
                                  int64_t n) {
    const int64_t ne[2] = {rows, n};
    rocq_tensor operand = *t;
    // cannot fail: t has room for as many columns in F32
    rocq_tensor_init(&operand, &t->buffer, t->offset, n <= LLAMA__FEW ? m->few : m->many, 2, ne);
    if (operand.format == ROCQ_Q8_0) operand.layout = ROCQ_LAYOUT_PLANAR;
    return operand;
}

// bias NULL, or not in the model: an rmsnorm; weight NULL: of ones.
static rocq_result llama__norm(llama_model *m, const rocq_tensor *y, const rocq_tensor *x,
                               const rocq_tensor *weight, const rocq_tensor *bias) {
    const rocq_norm_params norm = {.y = y, .x = x, .weight = weight,
                                   .bias = bias ? llama__maybe(bias) : NULL, .eps = m->norm_eps};
    if (norm.bias) LLAMA__TRY(rocq_layernorm(m->ctx, &norm));
    else LLAMA__TRY(rocq_rmsnorm(m->ctx, &norm));
    return ROCQ_OK;
}

// Runs the first half of a site's adapters, for the products of x that llama__adapt prepares.
static rocq_result llama__reduce(llama_model *m, const llama_site *site, const rocq_tensor *x) {
    if (site->a.n_dims == 0) return ROCQ_OK;
    const int64_t ne[2] = {site->a.ne[1], x->ne[1]};
    rocq_tensor t = m->adapters.low, gate = site->gate;
    rocq_tensor_init(&t, &t.buffer, t.offset, ROCQ_F32, 2, ne); // cannot fail: low has room
    gate.n_dims = 2;
    gate.ne[1] = ne[1];
    gate.stride[1] = 0; // the same for every column
    const rocq_matmul_params reduce = {.y = &t, .w = &site->a, .x = x, .gate = &gate,
                                       .precision = m->options.precision};
    LLAMA__TRY(rocq_matmul(m->ctx, &reduce));
    for (int64_t i = 0, first = 0; i < 3; first += site->b[i++].ne[0]) {
        if (site->b[i].n_dims > 0) m->low[i] = rocq_tensor_slice(&t, 0, first, site->b[i].ne[0]);
    }
    return ROCQ_OK;
}

static void llama__adapt(llama_model *m, const llama_site *site, int i, rocq_matmul_params *p) {
    if (site->b[i].n_dims == 0) return;
    p->lora_b = &site->b[i];
    p->lora_t = &m->low[i];
}

// x += w in + bias; gemma2 norms what is added.
static rocq_result llama__add(llama_model *m, const rocq_tensor *x, const rocq_tensor *w,
                              const llama_site *site, const rocq_tensor *in,
                              const rocq_tensor *bias, const rocq_tensor *norm) {
    const bool direct = norm->n_dims == 0;
    const rocq_tensor added = rocq_tensor_slice(&m->added, 1, 0, direct ? 1 : x->ne[1]);
    rocq_matmul_params project = {.y = direct ? x : &added, .w = w, .x = in,
                                        .bias = llama__maybe(bias), .residual = direct ? x : NULL,
                                        .precision = m->options.precision};
    const rocq_binary_params add = {.y = x, .a = x, .b = &added};
    llama__adapt(m, site, 0, &project);
    LLAMA__TRY(llama__reduce(m, site, in));
    LLAMA__TRY(rocq_matmul(m->ctx, &project));
    if (direct) return ROCQ_OK;
    LLAMA__TRY(llama__norm(m, &added, &added, norm, NULL));
    LLAMA__TRY(rocq_add(m->ctx, &add));
    return ROCQ_OK;
}

// Multiplies the queries of each token by a number that grows with its position.
static rocq_result llama__heat(llama_model *m, const rocq_tensor *q) {
    const int64_t n = q->ne[2], ne[3] = {1, 1, n};
    rocq_tensor by = rocq_tensor_slice(&m->inputs, 0, 1 + 3 * n, n);
    rocq_tensor_init(&by, &by.buffer, by.offset, ROCQ_F32, 3, ne); // cannot fail: there is room
    const rocq_binary_params heat = {.y = q, .a = q, .b = &by};
    LLAMA__TRY(rocq_mul(m->ctx, &heat));
    return ROCQ_OK;
}

// The feed-forward part of a layer: ffn = activation(gate(h)) * up(h), without up in gpt2.
static rocq_result llama__feed(llama_model *m, const llama_layer *l, const llama_site *site,
                               const rocq_tensor *h, const rocq_tensor *ffn) {
    const rocq_tensor *up_weight = llama__maybe(&l->up);
    const bool joined = l->gate.ne[1] > m->n_ff; // up in the same weight
    const bool together = l->up_bias.n_dims == 0; // w2 has no bias: with one they go one by one
    const rocq_tensor pair = rocq_tensor_slice(&m->pair, 1, 0, joined ? h->ne[1] : 1);
    rocq_matmul_params gate = {
        .y = joined ? &pair : ffn, .w = &l->gate, .x = h, .bias = llama__maybe(&l->gate_bias),
        .activation = joined ? ROCQ_ACT_IDENTITY : m->activation,
        .precision = m->options.precision, .w2 = together ? up_weight : NULL};
    rocq_matmul_params up = {
        .y = ffn, .w = up_weight, .x = h, .bias = llama__maybe(&l->up_bias), .gate = ffn,
        .precision = m->options.precision};
    llama__adapt(m, site, 0, &gate);
    llama__adapt(m, site, 1, &up);
    if (together) {
        gate.lora_b2 = up.lora_b;
        gate.lora_t2 = up.lora_t;
    }
    LLAMA__TRY(rocq_matmul(m->ctx, &gate));
    if (joined) {
        const rocq_tensor first = rocq_tensor_slice(&pair, 0, 0, m->n_ff);
        const rocq_tensor second = rocq_tensor_slice(&pair, 0, m->n_ff, m->n_ff);
        const rocq_glu_params glu = {.y = ffn, .gate = &first, .up = &second,
                                     .activation = m->activation};
        LLAMA__TRY(rocq_glu(m->ctx, &glu));
    }
    if (!together) LLAMA__TRY(rocq_matmul(m->ctx, &up));
    return ROCQ_OK;
}

// y = the chosen experts' activation(gate(x)) * up(x), of which the file has both in one weight.
static rocq_result llama__mix_pair(llama_model *m, const llama_layer *l, const rocq_tensor *ids,
                                   const rocq_tensor *x, const rocq_tensor *y) {
    const int64_t n_rows = m->expert_ff, n_slots = ids->ne[0] * ids->ne[1];
    const int64_t three[3] = {2 * n_rows, ids->ne[0], ids->ne[1]}, two[2] = {2 * n_rows, n_slots};
    const int64_t half[2] = {n_rows, n_slots};
    rocq_tensor by_token = m->pair, pair = m->pair, flat = *y; // cannot fail, as in llama__operand
    rocq_tensor_init(&by_token, &m->pair.buffer, m->pair.offset, ROCQ_F32, 3, three);
    rocq_tensor_init(&pair, &m->pair.buffer, m->pair.offset, ROCQ_F32, 2, two);
    rocq_tensor_init(&flat, &y->buffer, y->offset, y->format, 2, half);
    flat.layout = y->layout;
    const rocq_tensor gate = rocq_tensor_slice(&pair, 0, 0, n_rows);
    const rocq_tensor up = rocq_tensor_slice(&pair, 0, n_rows, n_rows);
    const rocq_experts_params both = {.y = &by_token, .w = &l->expert_gate, .x = x, .ids = ids,
                                      .precision = m->options.precision,
                                      .kept = llama__maybe(&l->kept),
                                      .w_kept = llama__maybe(&l->gate_kept)};
    const rocq_glu_params glu = {.y = &flat, .gate = &gate, .up = &up, .activation = m->activation};
    LLAMA__TRY(rocq_experts(m->ctx, &both));
    LLAMA__TRY(rocq_glu(m->ctx, &glu));
    return ROCQ_OK;
}

// What the router's norm multiplies by: router_norm / sqrt(n_embd).
static rocq_tensor llama__router_norm(const llama_model *m, int64_t layer) {
    rocq_tensor norm = rocq_tensor_slice(&m->router_norms, 1, layer, 1);
    norm.n_dims = 1;
    return norm;
}

// x += the weighted sum of the chosen experts' outputs for h, the normed x. The router, which is in
// F32, reads it in F32, so that rounding changes no choice. In gemma4 router and experts have norms
// of their own, and the sum, normed, is left in m->added: see llama__join.
static rocq_result llama__mix(llama_model *m, const llama_layer *l, const rocq_tensor *x,
                              const rocq_tensor *h) {
    const int64_t n = x->ne[1];
    const int64_t one[3] = {m->n_embd, 1, n}, all[3] = {m->expert_ff, m->n_used, n};
    const bool own = l->expert_norm.n_dims > 0, joined = l->expert_up.n_dims == 0;
    const rocq_tensor scores = rocq_tensor_slice(&m->scores, 1, 0, n);
    const rocq_tensor all_ids = rocq_tensor_slice(&m->chosen, 1, 0, n);
    const rocq_tensor ids =
        rocq_tensor_slice(&all_ids, 0, (l - m->layers) * m->n_used, m->n_used);
    const rocq_tensor *kept = llama__maybe(&l->kept);
    const rocq_tensor shares = rocq_tensor_slice(&m->shares, 1, 0, n);
    const rocq_tensor added = rocq_tensor_slice(&m->added, 1, 0, n);
    const rocq_tensor exact = h->format == ROCQ_F32 && !own ? *h : added;
    rocq_tensor in = *h, mixed = *h; // in three dimensions; cannot fail, as in llama__operand
    rocq_tensor_init(&in, &h->buffer, h->offset, h->format, 3, one);
    rocq_tensor_init(&mixed, &m->mixed.buffer, m->mixed.offset, h->format, 3, all);
    in.layout = mixed.layout = h->layout;
    const rocq_tensor opened = rocq_tensor_slice(&m->opened, 1, 0, l->shared.n_dims > 0 ? n : 1);
    const rocq_matmul_params open = {.y = &opened, .w = &l->shared, .x = &exact,
                                     .activation = ROCQ_ACT_SIGMOID,
                                     .precision = m->options.precision};
    const rocq_matmul_params score = {.y = &scores, .w = &l->router, .x = &exact,
                                      .bias = llama__maybe(&l->router_bias),
                                      .precision = m->options.precision,
                                      .next = l->shared.n_dims > 0 ? &open : NULL};
    const rocq_route_params route = {.ids = &ids, .weights = &shares, .logits = &scores,
                                     .bias = llama__maybe(&l->choice_bias),
                                     .expert_scale = llama__maybe(&l->expert_scale),
                                     .scores = m->row->scores, .renormalise = m->row->renormalise,
                                     .scale = m->expert_scale};
    const rocq_experts_params gate = {
        .y = &mixed, .w = &l->expert_gate, .x = &in, .ids = &ids,
        .bias = llama__maybe(&l->expert_gate_bias), .w2 = &l->expert_up,
        .bias2 = llama__maybe(&l->expert_up_bias), .activation = m->activation,
        .limit = m->row->limit, .alpha = m->row->alpha, .precision = m->options.precision,
        .kept = kept, .w_kept = llama__maybe(&l->gate_kept),
        .w2_kept = llama__maybe(&l->up_kept)};
    const rocq_experts_params down = {
        .y = own ? &added : x, .w = &l->expert_down, .x = &mixed, .ids = &ids,
        .bias = llama__maybe(&l->expert_down_bias), .weights = &shares, .residual = own ? NULL : x,
        .precision = m->options.precision, .kept = kept,
        .w_kept = llama__maybe(&l->down_kept)};
    if (own) {
        const rocq_tensor norm = llama__router_norm(m, l - m->layers);
        LLAMA__TRY(llama__norm(m, &exact, x, &norm, NULL));
    } else if (h->format != ROCQ_F32) LLAMA__TRY(llama__norm(m, &exact, x, &l->ffn_norm, NULL));
    LLAMA__TRY(rocq_matmul(m->ctx, &score));
    LLAMA__TRY(rocq_route(m->ctx, &route));
    if (own) LLAMA__TRY(llama__norm(m, h, x, &l->expert_norm, NULL));
    if (joined) LLAMA__TRY(llama__mix_pair(m, l, &ids, &in, &mixed));
    else LLAMA__TRY(rocq_experts(m->ctx, &gate));
    LLAMA__TRY(rocq_experts(m->ctx, &down));
    return own ? llama__norm(m, &added, &added, &l->expert_post_norm, NULL) : ROCQ_OK;
}

// x += the normed sum of what experts gave, which is in m->added, and of the dense part, w in.
static rocq_result llama__join(llama_model *m, const llama_layer *l, const llama_site *site,
                               const rocq_tensor *x, const rocq_tensor *in) {
    const int64_t n = x->ne[1], ne[2] = {m->n_embd, n};
    const rocq_tensor added = rocq_tensor_slice(&m->added, 1, 0, n);
    rocq_tensor dense = m->h; // what is in there has been read; cannot fail, as in llama__operand
    rocq_tensor_init(&dense, &m->h.buffer, m->h.offset, ROCQ_F32, 2, ne);
    rocq_matmul_params project = {.y = &dense, .w = &l->down, .x = in,
                                  .bias = llama__maybe(&l->down_bias),
                                  .precision = m->options.precision};
    const rocq_binary_params both = {.y = &added, .a = &added, .b = &dense};
    const rocq_binary_params add = {.y = x, .a = x, .b = &added};
    llama__adapt(m, site, 0, &project);
    LLAMA__TRY(llama__reduce(m, site, in));
    LLAMA__TRY(rocq_matmul(m->ctx, &project));
    LLAMA__TRY(llama__norm(m, &dense, &dense, &l->dense_post_norm, NULL));
    LLAMA__TRY(rocq_add(m->ctx, &both));
    LLAMA__TRY(llama__norm(m, &added, &added, &l->ffn_post_norm, NULL));
    LLAMA__TRY(rocq_add(m->ctx, &add));
    return ROCQ_OK;
}

// x += what a layer's attention makes of h, the normed x.
static rocq_result llama__attend(llama_model *m, const llama_layer *l, const llama_site *site,
                                 const rocq_tensor *x, const rocq_tensor *h) {
    const int64_t n = x->ne[1];
    const rocq_tensor kv_len = rocq_tensor_slice(&m->inputs, 0, 0, 1);
    const rocq_tensor pos = rocq_tensor_slice(&m->inputs, 0, 1 + n, n);
    const rocq_tensor cells = rocq_tensor_slice(&m->inputs, 0, 1 + 2 * n, n);
    const rocq_kv_view *cache = &l->cache;
    const int64_t n_q = (int64_t)m->n_heads * l->head_dim;
    const int64_t n_kv = (int64_t)l->n_kv_heads * l->head_dim;
    const bool gated = (l->bit & LLAMA__OUT_GATES) != 0; // each head's q has its gate behind it
    const int64_t rows_q = gated ? 2 * n_q : n_q, head = l->head_dim;
    const bool fused = l->q.ne[1] > rows_q;
    const bool keeps = &m->layers[l->source] == l; // keys and values of its own
    const bool same = !fused && l->v.n_dims == 0;  // its values are its keys
    const rocq_tensor all = rocq_tensor_slice(&m->qkv, 1, 0, n); // the first n columns
    const rocq_tensor qkv = rocq_tensor_slice(&all, 0, 0, rows_q + 2 * n_kv);
    const rocq_tensor q = rocq_tensor_slice(&qkv, 0, 0, rows_q);
    const rocq_tensor k = rocq_tensor_slice(&qkv, 0, rows_q, n_kv);
    const rocq_tensor v = rocq_tensor_slice(&qkv, 0, rows_q + n_kv, n_kv);
    const rocq_tensor both = rocq_tensor_heads(&q, gated ? 2 * head : head);
    const rocq_tensor q_heads = rocq_tensor_slice(&both, 0, 0, head);
    const rocq_tensor gates = rocq_tensor_slice(&both, 0, gated ? head : 0, head);
    const rocq_tensor k_heads = rocq_tensor_heads(&k, head);
    const rocq_tensor v_heads = rocq_tensor_heads(&v, head);
    rocq_tensor seen = llama__operand(m, &m->h, n_q, n), seen_heads; // by attention
    if (head % rocq_get_format_info(seen.format)->block_elems != 0) {
        const rocq_tensor plain = rocq_tensor_slice(&m->h, 1, 0, n);
        seen = rocq_tensor_slice(&plain, 0, 0, n_q);
    }
    seen_heads = rocq_tensor_heads(&seen, head);

    rocq_matmul_params to_v = {
        .y = &v, .w = &l->v, .x = h, .bias = llama__maybe(&l->v_bias),
        .precision = m->options.precision};
    rocq_matmul_params to_k = {
        .y = &k, .w = &l->k, .x = h, .bias = llama__maybe(&l->k_bias),
        .precision = m->options.precision, .next = same ? NULL : &to_v};
    rocq_matmul_params to_q = {
        .y = fused ? &qkv : &q, .w = &l->q, .x = h, .bias = llama__maybe(&l->q_bias),
        .precision = m->options.precision, .next = fused || !keeps ? NULL : &to_k};
    const rocq_rope_append_params append = {
        .q = &q_heads, .k = &k_heads, .v = &v_heads, .k_cache = &cache->k_cache,
        .v_cache = &cache->v_cache, .pos = &pos, .cell = &cells, .rope = l->rope};
    const rocq_rope_params turn = {.y = &q_heads, .x = &q_heads, .pos = &pos, .rope = l->rope};
    const rocq_attention_params attend = {
        .out = gated ? &q_heads : &seen_heads, .q = &q_heads, .k = &cache->k, .v = &cache->v,
        .sinks = llama__maybe(&l->sinks), .kv_len = &kv_len,
        .page_table = llama__maybe(&cache->page_table), .page_size = cache->page_size,
        .scale = m->attention_scale, .softcap = m->attention_softcap, .window = l->window,
        .causal = true};
    const rocq_glu_params open = {.y = &seen_heads, .gate = &gates, .up = &q_heads,
                                  .activation = ROCQ_ACT_SIGMOID};
    llama__adapt(m, &site[0], 0, &to_q);
    llama__adapt(m, &site[0], 1, &to_k);
    llama__adapt(m, &site[0], 2, &to_v);
    LLAMA__TRY(rocq_matmul(m->ctx, &to_q));
    if (l->q_norm.n_dims > 0) LLAMA__TRY(llama__norm(m, &q_heads, &q_heads, &l->q_norm, NULL));
    if (m->row->value_norm && keeps) {
        LLAMA__TRY(llama__norm(m, &v_heads, same ? &k_heads : &v_heads, NULL, NULL));
    }
    if (l->k_norm.n_dims > 0 && keeps) {
        LLAMA__TRY(llama__norm(m, &k_heads, &k_heads, &l->k_norm, NULL));
    }
    if (m->temperature > 0) LLAMA__TRY(llama__heat(m, &q_heads));
    LLAMA__TRY(keeps ? rocq_rope_append(m->ctx, &append) : rocq_rope(m->ctx, &turn));
    LLAMA__TRY(rocq_attention(m->ctx, &attend));
    if (gated) LLAMA__TRY(rocq_glu(m->ctx, &open));
    return llama__add(m, x, &l->out, &site[1], &seen, &l->out_bias, &l->attn_post_norm);
}

// x += what a layer's short convolution makes of h.
static rocq_result llama__convolve(llama_model *m, const llama_layer *l, const llama_site *site,
                                   const rocq_tensor *x, const rocq_tensor *h) {
    const int64_t n = x->ne[1];
    const rocq_tensor pos = rocq_tensor_slice(&m->inputs, 0, 1 + 3 * n, 1);
    const rocq_tensor all = rocq_tensor_slice(&m->qkv, 1, 0, n);
    const rocq_tensor bcx = rocq_tensor_slice(&all, 0, 0, 3 * (int64_t)m->n_embd);
    const rocq_tensor seen = llama__operand(m, &m->h, m->n_embd, n);
    rocq_matmul_params project = {.y = &bcx, .w = &l->q, .x = h,
                                  .precision = m->options.precision};
    const rocq_shortconv_params convolve = {.y = &seen, .bcx = &bcx, .w = &l->conv,
                                            .state = &l->state, .pos = &pos};
    llama__adapt(m, &site[0], 0, &project);
    LLAMA__TRY(rocq_matmul(m->ctx, &project));
    LLAMA__TRY(rocq_shortconv(m->ctx, &convolve));
    return llama__add(m, x, &l->out, &site[1], &seen, &l->out_bias, &l->attn_post_norm);
}

// x += what a layer makes of the part of the embeddings that is for it alone, gated by x.
static rocq_result llama__bring(llama_model *m, const llama_layer *l, const rocq_tensor *x) {
    const int64_t n = x->ne[1];
    const rocq_tensor all = rocq_tensor_slice(&m->apart, 1, 0, n);
    const rocq_tensor apart = rocq_tensor_slice(&all, 0, (l - m->layers) * m->n_apart, m->n_apart);
    const rocq_tensor gated = llama__operand(m, &m->ffn, m->n_apart, n);
    const rocq_tensor added = rocq_tensor_slice(&m->added, 1, 0, n);
    const rocq_matmul_params gate = {.y = &gated, .w = &l->apart_gate, .x = x, .gate = &apart,
                                     .activation = m->activation,
                                     .precision = m->options.precision};
    const rocq_matmul_params project = {.y = &added, .w = &l->apart_out, .x = &gated,
                                        .precision = m->options.precision};
    const rocq_norm_params norm = {.y = &added, .x = &added, .weight = &l->apart_norm,
                                   .eps = 2 * m->norm_eps}; // of its x / sqrt(2)
    const rocq_binary_params add = {.y = x, .a = x, .b = &added};
    LLAMA__TRY(rocq_matmul(m->ctx, &gate));
    LLAMA__TRY(rocq_matmul(m->ctx, &project));
    LLAMA__TRY(rocq_rmsnorm(m->ctx, &norm));
    LLAMA__TRY(rocq_add(m->ctx, &add));
    return ROCQ_OK;
}

// x += what a layer's gated delta net makes of h.
static rocq_result llama__recall(llama_model *m, const llama_layer *l, const llama_site *site,
                                 const rocq_tensor *x, const rocq_tensor *h) {
    const int64_t n = x->ne[1], heads = m->delta_heads, values = llama__delta_values(m);
    const int64_t rows = llama__delta_rows(m), keys = (rows - values) / 2;
    const int64_t two[2] = {2, 1}, states[4] = {m->delta_dim, m->delta_dim, heads, 2};
    const rocq_tensor pos = rocq_tensor_slice(&m->inputs, 0, 1 + 3 * n, 1);
    rocq_tensor slot = rocq_tensor_slice(&m->inputs, 0, 2 + 3 * n, 2);
    rocq_tensor state = l->deltas; // in their dimensions; cannot fail, as in llama__operand
    rocq_tensor_init(&slot, &slot.buffer, slot.offset, ROCQ_I32, 2, two);
    rocq_tensor_init(&state, &state.buffer, state.offset, ROCQ_F32, 4, states);
    const rocq_tensor all = rocq_tensor_slice(&m->qkv, 1, 0, n);
    const rocq_tensor qkv = rocq_tensor_slice(&all, 0, 0, rows);
    const rocq_tensor z = rocq_tensor_slice(&all, 0, rows, values);
    const rocq_tensor alpha = rocq_tensor_slice(&all, 0, rows + values, heads);
    const rocq_tensor beta = rocq_tensor_slice(&all, 0, rows + values + heads, heads);
    const rocq_tensor convolved = rocq_tensor_slice(&m->convolved, 1, 0, n);
    const rocq_tensor q = rocq_tensor_slice(&convolved, 0, 0, keys);
    const rocq_tensor k = rocq_tensor_slice(&convolved, 0, keys, keys);
    const rocq_tensor v = rocq_tensor_slice(&convolved, 0, 2 * keys, values); // then y
    const rocq_tensor q_heads = rocq_tensor_heads(&q, m->delta_dim);
    const rocq_tensor k_heads = rocq_tensor_heads(&k, m->delta_dim);
    const rocq_tensor v_heads = rocq_tensor_heads(&v, m->delta_dim);
    const rocq_tensor seen = llama__operand(m, &m->h, values, n);
    const rocq_matmul_params to_beta = {.y = &beta, .w = &l->beta, .x = h,
                                        .precision = m->options.precision};
    const rocq_matmul_params to_alpha = {.y = &alpha, .w = &l->alpha, .x = h,
                                         .precision = m->options.precision, .next = &to_beta};
    rocq_matmul_params to_z = {.y = &z, .w = &l->k, .x = h, .precision = m->options.precision,
                               .next = &to_alpha};
    rocq_matmul_params to_qkv = {.y = &qkv, .w = &l->q, .x = h, .precision = m->options.precision,
                                 .next = &to_z};
    const rocq_shortconv_params convolve = {.y = &convolved, .bcx = &qkv, .w = &l->conv,
                                            .state = &l->state, .pos = &pos,
                                            .activation = ROCQ_ACT_SILU};
    const rocq_delta_net_params recall = {
        .y = &v_heads, .state = &state, .q = &q_heads, .k = &k_heads, .v = &v_heads,
        .alpha = &alpha, .beta = &beta, .a = &l->a, .dt = &l->dt, .slot = &slot,
        .eps = m->norm_eps};
    const rocq_glu_params open = {.y = &seen, .gate = &z, .up = &v, .activation = ROCQ_ACT_SILU};
    llama__adapt(m, &site[0], 0, &to_qkv);
    llama__adapt(m, &site[0], 1, &to_z);
    LLAMA__TRY(rocq_matmul(m->ctx, &to_qkv));
    LLAMA__TRY(rocq_shortconv(m->ctx, &convolve));
    LLAMA__TRY(rocq_delta_net(m->ctx, &recall));
    LLAMA__TRY(llama__norm(m, &v_heads, &v_heads, &l->delta_norm, NULL));
    LLAMA__TRY(rocq_glu(m->ctx, &open));
    return llama__add(m, x, &l->out, &site[1], &seen, &l->out_bias, &l->attn_post_norm);
}

// One layer over the n tokens in x [n_embd, n].
static rocq_result llama__layer(llama_model *m, const llama_layer *l, const rocq_tensor *x) {
    const int64_t n = x->ne[1];
    const llama_site *site = &m->adapters.sites[4 * (l - m->layers)];
    const rocq_tensor h = llama__operand(m, &m->h, m->n_embd, n);
    // A product that reads what it writes, as gate, does so in F32.
    const bool exact = m->n_ff == 0 || l->up_bias.n_dims > 0 || l->shared.n_dims > 0;
    const rocq_tensor ffn = exact ? rocq_tensor_slice(&m->ffn, 1, 0, n)
                                  : llama__operand(m, &m->ffn, l->n_ff, n);
    const rocq_binary_params scale = {.y = x, .a = x, .b = &l->scale};
    LLAMA__TRY(llama__norm(m, &h, x, &l->attn_norm, &l->attn_norm_bias));
    LLAMA__TRY(llama__reduce(m, &site[0], &h));
    if (l->a.n_dims > 0) LLAMA__TRY(llama__recall(m, l, site, x, &h));
    else if (l->conv.n_dims > 0) LLAMA__TRY(llama__convolve(m, l, site, x, &h));
    else LLAMA__TRY(llama__attend(m, l, site, x, &h));

    const bool own = l->expert_norm.n_dims > 0; // experts do not read what the dense part does
    if (own) LLAMA__TRY(llama__mix(m, l, x, &h));
    LLAMA__TRY(llama__norm(m, &h, x, &l->ffn_norm, &l->ffn_norm_bias));
    LLAMA__TRY(llama__reduce(m, &site[2], &h));
    if (l->router.n_dims > 0 && !own) LLAMA__TRY(llama__mix(m, l, x, &h));
    if (l->gate.n_dims == 0) return ROCQ_OK;
    LLAMA__TRY(llama__feed(m, l, &site[2], &h, &ffn));
    if (l->shared.n_dims > 0) { // as much of the shared expert as its gate, of llama__mix, lets in
        const rocq_tensor opened = rocq_tensor_slice(&m->opened, 1, 0, n);
        const rocq_binary_params open = {.y = &ffn, .a = &ffn, .b = &opened};
        LLAMA__TRY(rocq_mul(m->ctx, &open));
    }
    if (own) LLAMA__TRY(llama__join(m, l, &site[3], x, &ffn));
    else LLAMA__TRY(llama__add(m, x, &l->down, &site[3], &ffn, &l->down_bias, &l->ffn_post_norm));
    if (l->apart_gate.n_dims > 0) LLAMA__TRY(llama__bring(m, l, x));
    if (l->scale.n_dims > 0) LLAMA__TRY(rocq_mul(m->ctx, &scale));
    return ROCQ_OK;
}

// What embeddings have for each layer alone: a sum of two, of which one is a row of a table, and
// the other made of x, the embedding that all layers share. Half of its square counts: all that
// reads it is normed, see llama__bring.
static rocq_result llama__set_apart(llama_model *m, const rocq_tensor *x, const rocq_tensor *ids) {
    const int64_t n = x->ne[1];
    const rocq_tensor all = rocq_tensor_slice(&m->apart, 1, 0, n);
    const rocq_tensor rows = rocq_tensor_slice(&m->apart_rows, 1, 0, n);
    const rocq_tensor by_layer = rocq_tensor_heads(&all, m->n_apart);
    const rocq_matmul_params project = {.y = &all, .w = &m->apart_weight, .x = x,
                                        .precision = m->options.precision};
    const rocq_norm_params norm = {.y = &by_layer, .x = &by_layer, .weight = &m->apart_weight_norm,
                                   .eps = m->norm_eps * (float)m->n_embd}; // of x / sqrt(n_embd)
    const rocq_gather_params embed = {.y = &rows, .table = &m->apart_embedding, .ids = ids,
                                      .scale = sqrtf((float)m->n_apart)};
    const rocq_binary_params add = {.y = &all, .a = &all, .b = &rows};
    LLAMA__TRY(rocq_matmul(m->ctx, &project));
    LLAMA__TRY(rocq_rmsnorm(m->ctx, &norm));
    LLAMA__TRY(rocq_gather(m->ctx, &embed));
    LLAMA__TRY(rocq_add(m->ctx, &add));
    return ROCQ_OK;
}

// Tokens 0 .. n of the batch, from their ids to the residual stream after the last layer.
static rocq_result llama__batch(llama_model *m, int64_t n) {
    const rocq_tensor x = rocq_tensor_slice(&m->x, 1, 0, n);
    const rocq_tensor ids = rocq_tensor_slice(&m->inputs, 0, 1, n);
    const rocq_gather_params embed = {.y = &x, .table = &m->embedding, .ids = &ids,
                                      .scale = m->embedding_scale};
    LLAMA__TRY(rocq_gather(m->ctx, &embed));
    if (m->positions.n_dims > 0) {
        const rocq_tensor pos = rocq_tensor_slice(&m->inputs, 0, 1 + n, n);
        const rocq_tensor added = rocq_tensor_slice(&m->added, 1, 0, n);
        const rocq_gather_params place = {.y = &added, .table = &m->positions, .ids = &pos};
        const rocq_binary_params add = {.y = &x, .a = &x, .b = &added};
        LLAMA__TRY(rocq_gather(m->ctx, &place));
        LLAMA__TRY(rocq_add(m->ctx, &add));
    }
    if (m->n_apart > 0) LLAMA__TRY(llama__set_apart(m, &x, &ids));
    for (int32_t i = 0; i < m->n_layers; i++) LLAMA__TRY(llama__layer(m, &m->layers[i], &x));
    return ROCQ_OK;
}

// Logits of n <= n_logits tokens of the batch, from number first on.
static rocq_result llama__head(llama_model *m, int64_t first, int64_t n) {
    const rocq_tensor x = rocq_tensor_slice(&m->x, 1, first, n);
    const rocq_tensor h = llama__operand(m, &m->h, m->n_embd, n);
    const rocq_tensor logits = rocq_tensor_slice(&m->logits, 1, 0, n);
    const rocq_tensor *norm = m->logit_scale != 1 ? &m->head_norm : &m->output_norm;
    const llama_site *site = &m->adapters.sites[4 * m->n_layers];
    rocq_matmul_params project = {.y = &logits, .w = &m->output, .x = &h,
                                  .bias = llama__maybe(&m->output_bias),
                                  .softcap = m->final_softcap, .precision = m->options.precision};
    llama__adapt(m, site, 0, &project);
    LLAMA__TRY(llama__norm(m, &h, &x, norm, &m->output_norm_bias));
    LLAMA__TRY(llama__reduce(m, site, &h));
    LLAMA__TRY(rocq_matmul(m->ctx, &project));
    m->last = rocq_tensor_slice(&m->logits, 1, n - 1, 1);
    return ROCQ_OK;
}

// All that the newest token takes: what m->step records.
static rocq_result llama__one(llama_model *m) {
    LLAMA__TRY(llama__batch(m, 1));
    return llama__head(m, 0, 1);
}

// Each draw has a number of its own, so it is no part of the recorded step.
static rocq_result llama__draw(llama_model *m, const rocq_sample_params *how) {
    rocq_sample_params sample = *how;
    sample.token = &m->token;
    sample.logits = &m->last;
    sample.step = (uint64_t)m->n_past;
    if (!sample.allowed) sample.allowed = llama__maybe(&m->allowed);
    LLAMA__TRY(rocq_sample(m->ctx, &sample));
    return ROCQ_OK;
}

static rocq_result llama__record(llama_model *m, const rocq_sample_params *how) { // NULL: no draw
    LLAMA__TRY(rocq_graph_begin(m->ctx));
    rocq_result result = llama__one(m);
    if (result == ROCQ_OK && how) result = llama__draw(m, how);
    const rocq_result ended = rocq_graph_end(m->ctx, &m->step);
    memset(&m->last, 0, sizeof m->last); // nothing has run yet
    if (result == ROCQ_OK) result = ended;
    if (result != ROCQ_OK) rocq_graph_destroy(m->ctx, &m->step); // it is not whole
    return result;
}

// ---------------------------------------------------------------------------------------------
// Memory
// ---------------------------------------------------------------------------------------------

static int64_t llama__most(int64_t a, int64_t b) { return a > b ? a : b; }

// Cuts the activations from an arena: first from a measuring one, then from memory.
static rocq_result llama__cut(llama_model *m, rocq_arena *arena) {
    const bool gated = (m->row->bit & LLAMA__OUT_GATES) != 0;
    const int64_t n = m->n_batch, values = llama__delta_values(m), rows = llama__delta_rows(m);
    int64_t n_q = 0, n_qkv = m->row->deltas ? rows + values + 2 * (int64_t)m->delta_heads
                             : m->n_convs > 0 ? 3 * (int64_t)m->n_embd : 0;
    bool joins = false, norms = false; // gate and up of experts; the router's norm
    for (int32_t i = 0; i < m->n_layers; i++) {
        const llama_layer *l = &m->layers[i];
        joins = joins || l->expert_gate.ne[1] > m->expert_ff;
        norms = norms || l->router_norm.n_dims > 0;
        const int64_t n_all = ((gated ? 2 : 1) * (int64_t)m->n_heads + 2 * l->n_kv_heads) *
                              l->head_dim;
        n_qkv = llama__most(n_qkv, n_all);
        n_q = llama__most(n_q, (int64_t)m->n_heads * l->head_dim);
    }
    LLAMA__TRY(rocq_tensor_1d(arena, &m->inputs, ROCQ_I32, 4 + 4 * n));
    LLAMA__TRY(rocq_tensor_1d(arena, &m->token, ROCQ_I32, 1));
    LLAMA__TRY(rocq_tensor_2d(arena, &m->x, ROCQ_F32, m->n_embd, n));
    LLAMA__TRY(rocq_tensor_2d(arena, &m->h, ROCQ_F32,
                              llama__most(m->n_embd, llama__most(n_q, values)), n));
    LLAMA__TRY(rocq_tensor_2d(arena, &m->qkv, ROCQ_F32, n_qkv, n));
    LLAMA__TRY(rocq_tensor_2d(arena, &m->convolved, ROCQ_F32, llama__most(rows, 1), n));
    LLAMA__TRY(rocq_tensor_2d(arena, &m->opened, ROCQ_F32, 1, n));
    const int64_t n_ffn = llama__most(m->n_ff, m->n_apart);
    LLAMA__TRY(rocq_tensor_2d(arena, &m->ffn, ROCQ_F32, llama__most(n_ffn, 1), n));
    const int64_t n_apart = m->n_apart > 0 ? (int64_t)m->n_apart * m->n_layers : 1;
    LLAMA__TRY(rocq_tensor_2d(arena, &m->apart, ROCQ_F32, n_apart, m->n_apart > 0 ? n : 1));
    LLAMA__TRY(rocq_tensor_2d(arena, &m->apart_rows, ROCQ_F32, n_apart, m->n_apart > 0 ? n : 1));
    const bool mixture = m->n_experts > 1;
    const int64_t n_used = mixture ? m->n_used : 1;
    LLAMA__TRY(rocq_tensor_2d(arena, &m->scores, ROCQ_F32, m->n_experts, n));
    LLAMA__TRY(rocq_tensor_2d(arena, &m->chosen, ROCQ_I32, n_used * m->n_layers, n));
    LLAMA__TRY(rocq_tensor_2d(arena, &m->shares, ROCQ_F32, n_used, n));
    LLAMA__TRY(rocq_tensor_3d(arena, &m->mixed, ROCQ_F32, mixture ? m->expert_ff : 1, n_used, n));
    const int64_t pair = m->layers[0].gate.ne[1] > m->n_ff ? 2 * (int64_t)m->n_ff
                         : joins ? 2 * (int64_t)m->expert_ff * n_used : 1;
    LLAMA__TRY(rocq_tensor_2d(arena, &m->pair, ROCQ_F32, pair, pair > 1 ? n : 1));
    LLAMA__TRY(rocq_tensor_1d(arena, &m->head_norm, ROCQ_F32, m->n_embd));
    LLAMA__TRY(rocq_tensor_2d(arena, &m->router_norms, ROCQ_F32, m->n_embd,
                              norms ? m->n_layers : 1));
    const bool adds = m->layers[0].attn_post_norm.n_dims > 0 || m->positions.n_dims > 0 || mixture;
    LLAMA__TRY(rocq_tensor_2d(arena, &m->added, ROCQ_F32, m->n_embd, adds ? n : 1));
    for (int32_t i = 0; i < m->n_layers; i++) {
        const int64_t delta = m->delta_dim;
        llama_layer *l = &m->layers[i];
        if (l->conv.n_dims == 0) continue;
        LLAMA__TRY(rocq_tensor_2d(arena, &l->state, ROCQ_F32, l->conv.ne[1],
                                  m->n_taps - 1 + LLAMA_BACK));
        LLAMA__TRY(rocq_tensor_2d(arena, &l->spare, ROCQ_F32, l->conv.ne[1], m->n_taps - 1));
        if (l->a.n_dims == 0) continue;
        LLAMA__TRY(rocq_tensor_3d(arena, &l->deltas, ROCQ_F32, delta, delta, 2 * m->delta_heads));
    }
    if (m->suppressed.count > 0) {
        LLAMA__TRY(rocq_tensor_1d(arena, &m->allowed, ROCQ_I32, ((int64_t)m->n_vocab + 31) / 32));
    }
    return rocq_tensor_2d(arena, &m->logits, ROCQ_F32, m->n_vocab, m->n_logits);
}

// Uploads the mask of the tokens that may be drawn. As in llama.cpp, numbers of no token are none.
static rocq_result llama__suppress(llama_model *m) {
    const int64_t n = m->allowed.ne[0];
    uint32_t *mask;
    if (m->suppressed.count == 0) return ROCQ_OK;
    LLAMA__TRY(llama__allocate(m, &mask, (size_t)n * sizeof *mask));
    memset(mask, 0xff, (size_t)n * sizeof *mask);
    for (int64_t i = 0, token; i < m->suppressed.count; i++) {
        if (rocq_gguf_value_i64(&m->suppressed, i, &token) != ROCQ_OK) continue;
        if (token >= 0 && token < m->n_vocab) mask[token / 32] &= ~(1u << token % 32);
    }
    rocq_result result = rocq_upload(m->ctx, &m->allowed, mask, rocq_tensor_size(&m->allowed));
    if (result == ROCQ_OK) result = rocq_sync(m->ctx);
    llama__free(m, mask, (size_t)n * sizeof *mask);
    return result;
}

static size_t llama__staged_size(const llama_model *m) {
    return (4 + 4 * (size_t)m->n_batch) * sizeof(int32_t);
}

// Which cache has a layer's keys and values: where heads differ, layers with a window have another.
static int llama__cache_of(const llama_model *m, const llama_layer *l) {
    if (l->conv.n_dims > 0) return -1;
    return m->row->mixed && l->window > 0;
}

static rocq_result llama__make_kv(llama_model *m, int k, rocq_format format) {
    rocq_kv_desc desc = {.k_format = format, .v_format = format, .n_ctx = m->n_ctx,
                         .page_size = m->options.kv_page};
    int64_t bytes;
    for (int32_t i = 0; i < m->n_layers; i++) {
        const llama_layer *l = &m->layers[i];
        if (llama__cache_of(m, l) != k || l->source != i) continue;
        desc.n_layers++;
        desc.n_kv_heads = l->n_kv_heads;
        desc.head_dim = l->head_dim;
        desc.rope = l->rope;
    }
    if (desc.n_layers == 0) return ROCQ_OK;
    LLAMA__TRY(rocq_kv_create(m->ctx, &m->kv[k], &desc));
    LLAMA__TRY(rocq_kv_size(&desc, &bytes));
    m->kv_bytes += bytes;
    for (int32_t i = 0, n = 0; i < m->n_layers; i++) {
        llama_layer *l = &m->layers[i];
        if (llama__cache_of(m, l) != k) continue;
        if (l->source == i) LLAMA__TRY(rocq_kv_layer(m->kv[k], n++, 0, 1, &l->cache));
        else l->cache = m->layers[l->source].cache;
    }
    return ROCQ_OK;
}

static rocq_result llama__make_cache(llama_model *m) {
    const char *name = m->options.kv_format ? m->options.kv_format : "f16";
    rocq_format format;
    if (rocq_format_from_name(&format, name) != ROCQ_OK ||
        (format != ROCQ_F16 && format != ROCQ_F32 && format != ROCQ_BF16 && format != ROCQ_Q8_0 &&
         format != ROCQ_Q4_0)) {
        return llama__fail(m, ROCQ_E_FORMAT, "the KV cache's format is %s, expected f16, f32, "
                           "bf16, q8_0 or q4_0", name);
    }
    for (int k = 0; k < 2; k++) LLAMA__TRY(llama__make_kv(m, k, format));
    return ROCQ_OK;
}

// The ops of batches and heads of n tokens, for every n up to 16, then in larger steps: few columns
// may take another way than many.
static rocq_result llama__measure_all(llama_model *m) {
    const rocq_sample_params how = {.temperature = 1, .top_k = 40, .top_p = 0.9f, .min_p = 0.1f};
    for (int64_t n = m->n_batch; n > 0; n -= n > 16 ? n / 4 : 1) LLAMA__TRY(llama__batch(m, n));
    for (int64_t n = m->n_logits; n > 0; n -= n > 16 ? n / 4 : 1) LLAMA__TRY(llama__head(m, 0, n));
    return llama__draw(m, &how);
}

// Reserves the scratch memory of ops, which the code that runs them later plans, and records the
// step.
static rocq_result llama__plan(llama_model *m) {
    const int64_t had = m->op_scratch;
    LLAMA__TRY(rocq_plan_begin(m->ctx, &m->op_scratch));
    const rocq_result result = llama__measure_all(m);
    rocq_plan_end(m->ctx);
    memset(&m->last, 0, sizeof m->last);
    LLAMA__TRY(result);
    LLAMA__TRY(rocq_reserve(m->ctx, m->op_scratch));
    m->scratch_bytes += m->op_scratch - had;
    return llama__info(m).desc.no_graphs ? ROCQ_OK : llama__record(m, NULL);
}

// Everything that llama_eval and llama_sample use, so that they allocate nothing.
static rocq_result llama__make_memory(llama_model *m) {
    rocq_arena arena;
    LLAMA__TRY(llama__make_cache(m));
    rocq_arena_init(&arena, NULL);
    const rocq_result measured = llama__cut(m, &arena);
    if (measured != ROCQ_OK) {
        return llama__fail(m, measured, "activations of %d tokens: %s", (int)m->n_batch,
                           rocq_result_message(measured));
    }
    m->scratch_bytes = arena.peak;
    LLAMA__TRY(rocq_buffer_alloc(m->ctx, &m->memory, arena.peak));
    rocq_arena_init(&arena, &m->memory);
    LLAMA__TRY(llama__cut(m, &arena));
    LLAMA__TRY(llama__allocate(m, &m->staged, llama__staged_size(m)));
    LLAMA__TRY(llama__suppress(m));
    if (m->logit_scale != 1) { // the last norm does it on the way
        const rocq_scale_params scale = {.y = &m->head_norm, .x = &m->output_norm,
                                         .scale = m->logit_scale};
        LLAMA__TRY(rocq_scale(m->ctx, &scale));
    }
    for (int32_t i = 0; i < m->n_layers; i++) {
        const rocq_tensor *norm = &m->layers[i].router_norm;
        if (norm->n_dims == 0) continue;
        const rocq_tensor to = llama__router_norm(m, i);
        const rocq_scale_params scale = {.y = &to, .x = norm,
                                         .scale = 1 / sqrtf((float)m->n_embd)};
        LLAMA__TRY(rocq_scale(m->ctx, &scale));
    }
    return llama__plan(m);
}

// ---------------------------------------------------------------------------------------------
// Adapters
// ---------------------------------------------------------------------------------------------

static int64_t llama__n_sites(const llama_model *m) { return 4 * (int64_t)m->n_layers + 1; }

static size_t llama__sites_size(const llama_model *m) {
    return (size_t)llama__n_sites(m) * sizeof(llama_site);
}

static void llama__free_adapters(llama_model *m, llama_adapters *adapters) {
    rocq_buffer_free(m->ctx, &adapters->memory);
    if (adapters->sites) llama__free(m, adapters->sites, llama__sites_size(m));
    memset(adapters, 0, sizeof *adapters);
}

// Weight i of site k, and its name; NULL where there is none.
static const rocq_tensor *llama__site_weight(const llama_model *m, int64_t k, int i,
                                             char name[64]) {
    static const struct {
        size_t at[3];
        int n;
    } sites[4] = {
        {{offsetof(llama_layer, q), offsetof(llama_layer, k), offsetof(llama_layer, v)}, 3},
        {{offsetof(llama_layer, out), 0, 0}, 1},
        {{offsetof(llama_layer, gate), offsetof(llama_layer, up), 0}, 2},
        {{offsetof(llama_layer, down), 0, 0}, 1}};
    snprintf(name, 64, "output.weight");
    if (k == llama__n_sites(m) - 1) { // a tied one has no name of its own
        return i == 0 && memcmp(&m->output, &m->embedding, sizeof m->output) != 0 ? &m->output
                                                                                  : NULL;
    }
    for (int w = 0; i < sites[k % 4].n && w < LLAMA__N_WEIGHTS; w++) {
        const llama__weight *of = &llama__weights[w];
        if (of->at != sites[k % 4].at[i] || !(of->families & m->layers[k / 4].bit)) continue;
        snprintf(name, 64, "blk.%d.%s", (int)(k / 4), of->name);
        return (const rocq_tensor *)(const void *)((const char *)&m->layers[k / 4] + of->at);
    }
    return NULL;
}

// What goes on while adapters are read.
typedef struct llama__loras {
    const llama_lora *list;
    llama_adapters now; // being made
    const char *name;          // of the adapter that is looked at
    int64_t n_pairs[LLAMA_LORAS];
    int64_t most;              // largest R
    rocq_arena *arena;
    bool fills;                // else only measures
} llama__loras;

// Host memory in which a tensor is put together.
typedef struct llama__workspace {
    void *bytes; // of a tensor of a file, then of the result
    float *values, *stack;
    size_t n_bytes, n_values;
} llama__workspace;

// Encodes the stack and copies it to its tensor.
static rocq_result llama__put(llama_model *m, llama__workspace *b, const rocq_tensor *to) {
    LLAMA__TRY(rocq_quantize(to->format, b->bytes, b->stack, to->ne[1], to->ne[0], NULL));
    LLAMA__TRY(rocq_upload(m->ctx, to, b->bytes, rocq_tensor_size(to)));
    return rocq_sync(m->ctx); // the memory is used again
}

static rocq_result llama__fill_site(llama_model *m, llama__loras *q, const llama_site *s,
                                    lora_pair (*pairs)[LLAMA_LORAS], llama__workspace *b) {
    int64_t done = 0; // ranks of A
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < q->now.n; j++) {
            const lora_pair *pair = &pairs[i][j];
            if (pair->rank == 0) continue;
            LLAMA__TRY(lora_read(m->ctx, q->list[j].file, &pair->a, b->bytes,
                                 b->stack + done * s->a.ne[0]));
            done += pair->rank;
        }
    }
    LLAMA__TRY(llama__put(m, b, &s->a));
    for (int i = 0; i < 3; i++) {
        int64_t first = 0;
        for (int j = 0; j < q->now.n; j++) {
            const lora_pair *pair = &pairs[i][j];
            const size_t row = (size_t)pair->rank * sizeof(float);
            if (pair->rank == 0) continue;
            LLAMA__TRY(lora_read(m->ctx, q->list[j].file, &pair->b, b->bytes, b->values));
            for (int64_t r = 0; r < pair->b.ne[1]; r++) {
                memcpy(b->stack + r * s->b[i].ne[0] + first, b->values + r * pair->rank, row);
            }
            first += pair->rank;
        }
        if (first > 0) LLAMA__TRY(llama__put(m, b, &s->b[i]));
    }
    return ROCQ_OK;
}

// Finds the adapters of a site, cuts its tensors from the arena and fills them. They are in F32
// where the weights are, else in F16, but A is in Q8_0 where a GPU's norms write x in Q8_0 too.
static rocq_result llama__make_site(llama_model *m, llama__loras *q, int64_t k) {
    llama_site *s = &q->now.sites[k];
    lora_pair pairs[3][LLAMA_LORAS];
    llama__workspace work = {NULL, NULL, NULL, 0, 0};
    int64_t all = 0, in = 0, n_ranks[3] = {0, 0, 0}, out[3] = {0, 0, 0};
    rocq_format format_a = ROCQ_F32, format_b = ROCQ_F32;
    memset(pairs, 0, sizeof pairs);
    memset(s, 0, sizeof *s);
    for (int i = 0; i < 3; i++) {
        char name[64];
        const rocq_tensor *w = llama__site_weight(m, k, i, name);
        for (int j = 0; w && j < q->now.n; j++) {
            lora_pair *pair = &pairs[i][j];
            q->name = q->list[j].name;
            LLAMA__TRY(lora_find(q->list[j].file, name, w->ne[0], w->ne[1], pair, m->error));
            if (pair->rank == 0) continue;
            s->rank[i][j] = (int32_t)pair->rank;
            s->unit[i][j] = pair->scale;
            q->n_pairs[j]++;
            n_ranks[i] += pair->rank;
            if (n_ranks[i] > 512) {
                return llama__fail(m, ROCQ_E_UNSUPPORTED, "the ranks for %s add up to %.0f, "
                                   "expected at most 512", name, (double)n_ranks[i]);
            }
            in = w->ne[0];
            out[i] = w->ne[1];
            const size_t a = (size_t)pair->a.size, b = (size_t)pair->b.size;
            const size_t values = (size_t)(pair->rank * (in > out[i] ? in : out[i]));
            if (work.n_bytes < (a > b ? a : b)) work.n_bytes = a > b ? a : b;
            if (work.n_values < values) work.n_values = values;
            if (w->format == ROCQ_F32) continue;
            format_a = m->few == ROCQ_Q8_0 && in % 32 == 0 ? ROCQ_Q8_0 : ROCQ_F16;
            format_b = ROCQ_F16;
        }
        all += n_ranks[i];
    }
    q->name = NULL;
    if (all == 0) return ROCQ_OK;
    if (all > q->most) q->most = all;
    LLAMA__TRY(rocq_tensor_2d(q->arena, &s->a, format_a, in, all));
    if (format_a == ROCQ_Q8_0 && llama__info(m).backend == ROCQ_BACKEND_GPU) {
        s->a.layout = ROCQ_LAYOUT_PLANAR;
    }
    LLAMA__TRY(rocq_tensor_1d(q->arena, &s->gate, ROCQ_F32, all));
    size_t n_stack = (size_t)(in * all);
    for (int i = 0; i < 3; i++) {
        if (n_ranks[i] == 0) continue;
        LLAMA__TRY(rocq_tensor_2d(q->arena, &s->b[i], format_b, n_ranks[i], out[i]));
        if (n_stack < (size_t)(n_ranks[i] * out[i])) n_stack = (size_t)(n_ranks[i] * out[i]);
    }
    if (!q->fills) return ROCQ_OK;
    const size_t bytes = work.n_bytes > 4 * n_stack ? work.n_bytes : 4 * n_stack;
    const size_t room = (bytes + 63) / 64 * 64 + (work.n_values + n_stack) * sizeof(float);
    LLAMA__TRY(llama__allocate(m, &work.bytes, room));
    work.values = (float *)(void *)((char *)work.bytes + (bytes + 63) / 64 * 64);
    work.stack = work.values + work.n_values;
    const rocq_result result = llama__fill_site(m, q, s, pairs, &work);
    llama__free(m, work.bytes, room);
    return result;
}

static rocq_result llama__make_sites(llama_model *m, llama__loras *q) {
    for (int64_t k = 0; k < llama__n_sites(m); k++) LLAMA__TRY(llama__make_site(m, q, k));
    return q->most > 0 ? rocq_tensor_2d(q->arena, &q->now.low, ROCQ_F32, q->most, m->n_batch)
                       : ROCQ_OK;
}

static rocq_result llama__make_adapters(llama_model *m, llama__loras *q) {
    const rocq_str family = {m->family, (int64_t)strlen(m->family)};
    rocq_arena arena;
    for (int32_t j = 0; j < q->now.n; j++) {
        q->name = q->list[j].name;
        if (!q->list[j].file || !(q->list[j].scale > -1e30f && q->list[j].scale < 1e30f)) {
            return llama__fail(m, ROCQ_E_ARGUMENT, "there is no file, or the scale is %g",
                               (double)q->list[j].scale);
        }
        q->now.scale[j] = q->list[j].scale;
        LLAMA__TRY(lora_check(q->list[j].file, family, m->error));
    }
    LLAMA__TRY(llama__allocate(m, &q->now.sites, llama__sites_size(m)));
    rocq_arena_init(&arena, NULL);
    q->arena = &arena;
    LLAMA__TRY(llama__make_sites(m, q));
    for (int32_t j = 0; j < q->now.n; j++) {
        const int64_t n = rocq_gguf_tensor_count(q->list[j].file);
        q->name = q->list[j].name;
        if (n == 2 * q->n_pairs[j] && n > 0) continue;
        return llama__fail(m, ROCQ_E_UNSUPPORTED, "is no adapter for this model: of its %.0f "
                           "tensors %.0f are for weights that can have one", (double)n,
                           2 * (double)q->n_pairs[j]);
    }
    q->name = NULL;
    if (q->most == 0) return ROCQ_OK;
    LLAMA__TRY(rocq_buffer_alloc(m->ctx, &q->now.memory, arena.peak));
    rocq_arena_init(&arena, &q->now.memory);
    q->fills = true;
    return llama__make_sites(m, q);
}

static rocq_result llama__upload_gates(llama_model *m) {
    for (int64_t k = 0; k < llama__n_sites(m); k++) {
        const llama_site *s = &m->adapters.sites[k];
        float gate[3 * 512];
        int64_t n = 0;
        for (int i = 0; i < 3; i++) {
            for (int j = 0; j < m->adapters.n; j++) {
                const float scale = m->adapters.scale[j] * s->unit[i][j];
                for (int32_t r = 0; r < s->rank[i][j]; r++) gate[n++] = scale;
            }
        }
        if (n > 0) LLAMA__TRY(rocq_upload(m->ctx, &s->gate, gate, n * (int64_t)sizeof *gate));
    }
    return ROCQ_OK;
}

static rocq_result llama__set_loras(llama_model *m, llama__loras *q) {
    if (!m->ctx) return llama__fail(m, ROCQ_E_STATE, "the model is not open");
    if (q->now.n < 0 || q->now.n > LLAMA_LORAS || (q->now.n > 0 && !q->list)) {
        return llama__fail(m, ROCQ_E_ARGUMENT, "%d adapters; there can be 0 to %d", (int)q->now.n,
                           (int)LLAMA_LORAS);
    }
    rocq_result result = llama__make_adapters(m, q);
    if (result == ROCQ_OK) result = rocq_sync(m->ctx);
    if (result == ROCQ_OK) {
        const llama_adapters had = m->adapters;
        const rocq_tensor last = m->last;
        const int64_t scratch = m->scratch_bytes, op_scratch = m->op_scratch;
        rocq_graph *step = m->step;
        m->step = NULL;
        m->adapters = q->now;
        q->now = had;
        m->begun = 0;
        result = llama__upload_gates(m);
        if (result == ROCQ_OK) result = llama__plan(m);
        if (result != ROCQ_OK) { // back to what was there
            q->now = m->adapters;
            m->adapters = had;
            m->last = last;
            m->scratch_bytes = scratch;
            m->op_scratch = op_scratch;
            rocq_graph *const failed = m->step;
            m->step = step;
            step = failed;
        }
        rocq_graph_destroy(m->ctx, &step);
    }
    llama__free_adapters(m, &q->now);
    return result;
}

static inline rocq_result llama_set_loras(llama_model *m, const llama_lora *loras, int32_t n) {
    llama__loras q;
    memset(&q, 0, sizeof q);
    q.list = loras;
    q.now.n = n;
    m->error[0] = '\0';
    const rocq_result result = llama__done(m, llama__set_loras(m, &q));
    if (result != ROCQ_OK && q.name) {
        char why[sizeof m->error];
        memcpy(why, m->error, sizeof why);
        snprintf(m->error, sizeof m->error, "%.200s: %.300s", q.name, why);
        rocq_message_clean(m->error, sizeof m->error);
    }
    return result;
}

static inline rocq_result llama_scale_lora(llama_model *m, int32_t i, float scale) {
    m->error[0] = '\0';
    if (!m->ctx || i < 0 || i >= m->adapters.n || !(scale > -1e30f && scale < 1e30f)) {
        return llama__fail(m, ROCQ_E_ARGUMENT, "there is no adapter %d, or the scale is %g", (int)i,
                           (double)scale);
    }
    const float had = m->adapters.scale[i];
    m->begun = 0; // the first layers of a token would have the old scale, the others the new one
    m->adapters.scale[i] = scale;
    const rocq_result result = llama__done(m, llama__upload_gates(m));
    if (result != ROCQ_OK) m->adapters.scale[i] = had;
    return result;
}

// ---------------------------------------------------------------------------------------------
// Bodies of the interface
// ---------------------------------------------------------------------------------------------

static rocq_result llama__check_share(llama_model *m) {
    const llama_model *from = m->options.share;
    if (!from) return ROCQ_OK;
    if (!from->ctx) return llama__fail(m, ROCQ_E_STATE, "the model to share with is not open");
    if (from->embedding.buffer.size == 0) { // train_options.take_weights
        return llama__fail(m, ROCQ_E_STATE, "the weights of the model to share with are gone");
    }
    if (from->ctx == m->ctx && from->file == m->file) return ROCQ_OK;
    return llama__fail(m, ROCQ_E_ARGUMENT, "the model to share with is of another %s",
                       from->ctx == m->ctx ? "file" : "context");
}

static rocq_result llama__open(llama_model *m, const rocq_gguf *file) {
    LLAMA__TRY(llama__check_share(m));
    m->few = rocq_operand_format(m->ctx, ROCQ_Q8_0, 1, m->options.precision);
    m->many = rocq_operand_format(m->ctx, ROCQ_Q8_0, LLAMA__FEW + 1, m->options.precision);
    LLAMA__TRY(llama__read_config(m, file));
    LLAMA__TRY(llama__allocate(m, &m->layers, (size_t)m->n_layers * sizeof(llama_layer)));
    LLAMA__TRY(llama__allocate(m, &m->adapters.sites, llama__sites_size(m)));
    LLAMA__TRY(llama__read_numbers(m, file));
    m->n_ctx = m->n_ctx_train < 4096 ? m->n_ctx_train : 4096;
    if (m->options.n_ctx > 0) m->n_ctx = m->options.n_ctx;
    if (m->row->bit == LLAMA__GPT2 && m->n_ctx > m->n_ctx_train) {
        return llama__fail(m, ROCQ_E_BOUNDS, "a context of %d, expected at most the %d "
                           "positions that the model has learned", (int)m->n_ctx,
                           (int)m->n_ctx_train);
    }
    m->n_batch = m->options.n_batch > 0 ? m->options.n_batch : 128;
    if (m->n_batch > m->n_ctx) m->n_batch = m->n_ctx;
    m->n_logits = m->options.n_logits > 0 ? m->options.n_logits : 1;
    if (m->n_logits > m->n_batch) m->n_logits = m->n_batch;
    LLAMA__TRY(llama__load_all(m, file));
    if (m->output.n_dims == 0) m->output = m->embedding; // tied
    llama__operands_of(m, m->output.format);
    return llama__make_memory(m);
}

static inline rocq_result llama_open(llama_model *m, rocq_ctx *ctx, const rocq_gguf *file,
                                     const llama_options *options) {
    char error[sizeof m->error];
    if (options && options->share == m) { // which stays as it is
        return llama__fail(m, ROCQ_E_ARGUMENT, "a model cannot share with itself");
    }
    memset(m, 0, sizeof *m);
    if (!ctx || !file) return llama__fail(m, ROCQ_E_ARGUMENT, "there is no context or no file");
    m->ctx = ctx;
    m->file = file;
    if (options) m->options = *options;
    const rocq_result result = llama__done(m, llama__open(m, file));
    if (result != ROCQ_OK) {
        memcpy(error, m->error, sizeof error);
        llama_close(m);
        memcpy(m->error, error, sizeof error);
    }
    return result;
}

static inline void llama_close(llama_model *m) {
    if (m->ctx) rocq_graph_destroy(m->ctx, &m->step);
    for (int k = 0; k < 2; k++) rocq_kv_destroy(&m->kv[k]);
    if (m->ctx) {
        rocq_buffer_free(m->ctx, &m->memory);
        llama__free(m, m->staged, llama__staged_size(m));
        llama__free(m, m->places, llama__places_size(m));
        rocq_buffer_free(m->ctx, &m->slots);
        if (m->n_users && --*m->n_users == 0) {
            rocq_buffer_free(m->ctx, &m->experts);
            rocq_buffer_free(m->ctx, &m->weights);
            llama__free(m, m->n_users, sizeof *m->n_users);
        }
        llama__free(m, m->layers, (size_t)m->n_layers * sizeof(llama_layer));
        llama__free_adapters(m, &m->adapters);
    }
    memset(m, 0, sizeof *m);
}

// Copies what convolutions read next, of the taps - 1 newest tokens, to the spare states or back.
static rocq_result llama__copy_convs(llama_model *m, bool back) {
    const int32_t end = m->n_past + m->moved, begin = end - (m->n_taps - 1);
    for (int32_t i = 0; i < m->n_layers; i++) {
        const llama_layer *l = &m->layers[i];
        for (int32_t p = begin; l->conv.n_dims > 0 && p < end; p++) {
            if (p < 0) continue;
            const rocq_tensor state = rocq_tensor_slice(&l->state, 1, p % l->state.ne[1], 1);
            const rocq_tensor spare = rocq_tensor_slice(&l->spare, 1, p - begin, 1);
            const rocq_cast_params copy = {.y = back ? &state : &spare,
                                           .x = back ? &spare : &state};
            LLAMA__TRY(rocq_cast(m->ctx, &copy));
        }
    }
    return ROCQ_OK;
}

// What makes it possible to run the batch again. It comes behind whatever can refuse the batch, as
// from here on convolutions can go back no further than the batch allows.
static rocq_result llama__begin_convs(llama_model *m, int32_t n) {
    if (m->n_past > 0 && m->spared == m->n_past) {
        LLAMA__TRY(llama__copy_convs(m, true));
    } else if (m->n_past > 0 && n > LLAMA_BACK) {
        m->spared = 0;
        LLAMA__TRY(llama__copy_convs(m, false));
        m->spared = m->n_past;
    }
    if (m->conv_end < m->n_past + n) m->conv_end = m->n_past + n;
    if (m->conv_first < m->conv_end - LLAMA_BACK) m->conv_first = m->conv_end - LLAMA_BACK;
    return ROCQ_OK;
}

// n more tokens for convolutions, whose states have the newest LLAMA_BACK tokens and the taps - 1
// before them, so that they can go on from any of these; and from none.
static rocq_result llama__enter_convs(llama_model *m, int32_t n) {
    if (m->n_past == 0) m->moved = m->spared = m->kept[0] = m->kept[1] = 0;
    if (m->spared == m->n_past) m->conv_first = m->conv_end = m->n_past;
    if (m->row->deltas) {
        const int from = m->kept[0] == m->n_past ? 0 : 1, to = m->n_past > 0 ? 1 - from : 0;
        if (m->n_past != m->kept[from] || m->n_past < m->conv_first) {
            return llama__fail(m, ROCQ_E_UNSUPPORTED, "n_past is %d: a %s model can go on from %d, "
                               "from where a last batch of up to %d began, or from 0",
                               (int)m->n_past, m->family, (int)m->conv_end, (int)LLAMA_BACK);
        }
        m->staged[2 + 3 * n] = m->n_past > 0 ? from : -1;
        m->staged[3 + 3 * n] = to;
        m->kept[to] = 0; // until the batch is done: llama__advance
    }
    if (m->n_past < m->conv_first || m->n_past > m->conv_end) {
        return llama__fail(m, ROCQ_E_UNSUPPORTED, "n_past is %d: a %s model can go on from %d to "
                           "%d, or from 0", (int)m->n_past, m->family, (int)m->conv_first,
                           (int)m->conv_end);
    }
    m->staged[1 + 3 * n] = m->n_past + m->moved;
    return ROCQ_OK;
}

// Uploads the tokens, positions and cells of a batch. The length goes with them, so that only a
// table of pages needs another upload.
static rocq_result llama__enter(llama_model *m, const int32_t *tokens, int32_t n) {
    const int32_t kv_len = m->n_past + n;
    const bool heated = m->temperature > 0;
    const int32_t extra = heated ? n : m->row->deltas ? 3 : m->n_convs > 0 ? 1 : 0;
    const rocq_tensor inputs = rocq_tensor_slice(&m->inputs, 0, 0, 1 + 3 * n + extra);
    LLAMA__TRY(llama__count_experts(m));
    m->staged[0] = kv_len;
    for (int32_t i = 0; i < n; i++) {
        m->staged[1 + i] = tokens[i];
        m->staged[1 + n + i] = m->n_past + i;
        if (heated) {
            const int32_t passed = (m->n_past + i) / m->rope.n_ctx_orig;
            const float by = 1 + m->temperature * logf(1 + (float)passed);
            memcpy(&m->staged[1 + 3 * n + i], &by, sizeof by);
        }
        if (tokens[i] < 0 || tokens[i] >= m->n_vocab) {
            return llama__fail(m, ROCQ_E_BOUNDS, "token %d is not one of %d", (int)tokens[i],
                               (int)m->n_vocab);
        }
    }
    if (m->n_convs > 0) LLAMA__TRY(llama__enter_convs(m, n));
    for (int k = 0; k < 2; k++) { // both give the same cells
        if (!m->kv[k]) continue;
        LLAMA__TRY(rocq_kv_truncate(m->kv[k], 0, m->n_past)); // lowered, or a call failed since
        LLAMA__TRY(rocq_kv_append(m->kv[k], 0, n, m->staged + 1 + 2 * n));
        if (m->options.kv_page > 0) LLAMA__TRY(rocq_kv_flush(m->kv[k]));
    }
    if (m->n_convs > 0) LLAMA__TRY(llama__begin_convs(m, n));
    return rocq_upload(m->ctx, &inputs, m->staged, rocq_tensor_size(&inputs));
}

// n tokens have gone through all layers.
static void llama__advance(llama_model *m, int32_t n) {
    const int to = m->kept[0] == m->n_past && m->n_past > 0 ? 1 : 0; // as llama__enter_convs
    m->n_past += n;
    m->spared = 0;
    m->uncounted = n;
    if (m->row->deltas) m->kept[to] = m->n_past;
}

// One batch through the layers; with head also the last logits.
static rocq_result llama__eval_batch(llama_model *m, const int32_t *tokens, int32_t n, bool head) {
    LLAMA__TRY(llama__enter(m, tokens, n));
    if (m->step && n == 1 && head) {
        LLAMA__TRY(rocq_graph_launch(m->ctx, m->step));
        m->last = rocq_tensor_slice(&m->logits, 1, 0, 1);
    } else {
        LLAMA__TRY(llama__batch(m, n));
        if (head) LLAMA__TRY(llama__head(m, n - 1, 1));
    }
    llama__advance(m, n);
    return ROCQ_OK;
}

static rocq_result llama__check_tokens(llama_model *m, const int32_t *tokens, int64_t n) {
    if (!m->ctx) return llama__fail(m, ROCQ_E_STATE, "the model is not open");
    if (!tokens) return llama__fail(m, ROCQ_E_ARGUMENT, "tokens is NULL");
    if (n < 1 || m->n_past < 0) {
        return llama__fail(m, ROCQ_E_ARGUMENT, "n is %.0f, expected 1 or more; n_past is %d, "
                           "expected 0 or more", (double)n, (int)m->n_past);
    }
    if (n > m->n_ctx - m->n_past) {
        return llama__fail(m, ROCQ_E_BOUNDS, "%.0f more tokens do not fit a context of %d with %d",
                           (double)n, (int)m->n_ctx, (int)m->n_past);
    }
    return ROCQ_OK;
}

static rocq_result llama__eval(llama_model *m, const int32_t *tokens, int64_t n, float *logits) {
    LLAMA__TRY(llama__check_tokens(m, tokens, n));
    m->begun = 0;
    for (int64_t done = 0; done < n;) {
        const int32_t step = (int32_t)(n - done < m->n_batch ? n - done : m->n_batch);
        if (n > 1) LLAMA__TRY(llama__progress(m, "reading", done, n));
        LLAMA__TRY(llama__eval_batch(m, tokens + done, step, !logits && done + step == n));
        for (int32_t i = 0; logits && i < step;) {
            const int32_t part = step - i < m->n_logits ? step - i : m->n_logits;
            const rocq_tensor from = rocq_tensor_slice(&m->logits, 1, 0, part);
            float *to = logits + (done + i) * m->n_vocab;
            LLAMA__TRY(llama__head(m, i, part));
            LLAMA__TRY(rocq_download(m->ctx, to, &from, rocq_tensor_size(&from)));
            i += part;
        }
        done += step;
    }
    return n > 1 ? llama__progress(m, "reading", n, n) : ROCQ_OK;
}

static inline rocq_result llama_eval(llama_model *m, const int32_t *tokens, int64_t n,
                                     float *logits) {
    m->error[0] = '\0';
    const rocq_result result = llama__done(m, llama__eval(m, tokens, n, logits));
    if (result != ROCQ_OK) memset(&m->last, 0, sizeof m->last); // nothing to draw from
    return result;
}

// A GPU loads all kernels, since which of them a prompt takes depends on its length. Where no step
// is recorded, one with a draw is recorded for this call, as the CPU rehearses its ops. The CPU
// also touches the activations of a prompt, and runs a step if there are no tokens yet: code and
// data of a step as a whole are then in its caches, where ops alone leave the first step 1.2 to 1.5
// times as long as later ones. With a budget of experts it does not: the step would count as a use.
static rocq_result llama__warm(llama_model *m) {
    static const rocq_sample_params usual = {.temperature = 0.8f, .top_k = 40, .top_p = 0.95f};
    const bool recorded = m->step != NULL, gpu = llama__info(m).backend == ROCQ_BACKEND_GPU;
    const bool begun = m->n_past != 0 || m->begun != 0 || m->last.n_dims > 0;
    const int32_t token = 0;
    volatile char *const memory = (volatile char *)m->memory.host;
    if (!m->ctx) return llama__fail(m, ROCQ_E_STATE, "the model is not open");
    if (gpu) LLAMA__TRY(rocq_warm(m->ctx, NULL));
    if (!recorded) LLAMA__TRY(llama__record(m, &usual));
    rocq_result result = rocq_warm(m->ctx, m->step);
    if (!recorded) rocq_graph_destroy(m->ctx, &m->step);
    for (int64_t i = 0; !gpu && i < m->memory.size; i += 4096) memory[i] = memory[i]; // a page each
    if (result == ROCQ_OK && recorded && !gpu && !begun && !m->counts) {
        result = llama__eval_batch(m, &token, 1, true);
        // A draw may fail, as token 0 may be one that gives no numbers.
        if (result == ROCQ_OK && llama__draw(m, &usual) == ROCQ_E_CANCELLED) {
            result = ROCQ_E_CANCELLED;
        }
        m->n_past = 0;
    }
    return result;
}

static inline rocq_result llama_warm(llama_model *m) {
    const rocq_tensor last = m->last; // recording and a step change it
    m->error[0] = '\0';
    const rocq_result result = llama__done(m, llama__warm(m));
    m->last = last;
    return result;
}

static rocq_result llama__eval_for(llama_model *m, const int32_t *tokens, int64_t n, int32_t us,
                                   int64_t *done) {
    const int64_t start = rocq_time_ns();
    if (us < 0 || !done) {
        return llama__fail(m, ROCQ_E_ARGUMENT, "us is %d, expected 0 or more, or done is NULL",
                           (int)us);
    }
    if (*done < 0 || *done >= n) {
        return llama__fail(m, ROCQ_E_ARGUMENT, "*done is %.0f, expected 0 or more and less than n, "
                           "%.0f", (double)*done, (double)n);
    }
    LLAMA__TRY(llama__check_tokens(m, tokens, n - *done));
    if (!m->step) return llama__fail(m, ROCQ_E_STATE, "without graphs there are no slices");
    for (int64_t left = us; *done < n;) {
        const int32_t token = tokens[*done];
        bool through = m->begun != token + 1 || m->begun_past != m->n_past;
        if (through) { // nothing of it has been done
            m->begun = 0;
            LLAMA__TRY(llama__enter(m, &token, 1));
            m->begun = token + 1;
            m->begun_past = m->n_past;
        }
        const rocq_result result = rocq_graph_launch_for(m->ctx, m->step, (int32_t)left, &through);
        if (result != ROCQ_OK || through) m->begun = 0;
        if (result != ROCQ_OK || !through) return result;
        m->last = rocq_tensor_slice(&m->logits, 1, 0, 1);
        llama__advance(m, 1);
        ++*done;
        left = us - (rocq_time_ns() - start) / 1000;
        if (left <= 0) break;
    }
    return ROCQ_OK;
}

static inline rocq_result llama_eval_for(llama_model *m, const int32_t *tokens, int64_t n,
                                         int32_t us, int64_t *done) {
    m->error[0] = '\0';
    const rocq_result result = llama__done(m, llama__eval_for(m, tokens, n, us, done));
    if (result != ROCQ_OK || *done < n) memset(&m->last, 0, sizeof m->last);
    return result;
}

static rocq_result llama__forget(llama_model *m, int32_t first, int32_t n) {
    if (!m->ctx) return llama__fail(m, ROCQ_E_STATE, "the model is not open");
    m->begun = 0;
    if (m->positions.n_dims > 0) {
        return llama__fail(m, ROCQ_E_UNSUPPORTED, "tokens of a %s model cannot move up", m->family);
    }
    if (m->row->deltas) {
        return llama__fail(m, ROCQ_E_UNSUPPORTED, "tokens of a %s model cannot move up: its states "
                           "hold all of them", m->family);
    }
    for (int32_t i = 0; i < m->n_layers; i++) { // rocq_kv_shift turns all keys alike
        const rocq_rope_config *rope = &m->layers[i].rope;
        if (rope->pairing == m->rope.pairing && rope->freq_base == m->rope.freq_base &&
            rope->freq_scale == m->rope.freq_scale && !m->kv[1]) continue;
        return llama__fail(m, ROCQ_E_UNSUPPORTED, "tokens of a %s model cannot move up: its layers "
                           "turn keys in different ways", m->family);
    }
    const int32_t last = m->n_past - (m->n_taps > 0 ? m->n_taps - 1 : 0); // that may be forgotten
    if (m->n_convs > 0 && n > 0 && first >= 0 && first <= m->n_past && first + n > last &&
        first + n <= m->n_past) {
        return llama__fail(m, ROCQ_E_UNSUPPORTED, "convolutions of a %s model still read the "
                           "newest %d tokens", m->family, (int)m->n_taps - 1);
    }
    LLAMA__TRY(rocq_kv_truncate(m->kv[0], 0, m->n_past));
    LLAMA__TRY(rocq_kv_shift(m->kv[0], 0, first, n));
    m->n_past -= n;
    m->moved += n;
    if (m->spared > 0) m->spared -= n;
    m->conv_end -= n;
    m->conv_first -= n;
    if (m->conv_first < first + m->n_taps - 1) m->conv_first = first + m->n_taps - 1;
    return ROCQ_OK;
}

static inline rocq_result llama_forget(llama_model *m, int32_t first, int32_t n) {
    m->error[0] = '\0';
    return llama__done(m, llama__forget(m, first, n));
}

static inline rocq_result llama_get_expert_stats(llama_model *m, int32_t layer,
                                                 llama_expert_stats *stats) {
    llama_expert_stats all = {0, 0, 0, 0, 0, 0};
    m->error[0] = '\0';
    if (!m->ctx || !stats || layer < -1 || layer >= m->n_layers) {
        return llama__fail(m, ROCQ_E_ARGUMENT, "stats is NULL, or there is no layer %d",
                           (int)layer);
    }
    const rocq_result result = llama__done(m, llama__count_experts(m));
    if (result != ROCQ_OK) return result;
    for (int32_t i = layer < 0 ? 0 : layer; i < m->n_layers && (layer < 0 || i == layer); i++) {
        llama_layer *l = &m->layers[i];
        const int32_t n_kept = m->counts ? l->n_kept : m->n_experts;
        const rocq_tensor *w[3];
        rocq_tensor *kept[3];
        if (l->router.n_dims == 0) continue;
        for (int k = llama__expert_weights(l, w, kept); k-- > 0;) {
            all.bytes += rocq_tensor_size(w[k]);
            all.kept_bytes += rocq_tensor_size(w[k]) / m->n_experts * n_kept;
        }
        all.n_experts += m->n_experts;
        all.n_kept += n_kept;
        all.n_uses += l->n_uses;
        all.n_hits += l->n_hits;
    }
    *stats = all;
    return ROCQ_OK;
}

static rocq_result llama__sample(llama_model *m, const rocq_sample_params *how, int32_t *token) {
    if (m->last.n_dims == 0) {
        return llama__fail(m, ROCQ_E_STATE, "there are no logits to draw from: llama_eval, or "
                           "llama_eval_for until all is done, comes first");
    }
    if (!how || !token) return llama__fail(m, ROCQ_E_ARGUMENT, "how or token is NULL");
    LLAMA__TRY(llama__draw(m, how));
    return rocq_download(m->ctx, token, &m->token, (int64_t)sizeof *token);
}

static inline rocq_result llama_sample(llama_model *m, const rocq_sample_params *how,
                                       int32_t *token) {
    m->error[0] = '\0';
    return llama__done(m, llama__sample(m, how, token));
}

static rocq_result llama__tune(llama_model *m, rocq_tune_result *result) {
    const int32_t half = m->n_ctx > 1 ? m->n_ctx / 2 : 1;
    const size_t size = (size_t)half * sizeof(int32_t);
    const bool recorded = m->step != NULL;
    int32_t *tokens; // any will do: zeros
    if (!m->ctx) return llama__fail(m, ROCQ_E_STATE, "the model is not open");
    if (llama__info(m).backend != ROCQ_BACKEND_GPU) {
        return llama__fail(m, ROCQ_E_UNSUPPORTED, "there is nothing to tune on the CPU");
    }
    LLAMA__TRY(llama__allocate(m, &tokens, size));
    m->n_past = 0;
    rocq_result r = llama__eval(m, tokens, half, NULL);
    llama__free(m, tokens, size);
    if (r == ROCQ_OK && !recorded) r = llama__record(m, NULL);
    if (r == ROCQ_OK) r = rocq_tune_graph(m->ctx, m->step, NULL, result);
    if (!recorded) rocq_graph_destroy(m->ctx, &m->step);
    m->n_past = m->uncounted = 0;
    memset(&m->last, 0, sizeof m->last);
    return r;
}

static inline rocq_result llama_tune(llama_model *m, rocq_tune_result *result) {
    m->error[0] = '\0';
    return llama__done(m, llama__tune(m, result));
}

#undef LLAMA__TRY

#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#endif // LLAMA_H
