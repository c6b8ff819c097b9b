// iq2_xxs: w = d * (2 sc + 1) / 8 * level, 256 points of eight weights. Twin of qgemm/formats/iq2_xxs.py.
#define GROUPS 8
#define SHIFT 64
#include "../grid.h"

INLINE unpacked unpack(const uint8_t* block) {
    unpacked w;
    grid_points points;
    uint64_t signs[4], sc = 0;
    for (int i = 0; i < 32; ++i) points.point[i] = GRID[block[2 + 8 * (i / 4) + i % 4]];
    for (int i = 0; i < 8; ++i) sc |= (uint64_t)(block[2 + 8 * i + 7] >> 4) << 8 * i;
    for (int v = 0; v < 4; ++v) signs[v] = unpack_signs(load_word(block + 6 + 16 * v), load_word(block + 14 + 16 * v));
    points_to_codes(w.codes, &points, signs);
    w.scale = zero_extend(odd_scales(half_to_float(load_half(block)) * 0.125f, sc));
    return w;
}
