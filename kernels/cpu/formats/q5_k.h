// q5_k: q4_k with a fifth bit: bit g of byte j of 32 is that of weight 32 g + j. Twin of qgemm/formats/q5_k.py.
#include "../six_bits.h"

#define MINIMUM 1

// Of the two groups of each vector: the bit of the first 32 times 2^0, of the others times 2^2.
#define FIFTHS_OF(bit) \
    {EIGHT(bit), EIGHT(bit), EIGHT(bit), EIGHT(bit), EIGHT(4 * bit), EIGHT(4 * bit), EIGHT(4 * bit), EIGHT(4 * bit)}
static const uint8_t FIFTHS[4][64] = {FIFTHS_OF(1), FIFTHS_OF(2), FIFTHS_OF(16), FIFTHS_OF(32)};

INLINE unpacked unpack(const uint8_t* block) {
    unpacked found;
    six_bits_of_block(&found, block);
    const u8x64 fifths = join_halves(block + 16, block + 16);
    for (int i = 0; i < 2; ++i) {
        const u8x64 bytes = load64(block + 48 + 64 * i);
        found.codes[2 * i] = or_both(low_nibbles(bytes), where_bits(fifths, load64(FIFTHS[2 * i]), 16));
        found.codes[2 * i + 1] = or_both(high_nibbles(bytes), where_bits(fifths, load64(FIFTHS[2 * i + 1]), 16));
    }
    return found;
}
