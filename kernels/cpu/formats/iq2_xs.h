// iq2_xs: w = d * (2 sc + 1) / 8 * level, 512 points of eight weights. Twin of qgemm/formats/iq2_xs.py.
#define GROUPS 16
#define SHIFT 64
#include "../grid.h"

INLINE unpacked unpack(const uint8_t* block) {
    unpacked w;
    grid_points points;
    uint64_t signs[4] = {0, 0, 0, 0};
    for (int i = 0; i < 32; ++i) {
        const uint16_t word = load_half(block + 2 + 2 * i);
        points.point[i] = GRID[word & 511];
        signs[i / 8] |= (uint64_t)(word >> 9) << 8 * (i % 8);
    }
    for (int v = 0; v < 4; ++v) signs[v] = add_parity_sign(signs[v]);
    points_to_codes(w.codes, &points, signs);
    w.scale = odd_scales_16(half_to_float(load_half(block)) * 0.125f, spread_nibbles(load_word(block + 66)),
                            spread_nibbles(load_word(block + 70)));
    return w;
}
