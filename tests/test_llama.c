// Whole models: examples/llama.h against llama.cpp. Random-weight models of every family, in every
// kind of format, are written by models.h and read by both; logits must agree at every position of
// a prompt and of a generated run, and so must every token of that run.

#define _POSIX_C_SOURCE 200809L // setenv, mkdir

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include "../examples/llama.h"

#include "cancelling.h"
#include "counted.h"
#include "llama_cpp.h"
#include "models.h"

#include "expert_memory.h"
#include "sharing.h"

enum { N_PROMPT = 61, N_GREEDY = 12, N_CTX = 128 };

#define DEMO "examples/model/rocq-demo.gguf"

static const rocq_format f32[] = {ROCQ_F32, ROCQ_I32}, f16[] = {ROCQ_F16, ROCQ_I32},
    q8_0[] = {ROCQ_Q8_0, ROCQ_I32}, q4_0[] = {ROCQ_Q4_0, ROCQ_I32}, q6_K[] = {ROCQ_Q6_K, ROCQ_I32},
    // embedding and ffn_down in Q6_K, attn_v too, the rest in Q4_K
    q4_K[] = {ROCQ_Q6_K, ROCQ_Q4_K, ROCQ_Q4_K, ROCQ_Q6_K, ROCQ_Q4_K, ROCQ_Q4_K, ROCQ_Q4_K,
              ROCQ_I32},
    mxfp4[] = {ROCQ_Q8_0, ROCQ_Q8_0, ROCQ_Q8_0, ROCQ_Q8_0, ROCQ_Q8_0, ROCQ_MXFP4, ROCQ_MXFP4,
               ROCQ_MXFP4,
               ROCQ_Q8_0, ROCQ_Q8_0, ROCQ_Q8_0, ROCQ_Q8_0, ROCQ_MXFP4, ROCQ_MXFP4, ROCQ_MXFP4,
               ROCQ_Q8_0, ROCQ_Q8_0, ROCQ_Q8_0, ROCQ_Q8_0, ROCQ_MXFP4, ROCQ_MXFP4, ROCQ_MXFP4,
               ROCQ_Q8_0, ROCQ_I32},
    only_read[] = {ROCQ_IQ2_XXS, ROCQ_IQ2_XS, ROCQ_IQ2_S, ROCQ_IQ3_XXS, ROCQ_IQ3_S, ROCQ_IQ1_S,
                   ROCQ_IQ1_M, ROCQ_TQ1_0, ROCQ_TQ2_0, ROCQ_NVFP4, ROCQ_I32},
    others[] = {ROCQ_Q5_K, ROCQ_Q2_K, ROCQ_Q3_K, ROCQ_Q5_0, ROCQ_IQ4_NL, ROCQ_IQ4_XS, ROCQ_MXFP4,
                ROCQ_Q4_1, ROCQ_Q5_1, ROCQ_BF16, ROCQ_F16, ROCQ_I32};

#define SIZES(embd, heads, kv_heads, dim, ff, vocab)                                            \
    .n_embd = embd, .n_heads = heads, .n_kv_heads = kv_heads, .head_dim = dim, .n_ff = ff,      \
    .n_vocab = vocab
// Keys of one family each.
static void granite_keys(rocq_gguf_writer *w) {
    model_set_f32(w, "granite", "embedding_scale", 2);
    model_set_f32(w, "granite", "residual_scale", 0.6f);
    model_set_f32(w, "granite", "attention.scale", 0.2f);
    model_set_f32(w, "granite", "logit_scale", 1.7f);
}

static void granite_still(rocq_gguf_writer *w) { // no residual scale, and nothing turns
    model_set_f32(w, "granite", "logit_scale", 0.7f);
    assert_int_equal(rocq_gguf_writer_set_bool(w, "granite.rope.scaling.finetuned", false),
                     ROCQ_OK);
}

static void mistral3_keys(rocq_gguf_writer *w) {
    model_set_f32(w, "mistral3", "attention.temperature_scale", 0.3f);
    model_set_f32(w, "mistral3", "rope.scaling.yarn_log_multiplier", 1);
    model_set_f32(w, "mistral3", "rope.scaling.yarn_beta_fast", 8);
    model_set_f32(w, "mistral3", "rope.scaling.yarn_beta_slow", 2);
}

// Layers with a window turn in their own way.
static void gemma3_local(rocq_gguf_writer *w) {
    model_set_f32(w, "gemma3", "rope.freq_base_swa", 500);
}

static void gemma2_local(rocq_gguf_writer *w) {
    model_set_f32(w, "gemma2", "rope.freq_base_swa", 500);
}

static void oss_local(rocq_gguf_writer *w) {
    model_set_f32(w, "gpt-oss", "rope.freq_base_swa", 500);
}

static void granitemoe_keys(rocq_gguf_writer *w) {
    model_set_f32(w, "granitemoe", "embedding_scale", 2);
    model_set_f32(w, "granitemoe", "residual_scale", 0.6f);
    model_set_f32(w, "granitemoe", "attention.scale", 0.2f);
    model_set_f32(w, "granitemoe", "logit_scale", 1.7f);
}

#define OSS .n_layers = 3, .window = 16, .rope_base = 150000, .rope_scaling = "yarn",              \
    .rope_factor = 4, .n_ctx_orig = 32
#define LFM2(layers, taps) .n_layers = layers, .attends = 3, .n_taps = taps
#define QWEN35(layers, every, groups, heads, dim)                                                 \
    .n_layers = layers, .attends = every, .n_taps = 4, .delta_groups = groups,                     \
    .delta_heads = heads, .delta_dim = dim, .n_rot = 16, .rope_base = 1e6f
#define GEMMA3 .n_layers = 7, .tied = true, .window = 16, .rope_base = 1e6f
#define GEMMA4(layers, every, dim) .n_layers = layers, .globals = every, .local_dim = dim,         \
    .tied = true, .window = 16, .rope_base = 1e6f
#define YARN3 .rope_base = 1e6f, .rope_scaling = "yarn", .rope_factor = 4, .n_ctx_orig = 16,       \
    .edit = mistral3_keys
#define GEMMA .n_layers = 3, .tied = true, .window = 16, .attention_cap = 1, .final_cap = 30

static const model_spec specs[] = {
    {"llama-F32", "llama", SIZES(256, 4, 4, 64, 256, 517), .formats = f32},
    {"llama-F16", "llama", SIZES(256, 8, 4, 32, 320, 771), .formats = f16, .tied = true},
    {"llama-Q8_0", "llama", SIZES(224, 7, 1, 32, 320, 301), .formats = q8_0},
    {"llama-Q4_0", "llama", SIZES(256, 8, 2, 32, 256, 513), .formats = q4_0, .tied = true},
    {"llama-Q4_K", "llama", SIZES(256, 8, 4, 64, 512, 1021), .formats = q4_K},
    {"llama-Q6_K", "llama", SIZES(256, 7, 1, 64, 256, 601), .formats = q6_K, .tied = true},
    {"llama-others", "llama", SIZES(256, 8, 2, 32, 512, 555), .formats = others},
    {"llama-read", "llama", SIZES(256, 8, 2, 32, 512, 555), .formats = only_read, .n_layers = 3},
    {"qwen3-read", "qwen3", SIZES(256, 4, 2, 64, 512, 401), .formats = only_read + 3, .tied = true},
    {"llama-factors", "llama", SIZES(256, 4, 2, 64, 256, 517), .formats = f32,
     .rope_base = 5e5f, .rope_freqs = true},
    {"llama-linear", "llama", SIZES(256, 4, 2, 64, 256, 517), .formats = f32,
     .rope_scaling = "linear", .rope_factor = 4},
    {"llama-yarn", "llama", SIZES(256, 4, 2, 64, 256, 517), .formats = f32,
     .rope_scaling = "yarn", .rope_factor = 4, .n_ctx_orig = 32},
    {"llama-yarn-Q8_0", "llama", SIZES(256, 2, 1, 128, 256, 517), .formats = q8_0,
     .rope_base = 1e6f, .rope_scaling = "yarn", .rope_factor = 8, .n_ctx_orig = 64,
     .rope_attention = 0.9f},
    {"llama-unscaled", "llama", SIZES(256, 4, 2, 64, 256, 517), .formats = f32,
     .rope_scaling = "none", .rope_factor = 4},
    {"llama-biases", "llama", SIZES(256, 4, 2, 64, 256, 517), .formats = f32, .biases = true},

    {"mistral-F32", "llama", SIZES(256, 8, 2, 64, 256, 769), .formats = f32, .rope_base = 1e6f},
    {"mistral-F16", "llama", SIZES(256, 8, 2, 64, 256, 769), .formats = f16, .rope_base = 1e6f},
    {"mistral-Q8_0", "llama", SIZES(256, 8, 2, 64, 288, 769), .formats = q8_0, .rope_base = 1e6f},
    {"mistral-Q4_0", "llama", SIZES(256, 8, 2, 64, 288, 769), .formats = q4_0, .rope_base = 1e6f},
    {"mistral-Q4_K", "llama", SIZES(256, 4, 1, 64, 512, 769), .formats = q4_K, .rope_base = 1e6f},
    {"mistral-Q6_K", "llama", SIZES(256, 8, 2, 64, 256, 769), .formats = q6_K, .rope_base = 1e6f},

    {"qwen2-F32", "qwen2", SIZES(224, 7, 1, 32, 320, 533), .formats = f32, .rope_base = 1e6f},
    {"qwen2-F16", "qwen2", SIZES(256, 4, 4, 64, 256, 401), .formats = f16, .tied = true},
    {"qwen2-Q8_0", "qwen2", SIZES(448, 14, 2, 32, 352, 707), .formats = q8_0, .tied = true},
    {"qwen2-Q4_0", "qwen2", SIZES(256, 8, 4, 32, 256, 909), .formats = q4_0, .rope_base = 1e6f},
    {"qwen2-Q4_K", "qwen2", SIZES(256, 4, 1, 64, 512, 611), .formats = q4_K, .rope_base = 1e6f},
    {"qwen2-Q6_K", "qwen2", SIZES(448, 14, 2, 32, 256, 499), .formats = q6_K, .tied = true},

    {"qwen2-no-biases", "qwen2", SIZES(256, 4, 2, 64, 256, 517), .formats = f32, .no_biases = true},

    {"qwen3-F32", "qwen3", SIZES(256, 4, 2, 128, 320, 533), .formats = f32, .rope_base = 1e6f},
    {"qwen3-F16", "qwen3", SIZES(256, 4, 4, 64, 256, 401), .formats = f16, .tied = true},
    {"qwen3-Q8_0", "qwen3", SIZES(256, 7, 1, 64, 352, 707), .formats = q8_0, .tied = true},
    {"qwen3-Q4_0", "qwen3", SIZES(256, 8, 2, 64, 256, 909), .formats = q4_0, .rope_base = 1e6f},
    {"qwen3-Q4_K", "qwen3", SIZES(256, 4, 2, 128, 512, 611), .formats = q4_K, .tied = true},
    {"qwen3-Q6_K", "qwen3", SIZES(256, 8, 2, 128, 256, 499), .formats = q6_K, .rope_base = 1e6f},

    {"gemma2-F32", "gemma2", SIZES(256, 4, 2, 64, 256, 517), .formats = f32, GEMMA},
    {"gemma2-local", "gemma2", SIZES(192, 4, 2, 64, 224, 333), .formats = f32, GEMMA,
     .edit = gemma2_local},
    {"gemma2-F16", "gemma2", SIZES(256, 4, 4, 64, 320, 733), .formats = f16, GEMMA},
    {"gemma2-Q8_0", "gemma2", SIZES(256, 8, 2, 64, 320, 419), .formats = q8_0, GEMMA},
    {"gemma2-Q4_0", "gemma2", SIZES(256, 4, 2, 32, 256, 517), .formats = q4_0, GEMMA},
    {"gemma2-Q4_K", "gemma2", SIZES(256, 8, 4, 64, 256, 651), .formats = q4_K, GEMMA},
    {"gemma2-Q6_K", "gemma2", SIZES(256, 7, 1, 64, 256, 517), .formats = q6_K, GEMMA},
    // The 27B model is known by its 46 layers and scales scores differently.
    {"gemma2-46-layers", "gemma2", SIZES(64, 2, 1, 64, 64, 301), .formats = f32, .n_layers = 46,
     .tied = true, .window = 16, .attention_cap = 1, .final_cap = 30},

    {"gemma3-F32", "gemma3", SIZES(256, 4, 2, 64, 256, 517), .formats = f32, GEMMA3},
    {"gemma3-linear", "gemma3", SIZES(128, 4, 2, 32, 192, 301), .formats = f32, GEMMA3,
     .final_cap = 20, .rope_scaling = "linear", .rope_factor = 8, .edit = gemma3_local},
    {"gemma3-Q4_0", "gemma3", SIZES(320, 5, 1, 64, 288, 301), .formats = q4_0, GEMMA3},
    {"gemma3-Q4_K", "gemma3", SIZES(256, 2, 1, 128, 256, 333), .formats = q4_K, GEMMA3},

    // Without the key llama.cpp caps logits at 30.
    {"gemma4-F32", "gemma4", SIZES(256, 4, 2, 64, 256, 517), .formats = f32, GEMMA4(9, 3, 32),
     .final_cap = 20, .n_shared_kv = 3, .n_apart = 48, .n_ff_shared = 416},
    {"gemma4-large", "gemma4", SIZES(192, 6, 3, 64, 224, 333), .formats = f32, GEMMA4(6, 3, 32),
     .global_kv_heads = 2, .keys_as_values = true},
    {"gemma4-512", "gemma4", SIZES(256, 2, 1, 512, 256, 301), .formats = f32, GEMMA4(4, 2, 256),
     .n_shared_kv = 2, .n_apart = 64},
    {"gemma4-Q8_0", "gemma4", SIZES(224, 7, 1, 64, 320, 301), .formats = q8_0, GEMMA4(4, 2, 32),
     .n_shared_kv = 2, .n_apart = 64},
    {"gemma4-Q4_K", "gemma4", SIZES(512, 8, 2, 64, 512, 333), .formats = q4_K, GEMMA4(3, 2, 32),
     .n_shared_kv = 1, .n_apart = 64},

    {"gemma4moe-F32", "gemma4", SIZES(256, 4, 2, 64, 96, 517), .formats = f32, GEMMA4(6, 3, 32),
     .global_kv_heads = 1, .keys_as_values = true, .n_experts = 12, .n_used = 4, .n_shared = 160,
     .joined = true},
    {"gemma4moe-split", "gemma4", SIZES(192, 6, 3, 64, 160, 333), .formats = f32, GEMMA4(4, 2, 32),
     .n_shared_kv = 2, .n_apart = 48, .n_experts = 5, .n_used = 2, .n_shared = 224},
    {"gemma4moe-Q8_0", "gemma4", SIZES(224, 7, 1, 64, 160, 301), .formats = q8_0, GEMMA4(4, 2, 32),
     .n_experts = 4, .n_used = 4, .n_shared = 96, .joined = true},
    {"gemma4moe-Q4_K", "gemma4", SIZES(512, 8, 2, 64, 256, 333), .formats = q4_K, GEMMA4(2, 2, 32),
     .n_experts = 3, .n_used = 3, .n_shared = 512, .joined = true},

    {"granite-F32", "granite", SIZES(256, 4, 2, 64, 256, 517), .formats = f32,
     .edit = granite_keys},
    {"granite-still", "granite", SIZES(192, 6, 2, 32, 224, 333), .formats = f32, .tied = true,
     .edit = granite_still},
    {"granite-Q8_0", "granite", SIZES(224, 7, 1, 32, 320, 301), .formats = q8_0,
     .edit = granite_keys},
    {"granite-Q4_K", "granite", SIZES(256, 8, 4, 64, 512, 611), .formats = q4_K, .tied = true,
     .edit = granite_keys},

    {"smollm3-F32", "smollm3", SIZES(256, 4, 2, 64, 256, 517), .formats = f32, .n_layers = 5},
    {"smollm3-Q8_0", "smollm3", SIZES(224, 7, 1, 32, 320, 301), .formats = q8_0, .n_layers = 4,
     .tied = true},
    {"smollm3-Q4_K", "smollm3", SIZES(256, 4, 1, 64, 256, 333), .formats = q4_K, .n_layers = 4},

    {"mistral3-F32", "mistral3", SIZES(256, 4, 2, 64, 256, 517), .formats = f32, YARN3},
    {"mistral3-plain", "mistral3", SIZES(192, 6, 2, 32, 224, 333), .formats = f32, .tied = true},
    {"mistral3-Q8_0", "mistral3", SIZES(224, 7, 1, 32, 320, 301), .formats = q8_0, YARN3},
    {"mistral3-Q4_K", "mistral3", SIZES(256, 2, 1, 128, 256, 333), .formats = q4_K, YARN3},

    // By the name "phi3" llama.cpp would want other tokens than these vocabularies have.
    {"phi-F32", "phi3", SIZES(256, 4, 4, 64, 256, 517), .formats = f32},
    {"phi-long", "phi3", SIZES(192, 6, 2, 32, 224, 333), .formats = f32, .n_rot = 24,
     .rope_factors = true, .n_ctx_orig = 32, .rope_scaling = "longrope", .rope_factor = 1,
     .rope_attention = 1.2f, .tied = true},
    {"phi-short", "phi3", SIZES(192, 6, 2, 32, 224, 333), .formats = f32, .n_rot = 16,
     .rope_factors = true, .n_ctx_orig = 512},
    {"phi-Q8_0", "phi3", SIZES(224, 7, 7, 32, 320, 301), .formats = q8_0, .n_rot = 24},
    {"phi-Q4_K", "phi3", SIZES(256, 4, 2, 64, 256, 333), .formats = q4_K, .tied = true},

    // Where a router finds two experts about equal, rounding decides which is taken, and no
    // tolerance is for that. So where weights are rounded some mixtures take all their experts, and
    // others have sizes with which the programs agree in all these tokens.
    {"mixtral-F32", "llama", SIZES(256, 4, 2, 64, 192, 517), .formats = f32, .n_experts = 5,
     .n_used = 2},
    {"mixtral-Q4_K", "llama", SIZES(256, 4, 1, 64, 256, 333), .formats = q4_K, .n_experts = 3,
     .n_used = 3},

    {"qwen3moe-F32", "qwen3moe", SIZES(256, 4, 2, 64, 96, 517), .formats = f32, .n_experts = 16,
     .n_used = 4},
    {"qwen3moe-F16", "qwen3moe", SIZES(192, 6, 1, 64, 160, 401), .formats = f16, .n_experts = 4,
     .n_used = 4, .tied = true},
    {"qwen3moe-Q8_0", "qwen3moe", SIZES(224, 7, 1, 32, 160, 301), .formats = q8_0, .n_experts = 33,
     .n_used = 8},
    {"qwen3moe-Q4_K", "qwen3moe", SIZES(256, 8, 2, 32, 256, 333), .formats = q4_K, .n_experts = 12,
     .n_used = 8},

    {"gpt-oss-F32", "gpt-oss", SIZES(256, 4, 2, 64, 192, 517), .formats = f32, .n_experts = 8,
     .n_used = 4, OSS},
    {"gpt-oss-local", "gpt-oss", SIZES(192, 4, 2, 32, 96, 333), .formats = f32, .n_experts = 4,
     .n_used = 2, OSS, .edit = oss_local},
    {"gpt-oss-Q8_0", "gpt-oss", SIZES(224, 7, 1, 32, 160, 301), .formats = q8_0, .n_experts = 4,
     .n_used = 4, OSS},
    {"gpt-oss-MXFP4", "gpt-oss", SIZES(320, 8, 2, 64, 96, 301), .formats = mxfp4, .n_experts = 5,
     .n_used = 5, OSS},

    {"granitemoe-F32", "granitemoe", SIZES(256, 4, 2, 64, 96, 517), .formats = f32,
     .n_experts = 10, .n_used = 3, .edit = granitemoe_keys},
    {"granitemoe-shared", "granitemoe", SIZES(192, 6, 2, 32, 96, 333), .formats = f32,
     .n_experts = 6, .n_used = 2, .n_shared = 160, .tied = true, .edit = granitemoe_keys},
    {"granitemoe-Q4_0", "granitemoe", SIZES(224, 7, 1, 32, 160, 301), .formats = q4_0,
     .n_experts = 40, .n_used = 8, .edit = granitemoe_keys},

    {"lfm2-F32", "lfm2", SIZES(256, 4, 2, 64, 320, 517), .formats = f32, LFM2(6, 3), .tied = true,
     .rope_base = 1e6f},
    {"lfm2-window", "lfm2", SIZES(192, 6, 1, 32, 224, 333), .formats = f32, LFM2(6, 4),
     .window = 16},
    {"lfm2-Q8_0", "lfm2", SIZES(224, 7, 1, 32, 352, 301), .formats = q8_0, LFM2(3, 3),
     .tied = true},
    {"lfm2-Q4_K", "lfm2", SIZES(512, 8, 2, 64, 512, 333), .formats = q4_K, LFM2(3, 2)},

    {"lfm2moe-F32", "lfm2moe", SIZES(256, 4, 2, 64, 96, 517), .formats = f32, LFM2(6, 3),
     .n_experts = 12, .n_used = 4, .n_leading = 2, .n_shared = 320, .tied = true},
    {"lfm2moe-none", "lfm2moe", SIZES(192, 6, 2, 32, 96, 333), .formats = f32, LFM2(6, 3),
     .n_experts = 5, .n_used = 2},
    {"lfm2moe-Q8_0", "lfm2moe", SIZES(224, 7, 1, 32, 160, 301), .formats = q8_0, LFM2(3, 3),
     .n_experts = 4, .n_used = 4, .n_leading = 1, .n_shared = 288},
    {"lfm2moe-Q4_K", "lfm2moe", SIZES(256, 4, 1, 64, 256, 333), .formats = q4_K, LFM2(3, 3),
     .n_experts = 3, .n_used = 3, .n_leading = 2, .n_shared = 512},

    {"qwen35-F32", "qwen35", SIZES(256, 4, 2, 64, 320, 517), .formats = f32,
     QWEN35(5, 4, 2, 4, 32), .tied = true},
    {"qwen35-all", "qwen35", SIZES(192, 6, 1, 32, 224, 333), .formats = f32,
     QWEN35(4, 4, 3, 3, 128)},
    {"qwen35-ahead", "qwen35", SIZES(192, 4, 4, 64, 224, 333), .formats = f32,
     QWEN35(4, 3, 1, 5, 64), .n_ahead = 1},
    {"qwen35-Q8_0", "qwen35", SIZES(224, 7, 1, 32, 352, 301), .formats = q8_0,
     QWEN35(3, 2, 1, 2, 32), .tied = true},
    // A delta net of one head has matrices of one row, in the format of the others.
    {"qwen35-one", "qwen35", SIZES(256, 4, 1, 32, 256, 301), .formats = q8_0,
     QWEN35(2, 2, 1, 1, 64)},
    {"qwen35-Q4_K", "qwen35", SIZES(512, 8, 2, 64, 512, 333), .formats = q4_K,
     QWEN35(3, 2, 2, 6, 64)},

    {"qwen35moe-F32", "qwen35moe", SIZES(256, 4, 2, 64, 96, 517), .formats = f32,
     QWEN35(5, 4, 2, 4, 32), .n_experts = 12, .n_used = 4, .n_shared = 128, .tied = true},
    {"qwen35moe-Q8_0", "qwen35moe", SIZES(224, 7, 1, 32, 160, 301), .formats = q8_0,
     QWEN35(3, 2, 2, 4, 32), .n_experts = 4, .n_used = 4, .n_shared = 96},
    {"qwen35moe-joined", "qwen35moe", SIZES(192, 6, 2, 32, 96, 333), .formats = f32,
     QWEN35(3, 2, 1, 2, 32), .n_experts = 6, .n_used = 2, .n_shared = 96, .joined = true},
    {"qwen35moe-Q4_K", "qwen35moe", SIZES(256, 4, 1, 64, 256, 333), .formats = q4_K,
     QWEN35(2, 2, 1, 3, 64), .n_experts = 3, .n_used = 3, .n_shared = 512},

    {"gpt2-F32", "gpt2", SIZES(256, 4, 4, 64, 320, 517), .formats = f32, .tied = true},
    {"gpt2-F16", "gpt2", SIZES(192, 6, 6, 32, 768, 401), .formats = f16, .tied = true},
    {"gpt2-Q8_0", "gpt2", SIZES(448, 7, 7, 64, 352, 707), .formats = q8_0},
    {"gpt2-Q4_0", "gpt2", SIZES(256, 8, 8, 32, 256, 909), .formats = q4_0, .tied = true},
    {"gpt2-Q4_K", "gpt2", SIZES(256, 2, 2, 128, 512, 611), .formats = q4_K},
    {"gpt2-Q6_K", "gpt2", SIZES(512, 8, 8, 64, 256, 499), .formats = q6_K, .tied = true},
};

enum { N_SPECS = sizeof specs / sizeof *specs };

#define X(NAME, name, id, elems, bytes) +1
enum { N_FORMATS = ROCQ_FORMATS(X) };
#undef X

static double nmse(const float *x, const float *reference, int32_t n) {
    double error = 0, power = 0;
    for (int32_t i = 0; i < n; i++) {
        error += ((double)x[i] - reference[i]) * ((double)x[i] - reference[i]);
        power += (double)reference[i] * reference[i];
    }
    return error / power;
}

static int32_t best_of(const float *x, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

// How far the best leads the second, in units of the values' root mean square.
static double lead_of(const float *x, int32_t n) {
    int32_t best = best_of(x, n);
    double second = -1e30, power = 0;
    for (int32_t i = 0; i < n; i++) {
        if (i != best && x[i] > second) second = x[i];
        power += (double)x[i] * x[i];
    }
    return (x[best] - second) / sqrt(power / n);
}

// A lead that no two results can disagree about while both are within the tolerance of llama.cpp's:
// five standard errors.
static double clear_lead(double tolerance) { return 5 * sqrt(tolerance); }

static float *floats(int64_t n) {
    float *p = (float *)malloc((size_t)n * sizeof *p);
    assert_non_null(p);
    for (int64_t i = 0; i < n; i++) p[i] = NAN;
    return p;
}

typedef struct ours {
    rocq_ctx *ctx;
    rocq_gguf *file;
    llama_model m;
} ours;

static void ours_open(ours *o, const char *path, int32_t n_threads, const llama_options *options) {
    rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = n_threads};
    rocq_gguf_desc from = {.path = path};
    memset(o, 0, sizeof *o);
    assert_int_equal(rocq_open(&o->ctx, &desc), ROCQ_OK);
    if (rocq_gguf_open(o->ctx, &o->file, &from) != ROCQ_OK) fail_msg("%s", rocq_error(o->ctx));
    if (llama_open(&o->m, o->ctx, o->file, options) != ROCQ_OK) fail_msg("%s", o->m.error);
}

static void ours_close(ours *o) {
    llama_close(&o->m);
    rocq_gguf_close(&o->file);
    rocq_close(&o->ctx);
}

static void ours_eval(ours *o, const int32_t *tokens, int32_t n, float *logits) {
    if (llama_eval(&o->m, tokens, n, logits) != ROCQ_OK) fail_msg("%s", o->m.error);
}

static int32_t ours_best(ours *o) {
    rocq_sample_params greedy = {.temperature = 0};
    int32_t token = -1;
    if (llama_sample(&o->m, &greedy, &token) != ROCQ_OK) fail_msg("%s", o->m.error);
    return token;
}

static void random_prompt(int32_t *tokens, int32_t n_vocab, uint64_t seed) {
    model_random r = {seed};
    for (int32_t i = 0; i < N_PROMPT; i++)
        tokens[i] = (int32_t)(model_u64(&r) % (uint64_t)n_vocab);
}

// llama.cpp's greedy run: logits of the prompt and of every token of the run, and the run's tokens.
// Prompts are tried until each token leads clearly and the run is no mere repetition, which random
// weights do not always grant.
static void peer_run(const char *path, int32_t kv_type, double lead, int32_t *prompt, float *logits,
                     int32_t *run, int32_t *n_vocab) {
    bool fine = false;
    peer_model p;
    peer_load(&p, path, N_CTX, kv_type);
    *n_vocab = p.n_vocab;
    for (uint64_t seed = 1; seed <= 1000 && !fine; seed++) {
        peer_forget(&p);
        random_prompt(prompt, p.n_vocab, seed);
        peer_decode(&p, prompt, N_PROMPT, logits);
        fine = true;
        int32_t n_distinct = 0;
        for (int32_t i = 0; i < N_GREEDY && fine; i++) {
            const float *last = logits + (int64_t)(N_PROMPT - 1 + i) * p.n_vocab;
            fine = lead_of(last, p.n_vocab) > lead;
            run[i] = best_of(last, p.n_vocab);
            bool seen = false;
            for (int32_t k = 0; k < i; k++) seen = seen || run[k] == run[i];
            n_distinct += !seen;
            peer_decode(&p, &run[i], 1, logits + (int64_t)(N_PROMPT + i) * p.n_vocab);
        }
        fine = fine && n_distinct >= 3;
    }
    peer_close(&p);
    if (!fine) fail_msg("no prompt gives llama.cpp a run without near-ties");
}

static void write_model(const model_spec *s, model_quantize_fn quantize) {
    rocq_ctx *ctx = NULL;
    assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
    model_write(ctx, s, model_path(s->name), quantize);
    rocq_close(&ctx);
}

// One model in both programs, with a KV cache of one format.
static void compare(const model_spec *s, const char *kv_format, int32_t kv_type, double tolerance) {
    int32_t prompt[N_PROMPT], run[N_GREEDY], n_vocab = 0;
    int64_t n = (int64_t)(N_PROMPT + N_GREEDY) * s->n_vocab;
    float *expected = floats(n), *logits = floats(n);
    double worst = 0;
    write_model(s, peer.quantize);
    peer_run(model_path(s->name), kv_type, clear_lead(tolerance), prompt, expected, run, &n_vocab);
    assert_int_equal(n_vocab, s->n_vocab);

    // A batch that the prompt is no multiple of, so that batches and the cache meet.
    ours o;
    llama_options options = {.n_ctx = N_CTX, .n_batch = 16, .n_logits = 5, .kv_format = kv_format};
    ours_open(&o, model_path(s->name), 2, &options);
    assert_int_equal(o.m.n_vocab, n_vocab);
    ours_eval(&o, prompt, N_PROMPT, logits);
    for (int32_t i = 0; i < N_GREEDY; i++) {
        int32_t token = ours_best(&o);
        if (token != run[i]) fail_msg("token %d of the run is %d, not %d", i, token, run[i]);
        ours_eval(&o, &token, 1, logits + (int64_t)(N_PROMPT + i) * n_vocab);
    }
    for (int32_t i = 0; i < N_PROMPT + N_GREEDY; i++) {
        double e = nmse(logits + (int64_t)i * n_vocab, expected + (int64_t)i * n_vocab, n_vocab);
        if (!(e <= tolerance)) fail_msg("position %d: NMSE %g", i, e);
        if (e > worst) worst = e;
    }
    printf("# %s, KV in %s: NMSE at most %.2g\n", s->name, kv_format, worst);
    ours_close(&o);
    free(logits);
    free(expected);
}

static void test_model(void **state) {
    const model_spec *s = (const model_spec *)*state;
    if (!peer_open()) skip();
    bool exact = s->formats[0] == ROCQ_F32;
    compare(s, exact ? "f32" : "f16", exact ? 0 : 1,
            exact || s->formats[0] == ROCQ_F16 ? 1e-5 : 1e-3);
}

// A model that llama.cpp's own library has loaded and saved again. Its file has all of llama.cpp's
// keys, most of them 0, and other types and an array where ours has numbers. It must give
// llama.cpp's logits, and the very bits that the file it was made from gives.
static void test_saved(void **state) {
    const model_spec *s = (const model_spec *)*state;
    if (!peer_open()) skip();
    const int64_t n = (int64_t)N_PROMPT * s->n_vocab;
    float *expected = floats(n), *logits[2] = {floats(n), floats(n)};
    char paths[2][256];
    snprintf(paths[0], sizeof paths[0], "%s", model_path(s->name));
    snprintf(paths[1], sizeof paths[1], "%.240s.saved", paths[0]);
    int32_t prompt[N_PROMPT];
    random_prompt(prompt, s->n_vocab, 3);
    write_model(s, peer.quantize);
    peer_model p;
    peer_load(&p, paths[0], N_CTX, 0);
    peer_decode(&p, prompt, N_PROMPT, expected);
    peer.llama_model_save_to_file(p.model, paths[1]);
    peer_close(&p);
    const llama_options options = {.n_ctx = N_CTX, .n_logits = N_PROMPT, .kv_format = "f32"};
    for (int32_t k = 0; k < 2; k++) {
        ours o;
        ours_open(&o, paths[k], 1, &options);
        ours_eval(&o, prompt, N_PROMPT, logits[k]);
        ours_close(&o);
    }
    assert_memory_equal(logits[1], logits[0], (size_t)n * sizeof **logits);
    const double tolerance =
        s->formats[0] == ROCQ_F32 || s->formats[0] == ROCQ_F16 ? 1e-5 : 1e-3;
    for (int32_t i = 0; i < N_PROMPT; i++) {
        const int64_t at = (int64_t)i * s->n_vocab;
        const double e = nmse(logits[1] + at, expected + at, s->n_vocab);
        if (!(e <= tolerance)) fail_msg("position %d: NMSE %g", i, e);
    }
    for (int32_t k = 0; k < 2; k++) {
        remove(paths[k]);
        free(logits[k]);
    }
    free(expected);
}

// A model in several files, as llama.cpp's tools split them: which tensors are where is free, and
// the metadata is in the first.
typedef struct split {
    int32_t n, no[3], count[3]; // what the metadata of each file says
    int32_t tensors;            // ... of the first one
    const char *twice;          // a tensor that is in all of them
} split;

static const char *split_path(const char *name, int32_t i, int32_t n) {
    static char path[256];
    char full[128];
    snprintf(full, sizeof full, "%s-%05d-of-%05d", name, (int)i + 1, (int)n);
    strcpy(path, model_path(full));
    return path;
}

static void write_split(rocq_ctx *ctx, const char *from, const char *name, const split *s) {
    rocq_gguf *file = NULL;
    rocq_gguf_tensor t;
    const rocq_gguf_desc source = {.path = from};
    if (rocq_gguf_open(ctx, &file, &source) != ROCQ_OK) fail_msg("%s", rocq_error(ctx));
    const int64_t n_tensors = rocq_gguf_tensor_count(file);
    for (int32_t i = 0; i < s->n; i++) {
        rocq_gguf_writer *w = NULL;
        const rocq_gguf_writer_desc to = {.path = split_path(name, i, s->n)};
        const uint16_t no = (uint16_t)s->no[i], count = (uint16_t)s->count[i];
        const int32_t tensors = s->tensors ? s->tensors : (int32_t)n_tensors;
        assert_int_equal(rocq_gguf_writer_open(ctx, &w, &to), ROCQ_OK);
        if (i == 0) assert_int_equal(rocq_gguf_writer_set_from(w, file), ROCQ_OK);
        rocq_gguf_writer_set(w, "split.no", ROCQ_GGUF_U16, false, 1, &no);
        rocq_gguf_writer_set(w, "split.count", ROCQ_GGUF_U16, false, 1, &count);
        rocq_gguf_writer_set(w, "split.tensors.count", ROCQ_GGUF_I32, false, 1, &tensors);
        for (int pass = 0; pass < 2; pass++) {
            for (int64_t k = 0; k < n_tensors; k++) {
                char text[64];
                assert_int_equal(rocq_gguf_tensor_at(file, k, &t), ROCQ_OK);
                snprintf(text, sizeof text, "%.*s", (int)t.name.length, t.name.data);
                if (k % s->n != i && !(s->twice && strcmp(s->twice, text) == 0)) continue;
                if (pass == 0) {
                    assert_int_equal(rocq_gguf_writer_add_tensor(w, text, t.format, t.n_dims, t.ne),
                                     ROCQ_OK);
                    continue;
                }
                void *bytes = malloc((size_t)t.size);
                assert_non_null(bytes);
                assert_int_equal(rocq_gguf_read(ctx, file, &t, bytes), ROCQ_OK);
                assert_int_equal(rocq_gguf_writer_write(w, bytes, t.size), ROCQ_OK);
                free(bytes);
            }
        }
        assert_int_equal(rocq_gguf_writer_close(&w), ROCQ_OK);
    }
    rocq_gguf_close(&file);
}

static void test_split(void **state) {
    (void)state;
    const model_spec s = {"split", "llama", SIZES(256, 4, 2, 64, 320, 301), .formats = q8_0};
    static const split good = {3, {0, 1, 2}, {3, 3, 3}, 0, NULL};
    static const struct {
        split files;
        const char *message; // of the failure to open them
    } bad[] = {{{3, {0, 2, 2}, {3, 3, 3}, 0, NULL}, "is number 3 of 3 by its metadata "
                                                    "(split.no, split.count), expected 2 of 3"},
               {{3, {0, 1, 2}, {3, 3, 4}, 0, NULL}, "is number 3 of 4 by its metadata "
                                                    "(split.no, split.count), expected 3 of 3"},
               {{3, {0, 1, 2}, {2, 3, 3}, 0, NULL}, "does not end in -00001-of-00002.gguf"},
               {{3, {1, 1, 2}, {3, 3, 3}, 0, NULL}, "is file 2 of 3 of a model: open the first"},
               {{3, {0, 1, 2}, {3, 3, 3}, 20, NULL}, "have 21 tensors, expected 20"},
               {{3, {0, 1, 2}, {10000, 3, 3}, 0, NULL}, "is one of 10000 files of a model by its "
                                                        "metadata (split.count), expected at most"},
               {{2, {0, 1, 0}, {2, 2, 0}, 0, "output_norm.weight"}, "'output_norm.weight' is in"}};
    const int64_t n = (int64_t)N_PROMPT * s.n_vocab;
    float *logits[4] = {floats(n), floats(n), floats(n), floats(n)};
    int32_t prompt[N_PROMPT];
    rocq_ctx *ctx = NULL;
    rocq_gguf *file = NULL;
    ours o;
    const llama_options options = {.n_ctx = N_CTX, .n_logits = N_PROMPT, .kv_format = "f32"};
    random_prompt(prompt, s.n_vocab, 9);
    write_model(&s, NULL);
    assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
    write_split(ctx, model_path(s.name), "split", &good);
    for (int i = 0; i < 2; i++) {
        ours_open(&o, i ? split_path("split", 0, 3) : model_path(s.name), 2, &options);
        ours_eval(&o, prompt, N_PROMPT, logits[i]);
        ours_close(&o);
    }
    assert_memory_equal(logits[1], logits[0], (size_t)n * sizeof **logits);

    // Copied instead of mapped, by offsets through all files; and joined: the first file's metadata
    // but for the split's.
    const rocq_gguf_desc from = {.path = split_path("split", 0, 3), .no_mmap = true};
    static const split joined = {1, {0}, {1}, 0, NULL};
    assert_int_equal(rocq_gguf_open(ctx, &file, &from), ROCQ_OK);
    if (llama_open(&o.m, ctx, file, &options) != ROCQ_OK) fail_msg("%s", o.m.error);
    ours_eval(&o, prompt, N_PROMPT, logits[2]);
    llama_close(&o.m);
    assert_memory_equal(logits[2], logits[0], (size_t)n * sizeof **logits);
    rocq_gguf_close(&file);
    write_split(ctx, split_path("split", 0, 3), "joined", &joined);
    ours_open(&o, split_path("joined", 0, 1), 2, &options);
    ours_eval(&o, prompt, N_PROMPT, logits[3]);
    ours_close(&o);
    assert_memory_equal(logits[3], logits[0], (size_t)n * sizeof **logits);
    if (peer_open()) { // that llama.cpp reads them shows that such is the convention
        peer_model p;
        peer_load(&p, split_path("split", 0, 3), N_CTX, 0);
        peer_decode(&p, prompt, N_PROMPT, logits[1]);
        peer_close(&p);
        assert_true(nmse(logits[1], logits[0], (int32_t)n) <= 1e-3);
    }

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const split *b = &bad[i].files;
        write_split(ctx, model_path(s.name), "wrong", b);
        const rocq_gguf_desc wrong = {.path = split_path("wrong", 0, b->n)};
        if (rocq_gguf_open(ctx, &file, &wrong) == ROCQ_OK) fail_msg("case %d is taken", (int)i);
        assert_null(file);
        if (!strstr(rocq_error(ctx), bad[i].message)) fail_msg("%s", rocq_error(ctx));
    }
    assert_int_equal(remove(split_path("split", 1, 3)), 0);
    const rocq_gguf_desc first = {.path = split_path("split", 0, 3)};
    assert_int_equal(rocq_gguf_open(ctx, &file, &first), ROCQ_E_IO);
    assert_non_null(strstr(rocq_error(ctx), "file 2 of 3"));
    const rocq_gguf_desc source = {.path = "tests/test_llama.c"};
    assert_int_equal(rocq_gguf_open(ctx, &file, &source), ROCQ_E_MAGIC);
    assert_string_equal(rocq_error(ctx), "gguf: 'tests/test_llama.c', byte 4: not a GGUF file: it "
                        "begins with '// W', not 'GGUF'; as a number: 1461727023");
    const rocq_gguf_desc last = {.path = split_path("split", 2, 3)};
    assert_int_equal(rocq_gguf_open(ctx, &file, &last), ROCQ_E_UNSUPPORTED);
    rocq_close(&ctx);
    for (int i = 0; i < 4; i++) free(logits[i]);
}

// A small model with other metadata. 2 heads of 32 elements; every number fits the smallest type.
static const model_spec keys_spec = {"keys", "llama", SIZES(64, 2, 1, 32, 96, 301), .formats = f32};

typedef struct key {
    const char *name; // "<family>." goes before it, but for those of the tokenizer
    rocq_gguf_type type;
    int64_t count;    // of an array; 0 = one value
    const void *data;
} key;

static const key *to_set; // by set_keys; the last has no name
static const char *retyped; // a tensor whose type run_with changes in the file, or NULL,
static uint32_t retyped_id; // to this
static const char *to_set_arch;

static void set_keys(rocq_gguf_writer *w) {
    for (const key *k = to_set; k->name; k++) {
        char name[128];
        if (strncmp(k->name, "tokenizer.", 10) == 0) snprintf(name, sizeof name, "%s", k->name);
        else snprintf(name, sizeof name, "%s.%s", to_set_arch, k->name);
        assert_int_equal(rocq_gguf_writer_set(w, name, k->type, k->count > 0,
                                              k->count > 0 ? k->count : 1, k->data),
                         ROCQ_OK);
    }
}

static void retype(const char *path) {
    static char bytes[1 << 20];
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    const size_t size = fread(bytes, 1, sizeof bytes, f), n = strlen(retyped);
    size_t at = 0;
    uint32_t n_dims;
    while (at + n < size && memcmp(bytes + at, retyped, n) != 0) at++;
    assert_true(at + n < size);
    memcpy(&n_dims, bytes + at + n, sizeof n_dims);
    assert_int_equal(fseek(f, (long)(at + n + 4 + 8 * n_dims), SEEK_SET), 0);
    assert_int_equal(fwrite(&retyped_id, sizeof retyped_id, 1, f), 1);
    assert_int_equal(fclose(f), 0);
}

// The logits of a prompt by a model with other keys, or the failure of llama_open.
static rocq_result run_with(const model_spec *base, const key *keys, float *logits, char *error) {
    model_spec s = *base;
    rocq_ctx *ctx = NULL;
    rocq_gguf *file = NULL;
    llama_model m;
    int32_t prompt[N_PROMPT];
    const llama_options options = {.n_ctx = N_CTX, .n_logits = N_PROMPT, .kv_format = "f32"};
    const rocq_gguf_desc from = {.path = model_path(s.name)};
    to_set = keys;
    to_set_arch = s.arch;
    s.edit = set_keys;
    write_model(&s, NULL);
    if (retyped) retype(from.path);
    random_prompt(prompt, s.n_vocab, 4);
    assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
    assert_int_equal(rocq_gguf_open(ctx, &file, &from), ROCQ_OK);
    memset(&m, 0x55, sizeof m);
    const rocq_result result = llama_open(&m, ctx, file, &options);
    if (error) strcpy(error, m.error);
    if (result == ROCQ_OK) {
        assert_int_equal(llama_eval(&m, prompt, N_PROMPT, logits), ROCQ_OK);
        llama_close(&m);
    }
    memset(m.error, 0, sizeof m.error);
    const llama_model zero = {0};
    assert_memory_equal(&m, &zero, sizeof m); // closed, or it failed and left nothing
    rocq_gguf_close(&file);
    rocq_close(&ctx);
    return result;
}

// Every key that holds an integer, in every type of integer that GGUF has, alone and once a layer.
static void test_integer_types(void **state) {
    (void)state;
    static const struct { const char *name; int8_t value; } all[] = {
        {"block_count", 2}, {"context_length", 100}, {"embedding_length", 64},
        {"feed_forward_length", 96}, {"attention.head_count", 2}, {"attention.head_count_kv", 1},
        {"attention.key_length", 32}, {"attention.value_length", 32}, {"expert_count", 0},
        {"attention.sliding_window", 16}, {"rope.dimension_count", 32},
        {"rope.scaling.original_context_length", 100}};
    enum { N_ALL = sizeof all / sizeof *all };
    static const rocq_gguf_type types[] = {ROCQ_GGUF_U32, ROCQ_GGUF_U8, ROCQ_GGUF_I8, ROCQ_GGUF_U16,
                                           ROCQ_GGUF_I16, ROCQ_GGUF_I32, ROCQ_GGUF_U64,
                                               ROCQ_GGUF_I64};
    const int64_t n = (int64_t)N_PROMPT * keys_spec.n_vocab;
    float *expected = floats(n), *logits = floats(n);
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        for (int32_t array = 0; array < 2; array++) {
            key keys[N_ALL + 1] = {{0}};
            int64_t data[N_ALL][2]; // two elements of any type
            char error[512];
            for (size_t i = 0; i < N_ALL; i++) {
                const size_t size = types[t] >= ROCQ_GGUF_U64 ? 8 : (size_t)1 << types[t] / 2;
                const int64_t value = all[i].value; // little endian: its first bytes are the value
                memcpy(data[i], &value, size);
                memcpy((char *)data[i] + size, &value, size);
                keys[i].name = all[i].name;
                keys[i].type = types[t];
                keys[i].count = array > 0 && i > 0 ? 2 : 0; // the number of layers itself is one
                keys[i].data = data[i];
            }
            for (int64_t i = 0; i < n; i++) logits[i] = NAN;
            if (run_with(&keys_spec, keys, t + (size_t)array > 0 ? logits : expected, error) !=
                ROCQ_OK)
                fail_msg("type %d, array %d: %s", (int)types[t], array, error);
            if (t + (size_t)array > 0)
                assert_memory_equal(logits, expected, (size_t)n * sizeof *logits);
        }
    }
    free(logits);
    free(expected);
}

static void test_keys(void **state) {
    (void)state;
    static const uint32_t u_0 = 0, u_2 = 2, u_3 = 3, u_1_2[] = {1, 2}, u_96_97[] = {96, 97},
                          u_2s[] = {2, 2, 2};
    static const int32_t minus_1 = -1;
    static const uint64_t huge = UINT64_MAX;
    static const float f_2 = 2, f_nan = NAN;
    static const double small = (double)0.01f, d_2s[] = {0.01, 0.02};
    static const unsigned char no = 0, yes = 1;
    static const rocq_str text = {"2", 1};
    static const struct {
        key set;
        rocq_result result;
        const char *message;
    } cases[] = {
        {{"expert_count", ROCQ_GGUF_U32, 0, &u_0}, ROCQ_OK, ""},
        {{"attention.sliding_window", ROCQ_GGUF_U32, 0, &u_0}, ROCQ_OK, ""},
        {{"attention.key_length", ROCQ_GGUF_U32, 0, &u_0}, ROCQ_OK, ""},
        {{"attention.value_length", ROCQ_GGUF_U32, 0, &u_0}, ROCQ_OK, ""},
        {{"rope.dimension_count", ROCQ_GGUF_U32, 0, &u_0}, ROCQ_OK, ""},
        {{"rope.scaling.original_context_length", ROCQ_GGUF_U32, 0, &u_0}, ROCQ_OK, ""},
        {{"attention.layer_norm_rms_epsilon", ROCQ_GGUF_F64, 0, &small}, ROCQ_OK, ""},
        {{"attention.causal", ROCQ_GGUF_BOOL, 0, &yes}, ROCQ_OK, ""},
        {{"attention.causal", ROCQ_GGUF_BOOL, 0, &no}, ROCQ_E_UNSUPPORTED,
         "llama.attention.causal is false, expected true"},
        {{"attention.causal", ROCQ_GGUF_U32, 0, &u_0}, ROCQ_E_TYPE,
         "llama.attention.causal is uint32, expected a bool"},
        {{"attention.value_length", ROCQ_GGUF_U32, 0, &u_2}, ROCQ_E_UNSUPPORTED,
         "llama.attention.value_length is 2, expected 32, as attention.key_length"},
        {{"attention.head_count_kv", ROCQ_GGUF_U32, 0, &u_3}, ROCQ_E_CORRUPT,
         "llama.attention.head_count_kv is 3, expected a divisor of attention.head_count, 2"},
        {{"rope.dimension_count", ROCQ_GGUF_U32, 0, &u_3}, ROCQ_E_CORRUPT,
         "llama.rope.dimension_count is 3, expected an even number up to 32"},
        {{"block_count", ROCQ_GGUF_U32, 0, &u_0}, ROCQ_E_CORRUPT,
         "llama.block_count is 0, expected 1 to 1073741824"},
        {{"expert_count", ROCQ_GGUF_U32, 0, &u_2}, ROCQ_E_NOT_FOUND, "no llama.expert_used_count"},
        {{"embedding_length", ROCQ_GGUF_U32, 0, &u_0}, ROCQ_E_CORRUPT,
         "llama.embedding_length is 0"},
        {{"attention.head_count", ROCQ_GGUF_I32, 0, &minus_1}, ROCQ_E_CORRUPT,
         "llama.attention.head_count is -1, expected 1 to 1073741824"},
        {{"attention.head_count", ROCQ_GGUF_U64, 0, &huge}, ROCQ_E_CORRUPT,
         "head_count is 18446744"},
        {{"attention.head_count", ROCQ_GGUF_F32, 0, &f_2}, ROCQ_E_TYPE,
         "head_count is float32, expected an integer"},
        {{"attention.head_count", ROCQ_GGUF_STRING, 0, &text}, ROCQ_E_TYPE,
         "llama.attention.head_count is string, expected an integer"},
        {{"attention.head_count", ROCQ_GGUF_U32, 3, u_2s}, ROCQ_E_CORRUPT,
         "llama.attention.head_count has 3 entries, expected 2, one for each layer"},
        {{"block_count", ROCQ_GGUF_U32, 2, u_2s}, ROCQ_E_CORRUPT, "llama.block_count"},
        {{"attention.head_count_kv", ROCQ_GGUF_U32, 2, u_1_2}, ROCQ_E_UNSUPPORTED,
         "llama.attention.head_count_kv is 1 in layer 0 and 2 in layer 1"},
        {{"feed_forward_length", ROCQ_GGUF_U32, 2, u_96_97}, ROCQ_E_UNSUPPORTED,
         "llama.feed_forward_length is 96 in layer 0 and 97 in layer 1"},
        {{"attention.layer_norm_rms_epsilon", ROCQ_GGUF_F64, 2, d_2s}, ROCQ_E_UNSUPPORTED,
         "epsilon"},
        {{"attention.layer_norm_rms_epsilon", ROCQ_GGUF_F32, 0, &f_nan}, ROCQ_E_CORRUPT,
         "epsilon is nan, expected 0 to 1e30"},
        {{"attention.layer_norm_rms_epsilon", ROCQ_GGUF_STRING, 0, &text}, ROCQ_E_TYPE,
         "llama.attention.layer_norm_rms_epsilon is string, expected a number"},
        {{"rope.scaling.type", ROCQ_GGUF_U32, 0, &u_2}, ROCQ_E_TYPE,
         "llama.rope.scaling.type is uint32, expected a string"},
        {{"rope.scaling.type", ROCQ_GGUF_STRING, 0, &text}, ROCQ_E_UNSUPPORTED,
         "rope.scaling.type"},
    };
    const int64_t n = (int64_t)N_PROMPT * keys_spec.n_vocab;
    float *expected = floats(n), *logits = floats(n);
    const key none = {0};
    assert_int_equal(run_with(&keys_spec, &none, expected, NULL), ROCQ_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const key keys[] = {cases[i].set, none};
        char error[512];
        const rocq_result result = run_with(&keys_spec, keys, logits, error);
        if (result != cases[i].result || !strstr(error, cases[i].message))
            fail_msg("%s, case %d: result %d, \"%s\"", keys[0].name, (int)i, (int)result, error);
        if (result != ROCQ_OK) continue;
        assert_memory_equal(logits, expected, (size_t)n * sizeof *logits);
        for (int64_t k = 0; k < n; k++) logits[k] = NAN;
    }
    free(logits);
    free(expected);
}

// Files that contradict themselves: one line, with the number found and the one expected.
static void test_contradictions(void **state) {
    (void)state;
    static const uint32_t n_1 = 1, n_2 = 2, n_3 = 3, n_4 = 4, n_5 = 5, n_65 = 65, n_100 = 100,
                          n_128 = 128;
    static const rocq_str words[] = {{"a", 1}, {"b", 1}};
    static const model_spec mixture = {"broken", "qwen3moe", SIZES(64, 2, 1, 32, 96, 301),
                                       .formats = f32, .n_experts = 4, .n_used = 2},
                            gpt2 = {"broken", "gpt2", SIZES(64, 2, 2, 32, 96, 301), .formats = f32},
                            oss = {"broken", "gpt-oss", SIZES(64, 2, 1, 32, 96, 301),
                                   .formats = f32, .n_experts = 4, .n_used = 2, OSS};
    static const struct {
        const model_spec *spec;
        key set;
        const char *retyped, *leave_out, *misshape;
        uint32_t type;
        rocq_result result;
        const char *message;
    } cases[] = {
        {.spec = &keys_spec, .set = {"embedding_length", ROCQ_GGUF_U32, 0, &n_65},
         .result = ROCQ_E_SHAPE, .message =
         "llama.embedding_length is 65, expected 64, the size of token_embd.weight's rows"},
        {.spec = &keys_spec, .set = {"attention.head_count", ROCQ_GGUF_U32, 0, &n_3},
         .result = ROCQ_E_CORRUPT, .message =
         "llama.attention.head_count is 3, expected a divisor of embedding_length, 64, as"},
        {.spec = &keys_spec, .set = {"attention.head_count", ROCQ_GGUF_U32, 0, &n_128},
         .result = ROCQ_E_CORRUPT, .message = "attention.head_count is 128, expected a divisor of"},
        {.spec = &keys_spec, .set = {"attention.head_count", ROCQ_GGUF_U32, 0, &n_4},
         .result = ROCQ_E_SHAPE, .message =
         "tensor blk.0.attn_k.weight is 64 x 32 x 1, expected 64 x 16 x 1"},
        {.spec = &keys_spec, .set = {"attention.head_count_kv", ROCQ_GGUF_U32, 0, &n_2},
         .result = ROCQ_E_SHAPE, .message =
         "tensor blk.0.attn_k.weight is 64 x 32 x 1, expected 64 x 64 x 1"},
        {.spec = &keys_spec, .set = {"feed_forward_length", ROCQ_GGUF_U32, 0, &n_100},
         .result = ROCQ_E_SHAPE, .message =
         "tensor blk.0.ffn_gate.weight is 64 x 96 x 1, expected 64 x 100 x 1"},
        {.spec = &keys_spec, .set = {"tokenizer.ggml.tokens", ROCQ_GGUF_STRING, 2, words},
         .result = ROCQ_E_SHAPE, .message =
         "tensor token_embd.weight is 64 x 301 x 1, expected 64 x 2 x 1"},
        {.spec = &keys_spec, .set = {"block_count", ROCQ_GGUF_U32, 0, &n_3},
         .result = ROCQ_E_SHAPE, .message =
         "llama.block_count is 3, expected 2: the file has tensors of so many layers"},
        {.spec = &keys_spec, .set = {"block_count", ROCQ_GGUF_U32, 0, &n_1},
         .result = ROCQ_E_SHAPE, .message = "llama.block_count is 1, expected 2"},
        {.spec = &mixture, .set = {"expert_count", ROCQ_GGUF_U32, 0, &n_5},
         .result = ROCQ_E_SHAPE, .message =
         "tensor blk.0.ffn_gate_inp.weight is 64 x 4 x 1, expected 64 x 5 x 1"},
        {.spec = &mixture, .set = {"expert_count", ROCQ_GGUF_U32, 0, &n_1},
         .result = ROCQ_E_UNSUPPORTED, .message =
         "qwen3moe.expert_count is 1, expected 2 or more"},
        {.spec = &mixture, .set = {"expert_used_count", ROCQ_GGUF_U32, 0, &n_5},
         .result = ROCQ_E_CORRUPT, .message =
         "qwen3moe.expert_used_count is 5, expected 1 to 4, the number of experts"},
        {.spec = &gpt2, .set = {"context_length", ROCQ_GGUF_U32, 0, &n_100},
         .result = ROCQ_E_BOUNDS, .message =
         "a context of 128, expected at most the 100 positions that the model has learned"},
        {.spec = &keys_spec, .leave_out = "blk.1.ffn_down.weight", .result = ROCQ_E_NOT_FOUND,
         .message = "tensor blk.1.ffn_down.weight is missing, expected 96 x 64 x 1"},
        {.spec = &oss, .leave_out = "blk.1.attn_output.bias", .result = ROCQ_E_NOT_FOUND,
         .message = "tensor blk.1.attn_output.bias is missing, expected 64 x 1 x 1"},
        {.spec = &gpt2, .leave_out = "blk.1.attn_output.bias", .result = ROCQ_E_NOT_FOUND,
         .message = "tensor blk.1.attn_output.bias is missing, expected 64 x 1 x 1"},
        {.spec = &gpt2, .leave_out = "blk.0.ffn_down.bias", .result = ROCQ_E_NOT_FOUND,
         .message = "tensor blk.0.ffn_down.bias is missing, expected 64 x 1 x 1"},
        {.spec = &oss, .leave_out = "output.weight", .result = ROCQ_E_NOT_FOUND,
         .message = "tensor output.weight is missing, expected 64 x 301 x 1"},
        {.spec = &mixture, .misshape = "blk.1.ffn_down_exps.weight", .result = ROCQ_E_SHAPE,
         .message = "tensor blk.1.ffn_down_exps.weight is 96 x 65 x 4, expected 96 x 64 x 4"},
        {.spec = &keys_spec, .retyped = "blk.1.attn_q.weight", .type = 99,
         .result = ROCQ_E_FORMAT, .message =
         "tensor blk.1.attn_q.weight has the type unknown (id 99), expected one of F32 F16 Q4_0"},
        {.spec = &keys_spec, .retyped = "blk.1.attn_q.weight", .type = 4, .result = ROCQ_E_FORMAT,
         .message = "has the type Q4_2 (id 4), expected one of F32 F16 Q4_0"},
        {.spec = &keys_spec, .retyped = "blk.1.attn_q.weight", .type = ROCQ_I8,
         .result = ROCQ_E_FORMAT, .message = "has the type I8 (id 24), expected one of F32 F16"},
        {.spec = &keys_spec, .retyped = "blk.1.attn_norm.weight", .type = 1,
         .result = ROCQ_E_FORMAT, .message =
         "tensor blk.1.attn_norm.weight has the type F16 (id 1), expected F32 (id 0)"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        model_spec s = *cases[i].spec;
        const key keys[] = {cases[i].set, {0}};
        char error[512];
        s.leave_out = cases[i].leave_out;
        s.misshape = cases[i].misshape;
        retyped = cases[i].retyped;
        retyped_id = cases[i].type;
        const rocq_result result = run_with(&s, keys, NULL, error);
        retyped = NULL;
        if (result != cases[i].result || !strstr(error, cases[i].message) || strchr(error, '\n'))
            fail_msg("case %d: result %d, \"%s\"", (int)i, (int)result, error);
    }
}

// Families that are not there, and what would be needed: one line.
static void test_unknown(void **state) {
    (void)state;
    static const struct {
        const char *arch, *from; // whose tensors the file has
        int32_t n_experts;
        const char *message;
    } cases[] = {
        {"olmo9", "llama", 0,
         "model family \"olmo9\" is not supported; the nearest is llama, whose "
                              "tensors it has, but"},
        {"qwen36", "qwen35", 0, "the nearest is qwen35, whose tensors it has"},
        {"lfm9", "lfm2", 0, "the nearest is lfm2, whose tensors it has"},
        {"qwen3vl", "qwen3", 0, "the nearest is qwen3, whose tensors it has"},
        {"qwen3-strange", "qwen3", 4, "the nearest is qwen3moe, whose tensors it has"},
        {"gpt2", "llama", 0, "tensor position_embd.weight is missing"},
        {"qwen2", "llama", 4, "qwen2.expert_count is 4, expected 0: mixtures of this "
                              "family are not supported"},
        {"qwen2", "qwen3", 0, "of the file's 25 tensors a qwen2 model of 2 layers has 21; "
                              "blk.0.attn_q_norm.weight is none of them"},
        {"phi3", "llama", 0, "tensor blk.0.attn_qkv.weight is missing"},
        {"two\nlines", "llama", 0, "model family \"two?lines\" is not supported"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        model_spec s = {"unknown", NULL, SIZES(64, 2, 1, 32, 96, 301), .formats = f32};
        const key none = {0};
        char error[512];
        s.arch = cases[i].arch;
        s.n_experts = cases[i].n_experts;
        s.n_used = 2;
        s.like = cases[i].from;
        if (run_with(&s, &none, NULL, error) == ROCQ_OK) fail_msg("case %d is taken", (int)i);
        if (!strstr(error, cases[i].message) || strchr(error, '\n')) fail_msg("\"%s\"", error);
    }
}

// Which of gemma2's layers have the window, by a number and by arrays of every type.
static void test_windows(void **state) {
    (void)state;
    static const uint32_t three = 3, u_windows[] = {1, 1, 0}, u_none[] = {0, 0, 0},
                          u_bad[] = {1, 2, 0};
    static const uint32_t zero = 0, huge = UINT32_MAX;
    static const unsigned char windows[] = {1, 1, 0};
    static const float f_windows[] = {1, 1, 0};
    static const char name[] = "attention.sliding_window_pattern";
    static const key numbers[][2] = {{{name, ROCQ_GGUF_U32, 0, &zero}, {0}},
                                     {{name, ROCQ_GGUF_U32, 0, &three}, {0}}};
    static const key same[][2] = {{{name, ROCQ_GGUF_U32, 3, u_windows}, {0}},
                                  {{name, ROCQ_GGUF_I32, 3, u_windows}, {0}},
                                  {{name, ROCQ_GGUF_BOOL, 3, windows}, {0}},
                                  {{name, ROCQ_GGUF_U8, 3, windows}, {0}}};
    static const key none[] = {{name, ROCQ_GGUF_U32, 3, u_none}, {0}};
    static const key wrong[][2] = {{{name, ROCQ_GGUF_U32, 2, u_windows}, {0}},
                                   {{name, ROCQ_GGUF_U32, 3, u_bad}, {0}},
                                   {{name, ROCQ_GGUF_U32, 0, &huge}, {0}},
                                   {{name, ROCQ_GGUF_F32, 3, f_windows}, {0}}};
    const model_spec s = {"windows", "gemma2", SIZES(64, 2, 1, 32, 96, 301), .formats = f32, GEMMA};
    const int64_t n = (int64_t)N_PROMPT * s.n_vocab;
    float *expected = floats(n), *logits = floats(n);
    char error[512];
    for (size_t k = 0; k < 2; k++) { // what the number 3 gives stays in expected
        assert_int_equal(run_with(&s, numbers[k], expected, NULL), ROCQ_OK);
        if (!peer_open()) continue;
        int32_t prompt[N_PROMPT];
        peer_model p;
        random_prompt(prompt, s.n_vocab, 4);
        peer_load(&p, model_path(s.name), N_CTX, 0);
        peer_decode(&p, prompt, N_PROMPT, logits);
        for (int32_t i = 0; i < N_PROMPT; i++) {
            const int64_t at = (int64_t)i * s.n_vocab;
            assert_true(nmse(expected + at, logits + at, s.n_vocab) <= 1e-5);
        }
        peer_close(&p);
    }
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        for (int64_t k = 0; k < n; k++) logits[k] = NAN;
        if (run_with(&s, same[i], logits, error) != ROCQ_OK) fail_msg("case %d: %s", (int)i, error);
        assert_memory_equal(logits, expected, (size_t)n * sizeof *logits);
    }
    assert_int_equal(run_with(&s, none, logits, NULL), ROCQ_OK); // the array does count
    const int64_t last = (int64_t)(N_PROMPT - 1) * s.n_vocab;
    assert_true(nmse(logits + last, expected + last, s.n_vocab) > 1e-3);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_not_equal(run_with(&s, wrong[i], logits, error), ROCQ_OK);
        assert_non_null(strstr(error, name));
    }
    free(logits);
    free(expected);
}

// What gemma4's files may say of single layers, and what its cache cannot do.
static void test_mixed(void **state) {
    (void)state;
    static const uint32_t u_4 = 4, u_3 = 3, u_0 = 0, u_64 = 64, u_heads[] = {1, 2, 1},
                          u_none[] = {1, 0, 1}, u_ff[] = {96, 0, 96};
    static const struct {
        key set;
        rocq_result result;
        const char *message;
    } cases[] = {
        {{"attention.shared_kv_layers", ROCQ_GGUF_U32, 0, &u_0}, ROCQ_E_NOT_FOUND,
         "blk.2.attn_k.weight is missing"},
        {{"attention.shared_kv_layers", ROCQ_GGUF_U32, 0, &u_3}, ROCQ_E_UNSUPPORTED,
         "gemma4.attention.shared_kv_layers is 3 of 3: layer 0 has no keys and values"},
        {{"attention.shared_kv_layers", ROCQ_GGUF_U32, 0, &u_4}, ROCQ_E_UNSUPPORTED,
         "gemma4.attention.shared_kv_layers is 4 of 3: layer 0"},
        {{"attention.head_count_kv", ROCQ_GGUF_U32, 3, u_heads}, ROCQ_E_SHAPE, "blk.1.attn_k"},
        {{"attention.head_count_kv", ROCQ_GGUF_U32, 3, u_none}, ROCQ_E_CORRUPT,
         "gemma4.attention.head_count_kv is 0 in layer 1, expected 1 to 1073741824"},
        {{"feed_forward_length", ROCQ_GGUF_U32, 3, u_ff}, ROCQ_E_CORRUPT,
         "gemma4.feed_forward_length is 0 in layer 1, expected 1 to 1073741824"},
        {{"attention.value_length_swa", ROCQ_GGUF_U32, 0, &u_64}, ROCQ_E_UNSUPPORTED,
         "value_length_swa is 64, expected 16, as attention.key_length_swa"},
        {{"attention.key_length_swa", ROCQ_GGUF_U32, 0, &u_0}, ROCQ_E_CORRUPT, "key_length_swa"},
        {{"rope.dimension_count_swa", ROCQ_GGUF_U32, 0, &u_64}, ROCQ_E_CORRUPT,
         "gemma4.rope.dimension_count_swa is 64, expected an even number up to 16"},
        {{"attention.sliding_window", ROCQ_GGUF_U32, 0, &u_0}, ROCQ_E_CORRUPT, "sliding_window"},
        {{"embedding_length_per_layer_input", ROCQ_GGUF_U32, 0, &u_64}, ROCQ_E_SHAPE,
         "per_layer_token_embd.weight"},
    };
    const model_spec s = {"mixed", "gemma4", SIZES(64, 2, 1, 32, 96, 301), .formats = f32,
                          GEMMA4(3, 2, 16), .n_shared_kv = 1, .n_apart = 32};
    const llama_options options = {.n_ctx = N_CTX};
    const key none = {0};
    int32_t prompt[N_PROMPT];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const key keys[] = {cases[i].set, none};
        char error[512];
        const rocq_result result = run_with(&s, keys, NULL, error);
        if (result != cases[i].result || !strstr(error, cases[i].message))
            fail_msg("%s, case %d: result %d, \"%s\"", keys[0].name, (int)i, (int)result, error);
    }
    write_model(&s, NULL);
    random_prompt(prompt, s.n_vocab, 5);
    ours o;
    ours_open(&o, model_path(s.name), 1, &options);
    ours_eval(&o, prompt, N_PROMPT, NULL);
    assert_int_equal(llama_forget(&o.m, 3, 4), ROCQ_E_UNSUPPORTED);
    assert_non_null(strstr(o.m.error, "its layers turn keys in different ways"));
    assert_int_equal(o.m.n_past, N_PROMPT);
    ours_close(&o);
}

// Adapters of random numbers, two at once, of other ranks, formats, alphas and scales: llama.cpp's
// logits over a prompt in batches and a run of single tokens. Switched off they change no bit.
static const model_spec adapted[] = {
    {"lora llama-F32", "llama", SIZES(256, 4, 2, 64, 320, 517), .formats = f32},
    {"lora llama-F16", "llama", SIZES(256, 8, 4, 32, 320, 771), .formats = f16, .tied = true},
    {"lora llama-Q4_K", "llama", SIZES(256, 8, 4, 64, 512, 1021), .formats = q4_K},
    {"lora llama-biases", "llama", SIZES(256, 4, 2, 64, 256, 517), .formats = f32, .biases = true},
    {"lora qwen3-Q8_0", "qwen3", SIZES(256, 7, 1, 64, 352, 707), .formats = q8_0, .tied = true},
    {"lora gemma2-F32", "gemma2", SIZES(256, 4, 2, 64, 256, 517), .formats = f32, GEMMA},
    {"lora gemma4-F32", "gemma4", SIZES(192, 6, 3, 64, 224, 333), .formats = f32,
     GEMMA4(3, 3, 32), .global_kv_heads = 2, .keys_as_values = true},
    {"lora gemma4moe-F32", "gemma4", SIZES(192, 6, 3, 64, 96, 333), .formats = f32,
     GEMMA4(2, 2, 32), .n_experts = 4, .n_used = 2, .n_shared = 224, .joined = true},
    {"lora phi-Q8_0", "phi3", SIZES(224, 7, 7, 32, 320, 301), .formats = q8_0, .n_rot = 24},
    {"lora lfm2-F32", "lfm2", SIZES(256, 4, 2, 64, 256, 517), .formats = f32, LFM2(3, 3)},
    {"lora qwen35-F32", "qwen35", SIZES(256, 4, 2, 64, 256, 517), .formats = f32,
     QWEN35(4, 4, 1, 3, 64)},
    {"lora gpt2-F32", "gpt2", SIZES(256, 4, 4, 64, 320, 517), .formats = f32},
    {"lora gpt2-Q4_0", "gpt2", SIZES(256, 8, 8, 32, 256, 909), .formats = q4_0, .tied = true},
};

enum { N_ADAPTED = sizeof adapted / sizeof *adapted, N_RUN = N_PROMPT + 4 };

// The prompt, then one token at a time.
static void eval_run(ours *o, const int32_t *tokens, float *logits) {
    o->m.n_past = 0;
    ours_eval(o, tokens, N_PROMPT, logits);
    for (int32_t i = N_PROMPT; i < N_RUN; i++) {
        ours_eval(o, &tokens[i], 1, logits + (int64_t)i * o->m.n_vocab);
    }
}

static void test_lora(void **state) {
    const model_spec *s = (const model_spec *)*state;
    const bool exact = s->formats[0] == ROCQ_F32 || s->formats[0] == ROCQ_F16;
    const double tolerance = exact ? 1e-5 : 1e-3;
    const int64_t n = (int64_t)N_RUN * s->n_vocab;
    float scales[2] = {2, -1.2f};
    char path[2][256];
    int32_t tokens[N_RUN];
    float *expected = floats(n), *base = floats(n), *logits = floats(n);
    rocq_gguf *file[2];
    ours o;
    if (!peer_open()) skip();
    write_model(s, peer.quantize);
    random_prompt(tokens, s->n_vocab, 7);
    for (int32_t i = N_PROMPT; i < N_RUN; i++) tokens[i] = tokens[i - N_PROMPT];
    const llama_options options = {.n_ctx = N_CTX, .n_batch = 16, .n_logits = 5,
                                   .kv_format = exact ? "f32" : "f16"};
    ours_open(&o, model_path(s->name), 2, &options);
    llama_lora loras[2];
    for (int i = 0; i < 2; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s %d", s->name, i);
        strcpy(path[i], model_path(name));
        model_write_lora(o.ctx, s, path[i], i ? 5 : 16, i ? 0.0f : 24.0f, 5 + (uint64_t)i);
        const rocq_gguf_desc from = {.path = path[i]};
        assert_int_equal(rocq_gguf_open(o.ctx, &file[i], &from), ROCQ_OK);
        loras[i].name = path[i];
        loras[i].file = file[i];
        loras[i].scale = scales[i];
    }
    peer_model p;
    peer_load(&p, model_path(s->name), N_CTX, exact ? 0 : 1);
    void *adapters[2];
    for (int i = 0; i < 2; i++) {
        adapters[i] = peer.llama_adapter_lora_init(p.model, path[i]);
        if (!adapters[i]) fail_msg("llama.cpp does not load %s:\n%s", path[i], peer.log);
    }
    eval_run(&o, tokens, base);
    if (llama_set_loras(&o.m, loras, 2) != ROCQ_OK) fail_msg("%s", o.m.error);
    for (int i = 0; i < 2; i++) rocq_gguf_close(&file[i]); // read by now
    double worst = 0;
    for (int which = 1; which < 4; which++) { // one, the other, both
        float now[2] = {which & 1 ? scales[0] : 0, which & 2 ? scales[1] : 0};
        for (int i = 0; i < 2; i++) {
            assert_int_equal(llama_scale_lora(&o.m, i, now[i]), ROCQ_OK);
        }
        assert_int_equal(peer.llama_set_adapters_lora(p.context, adapters, 2, now), 0);
        peer_forget(&p);
        peer_decode(&p, tokens, N_PROMPT, expected);
        for (int32_t i = N_PROMPT; i < N_RUN; i++) {
            peer_decode(&p, &tokens[i], 1, expected + (int64_t)i * s->n_vocab);
        }
        eval_run(&o, tokens, logits);
        for (int32_t i = 0; i < N_RUN; i++) {
            const int64_t at = (int64_t)i * s->n_vocab;
            const double e = nmse(logits + at, expected + at, s->n_vocab);
            if (!(e <= tolerance)) fail_msg("adapters %d, position %d: NMSE %g", which, i, e);
            assert_true(nmse(base + at, expected + at, s->n_vocab) > 0.003); // they matter
            if (e > worst) worst = e;
        }
    }
    printf("# %s: NMSE at most %.2g\n", s->name, worst);
    for (int i = 0; i < 2; i++) assert_int_equal(llama_scale_lora(&o.m, i, 0), ROCQ_OK);
    eval_run(&o, tokens, logits);
    assert_memory_equal(logits, base, (size_t)n * sizeof *logits);
    assert_int_equal(llama_set_loras(&o.m, NULL, 0), ROCQ_OK);
    for (int64_t i = 0; i < n; i++) logits[i] = NAN;
    eval_run(&o, tokens, logits);
    assert_memory_equal(logits, base, (size_t)n * sizeof *logits);
    peer_close(&p);
    ours_close(&o);
    free(logits);
    free(base);
    free(expected);
}

// Files that are no adapters of the model: one line, and what was there still works.
static void no_alpha(rocq_gguf_writer *w) {
    assert_int_equal(rocq_gguf_writer_set_str(w, "adapter.lora.alpha", "1"), ROCQ_OK);
}

static void no_lora(rocq_gguf_writer *w) {
    assert_int_equal(rocq_gguf_writer_set_str(w, "adapter.type", "con\ntrol"), ROCQ_OK);
}

static void test_wrong_loras(void **state) {
    (void)state;
    const model_spec s = {"wrong-lora", "llama", SIZES(64, 2, 1, 32, 96, 301), .formats = q8_0};
    model_spec cases[] = {s, s, s, s, s, s, s, s, s};
    static const char *const messages[] = {
        "general.architecture is \"qwen3\"", "is 4 x 64, expected 4 x 96",
        "of its 30 tensors 28 are", "alpha", "adapter.type is \"con?trol\"",
        "tensor blk.1.attn_v.weight.lora_b is missing",
        "tensor blk.0.attn_q.weight.lora_a is missing",
        "is 4 x 32, expected 5 x 32", "is 5 x 64, expected 4 x 64"};
    cases[0].arch = "qwen3";
    cases[1].n_ff = 64;
    cases[2].n_layers = 0; // with output.weight, of a model that is tied
    cases[3].edit = no_alpha;
    cases[4].edit = no_lora;
    cases[5].leave_out = "blk.1.attn_v.weight.lora_b";
    cases[6].leave_out = "blk.0.attn_q.weight.lora_a";
    cases[7].misshape = "blk.0.attn_k.weight.lora_a";
    cases[8].misshape = "blk.1.attn_q.weight.lora_b";
    enum { N_CASES = sizeof cases / sizeof *cases };
    model_spec model = s;
    model.tied = true;
    write_model(&model, NULL);
    const llama_options options = {.n_ctx = N_CTX, .n_logits = N_PROMPT};
    const int64_t n = (int64_t)N_RUN * s.n_vocab;
    float *expected = floats(n), *logits = floats(n);
    int32_t tokens[N_RUN];
    ours o;
    random_prompt(tokens, s.n_vocab, 8);
    for (int32_t i = N_PROMPT; i < N_RUN; i++) tokens[i] = tokens[i - N_PROMPT];
    ours_open(&o, model_path(s.name), 1, &options);
    const char *path = model_path("wrong-lora-adapter");
    char good[256];
    strcpy(good, path);
    model_write_lora(o.ctx, &model, good, 4, 8, 1);
    const rocq_gguf_desc from = {.path = good};
    llama_lora lora = {good, NULL, 1};
    rocq_gguf *file;
    assert_int_equal(rocq_gguf_open(o.ctx, &file, &from), ROCQ_OK);
    lora.file = file;
    if (llama_set_loras(&o.m, &lora, 1) != ROCQ_OK) fail_msg("%s", o.m.error);
    eval_run(&o, tokens, expected);
    for (int i = -3; i < N_CASES; i++) {
        rocq_gguf *wrong = NULL;
        const char *message = i == -3 ? "is no adapter" : i == -2 ? "there is no file" : "0 to 8";
        llama_lora two[9] = {lora, lora};
        int32_t count = i == -1 ? 9 : 2;
        if (i == -3) {
            const rocq_gguf_desc whole = {.path = model_path(s.name)}; // a model
            assert_int_equal(rocq_gguf_open(o.ctx, &wrong, &whole), ROCQ_OK);
        } else if (i >= 0) {
            char bad[256];
            strcpy(bad, model_path("wrong-lora-bad"));
            model_write_lora(o.ctx, &cases[i], bad, 4, 8, 1);
            const rocq_gguf_desc whole = {.path = bad};
            assert_int_equal(rocq_gguf_open(o.ctx, &wrong, &whole), ROCQ_OK);
            message = messages[i];
        }
        two[1].file = wrong;
        two[1].name = "the second";
        if (llama_set_loras(&o.m, two, count) == ROCQ_OK) fail_msg("case %d is accepted", i);
        if (!strstr(o.m.error, message)) fail_msg("case %d: \"%s\"", i, o.m.error);
        assert_true(i == -1 || strncmp(o.m.error, "the second: ", 12) == 0);
        assert_null(strchr(o.m.error, '\n'));
        eval_run(&o, tokens, logits);
        assert_memory_equal(logits, expected, (size_t)n * sizeof *logits);
        rocq_gguf_close(&wrong);
    }
    assert_int_equal(llama_scale_lora(&o.m, 1, 1), ROCQ_E_ARGUMENT);
    assert_int_equal(llama_scale_lora(&o.m, 0, NAN), ROCQ_E_ARGUMENT);
    rocq_gguf_close(&file);
    ours_close(&o);
    free(logits);
    free(expected);
}

typedef struct cache {
    const char *name, *format;
    int32_t type;     // ggml's
    double tolerance; // llama.cpp rounds queries to the format of the keys
    model_spec spec;
} cache;

static const cache caches[] = {
    {"cache in F16", "f16", 1, 1e-5,
     {"cache-F16", "llama", SIZES(256, 8, 4, 32, 256, 517), .formats = f32}},
    {"cache in BF16", "bf16", 30, 1e-4,
     {"cache-BF16", "qwen3", SIZES(256, 8, 4, 64, 256, 517), .formats = f32}},
    {"cache in Q8_0", "q8_0", 8, 1e-4,
     {"cache-Q8_0", "llama", SIZES(256, 4, 2, 64, 256, 517), .formats = f32}},
    {"cache in Q4_0", "q4_0", 2, 1e-3,
     {"cache-Q4_0", "gemma2", SIZES(256, 4, 2, 64, 256, 517), .formats = f32, GEMMA}},
};

enum { N_CACHES = sizeof caches / sizeof *caches };

static void test_cache(void **state) {
    const cache *c = (const cache *)*state;
    if (!peer_open()) skip();
    compare(&c->spec, c->format, c->type, c->tolerance);
}

// The NMSE that a quantized cache brings into the logits, over all positions, of keys with a few
// large elements: no more than 1.2 times llama.cpp's, which rotates keys and values too, and far
// less than llama.cpp's where it does not.
#define OUTLIERS .k_outlier = 40
static void test_outliers(void **state) {
    static const struct { const char *name; int32_t type; } formats[] = {{"q8_0", 8}, {"q4_0", 2}};
    static const model_spec models[] = {
        {"outliers-64", "qwen2", SIZES(448, 7, 1, 64, 352, 307), .formats = f32, OUTLIERS},
        {"outliers-128", "qwen2", SIZES(512, 4, 2, 128, 352, 307), .formats = f32, OUTLIERS}};
    (void)state;
    if (!peer_open()) skip();
    for (int i = 0; i < 4; i++) {
        const model_spec *s = &models[i / 2];
        const int64_t n = (int64_t)N_PROMPT * s->n_vocab;
        float *logits[5] = {floats(n), floats(n), floats(n), floats(n), floats(n)};
        int32_t prompt[N_PROMPT];
        random_prompt(prompt, s->n_vocab, 5);
        write_model(s, peer.quantize);
        for (int k = 0; k < 3; k++) { // llama.cpp: F32, rotated, not rotated
            peer_model p;
            if (k == 2) setenv("LLAMA_ATTN_ROT_DISABLE", "1", 1);
            peer_load(&p, model_path(s->name), N_CTX, k == 0 ? 0 : formats[i % 2].type);
            unsetenv("LLAMA_ATTN_ROT_DISABLE");
            peer_decode(&p, prompt, N_PROMPT, logits[k]);
            peer_close(&p);
        }
        for (int k = 3; k < 5; k++) { // rocq: F32, quantized
            const llama_options options = {.n_ctx = N_CTX, .n_logits = N_PROMPT,
                                           .kv_format = k == 3 ? "f32" : formats[i % 2].name};
            ours o;
            ours_open(&o, model_path(s->name), 2, &options);
            ours_eval(&o, prompt, N_PROMPT, logits[k]);
            ours_close(&o);
        }
        const double peer_error = nmse(logits[1], logits[0], n);
        const double plain = nmse(logits[2], logits[0], n), error = nmse(logits[4], logits[3], n);
        printf("# %s, KV in %s: NMSE %.3g, llama.cpp's %.3g and %.3g without rotation\n", s->name,
               formats[i % 2].name, error, peer_error, plain);
        assert_true(nmse(logits[3], logits[0], n) <= 1e-5);
        assert_true(error <= 1.2 * peer_error);
        assert_true(error <= 0.6 * plain);
        for (int k = 0; k < 5; k++) free(logits[k]);
    }
}

// Without llama.cpp: a prompt gives the same logits in one batch, in several, token by token, and
// after the cache was wound back; and a call that fails changes nothing.
static void test_batches(void **state) {
    model_spec s = *(const model_spec *)*state;
    char name[64];
    snprintf(name, sizeof name, "batches-%s", s.name);
    s.name = name;
    write_model(&s, NULL);
    const char *path = model_path(name);
    int32_t prompt[N_PROMPT];
    int64_t n = (int64_t)N_PROMPT * s.n_vocab;
    float *whole = floats(n), *other = floats(n), *last = floats(s.n_vocab);
    random_prompt(prompt, s.n_vocab, 5);

    ours o;
    llama_options options = {.n_ctx = N_PROMPT, .n_batch = N_PROMPT, .n_logits = N_PROMPT,
                             .kv_format = "f32"};
    ours_open(&o, path, 1, &options);
    ours_eval(&o, prompt, N_PROMPT, whole);
    ours_close(&o);

    // The number of threads changes no bit.
    ours_open(&o, path, 3, &options);
    ours_eval(&o, prompt, N_PROMPT, other);
    assert_memory_equal(whole, other, (size_t)n * sizeof *whole);
    ours_close(&o);

    // Nor do pages of the cache.
    options.kv_page = 7;
    ours_open(&o, path, 1, &options);
    ours_eval(&o, prompt, N_PROMPT, other);
    assert_memory_equal(whole, other, (size_t)n * sizeof *whole);
    ours_close(&o);

    options.n_batch = 7;
    options.n_logits = 3;
    ours_open(&o, path, 2, &options);
    ours_eval(&o, prompt, N_PROMPT, other);
    for (int32_t i = 0; i < N_PROMPT; i++)
        assert_true(nmse(other + (int64_t)i * s.n_vocab, whole + (int64_t)i * s.n_vocab,
                         s.n_vocab) < 1e-10);

    // Full: one more token must fail, and so must a token that is none, and leave all as it was.
    assert_int_equal(o.m.n_past, N_PROMPT);
    assert_int_equal(llama_eval(&o.m, prompt, 1, NULL), ROCQ_E_BOUNDS);
    assert_true(strlen(o.m.error) > 0);
    o.m.n_past = 20;
    if (o.m.row->deltas) { // which cannot go back so far
        o.m.n_past = 0;
        ours_eval(&o, prompt, 20, NULL);
    }
    int32_t bad[2] = {3, s.n_vocab};
    assert_int_equal(llama_eval(&o.m, bad, 2, other), ROCQ_E_BOUNDS);
    bad[1] = -1;
    assert_int_equal(llama_eval(&o.m, bad, 2, other), ROCQ_E_BOUNDS);
    assert_int_equal(o.m.n_past, 20);

    // From position 20 again, one by one.
    for (int32_t i = 20; i < N_PROMPT; i++) {
        ours_eval(&o, &prompt[i], 1, last);
        assert_true(nmse(last, whole + (int64_t)i * s.n_vocab, s.n_vocab) < 1e-10);
        assert_int_equal(ours_best(&o), best_of(last, s.n_vocab));
    }
    ours_close(&o);
    free(last);
    free(other);
    free(whole);
}

// A model that was warmed up has forgotten the step that it took for that; between tokens a warm-up
// changes nothing.
static void check_warm(const char *path, const llama_options *options, const int32_t *prompt,
                       const float *whole, size_t size) {
    const rocq_sample_params greedy = {.temperature = 0};
    int32_t token = -7;
    ours o;
    ours_open(&o, path, 2, options);
    for (int32_t i = 0; i < N_PROMPT; i++) {
        for (int k = 0; k < 2 && i < 2; k++) { // before any token, and with one
            if (llama_warm(&o.m) != ROCQ_OK) fail_msg("%s", o.m.error);
            assert_int_equal(o.m.n_past, i);
        }
        if (i == 0) assert_int_equal(llama_sample(&o.m, &greedy, &token), ROCQ_E_STATE);
        if (i == 1) assert_int_equal(llama_sample(&o.m, &greedy, &token), ROCQ_OK);
        ours_eval(&o, &prompt[i], 1, NULL);
    }
    assert_memory_equal(rocq_tensor_data(&o.m.last), whole, size);
    if (llama_warm(&o.m) != ROCQ_OK) fail_msg("%s", o.m.error);
    o.m.n_past = 0; // what has been read can still be drawn from
    if (llama_warm(&o.m) != ROCQ_OK) fail_msg("%s", o.m.error);
    assert_memory_equal(rocq_tensor_data(&o.m.last), whole, size);
    ours_close(&o);
}

// A recording that fails leaves no part of a step: the ops run one by one then, with the same bits.
static void check_failed_recording(const char *path, const llama_options *options,
                                   const int32_t *prompt, const float *whole, size_t size) {
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 2, .no_graphs = true};
    const rocq_gguf_desc from = {.path = path};
    ours o;
    memset(&o, 0, sizeof o);
    assert_int_equal(rocq_open(&o.ctx, &desc), ROCQ_OK);
    assert_int_equal(rocq_gguf_open(o.ctx, &o.file, &from), ROCQ_OK);
    if (llama_open(&o.m, o.ctx, o.file, options) != ROCQ_OK) fail_msg("%s", o.m.error);
    rocq_cancel(o.ctx);
    assert_int_equal(llama_warm(&o.m), ROCQ_E_CANCELLED);
    assert_null(o.m.step);
    assert_int_equal(rocq_sync(o.ctx), ROCQ_OK);
    for (int32_t i = 0; i < N_PROMPT; i++) ours_eval(&o, &prompt[i], 1, NULL);
    assert_memory_equal(rocq_tensor_data(&o.m.last), whole, size);
    ours_close(&o);
}

// A prompt in slices has the logits, bit for bit, that its tokens have one by one; also after one
// that was begun was dropped, in each of the ways to do so.
static void test_slices(void **state) {
    model_spec s = *(const model_spec *)*state;
    char name[64];
    snprintf(name, sizeof name, "slices-%s", s.name);
    s.name = name;
    write_model(&s, NULL);
    int32_t prompt[N_PROMPT];
    float *whole = floats(s.n_vocab);
    const size_t size = (size_t)s.n_vocab * sizeof *whole;
    random_prompt(prompt, s.n_vocab, 5);
    const llama_options options = {.n_ctx = N_PROMPT, .n_batch = 8};
    ours o;
    ours_open(&o, model_path(name), 2, &options);
    for (int32_t i = 0; i < N_PROMPT; i++) ours_eval(&o, &prompt[i], 1, NULL);
    memcpy(whole, rocq_tensor_data(&o.m.last), size);
    check_warm(model_path(name), &options, prompt, whole, size);
    check_failed_recording(model_path(name), &options, prompt, whole, size);
    rocq_stats before, after;
    assert_int_equal(rocq_get_stats(o.ctx, &before), ROCQ_OK);
    for (int way = 0; way < 6; way++) {
        int64_t done = 0;
        int n = 0;
        memset(rocq_tensor_data(&o.m.logits), 0xff, size);
        o.m.n_past = 0;
        while (done < N_PROMPT) {
            const int32_t us = way == 1 ? 30 : way == 2 ? 1000000 : 0;
            if (done == 5 && o.m.begun && n++ == 3) { // in the middle of token 5
                // Token 5 has taken the place of the state of a delta net after 4 tokens.
                if (way == 3) done = o.m.n_past = o.m.row->deltas ? 0 : 2;
                if (way == 4) {
                    o.m.n_past = o.m.row->deltas ? 0 : 4;
                    for (int k = o.m.n_past; k < 5; k++) ours_eval(&o, &prompt[k], 1, NULL);
                }
                if (way == 5) {
                    rocq_cancel(o.ctx);
                    assert_int_equal(llama_eval_for(&o.m, prompt, N_PROMPT, us, &done),
                                     ROCQ_E_CANCELLED);
                    assert_true(done == 5 && strstr(o.m.error, "cancel"));
                    assert_int_equal(rocq_sync(o.ctx), ROCQ_OK);
                }
            }
            if (llama_eval_for(&o.m, prompt, N_PROMPT, us, &done) != ROCQ_OK) {
                fail_msg("%s", o.m.error);
            }
            assert_int_equal(o.m.n_past, done);
            if (done == N_PROMPT) continue;
            const rocq_sample_params how = {.temperature = 0};
            int32_t token = -7; // not drawn from the logits in the middle
            assert_int_equal(llama_sample(&o.m, &how, &token), ROCQ_E_STATE);
            assert_int_equal(token, -7);
        }
        assert_memory_equal(rocq_tensor_data(&o.m.last), whole, size);
    }
    assert_int_equal(rocq_get_stats(o.ctx, &after), ROCQ_OK);
    assert_int_equal(after.n_allocs, before.n_allocs);
    int64_t done = 0;
    assert_int_equal(llama_eval_for(&o.m, prompt, 1, 0, &done), ROCQ_E_BOUNDS); // full
    o.m.n_past = 0;
    assert_int_equal(llama_eval_for(&o.m, prompt, 1, -1, &done), ROCQ_E_ARGUMENT);
    assert_int_equal(llama_eval_for(&o.m, prompt, 1, 0, NULL), ROCQ_E_ARGUMENT);
    assert_int_equal(llama_eval_for(&o.m, NULL, 1, 0, &done), ROCQ_E_ARGUMENT);
    done = 1;
    assert_int_equal(llama_eval_for(&o.m, prompt, 1, 0, &done), ROCQ_E_ARGUMENT);
    assert_int_equal(o.m.n_past, 0);
    ours_close(&o);
    free(whole);
}

// With one layer a token's keys and values depend on nothing but the token and its position, so
// that forgetting tokens is as if they had never been there.
static void test_forget(void **state) {
    model_spec s = *(const model_spec *)*state;
    char name[64];
    snprintf(name, sizeof name, "forget-%s", s.name);
    s.name = name;
    s.n_layers = 1;
    write_model(&s, NULL);
    enum { FIRST = 6, N = 12, REST = N_PROMPT - N };
    float *want = floats(s.n_vocab), *got = floats(s.n_vocab);
    int32_t prompt[N_PROMPT], left[REST];
    random_prompt(prompt, s.n_vocab, 6);
    memcpy(left, prompt, FIRST * sizeof *left);
    memcpy(left + FIRST, prompt + FIRST + N, (REST - FIRST) * sizeof *left);
    for (int32_t page = 0; page <= 8; page += page == 0 ? 6 : 2) { // FIRST and N are whole pages of
                                                                   // 6
        const llama_options options = {.n_ctx = N_PROMPT, .kv_format = "f32", .kv_page = page};
        ours o;
        ours_open(&o, model_path(s.name), 1, &options);
        ours_eval(&o, left, REST - 1, NULL);
        ours_eval(&o, left + REST - 1, 1, want);
        o.m.n_past = 0;
        ours_eval(&o, prompt, N_PROMPT, NULL);
        assert_int_equal(llama_forget(&o.m, FIRST, N_PROMPT), ROCQ_E_ARGUMENT);
        assert_true(strlen(o.m.error) > 0);
        assert_int_equal(o.m.n_past, N_PROMPT);
        assert_int_equal(llama_forget(&o.m, FIRST, N), ROCQ_OK);
        assert_int_equal(o.m.n_past, REST);
        o.m.n_past--;
        ours_eval(&o, left + REST - 1, 1, got);
        assert_true(nmse(got, want, s.n_vocab) < 1e-9);
        ours_close(&o);
    }
    free(got);
    free(want);
}

// A batch of more than LLAMA_BACK tokens that is cancelled, wherever that finds it, can be run
// again, and gives the bits that it would have given.
static void check_cancelled_batch(const model_spec *s) {
    enum { FIRST = 9, N = LLAMA_BACK + 20 };
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 2,
                            .run_tasks = cancelling_tasks};
    const rocq_gguf_desc from = {.path = model_path(s->name)};
    const llama_options options = {.n_ctx = FIRST + N, .n_batch = N};
    const size_t size = (size_t)s->n_vocab * sizeof(float);
    float *want = floats(s->n_vocab);
    int32_t text[FIRST + N];
    ours o;
    memset(&o, 0, sizeof o);
    cancel_at = -1;
    for (int32_t i = 0; i < FIRST + N; i++) text[i] = 7 * i % s->n_vocab;
    assert_int_equal(rocq_open(&o.ctx, &desc), ROCQ_OK);
    assert_int_equal(rocq_gguf_open(o.ctx, &o.file, &from), ROCQ_OK);
    if (llama_open(&o.m, o.ctx, o.file, &options) != ROCQ_OK) fail_msg("%s", o.m.error);
    to_cancel = o.ctx;
    ours_eval(&o, text, FIRST, NULL);
    n_runs = 0;
    ours_eval(&o, text + FIRST, N, NULL);
    const int64_t n = n_runs;
    assert_true(n > 10);
    memcpy(want, rocq_tensor_data(&o.m.last), size);
    for (int64_t at = -1; at < n; at++) { // -1: before the call
        o.m.n_past = 0;
        ours_eval(&o, text, FIRST, NULL);
        for (int i = 0; i < 2; i++) {
            n_runs = 0;
            cancel_at = at;
            if (at < 0) rocq_cancel(o.ctx);
            assert_int_equal(llama_eval(&o.m, text + FIRST, N, NULL), ROCQ_E_CANCELLED);
            assert_int_equal(rocq_sync(o.ctx), ROCQ_OK);
            assert_int_equal(o.m.n_past, FIRST);
        }
        cancel_at = -1;
        ours_eval(&o, text + FIRST, N, NULL);
        assert_memory_equal(rocq_tensor_data(&o.m.last), want, size);
    }
    ours_close(&o);
    free(want);
}

// What convolutions keep: a text goes on where they can, is refused where they cannot, and starts
// afresh at 0; also after tokens in its middle were forgotten.
static void test_convolutions(void **state) {
    (void)state;
    enum { N = 150 };
    const model_spec s = {"convolutions", "lfm2", SIZES(64, 2, 1, 32, 96, 301), .formats = f32,
                          LFM2(3, 3)};
    const llama_options options = {.n_ctx = N, .n_batch = 16, .kv_format = "f32"};
    int32_t text[N];
    float *want = floats(s.n_vocab), *got = floats(s.n_vocab);
    model_random r = {7};
    for (int32_t i = 0; i < N; i++) text[i] = (int32_t)(model_u64(&r) % (uint64_t)s.n_vocab);
    write_model(&s, NULL);
    ours o;
    ours_open(&o, model_path(s.name), 2, &options);
    ours_eval(&o, text, 101, NULL);
    for (int32_t back = 1; back <= LLAMA_BACK + 1; back += 9) { // 64 is one of them
        o.m.n_past = 0;
        ours_eval(&o, text, 100, NULL);
        ours_eval(&o, text + 100, 1, want);
        o.m.n_past = 101 - back;
        ours_eval(&o, text + 101 - back, back - 1 > 0 ? back - 1 : 1, NULL);
        o.m.n_past = 100;
        ours_eval(&o, text + 100, 1, got);
        assert_true(nmse(got, want, s.n_vocab) < 1e-10);
    }
    o.m.n_past = 101 - LLAMA_BACK - 1;
    assert_int_equal(llama_eval(&o.m, text, 1, got), ROCQ_E_UNSUPPORTED);
    assert_non_null(strstr(o.m.error, "is 36: a lfm2 model can go on from 37 to 101, or from 0"));
    o.m.n_past = 101;

    assert_int_equal(llama_forget(&o.m, 99, 1), ROCQ_E_UNSUPPORTED);
    assert_non_null(strstr(o.m.error, "still read the newest 2 tokens"));
    assert_int_equal(llama_forget(&o.m, 98, 1), ROCQ_OK);
    o.m.n_past = 0;
    ours_eval(&o, text, 101, NULL);
    assert_int_equal(llama_forget(&o.m, 10, 60), ROCQ_OK);
    assert_int_equal(o.m.n_past, 41);
    ours_eval(&o, text + 101, 20, NULL);
    ours_eval(&o, text + 121, 1, want);
    o.m.n_past = 50; // within what is kept, behind what is gone
    ours_eval(&o, text + 110, 11, NULL);
    ours_eval(&o, text + 121, 1, got);
    assert_true(nmse(got, want, s.n_vocab) < 1e-10);
    o.m.n_past = 11; // where two tokens before are not those of the cache
    assert_int_equal(llama_eval(&o.m, text, 1, got), ROCQ_E_UNSUPPORTED);
    o.m.n_past = 12;
    ours_eval(&o, text, 1, got);
    ours_close(&o);
    check_cancelled_batch(&s);
    free(got);
    free(want);
}

// What delta nets keep: a text goes on from its end, from where the last batch began, as often as
// one likes and with the same bits, or from 0; from elsewhere it does not.
static void test_deltas(void **state) {
    (void)state;
    enum { N = 150 };
    const model_spec s = {"deltas", "qwen35", SIZES(64, 2, 1, 32, 96, 301), .formats = f32,
                          QWEN35(4, 4, 1, 2, 32)};
    const llama_options options = {.n_ctx = N, .n_batch = 80, .kv_format = "f32"};
    const size_t size = (size_t)s.n_vocab * sizeof(float);
    int32_t text[N];
    float *want = floats(s.n_vocab), *got = floats(s.n_vocab);
    model_random r = {7};
    for (int32_t i = 0; i < N; i++) text[i] = (int32_t)(model_u64(&r) % (uint64_t)s.n_vocab);
    write_model(&s, NULL);
    ours o;
    ours_open(&o, model_path(s.name), 2, &options);
    ours_eval(&o, text, 40, NULL);
    ours_eval(&o, text + 40, 1, want);
    for (int i = 0; i < 3; i++) { // another token in between
        o.m.n_past = 40;
        ours_eval(&o, text + i, 1, got);
        assert_memory_not_equal(want, got, size);
        o.m.n_past = 40;
        ours_eval(&o, text + 40, 1, got);
        assert_memory_equal(want, got, size);
    }
    o.m.n_past = 40;
    ours_eval(&o, text + 40, 20, NULL);
    ours_eval(&o, text + 60, 30, NULL);
    o.m.n_past = 60;
    ours_eval(&o, text + 60, 29, NULL);
    ours_eval(&o, text + 89, 1, want);
    o.m.n_past = 0;
    for (int32_t i = 0; i < 90; i++) ours_eval(&o, text + i, 1, got);
    assert_true(nmse(got, want, s.n_vocab) < 1e-10);
    for (int32_t past = 1; past < 100; past++) {
        if (past == 89 || past == 90) continue;
        o.m.n_past = past;
        assert_int_equal(llama_eval(&o.m, text, 1, got), ROCQ_E_UNSUPPORTED);
        assert_non_null(strstr(o.m.error, "a qwen35 model can go on from 90, from"));
    }
    o.m.n_past = 90;
    assert_int_equal(llama_forget(&o.m, 10, 5), ROCQ_E_UNSUPPORTED);
    assert_non_null(strstr(o.m.error, "cannot move up: its states hold all of them"));
    o.m.n_past = 89;
    ours_eval(&o, text + 89, 1, got);
    o.m.n_past = 0; // a batch of more than LLAMA_BACK: its beginning is out of reach
    ours_eval(&o, text, 5, NULL);
    ours_eval(&o, text + 5, 66, NULL);
    o.m.n_past = 5;
    assert_int_equal(llama_eval(&o.m, text, 1, got), ROCQ_E_UNSUPPORTED);
    ours_close(&o);
    check_cancelled_batch(&s);
    free(got);
    free(want);
}

// The shipped model with its weights decoded to F32, where both programs compute exactly.
static const char *decode_demo(char path[256]) {
    rocq_ctx *ctx = NULL;
    rocq_gguf *file = NULL;
    rocq_gguf_writer *w = NULL;
    strcpy(path, model_path("demo-decoded"));
    const rocq_gguf_desc from = {.path = DEMO};
    const rocq_gguf_writer_desc to = {.path = path};
    assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
    assert_int_equal(rocq_gguf_open(ctx, &file, &from), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_open(ctx, &w, &to), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_set_from(w, file), ROCQ_OK);
    rocq_gguf_tensor t;
    for (int64_t i = 0; i < rocq_gguf_tensor_count(file); i++) {
        char name[64];
        assert_int_equal(rocq_gguf_tensor_at(file, i, &t), ROCQ_OK);
        snprintf(name, sizeof name, "%.*s", (int)t.name.length, t.name.data);
        assert_int_equal(rocq_gguf_writer_add_tensor(w, name, ROCQ_F32, t.n_dims, t.ne), ROCQ_OK);
    }
    for (int64_t i = 0; i < rocq_gguf_tensor_count(file); i++) {
        assert_int_equal(rocq_gguf_tensor_at(file, i, &t), ROCQ_OK);
        int64_t n = t.ne[0] * t.ne[1];
        void *bytes = malloc((size_t)t.size);
        float *values = floats(n);
        assert_non_null(bytes);
        assert_int_equal(rocq_gguf_read(ctx, file, &t, bytes), ROCQ_OK);
        assert_int_equal(rocq_dequantize(t.format, values, bytes, n), ROCQ_OK);
        assert_int_equal(rocq_gguf_writer_write(w, values, n * (int64_t)sizeof *values), ROCQ_OK);
        free(values);
        free(bytes);
    }
    assert_int_equal(rocq_gguf_writer_close(&w), ROCQ_OK);
    rocq_gguf_close(&file);
    rocq_close(&ctx);
    return path;
}

static void softmax(float *p, const float *x, int32_t n) {
    double max = x[best_of(x, n)], sum = 0;
    for (int32_t i = 0; i < n; i++) sum += exp(x[i] - max);
    for (int32_t i = 0; i < n; i++) p[i] = (float)(exp(x[i] - max) / sum);
}

enum { DEMO_CTX = 256, DEMO_RUN = 40, N_DEMO_PROMPTS = 3 };

// What one program thinks of one text: for each position the logits and the probabilities.
typedef struct opinion {
    float *logits, *p;
} opinion;

static opinion opinion_new(int32_t n_vocab) {
    opinion o = {floats((int64_t)DEMO_CTX * n_vocab), floats((int64_t)DEMO_CTX * n_vocab)};
    return o;
}

static void opinion_free(opinion *o) {
    free(o->logits);
    free(o->p);
}

// The shipped model on the example's prompts, each with the greedy run of llama.cpp behind it. Four
// ways: both programs, as shipped and decoded. Decoded, all must agree. As shipped, llama.cpp
// rounds activations in blocks of 256, and is then further from the decoded model than the
// tolerance that random models keep; so the probabilities are compared over the whole text, our
// distance from the decoded model must be no larger than llama.cpp's, and our greedy token may
// differ only where the lead of llama.cpp's is within the noise.
static void test_demo(void **state) {
    (void)state;
    if (!peer_open()) skip();
    char decoded[256];
    decode_demo(decoded);
    peer_model p[2];
    ours o[2];
    const llama_options options[2] = {{.n_ctx = DEMO_CTX}, {.n_ctx = DEMO_CTX, .kv_format = "f32"}};
    for (int32_t k = 0; k < 2; k++) { // as shipped with an F16 cache; decoded with an F32 cache
        peer_load(&p[k], k ? decoded : DEMO, DEMO_CTX, k ? 0 : 1);
        ours_open(&o[k], k ? decoded : DEMO, 2, &options[k]);
    }
    int32_t n_vocab = p[0].n_vocab, n_prompts = 0, n_tokens = 0, n_same = 0;
    assert_int_equal(o[0].m.n_vocab, n_vocab);
    opinion theirs[2] = {opinion_new(n_vocab), opinion_new(n_vocab)};
    opinion mine[2] = {opinion_new(n_vocab), opinion_new(n_vocab)};
    double worst = 0, pair = 0, our_distance = 0, their_distance = 0;

    char line[1000];
    FILE *prompts = fopen("examples/prompts.txt", "r");
    assert_non_null(prompts);
    while (fgets(line, sizeof line, prompts)) {
        line[strcspn(line, "\n")] = 0;
        int32_t tokens[DEMO_CTX], size = (int32_t)strlen(line);
        if (size > 2 && strcmp(line + size - 2, "\\n") == 0) line[--size - 1] = '\n'; // an escape
        int32_t n_prompt = peer.llama_tokenize(p[0].vocab, line, size, tokens, DEMO_CTX - DEMO_RUN,
                                               true, true), n = n_prompt;
        assert_true(n > 0);
        peer_forget(&p[1]);
        peer_decode(&p[1], tokens, n, theirs[1].logits);
        for (; n < n_prompt + DEMO_RUN; n++) { // the run, by the decoded model
            tokens[n] = best_of(theirs[1].logits + (int64_t)(n - 1) * n_vocab, n_vocab);
            peer_decode(&p[1], &tokens[n], 1, theirs[1].logits + (int64_t)n * n_vocab);
        }
        peer_forget(&p[0]);
        peer_decode(&p[0], tokens, n, theirs[0].logits);
        o[0].m.n_past = o[1].m.n_past = 0;
        ours_eval(&o[0], tokens, n, mine[0].logits);
        ours_eval(&o[1], tokens, n_prompt, mine[1].logits);
        for (int32_t i = n_prompt; i < n; i++) { // greedy by itself
            assert_int_equal(ours_best(&o[1]), tokens[i]);
            ours_eval(&o[1], &tokens[i], 1, mine[1].logits + (int64_t)i * n_vocab);
        }
        for (int32_t i = 0; i < n; i++) {
            int64_t at = (int64_t)i * n_vocab;
            double e = nmse(mine[1].logits + at, theirs[1].logits + at, n_vocab);
            if (!(e <= 1e-5)) fail_msg("decoded, position %d of \"%s\": NMSE %g", i, line, e);
            if (e > worst) worst = e;
            for (int32_t k = 0; k < 2; k++) {
                softmax(theirs[k].p + at, theirs[k].logits + at, n_vocab);
                softmax(mine[k].p + at, mine[k].logits + at, n_vocab);
            }
            e = nmse(mine[0].logits + at, theirs[0].logits + at, n_vocab);
            int32_t choice = best_of(mine[0].logits + at, n_vocab);
            bool same = choice == best_of(theirs[0].logits + at, n_vocab);
            n_tokens++;
            n_same += same;
            if (!same && !(lead_of(theirs[0].logits + at, n_vocab) <= clear_lead(e)))
                fail_msg("position %d of \"%s\": token %d, clearly not llama.cpp's", i, line,
                         choice);
        }
        pair += nmse(mine[0].p, theirs[0].p, n * n_vocab) / N_DEMO_PROMPTS;
        our_distance += nmse(mine[0].p, theirs[1].p, n * n_vocab) / N_DEMO_PROMPTS;
        their_distance += nmse(theirs[0].p, theirs[1].p, n * n_vocab) / N_DEMO_PROMPTS;
        n_prompts++;
    }
    fclose(prompts);
    assert_int_equal(n_prompts, N_DEMO_PROMPTS);
    printf("# shipped model, decoded: NMSE at most %.2g; as shipped, probabilities: NMSE %.2g; "
           "from the "
           "decoded model %.2g, llama.cpp %.2g; greedy tokens equal: %d of %d\n",
           worst, pair, our_distance, their_distance, n_same, n_tokens);
    assert_true(pair <= 1e-3);
    assert_true(our_distance <= their_distance);
    assert_true(n_same >= 0.95 * n_tokens);
    for (int32_t k = 0; k < 2; k++) {
        opinion_free(&mine[k]);
        opinion_free(&theirs[k]);
        ours_close(&o[k]);
        peer_close(&p[k]);
    }
}

// What test_saved takes: every family in every format that rocq and llama.cpp both have, and those
// of the models above that compute exactly.
enum { N_FAMILIES = 6, N_SAVED = N_FAMILIES * N_FORMATS + N_SPECS };

// A shared expert that lacks one of its matrices, or its gate, would compute something else; and
// layers that are not read count too, or looking for their tensors could take hours.
static void test_forged(void **state) {
    (void)state;
    static const char *const parts[] = {"gate", "up", "down", "gate_inp"};
    static const uint32_t n_all = 1u << 30, n_ahead = (1u << 30) - 2;
    static const key none = {0}, many[] = {{"block_count", ROCQ_GGUF_U32, 0, &n_all},
                                           {"nextn_predict_layers", ROCQ_GGUF_U32, 0, &n_ahead},
                                           {0}};
    const model_spec mixtures[] = {
        {"forged", "qwen35moe", SIZES(64, 2, 1, 32, 96, 301), .formats = f32,
         QWEN35(2, 2, 1, 2, 32), .n_experts = 4, .n_used = 2, .n_shared = 64},
        {"forged", "granitemoe", SIZES(64, 2, 1, 32, 96, 301), .formats = f32, .n_experts = 4,
         .n_used = 2, .n_shared = 64}};
    char error[512], name[64], message[160];
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < (k ? 3 : 4); i++) {
            model_spec s = mixtures[k];
            snprintf(name, sizeof name, "blk.1.ffn_%s_shexp.weight", parts[i]);
            snprintf(message, sizeof message, "tensor %s is missing, expected 64 x %d x 1", name,
                     i == 3 ? 1 : 64);
            s.leave_out = name;
            const key scale[] = {{"logit_scale", ROCQ_GGUF_F32, 0, (const float[]){1}}, none};
            assert_int_equal(run_with(&s, scale, NULL, error), ROCQ_E_NOT_FOUND);
            assert_non_null(strstr(error, message));
        }
    }
    assert_int_equal(run_with(&mixtures[0], many, NULL, error), ROCQ_E_CORRUPT);
    assert_string_equal(error, "qwen35moe.block_count is 1073741824, expected 1 to 1024");
}

static void test_expert_memory(void **state) {
    (void)state;
    static const char *const names[] = {"qwen3moe-Q8_0", "gpt-oss-MXFP4", "lfm2moe-F32",
                                        "gemma4moe-F32", "qwen35moe-F32"};
    for (int k = 0; k < 5; k++) {
        bool found = false;
        for (int32_t i = 0; i < N_SPECS; i++) {
            if (strcmp(names[k], specs[i].name) != 0) continue;
            write_model(&specs[i], NULL);
            for (int32_t n_threads = 1; n_threads < 4; n_threads += 2) {
                const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = n_threads,
                                        .no_graphs = n_threads > 1};
                rocq_ctx *ctx = NULL;
                assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
                check_expert_memory(ctx, model_path(names[k]), false);
                rocq_close(&ctx);
            }
            found = true;
        }
        assert_true(found);
    }
}

// Weights in the file, interleaved, with factors for two lengths, scaled when opened, with states
// instead of a cache, in experts with and without a budget.
static void test_sharing(void **state) {
    static const char *const names[] = {
        "llama-Q8_0", "llama-Q4_K", "llama-factors", "phi-long", "qwen3-F32", "gemma2-F32",
        "gemma4-F32", "gemma4moe-F32", "granite-F32", "lfm2-F32", "qwen35-F32", "qwen35moe-F32",
        "qwen3moe-Q8_0", "gpt-oss-MXFP4", "gpt2-F32"};
    enum { N = sizeof names / sizeof *names };
    int n_found = 0;
    (void)state;
    for (int k = 0; k < N; k++) {
        for (int32_t i = 0; i < N_SPECS; i++) {
            const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1 + k % 2};
            rocq_ctx *ctx = NULL;
            if (strcmp(names[k], specs[i].name) != 0) continue;
            n_found++;
            write_model(&specs[i], NULL);
            assert_int_equal(rocq_open(&ctx, &desc), ROCQ_OK);
            check_sharing(ctx, model_path(names[k]), 0);
            if (specs[i].n_experts > 0) check_sharing(ctx, model_path(names[k]), 300000);
            rocq_close(&ctx);
        }
    }
    assert_int_equal(n_found, N);
}

// An adapter's scale that changes in the middle of a token: the token begins anew.
static void test_scaled_slices(void **state) {
    const model_spec s = {"scaled", "qwen3", SIZES(64, 2, 1, 32, 96, 301), .formats = q8_0};
    const llama_options options = {.n_ctx = N_CTX};
    const size_t size = (size_t)s.n_vocab * sizeof(float);
    float *want = floats(s.n_vocab);
    int32_t tokens[N_PROMPT];
    rocq_gguf *file;
    ours o;
    (void)state;
    write_model(&s, NULL);
    random_prompt(tokens, s.n_vocab, 8);
    ours_open(&o, model_path(s.name), 2, &options);
    const rocq_gguf_desc from = {.path = model_path("scaled adapter")};
    model_write_lora(o.ctx, &s, from.path, 4, 8, 5);
    assert_int_equal(rocq_gguf_open(o.ctx, &file, &from), ROCQ_OK);
    const llama_lora lora = {"scaled", file, 1};
    assert_int_equal(llama_set_loras(&o.m, &lora, 1), ROCQ_OK);
    for (int way = 0; way < 2; way++) {
        int64_t done = 0;
        o.m.n_past = 0;
        assert_int_equal(llama_scale_lora(&o.m, 0, 1), ROCQ_OK);
        ours_eval(&o, tokens, 7, NULL);
        for (int i = 0; way == 1 && i < 9; i++) {
            assert_int_equal(llama_eval_for(&o.m, tokens + 7, 1, 0, &done), ROCQ_OK);
            assert_int_equal(done, 0);
        }
        assert_int_equal(llama_scale_lora(&o.m, 0, -2), ROCQ_OK);
        if (way == 0) ours_eval(&o, tokens + 7, 1, NULL);
        while (way == 1 && done == 0) {
            assert_int_equal(llama_eval_for(&o.m, tokens + 7, 1, 0, &done), ROCQ_OK);
        }
        if (way == 0) memcpy(want, rocq_tensor_data(&o.m.last), size);
        assert_memory_equal(rocq_tensor_data(&o.m.last), want, size);
    }
    rocq_gguf_close(&file);
    ours_close(&o);
    free(want);
}

// Adapters of one model are not those of another with the same weights.
static void test_sharing_adapters(void **state) {
    enum { N = 2 };
    const model_spec s = {"shared", "qwen3", SIZES(64, 2, 1, 32, 96, 301), .formats = q8_0};
    const size_t size = (size_t)N_RUN * (size_t)s.n_vocab * sizeof(float);
    float *plain = floats(N_RUN * s.n_vocab), *logits = floats(N_RUN * s.n_vocab), *want[N];
    llama_options options = {.n_ctx = N_CTX, .n_batch = 16, .n_logits = 5};
    int32_t tokens[N_RUN];
    rocq_gguf *file[N];
    llama_lora loras[N];
    ours o, other;
    (void)state;
    write_model(&s, NULL);
    random_prompt(tokens, s.n_vocab, 7);
    for (int32_t i = N_PROMPT; i < N_RUN; i++) tokens[i] = tokens[i - N_PROMPT];
    ours_open(&o, model_path(s.name), 1, &options);
    eval_run(&o, tokens, plain);
    for (int i = 0; i < N; i++) {
        const rocq_gguf_desc from = {.path = model_path(i ? "shared 1" : "shared 0")};
        model_write_lora(o.ctx, &s, from.path, 4, 8, 5 + (uint64_t)i);
        assert_int_equal(rocq_gguf_open(o.ctx, &file[i], &from), ROCQ_OK);
        loras[i].name = from.path;
        loras[i].file = file[i];
        loras[i].scale = 1;
        want[i] = floats(N_RUN * s.n_vocab);
        assert_int_equal(llama_set_loras(&o.m, &loras[i], 1), ROCQ_OK);
        eval_run(&o, tokens, want[i]);
        assert_true(nmse(want[i], plain, s.n_vocab) > 0.003);
    }
    assert_int_equal(llama_set_loras(&o.m, NULL, 0), ROCQ_OK);
    other = o;
    options.share = &o.m;
    assert_int_equal(llama_open(&other.m, o.ctx, o.file, &options), ROCQ_OK);
    for (int way = 0; way < 4; way++) { // of the other, then of both, of the first, then it is gone
        if (way == 0) assert_int_equal(llama_set_loras(&other.m, &loras[0], 1), ROCQ_OK);
        if (way == 1) assert_int_equal(llama_set_loras(&o.m, &loras[1], 1), ROCQ_OK);
        if (way == 2) assert_int_equal(llama_set_loras(&other.m, NULL, 0), ROCQ_OK);
        if (way == 3) {
            llama_close(&o.m);
        } else {
            eval_run(&o, tokens, logits);
            assert_memory_equal(logits, way == 0 ? plain : want[1], size);
        }
        eval_run(&other, tokens, logits);
        assert_memory_equal(logits, way < 2 ? want[0] : plain, size);
    }
    llama_close(&other.m);
    for (int i = 0; i < N; i++) {
        rocq_gguf_close(&file[i]);
        free(want[i]);
    }
    ours_close(&o);
    free(logits);
    free(plain);
}

static void *host_alloc(size_t size, void *user) {
    (void)user;
    return counted_malloc(size);
}

static void host_free(void *block, size_t size, void *user) {
    (void)size;
    (void)user;
    counted_free(block);
}

// Whether the failure is this one, and nothing is left of it, either in the model or of weights.
static void check_refused(llama_model *m, rocq_result result, rocq_result want, const char *why) {
    static const llama_model closed;
    const size_t after = offsetof(llama_model, error) + sizeof m->error;
    assert_int_equal(result, want);
    if (!strstr(m->error, why)) fail_msg("\"%s\" does not say: %s", m->error, why);
    assert_memory_equal(m, &closed, offsetof(llama_model, error));
    assert_memory_equal((char *)m + after, (const char *)&closed + after, sizeof *m - after);
}

// What cannot be shared, and every allocation denied in turn: the other model is as it was.
static void test_sharing_fails(void **state) {
    const model_spec s = {"unshared", "gpt2", SIZES(64, 2, 2, 32, 96, 301), .formats = q4_0};
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1,
                            .allocator = {host_alloc, host_free, NULL}};
    const rocq_gguf_desc from = {.path = model_path(s.name)};
    const llama_options plain = {.n_ctx = 16, .interleave = 1};
    static llama_model a, b; // closed
    llama_options options = plain;
    float *want = floats(s.n_vocab);
    rocq_ctx *ctx[2] = {NULL, NULL};
    rocq_gguf *file[2] = {NULL, NULL};
    int32_t token = 5;
    (void)state;
    write_model(&s, NULL);
    fail_at = -1;
    for (int i = 0; i < 2; i++) assert_int_equal(rocq_open(&ctx[i], &desc), ROCQ_OK);
    for (int i = 0; i < 2; i++) assert_int_equal(rocq_gguf_open(ctx[0], &file[i], &from), ROCQ_OK);
    assert_int_equal(rocq_reserve(ctx[0], 1 << 20), ROCQ_OK); // which stays, whatever fails
    for (int sharing = 0; sharing < 2; sharing++) { // also of the one that loads
        llama_model *m = sharing ? &b : &a;
        rocq_result result = ROCQ_E_MEMORY;
        options.share = sharing ? &a : NULL;
        for (int64_t i = 0; result != ROCQ_OK; i++) {
            const int64_t live = n_live;
            fail_at = n_calls + i;
            result = llama_open(m, ctx[0], file[0], &options);
            fail_at = -1;
            if (result != ROCQ_OK) check_refused(m, result, ROCQ_E_MEMORY, "memory");
            else assert_true(i > 5);
            assert_true(result == ROCQ_OK || n_live == live);
            assert_int_equal(sharing ? *a.n_users : 1, sharing && result == ROCQ_OK ? 2 : 1);
        }
        if (sharing) continue;
        assert_int_equal(llama_eval(&a, &token, 1, NULL), ROCQ_OK);
        memcpy(want, rocq_tensor_data(&a.last), (size_t)s.n_vocab * sizeof *want);
    }
    llama_close(&b);
    const int64_t live = n_live;
    check_refused(&b, llama_open(&b, ctx[1], file[0], &options), ROCQ_E_ARGUMENT, "context");
    check_refused(&b, llama_open(&b, ctx[0], file[1], &options), ROCQ_E_ARGUMENT, "another file");
    check_refused(&b, llama_open(&b, ctx[0], NULL, &options), ROCQ_E_ARGUMENT, "no file");
    options.n_ctx = a.n_ctx_train + 1;
    check_refused(&b, llama_open(&b, ctx[0], file[0], &options), ROCQ_E_BOUNDS, "positions");
    options.n_ctx = 16;
    options.kv_format = "q3_K";
    check_refused(&b, llama_open(&b, ctx[0], file[0], &options), ROCQ_E_FORMAT, "q3_K");
    options.kv_format = NULL;
    options.share = &b;
    check_refused(&b, llama_open(&b, ctx[0], file[0], &options), ROCQ_E_ARGUMENT, "itself");
    const llama_model closed = b;
    options.share = &closed;
    check_refused(&b, llama_open(&b, ctx[0], file[0], &options), ROCQ_E_STATE, "not open");
    options.share = &a;
    assert_int_equal(llama_open(&a, ctx[0], file[0], &options), ROCQ_E_ARGUMENT); // stays open
    assert_true(n_live == live && *a.n_users == 1);
    a.n_past = 0;
    assert_int_equal(llama_eval(&a, &token, 1, NULL), ROCQ_OK);
    assert_memory_equal(want, rocq_tensor_data(&a.last), (size_t)s.n_vocab * sizeof *want);
    llama_close(&a);
    for (int i = 0; i < 2; i++) rocq_gguf_close(&file[i]);
    for (int i = 0; i < 2; i++) rocq_close(&ctx[i]);
    assert_int_equal(n_live, 0);
    free(want);
}

// Adapters for which there is no memory leave the model as it was, with the logits to draw from.
static void test_loras_fail(void **state) {
    const model_spec s = {"unadapted", "gpt2", SIZES(64, 2, 2, 32, 96, 301), .formats = q4_0};
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1,
                            .allocator = {host_alloc, host_free, NULL}};
    const rocq_gguf_desc from = {.path = model_path(s.name)};
    const llama_options options = {.n_ctx = 16};
    const int32_t token = 5;
    rocq_result result = ROCQ_E_MEMORY;
    rocq_gguf *file;
    ours o;
    (void)state;
    write_model(&s, NULL);
    fail_at = -1;
    assert_int_equal(rocq_open(&o.ctx, &desc), ROCQ_OK);
    assert_int_equal(rocq_gguf_open(o.ctx, &o.file, &from), ROCQ_OK);
    assert_int_equal(llama_open(&o.m, o.ctx, o.file, &options), ROCQ_OK);
    const rocq_gguf_desc adapter = {.path = model_path("unadapted adapter")};
    model_write_lora(o.ctx, &s, adapter.path, 4, 8, 5);
    assert_int_equal(rocq_gguf_open(o.ctx, &file, &adapter), ROCQ_OK);
    const llama_lora lora = {"adapter", file, 1};
    assert_int_equal(rocq_reserve(o.ctx, 1 << 20), ROCQ_OK); // which stays, whatever fails
    ours_eval(&o, &token, 1, NULL);
    const int32_t best = ours_best(&o);
    for (int64_t i = 0; result != ROCQ_OK; i++) {
        const int64_t live = n_live, bytes = o.m.scratch_bytes, op_bytes = o.m.op_scratch;
        fail_at = n_calls + i;
        result = llama_set_loras(&o.m, &lora, 1);
        fail_at = -1;
        if (result == ROCQ_OK) continue;
        assert_int_equal(result, ROCQ_E_MEMORY);
        assert_int_equal(n_live, live);
        assert_int_equal(o.m.scratch_bytes, bytes);
        assert_int_equal(o.m.op_scratch, op_bytes);
        assert_int_equal(ours_best(&o), best);
    }
    rocq_gguf_close(&file);
    ours_close(&o);
    assert_int_equal(n_live, 0);
}

// Interleaved or in the file, the weights give the same logits. They are left in the file where the
// caller says so, and where there is a budget, which a model in its file does not count against.
static void test_interleaved(void **state) {
    enum { N = 24 };
    static const rocq_format coded[] = {ROCQ_Q4_0, ROCQ_Q8_0, ROCQ_Q5_0, ROCQ_I32};
    const model_spec s = {"interleaved", "llama", SIZES(64, 2, 2, 32, 96, 304), .formats = coded};
    float *logits[2] = {floats((int64_t)N * s.n_vocab), floats((int64_t)N * s.n_vocab)};
    int32_t prompt[N];
    (void)state;
    for (int32_t i = 0; i < N; i++) prompt[i] = 5 * i % s.n_vocab;
    write_model(&s, NULL);
    for (int i = 0; i < 2; i++) {
        const llama_options options = {.n_ctx = N, .n_logits = N, .interleave = i ? 1 : -1};
        ours o;
        ours_open(&o, model_path(s.name), 2, &options);
        assert_true(i || o.m.weights.size == 0);
        ours_eval(&o, prompt, N - 1, logits[i]); // tiles, then a column
        ours_eval(&o, prompt + N - 1, 1, logits[i] + (int64_t)(N - 1) * s.n_vocab);
        ours_close(&o);
    }
    assert_memory_equal(logits[0], logits[1], (size_t)N * (size_t)s.n_vocab * sizeof(float));
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1, .memory_budget = 1 << 24};
    const rocq_gguf_desc from = {.path = model_path(s.name)};
    const llama_options options = {.n_ctx = N};
    ours o;
    memset(&o, 0, sizeof o);
    assert_int_equal(rocq_open(&o.ctx, &desc), ROCQ_OK);
    assert_int_equal(rocq_gguf_open(o.ctx, &o.file, &from), ROCQ_OK);
    assert_int_equal(llama_open(&o.m, o.ctx, o.file, &options), ROCQ_OK);
    assert_int_equal(o.m.weights.size, 0);
    ours_close(&o);
    free(logits[0]);
    free(logits[1]);
}

// Tokens that a file says are never drawn: greedy runs take the best of the others. Numbers of no
// token do no harm, and another type is refused.
static void test_suppressed(void **state) {
    (void)state;
    enum { N_BEST = 5 };
    static const char name[] = "tokenizer.ggml.suppress_tokens";
    static const float f_1s[] = {1, 1};
    static const uint32_t u_1 = 1;
    const model_spec s = {"suppressed", "llama", SIZES(64, 2, 1, 32, 96, 301), .formats = f32};
    const rocq_sample_params greedy = {.temperature = 0};
    const llama_options options = {.n_ctx = N_CTX, .n_logits = N_PROMPT};
    float *logits = floats((int64_t)N_PROMPT * s.n_vocab), *last = logits;
    int32_t prompt[N_PROMPT], best[N_BEST + 3] = {0}, token;
    uint64_t naturals[N_BEST] = {UINT64_MAX}; // no token, then all but the last
    char error[512];
    ours o;
    random_prompt(prompt, s.n_vocab, 9);
    write_model(&s, NULL);
    ours_open(&o, model_path(s.name), 1, &options);
    ours_eval(&o, prompt, N_PROMPT, logits);
    ours_close(&o);
    last += (N_PROMPT - 1) * s.n_vocab;
    for (int32_t i = 0; i < N_BEST; i++) {
        best[i] = best_of(last, s.n_vocab);
        last[best[i]] = -INFINITY;
    }
    for (int i = 1; i < N_BEST; i++) naturals[i] = (uint64_t)best[i - 1];
    best[N_BEST] = -1;
    best[N_BEST + 1] = s.n_vocab;
    best[N_BEST + 2] = INT32_MAX;
    const key lists[2][2] = {{{name, ROCQ_GGUF_I32, N_BEST + 3, best}, {0}},
                             {{name, ROCQ_GGUF_U64, N_BEST, naturals}, {0}}};
    const key wrong[2][2] = {{{name, ROCQ_GGUF_F32, 2, f_1s}, {0}},
                             {{name, ROCQ_GGUF_U32, 0, &u_1}, {0}}};
    for (int k = 0; k < 2; k++) {
        model_spec other = s;
        to_set = lists[k];
        to_set_arch = s.arch;
        other.edit = set_keys;
        write_model(&other, NULL);
        ours_open(&o, model_path(s.name), 1, &options);
        ours_eval(&o, prompt, N_PROMPT, NULL);
        assert_int_equal(ours_best(&o), k == 0 ? best_of(last, s.n_vocab) : best[N_BEST - 1]);
        int32_t all[10]; // how's own mask counts instead
        const int64_t n_all = sizeof all / sizeof *all;
        rocq_buffer memory;
        rocq_tensor mask;
        rocq_sample_params how = greedy;
        memset(all, 0xff, sizeof all);
        assert_int_equal(rocq_buffer_alloc(o.ctx, &memory, sizeof all), ROCQ_OK);
        assert_int_equal(rocq_tensor_init(&mask, &memory, 0, ROCQ_I32, 1, &n_all), ROCQ_OK);
        assert_int_equal(rocq_upload(o.ctx, &mask, all, sizeof all), ROCQ_OK);
        how.allowed = &mask;
        assert_int_equal(llama_sample(&o.m, &how, &token), ROCQ_OK);
        assert_int_equal(token, best[0]);
        rocq_buffer_free(o.ctx, &memory);
        ours_close(&o);
        assert_int_equal(run_with(&s, wrong[k], NULL, error), ROCQ_E_TYPE);
        assert_non_null(strstr(error, name));
    }
    free(logits);
}

static model_spec saved[N_SAVED];

static int32_t list_saved(void) {
    static const model_spec small[N_FAMILIES] = {
        {NULL, "llama", SIZES(256, 4, 2, 64, 256, 301)},
        {NULL, "llama", SIZES(256, 8, 2, 32, 256, 307), .rope_base = 1e6f},
        {NULL, "qwen2", SIZES(256, 4, 2, 64, 256, 301), .tied = true},
        {NULL, "qwen3", SIZES(256, 4, 1, 64, 256, 301)},
        {NULL, "gemma2", SIZES(256, 4, 2, 64, 256, 301), GEMMA},
        {NULL, "gpt2", SIZES(256, 4, 4, 64, 256, 301)},
    };
    static const char *const names[N_FAMILIES] = {"llama", "mistral", "qwen2",
                                                  "qwen3", "gemma2",  "gpt2"};
    static const rocq_format formats[] = {
#define X(NAME, name, id, elems, bytes) ROCQ_##NAME,
        ROCQ_FORMATS(X)
#undef X
    };
    static rocq_format lists[N_FORMATS][2];
    static char text[N_SAVED][64];
    int32_t n = 0;
    for (int32_t i = 0; i < N_SPECS; i++) {
        if (specs[i].formats != f32 || specs[i].n_shared_kv > 0) continue; // it forgets that number
        snprintf(text[n], sizeof text[n], "%s, saved by llama.cpp", specs[i].name);
        saved[n] = specs[i];
        saved[n].name = text[n];
        n++;
    }
    for (int32_t f = 0; f < N_FORMATS; f++) {
        lists[f][0] = formats[f];
        lists[f][1] = ROCQ_I32;
        if ((int32_t)formats[f] > 1000) continue; // rocq's own: no GGUF id
        if (rocq_quantize(formats[f], NULL, NULL, 0, 256, NULL) != ROCQ_OK) continue; // only read
        for (int32_t k = 0; k < N_FAMILIES; k++) {
            snprintf(text[n], sizeof text[n], "%s in %s, saved by llama.cpp", names[k],
                     rocq_format_name(formats[f]));
            saved[n] = small[k];
            saved[n].name = text[n];
            saved[n++].formats = lists[f];
        }
    }
    return n;
}

int main(int argc, char **argv) {
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    enum { N_BATCHES = 14 };
    static const char *const families[N_BATCHES] = {
        "llama-F32", "qwen2-F32", "qwen3-F32", "gemma2-F32", "gpt2-F32", "gemma3-linear",
        "mistral3-F32", "phi-long", "lfm2-F32", "lfm2moe-F32", "gemma4-F32",
        "qwen35-F32", "qwen35moe-F32", "gemma4moe-F32"};
    static const char *const forgetful[] = {"llama-factors", "llama-yarn", "qwen3-F32",
                                            "gemma2-F32"};
    static struct CMUnitTest
        tests[N_SPECS + N_ADAPTED + N_CACHES + 2 * N_BATCHES + 4 + 21 + N_SAVED];
    static char names[N_BATCHES][64], slice_names[N_BATCHES][64], forget_names[4][64];
    size_t n = 0;
    for (int32_t i = 0; i < N_SPECS; i++) {
        tests[n] = (struct CMUnitTest){.name = specs[i].name, .test_func = test_model};
        tests[n++].initial_state = (void *)(uintptr_t)&specs[i]; // read only
        for (int32_t k = 0; k < N_BATCHES; k++) {
            if (strcmp(families[k], specs[i].name) != 0) continue;
            snprintf(names[k], sizeof names[k], "%s, batches and cache", specs[i].name);
            tests[n] = (struct CMUnitTest){.name = names[k], .test_func = test_batches};
            tests[n++].initial_state = (void *)(uintptr_t)&specs[i];
            snprintf(slice_names[k], sizeof slice_names[k], "%s, slices", specs[i].name);
            tests[n] = (struct CMUnitTest){.name = slice_names[k], .test_func = test_slices};
            tests[n++].initial_state = (void *)(uintptr_t)&specs[i];
        }
        for (int32_t k = 0; k < 4; k++) {
            if (strcmp(forgetful[k], specs[i].name) != 0) continue;
            snprintf(forget_names[k], sizeof forget_names[k], "%s, forgetting", specs[i].name);
            tests[n] = (struct CMUnitTest){.name = forget_names[k], .test_func = test_forget};
            tests[n++].initial_state = (void *)(uintptr_t)&specs[i];
        }
    }
    for (int32_t i = 0; i < N_ADAPTED; i++) {
        tests[n] = (struct CMUnitTest){.name = adapted[i].name, .test_func = test_lora};
        tests[n++].initial_state = (void *)(uintptr_t)&adapted[i];
    }
    tests[n++] = (struct CMUnitTest){.name = "wrong adapters", .test_func = test_wrong_loras};
    for (int32_t i = 0; i < N_CACHES; i++) {
        tests[n] = (struct CMUnitTest){.name = caches[i].name, .test_func = test_cache};
        tests[n++].initial_state = (void *)(uintptr_t)&caches[i];
    }
    tests[n++] = (struct CMUnitTest){.name = "caches of outliers", .test_func = test_outliers};
    tests[n++] = (struct CMUnitTest){.name = "shipped model", .test_func = test_demo};
    tests[n++] = (struct CMUnitTest){.name = "types of integers", .test_func = test_integer_types};
    tests[n++] = (struct CMUnitTest){.name = "metadata", .test_func = test_keys};
    tests[n++] = (struct CMUnitTest){.name = "layers with a window", .test_func = test_windows};
    tests[n++] = (struct CMUnitTest){.name = "mixed layers", .test_func = test_mixed};
    tests[n++] = (struct CMUnitTest){.name = "expert memory", .test_func = test_expert_memory};
    tests[n++] = (struct CMUnitTest){.name = "interleaved weights", .test_func = test_interleaved};
    tests[n++] = (struct CMUnitTest){.name = "shared weights", .test_func = test_sharing};
    tests[n++] = (struct CMUnitTest){.name = "shared, loras", .test_func = test_sharing_adapters};
    tests[n++] = (struct CMUnitTest){.name = "shared, failures", .test_func = test_sharing_fails};
    tests[n++] = (struct CMUnitTest){.name = "scaled slices", .test_func = test_scaled_slices};
    tests[n++] = (struct CMUnitTest){.name = "loras, failures", .test_func = test_loras_fail};
    tests[n++] = (struct CMUnitTest){.name = "suppressed tokens", .test_func = test_suppressed};
    tests[n++] = (struct CMUnitTest){.name = "contradictions", .test_func = test_contradictions};
    tests[n++] = (struct CMUnitTest){.name = "other families", .test_func = test_unknown};
    tests[n++] = (struct CMUnitTest){.name = "convolutions", .test_func = test_convolutions};
    tests[n++] = (struct CMUnitTest){.name = "delta nets", .test_func = test_deltas};
    tests[n++] = (struct CMUnitTest){.name = "forged files", .test_func = test_forged};
    tests[n++] = (struct CMUnitTest){.name = "several files", .test_func = test_split};
    const int32_t n_saved = list_saved();
    for (int32_t i = 0; i < n_saved; i++) {
        tests[n] = (struct CMUnitTest){.name = saved[i].name, .test_func = test_saved};
        tests[n++].initial_state = &saved[i];
    }
    return _cmocka_run_group_tests("llama", tests, n, NULL, NULL);
}
