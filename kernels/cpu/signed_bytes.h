// Layout of blocks of 32 signed bytes (q8_0, q8_1): a vector holds two blocks in order, with 128 added to each code.
#pragma once

#define CODE_BITS 8
#include "half_scales.h"

#define SHIFT 128
#define LEAST_CODES  // codes of -128
#define ACCS 4
#define ACC_OF(vector) (vector)
#define LANES 8
#define GROUPS 8
#define LOW_GROUP(acc) (2 * (acc))
#define HIGH_GROUP(acc) (2 * (acc) + 1)
#define WEIGHT_OF(v, i) (64 * (v) + (i))

// Levels, LEVEL_OFFSET bytes after the start of a block, whose first half is its scale.
#define RAW 4
INLINE void load_raw(u8x64 bytes[RAW], const uint8_t* blocks) {
    for (int i = 0; i < 4; ++i) {
        const uint8_t *first = blocks + 2 * i * BLOCK_BYTES + LEVEL_OFFSET, *second = first + BLOCK_BYTES;
        bytes[i] = join_halves(first, second);
    }
}
INLINE void raw_to_codes(u8x64 codes[4], const u8x64 bytes[RAW]) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) codes[i] = xor_all(bytes[i], SHIFT);
}
INLINE void load_scales(unpacked* w, const uint8_t* blocks) { w->scale = load_block_scales(blocks, 0); }
