// Numbers of blocks as floats.
#pragma once

#include "vec.h"

// 2^exponent, for exponents from -126 to 127.
INLINE float power_of_two(int exponent) {
    union {
        uint32_t bits;
        float value;
    } found = {(uint32_t)(exponent + 127) << 23};
    return found.value;
}

// A half as float, also a subnormal one.
INLINE float half_to_float(uint16_t half) {
    union {
        uint32_t bits;
        float value;
    } found = {(uint32_t)(half & 0x7fff) << 13};
    found.value *= power_of_two(112);
    if ((half & 0x7fff) >= 0x7c00) found.bits |= 0xffu << 23;
    found.bits |= (uint32_t)(half & 0x8000) << 16;
    return found.value;
}

// The halves at the start of eight blocks, gathered in integer registers: single lanes would fill the shuffle port.
INLINE f32x8 halves_of_blocks(const uint8_t* blocks, int64_t size) {
    uint64_t words[2] = {0, 0};
    for (int i = 0; i < 8; ++i) {
        uint16_t half;
        memcpy(&half, blocks + i * size, sizeof half);
        words[i / 4] |= (uint64_t)half << 16 * (i % 4);
    }
    u16x8 halves;
    memcpy(&halves, words, sizeof halves);
    return halves_to_floats(halves);
}

// Eight bytes as numbers.
INLINE i32x8 bytes_to_ints(uint64_t bytes) { return __builtin_convertvector(load8(&bytes), i32x8); }
INLINE f32x8 bytes_to_floats(uint64_t bytes) { return __builtin_convertvector(bytes_to_ints(bytes), f32x8); }
INLINE f32x8 signed_bytes_to_floats(const uint8_t* bytes) {
    return __builtin_convertvector(__builtin_convertvector((i8x8)load8(bytes), i32x8), f32x8);
}
