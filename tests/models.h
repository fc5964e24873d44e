// Small random-weight GGUF models of every family that examples/llama.h runs, written with rocq's
// own writer. Include after cmocka.h and rocq.h.
//
// The scales are chosen so that a wrong step cannot hide: every layer moves the residual stream
// about as much as what was there, attention scores have a spread near 1, caps and windows bite,
// and the rows of the output matrix differ in length, so that the best token usually leads clearly.

#ifndef TESTS_MODELS_H
#define TESTS_MODELS_H

#include "../examples/ds.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct model_spec {
    const char *name;
    const char *arch;
    int32_t n_embd, n_heads, n_kv_heads, head_dim, n_ff, n_vocab;
    int32_t n_layers;           // 0 = 2
    const rocq_format *formats; // of the matrices in file order, repeated; ended by I32
    bool tied;                  // the output matrix is the embedding
    float rope_base;            // 0: the key is left out
    const char *rope_scaling;   // "linear", "yarn" or NULL
    float rope_factor;
    float rope_attention;       // 0: the key is left out
    int32_t n_ctx_orig;
    bool rope_freqs;            // a rope_freqs.weight tensor
    bool biases;                // on every matrix of a layer; qwen2 has them on q, k and v anyway
    bool no_biases;             // qwen2 without them
    float k_outlier;            // qwen2: so large is one in 29 of k's biases, as in its real models
    int32_t window;             // gemma2, gemma3
    int32_t n_rot;              // of a head's elements turn, 0 = all
    bool rope_factors;          // rope_factors_short and _long tensors
    int32_t n_experts, n_used;  // of n_ff each; 0 = no mixture
    int32_t n_shared;           // FF of a shared expert, of gemma4's dense part; 0 = none
    int32_t attends;            // lfm2, qwen35: so many-th layers have attention
    int32_t delta_groups, delta_heads, delta_dim; // qwen35
    int32_t n_ahead;            // qwen35: layers that guess tokens ahead, behind the others
    int32_t n_taps, n_leading;  // lfm2, lfm2moe; n_leading layers are dense
    // gemma4: so many-th layers are global, the others have heads of local_dim; KV heads of global
    // ones, FF of the last ones, which have no keys and values; no V in global ones
    int32_t globals, local_dim, global_kv_heads, n_ff_shared, n_shared_kv, n_apart;
    bool keys_as_values;
    bool joined;                // experts' gate and up in one tensor
    float attention_cap, final_cap;
    const char *like;           // the family whose tensors the file has, NULL = arch
    const char *leave_out;      // a tensor that the file lacks
    const char *misshape;       // a tensor with one row too many
    void (*edit)(rocq_gguf_writer *w); // sets keys after all others, or NULL
} model_spec;

typedef struct model_random {
    uint64_t state;
} model_random;

static inline uint64_t model_u64(model_random *r) { // splitmix64
    uint64_t z = r->state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline float model_uniform(model_random *r) { // in (0, 1)
    return ((float)(model_u64(r) >> 40) + 0.5f) * 0x1p-24f;
}

static inline float model_normal(model_random *r) {
    float radius = sqrtf(-2 * logf(model_uniform(r)));
    return radius * cosf(6.28318531f * model_uniform(r));
}

// Where a model of this name is kept: with the other build output, below the working directory.
static inline const char *model_path(const char *name) {
    static char path[256];
    const char *dirs[] = {".build", ".build/tests", ".build/tests/models"};
    for (int32_t i = 0; i < 3; i++) (void)mkdir(dirs[i], 0777); // there already, mostly
    snprintf(path, sizeof path, "%s/%s.gguf", dirs[2], name);
    return path;
}

// What one tensor looks like: normally distributed around mean, or around mean and -mean by turns
// of chance where mean is negative; each row's length varies by e^spread.
typedef struct model_tensor {
    char name[64];
    rocq_format format;
    int64_t ne[3]; // ne[1] 0: one dimension, ne[2] 0: two
    float mean, sigma, spread;
} model_tensor;

typedef struct model_file {
    const model_spec *spec;
    model_tensor *tensors; // stb_ds's array
    int32_t n_layers, n_matrices;
} model_file;

static inline void model_add(model_file *f, int32_t layer, const char *name, int64_t ne0,
                             int64_t ne1, float mean, float sigma, float spread) {
    char full[64];
    if (layer < 0) snprintf(full, sizeof full, "%s", name);
    else snprintf(full, sizeof full, "blk.%d.%s", layer, name);
    if (f->spec->leave_out && strcmp(f->spec->leave_out, full) == 0) return;
    model_tensor *t = arraddnptr(f->tensors, 1);
    memset(t, 0, sizeof *t);
    memcpy(t->name, full, sizeof full);
    t->format = ROCQ_F32;
    t->ne[0] = ne0;
    t->ne[1] = ne1;
    if (f->spec->misshape && strcmp(f->spec->misshape, t->name) == 0) t->ne[ne1 > 0]++;
    t->mean = mean;
    t->sigma = sigma;
    t->spread = spread;
    if (ne1 == 0) return;
    int32_t n_formats = 0;
    while (f->spec->formats[n_formats] != ROCQ_I32) n_formats++;
    t->format = f->spec->formats[f->n_matrices++ % n_formats];
    // As quantizing tools do where rows are no whole number of 256-element blocks.
    if (ne0 % rocq_get_format_info(t->format)->block_elems != 0)
        t->format = t->format == ROCQ_Q6_K ? ROCQ_Q8_0 : ROCQ_Q5_0;
}

// A matrix for each expert; in F32 where the next format is not for it.
static inline void model_add_experts(model_file *f, int32_t layer, const char *name, int64_t ne0,
                                     int64_t ne1, int64_t ne2, bool f32, float mean, float sigma) {
    int32_t n = (int32_t)arrlen(f->tensors);
    model_add(f, layer, name, ne0, ne1, mean, sigma, 0);
    if ((int32_t)arrlen(f->tensors) == n) return; // left out
    f->tensors[n].ne[2] = ne2;
    if (!f32) return;
    f->tensors[n].format = ROCQ_F32;
    f->n_matrices--;
}

// A router whose choices are clear, experts, and with biases all that gpt-oss adds.
static inline void model_add_mixture(model_file *f, int32_t i, bool biases) {
    const model_spec *s = f->spec;
    int64_t n_embd = s->n_embd, n_ff = s->n_ff, n = s->n_experts;
    float in = 1 / sqrtf((float)n_embd), out = 0.5f / sqrtf((float)n_ff);
    model_add_experts(f, i, "ffn_gate_inp.weight", n_embd, n, 0, true, 0, 2 * in);
    if (s->joined) {
        model_add_experts(f, i, "ffn_gate_up_exps.weight", n_embd, 2 * n_ff, n, false, 0,
                          1.2f * in);
    } else {
        model_add_experts(f, i, "ffn_gate_exps.weight", n_embd, n_ff, n, false, 0, 1.2f * in);
        model_add_experts(f, i, "ffn_up_exps.weight", n_embd, n_ff, n, false, 0, 1.2f * in);
    }
    model_add_experts(f, i, "ffn_down_exps.weight", n_ff, n_embd, n, false, 0, out);
    if (biases) {
        model_add(f, i, "ffn_gate_inp.bias", n, 0, 0, 0.3f, 0);
        model_add_experts(f, i, "ffn_gate_exps.bias", n_ff, n, 0, true, 0, 0.5f);
        model_add_experts(f, i, "ffn_up_exps.bias", n_ff, n, 0, true, 0, 0.5f);
        model_add_experts(f, i, "ffn_down_exps.bias", n_embd, n, 0, true, 0, 0.2f);
    }
    if (s->n_shared > 0 && s->n_leading == 0 && s->globals == 0) {
        model_add(f, i, "ffn_gate_shexp.weight", n_embd, s->n_shared, 0, 1.2f * in, 0);
        model_add(f, i, "ffn_up_shexp.weight", n_embd, s->n_shared, 0, 1.2f * in, 0);
        model_add(f, i, "ffn_down_shexp.weight", s->n_shared, n_embd, 0, out, 0);
    }
}

// gpt2's layer: norms with biases, q, k and v in one matrix, no gate.
static inline void model_add_gpt2(model_file *f, int32_t i) {
    const model_spec *s = f->spec;
    int64_t n_embd = s->n_embd;
    float in = 1 / sqrtf((float)n_embd);
    model_add(f, i, "attn_norm.weight", n_embd, 0, 1, 0.2f, 0);
    model_add(f, i, "attn_norm.bias", n_embd, 0, 0.2f, 0.2f, 0);
    model_add(f, i, "attn_qkv.weight", n_embd, 3 * n_embd, 0, 0.8f * in, 0);
    model_add(f, i, "attn_qkv.bias", 3 * n_embd, 0, 0, 0.3f, 0);
    model_add(f, i, "attn_output.weight", n_embd, n_embd, 0, 0.9f * in, 0);
    model_add(f, i, "attn_output.bias", n_embd, 0, 0, 0.2f, 0);
    model_add(f, i, "ffn_norm.weight", n_embd, 0, 1, 0.2f, 0);
    model_add(f, i, "ffn_norm.bias", n_embd, 0, 0.2f, 0.2f, 0);
    model_add(f, i, "ffn_up.weight", n_embd, s->n_ff, 0, 1.2f * in, 0);
    model_add(f, i, "ffn_up.bias", s->n_ff, 0, 0, 0.3f, 0);
    model_add(f, i, "ffn_down.weight", s->n_ff, n_embd, 0, 0.6f / sqrtf((float)s->n_ff), 0);
    model_add(f, i, "ffn_down.bias", n_embd, 0, 0, 0.2f, 0);
}

static inline bool model_attends(const model_spec *s, int32_t layer) {
    return s->attends == 0 || layer % s->attends == s->attends - 1;
}

// lfm2's layer: attention as qwen3's or a short convolution, dense or with experts.
static inline void model_add_lfm2(model_file *f, int32_t i) {
    const model_spec *s = f->spec;
    int64_t n_embd = s->n_embd, n_q = (int64_t)s->n_heads * s->head_dim;
    int64_t n_kv = (int64_t)s->n_kv_heads * s->head_dim;
    float in = 1 / sqrtf((float)n_embd);
    model_add(f, i, "attn_norm.weight", n_embd, 0, 1, 0.2f, 0);
    if (model_attends(s, i)) {
        model_add(f, i, "attn_q.weight", n_embd, n_q, 0, 0.8f * in, 0);
        model_add(f, i, "attn_k.weight", n_embd, n_kv, 0, 0.8f * in, 0);
        model_add(f, i, "attn_v.weight", n_embd, n_kv, 0, 1.2f * in, 0);
        model_add(f, i, "attn_q_norm.weight", s->head_dim, 0, 0.8f, 0.2f, 0);
        model_add(f, i, "attn_k_norm.weight", s->head_dim, 0, 0.8f, 0.2f, 0);
        model_add(f, i, "attn_output.weight", n_q, n_embd, 0, 0.6f / sqrtf((float)n_q), 0);
    } else { // a product of three is long-tailed, and 8 bits round it coarsely: it adds less
        model_add(f, i, "shortconv.in_proj.weight", n_embd, 3 * n_embd, 0, in, 0);
        model_add_experts(f, i, "shortconv.conv.weight", s->n_taps, n_embd, 0, true, 0, 0.6f);
        model_add(f, i, "shortconv.out_proj.weight", n_embd, n_embd, 0, 0.2f * in, 0);
    }
    model_add(f, i, "ffn_norm.weight", n_embd, 0, 1, 0.2f, 0);
    if (s->n_experts > 0 && i >= s->n_leading) {
        model_add_mixture(f, i, false);
        model_add(f, i, "exp_probs_b.bias", s->n_experts, 0, 0, 0.3f, 0);
        return;
    }
    int64_t n_ff = s->n_experts > 0 ? s->n_shared : s->n_ff;
    model_add(f, i, "ffn_gate.weight", n_embd, n_ff, 0, 1.2f * in, 0);
    model_add(f, i, "ffn_up.weight", n_embd, n_ff, 0, 1.2f * in, 0);
    model_add(f, i, "ffn_down.weight", n_ff, n_embd, 0, 0.25f / sqrtf((float)n_ff), 0);
}

static inline bool model_global(const model_spec *s, int32_t layer) {
    return layer % s->globals == s->globals - 1;
}

static inline int32_t model_kv_heads(const model_spec *s, int32_t layer) {
    return s->global_kv_heads > 0 && model_global(s, layer) ? s->global_kv_heads : s->n_kv_heads;
}

static inline int32_t model_ff(const model_spec *s, int32_t n_layers, int32_t layer) {
    return s->n_ff_shared > 0 && layer >= n_layers - s->n_shared_kv ? s->n_ff_shared : s->n_ff;
}

// gemma4's layer: local or global, with or without keys and values, and its part of embeddings.
static inline void model_add_gemma4(model_file *f, int32_t i) {
    const model_spec *s = f->spec;
    const bool global = model_global(s, i), keeps = i < f->n_layers - s->n_shared_kv;
    const int64_t n_embd = s->n_embd, dim = global ? s->head_dim : s->local_dim;
    const int64_t n_q = s->n_heads * dim, n_kv = model_kv_heads(s, i) * dim;
    const int64_t n_ff = s->n_experts > 0 ? s->n_shared : model_ff(s, f->n_layers, i);
    const float in = 1 / sqrtf((float)n_embd);
    model_add(f, i, "attn_norm.weight", n_embd, 0, 1, 0.2f, 0);
    model_add(f, i, "attn_q.weight", n_embd, n_q, 0, 0.8f * in, 0);
    if (keeps) model_add(f, i, "attn_k.weight", n_embd, n_kv, 0, 0.8f * in, 0);
    if (keeps && !(global && s->keys_as_values)) {
        model_add(f, i, "attn_v.weight", n_embd, n_kv, 0, 1.2f * in, 0);
    }
    // Scores are not divided by sqrt(dim).
    model_add(f, i, "attn_q_norm.weight", dim, 0, 0.8f / sqrtf((float)dim), 0.02f, 0);
    if (keeps) model_add(f, i, "attn_k_norm.weight", dim, 0, 1, 0.2f, 0);
    model_add(f, i, "attn_output.weight", n_q, n_embd, 0, 0.6f / sqrtf((float)n_q), 0);
    model_add(f, i, "post_attention_norm.weight", n_embd, 0, 0.5f, 0.1f, 0);
    model_add(f, i, "ffn_norm.weight", n_embd, 0, 1, 0.2f, 0);
    model_add(f, i, "ffn_gate.weight", n_embd, n_ff, 0, 1.2f * in, 0);
    model_add(f, i, "ffn_up.weight", n_embd, n_ff, 0, 1.2f * in, 0);
    model_add(f, i, "ffn_down.weight", n_ff, n_embd, 0, 0.25f / sqrtf((float)n_ff), 0);
    model_add(f, i, "post_ffw_norm.weight", n_embd, 0, 0.25f, 0.1f, 0);
    if (s->n_experts > 0) { // a router reads a normed x by 1 / sqrt(n_embd) of it
        model_add(f, i, "ffn_gate_inp.scale", n_embd, 0, sqrtf((float)n_embd), 0.2f / in, 0);
        model_add(f, i, "pre_ffw_norm_2.weight", n_embd, 0, 1, 0.2f, 0);
        model_add(f, i, "post_ffw_norm_1.weight", n_embd, 0, 0.8f, 0.1f, 0);
        model_add(f, i, "post_ffw_norm_2.weight", n_embd, 0, 1.2f, 0.1f, 0);
        model_add_mixture(f, i, false);
        if (i % 2 == 0) model_add(f, i, "ffn_down_exps.scale", s->n_experts, 0, 1, 0.4f, 0);
    }
    if (i % 2 == 0 || s->n_apart > 0) {
        model_add(f, i, "layer_output_scale.weight", 1, 0, 1.3f, 0.1f, 0);
    }
    if (s->n_apart == 0) return;
    model_add(f, i, "inp_gate.weight", n_embd, s->n_apart, 0, 1.2f * in, 0);
    model_add(f, i, "proj.weight", s->n_apart, n_embd, 0, 1 / sqrtf((float)s->n_apart), 0);
    // Products of three are long-tailed, and 8 bits round them coarsely: they add less.
    model_add(f, i, "post_norm.weight", n_embd, 0, 0.2f, 0.05f, 0);
}

// ... and what is not of one layer.
static inline void model_add_gemma4_others(model_file *f) {
    const model_spec *s = f->spec;
    const int64_t all = (int64_t)s->n_apart * f->n_layers;
    model_add(f, -1, "rope_freqs.weight", s->head_dim / 2, 0, 3, 0.7f, 0);
    if (s->n_apart == 0) return;
    model_add(f, -1, "per_layer_token_embd.weight", all, s->n_vocab, 0,
              1 / sqrtf((float)s->n_apart), 0);
    model_add(f, -1, "per_layer_model_proj.weight", s->n_embd, all, 0, 1, 0);
    model_add(f, -1, "per_layer_proj_norm.weight", s->n_apart, 0, 0.8f, 0.2f, 0);
}

// qwen35's layer: attention with a gate or a gated delta net, dense or with experts. The convolved
// values are large, so that what a net remembers counts for its norm.
static inline void model_add_qwen35(model_file *f, int32_t i) {
    const model_spec *s = f->spec;
    int64_t n_embd = s->n_embd, n_q = (int64_t)s->n_heads * s->head_dim;
    int64_t n_kv = (int64_t)s->n_kv_heads * s->head_dim, heads = s->delta_heads;
    int64_t values = heads * s->delta_dim, rows = values + 2 * s->delta_groups * s->delta_dim;
    float in = 1 / sqrtf((float)n_embd);
    model_add(f, i, "attn_norm.weight", n_embd, 0, 1, 0.2f, 0);
    if (model_attends(s, i) || i >= f->n_layers) {
        model_add(f, i, "attn_q.weight", n_embd, 2 * n_q, 0, 0.8f * in, 0);
        model_add(f, i, "attn_k.weight", n_embd, n_kv, 0, 0.8f * in, 0);
        model_add(f, i, "attn_v.weight", n_embd, n_kv, 0, 1.2f * in, 0);
        model_add(f, i, "attn_q_norm.weight", s->head_dim, 0, 0.8f, 0.2f, 0);
        model_add(f, i, "attn_k_norm.weight", s->head_dim, 0, 0.8f, 0.2f, 0);
        model_add(f, i, "attn_output.weight", n_q, n_embd, 0, 0.6f / sqrtf((float)n_q), 0);
    } else {
        model_add(f, i, "attn_qkv.weight", n_embd, rows, 0, 1.5f * in, 0);
        model_add(f, i, "attn_gate.weight", n_embd, values, 0, in, 0);
        model_add_experts(f, i, "ssm_conv1d.weight", s->n_taps, rows, 0, true, 0, 1.5f);
        model_add(f, i, "ssm_alpha.weight", n_embd, heads, 0, in, 0);
        model_add(f, i, "ssm_beta.weight", n_embd, heads, 0, in, 0);
        model_add(f, i, "ssm_a", heads, 0, 0, 0.3f, 0);
        model_add(f, i, "ssm_dt.bias", heads, 0, 0, 1, 0);
        model_add(f, i, "ssm_norm.weight", s->delta_dim, 0, 1, 0.2f, 0);
        model_add(f, i, "ssm_out.weight", values, n_embd, 0, 0.3f / sqrtf((float)values), 0);
    }
    model_add(f, i, "post_attention_norm.weight", n_embd, 0, 1, 0.2f, 0);
    if (s->n_experts > 0) {
        model_add_mixture(f, i, false);
        model_add(f, i, "ffn_gate_inp_shexp.weight", n_embd, 0, 0, 2 * in, 0);
    } else {
        model_add(f, i, "ffn_gate.weight", n_embd, s->n_ff, 0, 1.2f * in, 0);
        model_add(f, i, "ffn_up.weight", n_embd, s->n_ff, 0, 1.2f * in, 0);
        model_add(f, i, "ffn_down.weight", s->n_ff, n_embd, 0, 0.25f / sqrtf((float)s->n_ff), 0);
    }
    if (i < f->n_layers) return;
    model_add(f, i, "nextn.eh_proj.weight", 2 * n_embd, n_embd, 0, in, 0);
    model_add(f, i, "nextn.enorm.weight", n_embd, 0, 1, 0.2f, 0);
    model_add(f, i, "nextn.hnorm.weight", n_embd, 0, 1, 0.2f, 0);
}

static inline void model_add_all(model_file *f) {
    const model_spec *s = f->spec;
    const char *arch = s->like ? s->like : s->arch;
    bool gemma3 = strcmp(arch, "gemma3") == 0, phi3 = strcmp(arch, "phi3") == 0;
    bool gemma4 = strcmp(arch, "gemma4") == 0, qwen2 = strcmp(arch, "qwen2") == 0;
    bool gemma = strcmp(arch, "gemma2") == 0 || gemma3 || gemma4;
    bool gpt_oss = strcmp(arch, "gpt-oss") == 0;
    bool qwen3 = strncmp(arch, "qwen3", 5) == 0, gpt2 = strcmp(arch, "gpt2") == 0;
    bool lfm2 = strncmp(arch, "lfm2", 4) == 0, qwen35 = strncmp(arch, "qwen35", 6) == 0;
    int32_t n_rot = s->n_rot > 0 ? s->n_rot : s->head_dim;
    int64_t n_embd = s->n_embd, n_q = (int64_t)s->n_heads * s->head_dim;
    int64_t n_kv = (int64_t)s->n_kv_heads * s->head_dim;
    float in = 1 / sqrtf((float)n_embd); // keeps unit variance across a matrix
    float embd = gemma ? 0.6f * in : 0.6f; // gemma multiplies it by sqrt(n_embd)
    model_add(f, -1, "token_embd.weight", n_embd, s->n_vocab, 0, embd,
              gemma     ? 0.7f
              : s->tied ? 0.5f
                        : 0);
    if (s->rope_freqs) model_add(f, -1, "rope_freqs.weight", s->head_dim / 2, 0, 3, 0.7f, 0);
    if (s->rope_factors) {
        model_add(f, -1, "rope_factors_short.weight", n_rot / 2, 0, 1.5f, 0.2f, 0);
        model_add(f, -1, "rope_factors_long.weight", n_rot / 2, 0, 4, 0.7f, 0);
    }
    if (gpt2) model_add(f, -1, "position_embd.weight", n_embd, 512, 0, 0.5f, 0);
    for (int32_t i = 0; i < f->n_layers && gpt2; i++) model_add_gpt2(f, i);
    for (int32_t i = 0; i < f->n_layers && lfm2; i++) model_add_lfm2(f, i);
    if (gemma4) model_add_gemma4_others(f);
    for (int32_t i = 0; i < f->n_layers && gemma4; i++) model_add_gemma4(f, i);
    for (int32_t i = 0; i < f->n_layers + s->n_ahead && qwen35; i++) model_add_qwen35(f, i);
    for (int32_t i = 0; i < f->n_layers && !gpt2 && !lfm2 && !gemma4 && !qwen35; i++) {
        model_add(f, i, "attn_norm.weight", n_embd, 0, 1, 0.2f, 0);
        if (phi3) model_add(f, i, "attn_qkv.weight", n_embd, n_q + 2 * n_kv, 0, in, 0);
        else {
            model_add(f, i, "attn_q.weight", n_embd, n_q, 0, 0.8f * in, 0);
            model_add(f, i, "attn_k.weight", n_embd, n_kv, 0, 0.8f * in, 0);
            model_add(f, i, "attn_v.weight", n_embd, n_kv, 0, 1.2f * in, 0);
        }
        if ((qwen2 && !s->no_biases) || s->biases || gpt_oss) {
            model_add(f, i, "attn_q.bias", n_q, 0, 0, 0.3f, 0);
            model_add(f, i, "attn_k.bias", n_kv, 0, 0, 0.3f, 0);
            model_add(f, i, "attn_v.bias", n_kv, 0, 0, 0.2f, 0);
        }
        if (qwen3 || gemma3) {
            model_add(f, i, "attn_q_norm.weight", s->head_dim, 0, 0.8f, 0.2f, 0);
            model_add(f, i, "attn_k_norm.weight", s->head_dim, 0, 0.8f, 0.2f, 0);
        }
        model_add(f, i, "attn_output.weight", n_q, n_embd, 0, 0.6f / sqrtf((float)n_q), 0);
        if (gemma) model_add(f, i, "post_attention_norm.weight", n_embd, 0, 0.5f, 0.1f, 0);
        if (gpt_oss) {
            model_add(f, i, "attn_sinks.weight", s->n_heads, 0, 0.5f, 1, 0);
            model_add(f, i, "attn_output.bias", n_embd, 0, 0, 0.2f, 0);
        }
        model_add(f, i, gpt_oss ? "post_attention_norm.weight" : "ffn_norm.weight", n_embd, 0, 1,
                  0.2f, 0);
        if (s->n_experts > 0) {
            model_add_mixture(f, i, gpt_oss);
            continue;
        }
        if (!phi3) model_add(f, i, "ffn_gate.weight", n_embd, s->n_ff, 0, 1.2f * in, 0);
        model_add(f, i, "ffn_up.weight", n_embd, phi3 ? 2 * s->n_ff : s->n_ff, 0, 1.2f * in, 0);
        model_add(f, i, "ffn_down.weight", s->n_ff, n_embd, 0, 0.25f / sqrtf((float)s->n_ff), 0);
        if (s->biases) {
            model_add(f, i, "attn_output.bias", n_embd, 0, 0, 0.2f, 0);
            model_add(f, i, "ffn_gate.bias", s->n_ff, 0, 0, 0.3f, 0);
            model_add(f, i, "ffn_up.bias", s->n_ff, 0, 0, 0.3f, 0);
            model_add(f, i, "ffn_down.bias", n_embd, 0, 0, 0.2f, 0);
        }
        if (gemma) model_add(f, i, "post_ffw_norm.weight", n_embd, 0, 0.25f, 0.1f, 0);
    }
    // Logits with a spread of about 3, by way of the norm where the matrix is shared. Its weights
    // have both signs then, or every token would predict itself.
    float norm = s->tied ? 3 * in / embd : 1;
    model_add(f, -1, lfm2 ? "token_embd_norm.weight" : "output_norm.weight", n_embd, 0,
              s->tied ? -norm : norm, 0.2f * norm, 0);
    if (gpt2) model_add(f, -1, "output_norm.bias", n_embd, 0, 0, 0.3f * norm, 0);
    if (!s->tied) model_add(f, -1, "output.weight", n_embd, s->n_vocab, 0, 3 * in, 0.5f);
}

static inline void model_set_u32(rocq_gguf_writer *w, const char *arch, const char *key,
                                 int64_t value) {
    char name[128];
    snprintf(name, sizeof name, "%s.%s", arch, key);
    assert_int_equal(rocq_gguf_writer_set_u32(w, name, (uint32_t)value), ROCQ_OK);
}

static inline void model_set_f32(rocq_gguf_writer *w, const char *arch, const char *key,
                                 float value) {
    char name[128];
    snprintf(name, sizeof name, "%s.%s", arch, key);
    assert_int_equal(rocq_gguf_writer_set_f32(w, name, value), ROCQ_OK);
}

static inline void model_set_gemma4(rocq_gguf_writer *w, const model_file *f) {
    const model_spec *s = f->spec;
    char key[80];
    int32_t heads[64], ff[64];
    unsigned char windows[64];
    for (int32_t i = 0; i < f->n_layers; i++) {
        heads[i] = model_kv_heads(s, i);
        ff[i] = s->n_experts > 0 ? s->n_shared : model_ff(s, f->n_layers, i);
        windows[i] = !model_global(s, i);
    }
    const struct {
        const char *name;
        rocq_gguf_type type;
        const void *data;
    } arrays[] = {{"attention.head_count_kv", ROCQ_GGUF_I32, heads},
                  {"feed_forward_length", ROCQ_GGUF_I32, ff},
                  {"attention.sliding_window_pattern", ROCQ_GGUF_BOOL, windows}};
    for (int k = 0; k < 3; k++) {
        snprintf(key, sizeof key, "%s.%s", s->arch, arrays[k].name);
        assert_int_equal(
            rocq_gguf_writer_set(w, key, arrays[k].type, true, f->n_layers, arrays[k].data),
            ROCQ_OK);
    }
    model_set_u32(w, s->arch, "attention.key_length_swa", s->local_dim);
    model_set_u32(w, s->arch, "attention.value_length_swa", s->local_dim);
    model_set_u32(w, s->arch, "rope.dimension_count_swa", s->local_dim);
    model_set_u32(w, s->arch, "rope.dimension_count", s->head_dim);
    model_set_f32(w, s->arch, "rope.freq_base_swa", 500);
    model_set_u32(w, s->arch, "attention.shared_kv_layers", s->n_shared_kv);
    model_set_u32(w, s->arch, "embedding_length_per_layer_input", s->n_apart);
}

// The vocabulary: <unk>, <s>, </s>, the 256 bytes, then words that tokenize as themselves.
static inline void model_set_vocab(rocq_gguf_writer *w, int32_t n_vocab) {
    rocq_str *tokens = (rocq_str *)calloc((size_t)n_vocab, sizeof *tokens);
    char (*text)[16] = (char (*)[16])calloc((size_t)n_vocab, sizeof *text);
    float *scores = (float *)calloc((size_t)n_vocab, sizeof *scores);
    int32_t *types = (int32_t *)calloc((size_t)n_vocab, sizeof *types);
    assert_true(tokens && text && scores && types && n_vocab > 290);
    for (int32_t i = 0; i < n_vocab; i++) {
        types[i] = i == 0 ? 2 : i < 3 ? 3 : i < 259 ? 6 : 1; // unknown, control, byte, normal
        scores[i] = i < 259 ? 0 : (float)(258 - i);
        if (i < 3)
            snprintf(text[i], sizeof *text, "%s", i == 0 ? "<unk>" : i == 1 ? "<s>" : "</s>");
        else if (i < 259) snprintf(text[i], sizeof *text, "<0x%02X>", (unsigned)(i - 3));
        else if (i == 259) snprintf(text[i], sizeof *text, "\xe2\x96\x81");
        else if (i < 286) snprintf(text[i], sizeof *text, "%c", 'a' + (i - 260));
        else snprintf(text[i], sizeof *text, "\xe2\x96\x81%d", i);
        tokens[i].data = text[i];
        tokens[i].length = (int64_t)strlen(text[i]);
    }
    assert_int_equal(rocq_gguf_writer_set_str(w, "tokenizer.ggml.model", "llama"), ROCQ_OK);
    assert_int_equal(
        rocq_gguf_writer_set(w, "tokenizer.ggml.tokens", ROCQ_GGUF_STRING, true, n_vocab, tokens),
        ROCQ_OK);
    assert_int_equal(
        rocq_gguf_writer_set(w, "tokenizer.ggml.scores", ROCQ_GGUF_F32, true, n_vocab, scores),
        ROCQ_OK);
    assert_int_equal(
        rocq_gguf_writer_set(w, "tokenizer.ggml.token_type", ROCQ_GGUF_I32, true, n_vocab, types),
        ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_set_u32(w, "tokenizer.ggml.bos_token_id", 1), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_set_u32(w, "tokenizer.ggml.eos_token_id", 2), ROCQ_OK);
    free(types);
    free(scores);
    free(text);
    free(tokens);
}

// As ggml_quantize_chunk.
typedef size_t (*model_quantize_fn)(int32_t format, const float *src, void *dst, int64_t start,
                                    int64_t n_rows, int64_t n_per_row, const float *importance);

static inline size_t model_quantize(int32_t format, const float *src, void *dst, int64_t start,
                             int64_t n_rows, int64_t n_per_row, const float *importance) {
    (void)start;
    assert_int_equal(rocq_quantize((rocq_format)format, dst, src, n_rows, n_per_row, importance),
                     ROCQ_OK);
    return 0;
}

// quantize NULL: rocq_quantize, which searches long for the best K-quants.
static inline void model_write(rocq_ctx *ctx, const model_spec *s, const char *path,
                        model_quantize_fn quantize) {
    model_file f = {0};
    f.spec = s;
    f.n_layers = s->n_layers > 0 ? s->n_layers : 2;
    model_add_all(&f);

    rocq_gguf_writer *w = NULL;
    rocq_gguf_writer_desc desc = {0};
    desc.path = path;
    assert_int_equal(rocq_gguf_writer_open(ctx, &w, &desc), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_set_str(w, "general.architecture", s->arch), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_set_str(w, "general.name", s->name), ROCQ_OK);
    model_set_u32(w, s->arch, "context_length", 512);
    model_set_u32(w, s->arch, "embedding_length", s->n_embd);
    model_set_u32(w, s->arch, "block_count", f.n_layers + s->n_ahead);
    model_set_u32(w, s->arch, "feed_forward_length", s->n_leading > 0 ? s->n_shared : s->n_ff);
    if (s->n_experts > 0) {
        model_set_u32(w, s->arch, "expert_count", s->n_experts);
        model_set_u32(w, s->arch, "expert_used_count", s->n_used);
        model_set_u32(w, s->arch, "expert_feed_forward_length", s->n_ff);
        if (s->n_shared > 0 && s->n_leading == 0 && s->globals == 0)
            model_set_u32(w, s->arch, "expert_shared_feed_forward_length", s->n_shared);
        if (strncmp(s->arch, "lfm2", 4) == 0) {
            model_set_u32(w, s->arch, "leading_dense_block_count", s->n_leading);
            model_set_u32(w, s->arch, "expert_gating_func", 2);
        }
    }
    model_set_u32(w, s->arch, "attention.head_count", s->n_heads);
    if (s->delta_dim > 0) {
        const int32_t third = (s->n_rot / 2 + 2) / 3;
        const int32_t sections[4] = {third, third, third, 0};
        char key[64];
        snprintf(key, sizeof key, "%s.rope.dimension_sections", s->arch);
        assert_int_equal(rocq_gguf_writer_set(w, key, ROCQ_GGUF_I32, true, 4, sections), ROCQ_OK);
        model_set_u32(w, s->arch, "attention.head_count_kv", s->n_kv_heads);
        if (s->attends != 4) model_set_u32(w, s->arch, "full_attention_interval", s->attends);
        model_set_u32(w, s->arch, "ssm.conv_kernel", s->n_taps);
        model_set_u32(w, s->arch, "ssm.state_size", s->delta_dim);
        model_set_u32(w, s->arch, "ssm.group_count", s->delta_groups);
        model_set_u32(w, s->arch, "ssm.time_step_rank", s->delta_heads);
        model_set_u32(w, s->arch, "ssm.inner_size", s->delta_heads * s->delta_dim);
        if (s->n_ahead > 0) model_set_u32(w, s->arch, "nextn_predict_layers", s->n_ahead);
    } else if (s->attends > 0) {
        char key[64];
        int32_t *heads = (int32_t *)calloc((size_t)f.n_layers, sizeof *heads);
        assert_non_null(heads);
        for (int32_t i = 0; i < f.n_layers; i++) heads[i] = model_attends(s, i) ? s->n_kv_heads : 0;
        snprintf(key, sizeof key, "%s.attention.head_count_kv", s->arch);
        assert_int_equal(rocq_gguf_writer_set(w, key, ROCQ_GGUF_I32, true, f.n_layers, heads),
                         ROCQ_OK);
        model_set_u32(w, s->arch, "shortconv.l_cache", s->n_taps);
        free(heads);
    } else {
        model_set_u32(w, s->arch, "attention.head_count_kv", s->n_kv_heads);
    }
    model_set_f32(w, s->arch, strcmp(s->arch, "gpt2") == 0 ? "attention.layer_norm_epsilon"
                                                           : "attention.layer_norm_rms_epsilon",
                  0.01f); // large enough to show
    if (s->head_dim * s->n_heads != s->n_embd) {
        model_set_u32(w, s->arch, "attention.key_length", s->head_dim);
        model_set_u32(w, s->arch, "attention.value_length", s->head_dim);
    }
    if (s->rope_base > 0) model_set_f32(w, s->arch, "rope.freq_base", s->rope_base);
    if (s->rope_scaling) {
        char key[128];
        snprintf(key, sizeof key, "%s.rope.scaling.type", s->arch);
        assert_int_equal(rocq_gguf_writer_set_str(w, key, s->rope_scaling), ROCQ_OK);
        model_set_f32(w, s->arch, "rope.scaling.factor", s->rope_factor);
        if (s->rope_attention > 0)
            model_set_f32(w, s->arch, "rope.scaling.attn_factor", s->rope_attention);
    }
    if (s->n_ctx_orig > 0)
        model_set_u32(w, s->arch, "rope.scaling.original_context_length", s->n_ctx_orig);
    if (s->n_rot > 0) model_set_u32(w, s->arch, "rope.dimension_count", s->n_rot);
    if (s->window > 0) model_set_u32(w, s->arch, "attention.sliding_window", s->window);
    if (s->attention_cap > 0) model_set_f32(w, s->arch, "attn_logit_softcapping", s->attention_cap);
    if (s->final_cap > 0) model_set_f32(w, s->arch, "final_logit_softcapping", s->final_cap);
    if (s->globals > 0) model_set_gemma4(w, &f);
    model_set_vocab(w, s->n_vocab);
    if (s->edit) s->edit(w);

    for (int32_t i = 0; i < arrlen(f.tensors); i++) {
        const model_tensor *t = &f.tensors[i];
        assert_int_equal(
            rocq_gguf_writer_add_tensor(w, t->name, t->format,
                                        t->ne[2] > 0 ? 3 : t->ne[1] > 0 ? 2 : 1, t->ne),
            ROCQ_OK);
    }
    for (int32_t i = 0; i < arrlen(f.tensors); i++) {
        const model_tensor *t = &f.tensors[i];
        int64_t n_rows = (t->ne[1] > 0 ? t->ne[1] : 1) * (t->ne[2] > 0 ? t->ne[2] : 1), n_bytes = 0;
        assert_int_equal(rocq_row_size(t->format, t->ne[0], &n_bytes), ROCQ_OK);
        float *rows = (float *)malloc((size_t)(n_rows * t->ne[0]) * sizeof *rows);
        void *bytes = malloc((size_t)(n_rows * n_bytes));
        assert_true(rows && bytes);
        model_random random = {1}; // by name, so that a tensor is the same whatever surrounds it
        for (const char *c = t->name; *c; c++) random.state = random.state * 31 + (unsigned char)*c;
        for (int64_t r = 0; r < n_rows; r++) {
            float sigma = t->sigma * expf(t->spread * model_normal(&random));
            for (int64_t k = 0; k < t->ne[0]; k++) {
                bool flip = t->mean < 0 && model_u64(&random) % 2;
                rows[r * t->ne[0] + k] =
                    (flip ? -t->mean : t->mean) + sigma * model_normal(&random);
            }
        }
        for (int64_t k = 7; strstr(t->name, "attn_k.bias") && k < t->ne[0]; k += 29) {
            rows[k] += k % 2 ? s->k_outlier : -s->k_outlier;
        }
        const char *kind = strrchr(t->name, '.');
        for (int64_t k = 0; kind && strcmp(kind, ".ssm_a") == 0 && k < t->ne[0]; k++) {
            rows[k] = -fabsf(rows[k]); // positive, and the state would grow without end
        }
        float *importance = (float *)malloc((size_t)t->ne[0] * sizeof *importance);
        assert_non_null(importance);
        for (int64_t k = 0; k < t->ne[0]; k++) importance[k] = 1;
        // Three formats that only ggml writes are not written without.
        const bool needed =
            t->format == ROCQ_IQ2_XXS || t->format == ROCQ_IQ2_XS || t->format == ROCQ_IQ1_S;
        (quantize ? quantize : model_quantize)((int32_t)t->format, rows, bytes, 0, n_rows, t->ne[0],
                                               needed ? importance : NULL);
        free(importance);
        assert_int_equal(rocq_gguf_writer_write(w, bytes, n_rows * n_bytes), ROCQ_OK);
        free(bytes);
        free(rows);
    }
    assert_int_equal(rocq_gguf_writer_close(&w), ROCQ_OK);
    arrfree(f.tensors);
}

// An adapter for all matrices of such a model but the embeddings, with random numbers: it moves a
// product by about a sixth. s->edit, leave_out and misshape are of the adapter's file.
static inline void model_write_lora(rocq_ctx *ctx, const model_spec *s, const char *path,
                                    int32_t rank, float alpha, uint64_t seed) {
    model_spec plain = *s;
    plain.leave_out = plain.misshape = NULL;
    model_file f = {0};
    f.spec = &plain;
    f.n_layers = s->n_layers > 0 ? s->n_layers : 2;
    model_add_all(&f);
    rocq_gguf_writer *w = NULL;
    const rocq_gguf_writer_desc desc = {.path = path};
    assert_int_equal(rocq_gguf_writer_open(ctx, &w, &desc), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_set_str(w, "general.type", "adapter"), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_set_str(w, "general.architecture", s->arch), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_set_str(w, "adapter.type", "lora"), ROCQ_OK);
    assert_int_equal(rocq_gguf_writer_set_f32(w, "adapter.lora.alpha", alpha), ROCQ_OK);
    if (s->edit) s->edit(w);
    for (int pass = 0; pass < 2; pass++) { // declares all tensors, then writes them
        model_random random = {seed};
        for (int32_t i = 0; i < arrlen(f.tensors); i++) {
            const model_tensor *t = &f.tensors[i];
            if (t->ne[1] == 0 || strstr(t->name, "_embd") || strstr(t->name, ".conv.") ||
                strstr(t->name, "ssm_conv") || strstr(t->name, "_alpha.") ||
                strstr(t->name, "_beta.") || strstr(t->name, "_exps.") ||
                strstr(t->name, "_gate_inp.")) {
                continue;
            }
            for (int k = 0; k < 2; k++) {
                char name[80];
                int64_t ne[2] = {k ? rank : t->ne[0], k ? t->ne[1] : rank};
                snprintf(name, sizeof name, "%s.lora_%c", t->name, k ? 'b' : 'a');
                if (s->leave_out && strcmp(s->leave_out, name) == 0) continue;
                if (s->misshape && strcmp(s->misshape, name) == 0) ne[!k]++;
                const rocq_format format = seed % 2 ? ROCQ_F32 : ROCQ_F16;
                if (pass == 0) {
                    assert_int_equal(rocq_gguf_writer_add_tensor(w, name, format, 2, ne), ROCQ_OK);
                    continue;
                }
                const int64_t n = ne[0] * ne[1];
                const float sigma = k ? 0.15f / sqrtf((float)rank) : 1 / sqrtf((float)t->ne[0]);
                float *values = (float *)malloc((size_t)n * sizeof *values);
                void *bytes = malloc((size_t)n * sizeof *values);
                assert_true(values && bytes);
                for (int64_t j = 0; j < n; j++) values[j] = sigma * model_normal(&random);
                assert_int_equal(rocq_quantize(format, bytes, values, ne[1], ne[0], NULL), ROCQ_OK);
                assert_int_equal(
                    rocq_gguf_writer_write(w, bytes, format == ROCQ_F32 ? 4 * n : 2 * n), ROCQ_OK);
                free(values);
                free(bytes);
            }
        }
    }
    assert_int_equal(rocq_gguf_writer_close(&w), ROCQ_OK);
    arrfree(f.tensors);
}

#endif // TESTS_MODELS_H
