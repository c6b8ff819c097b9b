// f8_e4m3 and f8_e5m2: w = d * number, d a float of BLOCK_WEIGHTS weights. Twin of qgemm/formats/f8.py.
// MANTISSA_BITS: 3 or 2.
#include "../unpacked.h"

#define PLAIN

VECTOR(uint16_t, u16x16, 32);

// e5m2 is the upper byte of a half. Of e4m3 exponent and mantissa, moved one bit below the sign, are those of a half
// that is 2^-8 of the number, but for the two codes of NaN.
INLINE f32x16 numbers_of(u8x16 codes) {
    const u16x16 wide = __builtin_convertvector(codes, u16x16) << 8;
#if MANTISSA_BITS == 2
    return sixteen_halves(&wide);
#else
    VECTOR(int16_t, i16x16, 32);
    const u16x16 placed = (u16x16)((i16x16)wide >> 1) & 0xbf80, nan = (u16x16)((placed & 0x3f80) == 0x3f80) & 0x7e00;
    const u16x16 halves = placed | nan;
    return mul_all(sixteen_halves(&halves), 256);
#endif
}

INLINE f32x16 sixteen(const uint8_t* blocks, int i) {
    const uint8_t* block = blocks + 16 * i / BLOCK_WEIGHTS * BLOCK_BYTES;
    float d;
    memcpy(&d, block, sizeof d);
    return mul_all(numbers_of(load16(block + sizeof d + 16 * i % BLOCK_WEIGHTS)), d);
}
