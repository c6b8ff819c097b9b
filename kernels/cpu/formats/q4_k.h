// q4_k: w = d * sc * q - dmin * m, q in 0..15. Twin of qgemm/formats/q4_k.py.
#include "../six_bits.h"

#define MINIMUM 1
INLINE unpacked unpack(const uint8_t* block) {
    unpacked found;
    six_bits_of_block(&found, block);
    for (int i = 0; i < 2; ++i) {
        const u8x64 bytes = load64(block + 16 + 64 * i);
        found.codes[2 * i] = low_nibbles(bytes), found.codes[2 * i + 1] = high_nibbles(bytes);
    }
    return found;
}
