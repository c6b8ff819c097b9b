// Integer sums of groups from lanes: exact, so that one product in float per group follows, as in ggml's formula.
//
// Lane i of the result belongs to group GROUP_OF_LANE[i]; NONE where a lane repeats another.
#pragma once

#include "vec.h"

#define NONE 15  // a group without weights, where there are 8: its scale is zero
#if ACCS == 1    // an accumulator of eight groups: (a b) of each quad of lanes, twice
INLINE i32x16 sums_of_groups(const i32x16* acc) { return pair_sums(acc[0], acc[0]); }
static const int32_t GROUP_OF_LANE[16] = {0, 1, NONE, NONE, 2, 3, NONE, NONE, 4, 5, NONE, NONE, 6, 7, NONE, NONE};
#elif LANES == 2  // two accumulators of eight groups
INLINE i32x16 sums_of_groups(const i32x16* acc) { return pair_sums(acc[0], acc[1]); }
static const int32_t GROUP_OF_LANE[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
#elif ACCS == 2   // two accumulators of four groups: (a b) of each quad of lanes, twice each
INLINE i32x16 sums_of_groups(const i32x16* acc) { return with_neighbours(half_sums(acc[0], acc[1])); }
static const int32_t GROUP_OF_LANE[16] = {0, NONE, 4, NONE, 1, NONE, 5, NONE, 2, NONE, 6, NONE, 3, NONE, 7, NONE};
#else
INLINE i32x16 sums_of_quads(const i32x16* acc) {
    return pair_sums(half_sums(acc[0], acc[1]), half_sums(acc[2], acc[3]));
}
#if LANES == 4      // four accumulators of four groups
INLINE i32x16 sums_of_groups(const i32x16* acc) { return sums_of_quads(acc); }
#ifndef QUAD_GROUP  // of 16 slots of an accumulator
#define QUAD_GROUP(acc, quad) (4 * (acc) + (quad))
#endif
#define QUAD_GROUPS(quad) QUAD_GROUP(0, quad), QUAD_GROUP(1, quad), QUAD_GROUP(2, quad), QUAD_GROUP(3, quad)
static const int32_t GROUP_OF_LANE[16] = {QUAD_GROUPS(0), QUAD_GROUPS(1), QUAD_GROUPS(2), QUAD_GROUPS(3)};
#else  // four accumulators of two groups, LOW_GROUP and HIGH_GROUP of each
INLINE i32x16 sums_of_groups(const i32x16* acc) { return with_next_quads(sums_of_quads(acc)); }
static const int32_t GROUP_OF_LANE[16] = {
    LOW_GROUP(0),  LOW_GROUP(1),  LOW_GROUP(2),  LOW_GROUP(3),  NONE, NONE, NONE, NONE,
    HIGH_GROUP(0), HIGH_GROUP(1), HIGH_GROUP(2), HIGH_GROUP(3), NONE, NONE, NONE, NONE};
#endif
#endif
