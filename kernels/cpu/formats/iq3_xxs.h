// iq3_xxs: w = d * (2 sc + 1) / 4 * level, 256 points of four weights. Twin of qgemm/formats/iq3_xxs.py.
#define GROUPS 8
#define SHIFT 64
#include "../grid.h"

INLINE unpacked unpack(const uint8_t* block) {
    unpacked found;
    grid_points points;
    uint64_t signs[4], sc = 0;
    for (int i = 0; i < 64; ++i) points.of[i] = GRID[block[2 + i]];
    for (int i = 0; i < 8; ++i) sc |= (uint64_t)(block[66 + 4 * i + 3] >> 4) << 8 * i;
    for (int v = 0; v < 4; ++v) signs[v] = signs_of_words(word_at(block + 66 + 8 * v), word_at(block + 70 + 8 * v));
    codes_of_points(found.codes, &points, signs);
    found.scale = with_zeros(odd_scales(half_to_float(half_at(block)) * 0.25f, sc));
    return found;
}
