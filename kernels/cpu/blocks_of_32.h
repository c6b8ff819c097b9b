// Formats of blocks of 32 weights, eight of which are unpacked at a time.
//
// Nibbles lie with weight j low and weight j + 16 high: a vector has those of four blocks, so that four lanes are a
// block, low nibbles share an accumulator with high ones.
#pragma once

#include "unpacked.h"

INLINE u8x64 sixteens_of_blocks(const uint8_t* at) {
    return join(load16(at), load16(at + BLOCK_BYTES), load16(at + 2 * BLOCK_BYTES), load16(at + 3 * BLOCK_BYTES));
}

// The nibbles at `offset` of eight blocks.
INLINE void raw_nibbles(u8x64 bytes[2], const uint8_t* blocks, int offset) {
    bytes[0] = sixteens_of_blocks(blocks + offset), bytes[1] = sixteens_of_blocks(blocks + offset + 4 * BLOCK_BYTES);
}

INLINE void nibbles_of_blocks(u8x64 codes[4], const uint8_t* blocks, int offset) {
    u8x64 bytes[2];
    raw_nibbles(bytes, blocks, offset), nibbles_of(codes, bytes);
}

INLINE f32x16 scales_of_blocks(const uint8_t* blocks, int offset) {
    return with_zeros(halves_of_blocks(blocks + offset, BLOCK_BYTES));
}

// The fifth bits: bit j of the 32 at `offset` of a block is that of weight j.
INLINE void fifths_of_blocks(u8x64 codes[4], const uint8_t* blocks, int offset) {
    for (int v = 0; v < 4; ++v) {
        const uint8_t* bits = blocks + offset + 4 * (v / 2) * BLOCK_BYTES + 2 * (v % 2);
        codes[v] = or_both(codes[v], where_set(pairs_of_blocks(bits, BLOCK_BYTES), 16));
    }
}

#define ACCS 2
#define ACC_OF(vector) ((vector) / 2)
#define LANES 4
#define GROUPS 8
// The weight of slot i of vector v: byte i of four blocks' low or high nibbles.
#define WEIGHT_OF(v, i) (32 * (4 * ((v) / 2) + (i) / 16) + (i) % 16 + 16 * ((v) % 2))
