// iq4_xs: w = d * sc * codebook[q], groups of 32. Twin of qgemm/formats/iq4_xs.py. A group's nibbles are stored as in a
// block of iq4_nl. Codes are the levels of the codebook + 128.
#define CODE_BITS 8
#define SHIFT 128
#include "../blocks_of_32.h"

// sc + 32 of eight groups, one in each byte: the low four bits are stored for all groups, then the high two.
INLINE uint64_t unpack_six_bit_scales(const uint8_t* block) {
    uint64_t low = load_word(block + 4), high = load_half(block + 2);
    low = (low | low << 16) & 0x0000ffff0000ffff, high = (high | high << 24) & 0x000000ff000000ff;
    low = (low | low << 8) & 0x00ff00ff00ff00ff, high = (high | high << 12) & 0x000f000f000f000f;
    low = (low | low << 4) & 0x0f0f0f0f0f0f0f0f, high = (high | high << 6) & 0x0303030303030303;
    return low | high << 4;
}

#define RAW 2
INLINE void load_raw(u8x64 bytes[RAW], const uint8_t* block) {
    bytes[0] = load64(block + 8), bytes[1] = load64(block + 72);
}
INLINE void raw_to_codes(u8x64 codes[4], const u8x64 bytes[RAW]) { lookup_nibbles(codes, bytes); }
#define SCALE_SHORTS 4
INLINE void copy_scales(uint16_t to[SCALE_SHORTS], const uint8_t* block) { memcpy(to, block, 2 * SCALE_SHORTS); }
INLINE void load_tile_scales(f32x16 scale[8], f32x16* minimum, const uint16_t fields[SCALE_SHORTS][16]) {
    (void)minimum;
    const f32x16 d = load_halves(fields[0]);
    const i32x16 high = load_high_shorts(fields[1]);
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
        const i32x16 low = bit_field(load_high_shorts(fields[2 + g / 4]), 16 + 4 * (g % 4), 15);
        const i32x16 sc = or_ints(low, shift_ints(bit_field(high, 16 + 2 * g, 3), 4));
        scale[g] = mul(d, add_floats(to_float(sc), all_floats(-32)));
    }
}
INLINE void load_scales(unpacked* w, const uint8_t* block) {
    w->scale = zero_extend(half_to_float(load_half(block)) * (bytes_to_floats(unpack_six_bit_scales(block)) - 32));
}
