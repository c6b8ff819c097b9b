// q4_k: w = d * sc * q - dmin * m, q in 0..15. Twin of qgemm/formats/q4_k.py.
#include "../six_bits.h"

#define MINIMUM 1
#define RAW 2
INLINE void bytes_of(u8x64 bytes[RAW], const uint8_t* block) {
    bytes[0] = load64(block + 16), bytes[1] = load64(block + 80);
}
INLINE void codes_of(u8x64 codes[4], const u8x64 bytes[RAW]) { nibbles_of(codes, bytes); }
INLINE void scales_of(unpacked* found, const uint8_t* block) { six_bits_of_block(found, block); }
