// s7_1of2: w = d * (q - 64) of one of each two neighbours, 0 of the other. Twin of qgemm/formats/s7_1of2.py. The scale
// of 128 weights is that of each 32.
#define CODE_BITS 7
#include "../scales_of_blocks.h"

#define SHIFT 64

// Byte j of a block is of weights 2 j and 2 j + 1, which are of an even and of an odd vector: bit 7 says whose the code
// is, and the other one's is 64.
#define ACCS 2
#define ACC_OF(vector) ((vector) / 2)
#define RUN 1
#define WEIGHT_OF(v, i) (128 * ((i) / 32) + 64 * ((v) / 2) + 2 * ((i) % 32) + (v) % 2)
#define BLOCK_OF_LANE(lane) ((lane) / 8)
#include "../of_lanes.h"

#define RAW 2
INLINE void bytes_of(u8x64 bytes[RAW], const uint8_t* blocks) {
    for (int v = 0; v < RAW; ++v) bytes[v] = join_halves(blocks + 2 + 32 * v, blocks + 2 + 32 * v + BLOCK_BYTES);
}
INLINE void codes_of(u8x64 codes[4], const u8x64 bytes[RAW]) {
    for (int v = 0; v < RAW; ++v) EACH {
            const u8_part byte = bytes[v].part[i], second = (u8_part)((i8_part)byte < 0);
            const u8_part apart = (byte ^ SHIFT) & 127;  // of the code from that of 0
            codes[2 * v].part[i] = SHIFT ^ (apart & ~second), codes[2 * v + 1].part[i] = SHIFT ^ (apart & second);
        }
}
INLINE void scales_of(unpacked* found, const uint8_t* blocks) { found->scale = of_groups_of_32(halves_at(blocks, 0)); }
INLINE void scales_of_lanes(f32x16* scale, f32x16* minimum, const uint8_t* blocks) {
    *scale = *minimum = of_lanes(halves_at(blocks, 0));
}
