// iq3_s: w = d * (2 sc + 1) * level, 512 points of four weights. Twin of qgemm/formats/iq3_s.py.
#define GROUPS 8
#define SHIFT 16
#include "../grid.h"

INLINE unpacked unpack(const uint8_t* block) {
    unpacked w;
    grid_points points;
    uint64_t signs[4];
    for (int i = 0; i < 64; ++i) points.point[i] = GRID[block[2 + i] | (block[66 + i / 8] >> i % 8 & 1) << 8];
    memcpy(signs, block + 74, sizeof signs);
    points_to_codes(w.codes, &points, signs);
    w.scale = zero_extend(odd_scales(half_to_float(load_half(block)), spread_nibbles(load_word(block + 106))));
    return w;
}
