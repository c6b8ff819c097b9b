// q1_0: w = d * (2 q - 1), q in 0..1. Twin of qgemm/formats/q1_0.py. Each 32 weights get the scale of their 128.
#define BIT_CODE 2  // codes are 2 q
#include "../one_bit.h"

#define SHIFT 1

INLINE void load_lane_scales(f32x16* scale, f32x16* minimum, const uint8_t* blocks) {
    *scale = *minimum = broadcast_to_lanes(gather_block_halves(blocks, 0));
}

INLINE void load_lane_codes(u8x64 codes[4], const uint8_t* blocks) { bits_to_lane_codes(codes, bits_twice(blocks, 2)); }

INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked w;
    bits_to_codes(w.codes, bits_twice(blocks, 2));
    w.scale = broadcast_to_groups(gather_block_halves(blocks, 0));
    return w;
}
