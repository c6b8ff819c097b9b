// q2_0: w = d * (q - 1), q in 0..3. Twin of qgemm/formats/q2_0.py. The scale of 64 weights is that of each 32.
#include "../scales_of_blocks.h"

#define ZERO 1

// Byte j of a block has weights 4 j + i in bits 2i and 2i + 1, which are of vector i: two lanes of all are a group.
#define ACCS 1
#define ACC_OF(vector) 0
#define RUN 1
#define WEIGHT_OF(v, i) (4 * (i) + (v))
#define BLOCK_OF_LANE(lane) ((lane) / 4)
#include "../of_lanes.h"

#define RAW 1
INLINE void bytes_of(u8x64 bytes[RAW], const uint8_t* blocks) {
    const uint8_t* at = blocks + 2;
    bytes[0] = join(load16(at), load16(at + BLOCK_BYTES), load16(at + 2 * BLOCK_BYTES), load16(at + 3 * BLOCK_BYTES));
}
INLINE void codes_of(u8x64 codes[4], const u8x64 bytes[RAW]) { two_bits_of(codes, bytes[0]); }
INLINE void scales_of(unpacked* found, const uint8_t* blocks) { found->scale = of_groups_of_32(halves_at(blocks, 0)); }
INLINE void scales_of_lanes(f32x16* scale, f32x16* minimum, const uint8_t* blocks) {
    *scale = *minimum = of_lanes(halves_at(blocks, 0));
}
