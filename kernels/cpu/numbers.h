// Numbers of blocks as floats.
#pragma once

#include "vec.h"

INLINE uint16_t half_at(const uint8_t* from) {
    uint16_t half;
    memcpy(&half, from, sizeof half);
    return half;
}

INLINE uint32_t word_at(const uint8_t* from) {
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

// 2^exponent, for exponents from -126 to 127.
INLINE float power_of_two(int exponent) {
    union {
        uint32_t bits;
        float value;
    } found = {(uint32_t)(exponent + 127) << 23};
    return found.value;
}

// e with 2^(e - 1) <= value < 2^e of a positive number that is not subnormal, -126 of one that is.
INLINE int exponent_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (int)(bits >> 23) - 126;
}

// Two bytes at the start of each of four blocks, gathered in integer registers: single lanes would fill the shuffle
// port.
INLINE uint64_t pairs_of_blocks(const uint8_t* blocks, int64_t size) {
    uint64_t found = 0;
    for (int i = 0; i < 4; ++i) {
        uint16_t pair;
        memcpy(&pair, blocks + i * size, sizeof pair);
        found |= (uint64_t)pair << 16 * i;
    }
    return found;
}

// The halves at the start of eight blocks.
INLINE f32x8 halves_of_blocks(const uint8_t* blocks, int64_t size) {
    return halves_to_floats(pairs_of_blocks(blocks, size), pairs_of_blocks(blocks + 4 * size, size));
}

INLINE f32x8 bytes_to_floats(uint64_t bytes) { return __builtin_convertvector(bytes_to_ints(bytes), f32x8); }
