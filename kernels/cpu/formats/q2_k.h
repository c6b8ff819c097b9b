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

#define RAW 1
INLINE void load_raw(u8x64 bytes[RAW], const uint8_t* block) { bytes[0] = load64(block + 16); }
INLINE void raw_to_codes(u8x64 codes[4], const u8x64 bytes[RAW]) { split_two_bits(codes, bytes[0]); }
INLINE void load_scales(unpacked* w, const uint8_t* block) {
    uint64_t both[2];
    memcpy(both, block, sizeof both);
    w->scale = mul_all(nibbles_to_floats(both[0], both[1]), half_to_float(load_half(block + 80)));
    w->minimum = mul_all(nibbles_to_floats(both[0] >> 4, both[1] >> 4), -half_to_float(load_half(block + 82)));
}
