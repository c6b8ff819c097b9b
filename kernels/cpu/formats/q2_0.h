// q2_0: w = d * (q - 1), q in 0..3. Twin of qgemm/formats/q2_0.py. The scale of 64 weights is that of each 32.
#include "../unpacked.h"

#define ZERO 1

// Byte j of a block has weights 4 j + i in bits 2i and 2i + 1, which are of vector i: two lanes of all are a group.
#define ACCS 1
#define ACC_OF(vector) 0
#define LANES 2
#define RUN 1
#define GROUPS 8
#define WEIGHT_OF(v, i) (4 * (i) + (v))

INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked found;
    float d[8];
    for (int i = 0; i < 4; ++i) {
        uint16_t half;
        memcpy(&half, blocks + i * BLOCK_BYTES, sizeof half);
        d[2 * i] = d[2 * i + 1] = half_to_float(half);
    }
    const uint8_t* at = blocks + 2;
    const u8x64 all =
        join(load16(at), load16(at + BLOCK_BYTES), load16(at + 2 * BLOCK_BYTES), load16(at + 3 * BLOCK_BYTES));
    for (int i = 0; i < 4; ++i) found.codes[i] = and_all(shift_right(all, 2 * i), 3);
    f32x8 scales;
    memcpy(&scales, d, sizeof scales);
    found.scale = with_zeros(scales);
    return found;
}
