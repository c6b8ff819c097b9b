// Loads of the scalars in a block: halves, words and bytes at any address, as floats.
#pragma once

#include "vec.h"

INLINE uint16_t load_half(const uint8_t* from) {
    uint16_t half;
    memcpy(&half, from, sizeof half);
    return half;
}

INLINE uint32_t load_word(const uint8_t* from) {
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

// 2^exponent, for exponents from -126 to 127.
INLINE float power_of_two(int exponent) {
    union {
        uint32_t bits;
        float value;
    } result = {(uint32_t)(exponent + 127) << 23};
    return result.value;
}

// The exponent of frexp: e with 2^(e - 1) <= value < 2^e, for a positive normal number; -126 for a subnormal one.
INLINE int frexp_exponent(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (int)(bits >> 23) - 126;
}

// Sixteen numbers of two bytes, each in the upper half of a lane.
INLINE i32x16 load_high_shorts(const uint16_t* from) {
    const f32x16 bits = load_bfloats(from);
    i32x16 result;
    EACH_PART result.part[i] = (i32_part)bits.part[i];
    return result;
}

// Packs the first two bytes of four blocks into one word, in integer registers: inserting single vector lanes would
// saturate the shuffle port.
INLINE uint64_t gather_pairs(const uint8_t* blocks, int64_t size) {
    uint64_t result = 0;
    for (int i = 0; i < 4; ++i) {
        uint16_t pair;
        memcpy(&pair, blocks + i * size, sizeof pair);
        result |= (uint64_t)pair << 16 * i;
    }
    return result;
}

// The halves at the start of eight blocks, as floats.
INLINE f32x8 gather_halves(const uint8_t* blocks, int64_t size) {
    return halves_to_floats(gather_pairs(blocks, size), gather_pairs(blocks + 4 * size, size));
}

INLINE f32x8 bytes_to_floats(uint64_t bytes) { return __builtin_convertvector(bytes_to_ints(bytes), f32x8); }
