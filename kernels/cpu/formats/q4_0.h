// q4_0: w = d * (q - 8), q in 0..15. Twin of qgemm/formats/q4_0.py.
#define CODE_BITS 4
#include "../blocks_of_32.h"

#define ZERO 8
#include "../half_scales.h"

#define RAW 2
INLINE void load_raw(u8x64 bytes[RAW], const uint8_t* blocks) { raw_nibbles(bytes, blocks, 2); }
INLINE void raw_to_codes(u8x64 codes[4], const u8x64 bytes[RAW]) { split_nibbles(codes, bytes); }
INLINE void load_scales(unpacked* w, const uint8_t* blocks) { w->scale = load_block_scales(blocks, 0); }
