// Codes of a bit each, that of weight i in bit i of a block: 32 bytes of 256 weights, twice side by side. CODE_OF_BIT:
// 1 or 2, the code of a bit that is set.
//
// A lane has four bytes of 32 weights, one group: their bits 2v in the first half of vector v, 2v + 1 in the second. So
// the four vectors share an accumulator. In lanes of the second half codes count twice, for bits stay one place higher.
#pragma once

#include "scales_of_blocks.h"

#define ACCS 1
#define ACC_OF(vector) 0
#define RUN 1
#define WEIGHT_OF(v, i) (8 * ((i) % 32) + 2 * (v) + (i) / 32)
#define BLOCK_OF_LANE(lane) ((lane) % 8 * 32 / BLOCK_WEIGHTS)
#define FACTOR_OF_LANE(lane) ((lane) < 8 ? 1 : 0.5f)
#define CODES_OF_LANES

#include "of_lanes.h"

// The 32 bytes at `offset` of the blocks, twice.
INLINE u8x64 bits_twice(const uint8_t* blocks, int offset) {
    enum { BYTES_OF_BLOCK = BLOCK_WEIGHTS / 8 };
    const uint8_t* at = blocks + offset;
    if (BYTES_OF_BLOCK == 32) return join_halves(at, at);
    if (BYTES_OF_BLOCK == 16) {
        const u8x16 low = load16(at), high = load16(at + BLOCK_BYTES);
        return join(low, high, low, high);
    }
    uint64_t words[4] = {0};
    for (int i = 0; i < BLOCKS; ++i) {
        uint64_t found = 0;
        memcpy(&found, at + i * BLOCK_BYTES, BYTES_OF_BLOCK);
        words[i * BYTES_OF_BLOCK / 8 % 4] |= found << 8 * (i * BYTES_OF_BLOCK % 8);
    }
    const u8x16 low = two_words(words[0], words[1]), high = two_words(words[2], words[3]);
    return join(low, high, low, high);
}

static const uint8_t FIRST_HALF[64] = {EIGHT(1), EIGHT(1), EIGHT(1), EIGHT(1), EIGHT(0), EIGHT(0), EIGHT(0), EIGHT(0)};

// Bits 2v of the first half and 2v + 1 of the second: CODE_OF_BIT and twice that.
INLINE void codes_of_lanes(u8x64 codes[4], u8x64 bits) {
    const u8x64 first = load64(FIRST_HALF);
    for (int v = 0; v < 4; ++v) EACH {
            const u8_part mask = (2 * CODE_OF_BIT) - first.part[i] * CODE_OF_BIT;
            const u8_part down = CODE_OF_BIT == 1 ? bits.part[i] >> 2 * v : bits.part[i] >> (v ? 2 * v - 1 : 0);
            codes[v].part[i] = (CODE_OF_BIT == 2 && !v ? bits.part[i] << 1 : down) & mask;
        }
}

// CODE_OF_BIT in both halves.
INLINE void codes_of_bits(u8x64 codes[4], u8x64 bits) {
    const u8x64 first = load64(FIRST_HALF);
    codes_of_lanes(codes, bits);
    for (int v = 0; v < 4; ++v) EACH codes[v].part[i] >>= 1 - first.part[i];
}
