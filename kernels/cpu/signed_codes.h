// Codes of eight bits on AVX2, multiplied as the signed levels code - 128: at twice the rate of unsigned codes, whose
// high bit would saturate sums of 16 bits.
//
// Macros: LEAST_LEVEL and GREATEST_LEVEL, the range of the levels (qgemm/cpu/native/libraries.py); LEAST_CODES, defined
// by a header whose levels may be -128, which add_signed_dot alone multiplies wrongly.
#pragma once

#include "vec.h"

#if CODE_BITS == 8 && SHIFT == 128 && defined(SIGNED_DOT)
#define SIGNED_CODES 1
#define LARGEST_LEVEL ((int)(GREATEST_LEVEL > -LEAST_LEVEL ? GREATEST_LEVEL : -LEAST_LEVEL))

// Words of four codes whose products with x, in -128..127, add up to sums of 16 bits: a sum of 2 SIGNED_WORDS products
// is at most 2 * 8 * 15 * 128 < 2^15.
enum { SIGNED_WORDS = LARGEST_LEVEL < 16 ? 8 : LARGEST_LEVEL < 32 ? 4 : LARGEST_LEVEL < 64 ? 2 : 1 };

#ifdef LEAST_CODES
// Whether any of `count` vectors of codes has the level -128.
INLINE int has_least(const u8x64* codes, int count) {
    u8x64 least = xor_all(codes[0], SHIFT);
#pragma GCC unroll 4
    for (int v = 1; v < count; ++v) least = least_levels(least, xor_all(codes[v], SHIFT));
    return has_level(least, -128);
}

#define CORRECT_LEAST(acc, codes, x, least) acc = (least) ? correct_least(acc, xor_all(codes, SHIFT), x) : (acc)
#else
_Static_assert(LARGEST_LEVEL < 128, "levels of add_signed_dot");
#define CORRECT_LEAST(acc, codes, x, least)
#endif

// acc[i] + the dot product of bytes 4i to 4i + 3 of the levels and x. least: what has_least says.
INLINE i32x16 signed_dot(i32x16 acc, u8x64 codes, i8x64 x, const int least) {
    (void)least;
    CORRECT_LEAST(acc, codes, x, least);
    return add_shorts(acc, add_signed_dot(all_ints(0), xor_all(codes, SHIFT), x));
}
#else
#define SIGNED_CODES 0
#define CORRECT_LEAST(acc, codes, x, least)
#undef LEAST_CODES
#endif
