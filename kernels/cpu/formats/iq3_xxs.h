// iq3_xxs: w = d * (2 sc + 1) / 4 * level, 256 points of four weights. Twin of qgemm/formats/iq3_xxs.py.
#define GROUPS 8
#define SHIFT 64
#include "../grid.h"

INLINE unpacked unpack(const uint8_t* block) {
    unpacked w;
    grid_points points;
    uint64_t signs[4], sc = 0;
    for (int i = 0; i < 64; ++i) points.point[i] = GRID[block[2 + i]];
    for (int i = 0; i < 8; ++i) sc |= (uint64_t)(block[66 + 4 * i + 3] >> 4) << 8 * i;
    for (int v = 0; v < 4; ++v) signs[v] = unpack_signs(load_word(block + 66 + 8 * v), load_word(block + 70 + 8 * v));
    points_to_codes(w.codes, &points, signs);
    w.scale = zero_extend(odd_scales(half_to_float(load_half(block)) * 0.25f, sc));
    return w;
}
