// q5_k: q4_k with a fifth bit: bit g of byte j of 32 is that of weight 32 g + j. Twin of qgemm/formats/q5_k.py.
#include "../six_bits.h"

#define MINIMUM 1

// Bit 4 i + high of a byte of the last vector is that of vector 2 i + high: its upper half is two bits further.
#define RAW 3
INLINE void bytes_of(u8x64 bytes[RAW], const uint8_t* block) {
    bytes[0] = load64(block + 48), bytes[1] = load64(block + 112);
    bytes[2] = halves_apart(block + 16, 2);
}
INLINE void codes_of(u8x64 codes[4], const u8x64 bytes[RAW]) {
    nibbles_of(codes, bytes);
    const u8x64 one = shift_left(bytes[2], 4), two = shift_left(bytes[2], 3), five = shift_right(bytes[2], 1);
    codes[0] = or_both(codes[0], and_all(one, 16)), codes[1] = or_both(codes[1], and_all(two, 16));
    codes[2] = or_both(codes[2], and_all(bytes[2], 16)), codes[3] = or_both(codes[3], and_all(five, 16));
}
INLINE void scales_of(unpacked* found, const uint8_t* block) { six_bits_of_block(found, block); }
