// q1_0: w = d * (2 q - 1), q in 0..1. Twin of qgemm/formats/q1_0.py. The scale of 128 weights is that of each 32.
#define CODE_OF_BIT 2  // 2 q as codes
#include "../one_bit.h"

#define SHIFT 1

INLINE void scales_of_lanes(f32x16* scale, f32x16* minimum, const uint8_t* blocks) {
    *scale = *minimum = of_lanes(halves_at(blocks, 0));
}

INLINE void codes_by_lanes(u8x64 codes[4], const uint8_t* blocks) { codes_of_lanes(codes, bits_twice(blocks, 2)); }

INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked found;
    codes_of_bits(found.codes, bits_twice(blocks, 2));
    found.scale = of_groups_of_32(halves_at(blocks, 0));
    return found;
}
