// q3_k: w = d * sc * (q - 4), q in 0..7, groups of 16. Twin of qgemm/formats/q3_k.py.
#include "../two_bits.h"

#define SHIFT 4
#define LANES 4
#define GROUPS 16
#define QUAD_GROUP(acc, quad) (8 * ((quad) / 2) + 2 * (acc) + (quad) % 2)

// The high bit of weight 32 i + j is bit i of byte j: of vector v those of bits v and 4 + v.
#define THIRDS_OF(bit) \
    {EIGHT(bit), EIGHT(bit), EIGHT(bit), EIGHT(bit), EIGHT(16 * bit), EIGHT(16 * bit), EIGHT(16 * bit), EIGHT(16 * bit)}
static const uint8_t THIRDS[4][64] = {THIRDS_OF(1), THIRDS_OF(2), THIRDS_OF(4), THIRDS_OF(8)};

INLINE unpacked unpack(const uint8_t* block) {
    unpacked found;
    const u8x16 first = load16(block), second = load16(block + 16);
    const u8x64 thirds = join(first, second, first, second);
    two_bits_of_bytes(found.codes, block + 32);
    for (int v = 0; v < 4; ++v) found.codes[v] = or_both(found.codes[v], where_bits(thirds, load64(THIRDS[v]), 4));
    uint16_t half;
    uint64_t nibbles;
    uint32_t rest;
    memcpy(&half, block + 108, sizeof half);
    memcpy(&nibbles, block + 96, sizeof nibbles), memcpy(&rest, block + 104, sizeof rest);
    const uint64_t low = 0x0f0f0f0f0f0f0f0f, two = 0x3030303030303030;  // of 32 more than sc
    const uint64_t sc = (nibbles & low) | (((uint64_t)(rest >> 2) << 32 | (rest & 0x03030303)) << 4 & two);
    const uint64_t sc8 = (nibbles >> 4 & low) | (((uint64_t)(rest >> 6) << 32 | (rest >> 4 & 0x03030303)) << 4 & two);
    uint8_t scales[16];
    memcpy(scales, &sc, sizeof sc), memcpy(scales + 8, &sc8, sizeof sc8);
    found.scale = mul_all(add_floats(to_float(sixteen_ints(scales)), all_floats(-32)), half_to_float(half));
    return found;
}
