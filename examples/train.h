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

// ---------------------------------------------------------------------------------------------
// Interface
// ---------------------------------------------------------------------------------------------

typedef struct train_options { // 0 = default, as everywhere in rocq
    int32_t n_seqs;       // sequences that are computed at once, a micro-batch; default 1
    int32_t n_tokens;     // tokens of a sequence; default what the model was trained on, at most 512
    int32_t n_accumulate; // micro-batches of a step, whose gradients are added up; default 1
    int32_t rank;         // of the adapters, up to 512; 0 = the weights themselves are trained
    float alpha;          // an adapter is added alpha / rank times; default rank
    const char *targets;  // matrices that get an adapter, as in "q,v": of q k v (gpt2: qkv) output
                          // gate up down; default all
    uint64_t seed;        // of the adapters' first values
    int64_t budget;       // bytes of activations kept from forward to backward: as many of the first
                          // layers as it takes keep their input alone, and are computed again.
                          // 0 = no limit; at least one layer's have to fit
    int32_t n_logits;     // tokens whose logits exist at once, default 512
    float beta1, beta2;   // of AdamW: default 0.9, 0.999
    float eps;            // default 1e-8
    float weight_decay;   // of matrices, not of norms and biases; default 0
    float max_norm;       // a longer gradient is shortened to it; default 1, -1 = none is
    float loss_scale;     // first one, a power of two; default 65536 on a GPU, else 1, which stays
    bool moments8;        // AdamW's moments in 8 bits, 1 byte and a bit instead of 4 each
    rocq_precision precision; // of all products; default F32 on the CPU, F16 on a GPU
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
    bool skipped;       // the gradient was not finite, and nothing has changed but n_skipped, and on
                        // a GPU the loss scale, which is halved
    float norm;         // of the gradient, before it was clipped
    float loss_scale;   // of the next step
    int64_t n_steps;    // so far, those before a train_load included, without skipped ones
    int64_t n_skipped;
} train_result;

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
} trainer;

// Takes all memory that a step will ever need and records its ops, so that train_step allocates
// nothing. All weights that are trained must be finite in F32, F16 or BF16; without rank those are
// all of the model's, converted to F32. While the trainer is open the model must be, and *t must
// not move; the model itself keeps its own weights. On failure everything is freed again, and *t is
// zero but for t->error.
static inline rocq_result train_open(trainer *t, llama_model *model, const train_options *options);
static inline void train_close(trainer *t); // twice, or on a zeroed struct, is harmless

// One step: losses and gradients of all micro-batches, then AdamW with rate lr. The same weights and
// batches give the same bits, whatever the number of threads. E_BOUNDS for ids and targets that the
// vocabulary lacks, E_ARGUMENT for weights that are negative, not finite or all 0: nothing has
// changed then.
static inline rocq_result train_step(trainer *t, const train_batch *batch, float lr);

// Losses of one micro-batch, and nothing else: losses receives [n_seqs n_tokens], 0 where there is no
// target. batch->weights is not used.
static inline rocq_result train_evaluate(trainer *t, const train_batch *batch, float *losses);

// A checkpoint: weights, moments, loss scale, counts, and t->user. After train_load the next steps
// give the same bits as if the run had never been interrupted. It is a file of rocq_file_open: path
// is the old file or the new one, whenever the program dies. train_load refuses checkpoints that are
// cut short, of another model, or of other options where those matter (rank, alpha, targets,
// moments8), with one line in t->error, and changes nothing then.
static inline rocq_result train_save(trainer *t, const char *path);
static inline rocq_result train_load(trainer *t, const char *path);

// The model with its trained weights: `from`, the file that it was opened from, with matrices in
// `format` (ROCQ_F32 loses nothing) and vectors in F32. Without rank only.
static inline rocq_result train_write_gguf(trainer *t, const rocq_gguf *from, rocq_format format,
                                           const char *path);

// The adapters alone, as GGUF in llama.cpp's convention: NAME.lora_a [in, rank] and NAME.lora_b
// [rank, out] in F32 for each weight NAME, adapter.lora.alpha. With rank only.
static inline rocq_result train_write_lora(trainer *t, const char *path);

#endif // TRAIN_H
