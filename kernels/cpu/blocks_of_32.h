// Formats of blocks of 32 weights, eight of which are unpacked at a time.
//
// Nibbles lie with weight j low and weight j + 16 high: a vector has those of four blocks, so that four lanes are a
// block, low nibbles share an accumulator with high ones.
#pragma once

#include "unpacked.h"

INLINE u8x64 sixteens_of_blocks(const uint8_t* at) {
    return join(load16(at), load16(at + BLOCK_BYTES), load16(at + 2 * BLOCK_BYTES), load16(at + 3 * BLOCK_BYTES));
}

INLINE void nibbles_of_blocks(u8x64 codes[4], const uint8_t* blocks, int offset) {
    for (int i = 0; i < 2; ++i) {
        const u8x64 bytes = sixteens_of_blocks(blocks + offset + 4 * i * BLOCK_BYTES);
        codes[2 * i] = low_nibbles(bytes), codes[2 * i + 1] = high_nibbles(bytes);
    }
}

#ifdef LEVELS_PLUS_SHIFT
// What nibbles stand for in a codebook of bytes.
INLINE void levels_of_blocks(u8x64 codes[4], const uint8_t* blocks, int offset) {
    const u8x16 levels = LEVELS_PLUS_SHIFT;
    const u8x64 table = join(levels, levels, levels, levels);
    nibbles_of_blocks(codes, blocks, offset);
    for (int i = 0; i < 4; ++i) codes[i] = lookup(table, codes[i]);
}
#endif

INLINE f32x16 scales_of_blocks(const uint8_t* blocks, int offset) {
    return with_zeros(halves_of_blocks(blocks + offset, BLOCK_BYTES));
}

#define EIGHT_BITS 1, 2, 4, 8, 16, 32, 64, 128

// The fifth bits: bit j of the 32 at `offset` of a block is that of weight j.
INLINE void fifths_of_blocks(u8x64 codes[4], const uint8_t* blocks, int offset) {
    static const uint8_t BIT[64] = {EIGHT_BITS, EIGHT_BITS, EIGHT_BITS, EIGHT_BITS,
                                    EIGHT_BITS, EIGHT_BITS, EIGHT_BITS, EIGHT_BITS};
    static const uint8_t BYTE[64] = {EIGHT(0), EIGHT(1), EIGHT(4), EIGHT(5), EIGHT(8), EIGHT(9), EIGHT(12), EIGHT(13)};
    for (int i = 0; i < 2; ++i) {
        uint32_t words[4];
        for (int b = 0; b < 4; ++b) memcpy(&words[b], blocks + (4 * i + b) * BLOCK_BYTES + offset, 4);
        const u8x16 all = load16(words);
        const u8x64 bits = join(all, all, all, all);
        for (int high = 0; high < 2; ++high) {
            const u8x64 mine = lookup(bits, add_all(load64(BYTE), 2 * high));
            codes[2 * i + high] = or_both(codes[2 * i + high], where_bits(mine, load64(BIT), 16));
        }
    }
}

#define ACCS 2
#define ACC_OF(vector) ((vector) / 2)
#define LANES 4
#define GROUPS 8
// The weight of slot i of vector v: byte i of four blocks' low or high nibbles.
#define WEIGHT_OF(v, i) (32 * (4 * ((v) / 2) + (i) / 16) + (i) % 16 + 16 * ((v) % 2))
