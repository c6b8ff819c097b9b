// q6_k: w = d * sc * (q - 32), q in 0..63, groups of 16. Twin of qgemm/formats/q6_k.py.
#include "../unpacked.h"

// Bytes 64 h + 32 p + j of ql have weights 128 h + 32 p + j low and those 64 above high. Vectors 2 p + high have those
// of both h, so that the two bits of all their weights are the same of byte 32 h + j of qh.
#define SHIFT 32
#define ACCS 4
#define ACC_OF(vector) (vector)
#define LANES 4
#define GROUPS 16
#define QUAD_GROUP(acc, quad) (8 * ((quad) / 2) + 4 * ((acc) % 2) + 2 * ((acc) / 2) + (quad) % 2)
#define WEIGHT_OF(v, i) (128 * ((i) / 32) + 64 * ((v) % 2) + 32 * ((v) / 2) + (i) % 32)

#define RAW 3
INLINE void bytes_of(u8x64 bytes[RAW], const uint8_t* block) {
    bytes[0] = join_halves(block, block + 64), bytes[1] = join_halves(block + 32, block + 96);
    bytes[2] = load64(block + 128);
}
INLINE void codes_of(u8x64 codes[4], const u8x64 bytes[RAW]) {
    nibbles_of(codes, bytes);
    codes[0] = or_both(codes[0], and_all(shift_left(bytes[2], 4), 0x30));
    codes[1] = or_both(codes[1], and_all(bytes[2], 0x30));
    codes[2] = or_both(codes[2], and_all(shift_left(bytes[2], 2), 0x30));
    codes[3] = or_both(codes[3], and_all(shift_right(bytes[2], 2), 0x30));
}
INLINE void scales_of(unpacked* found, const uint8_t* block) {
    found->scale = mul_all(sixteen_signed(block + 192), half_to_float(half_at(block + 208)));
}
