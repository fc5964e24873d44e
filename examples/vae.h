// vae.h - decodes latents to pictures and videos, and encodes pictures, on rocq.h: AutoencoderKL
// (SD1.5, SD2, SDXL, SD3, Flux), TAESD, and the decoder of Wan 2.1, from GGUF and safetensors
// files.
//
//     vae_model m;
//     const vae_options options = {.family = "sdxl"};
//     if (vae_open(&m, ctx, NULL, &file, &options) != ROCQ_OK) puts(m.error);
//     vae_request job = {.width = 128, .height = 128, .latents = latents, .pixels = rgb};
//     vae_decode(&m, &job);                                   // 1024 x 1024
//     vae_close(&m);
//
// A network is a list of modules, each a few convolutions with or without a residual, or attention.
// vae__convs runs the one, vae__attention the other, over a whole picture or a tile of it; what
// they read and write lies in one buffer, whose size the same code finds out before.
//
// Tiles can be exact. What hides between the tiles of a GroupNorm network is its norms, whose mean
// and variance are those of the whole picture. vae__segment finds them layer by layer: for each
// norm it runs all tiles up to there, with as many positions around each as the convolutions reach,
// and merges the moments. vae__choose picks which values in between are kept whole, so that this
// costs least. The norms of a video are of one position each: behind its attention, whose value is
// kept whole, a tile with its halo goes through all chunks of frames, with the frames that those
// share, and has the whole's bits wherever convolutions do not depend on the size (on the CPU).

#ifndef VAE_H
#define VAE_H

#include "../rocq.h"
#include "safetensors.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

// g++ takes fields that a designated initialiser leaves out for forgotten ones.
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#endif

// ---------------------------------------------------------------------------------------------
// Interface
// ---------------------------------------------------------------------------------------------

typedef struct vae_options { // 0 = default, as everywhere in rocq
    const char *family;      // "sd1" (SD2 too), "sdxl", "sd3", "flux", "taesd" or "wan2.1": how
                             // latents are scaled; NULL = by what the file looks like
    float scale, shift;      // z = latent / scale + shift, in place of the family's; scale 0 = that
    int32_t n_groups;        // of the GroupNorms, default 32: weights do not tell
    bool encoder;            // load the encoder too
    bool stream;             // the file stays open as long as the model, and what of the weights
                             // does not fit a request's budget is read from it each time that it
                             // is used. They are loaded by the first request, not by vae_open
    const char *weights;     // format of convolutions, "f16"; default by tensor, see vae_conv.why
    const char *activations; // "f32" (default on the CPU), "bf16" or "f16" (default on a GPU). What
                             // the blocks of SDXL add up exceeds F16: a 64th of it is kept. Of
                             // other models that is found out, and the request computed again with
                             // BF16
    rocq_precision precision; // of all convolutions
    // Called as weights are loaded ("loading") and pictures computed ("computing"), with how much
    // is done; false = stop, which makes the call fail with ROCQ_E_STATE. NULL = no call.
    bool (*progress)(const char *what, int64_t done, int64_t total, void *user);
    void *user;
} vae_options;

typedef enum vae_tiling {
    VAE_AUTO = 0, // whole, or if memory does not allow that, exact
    VAE_WHOLE,
    VAE_BLEND,    // tiles that overlap, each a picture of its own, mixed where they meet
    VAE_EXACT     // tiles that give the whole picture, up to rounding
} vae_tiling;

typedef struct vae_request {
    int32_t width, height;   // of the latents; of the pictures, for vae_encode
    int32_t frames;          // of a video's latents; 0 = 1
    int32_t n;               // pictures or videos; 0 = 1
    int32_t channels;        // of the latents; 0 = the model's, which others are compared with
    vae_tiling tiling;
    int32_t tile, overlap;   // pixels of pictures. BLEND: default 768 and 96, or less where memory
                             // does not allow that; EXACT: default as memory allows
    int32_t chunk;           // latent frames computed at once; default as many as memory allows
    int32_t chunk_overlap;   // latent frames. 0: what chunks share is carried over, so that they
                             // give the video bit for bit. Else each is a video of its own, and
                             // mixed with the next
    int64_t memory_budget;   // bytes, of all that the context has; 0 = rocq_desc's
    const float *latents;    // vae_decode: [width, height, frames, z, n], innermost first; finite
    uint8_t *pixels;         // RGB [3, W, H, frames out, n], W = 8 width; or NULL
    float *values;           // the same before they are cut to 0 to 1 and rounded; or NULL
    const uint8_t *from_pixels; // vae_encode: RGB [3, width, height, n], or
    const float *from_values;   // 0 to 1
    float *to_latents;       // [w, h, z, n], w = width / 8: the mean
} vae_request;

// What a request will take; see vae_plan_decode.
typedef struct vae_plan {
    vae_tiling tiling;
    int32_t tile, overlap;   // pixels; 0 with WHOLE
    int32_t n_tiles;
    int32_t batch;           // pictures at once
    int32_t chunk, n_chunks; // latent frames
    int64_t peak_bytes;      // largest rocq_stats.live_bytes, weights included
    int64_t weight_bytes, activation_bytes, scratch_bytes; // of those
    int32_t n_streamed;      // convolutions whose weights are read anew, see vae_options.stream
    int64_t smallest_bytes;  // the smallest memory_budget that would do, tiles being free
    double flops;            // of convolutions and attention; of exact tiles a little too many
    double whole_flops;
} vae_plan;

enum { VAE__CONVS, VAE__ATTENTION, VAE__TIME };                  // kinds of modules
enum { VAE__NO_NORM, VAE__GROUP_NORM, VAE__POSITION_NORM };
enum { VAE__NO_RESIDUAL, VAE__OF_INPUT, VAE__OF_SHORTCUT };
enum { VAE__MAX_CONVS = 160, VAE__MAX_MODULES = 64 };
enum { VAE__TILE = 768, VAE__OVERLAP = 96 }; // of BLEND
enum { VAE__RUN_NOW, VAE__RECORD, VAE__REPLAY }; // what becomes of ops, see vae__before_op

typedef struct vae__entry { // a tensor of the file
    char name[96];         // ldm's: decoder.up.3.block.0.conv1.weight
    char own[96];          // the file's
    int32_t n_dims;
    int64_t ne[5];         // innermost first
    rocq_format format;
    bool known, used;
    int64_t size, index;   // in the file's directory
} vae__entry;

typedef struct vae__file {
    const rocq_gguf *gguf;
    safetensors_file *safetensors; // one of the two
    int64_t n, capacity;
    vae__entry *entries; // sorted by name
    bool sdxl, sd3, flux; // what else is in the file
} vae__file;

enum { VAE__BIAS, VAE__NORM_WEIGHT, VAE__NORM_BIAS, VAE__VECTORS };

typedef struct vae_conv {
    char name[96];              // of the weight, in ldm's way of naming
    rocq_format file_format;
    rocq_format format;         // of w
    const char *why;
    float gain, bias_gain;      // of w and bias, see vae__set_gains
    float eps_gain;             // of what the norm reads
    rocq_tensor w;              // [C k k kt, M]
    rocq_tensor vectors[VAE__VECTORS]; // bias [M], of what is read norm_weight and norm_bias [C]
    int32_t c, m, k, kt;
    int32_t stride, upsample, pad; // pad: zeros left of and above
    int32_t norm;
    rocq_activation before, after;
    bool same_input;            // as the convolution before, so its statistics too
    rocq_tensor stats, moments; // GROUP_NORM: [2, G, N], [3, G, N]
    rocq_tensor cache;          // kt > 1: the last frames read of a tile, [C, w, h, kt - 1]
    int64_t n_cached, n_past;   // frames that it has; that were in front of those read last
    const vae__entry *entry, *vector_entries[VAE__VECTORS]; // in the file, or NULL
    int32_t part, n_parts;      // of the file's rows; n_parts 0 = all
    bool streamed;              // w is read whenever it is used, see vae__bring
    int32_t follower;           // the convolution that was used next the last time, or -1
} vae_conv;

typedef struct vae_module {
    int32_t kind, residual;
    int32_t first, n;           // of its convolutions; a shortcut is the one behind them
} vae_module;

typedef struct vae_net { // a decoder or an encoder
    vae_conv *convs;
    vae_module modules[VAE__MAX_MODULES];
    int32_t n_convs, n_modules, n_times;
    int32_t c_in, c_out;
} vae_net;

// Positions first to first + n - 1 in both directions.
typedef struct vae__span {
    int64_t at[2], n[2];
} vae__span;

// Tiles of one direction, or chunks: n of `size` positions from vae__start on, the last shifted in.
typedef struct vae__tiles {
    int64_t n, size, step, total;
} vae__tiles;

// What one module writes and the next one reads: positions `span` of a value of `size`.
typedef struct vae__value {
    rocq_tensor full;  // [C, W, H, room + N]
    int64_t room;      // frames in front, for those of the chunk before
    vae__span span;
    int64_t size[2];
    int32_t side;      // of the stack
    int64_t mark, end; // levels before and behind it
    bool owned;        // may be overwritten and freed
} vae__value;

// Memory that is taken from both ends, so that of two values that take turns either can be freed.
typedef struct vae__stack {
    rocq_buffer buffer;
    int64_t level[2], peak;
} vae__stack;

typedef struct vae__segment_of {
    int32_t end, tile; // up to module end; pixels, 0 = whole
} vae__segment_of;

typedef struct vae_model {
    // for reading only
    const char *family, *why_family;
    int32_t z;                  // channels of the latents
    int32_t scale, time_scale;  // pixels of a latent (8), and frames (1; Wan: 4)
    int64_t weight_bytes;
    vae_net decoder, encoder;
    rocq_format stream, inner;  // of what the blocks add up, and of what is inside them
    const char *why_stream;
    vae_plan plan;              // of the last request
    char error[512];            // the message of the last failure, also of vae_open

    // Private from here on.
    rocq_ctx *ctx;
    vae_options options;
    vae__file file;
    rocq_buffer weights, memory;
    const vae_net *laid_net;     // whose weights are in memory but for the laid_streamed largest,
    int32_t laid_streamed;       // which share a place; NULL = of both networks. -1 = none are
    int32_t in_place, last_conv; // whose weights that place has; which was used last; or -1
    float latent_scale, latent_shift, z_mean[64], z_std[64];
    float pixel_scale, pixel_bias; // from the decoder's numbers to 0 to 1
    float gain;                    // of what the decoder's blocks add up
    bool gpu, video, tanh_latents, wide;
    // while a request is computed or planned
    vae_net *net;
    const vae_request *job;
    vae_net *planned_net;       // for which m->plan is, or NULL; and the request, and what else the
    vae_request planned;        // context had in use, and as scratch
    int64_t planned_base, planned_scratch;
    vae__stack stack;
    bool planning, comparing, inline_stats, caches;
    int64_t op_scratch, scratch; // of the ops so far; that the context has already
    int64_t budget;              // or 0
    double flops, chain_flops, norm_flops;
    vae__tiles chunks;          // of a video's latent frames; of pictures, all at once
    int64_t size[VAE__MAX_MODULES + 1][2], full[2];
    int64_t rate[VAE__MAX_MODULES + 1]; // frames of a latent frame, but for the first
    int32_t n_segments;
    vae__segment_of segments[VAE__MAX_MODULES];
    rocq_tensor input;          // [c_in, W, H, N] of the batch or video, F32
    rocq_tensor blended;        // [3, W, H, N] of the same
    rocq_tensor ramp[3];        // weights of columns, rows and frames of a tile
    bool blending, first_chunk, finite;
    int64_t at[3];              // where a tile goes: column, row, frame or picture, of the batch
    int64_t first;              // of the batch, among the request's pictures or frames
    int64_t batch_end;          // the first picture or video behind it
    rocq_tensor ahead;          // latents of the next one, which are uploaded meanwhile
    int64_t n_ahead;            // pictures or frames of it that are still to be uploaded
    int32_t mode;               // of ops; and whether any have come since the last copy
    bool pending, recorded;     // graphs are those of m->planned, all, in recorded_stream
    rocq_format recorded_stream;
    rocq_graph **graphs;        // by the order of their launches; those of the last batch, if it is
    int64_t n_graphs, graphs_capacity, graph_at, last_batch_at; // smaller, from last_batch_at on
    int64_t graph_bytes, live_bytes;  // of memory that they take; before the one being recorded
    double reported;            // flops, to options.progress
    int64_t limit;              // for the stack and the scratch of ops, while EXACT is planned;
                                // 0 = none, -1 = the least
} vae_model;

// Reads the weights of a GGUF or a safetensors file; the other is NULL, and both may be closed
// after. While the model is open ctx must be. On failure all is freed again, and *m is zero but for
// m->error.
static inline rocq_result vae_open(vae_model *m, rocq_ctx *ctx, const rocq_gguf *gguf,
                                   safetensors_file *safetensors, const vae_options *options);
static inline void vae_close(vae_model *m); // twice, or on a zeroed struct, is harmless

// Says how the request would be computed and in how much memory, without taking any. ROCQ_E_BUDGET,
// with the smallest budget that would do, if it cannot be.
static inline rocq_result vae_plan_decode(vae_model *m, const vae_request *job, vae_plan *plan);
static inline rocq_result vae_plan_encode(vae_model *m, const vae_request *job, vae_plan *plan);

// Plans, takes the memory, computes, and waits. m->plan is the plan. Memory is kept for the next
// request until vae_trim or vae_close, and so are graphs (see rocq_graph_begin) that the ops are
// recorded in: a request like the last one replays them, whatever its latents, unless
// rocq_desc.no_graphs is set. Graphs take a KiB of host memory an op, which no plan counts.
static inline rocq_result vae_decode(vae_model *m, const vae_request *job);
static inline rocq_result vae_encode(vae_model *m, const vae_request *job);
static inline void vae_trim(vae_model *m);

// Frames that a video of so many latent frames has.
static inline int64_t vae_frames(const vae_model *m, int64_t latent_frames);

// ---------------------------------------------------------------------------------------------
// Errors, memory of the host
// ---------------------------------------------------------------------------------------------

#define VAE__TRY(call)                          \
    do {                                        \
        const rocq_result vae__r = (call);      \
        if (vae__r != ROCQ_OK) return vae__r;   \
    } while (0)

static rocq_result vae__fail(vae_model *m, rocq_result result, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(m->error, sizeof m->error, format, args);
    va_end(args);
    return result;
}

// What a public call returns: a failure without a message of ours came from the context.
static rocq_result vae__done(vae_model *m, rocq_result result) {
    if (result == ROCQ_OK || m->error[0]) return result;
    return vae__fail(m, result, "%s", rocq_error(m->ctx));
}

static rocq_result vae__progress(vae_model *m, const char *what, int64_t done, int64_t total) {
    const vae_options *o = &m->options;
    if (!o->progress || o->progress(what, done, total, o->user)) return ROCQ_OK;
    return vae__fail(m, ROCQ_E_STATE, "%s was stopped", what);
}

static rocq_info vae__info(const vae_model *m) {
    rocq_info info;
    memset(&info, 0, sizeof info);
    rocq_get_info(m->ctx, &info);
    return info;
}

static rocq_stats vae__stats(const vae_model *m) {
    rocq_stats stats;
    memset(&stats, 0, sizeof stats);
    rocq_get_stats(m->ctx, &stats);
    return stats;
}

static rocq_result vae__allocate(vae_model *m, void *out, size_t size) { // *out, cleared
    const rocq_allocator a = vae__info(m).desc.allocator;
    void *data = a.alloc(size, a.user);
    if (!data) return vae__fail(m, ROCQ_E_MEMORY, "no memory for %.0f bytes", (double)size);
    memset(data, 0, size);
    memcpy(out, &data, sizeof data); // out points to a pointer of any type
    return ROCQ_OK;
}

static void vae__free(vae_model *m, void *data, size_t size) {
    const rocq_allocator a = vae__info(m).desc.allocator;
    if (data) a.free(data, size, a.user);
}

// ---------------------------------------------------------------------------------------------
// The file: tensors of either kind, under one way of naming
// ---------------------------------------------------------------------------------------------

static rocq_result vae__entry_at(vae_model *m, const vae__file *f, int64_t i, vae__entry *e) {
    memset(e, 0, sizeof *e);
    e->index = i;
    if (f->safetensors) {
        const safetensors_tensor *t = &f->safetensors->tensors[i];
        snprintf(e->own, sizeof e->own, "%s", t->name);
        e->format = t->format;
        e->known = t->known && t->n_dims <= 5;
        e->size = t->size;
        e->n_dims = e->known ? t->n_dims : 0;
        for (int32_t d = 0; d < e->n_dims; d++) e->ne[d] = t->shape[e->n_dims - 1 - d];
        return ROCQ_OK;
    }
    rocq_gguf_tensor t;
    VAE__TRY(rocq_gguf_tensor_at(f->gguf, i, &t));
    snprintf(e->own, sizeof e->own, "%.*s", (int)(t.name.length < 95 ? t.name.length : 95),
             t.name.data);
    e->format = t.format;
    e->known = t.known && t.format != ROCQ_I32;
    e->size = t.size;
    e->n_dims = t.n_dims;
    for (int32_t d = 0; d < t.n_dims; d++) e->ne[d] = t.ne[d];
    return m->ctx ? ROCQ_OK : ROCQ_E_STATE;
}

// The first `from` in name becomes `to`.
static bool vae__replace(char name[96], const char *from, const char *to) {
    char *at = strstr(name, from), rest[96];
    if (!at) return false;
    snprintf(rest, sizeof rest, "%s", at + strlen(from));
    snprintf(at, (size_t)(name + 96 - at), "%s%s", to, rest);
    return true;
}

static bool vae__starts(const char *name, const char *with) {
    return strncmp(name, with, strlen(with)) == 0;
}

// From diffusers' names, and those of Wan's own files, to ldm's. Their levels are counted from the
// other end, which vae__read_names sees to.
static const struct vae__rule {
    const char *from, *to;
} vae__rules[] = {
    {"up_blocks.", "up."}, {"down_blocks.", "down."}, {".resnets.", ".block."},
    {".upsamplers.0.", ".upsample."}, {".upsampler.", ".upsample."},
    {".downsamplers.0.", ".downsample."}, {"mid_block.", "mid."},
    {"mid.block.0.", "mid.block_1."}, {"mid.block.1.", "mid.block_2."},
    {"mid.attentions.0.", "mid.attn_1."}, {".group_norm.", ".norm."},
    {".to_q.", ".q."}, {".to_k.", ".k."}, {".to_v.", ".v."}, {".query.", ".q."},
    {".key.", ".k."}, {".value.", ".v."}, {".to_out.0.", ".proj_out."},
    {".proj_attn.", ".proj_out."}, {".conv_shortcut.", ".nin_shortcut."},
    {"conv_norm_out.", "norm_out."},
    {".middle.0.", ".mid.block_1."}, {".middle.1.", ".mid.attn_1."},
    {".middle.2.", ".mid.block_2."}, {".residual.0.", ".norm1."}, {".residual.2.", ".conv1."},
    {".residual.3.", ".norm2."}, {".residual.6.", ".conv2."}, {".shortcut.", ".nin_shortcut."},
    {".head.0.", ".norm_out."}, {".head.2.", ".conv_out."}, {"decoder.conv1.", "decoder.conv_in."},
    {".resample.1.", ".conv."}, {".to_qkv.", ".qkv."}, {".proj.", ".proj_out."},
    {".gamma", ".weight"},
};

static int vae__by_name(const void *a, const void *b) {
    return strcmp(((const vae__entry *)a)->name, ((const vae__entry *)b)->name);
}

static vae__entry *vae__find(const vae__file *f, const char *name) {
    int64_t low = 0, high = f->n;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        const int order = strcmp(name, f->entries[middle].name);
        if (order == 0) return &f->entries[middle];
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return NULL;
}

// The number behind prefix in name, which *rest is behind; -1 = there is none.
static int32_t vae__number(const char *name, const char *prefix, const char **rest) {
    if (!vae__starts(name, prefix)) return -1;
    const char *c = name + strlen(prefix);
    int32_t value = 0;
    if (*c < '0' || *c > '9') return -1;
    for (; *c >= '0' && *c <= '9' && value < 10000; c++) value = 10 * value + (*c - '0');
    if (*c != '.') return -1;
    *rest = c;
    return value;
}

// Numbers of layers and levels as ldm has them: decoder.up counts down to 0, and Wan's own files
// have one list of blocks and resamplings. TAESD's own files count a step in front of the first
// convolution.
static void vae__renumber(vae__file *f, bool reversed, bool taesd) {
    int32_t n_levels = 0, step = 0;
    const char *rest;
    for (int64_t i = 0; i < f->n; i++) {
        const char *name = f->entries[i].name;
        const int32_t level = vae__number(name, "decoder.up.", &rest);
        const int32_t item = vae__number(name, "decoder.upsamples.", &rest);
        if (reversed && level >= n_levels) n_levels = level + 1;
        if (item >= 0 && vae__starts(rest, ".conv.") && (step == 0 || item < step)) {
            step = item + 1;
        }
    }
    for (int64_t i = 0; i < f->n; i++) {
        const int32_t item = vae__number(f->entries[i].name, "decoder.upsamples.", &rest);
        if (step > 0 && item / step >= n_levels) n_levels = item / step + 1;
    }
    for (int64_t i = 0; i < f->n; i++) {
        vae__entry *e = &f->entries[i];
        char name[160];
        const int32_t level = vae__number(e->name, "decoder.up.", &rest);
        if (reversed && level >= 0) {
            snprintf(name, sizeof name, "decoder.up.%d%s", (int)(n_levels - 1 - level), rest);
            snprintf(e->name, sizeof e->name, "%.95s", name);
        }
        const int32_t item = vae__number(e->name, "decoder.upsamples.", &rest);
        if (step > 0 && item >= 0) {
            if (item % step == step - 1) {
                snprintf(name, sizeof name, "decoder.up.%d.upsample%s",
                         (int)(n_levels - 1 - item / step), rest);
            } else {
                snprintf(name, sizeof name, "decoder.up.%d.block.%d%s",
                         (int)(n_levels - 1 - item / step), (int)(item % step), rest);
            }
            snprintf(e->name, sizeof e->name, "%.95s", name);
        }
        const int32_t layer = vae__number(e->name, "decoder.", &rest);
        if (taesd && layer > 0) {
            snprintf(name, sizeof name, "decoder.layers.%d%s", (int)(layer - 1), rest);
            snprintf(e->name, sizeof e->name, "%.95s", name);
        }
        const int32_t encoder_layer = vae__number(e->name, "encoder.", &rest);
        if (taesd && encoder_layer >= 0) {
            snprintf(name, sizeof name, "encoder.layers.%d%s", (int)encoder_layer, rest);
            snprintf(e->name, sizeof e->name, "%.95s", name);
        }
    }
}

// Lists the tensors of the autoencoder, which may be a part of a larger file.
static rocq_result vae__read_names(vae_model *m, vae__file *f) {
    static const char *const prefixes[] = {"first_stage_model.", "vae.", "tae.", ""};
    const int64_t total = f->safetensors ? f->safetensors->n_tensors
                                         : rocq_gguf_tensor_count(f->gguf);
    const char *prefix = NULL;
    bool reversed = false, taesd = false, bare = false;
    const char *rest;
    f->capacity = total;
    VAE__TRY(vae__allocate(m, &f->entries, (size_t)(total + 1) * sizeof *f->entries));
    for (int64_t i = 0; i < total; i++) {
        vae__entry e;
        VAE__TRY(vae__entry_at(m, f, i, &e));
        f->sdxl |= vae__starts(e.own, "conditioner.");
        f->sd3 |= strstr(e.own, "joint_blocks.") != NULL;
        f->flux |= strstr(e.own, "double_blocks.") != NULL;
        bare |= vae__number(e.own, "", &rest) >= 0;
        for (int p = 0; p < 4 && !prefix; p++) {
            const size_t length = strlen(prefixes[p]);
            if (vae__starts(e.own, prefixes[p]) && (vae__starts(e.own + length, "decoder.") ||
                                                    vae__starts(e.own + length, "encoder."))) {
                prefix = prefixes[p];
            }
        }
    }
    if (!prefix && !bare) {
        return vae__fail(m, ROCQ_E_UNSUPPORTED, "of the file's %.0f tensors none is an "
                         "autoencoder's: no name begins with decoder.", (double)total);
    }
    if (!prefix) prefix = "";
    for (int64_t i = 0; i < total; i++) {
        vae__entry *e = &f->entries[f->n];
        VAE__TRY(vae__entry_at(m, f, i, e));
        if (!vae__starts(e->own, prefix) || vae__starts(e->own + strlen(prefix), "loss.") ||
            vae__starts(e->own + strlen(prefix), "model_ema.")) {
            continue;
        }
        snprintf(e->name, sizeof e->name, "%s", e->own + strlen(prefix));
        if (vae__starts(e->name, "conv1.")) vae__replace(e->name, "conv1.", "quant_conv.");
        if (vae__starts(e->name, "conv2.")) vae__replace(e->name, "conv2.", "post_quant_conv.");
        if (vae__number(e->name, "", &rest) >= 0) { // TAESD's own, in a file for each half
            char name[160];
            snprintf(name, sizeof name, "decoder.%s", e->name);
            snprintf(e->name, sizeof e->name, "%.95s", name);
        }
        reversed |= strstr(e->name, "up_blocks.") != NULL;
        taesd |= vae__number(e->name, "decoder.", &rest) >= 0 ||
                 vae__number(e->name, "encoder.", &rest) >= 0;
        for (size_t r = 0; r < sizeof vae__rules / sizeof vae__rules[0]; r++) {
            vae__replace(e->name, vae__rules[r].from, vae__rules[r].to);
        }
        f->n++;
    }
    vae__renumber(f, reversed, taesd);
    qsort(f->entries, (size_t)f->n, sizeof *f->entries, vae__by_name);
    for (int64_t i = 1; i < f->n; i++) {
        if (vae__by_name(&f->entries[i - 1], &f->entries[i]) != 0) continue;
        return vae__fail(m, ROCQ_E_CORRUPT, "tensors %s and %s are the same", f->entries[i - 1].own,
                         f->entries[i].own);
    }
    return ROCQ_OK;
}

static rocq_result vae__read(vae_model *m, const vae__file *f, const vae__entry *e, void *dst) {
    if (f->safetensors) {
        const rocq_result result =
            safetensors_read(f->safetensors, &f->safetensors->tensors[e->index], dst);
        return result == ROCQ_OK ? result
                                 : vae__fail(m, result, "%s: %s", e->own, f->safetensors->error);
    }
    rocq_gguf_tensor t;
    VAE__TRY(rocq_gguf_tensor_at(f->gguf, e->index, &t));
    return rocq_gguf_read(m->ctx, f->gguf, &t, dst);
}

// ---------------------------------------------------------------------------------------------
// Networks
// ---------------------------------------------------------------------------------------------

// What a network is built from: convolutions found in the file, in the order of their use.
typedef struct vae__builder {
    vae__file *file;
    vae_net *net;
    int32_t c; // channels so far, 0 = whatever the first weight has
} vae__builder;

typedef struct vae__spec {
    const char *name;  // without .weight and .bias
    const char *norm;  // of its input, or NULL
    int32_t k, kt, m;  // m 0 = whatever the weight has
    int32_t stride, upsample, pad;
    rocq_activation before, after;
    bool no_bias;      // need be there
    int32_t part, n_parts; // of the rows; n_parts 0 = all
} vae__spec;

static rocq_result vae__wrong_shape(vae_model *m, const vae__entry *e, const vae__spec *s,
                                    int32_t c) {
    char shape[128] = "";
    for (int32_t d = 0; d < e->n_dims; d++) {
        const size_t at = strlen(shape);
        snprintf(shape + at, sizeof shape - at, "%s%.0f", d > 0 ? " x " : "", (double)e->ne[d]);
    }
    return vae__fail(m, ROCQ_E_SHAPE, "tensor %s is %s, expected %d x %d taps%s of %d channels",
                     e->own, shape, (int)s->k, (int)s->k, s->kt > 1 ? " in 3 frames" : "", (int)c);
}

// Channels in and out of a weight: [k, k, C, M] or [k, k, kt, C, M]; of a linear layer [C, M]; in
// block formats [C k k kt, M]; in GGUF files, which have four dimensions, [k, k, kt, C M].
static bool vae__channels(const vae__builder *b, const vae__entry *e, const vae__spec *s, int64_t m,
                          int64_t *c_in, int64_t *c_out) {
    const int64_t taps = (int64_t)s->k * s->k * s->kt, *ne = e->ne;
    int64_t c = b->c;
    if (e->n_dims == 5 && ne[0] == s->k && ne[1] == s->k && ne[2] == s->kt) {
        *c_in = ne[3];
        *c_out = ne[4];
    } else if (e->n_dims == 4 && ne[0] == s->k && ne[1] == s->k && m > 0 && ne[3] == m) {
        if (s->kt != 1) return false;
        *c_in = ne[2];
        *c_out = ne[3];
    } else if (e->n_dims == 4 && ne[0] == s->k && ne[1] == s->k && ne[2] == s->kt) {
        if (m == 0 || ne[3] % m != 0) return false;
        *c_in = ne[3] / m;
        *c_out = m;
    } else if (e->n_dims == 2 && ne[0] % taps == 0) {
        *c_in = ne[0] / taps;
        *c_out = ne[1];
    } else {
        return false;
    }
    const int64_t parts = s->n_parts > 0 ? s->n_parts : 1;
    return (c == 0 || *c_in == c) && (s->m == 0 || *c_out == s->m * parts) && *c_in > 0 &&
           *c_out > 0 && *c_in <= 1 << 16 && *c_out <= 1 << 16 && *c_out % parts == 0 &&
           (m == 0 || *c_out == m);
}

// Elements of a vector, by its bytes: sizes beside a 0 are anything, their product may overflow.
static int64_t vae__count(const vae__entry *e) { return e->size / (e->format == ROCQ_F32 ? 4 : 2); }

static rocq_result vae__vector(vae_model *m, vae__builder *b, const char *name, const char *suffix,
                               int64_t n, vae__entry **out) {
    char full[128];
    snprintf(full, sizeof full, "%s%s", name, suffix);
    vae__entry *e = vae__find(b->file, full);
    *out = e;
    if (!e) return vae__fail(m, ROCQ_E_NOT_FOUND, "tensor %s is missing", full);
    e->used = true;
    if (!e->known || (e->format != ROCQ_F32 && e->format != ROCQ_F16 && e->format != ROCQ_BF16)) {
        return vae__fail(m, ROCQ_E_FORMAT, "tensor %s has a type that cannot be used here", e->own);
    }
    if (n > 0 && vae__count(e) != n) {
        return vae__fail(m, ROCQ_E_SHAPE, "tensor %s has %.0f elements, expected %.0f", e->own,
                         (double)vae__count(e), (double)n);
    }
    if (e->size > 0) return ROCQ_OK;
    return vae__fail(m, ROCQ_E_SHAPE, "tensor %s has no elements", e->own);
}

// The format that a weight of K by M gets, and why.
static rocq_format vae__weight_format(const vae_model *m, rocq_format file, int64_t k,
                                      const char **why) {
    rocq_format format = file;
    const rocq_format_info *info = rocq_get_format_info(file);
    *why = "as in the file";
    if (m->options.weights && rocq_format_from_name(&format, m->options.weights) == ROCQ_OK) {
        info = rocq_get_format_info(format);
        if (k % info->block_elems == 0) {
            *why = "as asked for";
            return format;
        }
        *why = "as in the file: its rows are no whole number of blocks of the format asked for";
        return file;
    }
    if (m->gpu && (file == ROCQ_F32 || file == ROCQ_BF16)) {
        *why = "F16, which the GPU's matrix unit takes";
        return ROCQ_F16;
    }
    return info->block_elems > 1 && k % info->block_elems != 0 ? ROCQ_F16 : file;
}

// Adds a convolution to the network: finds its tensors and checks their shapes.
static rocq_result vae__add_conv(vae_model *m, vae__builder *b, const vae__spec *s) {
    char name[128];
    vae__entry *e, *vectors[VAE__VECTORS] = {NULL, NULL, NULL};
    int64_t c = 0, rows = 0, biases = 0;
    if (b->net->n_convs == VAE__MAX_CONVS) {
        return vae__fail(m, ROCQ_E_UNSUPPORTED, "the network has over %d convolutions",
                         (int)VAE__MAX_CONVS);
    }
    vae_conv *conv = &b->net->convs[b->net->n_convs++];
    snprintf(name, sizeof name, "%s.weight", s->name);
    e = vae__find(b->file, name);
    if (!e) return vae__fail(m, ROCQ_E_NOT_FOUND, "tensor %s is missing", name);
    e->used = true;
    if (!e->known) {
        return vae__fail(m, ROCQ_E_FORMAT, "tensor %s has a type that cannot be used here", e->own);
    }
    snprintf(name, sizeof name, "%s.bias", s->name);
    if (!s->no_bias || vae__find(b->file, name)) {
        VAE__TRY(vae__vector(m, b, s->name, ".bias", 0, &vectors[VAE__BIAS]));
        biases = vae__count(vectors[VAE__BIAS]);
    }
    if (!vae__channels(b, e, s, biases > 0 ? biases : e->n_dims == 4 ? e->ne[3] : 0, &c, &rows)) {
        return vae__wrong_shape(m, e, s, b->c);
    }
    snprintf(conv->name, sizeof conv->name, "%.88s.weight", s->name);
    conv->file_format = e->format;
    conv->c = (int32_t)c;
    conv->m = (int32_t)(s->n_parts > 0 ? rows / s->n_parts : rows);
    conv->k = s->k;
    conv->kt = s->kt;
    conv->stride = s->stride > 0 ? s->stride : 1;
    conv->upsample = s->upsample > 0 ? s->upsample : 1;
    conv->pad = s->pad;
    conv->before = s->before;
    conv->after = s->after;
    conv->part = s->part;
    conv->n_parts = s->n_parts;
    conv->follower = -1;
    conv->entry = e;
    conv->format = vae__weight_format(m, e->format, c * s->k * s->k * s->kt, &conv->why);
    if (s->norm) {
        snprintf(name, sizeof name, "%s.bias", s->norm);
        VAE__TRY(vae__vector(m, b, s->norm, ".weight", c, &vectors[VAE__NORM_WEIGHT]));
        conv->norm = vae__find(b->file, name) ? VAE__GROUP_NORM : VAE__POSITION_NORM;
        if (conv->norm == VAE__GROUP_NORM) {
            VAE__TRY(vae__vector(m, b, s->norm, ".bias", c, &vectors[VAE__NORM_BIAS]));
        }
        if (conv->norm == VAE__GROUP_NORM && c % m->options.n_groups != 0) {
            return vae__fail(m, ROCQ_E_SHAPE, "%s: %d channels in %d groups", s->norm, (int)c,
                             (int)m->options.n_groups);
        }
    }
    for (int i = 0; i < VAE__VECTORS; i++) conv->vector_entries[i] = vectors[i];
    b->c = conv->m;
    return ROCQ_OK;
}

static rocq_result vae__module_of(vae_model *m, vae__builder *b, int32_t kind, int32_t residual) {
    vae_net *net = b->net;
    if (net->n_modules == VAE__MAX_MODULES) {
        return vae__fail(m, ROCQ_E_UNSUPPORTED, "the network has over %d modules",
                         (int)VAE__MAX_MODULES);
    }
    vae_module *mod = &net->modules[net->n_modules++];
    mod->kind = kind;
    mod->residual = residual;
    mod->first = net->n_convs;
    if (kind == VAE__TIME) net->n_times++;
    return ROCQ_OK;
}

// Ends the module: the convolutions since its begin are its own, a shortcut being the last.
static void vae__module_end(vae__builder *b) {
    vae_module *mod = &b->net->modules[b->net->n_modules - 1];
    mod->n = b->net->n_convs - mod->first - (mod->residual == VAE__OF_SHORTCUT);
}

static rocq_result vae__single(vae_model *m, vae__builder *b, const vae__spec *s) {
    VAE__TRY(vae__module_of(m, b, VAE__CONVS, VAE__NO_RESIDUAL));
    VAE__TRY(vae__add_conv(m, b, s));
    vae__module_end(b);
    return ROCQ_OK;
}

// A block of ResNet: norm, SiLU, conv, norm, SiLU, conv, and the input, or 1 x 1 of it.
static rocq_result vae__resnet(vae_model *m, vae__builder *b, const char *name) {
    char names[5][96], weight[128];
    static const char *const parts[5] = {"norm1", "conv1", "norm2", "conv2", "nin_shortcut"};
    const int32_t c = b->c, kt = m->video ? 3 : 1;
    for (int i = 0; i < 5; i++) snprintf(names[i], sizeof names[i], "%.70s.%s", name, parts[i]);
    snprintf(weight, sizeof weight, "%s.weight", names[4]);
    const bool shortcut = vae__find(b->file, weight) != NULL;
    const vae__spec conv1 = {.name = names[1], .norm = names[0], .k = 3, .kt = kt, .pad = 1,
                             .before = ROCQ_ACT_SILU};
    VAE__TRY(vae__module_of(m, b, VAE__CONVS, shortcut ? VAE__OF_SHORTCUT : VAE__OF_INPUT));
    VAE__TRY(vae__add_conv(m, b, &conv1));
    const vae__spec conv2 = {.name = names[3], .norm = names[2], .k = 3, .kt = kt,
                             .m = shortcut ? 0 : c, .pad = 1, .before = ROCQ_ACT_SILU};
    VAE__TRY(vae__add_conv(m, b, &conv2));
    if (shortcut) {
        const vae__spec last = {.name = names[4], .k = 1, .kt = 1, .m = b->c};
        b->c = c;
        VAE__TRY(vae__add_conv(m, b, &last));
    }
    vae__module_end(b);
    return ROCQ_OK;
}

// Attention of one head over all positions. Wan has q, k and v in one weight.
static rocq_result vae__attention_of(vae_model *m, vae__builder *b, const char *name) {
    static const char *const letters[3] = {"q", "k", "v"};
    char norm[96], part[96];
    const int32_t c = b->c;
    VAE__TRY(vae__module_of(m, b, VAE__ATTENTION, VAE__OF_INPUT));
    snprintf(norm, sizeof norm, "%.80s.norm", name);
    for (int i = 0; i < 3; i++) {
        snprintf(part, sizeof part, "%.80s.%s", name, m->video ? "qkv" : letters[i]);
        const vae__spec s = {.name = part, .norm = norm, .k = 1, .kt = 1, .m = c, .part = i,
                             .n_parts = m->video ? 3 : 0};
        b->c = c;
        VAE__TRY(vae__add_conv(m, b, &s));
        b->net->convs[b->net->n_convs - 1].same_input = i > 0;
    }
    snprintf(part, sizeof part, "%.80s.proj_out", name);
    const vae__spec s = {.name = part, .k = 1, .kt = 1, .m = c};
    b->c = c;
    VAE__TRY(vae__add_conv(m, b, &s));
    vae__module_end(b);
    return ROCQ_OK;
}

static rocq_result vae__middle(vae_model *m, vae__builder *b, const char *half) {
    char name[64];
    snprintf(name, sizeof name, "%s.mid.block_1", half);
    VAE__TRY(vae__resnet(m, b, name));
    snprintf(name, sizeof name, "%s.mid.attn_1", half);
    VAE__TRY(vae__attention_of(m, b, name));
    snprintf(name, sizeof name, "%s.mid.block_2", half);
    return vae__resnet(m, b, name);
}

// Whether the file has the tensor of that name.
static bool vae__has(const vae__builder *b, const char *format, int level, int block) {
    char name[96];
    if (block < 0) snprintf(name, sizeof name, format, level);
    else snprintf(name, sizeof name, format, level, block);
    return vae__find(b->file, name) != NULL;
}

static rocq_result vae__kl_decoder(vae_model *m, vae__builder *b) {
    const int32_t kt = m->video ? 3 : 1;
    const vae__spec quant = {.name = "post_quant_conv", .k = 1, .kt = 1};
    const vae__spec in = {.name = "decoder.conv_in", .k = 3, .kt = kt, .pad = 1};
    const vae__spec out = {.name = "decoder.conv_out", .norm = "decoder.norm_out", .k = 3, .kt = kt,
                           .m = 3, .pad = 1, .before = ROCQ_ACT_SILU};
    char name[64];
    int level = 0;
    if (vae__find(b->file, "post_quant_conv.weight")) VAE__TRY(vae__single(m, b, &quant));
    VAE__TRY(vae__single(m, b, &in));
    VAE__TRY(vae__middle(m, b, "decoder"));
    while (vae__has(b, "decoder.up.%d.block.0.conv1.weight", level + 1, -1)) level++;
    for (; level >= 0; level--) {
        for (int i = 0; i == 0 || vae__has(b, "decoder.up.%d.block.%d.conv1.weight", level, i);
             i++) {
            snprintf(name, sizeof name, "decoder.up.%d.block.%d", level, i);
            VAE__TRY(vae__resnet(m, b, name));
        }
        if (m->video && vae__has(b, "decoder.up.%d.upsample.time_conv.weight", level, -1)) {
            VAE__TRY(vae__module_of(m, b, VAE__TIME, VAE__NO_RESIDUAL));
            const int32_t c = b->c;
            for (int i = 0; i < 2; i++) { // the earlier of two frames, and the later
                snprintf(name, sizeof name, "decoder.up.%d.upsample.time_conv", level);
                const vae__spec time = {
                    .name = name, .k = 1, .kt = 3, .m = c, .part = i, .n_parts = 2};
                b->c = c;
                VAE__TRY(vae__add_conv(m, b, &time));
                b->net->convs[b->net->n_convs - 1].same_input = i > 0;
            }
            vae__module_end(b);
        }
        if (vae__has(b, "decoder.up.%d.upsample.conv.weight", level, -1)) {
            snprintf(name, sizeof name, "decoder.up.%d.upsample.conv", level);
            const vae__spec up = {.name = name, .k = 3, .kt = 1, .upsample = 2, .pad = 1};
            VAE__TRY(vae__single(m, b, &up));
        }
    }
    return vae__single(m, b, &out);
}

static rocq_result vae__kl_encoder(vae_model *m, vae__builder *b) {
    const vae__spec in = {.name = "encoder.conv_in", .k = 3, .kt = 1, .pad = 1};
    const vae__spec out = {.name = "encoder.conv_out", .norm = "encoder.norm_out", .k = 3, .kt = 1,
                           .m = 2 * m->z, .pad = 1, .before = ROCQ_ACT_SILU};
    const vae__spec quant = {.name = "quant_conv", .k = 1, .kt = 1, .m = 2 * m->z};
    char name[64];
    VAE__TRY(vae__single(m, b, &in));
    for (int level = 0;
         level == 0 || vae__has(b, "encoder.down.%d.block.0.conv1.weight", level, -1); level++) {
        for (int i = 0; i == 0 || vae__has(b, "encoder.down.%d.block.%d.conv1.weight", level, i);
             i++) {
            snprintf(name, sizeof name, "encoder.down.%d.block.%d", level, i);
            VAE__TRY(vae__resnet(m, b, name));
        }
        if (vae__has(b, "encoder.down.%d.downsample.conv.weight", level, -1)) {
            snprintf(name, sizeof name, "encoder.down.%d.downsample.conv", level);
            const vae__spec down = {.name = name, .k = 3, .kt = 1, .stride = 2};
            VAE__TRY(vae__single(m, b, &down));
        }
    }
    VAE__TRY(vae__middle(m, b, "encoder"));
    VAE__TRY(vae__single(m, b, &out));
    return vae__find(b->file, "quant_conv.weight") ? vae__single(m, b, &quant) : ROCQ_OK;
}

// TAESD: numbered layers, each a convolution or a block of three; one without bias resamples.
static rocq_result vae__taesd(vae_model *m, vae__builder *b, const char *half, bool decoder) {
    char name[128], names[4][96];
    int32_t last = -1;
    const char *rest;
    snprintf(name, sizeof name, "%s.layers.", half);
    for (int64_t i = 0; i < b->file->n; i++) {
        const int32_t layer = vae__number(b->file->entries[i].name, name, &rest);
        if (layer > last) last = layer;
    }
    for (int32_t i = 0; i <= last; i++) {
        snprintf(names[0], sizeof names[0], "%s.layers.%d", half, (int)i);
        snprintf(name, sizeof name, "%s.weight", names[0]);
        if (vae__find(b->file, name)) {
            snprintf(name, sizeof name, "%s.bias", names[0]);
            const bool resamples = !vae__find(b->file, name);
            const vae__spec conv = {.name = names[0], .k = 3, .kt = 1,
                                    .m = i < last ? 0 : decoder ? 3 : m->z,
                                    .stride = resamples && !decoder ? 2 : 1,
                                    .upsample = resamples && decoder ? 2 : 1, .pad = 1,
                                    .after = decoder && i == 0 ? ROCQ_ACT_RELU : ROCQ_ACT_IDENTITY,
                                    .no_bias = resamples};
            VAE__TRY(vae__single(m, b, &conv));
            continue;
        }
        snprintf(name, sizeof name, "%s.conv.0.weight", names[0]);
        if (!vae__find(b->file, name)) continue; // ReLU and resizing have no weights
        snprintf(names[3], sizeof names[3], "%.80s.skip", names[0]);
        snprintf(name, sizeof name, "%.80s.weight", names[3]);
        const bool shortcut = vae__find(b->file, name) != NULL;
        const int32_t c = b->c;
        VAE__TRY(vae__module_of(m, b, VAE__CONVS, shortcut ? VAE__OF_SHORTCUT : VAE__OF_INPUT));
        for (int j = 0; j < 3; j++) {
            snprintf(name, sizeof name, "%.80s.conv.%d", names[0], 2 * j);
            const vae__spec conv = {.name = name, .k = 3, .kt = 1,
                                    .m = j == 2 && !shortcut ? c : 0, .pad = 1,
                                    .after = ROCQ_ACT_RELU};
            VAE__TRY(vae__add_conv(m, b, &conv));
        }
        if (shortcut) {
            const vae__spec skip = {.name = names[3], .k = 1, .kt = 1, .m = b->c, .no_bias = true};
            b->c = c;
            VAE__TRY(vae__add_conv(m, b, &skip));
        }
        vae__module_end(b);
    }
    if (b->net->n_modules > 0) return ROCQ_OK;
    return vae__fail(m, ROCQ_E_NOT_FOUND, "tensor %s.layers.0.weight is missing", half);
}

static const struct vae__family {
    const char *name;
    float scale, shift;
    bool wide; // its residual stream exceeds F16
} vae__families[] = {
    {"sd1", 0.18215f, 0, false}, {"sdxl", 0.13025f, 0, true}, {"sd3", 1.5305f, 0.0609f, false},
    {"flux", 0.3611f, 0.1159f, false}, {"taesd", 1, 0, false}, {"wan2.1", 1, 0, false}};

// Of Wan's latents, by channel.
static const float vae__wan_mean[16] = {-0.7571f, -0.7089f, -0.9113f, 0.1075f, -0.1745f, 0.9653f,
                                        -0.1517f, 1.5508f,  0.4134f,  -0.0715f, 0.5517f, -0.3632f,
                                        -0.1922f, -0.9497f, 0.2503f,  -0.2921f};
static const float vae__wan_std[16] = {2.8184f, 1.4541f, 2.3275f, 2.6558f, 1.2196f, 1.7708f,
                                       2.6052f, 2.0743f, 3.2687f, 2.1526f, 2.8652f, 1.5579f,
                                       1.6382f, 1.1253f, 2.8251f, 1.9160f};

static bool vae__is_taesd(const vae__file *f) {
    for (int64_t i = 0; i < f->n; i++) {
        if (vae__starts(f->entries[i].name, "decoder.layers.") ||
            vae__starts(f->entries[i].name, "encoder.layers.")) return true;
    }
    return false;
}

// What is left open by the weights: the names of SD1.5's and SDXL's are the same, and so are those
// of SD3 and Flux.
static rocq_result vae__choose_family(vae_model *m, const vae__file *f, bool taesd) {
    const char *guess = taesd ? "taesd" : m->video ? "wan2.1" : m->z == 4 ? "sd1" : "flux";
    m->why_family = taesd || m->video ? "by the names of its tensors"
                                      : "guessed by the channels of its latents";
    if (!taesd && !m->video && (m->z == 4 ? f->sdxl : f->sd3 || f->flux)) {
        guess = m->z == 4 ? "sdxl" : f->sd3 ? "sd3" : "flux";
        m->why_family = "by what else is in the file";
    }
    if (m->options.family) m->why_family = "as asked for";
    for (size_t i = 0; i < sizeof vae__families / sizeof vae__families[0]; i++) {
        const struct vae__family *family = &vae__families[i];
        if (strcmp(m->options.family ? m->options.family : guess, family->name) != 0) continue;
        m->family = family->name;
        m->latent_scale = m->options.scale > 0 ? m->options.scale : family->scale;
        m->latent_shift = m->options.scale > 0 ? m->options.shift : family->shift;
        m->wide = family->wide;
    }
    const bool fits = m->family && taesd == (strcmp(m->family, "taesd") == 0) &&
                      m->video == (strcmp(m->family, "wan2.1") == 0);
    if (!fits) {
        return vae__fail(m, ROCQ_E_ARGUMENT, "family \"%.60s\" %s", m->options.family,
                         m->family ? "does not have these weights"
                                   : "is not one of sd1, sdxl, sd3, flux, taesd, wan2.1");
    }
    for (int32_t i = 0; i < m->z; i++) {
        const bool wan = m->video && m->z == 16 && !(m->options.scale > 0);
        m->z_mean[i] = wan ? vae__wan_mean[i] : m->latent_shift;
        m->z_std[i] = wan ? vae__wan_std[i] : 1 / m->latent_scale;
    }
    m->tanh_latents = taesd;
    m->pixel_scale = taesd ? 1.0f : 0.5f;
    m->pixel_bias = taesd ? 0.0f : 0.5f;
    return ROCQ_OK;
}

static rocq_result vae__build(vae_model *m, vae__file *f, bool taesd) {
    vae_net *nets[2] = {&m->decoder, &m->encoder};
    for (int i = 0; i < (m->options.encoder ? 2 : 1); i++) {
        vae__builder b = {f, nets[i], 0};
        if (taesd) VAE__TRY(vae__taesd(m, &b, i == 0 ? "decoder" : "encoder", i == 0));
        else VAE__TRY(i == 0 ? vae__kl_decoder(m, &b) : vae__kl_encoder(m, &b));
        const vae_module *last = &b.net->modules[b.net->n_modules - 1];
        b.net->c_in = b.net->convs[0].c;
        b.net->c_out = b.net->convs[last->first + last->n - 1].m;
        if (i == 0) m->z = b.net->c_in;
    }
    return ROCQ_OK;
}

// A tensor that the networks do not know would be left out in silence, and the picture be wrong.
static rocq_result vae__all_used(vae_model *m, const vae__file *f) {
    for (int64_t i = 0; i < f->n; i++) {
        const vae__entry *e = &f->entries[i];
        const bool encoder =
            vae__starts(e->name, "encoder.") || vae__starts(e->name, "quant_conv.");
        if (e->used || (encoder && !m->options.encoder)) continue;
        return vae__fail(m, ROCQ_E_UNSUPPORTED, "tensor %s is unknown", e->own);
    }
    return ROCQ_OK;
}

// In F16, what the blocks of a decoder add up, if it is too large for that, is kept as a 64th.
// Whatever adds to it gets smaller weights, and whatever reads it norms it first, or adds to it in
// turn, so that only its bias is to be smaller. Scales of block formats cannot: the sum is kept in
// BF16 then.
static void vae__set_gains(vae_model *m) {
    vae_net *net = &m->decoder;
    bool blocks = false;
    m->gain = 1;
    for (int32_t i = 0; i < net->n_convs; i++) {
        net->convs[i].gain = net->convs[i].bias_gain = net->convs[i].eps_gain = 1;
        blocks |= rocq_get_format_info(net->convs[i].file_format)->block_elems > 1;
    }
    for (int32_t i = 0; m->options.encoder && i < m->encoder.n_convs; i++) {
        vae_conv *c = &m->encoder.convs[i];
        c->gain = c->bias_gain = c->eps_gain = 1;
    }
    if (m->stream != ROCQ_F16 || !m->wide) return;
    if (blocks || m->options.weights) {
        m->stream = ROCQ_BF16;
        m->why_stream = "the family's values exceed F16";
        return;
    }
    m->why_stream = "a 64th of the values: the family's exceed F16";
    m->gain = 1.0f / 64;
    for (int32_t i = 0; i < net->n_modules; i++) {
        const vae_module *mod = &net->modules[i];
        net->convs[mod->first].eps_gain = m->gain;
        if (i == net->n_modules - 1) break;
        vae_conv *last = &net->convs[mod->first + mod->n - 1];
        last->gain = i == 0 || mod->residual != VAE__NO_RESIDUAL ? m->gain : 1;
        last->bias_gain = m->gain;
        if (mod->residual == VAE__OF_SHORTCUT) last[1].bias_gain = m->gain;
    }
}

// ---------------------------------------------------------------------------------------------
// Weights: where they are, and how they get there
// ---------------------------------------------------------------------------------------------

// An address where nothing is, for tensors of which only the sizes matter.
static rocq_buffer vae__nowhere(const vae_model *m, int shift) {
    const uint64_t at = (uint64_t)1 << (sizeof(void *) * 8 - (size_t)shift);
    const int64_t size = (int64_t)1 << (sizeof(void *) * 8 - 4);
    return m->gpu ? rocq_buffer_from_device(at, size)
                  : rocq_buffer_from_host((void *)(uintptr_t)at, size);
}

// Values of a vector in F32, or those of the convolution's part of it.
static rocq_result vae__fill_vector(vae_model *m, const vae_conv *conv, int which) {
    const vae__entry *e = conv->vector_entries[which];
    const rocq_tensor *t = &conv->vectors[which];
    if (!e) return ROCQ_OK;
    const int64_t count = vae__count(e), n = t->ne[0];
    const size_t size = (size_t)(e->size + 4 * count);
    unsigned char *raw;
    VAE__TRY(vae__allocate(m, &raw, size));
    float *values = (float *)(void *)raw; // first, for its alignment
    rocq_result result = vae__read(m, &m->file, e, raw + 4 * count);
    if (result == ROCQ_OK) result = rocq_dequantize(e->format, values, raw + 4 * count, count);
    for (int64_t i = 0; i < count && which == VAE__BIAS; i++) values[i] *= conv->bias_gain;
    if (result == ROCQ_OK) {
        const int64_t first = which == VAE__BIAS && conv->n_parts > 0 ? conv->part * n : 0;
        result = rocq_upload(m->ctx, t, values + first, 4 * n);
    }
    vae__free(m, raw, size);
    return result;
}

// The weight itself, from the file's order to that of rocq_conv.
static rocq_result vae__fill_weight(vae_model *m, const vae_conv *conv) {
    const vae__entry *e = conv->entry;
    const bool block = rocq_get_format_info(e->format)->block_elems > 1;
    unsigned char *raw;
    float *values = NULL;
    const int64_t n = rocq_tensor_count(&conv->w);
    const int64_t part = e->size / (conv->n_parts > 0 ? conv->n_parts : 1);
    const bool in_order = e->n_dims == 2; // rows of matrices have their channels innermost already
    VAE__TRY(vae__allocate(m, &raw, (size_t)e->size));
    const unsigned char *src = raw + (conv->n_parts > 0 ? conv->part * part : 0);
    rocq_result result = vae__read(m, &m->file, e, raw);
    rocq_conv_weights_params fill = {.w = &conv->w, .src = src, .src_format = e->format,
                                     .src_size = part, .kw = in_order ? 1 : conv->k,
                                     .kh = in_order ? 1 : conv->k, .kt = in_order ? 1 : conv->kt};
    if (result == ROCQ_OK && (conv->gain != 1 || (block && conv->format != e->format))) {
        result = vae__allocate(m, &values, (size_t)n * sizeof *values);
        if (result == ROCQ_OK) result = rocq_dequantize(e->format, values, src, n);
        for (int64_t i = 0; i < n && result == ROCQ_OK; i++) values[i] *= conv->gain;
        fill.src = values;
        fill.src_format = ROCQ_F32;
        fill.src_size = n * (int64_t)sizeof *values;
    }
    if (result == ROCQ_OK) {
        result = block && conv->format == e->format ? rocq_upload(m->ctx, &conv->w, src, part)
                                                    : rocq_conv_weights(m->ctx, &fill);
    }
    vae__free(m, values, (size_t)n * sizeof *values);
    vae__free(m, raw, (size_t)e->size);
    return result;
}

// Marks the n largest weights of a network as streamed; of NULL, none of both.
static void vae__mark_streamed(vae_model *m, const vae_net *net, int32_t n) {
    vae_net *nets[2] = {&m->decoder, &m->encoder};
    for (int i = 0; i < 2; i++) {
        for (int32_t j = 0; j < nets[i]->n_convs; j++) {
            nets[i]->convs[j].streamed = net && nets[i] != net;
        }
    }
    for (; net && n > 0; n--) {
        vae_conv *largest = NULL;
        for (int32_t j = 0; j < net->n_convs; j++) {
            vae_conv *c = &net->convs[j];
            if (c->streamed) continue;
            if (!largest || rocq_tensor_size(&c->w) > rocq_tensor_size(&largest->w)) largest = c;
        }
        largest->streamed = true;
    }
}

// Gives the tensors of both networks their places in a buffer, or, with NULL, finds out how large
// it is to be: vectors of all, and weights of `net` but for the n_streamed largest, which share a
// place; where net is NULL, of both networks all.
static rocq_result vae__place(vae_model *m, const vae_net *net, int32_t n_streamed,
                              const rocq_buffer *buffer, int64_t *size) {
    vae_net *nets[2] = {&m->decoder, &m->encoder};
    rocq_arena arena;
    rocq_tensor ignored;
    int64_t place = 0;
    rocq_arena_init(&arena, buffer);
    vae__mark_streamed(m, net, n_streamed);
    for (int pass = 0; pass < 2; pass++) { // what has a place of its own, then what shares one
        for (int32_t i = 0; i < nets[0]->n_convs + nets[1]->n_convs; i++) {
            const vae_net *of = i < nets[0]->n_convs ? nets[0] : nets[1];
            vae_conv *c = &of->convs[i < nets[0]->n_convs ? i : i - nets[0]->n_convs];
            for (int v = 0; v < VAE__VECTORS && pass == 0; v++) {
                if (!c->vector_entries[v]) continue;
                VAE__TRY(rocq_tensor_1d(&arena, buffer ? &c->vectors[v] : &ignored, ROCQ_F32,
                                        v == VAE__BIAS ? c->m : c->c));
            }
            if (pass == 0 ? c->streamed : !c->streamed || of != net) continue;
            const int64_t k = (int64_t)c->c * c->k * c->k * c->kt;
            rocq_tensor *w = buffer ? &c->w : &ignored;
            VAE__TRY(rocq_tensor_2d(&arena, w, c->format, k, c->m));
            if (m->gpu && rocq_get_format_info(c->format)->block_elems > 1) {
                w->layout = ROCQ_LAYOUT_PLANAR;
            }
            if (pass == 1) rocq_arena_reset(&arena, place);
        }
        if (pass == 0) place = rocq_arena_mark(&arena);
    }
    *size = arena.peak;
    return ROCQ_OK;
}

// Takes memory for weights and loads those that stay there, unless they are there already.
static rocq_result vae__lay(vae_model *m, const vae_net *net, int32_t n_streamed) {
    vae_net *nets[2] = {&m->decoder, &m->encoder};
    int64_t size, done = 0;
    vae__mark_streamed(m, net, n_streamed); // which plans have changed
    if (net == m->laid_net && n_streamed == m->laid_streamed) return ROCQ_OK;
    m->laid_streamed = -1;
    m->in_place = -1;
    VAE__TRY(rocq_buffer_free(m->ctx, &m->weights));
    VAE__TRY(vae__place(m, net, n_streamed, NULL, &size));
    VAE__TRY(rocq_buffer_alloc(m->ctx, &m->weights, size));
    VAE__TRY(vae__place(m, net, n_streamed, &m->weights, &size));
    for (int i = 0; i < 2; i++) {
        for (int32_t j = 0; j < nets[i]->n_convs; j++) {
            vae_conv *c = &nets[i]->convs[j];
            for (int v = 0; v < VAE__VECTORS; v++) VAE__TRY(vae__fill_vector(m, c, v));
            if (c->streamed) continue;
            VAE__TRY(vae__fill_weight(m, c));
            done += rocq_tensor_size(&c->w);
            VAE__TRY(vae__progress(m, "loading", done, size));
        }
    }
    m->laid_net = net;
    m->laid_streamed = n_streamed;
    return ROCQ_OK;
}

// Reads the weights of convolution i of the network to the place that streamed ones share. The
// queue is in order, so they may be uploaded behind an op that still reads others there: the upload
// ring is what they wait in. So on a GPU those of the next convolution are read and reordered while
// this one is computed.
static rocq_result vae__bring(vae_model *m, int32_t i) {
    if (i < 0 || !m->net->convs[i].streamed || m->in_place == i) return ROCQ_OK;
    m->in_place = -1;
    VAE__TRY(vae__fill_weight(m, &m->net->convs[i]));
    m->in_place = i;
    return ROCQ_OK;
}

// ---------------------------------------------------------------------------------------------
// Opening a file
// ---------------------------------------------------------------------------------------------

static rocq_result vae__load(vae_model *m, vae__file *f) {
    VAE__TRY(vae__read_names(m, f));
    const bool taesd = vae__is_taesd(f);
    m->video = !taesd && !vae__find(f, "decoder.norm_out.bias") &&
               vae__find(f, "decoder.norm_out.weight");
    if (m->video && m->options.encoder) {
        return vae__fail(m, ROCQ_E_UNSUPPORTED, "the encoder of Wan is not supported");
    }
    const size_t size = VAE__MAX_CONVS * sizeof(vae_conv);
    VAE__TRY(vae__allocate(m, &m->decoder.convs, size));
    VAE__TRY(vae__allocate(m, &m->encoder.convs, size));
    VAE__TRY(vae__build(m, f, taesd));
    if (m->z > 64 || m->decoder.c_out != 3) {
        return vae__fail(m, ROCQ_E_UNSUPPORTED, "latents of %d channels, pictures of %d", (int)m->z,
                         (int)m->decoder.c_out);
    }
    const int32_t c_out = (taesd ? 1 : 2) * m->z; // of the encoder: with their logarithmic variance
    if (m->options.encoder && (m->encoder.c_in != 3 || m->encoder.c_out != c_out)) {
        return vae__fail(m, ROCQ_E_UNSUPPORTED, "an encoder of %d channels to %d, expected 3 to %d",
                         (int)m->encoder.c_in, (int)m->encoder.c_out, (int)c_out);
    }
    VAE__TRY(vae__all_used(m, f));
    VAE__TRY(vae__choose_family(m, f, taesd));
    vae__set_gains(m);
    int32_t shrink = 1;
    m->scale = 1;
    for (int32_t i = 0; i < m->decoder.n_convs && m->scale <= 64; i++) {
        m->scale *= m->decoder.convs[i].upsample;
    }
    for (int32_t i = 0; i < m->encoder.n_convs && shrink <= 64; i++) {
        shrink *= m->encoder.convs[i].stride;
    }
    if (m->scale > 64 || (m->options.encoder && shrink != m->scale) || m->decoder.n_times > 4) {
        return vae__fail(m, ROCQ_E_UNSUPPORTED, "a decoder that enlarges %d times, an encoder that "
                         "shrinks %d times", (int)m->scale, (int)shrink);
    }
    m->time_scale = 1 << m->decoder.n_times;
    const rocq_buffer nowhere = vae__nowhere(m, 3);
    m->laid_streamed = m->in_place = -1;
    VAE__TRY(vae__place(m, NULL, 0, &nowhere, &m->weight_bytes)); // for plans
    VAE__TRY(vae__place(m, NULL, 0, NULL, &m->weight_bytes));
    if (!m->options.stream) {
        VAE__TRY(vae__lay(m, NULL, 0));
        return rocq_sync(m->ctx);
    }
    // The first copy of a GPU context takes pinned memory: now, so that plans count it.
    const float zero = 0;
    rocq_tensor t;
    const int64_t one = 1;
    VAE__TRY(rocq_buffer_alloc(m->ctx, &m->weights, sizeof zero));
    VAE__TRY(rocq_tensor_init(&t, &m->weights, 0, ROCQ_F32, 1, &one));
    return rocq_upload(m->ctx, &t, &zero, sizeof zero);
}

// ---------------------------------------------------------------------------------------------
// Memory of a request, and running ops
// ---------------------------------------------------------------------------------------------

// Runs an op, or plans it: see vae__measure_plan. Where a request's ops are recorded already, does
// nothing: vae__flush launches them.
#define VAE__RUN(m, op, params)                                                                  \
    do {                                                                                         \
        if (!(m)->planning) VAE__TRY(vae__before_op(m));                                         \
        if ((m)->planning || (m)->mode != VAE__REPLAY) VAE__TRY(rocq_##op((m)->ctx, params));    \
    } while (0)

// A request that comes again has the same ops between two copies from or to the host. So the first
// time they are recorded, a graph from one copy to the next, and later the graphs are launched in
// the order in which the same code comes to those copies. What streams weights copies all the time,
// and is not recorded.
static rocq_result vae__before_op(vae_model *m) {
    if (m->mode != VAE__RUN_NOW && !m->pending && m->mode == VAE__RECORD) {
        m->live_bytes = vae__stats(m).live_bytes;
        VAE__TRY(rocq_graph_begin(m->ctx));
    }
    m->pending = true;
    return ROCQ_OK;
}

// Before a copy, at the latest: launches what has been recorded since the last one.
static rocq_result vae__flush(vae_model *m) {
    rocq_graph *graph = NULL;
    const bool pending = m->pending && !m->planning;
    m->pending = false;
    if (!pending || m->mode == VAE__RUN_NOW) return ROCQ_OK;
    if (m->mode == VAE__REPLAY) return rocq_graph_launch(m->ctx, m->graphs[m->graph_at++]);
    VAE__TRY(rocq_graph_end(m->ctx, &graph));
    if (m->n_graphs == m->graphs_capacity) {
        rocq_graph **larger = NULL;
        const int64_t capacity = 2 * m->graphs_capacity + 16;
        const rocq_result result = vae__allocate(m, &larger, (size_t)capacity * sizeof *larger);
        if (result != ROCQ_OK) {
            rocq_graph_destroy(m->ctx, &graph);
            return result;
        }
        if (m->n_graphs > 0) memcpy(larger, m->graphs, (size_t)m->n_graphs * sizeof *larger);
        vae__free(m, m->graphs, (size_t)m->graphs_capacity * sizeof *m->graphs);
        m->graphs = larger;
        m->graphs_capacity = capacity;
    }
    m->graphs[m->n_graphs++] = graph;
    VAE__TRY(rocq_graph_launch(m->ctx, graph));
    m->graph_bytes += vae__stats(m).live_bytes - m->live_bytes;
    return ROCQ_OK;
}

static void vae__drop_graphs(vae_model *m) {
    if (m->pending && m->mode == VAE__RECORD) { // what failed was being recorded
        rocq_graph *graph = NULL;
        rocq_graph_end(m->ctx, &graph);
        rocq_graph_destroy(m->ctx, &graph);
    }
    for (int64_t i = 0; i < m->n_graphs; i++) rocq_graph_destroy(m->ctx, &m->graphs[i]);
    vae__free(m, m->graphs, (size_t)m->graphs_capacity * sizeof *m->graphs);
    m->graphs = NULL;
    m->n_graphs = m->graphs_capacity = m->graph_bytes = 0;
    m->pending = m->recorded = false;
    m->mode = VAE__RUN_NOW;
}

// While planning, addresses where nothing is: ops are only checked.
static void vae__stack_init(vae_model *m, const rocq_buffer *buffer) {
    memset(&m->stack, 0, sizeof m->stack);
    m->stack.buffer = buffer ? *buffer : vae__nowhere(m, 2);
}

// A tensor [c, w, h, n] from one side of the stack.
static rocq_result vae__take(vae_model *m, int32_t side, rocq_format format, int64_t c, int64_t w,
                             int64_t h, int64_t n, rocq_tensor *t) {
    const int64_t ne[4] = {c, w, h, n};
    const double count = (double)c * (double)w * (double)h * (double)n;
    int64_t bytes = 0;
    vae__stack *s = &m->stack;
    if (count <= (double)s->buffer.size) VAE__TRY(rocq_row_size(format, c * w * h * n, &bytes));
    bytes = (bytes + 255) / 256 * 256;
    if (bytes == 0 || s->level[0] + s->level[1] + bytes > s->buffer.size) {
        return vae__fail(m, ROCQ_E_OVERFLOW, "%d x %d takes more memory than there are addresses",
                         (int)m->job->width, (int)m->job->height);
    }
    const int64_t at = side == 0 ? s->level[0] : s->buffer.size - s->level[1] - bytes;
    s->level[side] += bytes;
    if (s->level[0] + s->level[1] > s->peak) s->peak = s->level[0] + s->level[1];
    return rocq_tensor_init(t, &s->buffer, at, format, 4, ne);
}

// The part of a value at span, with frames first to first + n - 1 of all that it has room for.
static rocq_tensor vae__part(const vae__value *x, const vae__span *o, int64_t first, int64_t n) {
    rocq_tensor view;
    const int64_t start[4] = {0, o->at[0] - x->span.at[0], o->at[1] - x->span.at[1], first};
    const int64_t ne[4] = {x->full.ne[0], o->n[0], o->n[1], n};
    if (rocq_tensor_view(&view, &x->full, start, ne) != ROCQ_OK) memset(&view, 0, sizeof view);
    return view; // all zero, which every op refuses, if it is not there
}

static rocq_tensor vae__frames_of(const vae__value *x, const vae__span *o) { // those of this chunk
    return vae__part(x, o, x->room, x->full.ne[3] - x->room);
}

static vae__span vae__whole(const int64_t size[2]) {
    const vae__span o = {{0, 0}, {size[0], size[1]}};
    return o;
}

// Room for a value of c channels on a side of the stack, with a place for the frames before it.
static rocq_result vae__new(vae_model *m, int32_t side, rocq_format format, int64_t c,
                            const int64_t size[2], const vae__span *o, int64_t n, vae__value *v) {
    v->room = m->caches ? 2 : 0;
    v->span = *o;
    v->size[0] = size[0];
    v->size[1] = size[1];
    v->side = side;
    v->mark = m->stack.level[side];
    v->owned = true;
    VAE__TRY(vae__take(m, side, format, c, o->n[0], o->n[1], v->room + n, &v->full));
    v->end = m->stack.level[side];
    return ROCQ_OK;
}

// ---------------------------------------------------------------------------------------------
// Convolutions over a part of a picture
// ---------------------------------------------------------------------------------------------

// The positions of its input, of that size, that a convolution reads for positions o of its output.
static vae__span vae__needs(const vae_conv *c, const int64_t size[2], const vae__span *o) {
    vae__span need;
    for (int d = 0; d < 2; d++) {
        int64_t first = c->stride * o->at[d] - c->pad;
        int64_t end = c->stride * (o->at[d] + o->n[d] - 1) - c->pad + c->k;
        if (first < 0) first = 0;
        if (end > size[d] * c->upsample) end = size[d] * c->upsample;
        need.at[d] = first / c->upsample;
        need.n[d] = (end + c->upsample - 1) / c->upsample - need.at[d];
    }
    return need;
}

// With positions doubled, what is read must begin at a whole one: a position more, if it does not.
static void vae__align(const vae_conv *c, vae__span *o) {
    for (int d = 0; d < 2 && c->upsample == 2; d++) {
        if (o->at[d] % 2 != 0 || o->at[d] == 0) continue;
        o->at[d]--;
        o->n[d]++;
    }
}

static void vae__out_size(const vae_conv *c, const int64_t size[2], int64_t out[2]) {
    for (int d = 0; d < 2; d++) out[d] = size[d] * c->upsample / c->stride;
}

// Mean and variance by group. Of a tile they are merged into those of the tiles before.
static rocq_result vae__group_stats(vae_model *m, vae_conv *c, const rocq_tensor *x, bool tiles,
                                    bool first) {
    const rocq_norm_stats_params stats = {.stats = &c->stats, .moments = tiles ? &c->moments : NULL,
                                          .x = x, .first = first,
                                          .eps = 1e-6f * c->eps_gain * c->eps_gain};
    VAE__RUN(m, norm_stats, &stats);
    return ROCQ_OK;
}

// y, positions o of the output, from x, which has all that this takes.
static rocq_result vae__conv(vae_model *m, vae_conv *c, const vae__value *x, const vae__span *o,
                             const rocq_tensor *y, const rocq_tensor *residual) {
    const vae__span need = vae__needs(c, x->size, o);
    const bool cached = m->caches && c->kt > 1;
    const bool again = cached && c->same_input;
    const bool there = again || !x->owned; // the frames before are in their place already
    const int64_t past = again ? c[-1].n_past : cached ? c->n_cached : 0;
    const int64_t n = x->full.ne[3] - x->room;
    const rocq_tensor in = vae__part(x, &need, x->room - past, past + n);
    const int32_t index = (int32_t)(c - m->net->convs);
    const rocq_tensor *vectors[VAE__VECTORS];
    rocq_tensor stats;
    const int64_t level = m->stack.level[0];
    int32_t pad[2];
    for (int v = 0; v < VAE__VECTORS; v++) {
        vectors[v] = c->vectors[v].n_dims > 0 ? &c->vectors[v] : NULL;
    }
    for (int d = 0; d < 2; d++) {
        pad[d] = (int32_t)(c->upsample * need.at[d] - (c->stride * o->at[d] - c->pad));
        if (pad[d] == 0) pad[d] = -1; // none; 0 would be the default
    }
    c->n_past = past;
    if (past > 0 && !there) {
        const rocq_tensor from = rocq_tensor_slice(&c->cache, 3, 0, past);
        const rocq_tensor to = rocq_tensor_slice(&in, 3, 0, past);
        const rocq_cast_params copy = {.y = &to, .x = &from};
        VAE__RUN(m, cast, &copy);
    }
    if (c->norm == VAE__POSITION_NORM) {
        VAE__TRY(vae__take(m, 0, ROCQ_F32, 1, in.ne[1], in.ne[2], in.ne[3], &stats));
        const rocq_norm_stats_params norm = {.stats = &stats, .x = &in, .eps = 1e-24f};
        VAE__RUN(m, norm_stats, &norm);
    }
    // What the blocks add up may exceed F16, in which a GPU multiplies.
    const bool wide = c->norm == VAE__NO_NORM && m->stream != ROCQ_F16 &&
                      x->full.format == m->stream;
    const rocq_conv_params conv = {
        .y = y, .w = &c->w, .x = &in, .bias = vectors[VAE__BIAS],
        .residual = residual,
        .stats = c->norm == VAE__GROUP_NORM      ? &c->stats
                 : c->norm == VAE__POSITION_NORM ? &stats
                                                 : NULL,
        .norm_weight = vectors[VAE__NORM_WEIGHT],
        .norm_bias = vectors[VAE__NORM_BIAS],
        .kw = c->k, .kh = c->k, .kt = c->kt, .stride = c->stride, .upsample = c->upsample,
        .pad_x = pad[0], .pad_y = pad[1], .x_activation = c->before, .activation = c->after,
        .x_scale = wide ? 1.0f / 64 : 0, .precision = m->options.precision};
    if (m->last_conv >= 0) m->net->convs[m->last_conv].follower = index;
    m->last_conv = index;
    if (!m->planning) VAE__TRY(vae__bring(m, index));
    VAE__RUN(m, conv, &conv);
    if (!m->planning && m->gpu) VAE__TRY(vae__bring(m, c->follower));
    const int64_t keep = past + n < c->kt - 1 ? past + n : c->kt - 1;
    if (cached && !again) c->n_cached = keep;
    if (cached && !there) {
        const rocq_tensor from = rocq_tensor_slice(&in, 3, past + n - keep, keep);
        const rocq_tensor to = rocq_tensor_slice(&c->cache, 3, 0, keep);
        const rocq_cast_params copy = {.y = &to, .x = &from};
        VAE__RUN(m, cast, &copy);
    }
    m->stack.level[0] = level;
    m->flops += 2.0 * (double)rocq_tensor_count(y) * (double)c->w.ne[0];
    // Graphs are cut for that: nothing of one is done before it is launched.
    if (m->planning || !m->options.progress || m->flops - m->reported < m->plan.flops / 100) {
        return ROCQ_OK;
    }
    m->reported = m->flops;
    VAE__TRY(vae__flush(m));
    return vae__progress(m, "computing", (int64_t)(m->flops / 1e6), (int64_t)(m->plan.flops / 1e6));
}

// ---------------------------------------------------------------------------------------------
// Modules
// ---------------------------------------------------------------------------------------------

// Positions of values 0 to n of a module, of which the last is to have o: what each convolution
// reads.
static void vae__spans(const vae_conv *convs, int32_t n, const int64_t size[2], const vae__span *o,
                       int64_t sizes[4][2], vae__span spans[4]) {
    memcpy(sizes[0], size, sizeof sizes[0]);
    for (int32_t j = 0; j < n; j++) vae__out_size(&convs[j], sizes[j], sizes[j + 1]);
    spans[n] = *o;
    for (int32_t j = n - 1; j >= 0; j--) {
        vae__align(&convs[j], &spans[j + 1]);
        spans[j] = vae__needs(&convs[j], sizes[j], &spans[j + 1]);
    }
}

// y = the shortcut of x, 1 x 1 of at most as many channels, over x, which ends with it. Rows of y
// are no longer than those of x, so they go where rows have been read: from the end of the stack
// that x lies at, first some through memory of their own, then twice as many, and so on. At its
// widest block a decoder so takes three quarters of the memory.
static rocq_result vae__shrink(vae_model *m, vae_conv *c, const vae__value *x, vae__value *y) {
    const vae__stack *s = &m->stack;
    const int64_t w = x->size[0], n_rows = x->size[1] * x->full.ne[3];
    int64_t x_row, y_row;
    VAE__TRY(rocq_row_size(x->full.format, c->c * w, &x_row));
    VAE__TRY(rocq_row_size(x->full.format, c->m * w, &y_row));
    const int64_t levels[2] = {s->level[0], s->level[1]}, size = (y_row * n_rows + 255) / 256 * 256;
    const int64_t x_at = x->full.offset;
    const int64_t y_at = x->side == 0 ? x_at : s->buffer.size - x->mark - size;
    const int64_t ne[4] = {c->m, w, x->size[1], x->full.ne[3]};
    const int64_t few = (n_rows + 63) / 64;
    for (int64_t done = 0; done < n_rows;) {
        int64_t n = few, first; // rows first to first + n - 1
        bool apart = true;      // what they become lies over rows that are still to be read
        const int64_t left = n_rows - done;
        const int64_t unread = x_at + (x->side == 0 ? done : left) * x_row - y_at; // edge of them
        const int64_t free_rows =
            x->side == 0 ? unread / y_row - done : left - (unread + y_row - 1) / y_row;
        if (free_rows > 0) {
            n = free_rows;
            apart = false;
        }
        if (n > left) n = left;
        first = x->side == 0 ? done : left - n;
        const int64_t x_ne[4] = {c->c, w, n, 1}, y_ne[4] = {c->m, w, n, 1};
        const vae__span o = {{0, 0}, {w, n}};
        vae__value rows = *x;
        rocq_tensor to, place;
        rows.room = 0;
        rows.span = o;
        rows.size[1] = n;
        VAE__TRY(rocq_tensor_init(&rows.full, &s->buffer, x_at + first * x_row, x->full.format, 4,
                                  x_ne));
        VAE__TRY(rocq_tensor_init(&place, &s->buffer, y_at + first * y_row, x->full.format, 4,
                                  y_ne));
        if (apart) VAE__TRY(vae__take(m, !x->side, x->full.format, c->m, w, n, 1, &to));
        VAE__TRY(vae__conv(m, c, &rows, &o, apart ? &to : &place, NULL));
        const rocq_cast_params copy = {.y = &place, .x = &to};
        if (apart) VAE__RUN(m, cast, &copy);
        m->stack.level[!x->side] = levels[!x->side];
        done += n;
    }
    *y = *x;
    y->end = x->mark + size;
    return rocq_tensor_init(&y->full, &s->buffer, y_at, x->full.format, 4, ne);
}

// Convolutions one behind the other, the last of which adds the input, or 1 x 1 of it. With stop >
// 0 only as far as the input of that one. out is as much of the result as o, or a little more; it
// lies in dest, in the place of x, or on the other side of the stack.
static rocq_result vae__convs(vae_model *m, const vae_module *mod, const vae__value *x,
                              const vae__span *o, int32_t stop, const vae__value *dest,
                              vae__value *out) {
    vae_conv *convs = m->net->convs + mod->first;
    const int32_t n = stop > 0 ? stop : mod->n, other = !x->side;
    const bool free_x = stop <= 0 && !dest && x->owned && x->full.format == m->stream;
    const bool in_place = free_x && mod->residual == VAE__OF_INPUT;
    const bool shrinks = free_x && mod->residual == VAE__OF_SHORTCUT && m->inline_stats && n == 2 &&
                         convs[n].m <= convs[n].c;
    const bool last_of_all = mod == &m->net->modules[m->net->n_modules - 1];
    const int64_t n_frames = x->full.ne[3] - x->room;
    const int64_t levels[2] = {m->stack.level[0], m->stack.level[1]};
    int64_t sizes[4][2];
    vae__span spans[4];
    vae__value h = *x, y;
    rocq_tensor to, residual;
    vae__spans(convs, n, x->size, o, sizes, spans);
    memset(&y, 0, sizeof y);
    if (stop <= 0 && !shrinks) {
        if (dest) {
            y = *dest;
        } else if (in_place) {
            y = *x;
            y.full = vae__part(x, &spans[n], 0, x->full.ne[3]);
            y.span = spans[n];
        } else {
            VAE__TRY(vae__new(m, other, last_of_all ? ROCQ_F32 : m->stream, convs[n - 1].m,
                              sizes[n], &spans[n], n_frames, &y));
        }
        to = vae__frames_of(&y, &spans[n]);
        if (mod->residual == VAE__OF_SHORTCUT) {
            VAE__TRY(vae__conv(m, &convs[mod->n], x, &spans[n], &to, NULL));
        }
        residual = mod->residual == VAE__OF_INPUT ? vae__frames_of(x, &spans[n]) : to;
    }
    for (int32_t j = 0; j < n; j++) {
        if (convs[j].norm == VAE__GROUP_NORM && m->inline_stats) {
            const rocq_tensor all = vae__frames_of(&h, &h.span);
            VAE__TRY(vae__group_stats(m, &convs[j], &all, false, true));
        } else if (convs[j].norm == VAE__GROUP_NORM && m->planning) {
            const rocq_tensor part = vae__frames_of(&h, &h.span);
            VAE__TRY(vae__group_stats(m, &convs[j], &part, true, true));
            m->norm_flops += m->flops - m->chain_flops; // the tiles up to here run once more
        }
        if (stop <= 0 && j == n - 1) {
            if (shrinks) {
                VAE__TRY(vae__shrink(m, &convs[mod->n], x, &y));
                to = residual = vae__frames_of(&y, &spans[n]);
            }
            VAE__TRY(vae__conv(m, &convs[j], &h, &spans[n], &to,
                               mod->residual != VAE__NO_RESIDUAL ? &residual : NULL));
            break;
        }
        vae__value next;
        VAE__TRY(vae__new(m, (j % 2 == 0) != shrinks ? x->side : other, m->inner, convs[j].m,
                          sizes[j + 1], &spans[j + 1], n_frames, &next));
        const rocq_tensor inner = vae__frames_of(&next, &spans[j + 1]);
        VAE__TRY(vae__conv(m, &convs[j], &h, &spans[j + 1], &inner, NULL));
        h = next;
    }
    *out = stop > 0 ? h : y;
    if (stop > 0) return ROCQ_OK; // the caller frees it all
    m->stack.level[x->side] = in_place ? x->end : shrinks ? y.end : x->owned ? x->mark
                                                                             : levels[x->side];
    m->stack.level[other] = in_place || shrinks || dest ? levels[other] : y.end;
    return ROCQ_OK;
}

// Attention of one head over the positions of each picture or frame.
static rocq_result vae__attention(vae_model *m, const vae_module *mod, const vae__value *x,
                                  vae__value *out) {
    vae_conv *convs = m->net->convs + mod->first;
    const int32_t other = !x->side;
    const int64_t levels[2] = {m->stack.level[0], m->stack.level[1]};
    const int64_t c = convs[0].m, n = x->full.ne[3] - x->room, area = x->size[0] * x->size[1];
    const vae__span o = vae__whole(x->size);
    const rocq_format format = m->stream == ROCQ_F32 && !m->gpu ? ROCQ_F32 : ROCQ_F16;
    rocq_tensor part[3], heads[3];
    vae__value y = *x, attended = *x;
    const rocq_tensor in = vae__frames_of(x, &o);
    if (!x->owned) VAE__TRY(vae__new(m, other, m->stream, c, x->size, &o, n, &y));
    const int64_t level = m->stack.level[other];
    if (convs[0].norm == VAE__GROUP_NORM) {
        VAE__TRY(vae__group_stats(m, &convs[0], &in, false, true));
    }
    for (int i = 0; i < 3; i++) {
        const int64_t ne[4] = {c, 1, area, n};
        VAE__TRY(vae__take(m, other, format, c, x->size[0], x->size[1], n, &part[i]));
        VAE__TRY(vae__conv(m, &convs[i], x, &o, &part[i], NULL));
        VAE__TRY(rocq_tensor_reshape(&heads[i], &part[i], 4, ne));
    }
    // Of a video frame by frame: how a GPU orders sums may depend on how many there are at once,
    // and chunks are to have the bits of the whole.
    const int64_t at_once = m->video ? 1 : n;
    for (int64_t i = 0; i < n; i += at_once) {
        rocq_tensor part_of[3];
        for (int j = 0; j < 3; j++) part_of[j] = rocq_tensor_slice(&heads[j], 3, i, at_once);
        const rocq_attention_params attention = {.out = &part_of[0], .q = &part_of[0],
                                                 .k = &part_of[1], .v = &part_of[2]};
        VAE__RUN(m, attention, &attention);
    }
    m->flops += 4.0 * (double)c * (double)area * (double)area * (double)n;
    attended.full = part[0];
    attended.room = 0;
    const rocq_tensor to = vae__frames_of(&y, &o);
    VAE__TRY(vae__conv(m, &convs[3], &attended, &o, &to, &in));
    m->stack.level[other] = level;
    if (!x->owned) m->stack.level[x->side] = levels[x->side];
    *out = y;
    return ROCQ_OK;
}

// Twice as many frames: each becomes two, by a causal convolution in time, but for the first of the
// video, which stays one and which the others do not see.
static rocq_result vae__time(vae_model *m, const vae_module *mod, const vae__value *x,
                             const vae__span *o, vae__value *out) {
    vae_conv *convs = m->net->convs + mod->first;
    const int64_t n = x->full.ne[3] - x->room, alone = m->first_chunk ? 1 : 0;
    vae__value rest = *x;
    VAE__TRY(vae__new(m, !x->side, m->stream, convs[0].m, x->size, o, 2 * n - alone, out));
    if (alone) {
        const rocq_tensor from = vae__part(x, o, x->room, 1);
        const rocq_tensor to = vae__part(out, o, out->room, 1);
        const rocq_cast_params copy = {.y = &to, .x = &from};
        VAE__RUN(m, cast, &copy);
    }
    if (n > alone) {
        rest.room = x->room + alone;
        for (int i = 0; i < 2; i++) { // every other frame
            rocq_tensor to = vae__part(out, o, out->room + alone + i, 1);
            to.ne[3] = n - alone;
            to.stride[3] *= 2;
            VAE__TRY(vae__conv(m, &convs[i], &rest, o, &to, NULL));
        }
    }
    if (x->owned) m->stack.level[x->side] = x->mark;
    return ROCQ_OK;
}

// ---------------------------------------------------------------------------------------------
// Tiles and chunks that overlap
// ---------------------------------------------------------------------------------------------

static vae__tiles vae__tiles_of(int64_t total, int64_t size, int64_t overlap) {
    vae__tiles t = {1, total, total, total};
    if (size <= 0 || size >= total) return t;
    t.size = size;
    t.step = size - overlap;
    t.n = (total - overlap + t.step - 1) / t.step;
    return t;
}

static int64_t vae__start(const vae__tiles *t, int64_t i) {
    const int64_t at = i * t->step;
    return at > t->total - t->size ? t->total - t->size : at;
}

// How much of position p tile i has before it is divided by the sum over all tiles: 1, but where it
// overlaps another a line from 0 to 1.
static double vae__share(const vae__tiles *t, int64_t i, int64_t p) {
    const int64_t first = vae__start(t, i), end = first + t->size;
    double share = 1;
    if (p < first || p >= end) return 0;
    if (i > 0) {
        const double r =
            ((double)(p - first) + 0.5) / (double)(vae__start(t, i - 1) + t->size - first);
        if (r < share) share = r;
    }
    if (i < t->n - 1) {
        const double r = ((double)(end - p) - 0.5) / (double)(end - vae__start(t, i + 1));
        if (r < share) share = r;
    }
    return share;
}

// Weights of tile i in direction d: over all tiles those of a position add up to 1.
static rocq_result vae__ramp(vae_model *m, int d, const vae__tiles *t, int64_t i) {
    rocq_tensor *ramp = &m->ramp[d];
    const int64_t n = t->size;
    memset(ramp, 0, sizeof *ramp);
    if (t->n == 1) return ROCQ_OK;
    VAE__TRY(vae__take(m, 0, ROCQ_F32, 1, d == 0 ? n : 1, d == 1 ? n : 1, d == 2 ? n : 1, ramp));
    if (m->planning) return ROCQ_OK;
    float *weights;
    VAE__TRY(vae__flush(m));
    VAE__TRY(vae__allocate(m, &weights, (size_t)n * sizeof *weights));
    for (int64_t p = 0; p < n; p++) {
        double sum = 0;
        for (int64_t j = 0; j < t->n; j++) sum += vae__share(t, j, vae__start(t, i) + p);
        weights[p] = (float)(vae__share(t, i, vae__start(t, i) + p) / sum);
    }
    const rocq_result result = rocq_upload(m->ctx, ramp, weights, n * (int64_t)sizeof *weights);
    vae__free(m, weights, (size_t)n * sizeof *weights);
    return result;
}

// ---------------------------------------------------------------------------------------------
// Chains of modules, whole or in tiles
// ---------------------------------------------------------------------------------------------

static int32_t vae__channels_at(const vae_net *net, int32_t i) { // of what module i reads
    if (i == net->n_modules) return net->c_out;
    return net->convs[net->modules[i].first].c;
}

// What module i reads for positions o of its output.
static vae__span vae__module_needs(const vae_model *m, int32_t i, int32_t n, const vae__span *o) {
    const vae_module *mod = &m->net->modules[i];
    int64_t sizes[4][2];
    vae__span spans[4];
    if (mod->kind == VAE__ATTENTION) return vae__whole(m->size[i]);
    if (mod->kind == VAE__TIME) return *o;
    vae__spans(m->net->convs + mod->first, n, m->size[i], o, sizes, spans);
    return spans[0];
}

// Modules a to b - 1, for positions o of what the last writes, or, with stop > 0, of what
// convolution `stop` of module b reads.
static rocq_result vae__chain(vae_model *m, int32_t a, int32_t b, const vae__value *x,
                              const vae__span *o, int32_t stop, const vae__value *dest,
                              vae__value *out) {
    vae__span spans[VAE__MAX_MODULES + 1];
    vae__value v = *x, next;
    spans[b] = stop > 0 ? vae__module_needs(m, b, stop, o) : *o;
    for (int32_t i = b - 1; i >= a; i--) {
        spans[i] = vae__module_needs(m, i, m->net->modules[i].n, &spans[i + 1]);
    }
    m->chain_flops = m->flops;
    m->norm_flops = 0;
    for (int32_t i = a; i < b; i++) {
        const vae_module *mod = &m->net->modules[i];
        if (mod->kind == VAE__ATTENTION) {
            VAE__TRY(vae__attention(m, mod, &v, &next));
        } else if (mod->kind == VAE__TIME) {
            VAE__TRY(vae__time(m, mod, &v, &spans[i + 1], &next));
        } else {
            VAE__TRY(vae__convs(m, mod, &v, &spans[i + 1], 0,
                                i == b - 1 && stop <= 0 ? dest : NULL, &next));
        }
        v = next;
    }
    if (stop > 0) VAE__TRY(vae__convs(m, &m->net->modules[b], &v, o, stop, NULL, &next));
    *out = stop > 0 ? next : v;
    return ROCQ_OK;
}

// Tile `cell` of a value of that size, of cells of `tile` pixels.
static vae__span vae__cell(const vae_model *m, const int64_t size[2], int32_t tile, int64_t cell) {
    vae__span o;
    const int64_t n_x = (m->full[0] + tile - 1) / tile, at[2] = {cell % n_x, cell / n_x};
    for (int d = 0; d < 2; d++) {
        const int64_t step = tile * size[d] / m->full[d];
        o.at[d] = at[d] * step;
        o.n[d] = size[d] - o.at[d] < step ? size[d] - o.at[d] : step;
    }
    return o;
}

static int64_t vae__n_cells(const vae_model *m, int32_t tile) {
    return ((m->full[0] + tile - 1) / tile) * ((m->full[1] + tile - 1) / tile);
}

// A cell with neighbours on all sides, if there is one: it reads the most.
static int64_t vae__largest_cell(const vae_model *m, int32_t tile) {
    const int64_t n_x = (m->full[0] + tile - 1) / tile, n_y = (m->full[1] + tile - 1) / tile;
    return (n_x > 2 ? 1 : 0) + (n_y > 2 ? n_x : 0);
}

// For how many cells this one stands while planning, 0 = it is passed over: the first two and the
// last of each direction have all sizes and neighbours that there are. While steps are compared the
// largest will do for all.
static int64_t vae__stands_for(const vae_model *m, int32_t tile, int64_t cell) {
    const int64_t n_x = (m->full[0] + tile - 1) / tile, n_y = (m->full[1] + tile - 1) / tile;
    const int64_t n[2] = {n_x, n_y}, at[2] = {cell % n_x, cell / n_x};
    int64_t product = 1;
    if (m->comparing) return cell == vae__largest_cell(m, tile) ? n_x * n_y : 0;
    for (int d = 0; d < 2; d++) {
        if (at[d] == 1 && n[d] > 2) product *= n[d] - 2;
        else if (at[d] > 1 && at[d] < n[d] - 1) return 0;
    }
    return product;
}

// Mean and variance of what convolution j of module i reads, from all tiles of it.
static rocq_result vae__gather(vae_model *m, int32_t a, int32_t i, int32_t j, int32_t tile,
                               const vae__value *x) {
    const vae_module *mod = &m->net->modules[i];
    vae_conv *conv = &m->net->convs[mod->first + j];
    int64_t size[2] = {m->size[i][0], m->size[i][1]};
    for (int32_t k = 0; k < j; k++) vae__out_size(&m->net->convs[mod->first + k], size, size);
    if (i == a && j == 0) {
        const rocq_tensor all = vae__frames_of(x, &x->span);
        return vae__group_stats(m, conv, &all, false, true);
    }
    for (int64_t cell = 0; cell < vae__n_cells(m, tile); cell++) {
        if (m->planning && vae__stands_for(m, tile, cell) == 0) continue;
        const int64_t levels[2] = {m->stack.level[0], m->stack.level[1]};
        const vae__span o = vae__cell(m, size, tile, cell);
        vae__value v;
        VAE__TRY(vae__chain(m, a, i, x, &o, j, NULL, &v));
        const rocq_tensor part = vae__frames_of(&v, &o);
        VAE__TRY(vae__group_stats(m, conv, &part, true, cell == 0));
        memcpy(m->stack.level, levels, sizeof levels);
    }
    return ROCQ_OK;
}

static rocq_result vae__emit(vae_model *m, vae__value *v, const vae__span *o);

// Frames of what module i reads, of so many latent frames from the first on.
static int64_t vae__frames_at(const vae_model *m, int32_t i, int64_t latent_frames) {
    return latent_frames > 0 ? 1 + m->rate[i] * (latent_frames - 1) : 0;
}

static inline int64_t vae_frames(const vae_model *m, int64_t latent_frames) {
    return m->video ? 1 + m->time_scale * (latent_frames - 1) : latent_frames;
}

// Memory for the frames that chunks share, for positions o of what module b - 1 writes. What module
// a reads is there with all its frames.
static rocq_result vae__take_caches(vae_model *m, int32_t a, int32_t b, const vae__span *o) {
    vae__span written = *o;
    for (int32_t i = b - 1; i >= a; i--) {
        const vae_module *mod = &m->net->modules[i];
        int64_t sizes[4][2];
        vae__span spans[4] = {written};
        if (mod->kind == VAE__CONVS) {
            vae__spans(m->net->convs + mod->first, mod->n, m->size[i], &written, sizes, spans);
        }
        for (int32_t j = 0; j < mod->n; j++) {
            vae_conv *c = &m->net->convs[mod->first + j];
            c->n_cached = 0;
            if (!m->caches || c->kt == 1 || c->same_input || (i == a && j == 0)) continue;
            VAE__TRY(vae__take(m, 0, j > 0 ? m->inner : m->stream, c->c, spans[j].n[0],
                               spans[j].n[1], c->kt - 1, &c->cache));
        }
        written = vae__module_needs(m, i, mod->n, &written);
    }
    return ROCQ_OK;
}

// Positions o of what module b - 1 writes, from x, all that module a reads, chunk by chunk: to
// `kept`, which has all frames too, or to the caller's memory. Planning takes the first three: by
// then there are two frames before.
static rocq_result vae__chunks(vae_model *m, int32_t a, int32_t b, const vae__value *x,
                               const vae__span *o, const vae__value *kept) {
    const vae__tiles *chunks = &m->chunks;
    const vae__tiles frames = {chunks->n, vae_frames(m, chunks->size),
                               chunks->step * m->time_scale, vae_frames(m, chunks->total)};
    const int64_t n_run = m->planning && chunks->n > 3 ? 3 : chunks->n, at = m->at[2];
    const int64_t before[2] = {m->stack.level[0], m->stack.level[1]};
    const double flops = m->flops;
    double first_flops = 0;
    VAE__TRY(vae__take_caches(m, a, b, o));
    const int64_t levels[2] = {m->stack.level[0], m->stack.level[1]};
    for (int64_t i = 0; i < n_run; i++) {
        const int64_t start = m->caches ? i * chunks->size : vae__start(chunks, i);
        const int64_t left = chunks->total - start, n = left < chunks->size ? left : chunks->size;
        const int64_t seen = m->caches ? start : 0, end = seen + n; // of what chunks share
        const int64_t first = vae__frames_at(m, a, start);
        vae__value in = *x, out, dest;
        m->first_chunk = seen == 0;
        m->at[2] = at + (seen > 0 ? vae_frames(m, start) : start * m->time_scale);
        if (m->job->chunk_overlap > 0) VAE__TRY(vae__ramp(m, 2, &frames, i));
        in.room = seen == 0 ? 0 : first < 2 ? first : 2;
        in.full = rocq_tensor_slice(&x->full, 3, first - in.room,
                                    in.room + vae__frames_at(m, a, end) -
                                        vae__frames_at(m, a, seen));
        if (kept) {
            const int64_t to = vae__frames_at(m, b, seen);
            dest = *kept;
            dest.full = vae__part(kept, o, to, vae__frames_at(m, b, end) - to);
            dest.span = *o;
        }
        VAE__TRY(vae__chain(m, a, b, &in, o, 0, kept ? &dest : NULL, &out));
        if (!kept) VAE__TRY(vae__emit(m, &out, o));
        memcpy(m->stack.level, levels, sizeof levels);
        if (i == 0) first_flops = m->flops - flops;
    }
    m->at[2] = at;
    memcpy(m->stack.level, before, sizeof before);
    if (n_run < chunks->n) {
        const double each = (m->flops - flops - first_flops) / (double)(n_run - 1);
        m->flops = flops + first_flops + each * (double)(chunks->n - 1);
    }
    return ROCQ_OK;
}

// Modules a to b - 1 from x, a whole value, to out, another, or to the caller's memory. In tiles:
// first the norms one after the other, each by all tiles up to there, then all the way. A tile goes
// through all chunks of a video before the next begins: what convolutions keep of a chunk for the
// next is as much as many frames of the result, and of a tile it is small.
static rocq_result vae__segment(vae_model *m, int32_t a, int32_t b, int32_t tile, vae__value *x,
                                vae__value *out) {
    const bool last = b == m->net->n_modules, owned = x->owned;
    const vae__span whole = vae__whole(m->size[b]);
    m->inline_stats = tile == 0;
    m->first_chunk = true;
    if (tile == 0 && m->chunks.n == 1) {
        VAE__TRY(vae__chain(m, a, b, x, &whole, 0, NULL, out));
        return last ? vae__emit(m, out, &whole) : ROCQ_OK;
    }
    x->owned = false;
    if (!last) {
        VAE__TRY(vae__new(m, !x->side, m->stream, vae__channels_at(m->net, b), m->size[b], &whole,
                          vae__frames_at(m, b, m->chunks.total), out));
    }
    double flops = m->flops;
    // A norm's tiles are smaller than those below, but what an op takes of scratch memory does not
    // always fall with its size.
    for (int32_t i = a; i < b && tile > 0 && !m->comparing; i++) {
        const vae_module *mod = &m->net->modules[i];
        for (int32_t j = 0; j < mod->n; j++) {
            if (m->net->convs[mod->first + j].norm != VAE__GROUP_NORM) continue;
            VAE__TRY(vae__gather(m, a, i, j, tile, x));
        }
    }
    if (m->planning) m->flops = flops; // below they count by the tile
    if (tile == 0) tile = (int32_t)(m->full[0] > m->full[1] ? m->full[0] : m->full[1]);
    m->caches = m->chunks.n > 1 && m->job->chunk_overlap == 0;
    for (int64_t cell = 0; cell < vae__n_cells(m, tile); cell++) {
        const int64_t n_alike = m->planning ? vae__stands_for(m, tile, cell) : 1;
        if (n_alike == 0) continue;
        const double start = m->flops;
        const vae__span o = vae__cell(m, m->size[b], tile, cell);
        VAE__TRY(vae__chunks(m, a, b, x, &o, last ? NULL : out));
        flops += (double)n_alike * (m->flops - start + m->norm_flops);
    }
    m->caches = false;
    if (m->planning) m->flops = flops;
    if (owned) m->stack.level[x->side] = x->mark;
    return ROCQ_OK;
}

// Sizes of all values, and memory for statistics.
static rocq_result vae__begin(vae_model *m, int64_t w, int64_t h) {
    vae_net *net = m->net;
    const int64_t n = m->chunks.size;
    m->caches = false;
    m->size[0][0] = w;
    m->size[0][1] = h;
    m->rate[0] = 1;
    for (int32_t i = 0; i < net->n_modules; i++) {
        const vae_module *mod = &net->modules[i];
        memcpy(m->size[i + 1], m->size[i], sizeof m->size[i]);
        m->rate[i + 1] = m->rate[i] * (mod->kind == VAE__TIME ? 2 : 1);
        for (int32_t j = 0; j < mod->n && mod->kind == VAE__CONVS; j++) {
            vae__out_size(&net->convs[mod->first + j], m->size[i + 1], m->size[i + 1]);
        }
        for (int32_t j = 0; j < mod->n; j++) {
            vae_conv *c = &net->convs[mod->first + j];
            if (c->same_input) {
                c->stats = c[-1].stats;
                c->moments = c[-1].moments;
            } else if (c->norm == VAE__GROUP_NORM) {
                VAE__TRY(vae__take(m, 0, ROCQ_F32, 2, m->options.n_groups, n, 1, &c->stats));
                VAE__TRY(vae__take(m, 0, ROCQ_F32, 3, m->options.n_groups, n, 1, &c->moments));
            }
        }
    }
    const int64_t *largest = net == &m->decoder ? m->size[net->n_modules] : m->size[0];
    m->full[0] = largest[0];
    m->full[1] = largest[1];
    return ROCQ_OK;
}

// ---------------------------------------------------------------------------------------------
// From and to the caller's memory
// ---------------------------------------------------------------------------------------------

typedef struct vae__bytes { // of the host, for as long as a copy takes
    void *data;
    size_t size;
} vae__bytes;

// Uploads pictures or frames `first` to first + n - 1 as the network reads them: channels
// innermost, and for a decoder as z = latent / scale + shift (TAESD's: latent / 3, whose tanh the
// device takes), for an encoder from -1 to 1.
static rocq_result vae__upload(vae_model *m, const rocq_tensor *t, int64_t first, int64_t n) {
    const vae_request *job = m->job;
    const int64_t w = job->width, h = job->height, c = m->net->c_in;
    const int64_t frames = m->video ? job->frames : 1;
    vae__bytes b = {NULL, (size_t)(c * w * h * n) * sizeof(float)};
    bool finite = true;
    VAE__TRY(vae__flush(m));
    VAE__TRY(vae__allocate(m, &b.data, b.size));
    float *to = (float *)b.data;
    for (int64_t p = 0; p < n; p++) {
        for (int64_t k = 0; k < c; k++) {
            for (int64_t i = 0; i < w * h; i++) {
                float *at = &to[k + c * (i + w * h * p)];
                if (m->net == &m->decoder) {
                    const int64_t frame = (first + p) % frames, item = (first + p) / frames;
                    const float latent =
                        job->latents[i + w * h * (frame + frames * (k + c * item))];
                    finite &= latent - latent == 0;
                    *at = m->tanh_latents ? latent / 3 : latent * m->z_std[k] + m->z_mean[k];
                } else {
                    const int64_t from = k + c * (i + w * h * (first + p));
                    const float v = job->from_pixels ? (float)job->from_pixels[from] / 255
                                                     : job->from_values[from];
                    finite &= v - v == 0;
                    *at = (v - m->pixel_bias) / m->pixel_scale;
                }
            }
        }
    }
    const rocq_result result =
        finite ? rocq_upload(m->ctx, t, to, (int64_t)b.size)
               : vae__fail(m, ROCQ_E_ARGUMENT, "the %s are not all finite numbers",
                           m->net == &m->decoder ? "latents" : "pictures");
    vae__free(m, b.data, b.size);
    return result;
}

// Before something waits for the batch that has been submitted: the next one's latents.
static rocq_result vae__upload_ahead(vae_model *m) {
    const int64_t each = m->video ? m->job->frames : 1, n = m->n_ahead;
    const rocq_tensor to = rocq_tensor_slice(&m->ahead, 3, 0, n);
    const int64_t first = m->batch_end * each;
    m->n_ahead = 0;
    return n > 0 ? vae__upload(m, &to, first, n) : ROCQ_OK;
}

// The mean of an encoder's output: half of its channels.
static void vae__store_latents(vae_model *m, const float *from, const vae__span *o, int64_t first,
                               int64_t n) {
    const int64_t w = m->size[m->net->n_modules][0], h = m->size[m->net->n_modules][1], z = m->z;
    for (int64_t p = 0; p < n; p++) {
        for (int64_t y = 0; y < o->n[1]; y++) {
            for (int64_t x = 0; x < o->n[0]; x++, from += m->net->c_out) {
                for (int64_t k = 0; k < z; k++) {
                    m->job->to_latents[o->at[0] + x +
                                       w * (o->at[1] + y + h * (k + z * (first + p)))] =
                        (from[k] - m->z_mean[k]) / m->z_std[k];
                }
            }
        }
    }
}

// Rows of n pictures or frames, each `size` bytes a position, to their places at o.
static void vae__store_rows(const vae_model *m, void *to, const void *from, int64_t size,
                            const vae__span *o, int64_t first, int64_t n) {
    const int64_t w = (int64_t)m->job->width * m->scale, h = (int64_t)m->job->height * m->scale;
    const unsigned char *src = (const unsigned char *)from;
    for (int64_t p = first; p < first + n; p++) {
        for (int64_t y = o->at[1]; y < o->at[1] + o->n[1]; y++, src += o->n[0] * size) {
            memcpy((unsigned char *)to + size * (o->at[0] + w * (y + h * p)), src,
                   (size_t)(o->n[0] * size));
        }
    }
}

// Downloads t, positions o of n pictures or frames from number first of the request on, to `to`,
// which has `size` bytes a position: 3 are pixels; floats are brought to the caller's scale. Whole
// pictures need no copy between.
static rocq_result vae__fetch(vae_model *m, const rocq_tensor *t, void *to, int64_t size,
                              const vae__span *o, int64_t first) {
    const int64_t w = (int64_t)m->job->width * m->scale, h = (int64_t)m->job->height * m->scale;
    const int64_t count = rocq_tensor_count(t);
    const size_t bytes = (size_t)(count / 3 * size);
    const bool whole = o->n[0] == w && o->n[1] == h;
    void *data = (unsigned char *)to + size * w * h * first;
    VAE__TRY(vae__flush(m));
    VAE__TRY(vae__upload_ahead(m));
    if (!whole) VAE__TRY(vae__allocate(m, &data, bytes));
    const rocq_result result = rocq_download(m->ctx, data, t, (int64_t)bytes);
    if (result == ROCQ_OK && size > 3) {
        float *values = (float *)data;
        for (int64_t i = 0; i < count; i++) values[i] = values[i] * m->pixel_scale + m->pixel_bias;
    }
    if (whole) return result;
    if (result == ROCQ_OK) vae__store_rows(m, to, data, size, o, first, t->ne[3]);
    vae__free(m, data, bytes);
    return result;
}

// The same for an encoder's output, which is sorted by channels.
static rocq_result vae__fetch_latents(vae_model *m, const rocq_tensor *t, const vae__span *o,
                                      int64_t first) {
    vae__bytes b = {NULL, (size_t)rocq_tensor_count(t) * sizeof(float)};
    VAE__TRY(vae__flush(m));
    VAE__TRY(vae__upload_ahead(m));
    VAE__TRY(vae__allocate(m, &b.data, b.size));
    const rocq_result result = rocq_download(m->ctx, b.data, t, (int64_t)b.size);
    if (result == ROCQ_OK) vae__store_latents(m, (float *)b.data, o, first, t->ne[3]);
    vae__free(m, b.data, b.size);
    return result;
}

// What the request asks for of t: pixels, values, or both; latents of an encoder.
static rocq_result vae__download(vae_model *m, const rocq_tensor *t, const vae__span *o,
                                 int64_t first) {
    const vae_request *job = m->job;
    if (m->net == &m->encoder) return m->planning ? ROCQ_OK : vae__fetch_latents(m, t, o, first);
    if (job->pixels || !job->values) {
        const int64_t level = m->stack.level[0];
        rocq_tensor bytes;
        VAE__TRY(vae__take(m, 0, ROCQ_I8, 3, t->ne[1], t->ne[2], t->ne[3], &bytes));
        const rocq_pixels_params pixels = {.y = &bytes, .x = t, .scale = m->pixel_scale,
                                           .bias = m->pixel_bias};
        VAE__RUN(m, pixels, &pixels);
        m->stack.level[0] = level;
        if (!m->planning) VAE__TRY(vae__fetch(m, &bytes, job->pixels, 3, o, first));
    }
    if (m->planning || !job->values) return ROCQ_OK;
    return vae__fetch(m, t, job->values, 3 * (int64_t)sizeof(float), o, first);
}

// Whether statistics are finite.
static rocq_result vae__look(vae_model *m, const rocq_tensor *stats) {
    float *values;
    const int64_t n = rocq_tensor_count(stats), size = n * (int64_t)sizeof *values;
    if (m->planning) return ROCQ_OK;
    VAE__TRY(vae__flush(m));
    VAE__TRY(vae__allocate(m, &values, (size_t)size));
    const rocq_result result = rocq_download(m->ctx, values, stats, size);
    for (int64_t i = 0; i < n; i++) m->finite &= values[i] - values[i] == 0;
    vae__free(m, values, (size_t)size);
    return result;
}

// Positions o of the network's output, which end here: in the caller's memory, or, where tiles are
// blended, multiplied by their weights in a sum.
static rocq_result vae__deliver(vae_model *m, const rocq_tensor *t, const vae__span *o) {
    if (!m->blending) return vae__download(m, t, o, m->first + m->at[2]);
    const int64_t start[4] = {0, m->at[0], m->at[1], m->at[2]};
    rocq_tensor sum;
    for (int d = 0; d < 3; d++) {
        if (m->ramp[d].n_dims == 0) continue;
        const rocq_binary_params weigh = {.y = t, .a = t, .b = &m->ramp[d]};
        VAE__RUN(m, mul, &weigh);
    }
    VAE__TRY(rocq_tensor_view(&sum, &m->blended, start, t->ne));
    const rocq_binary_params add = {.y = &sum, .a = &sum, .b = t};
    VAE__RUN(m, add, &add);
    return ROCQ_OK;
}

// The same, and, where a value may have left F16 and no statistics of a GroupNorm tell, a look at
// those of the output.
static rocq_result vae__emit(vae_model *m, vae__value *v, const vae__span *o) {
    const rocq_tensor t = vae__frames_of(v, o);
    const int64_t level = m->stack.level[0];
    rocq_tensor stats;
    bool checked = m->stream != ROCQ_F16;
    for (int32_t i = 0; i < m->net->n_convs; i++) {
        checked |= m->net->convs[i].norm == VAE__GROUP_NORM;
    }
    if (checked) return vae__deliver(m, &t, o);
    VAE__TRY(vae__take(m, 0, ROCQ_F32, 2, 1, t.ne[3], 1, &stats));
    const rocq_norm_stats_params norm = {.stats = &stats, .x = &t};
    VAE__RUN(m, norm_stats, &norm);
    VAE__TRY(vae__deliver(m, &t, o));
    m->stack.level[0] = level;
    return vae__look(m, &stats);
}

// ---------------------------------------------------------------------------------------------
// Requests
// ---------------------------------------------------------------------------------------------

static rocq_result vae__choose(vae_model *m, const rocq_tensor *input);

static vae__value vae__input(const rocq_tensor *t) {
    vae__value x;
    memset(&x, 0, sizeof x);
    x.full = *t;
    x.size[0] = x.span.n[0] = t->ne[1];
    x.size[1] = x.span.n[1] = t->ne[2];
    return x;
}

// A value that leaves its format is infinite, and from there on so are the norms, up to the last.
static rocq_result vae__check_finite(vae_model *m) {
    const vae_conv *c = NULL;
    for (int32_t i = 0; i < m->net->n_convs; i++) {
        if (m->net->convs[i].norm == VAE__GROUP_NORM) c = &m->net->convs[i];
    }
    return c ? vae__look(m, &c->stats) : ROCQ_OK;
}

// Pictures of one size, at once, or a video.
static rocq_result vae__run(vae_model *m, const rocq_tensor *input) {
    vae__value x = vae__input(input), next;
    m->chunks = vae__tiles_of(input->ne[3], m->video ? m->plan.chunk : 0, m->job->chunk_overlap);
    VAE__TRY(vae__begin(m, input->ne[1], input->ne[2]));
    if (m->plan.tiling != VAE_EXACT) {
        m->n_segments = 1;
        m->segments[0].end = m->net->n_modules;
        m->segments[0].tile = 0;
    } else if (m->planning) {
        VAE__TRY(vae__choose(m, input));
    }
    for (int32_t s = 0, a = 0; s < m->n_segments; a = m->segments[s++].end) {
        VAE__TRY(vae__segment(m, a, m->segments[s].end, m->segments[s].tile, &x, &next));
        x = next;
    }
    return vae__check_finite(m);
}

// Zeros, a frame at a time.
static rocq_result vae__clear(vae_model *m, const rocq_tensor *t) {
    const rocq_tensor frame = rocq_tensor_slice(t, 3, 0, 1);
    const int64_t size = rocq_tensor_size(&frame);
    rocq_result result = ROCQ_OK;
    void *zeros;
    if (m->planning) return ROCQ_OK;
    VAE__TRY(vae__flush(m));
    VAE__TRY(vae__allocate(m, &zeros, (size_t)size));
    for (int64_t i = 0; i < t->ne[3] && result == ROCQ_OK; i++) {
        const rocq_tensor to = rocq_tensor_slice(t, 3, i, 1);
        result = rocq_upload(m->ctx, &to, zeros, size);
    }
    vae__free(m, zeros, (size_t)size);
    return result;
}

// All tiles of m->input, mixed where they overlap. What each conv keeps of a chunk for the next is
// as much as many frames of the result, so a tile goes through all of a video before the next
// begins.
static rocq_result vae__blend(vae_model *m, int64_t n_out) {
    const int64_t s = m->scale, w = m->job->width, h = m->job->height;
    const vae__tiles across = vae__tiles_of(w * s, m->plan.tile, m->plan.overlap);
    const vae__tiles down = vae__tiles_of(h * s, m->plan.tile, m->plan.overlap);
    const double before = m->flops;
    VAE__TRY(vae__take(m, 0, ROCQ_F32, 3, w * s, h * s, n_out, &m->blended));
    VAE__TRY(vae__clear(m, &m->blended));
    m->blending = true;
    for (int64_t tile = 0; tile < (m->planning ? 1 : across.n * down.n); tile++) {
        const int64_t i = tile % across.n, j = tile / across.n;
        const int64_t levels[2] = {m->stack.level[0], m->stack.level[1]};
        const int64_t start[4] = {0, vae__start(&across, i) / s, vae__start(&down, j) / s, 0};
        const int64_t ne[4] = {m->input.ne[0], across.size / s, down.size / s, m->input.ne[3]};
        rocq_tensor part;
        VAE__TRY(rocq_tensor_view(&part, &m->input, start, ne));
        m->at[0] = vae__start(&across, i);
        m->at[1] = vae__start(&down, j);
        memset(m->ramp, 0, sizeof m->ramp);
        VAE__TRY(vae__ramp(m, 0, &across, i));
        VAE__TRY(vae__ramp(m, 1, &down, j));
        VAE__TRY(vae__run(m, &part));
        memcpy(m->stack.level, levels, sizeof levels);
    }
    m->blending = false;
    memset(m->at, 0, sizeof m->at);
    if (m->planning) m->flops = before + (m->flops - before) * (double)(across.n * down.n);
    m->plan.n_tiles = (int32_t)(across.n * down.n);
    const int64_t size[2] = {w * s, h * s};
    const vae__span whole = vae__whole(size);
    for (int64_t i = 0; i < (m->planning ? 1 : n_out); i++) {
        const rocq_tensor frame = rocq_tensor_slice(&m->blended, 3, i, 1);
        VAE__TRY(vae__download(m, &frame, &whole, m->first + i));
    }
    return ROCQ_OK;
}

// On a GPU weights in block formats are repacked in scratch memory, of 1 MiB at most.
static int64_t vae__load_scratch(const vae_model *m) {
    for (int32_t i = 0; i < m->net->n_convs && m->options.stream; i++) {
        if (m->net->convs[i].w.layout == ROCQ_LAYOUT_PLANAR) return 1 << 20;
    }
    return 0;
}

// Batches of one size have the same graphs. The latents of the first are uploaded here, those of
// the others while the one before them is computed.
static rocq_result vae__begin_batch(vae_model *m, int64_t first, int64_t n, int64_t batch,
                                    int64_t each) {
    const int64_t left = m->job->n - m->batch_end;
    VAE__TRY(vae__flush(m));
    if (m->mode != VAE__RUN_NOW) {
        if (first == 0) m->last_batch_at = 0;
        else if (n < batch && !m->recorded) m->last_batch_at = m->n_graphs;
        m->mode = m->recorded || (first > 0 && n == batch) ? VAE__REPLAY : VAE__RECORD;
        m->graph_at = n < batch ? m->last_batch_at : 0;
    }
    m->n_ahead = each * (left < batch ? left : batch);
    if (first > 0) return ROCQ_OK;
    if (left == 0) return vae__upload(m, &m->input, 0, n * each);
    return vae__upload(m, &m->ahead, 0, n * each);
}

// The request by m->plan; planning, the first batch for all.
static rocq_result vae__batches(vae_model *m) {
    const vae_request *job = m->job;
    const int64_t each = m->video ? job->frames : 1, total = job->n;
    const int64_t batch = m->video ? 1 : m->plan.batch;
    const bool blend = m->plan.tiling == VAE_BLEND || (m->video && job->chunk_overlap > 0);
    m->flops = 0;
    m->op_scratch = m->planning ? vae__load_scratch(m) : 0;
    m->last_conv = -1;
    m->blending = false;
    memset(m->at, 0, sizeof m->at);
    memset(m->ramp, 0, sizeof m->ramp);
    for (int64_t i = 0; i < (m->planning ? 1 : total); i += batch) {
        const int64_t n = total - i < batch ? total - i : batch;
        const bool more = total > batch;
        m->stack.level[0] = m->stack.level[1] = 0;
        if (more) {
            VAE__TRY(vae__take(m, 0, ROCQ_F32, m->net->c_in, job->width, job->height, batch * each,
                               &m->ahead));
        }
        VAE__TRY(vae__take(m, 0, ROCQ_F32, m->net->c_in, job->width, job->height, n * each,
                           &m->input));
        m->first = i * vae_frames(m, each);
        m->batch_end = i + n;
        if (!m->planning) VAE__TRY(vae__begin_batch(m, i, n, batch, each));
        if (more) {
            const rocq_tensor from = rocq_tensor_slice(&m->ahead, 3, 0, n * each);
            const rocq_cast_params copy = {.y = &m->input, .x = &from};
            VAE__RUN(m, cast, &copy);
        }
        if (m->tanh_latents && m->net == &m->decoder) { // 3 tanh(latent / 3), uploaded divided
            const rocq_activate_params tanh_of = {.y = &m->input, .x = &m->input,
                                                  .activation = ROCQ_ACT_TANH};
            const rocq_scale_params scale = {.y = &m->input, .x = &m->input, .scale = 3};
            VAE__RUN(m, activate, &tanh_of);
            VAE__RUN(m, scale, &scale);
        }
        if (blend) VAE__TRY(vae__blend(m, n * vae_frames(m, each)));
        else VAE__TRY(vae__run(m, &m->input));
    }
    if (m->planning) m->flops *= (double)total / (double)batch;
    return ROCQ_OK;
}

// ---------------------------------------------------------------------------------------------
// Plans
// ---------------------------------------------------------------------------------------------

// What it takes to come from one boundary between modules to a later one.
typedef struct vae__edge {
    double flops;
    int64_t stack, scratch; // bytes
    bool there;
} vae__edge;

typedef struct vae__graph {
    int32_t n;
    vae__edge edges[VAE__MAX_MODULES][VAE__MAX_MODULES + 1][2]; // whole, in tiles
} vae__graph;

// The cheapest way from the first boundary to the last whose steps take at most so much of the
// stack and so much scratch; its flops, or DBL_MAX where there is none.
static double vae__path(vae_model *m, const vae__graph *g, int64_t stack, int64_t scratch) {
    double best[VAE__MAX_MODULES + 1];
    int32_t from[VAE__MAX_MODULES + 1], tile[VAE__MAX_MODULES + 1];
    best[0] = 0;
    for (int32_t b = 1; b <= g->n; b++) {
        best[b] = DBL_MAX;
        from[b] = tile[b] = 0;
        for (int32_t i = 0; i < 2 * b; i++) {
            const int32_t a = i / 2;
            const vae__edge *e = &g->edges[a][b][i % 2];
            if (!e->there || e->stack > stack || e->scratch > scratch || best[a] == DBL_MAX ||
                best[a] + e->flops >= best[b]) continue;
            best[b] = best[a] + e->flops;
            from[b] = a;
            tile[b] = i % 2 ? m->plan.tile : 0;
        }
    }
    if (best[g->n] == DBL_MAX) return DBL_MAX;
    m->n_segments = 0;
    for (int32_t b = g->n; b > 0; b = from[b]) m->n_segments++;
    for (int32_t b = g->n, i = m->n_segments - 1; b > 0; b = from[b], i--) {
        m->segments[i].end = b;
        m->segments[i].tile = tile[b];
    }
    return best[g->n];
}

// The smallest stack with which there is a way that takes at most so much scratch.
static int64_t vae__least(const vae__graph *g, int64_t scratch) {
    int64_t least[VAE__MAX_MODULES + 1];
    least[0] = 0;
    for (int32_t b = 1; b <= g->n; b++) {
        least[b] = INT64_MAX;
        for (int32_t i = 0; i < 2 * b; i++) {
            const vae__edge *e = &g->edges[i / 2][b][i % 2];
            if (!e->there || e->scratch > scratch) continue;
            const int64_t most = e->stack > least[i / 2] ? e->stack : least[i / 2];
            if (most < least[b]) least[b] = most;
        }
    }
    return least[g->n];
}

// The stack and the scratch of a way each count at their largest. So every amount of scratch that a
// step takes is tried as the limit of all: for the cheapest way of at most `limit` bytes in all,
// and for the one of least memory. Without limit (0), half as much again as the least: it is far
// cheaper.
static void vae__best_path(vae_model *m, const vae__graph *g, int64_t limit) {
    const vae__edge *edges = &g->edges[0][0][0];
    const int64_t n = 2 * (VAE__MAX_MODULES + 1) * (int64_t)g->n;
    double cheapest = DBL_MAX;
    int64_t least = INT64_MAX, stack = 0, scratch = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t needed = edges[i].there ? vae__least(g, edges[i].scratch) : INT64_MAX;
        if (needed < INT64_MAX && needed + edges[i].scratch < least) {
            least = needed + edges[i].scratch;
            stack = needed;
            scratch = edges[i].scratch;
        }
    }
    if (limit == 0) limit = least + least / 2;
    for (int64_t i = 0; i < n; i++) {
        const int64_t s = edges[i].scratch;
        const double flops = edges[i].there ? vae__path(m, g, limit - s, s) : DBL_MAX;
        if (flops >= cheapest) continue;
        cheapest = flops;
        stack = limit - s;
        scratch = s;
    }
    vae__path(m, g, stack, scratch);
}

// Whether modules a to b - 1 can run in tiles of m->plan.tile pixels: they have no attention, and
// reach no further past a tile than its own size. So the first tile with neighbours on all sides reads as
// much as any, although there is only one before it, and stands for the others while planning.
static bool vae__tileable(const vae_model *m, int32_t a, int32_t b) {
    const int64_t cell = vae__largest_cell(m, m->plan.tile);
    const vae__span whole = vae__cell(m, m->size[b], m->plan.tile, cell);
    vae__span o = whole;
    for (int32_t i = a; i < b; i++) {
        if (m->net->modules[i].kind == VAE__ATTENTION) return false;
    }
    const vae_module *last = &m->net->modules[b - 1];
    const vae_conv *end = &m->net->convs[last->first + last->n - 1];
    if (b < m->net->n_modules && end->upsample > 1) return false; // see vae__align
    for (int32_t i = b - 1; i >= a; i--) {
        o = vae__module_needs(m, i, m->net->modules[i].n, &o);
    }
    const vae__span own = vae__cell(m, m->size[a], m->plan.tile, cell);
    for (int d = 0; d < 2; d++) { // past the left and the right of it, or above and below
        if (own.at[d] - o.at[d] > own.n[d]) return false;
        if (o.at[d] + o.n[d] - own.at[d] > 2 * own.n[d]) return false;
    }
    return true;
}

// Plans one step, from a value that is there whole.
static rocq_result vae__measure_edge(vae_model *m, const rocq_tensor *input, int32_t a, int32_t b,
                                     int32_t tile, vae__edge *e) {
    const int64_t levels[2] = {m->stack.level[0], m->stack.level[1]};
    const vae__span whole = vae__whole(m->size[a]);
    vae__value x = vae__input(input), out;
    m->flops = 0;
    m->op_scratch = 0;
    m->stack.peak = levels[0] + levels[1];
    if (a > 0) {
        VAE__TRY(vae__new(m, 0, m->stream, vae__channels_at(m->net, a), m->size[a], &whole,
                          vae__frames_at(m, a, m->chunks.total), &x));
    }
    VAE__TRY(vae__segment(m, a, b, tile, &x, &out));
    e->stack = m->stack.peak;
    e->scratch = m->op_scratch;
    e->flops = m->flops;
    e->there = true;
    memcpy(m->stack.level, levels, sizeof levels);
    return ROCQ_OK;
}

// Which values are kept whole. Of a video, with all its frames, only one, which tiles begin with.
static rocq_result vae__choose(vae_model *m, const rocq_tensor *input) {
    vae__graph *g;
    const double flops = m->flops;
    const int64_t peak = m->stack.peak, scratch = m->op_scratch;
    rocq_result result = ROCQ_OK;
    VAE__TRY(vae__allocate(m, &g, sizeof *g));
    g->n = m->net->n_modules;
    m->comparing = true;
    for (int32_t a = 0; a < g->n && result == ROCQ_OK; a++) {
        for (int32_t b = a + 1; b <= g->n && result == ROCQ_OK; b++) {
            const bool convs = m->net->modules[b - 1].kind == VAE__CONVS;
            if (m->video ? a == 0 && convs : b == a + 1) {
                result = vae__measure_edge(m, input, a, b, 0, &g->edges[a][b][0]);
            }
            if (result != ROCQ_OK || (m->video && b < g->n) || !vae__tileable(m, a, b)) continue;
            result = vae__measure_edge(m, input, a, b, m->plan.tile, &g->edges[a][b][1]);
        }
    }
    if (result == ROCQ_OK) vae__best_path(m, g, m->limit);
    m->comparing = false;
    vae__free(m, g, sizeof *g);
    m->flops = flops;
    m->stack.peak = peak;
    m->op_scratch = scratch;
    return result;
}

// Computes what m->plan takes, its sizes and its flops, with the code that runs it later: ops only
// raise m->op_scratch to what they need.
static rocq_result vae__measure_plan(vae_model *m, int64_t base) {
    VAE__TRY(rocq_plan_begin(m->ctx, &m->op_scratch));
    m->planning = true;
    vae__stack_init(m, NULL);
    const rocq_result result = vae__batches(m);
    m->planning = false;
    rocq_plan_end(m->ctx);
    m->plan.activation_bytes = m->stack.peak;
    // What the context has as scratch stays, where that fits the budget.
    m->plan.scratch_bytes = m->op_scratch > m->scratch ? m->op_scratch : m->scratch;
    m->plan.peak_bytes = base + m->plan.activation_bytes + m->plan.scratch_bytes;
    if (m->budget > 0 && m->plan.peak_bytes > m->budget) {
        m->plan.peak_bytes -= m->plan.scratch_bytes - m->op_scratch;
        m->plan.scratch_bytes = m->op_scratch;
    }
    m->plan.flops = m->flops;
    if (m->plan.tiling == VAE_EXACT) {
        m->plan.n_tiles = (int32_t)vae__n_cells(m, m->plan.tile);
    } else if (m->plan.tiling == VAE_WHOLE) {
        m->plan.n_tiles = 1;
    }
    return result;
}

// A candidate, with the largest batch and chunk that fit; without limit (0) the first. Keeps in
// *best the plan if it fits, and in *least the smallest.
static rocq_result vae__try(vae_model *m, vae_tiling tiling, int32_t tile, int32_t overlap,
                            int64_t base, int64_t budget, bool *fits, int64_t *least) {
    const vae_request *job = m->job;
    const int32_t frames = m->video ? job->frames : 1;
    int32_t batch = m->video || tiling == VAE_EXACT ? 1 : job->n;
    int32_t chunk = job->chunk > 0 && job->chunk < frames ? job->chunk : frames;
    *fits = false;
    for (;;) {
        const int32_t n_chunks =
            (int32_t)vae__tiles_of(frames, chunk, job->chunk_overlap).n;
        memset(&m->plan, 0, sizeof m->plan);
        m->plan.tiling = tiling;
        m->plan.tile = tiling == VAE_WHOLE ? 0 : tile;
        m->plan.overlap = tiling == VAE_BLEND ? overlap : 0;
        m->plan.batch = batch;
        m->plan.chunk = chunk;
        m->plan.n_chunks = n_chunks;
        VAE__TRY(vae__measure_plan(m, base));
        if (m->plan.peak_bytes < *least) *least = m->plan.peak_bytes;
        *fits = budget == 0 || m->plan.peak_bytes <= budget;
        if (*fits) return ROCQ_OK;
        const int32_t shorter = (chunk + 1) / 2;
        if (batch > 1) batch = (batch + 1) / 2;
        else if (chunk > 1 && job->chunk <= 0 && shorter > job->chunk_overlap) chunk = shorter;
        else return ROCQ_OK;
    }
}

// Exact tiles of all sizes, or of the one asked for: the cheapest that fits, or without budget the
// smallest.
static rocq_result vae__try_exact(vae_model *m, int64_t base, int64_t budget, bool *fits,
                                  int64_t *least) {
    const vae_request *job = m->job;
    const int32_t longest = m->scale * (job->width > job->height ? job->width : job->height);
    vae_plan best;
    vae__segment_of segments[VAE__MAX_MODULES];
    int32_t n_segments = 0;
    memset(&best, 0, sizeof best);
    for (int32_t tile = 1024; tile >= 4 * m->scale;
         tile = tile % 3 == 0 ? tile * 2 / 3 : tile * 3 / 4) {
        const int32_t size = job->tile > 0 ? job->tile : tile;
        bool one = false;
        const bool smallest = size == 4 * m->scale; // also for a picture that is smaller
        if (job->tile > 0 || smallest ||
            (size < (m->net == &m->decoder ? longest : longest / m->scale) &&
             size % m->scale == 0)) {
            m->limit = budget > base ? budget - base : budget > 0 ? -1 : 0;
            for (int k = 0; k < 4; k++) { // other tiles may take a little more than those compared
                VAE__TRY(vae__try(m, VAE_EXACT, size, 0, base, budget, &one, least));
                if (one || m->limit < 0) break;
                m->limit -= m->plan.peak_bytes - budget;
                if (k == 2 || m->limit < 0) m->limit = -1; // the smallest, at last
            }
            if (one && (n_segments == 0 || (budget > 0 ? m->plan.flops < best.flops
                                                       : m->plan.peak_bytes < best.peak_bytes))) {
                best = m->plan;
                n_segments = m->n_segments;
                memcpy(segments, m->segments, sizeof segments);
            }
        }
        if (job->tile > 0) break;
    }
    *fits = n_segments > 0;
    if (!*fits) return ROCQ_OK;
    m->plan = best;
    m->n_segments = n_segments;
    memcpy(m->segments, segments, sizeof segments);
    return ROCQ_OK;
}

static rocq_result vae__try_blend(vae_model *m, int64_t base, int64_t budget, bool *fits,
                                  int64_t *least) {
    const int32_t s = m->scale;
    int32_t tile = m->job->tile > 0 ? m->job->tile : VAE__TILE / s * s;
    for (;;) {
        int32_t overlap = m->job->overlap > 0 ? m->job->overlap : VAE__OVERLAP / s * s;
        if (m->job->overlap <= 0 && overlap > tile / 4) overlap = tile / 4 / s * s;
        VAE__TRY(vae__try(m, VAE_BLEND, tile, overlap, base, budget, fits, least));
        if (*fits || m->job->tile > 0 || tile / 4 * 3 / s * s < 8 * s ||
            tile / 4 * 3 / s * s <= m->job->overlap) return ROCQ_OK;
        tile = tile / 4 * 3 / s * s;
    }
}

static rocq_result vae__check_job(vae_model *m, vae_request *job) {
    const int32_t s = m->scale, units = m->net == &m->encoder ? s : 1;
    if (job->frames == 0) job->frames = 1;
    if (job->n == 0) job->n = 1;
    if (job->width < 1 || job->height < 1 || job->width > 1 << 16 || job->height > 1 << 16 ||
        job->n < 1 || job->frames < 1 || job->n > 1 << 20 || job->frames > 1 << 20) {
        return vae__fail(m, ROCQ_E_ARGUMENT, "%d pictures of %d frames of %d x %d", (int)job->n,
                         (int)job->frames, (int)job->width, (int)job->height);
    }
    if (job->width % units != 0 || job->height % units != 0) {
        return vae__fail(m, ROCQ_E_SHAPE, "pictures of %d x %d, whose sides are no multiples of %d",
                         (int)job->width, (int)job->height, (int)s);
    }
    if (job->channels != 0 && job->channels != m->z) {
        return vae__fail(m, ROCQ_E_SHAPE, "latents of %d channels, the model's have %d",
                         (int)job->channels, (int)m->z);
    }
    if (job->frames > 1 && !m->video) {
        return vae__fail(m, ROCQ_E_SHAPE, "%d frames: %s is not a model of videos",
                         (int)job->frames, m->family);
    }
    if ((int)job->tiling < 0 || job->tiling > VAE_EXACT || job->tile < 0 || job->overlap < 0 ||
        job->chunk < 0 || job->chunk_overlap < 0 || job->tile % s != 0 || job->overlap % s != 0 ||
        job->memory_budget < 0) {
        return vae__fail(m, ROCQ_E_ARGUMENT, "tile %d and overlap %d are no multiples of %d, or a "
                         "field is out of range", (int)job->tile, (int)job->overlap, (int)s);
    }
    const int32_t tile = job->tile > 0 ? job->tile : VAE__TILE / s * s;
    if (job->overlap >= tile) {
        return vae__fail(m, ROCQ_E_ARGUMENT, "tiles of %d pixels that overlap by %d", (int)tile,
                         (int)job->overlap);
    }
    if (job->chunk_overlap > 0 && job->chunk > 0 && job->chunk_overlap >= job->chunk) {
        return vae__fail(m, ROCQ_E_ARGUMENT, "chunks of %d frames that overlap by %d",
                         (int)job->chunk, (int)job->chunk_overlap);
    }
    if (m->video && job->tiling == VAE_EXACT && job->chunk_overlap > 0) {
        return vae__fail(m, ROCQ_E_ARGUMENT, "chunks that overlap are blended, and so not exact");
    }
    if (m->net == &m->encoder && job->tiling == VAE_BLEND) {
        return vae__fail(m, ROCQ_E_UNSUPPORTED, "latents are not blended: encode whole, or exact");
    }
    return ROCQ_OK;
}

// Whether two requests are planned alike.
static bool vae__alike(const vae_request *a, const vae_request *b) {
    return a->width == b->width && a->height == b->height && a->frames == b->frames &&
           a->n == b->n && a->tiling == b->tiling && a->tile == b->tile &&
           a->overlap == b->overlap && a->chunk == b->chunk &&
           a->chunk_overlap == b->chunk_overlap && !a->pixels == !b->pixels &&
           !a->values == !b->values;
}

// Tilings in the order in which they are wished for: the first that fits.
static rocq_result vae__try_tilings(vae_model *m, int64_t base, int64_t budget, bool *fits,
                                    int64_t *least) {
    const vae_tiling tiling = m->job->tiling;
    const bool overlap = m->video && m->job->chunk_overlap > 0; // chunks are blended
    const bool exact = tiling == VAE_EXACT || (tiling == VAE_AUTO && !overlap);
    const bool blend = tiling == VAE_BLEND || (tiling == VAE_AUTO && overlap);
    if (tiling == VAE_AUTO || tiling == VAE_WHOLE) {
        VAE__TRY(vae__try(m, VAE_WHOLE, 0, 0, base, budget, fits, least));
    }
    if (!*fits && exact) VAE__TRY(vae__try_exact(m, base, budget, fits, least));
    if (!*fits && blend) VAE__TRY(vae__try_blend(m, base, budget, fits, least));
    return ROCQ_OK;
}

// Host memory that rocq_conv_weights has while it fills one of the streamed weights, at most.
static int64_t vae__loading_bytes(const vae_model *m) {
    int64_t most = 0;
    for (int32_t i = 0; i < m->net->n_convs; i++) {
        const vae_conv *c = &m->net->convs[i];
        const int64_t rows = 2 * c->w.ne[0] * (int64_t)sizeof(float);
        const int64_t bytes = rows + (m->gpu ? rocq_tensor_size(&c->w) : 0);
        if (c->streamed && bytes > most) most = bytes;
    }
    return most;
}

// The same with weights that are read whenever they are used: planned with as few in memory as
// there can be, then with as many as still fit.
static rocq_result vae__try_streaming(vae_model *m, int64_t base, int64_t budget, bool *fits,
                                      int64_t *least) {
    int64_t sizes[VAE__MAX_CONVS + 1], smallest = INT64_MAX;
    for (int32_t n = 0; n <= m->net->n_convs; n++) {
        VAE__TRY(vae__place(m, m->net, n, NULL, &sizes[n]));
        sizes[n] += vae__loading_bytes(m);
        if (sizes[n] < smallest) smallest = sizes[n];
    }
    VAE__TRY(vae__try_tilings(m, base + smallest, budget, fits, least));
    if (!*fits) return ROCQ_OK;
    const int64_t room = budget - m->plan.peak_bytes + smallest;
    int32_t n = 0;
    while (sizes[n] > room) n++;
    m->plan.n_streamed = n;
    m->plan.peak_bytes += sizes[n] - smallest;
    return vae__place(m, m->net, n, NULL, &m->plan.weight_bytes);
}

static rocq_result vae__plan(vae_model *m, vae_net *net, vae_request *job) {
    rocq_stats stats;
    bool fits = false;
    int64_t least = INT64_MAX;
    m->net = net;
    m->job = job;
    if (!m->ctx) return vae__fail(m, ROCQ_E_STATE, "the model is not open");
    if (net->n_modules == 0) return vae__fail(m, ROCQ_E_STATE, "the encoder was not loaded");
    VAE__TRY(vae__check_job(m, job));
    VAE__TRY(rocq_get_stats(m->ctx, &stats));
    int64_t budget = vae__info(m).desc.memory_budget;
    if (job->memory_budget > 0 && (budget == 0 || job->memory_budget < budget)) {
        budget = job->memory_budget;
    }
    const int64_t base = stats.live_bytes - stats.scratch_bytes - m->memory.size -
                         m->weights.size - m->graph_bytes;
    const int64_t scratch = stats.scratch_bytes, more = base - m->planned_base;
    // As the last time: if memory was taken elsewhere since, what was best is so while it fits.
    if (net == m->planned_net && vae__alike(job, &m->planned) && budget == m->budget &&
        (scratch == m->planned_scratch || scratch == m->plan.scratch_bytes) &&
        (budget == 0 || (more >= 0 && m->plan.peak_bytes + more <= budget))) {
        m->plan.peak_bytes += more;
        m->planned_base = base;
        return ROCQ_OK;
    }
    m->planned_net = NULL;
    vae__drop_graphs(m);
    m->scratch = scratch;
    m->budget = budget;
    VAE__TRY(vae__try_tilings(m, base + m->weight_bytes, budget, &fits, &least));
    m->plan.weight_bytes = m->weight_bytes;
    if (!fits && m->options.stream) {
        VAE__TRY(vae__try_streaming(m, base, budget, &fits, &least));
    }
    if (!fits) {
        m->plan.smallest_bytes = least;
        return vae__fail(m, ROCQ_E_BUDGET,
                         "%d x %d does not fit a budget of %.0f bytes; the smallest "
                         "that would do is %.0f",
                         (int)job->width, (int)job->height, (double)budget, (double)least);
    }
    const vae_plan plan = m->plan;
    vae__segment_of segments[VAE__MAX_MODULES];
    const int32_t n_segments = m->n_segments;
    memcpy(segments, m->segments, sizeof segments);
    VAE__TRY(vae__try(m, VAE_WHOLE, 0, 0, 0, 0, &fits, &least));
    const double whole = m->plan.flops;
    m->planned_net = net;
    m->planned = *job;
    m->planned_base = base;
    m->planned_scratch = scratch;
    m->plan = plan;
    m->plan.whole_flops = whole;
    m->n_segments = n_segments;
    memcpy(m->segments, segments, sizeof segments);
    return ROCQ_OK;
}

// ---------------------------------------------------------------------------------------------
// Bodies of the interface
// ---------------------------------------------------------------------------------------------

static rocq_result vae__open(vae_model *m, vae__file *f) {
    rocq_format format = m->gpu ? ROCQ_F16 : ROCQ_F32;
    if (m->options.weights && rocq_format_from_name(&format, m->options.weights) != ROCQ_OK) {
        return vae__fail(m, ROCQ_E_FORMAT, "there is no format %s", m->options.weights);
    }
    format = m->gpu ? ROCQ_F16 : ROCQ_F32;
    if (m->options.activations &&
        (rocq_format_from_name(&format, m->options.activations) != ROCQ_OK ||
         (format != ROCQ_F32 && format != ROCQ_F16 && format != ROCQ_BF16))) {
        return vae__fail(m, ROCQ_E_FORMAT, "activations are f32, f16 or bf16, not %s",
                         m->options.activations);
    }
    if (m->options.n_groups < 0) {
        return vae__fail(m, ROCQ_E_ARGUMENT, "%d groups", (int)m->options.n_groups);
    }
    if (m->options.n_groups == 0) m->options.n_groups = 32;
    m->stream = m->inner = format;
    m->why_stream = m->options.activations ? "as asked for" : "the default of the backend";
    return vae__load(m, f);
}

static void vae__forget_file(vae_model *m) {
    vae__free(m, m->file.entries, (size_t)(m->file.capacity + 1) * sizeof *m->file.entries);
    memset(&m->file, 0, sizeof m->file);
}

static inline rocq_result vae_open(vae_model *m, rocq_ctx *ctx, const rocq_gguf *gguf,
                                   safetensors_file *safetensors, const vae_options *options) {
    char error[sizeof m->error];
    memset(m, 0, sizeof *m);
    if (!ctx || !gguf == !safetensors) {
        return vae__fail(m, ROCQ_E_ARGUMENT, "there is no context, or not one file");
    }
    m->ctx = ctx;
    if (options) m->options = *options;
    m->gpu = vae__info(m).backend == ROCQ_BACKEND_GPU;
    m->file.gguf = gguf;
    m->file.safetensors = safetensors;
    const rocq_result result = vae__done(m, vae__open(m, &m->file));
    if (!m->options.stream) vae__forget_file(m);
    if (result != ROCQ_OK) {
        memcpy(error, m->error, sizeof error);
        vae_close(m);
        memcpy(m->error, error, sizeof error);
    }
    return result;
}

static inline void vae_trim(vae_model *m) {
    if (!m->ctx) return;
    vae__drop_graphs(m);
    rocq_buffer_free(m->ctx, &m->memory);
}

static inline void vae_close(vae_model *m) {
    if (m->ctx) {
        vae_trim(m);
        rocq_buffer_free(m->ctx, &m->weights);
        vae__forget_file(m);
        vae__free(m, m->decoder.convs, VAE__MAX_CONVS * sizeof(vae_conv));
        vae__free(m, m->encoder.convs, VAE__MAX_CONVS * sizeof(vae_conv));
    }
    memset(m, 0, sizeof *m);
}

static rocq_result vae__run_job(vae_model *m, vae_net *net, vae_request *job) {
    VAE__TRY(vae__plan(m, net, job));
    const vae_net *laid = m->plan.weight_bytes < m->weight_bytes ? net : NULL;
    const int64_t memory = m->memory.size, weights = m->weights.size;
    // What has another size is freed before anything is taken, so that the peak is as planned.
    if (memory != m->plan.activation_bytes || weights != m->plan.weight_bytes) vae_trim(m);
    if (m->stream != m->recorded_stream) vae__drop_graphs(m);
    VAE__TRY(rocq_trim(m->ctx, m->plan.scratch_bytes));
    VAE__TRY(vae__lay(m, laid, m->plan.n_streamed));
    if (!m->memory.size) {
        VAE__TRY(rocq_buffer_alloc(m->ctx, &m->memory, m->plan.activation_bytes));
    }
    VAE__TRY(rocq_reserve(m->ctx, m->plan.scratch_bytes));
    vae__stack_init(m, &m->memory);
    m->finite = true;
    m->reported = 0;
    if (!vae__info(m).desc.no_graphs && m->plan.n_streamed == 0) {
        m->mode = m->recorded ? VAE__REPLAY : VAE__RECORD;
    }
    rocq_result result = vae__batches(m);
    if (result == ROCQ_OK) result = vae__flush(m);
    if (result != ROCQ_OK) {
        vae__drop_graphs(m);
        return result;
    }
    m->recorded = m->mode != VAE__RUN_NOW;
    m->recorded_stream = m->stream;
    m->mode = VAE__RUN_NOW;
    VAE__TRY(rocq_sync(m->ctx));
    if (m->finite) return ROCQ_OK;
    if (m->stream != ROCQ_F16) {
        return vae__fail(m, ROCQ_E_BOUNDS, "values exceed %s", rocq_format_name(m->stream));
    }
    m->stream = ROCQ_BF16; // of the same size, so the plan stays
    if (m->decoder.convs[m->decoder.n_convs - 1].norm == VAE__NO_NORM) {
        m->inner = ROCQ_BF16; // without norms it is as large inside of blocks
    }
    m->why_stream = "values exceeded F16";
    return vae__run_job(m, net, job);
}

static inline rocq_result vae_plan_decode(vae_model *m, const vae_request *job, vae_plan *plan) {
    vae_request copy = *job;
    m->error[0] = '\0';
    const rocq_result result = vae__done(m, vae__plan(m, &m->decoder, &copy));
    *plan = m->plan;
    return result;
}

static inline rocq_result vae_plan_encode(vae_model *m, const vae_request *job, vae_plan *plan) {
    vae_request copy = *job;
    m->error[0] = '\0';
    copy.pixels = NULL;
    const rocq_result result = vae__done(m, vae__plan(m, &m->encoder, &copy));
    *plan = m->plan;
    return result;
}

static inline rocq_result vae_decode(vae_model *m, const vae_request *job) {
    vae_request copy = *job;
    m->error[0] = '\0';
    if (!job->latents || (!job->pixels && !job->values)) {
        return vae__fail(m, ROCQ_E_ARGUMENT, "there are no latents, or neither pixels nor values");
    }
    return vae__done(m, vae__run_job(m, &m->decoder, &copy));
}

static inline rocq_result vae_encode(vae_model *m, const vae_request *job) {
    vae_request copy = *job;
    m->error[0] = '\0';
    if (!job->from_pixels == !job->from_values || !job->to_latents) {
        return vae__fail(m, ROCQ_E_ARGUMENT, "there is not one picture, or no place for latents");
    }
    copy.pixels = NULL;
    copy.values = NULL;
    return vae__done(m, vae__run_job(m, &m->encoder, &copy));
}

#undef VAE__TRY
#undef VAE__RUN

#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#endif // VAE_H
