// families.h - what the model families of llama.h have and how their files say so; included by
// llama.h, whose graph it describes.
//
// To add a family: a row in llama__families, and its bit in the rows of the tensors that it has, in
// llama__weights and llama__others. A number that no family had before is read from the file in
// llama__read_numbers; a tensor that none had gets a field of llama_layer, and only an op that none
// had gets lines in llama__layer. Then add it to the tables of tests/test_llama.c, which compare
// with llama.cpp, and of tests/gpu_models.c.
//     The last one, gemma4's mixtures (experts beside the dense part, with norms of their own),
// took 33 new lines here, 93 in llama.h and 43 in tests (9c17874), none in rocq.h; qwen35 and
// qwen35moe, for which rocq.h got an op, 134 here and 187 in llama.h.

#ifndef FAMILIES_H
#define FAMILIES_H

// ---------------------------------------------------------------------------------------------
// Families
// ---------------------------------------------------------------------------------------------

enum {
    LLAMA__LLAMA = 1,
    LLAMA__QWEN2 = 2,
    LLAMA__QWEN3 = 4,
    LLAMA__GEMMA2 = 8,
    LLAMA__GPT2 = 16,
    LLAMA__GEMMA3 = 32,
    LLAMA__GRANITE = 64,
    LLAMA__SMOLLM3 = 128,
    LLAMA__MISTRAL3 = 256,
    LLAMA__PHI3 = 512,
    LLAMA__MIXTRAL = 1024, // llama with experts
    LLAMA__QWEN3MOE = 2048,
    LLAMA__GPT_OSS = 4096,
    LLAMA__GRANITEMOE = 8192,
    // Layers of lfm2 and lfm2moe have attention or, named _CONV, a short convolution. The first few
    // of lfm2moe have no experts, and are as those of lfm2.
    LLAMA__LFM2 = 16384,
    LLAMA__LFM2_CONV = 32768,
    LLAMA__LFM2MOE = 65536,
    LLAMA__LFM2MOE_CONV = 131072,
    // Layers of gemma4 have keys and values of their own or, named _SHARED, attend to those of an
    // earlier one.
    LLAMA__GEMMA4 = 262144,
    LLAMA__GEMMA4_SHARED = 524288,
    // Of qwen35's layers most have a gated delta net in place of attention; those are named _DELTA.
    LLAMA__QWEN35 = 1048576,
    LLAMA__QWEN35_DELTA = 2097152,
    LLAMA__QWEN35MOE = 4194304,
    LLAMA__QWEN35MOE_DELTA = 8388608,
    LLAMA__ALL = 16777215,
    LLAMA__GEMMA4_MIX = 16777216, // besides, where layers have a mixture beside the dense part
    LLAMA__NEWER = LLAMA__ALL - LLAMA__GPT2,
    LLAMA__GEMMA4S = LLAMA__GEMMA4 | LLAMA__GEMMA4_SHARED,
    LLAMA__GEMMA = LLAMA__GEMMA2 | LLAMA__GEMMA3 | LLAMA__GEMMA4S,
    LLAMA__FUSED = LLAMA__GPT2 | LLAMA__PHI3, // q, k and v in one matrix
    LLAMA__CONVS = LLAMA__LFM2_CONV | LLAMA__LFM2MOE_CONV,
    LLAMA__DELTAS = LLAMA__QWEN35_DELTA | LLAMA__QWEN35MOE_DELTA,
    LLAMA__OUT_GATES = LLAMA__QWEN35 | LLAMA__QWEN35MOE, // attention's output has a gate, with q
    LLAMA__QWEN35S = LLAMA__OUT_GATES | LLAMA__DELTAS,
    LLAMA__LFM = LLAMA__LFM2 | LLAMA__LFM2MOE | LLAMA__CONVS,
    LLAMA__SEPARATE = LLAMA__ALL - LLAMA__FUSED - LLAMA__CONVS - LLAMA__DELTAS,
    LLAMA__BIASED = LLAMA__SEPARATE - LLAMA__OUT_GATES, // q, k and v may be
    LLAMA__EXPERTS = LLAMA__MIXTRAL | LLAMA__QWEN3MOE | LLAMA__GPT_OSS | LLAMA__GRANITEMOE |
                     LLAMA__LFM2MOE | LLAMA__LFM2MOE_CONV | LLAMA__QWEN35MOE |
                     LLAMA__QWEN35MOE_DELTA,
    LLAMA__MIXTURES = LLAMA__EXPERTS | LLAMA__GEMMA4_MIX,
    LLAMA__JOINS = LLAMA__GEMMA4_MIX | LLAMA__QWEN35MOE | LLAMA__QWEN35MOE_DELTA,
    LLAMA__SHARED = LLAMA__GRANITEMOE | LLAMA__QWEN35MOE | LLAMA__QWEN35MOE_DELTA,
    LLAMA__POST_NORMS = LLAMA__GPT_OSS | LLAMA__QWEN35S, // post_attention_norm is ffn_norm
    LLAMA__DENSE = LLAMA__ALL - LLAMA__EXPERTS,
    LLAMA__GATED = LLAMA__DENSE - LLAMA__FUSED, // gate and up in two matrices
    LLAMA__HEAD_NORMS = LLAMA__QWEN3 | LLAMA__QWEN3MOE | LLAMA__GEMMA3 | LLAMA__LFM2 |
                        LLAMA__LFM2MOE | LLAMA__GEMMA4S | LLAMA__OUT_GATES
};

enum { LLAMA__REQUIRED = -1 }; // in place of a default

static const char LLAMA__RMS_EPS[] = "attention.layer_norm_rms_epsilon";

static const struct llama__family {
    const char *name; // general.architecture
    int bit;                // bits, where layers are of several kinds
    rocq_rope_pairing pairing;
    rocq_activation activation;
    const char *norm_eps;   // its key
    bool root_embedding;    // embeddings are multiplied by sqrt(n_embd)
    bool scales;            // the file has scales of embeddings, attention, what layers add, logits
    bool temperature;       // queries grow with their position
    bool windows;           // attention.sliding_window counts;
    int32_t window, period; // its default, and that of which layers: see llama__read_windows
    float local_base;       // default rope base of layers with a window, which nothing stretches;
                            // 0: that of the others. A file's rope.freq_base_swa comes first
    int32_t no_rope;        // each so many-th layer turns nothing; 0 = none
    bool caps;              // logits, in attention and of tokens, can be capped;
    float attention_cap, final_cap; // defaults; attention_cap 0: those in attention never are
    bool experts;           // in place of one feed-forward part: a mixture, whose
    rocq_scores scores;     // router weighs them so;
    bool renormalise;       // the weights of those that are taken add up to 1
    float limit, alpha;     // see rocq_experts_params
    bool convolves;         // layers without KV heads do, and the first ones may have no experts
    bool mixed;             // layers differ in their heads, KV heads and FF: see llama__read_shapes
    bool value_norm;        // values are normed, and scores not divided: norms of heads do that
    bool deltas;            // most layers have a delta net, see llama__read_deltas
    int32_t odd;            // the model of so many layers takes n_embd / n_heads for the size of a
                            // head where it scales scores
} llama__families[] = {
    {.name = "llama", .bit = LLAMA__LLAMA, .pairing = ROCQ_ROPE_NORM, .activation = ROCQ_ACT_SILU,
     .norm_eps = LLAMA__RMS_EPS, .windows = true}, // the first Mistral's; llama.cpp sees none there
    {.name = "llama", .bit = LLAMA__MIXTRAL, .pairing = ROCQ_ROPE_NORM,
     .activation = ROCQ_ACT_SILU, .norm_eps = LLAMA__RMS_EPS, .windows = true, .experts = true,
     .renormalise = true},
    {.name = "qwen2", .bit = LLAMA__QWEN2, .pairing = ROCQ_ROPE_NEOX, .activation = ROCQ_ACT_SILU,
     .norm_eps = LLAMA__RMS_EPS},
    {.name = "qwen3", .bit = LLAMA__QWEN3, .pairing = ROCQ_ROPE_NEOX, .activation = ROCQ_ACT_SILU,
     .norm_eps = LLAMA__RMS_EPS},
    {.name = "qwen3moe", .bit = LLAMA__QWEN3MOE, .pairing = ROCQ_ROPE_NEOX,
     .activation = ROCQ_ACT_SILU, .norm_eps = LLAMA__RMS_EPS, .experts = true, .renormalise = true},
    {.name = "gpt-oss", .bit = LLAMA__GPT_OSS, .pairing = ROCQ_ROPE_NEOX,
     .activation = ROCQ_ACT_SILU, .norm_eps = LLAMA__RMS_EPS, .windows = true, .period = 2,
     .experts = true, .scores = ROCQ_SCORES_SOFTMAX_CHOSEN, .limit = 7, .alpha = 1.702f},
    {.name = "gemma2", .bit = LLAMA__GEMMA2, .pairing = ROCQ_ROPE_NEOX, .activation = ROCQ_ACT_GELU,
     .norm_eps = LLAMA__RMS_EPS, .root_embedding = true, .windows = true, .window = 4096,
     .period = 2, .caps = true, .attention_cap = 50, .final_cap = 30, .odd = 46},
    {.name = "gemma3", .bit = LLAMA__GEMMA3, .pairing = ROCQ_ROPE_NEOX, .activation = ROCQ_ACT_GELU,
     .norm_eps = LLAMA__RMS_EPS, .root_embedding = true, .windows = true, .period = 6,
     .local_base = 10000, .caps = true, .odd = 62},
    {.name = "gemma4", .bit = LLAMA__GEMMA4S, .pairing = ROCQ_ROPE_NEOX,
     .activation = ROCQ_ACT_GELU, .norm_eps = LLAMA__RMS_EPS, .root_embedding = true,
     .windows = true, .window = LLAMA__REQUIRED, .local_base = 10000, .caps = true,
     .final_cap = 30, .mixed = true, .value_norm = true},
    {.name = "gemma4", .bit = LLAMA__GEMMA4S | LLAMA__GEMMA4_MIX, .pairing = ROCQ_ROPE_NEOX,
     .activation = ROCQ_ACT_GELU, .norm_eps = LLAMA__RMS_EPS, .root_embedding = true,
     .windows = true, .window = LLAMA__REQUIRED, .local_base = 10000, .caps = true,
     .final_cap = 30, .experts = true, .renormalise = true, .mixed = true, .value_norm = true},
    {.name = "gpt2", .bit = LLAMA__GPT2, .pairing = ROCQ_ROPE_NONE, .activation = ROCQ_ACT_GELU,
     .norm_eps = "attention.layer_norm_epsilon"},
    {.name = "granite", .bit = LLAMA__GRANITE, .pairing = ROCQ_ROPE_NORM,
     .activation = ROCQ_ACT_SILU, .norm_eps = LLAMA__RMS_EPS, .scales = true},
    {.name = "granitemoe", .bit = LLAMA__GRANITEMOE, .pairing = ROCQ_ROPE_NORM,
     .activation = ROCQ_ACT_SILU, .norm_eps = LLAMA__RMS_EPS, .scales = true, .experts = true,
     .renormalise = true},
    {.name = "smollm3", .bit = LLAMA__SMOLLM3, .pairing = ROCQ_ROPE_NORM,
     .activation = ROCQ_ACT_SILU, .norm_eps = LLAMA__RMS_EPS, .no_rope = 4},
    {.name = "mistral3", .bit = LLAMA__MISTRAL3, .pairing = ROCQ_ROPE_NORM,
     .activation = ROCQ_ACT_SILU, .norm_eps = LLAMA__RMS_EPS, .temperature = true},
    {.name = "lfm2", .bit = LLAMA__LFM2 | LLAMA__LFM2_CONV, .pairing = ROCQ_ROPE_NEOX,
     .activation = ROCQ_ACT_SILU, .norm_eps = LLAMA__RMS_EPS, .windows = true, .convolves = true},
    {.name = "lfm2moe", .bit = LLAMA__LFM, .pairing = ROCQ_ROPE_NEOX, .activation = ROCQ_ACT_SILU,
     .norm_eps = LLAMA__RMS_EPS, .experts = true, .scores = ROCQ_SCORES_SIGMOID,
     .renormalise = true, .convolves = true},
    {.name = "qwen35", .bit = LLAMA__QWEN35 | LLAMA__QWEN35_DELTA, .pairing = ROCQ_ROPE_NEOX,
     .activation = ROCQ_ACT_SILU, .norm_eps = LLAMA__RMS_EPS, .deltas = true},
    {.name = "qwen35moe", .bit = LLAMA__QWEN35MOE | LLAMA__QWEN35MOE_DELTA,
     .pairing = ROCQ_ROPE_NEOX, .activation = ROCQ_ACT_SILU, .norm_eps = LLAMA__RMS_EPS,
     .experts = true, .renormalise = true, .deltas = true},
    {.name = "phi3", .bit = LLAMA__PHI3, .pairing = ROCQ_ROPE_NEOX, .activation = ROCQ_ACT_SILU,
     .norm_eps = LLAMA__RMS_EPS},
};

enum { LLAMA__N_FAMILIES = sizeof llama__families / sizeof llama__families[0] };

// Sizes: 1, n_embd, Q, KV, Q + 2 KV, head_dim, FF, 2 FF, n_vocab, n_ctx_train, how many pairs of a
// head turn, heads, experts, FF of an expert and twice that, 3 n_embd, the taps of a convolution,
// and what of an embedding is for each layer alone: for one layer, and for all; 2 Q; of delta nets
// the channels of the convolution, the elements of all heads, heads, and elements of one.
enum {
    LLAMA__1, LLAMA__E, LLAMA__Q, LLAMA__KV, LLAMA__QKV, LLAMA__D, LLAMA__F, LLAMA__2F, LLAMA__V,
    LLAMA__P, LLAMA__R, LLAMA__H, LLAMA__X, LLAMA__XF, LLAMA__2XF, LLAMA__3E, LLAMA__T, LLAMA__A,
    LLAMA__AL, LLAMA__2Q, LLAMA__DC, LLAMA__DV, LLAMA__DH, LLAMA__DD, LLAMA__N_SIZES
};

enum {
    LLAMA__OPTIONAL = 1,
    LLAMA__ALONE = 2,   // no other weight reads what this one reads
    LLAMA__BY_EXPERT = 4, // one matrix for each expert
    LLAMA__F32 = 8,     // as vectors are
    LLAMA__APART = 16,  // only where parts of embeddings are for each layer alone
    LLAMA__BESIDE = 32, // only where there is a shared expert
    LLAMA__JOINED = 64, // gate and up of experts in one weight, where the file has it,
    LLAMA__SPLIT = 128  // and in two where it has not
};

typedef struct llama__weight {
    const char *name;
    size_t at;      // in llama_layer, or llama_model
    int cols, rows; // sizes; LLAMA__1 rows: a vector
    int families;   // that have it; others may not
    int flags;
} llama__weight;

#define LLAMA__AT(field) offsetof(llama_layer, field)

static const llama__weight llama__weights[] = { // of each layer: "blk.<layer>.<name>"
    {"attn_norm.weight", LLAMA__AT(attn_norm), LLAMA__E, LLAMA__1, LLAMA__ALL, 0},
    {"attn_norm.bias", LLAMA__AT(attn_norm_bias), LLAMA__E, LLAMA__1, LLAMA__GPT2, 0},
    {"attn_qkv.weight", LLAMA__AT(q), LLAMA__E, LLAMA__QKV, LLAMA__FUSED, 0},
    {"attn_qkv.bias", LLAMA__AT(q_bias), LLAMA__QKV, LLAMA__1, LLAMA__GPT2, 0},
    {"attn_qkv.bias", LLAMA__AT(q_bias), LLAMA__QKV, LLAMA__1, LLAMA__PHI3, LLAMA__OPTIONAL},
    {"attn_qkv.weight", LLAMA__AT(q), LLAMA__E, LLAMA__DC, LLAMA__DELTAS, 0},
    {"attn_gate.weight", LLAMA__AT(k), LLAMA__E, LLAMA__DV, LLAMA__DELTAS, 0},
    {"attn_q.weight", LLAMA__AT(q), LLAMA__E, LLAMA__Q, LLAMA__BIASED, 0},
    {"attn_q.weight", LLAMA__AT(q), LLAMA__E, LLAMA__2Q, LLAMA__OUT_GATES, 0},
    {"attn_k.weight", LLAMA__AT(k), LLAMA__E, LLAMA__KV, LLAMA__SEPARATE - LLAMA__GEMMA4_SHARED, 0},
    {"attn_k.weight", LLAMA__AT(k), LLAMA__E, LLAMA__KV, LLAMA__GEMMA4_SHARED, LLAMA__OPTIONAL},
    {"attn_v.weight", LLAMA__AT(v), LLAMA__E, LLAMA__KV, LLAMA__SEPARATE - LLAMA__GEMMA4S, 0},
    {"attn_v.weight", LLAMA__AT(v), LLAMA__E, LLAMA__KV, LLAMA__GEMMA4S, LLAMA__OPTIONAL},
    {"attn_q.bias", LLAMA__AT(q_bias), LLAMA__Q, LLAMA__1, LLAMA__BIASED, LLAMA__OPTIONAL},
    {"attn_k.bias", LLAMA__AT(k_bias), LLAMA__KV, LLAMA__1, LLAMA__BIASED, LLAMA__OPTIONAL},
    {"attn_v.bias", LLAMA__AT(v_bias), LLAMA__KV, LLAMA__1, LLAMA__BIASED, LLAMA__OPTIONAL},
    {"attn_q_norm.weight", LLAMA__AT(q_norm), LLAMA__D, LLAMA__1, LLAMA__HEAD_NORMS, 0},
    {"attn_k_norm.weight", LLAMA__AT(k_norm), LLAMA__D, LLAMA__1,
     LLAMA__HEAD_NORMS - LLAMA__GEMMA4_SHARED, 0},
    {"attn_k_norm.weight", LLAMA__AT(k_norm), LLAMA__D, LLAMA__1, LLAMA__GEMMA4_SHARED,
     LLAMA__OPTIONAL},
    {"attn_sinks.weight", LLAMA__AT(sinks), LLAMA__H, LLAMA__1, LLAMA__GPT_OSS, 0},
    {"attn_output.weight", LLAMA__AT(out), LLAMA__Q, LLAMA__E,
     LLAMA__ALL - LLAMA__CONVS - LLAMA__DELTAS, 0},
    {"attn_output.bias", LLAMA__AT(out_bias), LLAMA__E, LLAMA__1,
     LLAMA__ALL - LLAMA__GPT2 - LLAMA__GPT_OSS, LLAMA__OPTIONAL},
    {"attn_output.bias", LLAMA__AT(out_bias), LLAMA__E, LLAMA__1, LLAMA__GPT2 | LLAMA__GPT_OSS, 0},
    {"shortconv.in_proj.weight", LLAMA__AT(q), LLAMA__E, LLAMA__3E, LLAMA__CONVS, 0},
    {"shortconv.conv.weight", LLAMA__AT(conv), LLAMA__T, LLAMA__E, LLAMA__CONVS,
     LLAMA__ALONE | LLAMA__F32},
    {"shortconv.out_proj.weight", LLAMA__AT(out), LLAMA__E, LLAMA__E, LLAMA__CONVS, 0},
    {"ssm_conv1d.weight", LLAMA__AT(conv), LLAMA__T, LLAMA__DC, LLAMA__DELTAS,
     LLAMA__ALONE | LLAMA__F32},
    {"ssm_alpha.weight", LLAMA__AT(alpha), LLAMA__E, LLAMA__DH, LLAMA__DELTAS, 0},
    {"ssm_beta.weight", LLAMA__AT(beta), LLAMA__E, LLAMA__DH, LLAMA__DELTAS, 0},
    {"ssm_a", LLAMA__AT(a), LLAMA__DH, LLAMA__1, LLAMA__DELTAS, 0},
    {"ssm_dt.bias", LLAMA__AT(dt), LLAMA__DH, LLAMA__1, LLAMA__DELTAS, 0},
    {"ssm_norm.weight", LLAMA__AT(delta_norm), LLAMA__DD, LLAMA__1, LLAMA__DELTAS, 0},
    {"ssm_out.weight", LLAMA__AT(out), LLAMA__DV, LLAMA__E, LLAMA__DELTAS, 0},
    {"post_attention_norm.weight", LLAMA__AT(attn_post_norm), LLAMA__E, LLAMA__1, LLAMA__GEMMA, 0},
    {"post_attention_norm.weight", LLAMA__AT(ffn_norm), LLAMA__E, LLAMA__1, LLAMA__POST_NORMS, 0},
    {"ffn_norm.weight", LLAMA__AT(ffn_norm), LLAMA__E, LLAMA__1, LLAMA__ALL - LLAMA__POST_NORMS,
     0},
    {"ffn_norm.bias", LLAMA__AT(ffn_norm_bias), LLAMA__E, LLAMA__1, LLAMA__GPT2, 0},
    {"ffn_up.weight", LLAMA__AT(gate), LLAMA__E, LLAMA__F, LLAMA__GPT2, 0},
    {"ffn_up.bias", LLAMA__AT(gate_bias), LLAMA__F, LLAMA__1, LLAMA__GPT2, 0},
    {"ffn_up.weight", LLAMA__AT(gate), LLAMA__E, LLAMA__2F, LLAMA__PHI3, 0},
    {"ffn_gate.weight", LLAMA__AT(gate), LLAMA__E, LLAMA__F, LLAMA__GATED, 0},
    {"ffn_gate.bias", LLAMA__AT(gate_bias), LLAMA__F, LLAMA__1, LLAMA__GATED, LLAMA__OPTIONAL},
    {"ffn_up.weight", LLAMA__AT(up), LLAMA__E, LLAMA__F, LLAMA__GATED, 0},
    {"ffn_up.bias", LLAMA__AT(up_bias), LLAMA__F, LLAMA__1, LLAMA__GATED, LLAMA__OPTIONAL},
    {"ffn_down.weight", LLAMA__AT(down), LLAMA__F, LLAMA__E, LLAMA__DENSE, 0},
    {"ffn_down.bias", LLAMA__AT(down_bias), LLAMA__E, LLAMA__1, LLAMA__DENSE - LLAMA__GPT2,
     LLAMA__OPTIONAL},
    {"ffn_down.bias", LLAMA__AT(down_bias), LLAMA__E, LLAMA__1, LLAMA__GPT2, 0},
    {"ffn_gate_inp.weight", LLAMA__AT(router), LLAMA__E, LLAMA__X, LLAMA__MIXTURES, LLAMA__ALONE},
    {"ffn_gate_inp.scale", LLAMA__AT(router_norm), LLAMA__E, LLAMA__1, LLAMA__GEMMA4_MIX, 0},
    {"pre_ffw_norm_2.weight", LLAMA__AT(expert_norm), LLAMA__E, LLAMA__1, LLAMA__GEMMA4_MIX, 0},
    {"post_ffw_norm_1.weight", LLAMA__AT(dense_post_norm), LLAMA__E, LLAMA__1, LLAMA__GEMMA4_MIX,
     0},
    {"post_ffw_norm_2.weight", LLAMA__AT(expert_post_norm), LLAMA__E, LLAMA__1, LLAMA__GEMMA4_MIX,
     0},
    {"ffn_gate_inp.bias", LLAMA__AT(router_bias), LLAMA__X, LLAMA__1, LLAMA__GPT_OSS, 0},
    {"exp_probs_b.bias", LLAMA__AT(choice_bias), LLAMA__X, LLAMA__1,
     LLAMA__LFM2MOE | LLAMA__LFM2MOE_CONV, 0},
    {"ffn_gate_up_exps.weight", LLAMA__AT(expert_gate), LLAMA__E, LLAMA__2XF, LLAMA__JOINS,
     LLAMA__BY_EXPERT | LLAMA__JOINED},
    {"ffn_gate_exps.weight", LLAMA__AT(expert_gate), LLAMA__E, LLAMA__XF, LLAMA__MIXTURES,
     LLAMA__BY_EXPERT | LLAMA__SPLIT},
    {"ffn_gate_exps.bias", LLAMA__AT(expert_gate_bias), LLAMA__XF, LLAMA__X, LLAMA__GPT_OSS,
     LLAMA__ALONE},
    {"ffn_up_exps.weight", LLAMA__AT(expert_up), LLAMA__E, LLAMA__XF, LLAMA__MIXTURES,
     LLAMA__BY_EXPERT | LLAMA__SPLIT},
    {"ffn_up_exps.bias", LLAMA__AT(expert_up_bias), LLAMA__XF, LLAMA__X, LLAMA__GPT_OSS,
     LLAMA__ALONE},
    {"ffn_down_exps.weight", LLAMA__AT(expert_down), LLAMA__XF, LLAMA__E, LLAMA__MIXTURES,
     LLAMA__BY_EXPERT},
    {"ffn_down_exps.scale", LLAMA__AT(expert_scale), LLAMA__X, LLAMA__1, LLAMA__GEMMA4_MIX,
     LLAMA__OPTIONAL},
    {"ffn_down_exps.bias", LLAMA__AT(expert_down_bias), LLAMA__E, LLAMA__X, LLAMA__GPT_OSS,
     LLAMA__ALONE},
    {"ffn_gate_shexp.weight", LLAMA__AT(gate), LLAMA__E, LLAMA__F, LLAMA__SHARED, LLAMA__BESIDE},
    {"ffn_up_shexp.weight", LLAMA__AT(up), LLAMA__E, LLAMA__F, LLAMA__SHARED, LLAMA__BESIDE},
    {"ffn_down_shexp.weight", LLAMA__AT(down), LLAMA__F, LLAMA__E, LLAMA__SHARED, LLAMA__BESIDE},
    {"ffn_gate_inp_shexp.weight", LLAMA__AT(shared), LLAMA__E, LLAMA__1,
     LLAMA__QWEN35MOE | LLAMA__QWEN35MOE_DELTA, LLAMA__BESIDE},
    {"post_ffw_norm.weight", LLAMA__AT(ffn_post_norm), LLAMA__E, LLAMA__1, LLAMA__GEMMA, 0},
    {"inp_gate.weight", LLAMA__AT(apart_gate), LLAMA__E, LLAMA__A, LLAMA__GEMMA4S,
     LLAMA__APART | LLAMA__ALONE},
    {"proj.weight", LLAMA__AT(apart_out), LLAMA__A, LLAMA__E, LLAMA__GEMMA4S, LLAMA__APART},
    {"post_norm.weight", LLAMA__AT(apart_norm), LLAMA__E, LLAMA__1, LLAMA__GEMMA4S, LLAMA__APART},
    {"layer_output_scale.weight", LLAMA__AT(scale), LLAMA__1, LLAMA__1, LLAMA__GEMMA4S,
     LLAMA__OPTIONAL},
};

#undef LLAMA__AT
#define LLAMA__AT(field) offsetof(llama_model, field)

static const llama__weight llama__others[] = {
    {"token_embd.weight", LLAMA__AT(embedding), LLAMA__E, LLAMA__V, LLAMA__ALL, LLAMA__ALONE},
    {"position_embd.weight", LLAMA__AT(positions), LLAMA__E, LLAMA__P, LLAMA__GPT2, LLAMA__ALONE},
    {"output_norm.weight", LLAMA__AT(output_norm), LLAMA__E, LLAMA__1, LLAMA__ALL - LLAMA__LFM, 0},
    {"token_embd_norm.weight", LLAMA__AT(output_norm), LLAMA__E, LLAMA__1, LLAMA__LFM, 0},
    {"output_norm.bias", LLAMA__AT(output_norm_bias), LLAMA__E, LLAMA__1, LLAMA__GPT2, 0},
    {"output.weight", LLAMA__AT(output), LLAMA__E, LLAMA__V, LLAMA__ALL - LLAMA__GPT_OSS,
     LLAMA__OPTIONAL},
    {"output.weight", LLAMA__AT(output), LLAMA__E, LLAMA__V, LLAMA__GPT_OSS, 0},
    {"output.bias", LLAMA__AT(output_bias), LLAMA__V, LLAMA__1, LLAMA__ALL, LLAMA__OPTIONAL},
    {"per_layer_token_embd.weight", LLAMA__AT(apart_embedding), LLAMA__AL, LLAMA__V, LLAMA__GEMMA4S,
     LLAMA__APART | LLAMA__ALONE},
    {"per_layer_model_proj.weight", LLAMA__AT(apart_weight), LLAMA__E, LLAMA__AL, LLAMA__GEMMA4S,
     LLAMA__APART | LLAMA__ALONE},
    {"per_layer_proj_norm.weight", LLAMA__AT(apart_weight_norm), LLAMA__A, LLAMA__1, LLAMA__GEMMA4S,
     LLAMA__APART},
    {"rope_freqs.weight", LLAMA__AT(rope_freqs), LLAMA__R, LLAMA__1, LLAMA__GEMMA4S, 0},
    {"rope_freqs.weight", LLAMA__AT(rope_freqs), LLAMA__R, LLAMA__1,
     LLAMA__NEWER - LLAMA__GEMMA4S, LLAMA__OPTIONAL},
    {"rope_factors_short.weight", LLAMA__AT(rope_short), LLAMA__R, LLAMA__1, LLAMA__NEWER,
     LLAMA__OPTIONAL},
    {"rope_factors_long.weight", LLAMA__AT(rope_long), LLAMA__R, LLAMA__1, LLAMA__NEWER,
     LLAMA__OPTIONAL},
};

#undef LLAMA__AT

enum {
    LLAMA__N_WEIGHTS = sizeof llama__weights / sizeof llama__weights[0],
    LLAMA__N_OTHERS = sizeof llama__others / sizeof llama__others[0]
};

// ---------------------------------------------------------------------------------------------
// Families that are not supported
// ---------------------------------------------------------------------------------------------

// A tensor's name without the number of its layer.
static rocq_str llama__kind(rocq_str name) {
    if (name.length < 6 || memcmp(name.data, "blk.", 4) != 0) return name;
    const char *dot = (const char *)memchr(name.data + 4, '.', (size_t)name.length - 4);
    if (!dot) return name;
    const rocq_str kind = {dot + 1, name.length - (dot + 1 - name.data)};
    return kind;
}

static bool llama__has(const struct llama__family *family, rocq_str kind) {
    for (int k = 0; k < LLAMA__N_WEIGHTS + LLAMA__N_OTHERS; k++) {
        const llama__weight *w =
            k < LLAMA__N_WEIGHTS ? &llama__weights[k] : &llama__others[k - LLAMA__N_WEIGHTS];
        if ((w->families & family->bit) && rocq_str_equal(kind, w->name)) return true;
    }
    return false;
}

// How many tensors a family lacks that the file has, and the other way round; of the former up to
// three kinds are listed in text.
static int64_t llama__distance(const rocq_gguf *file, const struct llama__family *family,
                               char *text, size_t size) {
    int64_t strange = 0;
    int n_listed = 0;
    rocq_gguf_tensor t;
    text[0] = '\0';
    for (int64_t i = 0; i < rocq_gguf_tensor_count(file); i++) {
        if (rocq_gguf_tensor_at(file, i, &t) != ROCQ_OK) continue;
        char name[66];
        const rocq_str kind = llama__kind(t.name);
        if (llama__has(family, kind)) continue;
        strange++;
        const int length = (int)(kind.length < 60 ? kind.length : 60);
        snprintf(name, sizeof name, "%s%.*s", n_listed > 0 ? ", " : "", length, kind.data);
        if (n_listed == 3 || strstr(text, name + (n_listed > 0 ? 2 : 0))) continue;
        n_listed++;
        snprintf(text + strlen(text), size - strlen(text), "%s", name);
    }
    for (int k = 0; k < LLAMA__N_WEIGHTS; k++) {
        const llama__weight *w = &llama__weights[k];
        char name[64];
        snprintf(name, sizeof name, "blk.0.%s", w->name);
        const int bits = family->bit & LLAMA__ALL;
        if ((w->families & bits) != bits) continue; // in no layer, or not in all
        if (w->flags & (LLAMA__OPTIONAL | LLAMA__BESIDE | LLAMA__JOINED)) continue;
        if (rocq_gguf_find_tensor(file, name, &t) != ROCQ_OK) strange++;
    }
    return strange;
}

// One line: the nearest family that is supported, and what of the file it lacks.
static rocq_result llama__unknown(llama_model *m, const rocq_gguf *file, rocq_str name) {
    char text[240], least[240] = "";
    const char *nearest = NULL;
    int64_t fewest = 0;
    for (int i = 0; i < LLAMA__N_FAMILIES; i++) {
        const int64_t n = llama__distance(file, &llama__families[i], text, sizeof text);
        if (nearest && n >= fewest) continue;
        nearest = llama__families[i].name;
        fewest = n;
        memcpy(least, text, sizeof least);
    }
    return llama__fail(m, ROCQ_E_UNSUPPORTED, "model family \"%.*s\" is not supported; the nearest "
                       "is %s%s%s", (int)(name.length < 64 ? name.length : 64), name.data, nearest,
                       least[0] ? ", which has no " : ", whose tensors it has, but it may compute "
                       "other things with them", least);
}

// ---------------------------------------------------------------------------------------------
// Configuration
// ---------------------------------------------------------------------------------------------

// A value of another type than expected.
static rocq_result llama__mistyped(llama_model *m, rocq_result result, const rocq_gguf *file,
                                   const char *key, const char *expected) {
    static const char *const types[] = {"uint8", "int8", "uint16", "int16", "uint32", "int32",
                                        "float32", "bool", "string", "array", "uint64", "int64",
                                        "float64"}; // in the order of GGUF's numbers
    rocq_gguf_value value;
    if (rocq_gguf_find_value(file, key, &value) != ROCQ_OK) return result;
    return llama__fail(m, result, "%s is %s%s, expected %s", key, types[value.type],
                       value.is_array ? "s in an array" : "", expected);
}

// An array that has not one entry for each layer.
static rocq_result llama__miscounted(llama_model *m, const char *key, int64_t count) {
    return llama__fail(m, ROCQ_E_CORRUPT, "%s has %.0f entries, expected %d, one for each layer",
                       key, (double)count, (int)m->n_layers);
}

// The number "<family>.<name>": of any type of number that GGUF has, or only of its integer types
// where whole is set. A file may give it once for each layer instead, in an array: where layers may
// differ the largest entry counts, else its entries must be equal. *there: whether the file has the
// key at all, without which a required one is an error.
static rocq_result llama__read(llama_model *m, const rocq_gguf *file, const char *name, bool whole,
                               bool required, bool *there, double *out) {
    char key[128];
    rocq_gguf_value value;
    snprintf(key, sizeof key, "%s.%s", m->family, name);
    *there = rocq_gguf_find_value(file, key, &value) == ROCQ_OK;
    if (!*there && required) {
        return llama__fail(m, ROCQ_E_NOT_FOUND, "the file has no %s, expected %s", key,
                           whole ? "an integer" : "a number");
    }
    if (!*there) return ROCQ_OK;
    if (value.is_array && (value.count < 1 || value.count != m->n_layers)) {
        return llama__miscounted(m, key, value.count);
    }
    for (int64_t i = 0; i < value.count; i++) {
        int64_t integer;
        uint64_t natural;
        double number;
        if (rocq_gguf_value_i64(&value, i, &integer) == ROCQ_OK) {
            number = (double)integer;
        } else if (rocq_gguf_value_u64(&value, i, &natural) == ROCQ_OK) { // above 2^63
            number = (double)natural;
        } else if (whole || rocq_gguf_value_f64(&value, i, &number) != ROCQ_OK) {
            return llama__mistyped(m, ROCQ_E_TYPE, file, key, whole ? "an integer" : "a number");
        }
        if (i > 0 && m->row && m->row->mixed) {
            if (number < *out) continue;
        } else if (i > 0 && number != *out) {
            return llama__fail(m, ROCQ_E_UNSUPPORTED, "%s is %g in layer 0 and %g in layer %d: "
                               "layers of different shapes are not supported", key, *out, number,
                               (int)i);
        }
        *out = number;
    }
    return ROCQ_OK;
}

// An integer of 1 to 2^30. The default stands for a key that is absent, and for a 0 in an optional
// one, which is how llama.cpp writes down that a model does not have the thing.
static rocq_result llama__read_int(llama_model *m, const rocq_gguf *file, const char *name,
                                   int32_t fallback, int32_t *out) {
    const bool required = fallback == LLAMA__REQUIRED;
    bool there;
    double value = 0;
    LLAMA__TRY(llama__read(m, file, name, true, required, &there, &value));
    if (!required && value == 0) value = fallback;
    else if (value < 1 || value > 1 << 30) {
        return llama__fail(m, ROCQ_E_CORRUPT, "%s.%s is %.0f, expected 1 to %d%s", m->family, name,
                           value, 1 << 30, required ? "" : ", or 0");
    }
    *out = (int32_t)value;
    return ROCQ_OK;
}

// A number that is not negative; a 0 that is there counts.
static rocq_result llama__read_float(llama_model *m, const rocq_gguf *file, const char *name,
                                     float fallback, float *out) {
    bool there;
    double value = 0;
    LLAMA__TRY(llama__read(m, file, name, false, fallback < 0, &there, &value));
    if (!there) value = (double)fallback;
    else if (!(value >= 0 && value < 1e30)) { // NaN fails too
        return llama__fail(m, ROCQ_E_CORRUPT, "%s.%s is %g, expected 0 to 1e30", m->family, name,
                           value);
    }
    *out = (float)value;
    return ROCQ_OK;
}

// Fails for a model in which a token sees those behind it. What it computes for a token changes as
// text is added, so it has no keys and values that a cache could keep, and continues no text.
static rocq_result llama__read_causal(llama_model *m, const rocq_gguf *file) {
    char key[128];
    bool causal = true;
    snprintf(key, sizeof key, "%s.attention.causal", m->family);
    const rocq_result result = rocq_gguf_get_bool(file, key, &causal);
    if (result != ROCQ_OK && result != ROCQ_E_NOT_FOUND) {
        return llama__mistyped(m, result, file, key, "a bool");
    }
    if (causal) return ROCQ_OK;
    return llama__fail(m, ROCQ_E_UNSUPPORTED, "%s is false, expected true: models whose tokens see "
                       "those behind them are not supported", key);
}

// Tokens that are never to be drawn: in gemma4's files those that stand for pictures and sounds.
static rocq_result llama__read_suppressed(llama_model *m, const rocq_gguf *file) {
    static const char key[] = "tokenizer.ggml.suppress_tokens";
    rocq_gguf_value *tokens = &m->suppressed;
    int64_t token;
    uint64_t natural; // what is above 2^63 is an integer, too, though no token
    if (rocq_gguf_find_value(file, key, tokens) != ROCQ_OK || tokens->count == 0) return ROCQ_OK;
    if (tokens->is_array && (rocq_gguf_value_i64(tokens, 0, &token) == ROCQ_OK ||
                             rocq_gguf_value_u64(tokens, 0, &natural) == ROCQ_OK)) {
        return ROCQ_OK;
    }
    return llama__mistyped(m, ROCQ_E_TYPE, file, key, "an array of integers");
}

// YaRN's magnitude of keys and queries at a context that is stretched by factor.
static float llama__yarn_magnitude(float factor, float by) {
    return factor > 1 ? 1 + 0.1f * by * logf(factor) : 1.0f;
}

// Positions: how fast each pair of a head turns, and what stretches a model beyond its training.
static rocq_result llama__read_rope(llama_model *m, const rocq_gguf *file) {
    char key[128];
    rocq_str scaling = {"linear", 6};
    float factor, log_multiplier;
    rocq_rope_config *rope = &m->rope;
    LLAMA__TRY(llama__read_int(m, file, "rope.dimension_count", m->head_dim, &rope->n_dims));
    LLAMA__TRY(llama__read_float(m, file, "rope.freq_base", 10000, &rope->freq_base));
    LLAMA__TRY(llama__read_float(m, file, "rope.scale_linear", 0, &factor)); // the key's older name
    LLAMA__TRY(llama__read_float(m, file, "rope.scaling.factor", factor, &factor));
    LLAMA__TRY(llama__read_float(m, file, "rope.scaling.attn_factor", 1, &rope->attn_factor));
    LLAMA__TRY(llama__read_float(m, file, "rope.scaling.yarn_beta_fast", 0, &rope->beta_fast));
    LLAMA__TRY(llama__read_float(m, file, "rope.scaling.yarn_beta_slow", 0, &rope->beta_slow));
    LLAMA__TRY(llama__read_float(m, file, "rope.scaling.yarn_log_multiplier", 0, &log_multiplier));
    LLAMA__TRY(llama__read_int(m, file, "rope.scaling.original_context_length", m->n_ctx_train,
                               &rope->n_ctx_orig));
    snprintf(key, sizeof key, "%s.rope.scaling.type", m->family);
    const rocq_result typed = rocq_gguf_get_str(file, key, &scaling);
    if (typed != ROCQ_OK && typed != ROCQ_E_NOT_FOUND) {
        return llama__mistyped(m, typed, file, key, "a string");
    }
    const bool none = rocq_str_equal(scaling, "none"), yarn = rocq_str_equal(scaling, "yarn");
    if (!none && !yarn && !rocq_str_equal(scaling, "linear") &&
        !rocq_str_equal(scaling, "longrope")) { // whose factors are tensors
        return llama__fail(m, ROCQ_E_UNSUPPORTED, "%s is \"%.*s\", expected \"none\", \"linear\", "
                           "\"yarn\" or \"longrope\"", key,
                           (int)(scaling.length < 100 ? scaling.length : 100), scaling.data);
    }
    if (rope->n_dims > m->head_dim || rope->n_dims % 2 != 0) {
        return llama__fail(m, ROCQ_E_CORRUPT, "%s.rope.dimension_count is %d, expected an even "
                           "number up to %d, the size of a head", m->family, (int)rope->n_dims,
                           (int)m->head_dim);
    }
    if (factor > 0 && !none) rope->freq_scale = 1 / factor;
    rope->ext_factor = yarn ? 1.0f : 0.0f;
    if (yarn) rope->attn_factor /= llama__yarn_magnitude(factor, log_multiplier);
    return ROCQ_OK;
}

// Sizes of the feed-forward part: a dense one's, or of the experts and of the shared one.
static rocq_result llama__read_experts(llama_model *m, const rocq_gguf *file) {
    int32_t n_ff;
    if (!m->row->experts) {
        return llama__read_int(m, file, "feed_forward_length", LLAMA__REQUIRED, &m->n_ff);
    }
    LLAMA__TRY(llama__read_int(m, file, "feed_forward_length", 0, &n_ff));
    LLAMA__TRY(llama__read_int(m, file, "expert_feed_forward_length",
                               n_ff > 0 ? n_ff : LLAMA__REQUIRED, &m->expert_ff));
    LLAMA__TRY(llama__read_int(m, file, "expert_shared_feed_forward_length", 0, &m->n_ff));
    if (m->row->mixed) m->n_ff = n_ff; // of the dense part
    if (m->row->convolves) {
        int32_t scores;
        LLAMA__TRY(llama__read_int(m, file, "leading_dense_block_count", 0, &m->n_leading));
        LLAMA__TRY(llama__read_int(m, file, "expert_gating_func", LLAMA__REQUIRED, &scores));
        if (scores != 2) {
            return llama__fail(m, ROCQ_E_UNSUPPORTED, "%s.expert_gating_func is %d, expected 2 "
                               "(sigmoid)", m->family, (int)scores);
        }
        if (m->n_leading > 0) m->n_ff = n_ff;
    }
    LLAMA__TRY(llama__read_int(m, file, "expert_used_count", LLAMA__REQUIRED, &m->n_used));
    LLAMA__TRY(llama__read_float(m, file, "expert_weights_scale", 0, &m->expert_scale));
    if (m->n_used <= m->n_experts) return ROCQ_OK;
    return llama__fail(m, ROCQ_E_CORRUPT, "%s.expert_used_count is %d, expected 1 to %d, the "
                       "number of experts", m->family, (int)m->n_used, (int)m->n_experts);
}

// The size of an embedding, and how many heads share it: all shapes follow from it, so a wrong one
// would be found later, as something else that is wrong.
static rocq_result llama__read_width(llama_model *m, const rocq_gguf *file) {
    rocq_gguf_tensor rows;
    LLAMA__TRY(llama__read_int(m, file, "embedding_length", LLAMA__REQUIRED, &m->n_embd));
    if (rocq_gguf_find_tensor(file, "token_embd.weight", &rows) == ROCQ_OK &&
        rows.ne[0] != m->n_embd) {
        return llama__fail(m, ROCQ_E_SHAPE, "%s.embedding_length is %d, expected %.0f, the size of "
                           "token_embd.weight's rows", m->family, (int)m->n_embd,
                           (double)rows.ne[0]);
    }
    LLAMA__TRY(llama__read_int(m, file, "attention.head_count", LLAMA__REQUIRED, &m->n_heads));
    const int32_t split = m->n_embd % m->n_heads == 0 ? m->n_embd / m->n_heads : 0;
    LLAMA__TRY(llama__read_int(m, file, "attention.key_length", split, &m->head_dim));
    if (m->head_dim > 0) return ROCQ_OK;
    return llama__fail(m, ROCQ_E_CORRUPT, "%s.attention.head_count is %d, expected a divisor of "
                       "embedding_length, %d, as there is no attention.key_length", m->family,
                       (int)m->n_heads, (int)m->n_embd);
}

static rocq_result llama__read_config(llama_model *m, const rocq_gguf *file) {
    rocq_str name;
    rocq_gguf_value tokens;
    int32_t value_dim;
    const rocq_result named = rocq_gguf_get_str(file, "general.architecture", &name);
    if (named == ROCQ_E_NOT_FOUND) {
        return llama__fail(m, named, "the file has no general.architecture, expected the name of a "
                           "family, as \"%s\"", llama__families[0].name);
    }
    if (named != ROCQ_OK) {
        return llama__mistyped(m, named, file, "general.architecture", "a string");
    }
    for (int i = 0; i < LLAMA__N_FAMILIES; i++) {
        if (rocq_str_equal(name, llama__families[i].name)) m->family = llama__families[i].name;
    }
    if (!m->family) return llama__unknown(m, file, name);
    LLAMA__TRY(llama__read_int(m, file, "block_count", LLAMA__REQUIRED, &m->n_layers));
    if (m->n_layers > 1024) {
        return llama__fail(m, ROCQ_E_CORRUPT, "%s.block_count is %d, expected 1 to 1024",
                           m->family, (int)m->n_layers);
    }
    LLAMA__TRY(llama__read_int(m, file, "expert_count", 1, &m->n_experts));
    for (int i = 0; i < LLAMA__N_FAMILIES; i++) {
        const struct llama__family *row = &llama__families[i];
        if (row->name == m->family && row->experts == (m->n_experts > 1)) m->row = row;
    }
    if (!m->row) {
        return llama__fail(m, ROCQ_E_UNSUPPORTED, "%s.expert_count is %d, expected %s", m->family,
                           (int)m->n_experts, m->n_experts > 1 ? "0: mixtures of this family are "
                                                                 "not supported" : "2 or more");
    }
    if (m->row->deltas) { // the last layers may be for guessing tokens ahead, which is not done
        LLAMA__TRY(llama__read_int(m, file, "nextn_predict_layers", 0, &m->n_ahead));
        if (m->n_ahead >= m->n_layers) {
            return llama__fail(m, ROCQ_E_CORRUPT, "%s.nextn_predict_layers is %d, expected fewer "
                               "than block_count, %d", m->family, (int)m->n_ahead,
                               (int)m->n_layers);
        }
        m->n_layers -= m->n_ahead;
    }
    m->rope.pairing = m->row->pairing;
    m->activation = m->row->activation;
    LLAMA__TRY(llama__read_width(m, file));
    LLAMA__TRY(llama__read_experts(m, file));
    LLAMA__TRY(llama__read_int(m, file, "context_length", LLAMA__REQUIRED, &m->n_ctx_train));
    LLAMA__TRY(llama__read_float(m, file, m->row->norm_eps, LLAMA__REQUIRED, &m->norm_eps));
    LLAMA__TRY(llama__read_int(m, file, "attention.value_length", m->n_embd / m->n_heads,
                               &value_dim));
    if (value_dim != m->head_dim) {
        return llama__fail(m, ROCQ_E_UNSUPPORTED, "%s.attention.value_length is %d, expected %d, "
                           "as attention.key_length", m->family, (int)value_dim,
                           (int)m->head_dim);
    }
    if (rocq_gguf_find_value(file, "tokenizer.ggml.tokens", &tokens) == ROCQ_OK &&
        tokens.count > 0 && tokens.count < 1 << 30) {
        m->n_vocab = (int32_t)tokens.count;
    } else {
        LLAMA__TRY(llama__read_int(m, file, "vocab_size", LLAMA__REQUIRED, &m->n_vocab));
    }
    LLAMA__TRY(llama__read_suppressed(m, file));
    LLAMA__TRY(llama__read_causal(m, file));
    return llama__read_rope(m, file);
}

// Entry i of an array with a yes or a no for each layer: booleans, or integers 0 and 1.
static rocq_result llama__read_flag(llama_model *m, const rocq_gguf *file, const char *key,
                                    const rocq_gguf_value *value, int32_t i, bool *out) {
    int64_t number = 0;
    if (rocq_gguf_value_bool(value, i, out) == ROCQ_OK) return ROCQ_OK;
    if (rocq_gguf_value_i64(value, i, &number) != ROCQ_OK) {
        return llama__mistyped(m, ROCQ_E_TYPE, file, key, "integers or bools");
    }
    if ((number | 1) != 1) {
        return llama__fail(m, ROCQ_E_TYPE, "%s is %.0f in entry %d, expected 0 or 1", key,
                           (double)number, (int)i);
    }
    *out = number == 1;
    return ROCQ_OK;
}

// Which layers see no further back than the window: by an array with one entry a layer,
// or by a number n, where of each n layers all but the last do. As in llama.cpp, n = 0 means all.
static rocq_result llama__read_windows(llama_model *m, const rocq_gguf *file, int32_t window) {
    static const char name[] = "attention.sliding_window_pattern";
    char key[128];
    rocq_gguf_value value;
    double period = m->row->period;
    bool there;
    snprintf(key, sizeof key, "%s.%s", m->family, name);
    if (rocq_gguf_find_value(file, key, &value) != ROCQ_OK || !value.is_array) {
        LLAMA__TRY(llama__read(m, file, name, true, false, &there, &period));
        if (period < 0 || period > 1 << 30) {
            return llama__fail(m, ROCQ_E_CORRUPT, "%s is %.0f, expected 0 to %d", key, period,
                               1 << 30);
        }
        for (int32_t i = 0, n = (int32_t)period; i < m->n_layers; i++) {
            m->layers[i].window = n > 0 && i % n == n - 1 ? 0 : window;
        }
        return ROCQ_OK;
    }
    if (value.count != m->n_layers) {
        return llama__miscounted(m, key, value.count);
    }
    for (int32_t i = 0; i < m->n_layers; i++) {
        bool windowed;
        LLAMA__TRY(llama__read_flag(m, file, key, &value, i, &windowed));
        m->layers[i].window = windowed ? window : 0;
    }
    return ROCQ_OK;
}

// Each layer's positions: as the model's, but for those that turn nothing, and those whose window
// needs no stretching.
static rocq_result llama__read_ropes(llama_model *m, const rocq_gguf *file) {
    const struct llama__family *row = m->row;
    float local_base;
    int32_t local_dims = m->rope.n_dims;
    LLAMA__TRY(llama__read_float(m, file, "rope.freq_base_swa",
                                 row->local_base > 0 ? row->local_base : m->rope.freq_base,
                                 &local_base));
    if (row->mixed) {
        LLAMA__TRY(llama__read_int(m, file, "rope.dimension_count_swa", m->local_dim, &local_dims));
    }
    if (row->mixed && (local_dims > m->local_dim || local_dims % 2 != 0)) {
        return llama__fail(m, ROCQ_E_CORRUPT, "%s.rope.dimension_count_swa is %d, expected an even "
                           "number up to %d, the size of a head", m->family, (int)local_dims,
                           (int)m->local_dim);
    }
    for (int32_t i = 0; i < m->n_layers; i++) {
        rocq_rope_config *rope = &m->layers[i].rope;
        *rope = m->rope;
        if (m->layers[i].window > 0) {
            rope->freq_base = local_base;
            rope->n_dims = local_dims;
            if (row->local_base > 0) rope->freq_scale = 1;
        }
        if (row->no_rope > 0 && i % row->no_rope == row->no_rope - 1) {
            rope->pairing = ROCQ_ROPE_NONE;
        }
    }
    return ROCQ_OK;
}

// Of positions in several dimensions, as pictures have them, text has the same in the first three,
// and 0 in the fourth: then all pairs must turn by one of the three.
static rocq_result llama__read_sections(llama_model *m, const rocq_gguf *file) {
    char key[128];
    rocq_gguf_value value;
    int64_t size[4], all = 0;
    snprintf(key, sizeof key, "%s.rope.dimension_sections", m->family);
    if (rocq_gguf_find_value(file, key, &value) != ROCQ_OK) return ROCQ_OK;
    if (!value.is_array || value.count != 4) {
        return llama__fail(m, ROCQ_E_CORRUPT, "%s has %.0f entries, expected 4", key,
                           (double)value.count);
    }
    for (int64_t i = 0; i < 4; i++) {
        size[i] = -1;
        if (rocq_gguf_value_i64(&value, i, &size[i]) != ROCQ_OK || size[i] < 0 ||
            size[i] > 1 << 20) {
            return llama__fail(m, ROCQ_E_CORRUPT, "%s is %.0f in entry %d, expected 0 to %d", key,
                               (double)size[i], (int)i, 1 << 20);
        }
        all += size[i];
    }
    for (int64_t i = 0; i < m->rope.n_dims / 2; i++) {
        const int64_t at = all > 0 ? i % all : 0;
        if (at < 3 * size[at % 3]) continue;
        return llama__fail(m, ROCQ_E_UNSUPPORTED, "%s leaves pair %d of a head to a fourth "
                           "dimension, which text does not have", key, (int)i);
    }
    return ROCQ_OK;
}

// The shapes of delta nets, and which layers have one: by an array, or all but each n-th.
static rocq_result llama__read_deltas(llama_model *m, const rocq_gguf *file) {
    char key[128];
    int32_t inner, interval;
    rocq_gguf_value value;
    LLAMA__TRY(llama__read_int(m, file, "ssm.group_count", LLAMA__REQUIRED, &m->delta_groups));
    LLAMA__TRY(llama__read_int(m, file, "ssm.time_step_rank", LLAMA__REQUIRED, &m->delta_heads));
    LLAMA__TRY(llama__read_int(m, file, "ssm.state_size", LLAMA__REQUIRED, &m->delta_dim));
    LLAMA__TRY(llama__read_int(m, file, "ssm.inner_size", LLAMA__REQUIRED, &inner));
    LLAMA__TRY(llama__read_int(m, file, "full_attention_interval", 4, &interval));
    if (m->delta_dim > ROCQ_DELTA_NET_KEYS || m->delta_heads % m->delta_groups != 0 ||
        (int64_t)m->delta_heads * m->delta_dim != inner) {
        return llama__fail(m, ROCQ_E_UNSUPPORTED, "%s.ssm.state_size is %d, expected up to %d; "
                           "inner_size is %d, expected %.0f, that by time_step_rank; which is %d, "
                           "expected a multiple of group_count, %d", m->family, (int)m->delta_dim,
                           (int)ROCQ_DELTA_NET_KEYS, (int)inner,
                           (double)m->delta_heads * m->delta_dim, (int)m->delta_heads,
                           (int)m->delta_groups);
    }
    snprintf(key, sizeof key, "%s.attention.recurrent_layers", m->family);
    const bool listed = rocq_gguf_find_value(file, key, &value) == ROCQ_OK;
    if (listed && (!value.is_array || value.count < m->n_layers)) {
        return llama__miscounted(m, key, value.count);
    }
    for (int32_t i = 0; i < m->n_layers; i++) {
        bool delta = (i + 1) % interval != 0;
        if (listed) LLAMA__TRY(llama__read_flag(m, file, key, &value, i, &delta));
        m->layers[i].bit &= delta ? LLAMA__DELTAS : ~LLAMA__DELTAS;
        m->n_convs += delta;
    }
    return llama__read_sections(m, file);
}

// KV heads, and what kind each layer is of: where layers may convolve, those without KV heads do,
// and the other entries of the array must be equal.
static rocq_result llama__read_kinds(llama_model *m, const rocq_gguf *file) {
    const struct llama__family *row = m->row;
    char key[128];
    rocq_gguf_value heads;
    snprintf(key, sizeof key, "%s.attention.head_count_kv", m->family);
    const bool mixed = row->convolves && rocq_gguf_find_value(file, key, &heads) == ROCQ_OK &&
                       heads.is_array && heads.count == m->n_layers;
    if (!mixed) {
        LLAMA__TRY(llama__read_int(m, file, "attention.head_count_kv", m->n_heads,
                                   &m->n_kv_heads));
    }
    for (int32_t i = 0; i < m->n_layers; i++) {
        int64_t n = mixed ? -1 : m->n_kv_heads;
        if (mixed && (rocq_gguf_value_i64(&heads, i, &n) != ROCQ_OK || n < 0 || n > 1 << 30)) {
            return llama__fail(m, ROCQ_E_CORRUPT, "%s is %.0f in layer %d, expected 0 to %d", key,
                               (double)n, (int)i, 1 << 30);
        }
        if (n > 0 && m->n_kv_heads > 0 && n != m->n_kv_heads) {
            return llama__fail(m, ROCQ_E_UNSUPPORTED, "%s is %d in one layer and %d in layer %d: "
                               "layers of different shapes are not supported", key,
                               (int)m->n_kv_heads, (int)n, (int)i);
        }
        if (n > 0) m->n_kv_heads = (int32_t)n;
        m->layers[i].bit = row->bit;
        if (!row->convolves) continue;
        m->layers[i].bit &= n > 0 ? ~LLAMA__CONVS : LLAMA__CONVS;
        if (row->experts) m->layers[i].bit &= i < m->n_leading ? LLAMA__DENSE : LLAMA__EXPERTS;
        if (n == 0) m->n_convs++;
    }
    if (m->n_kv_heads < 1 || m->n_heads % m->n_kv_heads != 0) {
        return llama__fail(m, ROCQ_E_CORRUPT, "%s is %d, expected a divisor of "
                           "attention.head_count, %d", key, (int)m->n_kv_heads, (int)m->n_heads);
    }
    if (row->deltas) LLAMA__TRY(llama__read_deltas(m, file));
    if (!row->convolves && !row->deltas) return ROCQ_OK;
    const char *taps = row->deltas ? "ssm.conv_kernel" : "shortconv.l_cache";
    LLAMA__TRY(llama__read_int(m, file, taps, LLAMA__REQUIRED, &m->n_taps));
    if (m->n_taps > 1 && m->n_taps <= ROCQ_SHORTCONV_TAPS) return ROCQ_OK;
    return llama__fail(m, ROCQ_E_UNSUPPORTED, "%s.%s is %d, expected 2 to %d", m->family, taps,
                       (int)m->n_taps, (int)ROCQ_SHORTCONV_TAPS);
}

// An integer of one layer, from an array with an entry for each; else *out stays.
static rocq_result llama__read_entry(llama_model *m, const rocq_gguf *file, const char *name,
                                     int32_t layer, int32_t *out) {
    char key[128];
    rocq_gguf_value value;
    int64_t number = -1;
    snprintf(key, sizeof key, "%s.%s", m->family, name);
    if (rocq_gguf_find_value(file, key, &value) != ROCQ_OK || !value.is_array) return ROCQ_OK;
    if (rocq_gguf_value_i64(&value, layer, &number) != ROCQ_OK || number < 1 || number > 1 << 30) {
        return llama__fail(m, ROCQ_E_CORRUPT, "%s is %.0f in layer %d, expected 1 to %d", key,
                           (double)number, (int)layer, 1 << 30);
    }
    *out = (int32_t)number;
    return ROCQ_OK;
}

// The shape of each layer: that of the model or, where layers are mixed, heads of another size in
// those with a window, and its own number of KV heads and FF. The last layers may have no keys and
// values: they attend to those of the newest layer of their kind before them.
static rocq_result llama__read_shapes(llama_model *m, const rocq_gguf *file) {
    int32_t newest[2] = {-1, -1}; // with keys and values, global and local
    int32_t n_shared = 0, value_dim = m->head_dim;
    m->local_dim = m->head_dim;
    if (m->row->mixed) {
        LLAMA__TRY(llama__read_int(m, file, "attention.key_length_swa", LLAMA__REQUIRED,
                                   &m->local_dim));
        LLAMA__TRY(llama__read_int(m, file, "attention.value_length_swa", m->local_dim,
                                   &value_dim));
        LLAMA__TRY(llama__read_int(m, file, "attention.shared_kv_layers", 0, &n_shared));
        LLAMA__TRY(llama__read_int(m, file, "embedding_length_per_layer_input", 0, &m->n_apart));
    }
    if (value_dim != m->local_dim) {
        return llama__fail(m, ROCQ_E_UNSUPPORTED, "%s.attention.value_length_swa is %d, expected "
                           "%d, as attention.key_length_swa", m->family, (int)value_dim,
                           (int)m->local_dim);
    }
    for (int32_t i = 0; i < m->n_layers; i++) {
        llama_layer *l = &m->layers[i];
        l->source = i;
        l->head_dim = m->head_dim;
        l->n_kv_heads = m->n_kv_heads;
        l->n_ff = m->n_ff;
        if (!m->row->mixed) continue;
        const int kind = l->window > 0;
        const int32_t before = newest[kind];
        if (kind) l->head_dim = m->local_dim;
        LLAMA__TRY(llama__read_entry(m, file, "attention.head_count_kv", i, &l->n_kv_heads));
        LLAMA__TRY(llama__read_entry(m, file, "feed_forward_length", i, &l->n_ff));
        if (i < m->n_layers - n_shared) newest[kind] = i;
        l->source = newest[kind];
        l->bit &= l->source == i ? ~LLAMA__GEMMA4_SHARED : ~LLAMA__GEMMA4;
        const llama_layer *like = before < 0 ? l : &m->layers[before];
        if (l->source < 0) {
            return llama__fail(m, ROCQ_E_UNSUPPORTED, "%s.attention.shared_kv_layers is %d of %d: "
                               "layer %d has no keys and values, nor has one of its kind before it",
                               m->family, (int)n_shared, (int)m->n_layers, (int)i);
        }
        if (like->n_kv_heads != l->n_kv_heads || m->n_heads % l->n_kv_heads != 0) {
            return llama__fail(m, ROCQ_E_UNSUPPORTED, "%s.attention.head_count_kv is %d in layer "
                               "%d, expected %d, as in others of its kind, a divisor of "
                               "attention.head_count, %d", m->family, (int)l->n_kv_heads, (int)i,
                               (int)like->n_kv_heads, (int)m->n_heads);
        }
    }
    return ROCQ_OK;
}

// Numbers that only some families have.
static rocq_result llama__read_numbers(llama_model *m, const rocq_gguf *file) {
    const struct llama__family *row = m->row;
    const int32_t scaled_dim = m->n_layers == row->odd ? m->n_embd / m->n_heads : m->head_dim;
    int32_t window = 0;
    LLAMA__TRY(llama__read_kinds(m, file));
    m->attention_scale = row->value_norm ? 1 : 1 / sqrtf((float)scaled_dim);
    m->embedding_scale = row->root_embedding ? sqrtf((float)m->n_embd) : 1.0f;
    m->logit_scale = 1;
    if (row->scales) {
        float attention, embedding, added, logits;
        bool turns = true;
        char key[128];
        LLAMA__TRY(llama__read_float(m, file, "attention.scale", 0, &attention));
        LLAMA__TRY(llama__read_float(m, file, "embedding_scale", 0, &embedding));
        LLAMA__TRY(llama__read_float(m, file, "residual_scale", 0, &added));
        LLAMA__TRY(llama__read_float(m, file, "logit_scale", LLAMA__REQUIRED, &logits));
        if (logits == 0) {
            return llama__fail(m, ROCQ_E_CORRUPT, "%s.logit_scale is 0, expected more", m->family);
        }
        if (attention > 0) m->attention_scale = attention;
        if (embedding > 0) m->embedding_scale = embedding;
        m->logit_scale = 1 / logits;
        // What a layer adds to the residual stream is multiplied by a scale. Only norms read the
        // stream, to which its own scale is nothing but another epsilon: so all else is divided.
        if (added > 0) {
            m->embedding_scale /= added;
            m->norm_eps /= added * added;
        }
        // Whether anything turns at all. With experts llama.cpp takes no notice, and writes false.
        snprintf(key, sizeof key, "%s.rope.scaling.finetuned", m->family);
        if (!row->experts && rocq_gguf_get_bool(file, key, &turns) == ROCQ_OK && !turns) {
            m->rope.pairing = ROCQ_ROPE_NONE;
        }
    }
    if (row->temperature) {
        LLAMA__TRY(llama__read_float(m, file, "attention.temperature_scale", 0, &m->temperature));
    }
    if (row->caps) {
        if (row->attention_cap > 0) {
            LLAMA__TRY(llama__read_float(m, file, "attn_logit_softcapping", row->attention_cap,
                                         &m->attention_softcap));
        }
        LLAMA__TRY(llama__read_float(m, file, "final_logit_softcapping", row->final_cap,
                                     &m->final_softcap));
    }
    if (row->windows) {
        LLAMA__TRY(llama__read_int(m, file, "attention.sliding_window", row->window, &window));
        LLAMA__TRY(llama__read_windows(m, file, window));
    }
    LLAMA__TRY(llama__read_shapes(m, file));
    return llama__read_ropes(m, file);
}

#endif // FAMILIES_H
