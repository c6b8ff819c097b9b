// iq4_nl: w = d * codebook[q]. Twin of qgemm/formats/iq4_nl.py. Levels are looked up as bytes, 128 above what they are.
#define CODE_BITS 8
#include "../blocks_of_32.h"

#define SHIFT 128
#define RAW 2
INLINE void bytes_of(u8x64 bytes[RAW], const uint8_t* blocks) { raw_nibbles(bytes, blocks, 2); }
INLINE void codes_of(u8x64 codes[4], const u8x64 bytes[RAW]) { levels_of_nibbles(codes, bytes); }
INLINE void scales_of(unpacked* found, const uint8_t* blocks) { found->scale = scales_of_blocks(blocks, 0); }
