// q8_0: w = d * q, q in -128..127. Twin of qgemm/formats/q8_0.py.
#include "../eight_bits.h"

INLINE unpacked unpack(const uint8_t* blocks) { return bytes_of_blocks(blocks, 2); }
