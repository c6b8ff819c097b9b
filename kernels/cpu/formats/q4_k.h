// q4_k: w = d * sc * q - dmin * m, q in 0..15. Twin of qgemm/formats/q4_k.py.
#define CODE_BITS 4
#include "../six_bit_scales.h"

#define MINIMUM 1
#define RAW 2
INLINE void load_raw(u8x64 bytes[RAW], const uint8_t* block) {
    bytes[0] = load64(block + 16), bytes[1] = load64(block + 80);
}
INLINE void raw_to_codes(u8x64 codes[4], const u8x64 bytes[RAW]) { split_nibbles(codes, bytes); }
INLINE void load_scales(unpacked* w, const uint8_t* block) { load_six_bit_scales(w, block); }
