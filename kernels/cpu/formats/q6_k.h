// q6_k: w = d * sc * (q - 32), q in 0..63, groups of 16. Twin of qgemm/formats/q6_k.py.
#include "../unpacked.h"

// Bytes 64 h + 32 p + j of ql have weights 128 h + 32 p + j low and those 64 above high. Vectors 2 p + high have those of
// both h, so that the two bits of all their weights are the same of byte 32 h + j of qh.
#define SHIFT 32
#define ACCS 4
#define ACC_OF(vector) (vector)
#define LANES 4
#define GROUPS 16
#define QUAD_GROUP(acc, quad) (8 * ((quad) / 2) + 4 * ((acc) % 2) + 2 * ((acc) / 2) + (quad) % 2)
#define WEIGHT_OF(v, i) (128 * ((i) / 32) + 64 * ((v) % 2) + 32 * ((v) / 2) + (i) % 32)

INLINE unpacked unpack(const uint8_t* block) {
    unpacked found;
    const u8x64 bits = load64(block + 128);
    const u8x64 two[4] = {shift_left(bits, 4), bits, shift_left(bits, 2), shift_right(bits, 2)};
    for (int p = 0; p < 2; ++p) {
        const u8x64 bytes = join_halves(block + 32 * p, block + 64 + 32 * p);
        found.codes[2 * p] = or_both(low_nibbles(bytes), and_all(two[2 * p], 0x30));
        found.codes[2 * p + 1] = or_both(high_nibbles(bytes), and_all(two[2 * p + 1], 0x30));
    }
    uint16_t half;
    memcpy(&half, block + 208, sizeof half);
    found.scale = mul_all(sixteen_signed(block + 192), half_to_float(half));
    return found;
}
