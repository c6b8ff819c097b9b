// q4_1: w = d * q + m, q in 0..15. Twin of qgemm/formats/q4_1.py.
#include "../blocks_of_32.h"

#define MINIMUM 1
#define RAW 2
INLINE void bytes_of(u8x64 bytes[RAW], const uint8_t* blocks) { raw_nibbles(bytes, blocks, 4); }
INLINE void codes_of(u8x64 codes[4], const u8x64 bytes[RAW]) { nibbles_of(codes, bytes); }
INLINE void scales_of(unpacked* found, const uint8_t* blocks) {
    found->scale = scales_of_blocks(blocks, 0), found->minimum = scales_of_blocks(blocks, 2);
}
