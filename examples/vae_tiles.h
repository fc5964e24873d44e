// vae_tiles.h - a part of vae.h, which includes it: the modules of a network, run or planned.
//
// vae__convs runs a module's convolutions, vae__attention its attention, over a whole picture or a
// tile of it; what they read and write lies in one buffer, whose size the same code finds out
// before. Behind them: from and to the caller's memory.
//
// Tiles can be exact. What hides between the tiles of a GroupNorm network is its norms, whose mean
// and variance are those of the whole picture. vae__segment finds them layer by layer: for each
// norm it runs all tiles up to there, with as many positions around each as the convolutions reach,
// and merges the moments. A block can also run in bands of rows that the result replaces, alone or
// with the convolution before it that doubles positions (vae__bands): nothing but the larger of
// input and result is whole then, and computed twice is only what the norms behind the first look
// at. vae__choose picks which values in between are kept whole, so that this costs least. The
// norms of a video are of one position each: behind its attention, whose value is kept whole, a
// tile with its halo goes through all chunks of frames, with the frames that those share, and has
// the whole's bits wherever convolutions do not depend on the size (on the CPU).

#ifndef VAE_TILES_H
#define VAE_TILES_H

// ---------------------------------------------------------------------------------------------
// Memory of a request, and running ops
// ---------------------------------------------------------------------------------------------

// Runs an op, or plans it: see vae__measure_plan. Where a request's ops are recorded already, only
// vae__before_op does something.
#define VAE__RUN(m, op, params)                                                                  \
    do {                                                                                         \
        VAE__TRY(vae__before_op(m));                                                             \
        if ((m)->planning || (m)->mode != VAE__REPLAY) VAE__TRY(rocq_##op((m)->ctx, params));    \
        if ((m)->planning) VAE__TRY(vae__count_scratch(m));                                      \
    } while (0)

// A request that comes again has the same ops between two copies from or to the host. So the first
// time they are recorded, a graph from one copy to the next, and later the graphs are launched in
// the order in which the same code comes to those copies: each with the first of its ops, so that
// the GPU computes while the host goes through the others. What streams weights copies all the
// time, and is not recorded.
//
// An op's scratch memory is what lies free between the two ends of the stack.
static rocq_result vae__before_op(vae_model *m) {
    const vae__stack *s = &m->stack;
    m->op_scratch = 0;
    if (m->planning) return ROCQ_OK;
    if (m->mode == VAE__REPLAY && !m->pending) {
        VAE__TRY(rocq_graph_launch(m->ctx, m->graphs[m->graph_at++]));
    } else if (m->mode == VAE__RECORD && !m->pending) {
        m->live_bytes = vae__stats(m).live_bytes;
        VAE__TRY(rocq_graph_begin(m->ctx));
    }
    m->pending = true;
    rocq_buffer middle = s->buffer;
    if (middle.host) middle.host = (char *)middle.host + s->level[0];
    if (middle.device.address) middle.device.address += (uint64_t)s->level[0];
    middle.size -= s->level[0] + s->level[1];
    return rocq_lend(m->ctx, &middle);
}

// The scratch memory of the op that has just been planned.
static rocq_result vae__count_scratch(vae_model *m) {
    vae__stack *s = &m->stack;
    const int64_t taken = s->level[0] + s->level[1];
    if (m->op_scratch > s->buffer.size - taken) {
        return vae__fail(m, ROCQ_E_OVERFLOW, "%d x %d takes more memory than there are addresses",
                         (int)m->job->width, (int)m->job->height);
    }
    if (taken + m->op_scratch > s->peak) s->peak = taken + m->op_scratch;
    return ROCQ_OK;
}

// Scratch memory for an op that can do with less, in bytes: up to the plan's limit. 0 = any.
static int64_t vae__room(const vae_model *m) {
    const int64_t room = m->plan.limit - m->stack.level[0] - m->stack.level[1];
    return m->plan.limit == 0 ? 0 : room > 1 ? room : 1;
}

// Before a copy, at the latest: launches what has been recorded since the last one.
static rocq_result vae__flush(vae_model *m) {
    rocq_graph *graph = NULL;
    const bool pending = m->pending && !m->planning;
    m->pending = false;
    if (!pending || m->mode != VAE__RECORD) return ROCQ_OK;
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
        .folded = c->folded, .pad_x = pad[0], .pad_y = pad[1],
        .x_activation = c->before, .activation = c->after,
        .x_scale = wide ? 1.0f / 64 : 0, .precision = m->options.precision,
        .most_scratch = vae__room(m)};
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

// Whether a value of `less` channels less than x can replace it row by row, at either side of the
// stack. That is cut in pieces of 256 bytes, so at its upper side a value may end up to 255 bytes
// before its place does, and rows of the result may lie that much closer to rows of x that are
// still to be read: rows must be shorter by as much. Values of one size end at the same byte.
static bool vae__stays_clear(int64_t less, int64_t w) {
    return less == 0 || (less > 0 && 2 * less * w >= 256);
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
                         vae__stays_clear(convs[n].c - convs[n].m, x->size[0]);
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
// A block in bands of rows, in the place of its input
// ---------------------------------------------------------------------------------------------

// The block of modules a to b - 1, or NULL: it is the last of them, behind nothing or behind one
// convolution that doubles positions.
static const vae_module *vae__block_of(const vae_model *m, int32_t a, int32_t b) {
    const vae_module *mod = &m->net->modules[b - 1];
    const vae_module *doubling = &m->net->modules[a];
    if (b - a > 2 || mod->kind != VAE__CONVS || mod->n < 2 || mod->n > 3 ||
        mod->residual == VAE__NO_RESIDUAL) return NULL;
    if (b - a == 1) return mod;
    const vae_conv *c = &m->net->convs[doubling->first];
    return doubling->kind == VAE__CONVS && doubling->n == 1 && c->upsample == 2 && c->k == 3 &&
                   c->pad == 1 && c->norm == VAE__NO_NORM
               ? mod
               : NULL;
}

// Whether modules a to b - 1 can run so: a block of two convolutions or more, all of 3 x 3, to
// which the input is added, or 1 x 1 of it with at most as many channels; or such a block behind a
// convolution that doubles positions, also with more. Values of a video go through in chunks.
static bool vae__bandable(const vae_model *m, int32_t a, int32_t b, int32_t tile) {
    const vae_module *mod = vae__block_of(m, a, b);
    if (!mod || m->video || tile * m->size[b][1] / m->full[1] < 4) return false; // vae__advance
    const vae_conv *convs = &m->net->convs[mod->first];
    for (int32_t j = 0; j < mod->n; j++) {
        const vae_conv *c = &convs[j];
        if (c->k != 3 || c->pad != 1 || c->stride != 1 || c->upsample != 1) return false;
    }
    // Where positions are doubled, two rows of the result must be no shorter than one of x, so that
    // they begin where x has not, and meet it at its end. The row of x that the bands are ahead is
    // as long as vae__stays_clear asks for.
    const int64_t m_out = mod->residual == VAE__OF_SHORTCUT ? convs[mod->n].m : convs->c;
    if (b - a == 2) {
        const vae_conv *doubling = &m->net->convs[m->net->modules[a].first];
        return 4 * m_out >= doubling->c && 2 * doubling->c * m->size[a][0] >= 256;
    }
    return vae__stays_clear(convs->c - m_out, m->size[a][0]);
}

// Rows first to end - 1, counted from the last one if `up`.
static vae__span vae__rows(const int64_t size[2], int64_t first, int64_t end, bool up) {
    const vae__span o = {{0, up ? size[1] - end : first}, {size[0], end - first}};
    return o;
}

// How modules a to b - 1 go through bands of at most so many rows.
typedef struct vae__banding {
    vae_conv *convs[4], *shortcut; // [n], one behind the other; NULL = there is none
    int32_t n;
    bool doubles, up;              // the first doubles positions; from the last row to the first
    int64_t rows;
    const vae__value *x, *y;       // whole, of the same place
    bool turns;                    // see vae__turn; and band[0] of the two passes
    vae__value shared;
} vae__banding;

// Room for a band of so many rows of a value of c channels, on the side where x is not.
static rocq_result vae__new_band(vae_model *m, const vae__banding *g, rocq_format format, int64_t c,
                                 int64_t rows, bool up, vae__value *band) {
    const int64_t *size = g->y->size;
    const vae__span o = vae__rows(size, 0, rows < size[1] ? rows : size[1], up);
    return vae__new(m, !g->x->side, format, c, size, &o, 1, band);
}

// Moves a band on to where its next rows, from row `at` on, follow the last `keep` before them;
// with `within`, no further than to the last row of the value. Bands are longer than `keep`, so
// these rows do not overlap their new places, and with `within` there is at most one.
static rocq_result vae__advance(vae_model *m, vae__value *band, int64_t at, int64_t keep, bool up,
                                bool within) {
    const int64_t n = band->span.n[1], h = band->size[1], before = band->span.at[1];
    const vae__span last = vae__rows(band->size, at - keep, at, up);
    const rocq_tensor from = vae__frames_of(band, &last);
    band->span.at[1] = up ? h - at + keep - n : at - keep;
    if (within && !up && band->span.at[1] > h - n) band->span.at[1] = h - n;
    if (keep == 0 || band->span.at[1] == before) return ROCQ_OK;
    const rocq_tensor to = vae__frames_of(band, &last);
    const rocq_cast_params copy = {.y = &to, .x = &from};
    VAE__RUN(m, cast, &copy);
    return ROCQ_OK;
}

// Rows o of y, from the bands of what is between.
static rocq_result vae__end_of_bands(vae_model *m, const vae__banding *g, vae__value *band,
                                     vae__value *brief, const vae__span *o) {
    const vae__value *in = g->doubles ? &band[0] : g->x; // of the block
    const rocq_tensor t = vae__frames_of(g->y, o);
    rocq_tensor residual = vae__frames_of(in, o);
    if (g->shortcut) {
        brief->span.at[1] = o->at[1];
        residual = g->doubles ? t : vae__frames_of(brief, o); // some rows of x are under those of y
        VAE__TRY(vae__conv(m, g->shortcut, in, o, &residual, NULL));
    }
    return vae__conv(m, g->convs[g->n - 1], &band[g->n - 2], o, &t, &residual);
}

// Rows of a pass's bands. Within a limit of memory a power of two, the largest that leaves an
// eighth of the room to ops: kernels work on tiles of 4 or 8 rows, and on an H100 bands of 96 rows
// take longer than those of 64, whose tiles fill its units once.
static rocq_result vae__band_rows(const vae_model *m, const vae__banding *g, int32_t stop,
                                  int64_t *rows) {
    const int64_t w = g->y->size[0], room = vae__room(m) / 8 * 7;
    int64_t all = 0;
    *rows = g->rows;
    if (m->plan.limit == 0 || (g->turns && stop <= 2)) return ROCQ_OK;
    for (int32_t j = 0; j < stop; j++) {
        int64_t row;
        VAE__TRY(rocq_row_size(j == 0 ? m->stream : m->inner, w * g->convs[j]->m, &row));
        if (j < g->n - 1 || (g->shortcut && !g->doubles)) all += row;
    }
    while ((*rows & (*rows - 1)) != 0) *rows &= *rows - 1;
    while (*rows > 4 && (*rows + stop) * all > room) *rows /= 2;
    return ROCQ_OK;
}

// The bands, from the first to the last: all convolutions, or with stop < n those before `stop`,
// and the mean and variance of what that one reads. One convolution further from the last is a row
// further on, so that nothing is computed twice.
static rocq_result vae__pass(vae_model *m, const vae__banding *g, int32_t stop) {
    const int64_t *size = g->y->size, h = size[1];
    const int64_t levels[2] = {m->stack.level[0], m->stack.level[1]};
    const bool all = stop == g->n;
    const bool shares = g->turns && stop <= 2, up = shares ? stop == 2 : g->up;
    const int32_t n_between = all ? stop - 1 : stop; // bands that have memory
    int64_t ahead[4], rows;
    vae__value band[4], brief;
    memset(&brief, 0, sizeof brief);
    VAE__TRY(vae__band_rows(m, g, stop, &rows));
    const int64_t n_bands = (h + rows - 1) / rows;
    const int64_t ready = shares && stop == 2 ? h - (n_bands - 1) * rows : 0; // rows of band[0]
    for (int32_t j = stop - 1; j >= 0; j--) {
        ahead[j] = stop - 1 - j;
        if (g->convs[j]->upsample > 1) ahead[j] |= 1; // its rows begin at an odd one: vae__align
    }
    for (int32_t j = 0; j < n_between; j++) {
        const rocq_format format = g->doubles && j == 0 ? m->stream : m->inner;
        band[j] = g->shared;
        band[j].span.at[1] = up ? h - band[j].span.n[1] : 0;
        if (shares && j == 0) continue;
        VAE__TRY(vae__new_band(m, g, format, g->convs[j]->m, rows + stop, up, &band[j]));
    }
    if (all && g->shortcut && !g->doubles) {
        VAE__TRY(vae__new_band(m, g, m->stream, g->shortcut->m, rows, up, &brief));
    }
    for (int64_t k = 0; k < n_bands; k++) {
        const int64_t done = k * rows, end = k == n_bands - 1 ? h : done + rows;
        const vae__span o = vae__rows(size, done, end, up);
        const double flops = m->flops;
        for (int32_t j = 0; j < n_between; j++) {
            const int64_t from = k == 0               ? (j == 0 ? ready : 0)
                                 : done + ahead[j] < h ? done + ahead[j]
                                                       : h;
            const int64_t to = end + ahead[j] < h ? end + ahead[j] : h;
            // Rows o of the last have statistics, and those behind a doubling are added to the
            // result; else the row before the next convolution's is the first that is still read.
            int64_t first = j == stop - 1 || (all && g->doubles && j == 0) ? done : from;
            if (j < stop - 1 && done + ahead[j + 1] <= first) first = done + ahead[j + 1] - 1;
            if (k > 0) VAE__TRY(vae__advance(m, &band[j], from, from - first, up, shares));
            if (from == to) continue;
            const vae__span part = vae__rows(size, from, to, up);
            const rocq_tensor t = vae__frames_of(&band[j], &part);
            VAE__TRY(vae__conv(m, g->convs[j], j == 0 ? g->x : &band[j - 1], &part, &t, NULL));
        }
        if (all) {
            VAE__TRY(vae__end_of_bands(m, g, band, &brief, &o));
        } else {
            const rocq_tensor part = vae__frames_of(&band[stop - 1], &o);
            VAE__TRY(vae__group_stats(m, g->convs[stop], &part, true, k == 0));
        }
        if (!m->planning || k != 1 || n_bands <= 3) continue;
        m->flops += (double)(n_bands - 3) * (m->flops - flops);
        k = n_bands - 2; // the second stood for those up to the last
        for (int32_t j = 0; j < n_between; j++) {
            band[j].span.at[1] += (up ? -1 : 1) * (n_bands - 3) * rows;
        }
    }
    memcpy(m->stack.level, levels, sizeof levels);
    return ROCQ_OK;
}

// Two passes one behind the other, the first for a norm, turn: that one goes down and the next one
// up, so it begins with the rows of the last band, which are still there. These are the first two
// passes of a block of two convolutions: behind a doubling, for both of its norms; else for the
// second one, since statistics of x need no pass, and for the result, if that may go up.
static rocq_result vae__turn(vae_model *m, vae__banding *g) {
    const int32_t n = g->doubles ? 3 : 2;
    bool turns = g->n == n && (g->doubles || !g->shortcut);
    for (int32_t j = 1; j < n && turns; j++) turns = g->convs[j]->norm == VAE__GROUP_NORM;
    if (!turns) return ROCQ_OK;
    VAE__TRY(vae__band_rows(m, g, 2, &g->rows));
    g->turns = true;
    return vae__new_band(m, g, g->doubles ? m->stream : m->inner, g->convs[0]->m, g->rows + 2,
                         false, &g->shared);
}

// Modules a to b - 1, a block, or a convolution that doubles positions and a block. The result is
// in the place of x: rows of x are read before rows of the result replace them. What is between is
// computed once for the result, and once before for each norm of it.
//
// Through a shortcut rows of the result may be shorter than those of x. They lie where x ends on
// the stack, so from the other side of it the bands go up. Behind doubled positions the result is
// larger. It reaches over x to the inner end of the stack, from where its rows replace those of x:
// so from the side where the bands of a smaller result go down these go up.
static rocq_result vae__bands(vae_model *m, int32_t a, int32_t b, int32_t tile, vae__value *x,
                              vae__value *out) {
    const vae_module *mod = &m->net->modules[b - 1];
    vae_conv *convs = &m->net->convs[mod->first];
    const int64_t other = m->stack.level[!x->side];
    vae__value y = *x;
    vae__banding g;
    memset(&g, 0, sizeof g);
    g.doubles = b - a == 2;
    g.x = x;
    g.y = &y;
    m->inline_stats = false;
    memcpy(y.size, m->size[b], sizeof y.size);
    y.span = vae__whole(y.size);
    if (g.doubles) g.convs[g.n++] = &m->net->convs[m->net->modules[a].first];
    for (int32_t j = 0; j < mod->n; j++) g.convs[g.n++] = &convs[j];
    if (mod->residual == VAE__OF_SHORTCUT) g.shortcut = &convs[mod->n];
    g.up = g.doubles ? x->side == 0 : g.shortcut && x->side != 0;
    g.rows = tile * y.size[1] / m->full[1];
    if (g.doubles) g.rows -= g.rows % 2;
    VAE__TRY(vae__turn(m, &g));
    for (int32_t j = 0; j < g.n; j++) {
        if (g.convs[j]->norm != VAE__GROUP_NORM) continue;
        const rocq_tensor all = vae__frames_of(x, &x->span);
        if (j == 0) VAE__TRY(vae__group_stats(m, convs, &all, false, true));
        else VAE__TRY(vae__pass(m, &g, j));
    }
    if (g.doubles || g.shortcut) {
        int64_t bytes;
        const int64_t ne[4] = {g.shortcut ? g.shortcut->m : convs->c, y.size[0], y.size[1], 1};
        VAE__TRY(rocq_row_size(m->stream, ne[0] * ne[1] * ne[2], &bytes));
        bytes = (bytes + 255) / 256 * 256;
        const int64_t at = x->side == 0 ? x->full.offset : m->stack.buffer.size - x->mark - bytes;
        VAE__TRY(rocq_tensor_init(&y.full, &m->stack.buffer, at, m->stream, 4, ne));
        y.end = x->mark + bytes;
    }
    if (g.doubles) m->stack.level[!x->side] = other; // both passes that turn are over
    if (y.end > m->stack.level[x->side]) m->stack.level[x->side] = y.end;
    VAE__TRY(vae__pass(m, &g, g.n));
    m->stack.level[!x->side] = other;
    m->stack.level[x->side] = y.end;
    *out = y;
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

static rocq_result vae__emit(vae_model *m, const vae__value *v, const vae__span *o);

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
    if (n_run < chunks->n) { // the two behind the first stand for all behind it
        const int64_t step = chunks->size, all = (chunks->n - 1) * step;
        const int64_t rest = m->caches ? chunks->total - step : all;
        const double two = m->flops - flops - first_flops;
        m->flops = flops + first_flops + two * (double)rest / (double)(2 * step);
    }
    return ROCQ_OK;
}

// Modules a to b - 1 from x, a whole value, to out, another, or to the caller's memory. In tiles:
// first the norms one after the other, each by all tiles up to there, then all the way. A tile goes
// through all chunks of a video before the next begins: what convolutions keep of a chunk for the
// next is as much as many frames of the result, and of a tile it is small.
static rocq_result vae__segment(vae_model *m, int32_t a, int32_t b, int32_t tile, bool bands,
                                vae__value *x, vae__value *out) {
    const bool last = b == m->net->n_modules, owned = x->owned;
    const vae__span whole = vae__whole(m->size[b]);
    m->inline_stats = tile == 0;
    m->first_chunk = true;
    if (bands) return vae__bands(m, a, b, tile, x, out);
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

// to[c i] = from[i] scale + shift. Returns whether all n numbers are finite.
static bool vae__spread(float *to, int64_t c, const float *from, int64_t n, float scale,
                        float shift) {
    uint32_t most = 0; // bits of the largest magnitude; infinity and NaN have larger ones yet
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &from[i], sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
        to[c * i] = from[i] * scale + shift;
    }
    return most < 0x7f800000;
}

// Positions at to at + n - 1 of picture or frame p as the network reads them: channels innermost,
// and for a decoder as z = latent / scale + shift (TAESD's: latent / 3, whose tanh the device
// takes), for an encoder from -1 to 1. Returns whether all numbers are finite.
static bool vae__gather_input(const vae_model *m, float *to, int64_t p, int64_t at, int64_t n) {
    const vae_request *job = m->job;
    const int64_t area = (int64_t)job->width * job->height, c = m->net->c_in;
    const int64_t frames = m->video ? job->frames : 1, frame = p % frames, item = p / frames;
    bool finite = true;
    for (int32_t k = 0; k < m->z && m->net == &m->decoder; k++) {
        const float *plane = job->latents + area * (frame + frames * (k + (int64_t)m->z * item));
        finite &= vae__spread(to + k, c, plane + at, n, m->tanh_latents ? 1.0f / 3 : m->z_std[k],
                              m->tanh_latents ? 0 : m->z_mean[k]);
    }
    for (int64_t i = 0; i < n * c && m->net == &m->encoder; i++) {
        const int64_t from = i + c * (at + area * p);
        const float v = job->from_pixels ? (float)job->from_pixels[from] / 255
                                         : job->from_values[from];
        finite &= v - v == 0;
        to[i] = (v - m->pixel_bias) / m->pixel_scale;
    }
    return finite;
}

// Uploads pictures or frames `first` to first + n - 1, 64 KiB at a time: an allocator may take 128
// KiB or more from the system each time, page by page.
static rocq_result vae__upload(vae_model *m, const rocq_tensor *t, int64_t first, int64_t n) {
    const int64_t area = (int64_t)m->job->width * m->job->height, c = t->ne[0], all = n * area;
    const int64_t flat[2] = {c, all}, most = 1 + 16383 / c; // positions
    const size_t size = (size_t)(most * c) * sizeof(float);
    rocq_result result = ROCQ_OK;
    rocq_tensor positions;
    float *rows;
    VAE__TRY(vae__flush(m));
    VAE__TRY(rocq_tensor_reshape(&positions, t, 2, flat));
    VAE__TRY(vae__allocate(m, &rows, size));
    for (int64_t at = 0, count; at < all && result == ROCQ_OK; at += count) {
        bool finite = true;
        count = at + most < all ? most : all - at;
        for (int64_t i = at, own; i < at + count; i += own) { // of one picture
            own = area - i % area < at + count - i ? area - i % area : at + count - i;
            finite &= vae__gather_input(m, rows + (i - at) * c, first + i / area, i % area, own);
        }
        const rocq_tensor to = rocq_tensor_slice(&positions, 1, at, count);
        result = finite ? rocq_upload(m->ctx, &to, rows, rocq_tensor_size(&to))
                        : vae__fail(m, ROCQ_E_ARGUMENT, "the %s are not all finite numbers",
                                    m->net == &m->decoder ? "latents" : "pictures");
    }
    vae__free(m, rows, size);
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

// Whether a value may have left F16 without that the statistics of a GroupNorm tell: then what is
// delivered is looked at.
static bool vae__looks(const vae_model *m) {
    bool looks = m->stream == ROCQ_F16;
    for (int32_t i = 0; i < m->net->n_convs; i++) {
        looks &= m->net->convs[i].norm != VAE__GROUP_NORM;
    }
    return looks;
}

// The mean of an encoder's output: half of its channels.
static void vae__store_latents(vae_model *m, const float *from, const vae__span *o, int64_t first,
                               int64_t n) {
    const int64_t w = m->size[m->net->n_modules][0], h = m->size[m->net->n_modules][1], z = m->z;
    const bool looks = vae__looks(m);
    for (int64_t p = 0; p < n; p++) {
        for (int64_t y = 0; y < o->n[1]; y++) {
            for (int64_t x = 0; x < o->n[0]; x++, from += m->net->c_out) {
                for (int64_t k = 0; k < z; k++) {
                    m->job->to_latents[o->at[0] + x +
                                       w * (o->at[1] + y + h * (k + z * (first + p)))] =
                        (from[k] - m->z_mean[k]) / m->z_std[k];
                    if (looks) m->finite &= from[k] - from[k] == 0;
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
// which has `size` bytes a position: 3 are pixels, of which `finite` tells by rows whether they
// come from finite values, if it is not NULL; floats are brought to the caller's scale. Whole
// pictures need no copy between.
static rocq_result vae__fetch(vae_model *m, const rocq_tensor *t, const rocq_tensor *finite,
                              void *to, int64_t size, const vae__span *o, int64_t first) {
    const int64_t w = (int64_t)m->job->width * m->scale, h = (int64_t)m->job->height * m->scale;
    const int64_t count = rocq_tensor_count(t), n_rows = t->ne[2] * t->ne[3];
    const size_t bytes = (size_t)(count / 3 * size);
    const bool whole = o->n[0] == w && o->n[1] == h, looks = vae__looks(m);
    void *data = whole ? (unsigned char *)to + size * w * h * first : NULL;
    unsigned char *rows;
    VAE__TRY(vae__flush(m));
    VAE__TRY(vae__upload_ahead(m));
    VAE__TRY(vae__allocate(m, &rows, (size_t)n_rows));
    rocq_result result = whole ? ROCQ_OK : vae__allocate(m, &data, bytes);
    if (result == ROCQ_OK) {
        const rocq_transfer both[2] = {{data, t, (int64_t)bytes}, {rows, finite, n_rows}};
        result = rocq_download_all(m->ctx, both, finite ? 2 : 1);
    }
    for (int64_t i = 0; i < n_rows && finite; i++) m->finite &= rows[i] != 0;
    vae__free(m, rows, (size_t)n_rows);
    if (result == ROCQ_OK && size > 3) {
        float *values = (float *)data;
        for (int64_t i = 0; i < count; i++) {
            if (looks) m->finite &= values[i] - values[i] == 0;
            values[i] = values[i] * m->pixel_scale + m->pixel_bias;
        }
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
        rocq_tensor bytes, finite;
        VAE__TRY(vae__take(m, 0, ROCQ_I8, 3, t->ne[1], t->ne[2], t->ne[3], &bytes));
        VAE__TRY(vae__take(m, 0, ROCQ_I8, t->ne[2], t->ne[3], 1, 1, &finite));
        const rocq_tensor *look = vae__looks(m) ? &finite : NULL;
        const rocq_pixels_params pixels = {.y = &bytes, .x = t, .finite = look,
                                           .scale = m->pixel_scale, .bias = m->pixel_bias};
        VAE__RUN(m, pixels, &pixels);
        m->stack.level[0] = level;
        if (!m->planning) VAE__TRY(vae__fetch(m, &bytes, look, job->pixels, 3, o, first));
    }
    if (m->planning || !job->values) return ROCQ_OK;
    return vae__fetch(m, t, NULL, job->values, 3 * (int64_t)sizeof(float), o, first);
}

// Whether statistics are those of finite values.
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
static rocq_result vae__emit(vae_model *m, const vae__value *v, const vae__span *o) {
    const rocq_tensor t = vae__frames_of(v, o);
    if (!m->blending) return vae__download(m, &t, o, m->first + m->at[2]);
    const int64_t start[4] = {0, m->at[0], m->at[1], m->at[2]};
    rocq_tensor sum;
    for (int d = 0; d < 3; d++) {
        if (m->ramp[d].n_dims == 0) continue;
        const rocq_binary_params weigh = {.y = &t, .a = &t, .b = &m->ramp[d]};
        VAE__RUN(m, mul, &weigh);
    }
    VAE__TRY(rocq_tensor_view(&sum, &m->blended, start, t.ne));
    const rocq_binary_params add = {.y = &sum, .a = &sum, .b = &t};
    VAE__RUN(m, add, &add);
    return ROCQ_OK;
}

#endif // VAE_TILES_H
