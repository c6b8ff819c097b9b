// Integer sums of groups from lanes: exact, so that one product in float per group follows, as in ggml's formula.
//
// A lane a group: GROUP_OF_LANE says which. Of eight groups all that follows is done in vectors of eight.
#pragma once

#include "vec.h"

#if GROUPS == 8
#define SUM_LANES 8
typedef i32x8 group_ints;
typedef f32x8 group_floats;

INLINE group_ints load_group_ints(const int32_t* from) {
    group_ints found;
    memcpy(&found, from, sizeof found);
    return found;
}
INLINE group_floats load_group_floats(const float* from) {
    group_floats found;
    memcpy(&found, from, sizeof found);
    return found;
}
INLINE void store_group_ints(int32_t* to, group_ints v) { memcpy(to, &v, sizeof v); }
INLINE group_ints add_group_ints(group_ints a, group_ints b) { return a + b; }
INLINE group_ints mul_group_ints(group_ints v, int32_t value) { return v * value; }
INLINE group_floats group_floats_of(group_ints v) { return __builtin_convertvector(v, group_floats); }
INLINE group_floats all_group_floats(float value) { return value - (group_floats){0}; }
INLINE group_floats mul_groups(group_floats a, group_floats b) { return a * b; }
INLINE group_floats mul_add_groups(group_floats acc, group_floats a, group_floats b) { return acc + a * b; }
INLINE group_floats of_groups(f32x16 v) { return first_eight(v); }
INLINE group_floats spread_groups(f32x16 v, group_ints number) { return spread_eight(first_eight(v), number); }
INLINE float sum_of_all(group_floats v) { return sum_of_eight(v); }

#if ACCS == 1  // an accumulator of eight groups of two lanes
INLINE group_ints sums_of_groups(const i32x16* acc) { return pairs_together(acc[0]); }
static const int32_t GROUP_OF_LANE[8] = {0, 1, 4, 5, 2, 3, 6, 7};
#elif ACCS == 2  // two accumulators of four groups of four lanes
INLINE group_ints sums_of_groups(const i32x16* acc) { return pairs_together(half_sums(acc[0], acc[1])); }
static const int32_t GROUP_OF_LANE[8] = {0, 4, 2, 6, 1, 5, 3, 7};
#else            // four accumulators of two groups of eight lanes, LOW_GROUP and HIGH_GROUP of each
INLINE group_ints sums_of_groups(const i32x16* acc) {
    return quads_together(pair_sums(half_sums(acc[0], acc[1]), half_sums(acc[2], acc[3])));
}
#ifdef SHORT_SUMS
#define SHORT_DOTS  // of one digit
INLINE group_ints sums_of_short_dots(const i32x16* acc) { return quads_together(sums_of_shorts(acc)); }
#endif
static const int32_t GROUP_OF_LANE[8] = {LOW_GROUP(0),  LOW_GROUP(1),  LOW_GROUP(2),  LOW_GROUP(3),
                                         HIGH_GROUP(0), HIGH_GROUP(1), HIGH_GROUP(2), HIGH_GROUP(3)};
#endif

#else  // GROUPS == 16
#define SUM_LANES 16
typedef i32x16 group_ints;
typedef f32x16 group_floats;

INLINE group_ints load_group_ints(const int32_t* from) { return load_ints(from); }
INLINE group_floats load_group_floats(const float* from) { return load_floats(from); }
INLINE void store_group_ints(int32_t* to, group_ints v) { store_ints(to, v); }
INLINE group_ints add_group_ints(group_ints a, group_ints b) { return add_ints(a, b); }
INLINE group_ints mul_group_ints(group_ints v, int32_t value) { return mul_ints(v, value); }
INLINE group_floats group_floats_of(group_ints v) { return to_float(v); }
INLINE group_floats all_group_floats(float value) { return all_floats(value); }
INLINE group_floats mul_groups(group_floats a, group_floats b) { return mul(a, b); }
INLINE group_floats mul_add_groups(group_floats acc, group_floats a, group_floats b) { return mul_add(acc, a, b); }
INLINE group_floats of_groups(f32x16 v) { return v; }
INLINE group_floats spread_groups(f32x16 v, group_ints number) { return spread(v, number); }
INLINE float sum_of_all(group_floats v) { return sum_of(v); }

#if LANES == 2      // two accumulators of eight groups
INLINE group_ints sums_of_groups(const i32x16* acc) { return pair_sums(acc[0], acc[1]); }
static const int32_t GROUP_OF_LANE[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
#else               // four accumulators of four groups
INLINE group_ints sums_of_groups(const i32x16* acc) {
    return pair_sums(half_sums(acc[0], acc[1]), half_sums(acc[2], acc[3]));
}
#ifndef QUAD_GROUP  // of 16 slots of an accumulator
#define QUAD_GROUP(acc, quad) (4 * (acc) + (quad))
#endif
#define QUAD_GROUPS(quad) QUAD_GROUP(0, quad), QUAD_GROUP(1, quad), QUAD_GROUP(2, quad), QUAD_GROUP(3, quad)
static const int32_t GROUP_OF_LANE[16] = {QUAD_GROUPS(0), QUAD_GROUPS(1), QUAD_GROUPS(2), QUAD_GROUPS(3)};
#endif
#endif
