// Integer sums of groups from lanes: exact, so that one product in float per group follows, as in ggml's formula.
//
// Lane i of the result belongs to group GROUP_OF_LANE[i]; NONE where a lane repeats another.
#pragma once

#include "vec.h"

#define NONE 15  // a group without weights, where there are 8: its scale is zero
#define PAIRS(a, b, first)                                                                                    \
    __builtin_shufflevector(a, b, first, first + 1, first + 16, first + 17, first + 4, first + 5, first + 20, \
                            first + 21, first + 8, first + 9, first + 24, first + 25, first + 12, first + 13, \
                            first + 28, first + 29)
#define EVERY_OTHER(a, b, first)                                                                               \
    __builtin_shufflevector(a, b, first, first + 2, first + 16, first + 18, first + 4, first + 6, first + 20,  \
                            first + 22, first + 8, first + 10, first + 24, first + 26, first + 12, first + 14, \
                            first + 28, first + 30)

// Each four lanes of a and b -> a's two half sums, then b's.
INLINE i32x16 half_sums(i32x16 a, i32x16 b) { return PAIRS(a, b, 0) + PAIRS(a, b, 2); }

#if ACCS == 2  // two accumulators of four groups: (a b) of each quad of lanes, twice each
INLINE i32x16 sums_of_groups(const i32x16* acc) {
    const i32x16 halves = half_sums(acc[0], acc[1]);
    return halves + __builtin_shufflevector(halves, halves, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
}
static const int32_t GROUP_OF_LANE[16] = {0, NONE, 4, NONE, 1, NONE, 5, NONE, 2, NONE, 6, NONE, 3, NONE, 7, NONE};
#else
INLINE i32x16 sums_of_quads(const i32x16* acc) {
    const i32x16 first = half_sums(acc[0], acc[1]), second = half_sums(acc[2], acc[3]);
    return EVERY_OTHER(first, second, 0) + EVERY_OTHER(first, second, 1);
}
#if LANES == 4  // four accumulators of four groups
INLINE i32x16 sums_of_groups(const i32x16* acc) { return sums_of_quads(acc); }
static const int32_t GROUP_OF_LANE[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
#else           // four accumulators of two groups, LOW_GROUP and HIGH_GROUP of each
INLINE i32x16 sums_of_groups(const i32x16* acc) {
    const i32x16 quads = sums_of_quads(acc);
    return quads + __builtin_shufflevector(quads, quads, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
}
static const int32_t GROUP_OF_LANE[16] = {
    LOW_GROUP(0),  LOW_GROUP(1),  LOW_GROUP(2),  LOW_GROUP(3),  NONE, NONE, NONE, NONE,
    HIGH_GROUP(0), HIGH_GROUP(1), HIGH_GROUP(2), HIGH_GROUP(3), NONE, NONE, NONE, NONE};
#endif
#endif
