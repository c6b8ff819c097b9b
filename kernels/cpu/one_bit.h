// Layout of one-bit codes: weight i is bit i of the field. The 32 bytes of 256 weights are loaded twice, side by side.
//
// A lane has four bytes, the 32 weights of one group: bits 2v in the first half of vector v, bits 2v + 1 in the second.
// The four vectors therefore share an accumulator. load_lane_codes leaves the bits of the second half one place higher,
// so that codes there count twice, and LANE_FACTOR halves them.
//
// Macro: BIT_CODE, the code (1 or 2) of a bit that is set.
#pragma once

#include "block_scales.h"

#define ACCS 1
#define ACC_OF(vector) 0
#define RUN 1
#define WEIGHT_OF(v, i) (8 * ((i) % 32) + 2 * (v) + (i) / 32)
#define LANE_BLOCK(lane) ((lane) % 8 * 32 / BLOCK_WEIGHTS)
#define LANE_FACTOR(lane) ((lane) < 8 ? 1 : 0.5f)
#define LANE_CODES

#include "broadcast_lanes.h"

// The 32 bytes of 256 weights, at `offset` of the blocks, twice.
INLINE u8x64 bits_twice(const uint8_t* blocks, int offset) {
    enum { BIT_BYTES = BLOCK_WEIGHTS / 8 };
    const uint8_t* field = blocks + offset;
    if (BIT_BYTES == 32) return join_halves(field, field);
    if (BIT_BYTES == 16) {
        const u8x16 low = load16(field), high = load16(field + BLOCK_BYTES);
        return join(low, high, low, high);
    }
    uint64_t words[4] = {0};
    for (int i = 0; i < BLOCKS; ++i) {
        uint64_t result = 0;
        memcpy(&result, field + i * BLOCK_BYTES, BIT_BYTES);
        words[i * BIT_BYTES / 8 % 4] |= result << 8 * (i * BIT_BYTES % 8);
    }
    const u8x16 low = join_words(words[0], words[1]), high = join_words(words[2], words[3]);
    return join(low, high, low, high);
}

static const uint8_t FIRST_HALF[64] = {REPEAT_8(1), REPEAT_8(1), REPEAT_8(1), REPEAT_8(1),
                                       REPEAT_8(0), REPEAT_8(0), REPEAT_8(0), REPEAT_8(0)};

// Codes of bits 2v (first half, BIT_CODE each) and 2v + 1 (second half, twice BIT_CODE).
INLINE void bits_to_lane_codes(u8x64 codes[4], u8x64 bits) {
    const u8x64 first = load64(FIRST_HALF);
    for (int v = 0; v < 4; ++v) EACH_PART {
            const u8_part mask = (2 * BIT_CODE) - first.part[i] * BIT_CODE;
            const u8_part down = BIT_CODE == 1 ? bits.part[i] >> 2 * v : bits.part[i] >> (v ? 2 * v - 1 : 0);
            codes[v].part[i] = (BIT_CODE == 2 && !v ? bits.part[i] << 1 : down) & mask;
        }
}

// Codes of BIT_CODE in both halves.
INLINE void bits_to_codes(u8x64 codes[4], u8x64 bits) {
    const u8x64 first = load64(FIRST_HALF);
    bits_to_lane_codes(codes, bits);
    for (int v = 0; v < 4; ++v) EACH_PART codes[v].part[i] >>= 1 - first.part[i];
}
