// q3_k: w = d * sc * (q - 4), q in 0..7, groups of 16. Twin of qgemm/formats/q3_k.py.
#include "../two_bits.h"

#define SHIFT 4
#define LANES 4
#define GROUPS 16
#define QUAD_GROUP(acc, quad) (8 * ((quad) / 2) + 2 * (acc) + (quad) % 2)

#define SCALE_SHORTS 7
INLINE void copy_scales(uint16_t to[SCALE_SHORTS], const uint8_t* block) { memcpy(to, block + 96, 2 * SCALE_SHORTS); }
INLINE void load_tile_scales(f32x16 scale[16], f32x16* minimum, const uint16_t fields[SCALE_SHORTS][16]) {
    (void)minimum;
    const f32x16 d = load_halves(fields[6]);
#pragma GCC unroll 16
    for (int g = 0; g < 16; ++g) {
        const i32x16 low = bit_field(load_high_shorts(fields[g % 8 / 2]), 16 + 8 * (g % 2) + 4 * (g / 8), 15);
        const i32x16 high = bit_field(load_high_shorts(fields[4 + g % 4 / 2]), 16 + 8 * (g % 2) + 2 * (g / 4), 3);
        scale[g] = mul(add_floats(to_float(or_ints(low, shift_ints(high, 4))), all_floats(-32)), d);
    }
}

// Bit v of a byte of the last vector is the high bit of vector v; in its upper half the bits are stored four places
// higher.
#define RAW 2
INLINE void load_raw(u8x64 bytes[RAW], const uint8_t* block) {
    bytes[0] = load64(block + 32), bytes[1] = repeat_shifted(block, 4);
}
INLINE void raw_to_codes(u8x64 codes[4], const u8x64 bytes[RAW]) {
    split_two_bits(codes, bytes[0]);
    codes[0] = or_bytes(codes[0], and_all(shift_left(bytes[1], 2), 4));
    codes[1] = or_bytes(codes[1], and_all(shift_left(bytes[1], 1), 4));
    codes[2] = or_bytes(codes[2], and_all(bytes[1], 4));
    codes[3] = or_bytes(codes[3], and_all(shift_right(bytes[1], 1), 4));
}
INLINE void load_scales(unpacked* w, const uint8_t* block) {
    uint64_t nibbles;
    const uint32_t rest = load_word(block + 104);
    memcpy(&nibbles, block + 96, sizeof nibbles);
    const uint64_t low = 0x0f0f0f0f0f0f0f0f, two = 0x3030303030303030;  // low and high bits of sc + 32
    const uint64_t sc = (nibbles & low) | (((uint64_t)(rest >> 2) << 32 | (rest & 0x03030303)) << 4 & two);
    const uint64_t sc8 = (nibbles >> 4 & low) | (((uint64_t)(rest >> 6) << 32 | (rest >> 4 & 0x03030303)) << 4 & two);
    const f32x16 scales = join_floats(bytes_to_floats(sc), bytes_to_floats(sc8));
    w->scale = mul_all(add_floats(scales, all_floats(-32)), half_to_float(load_half(block + 108)));
}
