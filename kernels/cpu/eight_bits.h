// Blocks of 32 signed bytes. A vector has the codes of two blocks, 128 above.
#pragma once

#define CODE_BITS 8
#include "in_order.h"

#define SHIFT 128

// The bytes at `offset` of each of eight blocks, and the half with which a block begins.
INLINE unpacked bytes_of_blocks(const uint8_t* blocks, int offset) {
    unpacked found;
    for (int i = 0; i < 4; ++i) {
        const uint8_t *first = blocks + 2 * i * BLOCK_BYTES + offset, *second = first + BLOCK_BYTES;
        found.codes[i] = xor_all(join_halves(first, second), SHIFT);
    }
    found.scale = with_zeros(halves_of_blocks(blocks, BLOCK_BYTES));
    return found;
}
