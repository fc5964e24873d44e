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
// Three headers, which are copied together, and safetensors.h:
//     vae.h            the interface, requests and how they are planned
//     vae_networks.h   files, networks, weights: what a new architecture or way of naming changes
//     vae_tiles.h      how a network runs over pictures and videos, whole, in tiles and in chunks

#ifndef VAE_H
#define VAE_H

#include "../rocq.h"
#include "safetensors.h"

#include <float.h>
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
                             // other models that is found out, and the request computed again, with
                             // a 64th where there are GroupNorms, else or if that exceeds F16 too
                             // with BF16; vae_model.why_stream says so
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
    uint8_t *pixels;         // RGB [3, W, H, frames out, n], W = 8 width; or NULL. With a GPU they
                             // come sooner in pinned memory, see rocq_download
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
    int64_t weight_bytes;    // of those; activations and what ops need beside them; and what the
    int64_t activation_bytes, scratch_bytes; // context has as scratch memory, or needs to load
    int32_t n_streamed;      // convolutions whose weights are read anew, see vae_options.stream
    int64_t limit;           // of activation_bytes, for most_scratch of convolutions
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
    rocq_tensor w;              // [C k k kt, M], or folded [C 2 2 kt, M, 4], see rocq_conv_params
    rocq_tensor vectors[VAE__VECTORS]; // bias [M], of what is read norm_weight and norm_bias [C]
    int32_t c, m, k, kt;
    int32_t stride, upsample, pad; // pad: zeros left of and above
    int32_t norm;
    rocq_activation before, after;
    bool folded;
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
    bool bands;        // in bands of `tile` rows of pixels, see vae__bands
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
    int64_t op_scratch, scratch; // bytes, of the op being planned; that the context has already
    int64_t budget;              // or 0
    double flops, chain_flops, norm_flops;
    vae__tiles chunks;          // of a video's latent frames; of pictures, all at once
    int64_t size[VAE__MAX_MODULES + 1][2], full[2];
    int64_t rate[VAE__MAX_MODULES + 1]; // frames of a latent frame, but for the first
    int32_t n_segments;
    vae__segment_of segments[VAE__MAX_MODULES];
    rocq_tensor input;          // [c_in, W, H, N] of the batch or video, F32; see vae__tanh
    rocq_tensor blended;        // [3, W, H, N] of the same
    rocq_tensor ramp[3];        // weights of columns, rows and frames of a tile
    bool blending, first_chunk, finite;
    int64_t at[3];              // where a tile goes: column, row, frame or picture, of the batch
    int64_t first;              // of the batch, among the request's pictures or frames
    int64_t batch_end;          // the first picture or video behind it
    rocq_tensor ahead;          // latents of the next one, which are uploaded meanwhile
    int64_t n_ahead;            // pictures or frames of it that are still to be uploaded
    int32_t mode;               // of ops; and whether any have come since the last copy
    bool pending, recorded;     // graphs are those of m->planned, all
    rocq_graph **graphs;        // by the order of their launches; those of the last batch, if it is
    int64_t n_graphs, graphs_capacity, graph_at, last_batch_at; // smaller, from last_batch_at on
    int64_t graph_bytes, live_bytes;  // of memory that they take; before the one being recorded
    double reported;            // flops, to options.progress
    int64_t limit;              // for the stack, while EXACT is planned;
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
// rocq_desc.no_graphs is set. Graphs take a KiB of host memory an op, which no plan counts. Their
// replays are not compared with the ops: rocq_warm would put aside twice all that they write, three
// times the memory that is planned. But where it has refused a graph of the context, such as the
// step of a language model, none are recorded. What rocq_lend has lent is lent no longer then.
static inline rocq_result vae_decode(vae_model *m, const vae_request *job);
static inline rocq_result vae_encode(vae_model *m, const vae_request *job);
static inline void vae_trim(vae_model *m);

// Frames that a video of so many latent frames has.
static inline int64_t vae_frames(const vae_model *m, int64_t latent_frames);

#include "vae_networks.h"
#include "vae_tiles.h"

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
        m->segments[0].bands = false;
    } else if (m->planning) {
        VAE__TRY(vae__choose(m, input));
    }
    for (int32_t s = 0, a = 0; s < m->n_segments; a = m->segments[s++].end) {
        const vae__segment_of *of = &m->segments[s];
        VAE__TRY(vae__segment(m, a, of->end, of->tile, of->bands, &x, &next));
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
    m->reported = m->flops; // reports cut graphs, so they come at the same ops of every batch
    if (m->mode != VAE__RUN_NOW) {
        if (first > 0 && n < batch && !m->recorded) m->last_batch_at = m->n_graphs;
        m->mode = m->recorded || (first > 0 && n == batch) ? VAE__REPLAY : VAE__RECORD;
        m->graph_at = n < batch ? m->last_batch_at : 0;
    }
    m->n_ahead = each * (left < batch ? left : batch);
    if (first > 0) return ROCQ_OK;
    if (left == 0) return vae__upload(m, &m->input, 0, n * each);
    return vae__upload(m, &m->ahead, 0, n * each);
}

// m->input becomes 3 tanh of itself, which has been uploaded divided by 3. A GPU gets it in F16, in
// which it multiplies, and if need be with four channels of zeros behind, as its weights have them
// too: where a position is whole vectors of 16 bytes, the convolution takes 6 us instead of 19
// (H100).
static rocq_result vae__tanh(vae_model *m) {
    const rocq_tensor from = m->input;
    const int64_t z = m->z, more = m->decoder.convs[0].c - z;
    if (m->gpu) {
        VAE__TRY(vae__take(m, 0, ROCQ_F16, z + more, from.ne[1], from.ne[2], from.ne[3],
                           &m->input));
    }
    const rocq_tensor to = rocq_tensor_slice(&m->input, 0, 0, z);
    const rocq_scale_params tanh_of = {.y = &to, .x = &from, .scale = 3,
                                       .activation = ROCQ_ACT_TANH};
    VAE__RUN(m, scale, &tanh_of);
    if (more == 0) return ROCQ_OK;
    const rocq_tensor rest = rocq_tensor_slice(&m->input, 0, z, more);
    const rocq_tensor any = rocq_tensor_slice(&from, 0, 0, more); // finite
    const rocq_scale_params zeros = {.y = &rest, .x = &any, .scale = 0};
    VAE__RUN(m, scale, &zeros);
    return ROCQ_OK;
}

// The request by m->plan; planning, the first batch for all.
static rocq_result vae__batches(vae_model *m) {
    const vae_request *job = m->job;
    const int64_t each = m->video ? job->frames : 1, total = job->n;
    const int64_t batch = m->video ? 1 : m->plan.batch;
    const bool blend = m->plan.tiling == VAE_BLEND || (m->video && job->chunk_overlap > 0);
    m->flops = 0;
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
        if (m->tanh_latents && m->net == &m->decoder) VAE__TRY(vae__tanh(m));
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
    int64_t stack; // bytes
    bool there;
} vae__edge;

typedef struct vae__graph {
    int32_t n;
    vae__edge edges[VAE__MAX_MODULES][VAE__MAX_MODULES + 1][3]; // whole, in tiles, in bands
} vae__graph;

// The cheapest way from the first boundary to the last whose steps take at most so much of the
// stack; its flops, or DBL_MAX where there is none.
static double vae__path(vae_model *m, const vae__graph *g, int64_t stack) {
    double best[VAE__MAX_MODULES + 1];
    int32_t from[VAE__MAX_MODULES + 1], kind[VAE__MAX_MODULES + 1];
    best[0] = 0;
    for (int32_t b = 1; b <= g->n; b++) {
        best[b] = DBL_MAX;
        from[b] = kind[b] = 0;
        for (int32_t i = 0; i < 3 * b; i++) {
            const int32_t a = i / 3;
            const vae__edge *e = &g->edges[a][b][i % 3];
            if (!e->there || e->stack > stack || best[a] == DBL_MAX ||
                best[a] + e->flops >= best[b]) continue;
            best[b] = best[a] + e->flops;
            from[b] = a;
            kind[b] = i % 3;
        }
    }
    if (best[g->n] == DBL_MAX) return DBL_MAX;
    m->n_segments = 0;
    for (int32_t b = g->n; b > 0; b = from[b]) m->n_segments++;
    for (int32_t b = g->n, i = m->n_segments - 1; b > 0; b = from[b], i--) {
        m->segments[i].end = b;
        m->segments[i].tile = kind[b] > 0 ? m->plan.tile : 0;
        m->segments[i].bands = kind[b] == 2;
    }
    return best[g->n];
}

// The smallest stack with which there is a way.
static int64_t vae__least(const vae__graph *g) {
    int64_t least[VAE__MAX_MODULES + 1];
    least[0] = 0;
    for (int32_t b = 1; b <= g->n; b++) {
        least[b] = INT64_MAX;
        for (int32_t i = 0; i < 3 * b; i++) {
            const vae__edge *e = &g->edges[i / 3][b][i % 3];
            if (!e->there) continue;
            const int64_t most = e->stack > least[i / 3] ? e->stack : least[i / 3];
            if (most < least[b]) least[b] = most;
        }
    }
    return least[g->n];
}

// The cheapest way of at most `limit` bytes, else the one of least memory. Without limit (0), half
// as much again as the least: it is far cheaper.
static void vae__best_path(vae_model *m, const vae__graph *g, int64_t limit) {
    const int64_t least = vae__least(g);
    if (limit == 0) limit = least + least / 2;
    vae__path(m, g, limit > least ? limit : least);
}

// Whether modules a to b - 1 can run in tiles of m->plan.tile pixels: they have no attention, and
// reach no further past a tile than its own size. So the first tile with neighbours on all sides
// reads as much as any, although there is only one before it, and stands for the others while
// planning.
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
                                     int32_t tile, bool bands, vae__edge *e) {
    const int64_t levels[2] = {m->stack.level[0], m->stack.level[1]};
    const vae__span whole = vae__whole(m->size[a]);
    vae__value x = vae__input(input), out;
    m->flops = 0;
    m->stack.peak = levels[0] + levels[1];
    if (a > 0) {
        VAE__TRY(vae__new(m, 0, m->stream, vae__channels_at(m->net, a), m->size[a], &whole,
                          vae__frames_at(m, a, m->chunks.total), &x));
    }
    VAE__TRY(vae__segment(m, a, b, tile, bands, &x, &out));
    e->stack = m->stack.peak;
    e->flops = m->flops;
    e->there = true;
    memcpy(m->stack.level, levels, sizeof levels);
    return ROCQ_OK;
}

// Which values are kept whole. Of a video, with all its frames, only one, which tiles begin with.
static rocq_result vae__choose(vae_model *m, const rocq_tensor *input) {
    vae__graph *g;
    const double flops = m->flops;
    const int64_t peak = m->stack.peak;
    rocq_result result = ROCQ_OK;
    VAE__TRY(vae__allocate(m, &g, sizeof *g));
    g->n = m->net->n_modules;
    m->comparing = true;
    for (int32_t a = 0; a < g->n && result == ROCQ_OK; a++) {
        for (int32_t b = a + 1; b <= g->n && result == ROCQ_OK; b++) {
            const bool convs = m->net->modules[b - 1].kind == VAE__CONVS;
            if (m->video ? a == 0 && convs : b == a + 1) {
                result = vae__measure_edge(m, input, a, b, 0, false, &g->edges[a][b][0]);
            }
            if (result == ROCQ_OK && a > 0 && vae__bandable(m, a, b, m->plan.tile)) {
                result = vae__measure_edge(m, input, a, b, m->plan.tile, true, &g->edges[a][b][2]);
            }
            if (result != ROCQ_OK || (m->video && b < g->n) || !vae__tileable(m, a, b)) continue;
            result = vae__measure_edge(m, input, a, b, m->plan.tile, false, &g->edges[a][b][1]);
        }
    }
    if (result == ROCQ_OK) vae__best_path(m, g, m->limit);
    m->comparing = false;
    vae__free(m, g, sizeof *g);
    m->flops = flops;
    m->stack.peak = peak;
    return result;
}

// Computes what m->plan takes, its sizes and its flops, with the code that runs it later: ops only
// raise m->op_scratch to what they need, see vae__count_scratch.
static rocq_result vae__measure_plan(vae_model *m, int64_t base) {
    VAE__TRY(rocq_plan_begin(m->ctx, &m->op_scratch));
    m->planning = true;
    vae__stack_init(m, NULL);
    const rocq_result result = vae__batches(m);
    m->planning = false;
    rocq_plan_end(m->ctx);
    m->plan.activation_bytes = m->stack.peak;
    // What the context has as scratch stays, where that fits the budget.
    const int64_t scratch = vae__load_scratch(m);
    m->plan.scratch_bytes = scratch > m->scratch ? scratch : m->scratch;
    m->plan.peak_bytes = base + m->plan.activation_bytes + m->plan.scratch_bytes;
    if (m->budget > 0 && m->plan.peak_bytes > m->budget) {
        m->plan.peak_bytes -= m->plan.scratch_bytes - scratch;
        m->plan.scratch_bytes = scratch;
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
        m->plan.limit = tiling == VAE_EXACT ? m->limit : 0;
        m->plan.n_chunks = n_chunks;
        VAE__TRY(vae__measure_plan(m, base));
        // A second time: now ops may take as scratch memory what lies free below the first time's
        // peak. An op counts up to 255 bytes more than it takes, for alignment.
        if (tiling != VAE_EXACT) {
            m->plan.limit = m->plan.activation_bytes + 255;
            VAE__TRY(vae__measure_plan(m, base));
        }
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
    const int32_t side = m->net == &m->decoder ? longest : longest / m->scale;
    for (int32_t tile = 1024; tile >= 4 * m->scale;
         tile = tile % 3 == 0 ? tile * 2 / 3 : tile * 3 / 4) {
        const int32_t size = job->tile > 0 ? job->tile : tile;
        bool one = false;
        const bool smallest = size == 4 * m->scale; // also for a picture that is smaller
        if (job->tile <= 0 && !smallest && (size >= side || size % m->scale != 0)) continue;
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
        const int64_t read = (int64_t)c->c * c->k * c->k * c->kt; // w.ne[0], if it is not folded
        const int64_t rows = (read + c->w.ne[0]) * (int64_t)sizeof(float);
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

// Weights and biases that are in memory, by the gains that have been set since. If one of them
// fails or is cancelled, all are to be loaded anew.
static rocq_result vae__apply_gains(vae_model *m) {
    const int32_t n_streamed = m->laid_streamed;
    m->laid_streamed = -1;
    for (int32_t i = 0; i < m->decoder.n_convs; i++) {
        const vae_conv *c = &m->decoder.convs[i];
        const rocq_tensor *w = &c->w, *bias = &c->vectors[VAE__BIAS];
        const rocq_scale_params weights = {.y = w, .x = w, .scale = c->gain};
        const rocq_scale_params biases = {.y = bias, .x = bias, .scale = c->bias_gain};
        if (c->gain != 1 && !c->streamed) VAE__TRY(rocq_scale(m->ctx, &weights));
        if (c->bias_gain != 1 && bias->n_dims > 0) VAE__TRY(rocq_scale(m->ctx, &biases));
    }
    m->laid_streamed = n_streamed;
    m->in_place = -1; // what is streamed is read anew
    return ROCQ_OK;
}

// After values that were not finite: formats that hold larger ones, and are of the same size, so
// that the plan stays. Norms bring values inside of blocks back, so those exceed F16 last.
static rocq_result vae__widen(vae_model *m) {
    const bool norms = m->decoder.convs[m->decoder.n_convs - 1].norm != VAE__NO_NORM;
    vae__drop_graphs(m);
    if (m->stream == ROCQ_F32 || m->inner == ROCQ_BF16) {
        return vae__fail(m, ROCQ_E_BOUNDS, "values exceed %s", rocq_format_name(m->stream));
    }
    if (m->stream == ROCQ_F16 && m->gain == 1 && m->net == &m->decoder && vae__can_shrink(m)) {
        m->why_stream = "a 64th of what blocks add up: it exceeded F16";
        vae__set_gains(m);
        return vae__apply_gains(m);
    }
    m->why_stream = "values exceeded F16";
    if (m->stream == ROCQ_BF16 || !norms) m->inner = ROCQ_BF16;
    m->stream = ROCQ_BF16;
    return ROCQ_OK;
}

static rocq_result vae__run_job(vae_model *m, vae_net *net, vae_request *job) {
    VAE__TRY(vae__plan(m, net, job));
    if (m->laid_streamed < 0 && !m->options.stream) { // the file may be closed
        return vae__fail(m, ROCQ_E_STATE, "a request that was cut short has left weights that are "
                         "partly scaled: open the model again");
    }
    const vae_net *laid = m->plan.weight_bytes < m->weight_bytes ? net : NULL;
    const int64_t memory = m->memory.size, weights = m->weights.size;
    // What has another size is freed before anything is taken, so that the peak is as planned.
    if (memory != m->plan.activation_bytes || weights != m->plan.weight_bytes) vae_trim(m);
    VAE__TRY(rocq_trim(m->ctx, m->plan.scratch_bytes));
    VAE__TRY(vae__lay(m, laid, m->plan.n_streamed));
    if (!m->memory.size) {
        VAE__TRY(rocq_buffer_alloc(m->ctx, &m->memory, m->plan.activation_bytes));
    }
    VAE__TRY(rocq_reserve(m->ctx, m->plan.scratch_bytes));
    vae__stack_init(m, &m->memory);
    m->finite = true;
    m->reported = 0;
    const bool graphs = !vae__info(m).desc.no_graphs && vae__stats(m).n_replays_refused == 0;
    if (graphs && m->plan.n_streamed == 0) m->mode = m->recorded ? VAE__REPLAY : VAE__RECORD;
    rocq_result result = vae__batches(m);
    if (result == ROCQ_OK) result = vae__flush(m);
    rocq_lend(m->ctx, NULL);
    if (result != ROCQ_OK) {
        vae__drop_graphs(m);
        return result;
    }
    m->recorded = m->mode != VAE__RUN_NOW;
    m->mode = VAE__RUN_NOW;
    if (m->finite) return ROCQ_OK;
    VAE__TRY(vae__widen(m));
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
