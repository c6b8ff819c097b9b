// q2_k: w = d * sc * q - dmin * m, q in 0..3, groups of 16. Twin of qgemm/formats/q2_k.py.
#include "../two_bits.h"

#define MINIMUM 1
#define LANES 4
#define GROUPS 16
#define QUAD_GROUP(acc, quad) (8 * ((quad) / 2) + 2 * (acc) + (quad) % 2)

INLINE f32x16 nibbles_to_floats(uint64_t first, uint64_t second) {
    const uint64_t low = 0x0f0f0f0f0f0f0f0f;
    return join_floats(bytes_to_floats(first & low), bytes_to_floats(second & low));
}

#define SCALE_SHORTS 10
INLINE void copy_scales(uint16_t to[SCALE_SHORTS], const uint8_t* block) {
    memcpy(to, block, 16), memcpy(to + 8, block + 80, 4);
}
INLINE void load_tile_scales(f32x16 scale[16], f32x16 minimum[16], const uint16_t fields[SCALE_SHORTS][16]) {
    const f32x16 d = load_halves(fields[8]), dmin = mul_all(load_halves(fields[9]), -1);
#pragma GCC unroll 16
    for (int g = 0; g < 16; ++g) {
        const i32x16 both = load_high_shorts(fields[g / 2]);
        scale[g] = mul(to_float(bit_field(both, 16 + 8 * (g % 2), 15)), d);
        minimum[g] = mul(to_float(bit_field(both, 20 + 8 * (g % 2), 15)), dmin);
    }
}

#define RAW 1
INLINE void load_raw(u8x64 bytes[RAW], const uint8_t* block) { bytes[0] = load64(block + 16); }
INLINE void raw_to_codes(u8x64 codes[4], const u8x64 bytes[RAW]) { split_two_bits(codes, bytes[0]); }
INLINE void load_scales(unpacked* w, const uint8_t* block) {
    uint64_t both[2];
    memcpy(both, block, sizeof both);
    w->scale = mul_all(nibbles_to_floats(both[0], both[1]), half_to_float(load_half(block + 80)));
    w->minimum = mul_all(nibbles_to_floats(both[0] >> 4, both[1] >> 4), -half_to_float(load_half(block + 82)));
}
