// Vectors of the encoders: a lane holds the numbers of one group or super-block, and LANES of them are fitted in step.
//
// A sum over a group adds its weights one by one, in the order of NumPy and ggml, and needs no sum across lanes.
// Products are rounded before they are added, since the encoders are compiled with -ffp-contract=off. Masks are
// integers, -1 where true.
#pragma once

#include <math.h>

#include "../vec.h"

#define WEIGHTS 256       // weights of a super-block
#define MAX_GROUPS 16     // maximum number of groups of a super-block
#define MAX_SIZE 32       // maximum number of weights of a group
#define LANES (PART / 4)  // one register: GCC splits longer vectors badly, 16 lanes are six times as slow with AVX2
#define EACH_LANE for (int lane = 0; lane < LANES; ++lane)

VECTOR(float, floats, 4 * LANES);
VECTOR(int32_t, ints, 4 * LANES);

INLINE floats broadcast(float value) { return value - (floats){0}; }
INLINE ints broadcast_int(int32_t value) { return value - (ints){0}; }
INLINE floats to_floats(ints v) { return __builtin_convertvector(v, floats); }

INLINE ints blend_int(ints mask, ints yes, ints no) { return (yes & mask) | (no & ~mask); }
INLINE floats blend(ints mask, floats yes, floats no) { return (floats)blend_int(mask, (ints)yes, (ints)no); }

INLINE floats magnitude(floats v) { return (floats)((ints)v & 0x7fffffff); }

// The larger of two, the first of equal ones, NaN if either is NaN.
INLINE floats larger(floats a, floats b) { return blend((b > a) | (b != b), b, a); }

INLINE ints cap(ints v, int32_t greatest) { return blend_int(v > broadcast_int(greatest), broadcast_int(greatest), v); }
INLINE ints floor_at(ints v, int32_t least) { return blend_int(v < broadcast_int(least), broadcast_int(least), v); }
INLINE ints clamp(ints v, int32_t least, int32_t greatest) { return cap(floor_at(v, least), greatest); }

INLINE floats square_root(floats v) {
    floats result;
    EACH_LANE result[lane] = sqrtf(v[lane]);
    return result;
}

// Rounds to nearest, ties to even, by adding 1.5 * 2^23. Values beyond the range of the trick give the integers that
// ggml's nearest_int gives.
INLINE ints nearest(floats v) { return ((ints)(v + 12582912.0f) & 0x007fffff) - 0x00400000; }

// 1 / v, and 0 where v is 0.
INLINE floats reciprocal(floats v) { return blend(v == broadcast(0), broadcast(0), 1 / v); }

INLINE floats round_to_half(floats v) {
    floats result;
    EACH_LANE result[lane] = half_to_float(float_to_half(v[lane]));
    return result;
}

INLINE int any(ints mask) {
    uint64_t words[LANES / 2], result = 0;
    memcpy(words, &mask, sizeof words);
    for (int i = 0; i < LANES / 2; ++i) result |= words[i];
    return result != 0;
}

// Loads rows [count, size], one row a lane; lanes without a row repeat the last one.
static void load_rows(floats* to, const float* rows, int64_t size, int64_t count) {
    EACH_LANE {
        const float* row = rows + (lane < count ? lane : count - 1) * size;
        for (int64_t i = 0; i < size; ++i) to[i][lane] = row[i];
    }
}

// The inverse: stores the first `count` lanes of vectors [size] as rows [count, size] of bytes or floats.
static void store_byte_rows(uint8_t* rows, const ints* from, int64_t size, int64_t count) {
    for (int64_t row = 0; row < count; ++row)
        for (int64_t i = 0; i < size; ++i) rows[row * size + i] = (uint8_t)from[i][row];
}

static void store_float_rows(float* rows, const floats* from, int64_t size, int64_t count) {
    for (int64_t row = 0; row < count; ++row)
        for (int64_t i = 0; i < size; ++i) rows[row * size + i] = from[i][row];
}

INLINE floats sum_of_squares(const floats* x, int size) {
    floats sum = {0};
    for (int i = 0; i < size; ++i) sum += x[i] * x[i];
    return sum;
}
