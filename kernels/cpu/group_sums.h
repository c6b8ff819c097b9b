// Integer sums of groups from the lanes of accumulators, one group a lane (LANE_GROUP says which).
//
// The sums are exact, so one multiplication in float for each group follows, as in ggml's formula. With 8 groups all
// that follows uses vectors of 8.
//
// Macros: GROUPS, ACCS, LANES, LOW_GROUP, HIGH_GROUP, QUAD_GROUP (unpacked.h).
#pragma once

#include "vec.h"

#if GROUPS == 8
#define SUM_LANES 8
typedef i32x8 group_ints;
typedef f32x8 group_floats;

INLINE group_ints load_group_ints(const int32_t* from) {
    group_ints result;
    memcpy(&result, from, sizeof result);
    return result;
}
INLINE group_floats load_group_floats(const float* from) {
    group_floats result;
    memcpy(&result, from, sizeof result);
    return result;
}
INLINE void store_group_ints(int32_t* to, group_ints v) { memcpy(to, &v, sizeof v); }
INLINE group_ints add_group_ints(group_ints a, group_ints b) { return a + b; }
INLINE group_ints mul_group_ints(group_ints v, int32_t value) { return v * value; }
INLINE group_floats convert_group_ints(group_ints v) { return __builtin_convertvector(v, group_floats); }
INLINE group_floats all_group_floats(float value) { return value - (group_floats){0}; }
INLINE group_floats mul_groups(group_floats a, group_floats b) { return a * b; }
INLINE group_floats mul_add_groups(group_floats acc, group_floats a, group_floats b) { return acc + a * b; }
INLINE group_floats to_group_floats(f32x16 v) { return first_eight(v); }
INLINE group_floats permute_groups(f32x16 v, group_ints number) { return permute_eight(first_eight(v), number); }
INLINE group_floats permute_group_floats(group_floats v, group_ints number) { return permute_eight(v, number); }
INLINE void store_group_floats(float* to, group_floats v) { memcpy(to, &v, sizeof v); }
INLINE group_floats first_groups(group_floats v, int count) {
    const group_ints number = {0, 1, 2, 3, 4, 5, 6, 7};
    return (group_floats)((group_ints)v & (number < count));
}
INLINE float reduce_add_groups(group_floats v) { return reduce_add_eight(v); }

#if ACCS == 1  // one accumulator: eight groups of two lanes
INLINE group_ints sum_groups(const i32x16* acc) { return sum_pairs(acc[0]); }
static const int32_t LANE_GROUP[8] = {0, 1, 4, 5, 2, 3, 6, 7};
#elif ACCS == 2  // two accumulators: four groups of four lanes
INLINE group_ints sum_groups(const i32x16* acc) { return sum_pairs(half_sums(acc[0], acc[1])); }
static const int32_t LANE_GROUP[8] = {0, 4, 2, 6, 1, 5, 3, 7};
#else            // four accumulators: LOW_GROUP and HIGH_GROUP, eight lanes each
INLINE group_ints sum_groups(const i32x16* acc) {
    return sum_quarters(pair_sums(half_sums(acc[0], acc[1]), half_sums(acc[2], acc[3])));
}
#ifdef SHORT_SUMS
#define SHORT_DOTS  // for one digit of x
INLINE group_ints sum_short_groups(const i32x16* acc) { return sum_quarters(sum_shorts(acc)); }
#endif
static const int32_t LANE_GROUP[8] = {LOW_GROUP(0),  LOW_GROUP(1),  LOW_GROUP(2),  LOW_GROUP(3),
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
INLINE group_floats convert_group_ints(group_ints v) { return to_float(v); }
INLINE group_floats all_group_floats(float value) { return all_floats(value); }
INLINE group_floats mul_groups(group_floats a, group_floats b) { return mul(a, b); }
INLINE group_floats mul_add_groups(group_floats acc, group_floats a, group_floats b) { return mul_add(acc, a, b); }
INLINE group_floats to_group_floats(f32x16 v) { return v; }
INLINE group_floats permute_groups(f32x16 v, group_ints number) { return permute(v, number); }
INLINE group_floats permute_group_floats(group_floats v, group_ints number) { return permute(v, number); }
INLINE void store_group_floats(float* to, group_floats v) { store_floats(to, v); }
INLINE group_floats first_groups(group_floats v, int count) {
    static const int32_t NUMBER[SUM_LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const i32x16 number = load_ints(NUMBER);
    EACH_PART v.part[i] = (f32_part)((i32_part)v.part[i] & (number.part[i] < count));
    return v;
}
INLINE float reduce_add_groups(group_floats v) { return reduce_add(v); }

#if LANES == 2      // two accumulators: eight groups of two lanes
INLINE group_ints sum_groups(const i32x16* acc) { return pair_sums(acc[0], acc[1]); }
static const int32_t LANE_GROUP[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
#else               // four accumulators: four groups of four lanes
INLINE group_ints sum_groups(const i32x16* acc) {
    return pair_sums(half_sums(acc[0], acc[1]), half_sums(acc[2], acc[3]));
}
#ifndef QUAD_GROUP  // default: groups in order
#define QUAD_GROUP(acc, quad) (4 * (acc) + (quad))
#endif
#define QUAD_GROUPS(quad) QUAD_GROUP(0, quad), QUAD_GROUP(1, quad), QUAD_GROUP(2, quad), QUAD_GROUP(3, quad)
static const int32_t LANE_GROUP[16] = {QUAD_GROUPS(0), QUAD_GROUPS(1), QUAD_GROUPS(2), QUAD_GROUPS(3)};
#endif
#endif
