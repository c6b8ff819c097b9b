// tq2_0: w = d * (q - 1), q in 0..3. Twin of qgemm/formats/tq2_0.py. The scale of 256 weights is that of each 32.
#include "../two_bits.h"

#define ZERO 1
#define LANES 8
#define GROUPS 8
#define LOW_GROUP(acc) (acc)
#define HIGH_GROUP(acc) (4 + (acc))

INLINE unpacked unpack(const uint8_t* block) {
    unpacked found;
    uint16_t half;
    memcpy(&half, block + 64, sizeof half);
    two_bits_of_bytes(found.codes, block);
    found.scale = with_zeros((f32x8){0} + half_to_float(half));
    return found;
}
