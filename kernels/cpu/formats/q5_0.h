// q5_0: w = d * (q - 16), q in 0..31. Twin of qgemm/formats/q5_0.py.
#include "../blocks_of_32.h"

#define ZERO 16
INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked found;
    nibbles_of_blocks(found.codes, blocks, 6);
    fifths_of_blocks(found.codes, blocks, 2);
    found.scale = scales_of_blocks(blocks, 0);
    return found;
}
