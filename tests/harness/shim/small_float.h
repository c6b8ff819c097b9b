// Floats of 16 bits, IEEE in everything but their size: half (5 exponent bits) and bfloat16 (8), on any host.
//
// Arithmetic is in double: sums, products and fused multiply-adds of 16-bit floats may be rounded there first, because
// a tie of the 16-bit format and the last bit that breaks it are less than 53 bits apart.
#pragma once

#include <math.h>
#include <string.h>

template <int EXPONENT_BITS>
struct small_float {
    static constexpr int FRACTION_BITS = 15 - EXPONENT_BITS, BIAS = (1 << (EXPONENT_BITS - 1)) - 1;
    static constexpr int LEAST = 1 - BIAS;  // exponent of the smallest normal number
    static constexpr unsigned short INFINITE = ((1 << EXPONENT_BITS) - 1) << FRACTION_BITS, NOT_A_NUMBER = 0x7fff;

    // To nearest, ties to even; NaN becomes the one that CUDA makes.
    static unsigned short bits_of(double value) {
        if (isnan(value)) return NOT_A_NUMBER;
        const unsigned short sign = signbit(value) ? 0x8000 : 0;
        const double size = fabs(value);
        if (size >= ldexp(1, BIAS + 1)) return sign | INFINITE;
        const int exponent = size < ldexp(1, LEAST) ? LEAST : ilogb(size);
        const int places = int(nearbyint(ldexp(size, FRACTION_BITS - exponent)));  // a carry moves on to the exponent
        return sign | (((exponent - LEAST) << FRACTION_BITS) + places);
    }
    static double value_of(unsigned short bits) {
        const int exponent = (bits & 0x7fff) >> FRACTION_BITS, fraction = bits & ((1 << FRACTION_BITS) - 1);
        double size;
        if (exponent == (1 << EXPONENT_BITS) - 1)
            size = fraction ? NAN : INFINITY;
        else if (exponent == 0)
            size = ldexp(fraction, LEAST - FRACTION_BITS);
        else {  // the fields of a double, far faster than ldexp
            const unsigned long long wide = (unsigned long long)(exponent - BIAS + 1023) << 52 |
                                            (unsigned long long)fraction << (52 - FRACTION_BITS);
            memcpy(&size, &wide, sizeof(size));
        }
        return bits & 0x8000 ? -size : size;
    }
};

// A type and its pair, with the names that CUDA gives them; trivial, so that shared memory and tiles may hold them.
#define SMALL_FLOAT(NAME, PAIR, EXPONENT_BITS)                                                                         \
    struct NAME {                                                                                                      \
        unsigned short bits;                                                                                           \
        NAME() = default;                                                                                              \
        explicit NAME(double value) : bits(small_float<EXPONENT_BITS>::bits_of(value)) {}                              \
        explicit operator double() const { return small_float<EXPONENT_BITS>::value_of(bits); }                        \
    };                                                                                                                 \
    struct alignas(4) PAIR {                                                                                           \
        NAME x, y;                                                                                                     \
    };                                                                                                                 \
    inline PAIR __hadd2(PAIR a, PAIR b) { return {NAME(double(a.x) + double(b.x)), NAME(double(a.y) + double(b.y))}; } \
    inline PAIR __hsub2(PAIR a, PAIR b) { return {NAME(double(a.x) - double(b.x)), NAME(double(a.y) - double(b.y))}; } \
    inline PAIR __hmul2(PAIR a, PAIR b) { return {NAME(double(a.x) * double(b.x)), NAME(double(a.y) * double(b.y))}; } \
    inline PAIR __hfma2(PAIR a, PAIR b, PAIR c) {                                                                      \
        return {NAME(fma(double(a.x), double(b.x), double(c.x))), NAME(fma(double(a.y), double(b.y), double(c.y)))};   \
    }                                                                                                                  \
    inline NAME __hmul(NAME a, NAME b) { return NAME(double(a) * double(b)); }                                         \
    inline NAME __low2half(PAIR a) { return a.x; }                                                                     \
    inline NAME __high2half(PAIR a) { return a.y; }                                                                    \
    inline float __low2float(PAIR a) { return float(double(a.x)); }                                                    \
    inline float __high2float(PAIR a) { return float(double(a.y)); }
