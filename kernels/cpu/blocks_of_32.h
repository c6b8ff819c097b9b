// Layout of formats with blocks of 32 weights; eight blocks are unpacked at a time.
//
// Byte j of a block's 16 holds weight j in the low nibble and weight j + 16 in the high one. Four blocks fill a vector,
// with four lanes each. Vectors of low nibbles share an accumulator with those of high nibbles.
#pragma once

#include "unpacked.h"

INLINE u8x64 join_four_blocks(const uint8_t* field) {
    return join(load16(field), load16(field + BLOCK_BYTES), load16(field + 2 * BLOCK_BYTES),
                load16(field + 3 * BLOCK_BYTES));
}

// The bytes with the nibbles, at `offset` of each of eight blocks.
INLINE void raw_nibbles(u8x64 bytes[2], const uint8_t* blocks, int offset) {
    bytes[0] = join_four_blocks(blocks + offset), bytes[1] = join_four_blocks(blocks + offset + 4 * BLOCK_BYTES);
}

INLINE void load_nibble_codes(u8x64 codes[4], const uint8_t* blocks, int offset) {
    u8x64 bytes[2];
    raw_nibbles(bytes, blocks, offset), split_nibbles(codes, bytes);
}

// Adds fifth bits: bit j of the 32 bits at `offset` of a block belongs to weight j.
INLINE void add_fifth_bits(u8x64 codes[4], const uint8_t* blocks, int offset) {
    for (int v = 0; v < 4; ++v) {
        const uint8_t* bits = blocks + offset + 4 * (v / 2) * BLOCK_BYTES + 2 * (v % 2);
        codes[v] = or_bytes(codes[v], where_set(gather_pairs(bits, BLOCK_BYTES), 16));
    }
}

// Loads the nibbles at `offset` + 4 of each of eight blocks, and the fifth bits at `offset`, bit j for weight j. In a
// byte of the last vector bit v is the fifth bit of vector v.
INLINE void raw_fifth_bits(u8x64 bytes[3], const uint8_t* blocks, int offset) {
    raw_nibbles(bytes, blocks, offset + 4), bytes[2] = all_bytes(0);
    for (int v = 0; v < 4; ++v) {
        const uint8_t* bits = blocks + offset + 4 * (v / 2) * BLOCK_BYTES + 2 * (v % 2);
        bytes[2] = or_where_set(bytes[2], gather_pairs(bits, BLOCK_BYTES), (uint8_t)(1 << v));
    }
}

INLINE void join_fifth_bits(u8x64 codes[4], const u8x64 bytes[3]) {
    split_nibbles(codes, bytes);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) codes[v] = or_bytes(codes[v], and_all(shift_left(bytes[2], 4 - v), 16));
}

#define ACCS 2
#define ACC_OF(vector) ((vector) / 2)
#define LANES 4
#define GROUPS 8
// Slot i of vector v is byte i of the low (v even) or high (v odd) nibbles of four blocks.
#define WEIGHT_OF(v, i) (32 * (4 * ((v) / 2) + (i) / 16) + (i) % 16 + 16 * ((v) % 2))
