// q5_k: q4_k with a fifth bit. Bit g of byte j of qh belongs to weight 32 g + j. Twin of qgemm/formats/q5_k.py.
#define CODE_BITS 5
#include "../six_bit_scales.h"

#define MINIMUM 1

// Bit 4 i + high of a byte of the last vector belongs to vector 2 i + high; in its upper half the bits are stored two
// places higher.
#define RAW 3
INLINE void load_raw(u8x64 bytes[RAW], const uint8_t* block) {
    bytes[0] = load64(block + 48), bytes[1] = load64(block + 112);
    bytes[2] = repeat_shifted(block + 16, 2);
}
INLINE void raw_to_codes(u8x64 codes[4], const u8x64 bytes[RAW]) {
    split_nibbles(codes, bytes);
    const u8x64 bit0 = shift_left(bytes[2], 4), bit1 = shift_left(bytes[2], 3), bit3 = shift_right(bytes[2], 1);
    codes[0] = or_bytes(codes[0], and_all(bit0, 16)), codes[1] = or_bytes(codes[1], and_all(bit1, 16));
    codes[2] = or_bytes(codes[2], and_all(bytes[2], 16)), codes[3] = or_bytes(codes[3], and_all(bit3, 16));
}
INLINE void load_scales(unpacked* w, const uint8_t* block) { load_six_bit_scales(w, block); }
