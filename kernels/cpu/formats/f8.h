// f8_e4m3 and f8_e5m2: w = d * number, with one float d for BLOCK_WEIGHTS weights. Twin of qgemm/formats/f8.py.
//
// Macro: MANTISSA_BITS, 3 or 2.
#include "../unpacked.h"

#define PLAIN

VECTOR(uint16_t, u16x16, 32);

// e5m2 is the upper byte of a half. Exponent and mantissa of e4m3, moved one bit below the sign, form a half that is
// 2^-8 of the number, except for the two codes of NaN.
INLINE f32x16 decode_f8(u8x16 codes) {
    const u16x16 wide = __builtin_convertvector(codes, u16x16) << 8;
#if MANTISSA_BITS == 2
    return load_halves(&wide);
#else
    VECTOR(int16_t, i16x16, 32);
    const u16x16 placed = (u16x16)((i16x16)wide >> 1) & 0xbf80, nan = (u16x16)((placed & 0x3f80) == 0x3f80) & 0x7e00;
    const u16x16 halves = placed | nan;
    return mul_all(load_halves(&halves), 256);
#endif
}

INLINE f32x16 sixteen_weights(const uint8_t* blocks, int i) {
    const uint8_t* block = blocks + 16 * i / BLOCK_WEIGHTS * BLOCK_BYTES;
    float d;
    memcpy(&d, block, sizeof d);
    return mul_all(decode_f8(load16(block + sizeof d + 16 * i % BLOCK_WEIGHTS)), d);
}
