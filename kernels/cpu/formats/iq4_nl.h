// iq4_nl: w = d * codebook[q]. Twin of qgemm/formats/iq4_nl.py. Levels are looked up as bytes, 128 above what they are.
#define CODE_BITS 8
#include "../blocks_of_32.h"

#define SHIFT 128
INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked found;
    levels_of_blocks(found.codes, blocks, 2);
    found.scale = scales_of_blocks(blocks, 0);
    return found;
}
