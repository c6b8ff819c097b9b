// q8_1: w = d * q, q in -127..127, beside a sum that products of weights do not need. Twin of qgemm/formats/q8_1.py.
#include "../eight_bits.h"

INLINE unpacked unpack(const uint8_t* blocks) { return bytes_of_blocks(blocks, 4); }
