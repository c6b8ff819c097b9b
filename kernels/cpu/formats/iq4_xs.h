// iq4_xs: w = d * sc * codebook[q], groups of 32. Twin of qgemm/formats/iq4_xs.py. Nibbles lie as in blocks of iq4_nl,
// of which the levels are looked up as bytes, 128 above what they are.
#define CODE_BITS 8
#include "../blocks_of_32.h"

#define SHIFT 128

// 32 more than sc: four bits of each group side by side, then two.
INLINE uint64_t scales_of_block(const uint8_t* block) {
    uint64_t low = word_at(block + 4), high = half_at(block + 2);
    low = (low | low << 16) & 0x0000ffff0000ffff, high = (high | high << 24) & 0x000000ff000000ff;
    low = (low | low << 8) & 0x00ff00ff00ff00ff, high = (high | high << 12) & 0x000f000f000f000f;
    low = (low | low << 4) & 0x0f0f0f0f0f0f0f0f, high = (high | high << 6) & 0x0303030303030303;
    return low | high << 4;
}

#define RAW 2
INLINE void bytes_of(u8x64 bytes[RAW], const uint8_t* block) {
    bytes[0] = load64(block + 8), bytes[1] = load64(block + 72);
}
INLINE void codes_of(u8x64 codes[4], const u8x64 bytes[RAW]) { levels_of_nibbles(codes, bytes); }
INLINE void scales_of(unpacked* found, const uint8_t* block) {
    found->scale = with_zeros(half_to_float(half_at(block)) * (bytes_to_floats(scales_of_block(block)) - 32));
}
