// Vectors of the encoders: a lane holds the numbers of one group or super-block, LANES of them in step.
//
// A sum over a group then adds its weights one by one, in the order of NumPy and ggml, and needs no sum across lanes.
// Products are rounded before they are added: compiled with -ffp-contract=off. Masks are integers, -1 where true.
#pragma once

#include <math.h>

#include "../vec.h"

#define WEIGHTS 256       // of a super-block
#define MOST_GROUPS 16    // of a super-block
#define MOST_SIZE 32      // weights of a group
#define LANES (PART / 4)  // compilers split longer vectors badly: with sixteen AVX2 takes six times as long
#define EACH_LANE for (int lane = 0; lane < LANES; ++lane)

VECTOR(float, floats, 4 * LANES);
VECTOR(int32_t, ints, 4 * LANES);

INLINE floats same(float value) { return value - (floats){0}; }
INLINE ints same_int(int32_t value) { return value - (ints){0}; }
INLINE floats to_floats(ints v) { return __builtin_convertvector(v, floats); }

INLINE ints choose_int(ints mask, ints yes, ints no) { return (yes & mask) | (no & ~mask); }
INLINE floats choose(ints mask, floats yes, floats no) { return (floats)choose_int(mask, (ints)yes, (ints)no); }

INLINE floats magnitude(floats v) { return (floats)((ints)v & 0x7fffffff); }

// The larger of two, the first of equal ones, NaN if either is.
INLINE floats larger(floats a, floats b) { return choose((b > a) | (b != b), b, a); }

INLINE ints at_most(ints v, int32_t most) { return choose_int(v > same_int(most), same_int(most), v); }
INLINE ints at_least(ints v, int32_t least) { return choose_int(v < same_int(least), same_int(least), v); }
INLINE ints clipped(ints v, int32_t least, int32_t most) { return at_most(at_least(v, least), most); }

INLINE floats root(floats v) {
    floats found;
    EACH_LANE found[lane] = sqrtf(v[lane]);
    return found;
}

// To nearest, ties to even, by adding 1.5 * 2^23: also for what is too large, where ggml has what this has.
INLINE ints nearest(floats v) { return ((ints)(v + 12582912.0f) & 0x007fffff) - 0x00400000; }

// 1 / v, 0 for 0.
INLINE floats reciprocal(floats v) { return choose(v == same(0), same(0), 1 / v); }

INLINE floats rounded_to_half(floats v) {
    floats found;
    EACH_LANE found[lane] = half_to_float(float_to_half(v[lane]));
    return found;
}

INLINE int any(ints mask) {
    uint64_t words[LANES / 2], found = 0;
    memcpy(words, &mask, sizeof words);
    for (int i = 0; i < LANES / 2; ++i) found |= words[i];
    return found != 0;
}

// Rows [count, size], a lane each; lanes without a row repeat the last.
static void load_rows(floats* to, const float* rows, int64_t size, int64_t count) {
    EACH_LANE {
        const float* row = rows + (lane < count ? lane : count - 1) * size;
        for (int64_t i = 0; i < size; ++i) to[i][lane] = row[i];
    }
}

// The inverse: numbers [size] of the first `count` lanes as rows [count, size] of bytes, or of floats.
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
