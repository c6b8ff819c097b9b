// Scales of blocks of 32 to 256 weights, which groups of 32 share.
#pragma once

#include "unpacked.h"

#define BLOCKS (SUPER / BLOCK_WEIGHTS)
#define GROUPS 8

// The halves at `offset` of all blocks; the upper halves of floats.
INLINE f32x8 halves_at(const uint8_t* blocks, int offset) {
    uint64_t found[2] = {0};
    for (int i = 0; i < BLOCKS; ++i)
        found[i / 4] |= (uint64_t)half_at(blocks + offset + i * BLOCK_BYTES) << 16 * (i % 4);
    return halves_to_floats(found[0], found[1]);
}
INLINE f32x8 upper_halves_at(const uint8_t* blocks, int offset) {
    uint64_t found[4] = {0};
    for (int i = 0; i < BLOCKS; ++i)
        found[i / 2] |= (uint64_t)half_at(blocks + offset + i * BLOCK_BYTES) << (16 + 32 * (i % 2));
    f32x8 floats;
    memcpy(&floats, found, sizeof floats);
    return floats;
}

// Of numbers of the blocks those of each group of 32 weights.
INLINE f32x16 of_groups_of_32(f32x8 v) {
    const i32x8 block = {0,
                         32 / BLOCK_WEIGHTS,
                         64 / BLOCK_WEIGHTS,
                         96 / BLOCK_WEIGHTS,
                         128 / BLOCK_WEIGHTS,
                         160 / BLOCK_WEIGHTS,
                         192 / BLOCK_WEIGHTS,
                         224 / BLOCK_WEIGHTS};
    return with_zeros(spread_eight(v, block));
}
