// tq2_0: w = d * (q - 1), q in 0..3. Twin of qgemm/formats/tq2_0.py. The scale of 256 weights is that of each 32.
#include "../two_bits.h"

#define ZERO 1
#define LANES 8
#define GROUPS 8
#define LOW_GROUP(acc) (acc)
#define HIGH_GROUP(acc) (4 + (acc))

#define RAW 1
INLINE void bytes_of(u8x64 bytes[RAW], const uint8_t* block) { bytes[0] = load64(block); }
INLINE void codes_of(u8x64 codes[4], const u8x64 bytes[RAW]) { two_bits_of(codes, bytes[0]); }
INLINE void scales_of(unpacked* found, const uint8_t* block) {
    uint16_t half;
    memcpy(&half, block + 64, sizeof half);
    found->scale = with_zeros((f32x8){0} + half_to_float(half));
}
