// s7_1of2: w = d * (q - 64) for one weight of each pair of neighbours, 0 for the other. Twin of
// qgemm/formats/s7_1of2.py. Each 32 weights get the scale of their 128.
#define CODE_BITS 7
#include "../block_scales.h"

#define SHIFT 64

// Byte j of a block belongs to weights 2 j (an even vector) and 2 j + 1 (the odd vector after it). Bit 7 says which of
// the two has the code; the other one gets code 64.
#define ACCS 2
#define ACC_OF(vector) ((vector) / 2)
#define RUN 1
#define WEIGHT_OF(v, i) (128 * ((i) / 32) + 64 * ((v) / 2) + 2 * ((i) % 32) + (v) % 2)
#define LANE_BLOCK(lane) ((lane) / 8)
#include "../broadcast_lanes.h"

#define RAW 2
INLINE void load_raw(u8x64 bytes[RAW], const uint8_t* blocks) {
    for (int v = 0; v < RAW; ++v) bytes[v] = join_halves(blocks + 2 + 32 * v, blocks + 2 + 32 * v + BLOCK_BYTES);
}
INLINE void raw_to_codes(u8x64 codes[4], const u8x64 bytes[RAW]) {
    for (int v = 0; v < RAW; ++v) EACH_PART {
            const u8_part byte = bytes[v].part[i], second = (u8_part)((i8_part)byte < 0);
            const u8_part apart = (byte ^ SHIFT) & 127;  // difference from the code of 0
            codes[2 * v].part[i] = SHIFT ^ (apart & ~second), codes[2 * v + 1].part[i] = SHIFT ^ (apart & second);
        }
}
INLINE void load_scales(unpacked* w, const uint8_t* blocks) {
    w->scale = broadcast_to_groups(gather_block_halves(blocks, 0));
}
INLINE void load_lane_scales(f32x16* scale, f32x16* minimum, const uint8_t* blocks) {
    *scale = *minimum = broadcast_to_lanes(gather_block_halves(blocks, 0));
}
