// tq2_0: w = d * (q - 1), q in 0..3. Twin of qgemm/formats/tq2_0.py. Each 32 weights get the scale of their 256.
#include "../two_bits.h"

#define ZERO 1
#define GROUPS 8
#include "../single_scale.h"

#define RAW 1
INLINE void load_raw(u8x64 bytes[RAW], const uint8_t* block) { bytes[0] = join_halves(block, block + 32); }
INLINE void raw_to_codes(u8x64 codes[4], const u8x64 bytes[RAW]) { split_two_bits(codes, bytes[0]); }
INLINE void load_scales(unpacked* w, const uint8_t* block) { w->scale = broadcast_half(block + 64); }
INLINE void load_lane_scales(f32x16* scale, f32x16* minimum, const uint8_t* block) {
    *scale = *minimum = broadcast_half(block + 64);
}
