// q8_0: w = d * q, q in -128..127. Twin of qgemm/formats/q8_0.py.
#include "../signed_bytes.h"

INLINE unpacked unpack(const uint8_t* blocks) { return unpack_signed_bytes(blocks, 2); }
