// Scales of blocks of 32 to 256 weights, broadcast to groups of 32 weights.
#pragma once

#include "unpacked.h"

#define BLOCKS (SUPER / BLOCK_WEIGHTS)
#define GROUPS 8

// One scalar for each block, at `offset`: halves, or bfloat16 numbers.
INLINE f32x8 gather_block_halves(const uint8_t* blocks, int offset) {
    uint64_t result[2] = {0};
    for (int i = 0; i < BLOCKS; ++i)
        result[i / 4] |= (uint64_t)load_half(blocks + offset + i * BLOCK_BYTES) << 16 * (i % 4);
    return halves_to_floats(result[0], result[1]);
}
INLINE f32x8 gather_block_bfloats(const uint8_t* blocks, int offset) {
    uint64_t result[4] = {0};
    for (int i = 0; i < BLOCKS; ++i)
        result[i / 2] |= (uint64_t)load_half(blocks + offset + i * BLOCK_BYTES) << (16 + 32 * (i % 2));
    f32x8 floats;
    memcpy(&floats, result, sizeof floats);
    return floats;
}

// Broadcasts one number for each block to its groups of 32 weights.
INLINE f32x16 broadcast_to_groups(f32x8 v) {
    const i32x8 block = {0,
                         32 / BLOCK_WEIGHTS,
                         64 / BLOCK_WEIGHTS,
                         96 / BLOCK_WEIGHTS,
                         128 / BLOCK_WEIGHTS,
                         160 / BLOCK_WEIGHTS,
                         192 / BLOCK_WEIGHTS,
                         224 / BLOCK_WEIGHTS};
    return zero_extend(permute_eight(v, block));
}
