// The scales and minimums of q4_k and q5_k: d and dmin as halves, then 6 bits for each of eight groups, in 12 bytes.
#pragma once

#include "unpacked.h"

// w = d * sc * q - dmin * m, as scale = d * sc and minimum = -(dmin * m).
INLINE void six_bits_of_block(unpacked* to, const uint8_t* block) {
    uint16_t halves[2];
    uint32_t low[2], rest;
    memcpy(halves, block, sizeof halves);
    memcpy(low, block + 4, sizeof low), memcpy(&rest, block + 12, sizeof rest);
    const uint32_t scales = (rest & 0x0f0f0f0f) | (low[0] >> 2 & 0x30303030);
    const uint32_t minimums = (rest >> 4 & 0x0f0f0f0f) | (low[1] >> 2 & 0x30303030);
    const float d = half_to_float(halves[0]), dmin = -half_to_float(halves[1]);
    to->scale = with_zeros(d * bytes_to_floats((low[0] & 0x3f3f3f3f) | (uint64_t)scales << 32));
    to->minimum = with_zeros(dmin * bytes_to_floats((low[1] & 0x3f3f3f3f) | (uint64_t)minimums << 32));
}

// Bytes 32 p + j have weights 64 p + j low and 64 p + 32 + j high: vector 2 i + high has groups 4 i + high and + 2.
#define ACCS 4
#define ACC_OF(vector) (vector)
#define LANES 8
#define GROUPS 8
#define LOW_GROUP(acc) (4 * ((acc) / 2) + (acc) % 2)
#define HIGH_GROUP(acc) (4 * ((acc) / 2) + (acc) % 2 + 2)
#define WEIGHT_OF(v, i) (128 * ((v) / 2) + 64 * ((i) / 32) + 32 * ((v) % 2) + (i) % 32)
