// experts.h - a part of llama.h: experts of mixtures that do not fit a budget of memory.
//
// The file's experts then lie in host memory, which a GPU's kernels read through the bus, or on the
// CPU in the mapped file, and each layer has slots for copies of its most used experts, as many as
// the budget allows. A table on the device says which expert has which slot, so that a recorded
// step stays as it is when they change. What the router chose is counted here, on the host, between
// batches. Copies have the bits of what they are copies of: no logit depends on any of this.

#ifndef LLAMA_EXPERTS_H
#define LLAMA_EXPERTS_H

// The three weights that an expert of layer l has a part of (two where gate and up are one), and
// where its copies are.
static int llama__expert_weights(llama_layer *l, const rocq_tensor *w[3], rocq_tensor *kept[3]) {
    rocq_tensor *const all[3] = {&l->expert_gate, &l->expert_down, &l->expert_up};
    rocq_tensor *const to[3] = {&l->gate_kept, &l->down_kept, &l->up_kept};
    int n = 0;
    for (int i = 0; i < 3 && all[i]->n_dims > 0; i++, n++) {
        w[i] = all[i];
        kept[i] = to[i];
    }
    return n;
}

// Cuts the tables and slots of all layers, as llama__cut does activations.
static rocq_result llama__cut_experts(llama_model *m, rocq_arena *arena) {
    for (int32_t i = 0; i < m->n_layers; i++) {
        llama_layer *l = &m->layers[i];
        const rocq_tensor *w[3];
        rocq_tensor *kept[3];
        const int n = llama__expert_weights(l, w, kept);
        l->kept.n_dims = 0;
        for (int k = 0; k < n; k++) {
            kept[k]->n_dims = 0;
            if (l->n_kept == 0) continue;
            LLAMA__TRY(rocq_tensor_3d(arena, kept[k], w[k]->format, w[k]->ne[0], w[k]->ne[1],
                                      l->n_kept));
            kept[k]->layout = w[k]->layout;
        }
        if (l->n_kept > 0) LLAMA__TRY(rocq_tensor_1d(arena, &l->kept, ROCQ_I32, m->n_experts));
    }
    return ROCQ_OK;
}

// Gives each layer one slot a round while the budget lasts; *bytes is what they all take.
static rocq_result llama__share_slots(llama_model *m, int64_t *bytes) {
    *bytes = 0;
    for (bool more = true; more;) {
        more = false;
        for (int32_t i = 0; i < m->n_layers; i++) {
            llama_layer *l = &m->layers[i];
            rocq_arena arena;
            if (l->router.n_dims == 0 || l->n_kept == m->n_experts) continue;
            l->n_kept++;
            rocq_arena_init(&arena, NULL);
            LLAMA__TRY(llama__cut_experts(m, &arena));
            const bool fits = arena.peak <= m->options.expert_memory;
            if (fits) *bytes = arena.peak;
            else l->n_kept--;
            more = more || fits;
        }
    }
    return ROCQ_OK;
}

static rocq_result llama__keep(llama_model *m, llama_layer *l, int32_t expert, int32_t slot) {
    const rocq_tensor *w[3];
    rocq_tensor *kept[3];
    for (int i = llama__expert_weights(l, w, kept); i-- > 0;) {
        LLAMA__TRY(rocq_copy_slice(m->ctx, kept[i], slot, w[i], expert));
    }
    l->place[expert] = slot;
    return ROCQ_OK;
}

static size_t llama__places_size(const llama_model *m) {
    const size_t each = (size_t)m->n_experts * (sizeof(int32_t) + sizeof(float));
    return (size_t)m->n_layers * (each + (size_t)m->n_used * (size_t)m->n_batch * sizeof(int32_t));
}

// Once the experts are loaded: takes memory for the slots, which the first experts get.
static rocq_result llama__make_slots(llama_model *m) {
    const int64_t n = m->n_experts;
    int64_t bytes;
    rocq_arena arena;
    if (!m->counts) return ROCQ_OK;
    LLAMA__TRY(llama__allocate(m, &m->places, llama__places_size(m)));
    m->taken = m->places + 2 * n * m->n_layers;
    LLAMA__TRY(llama__share_slots(m, &bytes));
    if (bytes > 0) LLAMA__TRY(rocq_buffer_alloc(m->ctx, &m->slots, bytes));
    rocq_arena_init(&arena, &m->slots);
    LLAMA__TRY(llama__cut_experts(m, &arena));
    for (int32_t i = 0; i < m->n_layers; i++) {
        llama_layer *l = &m->layers[i];
        l->place = m->places + 2 * n * i;
        l->heat = (float *)(void *)(l->place + n);
        for (int32_t e = 0; e < n; e++) {
            l->place[e] = -1;
            if (e < l->n_kept) LLAMA__TRY(llama__keep(m, l, e, e));
        }
        if (l->n_kept == 0) continue;
        LLAMA__TRY(rocq_upload(m->ctx, &l->kept, l->place, rocq_tensor_size(&l->kept)));
    }
    return ROCQ_OK;
}

// The expert of a layer that is used most of those without a slot, or least of those with one.
static int32_t llama__extreme(const llama_model *m, const llama_layer *l, bool kept) {
    int32_t found = -1;
    for (int32_t e = 0; e < m->n_experts; e++) {
        if ((l->place[e] >= 0) != kept) continue;
        if (found < 0 || (kept ? l->heat[e] < l->heat[found] : l->heat[e] > l->heat[found])) {
            found = e;
        }
    }
    return found;
}

// Gives slots of a layer to experts that are used more than those that have them. heat counts the
// uses of an expert, and is multiplied by LLAMA__FADE each time the layer has its turn. Of an
// expert that is used u times between two turns it tends to u / (1 - LLAMA__FADE). So where two
// differ by 1 / (1 - LLAMA__FADE), the exchange saves one read through the bus until the next turn,
// and that is what making the copy costs.
#define LLAMA__FADE 0.875f
static rocq_result llama__exchange(llama_model *m, llama_layer *l) {
    bool changed = false;
    for (; l->n_kept > 0 && l->n_kept < m->n_experts; changed = true) {
        const int32_t in = llama__extreme(m, l, false), out = llama__extreme(m, l, true);
        if (l->heat[in] < l->heat[out] + 1 / (1 - LLAMA__FADE)) break;
        LLAMA__TRY(llama__keep(m, l, in, l->place[out]));
        l->place[out] = -1;
    }
    for (int32_t e = 0; e < m->n_experts; e++) l->heat[e] *= LLAMA__FADE;
    if (!changed) return ROCQ_OK;
    return rocq_upload(m->ctx, &l->kept, l->place, rocq_tensor_size(&l->kept));
}
#undef LLAMA__FADE

// Counts what the last batch has used; then a layer for each of its tokens has its turn.
static rocq_result llama__count_experts(llama_model *m) {
    const int64_t n = m->uncounted;
    m->uncounted = 0;
    if (!m->counts || n == 0) return ROCQ_OK;
    const rocq_tensor chosen = rocq_tensor_slice(&m->chosen, 1, 0, n);
    LLAMA__TRY(rocq_download(m->ctx, m->taken, &chosen, rocq_tensor_size(&chosen)));
    for (int64_t k = 0; k < rocq_tensor_count(&chosen); k++) {
        llama_layer *l = &m->layers[k / m->n_used % m->n_layers];
        if (l->router.n_dims == 0) continue;
        l->heat[m->taken[k]] += 1;
        l->n_hits += l->place[m->taken[k]] >= 0;
        l->n_uses++;
    }
    for (int64_t i = 0; i < n && i < m->n_layers; i++) {
        LLAMA__TRY(llama__exchange(m, &m->layers[m->turn]));
        m->turn = (m->turn + 1) % m->n_layers;
    }
    return ROCQ_OK;
}

// Orders the list so that what lies in the file's experts comes last, and returns how much comes
// before it; all, where there is no budget, or it holds them all.
static int32_t llama__experts_last(llama_model *m, const rocq_gguf *file,
                                   const llama__list *list) {
    int32_t n = m->n_weights;
    if (m->options.expert_memory == 0 || m->expert_bytes <= m->options.expert_memory) return n;
    for (int32_t i = 0; i < n;) {
        const char *name = list->names[i];
        rocq_tensor *place = list->places[i];
        rocq_gguf_tensor t;
        const bool of_experts = rocq_gguf_find_tensor(file, name, &t) == ROCQ_OK && t.ne[2] > 1;
        if (!of_experts) {
            i++;
            continue;
        }
        list->names[i] = list->names[--n];
        list->places[i] = list->places[n];
        list->names[n] = name;
        list->places[n] = place;
    }
    m->counts = n < m->n_weights;
    return n;
}

#endif // LLAMA_EXPERTS_H
