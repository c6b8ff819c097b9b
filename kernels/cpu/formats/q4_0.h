// q4_0: w = d * (q - 8), q in 0..15. Twin of qgemm/formats/q4_0.py.
#include "../blocks_of_32.h"

#define ZERO 8
#define RAW 2
INLINE void bytes_of(u8x64 bytes[RAW], const uint8_t* blocks) { raw_nibbles(bytes, blocks, 2); }
INLINE void codes_of(u8x64 codes[4], const u8x64 bytes[RAW]) { nibbles_of(codes, bytes); }
INLINE void scales_of(unpacked* found, const uint8_t* blocks) { found->scale = scales_of_blocks(blocks, 0); }
