// iq4_nl: w = d * codebook[q]. Twin of qgemm/formats/iq4_nl.py. Levels are looked up as bytes, 128 above what they are.
#define CODE_BITS 8
#include "../blocks_of_32.h"

#define SHIFT 128
INLINE unpacked unpack(const uint8_t* blocks) {
    const u8x16 levels = LEVELS_PLUS_SHIFT;
    const u8x64 table = join(levels, levels, levels, levels);
    unpacked found;
    nibbles_of_blocks(found.codes, blocks, 2);
    for (int i = 0; i < 4; ++i) found.codes[i] = lookup(table, found.codes[i]);
    found.scale = scales_of_blocks(blocks, 0);
    return found;
}
