// iq4_nl: w = d * codebook[q]. Twin of qgemm/formats/iq4_nl.py. Codes are the levels of the codebook + 128.
#define CODE_BITS 8
#define SHIFT 128
#include "../blocks_of_32.h"

#include "../half_scales.h"

#define RAW 2
INLINE void load_raw(u8x64 bytes[RAW], const uint8_t* blocks) { raw_nibbles(bytes, blocks, 2); }
INLINE void raw_to_codes(u8x64 codes[4], const u8x64 bytes[RAW]) { lookup_nibbles(codes, bytes); }
INLINE void load_scales(unpacked* w, const uint8_t* blocks) { w->scale = load_block_scales(blocks, 0); }
