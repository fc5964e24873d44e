// train.h - trains the models of llama.h, on rocq.h: all their weights, or low-rank adapters (LoRA,
// arXiv 2106.09685) beside weights of any format, which stay as they are.
//
//     llama_options small = {.n_ctx = 8, .n_batch = 1}; // neither its cache nor its batch is used
//     train_options how = {.n_seqs = 4, .n_tokens = 256, .rank = 8};
//     trainer t;
//     llama_open(&m, ctx, file, &small);
//     if (train_open(&t, &m, &how) != ROCQ_OK) puts(t.error);
//     for (int i = 0; i < 100; i++) {
//         train_batch batch = {.ids = ids, .targets = targets}; // other texts each time
//         if (train_step(&t, &batch, 1e-4f) != ROCQ_OK) puts(t.error);
//         printf("%g\n", t.result.loss);
//     }
//     train_write_lora(&t, "voice.gguf");
//     train_close(&t);
//     llama_close(&m);
//
// There is no tape: train__forward and train__backward below are the model's graph and its reverse,
// written out once for all families. All weights that are trained lie behind each other in one
// tensor, and so do their gradients and moments, so that clipping and AdamW are a few launches.

#ifndef TRAIN_H
#define TRAIN_H

#include "../rocq.h"
#include "llama.h"

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

typedef struct train_options { // 0 = default, as everywhere in rocq
    int32_t n_seqs;       // sequences that are computed at once, a micro-batch; default 1
    int32_t n_tokens;     // of a sequence; default what the model was trained on, at most 512
    int32_t n_accumulate; // micro-batches of a step, whose gradients are added up; default 1
    int32_t rank;         // of the adapters, up to 512; 0 = the weights themselves are trained
    float alpha;          // an adapter is added alpha / rank times; default rank
    const char *targets;  // matrices that get an adapter, as in "q,v": of q k v (gpt2: qkv) output
                          // gate up down; default all
    uint64_t seed;        // of the adapters' first values
    int64_t budget;       // bytes of activations kept from forward to backward: as many of the
                          // first layers as it takes keep their input alone, and are computed
                          // again. 0 = no limit; at least one layer's have to fit
    int32_t n_logits;     // tokens whose logits exist at once, default 512, on a GPU 2048
    float beta1, beta2;   // of AdamW: default 0.9, 0.999
    float eps;            // default 1e-8
    float weight_decay;   // of matrices, not of norms and biases; default 0
    float max_norm;       // a longer gradient is shortened to it; default 1, -1 = none is
    float loss_scale;     // first one, a power of two; default 65536 where operands are F16, else
                          // 1, which stays
    bool moments8;        // AdamW's moments in 8 bits, 1 byte and a bit instead of 4 each
    bool take_weights;    // without rank: the model's own weights are freed as soon as they are
                          // copied, and the model can only be closed from then on; E_STATE while
                          // another model shares them (llama_options.share)
    rocq_precision precision; // of products; default F32 on the CPU, F16 on a GPU, where with F32
                              // activations and weights are F32 too. INT8: of frozen weights in
                              // the forward, as inference has it; faster, and less exact
} train_options;

// The texts of one step: n_accumulate micro-batches of n_seqs sequences of n_tokens tokens each.
typedef struct train_batch {
    const int32_t *ids;
    const int32_t *targets; // what is to be predicted behind each token, mostly the next one; -1 =
                            // nothing: a prompt's, a text's end, padding
    const float *weights;   // of the targets' losses, 0 or more, or NULL: 1 each
} train_batch;

typedef struct train_result { // of the last step
    double loss;        // mean over targets by weight, in nats, before the step
    int32_t n_targets;  // with a weight above 0
    bool skipped;       // the gradient was not finite, and nothing has changed but n_skipped, and
                        // on a GPU the loss scale, which is halved
    float norm;         // of the gradient, before it was clipped
    float loss_scale;   // of the next step
    int64_t n_steps;    // so far, those before a train_load included, without skipped ones
    int64_t n_skipped;
} train_result;

// Beside the weights of a layer, which lie in w as in the model's own llama_layer, what goes with
// each in the same place of another one. n_dims 0 = none.
typedef struct train__layer {
    llama_layer w;              // as products read them
    llama_layer dw;             // gradients of those that are trained
    llama_layer a, b, da, db;   // adapters: [in, rank] and [rank, out], and their gradients
    llama_layer low;            // [rank, N] a x
    llama_layer mean, rstd;     // [N] of the norm with that weight; of q_norm and k_norm [heads, N]
    rocq_tensor x;              // F32 [n_embd, N], the layer's input
    rocq_tensor h;              // [n_embd, N] normed
    rocq_tensor raw;            // [Q + KV, N] q and k before their norms       qwen3
    rocq_tensor qkv;            // [Q + 2 KV, N] as attention reads them
    rocq_tensor lse;            // F32 [n_heads, n_tokens, n_seqs]
    rocq_tensor seen;           // [Q, N] by attention
    rocq_tensor attended;       // [n_embd, N] before its norm                  gemma2
    rocq_tensor middle;         // F32 [n_embd, N], x and what attention adds
    rocq_tensor h2;             // [n_embd, N] normed
    rocq_tensor gate, up, ffn;  // [FF, N], ffn = activation(gate) up
    rocq_tensor fed;            // [n_embd, N] before its norm                  gemma2
} train__layer;

// The other weights, or their gradients.
typedef struct train__ends {
    rocq_tensor embedding, positions, output_norm, output_norm_bias, output, output_bias;
} train__ends;

typedef struct train__param { // something that is trained: a weight, or one half of an adapter
    char name[64];            // in files
    rocq_tensor from;         // the model's own, for a weight
    rocq_tensor *w, *dw;      // where its views go
    int32_t group;
    int64_t ne[2];            // ne[1] 1: a vector
    int64_t at;               // elements before it, in the order of files
} train__param;

enum {
    TRAIN__ADDED,  // matrices whose gradient is only ever added to: AdamW clears it
    TRAIN__MATRIX,
    TRAIN__VECTOR, // without weight decay
    TRAIN__N_GROUPS
};

typedef struct trainer {
    train_result result;
    const float *losses; // [n_accumulate n_seqs n_tokens] of the last step's targets; 0 where none
    uint64_t user[8];    // the caller's, kept in checkpoints: where its data stands, and the like

    // The rest is for reading only.
    train_options options;   // with every default filled in
    int64_t n_weights;       // that are trained
    int32_t n_recomputed;    // layers whose forward the backward computes again
    int64_t state_bytes;     // weights that are trained, gradients and moments
    int64_t activation_bytes;
    char error[512];         // the message of the last failure, also of train_open

    // Private from here on.
    llama_model *model;
    rocq_ctx *ctx;
    int64_t n;               // N, tokens of a micro-batch
    rocq_format operand;     // of activations that products read: F32, or F16 on a GPU
    float scale;             // of adapters
    train__layer *layers;    // [n_layers + 1]; of the last only x, the output of the one before
    train__ends w, dw;
    bool tied;               // the output matrix is the embedding
    rocq_tensor norm_mean, norm_rstd; // of output_norm
    train__param *params;    // [most_params], of which there are n_params
    int32_t n_params, most_params;
    int64_t group_at[TRAIN__N_GROUPS + 1];
    rocq_buffer master_memory, state_memory, memory;
    rocq_tensor masters, gradients, m, v; // [group_at[TRAIN__N_GROUPS]]: all that is trained
    rocq_tensor rope_freqs;  // the model's, where its weights are taken
    rocq_tensor m_scale, v_scale;         // with moments8
    rocq_tensor copies;      // F16, what products on a GPU read
    rocq_tensor out;         // F32 [ROCQ_TRAIN_STATE + N]: state, and the micro-batch's losses
    rocq_tensor state, loss;
    rocq_tensor inputs;      // I32 [3 N + 1]: ids, targets, their weights (F32), rate (F32)
    rocq_tensor ids, targets, weights, rate, positions;
    rocq_tensor h;           // [n_embd, N], input of the output matrix
    rocq_tensor logits;      // [n_vocab rounded up to 64, n_logits]
    rocq_tensor dx;          // F32 [n_embd, N] gradient of the residual stream
    rocq_tensor dx16;        // dx as products read it, where that is F16
    rocq_tensor dh, dadded;  // [n_embd, N]
    rocq_tensor dqkv, dseen; // [Q + 2 KV, N], [Q, N]
    rocq_tensor dffn, dup;   // [FF, N]
    rocq_tensor dlow;        // F32 [rank, N]
    bool first;              // while recording: gradients are written, not added to
    rocq_format format;      // of matrices in the file that is being written
    rocq_graph *passes[2][2]; // a micro-batch: [is it the step's first] [its last, with AdamW]
    rocq_graph *losses_only;
    int32_t *staged;         // [3 N + 1], the inputs, for one upload; with it, in host_bytes:
    float *results;          // [ROCQ_TRAIN_STATE + N]
    float *all_losses;       // [n_accumulate N] of the last step
    float *new_losses;       // [n_accumulate N] of the one that runs
    int64_t host_bytes;
    bool broken;             // a call failed half way: weights and state may not fit together
} trainer;

// Takes all memory that a step will ever need and records its ops, so that train_step allocates
// nothing. Without rank all weights of the model, in any format, are converted to F32 and trained;
// the model itself keeps its own, unless take_weights is set. While the trainer is open the model
// must be, and *t must not move. On failure everything is freed again, and *t is zero but for
// t->error; weights that were taken are gone.
static inline rocq_result train_open(trainer *t, llama_model *model, const train_options *options);
static inline void train_close(trainer *t); // twice, or on a zeroed struct, is harmless

// One step: losses and gradients of all micro-batches, then AdamW with rate lr. The same weights
// and batches give the same bits, whatever the number of threads. E_BOUNDS for ids and targets that
// the vocabulary lacks, E_ARGUMENT for weights that are negative or all 0: nothing has changed
// then. A weight that is not finite makes a gradient that is not, and the step is skipped.
static inline rocq_result train_step(trainer *t, const train_batch *batch, float lr);

// Losses of one micro-batch, and nothing else: losses receives [n_seqs n_tokens], 0 where there is
// no target. batch->weights is not used.
static inline rocq_result train_evaluate(trainer *t, const train_batch *batch, float *losses);

// A checkpoint: weights, moments, loss scale, counts, and t->user. After train_load the next steps
// give the same bits as if the run had never been interrupted. It is a file of rocq_file_open: path
// is the old file or the new one, whenever the program dies. train_load refuses checkpoints that
// are cut short or have changed since, of another model, or of other options where those matter
// (rank, alpha, targets, moments8), with one line in t->error, and changes nothing then. Where the
// disk fails while it reads, no call but train_load is taken until one succeeds.
static inline rocq_result train_save(trainer *t, const char *path);
static inline rocq_result train_load(trainer *t, const char *path);

// The model with its trained weights: `from`, the file that it was opened from, with matrices in
// `format` (ROCQ_F32 loses nothing) and vectors in F32. Without rank only.
static inline rocq_result train_write_gguf(trainer *t, const rocq_gguf *from, rocq_format format,
                                           const char *path);

// The adapters alone, as GGUF in llama.cpp's convention: NAME.lora_a [in, rank] and NAME.lora_b
// [rank, out] in F32 for each weight NAME, adapter.lora.alpha. With rank only.
static inline rocq_result train_write_lora(trainer *t, const char *path);

// ---------------------------------------------------------------------------------------------
// Errors, memory of the host
// ---------------------------------------------------------------------------------------------

#define TRAIN__TRY(call)                          \
    do {                                          \
        const rocq_result train__r = (call);      \
        if (train__r != ROCQ_OK) return train__r; \
    } while (0)

static rocq_result train__fail(trainer *t, rocq_result result, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(t->error, sizeof t->error, format, args);
    va_end(args);
    rocq_message_clean(t->error, sizeof t->error);
    return result;
}

// What a public call returns: a failure without a message of ours came from the context.
static rocq_result train__done(trainer *t, rocq_result result) {
    if (result == ROCQ_OK || t->error[0]) return result;
    const char *why = t->ctx ? rocq_error(t->ctx) : "";
    return train__fail(t, result, "%s", *why ? why : rocq_result_message(result));
}

static rocq_result train__ready(trainer *t) {
    t->error[0] = '\0';
    if (!t->ctx) return train__fail(t, ROCQ_E_STATE, "the trainer is not open");
    if (!t->broken) return ROCQ_OK;
    return train__fail(t, ROCQ_E_STATE, "a call before failed half way: load a checkpoint");
}

static rocq_result train__allocate(trainer *t, void *out, int64_t size) { // *out, cleared
    const rocq_allocator a = llama__info(t->model).desc.allocator;
    void *data = a.alloc((size_t)size, a.user);
    if (!data) return train__fail(t, ROCQ_E_MEMORY, "no memory for %.0f bytes", (double)size);
    memset(data, 0, (size_t)size);
    memcpy(out, &data, sizeof data); // out points to a pointer of any type
    return ROCQ_OK;
}

static void train__free(trainer *t, void *data, int64_t size) {
    const rocq_allocator a = llama__info(t->model).desc.allocator;
    if (data) a.free(data, (size_t)size, a.user);
}

// ---------------------------------------------------------------------------------------------
// What is trained
// ---------------------------------------------------------------------------------------------

static rocq_tensor *train__at(llama_layer *l, size_t place) {
    return (rocq_tensor *)(void *)((char *)l + place);
}

// Those whose graph train__layer has. Others would be trained into something else than what runs.
enum {
    TRAIN__FAMILIES = LLAMA__LLAMA | LLAMA__QWEN2 | LLAMA__QWEN3 | LLAMA__GEMMA2 | LLAMA__GPT2
};

static int train__family(const trainer *t) { return t->model->row->bit; }

// Whether the list names the matrix, which has no list: "q" or "attn_q" for "attn_q.weight".
static bool train__targeted(const char *list, const char *name) {
    const char *bare = strchr(name, '_') + 1;
    for (const char *at = list; at && *at; at += *at == ',') {
        const size_t n = strcspn(at, ",");
        if (strncmp(at, bare, n) == 0 && strcmp(bare + n, ".weight") == 0) return true;
        if (strncmp(at, name, n) == 0 && strcmp(name + n, ".weight") == 0) return true;
        at += n;
    }
    return !list;
}

static void train__add(trainer *t, const char *name, const rocq_tensor *from, rocq_tensor *w,
                       rocq_tensor *dw, int64_t ne0, int64_t ne1) {
    train__param *p = &t->params[t->n_params++];
    snprintf(p->name, sizeof p->name, "%s", name);
    if (from) p->from = *from;
    p->w = w;
    p->dw = dw;
    p->ne[0] = ne0;
    p->ne[1] = ne1;
    p->group = ne1 > 1 ? TRAIN__MATRIX : TRAIN__VECTOR;
    const bool gathered = w == &t->w.positions || (w == &t->w.embedding && !t->tied);
    if (gathered) p->group = TRAIN__ADDED;
}

// The weights before and behind the layers, which have no adapters.
static void train__list_ends(trainer *t) {
    const llama_model *m = t->model;
    const struct {
        const char *name;
        const rocq_tensor *from;
        rocq_tensor *w, *dw;
    } ends[] = {
        {"token_embd.weight", &m->embedding, &t->w.embedding, &t->dw.embedding},
        {"position_embd.weight", &m->positions, &t->w.positions, &t->dw.positions},
        {"output_norm.weight", &m->output_norm, &t->w.output_norm, &t->dw.output_norm},
        {"output_norm.bias", &m->output_norm_bias, &t->w.output_norm_bias,
         &t->dw.output_norm_bias},
        {"output.weight", &m->output, &t->w.output, &t->dw.output},
        {"output.bias", &m->output_bias, &t->w.output_bias, &t->dw.output_bias}};
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        const rocq_tensor *from = ends[i].from;
        *ends[i].w = *from;
        if (from->n_dims == 0 || t->options.rank > 0 || (t->tied && from == &m->output)) continue;
        train__add(t, ends[i].name, from, ends[i].w, ends[i].dw, from->ne[0], from->ne[1]);
    }
}

// A layer's: each weight itself, or both halves of its adapter.
static void train__list_layer(trainer *t, int32_t i, int family) {
    train__layer *l = &t->layers[i];
    l->w = t->model->layers[i];
    for (int k = 0; k < LLAMA__N_WEIGHTS; k++) {
        const size_t place = llama__weights[k].at;
        rocq_tensor *w = train__at(&l->w, place);
        const int64_t rank = t->options.rank;
        char name[64];
        if (!(llama__weights[k].families & family) || w->n_dims == 0) continue;
        snprintf(name, sizeof name, "blk.%d.%s", (int)i, llama__weights[k].name);
        if (rank == 0) {
            const rocq_tensor from = *w;
            train__add(t, name, &from, w, train__at(&l->dw, place), w->ne[0], w->ne[1]);
        } else if (w->ne[1] > 1 && train__targeted(t->options.targets, llama__weights[k].name)) {
            const size_t end = strlen(name);
            snprintf(name + end, sizeof name - end, ".lora_a");
            train__add(t, name, NULL, train__at(&l->a, place), train__at(&l->da, place), w->ne[0],
                       rank);
            snprintf(name + end, sizeof name - end, ".lora_b");
            train__add(t, name, NULL, train__at(&l->b, place), train__at(&l->db, place), rank,
                       w->ne[1]);
        }
    }
}

// Whether each of the targets that were asked for is there.
static rocq_result train__check_targets(trainer *t, int family) {
    for (const char *at = t->options.targets; at; at = *at ? at + 1 : NULL) {
        char one[24];
        const size_t n = strcspn(at, ",");
        bool found = false;
        snprintf(one, sizeof one, "%.*s", (int)(n < 23 ? n : 23), at);
        for (int k = 0; k < LLAMA__N_WEIGHTS; k++) {
            const llama__weight *w = &llama__weights[k];
            found |= w->rows != LLAMA__1 && (w->families & family) && train__targeted(one, w->name);
        }
        if (!found || n == 0) {
            return train__fail(t, ROCQ_E_NOT_FOUND, "targets: a %s model has no matrix \"%s\"",
                               t->model->family, one);
        }
        at += n;
    }
    return ROCQ_OK;
}

// Lists all that is trained, in the order in which it will lie: by groups, those by layers. Each
// begins at a multiple of 256 elements, which vectors of any width and 8-bit moments like.
static rocq_result train__list(trainer *t) {
    const int family = train__family(t);
    const int32_t most = 6 + 2 * LLAMA__N_WEIGHTS * t->model->n_layers;
    TRAIN__TRY(train__check_targets(t, family));
    TRAIN__TRY(train__allocate(t, &t->params, most * (int64_t)sizeof *t->params));
    t->most_params = most;
    train__list_ends(t);
    for (int32_t i = 0; i < t->model->n_layers; i++) train__list_layer(t, i, family);
    int64_t at = 0;
    for (int32_t group = 0; group < TRAIN__N_GROUPS; group++) {
        t->group_at[group] = at;
        for (int32_t i = 0; i < t->n_params; i++) {
            train__param *p = &t->params[i];
            if (p->group != group) continue;
            p->at = at;
            at += (p->ne[0] * p->ne[1] + 255) / 256 * 256;
            t->n_weights += p->ne[0] * p->ne[1];
        }
    }
    t->group_at[TRAIN__N_GROUPS] = at;
    return ROCQ_OK;
}

// A view of something trained, in one of the flat tensors.
static rocq_tensor train__view(const train__param *p, const rocq_tensor *flat) {
    rocq_tensor view;
    memset(&view, 0, sizeof view);
    rocq_tensor_init(&view, &flat->buffer, // cannot fail: there is room
                     flat->offset + p->at * (flat->format == ROCQ_F32 ? 4 : 2), flat->format,
                     p->ne[1] > 1 ? 2 : 1, p->ne);
    return view;
}

static rocq_result train__cut_masters(trainer *t, rocq_arena *arena) {
    const rocq_tensor *factors = &t->model->rope_freqs;
    if (t->options.take_weights && factors->n_dims > 0) {
        TRAIN__TRY(rocq_tensor_1d(arena, &t->rope_freqs, ROCQ_F32, factors->ne[0]));
    }
    return rocq_tensor_1d(arena, &t->masters, ROCQ_F32, t->group_at[TRAIN__N_GROUPS]);
}

static rocq_result train__cut_state(trainer *t, rocq_arena *arena) {
    const int64_t n = t->group_at[TRAIN__N_GROUPS];
    const rocq_format moments = t->options.moments8 ? ROCQ_I8 : ROCQ_F32;
    TRAIN__TRY(rocq_tensor_1d(arena, &t->gradients, ROCQ_F32, n));
    TRAIN__TRY(rocq_tensor_1d(arena, &t->m, moments, n));
    TRAIN__TRY(rocq_tensor_1d(arena, &t->v, moments, n));
    if (t->options.moments8) {
        TRAIN__TRY(rocq_tensor_1d(arena, &t->m_scale, ROCQ_F32, n / 256));
        TRAIN__TRY(rocq_tensor_1d(arena, &t->v_scale, ROCQ_F32, n / 256));
    }
    if (t->operand == ROCQ_F16) TRAIN__TRY(rocq_tensor_1d(arena, &t->copies, ROCQ_F16, n));
    return rocq_tensor_1d(arena, &t->out, ROCQ_F32, ROCQ_TRAIN_STATE + t->n);
}

// The same bytes to all of a tensor.
static rocq_result train__clear(trainer *t, const rocq_tensor *x) {
    static const char zeros[1 << 16] = {0}; // bytes of zeros are zeros of every format here
    const int64_t n = rocq_tensor_count(x), size = rocq_tensor_size(x) / n;
    const int64_t most = (int64_t)sizeof zeros / size;
    rocq_tensor flat;
    TRAIN__TRY(rocq_tensor_reshape(&flat, x, 1, &n));
    for (int64_t at = 0; at < n; at += most) {
        const int64_t part = n - at < most ? n - at : most;
        const rocq_tensor piece = rocq_tensor_slice(&flat, 0, at, part);
        TRAIN__TRY(rocq_upload(t->ctx, &piece, zeros, part * size));
    }
    return ROCQ_OK;
}

// The F16 copies that products on a GPU read; later AdamW writes them.
static rocq_result train__copy(trainer *t) {
    const rocq_cast_params cast = {.y = &t->copies, .x = &t->masters};
    return t->operand == ROCQ_F16 ? rocq_cast(t->ctx, &cast) : ROCQ_OK;
}

// First values of half an adapter: A uniform in +-1 / sqrt(in), as is usual; B is 0, so that the
// model begins as it was.
static rocq_result train__draw(trainer *t, const train__param *p, uint64_t *random) {
    const rocq_tensor to = train__view(p, &t->masters);
    const int64_t n = p->ne[0] * p->ne[1];
    float *values;
    if (p->name[strlen(p->name) - 1] != 'a') return ROCQ_OK;
    TRAIN__TRY(train__allocate(t, &values, n * 4));
    for (int64_t i = 0; i < n; i++) {
        uint64_t z = *random += 0x9e3779b97f4a7c15u; // splitmix64
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        values[i] = ((float)((z ^ (z >> 31)) >> 40) * 0x1p-23f - 1) / sqrtf((float)p->ne[0]);
    }
    const rocq_result result = rocq_upload(t->ctx, &to, values, n * 4);
    train__free(t, values, n * 4);
    return result;
}

// Frees the weights that the masters were made from. The model keeps their formats and, elsewhere,
// what is not trained; its own steps are refused for want of an embedding.
static rocq_result train__take_weights(trainer *t) {
    llama_model *m = t->model;
    if (t->rope_freqs.n_dims > 0) {
        const rocq_cast_params cast = {.y = &t->rope_freqs, .x = &m->rope_freqs};
        TRAIN__TRY(rocq_cast(t->ctx, &cast));
        m->rope_freqs = t->rope_freqs; // rope's settings point there
    }
    rocq_graph_destroy(t->ctx, &m->step);
    memset(&m->embedding.buffer, 0, sizeof m->embedding.buffer);
    return rocq_buffer_free(t->ctx, &m->weights);
}

// What is trained, with its first values.
static rocq_result train__make_masters(trainer *t) {
    rocq_arena arena;
    uint64_t random = t->options.seed;
    rocq_arena_init(&arena, NULL);
    TRAIN__TRY(train__cut_masters(t, &arena));
    t->state_bytes = arena.peak;
    TRAIN__TRY(rocq_buffer_alloc(t->ctx, &t->master_memory, arena.peak));
    rocq_arena_init(&arena, &t->master_memory);
    TRAIN__TRY(train__cut_masters(t, &arena));
    TRAIN__TRY(train__clear(t, &t->masters));
    for (int32_t i = 0; i < t->n_params; i++) {
        const train__param *p = &t->params[i];
        const rocq_tensor master = train__view(p, &t->masters);
        const rocq_cast_params cast = {.y = &master, .x = &p->from};
        if (t->options.rank > 0) TRAIN__TRY(train__draw(t, p, &random));
        else TRAIN__TRY(rocq_cast(t->ctx, &cast));
    }
    return t->options.take_weights ? train__take_weights(t) : ROCQ_OK;
}

// Memory for all that is trained, its first values, and the views that products read. The masters
// have memory of their own, so that the model's weights can be freed before the rest is taken.
static rocq_result train__make_state(trainer *t) {
    rocq_arena arena;
    TRAIN__TRY(train__make_masters(t));
    rocq_arena_init(&arena, NULL);
    TRAIN__TRY(train__cut_state(t, &arena));
    t->state_bytes += arena.peak;
    TRAIN__TRY(rocq_buffer_alloc(t->ctx, &t->state_memory, arena.peak));
    rocq_arena_init(&arena, &t->state_memory);
    TRAIN__TRY(train__cut_state(t, &arena));
    t->state = rocq_tensor_slice(&t->out, 0, 0, ROCQ_TRAIN_STATE);
    t->loss = rocq_tensor_slice(&t->out, 0, ROCQ_TRAIN_STATE, t->n);
    const rocq_tensor *cleared[] = {&t->gradients, &t->m, &t->v, &t->out};
    for (size_t i = 0; i < sizeof cleared / sizeof cleared[0]; i++) {
        TRAIN__TRY(train__clear(t, cleared[i]));
    }
    if (t->options.moments8) {
        TRAIN__TRY(train__clear(t, &t->m_scale));
        TRAIN__TRY(train__clear(t, &t->v_scale));
    }
    const rocq_tensor scale = rocq_tensor_slice(&t->state, 0, ROCQ_TRAIN_LOSS_SCALE, 1);
    TRAIN__TRY(rocq_upload(t->ctx, &scale, &t->options.loss_scale, 4));
    for (int32_t i = 0; i < t->n_params; i++) {
        const train__param *p = &t->params[i];
        const bool copied = t->operand == ROCQ_F16 && p->ne[1] > 1;
        *p->w = train__view(p, copied ? &t->copies : &t->masters);
        *p->dw = train__view(p, &t->gradients);
    }
    if (t->tied) {
        t->w.output = t->w.embedding;
        t->dw.output = t->dw.embedding;
    }
    return train__copy(t);
}

// ---------------------------------------------------------------------------------------------
// Activations
// ---------------------------------------------------------------------------------------------

// What the backward of a layer needs of its forward, but for its input.
static rocq_result train__cut_layer(trainer *t, rocq_arena *arena, train__layer *l) {
    const llama_model *m = t->model;
    const rocq_format f = t->operand;
    const int64_t n = t->n, n_embd = m->n_embd, n_q = (int64_t)m->n_heads * m->head_dim;
    const int64_t n_kv = (int64_t)m->n_kv_heads * m->head_dim;
    const bool means = l->w.attn_norm_bias.n_dims > 0, heads = l->w.q_norm.n_dims > 0;
    const bool post = l->w.attn_post_norm.n_dims > 0;
    const struct {
        bool there;
        rocq_tensor *tensor;
        rocq_format format;
        int64_t rows; // 0: [N]
    } all[] = {
        {true, &l->rstd.attn_norm, ROCQ_F32, 0}, {true, &l->rstd.ffn_norm, ROCQ_F32, 0},
        {means, &l->mean.attn_norm, ROCQ_F32, 0}, {means, &l->mean.ffn_norm, ROCQ_F32, 0},
        {post, &l->rstd.attn_post_norm, ROCQ_F32, 0}, {post, &l->rstd.ffn_post_norm, ROCQ_F32, 0},
        {heads, &l->rstd.q_norm, ROCQ_F32, m->n_heads},
        {heads, &l->rstd.k_norm, ROCQ_F32, m->n_kv_heads},
        {heads, &l->raw, f, n_q + n_kv}, {true, &l->qkv, f, n_q + 2 * n_kv},
        {true, &l->h, f, n_embd}, {true, &l->seen, f, n_q}, {post, &l->attended, f, n_embd},
        {true, &l->middle, ROCQ_F32, n_embd}, {true, &l->h2, f, n_embd},
        {true, &l->gate, f, m->n_ff}, {l->w.up.n_dims > 0, &l->up, f, m->n_ff},
        {true, &l->ffn, f, m->n_ff}, {post, &l->fed, f, n_embd},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        if (!all[i].there) continue;
        if (all[i].rows == 0) TRAIN__TRY(rocq_tensor_1d(arena, all[i].tensor, all[i].format, n));
        else TRAIN__TRY(rocq_tensor_2d(arena, all[i].tensor, all[i].format, all[i].rows, n));
    }
    for (int k = 0; k < LLAMA__N_WEIGHTS; k++) {
        const rocq_tensor *a = train__at(&l->a, llama__weights[k].at);
        if (a->n_dims == 0 || !(llama__weights[k].families & train__family(t))) continue;
        TRAIN__TRY(rocq_tensor_2d(arena, train__at(&l->low, llama__weights[k].at), ROCQ_F32,
                                  t->options.rank, n));
    }
    return rocq_tensor_3d(arena, &l->lse, ROCQ_F32, m->n_heads, t->options.n_tokens,
                          t->options.n_seqs);
}

// All activations: first from a measuring arena, then from memory. Layers that are computed again
// share theirs with each other and with the next one, whose are still there in its backward.
static rocq_result train__cut(trainer *t, rocq_arena *arena) {
    const llama_model *m = t->model;
    const rocq_format f = t->operand;
    const int64_t n = t->n, n_embd = m->n_embd, n_q = (int64_t)m->n_heads * m->head_dim;
    const int64_t n_qkv = n_q + 2 * (int64_t)m->n_kv_heads * m->head_dim;
    const int64_t n_logits = t->options.n_logits;
    TRAIN__TRY(rocq_tensor_1d(arena, &t->inputs, ROCQ_I32, 3 * n + 1));
    TRAIN__TRY(rocq_tensor_1d(arena, &t->positions, ROCQ_I32, n));
    TRAIN__TRY(rocq_tensor_1d(arena, &t->norm_mean, ROCQ_F32, n));
    TRAIN__TRY(rocq_tensor_1d(arena, &t->norm_rstd, ROCQ_F32, n));
    TRAIN__TRY(rocq_tensor_2d(arena, &t->h, f, n_embd, n));
    // Columns begin at multiples of 16 bytes, so that the products of the backward read them at
    // once.
    TRAIN__TRY(rocq_tensor_2d(arena, &t->logits, f, (m->n_vocab + 63) / 64 * 64, n_logits));
    TRAIN__TRY(rocq_tensor_2d(arena, &t->dx, ROCQ_F32, n_embd, n));
    if (f == ROCQ_F16) TRAIN__TRY(rocq_tensor_2d(arena, &t->dx16, f, n_embd, n));
    TRAIN__TRY(rocq_tensor_2d(arena, &t->dh, f, n_embd, n));
    TRAIN__TRY(rocq_tensor_2d(arena, &t->dadded, f, n_embd, n));
    TRAIN__TRY(rocq_tensor_2d(arena, &t->dqkv, f, n_qkv, n));
    TRAIN__TRY(rocq_tensor_2d(arena, &t->dseen, f, n_q, n));
    TRAIN__TRY(rocq_tensor_2d(arena, &t->dffn, f, m->n_ff, n));
    TRAIN__TRY(rocq_tensor_2d(arena, &t->dup, f, m->n_ff, n));
    if (t->options.rank > 0) {
        TRAIN__TRY(rocq_tensor_2d(arena, &t->dlow, ROCQ_F32, t->options.rank, n));
    }
    for (int32_t i = 0; i < m->n_layers; i++) {
        const int64_t mark = rocq_arena_mark(arena);
        TRAIN__TRY(train__cut_layer(t, arena, &t->layers[i]));
        if (i < t->n_recomputed) rocq_arena_reset(arena, mark);
    }
    for (int32_t i = 0; i <= m->n_layers; i++) {
        TRAIN__TRY(rocq_tensor_2d(arena, &t->layers[i].x, ROCQ_F32, n_embd, n));
    }
    return ROCQ_OK;
}

// As few layers are computed again as the budget allows.
static rocq_result train__make_activations(trainer *t) {
    const int32_t n_layers = t->model->n_layers;
    rocq_arena arena;
    for (t->n_recomputed = 0;; t->n_recomputed++) {
        rocq_arena_init(&arena, NULL);
        const rocq_result measured = train__cut(t, &arena);
        if (measured != ROCQ_OK) {
            return train__fail(t, measured, "activations of %d x %d tokens: %s",
                               (int)t->options.n_seqs, (int)t->options.n_tokens,
                               rocq_result_message(measured));
        }
        if (t->options.budget == 0 || arena.peak <= t->options.budget) break;
        if (t->n_recomputed + 1 == n_layers) {
            return train__fail(t, ROCQ_E_BUDGET, "budget: activations of %d x %d tokens take at "
                               "least %.0f bytes", (int)t->options.n_seqs,
                               (int)t->options.n_tokens, (double)arena.peak);
        }
    }
    t->activation_bytes = arena.peak;
    TRAIN__TRY(rocq_buffer_alloc(t->ctx, &t->memory, t->activation_bytes));
    rocq_arena_init(&arena, &t->memory);
    TRAIN__TRY(train__cut(t, &arena));
    t->ids = rocq_tensor_slice(&t->inputs, 0, 0, t->n);
    t->targets = rocq_tensor_slice(&t->inputs, 0, t->n, t->n);
    t->weights = rocq_tensor_slice(&t->inputs, 0, 2 * t->n, t->n);
    t->rate = rocq_tensor_slice(&t->inputs, 0, 3 * t->n, 1);
    t->weights.format = t->rate.format = ROCQ_F32; // as large as I32

    t->host_bytes = (5 + 2 * ROCQ_TRAIN_STATE + (4 + 2 * t->options.n_accumulate) * t->n) * 4;
    TRAIN__TRY(train__allocate(t, &t->staged, t->host_bytes));
    t->results = (float *)(void *)(t->staged + 3 * t->n + 1);
    t->all_losses = t->results + ROCQ_TRAIN_STATE + t->n;
    t->new_losses = t->all_losses + t->options.n_accumulate * t->n;
    t->losses = t->all_losses;
    for (int64_t i = 0; i < t->n; i++) t->staged[i] = (int32_t)(i % t->options.n_tokens);
    return rocq_upload(t->ctx, &t->positions, t->staged, t->n * 4);
}

// ---------------------------------------------------------------------------------------------
// Steps of both directions
// ---------------------------------------------------------------------------------------------

// [K, N] as sequences of heads [D, K / D, n_tokens, n_seqs].
static rocq_tensor train__sequences(const trainer *t, const rocq_tensor *x) {
    rocq_tensor heads = rocq_tensor_heads(x, t->model->head_dim);
    heads.n_dims = 4;
    heads.ne[2] = t->options.n_tokens;
    heads.ne[3] = t->options.n_seqs;
    heads.stride[3] = heads.stride[2] * heads.ne[2];
    return heads;
}

static rocq_tensor train__q(const trainer *t, const rocq_tensor *qkv) {
    return rocq_tensor_slice(qkv, 0, 0, (int64_t)t->model->n_heads * t->model->head_dim);
}
static rocq_tensor train__k(const trainer *t, const rocq_tensor *qkv) {
    return rocq_tensor_slice(qkv, 0, (int64_t)t->model->n_heads * t->model->head_dim,
                             (int64_t)t->model->n_kv_heads * t->model->head_dim);
}
static rocq_tensor train__v(const trainer *t, const rocq_tensor *qkv) {
    return rocq_tensor_slice(
        qkv, 0, (int64_t)(t->model->n_heads + t->model->n_kv_heads) * t->model->head_dim,
        (int64_t)t->model->n_kv_heads * t->model->head_dim);
}

// The norm whose weight has this place, or that of the output.
static rocq_result train__norm(trainer *t, train__layer *l, size_t place, const rocq_tensor *y,
                               const rocq_tensor *x) {
    const bool attn = place == offsetof(llama_layer, attn_norm);
    const bool ffn = place == offsetof(llama_layer, ffn_norm);
    const rocq_tensor *bias = attn ? &l->w.attn_norm_bias : &l->w.ffn_norm_bias;
    const rocq_norm_params norm = {.y = y, .x = x, .weight = train__at(&l->w, place),
                                   .bias = attn || ffn ? llama__maybe(bias) : NULL,
                                   .mean = llama__maybe(train__at(&l->mean, place)),
                                   .rstd = train__at(&l->rstd, place),
                                   .eps = t->model->norm_eps};
    return norm.mean ? rocq_layernorm(t->ctx, &norm) : rocq_rmsnorm(t->ctx, &norm);
}

// dx may be dy or residual. Where it is that of the residual stream, products read it next.
static rocq_result train__norm_backward(trainer *t, train__layer *l, size_t place,
                                        const rocq_tensor *dx, const rocq_tensor *dy,
                                        const rocq_tensor *x, const rocq_tensor *residual) {
    const bool attn = place == offsetof(llama_layer, attn_norm);
    const bool ffn = place == offsetof(llama_layer, ffn_norm);
    const rocq_tensor *dbias = attn ? &l->dw.attn_norm_bias : &l->dw.ffn_norm_bias;
    const rocq_norm_backward_params norm = {
        .dx = dx, .dx16 = dx == &t->dx ? llama__maybe(&t->dx16) : NULL,
        .dweight = llama__maybe(train__at(&l->dw, place)),
        .dbias = attn || ffn ? llama__maybe(dbias) : NULL, .dy = dy, .x = x,
        .weight = train__at(&l->w, place), .mean = llama__maybe(train__at(&l->mean, place)),
        .rstd = train__at(&l->rstd, place), .residual = residual, .accumulate = !t->first};
    return rocq_norm_backward(t->ctx, &norm);
}

// One of several products of the same x.
typedef struct train__product {
    size_t w, bias; // places in llama_layer
    rocq_tensor y;  // [out, N]; in the backward its gradient
    const rocq_tensor *residual;
} train__product;

#define TRAIN__PLACES(name) offsetof(llama_layer, name), offsetof(llama_layer, name##_bias)

// INT8 is for the forward's products of quantized weights, as inference has it; all others then are
// what they are by default.
static rocq_precision train__precision(const trainer *t, const rocq_tensor *w, bool backward) {
    const bool coded = w && rocq_get_format_info(w->format)->block_elems > 1;
    const bool left = t->options.precision == ROCQ_PRECISION_INT8 && (backward || !coded);
    return left ? ROCQ_PRECISION_AUTO : t->options.precision;
}

// low = a x of those that have an adapter.
static rocq_result train__low(trainer *t, train__layer *l, const rocq_tensor *x,
                              const train__product *p, int n) {
    rocq_matmul_params low[3];
    int n_low = 0;
    memset(low, 0, sizeof low);
    for (int i = 0; i < n; i++) {
        const rocq_tensor *a = train__at(&l->a, p[i].w);
        if (a->n_dims == 0) continue;
        low[n_low].y = train__at(&l->low, p[i].w);
        low[n_low].w = a;
        low[n_low].x = x;
        low[n_low].precision = train__precision(t, a, false);
        if (n_low > 0) low[n_low - 1].next = &low[n_low];
        n_low++;
    }
    return n_low > 0 ? rocq_matmul(t->ctx, low) : ROCQ_OK;
}

// y = w x + bias + residual, plus scale b low where there is an adapter.
static rocq_result train__products(trainer *t, train__layer *l, const rocq_tensor *x,
                                   const train__product *p, int n) {
    rocq_matmul_params full[3];
    memset(full, 0, sizeof full);
    for (int i = 0; i < n; i++) {
        full[i].y = &p[i].y;
        full[i].w = train__at(&l->w, p[i].w);
        full[i].x = x;
        full[i].bias = llama__maybe(train__at(&l->w, p[i].bias));
        full[i].residual = p[i].residual;
        full[i].precision = train__precision(t, full[i].w, false);
        full[i].lora_b = llama__maybe(train__at(&l->b, p[i].w));
        if (full[i].lora_b) full[i].lora_t = train__at(&l->low, p[i].w);
        if (full[i].lora_b) full[i].lora_scale = t->scale;
        if (i > 0) full[i - 1].next = &full[i];
    }
    TRAIN__TRY(train__low(t, l, x, p, n));
    return rocq_matmul(t->ctx, full);
}

// From the gradients of y: those of weights and adapters, and dx (NULL: not wanted), the sum over
// all products. With z, x was activation(z), and dx is z's gradient.
static rocq_result train__products_backward(trainer *t, train__layer *l, const rocq_tensor *dx,
                                            const rocq_tensor *x, const rocq_tensor *z,
                                            const train__product *p, int n) {
    const rocq_tensor *sum = NULL; // dx, as soon as something is in it
    const rocq_activation activation = z ? t->model->activation : ROCQ_ACT_IDENTITY;
    for (int i = 0; i < n; i++) {
        const rocq_tensor *a = llama__maybe(train__at(&l->a, p[i].w));
        const rocq_tensor *b = train__at(&l->b, p[i].w), *low = train__at(&l->low, p[i].w);
        const rocq_tensor *dw = llama__maybe(train__at(&l->dw, p[i].w));
        const rocq_matmul_backward_params full = {
            .dx = dx, .dw = dw, .db = llama__maybe(train__at(&l->dw, p[i].bias)), .dy = &p[i].y,
            .w = train__at(&l->w, p[i].w), .x = dw ? x : NULL, .z = z, .residual = sum,
            .activation = activation, .accumulate = !t->first,
            .precision = train__precision(t, NULL, true)};
        const rocq_matmul_backward_params to_b = {
            .dx = &t->dlow, .dw = train__at(&l->db, p[i].w), .dy = &p[i].y, .w = b, .x = low,
            .scale = t->scale, .accumulate = !t->first,
            .precision = train__precision(t, NULL, true)};
        const rocq_matmul_backward_params to_a = {
            .dx = dx, .dw = train__at(&l->da, p[i].w), .dy = &t->dlow, .w = a, .x = x, .z = z,
            .residual = dx, .activation = activation, .accumulate = !t->first,
            .precision = train__precision(t, NULL, true)};
        if (dx || dw) TRAIN__TRY(rocq_matmul_backward(t->ctx, &full));
        if (a) TRAIN__TRY(rocq_matmul_backward(t->ctx, &to_b));
        if (a) TRAIN__TRY(rocq_matmul_backward(t->ctx, &to_a));
        sum = dx;
    }
    return ROCQ_OK;
}

static rocq_result train__rope(trainer *t, const rocq_tensor *qkv, bool backward) {
    const llama_model *m = t->model;
    const rocq_tensor both = rocq_tensor_slice( // q and k turn at once
        qkv, 0, 0, (int64_t)(m->n_heads + m->n_kv_heads) * m->head_dim);
    const rocq_tensor heads = rocq_tensor_heads(&both, m->head_dim);
    const rocq_rope_params rope = {.y = &heads, .x = &heads, .pos = &t->positions, .rope = m->rope,
                                   .backward = backward};
    return m->positions.n_dims > 0 ? ROCQ_OK : rocq_rope(t->ctx, &rope);
}

// q, k and v as products of one x: one, two or three.
static int train__qkv(const trainer *t, const train__layer *l, const rocq_tensor *qkv,
                      const rocq_tensor *raw, train__product p[3]) {
    const train__product q = {TRAIN__PLACES(q), train__q(t, raw), NULL};
    const train__product k = {TRAIN__PLACES(k), train__k(t, raw), NULL};
    const train__product v = {TRAIN__PLACES(v), train__v(t, qkv), NULL};
    const bool whole = l->w.k.n_dims == 0;
    p[0] = q;
    p[1] = k;
    p[2] = v;
    if (whole) p[0].y = *qkv;
    return whole ? 1 : 3;
}

// ---------------------------------------------------------------------------------------------
// The graph and its reverse
// ---------------------------------------------------------------------------------------------

// From x to the next layer's x. again: for the backward, which has no use for that.
static rocq_result train__layer_forward(trainer *t, int32_t i, bool again) {
    const llama_model *m = t->model;
    train__layer *l = &t->layers[i];
    const rocq_tensor *x = &l->x, *next = &t->layers[i + 1].x;
    const bool heads = l->w.q_norm.n_dims > 0, post = l->w.attn_post_norm.n_dims > 0;
    const rocq_tensor q = train__q(t, &l->qkv), k = train__k(t, &l->qkv);
    const rocq_tensor v = train__v(t, &l->qkv);
    const rocq_tensor qs = train__sequences(t, &q), ks = train__sequences(t, &k);
    const rocq_tensor vs = train__sequences(t, &v), seen = train__sequences(t, &l->seen);
    const rocq_attention_params attend = {
        .out = &seen, .q = &qs, .k = &ks, .v = &vs, .lse = &l->lse, .scale = m->attention_scale,
        .softcap = m->attention_softcap, .window = l->w.window, .causal = true};
    train__product p[3];
    TRAIN__TRY(train__norm(t, l, offsetof(llama_layer, attn_norm), &l->h, x));
    const int n = train__qkv(t, l, &l->qkv, heads ? &l->raw : &l->qkv, p);
    TRAIN__TRY(train__products(t, l, &l->h, p, n));
    if (heads) {
        const rocq_tensor q_heads = rocq_tensor_heads(&q, m->head_dim);
        const rocq_tensor k_heads = rocq_tensor_heads(&k, m->head_dim);
        const rocq_tensor q_raw = rocq_tensor_heads(&p[0].y, m->head_dim);
        const rocq_tensor k_raw = rocq_tensor_heads(&p[1].y, m->head_dim);
        TRAIN__TRY(train__norm(t, l, offsetof(llama_layer, q_norm), &q_heads, &q_raw));
        TRAIN__TRY(train__norm(t, l, offsetof(llama_layer, k_norm), &k_heads, &k_raw));
    }
    TRAIN__TRY(train__rope(t, &l->qkv, false));
    TRAIN__TRY(rocq_attention(t->ctx, &attend));
    const train__product out = {TRAIN__PLACES(out), post ? l->attended : l->middle,
                                post ? NULL : x};
    const rocq_binary_params add = {.y = &l->middle, .a = x, .b = &l->middle};
    TRAIN__TRY(train__products(t, l, &l->seen, &out, 1));
    if (post) {
        TRAIN__TRY(train__norm(t, l, offsetof(llama_layer, attn_post_norm), &l->middle,
                               &l->attended));
        TRAIN__TRY(rocq_add(t->ctx, &add));
    }

    const train__product gate_up[2] = {{TRAIN__PLACES(gate), l->gate, NULL},
                                       {TRAIN__PLACES(up), l->up, NULL}};
    const rocq_glu_params glu = {.y = &l->ffn, .gate = &l->gate, .up = &l->up,
                                 .activation = m->activation};
    const rocq_activate_params activate = {.y = &l->ffn, .x = &l->gate,
                                           .activation = m->activation};
    const bool gated = l->w.up.n_dims > 0;
    const train__product down = {TRAIN__PLACES(down), post ? l->fed : *next,
                                 post ? NULL : &l->middle};
    const rocq_binary_params add_fed = {.y = next, .a = &l->middle, .b = next};
    TRAIN__TRY(train__norm(t, l, offsetof(llama_layer, ffn_norm), &l->h2, &l->middle));
    TRAIN__TRY(train__products(t, l, &l->h2, gate_up, gated ? 2 : 1));
    TRAIN__TRY(gated ? rocq_glu(t->ctx, &glu) : rocq_activate(t->ctx, &activate));
    if (again && !post) return train__low(t, l, &l->ffn, &down, 1);
    TRAIN__TRY(train__products(t, l, &l->ffn, &down, 1));
    if (!post) return ROCQ_OK;
    TRAIN__TRY(train__norm(t, l, offsetof(llama_layer, ffn_post_norm), next, &l->fed));
    return rocq_add(t->ctx, &add_fed);
}

// From dx, the gradient of the next layer's x, to that of x where it is wanted; on the way the
// gradients of the weights.
static rocq_result train__layer_backward(trainer *t, int32_t i, bool wanted) {
    const llama_model *m = t->model;
    train__layer *l = &t->layers[i];
    const rocq_tensor *dx = &t->dx, *dffn = &t->dffn;
    const bool heads = l->w.q_norm.n_dims > 0, post = l->w.attn_post_norm.n_dims > 0;
    const bool gated = l->w.up.n_dims > 0;
    const rocq_tensor dadded = post ? t->dadded : t->dx16.n_dims > 0 ? t->dx16 : *dx;
    const train__product down = {TRAIN__PLACES(down), dadded, NULL};
    const train__product gate_up[2] = {{TRAIN__PLACES(gate), *dffn, NULL},
                                       {TRAIN__PLACES(up), t->dup, NULL}};
    const rocq_glu_backward_params glu = {.dgate = dffn, .dup = &t->dup, .dy = dffn,
                                          .gate = &l->gate, .up = &l->up,
                                          .activation = m->activation};
    if (post) {
        TRAIN__TRY(train__norm_backward(t, l, offsetof(llama_layer, ffn_post_norm), &t->dadded, dx,
                                        &l->fed, NULL));
    }
    TRAIN__TRY(train__products_backward(t, l, dffn, &l->ffn, gated ? NULL : &l->gate, &down, 1));
    if (gated) TRAIN__TRY(rocq_glu_backward(t->ctx, &glu));
    TRAIN__TRY(train__products_backward(t, l, &t->dh, &l->h2, NULL, gate_up, gated ? 2 : 1));
    TRAIN__TRY(train__norm_backward(t, l, offsetof(llama_layer, ffn_norm), dx, &t->dh, &l->middle,
                                    dx));

    const rocq_tensor q = train__q(t, &l->qkv), dq = train__q(t, &t->dqkv);
    const rocq_tensor k = train__k(t, &l->qkv), dk = train__k(t, &t->dqkv);
    const rocq_tensor v = train__v(t, &l->qkv), dv = train__v(t, &t->dqkv);
    const rocq_tensor qs = train__sequences(t, &q), dqs = train__sequences(t, &dq);
    const rocq_tensor ks = train__sequences(t, &k), dks = train__sequences(t, &dk);
    const rocq_tensor vs = train__sequences(t, &v), dvs = train__sequences(t, &dv);
    const rocq_tensor seen = train__sequences(t, &l->seen), dseen = train__sequences(t, &t->dseen);
    const rocq_attention_backward_params attend = {
        .dq = &dqs, .dk = &dks, .dv = &dvs, .dout = &dseen, .out = &seen, .q = &qs, .k = &ks,
        .v = &vs, .lse = &l->lse, .scale = m->attention_scale, .softcap = m->attention_softcap,
        .window = l->w.window, .causal = true};
    const train__product out = {TRAIN__PLACES(out), dadded, NULL};
    if (post) {
        TRAIN__TRY(train__norm_backward(t, l, offsetof(llama_layer, attn_post_norm), &t->dadded,
                                        dx, &l->attended, NULL));
    }
    TRAIN__TRY(train__products_backward(t, l, &t->dseen, &l->seen, NULL, &out, 1));
    TRAIN__TRY(rocq_attention_backward(t->ctx, &attend));
    TRAIN__TRY(train__rope(t, &t->dqkv, true));
    if (heads) {
        const rocq_tensor q_raw = train__q(t, &l->raw), k_raw = train__k(t, &l->raw);
        const rocq_tensor x_q = rocq_tensor_heads(&q_raw, m->head_dim);
        const rocq_tensor x_k = rocq_tensor_heads(&k_raw, m->head_dim);
        const rocq_tensor d_q = rocq_tensor_heads(&dq, m->head_dim);
        const rocq_tensor d_k = rocq_tensor_heads(&dk, m->head_dim);
        TRAIN__TRY(train__norm_backward(t, l, offsetof(llama_layer, q_norm), &d_q, &d_q, &x_q,
                                        NULL));
        TRAIN__TRY(train__norm_backward(t, l, offsetof(llama_layer, k_norm), &d_k, &d_k, &x_k,
                                        NULL));
    }
    train__product p[3];
    const int n = train__qkv(t, l, &t->dqkv, &t->dqkv, p);
    TRAIN__TRY(train__products_backward(t, l, wanted ? &t->dh : NULL, &l->h, NULL, p, n));
    if (!wanted) return ROCQ_OK;
    return train__norm_backward(t, l, offsetof(llama_layer, attn_norm), dx, &t->dh, &l->x, dx);
}

// From ids to the input of layer 0.
static rocq_result train__embed(trainer *t) {
    const rocq_tensor *x = &t->layers[0].x, *where = &t->dx; // not in use yet
    const rocq_gather_params embed = {.y = x, .table = &t->w.embedding, .ids = &t->ids,
                                      .scale = t->model->embedding_scale};
    const rocq_gather_params place = {.y = where, .table = &t->w.positions, .ids = &t->positions};
    const rocq_binary_params add = {.y = x, .a = x, .b = where};
    TRAIN__TRY(rocq_gather(t->ctx, &embed));
    if (t->w.positions.n_dims == 0) return ROCQ_OK;
    TRAIN__TRY(rocq_gather(t->ctx, &place));
    return rocq_add(t->ctx, &add);
}

static rocq_result train__embed_backward(trainer *t) {
    const rocq_gather_backward_params embed = {.dtable = &t->dw.embedding, .dy = &t->dx,
                                               .ids = &t->ids, .scale = t->model->embedding_scale};
    const rocq_gather_backward_params place = {.dtable = &t->dw.positions, .dy = &t->dx,
                                               .ids = &t->positions};
    if (t->dw.embedding.n_dims > 0) TRAIN__TRY(rocq_gather_backward(t->ctx, &embed));
    if (t->dw.positions.n_dims > 0) TRAIN__TRY(rocq_gather_backward(t->ctx, &place));
    return ROCQ_OK;
}

// Losses of tokens at to at + n - 1, and with backward dh of these, from logits that the next call
// writes over.
static rocq_result train__logits(trainer *t, int64_t at, int64_t n, bool backward) {
    const rocq_tensor h = rocq_tensor_slice(&t->h, 1, at, n);
    const rocq_tensor dh = rocq_tensor_slice(&t->dh, 1, at, n);
    const rocq_tensor columns = rocq_tensor_slice(&t->logits, 1, 0, n);
    const rocq_tensor logits = rocq_tensor_slice(&columns, 0, 0, t->model->n_vocab);
    const rocq_tensor targets = rocq_tensor_slice(&t->targets, 0, at, n);
    const rocq_tensor weights = rocq_tensor_slice(&t->weights, 0, at, n);
    const rocq_tensor loss = rocq_tensor_slice(&t->loss, 0, at, n);
    const rocq_tensor scale = rocq_tensor_slice(&t->state, 0, ROCQ_TRAIN_LOSS_SCALE, 1);
    const rocq_matmul_params project = {.y = &logits, .w = &t->w.output, .x = &h,
                                        .bias = llama__maybe(&t->w.output_bias),
                                        .softcap = t->model->final_softcap,
                                        .precision = train__precision(t, &t->w.output, false)};
    const rocq_cross_entropy_params entropy = {
        .loss = &loss, .dlogits = backward ? &logits : NULL, .logits = &logits,
        .targets = &targets, .weights = backward ? &weights : NULL,
        .scale = backward ? &scale : NULL, .softcap = t->model->final_softcap};
    const rocq_tensor *dw = llama__maybe(&t->dw.output);
    const rocq_matmul_backward_params back = {
        .dx = &dh, .dw = dw, .db = llama__maybe(&t->dw.output_bias), .dy = &logits,
        .w = &t->w.output, .x = dw ? &h : NULL, .accumulate = !t->first || at > 0,
        .precision = train__precision(t, NULL, true)};
    TRAIN__TRY(rocq_matmul(t->ctx, &project));
    TRAIN__TRY(rocq_cross_entropy(t->ctx, &entropy));
    return backward ? rocq_matmul_backward(t->ctx, &back) : ROCQ_OK;
}

// From the last x to losses, and with backward to dx.
static rocq_result train__head(trainer *t, bool backward) {
    const rocq_tensor *x = &t->layers[t->model->n_layers].x;
    const bool means = t->w.output_norm_bias.n_dims > 0;
    const rocq_norm_params norm = {.y = &t->h, .x = x, .weight = &t->w.output_norm,
                                   .bias = means ? &t->w.output_norm_bias : NULL,
                                   .mean = means ? &t->norm_mean : NULL, .rstd = &t->norm_rstd,
                                   .eps = t->model->norm_eps};
    const rocq_norm_backward_params back = {
        .dx = &t->dx, .dx16 = llama__maybe(&t->dx16), .dweight = llama__maybe(&t->dw.output_norm),
        .dbias = llama__maybe(&t->dw.output_norm_bias), .dy = &t->dh, .x = x,
        .weight = &t->w.output_norm, .mean = norm.mean, .rstd = &t->norm_rstd,
        .accumulate = !t->first};
    const int64_t most = t->options.n_logits;
    TRAIN__TRY(means ? rocq_layernorm(t->ctx, &norm) : rocq_rmsnorm(t->ctx, &norm));
    for (int64_t at = 0; at < t->n; at += most) {
        TRAIN__TRY(train__logits(t, at, t->n - at < most ? t->n - at : most, backward));
    }
    return backward ? rocq_norm_backward(t->ctx, &back) : ROCQ_OK;
}

static rocq_result train__head_losses(trainer *t) { return train__head(t, false); }
static rocq_result train__head_backward(trainer *t) { return train__head(t, true); }

// AdamW over all that is trained, group by group.
static rocq_result train__update(trainer *t) {
    const train_options *o = &t->options;
    const rocq_grad_norm_params norm = {.state = &t->state, .g = &t->gradients,
                                        .max_norm = o->max_norm < 0 ? 0 : o->max_norm,
                                        .growth_interval = t->operand == ROCQ_F16 ? 1000 : 0};
    TRAIN__TRY(rocq_grad_norm(t->ctx, &norm));
    for (int32_t group = 0; group < TRAIN__N_GROUPS; group++) {
        const int64_t at = t->group_at[group], n = t->group_at[group + 1] - at;
        if (n == 0) continue;
        const rocq_tensor w = rocq_tensor_slice(&t->masters, 0, at, n);
        const rocq_tensor g = rocq_tensor_slice(&t->gradients, 0, at, n);
        const rocq_tensor m = rocq_tensor_slice(&t->m, 0, at, n);
        const rocq_tensor v = rocq_tensor_slice(&t->v, 0, at, n);
        const bool small = o->moments8, copied = t->operand == ROCQ_F16;
        rocq_tensor w16, m_scale, v_scale;
        if (copied) w16 = rocq_tensor_slice(&t->copies, 0, at, n);
        if (small) m_scale = rocq_tensor_slice(&t->m_scale, 0, at / 256, n / 256);
        if (small) v_scale = rocq_tensor_slice(&t->v_scale, 0, at / 256, n / 256);
        const rocq_adamw_params adamw = {
            .w = &w, .w16 = copied ? &w16 : NULL, .m = &m, .v = &v,
            .m_scale = small ? &m_scale : NULL, .v_scale = small ? &v_scale : NULL, .g = &g,
            .state = &t->state, .lr = &t->rate, .beta1 = o->beta1, .beta2 = o->beta2,
            .eps = o->eps, .weight_decay = group == TRAIN__VECTOR ? 0 : o->weight_decay,
            .clear = group == TRAIN__ADDED};
        TRAIN__TRY(rocq_adamw(t->ctx, &adamw));
    }
    return ROCQ_OK;
}

static rocq_result train__forward(trainer *t) {
    TRAIN__TRY(train__embed(t));
    for (int32_t i = 0; i < t->model->n_layers; i++) {
        TRAIN__TRY(train__layer_forward(t, i, false));
    }
    return ROCQ_OK;
}

static rocq_result train__backward(trainer *t) {
    for (int32_t i = t->model->n_layers - 1; i >= 0; i--) {
        if (i < t->n_recomputed) TRAIN__TRY(train__layer_forward(t, i, true));
        TRAIN__TRY(train__layer_backward(t, i, i > 0 || t->options.rank == 0));
    }
    return train__embed_backward(t);
}

// A part of a step, which a profile knows by name where the ops are not replayed from a graph.
static rocq_result train__region(trainer *t, const char *name, rocq_result (*part)(trainer *t)) {
    rocq_region_begin(t->ctx, name);
    const rocq_result result = part(t);
    rocq_region_end(t->ctx);
    return result;
}

// A micro-batch: losses, or with backward also gradients, and with last AdamW.
static rocq_result train__pass(trainer *t, bool backward, bool first, bool last) {
    t->first = first;
    TRAIN__TRY(train__region(t, "forward", train__forward));
    TRAIN__TRY(train__region(t, "head", backward ? train__head_backward : train__head_losses));
    if (backward) TRAIN__TRY(train__region(t, "backward", train__backward));
    return last ? train__region(t, "optimizer", train__update) : ROCQ_OK;
}

// Ends the recording of ops that returned `result`. checked: on a GPU rocq_warm compares the replay
// with the ops, for which all that they write is put aside twice.
static rocq_result train__recorded(trainer *t, rocq_graph **graph, rocq_result result,
                                   bool checked) {
    const bool gpu = llama__info(t->model).backend == ROCQ_BACKEND_GPU;
    const rocq_result ended = rocq_graph_end(t->ctx, graph);
    if (result != ROCQ_OK || ended != ROCQ_OK) return result != ROCQ_OK ? result : ended;
    return rocq_warm(t->ctx, checked || !gpu ? *graph : NULL);
}

static rocq_result train__record(trainer *t, rocq_graph **graph, bool backward, bool first,
                                 bool last) {
    TRAIN__TRY(rocq_graph_begin(t->ctx));
    return train__recorded(t, graph, train__pass(t, backward, first, last), false);
}

// A runtime that replays wrongly is found by one layer's forward: to put weights and moments aside
// twice would triple the memory that a trainer ever takes.
static rocq_result train__check_replay(trainer *t) {
    rocq_graph *layer = NULL;
    TRAIN__TRY(train__clear(t, &t->layers[0].x));
    TRAIN__TRY(rocq_graph_begin(t->ctx));
    const rocq_result result = train__recorded(t, &layer, train__layer_forward(t, 0, false), true);
    rocq_graph_destroy(t->ctx, &layer);
    return result;
}

// ---------------------------------------------------------------------------------------------
// Bodies of the interface: training
// ---------------------------------------------------------------------------------------------

static rocq_result train__set_options(trainer *t, const train_options *options) {
    const llama_model *m = t->model;
    train_options *o = &t->options;
    if (options) *o = *options;
    const bool half = llama__info(m).backend == ROCQ_BACKEND_GPU &&
                      o->precision != ROCQ_PRECISION_F32;
    if (o->n_seqs == 0) o->n_seqs = 1;
    if (o->n_tokens == 0) o->n_tokens = m->n_ctx_train < 512 ? m->n_ctx_train : 512;
    if (o->n_accumulate == 0) o->n_accumulate = 1;
    if (o->alpha == 0) o->alpha = (float)o->rank;
    if (o->n_logits == 0) o->n_logits = half ? 2048 : 512;
    if (o->beta1 == 0) o->beta1 = 0.9f;
    if (o->beta2 == 0) o->beta2 = 0.999f;
    if (o->eps == 0) o->eps = 1e-8f;
    if (o->max_norm == 0) o->max_norm = 1;
    if (o->rank > 0) o->take_weights = false;
    if (o->loss_scale == 0) o->loss_scale = half ? 65536.0f : 1.0f;
    if (o->precision == ROCQ_PRECISION_AUTO) {
        o->precision = half ? ROCQ_PRECISION_F16 : ROCQ_PRECISION_F32;
    }
    if (o->n_seqs < 1 || o->n_tokens < 1 || o->n_accumulate < 1 || o->n_logits < 1 ||
        o->rank < 0 || o->rank > 512 || o->budget < 0 || o->n_tokens > 1 << 20 ||
        o->n_seqs > 1 << 20 || o->n_accumulate > 1 << 20 ||
        (int64_t)o->n_seqs * o->n_tokens * o->n_accumulate > 1 << 28) {
        return train__fail(t, ROCQ_E_ARGUMENT, "options: %d x %d tokens, %d times, rank %d",
                           (int)o->n_seqs, (int)o->n_tokens, (int)o->n_accumulate, (int)o->rank);
    }
    if (!(o->loss_scale >= 1 && o->loss_scale <= 16777216.0f)) {
        return train__fail(t, ROCQ_E_ARGUMENT, "options: a loss scale of %g, expected 1 to 2^24",
                           (double)o->loss_scale);
    }
    if (m->positions.n_dims > 0 && o->n_tokens > m->n_ctx_train) {
        return train__fail(t, ROCQ_E_BOUNDS, "options: %d tokens, but the model knows %d positions",
                           (int)o->n_tokens, (int)m->n_ctx_train);
    }
    t->n = (int64_t)o->n_seqs * o->n_tokens;
    if (o->n_logits > t->n) o->n_logits = (int32_t)t->n;
    t->operand = half ? ROCQ_F16 : ROCQ_F32;
    t->scale = o->rank > 0 ? o->alpha / (float)o->rank : 0;
    return ROCQ_OK;
}

static rocq_result train__open(trainer *t, const train_options *options) {
    const llama_model *m = t->model;
    const int64_t size = (m->n_layers + 1) * (int64_t)sizeof *t->layers;
    if (!(train__family(t) & TRAIN__FAMILIES)) {
        return train__fail(t, ROCQ_E_UNSUPPORTED, "%s models cannot be trained here, only llama, "
                           "qwen2, qwen3, gemma2 and gpt2", m->family);
    }
    TRAIN__TRY(train__set_options(t, options));
    if (t->options.take_weights && *m->n_users > 1) {
        return train__fail(t, ROCQ_E_STATE, "options: take_weights, but another model shares them");
    }
    t->tied = memcmp(&m->output, &m->embedding, sizeof m->output) == 0;
    TRAIN__TRY(train__allocate(t, &t->layers, size));
    TRAIN__TRY(train__list(t));
    TRAIN__TRY(train__make_state(t));
    TRAIN__TRY(train__make_activations(t));
    for (int first = 0; first < 2; first++) {
        for (int last = 0; last < 2; last++) {
            const int32_t least = first && last ? 1 : first || last ? 2 : 3; // micro-batches
            if (t->options.n_accumulate < least || (least == 1 && t->options.n_accumulate > 1)) {
                continue;
            }
            TRAIN__TRY(train__record(t, &t->passes[first][last], true, first != 0, last != 0));
        }
    }
    TRAIN__TRY(train__record(t, &t->losses_only, false, false, false));
    return train__check_replay(t);
}

static inline rocq_result train_open(trainer *t, llama_model *model, const train_options *options) {
    char error[sizeof t->error];
    memset(t, 0, sizeof *t);
    if (!model || !model->ctx) return train__fail(t, ROCQ_E_ARGUMENT, "there is no open model");
    t->model = model;
    t->ctx = model->ctx;
    const rocq_result result = train__done(t, train__open(t, options));
    if (result != ROCQ_OK) {
        memcpy(error, t->error, sizeof error);
        train_close(t);
        memcpy(t->error, error, sizeof error);
    }
    return result;
}

static inline void train_close(trainer *t) {
    if (t->ctx) {
        for (int i = 0; i < 4; i++) rocq_graph_destroy(t->ctx, &t->passes[i / 2][i % 2]);
        rocq_graph_destroy(t->ctx, &t->losses_only);
        rocq_buffer_free(t->ctx, &t->memory);
        rocq_buffer_free(t->ctx, &t->state_memory);
        rocq_buffer_free(t->ctx, &t->master_memory);
        train__free(t, t->staged, t->host_bytes);
        train__free(t, t->params, t->most_params * (int64_t)sizeof *t->params);
        train__free(t, t->layers, (t->model->n_layers + 1) * (int64_t)sizeof *t->layers);
    }
    memset(t, 0, sizeof *t);
}

static rocq_result train__check(trainer *t, const int32_t *ids, const int32_t *targets, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= t->model->n_vocab || targets[i] >= t->model->n_vocab) {
            const int32_t bad = ids[i] < 0 || ids[i] >= t->model->n_vocab ? ids[i] : targets[i];
            return train__fail(t, ROCQ_E_BOUNDS, "token %d is not one of %d", (int)bad,
                               (int)t->model->n_vocab);
        }
    }
    return ROCQ_OK;
}

// One micro-batch, replayed or op by op; its losses, and the state, are then in t->results.
static rocq_result train__launch(trainer *t, const int32_t *ids, const int32_t *targets,
                                 bool backward, bool first, bool last) {
    memcpy(t->staged, ids, (size_t)t->n * sizeof *ids);
    memcpy(t->staged + t->n, targets, (size_t)t->n * sizeof *targets);
    TRAIN__TRY(rocq_upload(t->ctx, &t->inputs, t->staged, rocq_tensor_size(&t->inputs)));
    if (llama__info(t->model).desc.no_graphs) {
        TRAIN__TRY(train__pass(t, backward, first, last));
    } else {
        TRAIN__TRY(rocq_graph_launch(t->ctx, backward ? t->passes[first][last] : t->losses_only));
    }
    return rocq_download(t->ctx, t->results, &t->out, rocq_tensor_size(&t->out));
}

static rocq_result train__step(trainer *t, const train_batch *batch, float lr) {
    const int32_t n_accumulate = t->options.n_accumulate;
    const int64_t n_all = n_accumulate * t->n;
    const float *weights = batch->weights;
    double total = 0, loss = 0;
    int32_t n_targets = 0;
    TRAIN__TRY(train__check(t, batch->ids, batch->targets, n_all));
    for (int64_t i = 0; i < n_all; i++) {
        const double weight = weights ? (double)weights[i] : 1;
        if (batch->targets[i] < 0 || weight == 0) continue;
        if (weight < 0) return train__fail(t, ROCQ_E_ARGUMENT, "weight %g is negative", weight);
        total += weight;
        n_targets++;
    }
    if (n_targets == 0) return train__fail(t, ROCQ_E_ARGUMENT, "there is no target");
    for (int32_t k = 0; k < n_accumulate; k++) {
        const int64_t at = k * t->n;
        float *staged = (float *)(void *)(t->staged + 2 * t->n);
        for (int64_t i = 0; i < t->n; i++) {
            const double weight = weights ? (double)weights[at + i] : 1;
            staged[i] = batch->targets[at + i] < 0 ? 0.0f : (float)(weight / total);
        }
        staged[t->n] = lr;
        t->broken = true;
        TRAIN__TRY(train__launch(t, batch->ids + at, batch->targets + at, true, k == 0,
                                 k + 1 == n_accumulate));
        memcpy(t->new_losses + at, t->results + ROCQ_TRAIN_STATE, (size_t)t->n * sizeof(float));
        for (int64_t i = 0; i < t->n; i++) {
            loss += (double)staged[i] * (double)t->new_losses[at + i];
        }
    }
    t->broken = false;
    memcpy(t->all_losses, t->new_losses, (size_t)n_all * sizeof(float));
    t->result.loss = loss;
    t->result.n_targets = n_targets;
    t->result.norm = t->results[ROCQ_TRAIN_NORM];
    t->result.loss_scale = t->results[ROCQ_TRAIN_LOSS_SCALE];
    t->result.n_steps = (int64_t)t->results[ROCQ_TRAIN_STEPS];
    t->result.skipped = (int64_t)t->results[ROCQ_TRAIN_SKIPPED] != t->result.n_skipped;
    t->result.n_skipped = (int64_t)t->results[ROCQ_TRAIN_SKIPPED];
    return ROCQ_OK;
}

static inline rocq_result train_step(trainer *t, const train_batch *batch, float lr) {
    TRAIN__TRY(train__ready(t));
    if (!batch || !batch->ids || !batch->targets || !(lr >= 0 && lr < 1e30f)) {
        return train__fail(t, ROCQ_E_ARGUMENT, "there is no batch, or its rate is no number");
    }
    return train__done(t, train__step(t, batch, lr));
}

static inline rocq_result train_evaluate(trainer *t, const train_batch *batch, float *losses) {
    TRAIN__TRY(train__ready(t));
    if (!batch || !batch->ids || !batch->targets || !losses) {
        return train__fail(t, ROCQ_E_ARGUMENT, "there is no batch, or no place for its losses");
    }
    TRAIN__TRY(train__check(t, batch->ids, batch->targets, t->n));
    TRAIN__TRY(train__done(t, train__launch(t, batch->ids, batch->targets, false, false, false)));
    memcpy(losses, t->results + ROCQ_TRAIN_STATE, (size_t)t->n * sizeof *losses);
    return ROCQ_OK;
}

// ---------------------------------------------------------------------------------------------
// Bodies of the interface: files
// ---------------------------------------------------------------------------------------------

// A checkpoint is a GGUF file, whose reader knows when one is cut short. Behind all that is loaded
// comes a sum of it, four times over, which fills its block: no byte there is mere padding.
// A bit that changed on a disk could make a moment negative, its weight NaN, and all losses then.
enum { TRAIN__VERSION = 2, TRAIN__MOST_PARTS = 6, TRAIN__SUMS = 4 };
static const int64_t train__n_sums = TRAIN__SUMS * 2; // in 32 bits

typedef struct train__part {
    const char *name;
    const rocq_tensor *tensor;
} train__part;

static int train__parts(const trainer *t, train__part parts[TRAIN__MOST_PARTS]) {
    const train__part all[TRAIN__MOST_PARTS] = {
        {"weights", &t->masters}, {"m", &t->m},          {"v", &t->v},
        {"m_scale", &t->m_scale}, {"v_scale", &t->v_scale}, {"state", &t->state}};
    int n = 0;
    for (int i = 0; i < TRAIN__MOST_PARTS; i++) {
        if (all[i].tensor->n_dims > 0) parts[n++] = all[i];
    }
    return n;
}

// As FNV-1a, but of 8 bytes at a time. Each step can be undone, so that no change of one is lost.
static uint64_t train__hash(uint64_t hash, const void *data, size_t size) {
    const unsigned char *bytes = (const unsigned char *)data;
    for (size_t i = 0; i < size; i += 8) {
        uint64_t word = 0;
        memcpy(&word, bytes + i, size - i < 8 ? size - i : 8);
        hash = (hash ^ word) * 0x100000001b3u;
        hash ^= hash >> 32;
    }
    return hash;
}

// Of what a checkpoint has to fit: the names, sizes and order of all that is trained, the frozen
// weights' formats, and how adapters are scaled.
static uint64_t train__fingerprint(const trainer *t) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (int32_t i = 0; i < t->n_params; i++) {
        const train__param *p = &t->params[i];
        hash = train__hash(hash, p->name, strlen(p->name) + 1);
        hash = train__hash(hash, p->ne, sizeof p->ne);
    }
    const llama_model *m = t->model;
    const int32_t sizes[] = {m->n_vocab, m->n_embd, m->n_layers, m->n_heads, m->n_kv_heads,
                             m->head_dim, m->n_ff, (int32_t)m->embedding.format,
                             (int32_t)m->layers[0].q.format, (int32_t)m->layers[0].down.format};
    hash = train__hash(hash, m->family, strlen(m->family));
    hash = train__hash(hash, sizes, t->options.rank > 0 ? sizeof sizes : 7 * sizeof sizes[0]);
    return train__hash(hash, &t->scale, sizeof t->scale);
}

static rocq_result train__download(trainer *t, const rocq_tensor *from, void **data) {
    const int64_t size = rocq_tensor_size(from);
    TRAIN__TRY(train__allocate(t, data, size));
    const rocq_result result = rocq_download(t->ctx, *data, from, size);
    if (result == ROCQ_OK) return result;
    train__free(t, *data, size);
    *data = NULL;
    return result;
}

// sum: NULL, or a hash that goes on with the tensor's bytes.
static rocq_result train__write_tensor(trainer *t, rocq_gguf_writer *to, const rocq_tensor *from,
                                       uint64_t *sum) {
    void *data;
    TRAIN__TRY(train__download(t, from, &data));
    if (sum) *sum = train__hash(*sum, data, (size_t)rocq_tensor_size(from));
    const rocq_result result = rocq_gguf_writer_write(to, data, rocq_tensor_size(from));
    train__free(t, data, rocq_tensor_size(from));
    return result;
}

static rocq_result train__write_checkpoint(trainer *t, rocq_gguf_writer *to,
                                           const rocq_gguf *from) {
    (void)from;
    const uint64_t fingerprint = train__fingerprint(t);
    uint64_t sums[TRAIN__SUMS] = {train__hash(fingerprint, t->user, sizeof t->user)};
    train__part parts[TRAIN__MOST_PARTS];
    const int n = train__parts(t, parts);
    TRAIN__TRY(rocq_gguf_writer_set_str(to, "general.type", "checkpoint"));
    TRAIN__TRY(rocq_gguf_writer_set_str(to, "general.architecture", t->model->family));
    TRAIN__TRY(rocq_gguf_writer_set_u32(to, "train.version", TRAIN__VERSION));
    TRAIN__TRY(rocq_gguf_writer_set(to, "train.fingerprint", ROCQ_GGUF_U64, false, 1,
                                    &fingerprint));
    TRAIN__TRY(rocq_gguf_writer_set(to, "train.user", ROCQ_GGUF_U64, true, 8, t->user));
    for (int i = 0; i < n; i++) {
        const int64_t count = rocq_tensor_count(parts[i].tensor);
        TRAIN__TRY(rocq_gguf_writer_add_tensor(to, parts[i].name, parts[i].tensor->format, 1,
                                               &count));
    }
    TRAIN__TRY(rocq_gguf_writer_add_tensor(to, "sum", ROCQ_I32, 1, &train__n_sums));
    for (int i = 0; i < n; i++) {
        TRAIN__TRY(train__write_tensor(t, to, parts[i].tensor, &sums[0]));
    }
    for (int i = 1; i < TRAIN__SUMS; i++) sums[i] = sums[0];
    return rocq_gguf_writer_write(to, sums, (int64_t)sizeof sums);
}

// Writes a file by way of write, which stops at a failure; the file then stays as it was.
static rocq_result train__write_file(trainer *t, const char *path, const rocq_gguf *from,
                                     rocq_result (*write)(trainer *t, rocq_gguf_writer *to,
                                                          const rocq_gguf *from)) {
    const rocq_gguf_writer_desc desc = {.path = path};
    rocq_gguf_writer *to = NULL;
    TRAIN__TRY(rocq_gguf_writer_open(t->ctx, &to, &desc));
    const rocq_result written = write(t, to, from);
    if (written != ROCQ_OK) train__done(t, written); // closing has a message of its own
    const rocq_result closed = rocq_gguf_writer_close(&to);
    return written != ROCQ_OK ? written : closed;
}

static inline rocq_result train_save(trainer *t, const char *path) {
    TRAIN__TRY(train__ready(t));
    if (!path) return train__fail(t, ROCQ_E_ARGUMENT, "there is no path");
    return train__done(t, train__write_file(t, path, NULL, train__write_checkpoint));
}

// Counts are whole numbers, and no step would be taken with another loss scale.
static rocq_result train__check_state(trainer *t, const char *path, const rocq_gguf *file,
                                      const rocq_gguf_tensor *tensor) {
    static const int counts[] = {ROCQ_TRAIN_STEPS, ROCQ_TRAIN_SKIPPED, ROCQ_TRAIN_SINCE};
    float state[ROCQ_TRAIN_STATE];
    TRAIN__TRY(rocq_gguf_read(t->ctx, file, tensor, state));
    const float scale = state[ROCQ_TRAIN_LOSS_SCALE];
    bool good = scale >= 1 && scale <= 16777216.0f;
    for (int i = 0; i < 3; i++) {
        const float n = state[counts[i]];
        good = good && n >= 0 && n <= 16777216.0f && n == floorf(n);
    }
    return good ? ROCQ_OK : train__fail(t, ROCQ_E_ARGUMENT, "%s: its counts of steps or its loss "
                                        "scale make no sense", path);
}

// Whether all that is to be loaded is what was written.
static rocq_result train__check_sum(trainer *t, const char *path, const rocq_gguf *file) {
    uint64_t sum = train__fingerprint(t), user[8] = {0}, sums[TRAIN__SUMS];
    train__part parts[TRAIN__MOST_PARTS];
    const int n = train__parts(t, parts);
    rocq_gguf_value value;
    rocq_gguf_tensor found;
    TRAIN__TRY(rocq_gguf_find_value(file, "train.user", &value));
    for (int64_t i = 0; i < 8; i++) TRAIN__TRY(rocq_gguf_value_u64(&value, i, &user[i]));
    sum = train__hash(sum, user, sizeof user);
    for (int i = 0; i < n; i++) {
        void *data;
        TRAIN__TRY(rocq_gguf_find_tensor(file, parts[i].name, &found));
        TRAIN__TRY(train__allocate(t, &data, found.size));
        const rocq_result result = rocq_gguf_read(t->ctx, file, &found, data);
        if (result == ROCQ_OK) sum = train__hash(sum, data, (size_t)found.size);
        train__free(t, data, found.size);
        TRAIN__TRY(result);
    }
    if (rocq_gguf_find_tensor(file, "sum", &found) != ROCQ_OK || !found.known ||
        found.format != ROCQ_I32 || found.size != (int64_t)sizeof sums) {
        return train__fail(t, ROCQ_E_SHAPE, "%s: has no \"sum\" of %d numbers", path,
                           (int)train__n_sums);
    }
    TRAIN__TRY(rocq_gguf_read(t->ctx, file, &found, sums));
    for (int i = 0; i < TRAIN__SUMS; i++) {
        if (sums[i] == sum) continue;
        return train__fail(t, ROCQ_E_CORRUPT, "%s: has changed since it was written: its sum is "
                           "%08x%08x, expected %08x%08x", path, (unsigned)(sum >> 32),
                           (unsigned)sum, (unsigned)(sums[i] >> 32), (unsigned)sums[i]);
    }
    return ROCQ_OK;
}

// Whether the file is a checkpoint that fits; nothing is changed.
static rocq_result train__check_checkpoint(trainer *t, const char *path, const rocq_gguf *file) {
    rocq_str type;
    uint64_t version = 0, fingerprint = 0;
    rocq_gguf_value user;
    train__part parts[TRAIN__MOST_PARTS];
    if (rocq_gguf_get_str(file, "general.type", &type) != ROCQ_OK ||
        !rocq_str_equal(type, "checkpoint") ||
        rocq_gguf_get_u64(file, "train.version", &version) != ROCQ_OK ||
        rocq_gguf_get_u64(file, "train.fingerprint", &fingerprint) != ROCQ_OK ||
        rocq_gguf_find_value(file, "train.user", &user) != ROCQ_OK ||
        user.type != ROCQ_GGUF_U64 || user.count != 8) {
        return train__fail(t, ROCQ_E_MAGIC, "%s: is no checkpoint of a training", path);
    }
    if (version != TRAIN__VERSION) {
        return train__fail(t, ROCQ_E_UNSUPPORTED, "%s: is a checkpoint of version %.0f, not %d",
                           path, (double)version, (int)TRAIN__VERSION);
    }
    if (fingerprint != train__fingerprint(t)) {
        return train__fail(t, ROCQ_E_SHAPE, "%s: is a checkpoint of another model, or of other "
                           "adapters", path);
    }
    const int n = train__parts(t, parts);
    for (int i = 0; i < n; i++) {
        rocq_gguf_tensor found;
        if (rocq_gguf_find_tensor(file, parts[i].name, &found) != ROCQ_OK ||
            found.format != parts[i].tensor->format ||
            found.size != rocq_tensor_size(parts[i].tensor)) {
            return train__fail(t, ROCQ_E_SHAPE, "%s: has no \"%s\" that fits: its moments may be "
                               "of another kind", path, parts[i].name);
        }
        if (parts[i].tensor == &t->state) TRAIN__TRY(train__check_state(t, path, file, &found));
    }
    return train__check_sum(t, path, file);
}

static rocq_result train__read_checkpoint(trainer *t, const char *path, const rocq_gguf *file) {
    train__part parts[TRAIN__MOST_PARTS];
    rocq_gguf_value user;
    TRAIN__TRY(train__check_checkpoint(t, path, file));
    const int n = train__parts(t, parts);
    t->broken = true;
    for (int i = 0; i < n; i++) {
        rocq_gguf_tensor found;
        void *data;
        TRAIN__TRY(rocq_gguf_find_tensor(file, parts[i].name, &found));
        TRAIN__TRY(train__allocate(t, &data, found.size));
        rocq_result result = rocq_gguf_read(t->ctx, file, &found, data);
        if (result == ROCQ_OK) result = rocq_upload(t->ctx, parts[i].tensor, data, found.size);
        if (result == ROCQ_OK && parts[i].tensor == &t->state) {
            memcpy(t->results, data, (size_t)found.size);
        }
        train__free(t, data, found.size);
        TRAIN__TRY(result);
    }
    TRAIN__TRY(rocq_gguf_find_value(file, "train.user", &user));
    for (int64_t i = 0; i < 8; i++) TRAIN__TRY(rocq_gguf_value_u64(&user, i, &t->user[i]));
    TRAIN__TRY(train__clear(t, &t->gradients)); // of a step that failed
    TRAIN__TRY(train__copy(t));
    t->broken = false;
    memset(&t->result, 0, sizeof t->result);
    t->result.n_steps = (int64_t)t->results[ROCQ_TRAIN_STEPS];
    t->result.n_skipped = (int64_t)t->results[ROCQ_TRAIN_SKIPPED];
    t->result.loss_scale = t->results[ROCQ_TRAIN_LOSS_SCALE];
    return ROCQ_OK;
}

static inline rocq_result train_load(trainer *t, const char *path) {
    const rocq_gguf_desc desc = {.path = path, .no_mmap = true};
    rocq_gguf *file = NULL;
    if (!t->ctx) return train__ready(t);
    if (!path) return train__fail(t, ROCQ_E_ARGUMENT, "there is no path");
    t->error[0] = '\0'; // loading is what mends a broken trainer
    rocq_result result = rocq_gguf_open(t->ctx, &file, &desc);
    if (result == ROCQ_OK) result = train__read_checkpoint(t, path, file);
    result = train__done(t, result);
    rocq_gguf_close(&file);
    return result;
}

static const char *train__name(const rocq_gguf_tensor *tensor, char name[64]) {
    const int64_t n = tensor->name.length < 63 ? tensor->name.length : 63;
    memcpy(name, tensor->name.data, (size_t)n);
    name[n] = '\0';
    return name;
}

static const train__param *train__find(const trainer *t, const rocq_gguf_tensor *tensor) {
    for (int32_t i = 0; i < t->n_params; i++) {
        if (rocq_str_equal(tensor->name, t->params[i].name)) return &t->params[i];
    }
    return NULL;
}

// One tensor of the model: as trained, or as it was.
static rocq_result train__write_weight(trainer *t, rocq_gguf_writer *to, const rocq_gguf *from,
                                       const rocq_gguf_tensor *tensor) {
    const train__param *p = train__find(t, tensor);
    void *data, *encoded;
    int64_t size = tensor->size, row = 0;
    if (!p) {
        TRAIN__TRY(train__allocate(t, &data, size));
        rocq_result result = rocq_gguf_read(t->ctx, from, tensor, data);
        if (result == ROCQ_OK) result = rocq_gguf_writer_write(to, data, size);
        train__free(t, data, size);
        return result;
    }
    const rocq_tensor view = train__view(p, &t->masters);
    if (p->ne[1] == 1 || t->format == ROCQ_F32) return train__write_tensor(t, to, &view, NULL);
    TRAIN__TRY(rocq_row_size(t->format, p->ne[0], &row));
    TRAIN__TRY(train__download(t, &view, &data));
    rocq_result result = train__allocate(t, &encoded, row * p->ne[1]);
    if (result == ROCQ_OK) {
        result = rocq_quantize(t->format, encoded, (const float *)data, p->ne[1], p->ne[0], NULL);
        if (result != ROCQ_OK) train__fail(t, result, "%s is not finite", p->name);
        if (result == ROCQ_OK) result = rocq_gguf_writer_write(to, encoded, row * p->ne[1]);
        train__free(t, encoded, row * p->ne[1]);
    }
    train__free(t, data, rocq_tensor_size(&view));
    return result;
}

static rocq_result train__write_model(trainer *t, rocq_gguf_writer *to, const rocq_gguf *from) {
    const int64_t n = rocq_gguf_tensor_count(from);
    const uint32_t file_type = t->format == ROCQ_F32 ? 0 : t->format == ROCQ_F16 ? 1 : 32;
    rocq_gguf_tensor tensor;
    char name[64];
    TRAIN__TRY(rocq_gguf_writer_set_from(to, from));
    TRAIN__TRY(rocq_gguf_writer_set_u32(to, "general.file_type", file_type));
    int32_t n_found = 0;
    for (int64_t i = 0; i < n; i++) {
        TRAIN__TRY(rocq_gguf_tensor_at(from, i, &tensor));
        const train__param *p = train__find(t, &tensor);
        const rocq_format format = p ? p->ne[1] > 1 ? t->format : ROCQ_F32 : tensor.format;
        if (p && (p->ne[0] != tensor.ne[0] || p->ne[1] != tensor.ne[1])) p = NULL;
        n_found += p != NULL;
        TRAIN__TRY(rocq_gguf_writer_add_tensor(to, train__name(&tensor, name), format,
                                               tensor.n_dims, tensor.ne));
    }
    if (n_found != t->n_params) {
        return train__fail(t, ROCQ_E_SHAPE, "the file is not the one that the model is from");
    }
    for (int64_t i = 0; i < n; i++) {
        TRAIN__TRY(rocq_gguf_tensor_at(from, i, &tensor));
        TRAIN__TRY(train__write_weight(t, to, from, &tensor));
    }
    return ROCQ_OK;
}

static inline rocq_result train_write_gguf(trainer *t, const rocq_gguf *from, rocq_format format,
                                           const char *path) {
    TRAIN__TRY(train__ready(t));
    if (!from || !path || t->options.rank > 0 ||
        (format != ROCQ_F32 && format != ROCQ_F16 && format != ROCQ_BF16)) {
        return train__fail(t, ROCQ_E_ARGUMENT, "there is no file, its format is not F32, F16 or "
                           "BF16, or it is adapters that are trained");
    }
    t->format = format;
    return train__done(t, train__write_file(t, path, from, train__write_model));
}

static rocq_result train__write_adapters(trainer *t, rocq_gguf_writer *to, const rocq_gguf *from) {
    (void)from;
    TRAIN__TRY(rocq_gguf_writer_set_str(to, "general.type", "adapter"));
    TRAIN__TRY(rocq_gguf_writer_set_str(to, "general.architecture", t->model->family));
    TRAIN__TRY(rocq_gguf_writer_set_str(to, "adapter.type", "lora"));
    TRAIN__TRY(rocq_gguf_writer_set_f32(to, "adapter.lora.alpha", t->options.alpha));
    for (int32_t i = 0; i < t->n_params; i++) {
        const train__param *p = &t->params[i];
        TRAIN__TRY(rocq_gguf_writer_add_tensor(to, p->name, ROCQ_F32, 2, p->ne));
    }
    for (int32_t i = 0; i < t->n_params; i++) {
        const rocq_tensor view = train__view(&t->params[i], &t->masters);
        TRAIN__TRY(train__write_tensor(t, to, &view, NULL));
    }
    return ROCQ_OK;
}

static inline rocq_result train_write_lora(trainer *t, const char *path) {
    TRAIN__TRY(train__ready(t));
    if (!path || t->options.rank == 0) {
        return train__fail(t, ROCQ_E_ARGUMENT, "there is no path, or no adapter is trained");
    }
    return train__done(t, train__write_file(t, path, NULL, train__write_adapters));
}

#undef TRAIN__TRY
#undef TRAIN__PLACES

#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#endif // TRAIN_H
