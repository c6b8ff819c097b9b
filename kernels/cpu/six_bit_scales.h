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

// Scales and minimums of 16 rows, a row a lane: fields 2 and 3 are low six bits of scales, 4 and 5 those of minimums.
#define SCALE_SHORTS 8
INLINE void copy_scales(uint16_t to[SCALE_SHORTS], const uint8_t* block) { memcpy(to, block, 2 * SCALE_SHORTS); }

INLINE void load_tile_scales(f32x16 scale[8], f32x16 minimum[8], const uint16_t fields[SCALE_SHORTS][16]) {
    const f32x16 d = load_halves(fields[0]), dmin = mul_all(load_halves(fields[1]), -1);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const i32x16 first = load_high_shorts(fields[2 + i / 2]), second = load_high_shorts(fields[4 + i / 2]);
        const i32x16 rest = load_high_shorts(fields[6 + i / 2]);
        const int bit = 16 + 8 * (i % 2);
        const i32x16 sc = or_ints(bit_field(rest, bit, 15), shift_ints(bit_field(first, bit + 6, 3), 4));
        const i32x16 m = or_ints(bit_field(rest, bit + 4, 15), shift_ints(bit_field(second, bit + 6, 3), 4));
        scale[i] = mul(to_float(bit_field(first, bit, 63)), d), scale[4 + i] = mul(to_float(sc), d);
        minimum[i] = mul(to_float(bit_field(second, bit, 63)), dmin), minimum[4 + i] = mul(to_float(m), dmin);
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
