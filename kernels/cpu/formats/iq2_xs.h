// iq2_xs: w = d * (2 sc + 1) / 8 * level, 512 points of eight weights. Twin of qgemm/formats/iq2_xs.py.
#define GROUPS 16
#define SHIFT 64
#include "../grid.h"

INLINE unpacked unpack(const uint8_t* block) {
    unpacked found;
    grid_points points;
    uint64_t signs[4] = {0, 0, 0, 0};
    for (int i = 0; i < 32; ++i) {
        const uint16_t word = half_at(block + 2 + 2 * i);
        points.of[i] = GRID[word & 511];
        signs[i / 8] |= (uint64_t)(word >> 9) << 8 * (i % 8);
    }
    for (int v = 0; v < 4; ++v) signs[v] = with_parity(signs[v]);
    codes_of_points(found.codes, &points, signs);
    found.scale = sixteen_odd_scales(half_to_float(half_at(block)) * 0.125f, bytes_of_nibbles(word_at(block + 66)),
                                     bytes_of_nibbles(word_at(block + 70)));
    return found;
}
