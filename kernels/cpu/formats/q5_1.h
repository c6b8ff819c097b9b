// q5_1: w = d * q + m, q in 0..31. Twin of qgemm/formats/q5_1.py.
#define CODE_BITS 5
#include "../blocks_of_32.h"

#define MINIMUM 1
INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked w;
    load_nibble_codes(w.codes, blocks, 8);
    add_fifth_bits(w.codes, blocks, 4);
    w.scale = load_block_scales(blocks, 0);
    w.minimum = load_block_scales(blocks, 2);
    return w;
}
