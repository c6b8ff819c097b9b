// tq1_0: w = d * (q - 1), q in 0..2, five in a byte. Twin of qgemm/formats/tq1_0.py. The scale of 256 weights is that of
// each 32.
#include "../in_order.h"

#define ZERO 1

// The first digit to the base 3 of bytes as fractions: the whole part of three times each.
INLINE u8x16 first_digits(u8x16 bytes) { return -((u8x16)(bytes > 85) + (u8x16)(bytes > 170)); }

INLINE unpacked unpack(const uint8_t* block) {
    unpacked found;
    u8x16 first = load16(block), second = load16(block + 16), third = load16(block + 32), digits[16];
    for (int i = 0; i < 5; ++i) {  // the rest of a fraction, three times as large, has the next digit
        digits[2 * i] = first_digits(first), digits[2 * i + 1] = first_digits(second);
        digits[10 + i] = first_digits(third);
        first = first + first + first, second = second + second + second, third = third + third + third;
    }
    uint32_t rest;
    memcpy(&rest, block + 48, sizeof rest);
    const uint8_t* bytes = (const uint8_t*)&rest;
    uint8_t powers[16];
    for (int i = 0, power = 1; i < 4; ++i, power *= 3)
        for (int j = 0; j < 4; ++j) powers[4 * i + j] = (uint8_t)(bytes[j] * power);
    digits[15] = first_digits(load16(powers));
    for (int v = 0; v < 4; ++v)
        found.codes[v] = join(digits[4 * v], digits[4 * v + 1], digits[4 * v + 2], digits[4 * v + 3]);
    uint16_t half;
    memcpy(&half, block + 52, sizeof half);
    found.scale = with_zeros((f32x8){0} + half_to_float(half));
    return found;
}
