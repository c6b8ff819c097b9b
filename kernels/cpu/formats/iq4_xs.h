// iq4_xs: w = d * sc * codebook[q], groups of 32. Twin of qgemm/formats/iq4_xs.py. Nibbles lie as in blocks of iq4_nl, of
// which the levels are looked up as bytes, 128 above what they are.
#define CODE_BITS 8
#include "../blocks_of_32.h"

#define SHIFT 128

// 32 more than sc: four bits of each group side by side, then two.
INLINE uint64_t scales_of_block(const uint8_t* block) {
    uint32_t nibbles;
    uint16_t pairs;
    memcpy(&pairs, block + 2, sizeof pairs), memcpy(&nibbles, block + 4, sizeof nibbles);
    uint64_t low = nibbles, high = pairs;
    low = (low | low << 16) & 0x0000ffff0000ffff, high = (high | high << 24) & 0x000000ff000000ff;
    low = (low | low << 8) & 0x00ff00ff00ff00ff, high = (high | high << 12) & 0x000f000f000f000f;
    low = (low | low << 4) & 0x0f0f0f0f0f0f0f0f, high = (high | high << 6) & 0x0303030303030303;
    return low | high << 4;
}

INLINE unpacked unpack(const uint8_t* block) {
    unpacked found;
    const u8x16 levels = LEVELS_PLUS_SHIFT;
    const u8x64 table = join(levels, levels, levels, levels);
    for (int i = 0; i < 2; ++i) {
        const u8x64 bytes = load64(block + 8 + 64 * i);
        found.codes[2 * i] = lookup(table, low_nibbles(bytes));
        found.codes[2 * i + 1] = lookup(table, high_nibbles(bytes));
    }
    uint16_t half;
    memcpy(&half, block, sizeof half);
    found.scale = with_zeros(half_to_float(half) * (bytes_to_floats(scales_of_block(block)) - 32));
    return found;
}
