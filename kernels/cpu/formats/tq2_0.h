// tq2_0: w = d * (q - 1), q in 0..3. Twin of qgemm/formats/tq2_0.py. The scale of 256 weights is that of each 32.
#include "../two_bits.h"

#define ZERO 1
#define GROUPS 8
#include "../one_scale.h"

#define RAW 1
INLINE void bytes_of(u8x64 bytes[RAW], const uint8_t* block) { bytes[0] = join_halves(block, block + 32); }
INLINE void codes_of(u8x64 codes[4], const u8x64 bytes[RAW]) { two_bits_of(codes, bytes[0]); }
INLINE void scales_of(unpacked* found, const uint8_t* block) { found->scale = scale_of_all(block + 64); }
INLINE void scales_of_lanes(f32x16* scale, f32x16* minimum, const uint8_t* block) {
    *scale = *minimum = scale_of_all(block + 64);
}
