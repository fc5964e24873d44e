// vae_networks.h - a part of vae.h, which includes it: the tensors of a GGUF or a safetensors file
// under ldm's names, whoever named them; the networks of AutoencoderKL, TAESD and Wan as lists of
// modules, each a few convolutions with or without a residual, or attention; and their weights,
// which stay in memory or are read whenever they are used.

#ifndef VAE_NETWORKS_H
#define VAE_NETWORKS_H

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
    rocq_message_clean(m->error, sizeof m->error);
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

// Where positions are doubled, taps that read the same one are added up when the weights are
// loaded, which leaves 4 of 9 products (see rocq_conv_params). The CPU multiplies in F32, so it
// keeps the sums in F32. A GPU multiplies in F16, so sums in F16 will do; in BF16 they would lose
// bits, so such weights stay as they are.
static void vae__choose_folded(const vae_model *m, vae_conv *conv) {
    const bool f32 = conv->format == ROCQ_F32, f16 = conv->format == ROCQ_F16;
    conv->folded = conv->upsample == 2 && conv->k == 3 && conv->stride == 1 &&
                   conv->entry->n_dims != 2 && // else taps may be in rocq_conv's order already
                   (f32 || f16 || (conv->format == ROCQ_BF16 && !m->gpu));
    if (!conv->folded || f32 || m->gpu) return;
    conv->format = ROCQ_F32;
    conv->why = "F32, in which taps that read the same position are added up";
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
    vae__choose_folded(m, conv);
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
        vae_conv *first = &b.net->convs[0];
        b.net->c_in = first->c;
        if (i == 0) m->z = first->c;
        if (i == 0 && taesd && m->gpu && m->z % 8 == 4) first->c += 4; // see vae__tanh
        b.net->c_out = b.net->convs[last->first + last->n - 1].m;
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

// Whether what the decoder's blocks add up can be kept as a 64th, see vae__set_gains. Scales of
// block formats are too coarse for weights that small.
static bool vae__can_shrink(const vae_model *m) {
    const vae_net *net = &m->decoder;
    for (int32_t i = 0; i < net->n_convs; i++) {
        if (net->convs[i].format != ROCQ_F16 && net->convs[i].format != ROCQ_F32) return false;
    }
    return net->convs[net->n_convs - 1].norm == VAE__GROUP_NORM;
}

// In F16, what the blocks of a decoder add up, if it is too large for that, is kept as a 64th.
// Whatever adds to it gets smaller weights, and whatever reads it norms it first, or adds to it in
// turn, so that only its bias is to be smaller.
static void vae__set_gains(vae_model *m) {
    vae_net *net = &m->decoder;
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

// Formats of activations, as far as the family tells.
static void vae__set_formats(vae_model *m) {
    vae_net *nets[2] = {&m->decoder, &m->encoder};
    m->gain = 1;
    for (int k = 0; k < 2; k++) {
        for (int32_t i = 0; i < nets[k]->n_convs; i++) {
            vae_conv *c = &nets[k]->convs[i];
            c->gain = c->bias_gain = c->eps_gain = 1;
        }
    }
    if (m->stream != ROCQ_F16 || !m->wide) return;
    if (vae__can_shrink(m)) {
        m->why_stream = "a 64th of what blocks add up: the family's exceeds F16";
        vae__set_gains(m);
    } else {
        m->stream = ROCQ_BF16;
        m->why_stream = "the family's values exceed F16";
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

// The weight itself, from the file's order to that of rocq_conv, and zeros for channels that the
// file does not have.
static rocq_result vae__fill_weight(vae_model *m, const vae_conv *conv) {
    const vae__entry *e = conv->entry;
    const bool block = rocq_get_format_info(e->format)->block_elems > 1;
    unsigned char *raw;
    float *values = NULL;
    const int64_t n = (int64_t)conv->c * conv->k * conv->k * conv->kt * conv->m;
    const int64_t part = e->size / (conv->n_parts > 0 ? conv->n_parts : 1);
    const int32_t c = conv == m->decoder.convs ? m->z : conv->c; // channels in the file
    const int64_t row = n / conv->m, own = row / conv->c * c;
    const bool in_order = e->n_dims == 2; // rows of matrices have their channels innermost already
    VAE__TRY(vae__allocate(m, &raw, (size_t)e->size));
    const unsigned char *src = raw + (conv->n_parts > 0 ? conv->part * part : 0);
    rocq_result result = vae__read(m, &m->file, e, raw);
    rocq_conv_weights_params fill = {.w = &conv->w, .src = src, .src_format = e->format,
                                     .src_size = part, .kw = in_order ? 1 : conv->k,
                                     .kh = in_order ? 1 : conv->k, .kt = in_order ? 1 : conv->kt,
                                     .folded = conv->folded};
    if (result == ROCQ_OK &&
        (conv->gain != 1 || own < row || (block && conv->format != e->format))) {
        result = vae__allocate(m, &values, (size_t)n * sizeof *values);
        if (result == ROCQ_OK) result = rocq_dequantize(e->format, values, src, own * conv->m);
        for (int64_t i = 0; i < own * conv->m && result == ROCQ_OK; i++) values[i] *= conv->gain;
        for (int64_t i = conv->m - 1; i >= 0 && own < row && result == ROCQ_OK; i--) {
            memmove(values + i * row, values + i * own, (size_t)own * sizeof *values);
            memset(values + i * row + own, 0, (size_t)(row - own) * sizeof *values);
        }
        fill.src = values;
        fill.src_format = ROCQ_F32;
        fill.src_size = n * (int64_t)sizeof *values;
    }
    if (result == ROCQ_OK) {
        result = block && fill.src != values && conv->format == e->format
                     ? rocq_upload(m->ctx, &conv->w, src, part)
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
            const int64_t k = (int64_t)c->c * (c->folded ? 4 : c->k * c->k) * c->kt;
            rocq_tensor *w = buffer ? &c->w : &ignored;
            VAE__TRY(rocq_tensor_3d(&arena, w, c->format, k, c->m, c->folded ? 4 : 1));
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
    vae__set_formats(m);
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

#endif // VAE_NETWORKS_H
