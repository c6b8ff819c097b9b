// iq2_s: w = d * (2 sc + 1) / 8 * level, 1024 points of eight weights. Twin of qgemm/formats/iq2_s.py.
#define GROUPS 16
#define SHIFT 64
#include "../grid.h"

INLINE unpacked unpack(const uint8_t* block) {
    unpacked w;
    grid_points points;
    uint64_t signs[4];
    for (int i = 0; i < 32; ++i) points.point[i] = GRID[block[2 + i] | (block[66 + i / 4] >> 2 * (i % 4) & 3) << 8];
    memcpy(signs, block + 34, sizeof signs);
    points_to_codes(w.codes, &points, signs);
    w.scale = odd_scales_16(half_to_float(load_half(block)) * 0.125f, spread_nibbles(load_word(block + 74)),
                            spread_nibbles(load_word(block + 78)));
    return w;
}
