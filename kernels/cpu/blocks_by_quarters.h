// Blocks of 64 to 256 weights whose codes lie by quarters: those of QUARTER weights side by side, of as many bytes or
// bits. Vector v has the v-th quarter of each block; a lane has one block in all four.
#pragma once

#include "scales_of_blocks.h"

#define QUARTER (BLOCK_WEIGHTS / 4)  // 8, 16, 32 or 64
#define ACCS (QUARTER >= 32 ? 4 : QUARTER / 8)
#define ACC_OF(vector) ((vector) * ACCS / 4)
#define RUN (QUARTER < 16 ? QUARTER : 16)
#define WEIGHT_OF(v, i) (BLOCK_WEIGHTS * ((i) / QUARTER) + QUARTER * (v) + (i) % QUARTER)
#define BLOCK_OF_LANE(lane) (4 * (lane) / QUARTER)

// QUARTER bytes at `offset` of each block.
INLINE u8x64 quarters(const uint8_t* blocks, int offset) {
    const uint8_t* at = blocks + offset;
    if (QUARTER == 64) return join_halves(at, at + 32);  // 64 bytes at once would often lie in two cache lines
    if (QUARTER == 32) return join_halves(at, at + BLOCK_BYTES);
    if (QUARTER == 16)
        return join(load16(at), load16(at + BLOCK_BYTES), load16(at + 2 * BLOCK_BYTES), load16(at + 3 * BLOCK_BYTES));
    uint64_t eight[8];
    for (int i = 0; i < 8; ++i) memcpy(&eight[i], at + i * BLOCK_BYTES, sizeof eight[i]);
    return join(two_words(eight[0], eight[1]), two_words(eight[2], eight[3]), two_words(eight[4], eight[5]),
                two_words(eight[6], eight[7]));
}

// QUARTER bits of each block, from bit QUARTER * v of the field at `offset` on.
INLINE uint64_t bits_of_quarters(const uint8_t* blocks, int offset, int v) {
    const uint8_t* at = blocks + offset + QUARTER / 8 * v;
    uint64_t found = 0;
    if (QUARTER == 16) return pairs_of_blocks(at, BLOCK_BYTES);
    for (int i = 0; i < BLOCKS; ++i) {
        uint64_t bits = 0;
        memcpy(&bits, at + i * BLOCK_BYTES, QUARTER / 8);
        found |= bits << QUARTER % 64 * i;
    }
    return found;
}

// 2^place in the slots whose bit is set, of fields of a bit each at `offset` of the blocks; those are zero before.
INLINE void add_bits(u8x64 codes[4], const uint8_t* blocks, int offset, int place) {
    for (int v = 0; v < 4; ++v)
        codes[v] = or_where_set(codes[v], bits_of_quarters(blocks, offset, v), (uint8_t)(1 << place));
}
#include "of_lanes.h"
