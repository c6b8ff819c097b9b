// Extremes of a block's values, compared as integers in the order of the floats, which compilers vectorize; and codes.
#pragma once

#include <math.h>

#include "numbers.h"

INLINE int32_t float_bits(float value) {
    int32_t found;
    memcpy(&found, &value, sizeof found);
    return found;
}
INLINE float bits_float(int32_t bits) {
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

INLINE int is_finite(float value) { return (float_bits(value) & 0x7fffffff) < 0x7f800000; }

// Bits without the sign compare like magnitudes, NaN above all.
INLINE float absmax(const float* x, int size) {
    int32_t most = 0;
    for (int i = 0; i < size; ++i) {
        const int32_t magnitude = float_bits(x[i]) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    return bits_float(most);
}

// To nearest, halves away from 0, once it is cut: the number before 1/2 is added.
INLINE float away_from_0(float value) { return value + __builtin_copysignf(0x1.fffffep-2f, value); }

INLINE float reciprocal(float d) { return d == 0 ? 0 : 1 / d; }

// Toward zero, at most `most`; 0 for what is not finite or beyond an integer, as x86 converts and NumPy's codec has it.
INLINE int32_t code_of(float value, int32_t most) {
    const int32_t found = fabsf(value) < 2147483648.0f ? (int32_t)value : 0;
    return found > most ? most : found;
}

INLINE float first_zero_or(float value, const float* x, int size) {
    for (int i = 0; value == 0 && i < size; ++i)
        if (x[i] == 0) return x[i];
    return value;
}

// A float's bits as an integer in the order of the floats, and back.
INLINE int32_t in_order(int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

// The least and the greatest value, the first of -0 and +0.
INLINE void range_of(const float* x, int size, float* least, float* greatest) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int i = 0; i < size; ++i) {
        const int32_t number = in_order(float_bits(x[i]));
        low = number < low ? number : low;
        high = number > high ? number : high;
    }
    *least = first_zero_or(bits_float(in_order(low)), x, size);
    *greatest = first_zero_or(bits_float(in_order(high)), x, size);
}

// The value of largest magnitude, the first of several; +0 if all are zero.
INLINE float signed_absmax(const float* x, int size) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int i = 0; i < size; ++i) {
        const int32_t number = in_order(float_bits(x[i]));
        low = number < low ? number : low;
        high = number > high ? number : high;
    }
    const int32_t least = in_order(low), greatest = in_order(high);
    const int32_t below = least & 0x7fffffff, above = greatest & 0x7fffffff;
    if (below != above) return bits_float(below > above ? least : greatest);
    for (int i = 0; above && i < size; ++i)
        if ((float_bits(x[i]) & 0x7fffffff) == above) return x[i];
    return 0;
}
