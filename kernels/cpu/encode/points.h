// Finds grid points for codes, byte for byte as Grid.closest of qgemm/codec/grids.py. Codes that are no point of the
// grid become the neighbouring point with the least weighted error.
//
// The codes of a point are the digits of a number to the base `base`, the lowest first.
#pragma once

#include "lanes.h"

#define MAX_DIMS 8
#define FIELD 4  // bits of a level in a word

// point_of [base^dims]: the point of a number, or -1; such a number has counts[number] candidates,
// neighbours[starts[number]] and the following. levels: the levels of each point, FIELD bits each. near: the levels of
// the candidates, with LANES more words after the last.
typedef struct {
    const int32_t *point_of, *starts, *counts, *neighbours, *near, *levels;
    int dims, base;
} grid;

INLINE floats extract_level(ints word, int i, floats offset) {
    return to_floats(word >> FIELD * i & ((1 << FIELD) - 1)) + offset;
}

// The nearest candidate for the codes of one lane. x, w [dims]: LANES floats apart. A level is decoded as scale *
// (level + offset).
INLINE int32_t nearest_neighbour(const grid* g, int32_t number, const float* x, const float* w, float scale,
                                 float offset, const int dims) {
    const int32_t *near = g->near + g->starts[number], count = g->counts[number];
    floats best = broadcast(INFINITY);
    ints best_index = {0}, lane_number;
    EACH_LANE lane_number[lane] = lane;
    for (int32_t j = 0; j < count; j += LANES) {
        floats error = {0};
        ints word;
        memcpy(&word, near + j, sizeof word);
#pragma GCC unroll 8
        for (int i = 0; i < dims; ++i) {
            const floats difference = scale * extract_level(word, i, broadcast(offset)) - x[LANES * i];
            error += w[LANES * i] * difference * difference;
        }
        const ints index = lane_number + j, better = (error < best) & (index < broadcast_int(count));
        best = blend(better, error, best);
        best_index = blend_int(better, index, best_index);
    }
    float least = best[0];
    int32_t first = best_index[0];
    for (int lane = 1; lane < (count < LANES ? count : LANES); ++lane)
        if (best[lane] < least || (best[lane] == least && best_index[lane] < first))
            least = best[lane], first = best_index[lane];
    return g->neighbours[g->starts[number] + first];
}

INLINE ints grid_number(const grid* g, const ints* codes) {
    ints number = {0};
    for (int i = g->dims - 1; i >= 0; --i) number = number * g->base + codes[i];
    return number;
}

// The points of the active lanes, 0 in others. exact: mask of lanes whose codes were a point.
static ints find_points(const grid* g, ints number, const floats* x, const floats* w, floats scale, floats offset,
                        ints active, ints* exact) {
    ints points = {0}, exact_lanes = {0};
    EACH_LANE {
        if (!active[lane]) continue;
        const int32_t n = number[lane], point = g->point_of[n];
        const float *values = (const float*)x + lane, *weights = (const float*)w + lane;
        exact_lanes[lane] = -(point >= 0);
        points[lane] = point >= 0     ? point
                       : g->dims == 8 ? nearest_neighbour(g, n, values, weights, scale[lane], offset[lane], 8)
                                      : nearest_neighbour(g, n, values, weights, scale[lane], offset[lane], 4);
    }
    *exact = exact_lanes;
    return points;
}

INLINE ints gather_levels(const grid* g, ints points) {
    ints words;
    EACH_LANE words[lane] = g->levels[points[lane]];
    return words;
}

INLINE void store_points(int64_t* rows, const ints* from, int64_t size, int64_t count) {
    for (int64_t row = 0; row < count; ++row)
        for (int64_t i = 0; i < size; ++i) rows[row * size + i] = from[i][row];
}
