// q5_k: q4_k with a fifth bit: bit g of byte j of 32 is that of weight 32 g + j. Twin of qgemm/formats/q5_k.py.
#include "../six_bits.h"

#define MINIMUM 1
INLINE unpacked unpack(const uint8_t* block) {
    unpacked found;
    six_bits_of_block(&found, block);
    const u8x16 first = load16(block + 16), second = load16(block + 32);
    const u8x64 fifths = join(first, second, first, second);
    for (int i = 0; i < 2; ++i) {
        const u8x64 bytes = load64(block + 48 + 64 * i);
        found.codes[2 * i] = low_nibbles(bytes), found.codes[2 * i + 1] = high_nibbles(bytes);
        for (int high = 0; high < 2; ++high) {
            uint8_t bit[64];
            for (int j = 0; j < 64; ++j) bit[j] = 1 << (4 * i + high + 2 * (j / 32));
            found.codes[2 * i + high] |= (u8x64)((fifths & load64(bit)) != 0) & (u8x64)FILL64(16);
        }
    }
    return found;
}
