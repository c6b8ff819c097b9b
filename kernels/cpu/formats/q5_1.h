// q5_1: w = d * q + m, q in 0..31. Twin of qgemm/formats/q5_1.py.
#include "../blocks_of_32.h"

#define MINIMUM 1
INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked found;
    nibbles_of_blocks(found.codes, blocks, 8);
    fifths_of_blocks(found.codes, blocks, 4);
    found.scale = scales_of_blocks(blocks, 0);
    found.minimum = scales_of_blocks(blocks, 2);
    return found;
}
