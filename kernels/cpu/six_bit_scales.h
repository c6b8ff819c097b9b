// Layout of q4_k and q5_k: halves d and dmin, then a six-bit scale and minimum for each of eight groups in 12 bytes,
// then codes.
#pragma once

#include "unpacked.h"

// w = d * sc * q - dmin * m: sets scale = d * sc and minimum = -(dmin * m).
INLINE void load_six_bit_scales(unpacked* to, const uint8_t* block) {
    uint32_t halves, low[2], rest;
    memcpy(&halves, block, sizeof halves);
    memcpy(low, block + 4, sizeof low), memcpy(&rest, block + 12, sizeof rest);
    const uint32_t scales = (rest & 0x0f0f0f0f) | (low[0] >> 2 & 0x30303030);
    const uint32_t minimums = (rest >> 4 & 0x0f0f0f0f) | (low[1] >> 2 & 0x30303030);
    const f32x4 both = two_halves_to_floats(halves);
    const float d = both[0], dmin = -both[1];
    to->scale = zero_extend(d * bytes_to_floats((low[0] & 0x3f3f3f3f) | (uint64_t)scales << 32));
    to->minimum = zero_extend(dmin * bytes_to_floats((low[1] & 0x3f3f3f3f) | (uint64_t)minimums << 32));
}

// The same for 16 rows, one row a lane.
#define TILE_SCALES
INLINE void load_tile_scales(f32x16 scale[8], f32x16 minimum[8], const uint8_t* const blocks[16]) {
    uint16_t halves[2][16];
    uint32_t words[3][16];
    for (int r = 0; r < 16; ++r) {
        memcpy(&halves[0][r], blocks[r], 2), memcpy(&halves[1][r], blocks[r] + 2, 2);
        for (int i = 0; i < 3; ++i) memcpy(&words[i][r], blocks[r] + 4 + 4 * i, 4);
    }
    const f32x16 d = load_halves(halves[0]), dmin = mul_all(load_halves(halves[1]), -1);
    const i32x16 first = load_ints(words[0]), second = load_ints(words[1]), rest = load_ints(words[2]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const i32x16 sc = or_ints(bit_field(rest, 8 * i, 15), shift_ints(bit_field(first, 8 * i + 6, 3), 4));
        const i32x16 m = or_ints(bit_field(rest, 8 * i + 4, 15), shift_ints(bit_field(second, 8 * i + 6, 3), 4));
        scale[i] = mul(to_float(bit_field(first, 8 * i, 63)), d), scale[4 + i] = mul(to_float(sc), d);
        minimum[i] = mul(to_float(bit_field(second, 8 * i, 63)), dmin), minimum[4 + i] = mul(to_float(m), dmin);
    }
}

// Byte 32 p + j holds weights 64 p + j (low nibble) and 64 p + 32 + j (high). The accumulator of vector 2 i + high sums
// groups 4 i + high and 4 i + high + 2.
#define ACCS 4
#define ACC_OF(vector) (vector)
#define LANES 8
#define GROUPS 8
#define LOW_GROUP(acc) (4 * ((acc) / 2) + (acc) % 2)
#define HIGH_GROUP(acc) (4 * ((acc) / 2) + (acc) % 2 + 2)
#define WEIGHT_OF(v, i) (128 * ((v) / 2) + 64 * ((i) / 32) + 32 * ((v) % 2) + (i) % 32)
