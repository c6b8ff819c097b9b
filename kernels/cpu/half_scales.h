// Scales of eight blocks of 32 weights: a half in each block, and with MINIMUM a second half for its minimum.
#pragma once

#include "unpacked.h"

#ifndef MINIMUM
#define MINIMUM 0
#endif

INLINE f32x16 load_block_scales(const uint8_t* blocks, int offset) {
    return zero_extend(gather_halves(blocks + offset, BLOCK_BYTES));
}

#define SCALE_SHORTS (MINIMUM ? 16 : 8)
INLINE void copy_scales(uint16_t to[SCALE_SHORTS], const uint8_t* blocks) {
#pragma GCC unroll 8
    for (int b = 0; b < 8; ++b) {
        to[b] = load_half(blocks + b * BLOCK_BYTES);
        if (MINIMUM) to[SCALE_SHORTS - 8 + b] = load_half(blocks + b * BLOCK_BYTES + 2);
    }
}

INLINE void load_tile_scales(f32x16 scale[8], f32x16 minimum[8], const uint16_t fields[SCALE_SHORTS][16]) {
#pragma GCC unroll 8
    for (int b = 0; b < 8; ++b) {
        scale[b] = load_halves(fields[b]);
        if (MINIMUM) minimum[b] = load_halves(fields[SCALE_SHORTS - 8 + b]);
    }
}
