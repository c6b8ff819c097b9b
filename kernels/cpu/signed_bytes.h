// Layout of blocks of 32 signed bytes (q8_0, q8_1): a vector holds two blocks in order, with 128 added to each code.
#pragma once

#define CODE_BITS 8
#include "unpacked.h"

#define SHIFT 128
#define LEAST_CODES  // codes of -128
#define ACCS 4
#define ACC_OF(vector) (vector)
#define LANES 8
#define GROUPS 8
#define LOW_GROUP(acc) (2 * (acc))
#define HIGH_GROUP(acc) (2 * (acc) + 1)
#define WEIGHT_OF(v, i) (64 * (v) + (i))

// Unpacks the codes at `offset` of eight blocks, and the half at the start of each as its scale.
INLINE unpacked unpack_signed_bytes(const uint8_t* blocks, int offset) {
    unpacked result;
    for (int i = 0; i < 4; ++i) {
        const uint8_t *first = blocks + 2 * i * BLOCK_BYTES + offset, *second = first + BLOCK_BYTES;
        result.codes[i] = xor_all(join_halves(first, second), SHIFT);
    }
    result.scale = zero_extend(gather_halves(blocks, BLOCK_BYTES));
    return result;
}
