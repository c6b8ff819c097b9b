// Extremes of a block's values, and conversion of values to codes. Values are compared as integers that sort like the
// floats, because compilers vectorize integer maxima.
#pragma once

#include <math.h>

#include "block_numbers.h"

INLINE int32_t float_bits(float value) {
    int32_t result;
    memcpy(&result, &value, sizeof result);
    return result;
}
INLINE float bits_float(int32_t bits) {
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

INLINE int is_finite(float value) { return (float_bits(value) & 0x7fffffff) < 0x7f800000; }

// The largest magnitude. Bits without the sign compare like magnitudes, with NaN above all.
INLINE float absmax(const float* x, int size) {
    int32_t largest = 0;
    for (int i = 0; i < size; ++i) {
        const int32_t magnitude = float_bits(x[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return bits_float(largest);
}

// Adds the float just below 1/2 with the value's sign: truncation then rounds to nearest, ties away from zero.
INLINE float add_half_away(float value) { return value + __builtin_copysignf(0x1.fffffep-2f, value); }

INLINE float reciprocal(float d) { return d == 0 ? 0 : 1 / d; }

// Truncates toward zero and caps at `max_code`. Values that are not finite or exceed an integer give 0, as in NumPy's
// codec on x86.
INLINE int32_t truncate_to_code(float value, int32_t max_code) {
    const int32_t result = fabsf(value) < 2147483648.0f ? (int32_t)value : 0;
    return result > max_code ? max_code : result;
}

INLINE float first_zero_or(float value, const float* x, int size) {
    for (int i = 0; value == 0 && i < size; ++i)
        if (x[i] == 0) return x[i];
    return value;
}

// Maps a float's bits to integers that sort like the floats; its own inverse.
INLINE int32_t ordered_bits(int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

// The least and the greatest value; among -0 and +0 the first one in x.
INLINE void find_range(const float* x, int size, float* least, float* greatest) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int i = 0; i < size; ++i) {
        const int32_t number = ordered_bits(float_bits(x[i]));
        low = number < low ? number : low;
        high = number > high ? number : high;
    }
    *least = first_zero_or(bits_float(ordered_bits(low)), x, size);
    *greatest = first_zero_or(bits_float(ordered_bits(high)), x, size);
}

// The value of largest magnitude, with its sign: the first of several equal ones, +0 if all are zero.
INLINE float signed_absmax(const float* x, int size) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int i = 0; i < size; ++i) {
        const int32_t number = ordered_bits(float_bits(x[i]));
        low = number < low ? number : low;
        high = number > high ? number : high;
    }
    const int32_t least = ordered_bits(low), greatest = ordered_bits(high);
    const int32_t below = least & 0x7fffffff, above = greatest & 0x7fffffff;
    if (below != above) return bits_float(below > above ? least : greatest);
    for (int i = 0; above && i < size; ++i)
        if ((float_bits(x[i]) & 0x7fffffff) == above) return x[i];
    return 0;
}
