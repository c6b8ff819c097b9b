// Products of one x by several weights: x is packed once for each way in which their formats take it, then the rows of all
// weights are one job of the pool.
//
// Macros: TARGET_FIELDS, of one of the weights (qgemm/cpu/native/libraries.py); MOST_TOKENS, rows of x at a time;
// TOKENS_OF_TILE, whose multiples tiles take; LEAST_TILED, rows of x from which on they are used; LEAST_ROWS, rows of W
// that a thread takes at least, and CHUNKS, shares of a thread; MOST_TARGETS, weights of a call; EXACT_DIGITS of "a16".
#include <string.h>

typedef struct {
    TARGET_FIELDS
} target;

// The rows of all weights, after each other.
typedef struct {
    int64_t count;
    const target* targets;
    product products[MOST_TARGETS];
    int64_t end[MOST_TARGETS];  // of the items of each, LEAST_ROWS rows
} rows_job;

static void multiply_rows(const void* argument, int64_t first, int64_t last) {
    const rows_job* job = argument;
    for (int64_t i = 0, begin = 0; i < job->count && begin < last; begin = job->end[i++]) {
        const int64_t from = first > begin ? first : begin, to = last < job->end[i] ? last : job->end[i];
        if (from >= to) continue;
        const int64_t n = job->products[i].n, stop = (to - begin) * LEAST_ROWS;
        ((work_fn)job->targets[i].rows)(&job->products[i], (from - begin) * LEAST_ROWS, stop < n ? stop : n);
    }
}

static int64_t chunk_of(int64_t count) {
    const int64_t shares = CHUNKS * (int64_t)(pool.wanted + 1);
    return (count + shares - 1) / shares;
}

// Rows token .. token + m - 1 of x by all weights, by tiles or row by row.
static void multiply_slice(const target* targets, int64_t count, const char* x, int64_t token, int64_t m, int tiles,
                           char* packed) {
    rows_job job = {.count = count, .targets = targets};
    for (int64_t i = 0, items = 0; i < count; ++i) {
        const target* t = &targets[i];
        const int32_t digits = tiles && t->digits == EXACT_DIGITS ? 0 : t->digits;
        product* p = &job.products[i];
        *p = (product){.w = t->w,
                       .w_row = t->w_row,
                       .packed_row = tiles ? t->tile_bytes : t->row_bytes,
                       .y = (float*)t->y + token * t->y_row,
                       .y_row = t->y_row,
                       .table = t->table,
                       .m = m,
                       .n = t->n,
                       .k = t->k,
                       .unit = t->unit,
                       .digits = digits,
                       .tiles = tiles};
        job.end[i] = items += (t->n + LEAST_ROWS - 1) / LEAST_ROWS;
        if (t->packed_by != i) {  // another takes x in the same way
            p->packed = job.products[t->packed_by].packed;
            continue;
        }
        p->packed = packed;
        const packing rows = {.to = packed,
                              .to_row = p->packed_row,
                              .x = x + token * t->x_row,
                              .x_row = t->x_row,
                              .quantize = (quantize_fn)t->quantize,
                              .m = m,
                              .k = t->k,
                              .digits = digits,
                              .tiles = tiles};
        qgemm_run((work_fn)t->pack, &rows, m, m > 1 ? chunk_of(m) : 1);
        packed += m * p->packed_row;
    }
    qgemm_run(multiply_rows, &job, job.end[count - 1], chunk_of(job.end[count - 1]));
}

// y = x [m, k] @ w.T of each of the weights. packed: memory for MOST_TOKENS rows of x, or m, as each packs them.
void qgemm_multiply(const void* weights, int64_t count, const void* x, int64_t m, void* packed) {
    for (int64_t start = 0; start < m; start += MOST_TOKENS) {
        const int64_t tokens = m - start < MOST_TOKENS ? m - start : MOST_TOKENS;
        const int64_t tiled = tokens >= LEAST_TILED ? tokens / TOKENS_OF_TILE * TOKENS_OF_TILE : 0;
        if (tiled) multiply_slice(weights, count, x, start, tiled, 1, packed);
        if (tokens > tiled) multiply_slice(weights, count, x, start + tiled, tokens - tiled, 0, packed);
    }
}
