// Products of one x by several weights. x is packed once for each way in which the weights' formats read it; then the
// rows of all weights are one job of the pool. Where an epilogue follows (epilogue.h), a thread applies it to
// LEAST_ROWS rows of W at a time, while their sums are in its cache.
//
// Macros (qgemm/cpu/native/calls.py):
//
// TARGET_FIELDS      the fields of `target`, the weights of one product and its y
// MOST_TARGETS       maximum number of weights of a call
// MOST_TOKENS        rows of x packed at a time with ONE_DIGIT digits; half as many otherwise
// LEAST_TILED        rows of x from which on tiles are used
// TOKENS_OF_TILE     tiles accept multiples of this number of rows of x
// LEAST_ROWS         minimum number of rows of W for a thread
// CHUNKS, CHUNKS_OF_TILES   chunks of rows for each thread, without and with tiles
// EXACT_DIGITS       digits of x for "a16"
#include <string.h>

typedef struct {
    TARGET_FIELDS
} target;

#include "epilogue.h"

enum { STEPS_OF_NUMBER = 8 };  // multiply-adds in the time that a number of x needs to be converted or packed

// The rows of all weights as one sequence of items, LEAST_ROWS rows each. Weights that another product gates have no
// items: they are multiplied together with their gate.
typedef struct {
    int64_t count, token;
    const target* targets;
    product* products;
    int64_t* end;  // end of each weight's items
} rows_job;

// Multiplies rows first to last - 1 (at most LEAST_ROWS) of weights i into a buffer of this thread.
static void sum_rows(const rows_job* job, int64_t i, int64_t first, int64_t last, float* sums) {
    product p = job->products[i];
    p.w = (const char*)p.w + first * p.w_row, p.n = last - first, p.y = sums, p.y_row = LEAST_ROWS;
    ((work_fn)job->targets[i].rows)(&p, 0, last - first);
}

static void multiply_and_finish(const rows_job* job, int64_t i, int64_t first, int64_t last) {
    const target* t = &job->targets[i];
    float sums[2][MOST_TOKENS * LEAST_ROWS];
    const uint64_t mode = enter_ieee_mode();
    for (int64_t row = first; row < last; row += LEAST_ROWS) {
        const int64_t stop = row + LEAST_ROWS < last ? row + LEAST_ROWS : last;
        sum_rows(job, i, row, stop, sums[0]);
        if (t->gate) sum_rows(job, i + 1, row, stop, sums[1]);
        apply_epilogue(t, job->token, job->products[i].m, row, stop, sums[0], sums[1]);
    }
    restore_mode(mode);
}

static void multiply_rows(const void* argument, int64_t first, int64_t last) {
    const rows_job* job = argument;
    for (int64_t i = 0, begin = 0; i < job->count && begin < last; begin = job->end[i++]) {
        const int64_t from = first > begin ? first : begin, to = last < job->end[i] ? last : job->end[i];
        if (from >= to) continue;
        const product* p = &job->products[i];
        const int64_t row = (from - begin) * LEAST_ROWS, end = (to - begin) * LEAST_ROWS,
                      stop = end < p->n ? end : p->n;
        if (has_epilogue(&job->targets[i]))
            multiply_and_finish(job, i, row, stop);
        else
            ((work_fn)job->targets[i].rows)(p, row, stop);
    }
}

static int64_t chunk_size(int64_t count, int64_t chunks) {
    const int64_t shares = chunks * (int64_t)(pool.wanted_helpers + 1);
    return (count + shares - 1) / shares;
}

// The product by one of the weights of a call; m: rows of x; tiled: whether they are a multiple of TOKENS_OF_TILE, for
// tiles. Interleaved weights read x in the order of tiles in any case. The caller adds the address of packed x.
static product product_of(const target* t, int64_t m, int tiled) {
    const int interleaved = t->interleaved != NULL, tiles = tiled || interleaved;
    return (product){.w = interleaved ? t->interleaved : t->w,
                     .w_row = interleaved ? t->interleaved_row : t->w_row,
                     .packed_row = tiled || (tiles && t->digits == ONE_DIGIT) ? t->tile_bytes : t->row_bytes,
                     .y = t->y,
                     .y_row = t->y_row / (int64_t)sizeof(float),
                     .table = t->table,
                     .eight = (work_fn)t->eight,
                     .m = m,
                     .n = t->n,
                     .k = t->k,
                     .unit = t->unit,
                     .digits = tiled && t->digits == EXACT_DIGITS ? 0 : t->digits,
                     .tiles = tiles,
                     .interleaved = interleaved};
}

// Packs rows of x for a product.
static packing packing_of(const target* t, const product* p, const char* x, int64_t x_row) {
    return (packing){.to = (char*)p->packed,
                     .to_row = p->packed_row,
                     .x = x,
                     .x_row = x_row,
                     .quantize = (quantize_fn)t->quantize,
                     .m = p->m,
                     .k = p->k,
                     .digits = p->digits,
                     .tiles = p->tiles};
}

static int64_t items_of(const target* t) { return (t->n + LEAST_ROWS - 1) / LEAST_ROWS; }

// Multiplies rows token to token + m - 1 of x by all weights, by tiles or row by row. x_row: bytes between rows of x.
static void multiply_slice(const target* targets, int64_t count, const char* x, int64_t x_row, int64_t token, int64_t m,
                           int tiles, char* packed) {
    product products[MOST_TARGETS];
    int64_t end[MOST_TARGETS], steps = 0;
    const rows_job job = {.count = count, .token = token, .targets = targets, .products = products, .end = end};
    for (int64_t i = 0, items = 0; i < count; ++i) {
        const target* t = &targets[i];
        product* p = &products[i];
        *p = product_of(t, m, tiles);
        p->y = (float*)((char*)t->y + token * t->y_row);
        const int gated = i && targets[i - 1].gate;  // the weights before gate these
        steps += m * t->n * t->k;
        end[i] = items += gated ? 0 : items_of(t);
        if (t->packed_by != i) {  // another product packs x in the same order
            p->packed = products[t->packed_by].packed;
            continue;
        }
        p->packed = packed;
        const packing rows = packing_of(t, p, x, x_row);
        run_items((work_fn)t->pack, &rows, m, m > 1 ? chunk_size(m, CHUNKS) : 1, m, STEPS_OF_NUMBER * m * t->k);
        packed += m * p->packed_row;
    }
    run_items(multiply_rows, &job, end[count - 1], chunk_size(end[count - 1], tiles ? CHUNKS_OF_TILES : CHUNKS), m,
              steps);
}

// Converts rows of x of another type to float32.
typedef struct {
    const char* from;
    float* to;
    int64_t k, row;  // bytes between rows
    int32_t type;
} conversion;

static void convert_rows(const void* argument, int64_t first, int64_t last) {
    const conversion* p = argument;
    const int64_t size = size_of_type(p->type);
    const uint64_t mode = enter_ieee_mode();
    for (int64_t row = first; row < last; ++row)
        for (int64_t i = 0; i < p->k; i += 16) {
            const f32x16 v = load_partial(p->from + row * p->row + i * size, p->k - i, p->type);
            store_partial(p->to + row * p->k + i, v, p->k - i, TYPE_FLOAT32);
        }
    restore_mode(mode);
}

// Rows of x that are packed at a time, and the number of them that are multiplied by tiles.
static int64_t max_tokens(const target* t) { return t->digits == ONE_DIGIT ? MOST_TOKENS : MOST_TOKENS / 2; }
static int64_t tiled_tokens(int64_t m) { return m >= LEAST_TILED ? m / TOKENS_OF_TILE * TOKENS_OF_TILE : 0; }

// Converts m rows of x to contiguous float32.
static void convert(const target* t, const char* x, int64_t m, float* to) {
    const conversion all = {.from = x, .to = to, .k = t->k, .row = t->x_row, .type = t->x_type};
    run_items(convert_rows, &all, m, chunk_size(m, CHUNKS), m, STEPS_OF_NUMBER * m * t->k);
}

// y = x [m, k] @ w.T for each of the weights; x has the same type and k for all. packed: memory for min(m, MOST_TOKENS)
// rows of x in every order needed; converted: memory for as many rows in float32, if x has another type.
void qgemm_multiply(const void* weights, int64_t count, const void* x, int64_t m, void* packed, void* converted) {
    const target* t = weights;
    const int64_t limit = max_tokens(t);
    for (int64_t start = 0; start < m; start += limit) {
        const int64_t tokens = m - start < limit ? m - start : limit, tiled = tiled_tokens(tokens);
        const char* rows = (const char*)x + start * t->x_row;
        int64_t row = t->x_row;
        if (t->x_type != TYPE_FLOAT32) {
            convert(t, rows, tokens, converted);
            rows = converted, row = t->k * (int64_t)sizeof(float);
        }
        if (tiled) multiply_slice(t, count, rows, row, start, tiled, 1, packed);
        if (tokens > tiled) multiply_slice(t, count, rows + tiled * row, row, start + tiled, tokens - tiled, 0, packed);
    }
}
