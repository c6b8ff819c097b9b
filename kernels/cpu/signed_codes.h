// Codes of eight bits on AVX2, multiplied as the signed levels code - 128: at twice the rate of unsigned codes, whose
// high bit would saturate sums of 16 bits.
//
// add_signed_dot multiplies wrongly where its first operand is -128; correct_least repairs that in a slower loop.
// x_dot has x first, which with one digit is -128 only in blocks of activations from elsewhere (x_has_least). level_dot
// has the level first, which is -128 only where a header defines LEAST_CODES (codes_have_least). x_dot shares |level|
// among rows of x.
#pragma once

#include "vec.h"

#if CODE_BITS == 8 && SHIFT == 128 && defined(SIGNED_DOT)
#define SIGNED_CODES 1

INLINE i8x64 levels_of(u8x64 codes) {
    i8x64 levels;
    EACH_PART levels.part[i] = (i8_part)(codes.part[i] ^ ((u8_part){0} + SHIFT));
    return levels;
}

INLINE int x_has_least(const int8_t* q) { return memchr(q, 128, SUPER) != NULL; }

// acc[i] + the dot product of bytes 4i to 4i + 3 of the levels and x. least: whether a number of x may be -128.
INLINE i32x16 x_dot(i32x16 acc, u8x64 codes, i8x64 x, const int least) {
    if (least) acc = correct_least(acc, x, levels_of(codes));
    return add_signed_dot(acc, x, levels_of(codes), magnitudes(levels_of(codes)));
}

// acc[i] + the dot product of bytes 4i to 4i + 3 of the levels and x, whose magnitudes are `size`. least: whether any
// level may be -128.
INLINE i32x16 sized_dot(i32x16 acc, i8x64 levels, i8x64 x, i8x64 size, const int least) {
    if (least) acc = correct_least(acc, levels, x);
    return add_signed_dot(acc, levels, x, size);
}

INLINE i32x16 level_dot(i32x16 acc, u8x64 codes, i8x64 x, const int least) {
    return sized_dot(acc, levels_of(codes), x, magnitudes(x), least);
}

#ifdef LEAST_CODES
// Whether any of the codes of 256 weights is the level -128.
INLINE int codes_have_least(const u8x64 codes[4]) {
    i8x64 least = levels_of(codes[0]);
#pragma GCC unroll 4
    for (int v = 1; v < 4; ++v) least = least_levels(least, levels_of(codes[v]));
    return has_level(least, -128);
}
#endif
#else
#define SIGNED_CODES 0
#undef LEAST_CODES
#endif
