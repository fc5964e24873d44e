// decode.c - turns latents into pictures and videos, on a GPU that has kernels, else on the CPU.
//
//     cc -O2 examples/decode.c -o decode -lcjson -lm -ldl -lpthread   # libstb-dev, libcjson-dev
//     ./decode                                              # the latents in examples/model
//     ./decode --model vae.safetensors --family sdxl --latents latents.safetensors --budget 2G
//
// or with the kernels linked:
//
//     hipcc -O3 --offload-arch=gfx1100 -x hip examples/decode.c rocq_kernels.hip -o decode -lcjson
//
// Each picture is a PNG, each video a folder's worth of them, or a Y4M file. Their paths go to
// stdout, everything else to stderr. Exit status 1, after one line that says why, on any failure; a
// file gets its name when it is whole. --help lists the options.

#define ROCQ_IMPLEMENTATION
#define ROCQ_STATIC // ops that are not called are not compiled
#define PROGRAM "decode"
#include "../rocq.h"

#include "program.h"

#include "ds.h"
#include "vae.h"

// Memory that runs out ends the program, as in ds.h: no file is open then.
#define STBIW_MALLOC(size) ds_realloc(NULL, size)
#define STBIW_REALLOC(block, size) ds_realloc(block, size)
#define STBIW_FREE(block) free(block)
#define STB_IMAGE_WRITE_STATIC
#define STB_IMAGE_WRITE_IMPLEMENTATION
#include <stb/stb_image_write.h>

#include <sys/stat.h>
#if !defined(S_ISDIR)
#define S_ISDIR(mode) (((mode) & S_IFMT) == S_IFDIR)
#endif

static const char usage[] =
    "usage: decode [options]\n"
    "    --help           print this\n"
    "    --model FILE     AutoencoderKL, TAESD or Wan 2.1, as GGUF or safetensors (the one in\n"
    "                     examples/model)\n"
    "    --family NAME    sd1, sdxl, sd3, flux, taesd or wan2.1: how latents are scaled (by what\n"
    "                     the model looks like)\n"
    "    --scale X        what the model reads is latent / X + shift, in place of the family's;\n"
    "                     1 for latents that are scaled already\n"
    "    --shift X        (0)\n"
    "    --latents FILE   GGUF or safetensors; each tensor [width, height, channels], of a video\n"
    "                     [width, height, frames, channels], or several of a size, innermost\n"
    "                     dimension first (those in examples/model)\n"
    "    --only N         only latent number N, from 0 on (all)\n"
    "    --out PATH       folder for the files, or the name of the file if there is one (.)\n"
    "    --y4m CHROMA     write Y4M, in 444 or 420, and not PNG; a video is one file then\n"
    "    --matrix NAME    of Y4M: bt601 or bt709, both of limited range (as players guess: bt709\n"
    "                     from 1280 columns or 577 lines on)\n"
    "    --fps N          of Y4M (16)\n"
    "    --exact          tiles that give the whole picture or video, up to rounding\n"
    "    --tile N         side of tiles in pixels; without --exact they overlap and are mixed (no\n"
    "                     tiles, or exact ones where the budget wants them)\n"
    "    --overlap N      of tiles that are mixed, pixels (96, or less in small tiles)\n"
    "    --chunk N        latent frames of a video at once (as many as the budget allows)\n"
    "    --budget BYTES   of memory for weights and pictures; 900M, 2.5G (no limit). Weights that\n"
    "                     do not fit are read from the file each time that they are used\n"
    "    --batch N        latents of one size at once, where the budget allows (1)\n"
    "    --threads N      CPU threads (one per core)\n"
    "    --device NAME    auto, cpu or gpu (auto)\n"
    "    --kernels FILE   code object of rocq_kernels.hip, where it is not linked ($ROCQ_KERNELS)\n"
    "    --weights FORMAT of convolutions: f32, f16, q8_0 ... (by tensor)\n"
    "    --activations FORMAT   f32, f16 or bf16 (f32 on the CPU; on a GPU f16, and where numbers\n"
    "                     do not fit it a 64th of them, or bf16: --stats says which, and why)\n"
    "    --precision P    of convolutions: auto, f32, f16 or int8 (auto)\n"
    "    --sharing NAME   who goes first where the GPU also draws: graphics, compute or neither,\n"
    "                     which is balanced (balanced)\n"
    "    --stats          print times and memory\n"
    "    --trace FILE     write what ran when, for ui.perfetto.dev or chrome://tracing\n";

typedef struct options {
    const char *model, *latents, *out, *family, *y4m, *matrix, *trace;
    const char *kernels, *weights, *activations;
    bool help, exact, stats;
    float scale, shift;
    int32_t only, tile, overlap, chunk, batch, fps, n_threads;
    int32_t device, precision, sharing; // rocq_backend, rocq_precision, rocq_sharing
    int64_t budget;
} options;

// One picture or video to be.
typedef struct latent {
    char name[128];       // of its file, without .png
    int64_t tensor, item; // where it is: in that tensor of the file, so many of its size before it
    int32_t width, height, frames;
} latent;

typedef struct run {
    options o;
    rocq_ctx *ctx;
    rocq_gguf *model_gguf, *gguf; // each file is one or the other
    safetensors_file model_safetensors, safetensors;
    vae_model model;
    latent *latents;      // an array of stb_ds's
    float *values;        // of the latents computed at once
    unsigned char *pixels;
    bool terminal, folder; // whether --out is one
    double load, compute, write;  // seconds
    int64_t n_pictures, n_files, peak_planned, launches;
} run;

static bool parse(options *o, int argc, char **argv) {
    const option table[] = {
        {"--help", FLAG, 0, 0, &o->help},
        {"--model", TEXT, 0, 0, &o->model},
        {"--family", TEXT, 0, 0, &o->family},
        {"--scale", NUMBER, 1e-6, 1e6, &o->scale},
        {"--shift", NUMBER, -1e6, 1e6, &o->shift},
        {"--latents", TEXT, 0, 0, &o->latents},
        {"--only", INTEGER, 0, 1e9, &o->only},
        {"--out", TEXT, 0, 0, &o->out},
        {"--y4m", TEXT, 0, 0, &o->y4m},
        {"--matrix", TEXT, 0, 0, &o->matrix},
        {"--fps", INTEGER, 1, 1000, &o->fps},
        {"--exact", FLAG, 0, 0, &o->exact},
        {"--tile", INTEGER, 1, 1 << 20, &o->tile},
        {"--overlap", INTEGER, 1, 1 << 20, &o->overlap},
        {"--chunk", INTEGER, 1, 1 << 20, &o->chunk},
        {"--budget", BYTES, 1, 9e15, &o->budget},
        {"--batch", INTEGER, 1, 1 << 20, &o->batch},
        {"--threads", INTEGER, 1, 1024, &o->n_threads},
        {"--device", DEVICE, 0, 0, &o->device},
        {"--kernels", TEXT, 0, 0, &o->kernels},
        {"--weights", TEXT, 0, 0, &o->weights},
        {"--activations", TEXT, 0, 0, &o->activations},
        {"--precision", PRECISION, 0, 0, &o->precision},
        {"--sharing", SHARING, 0, 0, &o->sharing},
        {"--stats", FLAG, 0, 0, &o->stats},
        {"--trace", TEXT, 0, 0, &o->trace},
    };
    if (!parse_options(table, sizeof table / sizeof table[0], argc, argv)) return false;
    if (o->y4m && strcmp(o->y4m, "444") != 0 && strcmp(o->y4m, "420") != 0) {
        return fail("--y4m", "is 444 or 420");
    }
    if (o->matrix && strcmp(o->matrix, "bt601") != 0 && strcmp(o->matrix, "bt709") != 0) {
        return fail("--matrix", "is bt601 or bt709");
    }
    if (o->exact && o->overlap > 0) {
        return fail("--overlap", "exact tiles do not overlap: leave out one of the two");
    }
    return true;
}

static bool show_progress(const char *what, int64_t done, int64_t total, void *user) {
    if (*(const bool *)user) print_progress(what, done, total, stopped != 0);
    return !stopped;
}

// ---------------------------------------------------------------------------------------------
// Latents
// ---------------------------------------------------------------------------------------------

// A tensor of either kind of file.
typedef struct source {
    char name[96];
    int32_t n_dims;
    int64_t ne[5]; // innermost first
    int64_t count, size;
    rocq_format format;
    bool known;
} source;

static bool source_at(const run *r, int64_t i, source *s) {
    memset(s, 0, sizeof *s);
    if (r->gguf) {
        rocq_gguf_tensor t;
        if (rocq_gguf_tensor_at(r->gguf, i, &t) != ROCQ_OK) return false;
        snprintf(s->name, sizeof s->name, "%.*s", (int)(t.name.length < 95 ? t.name.length : 95),
                 t.name.data);
        s->n_dims = t.n_dims;
        for (int32_t d = 0; d < t.n_dims; d++) s->ne[d] = t.ne[d];
        s->known = t.known && t.format != ROCQ_I32;
        s->format = t.format;
        s->size = t.size;
    } else {
        const safetensors_tensor *t = &r->safetensors.tensors[i];
        snprintf(s->name, sizeof s->name, "%s", t->name);
        s->n_dims = t->n_dims <= 5 ? t->n_dims : 0;
        for (int32_t d = 0; d < s->n_dims; d++) s->ne[d] = t->shape[t->n_dims - 1 - d];
        s->known = t->known;
        s->format = t->format;
        s->size = t->size;
    }
    s->count = 1;
    for (int32_t d = 0; d < s->n_dims; d++) s->count *= s->ne[d];
    return true;
}

// What a tensor holds: [w, h, z], [w, h, z, n], and for a model of videos [w, h, frames, z] and
// [w, h, frames, z, n]. n 0 = nothing that could be decoded.
static int64_t latents_in(const run *r, const source *s, latent *l) {
    const bool video = vae_frames(&r->model, 2) != 2;
    const int64_t z = r->model.z, *ne = s->ne;
    int64_t frames = 1, n = 0;
    if (s->n_dims == 3 && ne[2] == z) n = 1;
    else if (video && s->n_dims >= 4 && ne[3] == z) frames = ne[2], n = s->n_dims == 5 ? ne[4] : 1;
    else if (s->n_dims == 4 && ne[2] == z) n = ne[3];
    if (!s->known || ne[0] > 1 << 16 || ne[1] > 1 << 16 || frames > 1 << 20) return 0;
    l->width = (int32_t)ne[0];
    l->height = (int32_t)ne[1];
    l->frames = (int32_t)frames;
    return n;
}

// A name that every file system takes: small letters and digits of ASCII, "-" for what is between.
static void set_name(const run *r, latent *l, const char *title, int64_t length) {
    size_t n = 0;
    for (int64_t i = 0; i < length && n + 24 < sizeof l->name; i++) {
        const bool capital = title[i] >= 'A' && title[i] <= 'Z';
        const char c = (char)(capital ? title[i] - 'A' + 'a' : title[i]);
        const bool plain = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' ||
                           (c == '.' && n > 0);
        if (plain) l->name[n++] = c;
        else if (n > 0 && l->name[n - 1] != '-') l->name[n++] = '-';
    }
    while (n > 0 && (l->name[n - 1] == '-' || l->name[n - 1] == '.')) n--;
    l->name[n] = '\0';
    if (n == 0) n = (size_t)snprintf(l->name, sizeof l->name, "latent");
    for (int64_t k = 2, i = 0; i < arrlen(r->latents); i++) {
        if (strcmp(r->latents[i].name, l->name) != 0) continue;
        snprintf(l->name + n, sizeof l->name - n, "-%d", (int)k++);
        i = -1; // that may be another one's name, too
    }
}

// Lists what is in the file, with names from its metadata (latents.title) or else of the tensors.
static bool list_latents(run *r) {
    const int64_t n = r->gguf ? rocq_gguf_tensor_count(r->gguf) : r->safetensors.n_tensors;
    rocq_gguf_value titles;
    const bool titled = r->gguf &&
                        rocq_gguf_find_value(r->gguf, "latents.title", &titles) == ROCQ_OK &&
                        titles.type == ROCQ_GGUF_STRING && titles.count == n;
    for (int64_t i = 0; i < n; i++) {
        source s;
        latent l;
        rocq_str title;
        char why[256];
        memset(&l, 0, sizeof l);
        if (!source_at(r, i, &s)) return fail(r->o.latents, rocq_error(r->ctx));
        if (s.count == 0) continue; // a mark: ComfyUI's files have one
        const int64_t n_items = latents_in(r, &s, &l);
        if (n_items == 0) {
            snprintf(why, sizeof why, "tensor %s holds no latents of %d channels", s.name,
                     (int)r->model.z);
            return fail(r->o.latents, why);
        }
        if (!titled || rocq_gguf_value_str(&titles, i, &title) != ROCQ_OK) {
            title.data = s.name;
            title.length = (int64_t)strlen(s.name);
        }
        l.tensor = i;
        for (l.item = 0; l.item < n_items; l.item++) {
            set_name(r, &l, title.data, title.length);
            arrput(r->latents, l);
        }
    }
    if (arrlen(r->latents) == 0) return fail(r->o.latents, "holds no latents");
    if (r->o.only >= arrlen(r->latents)) {
        char why[64];
        snprintf(why, sizeof why, "there are %d latents", (int)arrlen(r->latents));
        return fail("--only", why);
    }
    if (r->o.only >= 0) {
        r->latents[0] = r->latents[r->o.only];
        arrsetlen(r->latents, 1);
    }
    return true;
}

// Brings a latent's numbers to `to`.
static bool read_latent(run *r, const latent *l, float *to) {
    source s;
    if (!source_at(r, l->tensor, &s)) return fail(r->o.latents, rocq_error(r->ctx));
    const int64_t n = (int64_t)l->width * l->height * l->frames * r->model.z;
    void *raw = malloc((size_t)s.size);
    float *all = (float *)malloc((size_t)s.count * sizeof *all);
    rocq_result result = raw && all ? ROCQ_OK : ROCQ_E_MEMORY;
    const char *why = "no memory";
    if (result == ROCQ_OK && r->gguf) {
        rocq_gguf_tensor t;
        result = rocq_gguf_tensor_at(r->gguf, l->tensor, &t);
        if (result == ROCQ_OK) result = rocq_gguf_read(r->ctx, r->gguf, &t, raw);
        why = rocq_error(r->ctx);
    } else if (result == ROCQ_OK) {
        result = safetensors_read(&r->safetensors, &r->safetensors.tensors[l->tensor], raw);
        why = r->safetensors.error;
    }
    if (result == ROCQ_OK) result = rocq_dequantize(s.format, all, raw, s.count);
    if (result == ROCQ_OK) memcpy(to, all + n * l->item, (size_t)n * sizeof *to);
    free(raw);
    free(all);
    return result == ROCQ_OK || fail(r->o.latents, why);
}

// ---------------------------------------------------------------------------------------------
// Files of pictures
// ---------------------------------------------------------------------------------------------

static bool is_folder(const char *path) {
    struct stat s;
    return stat(path, &s) == 0 && S_ISDIR(s.st_mode);
}

// Of frame `frame` of a video, or without a number.
static const char *path_of(const run *r, const latent *l, int64_t frame, int64_t n_frames) {
    static char path[4096];
    const char *end = r->o.y4m ? "y4m" : "png", *out = r->o.out;
    const char last = out[0] ? out[strlen(out) - 1] : '/', *slash = last == '/' ? "" : "/";
    if (!r->folder) snprintf(path, sizeof path, "%s", out);
    else if (n_frames <= 1) snprintf(path, sizeof path, "%s%s%s.%s", out, slash, l->name, end);
    else snprintf(path, sizeof path, "%s%s%s-%04d.%s", out, slash, l->name, (int)frame, end);
    return path;
}

static bool said_where(run *r, const char *path) {
    r->n_files++;
    return printf("%s\n", path) > 0 && fflush(stdout) == 0 ? true
                                                           : fail("stdout", "cannot be written");
}

static bool write_png(run *r, const char *path, const unsigned char *rgb, int32_t w, int32_t h) {
    rocq_file *out = NULL;
    int size = 0;
    // whole in memory, so that no file is open where that runs out
    unsigned char *png = stbi_write_png_to_mem(rgb, 3 * w, w, h, 3, &size);
    if (!png) return fail(path, "no memory");
    const bool created = create_file(r->ctx, &out, path);
    const bool written = created && rocq_file_write(png, size, out);
    free(png);
    return created && finish_file(r->ctx, &out, path, written ? ROCQ_OK : ROCQ_E_IO) &&
           said_where(r, path);
}

// The planes of a frame, Y, Cb, Cr, in the limited range of 8 bits. Chroma of a 2 x 2 block is the
// mean, so it lies at the block's middle, which Y4M calls 420jpeg.
static int64_t to_yuv(const unsigned char *rgb, int32_t w, int32_t h, bool bt709, int32_t sub,
                      unsigned char *yuv) {
    const int32_t cw = (w + sub - 1) / sub, ch = (h + sub - 1) / sub;
    const double kr = bt709 ? 0.2126 : 0.299, kb = bt709 ? 0.0722 : 0.114, kg = 1 - kr - kb;
    unsigned char *y = yuv, *cb = y + (int64_t)w * h, *cr = cb + (int64_t)cw * ch;
    for (int64_t i = 0; i < (int64_t)w * h; i++) {
        const unsigned char *p = rgb + 3 * i;
        y[i] = (unsigned char)lrint(16 + 219.0 / 255 * (kr * p[0] + kg * p[1] + kb * p[2]));
    }
    for (int64_t i = 0; i < (int64_t)cw * ch; i++) {
        double sum[3] = {0, 0, 0};
        for (int32_t k = 0; k < sub * sub; k++) { // what is beyond the edge is as the edge is
            const int64_t x = i % cw * sub + k % sub, line = i / cw * sub + k / sub;
            const int64_t at = (x < w ? x : w - 1) + w * (line < h ? line : h - 1);
            const unsigned char *p = rgb + 3 * at;
            for (int c = 0; c < 3; c++) sum[c] += p[c];
        }
        const double n = 255.0 * sub * sub, luma = kr * sum[0] + kg * sum[1] + kb * sum[2];
        cb[i] = (unsigned char)lrint(128 + 112 * (sum[2] - luma) / (n * (1 - kb)));
        cr[i] = (unsigned char)lrint(128 + 112 * (sum[0] - luma) / (n * (1 - kr)));
    }
    return (int64_t)w * h + 2 * (int64_t)cw * ch;
}

static bool write_y4m(run *r, const char *path, const unsigned char *rgb, int32_t w, int32_t h,
                      int64_t n_frames) {
    const bool bt709 = r->o.matrix ? strcmp(r->o.matrix, "bt709") == 0 : w >= 1280 || h > 576;
    const bool whole = strcmp(r->o.y4m, "444") == 0;
    char head[160];
    rocq_file *out = NULL;
    unsigned char *yuv = (unsigned char *)malloc(3 * (size_t)(w + 1) * (size_t)(h + 1));
    if (!yuv) return fail(path, "no memory");
    snprintf(head, sizeof head,
             "YUV4MPEG2 W%d H%d F%d:1 Ip A1:1 C%s XCOLORRANGE=LIMITED XMATRIX=%s\n", (int)w, (int)h,
             (int)r->o.fps, whole ? "444" : "420jpeg", bt709 ? "BT709" : "BT601");
    if (!create_file(r->ctx, &out, path)) {
        free(yuv);
        return false;
    }
    bool written = rocq_file_write(head, (int64_t)strlen(head), out);
    for (int64_t i = 0; i < n_frames && written && !stopped; i++) {
        const int64_t size = to_yuv(rgb + 3 * i * w * h, w, h, bt709, whole ? 1 : 2, yuv);
        written = rocq_file_write("FRAME\n", 6, out) && rocq_file_write(yuv, size, out);
    }
    free(yuv);
    if (stopped && written) { // it is not whole
        rocq_file_close(&out, false);
        return false;
    }
    return finish_file(r->ctx, &out, path, written ? ROCQ_OK : ROCQ_E_IO) && said_where(r, path);
}

static bool write_latent(run *r, const latent *l, const unsigned char *rgb) {
    const int32_t w = l->width * r->model.scale, h = l->height * r->model.scale;
    const int64_t n_frames = vae_frames(&r->model, l->frames);
    if (r->o.y4m) return write_y4m(r, path_of(r, l, 0, 1), rgb, w, h, n_frames);
    for (int64_t i = 0; i < n_frames; i++) {
        const char *path = path_of(r, l, i, n_frames);
        if (stopped || !write_png(r, path, rgb + 3 * i * w * h, w, h)) return false;
    }
    return true;
}

// ---------------------------------------------------------------------------------------------
// The job
// ---------------------------------------------------------------------------------------------

// GGUF or safetensors, by its first bytes.
static bool open_either(run *r, const char *path, rocq_gguf **gguf, safetensors_file *safetensors) {
    char magic[4] = "";
    FILE *file = fopen(path, "rb");
    const bool safe = file && fread(magic, 1, 4, file) == 4 && memcmp(magic, "GGUF", 4) != 0;
    if (file) fclose(file);
    if (safe) {
        return safetensors_open(safetensors, path) == ROCQ_OK || fail(path, safetensors->error);
    }
    const rocq_gguf_desc desc = {.path = path};
    return rocq_gguf_open(r->ctx, gguf, &desc) == ROCQ_OK || fail(path, rocq_error(r->ctx));
}

static bool load(run *r) {
    const vae_options how = {.family = r->o.family, .scale = r->o.scale, .shift = r->o.shift,
                             .stream = r->o.budget > 0, .weights = r->o.weights,
                             .activations = r->o.activations,
                             .precision = (rocq_precision)r->o.precision, .progress = show_progress,
                             .user = &r->terminal};
    if (!open_either(r, r->o.model, &r->model_gguf, &r->model_safetensors)) return false;
    safetensors_file *safetensors = r->model_gguf ? NULL : &r->model_safetensors;
    return vae_open(&r->model, r->ctx, r->model_gguf, safetensors, &how) == ROCQ_OK ||
           (!stopped && fail(r->o.model, r->model.error));
}

// Latents first to first + n - 1, which are of one size.
static bool decode(run *r, int64_t first, int64_t n) {
    const latent *l = &r->latents[first];
    const int64_t n_frames = vae_frames(&r->model, l->frames);
    const int64_t count = (int64_t)l->width * l->height * l->frames * r->model.z;
    const int64_t scale = r->model.scale, area = scale * scale * l->width * l->height;
    const int64_t each = 3 * area * n_frames;
    vae_request job = {.width = l->width, .height = l->height, .frames = l->frames, .n = (int32_t)n,
                       .tile = r->o.tile, .overlap = r->o.overlap, .chunk = r->o.chunk,
                       .memory_budget = r->o.budget};
    if (r->o.exact) job.tiling = VAE_EXACT;
    else if (r->o.tile > 0 || r->o.overlap > 0) job.tiling = VAE_BLEND;
    r->values = (float *)malloc((size_t)(n * count) * sizeof(float));
    r->pixels = (unsigned char *)malloc((size_t)(n * each));
    if (!r->values || !r->pixels) return fail(r->o.latents, "no memory");
    for (int64_t i = 0; i < n; i++) {
        if (!read_latent(r, &l[i], r->values + i * count)) return false;
    }
    job.latents = r->values;
    job.pixels = r->pixels;
    const int64_t launches = get_stats(r->ctx).n_launches;
    rocq_region_begin(r->ctx, "decode");
    double start = seconds();
    if (vae_decode(&r->model, &job) != ROCQ_OK) {
        return stopped ? false : fail(l->name, r->model.error);
    }
    r->compute += seconds() - start;
    rocq_region_end(r->ctx);
    r->launches += get_stats(r->ctx).n_launches - launches;
    r->n_pictures += n * n_frames;
    if (r->model.plan.peak_bytes > r->peak_planned) r->peak_planned = r->model.plan.peak_bytes;
    start = seconds();
    rocq_region_begin(r->ctx, "write");
    for (int64_t i = 0; i < n; i++) {
        if (stopped || !write_latent(r, &l[i], r->pixels + i * each)) return false;
    }
    rocq_region_end(r->ctx);
    r->write += seconds() - start;
    free(r->values);
    free(r->pixels);
    r->values = NULL;
    r->pixels = NULL;
    return true;
}

static bool decode_all(run *r) {
    const int64_t n = arrlen(r->latents);
    const latent *l = r->latents;
    const bool numbered = !r->o.y4m && vae_frames(&r->model, l->frames) > 1;
    r->folder = is_folder(r->o.out);
    if (!r->folder && (n > 1 || numbered)) {
        return fail(r->o.out, "is no folder, and there will be more than one file");
    }
    for (int64_t first = 0, end; first < n; first = end) {
        for (end = first + 1; end < n && end - first < r->o.batch; end++) {
            if (l[end].width != l[first].width || l[end].height != l[first].height ||
                l[end].frames != l[first].frames) break;
        }
        if (!decode(r, first, end - first)) return false;
    }
    return true;
}

static void print_stats(const run *r) {
    static const char *const tilings[] = {"auto", "whole", "mixed tiles", "exact tiles"};
    const double mib = 1.0 / (1024 * 1024), n = (double)r->n_pictures;
    const vae_plan *plan = &r->model.plan;
    rocq_info info;
    rocq_get_info(r->ctx, &info);
    print_device(&info);
    fprintf(stderr, "%-20s %s (%s), latents of %d channels\n", "model", r->model.family,
            r->model.why_family, (int)r->model.z);
    fprintf(stderr, "%-20s %s (%s); inside of blocks %s\n", "activations",
            rocq_format_name(r->model.stream), r->model.why_stream,
            rocq_format_name(r->model.inner));
    fprintf(stderr, "%-20s %9.1f ms\n", "open and load", 1e3 * r->load);
    fprintf(stderr, "%-20s %9.2f ms per picture, %d in %.1f ms\n", "decoding", 1e3 * r->compute / n,
            (int)r->n_pictures, 1e3 * r->compute);
    fprintf(stderr, "%-20s %9.2f ms per picture, %d files\n", "writing", 1e3 * r->write / n,
            (int)r->n_files);
    if (info.backend == ROCQ_BACKEND_GPU) {
        fprintf(stderr, "%-20s %9.1f per picture\n", "launches", (double)r->launches / n);
    }
    fprintf(stderr, "%-20s %s", "last plan", tilings[plan->tiling]);
    if (plan->tile > 0) fprintf(stderr, ", %d of %d pixels", (int)plan->n_tiles, (int)plan->tile);
    if (plan->overlap > 0) fprintf(stderr, " that overlap by %d", (int)plan->overlap);
    fprintf(stderr, ", %d at once", (int)plan->batch);
    if (plan->n_chunks > 1) {
        fprintf(stderr, ", %d chunks of %d frames", (int)plan->n_chunks, (int)plan->chunk);
    }
    if (plan->n_streamed > 0) {
        fprintf(stderr, ", weights of %d convolutions read anew", (int)plan->n_streamed);
    }
    fprintf(stderr, "; %.2f GFLOP, whole %.2f\n", 1e-9 * plan->flops, 1e-9 * plan->whole_flops);
    fprintf(stderr, "%-20s %9.2f MiB planned, %.2f measured: weights %.2f, activations %.2f, "
            "scratch %.2f\n", "peak memory", mib * (double)r->peak_planned,
            mib * (double)get_stats(r->ctx).peak_bytes, mib * (double)plan->weight_bytes,
            mib * (double)plan->activation_bytes, mib * (double)plan->scratch_bytes);
}

static bool whole_run(run *r) {
    const rocq_desc desc = {.prefer = (rocq_backend)r->o.device, .n_threads = r->o.n_threads,
                            .kernels_path = r->o.kernels,
                            .no_graphs = r->o.stats || r->o.trace, // so that they show each op
                            .sharing = (rocq_sharing)r->o.sharing};
    const rocq_profile_desc profile = {.cost = r->o.trace ? 1.0 : 0.0}; // a trace is without gaps
    const double start = seconds();
    if (!open_device(&r->ctx, desc)) return false;
    to_cancel = r->ctx;
    catch_signals();
    if ((r->o.stats || r->o.trace) && rocq_profile_start(r->ctx, &profile) != ROCQ_OK) {
        return fail("profile", rocq_error(r->ctx));
    }
    rocq_region_begin(r->ctx, "load");
    if (!load(r)) return false;
    if (!open_either(r, r->o.latents, &r->gguf, &r->safetensors) || !list_latents(r)) return false;
    rocq_region_end(r->ctx);
    r->load = seconds() - start;
    if (!decode_all(r)) return false;
    rocq_profile_stop(r->ctx);
    if (r->o.stats) {
        print_stats(r);
        fprintf(stderr, "\n");
        rocq_profile_report(r->ctx, ROCQ_REPORT_TEXT, write_stderr, NULL);
    }
    return write_report(r->ctx, r->o.trace, ROCQ_REPORT_TRACE);
}

int main(int argc, char **argv) {
    static char model[1024], latents[1024];
    static run r; // zeroed
    r.o.model = beside_source("model/rocq-pictures.gguf", model, sizeof model);
    r.o.latents = beside_source("model/latents.gguf", latents, sizeof latents);
    r.o.kernels = getenv("ROCQ_KERNELS");
    r.o.out = ".";
    r.o.only = -1;
    r.o.batch = 1;
    r.o.fps = 16;
    r.terminal = is_terminal(2);
    if (!parse(&r.o, argc, argv)) return 1;
    if (r.o.help) fputs(usage, stdout);
    const bool good = (r.o.help || whole_run(&r)) && close_streams();
    to_cancel = NULL;
    free(r.values);
    free(r.pixels);
    arrfree(r.latents);
    vae_close(&r.model);
    safetensors_close(&r.safetensors);
    safetensors_close(&r.model_safetensors);
    rocq_gguf_close(&r.gguf);
    rocq_gguf_close(&r.model_gguf);
    rocq_close(&r.ctx);
    return end_program(good);
}
