// Products by experts: one product of each token by its experts, or their whole feed-forward layer, in one call.
//
// A slot is a pair of a token and one of its experts. Slots are sorted by expert, and the rows of x of one expert are
// cut into slices as qgemm_multiply cuts x, so that an expert's product has the bits of a product by its matrix alone.
// Slices go through a layer in waves of up to WAVE slots: pack x, multiply by gate and up, pack the activations between
// the products, multiply by down. The slices of a wave are one job of the pool, in items of (slice, LEAST_ROWS rows of
// W). All input is read before y is written, so y may overlap it.
//
// Macros: MATRIX_FIELDS, EXPERTS_FIELDS, the fields of `matrix` and `experts` (qgemm/cpu/native/calls.py).

typedef struct {
    MATRIX_FIELDS
} matrix;

typedef struct {
    EXPERTS_FIELDS
} experts;

enum { WAVE = 2048 };
_Static_assert(WAVE >= MOST_TOKENS, "a slice fits in a wave");

// Rows of x that one expert multiplies together: slots `slot` to slot + m - 1.
typedef struct {
    int64_t expert, slot, m;
    int tiles;
} expert_slice;

// Parts of the scratch memory. places: the index in ids of each slot; slots: the inverse. factors: the router's
// weights, in the order of ids. biases: float32 of the experts in use, for gate, up and down. targets, products, ends:
// two for each slice of a wave. sums: y of each slot.
typedef struct {
    int64_t *starts, *ends;  // starts: the first slot of each expert
    int32_t *places, *slots;
    expert_slice* slices;
    target* targets;
    product* products;
    char* packed;
    float *factors, *converted, *between, *sums, *biases[3];
} expert_memory;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int has_layer(const experts* e) { return e->gate.target.n != 0; }

static int64_t count_slots(const experts* e) { return e->tokens * e->top_k; }

static int64_t packed_bytes(const matrix* w, int64_t rows) {
    const target* t = &w->target;
    return rows * (t->row_bytes > t->tile_bytes ? t->row_bytes : t->tile_bytes);
}

// Each expert has at most two slices, by tiles and row by row, for max_tokens of its slots or a part of them.
static int64_t max_slices(const experts* e) {
    const int64_t slots = count_slots(e);
    return least(slots, 2 * (least(e->count, slots) + slots / max_tokens(&e->down.target)));
}

// The weights whose products the gate's are gated with.
static matrix up_of(const experts* e) {
    if (!e->merged) return e->up;
    matrix up = e->gate;
    up.target.gate = 0;
    up.target.w = (char*)up.target.w + up.target.n * up.target.w_row;
    if (up.target.bias) up.target.bias = (char*)up.target.bias + up.target.n * size_of_type((int)up.bias_type);
    return up;
}

static void* part(char* base, int64_t* used, int64_t bytes) {
    char* result = base ? base + *used : 0;
    *used += (bytes + 63) / 64 * 64;
    return result;
}

// Divides the scratch memory at `base`, or none, and returns its size.
static int64_t divide_memory(const experts* e, char* base, expert_memory* to) {
    const int64_t slots = count_slots(e), wave = least(slots, WAVE), slices = max_slices(e);
    const int64_t pairs = 2 * least(slices, wave), x_rows = slots / e->slots_of_row;
    const matrix matrices[] = {e->gate, up_of(e), e->down};
    const matrix* reads_x = has_layer(e) ? &e->gate : &e->down;
    int64_t used = 0, packed = packed_bytes(&e->down, wave);
    if (has_layer(e)) {
        const int64_t both =
            packed_bytes(&e->gate, wave) + (matrices[1].target.packed_by ? packed_bytes(&matrices[1], wave) : 0);
        packed = both > packed ? both : packed;
    }
    to->starts = part(base, &used, (e->count + 1) * sizeof(int64_t));
    to->ends = part(base, &used, pairs * sizeof(int64_t));
    to->places = part(base, &used, slots * sizeof(int32_t));
    to->slots = part(base, &used, slots * sizeof(int32_t));
    to->slices = part(base, &used, slices * sizeof(expert_slice));
    to->targets = part(base, &used, pairs * sizeof(target));
    to->products = part(base, &used, pairs * sizeof(product));
    to->packed = part(base, &used, packed);
    to->factors = part(base, &used, slots * sizeof(float));
    to->converted =
        part(base, &used, reads_x->target.x_type == TYPE_FLOAT32 ? 0 : x_rows * reads_x->target.k * sizeof(float));
    to->between = part(base, &used, wave * e->gate.target.n * sizeof(float));
    to->sums = part(base, &used, slots * e->down.target.n * sizeof(float));
    for (int i = 0; i < 3; ++i) {
        const matrix* w = &matrices[i];
        to->biases[i] = part(base, &used, w->bias_type == TYPE_FLOAT32 ? 0 : e->count * w->target.n * sizeof(float));
    }
    return used;
}

int64_t qgemm_experts_bytes(const void* of) {
    expert_memory unused;
    return divide_memory(of, 0, &unused);
}

static int64_t id_at(const experts* e, int64_t place) {
    return e->id_bytes == 8 ? ((const int64_t*)e->ids)[place] : ((const int32_t*)e->ids)[place];
}

// Sorts the slots by expert, in the order of ids within one; returns 0 for an id that is no expert.
static int sort_slots(const experts* e, expert_memory* m) {
    const int64_t slots = count_slots(e);
    memset(m->starts, 0, (e->count + 1) * sizeof *m->starts);
    for (int64_t i = 0; i < slots; ++i) {
        const int64_t id = id_at(e, i);
        if (id < 0 || id >= e->count) return 0;
        ++m->starts[id];
    }
    for (int64_t i = 0, begin = 0; i <= e->count; ++i) {
        const int64_t count = m->starts[i];
        m->starts[i] = begin, begin += count;
    }
    for (int64_t i = 0; i < slots; ++i) {  // moves each start to the end, which is the next expert's start
        const int64_t slot = m->starts[id_at(e, i)]++;
        m->places[slot] = (int32_t)i, m->slots[i] = (int32_t)slot;
    }
    return 1;
}

// Cuts the rows of each expert, whose starts sort_slots left at their ends; returns the number of slices.
static int64_t cut_slices(const experts* e, const expert_memory* m) {
    const int64_t limit = max_tokens(&e->down.target);
    int64_t count = 0;
    for (int64_t i = 0, slot = 0; i < e->count; ++i)
        while (slot < m->starts[i]) {
            const int64_t rows = least(m->starts[i] - slot, limit), tiled = tiled_tokens(rows);
            if (tiled) m->slices[count++] = (expert_slice){i, slot, tiled, 1};
            if (rows > tiled) m->slices[count++] = (expert_slice){i, slot + tiled, rows - tiled, 0};
            slot += rows;
        }
    return count;
}

// A bias of an expert as float32, in `to` if it is of another type.
static const void* bias_of(const matrix* w, int64_t expert, float* to) {
    const char* from = (const char*)w->target.bias + expert * w->bias_row;
    const int64_t n = w->target.n, size = size_of_type(w->bias_type);
    if (!w->target.bias || w->bias_type == TYPE_FLOAT32) return w->target.bias ? from : 0;
    for (int64_t i = 0; i < n; i += 16)
        store_partial(to + expert * n + i, load_partial(from + i * size, n - i, w->bias_type), n - i, TYPE_FLOAT32);
    return to + expert * n;
}

// The products of the slices of a wave by one matrix or by two, of which the first gates the second. places: of the
// slots of the wave, whose rows of x are places / slots_of_row; null where x has a row for each slot.
typedef struct {
    const expert_slice* slices;
    const int32_t* places;
    const char* x;
    int64_t x_row, slots_of_row, matrices;
    const target* targets;
    const product* products;
} slices_job;

// Packs the rows of x of slots first to last - 1 of a wave.
static void pack_slots(const void* argument, int64_t first, int64_t last) {
    const slices_job* job = argument;
    const int64_t begin = job->slices->slot;
    for (int64_t i = 0, slot = first; slot < last; ++slot) {
        while (job->slices[i].slot + job->slices[i].m - begin <= slot) ++i;
        const int64_t row = job->places ? job->places[slot] / job->slots_of_row : slot;
        const int64_t own = slot + begin - job->slices[i].slot;
        for (int64_t j = 0; j < job->matrices; ++j) {
            const target* t = &job->targets[i * job->matrices + j];
            if (t->packed_by != j) continue;
            const packing rows = packing_of(t, &job->products[i * job->matrices + j], job->x + row * job->x_row, 0);
            ((work_fn)t->pack)(&rows, own, own + 1);
        }
    }
}

// y [slots of the wave, n] = x by the matrices of each slice's expert. biases: one memory for each matrix.
static void multiply_wave(slices_job job, int64_t count, const matrix* w, float* const* biases, const expert_memory* m,
                          float* y, int64_t rows_of_x) {
    const int64_t slots = job.slices[count - 1].slot + job.slices[count - 1].m - job.slices->slot;
    int64_t items = 0, steps = 0;
    int tiles = 0;
    char* packed = m->packed;
    job.targets = m->targets, job.products = m->products;
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < job.matrices; ++j) {
            const expert_slice* s = &job.slices[i];
            target* t = &m->targets[i * job.matrices + j];
            product* p = &m->products[i * job.matrices + j];
            *t = w[j].target;
            t->w = (char*)t->w + s->expert * w[j].expert_bytes;
            t->bias = (void*)bias_of(&w[j], s->expert, biases[j]);
            t->y_row = t->n * (int64_t)sizeof(float);
            t->y = y + (s->slot - job.slices->slot) * t->n;
            *p = product_of(t, s->m, s->tiles);
            if (t->packed_by == j)
                p->packed = packed, packed += s->m * p->packed_row;
            else
                p->packed = p[-1].packed;
            items += j ? 0 : items_of(t);
            m->ends[i * job.matrices + j] = items;
            steps += s->m * t->n * t->k, tiles |= s->tiles;
        }
    const rows_job rows = {
        .count = count * job.matrices, .targets = m->targets, .products = m->products, .end = m->ends};
    run_items(pack_slots, &job, slots, chunk_size(slots, CHUNKS), rows_of_x, STEPS_OF_NUMBER * slots * w->target.k);
    run_items(multiply_rows, &rows, items, chunk_size(items, tiles ? CHUNKS_OF_TILES : CHUNKS), rows_of_x, steps);
}

typedef struct {
    const experts* call;
    const expert_memory* memory;
} sums_job;

// Writes rows first to last - 1 of y: of a layer the sum of a token's slots by the router's weights, else a slot each.
static void write_rows(const void* argument, int64_t first, int64_t last) {
    const sums_job* job = argument;
    const experts* e = job->call;
    const int64_t terms = has_layer(e) ? e->top_k : 1, n = e->down.target.n, size = size_of_type(e->y_type);
    const uint64_t mode = enter_ieee_mode();
    for (int64_t row = first; row < last; ++row)
        for (int64_t i = 0; i < n; i += 16) {
            f32x16 v = all_floats(0);
            for (int64_t j = 0; j < terms; ++j) {
                const int64_t place = row * terms + j;
                const float* sums = job->memory->sums + job->memory->slots[place] * n + i;
                const f32x16 term = load_partial(sums, n - i, TYPE_FLOAT32);
                v = has_layer(e) ? mul_add(v, term, all_floats(job->memory->factors[place])) : term;
            }
            store_partial((char*)e->y + row * e->y_row + i * size, v, n - i, e->y_type);
        }
    restore_mode(mode);
}

static void read_factors(const experts* e, float* to) {
    const int64_t slots = count_slots(e), size = size_of_type(e->weights_type);
    for (int64_t i = 0; i < slots; i += 16) {
        const f32x16 v = load_partial((const char*)e->weights + i * size, slots - i, e->weights_type);
        store_partial(to + i, v, slots - i, TYPE_FLOAT32);
    }
}

// y of a layer, or of a product, by experts; returns 0 for an id that is no expert, and has then done nothing.
// memory: qgemm_experts_bytes.
static int multiply_by_experts(const experts* e, char* memory) {
    expert_memory m;
    divide_memory(e, memory, &m);
    if (!sort_slots(e, &m)) return 0;
    const matrix pair[2] = {e->gate, up_of(e)};
    const int64_t count = cut_slices(e, &m), rows = e->tokens, slots = count_slots(e);
    const target* reads_x = has_layer(e) ? &e->gate.target : &e->down.target;
    slices_job by_x = {.x = e->x, .x_row = reads_x->x_row, .slots_of_row = e->slots_of_row};
    const uint64_t mode = enter_ieee_mode();
    if (has_layer(e)) read_factors(e, m.factors);
    if (reads_x->x_type != TYPE_FLOAT32) {
        convert(reads_x, e->x, slots / e->slots_of_row, m.converted);
        by_x.x = (const char*)m.converted, by_x.x_row = reads_x->k * (int64_t)sizeof(float);
    }
    for (int64_t first = 0, end; first < count; first = end) {
        int64_t wave = m.slices[first].m;
        for (end = first + 1; end < count && wave + m.slices[end].m <= WAVE; ++end) wave += m.slices[end].m;
        const int64_t slot = m.slices[first].slot;
        float* sums = m.sums + slot * e->down.target.n;
        by_x.slices = m.slices + first, by_x.places = m.places + slot;
        slices_job by_between = {.slices = by_x.slices,
                                 .x = (const char*)m.between,
                                 .x_row = e->down.target.k * (int64_t)sizeof(float),
                                 .matrices = 1};
        by_x.matrices = has_layer(e) ? 2 : 1;
        if (has_layer(e)) multiply_wave(by_x, end - first, pair, m.biases, &m, m.between, rows);
        multiply_wave(has_layer(e) ? by_between : by_x, end - first, &e->down, m.biases + 2, &m, sums, rows);
    }
    const sums_job all = {e, &m};
    const int64_t y_rows = has_layer(e) ? e->tokens : slots;
    run_items(write_rows, &all, y_rows, chunk_size(y_rows, CHUNKS), rows, STEPS_OF_NUMBER * slots * e->down.target.n);
    restore_mode(mode);
    return 1;
}
