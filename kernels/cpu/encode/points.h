// Points of a grid for codes, which are digits of a number, the first the lowest: Grid.closest of qgemm/codec/grids.py,
// byte for byte. Codes that are no point become that of their neighbours with the least weighted error.
#pragma once

#include "lanes.h"

#define MOST_DIMS 8
#define FIELD 4  // bits of a level in a word of levels

// point_of [base^dims]: of a number its point, or -1 where its neighbours are `neighbours` from `starts` on, as many as
// `counts`. levels: of each point, FIELD bits a level. near: those of the neighbours, LANES more behind their end.
typedef struct {
    const int32_t *point_of, *starts, *counts, *neighbours, *near, *levels;
    int dims, base;
} grid;

INLINE floats level_of(ints word, int i, floats offset) {
    return to_floats(word >> FIELD * i & ((1 << FIELD) - 1)) + offset;
}

// Of one lane: x, w [dims] are a lane apart; scale and offset are what a level is multiplied by, after this is added.
INLINE int32_t nearest_neighbour(const grid* g, int32_t number, const float* x, const float* w, float scale,
                                 float offset, const int dims) {
    const int32_t *near = g->near + g->starts[number], count = g->counts[number];
    floats best = same(INFINITY);
    ints found = {0}, lane_number;
    EACH_LANE lane_number[lane] = lane;
    for (int32_t j = 0; j < count; j += LANES) {
        floats error = {0};
        ints word;
        memcpy(&word, near + j, sizeof word);
#pragma GCC unroll 8
        for (int i = 0; i < dims; ++i) {
            const floats difference = scale * level_of(word, i, same(offset)) - x[LANES * i];
            error += w[LANES * i] * difference * difference;
        }
        const ints at = lane_number + j, better = (error < best) & (at < same_int(count));
        best = choose(better, error, best);
        found = choose_int(better, at, found);
    }
    float least = best[0];
    int32_t first = found[0];
    for (int lane = 1; lane < (count < LANES ? count : LANES); ++lane)
        if (best[lane] < least || (best[lane] == least && found[lane] < first)) least = best[lane], first = found[lane];
    return g->neighbours[g->starts[number] + first];
}

INLINE ints number_of(const grid* g, const ints* codes) {
    ints number = {0};
    for (int i = g->dims - 1; i >= 0; --i) number = number * g->base + codes[i];
    return number;
}

// Points of the lanes in `wanted`, 0 of others; exact: whether the codes were that point.
static ints closest(const grid* g, ints number, const floats* x, const floats* w, floats scale, floats offset,
                    ints wanted, ints* exact) {
    ints found = {0}, on = {0};
    EACH_LANE {
        if (!wanted[lane]) continue;
        const int32_t n = number[lane], point = g->point_of[n];
        const float *of = (const float*)x + lane, *weights = (const float*)w + lane;
        on[lane] = -(point >= 0);
        found[lane] = point >= 0     ? point
                      : g->dims == 8 ? nearest_neighbour(g, n, of, weights, scale[lane], offset[lane], 8)
                                     : nearest_neighbour(g, n, of, weights, scale[lane], offset[lane], 4);
    }
    *exact = on;
    return found;
}

INLINE ints levels_of(const grid* g, ints points) {
    ints words;
    EACH_LANE words[lane] = g->levels[points[lane]];
    return words;
}

INLINE void store_points(int64_t* rows, const ints* from, int64_t size, int64_t count) {
    for (int64_t row = 0; row < count; ++row)
        for (int64_t i = 0; i < size; ++i) rows[row * size + i] = from[i][row];
}
