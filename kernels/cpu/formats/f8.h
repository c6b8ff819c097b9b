// f8_e4m3 and f8_e5m2: w = d * number, d a float of BLOCK_WEIGHTS weights. Twin of qgemm/formats/f8.py. MANTISSA_BITS: 3 or 2.
#include "../unpacked.h"

#define PLAIN

// The largest codes of a float are NaN, of five bits of exponent the first of them infinity.
enum { NOT_FINITE = MANTISSA_BITS == 3 ? 127 : 124, NOT_FINITE_BITS = MANTISSA_BITS == 3 ? 0x7fc00000 : 0x7f800000 };

// Exponent and mantissa as those of a float, also a subnormal one, whose bias is larger.
INLINE f32x16 numbers_of(i32x16 code) {
    const f32_part unit = (f32_part){0} + (MANTISSA_BITS == 3 ? 0x1p120f : 0x1p112f);
    f32x16 found;
    EACH {
        const i32_part placed = code.part[i] << 24 >> (MANTISSA_BITS + 1);  // the sign in all bits above
        const i32_part above = ((code.part[i] & 127) >= NOT_FINITE) & NOT_FINITE_BITS;
        found.part[i] = (f32_part)((placed & (int32_t)(0x80000000 | 127 << (23 - MANTISSA_BITS))) | above) * unit;
    }
    return found;
}

INLINE f32x16 sixteen(const uint8_t* blocks, int i) {
    const uint8_t* block = blocks + 16 * i / BLOCK_WEIGHTS * BLOCK_BYTES;
    float d;
    memcpy(&d, block, sizeof d);
    return mul_all(numbers_of(sixteen_ints(block + sizeof d + 16 * i % BLOCK_WEIGHTS)), d);
}
