// q2_0: w = d * (q - 1), q in 0..3. Twin of qgemm/formats/q2_0.py. Each 32 weights get the scale of their 64.
#include "../block_scales.h"

#define ZERO 1

// Byte j of a block holds weight 4 j + i in bits 2i and 2i + 1, which become vector i: two lanes of an accumulator are
// a group.
#define ACCS 1
#define ACC_OF(vector) 0
#define RUN 1
#define WEIGHT_OF(v, i) (4 * (i) + (v))
#define LANE_BLOCK(lane) ((lane) / 4)
#include "../broadcast_lanes.h"

#define RAW 1
INLINE void load_raw(u8x64 bytes[RAW], const uint8_t* blocks) {
    const uint8_t* qs = blocks + 2;
    bytes[0] = join(load16(qs), load16(qs + BLOCK_BYTES), load16(qs + 2 * BLOCK_BYTES), load16(qs + 3 * BLOCK_BYTES));
}
INLINE void raw_to_codes(u8x64 codes[4], const u8x64 bytes[RAW]) { split_two_bits(codes, bytes[0]); }
INLINE void load_scales(unpacked* w, const uint8_t* blocks) {
    w->scale = broadcast_to_groups(gather_block_halves(blocks, 0));
}
INLINE void load_lane_scales(f32x16* scale, f32x16* minimum, const uint8_t* blocks) {
    *scale = *minimum = broadcast_to_lanes(gather_block_halves(blocks, 0));
}
