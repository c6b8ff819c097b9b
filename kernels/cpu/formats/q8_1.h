// q8_1: w = d * q, q in -127..127. Twin of qgemm/formats/q8_1.py. Products do not need the sum that a block also
// stores.
#include "../signed_bytes.h"

INLINE unpacked unpack(const uint8_t* blocks) { return unpack_signed_bytes(blocks, 4); }
