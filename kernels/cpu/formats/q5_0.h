// q5_0: w = d * (q - 16), q in 0..31. Twin of qgemm/formats/q5_0.py.
#define CODE_BITS 5
#include "../blocks_of_32.h"

#define ZERO 16
INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked w;
    load_nibble_codes(w.codes, blocks, 6);
    add_fifth_bits(w.codes, blocks, 2);
    w.scale = load_block_scales(blocks, 0);
    return w;
}
