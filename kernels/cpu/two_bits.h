// Codes of two bits: byte 32 h + j of 64 has in bits 2i and 2i + 1 that of weight 128 h + 32 i + j, which is of vector i.
#pragma once

#include "unpacked.h"

INLINE void two_bits_of_bytes(u8x64 codes[4], const uint8_t* bytes) {
    const u8x64 all = load64(bytes);
    for (int i = 0; i < 4; ++i) codes[i] = and_all(shift_right(all, 2 * i), 3);
}

#define ACCS 4
#define ACC_OF(vector) (vector)
#define WEIGHT_OF(v, i) (128 * ((i) / 32) + 32 * (v) + (i) % 32)
