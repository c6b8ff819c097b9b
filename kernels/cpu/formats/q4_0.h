// q4_0: w = d * (q - 8), q in 0..15. Twin of qgemm/formats/q4_0.py.
#include "../blocks_of_32.h"

#define ZERO 8
INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked found;
    nibbles_of_blocks(found.codes, blocks, 2);
    found.scale = scales_of_blocks(blocks, 0);
    return found;
}
