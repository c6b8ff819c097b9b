// iq1_m: w = d * (2 sc + 1) / 8 * level, 4096 points of eight weights. Twin of qgemm/formats/iq1_m.py.
#define CODE_BITS 5
#define GROUPS 16
#define SHIFT 16
#define POINT_NUMBER(block, i) ((block)[(i)] | ((block)[32 + (i) / 2] >> 4 * ((i) % 2) & 15) << 8)
#include "../grid.h"

// The lower four fields of three bits of two words of 16 bits, one in each byte.
INLINE uint64_t spread_scales(uint32_t words) {
    const uint64_t w = (words & 0xfff) | (uint64_t)(words & 0x0fff0000) << 16;
    const uint64_t low = (w & 0x0000003f0000003f) | (w & 0x00000fc000000fc0) << 10;
    return (low & 0x0007000700070007) | (low & 0x0038003800380038) << 5;
}

INLINE unpacked unpack(const uint8_t* block) {
    unpacked w;
    uint16_t half = 0;
    for (int i = 0; i < 4; ++i) half |= (uint16_t)(load_half(block + 48 + 2 * i) >> 12 << 4 * i);
    load_grid_levels(w.codes, block), add_shift(w.codes);
    w.scale = odd_scales_16(half_to_float(half) * 0.125f, spread_scales(load_word(block + 48)),
                            spread_scales(load_word(block + 52)));
    return w;
}
