// Products of one x by several weights: x is packed once for each way in which their formats take it, then the rows of
// all weights are one job of the pool. Where something follows the sums (finish.h), a thread does it to LEAST_ROWS rows
// of W at a time, whose sums are in its cache.
//
// Macros: TARGET_FIELDS, of one of the weights (qgemm/cpu/native/calls.py); MOST_TOKENS, rows of x at a time of
// ONE_DIGIT, else half as many; TOKENS_OF_TILE, whose multiples tiles take; LEAST_TILED, rows of x from which on they
// are used; LEAST_ROWS, rows of W that a thread takes at least, and CHUNKS, shares of a thread, CHUNKS_OF_TILES where
// they are longer; MOST_TARGETS, weights of a call; EXACT_DIGITS of "a16".
#include <string.h>

typedef struct {
    TARGET_FIELDS
} target;

#include "finish.h"

// The rows of all weights, after each other; those that another gates are taken with it.
typedef struct {
    int64_t count, token;
    const target* targets;
    product products[MOST_TARGETS];
    int64_t end[MOST_TARGETS];  // of the items of each, LEAST_ROWS rows
} rows_job;

// Rows first .. last - 1, at most LEAST_ROWS, of the weights i: their sums to memory of this thread.
static void sums_of_rows(const rows_job* job, int64_t i, int64_t first, int64_t last, float* sums) {
    product p = job->products[i];
    p.w = (const char*)p.w + first * p.w_row, p.n = last - first, p.y = sums, p.y_row = LEAST_ROWS;
    ((work_fn)job->targets[i].rows)(&p, 0, last - first);
}

static void finished_rows(const rows_job* job, int64_t i, int64_t first, int64_t last) {
    const target* t = &job->targets[i];
    float sums[2][MOST_TOKENS * LEAST_ROWS];
    const uint64_t mode = ieee_mode();
    for (int64_t row = first; row < last; row += LEAST_ROWS) {
        const int64_t stop = row + LEAST_ROWS < last ? row + LEAST_ROWS : last;
        sums_of_rows(job, i, row, stop, sums[0]);
        if (t->gate) sums_of_rows(job, i + 1, row, stop, sums[1]);
        finish(t, job->token, job->products[i].m, row, stop, sums[0], sums[1]);
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
        if (finishes(&job->targets[i]))
            finished_rows(job, i, row, stop);
        else
            ((work_fn)job->targets[i].rows)(p, row, stop);
    }
}

static int64_t chunk_of(int64_t count, int64_t chunks) {
    const int64_t shares = chunks * (int64_t)(pool.wanted + 1);
    return (count + shares - 1) / shares;
}

// Rows token .. token + m - 1 of x by all weights, by tiles or row by row.
// x_row: bytes from a row of x to the next.
static void multiply_slice(const target* targets, int64_t count, const char* x, int64_t x_row, int64_t token, int64_t m,
                           int tiles, char* packed) {
    rows_job job = {.count = count, .token = token, .targets = targets};
    for (int64_t i = 0, items = 0; i < count; ++i) {
        const target* t = &targets[i];
        const int32_t digits = tiles && t->digits == EXACT_DIGITS ? 0 : t->digits;
        product* p = &job.products[i];
        *p = (product){.w = t->w,
                       .w_row = t->w_row,
                       .packed_row = tiles ? t->tile_bytes : t->row_bytes,
                       .y = (float*)((char*)t->y + token * t->y_row),
                       .y_row = t->y_row / (int64_t)sizeof(float),
                       .table = t->table,
                       .eight = (work_fn)t->eight,
                       .m = m,
                       .n = t->n,
                       .k = t->k,
                       .unit = t->unit,
                       .digits = digits,
                       .tiles = tiles};
        const int gated = i && targets[i - 1].gate;  // by the weights before
        job.end[i] = items += gated ? 0 : (t->n + LEAST_ROWS - 1) / LEAST_ROWS;
        if (t->packed_by != i) {  // another takes x in the same way
            p->packed = job.products[t->packed_by].packed;
            continue;
        }
        p->packed = packed;
        const packing rows = {.to = packed,
                              .to_row = p->packed_row,
                              .x = x,
                              .x_row = x_row,
                              .quantize = (quantize_fn)t->quantize,
                              .m = m,
                              .k = t->k,
                              .digits = digits,
                              .tiles = tiles};
        qgemm_run((work_fn)t->pack, &rows, m, m > 1 ? chunk_of(m, CHUNKS) : 1);
        packed += m * p->packed_row;
    }
    qgemm_run(multiply_rows, &job, job.end[count - 1], chunk_of(job.end[count - 1], tiles ? CHUNKS_OF_TILES : CHUNKS));
}

// Rows of x of another type than float32.
typedef struct {
    const char* from;
    float* to;
    int64_t k, row;  // bytes from a row to the next
    int32_t type;
} conversion;

static void convert_rows(const void* argument, int64_t first, int64_t last) {
    const conversion* p = argument;
    const int64_t size = size_of_type(p->type);
    const uint64_t mode = ieee_mode();
    for (int64_t row = first; row < last; ++row)
        for (int64_t i = 0; i < p->k; i += 16) {
            const f32x16 v = load_some(p->from + row * p->row + i * size, p->k - i, p->type);
            store_some(p->to + row * p->k + i, v, p->k - i, TYPE_FLOAT32);
        }
    restore_mode(mode);
}

// y = x [m, k] @ w.T of each of the weights, x of one type and size for all. packed: memory for MOST_TOKENS rows of x,
// or m, as each packs them; converted: for as many in float32, if x is of another type.
void qgemm_multiply(const void* weights, int64_t count, const void* x, int64_t m, void* packed, void* converted) {
    const target* t = weights;
    const int64_t most = t->digits == ONE_DIGIT ? MOST_TOKENS : MOST_TOKENS / 2;
    for (int64_t start = 0; start < m; start += most) {
        const int64_t tokens = m - start < most ? m - start : most;
        const int64_t tiled = tokens >= LEAST_TILED ? tokens / TOKENS_OF_TILE * TOKENS_OF_TILE : 0;
        const char* rows = (const char*)x + start * t->x_row;
        int64_t row = t->x_row;
        if (t->x_type != TYPE_FLOAT32) {
            const conversion all = {.from = rows, .to = converted, .k = t->k, .row = row, .type = t->x_type};
            qgemm_run(convert_rows, &all, tokens, chunk_of(tokens, CHUNKS));
            rows = converted, row = t->k * (int64_t)sizeof(float);
        }
        if (tiled) multiply_slice(t, count, rows, row, start, tiled, 1, packed);
        if (tokens > tiled) multiply_slice(t, count, rows + tiled * row, row, start + tiled, tokens - tiled, 0, packed);
    }
}
