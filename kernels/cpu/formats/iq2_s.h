// iq2_s: w = d * (2 sc + 1) / 8 * level, 1024 points of eight weights. Twin of qgemm/formats/iq2_s.py.
#define GROUPS 16
#define SHIFT 64
#include "../grid.h"

INLINE unpacked unpack(const uint8_t* block) {
    unpacked found;
    grid_points points;
    uint64_t signs[4];
    for (int i = 0; i < 32; ++i) points.of[i] = GRID[block[2 + i] | (block[66 + i / 4] >> 2 * (i % 4) & 3) << 8];
    memcpy(signs, block + 34, sizeof signs);
    codes_of_points(found.codes, &points, signs);
    found.scale = sixteen_odd_scales(half_to_float(half_at(block)) * 0.125f, bytes_of_nibbles(word_at(block + 74)),
                                     bytes_of_nibbles(word_at(block + 78)));
    return found;
}
