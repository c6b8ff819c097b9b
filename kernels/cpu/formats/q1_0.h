// q1_0: w = d * (2 q - 1), q in 0..1. Twin of qgemm/formats/q1_0.py. The scale of 128 weights is that of each 32.
#include "../in_order.h"

#define SHIFT 1

// 2 q as codes.
INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked found;
    uint16_t halves[2];
    for (int block = 0; block < 2; ++block) {
        uint64_t bits[2];
        memcpy(&halves[block], blocks + block * BLOCK_BYTES, sizeof halves[block]);
        memcpy(bits, blocks + block * BLOCK_BYTES + 2, sizeof bits);
        for (int i = 0; i < 2; ++i) found.codes[2 * block + i] = where_set(bits[i], 2);
    }
    const float first = half_to_float(halves[0]), second = half_to_float(halves[1]);
    found.scale = with_zeros((f32x8){first, first, first, first, second, second, second, second});
    return found;
}
